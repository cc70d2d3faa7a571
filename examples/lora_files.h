/* lora_files.h - LoRA adapters of gpt.h in PEFT's files, and merging them - public domain or MIT,
   at your choice

   Include lora_files.h after gpt_files.h. All functions are static. `folder` holds
   adapter_config.json and adapter_model.safetensors, as Hugging Face's PEFT writes and reads them.

       c.lora = gpt_lora_from(ctx, "adapter", c.arch);  // rank, alpha, modules
       gpt m  = gpt_register(ctx, c);
       gpt_load(&m, "model");               // the frozen base
       gpt_lora_load(&m, "adapter");        // every rank reads its local slices
       gpt_lora_export(&m, zero, "adapter", "model");   // every rank; the adapters alone
       gpt_lora_merge(&m);                  // or: add them to the weights, then gpt_export

   An adapter with use_rslora (arXiv:2312.03732) scales its output by alpha / sqrt(rank) instead of
   alpha / rank. It is read as one with alpha sqrt(rank), which is the same function.

   GPT-2's q, k and v are one module of PEFT, c_attn, with one matrix A. gpt.h has one adapter for
   each, so adapters of these modules cannot be exchanged with PEFT, and both directions refuse
   them. */
#ifndef LORA_FILES_H
#define LORA_FILES_H

/* The modules by their names in --lora-on and in PEFT's files. NULL: this architecture's files do
   not have the module. */
typedef struct gpt_lora_name {
    const char *option, *llama, *gpt2;
} gpt_lora_name;
static const gpt_lora_name gpt_lora_names[GPT_LORA_MODULES] = {
    [GPT_LORA_Q] = { "q", "self_attn.q_proj", NULL },
    [GPT_LORA_K] = { "k", "self_attn.k_proj", NULL },
    [GPT_LORA_V] = { "v", "self_attn.v_proj", NULL },
    [GPT_LORA_O] = { "o", "self_attn.o_proj", "attn.c_proj" },
    [GPT_LORA_GATE] = { "gate", "mlp.gate_proj", NULL },
    [GPT_LORA_UP] = { "up", "mlp.up_proj", NULL },
    [GPT_LORA_DOWN] = { "down", "mlp.down_proj", "mlp.c_proj" },
    [GPT_LORA_FC] = { "fc", NULL, "mlp.c_fc" },
};

/* PEFT's name of a module, "self_attn.q_proj"; NULL if its files cannot hold it. */
static inline const char *gpt_lora_file_name(int arch, int module) {
    return arch == GPT_LLAMA ? gpt_lora_names[module].llama : gpt_lora_names[module].gpt2;
}

/* Returns the bits of the modules that a name of target_modules means. PEFT compares the end of a
   module's path: "q_proj" and "self_attn.q_proj" mean the same, and "c_proj" means two modules. */
static inline unsigned gpt_lora_modules_named(int arch, const char *name) {
    unsigned modules = 0;
    size_t length = strlen(name);
    for (int i = 0; i < GPT_LORA_MODULES; i++) {
        const char *path = gpt_lora_file_name(arch, i);
        size_t all = path ? strlen(path) : 0;
        if (length > 0 && all >= length && strcmp(path + all - length, name) == 0 &&
            (all == length || path[all - length - 1] == '.'))
            modules |= 1u << i;
    }
    return modules;
}

// ==== adapter_config.json =======================================================================

/* Refuses a key whose value would change what the adapter computes. */
static inline void gpt_lora_key_unset(dt_json *j, const char *key) {
    int node = gpt_key(j, 0, key, 0), on = 0;
    if (node < 0 || (dt_json_bool(j, node, &on) && !on)) return;
    int kind = dt_json_kind_of(j, node);
    if ((kind == DT_JSON_OBJECT || kind == DT_JSON_ARRAY) && dt_json_count(j, node) == 0) return;
    dt_json_fail(j, node, "%s is not supported", key);
}

static inline void gpt_lora_read_config(dt_json *j, gpt_lora *l, int arch) {
    static const char *const unset[] = { "rank_pattern", "alpha_pattern", "modules_to_save",
        "layers_to_transform", "layer_replication", "use_dora", "use_qalora", "use_bdlora",
        "lora_bias", "target_parameters", "trainable_token_indices" };
    if (dt_json_kind_of(j, 0) != DT_JSON_OBJECT) {
        dt_json_fail(j, 0, "an object is needed");
        return;
    }
    gpt_key_word(j, 0, "peft_type", "LORA", "LORA");
    gpt_key_word(j, 0, "bias", "none", "none");
    for (size_t i = 0; i < sizeof unset / sizeof *unset; i++) gpt_lora_key_unset(j, unset[i]);
    l->rank = gpt_key_int(j, "r", 0, 1 << 20);
    l->alpha = gpt_key_number(j, 0, "lora_alpha", l->rank);
    if (gpt_key_bool(j, "use_rslora", 0)) l->alpha *= sqrt((double)l->rank);
    int list = gpt_key(j, 0, "target_modules", 1);
    if (list >= 0 && dt_json_kind_of(j, list) != DT_JSON_ARRAY)
        dt_json_fail(j, list, "target_modules: a list of names is needed");
    for (int i = 0; i < dt_json_count(j, list); i++) {
        const char *name = dt_json_string(j, dt_json_at(j, list, i), NULL);
        unsigned modules = name ? gpt_lora_modules_named(arch, name) : 0;
        l->modules |= modules;
        if (!modules)
            dt_json_fail(j, dt_json_at(j, list, i), "target_modules: '%s' is no module that %s",
                name ? name : "", arch == GPT_LLAMA ? "a Llama can adapt" : "a GPT-2 can adapt");
    }
}

/* Reads adapter_config.json into *l. If `base` is not NULL, writes the name of the model that the
   adapter was made for into it, an empty string if the file does not have it. */
static inline void gpt_lora_read(
    dt_ctx *ctx, const char *folder, int arch, gpt_lora *l, char *base, size_t base_bytes) {
    char name[4096];
    size_t bytes = 0;
    if (gpt_path_beside(ctx, name, sizeof name, folder, "adapter_config.json") != 0) return;
    char *text = dt_file_read(ctx, name, 1 << 24, &bytes);
    dt_json *j = text ? dt_json_parse(ctx, name, text, bytes) : NULL;
    const char *made_for = dt_json_string(j, dt_json_find(j, 0, "base_model_name_or_path"), NULL);
    if (j) gpt_lora_read_config(j, l, arch);
    if (base) snprintf(base, base_bytes, "%s", made_for ? made_for : "");
    dt_json_free(j);
    if (text) dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
}

/* Returns the rank, alpha and modules of the adapter in a folder; the rank is 0 after a failure. */
static inline gpt_lora gpt_lora_from(dt_ctx *ctx, const char *folder, int arch) {
    gpt_lora l = { .rank = 0 }, none = l;
    gpt_lora_read(ctx, folder, arch, &l, NULL, 0);
    return dt_error(ctx) == DT_OK ? l : none;
}

static inline void gpt_lora_write_config(const gpt *m, dt_json_out *o, const char *base) {
    const gpt_config *c = &m->config;
    dt_json_put_string(o, "peft_type", "LORA");
    dt_json_put_string(o, "task_type", "CAUSAL_LM");
    dt_json_put_string(o, "base_model_name_or_path", base);
    dt_json_put_int(o, "r", c->lora.rank);
    dt_json_put_number(o, "lora_alpha", c->lora.alpha > 0 ? c->lora.alpha : c->lora.rank);
    dt_json_put_number(o, "lora_dropout", c->lora.dropout);
    dt_json_open(o, "target_modules", '[');
    for (int i = 0; i < GPT_LORA_MODULES; i++)
        if (c->lora.modules >> i & 1) dt_json_put_string(o, NULL, gpt_lora_file_name(c->arch, i));
    dt_json_close(o, ']');
    dt_json_put_string(o, "bias", "none");
    /* GPT-2's Conv1D stores its weights transposed */
    dt_json_put_bool(o, "fan_in_fan_out", c->arch == GPT_GPT2);
    dt_json_put_bool(o, "inference_mode", 1);
    dt_json_put_bool(o, "init_lora_weights", 1);
    dt_json_put_bool(o, "use_rslora", 0);
    dt_json_put_bool(o, "use_dora", 0);
}

// ==== adapter_model.safetensors =================================================================

/* Returns where a parameter of an adapter is in the file: a matrix (r,in) or (out,r). */
static inline dt_weight_map gpt_lora_location(const gpt *m, const gpt_param_row *r, int layer) {
    dt_weight_map p;
    dt_shape s = gpt_shape(m->config, r, layer);
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.columns = s.d[s.nd - 1];
    p.part[0].rows = dt_count(s) / p.columns;
    p.shape = DT_SHAPE(p.part[0].rows, p.columns);
    snprintf(p.name[0], sizeof p.name[0], "base_model.model.%s.%d.%s.lora_%c.weight",
        m->config.arch == GPT_LLAMA ? "model.layers" : "transformer.h", layer,
        gpt_lora_file_name(m->config.arch, gpt_lora_module(r)), r->kind == GPT_LORA_A ? 'A' : 'B');
    return p;
}

/* Fails if PEFT's files cannot hold the model's adapters. */
static inline dt_status gpt_lora_fits(const gpt *m, const char *folder) {
    const gpt_config *c = &m->config;
    if (c->lora.rank == 0)
        return dt_fail(m->ctx, DT_ERR_ARG, "%s: the model has no adapters", folder);
    for (int i = 0; i < GPT_LORA_MODULES; i++)
        if (c->lora.modules >> i & 1 && !gpt_lora_file_name(c->arch, i))
            return dt_fail(m->ctx, DT_ERR_UNSUPPORTED,
                "%s: PEFT's files have no adapter of GPT-2's %s alone: its q, k and v are one "
                "module, c_attn",
                folder, gpt_lora_names[i].option);
    return DT_OK;
}

/* Writes "; this adapter was made for 'NAME'" into `out`, or nothing if the file has no name. */
static inline void gpt_lora_made_for(gpt *m, const char *folder, char *out, size_t bytes) {
    char base[256] = "";
    gpt_lora l;
    gpt_lora_read(m->ctx, folder, m->config.arch, &l, base, sizeof base);
    snprintf(out, bytes, *base ? "; this adapter was made for '%s'" : "%s", base);
}

/* Fails if the file does not have the tensor `name` in this shape: the adapter belongs to another
   base. */
static inline dt_status gpt_lora_check(
    gpt *m, const dt_weights *w, const char *name, dt_shape shape, const char *folder) {
    const dt_weight *t = dt_weights_get(w, dt_weights_find(w, name));
    char made_for[300], has[64] = "is not in the file";
    if (t && t->shape.nd == 2 && t->shape.d[0] == shape.d[0] && t->shape.d[1] == shape.d[1])
        return DT_OK;
    if (t && t->shape.nd == 2)
        snprintf(has, sizeof has, "has the shape (%lld,%lld)", (long long)t->shape.d[0],
            (long long)t->shape.d[1]);
    else if (t)
        snprintf(has, sizeof has, "has %d dimensions", t->shape.nd);
    gpt_lora_made_for(m, folder, made_for, sizeof made_for);
    return dt_fail(m->ctx, DT_ERR_IO, "%s: '%s' %s; the model needs (%lld,%lld)%s", folder, name,
        has, (long long)shape.d[0], (long long)shape.d[1], made_for);
}

/* Loads the adapters. Each rank reads its local slices. The error names the file, the base that the
   adapter was made for, and the first tensor that is missing or has another shape; of tensors that
   the model does not have it gives the number. */
static inline dt_status gpt_lora_load(gpt *m, const char *folder) {
    char name[4096], made_for[300] = "";
    if (gpt_lora_fits(m, folder) != DT_OK ||
        gpt_path_beside(m->ctx, name, sizeof name, folder, "adapter_model.safetensors") != 0)
        return dt_error(m->ctx);
    dt_weights *w = dt_weights_open(m->ctx, name);
    int count = dt_weights_count(w), loaded = 0;
    for (const gpt_param_row *r = gpt_param_rows; w && r < gpt_param_rows + GPT_PARAM_ROWS; r++)
        for (int i = 0; i < m->config.layers && dt_error(m->ctx) == DT_OK; i++) {
            if (!gpt_is_lora(r) || !gpt_has_param(m->config, r, i)) continue;
            dt_weight_map p = gpt_lora_location(m, r, i);
            p.part[0].name = p.name[0];
            if (gpt_lora_check(m, w, p.name[0], p.shape, folder) != DT_OK) break;
            loaded++;
            /* NULL if it is on another rank's stage */
            if (*gpt_slot(m, r, i)) dt_weights_load(w, *gpt_slot(m, r, i), p.columns, p.part, 1);
        }
    if (w && dt_error(m->ctx) == DT_OK && loaded != count) {
        gpt_lora_made_for(m, folder, made_for, sizeof made_for);
        dt_fail(m->ctx, DT_ERR_IO,
            "%s: %d of its %d tensors are adapters of this model of %d layers: it has another "
            "base%s",
            name, loaded, count, m->config.layers, made_for);
    }
    dt_weights_close(w);
    return dt_error(m->ctx);
}

static inline void gpt_lora_map(const dt_tensor *param, dt_weight_map *place, void *user) {
    gpt *m = (gpt *)user;
    place->n = -1; /* all other parameters are not in the file */
    for (const gpt_param_row *r = gpt_param_rows; r < gpt_param_rows + GPT_PARAM_ROWS; r++)
        for (int i = 0; gpt_is_lora(r) && i < m->config.layers; i++)
            if (*gpt_slot(m, r, i) == param) *place = gpt_lora_location(m, r, i);
}

/* [collective: world] Writes the adapters of a model in any layout to a folder, which must exist.
   `base` is the path or name of the base model that PEFT loads; may be NULL. */
static inline dt_status gpt_lora_export(
    gpt *m, dt_zero *zero, const char *folder, const char *base) {
    char name[4096];
    if (gpt_lora_fits(m, folder) != DT_OK ||
        gpt_path_beside(m->ctx, name, sizeof name, folder, "adapter_model.safetensors") != 0)
        return dt_error(m->ctx);
    dt_zero_export(zero, name, (dt_export_desc){ .map_weight = gpt_lora_map, .user = m });
    if (dt_error(m->ctx) != DT_OK || dt_ctx_rank(m->ctx) != 0) return dt_error(m->ctx);
    dt_json_out out = { .ctx = m->ctx };
    dt_json_open(&out, NULL, '{');
    gpt_lora_write_config(m, &out, base);
    dt_json_close(&out, '}');
    if (out.text && gpt_path_beside(m->ctx, name, sizeof name, folder, "adapter_config.json") == 0)
        dt_file_write(m->ctx, name, out.text, out.used);
    dt_json_out_free(&out);
    return dt_error(m->ctx);
}

// ==== Merging ===================================================================================

/* Returns the values of a local slice, which the caller frees: dt_free(ctx, DT_MEM_HOST, values,
   dt_count(t->shape) * 8). */
static inline double *gpt_lora_values(dt_tensor *t) {
    size_t bytes = (size_t)dt_count(t->shape) * sizeof(double);
    double *values = (double *)dt_alloc(t->ctx, DT_MEM_HOST, bytes, "merging adapters");
    if (values && dt_read(t, values) == DT_OK)
        dt_read(dt_cast(dt_input(t->ctx, t->dtype, t->shape, values), DT_F64), values);
    return values;
}

static inline void gpt_lora_set_values(dt_tensor *t, const double *values) {
    size_t bytes = (size_t)dt_count(t->shape) * sizeof *values;
    dt_tensor *rounded = dt_cast(dt_input(t->ctx, DT_F64, t->shape, values), t->dtype);
    void *host = dt_alloc(t->ctx, DT_MEM_HOST, bytes, "merging adapters");
    if (host && dt_read(rounded, host) == DT_OK) dt_write(t, host);
    dt_free(t->ctx, DT_MEM_HOST, host, bytes);
}

/* w += scale * b a, for part `part` of w's `parts`, and then b = 0, so that the model stays the
   same. Every rank merges its local slices: over tp either a and w or b and w are sharded. */
static inline void gpt_lora_merge_one(
    const gpt *m, int layer, dt_tensor *w, int module, int part, int parts) {
    dt_tensor *a = m->layer[layer].lora_a[module], *b = m->layer[layer].lora_b[module];
    double scale = m->config.lora.alpha > 0 ? m->config.lora.alpha / m->config.lora.rank : 1;
    if (!w || !a || dt_error(m->ctx) != DT_OK) return;
    double *W = gpt_lora_values(w), *A = gpt_lora_values(a), *B = gpt_lora_values(b);
    int64_t R = m->config.lora.rank, in = dt_count(a->shape) / R, out = dt_count(b->shape) / R;
    for (int64_t i = 0; dt_error(m->ctx) == DT_OK && i < out; i++) {
        double *row = W + (part * (dt_count(w->shape) / parts)) + i * in;
        for (int64_t k = 0; k < in; k++)
            for (int64_t r = 0; r < R; r++) row[k] += scale * B[i * R + r] * A[r * in + k];
        for (int64_t r = 0; r < R; r++) B[i * R + r] = 0;
    }
    if (dt_error(m->ctx) == DT_OK) gpt_lora_set_values(w, W);
    if (dt_error(m->ctx) == DT_OK) gpt_lora_set_values(b, B);
    dt_free(m->ctx, DT_MEM_HOST, W, (size_t)dt_count(w->shape) * sizeof *W);
    dt_free(m->ctx, DT_MEM_HOST, A, (size_t)dt_count(a->shape) * sizeof *A);
    dt_free(m->ctx, DT_MEM_HOST, B, (size_t)dt_count(b->shape) * sizeof *B);
    dt_reset(m->ctx);
}

/* [collective: at ZeRO-3 the data group] Adds the adapters to the weights and sets them to zero.
   Call it between steps. Fails for a quantised base, whose blocks cannot hold the sum. */
static inline dt_status gpt_lora_merge(gpt *m) {
    if (m->config.base)
        return dt_fail(m->ctx, DT_ERR_UNSUPPORTED,
            "gpt_lora_merge: the base is stored as %s; merge the adapter into the model it was "
            "quantised from",
            dt_quant_name(m->config.base));
    for (int i = 0; i < m->config.layers; i++) {
        const gpt_layer *l = &m->layer[i];
        dt_tensor *const whole[GPT_LORA_MODULES] = { [GPT_LORA_Q] = l->q,
            [GPT_LORA_K] = l->k,
            [GPT_LORA_V] = l->v,
            [GPT_LORA_O] = l->attn_proj,
            [GPT_LORA_DOWN] = l->mlp_proj,
            [GPT_LORA_FC] = l->fc };
        for (int module = 0; module < GPT_LORA_MODULES; module++)
            gpt_lora_merge_one(m, i, whole[module], module, 0, 1);
        gpt_lora_merge_one(m, i, l->gate_up, GPT_LORA_GATE, 0, 2);
        gpt_lora_merge_one(m, i, l->gate_up, GPT_LORA_UP, 1, 2);
    }
    return dt_error(m->ctx);
}

#endif /* LORA_FILES_H */
