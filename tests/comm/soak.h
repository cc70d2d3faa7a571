/* soak.h - random correct programs: no run may fail, whatever the delays.

   All ranks derive the same program from one seed. Delays, the order of waits and the placement of
   buffers come from a different seed on each rank. Included after dt_comm.h with its
   implementation. */
#ifndef SOAK_H
#define SOAK_H

#include "tests/support/check.h"

#include <stdlib.h>
#include <time.h>

enum { SOAK_STARTED = 6, SOAK_MOST = 8, SOAK_LONG = 20000, SOAK_SHORT = 3000 };

typedef struct soak {
    uint64_t seed;
    int steps;
    double delay_s; /* the longest delay */
    /* number of wrong results on threads; a forked rank fails its context instead */
    int bad;
} soak;

static uint64_t soak_next(uint64_t *x) {
    *x += 0x9E3779B97F4A7C15u;
    uint64_t z = (*x ^ *x >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* One rank of one program. */
typedef struct soaker {
    dt_ctx *ctx;
    dt_comm *group[4]; /* the world, halves, odd and even ranks, the world in reverse order */
    int me, n, at;     /* at: the step, which is the tag of its messages */
    uint64_t all, own; /* random states: equal on all ranks; this rank's own */
    float *a, *b;      /* (n * SOAK_LONG) each */
    float *room;       /* (SOAK_STARTED, 2, n * SOAK_SHORT) */
    size_t room_bytes;
    dt_work *work[SOAK_STARTED];
    /* operations started since all were last waited for; equal on all ranks */
    int started;
    double delay_s;
} soaker;

static void soak_delay(soaker *s) {
    uint64_t r = soak_next(&s->own);
    double length = s->delay_s * (double)(r >> 8 & 1023) / 1024;
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = (long)(1e9 * length);
    if (r % 4 == 0) nanosleep(&t, NULL);
    double until = dt_host_default()->now(NULL) + length / 4;
    while (r % 8 == 1 && dt_host_default()->now(NULL) < until) {
    }
}

static size_t soak_count(soaker *s, int most) {
    static const size_t counts[] = { 0, 1, 7, 100, 1000, SOAK_SHORT, SOAK_LONG, 1024, 1025 };
    size_t count = counts[soak_next(&s->all) % 9];
    return count > (size_t)most ? (size_t)most : count;
}

static void soak_collective(soaker *s) {
    dt_comm *c = s->group[soak_next(&s->all) % 4];
    size_t n = soak_count(s, SOAK_LONG), counts[SOAK_MOST];
    int kind = (int)(soak_next(&s->all) % 10),
        root = (int)(soak_next(&s->all) % (uint64_t)s->n) % dt_comm_size(c);
    for (int r = 0; r < SOAK_MOST; r++) counts[r] = n;
    switch (kind) {
    case 0: dt_all_reduce(c, s->a, s->b, n, DT_F32, DT_SUM); break;
    case 1: dt_reduce(c, s->a, s->b, n, DT_F32, DT_MAX, root); break;
    case 2: dt_reduce_scatter(c, s->a, s->b, n, DT_F32, DT_SUM); break;
    case 3: dt_all_gather(c, s->a, s->b, n, DT_F32); break;
    case 4: dt_gather(c, s->a, s->b, n, DT_F32, root); break;
    case 5: dt_scatter(c, s->a, s->b, n, DT_F32, root); break;
    case 6: dt_all_to_all(c, s->a, s->b, n, DT_F32); break;
    case 7: dt_all_to_all_v(c, s->a, counts, s->b, counts, DT_F32); break;
    case 8: dt_broadcast(c, s->b, n, DT_F32, root); break;
    default: dt_barrier(c);
    }
    if (kind == 0 && n > 0 && !dt_error(s->ctx) && s->b[n - 1] != (float)dt_comm_size(c))
        dt_fail(s->ctx, DT_ERR_NUMERIC, "a sum of ones is %g", (double)s->b[n - 1]);
}

static void soak_start(soaker *s) {
    dt_comm *c = s->group[soak_next(&s->all) % 4];
    size_t n = soak_count(s, SOAK_SHORT);
    int kind = (int)(soak_next(&s->all) % 6), i = s->started;
    if (i == SOAK_STARTED) return;
    float *a = s->room + (size_t)(2 * i * s->n) * SOAK_SHORT, *b = a + s->n * SOAK_SHORT;
    s->started++;
    switch (kind) {
    case 0: s->work[i] = dt_all_reduce_start(c, a, b, n, DT_F32, DT_SUM); break;
    case 1: s->work[i] = dt_reduce_scatter_start(c, a, b, n, DT_F32, DT_SUM); break;
    case 2: s->work[i] = dt_all_gather_start(c, a, b, n, DT_F32); break;
    case 3: s->work[i] = dt_broadcast_start(c, b, n, DT_F32, 0); break;
    case 4: s->work[i] = dt_all_to_all_start(c, a, b, n, DT_F32); break;
    default: s->work[i] = dt_barrier_start(c);
    }
}

/* Waits in this rank's own random order; some operations are polled repeatedly first. */
static void soak_wait(soaker *s, int all) {
    int first = (int)(soak_next(&s->own) % SOAK_STARTED),
        step = soak_next(&s->own) % 2 ? 1 : SOAK_STARTED - 1;
    for (int k = 0; k < SOAK_STARTED; k++) {
        int i = (first + k * step) % SOAK_STARTED;
        if (!s->work[i]) continue;
        for (int turns = soak_next(&s->own) % 3 ? 0 : 2000;
             turns > 0 && !dt_test(s->ctx, s->work[i]); turns--) {
        }
        if (soak_next(&s->own) % 4 == 0) soak_delay(s);
        dt_wait(s->ctx, s->work[i]);
        s->work[i] = NULL;
        if (!all) return;
    }
    if (all) s->started = 0;
}

static void soak_ring(soaker *s, dt_comm *world) {
    size_t n = soak_count(s, SOAK_LONG);
    int way = (int)(soak_next(&s->all) % 3), right = (s->me + 1) % s->n,
        left = (s->me + s->n - 1) % s->n;
    dt_work *work;
    if (way == 0) { /* the receive is posted before the send */
        work = dt_recv_start(world, s->b, n, DT_F32, left, s->at);
        soak_delay(s);
        dt_send(world, s->a, n, DT_F32, right, s->at);
    } else if (way == 1) { /* the send stays pending during a collective */
        work = dt_send_start(world, s->a, n, DT_F32, right, s->at);
        dt_barrier(world);
        soak_delay(s);
        dt_recv(world, s->b, n, DT_F32, left, s->at);
    } else { /* an eager message, which needs no receiver yet */
        if (n > DT_EAGER_BYTES / 4) n = DT_EAGER_BYTES / 4;
        dt_send(world, s->a, n, DT_F32, right, s->at);
        dt_barrier(world);
        dt_recv(world, s->b, n, DT_F32, left, s->at);
        return;
    }
    dt_wait(s->ctx, work);
}

/* A message passes from rank to rank; and pairs exchange messages, one of each pair sending
   first. */
static void soak_chain(soaker *s, dt_comm *world) {
    size_t n = soak_count(s, SOAK_LONG);
    int other = s->me ^ 1;
    if (soak_next(&s->all) % 2) {
        if (s->me > 0) dt_recv(world, s->b, n, DT_F32, s->me - 1, s->at);
        soak_delay(s);
        if (s->me + 1 < s->n) dt_send(world, s->b, n, DT_F32, s->me + 1, s->at);
    } else if (other < s->n) {
        if (s->me % 2) dt_recv(world, s->b, n, DT_F32, other, s->at);
        soak_delay(s);
        dt_send(world, s->a, n, DT_F32, other, s->at);
        if (s->me % 2 == 0) dt_recv(world, s->b, n, DT_F32, other, s->at);
    }
}

static void soak_any(soaker *s, dt_comm *world) {
    size_t n = soak_count(s, SOAK_LONG);
    int root = (int)(soak_next(&s->all) % (uint64_t)s->n), from;
    soak_delay(s);
    if (s->me != root) dt_send(world, s->a, n, DT_F32, root, s->at);
    for (int i = 1; i < s->n && s->me == root; i++)
        dt_recv_any(world, s->b, n, DT_F32, s->at, &from);
}

static void soak_exchange(soaker *s, dt_comm *world) {
    size_t n = soak_count(s, SOAK_LONG);
    int far = (int)(soak_next(&s->all) % (uint64_t)s->n);
    dt_transfer t[2];
    memset(t, 0, sizeof t);
    t[0].send = s->a;
    t[0].peer = (s->me + far) % s->n;
    t[1].recv = s->b;
    t[1].peer = (s->me + s->n - far) % s->n;
    for (int i = 0; i < 2; i++) {
        t[i].count = n;
        t[i].dtype = DT_F32;
        t[i].tag = s->at;
    }
    dt_exchange(world, t, 2);
}

static void soak_scalars(soaker *s, dt_comm *world) {
    double x = 1;
    dt_comm *c = s->group[soak_next(&s->all) % 4];
    dt_sum_doubles(c, &x, 1);
    dt_mean(world, x);
    dt_agree(c, DT_OK);
    float mine = 1; /* a message to the same rank */
    dt_send(world, &mine, 1, DT_F32, s->me, s->at);
    soak_delay(s);
    dt_recv(world, &mine, 1, DT_F32, s->me, s->at);
}

static void soak_step(soaker *s) {
    dt_comm *world = s->group[0];
    switch (soak_next(&s->all) % 16) {
    case 0:
    case 1:
    case 2:
    case 3: soak_collective(s); break;
    case 4:
    case 5:
    case 6: soak_start(s); break;
    case 7: soak_wait(s, 1); break;
    case 8: soak_wait(s, 0); break;
    case 9:
    case 10: soak_ring(s, world); break;
    case 11:
    case 12: soak_chain(s, world); break;
    case 13: soak_any(s, world); break;
    case 14: soak_exchange(s, world); break;
    default: soak_scalars(s, world);
    }
    soak_delay(s);
}

static dt_status soak_rank(dt_ctx *ctx, void *user) {
    const soak *program = (const soak *)user;
    soaker s;
    dt_comm *world = dt_world(ctx);
    memset(&s, 0, sizeof s);
    s.ctx = ctx;
    s.me = dt_comm_rank(world);
    s.n = dt_comm_size(world);
    s.all = program->seed;
    s.own = program->seed * 31 + (uint64_t)s.me + 1;
    s.delay_s = program->delay_s;
    size_t elements = (size_t)s.n * SOAK_LONG;
    int reached = soak_next(&s.own) % 2 == 0; /* on forks: 1 if the buffers are in shared memory */
    s.a = (float *)(reached ? dt_alloc(ctx, DT_MEM_COMM, 8 * elements, "a") : malloc(8 * elements));
    s.room_bytes = (size_t)(SOAK_STARTED * 2 * s.n) * SOAK_SHORT * sizeof(float);
    s.room = (float *)malloc(s.room_bytes);
    if (!s.a || !s.room) return DT_ERR_MEM;
    s.b = s.a + elements;
    for (size_t i = 0; i < 2 * elements; i++) s.a[i] = 1;
    memset(s.room, 0, s.room_bytes);
    s.group[0] = world;
    s.group[1] = dt_comm_split(world, 2 * s.me / s.n, 0, "half");
    s.group[2] = dt_comm_split(world, s.me % 2, 0, "parity");
    s.group[3] = dt_comm_split(world, 0, -s.me, "turned");
    for (s.at = 0; s.at < program->steps && !dt_error(ctx); s.at++) soak_step(&s);
    soak_wait(&s, 1);
    if (reached)
        dt_free(ctx, DT_MEM_COMM, s.a, 8 * elements);
    else
        free(s.a);
    free(s.room);
    return dt_error(ctx);
}

#endif
