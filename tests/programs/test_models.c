/* test_models.c - models that are not GPTs (models.h, models_groups.h) in many layouts, compared with PyTorch

   Run:  test_models [folder of the golden files, default tests/golden]

   Each run trains one model in one layout for five steps and compares every loss, gradient norm,
   gradient of the first step and parameter after the last step with the vectors that PyTorch has
   computed in float64 (golden/make_models.py), by the rule of DESIGN.md: ||a-b|| <= tol *
   max(||b||, s), with the 2-norms of a tensor; s is its share of the norm of the whole gradient,
   and for parameters lr * steps * sqrt(n). f64: 1e-12. f32: 1e-5, in later steps 1e-4, and no
   parameters, because AdamW amplifies rounding errors. Padding stays zero. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/programs/models_groups.h"
#include "tests/support/check.h"
#include "tests/golden/golden.h"
#include <math.h>

// ==== Models and layouts ========================================================================

typedef struct kind {
    const char *name, *data; /* case of the golden file, and prefix of its x and y */
    int rows;                /* sequences of a step */
    void (*make)(void *model, const setup *s, int stage);
    dt_tensor *(*run)(void *model, const setup *s, dt_tensor *x, int stage, batch b);
    setup options;
    /* the parameters of parameter group 1; NULL: one group */
    const char *group;
    /* prefixes of the names of the parameters that each part of a step trains; NULL: one part */
    const char *parts[2];
} kind;

enum {
    MIXER,
    GRU,
    TOWERS,
    TOWERS_GLOBAL,
    VIT,
    BERT,
    BERT_MEAN,
    GRU_STATE,
    CNN,
    GAN,
    AGENT,
    AGENT_APART,
    KINDS
};
#define KIND(name, data, rows, model) name, data, rows, model##_make, model##_run
static const kind kinds[KINDS] = { { KIND("mixer", "mixer", 8, mixer), .group = NULL },
    { KIND("gru", "gru", 8, gru), .group = NULL },
    { KIND("towers", "towers", 16, towers), .group = NULL },
    { KIND("towers_global", "towers", 16, towers), .options = { .global = 1 } },
    { KIND("vit", "vit", 8, vit), .group = NULL }, { KIND("bert", "bert", 8, bert), .group = NULL },
    { KIND("bert_mean", "bert", 8, bert), .options = { .mean = 1 } },
    { KIND("gru_state", "gru", 8, gru), .options = { .carry = 1 } },
    { KIND("cnn", "cnn", 8, cnn), .group = NULL },
    { KIND("gan", "gan", 8, gan), .group = "gen.*", .parts = { "disc.", "gen." } },
    { KIND("agent", "agent", 8, agent), .group = "critic.*" },
    { KIND("agent_apart", "agent", 8, agent), .options = { .apart = 1 }, .group = "critic.*",
        .parts = { "actor.", "critic." } } };

/* Fields that are 0 have their simplest value. */
typedef struct layout {
    int models; /* a set: bit k is model k */
    int dp, tp, cp, pp, zero, micros, recompute, procs, sgd, f32;
    int schedule, halves; /* halves: without a pipeline, the backward runs in two halves */
    int shard, keep;      /* dt_zero_desc.shard_group and keep_gathered */
    int sp, cp_kind;
} layout;

enum { ZB = DT_SCHEDULE_ZB, F1B1 = DT_SCHEDULE_1F1B, ZIGZAG = DT_CP_ZIGZAG };
enum { GATHER = DT_CP_ALLGATHER, ULYSSES = DT_CP_ULYSSES };
enum { M = 1 << MIXER, R = 1 << GRU, T = 1 << TOWERS, TG = 1 << TOWERS_GLOBAL, V = 1 << VIT };
enum { B = 1 << BERT, BM = 1 << BERT_MEAN, RS = 1 << GRU_STATE, C = 1 << CNN };
enum { N = 1 << GAN, A = 1 << AGENT | 1 << AGENT_APART };
/* PIPED: the models that pp can divide; EACH: the models that accumulate over micro-batches; TOKENS:
   the models whose tokens cp can divide */
enum { PIPED = M | R | T | V | B | BM | RS | C | N, EACH = PIPED | A, ALL = EACH | TG };
enum { TOKENS = M | V | B | BM };

static const layout layouts[] = {
    { .models = ALL },
    { ALL, .f32 = 1 },
    { ALL, .sgd = 1 },
    { EACH, .micros = 2, .recompute = 1 },
    { EACH, .micros = 4, .halves = 1, .sgd = 1 },
    { ALL, .recompute = 1, .halves = 1 },
    { ALL, .dp = 2 },
    { ALL, .dp = 2, .zero = 1, .sgd = 1 },
    { EACH, .dp = 2, .zero = 1, .micros = 2, .procs = 1 },
    { EACH, .dp = 2, .zero = 2, .micros = 2, .recompute = 1 },
    { ALL, .dp = 2, .zero = 3, .recompute = 1 },
    { EACH, .dp = 2, .zero = 3, .keep = 1, .micros = 2, .halves = 1, .procs = 1 },
    { EACH & ~T, .dp = 4, .zero = 3, .f32 = 1 },
    { EACH & ~T, .dp = 4, .zero = 2, .shard = 2, .micros = 2 },
    { TG, .dp = 4, .zero = 2, .procs = 1 },
    { ALL, .tp = 2, .recompute = 1 },
    { ALL, .tp = 2, .sgd = 1, .procs = 1 },
    { ALL, .dp = 2, .tp = 2, .zero = 3 },
    { EACH, .dp = 2, .tp = 2, .zero = 1, .micros = 2, .recompute = 1, .procs = 1 },
    { PIPED, .pp = 2, .micros = 4, .schedule = F1B1 },
    { PIPED, .pp = 2, .micros = 2, .schedule = ZB, .recompute = 1, .sgd = 1 },
    { PIPED, .pp = 2, .micros = 4, .schedule = ZB, .procs = 1 },
    { PIPED, .dp = 2, .pp = 2, .zero = 2, .micros = 2, .schedule = ZB },
    { PIPED, .tp = 2, .pp = 2, .zero = 3, .micros = 2, .schedule = F1B1, .recompute = 1 },
    { TG, .dp = 2, .pp = 2, .micros = 1, .schedule = F1B1 },
    { TOKENS, .cp = 2 },
    { TOKENS, .cp = 2, .micros = 2, .recompute = 1, .sgd = 1, .procs = 1 },
    { TOKENS, .dp = 2, .cp = 2, .zero = 3, .halves = 1, .cp_kind = GATHER },
    { TOKENS, .tp = 2, .cp = 2, .cp_kind = ULYSSES },
    { TOKENS, .cp = 2, .pp = 2, .micros = 2, .schedule = ZB, .cp_kind = GATHER },
    { TOKENS & ~M, .cp = 2, .cp_kind = ZIGZAG, .recompute = 1 },
    { TOKENS & ~M, .cp = 4, .zero = 2, .f32 = 1 },
    { TOKENS & ~M, .tp = 2, .sp = 1, .zero = 3, .recompute = 1 },
    { TOKENS & ~M, .tp = 2, .cp = 2, .sp = 1, .cp_kind = ZIGZAG },
    { TOKENS & ~M, .tp = 2, .cp = 2, .sp = 1, .micros = 2, .recompute = 1, .sgd = 1 },
    { TOKENS & ~M, .tp = 2, .cp = 2, .pp = 2, .sp = 1, .zero = 1, .micros = 2, .schedule = ZB,
        .cp_kind = ULYSSES, .procs = 1 },
};

static int at_least_1(int n) { return n > 0 ? n : 1; }

static void layout_text(layout l, const char *model, char *text, size_t bytes) {
    static const char *const cp_kinds[] = { "ring", "zigzag", "allgather", "ulysses" };
    snprintf(text, bytes,
        "%s in %s: dp %d tp %d%s cp %d %s pp %d%s, ZeRO-%d%s%s, %d micros%s%s%s%s", model,
        l.f32 ? "f32" : "f64", at_least_1(l.dp), at_least_1(l.tp), l.sp ? " sp" : "",
        at_least_1(l.cp), cp_kinds[l.cp_kind], at_least_1(l.pp),
        l.schedule == ZB ? " zero bubble" : "", l.zero, l.shard ? " HSDP" : "",
        l.keep ? " kept" : "", at_least_1(l.micros), l.recompute ? ", recompute" : "",
        l.halves ? ", halves" : "", l.procs ? ", procs" : "", l.sgd ? ", SGD" : "");
}

// ==== Comparison ================================================================================

typedef struct job {
    const kind *kind;
    layout l;
    const golden *g;
    const double *settings; /* steps, decay, clip, beta1, beta2, eps, momentum */
    const double *group;    /* settings of parameter group 1, or NULL */
    double lr[2];           /* of both groups */
    dt_ctx *ctx;
    setup s;
    union {
        mixer mixer;
        gru gru;
        towers towers;
        vit vit;
        bert bert;
        cnn cnn;
        gan gan;
        agent agent;
    } model;
    int step, part; /* from 1; from 0 */
    double loss;
} job;

enum { STEPS, DECAY, CLIP, BETA1, BETA2, EPS, MOMENTUM };
/* the settings of parameter group 1 */
enum { GROUP_LR, GROUP_LR_SGD, GROUP_DECAY, GROUP_BETA1, GROUP_BETA2, GROUP_EPS, GROUP_MOMENTUM };

/* Prefix of the names of the parameters that this part of the step trains. */
static const char *part_of(const job *j) {
    return j->kind->parts[j->part] ? j->kind->parts[j->part] : "";
}

static const char *optimizer_of(const job *j) { return j->l.sgd ? "sgd" : "adamw"; }

static const golden_array *stored(const job *j, const char *what, const char *name) {
    char text[96];
    snprintf(text, sizeof text, "%s.%s.%s", j->kind->name, what, name);
    const golden_array *a = golden_find(j->g, text);
    if (!a) dt_fail(j->ctx, DT_ERR_IO, "no stored array %s", text);
    return a;
}

static double tolerance(const job *j) { return !j->l.f32 ? 1e-12 : j->step > 1 ? 1e-4 : 1e-5; }

/* Compares this step's loss or norm. */
static void compare_number(const job *j, const char *what, double value) {
    char name[32];
    snprintf(name, sizeof name, "%s%s", part_of(j), what);
    const golden_array *a = stored(j, optimizer_of(j), name);
    double want = a ? a->data[j->step - 1] : 0;
    if (a && !(fabs(value - want) <= tolerance(j) * fabs(want)))
        dt_fail(j->ctx, DT_ERR_NUMERIC, "%s of step %d: %.17g, PyTorch %.17g", what, j->step, value,
            want);
}

/* Index in the full tensor of element i of this rank's slice; -1: padding. */
static int64_t full_index(const dt_tensor *t, int64_t i) {
    const dt_local_slice *slice = &t->param->slice;
    int64_t index = 0, stride = 1;
    for (int k = t->shape.nd - 1; k >= 0; k--) {
        int64_t at = i % slice->n[k];
        if (at >= slice->inside[k]) return -1;
        index += (slice->lo[k] + at) * stride;
        stride *= t->param->full.d[k];
        i /= slice->n[k];
    }
    return index;
}

/* Compares this rank's slice `host` of a gradient or parameter with n elements in all; the rule's s
   is scale * sqrt(n). */
static void compare_slice(
    const job *j, const dt_tensor *t, const golden_array *want, const void *host, double scale) {
    double difference = 0, size = 0;
    int64_t n = dt_count(t->param->full);
    if (!want || want->count != n) {
        dt_fail(j->ctx, DT_ERR_SHAPE, "%s: %lld values, PyTorch %lld", t->name, (long long)n,
            want ? (long long)want->count : 0);
        return;
    }
    for (int64_t i = 0; i < n; i++) size += want->data[i] * want->data[i];
    for (int64_t i = 0; i < dt_count(t->shape); i++) {
        int64_t at = full_index(t, i);
        double d = j->l.f32 ? (double)((const float *)host)[i] : ((const double *)host)[i];
        d -= at < 0 ? 0 : want->data[at];
        difference += at < 0 && d != 0 ? INFINITY : d * d;
    }
    if (!(sqrt(difference) <= tolerance(j) * fmax(sqrt(size), scale * sqrt((double)n))))
        dt_fail(j->ctx, DT_ERR_NUMERIC, "%s after step %d: difference %.3e, size %.3e", want->name,
            j->step, sqrt(difference), sqrt(size));
}

enum { GRADS, VALUES };

/* Compares all values, or all gradients of this part of the step. The stages together must have all
   parameters of the file. */
static void compare_all(const job *j, dt_zero *zero, int what) {
    const char *part = what == GRADS ? part_of(j) : "";
    double count[2] = { 0, 0 }, scale = j->lr[0] * j->settings[STEPS]; /* count: compared, stored */
    char prefix[48], norm_name[32];
    snprintf(norm_name, sizeof norm_name, "%snorm", part);
    const golden_array *norm = what == GRADS ? stored(j, optimizer_of(j), norm_name) : NULL;
    snprintf(prefix, sizeof prefix, "%s.grad.%s", j->kind->name, part);
    for (int i = 0; i < j->g->n_arrays; i++)
        if (strncmp(j->g->array[i].name, prefix, strlen(prefix)) == 0)
            count[1] += (double)j->g->array[i].count;
    if (what == GRADS) scale = norm ? norm->data[0] / sqrt(count[1]) : 0;
    for (int i = 0; i < dt_param_count(j->ctx); i++) {
        dt_tensor *t = dt_param_get(j->ctx, i);
        double host[1024];
        if (strncmp(t->name, part, strlen(part)) != 0) continue;
        if (dt_count(t->shape) <= 1024 &&
            (what == GRADS ? dt_zero_grad(zero, t, host) : dt_read(t, host)) == DT_OK)
            compare_slice(
                j, t, stored(j, what == GRADS ? "grad" : optimizer_of(j), t->name), host, scale);
        count[0] += (double)dt_count(t->param->full);
    }
    dt_sum_doubles(j->s.mesh.pp, count, 1);
    if (count[0] != count[1])
        dt_fail(j->ctx, DT_ERR_SHAPE, "%g values of %g compared", count[0], count[1]);
}

// ==== Training ==================================================================================

/* The rows of a stored array that this replica reads in a micro-batch. */
static double *rows_of(const job *j, const char *name, int micro, int n) {
    char text[32];
    snprintf(text, sizeof text, "%s.%s", j->kind->data, name);
    const golden_array *a = golden_find(j->g, text);
    if (!a) return NULL;
    size_t row = (size_t)(a->count / a->shape[0]) * sizeof(double);
    char *out = (char *)malloc((size_t)n * row);
    dt_data_order order = { a->shape[0], j->s.rows, n, j->s.mesh.replicas, 0 };
    for (int i = 0; i < n; i++) {
        int64_t from = dt_data_order_sequence(order, j->step, micro, j->s.mesh.replica, i);
        memcpy(out + (size_t)i * row, (const char *)a->data + (size_t)from * row, row);
    }
    return (double *)(void *)out;
}

static dt_tensor *run_stage(dt_tensor *x, int stage, int micro, void *user) {
    job *j = (job *)user;
    int n = j->s.rows / at_least_1(j->l.micros) / j->s.mesh.replicas;
    double *in = rows_of(j, "x", micro, n), *out = rows_of(j, "y", micro, n);
    x = j->kind->run(&j->model, &j->s, x, stage, (batch){ n, micro, j->part, in, out });
    free(in);
    free(out);
    if (stage == j->s.mesh.sizes.pp - 1) j->loss += dt_item(x);
    return x;
}

static void run_micros(job *j) {
    int micros = at_least_1(j->l.micros);
    for (int micro = 0; micro < micros; micro++) {
        dt_micro(j->ctx, micro, micros);
        dt_tensor *loss = run_stage(NULL, 0, micro, j);
        if (j->l.halves) {
            dt_backward_input(loss);
            dt_backward_weight(loss);
        } else {
            dt_backward(loss);
        }
        dt_reset(j->ctx);
    }
}

/* Steps the groups of this part: both if the step has one part. */
static dt_step_info step_groups(job *j, dt_zero *zero) {
    int both = !j->kind->parts[0];
    const double lr[2] = { both || j->part == 0 ? j->lr[0] : -1,
        both || j->part == 1 ? j->lr[1] : -1 };
    return j->group ? dt_zero_step_groups(zero, lr) : dt_zero_step(zero, j->lr[0]);
}

static void train_part(job *j, dt_zero *zero, const dt_schedule *schedule) {
    dt_pipe_desc pipe = { .schedule = schedule, .comm = j->s.mesh.pp, .run = run_stage, .user = j };
    j->loss = 0;
    if (schedule)
        dt_pipe_run(j->ctx, pipe);
    else
        run_micros(j);
    dt_sum_doubles(j->s.mesh.data, &j->loss, 1);
    dt_sum_doubles(j->s.mesh.pp, &j->loss, 1);
    compare_number(j, "loss", j->loss);
    /* the stored gradients of a second part follow an AdamW step of the first */
    if (j->step == 1 && !(j->l.sgd && j->part)) compare_all(j, zero, GRADS);
    dt_step_info info = step_groups(j, zero);
    if (dt_error(j->ctx) == DT_OK) compare_number(j, "norm", info.grad_norm);
}

static dt_status train(dt_ctx *ctx, void *user) {
    job here = *(const job *)user, *j = &here; /* of this rank */
    layout l = j->l;
    const double *o = j->settings;
    j->ctx = ctx;
    j->s = j->kind->options;
    j->s.ctx = ctx;
    j->s.mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = l.dp, .tp = l.tp, .cp = l.cp, .pp = l.pp });
    j->s.dtype = l.f32 ? DT_F32 : DT_F64;
    j->s.sp = l.sp;
    j->s.cp_kind = l.cp_kind;
    j->s.recompute = l.recompute;
    j->s.rows = j->kind->rows;
    dt_stage(ctx, j->s.mesh.coord.pp);
    j->kind->make(&j->model, &j->s, j->s.mesh.coord.pp);
    dt_param_group group = { .params = j->kind->group, .optimizer = l.sgd ? DT_SGD : DT_ADAMW };
    if (j->group) {
        group.beta1 = j->group[GROUP_BETA1];
        group.beta2 = j->group[GROUP_BETA2];
        group.eps = j->group[GROUP_EPS];
        group.momentum = j->group[GROUP_MOMENTUM];
        group.weight_decay = j->group[GROUP_DECAY];
    }
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = l.zero,
                                          .shard_group = l.shard,
                                          .keep_gathered = l.keep,
                                          .mesh = &j->s.mesh,
                                          .optimizer = l.sgd ? DT_SGD : DT_ADAMW,
                                          .beta1 = o[BETA1],
                                          .beta2 = o[BETA2],
                                          .eps = o[EPS],
                                          .momentum = o[MOMENTUM],
                                          .weight_decay = o[DECAY],
                                          .clip = o[CLIP],
                                          .bucket_bytes = 1024,
                                          .poison = 1,
                                          .groups = &group,
                                          .group_count = j->group != NULL });
    dt_schedule *schedule = NULL;
    if (l.pp > 1)
        schedule = dt_schedule_make(
            ctx, (dt_schedule_desc){ .kind = l.schedule, .ranks = l.pp, .micros = l.micros });
    for (j->step = 1; j->step <= o[STEPS] && dt_error(ctx) == DT_OK; j->step++)
        for (j->part = 0; j->part == 0 || (j->part < 2 && j->kind->parts[j->part]); j->part++)
            train_part(j, zero, schedule);
    j->step--;
    j->part = 0;
    if (!l.f32) compare_all(j, zero, VALUES);
    dt_schedule_free(schedule);
    return dt_error(ctx);
}

/* Logs nothing: a failure is reported once, by the check. */
static void silent(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* Fills new memory with bytes that are NaNs, because callers must not rely on zeroed memory. */
static void *alloc_nan_filled(void *user, size_t bytes, dt_mem mem) {
    void *p = dt_host_default()->alloc(user, bytes, mem);
    return p ? memset(p, 0xff, bytes) : NULL;
}

static void test_layout(const golden *g, const kind *model, layout l) {
    dt_host host = *dt_host_default();
    dt_report report;
    char text[200];
    const double *lr = golden_get(g, "lr", NULL), *settings = golden_get(g, "settings", NULL);
    if (!lr || !settings) return;
    job j = { .kind = model, .l = l, .g = g, .settings = settings, .lr = { lr[l.sgd] } };
    if (model->group) {
        snprintf(text, sizeof text, "%s.group", model->data);
        j.group = golden_get(g, text, NULL);
        CHECK_MSG(j.group, "no stored array %s", text);
        j.lr[1] = j.group ? j.group[l.sgd ? GROUP_LR_SGD : GROUP_LR] : 0;
    }
    host.log = silent;
    host.alloc = alloc_nan_filled;
    int ranks = at_least_1(l.dp) * at_least_1(l.tp) * at_least_1(l.cp) * at_least_1(l.pp);
    dt_run((dt_run_desc){ .ranks = ranks,
               .backend = l.procs ? DT_BACKEND_PROCS : DT_BACKEND_THREADS,
               .timeout_s = 60,
               .host = &host,
               .report = &report },
        train, &j);
    layout_text(l, model->name, text, sizeof text);
    CHECK_MSG(report.status == DT_OK, "%s: %s", text, report.text);
}

int main(int argc, char **argv) {
    char path[512];
    snprintf(path, sizeof path, "%s/models.bin", argc > 1 ? argv[1] : "tests/golden");
    golden *g = golden_open(path);
    CHECK_MSG(g && golden_find(g, "settings") && golden_find(g, "lr"), "%s", path);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        for (int k = 0; k < KINDS; k++)
            if (layouts[i].models >> k & 1) test_layout(g, &kinds[k], layouts[i]);
    golden_free(g);
    return check_done("test_models");
}
