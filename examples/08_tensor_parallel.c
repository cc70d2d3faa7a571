/* 08_tensor_parallel.c - tensor parallelism: a network whose widest layers are sharded over ranks

   What you learn: tensor parallelism (Megatron-LM, arXiv:1909.08053). The linear layer `up` maps C
       features to F hidden units; after a gelu, the linear layer `down` maps these units back to C
       features. Each of T ranks holds F/T rows of `up`, and the F/T columns of `down` for the same
       hidden units. As in PyTorch, a weight is (out,in). Megatron writes weights as (in,out), so it
       calls `up` a column-parallel linear layer and `down` a row-parallel linear layer.

           x (n,C) --f--> up: F/T rows --> gelu --> down: F/T columns --g--> (n,C)

       Each rank computes F/T hidden units, and its product with `down` is a partial sum of the
       result. The ranks send nothing between the two layers. g all-reduces the partial sums in the
       forward pass and does nothing in the backward pass. f does nothing in the forward pass and
       all-reduces the gradients of x in the backward pass. This file contains the
       network twice: for a single rank, and tensor-parallel. Lines that tensor parallelism adds or
       changes end in "tp".
   Run: cc -O3 examples/08_tensor_parallel.c -o 08_tensor_parallel -lm -lpthread
       && ./08_tensor_parallel
   What you see: the losses of four layouts, which are equal. Then for each layout the bytes of a
       rank's parameters and the bytes that a rank sends over the tp group, beside their formulas.
   Think about: before you run, predict the bytes that a rank sends over tp in a step, for tp 2 and
       for tp 4. Does dp change these bytes? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>

/* steps; samples per step over all ranks; inputs, width, feed-forward width */
enum { STEPS = 121, B = 64, IN = 4, C = 32, F = 1024 };

typedef struct mlp {
    dt_tensor *in, *in_bias, *up, *up_bias, *down, *down_bias, *out;
} mlp;
typedef struct job {
    const char *name;
    int single_rank, tp, dp, stage; /* single_rank 1: run the single-rank network */
    double loss[STEPS];
    /* for rank 0: the bytes of its parameters, an upper limit for the padding in these bytes, and
       the bytes that it sends over tp in one step */
    size_t param_bytes, max_padding, sent;
} job;

/* Returns the k-th number of a fixed pseudo-random sequence in [-1, 1). */
static float random_number(uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* Fills in samples [first, first + count) of a step: inputs x (count,IN), targets y (count,1). */
static void samples(int step, int first, int count, float *x, float *y) {
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < IN; j++)
            x[i * IN + j] = random_number((uint32_t)((step * B + first + i) * IN + j));
        y[i] = x[i * IN] * x[i * IN + 1] + sinf(3 * x[i * IN + 2]);
    }
}

/* ---- the single-rank network ---- */

static mlp one_make(dt_ctx *ctx) {
    mlp m;
    m.in = dt_param(ctx, "in", DT_SHAPE(C, IN), DT_NORMAL(0.5));
    m.in_bias = dt_param(ctx, "in_bias", DT_SHAPE(C), DT_ZEROS);
    m.up = dt_param(ctx, "up", DT_SHAPE(F, C), DT_NORMAL(0.2));
    m.up_bias = dt_param(ctx, "up_bias", DT_SHAPE(F), DT_ZEROS);
    m.down = dt_param(ctx, "down", DT_SHAPE(C, F), DT_NORMAL(0.05));
    m.down_bias = dt_param(ctx, "down_bias", DT_SHAPE(C), DT_ZEROS);
    m.out = dt_param(ctx, "out", DT_SHAPE(1, C), DT_NORMAL(0.2));
    return m;
}

/* Returns this rank's part of the mean squared error: the sum over its n samples, divided by the B
   samples of all ranks. */
static dt_tensor *one_loss(const mlp *m, dt_tensor *x, dt_tensor *y) {
    dt_tensor *h = dt_tanh(dt_linear(x, m->in, m->in_bias));    // (n,IN) -> (n,C)
    dt_tensor *wide = dt_gelu(dt_linear(h, m->up, m->up_bias)); // (n,F)
    h = dt_add(h, dt_linear(wide, m->down, m->down_bias));      // (n,C)
    return dt_mse(dt_linear(h, m->out, NULL), y, B);
}

/* ---- the tensor-parallel network ---- */

static mlp tp_make(dt_ctx *ctx, dt_comm *tp) { // tp
    mlp m;
    dt_param_desc rows = { .shards = { { tp, 0 } } }, columns = { .shards = { { tp, 1 } } }; // tp
    m.in = dt_param(ctx, "in", DT_SHAPE(C, IN), DT_NORMAL(0.5));
    m.in_bias = dt_param(ctx, "in_bias", DT_SHAPE(C), DT_ZEROS);
    m.up = dt_param_at(ctx, "up", DT_SHAPE(F, C), DT_NORMAL(0.2), rows);         // tp
    m.up_bias = dt_param_at(ctx, "up_bias", DT_SHAPE(F), DT_ZEROS, rows);        // tp
    m.down = dt_param_at(ctx, "down", DT_SHAPE(C, F), DT_NORMAL(0.05), columns); // tp
    m.down_bias = dt_param(ctx, "down_bias", DT_SHAPE(C), DT_ZEROS);
    m.out = dt_param(ctx, "out", DT_SHAPE(1, C), DT_NORMAL(0.2));
    return m;
}

static dt_tensor *tp_loss(const mlp *m, dt_tensor *x, dt_tensor *y, dt_comm *tp) { // tp
    dt_tensor *h = dt_tanh(dt_linear(x, m->in, m->in_bias));     // (n,IN) -> (n,C)
    dt_tensor *in = dt_tp_enter(h, tp, DT_REPLICATE);            // f                tp
    dt_tensor *wide = dt_gelu(dt_linear(in, m->up, m->up_bias)); // (n,F/T)
    wide = dt_row_linear(wide, m->down, m->down_bias, NULL, tp, DT_REPLICATE); // g: (n,C)  tp
    h = dt_add(h, wide);
    return dt_mse(dt_linear(h, m->out, NULL), y, B);
}

/* ---- training of either network ---- */

static dt_status train(dt_ctx *ctx, void *user) { /* runs on every rank */
    job *j = (job *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = j->tp }); /* dp is ranks/tp */ // tp
    mlp m = j->single_rank ? one_make(ctx) : tp_make(ctx, mesh.tp);
    int n = B / mesh.replicas, first_rank = dt_ctx_rank(ctx) == 0;
    dt_zero_desc desc = { .stage = j->stage, .optimizer = DT_SGD, .momentum = 0.9 };
    desc.mesh = &mesh; // tp
    dt_zero *opt = dt_zero_make(ctx, desc);
    for (int step = 0; step < STEPS; step++) {
        float x[B * IN], y[B];
        size_t before = dt_comm_bytes(ctx, DT_AXIS_TP);
        samples(step, mesh.replica * n, n, x, y); /* the same samples on all ranks of tp */ // tp
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(n, IN), x),
                  *want = dt_input(ctx, DT_F32, DT_SHAPE(n, 1), y);
        dt_tensor *loss = j->single_rank ? one_loss(&m, in, want) : tp_loss(&m, in, want, mesh.tp);
        dt_backward(loss);
        double value = dt_item(loss);
        dt_sum_doubles(mesh.data, &value, 1); /* the ranks of tp have the same loss */ // tp
        dt_zero_step(opt, 0.03);
        dt_reset(ctx);
        if (first_rank) j->loss[step] = value, j->sent = dt_comm_bytes(ctx, DT_AXIS_TP) - before;
    }
    if (first_rank) j->param_bytes = dt_memory_used(ctx).live[DT_MEM_PARAMS];
    if (first_rank)
        j->max_padding =
            (size_t)dt_bucket_count(ctx) * 1024 * (size_t)mesh.sizes.dp * sizeof(float);
    return dt_error(ctx);
}

/* Prints the counted bytes beside the bytes by the formulas. Returns 1 if they agree. */
static int bytes_match(const job *j) {
    size_t T = (size_t)j->tp, f = sizeof(float), n = (size_t)(B / j->dp);
    size_t params = f * (C * IN + C + (F * C + F + C * F) / T + C + C),
           sent = 2 * (2 * (T - 1) * n * C * f / T);
    printf("%-22s %12zu (%6zu)   %12zu (%6zu)\n", j->name, j->param_bytes, params, j->sent, sent);
    return j->sent == sent && j->param_bytes >= params && j->param_bytes - params < j->max_padding;
}

int main(void) {
    static job jobs[] = { { "1 rank", 1, 1, 1, 0, { 0 }, 0, 0, 0 },
        { "tp 2", 0, 2, 1, 0, { 0 }, 0, 0, 0 }, { "tp 4", 0, 4, 1, 0, { 0 }, 0, 0, 0 },
        { "dp 2 x tp 2, ZeRO-1", 0, 2, 2, 1, { 0 }, 0, 0, 0 } };
    enum { JOBS = sizeof jobs / sizeof *jobs };
    double worst = 0;
    int ok = 1;
    for (int i = 0; i < JOBS; i++)
        ok &= dt_run((dt_run_desc){ .ranks = jobs[i].tp * jobs[i].dp }, train, &jobs[i]) == DT_OK;
    printf("loss of step ");
    for (int i = 0; i < JOBS; i++) printf("  %20s", jobs[i].name);
    for (int step = 0; step < STEPS; step++) {
        if (step % 40 == 0) printf("\n        %5d", step);
        for (int i = 0; i < JOBS; i++) {
            worst = fmax(worst, fabs(jobs[i].loss[step] - jobs[0].loss[step]));
            if (step % 40 == 0) printf("  %20.8f", jobs[i].loss[step]);
        }
    }
    printf("\n\neach rank          parameter bytes (formula)   bytes sent over tp per step "
           "(formula)\n");
    for (int i = 0; i < JOBS; i++) ok &= bytes_match(&jobs[i]);
    printf("formulas: 4 (C IN + 3 C + (2 C F + F) / T), padded per bucket to dp x 1,024 elements;\n"
           "          2 (T-1)/T S in the forward and again in the backward, where S = 4 C B/dp is "
           "the size of h in bytes\n");
    ok &= worst < 1e-5 && jobs[0].loss[STEPS - 1] < jobs[0].loss[0] / 10;
    printf("%s: the losses of all layouts and steps differ by at most %.1e\n", ok ? "ok" : "WRONG",
        worst);
    return ok ? 0 : 1;
}
