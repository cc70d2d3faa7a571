/* comm_cases.h - cases for collectives and messages that are the same for every backend: threads,
   forks, sockets, MPI

       cases c = cases_make(4, 1);      before the ranks start: makes the data
       dt_run(desc, comm_cases, &c);    every rank, with its own copy of c or one for all
       cases_free(&c);

   Expected results are computed naively and compared bit for bit. Each wrong result is a failed
   check of check.h in the process of its rank; the program that starts processes adds up their
   counters. c.hash[rank] covers everything that the rank received in private memory; it must not
   depend on the backend.

   Backends differ only in reach_of below. Included after dt_comm.h with its implementation. */
#ifndef COMM_CASES_H
#define COMM_CASES_H

#include "tests/comm/rank_data.h"

#include <time.h>

/* The memory of other ranks that a rank can access. REACH_NONE (a transport): all data goes as
   messages, which are counted. REACH_ALL (threads): the backend's own algorithm needs no messages,
   and the placement of buffers does not matter. REACH_RANGE (forks, MPI ranks on one machine): own
   algorithm as well, but a buffer is in the shared memory segment or not, so the cases are repeated
   with each of the PLACES. */
enum { REACH_NONE, REACH_ALL, REACH_RANGE };
static int reach_of(const dt_comm *comm) {
    const dt__shared *shared = comm->world->shared;
    return !comm->group->members ? REACH_NONE : shared->separate_memory ? REACH_RANGE : REACH_ALL;
}

static const dt_dtype types[] = { DT_F32, DT_F64, DT_I32, DT_BF16, DT_F16, DT_U8, DT_I64 };
enum { TYPES = sizeof types / sizeof *types, ALL_TYPES = (1 << TYPES) - 1, BYTES = 1 << 5 };
static const dt_op redops[] = { DT_SUM, DT_AVG, DT_MAX, DT_MIN, DT_PROD };
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
static const char *const op_names[] = { "all-reduce", "reduce", "reduce-scatter", "all-gather",
    "gather", "scatter", "all-to-all", "all-to-all-v", "broadcast" };
enum { IN_MALLOC, IN_RANGE, IN_BOTH, PLACES };

/* OVER_EAGER: the smallest number of elements that exceeds DT_EAGER_BYTES. */
#define OVER_EAGER ((size_t)-1)
/* A count too long for the short-data algorithms. It is tested a quarter as often, because checking
   it is slow. */
enum { LONG = 5003 };

typedef struct cases {
    int n, stride; /* number of ranks; the sweep runs one in `stride` trials */
    unsigned type_set, algorithm_set;
    int all_ops, all_roots, sweep_only;
    size_t counts[9];
    int n_counts;
    /* in: rank r's send data, for sums and for DT_PROD; sum: the expected reductions */
    unsigned char *in[TYPES][2][MAX_RANKS], *sum[TYPES][5];
    uint64_t hash[MAX_RANKS];
} cases;

static size_t count_of(size_t count, dt_dtype dtype) {
    return count == OVER_EAGER ? DT_EAGER_BYTES / dt_dtype_size(dtype) + 1 : count;
}

/* ---- data ---- */

static void cases_free(cases *s) {
    for (int t = 0; t < TYPES; t++) {
        for (int r = 0; r < s->n; r++) free(s->in[t][0][r]), free(s->in[t][1][r]);
        for (int o = 0; o < 5; o++) free(s->sum[t][o]);
    }
    memset(s, 0, sizeof *s);
}

static void sums_make(unsigned char *into, int n, size_t first, size_t count, int t, int o) {
    for (size_t i = 0; i < count; i++) put_naive(into, types[t], i, n, first + i, redops[o]);
}

static void data_make(cases *s) {
    for (int t = 0; t < TYPES; t++) {
        size_t m = 0;
        if (!(s->type_set >> t & 1)) continue;
        for (int k = 0; k < s->n_counts; k++)
            if (count_of(s->counts[k], types[t]) > m) m = count_of(s->counts[k], types[t]);
        m *= (size_t)s->n;
        for (int kind = 0; kind < 1 + s->all_ops; kind++) {
            for (int r = 0; r < s->n; r++) {
                s->in[t][kind][r] = (unsigned char *)malloc(m * 8 + 8);
                for (size_t i = 0; i < m; i++)
                    put_sent(s->in[t][kind][r], types[t], i, r, i, kind ? DT_PROD : DT_SUM);
            }
        }
        for (int o = 0; o < (s->all_ops ? 5 : 1); o++) {
            s->sum[t][o] = (unsigned char *)malloc(m * 8 + 8);
            sums_make(s->sum[t][o], s->n, 0, m, t, o);
        }
    }
}

/* Makes all cases for n ranks; for many ranks with fewer types and counts. */
/* `stride` is that of all cases (check_all_cases); else half as many run. */
static int stride_of(int stride) { return check_all_cases() ? stride : 2 * stride; }

static cases cases_make(int n, int stride) {
    size_t few[] = { 0, 1, (size_t)n - 1, (size_t)n, (size_t)n + 1, 17, OVER_EAGER, LONG },
           many[] = { 1, 17, 33, 300 };
    cases s;
    memset(&s, 0, sizeof s);
    s.n = n;
    s.stride = stride_of(stride);
    s.type_set = n <= 9 ? ALL_TYPES : 1 | 8;
    s.algorithm_set = 31;
    s.all_ops = n <= 9;
    s.all_roots = n <= 5;
    s.sweep_only = n > 9;
    s.n_counts = n <= 9 ? 8 : 4;
    memcpy(s.counts, n <= 9 ? few : many, (size_t)s.n_counts * sizeof *few);
    data_make(&s);
    return s;
}

/* Cases that need several windows of 262,144 bytes; sizes are not multiples of a window. */
__attribute__((unused)) static cases cases_windows(int n, int stride) {
    cases s;
    memset(&s, 0, sizeof s);
    s.n = n;
    s.stride = stride_of(stride);
    s.type_set = n == 3 ? 1 | 8 : 1;
    s.algorithm_set = n == 3 ? 31 : 1 | 1 << DT_DIRECT;
    s.sweep_only = 1;
    s.n_counts = 2;
    s.counts[0] = 100003, s.counts[1] = 250007;
    data_make(&s);
    return s;
}

/* Bytes: counts that no larger type divides, from one byte up to several windows. */
__attribute__((unused)) static cases cases_bytes(int n, int stride) {
    static const size_t counts[] = { 1, 3, 5, DT_EAGER_BYTES + 1, (1 << 20) + 1 };
    cases s;
    memset(&s, 0, sizeof s);
    s.n = n;
    s.stride = stride_of(stride);
    s.type_set = BYTES;
    s.algorithm_set = 31;
    s.all_ops = s.sweep_only = 1;
    s.n_counts = 5;
    memcpy(s.counts, counts, sizeof counts);
    data_make(&s);
    return s;
}

static void fold_hash(uint64_t *hash, const void *p, size_t bytes) {
    const unsigned char *c = (const unsigned char *)p;
    uint64_t eight, h = *hash;
    for (; bytes >= 8; bytes -= 8, c += 8) {
        memcpy(&eight, c, 8);
        h = (h ^ eight) * 1099511628211u;
        h ^= h >> 32;
    }
    for (; bytes > 0; bytes--, c++) h = (h ^ *c) * 1099511628211u;
    *hash = h;
}

/* ---- 1. one operation ---- */

enum { EDGE = 64 };
typedef struct area {
    unsigned char *raw, *p;
    size_t bytes;
    int in_range;
} area;

typedef struct trial {
    dt_comm *comm;
    dt_ctx *ctx;
    cases *all;
    dt_algorithm algorithm;
    int op, t, o, root, in_place, place, started;
    size_t count;
    uint64_t number; /* equal on all ranks */
    area a, b;       /* valid from trial_begin to trial_end; b equals a for in-place trials */
    unsigned char *send, *recv;
    size_t send_bytes, recv_bytes, out[MAX_RANKS], in[MAX_RANKS];
    dt_work *work;
    dt_status status;
} trial;

static trial trial_make(dt_comm *comm, cases *all) {
    trial c;
    memset(&c, 0, sizeof c);
    c.comm = comm;
    c.ctx = comm->world->ctx;
    c.all = all;
    return c;
}

static area area_make(const trial *c, size_t bytes, int which) {
    area a;
    a.in_range =
        c->place == IN_RANGE ||
        (c->place == IN_BOTH &&
            (mix(c->number * 64 + (uint64_t)dt_comm_rank(c->comm) * 2 + (uint64_t)which) & 1));
    a.bytes = bytes;
    a.raw = (unsigned char *)(a.in_range ? dt_alloc(c->ctx, DT_MEM_COMM, bytes + 2 * EDGE,
                                               "a test's buffer")
                                         : malloc(bytes + 2 * EDGE));
    if (!a.raw) abort();
    memset(a.raw, 0x5A, bytes + 2 * EDGE);
    a.p = a.raw + EDGE;
    return a;
}

static void area_free(const trial *c, area a) {
    size_t bad = 0;
    for (size_t i = 0; i < EDGE; i++) bad += (a.raw[i] != 0x5A) + (a.p[a.bytes + i] != 0x5A);
    CHECK_MSG(bad == 0, "%s: %zu guard bytes overwritten", op_names[c->op], bad);
    if (a.in_range)
        dt_free(c->ctx, DT_MEM_COMM, a.raw, a.bytes + 2 * EDGE);
    else
        free(a.raw);
}

/* Number of elements that rank i sends to rank j. */
static size_t v_count(const trial *c, int i, int j) {
    return mix(c->number * 4096 + (uint64_t)(i * 64 + j)) % (c->count + 1);
}

static void call_now(trial *c, const void *send, void *recv) {
    dt_comm *comm = c->comm;
    dt_dtype t = types[c->t];
    dt_op op = redops[c->o];
    size_t count = c->count;
    switch (c->op) {
    case ALL_REDUCE: c->status = dt_all_reduce(comm, send, recv, count, t, op); break;
    case REDUCE: c->status = dt_reduce(comm, send, recv, count, t, op, c->root); break;
    case REDUCE_SCATTER: c->status = dt_reduce_scatter(comm, send, recv, count, t, op); break;
    case ALL_GATHER: c->status = dt_all_gather(comm, send, recv, count, t); break;
    case GATHER: c->status = dt_gather(comm, send, recv, count, t, c->root); break;
    case SCATTER: c->status = dt_scatter(comm, send, recv, count, t, c->root); break;
    case ALL_TO_ALL: c->status = dt_all_to_all(comm, send, recv, count, t); break;
    case ALL_TO_ALL_V: c->status = dt_all_to_all_v(comm, send, c->out, recv, c->in, t); break;
    default: c->status = dt_broadcast(comm, recv, count, t, c->root);
    }
}

static void call_start(trial *c, const void *send, void *recv) {
    dt_comm *comm = c->comm;
    dt_dtype t = types[c->t];
    dt_op op = redops[c->o];
    size_t count = c->count;
    switch (c->op) {
    case ALL_REDUCE: c->work = dt_all_reduce_start(comm, send, recv, count, t, op); break;
    case REDUCE: c->work = dt_reduce_start(comm, send, recv, count, t, op, c->root); break;
    case REDUCE_SCATTER: c->work = dt_reduce_scatter_start(comm, send, recv, count, t, op); break;
    case ALL_GATHER: c->work = dt_all_gather_start(comm, send, recv, count, t); break;
    case GATHER: c->work = dt_gather_start(comm, send, recv, count, t, c->root); break;
    case SCATTER: c->work = dt_scatter_start(comm, send, recv, count, t, c->root); break;
    case ALL_TO_ALL: c->work = dt_all_to_all_start(comm, send, recv, count, t); break;
    case ALL_TO_ALL_V: c->work = dt_all_to_all_v_start(comm, send, c->out, recv, c->in, t); break;
    default: c->work = dt_broadcast_start(comm, recv, count, t, c->root);
    }
}

/* The ring algorithm's sum of element i of share j: added from rank j + 1 around the ring to rank
   j, each step rounded to the type. */
static double ring_sum(int n, int j, size_t i, dt_dtype dtype, dt_op op) {
    double x = sent_value((j + 1) % n, i, dtype, op);
    for (int k = 2; k <= n; k++) {
        double y = sent_value((j + k) % n, i, dtype, op);
        if (dtype == DT_F64)
            x = FOLD(double, x, y);
        else if (dtype == DT_I32)
            x = FOLD(int32_t, (int32_t)x, (int32_t)y);
        else
            x = FOLD(float, (float)x, (float)y);
        if (narrow(dtype)) x = rounded(dtype, (float)x);
        if (dtype == DT_F32) x = (float)x;
    }
    return x;
}

/* Number of wrong elements of a sum. */
static size_t wrong_sums(const trial *c) {
    int n = dt_comm_size(c->comm), me = dt_comm_rank(c->comm);
    size_t first = c->op == REDUCE_SCATTER ? (size_t)me * c->count : 0, bad = 0,
           size = dt_dtype_size(types[c->t]);
    if (c->algorithm == DT_RING && c->op != REDUCE && redops[c->o] != DT_AVG && n > 1 &&
        !is_whole(types[c->t])) {
        for (int j = 0; j < n; j++) {
            size_t from =
                c->op == ALL_REDUCE ? dt__chunk_offset(c->count, n, j) : (size_t)j * c->count;
            size_t to =
                c->op == ALL_REDUCE ? dt__chunk_offset(c->count, n, j + 1) : from + c->count;
            if (c->op == REDUCE_SCATTER && j != me) continue;
            for (size_t i = from; i < to; i++)
                bad += get(c->recv, types[c->t], i - first) !=
                       ring_sum(n, j, i, types[c->t], redops[c->o]);
        }
        return bad;
    }
    if (n == c->all->n)
        return memcmp(c->recv, c->all->sum[c->t][c->o] + first * size, c->count * size) != 0;
    /* the group is a subset of the ranks */
    unsigned char *sum = (unsigned char *)malloc(c->count * size + 1);
    sums_make(sum, n, first, c->count, c->t, c->o);
    bad = memcmp(c->recv, sum, c->count * size) != 0;
    free(sum);
    return bad;
}

/* Number of wrong shares of recv, or of wrong elements of a sum. */
static size_t wrong_parts(const trial *c) {
    size_t size = dt_dtype_size(types[c->t]), share = c->count * size, at = 0, bad = 0;
    int n = dt_comm_size(c->comm), me = dt_comm_rank(c->comm);
    unsigned char *const *in = c->all->in[c->t][0];
    const unsigned char *recv = c->recv;
    if ((c->op == REDUCE || c->op == GATHER) && me != c->root) return 0;
    if (c->op <= REDUCE_SCATTER) return wrong_sums(c);
    if (c->op == SCATTER) return memcmp(recv, in[c->root] + (size_t)me * share, share) != 0;
    if (c->op == BROADCAST) return memcmp(recv, in[c->root], share) != 0;
    for (int r = 0; r < n; r++) {
        size_t first = c->op == ALL_TO_ALL ? (size_t)me * share : 0, bytes = share;
        if (c->op == ALL_TO_ALL_V) {
            bytes = c->in[r] * size;
            for (int j = 0; j < me; j++) first += v_count(c, r, j) * size;
        }
        bad += memcmp(recv + at, in[r] + first, bytes) != 0;
        at += bytes;
    }
    return bad;
}

/* Sets the placement and the sizes of a trial's buffers. */
static void trial_place(trial *c) {
    size_t size = dt_dtype_size(types[c->t]), share = c->count * size, sent = 0, came = 0;
    int n = dt_comm_size(c->comm), me = dt_comm_rank(c->comm), root = me == c->root, op = c->op;
    size_t whole = (size_t)n * share;
    for (int r = 0; r < n; r++) {
        c->out[r] = v_count(c, me, r);
        c->in[r] = v_count(c, r, me);
        sent += c->out[r] * size;
        came += c->in[r] * size;
    }
    c->send_bytes = op == REDUCE_SCATTER || op == SCATTER || op == ALL_TO_ALL ? whole
                    : op == ALL_TO_ALL_V                                      ? sent
                                                                              : share;
    c->recv_bytes = op == ALL_GATHER || op == GATHER || op == ALL_TO_ALL ? whole
                    : op == ALL_TO_ALL_V                                 ? came
                                                                         : share;
    int one = c->in_place || op == BROADCAST;
    if ((op == REDUCE || op == GATHER || op == SCATTER) && !root) one = 0;
    c->a = area_make(c, one && c->recv_bytes > c->send_bytes ? c->recv_bytes : c->send_bytes, 0);
    c->b = one ? c->a : area_make(c, c->recv_bytes, 1);
    c->send = c->a.p;
    c->recv = c->b.p;
    if (one && (op == REDUCE_SCATTER || op == SCATTER)) c->recv += (size_t)me * share;
    if (one && (op == ALL_GATHER || op == GATHER)) c->send += (size_t)me * share;
}

static const unsigned char *trial_input(const trial *c) {
    return c->all
        ->in[c->t][c->op <= REDUCE_SCATTER && redops[c->o] == DT_PROD][dt_comm_rank(c->comm)];
}

/* A random delay for each rank and trial: one or two microseconds, sometimes a yield or 0.1 ms. */
static void random_delay(const trial *c, uint64_t when) {
    const dt_host *host = dt_ctx_host(c->ctx);
    uint64_t h = mix((c->number * MAX_RANKS + (uint64_t)dt_ctx_rank(c->ctx)) * 4 + when);
    for (volatile int spin = 0; spin < (int)(h % 128); spin++) {
    }
    if (h >> 20 & 7) return;
    host->sleep(host->user, h >> 32 & 255 ? 0 : 1e-4);
}

static void trial_begin(trial *c) {
    /* a buffer may be NULL */
    int me = dt_comm_rank(c->comm), root = me == c->root, none = !root && c->number % 2;
    trial_place(c);
    if (c->op != BROADCAST || root) memcpy(c->send, trial_input(c), c->send_bytes);
    random_delay(c, 1);
    c->status = DT_OK;
    (c->started ? call_start : call_now)(c, none && c->op == SCATTER ? NULL : c->send,
        none && (c->op == REDUCE || c->op == GATHER) ? NULL : c->recv);
}

static void trial_end(trial *c) {
    int n = dt_comm_size(c->comm), me = dt_comm_rank(c->comm), one = c->a.raw == c->b.raw;
    int unused = me != c->root && (c->op == REDUCE || c->op == GATHER); /* recv */
    if (c->started) random_delay(c, 2), c->status = dt_wait(c->ctx, c->work);
    size_t bad = wrong_parts(c),
           touched = !one && memcmp(c->send, trial_input(c), c->send_bytes) != 0;
    for (size_t i = 0; unused && i < c->recv_bytes && !one; i++) touched += c->recv[i] != 0x5A;
    CHECK_MSG(c->status == DT_OK && bad == 0 && touched == 0,
        "%s %s x %zu op %d root %d, %d ranks, rank %d, algorithm %d, in place %d, place %d, "
        "started %d: %s, %zu "
        "wrong, %zu touched",
        op_names[c->op], dt_dtype_name(types[c->t]), c->count, c->o, c->root, n, me,
        (int)c->algorithm, c->in_place, c->place, c->started, dt_status_name(c->status), bad,
        touched);
    if (c->place == IN_MALLOC && !unused)
        fold_hash(&c->all->hash[dt_ctx_rank(c->ctx)], c->recv, c->recv_bytes);
    area_free(c, c->a);
    if (!one) area_free(c, c->b);
}

/* ---- 2. the sweep ---- */

/* 1 if the trial runs under this stride. All ranks agree; other numbers of ranks, groups and trials
   give other choices. */
static int chosen(const trial *c, int stride) {
    uint64_t one_in = (uint64_t)stride * (c->count == LONG ? 4 : 1);
    return mix(c->number * 64 + (uint64_t)dt_comm_size(c->comm)) % one_in == 0;
}

/* One operation with one count and type: every reduction, in place or not, every root. */
static void sweep_op(trial *c, int stride) {
    /* sums in rank order */
    int n = dt_comm_size(c->comm), rooted = dt__is_rooted((dt__op_code)c->op);
    for (c->o = 0; c->o < (c->all->all_ops && c->op <= REDUCE_SCATTER ? 5 : 1); c->o++) {
        for (c->in_place = 0; c->in_place < (c->op >= ALL_TO_ALL ? 1 : 2); c->in_place++) {
            int roots = rooted && c->all->all_roots && c->o == 0 ? n : 1;
            int some = rooted ? (int)(mix(c->number) % (uint64_t)n) : 0;
            for (int r = 0; r < roots && dt_error(c->ctx) == DT_OK; r++) {
                c->number++;
                c->started = (int)(mix(c->number + 99) % 2);
                c->root = roots > 1 ? r : some;
                if (!chosen(c, stride)) continue;
                trial_begin(c);
                trial_end(c);
            }
        }
    }
}

/* All operations that have the algorithm; with AUTO all operations. */
static void sweep_algorithm(trial *c, int stride) {
    const cases *s = c->all;
    dt_comm_set_algorithm(c->comm, c->algorithm);
    for (int k = 0; k < s->n_counts; k++) {
        for (c->t = 0; c->t < TYPES; c->t++) {
            if (!(s->type_set >> c->t & 1)) continue;
            c->count = count_of(s->counts[k], types[c->t]);
            for (c->op = 0; c->op < OPS; c->op++) {
                dt__call call = dt__call_make((dt__op_code)c->op, NULL, NULL, 0, DT_F32);
                if (!c->algorithm || dt__algorithm_of(&call, c->algorithm)) sweep_op(c, stride);
            }
        }
    }
}

/* The loop over placements is outermost, so that trials with IN_MALLOC have the same numbers on
   every backend. */
static void sweep(dt_comm *comm, cases *s, int stride) {
    trial c = trial_make(comm, s);
    for (c.place = 0; c.place < (reach_of(comm) == REACH_RANGE ? PLACES : 1); c.place++) {
        for (int a = 0; a < DT_ALGORITHMS; a++) {
            c.algorithm = (dt_algorithm)a;
            if (s->algorithm_set >> a & 1) sweep_algorithm(&c, stride);
        }
    }
    dt_comm_set_algorithm(comm, DT_ALGORITHM_AUTO);
}

/* Starts all operations and a barrier at once, more than DT_MAX_STARTED, and waits in reverse
   order. */
static void all_started_at_once(dt_comm *comm, cases *s) {
    static const size_t counts[] = { 0, 1, 17, OVER_EAGER };
    trial c[OPS];
    uint64_t number = 1000000;
    for (int a = 0; a < DT_ALGORITHMS; a++) {
        dt_comm_set_algorithm(comm, (dt_algorithm)a);
        for (int k = 0; k < 4; k++) {
            for (int op = 0; op < OPS; op++) {
                c[op] = trial_make(comm, s);
                c[op].number = ++number;
                c[op].op = op;
                c[op].t = (op + a + k) % TYPES;
                c[op].o = op <= REDUCE_SCATTER ? (a + k) % 5 : 0;
                c[op].count = count_of(counts[k], types[c[op].t]);
                c[op].root = (op + k) % dt_comm_size(comm);
                c[op].started = 1;
                dt__call call = dt__call_make((dt__op_code)op, NULL, NULL, 0, DT_F32);
                if (dt__algorithm_of(&call, (dt_algorithm)a)) c[op].algorithm = (dt_algorithm)a;
                trial_begin(&c[op]);
            }
            dt_work *barrier = dt_barrier_start(comm);
            for (int op = OPS - 1; op >= 0; op--) trial_end(&c[op]);
            dt_wait(comm->world->ctx, barrier);
        }
    }
    dt_comm_set_algorithm(comm, DT_ALGORITHM_AUTO);
}

/* ---- 3. operations composed of others ---- */

/* all-reduce = reduce + broadcast = reduce-scatter + all-gather, and all-gather = gather +
   broadcast, bit for bit. */
static void identity(
    dt_comm *comm, const cases *s, dt_algorithm algorithm, size_t count, int t, int o) {
    int n = dt_comm_size(comm), me = dt_comm_rank(comm), root = (int)(count + (size_t)o) % n;
    int ring = algorithm == DT_RING;
    size_t all = (size_t)n * count, bytes = all * dt_dtype_size(types[t]),
           share = bytes / (size_t)n;
    dt_dtype type = types[t];
    dt_op op = redops[o];
    const unsigned char *mine = s->in[t][op == DT_PROD][me];
    unsigned char *memory = (unsigned char *)malloc(3 * bytes + 1), *a = memory, *b = a + bytes,
                  *c = b + bytes;
    dt_all_reduce(comm, mine, a, all, type, op);
    dt_reduce(comm, mine, b, all, type, op, root);
    dt_broadcast(comm, b, all, type, root);
    dt_reduce_scatter(comm, mine, c + (size_t)me * share, count, type, op);
    dt_all_gather(comm, c + (size_t)me * share, c, count, type);
    /* only the ring adds in another order */
    int reduced = (ring && op != DT_AVG) || memcmp(a, b, bytes) == 0;
    int scattered = memcmp(a, c, bytes) == 0;
    memset(a, 1, 2 * bytes);
    dt_all_gather(comm, mine, a, count, type);
    dt_gather(comm, mine, b, count, type, root);
    dt_broadcast(comm, b, all, type, root);
    CHECK_MSG(reduced && scattered && memcmp(a, b, bytes) == 0,
        "%s x %zu op %d root %d, %d ranks, rank %d, algorithm %d: all-reduce is%s reduce + "
        "broadcast, is%s "
        "reduce-scatter + all-gather, all-gather is%s gather + broadcast",
        dt_dtype_name(type), count, o, root, n, me, (int)algorithm, reduced ? "" : " not",
        scattered ? "" : " not", memcmp(a, b, bytes) ? " not" : "");
    free(memory);
}

static void identities(dt_comm *comm, const cases *s) {
    static const size_t counts[] = { 1, 17, OVER_EAGER };
    for (int a = 0; a < DT_ALGORITHMS; a++) {
        dt_comm_set_algorithm(comm, (dt_algorithm)a);
        for (int k = 0; k < 3; k++)
            for (int t = 0; t < TYPES; t++)
                for (int o = 0; o < 5; o++)
                    if ((t + o + k) % s->stride == 0)
                        identity(comm, s, (dt_algorithm)a, count_of(counts[k], types[t]), t, o);
    }
    dt_comm_set_algorithm(comm, DT_ALGORITHM_AUTO);
}

/* ---- 4. groups and scalars ---- */

/* Groups of groups, all with pending operations at the same time, waited for in changing orders. */
static void nested_groups(dt_comm *world) {
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    for (int i = 0; i < 20; i++) {
        dt_comm *half = dt_comm_split(world, (me + i) % 2, i % 2 ? -me : me, "half");
        dt_comm *own = dt_comm_split(half, 0, dt_comm_rank(half), "again");
        int32_t mine = me, sum[3] = { 0, 0, 0 }, like = 0;
        dt_work *work[3];
        work[0] = dt_all_reduce_start(half, &mine, &sum[0], 1, DT_I32, DT_SUM);
        work[1] = dt_all_reduce_start(world, &mine, &sum[1], 1, DT_I32, DT_SUM);
        work[2] = dt_all_reduce_start(own, &mine, &sum[2], 1, DT_I32, DT_SUM);
        for (int k = 0; k < 3; k++) dt_wait(world->world->ctx, work[(k + i) % 3]);
        for (int r = me % 2; r < n; r += 2) like += r;
        CHECK_MSG(sum[0] == like && sum[1] == n * (n - 1) / 2 && sum[2] == like,
            "split %d on rank %d: %d %d %d", i, me, sum[0], sum[1], sum[2]);
    }
}

/* Many groups of the same ranks; each rank begins their operations in a different order. */
static void many_groups(dt_comm *world) {
    enum { GROUPS = 12 };
    dt_comm *group[GROUPS];
    dt_work *work[GROUPS];
    int32_t mine[GROUPS], sum[GROUPS];
    int n = dt_comm_size(world), me = dt_comm_rank(world), bad = 0;
    for (int g = 0; g < GROUPS; g++) group[g] = dt_comm_split(world, 0, me, "crowd");
    for (int i = 0; i < GROUPS; i++) {
        int g = me % 2 ? GROUPS - 1 - i : i;
        mine[g] = 1000 * g + me;
        work[g] = dt_all_reduce_start(group[g], &mine[g], &sum[g], 1, DT_I32, DT_SUM);
    }
    for (int g = 0; g < GROUPS; g++) {
        dt_wait(world->world->ctx, work[g]);
        bad += sum[g] != 1000 * g * n + n * (n - 1) / 2;
    }
    CHECK_MSG(bad == 0, "%d of %d groups have another group's sum", bad, (int)GROUPS);
}

static void groups(dt_comm *world, cases *s) {
    int n = dt_comm_size(world), me = dt_comm_rank(world), stride = 16 * s->stride + 1;
    dt_comm *odd = dt_comm_split(world, me % 2, -me, "odd"),
            *few = dt_comm_split(world, me ? 0 : -1, 0, "few");
    dt_comm *again = dt_comm_split(odd, 0, 0, "again");
    if (dt_error(world->world->ctx)) return;
    CHECK(dt_comm_size(odd) == (n + 1 - me % 2) / 2 &&
          dt_comm_world_rank(odd, dt_comm_size(odd) - 1) == me % 2);
    CHECK(dt_comm_world_rank(world, n - 1) == n - 1 && (few == NULL) == (me == 0));
    sweep(odd, s, stride);
    if (few) sweep(few, s, stride);
    sweep(again, s, stride);
    nested_groups(world);
    many_groups(world);
}

static void scalars(dt_comm *world, cases *s) {
    int n = dt_comm_size(world), me = dt_comm_rank(world), bad = 0;
    double sums[300], whole = me + 1;
    for (int i = 0; i < 300; i++) sums[i] = 1.0 / (me + i + 1);
    dt_sum_doubles(world, sums, 300);
    for (int i = 0; i < 300; i++) {
        double want = 1.0 / (i + 1);
        for (int r = 1; r < n; r++) want += 1.0 / (r + i + 1);
        bad += sums[i] != want;
    }
    CHECK_MSG(bad == 0, "%d of 300 doubles are not summed in rank order", bad);
    fold_hash(&s->hash[me], sums, sizeof sums);
    CHECK(dt_sum_doubles(world, &whole, 1) == DT_OK && whole == n * (n + 1) / 2 &&
          dt_mean(world, me) == (n - 1) / 2.0);
    CHECK(dt_agree(world, me == n - 1 ? DT_ERR_IO : DT_OK) == DT_ERR_IO &&
          dt_error(world->world->ctx) == DT_OK);
    CHECK(dt_agree(world, DT_OK) == DT_OK);
}

/* ---- 5. messages ---- */

static const size_t sizes[] = { 0, 2, 12, DT_EAGER_BYTES, DT_EAGER_BYTES + 2, 65512, 65536, 65542,
    1048576, 4194304 };
enum { SIZES = 10, KEPT = 8, ROOM = 65600, LARGEST = 4194304, EXACTLY = DT_EAGER_BYTES };

static void pattern(char *p, size_t n, int from, int tag) {
    for (size_t i = 0; i < n; i++)
        p[i] = (char)(i * 31 + (i >> 8) + (size_t)from * 7 + (size_t)tag);
}

static size_t wrong(const char *p, size_t n, int from, int tag) {
    size_t bad = 0;
    for (size_t i = 0; i < n; i++)
        bad += p[i] != (char)(i * 31 + (i >> 8) + (size_t)from * 7 + (size_t)tag);
    return bad;
}

/* Messages of every size around the ring, with the receive posted before and after the message
   arrives. Then many messages that arrive before their receives, which are posted in reverse
   order. */
static void messages_in_ring(dt_comm *world) {
    dt_ctx *ctx = world->world->ctx;
    int n = dt_comm_size(world), me = dt_comm_rank(world), right = (me + 1) % n,
        left = (me + n - 1) % n;
    char *out = (char *)malloc(LARGEST), *in = (char *)malloc(LARGEST);
    dt_work *sends[KEPT];
    for (int k = 0; k < (n <= 3 ? SIZES : SIZES - 1); k++) {
        for (int early = 0; early < 2; early++) {
            dt_work *recv = NULL, *send = NULL;
            pattern(out, sizes[k], me, k);
            memset(in, 0, sizes[k]);
            if (early) recv = dt_recv_start(world, in, sizes[k] / 2, DT_BF16, left, k);
            if (early) dt_barrier(world);
            send = dt_send_start(world, out, sizes[k] / 2, DT_BF16, right, k);
            if (!early) recv = dt_recv_start(world, in, sizes[k] / 2, DT_BF16, left, k);
            dt_wait(ctx, recv);
            dt_wait(ctx, send);
            CHECK_MSG(wrong(in, sizes[k], left, k) == 0, "%zu bytes, early %d", sizes[k], early);
        }
    }
    for (int k = 0; k < KEPT; k++) {
        pattern(out + k * ROOM, sizes[k], me, k);
        sends[k] = dt_send_start(world, out + k * ROOM, sizes[k] / 2, DT_BF16, right, k);
    }
    for (int k = KEPT - 1; k >= 0; k--)
        CHECK_MSG(dt_recv(world, in, sizes[k] / 2, DT_BF16, left, k) == DT_OK &&
                      wrong(in, sizes[k], left, k) == 0,
            "%zu bytes that came early", sizes[k]);
    for (int k = 0; k < KEPT; k++) dt_wait(ctx, sends[k]);
    pattern(out, LARGEST / 4, me, 3); /* blocking; one half of the ring sends first */
    if (n > 1 && me % 2 == 0) dt_send(world, out, LARGEST / 8, DT_F16, right, 3);
    if (n > 1)
        CHECK(dt_recv(world, in, LARGEST / 8, DT_F16, left, 3) == DT_OK &&
              wrong(in, LARGEST / 4, left, 3) == 0);
    if (me % 2 == 1) dt_send(world, out, LARGEST / 8, DT_F16, right, 3);
    free(out);
    free(in);
}

/* Messages of any number of bytes, and one counter that no double represents. */
static void bytes_in_ring(dt_comm *world) {
    static const size_t counts[] = { 1, 3, 5, DT_EAGER_BYTES + 1, 65537, (1 << 20) + 1 };
    dt_ctx *ctx = world->world->ctx;
    int n = dt_comm_size(world), me = dt_comm_rank(world), right = (me + 1) % n,
        left = (me + n - 1) % n;
    int64_t counter = INT64_MAX - me, got = 0;
    char *out = (char *)malloc((1 << 20) + 1), *in = (char *)malloc((1 << 20) + 2);
    dt_comm *ring = dt_comm_split(world, 0, me, "ring");
    for (int k = 0; k < 6; k++) {
        pattern(out, counts[k], me, k);
        in[counts[k]] = 'x';
        dt_work *send = dt_send_start(ring, out, counts[k], DT_U8, right, k);
        size_t bytes = dt_comm_bytes(ctx, DT_AXIS_NONE);
        dt_recv(ring, in, counts[k], DT_U8, left, k);
        dt_wait(ctx, send);
        CHECK_MSG(
            wrong(in, counts[k], left, k) == 0 && in[counts[k]] == 'x', "%zu bytes u8", counts[k]);
        CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) - bytes <= counts[k]);
    }
    dt_work *send = dt_send_start(ring, &counter, 1, DT_I64, right, 9);
    CHECK(dt_recv(ring, &got, 1, DT_I64, left, 9) == DT_OK && got == INT64_MAX - left);
    dt_wait(ctx, send);
    free(out);
    free(in);
}

/* Many messages with one tag keep their order; 8 small ones need no receiver yet; some go to the
   same rank. */
static void small_messages(dt_comm *world) {
    enum { MANY = 500 };
    static const char nothing = 0;
    dt_ctx *ctx = world->world->ctx;
    int n = dt_comm_size(world), me = dt_comm_rank(world), right = (me + 1) % n,
        left = (me + n - 1) % n, bad = 0;
    char room[2][EXACTLY];
    int32_t x[MANY], y = -1, own = me + 40;
    dt_work *sends[MANY];
    for (int i = 0; i < MANY; i++)
        x[i] = i, sends[i] = dt_send_start(world, &x[i], 1, DT_I32, right, 9);
    for (int i = 0; i < MANY; i++) bad += dt_recv(world, &y, 1, DT_I32, left, 9) != DT_OK || y != i;
    for (int i = 0; i < MANY; i++) dt_wait(ctx, sends[i]);
    CHECK_MSG(bad == 0, "%d of %d messages are out of order", bad, (int)MANY);
    for (int i = 0; i < 8; i++) {
        pattern(room[0], EXACTLY, me, i);
        if (n > 1) dt_send(world, room[0], EXACTLY / 4, DT_F32, right, 8);
        dt_send(world, room[0], EXACTLY / 4, DT_F32, me, 9);
    }
    for (int i = 0; i < 8; i++) {
        dt_recv(world, room[0], EXACTLY / 4, DT_F32, me, 9);
        bad += wrong(room[0], EXACTLY, me, i) != 0;
        if (n == 1) continue;
        dt_recv(world, room[1], EXACTLY / 4, DT_F32, left, 8);
        bad += wrong(room[1], EXACTLY, left, i) != 0;
    }
    CHECK_MSG(bad == 0 && dt_error(ctx) == DT_OK, "%d small messages are wrong", bad);
    dt_work *to_me = dt_recv_start(world, &y, 1, DT_I32, me, 4);
    CHECK(dt_send(world, &own, 1, DT_I32, me, 4) == DT_OK && dt_wait(ctx, to_me) == DT_OK &&
          y == own);
    CHECK(dt_send(world, &nothing, 0, DT_F32, right, 7) == DT_OK &&
          dt_recv(world, NULL, 0, DT_F32, left, 7) == DT_OK);
}

/* One dt_exchange in which every rank sends to every rank, itself included. */
static void exchange(dt_comm *world) {
    enum { EACH = 300000 };
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    char *memory = (char *)malloc((size_t)n * 2 * EACH), *in = memory + (size_t)n * EACH;
    dt_transfer transfers[2 * MAX_RANKS];
    memset(transfers, 0, sizeof transfers);
    for (int r = 0; r < n; r++) {
        dt_transfer *send = &transfers[r], *recv = &transfers[n + (r + me) % n];
        pattern(memory + r * EACH, EACH, me, r);
        send->send = memory + r * EACH;
        recv->recv = in + r * EACH;
        send->count = recv->count = EACH / 4;
        send->dtype = recv->dtype = DT_F32;
        send->peer = recv->peer = r;
        send->tag = recv->tag = 5;
    }
    CHECK(dt_exchange(world, transfers, 2 * n) == DT_OK);
    for (int r = 0; r < n; r++) CHECK(wrong(in + r * EACH, EACH, r, me) == 0);
    free(memory);
}

/* Every rank sends to rank 0, which receives from any: one number, and one message over the eager
   limit. */
static void from_any(dt_comm *world) {
    enum { ROUNDS = 20, OVER = DT_EAGER_BYTES / 4 + 1 };
    dt_ctx *ctx = world->world->ctx;
    int n = dt_comm_size(world), me = dt_comm_rank(world), seen = 0, from = -1;
    int32_t mine[OVER], got[OVER];
    for (int i = 0; i < OVER; i++) mine[i] = 1000 * me + i;
    for (int round = 0; round < ROUNDS; round++) {
        size_t count = round % 2 ? OVER : 1;
        if (me > 0) dt_send(world, mine, count, DT_I32, 0, round);
        for (int r = 1; me == 0 && r < n; r++) {
            dt_status status = DT_OK;
            if (round % 4 < 2)
                status = dt_recv_any(world, got, count, DT_I32, round, &from);
            else
                status = dt_wait(ctx, dt_recv_any_start(world, got, count, DT_I32, round, &from));
            CHECK(status == DT_OK && from > 0 && got[0] == 1000 * from &&
                  got[count - 1] == got[0] + (int)count - 1);
            seen += from;
        }
    }
    CHECK(me > 0 || seen == ROUNDS * n * (n - 1) / 2);
    /* the source is a rank of the group, not of the world */
    dt_comm *turned = dt_comm_split(world, 0, -me, "turned");
    if (me == 0) dt_send(world, mine + 1, 1, DT_I32, n - 1, 1);
    if (me == 0) dt_send(turned, mine, 1, DT_I32, 0, 1);
    if (me != n - 1) return;
    CHECK(dt_recv_any(turned, got, 1, DT_I32, 1, &from) == DT_OK && from == n - 1 && got[0] == 0);
    CHECK(dt_recv_any(world, got, 1, DT_I32, 1, &from) == DT_OK && from == 0 && got[0] == 1);
}

/* ---- 6. traffic ---- */

/* Size of the subtree of v in a binomial tree over n ranks, v included; and v's number of
   children. */
static size_t tree_below(int v, int n) {
    int low = v ? v & -v : n;
    return (size_t)(v + low > n ? n - v : low);
}
static size_t tree_children(int v, int n) {
    size_t children = 0;
    for (int mask = 1; mask < n && !(v & mask); mask *= 2) children += v + mask < n;
    return children;
}

/* Messages and elements that rank me of n sends: the exact form of the table in section 17. */
static dt_traffic formula(int op, dt_algorithm a, int n, int me, int root, size_t count) {
    size_t others = (size_t)n - 1,
           mine = dt__chunk_offset(count, n, me + 1) - dt__chunk_offset(count, n, me);
    size_t next = dt__chunk_offset(count, n, (me + 1) % n + 1) -
                  dt__chunk_offset(count, n, (me + 1) % n),
           log2n = 0;
    int v = (me - root + n) % n;
    while ((1 << log2n) < n) log2n++;
    dt_traffic t = { 0, 0 };
    if (a == DT_ALGORITHM_AUTO) return t;
    switch (op) {
    case ALL_REDUCE:
        if (a == DT_DIRECT) t.messages = 2 * others, t.bytes = count - mine + others * mine;
        if (a == DT_RING) t.messages = 2 * others, t.bytes = count - mine + count - next;
        if (a == DT_DOUBLING) t.messages = log2n, t.bytes = others * count;
        v = me;
        if (a == DT_TREE)
            t.messages = tree_children(v, n) + (v > 0),
            t.bytes = (tree_children(v, n) + (v > 0 ? tree_below(v, n) : 0)) * count;
        break;
    case REDUCE:
        if (a == DT_DIRECT) t.messages = others + (v > 0), t.bytes = v > 0 ? count : count - mine;
        if (a == DT_TREE) t.messages = v > 0, t.bytes = v > 0 ? tree_below(v, n) * count : 0;
        break;
    case REDUCE_SCATTER: t.messages = others, t.bytes = others * count; break;
    case ALL_GATHER:
        t.messages = a == DT_DOUBLING ? log2n : others, t.bytes = others * count;
        break;
    case GATHER:
        t.messages = v > 0;
        t.bytes = v > 0 ? (a == DT_TREE ? tree_below(v, n) : 1) * count : 0;
        break;
    case SCATTER:
        if (a == DT_DIRECT) t.messages = v ? 0 : others, t.bytes = v ? 0 : others * count;
        if (a == DT_TREE)
            t.messages = tree_children(v, n), t.bytes = (tree_below(v, n) - 1) * count;
        break;
    case ALL_TO_ALL: t.messages = others, t.bytes = others * count; break;
    case BROADCAST:
        if (a == DT_DIRECT) t.messages = v ? 0 : others, t.bytes = v ? 0 : others * count;
        if (a == DT_RING)
            t.messages = others + (v ? 0 : others), t.bytes = count - next + (v ? 0 : count - mine);
        if (a == DT_TREE) t.messages = tree_children(v, n), t.bytes = tree_children(v, n) * count;
        break;
    default: break;
    }
    return t;
}

/* The algorithm that runs an operation when `wanted` is set. AUTO: the backend's own algorithm,
   which sends no messages. */
static dt_algorithm algorithm_used(const dt_comm *comm, int op, dt_algorithm wanted, size_t count) {
    dt__call call = dt__call_make((dt__op_code)op, NULL, NULL, count, DT_F32);
    dt__round_fn by_size = dt__algorithm_by_size(comm, &call);
    if (dt__algorithm_of(&call, wanted)) return wanted;
    for (int a = 1; a < DT_ALGORITHMS && reach_of(comm) == REACH_NONE; a++)
        if (dt__algorithm_of(&call, (dt_algorithm)a) == by_size) return (dt_algorithm)a;
    return DT_ALGORITHM_AUTO;
}

/* Messages and elements that this rank sends with the rails algorithm: inputs and sums to the ranks
   of its node, and its chunk up and down the tree between nodes. */
static dt_traffic rails_formula(const dt_comm *comm, size_t count) {
    int n = comm->base.size, me = comm->base.rank, k = comm->ranks_per_node;
    size_t near = (size_t)k - 1, far = (size_t)((me >= k) + (me < n - k));
    size_t mine = dt__chunk_offset(count, k, me % k + 1) - dt__chunk_offset(count, k, me % k);
    size_t pieces = (4 * dt__chunk_offset(count, k, 1) + DT__RAIL_BYTES - 1) / DT__RAIL_BYTES;
    dt_traffic t = { (2 * near + far) * pieces, count - mine + (near + far) * mine };
    return t;
}

/* The most messages and bytes that any rank sent; doubles, because an all-reduce takes the
   maximum. */
typedef struct busiest {
    double messages[OPS][DT_ALGORITHMS], bytes[OPS][DT_ALGORITHMS];
} busiest;

static void traffic_of(
    dt_comm *world, int op, dt_algorithm a, int root, size_t count, busiest *most) {
    dt_ctx *ctx = world->world->ctx;
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    trial c = trial_make(world, NULL);
    unsigned char *memory = (unsigned char *)calloc(2 * (size_t)n * count + 2, 4);
    c.op = op, c.count = count, c.root = root;
    dt_traffic before = dt_comm_traffic(ctx);
    call_now(&c, memory, memory + 4 * (size_t)n * count + 4);
    free(memory);
    dt_traffic now = dt_comm_traffic(ctx),
               want = formula(op, algorithm_used(world, op, a, count), n, me, root, count);
    dt__call call = dt__call_make((dt__op_code)op, NULL, NULL, count, DT_F32);
    if (a == DT_ALGORITHM_AUTO && dt__use_rails(world, &call)) want = rails_formula(world, count);
    now.messages -= before.messages;
    now.bytes -= before.bytes;
    CHECK_MSG(c.status == DT_OK && now.messages == want.messages && now.bytes == 4 * want.bytes,
        "%s by %d, %d ranks, rank %d, root %d, count %zu: %zu messages, %zu bytes, not %zu, %zu",
        op_names[op], (int)a, n, me, root, count, now.messages, now.bytes, want.messages,
        4 * want.bytes);
    if (!most) return;
    if ((double)now.messages > most->messages[op][a]) most->messages[op][a] = (double)now.messages;
    if ((double)now.bytes > most->bytes[op][a]) most->bytes[op][a] = (double)now.bytes;
}

/* Compares the busiest rank with the table of section 17. S is the full buffer, all shares
   together. */
static void check_table(int n, const busiest *seen) {
    size_t N = (size_t)n, L = 0, share = 5040 * 4, S = share, all = N * share;
    while ((1 << L) < n) L++;
    int power = (1 << L) == n, divides = 5040 % n == 0;
    const struct {
        int op;
        dt_algorithm a;
        size_t messages, bytes;
        int exact;
    } rows[] = {
        { ALL_REDUCE, DT_DIRECT, 2 * (N - 1), 2 * (N - 1) * S / N, divides },
        { ALL_REDUCE, DT_RING, 2 * (N - 1), 2 * (N - 1) * S / N, divides },
        { ALL_REDUCE, DT_DOUBLING, L, (N - 1) * S, 1 },
        { ALL_REDUCE, DT_TREE, L, (L - 1 + N / 2) * S, power },
        { REDUCE, DT_DIRECT, N, S, 1 },
        { REDUCE, DT_TREE, 1, N / 2 * S, power },
        { REDUCE_SCATTER, DT_DIRECT, N - 1, (N - 1) * all / N, 1 },
        { REDUCE_SCATTER, DT_RING, N - 1, (N - 1) * all / N, 1 },
        { ALL_GATHER, DT_DIRECT, N - 1, (N - 1) * all / N, 1 },
        { ALL_GATHER, DT_RING, N - 1, (N - 1) * all / N, 1 },
        { ALL_GATHER, DT_DOUBLING, L, (N - 1) * all / N, 1 },
        { GATHER, DT_DIRECT, 1, all / N, 1 },
        { GATHER, DT_TREE, 1, all / 2, power },
        { SCATTER, DT_DIRECT, N - 1, (N - 1) * all / N, 1 },
        { SCATTER, DT_TREE, L, (N - 1) * all / N, 1 },
        { ALL_TO_ALL, DT_DIRECT, N - 1, (N - 1) * all / N, 1 },
        { BROADCAST, DT_DIRECT, N - 1, (N - 1) * S, 1 },
        { BROADCAST, DT_RING, 2 * (N - 1), 2 * (N - 1) * S / N, divides },
        { BROADCAST, DT_TREE, L, L * S, 1 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        double messages = seen->messages[rows[i].op][rows[i].a],
               bytes = seen->bytes[rows[i].op][rows[i].a];
        CHECK_MSG(messages == (double)rows[i].messages &&
                      (!rows[i].exact || bytes == (double)rows[i].bytes),
            "the table, %s by %d, %d ranks: %.0f messages, %.0f bytes", op_names[rows[i].op],
            (int)rows[i].a, n, messages, bytes);
    }
}

static void traffic(dt_comm *world) {
    /* 5040 is divisible by 2 to 9 */
    static const size_t counts[] = { 5040, 7, 0 };
    dt_ctx *ctx = world->world->ctx;
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    size_t log2n = 0;
    busiest most;
    float x[10] = { 0 };
    if (n == 1) return; /* no other rank to send to */
    while ((1 << log2n) < n) log2n++;
    memset(&most, 0, sizeof most);
    for (int a = 0; a < DT_ALGORITHMS; a++) {
        dt_comm_set_algorithm(world, (dt_algorithm)a);
        for (int op = 0; op < OPS; op++)
            for (int k = 0; k < 3; k++)
                for (int root = 0;
                     op != ALL_TO_ALL_V && root < (dt__is_rooted((dt__op_code)op) ? n : 1); root++)
                    traffic_of(world, op, (dt_algorithm)a, root, counts[k], k ? NULL : &most);
        dt_traffic before = dt_comm_traffic(ctx);
        dt_barrier(world);
        CHECK(dt_comm_traffic(ctx).messages - before.messages ==
              (a == DT_DOUBLING || reach_of(world) == REACH_NONE ? log2n : 0));
        CHECK(dt_comm_traffic(ctx).bytes == before.bytes);
    }
    dt_comm_set_algorithm(world, DT_ALGORITHM_AUTO);
    dt_traffic before = dt_comm_traffic(ctx);
    if (me == 0) dt_send(world, x, 10, DT_F32, 1, 0);
    if (me == 1) dt_recv(world, x, 10, DT_F32, 0, 0);
    CHECK(dt_comm_traffic(ctx).messages - before.messages == (me == 0));
    CHECK(dt_comm_traffic(ctx).bytes - before.bytes == (size_t)(me == 0 ? 40 : 0));
    dt_all_reduce(world, &most, &most, sizeof most / sizeof(double), DT_F64, DT_MAX);
    if (me == 0) check_table(n, &most);
}

/* Logical bytes are equal for every algorithm and backend. */
static void logical_bytes(dt_comm *world) {
    dt_ctx *ctx = world->world->ctx;
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    size_t count = 30, want = dt_comm_bytes(ctx, DT_AXIS_NONE), out[MAX_RANKS], in[MAX_RANKS];
    static const float zeros[4096] = { 0 };
    float into[4096];
    if (n == 1) return;
    for (int r = 0; r < n; r++) out[r] = (size_t)(me + r), in[r] = (size_t)(me + r);
    for (int a = 0; a < DT_ALGORITHMS; a++) {
        dt_comm_set_algorithm(world, (dt_algorithm)a);
        dt_reduce(world, zeros, into, count, DT_F32, DT_SUM, 1);
        want += me == 1 ? 0 : 120;
        CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == want);
        dt_gather(world, zeros, into, count, DT_F32, 1);
        want += me == 1 ? 0 : 120;
        CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == want);
        dt_scatter(world, zeros, into, count, DT_F32, 0);
        want += me == 0 ? 120 * (size_t)(n - 1) : 0;
        CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == want);
        dt_all_to_all_v(world, zeros, out, into, in, DT_F32);
        for (int r = 0; r < n; r++) want += r == me ? 0 : 4 * out[r];
        CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == want);
        dt_work *work = dt_all_gather_start(world, zeros, into, count, DT_F32);
        /* counted when the operation is complete */
        CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == want);
        dt_wait(ctx, work);
        want += 120 * (size_t)(n - 1);
        CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == want);
    }
    dt_comm_set_algorithm(world, DT_ALGORITHM_AUTO);
}

/* ---- 7. overlap ---- */

/* One operation in which recv of one rank (or of each) may overlap its send. A legal overlap must
   give the right result; any other must fail on every rank and change no data. The seed decides
   all. */
static unsigned overlap_random(unsigned *seed) {
    return (*seed = *seed * 1664525u + 1013904223u) >> 8;
}

enum { OVERLAP_MOST = 8 * 40 * 8 };
static int32_t overlap_value(int rank, size_t i) { return (int32_t)(10000 * rank + (int)i); }

/* 1 if a rank's recv may begin d elements after its send. */
static int overlap_allowed(int op, int me, int root, long count, long sent, long got, long d) {
    static const char rooted[8] = { 0, 1, 0, 0, 1, 1, 0, 0 };
    if (rooted[op] && me != root) return 1;
    if (d >= sent || -d >= got) return 1;
    if (op == 0 || op == 1) return d == 0;
    if (op == 2 || op == 5) return d == me * count;
    return (op == 3 || op == 4) && -d == me * count;
}

static int32_t overlap_expected(int op, int n, int me, long count, size_t counts[8][8], long i) {
    int32_t sum = 0;
    if (op == 2) i += me * count;
    if (op <= 2) {
        for (int rank = 0; rank < n; rank++) sum += overlap_value(rank, (size_t)i);
        return sum;
    }
    if (op == 3 || op == 4) return overlap_value((int)(i / count), (size_t)(i % count));
    if (op == 5) return -1; /* the root's value is set below */
    if (op == 6) return overlap_value((int)(i / count), (size_t)(me * count + i % count));
    int from = 0;
    long at = 0;
    while (i >= (long)counts[from][me]) i -= (long)counts[from++][me];
    for (int to = 0; to < me; to++) at += (long)counts[from][to];
    return overlap_value(from, (size_t)(at + i));
}

__attribute__((unused)) static dt_status overlap_of(dt_ctx *ctx, unsigned number) {
    unsigned o = number * 2654435761u;
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), me = dt_comm_rank(world), op = (int)(overlap_random(&o) % 8),
        any = 0, wrong = 0;
    int root = (int)(overlap_random(&o) % (unsigned)n),
        culprit = (int)(overlap_random(&o) % (unsigned)(n + 1));
    long count = 1 + (long)(overlap_random(&o) % 40), total = n * count, d[8] = { 0 };
    long sent[8], got[8];
    int exact = overlap_random(&o) % 3 == 0, slow = overlap_random(&o) % 2;
    size_t counts[8][8], in[8];
    int32_t *room = (int32_t *)calloc(4 * OVERLAP_MOST, sizeof *room),
            *send = room + 2 * OVERLAP_MOST, *recv;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) counts[i][j] = overlap_random(&o) % 30;
    for (int rank = 0; rank < n; rank++) {
        sent[rank] = op == 2 || op == 5 || op == 6 ? total : count;
        got[rank] = op == 3 || op == 4 || op == 6 ? total : count;
        for (int j = 0; op == 7 && j < n; j++)
            sent[rank] = (j ? sent[rank] : 0) + (long)counts[rank][j];
        for (int j = 0; op == 7 && j < n; j++)
            got[rank] = (j ? got[rank] : 0) + (long)counts[j][rank];
        d[rank] =
            (long)(overlap_random(&o) % (unsigned)(sent[rank] + got[rank] + 5)) - got[rank] - 2;
        if (exact)
            d[rank] = op == 2 || op == 5 ? rank * count : op == 3 || op == 4 ? -rank * count : 0;
        if (culprit < n && rank != culprit) d[rank] = OVERLAP_MOST / 2;
        any |= !overlap_allowed(op, rank, root, count, sent[rank], got[rank], d[rank]);
    }
    recv = send + d[me];
    for (int j = 0; j < n; j++) in[j] = counts[j][me];
    for (long i = 0; i < got[me]; i++) recv[i] = -7;
    for (long i = 0; i < sent[me]; i++) send[i] = overlap_value(me, (size_t)i);
    if (slow) dt_comm_set_algorithm(world, DT_DIRECT);
    size_t c = (size_t)count;
    switch (op) {
    case 0: dt_all_reduce(world, send, recv, c, DT_I32, DT_SUM); break;
    case 1: dt_reduce(world, send, recv, c, DT_I32, DT_SUM, root); break;
    case 2: dt_reduce_scatter(world, send, recv, c, DT_I32, DT_SUM); break;
    case 3: dt_all_gather(world, send, recv, c, DT_I32); break;
    case 4: dt_gather(world, send, recv, c, DT_I32, root); break;
    case 5: dt_scatter(world, send, recv, c, DT_I32, root); break;
    case 6: dt_all_to_all(world, send, recv, c, DT_I32); break;
    default: dt_all_to_all_v(world, send, counts[me], recv, in, DT_I32); break;
    }
    dt_barrier(world); /* a rank that only sends may finish before another refuses */
    int receives = op == 1 || op == 4 ? me == root : 1;
    for (long i = 0; !any && receives && i < got[me]; i++)
        wrong += recv[i] != (op == 5 ? overlap_value(root, (size_t)(me * count + i))
                                     : overlap_expected(op, n, me, count, counts, i));
    CHECK_MSG(wrong == 0 && (dt_error(ctx) != DT_OK) == any,
        "overlap %u: %s of %ld, %d ranks, rank %d, root %d, "
        "recv %ld elements after send: %s, %d wrong: %s",
        number, op_names[op], count, n, me, root, d[me], any ? "not allowed" : "allowed", wrong,
        dt_error_text(ctx));
    for (long i = 0; any && i < sent[me]; i++) wrong += send[i] != overlap_value(me, (size_t)i);
    CHECK_MSG(wrong == 0, "overlap %u: %d elements of send have changed", number, wrong);
    /* over a transport a rank may learn that another rank ended before it learns the reason */
    if (any && !world->world->transport.send)
        CHECK_MSG(strstr(dt_error_text(ctx), "send and recv overlap; use another buffer") &&
                      strstr(dt_error_text(ctx), op_names[op]),
            "overlap %u: %s", number, dt_error_text(ctx));
    free(room);
    return dt_error(ctx);
}

/* ---- 8. many at once ---- */

static double own_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* CPU seconds that rank 0 takes to start n sends to rank 1, and to wait for them once they are
   received. The wait in between is left out: it depends on scheduling. */
static double seconds_of_many(dt_comm *world, int n) {
    dt_ctx *ctx = world->world->ctx;
    int *values = (int *)calloc((size_t)n, sizeof *values), me = dt_comm_rank(world), wrong = 0,
        done = 0;
    dt_work **works = (dt_work **)calloc((size_t)n, sizeof *works);
    double begin = own_seconds(), middle, end;
    for (int i = 0; i < n && me == 0; i++) {
        values[i] = i + 1;
        works[i] = dt_send_start(world, &values[i], 1, DT_I32, 1, 3);
    }
    middle = own_seconds();
    /* no send completes before all are started, except the copied (eager) ones */
    dt_barrier(world);
    for (int i = 0; i < n && me == 1; i++) {
        dt_recv(world, &values[i], 1, DT_I32, 0, 3);
        wrong += values[i] != i + 1;
    }
    if (me == 1) dt_send(world, &done, 1, DT_I32, 0, 4);
    if (me == 0) dt_recv(world, &done, 1, DT_I32, 1, 4);
    end = own_seconds() - middle;
    for (int i = 0; i < n && me == 0; i++) dt_wait(ctx, works[i]);
    CHECK_MSG(wrong == 0 && dt_error(ctx) == DT_OK, "%d of %d messages are wrong: %s", wrong, n,
        dt_error_text(ctx));
    end = own_seconds() - end - begin;
    free(values);
    free(works);
    return end;
}

/* Four times as many started sends cost about four times as much; O(n^2) would cost sixteen
   times. */
__attribute__((unused)) static dt_status many_sends(dt_ctx *ctx, void *user) {
    double least[2] = { 1e9, 1e9 };
    (void)user;
    for (int turn = 0; turn < 3 && dt_error(ctx) == DT_OK; turn++)
        for (int k = 0; k < 2; k++) {
            double took = seconds_of_many(dt_world(ctx), k ? 20000 : 5000);
            if (took < least[k]) least[k] = took;
        }
    if (dt_comm_rank(dt_world(ctx)) == 0)
        CHECK_MSG(least[1] < 9 * least[0], "20,000 started sends take %.4f s, 5,000 take %.4f s",
            least[1], least[0]);
    return dt_error(ctx);
}

/* ---- all ---- */

static dt_status comm_cases(dt_ctx *ctx, void *user) {
    cases *s = (cases *)user;
    dt_comm *world = dt_world(ctx);
    CHECK(dt_comm_size(world) == s->n && dt_ctx_rank(ctx) == dt_comm_rank(world));
    sweep(world, s, s->stride);
    if (!s->sweep_only) {
        all_started_at_once(world, s);
        identities(world, s);
        groups(world, s);
        scalars(world, s);
        messages_in_ring(world);
        bytes_in_ring(world);
        small_messages(world);
        exchange(world);
        from_any(world);
        traffic(world);
        logical_bytes(world);
    }
    dt_barrier(world);
    return dt_error(ctx);
}

#endif
