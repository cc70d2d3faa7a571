/* test_nccl.c - ranks with a GPU each, through NCCL, on a machine without one

   The library is linked with fake_cuda.c, which runs what is put into streams late and in a random order, and catches
   what NCCL does not forgive: another order of operations on another rank, a call while one is in progress. A rank is a
   thread here that calls dt_run as its own process would, and meets the others over sockets. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "check.h"
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

#define DT_USE_CUDA
#define DT_USE_NCCL
#define DT_NCCL_WIDE 96     /* windows that the tests' sums do not fit */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include "fake_cuda.h"
#include "rank_data.h"

// ==== 1. Jobs =======================================================================================================

typedef dt_status (*rank_fn)(dt_ctx *ctx, void *user);
typedef struct job {
    int       ranks, port, attach;
    double    timeout_s;
    rank_fn   fn;
    int       what;
    dt_report report[MAX_RANKS];
    double    took[MAX_RANKS];
    char      fault[64];
    int       quiet;
} job;
typedef struct seat { job *job; int rank; } seat;

static void log_quietly(void *user, int level, int rank, const char *text) { (void)user, (void)level, (void)rank, (void)text; }

/* A port of the loopback that nobody has now. */
static int free_port(void) {
    struct sockaddr_in at;
    socklen_t          n = sizeof at;
    int                fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, (struct sockaddr *)&at, n) != 0 || getsockname(fd, (struct sockaddr *)&at, &n) != 0) exit(1);
    close(fd);
    return ntohs(at.sin_port);
}

static void *seat_main(void *p) {
    seat   *s = (seat *)p;
    job    *j = s->job;
    dt_host host = *dt_host_default();
    char    place[32];
    double  begin = host.now(NULL);
    snprintf(place, sizeof place, "127.0.0.1:%d", j->port);
    if (j->quiet) host.log = log_quietly;
    dt_run_desc desc = { .ranks = j->ranks, .backend = DT_BACKEND_NCCL, .timeout_s = j->timeout_s, .host = &host,
        .report = &j->report[s->rank], .rank = s->rank, .rendezvous = place, .fault = j->fault[0] ? j->fault : NULL };
    dt_run(desc, j->fn, j);
    j->took[s->rank] = host.now(NULL) - begin;
    return NULL;
}

static void job_run(job *j) {
    pthread_t threads[MAX_RANKS];
    seat      seats[MAX_RANKS];
    j->port = free_port();
    if (j->timeout_s == 0) j->timeout_s = 60;
    for (int r = 0; r < j->ranks; r++) {
        seats[r].job = j;
        seats[r].rank = r;
        pthread_create(&threads[r], NULL, seat_main, &seats[r]);
    }
    for (int r = 0; r < j->ranks; r++) pthread_join(threads[r], NULL);
}

static void machine(int devices, unsigned long long seed, int order) {
    fake_cuda_reset();
    fake_cuda_devices(devices);
    fake_cuda_seed(seed);
    fake_cuda_order(order);
    fake_cuda_forbid_default_stream(1);
}

/* All ranks ended well, CUDA and NCCL had nothing to say, and nothing is left. */
static void check_clean(const job *j, const char *what) {
    for (int r = 0; r < j->ranks; r++)
        CHECK_MSG(j->report[r].status == DT_OK, "%s: rank %d: %s", what, r, j->report[r].text);
    CHECK_MSG(!fake_cuda_error(), "%s: %s", what, fake_cuda_error());
    CHECK_MSG(fake_cuda_leaks(1) == 0, "%s: something was not given back", what);
}

// ==== 2. Arrays on the device =======================================================================================

static void to_device(dt_ctx *ctx, void *device, const void *host, size_t bytes) {
    if (bytes) dt_ctx_kernels(ctx)->move(device, host, bytes, dt_ctx_stream(ctx));
}

static void from_device(dt_ctx *ctx, void *host, const void *device, size_t bytes) {
    dt__move(ctx, host, device, bytes);
    dt__sync(ctx);
}

typedef struct array { void *at; size_t bytes; } array;
static array array_make(dt_ctx *ctx, size_t bytes) {
    array a = { dt_alloc(ctx, DT_MEM_COMM, bytes, "a test's array"), bytes };
    return a;
}
static void array_free(dt_ctx *ctx, array a) { dt_free(ctx, DT_MEM_COMM, a.at, a.bytes); }

// ==== 3. Collectives ================================================================================================

static const dt_dtype types[] = { DT_F32, DT_F64, DT_I32, DT_BF16, DT_F16 };
static const dt_op    redops[] = { DT_SUM, DT_AVG, DT_MAX, DT_MIN, DT_PROD };

/* A sum in another order; of 16-bit numbers it is rounded once, from f32. */
static int near(double got, double want, dt_dtype type, int n) {
    double tol = type == DT_F64 ? 1e-14 : type == DT_BF16 ? 1.0 / 128 : type == DT_F16 ? 1.0 / 1024 : 1e-6;
    return fabs(got - want) <= tol * (fabs(want) + 100.0 * n * (narrow(type) ? 1e-5 : 1));
}

typedef struct trial { dt_comm *comm; int op, t, o, root, in_place, started; size_t count; } trial;
enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, ALL_TO_ALL_V, BROADCAST, OPS };

static size_t v_count(const trial *c, int i, int j) { return mix((uint64_t)(i * 64 + j) + c->count) % (c->count + 1); }

static dt_work *call(const trial *c, const void *send, void *recv, const size_t *out, const size_t *in) {
    dt_comm *comm = c->comm;
    dt_dtype t = types[c->t];
    dt_op    op = redops[c->o];
    size_t   n = c->count;
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

/* What this rank must hold at element i of its result. */
static double wanted(const trial *c, size_t i, const size_t *in) {
    int    n = dt_comm_size(c->comm), me = dt_comm_rank(c->comm), r = (int)(c->count ? i / c->count : 0);
    size_t at = c->count ? i % c->count : 0, first = 0;
    dt_dtype t = types[c->t];
    switch (c->op) {
    case ALL_REDUCE:
    case REDUCE: return naive(n, i, t, redops[c->o]);
    case REDUCE_SCATTER: return naive(n, (size_t)me * c->count + i, t, redops[c->o]);
    case ALL_GATHER:
    case GATHER: return held(r, at, t, DT_SUM);
    case SCATTER: return held(c->root, (size_t)me * c->count + i, t, DT_SUM);
    case ALL_TO_ALL: return held(r, (size_t)me * c->count + at, t, DT_SUM);
    case ALL_TO_ALL_V:
        for (r = 0; i >= in[r]; r++) i -= in[r];
        for (int to = 0; to < me; to++) first += v_count(c, r, to);
        return held(r, first + i, t, DT_SUM);
    default: return held(c->root, i, t, DT_SUM);
    }
}

static void trial_run(trial c) {
    dt_ctx  *ctx = c.comm->world->ctx;
    int      n = dt_comm_size(c.comm), me = dt_comm_rank(c.comm), root = me == c.root;
    int      cut = c.op == REDUCE_SCATTER || c.op == SCATTER || c.op == ALL_TO_ALL;
    int      wide = c.op == ALL_GATHER || c.op == GATHER || c.op == ALL_TO_ALL;
    int      has = root || (c.op != REDUCE && c.op != GATHER);
    size_t   size = dt_dtype_size(types[c.t]), out[MAX_RANKS], in[MAX_RANKS], sent = 0, came = 0, bad = 0;
    dt_op    op = c.op <= REDUCE_SCATTER ? redops[c.o] : DT_SUM;
    for (int r = 0; r < n; r++) sent += out[r] = v_count(&c, me, r), came += in[r] = v_count(&c, r, me);
    size_t sends = c.op == ALL_TO_ALL_V ? sent : c.count * (size_t)(cut ? n : 1);
    size_t takes = c.op == ALL_TO_ALL_V ? came : c.count * (size_t)(wide ? n : 1);
    int    one = (c.in_place && c.op < ALL_TO_ALL) || c.op == BROADCAST;
    array  a = array_make(ctx, (sends + takes) * size + 8), b = array_make(ctx, takes * size + 8);
    char  *host = (char *)malloc((sends + takes) * size + 8), *send = (char *)a.at, *recv = (char *)b.at;
    if (one) recv = send + (c.op == REDUCE_SCATTER || c.op == SCATTER ? (size_t)me * c.count * size : 0);
    if (one && (c.op == ALL_GATHER || c.op == GATHER)) recv = send, send += (size_t)me * c.count * size;
    for (size_t i = 0; i < sends; i++) put(host, types[c.t], i, held(me, i, types[c.t], op));
    if (c.op != BROADCAST || root) to_device(ctx, send, host, sends * size);
    dt_work *work = call(&c, send, recv, out, in);
    dt_wait(ctx, work);
    from_device(ctx, host, recv, takes * size);
    for (size_t i = 0; i < takes && has; i++) {
        double want = wanted(&c, i, in), got = get(host, types[c.t], i);
        bad += !(c.op <= REDUCE_SCATTER && op != DT_MAX && op != DT_MIN ? near(got, want, types[c.t], n) : got == want);
    }
    CHECK_MSG(bad == 0 && dt_error(ctx) == DT_OK, "operation %d %s x %zu by %d, root %d, %d ranks, rank %d, in place "
              "%d: %zu of %zu wrong", c.op, dt_dtype_name(types[c.t]), c.count, c.o, c.root, n, me, c.in_place, bad, takes);
    free(host);
    array_free(ctx, a);
    array_free(ctx, b);
}

static void sweep(dt_comm *comm, int stride) {
    static const size_t counts[] = { 0, 1, 17, 301, 5003 };
    int                 number = 0;
    for (int k = 0; k < 5; k++)
        for (int t = 0; t < 5; t++)
            for (int op = 0; op < OPS; op++)
                for (int o = 0; o < (op <= REDUCE_SCATTER ? 5 : 1); o++)
                    for (int in_place = 0; in_place < 2; in_place++) {
                        trial c = { comm, op, t, o, number % dt_comm_size(comm), in_place, 0, counts[k] };
                        if (mix((uint64_t)++number) % (uint64_t)stride == 0) trial_run(c);
                    }
}

static dt_status collectives(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    dt_comm   *world = dt_world(ctx);
    int        n = dt_comm_size(world), me = dt_comm_rank(world);
    sweep(world, j->what);
    dt_comm *odd = dt_comm_split(world, me % 2, -me, "odd"), *few = dt_comm_split(world, me ? 0 : -1, 0, "few");
    dt_comm *again = dt_comm_split(odd, 0, 0, "again");
    CHECK(dt_comm_size(odd) == (n + 1 - me % 2) / 2 && (few == NULL) == (me == 0));
    sweep(odd, 4 * j->what);
    if (few) sweep(few, 4 * j->what);
    sweep(again, 8 * j->what);
    return dt_error(ctx);
}

static void test_collectives(void) {
    for (int n = 1; n <= 5; n++)
        for (int order = 0; order < 3; order++) {
            job j = { .ranks = n, .fn = collectives, .what = n == 2 ? 3 : 17 };
            machine(n, (unsigned long long)(10 * n + order), order);
            job_run(&j);
            check_clean(&j, "collectives");
        }
}

int main(void) {
    test_collectives();
    return check_done("test_nccl");
}
#endif
