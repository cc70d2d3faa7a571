/* 03_dp_zero.c - data parallelism with dt_zero: ZeRO-1 shards the optimizer state of
   02_dp_by_hand.c

   What you learn: dt_zero_step sums the gradients over the ranks and updates the parameters, here
       with momentum. At ZeRO stage 0 every rank holds the complete optimizer state. At ZeRO-1 each
       of four ranks holds a quarter of the optimizer state and updates the same quarter of the
       parameters. An all-gather then gives every rank all updated parameters. To see every change,
       run diff examples/02_dp_by_hand.c examples/03_dp_zero.c
   Run: cc -O3 examples/03_dp_zero.c -o 03_dp_zero -lm -lpthread && ./03_dp_zero
   What you see: stages 0 and 1 give the same bits, and stage 1 holds 4,096 bytes of optimizer state
       per rank instead of 16,384.
   Think about: the network has 129 parameters, and momentum needs 4 bytes per parameter. Why is the
       optimizer state 16,384 bytes and not 516? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>

/* steps, samples per step over all ranks, inputs, hidden units */
enum { STEPS = 200, B = 64, IN = 2, H = 32 };

typedef struct mlp {
    dt_tensor *w1, *b1, *w2, *b2;
} mlp;
typedef struct result {
    double first, last, params[4 * H + 1];
    size_t state_bytes;
    int stage;
} result;

/* Returns the k-th number of a fixed pseudo-random sequence in [-1, 1). */
static float random_number(uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* Fills in samples [first, first + count) of a step. A row of x (count,IN) is a pair of random
   numbers, and the same row of y (count,1) is their product. */
static void samples(int step, int first, int count, float *x, float *y) {
    for (int i = 0; i < count; i++) {
        uint32_t k = (uint32_t)(step * B + first + i);
        x[i * IN] = random_number(2 * k);
        x[i * IN + 1] = random_number(2 * k + 1);
        y[i] = x[i * IN] * x[i * IN + 1];
    }
}

static mlp mlp_make(dt_ctx *ctx) {
    mlp m;
    m.w1 = dt_param(ctx, "w1", DT_SHAPE(H, IN), DT_NORMAL(1.0));
    m.b1 = dt_param(ctx, "b1", DT_SHAPE(H), DT_ZEROS);
    m.w2 = dt_param(ctx, "w2", DT_SHAPE(1, H), DT_NORMAL(0.2));
    m.b2 = dt_param(ctx, "b2", DT_SHAPE(1), DT_ZEROS);
    return m;
}

/* Returns this rank's part of the mean squared error: the sum over its samples, divided by the B
   samples of all ranks. */
static dt_tensor *mlp_loss(const mlp *m, dt_tensor *x, dt_tensor *y) {
    dt_tensor *h = dt_gelu(dt_linear(x, m->w1, m->b1)); /* (..,IN) -> (..,H) */
    return dt_mse(dt_linear(h, m->w2, m->b2), y, B);    /* (..,H) -> (..,1) -> scalar */
}

/* Copies all parameters into one array. */
static void params_copy(dt_ctx *ctx, double *out) {
    for (int i = 0; i < dt_param_count(ctx) && dt_error(ctx) == DT_OK; i++) {
        dt_tensor *p = dt_param_get(ctx, i);
        for (int64_t j = 0; j < dt_count(p->shape); j++) *out++ = ((float *)p->data)[j];
    }
}

static dt_status train(dt_ctx *ctx, void *user) { /* runs on every rank */
    dt_comm *world = dt_world(ctx);
    /* this rank trains on n of the B samples of a step */
    int rank = dt_comm_rank(world), n = B / dt_comm_size(world);
    result *out = (result *)user;
    mlp m = mlp_make(ctx);
    dt_zero *opt = dt_zero_make(
        ctx, (dt_zero_desc){ .stage = out->stage, .optimizer = DT_SGD, .momentum = 0.5 });
    for (int step = 0; step < STEPS; step++) {
        float x[B * IN], y[B];
        samples(step, rank * n, n, x, y);
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(n, IN), x),
                  *want = dt_input(ctx, DT_F32, DT_SHAPE(n, 1), y);
        dt_tensor *loss = mlp_loss(&m, in, want);
        dt_backward(loss);
        double value = dt_item(loss);
        dt_sum_doubles(world, &value, 1);
        dt_zero_step(opt, 0.05); /* sums gradients over the ranks, updates, clears gradients */
        dt_reset(ctx);           /* frees the tape and all tensors except parameters */
        if (rank > 0) continue;
        if (step == 0) out->first = value;
        out->last = value;
        if (step % 40 == 0 || step == STEPS - 1) printf("step %3d  loss %.6f\n", step, value);
    }
    if (rank == 0) params_copy(ctx, out->params);
    if (rank == 0) out->state_bytes = dt_memory_used(ctx).live[DT_MEM_OPTIM];
    return dt_error(ctx);
}

static double difference(const result *a, const result *b) {
    double worst = fabs(a->last - b->last);
    for (int i = 0; i < 4 * H + 1; i++) worst = fmax(worst, fabs(a->params[i] - b->params[i]));
    return worst;
}

int main(void) {
    static result one, full = { .stage = 0 }, sharded = { .stage = 1 };
    printf("one rank\n");
    /* Use the CPU kernels even in a CUDA build, because the program reads tensor data directly. */
    dt_status status =
        dt_run((dt_run_desc){ .ranks = 1, .kernels = dt_kernels_cpu() }, train, &one);
    printf("four ranks, stage 0\n");
    if (status == DT_OK)
        status = dt_run((dt_run_desc){ .ranks = 4, .kernels = dt_kernels_cpu() }, train, &full);
    printf("four ranks, stage 1\n");
    if (status == DT_OK)
        status = dt_run((dt_run_desc){ .ranks = 4, .kernels = dt_kernels_cpu() }, train, &sharded);
    int equal = status == DT_OK && one.last < one.first / 10 && difference(&one, &full) < 1e-5 &&
                difference(&full, &sharded) == 0 && sharded.state_bytes == full.state_bytes / 4;
    printf("%s: one rank and four differ by %.1e, stages 0 and 1 by %.1e\n", equal ? "ok" : "WRONG",
        difference(&one, &full), difference(&full, &sharded));
    printf("bytes of optimizer state on a rank: %zu at stage 0, %zu at stage 1\n", full.state_bytes,
        sharded.state_bytes);
    return equal ? 0 : 1;
}
