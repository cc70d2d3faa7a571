/* 07_dp_naive.c - data parallelism with one rank in charge, as torch.nn.DataParallel has it,
   against an all-reduce

   What you learn: in the naive way rank 0 alone has the samples, the loss and the update. It sends
   out parameters, samples and the loss's slopes, and takes in outputs and gradients: its link
   carries N-1 times what another's does. Summing the gradients round a ring (02 and 03) trains the
   same, and every rank sends 2(N-1)/N of the parameters, however many ranks there are. The program
   counts the bytes of both ways and compares them with these formulas. Run: cc -O3
   examples/07_dp_naive.c -o 07_dp_naive -lm -lpthread && ./07_dp_naive */
#define DT_IMPLEMENTATION
#include "../dt_comm.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ranks, steps, samples of a step, of a rank */
enum { N = 4, STEPS = 200, B = 64, SHARE = B / N, IN = 2, H = 32 };
/* parameters, padded to a multiple of N: so many the bucket holds */
enum { P = (4 * H + 1 + N - 1) / N * N };

typedef struct mlp {
    dt_tensor *w1, *b1, *w2, *b2;
} mlp;
/* sent: in a step */
typedef struct result {
    int naive;
    double loss[STEPS];
    float params[P];
    size_t sent[N];
} result;

/* The k-th of a sequence of numbers that look random, in [-1, 1). */
static float number(uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* Samples first .. first+count-1 of a step: x (count,IN) are two numbers, y (count,1) their
   product. */
static void samples(int step, int first, int count, float *x, float *y) {
    for (int i = 0; i < count; i++) {
        uint32_t k = (uint32_t)(step * B + first + i);
        x[i * IN] = number(2 * k);
        x[i * IN + 1] = number(2 * k + 1);
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

/* The network on this rank's share: x (SHARE,IN) -> (SHARE,1). */
static dt_tensor *mlp_out(dt_ctx *ctx, const mlp *m, const float *x) {
    return dt_linear(
        dt_gelu(dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(SHARE, IN), x), m->w1, m->b1)), m->w2,
        m->b2);
}

/* Gradient descent on all parameters at once: they lie one after the other in a bucket. */
static void update(float *values, const float *gradients) {
    for (int i = 0; i < P; i++) values[i] -= 0.1f * gradients[i];
}

/* One step with rank 0 in charge. Returns its loss: the mean over all samples of (network(x) -
   y)^2. */
static double step_naive(dt_ctx *ctx, const mlp *m, dt_bucket *bucket, int step) {
    dt_comm *world = dt_world(ctx);
    int in_charge = dt_comm_rank(world) == 0;
    float x[B * IN], y[B], mine[SHARE * IN], outs[B], slopes[B], slope[SHARE], gradients[N * P],
        sum[P] = { 0 };
    double loss = 0;
    if (in_charge) samples(step, 0, B, x, y);
    /* parameters out: rank 0 sends (N-1) P numbers */
    dt_broadcast(world, bucket->data, P, DT_F32, 0);
    /* samples out: (N-1) SHARE IN */
    dt_scatter(world, x, mine, SHARE * IN, DT_F32, 0);
    dt_tensor *out = mlp_out(ctx, m, mine);
    /* outputs in: each other rank sends SHARE */
    dt_gather(world, out ? out->data : NULL, outs, SHARE, DT_F32, 0);
    for (int i = 0; i < B && in_charge; i++) {
        float d = outs[i] - y[i];
        loss += (double)d * d / B;
        slopes[i] = 2 * d / B; /* d loss / d outs[i] */
    }
    dt_scatter(world, slopes, slope, SHARE, DT_F32, 0); /* slopes out: (N-1) SHARE */
    /* The slope of sum(out * slope) is slope: the backward begins as if the loss were here. */
    dt_backward(dt_sum_over(dt_mul(out, dt_input(ctx, DT_F32, DT_SHAPE(SHARE, 1), slope)), DT_ALL));
    /* gradients in: each other rank sends P */
    dt_gather(world, bucket->grad, gradients, P, DT_F32, 0);
    for (int i = 0; i < N * P && in_charge; i++) sum[i % P] += gradients[i];
    if (in_charge) update((float *)bucket->data, sum);
    return loss;
}

/* One step among equals: each rank reads its samples, has its part of the loss, and updates its own
   copy. */
static double step_ring(dt_ctx *ctx, const mlp *m, dt_bucket *bucket, int step) {
    float x[SHARE * IN], y[SHARE];
    samples(step, dt_ctx_rank(ctx) * SHARE, SHARE, x, y);
    dt_tensor *loss = dt_mse(mlp_out(ctx, m, x), dt_input(ctx, DT_F32, DT_SHAPE(SHARE, 1), y), B);
    dt_backward(loss);
    /* each sends 2(N-1)/N P */
    dt_all_reduce(dt_world(ctx), bucket->grad, bucket->grad, P, DT_F32, DT_SUM);
    if (dt_error(ctx) == DT_OK) update((float *)bucket->data, (float *)bucket->grad);
    return dt_item(loss);
}

static dt_status train(dt_ctx *ctx, void *user) { /* every rank runs this */
    result *out = (result *)user;
    mlp m = mlp_make(ctx);
    if (dt_buckets_make(ctx, (dt_buckets_desc){ .pad = N }) != DT_OK) return dt_error(ctx);
    dt_bucket *bucket = dt_bucket_get(ctx, 0);
    /* as messages, which are counted */
    dt_comm_set_algorithm(dt_world(ctx), out->naive ? DT_DIRECT : DT_RING);
    for (int step = 0; step < STEPS && dt_error(ctx) == DT_OK; step++) {
        size_t before = dt_comm_traffic(ctx).bytes;
        double loss = (out->naive ? step_naive : step_ring)(ctx, &m, bucket, step);
        /* ranks are threads: out is shared */
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
    const size_t f = sizeof(float), out = (N - 1) * (P + SHARE * IN + SHARE) * f,
                 in = (SHARE + P) * f;
    const size_t each = 2 * (N - 1) * P / N * f;
    double worst = 0;
    /* The CPU, in a build for GPUs too: we look at data. */
    dt_status status =
        dt_run((dt_run_desc){ .ranks = N, .kernels = dt_kernels_cpu() }, train, &naive);
    if (status == DT_OK)
        status = dt_run((dt_run_desc){ .ranks = N, .kernels = dt_kernels_cpu() }, train, &ring);
    for (int i = 0; i < STEPS; i++) worst = fmax(worst, fabs(naive.loss[i] - ring.loss[i]));
    for (int i = 0; i < P; i++) worst = fmax(worst, fabs((double)naive.params[i] - ring.params[i]));
    int counted = naive.sent[0] == out && ring.sent[0] == each;
    for (int r = 1; r < N; r++) counted &= naive.sent[r] == in && ring.sent[r] == each;
    for (int i = 0; i < STEPS; i += STEPS - 1)
        printf("step %3d  loss %.6f with rank 0 in charge, %.6f by the ring\n", i, naive.loss[i],
            ring.loss[i]);
    printf("bytes sent in a step    by rank 0 (formula)    by each other (formula)\n");
    printf("  rank 0 in charge   %12zu (%7zu)    %12zu (%7zu)\n", naive.sent[0], out, naive.sent[1],
        in);
    printf("  ring               %12zu (%7zu)    %12zu (%7zu)\n", ring.sent[0], each, ring.sent[1],
        each);
    int ok = status == DT_OK && counted && worst < 1e-5 && ring.loss[STEPS - 1] < ring.loss[0] / 10;
    printf("%s: the two ways differ by %.1e, as sums were taken in another order; the bytes %s the "
           "formulas'\n",
        ok ? "ok" : "WRONG", worst, counted ? "are" : "are not");
    return ok ? 0 : 1;
}
