/* test_precision.c - 16-bit training: loss scales, skipped steps, and losses that follow f32's

   The model has two linear layers in bf16 or f16, data parallel and tensor parallel, at every ZeRO
   stage. A user's op with value zero is added to the loss. The backward of the op plants a NaN or
   an infinity in one element of one parameter's gradient, on one rank in one micro-batch. Then
   every rank must report the same skipped step and the same non-finite element; no byte of
   parameters, masters and state may change; and the run must continue like a run without the fault
   whose loss scale is halved at the same step. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "examples/train.h"
#include "tests/support/check.h"

// ==== 1. The model and the op that plants a fault ===============================================

enum {
    WIDTH = 24,
    HIDDEN = 200,
    OUT = 8,
    ROWS = 4,
    PARAMS = 4,
    STEPS = 4,
    BAD_STEP = 2,
    MAX_RANKS = 8
};
enum { ROOM = 512 << 10 }; /* bytes that a rank keeps */

/* A run: its configuration, and the results that its ranks store. */
typedef struct run {
    /* skips: attempts of step BAD_STEP that get the fault; -1: all attempts */
    int dp, tp, accum, skips;
    dt_dtype dtype;
    dt_zero_desc zero;
    int again;              /* attempts of the following step that get the fault */
    int rank, micro, param; /* where the fault is planted */
    size_t element;         /* index in that rank's shard of the parameter */
    double value;
    /* if not 0: no fault; the loss scale is set to this value before BAD_STEP */
    double lower;
    int heard[MAX_RANKS];         /* skipped steps that each rank was notified of */
    dt_step_info info[MAX_RANKS]; /* the last skipped step, parameters by index */
    int bad_param[MAX_RANKS], changed[MAX_RANKS];
    double after[MAX_RANKS]; /* the scale after the skipped step */
    double scale[STEPS];     /* of each step that was not skipped, on rank 0 */
    double norm[STEPS];
    unsigned char kept[MAX_RANKS][ROOM]; /* all bytes of the training state at the end */
    size_t bytes[MAX_RANKS];
    char text[512];
} run;

typedef struct plant_saved {
    const run *r;
    int here;
} plant_saved;

static dt_status plant_back(dt_node *n) {
    const plant_saved *s = (const plant_saved *)n->saved;
    const run *r = s->r;
    dt_tensor *t = n->in[0];
    void *g = dt_grad(n, 0);
    if (g && s->here) dt__set_number(t->dtype, g, r->element, r->value);
    return dt_error(t->ctx);
}

/* Returns 0 as a tensor; if `here`, its backward makes one gradient element non-finite. The op
   reads the parameter, so at ZeRO-3 all ranks run it. */
static dt_tensor *plant(dt_ctx *ctx, const run *r, int here) {
    dt_tensor *out = dt_new(ctx, DT_F64, DT_SCALAR);
    if (!out) return NULL;
    *(double *)out->data = 0;
    plant_saved *s = (plant_saved *)dt_record_saved(out, (dt_record_desc){ .name = "plant",
                                                             .in = { dt_param_get(ctx, r->param) },
                                                             .backward = plant_back,
                                                             .saved_bytes = sizeof *s });
    if (s) *s = (plant_saved){ r, here };
    return out;
}

static dt_tensor *real_input(dt_ctx *ctx, dt_dtype dtype, int rows, int columns, int key) {
    dt_tensor *t = dt_input(ctx, dtype, DT_SHAPE(rows, columns), NULL);
    for (int i = 0; t && i < rows * columns; i++)
        dt__set_number(dtype, t->data, (size_t)i, ((key * 131 + i * 37) % 101) / 50.0 - 1);
    return t;
}

static void register_model(dt_ctx *ctx, const run *r, dt_comm *tp) {
    dt_param_desc row = { .dtype = r->dtype }, column = row, whole = row;
    row.shards[0].comm = column.shards[0].comm = tp;
    column.shards[0].dim = 1;
    dt_scope(ctx, "in.");
    dt_param_at(ctx, "w", DT_SHAPE(HIDDEN, WIDTH), DT_NORMAL(0.3), row);
    dt_param_at(ctx, "b", DT_SHAPE(HIDDEN), DT_UNIFORM(0.2), row);
    dt_scope(ctx, "out.");
    dt_param_at(ctx, "w", DT_SHAPE(OUT, HIDDEN), DT_NORMAL(0.3), column);
    dt_param_at(ctx, "b", DT_SHAPE(OUT), DT_UNIFORM(0.2), whole);
    dt_scope(ctx, NULL);
}

static dt_tensor *model_loss(
    dt_ctx *ctx, const run *r, const dt_mesh *mesh, int key, double denominator) {
    dt_tensor *x = real_input(ctx, r->dtype, ROWS, WIDTH, key),
              *y = real_input(ctx, r->dtype, ROWS, OUT, key + 7);
    dt_tensor *w = dt_param_get(ctx, 0), *b = dt_param_get(ctx, 1);
    dt_tensor *h =
        dt_gelu(dt_column_linear(x, w, b, (dt_linear_desc){ 0 }, mesh->tp, DT_REPLICATE));
    w = dt_param_get(ctx, 2), b = dt_param_get(ctx, 3);
    return dt_mse(dt_row_linear(h, w, b, NULL, mesh->tp, DT_REPLICATE), y, denominator);
}

/* Copies the training state: values, masters, optimizer state. */
static size_t keep(const dt_zero *zero, unsigned char *to) {
    size_t at = 0;
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        size_t wide = z->count * dt__zero_element_size(z),
               narrow = z->bucket.shard_count * dt_dtype_size(z->bucket.dtype);
        const void *from[4] = { z->bucket.shard, z->master, z->state[0], z->state[1] };
        for (int i = 0; i < 4; i++) {
            size_t bytes = i ? wide : narrow;
            if (!from[i] || !CHECK_MSG(at + bytes <= ROOM, "%zu bytes", at + bytes)) continue;
            memcpy(to + at, from[i], bytes);
            at += bytes;
        }
    }
    return at;
}

// ==== 2. A run ==================================================================================

/* One attempt of a step. */
static dt_step_info attempt(
    dt_ctx *ctx, run *r, const dt_mesh *mesh, dt_zero *zero, int step, int spoilt) {
    int data = mesh->coord.dp;
    for (int j = 0; j < r->accum; j++) {
        dt_micro(ctx, j, r->accum);
        dt_tensor *loss = model_loss(ctx, r, mesh, (step * r->accum + j) * r->dp + data,
            (double)ROWS * OUT * r->accum * r->dp);
        if (spoilt && j == r->micro)
            loss = dt_add(loss, plant(ctx, r, dt_ctx_rank(ctx) == r->rank));
        dt_backward(loss);
        dt_reset(ctx);
    }
    return dt_zero_step(zero, 0.01);
}

static void note_skip(
    dt_ctx *ctx, run *r, const dt_zero *zero, dt_step_info info, const unsigned char *before) {
    static __thread unsigned char now[ROOM];
    int me = dt_ctx_rank(ctx);
    size_t bytes = keep(zero, now);
    r->heard[me]++;
    r->info[me] = info;
    r->bad_param[me] = info.bad_param ? info.bad_param->param->index : -1;
    r->changed[me] += bytes != r->bytes[me] || memcmp(now, before, bytes) != 0;
    r->after[me] = zero->loss_scale;
}

static dt_status rank_main(dt_ctx *ctx, void *user) {
    static __thread unsigned char before[ROOM];
    run *r = (run *)user;
    int me = dt_ctx_rank(ctx), spoilt[STEPS + 1] = { 0, 0, r->skips, r->again };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = r->dp, .tp = r->tp });
    dt_zero_desc d = r->zero;
    register_model(ctx, r, mesh.tp);
    d.mesh = &mesh;
    d.poison = 1;
    dt_zero *zero = dt_zero_make(ctx, d);
    for (int step = 1; step <= STEPS && dt_error(ctx) == DT_OK;) {
        int spoil = spoilt[step] != 0;
        if (step == BAD_STEP && r->lower != 0 && zero->loss_scale != r->lower)
            dt__scale_set(zero, r->lower);
        r->bytes[me] = keep(zero, before);
        dt_step_info info = attempt(ctx, r, &mesh, zero, step, spoil);
        if (info.skipped || dt_error(ctx) != DT_OK) note_skip(ctx, r, zero, info, before);
        if (info.skipped && spoilt[step] > 0) spoilt[step]--;
        if (dt_error(ctx) != DT_OK || info.skipped) continue;
        CHECK_MSG(info.step == step && !spoil, "step %d of %d", (int)info.step, step);
        if (me == 0) r->scale[step - 1] = info.loss_scale, r->norm[step - 1] = info.grad_norm;
        step++;
    }
    dt_barrier(dt_world(ctx));
    if (zero) r->bytes[me] = keep(zero, r->kept[me]);
    return dt_error(ctx);
}

static char last_notice[512];

/* Stores notices for the checks and prints nothing. */
static void log_notice(void *user, int level, int rank, const char *text) {
    (void)user, (void)rank;
    if (level == DT_LOG_NOTICE) snprintf(last_notice, sizeof last_notice, "%s", text);
}

static dt_status start(run *r) {
    dt_report report;
    dt_host host = *dt_host_default();
    host.log = log_notice;
    dt_run(
        (dt_run_desc){ .ranks = r->dp * r->tp, .timeout_s = 30, .host = &host, .report = &report },
        rank_main, r);
    snprintf(r->text, sizeof r->text, "%s", report.text);
    return report.status;
}

// ==== 3. Faults at random places ================================================================

static uint32_t draw(uint32_t number, uint32_t most) {
    uint32_t out[4];
    dt__philox(4711, number, out);
    return out[0] % most;
}

/* Elements in a rank's shard of a parameter. */
static size_t shard_elements(const run *r, int param) {
    static const size_t whole[PARAMS] = { HIDDEN * WIDTH, HIDDEN, OUT * HIDDEN, OUT };
    return param < 3 ? whole[param] / (size_t)r->tp : whole[param];
}

static void random_run(run *r, uint32_t number) {
    static const double values[3] = { NAN, INFINITY, -INFINITY };
    uint32_t at = number * 16;
    memset(r, 0, sizeof *r);
    r->dp = 1 << draw(at, 3);
    r->tp = 1 + (int)draw(at + 1, 2);
    r->skips = 1;
    r->accum = 1 + (int)draw(at + 2, 3);
    r->dtype = draw(at + 3, 2) ? DT_BF16 : DT_F16;
    r->zero.stage = (int)number % 4;
    if (r->zero.stage && r->dp == 4 && draw(at + 4, 2)) r->zero.shard_group = 2;
    r->zero.keep_gathered = r->zero.stage == 3 && draw(at + 5, 2);
    r->zero.clip = draw(at + 6, 2) ? 0.1 : 0;
    r->zero.tree = draw(at + 7, 4) == 0;
    r->zero.loss_scale = DT_SCALE_DYNAMIC;
    r->zero.scale.init = 1024;
    r->rank = (int)draw(at + 8, (uint32_t)(r->dp * r->tp));
    r->micro = (int)draw(at + 9, (uint32_t)r->accum);
    r->param = (int)draw(at + 10, PARAMS);
    r->element = draw(at + 11, (uint32_t)shard_elements(r, r->param));
    r->value = values[draw(at + 12, 3)];
}

static void check_verdicts(const run *r, uint32_t number) {
    int ranks = r->dp * r->tp;
    for (int k = 0; k < ranks; k++) {
        const dt_step_info *i = &r->info[k];
        CHECK_MSG(r->heard[k] == 1 && i->skipped && i->step == BAD_STEP - 1 && isnan(i->grad_norm),
            "case %u, rank %d: %d skipped, step %d", number, k, r->heard[k], (int)i->step);
        CHECK_MSG(
            i->bad_rank == r->rank && r->bad_param[k] == r->param && i->bad_element == r->element,
            "case %u, rank %d reports rank %d, parameter %d, element %zu; planted %d, %d, %zu",
            number, k, i->bad_rank, r->bad_param[k], i->bad_element, r->rank, r->param, r->element);
        CHECK_MSG(i->loss_scale == 1024 && r->after[k] == 512, "case %u: scale %g, then %g", number,
            i->loss_scale, r->after[k]);
        CHECK_MSG(r->changed[k] == 0, "case %u: rank %d's parameters or state changed", number, k);
    }
    CHECK(r->scale[0] == 1024 && r->scale[1] == 512 && r->scale[3] == 512);
}

static void test_faults(void) {
    enum { CASES = 100 };
    static run r, clean;
    for (uint32_t number = 0; number < CASES; number++) {
        random_run(&r, number);
        clean = r;
        clean.skips = 0;
        clean.lower = 512;
        CHECK_MSG(start(&r) == DT_OK && start(&clean) == DT_OK, "case %u: %s%s", number, r.text,
            clean.text);
        check_verdicts(&r, number);
        CHECK(
            strstr(last_notice, "step 2 skipped") && strstr(last_notice, "loss scale 1024 -> 512"));
        CHECK_MSG(memcmp(r.norm, clean.norm, sizeof r.norm) == 0,
            "case %u: norms differ from the run without the fault", number);
        for (int k = 0; k < r.dp * r.tp; k++)
            CHECK_MSG(
                r.bytes[k] == clean.bytes[k] && memcmp(r.kept[k], clean.kept[k], r.bytes[k]) == 0,
                "case %u: rank %d ends with another state than without the fault", number, k);
    }
}

// ==== 4. How the scale moves ====================================================================

/* A run is too large for the stack. */
static void steady(run *r, int stage) {
    memset(r, 0, sizeof *r);
    r->dp = 2;
    r->tp = r->accum = r->rank = 1;
    r->dtype = DT_F16;
    r->value = NAN;
    r->zero.stage = stage;
    r->zero.loss_scale = DT_SCALE_DYNAMIC;
    r->zero.scale.init = 64;
}

static void test_scales(void) {
    static run r;
    for (int stage = 0; stage < 4; stage++) {
        steady(&r, stage); /* the scale doubles after every second good step */
        r.zero.scale.interval = 2;
        CHECK(start(&r) == DT_OK && r.scale[0] == 64 && r.scale[1] == 64 && r.scale[2] == 128 &&
              r.scale[3] == 128);
        steady(&r, stage); /* a skipped step restarts the count of good steps */
        r.zero.scale.interval = 2;
        r.skips = 1;
        CHECK(start(&r) == DT_OK && r.scale[1] == 32 && r.scale[2] == 32 && r.scale[3] == 64);
        /* hysteresis: only the second skipped step halves the scale, and the third */
        steady(&r, stage);
        r.zero.scale =
            (dt_scale_desc){ .init = 64, .backoff = 0.25, .hysteresis = 2, .min_scale = 8 };
        r.skips = 2;
        CHECK(start(&r) == DT_OK && r.scale[0] == 64 && r.scale[1] == 16);
        r.skips = 4;
        memset(r.heard, 0, sizeof r.heard);
        CHECK(start(&r) == DT_OK && r.heard[0] == 4 && r.scale[1] == 8 && r.scale[3] == 8);
        steady(&r, stage); /* growth restores the hysteresis */
        r.zero.scale = (dt_scale_desc){ .init = 64, .interval = 1, .hysteresis = 2 };
        r.skips = r.again = 1;
        CHECK(start(&r) == DT_OK && r.scale[1] == 128 && r.scale[2] == 256);
        /* a skipped step that does not halve the scale restarts the count, too */
        steady(&r, stage);
        r.zero.scale = (dt_scale_desc){ .init = 64, .interval = 2, .hysteresis = 3 };
        r.skips = 1;
        CHECK(start(&r) == DT_OK && r.scale[1] == 64 && r.scale[2] == 64 && r.scale[3] == 128);
        steady(&r, stage); /* a fixed scale does not change */
        r.zero.loss_scale = 256;
        r.skips = 3;
        CHECK(start(&r) == DT_OK && r.heard[1] == 3 && r.scale[1] == 256 && r.scale[3] == 256);
    }
}

/* Twenty skipped steps in a row are an error that lists all scales; the training state has not
   changed. */
static void test_no_scale_helps(void) {
    static run r;
    for (int code = 0; code < 8; code++) {
        steady(&r, code % 4);
        r.skips = -1;
        r.zero.scale.init = 1024;
        if (code >= 4) r.zero.loss_scale = 8;
        CHECK(start(&r) == DT_ERR_NUMERIC);
        CHECK_MSG(strstr(r.text, "step 2 was skipped 20 times in a row") != NULL, "%s", r.text);
        CHECK_MSG(
            strstr(r.text, code < 4 ? "scales 1024 512 256 128 64 32 16 8 4 2 1 1 1 1 1 1 1 1 1 1:"
                                    : "scales 8 8 8 8 8 8 8 8 8 8 8 8 8 8 8 8 8 8 8 8:") != NULL,
            "%s", r.text);
        CHECK_MSG(
            strstr(r.text, "element 0 of in.w on rank 1, in the rank's own") != NULL, "%s", r.text);
        for (int k = 0; k < 2; k++)
            CHECK_MSG(r.heard[k] == 20 && r.changed[k] == 0, "rank %d: %d, %d", k, r.heard[k],
                r.changed[k]);
    }
    steady(&r, 1); /* a good step restarts the count of skipped steps */
    r.skips = r.again = DT_MAX_SKIPS - 1;
    r.zero.loss_scale = 8;
    CHECK_MSG(
        start(&r) == DT_OK && r.heard[0] == 2 * (DT_MAX_SKIPS - 1), "%d: %s", r.heard[0], r.text);
    steady(&r, 2); /* without a loss scale the first non-finite gradient is an error */
    r.dtype = DT_BF16;
    r.zero.loss_scale = 0;
    r.skips = -1;
    CHECK(start(&r) == DT_ERR_NUMERIC && strstr(r.text, "step 2: the gradient norm is"));
}

// ==== 5. Loss scaling prevents underflow ========================================================

typedef struct tiny_run {
    dt_dtype dtype;
    double loss_scale, norm, moved;
    int stage;
} tiny_run;

/* One step of a loss whose gradients are near 1e-9, below the smallest f16. */
static dt_status tiny_main(dt_ctx *ctx, void *user) {
    tiny_run *t = (tiny_run *)user;
    run r = { .dp = 2, .tp = 1, .dtype = t->dtype };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = 2 });
    register_model(ctx, &r, mesh.tp);
    dt_zero *zero = dt_zero_make(
        ctx, (dt_zero_desc){ .stage = t->stage, .optimizer = DT_SGD, .loss_scale = t->loss_scale });
    dt_tensor *b = dt_param_get(ctx, 3);
    unsigned char before[8 * OUT] = { 0 }, after[8 * OUT] = { 0 };
    dt_read(b, before);
    dt_backward(model_loss(ctx, &r, &mesh, dt_ctx_rank(ctx), 1e9));
    dt_reset(ctx);
    dt_step_info info = dt_zero_step(zero, 1e7);
    dt_read(b, after);
    if (dt_ctx_rank(ctx) != 0) return dt_error(ctx);
    t->norm = info.grad_norm;
    t->moved = dt__number(t->dtype, after, 0) - dt__number(t->dtype, before, 0);
    return dt_error(ctx);
}

static tiny_run tiny(dt_dtype dtype, double loss_scale, int stage) {
    tiny_run t = { dtype, loss_scale, 0, 0, stage };
    CHECK(dt_run((dt_run_desc){ .ranks = 2, .timeout_s = 30 }, tiny_main, &t) == DT_OK);
    return t;
}

static void test_underflow(void) {
    for (int stage = 0; stage < 4; stage++) {
        tiny_run right = tiny(DT_F32, 0, stage), lost = tiny(DT_F16, 1, stage);
        CHECK_MSG(right.norm > 1e-10 && right.norm < 1e-6, "norm %g", right.norm);
        CHECK_MSG(lost.norm == 0 && lost.moved == 0,
            "norm %g, moved %g: no underflow without a loss scale", lost.norm, lost.moved);
        for (int k = 0; k < 3; k++) {
            tiny_run t = tiny(DT_F16, k == 0 ? 0 : k == 1 ? DT_SCALE_DYNAMIC : 1 << 20, stage);
            CHECK_MSG(fabs(t.norm - right.norm) <= 0.01 * right.norm, "norm %g, f32's %g", t.norm,
                right.norm);
            CHECK_MSG(fabs(t.moved - right.moved) <= 0.03 * fabs(right.moved) + 1e-3,
                "moved %g, f32's %g", t.moved, right.moved);
        }
    }
}

// ==== 6. A small GPT ============================================================================

enum { GPT_STEPS = 60 };

typedef struct curve {
    double loss[GPT_STEPS + 1];
} curve;

static void on_step(dt_ctx *ctx, const train_row *row, void *user) {
    (void)ctx;
    ((curve *)user)->loss[row->step] = row->loss;
}

static curve gpt_curve(dt_dtype dtype, int stage, double scale, train_files data) {
    curve c;
    train_config t = { .model = { .layers = 2,
                           .width = 32,
                           .heads = 2,
                           .kv_heads = 2,
                           .ffn = 128,
                           .seq = 32,
                           .vocab = 256,
                           .tied = 1,
                           .dtype = dtype },
        .mesh = { .dp = 2 },
        .zero = { .stage = stage, .beta2 = 0.95, .clip = 1, .loss_scale = scale },
        .lr = { 2e-3, DT_LR_COSINE, 5, GPT_STEPS, 0.1 },
        .data = data,
        .micro_batch = 4,
        .accum = 1,
        .stop_at = GPT_STEPS,
        .on_step = on_step,
        .user = &c };
    dt_host host = *dt_host_default();
    memset(&c, 0, sizeof c);
    host.log = log_notice;
    CHECK(dt_run((dt_run_desc){ .ranks = 2, .timeout_s = 30, .host = &host }, train, &t) == DT_OK);
    return c;
}

static void test_gpt(void) {
    train_files data = { .count = 0 };
    /* a text that stays the same when the sources change */
    if (!CHECK(train_files_add(&data, "LICENSE", 0) == 0)) return;
    curve right = gpt_curve(DT_F32, 0, 0, data);
    CHECK_MSG(right.loss[GPT_STEPS] < 0.8 * right.loss[1], "the f32 loss falls only from %g to %g",
        right.loss[1], right.loss[GPT_STEPS]);
    for (int k = 0; k < 4; k++) {
        dt_dtype dtype = k % 2 ? DT_F16 : DT_BF16;
        curve c = gpt_curve(dtype, k + (k < 2), k == 3 ? 4096 : 0, data);
        double most = 0;
        for (int i = 1; i <= GPT_STEPS; i++) most = fmax(most, fabs(c.loss[i] / right.loss[i] - 1));
        CHECK_MSG(most <= 0.01, "losses of %s differ by %.2g%% from f32's", dt_dtype_name(dtype),
            100 * most);
        printf("precision: %s at stage %d, %d steps: losses within %.2g%% of f32's\n",
            dt_dtype_name(dtype), k + (k < 2), (int)GPT_STEPS, 100 * most);
    }
    train_files_free(&data);
}

int main(void) {
    test_faults();
    test_scales();
    test_no_scale_helps();
    test_underflow();
    test_gpt();
    return check_done("test_precision");
}
