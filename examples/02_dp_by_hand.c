/* 02_dp_by_hand.c - data parallelism by hand: 01_mlp.c on four ranks

   What you learn: data parallelism. Every rank holds the whole network and computes on a quarter of
       the samples. Each rank divides its loss by B, the number of samples of all ranks in a step,
       so the gradient of the step is the sum of the ranks' gradients. One all-reduce per parameter
       computes this sum.
       The rest of the training loop stays as it is. To see every change, run
       diff examples/01_mlp.c examples/02_dp_by_hand.c
   Run: cc -O3 examples/02_dp_by_hand.c -o 02_dp_by_hand -lm -lpthread && ./02_dp_by_hand
   What you see: one rank and four ranks print the same losses, and their parameters agree to
       about 1e-7.
   Think about: why do the parameters not agree to the last bit? A rank waits during each
       all-reduce; what could it compute in that time? */
#define DT_IMPLEMENTATION
#include "../dt_comm.h"
#include <math.h>
#include <stdio.h>

/* steps, samples per step over all ranks, inputs, hidden units */
enum { STEPS = 200, B = 64, IN = 2, H = 32 };

typedef struct mlp {
    dt_tensor *w1, *b1, *w2, *b2;
} mlp;
typedef struct result {
    double first, last, params[4 * H + 1];
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

/* Gradient descent: sums each parameter's gradient over all ranks, then subtracts lr times this sum
   from the parameter. */
static void update(dt_ctx *ctx, float lr) {
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *p = dt_param_get(ctx, i);
        float *value = (float *)p->data, *grad = (float *)p->grad;
        dt_all_reduce(dt_world(ctx), grad, grad, (size_t)dt_count(p->shape), DT_F32, DT_SUM);
        for (int64_t j = 0; value && grad && j < dt_count(p->shape); j++) value[j] -= lr * grad[j];
    }
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
    for (int step = 0; step < STEPS; step++) {
        float x[B * IN], y[B];
        samples(step, rank * n, n, x, y);
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(n, IN), x),
                  *want = dt_input(ctx, DT_F32, DT_SHAPE(n, 1), y);
        dt_tensor *loss = mlp_loss(&m, in, want);
        dt_backward(loss);
        double value = dt_item(loss);
        dt_sum_doubles(world, &value, 1);
        update(ctx, 0.1f);
        dt_clear_grads(ctx); /* the next backward starts from zero */
        dt_reset(ctx);       /* frees the tape and all tensors except parameters */
        if (rank > 0) continue;
        if (step == 0) out->first = value;
        out->last = value;
        if (step % 40 == 0 || step == STEPS - 1) printf("step %3d  loss %.6f\n", step, value);
    }
    if (rank == 0) params_copy(ctx, out->params);
    return dt_error(ctx);
}

int main(void) {
    static result one, four;
    printf("one rank\n");
    /* Use the CPU kernels even in a CUDA build, because the program reads tensor data directly. */
    dt_status status =
        dt_run((dt_run_desc){ .ranks = 1, .kernels = dt_kernels_cpu() }, train, &one);
    printf("four ranks\n");
    if (status == DT_OK)
        status = dt_run((dt_run_desc){ .ranks = 4, .kernels = dt_kernels_cpu() }, train, &four);
    double worst = fabs(one.last - four.last);
    for (int i = 0; i < 4 * H + 1; i++) worst = fmax(worst, fabs(one.params[i] - four.params[i]));
    /* `worst` is not exactly 0, because four ranks add the same values in a different order. */
    int equal = status == DT_OK && one.last < one.first / 10 && worst < 1e-5;
    printf(
        "%s: largest difference between one rank and four: %.1e\n", equal ? "ok" : "WRONG", worst);
    return equal ? 0 : 1;
}
