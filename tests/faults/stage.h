/* stage.h - shared by the campaigns of test_faults.c: a page that all processes see, faults on
   schedule, checks for leftovers, parallel workers, statistics of delays.

   Included by test_faults.c after dt_comm.h with its implementation, which calls staged_fork for
   fork. */
#ifndef STAGE_H
#define STAGE_H

#include <dirent.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>

enum { MOST = 8, PHASES = 5, LOG_LINES = 64 };
enum { BORN = 1, STARTED, COMPUTING, IN_COLLECTIVE, TAIL };
static const char *const phase_names[PHASES + 1] = { "none", "born", "start", "compute",
    "collective", "end" };

/* ---- the page ---- */

/* One job's record, written by its ranks, by their killer and by the supervisor, which share
   nothing else. */
typedef struct page {
    pid_t pid[MOST];
    int phase[MOST];      /* current phase of a rank */
    double entered[MOST]; /* time of the rank's last call of an operation */
    double failed[MOST];  /* time at which its context had failed; 0: not failed */
    char text[MOST][512];
    int lines;
    char line[LOG_LINES][512]; /* log lines without details */
    int line_level[LOG_LINES];
    double line_at[LOG_LINES];
    double hit; /* times of the last fault, and of the first of two */
    double first_hit;
    int hit_phase; /* the victim's phase at the fault; 0: it had ended */
    int let_go;    /* 1: spinning threads may end */
    int steps;
    dt_report report;
    dt_status status;
} page;

static page *page_make(void) {
    page *p =
        (page *)mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) abort();
    return p;
}

static void page_log(void *user, int level, int rank, const char *text) {
    page *p = (page *)user;
    (void)rank;
    if (level == DT_LOG_DETAIL) return;
    int at = __atomic_fetch_add(&p->lines, 1, __ATOMIC_SEQ_CST);
    if (at >= LOG_LINES) return;
    p->line_at[at] = mono();
    p->line_level[at] = level;
    snprintf(p->line[at], sizeof p->line[at], "%s", text);
}

/* Index of the first failure's log line, or -1. */
static int error_line(const page *p) {
    for (int i = 0; i < p->lines && i < LOG_LINES; i++)
        if (p->line_level[i] == DT_LOG_ERROR) return i;
    return -1;
}

static dt_host page_host(page *p) {
    dt_host host = *dt_host_default();
    host.user = p;
    host.log = page_log;
    return host;
}

/* Called by a rank as it ends. */
static dt_status page_note(page *p, dt_ctx *ctx, int rank) {
    if (dt_error(ctx)) {
        p->failed[rank] = mono();
        snprintf(p->text[rank], sizeof p->text[rank], "%s", dt_error_text(ctx));
    }
    return DT_OK;
}

static void phase_is(page *p, int rank, int phase) {
    __atomic_store_n(&p->phase[rank], phase, __ATOMIC_SEQ_CST);
}
static int phase_of(page *p, int rank) {
    return __atomic_load_n(&p->phase[rank], __ATOMIC_SEQ_CST);
}

/* ---- forks of the library ---- */

/* dt_run calls this for fork, so a rank is on the page before its first instruction in the
   library. */
static page *staged;
static int staged_forks;
static pid_t staged_fork_done(pid_t pid, int rank) {
    if (pid == 0 && staged && rank < MOST) {
        phase_is(staged, rank, BORN);
        __atomic_store_n(&staged->pid[rank], getpid(), __ATOMIC_SEQ_CST);
    }
    return pid;
}

/* ---- leftovers of a job ---- */

/* Number of this process's shared mappings, and of its open descriptors. */
static int shared_maps(void) {
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    while (f && fgets(line, sizeof line, f)) n += strstr(line, "rw-s") != NULL;
    if (f) fclose(f);
    return n;
}

static int descriptors(void) {
    int n = 0;
    for (int fd = 0; fd < 512; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* Number of files in a folder that may belong to the library. In private namespaces
   (own_namespaces) that is every file. */
static int own_namespaces;
static int files_in(const char *path) {
    int n = 0;
    DIR *d = opendir(path);
    struct dirent *e;
    while (d && (e = readdir(d)))
        n += e->d_name[0] != '.' &&
             ((own_namespaces && path[1] == 'd') || strncmp(e->d_name, "dt", 2) == 0);
    if (d) closedir(d);
    return n;
}

/* Number of listening sockets; counted only in a private network namespace, because it covers the
   whole namespace. */
static int listeners(void) {
    char line[512];
    int n = 0;
    FILE *f = own_namespaces ? fopen("/proc/self/net/tcp", "r") : NULL;
    while (f && fgets(line, sizeof line, f)) n += strstr(line, " 0A ") != NULL;
    if (f) fclose(f);
    return n;
}

/* Brings up the loopback, which is down in a new network namespace. */
static int loopback_up(void) {
    struct ifreq lo;
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    memset(&lo, 0, sizeof lo);
    memcpy(lo.ifr_name, "lo", 3);
    lo.ifr_flags = IFF_UP | IFF_RUNNING;
    int up = fd >= 0 && ioctl(fd, SIOCSIFFLAGS, &lo) == 0;
    if (fd >= 0) close(fd);
    return up;
}

/* As root, makes a private /dev/shm and network namespace, so that everything found there is a
   leftover. Orphans become children of this process. */
static void namespaces_make(void) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    own_namespaces = unshare(CLONE_NEWNS | CLONE_NEWNET) == 0 &&
                     mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
                     mount("none", "/dev/shm", "tmpfs", 0, NULL) == 0 && loopback_up();
}

typedef struct left {
    int maps, descriptors, shm, tmp, listeners;
} left;
static left left_now(void) {
    left l;
    l.maps = shared_maps();
    l.descriptors = descriptors();
    l.shm = files_in("/dev/shm");
    l.tmp = files_in("/tmp");
    l.listeners = listeners();
    return l;
}

static void left_check(const left *before, const char *what) {
    left now = left_now();
    pid_t child = waitpid(-1, NULL, WNOHANG);
    CHECK_MSG(child == -1 && errno == ECHILD, "%s: a process remains (waitpid returns %d)", what,
        (int)child);
    CHECK_MSG(now.maps == before->maps && now.descriptors == before->descriptors &&
                  now.shm == before->shm && now.tmp <= before->tmp &&
                  now.listeners == before->listeners,
        "%s: leftovers: %d shared mappings, %d descriptors, %d files in /dev/shm, %d in /tmp, %d "
        "listening sockets",
        what, now.maps - before->maps, now.descriptors - before->descriptors, now.shm - before->shm,
        now.tmp - before->tmp, now.listeners - before->listeners);
}

/* Waits until all children, orphans included, are gone, or 15 seconds have passed. Returns the time
   it took. */
static double children_gone(void) {
    double begin = mono();
    while (in_time(mono() - begin, 15)) {
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid < 0 && errno == ECHILD) break;
        if (pid == 0) nap(2e-4);
    }
    return mono() - begin;
}

/* ---- statistics, workers ---- */

/* Statistics over all workers. */
typedef struct figures {
    int passed, failed, at, hits[PHASES + 1];
    lateness abort_word, survivors, named, ends, other;
} figures;
static figures *sums;

static void figure_add(lateness *l, double s) {
    int at = __atomic_fetch_add(&l->n, 1, __ATOMIC_SEQ_CST);
    if (at < 4096) l->s[at] = s;
}

/* Calls fn(0), fn(1), ... fn(n - 1) in parallel, distributed over worker processes. */
static void in_parallel(int workers, int n, void (*fn)(int at)) {
    fflush(NULL);
    sums->at = 0;
    for (int w = 0; w < workers; w++) {
        if (fork()) continue;
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        check_passed = check_failed = 0;
        for (int at; (at = __atomic_fetch_add(&sums->at, 1, __ATOMIC_SEQ_CST)) < n;) fn(at);
        __atomic_fetch_add(&sums->passed, check_passed, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&sums->failed, check_failed, __ATOMIC_SEQ_CST);
        fflush(NULL);
        _exit(0);
    }
    for (int status; wait(&status) > 0;)
        CHECK_MSG(status == 0, "a worker ended with status %d", status);
    check_passed += __atomic_exchange_n(&sums->passed, 0, __ATOMIC_SEQ_CST);
    check_failed += __atomic_exchange_n(&sums->failed, 0, __ATOMIC_SEQ_CST);
}

static uint64_t dice(uint64_t seed) {
    soak_next(&seed);
    return soak_next(&seed);
}

/* ---- a job and its faults ---- */

enum { H_NONE, H_KILL, H_STOP };
typedef struct harm {
    int victim, what, phase; /* phase 0: any */
    double after, gap;       /* gap: delay of the second fault after the first */
} harm;

typedef struct job {
    dt_run_desc desc;
    page *p;
    int rounds, spinner; /* spinner: a rank that begins to spin in some round; -1: none */
    int waiter;          /* a rank that waits some ms for the others in each round; -1: none */
    double start_s;      /* delay before a rank's first operation */
    double begun, took;
} job;

static void job_init(job *j, page *p, dt_backend backend, int ranks, double timeout_s) {
    memset(j, 0, sizeof *j);
    memset(p, 0, sizeof *p);
    j->p = p;
    j->desc.ranks = ranks;
    j->desc.backend = backend;
    j->desc.timeout_s = timeout_s;
    j->desc.report = &p->report;
    j->spinner = j->waiter = -1;
    j->rounds = 1 << 30;
}

/* Waits for the planned moment, then does the harm. Runs in a separate process that is not the
   ranks' parent. */
static void harm_do(page *p, const harm *h, double begun) {
    while (!__atomic_load_n(&p->pid[h->victim], __ATOMIC_SEQ_CST) && mono() < begun + 5) {
    }
    while (mono() < begun + h->after) nap(1e-4);
    while (h->phase && mono() < begun + 5) {
        int phase = phase_of(p, h->victim);
        /* the STARTED phase does not recur */
        if (phase == h->phase || h->phase == STARTED) break;
        nap(1e-5);
    }
    int phase = phase_of(p, h->victim);
    double now = mono();
    if (!kill(p->pid[h->victim], h->what == H_STOP ? SIGSTOP : SIGKILL)) p->hit_phase = phase;
    p->hit = now;
    if (!p->first_hit) p->first_hit = now;
}

static void job_run(
    job *j, dt_status (*fn)(dt_ctx *, void *), const harm *first, const harm *second) {
    dt_host host = page_host(j->p);
    pid_t killer = -1;
    j->desc.host = &host;
    staged = j->p;
    staged_forks = 0;
    j->begun = mono();
    fflush(NULL);
    if (first && (killer = fork()) == 0) {
        harm_do(j->p, first, j->begun);
        if (second) {
            harm then = *second;
            then.after = mono() - j->begun + second->gap;
            harm_do(j->p, &then, j->begun);
        }
        _exit(0);
    }
    j->p->status = dt_run(j->desc, fn, j);
    j->took = mono() - j->begun;
    staged = NULL;
    if (killer > 0) waitpid(killer, NULL, 0);
}

/* Operations that take a few us to about 5 ms, with computation in between. */
static dt_status loop_rank(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    page *p = j->p;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), n = dt_comm_size(world);
    uint64_t dice = (uint64_t)me * 77 + 5;
    float *a = (float *)calloc(2 * MANY, sizeof *a), *b = a + MANY;
    phase_is(p, me, STARTED);
    if (j->start_s > 0) nap(j->start_s);
    for (int round = 0; round < j->rounds && !dt_error(ctx); round++) {
        phase_is(p, me, COMPUTING);
        double until = mono() + 1e-6 * (double)(soak_next(&dice) % 400);
        while (mono() < until || (me == j->spinner && round >= 5)) {
            if (me == j->spinner && round >= 5 && !p->first_hit) p->first_hit = p->hit = mono();
            if (p->let_go) break;
        }
        if (j->waiter >= 0 && j->waiter != me) nap(5e-3);
        phase_is(p, me, IN_COLLECTIVE);
        p->entered[me] = mono();
        dt_all_reduce(world, a, b, round % 4 ? 100 : MANY / 4, DT_F32, DT_SUM);
        dt_work *work = dt_recv_start(world, b, 100, DT_F32, (me + n - 1) % n, 1);
        dt_send(world, a, 100, DT_F32, (me + 1) % n, 1);
        dt_wait(ctx, work);
        if (round % 3 == 0) dt_all_gather(world, a, b, 100, DT_F32);
        dt_barrier(world);
    }
    phase_is(p, me, TAIL);
    page_note(p, ctx, me);
    nap(1e-6 * (double)(soak_next(&dice) % 3000));
    free(a);
    return DT_OK;
}

#endif
