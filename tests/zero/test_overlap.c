/* test_overlap.c - gradient reduction: overlap with the backward, and the tree of
   micro-batches

   Overlap is measured without computation: the backward of each layer sleeps, and the simulated
   link of dt_run_desc gives each operation a fixed duration without using a core. So the
   measurements hold on a busy machine. The reduction of the last of LAYERS layers has no backward
   left to overlap with.

   The tree must give the same bits for every split of the batch over ranks and accumulation, on
   threads and forks, at every stage and in shard groups. Without the tree at least one split must
   give other bits, or the comparison could never fail. And the tree's result must equal the plain
   sum up to rounding, because a tree that is wrong in every split would pass the comparison. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "tests/support/check.h"
#include "tests/support/jitter.h"

// ==== Overlap ===================================================================================

enum { LAYERS = 20, WIDTH = 16, STEPS = 6 };
static const double nap_s = 0.01, link_s = 0.004; /* LAYERS * link_s is 0.4 of the backward */

typedef struct timing {
    int no_overlap, stage;
    double step_s, backward_s; /* the fastest of STEPS */
    double weight;             /* one parameter after the steps */
} timing;

static dt_status slow_back(dt_node *node) {
    int accumulate = 0;
    size_t bytes = (size_t)dt_count(node->out->shape) * sizeof(float);
    void *dx = dt_grad_raw(node, 0, &accumulate);
    dt_host_default()->sleep(NULL, nap_s);
    if (dx) memcpy(dx, node->out->grad, bytes);
    return DT_OK;
}

/* The identity; its backward sleeps. */
static dt_tensor *slow(dt_tensor *x) {
    dt_tensor *out = x ? dt_new(x->ctx, DT_F32, x->shape) : NULL;
    if (!out) return NULL;
    memcpy(out->data, x->data, (size_t)dt_count(x->shape) * sizeof(float));
    return dt_record(out, (dt_record_desc){ .name = "slow", .in = { x }, .backward = slow_back });
}

static dt_tensor *slow_layer(dt_tensor *x, void *user) {
    return slow(dt_linear(x, (dt_tensor *)user, NULL));
}

static dt_status overlap_rank(dt_ctx *ctx, void *user) {
    timing *t = (timing *)user;
    dt_tensor *w[LAYERS];
    float input[WIDTH * WIDTH], target[4 * WIDTH];
    char name[8];
    int rank = dt_comm_rank(dt_world(ctx));
    for (int i = 0; i < LAYERS; i++) {
        snprintf(name, sizeof name, "w%d", i);
        w[i] = dt_param(ctx, name, DT_SHAPE(WIDTH, WIDTH), DT_NORMAL(0.2));
    }
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = t->stage,
                                          .optimizer = DT_SGD,
                                          .bucket_bytes = WIDTH * WIDTH * sizeof(float),
                                          .no_overlap = t->no_overlap });
    CHECK_MSG(dt_bucket_count(ctx) == LAYERS, "%d units", dt_bucket_count(ctx));
    t->step_s = t->backward_s = 1e9;
    for (int i = 0; i < 4 * WIDTH; i++)
        input[i] = (float)((i * 7 + rank) % 11) / 11, target[i] = (float)(i % 3);
    for (int step = 0; step < STEPS && dt_error(ctx) == DT_OK; step++) {
        dt_barrier(dt_world(ctx));
        double begin = dt_host_default()->now(NULL);
        dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(4, WIDTH), input);
        for (int i = 0; i < LAYERS; i++) x = dt_block(ctx, slow_layer, x, w[i]);
        dt_backward(dt_mse(x, dt_input(ctx, DT_F32, DT_SHAPE(4, WIDTH), target), 8));
        double backward = dt_host_default()->now(NULL) - begin;
        dt_zero_step(zero, 1e-6);
        dt_reset(ctx);
        double whole = dt_host_default()->now(NULL) - begin;
        if (rank == 0 && whole < t->step_s) t->step_s = whole;
        if (rank == 0 && backward < t->backward_s) t->backward_s = backward;
    }
    if (dt_read(w[0], input) == DT_OK && rank == 0) t->weight = input[3];
    return dt_error(ctx);
}

static timing overlap_run(dt_backend backend, int stage, int no_overlap, double latency) {
    timing t = { no_overlap, stage, 0, 0, 0 };
    CHECK(dt_run((dt_run_desc){ .ranks = 2,
                     .backend = backend,
                     .timeout_s = 20,
                     .user_bytes = sizeof t,
                     .link = { latency, 0 } },
              overlap_rank, &t) == DT_OK);
    return t;
}

/* The smaller time of each kind. */
static timing fastest(timing a, timing b) {
    b.step_s = fmin(a.step_s, b.step_s);
    b.backward_s = fmin(a.backward_s, b.backward_s);
    return b;
}

/* The expected times of the three runs. Stages 1 and 2 gather values after the update, and stage 3
   in the forward, which takes no time here: no computation overlaps with them. Stage 3 also gathers
   values in the backward; with overlap it waits only for those of the last layer, which the
   backward needs first. */
static double values_s(const timing *t) { return t->stage > 0 ? LAYERS * link_s : 0; }
static int is_hidden(timing none, timing on, double slack_s) {
    return on.step_s <= 1.05 * (none.step_s + values_s(&on)) + slack_s;
}
static int is_added(timing none, timing off, double slack_s) {
    double traffic = LAYERS * link_s,
           all = traffic + values_s(&off) + (off.stage == 3 ? traffic : 0);
    return fabs(off.step_s - none.step_s - all) <= 0.2 * traffic + slack_s;
}

/* Other load on the machine can only make a run slower, so the fastest of several rounds counts. */
static void test_overlap(void) {
    enum { ROUNDS = 8, MOST_ROUNDS = 24 };
    static const int cases[][2] = { { 0, 0 }, { 0, 1 }, { 1, 0 }, { 1, 1 }, { 2, 0 }, { 3, 1 } };
    for (int k = 0; k < 6; k++) {
        dt_backend backend = cases[k][1] ? DT_BACKEND_PROCS : DT_BACKEND_THREADS;
        int stage = cases[k][0], round = 0;
        double slack_s = 0;
        timing none, on, off;
        do {
            timing a = overlap_run(backend, stage, 0, 0),
                   b = overlap_run(backend, stage, 0, link_s);
            timing c = overlap_run(backend, stage, 1, link_s);
            none = round ? fastest(none, a) : a, on = round ? fastest(on, b) : b,
            off = round ? fastest(off, c) : c;
            /* under load a step takes a few scheduling gaps longer */
            if (++round >= ROUNDS) slack_s = fmin(8 * jitter_s(), LAYERS * link_s / 2);
        } while (
            round < MOST_ROUNDS && !(is_hidden(none, on, slack_s) && is_added(none, off, slack_s)));
        printf(
            "overlap, stage %d, %s: step %.1f ms without a link, %.1f with overlap, %.1f without, "
            "%d rounds\n",
            stage, cases[k][1] ? "procs" : "threads", 1e3 * none.step_s, 1e3 * on.step_s,
            1e3 * off.step_s, round);
        CHECK_MSG(none.backward_s > LAYERS * nap_s, "%g s", none.backward_s);
        CHECK_MSG(is_hidden(none, on, slack_s), "not overlapped: %g s with the link, %g s without",
            on.step_s, none.step_s);
        CHECK_MSG(is_added(none, off, slack_s),
            "unexpected time without overlap: %g s, %g s without a link, %d times %g s", off.step_s,
            none.step_s, (int)LAYERS, link_s);
        CHECK(none.weight == on.weight && none.weight == off.weight && isfinite(on.weight));
    }
}

// ==== The tree ==================================================================================

enum { T = 8, TREE_STEPS = 3, MOST = 4096 };

typedef struct tree_run {
    int micros, accum, stage, tree; /* micros = accum * ranks */
    int shard, keep;
    double norm[TREE_STEPS];
    int count;
    float left[MOST]; /* all parameters after the steps */
} tree_run;

static dt_status tree_rank(dt_ctx *ctx, void *user) {
    tree_run *t = (tree_run *)user;
    gpt model = gpt_register(ctx, (gpt_config){ .layers = 1,
                                      .width = 16,
                                      .heads = 2,
                                      .kv_heads = 2,
                                      .ffn = 32,
                                      .seq = T,
                                      .vocab = 19,
                                      .norm_eps = 1e-5,
                                      .tied = 1 });
    int rank = dt_comm_rank(dt_world(ctx)), ranks = dt_comm_size(dt_world(ctx)), at = 0;
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = t->stage,
                                          .shard_group = t->shard,
                                          .keep_gathered = t->keep,
                                          .clip = 0.5,
                                          .bucket_bytes = 4096,
                                          .tree = t->tree,
                                          .poison = 1 });
    for (int step = 0; step < TREE_STEPS; step++) {
        for (int j = 0; j < t->accum; j++) {
            int32_t ids[T], labels[T];
            int m = j * ranks + rank;
            for (int i = 0; i < T; i++) {
                ids[i] = (step * 31 + m * 7 + i * i) % 19;
                labels[i] = (ids[i] * 5 + m) % 19;
            }
            dt_micro(ctx, j, t->accum);
            dt_backward(gpt_loss(&model, dt_input(ctx, DT_I32, DT_SHAPE(1, T), ids),
                dt_input(ctx, DT_I32, DT_SHAPE(1, T), labels), (double)t->micros * T));
            dt_reset(ctx);
        }
        double norm = dt_zero_step(zero, 0.01).grad_norm;
        if (rank == 0) t->norm[step] = norm;
    }
    for (int i = 0; i < dt_param_count(ctx) && dt_error(ctx) == DT_OK; i++) {
        const dt_tensor *p = dt_param_get(ctx, i);
        int n = (int)dt_count(p->shape);
        float host[MOST];
        if (CHECK_MSG(at + n <= MOST, "%d", at + n) && dt_read(p, host) == DT_OK && rank == 0)
            memcpy(t->left + at, host, (size_t)n * sizeof(float));
        at += n;
    }
    if (rank == 0) t->count = at;
    return dt_error(ctx);
}

static tree_run tree_of(tree_run t, int ranks, dt_backend backend) {
    t.accum = t.micros / ranks;
    CHECK(dt_run(
              (dt_run_desc){
                  .ranks = ranks, .backend = backend, .timeout_s = 20, .user_bytes = sizeof t },
              tree_rank, &t) == DT_OK);
    CHECK(t.count > 1000);
    return t;
}

static int same(const tree_run *a, const tree_run *b) {
    return a->count == b->count && memcmp(a->norm, b->norm, sizeof a->norm) == 0 &&
           memcmp(a->left, b->left, (size_t)a->count * sizeof(float)) == 0;
}

/* Norms and parameters must be equal up to f32 rounding. */
static void check_near(const tree_run *a, const tree_run *b) {
    double apart = 0, size = 0;
    for (int i = 0; i < TREE_STEPS; i++)
        CHECK_MSG(fabs(a->norm[i] - b->norm[i]) <= 1e-4 * b->norm[i],
            "%d micro-batches, step %d: norm %g, plain sum %g", a->micros, i + 1, a->norm[i],
            b->norm[i]);
    for (int i = 0; i < a->count; i++) {
        apart += (a->left[i] - b->left[i]) * (a->left[i] - b->left[i]);
        size += b->left[i] * b->left[i];
    }
    CHECK_MSG(sqrt(apart) <= 1e-3 * sqrt(size),
        "%d micro-batches: parameters differ by %g, size %g", a->micros, sqrt(apart), sqrt(size));
}

/* Runs the tree on `ranks` ranks at every stage, in shard groups of each size; every other run has
   keep_gathered. */
static void check_split(const tree_run *one, int micros, int ranks) {
    int code = 0;
    for (int stage = 0; stage < 4; stage++)
        for (int shard = 0; shard < ranks; shard++) {
            if (shard && (stage == 0 || ranks % shard != 0)) continue;
            tree_run like = {
                .micros = micros, .stage = stage, .tree = 1, .shard = shard, .keep = code++ % 2
            };
            tree_run t = tree_of(like, ranks, code % 3 ? DT_BACKEND_THREADS : DT_BACKEND_PROCS);
            CHECK_MSG(same(&t, one),
                "other bits with %d micro-batches, %d ranks in groups of %d, stage %d", micros,
                ranks, shard, stage);
        }
}

static void test_tree(void) {
    static const int batches[] = { 1, 6, 8, 12 };
    for (int b = 0; b < 4; b++) {
        int micros = batches[b], others = 0;
        tree_run one = tree_of((tree_run){ .micros = micros, .tree = 1 }, 1, DT_BACKEND_THREADS);
        tree_run plain = tree_of((tree_run){ .micros = micros }, 1, DT_BACKEND_THREADS);
        check_near(&one, &plain);
        for (int ranks = 1; ranks <= micros; ranks++) {
            if (micros % ranks) continue;
            check_split(&one, micros, ranks);
            tree_run fixed = tree_of((tree_run){ .micros = micros }, ranks, DT_BACKEND_THREADS);
            others += !same(&fixed, &plain);
        }
        CHECK_MSG(others > 0 || micros == 1,
            "%d micro-batches: without the tree, every split gives the same bits", micros);
    }
}

int main(void) {
    test_overlap();
    test_tree();
    return check_done("test_overlap");
}
