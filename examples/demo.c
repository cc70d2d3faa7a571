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
    const char *layout;
    int         ranks, accum, stage;
    int         optimizer;          /* DT_ADAMW or DT_SGD */
    dt_dtype    dtype;
    int         reference;          /* 1: one rank, with which the rows below are compared */
    int         arch;               /* GPT_GPT2 or GPT_LLAMA */
} row;

static const row rows[] = {
    { "1 rank", 1, 1, 0, DT_ADAMW, DT_F32, 1, GPT_GPT2 },
    { "dp 2, ZeRO-0", 2, 1, 0, DT_ADAMW, DT_F32, 0, GPT_GPT2 },
    { "dp 2, ZeRO-1", 2, 1, 1, DT_ADAMW, DT_F32, 0, GPT_GPT2 },
    { "dp 4, ZeRO-0", 4, 1, 0, DT_ADAMW, DT_F32, 0, GPT_GPT2 },
    { "dp 4, ZeRO-1", 4, 1, 1, DT_ADAMW, DT_F32, 0, GPT_GPT2 },
    { "dp 4, ZeRO-1, accum 2", 4, 2, 1, DT_ADAMW, DT_F32, 0, GPT_GPT2 },
    { "dp 8, ZeRO-0", 8, 1, 0, DT_ADAMW, DT_F32, 0, GPT_GPT2 },
    { "dp 8, ZeRO-1", 8, 1, 1, DT_ADAMW, DT_F32, 0, GPT_GPT2 },
    { "1 rank, SGD", 1, 1, 0, DT_SGD, DT_F32, 1, GPT_GPT2 },
    { "dp 8, ZeRO-1, SGD", 8, 1, 1, DT_SGD, DT_F32, 0, GPT_GPT2 },
    { "1 rank, f64", 1, 1, 0, DT_ADAMW, DT_F64, 1, GPT_GPT2 },
    { "dp 8, ZeRO-1, f64", 8, 1, 1, DT_ADAMW, DT_F64, 0, GPT_GPT2 },
    { "1 rank, Llama", 1, 1, 0, DT_ADAMW, DT_F32, 1, GPT_LLAMA },
    { "dp 4, ZeRO-1, Llama", 4, 1, 1, DT_ADAMW, DT_F32, 0, GPT_LLAMA },
};

/* What one run leaves behind. */
typedef struct result {
    double  loss[STEPS], norm[STEPS];
    double  seconds;            /* of the steps after the first */
    double  peak;               /* bytes of the fullest rank */
    double *params;             /* all parameters, in order of registration */
    int64_t count;
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

/* Copies every parameter out as doubles: under ZeRO-0 and ZeRO-1 each rank has them whole. */
static void at_end(dt_ctx *ctx, gpt *model, void *user) {
    result *out = (result *)user;
    int64_t total = gpt_count(model->config), at = 0;
    double *values = (double *)malloc((size_t)total * sizeof *values);
    if (!values) {
        dt_fail(ctx, DT_ERR_MEM, "demo: %lld parameters", (long long)total);
        return;
    }
    out->params = values;
    for (int i = 0; i < dt_param_count(ctx); i++) {
        const dt_tensor *t = dt_param_get(ctx, i);
        int64_t          n = dt_count(t->shape);
        dt_read(t, values + at); /* floats fill the first half, and are widened from the last on */
        if (t->dtype == DT_F32) {
            for (int64_t k = n - 1; k >= 0; k--) {
                float x;
                memcpy(&x, (const char *)(values + at) + (size_t)k * sizeof x, sizeof x);
                values[at + k] = (double)x;
            }
        }
        at += n;
    }
    out->count = at;
}

static double learning_rate(const row *r) { return r->optimizer == DT_SGD ? 0.1 : 1e-3; }

/* The sizes of a row's model. Llama's are its own: fewer heads of keys, a narrower feed-forward of two matrices. */
static gpt_config model_of(const row *r) {
    gpt_config c = { .layers = 2, .width = 64, .heads = 4, .kv_heads = 4, .ffn = 256, .seq = SEQ, .vocab = 256,
        .tied = 1, .dtype = r->dtype, .arch = r->arch };
    if (r->arch == GPT_LLAMA) c.kv_heads = 2, c.ffn = 160;
    return c;
}

static int run(const row *r, train_config config, result *out) {
    config.model = model_of(r);
    config.mesh.dp = r->ranks;
    config.zero = (dt_zero_desc){ .stage = r->stage, .optimizer = r->optimizer, .beta2 = 0.95, .eps = 1e-5,
        .weight_decay = 0.1, .clip = r->optimizer == DT_SGD ? 0 : 1 };
    config.lr = (dt_lr_desc){ learning_rate(r), DT_LR_COSINE, 3, STEPS, 0.1 };
    config.accum = r->accum;
    config.micro_batch = BATCH / r->accum / r->ranks;
    config.user = out;
    memset(out, 0, sizeof *out);
    return dt_run((dt_run_desc){ .ranks = r->ranks }, train, &config) == DT_OK;
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
    printf("%-22s %10.6f %10.6f  %-18s %8.0f %12.0f   %s\n", r->layout, a->loss[0], a->loss[STEPS - 1], text,
        (double)BATCH * SEQ * (STEPS - 1) / a->seconds, a->peak, ok ? r->reference ? "reference" : "agrees" : "WRONG");
    fflush(stdout);
    return ok;
}

int main(void) {
    enum { ROOM = 64 };
    int64_t      sizes[ROOM];
    train_config config = { .stop_at = STEPS, .on_step = on_step, .at_end = at_end };
    result one = { .count = 0 }, result_of_row;
    int    wrong = 0, n = (int)(sizeof rows / sizeof *rows), tensors = sizes_of(model_of(&rows[0]), sizes, ROOM);
    if (!tensors || !train_files_find_sources(&config.data)) {
        fputs("error: the project's sources are neither in . nor beside the program\n", stderr);
        return 2;
    }
    printf("A GPT of %lld parameters, %d steps of %d sequences of %d bytes, on the project's own sources\n\n",
        (long long)gpt_count(model_of(&rows[0])), STEPS, BATCH, SEQ);
    printf("%-22s %10s %10s  %-18s %8s %12s\n", "layout", "first loss", "last loss", "differs from one", "tokens/s",
        "peak bytes");
    printf("%-22s %10s %10s  %-18s %8s %12s\n", "", "", "", "rank by at most", "", "a rank");
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
