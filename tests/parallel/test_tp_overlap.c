/* test_tp_overlap.c - overlap of tensor-parallel traffic: bits, bytes, memory, and that it happens

   A GPT trains with and without dt_mesh_desc.tp_overlap in layouts of tp with sp, dp, cp, pp and
   ep. Both runs must agree in every bit of the losses, norms and final parameters, and in the bytes
   of every axis; a dry run must count the memory of the run. test_matrix.c compares drawn layouts,
   also with one rank. Here the pieces have the sizes of real use: whole sequences, parts of
   sequences, and a last piece that is shorter or longer than the others.

   Overlap itself is seen in simulated time, as in tests/bench/bench_tp_overlap.c. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_zero.h"

#include "examples/gpt.h"
#include "examples/train.h"
#include "tests/support/check.h"
#include "tests/support/virtual_clock.h"

enum { STEPS = 3, MAX_RANKS = 8 };

typedef struct layout {
    const char *name;
    int dp, tp, cp, pp, ep;
    int sp, llama, kv_heads, experts, schedule, recompute, micro, accum, zero;
    dt_dtype dtype;
    double dropout;
    int pieces, split_sequences; /* 1: fewer sequences than pieces */
} layout;

/* What a run leaves: the rows of its steps, and a digest of each rank's parameters. */
typedef struct outcome {
    train_config config;
    train_row rows[STEPS];
    uint64_t digest[MAX_RANKS];
} outcome;

static void on_step(dt_ctx *ctx, const train_row *row, void *user) {
    outcome *o = (outcome *)user;
    (void)ctx;
    if (row->step <= STEPS) o->rows[row->step - 1] = *row;
}

/* The digest of the parameters that this rank holds: their bytes, in order. */
static void at_end(dt_ctx *ctx, gpt *model, void *user) {
    outcome *o = (outcome *)user;
    uint64_t h = 1;
    (void)model;
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        const unsigned char *data = (const unsigned char *)dt_data(t);
        size_t bytes = (size_t)dt_count(t->shape) * dt_dtype_size(t->dtype);
        for (size_t k = 0; data && k < bytes; k++) h = (h ^ data[k]) * 1099511628211u;
    }
    o->digest[dt_ctx_rank(ctx)] = h;
}

static dt_status run_rank(dt_ctx *ctx, void *user) {
    train_config config = ((outcome *)user)->config;
    config.user = user;
    return train(ctx, &config);
}

static int ranks_of(const layout *l) { return l->dp * l->tp * l->cp * l->pp * l->ep; }

static train_config config_of(const layout *l, int pieces, train_files data) {
    train_config c;
    memset(&c, 0, sizeof c);
    c.data = data;
    c.model = (gpt_config){ .layers = 2,
        .width = 32,
        .heads = 4,
        .kv_heads = l->kv_heads ? l->kv_heads : 4,
        .ffn = 96,
        .seq = l->split_sequences ? 96 : 32,
        .vocab = 256,
        .tied = 1,
        .arch = l->llama ? GPT_LLAMA : GPT_GPT2,
        .dropout = l->dropout,
        .recompute = l->recompute,
        .sp = l->sp,
        .experts = l->experts,
        .top_k = 1,
        .moe_every = 1,
        .dtype = l->dtype };
    c.mesh = (dt_mesh_desc){
        .dp = l->dp, .tp = l->tp, .cp = l->cp, .pp = l->pp, .ep = l->ep, .tp_overlap = pieces
    };
    c.zero = (dt_zero_desc){ .stage = l->zero, .beta1 = 0.9, .beta2 = 0.95, .clip = 1 };
    c.lr = (dt_lr_desc){ .peak = 1e-2, .kind = DT_LR_CONSTANT, .steps = 1, .min_ratio = 1 };
    c.schedule = l->schedule;
    c.chunks = 1;
    if (l->pp > 1) c.stage_begin[1] = 2, c.stage_begin[2] = gpt_items(c.model);
    c.micro_batch = l->micro;
    c.accum = l->accum;
    c.stop_at = STEPS;
    c.on_step = on_step;
    c.at_end = at_end;
    return c;
}

static outcome *outcome_make(const layout *l, int pieces, train_files data, dt_dry *dry) {
    outcome *o = (outcome *)calloc(1, sizeof *o);
    if (!o) exit(1);
    o->config = config_of(l, pieces, data);
    o->config.dry = dry;
    if (dry) o->config.at_end = NULL; /* a dry run has no values */
    dt_report report;
    dt_status status =
        dt_run((dt_run_desc){ .ranks = ranks_of(l), .report = &report }, run_rank, o);
    CHECK_MSG(status == DT_OK, "%s, %d pieces: %s", l->name, pieces, report.text);
    return o;
}

static void compare(const layout *l, const outcome *plain, const outcome *pieces) {
    for (int i = 0; i < STEPS; i++) {
        const train_row *a = &plain->rows[i], *b = &pieces->rows[i];
        CHECK_MSG(a->loss > 0 && a->loss == b->loss && a->grad_norm == b->grad_norm,
            "%s: step %d: loss %.17g and %.17g, norm %.17g and %.17g", l->name, i + 1, a->loss,
            b->loss, a->grad_norm, b->grad_norm);
        CHECK_MSG(!memcmp(a->bytes, b->bytes, sizeof a->bytes), "%s: step %d: %.0f bytes, not %.0f",
            l->name, i + 1, b->bytes[DT_AXIS_TP], a->bytes[DT_AXIS_TP]);
    }
    for (int r = 0; r < ranks_of(l); r++)
        CHECK_MSG(
            plain->digest[r] == pieces->digest[r], "%s: rank %d: parameters differ", l->name, r);
}

/* The dry run counts the memory and the bytes of the run, in every class. */
static void compare_dry(const layout *l, const outcome *real, train_files data) {
    dt_dry dry[MAX_RANKS];
    memset(dry, 0, sizeof dry);
    outcome *o = outcome_make(l, l->pieces, data, dry);
    const train_row *a = &real->rows[STEPS - 1], *b = &o->rows[STEPS - 1];
    CHECK_MSG(
        !memcmp(a->mem, b->mem, sizeof a->mem) && !memcmp(a->bytes, b->bytes, sizeof a->bytes),
        "%s: peak %.0f bytes, dry run %.0f", l->name, a->mem[TRAIN_PEAK], b->mem[TRAIN_PEAK]);
    free(o);
}

static const layout layouts[] = {
    { "tp2", 1, 2, 1, 1, 1, 0, 0, 0, 0, 0, 0, 4, 2, 0, DT_F32, 0, 4, 0 },
    { "tp2-sp", 1, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 4, 2, 0, DT_F32, 0, 4, 0 },
    { "tp4-sp-split", 1, 4, 1, 1, 1, 1, 0, 0, 0, 0, 0, 2, 1, 0, DT_F32, 0, 5, 1 },
    { "tp2-sp-3-of-4", 1, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 4, 1, 0, DT_BF16, 0, 3, 0 },
    { "tp8", 1, 4, 1, 1, 1, 0, 1, 2, 0, 0, 0, 3, 1, 0, DT_BF16, 0, 7, 1 },
    { "tp2-sp-selective", 1, 2, 1, 1, 1, 1, 1, 2, 0, 0, GPT_RECOMPUTE_SELECTIVE, 2, 1, 0, DT_F32, 0,
        2, 0 },
    { "tp2-sp-full-dropout", 1, 2, 1, 1, 1, 1, 0, 0, 0, 0, GPT_RECOMPUTE_FULL, 2, 2, 0, DT_F32, 0.2,
        4, 1 },
    { "dp2-tp2-zero3-sp", 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 2, 2, 3, DT_F32, 0, 2, 0 },
    { "tp2-cp2-sp", 1, 2, 2, 1, 1, 1, 0, 0, 0, 0, 0, 2, 1, 1, DT_F32, 0, 4, 1 },
    { "tp2-pp2-1f1b-sp", 1, 2, 1, 2, 1, 1, 0, 0, 0, DT_SCHEDULE_1F1B, 0, 2, 4, 0, DT_F32, 0, 2, 0 },
    { "tp2-pp2-zb-sp", 1, 2, 1, 2, 1, 1, 0, 0, 0, DT_SCHEDULE_ZB, 0, 2, 4, 0, DT_F32, 0, 2, 0 },
    { "tp2-ep2-sp", 1, 2, 1, 1, 2, 1, 0, 0, 4, 0, 0, 2, 1, 0, DT_F32, 0, 4, 0 },
};

static void test_layouts(train_files data) {
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        const layout *l = &layouts[i];
        outcome *plain = outcome_make(l, 0, data, NULL),
                *some = outcome_make(l, l->pieces, data, NULL);
        compare(l, plain, some);
        /* experts: a dry run counts the most rows that routing can send */
        if (!UNDER_ASAN && !l->experts) compare_dry(l, some, data);
        free(plain);
        free(some);
    }
}

// ==== Overlap on a simulated link ===============================================================

static dt_status run_on_clock(dt_ctx *ctx, void *user) {
    clock_enter(4);
    dt_status status = run_rank(ctx, user);
    clock_leave();
    return status;
}

/* Milliseconds of the fastest step, and the bytes that it sends over tp. */
static double waiting_ms(
    const layout *l, int pieces, double bandwidth, train_files data, double *bytes) {
    dt_kernels kernels = *dt_kernels_cpu();
    outcome *o = (outcome *)calloc(1, sizeof *o);
    if (!o) exit(1);
    dt_host host = clock_host();
    kernels.matmul = clock_matmul;
    o->config = config_of(l, pieces, data);
    o->config.model.width = 128;
    o->config.model.ffn = 512;
    o->config.model.layers = 4;
    dt_status status = dt_run(
        (dt_run_desc){
            .ranks = ranks_of(l), .host = &host, .kernels = &kernels, .link = { 0, bandwidth } },
        run_on_clock, o);
    CHECK(status == DT_OK);
    double ms = INFINITY;
    for (int i = 1; i < STEPS; i++) ms = fmin(ms, o->rows[i].ms);
    *bytes = o->rows[1].bytes[DT_AXIS_TP];
    free(o);
    return ms;
}

/* The traffic takes as long as the products: without overlap a step takes twice as long. */
static void test_overlap(train_files data) {
    layout l = { "tp4-sp", 1, 4, 1, 1, 1, 1, 0, 0, 0, 0, 0, 8, 1, 0, DT_F32, 0, 8, 0 };
    double bytes, products, plain, some;
    for (l.sp = 0; l.sp < 2; l.sp++) {
        products = waiting_ms(&l, 0, 0, data, &bytes);
        plain = waiting_ms(&l, 0, bytes / products * 1000, data, &bytes) / products;
        some = waiting_ms(&l, l.pieces, bytes / products * 1000, data, &bytes) / products;
        printf("test_tp_overlap: sp %d: %.0f ms of products, step %.2f, with overlap %.2f\n", l.sp,
            products, plain, some);
        CHECK_MSG(plain > 1.9, "sp %d: a step takes %.2f of the products' time", l.sp, plain);
        CHECK_MSG(
            some < (l.sp ? 1.4 : 1.6), "sp %d: with overlap %.2f, without %.2f", l.sp, some, plain);
    }
}

// ==== Calls =====================================================================================

/* Pieces have at least 8 rows, so one token is not cut; a mesh refuses a negative number of pieces. */
static dt_status small_rank(dt_ctx *ctx, void *user) {
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2, .tp_overlap = 4 });
    dt_tensor *w = dt_param_at(
        ctx, "w", DT_SHAPE(8, 8), DT_NORMAL(1), (dt_param_desc){ .shards = { { mesh.tp, 1 } } });
    static const int64_t rows[3] = { 1, 20, 40 };
    size_t count[3];
    (void)user;
    for (int i = 0; i < 3; i++) {
        dt_tensor *x = dt_new(ctx, DT_F32, DT_SHAPE(1, rows[i], 4));
        if (!x) return dt_error(ctx);
        for (int64_t k = 0; k < dt_count(x->shape); k++) ((float *)x->data)[k] = (float)k;
        uint64_t before = mesh.tp->seq;
        dt_row_linear(dt_place(x, mesh.tp, DT_SHARD(2)), w, NULL, NULL, mesh.tp, DT_REPLICATE);
        count[i] = (size_t)(mesh.tp->seq - before);
    }
    CHECK_MSG(count[0] == 1 && count[1] == 2 && count[2] == 4,
        "%zu, %zu and %zu all-reduces, not 1, 2 and 4", count[0], count[1], count[2]);
    return dt_error(ctx);
}

/* A block that ends with a column-parallel layer: its rows have arrived when listeners hear that the
   block ends, because ZeRO-3 then releases the layer's weight. */
typedef struct end_case {
    dt_mesh mesh;
    dt_tensor *w, *y;
    int ended, right;
} end_case;

static dt_tensor *end_block(dt_tensor *x, void *user) {
    end_case *c = (end_case *)user;
    return c->y = dt_column_linear(x, c->w, NULL, (dt_linear_desc){ 0 }, c->mesh.tp, DT_SHARD(1));
}

static void end_leave(dt_ctx *ctx, const dt_event *event, void *user) {
    end_case *c = (end_case *)user;
    (void)ctx;
    if (event->block != 1 || event->phase != DT_FORWARD || !c->y) return;
    c->ended++;
    for (int64_t i = 0; i < dt_count(c->y->shape); i++)
        c->right += ((const float *)c->y->data)[i] == 8;
}

static dt_status end_rank(dt_ctx *ctx, void *user) {
    end_case c = { .mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2, .tp_overlap = 4 }) };
    dt_listener listener = { .leave = end_leave, .user = &c };
    (void)user;
    c.w = dt_param_at(
        ctx, "w", DT_SHAPE(4, 8), DT_ONES, (dt_param_desc){ .shards = { { c.mesh.tp, 0 } } });
    dt_tensor *x = dt_new(ctx, DT_F32, DT_SHAPE(2, 16, 8));
    if (!x) return dt_error(ctx);
    for (int64_t i = 0; i < dt_count(x->shape); i++) ((float *)x->data)[i] = 1;
    dt_listen(ctx, &listener);
    dt_block(ctx, end_block, dt_place(x, c.mesh.tp, DT_SHARD(1)), &c);
    dt_unlisten(ctx, &listener);
    CHECK_MSG(c.ended == 1 && c.right == 2 * 32 * 2, "%d ends, %d of 128 values are right", c.ended,
        c.right);
    return dt_error(ctx);
}

static void test_calls(void) {
    char why[200] = "";
    dt_mesh_desc desc = { .tp = 2, .tp_overlap = -1 };
    CHECK(dt_mesh_resolve(&desc, 2, why, sizeof why) == DT_ERR_ARG && strstr(why, "tp_overlap -1"));
    CHECK(dt_run((dt_run_desc){ .ranks = 2 }, small_rank, NULL) == DT_OK);
    CHECK(dt_run((dt_run_desc){ .ranks = 2 }, end_rank, NULL) == DT_OK);
}

int main(void) {
    train_files data = { .count = 0 };
    if (!CHECK(train_files_find_sources(&data))) return check_done("test_tp_overlap");
    test_calls();
    test_layouts(data);
    test_overlap(data);
    train_files_free(&data);
    return check_done("test_tp_overlap");
}
