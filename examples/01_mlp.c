/* 01_mlp.c - a network with one hidden layer, trained by hand on one rank

   What you learn: parameters, ops and the autograd tape. Every op of the forward pass appends a
       node to the tape, and dt_backward walks the tape in reverse. One training step is forward,
       backward, update, clear gradients, reset the tape. The loop has no error checks, because an
       error is sticky: after a failed op all later ops do nothing, and dt_error returns the error
       at the end.
   Run: cc -O3 examples/01_mlp.c -o 01_mlp -lm -lpthread && ./01_mlp
       (or make && build/01_mlp)
   What you see: the loss falls from 0.40 to 0.003.
   Think about: which lines must change when four ranks train this network together? The next
       program, 02_dp_by_hand.c, has the answer. */
#define DT_IMPLEMENTATION
#include "../dt_tensor.h"
#include <math.h>
#include <stdio.h>

enum { STEPS = 200, B = 64, IN = 2, H = 32 }; /* steps, samples per step, inputs, hidden units */

typedef struct mlp {
    dt_tensor *w1, *b1, *w2, *b2;
} mlp;
typedef struct result {
    double first, last;
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

/* Returns the mean squared error over the B samples of a step. */
static dt_tensor *mlp_loss(const mlp *m, dt_tensor *x, dt_tensor *y) {
    dt_tensor *h = dt_gelu(dt_linear(x, m->w1, m->b1)); /* (..,IN) -> (..,H) */
    return dt_mse(dt_linear(h, m->w2, m->b2), y, B);    /* (..,H) -> (..,1) -> scalar */
}

/* Gradient descent: for every parameter, subtracts lr times the parameter's gradient. */
static void update(dt_ctx *ctx, float lr) {
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *p = dt_param_get(ctx, i);
        float *value = (float *)p->data, *grad = (float *)p->grad;
        for (int64_t j = 0; value && grad && j < dt_count(p->shape); j++) value[j] -= lr * grad[j];
    }
}

static dt_status train(dt_ctx *ctx, result *out) {
    mlp m = mlp_make(ctx);
    for (int step = 0; step < STEPS; step++) {
        float x[B * IN], y[B];
        samples(step, 0, B, x, y);
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(B, IN), x),
                  *want = dt_input(ctx, DT_F32, DT_SHAPE(B, 1), y);
        dt_tensor *loss = mlp_loss(&m, in, want);
        dt_backward(loss);
        double value = dt_item(loss);
        update(ctx, 0.1f);
        dt_clear_grads(ctx); /* the next backward starts from zero */
        dt_reset(ctx);       /* frees the tape and all tensors except parameters */
        if (step == 0) out->first = value;
        out->last = value;
        if (step % 40 == 0 || step == STEPS - 1) printf("step %3d  loss %.6f\n", step, value);
    }
    return dt_error(ctx);
}

int main(void) {
    result r = { 0, 0 };
    /* Use the CPU kernels even in a CUDA build, because the program reads tensor data directly. */
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = dt_kernels_cpu() });
    dt_status status = train(ctx, &r);
    dt_ctx_free(ctx);
    int learned = status == DT_OK && r.last < r.first / 10;
    printf("%s: the loss fell from %.4f to %.6f\n", learned ? "ok" : "WRONG", r.first, r.last);
    return learned ? 0 : 1;
}
