/* test_nccl.c - ranks with one GPU each, through NCCL, on a machine without a GPU

   The library is linked with fake_cuda.c, which executes work in streams late and in a random
   order, and detects misuse of NCCL: a different order of operations on another rank, a call while
   one is in progress. A rank is a thread that calls dt_run like a separate process, and connects to
   the other ranks over sockets. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "tests/support/check.h"
#include "tests/support/jitter.h"
#if defined(__has_include)
#if __has_include(<nccl.h>)
#define HAVE_NCCL
#endif
#endif

#ifndef HAVE_NCCL
int main(void) {
    check_skip("nccl: the headers of CUDA and NCCL are not here");
    return check_done("test_nccl");
}
#else

#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include <nccl.h>
#include "tests/cuda/fake_cuda.h"
#include "tests/comm/rank_data.h"

// ==== 1. Jobs ===================================================================================

typedef dt_status (*rank_fn)(dt_ctx *ctx, void *user);
typedef struct job {
    int ranks, port, attach;
    double timeout_s;
    rank_fn fn;
    int what;
    dt_report report[MAX_RANKS];
    double took[MAX_RANKS];
    char fault[64];
    int quiet, counted;
} job;
typedef struct seat {
    job *job;
    int rank;
} seat;

static void log_quietly(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* Number of notices about CUDA_MODULE_LOADING; a notice from any rank but 0 counts 100. */
static int notices;
static void log_counted(void *user, int level, int rank, const char *text) {
    (void)user;
    if (level == DT_LOG_NOTICE && strstr(text, "CUDA_MODULE_LOADING"))
        __atomic_fetch_add(&notices, rank == 0 ? 1 : 100, __ATOMIC_SEQ_CST);
}

/* A free loopback port. */
static int free_port(void) {
    struct sockaddr_in at;
    socklen_t n = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, (struct sockaddr *)&at, n) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &n) != 0)
        exit(1);
    close(fd);
    return ntohs(at.sin_port);
}

static void *seat_main(void *p) {
    seat *s = (seat *)p;
    job *j = s->job;
    dt_host host = *dt_host_default();
    char place[32];
    double begin = host.now(NULL);
    snprintf(place, sizeof place, "127.0.0.1:%d", j->port);
    if (j->quiet) host.log = log_quietly;
    if (j->counted) host.log = log_counted;
    dt_run_desc desc = { .ranks = j->ranks,
        .backend = DT_BACKEND_NCCL,
        .timeout_s = j->timeout_s,
        .host = &host,
        .report = &j->report[s->rank],
        .rank = s->rank,
        .rendezvous = place,
        .fault = j->fault[0] ? j->fault : NULL };
    dt_run(desc, j->fn, j);
    j->took[s->rank] = host.now(NULL) - begin;
    return NULL;
}

static void job_run(job *j) {
    pthread_t threads[MAX_RANKS];
    seat seats[MAX_RANKS];
    j->port = free_port();
    if (j->timeout_s == 0) j->timeout_s = 60;
    for (int r = 0; r < j->ranks; r++) {
        seats[r].job = j;
        seats[r].rank = r;
        pthread_create(&threads[r], NULL, seat_main, &seats[r]);
    }
    for (int r = 0; r < j->ranks; r++) pthread_join(threads[r], NULL);
}

static void make_machine(int devices, unsigned long long seed, int order) {
    fake_cuda_reset();
    fake_cuda_devices(devices);
    fake_cuda_seed(seed);
    fake_cuda_order(order);
    fake_cuda_forbid_default_stream(1);
}

/* All ranks succeeded, the fake CUDA and NCCL report no error, and everything was freed. */
static void check_clean(const job *j, const char *what) {
    for (int r = 0; r < j->ranks; r++)
        CHECK_MSG(j->report[r].status == DT_OK, "%s: rank %d: %s", what, r, j->report[r].text);
    CHECK_MSG(!fake_cuda_error(), "%s: %s", what, fake_cuda_error());
    CHECK_MSG(fake_cuda_leaks(1) == 0, "%s: a CUDA or NCCL object was not freed", what);
}

// ==== 2. Arrays on the device ===================================================================

static void to_device(dt_ctx *ctx, void *device, const void *host, size_t bytes) {
    if (bytes && device) dt_ctx_kernels(ctx)->move(device, host, bytes, dt_ctx_stream(ctx));
}

static void from_device(dt_ctx *ctx, void *host, const void *device, size_t bytes) {
    dt__move(ctx, host, device, bytes);
    dt__sync(ctx);
}

typedef struct array {
    void *at;
    size_t bytes;
} array;
static array array_make(dt_ctx *ctx, size_t bytes) {
    array a = { dt_alloc(ctx, DT_MEM_COMM, bytes, "a test's array"), bytes };
    return a;
}
static void array_free(dt_ctx *ctx, array a) { dt_free(ctx, DT_MEM_COMM, a.at, a.bytes); }

// ==== 3. Collectives ============================================================================

static const dt_dtype types[] = { DT_F32, DT_F64, DT_I32, DT_BF16, DT_F16, DT_U8, DT_I64 };
static const dt_op redops[] = { DT_SUM, DT_AVG, DT_MAX, DT_MIN, DT_PROD };

/* Tolerance for a sum in another order; 16-bit sums are rounded once from f32, so nearly all are
   equal. */
static int near(double got, double want, dt_dtype type, int n) {
    double tol = type == DT_F64    ? 1e-14
                 : type == DT_BF16 ? 1.0 / 128
                 : type == DT_F16  ? 1.0 / 1024
                                   : 1e-6;
    return fabs(got - want) <= tol * (fabs(want) + 100.0 * n * (narrow(type) ? 1e-5 : 1));
}

typedef struct trial {
    dt_comm *comm;
    int op, t, o, root, in_place, started;
    size_t count;
} trial;
enum {
    ALL_REDUCE,
    REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    GATHER,
    SCATTER,
    ALL_TO_ALL,
    ALL_TO_ALL_V,
    BROADCAST,
    OPS
};

static size_t v_count(const trial *c, int i, int j) {
    return mix((uint64_t)(i * 64 + j) + c->count) % (c->count + 1);
}

static dt_work *call(
    const trial *c, const void *send, void *recv, const size_t *out, const size_t *in) {
    dt_comm *comm = c->comm;
    dt_dtype t = types[c->t];
    dt_op op = redops[c->o];
    size_t n = c->count;
    switch (c->op) {
    case ALL_REDUCE: return dt_all_reduce_start(comm, send, recv, n, t, op);
    case REDUCE: return dt_reduce_start(comm, send, recv, n, t, op, c->root);
    case REDUCE_SCATTER: return dt_reduce_scatter_start(comm, send, recv, n, t, op);
    case ALL_GATHER: return dt_all_gather_start(comm, send, recv, n, t);
    case GATHER: return dt_gather_start(comm, send, recv, n, t, c->root);
    case SCATTER: return dt_scatter_start(comm, send, recv, n, t, c->root);
    case ALL_TO_ALL: return dt_all_to_all_start(comm, send, recv, n, t);
    case ALL_TO_ALL_V: return dt_all_to_all_v_start(comm, send, out, recv, in, t);
    default: return dt_broadcast_start(comm, recv, n, t, c->root);
    }
}

/* The expected element i of this rank's result. */
static double wanted(const trial *c, size_t i, const size_t *in) {
    int n = dt_comm_size(c->comm), me = dt_comm_rank(c->comm),
        r = (int)(c->count ? i / c->count : 0);
    size_t at = c->count ? i % c->count : 0, first = 0;
    dt_dtype t = types[c->t];
    switch (c->op) {
    case ALL_REDUCE:
    case REDUCE: return naive(n, i, t, redops[c->o]);
    case REDUCE_SCATTER: return naive(n, (size_t)me * c->count + i, t, redops[c->o]);
    case ALL_GATHER:
    case GATHER: return sent_value(r, at, t, DT_SUM);
    case SCATTER: return sent_value(c->root, (size_t)me * c->count + i, t, DT_SUM);
    case ALL_TO_ALL: return sent_value(r, (size_t)me * c->count + at, t, DT_SUM);
    case ALL_TO_ALL_V:
        for (r = 0; i >= in[r]; r++) i -= in[r];
        for (int to = 0; to < me; to++) first += v_count(c, r, to);
        return sent_value(r, first + i, t, DT_SUM);
    default: return sent_value(c->root, i, t, DT_SUM);
    }
}

static void trial_run(trial c) {
    dt_ctx *ctx = c.comm->world->ctx;
    int n = dt_comm_size(c.comm), me = dt_comm_rank(c.comm), root = me == c.root;
    int cut = c.op == REDUCE_SCATTER || c.op == SCATTER || c.op == ALL_TO_ALL;
    int wide = c.op == ALL_GATHER || c.op == GATHER || c.op == ALL_TO_ALL;
    int has = root || (c.op != REDUCE && c.op != GATHER);
    size_t size = dt_dtype_size(types[c.t]), out[MAX_RANKS], in[MAX_RANKS], sent = 0, came = 0,
           bad = 0, other = 0;
    dt_op op = c.op <= REDUCE_SCATTER ? redops[c.o] : DT_SUM;
    for (int r = 0; r < n; r++)
        sent += out[r] = v_count(&c, me, r), came += in[r] = v_count(&c, r, me);
    size_t sends = c.op == ALL_TO_ALL_V ? sent : c.count * (size_t)(cut ? n : 1);
    size_t takes = c.op == ALL_TO_ALL_V ? came : c.count * (size_t)(wide ? n : 1);
    int one = (c.in_place && c.op < ALL_TO_ALL) || c.op == BROADCAST;
    array a = array_make(ctx, (sends + takes) * size + 8), b = array_make(ctx, takes * size + 8);
    if (dt_error(ctx) != DT_OK) return;
    char *host = (char *)malloc((sends + takes) * size + 8), *send = (char *)a.at,
         *recv = (char *)b.at;
    if (one)
        recv = send + (c.op == REDUCE_SCATTER || c.op == SCATTER ? (size_t)me * c.count * size : 0);
    if (one && (c.op == ALL_GATHER || c.op == GATHER))
        recv = send, send += (size_t)me * c.count * size;
    for (size_t i = 0; i < sends; i++) put(host, types[c.t], i, sent_value(me, i, types[c.t], op));
    if (c.op != BROADCAST || root) to_device(ctx, send, host, sends * size);
    dt_work *work = call(&c, send, recv, out, in);
    dt_wait(ctx, work);
    from_device(ctx, host, recv, takes * size);
    for (size_t i = 0; i < takes && has; i++) {
        double want = wanted(&c, i, in), got = get(host, types[c.t], i);
        other += got != want;
        bad += !(c.op <= REDUCE_SCATTER && op != DT_MAX && op != DT_MIN
                     ? near(got, want, types[c.t], n)
                     : got == want);
    }
    if (narrow(types[c.t]) && n > 2) bad += 20 * other > takes + 100 ? other : 0;
    CHECK_MSG(bad == 0 && dt_error(ctx) == DT_OK,
        "operation %d %s x %zu by %d, root %d, %d ranks, rank %d, in place "
        "%d: %zu of %zu wrong",
        c.op, dt_dtype_name(types[c.t]), c.count, c.o, c.root, n, me, c.in_place, bad, takes);
    free(host);
    array_free(ctx, a);
    array_free(ctx, b);
}

static void sweep(dt_comm *comm, int stride) {
    static const size_t counts[] = { 0, 1, 17, 301, 5003 };
    int number = 0;
    for (int k = 0; k < 5; k++)
        for (int t = 0; t < 7; t++)
            for (int op = 0; op < OPS; op++)
                for (int o = 0; o < (op <= REDUCE_SCATTER ? 5 : 1); o++)
                    for (int in_place = 0; in_place < 2; in_place++) {
                        trial c = { comm, op, t, o, number % dt_comm_size(comm), in_place, 0,
                            counts[k] };
                        if (mix((uint64_t)++number) % (uint64_t)stride == 0) trial_run(c);
                    }
}

static dt_status collectives(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    sweep(world, j->what);
    dt_comm *odd = dt_comm_split(world, me % 2, -me, "odd"),
            *few = dt_comm_split(world, me ? 0 : -1, 0, "few");
    dt_comm *again = dt_comm_split(odd, 0, 0, "again");
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    CHECK(dt_comm_size(odd) == (n + 1 - me % 2) / 2 && (few == NULL) == (me == 0));
    sweep(odd, 4 * j->what);
    float values[2] = { (float)me, (float)-me }; /* variables are host memory */
    dt_all_reduce(world, values, values, 2, DT_F32, DT_MAX);
    CHECK(dt_error(ctx) == DT_OK && values[0] == (float)(n - 1) && values[1] == 0);
    if (few) sweep(few, 4 * j->what);
    sweep(again, 8 * j->what);
    return dt_error(ctx);
}

static void test_collectives(void) {
    for (int n = 1; n <= 5; n++)
        for (int order = 0; order < 3; order++) {
            job j = { .ranks = n, .fn = collectives, .what = n == 2 ? 3 : 17 };
            make_machine(n, (unsigned long long)(10 * n + order), order);
            job_run(&j);
            check_clean(&j, "collectives");
        }
}

// ==== 4. Messages ===============================================================================

static void pattern(float *p, size_t n, int from, int tag) {
    for (size_t i = 0; i < n; i++) p[i] = (float)(from * 1000000 + tag * 10000 + (int)(i % 9973));
}

static int holds(dt_ctx *ctx, array a, size_t n, int from, int tag) {
    float *got = (float *)malloc(2 * n * sizeof *got + 8), *want = got + n;
    from_device(ctx, got, a.at, n * sizeof *got);
    pattern(want, n, from, tag);
    int same = memcmp(got, want, n * sizeof *got) == 0;
    free(got);
    return same;
}

static array filled(dt_ctx *ctx, size_t n, int from, int tag) {
    array a = array_make(ctx, n * sizeof(float) + 8);
    float *x = (float *)malloc(n * sizeof *x + 8);
    pattern(x, n, from, tag);
    to_device(ctx, a.at, x, n * sizeof *x);
    free(x);
    return a;
}

enum { LETTERS = 6 };
/* the smallest still travel over sockets */
static const size_t lengths[LETTERS] = { 1, 1024, 1025, 5000, 20011, 3 };

/* Messages around the ring: all are sent at once and received in another order. */
static void mail(dt_comm *world, int turn) {
    dt_ctx *ctx = world->world->ctx;
    int n = dt_comm_size(world), me = dt_comm_rank(world), right = (me + 1) % n,
        left = (me + n - 1) % n;
    dt_work *sends[LETTERS], *recvs[LETTERS];
    array out[LETTERS], in[LETTERS];
    for (int k = 0; k < LETTERS; k++) {
        out[k] = filled(ctx, lengths[k], me, k);
        in[k] = array_make(ctx, lengths[k] * sizeof(float) + 8);
        sends[k] = dt_send_start(world, out[k].at, lengths[k], DT_F32, right, k);
    }
    for (int i = 0; i < LETTERS; i++) {
        int k = (i * 5 + turn) % LETTERS;
        recvs[k] = dt_recv_start(world, in[k].at, lengths[k], DT_F32, left, k);
        if (i % 2) dt_wait(ctx, recvs[k]);
    }
    for (int i = 0; i < LETTERS; i++) {
        int k = (i * 5 + turn) % LETTERS;
        if (i % 2 == 0) dt_wait(ctx, recvs[k]);
        dt_wait(ctx, sends[k]);
        /* after dt_wait a buffer may be overwritten */
        dt_fill_args wipe = { DT_F32, out[k].at, lengths[k], -1 };
        dt_ctx_kernels(ctx)->fill(&wipe, dt_ctx_stream(ctx));
    }
    for (int k = 0; k < LETTERS; k++) {
        CHECK_MSG(holds(ctx, in[k], lengths[k], left, k), "rank %d: message %d of %zu is wrong", me,
            k, lengths[k]);
        array_free(ctx, out[k]);
        array_free(ctx, in[k]);
    }
}

/* Many messages with one tag keep their order; receive from any; all to all; a ring of messages. */
static void more_mail(dt_comm *world) {
    enum { MANY = 12, LONG = 1500 };
    dt_ctx *ctx = world->world->ctx;
    int n = dt_comm_size(world), me = dt_comm_rank(world), right = (me + 1) % n,
        left = (me + n - 1) % n;
    array out[MANY], in = array_make(ctx, LONG * sizeof(float)),
                     all = array_make(ctx, (size_t)n * LONG * 4);
    dt_work *sends[MANY];
    dt_transfer transfers[2 * MAX_RANKS];
    if (!in.at || !all.at) return;
    for (int i = 0; i < MANY; i++) out[i] = filled(ctx, LONG, me, i);
    for (int i = 0; i < MANY; i++)
        sends[i] = dt_send_start(world, out[i].at, i % 3 ? LONG : 4, DT_F32, right, 9);
    for (int i = 0; i < MANY; i++) {
        dt_recv(world, in.at, i % 3 ? LONG : 4, DT_F32, left, 9);
        CHECK(holds(ctx, in, i % 3 ? LONG : 4, left, i));
    }
    for (int i = 0; i < MANY; i++) dt_wait(ctx, sends[i]);
    if (me > 0) dt_send(world, out[me % MANY].at, LONG, DT_F32, 0, 3);
    for (int r = 1, from = -1; me == 0 && r < n; r++) {
        dt_recv_any(world, in.at, LONG, DT_F32, 3, &from);
        CHECK(from > 0 && holds(ctx, in, LONG, from, from % MANY));
    }
    memset(transfers, 0, sizeof transfers);
    for (int r = 0; r < n; r++) {
        transfers[r] =
            (dt_transfer){ .send = out[r % MANY].at, .count = LONG, .peer = r, .tag = 1 };
        transfers[n + r] = (dt_transfer){
            .recv = (char *)all.at + (size_t)r * LONG * 4, .count = LONG, .peer = r, .tag = 1
        };
    }
    CHECK(dt_exchange(world, transfers, 2 * n) == DT_OK);
    for (int r = 0; r < n; r++) {
        array one = { (char *)all.at + (size_t)r * LONG * 4, 0 };
        CHECK(holds(ctx, one, LONG, r, me % MANY));
    }
    for (int i = 0; i < MANY; i++) array_free(ctx, out[i]);
    array_free(ctx, in);
    array_free(ctx, all);
    dt_comm_set_algorithm(world, DT_RING);
    for (int op = 0; op < 4; op++) trial_run((trial){ world, op, 0, 0, 0, 0, 0, 3001 });
    dt_comm_set_algorithm(world, DT_ALGORITHM_AUTO);
}

static dt_status messages(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    for (int turn = 0; turn < j->what; turn++) mail(dt_world(ctx), turn);
    more_mail(dt_world(ctx));
    return dt_error(ctx);
}

static void test_messages(void) {
    for (int n = 1; n <= 4; n++)
        for (int order = 0; order < 3; order++) {
            job j = { .ranks = n, .fn = messages, .what = 4 };
            make_machine(n, (unsigned long long)(100 * n + order), order);
            job_run(&j);
            check_clean(&j, "messages");
        }
}

// ==== 5. Overlap ================================================================================

/* All-reduces on two groups run while the rank computes on the previous result and overwrites the
   send buffers. */
static dt_status overlap(dt_ctx *ctx, void *user) {
    enum { N = 700, STEPS = 6 };
    dt_comm *world = dt_world(ctx), *pair = dt_comm_split(world, dt_ctx_rank(ctx) / 2, 0, "pair");
    const dt_kernels *k = dt_ctx_kernels(ctx);
    void *stream = dt_ctx_stream(ctx);
    int n = dt_comm_size(world), m = dt_comm_size(pair);
    array a = array_make(ctx, N * 4), b = array_make(ctx, N * 4), got = array_make(ctx, N * 4);
    double value = 1 + dt_ctx_rank(ctx), sums[2];
    float host[N];
    (void)user;
    for (int step = 0; step < STEPS && dt_error(ctx) == DT_OK; step++) {
        dt_fill_args first = { DT_F32, a.at, N, value }, second = { DT_F32, b.at, N, 2 * value };
        k->fill(&first, stream);
        dt_work *one = dt_all_reduce_start(world, a.at, a.at, N, DT_F32, DT_SUM);
        k->fill(&second, stream);
        dt_work *two = dt_all_reduce_start(pair, b.at, b.at, N, DT_F32, DT_SUM);
        if (step % 2) dt_wait(ctx, two), two = NULL;
        dt_wait(ctx, one);
        k->move(got.at, a.at, N * 4, stream);
        first.value = second.value = -7; /* no operation reads these any more */
        k->fill(&first, stream);
        if (two) dt_wait(ctx, two);
        from_device(ctx, host, got.at, N * 4);
        sums[0] = n * (n + 1) / 2.0, sums[1] = 2 * value;
        for (int r = 0; r < dt_comm_size(pair) && m > 1; r++)
            sums[1] += dt_comm_world_rank(pair, r) == dt_ctx_rank(ctx)
                           ? 0
                           : 2 * (1.0 + dt_comm_world_rank(pair, r));
        int bad = 0;
        for (int i = 0; i < N; i++) bad += host[i] != (float)sums[0];
        from_device(ctx, host, b.at, N * 4);
        for (int i = 0; i < N; i++) bad += host[i] != (float)sums[1];
        CHECK_MSG(bad == 0, "step %d on rank %d: %d values are wrong", step, dt_ctx_rank(ctx), bad);
    }
    array_free(ctx, a);
    array_free(ctx, b);
    array_free(ctx, got);
    return dt_error(ctx);
}

/* While communicators are made, all ranks wait and no message is pending; this must not count as a
   deadlock. */
static void test_slow(void) {
    job j = { .ranks = 3, .fn = overlap };
    make_machine(3, 1, FAKE_CUDA_RANDOM);
    fake_nccl_slow(0.3);
    job_run(&j);
    check_clean(&j, "slow communicators");
}

static void test_overlap(void) {
    for (int seed = 0; seed < 30; seed++) {
        job j = { .ranks = 2 + seed % 4, .fn = overlap };
        make_machine(j.ranks, (unsigned long long)seed, seed % 3);
        job_run(&j);
        check_clean(&j, "overlap");
    }
}

// ==== 6. Failures ===============================================================================

enum {
    FAILS,
    LATE,
    STAYS_AWAY,
    OTHER_COUNT,
    OTHER_OP,
    HOST_MEMORY,
    FEW_DEVICES,
    ASYNC,
    CIRCLE,
    MIXED,
    MISTAKES
};
static const struct {
    const char *text;
    dt_status status;
    double within;
} mistakes[MISTAKES] = {
    { "rank 1: out of ideas", DT_ERR_ARG, 3 },
    { "timeout 1.0 s in all-reduce f32 x 3000 sum #3 on world", DT_ERR_TIMEOUT, 6 },
    { "rank 1 ended without calling all-reduce #3 on world", DT_ERR_COMM, 3 },
    { "calls all-reduce f32 x 2999 sum", DT_ERR_COMM, 3 },
    { "calls reduce-scatter f32 x 3000 sum", DT_ERR_COMM, 3 },
    { "calls all-reduce f32 x 4 sum in host memory", DT_ERR_COMM, 3 },
    { "Duplicate GPU detected", DT_ERR_COMM, 3 },
    { "NCCL: a communicator", DT_ERR_COMM, 3 },
    { "deadlock: rank 0 waits in receive f32 x 3000", DT_ERR_COMM, 3 },
    { "rank 0's buffer is in a device's memory, this rank's is not", DT_ERR_COMM, 3 },
};

/* CIRCLE: each rank waits for a message that only NCCL would carry. MIXED: a message from a device's
   memory to the host's. */
static void failing_message(dt_ctx *ctx, int what, array a) {
    dt_comm *world = dt_world(ctx);
    int me = dt_ctx_rank(ctx);
    float *host = (float *)malloc(3000 * sizeof *host);
    if (what == CIRCLE) dt_recv(world, a.at, 3000, DT_F32, (me + 1) % 3, 0);
    if (what == MIXED && me == 0) dt_send(world, a.at, 3000, DT_F32, 1, 0);
    if (what == MIXED && me == 1) dt_recv(world, host, 3000, DT_F32, 0, 0);
    free(host);
}

static dt_status failing_call(dt_ctx *ctx, const job *j, array a, array b) {
    dt_comm *world = dt_world(ctx);
    int bad = dt_ctx_rank(ctx) == 1;
    float host[4];
    double until = dt_host_default()->now(NULL) + 4;
    dt_fill_args args = { DT_F32, a.at, 9000, 1 };
    if (!b.at) return dt_error(ctx);
    dt_ctx_kernels(ctx)->fill(&args, dt_ctx_stream(ctx));
    for (int step = 0; step < 120 && j->what != LATE && j->what != STAYS_AWAY; step++)
        dt_comm_step(world);
    dt_all_reduce(world, a.at, b.at, 3000, DT_F32, DT_SUM);
    if (j->what >= CIRCLE) failing_message(ctx, j->what, a);
    if (bad && j->what == FAILS) return dt_fail(ctx, DT_ERR_ARG, "out of ideas");
    if (bad && j->what == STAYS_AWAY) return from_device(ctx, host, b.at, 16), dt_error(ctx);
    while (
        bad && j->what == LATE && dt_host_default()->now(NULL) < until && dt_error(ctx) == DT_OK) {
    }
    if (bad && j->what == OTHER_COUNT)
        dt_all_reduce(world, a.at, b.at, 2999, DT_F32, DT_SUM);
    else if (bad && j->what == OTHER_OP)
        dt_reduce_scatter(world, a.at, b.at, 3000, DT_F32, DT_SUM);
    else if (bad && j->what == HOST_MEMORY)
        dt_all_reduce(world, host, host, 4, DT_F32, DT_SUM);
    else
        dt_all_reduce(world, a.at, b.at, 3000, DT_F32, DT_SUM);
    from_device(ctx, host, b.at, 16);
    return dt_error(ctx);
}

static dt_status failing_run(dt_ctx *ctx, void *user) {
    array a = array_make(ctx, 9000 * 4), b = array_make(ctx, 9000 * 4);
    dt_status status = failing_call(ctx, (const job *)user, a, b);
    array_free(ctx, a);
    array_free(ctx, b);
    return status;
}

/* Every rank ends in time with the same reason; and the next run in the same processes succeeds. */
static void test_mistakes(void) {
    for (int what = 0; what < MISTAKES; what++)
        for (int order = 0; order < 3; order++) {
            job j = { .ranks = 3,
                .fn = failing_run,
                .what = what,
                .quiet = 1,
                .timeout_s = what == LATE ? 1 : 30 };
            make_machine(
                what == FEW_DEVICES ? 2 : 3, (unsigned long long)(what * 10 + order), order);
            if (what == ASYNC) fake_nccl_fail(1, 1, ncclSystemError);
            job_run(&j);
            for (int r = 0; r < 3; r++)
                CHECK_MSG(j.report[r].status != DT_OK &&
                              strstr(j.report[r].text, mistakes[what].text) &&
                              in_time(j.took[r], mistakes[what].within),
                    "mistake %d, rank %d after %.1f s: %s, %s", what, r, j.took[r],
                    dt_status_name(j.report[r].status), j.report[r].text);
            fake_cuda_clear_error();
            job again = { .ranks = what == FEW_DEVICES ? 2 : 3, .fn = overlap };
            job_run(&again);
            check_clean(&again, "a run after a failure");
        }
}

// ==== 7. Pending operations on the device =======================================================

/* The device has a pending operation that other ranks have not called yet. Neither a message nor
   freeing memory may wait for it; and when the context fails, operations that hang on several
   communicators are aborted together. */
enum { BAD_INDEX, SEND_BEHIND, FREE_STARTED, NO_MEMORY, HANGS_ONCE, HANGS_TWICE, GOING_ON };
static const struct {
    const char *text;
    dt_status status;
} pending_cases[GOING_ON] = {
    [BAD_INDEX] = { "outside of its table", DT_ERR_ARG },
    [SEND_BEHIND] = { "timeout 1.0 s", DT_ERR_TIMEOUT },
    [HANGS_ONCE] = { "timeout 1.0 s", DT_ERR_TIMEOUT },
    [HANGS_TWICE] = { "timeout 1.0 s", DT_ERR_TIMEOUT },
};
enum { SOME = 5000 };

static double seconds(void) { return dt_host_default()->now(NULL); }

static void sleep_past_timeout(void) { dt_host_default()->sleep(NULL, 2.5); }

/* Sending a message does not report an error found by a kernel; the next wait does. */
static void bad_index(dt_ctx *ctx, array a, array b) {
    const dt_kernels *k = dt_ctx_kernels(ctx);
    int32_t ids[8] = { 0, 1, 2, 3, 99, 1, 2, 3 };
    if (dt_ctx_rank(ctx) == 1) dt_recv(dt_world(ctx), b.at, SOME, DT_F32, 0, 0);
    if (dt_ctx_rank(ctx) > 0) return;
    to_device(ctx, b.at, ids, sizeof ids);
    dt_embedding_args e = { .dtype = DT_F32,
        .out = (float *)b.at + 64,
        .table = (float *)b.at + 200,
        .ids = (int32_t *)b.at,
        .rows = 8,
        .cols = 8,
        .vocab = 4,
        .table_rows = 4 };
    CHECK(k->embedding(&e, dt_ctx_stream(ctx)) == DT_OK);
    for (int i = 0; i < 300; i++)
        k->fill(&(dt_fill_args){ DT_F32, a.at, 64, i }, dt_ctx_stream(ctx));
    dt_send(dt_world(ctx), a.at, SOME, DT_F32, 1, 0);
}

static void send_behind(dt_ctx *ctx, array a, array b) {
    dt_comm *world = dt_world(ctx);
    if (dt_ctx_rank(ctx) == 1) sleep_past_timeout();
    if (dt_ctx_rank(ctx) == 1) return;
    dt_all_reduce(world, a.at, a.at, SOME, DT_F32, DT_SUM);
    double begin = seconds();
    if (dt_ctx_rank(ctx) == 0)
        dt_send(world, b.at, SOME, DT_F32, 2, 0);
    else
        dt_recv(world, b.at, SOME, DT_F32, 0, 0);
    CHECK_MSG(dt_error(ctx) == DT_OK && in_time(seconds() - begin, 0.9), "a message took %.1f s",
        seconds() - begin);
}

/* Rank 1 begins the all-reduce after it has received a message that rank 0 sends after freeing
   memory. */
static void free_started(dt_ctx *ctx, array a) {
    dt_comm *world = dt_world(ctx);
    array kept = array_make(ctx, 1 << 20), words = array_make(ctx, 64);
    void *first = kept.at;
    if (!words.at) return;
    if (dt_ctx_rank(ctx) == 1) dt_recv(world, words.at, 4, DT_F32, 0, 0);
    dt_work *work = dt_all_reduce_start(world, a.at, a.at, SOME, DT_F32, DT_SUM);
    if (dt_ctx_rank(ctx) == 0) {
        for (int i = 0; i < 50; i++) dt_test(ctx, work);
        /* the operation cannot complete yet; without this answer, freeing would wait for it */
        if (CHECK_MSG(!dt__drain(ctx, 0), "a pending all-reduce counts as completed")) {
            array_free(ctx, kept);
            kept = array_make(ctx, 1 << 20);
            CHECK(kept.at == first);
            void *pinned = dt_pin(ctx, 100, "some");
            dt_unpin(ctx, pinned, 100);
        }
        dt_send(world, words.at, 4, DT_F32, 1, 0);
    }
    dt_wait(ctx, work);
    array_free(ctx, kept);
    array_free(ctx, words);
}

/* Cached memory must not make an allocation of another size fail: the allocation waits for the
   started operations and frees the cache. */
static void no_memory(dt_ctx *ctx, array a) {
    enum { MUCH = 6 << 20 };
    array kept = array_make(ctx, MUCH);
    dt_work *work = dt_all_reduce_start(dt_world(ctx), a.at, a.at, SOME, DT_F32, DT_SUM);
    if (dt_ctx_rank(ctx) == 1) dt_host_default()->sleep(NULL, 0.2);
    array_free(ctx, kept);
    kept = array_make(ctx, MUCH + 4096);
    CHECK_MSG(kept.at, "%s", dt_error_text(ctx));
    dt_wait(ctx, work);
    array_free(ctx, kept);
}

static void hang_in_reduce(dt_ctx *ctx, array a, array b, dt_comm *twin) {
    if (dt_ctx_rank(ctx) == 1) sleep_past_timeout();
    if (dt_ctx_rank(ctx) == 1) return;
    dt_work *one = twin ? dt_all_reduce_start(twin, b.at, b.at, SOME, DT_F32, DT_SUM) : NULL;
    dt_work *two = dt_all_reduce_start(dt_world(ctx), a.at, a.at, SOME, DT_F32, DT_SUM);
    if (one) dt_wait(ctx, one);
    dt_wait(ctx, two);
}

static dt_status pending_on_device(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    dt_comm *twin = dt_comm_split(dt_world(ctx), 0, 0, "twin");
    array a = array_make(ctx, SOME * 4), b = array_make(ctx, SOME * 4);
    if (!b.at) return dt_error(ctx);
    /* after this calls are no longer compared */
    for (int step = 0; step < 120; step++) dt_comm_step(dt_world(ctx));
    dt_all_reduce(twin, a.at, a.at, SOME, DT_F32, DT_MAX);
    dt_all_reduce(dt_world(ctx), a.at, a.at, SOME, DT_F32, DT_MAX);
    dt__sync(ctx);
    if (j->what == BAD_INDEX) bad_index(ctx, a, b);
    if (j->what == SEND_BEHIND) send_behind(ctx, a, b);
    if (j->what == FREE_STARTED) free_started(ctx, a);
    if (j->what == NO_MEMORY) no_memory(ctx, a);
    if (j->what == HANGS_ONCE || j->what == HANGS_TWICE)
        hang_in_reduce(ctx, a, b, j->what == HANGS_TWICE ? twin : NULL);
    dt__sync(ctx);
    array_free(ctx, a);
    array_free(ctx, b);
    return dt_error(ctx);
}

static void test_pending_operations(void) {
    for (int what = 0; what < GOING_ON; what++)
        for (int order = 0; order < (pending_cases[what].status == DT_ERR_TIMEOUT ? 1 : 3);
             order++) {
            job j = { .ranks = what == SEND_BEHIND ? 3 : 2,
                .fn = pending_on_device,
                .what = what,
                .quiet = 1 };
            if (pending_cases[what].status == DT_ERR_TIMEOUT) j.timeout_s = 1;
            make_machine(j.ranks, (unsigned long long)(what * 10 + order), order);
            if (what == NO_MEMORY) fake_cuda_memory(10 << 20);
            job_run(&j);
            if (!pending_cases[what].text)
                check_clean(&j, "an all-reduce that one rank begins late");
            for (int r = 0; r < j.ranks && pending_cases[what].text; r++)
                CHECK_MSG(j.report[r].status == pending_cases[what].status &&
                              strstr(j.report[r].text, pending_cases[what].text) &&
                              in_time(j.took[r], 4),
                    "case %d, rank %d after %.1f s: %s, %s", what, r, j.took[r],
                    dt_status_name(j.report[r].status), j.report[r].text);
            CHECK_MSG(!fake_cuda_error(), "case %d: %s", what, fake_cuda_error());
            fake_cuda_clear_error();
        }
}

// ==== 8. A communicator provided by the caller ==================================================

/* The caller provides the transport, too: queues of packets between threads. what 1: rank 0 is the
   only rank to call an all-reduce. */
enum { ATTACHED = 4, PACKETS = 64 };
typedef struct packets {
    pthread_mutex_t lock;
    uint64_t sent, received;
    size_t bytes[PACKETS];
    uint64_t data[PACKETS][DT_PACKET_BYTES / 8];
} packets;
static packets queues[ATTACHED][ATTACHED];
static ncclUniqueId given_id;

typedef struct attached {
    int rank, fails;
    pthread_t thread;
    uint64_t packet[DT_PACKET_BYTES / 8];
} attached;

static int queue_send(
    void *user, int to, const void *head, size_t head_bytes, const void *body, size_t body_bytes) {
    packets *q = &queues[((attached *)user)->rank][to];
    pthread_mutex_lock(&q->lock);
    int taken = q->sent - q->received < PACKETS;
    char *at = (char *)q->data[q->sent % PACKETS];
    if (taken) {
        memcpy(at, head, head_bytes);
        if (body_bytes) memcpy(at + head_bytes, body, body_bytes);
        q->bytes[q->sent++ % PACKETS] = head_bytes + body_bytes;
    }
    pthread_mutex_unlock(&q->lock);
    return taken;
}

static const void *queue_recv(void *user, int from, int *sender, size_t *bytes) {
    attached *a = (attached *)user;
    int came = 0;
    (void)from;
    for (int r = 0; r < ATTACHED && !came; r++) {
        packets *q = &queues[r][a->rank];
        pthread_mutex_lock(&q->lock);
        came = q->received < q->sent;
        if (came) {
            *sender = r;
            *bytes = q->bytes[q->received % PACKETS];
            memcpy(a->packet, q->data[q->received++ % PACKETS], *bytes);
        }
        pthread_mutex_unlock(&q->lock);
    }
    return came ? a->packet : NULL;
}

static void hang_alone(dt_ctx *ctx, dt_comm *own) {
    array a = array_make(ctx, SOME * 4);
    for (int step = 0; step < 120; step++) dt_comm_step(own);
    if (dt_comm_rank(own) == 0)
        dt_all_reduce(own, a.at, a.at, SOME, DT_F32, DT_SUM);
    else
        sleep_past_timeout();
    dt__sync(ctx);
    array_free(ctx, a);
}

static void *attached_main(void *p) {
    attached *a = (attached *)p;
    ncclComm_t comm = NULL;
    dt_host host = *dt_host_default();
    if (a->fails) host.log = log_quietly;
    dt_ctx *ctx =
        dt_ctx_make((dt_ctx_desc){ .rank = a->rank, .local_rank = a->rank, .host = &host });
    dt_transport transport = {
        .name = "queues", .user = a, .send = queue_send, .recv = queue_recv
    };
    CHECK(ncclCommInitRank(&comm, ATTACHED, given_id, a->rank) == ncclSuccess);
    dt_comm *own = dt_comm_attach(ctx, (dt_attach_desc){ .rank = a->rank,
                                           .transport = &transport,
                                           .size = ATTACHED,
                                           .timeout_s = a->fails ? 1 : 30,
                                           .nccl = comm });
    CHECK(own && dt_error(ctx) == DT_OK);
    if (own) sweep(own, 40);
    dt_comm *pair = own ? dt_comm_split(own, a->rank / 2, 0, "pair") : NULL;
    if (pair) sweep(pair, 100);
    dt_barrier(own);
    double begin = seconds();
    if (a->fails) hang_alone(ctx, own);
    dt_comm_detach(ctx, DT_OK);
    CHECK_MSG(in_time(seconds() - begin, 4) && a->fails
                  ? (dt_error(ctx) == DT_ERR_TIMEOUT) == (a->rank == 0)
                  : dt_error(ctx) == DT_OK,
        "rank %d after %.1f s: %s", a->rank, seconds() - begin, dt_error_text(ctx));
    /* after a failure the communicator has been aborted */
    if (dt_error(ctx) == DT_OK) CHECK(ncclCommDestroy(comm) == ncclSuccess);
    dt_ctx_free(ctx);
    return NULL;
}

static void test_attach(int fails) {
    attached ranks[ATTACHED];
    memset(queues, 0, sizeof queues);
    make_machine(ATTACHED, 5, FAKE_CUDA_RANDOM);
    ncclGetUniqueId(&given_id);
    for (int i = 0; i < ATTACHED * ATTACHED; i++)
        pthread_mutex_init(&queues[i / ATTACHED][i % ATTACHED].lock, NULL);
    for (int r = 0; r < ATTACHED; r++) {
        ranks[r].rank = r;
        ranks[r].fails = fails;
        pthread_create(&ranks[r].thread, NULL, attached_main, &ranks[r]);
    }
    for (int r = 0; r < ATTACHED; r++) pthread_join(ranks[r].thread, NULL);
    CHECK_MSG(!fake_cuda_error() && fake_cuda_leaks(1) == 0, "%s", fake_cuda_error());
}

/* Rank 0 logs one notice that kernels may be loaded lazily, unless CUDA_MODULE_LOADING is EAGER,
   which it is in all later tests. */
static void test_loading(void) {
    static const char *const set[] = { NULL, "LAZY", "EAGER" };
    for (int i = 0; i < 3; i++) {
        job j = { .ranks = 3, .fn = overlap, .counted = 1 };
        if (set[i])
            setenv("CUDA_MODULE_LOADING", set[i], 1);
        else
            unsetenv("CUDA_MODULE_LOADING");
        make_machine(3, 1, FAKE_CUDA_RANDOM);
        notices = 0;
        job_run(&j);
        check_clean(&j, "loading");
        CHECK_MSG(notices == (i < 2), "CUDA_MODULE_LOADING %s: %d notices",
            set[i] ? set[i] : "not set", notices);
    }
}

/* A trace lies around NCCL's operations until the groups have ended. */
static dt_status traced(dt_ctx *ctx, void *user) {
    dt_status status = dt_trace_start(ctx, 1000);
    return status ? status : collectives(ctx, user);
}

static void test_trace(void) {
    job j = { .ranks = 2, .fn = traced, .what = 17 };
    make_machine(2, 3, FAKE_CUDA_RANDOM);
    job_run(&j);
    check_clean(&j, "trace");
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    test_loading();
    test_collectives();
    test_trace();
    test_messages();
    test_overlap();
    test_slow();
    test_mistakes();
    test_pending_operations();
    test_attach(0);
    test_attach(1);
    return check_done("test_nccl");
}
#endif
