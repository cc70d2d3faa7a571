/* stage.h - what the campaigns of test_faults.c share: a page that all processes see, who dies
   when, what a job may not leave behind, workers beside each other, how late things were.

   Included by test_faults.c after dt_comm.h with its implementation, whose fork is staged_fork. */
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

/* One job: written by its ranks, by who kills them and by the supervisor, who may not share
   anything else. */
typedef struct page {
    pid_t pid[MOST];
    int phase[MOST];      /* of a rank, now */
    double entered[MOST]; /* its last call of an operation */
    double failed[MOST];  /* when its context had failed; 0: it has not */
    char text[MOST][512];
    int lines;
    char line[LOG_LINES][512]; /* what was logged, but details */
    int line_level[LOG_LINES];
    double line_at[LOG_LINES];
    double hit; /* when the last fault was done, the first of two */
    double first_hit;
    int hit_phase; /* of the victim then; 0: it was gone */
    int let_go;    /* threads that spin may end */
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

/* The line of the first failure; -1: none. */
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

/* dt_run forks here: a rank is on the page before its first instruction in the library. */
static page *staged;
static int staged_forks;
static pid_t staged_fork_done(pid_t pid, int rank) {
    if (pid == 0 && staged && rank < MOST) {
        phase_is(staged, rank, BORN);
        __atomic_store_n(&staged->pid[rank], getpid(), __ATOMIC_SEQ_CST);
    }
    return pid;
}

/* ---- what a job leaves ---- */

/* Lines of this process's maps that are shared; open descriptors. */
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

/* Files of a folder that could be the library's. In a room of one's own, those are all. */
static int own_room;
static int files_in(const char *path) {
    int n = 0;
    DIR *d = opendir(path);
    struct dirent *e;
    while (d && (e = readdir(d)))
        n += e->d_name[0] != '.' &&
             ((own_room && path[1] == 'd') || strncmp(e->d_name, "dt", 2) == 0);
    if (d) closedir(d);
    return n;
}

/* Sockets that listen: of the whole machine, so it is counted only in a room of one's own. */
static int listeners(void) {
    char line[512];
    int n = 0;
    FILE *f = own_room ? fopen("/proc/self/net/tcp", "r") : NULL;
    while (f && fgets(line, sizeof line, f)) n += strstr(line, " 0A ") != NULL;
    if (f) fclose(f);
    return n;
}

/* A network of one's own begins with a loopback that is down. */
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

/* As root: a /dev/shm and a network of our own, in which all that is there was left there. Orphans
   come to us. */
static void room_make(void) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    own_room = unshare(CLONE_NEWNS | CLONE_NEWNET) == 0 &&
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
    CHECK_MSG(child == -1 && errno == ECHILD, "%s: a process is left (waitpid returns %d)", what,
        (int)child);
    CHECK_MSG(now.maps == before->maps && now.descriptors == before->descriptors &&
                  now.shm == before->shm && now.tmp <= before->tmp &&
                  now.listeners == before->listeners,
        "%s: left are %d shared mappings, %d descriptors, %d files in /dev/shm, %d in /tmp, %d "
        "listening sockets",
        what, now.maps - before->maps, now.descriptors - before->descriptors, now.shm - before->shm,
        now.tmp - before->tmp, now.listeners - before->listeners);
}

/* All children gone within that time, orphans included; returns how long it took. */
static double children_gone(double limit) {
    double begin = mono();
    while (mono() - begin < limit) {
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid < 0 && errno == ECHILD) break;
        if (pid == 0) nap(2e-4);
    }
    return mono() - begin;
}

/* ---- figures, workers ---- */

/* Of all workers together. */
typedef struct figures {
    int passed, failed, at, hits[PHASES + 1];
    lateness abort_word, survivors, named, ends, other;
} figures;
static figures *sums;

static void figure_add(lateness *l, double s) {
    int at = __atomic_fetch_add(&l->n, 1, __ATOMIC_SEQ_CST);
    if (at < 4096) l->s[at] = s;
}

/* fn(0), fn(1), ... fn(n - 1), some beside each other, each in a process of a worker. */
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

/* ---- a job, and who does it harm ---- */

enum { H_NONE, H_KILL, H_STOP };
typedef struct harm {
    int victim, what, phase; /* phase 0: any */
    double after, gap;       /* the second: that much after the first */
} harm;

typedef struct job {
    dt_run_desc desc;
    page *p;
    int rounds, spinner; /* a rank that spins, from a round on; -1: none */
    int waiter;          /* a rank that the others let wait some ms in each round; -1 */
    double start_s;      /* before a rank's first operation */
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

/* In a process of its own, which the ranks are no children of: waits for the moment, then does
   it. */
static void harm_do(page *p, const harm *h, double begun) {
    while (!__atomic_load_n(&p->pid[h->victim], __ATOMIC_SEQ_CST) && mono() < begun + 5) {
    }
    while (mono() < begun + h->after) nap(1e-4);
    while (h->phase && mono() < begun + 5) {
        int phase = phase_of(p, h->victim);
        if (phase == h->phase || h->phase == STARTED) break; /* it will not start again */
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

/* Operations of a few us to some 5 ms, computing between them. */
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
