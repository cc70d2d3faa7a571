/* 08_tensor_parallel.c - a network whose widest layers are cut over ranks: tensor parallelism

   What you learn: `up` makes C numbers into F, `down` makes them C again, with an activation
   between. Rank r of T keeps rows r F/T .. of `up`, so it has that part of the F numbers, and the
   same columns of `down`, so it has one of T numbers whose sum is the result. Between the two
   nothing is sent. Where the region ends the sums are taken, one all-reduce; on the way back the
   gradients of its input are summed, another one. Each rank keeps 1/T of both matrices. The program
   of one rank stands beside the parallel one. Twelve lines differ; they end in "tp", and name their
   group. Predict before you run: the bytes a rank sends on tp in a step, with 2 ranks and with 4.
   Does dp change them? Run: cc -O3 examples/08_tensor_parallel.c -o 08_tensor_parallel -lm
   -lpthread && ./08_tensor_parallel */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>

/* steps, samples of a step over all ranks, widths */
enum { STEPS = 121, B = 64, IN = 4, C = 32, F = 1024 };

typedef struct mlp {
    dt_tensor *in, *in_bias, *up, *up_bias, *down, *down_bias, *out;
} mlp;
typedef struct job {
    const char *name;
    int plain, tp, dp, stage; /* plain: the program of one rank */
    double loss[STEPS];
    /* rank 0: parameters; at most so much is padding; on tp */
    size_t param_bytes, padding, sent;
} job;

/* The k-th of a sequence of numbers that look random, in [-1, 1). */
static float number(uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* Samples first .. first+count-1 of a step: x (count,IN), y (count,1). */
static void samples(int step, int first, int count, float *x, float *y) {
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < IN; j++)
            x[i * IN + j] = number((uint32_t)((step * B + first + i) * IN + j));
        y[i] = x[i * IN] * x[i * IN + 1] + sinf(3 * x[i * IN + 2]);
    }
}

/* ---- the network on one rank ---- */

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

/* The sum over n samples of (network(x) - y)^2, as a part of the mean over the B of a step. */
static dt_tensor *one_loss(const mlp *m, dt_tensor *x, dt_tensor *y) {
    dt_tensor *h = dt_tanh(dt_linear(x, m->in, m->in_bias));    // (n,IN) -> (n,C)
    dt_tensor *wide = dt_gelu(dt_linear(h, m->up, m->up_bias)); // (n,F)
    h = dt_add(h, dt_linear(wide, m->down, m->down_bias));      // (n,C)
    return dt_mse(dt_linear(h, m->out, NULL), y, B);
}

/* ---- the same over a group ---- */

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
    dt_tensor *h = dt_tanh(dt_linear(x, m->in, m->in_bias)); // (n,IN) -> (n,C)
    dt_tensor *wide = dt_gelu(
        dt_linear(dt_tp_enter(h, tp, DT_REPLICATE), m->up, m->up_bias)); // (n,F/T)          tp
    h = dt_add(h, dt_row_linear(wide, m->down, m->down_bias, NULL, tp,
                      DT_REPLICATE)); // (n,C)               tp
    return dt_mse(dt_linear(h, m->out, NULL), y, B);
}

/* ---- training, of either ---- */

static dt_status train(dt_ctx *ctx, void *user) { /* every rank runs this */
    job *j = (job *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = j->tp }); /* dp is what is left */ // tp
    mlp m = j->plain ? one_make(ctx) : tp_make(ctx, mesh.tp);
    int n = B / mesh.replicas, first_rank = dt_ctx_rank(ctx) == 0;
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = j->stage,
                                         .mesh = &mesh,
                                         .optimizer = DT_SGD, // tp
                                         .momentum = 0.9 });
    for (int step = 0; step < STEPS; step++) {
        float x[B * IN], y[B];
        size_t before = dt_comm_bytes(ctx, DT_AXIS_TP);
        samples(step, mesh.replica * n, n, x, y); /* ranks of one tp group read the same */ // tp
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(n, IN), x),
                  *want = dt_input(ctx, DT_F32, DT_SHAPE(n, 1), y);
        dt_tensor *loss = j->plain ? one_loss(&m, in, want) : tp_loss(&m, in, want, mesh.tp);
        dt_backward(loss);
        double value = dt_item(loss);
        dt_sum_doubles(mesh.data, &value, 1); /* and have the same loss */ // tp
        dt_zero_step(opt, 0.03);
        dt_reset(ctx);
        if (first_rank) j->loss[step] = value, j->sent = dt_comm_bytes(ctx, DT_AXIS_TP) - before;
    }
    if (first_rank) j->param_bytes = dt_memory_used(ctx).live[DT_MEM_PARAMS];
    if (first_rank)
        j->padding = (size_t)dt_bucket_count(ctx) * 1024 * (size_t)mesh.sizes.dp * sizeof(float);
    return dt_error(ctx);
}

/* Prints the bytes beside their formulas; 1 if they are equal. */
static int bytes_right(const job *j) {
    size_t T = (size_t)j->tp, f = sizeof(float), n = (size_t)(B / j->dp);
    size_t params = f * (C * IN + C + (F * C + F + C * F) / T + C + C),
           sent = 2 * (2 * (T - 1) * n * C * f / T);
    printf("%-22s %12zu (%6zu)   %12zu (%6zu)\n", j->name, j->param_bytes, params, j->sent, sent);
    return j->sent == sent && j->param_bytes >= params && j->param_bytes - params < j->padding;
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
    printf("\n\na rank has            bytes of parameters (formula)   and sends on tp in a step "
           "(formula)\n");
    for (int i = 0; i < JOBS; i++) ok &= bytes_right(&jobs[i]);
    printf("formulas: 4 (C IN + 3 C + (2 C F + F) / T), padded to multiples of 1,024 numbers a "
           "rank of dp;\n"
           "          2 (T-1)/T S in the forward, as much in the backward; S = 4 C B/dp bytes, the "
           "activations of h\n");
    ok &= worst < 1e-5 && jobs[0].loss[STEPS - 1] < jobs[0].loss[0] / 10;
    printf("%s: the losses of all layouts and steps differ by at most %.1e\n", ok ? "ok" : "WRONG",
        worst);
    return ok ? 0 : 1;
}
