/* gpt.h - GPT-2 as a user of dt writes it: public calls only - public domain or MIT, at your choice

   Include it after dt_zero.h (or dt_tensor.h: it needs no more). Everything is static.

       gpt        model  = gpt_register(ctx, (gpt_config){ .layers = 4, .width = 128, .heads = 4, .kv_heads = 4,
                                                           .ffn = 512, .seq = 128, .vocab = 256, .tied = 1 });
       dt_tensor *logits = gpt_logits(&model, ids);                          // (B,T) i32 -> (B,T,V)
       dt_tensor *loss   = gpt_loss(&model, ids, labels, denominator);       // a scalar in nats

   The model:
       x = wte[ids] + wpe[0..T)
       per layer   x += attn.proj(attention(q(n), k(n), v(n))), where n = ln_1(x)
                   x += mlp.proj(gelu(mlp.fc(ln_2(x))))
       logits = ln_f(x) head^T, where head is wte if tied, else lm_head; no bias
   Recomputation keeps less in the forward and computes it again in the backward. Kept of one layer, in elements for
   each token (the layer's own; its input is the output of the layer before):

       none        8C + 2KD + 2F + H + 4    n, q, k, v, heads, proj, x, n, fc, gelu, proj, x; lse; mean and rstd twice
       selective   6C + 2F + 2              without n, q, k, v, lse, mean, rstd of attention (arXiv:2205.05198)
       full        C                        the output (arXiv:1604.06174)
       full:k      C / k                    the output of every k-th layer; the backward holds what `none` keeps of k
                                            layers at a time: it gains over `full` where L - L/k > (k - 1)(18 + H/C),
                                            if F = 4C and K = H

   Letters: B sequences, T tokens of each, V vocabulary, C width, H heads, K heads of keys and values, D = C/H, F feed
   forward. Fewer K than H is grouped-query attention, arXiv:2305.13245. */
#ifndef GPT_H
#define GPT_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { GPT_MAX_LAYERS = 192 };
enum { GPT_RECOMPUTE_NONE = 0, GPT_RECOMPUTE_SELECTIVE, GPT_RECOMPUTE_FULL };

typedef struct gpt_config {
    int      layers, width, heads, kv_heads, ffn;
    int      seq;       /* the longest T */
    int      vocab;
    int      tied;      /* 1: the head is wte.weight; 0: lm_head.weight */
    dt_dtype dtype;
    int      recompute; /* GPT_RECOMPUTE_*; the results are the same to the bit */
    int      recompute_every;   /* full: layers of one recomputed block; 0 -> 1 */
} gpt_config;

typedef struct gpt_layer {
    dt_tensor *ln_1_gain, *ln_1_bias;           /* (C) */
    dt_tensor *q, *q_bias;                      /* (H,D,C), (H,D) */
    dt_tensor *k, *k_bias, *v, *v_bias;         /* (K,D,C), (K,D) */
    dt_tensor *attn_proj, *attn_proj_bias;      /* (C,C), (C) */
    dt_tensor *ln_2_gain, *ln_2_bias;           /* (C) */
    dt_tensor *fc, *fc_bias;                    /* (F,C), (F) */
    dt_tensor *mlp_proj, *mlp_proj_bias;        /* (C,F), (C) */
    int        selective;                       /* attention is recomputed */
    int        group;                           /* layers of the recomputed block that begins here; 0: none does */
} gpt_layer;

typedef struct gpt {
    gpt_config config;
    dt_ctx    *ctx;
    dt_tensor *wte, *wpe;                       /* (V,C), (seq,C) */
    gpt_layer  layer[GPT_MAX_LAYERS];
    dt_tensor *ln_f_gain, *ln_f_bias;           /* (C) */
    dt_tensor *head;                            /* (V,C) */
} gpt;

/* How many numbers the parameters are. */
static inline int64_t gpt_count(gpt_config c) {
    int64_t C = c.width, F = c.ffn, kv = (int64_t)c.width / c.heads * c.kv_heads;
    int64_t attention = 2 * (C * C + C) + 2 * (kv * C + kv), mlp = 2 * F * C + F + C, norms = 4 * C;
    return (int64_t)c.vocab * C * (c.tied ? 1 : 2) + (int64_t)c.seq * C + c.layers * (attention + mlp + norms) + 2 * C;
}

/* Multiplications and additions of forward and backward of one token: 6 for each parameter, and the products with keys
   and values, 12 L C T (arXiv:2204.02311, appendix B). */
static inline double gpt_flops_per_token(gpt_config c) {
    return 6.0 * (double)gpt_count(c) + 12.0 * c.layers * (double)c.width * c.seq;
}

static inline dt_tensor *gpt_weight(gpt *m, const char *name, dt_shape full, double std) {
    return dt_param_at(m->ctx, name, full, DT_NORMAL(std), (dt_param_desc){ .dtype = m->config.dtype });
}

/* Biases and gains never decay; (H,D) has to say so, having two dimensions. */
static inline dt_tensor *gpt_bias(gpt *m, const char *name, dt_shape full, dt_init init) {
    return dt_param_at(m->ctx, name, full, init, (dt_param_desc){ .no_decay = 1, .dtype = m->config.dtype });
}

static inline void gpt_register_layer(gpt *m, gpt_layer *l, const char *scope) {
    int64_t C = m->config.width, H = m->config.heads, K = m->config.kv_heads, D = C / H, F = m->config.ffn;
    double  residual = 0.02 / sqrt(2.0 * m->config.layers); /* so that the sum of 2 L branches stays near 1 */
    dt_scope(m->ctx, scope);
    l->ln_1_gain = gpt_bias(m, "ln_1.weight", DT_SHAPE(C), DT_ONES);
    l->ln_1_bias = gpt_bias(m, "ln_1.bias", DT_SHAPE(C), DT_ZEROS);
    l->q = gpt_weight(m, "attn.q.weight", DT_SHAPE(H, D, C), 0.02);
    l->q_bias = gpt_bias(m, "attn.q.bias", DT_SHAPE(H, D), DT_ZEROS);
    l->k = gpt_weight(m, "attn.k.weight", DT_SHAPE(K, D, C), 0.02);
    l->k_bias = gpt_bias(m, "attn.k.bias", DT_SHAPE(K, D), DT_ZEROS);
    l->v = gpt_weight(m, "attn.v.weight", DT_SHAPE(K, D, C), 0.02);
    l->v_bias = gpt_bias(m, "attn.v.bias", DT_SHAPE(K, D), DT_ZEROS);
    l->attn_proj = gpt_weight(m, "attn.proj.weight", DT_SHAPE(C, C), residual);
    l->attn_proj_bias = gpt_bias(m, "attn.proj.bias", DT_SHAPE(C), DT_ZEROS);
    l->ln_2_gain = gpt_bias(m, "ln_2.weight", DT_SHAPE(C), DT_ONES);
    l->ln_2_bias = gpt_bias(m, "ln_2.bias", DT_SHAPE(C), DT_ZEROS);
    l->fc = gpt_weight(m, "mlp.fc.weight", DT_SHAPE(F, C), 0.02);
    l->fc_bias = gpt_bias(m, "mlp.fc.bias", DT_SHAPE(F), DT_ZEROS);
    l->mlp_proj = gpt_weight(m, "mlp.proj.weight", DT_SHAPE(C, F), residual);
    l->mlp_proj_bias = gpt_bias(m, "mlp.proj.bias", DT_SHAPE(C), DT_ZEROS);
    dt_scope(m->ctx, NULL);
}

/* Whether a recomputed block begins at layer i, and how much it holds. */
static inline void gpt_plan_recompute(gpt_layer *l, int i, gpt_config c) {
    int every = c.recompute_every > 0 ? c.recompute_every : 1, left = c.layers - i;
    l->selective = c.recompute == GPT_RECOMPUTE_SELECTIVE;
    if (c.recompute == GPT_RECOMPUTE_FULL && i % every == 0) l->group = left < every ? left : every;
}

/* Names every parameter; their memory and values come with dt_zero_make. A config that cannot be fails the context. */
static inline gpt gpt_register(dt_ctx *ctx, gpt_config c) {
    gpt  m = { .config = c, .ctx = ctx };
    char scope[32];
    if (c.layers < 0 || c.layers > GPT_MAX_LAYERS || c.width < 1 || c.heads < 1 || c.width % c.heads != 0 ||
        c.kv_heads < 1 || c.heads % c.kv_heads != 0 || c.ffn < 1 || c.seq < 1 || c.vocab < 1 ||
        c.recompute < GPT_RECOMPUTE_NONE || c.recompute > GPT_RECOMPUTE_FULL || c.recompute_every < 0) {
        dt_fail(ctx, DT_ERR_ARG, "gpt_register: layers %d, width %d, heads %d, kv_heads %d, ffn %d, seq %d, vocab %d, "
            "recompute %d every %d", c.layers, c.width, c.heads, c.kv_heads, c.ffn, c.seq, c.vocab, c.recompute,
            c.recompute_every);
        return m;
    }
    m.wte = gpt_weight(&m, "wte.weight", DT_SHAPE(c.vocab, c.width), 0.02);
    m.wpe = gpt_weight(&m, "wpe.weight", DT_SHAPE(c.seq, c.width), 0.01);
    for (int i = 0; i < c.layers; i++) {
        snprintf(scope, sizeof scope, "h.%d.", i);
        gpt_register_layer(&m, &m.layer[i], scope);
        gpt_plan_recompute(&m.layer[i], i, c);
    }
    m.ln_f_gain = gpt_bias(&m, "ln_f.weight", DT_SHAPE(c.width), DT_ONES);
    m.ln_f_bias = gpt_bias(&m, "ln_f.bias", DT_SHAPE(c.width), DT_ZEROS);
    m.head = c.tied ? m.wte : gpt_weight(&m, "lm_head.weight", DT_SHAPE(c.vocab, c.width), 0.02);
    return m;
}

/* The first half of a layer up to its heads, (B,T,C) -> (B,T,C): what selective recomputation computes again. */
static inline dt_tensor *gpt_heads(dt_tensor *x, void *user) {
    const gpt_layer *l = (const gpt_layer *)user;
    dt_tensor *n = dt_layernorm(x, l->ln_1_gain, l->ln_1_bias, 0);
    dt_tensor *q = dt_linear(n, l->q, l->q_bias);                                               /* (B,T,H,D) */
    dt_tensor *k = dt_linear(n, l->k, l->k_bias);                                               /* (B,T,K,D) */
    dt_tensor *v = dt_linear(n, l->v, l->v_bias);
    dt_tensor *heads = dt_attention(q, k, v, (dt_attn_desc){ 0 });                              /* (B,T,H,D) */
    return heads ? dt_reshape(heads, x->shape) : NULL;
}

/* One layer, (B,T,C) -> (B,T,C): a block. */
static inline dt_tensor *gpt_layer_forward(dt_tensor *x, void *user) {
    const gpt_layer *l = (const gpt_layer *)user;
    dt_tensor *heads = x && l->selective ? dt_block_at(x->ctx, gpt_heads, x, user, (dt_block_desc){ .recompute = 1 })
                                         : gpt_heads(x, user);
    x = dt_add(x, dt_linear(heads, l->attn_proj, l->attn_proj_bias));                           /* (B,T,C) */
    dt_tensor *n = dt_layernorm(x, l->ln_2_gain, l->ln_2_bias, 0);
    dt_tensor *h = dt_gelu(dt_linear(n, l->fc, l->fc_bias));                                    /* (B,T,F) */
    return dt_add(x, dt_linear(h, l->mlp_proj, l->mlp_proj_bias));
}

/* The layers that are recomputed together, from the first one on. */
static inline dt_tensor *gpt_group_forward(dt_tensor *x, void *user) {
    gpt_layer *l = (gpt_layer *)user;
    for (int i = 0; x && i < l->group; i++) x = dt_block(x->ctx, gpt_layer_forward, x, l + i);
    return x;
}

/* 0, 1, .. T-1 */
static inline dt_tensor *gpt_positions(dt_ctx *ctx, int64_t T) {
    int32_t *at = (int32_t *)malloc((size_t)T * sizeof *at);
    if (!at) {
        dt_fail(ctx, DT_ERR_MEM, "gpt_positions: %lld tokens", (long long)T);
        return NULL;
    }
    for (int64_t t = 0; t < T; t++) at[t] = (int32_t)t;
    dt_tensor *positions = dt_input(ctx, DT_I32, DT_SHAPE(T), at);
    free(at);
    return positions;
}

/* ids (B,T) i32 -> (B,T,V) */
static inline dt_tensor *gpt_logits(gpt *m, dt_tensor *ids) {
    if (!ids) return NULL;
    dt_tensor *x = dt_add(dt_embedding(m->wte, ids), dt_embedding(m->wpe, gpt_positions(m->ctx, ids->shape.d[1])));
    for (int i = 0, n; i < m->config.layers; i += n) {
        gpt_layer *l = &m->layer[i];
        n = l->group > 0 ? l->group : 1;
        x = dt_block_at(m->ctx, n > 1 ? gpt_group_forward : gpt_layer_forward, x, l, (dt_block_desc){ l->group > 0, 0 });
    }
    return dt_linear(dt_layernorm(x, m->ln_f_gain, m->ln_f_bias, 0), m->head, NULL);
}

/* ids, labels (B,T) i32 -> the sum of cross-entropies over labels >= 0, divided by denominator */
static inline dt_tensor *gpt_loss(gpt *m, dt_tensor *ids, dt_tensor *labels, double denominator) {
    return dt_cross_entropy(gpt_logits(m, ids), labels, denominator);
}

/* ==== Sampling ==================================================================================================== */

/* A number in [0,1) that depends on seed and index only (splitmix64's mixer). */
static inline double gpt_random(uint64_t seed, uint64_t index) {
    uint64_t z = seed * 0xD1342543DE82EF95u + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}

static inline double gpt_element(const void *array, dt_dtype dtype, int64_t i) {
    return dtype == DT_F64 ? ((const double *)array)[i] : (double)((const float *)array)[i];
}

/* An id below n, drawn from softmax(logits / temperature) at point u in [0,1); temperature 0: the likeliest. */
static inline int32_t gpt_sample(const void *logits, dt_dtype dtype, int n, double temperature, double u) {
    int32_t best = 0;
    double  sum = 0;
    for (int i = 1; i < n; i++)
        if (gpt_element(logits, dtype, i) > gpt_element(logits, dtype, best)) best = i;
    if (temperature <= 0) return best;
    double top = gpt_element(logits, dtype, best);
    for (int i = 0; i < n; i++) sum += exp((gpt_element(logits, dtype, i) - top) / temperature);
    for (int i = 0; i < n; i++) {
        u -= exp((gpt_element(logits, dtype, i) - top) / temperature) / sum;
        if (u < 0) return i;
    }
    return best;
}

/* Continues ids, of which `have` >= 1 are given, to `want`, with ids below `limit` (256: bytes). Each token computes
   its whole window of up to seq tokens again: slow, simple, and the same numbers as in training. */
static inline dt_status gpt_generate(gpt *m, int32_t *ids, int have, int want, int limit, double temperature,
    uint64_t seed) {
    dt_dtype dtype = m->config.dtype;
    size_t   row = (size_t)m->config.vocab * dt_dtype_size(dtype);
    char    *logits = (char *)malloc((size_t)m->config.seq * row);
    if (!logits) return dt_fail(m->ctx, DT_ERR_MEM, "gpt_generate: %d x %d logits", m->config.seq, m->config.vocab);
    if (limit > m->config.vocab) limit = m->config.vocab;
    dt_no_grad(m->ctx, 1);
    for (int at = have; at < want && dt_error(m->ctx) == DT_OK; at++) {
        int        T = at < m->config.seq ? at : m->config.seq;
        dt_tensor *out = gpt_logits(m, dt_input(m->ctx, DT_I32, DT_SHAPE(1, T), ids + at - T));
        if (!out || dt_read(out, logits) != DT_OK) break;
        ids[at] = gpt_sample(logits + (size_t)(T - 1) * row, dtype, limit, temperature, gpt_random(seed, (uint64_t)at));
        dt_reset(m->ctx);
    }
    dt_no_grad(m->ctx, 0);
    free(logits);
    return dt_error(m->ctx);
}

#endif /* GPT_H */
