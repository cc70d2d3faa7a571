/* demo.c - trains a small GPT in many layouts and compares each with a run on one rank - public
   domain or MIT, at your choice

       cc -O3 demo.c -o demo -lm -lpthread && ./demo

   Each row of the printed table is a complete training run on the project's own sources. A layout
   is right if its losses, gradient norms and final parameters equal those of a run on one rank,
   except for rounding: sums run in a different order. The exit status is 0 only if every row is
   right.

   A value `a` of a layout is right if |a - b| <= tolerance * max(|b|, s), where b is the value of
   the run on one rank. For losses and norms, s is 0. For a parameter of n elements, | | is the
   2-norm, and s = lr * steps * sqrt(n) is the largest distance by which the updates can move the
   parameter. A parameter that should stay zero needs this s, because its |b| is only rounding. The
   tolerance is 1e-12 in f64 and 1e-5 in f32.

   AdamW runs with eps 1e-5, not 1e-8. Some gradients are zero except for rounding errors, for
   example the gradient of attn.k.bias. With a small eps, AdamW divides such a gradient by its own
   size and takes full steps. With eps 1e-8, in any framework, two f32 runs that differ only in the
   order of a sum have parameters that differ by 1e-3 of their norm after 30 steps. Such a
   difference says nothing about the layout.

   The program also writes schedules.svg into its own folder. The picture shows how four schedules
   fill a pipeline of 4 ranks with 8 micro-batches. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "../dt_zero.h"

#include "gpt.h"
#include "train.h"

enum { STEPS = 20, BATCH = 16, SEQ = 64 };

typedef struct row {
    const char *layout;
    dt_mesh_desc mesh;
    int stage, accum;
    int sp, kind;  /* sp is 1 with sequence parallelism; kind is a DT_CP_* */
    int optimizer; /* DT_ADAMW or DT_SGD */
    dt_dtype dtype;
    int arch;             /* GPT_GPT2 or GPT_LLAMA */
    int reference;        /* 1 for a run on one rank; the rows after it are compared with it */
    int schedule, chunks; /* the pipeline's DT_SCHEDULE_*; stages per rank, 0 means 1 */
    int experts;          /* number of experts in every layer (MoE); 0: dense layers */
} row;

static const row rows[] = {
    { "1 rank", { .dp = 1 }, .dtype = DT_F32, .reference = 1 },
    { "dp 2, ZeRO-0", { .dp = 2 }, .dtype = DT_F32 },
    { "dp 4, ZeRO-1", { .dp = 4 }, 1, .dtype = DT_F32 },
    { "dp 4, ZeRO-1, accum 2", { .dp = 4 }, 1, 2, .dtype = DT_F32 },
    { "dp 8, ZeRO-1", { .dp = 8 }, 1, .dtype = DT_F32 },
    { "dp 4, ZeRO-2, accum 2", { .dp = 4 }, 2, 2, .dtype = DT_F32 },
    { "dp 4, ZeRO-3", { .dp = 4 }, 3, .dtype = DT_F32 },
    { "tp 2", { .tp = 2 }, .dtype = DT_F32 },
    { "tp 4, sp", { .tp = 4 }, .sp = 1, .dtype = DT_F32 },
    { "cp 2, ring", { .cp = 2 }, .kind = DT_CP_RING, .dtype = DT_F32 },
    { "cp 4, zigzag", { .cp = 4 }, .kind = DT_CP_ZIGZAG, .dtype = DT_F32 },
    { "cp 4, Ulysses", { .cp = 4 }, .kind = DT_CP_ULYSSES, .dtype = DT_F32 },
    { "dp 2 tp 2 cp 2, ZeRO-1", { .dp = 2, .tp = 2, .cp = 2 }, 1, .sp = 1, .kind = DT_CP_ZIGZAG,
        .dtype = DT_F32 },
    { "dp 2 tp 2 cp 2, ZeRO-3", { .dp = 2, .tp = 2, .cp = 2 }, 3, .kind = DT_CP_RING,
        .dtype = DT_F32 },
    { "pp 2, AFAB", { .pp = 2 }, .accum = 4, .schedule = DT_SCHEDULE_AFAB, .dtype = DT_F32 },
    { "pp 4, 1F1B", { .pp = 4 }, .accum = 8, .schedule = DT_SCHEDULE_1F1B, .dtype = DT_F32 },
    { "pp 2, interleaved", { .pp = 2 }, .accum = 4, .schedule = DT_SCHEDULE_INTERLEAVED,
        .chunks = 2, .dtype = DT_F32 },
    { "pp 4, zero bubble", { .pp = 4 }, .accum = 8, .schedule = DT_SCHEDULE_ZB, .dtype = DT_F32 },
    { "dp 2 tp 2 pp 2, ZeRO-1", { .dp = 2, .tp = 2, .pp = 2 }, 1, 4, 1,
        .schedule = DT_SCHEDULE_1F1B, .dtype = DT_F32 },
    { "1 rank, SGD", { .dp = 1 }, .optimizer = DT_SGD, .dtype = DT_F32, .reference = 1 },
    { "dp 8, ZeRO-1, SGD", { .dp = 8 }, 1, .optimizer = DT_SGD, .dtype = DT_F32 },
    { "dp 2 tp 2 cp 2, SGD", { .dp = 2, .tp = 2, .cp = 2 }, .sp = 1, .optimizer = DT_SGD,
        .dtype = DT_F32 },
    { "1 rank, f64", { .dp = 1 }, .dtype = DT_F64, .reference = 1 },
    { "dp 8, ZeRO-1, f64", { .dp = 8 }, 1, .dtype = DT_F64 },
    { "dp 2 tp 2 pp 2, f64", { .dp = 2, .tp = 2, .pp = 2 }, 3, 2, .schedule = DT_SCHEDULE_ZB,
        .dtype = DT_F64 },
    { "dp 2 tp 2 cp 2, f64", { .dp = 2, .tp = 2, .cp = 2 }, 1, .sp = 1, .kind = DT_CP_ZIGZAG,
        .dtype = DT_F64 },
    { "1 rank, Llama", { .dp = 1 }, .dtype = DT_F32, .arch = GPT_LLAMA, .reference = 1 },
    { "dp 4, ZeRO-1, Llama", { .dp = 4 }, 1, .dtype = DT_F32, .arch = GPT_LLAMA },
    { "tp 4, sp, Llama", { .tp = 4 }, .sp = 1, .dtype = DT_F32, .arch = GPT_LLAMA },
    { "cp 2, ring, Llama", { .cp = 2 }, .kind = DT_CP_RING, .dtype = DT_F32, .arch = GPT_LLAMA },
    { "1 rank, 4 experts", { .dp = 1 }, .dtype = DT_F32, .experts = 4, .reference = 1 },
    { "ep 4", { .ep = 4 }, .dtype = DT_F32, .experts = 4 },
    { "ep 2 tp 2 pp 2, ZeRO-2", { .ep = 2, .tp = 2, .pp = 2 }, 2, 2, 1,
        .schedule = DT_SCHEDULE_1F1B, .dtype = DT_F32, .experts = 4 },
};

/* The results of one run. */
typedef struct result {
    double loss[STEPS], norm[STEPS];
    double seconds; /* total time of all steps except the first */
    double peak;    /* peak memory in bytes, the largest over the ranks */
    /* All parameters, in the order in which a run on one rank registers them. Every rank fills in
       its local slices, because the ranks are threads and share this array. */
    double *params;
    const struct table *table;
    dt_mesh_desc mesh;
} result;

/* The list of parameters that a run on one rank registers. The comparison covers all of them. */
enum { MAX_TENSORS = 64, NAME = 40 };
typedef struct table {
    int tensors;
    char name[MAX_TENSORS][NAME];
    /* size: number of elements of each parameter; first: offset of its elements in params */
    int64_t size[MAX_TENSORS], first[MAX_TENSORS];
} table;

/* The largest differences between a layout and the run on one rank, each divided by max(|b|, s) as
   explained at the top of this file. */
typedef struct difference {
    double loss, norm, params;
} difference;

static void on_step(dt_ctx *ctx, const train_row *r, void *user) {
    result *out = (result *)user;
    (void)ctx;
    out->loss[r->step - 1] = r->loss;
    out->norm[r->step - 1] = r->grad_norm;
    if (r->step > 1) out->seconds += r->ms / 1000;
    if (r->mem[TRAIN_PEAK] > out->peak) out->peak = r->mem[TRAIN_PEAK];
}

static double number(dt_dtype type, const void *data, int64_t i) {
    return type == DT_F64 ? ((const double *)data)[i] : (double)((const float *)data)[i];
}

static int64_t offset_of(const table *t, const char *name) {
    int i = 0;
    while (i < t->tensors - 1 && strcmp(t->name[i], name) != 0) i++;
    return t->first[i];
}

/* Returns 1 if this rank is the first of all ranks that hold the same local slice of a parameter,
   else 0. The same slice is on all ranks of dp and of cp, on all ranks of ep if ep does not shard
   the parameter, on all ranks of tp if tp does not shard it, on the ranks of tp that hold copies of
   the same kv head, and on the two stages that hold copies of a tied embedding. */
static int is_first(dt_ctx *ctx, const gpt *model, const dt_mesh_desc *m, const dt_param_desc *d) {
    const gpt_config *c = &model->config;
    int rank = dt_ctx_rank(ctx), cp = rank / m->tp % m->cp;
    int dp = rank / (m->tp * m->cp * m->ep) % m->dp;
    dt_comm *copies = d->shards[0].comm ? d->grad_placements[0].comm : c->tp;
    return dp == 0 && cp == 0 && dt_comm_rank(copies) == 0 &&
           dt_comm_rank(d->grad_placements[1].comm) == 0 &&
           (d->shards[1].comm || dt_comm_rank(c->ep) == 0);
}

/* Converts this rank's local slice of every parameter to doubles and copies it to its position in
   the full tensor in result.params. All ranks call dt_read, because dt_read is collective at
   ZeRO-3. */
static void at_end(dt_ctx *ctx, gpt *model, void *user) {
    const result *out = (const result *)user;
    for (int p = 0; p < dt_param_count(ctx); p++) {
        const dt_tensor *t = dt_param_get(ctx, p);
        const dt_local_slice *slice = &t->param->slice;
        double *full = out->params + offset_of(out->table, t->name);
        void *data = malloc(t->param->count * dt_dtype_size(t->dtype));
        if (data && dt_read(t, data) == DT_OK && is_first(ctx, model, &out->mesh, &t->param->desc))
            for (int64_t i = 0; i < dt_count(t->shape); i++) {
                int64_t left = i, at = 0, stride = 1, inside = 1;
                for (int k = t->shape.nd - 1; k >= 0; k--) {
                    int64_t index = left % slice->n[k];
                    left /= slice->n[k];
                    inside &= index < slice->inside[k];
                    at += (slice->lo[k] + index) * stride;
                    stride *= t->param->full.d[k];
                }
                if (inside) full[at] = number(t->dtype, data, i);
            }
        free(data);
    }
}

static double learning_rate(const row *r) { return r->optimizer == DT_SGD ? 0.1 : 1e-3; }

/* Returns the configuration of a row's model. Llama has fewer kv heads and a narrower, gated
   feed-forward. */
static gpt_config model_of(const row *r) {
    gpt_config c = { .layers = 2,
        .width = 64,
        .heads = 4,
        .kv_heads = 4,
        .ffn = 256,
        .seq = SEQ,
        .vocab = 256,
        .tied = 1,
        .dtype = r->dtype,
        .arch = r->arch,
        .sp = r->sp,
        .cp_kind = r->kind,
        .experts = r->experts,
        .balance = 0.01 };
    if (r->arch == GPT_LLAMA) c.kv_heads = 2, c.ffn = 160;
    return c;
}

static int run(const row *r, train_config config, const table *t, result *out) {
    char why[200];
    dt_mesh_desc m = r->mesh;
    int sizes[5] = { m.dp, m.tp, m.cp, m.pp, m.ep }, ranks = 1;
    for (int i = 0; i < 5; i++) ranks *= sizes[i] ? sizes[i] : 1;
    dt_mesh_resolve(&m, ranks, why, sizeof why);
    config.model = model_of(r);
    config.mesh = m;
    config.zero = (dt_zero_desc){ .stage = r->stage,
        .optimizer = r->optimizer,
        .beta2 = 0.95,
        .eps = 1e-5,
        .weight_decay = 0.1,
        .clip = r->optimizer == DT_SGD ? 0 : 1 };
    config.lr = (dt_lr_desc){ learning_rate(r), DT_LR_COSINE, 3, STEPS, 0.1, 0 };
    config.accum = r->accum ? r->accum : 1;
    config.micro_batch = BATCH / config.accum / (m.dp * m.ep);
    config.schedule = r->schedule;
    config.chunks = r->chunks ? r->chunks : 1;
    int items = gpt_items(config.model), stages = m.pp * config.chunks;
    double same[2 * GPT_MAX_LAYERS + 2];
    for (int i = 0; i < items; i++) same[i] = 1;
    if (dt_partition_stages(same, items, stages, config.stage_begin, why, sizeof why) != DT_OK)
        return 0;
    config.user = out;
    memset(out, 0, sizeof *out);
    out->table = t;
    out->mesh = m;
    out->params = (double *)calloc((size_t)gpt_param_count(config.model), sizeof *out->params);
    /* Use the CPU kernels even in a CUDA build, because some rows are f64. */
    return out->params && dt_run((dt_run_desc){ .ranks = ranks, .kernels = dt_kernels_cpu() },
                              train, &config) == DT_OK;
}

/* Lists the parameters of a model in *t. Only registers the model, which allocates no parameter.
   Returns 1, or 0 if the table is too small. */
static int table_of(gpt_config config, table *t) {
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ 0 });
    int64_t at = 0;
    t->tensors = 0;
    if (!ctx) return 0;
    gpt_register(ctx, config);
    for (int i = 0; i < dt_param_count(ctx) && i < MAX_TENSORS; i++) {
        const dt_tensor *p = dt_param_get(ctx, i);
        snprintf(t->name[i], NAME, "%s", p->name);
        t->first[i] = at;
        t->size[i] = dt_count(p->param->full);
        at += t->size[i];
        t->tensors++;
    }
    int all = dt_param_count(ctx) == t->tensors;
    dt_ctx_free(ctx);
    return all;
}

/* Returns the larger of two numbers. A NaN counts as the largest. */
static double worse(double a, double b) { return isnan(a) || a > b ? a : b; }

static difference compare(const row *r, const result *a, const result *b) {
    const table *p = b->table;
    difference max = { 0, 0, 0 };
    for (int i = 0; i < STEPS; i++) {
        max.loss = worse(fabs(a->loss[i] - b->loss[i]) / fabs(b->loss[i]), max.loss);
        max.norm = worse(fabs(a->norm[i] - b->norm[i]) / fabs(b->norm[i]), max.norm);
    }
    for (int t = 0; t < p->tensors; t++) {
        const double *x = a->params + p->first[t], *y = b->params + p->first[t];
        double apart = 0, size = 0;
        for (int64_t k = 0; k < p->size[t]; k++) {
            apart += (x[k] - y[k]) * (x[k] - y[k]);
            size += y[k] * y[k];
        }
        double share = learning_rate(r) * STEPS * sqrt((double)p->size[t]);
        max.params = worse(sqrt(apart) / fmax(sqrt(size), share), max.params);
    }
    return max;
}

/* Prints row r of the table. Returns 1 if the row's result `a` agrees with the reference result `b`
   and the row's loss fell, else 0. */
static int judge(const row *r, const result *a, const result *b) {
    difference d = r->reference ? (difference){ 0, 0, 0 } : compare(r, a, b);
    double max = worse(d.loss, worse(d.norm, d.params)),
           tolerance = r->dtype == DT_F64 ? 1e-12 : 1e-5;
    int ok = max <= tolerance && a->loss[STEPS - 1] < a->loss[0];
    char text[48] = "-";
    if (!r->reference)
        snprintf(text, sizeof text, "%.1e %s", max,
            max == d.loss   ? "loss"
            : max == d.norm ? "norm"
                            : "param");
    printf("%-23s %10.6f %10.6f  %-18s %8.0f %12.0f   %s\n", r->layout, a->loss[0],
        a->loss[STEPS - 1], text, (double)BATCH * SEQ * (STEPS - 1) / a->seconds, a->peak,
        ok ? r->reference ? "reference" : "agrees" : "WRONG");
    fflush(stdout);
    return ok;
}

/* Draws four schedules of a pipeline of 4 ranks, in which a backward takes as long as two forwards.
   Leaves out DT_SCHEDULE_NAIVE, because its timeline would be three times as long. */
static int draw(void) {
    static const int kinds[] = { DT_SCHEDULE_AFAB, DT_SCHEDULE_1F1B, DT_SCHEDULE_INTERLEAVED,
        DT_SCHEDULE_ZB };
    enum { KINDS = sizeof kinds / sizeof *kinds };
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ 0 });
    dt_timeline lines[KINDS];
    dt_span *spans[KINDS] = { NULL };
    char path[4096] = "schedules.svg";
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 20);
    if (length > 0) path[length] = 0;
    char *slash = length > 0 ? strrchr(path, '/') : NULL;
    strcpy(slash ? slash + 1 : path, "schedules.svg");
    for (int i = 0; i < KINDS; i++) {
        int v = kinds[i] == DT_SCHEDULE_INTERLEAVED ? 2 : 1;
        dt_schedule *s = dt_schedule_make(
            ctx, (dt_schedule_desc){ .kind = kinds[i], .ranks = 4, .micros = 8, .chunks = v });
        spans[i] = (dt_span *)calloc((size_t)dt_schedule_offset(s, 4) + 1, sizeof *spans[i]);
        lines[i] = (dt_timeline){ .schedule = s, .spans = spans[i] };
        if (spans[i])
            dt_schedule_simulate(
                s, (dt_schedule_costs){ 1.0 / v, 1.0 / v, 1.0 / v, NULL, 0 }, spans[i]);
    }
    int drawn = dt_schedule_svg(ctx, path, lines, KINDS) == DT_OK;
    printf(drawn ? "the schedules are drawn in %s\n" : "error: %s could not be written\n", path);
    for (int i = 0; i < KINDS; i++) free(spans[i]);
    dt_ctx_free(ctx);
    return drawn;
}

int main(void) {
    static table names;
    train_config config = { .stop_at = STEPS, .on_step = on_step, .at_end = at_end };
    result one = { .params = NULL }, result_of_row;
    int wrong = 0, n = (int)(sizeof rows / sizeof *rows);
    if (!train_files_find_sources(&config.data)) {
        fputs("error: the project's sources are neither in . nor in the parent of the program's "
              "folder\n",
            stderr);
        return 2;
    }
    printf("A GPT of %lld parameters, %d steps of %d sequences of %d bytes, on the project's own "
           "sources\n\n",
        (long long)gpt_param_count(model_of(&rows[0])), STEPS, BATCH, SEQ);
    printf("%-23s %10s %10s  %-18s %8s %12s\n", "layout", "first loss", "last loss",
        "differs from one", "tokens/s", "peak bytes");
    printf("%-23s %10s %10s  %-18s %8s %12s\n", "", "", "", "rank by at most", "", "a rank");
    for (int i = 0; i < n; i++) {
        if (rows[i].reference && !table_of(model_of(&rows[i]), &names)) return 1;
        if (!run(&rows[i], config, &names, &result_of_row)) return 1;
        wrong += !judge(&rows[i], &result_of_row, rows[i].reference ? &result_of_row : &one);
        double *old = rows[i].reference ? one.params : result_of_row.params;
        if (rows[i].reference) one = result_of_row;
        free(old);
    }
    free(one.params);
    train_files_free(&config.data);
    printf("\n%d of %d rows are right: losses, gradient norms and parameters equal one rank's to "
           "1e-5 in f32 and 1e-12 in f64\n",
        n - wrong, n);
    return wrong > 0 || !draw();
}
