/* test_mismatch.c - dt_comm.h: if ranks make different calls, all ranks report it at once with the
   same text; and there are no false alarms.

       test_mismatch                     every case of mismatch_cases.h over threads, procs and
                                         tcp; random programs
       test_mismatch threads|procs|tcp   one backend, without the programs
       test_mismatch full                with more random programs
       test_mismatch cost                ns of a small all-reduce and barrier: for
                                         tests/faults/cost.sh

   mpi_mismatch.c runs the same cases over MPI. Timeouts are long, so that each mismatch must be
   detected as such. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/comm/mismatch_cases.h"
#include "tests/comm/soak.h"

#include <signal.h>

static double timeout_s = 10;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
static const double detection_limit_s = 0.5; /* runs are slower under a sanitizer */
#else
static const double detection_limit_s = 0.1;
#endif

static void no_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_run_desc desc_of(dt_backend backend, int ranks, const dt_host *host, dt_report *report) {
    dt_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.ranks = ranks;
    desc.backend = backend;
    desc.timeout_s = timeout_s;
    desc.host = host;
    desc.report = report;
    return desc;
}

static const char *backend_name(dt_backend backend) {
    return backend == DT_BACKEND_THREADS ? "threads"
           : backend == DT_BACKEND_PROCS ? "procs"
                                         : "tcp";
}

/* ---- jobs over sockets: a process for each rank ---- */

static int free_port(void) {
    dt__tcp_address any = { 0, 0 };
    any.ip = htonl(INADDR_LOOPBACK);
    int fd = dt__tcp_listen(any, 1), port = (int)dt__tcp_own_address(fd).port;
    close(fd);
    return port;
}

/* Stores each rank's report of dt_run in notes, which are in shared memory. */
static void tcp_job(int ranks, const dt_host *host, dt_status (*fn)(dt_ctx *, void *), void *user,
    odd_note *notes) {
    int port = free_port();
    pid_t pids[SOAK_MOST];
    fflush(NULL);
    for (int rank = 0; rank < ranks; rank++) {
        pids[rank] = fork();
        if (pids[rank]) continue;
        char rendezvous[64];
        dt_run_desc desc = desc_of(DT_BACKEND_TCP, ranks, host, &notes[rank].report);
        alarm(1800); /* ends even if the parent is killed */
        snprintf(rendezvous, sizeof rendezvous, "127.0.0.1:%d", port);
        desc.rank = rank;
        desc.rendezvous = rendezvous;
        notes[rank].returned = dt_run(desc, fn, user);
        _exit(0);
    }
    for (int rank = 0; rank < ranks; rank++) {
        int status = 0;
        CHECK_MSG(pids[rank] > 0 && waitpid(pids[rank], &status, 0) == pids[rank] && status == 0,
            "rank %d of %d ends with status %d", rank, ranks, status);
    }
}

/* ---- mismatches ---- */

static odd_run *run_one(
    const mismatch *m, dt_backend backend, uint64_t delays, dt_status *status, dt_report *report) {
    static odd_run *run;
    dt_host host = *dt_host_default();
    host.log = no_log;
    if (!run)
        run = (odd_run *)mmap(
            NULL, sizeof *run, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(run, 0, sizeof *run);
    run->what = m;
    run->delays = delays;
    if (backend == DT_BACKEND_TCP) {
        tcp_job(ODD_RANKS, &host, odd_rank, run, run->note);
        *report = run->note[0].report;
        *status = run->note[0].returned;
        for (int r = 1; r < ODD_RANKS; r++)
            if (strcmp(without_prefix(run->note[r].report.text), without_prefix(report->text)) !=
                    0 ||
                run->note[r].returned == DT_OK)
                CHECK_MSG(0, "tcp: %s: rank %d reports '%s', rank 0 '%s'", m->name, r,
                    run->note[r].report.text, report->text);
    } else {
        *status = dt_run(desc_of(backend, ODD_RANKS, &host, report), odd_rank, run);
    }
    return run;
}

/* Repeats a case that was late, because a busy machine may have caused the delay. */
static void run_case(const mismatch *m, dt_backend backend, int at, lateness *late) {
    dt_status status;
    dt_report report;
    odd_run *run = run_one(m, backend, (uint64_t)at, &status, &report);
    double least = odd_late(run);
    check_odd_run(run, backend_name(backend), status, &report);
    for (int again = 0; again < 2 && least > detection_limit_s; again++) {
        run = run_one(m, backend, (uint64_t)(at + again + 1), &status, &report);
        if (odd_late(run) < least) least = odd_late(run);
    }
    CHECK_MSG(in_time(least, detection_limit_s), "%s: %s: found after %.0f ms: %s",
        backend_name(backend), m->name, 1e3 * least, without_prefix(report.text));
    lateness_add(late, least);
}

static void run_cases(dt_backend backend) {
    static mismatches all;
    static lateness late;
    int classes[8] = { 0 };
    static const char *const names[] = { "kind", "dtype", "count", "root", "redop", "group",
        "order", "missing" };
    cases_all(&all);
    late.n = 0;
    for (int i = 0; i < all.n; i++) {
        for (int k = 0; k < 8; k++)
            classes[k] += strncmp(all.list[i].name, names[k], strlen(names[k])) == 0;
        run_case(&all.list[i], backend, i, &late);
    }
    printf("%s: %d cases:", backend_name(backend), all.n);
    for (int k = 0; k < 8; k++) printf(" %d %s", classes[k], names[k]);
    printf("\n");
    lateness_print(&late, backend_name(backend));
}

/* ---- no false alarms ---- */

static int expect_success(dt_backend backend, int ranks, dt_status (*fn)(dt_ctx *, void *),
    void *user, const char *what) {
    dt_report report;
    dt_host host = *dt_host_default();
    host.log = no_log;
    memset(&report, 0, sizeof report);
    if (backend == DT_BACKEND_TCP) {
        static odd_note *notes;
        if (!notes)
            notes = (odd_note *)mmap(NULL, SOAK_MOST * sizeof *notes, PROT_READ | PROT_WRITE,
                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        memset(notes, 0, SOAK_MOST * sizeof *notes);
        tcp_job(ranks, &host, fn, user, notes);
        for (int r = 0; r < ranks; r++)
            if (notes[r].returned != DT_OK) report = notes[r].report;
    } else {
        dt_run(desc_of(backend, ranks, &host, &report), fn, user);
    }
    return CHECK_MSG(report.status == DT_OK, "%s, %d ranks, %s: %s", backend_name(backend), ranks,
        what, report.text);
}

/* The programs of the cases without an odd rank. */
static void programs_without_the_odd_call(dt_backend backend) {
    static mismatches all;
    odd_run run;
    cases_all(&all);
    for (int i = backend == DT_BACKEND_TCP ? 3 : 0; i < all.n;
         i += backend == DT_BACKEND_TCP ? 7 : 1) {
        memset(&run, 0, sizeof run);
        all.list[i].odd_rank = -1;
        run.what = &all.list[i];
        run.delays = (uint64_t)i;
        expect_success(backend, ODD_RANKS, odd_rank, &run, all.list[i].name);
    }
}

static void random_programs(int runs, dt_backend backend) {
    int failed = 0;
    for (int i = 0; i < runs && failed < 3; i++) {
        soak program;
        char what[64];
        memset(&program, 0, sizeof program);
        program.seed = (uint64_t)(1 + i) * 7919;
        program.steps = 30;
        program.delay_s = i % 3 ? 1e-3 : 0;
        snprintf(what, sizeof what, "random program %d", i);
        failed += !expect_success(
            backend, 2 + i % (backend == DT_BACKEND_TCP ? 3 : 7), soak_rank, &program, what);
    }
    printf("%s: %d random programs\n", backend_name(backend), runs);
}

/* ---- cost ---- */

enum { COST_OPS = 400, COST_ROUNDS = 600 };
typedef struct cost {
    double all_reduce, barrier;
} cost;

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

/* The fastest of many short rounds, by rank 0's clock; even on a busy machine some rounds run
   undisturbed. */
static dt_status cost_rank(dt_ctx *ctx, void *user) {
    cost *least = (cost *)user;
    dt_comm *world = dt_world(ctx);
    float *x = (float *)dt_alloc(ctx, DT_MEM_COMM, 64, "x"), *y = x + 8;
    int me = dt_comm_rank(world);
    pin(me);
    memset(x, 0, 64);
    for (int round = 0; round < COST_ROUNDS; round++) {
        double begin = mono();
        for (int i = 0; i < COST_OPS; i++) dt_all_reduce(world, x, y, 8, DT_F32, DT_SUM);
        double middle = mono();
        for (int i = 0; i < COST_OPS; i++) dt_barrier(world);
        double end = mono(), reduce = (middle - begin) / COST_OPS,
               barrier = (end - middle) / COST_OPS;
        if (me > 0) continue;
        if (round == 0 || reduce < least->all_reduce) least->all_reduce = reduce;
        if (round == 0 || barrier < least->barrier) least->barrier = barrier;
    }
    dt_free(ctx, DT_MEM_COMM, x, 64);
    return dt_error(ctx);
}

static int print_cost(void) {
    for (int procs = 0; procs < 2; procs++) {
        cost least = { 0, 0 };
        dt_run_desc desc = desc_of(procs ? DT_BACKEND_PROCS : DT_BACKEND_THREADS, 2, NULL, NULL);
        desc.user_bytes = sizeof least;
        if (dt_run(desc, cost_rank, &least) != DT_OK) return 1;
        printf("%s: all-reduce %.1f ns, barrier %.1f ns\n", backend_name(desc.backend),
            1e9 * least.all_reduce, 1e9 * least.barrier);
    }
    return 0;
}

int main(int argc, char **argv) {
    static const dt_backend backends[] = { DT_BACKEND_THREADS, DT_BACKEND_PROCS, DT_BACKEND_TCP };
    const char *mode = argc > 1 ? argv[1] : "";
    int full = strcmp(mode, "full") == 0;
    if (strcmp(mode, "cost") == 0) return print_cost();
    if (argc > 2) timeout_s = atof(argv[2]);
    for (int i = 0; i < 3; i++) {
        if (mode[0] && !full && strcmp(mode, "well") && strcmp(mode, backend_name(backends[i])))
            continue;
        if (strcmp(mode, "well") != 0) run_cases(backends[i]);
        if (mode[0] && !full && strcmp(mode, "well") != 0) continue;
        programs_without_the_odd_call(backends[i]);
        random_programs((full ? 5 : 1) * (backends[i] == DT_BACKEND_TCP ? 20 : 100), backends[i]);
    }
    return check_done("test_mismatch");
}
