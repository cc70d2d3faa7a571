/* test_groups.c - parameter groups: several optimizers in one training state; freezing, EMA of the
   weights, outlier steps, full gradients

   An op whose gradient is a known function of step, parameter and element trains parameters as a
   GAN does: two AdamW and one SGD that step by turns. The stored steps of PyTorch
   (tests/golden/make_groups.py) are the oracle, in every layout.

       test_groups [FOLDER]      FOLDER holds the golden files; default tests/golden */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include "tests/golden/golden.h"

enum { PARAMS = 6, STEPS = 8, HALF = 4, MAX_ELEMENTS = 34 * 40, MAX_RANKS = 4 };

static const struct member {
    const char *name;
    int rows, cols, stage, tied;
} members[PARAMS] = { { "gen.w", 34, 40, 0, 0 }, { "gen.b", 34, 0, 0, 0 },
    { "disc.w", 12, 16, 1, 0 }, { "disc.b", 12, 0, 1, 0 }, { "head.w", 6, 8, 1, 0 },
    { "head.tied", 4, 4, 0, 1 } };

/* Of gen, disc and head; below 0: the group does not step. */
static const double rates[STEPS][3] = { { 0.01, 0.02, 0.05 }, { -1, 0.03, -1 }, { 0.02, -1, 0.04 },
    { -1, 0.02, 0.03 }, { 0.03, -1, -1 }, { -1, 0.01, -1 }, { 0.02, 0.02, 0.02 },
    { 0.01, -1, 0.03 } };

static const golden *vectors;
static char folder[64];

static void no_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static void remove_folder(const char *path) {
    char command[200];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    if (system(command) != 0) abort();
}

static double start_value(int p, int64_t e) { return (double)((p * 31 + e * 17) % 97 - 48) / 64; }
static double gradient_value(int p, int64_t e, int step) {
    return (double)((p * 7919 + step * 10473 + e * 15485) % 1009 - 504) / 4096;
}

// ==== The training ==============================================================================

typedef struct training {
    int dp, tp, pp, stage, shard_group, accum, tree, chunk;
    const char *offload;
    dt_dtype dtype;          /* 0 means f64 */
    int first, last;         /* the steps to take; 0: all */
    const char *load, *save; /* folders of checkpoints */
    int nan_param, nan_step; /* nan_step > 0: this element of this parameter is NaN in this step */
    int kind;                /* of a case with one mistake */
    /* 1: groups that do not step are frozen; 2: gen.b is frozen in steps 3 to 5; 3: it has a bucket
       of its own and is frozen in steps 1 to 5 */
    int freezes;
    int wanted[STEPS + 1][PARAMS]; /* calls that wrote a gradient */
    double norm[STEPS + 1];
    double value[MAX_RANKS][PARAMS][MAX_ELEMENTS], ema[MAX_RANKS][PARAMS][MAX_ELEMENTS];
} training;

typedef struct pull_saved {
    training *w;
    int param, step, shares;
} pull_saved;

/* Global index of a local element; -1 in the padding of a slice. */
static int64_t global_of(const dt_tensor *t, int64_t local) {
    const dt_param_info *p = t->param;
    int64_t at[DT_MAX_DIMS], global = 0;
    for (int i = p->full.nd - 1; i >= 0; i--) {
        at[i] = local % p->slice.n[i];
        local /= p->slice.n[i];
        if (at[i] >= p->slice.inside[i]) return -1;
    }
    for (int i = 0; i < p->full.nd; i++) global = global * p->full.d[i] + p->slice.lo[i] + at[i];
    return global;
}

static dt_status pull_back(dt_node *n) {
    const pull_saved *s = (const pull_saved *)n->saved;
    dt_tensor *t = n->in[0];
    void *g = dt_wants(n, 0) ? dt_grad(n, 0) : NULL;
    if (g) __atomic_add_fetch(&s->w->wanted[s->step][s->param], 1, __ATOMIC_RELAXED);
    for (int64_t k = 0; g && k < (int64_t)t->param->count; k++) {
        int64_t e = global_of(t, k);
        double add = e < 0 ? 7 : gradient_value(s->param, e, s->step) / s->shares;
        if (s->w->nan_step == s->step && s->w->nan_param == s->param && e == 5) add = NAN;
        dt__set_number(t->dtype, g, (size_t)k, dt__number(t->dtype, g, (size_t)k) + add);
    }
    return DT_OK;
}

static int member_of(const dt_tensor *t) {
    int p = 0;
    while (strcmp(members[p].name, t->name) != 0) p++;
    return p;
}

/* The loss of a micro-batch: each rank contributes the same share of each gradient. */
static dt_tensor *pull(dt_ctx *ctx, training *w, const dt_mesh *mesh, int step) {
    dt_tensor *sum = NULL;
    for (int i = 0; i < dt_param_count(ctx); i++) {
        if (dt_param_get(ctx, i)->param->desc.frozen) continue;
        dt_tensor *p = dt_param_get(ctx, i), *out = dt_new(ctx, DT_F64, DT_SCALAR);
        if (!p || !out) return NULL;
        *(double *)out->data = 0;
        pull_saved *s = (pull_saved *)dt_record_saved(out, (dt_record_desc){ .name = "pull",
                                                               .in = { p },
                                                               .backward = pull_back,
                                                               .saved_bytes = sizeof(pull_saved) });
        int m = member_of(p), stages = members[m].tied ? mesh->sizes.pp : 1;
        if (s) *s = (pull_saved){ w, m, step, mesh->sizes.dp * w->accum * stages };
        sum = sum ? dt_add(sum, out) : out;
    }
    return sum;
}

/* Registers the parameters of this rank's pipeline stage. */
static void register_members(dt_ctx *ctx, const training *w, const dt_mesh *mesh) {
    if (mesh->sizes.pp > 1) dt_stage(ctx, mesh->coord.pp);
    if (mesh->sizes.pp > 1) dt_tape(ctx, 0, mesh->coord.pp);
    for (int p = 0; p < PARAMS; p++) {
        const struct member *m = &members[p];
        dt_param_desc d = { .dtype = w->dtype ? w->dtype : DT_F64 };
        if (mesh->sizes.pp > 1 && !m->tied && m->stage != mesh->coord.pp) continue;
        if (m->cols && !m->tied) d.shards[0] = (dt_shard_spec){ mesh->tp, p % 4 == 2 };
        if (m->tied && mesh->sizes.pp > 1)
            d.grad_placements[0] = (dt_grad_placement){ mesh->pp, DT_GRAD_PARTIAL };
        dt_param_at(
            ctx, m->name, m->cols ? DT_SHAPE(m->rows, m->cols) : DT_SHAPE(m->rows), DT_ZEROS, d);
    }
}

static void write_start(dt_ctx *ctx) {
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        static __thread double host[MAX_ELEMENTS];
        memset(host, 0, sizeof host);
        for (int64_t k = 0; k < (int64_t)t->param->count; k++) {
            int64_t e = global_of(t, k);
            if (e >= 0) dt__set_number(t->dtype, host, (size_t)k, start_value(member_of(t), e));
        }
        dt_write(t, host);
    }
}

/* Reads this rank's slices to where their elements have their place in the full tensors. */
static void read_values(dt_ctx *ctx, training *w) {
    static __thread double host[MAX_ELEMENTS];
    int me = dt_ctx_rank(ctx);
    for (int i = 0; i < PARAMS * MAX_ELEMENTS; i++)
        w->value[me][i / MAX_ELEMENTS][i % MAX_ELEMENTS] = NAN;
    for (int i = 0; i < dt_param_count(ctx); i++) {
        const dt_tensor *t = dt_param_get(ctx, i);
        if (dt_read(t, host) != DT_OK) return;
        for (int64_t k = 0; k < (int64_t)t->param->count; k++) {
            int64_t e = global_of(t, k);
            if (e >= 0) w->value[me][member_of(t)][e] = dt__number(t->dtype, host, (size_t)k);
        }
    }
}

/* Reads the EMA, which dt_zero_swap_ema puts in the place of the weights, and the weights. */
static void read_all(dt_ctx *ctx, training *w, dt_zero *zero) {
    int me = dt_ctx_rank(ctx);
    static __thread double before[PARAMS][MAX_ELEMENTS];
    read_values(ctx, w);
    memcpy(before, w->value[me], sizeof before);
    CHECK(dt_zero_swap_ema(zero) == DT_OK);
    read_values(ctx, w);
    memcpy(w->ema[me], w->value[me], sizeof before);
    CHECK(dt_zero_swap_ema(zero) == DT_OK);
    read_values(ctx, w);
    CHECK_MSG(memcmp(before, w->value[me], sizeof before) == 0 || dt_error(ctx) != DT_OK,
        "the weights are not what they were before two dt_zero_swap_ema");
}

static const dt_param_group groups[2] = { { .params = "disc.*",
                                              .beta1 = 0.5,
                                              .beta2 = 0.99,
                                              .eps = 1e-6,
                                              .weight_decay = 0.3,
                                              .lr_scale = 2 },
    { .params = "head.w, *.tied", .optimizer = DT_SGD, .momentum = 0.9, .weight_decay = 0.05 } };

static dt_zero_desc zero_desc(const training *w, const dt_mesh *mesh) {
    return (dt_zero_desc){ .stage = w->stage,
        .shard_group = w->shard_group,
        .mesh = mesh,
        .weight_decay = 0.1,
        .clip = 3,
        .tree = w->tree,
        .poison = 1,
        .offload_optim = w->offload,
        .offload_params = w->stage == 3 ? w->offload : NULL,
        .offload_chunk = (size_t)w->chunk,
        .compare_every = 1,
        .bucket_bytes = w->freezes == 3 ? 64 : 0,
        .ema_decay = 0.75,
        .groups = groups,
        .group_count = 2 };
}

static const char *const patterns[3] = { "gen.*", "disc.*", "head.*" };

/* Freezes and unfreezes before a step, and sets the groups' rates. */
static void set_rates(const training *w, dt_zero *zero, int step, double lr[3]) {
    for (int k = 0; k < 3; k++) {
        /* the rate of disc is that of PyTorch over lr_scale */
        lr[k] = rates[step - 1][k] / (k == 1 ? 2 : 1);
        int was = step > 1 && rates[step - 2][k] < 0, is = lr[k] < 0;
        if (w->freezes != 1) continue;
        if (is != was || (is && step == w->first))
            CHECK(dt_zero_freeze(zero, patterns[k], is) == DT_OK);
        lr[k] = fabs(lr[k]);
    }
    int first = w->freezes == 2 ? 3 : 1;
    if (w->freezes >= 2 && (step == first || step == 6))
        dt_zero_freeze(zero, "gen.b", step == first);
}

/* The full gradient of each parameter that gets one. */
static void check_full_gradients(dt_ctx *ctx, dt_zero *zero, int step) {
    static __thread double host[MAX_ELEMENTS];
    for (int i = 0; i < dt_param_count(ctx) && dt_error(ctx) == DT_OK; i++) {
        const dt_tensor *t = dt_param_get(ctx, i);
        int wrong = 0, p = member_of(t);
        if (!t->needs_grad) continue;
        CHECK(dt_zero_grad_full(zero, t, host) == DT_OK);
        for (int64_t e = 0; e < dt_count(t->param->full); e++)
            wrong += dt__number(dt_grad_dtype(t), host, (size_t)e) != gradient_value(p, e, step);
        CHECK_MSG(wrong == 0, "%d elements of the full gradient of %s", wrong, t->name);
    }
}

static dt_step_info take_step(
    dt_ctx *ctx, training *w, const dt_mesh *mesh, dt_zero *zero, int step) {
    double lr[3];
    set_rates(w, zero, step, lr);
    for (int j = 0; j < w->accum; j++) {
        dt_micro(ctx, j, w->accum);
        dt_tensor *loss = pull(ctx, w, mesh, step);
        if (loss && loss->needs_grad) dt_backward(loss); /* not if all of the stage is frozen */
        dt_reset(ctx);
    }
    if (step == w->last && w->nan_step == 0 && !w->dtype) check_full_gradients(ctx, zero, step);
    return dt_zero_step_groups(zero, lr);
}

static dt_status train(dt_ctx *ctx, void *user) {
    training *w = (training *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = w->dp, .tp = w->tp, .pp = w->pp });
    register_members(ctx, w, &mesh);
    dt_zero *zero = dt_zero_make(ctx, zero_desc(w, &mesh));
    write_start(ctx);
    dt_checkpoint *c = w->load || w->save
                           ? dt_checkpoint_open(zero, (dt_checkpoint_desc){ .dir = w->save })
                           : NULL;
    if (w->load) CHECK(dt_checkpoint_load(c, w->load) == w->first - 1);
    int64_t steps[3] = { 0 };
    for (int n = 1; n <= w->last; n++) {
        for (int k = 0; k < 3; k++) steps[k] += rates[n - 1][k] >= 0;
        if (n < w->first || dt_error(ctx) != DT_OK) continue;
        dt_step_info info = take_step(ctx, w, &mesh, zero, n);
        if (dt_ctx_rank(ctx) == 0) w->norm[n] = info.grad_norm;
        CHECK(dt_error(ctx) != DT_OK || info.step == n);
    }
    for (int k = 0; k < 3 && dt_error(ctx) == DT_OK; k++)
        CHECK(dt_zero_group_steps(zero, k) == steps[k]);
    CHECK(dt_zero_group_steps(zero, 3) == -1 && dt_zero_group_steps(zero, -1) == -1);
    if (w->save && dt_error(ctx) == DT_OK) CHECK(dt_checkpoint_save(c) == DT_OK);
    if (dt_error(ctx) == DT_OK) read_all(ctx, w, zero);
    dt_checkpoint_close(c);
    dt_barrier(dt_world(ctx)); /* ranks that do not know of a failure yet learn of it here */
    return dt_error(ctx);
}

static dt_report run(training *w, dt_status (*rank_main)(dt_ctx *ctx, void *user)) {
    static dt_host quiet;
    dt_report report;
    quiet = *dt_host_default();
    quiet.log = no_log;
    w->dp = w->dp ? w->dp : 1;
    w->tp = w->tp ? w->tp : 1;
    w->pp = w->pp ? w->pp : 1;
    w->accum = w->accum ? w->accum : 1;
    w->first = w->first ? w->first : 1;
    w->last = w->last ? w->last : STEPS;
    dt_run(
        (dt_run_desc){
            .ranks = w->dp * w->tp * w->pp, .timeout_s = 60, .host = &quiet, .report = &report },
        rank_main, w);
    return report;
}

static const char *name_of(const training *w) {
    static __thread char text[160];
    snprintf(text, sizeof text, "dp %d tp %d pp %d, stage %d/%d, %d micro-batches%s%s%s", w->dp,
        w->tp, w->pp, w->stage, w->shard_group, w->accum, w->tree ? ", tree" : "",
        w->offload ? ", offload to " : "", w->offload ? w->offload : "");
    return text;
}

/* Compares the values with those of PyTorch; `prefix` is "" or "ema.". */
static void check_values(const training *w, const char *prefix, double tol) {
    for (int p = 0; p < PARAMS; p++) {
        char name[64];
        int64_t n = 0, held = 0;
        snprintf(name, sizeof name, "%s%s.%d", prefix, members[p].name, w->last);
        const double *right = golden_get(vectors, name, &n);
        if (!CHECK_MSG(right, "no %s in the golden file", name)) continue;
        double worst = 0;
        for (int r = 0; r < w->dp * w->tp * w->pp; r++)
            for (int64_t e = 0; e < n; e++) {
                double x = *prefix ? w->ema[r][p][e] : w->value[r][p][e];
                held += !isnan(x);
                if (!isnan(x)) worst = fmax(worst, fabs(x - right[e]));
            }
        CHECK_MSG(held >= n && worst <= tol, "%s: %s differs by %.2e", name_of(w), name, worst);
    }
}

static void check_against_golden(const training *w) {
    const double *norm = golden_get(vectors, "norm", NULL);
    for (int n = w->first; n <= w->last && norm; n++)
        CHECK_MSG(fabs(w->norm[n] - norm[n - 1]) <= 1e-12 * norm[n - 1],
            "%s: the norm of step %d is %.17g, not %.17g", name_of(w), n, w->norm[n], norm[n - 1]);
    check_values(w, "", 1e-12);
    check_values(w, "ema.", 1e-12);
}

static const training layouts[] = {
    { .dp = 1 },
    { .dp = 1, .accum = 2 },
    { .dp = 2, .stage = 0 },
    { .dp = 2, .stage = 1, .accum = 2 },
    { .dp = 2, .stage = 2, .accum = 2 },
    { .dp = 2, .stage = 3, .accum = 2 },
    { .dp = 4, .stage = 3, .shard_group = 2 },
    { .dp = 4, .stage = 2, .tree = 1 },
    { .tp = 2 },
    { .dp = 2, .tp = 2, .stage = 3 },
    { .pp = 2 },
    { .dp = 2, .pp = 2, .stage = 1 },
    { .dp = 2, .stage = 1, .offload = "cpu" },
    { .dp = 2, .stage = 3, .offload = "cpu" },
    { .dp = 2, .stage = 2, .offload = folder, .chunk = 300 },
    { .dp = 2, .stage = 3, .offload = folder, .accum = 2, .chunk = 700 },
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

static training w; /* of the case under test */

static void test_layouts(void) {
    for (int i = 0; i < LAYOUTS; i++) {
        w = layouts[i];
        dt_report report = run(&w, train);
        CHECK_MSG(report.status == DT_OK, "%s: %s", name_of(&w), report.text);
        check_against_golden(&w);
    }
}

/* 16-bit parameters have masters, which begin in the first step of their group: every layout gives
   the values of one rank. */
static void test_narrow(void) {
    static training one;
    one = (training){ .dtype = DT_BF16 };
    CHECK(run(&one, train).status == DT_OK);
    for (int i = 1; i < LAYOUTS; i++) {
        w = layouts[i];
        w.dtype = DT_BF16;
        dt_report report = run(&w, train);
        CHECK_MSG(report.status == DT_OK, "%s: %s", name_of(&w), report.text);
        double worst = 0;
        for (int r = 0; r < w.dp * w.tp * w.pp; r++)
            for (int p = 0; p < PARAMS; p++)
                for (int e = 0; e < members[p].rows * (members[p].cols ? members[p].cols : 1); e++)
                    if (!isnan(w.value[r][p][e]))
                        worst = fmax(worst, fmax(fabs(w.value[r][p][e] - one.value[0][p][e]),
                                                fabs(w.ema[r][p][e] - one.ema[0][p][e])));
        CHECK_MSG(worst <= 0.004, "bf16, %s: differs by %.2e", name_of(&w), worst);
    }
}

/* A checkpoint after step 4 is loaded in another layout; the last steps are those of PyTorch. */
static void test_checkpoints(void) {
    char path[100];
    snprintf(path, sizeof path, "%s/saved", folder);
    for (int i = 0; i < LAYOUTS; i += 2) {
        w = layouts[i];
        w.last = HALF;
        w.save = path;
        dt_report report = run(&w, train);
        CHECK_MSG(report.status == DT_OK, "saving, %s: %s", name_of(&w), report.text);
        check_values(&w, "", 1e-12);
        check_values(&w, "ema.", 1e-12);
        w = layouts[(i * 5 + 3) % LAYOUTS];
        w.first = HALF + 1;
        w.load = path;
        report = run(&w, train);
        CHECK_MSG(report.status == DT_OK, "loading, %s: %s", name_of(&w), report.text);
        check_against_golden(&w);
        remove_folder(path);
    }
}

// ==== Freezing ==================================================================================

/* Groups that do not step are frozen instead: the same training, and no gradient is computed. */
static void test_frozen_groups(void) {
    char path[100];
    snprintf(path, sizeof path, "%s/frozen", folder);
    for (int i = 0; i < LAYOUTS; i++) {
        w = layouts[i];
        w.freezes = 1;
        dt_report report = run(&w, train);
        CHECK_MSG(report.status == DT_OK, "frozen, %s: %s", name_of(&w), report.text);
        check_against_golden(&w);
        for (int n = 1; n <= STEPS; n++)
            for (int p = 0; p < PARAMS; p++)
                CHECK((w.wanted[n][p] > 0) == (rates[n - 1][p < 2 ? 0 : p < 4 ? 1 : 2] >= 0));
    }
    w = (training){ .dp = 2, .stage = 2, .freezes = 1, .last = HALF, .save = path };
    CHECK(run(&w, train).status == DT_OK);
    w = (training){ .dp = 1, .tp = 2, .stage = 1, .freezes = 1, .first = HALF + 1, .load = path };
    CHECK(run(&w, train).status == DT_OK);
    check_against_golden(&w);
    remove_folder(path);
}

/* One parameter of a bucket is frozen for some steps: its values stay, the norm leaves it out. */
static void test_frozen_parameter(void) {
    static training one, before;
    const double *norm = golden_get(vectors, "norm", NULL);
    one = (training){ .freezes = 2 };
    before = (training){ .last = 2 };
    CHECK(run(&before, train).status == DT_OK && run(&one, train).status == DT_OK);
    double squares = 0;
    for (int e = 0; e < members[1].rows; e++) squares += pow(gradient_value(1, e, 3), 2);
    CHECK(fabs(one.norm[3] - sqrt(norm[2] * norm[2] - squares)) < 1e-12);
    CHECK(one.norm[7] == norm[6] || fabs(one.norm[7] - norm[6]) < 1e-12);
    for (int i = 0; i < LAYOUTS; i++) {
        double worst = 0;
        w = layouts[i];
        w.freezes = 2;
        dt_report report = run(&w, train);
        CHECK_MSG(report.status == DT_OK, "gen.b frozen, %s: %s", name_of(&w), report.text);
        for (int r = 0; r < w.dp * w.tp * w.pp; r++)
            for (int p = 0; p < PARAMS; p++)
                for (int e = 0; e < members[p].rows * (members[p].cols ? members[p].cols : 1); e++)
                    if (!isnan(w.value[r][p][e]))
                        worst = fmax(worst, fmax(fabs(w.value[r][p][e] - one.value[0][p][e]),
                                                fabs(w.ema[r][p][e] - one.ema[0][p][e])));
        CHECK_MSG(worst <= 1e-12, "gen.b frozen, %s: differs by %.2e", name_of(&w), worst);
        w = layouts[i];
        w.freezes = 2;
        w.last = 5;
        CHECK(run(&w, train).status == DT_OK);
        for (int r = 0; r < w.dp * w.tp * w.pp; r++)
            for (int e = 0; e < members[1].rows; e++)
                CHECK(isnan(w.value[r][1][e]) || w.dp * w.tp * w.pp > 1 ||
                      (w.value[r][1][e] == before.value[0][1][e] &&
                          w.ema[r][1][e] == before.ema[0][1][e]));
    }
}

/* With master weights, too, a frozen parameter keeps its values in a bucket that is trained. */
static void test_frozen_narrow(void) {
    static training before;
    for (int i = 0; i < LAYOUTS; i++) {
        int differ = 0;
        before = layouts[i];
        before.dtype = DT_BF16;
        before.chunk = 50; /* so that another chunk used the buffers before */
        before.last = 2;
        CHECK(run(&before, train).status == DT_OK);
        w = layouts[i];
        w.dtype = DT_BF16;
        w.chunk = before.chunk;
        w.freezes = 2;
        w.last = 5;
        dt_report report = run(&w, train);
        CHECK_MSG(report.status == DT_OK, "bf16, %s: %s", name_of(&w), report.text);
        for (int r = 0; r < w.dp * w.tp * w.pp; r++)
            for (int e = 0; e < members[1].rows; e++)
                differ += !isnan(w.value[r][1][e]) && (w.value[r][1][e] != before.value[r][1][e] ||
                                                          w.ema[r][1][e] != before.ema[r][1][e]);
        CHECK_MSG(differ == 0, "bf16, %s: %d elements of gen.b differ", name_of(&w), differ);
    }
}

/* A parameter whose bucket is frozen in the first step of its group keeps its values, and its
   master weights and EMA begin with them. */
static void test_frozen_first(void) {
    static training one;
    for (int i = 0; i < 2 * LAYOUTS; i++) {
        double worst = 0;
        int narrow = i >= LAYOUTS;
        w = layouts[i % LAYOUTS];
        w.dtype = narrow ? DT_BF16 : (dt_dtype)0;
        w.freezes = 3;
        w.last = 5;
        dt_report report = run(&w, train);
        CHECK_MSG(report.status == DT_OK, "frozen first, %s: %s", name_of(&w), report.text);
        for (int r = 0; r < w.dp * w.tp * w.pp; r++)
            for (int e = 0; e < members[1].rows; e++)
                worst += !isnan(w.value[r][1][e]) && (w.value[r][1][e] != start_value(1, e) ||
                                                         w.ema[r][1][e] != start_value(1, e));
        w = layouts[i % LAYOUTS];
        w.dtype = narrow ? DT_BF16 : (dt_dtype)0;
        w.freezes = 3;
        CHECK(run(&w, train).status == DT_OK);
        if (i % LAYOUTS == 0) one = w;
        for (int r = 0; r < w.dp * w.tp * w.pp; r++)
            for (int e = 0; e < members[1].rows; e++)
                worst += fabs(w.value[r][1][e] - one.value[0][1][e]) > (narrow ? 0.004 : 1e-12);
        CHECK_MSG(worst == 0, "frozen first, %s: %g elements differ", name_of(&w), worst);
    }
}

// ==== Outliers ==================================================================================

enum { LONG = 150, AT_NORM = 140, AT_LOSS = 145, AT_SAVE = 136 };

static double long_loss(int step) { return step == AT_LOSS ? 60 : 3 + sin(7.0 * step); }

/* The z-score over the last values, by other code. */
static double naive_z(const double *values, int n) {
    double sum = 0, squares = 0;
    if (n < DT_OUTLIER_WINDOW + 1) return NAN;
    for (int i = n - DT_OUTLIER_WINDOW; i < n; i++) {
        sum += values[i];
        squares += values[i] * values[i];
    }
    double mean = sum / DT_OUTLIER_WINDOW;
    return (values[n - 1] - mean) / sqrt(squares / DT_OUTLIER_WINDOW - mean * mean);
}

/* The gradient is 1 + a little, or 30: two steps in 150 are outliers. */
static dt_status long_back(dt_node *n) {
    const int *step = (const int *)n->saved;
    double g = *step == AT_NORM ? 30 : 1 + 0.1 * sin(5.0 * *step);
    int ranks = dt_comm_size(dt_world(n->in[0]->ctx));
    for (size_t k = 0; k < n->in[0]->param->count; k++) ((double *)dt_grad(n, 0))[k] += g / ranks;
    return DT_OK;
}

static dt_status long_main(dt_ctx *ctx, void *user) {
    training *m = (training *)user;
    static __thread double norms[LONG], losses[LONG];
    double value[4], before[4];
    int taken = 0;
    dt_tensor *t = dt_param_at(ctx, "w", DT_SHAPE(4), DT_ONES, (dt_param_desc){ .dtype = DT_F64 });
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = m->stage,
                                          .optimizer = DT_SGD,
                                          .skip_norm_z = m->kind ? 0 : 5,
                                          .skip_loss_z = m->kind ? 0 : 6 });
    dt_checkpoint *c = m->load || m->save
                           ? dt_checkpoint_open(zero, (dt_checkpoint_desc){ .dir = m->save })
                           : NULL;
    if (m->load) CHECK(dt_checkpoint_load(c, m->load) == m->first - 1);
    for (int n = m->first; n <= m->last && dt_error(ctx) == DT_OK; n++) {
        dt_tensor *out = dt_new(ctx, DT_F64, DT_SCALAR);
        int *step = (int *)dt_record_saved(out,
            (dt_record_desc){
                .name = "long", .in = { t }, .backward = long_back, .saved_bytes = sizeof(int) });
        *(double *)out->data = 0;
        *step = n;
        dt_backward(out);
        dt_reset(ctx);
        dt_read(t, before);
        dt_zero_loss(zero, long_loss(n));
        dt_step_info info = dt_zero_step(zero, 0.01);
        dt_read(t, value);
        norms[n - 1] = info.grad_norm;
        losses[n - 1] = long_loss(n);
        int outlier = m->kind        ? DT_OUTLIER_NONE
                      : n == AT_NORM ? DT_OUTLIER_NORM
                      : n == AT_LOSS ? DT_OUTLIER_LOSS
                                     : DT_OUTLIER_NONE;
        CHECK(info.step == n && !info.skipped && info.outlier == outlier);
        CHECK((memcmp(value, before, sizeof value) == 0) == (outlier != DT_OUTLIER_NONE));
        if (m->first == 1) {
            double z = naive_z(norms, n), loss_z = naive_z(losses, n);
            CHECK(isnan(z) ? isnan(info.norm_z) : fabs(info.norm_z - z) < 1e-9);
            CHECK(isnan(loss_z) ? isnan(info.loss_z) : fabs(info.loss_z - loss_z) < 1e-9);
        }
        taken += outlier == DT_OUTLIER_NONE;
    }
    if (m->first == 1 && dt_error(ctx) == DT_OK)
        CHECK(dt_zero_steps(zero) == m->last && dt_zero_group_steps(zero, 0) == taken);
    if (m->save) CHECK(dt_checkpoint_save(c) == DT_OK);
    memcpy(m->value[dt_ctx_rank(ctx)][0], value, sizeof value);
    dt_checkpoint_close(c);
    return dt_error(ctx);
}

static void test_outliers(void) {
    char path[100];
    dt_outlier window = { .count = 0 };
    snprintf(path, sizeof path, "%s/long", folder);
    w = (training){ .dp = 1, .last = LONG };
    CHECK(run(&w, long_main).status == DT_OK);
    double whole = w.value[0][0][0];
    w = (training){ .dp = 2, .last = AT_SAVE, .stage = 1, .save = path };
    CHECK(run(&w, long_main).status == DT_OK);
    w = (training){ .dp = 2, .stage = 3, .first = AT_SAVE + 1, .last = LONG, .load = path };
    CHECK(run(&w, long_main).status == DT_OK); /* the window goes on */
    CHECK(fabs(w.value[1][0][3] - whole) < 1e-14);
    remove_folder(path);
    w = (training){ .dp = 2, .last = LONG, .kind = 1 };
    CHECK(run(&w, long_main).status == DT_OK); /* no threshold: nothing is skipped */
    CHECK(isnan(dt_outlier_z(NULL, 1)) && isnan(dt_outlier_z(&window, NAN)) && window.count == 0);
    for (int i = 0; i < DT_OUTLIER_WINDOW; i++) CHECK(isnan(dt_outlier_z(&window, 0.1)));
    CHECK(dt_outlier_z(&window, 0.1) == 0);
    dt_zero_loss(NULL, 1);
}

// ==== NaN =======================================================================================

/* A NaN in a group that does not step changes nothing; in one that steps it is an error that names
   its parameter. */
static void test_nan(void) {
    for (int i = 0; i < LAYOUTS; i++) {
        w = layouts[i];
        w.nan_step = 2; /* only disc steps */
        w.nan_param = 0;
        dt_report report = run(&w, train);
        CHECK_MSG(report.status == DT_OK, "a NaN of gen, %s: %s", name_of(&w), report.text);
        check_against_golden(&w);
        w = layouts[i];
        w.nan_step = 2;
        w.nan_param = 2;
        report = run(&w, train);
        CHECK_MSG(report.status == DT_ERR_NUMERIC && strstr(report.text, "disc.w"),
            "a NaN of disc, %s: %s", name_of(&w), report.text);
    }
}

// ==== Mistakes ==================================================================================

enum {
    NO_MATCH = 0,
    NO_MATCH_LEFT,
    NO_PATTERN,
    TOO_MANY,
    BAD_OPTIMIZER,
    BAD_BETA,
    ONE_BIT,
    ONE_BIT_GROUP,
    NO_UPDATE,
    UNLIKE_PATTERN,
    UNLIKE_DECAY,
    UNLIKE_COUNT,
    UNLIKE_RATE,
    NO_GROUP_STEPS,
    RATE_NAN,
    RATES_NULL,
    BAD_EMA,
    NO_EMA,
    EMA_STEP,
    EMA_SAVE,
    EMA_LOAD,
    FREEZE_NONE,
    FREEZE_EMPTY,
    FREEZE_ICE,
    FREEZE_LATE,
    FREEZE_ALL,
    FREEZE_UNLIKE,
    FROZEN_GRAD,
    FROZEN_BESIDE,
    FULL_NULL,
    UNLIKE_LOSS,
    MISTAKES
};

static const struct mistake {
    dt_status status;
    const char *words[2];
} mistakes[MISTAKES] = {
    [NO_MATCH] = { DT_ERR_ARG,
        { "parameter group 2", "no parameter on any rank matches 'hed.*'" } },
    [NO_MATCH_LEFT] = { DT_ERR_ARG, { "'disc.w'", "earlier parameter groups" } },
    [NO_PATTERN] = { DT_ERR_ARG, { "parameter group 2", "no patterns" } },
    [TOO_MANY] = { DT_ERR_ARG, { "17 parameter groups", "at most 16" } },
    [BAD_OPTIMIZER] = { DT_ERR_ARG, { "parameter group 2: optimizer 9", "" } },
    [BAD_BETA] = { DT_ERR_ARG, { "parameter group 2: beta1 1", "" } },
    [ONE_BIT] = { DT_ERR_UNSUPPORTED, { "DT_ONEBIT_ADAM", "group_count" } },
    [ONE_BIT_GROUP] = { DT_ERR_UNSUPPORTED, { "parameter group 2: DT_ONEBIT_ADAM", "" } },
    [NO_UPDATE] = { DT_ERR_ARG, { "parameter group 2: DT_OPTIMIZER_CUSTOM", "update" } },
    [UNLIKE_PATTERN] = { DT_ERR_COMM, { "group 'head.*'", "group '*.tied'" } },
    [UNLIKE_DECAY] = { DT_ERR_COMM, { "decay 0.5", "decay 0.05" } },
    [UNLIKE_COUNT] = { DT_ERR_COMM, { "1 parameter groups", "2 parameter groups" } },
    [UNLIKE_RATE] = { DT_ERR_COMM, { "learning rate", "for parameter group 2" } },
    [NO_GROUP_STEPS] = { DT_ERR_ARG, { "no parameter group steps", "" } },
    [RATE_NAN] = { DT_ERR_ARG, { "learning rate nan", "" } },
    [RATES_NULL] = { DT_ERR_ARG, { "NULL", "" } },
    [BAD_EMA] = { DT_ERR_ARG, { "ema_decay 1", "" } },
    [NO_EMA] = { DT_ERR_ARG, { "dt_zero_swap_ema", "ema_decay is 0" } },
    [EMA_STEP] = { DT_ERR_ARG, { "dt_zero_step", "dt_zero_swap_ema again" } },
    [EMA_SAVE] = { DT_ERR_ARG, { "dt_checkpoint_save", "dt_zero_swap_ema again" } },
    [EMA_LOAD] = { DT_ERR_ARG, { "dt_checkpoint_load", "dt_zero_swap_ema again" } },
    [FREEZE_NONE] = { DT_ERR_ARG, { "no parameter on any rank matches 'genn'", "" } },
    [FREEZE_EMPTY] = { DT_ERR_ARG, { "dt_zero_freeze", "no patterns" } },
    [FREEZE_ICE] = { DT_ERR_ARG, { "'ice'", "frozen at registration" } },
    [FREEZE_LATE] = { DT_ERR_ARG, { "dt_zero_freeze", "before the next forward" } },
    [FREEZE_ALL] = { DT_ERR_ARG, { "no parameter group steps", "" } },
    [FREEZE_UNLIKE] = { DT_ERR_COMM, { "dt_zero_freeze", "rank 1" } },
    [FROZEN_GRAD] = { DT_ERR_ARG, { "dt_zero_freeze has frozen", "" } },
    [FROZEN_BESIDE] = { DT_ERR_ARG, { "dt_zero_freeze has frozen", "" } },
    [FULL_NULL] = { DT_ERR_ARG, { "dt_zero_grad_full", "NULL" } },
    [UNLIKE_LOSS] = { DT_ERR_COMM, { "rank 1 passes loss 1.5 to dt_zero_loss", "passes 0.5" } },
};

/* Freezing, EMA and the loss: one wrong call, after dt_zero_make and before or after a backward. */
static void mistake_before(dt_ctx *ctx, int k, dt_zero *zero) {
    int last = dt_ctx_rank(ctx) == 1;
    if (k >= NO_EMA && k <= EMA_LOAD) dt_zero_swap_ema(zero);
    if (k == EMA_SAVE || k == EMA_LOAD) {
        dt_checkpoint *c = dt_checkpoint_open(zero, (dt_checkpoint_desc){ .dir = folder });
        if (k == EMA_SAVE) CHECK(dt_checkpoint_save(c) == DT_ERR_ARG);
        if (k == EMA_LOAD) CHECK(dt_checkpoint_load(c, NULL) == -1);
    }
    if (k == FREEZE_NONE) CHECK(dt_zero_freeze(zero, "gen.w,genn", 1) == DT_ERR_ARG);
    if (k == FREEZE_EMPTY) CHECK(dt_zero_freeze(zero, ",", 1) == DT_ERR_ARG);
    if (k == FREEZE_ICE) CHECK(dt_zero_freeze(zero, "ice", 0) == DT_ERR_ARG);
    if (k == FREEZE_UNLIKE) CHECK(dt_zero_freeze(zero, "gen.*", last) == DT_ERR_COMM);
    if (k == FREEZE_ALL) CHECK(dt_zero_freeze(zero, "*", 1) == DT_OK);
    if (k == FROZEN_GRAD || k == FROZEN_BESIDE) CHECK(dt_zero_freeze(zero, "*.b", 1) == DT_OK);
    if (k == UNLIKE_LOSS) dt_zero_loss(zero, 0.5 + last);
}
static void mistake_after(dt_ctx *ctx, int k, dt_zero *zero) {
    double host[64];
    const dt_tensor *b = dt_param_get(ctx, 1); /* gen.b or disc.b */
    if (k == FREEZE_LATE) CHECK(dt_zero_freeze(zero, "gen.*", 1) == DT_ERR_ARG);
    if (k == FROZEN_GRAD || k == FROZEN_BESIDE) CHECK(dt_zero_grad(zero, b, host) == DT_ERR_ARG);
    if (k == FULL_NULL) CHECK(dt_zero_grad_full(zero, b, NULL) == DT_ERR_ARG);
}

static dt_status mistake_main(dt_ctx *ctx, void *user) {
    training *m = (training *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = m->dp, .pp = m->pp });
    dt_zero_desc d = zero_desc(m, &mesh);
    dt_param_group own[2] = { groups[0], { .params = "*.tied" } };
    int k = m->kind, last = dt_ctx_rank(ctx) == 1;
    register_members(ctx, m, &mesh);
    dt_param_at(ctx, "ice", DT_SHAPE(3), DT_ONES, (dt_param_desc){ .frozen = 1 });
    d.groups = own;
    d.bucket_bytes = k == FROZEN_BESIDE ? 0 : 64; /* with 64, each parameter has a bucket */
    if (k == BAD_EMA) d.ema_decay = 1;
    if (k == NO_EMA) d.ema_decay = 0;
    if (k == NO_MATCH) own[1].params = "head.*,hed.*";
    if (k == NO_MATCH_LEFT) own[1].params = "disc.w";
    if (k == NO_PATTERN) own[1].params = " , ";
    if (k == TOO_MANY) d.group_count = 17;
    if (k == BAD_OPTIMIZER) own[1].optimizer = 9;
    if (k == BAD_BETA) own[1].beta1 = 1;
    if (k == ONE_BIT)
        d = (dt_zero_desc){
            .optimizer = DT_ONEBIT_ADAM, .freeze_steps = 1, .groups = own, .group_count = 2
        };
    if (k == ONE_BIT_GROUP) own[1].optimizer = DT_ONEBIT_ADAM;
    if (k == NO_UPDATE) own[1].optimizer = DT_OPTIMIZER_CUSTOM;
    if (k == UNLIKE_PATTERN && last) own[1].params = "head.*";
    if (k == UNLIKE_DECAY) own[1].weight_decay = last ? 0.5 : 0.05;
    if (k == UNLIKE_COUNT) d.group_count = 1 + last;
    dt_zero *zero = dt_zero_make(ctx, d);
    if (!CHECK((zero != NULL) == (k >= UNLIKE_RATE && k != BAD_EMA)) || !zero) return dt_error(ctx);
    double lr[3] = { 0.1, 0.1, k == UNLIKE_RATE && last ? 0.2 : 0.1 };
    if (k == NO_GROUP_STEPS) lr[0] = lr[1] = lr[2] = -1;
    if (k == RATE_NAN) lr[1] = NAN;
    mistake_before(ctx, k, zero);
    dt_tensor *loss = pull(ctx, m, &mesh, 1);
    if (k != FREEZE_ALL) dt_backward(loss);
    mistake_after(ctx, k, zero);
    CHECK(isnan(dt_zero_step_groups(zero, k == RATES_NULL ? NULL : lr).grad_norm));
    dt_barrier(dt_world(ctx));
    return dt_error(ctx);
}

static void test_mistakes(void) {
    for (int i = 0; i < 2 * MISTAKES; i++) {
        const struct mistake *m = &mistakes[i / 2];
        w = (training){ .dp = 1 + i % 2, .pp = 2 - i % 2, .kind = i / 2 };
        dt_report report = run(&w, mistake_main);
        CHECK_MSG(report.status == m->status && strstr(report.text, m->words[0]) &&
                      strstr(report.text, m->words[1]),
            "mistake %d, dp %d: %s", i / 2, w.dp, report.text);
    }
    CHECK(isnan(dt_zero_step_groups(NULL, NULL).grad_norm) && dt_zero_group_steps(NULL, 0) == -1);
    CHECK(dt_zero_freeze(NULL, "*", 1) == DT_ERR_ARG && dt_zero_swap_ema(NULL) == DT_ERR_ARG &&
          dt_zero_grad_full(NULL, NULL, NULL) == DT_ERR_ARG);
    remove_folder(folder);
    CHECK(mkdir(folder, 0700) == 0);
}

/* ---- checkpoints of other groups ---- */

/* Without groups, with AdamW in all groups, with one that is SGD, with another pattern. */
enum { PLAIN = 0, ALL_ADAMW, ONE_SGD, OTHER_PATTERN };

static dt_status refit_main(dt_ctx *ctx, void *user) {
    training *m = (training *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = m->dp });
    dt_param_group one = { .params = m->kind == OTHER_PATTERN ? "head.*" : "disc.*",
        .optimizer = m->kind == ONE_SGD ? DT_SGD : DT_ADAMW };
    dt_zero_desc d = { .mesh = &mesh, .stage = 1, .groups = &one, .group_count = m->kind != PLAIN };
    register_members(ctx, m, &mesh);
    dt_zero *zero = dt_zero_make(ctx, d);
    dt_checkpoint *c = dt_checkpoint_open(zero, (dt_checkpoint_desc){ .dir = m->save });
    if (m->load && dt_checkpoint_load(c, m->load) == 2)
        CHECK(dt_zero_group_steps(zero, 0) == 2 &&
              dt_zero_group_steps(zero, 1) == (m->kind == PLAIN ? -1 : 2));
    for (int n = 1; n <= 2 && m->save && dt_error(ctx) == DT_OK; n++) {
        dt_backward(pull(ctx, m, &mesh, n));
        dt_reset(ctx);
        dt_zero_step(zero, 0.1);
    }
    if (m->save) CHECK(dt_checkpoint_save(c) == DT_OK);
    dt_checkpoint_close(c);
    return dt_error(ctx);
}

static void check_refit(int saved, int loaded, const char *refusal) {
    char path[100];
    snprintf(path, sizeof path, "%s/refit", folder);
    w = (training){ .dp = 2, .kind = saved, .save = path };
    CHECK(run(&w, refit_main).status == DT_OK);
    w = (training){ .dp = 2, .kind = loaded, .load = path };
    dt_report report = run(&w, refit_main);
    CHECK_MSG(refusal ? report.status == DT_ERR_ARG && strstr(report.text, refusal)
                      : report.status == DT_OK,
        "kind %d saved, kind %d loads: %s", saved, loaded, report.text);
    remove_folder(path);
}

static void test_refit(void) {
    check_refit(PLAIN, PLAIN, NULL);
    check_refit(PLAIN, ALL_ADAMW, NULL); /* as a checkpoint of an earlier version */
    check_refit(ALL_ADAMW, ALL_ADAMW, NULL);
    check_refit(PLAIN, ONE_SGD, "the optimizer of parameter group 1 is 'adamw' there, and 'sgd'");
    check_refit(ALL_ADAMW, ONE_SGD, "the optimizer of parameter group 1");
    check_refit(ALL_ADAMW, OTHER_PATTERN, "the pattern of parameter group 1 is 'disc.*' there");
    check_refit(ALL_ADAMW, PLAIN, "1 parameter groups besides the first, and this program has 0");
}

int main(int argc, char **argv) {
    char path[400];
    snprintf(path, sizeof path, "%s/groups.bin", argc > 1 ? argv[1] : "tests/golden");
    golden *g = golden_open(path);
    vectors = g;
    snprintf(folder, sizeof folder, "/tmp/dt_test_groups.XXXXXX");
    if (!CHECK(mkdtemp(folder) != NULL) || !CHECK_MSG(g, "%s cannot be read", path))
        return check_done("test_groups");
    test_layouts();
    test_narrow();
    test_checkpoints();
    test_frozen_groups();
    test_frozen_parameter();
    test_frozen_narrow();
    test_frozen_first();
    test_outliers();
    test_nan();
    test_mistakes();
    test_refit();
    CHECK(rmdir(folder) == 0); /* the folder is empty */
    golden_free(g);
    return check_done("test_groups");
}
