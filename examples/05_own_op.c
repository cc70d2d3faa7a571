/* 05_own_op.c - an op of your own with its backward, in a model that is not a transformer

   What you learn: dt_new allocates the output of an op, and dt_record appends the op and its
       backward function to the autograd tape. In the backward function, dt_wants says whether an
       input needs a gradient, and dt_grad returns the buffer to which the gradient is added. The op
       is a layer of radial basis functions, out[r,j] = exp(-|x[r] - c[j]|^2), with learned centers
       c. Before training, dt_grad_check compares the op's gradients with finite differences in f64.
       Do this with every op that you write.
   Run: cc -O3 examples/05_own_op.c -o 05_own_op -lm -lpthread && ./05_own_op
   What you see: the model fits sin(x) and the gradient agrees with finite differences to 1e-11.
   Think about: why does the backward add to dx and dc instead of assigning them? */
#define DT_IMPLEMENTATION
#include "../dt_tensor.h"
#include <math.h>
#include <stdio.h>

enum { B = 40, J = 12, STEPS = 400 }; /* points, radial basis functions, steps */

/* Backward of bumps. The derivative of out is -2 (x - c) out with respect to x, and 2 (x - c) out
   with respect to c. Computes a gradient only for the inputs that need one. */
static dt_status bumps_back(dt_node *node) {
    const double *x = (const double *)node->in[0]->data, *c = (const double *)node->in[1]->data;
    const double *out = (const double *)node->out->data, *dout = (const double *)node->out->grad;
    double *dx = dt_wants(node, 0) ? (double *)dt_grad(node, 0) : NULL;
    double *dc = dt_wants(node, 1) ? (double *)dt_grad(node, 1) : NULL;
    int64_t rows = node->in[0]->shape.d[0], n = node->in[0]->shape.d[1],
            bumps = node->in[1]->shape.d[0];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < bumps; j++)
            for (int64_t i = 0; i < n; i++) {
                double slope =
                    2 * (x[r * n + i] - c[j * n + i]) * out[r * bumps + j] * dout[r * bumps + j];
                if (dx) dx[r * n + i] -= slope;
                if (dc) dc[j * n + i] += slope;
            }
    return DT_OK;
}

/* The op. Returns out (R,J) for R points x (R,N) and J centers c (J,N). All are f64. */
static dt_tensor *bumps(dt_tensor *x, dt_tensor *c) {
    if (!x || !c) return NULL; /* an earlier op failed and has recorded its error */
    if (x->dtype != DT_F64 || c->dtype != DT_F64 || x->shape.nd != 2 || c->shape.nd != 2 ||
        x->shape.d[1] != c->shape.d[1]) {
        dt_fail(x->ctx, DT_ERR_SHAPE, "bumps(%s): x (R,N) and c (J,N) in f64", c->name);
        return NULL;
    }
    int64_t rows = x->shape.d[0], n = x->shape.d[1], count = c->shape.d[0];
    dt_tensor *out = dt_new(x->ctx, DT_F64, DT_SHAPE(rows, count));
    if (!out) return NULL;
    const double *xs = (const double *)dt_data(x), *cs = (const double *)dt_data(c);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < count; j++) {
            double square = 0;
            for (int64_t i = 0; i < n; i++)
                square += (xs[r * n + i] - cs[j * n + i]) * (xs[r * n + i] - cs[j * n + i]);
            ((double *)out->data)[r * count + j] = exp(-square);
        }
    return dt_record(
        out, (dt_record_desc){ .name = "bumps", .in = { x, c }, .backward = bumps_back });
}

typedef struct model {
    dt_tensor *centers, *weights, *bias;
} model;

static model model_make(dt_ctx *ctx) {
    model m;
    m.centers = dt_param_at(
        ctx, "centers", DT_SHAPE(J, 1), DT_UNIFORM(3.0), (dt_param_desc){ .dtype = DT_F64 });
    m.weights = dt_param_at(
        ctx, "weights", DT_SHAPE(1, J), DT_NORMAL(0.1), (dt_param_desc){ .dtype = DT_F64 });
    m.bias = dt_param_at(ctx, "bias", DT_SHAPE(1), DT_ZEROS, (dt_param_desc){ .dtype = DT_F64 });
    /* Allocates and initializes the parameters now, because our own op reads their ->data. */
    dt_buckets_make(ctx, (dt_buckets_desc){ 0 });
    return m;
}

/* Returns the mean squared error of the model at the points x (B,1); the targets are y (B,1). */
static dt_tensor *model_loss(const model *m, dt_tensor *x, dt_tensor *y) {
    /* (B,1) -> (B,J) -> (B,1) -> scalar */
    return dt_mse(dt_linear(bumps(x, m->centers), m->weights, m->bias), y, B);
}

typedef struct check {
    const model *m;
    dt_tensor *x, *y;
} check;
static dt_tensor *check_loss(void *user) {
    const check *c = (const check *)user;
    return model_loss(c->m, c->x, c->y);
}

/* Checks the gradients of both inputs of the op, the points and the centers, against central finite
   differences of the loss. Returns the largest difference. The points require a gradient only for
   this check. */
static double check_op(dt_ctx *ctx, const model *m, const double *points, const double *values) {
    dt_tensor *x = dt_require_grad(dt_input(ctx, DT_F64, DT_SHAPE(B, 1), points));
    check c = { m, x, dt_input(ctx, DT_F64, DT_SHAPE(B, 1), values) };
    dt_tensor *inputs[2] = { x, m->centers };
    dt_grad_difference worst = dt_grad_check(ctx, check_loss, &c, inputs, 2, 1e-5);
    dt_reset(ctx);
    return worst.difference;
}

static void descend(dt_ctx *ctx, double lr) {
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *p = dt_param_get(ctx, i);
        double *value = (double *)p->data, *grad = (double *)p->grad;
        for (int64_t j = 0; value && grad && j < dt_count(p->shape); j++) value[j] -= lr * grad[j];
    }
}

int main(void) {
    double x[B], y[B], first = 0, last = 0;
    for (int i = 0; i < B; i++) x[i] = -3 + 6.0 * i / (B - 1), y[i] = sin(x[i]);
    /* Use the CPU kernels even in a CUDA build, because the program reads tensor data directly. */
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = dt_kernels_cpu() });
    model m = model_make(ctx);
    double error = check_op(ctx, &m, x, y);
    for (int step = 0; step < STEPS; step++) {
        dt_tensor *in = dt_input(ctx, DT_F64, DT_SHAPE(B, 1), x);
        dt_tensor *loss = model_loss(&m, in, dt_input(ctx, DT_F64, DT_SHAPE(B, 1), y));
        dt_backward(loss);
        last = dt_item(loss);
        if (step == 0) first = last;
        if (step % 100 == 0 || step == STEPS - 1) printf("step %3d  loss %.6f\n", step, last);
        descend(ctx, 0.2);
        dt_clear_grads(ctx);
        dt_reset(ctx);
    }
    int right = dt_error(ctx) == DT_OK && error < 1e-8 && last < first / 50;
    printf("%s: the gradient differs from finite differences by %.1e, the loss fell from %.4f to "
           "%.6f\n",
        right ? "ok" : "WRONG", error, first, last);
    dt_ctx_free(ctx);
    return right ? 0 : 1;
}
