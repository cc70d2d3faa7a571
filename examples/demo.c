/* demo.c - the same small GPT under several layouts, each compared with one rank - public domain or MIT, at your choice

       cc -O3 demo.c -o demo -lm -lpthread && ./demo

   Every row of the table is one whole training run on the project's own sources. A layout is right when its losses,
   its gradient norms and its final parameters are those of one rank, but for the rounding of sums that are taken in
   another order. Exit status 0 only if that is so in every row.

   The rule: |a - b| <= tolerance * max(|b|, s), b being one rank's value. For a loss and a norm s is 0. For a parameter
   of n elements | | is the 2-norm and s = lr * steps * sqrt(n), as far as the updates could have gone: a parameter that
   should stay zero has nothing else to be measured by. The tolerance is 1e-12 in f64 and 1e-5 in f32.

   AdamW runs with eps 1e-5, not 1e-8. Where a gradient is zero but for rounding (attn.k.bias, for one), AdamW divides
   rounding by its own size and makes whole steps of it: with eps 1e-8 two f32 runs that differ in the order of a sum
   are 1e-3 of a norm apart after 30 steps, in any framework, and say nothing of a layout. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "../dt_zero.h"

#include "gpt.h"
#include "train.h"

enum { STEPS = 30, BATCH = 16, SEQ = 64 };

typedef struct row {
    const char  *layout;
    dt_mesh_desc mesh;
    int          stage, accum;
    int          sp, kind;          /* sequence parallelism; DT_CP_* */
    int          optimizer;         /* DT_ADAMW or DT_SGD */
    dt_dtype     dtype;
    int          arch;              /* GPT_GPT2 or GPT_LLAMA */
    int          reference;         /* 1: one rank, with which the rows below are compared */
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
    { "dp 2 tp 2 cp 2, ZeRO-1", { .dp = 2, .tp = 2, .cp = 2 }, 1, .sp = 1, .kind = DT_CP_ZIGZAG, .dtype = DT_F32 },
    { "dp 2 tp 2 cp 2, ZeRO-3", { .dp = 2, .tp = 2, .cp = 2 }, 3, .kind = DT_CP_RING, .dtype = DT_F32 },
    { "1 rank, SGD", { .dp = 1 }, .optimizer = DT_SGD, .dtype = DT_F32, .reference = 1 },
    { "dp 8, ZeRO-1, SGD", { .dp = 8 }, 1, .optimizer = DT_SGD, .dtype = DT_F32 },
    { "dp 2 tp 2 cp 2, SGD", { .dp = 2, .tp = 2, .cp = 2 }, .sp = 1, .optimizer = DT_SGD, .dtype = DT_F32 },
    { "1 rank, f64", { .dp = 1 }, .dtype = DT_F64, .reference = 1 },
    { "dp 8, ZeRO-1, f64", { .dp = 8 }, 1, .dtype = DT_F64 },
    { "dp 2 tp 2 cp 2, f64", { .dp = 2, .tp = 2, .cp = 2 }, 1, .sp = 1, .kind = DT_CP_ZIGZAG, .dtype = DT_F64 },
    { "1 rank, Llama", { .dp = 1 }, .dtype = DT_F32, .arch = GPT_LLAMA, .reference = 1 },
    { "dp 4, ZeRO-1, Llama", { .dp = 4 }, 1, .dtype = DT_F32, .arch = GPT_LLAMA },
    { "tp 4, sp, Llama", { .tp = 4 }, .sp = 1, .dtype = DT_F32, .arch = GPT_LLAMA },
    { "cp 2, ring, Llama", { .cp = 2 }, .kind = DT_CP_RING, .dtype = DT_F32, .arch = GPT_LLAMA },
};

/* What one run leaves behind. */
typedef struct result {
    double  loss[STEPS], norm[STEPS];
    double  seconds;            /* of the steps after the first */
    double  peak;               /* bytes of the fullest rank */
    double *params;             /* all parameters, in order of registration: ranks are threads, each fills in its own */
} result;

/* The largest difference to one rank, in units of what it is measured by. */
typedef struct difference { double loss, norm, params; } difference;

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

/* Copies this rank's box of every parameter to its place in the full one, as doubles. Of ranks with the same box one
   does: the first of tp where there is no cut, and of those that share a head of keys the first of these. At ZeRO-3
   all ranks are here, because they read together. */
static void at_end(dt_ctx *ctx, gpt *model, void *user) {
    double *full = ((result *)user)->params;
    for (int p = 0; p < dt_param_count(ctx); p++) {
        const dt_tensor     *t = dt_param_get(ctx, p);
        const dt_param_desc *d = &t->param->desc;
        const dt_box        *box = &t->param->box;
        dt_comm             *copies = d->cuts[0].comm ? d->marks[0].comm : model->config.tp;
        void                *data = malloc(t->param->count * dt_dtype_size(t->dtype));
        int                  first = dt_ctx_rank(ctx) < dt_comm_size(model->config.tp);
        if (data && dt_read(t, data) == DT_OK && first && dt_comm_rank(copies) == 0)
            for (int64_t i = 0; i < dt_count(t->shape); i++) {
                int64_t left = i, at = 0, stride = 1, inside = 1;
                for (int k = t->shape.nd - 1; k >= 0; k--) {
                    int64_t index = left % box->n[k];
                    left /= box->n[k];
                    inside &= index < box->inside[k];
                    at += (box->lo[k] + index) * stride;
                    stride *= t->param->full.d[k];
                }
                if (inside) full[at] = number(t->dtype, data, i);
            }
        free(data);
        full += dt_count(t->param->full);
    }
}

static double learning_rate(const row *r) { return r->optimizer == DT_SGD ? 0.1 : 1e-3; }

/* The sizes of a row's model. Llama's are its own: fewer heads of keys, a narrower feed-forward of two matrices. */
static gpt_config model_of(const row *r) {
    gpt_config c = { .layers = 2, .width = 64, .heads = 4, .kv_heads = 4, .ffn = 256, .seq = SEQ, .vocab = 256,
        .tied = 1, .dtype = r->dtype, .arch = r->arch, .sp = r->sp, .cp_kind = r->kind };
    if (r->arch == GPT_LLAMA) c.kv_heads = 2, c.ffn = 160;
    return c;
}

static int run(const row *r, train_config config, result *out) {
    const dt_mesh_desc m = r->mesh;
    int tp = m.tp ? m.tp : 1, cp = m.cp ? m.cp : 1, dp = m.dp ? m.dp : 1;
    config.model = model_of(r);
    config.mesh = m;
    config.zero = (dt_zero_desc){ .stage = r->stage, .optimizer = r->optimizer, .beta2 = 0.95, .eps = 1e-5,
        .weight_decay = 0.1, .clip = r->optimizer == DT_SGD ? 0 : 1 };
    config.lr = (dt_lr_desc){ learning_rate(r), DT_LR_COSINE, 3, STEPS, 0.1, 0 };
    config.accum = r->accum ? r->accum : 1;
    config.micro_batch = BATCH / config.accum / dp;
    config.user = out;
    memset(out, 0, sizeof *out);
    out->params = (double *)calloc((size_t)gpt_count(config.model), sizeof *out->params);
    return out->params && dt_run((dt_run_desc){ .ranks = dp * tp * cp }, train, &config) == DT_OK;
}

/* The sizes of the parameters, as the registration of a model without memory gives them. */
static int sizes_of(gpt_config config, int64_t *sizes, int room) {
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ 0 });
    if (!ctx) return 0;
    gpt_register(ctx, config);
    int n = dt_param_count(ctx);
    for (int i = 0; i < n && i < room; i++) sizes[i] = dt_count(dt_param_get(ctx, i)->param->full);
    dt_ctx_free(ctx);
    return n <= room ? n : 0;
}

/* The larger of two; a NaN is larger than everything. */
static double worse(double a, double b) { return isnan(a) || a > b ? a : b; }

static difference compare(const row *r, const result *a, const result *b, const int64_t *sizes, int tensors) {
    difference most = { 0, 0, 0 };
    for (int i = 0; i < STEPS; i++) {
        most.loss = worse(fabs(a->loss[i] - b->loss[i]) / fabs(b->loss[i]), most.loss);
        most.norm = worse(fabs(a->norm[i] - b->norm[i]) / fabs(b->norm[i]), most.norm);
    }
    const double *x = a->params, *y = b->params;
    for (int t = 0; t < tensors; t++) {
        double apart = 0, size = 0;
        for (int64_t k = 0; k < sizes[t]; k++) {
            apart += (x[k] - y[k]) * (x[k] - y[k]);
            size += y[k] * y[k];
        }
        double s = learning_rate(r) * STEPS * sqrt((double)sizes[t]);
        most.params = worse(sqrt(apart) / fmax(sqrt(size), s), most.params);
        x += sizes[t];
        y += sizes[t];
    }
    return most;
}

/* Prints a row; 1 if it agrees with its reference and has learnt. */
static int judge(const row *r, const result *a, const result *b, const int64_t *sizes, int tensors) {
    difference d = r->reference ? (difference){ 0, 0, 0 } : compare(r, a, b, sizes, tensors);
    double     most = worse(d.loss, worse(d.norm, d.params)), tolerance = r->dtype == DT_F64 ? 1e-12 : 1e-5;
    int        ok = most <= tolerance && a->loss[STEPS - 1] < a->loss[0];
    char       text[48] = "-";
    if (!r->reference) snprintf(text, sizeof text, "%.1e %s", most, most == d.loss ? "loss" : most == d.norm ? "norm" :
        "param");
    printf("%-23s %10.6f %10.6f  %-18s %8.0f %12.0f   %s\n", r->layout, a->loss[0], a->loss[STEPS - 1], text,
        (double)BATCH * SEQ * (STEPS - 1) / a->seconds, a->peak, ok ? r->reference ? "reference" : "agrees" : "WRONG");
    fflush(stdout);
    return ok;
}

int main(void) {
    enum { ROOM = 64 };
    int64_t      sizes[ROOM];
    train_config config = { .stop_at = STEPS, .on_step = on_step, .at_end = at_end };
    result one = { .params = NULL }, result_of_row;
    int    wrong = 0, n = (int)(sizeof rows / sizeof *rows), tensors = sizes_of(model_of(&rows[0]), sizes, ROOM);
    if (!tensors || !train_files_find_sources(&config.data)) {
        fputs("error: the project's sources are neither in . nor beside the program\n", stderr);
        return 2;
    }
    printf("A GPT of %lld parameters, %d steps of %d sequences of %d bytes, on the project's own sources\n\n",
        (long long)gpt_count(model_of(&rows[0])), STEPS, BATCH, SEQ);
    printf("%-23s %10s %10s  %-18s %8s %12s\n", "layout", "first loss", "last loss", "differs from one", "tokens/s",
        "peak bytes");
    printf("%-23s %10s %10s  %-18s %8s %12s\n", "", "", "", "rank by at most", "", "a rank");
    for (int i = 0; i < n; i++) {
        if (!run(&rows[i], config, &result_of_row)) return 1;
        if (rows[i].reference) tensors = sizes_of(model_of(&rows[i]), sizes, ROOM);
        wrong += !judge(&rows[i], &result_of_row, &one, sizes, tensors);
        double *old = rows[i].reference ? one.params : result_of_row.params;
        if (rows[i].reference) one = result_of_row;
        free(old);
    }
    free(one.params);
    train_files_free(&config.data);
    printf("\n%d of %d rows right: losses, gradient norms and parameters as on one rank, to 1e-5 in f32 and 1e-12 in "
        "f64\n", n - wrong, n);
    return wrong > 0;
}
