/* test_comm.c - dt_comm.h: compares every collective with a naive one, and tests every way in which
   a run can fail.

   Ranks are threads. Ranks use CHECK, whose counters are atomic; values that must be equal on all
   ranks are stored in a struct that main checks after dt_run. Failure tests check three things:
   every rank returns an error, the error names the culprit, and it arrives long before
   timeout_s. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#include <pthread.h>

/* The library calls this pthread_create. threads_left counts down; at 0 the call fails; below 0 it
   never fails. */
static int threads_left = -1;
static int test_pthread_create(
    pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg) {
    if (__atomic_load_n(&threads_left, __ATOMIC_SEQ_CST) == 0) return 11;
    if (threads_left > 0) __atomic_fetch_sub(&threads_left, 1, __ATOMIC_SEQ_CST);
    return pthread_create(thread, attr, fn, arg);
}
#define pthread_create test_pthread_create
#define DT_IMPLEMENTATION
#include "dt_comm.h"
#undef pthread_create

#include "tests/comm/ranks.h"

#include <sched.h>
#include <signal.h>

/* Makes the collectives of a group run as messages, or in shared memory. */
static void set_direct(dt_comm *comm, int generic) {
    comm->direct = generic ? NULL : &dt__shared_direct;
}

/* ---- 1. every collective compared with a naive one ---- */

typedef struct buffers {
    unsigned char *send, *recv, *raw;
    size_t bytes;
} buffers;
enum { GUARD = 64 };

/* Two buffers of `count` elements, or one for both uses, between guard bytes. */
static buffers buffers_make(size_t count, dt_dtype dtype, int in_place) {
    buffers b;
    b.bytes = count * dt_dtype_size(dtype);
    size_t all = 3 * GUARD + 2 * b.bytes;
    b.raw = (unsigned char *)malloc(all);
    memset(b.raw, 0x5A, all);
    b.send = b.raw + GUARD;
    b.recv = in_place ? b.send : b.send + b.bytes + GUARD;
    return b;
}

static void buffers_free(buffers b) {
    size_t all = 3 * GUARD + 2 * b.bytes, bad = 0;
    for (size_t i = 0; i < GUARD; i++)
        bad += (b.raw[i] != 0x5A) + (b.raw[all - 1 - i] != 0x5A) +
               (b.raw[GUARD + b.bytes + i] != 0x5A);
    CHECK_MSG(bad == 0, "%zu guard bytes overwritten", bad);
    free(b.raw);
}

typedef struct cc { /* one case */
    dt_comm *comm;
    size_t count;
    dt_dtype dtype;
    dt_op op;
    int in_place;
    const char *how;
} cc;

static size_t differing(const void *buf, const cc *c, size_t n, size_t first, int rank_share) {
    size_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        double want = rank_share ? naive(dt_comm_size(c->comm), first + i, c->dtype, c->op)
                                 : sent_value((int)first, i, c->dtype, c->op);
        bad += get(buf, c->dtype, i) != want;
    }
    return bad;
}

static void fill(void *buf, const cc *c, size_t n, int rank) {
    for (size_t i = 0; i < n; i++) put(buf, c->dtype, i, sent_value(rank, i, c->dtype, c->op));
}

static void report_case(const char *what, const cc *c, dt_status status, size_t bad) {
    CHECK_MSG(status == DT_OK && bad == 0,
        "%s %s, %d ranks, rank %d, %s x %zu, op %d, in place %d: %s, %zu differ", c->how, what,
        dt_comm_size(c->comm), dt_comm_rank(c->comm), dt_dtype_name(c->dtype), c->count, (int)c->op,
        c->in_place, dt_status_name(status), bad);
}

static void try_reductions(const cc *c) {
    size_t n = (size_t)dt_comm_size(c->comm), rank = (size_t)dt_comm_rank(c->comm),
           size = dt_dtype_size(c->dtype);
    buffers b = buffers_make(c->count, c->dtype, c->in_place);
    fill(b.send, c, c->count, (int)rank);
    dt_status status = dt_all_reduce(c->comm, b.send, b.recv, c->count, c->dtype, c->op);
    size_t bad = differing(b.recv, c, c->count, 0, 1);
    if (!c->in_place) bad += differing(b.send, c, c->count, rank, 0); /* send must be unchanged */
    report_case("all-reduce", c, status, bad);
    buffers_free(b);

    b = buffers_make(n * c->count, c->dtype, c->in_place);
    fill(b.send, c, n * c->count, (int)rank);
    unsigned char *recv = c->in_place ? b.send + rank * c->count * size : b.recv;
    status = dt_reduce_scatter(c->comm, b.send, recv, c->count, c->dtype, c->op);
    report_case("reduce-scatter", c, status, differing(recv, c, c->count, rank * c->count, 1));
    /* reduce-scatter followed by an in-place all-gather must equal the all-reduce, bit for bit */
    memmove(b.recv + rank * c->count * size, recv, c->count * size);
    status = dt_all_gather(c->comm, b.recv + rank * c->count * size, b.recv, c->count, c->dtype);
    buffers whole = buffers_make(n * c->count, c->dtype, 1);
    fill(whole.send, c, n * c->count, (int)rank);
    dt_all_reduce(c->comm, whole.send, whole.send, n * c->count, c->dtype, c->op);
    report_case("both halves", c, status, memcmp(whole.send, b.recv, n * c->count * size) != 0);
    buffers_free(whole);
    buffers_free(b);
}

static void try_moves(const cc *c) {
    int n = dt_comm_size(c->comm), rank = dt_comm_rank(c->comm), root = (int)(c->count % (size_t)n);
    size_t size = dt_dtype_size(c->dtype), bad = 0, share = c->count * size;
    buffers b = buffers_make((size_t)n * c->count, c->dtype, c->in_place);
    unsigned char *mine = c->in_place ? b.send + (size_t)rank * share : b.send;
    fill(mine, c, c->count, rank);
    dt_status status = dt_all_gather(c->comm, mine, b.recv, c->count, c->dtype);
    for (int r = 0; r < n; r++)
        bad += differing(b.recv + (size_t)r * share, c, c->count, (size_t)r, 0);
    report_case("all-gather", c, status, bad);
    buffers_free(b);

    b = buffers_make(c->count, c->dtype, 1);
    fill(b.send, c, c->count, rank);
    status = dt_broadcast(c->comm, b.send, c->count, c->dtype, root);
    report_case("broadcast", c, status, differing(b.send, c, c->count, (size_t)root, 0));
    buffers_free(b);
    if (c->in_place) return;

    /* share j of rank i holds the elements of sender number i * n + j */
    b = buffers_make((size_t)n * c->count, c->dtype, 0);
    for (int j = 0; j < n; j++) fill(b.send + (size_t)j * share, c, c->count, rank * n + j);
    status = dt_all_to_all(c->comm, b.send, b.recv, c->count, c->dtype);
    bad = 0;
    for (int i = 0; i < n; i++)
        bad += differing(b.recv + (size_t)i * share, c, c->count, (size_t)(i * n + rank), 0);
    report_case("all-to-all", c, status, bad);
    buffers_free(b);
}

static dt_status collectives_rank(dt_ctx *ctx, void *user) {
    static const dt_dtype types[] = { DT_F32, DT_F64, DT_I32, DT_BF16, DT_F16, DT_U8, DT_I64 };
    static const dt_op ops[] = { DT_SUM, DT_AVG, DT_MAX, DT_MIN, DT_PROD };
    dt_comm *world = dt_world(ctx);
    size_t n = (size_t)dt_comm_size(world);
    size_t counts[] = { 0, 1, n - 1, n, n + 1, 17, 1000, 100003 };
    int big = *(const int *)user, all = check_all_cases();
    for (int generic = 0; generic < 2; generic++) {
        set_direct(world, generic);
        for (int k = 0; k < (big ? 8 : 7); k++) {
            for (int t = 0; t < 7; t++) {
                for (int in_place = 0; in_place < 2; in_place++) {
                    cc c = { world, counts[k], types[t], DT_SUM, in_place,
                        generic ? "generic" : "threads" };
                    if (k == 7 && t > 0 && t != 3) continue;
                    if (!all && (n + (size_t)(generic + k + t + in_place)) % 2) continue;
                    for (int o = 0; o < (k == 7 ? 1 : 5); o++) {
                        c.op = ops[o];
                        try_reductions(&c);
                    }
                    try_moves(&c);
                }
            }
            CHECK(dt_barrier(world) == DT_OK);
        }
    }
    return dt_error(ctx);
}

/* Checks the expected values for 16-bit types: each is within half a unit in the last place, plus
   the rounding of float addition, of the sum in double. And it often differs from a sum that is
   rounded at every step. */
static void test_expectations(dt_dtype dtype) {
    double unit = dtype == DT_BF16 ? 1 / 256.0 : 1 / 2048.0;
    int steps_differ = 0, far = 0;
    for (size_t i = 0; i < 1000; i++) {
        double sum = 0, size = 0, stepwise = sent_value(0, i, dtype, DT_SUM),
               want = naive(8, i, dtype, DT_SUM);
        for (int r = 0; r < 8; r++) {
            sum += sent_value(r, i, dtype, DT_SUM);
            size += fabs(sent_value(r, i, dtype, DT_SUM));
            if (r > 0)
                stepwise = rounded(dtype, (float)(stepwise + sent_value(r, i, dtype, DT_SUM)));
        }
        far += !(fabs(want - sum) <= unit * fabs(sum) + 8 * ldexp(size, -24));
        steps_differ += stepwise != want;
    }
    CHECK_MSG(far == 0 && steps_differ > 100,
        "%s: %d sums too far from double, %d differ from stepwise rounding", dt_dtype_name(dtype),
        far, steps_differ);
}

static void test_collectives(void) {
    test_expectations(DT_BF16);
    test_expectations(DT_F16);
    size_t i = 0; /* the data must distinguish orders of summation */
    while (i < 1000) {
        float ascending = 0, descending = 0;
        for (int r = 0; r < 3; r++) ascending += (float)element(r, i, DT_F32, DT_SUM);
        for (int r = 2; r >= 0; r--) descending += (float)element(r, i, DT_F32, DT_SUM);
        if (ascending != descending) break;
        i++;
    }
    CHECK(i < 1000);
    for (int ranks = 1; ranks <= 16; ranks++) {
        int big = ranks == 2 || ranks == 3 || ranks == 8;
        run_well(ranks, collectives_rank, &big);
    }
}

/* No rank leaves a barrier before the last has entered. */
static dt_status barrier_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    const dt_host *host = dt_ctx_host(ctx);
    int *come = (int *)user;
    for (int round = 1; round <= 200; round++) {
        if (round % 20 == 0 && dt_comm_rank(world) == round / 20 % 4) host->sleep(host->user, 2e-3);
        __atomic_add_fetch(come, 1, __ATOMIC_SEQ_CST);
        set_direct(world, round % 3 == 0);
        if (dt_barrier(world)) return dt_error(ctx);
        int seen = __atomic_load_n(come, __ATOMIC_SEQ_CST);
        if (seen < 4 * round)
            return dt_fail(ctx, DT_ERR_COMM, "round %d: only %d ranks had entered", round, seen);
    }
    return DT_OK;
}

/* The closing phase of a collective: a sender may change its buffer as soon as the call has
   returned. */
static dt_status reuse_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), rank = dt_comm_rank(world), bad = 0;
    float send[2048], recv[4 * 2048];
    (void)user;
    for (int round = 0; round < 300; round++) {
        for (int i = 0; i < 2048; i++) send[i] = (float)(rank * 1000 + round);
        dt_status status = round % 2 ? dt_all_gather(world, send, recv, 2048, DT_F32)
                                     : dt_all_to_all(world, send, recv, 512, DT_F32);
        for (int i = 0; i < 2048; i++) send[i] = -1;
        if (status) return status;
        int share = round % 2 ? 2048 : 512;
        for (int i = 0; i < n * share; i++) bad += recv[i] != (float)(i / share * 1000 + round);
    }
    CHECK_MSG(bad == 0, "rank %d saw %d changed elements", rank, bad);
    return DT_OK;
}

/* ---- 2. groups ---- */

static dt_status groups_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    (void)user;
    CHECK(strcmp(dt_comm_name(world), "world") == 0 && dt_ctx_rank(ctx) == me &&
          dt_comm_world_rank(world, me) == me);
    /* colors by remainder, keys that reverse the order */
    dt_comm *odd = dt_comm_split(world, me % 3, -me, "by three");
    int size = (n - me % 3 + 2) / 3;
    if (!CHECK(odd != NULL)) return dt_error(ctx);
    CHECK_MSG(dt_comm_size(odd) == size && dt_comm_rank(odd) == size - 1 - me / 3,
        "rank %d is %d of %d", me, dt_comm_rank(odd), dt_comm_size(odd));
    CHECK(strcmp(dt_comm_name(odd), "by three") == 0 &&
          dt_comm_world_rank(odd, 0) == me % 3 + 3 * (size - 1));
    CHECK(dt_comm_world_rank(odd, size) == -1 && dt_comm_world_rank(odd, -1) == -1);
    /* gathering the world ranks must give the new rank order */
    int32_t mine = me, all[MAX_RANKS];
    CHECK(dt_all_gather(odd, &mine, all, 1, DT_I32) == DT_OK);
    for (int i = 0; i < size; i++) CHECK(all[i] == me % 3 + 3 * (size - 1 - i));
    /* ranks with negative colors join no group; equal keys keep the old order; a long name is
       truncated */
    dt_comm *few = dt_comm_split(
        world, me % 2 ? -5 : 7, 0, "a name that is much longer than thirty-one bytes");
    CHECK((few == NULL) == (me % 2 == 1) && dt_error(ctx) == DT_OK);
    if (few) CHECK(dt_comm_rank(few) == me / 2 && strlen(dt_comm_name(few)) == 31);
    /* operations on both groups at once do not interfere */
    double a = 1, b = 1;
    for (int round = 0; round < 20; round++) {
        CHECK(dt_all_reduce(few, &a, &a, 1, DT_F64, DT_MAX) == DT_OK);
        CHECK(dt_sum_doubles(odd, &b, 1) == DT_OK);
    }
    double want = 1;
    for (int round = 0; round < 20; round++) want *= size;
    CHECK(b == want && a == 1);
    /* groups of groups, down to one rank */
    dt_comm *half = dt_comm_split(odd, dt_comm_rank(odd) >= size / 2, 0, NULL);
    dt_comm *one = dt_comm_split(half, dt_comm_rank(half), 0, "one");
    CHECK(half && one && dt_comm_size(one) == 1 && dt_comm_rank(one) == 0 &&
          dt_comm_world_rank(one, 0) == me);
    CHECK(strcmp(dt_comm_name(half), "group") == 0);
    CHECK(dt_comm_size(half) == (dt_comm_rank(odd) >= size / 2 ? size - size / 2 : size / 2));
    mine = me;
    CHECK(dt_all_reduce(half, &mine, &mine, 1, DT_I32, DT_MAX) == DT_OK && mine >= me);
    mine = me;
    CHECK(dt_all_reduce(one, &mine, all, 1, DT_I32, DT_SUM) == DT_OK && all[0] == me);
    CHECK(
        dt_broadcast(one, &mine, 1, DT_I32, 0) == DT_OK && mine == me && dt_mean(one, 2.5) == 2.5);
    return dt_error(ctx);
}

/* Ten thousand splits, most of whose groups find no place in shared memory. Every 100th group
   computes; groups of one take no place. */
typedef struct split_notes {
    int notices;
    size_t grown;
} split_notes;
static void count_notices(void *user, int level, int rank, const char *text) {
    (void)rank;
    if (level == DT_LOG_NOTICE && strstr(text, "the shared memory for groups"))
        ((split_notes *)user)->notices++;
}

static dt_status ten_thousand_rank(dt_ctx *ctx, void *user) {
    enum { SPLITS = 10000, N = 3000 };
    dt_comm *world = dt_world(ctx), *early = NULL;
    int me = dt_comm_rank(world), n = dt_comm_size(world), bad = 0, without = 0;
    int64_t mine[N], sum[N], one = 1;
    size_t before = dt_memory_used(ctx).live[DT_MEM_HOST];
    for (int i = 0; i < SPLITS && dt_error(ctx) == DT_OK; i++) {
        dt_comm *half = dt_comm_split(world, me % 2, -me, "half");
        if (i == 0) early = half;
        bad += half && i > 0 && half->group->channel == early->group->channel;
        if (!half || i % 100) continue;
        without += !half->group->members;
        for (int k = 0; k < N; k++) mine[k] = ((int64_t)me << 40) + k + i, sum[k] = -1;
        dt_all_reduce(half, mine, sum, i % 200 ? 1 : N, DT_I64, DT_SUM);
        int64_t ranks = 0, size = 0;
        for (int r = me % 2; r < n; r += 2) ranks += r, size++;
        for (int k = 0; k < (i % 200 ? 1 : N); k++) bad += sum[k] != (ranks << 40) + size * (k + i);
        /* messages of two groups of the same ranks do not meet */
        int next = (dt_comm_rank(half) + 1) % (int)size;
        if (size > 1) {
            int64_t got[2] = { 0, 0 }, sent[2] = { i, -i };
            dt_work *sends[2] = { dt_send_start(half, &sent[0], 1, DT_I64, next, 7),
                dt_send_start(early, &sent[1], 1, DT_I64, next, 7) };
            dt_recv_any(early, &got[1], 1, DT_I64, 7, NULL);
            dt_recv_any(half, &got[0], 1, DT_I64, 7, NULL);
            for (int k = 0; k < 2; k++) bad += dt_wait(ctx, sends[k]) != DT_OK || got[k] != sent[k];
        }
    }
    CHECK_MSG(
        bad == 0 && without >= (n > 3 ? 99 : 0), "%d wrong, %d without members", bad, without);
    CHECK(dt_all_reduce(early, &one, &one, 1, DT_I64, DT_SUM) == DT_OK);
    if (user && me == 0)
        ((split_notes *)user)->grown = dt_memory_used(ctx).live[DT_MEM_HOST] - before;
    return dt_error(ctx);
}

/* After 64 splits: ranks that call differently still get an error that names both calls. */
static dt_status late_mismatch_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx), *last = NULL;
    float x[8] = { 0 };
    for (int i = 0; i <= DT_SHARED_SPLITS; i++) last = dt_comm_split(world, 0, 0, "late");
    CHECK(last && !last->group->members && !last->direct);
    if (*(int *)user == 0) {
        dt_status status = dt_broadcast(last, x, dt_comm_rank(world) ? 8 : 7, DT_F32, 0);
        if (status == DT_OK) *(int *)user = -1; /* rank 0 only sends */
        return status;
    }
    if (dt_comm_rank(world) == 0) dt_send(last, x, 3, DT_F32, 1, 5); /* no rank receives it */
    return dt_error(ctx);
}

static void test_groups(void) {
    for (int ranks = 4; ranks <= 13; ranks += 3) run_well(ranks, groups_rank, NULL);
    outcome o;
    split_notes notes = { 0, 0 };
    dt_host host = *dt_host_default();
    host.user = &notes;
    host.log = count_notices;
    prepare(&o, 4, ten_thousand_rank, &notes);
    o.desc.host = &host;
    CHECK_MSG(start(&o) == DT_OK, "%s", o.report.text);
    CHECK_MSG(notes.notices == 1, "%d notices", notes.notices);
    CHECK_MSG(
        notes.grown > 0 && notes.grown < 8u << 20, "%zu bytes for 10,000 groups", notes.grown);
    run_well(3, ten_thousand_rank, NULL);
    int what = 0;
    run(&o, 2, late_mismatch_rank, &what);
    CHECK_MSG(o.status == DT_ERR_COMM && strstr(o.report.text, "f32 x 7") &&
                  strstr(o.report.text, "f32 x 8") && strstr(o.report.text, "late") && what == 0,
        "%d, %s", what, o.report.text);
    what = 1;
    run(&o, 2, late_mismatch_rank, &what);
    CHECK_MSG(
        o.status == DT_ERR_COMM && strstr(o.report.text, "without receiving f32 x 3 with tag 5"),
        "%s", o.report.text);
}

/* ---- 3. send and receive ---- */

enum { LARGE = 250000 };

static dt_status mail_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), me = dt_comm_rank(world), right = (me + 1) % n,
        left = (me + n - 1) % n;
    int32_t x, y;
    (void)user;
    /* different tags may be received out of order; equal tags arrive in order */
    for (int tag = 7; tag >= 4; tag--) {
        x = 100 * me + tag;
        dt_send(world, &x, 1, DT_I32, right, tag);
    }
    for (int i = 0; i < 3; i++) {
        x = 1000 * me + i;
        dt_send(world, &x, 1, DT_I32, right, 2);
    }
    for (int tag = 4; tag <= 7; tag++)
        CHECK(dt_recv(world, &y, 1, DT_I32, left, tag) == DT_OK && y == 100 * left + tag);
    for (int i = 0; i < 3; i++)
        CHECK(dt_recv(world, &y, 1, DT_I32, left, 2) == DT_OK && y == 1000 * left + i);
    /* the same tag in another group is a different message */
    dt_comm *pair = dt_comm_split(world, 0, -me, "turned");
    x = 1;
    dt_send(world, &x, 1, DT_I32, right, 0);
    x = 2;
    dt_send(pair, &x, 1, DT_I32, n - 1 - right, 0);
    CHECK(dt_recv(pair, &y, 1, DT_I32, n - 1 - left, 0) == DT_OK && y == 2);
    CHECK(dt_recv(world, &y, 1, DT_I32, left, 0) == DT_OK && y == 1);
    /* messages to the same rank; of no elements; of exactly the eager size */
    double self[DT_EAGER_BYTES / 8], got[DT_EAGER_BYTES / 8];
    for (int i = 0; i < DT_EAGER_BYTES / 8; i++) self[i] = me + i * 0.5, got[i] = 0;
    CHECK(dt_send(world, self, DT_EAGER_BYTES / 8, DT_F64, me, 1) == DT_OK);
    CHECK(dt_recv(world, got, DT_EAGER_BYTES / 8, DT_F64, me, 1) == DT_OK &&
          memcmp(self, got, sizeof got) == 0);
    CHECK(dt_send(world, NULL, 0, DT_F32, right, 9) == DT_OK &&
          dt_recv(world, NULL, 0, DT_F32, left, 9) == DT_OK);
    /* large messages around the ring; and more small messages in a row than a pair can hold */
    float *big = (float *)malloc(2 * LARGE * sizeof(float)), *in = big + LARGE;
    for (int i = 0; i < LARGE; i++) big[i] = (float)(me + i);
    for (int turn = 0; turn < 2; turn++) {
        if (me % 2 == turn)
            CHECK(dt_send(world, big, LARGE, DT_F32, right, 3) == DT_OK);
        else
            CHECK(dt_recv(world, in, LARGE, DT_F32, left, 3) == DT_OK);
    }
    int bad = 0;
    for (int i = 0; i < LARGE; i++) bad += in[i] != (float)(left + i);
    CHECK(bad == 0);
    for (int turn = 0; turn < 2; turn++) { /* the same bytes sent as 16-bit elements */
        memset(in, 0, LARGE * sizeof *in);
        if (me % 2 == turn)
            CHECK(dt_send(world, big, 2 * LARGE, DT_F16, right, 3) == DT_OK);
        else
            CHECK(dt_recv(world, in, 2 * LARGE, DT_F16, left, 3) == DT_OK &&
                  in[9] == (float)(left + 9));
    }
    for (int i = 0; me == 0 && i < 500; i++) dt_send(world, &i, 1, DT_I32, n - 1, 5);
    for (int i = 0; me == n - 1 && i < 500; i++)
        CHECK(dt_recv(world, &y, 1, DT_I32, 0, 5) == DT_OK && y == i);
    free(big);
    return dt_error(ctx);
}

/* A receive from any rank waits while one rank is left that may send. */
static dt_status last_sender_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), x = me, from = -1;
    (void)user;
    if (me == 2) dt_host_default()->sleep(NULL, 0.05);
    if (me == 2) dt_send(world, &x, 1, DT_I32, 1, 6);
    if (me == 1) CHECK(dt_recv_any(world, &x, 1, DT_I32, 6, &from) == DT_OK && from == 2 && x == 2);
    return dt_error(ctx);
}

/* Bursts of messages with equal tags, sent while the receiver searches the pair. */
static dt_status burst_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int receives = dt_comm_rank(world) == 1, bad = 0;
    int32_t next = 0, x;
    (void)user;
    for (int round = 0; round < 5000; round++) {
        for (int i = 0; i < 2 + round % 3; i++, next++) {
            if (!receives)
                dt_send(world, &next, 1, DT_I32, 1, 0);
            else
                bad += dt_recv(world, &x, 1, DT_I32, 0, 0) != DT_OK || x != next;
        }
        if (receives)
            dt_send(world, NULL, 0, DT_F32, 0, 1);
        else
            dt_recv(world, NULL, 0, DT_F32, 1, 1);
    }
    CHECK_MSG(bad == 0, "%d messages out of order", bad);
    return dt_error(ctx);
}

typedef struct mail_case {
    size_t sent, received;
    dt_dtype sent_as, received_as;
    const char *says;
} mail_case;

enum { MAIL_LINE = __LINE__ + 6 };
static dt_status mail_case_rank(dt_ctx *ctx, void *user) {
    const mail_case *c = (const mail_case *)user;
    dt_comm *world = dt_world(ctx);
    static const double zeros[4000] = { 0 };
    double into[4000];
    if (dt_comm_rank(world) == 1) dt_send(world, zeros, c->sent, c->sent_as, 2, 3);
    if (dt_comm_rank(world) == 2) return dt_recv(world, into, c->received, c->received_as, 1, 3);
    return dt_barrier(world);
}

/* Both ranks send a large message first, so they deadlock. */
static dt_status both_send_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    static const float zeros[2000] = { 0 };
    (void)user;
    return dt_send(world, zeros, 2000, DT_F32, 1 - dt_comm_rank(world), 0);
}

/* user: 0: a small message that no rank receives; 1: a large one; 2: a receive without a sender; 3:
   a 9th small message to the same rank; 4: a receive from the same rank, which has sent nothing; 5:
   a large message to the same rank */
enum { LOST_LINE = __LINE__ + 6 };
static dt_status lost_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    float x[2000] = { 0 };
    int what = *(const int *)user;
    if (dt_comm_rank(world) == 0) return DT_OK;
    if (what == 0) return dt_send(world, x, 10, DT_F32, 0, 4);
    if (what == 1) return dt_send(world, x, 2000, DT_F32, 0, 4);
    if (what == 2) return dt_recv(world, x, 10, DT_F32, 0, 4);
    for (int i = 0; what == 3 && i < 9; i++) dt_send(world, x, 1, DT_F32, 1, 0);
    if (what == 4) return dt_recv(world, x, 1, DT_F32, 1, 0);
    if (what == 5) return dt_send(world, x, 2000, DT_F32, 1, 0);
    return dt_error(ctx);
}

static void test_mail(void) {
    outcome o;
    for (int ranks = 2; ranks <= 8; ranks += 2) run_well(ranks, mail_rank, NULL);
    static const mail_case cases[] = {
        { 10, 12, DT_F32, DT_F32,
            "rank 1 sends f32 x 10 at test_comm.c:%d, rank 2 receives f32 x 12 at "
            "test_comm.c:%d (tag 3 on world); count and type must be equal" },
        { 10, 10, DT_F32, DT_I32,
            "rank 1 sends f32 x 10 at test_comm.c:%d, rank 2 receives i32 x 10 at "
            "test_comm.c:%d (tag 3 on world); count and type must be equal" },
        { 2000, 1000, DT_F64, DT_F64,
            "rank 1 sends f64 x 2000 at test_comm.c:%d, rank 2 receives f64 x 1000 at "
            "test_comm.c:%d (tag 3 on world); count and type must be equal" },
        { 1000, 2000, DT_F64, DT_F64,
            "rank 1 sends f64 x 1000 at test_comm.c:%d, rank 2 receives f64 x 2000 at "
            "test_comm.c:%d (tag 3 on world); count and type must be equal" },
        { 3000, 3000, DT_BF16, DT_F16,
            "rank 1 sends bf16 x 3000 at test_comm.c:%d, rank 2 receives f16 x 3000 at "
            "test_comm.c:%d (tag 3 on world); count and type must be equal" },
    };
    for (int i = 0; i < 5; i++) {
        mail_case c = cases[i];
        run(&o, 3, mail_case_rank, &c);
        char says[160];
        snprintf(says, sizeof says, c.says, MAIL_LINE, MAIL_LINE + 1);
        CHECK_MSG(o.status == DT_ERR_COMM && strstr(o.report.text, says), "%s", o.report.text);
        CHECK_MSG(o.error[0] == DT_ERR_PEER && strstr(o.text[0], says), "%s", o.text[0]);
        CHECK(in_time(o.took, 20));
    }
    static const char *const lost[] = {
        "rank 1: rank 0 ended without receiving f32 x 10 with tag 4 on world, sent at "
        "test_comm.c:%d",
        "rank 1: rank 0 ended without the receive that this send needs: send f32 x 2000 to rank 0 "
        "with tag 4 on world at test_comm.c:%d; check that all ranks run the same steps",
        "rank 1: rank 0 ended without the send that this receive needs: receive f32 x 10 from rank "
        "0 with tag 4 on world at test_comm.c:%d; check that all ranks run the same steps",
        "rank 1: send f32 x 1 to rank 1 with tag 0 on world at test_comm.c:%d: a rank that waits "
        "for itself waits for ever",
        "rank 1: receive f32 x 1 from rank 1 with tag 0 on world at test_comm.c:%d: a rank that "
        "waits for itself waits for ever",
        "rank 1: send f32 x 2000 to rank 1 with tag 0 on world at test_comm.c:%d: a rank that "
        "waits for itself waits for ever",
    };
    for (int i = 0; i < 6; i++) {
        char want[256];
        run(&o, 2, lost_rank, &i);
        snprintf(want, sizeof want, lost[i], LOST_LINE + i);
        CHECK_MSG(o.status == DT_ERR_COMM && strcmp(o.report.text, want) == 0, "%s", o.report.text);
        CHECK_MSG(o.host.error_lines == 1 && in_time(o.took, 20), "%d lines, %.1f s",
            o.host.error_lines, o.took);
    }
    prepare(&o, 2, both_send_rank, NULL);
    start(&o);
    CHECK_MSG(o.status == DT_ERR_COMM && in_time(o.took, 5) &&
                  strstr(o.report.text, "deadlock: rank 0 waits in send f32 x 2000 "
                                        "to its rank 1 with tag 0 on world at test_comm.c:") &&
                  strstr(o.report.text,
                      " for rank 1, rank 1 waits in "
                      "send f32 x 2000 to its rank 0 with tag 0 on world at test_comm.c:"),
        "%s", o.report.text);
}

/* ---- 4. a failure on each rank in each operation ---- */

enum { N_OPS = 10, N_KINDS = 9 };
typedef enum fault {
    FAILS,
    ENDS,
    RETURNS_ERROR,
    OTHER_OP,
    OTHER_COUNT,
    OTHER_DTYPE,
    OTHER_REDOP,
    OTHER_ROOT,
    BAD_ARG
} fault;
typedef struct injection {
    int op, culprit, generic;
    fault kind;
} injection;

static dt_status call_op(dt_comm *comm, int op, float *a, float *b, size_t count, dt_dtype dtype,
    dt_op redop, int root) {
    double d = 1;
    switch (op) {
    case 0: return dt_all_reduce(comm, a, b, count, dtype, redop);
    case 1: return dt_reduce_scatter(comm, a, b, count, dtype, redop);
    case 2: return dt_all_gather(comm, a, b, count, dtype);
    case 3: return dt_all_to_all(comm, a, b, count, dtype);
    case 4: return dt_broadcast(comm, a, count, dtype, root);
    case 5: return dt_barrier(comm);
    case 6: return dt_sum_doubles(comm, &d, 1);
    case 7: return dt_agree(comm, DT_OK);
    case 8: return dt_comm_split(comm, 0, 0, "s") ? DT_OK : DT_ERR_COMM;
    default: /* messages around the ring */
        dt_send(comm, a, count, dtype, (dt_comm_rank(comm) + 1) % dt_comm_size(comm), 0);
        return dt_recv(comm, b, count, dtype,
            (dt_comm_rank(comm) + dt_comm_size(comm) - 1) % dt_comm_size(comm), 0);
    }
}

/* Two good rounds; in the third the culprit misbehaves. Buffers are on the heap, overwritten with
   garbage and freed when the call has returned: the address sanitizer, or the garbage, reveals a
   peer that still reads them. */
static dt_status injected_rank(dt_ctx *ctx, void *user) {
    const injection *in = (const injection *)user;
    dt_comm *world = dt_world(ctx);
    dt_status status = DT_OK;
    if (in->generic) set_direct(world, 1);
    for (int round = 0; round < 3 && !status; round++) {
        size_t count = 4000;
        int op = in->op, root = 1, me = dt_comm_rank(world) == in->culprit && round == 2;
        dt_dtype dtype = DT_F32;
        dt_op redop = DT_SUM;
        float *a = (float *)calloc(4 * 2 * count, sizeof *a),
              *b = (float *)calloc(4 * 2 * count, sizeof *b);
        if (in->op == 9) count = 500; /* eager messages, which do not wait */
        if (me && in->kind == FAILS) status = dt_fail(ctx, DT_ERR_NUMERIC, "the injected failure");
        if (me && in->kind == OTHER_OP) op = (op + 1) % 9;
        if (me && in->kind == OTHER_COUNT) count = 400;
        if (me && in->kind == OTHER_DTYPE) dtype = DT_I32;
        if (me && in->kind == OTHER_REDOP) redop = DT_MAX;
        if (me && in->kind == OTHER_ROOT) root = 2;
        if (me && in->kind == BAD_ARG) dtype = (dt_dtype)99;
        if (!(me && (in->kind == ENDS || in->kind == RETURNS_ERROR))) {
            dt_status called = call_op(world, op, a, b, count, dtype, redop, root);
            if (status) CHECK_MSG(called != DT_OK, "op %d succeeds in a failed context", op);
            if (!status) status = called;
        }
        free(a);
        free(b);
        if (me && in->kind == ENDS) return DT_OK;
        if (me && in->kind == RETURNS_ERROR) return DT_ERR_IO;
    }
    /* sticky: the next call does nothing and returns the error */
    if (status && !in->generic) CHECK(dt_barrier(world) == dt_error(ctx) && dt_error(ctx) != DT_OK);
    return status;
}

/* 1 if this kind of fault can be noticed in this operation. */
static int applies(int op, fault k) {
    int moves = op < 5 || op == 9;
    if (k == OTHER_COUNT || k == OTHER_DTYPE || k == BAD_ARG) return moves;
    if (k == OTHER_REDOP) return op < 2;
    if (k == OTHER_ROOT) return op == 4;
    if (k == OTHER_OP) return op < 9;
    return 1;
}

static void check_injection(const injection *in, const outcome *o, int ranks) {
    static const char *const names[] = { "all-reduce", "reduce-scatter", "all-gather", "all-to-all",
        "broadcast", "barrier", "dt_sum_doubles", "dt_agree", "dt_comm_split", "receive" };
    char culprit[32];
    snprintf(culprit, sizeof culprit, "rank %d", in->culprit);
    const char *text = o->report.text;
    char where[160];
    snprintf(where, sizeof where, "op %s, kind %d, rank %d%s", names[in->op], (int)in->kind,
        in->culprit, in->generic ? ", generic" : "");
    CHECK_MSG(
        o->status != DT_OK && o->status != DT_ERR_PEER, "%s: %s", where, dt_status_name(o->status));
    CHECK_MSG(
        strstr(text, culprit) != NULL, "%s: the text does not name the culprit: %s", where, text);
    CHECK_MSG(in_time(o->took, 20), "%s: took %.1f s", where, o->took);
    CHECK_MSG(o->host.error_lines == 1 && strcmp(o->host.line, text) == 0, "%s: %d lines: %s",
        where, o->host.error_lines, o->host.line);
    /* a rank may have finished before the failure: a broadcast's root does not wait */
    if (in->generic) return;
    if (in->kind == FAILS)
        CHECK_MSG(strstr(text, ": the injected failure") != NULL, "%s: %s", where, text);
    if (in->kind == RETURNS_ERROR)
        CHECK_MSG(strstr(text, "returned DT_ERR_IO") && o->status == DT_ERR_IO, "%s", text);
    if (in->kind == ENDS)
        CHECK_MSG(
            strstr(text, names[in->op]) && strstr(text, "ended without"), "%s: %s", where, text);
    if (in->kind == BAD_ARG)
        CHECK_MSG(o->status == DT_ERR_UNSUPPORTED && strstr(text, "99 is no"), "%s", text);
    if (in->kind >= OTHER_OP && in->kind <= OTHER_ROOT && in->op < 9) {
        CHECK_MSG(o->status == DT_ERR_COMM && strstr(text, " calls "), "%s: %s", where, text);
        CHECK_MSG(in->culprit == 0 || strstr(text, "rank 0 calls"),
            "%s: the text names only one side: %s", where, text);
    }
    int own = 0; /* ranks that report their own failure: only the first failing rank may */
    for (int r = 0; r < ranks; r++) own += o->error[r] != DT_OK && o->error[r] != DT_ERR_PEER;
    CHECK_MSG(own <= 1, "%s: %d ranks report to be the first that failed", where, own);
    for (int r = 0; r < ranks; r++) {
        if (r == in->culprit && (in->kind == ENDS || in->kind == RETURNS_ERROR)) continue;
        /* this rank's message did not involve the culprit */
        if (in->op == 9 && (r + ranks - in->culprit) % ranks != 1 && o->error[r] == DT_OK) continue;
        CHECK_MSG(o->error[r] != DT_OK && o->ended[r], "%s: rank %d: %s", where, r,
            dt_status_name(o->error[r]));
        CHECK_MSG(
            strstr(o->text[r], culprit) != NULL, "%s: rank %d says: %s", where, r, o->text[r]);
        if (o->error[r] != DT_ERR_PEER) continue;
        CHECK_MSG(strstr(o->text[r], "peer failed first: rank ") && strstr(o->text[r], text),
            "%s: %s", where, o->text[r]);
    }
}

static void test_injections(void) {
    enum { RANKS = 4 };
    outcome o;
    injection in;
    for (in.generic = 0; in.generic < 2; in.generic++) {
        for (in.op = 0; in.op < N_OPS; in.op++) {
            for (int k = 0; k < N_KINDS; k++) {
                in.kind = (fault)k;
                if (!applies(in.op, in.kind) || (in.generic && k >= OTHER_OP)) continue;
                for (in.culprit = 0; in.culprit < RANKS; in.culprit++) {
                    run(&o, RANKS, injected_rank, &in);
                    check_injection(&in, &o, RANKS);
                }
            }
        }
    }
}

/* One complete error text, compared literally. */
enum { mismatch_line = __LINE__ + 8 };
static dt_status mismatch_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    float a[40] = { 0 }, b[40];
    (void)user;
    for (int i = 0; i < 40; i++) dt_barrier(world);
    dt_comm *tp = dt_comm_split(world, dt_comm_rank(world) / 2, 0, "tp");
    for (int i = 0; i < 40; i++) dt_barrier(tp);
    if (dt_comm_rank(world) == 3) return dt_all_reduce(tp, a, b, 10, DT_F32, DT_SUM);
    return dt_all_gather(tp, a, b, 10, DT_F32);
}

static void test_mismatch_text(void) {
    outcome o;
    run(&o, 4, mismatch_rank, NULL);
    char says[256];
    snprintf(says, sizeof says,
        "rank 3 calls all-reduce f32 x 10 sum at test_comm.c:%d, rank 2 calls all-gather f32 x "
        "10 at test_comm.c:%d (operation 41 on tp)",
        mismatch_line, mismatch_line + 1);
    CHECK_MSG(o.status == DT_ERR_COMM && strstr(o.report.text, says), "%s", o.report.text);
    CHECK(o.report.rank == 2 || o.report.rank == 3);
}

/* In an all-to-all-v of a group of one, the two counts of the rank itself must agree too: recv has
   room for only recv_counts[0] elements. */
static dt_status counts_of_one_rank(dt_ctx *ctx, void *user) {
    float *a = (float *)calloc(2, 64 * sizeof *a), *b = a + 64;
    const size_t out = 64, in = 1;
    dt_comm *world = dt_world(ctx), *one = dt_comm_split(world, dt_comm_rank(world), 0, "one");
    (void)user;
    for (int i = 0; i < 64; i++) a[i] = 1;
    dt_status status = dt_all_to_all_v(one, a, &out, b, &in, DT_F32);
    CHECK_MSG(status == DT_ERR_COMM && b[0] == 0 && b[1] == 0 && b[63] == 0, "%s: %s",
        dt_status_name(status), dt_error_text(ctx));
    CHECK_MSG(strstr(dt_error_text(ctx), "64") || status == DT_ERR_PEER, "%s", dt_error_text(ctx));
    free(a);
    return status;
}

static void test_counts_of_one_rank(void) {
    outcome o;
    run(&o, 1, counts_of_one_rank, NULL);
    CHECK_MSG(o.status == DT_ERR_COMM, "%s", o.report.text);
}

/* Every rank fails with its own error: only one line is logged, and the first failure is
   reported. */
static dt_status all_fail_rank(dt_ctx *ctx, void *user) {
    (void)user;
    dt_barrier(dt_world(ctx));
    dt_fail(ctx, DT_ERR_NUMERIC, "the loss is not finite");
    return DT_OK; /* the failed context makes the run fail */
}

static void test_all_fail(void) {
    outcome o;
    run(&o, 4, all_fail_rank, NULL);
    CHECK_MSG(o.status == DT_ERR_NUMERIC && o.host.error_lines == 1, "%d lines: %s",
        o.host.error_lines, o.host.line);
    CHECK(strcmp(o.host.line, o.report.text) == 0 &&
          strstr(o.report.text, ": the loss is not finite"));
    for (int r = 0; r < 4; r++)
        CHECK_MSG(o.error[r] == DT_ERR_NUMERIC || o.error[r] == DT_ERR_PEER, "%s", o.text[r]);
}

/* Once any rank has failed, even calls that need no other rank are refused. */
static dt_status refused_after_failure_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int which = *(const int *)user;
    float x = 1, y = 0;
    dt_comm *one = dt_comm_split(world, dt_comm_rank(world), 0, "one");
    if (dt_comm_rank(world) == 0) return dt_fail(ctx, DT_ERR_NUMERIC, "first");
    while (!dt__aborted(world->world->shared))
        dt_ctx_host(ctx)->sleep(dt_ctx_host(ctx)->user, 1e-3);
    dt_status status =
        which ? dt_send(world, &x, 1, DT_F32, 1, 0) : dt_all_reduce(one, &x, &y, 1, DT_F32, DT_SUM);
    CHECK(status == DT_ERR_PEER && y == 0 && strstr(dt_error_text(ctx), "rank 0: first"));
    return status;
}

static void test_refused_after_failure(void) {
    outcome o;
    for (int which = 0; which < 2; which++)
        CHECK(run(&o, 2, refused_after_failure_rank, &which) == DT_ERR_NUMERIC);
}

/* ---- 5. time ---- */

typedef struct late {
    int rank;
    double s;
} late;

static dt_status late_rank(dt_ctx *ctx, void *user) {
    const late *l = (const late *)user;
    dt_comm *world = dt_world(ctx);
    float x = 1;
    CHECK(dt_comm_seconds(ctx) == 0);
    for (int i = 0; i < 40; i++) dt_barrier(world);
    double until = seconds() + l->s; /* or until the other ranks have failed */
    while (
        dt_comm_rank(world) == l->rank && seconds() < until && !dt__aborted(world->world->shared))
        dt_host_default()->sleep(NULL, 1e-2);
    dt_status status = dt_all_reduce(world, &x, &x, 1, DT_F32, DT_SUM);
    /* the waiting time is counted */
    if (dt_comm_rank(world) != l->rank) CHECK(dt_comm_seconds(ctx) >= 0.1);
    return status;
}

static void test_timeouts(void) {
    outcome o;
    for (int r = 0; r < 4; r += 3) {
        late l = { r, 60 };
        prepare(&o, 4, late_rank, &l);
        o.desc.timeout_s = 0.5;
        start(&o);
        const char *says = r ? ": ranks 0,1,2 arrived, 3 did not; rank 3 (thread "
                             : ": ranks 1,2,3 arrived, 0 did not; rank 0 (thread ";
        CHECK_MSG(
            strstr(o.report.text, ": timeout 0.5 s in all-reduce #41 on world at test_comm.c:") &&
                strstr(o.report.text,
                    " is asleep outside of operations (state S), its last operation: barrier #40 "
                    "on world at test_comm.c:"),
            "%s", o.report.text);
        CHECK_MSG(o.status == DT_ERR_TIMEOUT && strstr(o.report.text, says), "%s", o.report.text);
        CHECK_MSG(in_time(o.took, 10) && o.report.rank != r && o.host.error_lines == 1,
            "%.1f s, rank %d, %d lines", o.took, o.report.rank, o.host.error_lines);
        for (int k = 0; k < 4; k++) CHECK_MSG(strstr(o.text[k], says), "rank %d: %s", k, o.text[k]);
        CHECK(o.error[r] == DT_ERR_PEER);
        prepare(&o, 4, late_rank, &l); /* late, but before the timeout */
        l.s = 0.2;
        o.desc.timeout_s = 30;
        CHECK(start(&o) == DT_OK);
    }
}

/* A clock that advances only during sleeps, and 10,000 times too fast: a timeout of an hour takes
   half a second. */
typedef struct virtual_clock {
    dt_host host;
    long microseconds;
} virtual_clock;
static double virtual_now(void *user) {
    return 1e-6 * (double)__atomic_load_n(&((virtual_clock *)user)->microseconds, __ATOMIC_SEQ_CST);
}
static void virtual_sleep(void *user, double s) {
    __atomic_add_fetch(
        &((virtual_clock *)user)->microseconds, (long)(s * 1e6 * 10000), __ATOMIC_SEQ_CST);
    dt_host_default()->sleep(NULL, s);
}
static void virtual_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_status virtual_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    if (dt_comm_rank(world) < 2) return dt_barrier(world);
    /* stuck until the other ranks have failed */
    while (!__atomic_load_n((int *)user, __ATOMIC_SEQ_CST)) {
        dt_host_default()->sleep(NULL, 1e-3);
        if (dt__aborted(world->world->shared)) __atomic_store_n((int *)user, 1, __ATOMIC_SEQ_CST);
    }
    return DT_OK;
}

static void test_virtual_clock(void) {
    virtual_clock clock;
    dt_report report;
    dt_run_desc desc;
    int over = 0;
    memset(&clock, 0, sizeof clock);
    memset(&desc, 0, sizeof desc);
    clock.host = *dt_host_default();
    clock.host.user = &clock;
    clock.host.now = virtual_now;
    clock.host.sleep = virtual_sleep;
    clock.host.log = virtual_log;
    desc.ranks = 3;
    desc.timeout_s = 3600;
    desc.host = &clock.host;
    desc.report = &report;
    double from = seconds();
    CHECK(dt_run(desc, virtual_rank, &over) == DT_ERR_TIMEOUT);
    CHECK_MSG(strstr(report.text, "timeout 3600.0 s in barrier #1 on world at test_comm.c:") &&
                  strstr(report.text, ": ranks 0,1 arrived, 2 did not; rank 2 (thread ") &&
                  strstr(report.text, ", it has begun no operation"),
        "%s", report.text);
    CHECK_MSG(
        in_time(seconds() - from, 20) && virtual_now(&clock) >= 3600, "%.1f s", seconds() - from);
}

/* A stopwatch that is read often counts all time; it counts little of the time during which its
   process is stopped. */
static double set_now(void *user) { return *(double *)user; }
static void test_stopwatch(void) {
    static const double limits[] = { 0.2, 2, 8, 120 };
    for (int i = 0; i < 4; i++) {
        double limit = limits[i], at = 5;
        dt_host host = *dt_host_default();
        host.user = &at;
        host.now = set_now;
        dt__stopwatch watch = dt__stopwatch_start(&host, limit);
        for (int k = 0; k < 1000; k++) {
            at += limit / 4000;
            dt__waited(&watch);
        }
        CHECK_MSG(fabs(watch.seconds - limit / 4) < 1e-9 * limit, "limit %g: %g s count", limit,
            watch.seconds);
        at += 1e6;
        double most = limit < 8 ? limit / 8 : 1, counts = dt__waited(&watch) - limit / 4;
        CHECK_MSG(
            counts > 0 && counts <= most * 1.001, "limit %g: %g s of a stop count", limit, counts);
        /* the limit is reached even with repeated stops */
        for (int k = 0; k < 2000 && watch.seconds < limit; k++) {
            at += 1e6;
            dt__waited(&watch);
        }
        CHECK_MSG(watch.seconds >= limit, "limit %g: %g s count", limit, watch.seconds);
    }
}

/* 32 ranks on two cores. */
static dt_status many_senders_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    float a[1024], b[1024];
    int bad = 0;
    (void)user;
    for (int i = 0; i < 1024; i++) a[i] = (float)(dt_comm_rank(world) + i);
    for (int round = 0; round < 1000; round++) {
        if (dt_all_reduce(world, a, b, 1024, DT_F32, DT_SUM)) break;
        bad += b[round] != (float)(31 * 16 + 32 * round);
    }
    CHECK(bad == 0);
    return dt_error(ctx);
}

static void test_crowd(void) {
    cpu_set_t all, two;
    int cores = 0;
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&two);
    for (int i = 0; i < CPU_SETSIZE && cores < 2; i++) {
        if (CPU_ISSET(i, &all)) CPU_SET(i, &two), cores++;
    }
    sched_setaffinity(0, sizeof two, &two);
    outcome o;
    run(&o, 32, many_senders_rank, NULL);
    sched_setaffinity(0, sizeof all, &all);
    CHECK_MSG(o.status == DT_OK && in_time(o.took, 60), "%s, %.1f s", o.report.text, o.took);
    printf("32 ranks on %d cores: 1000 all-reduces of 1024 floats in %.2f s\n", cores, o.took);
}

/* ---- 6. no other rank uses a buffer after the call has returned ---- */

/* A kernel table whose reduce is slow on one rank and broken on another. */
static __thread int this_rank;
static int slow_rank, broken_rank, seen_garbage, slow_begun;

static dt_status odd_reduce(const dt_reduce_args *a, void *stream) {
    if (this_rank == broken_rank) {
        while (slow_rank >= 0 && !__atomic_load_n(&slow_begun, __ATOMIC_SEQ_CST))
            dt_host_default()->sleep(NULL, 0);
        return DT_ERR_DEVICE;
    }
    if (this_rank == slow_rank) {
        __atomic_store_n(&slow_begun, 1, __ATOMIC_SEQ_CST);
        /* the other ranks learn of the failure meanwhile, and must wait */
        dt_host_default()->sleep(NULL, 0.15);
        for (int r = 0; r < a->n; r++) {
            for (size_t i = 0; i < a->count; i++) {
                if (((const float *)a->in[r])[i] != 1)
                    __atomic_store_n(&seen_garbage, 1, __ATOMIC_SEQ_CST);
            }
        }
    }
    return dt_kernels_cpu()->reduce(a, stream);
}

/* user: 1: rank 3 is outside the group and fails while the group reduces */
static dt_status early_leaver_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx), *comm = world;
    int outside = *(const int *)user;
    size_t count = 3 * 1000; /* too large for a post */
    this_rank = dt_comm_rank(world);
    if (outside) comm = dt_comm_split(world, this_rank == 3 ? -1 : 0, 0, "three");
    if (outside && this_rank == 3) {
        while (!__atomic_load_n(&slow_begun, __ATOMIC_SEQ_CST)) dt_host_default()->sleep(NULL, 0);
        return dt_fail(ctx, DT_ERR_NUMERIC, "outside");
    }
    float *a = (float *)malloc(count * sizeof *a), *b = (float *)malloc(count * sizeof *b);
    for (size_t i = 0; i < count; i++) a[i] = 1;
    dt_status status = dt_all_reduce(comm, a, b, count, DT_F32, DT_SUM);
    for (size_t i = 0; i < count; i++) a[i] = -1;
    free(a);
    free(b);
    CHECK(status != DT_OK || this_rank == slow_rank);
    return status;
}

static void test_early_leaver(void) {
    dt_kernels kernels = *dt_kernels_cpu();
    outcome o;
    kernels.reduce = odd_reduce;
    for (int outside = 0; outside < 2; outside++) {
        slow_rank = 1, broken_rank = outside ? -1 : 2, seen_garbage = 0, slow_begun = 0;
        prepare(&o, 4, early_leaver_rank, &outside);
        o.desc.kernels = &kernels;
        start(&o);
        CHECK_MSG(!seen_garbage, "a rank left while another read its buffer (outside %d)", outside);
        CHECK_MSG(strstr(o.report.text, outside ? "rank 3: outside"
                                                : "rank 2: all-reduce f32 x 3000 sum #1 on world: "
                                                  "the kernel table 'cpu' answers DT_ERR_DEVICE"),
            "%s", o.report.text);
    }
    slow_rank = -1, broken_rank = -1;
    int outside = 0;
    kernels.reduce = NULL;
    kernels.name = "bare";
    prepare(&o, 4, early_leaver_rank, &outside);
    o.desc.kernels = &kernels;
    CHECK(start(&o) == DT_ERR_UNSUPPORTED &&
          strstr(o.report.text, "'bare' answers DT_ERR_UNSUPPORTED"));
}

/* A rank notices that all have posted only after the other ranks have failed, returned and freed
   their buffers. It must not begin to copy. */
static int others_left;
static void late_copier_sleep(void *user, double s) {
    if (this_rank == slow_rank) {
        __atomic_store_n(&slow_begun, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&others_left, __ATOMIC_SEQ_CST) < 3)
            dt_host_default()->sleep(NULL, 0);
    }
    spy_sleep(user, s);
}

static dt_status late_copier_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    float a[4000], b[4000];
    (void)user;
    this_rank = dt_comm_rank(world);
    for (int i = 0; i < 4000; i++) a[i] = 1;
    while (this_rank != slow_rank && !__atomic_load_n(&slow_begun, __ATOMIC_SEQ_CST))
        dt_host_default()->sleep(NULL, 0);
    dt_status status = dt_all_reduce(world, a, b, 4000, DT_F32, DT_SUM);
    for (int i = 0; i < 4000; i++) a[i] = -1;
    __atomic_add_fetch(&others_left, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&others_left, __ATOMIC_SEQ_CST) < 4) dt_host_default()->sleep(NULL, 0);
    CHECK(status != DT_OK);
    return status;
}

static void test_late_copier(void) {
    dt_kernels kernels = *dt_kernels_cpu();
    outcome o;
    kernels.reduce = odd_reduce;
    slow_rank = 1, broken_rank = 2, seen_garbage = slow_begun = others_left = 0;
    prepare(&o, 4, late_copier_rank, NULL);
    o.desc.kernels = &kernels;
    o.host.host.sleep = late_copier_sleep;
    CHECK(start(&o) == DT_ERR_DEVICE && !seen_garbage);
}

/* The same for a large message: the sender must wait while the receiver copies. */
static dt_status slow_move(void *dst, const void *src, size_t bytes, void *stream) {
    (void)stream;
    if (this_rank == 1 && bytes > DT_EAGER_BYTES) {
        __atomic_store_n(&slow_begun, 1, __ATOMIC_SEQ_CST);
        dt_host_default()->sleep(NULL, 0.15);
        if (*(const float *)src != 1) __atomic_store_n(&seen_garbage, 1, __ATOMIC_SEQ_CST);
    }
    memcpy(dst, src, bytes);
    return DT_OK;
}

static dt_status slow_mail_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    size_t count = 5000;
    (void)user;
    this_rank = dt_comm_rank(world);
    if (this_rank == 2) {
        while (!__atomic_load_n(&slow_begun, __ATOMIC_SEQ_CST)) dt_host_default()->sleep(NULL, 0);
        return dt_fail(ctx, DT_ERR_NUMERIC, "outside");
    }
    float *a = (float *)malloc(count * sizeof *a);
    for (size_t i = 0; i < count; i++) a[i] = 1;
    dt_status status =
        this_rank ? dt_recv(world, a, count, DT_F32, 0, 0) : dt_send(world, a, count, DT_F32, 1, 0);
    for (size_t i = 0; i < count; i++) a[i] = -1;
    free(a);
    return status;
}

static void test_early_leaver_message(void) {
    dt_kernels kernels = *dt_kernels_cpu();
    outcome o;
    kernels.move = slow_move;
    slow_begun = seen_garbage = 0;
    prepare(&o, 3, slow_mail_rank, NULL);
    o.desc.kernels = &kernels;
    CHECK(start(&o) == DT_ERR_NUMERIC && !seen_garbage);
}

/* A dry-run table touches no data, so invalid addresses do not crash. */
typedef struct dry_count {
    size_t reduced, moved;
} dry_count;
static dry_count dry;
static dt_status dry_reduce(const dt_reduce_args *a, void *stream) {
    (void)stream;
    __atomic_add_fetch(&dry.reduced, a->count, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(
        &dry.moved, a->count * dt_dtype_size(a->dtype) * (size_t)a->n_copies, __ATOMIC_SEQ_CST);
    return DT_OK;
}
static dt_status dry_move(void *dst, const void *src, size_t bytes, void *stream) {
    (void)dst, (void)src, (void)stream;
    __atomic_add_fetch(&dry.moved, bytes, __ATOMIC_SEQ_CST);
    return DT_OK;
}

static dt_status dry_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    uintptr_t place = (uintptr_t)(1 + dt_comm_rank(world)) << 24;
    float *a = (float *)place, *b = (float *)(place + (1 << 20));
    (void)user;
    dt_all_reduce(world, a, b, 1000, DT_F32, DT_SUM);
    dt_reduce_scatter(world, a, b, 1000, DT_F32, DT_SUM);
    dt_all_gather(world, a, b, 1000, DT_F32);
    dt_all_to_all(world, a, b, 1000, DT_F32);
    dt_broadcast(world, a, 1000, DT_F32, 1);
    double one = 1;
    CHECK(dt_sum_doubles(world, &one, 1) == DT_OK && one == 4); /* scalars are really exchanged */
    CHECK(dt_agree(world, DT_OK) == DT_OK);
    return dt_error(ctx);
}

static void test_dry(void) {
    dt_kernels kernels = *dt_kernels_cpu();
    outcome o;
    kernels.reduce = dry_reduce;
    kernels.move = dry_move;
    memset(&dry, 0, sizeof dry);
    prepare(&o, 4, dry_rank, NULL);
    o.desc.kernels = &kernels;
    CHECK(start(&o) == DT_OK);
    CHECK_MSG(dry.reduced == 1000 + 4 * 1000, "%zu", dry.reduced);
    /* all-reduce and broadcast: 1,000 floats to three ranks each; all-gather and all-to-all: 16
       shares each */
    CHECK_MSG(dry.moved == 4000 * (3 + 3 + 16 + 16), "%zu", dry.moved);
}

/* ---- 7. memory refused, threads refused ---- */

/* Makes one call of every kind that allocates. */
static dt_status allocating_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    float x[64] = { 1 }, y[64];
    (void)user;
    dt_comm *half = dt_comm_split(world, dt_comm_rank(world) % 2, 0, "half");
    dt_all_reduce(half, x, y, 4, DT_F32, DT_SUM);
    if (dt_error(ctx)) return dt_error(ctx);
    set_direct(world, 1);
    dt_reduce_scatter(world, x, y, 4, DT_F32, DT_SUM);
    dt_all_reduce(world, x, y, 4, DT_F32, DT_SUM);
    dt_mean(world, 1);
    dt_agree(world, DT_OK);
    return dt_error(ctx);
}

static void test_refused_memory(void) {
    outcome o;
    run(&o, 3, allocating_rank, NULL);
    CHECK(o.status == DT_OK);
    long calls = o.host.calls;
    CHECK_MSG(calls > 10, "%ld allocations", calls);
    for (int sticky = 0; sticky < 2; sticky++) {
        long refused = 0;
        for (long k = 1; k <= calls; k++) {
            prepare(&o, 3, allocating_rank, NULL);
            o.host.refuse_at = k;
            o.host.refuse_all_later = sticky;
            start(&o); /* checks that all memory is freed */
            /* a message that arrives before its receive is kept in memory of its own: which do
               is up to the scheduler, so a run can make fewer allocations than the first one */
            if (o.status == DT_OK && o.host.calls < k) continue;
            refused++;
            CHECK_MSG(o.status == DT_ERR_MEM && in_time(o.took, 20),
                "allocation %ld of %ld: %s, %.1f s: %s", k, calls, dt_status_name(o.status), o.took,
                o.report.text);
            CHECK_MSG(
                o.report.text[0] && o.host.error_lines >= 1, "allocation %ld: no error text", k);
        }
        CHECK_MSG(refused > calls / 2, "%ld of %ld allocations refused", refused, calls);
    }
}

static dt_status short_rank(dt_ctx *ctx, void *user) {
    (void)user;
    return dt_barrier(dt_world(ctx));
}

static void test_refused_threads(void) {
    outcome o;
    for (int k = 0; k < 4; k++) {
        threads_left = k;
        run(&o, 4, short_rank, NULL);
        char says[64];
        snprintf(says, sizeof says, "rank %d: its thread could not be started (error 11)", k);
        CHECK_MSG(o.status == DT_ERR_MEM && strcmp(o.report.text, says) == 0 && in_time(o.took, 20),
            "%s", o.report.text);
        for (int r = 0; r < k; r++)
            CHECK_MSG(o.error[r] == DT_ERR_PEER && strstr(o.text[r], says), "%s", o.text[r]);
        CHECK(o.host.error_lines == 1);
    }
    threads_left = -1;
}

/* ---- 8. bytes, scalars, arguments ---- */

static dt_status bytes_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    static const size_t count = 1000;
    double *a = (double *)calloc(4 * count, sizeof *a), *b = (double *)calloc(4 * count, sizeof *b);
    dt_comm *tp = dt_comm_split(world, me / 2, 0, "tp"),
            *dp = dt_comm_split(world, me % 2, 0, "dp");
    /* logical bytes are equal for both implementations */
    if (*(const int *)user) {
        set_direct(world, 1);
        set_direct(tp, 1);
        set_direct(dp, 1);
    }
    dt_comm_set_axis(tp, DT_AXIS_TP);
    dt_comm_set_axis(dp, DT_AXIS_DP);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == 0);
    dt_sum_doubles(world, a, 100);
    dt_mean(world, 1);
    dt_agree(world, DT_OK);
    dt_barrier(world);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == 0);
    dt_all_reduce(world, a, b, count, DT_F64, DT_SUM);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == 2 * 8000 * 3 / 4);
    dt_all_reduce(world, a, b, 1, DT_F32, DT_SUM);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == 12000 + 2 * 4 * 3 / 4);
    dt_all_reduce(world, a, b, count, DT_BF16, DT_SUM);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_NONE) == 12006 + 2 * 2000 * 3 / 4);
    dt_reduce_scatter(tp, a, b, count, DT_F64, DT_SUM);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_TP) == 8000);
    dt_all_gather(tp, a, b, count, DT_F32);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_TP) == 12000);
    dt_all_to_all(dp, a, b, count, DT_I32);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_DP) == 4000);
    dt_broadcast(dp, a, count, DT_F64, 1);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_DP) == (size_t)(me / 2 == 1 ? 12000 : 4000));
    dt_comm_set_axis(dp, DT_AXIS_PP);
    if (me < 2)
        dt_send(dp, a, count, DT_F64, 1, 0);
    else
        dt_recv(dp, a, count, DT_F64, 0, 0);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_PP) == (size_t)(me < 2 ? 8000 : 0));
    dt_comm *one = dt_comm_split(world, me, 0, "one");
    dt_comm_set_axis(one, DT_AXIS_EP);
    dt_all_reduce(one, a, b, count, DT_F64, DT_SUM);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_EP) == 0 && dt_comm_bytes(ctx, DT_AXES) == 0);
    CHECK(dt_comm_bytes(NULL, DT_AXIS_TP) == 0);
    free(a);
    free(b);
    return dt_error(ctx);
}

static dt_status scalars_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    double many[1000], want[1000];
    if (*(const int *)user) set_direct(world, 1);
    for (size_t i = 0; i < 1000; i++) {
        many[i] = element(me, i, DT_F64, DT_SUM);
        want[i] = naive(n, i, DT_F64, DT_SUM);
    }
    CHECK(dt_sum_doubles(world, many, 1000) == DT_OK && memcmp(many, want, sizeof many) == 0);
    CHECK(dt_sum_doubles(world, NULL, 0) == DT_OK);
    CHECK(dt_mean(world, me) == (n - 1) / 2.0);
    /* dt_agree returns the first status in rank order that is not OK, and does not fail the
       context */
    CHECK(dt_agree(world, DT_OK) == DT_OK);
    CHECK(dt_agree(world, me == n - 1 ? DT_ERR_IO : DT_OK) == DT_ERR_IO);
    CHECK(dt_agree(world, me == n - 1   ? DT_ERR_IO
                          : me == n - 2 ? DT_ERR_MEM
                                        : DT_OK) == DT_ERR_MEM);
    CHECK(dt_error(ctx) == DT_OK && dt_barrier(world) == DT_OK);
    return dt_error(ctx);
}

/* user: which argument rank 1 gets wrong */
static dt_status wrong_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    float a[16] = { 0 }, b[16];
    if (dt_comm_rank(world) != 1) return dt_barrier(world);
    switch (*(const int *)user) {
    case 0: return dt_broadcast(world, a, 4, DT_F32, 3);
    case 1: return dt_broadcast(world, a, 4, DT_F32, -1);
    case 2: return dt_send(world, a, 4, DT_F32, 0, -1);
    case 3: return dt_recv(world, a, 4, DT_F32, 7, 0);
    case 4: return dt_all_reduce(world, NULL, b, 4, DT_F32, DT_SUM);
    case 5: return dt_all_gather(world, a, NULL, 4, DT_F32);
    case 6: return dt_all_to_all(world, a, a, 4, DT_F32);
    case 7: return dt_all_gather(world, a, b, (size_t)-1 / 8, DT_F32);
    case 8: return dt_broadcast(world, a, 4, (dt_dtype)7, 0);
    case 9: return dt_all_reduce(world, a, b, 4, DT_F32, (dt_op)99);
    default: return dt_all_reduce(world, a, b, 4, (dt_dtype)99, DT_SUM);
    }
}

static void test_wrong_arguments(void) {
    static const char *const says[] = { "no such root: 3 of 3", "no such root: -1 of 3",
        "the tag is negative", "no such rank: 7 of 3", "send is NULL", "recv is NULL",
        "not possible in place", "count too large", "7 is no element type", "unknown reduction",
        "99 is no element type" };
    outcome o;
    for (int i = 0; i < 11; i++) {
        run(&o, 3, wrong_rank, &i);
        CHECK_MSG(o.status == (i == 8 || i == 10 ? DT_ERR_UNSUPPORTED : DT_ERR_ARG) &&
                      strstr(o.report.text, says[i]) && o.report.rank == 1,
            "case %d: %s", i, o.report.text);
        CHECK_MSG(
            o.error[0] == DT_ERR_PEER && strstr(o.text[0], "rank 0: peer failed first: rank 1: "),
            "%s", o.text[0]);
    }
}

/* comm NULL: a group of one, without a context. */
static void test_no_group(void) {
    float a[3] = { 1, 2, 3 }, b[3] = { 0, 0, 0 };
    double d = 4;
    CHECK(dt_comm_rank(NULL) == 0 && dt_comm_size(NULL) == 1 && dt_comm_world_rank(NULL, 0) == 0);
    CHECK(dt_comm_world_rank(NULL, 1) == -1 && strcmp(dt_comm_name(NULL), "one") == 0);
    CHECK(dt_all_reduce(NULL, a, b, 3, DT_F32, DT_SUM) == DT_OK && memcmp(a, b, sizeof a) == 0);
    memset(b, 0, sizeof b);
    CHECK(dt_reduce_scatter(NULL, a, b, 3, DT_F32, DT_MAX) == DT_OK && memcmp(a, b, sizeof a) == 0);
    memset(b, 0, sizeof b);
    CHECK(dt_all_gather(NULL, a, b, 3, DT_F32) == DT_OK && memcmp(a, b, sizeof a) == 0);
    memset(b, 0, sizeof b);
    CHECK(dt_all_to_all(NULL, a, b, 3, DT_F32) == DT_OK && memcmp(a, b, sizeof a) == 0);
    CHECK(dt_all_to_all(NULL, a, a, 3, DT_F32) == DT_ERR_ARG); /* as in a group of one */
    CHECK(dt_broadcast(NULL, a, 3, DT_F32, 0) == DT_OK && dt_barrier(NULL) == DT_OK && a[2] == 3);
    CHECK(dt_broadcast(NULL, a, 3, DT_F32, 1) == DT_ERR_ARG);
    CHECK(dt_all_reduce(NULL, a, NULL, 3, DT_F32, DT_SUM) == DT_ERR_ARG);
    memset(b, 0, sizeof b);
    CHECK(dt_all_reduce(NULL, a, b, 6, DT_F16, DT_SUM) == DT_OK && memcmp(a, b, sizeof a) == 0);
    CHECK(dt_all_reduce(NULL, a, b, 3, (dt_dtype)99, DT_SUM) == DT_ERR_UNSUPPORTED);
    CHECK(dt_send(NULL, a, 3, DT_F32, 0, 0) == DT_ERR_ARG &&
          dt_recv(NULL, a, 3, DT_F32, 0, 0) == DT_ERR_ARG);
    CHECK(dt_sum_doubles(NULL, &d, 1) == DT_OK && d == 4 && dt_mean(NULL, 2) == 2);
    CHECK(dt_agree(NULL, DT_ERR_IO) == DT_ERR_IO);
    CHECK(dt_comm_split(NULL, 0, 0, "x") == NULL && dt_world(NULL) == NULL);
    dt_comm_set_axis(NULL, DT_AXIS_DP);
    dt_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    dt_ctx *ctx = dt_ctx_make(desc);
    CHECK(ctx && dt_world(ctx) == NULL && dt_comm_bytes(ctx, DT_AXIS_DP) == 0);
    dt_ctx_free(ctx);
}

/* ---- 9. launch ---- */

static dt_status tables_rank(dt_ctx *ctx, void *user) {
    const outcome *o = (const outcome *)user;
    CHECK(dt_ctx_host(ctx)->user == o->desc.host->user && dt_ctx_io(ctx)->user == o->desc.io->user);
    CHECK(strcmp(dt_ctx_kernels(ctx)->name, "mine") == 0 && dt_ctx_seed(ctx) == 77);
    return DT_OK;
}

static void test_launch(void) {
    outcome o;
    static const dt_backend refused[] = { DT_BACKEND_PROCS, DT_BACKEND_MPI, DT_BACKEND_NCCL,
        (dt_backend)42 };
    static const char *const names[] = { "procs", "mpi", "nccl", "unknown" };
    for (int i = 0; i < 4; i++) {
        prepare(&o, 2, short_rank, NULL);
        o.desc.backend = refused[i];
        CHECK(start(&o) == DT_ERR_UNSUPPORTED && strstr(o.report.text, names[i]) &&
              o.report.rank == -1);
        CHECK(o.host.error_lines == 1);
    }
    prepare(&o, -1, short_rank, NULL);
    CHECK(start(&o) == DT_ERR_ARG);
    for (int i = 0; i < 3; i++) {
        prepare(&o, 2, short_rank, NULL);
        o.desc.timeout_s = i == 0 ? -1 : i == 1 ? 2e9 : (double)__builtin_nan("");
        CHECK(start(&o) == DT_ERR_ARG);
    }
    dt_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.host = &o.host.host;
    CHECK(dt_run(desc, NULL, NULL) == DT_ERR_ARG);
    CHECK(run(&o, 0, short_rank, NULL) == DT_OK && o.report.status == DT_OK &&
          o.report.text[0] == 0 && o.ended[0]);
    prepare(&o, 2, tables_rank, &o);
    dt_kernels kernels = *dt_kernels_cpu();
    dt_io io = *dt_io_default();
    kernels.name = "mine";
    io.user = &io;
    o.desc.kernels = &kernels;
    o.desc.io = &io;
    o.desc.seed = 77;
    o.desc.backend = DT_BACKEND_THREADS;
    CHECK(start(&o) == DT_OK);
}

/* Concurrent and nested runs. */
static dt_status many_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    double want = *(const double *)user * dt_comm_size(world);
    for (int i = 0; i < 200; i++) {
        double x = *(const double *)user;
        dt_sum_doubles(world, &x, 1);
        CHECK(x == want);
    }
    return dt_error(ctx);
}

static void *concurrent_run(void *arg) {
    run_well(3, many_rank, arg);
    return NULL;
}

static dt_status outer_rank(dt_ctx *ctx, void *user) {
    double one = dt_comm_rank(dt_world(ctx)) + 1;
    outcome o;
    injection in = { 0, 1, 0, FAILS };
    (void)user;
    run_well(2, many_rank, &one);
    /* the inner run fails, the outer one does not */
    CHECK(run(&o, 3, injected_rank, &in) == DT_ERR_NUMERIC);
    return dt_barrier(dt_world(ctx));
}

static void test_concurrent(void) {
    double values[2] = { 1, 10 };
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, concurrent_run, &values[i]);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    run_well(2, outer_rank, NULL);
}

/* dt_host's alloc aligns to 64 bytes, as does shared memory, so no structure may need more. */
static void test_alignment(void) {
    CHECK(
        _Alignof(dt__world) <= 64 && _Alignof(dt__peer) <= 64 && _Alignof(dt__private_range) <= 64);
    CHECK(sizeof(dt__rank_state) == DT__CACHE_LINE);
}

int main(int argc, char **argv) {
    int generic, come = 0;
    if (argc > 1 && strcmp(argv[1], "groups") == 0) {
        test_groups();
        return check_done("test_comm");
    }
    test_alignment();
    test_no_group();
    test_launch();
    test_collectives();
    run_well(4, barrier_rank, &come);
    run_well(4, reuse_rank, NULL);
    test_groups();
    test_mail();
    run_well(2, burst_rank, NULL);
    run_well(3, last_sender_rank, NULL);
    for (generic = 0; generic < 2; generic++) {
        run_well(4, bytes_rank, &generic);
        run_well(5, scalars_rank, &generic);
    }
    test_wrong_arguments();
    test_injections();
    test_mismatch_text();
    test_counts_of_one_rank();
    test_all_fail();
    test_refused_after_failure();
    test_early_leaver();
    test_late_copier();
    test_early_leaver_message();
    test_dry();
    test_refused_memory();
    test_refused_threads();
    test_timeouts();
    test_virtual_clock();
    test_stopwatch();
    test_concurrent();
    test_crowd();
    return check_done("test_comm");
}
