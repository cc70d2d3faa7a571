/* drills.h - a part of test_faults.c: planted faults (dt_run_desc.fault, DT_FAULT), stragglers, the
   table of ranks. */
#ifndef DRILLS_H
#define DRILLS_H

#include <sys/time.h>

enum { DRILL_RANKS = 3, DRILL_OPS = 20, DRILL_COUNT = 16 };

/* The results of a drill's operations: bits that differ from the expected ones, and NaNs. */
typedef struct drill {
    job run;
    int alike;        /* 1: all operations are of one kind; 0: kinds alternate */
    int *bits, *nans; /* (ranks) in shared memory, like share and op */
    /* share: rank whose data has a wrong bit, -1: none; op: number of the operation, from 1 */
    int *share, *op;
} drill;

static float drill_value(int rank, int op, int i) {
    return (float)(1 + rank) + (float)(op * DRILL_COUNT + i) / 1024;
}

static void drill_compare(drill *d, int me, int op, const float *got) {
    for (int i = 0; i < DRILL_RANKS * DRILL_COUNT; i++) {
        float want = drill_value(i / DRILL_COUNT, op, i % DRILL_COUNT);
        uint32_t a, b;
        memcpy(&a, &want, 4);
        memcpy(&b, &got[i], 4);
        d->bits[me] += __builtin_popcount(a ^ b);
        d->nans[me] += got[i] != got[i];
        if (a == b) continue;
        d->share[me] = i / DRILL_COUNT;
        d->op[me] = op + 1;
    }
}

/* A rank's operation `seq` is the seq-th all-gather; if kinds alternate, every second operation is
   a barrier. */
static dt_status drill_rank(dt_ctx *ctx, void *user) {
    drill *d = (drill *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    float a[DRILL_COUNT], b[DRILL_RANKS * DRILL_COUNT];
    d->share[me] = -1;
    for (int op = 0; op < DRILL_OPS && !dt_error(ctx); op++) {
        for (int i = 0; i < DRILL_COUNT; i++) a[i] = drill_value(me, op, i);
        memset(b, 0, sizeof b);
        if (!d->alike && op % 2)
            dt_barrier(world);
        else if (dt_all_gather(world, a, b, DRILL_COUNT, DT_F32) == DT_OK)
            drill_compare(d, me, op, b);
    }
    return page_note(d->run.p, ctx, me);
}

static int drill_numbers[4 * MOST];

static void drill_run(drill *d, page *p, dt_backend backend, const char *fault, int alike) {
    static int *shared;
    if (!shared)
        shared = (int *)mmap(
            NULL, sizeof drill_numbers, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(shared, 0, sizeof drill_numbers);
    memset(d, 0, sizeof *d);
    job_init(&d->run, p, backend, DRILL_RANKS, 0.5);
    d->bits = shared;
    d->nans = shared + MOST;
    d->share = shared + 2 * MOST;
    d->op = shared + 3 * MOST;
    d->alike = alike;
    d->run.desc.fault = fault;
    job_run(&d->run, drill_rank, NULL, NULL);
}

static const char *threads_or_procs(dt_backend backend) {
    return backend == DT_BACKEND_THREADS ? "threads" : "procs";
}

/* A fault that ends the job: every rank that noticed it has the report's text, which describes the
   fault. */
static void drill_ends(
    page *p, dt_backend backend, const char *fault, int alike, const char *word, double most) {
    drill d;
    drill_run(&d, p, backend, fault, alike);
    CHECK_MSG(p->status != DT_OK && has_word(p->report.text, "rank 1") &&
                  strstr(p->report.text, word) != NULL,
        "%s on %s: %s: %s", fault, threads_or_procs(backend), dt_status_name(p->status),
        p->report.text);
    CHECK_MSG(in_time(d.run.took, most), "%s on %s: ends after %.2f s", fault,
        threads_or_procs(backend), d.run.took);
    for (int r = 0; r < DRILL_RANKS; r += 2)
        CHECK_MSG(p->failed[r] > 0 &&
                      strcmp(without_prefix(p->text[r]), without_prefix(p->report.text)) == 0,
            "%s on %s: rank %d has '%s', the report '%s'", fault, threads_or_procs(backend), r,
            p->text[r], p->report.text);
}

static void drill_goes_on(drill *d, page *p, dt_backend backend, const char *fault) {
    drill_run(d, p, backend, fault, 1);
    CHECK_MSG(p->status == DT_OK, "%s on %s: %s", fault, threads_or_procs(backend), p->report.text);
}

static void drill_kinds(page *p, dt_backend backend) {
    drill d;
    const char *where = threads_or_procs(backend);
    int procs = backend == DT_BACKEND_PROCS, bits = 0, wrong = 0, nans = 0;
    drill_ends(p, backend, "kill:rank=1:seq=7", 1, procs ? "signal 9 (SIGKILL)" : "", 0.4);
    drill_ends(p, backend, "exit:rank=1:seq=7", 1, procs ? "exited" : "", 0.4);
    drill_ends(p, backend, "stop:rank=1:seq=7", 1, procs ? "stopped" : "rank 1 (thread", 1.2);
    drill_ends(p, backend, "spin:rank=1:seq=7", 1, "spinning or computing", 1.2);
    drill_ends(p, backend, "drop:rank=1:seq=7", 1, "ended without", 0.4);
    drill_ends(p, backend, "drop:rank=1:seq=7", 0, "barrier", 0.4);
    drill_ends(
        p, backend, "delay:rank=2:seq=3:s=0.05,kill:rank=1:seq=7", 1, procs ? "signal 9" : "", 0.5);
    drill_goes_on(&d, p, backend, NULL);
    for (int r = 0; r < DRILL_RANKS; r++) wrong += d.bits[r];
    CHECK_MSG(wrong == 0 && in_time(d.run.took, 0.2), "no fault on %s: %d bits are wrong, %.2f s",
        where, wrong, d.run.took);
    drill_goes_on(&d, p, backend, "delay:rank=1:seq=7:s=0.2");
    CHECK_MSG(d.run.took >= 0.2 && in_time(d.run.took, 0.5), "a delay of 0.2 s on %s takes %.2f s",
        where, d.run.took);
    drill_goes_on(&d, p, backend, "flip:rank=1:seq=7");
    for (int r = wrong = 0; r < DRILL_RANKS; r++) {
        bits += d.bits[r] == 1;
        wrong += d.bits[r] > 1 || (d.bits[r] && ((r != 1 && d.share[r] != 1) || d.op[r] != 7));
    }
    CHECK_MSG(bits > 0 && wrong == 0,
        "flip on %s: bits that differ: %d %d %d, of the shares of %d %d %d, in operation %d", where,
        d.bits[0], d.bits[1], d.bits[2], d.share[0], d.share[1], d.share[2], d.op[1]);
    drill_goes_on(&d, p, backend, "nan:rank=1:seq=7");
    for (int r = 0; r < DRILL_RANKS; r++) nans += d.nans[r];
    CHECK_MSG(nans > 0, "nan on %s: no result is NaN", where);
}

/* Operations 1 and 2 are the split, then come a sum of scalars, an agreement and a step. */
static dt_status drill_untouched_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    double sum = me;
    (void)user;
    dt_comm *pair = dt_comm_split(world, me == 2 ? -1 : 7, -me, "pair");
    int right = me == 2 ? !pair : pair && dt_comm_size(pair) == 2 && dt_comm_rank(pair) == 1 - me;
    right = right && dt_sum_doubles(world, &sum, 1) == DT_OK && sum == 3;
    right = right && dt_agree(world, DT_OK) == DT_OK && dt_comm_step(world) == DT_OK;
    return right ? DT_OK : DT_ERR_COMM;
}

/* Flips and NaNs change neither scalars nor dt's own data. */
static void drill_untouched(page *p, dt_backend backend) {
    for (int flips = 0; flips < 2; flips++) {
        const char *kind = flips ? "flip" : "nan";
        char faults[128] = "";
        job j;
        for (int seq = 1; seq <= 5; seq++)
            snprintf(faults + strlen(faults), sizeof faults - strlen(faults), "%s%s:rank=1:seq=%d",
                seq > 1 ? "," : "", kind, seq);
        job_init(&j, p, backend, DRILL_RANKS, 0.5);
        j.desc.fault = faults;
        job_run(&j, drill_untouched_rank, NULL, NULL);
        CHECK_MSG(p->status == DT_OK, "%s on %s: %s: %s", kind, threads_or_procs(backend),
            dt_status_name(p->status), p->report.text);
    }
}

/* An invalid fault is refused before any rank starts, and the text says what is wrong. */
static void drill_syntax(page *p) {
    static const struct {
        const char *fault, *word;
    } bad[] = { { "kil:rank=1:seq=7", "kil" }, { "kill:rank=3:seq=7", "3" },
        { "kill:rank=-1:seq=7", "-1" }, { "kill:rank=1", "seq" }, { "kill:seq=7", "rank" },
        { "kill:rank=x:seq=7", "x" }, { "kill:rank=1:seq=0", "0" }, { "kill:rank=1:seq=", "seq" },
        { "kill:rank=1:seq=7:s=1:t=2", "t" }, { "delay:rank=1:seq=7:s=-1", "-1" },
        { "kill:rank=1:seq=7,", "" }, { "kill:rank=1:seq=7;stop:rank=0:seq=1", "" },
        { "kill:rank=1:seq=99999999999999999999999", "" }, { ":", "" }, { "kill", "" },
        { "kill:rank=1:seq=7 ", "" } };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        drill d;
        drill_run(&d, p, i % 2 ? DT_BACKEND_PROCS : DT_BACKEND_THREADS, bad[i].fault, 1);
        CHECK_MSG(p->status == DT_ERR_ARG && strstr(p->report.text, bad[i].fault) &&
                      strstr(p->report.text, bad[i].word) && p->report.rank == -1,
            "fault '%s': %s: %s", bad[i].fault, dt_status_name(p->status), p->report.text);
    }
}

/* DT_FAULT is used only if the program permits it. */
static void drill_environment(page *p) {
    for (int heeded = 0; heeded < 2; heeded++) {
        for (int procs = 0; procs < 2; procs++) {
            drill d;
            static int shared_bits[4 * MOST]; /* only threads write it */
            memset(&d, 0, sizeof d);
            job_init(&d.run, p, procs ? DT_BACKEND_PROCS : DT_BACKEND_THREADS, DRILL_RANKS, 0.5);
            d.bits = shared_bits;
            d.nans = shared_bits + MOST;
            d.share = shared_bits + 2 * MOST;
            d.op = shared_bits + 3 * MOST;
            d.alike = 1;
            d.run.desc.read_fault_env = heeded;
            setenv("DT_FAULT", "kill:rank=1:seq=7", 1);
            job_run(&d.run, drill_rank, NULL, NULL);
            CHECK_MSG((p->status != DT_OK) == heeded, "DT_FAULT with faults %d: %s: %s", heeded,
                dt_status_name(p->status), p->report.text);
            setenv("DT_FAULT", "kil:rank=1", 1);
            job_init(&d.run, p, DT_BACKEND_THREADS, DRILL_RANKS, 0.5);
            d.run.desc.read_fault_env = heeded;
            job_run(&d.run, drill_rank, NULL, NULL);
            CHECK_MSG(p->status == (heeded ? DT_ERR_ARG : DT_OK),
                "a bad DT_FAULT with faults %d: %s", heeded, p->report.text);
            unsetenv("DT_FAULT");
        }
    }
}

static void drills(int full) {
    page *p = page_make();
    for (int i = 0; i < (full ? 5 : 1); i++) {
        drill_kinds(p, DT_BACKEND_THREADS);
        drill_kinds(p, DT_BACKEND_PROCS);
    }
    drill_untouched(p, DT_BACKEND_THREADS);
    drill_untouched(p, DT_BACKEND_PROCS);
    drill_syntax(p);
    drill_environment(p);
    munmap(p, sizeof *p);
}

/* ---- stragglers ---- */

typedef struct lag {
    page *p;
    int slow, steps;
    double step_s, cost;
} lag;

/* lag.slow: rank 1 is slow in 6 of 8 steps, as on a machine with other load, and no straggler. */
enum { NOISY_RANK = -2 };

static dt_status lag_rank(dt_ctx *ctx, void *user) {
    lag *l = (lag *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    float x = 1, y;
    for (int step = 0; step < l->steps; step++) {
        int slow = l->slow == NOISY_RANK ? me == 1 && step % 8 < 6 : me == l->slow;
        if (l->step_s > 0) nap(slow ? 2 * l->step_s : l->step_s);
        dt_all_reduce(world, &x, &y, 1, DT_F32, DT_SUM);
        if (me == 0) __atomic_store_n(&l->p->steps, step + 1, __ATOMIC_SEQ_CST);
        double begin = mono();
        dt_comm_step(world);
        if (me == 0 && (step == 0 || mono() - begin < l->cost)) l->cost = mono() - begin;
    }
    return dt_error(ctx);
}

static void lag_run(
    lag *l, page *p, dt_backend backend, int ranks, int slow, int steps, double step_s) {
    job j;
    job_init(&j, p, backend, ranks, 10);
    memset(l, 0, sizeof *l);
    l->p = p;
    l->slow = slow;
    l->steps = steps;
    l->step_s = step_s;
    dt_host host = page_host(p);
    j.desc.host = &host;
    CHECK_MSG(
        dt_run(j.desc, lag_rank, l) == DT_OK, "the job with a straggler fails: %s", p->report.text);
}

/* The slow rank, and no other, must be named. On a busy machine a rank that waits for a processor
   is a straggler, too, which can hide the slow rank or add another; such a run is repeated with
   steps that are longer than these waits. */
static int lag_named(page *p, dt_backend backend, int slow, int steps, int first, int last) {
    lag l;
    char who[48];
    int named = 0, others = 0;
    lag_run(&l, p, backend, 4, slow, steps, first ? 5e-3 : 5e-3 * fmin(slowdown(), 20));
    snprintf(who, sizeof who, "rank %d is a straggler", slow);
    for (int k = 0; k < p->lines && k < LOG_LINES; k++) {
        int it = slow >= 0 && strstr(p->line[k], who) && p->line_level[k] == DT_LOG_NOTICE;
        named += it;
        others += !it;
    }
    int good = others == 0 && (named > 0) == (slow >= 0);
    if (last && slow < 0)
        CHECK_MSG(good, "no rank is slow in every step, but: %s", p->line[0]);
    else if (good || last)
        CHECK_MSG(good, "rank %d lags for %d steps: it is named %d times, other ranks %d times: %s",
            slow, steps, named, others, p->lines > 0 ? p->line[0] : "");
    return good;
}

static void stragglers(int full) {
    page *p = page_make();
    lag l;
    for (int i = 0; i < (full ? 30 : 6); i++) {
        int slow = i % 3 == 2 ? i % 2 ? NOISY_RANK : -1 : i % 4;
        dt_backend backend = i % 2 ? DT_BACKEND_PROCS : DT_BACKEND_THREADS;
        for (int again = 0; again < 4; again++)
            if (lag_named(p, backend, slow, slow < 0 ? 60 : 10, again == 0, again == 3)) break;
    }
    lag_named(p, DT_BACKEND_THREADS, 1, 40, 1, 0);
    CHECK_MSG(p->lines <= 4, "a straggler is named %d times in 40 steps", p->lines);
    double begin = mono();
    lag_run(&l, p, DT_BACKEND_THREADS, 2, -1, 20000, 0);
    printf("dt_comm_step: %.2f us at least, %.2f us with an all-reduce, of 2 threads\n",
        1e6 * l.cost, 1e6 * (mono() - begin) / 20000);
    munmap(p, sizeof *p);
}

/* ---- the table of ranks ---- */

static int asked;
static void ask_now(int signal) {
    (void)signal;
    asked = 1;
}

static void *ask_soon(void *arg) {
    (void)arg;
    nap(0.25);
    __atomic_store_n(&asked, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

/* All other ranks wait for rank 2 for half a second. */
static dt_status asking_rank(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    dt_comm *world = dt_world(ctx);
    float x = 1, y;
    dt_barrier(world);
    if (dt_comm_rank(world) == 2) nap(0.5);
    dt_all_reduce(world, &x, &y, 1, DT_F32, DT_SUM);
    return page_note(j->p, ctx, dt_comm_rank(world));
}

/* Forked ranks do not inherit a timer, and there must be no other thread at the fork; so a rank, or
   a thread, sends the signal. */
static void ask_once(page *p, int procs) {
    job j;
    pthread_t thread;
    struct itimerval timer;
    memset(&timer, 0, sizeof timer);
    job_init(&j, p, procs ? DT_BACKEND_PROCS : DT_BACKEND_THREADS, 4, 5);
    asked = 0;
    j.desc.status_request = &asked;
    timer.it_value.tv_usec = 250000;
    if (procs)
        setitimer(ITIMER_REAL, &timer, NULL);
    else
        pthread_create(&thread, NULL, ask_soon, NULL);
    job_run(&j, asking_rank, NULL, NULL);
    if (!procs) pthread_join(thread, NULL);
    CHECK_MSG(p->status == DT_OK, "a job that prints its table fails: %s", p->report.text);
    for (int r = 0; r < 4; r++) {
        char who[16];
        int lines = 0, good = 0;
        snprintf(who, sizeof who, "rank %d:", r);
        for (int k = 0; k < p->lines && k < LOG_LINES; k++) {
            if (strncmp(p->line[k], who, strlen(who)) != 0) continue;
            const char *s = strstr(p->line[k], " s");
            lines++;
            good += s && has_word(p->line[k], "step") &&
                    (r == 2 ? has_word(p->line[k], "barrier") : has_word(p->line[k], "all-reduce"));
        }
        CHECK_MSG(good == 1 && lines == 1,
            "the table on %s: %d lines of rank %d, %d as expected; line 0 of %d: %s",
            procs ? "procs" : "threads", lines, r, good, p->lines, p->line[0]);
    }
}

static void asks(int full) {
    page *p = page_make();
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = ask_now;
    sigaction(SIGALRM, &action, NULL);
    for (int i = 0; i < (full ? 20 : 2); i++) ask_once(p, i % 2);
    signal(SIGALRM, SIG_DFL);
    munmap(p, sizeof *p);
}

#endif
