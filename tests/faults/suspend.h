/* suspend.h - a part of test_faults.c: jobs whose processes are all stopped, for up to three times
   the timeout, and then continue

   A job is a process group. The test waits until the job has made progress since the last stop,
   then for a random time, then stops all processes with one kill for a random time. In a third of
   the cases it continues the processes one after another. In between it stops only the supervisor,
   or one rank for less than the timeout. */
#ifndef SUSPEND_H
#define SUSPEND_H

static const double SUSPEND_TIMEOUT = 1;
enum { IN_THREADS, IN_PROCS, OVER_TCP, SUSPENDED_BACKENDS };
static const char *const suspended_names[] = { "threads", "procs", "tcp" };
static const dt_backend suspended_backends[] = { DT_BACKEND_THREADS, DT_BACKEND_PROCS,
    DT_BACKEND_TCP };

typedef struct suspended {
    int backend, train;     /* backend: index in suspended_names; train: 1 for train_gpt */
    int n;                  /* processes that this test started */
    pid_t pid[MOST], group; /* their ids; the first leads the group */
    page *p;
    int out;   /* output of train_gpt's rank 0 */
    int lines; /* lines of progress so far */
    char tail[512];
    const char *folder;
} suspended;

/* ---- jobs ---- */

/* Ranks often wait for a rank that computes. If they are stopped during such a wait, the stopped
   time must not count towards the timeout. */
static dt_status suspended_rank(dt_ctx *ctx, void *user) {
    enum { COUNT = 3000 };
    suspended *s = (suspended *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), n = dt_comm_size(world), go_on = 1;
    uint64_t seed = (uint64_t)me * 77 + 5;
    float a[COUNT], b[COUNT];
    for (int i = 0; i < COUNT; i++) a[i] = 1;
    __atomic_store_n(&s->p->pid[me], getpid(), __ATOMIC_SEQ_CST);
    for (int round = 0; go_on && !dt_error(ctx); round++) {
        double until = mono() + (round / 4 % n == me && round % 4 == 0
                                        ? 0.04
                                        : 1e-6 * (double)(soak_next(&seed) % 2000));
        while (mono() < until) {
        }
        dt_all_reduce(world, a, b, round % 4 ? 10 : (size_t)COUNT, DT_F32, DT_SUM);
        dt_work *work = dt_recv_start(world, b, (size_t)COUNT, DT_F32, (me + n - 1) % n, 1);
        dt_send(world, a, (size_t)COUNT, DT_F32, (me + 1) % n, 1);
        dt_wait(ctx, work);
        if (me == 0) go_on = !__atomic_load_n(&s->p->let_go, __ATOMIC_SEQ_CST);
        dt_broadcast(world, &go_on, 1, DT_I32, 0);
        if (me == 0) __atomic_add_fetch(&s->p->steps, 1, __ATOMIC_SEQ_CST);
    }
    return page_note(s->p, ctx, me);
}

/* Runs one process of a job: the complete job, or one rank. */
static void suspended_process(suspended *s, int rank, const char *place) {
    dt_host host = page_host(s->p);
    dt_report report;
    job j;
    page *p = s->p;
    memset(&j, 0, sizeof j);
    j.desc.ranks = 3;
    j.desc.backend = suspended_backends[s->backend];
    j.desc.timeout_s = SUSPEND_TIMEOUT;
    j.desc.host = &host;
    j.desc.rank = rank;
    j.desc.rendezvous = place;
    j.desc.report = &report;
    if (dt_run(j.desc, suspended_rank, s) == DT_OK) _exit(0);
    if (__atomic_fetch_add(&p->hit_phase, 1, __ATOMIC_SEQ_CST) == 0) p->report = report;
    _exit(1);
}

/* Runs train_gpt; over procs with restarts: a rank is killed, and the job resumes from its
   checkpoint. */
static void suspended_train(suspended *s, int rank, const char *place) {
    char path[512], timeout[16], number[8];
    const char *slash = strrchr(program, '/'), *args[48];
    int at = 0;
    static const char *const small[] = { "--layers", "1", "--width", "32", "--heads", "2", "--seq",
        "32", "--batch", "8", "--steps", "1000000", "--data", "README.md", "--ranks", "2", "--tp",
        "2" };
    snprintf(path, sizeof path, "%.*s/train_gpt", slash ? (int)(slash - program) : 1,
        slash ? program : ".");
    snprintf(timeout, sizeof timeout, "%g", SUSPEND_TIMEOUT);
    snprintf(number, sizeof number, "%d", rank);
    args[at++] = path;
    for (size_t i = 0; i < sizeof small / sizeof small[0]; i++) args[at++] = small[i];
    args[at++] = "--timeout", args[at++] = timeout;
    args[at++] = "--backend", args[at++] = suspended_names[s->backend];
    if (s->backend == OVER_TCP)
        args[at++] = "--rank", args[at++] = number, args[at++] = "--rendezvous", args[at++] = place;
    if (s->backend == IN_PROCS) {
        args[at++] = "--save", args[at++] = s->folder, args[at++] = "--save-every",
        args[at++] = "20";
        args[at++] = "--max-restarts", args[at++] = "1";
        setenv("DT_FAULT", "kill:rank=1:seq=3000", 1);
    }
    args[at] = NULL;
    execv(path, (char **)(void *)args);
    _exit(127);
}

static int suspended_begin(suspended *s) {
    char place[32] = "";
    int ends[2];
    dt__tcp_address any = { htonl(INADDR_LOOPBACK), 0 };
    int fd = dt__tcp_listen(any, 1);
    snprintf(place, sizeof place, "127.0.0.1:%u", dt__tcp_own_address(fd).port);
    close(fd);
    if (pipe(ends) != 0) return 0;
    s->n = s->backend != OVER_TCP ? 1 : s->train ? 2 : 3;
    fflush(NULL);
    for (int i = 0; i < s->n; i++) {
        s->pid[i] = fork();
        if (s->pid[i] == 0) {
            setpgid(0, i ? s->pid[0] : 0);
            if (s->train) dup2(ends[1], 1), dup2(ends[1], 2);
            close(ends[0]);
            close(ends[1]);
            if (s->train) suspended_train(s, i, place);
            suspended_process(s, i, place);
        }
        setpgid(s->pid[i], s->pid[0]);
    }
    close(ends[1]);
    s->group = s->pid[0];
    s->out = ends[0];
    fcntl(s->out, F_SETFL, O_NONBLOCK);
    return 1;
}

/* ---- suspending ---- */

/* Returns the job's progress. */
static int suspended_progress(suspended *s) {
    char text[4096];
    ssize_t got;
    if (!s->train) return __atomic_load_n(&s->p->steps, __ATOMIC_SEQ_CST);
    while ((got = read(s->out, text, sizeof text - 1)) > 0) {
        text[got] = 0;
        for (const char *at = text; (at = strstr(at, "| loss")) != NULL; at++) s->lines++;
        size_t keep = (size_t)got < sizeof s->tail ? (size_t)got : sizeof s->tail - 1;
        memcpy(s->tail, text + got - keep, keep);
        s->tail[keep] = 0;
    }
    return s->lines;
}

/* Sleeps, and reads what train_gpt prints meanwhile, because its write fails after a time if the
   pipe is full. */
static void suspended_nap(suspended *s, double seconds) {
    for (double begin = mono(); mono() - begin < seconds;) {
        double left = seconds - (mono() - begin);
        nap(left < 0.01 ? left : 0.01);
        suspended_progress(s);
    }
}

/* 1 if a process of the job has ended. */
static int suspended_over(suspended *s) {
    for (int i = 0; i < s->n; i++)
        if (s->pid[i] > 0 && waitpid(s->pid[i], NULL, WNOHANG) == s->pid[i])
            return s->pid[i] = 0, 1;
    return 0;
}

/* Waits until the job has advanced by `steps`. Returns 0 if it has ended or does not advance. */
static int suspended_moves(suspended *s, int steps) {
    int from = suspended_progress(s);
    for (double begin = mono(); in_time(mono() - begin, 60); nap(1e-3)) {
        if (suspended_progress(s) >= from + steps) return 1;
        if (suspended_over(s)) break;
    }
    return 0;
}

static void suspend_once(suspended *s, uint64_t r, int one_by_one) {
    double span = SUSPEND_TIMEOUT * (0.5 + 2.5 * (double)(r >> 8 & 1023) / 1023);
    kill(-s->group, SIGSTOP);
    suspended_nap(s, span);
    for (int i = s->train ? 1 : MOST - 1; i >= 0 && one_by_one; i--) {
        pid_t pid = s->train ? s->pid[i] : s->p->pid[i];
        if (pid > 0) kill(pid, SIGCONT);
        if (pid > 0) suspended_nap(s, 0.1 * SUSPEND_TIMEOUT);
    }
    kill(-s->group, SIGCONT);
}

/* Stops only the supervisor, or only one rank for less than the timeout. */
static void suspend_one(suspended *s, uint64_t r) {
    pid_t pid = r % 2 && s->backend == IN_PROCS ? s->group
                : s->train                      ? s->pid[0]
                                                : s->p->pid[r / 2 % 3];
    double span = pid == s->group && s->backend == IN_PROCS ? 3
                  : s->backend == IN_THREADS                ? 3
                                                            : 0.3;
    kill(pid, SIGSTOP);
    suspended_nap(s, span * SUSPEND_TIMEOUT * (double)(r >> 8 & 1023) / 1023);
    kill(pid, SIGCONT);
}

static void suspended_end(suspended *s, const char *what) {
    int good = 1, status = 0;
    if (s->train) kill(-s->group, SIGKILL);
    __atomic_store_n(&s->p->let_go, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < s->n; i++)
        if (s->pid[i] > 0 && waitpid(s->pid[i], &status, 0) == s->pid[i])
            good = good && status == 0;
    CHECK_MSG(s->train || (good && s->p->lines == 0), "%s: the job ends with: %s", what,
        s->p->report.text);
    close(s->out);
    children_gone();
}

/* Runs job number `at`. */
static int suspends_wanted;
static void one_suspended(int at) {
    suspended s;
    char what[64], folder[64];
    memset(&s, 0, sizeof s);
    s.p = page_make();
    s.backend = at % SUSPENDED_BACKENDS;
    s.train = at >= SUSPENDED_BACKENDS;
    snprintf(folder, sizeof folder, "/tmp/dt_suspend_%d_%d", (int)getpid(), at);
    s.folder = folder;
    snprintf(what, sizeof what, "suspends of %s, %s", s.train ? "train_gpt" : "operations",
        suspended_names[s.backend]);
    if (!CHECK_MSG(suspended_begin(&s), "%s: the job does not start", what)) return;
    int done = 0, good = 1;
    for (int i = 0; done < suspends_wanted && good; i++) {
        uint64_t r = dice((uint64_t)(1000 * at + i) + 9000);
        /* the first stop may be during the rendezvous */
        suspended_nap(&s, 0.2 * (double)(r >> 20 & 1023) / 1023);
        if (i % 5 == 4)
            suspend_one(&s, r >> 32);
        else
            suspend_once(&s, r >> 32, i % 3 == 0);
        done += i % 5 != 4;
        good = suspended_moves(&s, 3);
    }
    CHECK_MSG(good, "%s: after %d stops the job has ended or makes no progress: %s%s", what, done,
        s.p->report.text, s.tail);
    __atomic_fetch_add(&sums->hits[1 + s.backend], done, __ATOMIC_SEQ_CST);
    suspended_end(&s, what);
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (s.train && s.backend == IN_PROCS && system(command) != 0) check_skip("rm does not run");
    munmap(s.p, sizeof *s.p);
}

static void suspends(int full) {
    char path[512];
    const char *slash = strrchr(program, '/');
    snprintf(path, sizeof path, "%.*s/train_gpt", slash ? (int)(slash - program) : 1,
        slash ? program : ".");
    int built = access(path, X_OK) == 0;
    if (!built) check_skip("suspends of train_gpt: it is not built beside this program");
    suspends_wanted = full ? 100 : 2;
    in_parallel(
        full ? 3 : 6, built ? 2 * SUSPENDED_BACKENDS : (int)SUSPENDED_BACKENDS, one_suspended);
    printf("suspended jobs: %d of threads, %d of procs, %d over tcp\n", sums->hits[1],
        sums->hits[2], sums->hits[3]);
}

#endif
