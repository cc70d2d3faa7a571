/* test_many_ranks.c - dt_comm.h: 1,000 ranks as threads and 256 as forks start, all-reduce, meet in
   a barrier and end. What threads touch for each pair of ranks must stay below 64 bytes.

   Prints a line for each run: ranks, seconds, memory touched by the process of rank 0 (of threads:
   by all ranks) and address space reserved. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/support/check.h"
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* The results of one run, in memory that forked ranks share. */
typedef struct job {
    int wrong;
    double resident, reserved; /* MB of the process of rank 0 while all ranks exist */
} job;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* MB that this process has mapped and touched. */
static void read_memory(double *mapped, double *resident) {
    long pages[2] = { 0, 0 };
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld %ld", &pages[0], &pages[1]) != 2) pages[0] = pages[1] = 0;
    if (f) fclose(f);
    *mapped = (double)pages[0] * (double)sysconf(_SC_PAGESIZE) / 1e6;
    *resident = (double)pages[1] * (double)sysconf(_SC_PAGESIZE) / 1e6;
}

static dt_status rank_main(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world);
    float x = (float)(dt_comm_rank(world) % 7), sum = 0, expected = 0;
    for (int rank = 0; rank < n; rank++) expected += (float)(rank % 7);
    dt_all_reduce(world, &x, &sum, 1, DT_F32, DT_SUM);
    if (sum != expected) __atomic_fetch_add(&j->wrong, 1, __ATOMIC_RELAXED);
    if (dt_comm_rank(world) == 0) read_memory(&j->reserved, &j->resident);
    return dt_barrier(world);
}

/* Runs n ranks in a process of its own, so that runs do not share touched memory. Returns the MB
   that they touched, without what the process needs anyway; -1 after a failure. */
static double touched(dt_backend backend, int n) {
    int ends[2];
    double mb = -1;
    fflush(stdout);
    if (pipe(ends) != 0) return -1;
    pid_t pid = fork();
    if (pid == 0) {
        job j = { 0, 0, 0 };
        double mapped, resident, begin = now();
        read_memory(&mapped, &resident);
        dt_status status = dt_run(
            (dt_run_desc){ .ranks = n, .backend = backend, .user_bytes = sizeof j }, rank_main, &j);
        mb = status == DT_OK && j.wrong == 0 ? j.resident - resident : -1;
        printf("%s %d ranks: %.2f s, %.1f MB touched%s, %.2f GB reserved\n",
            backend == DT_BACKEND_PROCS ? "procs" : "threads", n, now() - begin, mb,
            backend == DT_BACKEND_PROCS ? " by rank 0" : "", (j.reserved - mapped) / 1e3);
        fflush(stdout);
        if (write(ends[1], &mb, sizeof mb) != sizeof mb) _exit(1);
        _exit(0);
    }
    close(ends[1]);
    if (pid < 0 || read(ends[0], &mb, sizeof mb) != sizeof mb) mb = -1;
    close(ends[0]);
    if (pid > 0) waitpid(pid, NULL, 0);
    return mb;
}

/* The number of threads or processes that this user may still have. */
static int fits(int n) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NPROC, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return 1;
    return limit.rlim_cur > (rlim_t)(2 * n);
}

int main(void) {
    if (!fits(1000)) {
        check_skip("this user may not start 1,000 threads");
        return check_done("test_many_ranks");
    }
    double few = touched(DT_BACKEND_THREADS, 250), half = touched(DT_BACKEND_THREADS, 500),
           all = touched(DT_BACKEND_THREADS, 1000);
    CHECK(few > 0 && half > 0 && all > 0);
    /* a N + b N^2: the small b that is left is a pointer for each input of a reduction */
    double each_pair = (all - 2 * half) * 1e6 / (1e6 - 2 * 25e4);
    CHECK_MSG(each_pair < 64,
        "250, 500 and 1,000 ranks touch %.1f, %.1f and %.1f MB: %.0f bytes for each pair of ranks",
        few, half, all, each_pair);
    CHECK(touched(DT_BACKEND_PROCS, 256) >= 0);
    return check_done("test_many_ranks");
}
