/* test_nan.c - dt_zero.h, section 10, and dt_check_finite: which rank made a NaN, and which op

   One rank makes one NaN or Inf in one micro-batch. The error of the step must name that rank, the
   micro-batch and the parameter; with dt_check_finite the op, the block and the stage. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"

/* BAD_MICRO: the first bad micro-batch */
enum { C = 8, ROWS = 4, MICROS = 3, BAD_MICRO = 1, BAD_STEP = 2 };

/* Where the NaN is made. */
enum {
    INPUT = 0, /* an element of the input */
    DIVISION,  /* 0/0 in block 2 */
    OVERFLOW,  /* exp of a large number in block 2, whose Inf becomes NaN in block 3 */
    WEIGHT,    /* a gradient of one parameter in the backward */
    LATER,     /* the same op, in the gradient of its input */
    PLACES
};

typedef struct nan_run {
    int place, bad, check;
    dt_mesh_desc mesh;
    int stage, tree;
    double value; /* WEIGHT and LATER: NAN or INFINITY */
    int info_rank[8];
} nan_run;

static void log_nothing(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_report run(int ranks, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    dt_report report;
    dt_host host = *dt_host_default();
    host.log = log_nothing;
    dt_run((dt_run_desc){ .ranks = ranks, .timeout_s = 30, .host = &host, .report = &report },
        rank_main, user);
    return report;
}

typedef struct pass {
    dt_ctx *ctx;
    const nan_run *r;
    const dt_mesh *mesh;
    int planted; /* this rank plants in this micro-batch */
    int layers;  /* number of layers of this micro-batch so far */
    int step;
} pass;

/* y = x + 0 * w: the identity, whose backward can make a bad gradient of x or of w */
typedef struct bad_saved {
    int input;
    double value;
} bad_saved;

static dt_status bad_back(dt_node *n) {
    const bad_saved *s = (const bad_saved *)n->saved;
    for (int i = 0; i < 2; i++) {
        float *g = dt_wants(n, i) ? (float *)dt_grad(n, i) : NULL;
        int64_t count = g ? dt_count(n->in[i]->shape) : 0;
        for (int64_t k = 0; k < count && i == 0; k++) g[k] += ((const float *)n->out->grad)[k];
        if (g && s->input == i) g[3] = (float)s->value;
    }
    return DT_OK;
}

static dt_tensor *bad_op(dt_tensor *x, dt_tensor *w, int input, double value) {
    dt_tensor *y = dt_new(x->ctx, DT_F32, x->shape);
    if (!y) return NULL;
    memcpy(y->data, x->data, (size_t)dt_count(x->shape) * sizeof(float));
    bad_saved *s = (bad_saved *)dt_record_saved(y, (dt_record_desc){ .name = "bad_op",
                                                       .in = { x, w },
                                                       .backward = bad_back,
                                                       .saved_bytes = sizeof(bad_saved) });
    if (s) *s = (bad_saved){ input, value };
    return y;
}

static dt_tensor *scaled(dt_ctx *ctx, dt_tensor *x, float value) {
    float v[ROWS * C];
    for (int i = 0; i < ROWS * C; i++) v[i] = value;
    return dt_mul(x, dt_input(ctx, DT_F32, DT_SHAPE(ROWS, C), v));
}

static dt_tensor *layer(dt_tensor *x, void *user) {
    pass *p = (pass *)user;
    dt_ctx *ctx = p->ctx;
    int block = ++p->layers;
    dt_tensor *w = dt_param_find(ctx, block == 1 ? "w1" : block == 2 ? "w2" : "w3");
    x = dt_linear(x, w, NULL);
    if (block != 2 || !p->planted) return x;
    if (p->r->place == DIVISION) {
        dt_tensor *zero = scaled(ctx, x, 0);
        x = dt_add(x, dt_div(zero, zero));
    }
    if (p->r->place == OVERFLOW) x = dt_exp(scaled(ctx, dt_mul(x, x), 1e30f));
    if (p->r->place == WEIGHT) x = bad_op(x, w, 1, p->r->value);
    if (p->r->place == LATER) x = bad_op(x, w, 0, p->r->value);
    return x;
}

static dt_tensor *input_of(pass *p, int micro) {
    float x[ROWS * C];
    p->layers = 0;
    for (int i = 0; i < ROWS * C; i++)
        x[i] = (float)((i * 7 + micro * 3 + p->mesh->replica * 5) % 13 - 6) / 8;
    if (p->r->place == INPUT && p->planted) x[11] = NAN;
    return dt_input(p->ctx, DT_F32, DT_SHAPE(ROWS, C), x);
}

static dt_tensor *loss_of(pass *p, dt_tensor *x) {
    float y[ROWS * C];
    for (int i = 0; i < ROWS * C; i++) y[i] = (float)(i % 5 - 2) / 3;
    return dt_mse(x, dt_input(p->ctx, DT_F32, DT_SHAPE(ROWS, C), y), 1000);
}

static void register_all(dt_ctx *ctx, int pp) {
    static const char *const names[] = { "w1", "w2", "w3" };
    for (int i = 0; i < 3; i++) {
        if (pp > 1) dt_stage(ctx, i == 2);
        dt_scope(ctx, NULL);
        dt_param(ctx, names[i], DT_SHAPE(C, C), DT_NORMAL(0.3));
    }
}

static void one_step(pass *p, dt_zero *zero, nan_run *r) {
    dt_ctx *ctx = p->ctx;
    for (int m = 0; m < MICROS; m++) {
        p->planted = p->step == BAD_STEP && m >= BAD_MICRO && dt_ctx_rank(ctx) == r->bad;
        dt_micro(ctx, m, MICROS);
        dt_tensor *x = input_of(p, m);
        for (int i = 0; i < 3; i++) x = dt_block(ctx, layer, x, p);
        dt_backward(loss_of(p, x));
        dt_reset(ctx);
    }
    int me = dt_ctx_rank(ctx);
    dt_step_info info = dt_zero_step(zero, 0.01);
    r->info_rank[me] = info.bad_rank;
}

static dt_status nan_main(dt_ctx *ctx, void *user) {
    nan_run *r = (nan_run *)user;
    dt_mesh mesh = dt_mesh_make(ctx, r->mesh);
    pass p = { .ctx = ctx, .r = r, .mesh = &mesh };
    register_all(ctx, 1);
    dt_zero *zero = dt_zero_make(ctx,
        (dt_zero_desc){ .mesh = &mesh, .stage = r->stage, .tree = r->tree, .bucket_bytes = 64 });
    dt_check_finite(ctx, r->check);
    for (p.step = 1; p.step <= BAD_STEP; p.step++) one_step(&p, zero, r);
    dt_barrier(dt_world(ctx));
    return dt_error(ctx);
}

static void check_words(const char *name, int rank, dt_report report, const char *words) {
    char copy[300];
    CHECK_MSG(report.status == DT_ERR_NUMERIC && report.rank == rank, "%s: rank %d: %s %s", name,
        report.rank, dt_status_name(report.status), report.text);
    snprintf(copy, sizeof copy, "%s", words);
    for (char *w = strtok(copy, "|"); w; w = strtok(NULL, "|"))
        CHECK_MSG(strstr(report.text, w), "%s: '%s' is not in '%s'", name, w, report.text);
}

/* Data parallel over 4 ranks, and over 2 of tp whose layers are all replicated. */
static void test_ranks(void) {
    static const char *const loss = "; the loss of micro-batch 2 is not finite";
    for (int code = 0; code < 4 * PLACES * 3; code++) {
        nan_run r = { .stage = code % 4, .place = code / 4 % PLACES, .value = NAN };
        int way = code / 4 / PLACES;
        char name[80], words[300];
        r.bad = way == 2 ? 3 : 2;
        r.mesh = way == 2 ? (dt_mesh_desc){ .dp = 2, .tp = 2 } : (dt_mesh_desc){ .dp = 4 };
        r.tree = way == 1;
        if (code % 3) r.value = INFINITY;
        snprintf(name, sizeof name, "place %d at stage %d, way %d", r.place, r.stage, way);
        snprintf(words, sizeof words,
            "step 2: the gradient norm is|%s on rank %d, in the rank's own gradient%s%s|"
            "Call dt_check_finite(ctx, 1) before",
            r.place == WEIGHT ? "element 3 of w2" : "", r.bad,
            r.stage >= 2 || r.tree ? " of micro-batch 2" : "", r.place < WEIGHT ? loss : "");
        dt_report report = run(4, nan_main, &r);
        check_words(name, r.bad, report, words);
        if (r.place >= WEIGHT)
            CHECK_MSG(!strstr(report.text, "the loss"), "%s: '%s'", name, report.text);
        for (int k = 0; k < 4; k++)
            CHECK_MSG(
                r.info_rank[k] == r.bad, "%s: rank %d reports rank %d", name, k, r.info_rank[k]);
    }
}

/* With dt_check_finite the rank that makes the NaN fails in the op that makes it. */
static void test_ops(void) {
    static const char *const words[PLACES] = {
        "dt_linear, in block 1, micro-batch 2 of 3: element 11 of its input 0, dt_input (4,8), is "
        "NaN; no tested op made it: check the data passed to dt_input",
        "dt_div makes a NaN, in block 2, micro-batch 2 of 3|element 0 of its output (4,8)|inputs "
        "on this rank "
        "have no NaN",
        "makes a NaN, in block 3, micro-batch 2 of 3; the first Inf came from dt_exp in block 2",
        "backward of bad_op, in block 2, micro-batch 2 of 3|element 3 of the gradient of w2 (8,8) "
        "is "
        "not finite; the gradient of its output is finite",
        "backward of bad_op, in block 2, micro-batch 2 of 3|element 3 of the gradient of dt_linear",
    };
    for (int code = 0; code < 4 * PLACES; code++) {
        nan_run r = { .stage = code % 4,
            .place = code / 4,
            .value = code % 2 ? NAN : INFINITY,
            .check = 1,
            .bad = 2,
            .mesh = { .dp = 4 } };
        char name[80];
        snprintf(name, sizeof name, "op at place %d, stage %d", r.place, r.stage);
        check_words(name, r.bad, run(4, nan_main, &r), words[r.place]);
    }
}

/* A pipeline of 2 stages and 2 replicas: w1 and w2 are in stage 0, whose ranks are 0 and 1. */
static dt_tensor *stage_run(dt_tensor *x, int stage, int micro, void *user) {
    pass *p = (pass *)user;
    p->planted = p->step == BAD_STEP && micro == BAD_MICRO && dt_ctx_rank(p->ctx) == p->r->bad;
    if (stage == 1) return loss_of(p, dt_linear(x, dt_param_find(p->ctx, "w3"), NULL));
    x = dt_block(p->ctx, layer, input_of(p, micro), p);
    return dt_block(p->ctx, layer, x, p);
}

static dt_status pipe_main(dt_ctx *ctx, void *user) {
    nan_run *r = (nan_run *)user;
    dt_mesh mesh = dt_mesh_make(ctx, r->mesh);
    pass p = { .ctx = ctx, .r = r, .mesh = &mesh };
    for (int i = 0; i < 3; i++) {
        static const char *const names[] = { "w1", "w2", "w3" };
        if ((i == 2) != mesh.coord.pp) continue;
        dt_stage(ctx, mesh.coord.pp);
        dt_scope(ctx, NULL);
        dt_param(ctx, names[i], DT_SHAPE(C, C), DT_NORMAL(0.3));
    }
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh, .stage = r->stage });
    dt_schedule *s = dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = 2, .micros = MICROS });
    dt_check_finite(ctx, r->check);
    for (p.step = 1; p.step <= BAD_STEP; p.step++) {
        dt_pipe_run(
            ctx, (dt_pipe_desc){ .schedule = s, .comm = mesh.pp, .run = stage_run, .user = &p });
        r->info_rank[dt_ctx_rank(ctx)] = dt_zero_step(zero, 0.01).bad_rank;
    }
    dt_barrier(dt_world(ctx));
    return dt_error(ctx);
}

static void test_stages(void) {
    for (int code = 0; code < 16; code++) {
        nan_run r = { .stage = code / 4,
            .place = code % 2 ? WEIGHT : DIVISION,
            .check = code / 2 % 2,
            .value = NAN,
            .bad = 1,
            .mesh = { .dp = 2, .pp = 2 } };
        char name[80];
        snprintf(
            name, sizeof name, "pipeline, place %d, stage %d, check %d", r.place, r.stage, r.check);
        dt_report report = run(4, pipe_main, &r);
        if (r.check)
            check_words(name, 1, report,
                r.place == WEIGHT
                    ? "backward of bad_op, in block |micro-batch 2 of 3, stage 0|gradient of w2"
                    : "dt_div makes a NaN, in block |micro-batch 2 of 3, stage 0");
        else if (r.place == WEIGHT)
            check_words(name, 1, report, "of w2 on rank 1, in the rank's own gradient");
        else /* the forward's NaN is in all gradients of replica 1; its loss is on the last stage */
            check_words(name, 3, report,
                "of w3 on rank 3, in the rank's own gradient|as on 1 other ranks|the loss of "
                "micro-batch 2 is not finite");
    }
}

/* A gradient that was given up with dt_clear_grads is not blamed for a later NaN. */
static dt_status cleared_main(dt_ctx *ctx, void *user) {
    nan_run *r = (nan_run *)user;
    dt_mesh mesh = dt_mesh_make(ctx, r->mesh);
    pass p = { .ctx = ctx, .r = r, .mesh = &mesh };
    register_all(ctx, 1);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh, .stage = r->stage });
    for (int pass = 0; pass < 2; pass++) {
        p.planted = dt_ctx_rank(ctx) == pass; /* first rank 0, then rank 1 */
        dt_tensor *x = input_of(&p, 0);
        for (int i = 0; i < 3; i++) x = dt_block(ctx, layer, x, &p);
        dt_backward(loss_of(&p, x));
        dt_reset(ctx);
        if (pass == 0) dt_clear_grads(ctx);
    }
    dt_zero_step(zero, 0.01);
    dt_barrier(dt_world(ctx));
    return dt_error(ctx);
}

static void test_cleared(void) {
    for (int stage = 0; stage < 4; stage++) {
        nan_run r = { .stage = stage, .place = INPUT, .mesh = { .dp = 2 } };
        check_words(
            "cleared", 1, run(2, cleared_main, &r), "on rank 1, in the rank's own gradient");
    }
}

/* The search copies sums of squares to the host, and then only pieces that may hold a bad element.
   A finite number whose square overflows is not a bad element. */
static size_t moved;

static dt_status counted_move(void *to, const void *from, size_t bytes, void *stream) {
    moved += bytes;
    return dt_kernels_cpu()->move(to, from, bytes, stream);
}

static void test_search(void) {
    enum { N = DT_PIECE * DT_PIECE + 3000 };
    static const dt_dtype types[] = { DT_F32, DT_BF16, DT_F16, DT_F64 };
    static const int64_t places[] = { 0, 1023, 1024, 500000, DT_PIECE * DT_PIECE - 1,
        DT_PIECE * DT_PIECE, N - 1 };
    dt_kernels kernels = *dt_kernels_cpu();
    kernels.move = counted_move;
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .kernels = &kernels });
    char *x = (char *)calloc(N, 8);
    if (!CHECK(x != NULL)) return;
    for (int t = 0; t < 4; t++) {
        dt_dtype type = types[t];
        size_t size = dt_dtype_size(type), sums = (N / DT_PIECE + 1) * sizeof(double);
        memset(x, 0, N * size);
        moved = 0;
        CHECK(dt__find_bad(ctx, type, x, N, 1) == -1 && moved == sums);
        for (size_t k = 0; k < sizeof places / sizeof *places; k++)
            for (int inf = 0; inf < 2; inf++) {
                dt__set_number(type, x, (size_t)places[k], inf ? -INFINITY : NAN);
                moved = 0;
                CHECK(dt__find_bad(ctx, type, x, N, 1) == places[k]);
                CHECK(moved <= sums + DT_PIECE * size);
                CHECK(dt__find_bad(ctx, type, x, N, 0) == (inf ? -1 : places[k]));
                CHECK(dt__find_bad(ctx, type, x, places[k], 1) == -1);
                dt__set_number(type, x, (size_t)places[k], 0);
            }
        double large = type == DT_F64 ? 1e300 : type == DT_F16 ? 65504 : 3e38;
        for (int i = 0; i < N; i++) dt__set_number(type, x, (size_t)i, i % 2 ? large : -large);
        CHECK(dt__find_bad(ctx, type, x, N, 1) == -1);
        dt__set_number(type, x, N - 1, NAN);
        CHECK(dt__find_bad(ctx, type, x, N, 0) == N - 1);
    }
    CHECK(dt_error(ctx) == DT_OK);
    free(x);
    dt_ctx_free(ctx);
}

int main(void) {
    test_search();
    test_ranks();
    test_ops();
    test_stages();
    test_cleared();
    return check_done("test_nan");
}
