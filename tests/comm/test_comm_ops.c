/* test_comm_ops.c - dt_comm.h: the cases of comm_cases.h over threads and forks, and small
   operations whose data is copied to the posts in shared memory. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/comm/comm_cases.h"
#include "tests/comm/ranks.h"

static void test_cases(void) {
    for (int n = 1; n <= 32; n = n < 9 ? n + 1 : n < 16 ? 16 : 2 * n) {
        cases s = cases_make(n, n <= 5 || n == 16 ? 1 : 2);
        run_well_on(0, n, comm_cases, &s);
        s.stride *= n <= 9 ? 2 : 1; /* these ranks repeat the cases for three buffer placements */
        if (n <= 5 || n == 8 || n >= 16) run_well_on(1, n, comm_cases, &s);
        cases_free(&s);
    }
}

static void test_windows(void) {
    for (int n = 2; n <= 5; n++) {
        if (n == 4) continue;
        cases s = cases_windows(n, 2);
        for (int procs = 0; procs < 2; procs++) run_well_on(procs, n, comm_cases, &s);
        cases_free(&s);
    }
}

static void test_bytes(void) {
    for (int n = 2; n <= 3; n++) {
        cases s = cases_bytes(n, 3);
        for (int procs = 0; procs < 2; procs++) run_well_on(procs, n, comm_cases, &s);
        cases_free(&s);
    }
}

static int post_keeps(const dt_comm *comm, const dt_work *work) {
    return dt__post_of(work, comm->base.rank)->is_inline;
}

/* A small collective in host memory is copied to the posts, so it waits only once. */
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

/* Two forks. The buffers of rank `outside` are not in shared memory, so its post must hold the
   data; the other rank's post need not. */
static dt_status mixed_rank(dt_ctx *ctx, void *user) {
    enum { N = 200 };
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), outside = *(const int *)user == me, root;
    float *range = (float *)dt_alloc(ctx, DT_MEM_COMM, 4 * N * sizeof *range, "buffers"),
          own[4 * N];
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

/* Slow enough that another rank enters and leaves meanwhile. */
static dt_status slow_reduce(const dt_reduce_args *a, void *stream) {
    if (a->count > 10000) dt_host_default()->sleep(NULL, 0.1);
    return dt_kernels_cpu()->reduce(a, stream);
}

/* Rank 1's post holds its data and rank 0's does not, so rank 0 stores the sum in a spare post.
   While rank 0 waits for rank 1 to close the operation, it progresses a long operation of another
   group and begins as many further operations as there are posts. None of these may use the spare
   post. */
static dt_status spare_post_rank(dt_ctx *ctx, void *user) {
    enum { N = 200, MANY = 100000 };
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), begun = 0, wrong = 0;
    const dt_host *host = dt_ctx_host(ctx);
    (void)user;
    /* as if each rank had a core: then posts hold less data */
    world->world->shared->spins = DT__SPINS;
    dt_comm *two = dt_comm_split(world, me < 2 ? 0 : -1, 0, "0 and 1");
    dt_comm *far = dt_comm_split(world, me != 1 ? 0 : -1, 0, "0 and 2");
    float own[2 * N],
        *range = (float *)dt_alloc(ctx, DT_MEM_COMM, 2 * MANY * sizeof *range, "buffers");
    float *a = me == 1 ? own : range, *b = a + N;
    dt_work *work[1 + DT_MAX_STARTED];
    float one = 1, sum = 0;
    if (!range) return dt_error(ctx);
    memset(range, 0, 2 * MANY * sizeof *range);
    for (int i = 0; i < N; i++) a[i] = (float)(me + 1), b[i] = -1;
    dt_barrier(world);
    if (me == 2) host->sleep(host->user, 0.1);
    if (me == 2)
        return dt_all_reduce(far, range + 2 * N, range + MANY + N, MANY - 2 * N, DT_F32, DT_SUM);
    if (me == 0) host->sleep(host->user, 0.05);
    work[begun++] = dt_all_reduce_start(two, a, b, N, DT_F32, DT_SUM);
    if (me == 0)
        work[begun++] =
            dt_all_reduce_start(far, range + 2 * N, range + MANY + N, MANY - 2 * N, DT_F32, DT_SUM);
    for (int i = 1; i < DT_MAX_STARTED; i++) work[begun++] = dt_barrier_start(two);
    if (me == 1) host->sleep(host->user, 0.15);
    dt_all_reduce(two, &one, &sum, 1, DT_F32, DT_SUM);
    for (int i = 0; i < begun; i++) dt_wait(ctx, work[i]);
    for (int i = 0; i < N; i++) wrong += b[i] != 3;
    wrong += sum != 2;
    CHECK_MSG(wrong == 0, "rank %d: %d wrong, the first is %g", me, wrong, (double)b[0]);
    return dt_error(ctx);
}

static void test_spare_post(void) {
    dt_kernels kernels = *dt_kernels_cpu();
    outcome o;
    kernels.reduce = slow_reduce;
    prepare_procs(&o, 3, spare_post_rank, NULL);
    o.desc.kernels = &kernels;
    CHECK(start(&o) == DT_OK);
}

static void no_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_status overlap_rank(dt_ctx *ctx, void *user) {
    return overlap_of(ctx, *(const unsigned *)user);
}

/* Overlapping send and recv on 1 to 5 ranks: a legal overlap gives correct results, any other is
   refused. */
static void test_overlap(void) {
    int refused[2] = { 0, 0 };
    dt_host quiet = *dt_host_default();
    quiet.log = no_log;
    for (unsigned i = 0; i < 1200; i++) {
        int procs = i % 8 == 0, ranks = (int)(procs ? 1 + i / 8 % 5 : 1 + i % 5);
        outcome o;
        if (procs)
            prepare_procs(&o, ranks, overlap_rank, &i);
        else
            prepare(&o, ranks, overlap_rank, &i);
        if (procs) o.desc.host = &quiet;
        start(&o);
        CHECK_MSG(o.status == DT_OK || o.status == DT_ERR_ARG, "overlap %u: %s", i, o.report.text);
        refused[procs] += o.status != DT_OK;
    }
    CHECK_MSG(refused[0] > 200 && refused[0] < 850 && refused[1] > 20 && refused[1] < 130,
        "%d and %d refused", refused[0], refused[1]);
}

int main(int argc, char **argv) {
    int all = argc < 2;
#define PART(name) (all || strcmp(argv[1], name) == 0)
    if (PART("windows")) test_windows();
    if (PART("bytes")) test_bytes();
    if (PART("overlap")) test_overlap();
    for (int procs = 0; PART("many") && procs < 2; procs++) run_well_on(procs, 2, many_sends, NULL);
    if (PART("cases")) test_cases();
    if (PART("post"))
        for (int procs = 0; procs < 2; procs++) run_well_on(procs, 3, post_rank, NULL);
    if (PART("post")) test_spare_post();
    for (int outside = 0; PART("post") && outside <= 2; outside++)
        run_well_on(1, 2, mixed_rank, &outside);
    return check_done("test_comm_ops");
}
