/* 07_dp_naive.c - data parallelism through one root rank (torch.nn.DataParallel), compared with
   all-reduce

   What you learn: in naive data parallelism only the root (rank 0) reads the samples, computes the
       loss and updates the parameters. In each step it broadcasts the parameters, scatters the
       samples and the output gradients, and gathers the outputs and the parameter gradients. So the
       root's link carries about N-1 times the bytes of any other link. If instead every rank
       computes its own loss and the gradients are all-reduced (as in 02 and 03), the training is
       the same, but no rank is a bottleneck. In a ring all-reduce every rank sends 2(N-1)/N times
       the size of the parameters, which is less than twice their size for any N. The program counts
       the bytes of both versions and checks them against formulas.
   Run: cc -O3 examples/07_dp_naive.c -o 07_dp_naive -lm -lpthread && ./07_dp_naive
   What you see: equal losses. In the naive version rank 0 sends 2,160 bytes per step and every
       other rank 592 bytes. With the ring every rank sends 792 bytes.
   Think about: which of these three byte counts grow with N, and how fast? */
#define DT_IMPLEMENTATION
#include "../dt_comm.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ranks; steps; samples per step; samples per rank and step; inputs; hidden units */
enum { N = 4, STEPS = 200, B = 64, LOCAL = B / N, IN = 2, H = 32 };
/* elements of the bucket: all parameters, padded to a multiple of N */
enum { P = (4 * H + 1 + N - 1) / N * N };

typedef struct mlp {
    dt_tensor *w1, *b1, *w2, *b2;
} mlp;
typedef struct result {
    int naive;
    double loss[STEPS];
    float params[P];
    size_t sent[N]; /* bytes that each rank sends in one step */
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

/* Runs the network on this rank's samples, x (LOCAL,IN) -> (LOCAL,1). */
static dt_tensor *mlp_out(dt_ctx *ctx, const mlp *m, const float *x) {
    return dt_linear(
        dt_gelu(dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(LOCAL, IN), x), m->w1, m->b1)), m->w2,
        m->b2);
}

/* Gradient descent. One loop updates all parameters, because they are contiguous in one bucket. */
static void update(float *values, const float *gradients) {
    for (int i = 0; i < P; i++) values[i] -= 0.1f * gradients[i];
}

/* One naive step: rank 0 scatters the work, gathers the results and updates the parameters. Returns
   the mean squared error over all samples on rank 0, and 0 on the other ranks. */
static double step_naive(dt_ctx *ctx, const mlp *m, dt_bucket *bucket, int step) {
    dt_comm *world = dt_world(ctx);
    int is_root = dt_comm_rank(world) == 0;
    float x[B * IN], y[B], local_x[LOCAL * IN], outputs[B], output_grads[B], local_grads[LOCAL],
        gradients[N * P], sum[P] = { 0 };
    double loss = 0;
    if (is_root) samples(step, 0, B, x, y);
    /* Broadcast the parameters: the root sends (N-1) P elements. */
    dt_broadcast(world, bucket->data, P, DT_F32, 0);
    /* Scatter the samples: the root sends (N-1) LOCAL IN elements. */
    dt_scatter(world, x, local_x, LOCAL * IN, DT_F32, 0);
    dt_tensor *out = mlp_out(ctx, m, local_x);
    /* Gather the outputs: every other rank sends LOCAL elements. */
    dt_gather(world, out ? out->data : NULL, outputs, LOCAL, DT_F32, 0);
    for (int i = 0; i < B && is_root; i++) {
        float d = outputs[i] - y[i];
        loss += (double)d * d / B;
        output_grads[i] = 2 * d / B; /* derivative of the loss with respect to outputs[i] */
    }
    /* Scatter the output gradients: the root sends (N-1) LOCAL elements. */
    dt_scatter(world, output_grads, local_grads, LOCAL, DT_F32, 0);
    /* The gradient of sum(out * g) with respect to out is g. With g = local_grads the backward pass
       computes the same gradients as if this rank had computed the loss. */
    dt_backward(
        dt_sum_over(dt_mul(out, dt_input(ctx, DT_F32, DT_SHAPE(LOCAL, 1), local_grads)), DT_ALL));
    /* Gather the parameter gradients: every other rank sends P elements. */
    dt_gather(world, bucket->grad, gradients, P, DT_F32, 0);
    for (int i = 0; i < N * P && is_root; i++) sum[i % P] += gradients[i];
    if (is_root) update((float *)bucket->data, sum);
    return loss;
}

/* One data-parallel step: every rank reads its samples, computes its part of the loss, all-reduces
   the gradients and updates its own copy of the parameters. Returns this rank's part of the
   loss. */
static double step_all_reduce(dt_ctx *ctx, const mlp *m, dt_bucket *bucket, int step) {
    float x[LOCAL * IN], y[LOCAL];
    samples(step, dt_ctx_rank(ctx) * LOCAL, LOCAL, x, y);
    dt_tensor *loss = dt_mse(mlp_out(ctx, m, x), dt_input(ctx, DT_F32, DT_SHAPE(LOCAL, 1), y), B);
    dt_backward(loss);
    /* Every rank sends 2(N-1)/N P elements. */
    dt_all_reduce(dt_world(ctx), bucket->grad, bucket->grad, P, DT_F32, DT_SUM);
    if (dt_error(ctx) == DT_OK) update((float *)bucket->data, (float *)bucket->grad);
    return dt_item(loss);
}

static dt_status train(dt_ctx *ctx, void *user) { /* runs on every rank */
    result *out = (result *)user;
    mlp m = mlp_make(ctx);
    if (dt_buckets_make(ctx, (dt_buckets_desc){ .pad = N }) != DT_OK) return dt_error(ctx);
    dt_bucket *bucket = dt_bucket_get(ctx, 0);
    /* The program counts the bytes sent, so it chooses algorithms that send messages. */
    dt_comm_set_algorithm(dt_world(ctx), out->naive ? DT_DIRECT : DT_RING);
    for (int step = 0; step < STEPS && dt_error(ctx) == DT_OK; step++) {
        size_t before = dt_comm_traffic(ctx).bytes;
        double loss = (out->naive ? step_naive : step_all_reduce)(ctx, &m, bucket, step);
        /* The ranks are threads and share *out. */
        out->sent[dt_ctx_rank(ctx)] = dt_comm_traffic(ctx).bytes - before;
        dt_sum_doubles(dt_world(ctx), &loss, 1);
        dt_clear_grads(ctx);
        dt_reset(ctx);
        if (dt_ctx_rank(ctx) == 0) out->loss[step] = loss;
    }
    if (dt_ctx_rank(ctx) == 0 && dt_error(ctx) == DT_OK)
        memcpy(out->params, bucket->data, sizeof out->params);
    return dt_error(ctx);
}

int main(void) {
    static result naive = { .naive = 1 }, ring;
    const size_t f = sizeof(float), out = (N - 1) * (P + LOCAL * IN + LOCAL) * f,
                 in = (LOCAL + P) * f;
    const size_t each = 2 * (N - 1) * P / N * f;
    double worst = 0;
    /* Use the CPU kernels even in a CUDA build, because the program reads tensor data directly. */
    dt_status status =
        dt_run((dt_run_desc){ .ranks = N, .kernels = dt_kernels_cpu() }, train, &naive);
    if (status == DT_OK)
        status = dt_run((dt_run_desc){ .ranks = N, .kernels = dt_kernels_cpu() }, train, &ring);
    for (int i = 0; i < STEPS; i++) worst = fmax(worst, fabs(naive.loss[i] - ring.loss[i]));
    for (int i = 0; i < P; i++) worst = fmax(worst, fabs((double)naive.params[i] - ring.params[i]));
    int counted = naive.sent[0] == out && ring.sent[0] == each;
    for (int r = 1; r < N; r++) counted &= naive.sent[r] == in && ring.sent[r] == each;
    for (int i = 0; i < STEPS; i += STEPS - 1)
        printf("step %3d  loss %.6f through the root, %.6f with the ring\n", i, naive.loss[i],
            ring.loss[i]);
    printf("bytes sent in a step    by rank 0 (formula)    by every other rank (formula)\n");
    printf("  through the root   %12zu (%7zu)    %12zu (%7zu)\n", naive.sent[0], out, naive.sent[1],
        in);
    printf("  ring               %12zu (%7zu)    %12zu (%7zu)\n", ring.sent[0], each, ring.sent[1],
        each);
    int ok = status == DT_OK && counted && worst < 1e-5 && ring.loss[STEPS - 1] < ring.loss[0] / 10;
    printf("%s: losses and parameters differ by %.1e, because the sums run in a different "
           "order; the bytes %s the formulas\n",
        ok ? "ok" : "WRONG", worst, counted ? "equal" : "do not equal");
    return ok ? 0 : 1;
}
