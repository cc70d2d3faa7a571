/* test_misuse.c - mistakes in a training program that would be silent, or would crash far from
   their cause: a tensor kept over dt_reset, a training state that is used after dt_zero_free, the
   data of a sharded parameter, and the source line that error texts name. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"

#include "tests/support/check.h"

static void no_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

typedef struct job {
    int kind, stage;
} job;

/* Runs `train` on 2 ranks. Returns the first failure. */
static dt_report run(dt_status (*train)(dt_ctx *ctx, void *user), dt_backend backend, job j) {
    static dt_host quiet;
    dt_report report;
    quiet = *dt_host_default();
    quiet.log = no_log;
    dt_run(
        (dt_run_desc){
            .ranks = 2, .backend = backend, .timeout_s = 60, .host = &quiet, .report = &report },
        train, &j);
    return report;
}

static void check_text(dt_report report, const char *what, const char *const words[3]) {
    for (int i = 0; i < 3 && words[i]; i++)
        CHECK_MSG(report.status != DT_OK && strstr(report.text, words[i]), "%s: no '%s' in: %s",
            what, words[i], report.text);
}

static dt_tensor *loss_of(dt_ctx *ctx, dt_tensor *w) {
    float x[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    dt_tensor *y = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(2, 4), x), w, NULL);
    return dt_mse(y, dt_input(ctx, DT_F32, DT_SHAPE(2, 4), x), 4);
}

/* ---- a tensor kept over dt_reset ---- */

enum { KEPT_STATE, KEPT_LOSS, KEPT_READ, KEPT_VIEW, KEPT_IN_BLOCK, KEPT_AS_RESIDUAL, KEPT_KINDS };

static dt_tensor *tanh_block(dt_tensor *x, void *user) {
    return dt_tanh(dt_linear(x, (dt_tensor *)user, NULL));
}

static dt_tensor *seen_in_block;
static dt_tensor *peeking_block(dt_tensor *x, void *user) {
    return seen_in_block = tanh_block(x, user);
}

static void use_kept(dt_ctx *ctx, dt_tensor *w, int kind) {
    float x[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(2, 4), x), *h = tanh_block(in, w);
    dt_tensor *loss = loss_of(ctx, w), *view = dt_reshape(w, DT_SHAPE(4, 4));
    dt_block(ctx, peeking_block, in, w);
    dt_backward(loss);
    dt_reset(ctx);
    in = dt_input(ctx, DT_F32, DT_SHAPE(2, 4), x);
    if (kind == KEPT_STATE) dt_backward(dt_mse(dt_linear(h, w, NULL), in, 1));
    if (kind == KEPT_LOSS) dt_backward(loss);
    if (kind == KEPT_READ) dt_item(loss);
    if (kind == KEPT_VIEW) dt_linear(in, view, NULL);
    if (kind == KEPT_IN_BLOCK) dt_add(in, seen_in_block);
    if (kind == KEPT_AS_RESIDUAL) dt_linear_at(in, w, NULL, (dt_linear_desc){ .residual = h });
}

static void test_kept_tensors(void) {
    static const char *const words[KEPT_KINDS][3] = {
        { "dt_linear(dt_tanh): this tensor f32 (2,4)", "outside of blocks", "dt_reset has freed" },
        { "dt_backward(dt_mse): this tensor f64 ()", "dt_mse made", "dt_reset has freed" },
        { "dt_item(dt_mse)", "dt_reset has freed", NULL },
        { "dt_linear(dt_reshape)", "dt_reset has freed", NULL },
        { "dt_add(dt_tanh)", "made in block 1", "dt_reset has freed" },
        { "dt_linear(dt_tanh)", "dt_reset has freed", NULL },
    };
    for (int kind = 0; kind < KEPT_KINDS; kind++) {
        dt_host quiet = *dt_host_default();
        quiet.log = no_log;
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet, .kernels = dt_kernels_cpu() });
        dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4, 4), DT_NORMAL(0.1));
        use_kept(ctx, w, kind);
        for (int i = 0; i < 3 && words[kind][i]; i++)
            CHECK_MSG(dt_error(ctx) == DT_ERR_ARG && strstr(dt_error_text(ctx), words[kind][i]),
                "kind %d: no '%s' in: %s", kind, words[kind][i], dt_error_text(ctx));
        dt_ctx_free(ctx);
    }
}

/* ---- own ops ---- */

static dt_status bad_index_back(dt_node *n) {
    int accumulate = 0;
    CHECK(!dt_wants(n, 1) && !dt_wants(n, -1) && !dt_wants(n, 99));
    void *g = *(int *)n->saved == 9 ? dt_grad_raw(n, 9, &accumulate) : dt_grad(n, *(int *)n->saved);
    CHECK(g == NULL);
    return dt_error(n->out->ctx);
}

static void test_own_op_index(void) {
    static const int indices[3] = { 1, -1, 9 };
    for (int i = 0; i < 3; i++) {
        dt_host quiet = *dt_host_default();
        quiet.log = no_log;
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet, .kernels = dt_kernels_cpu() });
        dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(1), DT_ONES);
        dt_tensor *out = dt_new(ctx, DT_F64, DT_SCALAR);
        char word[64];
        snprintf(word, sizeof word, "dt_grad: bumps has no input %d", indices[i]);
        int *saved = (int *)dt_record_saved(out, (dt_record_desc){ .name = "bumps",
                                                     .in = { w },
                                                     .backward = bad_index_back,
                                                     .saved_bytes = sizeof *saved });
        *saved = indices[i];
        dt_backward(out);
        CHECK_MSG(strstr(dt_error_text(ctx), word), "no '%s' in: %s", word, dt_error_text(ctx));
        dt_ctx_free(ctx);
    }
}

/* ---- the training state after dt_zero_free ---- */

static const char *const after_free[] = { "dt_zero_step", "dt_zero_state", "dt_zero_grad",
    "dt_zero_export", "dt_checkpoint_open", "dt_checkpoint_save", "dt_checkpoint_load" };
enum { AFTER_FREE = sizeof after_free / sizeof *after_free };

static dt_status train_after_free(dt_ctx *ctx, void *user) {
    job j = *(job *)user;
    float host[16];
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4, 4), DT_NORMAL(0.1));
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = j.stage });
    dt_checkpoint_desc desc = { .dir = "build/misuse.ckpt" };
    dt_checkpoint *c = j.kind >= 5 ? dt_checkpoint_open(opt, desc) : NULL;
    dt_backward(loss_of(ctx, w));
    dt_zero_step(opt, 0.1);
    dt_zero_free(opt);
    dt_zero_free(opt); /* no misuse: the second call does nothing */
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    if (j.kind == 0) dt_zero_step(opt, 0.1);
    if (j.kind == 1) dt_zero_state(opt, 0, w, host);
    if (j.kind == 2) dt_zero_grad(opt, w, host);
    if (j.kind == 3) dt_zero_export(opt, "build/misuse.safetensors", (dt_export_desc){ 0 });
    if (j.kind == 4) dt_checkpoint_open(opt, desc);
    if (j.kind == 5) dt_checkpoint_save(c);
    if (j.kind == 6) dt_checkpoint_load(c, NULL);
    CHECK(dt_zero_steps(opt) == 1 && dt_zero_state_bytes(opt) == 0);
    dt_checkpoint_close(c);
    return dt_error(ctx);
}

static void test_after_free(void) {
    for (int stage = 0; stage < 4; stage++)
        for (int kind = 0; kind < AFTER_FREE; kind++) {
            dt_report report =
                run(train_after_free, DT_BACKEND_THREADS, (job){ .kind = kind, .stage = stage });
            check_text(report, after_free[kind],
                (const char *const[3]){ after_free[kind], "dt_zero_free has freed", NULL });
        }
}

/* ---- the data of a sharded parameter ---- */

static dt_status read_null_data(dt_ctx *ctx, void *user) {
    (void)user;
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4, 4), DT_NORMAL(0.1));
    dt_zero_make(ctx, (dt_zero_desc){ .stage = 3 });
    volatile float *data = (volatile float *)w->data;
    if (dt_ctx_rank(ctx) == 1) data[0] = 1;
    return dt_barrier(dt_world(ctx));
}

static void test_null_data(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_UNDEFINED__)
    check_skip("a SIGSEGV under a sanitizer ends in the sanitizer's own report");
#else
    dt_report report = run(read_null_data, DT_BACKEND_PROCS, (job){ 0 });
    check_text(report, "NULL data",
        (const char *const[3]){ "rank 1", "SIGSEGV", "NULL outside of its block" });
#endif
}

/* ---- call sites ---- */

enum {
    SITE_STEP,
    SITE_BACKWARD,
    SITE_OWN_BACKWARD,
    SITE_READ,
    SITE_WRITE,
    SITE_DATA,
    SITE_EXPORT,
    SITE_REDISTRIBUTE,
    SITE_DISPATCH,
    SITE_KINDS
};
static int site_line[SITE_KINDS]; /* rank 0's line of each call */

#define HERE(kind) (site_line[kind] = __LINE__)

/* An op whose backward reads a sharded parameter of another bucket: the call site is that of
   dt_backward. */
static dt_status reading_back(dt_node *n) {
    float host[16];
    return dt_read(dt_param_find(n->out->ctx, "other.w"), host);
}

static dt_tensor *reading_loss(dt_ctx *ctx, dt_tensor *w) {
    dt_tensor *loss = loss_of(ctx, w), *out = dt_new(ctx, DT_F64, DT_SCALAR);
    dt_record_desc desc = { .name = "reading", .in = { loss }, .backward = reading_back };
    return dt_record(out, desc);
}

/* Rank 0 alone makes the call, for which it needs rank 1. */
static dt_status train_sites(dt_ctx *ctx, void *user) {
    job j = *(job *)user;
    float host[16] = { 0 };
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4, 4), DT_NORMAL(0.1));
    dt_scope(ctx, "other.");
    dt_param(ctx, "w", DT_SHAPE(4, 4), DT_NORMAL(0.1));
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = j.stage });
    int own = j.kind == SITE_OWN_BACKWARD;
    dt_tensor *loss = own ? reading_loss(ctx, w) : loss_of(ctx, w);
    if (j.kind != SITE_BACKWARD && !own) dt_backward(loss);
    if (dt_ctx_rank(ctx) == 1) return dt_error(ctx);
    if (j.kind == SITE_STEP) HERE(SITE_STEP), dt_zero_step(opt, 0.1);
    if (j.kind == SITE_BACKWARD) HERE(SITE_BACKWARD), dt_backward(loss), dt_zero_step(opt, 0.1);
    if (own) HERE(SITE_OWN_BACKWARD), dt_backward(loss), dt_zero_step(opt, 0.1);
    if (j.kind == SITE_READ) HERE(SITE_READ), dt_read(w, host);
    if (j.kind == SITE_WRITE) HERE(SITE_WRITE), dt_write(w, host);
    if (j.kind == SITE_DATA) HERE(SITE_DATA), dt_data(w);
    dt_comm *world = dt_world(ctx);
    dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(4, 4), host);
    if (j.kind == SITE_REDISTRIBUTE)
        HERE(SITE_REDISTRIBUTE), dt_redistribute(x, world, DT_PARTIAL, DT_REPLICATE);
    if (j.kind == SITE_DISPATCH) {
        dt_tensor *tokens = dt_input(ctx, DT_F32, DT_SHAPE(1, 4, 4), host);
        dt_routing *r = dt_route(tokens, x, (dt_route_desc){ .k = 1 });
        HERE(SITE_DISPATCH), dt_dispatch(tokens, r, world);
    }
    if (j.kind == SITE_EXPORT)
        HERE(SITE_EXPORT), dt_zero_export(opt, "build/misuse.safetensors", (dt_export_desc){ 0 });
    return dt_error(ctx);
}

static void test_call_sites(void) {
    for (int kind = 0; kind < SITE_KINDS; kind++)
        for (int stage = kind == SITE_STEP || kind >= SITE_EXPORT ? 0 : 3; stage < 4; stage++) {
            dt_report report =
                run(train_sites, DT_BACKEND_THREADS, (job){ .kind = kind, .stage = stage });
            char site[64];
            snprintf(site, sizeof site, "test_misuse.c:%d", site_line[kind]);
            check_text(report, "call site", (const char *const[3]){ site, NULL, NULL });
        }
}

/* ---- pipelines ---- */

enum { PIPE_FINE, PIPE_SAME_PARAMS, PIPE_NO_INPUT, PIPE_SITE };

typedef struct pipe_model {
    int kind;
    dt_tensor *w;
} pipe_model;

static dt_tensor *run_stage(dt_tensor *x, int stage, int micro, void *user) {
    pipe_model *m = (pipe_model *)user;
    float data[8] = { 1, 2, 3, 4, 5, 6, 7, (float)micro };
    dt_tensor *in = dt_input(m->w->ctx, DT_F32, DT_SHAPE(2, 4), data);
    if (stage == 1 && m->kind != PIPE_NO_INPUT) in = x;
    dt_tensor *y = dt_linear(in, m->w, NULL);
    return stage == 0 ? y : dt_mse(y, dt_input(m->w->ctx, DT_F32, DT_SHAPE(2, 4), data), 4);
}

static int notices; /* about a stage that does not use its input */
static void count_notices(void *user, int level, int rank, const char *text) {
    (void)user, (void)rank;
    if (level == DT_LOG_NOTICE && strstr(text, "does not depend on its input"))
        __atomic_fetch_add(&notices, 1, __ATOMIC_SEQ_CST);
}

static dt_status train_pipe(dt_ctx *ctx, void *user) {
    job j = *(job *)user;
    pipe_model m = { .kind = j.kind };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .pp = 2 });
    int rank = dt_comm_rank(mesh.pp);
    for (int stage = 0; stage < 2; stage++) {
        if (stage != rank && j.kind != PIPE_SAME_PARAMS) continue;
        dt_stage(ctx, stage);
        dt_tensor *w = dt_param(ctx, stage ? "w1" : "w0", DT_SHAPE(4, 4), DT_NORMAL(0.1));
        if (stage == rank) m.w = w;
    }
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = j.stage, .mesh = &mesh });
    dt_schedule *s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_1F1B, .ranks = 2, .micros = 3 });
    for (int step = 0; step < 3; step++) {
        if (j.kind == PIPE_SITE && rank == 1) return dt_error(ctx);
        site_line[0] = __LINE__ + 1;
        dt_pipe_run(
            ctx, (dt_pipe_desc){ .schedule = s, .comm = mesh.pp, .run = run_stage, .user = &m });
        dt_zero_step(opt, 0.1);
    }
    dt_schedule_free(s);
    return dt_error(ctx);
}

static void test_pipes(void) {
    for (int stage = 0; stage < 4; stage++) {
        dt_host counting = *dt_host_default();
        counting.log = count_notices;
        for (int kind = PIPE_FINE; kind <= PIPE_NO_INPUT; kind += PIPE_NO_INPUT) {
            job j = { .kind = kind, .stage = stage };
            notices = 0;
            CHECK(dt_run((dt_run_desc){ .ranks = 2, .timeout_s = 60, .host = &counting },
                      train_pipe, &j) == DT_OK);
            CHECK_MSG(notices == (kind == PIPE_NO_INPUT), "%d notices of kind %d", notices, kind);
        }
        check_text(run(train_pipe, DT_BACKEND_THREADS, (job){ PIPE_SAME_PARAMS, stage }),
            "parameters of all stages on every rank",
            (const char *const[3]){ "pipeline ranks", "both register w0", "DT_GRAD_PARTIAL" });
        dt_report report = run(train_pipe, DT_BACKEND_THREADS, (job){ PIPE_SITE, stage });
        char site[64];
        snprintf(site, sizeof site, "test_misuse.c:%d", site_line[0]);
        check_text(report, "dt_pipe_run", (const char *const[3]){ site, NULL, NULL });
    }
}

int main(void) {
    test_kept_tensors();
    test_own_op_index();
    test_after_free();
    test_null_data();
    test_call_sites();
    test_pipes();
    return check_done("test_misuse");
}
