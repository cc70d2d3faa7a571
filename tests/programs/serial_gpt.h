/* serial_gpt.h - a serial float64 GPT-2 with hand-written gradients: the reference of one-rank runs
   Public domain or MIT, at your choice; see LICENSE.

   Plain loops, one sequence at a time, nothing but libc and libm, and no code shared with dt: where
   the two agree to 1e-12, they agree because both are right. Slow on purpose. C11, all static.

       sg_sizes s = { .V = 17, .T = 8, .L = 2, .C = 12, .H = 3, .F = 20, .tied = 1 };
       sg_model *m = sg_make(s);
       sg_init(m);                               // the values that golden/make_gpt2.py starts from
       for (int step = 1; step <= 5; step++) {
           sg_zero_grad(m);
           double loss = 0;
           for (int i = 0; i < micro_batches; i++)
               loss += sg_forward_backward(m, ids[i], labels[i], B, T_used, labels_of_step);
           sg_adamw(m, lr, 0.9, 0.95, 1e-8, 0.1, 1.2, step);
       }
       sg_free(m);

   The model, with x (T,C) for one sequence and linear(x) = x W^T + b:
       x = wte[ids] + wpe[0..T)
       per layer   x += attn.proj(attention(q(n), k(n), v(n))), where n = ln_1(x)
                   x += mlp.proj(gelu(mlp.fc(ln_2(x))))
       logits = ln_f(x) head^T, where head is wte if tied, else lm_head; no bias
       loss = (sum over labels >= 0 of -log softmax(logits)[label]) / denom
   Letters: V vocabulary, T positions, L layers, C width, H heads, D = C/H head width, F
   feed-forward width, B sequences. */
#ifndef SERIAL_GPT_H
#define SERIAL_GPT_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct sg_sizes {
    int V, T, L, C, H, F; /* C must be a multiple of H */
    int tied;             /* 1: the head is wte.weight; 0: lm_head.weight */
} sg_sizes;

typedef struct sg_param {
    char name[40];
    int nd;           /* 1, 2 or 3 */
    int64_t shape[3]; /* logical shape, row-major; attn.q.weight is (H,D,C) */
    int64_t count;
    int decay; /* weight decay applies: neither a bias nor a layernorm's weight */
    double *value, *grad;
    double *m, *v; /* AdamW's two moments; SGD keeps its momentum in m */
} sg_param;

typedef struct sg_model {
    sg_sizes s;
    int n_params;
    sg_param *p; /* wte, wpe, 16 per layer, ln_f's two, lm_head when untied */
} sg_model;

/* The activations of one layer that its backward reads, for one sequence. */
typedef struct sg_acts {
    double *x;         /* (T,C)   the layer's input */
    double *n1;        /* (T,C)   ln_1(x) */
    double *q, *k, *v; /* (T,H,D) */
    double *att;       /* (H,T,T) softmax of the scores, zero above the diagonal */
    double *heads;     /* (T,H,D) att v, which is (T,C) to the projection */
    double *mid;       /* (T,C)   x after the attention half */
    double *n2;        /* (T,C)   ln_2(mid) */
    double *fc, *act;  /* (T,F)   before and after gelu */
} sg_acts;

typedef struct sg_work {
    double *memory;                      /* the allocation that holds all arrays below */
    sg_acts *layer;                      /* L of them */
    double *x, *nf, *logits;             /* (T,C) (T,C) (T,V): after the last layer */
    double *dx, *dn, *dq, *dk, *dv, *dh; /* (T,C) each */
    double *dfc, *dact;                  /* (T,F) each */
} sg_work;

/* Offsets of layer l's parameters from the layer's first one, which has index 2 +
   SG_PER_LAYER*l. */
enum {
    SG_LN1_W,
    SG_LN1_B,
    SG_Q_W,
    SG_Q_B,
    SG_K_W,
    SG_K_B,
    SG_V_W,
    SG_V_B,
    SG_PROJ_W,
    SG_PROJ_B,
    SG_LN2_W,
    SG_LN2_B,
    SG_FC_W,
    SG_FC_B,
    SG_MLP_W,
    SG_MLP_B,
    SG_PER_LAYER
};

/* ==== 1. The model and its table of parameters ================================================ */

/* Appends parameter `name` of shape (a,b,c); c, or b and c, may be 0. 0 if out of memory. */
static inline int sg_add_param(sg_model *model, const char *name, int64_t a, int64_t b, int64_t c) {
    sg_param *p = &model->p[model->n_params++];
    size_t length = strlen(name);
    snprintf(p->name, sizeof p->name, "%s", name);
    p->nd = c ? 3 : b ? 2 : 1;
    p->shape[0] = a;
    p->shape[1] = b;
    p->shape[2] = c;
    p->count = a * (b ? b : 1) * (c ? c : 1);
    p->decay = !strstr(name, "ln_") && !(length > 5 && !strcmp(name + length - 5, ".bias"));
    p->value = (double *)calloc((size_t)(4 * p->count), sizeof(double));
    if (!p->value) return 0;
    p->grad = p->value + p->count;
    p->m = p->grad + p->count;
    p->v = p->m + p->count;
    return 1;
}

static inline int sg_add_layer(sg_model *model, int l) {
    int64_t C = model->s.C, H = model->s.H, D = C / H, F = model->s.F;
    struct {
        const char *name;
        int64_t a, b, c;
    } row[SG_PER_LAYER] = {
        { "ln_1.weight", C, 0, 0 },
        { "ln_1.bias", C, 0, 0 },
        { "attn.q.weight", H, D, C },
        { "attn.q.bias", H, D, 0 },
        { "attn.k.weight", H, D, C },
        { "attn.k.bias", H, D, 0 },
        { "attn.v.weight", H, D, C },
        { "attn.v.bias", H, D, 0 },
        { "attn.proj.weight", C, C, 0 },
        { "attn.proj.bias", C, 0, 0 },
        { "ln_2.weight", C, 0, 0 },
        { "ln_2.bias", C, 0, 0 },
        { "mlp.fc.weight", F, C, 0 },
        { "mlp.fc.bias", F, 0, 0 },
        { "mlp.proj.weight", C, F, 0 },
        { "mlp.proj.bias", C, 0, 0 },
    };
    for (int i = 0; i < SG_PER_LAYER; i++) {
        char name[40];
        snprintf(name, sizeof name, "h.%d.%s", l, row[i].name);
        if (!sg_add_param(model, name, row[i].a, row[i].b, row[i].c)) return 0;
    }
    return 1;
}

static inline void sg_free(sg_model *model) {
    if (!model) return;
    for (int i = 0; model->p && i < model->n_params; i++) free(model->p[i].value);
    free(model->p);
    free(model);
}

/* A model with values, gradients and moments of 0. NULL if a size is invalid or memory is short. */
static inline sg_model *sg_make(sg_sizes s) {
    if (s.V < 1 || s.T < 1 || s.L < 0 || s.C < 1 || s.H < 1 || s.F < 1 || s.C % s.H) return NULL;
    sg_model *model = (sg_model *)calloc(1, sizeof *model);
    if (!model) return NULL;
    model->s = s;
    model->p = (sg_param *)calloc((size_t)(SG_PER_LAYER * s.L + 5), sizeof *model->p);
    int ok = model->p && sg_add_param(model, "wte.weight", s.V, s.C, 0) &&
             sg_add_param(model, "wpe.weight", s.T, s.C, 0);
    for (int l = 0; ok && l < s.L; l++) ok = sg_add_layer(model, l);
    ok = ok && sg_add_param(model, "ln_f.weight", s.C, 0, 0) &&
         sg_add_param(model, "ln_f.bias", s.C, 0, 0);
    if (ok && !s.tied) ok = sg_add_param(model, "lm_head.weight", s.V, s.C, 0);
    if (!ok) {
        sg_free(model);
        return NULL;
    }
    return model;
}

/* The parameter of that name, or NULL. */
static inline sg_param *sg_find(sg_model *model, const char *name) {
    for (int i = 0; i < model->n_params; i++)
        if (!strcmp(model->p[i].name, name)) return &model->p[i];
    return NULL;
}

/* A value in [-0.5, 0.5) from the indices of a parameter and of its element: 20 bits of a hash, the
   same in every language, and exact in f32. */
static inline double sg_unit(uint32_t param, uint32_t element) {
    uint32_t h = param * 2654435761u + element * 2246822519u + 374761393u;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    h ^= h >> 16;
    return (h >> 12) / 1048576.0 - 0.5;
}

/* Sets values to sg_unit/2, plus 1 for layernorm weights. Zeros could hide a mistake. */
static inline void sg_init(sg_model *model) {
    for (int i = 0; i < model->n_params; i++) {
        sg_param *p = &model->p[i];
        double base = strstr(p->name, "ln_") && strstr(p->name, ".weight") ? 1.0 : 0.0;
        for (int64_t e = 0; e < p->count; e++)
            p->value[e] = base + 0.5 * sg_unit((uint32_t)i, (uint32_t)e);
    }
}

/* ==== 2. Ops, forward and backward; a backward ADDS to every gradient it writes =============== */

/* y (n,out) = x (n,in) w (out,in)^T + b (out); b may be NULL. */
static inline void sg_linear(double *y, const double *x, const double *w, const double *b,
    int64_t n, int64_t in, int64_t out) {
    for (int64_t t = 0; t < n; t++) {
        for (int64_t o = 0; o < out; o++) {
            double sum = b ? b[o] : 0.0;
            for (int64_t i = 0; i < in; i++) sum += x[t * in + i] * w[o * in + i];
            y[t * out + o] = sum;
        }
    }
}

static inline void sg_linear_backward(double *dx, double *dw, double *db, const double *dy,
    const double *x, const double *w, int64_t n, int64_t in, int64_t out) {
    for (int64_t t = 0; t < n; t++) {
        for (int64_t o = 0; o < out; o++) {
            double d = dy[t * out + o];
            for (int64_t i = 0; i < in; i++) {
                dx[t * in + i] += d * w[o * in + i];
                dw[o * in + i] += d * x[t * in + i];
            }
            if (db) db[o] += d;
        }
    }
}

/* Mean and 1/sqrt(variance + eps) of one row; the variance divides by C, not C-1. */
static inline void sg_row_stats(const double *x, int64_t C, double *mean, double *rstd) {
    double sum = 0.0, squares = 0.0;
    for (int64_t c = 0; c < C; c++) sum += x[c];
    *mean = sum / (double)C;
    for (int64_t c = 0; c < C; c++) squares += (x[c] - *mean) * (x[c] - *mean);
    *rstd = 1.0 / sqrt(squares / (double)C + 1e-5);
}

/* y (n,C) from x (n,C), gain (C), bias (C). */
static inline void sg_layernorm(
    double *y, const double *x, const double *gain, const double *bias, int64_t n, int64_t C) {
    for (int64_t t = 0; t < n; t++) {
        double mean, rstd;
        sg_row_stats(x + t * C, C, &mean, &rstd);
        for (int64_t c = 0; c < C; c++)
            y[t * C + c] = (x[t * C + c] - mean) * rstd * gain[c] + bias[c];
    }
}

/* With h = (x - mean) rstd and g = dy gain:  dx = rstd (g - mean(g) - h mean(g h)). */
static inline void sg_layernorm_backward(double *dx, double *dgain, double *dbias, const double *dy,
    const double *x, const double *gain, int64_t n, int64_t C) {
    for (int64_t t = 0; t < n; t++) {
        const double *xt = x + t * C, *dyt = dy + t * C;
        double mean, rstd, mean_g = 0.0, mean_gh = 0.0;
        sg_row_stats(xt, C, &mean, &rstd);
        for (int64_t c = 0; c < C; c++) {
            double h = (xt[c] - mean) * rstd, g = dyt[c] * gain[c];
            mean_g += g / (double)C;
            mean_gh += g * h / (double)C;
            dgain[c] += dyt[c] * h;
            dbias[c] += dyt[c];
        }
        for (int64_t c = 0; c < C; c++) {
            double h = (xt[c] - mean) * rstd, g = dyt[c] * gain[c];
            dx[t * C + c] += rstd * (g - mean_g - h * mean_gh);
        }
    }
}

/* gelu(x) = x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3). */
static inline double sg_gelu(double x) {
    double u = sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x);
    return 0.5 * x * (1.0 + tanh(u));
}

static inline double sg_gelu_slope(double x) {
    double root = sqrt(2.0 / acos(-1.0));
    double th = tanh(root * (x + 0.044715 * x * x * x));
    double du = root * (1.0 + 3.0 * 0.044715 * x * x);
    return 0.5 * (1.0 + th) + 0.5 * x * (1.0 - th * th) * du;
}

/* Causal attention of one sequence: q, k, v, out (n,H,D), att (H,n,n). Query i sees keys 0..i,
   scale 1/sqrt(D). */
static inline void sg_attention(double *out, double *att, const double *q, const double *k,
    const double *v, int64_t n, int64_t H, int64_t D) {
    for (int64_t h = 0; h < H; h++) {
        for (int64_t i = 0; i < n; i++) {
            double *a = att + (h * n + i) * n, *o = out + (i * H + h) * D;
            double top = -INFINITY, sum = 0.0;
            for (int64_t j = 0; j <= i; j++) {
                double dot = 0.0;
                for (int64_t d = 0; d < D; d++)
                    dot += q[(i * H + h) * D + d] * k[(j * H + h) * D + d];
                a[j] = dot / sqrt((double)D);
                if (a[j] > top) top = a[j];
            }
            for (int64_t j = 0; j <= i; j++) sum += a[j] = exp(a[j] - top);
            for (int64_t j = 0; j < n; j++) a[j] = j <= i ? a[j] / sum : 0.0;
            for (int64_t d = 0; d < D; d++) o[d] = 0.0;
            for (int64_t j = 0; j <= i; j++)
                for (int64_t d = 0; d < D; d++) o[d] += a[j] * v[(j * H + h) * D + d];
        }
    }
}

/* Through the softmax: dscore_j = a_j (da_j - sum over l of a_l da_l), where da_j = dout . v_j. */
static inline void sg_attention_backward(double *dq, double *dk, double *dv, const double *dout,
    const double *att, const double *q, const double *k, const double *v, int64_t n, int64_t H,
    int64_t D) {
    for (int64_t h = 0; h < H; h++) {
        for (int64_t i = 0; i < n; i++) {
            const double *a = att + (h * n + i) * n, *dy = dout + (i * H + h) * D;
            double mean = 0.0; /* sum over j of a_j da_j */
            for (int64_t j = 0; j <= i; j++) {
                for (int64_t d = 0; d < D; d++) {
                    mean += a[j] * dy[d] * v[(j * H + h) * D + d];
                    dv[(j * H + h) * D + d] += a[j] * dy[d];
                }
            }
            for (int64_t j = 0; j <= i; j++) {
                double da = 0.0;
                for (int64_t d = 0; d < D; d++) da += dy[d] * v[(j * H + h) * D + d];
                double dscore = a[j] * (da - mean) / sqrt((double)D);
                for (int64_t d = 0; d < D; d++) {
                    dq[(i * H + h) * D + d] += dscore * k[(j * H + h) * D + d];
                    dk[(j * H + h) * D + d] += dscore * q[(i * H + h) * D + d];
                }
            }
        }
    }
}

/* The sum over labels >= 0 of the cross entropy, over denom; logits (n,V) become their gradient. */
static inline double sg_cross_entropy(
    double *logits, const int32_t *labels, int64_t n, int64_t V, double denom) {
    double loss = 0.0;
    for (int64_t t = 0; t < n; t++) {
        double *row = logits + t * V;
        double top = row[0], sum = 0.0;
        for (int64_t j = 1; j < V; j++)
            if (row[j] > top) top = row[j];
        for (int64_t j = 0; j < V; j++) sum += exp(row[j] - top);
        if (labels[t] >= 0) loss += top + log(sum) - row[labels[t]];
        for (int64_t j = 0; j < V; j++)
            row[j] = labels[t] < 0 ? 0.0 : (exp(row[j] - top) / sum - (j == labels[t])) / denom;
    }
    return loss / denom;
}

/* ==== 3. One sequence through the model, and back ============================================= */

static inline double *sg_take(double **cursor, int64_t count) {
    double *here = *cursor;
    *cursor += count;
    return here;
}

/* Allocates the arrays for one sequence of n tokens. Returns 0 if out of memory. */
static inline int sg_work_make(sg_work *w, sg_sizes s, int64_t n) {
    int64_t nC = n * s.C, nF = n * s.F, nn = n * n * s.H;
    int64_t total = s.L * (8 * nC + 2 * nF + nn) + 8 * nC + 2 * nF + n * s.V;
    double *at = w->memory = (double *)calloc((size_t)total, sizeof(double));
    w->layer = (sg_acts *)calloc((size_t)s.L + 1, sizeof(sg_acts));
    if (!w->memory || !w->layer) return 0;
    for (int l = 0; l < s.L; l++) {
        sg_acts *a = &w->layer[l];
        double **c_wide[] = { &a->x, &a->n1, &a->q, &a->k, &a->v, &a->heads, &a->mid, &a->n2 };
        for (int i = 0; i < 8; i++) *c_wide[i] = sg_take(&at, nC);
        a->fc = sg_take(&at, nF);
        a->act = sg_take(&at, nF);
        a->att = sg_take(&at, nn);
    }
    double **c_wide[] = { &w->x, &w->nf, &w->dx, &w->dn, &w->dq, &w->dk, &w->dv, &w->dh };
    for (int i = 0; i < 8; i++) *c_wide[i] = sg_take(&at, nC);
    w->dfc = sg_take(&at, nF);
    w->dact = sg_take(&at, nF);
    w->logits = sg_take(&at, n * s.V);
    return 1;
}

static inline void sg_work_free(sg_work *w) {
    free(w->memory);
    free(w->layer);
}

/* out (n,C): the layer's output; a->x holds its input. */
static inline void sg_layer_forward(
    const sg_model *model, int l, sg_acts *a, double *out, int64_t n) {
    const sg_param *p = &model->p[2 + SG_PER_LAYER * l];
    int64_t C = model->s.C, H = model->s.H, F = model->s.F;
    sg_layernorm(a->n1, a->x, p[SG_LN1_W].value, p[SG_LN1_B].value, n, C);
    sg_linear(a->q, a->n1, p[SG_Q_W].value, p[SG_Q_B].value, n, C, C);
    sg_linear(a->k, a->n1, p[SG_K_W].value, p[SG_K_B].value, n, C, C);
    sg_linear(a->v, a->n1, p[SG_V_W].value, p[SG_V_B].value, n, C, C);
    sg_attention(a->heads, a->att, a->q, a->k, a->v, n, H, C / H);
    sg_linear(a->mid, a->heads, p[SG_PROJ_W].value, p[SG_PROJ_B].value, n, C, C);
    for (int64_t i = 0; i < n * C; i++) a->mid[i] += a->x[i];
    sg_layernorm(a->n2, a->mid, p[SG_LN2_W].value, p[SG_LN2_B].value, n, C);
    sg_linear(a->fc, a->n2, p[SG_FC_W].value, p[SG_FC_B].value, n, C, F);
    for (int64_t i = 0; i < n * F; i++) a->act[i] = sg_gelu(a->fc[i]);
    sg_linear(out, a->act, p[SG_MLP_W].value, p[SG_MLP_B].value, n, F, C);
    for (int64_t i = 0; i < n * C; i++) out[i] += a->mid[i];
}

static inline void sg_zero(double *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = 0.0;
}

/* sg_linear_backward for a weight and its bias, the next parameter of the table. */
static inline void sg_linear_grads(double *dx, sg_param *p, const double *dy, const double *x,
    int64_t n, int64_t in, int64_t out) {
    sg_linear_backward(dx, p[0].grad, p[1].grad, dy, x, p[0].value, n, in, out);
}

static inline void sg_layernorm_grads(
    double *dx, sg_param *p, const double *dy, const double *x, int64_t n, int64_t C) {
    sg_layernorm_backward(dx, p[0].grad, p[1].grad, dy, x, p[0].value, n, C);
}

/* w->dx (n,C) holds the gradient of the layer's output, afterwards that of its input. The residual
   paths need no code: each half adds its gradient to dx. */
static inline void sg_layer_backward(
    sg_model *model, int l, const sg_acts *a, sg_work *w, int64_t n) {
    sg_param *p = &model->p[2 + SG_PER_LAYER * l];
    int64_t C = model->s.C, H = model->s.H, F = model->s.F;
    sg_zero(w->dact, n * F);
    sg_linear_grads(w->dact, &p[SG_MLP_W], w->dx, a->act, n, F, C);
    for (int64_t i = 0; i < n * F; i++) w->dfc[i] = w->dact[i] * sg_gelu_slope(a->fc[i]);
    sg_zero(w->dn, n * C);
    sg_linear_grads(w->dn, &p[SG_FC_W], w->dfc, a->n2, n, C, F);
    sg_layernorm_grads(w->dx, &p[SG_LN2_W], w->dn, a->mid, n, C);

    sg_zero(w->dh, n * C);
    sg_linear_grads(w->dh, &p[SG_PROJ_W], w->dx, a->heads, n, C, C);
    sg_zero(w->dq, n * C);
    sg_zero(w->dk, n * C);
    sg_zero(w->dv, n * C);
    sg_attention_backward(w->dq, w->dk, w->dv, w->dh, a->att, a->q, a->k, a->v, n, H, C / H);
    sg_zero(w->dn, n * C);
    sg_linear_grads(w->dn, &p[SG_Q_W], w->dq, a->n1, n, C, C);
    sg_linear_grads(w->dn, &p[SG_K_W], w->dk, a->n1, n, C, C);
    sg_linear_grads(w->dn, &p[SG_V_W], w->dv, a->n1, n, C, C);
    sg_layernorm_grads(w->dx, &p[SG_LN1_W], w->dn, a->x, n, C);
}

/* Fills w->logits (n,V) from ids (n). */
static inline void sg_forward(const sg_model *model, sg_work *w, const int32_t *ids, int64_t n) {
    const sg_param *p = model->p, *ln_f = &p[2 + SG_PER_LAYER * model->s.L];
    const sg_param *head = model->s.tied ? &p[0] : ln_f + 2;
    int64_t C = model->s.C;
    double *x = model->s.L ? w->layer[0].x : w->x;
    for (int64_t t = 0; t < n; t++)
        for (int64_t c = 0; c < C; c++)
            x[t * C + c] = p[0].value[ids[t] * C + c] + p[1].value[t * C + c];
    for (int l = 0; l < model->s.L; l++)
        sg_layer_forward(model, l, &w->layer[l], l + 1 < model->s.L ? w->layer[l + 1].x : w->x, n);
    sg_layernorm(w->nf, w->x, ln_f[0].value, ln_f[1].value, n, C);
    sg_linear(w->logits, w->nf, head->value, NULL, n, C, model->s.V);
}

/* w->logits holds the gradient of the logits. A tied wte.weight gets two gradients: first as the
   head, last as the embedding. */
static inline void sg_backward(sg_model *model, sg_work *w, const int32_t *ids, int64_t n) {
    sg_param *p = model->p, *ln_f = &p[2 + SG_PER_LAYER * model->s.L];
    sg_param *head = model->s.tied ? &p[0] : ln_f + 2;
    int64_t C = model->s.C;
    sg_zero(w->dn, n * C);
    sg_linear_backward(w->dn, head->grad, NULL, w->logits, w->nf, head->value, n, C, model->s.V);
    sg_zero(w->dx, n * C);
    sg_layernorm_grads(w->dx, ln_f, w->dn, w->x, n, C);
    for (int l = model->s.L - 1; l >= 0; l--) sg_layer_backward(model, l, &w->layer[l], w, n);
    for (int64_t t = 0; t < n; t++) {
        for (int64_t c = 0; c < C; c++) {
            p[0].grad[ids[t] * C + c] += w->dx[t * C + c];
            p[1].grad[t * C + c] += w->dx[t * C + c];
        }
    }
}

static inline double sg_run(sg_model *model, const int32_t *ids, const int32_t *labels, int B,
    int T_used, double denom, int with_gradients) {
    sg_work work = { 0 };
    double loss = 0.0;
    if (B < 1 || T_used < 1 || T_used > model->s.T) return NAN;
    for (int64_t i = 0; i < (int64_t)B * T_used; i++)
        if (ids[i] < 0 || ids[i] >= model->s.V || labels[i] >= model->s.V) return NAN;
    if (!sg_work_make(&work, model->s, T_used)) loss = NAN;
    for (int b = 0; b < B && !isnan(loss); b++) {
        const int32_t *ids_b = ids + (int64_t)b * T_used, *labels_b = labels + (int64_t)b * T_used;
        sg_forward(model, &work, ids_b, T_used);
        loss += sg_cross_entropy(work.logits, labels_b, T_used, model->s.V, denom);
        if (with_gradients) sg_backward(model, &work, ids_b, T_used);
    }
    sg_work_free(&work);
    return loss;
}

/* ids, labels (B,T_used), labels < 0 ignored. Returns this batch's sum of cross entropies over
   denom, and ADDS its gradient to every parameter's: micro-batches of a step share one denom. NaN
   for ids, labels or sizes out of range. */
static inline double sg_forward_backward(
    sg_model *model, const int32_t *ids, const int32_t *labels, int B, int T_used, double denom) {
    return sg_run(model, ids, labels, B, T_used, denom, 1);
}

/* The same loss, without a backward. */
static inline double sg_loss(
    sg_model *model, const int32_t *ids, const int32_t *labels, int B, int T_used, double denom) {
    return sg_run(model, ids, labels, B, T_used, denom, 0);
}

/* ==== 4. Optimizers =========================================================================== */

static inline void sg_zero_grad(sg_model *model) {
    for (int i = 0; i < model->n_params; i++) sg_zero(model->p[i].grad, model->p[i].count);
}

/* Euclidean norm over all parameters' gradients; a tied weight is one parameter. */
static inline double sg_grad_norm(const sg_model *model) {
    double sum = 0.0;
    for (int i = 0; i < model->n_params; i++) {
        const double *g = model->p[i].grad;
        for (int64_t e = 0; e < model->p[i].count; e++) sum += g[e] * g[e];
    }
    return sqrt(sum);
}

/* The factor of clipping: min(1, clip / (norm + 1e-6)), or 1 if clip <= 0. */
static inline double sg_clip_factor(double norm, double clip) {
    return clip > 0 && clip / (norm + 1e-6) < 1 ? clip / (norm + 1e-6) : 1.0;
}

/* One step, counted from 1. Decay is decoupled. Gradients are left unclipped. Returns their norm
   before clipping. */
static inline double sg_adamw(sg_model *model, double lr, double beta1, double beta2, double eps,
    double weight_decay, double clip, int step) {
    double norm = sg_grad_norm(model), factor = sg_clip_factor(norm, clip);
    double correct1 = 1.0 - pow(beta1, step), correct2 = 1.0 - pow(beta2, step);
    for (int i = 0; i < model->n_params; i++) {
        sg_param *p = &model->p[i];
        for (int64_t e = 0; e < p->count; e++) {
            double g = factor * p->grad[e];
            p->m[e] = beta1 * p->m[e] + (1.0 - beta1) * g;
            p->v[e] = beta2 * p->v[e] + (1.0 - beta2) * g * g;
            if (p->decay) p->value[e] -= lr * weight_decay * p->value[e];
            p->value[e] -= lr * (p->m[e] / correct1) / (sqrt(p->v[e] / correct2) + eps);
        }
    }
    return norm;
}

/* One step as PyTorch's SGD: decay is added to the clipped gradient, momentum has no dampening (the
   first step's buffer is the gradient, since m starts at zero). Gradients are left unclipped.
   Returns their norm before clipping. */
static inline double sg_sgd(
    sg_model *model, double lr, double momentum, double weight_decay, double clip) {
    double norm = sg_grad_norm(model), factor = sg_clip_factor(norm, clip);
    for (int i = 0; i < model->n_params; i++) {
        sg_param *p = &model->p[i];
        for (int64_t e = 0; e < p->count; e++) {
            double g = factor * p->grad[e] + (p->decay ? weight_decay * p->value[e] : 0.0);
            p->m[e] = momentum * p->m[e] + g;
            p->value[e] -= lr * p->m[e];
        }
    }
    return norm;
}

#endif /* SERIAL_GPT_H */
