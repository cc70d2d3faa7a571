/* 09_sequence_parallel.c - tensor parallelism whose ranks share out the tokens too: sequence
   parallelism

   What you learn: in 08 each rank cuts `up` and `down`, but keeps all tokens of what lies outside:
   norm, dropout, sum. With sequence parallelism each rank has T/N tokens there. A region begins
   with an all-gather instead of nothing and ends with a reduce-scatter instead of an all-reduce. An
   all-reduce is these two, so the forward sends the same bytes. The backward sends half as much
   again, as what was gathered is not kept but gathered anew. Parameters outside see a part of the
   tokens, so their gradients are parts of a sum: DT_GRAD_PARTIAL says so. Nobody else can: a norm looks
   like one whose ranks all see the same. The last run leaves the mark off the norms. Predict before
   you run: which activations are still whole on a rank? Where will the run without marks go wrong
   first? Run: cc -O3 examples/09_sequence_parallel.c -o 09_sequence_parallel -lm -lpthread &&
   ./09_sequence_parallel */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>

/* steps, sequences, tokens of each, numbers of a token, widths, layers, those of a smaller model,
   most ranks */
enum { STEPS = 31, B = 4, T = 32, IN = 4, C = 64, F = 128, L = 4, LESS = 2, MOST = 4 };

typedef struct model {
    dt_tensor *in, *out;
    struct {
        dt_tensor *gain, *up, *down, *down_bias;
    } layer[L];
} model;
typedef struct job {
    const char *name;
    int tp, sp, forget, layers; /* forget: no marks on the norms */
    double loss[STEPS];         /* all from here on are results */
    float gains[MOST][C];       /* each rank's copy of the first norm, at the end */
    /* of rank 0 in a step: bytes of activations; bytes sent on tp */
    size_t peak, forward, backward;
} job;
typedef struct pass {
    const model *model;
    int layer, step;
    dt_comm *tp;
    dt_placement outside;
    dt_tensor *index;
} pass;

/* The k-th of a sequence of numbers that look random, in [-1, 1). */
static float number(uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* A step's x (B,T,IN), y (B,T,1), and place of each token in the step (B,T). */
static void samples(int step, float *x, float *y, int32_t *index) {
    for (int i = 0; i < B * T; i++) {
        for (int k = 0; k < IN; k++)
            x[i * IN + k] = number((uint32_t)((step * B * T + i) * IN + k));
        y[i] = 3 * x[i * IN] * x[i * IN + 1] + x[i * IN + 2], index[i] = i;
    }
}

static model model_make(dt_ctx *ctx, const job *j, dt_comm *tp) {
    model m = { 0 };
    dt_param_desc rows = { .shards = { { tp, 0 } } }, columns = { .shards = { { tp, 1 } } },
                  same = { .frozen = 0 };
    dt_param_desc part = { .grad_placements = { { tp, DT_GRAD_PARTIAL } } },
                  outside = j->sp ? part : same;
    m.in = dt_param_at(ctx, "in", DT_SHAPE(C, IN), DT_NORMAL(0.5), outside);
    for (int i = 0; i < j->layers; i++) {
        dt_scope(ctx, (const char[]){ 'h', (char)('0' + i), '.', 0 });
        m.layer[i].gain =
            dt_param_at(ctx, "gain", DT_SHAPE(C), DT_ONES, j->forget ? same : outside);
        m.layer[i].up = dt_param_at(ctx, "up", DT_SHAPE(F, C), DT_NORMAL(0.1), rows);
        m.layer[i].down = dt_param_at(ctx, "down", DT_SHAPE(C, F), DT_NORMAL(0.1), columns);
        m.layer[i].down_bias = dt_param_at(ctx, "down_bias", DT_SHAPE(C), DT_ZEROS, outside);
    }
    dt_scope(ctx, NULL);
    m.out = dt_param_at(ctx, "out", DT_SHAPE(1, C), DT_NORMAL(0.1), outside);
    return m;
}

/* One layer, (B,t,C) -> (B,t,C): t is T, or T/N with sp. dt_block runs it: what is gathered is
   freed at its end. */
static dt_tensor *layer_forward(dt_tensor *x, void *user) {
    const pass *p = (const pass *)user;
    const model *m = p->model;
    int i = p->layer;
    /* (B,t,C) */
    dt_tensor *n = dt_rmsnorm(x, m->layer[i].gain, 1e-5);
    /* (B,T,F/N) */
    dt_tensor *wide = dt_gelu(dt_linear(dt_tp_enter(n, p->tp, p->outside), m->layer[i].up, NULL));
    /* (B,t,C) */
    n = dt_row_linear(wide, m->layer[i].down, m->layer[i].down_bias, NULL, p->tp, p->outside);
    /* by the tokens' places in the step */
    return dt_add(x, dt_dropout(n, 0.1, (uint64_t)(p->step * L + i), p->index));
}

/* x (B,T,IN), y (B,T,1), both whole -> the loss; with sp the part of it that this rank's tokens
   have. */
static dt_tensor *model_loss(pass p, int layers, dt_tensor *x, dt_tensor *y) {
    /* (B,t,C) */
    x = dt_linear(dt_redistribute(x, p.tp, DT_REPLICATE, p.outside), p.model->in, NULL);
    p.index = dt_redistribute(p.index, p.tp, DT_REPLICATE, p.outside);
    for (; x && p.layer < layers; p.layer++)
        x = dt_block_at(x->ctx, layer_forward, x, &p, (dt_block_desc){ .user_bytes = sizeof p });
    return dt_mse(
        dt_linear(x, p.model->out, NULL), dt_redistribute(y, p.tp, DT_REPLICATE, p.outside), B * T);
}

static dt_status train(dt_ctx *ctx, void *user) { /* every rank runs this */
    job *j = (job *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = j->tp });
    model m = model_make(ctx, j, mesh.tp);
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh, .optimizer = DT_SGD });
    for (int step = 0; step < STEPS; step++) {
        float x[B * T * IN], y[B * T];
        int32_t index[B * T];
        size_t start = dt_comm_bytes(ctx, DT_AXIS_TP);
        samples(step, x, y, index);
        dt_memory_reset_peak(ctx);
        pass p = { &m, 0, step, mesh.tp, j->sp ? DT_SHARD(1) : DT_REPLICATE,
            dt_input(ctx, DT_I32, DT_SHAPE(B, T), index) };
        dt_tensor *loss = model_loss(p, j->layers, dt_input(ctx, DT_F32, DT_SHAPE(B, T, IN), x),
            dt_input(ctx, DT_F32, DT_SHAPE(B, T, 1), y));
        size_t middle = dt_comm_bytes(ctx, DT_AXIS_TP);
        dt_backward(loss);
        size_t end = dt_comm_bytes(ctx, DT_AXIS_TP);
        double value = dt_item(loss);
        if (j->sp) dt_sum_doubles(mesh.tp, &value, 1); /* the ranks have parts of it */
        dt_zero_step(opt, 0.01);
        dt_reset(ctx);
        if (dt_ctx_rank(ctx) > 0) continue;
        j->loss[step] = value, j->forward = middle - start, j->backward = end - middle;
        j->peak = dt_memory_used(ctx).peak[DT_MEM_ACTS];
    }
    if (dt_error(ctx) == DT_OK) dt_read(m.layer[0].gain, j->gains[dt_ctx_rank(ctx)]);
    return dt_error(ctx);
}

/* Prints what one layer costs beside the formulas; 1 if they are equal. What one keeps is told by a
   model of fewer. */
static int layer_right(const job *j, const job *less) {
    size_t N = (size_t)j->tp, whole = B * T * sizeof(float),
           outside = whole * (4 * C + 1) / (j->sp ? N : 1);
    size_t peak = (j->peak - less->peak) / (L - LESS), kept = outside + whole * 2 * F / N;
    size_t sent = whole * C * (N - 1) / N, forward = 2 * sent, backward = (j->sp ? 3 : 2) * sent;
    printf("%-12s %11zu (%6zu)   %14zu (%6zu)   %15zu (%6zu)\n", j->name, peak, kept,
        j->forward / L, forward, j->backward / L, backward);
    return peak == kept && j->forward == L * forward && j->backward == L * backward;
}

/* The largest difference of losses to one rank, and of the ranks' copies of a norm to each
   other. */
static void compare(const job *j, const job *one, double *loss, double *norm) {
    for (int i = 0; i < STEPS; i++) *loss = fmax(*loss, fabs(j->loss[i] - one->loss[i]));
    for (int i = 0; i < j->tp * C; i++)
        *norm = fmax(*norm, fabs((double)j->gains[i / C][i % C] - j->gains[0][i % C]));
}

int main(void) {
    enum { JOBS = 4, UNMARKED = 3 };
    static job less[JOBS], jobs[JOBS] = { { .name = "1 rank", .tp = 1 },
        { .name = "tp 4", .tp = 4 }, { .name = "tp 4, sp", .tp = 4, .sp = 1 },
        { .name = "sp, unmarked", .tp = 4, .sp = 1, .forget = 1 } };
    double loss[JOBS] = { 0 }, norm[JOBS] = { 0 };
    int ok = 1;
    for (int i = 0; i < JOBS; i++) {
        less[i] = jobs[i];
        less[i].layers = LESS, jobs[i].layers = L;
        ok &= dt_run((dt_run_desc){ .ranks = jobs[i].tp }, train, &jobs[i]) == DT_OK;
        ok &= dt_run((dt_run_desc){ .ranks = jobs[i].tp }, train, &less[i]) == DT_OK;
        compare(&jobs[i], &jobs[0], &loss[i], &norm[i]);
    }
    printf("%-12s  loss of step 0 %14s %12s   most from one rank   copies of a norm apart\n", "",
        "1", "30");
    for (int i = 0; i < JOBS; i++)
        printf("%-12s %15.8f %14.8f %12.8f   %18.1e   %22.1e\n", jobs[i].name, jobs[i].loss[0],
            jobs[i].loss[1], jobs[i].loss[STEPS - 1], loss[i], norm[i]);
    printf("\nof one layer  activations (formula)   forward sends (formula)   backward sends "
           "(formula), bytes\n");
    for (int i = 0; i < UNMARKED; i++) ok &= layer_right(&jobs[i], &less[i]);
    ok &= loss[1] < 1e-5 && loss[2] < 1e-5 && norm[1] + norm[2] == 0 && loss[UNMARKED] > 1e-4 &&
          norm[UNMARKED] > 0;
    printf("Unmarked, ranks change their copies of a norm by the gradients of their own tokens, "
           "and nothing fails.\n");
    printf("%s: with the marks the losses of one rank, without them others\n", ok ? "ok" : "WRONG");
    return ok ? 0 : 1;
}
