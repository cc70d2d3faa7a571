/* gpt_files.h - weight files for gpt.h: Hugging Face GPT-2, Llama, Mistral, Mixtral, Qwen 2 and 3,
   Gemma 2 and 3 (text), DeepSeek-V3, and llm.c - public domain or MIT, at your choice

   Include gpt_files.h after dt_zero.h and gpt.h. All functions are static. `path` names a
   safetensors file, a folder with model.safetensors or model.safetensors.index.json, or an llm.c
   model. config.json is in the folder of the safetensors file.

       gpt_config c = gpt_config_from(ctx, path);  // sizes; set dtype, recompute, dropout yourself
       gpt        m = gpt_register(ctx, c);
       dt_zero_make(...);                // optional: else the first use allocates the parameters
       gpt_load(&m, path);               // every rank reads its local slices
       gpt_export(&m, zero, "folder");   // every rank; writes model.safetensors and config.json for
                                         // transformers, or an llm.c model if the path is "x.bin".
                                         // gpt_save does this on one rank

   A mask, a rotary table or a tied head in the file is ignored. These are errors: any other unknown
   tensor, a shape or a number of layers that differs from the model's, and a feature that gpt.h
   does not have. The padding of llm.c's vocabulary is dropped. An error fails the context for good,
   so use a separate context to find out whether a file can be read. */
#ifndef GPT_FILES_H
#define GPT_FILES_H

// ==== Names ======================================================================================

/* The names of each parameter of gpt_param_rows in the three file formats. The column `llama` also
   holds for Mistral, Qwen and Gemma. In the file the names of layer N's parameters begin with
   "h.N." for GPT-2 and with "layers.N." for Llama. All names except the head's also have a prefix,
   "transformer." or "model.", which some files omit. llm.c stores the same parameter of all layers
   in one tensor. GPT-2 stores the matrices of its layers transposed, (in,out). Mixtral and
   DeepSeek-V3 store each expert in tensors of its own (the '*' in gpt_names), and DeepSeek-V3 gives
   the shared experts another name than a dense MLP (gpt_full_name). */
typedef struct gpt_name {
    const char *name, *gpt2, *llama, *llmc;
    /* 1, 2, 3 for q, k, v, which GPT-2 and llm.c store as the thirds of one tensor; else 0 */
    int qkv_third;
    /* if not NULL, Llama stores the first half of the parameter under the name `llama` and the
       second half under this name; a '*' in the names stands for the number of an expert, as
       Mixtral stores each expert in tensors of its own */
    const char *llama_second;
} gpt_name;

static const gpt_name gpt_names[] = {
    { "wte.weight", "wte.weight", "embed_tokens.weight", "wte", 0, NULL },
    { "wpe.weight", "wpe.weight", NULL, "wpe", 0, NULL },
    { "ln_1.weight", "ln_1.weight", "input_layernorm.weight", "ln1w", 0, NULL },
    { "ln_1.bias", "ln_1.bias", NULL, "ln1b", 0, NULL },
    { "attn.q.weight", "attn.c_attn.weight", "self_attn.q_proj.weight", "qkvw", 1, NULL },
    { "attn.q.bias", "attn.c_attn.bias", "self_attn.q_proj.bias", "qkvb", 1, NULL },
    { "attn.k.weight", "attn.c_attn.weight", "self_attn.k_proj.weight", "qkvw", 2, NULL },
    { "attn.k.bias", "attn.c_attn.bias", "self_attn.k_proj.bias", "qkvb", 2, NULL },
    { "attn.v.weight", "attn.c_attn.weight", "self_attn.v_proj.weight", "qkvw", 3, NULL },
    { "attn.v.bias", "attn.c_attn.bias", "self_attn.v_proj.bias", "qkvb", 3, NULL },
    { "attn.q_norm.weight", NULL, "self_attn.q_norm.weight", NULL, 0, NULL },
    { "attn.k_norm.weight", NULL, "self_attn.k_norm.weight", NULL, 0, NULL },
    { "attn.norm.weight", NULL, "post_attention_layernorm.weight", NULL, 0, NULL },
    { "mlp.norm.weight", NULL, "post_feedforward_layernorm.weight", NULL, 0, NULL },
    { "attn.proj.weight", "attn.c_proj.weight", "self_attn.o_proj.weight", "attprojw", 0, NULL },
    { "attn.proj.bias", "attn.c_proj.bias", NULL, "attprojb", 0, NULL },
    { "ln_2.weight", "ln_2.weight", "post_attention_layernorm.weight", "ln2w", 0, NULL },
    { "ln_2.bias", "ln_2.bias", NULL, "ln2b", 0, NULL },
    { "mlp.fc.weight", "mlp.c_fc.weight", NULL, "fcw", 0, NULL },
    { "mlp.fc.bias", "mlp.c_fc.bias", NULL, "fcb", 0, NULL },
    { "mlp.gate_up.weight", NULL, "mlp.gate_proj.weight", NULL, 0, "mlp.up_proj.weight" },
    { "mlp.proj.weight", "mlp.c_proj.weight", "mlp.down_proj.weight", "fcprojw", 0, NULL },
    { "mlp.proj.bias", "mlp.c_proj.bias", NULL, "fcprojb", 0, NULL },
    { "attn.q_a.weight", NULL, "self_attn.q_a_proj.weight", NULL, 0, NULL },
    { "attn.q_a_norm.weight", NULL, "self_attn.q_a_layernorm.weight", NULL, 0, NULL },
    { "attn.q_b.weight", NULL, "self_attn.q_b_proj.weight", NULL, 0, NULL },
    { "attn.kv_a.weight", NULL, "self_attn.kv_a_proj_with_mqa.weight", NULL, 0, NULL },
    { "attn.kv_a_norm.weight", NULL, "self_attn.kv_a_layernorm.weight", NULL, 0, NULL },
    { "attn.kv_b.weight", NULL, "self_attn.kv_b_proj.weight", NULL, 0, NULL },
    { "moe.router.weight", NULL, "mlp.gate.weight", NULL, 0, NULL },
    { "moe.router.bias", NULL, "mlp.gate.e_score_correction_bias", NULL, 0, NULL },
    { "moe.gate_up.weight", NULL, "mlp.experts.*.gate_proj.weight", NULL, 0,
        "mlp.experts.*.up_proj.weight" },
    { "moe.proj.weight", NULL, "mlp.experts.*.down_proj.weight", NULL, 0, NULL },
    { "mtp.enorm.weight", NULL, "enorm.weight", NULL, 0, NULL },
    { "mtp.hnorm.weight", NULL, "hnorm.weight", NULL, 0, NULL },
    { "mtp.eh_proj.weight", NULL, "eh_proj.weight", NULL, 0, NULL },
    { "mtp.norm.weight", NULL, "shared_head.norm.weight", NULL, 0, NULL },
    { "ln_f.weight", "ln_f.weight", "norm.weight", "lnfw", 0, NULL },
    { "ln_f.bias", "ln_f.bias", NULL, "lnfb", 0, NULL },
    { "lm_head.weight", "lm_head.weight", "lm_head.weight", NULL, 0, NULL },
};

/* Endings of the names of tensors that are ignored. */
static const char *const gpt_ignored[] = { ".attn.bias", ".attn.masked_bias",
    ".rotary_emb.inv_freq",
    /* copies of embedding and head in DeepSeek's modules of multi-token prediction */
    ".embed_tokens.weight", ".shared_head.head.weight" };

/* The format of a file. */
typedef struct gpt_file_kind {
    const char *prefix; /* prefix of all names except the head's */
    dt_llmc llmc;       /* header of an llm.c file; version 0 means safetensors */
} gpt_file_kind;

static inline const gpt_name *gpt_name_of(const gpt_param_row *r) {
    const gpt_name *n = gpt_names;
    while (strcmp(n->name, r->name) != 0) n++;
    return n;
}

/* Returns 1 if Mixtral's files can have the model: a Llama with the same experts in every layer. */
static inline int gpt_is_mixtral(gpt_config c) {
    const gpt_parts *p = &c.parts;
    int others = c.mla.kv_rank || c.mtp || c.first_dense || c.shared_experts || c.moe_every > 1 ||
                 c.route != DT_ROUTE_SOFTMAX || c.router_bias > 0 || p->qk_norm || p->qkv_bias ||
                 p->gemma || (c.moe_ffn && c.moe_ffn != c.ffn);
    return c.experts > 0 && c.arch == GPT_LLAMA && !others;
}

/* Returns 1 if DeepSeek-V3's files can have the model. */
static inline int gpt_is_deepseek(gpt_config c) {
    int experts = c.experts > 0;
    return c.arch == GPT_LLAMA && c.mla.kv_rank > 0 && c.moe_every <= 1 &&
           (!experts || (c.route == DT_ROUTE_SIGMOID && c.shared_experts > 0));
}

/* Returns the name, or the second name, of a parameter in the files of a model with Llama's
   architecture. Llama calls the norm before the MLP post_attention_layernorm, but Gemma gives this
   name to the norm after attn.proj. */
static inline const char *gpt_llama_name(const gpt *m, const gpt_name *n, int second) {
    static const char *const mixtral[][2] = { { "mlp.gate.weight", "block_sparse_moe.gate.weight" },
        { "mlp.experts.*.gate_proj.weight", "block_sparse_moe.experts.*.w1.weight" },
        { "mlp.experts.*.up_proj.weight", "block_sparse_moe.experts.*.w3.weight" },
        { "mlp.experts.*.down_proj.weight", "block_sparse_moe.experts.*.w2.weight" } };
    const char *name = second ? n->llama_second : n->llama;
    if (m->config.parts.gemma && strcmp(n->name, "ln_2.weight") == 0)
        return "pre_feedforward_layernorm.weight";
    for (int i = 0; i < 4 && gpt_is_mixtral(m->config); i++)
        if (strcmp(name, mixtral[i][0]) == 0) return mixtral[i][1];
    return name;
}

static inline void gpt_full_name(char *out, size_t bytes, const gpt *m, const gpt_param_row *r,
    int layer, const char *name, const char *prefix) {
    int head = strcmp(r->name, "lm_head.weight") == 0;
    int shared = r->section == GPT_DENSE && gpt_is_moe(m->config, layer);
    if (gpt_is_in_layer(r))
        snprintf(out, bytes, "%s%s.%d.%s%s", prefix, m->config.arch == GPT_LLAMA ? "layers" : "h",
            layer, shared ? "mlp.shared_experts." : "", name + (shared ? strlen("mlp.") : 0));
    else
        snprintf(out, bytes, "%s%s", head ? "" : prefix, name);
}

/* Returns where a parameter is in a file, as a matrix (rows,columns); a bias or gain is a matrix of
   one row. The location is a complete tensor of the file, or a third or half of a tensor. */
static inline dt_weight_map gpt_file_location_of(
    const gpt *m, const gpt_param_row *r, int layer, gpt_file_kind kind) {
    const gpt_name *n = gpt_name_of(r);
    dt_weight_map p;
    dt_shape s = gpt_shape(m->config, r, layer);
    int llama = m->config.arch == GPT_LLAMA,
        flat = r->kind == GPT_GAIN || r->kind == GPT_BIAS || r->kind == GPT_ROUTER_BIAS;
    int64_t thirds = n->qkv_third && !llama ? 3 : 1, before = thirds == 3 ? n->qkv_third - 1 : 0;
    memset(&p, 0, sizeof p);
    p.n = llama && n->llama_second ? 2 : 1;
    p.columns = flat ? dt_count(s) : s.d[s.nd - 1];
    if (llama && strchr(n->llama, '*')) p.groups = m->config.experts;
    int64_t rows = dt_count(s) / p.columns / p.n / (p.groups > 1 ? p.groups : 1);
    dt_weight_part *part = &p.part[0];
    if (kind.llmc.version) {
        int64_t groups = flat ? 1 : thirds, layers = gpt_is_in_layer(r) ? m->config.layers : 1;
        snprintf(p.name[0], sizeof p.name[0], "%s", n->llmc);
        part->file_rows =
            strcmp(n->llmc, "wte") == 0 ? kind.llmc.padded_vocab : layers * groups * rows;
        part->row = gpt_is_in_layer(r) ? (layer * groups + (flat ? 0 : before)) * rows : 0;
        if (flat) part->file_columns = thirds * p.columns, part->column = before * p.columns;
    } else {
        gpt_full_name(p.name[0], sizeof p.name[0], m, r, layer,
            llama ? gpt_llama_name(m, n, 0) : n->gpt2, kind.prefix);
        if (p.n == 2)
            gpt_full_name(
                p.name[1], sizeof p.name[1], m, r, layer, gpt_llama_name(m, n, 1), kind.prefix);
        part->transposed = !llama && !flat && gpt_is_in_layer(r);
        int64_t wide = part->transposed ? rows : p.columns;
        p.shape = flat               ? DT_SHAPE(thirds * wide)
                  : part->transposed ? DT_SHAPE(p.columns, thirds * wide)
                                     : DT_SHAPE(rows, p.columns);
        if (thirds == 3) part->file_columns = 3 * wide, part->column = before * wide;
    }
    part->rows = rows;
    p.part[1] = p.part[0];
    return p;
}

/* Sets the name pointers of the parts. gpt_file_location_of cannot set these pointers: they point
   into the struct itself, which is copied when gpt_file_location_of returns it. */
static inline void gpt_set_part_names(dt_weight_map *p) {
    for (int i = 0; i < 2; i++) p->part[i].name = p->name[i];
}

static inline gpt_file_kind gpt_file_kind_of(const gpt *m, dt_weights *w) {
    gpt_file_kind k = { m->config.arch == GPT_LLAMA ? "model." : "transformer.",
        dt_weights_llmc(w) };
    const char *first =
        m->config.arch == GPT_LLAMA ? "model.embed_tokens.weight" : "transformer.wte.weight";
    if (dt_weights_find(w, first) < 0) k.prefix = "";
    return k;
}

// ==== Configuration ==============================================================================

/* Returns the node of a key's value in an object, or -1 if the key is missing or its value is null.
   If `required` is set, -1 is also an error. */
static inline int gpt_key(dt_json *j, int object, const char *key, int required) {
    int node = dt_json_find(j, object, key);
    if (node >= 0 && dt_json_kind_of(j, node) == DT_JSON_NULL) node = -1;
    if (node < 0 && required) dt_json_fail(j, object, "%s is missing", key);
    return node;
}

/* Returns the value of a key of the top-level object, which must be a whole number from 1 to `max`.
   If the key is missing, returns `fallback`; if `fallback` is 0, a missing key is an error. */
static inline int gpt_key_int(dt_json *j, const char *key, int fallback, int max) {
    int64_t value = 0;
    int node = gpt_key(j, 0, key, fallback == 0);
    if (node < 0) return fallback;
    if (dt_json_int(j, node, &value) && value >= 1 && value <= max) return (int)value;
    dt_json_fail(j, node, "%s: a whole number from 1 to %d is needed", key, max);
    return fallback;
}

static inline double gpt_key_number(dt_json *j, int object, const char *key, double fallback) {
    double value = fallback;
    int node = gpt_key(j, object, key, 0);
    if (node >= 0 && !(dt_json_number(j, node, &value) && value > 0))
        dt_json_fail(j, node, "%s: a number above 0 is needed", key);
    return value;
}

static inline int gpt_key_bool(dt_json *j, const char *key, int fallback) {
    int value = fallback, node = gpt_key(j, 0, key, 0);
    if (node >= 0 && !dt_json_bool(j, node, &value))
        dt_json_fail(j, node, "%s: true or false is needed", key);
    return value;
}

/* Reports an error if the value of a key is neither the string `a` nor the string `b`. A missing
   key is not an error. */
static inline void gpt_key_word(
    dt_json *j, int object, const char *key, const char *a, const char *b) {
    int node = gpt_key(j, object, key, 0);
    const char *word = node < 0 ? a : dt_json_string(j, node, NULL);
    if (!word || (strcmp(word, a) != 0 && strcmp(word, b) != 0))
        dt_json_fail(j, node, "%s %s is not supported; %s is", key, word ? word : "(no string)", a);
}

/* Reports an error if the value of a boolean key is not `supported`. A missing key is not an
   error. */
static inline void gpt_key_must_be(dt_json *j, const char *key, int supported) {
    if (gpt_key_bool(j, key, supported) != supported)
        dt_json_fail(j, dt_json_find(j, 0, key), "%s %s is not supported", key,
            supported ? "false" : "true");
}

static inline void gpt_config_gpt2(dt_json *j, gpt_config *c) {
    c->layers = gpt_key_int(j, "n_layer", 0, GPT_MAX_LAYERS);
    c->width = gpt_key_int(j, "n_embd", 0, 1 << 24);
    c->heads = c->kv_heads = gpt_key_int(j, "n_head", 0, 1 << 24);
    c->ffn = gpt_key_int(j, "n_inner", 4 * c->width, 1 << 26);
    c->seq = gpt_key_int(j, "n_positions", 0, 1 << 26);
    c->norm_eps = gpt_key_number(j, 0, "layer_norm_epsilon", 1e-5);
    gpt_key_word(j, 0, "activation_function", "gelu_new", "gelu_pytorch_tanh");
    gpt_key_must_be(j, "scale_attn_weights", 1);
    gpt_key_must_be(j, "scale_attn_by_inverse_layer_idx", 0);
    gpt_key_must_be(j, "add_cross_attention", 0);
}

/* Returns the value of a key of an object, which must be a number above 0; if the key is missing
   this is an error. */
static inline double gpt_key_needed(dt_json *j, int object, const char *key) {
    return gpt_key(j, object, key, 1) >= 0 ? gpt_key_number(j, object, key, 1) : 1;
}

/* YaRN multiplies sines and cosines by a factor that is given, or follows from mscale. */
static inline double gpt_yarn_attention(dt_json *j, int rope, double factor) {
    double scale = gpt_key_number(j, rope, "mscale", 0),
           all = gpt_key_number(j, rope, "mscale_all_dim", 0), given;
    given = gpt_key_number(j, rope, "attention_factor", 0);
    if (given > 0 || scale == 0 || all == 0) return given;
    return (0.1 * scale * log(factor) + 1) / (0.1 * all * log(factor) + 1);
}

/* Reads RoPE scaling from the object `rope`; `required`: it must have a type. */
static inline void gpt_config_scaling(dt_json *j, int rope, int required, gpt_config *c) {
    static const char *const kinds[] = { "default", "linear", "llama3", "yarn" };
    int node = gpt_key(j, rope, "rope_type", 0), kind = 0, truncate = 1, at;
    if (node < 0) node = gpt_key(j, rope, "type", 0);
    if (node < 0 && required) gpt_key(j, rope, "rope_type", 1);
    const char *type = node < 0 ? kinds[0] : dt_json_string(j, node, NULL);
    while (kind < 4 && !(type && strcmp(type, kinds[kind]) == 0)) kind++;
    if (kind == 4) {
        dt_json_fail(j, node, "rope_type %s is not supported; default, linear, llama3 and yarn are",
            type ? type : "(no string)");
        return;
    }
    if (gpt_key_number(j, rope, "partial_rotary_factor", 1) != 1)
        dt_json_fail(j, rope, "partial_rotary_factor is not supported");
    if (kind == DT_ROPE_UNSCALED) return;
    dt_rope_scaling *s = &c->parts.rope;
    s->kind = kind;
    s->factor = gpt_key_needed(j, rope, "factor");
    if (kind == DT_ROPE_LINEAR) return;
    s->original = gpt_key_number(j, rope, "original_max_position_embeddings", c->seq);
    if (kind == DT_ROPE_LLAMA3) {
        s->low = gpt_key_needed(j, rope, "low_freq_factor");
        s->high = gpt_key_needed(j, rope, "high_freq_factor");
        return;
    }
    s->low = gpt_key_number(j, rope, "beta_slow", 1);
    s->high = gpt_key_number(j, rope, "beta_fast", 32);
    s->attention = gpt_yarn_attention(j, rope, s->factor);
    at = gpt_key(j, rope, "truncate", 0);
    if (at >= 0 && !dt_json_bool(j, at, &truncate))
        dt_json_fail(j, at, "truncate: true or false is needed");
    s->exact_bounds = !truncate;
}

/* Reads the settings of the rotary embedding. Older files have the keys rope_theta and
   rope_scaling; newer files have the same settings in rope_parameters. Gemma 3 has settings for
   local layers and for global layers: in older files the keys rope_local_base_freq and rope_theta,
   in newer files two objects in rope_parameters. */
static inline void gpt_config_rope(dt_json *j, gpt_config *c, int gemma_3) {
    int rope = gpt_key(j, 0, "rope_parameters", 0), scaling = gpt_key(j, 0, "rope_scaling", 0);
    int local = rope < 0 ? -1 : gpt_key(j, rope, "sliding_attention", 0);
    if (gemma_3 && rope >= 0 && gpt_key(j, rope, "full_attention", 0) >= 0)
        rope = gpt_key(j, rope, "full_attention", 0);
    c->theta = gpt_key_number(j, rope < 0 ? 0 : rope, "rope_theta",
        gpt_key_number(j, 0, "rope_theta", gemma_3 ? 1e6 : 10000));
    if (rope >= 0 || scaling >= 0) gpt_config_scaling(j, rope >= 0 ? rope : scaling, rope < 0, c);
    if (!gemma_3) return;
    c->parts.local_theta = gpt_key_number(
        j, local < 0 ? 0 : local, local < 0 ? "rope_local_base_freq" : "rope_theta", 10000);
    if (local >= 0) gpt_key_word(j, local, "rope_type", "default", "default");
}

/* Reads which layers are local: from layer_types, or else every sliding_window_pattern-th layer is
   global; `pattern` is the default. */
static inline void gpt_config_layer_types(dt_json *j, gpt_config *c, int pattern) {
    int list = gpt_key(j, 0, "layer_types", 0), N = 0, global = 0;
    if (list < 0) {
        c->parts.global_every = gpt_key_int(j, "sliding_window_pattern", pattern, 1 << 20);
        return;
    }
    if (dt_json_count(j, list) != c->layers) {
        dt_json_fail(j, list, "layer_types: one for each of %d layers is needed", c->layers);
        return;
    }
    for (int i = 0; i < c->layers; i++) {
        const char *type = dt_json_string(j, dt_json_at(j, list, i), NULL);
        int full = type && strcmp(type, "full_attention") == 0;
        if (!full && !(type && strcmp(type, "sliding_attention") == 0))
            dt_json_fail(j, list,
                "layer_types %s is not supported; full_attention and sliding_attention are",
                type ? type : "(no string)");
        if (full && N == 0) N = i + 1;
        global += full;
        if (N > 0 && full != ((i + 1) % N == 0))
            dt_json_fail(j, list,
                "layer_types: only a full_attention in every N-th layer is supported; layer %d "
                "breaks the pattern of %d",
                i, N);
    }
    c->parts.global_every = N;
    if (global == c->layers) c->parts.window = c->parts.global_every = 0;
}

/* The models with the architecture of Llama. */
enum {
    GPT_FILE_LLAMA,
    GPT_FILE_MISTRAL,
    GPT_FILE_QWEN2,
    GPT_FILE_QWEN3,
    GPT_FILE_GEMMA2,
    GPT_FILE_GEMMA3,
    GPT_FILE_KINDS
};
static const char *const gpt_model_types[] = { "llama", "mistral", "qwen2", "qwen3", "gemma2",
    "gemma3_text" };

static inline void gpt_config_gemma(dt_json *j, gpt_config *c, int kind) {
    c->parts.gemma = 1;
    c->parts.query_scalar = gpt_key_number(j, 0, "query_pre_attn_scalar", 256);
    c->parts.window = gpt_key_int(j, "sliding_window", 4096, 1 << 30);
    gpt_config_layer_types(j, c, kind == GPT_FILE_GEMMA3 ? 6 : 2);
    if (kind == GPT_FILE_GEMMA2)
        c->parts.attn_soft_cap = gpt_key_number(j, 0, "attn_logit_softcapping", 0);
    else if (gpt_key(j, 0, "attn_logit_softcapping", 0) >= 0)
        dt_json_fail(j, dt_json_find(j, 0, "attn_logit_softcapping"),
            "attn_logit_softcapping is not supported in gemma3_text");
    c->parts.logit_soft_cap = gpt_key_number(j, 0, "final_logit_softcapping", 0);
    gpt_key_word(j, 0, "hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh");
    gpt_key_must_be(j, "use_bidirectional_attention", 0);
}

static inline void gpt_config_llama(dt_json *j, gpt_config *c, int kind) {
    int gemma = kind >= GPT_FILE_GEMMA2, qwen = kind == GPT_FILE_QWEN2 || kind == GPT_FILE_QWEN3;
    c->arch = GPT_LLAMA;
    c->layers = gpt_key_int(j, "num_hidden_layers", 0, GPT_MAX_LAYERS);
    c->width = gpt_key_int(j, "hidden_size", 0, 1 << 24);
    c->heads = gpt_key_int(j, "num_attention_heads", 0, 1 << 24);
    c->kv_heads = gpt_key_int(j, "num_key_value_heads", c->heads, 1 << 24);
    c->ffn = gpt_key_int(j, "intermediate_size", 0, 1 << 26);
    c->seq = gpt_key_int(j, "max_position_embeddings", 0, 1 << 26);
    c->norm_eps = gpt_key_number(j, 0, "rms_norm_eps", 1e-6);
    int dim = c->heads > 0 && c->width >= c->heads ? c->width / c->heads : 1;
    if (kind == GPT_FILE_QWEN3) dim = 128;
    if (gemma) dim = 256;
    dim = gpt_key_int(j, "head_dim", dim, 1 << 24);
    if ((int64_t)dim * c->heads != c->width) c->parts.head_dim = dim;
    if (dim % 2 != 0)
        dt_json_fail(j, dt_json_find(j, 0, "head_dim"),
            "a head_dim of %d is odd: the rotary embedding rotates pairs", dim);
    c->parts.qk_norm = kind == GPT_FILE_QWEN3 || kind == GPT_FILE_GEMMA3;
    c->parts.qkv_bias = kind == GPT_FILE_QWEN2;
    if (kind == GPT_FILE_MISTRAL || (qwen && gpt_key_bool(j, "use_sliding_window", 0)))
        c->parts.window = gpt_key_int(j, "sliding_window", qwen ? 4096 : INT32_MAX, INT32_MAX);
    if (kind == GPT_FILE_MISTRAL && c->parts.window == INT32_MAX) c->parts.window = 0;
    if (qwen && c->parts.window) gpt_config_layer_types(j, c, 0);
    if (gemma) gpt_config_gemma(j, c, kind);
    gpt_config_rope(j, c, kind == GPT_FILE_GEMMA3);
    if (c->parts.window == 0) c->parts.global_every = 0, c->parts.local_theta = 0;
    if (!gemma) gpt_key_word(j, 0, "hidden_act", "silu", "swish");
    gpt_key_must_be(j, "attention_bias", 0);
    gpt_key_must_be(j, "mlp_bias", 0);
}

/* As gpt_key_int, but the value may be 0, and a missing key means 0. */
static inline int gpt_key_count(dt_json *j, const char *key, int max) {
    int64_t value = 0;
    int node = gpt_key(j, 0, key, 0);
    if (node >= 0 && (!dt_json_int(j, node, &value) || value < 0 || value > max))
        dt_json_fail(j, node, "%s: a whole number from 0 to %d is needed", key, max);
    return (int)value;
}

/* Returns query_scalar of DeepSeek's model: with YaRN and mscale_all_dim the scores of attention
   are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2; 0 if they are not. */
static inline double gpt_yarn_query_scalar(dt_json *j, const gpt_config *c) {
    int rope = gpt_key(j, 0, "rope_parameters", 0);
    if (rope < 0) rope = gpt_key(j, 0, "rope_scaling", 0);
    double all = rope < 0 ? 0 : gpt_key_number(j, rope, "mscale_all_dim", 0);
    if (all == 0 || c->parts.rope.kind != DT_ROPE_YARN) return 0;
    double m = 0.1 * all * log(c->parts.rope.factor) + 1;
    return (c->mla.nope_dim + c->mla.rope_dim) / (m * m * m * m);
}

static inline void gpt_config_deepseek(dt_json *j, gpt_config *c) {
    c->arch = GPT_LLAMA;
    c->layers = gpt_key_int(j, "num_hidden_layers", 0, GPT_MAX_LAYERS);
    c->width = gpt_key_int(j, "hidden_size", 0, 1 << 24);
    c->heads = gpt_key_int(j, "num_attention_heads", 0, 1 << 24);
    c->kv_heads = gpt_key_int(j, "num_key_value_heads", c->heads, 1 << 24);
    c->ffn = gpt_key_int(j, "intermediate_size", 0, 1 << 26);
    c->seq = gpt_key_int(j, "max_position_embeddings", 0, 1 << 26);
    c->norm_eps = gpt_key_number(j, 0, "rms_norm_eps", 1e-6);
    c->mla = (gpt_mla){ .kv_rank = gpt_key_int(j, "kv_lora_rank", 0, 1 << 24),
        .q_rank = gpt_key_count(j, "q_lora_rank", 1 << 24),
        .nope_dim = gpt_key_int(j, "qk_nope_head_dim", 0, 1 << 24),
        .rope_dim = gpt_key_int(j, "qk_rope_head_dim", 0, 1 << 24),
        .value_dim = gpt_key_int(j, "v_head_dim", 0, 1 << 24) };
    c->experts = gpt_key_int(j, "n_routed_experts", 0, 1 << 20);
    c->top_k = gpt_key_int(j, "num_experts_per_tok", 0, 1 << 20);
    c->shared_experts = gpt_key_int(j, "n_shared_experts", 0, 1 << 20);
    c->moe_ffn = gpt_key_int(j, "moe_intermediate_size", 0, 1 << 26);
    c->first_dense = gpt_key_count(j, "first_k_dense_replace", GPT_MAX_LAYERS);
    c->route = DT_ROUTE_SIGMOID;
    c->expert_groups = gpt_key_int(j, "n_group", 1, 1 << 20);
    c->top_groups = gpt_key_int(j, "topk_group", 1, 1 << 20);
    c->raw_gates = !gpt_key_bool(j, "norm_topk_prob", 1);
    c->gate_scale = gpt_key_number(j, 0, "routed_scaling_factor", 1);
    gpt_config_rope(j, c, 0);
    c->parts.query_scalar = gpt_yarn_query_scalar(j, c);
    gpt_key_must_be(j, "rope_interleave", 1);
    gpt_key_word(j, 0, "hidden_act", "silu", "swish");
    gpt_key_word(j, 0, "scoring_func", "sigmoid", "sigmoid");
    gpt_key_word(j, 0, "topk_method", "noaux_tc", "noaux_tc");
    gpt_key_must_be(j, "attention_bias", 0);
}

/* A Llama with experts in every layer. transformers' router takes the top-k of the softmax and
   normalises them, as dt_route does. */
static inline void gpt_config_mixtral(dt_json *j, gpt_config *c) {
    gpt_config_llama(j, c, GPT_FILE_MISTRAL);
    c->experts = gpt_key_int(j, "num_local_experts", 8, 1 << 16);
    c->top_k = gpt_key_int(j, "num_experts_per_tok", 2, c->experts > 0 ? c->experts : 1);
    c->moe_every = 1;
    c->balance = gpt_key_number(j, 0, "router_aux_loss_coef", 0.001);
}

/* Returns 1 + the token id of a key, the first one of a list, or 0 if none is below `vocab`. */
static inline int gpt_key_token(dt_json *j, const char *key, int vocab) {
    int64_t id = -1;
    int node = gpt_key(j, 0, key, 0);
    if (dt_json_kind_of(j, node) == DT_JSON_ARRAY) node = dt_json_at(j, node, 0);
    return dt_json_int(j, node, &id) && id >= 0 && id < vocab ? (int)id + 1 : 0;
}

/* Fills in *c from config.json. `head` is 1 if the weights contain lm_head, else 0. If the file has
   no key tie_word_embeddings, the model is tied if `head` is 0. */
static inline void gpt_config_read(dt_json *j, gpt_config *c, int head) {
    if (dt_json_kind_of(j, 0) != DT_JSON_OBJECT) {
        dt_json_fail(j, 0, "an object is needed");
        return;
    }
    int node = gpt_key(j, 0, "model_type", 1);
    const char *type = node < 0 ? "" : dt_json_string(j, node, NULL);
    if (node < 0) return;
    c->vocab = gpt_key_int(j, "vocab_size", 0, 1 << 30);
    if (type && strcmp(type, "gpt2") == 0)
        gpt_config_gpt2(j, c);
    else if (type && strcmp(type, "deepseek_v3") == 0)
        gpt_config_deepseek(j, c);
    else if (type && strcmp(type, "mixtral") == 0)
        gpt_config_mixtral(j, c);
    else {
        int kind = 0;
        while (kind < GPT_FILE_KINDS && !(type && strcmp(type, gpt_model_types[kind]) == 0)) kind++;
        if (kind < GPT_FILE_KINDS)
            gpt_config_llama(j, c, kind);
        else
            dt_json_fail(j, node,
                "model_type %s is not supported; gpt2, llama, mistral, qwen2, qwen3, gemma2, "
                "gemma3_text, mixtral and deepseek_v3 are",
                type ? type : "(no string)");
    }
    c->bos_token = gpt_key_token(j, "bos_token_id", c->vocab);
    c->eos_token = gpt_key_token(j, "eos_token_id", c->vocab);
    c->tied = gpt_key_bool(j, "tie_word_embeddings", c->parts.gemma || !head);
    if (gpt_key(j, 0, "quantization_config", 0) >= 0)
        dt_json_fail(
            j, dt_json_find(j, 0, "quantization_config"), "quantization_config is not supported");
    if (c->heads > 0 && c->kv_heads > 0 &&
        ((c->parts.head_dim == 0 && c->width % c->heads != 0) || c->heads % c->kv_heads != 0))
        dt_json_fail(j, 0, "a width of %d with %d heads and %d of keys and values", c->width,
            c->heads, c->kv_heads);
}

/* Writes the path folder/name into `out`, where the folder is `path` or, if `path` is a file, the
   folder of that file. If the name is too long, reports an error and returns -1. */
static inline int gpt_path_beside(
    dt_ctx *ctx, char *out, size_t bytes, const char *path, const char *name) {
    const char *dot = strrchr(path, '.'), *slash = strrchr(path, '/');
    int file = dot && (strcmp(dot, ".safetensors") == 0 || strcmp(dot, ".json") == 0);
    int n = file ? slash ? (int)(slash - path) : 0 : (int)strlen(path);
    const char *join = n == 0 ? file && slash ? "/" : "" : path[n - 1] == '/' ? "" : "/";
    if (snprintf(out, bytes, "%.*s%s%s", n, path, join, name) < (int)bytes) return 0;
    dt_fail(ctx, DT_ERR_IO, "%s: the name is too long", path);
    return -1;
}

/* Returns 1 if the file folder/name, or `path` itself if `name` is NULL, can be opened and begins
   with `start`. */
static inline int gpt_file_starts(
    dt_ctx *ctx, const char *path, const char *name, const char *start) {
    const dt_io *io = dt_ctx_io(ctx);
    char full[4096], got[8] = "";
    int64_t n = (int64_t)strlen(start);
    if (name && gpt_path_beside(ctx, full, sizeof full, path, name) != 0) return 0;
    int fd = io->open(io->user, name ? full : path, DT_IO_READ);
    if (fd < 0) return 0;
    int64_t read = n ? io->pread(io->user, fd, got, (size_t)n, 0) : 0;
    io->close(io->user, fd);
    return read == n && memcmp(got, start, (size_t)n) == 0;
}

static inline dt_status gpt_fail_adapter(dt_ctx *ctx, const char *path) {
    return dt_fail(ctx, DT_ERR_IO,
        "%s: an adapter of PEFT, not a model: give its base to --model, and the adapter to "
        "--adapter",
        path);
}

/* Fails if `path` is a file or folder of another kind that is easily taken for a model. */
static inline dt_status gpt_path_is_other(dt_ctx *ctx, const char *path) {
    static const char zip[] = "PK\3\4", pickle[] = "\x80\x02";
    const char *const torch = "pytorch_model.bin";
    if (gpt_file_starts(ctx, path, NULL, zip) || gpt_file_starts(ctx, path, NULL, pickle))
        return dt_fail(ctx, DT_ERR_IO,
            "%s: a PyTorch file; convert it to safetensors, for example with save_pretrained of "
            "transformers",
            path);
    if (dt_error(ctx) != DT_OK || gpt_file_starts(ctx, path, "model.safetensors", "") ||
        gpt_file_starts(ctx, path, "model.safetensors.index.json", ""))
        return dt_error(ctx);
    if (gpt_file_starts(ctx, path, torch, zip) || gpt_file_starts(ctx, path, torch, pickle))
        return dt_fail(ctx, DT_ERR_IO,
            "%s: the folder has only a PyTorch file, %s; convert it to safetensors, for example "
            "with save_pretrained of transformers",
            path, torch);
    if (gpt_file_starts(ctx, path, "adapter_config.json", "")) return gpt_fail_adapter(ctx, path);
    return dt_error(ctx);
}

/* Fails if the tensors are those of an adapter, or of a checkpoint that only a resumed run can
   read. */
static inline dt_status gpt_tensors_are_other(dt_ctx *ctx, const char *path, const dt_weights *w) {
    for (int i = 0; i < dt_weights_count(w); i++) {
        const char *name = dt_weights_get(w, i)->name;
        if (strstr(name, ".lora_A.")) return gpt_fail_adapter(ctx, path);
        if (strstr(name, ".lora_a."))
            return dt_fail(ctx, DT_ERR_IO,
                "%s: a checkpoint of a LoRA run, not a model: continue it with --resume, whose "
                "--save-model writes the adapter, or with --merge on a model",
                path);
        if (strstr(name, ".moe.router."))
            return dt_fail(ctx, DT_ERR_IO,
                "%s: a checkpoint of a MoE model, which has other names than transformers' files: "
                "continue it with --resume, whose --save-model writes a model",
                path);
    }
    return dt_error(ctx);
}

/* Returns the number of modules of multi-token prediction in a file. config.json does not say it:
   transformers writes num_nextn_predict_layers 1 also if the file has no module. */
static inline int gpt_mtp_count(const dt_weights *w) {
    static const char end[] = ".eh_proj.weight";
    int found = 0;
    for (int i = 0; i < dt_weights_count(w); i++) {
        const char *name = dt_weights_get(w, i)->name;
        size_t length = strlen(name);
        found += length >= sizeof end && strcmp(name + length - (sizeof end - 1), end) == 0;
    }
    return found < GPT_MAX_MTP ? found : GPT_MAX_MTP;
}

/* Returns the configuration of the model at `path`. After a failure the result's `layers` is 0 and
   dt_error returns the error. */
static inline gpt_config gpt_config_from(dt_ctx *ctx, const char *path) {
    gpt_config none = { .layers = 0 }, c = none;
    char name[4096];
    if (gpt_path_is_other(ctx, path) != DT_OK) return none;
    dt_weights *w = dt_weights_open(ctx, path);
    dt_llmc h = dt_weights_llmc(w);
    if (!w) return none;
    gpt_tensors_are_other(ctx, path, w);
    int head = dt_weights_find(w, "lm_head.weight") >= 0, mtp = gpt_mtp_count(w);
    dt_weights_close(w);
    if (h.width > 1 << 24 || h.layers > GPT_MAX_LAYERS ||
        (h.version && (h.heads < 1 || h.width % h.heads != 0))) {
        dt_fail(ctx, DT_ERR_IO, "%s: %d layers, a width of %d with %d heads", path, h.layers,
            h.width, h.heads);
        return none;
    }
    if (dt_error(ctx) != DT_OK) return none;
    if (h.version)
        return (gpt_config){ .layers = h.layers,
            .width = h.width,
            .heads = h.heads,
            .kv_heads = h.heads,
            .ffn = 4 * h.width,
            .seq = h.seq,
            .vocab = h.vocab,
            .tied = 1 };
    size_t bytes = 0;
    if (gpt_path_beside(ctx, name, sizeof name, path, "config.json") != 0) return none;
    char *text = dt_file_read(ctx, name, 1 << 24, &bytes);
    dt_json *j = text ? dt_json_parse(ctx, name, text, bytes) : NULL;
    if (j) gpt_config_read(j, &c, head);
    if (c.mla.kv_rank) c.mtp = mtp;
    if (c.mla.kv_rank && c.first_dense >= gpt_all_layers(c)) c.experts = 0;
    dt_json_free(j);
    if (text) dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
    return dt_error(ctx) == DT_OK ? c : none;
}

/* Returns which of the models with the architecture of Llama this is. */
static inline int gpt_file_model(const gpt_config *c) {
    if (c->parts.gemma) return c->parts.qk_norm ? GPT_FILE_GEMMA3 : GPT_FILE_GEMMA2;
    if (c->parts.qk_norm) return GPT_FILE_QWEN3;
    if (c->parts.qkv_bias) return GPT_FILE_QWEN2;
    return c->parts.window ? GPT_FILE_MISTRAL : GPT_FILE_LLAMA;
}

/* Returns 1 if config.json of the model's kind can express all its parts. */
static inline int gpt_file_has_parts(const gpt_config *c) {
    const gpt_parts *p = &c->parts;
    int kind = gpt_file_model(c), gemma_3 = kind == GPT_FILE_GEMMA3, capped = p->attn_soft_cap > 0;
    if (p->qkv_bias && (p->qk_norm || p->gemma)) return 0;
    if (gpt_is_deepseek(*c))
        return kind == GPT_FILE_LLAMA && !p->head_dim && !capped && p->logit_soft_cap == 0 &&
               (p->query_scalar == 0 || p->rope.kind == DT_ROPE_YARN);
    if (kind == GPT_FILE_MISTRAL && p->global_every) return 0;
    if (p->local_theta > 0 && !gemma_3) return 0;
    /* in Gemma 3's file only global layers have RoPE scaling */
    if (gemma_3 && p->window && p->rope.kind && p->local_theta == 0) return 0;
    if (gemma_3 && capped) return 0;
    return p->gemma || (p->query_scalar == 0 && !capped && p->logit_soft_cap == 0);
}

/* Writes the object `key` with the settings of the rotary embedding; theta 0 leaves the base out,
   and all_dim 0 leaves mscale_all_dim out (gpt_yarn_query_scalar). */
static inline void gpt_write_rope(
    dt_json_out *o, const char *key, double theta, dt_rope_scaling s, double all_dim) {
    static const char *const kinds[] = { "default", "linear", "llama3", "yarn" };
    dt_json_open(o, key, '{');
    if (theta > 0) dt_json_put_number(o, "rope_theta", theta);
    dt_json_put_string(o, "rope_type", kinds[s.kind]);
    if (s.kind) dt_json_put_float(o, "factor", s.factor);
    if (s.kind >= DT_ROPE_LLAMA3)
        dt_json_put_int(o, "original_max_position_embeddings", (int64_t)s.original);
    if (s.kind == DT_ROPE_LLAMA3) {
        dt_json_put_float(o, "low_freq_factor", s.low > 0 ? s.low : 1);
        dt_json_put_float(o, "high_freq_factor", s.high > 0 ? s.high : 4);
    }
    if (s.kind == DT_ROPE_YARN) {
        dt_json_put_float(o, "beta_slow", s.low > 0 ? s.low : 1);
        dt_json_put_float(o, "beta_fast", s.high > 0 ? s.high : 32);
        if (s.attention > 0) dt_json_put_float(o, "attention_factor", s.attention);
        if (all_dim > 0) dt_json_put_float(o, "mscale_all_dim", all_dim);
        dt_json_put_bool(o, "truncate", !s.exact_bounds);
    }
    dt_json_close(o, '}');
}

static inline void gpt_write_window(dt_json_out *o, const gpt_config *c, int kind) {
    const gpt_parts *p = &c->parts;
    dt_json_put_int(o, "sliding_window", p->window ? p->window : 4096);
    if (kind == GPT_FILE_MISTRAL) return;
    if (kind == GPT_FILE_QWEN2 || kind == GPT_FILE_QWEN3)
        dt_json_put_bool(o, "use_sliding_window", 1);
    dt_json_open(o, "layer_types", '[');
    for (int i = 0; i < c->layers; i++)
        dt_json_put_string(o, NULL, gpt_is_local(*c, i) ? "sliding_attention" : "full_attention");
    dt_json_close(o, ']');
}

static inline void gpt_write_soft_cap(dt_json_out *o, const char *key, double cap) {
    if (cap > 0)
        dt_json_put_float(o, key, cap);
    else
        dt_json_put_string(o, key, NULL);
}

/* Writes the keys of a model with the architecture of Llama, besides its sizes. rope_theta and
   rope_scaling are for releases of transformers before 5. */
static inline void gpt_write_llama(dt_json_out *o, const gpt_config *c) {
    const gpt_parts *p = &c->parts;
    const dt_rope_scaling none = { .kind = DT_ROPE_UNSCALED };
    double theta = c->theta > 0 ? c->theta : 10000;
    int kind = gpt_file_model(c), gemma = kind >= GPT_FILE_GEMMA2;
    dt_json_put_number(o, "rms_norm_eps", c->norm_eps > 0 ? c->norm_eps : 1e-5);
    dt_json_put_number(o, "rope_theta", theta);
    if (p->rope.kind) gpt_write_rope(o, "rope_scaling", 0, p->rope, 0);
    if (kind == GPT_FILE_GEMMA3) {
        double local = p->local_theta > 0 ? p->local_theta : theta;
        dt_json_put_number(o, "rope_local_base_freq", local);
        dt_json_open(o, "rope_parameters", '{');
        gpt_write_rope(o, "full_attention", theta, p->rope, 0);
        gpt_write_rope(o, "sliding_attention", local, none, 0);
        dt_json_close(o, '}');
    } else {
        gpt_write_rope(o, "rope_parameters", theta, p->rope, 0);
    }
    dt_json_put_string(
        o, gemma ? "hidden_activation" : "hidden_act", gemma ? "gelu_pytorch_tanh" : "silu");
    dt_json_put_bool(o, "attention_bias", 0);
    dt_json_put_bool(o, "mlp_bias", 0);
    if (kind != GPT_FILE_LLAMA || p->head_dim) dt_json_put_int(o, "head_dim", gpt_head_dim(*c));
    if (p->window || gemma) gpt_write_window(o, c, kind);
    if (!gemma) return;
    dt_json_put_number(
        o, "query_pre_attn_scalar", p->query_scalar > 0 ? p->query_scalar : gpt_head_dim(*c));
    gpt_write_soft_cap(o, "attn_logit_softcapping", p->attn_soft_cap);
    gpt_write_soft_cap(o, "final_logit_softcapping", p->logit_soft_cap);
}

static inline void gpt_write_deepseek(dt_json_out *o, const gpt_config *c) {
    int dense = c->experts == 0, groups = c->expert_groups > 0;
    const struct {
        const char *key;
        int value;
    } sizes[] = { { "num_hidden_layers", c->layers }, { "hidden_size", c->width },
        { "num_attention_heads", c->heads }, { "num_key_value_heads", c->kv_heads },
        { "intermediate_size", c->ffn }, { "max_position_embeddings", c->seq },
        { "kv_lora_rank", c->mla.kv_rank }, { "qk_nope_head_dim", c->mla.nope_dim },
        { "qk_rope_head_dim", c->mla.rope_dim }, { "v_head_dim", c->mla.value_dim },
        { "moe_intermediate_size", c->moe_ffn ? c->moe_ffn : c->ffn },
        { "n_routed_experts", dense ? 1 : c->experts },
        { "num_experts_per_tok", dense ? 1 : gpt_top_k(*c) },
        { "n_shared_experts", dense ? 1 : c->shared_experts },
        { "first_k_dense_replace", dense ? gpt_all_layers(*c) : c->first_dense },
        { "n_group", groups ? c->expert_groups : 1 }, { "topk_group", groups ? c->top_groups : 1 },
        { "num_nextn_predict_layers", c->mtp } };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        dt_json_put_int(o, sizes[i].key, sizes[i].value);
    if (c->mla.q_rank)
        dt_json_put_int(o, "q_lora_rank", c->mla.q_rank);
    else
        dt_json_put_string(o, "q_lora_rank", NULL);
    dt_json_put_number(o, "rms_norm_eps", c->norm_eps > 0 ? c->norm_eps : 1e-5);
    dt_json_put_string(o, "hidden_act", "silu");
    dt_json_put_bool(o, "attention_bias", 0);
    dt_json_put_bool(o, "norm_topk_prob", !c->raw_gates);
    dt_json_put_float(o, "routed_scaling_factor", c->gate_scale > 0 ? c->gate_scale : 1);
    dt_json_put_string(o, "scoring_func", "sigmoid");
    dt_json_put_string(o, "topk_method", "noaux_tc");
    dt_json_put_bool(o, "rope_interleave", 1);
    double theta = c->theta > 0 ? c->theta : 10000, scalar = c->parts.query_scalar, all = 0;
    if (scalar > 0 && c->parts.rope.kind == DT_ROPE_YARN)
        all = (pow((c->mla.nope_dim + c->mla.rope_dim) / scalar, 0.25) - 1) /
              (0.1 * log(c->parts.rope.factor));
    gpt_write_rope(o, "rope_parameters", theta, c->parts.rope, all);
}

/* Writes the id of a token, or null if the model has none. Without the key transformers would use
   its default id, which is right only for the default vocabulary. */
static inline void gpt_write_token(
    dt_json_out *o, const char *key, int token, const gpt_config *c) {
    int usual = !gpt_is_deepseek(*c) && c->vocab == (c->arch == GPT_LLAMA ? 32000 : 50257);
    if (token)
        dt_json_put_int(o, key, token - 1);
    else if (!usual)
        dt_json_put_string(o, key, NULL);
}

static inline void gpt_write_config(dt_json_out *o, const gpt_config *c) {
    static const char *const keys[2][6] = { { "n_layer", "n_embd", "n_head", "n_head", "n_inner",
                                                "n_positions" },
        { "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
            "intermediate_size", "max_position_embeddings" } };
    static const char *const types[] = { "float32", "bfloat16", "float16", "float64" };
    const int sizes[6] = { c->layers, c->width, c->heads, c->kv_heads, c->ffn, c->seq };
    static const char *const classes[] = { "LlamaForCausalLM", "MistralForCausalLM",
        "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM" };
    int llama = c->arch == GPT_LLAMA, deepseek = gpt_is_deepseek(*c), kind = gpt_file_model(c);
    int mixtral = gpt_is_mixtral(*c);
    dt_json_put_string(o, "model_type",
        deepseek  ? "deepseek_v3"
        : mixtral ? "mixtral"
        : llama   ? gpt_model_types[kind]
                  : "gpt2");
    dt_json_open(o, "architectures", '[');
    dt_json_put_string(o, NULL,
        deepseek  ? "DeepseekV3ForCausalLM"
        : mixtral ? "MixtralForCausalLM"
        : llama   ? classes[kind]
                  : "GPT2LMHeadModel");
    dt_json_close(o, ']');
    dt_json_put_string(o, "dtype", types[c->dtype]);
    dt_json_put_string(o, "torch_dtype", types[c->dtype]);
    dt_json_put_int(o, "vocab_size", c->vocab);
    dt_json_put_bool(o, "tie_word_embeddings", c->tied);
    gpt_write_token(o, "bos_token_id", c->bos_token, c);
    gpt_write_token(o, "eos_token_id", c->eos_token, c);
    if (deepseek) {
        gpt_write_deepseek(o, c);
        return;
    }
    for (int i = 0; i < 6; i++)
        if (llama || i != 3) dt_json_put_int(o, keys[llama][i], sizes[i]);
    if (mixtral) {
        dt_json_put_int(o, "num_local_experts", c->experts);
        dt_json_put_int(o, "num_experts_per_tok", gpt_top_k(*c));
        dt_json_put_float(o, "router_aux_loss_coef", c->balance);
        if (!c->parts.window) dt_json_put_string(o, "sliding_window", NULL);
    }
    if (llama) {
        gpt_write_llama(o, c);
        return;
    }
    dt_json_put_number(o, "layer_norm_epsilon", c->norm_eps > 0 ? c->norm_eps : 1e-5);
    dt_json_put_string(o, "activation_function", "gelu_new");
    dt_json_put_number(o, "embd_pdrop", c->dropout);
    dt_json_put_number(o, "resid_pdrop", c->dropout);
    dt_json_put_number(o, "attn_pdrop", 0);
}

// ==== Weights ====================================================================================

/* Calls fn for every parameter of the model, also for those of other ranks' pipeline stages. Stops
   after the first error. */
typedef void (*gpt_param_fn)(
    gpt *m, const gpt_param_row *r, int layer, dt_weight_map *p, dt_weights *w, void *user);
static inline void gpt_for_each_param(
    gpt *m, gpt_file_kind kind, dt_weights *w, gpt_param_fn fn, void *user) {
    for (const gpt_param_row *r = gpt_param_rows; r < gpt_param_rows + GPT_PARAM_ROWS; r++)
        for (int i = 0; i < (gpt_is_in_layer(r) ? gpt_all_layers(m->config) : 1); i++) {
            /* after an error the sizes may be 0; adapters are in files of their own */
            if (dt_error(m->ctx) != DT_OK || !gpt_has_param(m->config, r, i) || gpt_is_lora(r))
                continue;
            dt_weight_map p = gpt_file_location_of(m, r, i, kind);
            gpt_set_part_names(&p);
            fn(m, r, i, &p, w, user);
        }
}

/* Loads or saves all parts of a parameter. */
static inline void gpt_copy_parts(dt_weights *w, dt_tensor *t, const dt_weight_map *p, int save) {
    enum { NAME = 128 };
    dt_weight_part first;
    char name[NAME];
    int n = dt_weight_map_part(p, 0, name, &first);
    size_t bytes = (size_t)n * (sizeof first + NAME);
    dt_weight_part *part = (dt_weight_part *)dt_alloc(t->ctx, DT_MEM_HOST, bytes, "parts");
    for (int i = 0; part && i < n; i++)
        dt_weight_map_part(p, i, (char *)(part + n) + i * NAME, &part[i]);
    if (part && save) dt_weights_save(w, t, p->columns, part, n);
    if (part && !save) dt_weights_load(w, t, p->columns, part, n);
    dt_free(t->ctx, DT_MEM_HOST, part, bytes);
}

/* Loads one parameter. `user` points to an array with one flag per tensor of the file; this
   function sets the flags of the tensors that contain the parameter. */
static inline void gpt_load_one(
    gpt *m, const gpt_param_row *r, int layer, dt_weight_map *p, dt_weights *w, void *user) {
    char name[128];
    dt_weight_part part;
    for (int i = 0; i < dt_weight_map_part(p, i, name, &part); i++) {
        int at = dt_weights_find(w, name);
        if (at >= 0) ((char *)user)[at] = 1;
    }
    dt_tensor *own = *gpt_slot(m, r, layer); /* NULL if it is on another rank's stage */
    if (own) gpt_copy_parts(w, own, p, 0);
    dt_tensor *copy = m->config.tied ? m->head : m->mtp_wte; /* on the last stage, or NULL */
    if (gpt_is_embedding(r) && copy && copy != own) gpt_copy_parts(w, copy, p, 0);
}

static inline int gpt_is_ignored(const gpt *m, const char *name) {
    size_t length = strlen(name);
    for (size_t i = 0; i < sizeof gpt_ignored / sizeof *gpt_ignored; i++) {
        size_t end = strlen(gpt_ignored[i]);
        if (length >= end && strcmp(name + length - end, gpt_ignored[i]) == 0) return 1;
    }
    return m->config.tied && strcmp(name, "lm_head.weight") == 0;
}

/* Returns 1 if transformers has files of such a model. Else returns 0 and writes the reason into
   `why`, if it is not NULL. */
static inline int gpt_has_files(const gpt_config *c, char *why, size_t bytes) {
    const char *reason = NULL;
    int deepseek = gpt_is_deepseek(*c);
    if (c->mtp && !c->mla.kv_rank)
        reason = "of models with multi-token prediction only those of DeepSeek-V3 have files, and "
                 "they have latent attention";
    else if (c->mla.kv_rank && !deepseek)
        reason = "of models with latent attention only those of DeepSeek-V3 have files: a MoE "
                 "model needs the sigmoid route, shared experts, and experts in every layer after "
                 "the first dense ones";
    else if (c->experts && !deepseek && !gpt_is_mixtral(*c))
        reason = "of MoE models only those of Mixtral (a Llama whose layers all have experts, "
                 "without shared experts and without a router bias) and of DeepSeek-V3 (with "
                 "latent attention) have files";
    else if (c->arch == GPT_GPT2 && c->kv_heads != c->heads)
        reason = "GPT-2's files have one key head per query head";
    else if (c->arch == GPT_LLAMA && !gpt_file_has_parts(c))
        reason = "no model of transformers has this combination of config.parts";
    if (reason && why) snprintf(why, bytes, "%s", reason);
    return reason == NULL;
}

/* Checks, before any tensor is read or written, that the file's format and header allow this
   model. */
static inline dt_status gpt_load_fits(gpt *m, const char *path, dt_llmc h, int writing) {
    gpt_config c = m->config;
    char why[300];
    if (!gpt_has_files(&c, why, sizeof why))
        return dt_fail(m->ctx, DT_ERR_UNSUPPORTED, "%s: %s", path, why);
    if (c.base && writing)
        return dt_fail(m->ctx, DT_ERR_UNSUPPORTED,
            "%s: the weights are stored as %s, which weight files do not have", path,
            dt_quant_name(c.base));
    if (!h.version) return DT_OK;
    if (c.arch == GPT_GPT2 && c.tied && h.layers == c.layers && h.width == c.width &&
        h.heads == c.heads && c.ffn == 4 * c.width && h.seq == c.seq && h.vocab == c.vocab)
        return DT_OK;
    return dt_fail(m->ctx, DT_ERR_IO,
        "%s: a tied GPT-2 of %d layers, width %d, %d heads, seq %d, vocab %d; the model "
        "is another: %d layers, width %d, %d heads, seq %d, vocab %d",
        path, h.layers, h.width, h.heads, h.seq, h.vocab, c.layers, c.width, c.heads, c.seq,
        c.vocab);
}

/* Loads all parameters. Each rank reads its local slices. */
static inline dt_status gpt_load(gpt *m, const char *path) {
    dt_weights *w = dt_weights_open(m->ctx, path);
    if (!w) return dt_error(m->ctx);
    int count = dt_weights_count(w);
    char *used = (char *)dt_alloc(m->ctx, DT_MEM_HOST, (size_t)count + 1, "gpt_load");
    if (used && gpt_load_fits(m, path, dt_weights_llmc(w), 0) == DT_OK) {
        memset(used, 0, (size_t)count + 1);
        gpt_for_each_param(m, gpt_file_kind_of(m, w), w, gpt_load_one, used);
        for (int i = 0; i < count && dt_error(m->ctx) == DT_OK; i++)
            if (!used[i] && !gpt_is_ignored(m, dt_weights_get(w, i)->name))
                dt_fail(m->ctx, DT_ERR_IO, "%s: %s is not a tensor of this model of %d layers%s",
                    path, dt_weights_get(w, i)->name, m->config.layers,
                    m->config.tied ? " with a tied head" : "");
    }
    dt_free(m->ctx, DT_MEM_HOST, used, (size_t)count + 1);
    dt_weights_close(w);
    return dt_error(m->ctx);
}

/* Declares one parameter. `user` is the prefix of the names, as in gpt_save_one. */
static inline void gpt_declare_one(
    gpt *m, const gpt_param_row *r, int layer, dt_weight_map *p, dt_weights *w, void *user) {
    char name[128];
    dt_weight_part part;
    (void)layer, (void)user;
    dt_dtype wide = m->config.dtype == DT_F64 ? DT_F64 : DT_F32;
    dt_dtype dtype = r->kind == GPT_ROUTER_BIAS ? wide : m->config.dtype;
    /* q, k and v may share one tensor: declare the tensor once */
    for (int i = 0; i < dt_weight_map_part(p, i, name, &part); i++)
        if (dt_weights_find(w, name) < 0) dt_weights_declare(w, name, dtype, p->shape);
}

static inline void gpt_save_one(
    gpt *m, const gpt_param_row *r, int layer, dt_weight_map *p, dt_weights *w, void *user) {
    (void)user;
    gpt_copy_parts(w, *gpt_slot(m, r, layer), p, 1);
}

/* Finds the location of a parameter in model.safetensors. dt_checkpoint_desc.map_weight uses these
   functions, so that transformers can read checkpoints too. In checkpoints of MoE models,
   parameters keep dt's names. */
typedef struct gpt_location_query {
    const dt_tensor *param;
    dt_weight_map *place;
} gpt_location_query;
static inline void gpt_file_location_one(
    gpt *m, const gpt_param_row *r, int layer, dt_weight_map *p, dt_weights *w, void *user) {
    gpt_location_query *s = (gpt_location_query *)user;
    int tied = gpt_is_embedding(r) &&
               ((m->config.tied && s->param == m->head) || (m->mtp_wte && s->param == m->mtp_wte));
    (void)w;
    if (*gpt_slot(m, r, layer) != s->param && !tied) return;
    /* a checkpoint keeps the blocks of quantised weights, which other programs cannot read */
    if (s->param->param->desc.quant == DT_QUANT_NONE) *s->place = *p;
}

static inline void gpt_file_location_in(
    gpt *m, gpt_file_kind kind, const dt_tensor *param, dt_weight_map *place) {
    gpt_location_query s = { param, place };
    if (m->config.arch == GPT_LLAMA || m->config.kv_heads == m->config.heads)
        gpt_for_each_param(m, kind, NULL, gpt_file_location_one, &s);
}

static inline void gpt_file_location(gpt *m, const dt_tensor *param, dt_weight_map *place) {
    if (m->config.experts) return;
    gpt_file_location_in(m,
        (gpt_file_kind){ .prefix = m->config.arch == GPT_LLAMA ? "model." : "transformer." }, param,
        place);
}

/* Returns 1 if a checkpoint that was written with gpt_file_location is a model that transformers
   and gpt_load can read, so that a config.json belongs beside it. A checkpoint of a MoE model has
   dt's names, and one of LoRA has the adapters and maybe a quantised base. */
static inline int gpt_checkpoint_is_model(const gpt_config *c) {
    return !c->experts && !c->lora.rank && gpt_has_files(c, NULL, 0);
}

/* Returns the text of config.json. The caller frees it: dt_free(ctx, DT_MEM_HOST, text,
   strlen(text) + 1). */
static inline char *gpt_config_text(gpt *m) {
    dt_json_out out = { .ctx = m->ctx };
    dt_json_open(&out, NULL, '{');
    gpt_write_config(&out, &m->config);
    dt_json_close(&out, '}');
    char *text =
        out.text ? (char *)dt_alloc(m->ctx, DT_MEM_HOST, out.used + 1, "config.json") : NULL;
    if (text) memcpy(text, out.text, out.used + 1);
    dt_json_out_free(&out);
    return text;
}

/* [local] Writes folder/model.safetensors and folder/config.json. If the weights have more than
   shard_bytes bytes (0 means 5 GB), writes several files and an index. The folder must exist, and
   this rank must hold every parameter in full. */
static inline dt_status gpt_save(gpt *m, const char *folder, int64_t shard_bytes) {
    char name[4096];
    gpt_file_kind kind = { .prefix = m->config.arch == GPT_LLAMA ? "model." : "transformer." };
    if (gpt_load_fits(m, folder, kind.llmc, 1) != DT_OK) return dt_error(m->ctx);
    if (gpt_path_beside(m->ctx, name, sizeof name, folder, "model.safetensors") != 0)
        return dt_error(m->ctx);
    dt_weights *w = dt_weights_create(m->ctx, name,
        (dt_weights_desc){ .shard_bytes = shard_bytes ? shard_bytes : (int64_t)5000000000 });
    gpt_for_each_param(m, kind, w, gpt_declare_one, (void *)kind.prefix);
    gpt_for_each_param(m, kind, w, gpt_save_one, (void *)kind.prefix);
    dt_weights_close(w);
    char *text = gpt_config_text(m);
    if (dt_error(m->ctx) == DT_OK &&
        gpt_path_beside(m->ctx, name, sizeof name, folder, "config.json") == 0)
        dt_file_write(m->ctx, name, text, strlen(text));
    if (text) dt_free(m->ctx, DT_MEM_HOST, text, strlen(text) + 1);
    return dt_error(m->ctx);
}

/* Returns the header of an llm.c file for this model. The header's version is 0 if an llm.c file
   cannot hold the model. */
static inline dt_llmc gpt_llmc(const gpt *m) {
    const gpt_config *c = &m->config;
    int has = c->arch == GPT_GPT2 && c->tied && !c->experts && c->ffn == 4 * c->width &&
              c->kv_heads == c->heads;
    dt_llmc h = { 0, c->seq, c->vocab, c->layers, c->heads, c->width,
        (c->vocab + 127) / 128 * 128 };
    if (has && c->dtype == DT_F32) h.version = 3;
    if (has && c->dtype == DT_BF16) h.version = 5;
    return h;
}

typedef struct gpt_export_state {
    gpt *model;
    gpt_file_kind kind;
} gpt_export_state;
static inline void gpt_export_location(const dt_tensor *param, dt_weight_map *place, void *user) {
    gpt_export_state *o = (gpt_export_state *)user;
    gpt_file_location_in(o->model, o->kind, param, place);
    if (place->n == 0) place->n = -1; /* adapters: lora_files.h */
}

/* [collective: world] Writes one model.safetensors and one config.json, whatever the layout of the
   ranks; if `path` ends in ".bin", writes an llm.c model instead. */
static inline dt_status gpt_export(gpt *m, dt_zero *zero, const char *path) {
    const char *dot = strrchr(path, '.');
    char name[4096];
    int llmc = dot && strcmp(dot, ".bin") == 0;
    gpt_export_state out = { m,
        { .prefix = m->config.arch == GPT_LLAMA ? "model." : "transformer." } };
    if (llmc) out.kind.llmc = gpt_llmc(m);
    if (llmc && !out.kind.llmc.version)
        return dt_fail(m->ctx, DT_ERR_UNSUPPORTED,
            "%s: llm.c's models are tied GPT-2 with a feed-forward of 4 times the width, in f32 or "
            "bf16",
            path);
    if (gpt_load_fits(m, path, out.kind.llmc, 1) != DT_OK) return dt_error(m->ctx);
    if (!llmc && gpt_path_beside(m->ctx, name, sizeof name, path, "model.safetensors") != 0)
        return dt_error(m->ctx);
    dt_zero_export(
        zero, llmc ? path : name, (dt_export_desc){ gpt_export_location, &out, out.kind.llmc });
    char *text = llmc || dt_ctx_rank(m->ctx) != 0 ? NULL : gpt_config_text(m);
    if (text && gpt_path_beside(m->ctx, name, sizeof name, path, "config.json") == 0)
        dt_file_write(m->ctx, name, text, strlen(text));
    if (text) dt_free(m->ctx, DT_MEM_HOST, text, strlen(text) + 1);
    return dt_error(m->ctx);
}

#endif /* GPT_FILES_H */
