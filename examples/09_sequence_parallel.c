/* 09_sequence_parallel.c - sequence parallelism: tensor parallelism that also shards the tokens
   outside its tensor-parallel layers

   What you learn: sequence parallelism (arXiv:2205.05198). In 08 the ranks shard `up` and `down`,
       but every rank computes the ops outside these two layers (norms, dropouts, residual sums)
       for all tokens. With sequence parallelism each of N ranks computes these ops for T/N tokens:

           norm (T/N tokens) --all-gather--> up, gelu, down --reduce-scatter--> dropout, sum (T/N)

       An all-reduce is a reduce-scatter followed by an all-gather, so the forward pass sends as
       many bytes as in 08. The backward pass sends 1.5 times as many bytes as in 08, because the
       gathered activations are freed after the forward pass and gathered again.
       A rank applies a parameter outside `up` and `down` to its own tokens only, so the gradient
       of this parameter is a partial sum. The model declares this with DT_GRAD_PARTIAL, and the
       ranks' gradients are added. Without the declaration each rank would update its copy of the
       parameter with the gradient of its own tokens, and the copies would drift apart. The last
       run omits the declaration for the norms on purpose: the input's placement, SHARD(1), has
       travelled through the ops, so the norm sees the mistake.
   Run: cc -O3 examples/09_sequence_parallel.c -o 09_sequence_parallel -lm -lpthread
       && ./09_sequence_parallel
   What you see: one rank, tp 4 and tp 4 with sp have equal losses. With sp each of the four ranks
       holds a quarter of the activation bytes. Without DT_GRAD_PARTIAL the first norm fails, with
       the sentence that mends it.
   Think about: before you run, which activations does every rank hold for all tokens with tp 4 but
       without sp? In which step would the run without DT_GRAD_PARTIAL first have a wrong loss? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* steps; sequences per step and tokens per sequence; inputs per token, width, feed-forward width;
   layers, and layers of the smaller model that each run is compared with; largest number of
   ranks */
enum { STEPS = 31, B = 4, T = 32, IN = 4, C = 64, F = 128, L = 4, FEWER = 2, MAX_RANKS = 4 };

typedef struct model {
    dt_tensor *in, *out;
    struct {
        dt_tensor *gain, *up, *down, *down_bias;
    } layer[L];
} model;
typedef struct job {
    const char *name;
    int tp, sp, undeclared, layers; /* undeclared is 1 if the norms lack DT_GRAD_PARTIAL */
    double loss[STEPS];             /* this field and the next ones are results */
    float gains[MAX_RANKS][C];      /* each rank's copy of the first norm's gain after training */
    /* for rank 0 in the last step: the peak bytes of activations, and the bytes sent over tp in the
       forward and in the backward pass */
    size_t peak, forward, backward;
} job;
/* The arguments of a forward pass, which every layer receives. */
typedef struct pass {
    const model *model;
    int layer, step;
    dt_comm *tp;
    dt_placement outside; /* placement of activations outside `up` and `down` */
    dt_tensor *index;     /* (B,T): number of each token within the step */
} pass;

/* Returns the k-th number of a fixed pseudo-random sequence in [-1, 1). */
static float random_number(uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* Fills in a step's inputs x (B,T,IN), targets y (B,T,1) and token numbers `index` (B,T). */
static void samples(int step, float *x, float *y, int32_t *index) {
    for (int i = 0; i < B * T; i++) {
        for (int k = 0; k < IN; k++)
            x[i * IN + k] = random_number((uint32_t)((step * B * T + i) * IN + k));
        y[i] = 3 * x[i * IN] * x[i * IN + 1] + x[i * IN + 2], index[i] = i;
    }
}

static model model_make(dt_ctx *ctx, const job *j, dt_comm *tp) {
    model m = { 0 };
    dt_param_desc rows = { .shards = { { tp, 0 } } }, columns = { .shards = { { tp, 1 } } },
                  replicated = { .frozen = 0 };
    dt_param_desc partial = { .grad_placements = { { tp, DT_GRAD_PARTIAL } } },
                  outside = j->sp ? partial : replicated;
    m.in = dt_param_at(ctx, "in", DT_SHAPE(C, IN), DT_NORMAL(0.5), outside);
    for (int i = 0; i < j->layers; i++) {
        dt_scope(ctx, (const char[]){ 'h', (char)('0' + i), '.', 0 });
        m.layer[i].gain =
            dt_param_at(ctx, "gain", DT_SHAPE(C), DT_ONES, j->undeclared ? replicated : outside);
        m.layer[i].up = dt_param_at(ctx, "up", DT_SHAPE(F, C), DT_NORMAL(0.1), rows);
        m.layer[i].down = dt_param_at(ctx, "down", DT_SHAPE(C, F), DT_NORMAL(0.1), columns);
        m.layer[i].down_bias = dt_param_at(ctx, "down_bias", DT_SHAPE(C), DT_ZEROS, outside);
    }
    dt_scope(ctx, NULL);
    m.out = dt_param_at(ctx, "out", DT_SHAPE(1, C), DT_NORMAL(0.1), outside);
    return m;
}

/* One layer, (B,t,C) -> (B,t,C), where t is T, or T/N with sp. It runs as a dt_block, which frees
   the gathered activations at its end. */
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
    /* The dropout mask depends on the token's number, so the mask is the same in every layout. */
    return dt_add(x, dt_dropout(n, 0.1, (uint64_t)(p->step * L + i), p->index));
}

/* Returns the loss for x (B,T,IN) and y (B,T,1), which every rank has in full. With sp, returns
   only the part of the loss that comes from this rank's tokens. */
static dt_tensor *model_loss(pass p, int layers, dt_tensor *x, dt_tensor *y) {
    /* (B,t,C) */
    x = dt_linear(dt_redistribute(x, p.tp, DT_REPLICATE, p.outside), p.model->in, NULL);
    p.index = dt_redistribute(p.index, p.tp, DT_REPLICATE, p.outside);
    for (; x && p.layer < layers; p.layer++)
        x = dt_block_at(x->ctx, layer_forward, x, &p, (dt_block_desc){ .user_bytes = sizeof p });
    return dt_mse(
        dt_linear(x, p.model->out, NULL), dt_redistribute(y, p.tp, DT_REPLICATE, p.outside), B * T);
}

static dt_status train(dt_ctx *ctx, void *user) { /* runs on every rank */
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
        if (j->sp) dt_sum_doubles(mesh.tp, &value, 1); /* sums the losses of all tokens */
        dt_zero_step(opt, 0.01);
        dt_reset(ctx);
        if (dt_ctx_rank(ctx) > 0) continue;
        j->loss[step] = value, j->forward = middle - start, j->backward = end - middle;
        j->peak = dt_memory_used(ctx).peak[DT_MEM_ACTS];
    }
    if (dt_error(ctx) == DT_OK) dt_read(m.layer[0].gain, j->gains[dt_ctx_rank(ctx)]);
    return dt_error(ctx);
}

/* Prints the activation bytes and the sent bytes of one layer, beside the bytes by the formulas.
   Returns 1 if they agree. The activation bytes of a layer are the difference between the peaks of
   the models with L and with FEWER layers, divided by L - FEWER. */
static int layer_matches(const job *j, const job *fewer) {
    size_t N = (size_t)j->tp, per_number = B * T * sizeof(float),
           outside = per_number * (3 * C + 1) / (j->sp ? N : 1);
    size_t peak = (j->peak - fewer->peak) / (L - FEWER), want = outside + per_number * F / N;
    size_t sent = per_number * C * (N - 1) / N, forward = 2 * sent,
           backward = (j->sp ? 3 : 2) * sent;
    printf("%-14s %11zu (%6zu)   %14zu (%6zu)   %15zu (%6zu)\n", j->name, peak, want,
        j->forward / L, forward, j->backward / L, backward);
    return peak == want && j->forward == L * forward && j->backward == L * backward;
}

/* Sets *loss to the largest difference from the losses of the run on one rank, and *norm to the
   largest difference between the ranks' copies of the first norm's gain. */
static void compare(const job *j, const job *one, double *loss, double *norm) {
    for (int i = 0; i < STEPS; i++) *loss = fmax(*loss, fabs(j->loss[i] - one->loss[i]));
    for (int i = 0; i < j->tp * C; i++)
        *norm = fmax(*norm, fabs((double)j->gains[i / C][i % C] - j->gains[0][i % C]));
}

int main(void) {
    enum { JOBS = 3 };
    static job fewer[JOBS], jobs[JOBS] = { { .name = "1 rank", .tp = 1 },
        { .name = "tp 4", .tp = 4 }, { .name = "tp 4, sp", .tp = 4, .sp = 1 } };
    static job undeclared = { .tp = 4, .sp = 1, .undeclared = 1, .layers = L };
    double loss[JOBS] = { 0 }, norm[JOBS] = { 0 };
    dt_report report;
    int ok = 1;
    for (int i = 0; i < JOBS; i++) {
        fewer[i] = jobs[i];
        fewer[i].layers = FEWER, jobs[i].layers = L;
        ok &= dt_run((dt_run_desc){ .ranks = jobs[i].tp }, train, &jobs[i]) == DT_OK;
        ok &= dt_run((dt_run_desc){ .ranks = jobs[i].tp }, train, &fewer[i]) == DT_OK;
        compare(&jobs[i], &jobs[0], &loss[i], &norm[i]);
    }
    printf("%-14s  loss of step 0 %14s %12s   largest difference: to 1 rank   between copies of a "
           "norm\n",
        "", "1", "30");
    for (int i = 0; i < JOBS; i++)
        printf("%-14s %15.8f %14.8f %12.8f   %29.1e   %22.1e\n", jobs[i].name, jobs[i].loss[0],
            jobs[i].loss[1], jobs[i].loss[STEPS - 1], loss[i], norm[i]);
    printf("\nbytes of a layer  activations (formula)   sent forward (formula)   sent backward "
           "(formula)\n");
    for (int i = 0; i < JOBS; i++) ok &= layer_matches(&jobs[i], &fewer[i]);
    ok &= loss[1] < 1e-5 && loss[2] < 1e-5 && norm[1] + norm[2] == 0;
    printf("\nNow the same with sp, but without DT_GRAD_PARTIAL for the norms:\n");
    ok &= dt_run((dt_run_desc){ .ranks = 4, .report = &report }, train, &undeclared) == DT_ERR_ARG;
    ok &= strstr(report.text, "DT_GRAD_PARTIAL") != NULL;
    printf("%s: with DT_GRAD_PARTIAL the losses equal those of one rank, without it the norm "
           "fails\n",
        ok ? "ok" : "WRONG");
    return ok ? 0 : 1;
}
