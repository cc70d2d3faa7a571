/* test_pipe.c - dt_pipe_run: running schedules on a model of small random layers

   The model is a list of small user layers drawn at random: of different widths, some without
   parameters, some frozen, some recomputed, one that returns its input. So the messages between
   stages differ from edge to edge. The model is split into stages and run with every kind of
   schedule at every ZeRO stage. Losses, norms, every gradient and every parameter must equal, bit
   for bit, a run with the same data groups, all layers on one rank and no pipeline. They must equal
   a run on a single rank up to rounding; models with tied weights, too, are compared up to
   rounding.

   The traffic between stages, the number of live micro-batches and the duration of a schedule are
   compared with values that this test derives independently of the library. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include "tests/support/jitter.h"
#include <arpa/inet.h>
#include <sys/mman.h>
#include <sys/wait.h>

// ==== The model =================================================================================

#define LR 0.05
enum {
    MAX_LAYERS = 16,
    MAX_WIDTH = 48,
    MAX_ROWS = 24,
    MAX_MICROS = 96,
    MAX_STEPS = 6,
    MAX_VALUES = 60000,
    MAX_RANKS = 16
};
enum { LINEAR = 0, RESIDUAL, TANH, SAME, FROZEN, RESHAPE, SIDE_LOSS, UNUSED, NORMED, TIED, KINDS };
enum { LAYERS_DRAWN = 0, LAYERS_TIED, LAYERS_SAME, LAYERS_EMPTY_ENDS, LAYERS_EQUAL, LAYERS_WIDE };
enum { MAP_TURN = 0, MAP_BLOCKS, MAP_V };
enum { OWN_AFAB = 1, OWN_NAIVE, OWN_LATE_W, OWN_LOCAL, OWN_AHEAD };
enum { FAIL_NULL = 1, FAIL_LOUD, FAIL_SHAPE, FAIL_TYPE };

typedef struct layer {
    int kind, in, out, again, stage;
} layer;

/* One run. 0 is the default in every field except dp, pp and micros. */
typedef struct config {
    uint32_t model; /* seed of the layers */
    int layers, what, rows, dtype;
    int dp, pp, chunks, kind, micros, map, own, group;
    int plain; /* 1: no pipeline; dt_backward of one micro-batch after another */
    int zero, shard, kept, no_overlap, tree, folder, adam, poison;
    int recompute, evaluates, steps;
    double clip;
    int fail, fail_stage, fail_micro;
    const dt_schedule_costs *pace;
} config;

typedef struct result {
    double loss[MAX_STEPS][MAX_MICROS], evaluated[MAX_MICROS], norm[MAX_STEPS], scale[MAX_STEPS];
    double norms[MAX_RANKS][MAX_STEPS]; /* equal on all ranks */
    double grad[MAX_VALUES], value[MAX_VALUES];
    size_t pp_bytes[MAX_RANKS], dp_bytes[MAX_RANKS], padded[MAX_RANKS], acts[MAX_RANKS];
    size_t allocations[MAX_RANKS][MAX_STEPS];
    int tapes[MAX_RANKS], slots[MAX_RANKS], live[MAX_RANKS], calls;
    /* 1: ZeRO-3 has a separate gather order for each stage */
    int planned[MAX_RANKS];
    dt_span spans[4096];
    double makespan;             /* simulated */
    dt_report report[MAX_RANKS]; /* over tcp */
    double took[MAX_RANKS];
} result;

typedef struct job {
    config c;
    result *r; /* in memory shared by forks */
    layer layer[MAX_LAYERS];
    const char *folder;
} job;

static uint32_t mix(uint32_t a, uint32_t b) {
    uint32_t h = a * 0x9E3779B1u ^ (b + 0x7F4A7C15u) * 0x85EBCA6Bu;
    h = (h ^ (h >> 15)) * 0x2C1B3C6Du;
    h = (h ^ (h >> 12)) * 0x297A2D39u;
    return h ^ (h >> 15);
}
static double noise(uint32_t a, uint32_t b) { return mix(a, b) / 2147483648.0 - 1; } /* [-1, 1) */
static int draw(uint32_t seed, uint32_t what, int n) {
    return (int)(mix(seed, what) % (uint32_t)n);
}

static int stages_of(const config *c) { return c->plain ? 1 : c->pp * (c->chunks ? c->chunks : 1); }

static void make_layers(job *j) {
    const config *c = &j->c;
    int width = 3 + draw(c->model, 1, 9), stages = stages_of(c);
    for (int i = 0; i < c->layers; i++) {
        layer *l = &j->layer[i];
        uint32_t seed = mix(c->model, 100 + (uint32_t)i);
        l->kind = draw(seed, 2, TIED);
        if (c->what == LAYERS_SAME) l->kind = i % 2 ? SAME : LINEAR;
        if (c->what == LAYERS_EMPTY_ENDS) l->kind = i == 1 ? LINEAR : TANH;
        if (c->what == LAYERS_EQUAL || c->what == LAYERS_WIDE) l->kind = LINEAR;
        /* at least one layer has parameters */
        if (c->what == LAYERS_DRAWN && i == c->layers / 2) l->kind = LINEAR;
        l->in = width;
        int changes =
            l->kind == LINEAR || l->kind == FROZEN || l->kind == SIDE_LOSS || l->kind == UNUSED;
        if (changes && c->what == LAYERS_DRAWN)
            width = draw(seed, 3, 5) ? 2 + draw(seed, 4, 12) : MAX_WIDTH - 4;
        if (c->what == LAYERS_EQUAL) l->in = width = 16;
        if (c->what == LAYERS_WIDE) l->in = width = MAX_WIDTH;
        if (c->what == LAYERS_TIED && (i == 0 || i == c->layers - 1))
            l->kind = TIED, l->in = 9, width = 6;
        if (c->what == LAYERS_TIED && i == c->layers - 2) l->kind = LINEAR, width = 9;
        l->out = width;
        l->again = c->recompute && draw(seed, 5, 3) < c->recompute;
        l->stage = (int)((int64_t)i * stages / c->layers);
    }
}

/* Stores the shapes of a layer's parameters and returns their number. */
static int layer_params(const layer *l, dt_shape shape[2]) {
    switch (l->kind) {
    case LINEAR:
    case SIDE_LOSS:
    case UNUSED:
        shape[0] = DT_SHAPE(l->out, l->in);
        shape[1] = DT_SHAPE(l->out);
        return 2;
    case RESIDUAL: shape[0] = DT_SHAPE(l->in, l->in); return 1;
    case FROZEN:
    case TIED: shape[0] = DT_SHAPE(l->out, l->in); return 1;
    case NORMED: shape[0] = shape[1] = DT_SHAPE(l->in); return 2;
    default: return 0;
    }
}

// ==== A rank ====================================================================================

typedef struct net {
    job *j;
    dt_ctx *ctx;
    dt_mesh mesh;
    dt_tensor *p[MAX_LAYERS][2];
    int step, evaluating, replica;
} net;

static dt_dtype type_of(const config *c) {
    return c->dtype == 2 ? DT_BF16 : c->dtype == 1 ? DT_F32 : DT_F64;
}

/* Random values of the model's type that f32 and bf16 represent exactly, so that all layouts start
   from equal values. */
static dt_tensor *numbers(net *n, dt_shape shape, uint32_t key) {
    const config *c = &n->j->c;
    double wide[MAX_ROWS * MAX_WIDTH];
    float narrow[MAX_ROWS * MAX_WIDTH];
    for (int64_t i = 0; i < dt_count(shape); i++)
        wide[i] = narrow[i] = (float)noise(key, (uint32_t)i);
    if (c->dtype == 0) return dt_input(n->ctx, DT_F64, shape, wide);
    dt_tensor *x = dt_input(n->ctx, DT_F32, shape, narrow);
    return c->dtype == 2 ? dt_cast(x, DT_BF16) : x;
}

typedef struct layer_call {
    net *n;
    int layer;
    uint32_t key;
} layer_call;

static dt_tensor *run_layer(dt_tensor *x, void *user) {
    const layer_call *call = (const layer_call *)user;
    net *n = call->n;
    const layer *l = &n->j->layer[call->layer];
    dt_tensor **p = n->p[call->layer];
    switch (l->kind) {
    case LINEAR: return dt_tanh(dt_linear(x, p[0], p[1]));
    case RESIDUAL: return dt_add(x, dt_linear(dt_gelu(x), p[0], NULL));
    case TANH: return dt_tanh(x);
    case SAME: return x;
    case FROZEN:
    case TIED: return dt_tanh(dt_linear(x, p[0], NULL));
    case RESHAPE:
        if (x && x->shape.nd == 2) return dt_reshape(x, DT_SHAPE(1, x->shape.d[0], x->shape.d[1]));
        return x ? dt_reshape(x, DT_SHAPE(x->shape.d[1], x->shape.d[2])) : NULL;
    case SIDE_LOSS:
        x = dt_tanh(dt_linear(x, p[0], p[1]));
        return x ? dt_loss(x,
                       dt_mse(
                           x, numbers(n, x->shape, call->key), 7.0 * n->j->c.micros * n->j->c.dp),
                       0.25)
                 : x;
    case UNUSED: return dt_tanh(dt_linear(x, p[0], NULL));
    default: return dt_layernorm(x, p[0], p[1], 1e-5);
    }
}

static uint32_t data_key(const net *n, int micro) {
    uint32_t sample = (uint32_t)(micro * n->j->c.dp + n->replica);
    return mix(mix(n->j->c.model, 77), (uint32_t)n->step * 1000 + sample);
}

static dt_tensor *run_layers(net *n, dt_tensor *x, int first, int end, int micro) {
    for (int i = first; i < end; i++) {
        layer_call call = { n, i, data_key(n, micro) + 5 };
        dt_block_desc d = { .recompute = n->j->layer[i].again, .user_bytes = sizeof call };
        x = dt_block_at(n->ctx, run_layer, x, &call, d);
    }
    return x;
}

static dt_tensor *model_input(net *n, int micro) {
    return numbers(n, DT_SHAPE(n->j->c.rows, n->j->layer[0].in), data_key(n, micro));
}

/* Divides by the number of values in the full step. */
static dt_tensor *model_loss(net *n, dt_tensor *x, int micro) {
    if (!x) return NULL;
    double all = (double)dt_count(x->shape) * n->j->c.micros * n->j->c.dp;
    dt_tensor *loss = dt_mse(x, numbers(n, x->shape, data_key(n, micro) + 1), all);
    int at = micro * n->j->c.dp + n->replica;
    double *to = n->evaluating ? n->j->r->evaluated : n->j->r->loss[n->step];
    if (loss) to[at] = dt_item(loss);
    return loss;
}

static dt_tensor *wrong_output(net *n, dt_tensor *x) {
    const config *c = &n->j->c;
    if (c->fail == FAIL_LOUD) dt_fail(n->ctx, DT_ERR_NUMERIC, "a failure of the user's function");
    if (c->fail == FAIL_NULL || c->fail == FAIL_LOUD) return NULL;
    if (c->fail == FAIL_TYPE) return dt_cast(x, DT_F32);
    return dt_reshape(x, DT_SHAPE(dt_count(x->shape)));
}

static dt_tensor *run_stage(dt_tensor *x, int stage, int micro, void *user) {
    net *n = (net *)user;
    const config *c = &n->j->c;
    int stages = stages_of(c), first = 0, end = 0;
    while (first < c->layers && n->j->layer[first].stage < stage) first++;
    for (end = first; end < c->layers && n->j->layer[end].stage == stage; end++) {
    }
    __atomic_fetch_add(&n->j->r->calls, 1, __ATOMIC_RELAXED);
    CHECK_MSG((x == NULL) == (stage == 0), "stage %d gets %s as input", stage,
        x ? "a tensor" : "nothing");
    if (stage == 0) x = model_input(n, micro);
    x = run_layers(n, x, first, end, micro);
    if (c->fail && stage == c->fail_stage && micro == c->fail_micro && n->step == 1)
        return wrong_output(n, x);
    return stage == stages - 1 ? model_loss(n, x, micro) : x;
}

/* ---- user-defined schedules ---- */

static void add_all(dt_schedule *s, int r, dt_phase phase, int chunk) {
    for (int m = 0; m < dt_schedule_micros(s); m++) dt_schedule_add(s, r, phase, m, chunk);
}
static void add_chunks(dt_schedule *s, int r, dt_phase phase, int micro, int down) {
    int n = dt_schedule_chunks(s);
    for (int k = 0; k < n; k++) dt_schedule_add(s, r, phase, micro, down ? n - 1 - k : k);
}

/* Two consecutive chunks on one rank: the gradient of one chunk is still unread when the next F
   needs a slot. */
static void generate_local(dt_schedule *s, int r) {
    int m = dt_schedule_micros(s);
    add_chunks(s, r, DT_FORWARD, 0, 0);
    dt_schedule_add(s, r, DT_BACKWARD, 0, 1);
    for (int k = 1; k < m; k++) {
        add_chunks(s, r, DT_FORWARD, k, 0);
        dt_schedule_add(s, r, DT_BACKWARD, k - 1, 0);
        dt_schedule_add(s, r, DT_BACKWARD, k, 1);
    }
    dt_schedule_add(s, r, DT_BACKWARD, m - 1, 0);
}

/* 2 ranks with 2 chunks each: rank 0 sends all outputs of its first chunk before rank 1 uses the
   second of them. */
static void generate_ahead(dt_schedule *s, int r) {
    int m = dt_schedule_micros(s);
    if (r == 0) add_all(s, r, DT_FORWARD, 0), add_all(s, r, DT_FORWARD, 1);
    for (int k = 0; k < m && r == 1; k++) add_chunks(s, r, DT_FORWARD, k, 0);
    for (int k = 0; k < m; k++) add_chunks(s, r, DT_BACKWARD, k, 1);
}

static void generate(dt_schedule *s, void *user) {
    const config *c = (const config *)user;
    for (int r = 0; r < dt_schedule_ranks(s); r++) {
        int chunks = dt_schedule_chunks(s), micros = dt_schedule_micros(s);
        if (c->own == OWN_AHEAD) {
            generate_ahead(s, r);
        } else if (c->own == OWN_LOCAL && r == dt_schedule_ranks(s) - 1) {
            generate_local(s, r);
        } else if (c->own == OWN_NAIVE) {
            for (int m = 0; m < micros; m++) {
                add_chunks(s, r, DT_FORWARD, m, 0);
                add_chunks(s, r, DT_BACKWARD, m, 1);
            }
        } else {
            for (int k = 0; k < chunks; k++) add_all(s, r, DT_FORWARD, k);
            for (int k = chunks - 1; k >= 0; k--)
                add_all(s, r, c->own == OWN_LATE_W ? DT_BACKWARD_INPUT : DT_BACKWARD, k);
            for (int k = 0; k < chunks && c->own == OWN_LATE_W; k++)
                add_all(s, r, DT_BACKWARD_WEIGHT, k);
        }
    }
}

static int in_v(const config *c) {
    return !c->own && (c->kind == DT_SCHEDULE_ZBV || c->kind == DT_SCHEDULE_DUALPIPE_V);
}

/* Returns the number of chunks of each rank; `several` is the choice of kinds that have one. */
static int chunks_of(int kind, int several) {
    return kind == DT_SCHEDULE_INTERLEAVED                             ? several
           : kind == DT_SCHEDULE_ZBV || kind == DT_SCHEDULE_DUALPIPE_V ? 2
                                                                       : 1;
}

static int stage_of(int rank, int chunk, void *user) {
    const config *c = (const config *)user;
    if (c->map == MAP_BLOCKS) return rank * c->chunks + chunk;
    if (c->map == MAP_V) return chunk * c->pp + (chunk % 2 ? c->pp - 1 - rank : rank);
    return chunk * c->pp + rank;
}

static dt_schedule *make_schedule(dt_ctx *ctx, config *c) {
    return dt_schedule_make(ctx, (dt_schedule_desc){ .kind = c->own ? 0 : c->kind,
                                     .ranks = c->pp,
                                     .micros = c->micros,
                                     .chunks = c->chunks,
                                     .micro_group = c->group,
                                     .generate = c->own ? generate : NULL,
                                     .stage_of = in_v(c) ? NULL : stage_of,
                                     .user = c });
}

/* ---- parameters, steps, results ---- */

static void register_layer(net *n, int i, dt_comm *ends) {
    const layer *l = &n->j->layer[i];
    dt_shape shape[2];
    char prefix[16], name[2] = "w";
    int tied = l->kind == TIED, params = layer_params(l, shape);
    snprintf(prefix, sizeof prefix, "h%d.", tied ? 0 : i);
    dt_scope(n->ctx, prefix);
    if (tied && i > 0 && dt_param_find(n->ctx, "h0.w")) {
        n->p[i][0] = n->p[0][0];
        return;
    }
    for (int k = 0; k < params; k++, name[0]++) {
        dt_param_desc d = {
            .frozen = l->kind == FROZEN, .dtype = type_of(&n->j->c), .lr_scale = i % 3 ? 0 : 1.5
        };
        if (tied)
            d.lr_scale = 0, d.grad_placements[0].comm = ends,
            d.grad_placements[0].kind = DT_GRAD_PARTIAL, d.shared_stages = in_v(&n->j->c);
        dt_init init = l->kind == NORMED && k == 0 ? DT_ONES : DT_NORMAL(1.3 / sqrt(l->in));
        n->p[i][k] = dt_param_at(n->ctx, name, shape[k], init, d);
    }
}

/* Offset of a parameter in the result arrays. */
static size_t offset_of(const job *j, int layer, int k) {
    size_t at = 0;
    for (int i = 0; i <= layer; i++) {
        dt_shape shape[2];
        int params = layer_params(&j->layer[i], shape);
        for (int p = 0; p < params && (i < layer || p < k); p++) at += (size_t)dt_count(shape[p]);
    }
    return at;
}

static void widen(dt_dtype type, const void *from, double *to, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = type == DT_BF16 ? (uint32_t)((const uint16_t *)from)[i] << 16 : 0;
        float half;
        memcpy(&half, &bits, sizeof half);
        to[i] = type == DT_F64   ? ((const double *)from)[i]
                : type == DT_F32 ? ((const float *)from)[i]
                                 : half;
    }
}

/* Stores every gradient, or every value, of this rank's parameters. All ranks call it; the first
   rank of a data group stores. */
static void keep(net *n, dt_zero *zero, int values) {
    double host[MAX_WIDTH * MAX_WIDTH];
    for (int i = 0; i < n->j->c.layers; i++)
        for (int k = 0; k < 2 && n->p[i][k]; k++) {
            dt_tensor *t = n->p[i][k];
            double *to = (values ? n->j->r->value : n->j->r->grad) + offset_of(n->j, i, k);
            if (!values && !t->needs_grad) continue;
            dt_status status = values ? dt_read(t, host) : dt_zero_grad(zero, t, host);
            if (status == DT_OK && dt_comm_rank(n->mesh.data) == 0)
                widen(values ? t->dtype : dt_grad_dtype(t), host, to, (size_t)dt_count(t->shape));
        }
}

static void backward_without_pipeline(net *n) {
    const config *c = &n->j->c;
    for (int micro = 0; micro < c->micros; micro++) {
        dt_micro(n->ctx, micro, c->micros);
        dt_backward(
            model_loss(n, run_layers(n, model_input(n, micro), 0, c->layers, micro), micro));
        dt_reset(n->ctx);
    }
}

static int count_tapes(const dt_ctx *ctx) {
    int tapes = 0;
    for (int t = 0; t < ctx->tape_capacity; t++) tapes += ctx->tapes[t] != NULL;
    return tapes;
}

static void evaluate(net *n, const dt_pipe_desc *run) {
    dt_pipe_desc d = *run;
    d.forward_micros = n->j->c.evaluates;
    n->evaluating = 1;
    dt_pipe_run(n->ctx, d);
    n->evaluating = 0;
}

static void measure(net *n, const dt_schedule *s, const size_t before[2]) {
    int rank = n->mesh.coord.pp, world = dt_ctx_rank(n->ctx);
    result *r = n->j->r;
    r->allocations[world][n->step] = dt_memory_used(n->ctx).allocations;
    r->acts[world] = dt_memory_used(n->ctx).peak[DT_MEM_ACTS];
    dt_memory_reset_peak(n->ctx); /* the last step's peak stays */
    r->pp_bytes[world] = dt_comm_bytes(n->ctx, DT_AXIS_PP) - before[0];
    r->dp_bytes[world] = dt_comm_bytes(n->ctx, DT_AXIS_DP) - before[1];
    r->padded[world] = 0;
    for (int u = 0; u < dt_bucket_count(n->ctx); u++)
        r->padded[world] += dt_bucket_get(n->ctx, u)->padded;
    r->tapes[world] = count_tapes(n->ctx);
    r->slots[world] = dt_schedule_slots(s, rank);
    r->live[world] = dt_schedule_max_in_flight(s, rank);
}

static dt_zero *make_zero(net *n) {
    const config *c = &n->j->c;
    const char *folder = c->folder ? n->j->folder : NULL;
    return dt_zero_make(n->ctx, (dt_zero_desc){ .stage = c->zero,
                                    .shard_group = c->shard,
                                    .keep_gathered = c->kept,
                                    .mesh = &n->mesh,
                                    .optimizer = c->adam ? DT_ADAMW : DT_SGD,
                                    .momentum = 0.5,
                                    .weight_decay = 0.01,
                                    .clip = c->clip,
                                    .offload_optim = folder,
                                    .offload_params = c->zero == 3 ? folder : NULL,
                                    .offload_chunk = folder ? 300 : 0,
                                    .tree = c->tree,
                                    .no_overlap = c->no_overlap,
                                    .poison = c->poison });
}

/* 1 if the gather plan of each of this rank's stages holds exactly the units of the stage.
   Prefetching follows the plan. */
static int are_planned(const dt_zero *zero) {
    int good = 1;
    for (int stage = 0; stage < zero->n_stages; stage++) {
        const dt__gather_plan *plan = &zero->gather_plans[DT__GATHER_PLANS * stage];
        int units = 0;
        for (int u = 0; u < zero->n_buckets; u++) units += zero->buckets[u].bucket.stage == stage;
        good &= plan->n == units;
        for (int i = 0; i < plan->n; i++)
            good &= zero->buckets[plan->items[i].bucket].bucket.stage == stage;
    }
    return good;
}

/* Stores the measured and the simulated duration. Ranks may be threads that share j->r. */
static void keep_spans(net *n, const dt_schedule *s, const dt_span *mine) {
    result *r = n->j->r;
    dt_span *all = (dt_span *)calloc(2, sizeof r->spans), *ideal = all + 4096;
    if (dt_pipe_gather_spans(n->mesh.pp, s, mine, all) == DT_OK && dt_ctx_rank(n->ctx) == 0) {
        memcpy(r->spans, all, sizeof r->spans);
        dt_schedule_simulate(s, *n->j->c.pace, ideal);
        r->makespan = dt_schedule_bubble_of(s, ideal, -1).makespan;
    }
    free(all);
}

static dt_status train(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    config *c = &j->c;
    net n;
    dt_span mine[2048];
    memset(&n, 0, sizeof n);
    n.j = j;
    n.ctx = ctx;
    n.mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = c->dp, .pp = c->plain ? 1 : c->pp });
    n.replica = n.mesh.coord.dp;
    dt_schedule *s = c->plain ? NULL : make_schedule(ctx, c);
    int first_rank = dt_schedule_rank_of(s, 0),
        last_rank = dt_schedule_rank_of(s, stages_of(c) - 1);
    int is_end = n.mesh.coord.pp == first_rank || n.mesh.coord.pp == last_rank;
    dt_comm *ends =
        c->what == LAYERS_TIED ? dt_comm_split(n.mesh.pp, is_end ? 0 : -1, 0, "ends") : NULL;
    for (int i = 0; i < c->layers; i++) {
        if (s && dt_schedule_rank_of(s, j->layer[i].stage) != n.mesh.coord.pp) continue;
        dt_stage(ctx, j->layer[i].stage);
        register_layer(&n, i, ends);
    }
    dt_zero *zero = make_zero(&n);
    dt_pipe_desc run = { .schedule = s,
        .comm = n.mesh.pp,
        .run = run_stage,
        .user = &n,
        .min_durations = c->pace,
        .spans = mine };
    for (n.step = 0; n.step < (c->steps ? c->steps : 3) && dt_error(ctx) == DT_OK; n.step++) {
        if (c->evaluates && n.step == 1) evaluate(&n, &run);
        size_t before[2] = { dt_comm_bytes(ctx, DT_AXIS_PP), dt_comm_bytes(ctx, DT_AXIS_DP) };
        if (c->plain)
            backward_without_pipeline(&n);
        else
            dt_pipe_run(ctx, run);
        if (n.step == 2) keep(&n, zero, 0);
        dt_step_info info = dt_zero_step(zero, LR);
        if (dt_ctx_rank(ctx) == 0)
            j->r->norm[n.step] = info.grad_norm, j->r->scale[n.step] = info.clip_scale;
        j->r->norms[dt_ctx_rank(ctx)][n.step] = info.grad_norm;
        if (s) measure(&n, s, before);
    }
    if (zero && c->zero == 3) j->r->planned[dt_ctx_rank(ctx)] = are_planned(zero);
    keep(&n, zero, 1);
    if (c->pace) keep_spans(&n, s, mine);
    return dt_error(ctx);
}

// ==== Running it ================================================================================

enum { THREADS = 0, PROCS, TCP };

static void silent(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static int free_port(void) {
    struct sockaddr_in a;
    socklen_t bytes = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) == 0)
        getsockname(fd, (struct sockaddr *)&a, &bytes);
    close(fd);
    return ntohs(a.sin_port);
}

/* Runs each rank as a process that connects over sockets. Returns the worst status. */
static dt_status run_tcp(job *j, int ranks, dt_run_desc d) {
    char at[64];
    pid_t pid[MAX_RANKS];
    dt_status worst = DT_OK;
    snprintf(at, sizeof at, "127.0.0.1:%d", free_port());
    fflush(NULL);
    for (int r = 0; r < ranks; r++) {
        pid[r] = fork();
        if (pid[r] != 0) continue;
        alarm(1800); /* ends even if the parent is killed */
        check_failed = 0;
        d.rank = r;
        d.rendezvous = at;
        d.report = &j->r->report[r];
        dt_status status = dt_run(d, train, j);
        fflush(NULL);
        _exit(check_failed ? 120 : (int)status);
    }
    for (int r = 0; r < ranks; r++) {
        int status = 0;
        waitpid(pid[r], &status, 0);
        CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) < 120, "rank %d over tcp ends with %x",
            r, status);
        if (WIFEXITED(status) && WEXITSTATUS(status)) worst = (dt_status)WEXITSTATUS(status);
    }
    return worst;
}

static result *result_make(void) {
    result *r =
        (result *)mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return r;
}

static char folder[64];

static dt_report run_job(const config *c, result *r, int backend) {
    dt_report report;
    dt_host host = *dt_host_default();
    job j;
    memset(&report, 0, sizeof report);
    memset(&j, 0, sizeof j);
    memset(r, 0, sizeof *r);
    j.c = *c;
    j.r = r;
    j.folder = folder;
    make_layers(&j);
    host.log = silent;
    int ranks = c->dp * (c->plain ? 1 : c->pp);
    dt_run_desc d = { .ranks = ranks,
        .timeout_s = 20,
        .report = &report,
        .host = &host,
        .backend = backend == PROCS ? DT_BACKEND_PROCS
                   : backend == TCP ? DT_BACKEND_TCP
                                    : DT_BACKEND_THREADS };
    if (backend != TCP)
        dt_run(d, train, &j);
    else
        report.status = run_tcp(&j, ranks, d);
    for (int rank = 0; rank < ranks && backend == TCP; rank++)
        if (r->report[rank].status == report.status) report = r->report[rank];
    return report;
}

typedef struct text {
    char s[400];
} text;
static text config_text(const config *c) {
    text t;
    snprintf(t.s, sizeof t.s,
        "model %u (%d layers, kind %d, %d rows, type %d) dp %d pp %d chunks %d schedule %d "
        "own %d map %d group %d micros %d zero %d/%d kept %d tree %d folder %d adam %d again %d "
        "clip %g no_overlap %d "
        "eval %d",
        c->model, c->layers, c->what, c->rows, c->dtype, c->dp, c->pp, c->chunks, c->kind, c->own,
        c->map, c->group, c->micros, c->zero, c->shard, c->kept, c->tree, c->folder, c->adam,
        c->recompute, c->clip, c->no_overlap, c->evaluates);
    return t;
}

// ==== Comparing =================================================================================

static size_t values_of(const config *c, job *j) {
    memset(j, 0, sizeof *j);
    j->c = *c;
    make_layers(j);
    return offset_of(j, c->layers - 1, 2);
}

/* |a - b| / max(|b|, share), with 2-norms of n numbers. */
static double relative_difference(const double *a, const double *b, size_t n, double share) {
    double d = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        d += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    return sqrt(d) / fmax(sqrt(size), share);
}

/* The largest difference of a parameter from b's, relative as in test_matrix.c: to the gradient's
   share of the global norm, or to the largest possible update. NaN counts as the largest. */
static double largest_difference(const job *j, const result *a, const result *b, int values) {
    size_t all = offset_of(j, j->c.layers - 1, 2);
    double most = 0, whole = 0;
    for (size_t i = 0; i < all; i++) whole += b->grad[i] * b->grad[i];
    for (int i = 0; i < j->c.layers; i++) {
        dt_shape shape[2];
        int params = layer_params(&j->layer[i], shape);
        for (int k = 0; k < params; k++) {
            size_t at = offset_of(j, i, k), n = (size_t)dt_count(shape[k]);
            double share = sqrt(whole * (double)n / (double)all);
            if (values) share = LR * (j->c.steps ? j->c.steps : 3) * sqrt((double)n);
            const double *x = values ? a->value : a->grad, *y = values ? b->value : b->grad;
            double d = relative_difference(x + at, y + at, n, share);
            if (!(d <= most)) most = isfinite(d) ? d : HUGE_VAL;
        }
    }
    return most;
}

/* tolerance 0: bits must be equal. */
static int same_result(
    const config *c, const result *a, const result *b, double tolerance, const char *than) {
    job j;
    size_t n = values_of(c, &j);
    int loss = 1, norm = 1, grad, value, learns = b->norm[0] > 0 && b->loss[0][0] > 0;
    if (tolerance == 0) {
        loss = memcmp(a->loss, b->loss, sizeof a->loss) == 0;
        norm = memcmp(a->norm, b->norm, sizeof a->norm) == 0 &&
               memcmp(a->scale, b->scale, sizeof a->scale) == 0;
        grad = memcmp(a->grad, b->grad, n * sizeof *a->grad) == 0;
        value = memcmp(a->value, b->value, n * sizeof *a->value) == 0;
    } else {
        for (int s = 0; s < MAX_STEPS; s++) {
            for (int m = 0; m < MAX_MICROS; m++)
                loss &= fabs(a->loss[s][m] - b->loss[s][m]) <= tolerance * fabs(b->loss[s][m]);
            norm &= fabs(a->norm[s] - b->norm[s]) <= tolerance * b->norm[s];
        }
        grad = largest_difference(&j, a, b, 0) <= tolerance;
        value = largest_difference(&j, a, b, 1) <= tolerance;
    }
    return CHECK_MSG(loss && norm && grad && value && learns,
        "%s: different %s%s%s%s%sthan %s (norms %.17g, %.17g)", config_text(c).s,
        loss ? "" : "losses ", norm ? "" : "norms ", grad ? "" : "gradients ",
        value ? "" : "values ", learns ? "" : "nothing learnt ", than, a->norm[0], b->norm[0]);
}

static result *got, *want, *alone;

static int run_succeeds(const config *c, result *r, int backend) {
    dt_report report = run_job(c, r, backend);
    return CHECK_MSG(report.status == DT_OK, "%s: %s", config_text(c).s, report.text);
}

/* The same configuration with all layers on one rank, data groups of the same size, and without the
   options that must not change a bit. */
static config without_pipeline(config c) {
    c.plain = 1;
    c.zero = c.zero >= 2 ? 2 : 0;
    if (c.shard) c.zero = c.zero >= 2 ? 2 : 1; /* shard groups are reduced group by group */
    c.kept = c.no_overlap = c.folder = c.recompute = c.evaluates = c.poison = 0;
    c.pace = NULL;
    return c;
}

static config on_one_rank(config c) {
    c = without_pipeline(c);
    c.micros *= c.dp;
    c.dp = 1;
    c.shard = c.zero = c.tree = 0;
    return c;
}

static int folders; /* runs with all training state in a folder */

static void check_config(const config *c, int backend) {
    folders += c->folder;
    config one = without_pipeline(*c), single = on_one_rank(*c);
    int tied = c->what == LAYERS_TIED;
    if (!run_succeeds(&one, want, THREADS) || !run_succeeds(c, got, backend)) return;
    for (int r = 0; r < c->dp * c->pp; r++)
        CHECK_MSG(memcmp(got->norms[r], got->norm, sizeof got->norm) == 0,
            "%s: rank %d has norm %.17g, rank 0 %.17g", config_text(c).s, r, got->norms[r][0],
            got->norm[0]);
    same_result(c, got, want, tied ? 1e-12 : 0, "on one rank of each data group");
    if (c->dtype != 0 || c->adam || c->micros * c->dp > MAX_MICROS ||
        !run_succeeds(&single, alone, THREADS))
        return;
    same_result(c, got, alone, 1e-12, "on one rank alone");
}

static config random_config(uint32_t k) {
    config c;
    memset(&c, 0, sizeof c);
    c.model = mix(k, 1);
    c.pp = 1 + draw(k, 2, 5);
    c.kind = draw(k, 3, DT_SCHEDULES);
    c.chunks = chunks_of(c.kind, 1 + draw(k, 4, 3));
    c.micros = 1 + draw(k, 5, 9);
    if (c.kind == DT_SCHEDULE_ZB && c.micros < c.pp) c.micros = c.pp;
    if (draw(k, 6, 5) == 0) { /* a user-defined schedule */
        c.own = 1 + draw(k, 7, 3);
        c.map = draw(k, 8, 3);
        c.chunks = 1 + draw(k, 9, 3);
    }
    c.layers = MAX_LAYERS - draw(k, 10, 2);
    c.rows = draw(k, 11, 4) ? 1 + draw(k, 12, 6) : MAX_ROWS;
    c.dtype = draw(k, 13, 4) == 0 ? 1 + draw(k, 14, 2) : 0;
    c.dp = c.pp > 3 ? 1 : 1 + draw(k, 15, 3);
    c.zero = draw(k, 16, 4);
    if (c.dp == 2 && draw(k, 17, 4) == 0) c.shard = 1;
    c.kept = c.zero == 3 && draw(k, 18, 3) == 0;
    c.no_overlap = draw(k, 19, 4) == 0;
    c.tree = draw(k, 20, 6) == 0;
    c.folder = c.zero == 3 && draw(k, 21, 4) == 0;
    c.adam = draw(k, 22, 3) == 0;
    c.poison = c.zero == 3;
    c.recompute = draw(k, 23, 3) ? draw(k, 24, 4) : 0;
    c.clip = draw(k, 25, 2) ? 0.02 : 0;
    c.evaluates = draw(k, 26, 4) == 0 ? 1 + draw(k, 27, 4) : 0;
    return c;
}

static void test_random(uint32_t from, uint32_t end) {
    for (uint32_t k = from; k < end; k++) {
        config c = random_config(k);
        check_config(&c, THREADS);
    }
}

/* A simple configuration that tests modify. */
static config basic_config(int pp, int micros, int kind) {
    config c;
    memset(&c, 0, sizeof c);
    c.model = 12345;
    c.layers = 8;
    c.rows = 3;
    c.dp = 1;
    c.pp = pp;
    c.chunks = chunks_of(kind, 2);
    c.kind = kind;
    c.micros = micros;
    c.clip = 0.02;
    return c;
}

/* A weight tied between the first and the last stage: at every ZeRO stage, on disk, with the tree,
   with every schedule. */
static void test_tied(void) {
    folders = 0;
    for (int k = 0; k < 56; k++) {
        config c = basic_config(2 + k % 3, 4 + k % 3, k / 4 % DT_SCHEDULES);
        c.what = LAYERS_TIED;
        c.zero = k % 4;
        c.dp = k % 3 == 2 ? 2 : 1;
        c.folder = k % 5 == 0;
        c.tree = k % 7 == 3;
        c.recompute = k % 4;
        c.model = (uint32_t)k;
        c.evaluates = k % 6 == 1;
        check_config(&c, THREADS);
        if (k == 4) CHECK_MSG(got->scale[0] < 1, "nothing was clipped");
    }
    CHECK_MSG(folders > 3, "%d runs in a folder", folders);
}

/* Stages that return their input, that have no parameters or frozen ones, at the ends and in
   between; and consecutive stages on one rank. */
static void test_odd_stages(void) {
    for (int k = 0; k < 24; k++) {
        config c = basic_config(1 + k % 4, 4, k % DT_SCHEDULES);
        c.what = k % 3 == 0 ? LAYERS_SAME : k % 3 == 1 ? LAYERS_EMPTY_ENDS : LAYERS_DRAWN;
        c.zero = k / 2 % 4;
        c.recompute = k % 2;
        check_config(&c, THREADS);
        c.own = k % 2 ? OWN_LOCAL : OWN_LATE_W;
        c.map = MAP_BLOCKS;
        c.chunks = 2;
        c.micros = 6;
        check_config(&c, THREADS);
    }
}

/* More pending messages than a pair of ranks has slots, small and large. */
static void test_many_messages(void) {
    for (int wide = 0; wide < 2; wide++)
        for (int k = 0; k < 6; k++) {
            config c = basic_config(k < 4 ? 2 : 3, 20,
                k == 1   ? DT_SCHEDULE_INTERLEAVED
                : k == 2 ? DT_SCHEDULE_1F1B
                         : DT_SCHEDULE_AFAB);
            c.what = wide ? LAYERS_WIDE : LAYERS_EQUAL;
            c.rows = wide ? 11 : 1; /* 4,224 bytes */
            c.zero = k == 2 ? 3 : 0;
            if (k == 1) c.group = 20;
            if (k == 0) c.own = OWN_AHEAD, c.chunks = 2;
            if (k == 3) c.own = OWN_AFAB, c.chunks = 3, c.layers = 12;
            if (k == 5) c.own = OWN_LATE_W, c.chunks = 2, c.map = MAP_V;
            check_config(&c, THREADS);
        }
}

/* The traffic between stages and in the tied group must match the formula exactly. */
static void test_bytes(void) {
    for (int k = 0; k < 20; k++) {
        config c = basic_config(2 + k % 3, 5, k % DT_SCHEDULES);
        job j;
        size_t size, sent[MAX_RANKS] = { 0 };
        c.what = k % 2 ? LAYERS_TIED : LAYERS_DRAWN;
        c.zero = k / 2 % 4;
        c.dp = k % 3 == 0 ? 2 : 1;
        c.dtype = k % 4 == 0 ? 2 : 0;
        c.evaluates = 2; /* evaluation must not count in the step's traffic */
        values_of(&c, &j);
        if (c.what == LAYERS_DRAWN) j.c.model = c.model += (uint32_t)k;
        values_of(&c, &j);
        size = dt_dtype_size(type_of(&c));
        for (int s = 0; s + 1 < stages_of(&c); s++) {
            int turn = in_v(&c) ? 2 * c.pp - 1 : INT_MAX; /* the last stage of a V */
            int last = 0,
                from = (s < c.pp          ? s
                        : turn == INT_MAX ? s % c.pp
                                          : turn - s),
                to = (s + 1 < c.pp      ? s + 1
                      : turn == INT_MAX ? (s + 1) % c.pp
                                        : turn - s - 1);
            for (int i = 0; i < c.layers; i++)
                if (j.layer[i].stage <= s) last = i;
            size_t bytes = (size_t)(c.micros * c.rows * j.layer[last].out) * size;
            if (from != to) sent[from] += bytes, sent[to] += bytes;
        }
        size_t padded = (size_t)1024 * (size_t)c.dp, parts = c.zero > 0 ? (size_t)c.dp : 1;
        int two = c.what == LAYERS_TIED && !in_v(&c); /* in a V one rank has both ends */
        if (two) sent[0] += padded / parts * (size == 2 ? 4 : size);
        if (two) sent[c.pp - 1] += padded / parts * (size == 2 ? 4 : size);
        if (!run_succeeds(&c, got, THREADS)) continue;
        for (int r = 0; r < c.pp * c.dp; r++)
            CHECK_MSG(got->pp_bytes[r] == sent[r / c.dp],
                "%s: rank %d sent %zu bytes over pp, not %zu", config_text(&c).s, r,
                got->pp_bytes[r], sent[r / c.dp]);
        for (int i = 0; i < c.dp * 2; i++)
            CHECK_MSG(got->evaluated[i] == got->loss[1][i] && got->loss[1][i] > 0,
                "%s: evaluation of %d gives %.17g, "
                "training %.17g",
                config_text(&c).s, i, got->evaluated[i], got->loss[1][i]);
    }
}

/* ZeRO-3 gathers each unit once in a forward and once in a backward (in halves: once in each half),
   and nothing else, whatever other tapes and stages do in between. With keep_gathered it gathers
   once a step. Compares with the formula of dt_zero.h. */
static void test_gathers(void) {
    for (int k = 0; k < 24; k++) {
        /* without DualPipe-V, which splits only some backwards */
        config c = basic_config(1 + k % 3, 5, k % (DT_SCHEDULES - 1));
        c.what = LAYERS_EQUAL;
        c.layers = 12;
        c.dp = 2;
        c.zero = 3;
        c.kept = k % 4 == 3;
        c.no_overlap = k % 4 == 2;
        c.steps = 2;
        if (k >= 20) c.own = k % 2 ? OWN_AFAB : OWN_NAIVE, c.chunks = 2, c.map = MAP_BLOCKS;
        int halves = (c.kind == DT_SCHEDULE_ZB || c.kind == DT_SCHEDULE_ZBV) && !c.own;
        if (!run_succeeds(&c, got, THREADS)) continue;
        for (int r = 0; r < c.pp * c.dp; r++) {
            double values = c.kept ? 1 : c.micros * (2.0 + halves), grads = c.micros;
            double want_bytes = (values + grads) * 8 * (double)got->padded[r] / 2;
            /* the first layer has no input-gradient half (I) */
            if (halves && !c.kept && r < c.dp) want_bytes -= c.micros * 8 * 2048.0 / 2;
            CHECK_MSG(got->planned[r], "%s: rank %d does not know the order of its gathers",
                config_text(&c).s, r);
            CHECK_MSG((double)got->dp_bytes[r] == want_bytes,
                "%s: rank %d sent %zu bytes over dp, not %.0f", config_text(&c).s, r,
                got->dp_bytes[r], want_bytes);
        }
    }
}

/* There is one tape per slot of the schedule plus the caller's. Steps after the second allocate
   nothing. 1F1B on rank r holds the activations of min(p - r, m) micro-batches. */
static void test_memory(void) {
    if (UNDER_ASAN) {
        check_skip("allocations of pipelines: every tensor is its own allocation under "
                   "-fsanitize=address");
        return;
    }
    for (int k = 0; k < 16; k++) {
        config c = basic_config(1 + k % 4, 8, k % DT_SCHEDULES);
        c.what = k < 10 ? LAYERS_EQUAL : LAYERS_DRAWN;
        c.zero = k % 4;
        c.steps = 6;
        c.recompute = k % 3;
        c.evaluates = k > 12;
        if (!run_succeeds(&c, got, THREADS)) continue;
        for (int r = 0; r < c.pp; r++) {
            size_t *a = got->allocations[r];
            CHECK_MSG(c.evaluates || got->tapes[r] == got->slots[r] + 1,
                "%s: rank %d has %d tapes for %d slots", config_text(&c).s, r, got->tapes[r],
                got->slots[r]);
            CHECK_MSG(a[5] == a[2], "%s: rank %d allocates %zu %zu %zu times", config_text(&c).s, r,
                a[3] - a[2], a[4] - a[3], a[5] - a[4]);
        }
    }
    for (int m = 1; m <= 8; m += 7) {
        config one = basic_config(4, m, DT_SCHEDULE_NAIVE),
               many = basic_config(4, m, DT_SCHEDULE_1F1B);
        one.what = many.what = LAYERS_EQUAL;
        one.layers = many.layers = 12;
        one.rows = many.rows = MAX_ROWS;
        if (!run_succeeds(&one, want, THREADS) || !run_succeeds(&many, got, THREADS)) return;
        /* gradients that live only during their block's backward exist once */
        double each = (double)(got->acts[0] - want->acts[0]) / 3;
        for (int r = 0; r < 4; r++) {
            int live = 4 - r < m ? 4 - r : m;
            double more = (double)got->acts[r] - (double)want->acts[r],
                   sent = r > 0 ? MAX_ROWS * 16 * 8 : 0; /* bytes of the input's gradient */
            CHECK_MSG(got->live[r] == live && got->slots[r] == live,
                "rank %d holds %d micro-batches", r, got->live[r]);
            CHECK_MSG(more == (each + sent) * (live - 1),
                "rank %d holds %g bytes of acts more than one micro-batch", r, more);
            CHECK_MSG(live == 1 || more > 0.6 * (live - 1) * (double)want->acts[r],
                "rank %d: %g bytes more than the formula", r, more);
        }
    }
}

/* Forked ranks and ranks over sockets. */
static void test_backends(void) {
    for (int k = 0; k < 12; k++) {
        config c = basic_config(2 + k % 3, 4 + k % 2 * 8, k % DT_SCHEDULES);
        c.zero = k % 4;
        c.dp = c.pp == 2 ? 2 : 1;
        c.what = k % 3 ? LAYERS_DRAWN : LAYERS_WIDE;
        c.rows = k % 3 ? 5 : MAX_ROWS;
        c.recompute = k % 2;
        if (k % 4 == 3) c.what = LAYERS_TIED;
        check_config(&c, k % 2 ? PROCS : TCP);
        check_config(&c, k % 2 ? TCP : PROCS);
    }
}

/* A schedule takes as long as simulated. Other load on the machine can make it slower, so the best
   of several tries counts. */
static void test_duration(void) {
    enum {
        TRIES = 20,
        SLOW_TRIES = 4
    }; /* the latter with actions that are longer than the load's delays */
    for (int k = 0; k < DT_SCHEDULES + 1; k++) {
        config c = basic_config(4, 8, k % DT_SCHEDULES);
        double best = HUGE_VAL, ideal = 0, action_s = 0.02;
        dt_schedule_costs costs = { .forward = action_s, .input = action_s, .weight = action_s };
        /* large messages stay in the sender's memory until the sleeping receiver wakes */
        c.what = LAYERS_WIDE;
        c.rows = MAX_ROWS;
        c.steps = 1;
        c.pace = &costs;
        if (k % DT_SCHEDULES == DT_SCHEDULE_NAIVE) c.micros = 2;
        config one = without_pipeline(c);
        if (!run_succeeds(&one, want, THREADS)) return;
        for (int t = 0; t < TRIES + SLOW_TRIES && !(best <= 1.1 * ideal); t++) {
            double end = 0;
            if (t == TRIES) {
                action_s *= fmin(slowdown(), 20);
                costs.forward = costs.input = costs.weight = action_s;
                best = HUGE_VAL;
            }
            if (!run_succeeds(&c, got, k < DT_SCHEDULES ? THREADS : PROCS)) return;
            for (int i = 0; i < 4096; i++) end = got->spans[i].end > end ? got->spans[i].end : end;
            best = fmin(best, end);
            ideal = got->makespan;
            same_result(&c, got, want, 0, "on one rank");
        }
        printf("schedule %d: %.0f ms, simulated %.0f ms\n", c.kind, best * 1e3, ideal * 1e3);
        CHECK_MSG(best <= 1.1 * ideal && best >= ideal, "schedule %d takes %g s, simulated %g",
            c.kind, best, ideal);
    }
}

/* ---- failures ---- */

static void check_failure(config c, int backend, dt_status status, const char *text) {
    double begin = dt_host_default()->now(NULL);
    dt_report report = run_job(&c, got, backend);
    double took = dt_host_default()->now(NULL) - begin;
    CHECK_MSG(report.status == status && strstr(report.text, text),
        "%s: failure %d of stage %d at %d: %s, not '%s'", config_text(&c).s, c.fail, c.fail_stage,
        c.fail_micro, report.text, text);
    CHECK_MSG(in_time(took, 10), "%s: it took %g s to end", config_text(&c).s, took);
}

static void test_failures(void) {
    for (int k = 0; k < 48; k++) {
        config c = basic_config(2 + k % 3, 4, k % DT_SCHEDULES);
        static const struct {
            dt_status status;
            const char *text;
        } ends[] = { { DT_OK, "" }, { DT_ERR_ARG, "its function returned NULL" },
            { DT_ERR_NUMERIC, "a failure of the user's function" },
            { DT_ERR_SHAPE, "another shape or type before" },
            { DT_ERR_SHAPE, "another shape or type before" } };
        c.fail = 1 + k % 4;
        c.fail_stage = k / 4 % stages_of(&c);
        c.fail_micro = c.fail >= FAIL_SHAPE ? 1 + k % 3 : k % 4;
        c.zero = k % 4;
        c.rows = k % 2 ? MAX_ROWS : 2;
        c.what = k % 2 ? LAYERS_WIDE : LAYERS_EQUAL;
        c.dp = k % 5 == 0 ? 2 : 1;
        check_failure(c,
            k % 6 == 1   ? PROCS
            : k % 6 == 2 ? TCP
                         : THREADS,
            ends[c.fail].status, ends[c.fail].text);
    }
}

static dt_tensor *never_called(dt_tensor *x, int stage, int micro, void *user) {
    (void)stage, (void)micro, (void)user;
    CHECK(0);
    return x;
}

/* One backward comes before its forward, and one is missing. */
static void generate_wrong(dt_schedule *s, void *user) {
    (void)user;
    for (int r = 0; r < 2; r++) dt_schedule_add(s, r, DT_FORWARD, 0, 0);
    dt_schedule_add(s, 0, DT_BACKWARD, 0, 0);
}

static dt_status refused_rank(dt_ctx *ctx, void *user) {
    int what = *(int *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .pp = 2 });
    dt_schedule_desc d = {
        .kind = DT_SCHEDULE_1F1B, .ranks = what == 0 ? 3 : 2, .micros = what == 1 ? 1 : 3
    };
    if (what == 1) d.generate = generate_wrong, d.unchecked = 1;
    dt_schedule *s = what == 2 ? NULL : dt_schedule_make(ctx, d);
    return dt_pipe_run(ctx, (dt_pipe_desc){ .schedule = s,
                                .comm = mesh.pp,
                                .run = what == 3 ? NULL : never_called,
                                .forward_micros = what == 4   ? -1
                                                  : what == 5 ? 1 << 30
                                                              : 0 });
}

static void test_refused(void) {
    static const char *const texts[] = { "is for 3 ranks, and 'pp' has 2",
        "dt_pipe_run: ", "a schedule and a function", "a schedule and a function", "not -1",
        "1073741824 micro-batches through 2 stages are more messages" };
    for (int what = 0; what < 6; what++) {
        dt_report report;
        dt_host host = *dt_host_default();
        host.log = silent;
        dt_run((dt_run_desc){ .ranks = 2, .timeout_s = 10, .report = &report, .host = &host },
            refused_rank, &what);
        CHECK_MSG(report.status == DT_ERR_ARG && strstr(report.text, texts[what]), "refusal %d: %s",
            what, report.text);
    }
    CHECK(dt_pipe_run(NULL, (dt_pipe_desc){ .schedule = NULL }) == DT_ERR_ARG);
}

/* The loss is a separate stage without parameters: all stages must use the same f16 loss scale. */
typedef struct scaled {
    int pp;
    double norm, scale;
} scaled;

static dt_tensor *scaled_stage(dt_tensor *x, int stage, int micro, void *user) {
    static const float in[4] = { 0.5f, -0.25f, 0.125f, 1 }, out[2] = { 1, -1 };
    dt_ctx *ctx = (dt_ctx *)user;
    (void)micro;
    dt_tensor *w = dt_param_find(ctx, "w");
    if (stage == 0)
        x = dt_linear(dt_cast(dt_input(ctx, DT_F32, DT_SHAPE(1, 4), in), DT_F16), w, NULL);
    int last = stage == 1 || dt_comm_size(dt_world(ctx)) == 1;
    return last ? dt_mse(x, dt_cast(dt_input(ctx, DT_F32, DT_SHAPE(1, 2), out), DT_F16), 64) : x;
}

static dt_status scaled_rank(dt_ctx *ctx, void *user) {
    scaled *s = (scaled *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .pp = s->pp });
    dt_stage(ctx, mesh.coord.pp);
    if (mesh.coord.pp == 0)
        dt_param_at(ctx, "w", DT_SHAPE(2, 4), DT_NORMAL(0.5), (dt_param_desc){ .dtype = DT_F16 });
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh });
    dt_schedule *schedule =
        dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = s->pp, .micros = 1 });
    dt_pipe_run(ctx,
        (dt_pipe_desc){ .schedule = schedule, .comm = mesh.pp, .run = scaled_stage, .user = ctx });
    dt_step_info info = dt_zero_step(zero, 0.01);
    if (dt_ctx_rank(ctx) == 0) s->norm = info.grad_norm, s->scale = info.loss_scale;
    return dt_error(ctx);
}

static void test_scale(void) {
    scaled one = { .pp = 1 }, two = { .pp = 2 };
    CHECK(dt_run((dt_run_desc){ .ranks = 1 }, scaled_rank, &one) == DT_OK && one.scale == 65536 &&
          one.norm > 1e-3);
    CHECK(dt_run((dt_run_desc){ .ranks = 2, .timeout_s = 20 }, scaled_rank, &two) == DT_OK &&
          two.scale == 65536);
    CHECK_MSG(two.norm == one.norm, "norm %.9g over two stages, %.9g in one", two.norm, one.norm);
}

/* Stages with different optimizers, or with tied parameters that do not match. */
enum { UNLIKE_OPTIMIZER, UNLIKE_NAME, UNLIKE_ORDER, UNLIKE_VALUES, UNLIKE_MISSING, UNLIKES };

static dt_tensor *unlike_stage(dt_tensor *x, int stage, int micro, void *user) {
    static const float in[4] = { 0.5f, -0.25f, 0.125f, 1 };
    dt_ctx *ctx = (dt_ctx *)user;
    (void)micro;
    if (stage == 0) x = dt_input(ctx, DT_F32, DT_SHAPE(1, 4), in);
    for (int i = 0; i < dt_param_count(ctx); i++) x = dt_linear(x, dt_param_get(ctx, i), NULL);
    return stage == 0 ? x : dt_mse(x, dt_input(ctx, DT_F32, DT_SHAPE(1, 4), in), 4);
}

static dt_status unlike_rank(dt_ctx *ctx, void *user) {
    int what = *(int *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .pp = 2 });
    int other = mesh.coord.pp == 1;
    const char *names[2] = { "a", "b" };
    dt_param_desc tied = { .grad_placements = { { mesh.pp, DT_GRAD_PARTIAL } } };
    if (other && what == UNLIKE_NAME) names[1] = "c";
    if (other && what == UNLIKE_ORDER) names[0] = "b", names[1] = "a";
    dt_stage(ctx, mesh.coord.pp);
    for (int i = 0; i < 2; i++) {
        dt_scope(ctx, NULL); /* separate units */
        if (i == 0 || !other || what != UNLIKE_MISSING)
            dt_param_at(ctx, names[i], DT_SHAPE(4, 4),
                DT_NORMAL(other && what == UNLIKE_VALUES ? 0.2 : 0.1), tied);
    }
    dt_zero *zero = dt_zero_make(
        ctx, (dt_zero_desc){ .mesh = &mesh, .clip = other && what == UNLIKE_OPTIMIZER });
    dt_schedule *s = dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = 2, .micros = 1 });
    dt_pipe_run(
        ctx, (dt_pipe_desc){ .schedule = s, .comm = mesh.pp, .run = unlike_stage, .user = ctx });
    dt_zero_step(zero, 0.01);
    return dt_error(ctx);
}

static void test_unlike(void) {
    static const char *const texts[UNLIKES] = { "clip 1",
        "b is tied over 'pp', where rank|has another one",
        "is tied over 'pp', where rank|has another one",
        "rank 1 starts from values of a that differ from rank 0's",
        "b is tied over 'pp', where rank 1 has none" };
    for (int what = 0; what < UNLIKES; what++) {
        dt_report report;
        dt_host host = *dt_host_default();
        char first[100];
        host.log = silent;
        dt_run((dt_run_desc){ .ranks = 2, .timeout_s = 10, .report = &report, .host = &host },
            unlike_rank, &what);
        snprintf(first, sizeof first, "%.*s", (int)strcspn(texts[what], "|"), texts[what]);
        const char *second = strchr(texts[what], '|');
        int named = strstr(report.text, first) && (!second || strstr(report.text, second + 1));
        if (what == UNLIKE_NAME) named |= strstr(report.text, "c is tied") != NULL;
        CHECK_MSG(
            report.status == DT_ERR_COMM && named, "stages unlike in %d: %s", what, report.text);
    }
}

static void timed(const char *name, void (*test)(void)) {
    double begin = dt_host_default()->now(NULL);
    test();
    printf("%s: %.1f s\n", name, dt_host_default()->now(NULL) - begin);
}

/* ---- sequence parallelism without a norm: the weight half gathers an activation again ---- */

typedef struct gathering {
    int kind; /* the schedule */
    dt_tensor *w[2];
    dt_comm *tp;
    float grad[2][2][2048]; /* of each tp rank of the last stage */
} gathering;

enum { GATHER_T = 8, GATHER_C = 32 };

static dt_tensor *gathering_stage(dt_tensor *x, int stage, int micro, void *user) {
    gathering *g = (gathering *)user;
    dt_ctx *ctx = g->w[0]->ctx;
    float data[2 * GATHER_T * GATHER_C];
    dt_linear_desc plain = { .activation = 0 };
    for (int i = 0; i < 2 * GATHER_T * GATHER_C; i++)
        data[i] = (float)((i * 7 + micro * 5 + dt_comm_rank(g->tp) * 3) % 17 - 8) / 9;
    dt_shape shape = DT_SHAPE(2, GATHER_T, GATHER_C);
    dt_tensor *h = dt_gelu(stage == 0 ? dt_input(ctx, DT_F32, shape, data) : x);
    h = dt_column_linear(h, g->w[0], NULL, plain, g->tp, DT_SHARD(1));
    h = dt_row_linear(dt_gelu(h), g->w[1], NULL, NULL, g->tp, DT_SHARD(1));
    return stage == 0 ? h : dt_mse(h, dt_input(ctx, DT_F32, shape, data), 100);
}

static dt_status gathering_rank(dt_ctx *ctx, void *user) {
    gathering *shared = (gathering *)user, g = { .kind = shared->kind };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2, .pp = 2 });
    int stage = mesh.coord.pp;
    g.tp = mesh.tp;
    dt_stage(ctx, stage);
    for (int k = 0; k < 2; k++) {
        const char *names[2][2] = { { "0.up", "0.down" }, { "1.up", "1.down" } };
        dt_param_desc d = { .shards = { { mesh.tp, k } } };
        dt_shape full = k ? DT_SHAPE(GATHER_C, 64) : DT_SHAPE(64, GATHER_C);
        g.w[k] = dt_param_at(ctx, names[stage][k], full, DT_NORMAL(0.2), d);
    }
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh });
    dt_schedule *s =
        dt_schedule_make(ctx, (dt_schedule_desc){ .kind = g.kind, .ranks = 2, .micros = 4 });
    dt_pipe_run(
        ctx, (dt_pipe_desc){ .schedule = s, .comm = mesh.pp, .run = gathering_stage, .user = &g });
    for (int k = 0; k < 2; k++)
        if (stage == 1) dt_zero_grad(zero, g.w[k], shared->grad[mesh.coord.tp][k]);
    dt_schedule_free(s);
    return dt_error(ctx);
}

static void test_gathered_again(void) {
    static gathering one, zb;
    one.kind = DT_SCHEDULE_1F1B;
    zb.kind = DT_SCHEDULE_ZB;
    CHECK(dt_run((dt_run_desc){ .ranks = 4 }, gathering_rank, &one) == DT_OK);
    CHECK(dt_run((dt_run_desc){ .ranks = 4 }, gathering_rank, &zb) == DT_OK);
    CHECK(one.grad[0][0][0] != 0 && memcmp(one.grad, zb.grad, sizeof one.grad) == 0);
}

static void test_named(void) {
    timed("refused", test_refused);
    timed("scale", test_scale);
    timed("unlike", test_unlike);
    timed("tied", test_tied);
    timed("odd stages", test_odd_stages);
    timed("bytes", test_bytes);
    timed("gathers", test_gathers);
    timed("memory", test_memory);
    timed("failures", test_failures);
    timed("backends", test_backends);
    timed("pace", test_duration);
    timed("many messages", test_many_messages);
    timed("gathered again", test_gathered_again);
}

int main(int argc, char **argv) {
    snprintf(folder, sizeof folder, "/tmp/test_pipe_XXXXXX");
    if (!CHECK(mkdtemp(folder) != NULL)) return check_done("test_pipe");
    got = result_make(), want = result_make(), alone = result_make();
    uint32_t from = argc > 1 ? (uint32_t)atoi(argv[1]) : 0,
             end = argc > 2 ? (uint32_t)atoi(argv[2]) : 160;
    if (argc <= 1 || argc > 3) test_named();
    test_random(from, end);
    rmdir(folder);
    return check_done("test_pipe");
}
