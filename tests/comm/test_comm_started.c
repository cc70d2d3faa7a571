/* test_comm_started.c - dt_comm.h: started operations, exchange, receive from any, the simulated
   link. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/comm/ranks.h"

static void virtual_nothing(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static void nap(dt_ctx *ctx, double s) { dt_ctx_host(ctx)->sleep(dt_ctx_host(ctx)->user, s); }

/* ---- 1. many at once ---- */

/* A plan of random operations, equal on all ranks: kind, group and length of operation i. */
enum { FLIGHT = 30, GROUPS = 3, LONGEST = 9000 };
typedef struct plan {
    uint64_t seed;
    dt_algorithm algorithm;
    int rounds, fails;
} plan;
typedef struct flight {
    dt_work *work;
    float *send, *recv;
    dt_comm *comm;
    int kind, root, waited, in_range;
    size_t count;
} flight;

static float value(int world_rank, int i, size_t k) {
    return (float)((world_rank + 1) * 10 + i % 7) + (float)(k % 13);
}

/* A buffer from dt_alloc on some ranks and from malloc on others; buffer_free checks the guard
   after it. */
static float *buffer(dt_ctx *ctx, size_t count, int in_range) {
    float *p = (float *)(in_range ? dt_alloc(ctx, DT_MEM_COMM, (count + 1) * 4, "a test")
                                  : malloc((count + 1) * 4));
    if (!p) abort();
    for (size_t k = 0; k <= count; k++) p[k] = -7;
    return p;
}

static void buffer_free(dt_ctx *ctx, float *p, size_t count, int in_range) {
    CHECK(p[count] == -7);
    /* a rank that still reads the buffer gets wrong values */
    for (size_t k = 0; k <= count; k++) p[k] = -9;
    if (in_range)
        dt_free(ctx, DT_MEM_COMM, p, (count + 1) * 4);
    else
        free(p);
}

static void begin_one(dt_ctx *ctx, flight *f, int i, uint64_t h) {
    int n = dt_comm_size(f->comm), me = dt_comm_rank(f->comm),
        world_me = dt_comm_world_rank(f->comm, me);
    f->kind = (int)(h % 9);
    f->root = (int)(h / 16 % (uint64_t)n);
    f->count = h / 256 % 4 == 0 ? h / 1024 % LONGEST : h / 1024 % 200;
    f->in_range = (int)(mix(h + (uint64_t)world_me) & 1);
    f->waited = 0;
    f->send = buffer(ctx, (size_t)n * f->count, f->in_range);
    f->recv = buffer(ctx, (size_t)n * f->count, !f->in_range);
    for (size_t k = 0; k < (size_t)n * f->count; k++) f->send[k] = value(world_me, i, k);
    int right = (me + 1) % n, left = (me + n - 1) % n;
    switch (f->kind) {
    case 0:
        f->work = dt_all_reduce_start(f->comm, f->send, f->recv, f->count, DT_F32, DT_SUM);
        break;
    case 1:
        f->work = dt_reduce_start(f->comm, f->send, f->recv, f->count, DT_F32, DT_MAX, f->root);
        break;
    case 2:
        f->work = dt_reduce_scatter_start(f->comm, f->send, f->recv, f->count, DT_F32, DT_SUM);
        break;
    case 3: f->work = dt_all_gather_start(f->comm, f->send, f->recv, f->count, DT_F32); break;
    case 4: f->work = dt_all_to_all_start(f->comm, f->send, f->recv, f->count, DT_F32); break;
    case 5:
        if (me == f->root) memcpy(f->recv, f->send, f->count * 4);
        f->work = dt_broadcast_start(f->comm, f->recv, f->count, DT_F32, f->root);
        break;
    case 6: f->work = dt_barrier_start(f->comm); break;
    case 7: f->work = dt_gather_start(f->comm, f->send, f->recv, f->count, DT_F32, f->root); break;
    default: { /* sends to the right and receives from the left */
        dt_transfer both[2] = { { f->send, NULL, f->count, DT_F32, right, 1000 + i },
            { NULL, f->recv, f->count, DT_F32, left, 1000 + i } };
        f->work = NULL;
        dt_exchange(f->comm, both, 2);
    }
    }
}

static size_t wrong_in(const flight *f, int i) {
    int n = dt_comm_size(f->comm), me = dt_comm_rank(f->comm);
    size_t bad = 0;
    if ((f->kind == 1 || f->kind == 7) && me != f->root) return 0;
    for (size_t k = 0; k < f->count; k++) {
        float sum = 0, most = 0, share = 0;
        for (int r = 0; r < n; r++) {
            int w = dt_comm_world_rank(f->comm, r);
            sum += value(w, i, k);
            share += value(w, i, (size_t)me * f->count + k);
            if (value(w, i, k) > most) most = value(w, i, k);
            if (f->kind == 3 || f->kind == 7)
                bad += f->recv[(size_t)r * f->count + k] != value(w, i, k);
            if (f->kind == 4)
                bad += f->recv[(size_t)r * f->count + k] != value(w, i, (size_t)me * f->count + k);
        }
        if (f->kind == 0) bad += f->recv[k] != sum;
        if (f->kind == 1) bad += f->recv[k] != most;
        if (f->kind == 2) bad += f->recv[k] != share;
        if (f->kind == 5) bad += f->recv[k] != value(dt_comm_world_rank(f->comm, f->root), i, k);
        if (f->kind == 8)
            bad += f->recv[k] != value(dt_comm_world_rank(f->comm, (me + n - 1) % n), i, k);
    }
    return bad;
}

static void end_one(dt_ctx *ctx, flight *f, int i) {
    size_t n = (size_t)dt_comm_size(f->comm);
    dt_status status = f->kind == 8 ? dt_error(ctx) : dt_wait(ctx, f->work);
    if (status == DT_OK) {
        size_t bad = wrong_in(f, i);
        CHECK_MSG(bad == 0, "operation %d, kind %d, %zu of %zu wrong on rank %d of %s", i, f->kind,
            bad, f->count, dt_comm_rank(f->comm), dt_comm_name(f->comm));
    }
    buffer_free(ctx, f->send, n * f->count, f->in_range);
    buffer_free(ctx, f->recv, n * f->count, !f->in_range);
    f->waited = 1;
}

static dt_status flight_rank(dt_ctx *ctx, void *user) {
    const plan *p = (const plan *)user;
    dt_comm *world = dt_world(ctx), *groups[GROUPS];
    int me = dt_comm_rank(world);
    groups[0] = world;
    groups[1] = dt_comm_split(world, me % 2, -me, "halves");
    groups[2] = dt_comm_split(world, 0, (me * 3) % 5, "turned");
    for (int g = 0; g < GROUPS && groups[g]; g++)
        dt_comm_set_algorithm(groups[g], g == 1 ? DT_ALGORITHM_AUTO : p->algorithm);
    for (int round = 0; round < p->rounds && dt_error(ctx) == DT_OK; round++) {
        flight all[FLIGHT];
        uint64_t mine = mix(p->seed * 977 + (uint64_t)(round * 64 + me)),
                 common = p->seed * 31 + (uint64_t)round;
        int begun = 0, left;
        while (begun < FLIGHT && dt_error(ctx) == DT_OK) {
            uint64_t h = mix(common * 1000 + (uint64_t)begun);
            all[begun].comm = groups[mix(h) % GROUPS];
            if (p->fails && round == p->rounds - 1 &&
                me == (int)(p->seed % (uint64_t)dt_comm_size(world)) &&
                begun == (int)(mix(p->seed) % FLIGHT)) {
                dt_fail(ctx, DT_ERR_NUMERIC, "in flight");
                break;
            }
            begin_one(ctx, &all[begun], begun, h);
            begun++;
            mine = mix(mine);
            if (mine % 11 == 0) nap(ctx, 1e-4);
            if (h % 13 == 5) { /* a blocking operation on the world in between */
                double one = 1;
                if (dt_sum_doubles(world, &one, 1) == DT_OK) CHECK(one == dt_comm_size(world));
            }
        }
        for (left = begun; left > 0; left--) {
            mine = mix(mine);
            int i = (int)(mine % (uint64_t)begun);
            while (all[i].waited) i = (i + 1) % begun;
            if (mine / 64 % 7 == 0 && all[i].kind != 8)
                while (!dt_test(ctx, all[i].work)) nap(ctx, 0);
            if (mine / 64 % 5 == 0) nap(ctx, 1e-4);
            end_one(ctx, &all[i], i);
        }
    }
    return dt_error(ctx);
}

static void test_flights(void) {
    for (int procs = 0; procs < 2; procs++) {
        for (int n = 1; n <= 5; n++) {
            for (int a = 0; a < DT_ALGORITHMS; a++) {
                plan p = { (uint64_t)(n * 10 + a), (dt_algorithm)a, 4, 0 };
                run_well_on(procs, n, flight_rank, &p);
            }
        }
    }
    for (int seed = 0; seed < 40; seed++) { /* a failure with many pending operations */
        outcome o;
        plan p = { (uint64_t)(1000 + seed), (dt_algorithm)(seed / 2 % 5), 2, 1 };
        if (seed % 2)
            prepare_procs(&o, 4, flight_rank, &p);
        else
            prepare(&o, 4, flight_rank, &p);
        dt_host quiet = *dt_host_default();
        quiet.log = virtual_nothing;
        if (seed % 2) o.desc.host = &quiet;
        start(&o);
        CHECK_MSG(
            o.status == DT_ERR_NUMERIC && strstr(o.report.text, "in flight") && in_time(o.took, 20),
            "seed %d: %s, "
            "%.1f s",
            seed, o.report.text, o.took);
        for (int r = 0; r < 4; r++)
            CHECK_MSG(o.ended[r] && o.error[r] != DT_OK, "seed %d: rank %d", seed, r);
    }
}

/* ---- 2. rules ---- */

/* user: 0: never waited for; 1: waited for twice; 2: waited for in another context: refused */
static dt_status wrong_use_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    static float x[2][100];
    float *mine = x[dt_comm_rank(world)];
    dt_work *work = dt_all_reduce_start(world, mine, mine, 100, DT_F32, DT_SUM);
    if (*(int *)user == 0) {
        dt_barrier(world);
        return DT_OK;
    }
    CHECK(dt_wait(ctx, work) == DT_OK);
    return dt_wait(ctx, work);
}

static dt_status steady_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    spy *s = (spy *)user;
    float a[3000], b[4 * 3000];
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    memset(a, 0, sizeof a);
    long calls = 0;
    for (int round = 0; round < 30; round++) {
        dt_work *works[12];
        int from;
        if (round == 5) {
            dt_barrier(world);
            calls = __atomic_load_n(&s->calls, __ATOMIC_SEQ_CST);
            dt_barrier(world);
        }
        for (int i = 0; i < 10; i++)
            works[i] =
                i % 2 ? dt_all_gather_start(world, a, b, 3000, DT_F32) : dt_barrier_start(world);
        works[10] = dt_send_start(world, a, 2000, DT_F32, (me + 1) % n, 3);
        works[11] = dt_recv_any_start(world, b, 2000, DT_F32, 3, &from);
        for (int i = 11; i >= 0; i--) dt_wait(ctx, works[i]);
        dt_all_reduce(world, a, b, 3000, DT_F32, DT_SUM);
        CHECK(from == (me + n - 1) % n);
    }
    dt_barrier(world);
    CHECK_MSG(__atomic_load_n(&s->calls, __ATOMIC_SEQ_CST) == calls,
        "%ld allocations in a steady state", s->calls - calls);
    dt_barrier(world);
    return dt_error(ctx);
}

/* Started operations progress between the kernels of tensor ops, without dt_wait or dt_test; on
   threads and on forks. */
static dt_status kernels_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    size_t count = 200000; /* several windows */
    float *a = (float *)malloc(count * 4), *b = (float *)malloc(count * 4);
    (void)user;
    for (size_t i = 0; i < count; i++) a[i] = (float)(dt_comm_rank(world) + 1);
    dt_work *work = dt_all_reduce_start(world, a, b, count, DT_F32, DT_SUM);
    double from = seconds();
    while (work->completion != DT__COMPLETED && in_time(seconds() - from, 20) &&
           dt_error(ctx) == DT_OK) {
        dt_shape shape = { 1, { 64 } };
        dt_tensor *x = dt_input(ctx, DT_F32, shape, NULL);
        dt_add(x, x);
        dt_reset(ctx);
        nap(ctx, 0);
    }
    CHECK_MSG(work->completion == DT__COMPLETED, "the kernels alone did not complete it: %s",
        dt_error_text(ctx));
    dt_wait(ctx, work);
    CHECK(b[0] == 6 && b[count - 1] == 6);
    free(a);
    free(b);
    return dt_error(ctx);
}

/* dt_wait in a failed context must not return while another rank still reads the buffer of the
   started operation. */
static int slow_begun, seen_garbage;
static __thread int this_rank;
static dt_status slow_reduce(const dt_reduce_args *a, void *stream) {
    if (this_rank == 1) {
        __atomic_store_n(&slow_begun, 1, __ATOMIC_SEQ_CST);
        dt_host_default()->sleep(NULL, 0.15);
        for (int r = 0; r < a->n; r++)
            for (size_t i = 0; i < a->count; i++)
                if (((const float *)a->in[r])[i] != 1)
                    __atomic_store_n(&seen_garbage, 1, __ATOMIC_SEQ_CST);
    }
    return dt_kernels_cpu()->reduce(a, stream);
}

static dt_status failing_wait_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int waits = *(const int *)user;
    size_t count = 30000;
    this_rank = dt_comm_rank(world);
    float *a = (float *)malloc(count * 4), *b = (float *)malloc(count * 4);
    for (size_t i = 0; i < count; i++) a[i] = 1;
    dt_work *work = dt_all_reduce_start(world, a, b, count, DT_F32, DT_SUM);
    if (this_rank == 0) {
        while (!__atomic_load_n(&slow_begun, __ATOMIC_SEQ_CST)) {
            dt_test(ctx, work);
            nap(ctx, 0);
        }
        dt_fail(ctx, DT_ERR_NUMERIC, "on the way");
    }
    if (waits || this_rank)
        dt_wait(ctx, work);
    else
        dt_comm_detach(ctx, dt_error(ctx));
    for (size_t i = 0; i < count; i++) a[i] = -1;
    free(a);
    free(b);
    return dt_error(ctx);
}

/* A rank that polls learns of a failure, too. user: the rank that fails and then delays its
   return. */
static dt_status polling_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    float x = 1;
    if (dt_comm_rank(world) == *(const int *)user) {
        dt_fail(ctx, DT_ERR_NUMERIC, "first");
        nap(ctx, 1.0);
        return DT_ERR_NUMERIC;
    }
    dt_work *work = dt_all_reduce_start(world, &x, &x, 1, DT_F32, DT_SUM);
    double from = seconds();
    while (!dt_test(ctx, work)) nap(ctx, 1e-3);
    CHECK_MSG(in_time(seconds() - from, 0.7) && dt_wait(ctx, work) == DT_ERR_PEER,
        "dt_test saw it after %.2f s", seconds() - from);
    return dt_error(ctx);
}

/* A timeout names the missing rank, whichever operation is waited for. */
static dt_status missing_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    static float big[3][12][3000];
    dt_work *works[12];
    int me = dt_comm_rank(world);
    (void)user;
    /* until the other ranks have failed */
    while (me == 2 && !dt__aborted(world->world->shared)) nap(ctx, 0.01);
    if (me == 2) return DT_OK;
    for (int i = 0; i < 12; i++)
        works[i] = dt_all_reduce_start(world, big[me][i], big[me][i], 3000, DT_F32, DT_SUM);
    dt_wait(ctx, works[11]);
    return dt_error(ctx);
}

static void test_rules(void) {
    outcome o;
    int which = 0;
    run(&o, 2, wrong_use_rank, &which);
    const char *begins = "all-reduce f32 x 100 sum on world at test_comm_started.c:";
    CHECK_MSG(o.status == DT_ERR_ARG && strstr(o.report.text, begins) &&
                  strstr(o.report.text, " was started and never waited for"),
        "%s", o.report.text);
    which = 1;
    run(&o, 2, wrong_use_rank, &which);
    CHECK_MSG(o.status == DT_ERR_ARG && strstr(o.report.text, "has been waited for"), "%s",
        o.report.text);
    prepare(&o, 4, steady_rank, &o.host);
    start(&o);
    CHECK_MSG(o.status == DT_OK, "%s", o.report.text);
    for (int procs = 0; procs < 2; procs++) run_well_on(procs, 3, kernels_rank, NULL);
    dt_kernels kernels = *dt_kernels_cpu();
    kernels.reduce = slow_reduce;
    for (int waits = 0; waits < 2; waits++) {
        slow_begun = seen_garbage = 0;
        prepare(&o, 3, failing_wait_rank, &waits);
        o.desc.kernels = &kernels;
        start(&o);
        CHECK_MSG(o.status == DT_ERR_NUMERIC && !seen_garbage, "waits %d: %s, garbage %d", waits,
            o.report.text, seen_garbage);
    }
    for (int rank = 0; rank < 2; rank++) CHECK(run(&o, 2, polling_rank, &rank) == DT_ERR_NUMERIC);
    prepare(&o, 3, missing_rank, NULL);
    o.desc.timeout_s = 0.4;
    start(&o);
    CHECK_MSG(o.status == DT_ERR_TIMEOUT && strstr(o.report.text, "ranks 0,1 arrived, 2 did not"),
        "%s", o.report.text);
}

/* ---- 3. messages ---- */

/* An earlier receive from a specific rank does not block a receive from any. */
static dt_status any_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), from = -9, x = me, y = -1, z = -1;
    (void)user;
    if (me == 0) {
        dt_work *two = dt_recv_start(world, &y, 1, DT_I32, 2, 7);
        CHECK(dt_recv_any(world, &z, 1, DT_I32, 7, &from) == DT_OK && z == 1 && from == 1);
        dt_send(world, NULL, 0, DT_I32, 2, 8);
        CHECK(dt_wait(ctx, two) == DT_OK && y == 2);
    } else if (me == 1) {
        dt_send(world, &x, 1, DT_I32, 0, 7);
    } else {
        dt_recv(world, NULL, 0, DT_I32, 0, 8);
        dt_send(world, &x, 1, DT_I32, 0, 7);
    }
    dt_barrier(world);
    /* the earlier receive from any gets the first message, the later receive from that rank the
       second */
    if (me == 0) {
        dt_work *any = dt_recv_any_start(world, &y, 1, DT_I32, 9, &from);
        dt_work *one = dt_recv_start(world, &z, 1, DT_I32, 1, 9);
        dt_send(world, NULL, 0, DT_I32, 1, 8);
        dt_wait(ctx, one);
        dt_wait(ctx, any);
        CHECK_MSG(from == 1 && y == 100 && z == 200, "%d %d %d", from, y, z);
    } else if (me == 1) {
        dt_recv(world, NULL, 0, DT_I32, 0, 8);
        x = 100;
        dt_send(world, &x, 1, DT_I32, 0, 9);
        x = 200;
        dt_send(world, &x, 1, DT_I32, 0, 9);
    }
    return dt_error(ctx);
}

/* Large and small messages from all ranks at once, identified by their source; several receives
   compete for a message. */
static dt_status many_senders_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), me = dt_comm_rank(world), seen[MAX_RANKS] = { 0 };
    enum { EACH = 20, MANY = 3000 };
    float *buf = (float *)malloc(EACH * MANY * 4);
    dt_work *works[EACH];
    (void)user;
    if (me > 0) {
        for (int i = 0; i < EACH; i++) {
            for (int k = 0; k < MANY; k++) buf[i * MANY + k] = (float)(me * 1000 + i);
            works[i] = dt_send_start(world, buf + i * MANY, i % 2 ? MANY : 5, DT_F32, 0, i % 2);
        }
        for (int i = EACH - 1; i >= 0; i--) dt_wait(ctx, works[i]);
    } else {
        for (int k = 0; k < EACH / 2 * (n - 1); k++) {
            for (int tag = 0; tag < 2; tag++) {
                int from = -1;
                size_t count = tag ? MANY : 5;
                buf[0] = buf[count - 1] = -1;
                if (dt_recv_any(world, buf, count, DT_F32, tag, &from)) break;
                int want = from * 1000 + 2 * (tag ? seen[from] / 100 : seen[from] % 100) + tag;
                CHECK_MSG(from > 0 && buf[0] == (float)want && buf[count - 1] == buf[0],
                    "message from %d: %g, not %d", from, (double)buf[0], want);
                if (from >= 0) seen[from] += tag ? 100 : 1;
            }
        }
    }
    dt_barrier(world);
    free(buf);
    return dt_error(ctx);
}

/* Messages to the same rank, with the receive before the send; also large ones if both are started.
   And messages from all ranks to all ranks at once. */
static dt_status self_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), me = dt_comm_rank(world), bad = 0;
    enum { MANY = 5000 };
    float *out = (float *)malloc((size_t)n * MANY * 4), *in = (float *)malloc((size_t)n * MANY * 4);
    dt_transfer all[4 * MAX_RANKS];
    (void)user;
    for (int size = 0; size < 2; size++) {
        size_t count = size ? MANY : 10;
        for (int r = 0; r < n; r++) {
            for (size_t k = 0; k < count; k++)
                out[(size_t)r * count + k] = (float)(me * 100 + r), in[(size_t)r * count + k] = -1;
            dt_transfer take = { NULL, in + (size_t)r * count, count, DT_F32, r, 5 };
            dt_transfer give = { out + (size_t)r * count, NULL, count, DT_F32, r, 5 };
            all[r] = take;
            all[n + r] = give;
        }
        CHECK(dt_exchange(world, all, 2 * n) == DT_OK);
        for (int r = 0; r < n; r++)
            for (size_t k = 0; k < count; k++)
                bad += in[(size_t)r * count + k] != (float)(r * 100 + me);
    }
    CHECK_MSG(bad == 0, "%d wrong", bad);
    free(out);
    free(in);
    return dt_error(ctx);
}

/* The receive that was started first gets the first message, whatever the order of the waits. */
static dt_status overtake_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), big = *(const int *)user, bad = 0;
    size_t count = big ? 3000 : 3;
    int32_t *buf = (int32_t *)calloc(16 * count, 4);
    for (int round = 0; round < 50; round++) {
        dt_work *works[16];
        for (int i = 0; i < 16; i++) {
            for (size_t k = 0; k < count; k++)
                buf[(size_t)i * count + k] = me ? -1 : round * 16 + i;
            works[i] = me ? dt_recv_start(world, buf + (size_t)i * count, count, DT_I32, 0, 1)
                          : dt_send_start(world, buf + (size_t)i * count, count, DT_I32, 1, 1);
        }
        for (int i = 15; i >= 0; i--) dt_wait(ctx, works[i]);
        for (int i = 0; i < 16 && me; i++)
            for (size_t k = 0; k < count; k++) bad += buf[(size_t)i * count + k] != round * 16 + i;
    }
    CHECK_MSG(bad == 0, "%d wrong", bad);
    free(buf);
    return dt_error(ctx);
}

/* Messages that wait for their receiver do not block a collective that is made of messages. */
static dt_status full_pair_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    float x = 1;
    int32_t y = 0;
    dt_comm_set_algorithm(world, *(const dt_algorithm *)user);
    for (int i = 0; me == 0 && i < 8; i++) dt_send(world, &i, 1, DT_I32, 1, 1);
    CHECK(dt_all_reduce(world, &x, &x, 1, DT_F32, DT_SUM) == DT_OK && x == 2);
    for (int i = 0; me == 1 && i < 8; i++)
        CHECK(dt_recv(world, &y, 1, DT_I32, 0, 1) == DT_OK && y == i);
    return dt_error(ctx);
}

/* A server that waits for requests waits longer than the timeout. */
static dt_status idle_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), from = -1, x = 7, y = 0;
    const int leaves = *(const int *)user; /* 1: rank 1 never sends */
    if (me == 0) {
        dt_work *work = dt_recv_any_start(world, &y, 1, DT_I32, 5, &from);
        dt_wait_idle(ctx, work);
        CHECK(leaves || (y == 7 && from == 1));
    } else {
        usleep(900000);                  /* three times the timeout */
        if (leaves == 2) raise(SIGKILL); /* only for processes */
        if (!leaves) dt_send(world, &x, 1, DT_I32, 0, 5);
    }
    return dt_error(ctx);
}

static void unheard(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* The wait ends when the last peer ends or dies, and names it. */
static void test_idle(void) {
    for (int i = 0; i < 5; i++) {
        int leaves = i / 2;
        dt_report report;
        dt_host host = *dt_host_default();
        host.log = unheard;
        memset(&report, 0, sizeof report);
        dt_status status = dt_run((dt_run_desc){ .ranks = 2,
                                      .backend = i % 2 == 0 ? DT_BACKEND_PROCS : DT_BACKEND_THREADS,
                                      .timeout_s = 0.3,
                                      .host = &host,
                                      .report = &report },
            idle_rank, &leaves);
        CHECK_MSG(leaves ? status != DT_OK && strstr(report.text, "rank 1") : status == DT_OK,
            "idle wait, case %d: status %d, %s", i, (int)status, report.text);
    }
}

static void test_messages(void) {
    test_idle();
    for (int procs = 0; procs < 2; procs++) {
        run_well_on(procs, 3, any_rank, NULL);
        for (int n = 2; n <= 5; n++) run_well_on(procs, n, many_senders_rank, NULL);
        for (int n = 1; n <= 5; n++) run_well_on(procs, n, self_rank, NULL);
        for (int big = 0; big < 2; big++) run_well_on(procs, 2, overtake_rank, &big);
        for (int a = 0; a < DT_ALGORITHMS; a++) run_well_on(procs, 2, full_pair_rank, &a);
    }
}

/* ---- 4. the simulated link ---- */

typedef struct link_case {
    double latency;
    dt_algorithm algorithm;
} link_case;

static dt_status link_rank(dt_ctx *ctx, void *user) {
    const link_case *c = (const link_case *)user;
    dt_comm *world = dt_world(ctx), *one = dt_comm_split(world, dt_comm_rank(world), 0, "one");
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    float x[4 * 64], y[4 * 64];
    dt_comm_set_algorithm(world, c->algorithm);
    double from, link_free = world->world->link->free_at[0];
    /* groups of one only copy, so the link costs nothing */
    for (int i = 0; i < 5; i++) dt_all_reduce(one, x, x, 1, DT_F32, DT_SUM);
    for (int i = 0; i < 5; i++) dt_mean(world, 1);
    CHECK(world->world->link->free_at[0] == link_free);
    dt_barrier(world);
    from = seconds();
    for (int i = 0; i < 10; i++) { /* in place, so that adding twice would show */
        for (int k = 0; k < n * 64; k++) x[k] = (float)(me + 1);
        if (i % 2)
            CHECK(dt_all_reduce(world, x, x, 64, DT_F32, DT_SUM) == DT_OK);
        else
            CHECK(dt_reduce_scatter(world, x, x + me * 64, 64, DT_F32, DT_SUM) == DT_OK);
        CHECK_MSG((i % 2 ? x[0] : x[me * 64]) == (float)(n * (n + 1) / 2), "algorithm %d: %g",
            (int)c->algorithm, (double)x[0]);
    }
    double took = seconds() - from;
    CHECK_MSG(took >= 10 * c->latency * 0.999 && in_time(took, 30 * c->latency + 1),
        "10 blocking operations took %.3f s", took);
    dt_work *works[5];
    from = seconds();
    for (int i = 0; i < 5; i++) works[i] = dt_all_gather_start(world, x, y, 16, DT_F32);
    int over = 0; /* meanwhile compute in small pieces, as long as the link takes */
    while (seconds() - from < 5 * c->latency) {
        nap(ctx, 1e-3);
        over += dt_test(ctx, works[0]) && seconds() - from < c->latency * 0.99;
    }
    for (int i = 4; i >= 0; i--) dt_wait(ctx, works[i]);
    took = seconds() - from;
    CHECK_MSG(over == 0 && took >= 5 * c->latency * 0.999 && in_time(took, 8 * c->latency + 0.5),
        "5 started operations took %.3f s", took);
    from = seconds();
    dt_barrier(world);
    if (me == 0) dt_send(world, x, 8, DT_F32, 1, 0);
    if (me == 1) dt_recv(world, y, 8, DT_F32, 0, 0);
    CHECK_MSG(seconds() - from >= c->latency * (me < 2 ? 2 : 1) * 0.999, "rank %d: %.3f s", me,
        seconds() - from);
    return dt_error(ctx);
}

static dt_status bandwidth_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    float *x = (float *)calloc(50000, 4);
    (void)user;
    dt_barrier(world);
    double from = seconds();
    dt_all_reduce(world, x, x, 50000, DT_F32, DT_SUM);
    double took = seconds() - from; /* 2 * 200,000 / 2 bytes at 1 MB/s */
    CHECK_MSG(took >= 0.2 && in_time(took, 1.5), "%.3f s", took);
    free(x);
    return dt_error(ctx);
}

static void test_link(void) {
    outcome o;
    for (int procs = 0; procs < 2; procs++) {
        for (int a = 0; a < DT_ALGORITHMS; a++) {
            link_case c = { 0.01, (dt_algorithm)a };
            if (procs)
                prepare_procs(&o, 3, link_rank, &c);
            else
                prepare(&o, 3, link_rank, &c);
            o.desc.link.latency_s = c.latency;
            o.desc.timeout_s = 5;
            start(&o);
            CHECK_MSG(o.status == DT_OK, "algorithm %d: %s", a, o.report.text);
        }
    }
    for (int slow = 0; slow < 2; slow++) {
        prepare(&o, 2, bandwidth_rank, NULL);
        o.desc.link.bytes_per_s = 1e6;
        o.desc.timeout_s = slow ? 0.1 : 60; /* a slow link must not count as a late rank */
        start(&o);
        CHECK_MSG(o.status == DT_OK, "%s", o.report.text);
    }
    prepare(&o, 2, bandwidth_rank, NULL);
    o.desc.link.latency_s = -1;
    CHECK(start(&o) == DT_ERR_ARG);
}

int main(int argc, char **argv) {
    int all = argc < 2;
#define PART(name) (all || strcmp(argv[1], name) == 0)
    if (PART("flights")) test_flights();
    if (PART("rules")) test_rules();
    if (PART("messages")) test_messages();
    if (PART("link")) test_link();
    return check_done("test_comm_started");
}
