/* test_comm_ops.c - dt_comm.h: every operation by every algorithm over threads and forks, started operations, traffic,
   the simulated link.

   What a rank is expected to hold is computed naively before the run starts; every comparison is bit for bit. Buffers
   lie in the range that forks share, outside of it, or on some ranks here and on others there. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "ranks.h"

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 31) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    return x ^ x >> 32;
}

/* ---- 1. every operation ------------------------------------------------------------------------------------------ */

static const dt_dtype types[] = { DT_F32, DT_F64, DT_I32, DT_BF16, DT_F16 };
static const dt_op redops[] = { DT_SUM, DT_AVG, DT_MAX, DT_MIN, DT_PROD };
enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, ALL_TO_ALL_V, BROADCAST, OPS };
static const char *const op_names[] = { "all-reduce", "reduce", "reduce-scatter", "all-gather", "gather", "scatter",
                                        "all-to-all", "all-to-all-v", "broadcast" };
enum { IN_MALLOC, IN_RANGE, IN_BOTH, PLACES };

/* What rank r sends, and the sums of that: filled before the ranks start. */
static struct { int n; size_t m; unsigned char *in[5][2][MAX_RANKS], *sum[5][5]; } data;

static void data_free(void) {
    for (int t = 0; t < 5; t++) {
        for (int r = 0; r < MAX_RANKS; r++) free(data.in[t][0][r]), free(data.in[t][1][r]);
        for (int o = 0; o < 5; o++) free(data.sum[t][o]);
    }
    memset(&data, 0, sizeof data);
}

static void data_make(int n, size_t m, unsigned type_set, int all_ops) {
    data_free();
    data.n = n;
    data.m = m;
    for (int t = 0; t < 5; t++) {
        if (!(type_set >> t & 1)) continue;
        for (int kind = 0; kind < 1 + all_ops; kind++) {
            for (int r = 0; r < n; r++) {
                data.in[t][kind][r] = (unsigned char *)malloc(m * 8);
                for (size_t i = 0; i < m; i++)
                    put(data.in[t][kind][r], types[t], i, held(r, i, types[t], kind ? DT_PROD : DT_SUM));
            }
        }
        for (int o = 0; o < (all_ops ? 5 : 1); o++) {
            data.sum[t][o] = (unsigned char *)malloc(m * 8);
            for (size_t i = 0; i < m; i++) put(data.sum[t][o], types[t], i, naive(n, i, types[t], redops[o]));
        }
    }
}

/* The ring's sum of element i of share j: from rank j + 1 round to rank j, each step rounded to the type. */
static double ring_sum(int n, int j, size_t i, dt_dtype dtype, dt_op op) {
    double x = held((j + 1) % n, i, dtype, op);
    for (int k = 2; k <= n; k++) {
        double y = held((j + k) % n, i, dtype, op);
        if (dtype == DT_F64) x = FOLD(double, x, y);
        else if (dtype == DT_I32) x = FOLD(int32_t, (int32_t)x, (int32_t)y);
        else x = FOLD(float, (float)x, (float)y);
        if (narrow(dtype)) x = rounded(dtype, (float)x);
        if (dtype == DT_F32) x = (float)x;
    }
    return x;
}

typedef struct sweep {
    int          places, started, all_ops;
    unsigned     type_set, algorithm_set;
    const size_t *counts;
    int          n_counts, all_roots;
} sweep;

typedef struct trial {
    dt_comm     *comm;
    dt_ctx      *ctx;
    dt_algorithm algorithm;
    int          op, t, o, root, in_place, place, started;
    size_t       count;
    uint64_t     number;    /* the same on all ranks */
} trial;

enum { EDGE = 64 };
typedef struct area { unsigned char *raw, *p; size_t bytes; int in_range; } area;

static area area_make(const trial *c, size_t bytes, int which) {
    area a;
    a.in_range = c->place == IN_RANGE ||
        (c->place == IN_BOTH && (mix(c->number * 64 + (uint64_t)dt_comm_rank(c->comm) * 2 + (uint64_t)which) & 1));
    a.bytes = bytes;
    a.raw = (unsigned char *)(a.in_range ? dt_alloc(c->ctx, DT_MEM_COMM, bytes + 2 * EDGE, "a test's buffer")
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
    if (a.in_range) dt_free(c->ctx, DT_MEM_COMM, a.raw, a.bytes + 2 * EDGE);
    else free(a.raw);
}

/* How many elements rank i has for rank j. */
static size_t v_count(const trial *c, int i,
                      int j) { return mix(c->number * 4096 + (uint64_t)(i * 64 + j)) % (c->count + 1); }

static dt_status call(const trial *c, const void *send, void *recv, const size_t *out, const size_t *in) {
    dt_comm *comm = c->comm;
    dt_dtype t = types[c->t];
    dt_op op = redops[c->o];
    size_t count = c->count;
    if (!c->started) switch (c->op) {
    case ALL_REDUCE: return dt_all_reduce(comm, send, recv, count, t, op);
    case REDUCE: return dt_reduce(comm, send, recv, count, t, op, c->root);
    case REDUCE_SCATTER: return dt_reduce_scatter(comm, send, recv, count, t, op);
    case ALL_GATHER: return dt_all_gather(comm, send, recv, count, t);
    case GATHER: return dt_gather(comm, send, recv, count, t, c->root);
    case SCATTER: return dt_scatter(comm, send, recv, count, t, c->root);
    case ALL_TO_ALL: return dt_all_to_all(comm, send, recv, count, t);
    case ALL_TO_ALL_V: return dt_all_to_all_v(comm, send, out, recv, in, t);
    default: return dt_broadcast(comm, recv, count, t, c->root);
    }
    switch (c->op) {
    case ALL_REDUCE: return dt_wait(c->ctx, dt_all_reduce_start(comm, send, recv, count, t, op));
    case REDUCE: return dt_wait(c->ctx, dt_reduce_start(comm, send, recv, count, t, op, c->root));
    case REDUCE_SCATTER: return dt_wait(c->ctx, dt_reduce_scatter_start(comm, send, recv, count, t, op));
    case ALL_GATHER: return dt_wait(c->ctx, dt_all_gather_start(comm, send, recv, count, t));
    case GATHER: return dt_wait(c->ctx, dt_gather_start(comm, send, recv, count, t, c->root));
    case SCATTER: return dt_wait(c->ctx, dt_scatter_start(comm, send, recv, count, t, c->root));
    case ALL_TO_ALL: return dt_wait(c->ctx, dt_all_to_all_start(comm, send, recv, count, t));
    case ALL_TO_ALL_V: return dt_wait(c->ctx, dt_all_to_all_v_start(comm, send, out, recv, in, t));
    default: return dt_wait(c->ctx, dt_broadcast_start(comm, recv, count, t, c->root));
    }
}

/* Bytes of recv that are not as they must be. */
static size_t wrong_bytes(const trial *c, const unsigned char *recv) {
    size_t size = dt_dtype_size(types[c->t]), share = c->count * size, at = 0, bad = 0;
    int n = dt_comm_size(c->comm), me = dt_comm_rank(c->comm), sums = c->op <= REDUCE_SCATTER;
    unsigned char **in = data.in[c->t][sums && redops[c->o] == DT_PROD];
    const unsigned char *sum = data.sum[c->t][c->o];
    if ((c->op == REDUCE || c->op == GATHER) && me != c->root) return 0;
    if (sums && c->algorithm == DT_RING && c->op != REDUCE && redops[c->o] != DT_AVG && n > 1) {
        for (int j = 0; j < n; j++) {
            size_t from = c->op == ALL_REDUCE ? dt__chunk_first(c->count, n, j) : (size_t)j * c->count;
            size_t to = c->op == ALL_REDUCE ? dt__chunk_first(c->count, n, j + 1) : from + c->count;
            if (c->op == REDUCE_SCATTER && j != me) continue;
            for (size_t i = from; i < to; i++)
                bad += get(recv, types[c->t], i - (c->op == ALL_REDUCE ? 0 : from)) !=
                       ring_sum(n, j, i, types[c->t], redops[c->o]);
        }
        return bad;
    }
    switch (c->op) {
    case ALL_REDUCE:
    case REDUCE: return memcmp(recv, sum, share) != 0;
    case REDUCE_SCATTER: return memcmp(recv, sum + (size_t)me * share, share) != 0;
    case ALL_GATHER:
    case GATHER:
        for (int r = 0; r < n; r++) bad += memcmp(recv + (size_t)r * share, in[r], share) != 0;
        return bad;
    case SCATTER: return memcmp(recv, in[c->root] + (size_t)me * share, share) != 0;
    case ALL_TO_ALL:
        for (int r = 0; r < n; r++)
            bad += memcmp(recv + (size_t)r * share, in[r] + (size_t)me * share, share) != 0;
        return bad;
    case ALL_TO_ALL_V:
        for (int r = 0; r < n; r++) {
            size_t first = 0;
            for (int j = 0; j < me; j++) first += v_count(c, r, j) * size;
            bad += memcmp(recv + at, in[r] + first, v_count(c, r, me) * size) != 0;
            at += v_count(c, r, me) * size;
        }
        return bad;
    default: return memcmp(recv, in[c->root], share) != 0;
    }
}

static void try_one(const trial *c) {
    size_t size = dt_dtype_size(types[c->t]), share = c->count * size, out[MAX_RANKS], in[MAX_RANKS], sent = 0,
        came = 0;
    int n = dt_comm_size(c->comm), me = dt_comm_rank(c->comm), sums = c->op <= REDUCE_SCATTER;
    int root = me == c->root, rooted_recv = c->op == REDUCE || c->op == GATHER, rooted_send = c->op == SCATTER;
    const unsigned char *mine = data.in[c->t][sums && redops[c->o] == DT_PROD][me];
    size_t whole = (size_t)n * share, send_bytes, recv_bytes;
    for (int r = 0; r < n; r++) {
        out[r] = v_count(c, me, r);
        in[r] = v_count(c, r, me);
        sent += out[r] * size;
        came += in[r] * size;
    }
    send_bytes = c->op == REDUCE_SCATTER || c->op == SCATTER || c->op == ALL_TO_ALL ? whole
                 : c->op == ALL_TO_ALL_V ? sent : share;
    recv_bytes = c->op == ALL_GATHER || c->op == GATHER || c->op == ALL_TO_ALL ? whole
                 : c->op == ALL_TO_ALL_V ? came : share;
    area a, b;
    unsigned char *send, *recv;
    int one = c->in_place || c->op == BROADCAST;
    if (rooted_recv && c->in_place && !root) one = 0;
    if (rooted_send && c->in_place && !root) one = 0;
    if (one) {
        a = b = area_make(c, send_bytes > recv_bytes ? send_bytes : recv_bytes, 0);
        send = recv = a.p;
        if (c->op == REDUCE_SCATTER || c->op == SCATTER) recv = send + (size_t)me * share;
        if (c->op == ALL_GATHER || c->op == GATHER) send = recv + (size_t)me * share;
    } else {
        a = area_make(c, send_bytes, 0);
        b = area_make(c, recv_bytes, 1);
        send = a.p;
        recv = b.p;
    }
    if (c->op != BROADCAST || root) memcpy(send, mine, send_bytes);
    if (c->number % 7 == (uint64_t)me % 7) dt_ctx_host(c->ctx)->sleep(dt_ctx_host(c->ctx)->user, 0);
    dt_status status = call(c, rooted_send && !root && c->number % 2 ? NULL : send,
                            rooted_recv && !root && c->number % 2 ? NULL : recv, out, in);
    size_t bad = wrong_bytes(c, recv), touched = 0;
    if (!one && memcmp(send, mine, send_bytes) != 0) touched = 1;
    for (size_t i = 0; rooted_recv && !root && i < recv_bytes && !one; i++) touched += recv[i] != 0x5A;
    CHECK_MSG(status == DT_OK && bad == 0 && touched == 0,
              "%s %s x %zu op %d root %d, %d ranks, rank %d, algorithm %d, in place %d, place %d, started %d: %s, %zu "
              "wrong, %zu touched", op_names[c->op], dt_dtype_name(types[c->t]), c->count, c->o, c->root, n, me,
              (int)c->algorithm, c->in_place, c->place, c->started, dt_status_name(status), bad, touched);
    area_free(c, a);
    if (!one) area_free(c, b);
}

static dt_status sweep_rank(dt_ctx *ctx, void *user) {
    const sweep *s = (const sweep *)user;
    trial c;
    memset(&c, 0, sizeof c);
    c.ctx = ctx;
    c.comm = dt_world(ctx);
    int n = dt_comm_size(c.comm);
    for (int algorithm = 0; algorithm < DT_ALGORITHMS; algorithm++) {
        if (!(s->algorithm_set >> algorithm & 1)) continue;
        c.algorithm = (dt_algorithm)algorithm;
        dt_comm_set_algorithm(c.comm, c.algorithm);
        for (c.place = 0; c.place < s->places; c.place++) {
            for (int k = 0; k < s->n_counts; k++) {
                c.count = s->counts[k];
                for (c.t = 0; c.t < 5; c.t++) {
                    if (!(s->type_set >> c.t & 1)) continue;
                    for (c.op = 0; c.op < OPS; c.op++) {
                        dt__op_code code = (dt__op_code)c.op;   /* the same order */
                        dt__call call = dt__call_make(code, NULL, NULL, 0, DT_F32);
                        if (algorithm && !dt__algorithm_of(&call, c.algorithm)) continue;
                        int rooted = dt__is_rooted(code);
                        for (c.o = 0; c.o < (s->all_ops && c.op <= REDUCE_SCATTER ? 5 : 1); c.o++) {
                            for (c.in_place = 0; c.in_place < 2; c.in_place++) {
                                if (c.in_place && c.op >= ALL_TO_ALL) continue;
                                c.root = rooted ? (int)(mix(c.number) % (uint64_t)n) : 0;
                                int roots = rooted && s->all_roots && c.o == 0 ? n : 1;
                                for (int r = 0; r < roots && dt_error(ctx) == DT_OK; r++) {
                                    c.number++;
                                    c.started = (int)(mix(c.number + 99) % 2);
                                    if (roots > 1) c.root = r;
                                    try_one(&c);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    dt_comm_set_algorithm(c.comm, DT_ALGORITHM_AUTO);
    dt_barrier(c.comm);
    return dt_error(ctx);
}

static void test_sweep(void) {
    for (int n = 1; n <= 8; n++) {
        size_t counts[] = { 0, 1, (size_t)n - 1, (size_t)n, (size_t)n + 1, 17, 1000 };
        sweep s = { 1, 0, 1, 31, 31, counts, 7, n <= 5 };
        data_make(n, (size_t)n * 1001, 31, 1);
        run_well_on(0, n, sweep_rank, &s);
        s.places = PLACES;
        if (n > 5) s.type_set = 1 | 8, s.all_ops = 0;
        if (n <= 5 || n == 8) run_well_on(1, n, sweep_rank, &s);
    }
    for (int n = 16; n <= 32; n += 16) {
        size_t counts[] = { 1, 17, 33, 300 };
        sweep s = { 1, 0, 0, 1 | 8, 31, counts, n == 16 ? 4 : 3, 0 };
        data_make(n, (size_t)n * 301, 1 | 8, 0);
        run_well_on(0, n, sweep_rank, &s);
        s.places = PLACES;
        s.algorithm_set = n == 16 ? 31 : 1 | 1 << DT_TREE;
        run_well_on(1, n, sweep_rank, &s);
    }
    data_free();
}

static void test_windows(void) {
    for (int n = 2; n <= 5; n++) {      /* more than several windows of 262,144 bytes, and not a multiple */
        size_t counts[] = { 100003, 250007 };
        sweep s = { 1, 0, 0, n == 3 ? 1 | 8 : 1, 31, counts, 2, 0 };
        if (n == 4) continue;
        data_make(n, (size_t)n * 250008, s.type_set, 0);
        s.algorithm_set = 1 | 1 << DT_DIRECT | (n == 3 ? 30 : 0);
        run_well_on(0, n, sweep_rank, &s);
        s.places = PLACES;
        run_well_on(1, n, sweep_rank, &s);
    }
    data_free();
}

/* ---- 2. traffic -------------------------------------------------------------------------------------------------- */

/* Ranks below v in a binomial tree over n, v included; and how many hang directly on it. */
static size_t tree_below(int v, int n) {
    int low = v ? v & -v : n;
    return (size_t)(v + low > n ? n - v : low);
}
static size_t tree_children(int v, int n) {
    size_t children = 0;
    for (int mask = 1; mask < n && !(v & mask); mask *= 2) children += v + mask < n;
    return children;
}

/* What rank me of n sends, in messages and elements, by the table of section 15 made exact. */
static dt_traffic formula(int op, dt_algorithm a, int n, int me, int root, size_t count) {
    size_t others = (size_t)n - 1, mine = dt__chunk_first(count, n, me + 1) - dt__chunk_first(count, n, me);
    size_t next = dt__chunk_first(count, n, (me + 1) % n + 1) - dt__chunk_first(count, n, (me + 1) % n), log2n = 0;
    int v = (me - root + n) % n;
    while ((1 << log2n) < n) log2n++;
    dt_traffic t = { 0, 0 };
    switch (op) {
    case ALL_REDUCE:
        if (a == DT_DIRECT) t.messages = 2 * others, t.bytes = count - mine + others * mine;
        if (a == DT_RING) t.messages = 2 * others, t.bytes = count - mine + count - next;
        if (a == DT_DOUBLING) t.messages = log2n, t.bytes = others * count;
        v = me;
        if (a == DT_TREE) t.messages = tree_children(v, n) + (v > 0),
            t.bytes = (tree_children(v, n) + (v > 0 ? tree_below(v, n) : 0)) * count;
        break;
    case REDUCE:
        if (a == DT_DIRECT) t.messages = others + (v > 0), t.bytes = v > 0 ? count : count - mine;
        if (a == DT_TREE) t.messages = v > 0, t.bytes = v > 0 ? tree_below(v, n) * count : 0;
        break;
    case REDUCE_SCATTER: t.messages = others, t.bytes = others * count; break;
    case ALL_GATHER: t.messages = a == DT_DOUBLING ? log2n : others, t.bytes = others * count; break;
    case GATHER:
        t.messages = v > 0;
        t.bytes = v > 0 ? (a == DT_TREE ? tree_below(v, n) : 1) * count : 0;
        break;
    case SCATTER:
        if (a == DT_DIRECT) t.messages = v ? 0 : others, t.bytes = v ? 0 : others * count;
        if (a == DT_TREE) t.messages = tree_children(v, n), t.bytes = (tree_below(v, n) - 1) * count;
        break;
    case ALL_TO_ALL: t.messages = others, t.bytes = others * count; break;
    case BROADCAST:
        if (a == DT_DIRECT) t.messages = v ? 0 : others, t.bytes = v ? 0 : others * count;
        if (a == DT_RING) t.messages = others + (v ? 0 : others), t.bytes = count - next + (v ? 0 : count - mine);
        if (a == DT_TREE) t.messages = tree_children(v, n), t.bytes = tree_children(v, n) * count;
        break;
    default: break;
    }
    return t;
}

typedef struct traffic_seen { dt_traffic busiest[OPS][DT_ALGORITHMS]; } traffic_seen;

static dt_status traffic_rank(dt_ctx *ctx, void *user) {
    traffic_seen *seen = (traffic_seen *)user;
    static const size_t counts[] = { 5040, 7, 0 };      /* 5040: what 2 to 9 divide, but 8's half */
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    float *send = (float *)calloc((size_t)n * 5040, 4), *recv = (float *)calloc((size_t)n * 5040, 4);
    for (int a = DT_DIRECT; a < DT_ALGORITHMS; a++) {
        dt_comm_set_algorithm(world, (dt_algorithm)a);
        for (int op = 0; op < OPS; op++) {
            for (int k = 0; k < 3; k++) {
                for (int root = 0; root < n; root++) {
                    trial c;
                    memset(&c, 0, sizeof c);
                    c.ctx = ctx, c.comm = world, c.op = op, c.count = counts[k], c.root = root;
                    if (!dt__is_rooted((dt__op_code)op)) c.root = 0;
                    if (c.root != root || op == ALL_TO_ALL_V) continue;
                    dt__call dt = dt__call_make((dt__op_code)op, NULL, NULL, 0, DT_F32);
                    int has = dt__algorithm_of(&dt, (dt_algorithm)a) != NULL;
                    dt_traffic before = dt_comm_traffic(ctx), want = { 0, 0 };
                    if (call(&c, send, recv, NULL, NULL)) return dt_error(ctx);
                    dt_traffic now = dt_comm_traffic(ctx);
                    now.messages -= before.messages;
                    now.bytes -= before.bytes;
                    if (has) want = formula(op, (dt_algorithm)a, n, me, c.root, c.count);
                    CHECK_MSG(now.messages == want.messages && now.bytes == 4 * want.bytes,
                              "%s by %d, %d ranks, rank %d, root %d, count %zu: %zu messages, %zu bytes, not %zu, %zu",
                              op_names[op], a, n, me, c.root, c.count, now.messages, now.bytes, want.messages,
                              4 * want.bytes);
                    dt_traffic *b = &seen->busiest[op][a];
                    if (k > 0) continue;
                    size_t old = __atomic_load_n(&b->messages, __ATOMIC_SEQ_CST);
                    while (now.messages > old && !__atomic_compare_exchange_n(&b->messages, &old, now.messages, 0,
                                                                             __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
                    old = __atomic_load_n(&b->bytes, __ATOMIC_SEQ_CST);
                    while (now.bytes > old && !__atomic_compare_exchange_n(&b->bytes, &old, now.bytes, 0,
                                                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
                }
            }
        }
        dt_traffic before = dt_comm_traffic(ctx);
        dt_barrier(world);
        size_t log2n = 0;
        while ((1 << log2n) < n) log2n++;
        CHECK(dt_comm_traffic(ctx).messages - before.messages == (a == DT_DOUBLING ? log2n : 0));
        CHECK(dt_comm_traffic(ctx).bytes == before.bytes);
    }
    dt_comm_set_algorithm(world, DT_ALGORITHM_AUTO);    /* the own way sends no messages; a message is one */
    dt_traffic before = dt_comm_traffic(ctx);
    dt_all_reduce(world, send, recv, 5040, DT_F32, DT_SUM);
    CHECK(dt_comm_traffic(ctx).messages == before.messages && dt_comm_traffic(ctx).bytes == before.bytes);
    if (me == 0) dt_send(world, send, 10, DT_F32, 1, 0);
    if (me == 1) dt_recv(world, recv, 10, DT_F32, 0, 0);
    CHECK(dt_comm_traffic(ctx).messages - before.messages == (me == 0));
    CHECK(dt_comm_traffic(ctx).bytes - before.bytes == (size_t)(me == 0 ? 40 : 0));
    free(send);
    free(recv);
    return dt_error(ctx);
}

/* The table itself: the busiest rank. S is the full buffer, all shares together. */
static void check_table(int n, const traffic_seen *seen) {
    size_t N = (size_t)n, L = 0, share = 5040 * 4, S = share, all = N * share;
    while ((1 << L) < n) L++;
    int power = (1 << L) == n, divides = 5040 % n == 0;
    const struct { int op; dt_algorithm a; size_t messages, bytes; int exact; } rows[] = {
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
        dt_traffic b = seen->busiest[rows[i].op][rows[i].a];
        CHECK_MSG(b.messages == rows[i].messages && (!rows[i].exact || b.bytes == rows[i].bytes),
                  "the table, %s by %d, %d ranks: %zu messages, %zu bytes", op_names[rows[i].op], (int)rows[i].a, n,
                  b.messages, b.bytes);
    }
}

static void test_traffic(void) {
    for (int n = 2; n <= 9; n++) {
        traffic_seen seen;
        memset(&seen, 0, sizeof seen);
        run_well(n, traffic_rank, &seen);
        check_table(n, &seen);
    }
}

/* Logical bytes of the operations that are not in test_comm.c: the same by every algorithm. */
static dt_status logical_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    size_t count = 30, want = 0, out[MAX_RANKS], in[MAX_RANKS];
    static const float zeros[4096] = { 0 };
    float into[4096];
    (void)user;
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
        CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == want);    /* counted when it is over */
        dt_wait(ctx, work);
        want += 120 * (size_t)(n - 1);
        CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == want);
    }
    return dt_error(ctx);
}

static int post_keeps(const dt_comm *comm, const dt_work *work) {
    return dt__post_of(comm, comm->place.rank, work->call.seq)->kept;
}

/* A small collective in host memory is in the posts: it waits once. */
static dt_status post_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    static float big[5000];
    float x = 1;
    (void)user;
    dt_work *small = dt_all_reduce_start(world, &x, &x, 1, DT_F32, DT_SUM), *large;
    CHECK(small && post_keeps(world, small));
    dt_wait(ctx, small);
    large = dt_all_reduce_start(world, big, big, 5000, DT_F32, DT_SUM);
    CHECK(large && !post_keeps(world, large) && x == (float)dt_comm_size(world));
    return dt_wait(ctx, large);
}

/* Two forks of which `outside` has its buffers where the other cannot reach them: its post keeps the data, the other's
   need not. */
static dt_status mixed_rank(dt_ctx *ctx, void *user) {
    enum { N = 200 };
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), outside = *(const int *)user == me, root;
    float *range = (float *)dt_alloc(ctx, DT_MEM_COMM, 4 * N * sizeof *range, "buffers"), own[4 * N];
    float *a = outside ? own : range, *b = a + 2 * N;
    if (!range) return dt_error(ctx);
    for (int i = 0; i < 2 * N; i++) a[i] = (float)(1000 * me + i), b[i] = -1;
    dt_work *work = dt_all_reduce_start(world, a, b, N, DT_F32, DT_SUM);
    if (work && world->world->shared->spins > 0) CHECK(post_keeps(world, work) == outside);
    dt_wait(ctx, work);
    int wrong = 0;
    for (int i = 0; i < N; i++) wrong += b[i] != (float)(1000 + 2 * i);
    dt_all_gather(world, a, b, N, DT_F32);
    for (int i = 0; i < 2 * N; i++) wrong += b[i] != (float)(1000 * (i / N) + i % N);
    dt_all_to_all(world, a, b, N, DT_F32);
    for (int i = 0; i < 2 * N; i++) wrong += b[i] != (float)(1000 * (i / N) + me * N + i % N);
    dt_reduce_scatter(world, a, b, N, DT_F32, DT_SUM);
    for (int i = 0; i < N; i++) wrong += b[i] != (float)(1000 + 2 * (me * N + i));
    for (root = 0; root < 2; root++) {
        for (int i = 0; i < N; i++) b[i] = -1;
        dt_reduce(world, a, b, N, DT_F32, DT_SUM, root);
        for (int i = 0; i < N; i++) wrong += b[i] != (me == root ? (float)(1000 + 2 * i) : -1);
        for (int i = 0; i < N; i++) b[i] = a[i];
        dt_broadcast(world, b, N, DT_F32, root);
        for (int i = 0; i < N; i++) wrong += b[i] != (float)(1000 * root + i);
    }
    CHECK_MSG(wrong == 0, "rank %d: %d wrong", me, wrong);
    dt_free(ctx, DT_MEM_COMM, range, 4 * N * sizeof *range);
    return dt_error(ctx);
}

int main(int argc, char **argv) {
    int all = argc < 2;
#define PART(name) (all || strcmp(argv[1], name) == 0)
    if (PART("windows")) test_windows();
    if (PART("sweep")) test_sweep();
    if (PART("traffic")) test_traffic();
    if (PART("traffic")) for (int n = 2; n <= 5; n++) run_well(n, logical_rank, NULL);
    if (PART("post")) for (int procs = 0; procs < 2; procs++) run_well_on(procs, 3, post_rank, NULL);
    for (int outside = 0; PART("post") && outside <= 2; outside++) run_well_on(1, 2, mixed_rank, &outside);
    return check_done("test_comm_ops");
}
