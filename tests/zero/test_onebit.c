/* test_onebit.c - 1-bit Adam of dt_zero.h against the steps that tests/golden/make_onebit.py wrote
   with PyTorch

   An op whose gradient is a known function of step, rank, parameter and element makes any set of
   parameters trainable without a model. The file holds the expected results of twelve steps, five
   of them before the freeze.

       test_onebit [FOLDER]      FOLDER holds onebit.bin; default tests/golden */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/golden/golden.h"
#include "tests/comm/ranks.h"

enum { STEPS = 12, FREEZE = 5, PARAMS = 4, ELEMENTS = 1100, RANKS = 4 };
static const double BETA1 = 0.9, BETA2 = 0.99, EPS = 1e-8, DECAY = 0.1, CLIP = 40;

/* How a parameter is placed over tp: replicated, sharded, or replicated with partial gradients. */
enum { SAME = 0, CUT, PART };
typedef struct made {
    const char *scope, *name;
    int rows, cols;
    double lr_scale;
    int over_tp, frozen;
} made;

/* The script's parameters and a frozen one. The 21 rows of `cut` over 2 ranks leave one row past
   the end. */
static const made over_dp[] = { { "a.", "w", 33, 32, 1, SAME, 0 },
    { "a.", "b", 44, 0, 0.5, SAME, 0 }, { "b.", "g", 100, 0, 1, SAME, 0 },
    { "b.", "ice", 4, 4, 1, SAME, 1 } };
static const made over_tp[] = { { "a.", "cut", 21, 10, 1, CUT, 0 },
    { "a.", "part", 60, 0, 1, PART, 0 }, { "a.", "same", 10, 9, 1, SAME, 0 } };

/* The results of one rank, in shared memory for forked ranks. */
typedef struct left {
    double norm[STEPS], scale[STEPS];
    size_t dp_bytes[STEPS], tp_bytes[STEPS], state_bytes, optim, formula, warm_bytes, frozen_bytes,
        part_bytes;
    size_t local[PARAMS];
    int strays;      /* padding elements that are not 0 */
    uint64_t errors; /* a digest of both errors at the end */
    dt_status status;
    char text[512];
    double x[3][PARAMS][ELEMENTS]; /* values, first and second moments */
} left;

typedef struct job {
    const made *set;
    int params, dp, tp, accum, steps, procs, no_overlap;
    int bad_step, bad_rank; /* where the last element of g's gradient is NaN; step 0: never */
    dt_dtype dtype;
    left *out; /* (dp * tp) */
} job;

static int64_t made_count(const made *p) { return (int64_t)p->rows * (p->cols ? p->cols : 1); }

// ==== 1. The script's gradients =================================================================

static double mixed(uint32_t p, uint32_t e) {
    uint32_t h = p * 2654435761u + e * 2246822519u + 374761393u;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    h ^= h >> 16;
    return (double)(h >> 12) / 1048576.0;
}

static double value_of_few_bits(uint32_t key, int64_t e) {
    return trunc(mixed(key, (uint32_t)e) * 256 - 128) / 128 / (1 << e % 4);
}

static double gradient(const job *j, int p, int64_t e, int step, int data, int tp) {
    if (strcmp(j->set[p].name, "w") == 0 && e % 53 == 7 && step <= FREEZE) return 0;
    int part = j->set[p].over_tp == PART ? tp : 0;
    return value_of_few_bits((uint32_t)(((step * 8 + data) * 4 + part) * 8 + p), e) *
           (step % 3 == 0 ? 2 : 1);
}

/* Global index of a local element; -1 where the shard reaches past the end. */
static int64_t global_of(const dt_tensor *t, const made *p, int64_t local) {
    int64_t e = t->param->slice.lo[0] * (p->cols ? p->cols : 1) + local;
    return e < made_count(p) ? e : -1;
}

typedef struct pulled {
    const job *j;
    int step, micro, data, tp;
} pulled;

/* The first of two micro-batches has three quarters of the gradient. Past the end of a shard the
   gradient is 7, which must never reach a result. */
static dt_status pull_back(dt_node *n) {
    const pulled *s = (const pulled *)n->saved;
    const job *j = s->j;
    double share = j->accum == 1 ? 1 : s->micro == 0 ? 0.75 : 0.25;
    for (int i = 0; i < n->n_in; i++) {
        dt_tensor *t = n->in[i];
        void *g = dt_wants(n, i) ? dt_grad(n, i) : NULL;
        int p = t->param->index, last = (int)t->param->count - 1;
        int bad = s->step == j->bad_step && dt_ctx_rank(t->ctx) == j->bad_rank &&
                  strcmp(t->name, "b.g") == 0;
        for (int k = 0; g && k <= last; k++) {
            int64_t e = global_of(t, &j->set[p], k);
            double add = e < 0 ? 7 : share * gradient(j, p, e, s->step, s->data, s->tp);
            if (bad && k == last) add = NAN;
            dt__set_number(t->dtype, g, (size_t)k, dt__number(t->dtype, g, (size_t)k) + add);
        }
    }
    return DT_OK;
}

static dt_tensor *pull(dt_ctx *ctx, const job *j, const dt_mesh *mesh, int step, int micro) {
    dt_tensor *sum = NULL;
    for (int i = 0; i < j->params; i++) {
        dt_tensor *out = dt_new(ctx, DT_F64, DT_SCALAR);
        if (!out) return NULL;
        *(double *)out->data = 0;
        pulled *s = (pulled *)dt_record_saved(out, (dt_record_desc){ .name = "pull",
                                                       .in = { dt_param_get(ctx, i) },
                                                       .backward = pull_back,
                                                       .saved_bytes = sizeof(pulled) });
        if (s) *s = (pulled){ j, step, micro, mesh->coord.dp, mesh->coord.tp };
        sum = sum ? dt_add(sum, out) : out;
    }
    return sum;
}

// ==== 2. A run ==================================================================================

static void register_set(dt_ctx *ctx, const job *j, const dt_mesh *mesh) {
    for (int i = 0; i < j->params; i++) {
        const made *p = &j->set[i];
        dt_param_desc d = { .frozen = p->frozen, .lr_scale = p->lr_scale, .dtype = j->dtype };
        if (p->over_tp == CUT) d.shards[0] = (dt_shard_spec){ mesh->tp, 0 };
        if (p->over_tp == PART)
            d.grad_placements[0] = (dt_grad_placement){ mesh->tp, DT_GRAD_PARTIAL };
        if (i == 0 || strcmp(p->scope, j->set[i - 1].scope) != 0) dt_scope(ctx, p->scope);
        dt_param_at(
            ctx, p->name, p->cols ? DT_SHAPE(p->rows, p->cols) : DT_SHAPE(p->rows), DT_ZEROS, d);
    }
}

static void write_start(dt_ctx *ctx, const job *j) {
    for (int i = 0; i < j->params; i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        for (size_t k = 0; t->data && k < t->param->count; k++) {
            int64_t e = global_of(t, &j->set[i], (int64_t)k);
            if (e >= 0)
                dt__set_number(t->dtype, t->data, k, value_of_few_bits(900 + (uint32_t)i, e));
        }
    }
}

/* Computes the expected memory and traffic: units are padded to N x 1,024 elements; a message has
   one bit per element plus 8 bytes. */
static void expect_bytes(dt_ctx *ctx, const job *j, left *l) {
    size_t N = (size_t)j->dp, tp = (size_t)j->tp;
    for (int u = 0; u < dt_bucket_count(ctx); u++) {
        const dt_bucket *unit = dt_bucket_get(ctx, u);
        size_t size = j->dtype == DT_F64 ? 8 : 4, masters = size != dt_dtype_size(j->dtype);
        if (unit->frozen) continue;
        CHECK(unit->padded % (N * 1024) == 0);
        l->formula += unit->padded * size * (3 + masters) + unit->padded / N * size;
        l->warm_bytes += 2 * (N - 1) * (unit->padded / N) * size;
        l->frozen_bytes += 2 * (N - 1) * (unit->padded / N / 8 + 8);
        if (j->set[unit->first_param].over_tp == PART)
            l->part_bytes += 2 * (tp - 1) * unit->padded * size / tp;
    }
}

/* Counts padding elements that are not zero, in every array of a unit: after the unit's parameters,
   and in shards that reach past the end. */
static void count_strays(dt_ctx *ctx, const job *j, const dt_zero *zero, left *l) {
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        const dt_bucket *unit = &z->bucket;
        size_t run = unit->padded / (size_t)j->dp,
               first = (size_t)dt_comm_rank(z->data_group) * run;
        /* the arrays are NULL if their allocation was refused */
        for (size_t i = 0; i < unit->padded && !unit->frozen && unit->grad; i++) {
            int padding = i >= unit->count;
            for (int p = unit->first_param; p < unit->first_param + unit->n_params; p++) {
                const dt_tensor *t = dt_param_get(ctx, p);
                size_t at = i - t->param->offset;
                if (i >= t->param->offset && at < t->param->count)
                    padding |= global_of(t, &j->set[p], (int64_t)at) < 0;
            }
            if (!padding) continue;
            l->strays += dt__number(unit->dtype, unit->data, i) != 0;
            l->strays += dt__number(unit->grad_dtype, unit->grad, i) != 0;
            for (int s = 0; s < 2; s++)
                l->strays += dt__number(unit->grad_dtype, z->state[s], i) != 0;
            l->strays += dt__number(unit->grad_dtype, z->errors[0], i) != 0;
            if (i >= first && i < first + run)
                l->strays += dt__number(unit->grad_dtype, z->errors[1], i - first) != 0;
        }
    }
}

static void store_results(dt_ctx *ctx, const job *j, dt_zero *zero, left *l) {
    char *host = (char *)malloc(ELEMENTS * 8);
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        size_t bytes = z->bucket.padded * dt_dtype_size(z->bucket.grad_dtype);
        for (int e = 0; e < 2 && !z->bucket.frozen; e++)
            l->errors = dt__digest(l->errors, z->errors[e], e ? bytes / (size_t)j->dp : bytes);
    }
    for (int i = 0; host && i < j->params; i++) {
        const dt_tensor *t = dt_param_get(ctx, i);
        size_t n = l->local[i] = t->param->count, size = dt_dtype_size(dt_grad_dtype(t));
        for (size_t k = 0; k < n; k++) l->x[0][i][k] = dt__number(t->dtype, t->data, k);
        const dt__zero_bucket *z = &zero->buckets[t->param->bucket->index];
        for (int s = 0; s < 2 && !z->bucket.frozen; s++) {
            /* after a failure: read the memory directly */
            if (dt_error(ctx) != DT_OK || dt_zero_state(zero, s, t, host) != DT_OK)
                memcpy(host, (char *)z->state[s] + t->param->offset * size, n * size);
            for (size_t k = 0; k < n; k++)
                l->x[1 + s][i][k] = dt__number(dt_grad_dtype(t), host, k);
        }
    }
    free(host);
}

static dt_status train(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    left *l = &j->out[dt_ctx_rank(ctx)];
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = j->dp, .tp = j->tp });
    register_set(ctx, j, &mesh);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh,
                                          .optimizer = DT_ONEBIT_ADAM,
                                          .beta1 = BETA1,
                                          .beta2 = BETA2,
                                          .eps = EPS,
                                          .weight_decay = DECAY,
                                          .clip = CLIP,
                                          .freeze_steps = FREEZE,
                                          /* a scale of 1: the op does not multiply by it */
                                          .loss_scale = j->dtype == DT_F16,
                                          .no_overlap = j->no_overlap });
    if (!zero) return dt_error(ctx);
    write_start(ctx, j);
    expect_bytes(ctx, j, l);
    for (int step = 1; step <= j->steps && dt_error(ctx) == DT_OK; step++) {
        size_t before[2] = { dt_comm_bytes(ctx, DT_AXIS_DP), dt_comm_bytes(ctx, DT_AXIS_TP) };
        for (int micro = 0; micro < j->accum; micro++) {
            dt_micro(ctx, micro, j->accum);
            dt_backward(pull(ctx, j, &mesh, step, micro));
            dt_reset(ctx);
        }
        dt_step_info info = dt_zero_step(zero, 0.004 * step);
        l->norm[step - 1] = info.grad_norm;
        l->scale[step - 1] = info.clip_scale;
        l->dp_bytes[step - 1] = dt_comm_bytes(ctx, DT_AXIS_DP) - before[0];
        l->tp_bytes[step - 1] = dt_comm_bytes(ctx, DT_AXIS_TP) - before[1];
    }
    dt_barrier(dt_world(ctx)); /* ranks that do not know of a failure yet learn of it here */
    l->state_bytes = dt_zero_state_bytes(zero);
    l->optim = dt_memory_used(ctx).live[DT_MEM_OPTIM];
    store_results(ctx, j, zero, l);
    count_strays(ctx, j, zero, l);
    l->status = dt_error(ctx);
    snprintf(l->text, sizeof l->text, "%s", dt_error_text(ctx));
    return dt_error(ctx);
}

static job job_of(const made *set, int params, int dp, int tp, dt_dtype dtype) {
    job j = {
        .set = set, .params = params, .dp = dp, .tp = tp, .accum = 1, .steps = STEPS, .dtype = dtype
    };
    j.out = (left *)mmap(
        NULL, RANKS * sizeof(left), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return j;
}

static void job_free(job *j) { munmap(j->out, RANKS * sizeof(left)); }

#define OVER_DP over_dp, (int)(sizeof over_dp / sizeof *over_dp)
#define OVER_TP over_tp, (int)(sizeof over_tp / sizeof *over_tp)

// ==== 3. Against the stored steps ===============================================================

static const double *stored(
    const golden *g, const char *name, const char *param, const char *what, int64_t *n) {
    char text[64];
    snprintf(text, sizeof text, "%s.%s%s%s", name, param, *what ? "." : "", what);
    return golden_get(g, text, n);
}

/* f64 must match the stored values to 1e-12. f32 rounds in each step, by about 1e-7 of the largest
   values, which in the first moments are the scales; a wrong sign would be off by two scales. In 16
   bits the parameter is rounded, too; its state is f32. */
static void check_golden(const golden *g, const char *name, const job *j) {
    static const char *const what[3] = { "p", "m", "v" };
    double tol = j->dtype == DT_F64 ? 1e-12 : 4e-6, round = j->dtype == DT_BF16  ? 0.004
                                                            : j->dtype == DT_F16 ? 5e-4
                                                                                 : 0;
    const double *norm = stored(g, name, "norm", "", NULL);
    if (!CHECK(norm)) return;
    for (int r = 0; r < j->dp * j->tp; r++) {
        const left *l = &j->out[r];
        for (int n = 0; n < STEPS; n++) {
            double scale = CLIP / (norm[n] + 1e-6) < 1 ? CLIP / (norm[n] + 1e-6) : 1;
            CHECK_MSG(
                fabs(l->norm[n] - norm[n]) <= tol * norm[n] && fabs(l->scale[n] - scale) <= tol,
                "%s, rank %d: norm of step %d is %.17g, not %.17g", name, r, n + 1, l->norm[n],
                norm[n]);
        }
        for (int p = 0; p < j->params; p++) {
            for (int w = 0; w < 3 && !j->set[p].frozen; w++) {
                int64_t count, n = (int64_t)l->local[p], wrong = 0;
                const double *right = stored(g, name, j->set[p].name, what[w], &count),
                             *got = l->x[w][p];
                int tp = j->set[p].over_tp == CUT ? r % j->tp : 0;
                if (!CHECK(right && n == count / (j->set[p].over_tp == CUT ? j->tp : 1))) continue;
                double worst = 0;
                for (int64_t k = 0; k < n; k++) {
                    double y = right[tp * n + k],
                           off = fabs(got[k] - y) - (w == 0 ? round * fabs(y) : 0);
                    worst = fmax(worst, off);
                    wrong += !(off <= tol * fmax(1, fabs(y)));
                }
                CHECK_MSG(wrong == 0,
                    "%s, %s, rank %d: %lld elements of %s.%s differ, by at most %.2e", name,
                    dt_dtype_name(j->dtype), r, (long long)wrong, j->set[p].name, what[w], worst);
            }
            for (int64_t k = 0; j->set[p].frozen && k < made_count(&j->set[p]); k++)
                CHECK(l->x[0][p][k] == value_of_few_bits(900 + (uint32_t)p, k));
        }
    }
}

/* Replicas have equal bits, padding is zero, and memory and traffic match the formulas to the
   byte. */
static void check_ranks(const char *name, const job *j) {
    for (int r = 0; r < j->dp * j->tp; r++) {
        const left *l = &j->out[r];
        CHECK_MSG(memcmp(l->norm, j->out[0].norm, sizeof l->norm) == 0,
            "%s: norms of rank %d differ from rank 0's", name, r);
        for (int w = 0; w < 3; w++)
            for (int p = 0; p < j->params; p++) {
                const left *copy = &j->out[j->set[p].over_tp == CUT ? r % j->tp : 0];
                CHECK_MSG(memcmp(l->x[w][p], copy->x[w][p], sizeof l->x[w][p]) == 0,
                    "%s: array %d of %s on rank %d differs from its replica", name, w,
                    j->set[p].name, r);
            }
        CHECK_MSG(l->strays == 0, "%s: %d elements of padding are not 0", name, l->strays);
        CHECK_MSG(l->state_bytes == l->formula && l->optim == l->formula,
            "%s: %zu and %zu bytes, formula %zu", name, l->state_bytes, l->optim, l->formula);
        for (int n = 0; n < j->steps; n++) {
            size_t right = (n < FREEZE ? l->warm_bytes : l->frozen_bytes) + l->part_bytes;
            CHECK_MSG(l->dp_bytes[n] == right && l->tp_bytes[n] == 0,
                "%s: step %d sends %zu bytes, not %zu", name, n + 1, l->dp_bytes[n], right);
        }
        if (j->dtype != DT_F64) CHECK(15 * l->frozen_bytes <= l->warm_bytes);
    }
}

static int same(const job *a, const job *b) {
    int alike = 1;
    for (int r = 0; r < a->dp * a->tp; r++)
        alike &= memcmp(a->out[r].x, b->out[r].x, sizeof a->out[r].x) == 0 &&
                 a->out[r].errors == b->out[r].errors &&
                 memcmp(a->out[r].norm, b->out[r].norm, sizeof a->out[r].norm) == 0;
    return alike;
}

/* Runs one case on threads, on forks, without overlap, and in two micro-batches where the type
   represents their gradients exactly. */
static void test_case(const golden *g, const char *name, job like) {
    for (int k = 0; k < 4; k++) {
        job j = job_of(like.set, like.params, like.dp, like.tp, like.dtype);
        j.procs = k == 1;
        j.no_overlap = k == 2;
        j.accum = k == 3 ? 2 : 1;
        if (k < 3 || like.dtype == DT_F64 || like.dtype == DT_F32) {
            run_well_on(j.procs, j.dp * j.tp, train, &j);
            check_golden(g, name, &j);
            check_ranks(name, &j);
            if (k == 0)
                memcpy(like.out, j.out, RANKS * sizeof *j.out);
            else
                CHECK_MSG(same(&j, &like), "%s: run %d and run 0 differ in bits", name, k);
        }
        job_free(&j);
    }
    job_free(&like);
}

static void test_golden(const char *folder) {
    static const dt_dtype types[] = { DT_F64, DT_F32, DT_BF16, DT_F16 };
    char path[400], name[24];
    snprintf(path, sizeof path, "%s/onebit.bin", folder);
    golden *g = golden_open(path);
    const double *s = golden_get(g, "settings", NULL);
    if (!CHECK_MSG(s, "%s cannot be used", path)) return;
    CHECK(s[0] == STEPS && s[1] == FREEZE && s[2] == BETA1 && s[3] == BETA2 && s[4] == EPS &&
          s[5] == DECAY && s[6] == CLIP);
    for (int t = 0; t < 4; t++) {
        for (int dp = 1; dp <= 4; dp *= 2) {
            snprintf(name, sizeof name, "n%d", dp);
            test_case(g, name, job_of(OVER_DP, dp, 1, types[t]));
        }
        test_case(g, "tp", job_of(OVER_TP, 2, 2, types[t]));
    }
    golden_free(g);
}

// ==== 4. Errors =================================================================================

/* One rank's gradient contains a NaN, before the freeze or after it: all ranks fail, and their
   training state does not change. After the freeze only that rank has seen the NaN, so its report
   must be the one that names the element. */
static void test_not_finite(void) {
    for (int code = 0; code < 3 * 4; code++) {
        int step = FREEZE + code % 3, rank = code / 3;
        job good = job_of(OVER_DP, 4, 1, DT_F32), bad = job_of(OVER_DP, 4, 1, DT_F32);
        outcome o;
        good.steps = step - 1;
        run_well_on(0, 4, train, &good);
        bad.bad_step = step;
        bad.bad_rank = rank;
        run(&o, 4, train, &bad);
        CHECK_MSG(o.status == DT_ERR_NUMERIC && strstr(o.report.text, "99 of b.g"), "step %d: %s",
            step, o.report.text);
        for (int r = 0; r < 4; r++) {
            CHECK_MSG(bad.out[r].status != DT_OK && isnan(bad.out[r].norm[step - 1]),
                "wrong status at step %d on rank %d", step, r);
            CHECK_MSG(memcmp(bad.out[r].x, good.out[r].x, sizeof good.out[r].x) == 0 &&
                          bad.out[r].errors == good.out[r].errors,
                "step %d, rank %d: the training state has changed", step, r);
        }
        if (step > FREEZE)
            CHECK_MSG(o.report.text[5] == '0' + rank, "step %d: the report is not rank %d's: %s",
                step, rank, o.report.text);
        job_free(&good);
        job_free(&bad);
    }
}

enum { BAD_STAGE, BAD_TREE, BAD_FREEZE, NO_KERNEL, UNLIKE, REFUSALS };
static const struct {
    dt_status status;
    const char *says;
} refusals[REFUSALS] = {
    { DT_ERR_UNSUPPORTED, "DT_ONEBIT_ADAM at stage 1" },
    { DT_ERR_UNSUPPORTED, ".tree must be 0" },
    { DT_ERR_ARG, "0 freeze_steps" },
    { DT_ERR_UNSUPPORTED, "kernels that cpu does not have" },
    { DT_ERR_COMM, "freeze 3" },
};

static dt_status refused(dt_ctx *ctx, void *user) {
    int kind = *(const int *)user;
    dt_zero_desc d = { .optimizer = DT_ONEBIT_ADAM, .freeze_steps = 3 };
    if (kind == BAD_STAGE) d.stage = 1;
    if (kind == BAD_TREE) d.tree = 1;
    if (kind == BAD_FREEZE) d.freeze_steps = 0;
    if (kind == NO_KERNEL) ctx->kernels.sign_unpack = NULL;
    if (kind == UNLIKE) d.freeze_steps += dt_ctx_rank(ctx);
    dt_param(ctx, "w", DT_SHAPE(3), DT_ONES);
    CHECK(dt_zero_make(ctx, d) == NULL);
    return dt_error(ctx);
}

static void test_refusals(void) {
    for (int kind = 0; kind < REFUSALS; kind++) {
        outcome o;
        run(&o, 2, refused, &kind);
        CHECK_MSG(o.status == refusals[kind].status && strstr(o.report.text, refusals[kind].says),
            "%d: %s: %s", kind, dt_status_name(o.status), o.report.text);
    }
}

/* Whichever allocation is refused, every rank fails and frees all memory. */
static void test_memory_refused(void) {
    for (long at = 1, done = 0; !done && at < 400; at++) {
        job j = job_of(OVER_DP, 2, 1, DT_F32);
        outcome o;
        j.steps = FREEZE + 1;
        prepare(&o, 2, train, &j);
        o.host.refuse_at = at;
        start(&o);
        done = o.status == DT_OK && o.host.calls < at;
        CHECK_MSG(done || o.status != DT_OK, "allocation %ld of %ld was refused and no rank failed",
            at, o.host.calls);
        job_free(&j);
    }
}

int main(int argc, char **argv) {
    test_golden(argc > 1 ? argv[1] : "tests/golden");
    test_not_finite();
    test_refusals();
    test_memory_refused();
    return check_done("test_onebit");
}
