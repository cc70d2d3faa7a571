/* tcp_jobs.h - jobs over sockets on this machine, for tests: each rank is a forked process that
   calls dt_run with backend tcp on a free loopback port. Ranks store checks, reports and times in
   shared memory. Every rank must free all memory and close all descriptors. Include it after
   dt_comm.h and check.h. */
#ifndef TCP_JOBS_H
#define TCP_JOBS_H

#include "tests/comm/intruder.h" /* is_line */
#include "tests/support/jitter.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

enum { MOST = 8 };

static double seconds(void) { return dt_host_default()->now(NULL); }
static void nap(double s) { dt_host_default()->sleep(NULL, s); }

/* ---- a host table that counts ---- */

typedef struct spy {
    dt_host host;
    /* refuse_at: number of the allocation to refuse, from 1; 0: none */
    long live, calls, refuse_at;
    size_t largest;
    int error_lines, notices, odd_lines; /* odd: with control bytes */
} spy;

static void *spy_alloc(void *user, size_t bytes, dt_mem mem) {
    spy *s = (spy *)user;
    if (++s->calls == s->refuse_at) return NULL;
    void *p = dt_host_default()->alloc(NULL, bytes, mem);
    if (bytes > s->largest) s->largest = bytes;
    if (p) memset(p, 0xA5, bytes < 65536 ? bytes : 65536);
    s->live += p != NULL;
    return p;
}

static void spy_free(void *user, void *p, size_t bytes, dt_mem mem) {
    ((spy *)user)->live -= p != NULL;
    dt_host_default()->free(NULL, p, bytes, mem);
}

static void spy_log(void *user, int level, int rank, const char *text) {
    (void)rank;
    ((spy *)user)->odd_lines += !is_line(text);
    ((spy *)user)->error_lines += level == DT_LOG_ERROR;
    ((spy *)user)->notices += level == DT_LOG_NOTICE;
}

static void spy_make(spy *s) {
    memset(s, 0, sizeof *s);
    s->host = *dt_host_default();
    s->host.user = s;
    s->host.alloc = spy_alloc;
    s->host.free = spy_free;
    s->host.log = spy_log;
}

static int open_descriptors(void) {
    int n = 0;
    for (int fd = 0; fd < 512; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* ---- jobs ---- */

typedef dt_status (*rank_fn)(dt_ctx *ctx, void *user);

typedef struct rank_result {
    spy host; /* that the rank runs with */
    dt_status status;
    dt_report report;
    double took;
    int ended, passed, failed; /* ended: dt_run has returned; passed, failed: checks */
    int signal;
    long peak_kib;
    uint64_t hash;
} rank_result;

typedef struct job {
    int ranks, port;
    double timeout_s;
    rank_fn fn;
    int what;         /* for the rank function */
    int absent;       /* bit mask of ranks that are never started */
    int after_notice; /* bit mask of ranks that start after rank 0 has logged a notice */
    int refuse_rank;  /* the rank, and the number of its allocation to refuse */
    long refuse_at;
    int check;               /* of dt_run_desc */
    double late[MOST];       /* seconds by which a rank starts later */
    const char *token[MOST]; /* of dt_run_desc; NULL: none */
    int size[MOST];          /* the job size that a rank claims; 0: the correct one */
    int as[MOST];            /* the rank number that a rank claims, + 1; 0: the correct one */
    pid_t pid[MOST];
    double begun;
    rank_result result[MOST];
} job;

/* A job that should succeed must not time out because other programs keep the machine busy. */
static double load_at_start(void) {
    static double load;
    if (load == 0) load = slowdown();
    return load < 3 ? 1 : load;
}

static job *job_make(int ranks, rank_fn fn, int what) {
    job *j =
        (job *)mmap(NULL, sizeof *j, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(j, 0, sizeof *j);
    j->ranks = ranks;
    j->fn = fn;
    j->what = what;
    j->timeout_s = 20 * load_at_start();
    dt__tcp_address any = { 0, 0 };
    any.ip = htonl(INADDR_LOOPBACK);
    int fd = dt__tcp_listen(any, 1);
    j->port = (int)dt__tcp_own_address(fd).port;
    close(fd);
    return j;
}

static void job_free(job *j) { munmap(j, sizeof *j); }

static void child(job *j, int rank) {
    rank_result *r = &j->result[rank];
    spy *s = &r->host;
    dt_run_desc desc;
    char rendezvous[64];
    check_passed = check_failed = 0;
    spy_make(s);
    if (j->late[rank] > 0) nap(j->late[rank] * fmin(load_at_start(), 10));
    while (j->after_notice >> rank & 1 && !j->result[0].host.notices) nap(1e-3);
    if (rank == j->refuse_rank) s->refuse_at = j->refuse_at;
    memset(&desc, 0, sizeof desc);
    snprintf(rendezvous, sizeof rendezvous, "127.0.0.1:%d", j->port);
    desc.ranks = j->size[rank] ? j->size[rank] : j->ranks;
    desc.token = j->token[rank];
    desc.check = j->check;
    desc.backend = DT_BACKEND_TCP;
    desc.timeout_s = j->timeout_s;
    desc.host = &s->host;
    desc.report = &r->report;
    desc.rank = j->as[rank] ? j->as[rank] - 1 : rank;
    desc.rendezvous = rendezvous;
    int descriptors = open_descriptors();
    double from = seconds();
    r->status = dt_run(desc, j->fn, j);
    r->took = seconds() - from;
    CHECK_MSG(r->status == r->report.status, "rank %d returns %d, reports %d", rank, r->status,
        r->report.status);
    CHECK_MSG(
        s->live == 0, "rank %d: %ld blocks were not freed: %s", rank, s->live, r->report.text);
    CHECK_MSG(s->odd_lines == 0 && is_line(r->report.text), "rank %d: %d lines with control bytes",
        rank, s->odd_lines);
    CHECK_MSG(open_descriptors() == descriptors, "rank %d: descriptors were not closed: %s", rank,
        r->report.text);
    CHECK_MSG((r->status == DT_OK) == (r->report.text[0] == 0), "%s", r->report.text);
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    r->peak_kib = use.ru_maxrss;
    r->passed = check_passed;
    r->failed = check_failed;
    r->ended = 1;
}

static void job_start(job *j) {
    fflush(NULL);
    j->begun = seconds();
    for (int rank = 0; rank < j->ranks; rank++) {
        if (j->absent >> rank & 1) continue;
        pid_t pid = fork();
        if (pid == 0) {
            alarm(1800); /* ends even if the parent is killed */
            child(j, rank);
            fflush(NULL);
            _exit(0);
        }
        j->pid[rank] = pid; /* only the parent writes here, because the memory is shared */
    }
}

/* Waits for all ranks. Kills ranks that hang and counts them as failures. */
static void job_wait(job *j) {
    for (int rank = 0; rank < j->ranks; rank++) {
        int status = 0, gone = j->pid[rank] <= 0;
        while (!gone) {
            gone = waitpid(j->pid[rank], &status, WNOHANG) != 0;
            if (gone) break;
            if (!CHECK_MSG(
                    in_time(seconds() - j->begun, 60), "rank %d of %d hangs", rank, j->ranks)) {
                kill(j->pid[rank], SIGKILL);
                waitpid(j->pid[rank], &status, 0);
                break;
            }
            nap(1e-3);
        }
        j->result[rank].signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
        check_passed += j->result[rank].passed;
        check_failed += j->result[rank].failed;
    }
}

static job *run_job(int ranks, rank_fn fn, int what) {
    job *j = job_make(ranks, fn, what);
    job_start(j);
    job_wait(j);
    return j;
}

static void check_well(const job *j) {
    for (int rank = 0; rank < j->ranks; rank++) {
        const rank_result *r = &j->result[rank];
        CHECK_MSG(r->ended && r->status == DT_OK && r->host.error_lines == 0,
            "%d ranks, case %d: rank %d: %s (%d lines, signal %d)", j->ranks, j->what, rank,
            r->ended ? r->report.text : "did not end", r->host.error_lines, r->signal);
    }
}

static void run_well(int ranks, rank_fn fn, int what) {
    job *j = run_job(ranks, fn, what);
    check_well(j);
    job_free(j);
}

static dt_status short_rank(dt_ctx *ctx, void *user) {
    (void)user;
    return dt_barrier(dt_world(ctx));
}

/* 1 if the text says that the connection to the rank was lost and names its process. */
static int says_lost(const char *text, int rank) {
    char start[64];
    snprintf(start, sizeof start, "connection to rank %d (process ", rank);
    const char *at = strstr(text, start);
    return at && strstr(at, ") was lost") != NULL;
}

#endif
