/* 14_three_axes.c - data, tensor and pipeline parallelism together on 2 x 2 x 2 ranks, with ZeRO-2

   What you learn: the axes of the device mesh are independent. A layer names the tp group over
       which its matrices are sharded. A pipeline stage consists of the layers that its ranks
       register. A rank reads the samples of its replica index. The description of each parameter
       tells the optimizer which ranks hold which shard. So the model below is written once, and
       each row of the printed table is the same model with another dt_mesh_desc.

           axis   what a rank sends                         what the axis saves
           dp     gradients and values; the bytes do not    memory of a rank, only with ZeRO
                  depend on the batch size
           tp     activations of every layer                memory of a rank
           pp     activations between stages only           memory of a rank, but ranks wait
                                                            for each other (bubble)
   Run: cc -O3 examples/14_three_axes.c -o 14_three_axes -lm -lpthread && ./14_three_axes
   What you see: all rows have the losses, norms and weights of one rank, except for rounding: sums
       run in a different order.
   Think about: before you run, which axis sends most here? Which axis would send most with eight
       times as many samples? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* L residual layers W -> F -> W */
enum { STEPS = 20, BATCH = 32, MICROS = 4, W = 64, F = 128, L = 8 };

typedef struct job {
    dt_mesh_desc mesh;
    int stage;                       /* ZeRO stage */
    double loss[STEPS], norm[STEPS]; /* results from this field on, filled in by rank 0 */
    double square_sum;               /* sum of squares of the last layer's `down` after training */
    double sent[DT_AXES];            /* bytes sent in the last step */
    size_t held;                     /* bytes of values, gradients and optimizer state on rank 0 */
} job;

typedef struct net {
    dt_mesh mesh;
    dt_tensor *up[L], *up_bias[L], *down[L], *down_bias[L];
    int step, b; /* b: samples of a micro-batch on one replica */
    double loss; /* this rank's part of the step's loss */
} net;

static int first_layer(const net *n, int stage) { return L * stage / n->mesh.sizes.pp; }

static void layer_make(dt_ctx *ctx, net *n, int i) {
    char prefix[24];
    snprintf(prefix, sizeof prefix, "layer.%d.", i);
    dt_scope(ctx, prefix);
    dt_comm *tp = n->mesh.tp;
    n->up[i] = dt_param_at(
        ctx, "up.w", DT_SHAPE(F, W), DT_NORMAL(0.1), (dt_param_desc){ .shards = { { tp, 0 } } });
    n->up_bias[i] =
        dt_param_at(ctx, "up.b", DT_SHAPE(F), DT_ZEROS, (dt_param_desc){ .shards = { { tp, 0 } } });
    n->down[i] = dt_param_at(
        ctx, "down.w", DT_SHAPE(W, F), DT_NORMAL(0.05), (dt_param_desc){ .shards = { { tp, 1 } } });
    n->down_bias[i] = dt_param(ctx, "down.b", DT_SHAPE(W), DT_ZEROS);
    dt_scope(ctx, NULL);
}

/* Returns the targets (b,W) of this replica's samples of a micro-batch if `is_y` is set, else their
   inputs (b,W). */
static dt_tensor *samples(dt_ctx *ctx, const net *n, int micro, int is_y) {
    float v[BATCH * W];
    int first = (micro * n->mesh.replicas + n->mesh.replica) * n->b;
    for (int i = 0; i < n->b * W; i++) {
        int sample = n->step * BATCH + first + i / W, column = i % W;
        v[i] = (float)sin(0.7 * sample + 0.3 * column * (1 + sample % 5));
        if (is_y) v[i] = 0.5f * v[i] + 0.25f * (float)cos(0.1 * column);
    }
    return dt_input(ctx, DT_F32, DT_SHAPE(n->b, W), v);
}

/* Runs one stage of the pipeline. Without a pipeline, one stage has all layers. */
static dt_tensor *run(dt_tensor *x, int stage, int micro, void *user) {
    net *n = (net *)user;
    dt_ctx *ctx = n->up[first_layer(n, stage)]->ctx;
    if (stage == 0) x = samples(ctx, n, micro, 0);
    for (int i = first_layer(n, stage); i < first_layer(n, stage + 1); i++) {
        dt_linear_desc gelu = { .activation = DT_ACT_GELU };
        dt_tensor *h = dt_column_linear(x, n->up[i], n->up_bias[i], gelu, n->mesh.tp, DT_REPLICATE);
        x = dt_row_linear(h, n->down[i], n->down_bias[i], x, n->mesh.tp, DT_REPLICATE);
    }
    if (stage + 1 < n->mesh.sizes.pp) return x;
    /* The divisor is the number of elements of the whole step, so the losses and gradients of all
       micro-batches and replicas add up to those of the step. */
    x = dt_mse(x, samples(ctx, n, micro, 1), BATCH * W);
    n->loss += dt_item(x);
    return x;
}

/* Returns the sum of the squares of the last layer's `down`. Sums over tp, whose ranks hold shards,
   and over pp, where only the last stage has this layer; the ranks of dp hold copies. */
static double last_layer_square_sum(dt_ctx *ctx, const net *n) {
    float v[W * F];
    double sum = 0;
    if (n->down[L - 1] && dt_read(n->down[L - 1], v) == DT_OK)
        for (int64_t i = 0; i < dt_count(n->down[L - 1]->shape); i++) sum += (double)v[i] * v[i];
    dt_sum_doubles(n->mesh.tp, &sum, 1);
    dt_sum_doubles(n->mesh.pp, &sum, 1);
    return dt_error(ctx) == DT_OK ? sum : NAN;
}

static dt_status train(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    net n = { .mesh = dt_mesh_make(ctx, j->mesh) };
    int p = n.mesh.sizes.pp, me = n.mesh.coord.pp;
    n.b = BATCH / MICROS / n.mesh.replicas;
    dt_stage(ctx, me);
    for (int i = first_layer(&n, me); i < first_layer(&n, me + 1); i++) layer_make(ctx, &n, i);
    dt_zero *opt =
        dt_zero_make(ctx, (dt_zero_desc){ .stage = j->stage, .mesh = &n.mesh, .clip = 1 });
    dt_schedule *s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_1F1B, .ranks = p, .micros = MICROS });
    for (n.step = 0; n.step < STEPS && dt_error(ctx) == DT_OK; n.step++) {
        size_t before[DT_AXES];
        for (int a = 0; a < DT_AXES; a++) before[a] = dt_comm_bytes(ctx, (dt_axis)a);
        n.loss = 0;
        dt_pipe_run(
            ctx, (dt_pipe_desc){ .schedule = s, .comm = n.mesh.pp, .run = run, .user = &n });
        dt_sum_doubles(
            n.mesh.data, &n.loss, 1); /* sums over replicas; only the last stage has a loss */
        dt_sum_doubles(n.mesh.pp, &n.loss, 1); /* gives the loss to all stages */
        double norm = dt_zero_step(opt, 0.003).grad_norm;
        if (dt_ctx_rank(ctx) != 0) continue;
        j->loss[n.step] = n.loss;
        j->norm[n.step] = norm;
        for (int a = 0; a < DT_AXES; a++)
            j->sent[a] = (double)(dt_comm_bytes(ctx, (dt_axis)a) - before[a]);
    }
    dt_memory m = dt_memory_used(ctx);
    double square_sum = last_layer_square_sum(ctx, &n);
    if (dt_ctx_rank(ctx) == 0) j->square_sum = square_sum;
    if (dt_ctx_rank(ctx) == 0)
        j->held = m.live[DT_MEM_PARAMS] + m.live[DT_MEM_GRADS] + m.live[DT_MEM_OPTIM];
    return dt_error(ctx);
}

int main(void) {
    static job jobs[] = { { .mesh = { .dp = 1 } }, { .mesh = { .dp = 2 }, .stage = 2 },
        { .mesh = { .tp = 2 } }, { .mesh = { .pp = 2 } },
        { .mesh = { .dp = 2, .tp = 2 }, .stage = 2 }, { .mesh = { .dp = 2, .pp = 2 }, .stage = 2 },
        { .mesh = { .tp = 2, .pp = 2 } }, { .mesh = { .dp = 2, .tp = 2, .pp = 2 }, .stage = 2 } };
    int ok = 1;
    printf("dp tp pp  ZeRO  first loss  last loss  bytes on rank 0  sent in a step: dp      tp     "
           " pp   difference\n");
    for (size_t k = 0; k < sizeof jobs / sizeof *jobs; k++) {
        job *j = &jobs[k], *one = &jobs[0];
        int dp = j->mesh.dp ? j->mesh.dp : 1, tp = j->mesh.tp ? j->mesh.tp : 1,
            pp = j->mesh.pp ? j->mesh.pp : 1;
        double max = 0;
        if (dt_run((dt_run_desc){ .ranks = dp * tp * pp }, train, j) != DT_OK) return 1;
        for (int i = 0; i < STEPS; i++)
            max = fmax(max,
                fmax(fabs(j->loss[i] / one->loss[i] - 1), fabs(j->norm[i] / one->norm[i] - 1)));
        max = fmax(max, fabs(j->square_sum / one->square_sum - 1));
        ok &= max < 1e-4 && j->loss[STEPS - 1] < 0.7 * j->loss[0];
        printf("%2d %2d %2d  %4d  %10.6f %10.6f  %14zu  %20.0f %7.0f %7.0f   %.1e\n", dp, tp, pp,
            j->stage, j->loss[0], j->loss[STEPS - 1], j->held, j->sent[DT_AXIS_DP],
            j->sent[DT_AXIS_TP], j->sent[DT_AXIS_PP], max);
    }
    puts(ok ? "ok: every layout trains as one rank does" : "WRONG");
    return !ok;
}
