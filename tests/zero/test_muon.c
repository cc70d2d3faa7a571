/* test_muon.c - Muon of dt_zero.h against the steps that tests/golden/make_muon.py computed in
   float64, in layouts that shard its matrices over dp, tp, ep and pp

   An op whose gradient is a known function of step, parameter and element makes any set of
   parameters trainable without a model. Each of the N ranks of a data group has 1/N of it, which is
   exact, so all layouts sum the same gradients, and must give the same bits.

       test_muon [FOLDER]      FOLDER holds muon.bin; default tests/golden */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/golden/golden.h"
#include "tests/comm/ranks.h"

enum { STEPS = 6, PARAMS = 7, VECTOR = 1, EXPERTS = 5, ELEMENTS = 2800, RANKS = 4, WHAT = 3 };
static const double BETA1 = 0.9, BETA2 = 0.99, EPS = 1e-8, DECAY = 0.1;

/* The script's parameters; the dimensions that tp and ep shard, or -1. The 33 columns of `wide`,
   15 rows of `pair` and 9 of `experts` over 2 ranks leave some past the end. */
typedef struct made {
    const char *name;
    dt_shape full;
    int matrices, tp, ep;
    double lr_scale;
} made;
static const made params[PARAMS] = {
    { "tall", { 2, { 70, 40 } }, 0, 0, -1, 1 },
    { "vector", { 1, { 37 } }, 0, -1, -1, 1 },
    { "wide", { 2, { 20, 33 } }, 0, 1, -1, 1 },
    { "heads", { 3, { 4, 6, 20 } }, 0, 0, -1, 0.5 },
    { "pair", { 3, { 2, 15, 12 } }, 1, 1, -1, 1 },
    { "experts", { 4, { 4, 2, 9, 10 } }, 2, 2, 0, 1 },
    { "square", { 2, { 16, 16 } }, 0, -1, -1, 1 },
};

typedef struct layout {
    const char *name;
    int dp, tp, ep, pp, stage, shard_group;
    size_t bucket_bytes;
    int tree, procs;
} layout;
static const layout layouts[] = {
    { "one rank", 1, 1, 1, 1, 0, 0, 0, 0, 0 },
    { "one rank, a round for each matrix", 1, 1, 1, 1, 0, 0, 64, 0, 0 },
    { "dp 2", 2, 1, 1, 1, 0, 0, 0, 0, 0 },
    { "dp 2, many rounds", 2, 1, 1, 1, 0, 0, 64, 0, 0 },
    { "dp 2, ZeRO-1", 2, 1, 1, 1, 1, 0, 0, 0, 1 },
    { "dp 2, ZeRO-2", 2, 1, 1, 1, 2, 0, 0, 0, 0 },
    { "dp 2, ZeRO-3", 2, 1, 1, 1, 3, 0, 0, 0, 0 },
    { "dp 4, ZeRO-1, many rounds", 4, 1, 1, 1, 1, 0, 4000, 0, 0 },
    { "dp 4, ZeRO-3, HSDP", 4, 1, 1, 1, 3, 2, 0, 0, 0 },
    { "dp 2, ZeRO-2, tree", 2, 1, 1, 1, 2, 0, 0, 1, 0 },
    { "tp 2", 1, 2, 1, 1, 0, 0, 0, 0, 0 },
    { "tp 2 x dp 2, ZeRO-1", 2, 2, 1, 1, 1, 0, 0, 0, 1 },
    { "tp 2 x dp 2, ZeRO-3, many rounds", 2, 2, 1, 1, 3, 0, 4000, 0, 0 },
    { "ep 2", 1, 1, 2, 1, 0, 0, 0, 0, 0 },
    { "ep 2 x dp 2, ZeRO-2", 2, 1, 2, 1, 2, 0, 0, 0, 0 },
    { "ep 2 x tp 2, ZeRO-3", 1, 2, 2, 1, 3, 0, 0, 0, 0 },
    { "pp 2", 1, 1, 1, 2, 0, 0, 0, 0, 0 },
    { "pp 2 x tp 2, ZeRO-1", 1, 2, 1, 2, 1, 0, 0, 0, 0 },
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

/* The script's two cases. */
typedef struct kind {
    const char *name;
    double momentum, clip;
    int no_nesterov, scale;
} kind;
static const kind kinds[2] = { { "match", 0.95, 0, 0, DT_MUON_MATCH_RMS },
    { "original", 0.9, 20, 1, DT_MUON_ORIGINAL } };

/* The results of one rank, in shared memory for forked ranks: values, states 0 and 1 of the full
   tensors; NaN where the rank has none. */
typedef struct left {
    double norm[STEPS], x[WHAT][PARAMS][ELEMENTS];
    size_t state_bytes, optim, formula, comm_bytes, temp, comm;
    int strays;
} left;

typedef struct job {
    const layout *l;
    const kind *k;
    dt_dtype dtype;
    int from, to;     /* the steps to run; from > 1: of a checkpoint */
    const char *save; /* folder of checkpoints, or NULL */
    int skip_step;    /* at this step, if > 0, only the second group of parameters steps */
    int freeze_step;  /* at this step, if > 0, `wide` is frozen, whose bucket has others */
    left *out;        /* (RANKS) */
} job;

// ==== 1. A run ==================================================================================

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

static double gradient(int p, int64_t e, int step) {
    if (p == EXPERTS && e / 90 == 5) return 0;
    return value_of_few_bits((uint32_t)(step * 16 + p), e);
}

/* The number of a parameter in `params`. */
static int number_of(const dt_tensor *t) {
    int p = 0;
    while (strcmp(params[p].name, t->name)) p++;
    return p;
}

/* Index of a local element in the full tensor; -1 if it is padding. */
static int64_t global_of(const dt_tensor *t, int64_t local) {
    const dt_param_info *p = t->param;
    int64_t e = 0, stride = 1;
    for (int i = p->full.nd - 1; i >= 0; i--) {
        int64_t at = local % p->slice.n[i];
        if (at >= p->slice.inside[i]) return -1;
        e += (p->slice.lo[i] + at) * stride;
        stride *= p->full.d[i];
        local /= p->slice.n[i];
    }
    return e;
}

typedef struct pulled {
    int step, ranks;
} pulled;

/* In the padding the gradient is 7, which must never reach a result. */
static dt_status pull_back(dt_node *n) {
    const pulled *s = (const pulled *)n->saved;
    for (int i = 0; i < n->n_in; i++) {
        dt_tensor *t = n->in[i];
        void *g = dt_wants(n, i) ? dt_grad(n, i) : NULL;
        for (int64_t k = 0; g && k < (int64_t)t->param->count; k++) {
            int64_t e = global_of(t, k);
            double add = e < 0 ? 7 : gradient(number_of(t), e, s->step) / s->ranks;
            dt__set_number(t->dtype, g, (size_t)k, add);
        }
    }
    return DT_OK;
}

static dt_tensor *pull(dt_ctx *ctx, const dt_mesh *mesh, int step) {
    dt_tensor *sum = NULL;
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i), *out = dt_new(ctx, DT_F64, DT_SCALAR);
        if (!out || !dt_data(t)) return NULL;
        *(double *)out->data = 0;
        pulled *s = (pulled *)dt_record_saved(out, (dt_record_desc){ .name = "pull",
                                                       .in = { t },
                                                       .backward = pull_back,
                                                       .saved_bytes = sizeof(pulled) });
        int expert = mesh->ep && params[number_of(t)].ep >= 0;
        if (s) *s = (pulled){ step, dt_comm_size(expert ? mesh->expert_data : mesh->data) };
        sum = sum ? dt_add(sum, out) : out;
    }
    return sum;
}

static void register_params(dt_ctx *ctx, const job *j, const dt_mesh *mesh) {
    for (int i = 0; i < PARAMS; i++) {
        const made *p = &params[i];
        dt_param_desc d = { .lr_scale = p->lr_scale, .dtype = j->dtype, .matrices = p->matrices };
        if (j->l->pp > 1 && i % 2 != mesh->coord.pp) continue;
        if (mesh->tp && p->tp >= 0) d.shards[0] = (dt_shard_spec){ mesh->tp, p->tp };
        if (mesh->ep && p->ep >= 0) d.shards[1] = (dt_shard_spec){ mesh->ep, p->ep };
        dt_param_at(ctx, p->name, p->full, DT_ZEROS, d);
    }
}

static void write_start(dt_ctx *ctx) {
    double x[ELEMENTS];
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        for (size_t k = 0; k < t->param->count; k++) {
            int64_t e = global_of(t, (int64_t)k);
            dt__set_number(
                t->dtype, x, k, e < 0 ? 0 : value_of_few_bits(900 + (uint32_t)number_of(t), e));
        }
        dt_write(t, x);
    }
}

/* Stores values or state `what` - 1 of a parameter, and counts padding that is not zero. */
static void store(left *l, dt_zero *zero, dt_tensor *t, int what) {
    double host[ELEMENTS];
    int p = number_of(t);
    if (what > 1 && t->param->full.nd > 1) return;
    if ((what ? dt_zero_state(zero, what - 1, t, host) : dt_read(t, host)) != DT_OK) return;
    for (size_t k = 0; k < t->param->count; k++) {
        int64_t e = global_of(t, (int64_t)k);
        double x = dt__number(what ? dt_grad_dtype(t) : t->dtype, host, k);
        if (e >= 0)
            l->x[what][p][e] = x;
        else
            l->strays += x != 0;
    }
}

/* Where every rank holds a piece of every matrix, the ranks' costs differ by at most the cost of
   one matrix. */
static void check_balance(const dt__muon *m) {
    int64_t cost[RANKS] = { 0 }, most = 0;
    int all = 1;
    for (int i = 0; i < m->n_matrices; i++) {
        const dt__muon_matrix *x = &m->matrices[i];
        cost[x->owner] += dt__muon_cost(x);
        if (dt__muon_cost(x) > most) most = dt__muon_cost(x);
        for (int r = 0; r < m->ranks; r++) all &= dt__muon_count(m, x, r) > 0;
    }
    for (int r = 0; r < m->ranks && all; r++)
        for (int k = 0; k < m->ranks; k++)
            CHECK_MSG(cost[r] - cost[k] <= most, "costs %lld and %lld", (long long)cost[r],
                (long long)cost[k]);
}

static void store_results(dt_ctx *ctx, const job *j, dt_zero *zero, left *l) {
    for (int w = 0; w < WHAT; w++)
        for (int p = 0; p < PARAMS; p++)
            for (int e = 0; e < ELEMENTS; e++) l->x[w][p][e] = NAN;
    for (int i = 0; i < dt_param_count(ctx); i++)
        for (int w = 0; w < WHAT; w++) store(l, zero, dt_param_get(ctx, i), w);
    size_t size = j->dtype == DT_F64 ? 8 : 4, masters = size != dt_dtype_size(j->dtype);
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        const dt_tensor *first = dt_param_get(ctx, z->bucket.first_param);
        l->formula += z->count * size * ((first->param->full.nd > 1 ? 1 : 2) + masters);
    }
    /* a round has matrices of at most bucket_bytes, or one */
    check_balance(zero->muon);
    size_t limit = j->l->bucket_bytes ? j->l->bucket_bytes : (size_t)25 << 20, largest = 0;
    for (int i = 0; i < zero->muon->n_matrices; i++) {
        size_t bytes = zero->muon->matrices[i].bytes;
        largest = bytes > largest ? bytes : largest;
    }
    limit = limit > largest ? limit : largest;
    CHECK(zero->muon->gathered_bytes <= limit && zero->muon->message_bytes <= limit);
    l->state_bytes = dt_zero_state_bytes(zero);
    l->optim = dt_memory_used(ctx).live[DT_MEM_OPTIM];
}

static dt_status train(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const layout *l = j->l;
    left *out = &j->out[dt_ctx_rank(ctx)];
    dt_mesh mesh =
        dt_mesh_make(ctx, (dt_mesh_desc){ .dp = l->dp, .tp = l->tp, .ep = l->ep, .pp = l->pp });
    static const dt_param_group second = { .params = "square,pair", .optimizer = DT_MUON };
    dt_param_group group = second;
    group.momentum = j->k->momentum;
    group.weight_decay = DECAY;
    group.muon_scale = j->k->scale;
    group.no_nesterov = j->k->no_nesterov;
    register_params(ctx, j, &mesh);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh,
                                          .stage = l->stage,
                                          .shard_group = l->shard_group,
                                          .bucket_bytes = l->bucket_bytes,
                                          .tree = l->tree,
                                          .optimizer = DT_MUON,
                                          .beta1 = BETA1,
                                          .beta2 = BETA2,
                                          .eps = EPS,
                                          .momentum = j->k->momentum,
                                          .weight_decay = DECAY,
                                          .clip = j->k->clip,
                                          .muon_scale = j->k->scale,
                                          .no_nesterov = j->k->no_nesterov,
                                          .compare_every = 1,
                                          .groups = &group,
                                          .group_count = j->skip_step > 0 });
    if (!zero) return dt_error(ctx);
    dt_checkpoint *c =
        j->save ? dt_checkpoint_open(zero, (dt_checkpoint_desc){ .dir = j->save }) : NULL;
    if (j->from > 1)
        CHECK(dt_checkpoint_load(c, j->save) == j->from - 1);
    else
        write_start(ctx);
    for (int step = j->from; step <= j->to && dt_error(ctx) == DT_OK; step++) {
        size_t sent = dt_comm_bytes(ctx, DT_AXIS_DP);
        double lr[2] = { step == j->skip_step ? -1 : 0.004 * step, 0.004 * step };
        if (step == j->freeze_step) dt_zero_freeze(zero, "wide", 1);
        dt_backward(pull(ctx, &mesh, step));
        dt_reset(ctx);
        out->norm[step - 1] = dt_zero_step_groups(zero, lr).grad_norm;
        out->comm_bytes = dt_comm_bytes(ctx, DT_AXIS_DP) - sent;
    }
    if (c && j->from == 1) dt_checkpoint_save(c);
    if (c) dt_checkpoint_close(c);
    store_results(ctx, j, zero, out);
    return dt_error(ctx);
}

static job job_of(const layout *l, const kind *k, dt_dtype dtype) {
    job j = { .l = l, .k = k, .dtype = dtype, .from = 1, .to = STEPS };
    j.out = (left *)mmap(
        NULL, RANKS * sizeof(left), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return j;
}

static int ranks_of(const layout *l) { return l->dp * l->tp * l->ep * l->pp; }
static void job_run(job *j) { run_well_on(j->l->procs, ranks_of(j->l), train, j); }
static void job_free(job *j) { munmap(j->out, RANKS * sizeof(left)); }

// ==== 2. Against the stored steps, and against one rank =========================================

/* Compares what all ranks have with `right`. Each element must be on one rank at least. tol 0:
   equal bits. A 16-bit value is rounded from an f32 master weight: `round` is added for values. */
static void compare(const char *name, const job *j, int what, int p, const double *right,
    double tol, double round) {
    int64_t n = dt_count(params[p].full), wrong = 0, found = 0;
    double worst = 0;
    for (int64_t e = 0; e < n; e++) {
        int have = 0;
        for (int r = 0; r < ranks_of(j->l); r++) {
            double got = j->out[r].x[what][p][e], off = fabs(got - right[e]),
                   allowed = tol * fmax(1, fabs(right[e])) + (what ? 0 : round * fabs(right[e]));
            if (isnan(got)) continue;
            have = 1;
            worst = fmax(worst, off);
            wrong += tol == 0 ? memcmp(&got, &right[e], sizeof got) != 0 : !(off <= allowed);
        }
        found += have;
    }
    CHECK_MSG(found == n, "%s, %s, array %d: %lld of %lld elements of %s", name, j->l->name, what,
        (long long)found, (long long)n, params[p].name);
    CHECK_MSG(wrong == 0, "%s, %s, %s: %lld elements of array %d of %s differ, by at most %.2e",
        name, j->l->name, dt_dtype_name(j->dtype), (long long)wrong, what, params[p].name, worst);
}

static void check_golden(const golden *g, const job *j) {
    static const char *const names[WHAT] = { "p", "m", "v" };
    /* the orthogonalized momentum of a small singular value magnifies rounding errors up to 500
       times */
    double tol = j->dtype == DT_F64 ? 1e-12 : 2e-5, round = j->dtype == DT_BF16 ? 0.004 : 0;
    char text[64];
    snprintf(text, sizeof text, "%s.norm", j->k->name);
    const double *norm = golden_get(g, text, NULL);
    for (int r = 0; r < ranks_of(j->l) && CHECK(norm); r++)
        for (int n = 0; n < STEPS; n++)
            CHECK_MSG(fabs(j->out[r].norm[n] - norm[n]) <= tol * norm[n], "%s: norm %g, not %g",
                j->l->name, j->out[r].norm[n], norm[n]);
    for (int p = 0; p < PARAMS; p++)
        for (int w = 0; w < (p == VECTOR ? 3 : 2); w++) {
            int64_t n = 0;
            snprintf(text, sizeof text, "%s.%s.%s", j->k->name, params[p].name, names[w]);
            const double *right = golden_get(g, text, &n);
            if (CHECK(right && n == dt_count(params[p].full)))
                compare("golden", j, w, p, right, tol, round);
        }
}

static void check_like(const char *name, const job *j, const left *right) {
    for (int p = 0; p < PARAMS; p++)
        for (int w = 0; w < (p == VECTOR ? 3 : 2); w++)
            compare(name, j, w, p, right->x[w][p], 0, 0);
    for (int r = 0; r < ranks_of(j->l); r++) {
        const left *l = &j->out[r];
        CHECK_MSG(l->strays == 0, "%s: %d elements of padding are not 0", j->l->name, l->strays);
        CHECK_MSG(l->state_bytes == l->formula && l->optim == l->formula,
            "%s: %zu and %zu bytes, formula %zu", j->l->name, l->state_bytes, l->optim, l->formula);
    }
}

/* Every layout has the stored results, and without clipping, whose norm is summed in another order
   over tp and pp, one rank's bits. */
static void test_layouts(const char *folder) {
    static const dt_dtype types[] = { DT_F64, DT_F32, DT_BF16 };
    char path[400];
    snprintf(path, sizeof path, "%s/muon.bin", folder);
    golden *g = golden_open(path);
    if (!CHECK_MSG(g, "%s cannot be used", path)) return;
    for (int t = 0; t < 3; t++) {
        job one = job_of(&layouts[0], &kinds[0], types[t]);
        job_run(&one);
        for (int i = 0; i < LAYOUTS; i++) {
            job j = job_of(&layouts[i], &kinds[0], types[t]);
            job_run(&j);
            check_golden(g, &j);
            check_like("one rank", &j, &one.out[0]);
            job_free(&j);
        }
        job_free(&one);
    }
    for (int i = 0; i < LAYOUTS; i += 3) {
        job j = job_of(&layouts[i], &kinds[1], DT_F64);
        job_run(&j);
        check_golden(g, &j);
        job_free(&j);
    }
    golden_free(g);
}

/* At ZeRO 0 the ranks share the matrices: each sends only the results of its own. */
static void test_traffic(void) {
    job j = job_of(&layouts[2], &kinds[0], DT_F32);
    job_run(&j);
    size_t padded = 0, matrices = 0, vectors = 0, sent = 0;
    for (int p = 0; p < PARAMS; p++)
        *(p == VECTOR ? &vectors : &matrices) += (size_t)dt_count(params[p].full);
    /* `tall` | `vector` | the others: three buckets, of multiples of 2 * 1,024 elements */
    padded = 4096 + 2048 + 4096;
    for (int r = 0; r < 2; r++) sent += j.out[r].comm_bytes;
    CHECK_MSG(sent == 2 * padded * 4 + matrices * 4, "%zu bytes, not %zu", sent,
        2 * padded * 4 + matrices * 4);
    job_free(&j);
}

// ==== 3. Groups, checkpoints, errors ============================================================

/* A parameter group that does not step, or a parameter that is frozen, keeps its matrices and
   momentum; the others do not notice. */
static void test_group_steps(void) {
    static const layout two[] = { { "one rank", 1, 1, 1, 1, 0, 0, 0, 0, 0 },
        { "dp 2, ZeRO-1", 2, 1, 1, 1, 1, 0, 0, 0, 0 }, { "tp 2", 1, 2, 1, 1, 0, 0, 0, 0, 0 } };
    job all = job_of(&two[0], &kinds[0], DT_F32), none = job_of(&two[0], &kinds[0], DT_F32);
    none.to = STEPS - 1;
    job_run(&all);
    job_run(&none);
    for (int i = 0; i < 6; i++) {
        job j = job_of(&two[i % 3], &kinds[0], DT_F32);
        int freezes = i / 3;
        *(freezes ? &j.freeze_step : &j.skip_step) = STEPS;
        job_run(&j);
        for (int p = 0; p < PARAMS; p++) {
            int second =
                    strcmp(params[p].name, "square") == 0 || strcmp(params[p].name, "pair") == 0,
                steps = freezes ? strcmp(params[p].name, "wide") != 0 : second;
            for (int w = 0; w < 2; w++)
                compare(freezes ? "frozen" : "a group", &j, w, p,
                    (steps ? &all : &none)->out[0].x[w][p], 0, 0);
        }
        job_free(&j);
    }
    job_free(&all);
    job_free(&none);
}

/* The momentum is saved and loaded in any layout. */
static void test_checkpoints(void) {
    static const int pairs[][2] = { { 0, 5 }, { 11, 8 }, { 6, 10 }, { 14, 17 }, { 16, 15 } };
    for (int t = 0; t < 2; t++) {
        dt_dtype type = t ? DT_BF16 : DT_F32;
        job one = job_of(&layouts[0], &kinds[0], type);
        job_run(&one);
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
            char folder[] = "/tmp/dt-muon-XXXXXX", command[64];
            job a = job_of(&layouts[pairs[i][0]], &kinds[0], type),
                b = job_of(&layouts[pairs[i][1]], &kinds[0], type);
            if (!CHECK(mkdtemp(folder))) return;
            a.save = b.save = folder;
            a.to = 3;
            b.from = 4;
            job_run(&a);
            job_run(&b);
            check_like("a checkpoint", &b, &one.out[0]);
            snprintf(command, sizeof command, "rm -r %s", folder);
            CHECK(system(command) == 0);
            job_free(&a);
            job_free(&b);
        }
        job_free(&one);
    }
}

enum { OFFLOADED, BAD_MOMENTUM, BAD_SCALE, BAD_MATRICES, MISSING, UNLIKE, REFUSALS };
static const struct {
    dt_status status;
    const char *says;
} refusals[REFUSALS] = {
    { DT_ERR_UNSUPPORTED, "DT_MUON orthogonalizes whole matrices" },
    { DT_ERR_ARG, "DT_MUON with momentum 1 " },
    { DT_ERR_ARG, "muon_scale 2" },
    { DT_ERR_ARG, "2 dimensions of (2,3,4) count matrices" },
    { DT_ERR_UNSUPPORTED, "hold 6 elements of a matrix (6,2) of w" },
    { DT_ERR_COMM, "Muon's scale 1" },
};

static dt_status refused(dt_ctx *ctx, void *user) {
    int what = *(const int *)user;
    dt_zero_desc d = { .optimizer = DT_MUON };
    dt_param_desc p = { .dtype = DT_F32 };
    if (what == OFFLOADED) d.offload_optim = "cpu";
    if (what == BAD_MOMENTUM) d.momentum = 1;
    if (what == BAD_SCALE) d.muon_scale = 2;
    if (what == BAD_MATRICES) p.matrices = 2;
    if (what == UNLIKE) d.muon_scale = dt_ctx_rank(ctx) == 1;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .pp = what == MISSING ? 2 : 1 });
    d.mesh = &mesh;
    /* sharded over the stages of a pipeline: no stage holds the whole matrix */
    if (what == MISSING) p.shards[0] = (dt_shard_spec){ mesh.pp, 0 };
    dt_param_at(ctx, "w", what == MISSING ? DT_SHAPE(6, 2) : DT_SHAPE(2, 3, 4), DT_ONES, p);
    CHECK(dt_zero_make(ctx, d) == NULL);
    return dt_error(ctx);
}

static void test_refusals(void) {
    for (int what = 0; what < REFUSALS; what++) {
        outcome o;
        run(&o, 2, refused, &what);
        CHECK_MSG(o.status == refusals[what].status && strstr(o.report.text, refusals[what].says),
            "%d: %s: %s", what, dt_status_name(o.status), o.report.text);
    }
}

/* A parameter that is marked no_decay, here a bias of 2 dimensions, is no matrix: AdamW's first
   step moves each element by the learning rate, without weight decay. */
static dt_status bias_main(dt_ctx *ctx, void *user) {
    (void)user;
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4, 6), DT_ONES),
              *b = dt_param_at(ctx, "b", DT_SHAPE(4, 6), DT_ONES, (dt_param_desc){ .no_decay = 1 });
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .optimizer = DT_MUON, .weight_decay = 0.5 });
    float x[24], moment[24];
    dt_backward(dt_sum_over(dt_mul(w, b), DT_ALL));
    dt_zero_step(zero, 0.125);
    CHECK(dt_read(b, x) == DT_OK && dt_zero_state(zero, 1, b, moment) == DT_OK);
    for (int i = 0; i < 24; i++)
        CHECK_MSG(fabs(x[i] - 0.875) < 1e-6 && moment[i] > 0, "b is %.9g", x[i]);
    CHECK(w->param->by_matrix && !b->param->by_matrix);
    return DT_OK;
}

static void test_bias(void) {
    outcome o;
    run(&o, 1, bias_main, NULL);
    CHECK_MSG(o.status == DT_OK, "%s", o.report.text);
}

/* Whichever allocation is refused, every rank fails and frees all memory. */
static void test_memory_refused(void) {
    for (long at = 1, done = 0; !done && at < 500; at++) {
        job j = job_of(&layouts[5], &kinds[0], DT_F32);
        outcome o;
        j.to = 1;
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
    test_layouts(argc > 1 ? argv[1] : "tests/golden");
    test_traffic();
    test_group_steps();
    test_checkpoints();
    test_bias();
    test_refusals();
    test_memory_refused();
    return check_done("test_muon");
}
