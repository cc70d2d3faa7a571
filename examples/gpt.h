/* gpt.h - GPT-2 and Llama as a user of dt writes them: public calls only - public domain or MIT, at
   your choice

   Include it after dt_zero.h (or dt_parallel.h: it needs no more). Everything is static. Files:
   gpt_files.h.

       gpt        model  = gpt_register(ctx, (gpt_config){ .layers = 4, .width = 128, .heads = 4, .kv_heads = 4,
                                                           .ffn = 512, .seq = 128, .vocab = 256,
                                                           .tied = 1 });
       dt_tensor *logits = gpt_logits(&model, ids);                          // (B,T) i32 -> (B,T,V)
       dt_tensor *loss   = gpt_loss(&model, ids, labels, denominator);       // a scalar in nats
       gpt_generate(&model, text, have, want, (gpt_sampling){ .temperature = 0.8 });

   GPT_GPT2:   x = wte[ids] + wpe[positions]
               per layer   x += attn.proj(attention(q(n), k(n), v(n))), where n = ln_1(x)
                           x += mlp.proj(gelu(mlp.fc(ln_2(x))))
               logits = ln_f(x) head^T, where head is wte if tied, else lm_head; no bias
   GPT_LLAMA:  the same but for RMSNorm in place of layernorms, no biases, no wpe but q and k turned
               by their positions (halves, theta), and mlp.proj(silu(gate) up), gate and up being
               one parameter (2,F,C).
   Dropout, where a step is given: of the embedding, and of attn.proj and mlp.proj before they are
   added. With config.experts, every moe_every-th layer has a mixture of MLPs in place of the one:
   each token goes through top_k of them, which are spread over config.ep (dt_parallel.h, section
   5), and through `shared` more that all share.

   Recomputation keeps less in the forward and computes it again in the backward. Kept of one layer,
   in elements for each token (the layer's own; its input is the output of the layer before):

       GPT-2   none        6C + 2KD + 2F + H + 4    n, q, k, v, heads, x, n, fc, gelu, x; lse; mean and rstd twice
               selective   4C + 2F + 2              without n, q, k, v, lse, mean, rstd of attention (arXiv:2205.05198)
       Llama   none        7C + 3KD + 3F + H + 2    n, q, k, v, turned q, k, heads, x, n, gate, up, h, x; lse; rstd
               selective   4C + 3F + 1
       both    full        C                        the output (arXiv:1604.06174)
               full:k      C / k                    the output of every k-th layer; the backward holds what `none` keeps
                                                    of k layers at a time: GPT-2 gains over `full`
                                                    where L - L/k > (k - 1)(16 + H/C), if F = 4C and
                                                    K = H

   and with dropout 4C more for `none` and `selective`: both branches before and after it. A
   pipeline's zero bubble keeps from I to W what recomputation had freed, and the gradients: there
   it saves little, and `full` nothing.

   Layouts: with config.tp heads, hidden units and words are cut over its ranks, with config.sp the
   tokens too between these regions, with config.cp all tokens: ids, labels, positions and documents
   are then this rank's (dt_parallel.h, sections 3 and 4). Every rank of both groups calls the same
   functions. One layer then sends, in bytes for each token of B T/cp tokens and of one rank, S
   being the bytes of C numbers and t the ranks of tp:

       tp              forward 4 (t-1)/t S         backward the same
       tp with sp      forward 4 (t-1)/t S         backward 6 (t-1)/t S, as what a region gathers is gathered again

   and keeps, in place of the table above, for each of B T/cp tokens in `none`

       GPT-2   tp          4C + 4 + (2C + 2KD + 2F + H)/t      KD/t is at least D
               tp with sp  (4C + 4)/t + (2C + 2KD + 2F + H)/t
       Llama   tp          4C + 2 + (3C + 3KD + 3F + H)/t
               tp with sp  (4C + 2)/t + (3C + 3KD + 3F + H)/t

   Letters: B sequences, T tokens of each, V vocabulary, C width, H heads, K heads of keys and
   values, D = C/H, F feed forward. Fewer K than H is grouped-query attention, arXiv:2305.13245. */
#ifndef GPT_H
#define GPT_H

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GPT_MAX_LAYERS = 192, GPT_MAX_STAGES = 2 * GPT_MAX_LAYERS + 2 };
enum { GPT_RECOMPUTE_NONE = 0, GPT_RECOMPUTE_SELECTIVE, GPT_RECOMPUTE_FULL };
enum { GPT_GPT2 = 0, GPT_LLAMA };

typedef struct gpt_config {
    int layers, width, heads, kv_heads, ffn;
    int seq; /* the longest T */
    int vocab;
    int tied; /* 1: the head is wte.weight; 0: lm_head.weight */
    dt_dtype dtype;
    int recompute;       /* GPT_RECOMPUTE_*; the results are the same to the bit */
    int recompute_every; /* full: layers of one recomputed block; 0 -> 1 */
    int arch;            /* GPT_GPT2 or GPT_LLAMA */
    double norm_eps;     /* 0 -> 1e-5 */
    double theta;        /* of Llama's positions; 0 -> 10000 */
    double dropout;      /* in [0,1) */
    double smoothing;    /* of labels, in [0,1): arXiv:1512.00567 */
    dt_comm *tp;       /* heads, hidden units and words are cut over it; NULL: are not, as below */
    int sp;            /* 1: outside of what tp cuts, tokens are cut over tp */
    dt_comm *cp;       /* tokens are cut over it */
    int cp_kind;       /* DT_CP_* */
    int experts;       /* E of a mixture; 0: none, all layers are dense */
    int top_k;         /* of a token; 0 -> 2, or 1 of one */
    int moe_every;     /* layers N - 1, 2 N - 1, .. are mixtures; 0 -> 1: all */
    int shared;        /* of each mixture: an MLP of so many F that every token goes through */
    double capacity;   /* dt_route_desc.capacity; generation drops nothing */
    double balance, z; /* weights of the side losses */
    /* > 0: the rate of gpt_balance, and choices are made with its bias */
    double router_bias;
    dt_comm *ep; /* experts are cut over it */
    dt_comm *pp; /* the model is cut in depth: stage s lies on rank s % p of it */
    int stages;  /* 0 -> 1 */
    /* (stages + 1) at which item each stage begins: item 0 is the embedding, 1 + 2i and 2 + 2i the
       attention and the MLP of layer i, 2 layers + 1 the head; NULL: one stage. Not copied */
    const int *cut;
} gpt_config;

/* Tensors that a model has not are NULL. */
typedef struct gpt_layer {
    dt_tensor *ln_1_gain, *ln_1_bias;            /* (C) */
    dt_tensor *q, *q_bias;                       /* (H,D,C), (H,D) */
    dt_tensor *k, *k_bias, *v, *v_bias;          /* (K,D,C), (K,D) */
    dt_tensor *attn_proj, *attn_proj_bias;       /* (C,C), (C) */
    dt_tensor *ln_2_gain, *ln_2_bias;            /* (C) */
    dt_tensor *fc, *fc_bias;                     /* (F,C), (F) */
    dt_tensor *gate_up;                          /* (2,F,C) */
    dt_tensor *mlp_proj, *mlp_proj_bias;         /* (C,F), (C) */
    dt_tensor *router, *router_bias;             /* (E,C), (E) */
    dt_tensor *experts_fc, *experts_fc_bias;     /* (E,F,C), (E,F) */
    dt_tensor *experts_gate_up;                  /* (E,2,F,C) */
    dt_tensor *experts_proj, *experts_proj_bias; /* (E,C,F), (E,C) */
    /* what the router has counted in training; experts: the caller's, or NULL */
    dt_route_counts route;
} gpt_layer;

typedef struct gpt {
    gpt_config config;
    dt_ctx *ctx;
    dt_tensor *wte, *wpe; /* (V,C), (seq,C) */
    gpt_layer layer[GPT_MAX_LAYERS];
    dt_tensor *ln_f_gain, *ln_f_bias; /* (C) */
    dt_tensor *head;                  /* (V,C) */
    dt_kv_groups kv;                  /* K over tp */
    /* the first and the last rank of pp, if both have wte and share it */
    dt_comm *tied;
} gpt;

/* ==== Parameters
   ================================================================================================== */

/* Every parameter once, in the order of registration. */
/* a layer's names begin with "h.N." */
enum {
    GPT_BEFORE,
    GPT_ATTENTION,
    GPT_MLP,
    GPT_AFTER,
    /* in GPT_MLP: of all tokens, of the mixture */
    GPT_DENSE,
    GPT_EXPERT
};
/* which models have it, a bit each */
enum { GPT_ONLY_2 = 1, GPT_ONLY_LLAMA, GPT_BOTH };
/* initial values; the matrices decay */
enum { GPT_GAIN, GPT_BIAS, GPT_PLACE, GPT_MATRIX, GPT_BRANCH, GPT_SCORE };
typedef struct gpt_row {
    int where, models;
    /* a letter for each dimension; tp cuts the one behind '/', ep the one behind '|'; '+': the
       gradients of the ranks of tp are parts */
    const char *name, *shape;
    int kind;
    size_t at; /* of its tensor in gpt, or in gpt_layer */
} gpt_row;

static const gpt_row gpt_rows[] = {
    { GPT_BEFORE, GPT_BOTH, "wte.weight", "/VC", GPT_MATRIX, offsetof(gpt, wte) },
    { GPT_BEFORE, GPT_ONLY_2, "wpe.weight", "TC", GPT_PLACE, offsetof(gpt, wpe) },
    { GPT_ATTENTION, GPT_BOTH, "ln_1.weight", "C", GPT_GAIN, offsetof(gpt_layer, ln_1_gain) },
    { GPT_ATTENTION, GPT_ONLY_2, "ln_1.bias", "C", GPT_BIAS, offsetof(gpt_layer, ln_1_bias) },
    { GPT_ATTENTION, GPT_BOTH, "attn.q.weight", "/HDC", GPT_MATRIX, offsetof(gpt_layer, q) },
    { GPT_ATTENTION, GPT_ONLY_2, "attn.q.bias", "/HD", GPT_BIAS, offsetof(gpt_layer, q_bias) },
    { GPT_ATTENTION, GPT_BOTH, "attn.k.weight", "/KDC", GPT_MATRIX, offsetof(gpt_layer, k) },
    { GPT_ATTENTION, GPT_ONLY_2, "attn.k.bias", "/KD", GPT_BIAS, offsetof(gpt_layer, k_bias) },
    { GPT_ATTENTION, GPT_BOTH, "attn.v.weight", "/KDC", GPT_MATRIX, offsetof(gpt_layer, v) },
    { GPT_ATTENTION, GPT_ONLY_2, "attn.v.bias", "/KD", GPT_BIAS, offsetof(gpt_layer, v_bias) },
    { GPT_ATTENTION, GPT_BOTH, "attn.proj.weight", "C/C", GPT_BRANCH,
        offsetof(gpt_layer, attn_proj) },
    { GPT_ATTENTION, GPT_ONLY_2, "attn.proj.bias", "C", GPT_BIAS,
        offsetof(gpt_layer, attn_proj_bias) },
    { GPT_MLP, GPT_BOTH, "ln_2.weight", "C", GPT_GAIN, offsetof(gpt_layer, ln_2_gain) },
    { GPT_MLP, GPT_ONLY_2, "ln_2.bias", "C", GPT_BIAS, offsetof(gpt_layer, ln_2_bias) },
    { GPT_DENSE, GPT_ONLY_2, "mlp.fc.weight", "/FC", GPT_MATRIX, offsetof(gpt_layer, fc) },
    { GPT_DENSE, GPT_ONLY_2, "mlp.fc.bias", "/F", GPT_BIAS, offsetof(gpt_layer, fc_bias) },
    { GPT_DENSE, GPT_ONLY_LLAMA, "mlp.gate_up.weight", "2/FC", GPT_MATRIX,
        offsetof(gpt_layer, gate_up) },
    { GPT_DENSE, GPT_BOTH, "mlp.proj.weight", "C/F", GPT_BRANCH, offsetof(gpt_layer, mlp_proj) },
    { GPT_DENSE, GPT_ONLY_2, "mlp.proj.bias", "C", GPT_BIAS, offsetof(gpt_layer, mlp_proj_bias) },
    { GPT_EXPERT, GPT_BOTH, "moe.router.weight", "EC", GPT_MATRIX, offsetof(gpt_layer, router) },
    { GPT_EXPERT, GPT_BOTH, "moe.router.bias", "E", GPT_SCORE, offsetof(gpt_layer, router_bias) },
    { GPT_EXPERT, GPT_ONLY_2, "moe.fc.weight", "|E/FC", GPT_MATRIX,
        offsetof(gpt_layer, experts_fc) },
    { GPT_EXPERT, GPT_ONLY_2, "moe.fc.bias", "|E/F", GPT_BIAS,
        offsetof(gpt_layer, experts_fc_bias) },
    { GPT_EXPERT, GPT_ONLY_LLAMA, "moe.gate_up.weight", "|E2/FC", GPT_MATRIX,
        offsetof(gpt_layer, experts_gate_up) },
    { GPT_EXPERT, GPT_BOTH, "moe.proj.weight", "|EC/F", GPT_BRANCH,
        offsetof(gpt_layer, experts_proj) },
    { GPT_EXPERT, GPT_ONLY_2, "moe.proj.bias", "+|EC", GPT_BIAS,
        offsetof(gpt_layer, experts_proj_bias) },
    { GPT_AFTER, GPT_BOTH, "ln_f.weight", "C", GPT_GAIN, offsetof(gpt, ln_f_gain) },
    { GPT_AFTER, GPT_ONLY_2, "ln_f.bias", "C", GPT_BIAS, offsetof(gpt, ln_f_bias) },
    { GPT_AFTER, GPT_BOTH, "lm_head.weight", "/VC", GPT_MATRIX, offsetof(gpt, head) },
};
enum { GPT_ROWS = sizeof gpt_rows / sizeof *gpt_rows };

static inline int gpt_is_mixture(gpt_config c, int layer) {
    return c.experts > 0 && (layer + 1) % (c.moe_every > 0 ? c.moe_every : 1) == 0;
}

static inline int gpt_part(const gpt_row *r) { return r->where > GPT_AFTER ? GPT_MLP : r->where; }
static inline int gpt_in_layer(const gpt_row *r) {
    return gpt_part(r) == GPT_ATTENTION || gpt_part(r) == GPT_MLP;
}

/* Whether a model has this parameter, of a layer in that layer. A tied head is wte. */
static inline int gpt_has(gpt_config c, const gpt_row *r, int layer) {
    int mixture = gpt_is_mixture(c, layer);
    if (!(r->models >> c.arch & 1) ||
        (c.tied && r->at == offsetof(gpt, head) && r->where == GPT_AFTER))
        return 0;
    if (r->kind == GPT_SCORE && c.router_bias == 0) return 0;
    return r->where == GPT_DENSE ? !mixture || c.shared > 0 : r->where != GPT_EXPERT || mixture;
}

static inline int64_t gpt_size(gpt_config c, char letter) {
    switch (letter) {
    case 'V': return c.vocab;
    case 'T': return c.seq;
    case 'C': return c.width;
    case 'H': return c.heads;
    case 'K': return c.kv_heads;
    case 'D': return c.width / c.heads;
    case 'F': return c.ffn;
    case 'E': return c.experts;
    }
    return letter - '0';
}

static inline int gpt_is_letter(char c) { return c != '/' && c != '|' && c != '+'; }

static inline dt_shape gpt_shape(gpt_config c, const gpt_row *r, int layer) {
    dt_shape s = DT_SCALAR;
    int shared = r->where == GPT_DENSE && gpt_is_mixture(c, layer);
    for (const char *letter = r->shape; *letter; letter++)
        if (gpt_is_letter(*letter))
            s.d[s.nd++] = gpt_size(c, *letter) * (shared && *letter == 'F' ? c.shared : 1);
    return s;
}

/* The dimension behind a mark, -1: none. */
static inline int gpt_dim(const gpt_row *r, char mark) {
    int dim = 0;
    for (const char *letter = r->shape; *letter && *letter != mark; letter++)
        dim += gpt_is_letter(*letter);
    return strchr(r->shape, mark) ? dim : -1;
}

/* How this parameter lies over ep, and over tp: cut; copies of which each sees the queries of some
   heads, or some of the tokens, or of which rank 0's alone is used; or the same on all. */
static inline void gpt_cut(const gpt *m, const gpt_row *r, dt_param_desc *d) {
    int dim = gpt_dim(r, '/'), experts = gpt_dim(r, '|');
    char letter = dim < 0 ? 0 : strchr(r->shape, '/')[1];
    if (dt_comm_size(m->config.ep) > 1 && experts >= 0)
        d->shards[1] = (dt_shard_spec){ m->config.ep, experts };
    if (dt_comm_size(m->config.tp) == 1) return;
    if (letter == 'K') {
        d->shards[0] = (dt_shard_spec){ m->kv.cut, dim };
        d->grad_placements[0] = (dt_grad_placement){ m->kv.copies, DT_GRAD_PARTIAL };
    } else if (letter) {
        d->shards[0] = (dt_shard_spec){ m->config.tp, dim };
    } else if (m->config.sp || r->shape[0] == '+') {
        d->grad_placements[0] = (dt_grad_placement){ m->config.tp, DT_GRAD_PARTIAL };
    }
}

static inline int gpt_is_table(const gpt_row *r) {
    return r->at == offsetof(gpt, wte) && r->where == GPT_BEFORE;
}

/* Where the model keeps this parameter's tensor. */
static inline dt_tensor **gpt_slot(gpt *m, const gpt_row *r, int layer) {
    char *base = gpt_in_layer(r) ? (char *)&m->layer[layer] : (char *)m;
    return (dt_tensor **)(void *)(base + r->at);
}

static inline int gpt_top_k(gpt_config c) { return c.top_k > 0 ? c.top_k : c.experts < 2 ? 1 : 2; }

/* How many numbers the parameters are; active: only those that a token meets, of experts k of E. */
static inline int64_t gpt_count_of(gpt_config c, int active) {
    int64_t sum = 0;
    for (const gpt_row *r = gpt_rows; r < gpt_rows + GPT_ROWS; r++)
        for (int i = 0; i < (gpt_in_layer(r) ? c.layers : 1); i++) {
            int64_t n = gpt_has(c, r, i) ? dt_count(gpt_shape(c, r, i)) : 0;
            sum +=
                active && gpt_dim(r, '|') >= 0 ? n / (c.experts ? c.experts : 1) * gpt_top_k(c) : n;
        }
    return sum;
}

static inline int64_t gpt_count(gpt_config c) { return gpt_count_of(c, 0); }

/* Multiplications and additions of forward and backward of one token: 6 for each parameter that
   multiplies, so not for wpe, nor for wte beside a head of its own; and the products with keys and
   values, 12 L C T (arXiv:2204.02311, appendix B). */
static inline double gpt_flops_per_token(gpt_config c) {
    int64_t looked_up = (c.arch == GPT_GPT2 ? c.seq : 0) + (c.tied ? 0 : c.vocab);
    return 6.0 * (double)(gpt_count_of(c, 1) - looked_up * c.width) +
           12.0 * c.layers * (double)c.width * c.seq;
}

static inline dt_tensor *gpt_param(const gpt *m, const gpt_row *r, int layer) {
    gpt_config c = m->config;
    /* so that the sum of 2 L branches stays near 1 */
    double branch = 0.02 / sqrt(2.0 * c.layers);
    const dt_init init[] = { DT_ONES, DT_ZEROS, DT_NORMAL(0.01), DT_NORMAL(0.02), DT_NORMAL(branch),
        DT_ZEROS };
    dt_param_desc d = { .no_decay = r->kind == GPT_GAIN || r->kind == GPT_BIAS, .dtype = c.dtype };
    if (r->kind == GPT_SCORE) d.frozen = 1, d.dtype = c.dtype == DT_F64 ? DT_F64 : DT_F32;
    gpt_cut(m, r, &d);
    if (gpt_is_table(r) && m->tied)
        d.grad_placements[1] = (dt_grad_placement){ m->tied, DT_GRAD_PARTIAL };
    return dt_param_at(m->ctx, r->name, gpt_shape(c, r, layer), init[r->kind], d);
}

static inline void gpt_register_rows(gpt *m, int where, int layer) {
    for (const gpt_row *r = gpt_rows; r < gpt_rows + GPT_ROWS; r++)
        if (gpt_part(r) == where && gpt_has(m->config, r, layer))
            *gpt_slot(m, r, layer) = gpt_param(m, r, layer);
}

/* ---- stages of a pipeline ---- */

static inline int gpt_items(gpt_config c) { return 2 * c.layers + 2; }
static inline int gpt_stages(gpt_config c) { return c.cut ? c.stages : 1; }
/* The items of a stage: from the first one's to the next one's first. */
static inline int gpt_stage_first(gpt_config c, int stage) {
    return c.cut ? c.cut[stage] : stage * gpt_items(c);
}
static inline int gpt_stage_is_mine(const gpt *m, int stage) {
    return stage % dt_comm_size(m->config.pp) == dt_comm_rank(m->config.pp);
}

static inline void gpt_register_item(gpt *m, int item) {
    char scope[32];
    int layer = (item - 1) / 2, last = item == gpt_items(m->config) - 1;
    if (item == 0) gpt_register_rows(m, GPT_BEFORE, 0);
    if (item > 0 && !last) {
        snprintf(scope, sizeof scope, "h.%d.", layer);
        dt_scope(m->ctx, scope);
        gpt_register_rows(m, item % 2 ? GPT_ATTENTION : GPT_MLP, layer);
        dt_scope(m->ctx, NULL);
    }
    if (last) gpt_register_rows(m, GPT_AFTER, 0);
    if (!last || !m->config.tied) return;
    /* on another rank than the embedding's, a copy of it: the same name and values, the gradients
       are parts */
    m->head = m->wte ? m->wte : gpt_param(m, gpt_rows, 0);
}

static inline int gpt_cut_bad(gpt_config c) {
    int stages = gpt_stages(c), bad = 0;
    if (!c.cut) return c.stages > 1;
    for (int i = 0; i < stages && stages <= GPT_MAX_STAGES; i++) bad |= c.cut[i] >= c.cut[i + 1];
    /* two copies of wte on one rank */
    if (c.tied && stages > 1 && dt_comm_size(c.pp) == 1) return 1;
    return bad || stages < 1 || stages > GPT_MAX_STAGES || c.cut[0] != 0 ||
           c.cut[stages] != gpt_items(c);
}

static inline int gpt_config_bad(gpt_config c) {
    return c.layers < 0 || c.layers > GPT_MAX_LAYERS || c.width < 1 || c.heads < 1 ||
           c.width % c.heads != 0 || c.kv_heads < 1 || c.heads % c.kv_heads != 0 || c.ffn < 1 ||
           c.seq < 1 || c.vocab < 1 || c.recompute < GPT_RECOMPUTE_NONE ||
           c.recompute > GPT_RECOMPUTE_FULL || c.recompute_every < 0 || c.arch < GPT_GPT2 ||
           c.arch > GPT_LLAMA || (c.arch == GPT_LLAMA && c.width / c.heads % 2 != 0) ||
           !(c.norm_eps >= 0) || !(c.theta >= 0) || !(c.dropout >= 0 && c.dropout < 1) ||
           !(c.smoothing >= 0 && c.smoothing < 1);
}

static inline int gpt_experts_bad(gpt_config c) {
    if (c.experts == 0) return 0;
    return c.experts < 0 || c.experts % dt_comm_size(c.ep) != 0 || gpt_top_k(c) > c.experts ||
           c.moe_every < 0 || c.shared < 0 || !(c.capacity >= 0) || !(c.balance >= 0) ||
           !(c.z >= 0) || !(c.router_bias >= 0);
}

/* Names every parameter of this rank's stages; their memory and values come with dt_zero_make. A
   config that cannot be fails the context. [collective: tp and pp] */
static inline gpt gpt_register(dt_ctx *ctx, gpt_config c) {
    gpt m = { .config = c, .ctx = ctx };
    int p = dt_comm_size(c.pp), rank = dt_comm_rank(c.pp);
    if (gpt_config_bad(c)) {
        dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: layers %d, width %d, heads %d, kv_heads %d, ffn %d, seq %d, vocab %d, "
            "recompute %d every %d, arch %d, norm_eps %g, theta %g, dropout %g, smoothing %g",
            c.layers, c.width, c.heads, c.kv_heads, c.ffn, c.seq, c.vocab, c.recompute,
            c.recompute_every, c.arch, c.norm_eps, c.theta, c.dropout, c.smoothing);
        return m;
    }
    if (gpt_experts_bad(c)) {
        dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: %d experts over %d ranks of ep, %d of a token, in every %d-th layer, "
            "%d shared, capacity %g, side losses %g and %g, rate of the bias %g",
            c.experts, dt_comm_size(c.ep), gpt_top_k(c), c.moe_every, c.shared, c.capacity,
            c.balance, c.z, c.router_bias);
        return m;
    }
    if (gpt_cut_bad(c) || gpt_stages(c) % p != 0) {
        dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: %d stages over %d ranks of pp%s: cuts go up from 0 to %d", c.stages, p,
            c.tied && p == 1 ? ", which cannot both have a tied embedding," : "", gpt_items(c));
        return m;
    }
    if (c.heads % dt_comm_size(c.tp) != 0) {
        dt_fail(ctx, DT_ERR_ARG, "gpt_register: %d heads over %d ranks of tp", c.heads,
            dt_comm_size(c.tp));
        return m;
    }
    m.kv = dt_kv_split(ctx, c.tp, c.kv_heads);
    if (c.tied && p > 1) {
        m.tied = dt_comm_split(c.pp, rank == 0 || rank == p - 1 ? 0 : -1, rank, "tied");
        dt_comm_set_axis(m.tied, DT_AXIS_PP);
    }
    for (int stage = 0; stage < gpt_stages(c); stage++) {
        if (!gpt_stage_is_mine(&m, stage)) continue;
        dt_stage(ctx, stage);
        for (int i = gpt_stage_first(c, stage); i < gpt_stage_first(c, stage + 1); i++)
            gpt_register_item(&m, i);
    }
    dt_stage(ctx, 0);
    return m;
}

/* ==== Forward
   ===================================================================================================== */

/* The tokens of a forward: this rank's T/cp of each sequence, in the order of dt_context_token. All
   tensors are (B,T/cp) i32; those that are NULL take the value in brackets. */
typedef struct gpt_tokens {
    dt_tensor *ids;
    /* place in the document: wpe, rope and the causal mask go by it [place in the sequence] */
    dt_tensor *positions;
    /* a number for each of several documents packed into a sequence [one document] */
    dt_tensor *documents;
    /* place among all tokens of the step, over all ranks: dropout goes by it [0 .. B T - 1] */
    dt_tensor *index;
    /* of the whole step, over all ranks: side losses are means over them [no side losses] */
    int64_t sequences;
    /* from 1: dropout differs from step to step; 0: no dropout, as in evaluation */
    uint64_t step;
    /* with cp, of documents and positions [made from B, T and config.cp_kind] */
    dt_context *context;
} gpt_tokens;

/* Keys and values of the tokens so far: see Generation. */
typedef struct gpt_cache {
    gpt *model;
    dt_schedule *schedule; /* of the stages, if there are several */
    int have;              /* tokens held, of at most config.seq */
    /* (1,have,K,D): the first rows of (1,seq,K,D) */
    dt_tensor k[GPT_MAX_LAYERS], v[GPT_MAX_LAYERS];
    void *data;
    size_t bytes;
    int32_t *positions; /* 0, 1, .. seq-1 */
} gpt_cache;

/* What the blocks of one forward are told. */
typedef struct gpt_pass {
    gpt *model;
    int item, end; /* the items to run: see gpt_config.cut */
    gpt_tokens tokens;
    dt_tensor *positions; /* tokens.positions, or those in its place */
    dt_placement outside; /* how activations lie over tp between its regions */
    gpt_cache *cache;     /* NULL in training */
} gpt_pass;

static inline int gpt_layer_at(const gpt_pass *r) { return (r->item - 1) / 2; }

/* splitmix64's mixer */
static inline uint64_t gpt_mix(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* place: 0 the embedding, then two of each layer. */
static inline dt_tensor *gpt_dropout(const gpt_pass *r, dt_tensor *x, int place) {
    double p = r->model->config.dropout;
    if (!x || p == 0 || r->tokens.step == 0) return x;
    uint64_t key =
        gpt_mix(gpt_mix(gpt_mix(dt_ctx_seed(x->ctx)) + r->tokens.step) + (uint64_t)place);
    return dt_dropout(x, p, key, r->tokens.index);
}

/* x + dropout(h w^T + b): one product, if nothing is dropped. */
static inline dt_tensor *gpt_branch(
    const gpt_pass *r, dt_tensor *x, dt_tensor *h, dt_tensor *w, dt_tensor *b, int place) {
    dt_comm *tp = r->model->config.tp;
    if (r->model->config.dropout == 0 || r->tokens.step == 0)
        return dt_row_linear(h, w, b, x, tp, r->outside);
    return dt_add(x, gpt_dropout(r, dt_row_linear(h, w, b, NULL, tp, r->outside), place));
}

static inline dt_tensor *gpt_enter(const gpt_pass *r, dt_tensor *x) {
    return dt_tp_enter(x, r->model->config.tp, r->outside);
}

static inline dt_tensor *gpt_norm(const gpt *m, dt_tensor *x, dt_tensor *gain, dt_tensor *bias) {
    if (m->config.arch == GPT_LLAMA) return dt_rmsnorm(x, gain, m->config.norm_eps);
    return dt_layernorm(x, gain, bias, m->config.norm_eps);
}

/* Puts the keys (or values) of some tokens behind those that the cache holds; what it holds
   then. */
static inline dt_tensor *gpt_cached(gpt_cache *c, dt_tensor *all, dt_tensor *more) {
    if (!more) return NULL;
    const dt_kernels *table = dt_ctx_kernels(more->ctx);
    size_t row = (size_t)(more->shape.d[2] * more->shape.d[3]) * dt_dtype_size(more->dtype);
    char *at = (char *)all->data + (size_t)c->have * row;
    if (table->move(at, more->data, (size_t)more->shape.d[1] * row, dt_ctx_stream(more->ctx)) !=
        DT_OK) {
        dt_fail(more->ctx, DT_ERR_DEVICE, "gpt_cached: %lld tokens behind %d",
            (long long)more->shape.d[1], c->have);
        return NULL;
    }
    all->shape = more->shape;
    all->shape.d[1] += c->have;
    return all;
}

/* The first half of a layer up to its heads, (B,T,C) -> (B,T,C/tp): what selective recomputation
   computes again. H and K are this rank's heads, T this rank's tokens. */
static inline dt_tensor *gpt_heads(dt_tensor *x, void *user) {
    const gpt_pass *r = (const gpt_pass *)user;
    const gpt *m = r->model;
    const gpt_layer *l = &m->layer[gpt_layer_at(r)];
    dt_tensor *n = gpt_enter(r, gpt_norm(m, x, l->ln_1_gain, l->ln_1_bias));
    /* (B,T,H,D) */
    dt_tensor *q = dt_linear(n, l->q, l->q_bias);
    /* (B,T,K,D) */
    dt_tensor *k = dt_linear(n, l->k, l->k_bias);
    dt_tensor *v = dt_linear(n, l->v, l->v_bias);
    if (m->config.arch == GPT_LLAMA) {
        q = dt_rope(q, r->positions, (dt_rope_desc){ .theta = m->config.theta });
        k = dt_rope(k, r->positions, (dt_rope_desc){ .theta = m->config.theta });
    }
    if (r->cache) {
        /* (1,have+T,K,D) */
        k = gpt_cached(r->cache, &r->cache->k[gpt_layer_at(r)], k);
        v = gpt_cached(r->cache, &r->cache->v[gpt_layer_at(r)], v);
    }
    dt_attn_desc sight = { .positions = r->tokens.positions, .documents = r->tokens.documents };
    dt_tensor *heads = r->tokens.context ? dt_context_attention(q, k, v, r->tokens.context)
                                         /* (B,T,H,D) */
                                         : dt_attention(q, k, v, sight);
    if (!heads) return NULL;
    const int64_t *d = heads->shape.d;
    return dt_reshape(heads, DT_SHAPE(d[0], d[1], d[2] * d[3]));
}

/* (B,T,C) -> (B,T,F/tp) */
static inline dt_tensor *gpt_hidden(const gpt *m, const gpt_layer *l, dt_tensor *n) {
    /* of (B,T,2,F) */
    if (m->config.arch == GPT_LLAMA) return dt_swiglu(dt_linear(n, l->gate_up, NULL));
    return dt_linear_at(n, l->fc, l->fc_bias, (dt_linear_desc){ .activation = DT_ACT_GELU });
}

/* The first half of a layer, (B,T,C) -> (B,T,C). */
static inline dt_tensor *gpt_attention_forward(const gpt_pass *r, dt_tensor *x) {
    const gpt *m = r->model;
    const gpt_layer *l = &m->layer[gpt_layer_at(r)];
    int again = m->config.recompute == GPT_RECOMPUTE_SELECTIVE;
    dt_tensor *heads =
        x && again ? dt_block_at(x->ctx, gpt_heads, x, (void *)r, (dt_block_desc){ .recompute = 1 })
                   : gpt_heads(x, (void *)r);
    return gpt_branch(r, x, heads, l->attn_proj, l->attn_proj_bias, 1 + 2 * gpt_layer_at(r));
}

/* The mixture of a layer, n normed and outside -> its sum, outside: each token through top_k
   experts. */
static inline dt_tensor *gpt_mixture(
    const gpt_pass *r, gpt_layer *l, dt_tensor *n, dt_tensor *inside) {
    const gpt_config *c = &r->model->config;
    int64_t sequences = r->tokens.sequences;
    dt_route_desc d = { .k = gpt_top_k(*c),
        .capacity = r->cache ? 0 : c->capacity,
        .balance = sequences ? c->balance : 0,
        .z = sequences ? c->z : 0,
        .sequences = sequences,
        .bias = l->router_bias,
        .tp = c->tp,
        .outside = r->outside,
        .cp = r->cache ? NULL : c->cp,
        .kind = c->cp_kind,
        .counts = sequences ? &l->route : NULL };
    dt_routing *to = dt_route(n, l->router, d);
    dt_tensor *h = dt_dispatch(inside, to, c->ep);
    if (c->arch == GPT_LLAMA)
        h = dt_swiglu(dt_expert_linear(h, to, l->experts_gate_up, NULL, (dt_expert_desc){ 0 }));
    else
        h = dt_expert_linear(h, to, l->experts_fc, l->experts_fc_bias,
            (dt_expert_desc){ .activation = DT_ACT_GELU });
    h = dt_expert_linear(
        h, to, l->experts_proj, l->experts_proj_bias, (dt_expert_desc){ .partial = c->tp });
    return dt_redistribute(dt_combine(h, to), c->tp, DT_PARTIAL, r->outside);
}

/* The second half. */
static inline dt_tensor *gpt_mlp_forward(const gpt_pass *r, dt_tensor *x) {
    gpt *m = r->model;
    int layer = gpt_layer_at(r), place = 2 + 2 * layer;
    gpt_layer *l = &m->layer[layer];
    dt_tensor *n = gpt_norm(m, x, l->ln_2_gain, l->ln_2_bias), *inside = gpt_enter(r, n);
    if (!gpt_is_mixture(m->config, layer))
        return gpt_branch(r, x, gpt_hidden(m, l, inside), l->mlp_proj, l->mlp_proj_bias, place);
    x = dt_add(x, gpt_dropout(r, gpt_mixture(r, l, n, inside), place));
    if (m->config.shared == 0) return x;
    place = 2 * m->config.layers + 1 + layer;
    return gpt_branch(r, x, gpt_hidden(m, l, inside), l->mlp_proj, l->mlp_proj_bias, place);
}

/* One layer, or the half of it that lies in this stage: a block. */
static inline dt_tensor *gpt_layer_forward(dt_tensor *x, void *user) {
    gpt_pass *r = (gpt_pass *)user, mlp = *r;
    if (r->item % 2 == 0) return gpt_mlp_forward(r, x);
    x = gpt_attention_forward(r, x);
    mlp.item++;
    return mlp.item < r->end ? gpt_mlp_forward(&mlp, x) : x;
}

/* The layers of items item .. end - 1, each a block. */
static inline dt_tensor *gpt_layers_forward(dt_tensor *x, void *user) {
    gpt_pass r = *(const gpt_pass *)user;
    int end = r.end;
    for (; x && r.item < end; r.item = r.end) {
        r.end = 2 * gpt_layer_at(&r) + 3 < end ? 2 * gpt_layer_at(&r) + 3 : end;
        x = dt_block_at(
            x->ctx, gpt_layer_forward, x, &r, (dt_block_desc){ .user_bytes = sizeof r });
    }
    return x;
}

/* The place of each of this rank's T tokens in its sequence, for each of B sequences; or among the
   tokens of all B. */
static inline dt_tensor *gpt_token_places(const gpt *m, int64_t B, int64_t T, int among_all) {
    int c = dt_comm_size(m->config.cp);
    int32_t *at = (int32_t *)malloc((size_t)(B * T) * sizeof *at + 1);
    if (!at) {
        dt_fail(m->ctx, DT_ERR_MEM, "gpt_token_places: %lld sequences of %lld tokens", (long long)B,
            (long long)T);
        return NULL;
    }
    for (int64_t i = 0; i < B * T; i++)
        at[i] = (int32_t)(dt_context_token(
                              m->config.cp_kind, T * c, c, dt_comm_rank(m->config.cp), i % T) +
                          (among_all ? i / T * T * c : 0));
    dt_tensor *places = dt_input(m->ctx, DT_I32, DT_SHAPE(B, T), at);
    free(at);
    return places;
}

/* Tokens (B,T) -> (B,T,C): a block, so that what tp sums is gone when it has been summed. */
static inline dt_tensor *gpt_embed(dt_tensor *x, void *user) {
    const gpt_pass *r = (const gpt_pass *)user;
    gpt *m = r->model;
    (void)x;
    x = dt_vocab_embedding(m->wte, r->tokens.ids, m->config.tp, r->outside);
    if (m->config.arch == GPT_GPT2) {
        dt_tensor *here = dt_redistribute(r->positions, m->config.tp, DT_REPLICATE, r->outside);
        x = dt_add(x, dt_embedding(m->wpe, here));
    }
    return gpt_dropout(r, x, 0);
}

/* What the tokens leave open; which of them dropout sees here. */
static inline gpt_pass gpt_pass_of(gpt *m, gpt_tokens t, gpt_cache *cache) {
    gpt_pass r = { .model = m,
        .end = gpt_items(m->config),
        .tokens = t,
        .positions = t.positions,
        .outside = DT_REPLICATE,
        .cache = cache };
    int64_t B = t.ids->shape.d[0], T = t.ids->shape.d[1];
    if (m->config.sp && dt_comm_size(m->config.tp) > 1 && !cache) r.outside = DT_SHARD(1);
    if (!r.positions) r.positions = gpt_token_places(m, B, T, 0);
    if (dt_comm_size(m->config.cp) > 1 && (t.documents || t.positions) && !t.context && !cache)
        dt_fail(m->ctx, DT_ERR_ARG,
            "gpt: under cp documents and positions come with a context of all ranks' tokens");
    if (dt_comm_size(m->config.cp) > 1 && !cache && !t.context) {
        dt_context_desc d = {
            .kind = m->config.cp_kind, .batch = B, .tokens = T * dt_comm_size(m->config.cp)
        };
        r.tokens.context = dt_context_make(m->ctx, m->config.cp, d);
    }
    if (m->config.dropout > 0 && t.step) {
        if (!t.index) r.tokens.index = gpt_token_places(m, B, T, 1);
        r.tokens.index = dt_redistribute(r.tokens.index, m->config.tp, DT_REPLICATE, r.outside);
    }
    return r;
}

/* Items item .. end - 1 before the head: x, NULL before item 0, -> (B,T,C), or its part of T under
   sp. The embedding is a block where that frees something at its end: partial rows under tp, at
   ZeRO-3 a table that the head does not read again. Of full:k, layers ik .. ik + k - 1 are
   recomputed together, or those of them that this stage has. */
static inline dt_tensor *gpt_trunk(gpt_pass r, dt_tensor *x) {
    gpt *m = r.model;
    int block = dt_comm_size(m->config.tp) > 1 || !m->config.tied || gpt_stages(m->config) > 1;
    int full = m->config.recompute == GPT_RECOMPUTE_FULL, every = m->config.recompute_every;
    int last = gpt_items(m->config) - 1, end = r.end < last ? r.end : last, head = r.end > last;
    if (every < 1) every = 1;
    if (r.item == 0) x = block ? dt_block(m->ctx, gpt_embed, NULL, &r) : gpt_embed(NULL, &r);
    if (r.item == 0) r.item++;
    for (; x && r.item < end; r.item = r.end) {
        int next =
            2 * ((full ? gpt_layer_at(&r) / every * every + every : gpt_layer_at(&r) + 1)) + 1;
        r.end = next < end ? next : end;
        int several = gpt_layer_at(&r) != (r.end - 2) / 2;
        x = dt_block_at(m->ctx, several ? gpt_layers_forward : gpt_layer_forward, x, &r,
            (dt_block_desc){ .recompute = full, .user_bytes = sizeof r });
    }
    return head ? gpt_norm(m, x, m->ln_f_gain, m->ln_f_bias) : x;
}

/* (..,C) -> (..,V): tp gathers the parts of the vocabulary. */
static inline dt_tensor *gpt_head(const gpt_pass *r, dt_tensor *x) {
    const gpt *m = r->model;
    x = dt_linear(gpt_enter(r, x), m->head, NULL);
    if (!x || dt_comm_size(m->config.tp) == 1) return x;
    int last = x->shape.nd - 1;
    return dt_slice(
        dt_redistribute(x, m->config.tp, DT_SHARD(last), DT_REPLICATE), last, 0, m->config.vocab);
}

/* tokens (B,T) -> (B,T,V); the whole model on this rank. */
static inline dt_tensor *gpt_logits_at(gpt *m, gpt_tokens t) {
    if (!t.ids) return NULL;
    gpt_pass r = gpt_pass_of(m, t, NULL);
    return gpt_head(&r, gpt_trunk(r, NULL));
}

/* One stage of a pipeline: x, NULL at stage 0, what the stage before returned -> what the next one
   takes; of the last stage the loss: tokens, labels (B,T) i32 -> the sum of cross-entropies over
   labels >= 0, divided by denominator. The logits are never all in memory. */
static inline dt_tensor *gpt_stage_at(
    gpt *m, int stage, dt_tensor *x, gpt_tokens t, dt_tensor *labels, double denominator) {
    dt_loss_desc d = { .smoothing = t.step ? m->config.smoothing : 0 };
    if (!t.ids) return NULL;
    gpt_pass r = gpt_pass_of(m, t, NULL);
    r.item = gpt_stage_first(m->config, stage);
    r.end = gpt_stage_first(m->config, stage + 1);
    x = gpt_trunk(r, x);
    if (stage + 1 < gpt_stages(m->config)) return x;
    return dt_vocab_linear_cross_entropy(
        x, m->head, labels, denominator, d, m->config.tp, r.outside);
}

/* The loss of a model that is one stage. */
static inline dt_tensor *gpt_loss_at(gpt *m, gpt_tokens t, dt_tensor *labels, double denominator) {
    return gpt_stage_at(m, 0, NULL, t, labels, denominator);
}

/* After a step, if config.router_bias: moves the biases of this rank's routers by what they have
   counted in layer[].route.experts (E each, the caller's), and begins to count anew. groups: all
   whose ranks route other tokens: the mesh's data, and tp with sp. [collective: these, at ZeRO-3
   also the data group] */
static inline dt_status gpt_balance(gpt *m, dt_comm *const *groups, int n) {
    for (int i = 0; i < m->config.layers && dt_error(m->ctx) == DT_OK; i++) {
        gpt_layer *l = &m->layer[i];
        if (!l->router_bias) continue;
        dt_route_balance(l->router_bias, l->route.experts, m->config.router_bias, groups, n);
        memset(l->route.experts, 0, (size_t)m->config.experts * sizeof *l->route.experts);
    }
    return dt_error(m->ctx);
}

/* The same of ids (B,T) alone: no dropout, no smoothing. */
static inline dt_tensor *gpt_logits(gpt *m, dt_tensor *ids) {
    return gpt_logits_at(m, (gpt_tokens){ .ids = ids });
}
static inline dt_tensor *gpt_loss(gpt *m, dt_tensor *ids, dt_tensor *labels, double denominator) {
    return gpt_loss_at(m, (gpt_tokens){ .ids = ids }, labels, denominator);
}

/* ==== Generation
   ================================================================================================== */

/* Keys and values do not depend on later tokens. So those of the tokens so far are kept, and a new
   token costs one row of every product and one query: 2 L seq K D numbers are kept, and nothing is
   allocated for a token. They are written in place, into memory made once; joining tensors instead
   would copy all of them for every token. [collective: tp, pp] Each rank keeps the keys and values
   of its heads and layers, and all learn the token that is drawn. Ranks of cp need not work
   together, since each sees all tokens: any one of them can. Between gpt_cache_open and
   gpt_cache_close the context records nothing. */
static inline void gpt_cache_close(gpt_cache *c) {
    dt_ctx *ctx = c->model->ctx;
    dt_free(ctx, DT_MEM_ACTS, c->data, c->bytes);
    dt_free(ctx, DT_MEM_HOST, c->positions, (size_t)c->model->config.seq * sizeof(int32_t));
    dt_schedule_free(c->schedule);
    dt_no_grad(ctx, 0);
    c->data = NULL;
    c->positions = NULL;
}

static inline dt_status gpt_cache_open(gpt_cache *c, gpt *m) {
    gpt_config g = m->config;
    int64_t D = g.width / g.heads;
    size_t one = (size_t)g.seq * (size_t)(m->kv.heads * D) * dt_dtype_size(g.dtype);
    memset(c, 0, sizeof *c);
    c->model = m;
    /* of those that this rank has */
    for (int i = 0; i < g.layers; i++) c->bytes += m->layer[i].q ? 2 * one : 0;
    dt_no_grad(m->ctx, 1);
    c->data = dt_alloc(m->ctx, DT_MEM_ACTS, c->bytes, "keys and values");
    c->positions =
        (int32_t *)dt_alloc(m->ctx, DT_MEM_HOST, (size_t)g.seq * sizeof(int32_t), "positions");
    for (int t = 0; t < g.seq && c->positions; t++) c->positions[t] = t;
    char *at = (char *)c->data;
    for (int i = 0; i < 2 * g.layers; i++) {
        dt_tensor *t = i % 2 ? &c->v[i / 2] : &c->k[i / 2];
        if (!m->layer[i / 2].q || !at) continue;
        *t = (dt_tensor){ .data = at, .dtype = g.dtype, .name = "cache", .ctx = m->ctx };
        at += one;
    }
    if (gpt_stages(g) > 1)
        c->schedule = dt_schedule_make(m->ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_INTERLEAVED,
                                                   .micros = 1,
                                                   .ranks = dt_comm_size(g.pp),
                                                   .chunks = gpt_stages(g) / dt_comm_size(g.pp) });
    /* scratch for the longest, so that it never grows */
    dt_scratch(m->ctx, dt_attention_work(g.seq, D, g.dtype));
    if (dt_error(m->ctx) != DT_OK) gpt_cache_close(c);
    return dt_error(m->ctx);
}

/* Appends n tokens, for which there must be room, to what one stage has: x, NULL at stage 0, ->
   what the next stage takes, or of the last one the logits (V) after the last token. */
static inline dt_tensor *gpt_cache_stage(
    gpt_cache *c, int stage, dt_tensor *x, const int32_t *ids, int n) {
    gpt *m = c->model;
    int64_t C = m->config.width;
    if (n < 1 || n > m->config.seq - c->have) {
        dt_fail(m->ctx, DT_ERR_ARG, "gpt_cache_stage: %d tokens behind %d of %d", n, c->have,
            m->config.seq);
        return NULL;
    }
    gpt_tokens t = { .ids = dt_input(m->ctx, DT_I32, DT_SHAPE(1, n), ids) };
    t.positions = dt_input(m->ctx, DT_I32, DT_SHAPE(1, n), c->positions + c->have);
    if (!t.ids) return NULL;
    gpt_pass r = gpt_pass_of(m, t, c);
    r.item = gpt_stage_first(m->config, stage);
    r.end = gpt_stage_first(m->config, stage + 1);
    /* (1,n,C) */
    x = gpt_trunk(r, x);
    if (!x || stage + 1 < gpt_stages(m->config)) return x;
    x = gpt_head(&r, dt_slice(dt_reshape(x, DT_SHAPE(n, C)), 0, n - 1, 1));
    return x ? dt_reshape(x, DT_SHAPE(m->config.vocab)) : NULL;
}

/* The same of a model that is one stage: the logits, until dt_reset. */
static inline dt_tensor *gpt_cache_next(gpt_cache *c, const int32_t *ids, int n) {
    dt_tensor *x = gpt_cache_stage(c, 0, NULL, ids, n);
    c->have += n;
    return x;
}

/* What is drawn: an id below `limit` (0: any), of the top_k likeliest (0: of all; of equal ones
   all), from softmax(logits / temperature); temperature 0: the likeliest. */
typedef struct gpt_sampling {
    double temperature;
    int top_k, limit;
    uint64_t seed;
} gpt_sampling;

static inline int gpt_descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The smallest logit that may still be drawn. sorted: room for n numbers. */
static inline float gpt_floor(const float *logits, int n, int top_k, float *sorted) {
    if (top_k <= 0 || top_k >= n) return -INFINITY;
    memcpy(sorted, logits, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, gpt_descending);
    return sorted[top_k - 1];
}

/* An id below n, at point u in [0,1) of the distribution. sorted: room for n numbers. */
static inline int32_t gpt_sample(
    const float *logits, int n, gpt_sampling s, double u, float *sorted) {
    int32_t best = 0;
    double sum = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    if (s.temperature <= 0) return best;
    float least = gpt_floor(logits, n, s.top_k, sorted);
    for (int i = 0; i < n; i++)
        if (logits[i] >= least)
            sum += exp(((double)logits[i] - (double)logits[best]) / s.temperature);
    for (int i = 0; i < n; i++) {
        if (logits[i] >= least)
            u -= exp(((double)logits[i] - (double)logits[best]) / s.temperature) / sum;
        if (u < 0) return i;
    }
    return best;
}

/* The context is full: it begins again with the newer half of its tokens, whose positions are new.
   Keeping all but the oldest would change every position, and so every key, for each token. */
static inline int gpt_restart(gpt_cache *c) {
    c->have = 0;
    return c->model->config.seq / 2 > 0 ? c->model->config.seq / 2 : 1;
}

/* One token to be drawn. */
typedef struct gpt_draw {
    gpt_cache *cache;
    const int32_t *ids;
    int n;         /* tokens that the cache has not seen */
    float *logits; /* (2,V): room */
    gpt_sampling s;
    /* a point in [0,1); what was drawn, on the rank that has the last stage, else 0 */
    double at, token;
} gpt_draw;

static inline dt_tensor *gpt_draw_stage(dt_tensor *x, int stage, int micro, void *user) {
    gpt_draw *d = (gpt_draw *)user;
    gpt *m = d->cache->model;
    int V = m->config.vocab, limit = d->s.limit > 0 && d->s.limit < V ? d->s.limit : V;
    (void)micro;
    x = gpt_cache_stage(d->cache, stage, x, d->ids, d->n);
    if (stage + 1 < gpt_stages(m->config)) return x;
    x = dt_cast(x, DT_F32);
    if (x && dt_read(x, d->logits) == DT_OK)
        d->token = gpt_sample(d->logits, limit, d->s, d->at, d->logits + V);
    return x;
}

/* Through all stages, on all of their ranks. */
static inline int32_t gpt_draw_token(gpt_draw *d) {
    gpt *m = d->cache->model;
    d->token = 0;
    if (d->cache->schedule)
        dt_pipe_run(m->ctx, (dt_pipe_desc){ .schedule = d->cache->schedule,
                                .comm = m->config.pp,
                                .run = gpt_draw_stage,
                                .user = d,
                                .forward_micros = 1 });
    else
        gpt_draw_stage(NULL, 0, 0, d);
    d->cache->have += d->n;
    dt_sum_doubles(m->config.pp, &d->token, 1);
    dt_reset(m->ctx);
    return (int32_t)d->token;
}

/* Continues ids, of which `have` >= 1 are given, to `want`. Beyond seq tokens the model sees the
   last seq/2 to seq. */
static inline dt_status gpt_generate(gpt *m, int32_t *ids, int have, int want, gpt_sampling s) {
    size_t bytes = 2 * (size_t)m->config.vocab * sizeof(float);
    gpt_cache *c = (gpt_cache *)dt_alloc(m->ctx, DT_MEM_HOST, sizeof *c, "gpt_generate");
    gpt_draw d = {
        .cache = c, .logits = (float *)dt_alloc(m->ctx, DT_MEM_HOST, bytes, "gpt_generate"), .s = s
    };
    if (have < 1)
        dt_fail(
            m->ctx, DT_ERR_ARG, "gpt_generate: %d tokens are given; at least one is needed", have);
    if (c && d.logits && have > 0 && gpt_cache_open(c, m) == DT_OK) {
        d.n = have < m->config.seq ? have : m->config.seq;
        for (int at = have; at < want && dt_error(m->ctx) == DT_OK; at++, d.n = 1) {
            if (c->have + d.n > m->config.seq) d.n = gpt_restart(c);
            d.ids = ids + at - d.n;
            d.at = (double)(gpt_mix(gpt_mix(s.seed) + (uint64_t)at) >> 11) / 9007199254740992.0;
            int32_t token = gpt_draw_token(&d);
            if (dt_error(m->ctx) == DT_OK) ids[at] = token;
        }
        gpt_cache_close(c);
    }
    dt_free(m->ctx, DT_MEM_HOST, d.logits, bytes);
    dt_free(m->ctx, DT_MEM_HOST, c, sizeof *c);
    return dt_error(m->ctx);
}

#endif /* GPT_H */
