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
    int kind, stage, ranks; /* ranks: 0 means 2 */
} job;

/* Runs `train` on j.ranks ranks. Returns the first failure. */
static dt_report run(dt_status (*train)(dt_ctx *ctx, void *user), dt_backend backend, job j) {
    static dt_host quiet;
    dt_report report;
    quiet = *dt_host_default();
    quiet.log = no_log;
    dt_run((dt_run_desc){ .ranks = j.ranks ? j.ranks : 2,
               .backend = backend,
               .timeout_s = 60,
               .host = &quiet,
               .report = &report },
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
    SITE_MESH,
    SITE_KV_SPLIT,
    SITE_DISTRIBUTE,
    SITE_ROUTE,
    SITE_ROUTE_BIAS,
    SITE_SPANS,
    SITE_LABELS,
    SITE_STATE,
    SITE_GRAD,
    SITE_CKPT_OPEN,
    SITE_CKPT_POLL,
    SITE_CKPT_CLOSE,
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

/* Calls of dt_parallel.h. */
static void call_layout(dt_ctx *ctx, int kind) {
    float host[16] = { 0 };
    double counts[4] = { 0 };
    int32_t labels[4] = { 0 };
    dt_comm *world = dt_world(ctx);
    dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(1, 4, 4), host);
    dt_tensor *w = dt_input(ctx, DT_F32, DT_SHAPE(4, 4), host);
    dt_tensor *bias = dt_input(ctx, DT_F32, DT_SHAPE(4), host);
    dt_axis_placement axis = { world, DT_SHARD(0) };
    dt_schedule_desc desc = { .kind = DT_SCHEDULE_1F1B, .ranks = 2, .micros = 2 };
    dt_span mine[64] = { { 0 } }, all[64];
    if (kind == SITE_MESH) HERE(kind), dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2 });
    if (kind == SITE_KV_SPLIT) HERE(kind), dt_kv_split(ctx, world, 2);
    if (kind == SITE_DISTRIBUTE)
        HERE(kind), dt_distribute(ctx, DT_F32, DT_SHAPE(4, 4), host, &axis, 1);
    if (kind == SITE_ROUTE) {
        dt_route_desc d = { .k = 1, .tp = world, .outside = DT_SHARD(1) };
        HERE(kind), dt_route(x, w, d);
    }
    if (kind == SITE_ROUTE_BIAS) HERE(kind), dt_route_update_bias(bias, counts, 0.1, &world, 1);
    if (kind == SITE_SPANS) {
        dt_schedule *s = dt_schedule_make(ctx, desc);
        HERE(kind), dt_pipe_gather_spans(world, s, mine, all);
        dt_schedule_free(s);
    }
    if (kind == SITE_LABELS) HERE(kind), dt_count_labels(world, labels, 4);
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
    dt_checkpoint_desc saving = { .dir = "build/misuse_site.ckpt", .background = 1 };
    dt_checkpoint *c = NULL;
    if (j.kind == SITE_CKPT_POLL || j.kind == SITE_CKPT_CLOSE) {
        dt_zero_step(opt, 0.1);
        c = dt_checkpoint_open(opt, saving);
        dt_checkpoint_save(c);
    }
    if (dt_ctx_rank(ctx) > 0) return dt_error(ctx);
    call_layout(ctx, j.kind);
    if (j.kind == SITE_STATE) HERE(SITE_STATE), dt_zero_state(opt, 0, w, host);
    if (j.kind == SITE_GRAD) HERE(SITE_GRAD), dt_zero_grad(opt, w, host);
    if (j.kind == SITE_CKPT_OPEN) HERE(SITE_CKPT_OPEN), dt_checkpoint_open(opt, saving);
    if (j.kind == SITE_CKPT_POLL) HERE(SITE_CKPT_POLL), dt_checkpoint_poll(c);
    if (j.kind == SITE_CKPT_CLOSE) HERE(SITE_CKPT_CLOSE), dt_checkpoint_close(c);
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
            /* stages that keep the whole array on each rank gather nothing */
            if ((kind == SITE_STATE || kind == SITE_GRAD) && stage == 0) continue;
            job j = { .kind = kind, .stage = stage, .ranks = kind == SITE_KV_SPLIT ? 4 : 2 };
            dt_report report = run(train_sites, DT_BACKEND_THREADS, j);
            char site[64];
            snprintf(site, sizeof site, "test_misuse.c:%d", site_line[kind]);
            check_text(report, "call site", (const char *const[3]){ site, NULL, NULL });
            const char *once = strstr(report.text, site);
            CHECK_MSG(!once || !strstr(once + 1, "test_misuse.c:"), "twice: %s", report.text);
        }
}

/* ---- ZeRO-3: ranks that gather parameters for different purposes ---- */

enum { GATHER_ALIKE, GATHER_READ, GATHER_OTHER_PARAM, GATHER_OTHER_PHASE, GATHER_KINDS };
enum { GATHER_ENDED = GATHER_KINDS, GATHER_READ_ENDED }; /* rank 1 ends before */

/* All buckets have equal counts, so only the purposes of the gathers differ. */
static dt_status gather_unlike(dt_ctx *ctx, void *user) {
    job j = *(job *)user;
    int first = dt_ctx_rank(ctx) == 0;
    float host[16];
    dt_tensor *w0 = dt_param(ctx, "w", DT_SHAPE(4, 4), DT_NORMAL(0.1));
    dt_scope(ctx, "other.");
    dt_tensor *w1 = dt_param(ctx, "w", DT_SHAPE(4, 4), DT_NORMAL(0.1));
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = 3 });
    if (j.kind >= GATHER_ENDED && !first) return dt_error(ctx);
    if (j.kind == GATHER_READ_ENDED || (j.kind == GATHER_READ && first)) dt_read(w0, host);
    if (j.kind == GATHER_OTHER_PARAM) loss_of(ctx, first ? w0 : w1);
    for (int step = 0; step < 3; step++) {
        dt_tensor *loss = loss_of(ctx, w0);
        if (j.kind == GATHER_OTHER_PHASE && first) {
            dt_reset(ctx);
            loss = loss_of(ctx, w0);
        }
        dt_backward(loss);
        dt_read(w1, host);
        dt_data(w1);
        dt_zero_step(opt, 0.1);
        dt_reset(ctx);
    }
    return dt_error(ctx);
}

static void test_gather_purposes(void) {
    static const char *const words[GATHER_KINDS][2] = {
        [GATHER_READ] = { "bucket 0 for dt_read or dt_write at test_misuse.c:",
            "call them on every rank; bucket 0 holds w" },
        [GATHER_OTHER_PARAM] = { "bucket 1 for the forward in dt_linear",
            "bucket 1 holds other.w" },
        [GATHER_OTHER_PHASE] = { "bucket 0 for the backward at test_misuse.c:",
            "on dp); bucket 0 holds w" },
    };
    CHECK(run(gather_unlike, DT_BACKEND_THREADS, (job){ .kind = GATHER_ALIKE }).status == DT_OK);
    for (int kind = GATHER_READ; kind < GATHER_KINDS; kind++)
        for (int procs = 0; procs < 2; procs++)
            check_text(run(gather_unlike, procs ? DT_BACKEND_PROCS : DT_BACKEND_THREADS,
                           (job){ .kind = kind }),
                "a gather",
                (const char *const[3]){
                    "calls all-gather f32 x 1024 of bucket 0 for the forward in dt_linear",
                    words[kind][0], words[kind][1] });
    check_text(run(gather_unlike, DT_BACKEND_THREADS, (job){ .kind = GATHER_ENDED }),
        "a gather of one rank",
        (const char *const[3]){ "rank 1 ended without calling all-gather of bucket 0 for the forw",
            "in which rank 0 waits in dt_linear; bucket 0 holds w; check that all ranks run",
            NULL });
    check_text(run(gather_unlike, DT_BACKEND_THREADS, (job){ .kind = GATHER_READ_ENDED }),
        "a read of one rank",
        (const char *const[3]){ "rank 1 ended without calling all-gather of bucket 0 for dt_read",
            "; bucket 0 holds w; at ZeRO-3 dt_read and dt_write of a parameter are collective",
            NULL });
}

/* ---- the call site of a failure that concerns this rank alone ---- */

enum {
    LOCAL_ITEM,
    LOCAL_DATA,
    LOCAL_READ,
    LOCAL_LONG_NAME,
    LOCAL_BACKWARD,
    LOCAL_MESH,
    LOCAL_ROUTE,
    LOCAL_STEP,
    LOCAL_STATE,
    LOCAL_SAVE,
    LOCAL_OP, /* an op is no macro: its text has no line, not even that of an earlier call */
    LOCAL_KINDS
};

static int fail_here(dt_ctx *ctx, int kind) {
    float data[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    char name[600];
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = 0;
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4, 4), DT_NORMAL(0.1));
    dt_tensor *far = dt_param(ctx, kind == LOCAL_LONG_NAME ? name : "far", DT_SHAPE(4), DT_ONES);
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = 0 });
    dt_checkpoint *c = dt_checkpoint_open(opt, (dt_checkpoint_desc){ 0 });
    dt_tensor *kept = loss_of(ctx, w), *x = dt_input(ctx, DT_F32, DT_SHAPE(2, 4), data);
    if (kind <= LOCAL_DATA) dt_reset(ctx);
    switch (kind) {
    case LOCAL_ITEM: return dt_item(kept), __LINE__;
    case LOCAL_DATA: return dt_data(kept), __LINE__;
    case LOCAL_READ: return dt_read(w, NULL), __LINE__;
    case LOCAL_LONG_NAME: return dt_write(far, NULL), __LINE__;
    case LOCAL_BACKWARD: return dt_backward(x), __LINE__;
    case LOCAL_MESH: return dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 3 }), __LINE__;
    case LOCAL_ROUTE: return dt_route(x, x, (dt_route_desc){ .k = 9 }), __LINE__;
    case LOCAL_STEP: return dt_zero_step(opt, -1), __LINE__;
    case LOCAL_STATE: return dt_zero_state(opt, 77, w, data), __LINE__;
    case LOCAL_SAVE: return dt_checkpoint_save(c), __LINE__;
    default: dt_item(kept), dt_linear(x, far, NULL); return 0;
    }
}

static void test_local_sites(void) {
    for (int kind = 0; kind < LOCAL_KINDS; kind++) {
        dt_host quiet = *dt_host_default();
        quiet.log = no_log;
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet, .kernels = dt_kernels_cpu() });
        int line = fail_here(ctx, kind);
        const char *text = dt_error_text(ctx), *at = strstr(text, "test_misuse.c:");
        char want[64] = "";
        if (line) snprintf(want, sizeof want, "test_misuse.c:%d", line);
        CHECK_MSG(dt_error(ctx) != DT_OK && strcmp(at ? at : "", want) == 0, "%d, %s: %s", kind,
            want, text);
        dt_ctx_free(ctx);
    }
}

/* ---- the text of a call site: its name has a limit, and stands in an error text once ---- */

enum { SITE_TEXT_BYTES = 500, SITE_CUT = 31 };

static int count_of(const char *text, const char *part) {
    int n = 0;
    for (const char *s = strstr(text, part); s; s = strstr(s + 1, part)) n++;
    return n;
}

static dt_ctx *context_of_rank(int rank) {
    static dt_host quiet;
    quiet = *dt_host_default();
    quiet.log = no_log;
    return dt_ctx_make((dt_ctx_desc){ .rank = rank, .host = &quiet, .kernels = dt_kernels_cpu() });
}

static void fail_to_gather(dt_ctx *ctx, dt_bucket *bucket, void *user) {
    (void)bucket, (void)user;
    dt_fail(ctx, DT_ERR_ARG, "nothing to gather");
}

/* An op with a long name has to gather a parameter. */
static void gather_in(dt_ctx *ctx, const char *op) {
    dt_listener listener = { .gather = fail_to_gather };
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4), DT_ONES), *out = dt_new(ctx, DT_F32, w->shape);
    dt_node *n;
    dt_listen(ctx, &listener);
    dt_record(out, (dt_record_desc){ .name = op, .in = { w }, .backward = reading_back });
    n = out->producer;
    w->data = NULL;
    if (CHECK(n != NULL)) dt__make_inputs_readable(ctx, n, DT_BACKWARD);
    dt_unlisten(ctx, &listener);
}

/* Names of files and dt_record_desc.name may have any length, and ranks any number. */
static void test_long_sites(void) {
    for (int code = 0; code < 6; code++) {
        char name[SITE_TEXT_BYTES + 1], want[100];
        int rank = code % 2 ? 123456 : 0, line = code / 2 == 1 ? 88 : 0;
        dt_ctx *ctx = context_of_rank(rank);
        memset(name, 'n', sizeof name);
        name[sizeof name - 1] = 0;
        if (code / 2 == 2)
            gather_in(ctx, name);
        else
            (dt_write)(dt_new(dt_ctx_here(ctx, name, line), DT_F32, DT_SHAPE(4)), NULL);
        const char *text = dt_error_text(ctx), *why = code / 2 == 2 ? "nothing to" : "is NULL";
        snprintf(
            want, sizeof want, line ? "; called at %.*s:%d" : "; in %.*s", SITE_CUT, name, line);
        size_t n = strlen(text), end = strlen(want);
        CHECK_MSG(dt_error(ctx) == DT_ERR_ARG && strstr(text, why) && n > end &&
                      strcmp(text + n - end, want) == 0,
            "%d: %s", code, text);
        dt_ctx_free(ctx);
    }
}

/* A text names the site already only if it names all of it. */
static void test_sites_once(void) {
    static const struct {
        const char *file, *text, *end;
        int line;
    } cases[] = {
        { "src/t.c", "a wait at t.c:8; rank 1", "; rank 1", 8 },
        { "t.c", "a wait at t.c:88; rank 1", "rank 1; called at t.c:8", 8 },
        { "t.c", "a wait at t.c:88; called at t.c:8", ":88; called at t.c:8", 8 },
        { "dt_linear", "a wait in dt_linear: rank 1", ": rank 1", 0 },
        { "dt_linear", "a wait in dt_linear_cross_entropy", "entropy; in dt_linear", 0 },
        { "dt_linear", "a wait in dt_linears", "linears; in dt_linear", 0 },
        { "dt_linear", "a wait in dt_linearX", "linearX; in dt_linear", 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dt_ctx *ctx = context_of_rank(0);
        dt__site_open(dt_ctx_here(ctx, cases[i].file, cases[i].line));
        dt_fail(ctx, DT_ERR_ARG, "%s", cases[i].text);
        const char *text = dt_error_text(ctx), *end = cases[i].end;
        size_t n = strlen(text);
        CHECK_MSG(n > strlen(end) && strcmp(text + n - strlen(end), end) == 0, "%zu: %s", i, text);
        dt_ctx_free(ctx);
    }
}

/* A wait report and the text around it cut the name of a file in the same place. */
static dt_status long_file_main(dt_ctx *ctx, void *user) {
    float x[2] = { 0 }, y[2];
    dt_comm *world = dt_world(ctx);
    (void)user;
    dt__site_open(dt_ctx_here(ctx, "a_directory/a_file_whose_name_has_forty_characters.c", 88));
    return (dt_all_reduce)(world, x, y, 1 + (size_t)dt_ctx_rank(ctx), DT_F32, DT_SUM);
}

static void test_long_file(void) {
    dt_report report = run(long_file_main, DT_BACKEND_THREADS, (job){ 0 });
    CHECK_MSG(report.status == DT_ERR_COMM && count_of(report.text, "y_characters.c") == 2 &&
                  count_of(report.text, " at ose_name_has_forty_characters.c:88") == 2,
        "%s", report.text);
}

/* ---- a failure in the backward of a block, or in its recompute ---- */

/* An all-gather in the forward and one in the backward. */
static dt_tensor *gathering_block(dt_tensor *x, void *user) {
    dt_comm *world = dt_world(x->ctx);
    dt_tensor *y = dt_linear(x, (dt_tensor *)user, NULL);
    y = dt_redistribute(y, world, DT_REPLICATE, DT_SHARD(0));
    return dt_redistribute(y, world, DT_SHARD(0), DT_REPLICATE);
}

/* kind 1: the block is recomputed */
static dt_status fail_in_block(dt_ctx *ctx, void *user) {
    job j = *(job *)user;
    float data[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4, 4), DT_NORMAL(0.1));
    dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(2, 4), data);
    dt_block_desc desc = { .recompute = j.kind };
    dt_tensor *y = dt_block_at(ctx, gathering_block, x, w, desc);
    dt_tensor *loss = dt_mse(y, x, 4);
    if (dt_ctx_rank(ctx) == 0) return site_line[0] = __LINE__, dt_backward(loss);
    return dt_error(ctx);
}

static void test_blocks(void) {
    for (int kind = 0; kind < 2; kind++) {
        dt_report report = run(fail_in_block, DT_BACKEND_THREADS, (job){ .kind = kind });
        char site[64];
        snprintf(site, sizeof site, "test_misuse.c:%d; check", site_line[0]);
        check_text(report, "a block",
            (const char *const[3]){
                site, kind ? "in the recompute of block 1" : "in the backward of block 1", NULL });
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
    dt_mesh (*make)(dt_ctx *, dt_mesh_desc) = dt_mesh_make; /* the function, not the macro */
    dt_mesh mesh = make(ctx, (dt_mesh_desc){ .pp = 2 });
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
        check_text(
            run(train_pipe, DT_BACKEND_THREADS, (job){ .kind = PIPE_SAME_PARAMS, .stage = stage }),
            "parameters of all stages on every rank",
            (const char *const[3]){ "pipeline ranks", "both register w0", "DT_GRAD_PARTIAL" });
        dt_report report =
            run(train_pipe, DT_BACKEND_THREADS, (job){ .kind = PIPE_SITE, .stage = stage });
        char site[64];
        snprintf(site, sizeof site, "test_misuse.c:%d", site_line[0]);
        check_text(report, "dt_pipe_run",
            (const char *const[3]){
                site, "rank 1 ended without the ", "check that all ranks run the same steps" });
    }
}

int main(void) {
    test_kept_tensors();
    test_own_op_index();
    test_after_free();
    test_null_data();
    test_call_sites();
    test_gather_purposes();
    test_local_sites();
    test_long_sites();
    test_sites_once();
    test_long_file();
    test_blocks();
    test_pipes();
    return check_done("test_misuse");
}
