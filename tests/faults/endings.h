/* endings.h - a part of test_faults.c: ranks that never return, ranks that end their thread, and
   ranks whose exit status is lost. */
#ifndef ENDINGS_H
#define ENDINGS_H

/* ---- threads that outlive dt_run ---- */

/* A run in which some ranks do not return until they are released, which is after dt_run has
   returned. */
typedef struct stray {
    job run;
    dt_host host;
    int away; /* bit mask of these ranks */
    int let_go;
    long live;             /* blocks */
    dt_status after[MOST]; /* what an operation of these ranks returned after the release */
} stray;

static void *stray_alloc(void *user, size_t bytes, dt_mem mem) {
    void *p = dt_host_default()->alloc(NULL, bytes, mem);
    if (p) __atomic_add_fetch(&((stray *)user)->live, 1, __ATOMIC_SEQ_CST);
    return p;
}

static void stray_free(void *user, void *p, size_t bytes, dt_mem mem) {
    if (p) memset(p, 0xdd, bytes);
    dt_host_default()->free(NULL, p, bytes, mem);
    if (p) __atomic_sub_fetch(&((stray *)user)->live, 1, __ATOMIC_SEQ_CST);
}

static void stray_log(void *user, int level, int rank, const char *text) {
    page_log(((stray *)user)->run.p, level, rank, text);
}

/* Overwrites the host table after dt_run, because a thread that was left behind must not use the
   caller's table any more. */
static dt_status stray_run(stray *s, dt_status (*fn)(dt_ctx *ctx, void *user)) {
    dt_host host = *dt_host_default();
    host.user = s;
    host.alloc = stray_alloc;
    host.free = stray_free;
    host.log = stray_log;
    s->run.desc.host = &host;
    dt_status status = dt_run(s->run.desc, fn, s);
    memset(&host, 0xdd, sizeof host);
    return status;
}

static dt_status stray_rank(dt_ctx *ctx, void *user) {
    stray *s = (stray *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    float x[500], y[500];
    memset(x, 0, sizeof x);
    dt_barrier(world);
    while ((s->away >> me & 1) && !__atomic_load_n(&s->let_go, __ATOMIC_SEQ_CST)) nap(1e-3);
    dt_work *work = dt_all_reduce_start(world, x, y, 500, DT_F32, DT_SUM);
    dt_wait(ctx, work);
    __atomic_store_n(&s->after[me], dt_error(ctx), __ATOMIC_SEQ_CST);
    page_note(s->run.p, ctx, me);
    return dt_error(ctx);
}

static void one_stray(int away, int n) {
    static stray s;
    page *p = page_make();
    left before = left_now();
    int notices = 0;
    memset(&s, 0, sizeof s);
    job_init(&s.run, p, DT_BACKEND_THREADS, 4, 0.5);
    s.away = away;
    double begin = mono();
    dt_status status = stray_run(&s, stray_rank);
    double took = mono() - begin;
    CHECK_MSG(status == DT_ERR_TIMEOUT && strstr(p->report.text, "did not; rank"),
        "away %x: %s: %s", away, dt_status_name(status), p->report.text);
    CHECK_MSG(p->report.left_behind == n, "away %x: %d ranks are left behind", away,
        p->report.left_behind);
    CHECK_MSG(took >= 1 && in_time(took, 30), "away %x: dt_run returns after %.1f s", away, took);
    for (int k = 0; k < p->lines && k < LOG_LINES; k++)
        notices += strstr(p->line[k], "is left behind: its thread") != NULL;
    CHECK_MSG(notices == n, "away %x: %d of %d lines of the log say so", away, notices, p->lines);
    CHECK_MSG(s.live > 0, "away %x: all memory was freed while threads still run", away);
    __atomic_store_n(&s.let_go, 1, __ATOMIC_SEQ_CST);
    for (begin = mono();
         __atomic_load_n(&s.live, __ATOMIC_SEQ_CST) > 0 && in_time(mono() - begin, 20);)
        nap(1e-3);
    CHECK_MSG(s.live == 0, "away %x: %ld blocks were not freed after the last thread has ended",
        away, s.live);
    for (int r = 0; r < 4; r++)
        if (away >> r & 1)
            CHECK_MSG(s.after[r] == DT_ERR_PEER, "away %x: rank %d went on with %s", away, r,
                dt_status_name(s.after[r]));
    nap(0.05); /* the last block was freed just before the thread ended */
    left_check(&before, "ranks that were left behind");
    munmap(p, sizeof *p);
}

/* ---- a rank that ends its thread ---- */

/* Sanitizers do not support a thread that ends inside its functions: ASan keeps their frames
   poisoned, and TSan misses the thread's later actions. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

enum { BY_EXIT, BY_CANCEL, BY_CANCEL_IN_WAIT, BY_EXIT_OF_PROCESS };
typedef struct quitter {
    stray s;
    int how, cancelled;
    pthread_t thread;
} quitter;

static dt_status quitting_rank(dt_ctx *ctx, void *user) {
    quitter *q = (quitter *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    float x = 1, y;
    if (me == 1) q->thread = pthread_self();
    /* no rank sends this message */
    dt_work *work = dt_recv_start(world, &y, 1, DT_F32, (me + 1) % 3, 1);
    for (int round = 0; round < 100000 && !dt_error(ctx); round++) {
        dt_all_reduce(world, &x, &y, 1, DT_F32, DT_SUM);
        if (round != 3) continue;
        if (me == 1 && q->how == BY_EXIT) pthread_exit(NULL);
        if (me == 1 && q->how == BY_EXIT_OF_PROCESS) exit(0);
        if (me == 1 && q->how == BY_CANCEL) {
            pthread_cancel(pthread_self());
            nap(1);
        }
        if (me == 2 && q->how == BY_CANCEL_IN_WAIT) {
            /* waits until rank 1 is in the next all-reduce */
            const uint64_t *waiting = &world->world->shared->state[1].waiting_op;
            for (double until = mono() + 10;
                 !__atomic_load_n(waiting, __ATOMIC_SEQ_CST) && mono() < until;)
                nap(1e-3);
            pthread_cancel(q->thread);
            nap(0.1); /* by then the rank sleeps in its wait */
        }
    }
    dt_wait(ctx, work);
    return page_note(q->s.run.p, ctx, me);
}

static void one_quitter(dt_backend backend, int how) {
    static const char *const hows[] = { "pthread_exit", "pthread_cancel",
        "pthread_cancel in a wait", "exit" };
    static quitter q;
    page *p = page_make();
    left before = left_now();
    char what[64];
    snprintf(what, sizeof what, "%s on %s", hows[how],
        backend == DT_BACKEND_THREADS ? "threads" : "procs");
    memset(&q, 0, sizeof q);
    job_init(&q.s.run, p, backend, 3, 20);
    q.how = how;
    double begin = mono();
    stray_run(&q.s, quitting_rank);
    CHECK_MSG(p->report.status != DT_OK && p->report.rank == 1 &&
                  strstr(p->report.text, "rank 1") &&
                  strstr(p->report.text,
                      how == BY_EXIT_OF_PROCESS ? "exited with status 0" : "pthread_exit"),
        "%s: %s: %s", what, dt_status_name(p->report.status), p->report.text);
    CHECK_MSG(in_time(mono() - begin, 15), "%s: the job ends after %.1f s", what, mono() - begin);
    for (int r = 0; r < 3; r += 2)
        CHECK_MSG(strcmp(without_prefix(p->text[r]), without_prefix(p->report.text)) == 0,
            "%s: rank %d has '%s'", what, r, p->text[r]);
    CHECK_MSG(backend == DT_BACKEND_PROCS || q.s.live == 0, "%s: %ld blocks were not freed", what,
        q.s.live);
    left_check(&before, what);
    munmap(p, sizeof *p);
}

/* Over tcp the rank function runs in the caller's thread. When the thread ends, the other ranks
   must learn of it. */
static void quitter_tcp(void) {
    static quitter q;
    page *p = page_make();
    char place[32];
    dt__tcp_address any = { htonl(INADDR_LOOPBACK), 0 };
    int fd = dt__tcp_listen(any, 1);
    memset(&q, 0, sizeof q);
    job_init(&q.s.run, p, DT_BACKEND_TCP, 3, 20);
    snprintf(place, sizeof place, "127.0.0.1:%u", dt__tcp_own_address(fd).port);
    close(fd);
    q.s.run.desc.rendezvous = place;
    fflush(NULL);
    for (int r = 0; r < 3; r++) {
        if (fork()) continue;
        dt_report report;
        q.s.run.desc.rank = r;
        q.s.run.desc.report = r ? &report : &p->report;
        stray_run(&q.s, quitting_rank);
        _exit(0);
    }
    double took = children_gone();
    CHECK_MSG(in_time(took, 15) && p->report.rank == 1 && strstr(p->report.text, "rank 1") &&
                  strstr(p->report.text, "pthread_exit"),
        "pthread_exit over tcp, after %.1f s: %s", took, p->report.text);
    munmap(p, sizeof *p);
}

/* ---- SIGCHLD ---- */

enum { IGNORED, NO_WAIT, REAPED, DISPOSITIONS };
enum { WELL, IN_OPERATION, AT_END, STATUS_7, LOSSES };

typedef struct loss {
    page *p;
    dt__shared *shared;
    pid_t parent;
    int how;
} loss;
static loss losing;

static dt_status losing_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    float x = 1, y;
    (void)user;
    losing.shared = world->world->shared;
    for (int round = 0; round < 20 && !dt_error(ctx); round++) {
        dt_all_reduce(world, &x, &y, 1, DT_F32, DT_SUM);
        if (round != 10 || dt_comm_rank(world) != 1) continue;
        if (losing.how == IN_OPERATION) kill(getpid(), SIGKILL);
        if (losing.how == STATUS_7) _exit(7);
    }
    return page_note(losing.p, ctx, dt_comm_rank(world));
}

/* Kills rank 1 after its `ended` flag is set, and before its process exits. */
static void losing_free(void *user, void *p, size_t bytes, dt_mem mem) {
    (void)user;
    if (losing.how == AT_END && getpid() != losing.parent && losing.shared &&
        losing.shared->state[1].ended && losing.shared->state[1].pid == (int)getpid())
        kill(getpid(), SIGKILL);
    dt_host_default()->free(NULL, p, bytes, mem);
}

static void reap_all(int signal) {
    int kept = errno;
    (void)signal;
    while (waitpid(-1, NULL, WNOHANG) > 0) {
    }
    errno = kept;
}

static void disposition_set(int which) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = which == IGNORED ? SIG_IGN : which == REAPED ? reap_all : SIG_DFL;
    action.sa_flags = which == NO_WAIT ? SA_NOCLDWAIT : SA_RESTART;
    sigaction(SIGCHLD, &action, NULL);
}

static void one_loss(page *p, int which, int how) {
    static const char *const names[] = { "SIGCHLD ignored", "SA_NOCLDWAIT",
        "a handler that reaps" };
    job j;
    job_init(&j, p, DT_BACKEND_PROCS, 3, 5);
    losing.p = p;
    losing.how = how;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) { /* in a child, because signal dispositions are per process */
        dt_host host = page_host(p);
        losing.parent = getpid();
        host.free = losing_free;
        j.desc.host = &host;
        disposition_set(which);
        p->status = dt_run(j.desc, losing_rank, NULL);
        p->steps = 1;
        _exit(0);
    }
    waitpid(pid, NULL, 0);
    int right = how == WELL ? p->status == DT_OK && p->lines == 0
                            : p->status == DT_ERR_PEER && p->report.rank == 1 &&
                                  strstr(p->report.text, "rank 1 (process ") != NULL;
    /* otherwise a race decides the text */
    if (how != WELL && which != REAPED) right = right && strstr(p->report.text, "ignores SIGCHLD");
    CHECK_MSG(p->steps && right, "%s, %d: %s: %s", names[which], how, dt_status_name(p->status),
        p->report.text);
}

/* ---- a process that cannot be killed ---- */

/* A frozen process (control groups v1) dies only when it is thawed. */
static char freezer[128];
static int freezer_put(const char *file, const char *text) {
    char path[192];
    snprintf(path, sizeof path, "%s/%s", freezer, file);
    int fd = open(path, O_WRONLY),
        ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0) close(fd);
    return ok;
}

static dt_status freezing_rank(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    dt_comm *world = dt_world(ctx);
    float x = 1, y;
    dt_barrier(world);
    if (dt_comm_rank(world) == 1)
        j->p->steps = freezer_put("tasks", "0") && freezer_put("freezer.state", "FROZEN");
    dt_all_reduce(world, &x, &y, 1, DT_F32, DT_SUM);
    return page_note(j->p, ctx, dt_comm_rank(world));
}

static void one_frozen(void) {
    page *p = page_make();
    job j;
    snprintf(freezer, sizeof freezer, "/sys/fs/cgroup/freezer/dt_test_%d", (int)getpid());
    job_init(&j, p, DT_BACKEND_PROCS, 3, 0.3);
    if (mkdir(freezer, 0755) != 0) {
        check_skip(
            "a process that cannot be killed: there is no freezer of control groups v1 that this "
            "test may use");
        munmap(p, sizeof *p);
        return;
    }
    job_run(&j, freezing_rank, NULL, NULL);
    CHECK_MSG(p->status == DT_ERR_TIMEOUT && p->report.left_behind == 1 &&
                  strstr(p->report.text, "rank 1 (process "),
        "a frozen rank: %d left behind: %s: %s", p->report.left_behind, dt_status_name(p->status),
        p->report.text);
    freezer_put("freezer.state", "THAWED");
    CHECK_MSG(in_time(children_gone(), 10), "a frozen rank: it remains after it was thawed");
    for (int tries = 0; tries < 100 && rmdir(freezer) != 0; tries++) nap(0.01);
    munmap(p, sizeof *p);
}

static void endings(int full) {
    if (SANITIZED)
        check_skip("endings: a sanitizer does not follow a thread that ends in the middle of its "
                   "functions");
    for (int i = 0; i < (full ? 5 : 1); i++) {
        one_stray(2, 1);
        one_stray(9, 2);
        one_frozen();
        for (int how = BY_EXIT; how <= BY_CANCEL_IN_WAIT && !SANITIZED; how++)
            one_quitter(DT_BACKEND_THREADS, how);
        if (!SANITIZED) one_quitter(DT_BACKEND_PROCS, BY_EXIT);
        one_quitter(DT_BACKEND_PROCS, BY_EXIT_OF_PROCESS);
        if (!SANITIZED) quitter_tcp();
        page *p = page_make();
        for (int which = 0; which < DISPOSITIONS; which++)
            for (int how = 0; how < LOSSES; how++) one_loss(p, which, how);
        munmap(p, sizeof *p);
    }
}

#endif
