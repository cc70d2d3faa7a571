/* test_faults.c - dt_comm.h: ranks that die, stop, spin, wait in a cycle, or lag; and the leftovers
   of the job.

       test_faults               a sample of each campaign
       test_faults full          all campaigns: make faults
       test_faults PART [full]   one part: kills stops doubles supervisor ctrlc oom straggler drills
                                 ask deadlocks soak endings suspends

   Each job's ranks, their killer and their supervisor record events on a shared page, with times of
   one clock. As root the program first makes a private /dev/shm and network namespace, so that
   everything found there afterwards is a leftover. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#include <sys/types.h>
#include <unistd.h>

static pid_t staged_fork(void);
#define fork staged_fork
#define DT_IMPLEMENTATION
#include "dt_comm.h"
#undef fork

#include "tests/comm/mismatch_cases.h"
#include "tests/comm/soak.h"
#include "tests/faults/stage.h"

static pid_t staged_fork(void) {
    int rank = staged_forks++;
    return staged_fork_done(fork(), rank);
}

#include "tests/faults/deadlocks.h"
#include "tests/faults/drills.h"
#include "tests/faults/endings.h"

/* ---- kill -9 ---- */

static int names_victim(const char *text, int rank, pid_t pid, const char *why) {
    char who[64];
    snprintf(who, sizeof who, "rank %d (process %d)", rank, (int)pid);
    return strstr(text, who) != NULL && strstr(text, why) != NULL;
}

/* The first time at which a process knew of the death: the supervisor logged it, or a survivor's
   context failed. *last: the last such time. */
static double known_at(const page *p, int victim, double *last) {
    int line = error_line(p);
    double first = line >= 0 ? p->line_at[line] : 1e300;
    *last = 0;
    for (int r = 0; r < MOST; r++) {
        if (r == victim || p->failed[r] == 0) continue;
        if (p->failed[r] < first) first = p->failed[r];
        if (p->failed[r] > *last) *last = p->failed[r];
    }
    return first;
}

static void one_kill(int at) {
    static const int wanted[] = { STARTED, COMPUTING, IN_COLLECTIVE, TAIL };
    page *p = page_make();
    job j;
    harm h;
    left before = left_now();
    char what[64];
    uint64_t r = dice((uint64_t)at + 1);
    double last;
    memset(&h, 0, sizeof h);
    job_init(&j, p, DT_BACKEND_PROCS, MOST, 10);
    h.victim = (int)(r % MOST);
    h.what = H_KILL;
    h.phase = at % 5 < 4 ? wanted[at % 5] : 0;
    h.after = h.phase == STARTED || h.phase == TAIL ? 0 : 1e-3 * (double)(r >> 8 & 63);
    if (h.phase == TAIL) j.rounds = 3;
    if (h.phase == STARTED) j.start_s = 2e-3;
    job_run(&j, loop_rank, &h, NULL);
    snprintf(
        what, sizeof what, "kill %d of rank %d, phase %s", at, h.victim, phase_names[p->hit_phase]);
    /* the victim ended before the kill */
    int missed = p->status == DT_OK && (p->hit_phase == TAIL || p->hit_phase == 0);
    if (!missed) {
        pid_t pid = p->pid[h.victim];
        CHECK_MSG(p->status == DT_ERR_PEER &&
                      names_victim(p->report.text, h.victim, pid, "signal 9 (SIGKILL)"),
            "%s: %s: %s", what, dt_status_name(p->status), p->report.text);
        for (int rank = 0; rank < MOST; rank++)
            if (rank != h.victim && (p->failed[rank] > 0 || p->hit_phase != TAIL))
                CHECK_MSG(names_victim(p->text[rank], h.victim, pid, "signal 9"),
                    "%s: rank %d has '%s'", what, rank, p->text[rank]);
        figure_add(&sums->abort_word, known_at(p, h.victim, &last) - p->hit);
        if (last > 0) figure_add(&sums->survivors, last - p->hit);
        __atomic_fetch_add(&sums->hits[p->hit_phase], 1, __ATOMIC_SEQ_CST);
    }
    munmap(p, sizeof *p);
    before.maps--; /* the shared page was mapped already */
    left_check(&before, what);
}

static void kills(int full) {
    int n = full ? 250 : 48;
    in_parallel(1, n, one_kill);
    int *hits = sums->hits, done = sums->abort_word.n, least = full ? 20 : 4;
    printf("kills: %d: %d at the start, %d in computation, %d in an operation, %d at the end\n",
        done, hits[BORN] + hits[STARTED], hits[COMPUTING], hits[IN_COLLECTIVE], hits[TAIL]);
    CHECK_MSG(done >= (full ? 200 : 40) && hits[BORN] + hits[STARTED] >= least &&
                  hits[COMPUTING] >= least && hits[IN_COLLECTIVE] >= least && hits[TAIL] >= least,
        "too few kills in a phase, of %d kills", done);
    lateness_print(&sums->abort_word, "kills: known to the first process");
    lateness_print(&sums->survivors, "kills: known to the last survivor");
    CHECK_MSG(in_time(lateness_at(&sums->abort_word, 0.99), 0.1),
        "99th percentile: a kill is known after %.0f ms",
        1e3 * lateness_at(&sums->abort_word, 0.99));
    CHECK_MSG(in_time(lateness_at(&sums->abort_word, 1), 0.5), "a kill is known after %.0f ms",
        1e3 * lateness_at(&sums->abort_word, 1));
    CHECK_MSG(in_time(lateness_at(&sums->survivors, 1), 1),
        "the last survivor knows of a kill after %.0f ms", 1e3 * lateness_at(&sums->survivors, 1));
}

/* ---- stopped, spinning ---- */

enum { STOPPING = 0, SPINNING, GOING_ON };
static const double STOP_TIMEOUT = 0.5;

/* A stopped rank that continues before the timeout is not a failure. */
static dt_status stopped_awhile_rank(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    page *p = j->p;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    float x = 1, y;
    double until = mono() + 0.5, now = 0;
    do {
        now = mono();
        phase_is(p, me, IN_COLLECTIVE);
        dt_broadcast(world, &until, 1, DT_F64, 0);
        dt_broadcast(world, &now, 1, DT_F64, 0);
        dt_all_reduce(world, &x, &y, 1, DT_F32, DT_SUM);
    } while (now < until && !dt_error(ctx));
    return page_note(p, ctx, me);
}

static void stop_and_continue(page *p, const char *what) {
    job j;
    pid_t killer;
    job_init(&j, p, DT_BACKEND_PROCS, 3, 4 * STOP_TIMEOUT);
    fflush(NULL);
    killer = fork();
    if (killer == 0) {
        while (phase_of(p, 1) != IN_COLLECTIVE) nap(1e-4);
        nap(0.05);
        kill(p->pid[1], SIGSTOP);
        nap(0.3);
        kill(p->pid[1], SIGCONT);
        _exit(0);
    }
    job_run(&j, stopped_awhile_rank, NULL, NULL);
    waitpid(killer, NULL, 0);
    CHECK_MSG(p->status == DT_OK && p->lines == 0, "%s: stopped for 0.3 s: %s%s", what,
        p->report.text, p->lines > 0 ? p->line[0] : "");
}

/* Every rank but the victim names it. On a busy machine another rank may be late, too. */
static int stop_is_named(const page *p, int victim, const char *why) {
    int named = p->status == DT_ERR_TIMEOUT;
    for (int rank = 0; rank < 4; rank++)
        named &= rank == victim || names_victim(p->text[rank], victim, p->pid[victim], why);
    return named;
}

static void one_stop(int at) {
    page *p = page_make();
    job j;
    harm h;
    left before = left_now();
    char what[64];
    int kind = at % 5 == 3 ? SPINNING : at % 5 == 4 ? GOING_ON : STOPPING;
    uint64_t r = dice((uint64_t)at + 1000);
    double last;
    memset(&h, 0, sizeof h);
    h.victim = (int)(r % 4);
    h.what = H_STOP;
    h.after = 0.02 + 1e-3 * (double)(r >> 8 & 31);
    h.phase = r >> 16 & 1 ? COMPUTING : 0;
    if (at % 5 == 0) { /* before its first operation */
        h.after = 0;
        h.phase = STARTED;
    }
    snprintf(
        what, sizeof what, "%s %d of rank %d", kind == SPINNING ? "spin" : "stop", at, h.victim);
    if (kind == GOING_ON) {
        stop_and_continue(p, what);
    } else {
        const char *why = kind == SPINNING ? "spinning or computing" : "stopped";
        double timeout = STOP_TIMEOUT;
        if (at % 5 == 1) h.phase = IN_COLLECTIVE;
        for (;; timeout *= 4) {
            job_init(&j, p, DT_BACKEND_PROCS, 4, timeout);
            if (kind == SPINNING) j.spinner = h.victim;
            if (h.phase == STARTED) j.start_s = 2e-3;
            if (at % 5 == 1) j.waiter = h.victim; /* while it sleeps outside operations */
            job_run(&j, loop_rank, kind == SPINNING ? NULL : &h, NULL);
            if (timeout > 4 || stop_is_named(p, h.victim, why)) break;
            munmap(p, sizeof *p);
            p = page_make();
        }
        CHECK_MSG(p->status == DT_ERR_TIMEOUT &&
                      names_victim(p->report.text, h.victim, p->pid[h.victim], why),
            "%s: %s: %s", what, dt_status_name(p->status), p->report.text);
        CHECK_MSG(strstr(p->report.text, kind == SPINNING ? "state R" : "state T") != NULL,
            "%s: %s", what, p->report.text);
        for (int rank = 0; rank < 4; rank++)
            if (rank != h.victim)
                CHECK_MSG(names_victim(p->text[rank], h.victim, p->pid[h.victim], why),
                    "%s: rank %d has '%s'", what, rank, p->text[rank]);
        double late = known_at(p, h.victim, &last) - p->first_hit - timeout;
        CHECK_MSG(in_time(late, 0.2), "%s: named %.0f ms after the timeout", what, 1e3 * late);
        figure_add(&sums->named, late);
        figure_add(&sums->ends, j.begun + j.took - p->first_hit);
        double over = j.begun + j.took - p->first_hit;
        CHECK_MSG(in_time(over, 2 * timeout + 0.2), "%s: the job ends after %.2f s", what, over);
    }
    munmap(p, sizeof *p);
    before.maps--;
    left_check(&before, what);
}

static void stops(int full) {
    sums->named.n = sums->ends.n = 0;
    in_parallel(3, full ? 125 : 30, one_stop);
    lateness_print(&sums->named, "stopped and spinning ranks: named after the timeout of 0.5 s");
    lateness_print(&sums->ends, "stopped and spinning ranks: the job is over");
}

/* ---- two faults ---- */

static void one_double(int at) {
    page *p = page_make();
    job j;
    harm one, two;
    left before = left_now();
    char what[96];
    uint64_t r = dice((uint64_t)at + 5000);
    static const int whats[][2] = { { H_KILL, H_KILL }, { H_KILL, H_STOP }, { H_STOP, H_KILL },
        { H_STOP, H_STOP }, { H_STOP, H_KILL } };
    memset(&one, 0, sizeof one);
    memset(&two, 0, sizeof two);
    one.victim = (int)(r % 4);
    one.what = whats[at % 5][0];
    one.after = 1e-3 * (double)(r >> 8 & 31);
    /* case 4: the stopped rank */
    two.victim = at % 5 == 4 ? one.victim : (one.victim + 1 + (int)(r >> 16 & 1)) % 4;
    two.what = whats[at % 5][1];
    /* during the abort after its timeout; or at once */
    two.gap = at % 5 == 4 ? 0.6 : 1e-4 * (double)(r >> 24 & 63);
    job_init(&j, p, DT_BACKEND_PROCS, 4, STOP_TIMEOUT);
    job_run(&j, loop_rank, &one, &two);
    double over = j.begun + j.took - p->first_hit;
    snprintf(what, sizeof what, "two faults %d: rank %d %s, then rank %d %s", at, one.victim,
        one.what == H_KILL ? "killed" : "stopped", two.victim,
        two.what == H_KILL ? "killed" : "stopped");
    CHECK_MSG(in_time(over, 2 * STOP_TIMEOUT + 0.2), "%s: the job ends after %.2f s", what, over);
    char who[2][16];
    snprintf(who[0], sizeof who[0], "rank %d (", one.victim);
    snprintf(who[1], sizeof who[1], "rank %d (", two.victim);
    CHECK_MSG(
        p->status != DT_OK && (strstr(p->report.text, who[0]) || strstr(p->report.text, who[1])),
        "%s: %s", what, p->report.text);
    figure_add(&sums->ends, over);
    munmap(p, sizeof *p);
    before.maps--;
    left_check(&before, what);
}

static void doubles(int full) {
    sums->ends.n = 0;
    in_parallel(2, full ? 100 : 15, one_double);
    lateness_print(&sums->ends, "two faults: the job is over");
}

/* ---- the supervisor is killed, Ctrl-C ---- */

static void supervisor(int full) {
    page *p = page_make();
    sums->ends.n = 0;
    for (int i = 0; i < (full ? 40 : 8); i++) {
        job j;
        left before = left_now();
        job_init(&j, p, DT_BACKEND_PROCS, 4, 10);
        if (i % 4 == 3) j.spinner = 2;
        fflush(NULL);
        pid_t pid = fork();
        if (pid == 0) {
            job_run(&j, loop_rank, NULL, NULL);
            _exit(0);
        }
        while (!__atomic_load_n(&p->pid[i % 2 ? 3 : 0], __ATOMIC_SEQ_CST)) nap(1e-4);
        nap(1e-3 * (double)(dice((uint64_t)i) % 30));
        kill(pid, SIGKILL);
        double took = children_gone();
        CHECK_MSG(in_time(took, 1), "the supervisor is killed: ranks remain %.2f s later", took);
        for (int r = 0; r < 4; r++)
            if (took > 1 && p->pid[r]) kill(p->pid[r], SIGKILL);
        children_gone();
        figure_add(&sums->ends, took);
        left_check(&before, "the supervisor is killed");
    }
    lateness_print(&sums->ends, "the supervisor is killed: all ranks are gone");
    munmap(p, sizeof *p);
}

static const char *program; /* argv[0]; train_gpt is in the same folder */

/* Starts train_gpt in its own process group. Returns its pid once it has printed a step; -1 on
   failure. */
static pid_t train_begin(int *out) {
    char path[512], text[256];
    int ends[2];
    const char *slash = strrchr(program, '/');
    snprintf(path, sizeof path, "%.*s/train_gpt", slash ? (int)(slash - program) : 1,
        slash ? program : ".");
    if (access(path, X_OK) != 0 || pipe(ends) != 0) return -1;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        setpgid(0, 0);
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        execl(path, path, "--backend", "procs", "--ranks", "4", "--layers", "1", "--width", "32",
            "--heads", "2", "--seq", "32", "--batch", "8", "--steps", "100000", "--data",
            "README.md", (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    *out = ends[0];
    for (size_t at = 0; at + 1 < sizeof text;) { /* reads the settings, then steps */
        ssize_t got = read(ends[0], text, sizeof text - 1);
        if (got <= 0) break;
        text[got] = 0;
        if (strstr(text, "| loss")) return pid;
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(ends[0]);
    return -1;
}

static void ctrlc(int full) {
    static const char *const ways[] = { "SIGINT to the group", "SIGINT to the parent",
        "SIGTERM to the parent", "SIGTERM to the group" };
    sums->ends.n = 0;
    for (int i = 0; i < (full ? 20 : 4); i++) {
        left before = left_now();
        int out = -1;
        pid_t pid = train_begin(&out);
        if (pid < 0) {
            check_skip("Ctrl-C: train_gpt is not built beside this program, or does not run");
            return;
        }
        nap(1e-3 * (double)(dice((uint64_t)i) % 100));
        int signal = i % 4 < 2 ? SIGINT : SIGTERM;
        kill(i % 4 == 0 || i % 4 == 3 ? -pid : pid, signal);
        double took = children_gone();
        CHECK_MSG(in_time(took, 1), "%s: processes remain %.2f s later", ways[i % 4], took);
        if (took > 3) kill(-pid, SIGKILL);
        children_gone();
        close(out);
        figure_add(&sums->ends, took);
        left_check(&before, ways[i % 4]);
    }
    lateness_print(&sums->ends, "Ctrl-C: all processes are gone");
}

/* ---- out of memory ---- */

static dt_status allocating_rank(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    for (int round = 0; !dt_error(ctx) && round < 100000; round++) {
        dt_barrier(world);
        if (me != 1 || round < 10) continue;
        char *more = (char *)malloc(4 << 20);
        if (more) memset(more, round | 1, 4 << 20);
    }
    return page_note(j->p, ctx, me);
}

static int write_file(const char *folder, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY),
        ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0) close(fd);
    return ok;
}

/* A job whose processes share a control group with limited memory: the kernel kills the process
   that uses most. */
static void oom_in(const char *folder, const char *limit, const char *what) {
    page *p = page_make();
    job j;
    pid_t pid;
    job_init(&j, p, DT_BACKEND_PROCS, 3, 20);
    if (!write_file(folder, limit, "67108864")) {
        check_skip("out of memory: this control group accepts no limit");
        munmap(p, sizeof *p);
        return;
    }
    fflush(NULL);
    if ((pid = fork()) == 0) {
        if (!write_file(folder, "cgroup.procs", "0")) _exit(3);
        job_run(&j, allocating_rank, NULL, NULL);
        _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 3)
        check_skip("out of memory: processes cannot join the control group");
    else
        CHECK_MSG(status == 0 && names_victim(p->report.text, 1, p->pid[1], "signal 9 (SIGKILL)") &&
                      strstr(p->report.text, "out of memory"),
            "%s: status %d: %s", what, status, p->report.text);
    printf("%s: %s\n", what, p->report.text);
    munmap(p, sizeof *p);
}

static void oom(int full) {
    static const char *const kinds[][4] = {
        { "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "control groups v1", "" },
        { "/sys/fs/cgroup", "memory.max", "control groups v2", "/sys/fs/cgroup/cgroup.controllers" }
    };
    for (int i = 0; i < (full ? 20 : 2); i++) {
        char folder[128];
        const char *const *k = kinds[i % 2];
        snprintf(folder, sizeof folder, "%s/dt_test_%d", k[0], (int)getpid());
        if ((k[3][0] && access(k[3], R_OK) != 0) || mkdir(folder, 0755) != 0) {
            char text[160];
            snprintf(
                text, sizeof text, "out of memory: there is no %s that this test may use", k[2]);
            if (i < 2) check_skip(text);
            continue;
        }
        oom_in(folder, k[1], k[2]);
        for (int tries = 0; tries < 100 && rmdir(folder) != 0; tries++) nap(0.01);
    }
}

#include "tests/faults/suspend.h"

/* ---- main ---- */

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(int full);
    } parts[] = { { "kills", kills }, { "stops", stops }, { "doubles", doubles },
        { "supervisor", supervisor }, { "ctrlc", ctrlc }, { "oom", oom },
        { "straggler", stragglers }, { "drills", drills }, { "ask", asks },
        { "deadlocks", deadlocks }, { "endings", endings }, { "suspends", suspends },
        { "soak", soaks } };
    const char *part = argc > 1 && strcmp(argv[1], "full") != 0 ? argv[1] : NULL;
    int full = argc > 1 && strcmp(argv[argc - 1], "full") == 0;
    program = argv[0];
    namespaces_make();
    sums = (figures *)mmap(
        NULL, sizeof *sums, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (part && strcmp(part, parts[i].name) != 0) continue;
        double begin = mono();
        memset(sums, 0, sizeof *sums);
        parts[i].run(full);
        printf("%s: %.1f s\n", parts[i].name, mono() - begin);
        fflush(stdout);
    }
    return check_done("test_faults");
}
