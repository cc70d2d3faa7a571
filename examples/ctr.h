/* ctr.h - click-through-rate models on a parameter server - public domain or MIT, at your choice

   Include ctr.h after dt_zero.h and criteo.h. All functions are static.

       y = wide + fm + deep                     click probability p = sigmoid(y)
       wide   sum of the weights of 26 categories        table "wide", one number a row
              and of weight x number over 13 numbers,
              and a bias                                 dense parameters "numbers" and "bias"
       fm     sum over pairs of slots of <e_i, e_j>, computed as ((sum e)^2 - sum e^2) / 2
              (Rendle, ICDM 2010)                        table "embedding", `width` numbers a row
       deep   an MLP over the 26 embeddings and the 13 numbers
                                                         dense parameters on the servers

       lr: wide;  fm: wide + fm;  wide-deep: wide + deep (arXiv:1606.07792);
       deepfm: wide + fm + deep (arXiv:1703.04247)

   The embeddings of fm and deep are the same rows. */
#ifndef CTR_H
#define CTR_H

#include "criteo.h"

enum { CTR_LR = 0, CTR_FM, CTR_WIDE_DEEP, CTR_DEEPFM };
enum { CTR_HIDDEN = 8 }; /* most hidden layers */
enum { CTR_TABLES = 4 + 2 * (CTR_HIDDEN + 1) };

typedef struct ctr_config {
    int kind;  /* CTR_* */
    int width; /* of an embedding */
    int hidden[CTR_HIDDEN], layers;
    int optimizer; /* DT_TABLE_*: FTRL is for the wide part, the others then use Adagrad */
    int batch;     /* samples of a step over all workers: the divisor of the loss */
} ctr_config;

typedef struct ctr_model {
    dt_ctx *ctx;
    ctr_config config;
    dt_ps *ps;
    int wide, embedding, numbers, bias;                  /* tables; embedding -1: none */
    int weights[CTR_HIDDEN + 1], biases[CTR_HIDDEN + 1]; /* dense tables of the MLP */
    int last_table;
} ctr_model;

/* A batch: what the samples of one step become. */
typedef struct ctr_batch {
    int n, capacity; /* samples */
    float *labels;   /* (n) */
    float *numbers;  /* (n,13) */
    uint64_t *keys;  /* (n,26) */
} ctr_batch;

static inline int ctr_has_embedding(int kind) { return kind != CTR_LR; }
static inline int ctr_is_deep(int kind) { return kind == CTR_WIDE_DEEP || kind == CTR_DEEPFM; }

static inline ctr_batch ctr_batch_make(dt_ctx *ctx, int capacity) {
    size_t n = (size_t)capacity;
    ctr_batch b = { .capacity = capacity };
    b.labels = (float *)dt_alloc(ctx, DT_MEM_HOST, n * 4, "labels");
    b.numbers = (float *)dt_alloc(ctx, DT_MEM_HOST, n * 4 * CRITEO_NUMBERS, "numbers");
    b.keys = (uint64_t *)dt_alloc(ctx, DT_MEM_HOST, n * 8 * CRITEO_SLOTS, "keys");
    return b;
}

static inline void ctr_batch_free(dt_ctx *ctx, ctr_batch *b) {
    size_t n = (size_t)b->capacity;
    dt_free(ctx, DT_MEM_HOST, b->labels, n * 4);
    dt_free(ctx, DT_MEM_HOST, b->numbers, n * 4 * CRITEO_NUMBERS);
    dt_free(ctx, DT_MEM_HOST, b->keys, n * 8 * CRITEO_SLOTS);
}

static inline void ctr_batch_add(ctr_batch *b, const criteo_sample *s) {
    size_t at = (size_t)b->n++;
    b->labels[at] = s->label;
    memcpy(b->numbers + at * CRITEO_NUMBERS, s->numbers, sizeof s->numbers);
    memcpy(b->keys + at * CRITEO_SLOTS, s->keys, sizeof s->keys);
}

/* Adds the MLP's layers: hidden ones with ReLU, and one with one output. Initial weights are those of
   He et al. (ICCV 2015): normal with variance 2 / inputs. */
static inline void ctr_make_mlp(ctr_model *m, dt_table_desc d) {
    char name[32];
    int inputs = CRITEO_SLOTS * m->config.width + CRITEO_NUMBERS;
    d.name = name;
    for (int l = 0; l <= m->config.layers; l++) {
        int outputs = l < m->config.layers ? m->config.hidden[l] : 1;
        snprintf(name, sizeof name, "mlp.%d.weight", l);
        d.init = DT_NORMAL(sqrt(2.0 / inputs));
        m->weights[l] = dt_ps_dense(m->ps, d, DT_SHAPE(outputs, inputs));
        snprintf(name, sizeof name, "mlp.%d.bias", l);
        d.init = DT_ZEROS;
        m->biases[l] = m->last_table = dt_ps_dense(m->ps, d, DT_SHAPE(outputs));
        inputs = outputs;
    }
}

/* Row-wise Adagrad is for embeddings: the rows of a dense parameter are unrelated numbers. */
static inline dt_table_desc ctr_dense(dt_table_desc d) {
    if (d.optimizer == DT_TABLE_ROWWISE_ADAGRAD) d.optimizer = DT_TABLE_ADAGRAD;
    return d;
}

/* [collective: comm of ps] Adds the tables. The accumulators of Adagrad and FTRL begin at
   0.01 / batch, because a gradient is that of a mean over the batch: the first steps of a rare key
   are then not larger than the learning rate. */
static inline ctr_model ctr_model_make(dt_ctx *ctx, ctr_config c, dt_ps *ps) {
    ctr_model m = { .ctx = ctx, .config = c, .ps = ps, .embedding = -1 };
    dt_table_desc d = { .name = "wide", .width = 1, .init = DT_ZEROS, .optimizer = c.optimizer };
    d.initial_accumulator = 0.01 / c.batch;
    if (c.optimizer == DT_TABLE_FTRL) d.ftrl_beta = 1 / sqrt((double)c.batch);
    m.wide = dt_ps_table(ps, d);
    d.name = "numbers";
    m.numbers = dt_ps_dense(ps, ctr_dense(d), DT_SHAPE(1, CRITEO_NUMBERS));
    d.name = "bias";
    m.bias = m.last_table = dt_ps_dense(ps, ctr_dense(d), DT_SHAPE(1));
    if (!ctr_has_embedding(c.kind)) return m;
    d.name = "embedding";
    d.width = c.width;
    d.init = DT_NORMAL(0.01);
    if (c.optimizer == DT_TABLE_FTRL) d.optimizer = DT_TABLE_ADAGRAD;
    m.embedding = m.last_table = dt_ps_table(ps, d);
    if (ctr_is_deep(c.kind)) ctr_make_mlp(&m, ctr_dense(d));
    return m;
}

/* e (n,26,width) -> (n) */
static inline dt_tensor *ctr_fm(dt_tensor *e) {
    dt_tensor *sum = dt_sum_over(e, 1);
    dt_tensor *squares = dt_sum_over(dt_mul(e, e), 1);
    return dt_affine(dt_sum_over(dt_sub(dt_mul(sum, sum), squares), -1), 0.5, 0);
}

/* e (n,26,width), numbers (n,13) -> (n) */
static inline dt_tensor *ctr_mlp(const ctr_model *m, dt_tensor *e, dt_tensor *numbers) {
    int layers = m->config.layers;
    int64_t n = dt_dim(e, 0);
    dt_tensor *x[2] = { dt_reshape(e, DT_SHAPE(n, CRITEO_SLOTS * m->config.width)), numbers };
    dt_tensor *y = dt_concat(x, 2, 1);
    for (int l = 0; l <= layers; l++) {
        dt_tensor *weight = dt_ps_dense_read(m->ps, m->weights[l]);
        dt_tensor *bias = dt_ps_dense_read(m->ps, m->biases[l]);
        dt_linear_desc act = { .activation = l < layers ? DT_ACT_RELU : DT_ACT_NONE };
        y = dt_linear_at(y, weight, bias, act);
    }
    return dt_reshape(y, DT_SHAPE(n));
}

/* Returns the logits (n) of a batch. [worker] */
static inline dt_tensor *ctr_forward(const ctr_model *m, const ctr_batch *b) {
    dt_tensor *w = dt_ps_embedding(m->ps, m->wide, b->keys, DT_SHAPE(b->n, CRITEO_SLOTS));
    dt_tensor *weights = dt_ps_dense_read(m->ps, m->numbers);
    dt_tensor *bias = dt_ps_dense_read(m->ps, m->bias);
    dt_tensor *x = dt_input(m->ctx, DT_F32, DT_SHAPE(b->n, CRITEO_NUMBERS), b->numbers);
    dt_tensor *y = dt_add(dt_sum_over(w, 1), dt_linear(x, weights, bias)); /* (n,1) */
    y = dt_reshape(y, DT_SHAPE(b->n));
    if (m->embedding < 0) return y;
    dt_tensor *e = dt_ps_embedding(m->ps, m->embedding, b->keys, DT_SHAPE(b->n, CRITEO_SLOTS));
    if (m->config.kind != CTR_WIDE_DEEP) y = dt_add(y, ctr_fm(e));
    if (ctr_is_deep(m->config.kind)) y = dt_add(y, ctr_mlp(m, e, x));
    return y;
}

/* [worker] Starts the pulls of the next step's batch, in the order of ctr_forward. */
static inline void ctr_prefetch(const ctr_model *m, const ctr_batch *b) {
    size_t n = (size_t)b->n;
    if (n == 0) return;
    dt_ps_prefetch(m->ps, m->wide, b->keys, n * CRITEO_SLOTS);
    dt_ps_prefetch(m->ps, m->numbers, NULL, 0);
    dt_ps_prefetch(m->ps, m->bias, NULL, 0);
    if (m->embedding >= 0) dt_ps_prefetch(m->ps, m->embedding, b->keys, n * CRITEO_SLOTS);
    for (int l = 0; l <= m->config.layers && ctr_is_deep(m->config.kind); l++) {
        dt_ps_prefetch(m->ps, m->weights[l], NULL, 0);
        dt_ps_prefetch(m->ps, m->biases[l], NULL, 0);
    }
}

/* [worker] Takes part in the pulls of a batch without samples: in owned mode they are collective. */
static inline void ctr_forward_nothing(const ctr_model *m) {
    uint64_t key = 0;
    float row = 0;
    dt_ps_wait(m->ps, dt_ps_pull_start(m->ps, m->wide, &key, 0, &row));
    dt_ps_dense_read(m->ps, m->numbers);
    dt_ps_dense_read(m->ps, m->bias);
    if (m->embedding >= 0) dt_ps_wait(m->ps, dt_ps_pull_start(m->ps, m->embedding, &key, 0, &row));
    for (int l = 0; l <= m->config.layers && ctr_is_deep(m->config.kind); l++) {
        dt_ps_dense_read(m->ps, m->weights[l]);
        dt_ps_dense_read(m->ps, m->biases[l]);
    }
    dt_reset(m->ctx);
}

// ==== Metrics ====================================================================================

/* Logistic loss and AUC (the probability that a random click has a larger logit than a random
   non-click) of a stream of samples. Logits are counted in bins, so memory is fixed and the counts
   of all workers add up. Pairs within one bin count as ties. `spread` of ctr_auc bounds the error:
   half of the pairs that share a bin. Bins are 1/1024 wide. */
enum { CTR_BINS = 32768 };
typedef struct ctr_metrics {
    double samples, loss;
    double count[2][CTR_BINS]; /* by label and logit */
} ctr_metrics;

static inline void ctr_count(ctr_metrics *m, const float *logits, const float *labels, int n) {
    for (int i = 0; i < n; i++) {
        double y = logits[i], at = y * 1024 + CTR_BINS / 2;
        int bin = at < 0 || at != at ? 0 : at >= CTR_BINS ? CTR_BINS - 1 : (int)at;
        m->samples++;
        m->loss += (y > 0 ? y : 0) - y * labels[i] + log1p(exp(-fabs(y)));
        m->count[labels[i] > 0][bin]++;
    }
}

/* Returns the AUC; NaN if there are no clicks or only clicks. */
static inline double ctr_auc(const ctr_metrics *m, double *spread) {
    double below = 0, clicks = 0, pairs = 0, ties = 0;
    for (int i = 0; i < CTR_BINS; i++) {
        double zeros = m->count[0][i], ones = m->count[1][i];
        pairs += ones * (below + zeros / 2);
        ties += ones * zeros;
        below += zeros;
        clicks += ones;
    }
    if (spread) *spread = ties / 2 / (clicks * below);
    return clicks * below > 0 ? pairs / (clicks * below) : NAN; /* NAN: only one kind of label */
}

static inline double ctr_logloss(const ctr_metrics *m) {
    return m->samples > 0 ? m->loss / m->samples : NAN;
}

#endif /* CTR_H */
