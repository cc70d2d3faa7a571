/* test_zero.c - dt_zero.h: learning rate, optimizers, the reducer, ZeRO-1, the norm, faults

   There are two oracles. Training the GPT of examples/gpt.h must give PyTorch's results
   (tests/golden) and those of the serial model in serial_gpt.h. And an op whose gradient is a known
   function of step, micro-batch, rank, parameter and element makes any set of parameters trainable
   without a model; plain loops over full tensors compute the expected result of each step.

       test_zero [FOLDER]      FOLDER holds the golden files; default tests/golden */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "tests/support/check.h"
#include "tests/golden/golden.h"
#include "tests/programs/serial_gpt.h"
#include <sys/wait.h>

// ==== A host table that counts by class and rank, and refuses on demand =========================

/* Bytes that this thread, which is one rank, has allocated, by memory class. spy_rank is -1 until
   the rank function begins. */
static __thread size_t spy_bytes[DT_MEM_CLASSES];
static __thread int spy_rank = -1;

/* refuses the allocation that brings `left` to 0; a `left` below 0 never refuses */
typedef struct spy {
    dt_host host;
    int live, refuse_rank, left;
} spy;

static void *spy_alloc(void *user, size_t bytes, dt_mem mem) {
    spy *s = (spy *)user;
    int mine = spy_rank >= 0 && spy_rank == s->refuse_rank;
    if (mine && __atomic_sub_fetch(&s->left, 1, __ATOMIC_SEQ_CST) == 0) return NULL;
    void *p = dt_host_default()->alloc(NULL, bytes, mem);
    if (!p) return NULL;
    if (mem != DT_MEM_COMM) memset(p, 0xA5, bytes); /* callers must not rely on zeroed memory */
    spy_bytes[mem] += bytes;
    __atomic_add_fetch(&s->live, 1, __ATOMIC_SEQ_CST);
    return p;
}

static void spy_free(void *user, void *p, size_t bytes, dt_mem mem) {
    spy_bytes[mem] -= bytes;
    __atomic_sub_fetch(&((spy *)user)->live, 1, __ATOMIC_SEQ_CST);
    dt_host_default()->free(NULL, p, bytes, mem);
}

static void log_nothing(void *user, int level, int rank, const char *text) {
    (void)user;
    (void)level;
    (void)rank;
    (void)text;
}

/* Runs without log output and checks that every block was freed. If *left > 0, refuses allocation
   number *left of rank refuse_rank. */
static dt_report run_refusing(int ranks, dt_status (*rank_main)(dt_ctx *ctx, void *user),
    void *user, int refuse_rank, int *left) {
    dt_report report;
    spy s = { *dt_host_default(), 0, left ? refuse_rank : -2, left ? *left : 0 };
    s.host.user = &s;
    s.host.alloc = spy_alloc;
    s.host.free = spy_free;
    s.host.log = log_nothing;
    dt_run((dt_run_desc){ .ranks = ranks, .timeout_s = 30, .host = &s.host, .report = &report },
        rank_main, user);
    CHECK_MSG(s.live == 0, "%d blocks were not freed", s.live);
    if (left) *left = s.left;
    return report;
}

static dt_report run(int ranks, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    return run_refusing(ranks, rank_main, user, 0, NULL);
}

static int close_to(double a, double b, double tol, double scale) {
    return isfinite(a) && isfinite(b) && fabs(a - b) <= tol * fmax(fabs(b), scale);
}

static double unit_noise(uint32_t a, uint32_t b) { return 2 * sg_unit(a, b); } /* [-1, 1) */

// ==== 1. Learning rate ==========================================================================

static void check_lr(dt_lr_desc d, int64_t step, double expected) {
    CHECK_MSG(fabs(dt_lr(d, step) - expected) <= 1e-15,
        "lr of kind %d at step %d: %.17g, not %.17g", d.kind, (int)step, dt_lr(d, step), expected);
}

/* Warmup-stable-decay: a linear warmup, a constant rate, then a decay by 0.8 - 0.6 sqrt(x), where x
   is the fraction of the decay that is done. */
static void test_lr_stable(void) {
    dt_lr_desc d = { .peak = 0.8, .kind = DT_LR_WSD, .warmup = 4, .steps = 20, .min_ratio = 0.25 };
    check_lr(d, 3, 0.6);
    for (int step = 4; step <= 16; step++) check_lr(d, step, 0.8); /* 4 of 20 steps are left */
    check_lr(d, 17, 0.5);
    check_lr(d, 18, 0.8 - 0.6 * 0.70710678118654752);
    check_lr(d, 19, 0.8 - 0.6 * 0.86602540378443865);
    check_lr(d, 20, 0.2);
    check_lr(d, 1000, 0.2);
    d.decay = 9;
    check_lr(d, 11, 0.8);
    check_lr(d, 12, 0.6);
    check_lr(d, 15, 0.4);
    check_lr(d, 20, 0.2);
    d.decay = 100; /* longer than the steps after the warmup: the decay takes all of them */
    check_lr(d, 4, 0.8);
    check_lr(d, 5, 0.65);
    check_lr(d, 8, 0.5);
    /* the default decay: 20% of 7 steps, rounded up to 2 */
    d = (dt_lr_desc){ .peak = 1, .kind = DT_LR_WSD, .steps = 7 };
    check_lr(d, 1, 1);
    check_lr(d, 5, 1);
    check_lr(d, 6, 1 - 0.70710678118654752);
    check_lr(d, 7, 0);
}

/* The reference: an independent formulation of dt_lr. */
static double plain_lr(dt_lr_desc d, int64_t step) {
    double low = d.peak * d.min_ratio;
    int64_t falling = d.kind != DT_LR_WSD ? d.steps
                      : d.decay           ? d.decay
                                          : (int64_t)ceil(0.2 * (double)d.steps);
    int64_t from = d.steps - falling > d.warmup ? d.steps - falling : d.warmup;
    if (step <= d.warmup) return (double)step / (double)d.warmup * d.peak;
    if (d.kind == DT_LR_CONSTANT) return d.peak;
    if (step >= d.steps) return low;
    if (step <= from) return d.peak;
    double x = (double)(step - from) / (double)(d.steps - from),
           half = cos(1.57079632679489662 * x);
    if (d.kind == DT_LR_COSINE) return low + (d.peak - low) * half * half;
    return d.kind == DT_LR_LINEAR ? low * x + d.peak * (1 - x) : d.peak - (d.peak - low) * sqrt(x);
}

/* Warmups of 0 steps, of 1 step, as long as the schedule, and longer; decays of 1 step, of all
   steps and of more than all. */
static void test_lr_edges(void) {
    int wrong = 0;
    for (int code = 0; code < 4 * 13 * 12 * 6 * 2; code++) {
        dt_lr_desc d = { .peak = 0.7,
            .kind = code % 4,
            .warmup = code / 4 % 13,
            .steps = 1 + code / 52 % 12,
            .min_ratio = code / 3744 * 0.1,
            .decay = (int[]){ 0, 1, 2, 5, 12, 40 }[code / 624 % 6] };
        for (int64_t step = 1; step <= 15; step++)
            if (!(fabs(dt_lr(d, step) - plain_lr(d, step)) <= 1e-15) && wrong++ < 5)
                CHECK_MSG(0,
                    "lr of kind %d, warmup %d, steps %d, decay %d at step %d: %.17g, not %.17g",
                    d.kind, (int)d.warmup, (int)d.steps, (int)d.decay, (int)step, dt_lr(d, step),
                    plain_lr(d, step));
    }
    CHECK(wrong == 0);
}

static void test_lr(void) {
    dt_lr_desc d = {
        .peak = 0.8, .kind = DT_LR_COSINE, .warmup = 4, .steps = 12, .min_ratio = 0.25
    };
    /* the warmup is linear */
    for (int kind = DT_LR_COSINE; kind <= DT_LR_CONSTANT; kind++) {
        d.kind = kind;
        check_lr(d, 1, 0.2);
        check_lr(d, 2, 0.4);
        check_lr(d, 3, 0.6);
        check_lr(d, 4, 0.8);
    }
    d.kind = DT_LR_COSINE;                                 /* 0.2 + 0.6 (1 + cos(pi t/8))/2 */
    check_lr(d, 5, 0.2 + 0.3 * (1 + 0.92387953251128674)); /* cos(pi/8) */
    check_lr(d, 6, 0.2 + 0.3 * (1 + 0.70710678118654752));
    check_lr(d, 8, 0.5);
    check_lr(d, 10, 0.2 + 0.3 * (1 - 0.70710678118654752));
    check_lr(d, 12, 0.2);
    check_lr(d, 13, 0.2);
    check_lr(d, 1000000, 0.2);
    d.kind = DT_LR_LINEAR;
    check_lr(d, 5, 0.725);
    check_lr(d, 8, 0.5);
    check_lr(d, 11, 0.275);
    check_lr(d, 12, 0.2);
    check_lr(d, 99, 0.2);
    d.kind = DT_LR_CONSTANT;
    check_lr(d, 5, 0.8);
    check_lr(d, 99, 0.8);
    d = (dt_lr_desc){ .peak = 1, .kind = DT_LR_COSINE, .steps = 2 }; /* no warmup, down to zero */
    check_lr(d, 1, 0.5);
    check_lr(d, 2, 0);
    d.kind = DT_LR_LINEAR;
    d.steps = 4;
    check_lr(d, 1, 0.75);
    check_lr(d, 3, 0.25);
    /* the warmup takes all steps */
    d = (dt_lr_desc){ .peak = 1, .kind = DT_LR_COSINE, .warmup = 8, .steps = 8, .min_ratio = 0.5 };
    check_lr(d, 7, 0.875);
    check_lr(d, 8, 1);
    check_lr(d, 9, 0.5);
    test_lr_stable();
    test_lr_edges();
}

// ==== 2. GPT against PyTorch and the serial model ===============================================

enum { G_STEPS = 8, G_PARAMS = 64, G_SEQUENCES = 4, G_TOKENS = 8 };

/* A training run and its expected results. Arrays of parameters are in the order of
   registration. */
typedef struct expected {
    gpt_config config;
    dt_zero_desc optimizer;
    int steps, tokens; /* tokens: per sequence */
    int32_t ids[G_STEPS][G_SEQUENCES * G_TOKENS], labels[G_STEPS][G_SEQUENCES * G_TOKENS];
    double lr[G_STEPS], denom[G_STEPS], loss[G_STEPS], norm[G_STEPS];
    const sg_model *start;
    const double *grad[G_PARAMS]; /* of the first step, or NULL */
    /* after the last step; moments may be NULL */
    const double *value[G_PARAMS], *m[G_PARAMS], *v[G_PARAMS];
    const char *name;
} expected;

/* One layout of the training run: dp replicas, b sequences in a micro-batch; accum = 4 / (dp b). */
typedef struct gpt_run {
    const expected *e;
    int dp, b, stage;
} gpt_run;

static void start_values(dt_ctx *ctx, const expected *e) {
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        CHECK(strcmp(t->name, e->start->p[i].name) == 0 &&
              (int64_t)t->param->count == e->start->p[i].count);
        dt_write(t, e->start->p[i].value);
    }
}

static dt_step_info gpt_step(const gpt_run *r, gpt *g, dt_zero *zero, int step, double *loss) {
    const expected *e = r->e;
    dt_ctx *ctx = g->ctx;
    int accum = G_SEQUENCES / r->dp / r->b, T = e->tokens;
    dt_data_order order = { 1000, G_SEQUENCES, r->b, r->dp, 0 };
    int32_t ids[G_SEQUENCES * G_TOKENS], labels[G_SEQUENCES * G_TOKENS];
    double counted = 0;
    *loss = 0;
    for (int j = 0; j < accum; j++) {
        for (int i = 0; i < r->b; i++) { /* each step reads sequences 0 .. 3 */
            int64_t q = dt_data_order_sequence(order, 1, j, dt_ctx_rank(ctx), i);
            memcpy(ids + i * T, e->ids[step] + q * T, (size_t)T * 4);
            memcpy(labels + i * T, e->labels[step] + q * T, (size_t)T * 4);
        }
        counted += dt_count_labels(dt_world(ctx), labels, (size_t)(r->b * T));
        dt_micro(ctx, j, accum);
        dt_tensor *l = gpt_loss(g, dt_input(ctx, DT_I32, DT_SHAPE(r->b, T), ids),
            dt_input(ctx, DT_I32, DT_SHAPE(r->b, T), labels), e->denom[step]);
        dt_backward(l);
        *loss += dt_item(l);
        dt_reset(ctx);
    }
    CHECK(counted == e->denom[step]);
    for (int i = 0; i < dt_param_count(ctx) && step == 0 && r->stage == 0 && e->grad[0]; i++) {
        const dt_tensor *t = dt_param_get(ctx, i); /* the full gradient at stage 0 */
        double difference = 0, size = 0, all = (double)gpt_param_count(e->config);
        for (size_t k = 0; k < t->param->count; k++) {
            difference += pow(((double *)t->grad)[k] - e->grad[i][k], 2);
            size += pow(e->grad[i][k], 2);
        }
        CHECK_MSG(sqrt(difference) <=
                      1e-12 * fmax(sqrt(size), e->norm[0] * sqrt((double)t->param->count / all)),
            "%s, dp %d: gradient of %s differs by %.2e", e->name, r->dp, t->name, sqrt(difference));
    }
    dt_sum_doubles(dt_world(ctx), loss, 1);
    return dt_zero_step(zero, e->lr[step]);
}

/* Checks |a-b| <= 1e-12 max(|b|, lr steps sqrt(n)) in 2-norms. The key bias is the exception: its
   true gradient is zero, and AdamW divides its rounding noise of about 1e-18 by eps = 1e-8. Each of
   its elements must be within 1e-9 lr steps. */
static void check_values(const gpt_run *r, const char *what, const char *name, const double *got,
    const double *right, size_t n, double scale, int noisy) {
    double difference = 0, size = 0, worst = 0;
    for (size_t k = 0; right && k < n; k++) {
        difference += (got[k] - right[k]) * (got[k] - right[k]);
        size += right[k] * right[k];
        worst = fmax(worst, fabs(got[k] - right[k]));
    }
    int ok = noisy ? worst <= 1e-9 * scale
                   : sqrt(difference) <= 1e-12 * fmax(sqrt(size), scale * sqrt((double)n));
    CHECK_MSG(ok, "%s, dp %d, micro-batch %d, stage %d: %s of %s differs by %.2e", r->e->name,
        r->dp, r->b, r->stage, what, name, sqrt(difference));
}

static void check_end(const gpt_run *r, dt_ctx *ctx, dt_zero *zero) {
    const expected *e = r->e;
    double scale = 0, *host = (double *)malloc(8 * 1024);
    int adam = e->optimizer.optimizer == DT_ADAMW && e->optimizer.eps < 1e-6;
    for (int n = 0; n < e->steps; n++) scale = fmax(scale, e->lr[n] * e->steps);
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        size_t n = t->param->count;
        int noisy = adam && strstr(t->name, "attn.k.bias") != NULL;
        if (!CHECK(n <= 1024 && host)) break;
        dt_read(t, host);
        check_values(r, "value", t->name, host, e->value[i], n, scale, noisy);
        if (!e->m[i]) continue;
        CHECK(dt_zero_state(zero, 0, t, host) == DT_OK);
        check_values(r, "first state", t->name, host, e->m[i], n, e->norm[0] * 1e-2, 0);
        if (!e->v[i]) continue;
        CHECK(dt_zero_state(zero, 1, t, host) == DT_OK);
        check_values(
            r, "second state", t->name, host, e->v[i], n, e->norm[0] * e->norm[0] * 1e-3, 0);
    }
    free(host);
}

static dt_status gpt_main(dt_ctx *ctx, void *user) {
    gpt_run *r = (gpt_run *)user;
    const expected *e = r->e;
    gpt g = gpt_register(ctx, e->config);
    dt_zero_desc d = e->optimizer;
    d.stage = r->stage;
    dt_zero *zero = dt_zero_make(ctx, d);
    if (!zero) return dt_error(ctx);
    start_values(ctx, e);
    for (int n = 0; n < e->steps && dt_error(ctx) == DT_OK; n++) {
        double loss;
        dt_step_info info = gpt_step(r, &g, zero, n, &loss);
        double clip = sg_clip_factor(e->norm[n], d.clip);
        CHECK_MSG(close_to(loss, e->loss[n], 1e-12, 0),
            "%s, dp %d: loss of step %d is %.17g, not %.17g", e->name, r->dp, n + 1, loss,
            e->loss[n]);
        CHECK_MSG(close_to(info.grad_norm, e->norm[n], 1e-12, 0),
            "%s, dp %d: norm of step %d is %.17g, not %.17g", e->name, r->dp, n + 1, info.grad_norm,
            e->norm[n]);
        CHECK(info.step == n + 1 && close_to(info.clip_scale, clip, 1e-12, 0));
    }
    check_end(r, ctx, zero);
    return dt_error(ctx);
}

static void run_all_layouts(const expected *e) {
    static const int ways[][3] = { { 1, 2, 0 }, { 1, 4, 0 }, { 1, 1, 1 }, { 2, 2, 0 }, { 2, 2, 1 },
        { 2, 1, 0 }, { 2, 1, 1 }, { 4, 1, 0 }, { 4, 1, 1 }, { 2, 2, 2 }, { 4, 1, 2 }, { 2, 2, 3 },
        { 4, 1, 3 } };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        gpt_run r = { e, ways[i][0], ways[i][1], ways[i][2] };
        dt_report report = run(r.dp, gpt_main, &r);
        CHECK_MSG(report.status == DT_OK, "%s: %s", e->name, report.text);
    }
}

static const double *golden_number(const golden *g, const char *fmt, int step) {
    char name[40];
    snprintf(name, sizeof name, fmt, step);
    return golden_get(g, name, NULL);
}

/* Reads sizes, data, hyperparameters and results. Returns 0 if the file does not hold what this
   test needs. */
static int read_golden(const golden *g, expected *e) {
    const double *s = golden_get(g, "sizes", NULL), *b = golden_get(g, "batch", NULL);
    const double *o = golden_get(g, "optimizer", NULL);
    if (!s || !b || !o || b[0] > G_STEPS || b[1] * b[2] != G_SEQUENCES || b[3] > G_TOKENS) return 0;
    int width = (int)s[3], heads = (int)s[4];
    e->config = (gpt_config){ .layers = (int)s[2],
        .width = width,
        .heads = heads,
        .kv_heads = heads,
        .ffn = (int)s[5],
        .seq = (int)s[1],
        .vocab = (int)s[0],
        .tied = s[6] != 0,
        .dtype = DT_F64 };
    e->steps = (int)b[0];
    e->tokens = (int)b[3];
    if (golden_find(g, "optimizer")->count == 3)
        e->optimizer = (dt_zero_desc){
            .optimizer = DT_SGD, .momentum = o[0], .weight_decay = o[1], .clip = o[2]
        };
    else
        e->optimizer = (dt_zero_desc){
            .beta1 = o[0], .beta2 = o[1], .eps = o[2], .weight_decay = o[3], .clip = o[4]
        };
    for (int n = 0; n < e->steps; n++) {
        const double *ids = golden_number(g, "step.%d.ids", n + 1),
                     *labels = golden_number(g, "step.%d.labels", n + 1);
        const double *lr = golden_number(g, "step.%d.lr", n + 1),
                     *denom = golden_number(g, "step.%d.denom", n + 1);
        const double *loss = golden_number(g, "step.%d.loss", n + 1),
                     *norm = golden_number(g, "step.%d.norm", n + 1);
        if (!ids || !labels || !lr || !denom || !loss || !norm) return 0;
        for (int k = 0; k < G_SEQUENCES * e->tokens; k++) {
            e->ids[n][k] = (int32_t)ids[k];
            e->labels[n][k] = (int32_t)labels[k];
        }
        e->lr[n] = *lr;
        e->denom[n] = *denom;
        e->loss[n] = *loss;
        e->norm[n] = *norm;
    }
    return 1;
}

static sg_model *serial_start(gpt_config c) {
    sg_model *m = sg_make((sg_sizes){ c.vocab, c.seq, c.layers, c.width, c.heads, c.ffn, c.tied });
    if (m) sg_init(m);
    return m;
}

static void test_golden(const char *folder, const char *file) {
    char path[400], name[64];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    golden *g = golden_open(path);
    expected *e = (expected *)calloc(1, sizeof *e);
    e->name = file;
    if (!CHECK_MSG(g && read_golden(g, e), "%s cannot be used", path)) return;
    sg_model *start = serial_start(e->config);
    e->start = start;
    CHECK(start && start->n_params <= G_PARAMS);
    for (int i = 0; i < start->n_params; i++) {
        snprintf(name, sizeof name, "param.%s", start->p[i].name);
        e->value[i] = golden_get(g, name, NULL);
        snprintf(name, sizeof name, "grad.%s", start->p[i].name);
        e->grad[i] = golden_get(g, name, NULL); /* gpt2_sgd.bin holds no gradients */
        CHECK(e->value[i] != NULL);
    }
    run_all_layouts(e);
    sg_free(start);
    golden_free(g);
    free(e);
}

/* Compares with the serial model, moments included, on data, sizes and hyperparameters that the
   PyTorch files do not have. */
static void test_serial(const char *name, gpt_config c, dt_zero_desc d, int steps) {
    expected *e = (expected *)calloc(1, sizeof *e);
    sg_model *start = serial_start(c), *m = serial_start(c);
    if (!CHECK(e && start && m && steps <= G_STEPS && c.seq <= G_TOKENS && m->n_params <= G_PARAMS))
        return;
    *e = (expected){
        .config = c, .optimizer = d, .steps = steps, .tokens = c.seq, .start = start, .name = name
    };
    for (int n = 0; n < steps; n++) {
        for (int k = 0; k < G_SEQUENCES * c.seq; k++) {
            uint32_t at = (uint32_t)(n * 1000 + k);
            e->ids[n][k] = (int32_t)((sg_unit(31, at) + 0.5) * c.vocab);
            e->labels[n][k] =
                sg_unit(32, at) < -0.2 ? -1 : (int32_t)((sg_unit(33, at) + 0.5) * c.vocab);
            e->denom[n] += e->labels[n][k] >= 0;
        }
        e->lr[n] = 0.01 * (n + 1);
        sg_zero_grad(m);
        e->loss[n] =
            sg_forward_backward(m, e->ids[n], e->labels[n], G_SEQUENCES, c.seq, e->denom[n]);
        e->norm[n] = d.optimizer == DT_SGD
                         ? sg_sgd(m, e->lr[n], d.momentum, d.weight_decay, d.clip)
                         : sg_adamw(m, e->lr[n], d.beta1 ? d.beta1 : 0.9, d.beta2 ? d.beta2 : 0.999,
                               d.eps ? d.eps : 1e-8, d.weight_decay, d.clip, n + 1);
    }
    for (int i = 0; i < m->n_params; i++) {
        e->value[i] = m->p[i].value;
        if (d.optimizer != DT_SGD || d.momentum > 0) e->m[i] = m->p[i].m;
        if (d.optimizer != DT_SGD) e->v[i] = m->p[i].v;
    }
    run_all_layouts(e);
    sg_free(start);
    sg_free(m);
    free(e);
}

static void test_serial_all(void) {
    gpt_config small = { .layers = 1,
        .width = 8,
        .heads = 2,
        .kv_heads = 2,
        .ffn = 12,
        .seq = 5,
        .vocab = 11,
        .dtype = DT_F64 };
    gpt_config tied = { .layers = 2,
        .width = 6,
        .heads = 3,
        .kv_heads = 3,
        .ffn = 7,
        .seq = 4,
        .vocab = 9,
        .tied = 1,
        .dtype = DT_F64 };
    test_serial("serial AdamW, defaults", small, (dt_zero_desc){ .optimizer = DT_ADAMW }, 6);
    test_serial("serial AdamW", tied,
        (dt_zero_desc){ .optimizer = DT_ADAMW,
            .beta1 = 0.8,
            .beta2 = 0.9,
            .eps = 1e-4,
            .weight_decay = 0.3,
            .clip = 0.7 },
        8);
    test_serial("serial SGD", tied, (dt_zero_desc){ .optimizer = DT_SGD, .weight_decay = 0.2 }, 5);
    test_serial("serial momentum", small,
        (dt_zero_desc){ .optimizer = DT_SGD, .momentum = 0.7, .weight_decay = 0.1, .clip = 0.5 },
        6);
}

// ==== 3. Parameters with known gradients, and reference steps ===================================

enum { MAX_PARAMS = 12, MAX_RANKS = 8, MAX_ELEMENTS = 4096, MAX_STEPS = 4 };

/* How a parameter is placed over tp: replicated with equal gradients, sharded along dimension 0 or
   1, or replicated with partial gradients. */
enum { SAME = 0, CUT_0, CUT_1, PART };
typedef struct made {
    const char *scope, *name;
    int d0, d1;
    int over_tp, frozen, no_decay;
    double lr_scale;
} made;

/* A parameter set with every reason for a new unit: scopes, freezing, decay, a parameter larger
   than a bucket of 8 KiB (f64) or 4 KiB (f32), shards that end inside a parameter. d1 = 0 means one
   dimension. */
static const made mixed[] = {
    { "a.", "first", 2, 3, SAME, 0, 0, 0 },
    { "a.", "bias", 5, 0, SAME, 0, 0, 0 },
    { "a.", "big", 60, 40, SAME, 0, 0, 0 },
    { "a.", "after", 3, 4, SAME, 0, 1, 0 },
    { "b.", "half", 7, 2, SAME, 0, 0, 0.5 },
    { "b.", "ice", 4, 4, SAME, 1, 0, 0 },
    { "b.", "one", 1, 0, SAME, 0, 0, 0 },
    { "b.", "run", 1025, 0, SAME, 0, 0, 2 },
    { "c.", "last", 33, 31, SAME, 0, 0, 0 },
};
/* A set sharded over tp; sizes 5 and 7 leave shards that reach past the end. */
static const made over_tp[] = {
    { "a.", "whole", 4, 5, SAME, 0, 0, 0 },
    { "a.", "rows", 5, 3, CUT_0, 0, 0, 0 },
    { "a.", "bias", 7, 0, CUT_0, 0, 0, 0 },
    { "a.", "columns", 3, 7, CUT_1, 0, 0, 0 },
    { "b.", "norm", 6, 0, PART, 0, 0, 0 },
    { "b.", "part", 30, 40, PART, 0, 0, 0 },
    { "b.", "end", 9, 0, SAME, 0, 0, 0 },
};

/* One unit of twelve 1,024-element runs: a different summation order of the norm changes its
   bits. */
static const made many_runs[] = {
    { "a.", "one", 64, 64, SAME, 0, 0, 0 },
    { "a.", "two", 64, 64, SAME, 0, 0, 0 },
    { "a.", "three", 64, 64, SAME, 0, 0, 0 },
};

/* A run: its configuration, and the results that the ranks store. */
typedef struct world_run {
    const made *set;
    /* reversed: units become complete in reverse order */
    int params, ranks, steps, accum, reversed;
    dt_mesh_desc mesh;
    dt_zero_desc zero;
    dt_dtype dtype;
    int nan_step, nan_rank; /* nan_step counts from 1; nan_rank -1: no NaN */
    /* if not NULL, the optimizer state at the end is compared with it */
    const struct by_hand *states;
    /* the parameter whose last gradient element becomes nan_value; NULL: every parameter */
    const char *nan_param;
    int only_kept; /* leave_bits stores only this rank's shards */
    /* NaN, or a number whose square overflows */
    double nan_value;
    double norm[MAX_RANKS][MAX_STEPS], scale[MAX_RANKS][MAX_STEPS];
    /* all parameters, each in MAX_ELEMENTS * 8 bytes */
    unsigned char *bits[MAX_RANKS];
    dt_status status[MAX_RANKS];
    char text[MAX_RANKS][512];
} world_run;

static const double LR = 0.03;

static int64_t made_count(const made *p) { return (int64_t)p->d0 * (p->d1 ? p->d1 : 1); }
static double start_value(int p, int64_t e) { return unit_noise(500 + (uint32_t)p, (uint32_t)e); }

/* The gradient of element e of parameter p from one micro-batch on one rank of the data group (and
   on one tp rank if gradients are partial). Every rank and micro-batch has a different scale, so
   that a wrong one is visible. */
static double gradient_value(
    const made *set, int p, int64_t e, int step, int micro, int data_rank, int tp_rank) {
    uint32_t key = (uint32_t)(((step * 8 + micro) * 32 + data_rank) * 8 +
                              (set[p].over_tp == PART ? tp_rank + 1 : 0));
    return unit_noise(key * 16 + (uint32_t)p, (uint32_t)e) * (1 + data_rank + 0.5 * micro);
}

/* Global index of a local element; -1 where the shard reaches past the end. */
static int64_t global_of(const dt_tensor *t, int64_t local) {
    const dt_param_info *p = t->param;
    int64_t at[DT_MAX_DIMS], global = 0;
    for (int i = p->full.nd - 1; i >= 0; i--) {
        at[i] = local % p->slice.n[i];
        local /= p->slice.n[i];
        if (at[i] >= p->slice.inside[i]) return -1;
    }
    for (int i = 0; i < p->full.nd; i++) global = global * p->full.d[i] + p->slice.lo[i] + at[i];
    return global;
}

static double element_at(const void *array, dt_dtype dtype, int64_t i) {
    return dt__number(dtype, array, (size_t)i);
}
static void set_element(void *array, dt_dtype dtype, int64_t i, double value) {
    dt__set_number(dtype, array, (size_t)i, value);
}

/* Rounds x to a dtype with double arithmetic: to nearest, ties to even. All values here are normal,
   never subnormal. */
static double stored(dt_dtype dtype, double x) {
    int exponent, digits = dtype == DT_BF16 ? 8 : dtype == DT_F16 ? 11 : 24;
    double part = frexp(x, &exponent);
    if (dtype == DT_F64) return x;
    if (dtype == DT_F16 && exponent < -13) digits += exponent + 13;
    return ldexp(nearbyint(ldexp(part, digits)), exponent - digits);
}

static int narrow(dt_dtype dtype) { return dtype == DT_BF16 || dtype == DT_F16; }
static dt_dtype grad_type(const world_run *w) { return narrow(w->dtype) ? DT_F32 : w->dtype; }

/* The op: its value is 0 and its gradient is gradient_value. Past the end of a shard the gradient
   is 7, which must never reach a result. */
typedef struct pull_saved {
    const world_run *w;
    int step, micro, data_rank, tp_rank;
} pull_saved;

static dt_status pull_back(dt_node *n) {
    const pull_saved *s = (const pull_saved *)n->saved;
    for (int i = 0; i < n->n_in; i++) {
        dt_tensor *t = n->in[i];
        void *g = dt_wants(n, i) ? dt_grad(n, i) : NULL;
        for (int64_t k = 0; g && k < (int64_t)t->param->count; k++) {
            int64_t e = global_of(t, k);
            double add = e < 0 ? 7
                               : gradient_value(s->w->set, t->param->index, e, s->step, s->micro,
                                     s->data_rank, s->tp_rank);
            if (s->w->nan_step == s->step && s->w->nan_rank == dt_ctx_rank(t->ctx) &&
                k == (int64_t)t->param->count - 1 && s->micro == 0 &&
                (!s->w->nan_param || strcmp(t->name, s->w->nan_param) == 0))
                add = s->w->nan_value;
            set_element(g, t->dtype, k, element_at(g, t->dtype, k) + add);
        }
    }
    return DT_OK;
}

static dt_tensor *pull(dt_ctx *ctx, const world_run *w, const dt_mesh *mesh, int step, int micro) {
    dt_tensor *sum = NULL;
    for (int i = 0; i < w->params; i++) {
        dt_tensor *p = dt_param_get(ctx, w->reversed ? w->params - 1 - i : i),
                  *out = dt_new(ctx, DT_F64, DT_SCALAR);
        if (!p || !out) return NULL;
        *(double *)out->data = 0;
        pull_saved *s = (pull_saved *)dt_record_saved(out, (dt_record_desc){ .name = "pull",
                                                               .in = { p },
                                                               .backward = pull_back,
                                                               .saved_bytes = sizeof(pull_saved) });
        int data =
            (mesh->coord.dp * mesh->sizes.ep + mesh->coord.ep) * mesh->sizes.cp + mesh->coord.cp;
        if (s) *s = (pull_saved){ w, step, micro, data, mesh->coord.tp };
        sum = sum ? dt_add(sum, out) : out;
    }
    return sum;
}

/* Registers the set. A new scope begins where the scope's name changes. */
static void register_set(dt_ctx *ctx, const world_run *w, const dt_mesh *mesh) {
    for (int i = 0; i < w->params; i++) {
        const made *p = &w->set[i];
        dt_param_desc d = {
            .frozen = p->frozen, .no_decay = p->no_decay, .lr_scale = p->lr_scale, .dtype = w->dtype
        };
        if (p->over_tp == CUT_0 || p->over_tp == CUT_1)
            d.shards[0] = (dt_shard_spec){ mesh->tp, p->over_tp == CUT_1 };
        if (p->over_tp == PART)
            d.grad_placements[0] = (dt_grad_placement){ mesh->tp, DT_GRAD_PARTIAL };
        if (i == 0 || strcmp(p->scope, w->set[i - 1].scope) != 0) dt_scope(ctx, p->scope);
        dt_param_at(ctx, p->name, p->d1 ? DT_SHAPE(p->d0, p->d1) : DT_SHAPE(p->d0), DT_ZEROS, d);
    }
}

static void write_start(dt_ctx *ctx) {
    static const double zeros[MAX_ELEMENTS];
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        double host[MAX_ELEMENTS];
        memcpy(host, zeros, sizeof host);
        for (int64_t k = 0; k < (int64_t)t->param->count; k++) {
            int64_t e = global_of(t, k);
            if (e >= 0) set_element(host, t->dtype, k, start_value(i, e));
        }
        dt_write(t, host);
    }
}

/* Stores full parameters in w->bits. After a failure, or if w->only_kept, stores only this rank's
   shard of each sharded parameter. */
static void store_bits(dt_ctx *ctx, world_run *w) {
    int me = dt_ctx_rank(ctx);
    for (int i = 0; w->bits[me] && i < dt_param_count(ctx); i++) {
        const dt_tensor *t = dt_param_get(ctx, i);
        const dt_bucket *unit = t->param->bucket;
        unsigned char *to = w->bits[me] + (size_t)i * MAX_ELEMENTS * 8;
        size_t size = dt_dtype_size(t->dtype);
        for (size_t k = 0; unit && (w->only_kept || dt_error(ctx) != DT_OK) && k < t->param->count;
             k++) {
            size_t at = t->param->offset + k;
            if (at >= unit->shard_offset && at < unit->shard_offset + unit->shard_count)
                memcpy(to + k * size, (const char *)unit->shard + (at - unit->shard_offset) * size,
                    size);
        }
        if (unit && !w->only_kept && dt_error(ctx) == DT_OK) dt_read(t, to);
    }
}

/* One step with its micro-batches. Returns the context's error state. */
static dt_status world_step(
    dt_ctx *ctx, world_run *w, const dt_mesh *mesh, dt_zero *zero, int step) {
    int me = dt_ctx_rank(ctx);
    for (int j = 0; j < w->accum; j++) {
        dt_micro(ctx, j, w->accum);
        dt_backward(pull(ctx, w, mesh, step, j));
        dt_reset(ctx);
    }
    dt_step_info info = dt_zero_step(zero, LR * step);
    w->norm[me][step - 1] = info.grad_norm;
    w->scale[me][step - 1] = info.clip_scale;
    CHECK(dt_error(ctx) != DT_OK || info.step == step);
    CHECK(dt_error(ctx) == DT_OK || isnan(info.grad_norm));
    return dt_error(ctx);
}

static void check_states(dt_ctx *ctx, const world_run *w, dt_zero *zero);

static dt_status world_main(dt_ctx *ctx, void *user) {
    world_run *w = (world_run *)user;
    int me = dt_ctx_rank(ctx);
    dt_mesh mesh = dt_mesh_make(ctx, w->mesh);
    spy_rank = me;
    register_set(ctx, w, &mesh);
    dt_zero_desc d = w->zero;
    d.mesh = &mesh;
    d.poison = 1;
    if (w->dtype == DT_F16 && d.loss_scale == 0) d.loss_scale = 1;
    dt_zero *zero = dt_zero_make(ctx, d);
    write_start(ctx);
    for (int step = 1; step <= w->steps && dt_error(ctx) == DT_OK; step++)
        world_step(ctx, w, &mesh, zero, step);
    dt_barrier(dt_world(ctx)); /* ranks that do not know of a failure yet learn of it here */
    if (w->states) check_states(ctx, w, zero);
    store_bits(ctx, w);
    w->status[me] = dt_error(ctx);
    snprintf(w->text[me], sizeof w->text[me], "%s", dt_error_text(ctx));
    return dt_error(ctx);
}

static world_run world_make(const made *set, int params, dt_mesh_desc mesh, dt_zero_desc zero) {
    world_run w = { .set = set,
        .params = params,
        .steps = 3,
        .accum = 1,
        .mesh = mesh,
        .zero = zero,
        .dtype = DT_F64,
        .nan_step = -1,
        .nan_rank = -1,
        .nan_value = NAN };
    int *axes[5] = { &w.mesh.dp, &w.mesh.ep, &w.mesh.cp, &w.mesh.tp, &w.mesh.pp };
    w.ranks = 1;
    for (int i = 0; i < 5; i++) {
        if (*axes[i] == 0) *axes[i] = 1;
        w.ranks *= *axes[i];
    }
    for (int r = 0; r < w.ranks; r++)
        w.bits[r] = (unsigned char *)calloc((size_t)params * MAX_ELEMENTS, 8);
    return w;
}

static void world_free(world_run *w) {
    for (int r = 0; r < w->ranks; r++) free(w->bits[r]);
}

#define MIXED mixed, (int)(sizeof mixed / sizeof *mixed)
#define MANY_RUNS many_runs, (int)(sizeof many_runs / sizeof *many_runs)
#define OVER_TP over_tp, (int)(sizeof over_tp / sizeof *over_tp)

/* The reference run, on the full tensors of one tp rank. */
typedef struct by_hand {
    double value[MAX_PARAMS][MAX_ELEMENTS], s[2][MAX_PARAMS][MAX_ELEMENTS], norm[MAX_STEPS];
} by_hand;

static double hand_gradient(const world_run *w, int p, int64_t e, int step) {
    double sum = 0;
    int data = w->mesh.dp * w->mesh.ep * w->mesh.cp,
        tp = w->set[p].over_tp == PART ? w->mesh.tp : 1;
    for (int micro = 0; micro < w->accum; micro++)
        for (int r = 0; r < data; r++)
            /* an op's gradient has the parameter's type; sums are wider */
            for (int t = 0; t < tp; t++) {
                double g = gradient_value(w->set, p, e, step, micro, r, t);
                sum += narrow(w->dtype) ? stored(w->dtype, g) : g;
            }
    return sum;
}

static double hand_update(const dt_zero_desc *d, double x, double g, double lr, double decay,
    double *s0, double *s1, int step) {
    double beta1 = d->beta1 ? d->beta1 : 0.9, beta2 = d->beta2 ? d->beta2 : 0.999,
           eps = d->eps ? d->eps : 1e-8;
    if (d->optimizer == DT_SGD) {
        *s0 = d->momentum * *s0 + g + decay * x;
        return x - lr * *s0;
    }
    if (d->optimizer == DT_ADAM) g += decay * x;
    *s0 = beta1 * *s0 + (1 - beta1) * g;
    *s1 = beta2 * *s1 + (1 - beta2) * g * g;
    double m = *s0 / (1 - pow(beta1, step)), v = *s1 / (1 - pow(beta2, step));
    return x - lr * (m / (sqrt(v) + eps) + (d->optimizer == DT_ADAMW ? decay * x : 0));
}

static void reference_run(const world_run *w, by_hand *h) {
    memset(h, 0, sizeof *h);
    for (int p = 0; p < w->params; p++)
        for (int64_t e = 0; e < made_count(&w->set[p]); e++)
            h->value[p][e] = stored(w->dtype, start_value(p, e));
    for (int n = 1; n <= w->steps; n++) {
        double squares = 0;
        for (int p = 0; p < w->params; p++)
            for (int64_t e = 0; !w->set[p].frozen && e < made_count(&w->set[p]); e++)
                squares += pow(hand_gradient(w, p, e, n), 2);
        double norm = h->norm[n - 1] = sqrt(squares), c = w->zero.clip;
        double clip = c > 0 && c / (norm + 1e-6) < 1 ? c / (norm + 1e-6) : 1;
        for (int p = 0; p < w->params; p++) {
            const made *m = &w->set[p];
            double lr = LR * n * (m->lr_scale ? m->lr_scale : 1);
            double decay = m->d1 && !m->no_decay ? w->zero.weight_decay : 0;
            for (int64_t e = 0; !m->frozen && e < made_count(m); e++)
                h->value[p][e] = hand_update(&w->zero, h->value[p][e],
                    clip * hand_gradient(w, p, e, n), lr, decay, &h->s[0][p][e], &h->s[1][p][e], n);
        }
    }
}

/* Element e of parameter p as rank r stored it; NAN where r does not hold it. */
static double value_stored_by(const world_run *w, int r, int p, int64_t e) {
    const made *m = &w->set[p];
    const unsigned char *bits = w->bits[r] + (size_t)p * MAX_ELEMENTS * 8;
    int64_t cols = m->d1 ? m->d1 : 1, row = e / cols, col = e % cols, tp = w->mesh.tp,
            mine = r % tp;
    if (m->over_tp == CUT_0) {
        int64_t each = (m->d0 + tp - 1) / tp;
        if (row / each != mine) return NAN;
        e = row % each * cols + col;
    } else if (m->over_tp == CUT_1) {
        int64_t each = (cols + tp - 1) / tp;
        if (col / each != mine) return NAN;
        e = row * each + col % each;
    }
    return element_at(bits, w->dtype, e);
}

/* The smallest distance from y of a master value that rounds to x: a 16-bit parameter is its
   master's rounding and must have no further error. */
static double distance_to_master(dt_dtype dtype, double x, double y) {
    if (!narrow(dtype)) return fabs(x - y);
    for (double off = 0; off < 1e-3; off = off == 0 ? 1e-8 : 1.3 * off)
        if (stored(dtype, y - off) <= x && x <= stored(dtype, y + off)) return off;
    return fabs(x - y);
}

/* Compares every rank's norms and parameters with the reference run. */
static void check_by_hand(const world_run *w, const char *name) {
    by_hand *h = (by_hand *)malloc(sizeof *h);
    if (!CHECK(h != NULL)) return;
    reference_run(w, h);
    double tol = w->dtype == DT_F64 ? 1e-12 : 2e-5, scale = LR * w->steps * w->steps;
    for (int r = 0; r < w->ranks; r++) {
        for (int n = 0; n < w->steps; n++) {
            double c = sg_clip_factor(h->norm[n], w->zero.clip);
            CHECK_MSG(close_to(w->norm[r][n], h->norm[n], tol, 0),
                "%s: norm of step %d on rank %d is %.17g, not %.17g", name, n + 1, r, w->norm[r][n],
                h->norm[n]);
            CHECK_MSG(close_to(w->scale[r][n], c, tol, 0), "%s: clip scale %.17g, not %.17g", name,
                w->scale[r][n], c);
        }
        for (int p = 0; p < w->params; p++) {
            double worst = 0;
            int held = 0;
            for (int64_t e = 0; e < made_count(&w->set[p]); e++) {
                double x = value_stored_by(w, r, p, e);
                held += !isnan(x);
                if (!isnan(x)) worst = fmax(worst, distance_to_master(w->dtype, x, h->value[p][e]));
                if (w->set[p].frozen) CHECK(x == stored(w->dtype, start_value(p, e)));
            }
            CHECK_MSG(held && worst <= tol * fmax(1, scale), "%s: %s on rank %d differs by %.2e",
                name, w->set[p].name, r, worst);
        }
    }
    free(h);
}

/* Compares the optimizer state of every unsharded parameter, in f32 or f64, with the reference
   run. */
static void check_states(dt_ctx *ctx, const world_run *w, dt_zero *zero) {
    dt_dtype type = grad_type(w);
    double *host = (double *)malloc(MAX_ELEMENTS * 8), tol = type == DT_F64 ? 1e-12 : 2e-5;
    for (int p = 0; host && p < w->params; p++) {
        const dt_tensor *t = dt_param_get(ctx, p);
        for (int s = 0;
             s < (w->zero.optimizer == DT_SGD ? w->zero.momentum > 0 : 2) && !w->set[p].frozen;
             s++) {
            double worst = 0;
            memset(host, 0xff, MAX_ELEMENTS * 8);
            CHECK(dt_grad_dtype(t) == type && dt_zero_state(zero, s, t, host) == DT_OK);
            for (int64_t e = 0; e < made_count(&w->set[p]); e++) {
                double right = w->states->s[s][p][e], far = fabs(element_at(host, type, e) - right);
                worst = fmax(worst, isnan(far) ? INFINITY : far / fmax(1, fabs(right)));
            }
            CHECK_MSG(
                worst <= tol, "state %d of %s, stage %d: %.2e", s, t->name, w->zero.stage, worst);
        }
    }
    free(host);
}

static int same_bits(const world_run *a, const world_run *b) {
    size_t bytes = (size_t)a->params * MAX_ELEMENTS * 8;
    int same = a->ranks == b->ranks;
    for (int r = 0; same && r < a->ranks; r++)
        same = memcmp(a->norm[r], b->norm[r], sizeof a->norm[r]) == 0 &&
               memcmp(a->bits[r], b->bits[r], bytes) == 0 &&
               memcmp(a->scale[r], b->scale[r], sizeof a->scale[r]) == 0;
    return same;
}

static char folder[64]; /* for offload */

/* Runs a case at all stages, with units complete in forward and reverse order, sharded over all
   ranks and in shard groups. Compares each run with the reference, and bit for bit where equal bits
   are promised: between stages 0 and 1, between 2 and 3, and between all stages with one
   micro-batch or the tree. */
static void run_world(const char *name, world_run like) {
    enum { STAGES = 4, WAYS = 6 };
    world_run a[WAYS][STAGES];
    int data = like.mesh.dp * like.mesh.ep * like.mesh.cp;
    by_hand *h = like.mesh.tp == 1 && like.mesh.pp == 1 ? (by_hand *)malloc(sizeof *h) : NULL;
    if (h) reference_run(&like, h);
    /* ways 0, 1: units in forward, in reverse order; 2: shard groups of half the ranks; 3: a tree;
       4, 5: offload to memory, to disk */
    for (int way = 0; way < WAYS; way++)
        for (int stage = 0; stage < STAGES; stage++) {
            world_run *w = &a[way][stage];
            *w = world_make(like.set, like.params, like.mesh, like.zero);
            w->dtype = like.dtype;
            w->states = h;
            w->accum = like.accum;
            w->zero.stage = stage;
            w->reversed = way == 1;
            w->zero.tree = way == 3;
            w->zero.keep_gathered = way == 1;
            w->zero.no_overlap = way == 2 && stage == 2;
            w->zero.shard_group = way == 2 && data > 1        ? data % 2 ? 1 : data / 2
                                  : way == 3 && data % 2 == 0 ? 2
                                                              : 0;
            w->zero.offload_optim = way == 4 ? "cpu" : way == 5 ? folder : NULL;
            w->zero.offload_params = stage == 3 ? w->zero.offload_optim : NULL;
            w->zero.offload_chunk = way == 5 ? 700 + 500 * (size_t)stage : 0;
            dt_report report = run(w->ranks, world_main, w);
            CHECK_MSG(
                report.status == DT_OK, "%s, way %d, stage %d: %s", name, way, stage, report.text);
            if (way != 1) check_by_hand(w, name);
            const world_run *like0 =
                &a[way == 1 || way > 3 ? 0 : way][w->accum == 1 || way == 3 ? 0 : stage / 2 * 2];
            if (way == 2) like0 = &a[2][stage < 2 ? stage : 2]; /* stage 0 has no shard groups */
            CHECK_MSG(same_bits(like0, w), "%s, way %d: stage %d and stage %d differ in bits", name,
                way, stage, like0->zero.stage);
        }
    world_run again = world_make(like.set, like.params, like.mesh, like.zero);
    again.dtype = like.dtype;
    again.accum = like.accum;
    CHECK(run(again.ranks, world_main, &again).status == DT_OK);
    CHECK_MSG(same_bits(&a[0][0], &again), "%s: the same run repeated gives other bits", name);
    world_free(&again);
    for (int i = 0; i < WAYS * STAGES; i++) world_free(&a[i / STAGES][i % STAGES]);
    world_free(&like);
    free(h);
}

static void test_by_hand(void) {
    static const dt_mesh_desc meshes[] = { { 1, 1, 1, 1, 1, 0 }, { 2, 1, 1, 1, 1, 0 },
        { 3, 1, 1, 1, 1, 0 }, { 2, 1, 1, 1, 2, 0 }, { 2, 1, 2, 1, 1, 0 } };
    static const dt_zero_desc optimizers[] = {
        { .optimizer = DT_ADAMW, .weight_decay = 0.1, .clip = 5 },
        { .optimizer = DT_ADAM,
            .weight_decay = 0.3,
            .beta1 = 0.7,
            .beta2 = 0.8,
            .eps = 1e-3,
            .bucket_bytes = 64 },
        { .optimizer = DT_SGD, .weight_decay = 0.2, .clip = 1e9, .bucket_bytes = 8192 },
        { .optimizer = DT_SGD,
            .momentum = 0.9,
            .weight_decay = 0.1,
            .clip = 30,
            .bucket_bytes = 1000 },
    };
    for (int o = 0; o < 4; o++)
        for (int m = 0; m < 5; m++) {
            world_run w = world_make(MIXED, meshes[m], optimizers[o]);
            char name[64];
            w.accum = 1 + (o + m) % 3;
            w.dtype = (o + m) % 4 == 3 ? DT_F32 : DT_F64;
            snprintf(name, sizeof name, "mixed, optimizer %d, mesh %d", o, m);
            run_world(name, w);
        }
    static const dt_mesh_desc cut[] = { { 1, 2, 1, 1, 1, 0 }, { 2, 2, 1, 1, 1, 0 },
        { 2, 3, 1, 1, 1, 0 }, { 2, 2, 1, 1, 2, 0 } };
    for (int m = 0; m < 4; m++)
        for (int o = 0; o < 4; o += 3) {
            world_run w = world_make(OVER_TP, cut[m], optimizers[o]);
            char name[64];
            w.accum = 1 + m % 2;
            snprintf(name, sizeof name, "over tp, optimizer %d, mesh %d", o, m);
            run_world(name, w);
        }
    /* 16-bit types: data parallel over 1 to 4 ranks, and over tp */
    for (int code = 0; code < 2 * 4 * 4; code++) {
        int o = code % 4, dp = 1 + code / 4 % 4, along_tp = o == 1 && dp > 2;
        world_run w = along_tp ? world_make(OVER_TP, cut[dp - 2], optimizers[o])
                               : world_make(MIXED, (dt_mesh_desc){ .dp = dp }, optimizers[o]);
        char name[64];
        w.accum = 1 + code % 3;
        w.dtype = code / 16 ? DT_F16 : DT_BF16;
        snprintf(name, sizeof name, "%s, optimizer %d, dp %d, tp %d", dt_dtype_name(w.dtype), o,
            w.mesh.dp, w.mesh.tp);
        run_world(name, w);
    }
    for (int dp = 2; dp <= 3; dp++)
        run_world("many runs", world_make(MANY_RUNS, (dt_mesh_desc){ .dp = dp }, optimizers[0]));
}

// ==== 4. Units, memory and bytes ================================================================

/* The units by the rule of dt_tensor.h, section 6, planned independently here; each is padded to N
   x 1,024 elements. */
typedef struct plan {
    int units;
    size_t padded[MAX_PARAMS], trained, all;
} plan;

static plan plan_of(const world_run *w) {
    plan u = { .units = 0 };
    size_t size = dt_dtype_size(w->dtype),
           bucket = w->zero.bucket_bytes ? w->zero.bucket_bytes : (size_t)25 << 20;
    int data = w->mesh.dp * w->mesh.ep * w->mesh.cp;
    size_t n = (size_t)(w->zero.shard_group && w->zero.stage ? w->zero.shard_group : data) * 1024;
    size_t open = 0;
    for (int i = 0; i < w->params; i++) {
        const made *p = &w->set[i], *q = &w->set[i > 0 ? i - 1 : 0];
        size_t count = (size_t)made_count(p);
        int differs =
            strcmp(p->scope, q->scope) || p->frozen != q->frozen || p->over_tp != q->over_tp;
        if (i == 0 || differs || (open + count) * size > bucket) {
            open = 0;
            u.units++;
        }
        open += count;
        u.padded[u.units - 1] = (open + n - 1) / n * n;
    }
    for (int k = 0; k < u.units; k++) u.all += u.padded[k];
    u.trained = u.all;
    /* in these sets every frozen parameter is alone in its unit */
    for (int i = 0; i < w->params; i++)
        if (w->set[i].frozen) u.trained -= ((size_t)made_count(&w->set[i]) + n - 1) / n * n;
    return u;
}

/* Bytes of optimizer state per element, including the master of a 16-bit type. */
static size_t state_of(const world_run *w) {
    size_t size = w->dtype == DT_F64 ? 8 : 4, master = narrow(w->dtype) ? 4 : 0;
    if (w->zero.optimizer == DT_OPTIMIZER_CUSTOM) return size * (size_t)w->zero.states + master;
    return (w->zero.optimizer == DT_SGD ? (w->zero.momentum > 0 ? size : 0) : 2 * size) + master;
}

/* The formulas for memory and traffic, with n ranks in a shard group and `a` micro-batches. The op
   that makes these gradients reads no values in its forward, so stage 3 gathers once in each
   backward, or once a step with keep_gathered. */
static dt_status memory_main(dt_ctx *ctx, void *user) {
    world_run *w = (world_run *)user;
    dt_mesh mesh = dt_mesh_make(ctx, w->mesh);
    plan u = plan_of(w);
    int stage = w->zero.stage, keep = w->zero.keep_gathered;
    size_t size = dt_dtype_size(w->dtype), N = (size_t)w->mesh.dp, a = (size_t)w->accum;
    size_t n = stage == 0            ? N
               : w->zero.shard_group ? (size_t)w->zero.shard_group
                                     : N,
           copies = N / n;
    size_t parts = stage ? n : 1, kept = stage == 3 ? n : 1, summed = stage >= 2 ? n : 1;
    /* bytes of a gradient element in the reduction; values are gathered in their own type */
    size_t wide = narrow(w->dtype) ? 4 : size;
    size_t optim = state_of(w) * u.trained / parts, G = u.trained * wide, V = u.trained * size,
           E = u.all * size;
    size_t grads = stage == 0 ? 2 * (G / N) * (N - 1) : (stage >= 2 ? a : 1) * (G / n) * (n - 1);
    if (stage) grads += 2 * (copies - 1) * (G / n / copies);
    size_t values = stage == 0  ? 0
                    : stage < 3 ? (V / n) * (n - 1)
                                : (keep ? 1 : a) * (V / n) * (n - 1);
    register_set(ctx, w, &mesh);
    CHECK(spy_bytes[DT_MEM_PARAMS] == 0); /* registering allocates nothing */
    dt_zero_desc d = w->zero;
    d.mesh = w->ranks == 1 || d.stage == 0 ? &mesh : NULL; /* NULL: the world is data parallel */
    if (w->dtype == DT_F16) d.loss_scale = 1;
    dt_zero *zero = dt_zero_make(ctx, d);
    if (!zero) return dt_error(ctx);
    /* no rank ever held full parameters, not even for the initial values */
    CHECK(dt_memory_used(ctx).peak[DT_MEM_PARAMS] == E / kept);
    write_start(ctx);
    dt_reset(ctx);
    CHECK_MSG(dt_bucket_count(ctx) == u.units, "%d units, the rule gives %d", dt_bucket_count(ctx),
        u.units);
    CHECK(spy_bytes[DT_MEM_GRADS] == 0);
    for (int step = 1; step <= 3; step++) {
        size_t before[DT_AXES];
        for (int i = 0; i < DT_AXES; i++) before[i] = dt_comm_bytes(ctx, (dt_axis)i);
        world_step(ctx, w, &mesh, zero, step);
        for (int i = 0; i < DT_AXES; i++)
            CHECK_MSG(dt_comm_bytes(ctx, (dt_axis)i) - before[i] ==
                          (i == DT_AXIS_DP ? grads + values : 0),
                "stage %d, dp %zu in groups of %zu, %zu micro-batches, axis %d: %zu bytes, formula "
                "%zu",
                stage, N, n, a, i, dt_comm_bytes(ctx, (dt_axis)i) - before[i],
                i == DT_AXIS_DP ? grads + values : 0);
        dt_memory m = dt_memory_used(ctx);
        CHECK_MSG(m.live[DT_MEM_OPTIM] == optim && m.peak[DT_MEM_OPTIM] == optim &&
                      spy_bytes[DT_MEM_OPTIM] == optim && dt_zero_state_bytes(zero) == optim,
            "stage %d, dp %d: %zu bytes of state, the table saw %zu, formula %zu", stage, w->ranks,
            m.live[DT_MEM_OPTIM], spy_bytes[DT_MEM_OPTIM], optim);
        CHECK(m.peak[DT_MEM_PARAMS] == E / kept && spy_bytes[DT_MEM_PARAMS] == E / kept);
        CHECK_MSG(m.live[DT_MEM_GRADS] == G / summed && spy_bytes[DT_MEM_GRADS] == G / summed &&
                      m.peak[DT_MEM_GRADS] == G / summed,
            "stage %d, dp %d: %zu bytes of gradients, formula %zu", stage, w->ranks,
            m.live[DT_MEM_GRADS], G / summed);
        for (int c = 0; c < DT_MEM_CLASSES; c++) CHECK(m.live[c] == spy_bytes[c]);
    }
    dt_zero_free(zero);
    CHECK(spy_bytes[DT_MEM_OPTIM] == 0 && dt_memory_used(ctx).live[DT_MEM_OPTIM] == 0);
    CHECK(spy_bytes[DT_MEM_GRADS] == 0);
    CHECK(spy_bytes[DT_MEM_PARAMS] == E / kept); /* parameters stay */
    dt_reset(ctx);
    /* without ZeRO a rank accumulates whole gradients */
    for (int j = 0; j < 2 && stage < 3; j++) {
        CHECK(dt_backward(pull(ctx, w, &mesh, 1, j)) == DT_OK);
        dt_reset(ctx);
    }
    return dt_error(ctx);
}

static void test_memory(void) {
    static const dt_zero_desc optimizers[] = { { .optimizer = DT_ADAMW },
        { .optimizer = DT_ADAM, .bucket_bytes = 64 },
        { .optimizer = DT_SGD, .momentum = 0.9, .bucket_bytes = 5000 },
        { .optimizer = DT_SGD, .bucket_bytes = 8192 } };
    static const int ranks[] = { 1, 2, 3, 4, 8 };
    static const dt_dtype types[] = { DT_F32, DT_F64, DT_BF16, DT_F16 };
    for (int code = 0; code < 5 * 4 * 4 * 4; code++) {
        world_run w =
            world_make(MIXED, (dt_mesh_desc){ .dp = ranks[code % 5] }, optimizers[code / 5 % 4]);
        w.zero.stage = code / 20 % 4;
        w.dtype = types[code / 80];
        w.accum = 1 + code % 3;
        w.zero.keep_gathered = w.zero.stage == 3 && code % 2;
        if (ranks[code % 5] % 4 == 0 && code % 7 < 3) w.zero.shard_group = code % 7 == 2 ? 1 : 2;
        dt_report report = run(w.ranks, memory_main, &w);
        CHECK_MSG(report.status == DT_OK, "memory: %s", report.text);
        world_free(&w);
    }
}

/* All-reduces of partial gradients over tp are gradient traffic too: their bytes count as dp,
   whichever axes their group spans. */
static dt_status part_bytes_main(dt_ctx *ctx, void *user) {
    world_run *w = (world_run *)user;
    dt_mesh mesh = dt_mesh_make(ctx, w->mesh);
    register_set(ctx, w, &mesh);
    dt_zero_desc d = w->zero;
    d.mesh = &mesh;
    dt_zero *zero = dt_zero_make(ctx, d);
    if (!zero) return dt_error(ctx);
    size_t padded = 0, all = 0, parts = 0, N = 2, stage = (size_t)w->zero.stage; /* dp 2 x tp 2 */
    for (int u = 0; u < dt_bucket_count(ctx); u++) {
        const dt_bucket *unit = dt_bucket_get(ctx, u);
        size_t bytes = unit->padded * dt_dtype_size(unit->dtype);
        padded += bytes;
        all += bytes;
        if (w->set[unit->first_param].over_tp == PART) parts += stage ? bytes / N : bytes;
    }
    /* stage 3: values gathered in the backward; stages 1, 2: gathered after the update; stage 0:
       the second half of the all-reduce */
    padded += stage == 3 ? all : padded;
    for (int step = 1; step <= 2; step++) {
        size_t dp = dt_comm_bytes(ctx, DT_AXIS_DP), tp = dt_comm_bytes(ctx, DT_AXIS_TP);
        world_step(ctx, w, &mesh, zero, step);
        dp = dt_comm_bytes(ctx, DT_AXIS_DP) - dp;
        tp = dt_comm_bytes(ctx, DT_AXIS_TP) - tp;
        CHECK_MSG(dp == (N - 1) * padded / N + 2 * (N - 1) * parts / N && tp == 0,
            "stage %d: %zu bytes as dp, %zu as tp", w->zero.stage, dp, tp);
    }
    return dt_error(ctx);
}

static void test_part_bytes(void) {
    for (int stage = 0; stage < 4; stage++) {
        world_run w = world_make(
            OVER_TP, (dt_mesh_desc){ .dp = 2, .tp = 2 }, (dt_zero_desc){ .stage = stage });
        CHECK(run(w.ranks, part_bytes_main, &w).status == DT_OK);
        world_free(&w);
    }
}

// ==== 5. A user's own update ====================================================================

typedef struct own_run {
    world_run w;
    int hits[MAX_RANKS][MAX_PARAMS][MAX_ELEMENTS], refuse_rank;
} own_run;

/* Counts its elements, checks every argument, and takes a plain SGD step. */
static dt_status own_update(const dt_update_args *f, void *user) {
    own_run *o = (own_run *)user;
    const dt_param_info *p = f->tensor->param;
    const made *m = &o->w.set[p->index];
    dt_dtype type = grad_type(&o->w);
    size_t size = dt_dtype_size(type);
    int me = dt_ctx_rank(f->ctx), right = 1;
    if (me == o->refuse_rank && f->step == 2) return DT_ERR_DEVICE;
    CHECK(f->count > 0 && f->offset + f->count <= p->count); /* never padding */
    const dt_bucket *u = p->bucket;
    size_t narrow_size = dt_dtype_size(o->w.dtype), at = p->offset + f->offset;
    const char *kept = (const char *)u->shard + (at - u->shard_offset) * narrow_size;
    CHECK((f->param == kept) == !narrow(o->w.dtype) && dt_grad_dtype(f->tensor) == type);
    if (o->w.zero.stage < 2)
        CHECK(f->grad == (char *)f->tensor->grad + f->offset * size);
    else
        CHECK(f->tensor->grad == NULL);
    CHECK(f->lr == LR * (double)f->step * (m->lr_scale ? m->lr_scale : 1));
    CHECK(f->weight_decay == (m->d1 && !m->no_decay ? 0.25 : 0) && !m->frozen);
    CHECK((f->state[0] != NULL) == (o->w.zero.states >= 1) &&
          (f->state[1] != NULL) == (o->w.zero.states >= 2));
    for (size_t i = 0; i < f->count; i++) {
        double g = element_at(f->grad, type, (int64_t)i),
               x = element_at(f->param, type, (int64_t)i);
        double off =
            fabs(g - hand_gradient(&o->w, p->index, (int64_t)(f->offset + i), (int)f->step));
        right &= off <= (type == DT_F64 ? 1e-12 : 4e-6);
        if (narrow(o->w.dtype)) /* the parameter is exactly its rounded master */
            right &= stored(o->w.dtype, x) == element_at(kept, o->w.dtype, (int64_t)i);
        /* starts at zero and keeps its values between steps */
        for (int s = 0; s < o->w.zero.states; s++) {
            right &= element_at(f->state[s], type, (int64_t)i) == (double)(f->step - 1) * (s + 1);
            set_element(f->state[s], type, (int64_t)i, (double)f->step * (s + 1));
        }
        set_element(
            f->param, type, (int64_t)i, x - f->lr * (g * f->grad_scale + f->weight_decay * x));
        __atomic_add_fetch(&o->hits[me][p->index][f->offset + i], 1, __ATOMIC_RELAXED);
    }
    CHECK_MSG(right, "wrong gradient or state of %s", f->tensor->name);
    return DT_OK;
}

/* Each element must be updated once a step: on every rank at stage 0, on exactly one rank at other
   stages. */
static void check_hits(const own_run *o) {
    int right = 1;
    for (int p = 0; p < o->w.params; p++)
        for (int64_t e = 0; e < MAX_ELEMENTS; e++) {
            int sum = 0,
                owed = e < made_count(&o->w.set[p]) && !o->w.set[p].frozen ? o->w.steps : 0;
            for (int r = 0; r < o->w.ranks; r++) {
                sum += o->hits[r][p][e];
                if (o->w.zero.stage == 0) right &= o->hits[r][p][e] == owed;
            }
            if (o->w.zero.stage > 0) right &= sum == owed;
        }
    CHECK_MSG(
        right, "stage %d: an element was updated more or less than once a step", o->w.zero.stage);
}

static void test_own_update(void) {
    own_run *o = (own_run *)malloc(sizeof *o);
    if (!CHECK(o != NULL)) return;
    static const dt_dtype types[] = { DT_F64, DT_BF16, DT_F16 };
    for (int code = 0; code < 3 * 4 * 2 * 3; code++) {
        dt_zero_desc d = { .stage = code / 3 % 4,
            .optimizer = DT_OPTIMIZER_CUSTOM,
            .weight_decay = 0.25,
            .clip = 3,
            .bucket_bytes = code / 12 % 2 ? 64 : 0,
            .update = own_update,
            .user = o,
            .states = code % 3 };
        memset(o, 0, sizeof *o);
        o->refuse_rank = -1;
        o->w = world_make(MIXED, (dt_mesh_desc){ .dp = 3 }, d);
        o->w.dtype = types[code / 24];
        o->w.accum = 1 + code / 24;
        dt_report report = run(3, world_main, &o->w);
        CHECK_MSG(report.status == DT_OK, "own update: %s", report.text);
        check_hits(o);
        o->w.zero.optimizer = DT_SGD; /* the reference run then takes the same steps */
        check_by_hand(&o->w, "own update");
        o->w.zero.optimizer = DT_OPTIMIZER_CUSTOM;
        world_free(&o->w);
    }
    for (int stage = 0; stage < 4; stage++) { /* one rank's update refuses */
        memset(o, 0, sizeof *o);
        o->w = world_make(MIXED, (dt_mesh_desc){ .dp = 2 },
            (dt_zero_desc){ .stage = stage,
                .optimizer = DT_OPTIMIZER_CUSTOM,
                .weight_decay = 0.25,
                .update = own_update,
                .user = o });
        o->refuse_rank = 1;
        dt_report report = run(2, world_main, &o->w);
        CHECK_MSG(report.status == DT_ERR_DEVICE && report.rank == 1 &&
                      strstr(report.text, "the update of"),
            "%s", report.text);
        CHECK(o->w.status[0] == DT_ERR_PEER && o->w.status[1] == DT_ERR_DEVICE);
        world_free(&o->w);
    }
    free(o);
}

// ==== 6. Faults =================================================================================

/* A failed run's parameters must equal those of a run that ended before the failing step. */
static void check_unchanged(const world_run *w, int steps, const char *name) {
    world_run before = world_make(w->set, w->params, w->mesh, w->zero);
    before.steps = steps;
    before.accum = w->accum;
    before.dtype = w->dtype;
    before.only_kept = 1;
    CHECK(run(before.ranks, world_main, &before).status == DT_OK);
    for (int r = 0; r < w->ranks; r++)
        CHECK_MSG(memcmp(before.bits[r], w->bits[r], (size_t)w->params * MAX_ELEMENTS * 8) == 0,
            "%s: rank %d changed parameters in the step that failed", name, r);
    world_free(&before);
}

static void check_nan(const made *set, int params, dt_mesh_desc mesh, int stage, int step, int rank,
    const char *param) {
    world_run w = world_make(
        set, params, mesh, (dt_zero_desc){ .stage = stage, .clip = 1, .bucket_bytes = 4096 });
    char name[120];
    w.nan_step = step;
    w.nan_rank = rank;
    w.nan_param = param;
    w.accum = 2;
    w.only_kept = 1;
    snprintf(name, sizeof name, "NaN in %s on rank %d of dp %d x tp %d at stage %d, step %d", param,
        rank, w.mesh.dp, w.mesh.tp, stage, step);
    dt_report report = run(w.ranks, world_main, &w);
    CHECK_MSG(report.status == DT_ERR_NUMERIC && report.rank == rank, "%s: %s", name, report.text);
    CHECK_MSG(strstr(report.text, "in the rank's own gradient"), "%s: '%s'", name, report.text);
    CHECK_MSG(strstr(report.text, param) != NULL, "%s: '%s'", name, report.text);
    char number[16];
    snprintf(number, sizeof number, "step %d", step);
    CHECK_MSG(strstr(report.text, number) != NULL, "%s: '%s'", name, report.text);
    for (int r = 0; r < w.ranks; r++) {
        CHECK_MSG(w.status[r] == DT_ERR_NUMERIC || w.status[r] == DT_ERR_PEER, "%s: rank %d: %s",
            name, r, dt_status_name(w.status[r]));
        CHECK_MSG(isnan(w.norm[r][step - 1]), "%s: rank %d took the step", name, r);
    }
    check_unchanged(&w, step - 1, name);
    world_free(&w);
}

/* Finite gradients whose sum of squares overflows: the square of one element, or only the sum over
   all elements. */
static void check_overflow(
    const made *set, int params, int ranks, int stage, const char *param, double value) {
    world_run w = world_make(
        set, params, (dt_mesh_desc){ .dp = ranks }, (dt_zero_desc){ .stage = stage, .clip = 1 });
    w.nan_step = 2;
    w.nan_rank = 0;
    w.nan_param = param;
    w.nan_value = value;
    w.only_kept = 1;
    dt_report report = run(w.ranks, world_main, &w);
    CHECK_MSG(report.status == DT_ERR_NUMERIC && strstr(report.text, param ? param : "inf"),
        "norm of %g at stage %d, dp %d: %s '%s'", value, stage, ranks,
        dt_status_name(report.status), report.text);
    for (int r = 0; r < w.ranks; r++) CHECK(isnan(w.norm[r][1]));
    check_unchanged(&w, 1, "norm of finite numbers");
    world_free(&w);
}

static void test_nan(void) {
    for (int code = 0; code < 8; code++) {
        check_overflow(MIXED, 1 + code / 4, code % 4, "a.big", 1e200);
        check_overflow(MIXED, 1 + code / 4, code % 4, "b.run", INFINITY);
        /* the 3 large elements are in different 1,024-element runs */
        check_overflow(MANY_RUNS, 1 + code / 4, code % 4, NULL, 1.2e154);
    }
    for (int stage = 0; stage < 4; stage++) {
        check_nan(MIXED, (dt_mesh_desc){ .dp = 1 }, stage, 2, 0, "a.after");
        /* first and bias share a unit and a 1,024-element run */
        check_nan(MIXED, (dt_mesh_desc){ .dp = 2 }, stage, 2, 1, "a.first");
        check_nan(MIXED, (dt_mesh_desc){ .dp = 2 }, stage, 1, 0, "a.bias");
        /* in the third 1,024-element run of its unit */
        check_nan(MIXED, (dt_mesh_desc){ .dp = 3 }, stage, 3, 2, "a.big");
        check_nan(MIXED, (dt_mesh_desc){ .dp = 2 }, stage, 2, 1, "b.run");
        check_nan(MIXED, (dt_mesh_desc){ .dp = 2 }, stage, 2, 0, "c.last");
        /* only tp rank 1 has the NaN */
        check_nan(OVER_TP, (dt_mesh_desc){ .dp = 2, .tp = 2 }, stage, 2, 1, "a.whole");
        check_nan(OVER_TP, (dt_mesh_desc){ .dp = 2, .tp = 2 }, stage, 2, 2, "a.rows");
        check_nan(OVER_TP, (dt_mesh_desc){ .dp = 1, .tp = 2 }, stage, 2, 0, "b.norm");
    }
}

/* Calls in the wrong order, wrong values. */
enum {
    BAD_SHARDS = 0,
    BAD_SCALE,
    BAD_STAGE_4,
    BAD_STAGE_MINUS,
    BAD_OPTIMIZER,
    BAD_NO_UPDATE,
    BAD_STATES,
    BAD_BETA,
    BAD_NAN_EPS,
    BAD_MOMENTUM,
    BAD_CLIP,
    BAD_NO_PARAMS,
    BAD_TWICE,
    BAD_LATE_PARAM,
    BAD_USED,
    BAD_NO_BACKWARD,
    BAD_HALF_BACKWARD,
    BAD_CLEARED,
    BAD_SECOND_BACKWARD,
    BAD_SECOND_STEP,
    BAD_STATE,
    BAD_FROZEN_STATE,
    BAD_CUT_DP,
    BAD_CUT_WORLD,
    BAD_MARK_DP,
    BAD_SAME_DP,
    BAD_KINDS
};

typedef struct bad_use {
    int kind;
    dt_status status;
    const char *words[2];
} bad_use;

static const bad_use bad_uses[] = {
    { BAD_SHARDS, DT_ERR_ARG, { "shard groups of 3", "data group of 2" } },
    { BAD_SCALE, DT_ERR_ARG, { "loss scale -2", "" } },
    { BAD_STAGE_4, DT_ERR_ARG, { "stage 4", "" } },
    { BAD_STAGE_MINUS, DT_ERR_ARG, { "stage -1", "" } },
    { BAD_OPTIMIZER, DT_ERR_ARG, { "optimizer 9", "" } },
    { BAD_NO_UPDATE, DT_ERR_ARG, { "DT_OPTIMIZER_CUSTOM", "update" } },
    { BAD_STATES, DT_ERR_ARG, { "DT_OPTIMIZER_CUSTOM", "got 3" } },
    { BAD_BETA, DT_ERR_ARG, { "beta1 1", "" } },
    { BAD_NAN_EPS, DT_ERR_ARG, { "eps", "nan" } },
    { BAD_MOMENTUM, DT_ERR_ARG, { "momentum -1", "" } },
    { BAD_CLIP, DT_ERR_ARG, { "clip -2", "" } },
    { BAD_NO_PARAMS, DT_ERR_ARG, { "no parameters", "" } },
    { BAD_TWICE, DT_ERR_ARG, { "storage already", "once" } },
    { BAD_LATE_PARAM, DT_ERR_ARG, { "late", "storage already" } },
    { BAD_USED, DT_ERR_ARG, { "storage already", "" } },
    { BAD_NO_BACKWARD, DT_ERR_ARG, { "step 1", "dt_backward" } },
    { BAD_HALF_BACKWARD, DT_ERR_ARG, { "step 1", "last" } },
    { BAD_CLEARED, DT_ERR_ARG, { "step 1", "no complete gradient" } },
    { BAD_SECOND_BACKWARD, DT_ERR_ARG, { "last", "dt_micro" } },
    { BAD_SECOND_STEP, DT_ERR_ARG, { "step 2", "dt_backward" } },
    { BAD_STATE, DT_ERR_ARG, { "state 2", "" } },
    { BAD_FROZEN_STATE, DT_ERR_ARG, { "b.ice", "frozen" } },
    { BAD_CUT_DP, DT_ERR_UNSUPPORTED, { "cut_dp", "" } },
    { BAD_CUT_WORLD, DT_ERR_UNSUPPORTED, { "cut_world", "" } },
    { BAD_MARK_DP, DT_ERR_UNSUPPORTED, { "mark_dp", "" } },
    { BAD_SAME_DP, DT_ERR_UNSUPPORTED, { "mark_dp", "" } },
};

static dt_zero_desc bad_desc(int kind) {
    dt_zero_desc d = { .stage = 1 };
    if (kind == BAD_SHARDS) d.shard_group = 3;
    if (kind == BAD_SCALE) d.loss_scale = -2;
    if (kind == BAD_STAGE_4) d.stage = 4;
    if (kind == BAD_STAGE_MINUS) d.stage = -1;
    if (kind == BAD_OPTIMIZER) d.optimizer = 9;
    if (kind == BAD_NO_UPDATE) d.optimizer = DT_OPTIMIZER_CUSTOM;
    if (kind == BAD_STATES)
        d = (dt_zero_desc){ .optimizer = DT_OPTIMIZER_CUSTOM, .update = own_update, .states = 3 };
    if (kind == BAD_BETA) d.beta1 = 1;
    if (kind == BAD_NAN_EPS) d.eps = NAN;
    if (kind == BAD_MOMENTUM) d.momentum = -1;
    if (kind == BAD_CLIP) d.clip = -2;
    return d;
}

/* After dt_zero_make: one wrong call. */
static void bad_after(dt_ctx *ctx, int kind, world_run *w, dt_mesh *mesh, dt_zero *zero) {
    char host[64];
    if (kind == BAD_TWICE) CHECK(dt_zero_make(ctx, (dt_zero_desc){ 0 }) == NULL);
    if (kind == BAD_LATE_PARAM) CHECK(dt_param(ctx, "late", DT_SHAPE(1), DT_ZEROS) == NULL);
    if (kind == BAD_STATE) CHECK(dt_zero_state(zero, 2, dt_param_get(ctx, 0), host) == DT_ERR_ARG);
    if (kind == BAD_FROZEN_STATE)
        CHECK(dt_zero_state(zero, 0, dt_param_find(ctx, "b.ice"), host) == DT_ERR_ARG);
    if (kind == BAD_HALF_BACKWARD) {
        dt_micro(ctx, 0, 2);
        dt_backward(pull(ctx, w, mesh, 1, 0));
    }
    if (kind == BAD_CLEARED) {
        dt_backward(pull(ctx, w, mesh, 1, 0));
        dt_clear_grads(ctx);
    }
    if (kind == BAD_SECOND_BACKWARD) /* a second micro-batch without dt_micro */
        for (int j = 0; j < 2; j++) {
            dt_backward(pull(ctx, w, mesh, 1, j));
            dt_reset(ctx);
        }
    if (kind == BAD_SECOND_STEP) {
        dt_backward(pull(ctx, w, mesh, 1, 0));
        CHECK(dt_zero_step(zero, 0.1).step == 1);
    }
    if (kind < BAD_NO_BACKWARD || kind > BAD_SECOND_STEP) return;
    dt_step_info info = dt_zero_step(zero, 0.1);
    CHECK(isnan(info.grad_norm) && info.step == (kind == BAD_SECOND_STEP));
}

static dt_status bad_main(dt_ctx *ctx, void *user) {
    const bad_use *b = (const bad_use *)user;
    world_run w = {
        .set = mixed, .params = b->kind == BAD_NO_PARAMS ? 0 : 9, .dtype = DT_F32, .nan_step = -1
    };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ 0 });
    register_set(ctx, &w, &mesh);
    dt_zero_desc d = bad_desc(b->kind);
    dt_param_desc p = { .frozen = 0 };
    if (b->kind == BAD_USED)
        dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(1, 3), NULL), dt_param_get(ctx, 0), NULL);
    if (b->kind == BAD_CUT_DP) p.shards[0].comm = mesh.dp;
    /* and no mesh: the world is data parallel */
    if (b->kind == BAD_CUT_WORLD) p.shards[0].comm = dt_world(ctx);
    if (b->kind == BAD_MARK_DP)
        p.grad_placements[0] = (dt_grad_placement){ mesh.dp, DT_GRAD_PARTIAL };
    if (b->kind == BAD_SAME_DP)
        p.grad_placements[1] = (dt_grad_placement){ mesh.dp, DT_GRAD_REPLICATED };
    if (b->kind != BAD_CUT_WORLD) d.mesh = &mesh;
    if (p.shards[0].comm)
        dt_param_at(ctx, b->kind == BAD_CUT_DP ? "cut_dp" : "cut_world", DT_SHAPE(4), DT_ZEROS, p);
    if (p.grad_placements[0].comm || p.grad_placements[1].comm)
        dt_param_at(ctx, "mark_dp", DT_SHAPE(4), DT_ZEROS, p);
    dt_zero *zero = dt_zero_make(ctx, d);
    int made_first = b->kind >= BAD_TWICE && b->kind <= BAD_FROZEN_STATE && b->kind != BAD_USED;
    if (made_first)
        CHECK(zero != NULL || dt_error(ctx));
    else
        CHECK(zero == NULL);
    if (zero) bad_after(ctx, b->kind, &w, &mesh, zero);
    dt_barrier(dt_world(ctx)); /* ranks that do not know of the error yet learn of it here */
    CHECK_MSG(dt_error(ctx) == b->status || dt_error(ctx) == DT_ERR_PEER, "bad use %d: %s", b->kind,
        dt_error_text(ctx));
    CHECK(isnan(dt_zero_step(zero, 0.1).grad_norm));
    return dt_error(ctx);
}

static void test_bad_uses(void) {
    CHECK(sizeof bad_uses / sizeof *bad_uses == BAD_KINDS);
    for (int i = 0; i < BAD_KINDS; i++) {
        dt_report report = run(2, bad_main, (void *)(uintptr_t)&bad_uses[i]);
        CHECK_MSG(report.status == bad_uses[i].status, "bad use %d: %s %s", bad_uses[i].kind,
            dt_status_name(report.status), report.text);
        for (int k = 0; k < 2; k++)
            CHECK_MSG(strstr(report.text, bad_uses[i].words[k]), "'%s' is not in '%s'",
                bad_uses[i].words[k], report.text);
    }
    CHECK(dt_zero_make(NULL, (dt_zero_desc){ 0 }) == NULL);
    dt_zero_free(NULL);
    CHECK(
        isnan(dt_zero_step(NULL, 1).grad_norm) && dt_zero_state(NULL, 0, NULL, NULL) == DT_ERR_ARG);
}

/* One rank registers other parameters or starts from other values; without a check, training would
   continue with mixed parameters. */
enum {
    UNLIKE_ORDER = 0,
    UNLIKE_NAME,
    UNLIKE_SHAPE,
    UNLIKE_TYPE,
    UNLIKE_INIT,
    UNLIKE_EXTRA,
    UNLIKE_MISSING,
    UNLIKE_SCOPE,
    UNLIKE_FROZEN,
    UNLIKE_DECAY,
    UNLIKE_LR,
    UNLIKE_OPTIMIZER,
    UNLIKE_SCALE,
    UNLIKE_GATHERED,
    UNLIKE_OVERLAP,
    UNLIKE_CUT,
    UNLIKE_VALUE,
    UNLIKE_LAST,
    UNLIKE_KINDS
};

typedef struct unlike_run {
    int kind, stage, tp, rank;
} unlike_run;

static const char *const unlike_words[UNLIKE_KINDS][2] = { { "has b f32 (3)", "has a f32 (2,2)" },
    { "has other f32 (2,2)", "has a f32 (2,2)" }, { "has a f32 (4)", "has a f32 (2,2)" },
    { "has a f64", "has a f32" }, { "normal 0.5 ", "normal 0.1 " },
    { "has extra f32 (5)", "has nothing" }, { "has nothing", "has b f32" },
    { "in bucket 1", "in bucket 0" }, { "frozen", "" }, { "no_decay", "" }, { "lr_scale 2", "" },
    { "betas 0.8", "betas 0.9" }, { "others #", "" }, { "others #", "" }, { "others #", "" },
    { "shard 1:", "shard 0:" }, { "from values of a", "" }, { "from values of b", "" } };

static dt_status unlike_main(dt_ctx *ctx, void *user) {
    const unlike_run *u = (const unlike_run *)user;
    int me = dt_ctx_rank(ctx) == u->rank, k = me ? u->kind : -1;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = u->tp });
    dt_param_desc p = { .frozen = k == UNLIKE_FROZEN,
        .no_decay = k == UNLIKE_DECAY,
        .lr_scale = k == UNLIKE_LR ? 2 : 0,
        .dtype = k == UNLIKE_TYPE ? DT_F64 : DT_F32 };
    if (u->kind == UNLIKE_CUT) p.shards[0] = (dt_shard_spec){ mesh.tp, me };
    if (k == UNLIKE_ORDER) dt_param(ctx, "b", DT_SHAPE(3), DT_ZEROS);
    dt_param_at(ctx, k == UNLIKE_NAME ? "other" : "a",
        k == UNLIKE_SHAPE ? DT_SHAPE(4) : DT_SHAPE(2, 2), DT_NORMAL(k == UNLIKE_INIT ? 0.5 : 0.1),
        p);
    if (k == UNLIKE_SCOPE) dt_scope(ctx, NULL);
    if (k != UNLIKE_ORDER && k != UNLIKE_MISSING) dt_param(ctx, "b", DT_SHAPE(3), DT_ZEROS);
    if (k == UNLIKE_EXTRA) dt_param(ctx, "extra", DT_SHAPE(5), DT_ZEROS);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = u->stage,
                                          .mesh = &mesh,
                                          .beta1 = k == UNLIKE_OPTIMIZER ? 0.8 : 0,
                                          .scale = { .growth = k == UNLIKE_SCALE ? 4 : 0 },
                                          .keep_gathered = k == UNLIKE_GATHERED,
                                          .no_overlap = k == UNLIKE_OVERLAP });
    dt_tensor *changed = dt_param_get(ctx, k == UNLIKE_LAST);
    CHECK_MSG((zero != NULL) == (u->kind >= UNLIKE_VALUE), "unlike %d: dt_zero_make", u->kind);
    if (!zero) return dt_error(ctx);
    size_t last = changed->param->count - 1;
    if (k >= UNLIKE_VALUE)
        ((float *)changed->data)[last] = nextafterf(((float *)changed->data)[last], 9);
    dt_tensor *y = dt_linear(
        dt_input(ctx, DT_F32, DT_SHAPE(1, 2), (float[]){ 1, 2 }), dt_param_get(ctx, 0), NULL);
    dt_backward(dt_mse(y, dt_input(ctx, DT_F32, DT_SHAPE(1, 2), (float[]){ 1, 2 }), 1));
    CHECK_MSG(isnan(dt_zero_step(zero, 0.1).grad_norm), "unlike %d: a step was made", u->kind);
    return dt_error(ctx);
}

static void test_unlike(void) {
    for (int code = 0; code < UNLIKE_KINDS * 6; code++) {
        unlike_run u = {
            .kind = code / 6, .stage = code & 1, .tp = 1 + (code % 3 == 2), .rank = 1
        };
        if (code % 3 == 1) u.rank = 3;
        int ranks = u.tp == 2 ? 2 : 4;
        char rank[32];
        if (u.kind == UNLIKE_CUT && u.tp == 1) continue; /* nothing is sharded */
        dt_report report = run(ranks, unlike_main, &u);
        snprintf(
            rank, sizeof rank, u.kind >= UNLIKE_VALUE ? "rank %d starts" : "rank %d has", u.rank);
        CHECK_MSG(report.status == DT_ERR_COMM && strstr(report.text, rank) &&
                      strstr(report.text, "rank 0"),
            "unlike %d over %d ranks, tp %d: %s", u.kind, ranks, u.tp, report.text);
        for (int i = 0; i < 2; i++)
            CHECK_MSG(strstr(report.text, unlike_words[u.kind][i]),
                "unlike %d: '%s' is not in '%s'", u.kind, unlike_words[u.kind][i], report.text);
    }
}

/* A context that dt_run did not make: there is no world, every group is a group of one. */
static void test_without_dt_run(void) {
    dt_host quiet = *dt_host_default();
    quiet.log = log_nothing;
    for (int stage = 0; stage < 4; stage++) {
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet });
        float x[3] = { 1, 2, -1 }, y = 3, state[3];
        dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(1, 3), DT_ONES);
        dt_zero *zero = dt_zero_make(
            ctx, (dt_zero_desc){ .stage = stage, .optimizer = DT_SGD, .momentum = 0.5 });
        if (!CHECK(zero != NULL)) continue;
        dt_backward(dt_mse(dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(1, 3), x), w, NULL),
            dt_input(ctx, DT_F32, DT_SHAPE(1, 1), &y), 1)); /* gradient 2 (2 - 3) x */
        dt_step_info info = dt_zero_step(zero, 0.25);
        CHECK(
            info.step == 1 && close_to(info.grad_norm, sqrt(24), 1e-6, 0) && info.clip_scale == 1);
        CHECK(((float *)w->data)[0] == 1.5f && ((float *)w->data)[1] == 2 &&
              ((float *)w->data)[2] == 0.5f);
        CHECK(dt_zero_state(zero, 0, w, state) == DT_OK && state[0] == -2 && state[1] == -4 &&
              state[2] == 2);
        float before[3] = { 1.5f, 2, 0.5f };
        /* a learning rate that would destroy the parameters */
        double wrong = stage ? -0.1 : INFINITY;
        dt_reset(ctx);
        dt_backward(dt_mse(dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(1, 3), x), w, NULL),
            dt_input(ctx, DT_F32, DT_SHAPE(1, 1), &y), 1));
        CHECK(isnan(dt_zero_step(zero, wrong).grad_norm) && dt_error(ctx) == DT_ERR_ARG);
        CHECK(memcmp(w->data, before, sizeof before) == 0 &&
              dt_mesh_make(ctx, (dt_mesh_desc){ 0 }).replicas == 1);
        CHECK(dt_zero_make(ctx, (dt_zero_desc){ 0 }) == NULL);
        dt_ctx_free(ctx);
        ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet });
        dt_param(ctx, "w", DT_SHAPE(1, 3), DT_ONES);
        CHECK(dt_zero_make(ctx, (dt_zero_desc){ 0 }) != NULL);
        /* a second dt_zero_make on the same context */
        CHECK(dt_zero_make(ctx, (dt_zero_desc){ 0 }) == NULL && dt_error(ctx) == DT_ERR_ARG);
        dt_ctx_free(ctx);
    }
}

/* One rank fails between backward and step, or while the other is in dt_zero_make: both calls are
   collective. */
typedef struct late_run {
    int stage, at_make;
    dt_status status[2];
    float before[2][6], after[2][6];
} late_run;

static dt_status late_main(dt_ctx *ctx, void *user) {
    late_run *l = (late_run *)user;
    int me = dt_ctx_rank(ctx);
    world_run w = { .set = mixed, .params = 9, .dtype = DT_F32, .nan_step = -1 };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ 0 });
    register_set(ctx, &w, &mesh);
    if (me == 1 && l->at_make) dt_fail(ctx, DT_ERR_DEVICE, "simulated device failure");
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = l->stage, .mesh = &mesh });
    if (l->at_make) {
        CHECK_MSG(zero == NULL, "dt_zero_make succeeded on rank %d and failed on rank 1", me);
    } else if (CHECK(zero != NULL)) {
        write_start(ctx);
        dt_backward(pull(ctx, &w, &mesh, 1, 0));
        dt_barrier(mesh.dp);
        memcpy(l->before[me], dt_bucket_get(ctx, 0)->shard, sizeof l->before[me]);
        if (me == 1) dt_fail(ctx, DT_ERR_DEVICE, "simulated device failure");
        dt_step_info info = dt_zero_step(zero, 0.1);
        CHECK_MSG(isnan(info.grad_norm) && info.step == 0,
            "stage %d: rank %d took a step that rank 1 did not", l->stage, me);
        memcpy(l->after[me], dt_bucket_get(ctx, 0)->shard, sizeof l->after[me]);
        CHECK_MSG(memcmp(l->before[me], l->after[me], sizeof l->before[me]) == 0,
            "rank %d changed a parameter", me);
        if (me == 0) dt_zero_free(zero); /* after a failure too */
    }
    dt_barrier(dt_world(ctx));
    l->status[me] = dt_error(ctx);
    return dt_error(ctx);
}

static void test_late_failure(void) {
    for (int code = 0; code < 8; code++) {
        late_run l = { .stage = code & 3, .at_make = code >> 2 };
        dt_report report = run(2, late_main, &l);
        CHECK_MSG(report.status == DT_ERR_DEVICE && report.rank == 1 &&
                      strstr(report.text, "simulated device failure"),
            "%s", report.text);
        CHECK(l.status[0] == DT_ERR_PEER && l.status[1] == DT_ERR_DEVICE);
    }
}

/* Makes every call that allocates: a step with finite gradients, and reading the state. */
static dt_status memory_fault_main(dt_ctx *ctx, void *user) {
    world_run *w = (world_run *)user;
    int me = dt_ctx_rank(ctx);
    spy_rank = me;
    dt_mesh mesh = dt_mesh_make(ctx, w->mesh);
    register_set(ctx, w, &mesh);
    dt_zero_desc d = w->zero;
    d.mesh = &mesh;
    dt_zero *zero = dt_zero_make(ctx, d);
    float *host = (float *)malloc(MAX_ELEMENTS * sizeof *host);
    for (int step = 1; step <= 2 && zero; step++) world_step(ctx, w, &mesh, zero, step);
    dt_zero_state(zero, 1, dt_param_get(ctx, 0), host);
    free(host);
    dt_barrier(dt_world(ctx));
    w->status[me] = dt_error(ctx);
    return dt_error(ctx);
}

static void test_refused_memory(void) {
    for (int code = 0; code < 8; code++) {
        int refused = 0, done = 0, rank = code & 1;
        for (int k = 1; k < 1000 && !done; k++) {
            world_run w = world_make(MIXED, (dt_mesh_desc){ .dp = 2 },
                (dt_zero_desc){ .stage = code >> 1, .clip = 1, .bucket_bytes = 4096 });
            int left = k;
            w.dtype = DT_F32;
            w.accum = 2;
            dt_report report = run_refusing(2, memory_fault_main, &w, rank, &left);
            done = left > 0; /* the run made fewer allocations */
            refused += !done;
            CHECK_MSG(report.status == (done ? DT_OK : DT_ERR_MEM) && (done || report.rank == rank),
                "allocation %d of rank %d: rank %d: %s", k, rank, report.rank, report.text);
            CHECK(w.status[rank] == (done ? DT_OK : DT_ERR_MEM) &&
                  w.status[!rank] == (done ? DT_OK : DT_ERR_PEER));
            world_free(&w);
        }
        CHECK(done);
        CHECK_MSG(refused > 50, "only %d allocations were refused", refused);
    }
}

static void state_of_null(void) { /* the caller passes on the NULL of a failed dt_zero_make */
    if (dt_zero_state_bytes(NULL) != 0) _exit(1);
}

static int survives(void (*fn)(void)) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(3);
        fn();
        _exit(0);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}

// ==== 7. Rare uses ==============================================================================

typedef struct rare_run {
    int what, stage;
    double seen[2][4];
    int updates;
    dt_dry dry[2];
} rare_run;
enum {
    RARE_VIEW = 0,
    RARE_BETWEEN,
    RARE_SETTING,
    RARE_KEEP,
    RARE_FROZEN,
    RARE_PREFETCH,
    RARE_FREEZE,
    RARE_DRY,
    RARE_MASTER,
    RARE_KINDS
};

static dt_tensor *rare_layer(dt_tensor *x, void *user) {
    return dt_linear(x, (dt_tensor *)user, NULL);
}

static dt_status rare_update(const dt_update_args *f, void *user) {
    (void)f;
    __atomic_add_fetch(&((rare_run *)user)->updates, 1, __ATOMIC_RELAXED);
    return DT_OK;
}

/* The loss of one layer (8,8) on this rank's own sample. */
static dt_tensor *rare_loss(dt_ctx *ctx, dt_tensor *w, double scale) {
    float x[8], y[8];
    for (int i = 0; i < 8; i++) x[i] = (float)((i * 3 + dt_ctx_rank(ctx)) % 5 * scale), y[i] = 1;
    dt_tensor *in = dt_cast(dt_input(ctx, DT_F32, DT_SHAPE(1, 8), x), w->dtype);
    return dt_mse(
        dt_linear(in, w, NULL), dt_cast(dt_input(ctx, DT_F32, DT_SHAPE(1, 8), y), w->dtype), 16);
}

static dt_zero_desc rare_desc(rare_run *r, int rank) {
    dt_zero_desc d = { .stage = r->stage, .bucket_bytes = 256, .poison = 1 };
    if (r->what == RARE_SETTING)
        d.loss_scale = DT_SCALE_DYNAMIC, d.scale.init = rank ? 1024 : 65536;
    if (r->what == RARE_KEEP) d.keep_gathered = rank;
    if (r->what == RARE_FREEZE) d.optimizer = DT_ONEBIT_ADAM, d.freeze_steps = 1;
    if (r->what == RARE_DRY) d.optimizer = DT_OPTIMIZER_CUSTOM, d.update = rare_update, d.user = r;
    if (r->what == RARE_MASTER && r->stage > 1) d.offload_optim = folder;
    return d;
}

static void rare_use(dt_ctx *ctx, rare_run *r, dt_zero *zero, dt_tensor *w, double *seen) {
    float h[64], back[64];
    /* a view of a sharded tensor is read and written like the full tensor */
    if (r->what == RARE_VIEW) {
        dt_tensor *view = dt_reshape(w, DT_SHAPE(64));
        dt_backward(rare_loss(ctx, w, 1));
        CHECK(dt_read(view, h) == DT_OK && dt_read(w, back) == DT_OK &&
              memcmp(h, back, sizeof h) == 0);
        for (int i = 0; i < 64; i++) h[i] = (float)i;
        CHECK(dt_write(view, h) == DT_OK);
        dt_reset(ctx);
        CHECK(dt_read(w, back) == DT_OK && memcmp(h, back, sizeof h) == 0);
        /* values gathered before the step must not be used after it */
    } else if (r->what == RARE_BETWEEN) {
        dt_backward(rare_loss(ctx, w, 1));
        dt_no_grad(ctx, 1);
        rare_loss(ctx, w, 1);
        dt_no_grad(ctx, 0);
        dt_zero_step(zero, 0.1);
        CHECK(dt_read(w, h) == DT_OK);
        for (int i = 0; i < 4; i++) seen[i] = h[i];
        dt_reset(ctx);
    } else if (r->what == RARE_FREEZE) {
        for (int step = 0; step < 2; step++) {
            dt_backward(rare_loss(ctx, w, 1));
            CHECK_MSG(
                dt_zero_grad(zero, w, h) == (step ? DT_ERR_UNSUPPORTED : DT_OK), "step %d", step);
            if (step == 0) seen[0] = h[3];
            dt_zero_step(zero, 0.01);
            dt_reset(ctx);
        }
    } else if (r->what == RARE_MASTER) { /* the parameter equals its rounded master */
        uint16_t narrowed[64];
        for (int step = 0; step < 3; step++) {
            dt_backward(rare_loss(ctx, w, 1));
            dt_zero_step(zero, 1e-3);
            dt_reset(ctx);
        }
        CHECK(dt_zero_state(zero, DT_STATE_MASTER, w, h) == DT_OK && dt_read(w, narrowed) == DT_OK);
        int between = 0, right = 1;
        for (int i = 0; i < 64; i++) {
            double x = element_at(narrowed, DT_BF16, i);
            right &= stored(DT_BF16, h[i]) == x;
            between += (double)h[i] != x;
        }
        CHECK(right && between > 32);
    } else { /* frozen parameters, or a dry run: the step is counted */
        if (r->what == RARE_DRY) dt_backward(rare_loss(ctx, w, 1));
        dt_step_info info = dt_zero_step(zero, 0.1);
        CHECK_MSG(
            info.step == 1, "rare use %d at stage %d: %s", r->what, r->stage, dt_error_text(ctx));
    }
}

/* The second forward is shorter than the first and dt_reset is not called: the prefetch that
   remains unused must not be an error. */
static void rare_prefetch(dt_ctx *ctx, dt_tensor *const *w) {
    float x[8] = { 1 };
    for (int pass = 0; pass < 2; pass++) {
        dt_tensor *t = dt_input(ctx, DT_F32, DT_SHAPE(1, 8), x);
        for (int i = 0; i < (pass ? 1 : 3); i++) t = dt_block(ctx, rare_layer, t, w[i]);
        if (!pass) dt_reset(ctx);
    }
}

static dt_status rare_main(dt_ctx *ctx, void *user) {
    rare_run *r = (rare_run *)user;
    int me = dt_ctx_rank(ctx);
    dt_param_desc p = { .frozen = r->what == RARE_FROZEN,
        .dtype = r->what == RARE_MASTER ? DT_BF16 : DT_F32 };
    dt_tensor *w[3];
    if (r->what == RARE_DRY) dt_dry_begin(ctx, &r->dry[me]);
    for (int i = 0; i < (r->what == RARE_PREFETCH ? 3 : 1); i++) {
        char name[8];
        snprintf(name, sizeof name, "w%d", i);
        w[i] = dt_param_at(ctx, name, DT_SHAPE(8, 8), DT_NORMAL(0.1), p);
    }
    dt_zero *zero = dt_zero_make(ctx, rare_desc(r, me));
    if (zero && r->what == RARE_PREFETCH)
        rare_prefetch(ctx, w);
    else if (zero)
        rare_use(ctx, r, zero, w[0], r->seen[me]);
    return dt_error(ctx);
}

static void test_rare(void) {
    for (int code = 0; code < RARE_KINDS * 4; code++) {
        rare_run r = { .what = code / 4, .stage = code % 4 },
                 whole = { .what = code / 4, .stage = 0 };
        int differs = r.what == RARE_SETTING || (r.what == RARE_KEEP && r.stage == 3);
        dt_status right = differs                 ? DT_ERR_COMM
                          : r.what == RARE_FREEZE ? DT_ERR_UNSUPPORTED
                                                  : DT_OK;
        if ((r.what == RARE_FREEZE && r.stage) || (r.what == RARE_KEEP && r.stage < 3)) continue;
        dt_report report = run(2, rare_main, &r);
        CHECK_MSG(report.status == right, "rare use %d at stage %d: %s %s", r.what, r.stage,
            dt_status_name(report.status), report.text);
        CHECK(r.updates == 0);
        if (r.what == RARE_FREEZE) CHECK(r.seen[0][0] == r.seen[1][0] && r.seen[0][0] != 0);
        if (r.what != RARE_BETWEEN) continue;
        run(2, rare_main, &whole);
        CHECK_MSG(memcmp(r.seen, whole.seen, sizeof r.seen) == 0 && r.seen[0][0] != 0,
            "stage %d reads %g after the step, stage 0 reads %g", r.stage, r.seen[0][0],
            whole.seen[0][0]);
    }
}

/* The first op of a rank takes only parameters that ZeRO-3 has to gather. */
static dt_status first_op_main(dt_ctx *ctx, void *user) {
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(8, 8), DT_ONES);
    if (!dt_zero_make(ctx, (dt_zero_desc){ .stage = 3, .poison = 1 })) return dt_error(ctx);
    dt_tensor *y = *(int *)user ? dt_mul(w, w) : dt_detach(w);
    double sum = dt_item(dt_sum_over(y, DT_ALL));
    CHECK_MSG(sum == 64, "the first op: %g, not 64", sum);
    return dt_error(ctx);
}

static __thread dt_tensor *checked;
static dt_tensor *checked_loss(void *user) {
    (void)user;
    return dt_sum_over(dt_mul(checked, checked), DT_ALL);
}

/* dt_grad_check needs the full gradient of a parameter, which ZeRO-3 shards. */
static dt_status grad_check_main(dt_ctx *ctx, void *user) {
    int stage = *(int *)user;
    checked = dt_param_at(ctx, "w", DT_SHAPE(4, 4), DT_ONES, (dt_param_desc){ .dtype = DT_F64 });
    if (stage) dt_zero_make(ctx, (dt_zero_desc){ .stage = stage });
    dt_grad_difference d = dt_grad_check(ctx, checked_loss, NULL, &checked, 1, 0);
    CHECK(stage == 3 ? dt_error(ctx) == DT_ERR_ARG : d.difference < 1e-6);
    CHECK(stage != 3 || strstr(dt_error_text(ctx), "dt_grad_check(w): ZeRO-3 shards it") != NULL);
    return dt_error(ctx);
}

/* Many parameters in one unit, each with its own learning rate. Only the last has a gradient;
   weight decay alone changes the others. */
static dt_status many_main(dt_ctx *ctx, void *user) {
    enum { MANY = 70 };
    dt_tensor *w[MANY];
    for (int i = 0; i < MANY; i++) {
        dt_param_desc p = { .lr_scale = 1 + i % 9 };
        char name[8];
        snprintf(name, sizeof name, "w%d", i);
        w[i] = dt_param_at(
            ctx, name, DT_SHAPE(i == MANY - 1 ? 8 : 2, i == MANY - 1 ? 8 : 1 + i % 5), DT_ONES, p);
    }
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = *(int *)user, .weight_decay = 0.5 });
    if (!zero) return dt_error(ctx);
    CHECK(dt_bucket_count(ctx) == 1);
    dt_backward(rare_loss(ctx, w[MANY - 1], 1));
    dt_zero_step(zero, 0.01);
    for (int i = 0; i < MANY; i++) {
        float h[64], want = (float)(1 - 0.01 * (1 + i % 9) * 0.5);
        CHECK(dt_read(w[i], h) == DT_OK);
        for (int k = 0; k < 2 * (1 + i % 5); k++)
            CHECK_MSG((h[k] == want) == (i < MANY - 1),
                "parameter %d in a unit of many: %g, not %g", i, h[k], want);
    }
    return dt_error(ctx);
}

/* Offload keeps other programs' files in the folder and follows no links. */
static void test_folder(void) {
    char path[3][100];
    snprintf(path[0], sizeof path[0], "%s/dt-rank-0.offload", folder);
    snprintf(path[1], sizeof path[1], "%s/dt-rank-1.offload", folder);
    snprintf(path[2], sizeof path[2], "%s/mine", folder);
    for (int i = 0; i < 3; i += 2) {
        FILE *f = fopen(path[i], "w");
        if (CHECK(f != NULL)) fputs("precious", f), fclose(f);
    }
    CHECK(symlink(path[2], path[1]) == 0);
    rare_run r = { .what = RARE_MASTER, .stage = 3 };
    CHECK(run(2, rare_main, &r).status == DT_OK);
    for (int i = 0; i < 3; i++) {
        char text[16] = "";
        FILE *f = fopen(path[i], "r");
        if (CHECK(f != NULL))
            CHECK(fgets(text, sizeof text, f) && strcmp(text, "precious") == 0), fclose(f);
    }
    for (int i = 0; i < 3; i++) CHECK(unlink(path[i]) == 0);
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ 0 });
    dt_param(ctx, "w", DT_SHAPE(2), DT_ONES);
    CHECK(dt_zero_make(ctx, (dt_zero_desc){ .offload_optim = "" }) == NULL &&
          dt_error(ctx) == DT_ERR_ARG);
    dt_ctx_free(ctx);
}

/* Two blocks of a norm and a linear layer, in which each parameter has a bucket of its own. */
typedef struct gathered_run {
    int stage;
    double loss[4];
} gathered_run;

static dt_tensor *gathered_layer(dt_tensor *x, void *user) {
    dt_tensor **p = (dt_tensor **)user;
    return dt_linear_at(
        dt_rmsnorm(x, p[0], 0), p[1], NULL, (dt_linear_desc){ .activation = DT_ACT_GELU });
}

static dt_status gathered_main(dt_ctx *ctx, void *user) {
    gathered_run *r = (gathered_run *)user;
    dt_tensor *p[4];
    static const char *const names[] = { "gain0", "w0", "gain1", "w1" };
    float in[16 * 32];
    for (int i = 0; i < 4; i++)
        p[i] = i % 2 ? dt_param(ctx, names[i], DT_SHAPE(32, 32), DT_NORMAL(0.3))
                     : dt_param(ctx, names[i], DT_SHAPE(32), DT_NORMAL(1));
    for (int i = 0; i < 16 * 32; i++) in[i] = (float)(i * 7 % 11) / 11;
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = r->stage, .bucket_bytes = 64 });
    CHECK(dt_bucket_count(ctx) == 4);
    for (int step = 0; step < 4; step++) {
        dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(16, 32), in);
        for (int i = 0; i < 2; i++) x = dt_block(ctx, gathered_layer, x, p + 2 * i);
        dt_tensor *loss = dt_mse(x, dt_input(ctx, DT_F32, DT_SHAPE(16, 32), in), 16 * 32);
        dt_backward(loss);
        if (dt_ctx_rank(ctx) == 0) r->loss[step] = dt_item(loss);
        dt_zero_step(zero, 0.01);
        dt_reset(ctx);
    }
    return dt_error(ctx);
}

/* At stage 3 the backward computes the output of a norm again before anything else has gathered the
   norm's gain. */
static void test_gathered_norm(void) {
    gathered_run sharded = { 3, { 0 } }, whole = { 0, { 0 } };
    CHECK(run(2, gathered_main, &whole).status == DT_OK);
    CHECK(run(2, gathered_main, &sharded).status == DT_OK);
    CHECK(
        memcmp(sharded.loss, whole.loss, sizeof whole.loss) == 0 && whole.loss[3] < whole.loss[0]);
}

int main(int argc, char **argv) {
    const char *vectors = argc > 1 ? argv[1] : "tests/golden";
    snprintf(folder, sizeof folder, "/tmp/dt_test_zero.XXXXXX");
    if (!CHECK(mkdtemp(folder) != NULL)) return check_done("test_zero");
    CHECK_MSG(survives(state_of_null), "dt_zero_state_bytes(NULL) crashes");
    test_lr();
    test_golden(vectors, "gpt2_tied.bin");
    test_golden(vectors, "gpt2_untied.bin");
    test_golden(vectors, "gpt2_sgd.bin");
    test_serial_all();
    test_by_hand();
    test_memory();
    test_part_bytes();
    test_own_update();
    test_nan();
    test_bad_uses();
    test_unlike();
    test_without_dt_run();
    test_late_failure();
    test_refused_memory();
    test_rare();
    test_gathered_norm();
    for (int stage = 0; stage < 4; stage += 3)
        CHECK((run(2, grad_check_main, &stage).status == DT_OK) == (stage == 0));
    for (int product = 0; product < 2; product++)
        CHECK(run(2, first_op_main, &product).status == DT_OK);
    for (int stage = 0; stage < 4; stage++) CHECK(run(2, many_main, &stage).status == DT_OK);
    test_folder();
    CHECK(rmdir(folder) == 0); /* the folder is empty */
    return check_done("test_zero");
}
