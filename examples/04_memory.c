/* 04_memory.c - what training uses memory for, shown with 20 linear layers of 2000 x 2000, which
   have 80 million parameters

   What you learn: with Adam in f32 every parameter takes 16 bytes on every rank: 4 for its value, 4
       for its gradient and 8 for its optimizer state. The activations of a small batch are
       negligible in comparison. ZeRO-1 shards the optimizer state over N ranks, so a parameter
       takes only 4 + 4 + 8/N bytes on every rank. dt counts every byte that it allocates, so the
       program can check that the counts equal this formula exactly.
   Run: cc -O3 examples/04_memory.c -o 04_memory -lm -lpthread && ./04_memory [--width 2000]
       [--layers 20]
       With the default sizes, two ranks at stage 0 need 2.5 GB together.
   What you see: three tables, for one rank, for two ranks at stage 0 and for two ranks at stage 1.
       Each table has the peak bytes of every memory class in every phase of a step, and the formula
       in its last row.
   Think about: which columns of the tables change with ZeRO-2, and which with ZeRO-3? How many
       bytes per GPU does a model of 7 billion parameters need, activations not counted? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 2 }; /* samples per rank and step */

typedef struct job {
    int width, layers, ranks, stage, wrong;
} job;

static void row(dt_ctx *ctx, const char *when) {
    dt_memory m = dt_memory_used(ctx);
    if (dt_ctx_rank(ctx) == 0) {
        printf("%-16s", when);
        for (int c = 0; c < DT_MEM_CLASSES; c++) printf(" %10.3f", (double)m.peak[c] / 1e6);
        printf(" %10.3f\n", (double)m.peak_total / 1e6);
    }
    dt_memory_reset_peak(ctx);
}

/* Prints the bytes by the formula, 4 + 4 + 8/N per element. Returns 1 if the counted bytes equal
   them. The padding of each bucket, to a multiple of N x 1,024 elements, counts as elements. */
static int equals_formula(dt_ctx *ctx, const job *j) {
    size_t padded = 0;
    for (int i = 0; i < dt_bucket_count(ctx); i++) padded += dt_bucket_get(ctx, i)->padded;
    size_t shards = (size_t)(j->stage ? j->ranks : 1),
           count = (size_t)j->layers * (size_t)j->width * (size_t)j->width;
    size_t want[3] = { 4 * padded, 4 * padded, 8 * padded / shards };
    if (dt_ctx_rank(ctx) == 0)
        printf("%-16s %10.3f %10.3f %10.3f   = 4, 4 and 8/%zu bytes per parameter\n", "the formula",
            (double)want[0] / 1e6, (double)want[1] / 1e6, (double)want[2] / 1e6, shards);
    dt_memory m = dt_memory_used(ctx);
    return m.live[DT_MEM_PARAMS] == want[0] && m.live[DT_MEM_GRADS] == want[1] &&
           m.live[DT_MEM_OPTIM] == want[2] && padded >= count &&
           padded - count < (size_t)(dt_bucket_count(ctx) * 1024 * j->ranks);
}

static dt_tensor *forward(dt_ctx *ctx, const job *j, dt_tensor *x) {
    /* (B,width) -> (B,width) */
    for (int i = 0; i < j->layers; i++) x = dt_gelu(dt_linear(x, dt_param_get(ctx, i), NULL));
    return x;
}

static dt_status measure(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    int64_t width = j->width;
    float *x = (float *)calloc((size_t)(B * width), sizeof *x);
    if (!x) return dt_fail(ctx, DT_ERR_MEM, "the input");
    for (int64_t i = 0; i < B * width; i++) x[i] = (float)(i % 7) - 3;
    row(ctx, "before");
    for (int i = 0; i < j->layers; i++) {
        char name[32];
        snprintf(name, sizeof name, "layer.%d", i);
        dt_param(ctx, name, DT_SHAPE(width, width), DT_UNIFORM(sqrt(3.0 / (double)width)));
    }
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = j->stage });
    row(ctx, "building");
    dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(B, width), x);
    dt_tensor *loss = dt_mse(forward(ctx, j, in), in, (double)(B * width * j->ranks));
    row(ctx, "forward");
    dt_backward(loss);
    row(ctx, "backward");
    dt_zero_step(opt, 1e-3);
    row(ctx, "update");
    dt_reset(ctx);
    if (dt_error(ctx) == DT_OK && !equals_formula(ctx, j) && dt_ctx_rank(ctx) == 0) j->wrong = 1;
    free(x);
    return dt_error(ctx);
}

int main(int argc, char **argv) {
    job jobs[3] = { { 2000, 20, 1, 0, 0 }, { 2000, 20, 2, 0, 0 }, { 2000, 20, 2, 1, 0 } };
    int wrong = 0;
    for (int i = 1; i < argc; i += 2) {
        int is_width = !strcmp(argv[i], "--width"), value = i + 1 < argc ? atoi(argv[i + 1]) : 0;
        if ((!is_width && strcmp(argv[i], "--layers") != 0) || value < 1 || value > 20000) {
            fprintf(stderr, "usage: 04_memory [--width N] [--layers N], N from 1 to 20000\n");
            return 2;
        }
        for (int k = 0; k < 3; k++) *(is_width ? &jobs[k].width : &jobs[k].layers) = value;
    }
    printf("%d layers of %d x %d: peak of each memory class in each phase, in MB (1e6 bytes), on "
           "rank 0\n",
        jobs[0].layers, jobs[0].width, jobs[0].width);
    for (int k = 0; k < 3; k++) {
        printf("\n%-8s stage %d", jobs[k].ranks > 1 ? "2 ranks," : "1 rank,", jobs[k].stage);
        const char *const head[] = { "params", "grads", "optim", "acts", "comm", "host", "temp",
            "total" };
        for (size_t c = 0; c < sizeof head / sizeof *head; c++) printf(" %10s", head[c]);
        printf("\n");
        wrong |= dt_run((dt_run_desc){ .ranks = jobs[k].ranks }, measure, &jobs[k]) != DT_OK ||
                 jobs[k].wrong;
    }
    printf("\n%s\n",
        wrong ? "WRONG: the bytes differ from the formula" : "ok: the bytes equal the formula");
    return wrong;
}
