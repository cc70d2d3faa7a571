/* test_grad_dtype.c - 16-bit gradients (dt_zero_desc.grad_dtype): their sums over micro-batches and
   ranks against sums computed here, the update, memory and traffic, offload, refusals

   Two ops with known gradients make any set of parameters trainable without a model. Each gradient
   is a bf16 number, as ops on bf16 parameters give it; the sum of the two has more digits, so it
   must be rounded before it is added to others or sent. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/comm/ranks.h"

enum { PARAMS = 3, RANKS = 4, STEPS = 3, ROOM = 3000, BIG = 2100 };
/* `plain` is f32: grad_dtype is for parameters of its own type only */
static const struct made {
    const char *name;
    dt_shape full;
    int is_f32;
} params[PARAMS] = { { "matrix", { 2, { 70, 40 } }, 0 }, { "plain", { 1, { 37 } }, 1 },
    { "vector", { 1, { 1111 } }, 0 } };

/* What one rank has after the last step. */
typedef struct left {
    float grad[PARAMS][ROOM];                        /* of the last step, from dt_zero_grad */
    float before[PARAMS][ROOM], after[PARAMS][ROOM]; /* weights: f32, or master weights */
    double values[PARAMS][ROOM], state[2][PARAMS][ROOM];
    size_t grads, total, sent, parameters, state_bytes;
    int skipped;
} left;

typedef struct job {
    int ranks, micros, procs, steps;
    dt_dtype dtype;
    dt_zero_desc zero;
    double factor; /* of all gradients */
    int odd_rank;  /* this rank, if > 0, passes another grad_dtype */
    left out[RANKS];
} job;

// ==== 1. Gradients and their sums ===============================================================

static double mixed(uint32_t key, uint32_t e) {
    uint32_t h = key * 2654435761u + e * 2246822519u + 374761393u;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    h ^= h >> 16;
    return (double)(h >> 12) / 1048576.0;
}

static float round_to(dt_dtype dtype, double x) {
    double room;
    dt__set_number(dtype, &room, 0, x);
    return (float)dt__number(dtype, &room, 0);
}

/* The gradient that op `op` (0 or 1) gives element e of parameter p. leaf: number of the
   micro-batch in the step, counted over all ranks. */
static double op_gradient(const job *j, int op, int p, int64_t e, int step, int leaf) {
    dt_dtype dtype = params[p].is_f32 ? DT_F32 : j->dtype;
    double x = mixed((uint32_t)(((step * 16 + leaf) * 4 + p) * 2 + op), (uint32_t)e) - 0.5;
    return round_to(dtype, x * j->factor * (op ? 0.01 : 1));
}

/* The gradient of one micro-batch, which is f32. */
static float micro_gradient(const job *j, int p, int64_t e, int step, int leaf) {
    return (float)op_gradient(j, 0, p, e, step, leaf) + (float)op_gradient(j, 1, p, e, step, leaf);
}

static dt_dtype sum_type(const job *j, int p) {
    return params[p].is_f32 || !j->zero.grad_dtype ? DT_F32 : j->zero.grad_dtype;
}

/* The sum over ranks [from, to) in rank order, rounded once. */
static float rank_sum(const job *j, int p, const float *x, int from, int to) {
    float sum = x[from];
    for (int r = from + 1; r < to; r++) sum += x[r];
    return round_to(sum_type(j, p), sum);
}

/* The gradient of a step by the rules of dt_zero_desc.grad_dtype, for the element e of p. Stages 0
   and 1 add micro-batches first, stages 2 and 3 ranks; HSDP adds the ranks of a shard group first,
   then the groups. */
static float step_gradient(const job *j, int p, int64_t e, int step) {
    dt_dtype type = sum_type(j, p);
    int N = j->ranks, n = j->zero.shard_group && j->zero.stage ? j->zero.shard_group : N;
    float leaf[RANKS], sum[RANKS] = { 0 };
    if (j->zero.tree) { /* the tree of 4 leaves */
        for (int m = 0; m < 4; m++) leaf[m] = round_to(type, micro_gradient(j, p, e, step, m));
        leaf[0] = round_to(type, leaf[0] + leaf[1]);
        leaf[2] = round_to(type, leaf[2] + leaf[3]);
        return round_to(type, leaf[0] + leaf[2]);
    }
    for (int m = 0; m < j->micros; m++) {
        for (int r = 0; r < N; r++)
            leaf[r] = round_to(type, micro_gradient(j, p, e, step, m * N + r));
        for (int r = 0; r < N; r++) {
            float term = leaf[r];
            if (j->zero.stage >= 2) term = rank_sum(j, p, leaf, r / n * n, r / n * n + n);
            sum[r] = m ? round_to(type, sum[r] + term) : term;
        }
    }
    if (j->zero.stage < 2) /* the sums of the groups, one for each rank */
        for (int g = 0; g < N / n; g++) {
            float total = rank_sum(j, p, sum, g * n, g * n + n);
            for (int r = 0; r < n; r++) sum[g * n + r] = total;
        }
    for (int g = 0; g < N / n; g++) sum[g] = sum[g * n];
    return rank_sum(j, p, sum, 0, N / n);
}

typedef struct pulled {
    const job *j;
    int op, step, leaf;
} pulled;

static dt_status pull_back(dt_node *n) {
    const pulled *s = (const pulled *)n->saved;
    dt_tensor *t = n->in[0];
    int p = t->param->index;
    void *g = dt_wants(n, 0) ? dt_grad(n, 0) : NULL;
    for (size_t e = 0; g && e < t->param->count; e++)
        dt__set_number(t->dtype, g, e,
            dt__number(t->dtype, g, e) + op_gradient(s->j, s->op, p, (int64_t)e, s->step, s->leaf));
    return DT_OK;
}

static dt_tensor *pull(dt_ctx *ctx, const job *j, int step, int leaf) {
    dt_tensor *sum = NULL;
    for (int i = 0; i < 2 * dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i / 2), *out = dt_new(ctx, DT_F64, DT_SCALAR);
        if (!out || !dt_data(t)) return NULL;
        *(double *)out->data = 0;
        pulled *s = (pulled *)dt_record_saved(out, (dt_record_desc){ .name = "pull",
                                                       .in = { t },
                                                       .backward = pull_back,
                                                       .saved_bytes = sizeof(pulled) });
        if (s) *s = (pulled){ j, i % 2, step, leaf };
        sum = sum ? dt_add(sum, out) : out;
    }
    return sum;
}

// ==== 2. Runs ===================================================================================

static void register_params(dt_ctx *ctx, const job *j) {
    for (int i = 0; i < PARAMS; i++)
        dt_param_at(ctx, params[i].name, params[i].full, DT_NORMAL(1),
            (dt_param_desc){ .dtype = params[i].is_f32 ? DT_F32 : j->dtype });
}

/* Copies the f32 weights of a parameter. */
static void weights(dt_zero *zero, dt_tensor *t, float *to) {
    if (t->dtype == DT_F32)
        dt_read(t, to);
    else
        dt_zero_state(zero, DT_STATE_MASTER, t, to);
}

static void store_end(dt_ctx *ctx, dt_zero *zero, left *out) {
    for (int p = 0; p < PARAMS; p++) {
        dt_tensor *t = dt_param_get(ctx, p);
        float host[ROOM];
        weights(zero, t, out->after[p]);
        dt_read(t, host);
        for (size_t e = 0; e < t->param->count; e++)
            out->values[p][e] = dt__number(t->dtype, host, e);
        for (int s = 0; s < zero->buckets[t->param->bucket->index].states; s++) {
            dt_zero_state(zero, s, t, host);
            for (size_t e = 0; e < t->param->count; e++) out->state[s][p][e] = host[e];
        }
    }
    dt_memory m = dt_memory_used(ctx);
    out->grads = m.live[DT_MEM_GRADS];
    out->parameters = m.live[DT_MEM_PARAMS];
    out->state_bytes = m.live[DT_MEM_OPTIM];
}

static dt_status train(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    int rank = dt_ctx_rank(ctx), skipped = 0;
    left *out = &j->out[rank];
    dt_zero_desc d = j->zero;
    if (j->odd_rank > 0 && rank == j->odd_rank) d.grad_dtype = DT_F32;
    register_params(ctx, j);
    dt_zero *zero = dt_zero_make(ctx, d);
    for (int step = 1; step <= j->steps && zero && dt_error(ctx) == DT_OK; step++) {
        for (int p = 0; p < PARAMS && dt_zero_group_steps(zero, 0) > 0; p++)
            weights(zero, dt_param_get(ctx, p), out->before[p]);
        size_t sent = dt_comm_bytes(ctx, DT_AXIS_DP);
        for (int m = 0; m < j->micros; m++) {
            dt_micro(ctx, m, j->micros);
            dt_backward(pull(ctx, j, step, m * j->ranks + rank));
            dt_reset(ctx);
        }
        out->sent = dt_comm_bytes(ctx, DT_AXIS_DP) - sent;
        for (int p = 0; p < PARAMS; p++) {
            dt_tensor *t = dt_param_get(ctx, p);
            int whole = (d.stage < 2 || j->ranks == 1) && (params[p].is_f32 || !d.grad_dtype);
            CHECK_MSG((t->grad != NULL) == whole, "t->grad of %s", t->name);
            dt_zero_grad(zero, t, out->grad[p]);
        }
        sent = dt_comm_bytes(ctx, DT_AXIS_DP);
        skipped += dt_zero_step(zero, 0.5).skipped;
        out->sent += dt_comm_bytes(ctx, DT_AXIS_DP) - sent;
    }
    out->skipped = skipped;
    if (dt_zero_group_steps(zero, 0) > 0 && dt_error(ctx) == DT_OK) store_end(ctx, zero, out);
    return dt_error(ctx);
}

static job *job_new(int ranks, int micros, dt_zero_desc zero) {
    job *j =
        (job *)mmap(NULL, sizeof(job), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    j->ranks = ranks;
    j->micros = micros;
    j->steps = STEPS;
    j->dtype = DT_BF16;
    j->factor = 1;
    j->zero = zero;
    return j;
}

static void job_free(job *j) { munmap(j, sizeof(job)); }

static dt_zero_desc sgd(int stage, int shard_group, int tree) {
    return (dt_zero_desc){ .stage = stage,
        .shard_group = shard_group,
        .optimizer = DT_SGD,
        .grad_dtype = DT_BF16,
        .tree = tree,
        .compare_every = 1 };
}

// ==== 3. Sums and the update ====================================================================

/* Every rank has the gradient that step_gradient computes, with equal bits. SGD then subtracts half
   of it from the f32 weight: the product is exact, so the result is one rounded subtraction. */
static void check_sums(const job *j) {
    int wrong = 0, moved = 0, of_f32 = 0;
    for (int r = 0; r < j->ranks; r++)
        for (int p = 0; p < PARAMS; p++)
            for (int64_t e = 0; e < dt_count(params[p].full); e++) {
                const left *out = &j->out[r];
                float want = step_gradient(j, p, e, j->steps);
                wrong += out->grad[p][e] != want;
                moved += out->after[p][e] != out->before[p][e] - 0.5f * want;
                of_f32 += round_to(DT_BF16, want) != want;
                moved +=
                    out->values[p][e] !=
                    (params[p].is_f32 ? out->after[p][e] : round_to(j->dtype, out->after[p][e]));
            }
    CHECK_MSG(wrong == 0 && moved == 0,
        "stage %d, %d ranks, groups of %d, %d micro-batches, tree %d: %d gradients and %d weights "
        "are wrong",
        j->zero.stage, j->ranks, j->zero.shard_group, j->micros, j->zero.tree, wrong, moved);
    CHECK(of_f32 > 0); /* those of the f32 parameter keep their digits */
}

static void test_sums(void) {
    static const int cases[][4] = { /* ranks, micro-batches, shard group, processes */
        { 1, 1, 0, 0 }, { 1, 3, 0, 0 }, { 2, 1, 0, 1 }, { 3, 2, 0, 0 }, { 4, 2, 2, 0 }
    };
    for (int i = 0; i < 5; i++)
        for (int stage = 0; stage <= 3; stage++) {
            const int *c = cases[i];
            job *j = job_new(c[0], c[1], sgd(stage, c[2], 0));
            run_well_on(c[3], c[0], train, j);
            check_sums(j);
            job_free(j);
        }
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int stage = 0; stage <= 3; stage++) {
            job *j = job_new(ranks, 4 / ranks, sgd(stage, 0, 1));
            run_well_on(0, ranks, train, j);
            check_sums(j);
            job_free(j);
        }
}

// ==== 4. Memory, traffic, offload ===============================================================

/* Bytes and traffic follow the formula with G = 2: with Adam 16 bytes for each bf16 element. The
   buckets are matrix, plain, vector. */
static dt_zero_bytes formula(const job *j, int p) {
    size_t pad = (size_t)DT_PIECE * (size_t)j->ranks,
           count = ((size_t)dt_count(params[p].full) + pad - 1) / pad * pad;
    return dt_zero_formula((dt_zero_formula_desc){ .elements = (double)count,
        .stage = j->zero.stage,
        .ranks = j->ranks,
        .micros = j->micros,
        .keep_gathered = 1,
        .values = params[p].is_f32 ? 4 : 2,
        .grads = params[p].is_f32 ? 4 : 2,
        .state = params[p].is_f32 ? 8 : 12 });
}

static void test_memory(void) {
    for (int stage = 0; stage <= 3; stage++) {
        job *j = job_new(2, 2, sgd(stage, 0, 0));
        double params_bytes = 0, grads = 0, optim = 0, sent = 0;
        j->zero.optimizer = DT_ADAMW;
        j->zero.keep_gathered = 1;
        run_well_on(0, 2, train, j);
        for (int p = 0; p < PARAMS; p++) {
            dt_zero_bytes b = formula(j, p);
            params_bytes += b.params;
            grads += b.grads;
            optim += b.optim;
            sent += b.sent;
        }
        const left *out = &j->out[1];
        CHECK_MSG((double)out->grads == grads && (double)out->parameters == params_bytes &&
                      (double)out->state_bytes == optim && (double)out->sent == sent,
            "stage %d: %zu, %zu, %zu bytes and %zu sent; the formula gives %g, %g, %g, %g", stage,
            out->parameters, out->grads, out->state_bytes, out->sent, params_bytes, grads, optim,
            sent);
        job_free(j);
    }
}

static int differences(const job *a, const job *b) {
    int n = 0;
    for (int r = 0; r < a->ranks; r++)
        for (int p = 0; p < PARAMS; p++)
            for (int64_t e = 0; e < dt_count(params[p].full); e++)
                n += a->out[r].after[p][e] != b->out[r].after[p][e] ||
                     a->out[r].values[p][e] != b->out[r].values[p][e] ||
                     a->out[r].state[0][p][e] != b->out[r].state[0][p][e] ||
                     a->out[r].state[1][p][e] != b->out[r].state[1][p][e] ||
                     a->out[r].grad[p][e] != b->out[r].grad[p][e];
    return n;
}

/* Offload changes no bit, wherever state, parameters and gradients are. */
static void test_offload(void) {
    char folder[] = "/tmp/dt_test_grad_dtype.XXXXXX";
    if (!CHECK(mkdtemp(folder) != NULL)) return;
    const char *places[3] = { NULL, "cpu", folder };
    job *base[4];
    for (int stage = 0; stage <= 3; stage++) {
        base[stage] = job_new(2, 2, sgd(stage, 0, 0));
        base[stage]->zero.optimizer = DT_ADAMW;
        base[stage]->zero.ema_decay = 0.9;
        run_well_on(0, 2, train, base[stage]);
        for (int optim = 0; optim < 3; optim++)
            for (int values = 0; values < (stage == 3 ? 3 : 1); values++) {
                job *j = job_new(2, 2, base[stage]->zero);
                j->zero.offload_optim = places[optim];
                j->zero.offload_params = places[values];
                j->zero.offload_chunk = 500;
                if (optim || values) run_well_on(0, 2, train, j);
                CHECK_MSG((!optim && !values) || differences(base[stage], j) == 0,
                    "stage %d, state %d, parameters %d: %d elements differ", stage, optim, values,
                    differences(base[stage], j));
                job_free(j);
            }
    }
    CHECK(differences(base[0], base[1]) == 0 && differences(base[2], base[3]) == 0);
    for (int stage = 0; stage <= 3; stage++) job_free(base[stage]);
    CHECK(rmdir(folder) == 0); /* the ranks have removed their files */
}

/* An update in several pieces of f32 gradients gives the bits of ZeRO-2, whose shards need one. */
typedef struct big_job {
    int stage;
    double sum[2]; /* of weights times their index, on each rank */
} big_job;

static dt_status big_main(dt_ctx *ctx, void *user) {
    big_job *j = (big_job *)user;
    dt_tensor *w = dt_param_at(
        ctx, "w", DT_SHAPE(BIG, BIG), DT_NORMAL(0.1), (dt_param_desc){ .dtype = DT_BF16 });
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = j->stage, .grad_dtype = DT_BF16 });
    size_t count = (size_t)BIG * BIG;
    uint16_t *x = (uint16_t *)malloc(BIG * sizeof *x), *host = (uint16_t *)malloc(count * 2);
    for (int i = 0; i < BIG; i++) x[i] = dt__f32_to_bf16((float)mixed(7, (uint32_t)i) - 0.5f);
    dt_tensor *y = dt_linear(dt_input(ctx, DT_BF16, DT_SHAPE(1, BIG), x), w, NULL);
    dt_backward(dt_mse(y, dt_input(ctx, DT_BF16, DT_SHAPE(1, BIG), x), BIG));
    dt_zero_step(zero, 0.5);
    dt_reset(ctx);
    if (dt_read(w, host) == DT_OK)
        for (size_t i = 0; i < count; i++)
            j->sum[dt_ctx_rank(ctx)] += dt__number(DT_BF16, host, i) * (double)(i % 1013);
    free(x);
    free(host);
    return dt_error(ctx);
}

static void test_pieces(void) {
    big_job whole = { 0, { 0, 0 } }, shards = { 2, { 0, 0 } };
    run_well_on(0, 2, big_main, &whole);
    run_well_on(0, 2, big_main, &shards);
    CHECK(whole.sum[0] != 0 && whole.sum[0] == shards.sum[0] && whole.sum[0] == whole.sum[1]);
}

// ==== 5. Overflow and refusals ==================================================================

/* A gradient that f16 cannot hold makes a step be skipped, though f32 could hold it. */
static void test_overflow(void) {
    for (int type = 0; type < 2; type++) {
        job *j = job_new(2, 1, sgd(1, 0, 0));
        j->dtype = DT_F16;
        j->zero.grad_dtype = type ? DT_F16 : DT_F32;
        j->zero.loss_scale = DT_SCALE_DYNAMIC;
        j->factor = 1.2e5; /* up to 60,000 on each rank, and more than 65,504 on both */
        run_well_on(0, 2, train, j);
        CHECK_MSG(j->out[0].skipped == (type ? STEPS : 0) && j->out[1].skipped == j->out[0].skipped,
            "%d steps were skipped", j->out[0].skipped);
        job_free(j);
    }
}

static dt_status make_main(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    register_params(ctx, j);
    dt_zero_make(ctx, j->zero);
    return dt_error(ctx);
}

static void test_refusals(void) {
    static const dt_param_group muon = { .params = "matrix", .optimizer = DT_MUON };
    static const struct {
        dt_zero_desc zero;
        dt_status status;
        const char *text;
    } cases[] = {
        { { .optimizer = DT_MUON, .grad_dtype = DT_BF16 }, DT_ERR_UNSUPPORTED, "DT_MUON" },
        { { .optimizer = DT_ONEBIT_ADAM, .freeze_steps = 3, .grad_dtype = DT_BF16 },
            DT_ERR_UNSUPPORTED, "DT_ONEBIT_ADAM" },
        { { .grad_dtype = DT_BF16, .groups = &muon, .group_count = 1 }, DT_ERR_UNSUPPORTED,
            "DT_MUON" },
        { { .grad_dtype = DT_F64 }, DT_ERR_ARG, "f64" },
        { { .grad_dtype = DT_U8 }, DT_ERR_ARG, "u8" },
        { { .grad_dtype = DT_F16 }, DT_ERR_ARG, "no trained parameter has this type" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        job *j = job_new(1, 1, cases[i].zero);
        outcome o;
        dt_status status = run(&o, 1, make_main, j);
        CHECK_MSG(status == cases[i].status && strstr(o.text[0], cases[i].text) &&
                      strstr(o.text[0], "grad_dtype"),
            "case %zu: status %d, %s", i, (int)status, o.text[0]);
        job_free(j);
    }
    job *j = job_new(2, 1, sgd(1, 0, 0));
    j->odd_rank = 1;
    outcome o;
    CHECK_MSG(run(&o, 2, train, j) == DT_ERR_COMM, "another type on rank 1: %d, %s", (int)o.status,
        o.text[0]);
    job_free(j);
}

int main(void) {
    test_sums();
    test_memory();
    test_offload();
    test_pieces();
    test_overflow();
    test_refusals();
    return check_done("test_grad_dtype");
}
