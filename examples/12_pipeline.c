/* 12_pipeline.c - pipeline parallelism: a network divided into stages, one per rank, and
   micro-batches that pass through the stages

   What you learn: pipeline parallelism. Each rank computes one stage, a range of layers, and holds
       the parameters of these layers only. (With 3 ranks the second stage is the tanh, which has
       none.) A stage sends its output to the next stage. To keep all ranks busy, a batch of 16
       samples is divided into 8 micro-batches. A schedule says in which order each rank computes
       the forwards and backwards of the micro-batches. A schedule is data: the library generates
       it, and this program simulates, draws and runs it. The picture shows 1F1B (PipeDream-Flush)
       with p = 3 ranks. A digit is the forward of a micro-batch, a letter is the backward of a
       micro-batch, and at a dot the rank waits. For simplicity both take one column here:

           rank 0 |012..a3b4c5d6e7f.g.h|    a warm-up of p - rank - 1 forwards,
           rank 1 |.01.a2b3c4d5e6f7g.h.|    then pairs of one forward and one
           rank 2 |..0a1b2c3d4e5f6g7h..|    backward, then the last backwards

       The losses of all schedules are bit-identical, because gradients are always added in the
       order of micro-batches. Schedules differ in two costs: the bubble, which is the time that
       ranks are idle divided by the time that they compute, and the number of micro-batches whose
       activations a rank holds.
   Run: cc -O3 examples/12_pipeline.c -o 12_pipeline -lm -lpthread && ./12_pipeline [DRAWING.svg]
   What you see: equal losses for every schedule. Then three schedules as text, each with its
       bubble, beside the formula: p-1 for naive, (p-1)/m for 1F1B and (p-1)/3m for zero bubble,
       where m is the number of micro-batches.
   Other schedules of the library: AFAB, interleaved 1F1B, ZB-V and DualPipe-V (dt_parallel.h,
       section 6). dt_schedule_write writes one as text, dt_schedule_read reads an edited one.
   Think about: before you run, predict the bytes that rank 0 of 2 sends in a step. Which schedule
       has the smallest bubble, and what does it cost? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>

enum {
    STEPS = 60,
    BATCH = 16,
    MICROS = 8,
    B = BATCH / MICROS,
    IN = 16,
    HIDDEN = 8,
    OUT = 4,
    LAYERS = 3,
    RANKS = 3
};

typedef struct job {
    int ranks, kind;    /* ranks is 1 without a pipeline; kind is a DT_SCHEDULE_* */
    double loss[STEPS]; /* this field and the next ones are results */
    size_t sent;        /* bytes that rank 0 sends in all steps */
    int live;           /* largest number of micro-batches that rank 0 holds at once */
} job;

typedef struct net {
    dt_ctx *ctx;
    dt_tensor *w[LAYERS], *b[LAYERS]; /* NULL if this rank has no parameters of the layer */
    int first[RANKS + 1];             /* stage s is layers [first[s], first[s+1]) */
    int stages, step;
    double loss; /* loss of the step, the sum over its micro-batches */
} net;

/* Returns element i of a micro-batch's x (B,IN), pseudo-random in [-1, 1). */
static float x_at(const net *n, int micro, int i) {
    uint32_t k = (uint32_t)((n->step * MICROS + micro) * B * IN + i);
    for (int round = 0; round < 2; round++) k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* The layers are linear, tanh (no parameters), linear. */
static void layer_make(net *n, int i) {
    if (i == 1) return;
    n->w[i] = dt_param(n->ctx, i ? "out.w" : "in.w",
        i ? DT_SHAPE(OUT, HIDDEN) : DT_SHAPE(HIDDEN, IN), DT_NORMAL(0.3));
    n->b[i] =
        dt_param(n->ctx, i ? "out.b" : "in.b", i ? DT_SHAPE(OUT) : DT_SHAPE(HIDDEN), DT_ZEROS);
}

static dt_tensor *layers_run(net *n, dt_tensor *x, int first, int end) {
    for (int i = first; i < end; i++) x = i == 1 ? dt_tanh(x) : dt_linear(x, n->w[i], n->b[i]);
    return x;
}

/* Returns a micro-batch's inputs x (B,IN) if `width` is IN, or its targets y (B,OUT) if `width` is
   OUT. In each row y[k] is sin(2 x[k]). */
static dt_tensor *data(net *n, int micro, int width) {
    float x[B * IN];
    for (int i = 0; i < B * width; i++) x[i] = x_at(n, micro, i / width * IN + i % width);
    for (int i = 0; i < B * width && width == OUT; i++) x[i] = sinf(2 * x[i]);
    return dt_input(n->ctx, DT_F32, DT_SHAPE(B, width), x);
}

static dt_tensor *loss_of(net *n, dt_tensor *out, int micro) {
    dt_tensor *loss = dt_mse(out, data(n, micro, OUT), BATCH * OUT);
    n->loss += dt_item(loss);
    return loss;
}

/* Runs all micro-batches on one rank, with gradient accumulation. */
static void step_on_one(net *n) {
    for (int micro = 0; micro < MICROS; micro++) {
        dt_micro(n->ctx, micro, MICROS);
        dt_backward(loss_of(n, layers_run(n, data(n, micro, IN), 0, LAYERS), micro));
        dt_reset(n->ctx);
    }
}

/* Runs one micro-batch through one stage. dt_pipe_run calls this function in the order of the
   schedule. */
static dt_tensor *stage_run(dt_tensor *x, int stage, int micro, void *user) {
    net *n = (net *)user;
    x = layers_run(n, stage ? x : data(n, micro, IN), n->first[stage], n->first[stage + 1]);
    return stage == n->stages - 1 ? loss_of(n, x, micro) : x;
}

/* Registers the parameters of this rank's stage and makes the schedule. */
static dt_schedule *pipeline_make(net *n, const dt_mesh *mesh, int kind) {
    const double costs[LAYERS] = { IN * HIDDEN, HIDDEN, HIDDEN * OUT }; /* in multiplications */
    dt_partition_stages(costs, LAYERS, n->stages, n->first, NULL, 0);
    dt_stage(n->ctx, mesh->coord.pp);
    for (int i = n->first[mesh->coord.pp]; i < n->first[mesh->coord.pp + 1]; i++) layer_make(n, i);
    return dt_schedule_make(
        n->ctx, (dt_schedule_desc){ .kind = kind, .ranks = n->stages, .micros = MICROS });
}

/* runs on every rank */
static dt_status train(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    net n = { .ctx = ctx, .stages = j->ranks };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .pp = j->ranks });
    dt_schedule *schedule = j->ranks > 1 ? pipeline_make(&n, &mesh, j->kind) : NULL;
    for (int i = 0; i < LAYERS && !schedule; i++) layer_make(&n, i);
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh });
    for (n.step = 0; n.step < STEPS; n.step++) {
        n.loss = 0;
        if (!schedule)
            step_on_one(&n);
        else
            dt_pipe_run(
                ctx, (dt_pipe_desc){
                         .schedule = schedule, .comm = mesh.pp, .run = stage_run, .user = &n });
        dt_zero_step(opt, 0.03);
        /* Only the last stage has a loss. The sum over pp gives the loss to every rank. */
        dt_sum_doubles(mesh.pp, &n.loss, 1);
        if (dt_ctx_rank(ctx) == 0) j->loss[n.step] = n.loss;
    }
    if (dt_ctx_rank(ctx) == 0)
        j->live = dt_schedule_max_in_flight(schedule, 0), j->sent = dt_comm_bytes(ctx, DT_AXIS_PP);
    return dt_error(ctx);
}

/* Simulates and prints three schedules with equal stages, in which a backward takes as long as two
   forwards. Returns 1 if the bubbles, as fractions of the work, are p-1 (naive), (p-1)/m (1F1B) and
   (p-1)/(3m) (zero bubble, which computes weight gradients where 1F1B waits). */
static int simulate(const char *drawing) {
    static const int kinds[3] = { DT_SCHEDULE_NAIVE, DT_SCHEDULE_1F1B, DT_SCHEDULE_ZB };
    static dt_span spans[3][3 * MICROS * RANKS];
    const double formula[3] = { RANKS - 1, (RANKS - 1.0) / MICROS, (RANKS - 1.0) / (3 * MICROS) };
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1 });
    dt_timeline line[3];
    char text[4096];
    int ok = 1;
    for (int i = 0; i < 3; i++) {
        dt_schedule *s =
            dt_schedule_make(ctx, (dt_schedule_desc){ kinds[i], RANKS, .micros = MICROS });
        dt_schedule_simulate(
            s, (dt_schedule_costs){ .forward = 1, .input = 1, .weight = 1 }, spans[i]);
        double bubble = dt_schedule_bubble_of(s, spans[i], -1).idle_per_work;
        ok &= dt_schedule_text(s, spans[i], 0, text, sizeof text) == DT_OK &&
              fabs(bubble - formula[i]) < 1e-9;
        printf("\n%s: bubble %.4f of the work, formula %.4f\n%s", dt_schedule_name(s), bubble,
            formula[i], text);
        line[i] = (dt_timeline){ NULL, s, spans[i] };
    }
    if (drawing) ok &= dt_schedule_svg(ctx, drawing, line, 3) == DT_OK;
    dt_ctx_free(ctx);
    return ok;
}

int main(int argc, char **argv) {
    static const char *const names[DT_SCHEDULES] = { "naive", "", "1F1B", "", "ZB" };
    static const int kinds[5] = { 0, DT_SCHEDULE_1F1B, DT_SCHEDULE_NAIVE, DT_SCHEDULE_1F1B,
        DT_SCHEDULE_ZB };
    static job jobs[5];
    int ok = 1;
    printf("%27s%20s%8s%8s\n", "first loss", "last loss", "sent", "held");
    for (int i = 0; i < 5; i++) {
        job *j = &jobs[i];
        j->ranks = i < 2 ? i + 1 : RANKS, j->kind = kinds[i];
        ok &= dt_run((dt_run_desc){ .ranks = j->ranks }, train, j) == DT_OK;
        for (int step = 0; step < STEPS; step++) ok &= j->loss[step] == jobs[0].loss[step];
        ok &= j->sent == (i ? (size_t)STEPS * BATCH * HIDDEN * sizeof(float) : 0);
        printf("%d %-8s%17.15f%20.15f%8zu%8d\n", j->ranks, i ? names[j->kind] : "rank", j->loss[0],
            j->loss[STEPS - 1], j->sent / STEPS, j->live);
    }
    ok &= jobs[0].loss[STEPS - 1] < 0.5 * jobs[0].loss[0] && simulate(argc > 1 ? argv[1] : NULL);
    printf(
        "\n%s: the losses have equal bits, the bubbles equal the formulas\n", ok ? "ok" : "WRONG");
    return !ok;
}
