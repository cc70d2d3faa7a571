/* test_ps.c - the parameter server of dt_zero.h against data parallelism

   The oracle of synchronous training is data parallelism: the same model with dt_embedding, dense
   parameters and ZeRO-0, whose custom optimizers state Adagrad and FTRL by themselves. All rows must
   agree in every bit, for any number of workers and servers, owned and served, threads and
   processes. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include <sys/wait.h>

enum { ROWS = 40, WIDTH = 5, BATCH = 6, SLOTS = 3, STEPS = 5, MAX_WORKERS = 4 };
enum { HIDDEN = 420, DENSE = WIDTH * HIDDEN }; /* a dense parameter of three runs */

typedef struct training {
    int workers, servers; /* servers < 0: the oracle */
    int mode, staleness;
    int optimizer, micros, twice; /* twice: two lookups of the table in each micro-batch */
    int steps[MAX_WORKERS];       /* of each worker */
    int delays;                   /* 1: random sleeps between steps */
    int dense;                    /* 1: also two dense parameters and a bias */
    int disjoint;                 /* 1: no key belongs to two workers */
    int prefetch;                 /* 1: each step prefetches for the next one */
    int geo_steps;
    double geo_scale;
    float server_rows[ROWS * WIDTH]; /* of the only server, when all workers have ended */
    float rows[ROWS * WIDTH];        /* the result */
    float weights[2 * DENSE + HIDDEN];
    dt_ps_stats stats[MAX_WORKERS], server;
} training;

static void no_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* Keys of one lookup: skewed, so that they repeat within a batch and between workers. */
static void draw_keys(
    const training *t, uint64_t *keys, int32_t *ids, int worker, int step, int micro, int lookup) {
    uint32_t x = (uint32_t)(worker * 7919 + step * 104729 + micro * 1299709 + lookup * 611953 + 1);
    for (int i = 0; i < BATCH * SLOTS; i++) {
        x = x * 1664525u + 1013904223u;
        int k = (int)((x >> 16) % ROWS);
        ids[i] = k % 3 ? k : k % 7;
        if (t->disjoint) ids[i] = ids[i] / t->workers * t->workers + worker;
        if (ids[i] >= ROWS) ids[i] -= t->workers;
        keys[i] = (uint64_t)ids[i];
    }
}

/* ---- the optimizers of the oracle ---- */

static dt_status update(const dt_update_args *a, void *user) {
    int kind = *(const int *)user;
    float *w = (float *)a->param, *s = (float *)a->state[0], *n = (float *)a->state[1];
    const float *grad = (const float *)a->grad, lr = (float)a->lr;
    for (size_t i = 0; i < a->count; i++) {
        volatile float g = grad[i], g2 = g * g; /* volatile: no contraction of a product and sum */
        if (kind == DT_TABLE_ADAGRAD) {
            volatile float step;
            s[i] += g2;
            step = lr * (g / (sqrtf(s[i]) + 1e-8f));
            w[i] -= step;
        } else {
            volatile float more = n[i] + g2, sigma = (sqrtf(more) - sqrtf(n[i])) / lr, shift;
            shift = sigma * w[i];
            shift = g - shift;
            s[i] += shift;
            n[i] = more;
            float size = fabsf(s[i]);
            volatile float slope = (1.0f + sqrtf(more)) / lr + 0.01f;
            w[i] = size <= 0.002f ? 0 : (s[i] < 0 ? size - 0.002f : 0.002f - size) / slope;
        }
    }
    return DT_OK;
}

static dt_table_desc table_desc(const training *t) {
    dt_table_desc d;
    memset(&d, 0, sizeof d);
    d.name = "emb";
    d.width = WIDTH;
    d.init = t->optimizer == DT_TABLE_FTRL ? DT_ZEROS : DT_NORMAL(0.5);
    d.optimizer = t->optimizer;
    d.l1 = 0.002;
    d.l2 = 0.01;
    d.ftrl_beta = 1;
    return d;
}

/* ---- the model ---- */

typedef struct model {
    training *t;
    dt_tensor *param, *dense[3];
    dt_ps *ps;
    int table, tables[3];
} model;

static const char *const dense_names[] = { "up", "bias", "down" };
static dt_shape dense_shape(int i) {
    if (i == 1) return DT_SHAPE(HIDDEN);
    return i == 0 ? DT_SHAPE(HIDDEN, WIDTH) : DT_SHAPE(WIDTH, HIDDEN);
}
static float *dense_values(training *t, int i) {
    return t->weights + (i == 0 ? 0 : i == 1 ? 2 * DENSE : DENSE);
}
static dt_init dense_init(const training *t) {
    return t->optimizer == DT_TABLE_FTRL ? DT_ZEROS : DT_NORMAL(0.3);
}

static dt_tensor *dense(const model *m, int i) {
    return m->ps ? dt_ps_dense_read(m->ps, m->tables[i]) : m->dense[i];
}

static dt_tensor *lookup(dt_ctx *ctx, const model *m, const uint64_t *keys, const int32_t *ids) {
    if (m->ps) return dt_ps_embedding(m->ps, m->table, keys, DT_SHAPE(BATCH, SLOTS));
    return dt_embedding(m->param, dt_input(ctx, DT_I32, DT_SHAPE(BATCH, SLOTS), ids));
}

static void backward(dt_ctx *ctx, const model *m, int worker, int step, int micro) {
    uint64_t keys[BATCH * SLOTS];
    int32_t ids[BATCH * SLOTS];
    float want[BATCH * SLOTS * WIDTH];
    for (int i = 0; i < BATCH * SLOTS * WIDTH; i++)
        want[i] = (float)((i * 37 + worker * 11 + step * 5 + micro * 3) % 23) / 16 - 0.6f;
    draw_keys(m->t, keys, ids, worker, step, micro, 0);
    dt_tensor *x = lookup(ctx, m, keys, ids);
    if (m->t->twice) {
        draw_keys(m->t, keys, ids, worker, step, micro, 1);
        x = dt_mul(dt_tanh(x), lookup(ctx, m, keys, ids));
    }
    if (m->t->dense && step != 2) { /* in step 2 the dense parameters have no gradients */
        dt_tensor *up = dense(m, 0), *down = dense(m, 2);
        /* the sum and the sigmoid: all gradients differ from 0 also if all weights begin with 0 */
        x = dt_add(x, dt_linear(dt_sigmoid(dt_linear(x, up, dense(m, 1))), down, NULL));
        if (m->t->twice) x = dt_add(x, dt_linear(dt_tanh(dt_linear(x, up, NULL)), down, NULL));
    }
    dt_tensor *y = dt_input(ctx, DT_F32, DT_SHAPE(BATCH, SLOTS, WIDTH), want);
    dt_backward(dt_mse(dt_tanh(x), y, 40));
}

static void sleep_some(unsigned *seed) {
    *seed = *seed * 1103515245u + 12345u;
    unsigned kind = *seed >> 16 & 3;
    if (kind > 1) usleep((*seed >> 18) % (kind == 2 ? 300 : 3000));
}

/* Prefetches for a step what its first micro-batch reads. */
static void prefetch(const model *m, int worker, int step) {
    uint64_t keys[BATCH * SLOTS];
    int32_t ids[BATCH * SLOTS];
    for (int lookup = m->t->twice; lookup >= 0; lookup--) { /* not in the order of the pulls */
        draw_keys(m->t, keys, ids, worker, step, 0, lookup);
        dt_ps_prefetch(m->ps, m->table, keys, BATCH * SLOTS);
    }
    for (int i = 0; i < 2 && m->t->dense && step != 2; i++)
        dt_ps_prefetch(m->ps, m->tables[i], NULL, 0);
}

static void steps(dt_ctx *ctx, model *m, dt_zero *zero, int worker) {
    training *t = m->t;
    unsigned seed = (unsigned)(worker + t->delays * 977);
    for (int step = 0; step < t->steps[worker]; step++) {
        if (t->delays) sleep_some(&seed);
        for (int micro = 0; micro < t->micros; micro++) {
            dt_micro(ctx, micro, t->micros);
            if (t->prefetch && micro + 1 == t->micros && step + 1 < t->steps[worker])
                prefetch(m, worker, step + 1);
            backward(ctx, m, worker, step, micro);
            dt_reset(ctx);
        }
        if (m->ps)
            dt_ps_step(m->ps, 0.1);
        else
            dt_zero_step(zero, 0.1);
    }
}

static dt_status train_dp(dt_ctx *ctx, training *t) {
    int custom = t->optimizer != DT_TABLE_SGD;
    model m;
    memset(&m, 0, sizeof m);
    m.t = t;
    m.param = dt_param(ctx, "emb", DT_SHAPE(ROWS, WIDTH), table_desc(t).init);
    for (int i = 0; i < 3 && t->dense; i++)
        m.dense[i] = dt_param(ctx, dense_names[i], dense_shape(i), dense_init(t));
    dt_zero_desc d;
    memset(&d, 0, sizeof d);
    d.optimizer = custom ? DT_OPTIMIZER_CUSTOM : DT_SGD;
    if (custom) d.update = update, d.user = &t->optimizer, d.states = 2;
    dt_zero *zero = dt_zero_make(ctx, d);
    steps(ctx, &m, zero, dt_comm_rank(dt_world(ctx)));
    if (dt_ctx_rank(ctx) == 0) dt_read(m.param, t->rows);
    for (int i = 0; i < 3 && t->dense && dt_ctx_rank(ctx) == 0; i++)
        dt_read(m.dense[i], dense_values(t, i));
    return dt_error(ctx);
}

static void read_rows(dt_ps *ps, int table, float *rows) {
    uint64_t keys[ROWS];
    for (int i = 0; i < ROWS; i++) keys[i] = (uint64_t)i;
    dt_ps_wait(ps, dt_ps_pull_start(ps, table, keys, ROWS, rows));
}

static dt_status train_ps(dt_ctx *ctx, training *t) {
    int rank = dt_ctx_rank(ctx);
    float rows[ROWS * WIDTH];
    model m;
    memset(&m, 0, sizeof m);
    m.t = t;
    m.ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = t->servers,
                               .mode = t->mode,
                               .staleness = t->staleness,
                               .geo_steps = t->geo_steps,
                               .geo_scale = t->geo_scale });
    m.table = dt_ps_table(m.ps, table_desc(t));
    for (int i = 0; i < 3 && t->dense; i++) {
        dt_table_desc d = table_desc(t);
        d.name = dense_names[i];
        d.init = dense_init(t);
        m.tables[i] = dt_ps_dense(m.ps, d, dense_shape(i));
    }
    if (dt_ps_is_server(m.ps)) {
        dt_ps_serve(m.ps);
        if (rank == t->workers) t->server = dt_ps_info(m.ps);
        uint64_t keys[ROWS];
        for (int i = 0; i < ROWS; i++) keys[i] = (uint64_t)i;
        if (t->servers == 1) dt_table_pull(dt_ps_owned(m.ps, m.table), keys, ROWS, t->server_rows);
        return dt_error(ctx);
    }
    steps(ctx, &m, NULL, rank);
    if (t->mode == DT_PS_SYNC || t->staleness == 0) read_rows(m.ps, m.table, rows);
    if (rank == 0) memcpy(t->rows, rows, sizeof rows);
    for (int i = 0; i < 3 && t->dense; i++) {
        const dt_tensor *x = dt_ps_dense_read(m.ps, m.tables[i]);
        if (rank == 0) dt_read(x, dense_values(t, i));
    }
    t->stats[rank] = dt_ps_info(m.ps);
    dt_ps_end(m.ps);
    return dt_error(ctx);
}

static dt_status rank_main(dt_ctx *ctx, void *user) {
    training *t = (training *)user;
    return t->servers < 0 ? train_dp(ctx, t) : train_ps(ctx, t);
}

static dt_status run(training *t, dt_backend backend) {
    dt_report report;
    dt_host host = *dt_host_default();
    host.log = no_log;
    memset(&report, 0, sizeof report);
    dt_status status =
        dt_run((dt_run_desc){ .ranks = t->workers + (t->servers > 0 ? t->servers : 0),
                   .backend = backend,
                   .timeout_s = 60,
                   .host = &host,
                   .report = &report,
                   .user_bytes = sizeof *t },
            rank_main, t);
    CHECK_MSG(status == DT_OK, "%d workers, %d servers, optimizer %d: %s", t->workers, t->servers,
        t->optimizer, report.text);
    return status;
}

static training make(int workers, int servers, int optimizer, int micros, int twice) {
    training t;
    memset(&t, 0, sizeof t);
    t.workers = workers;
    t.servers = servers;
    t.optimizer = optimizer;
    t.micros = micros;
    t.twice = twice;
    for (int w = 0; w < MAX_WORKERS; w++) t.steps[w] = STEPS;
    return t;
}

/* ---- tests ---- */

/* Synchronous training has the bits of data parallelism. */
static void test_equals_dp(dt_backend backend, int most_servers) {
    static const int optimizers[] = { DT_TABLE_SGD, DT_TABLE_ADAGRAD, DT_TABLE_FTRL };
    for (int workers = 1; workers <= MAX_WORKERS; workers++)
        for (int o = 0; o < 3; o++)
            for (int twice = 0; twice < 2; twice++) {
                int micros = 1 + 2 * twice;
                training dp = make(workers, -1, optimizers[o], micros, twice);
                dp.dense = 1;
                if (run(&dp, backend) != DT_OK) continue;
                for (int servers = 0; servers <= most_servers; servers++) {
                    training t = make(workers, servers, optimizers[o], micros, twice);
                    t.dense = 1;
                    if (run(&t, backend) != DT_OK) continue;
                    int different = 0, others = 0;
                    for (int i = 0; i < ROWS * WIDTH; i++)
                        different += memcmp(&t.rows[i], &dp.rows[i], sizeof t.rows[i]) != 0;
                    for (int i = 0; i < 2 * DENSE + HIDDEN; i++)
                        others += memcmp(&t.weights[i], &dp.weights[i], sizeof t.weights[i]) != 0;
                    CHECK_MSG(different + others == 0,
                        "%d of %d numbers of the table and %d of %d dense ones differ from data "
                        "parallelism: %d workers, %d servers, optimizer %d, %d micro-batches",
                        different, ROWS * WIDTH, others, 2 * DENSE + HIDDEN, workers, servers,
                        optimizers[o], micros);
                }
            }
}

/* A table whose row w counts the applied steps of worker w shows, independent of the clocks that
   the servers send, which steps a pull includes. */
typedef struct counting {
    int workers, servers, mode, staleness, steps;
    unsigned seed;             /* of the delays */
    int too_old, own;          /* numbers of pulls beyond the bound; that lack own steps */
    int farthest[MAX_WORKERS]; /* largest staleness that each worker saw */
    int wrong_totals;
    int64_t over;  /* answers whose clocks say more than `staleness` */
    double wait_s; /* worker 0 waits so long before its second step */
    const char *record, *replay;
    int prefetch;                            /* 1: each pull but the first is prefetched */
    float seen[MAX_WORKERS][8][MAX_WORKERS]; /* what each pull of each worker saw */
} counting;

static dt_status count_steps(dt_ctx *ctx, void *user) {
    counting *c = (counting *)user;
    int rank = dt_ctx_rank(ctx);
    unsigned seed = c->seed * 31 + (unsigned)rank * 7;
    uint64_t keys[MAX_WORKERS] = { 0, 1, 2, UINT64_MAX },
             mine = keys[rank < MAX_WORKERS ? rank : 0];
    float rows[MAX_WORKERS] = { 0 }, one = -1;
    const int is_bounded = c->mode == DT_PS_SYNC || c->mode == DT_PS_SSP;
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = c->servers,
                                    .mode = c->mode,
                                    .staleness = c->staleness,
                                    .geo_steps = c->mode == DT_PS_GEO ? 2 : 0,
                                    .geo_scale = 1,
                                    .record = c->record,
                                    .replay = c->replay });
    int table = dt_ps_table(ps, (dt_table_desc){ .name = "steps", .width = 1 });
    if (dt_ps_is_server(ps)) {
        dt_ps_serve(ps);
        dt_table_pull(dt_ps_owned(ps, table), keys, (size_t)c->workers, rows);
        for (int w = 0; w < c->workers && dt_error(ctx) == DT_OK; w++)
            if (c->servers == 1 && rows[w] != (float)c->steps)
                __atomic_fetch_add(&c->wrong_totals, 1, __ATOMIC_RELAXED);
        return dt_error(ctx);
    }
    for (int step = 0; step < c->steps && dt_error(ctx) == DT_OK; step++) {
        if (c->seed) sleep_some(&seed);
        if (rank == 0 && step == 1 && c->wait_s > 0) usleep((unsigned)(c->wait_s * 1e6));
        dt_ps_wait(ps, dt_ps_pull_start(ps, table, keys, (size_t)c->workers, rows));
        if (dt_error(ctx) != DT_OK) break;
        memcpy(c->seen[rank][step], rows, sizeof rows);
        for (int w = 0; w < c->workers; w++) {
            int late = step - (int)rows[w];
            if (is_bounded && late > c->staleness)
                __atomic_fetch_add(&c->too_old, 1, __ATOMIC_RELAXED);
            if (w == rank && late != 0) __atomic_fetch_add(&c->own, 1, __ATOMIC_RELAXED);
            if (late > c->farthest[rank]) c->farthest[rank] = late;
        }
        dt_ps_add(ps, table, &mine, 1, &one);
        if (c->prefetch) dt_ps_prefetch(ps, table, keys, (size_t)c->workers);
        dt_ps_step(ps, 1);
    }
    dt_ps_end(ps);
    for (int i = c->staleness + 1; i < DT_PS_HISTOGRAM && is_bounded; i++)
        __atomic_fetch_add(&c->over, dt_ps_info(ps).staleness[i], __ATOMIC_RELAXED);
    return dt_error(ctx);
}

static dt_status run_counting(
    counting *c, dt_backend backend, double timeout_s, const char *fault, dt_report *report) {
    dt_host host = *dt_host_default();
    host.log = no_log;
    memset(report, 0, sizeof *report);
    return dt_run((dt_run_desc){ .ranks = c->workers + c->servers,
                      .backend = backend,
                      .timeout_s = timeout_s,
                      .host = &host,
                      .report = report,
                      .user_bytes = sizeof *c,
                      .fault = fault },
        count_steps, c);
}

/* No pull is staler than the bound, own steps are always included, and workers do run ahead. */
static void test_bound(dt_backend backend, int runs) {
    int farthest[4] = { 0, 0, 0, 0 };
    for (int i = 0; i < runs; i++) {
        int kind = i % 4; /* SSP 0, 1, 2; async */
        counting c = { .workers = 2 + i / 4 % 3, .servers = 1 + i / 12 % 2, .steps = 6 };
        dt_report report;
        c.mode = kind == 3 ? DT_PS_ASYNC : DT_PS_SSP;
        c.staleness = kind == 3 ? 0 : kind;
        c.seed = (unsigned)i + 1;
        c.prefetch = i / 4 % 2;
        dt_status status = run_counting(&c, backend, 60, NULL, &report);
        CHECK_MSG(status == DT_OK, "run %d: %s", i, report.text);
        CHECK_MSG(c.too_old == 0 && c.own == 0 && c.over == 0 && c.wrong_totals == 0,
            "run %d, staleness %d, prefetch %d: %d numbers too old, %d own steps missing, %d "
            "answers that say "
            "so, %d wrong totals",
            i, c.staleness, c.prefetch, c.too_old, c.own, (int)c.over, c.wrong_totals);
        for (int w = 0; w < c.workers; w++)
            if (c.farthest[w] > farthest[kind]) farthest[kind] = c.farthest[w];
    }
    CHECK_MSG(farthest[0] == 0 && farthest[1] == 1 && farthest[2] == 2 && farthest[3] > 2,
        "largest staleness %d %d %d, and %d without a bound", farthest[0], farthest[1], farthest[2],
        farthest[3]);
}

/* A replay sees in every pull what the recorded run saw, whatever the delays. */
static void test_replay(void) {
    int other = 0;
    for (int i = 0; i < 12; i++) {
        char path[64], command[100];
        snprintf(path, sizeof path, "/tmp/test-ps-%d", (int)getpid());
        snprintf(command, sizeof command, "rm -f %s.*", path);
        counting a = { .workers = 3, .servers = 1 + i % 2, .steps = 8, .seed = (unsigned)i + 1 };
        dt_report report;
        static const int modes[] = { DT_PS_SSP, DT_PS_ASYNC, DT_PS_GEO };
        a.mode = modes[i % 3];
        a.staleness = i % 3 ? 0 : 2;
        a.prefetch = i % 2;
        counting b = a, c = a;
        a.record = b.replay = path;
        b.seed = c.seed = 1000 + (unsigned)i;
        CHECK_MSG(
            run_counting(&a, DT_BACKEND_THREADS, 60, NULL, &report) == DT_OK, "%s", report.text);
        CHECK_MSG(
            run_counting(&b, DT_BACKEND_THREADS, 60, NULL, &report) == DT_OK, "%s", report.text);
        CHECK(memcmp(a.seen, b.seen, sizeof a.seen) == 0);
        CHECK(run_counting(&c, DT_BACKEND_THREADS, 60, NULL, &report) == DT_OK);
        other += memcmp(a.seen, c.seen, sizeof a.seen) != 0;
        c.record = path; /* the file exists */
        CHECK(run_counting(&c, DT_BACKEND_THREADS, 60, NULL, &report) == DT_ERR_IO);
        b.steps = 9; /* more requests than recorded */
        dt_status status = run_counting(&b, DT_BACKEND_THREADS, 60, NULL, &report);
        CHECK_MSG(status == DT_ERR_ARG || strstr(report.text, "deadlock: "), "run %d: %d, %s", i,
            (int)status, report.text);
        if (system(command) != 0) abort();
    }
    CHECK_MSG(other > 0, "without a replay all runs were equal too");
}

/* A server without requests waits longer than the timeout; a rank that dies is named. */
static void test_idle_and_death(void) {
    dt_report report;
    counting c = { .workers = 1, .servers = 2, .steps = 2, .wait_s = 0.9 };
    dt_status status = run_counting(&c, DT_BACKEND_THREADS, 0.3, NULL, &report);
    CHECK_MSG(status == DT_OK, "an idle server: %s", report.text);
    static const char *const faults[] = { "kill:rank=0:seq=14", "kill:rank=2:seq=14" };
    for (int i = 0; i < 2; i++) {
        counting d = { .workers = 2, .servers = 1, .steps = 8, .mode = DT_PS_ASYNC };
        status = run_counting(&d, DT_BACKEND_PROCS, 30, faults[i], &report);
        CHECK_MSG(status != DT_OK && strstr(report.text, i ? "rank 2" : "rank 0"),
            "after %s: %d, %s", faults[i], (int)status, report.text);
    }
}

/* ---- errors ---- */

enum {
    BAD_SERVERS,
    BAD_MODE,
    BAD_STALENESS,
    BAD_TABLE,
    BAD_NAN,
    BAD_CREDITS,
    BAD_RATE,
    BAD_SETTING,
    BAD_NUMBER,
    BAD_KINDS
};
static dt_status misuse(dt_ctx *ctx, void *user) {
    const int kind = *(const int *)user, rank = dt_ctx_rank(ctx);
    uint64_t key = 7;
    float value[2] = { 1, kind == BAD_NAN && rank == 1 ? NAN : 2 }, rows[8][2];
    dt_ps_desc d = { .servers = kind == BAD_SERVERS ? 3 : 1,
        .mode = kind == BAD_MODE ? 4 : DT_PS_SYNC,
        .staleness = kind == BAD_STALENESS,
        .credits = kind == BAD_SETTING ? 2 + rank : 0 };
    dt_ps *ps = dt_ps_make(ctx, d);
    int table = dt_ps_table(
        ps, (dt_table_desc){ .name = "t", .width = 2 + (kind == BAD_TABLE && rank == 1) });
    if (ps && dt_ps_is_server(ps)) return dt_ps_serve(ps);
    dt_ps_pull *pulls[8] = { 0 };
    int n = kind == BAD_CREDITS ? 5 : 1;
    for (int i = 0; i < n; i++)
        pulls[i] = dt_ps_pull_start(ps, kind == BAD_NUMBER ? 1 : table, &key, 1, rows[i]);
    for (int i = 0; i < n; i++) dt_ps_wait(ps, pulls[i]);
    dt_ps_add(ps, table, &key, 1, value);
    dt_ps_step(ps, kind == BAD_RATE ? 0.1 * (1 + rank) : 0.1);
    dt_ps_end(ps);
    return dt_error(ctx);
}

static void test_misuse(void) {
    static const char *const texts[] = { "servers: 0 to ranks - 1", "mode: a DT_PS_*",
        "only for DT_PS_SSP", "description differs between ranks 0 and 1",
        "worker 1: the gradient of key 7 of table 't', column 1", "at most 4 pulls",
        "learning rates of one step differ", "a setting differs between ranks 0 and 1",
        "no such table" };
    for (int kind = 0; kind < BAD_KINDS; kind++) {
        dt_report report;
        dt_host host = *dt_host_default();
        host.log = no_log;
        memset(&report, 0, sizeof report);
        dt_status status =
            dt_run((dt_run_desc){ .ranks = 3, .timeout_s = 30, .host = &host, .report = &report },
                misuse, &kind);
        CHECK_MSG(status == (kind == BAD_NAN ? DT_ERR_NUMERIC : DT_ERR_ARG) &&
                      strstr(report.text, texts[kind]),
            "mistake %d: status %d, %s", kind, (int)status, report.text);
    }
}

/* Workers with different numbers of steps: those that have ended are not waited for. */
static void test_uneven(void) {
    training t = make(3, 2, DT_TABLE_ADAGRAD, 1, 0), u;
    for (int w = 0; w < 3; w++) t.steps[w] = 2 + 2 * w;
    u = t;
    u.servers = 1;
    u.delays = 1;
    if (run(&t, DT_BACKEND_THREADS) == DT_OK && run(&u, DT_BACKEND_THREADS) == DT_OK)
        CHECK(t.stats[2].clock == 6 && t.stats[0].clock == 2 &&
              memcmp(t.rows, u.rows, sizeof t.rows) == 0);
}

/* dt_micro separates micro-batches: 1e8 - 1e8 of the second one is complete before it is added. */
static dt_status two_micros(dt_ctx *ctx, void *user) {
    uint64_t key[2] = { 7, 7 };
    float first = 1, second[2] = { 1e8f, -1e8f };
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = 0 });
    int table = dt_ps_table(ps, (dt_table_desc){ .name = "t", .width = 1 });
    dt_micro(ctx, 0, 2);
    dt_ps_add(ps, table, key, 1, &first);
    dt_micro(ctx, 1, 2);
    dt_ps_add(ps, table, key, 2, second);
    dt_ps_step(ps, 1);
    for (int i = 0; i < 2 * DT_PS_CREDITS; i++)
        dt_ps_wait(ps, dt_ps_pull_start(ps, table, key, 1, user));
    dt_ps_end(ps);
    return dt_error(ctx);
}

static void test_micros(void) {
    float row = 0;
    CHECK(dt_run((dt_run_desc){ .ranks = 1 }, two_micros, &row) == DT_OK);
    CHECK_MSG(row == -1, "the row is %g after gradients 1 and (1e8 - 1e8)", (double)row);
}

/* Prefetching changes no bit, and each prefetch is taken: no key is pulled twice. */
static void test_prefetch(void) {
    for (int i = 0; i < 12; i++) {
        int workers = 1 + i % 3, servers = 1 + i / 3 % 2, micros = i < 6 ? 1 : 3;
        training a = make(workers, servers, DT_TABLE_ADAGRAD, micros, i % 2), b = a;
        a.dense = b.dense = b.prefetch = 1;
        b.delays = i;
        if (run(&a, DT_BACKEND_THREADS) != DT_OK || run(&b, DT_BACKEND_THREADS) != DT_OK) continue;
        CHECK(memcmp(a.rows, b.rows, sizeof a.rows) == 0 &&
              memcmp(a.weights, b.weights, sizeof a.weights) == 0);
        for (int w = 0; w < workers; w++)
            CHECK_MSG(a.stats[w].pulled == b.stats[w].pulled, "worker %d of %d pulled %d and %d", w,
                workers, (int)a.stats[w].pulled, (int)b.stats[w].pulled);
    }
}

/* ---- GEO ---- */

/* One worker with scale 1 is local SGD, whatever the number of steps between exchanges. */
static void test_geo_alone(void) {
    static const int optimizers[] = { DT_TABLE_SGD, DT_TABLE_ADAGRAD, DT_TABLE_ADAM };
    for (int i = 0; i < 18; i++) {
        training sync = make(1, 1, optimizers[i % 3], 1 + i % 2, 0), geo = sync;
        sync.dense = geo.dense = 1;
        geo.mode = DT_PS_GEO;
        geo.servers = 1 + i / 9;
        geo.geo_steps = 1 + i / 3 % 3;
        if (run(&sync, DT_BACKEND_THREADS) != DT_OK || run(&geo, DT_BACKEND_THREADS) != DT_OK)
            continue;
        CHECK_MSG(memcmp(sync.rows, geo.rows, sizeof geo.rows) == 0 &&
                      memcmp(sync.weights, geo.weights, sizeof geo.weights) == 0 &&
                      (geo.servers > 1 || memcmp(sync.rows, geo.server_rows, sizeof geo.rows) == 0),
            "one worker, %d steps between exchanges, optimizer %d: not the bits of local SGD",
            geo.geo_steps, geo.optimizer);
    }
}

/* Workers without a common key: with scale 1 the servers have the rows of synchronous training. */
static void test_geo_disjoint(void) {
    for (int i = 0; i < 12; i++) {
        training sync = make(2 + i % 3, 1, i % 2 ? DT_TABLE_ADAGRAD : DT_TABLE_SGD, 1, 0), geo;
        sync.disjoint = 1;
        geo = sync;
        geo.mode = DT_PS_GEO;
        geo.geo_scale = 1;
        geo.geo_steps = 1 + i / 3;
        geo.delays = i + 1;
        if (run(&sync, DT_BACKEND_THREADS) != DT_OK || run(&geo, DT_BACKEND_THREADS) != DT_OK)
            continue;
        CHECK_MSG(memcmp(sync.rows, geo.server_rows, sizeof geo.rows) == 0,
            "%d workers with keys of their own, %d steps between exchanges: not the bits of "
            "synchronous training",
            geo.workers, geo.geo_steps);
    }
}

typedef struct sharing {
    double scale;
    int turn;                     /* whose turn it is to step */
    float of_server, after[2][3]; /* rows of keys 5, 6, 7 that each worker reads at last */
} sharing;

static void await_turn(sharing *s, int turn) {
    while (__atomic_load_n(&s->turn, __ATOMIC_ACQUIRE) != turn) usleep(100);
}

/* Both workers change key 5; each one a key of its own. They exchange one after the other. */
static dt_status share(dt_ctx *ctx, void *user) {
    sharing *s = (sharing *)user;
    const int rank = dt_ctx_rank(ctx);
    uint64_t keys[3] = { 5, 6, 7 }, mine[2] = { 5, 6 + (uint64_t)rank };
    float grads[2] = { rank ? -3 : -1, rank ? -16 : -8 };
    dt_ps *ps = dt_ps_make(ctx,
        (dt_ps_desc){ .servers = 1, .mode = DT_PS_GEO, .geo_steps = 2, .geo_scale = s->scale });
    int table = dt_ps_table(ps, (dt_table_desc){ .name = "t", .width = 1 });
    if (dt_ps_is_server(ps)) {
        dt_ps_serve(ps);
        dt_table_pull(dt_ps_owned(ps, table), keys, 1, &s->of_server);
        return dt_error(ctx);
    }
    for (int round = 0; round < 2; round++) {
        /* the first step before any exchange, the second one in turns */
        if (round == 0) dt_ps_wait(ps, dt_ps_pull_start(ps, table, keys, 3, s->after[rank]));
        for (int step = 0; step < 2; step++) {
            if (round == 0) dt_ps_add(ps, table, mine, 2, grads);
            if (step == 1) await_turn(s, 2 * round + rank);
            dt_ps_step(ps, 1);
        }
        __atomic_store_n(&s->turn, 2 * round + rank + 1, __ATOMIC_RELEASE);
    }
    dt_ps_wait(ps, dt_ps_pull_start(ps, table, keys, 3, s->after[rank]));
    dt_ps_end(ps);
    return dt_error(ctx);
}

/* The workers' changes 2 and 6 are averaged, or with scale 1 added, and reach both workers. */
static void test_geo_shared(void) {
    for (int i = 0; i < 2; i++) {
        sharing s = { .scale = i };
        float want[3] = { i ? 8 : 4, i ? 16 : 8, i ? 32 : 16 };
        CHECK(dt_run((dt_run_desc){ .ranks = 3, .timeout_s = 30 }, share, &s) == DT_OK);
        CHECK_MSG(s.of_server == want[0] && memcmp(s.after[0], want, sizeof want) == 0 &&
                      memcmp(s.after[1], want, sizeof want) == 0,
            "scale %g: the server has %g, the workers %g %g %g and %g %g %g", s.scale,
            (double)s.of_server, (double)s.after[0][0], (double)s.after[0][1],
            (double)s.after[0][2], (double)s.after[1][0], (double)s.after[1][1],
            (double)s.after[1][2]);
    }
}

/* ---- density rule ---- */

enum { MOST_KEYS = 3072 }; /* with 4 columns a multiple of 1,024 elements for up to 4 workers */
typedef struct traffic {
    int workers, servers, keys, width;
    dt_dtype dtype;
    int64_t bytes; /* that worker 0 moves in one step */
} traffic;

static double formula_size(dt_dtype type, int of_grad) {
    return type == DT_F64 ? 8 : type == DT_BF16 && !of_grad ? 2 : 4;
}

/* One step. Without servers it is data parallelism: an all-reduce of the whole table. */
static dt_status count_traffic(dt_ctx *ctx, void *user) {
    traffic *c = (traffic *)user;
    const size_t n = (size_t)c->keys, w = (size_t)c->width;
    if (c->servers == 0) {
        static const int32_t id = 1;
        static const float target[4] = { 0 };
        dt_tensor *p = dt_param_at(ctx, "t", DT_SHAPE(MOST_KEYS, c->width), DT_ZEROS,
            (dt_param_desc){ .dtype = c->dtype });
        dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .optimizer = DT_SGD });
        size_t before = dt_comm_bytes(ctx, DT_AXIS_DP);
        dt_tensor *row = dt_embedding(p, dt_input(ctx, DT_I32, DT_SHAPE(1), &id));
        dt_tensor *y = dt_input(ctx, DT_F32, DT_SHAPE(1, c->width), target);
        dt_backward(dt_mse(dt_cast(row, DT_F32), y, 1));
        dt_zero_step(zero, 1);
        if (dt_ctx_rank(ctx) == 0) c->bytes = (int64_t)(dt_comm_bytes(ctx, DT_AXIS_DP) - before);
        return dt_error(ctx);
    }
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = c->servers });
    int table =
        dt_ps_table(ps, (dt_table_desc){ .name = "t", .width = c->width, .dtype = c->dtype });
    if (dt_ps_is_server(ps)) return dt_ps_serve(ps);
    uint64_t *keys = (uint64_t *)calloc(n, sizeof *keys);
    double *rows = (double *)calloc(n * w, sizeof *rows); /* room for any type; zeros for all */
    for (size_t i = 0; i < n; i++) keys[i] = i;
    dt_ps_wait(ps, dt_ps_pull_start(ps, table, keys, n, rows));
    dt_ps_add(ps, table, keys, n, rows);
    dt_ps_step(ps, 1);
    if (dt_ctx_rank(ctx) == 0) c->bytes = dt_ps_info(ps).bytes;
    dt_ps_end(ps);
    free(keys);
    free(rows);
    return dt_error(ctx);
}

/* The formula has the bytes that a run counts, and chooses the way that moves less. */
static void test_formula(void) {
    static const dt_dtype types[] = { DT_F32, DT_BF16, DT_F64 };
    for (int i = 0; i < 9; i++) {
        traffic all = { .workers = 2 + i / 3, .width = 4, .dtype = types[i % 3] };
        double n = all.workers, values = formula_size(all.dtype, 0),
               grads = formula_size(all.dtype, 1);
        CHECK(dt_run((dt_run_desc){ .ranks = all.workers, .timeout_s = 60 }, count_traffic, &all) ==
              DT_OK);
        /* fewer and more keys than those that move the same bytes */
        double even = 2 * grads * 4 * MOST_KEYS * (n - 1) / n / (16 + 4 * (values + grads));
        for (int side = 0; side < 2; side++) {
            traffic ps = all;
            ps.servers = 1 + i % 2;
            ps.keys = side ? (int)floor(even) + 1 : (int)ceil(even) - 2;
            CHECK(dt_run((dt_run_desc){ .ranks = ps.workers + ps.servers, .timeout_s = 60 },
                      count_traffic, &ps) == DT_OK);
            dt_ps_bytes b = dt_ps_formula((dt_ps_formula_desc){ .rows = MOST_KEYS,
                .keys = ps.keys,
                .width = 4,
                .workers = all.workers,
                .values = values,
                .grads = grads });
            /* what a worker pushes to a server begins with a count of 8 bytes */
            CHECK_MSG(b.all_reduce == (double)all.bytes &&
                          b.server == (double)(ps.bytes - 8 * ps.servers) &&
                          b.use_server == (ps.bytes < all.bytes) && b.use_server == !side,
                "%d workers, %d keys, %s: %.0f and %.0f bytes, counted %lld and %lld", all.workers,
                ps.keys, dt_dtype_name(all.dtype), b.all_reduce, b.server, (long long)all.bytes,
                (long long)ps.bytes);
        }
    }
    /* f32: the server moves less below the density (N-1)/N w/(w+2) */
    for (int n = 1; n <= 64; n *= 4)
        for (int w = 1; w <= 256; w *= 4)
            for (int u = 0; u <= 1000; u++) {
                dt_ps_formula_desc d = { .rows = 1000, .keys = u, .width = w, .workers = n };
                CHECK(dt_ps_formula(d).use_server ==
                      ((int64_t)u * n * (w + 2) < 1000LL * (n - 1) * w));
            }
    CHECK(isnan(dt_ps_formula((dt_ps_formula_desc){ .rows = -1 }).all_reduce));
}

/* Processes that connect over tcp train to the same bits as threads. */
static void test_tcp(void) {
    training threads = make(2, 2, DT_TABLE_ADAGRAD, 3, 1);
    char address[32];
    pid_t rank[4];
    run(&threads, DT_BACKEND_THREADS);
    snprintf(address, sizeof address, "127.0.0.1:%d", 20000 + (int)getpid() % 12000);
    for (int r = 0; r < 4; r++) {
        if ((rank[r] = fork()) != 0) continue;
        training t = make(2, 2, DT_TABLE_ADAGRAD, 3, 1);
        dt_status status = dt_run((dt_run_desc){ .ranks = 4,
                                      .backend = DT_BACKEND_TCP,
                                      .timeout_s = 60,
                                      .rank = r,
                                      .rendezvous = address },
            rank_main, &t);
        _exit(status != DT_OK ? 1 : r == 0 && memcmp(threads.rows, t.rows, sizeof t.rows) ? 2 : 0);
    }
    for (int r = 0; r < 4; r++) {
        int status = -1;
        waitpid(rank[r], &status, 0);
        CHECK_MSG(status == 0, "tcp rank %d: exit status %d", r, status >> 8);
    }
}

/* ---- element types ---- */

enum { TYPE_KEYS = 40, TYPE_WIDTH = 3, TYPE_DENSE = 1500, TYPE_STEPS = 6, TYPE_BYTES = 1 << 16 };
typedef struct types {
    dt_dtype dtype;
    int servers, mode, is_local; /* is_local: plain tables in place of a parameter server */
    char sparse[TYPE_BYTES], dense[TYPE_BYTES];
    char served[TYPE_BYTES], other[TYPE_BYTES]; /* GEO: sparse rows of the server and of worker 1 */
} types;

/* Element i of the gradients of a step: a value that bf16 represents. */
static double type_gradient(int step, int i) { return ((i * 7 + step * 3) % 31 - 15) / 16.0; }

static void put_number(void *buf, dt_dtype dtype, int i, double x) {
    float f = (float)x;
    if (dtype == DT_F64)
        ((double *)buf)[i] = x;
    else if (dtype == DT_BF16)
        ((uint16_t *)buf)[i] = dt__f32_to_bf16(f);
    else
        ((float *)buf)[i] = f;
}

/* The steps with plain tables: a dense parameter is two runs, the second one padded. */
static void train_local(dt_ctx *ctx, types *t, const uint64_t *keys, dt_table_desc sparse,
    dt_table_desc dense, char *grads, char *runs) {
    static const uint64_t run_keys[] = { 0, 1 };
    char rows[TYPE_BYTES];
    const dt_dtype kind = t->dtype == DT_F64 ? DT_F64 : DT_F32;
    dense.width = DT_PS_RUN;
    dt_table *a = dt_table_make(ctx, sparse), *b = dt_table_make(ctx, dense);
    for (int step = 0; step < TYPE_STEPS; step++) {
        for (int i = 0; i < TYPE_KEYS * TYPE_WIDTH; i++)
            put_number(grads, kind, i, type_gradient(step, i));
        memset(runs, 0, TYPE_BYTES);
        for (int i = 0; i < TYPE_DENSE; i++) put_number(runs, kind, i, type_gradient(step, i));
        dt_table_push_desc push = { .lr = 0.1, .clock = step };
        dt_table_push(a, keys, TYPE_KEYS, grads, push);
        dt_table_push(b, run_keys, 2, runs, push);
    }
    dt_table_pull(a, keys, TYPE_KEYS, t->sparse);
    dt_table_pull(b, run_keys, 2, rows);
    memcpy(t->dense, rows, TYPE_DENSE * dt_dtype_size(t->dtype));
}

static dt_status types_rank(dt_ctx *ctx, void *user) {
    types *t = (types *)user;
    static char grads[TYPE_BYTES], runs[TYPE_BYTES];
    const dt_dtype kind = t->dtype == DT_F64 ? DT_F64 : DT_F32;
    uint64_t keys[TYPE_KEYS];
    for (int i = 0; i < TYPE_KEYS; i++) keys[i] = (uint64_t)(i % 17); /* they repeat */
    dt_table_desc sparse = { .name = "s", .width = TYPE_WIDTH, .dtype = t->dtype }, dense;
    sparse.init = DT_NORMAL(0.5);
    sparse.optimizer = DT_TABLE_ADAGRAD;
    sparse.initial_accumulator =
        0.5; /* else the first update does not depend on a gradient's size */
    dense = sparse;
    dense.name = "d";
    dense.init = DT_ZEROS;
    if (t->is_local) {
        train_local(ctx, t, keys, sparse, dense, grads, runs);
        return dt_error(ctx);
    }
    dt_ps_desc desc = { .servers = t->servers, .mode = t->mode };
    if (t->mode == DT_PS_GEO) desc.geo_steps = 2, desc.geo_scale = 1;
    dt_ps *ps = dt_ps_make(ctx, desc);
    int a = dt_ps_table(ps, sparse), b = dt_ps_dense(ps, dense, DT_SHAPE(TYPE_DENSE));
    if (dt_ps_is_server(ps)) {
        dt_ps_serve(ps);
        if (t->mode == DT_PS_GEO) dt_table_pull(dt_ps_owned(ps, a), keys, TYPE_KEYS, t->served);
        return dt_error(ctx);
    }
    char done = 0;
    if (dt_ctx_rank(ctx) == 1) { /* its replica gets the rows of worker 0 by the first exchange */
        dt_recv(dt_world(ctx), &done, 1, DT_U8, 0, 0);
        dt_ps_wait(ps, dt_ps_pull_start(ps, a, keys, TYPE_KEYS, t->other));
        return dt_ps_end(ps);
    }
    for (int step = 0; step < TYPE_STEPS && dt_error(ctx) == DT_OK; step++) {
        for (int i = 0; i < TYPE_KEYS * TYPE_WIDTH; i++)
            put_number(grads, kind, i, type_gradient(step, i));
        for (int i = 0; i < TYPE_DENSE; i++) put_number(runs, t->dtype, i, type_gradient(step, i));
        dt_tensor *x = dt_ps_dense_read(ps, b),
                  *c = dt_input(ctx, t->dtype, DT_SHAPE(TYPE_DENSE), runs);
        dt_backward(dt_sum_dims(dt_mul(x, c), (dt_reduce_desc){ 0 })); /* the gradient is c */
        dt_reset(ctx);
        dt_ps_add(ps, a, keys, TYPE_KEYS, grads);
        dt_ps_step(ps, 0.1);
    }
    dt_ps_wait(ps, dt_ps_pull_start(ps, a, keys, TYPE_KEYS, t->sparse));
    const dt_tensor *x = dt_ps_dense_read(ps, b);
    if (x) memcpy(t->dense, x->data, TYPE_DENSE * dt_dtype_size(t->dtype));
    if (t->mode == DT_PS_GEO) dt_send(dt_world(ctx), &done, 1, DT_U8, 1, 0);
    return dt_ps_end(ps);
}

/* Tables of every type, sparse and dense, have the bits of plain tables, whose optimizers
   test_table.c compares with a model. */
static void test_types(void) {
    static const dt_dtype dtypes[] = { DT_F32, DT_F64, DT_BF16 };
    for (int k = 0; k < 3; k++)
        for (int servers = 0; servers <= 3; servers++) {
            static types want, got;
            dt_report report;
            memset(&want, 0, sizeof want);
            memset(&got, 0, sizeof got);
            want.dtype = got.dtype = dtypes[k];
            want.is_local = 1;
            got.mode = servers == 3 ? DT_PS_GEO : DT_PS_SYNC;
            got.servers = servers == 3 ? 1 : servers;
            dt_run_desc desc = { .ranks = 1, .timeout_s = 60 };
            desc.report = &report;
            CHECK_MSG(dt_run(desc, types_rank, &want) == DT_OK, "%s", report.text);
            desc.ranks = 1 + got.servers + (got.mode == DT_PS_GEO);
            CHECK_MSG(dt_run(desc, types_rank, &got) == DT_OK, "%s", report.text);
            CHECK(got.mode != DT_PS_GEO ||
                  (memcmp(want.sparse, got.served, sizeof want.sparse) == 0 &&
                      memcmp(want.sparse, got.other, sizeof want.sparse) == 0));
            CHECK_MSG(memcmp(want.sparse, got.sparse, sizeof want.sparse) == 0 &&
                          memcmp(want.dense, got.dense, sizeof want.dense) == 0,
                "type %d, %d servers, mode %d: other bits than plain tables", k, got.servers,
                got.mode);
        }
}

/* ---- pipelines ---- */

enum { PIPE_MICROS = 4, PIPE_STAGES = 4, PIPE_SEQ = BATCH * SLOTS };
typedef struct piped {
    int dp, servers, kind; /* servers -1: the oracle; kind of schedule */
    int optimizer, recompute;
    float rows[ROWS * WIDTH], weights[PIPE_STAGES][WIDTH * WIDTH];
    int64_t pulled, stages; /* of the first replica of the last pipeline rank, with servers */
} piped;

typedef struct stages {
    const piped *t;
    dt_ctx *ctx;
    dt_ps *ps;
    dt_tensor *param, *weights[PIPE_STAGES];
    int table, tables[PIPE_STAGES], count, step, dp;
    uint64_t keys[PIPE_SEQ];
} stages;

static dt_tensor *pipe_lookup(stages *s, int micro) {
    static const training no_training;
    int32_t ids[PIPE_SEQ];
    draw_keys(&no_training, s->keys, ids, s->dp, s->step, micro, 0);
    const dt_shape shape = DT_SHAPE(PIPE_SEQ);
    return s->param ? dt_embedding(s->param, dt_input(s->ctx, DT_I32, shape, ids))
                    : dt_ps_embedding(s->ps, s->table, s->keys, shape);
}

typedef struct pipe_call {
    stages *s;
    int stage, micro;
} pipe_call;

static dt_tensor *pipe_layer(dt_tensor *x, void *user) {
    const pipe_call *c = (const pipe_call *)user;
    stages *s = c->s;
    if (c->stage == 0) x = pipe_lookup(s, c->micro);
    dt_tensor *w = s->weights[c->stage];
    if (!w) w = dt_ps_dense_read(s->ps, s->tables[c->stage]);
    return dt_add(x, dt_tanh(dt_linear(x, w, NULL)));
}

static dt_tensor *pipe_stage(dt_tensor *x, int stage, int micro, void *user) {
    stages *s = (stages *)user;
    float want[PIPE_SEQ * WIDTH];
    pipe_call call = { s, stage, micro };
    dt_block_desc d = { .recompute = s->t->recompute, .user_bytes = sizeof call };
    x = stage > 0 ? dt_block_at(s->ctx, pipe_layer, x, &call, d) : pipe_layer(NULL, &call);
    if (stage + 1 < s->count) return x;
    for (int i = 0; i < PIPE_SEQ * WIDTH; i++)
        want[i] = (float)((i * 37 + s->dp * 11 + s->step * 5 + micro * 3) % 23) / 16 - 0.6f;
    dt_tensor *y = dt_input(s->ctx, DT_F32, DT_SHAPE(PIPE_SEQ, WIDTH), want);
    return dt_mse(x, y, 300);
}

/* Rank pp * dp + i is replica i of pipeline rank pp of 2; then come the servers. Without servers
   the first pipeline rank owns the table, and ZeRO-0 trains the dense parameters. */
static dt_status pipe_train(dt_ctx *ctx, void *user) {
    piped *t = (piped *)user;
    const int rank = dt_ctx_rank(ctx), pp = rank / t->dp, served = t->servers > 0;
    static const char *const names[PIPE_STAGES] = { "w0", "w1", "w2", "w3" };
    training like = make(t->dp, t->servers, t->optimizer, PIPE_MICROS, 0);
    stages s = { .t = t, .ctx = ctx, .dp = rank % t->dp };
    dt_comm *replicas = dt_comm_split(dt_world(ctx), pp < 2 ? pp : -1, 0, "replicas"),
            *line = dt_comm_split(dt_world(ctx), pp < 2 ? s.dp : -1, 0, "line");
    dt_schedule *schedule = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = t->kind, .ranks = 2, .micros = PIPE_MICROS });
    s.count = dt_schedule_stages(schedule);
    dt_zero *zero = NULL;
    if (served || (t->servers == 0 && pp == 0))
        s.ps = dt_ps_make(
            ctx, (dt_ps_desc){ .comm = served ? NULL : replicas, .servers = t->servers });
    if (s.ps) s.table = dt_ps_table(s.ps, table_desc(&like));
    for (int i = 0; i < s.count && served; i++)
        s.tables[i] = dt_ps_dense(s.ps,
            (dt_table_desc){ .name = names[i], .optimizer = t->optimizer, .init = DT_NORMAL(0.3) },
            DT_SHAPE(WIDTH, WIDTH));
    if (served && dt_ps_is_server(s.ps)) return dt_ps_serve(s.ps);
    if (!served) {
        dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = t->dp, .pp = 2 });
        for (int i = 0; i < s.count; i++) {
            if (dt_schedule_rank_of(schedule, i) != pp) continue;
            dt_stage(ctx, i);
            if (i == 0 && t->servers < 0)
                s.param = dt_param(ctx, "emb", DT_SHAPE(ROWS, WIDTH), table_desc(&like).init);
            s.weights[i] = dt_param(ctx, names[i], DT_SHAPE(WIDTH, WIDTH), DT_NORMAL(0.3));
        }
        dt_zero_desc d = { .mesh = &mesh };
        d.optimizer = t->optimizer == DT_TABLE_SGD ? DT_SGD : DT_OPTIMIZER_CUSTOM;
        if (d.optimizer != DT_SGD) d.update = update, d.user = &like.optimizer, d.states = 2;
        zero = dt_zero_make(ctx, d);
    }
    for (s.step = 0; s.step < STEPS && dt_error(ctx) == DT_OK; s.step++) {
        dt_pipe_run(ctx,
            (dt_pipe_desc){ .schedule = schedule, .comm = line, .run = pipe_stage, .user = &s });
        if (s.ps) dt_ps_step(s.ps, 0.1);
        if (zero) dt_zero_step(zero, 0.1);
    }
    if (pp == 0 && s.ps) {
        float rows[ROWS * WIDTH];
        read_rows(s.ps, s.table, rows);
        if (rank == 0) memcpy(t->rows, rows, sizeof rows);
    } else if (rank == 0) {
        dt_read(s.param, t->rows);
    }
    for (int i = 0; i < s.count; i++) {
        if (dt_schedule_rank_of(schedule, i) != pp) continue;
        dt_tensor *w = served ? dt_ps_dense_read(s.ps, s.tables[i]) : s.weights[i];
        if (s.dp == 0) dt_read(w, t->weights[i]);
    }
    if (s.ps) dt_ps_end(s.ps);
    if (rank == t->dp) t->pulled = dt_ps_info(s.ps).pulled, t->stages = s.count / 2;
    return dt_error(ctx);
}

/* In a pipeline whose first stage reads a table, the rows and the dense parameters have the bits of
   dt_embedding and ZeRO-0 in the same layout. */
static void test_pipeline(void) {
    static const int kinds[] = { DT_SCHEDULE_AFAB, DT_SCHEDULE_1F1B, DT_SCHEDULE_INTERLEAVED,
        DT_SCHEDULE_ZB, DT_SCHEDULE_ZBV };
    for (int k = 0; k < 10; k++) {
        piped want;
        for (int servers = -1; servers <= 2; servers++) {
            piped t = { .dp = 1 + k % 2, .servers = servers, .kind = kinds[k / 2] };
            t.optimizer = k % 3 ? DT_TABLE_ADAGRAD : DT_TABLE_SGD;
            t.recompute = k % 4 > 1;
            dt_report report;
            dt_host host = *dt_host_default();
            host.log = no_log;
            memset(&report, 0, sizeof report);
            int ranks = 2 * t.dp + (servers > 0 ? servers : 0);
            CHECK_MSG(dt_run(
                          (dt_run_desc){
                              .ranks = ranks, .timeout_s = 60, .host = &host, .report = &report },
                          pipe_train, &t) == DT_OK,
                "schedule %d, dp %d, %d servers: %s", t.kind, t.dp, servers, report.text);
            if (servers < 0) want = t;
            CHECK_MSG(memcmp(t.rows, want.rows, sizeof t.rows) == 0 &&
                          memcmp(t.weights, want.weights, sizeof t.weights) == 0,
                "pp 2 x dp %d, schedule %d, %d servers: not the bits of dt_embedding", t.dp, t.kind,
                servers);
            /* a step pulls each dense parameter once, and only those that its stages read */
            CHECK_MSG(servers <= 0 || t.pulled == (STEPS + 1) * t.stages,
                "%d stages have pulled %d runs in %d steps", (int)t.stages, (int)t.pulled, STEPS);
        }
    }
}

int main(void) {
    test_equals_dp(DT_BACKEND_THREADS, MAX_WORKERS);
    test_equals_dp(DT_BACKEND_PROCS, 2);
    test_bound(DT_BACKEND_THREADS, check_all_cases() ? 2000 : 200);
    test_bound(DT_BACKEND_PROCS, 48);
    test_replay();
    test_prefetch();
    test_geo_alone();
    test_geo_disjoint();
    test_geo_shared();
    test_formula();
    test_types();
    test_pipeline();
    test_tcp();
    test_idle_and_death();
    test_misuse();
    test_uneven();
    test_micros();
    return check_done("test_ps");
}
