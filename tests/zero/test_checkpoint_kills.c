/* test_checkpoint_kills.c - dt_zero.h, section 3: a rank is killed at each of the system calls that
   a save makes. Public domain or MIT, at your choice; see LICENSE.

       test_checkpoint_kills          every third call, at a different offset on each rank: seconds
       test_checkpoint_kills full     all calls, in several rounds: make faults
       test_checkpoint_kills ps       only parameter servers, every third call

   Four forked ranks load checkpoint A from a real folder, make a step, and save B. This program
   traces one rank with ptrace from the start of the save, and kills the rank as it enters its n-th
   system call; calls of its writer thread, futexes and sleeps count too. Waits differ from run to
   run, so n grows until the save returns before call n. After a kill the job must end with an error
   that names the rank, and a new job in that folder must find A or B with equal bits; it must find
   B if the save had returned on any rank. Saves run in the foreground and in the background, and
   also with a limit that removes A after B is committed. A parameter server with two workers and two
   servers is treated alike: B is a delta to A, or a base. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include "tests/support/jitter.h"
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 4, OUT = 64, IN = 72, VALUES = OUT * IN + OUT, HANG_S = 300 };

// ==== A job =====================================================================================

/* Values, first and second moments of w and b. */
typedef struct state {
    float value[3][VALUES];
    double seen;
} state;

/* Memory shared by the job's ranks and this program, which traces one of them. */
typedef struct page {
    state saved[3]; /* after steps 1 and 2 of a job without a kill */
    pid_t pid[RANKS];
    int ready[RANKS], saving[RANKS], returned[RANKS], go; /* atomic */
    dt_status status;
    char text[512];
    double took_s;
} page;

static page *shared;
static char scratch[] = "/tmp/test_kills.XXXXXX";

typedef struct job {
    char dir[64];
    int background, keep;
    int first; /* 1: this job saves A and stores the states after steps 1 and 2 */
    int ps;    /* 1: a parameter server; `background` then means that B is a delta */
} job;

typedef struct model {
    dt_tensor *w, *b;
    dt_zero *zero;
    double seen;
    dt_extra_state saved;
} model;

static void model_make(model *m, dt_ctx *ctx) {
    dt_zero_desc d;
    memset(&d, 0, sizeof d);
    d.stage = 2;
    m->w = dt_param(ctx, "w", DT_SHAPE(OUT, IN), DT_NORMAL(0.1));
    m->b = dt_param(ctx, "b", DT_SHAPE(OUT), DT_ZEROS);
    m->zero = dt_zero_make(ctx, d);
    m->seen = 0;
    m->saved = (dt_extra_state){ "seen", &m->seen, 1 };
}

static void model_step(model *m, dt_ctx *ctx, int step) {
    int rank = dt_ctx_rank(ctx);
    float x[2 * IN], y[2 * OUT];
    for (int i = 0; i < 2 * IN; i++) x[i] = (float)((step * 37 + rank * 11 + i * 7) % 19) / 19;
    for (int i = 0; i < 2 * OUT; i++) y[i] = (float)((step * 5 + rank * 3 + i) % 7) / 7;
    dt_tensor *out = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(2, IN), x), m->w, m->b);
    dt_backward(dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(2, OUT), y), 2 * OUT * RANKS));
    dt_zero_step(m->zero, 0.05);
    dt_reset(ctx);
    m->seen = 8 * step;
}

static dt_checkpoint *model_open(model *m, const job *j) {
    dt_checkpoint_desc d;
    memset(&d, 0, sizeof d);
    d.dir = j->dir;
    d.background = j->background;
    d.keep = j->keep;
    d.extra_state = &m->saved;
    d.n_extra_state = 1;
    d.config = "{\"name\":\"tiny\"}";
    d.config_json = "{}\n";
    return dt_checkpoint_open(m->zero, d);
}

static void state_read(const model *m, state *s) {
    memset(s, 0, sizeof *s);
    dt_read(m->w, s->value[0]);
    dt_read(m->b, s->value[0] + OUT * IN);
    for (int k = 0; k < 2; k++) {
        dt_zero_state(m->zero, k, m->w, s->value[1 + k]);
        dt_zero_state(m->zero, k, m->b, s->value[1 + k] + OUT * IN);
    }
    s->seen = m->seen;
}

static void tell(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_SEQ_CST); }
static int told(const int *flag) { return __atomic_load_n(flag, __ATOMIC_SEQ_CST); }
static void nap(void) { usleep(100); }

static dt_status save(dt_checkpoint *c, const job *j) {
    dt_status status = dt_checkpoint_save(c);
    while (status == DT_OK && j->background && !dt_checkpoint_poll(c)) nap();
    return status;
}

/* Waits until this program traces the rank that it wants to kill. */
static void save_begins(int r) {
    tell(&shared->ready[r]);
    while (!told(&shared->go)) nap();
    tell(&shared->saving[r]);
}

static void permit_tracing(int r) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    shared->pid[r] = getpid();
}

// ==== A job with a parameter server =============================================================

enum { KEYS = 64, WIDTH = 8 };

static dt_ps *ps_open(dt_ctx *ctx, int servers) {
    dt_ps_desc d;
    dt_table_desc table;
    memset(&d, 0, sizeof d);
    d.servers = servers;
    dt_ps *ps = dt_ps_make(ctx, d);
    memset(&table, 0, sizeof table);
    table.name = "t";
    table.width = WIDTH;
    table.init = DT_NORMAL(1);
    table.optimizer = DT_TABLE_ADAGRAD;
    dt_ps_table(ps, table);
    return ps;
}

static void ps_read(dt_ps *ps, state *s, float *rows) {
    uint64_t keys[KEYS];
    for (int i = 0; i < KEYS; i++) keys[i] = (uint64_t)i;
    dt_ps_wait(ps, dt_ps_pull_start(ps, 0, keys, KEYS, rows));
    memset(s, 0, sizeof *s);
    memcpy(s->value[0], rows, KEYS * WIDTH * sizeof *rows);
}

static void ps_step(dt_ps *ps, int worker, int step) {
    state s;
    uint64_t keys[KEYS / 2];
    float rows[KEYS * WIDTH];
    ps_read(ps, &s, rows);
    for (int i = 0; i < KEYS / 2; i++) keys[i] = (uint64_t)(i + worker * step * 5);
    for (int i = 0; i < KEYS / 2 * WIDTH; i++)
        rows[i] = rows[i] / 4 + (float)((i + step) % 13 - 6) / 8;
    dt_ps_add(ps, 0, keys, KEYS / 2, rows);
    dt_ps_step(ps, 0.1);
}

static dt_status ps_save(dt_ps *ps, const job *j) {
    dt_ps_save_desc d = { !j->first && j->background, j->keep };
    return dt_ps_save(ps, j->dir, d);
}

static dt_status ps_rank(dt_ctx *ctx, const job *j) {
    const int r = dt_ctx_rank(ctx);
    float rows[KEYS * WIDTH];
    state s;
    dt_ps *ps = ps_open(ctx, 2);
    if (!j->first) dt_ps_load(ps, j->dir);
    permit_tracing(r);
    if (dt_ps_is_server(ps)) { /* its calls count from the last step on */
        tell(&shared->ready[r]);
        tell(&shared->saving[r]);
        if (dt_ps_serve(ps) == DT_OK) tell(&shared->returned[r]);
        return dt_error(ctx);
    }
    for (int step = j->first ? 1 : 2; step <= 2; step++) {
        ps_step(ps, r, step);
        ps_read(ps, &s, rows);
        if (j->first && r == 0) shared->saved[step] = s;
        if (j->first && step == 1) ps_save(ps, j);
    }
    if (!j->first && dt_error(ctx) == DT_OK) {
        save_begins(r);
        if (ps_save(ps, j) == DT_OK && dt_error(ctx) == DT_OK) tell(&shared->returned[r]);
    }
    dt_ps_end(ps);
    return dt_error(ctx);
}

static dt_status job_rank(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    if (j->ps) return ps_rank(ctx, j);
    int r = dt_ctx_rank(ctx);
    model m;
    state s;
    model_make(&m, ctx);
    dt_checkpoint *c = model_open(&m, j);
    if (!j->first) dt_checkpoint_load(c, NULL);
    for (int step = j->first ? 1 : 2; step <= 2; step++) {
        model_step(&m, ctx, step);
        state_read(&m, &s);
        if (j->first && r == 0) shared->saved[step] = s;
        if (j->first && step == 1) save(c, j);
    }
    if (!j->first && dt_error(ctx) == DT_OK) {
        permit_tracing(r);
        save_begins(r);
        if (save(c, j) == DT_OK && dt_error(ctx) == DT_OK) tell(&shared->returned[r]);
    }
    dt_checkpoint_close(c);
    return dt_error(ctx);
}

static void silent(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* Starts the job in a separate process, because this process waits for the ranks it traces. */
static pid_t job_start(const job *j) {
    memset(shared->ready, 0, sizeof *shared - offsetof(page, ready));
    fflush(NULL);
    pid_t pid = fork();
    if (pid != 0) return pid;
    dt_host host = *dt_host_default();
    dt_report report = { DT_OK, 0, "", 0 };
    double begin = host.now(host.user);
    host.log = silent;
    shared->status = dt_run((dt_run_desc){ .ranks = RANKS,
                                .backend = DT_BACKEND_PROCS,
                                .timeout_s = 10,
                                .host = &host,
                                .report = &report },
        job_rank, (void *)j);
    memcpy(shared->text, report.text, sizeof shared->text);
    shared->took_s = host.now(host.user) - begin;
    _exit(0);
}

// ==== The tracer ================================================================================

/* 1 if a system-call stop is at the entry of the call, 0 at its exit. */
static int at_entry(pid_t thread) {
    enum { GET_SYSCALL_INFO = 0x420e, ENTRY = 1 };
    unsigned char info[128] = { 0 };
    long got = ptrace((__typeof__(PTRACE_CONT))GET_SYSCALL_INFO, thread, (void *)sizeof info, info);
    return got > 0 && info[0] == ENTRY;
}

static void on_alarm(int number) { (void)number; }

/* Waits until all ranks are about to save. Returns 0 if the job ended before. */
static int all_ready(pid_t job) {
    for (int r = 0; r < RANKS; r++)
        while (!told(&shared->ready[r])) {
            if (waitpid(job, NULL, WNOHANG) == job) return 0;
            nap();
        }
    return 1;
}

typedef struct traced {
    int calls, killed, hung;
} traced;

/* Traces the rank, kills it at its n-th call, and waits for the end of the job. */
static traced trace_rank(pid_t job, int rank, int n) {
    traced h = { 0, 0, 0 };
    pid_t victim = shared->pid[rank], one;
    int status;
    alarm(HANG_S);
    while ((one = waitpid(-1, &status, __WALL)) != job) {
        int over = h.killed || told(&shared->returned[rank]), signal = 0;
        if (one < 0) { /* the alarm */
            h.hung = 1;
            for (int r = 0; r < RANKS; r++) kill(shared->pid[r], SIGKILL);
            kill(job, SIGKILL);
            alarm(HANG_S);
            continue;
        }
        if (!WIFSTOPPED(status)) continue;
        if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
            h.calls += !over && told(&shared->saving[rank]) && at_entry(one);
            if (h.calls == n && !h.killed) h.killed = kill(victim, SIGKILL) == 0;
        } else if (status >> 16 == 0) {
            signal = WSTOPSIG(status); /* a signal to pass on to the thread */
        }
        ptrace(
            over || h.killed ? PTRACE_CONT : PTRACE_SYSCALL, one, NULL, (void *)(intptr_t)signal);
    }
    alarm(0);
    return h;
}

/* Returns 0 if this machine does not permit ptrace. */
static int seize(pid_t victim) {
    long how = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL;
    if (ptrace(PTRACE_SEIZE, victim, NULL, (void *)(intptr_t)how) != 0) return 0;
    return ptrace(PTRACE_INTERRUPT, victim, NULL, NULL) == 0;
}

// ==== The state after a kill ====================================================================

static int leftovers(const char *dir) {
    DIR *d = opendir(dir);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));) n += strstr(e->d_name, ".tmp") != NULL;
    if (d) closedir(d);
    return n;
}

/* A new job of one rank: opens the folder, cleans it up, finds A or B, trains a step and saves.
   Returns the step that it found. */
static int check_next_job(const job *j, const char *what, int least) {
    dt_host host = *dt_host_default();
    dt_ctx_desc desc;
    model m;
    state s;
    memset(&desc, 0, sizeof desc);
    host.log = silent;
    desc.host = &host;
    dt_ctx *ctx = dt_ctx_make(desc);
    float rows[KEYS * WIDTH];
    dt_ps *ps = j->ps ? ps_open(ctx, 0) : NULL;
    dt_checkpoint *c = NULL;
    if (!ps) {
        model_make(&m, ctx);
        c = model_open(&m, j);
    }
    int left = ps ? 0 : leftovers(j->dir);
    int64_t step = ps ? dt_ps_load(ps, j->dir) : c ? dt_checkpoint_load(c, NULL) : -1;
    if (ps)
        ps_read(ps, &s, rows);
    else
        state_read(&m, &s);
    CHECK_MSG(step >= least && step <= 2, "%s: the next job finds step %lld, not %s: %s", what,
        (long long)step, least == 1 ? "1 or 2" : "2", dt_error_text(ctx));
    CHECK_MSG(left == 0, "%s: %d folders of the killed save remain", what, left);
    if (step == 1 || step == 2)
        CHECK_MSG(memcmp(&s, &shared->saved[step], sizeof s) == 0, "%s: step %lld differs in bits",
            what, (long long)step);
    if (ps)
        ps_step(ps, 0, (int)step + 1);
    else
        model_step(&m, ctx, (int)step + 1);
    CHECK_MSG((ps ? ps_save(ps, j) : save(c, j)) == DT_OK, "%s: the next job cannot save: %s", what,
        dt_error_text(ctx));
    CHECK_MSG(leftovers(j->dir) == 0, "%s: folders of the killed save remain", what);
    dt_checkpoint_close(c);
    dt_ctx_free(ctx);
    return (int)step;
}

static void shell(const char *format, const char *a, const char *b) {
    char command[300];
    snprintf(command, sizeof command, format, a, b);
    if (system(command) != 0) abort();
}

// ==== The campaign ==============================================================================

typedef struct sums {
    int kills, found[3], calls;
} sums;

static void name_of(const job *j, int r, char *text, size_t bytes) {
    snprintf(text, bytes, "%s, keep %d: rank %d",
        j->ps           ? j->background ? "delta" : "base"
        : j->background ? "background"
                        : "foreground",
        j->keep, r);
}

/* Runs one save of B and kills rank r at its n-th call. Returns 1 if the rank was killed, 0 if the
   save made fewer calls, -1 to end the campaign. */
static int one_kill(const job *j, const char *first, int r, int n, sums *sum) {
    char what[100], who[64];
    int some = 0, all = 1;
    shell("rm -rf '%s'", j->dir, "");
    shell("cp -r '%s' '%s'", first, j->dir);
    pid_t pid = job_start(j);
    if (!CHECK_MSG(all_ready(pid), "the job that saves B: %s", shared->text)) return -1;
    int seized = seize(shared->pid[r]);
    tell(&shared->go);
    traced h = trace_rank(pid, r, seized ? n : 0);
    if (!seized) {
        check_skip(
            "test_checkpoint_kills: ptrace is not permitted here, so no call can be counted");
        return -1;
    }
    name_of(j, r, what, sizeof what);
    snprintf(what + strlen(what), sizeof what - strlen(what), " killed at call %d", n);
    snprintf(who, sizeof who, "rank %d (process %d) was ended by signal 9", r, (int)shared->pid[r]);
    for (int i = 0; i < RANKS; i++) {
        some |= told(&shared->returned[i]);
        all &= told(&shared->returned[i]);
    }
    if (!CHECK_MSG(!h.hung, "%s: the job does not end", what)) return -1;
    sum->calls = h.calls > sum->calls ? h.calls : sum->calls;
    if (!h.killed) {
        CHECK_MSG(shared->status == DT_OK && all, "%s: no rank was killed, but the job failed: %s",
            what, shared->text);
        check_next_job(j, what, 2);
        return 0;
    }
    CHECK_MSG(shared->status == DT_ERR_PEER && strstr(shared->text, who), "%s: %s: %s", what,
        dt_status_name(shared->status), shared->text);
    CHECK_MSG(
        in_time(shared->took_s, 5), "%s: the job ends only after %.1f s", what, shared->took_s);
    int step = check_next_job(j, what, some ? 2 : 1);
    if (step == 1 || step == 2) sum->found[step]++;
    sum->kills++;
    return check_failed < 10 ? 1 : -1;
}

/* Kills one rank at calls begin, begin + every, begin + 2 every, ... */
static int kill_at_calls(job *j, const char *first, int r, int begin, int every, sums *sum) {
    int went = 1, without = 0;
    for (int n = begin; without < 1 + (every == 1) && went >= 0; n += every) {
        went = one_kill(j, first, r, n, sum);
        without += went == 0;
    }
    return went >= 0;
}

static void campaign(int full, int ps) {
    job first = { .first = 1, .ps = ps };
    int kills = 0;
    snprintf(first.dir, sizeof first.dir, "%s/%s", scratch, ps ? "p" : "a");
    waitpid(job_start(&first), NULL, 0);
    if (!CHECK_MSG(shared->status == DT_OK, "the job that saves A: %s", shared->text)) return;
    for (int round = 0; round < (full ? 2 : 1); round++)
        for (int way = 0; way < 4; way++)
            for (int r = 0; r < RANKS; r++) {
                job j = { .background = way % 2, .keep = way / 2, .ps = ps };
                sums sum = { 0 };
                char name[100];
                snprintf(j.dir, sizeof j.dir, "%s/b", scratch);
                int few = ps && r < 2; /* a worker only waits for the servers: a call or two */
                int begin = full || few ? 1 : 1 + (r + way) % 3;
                if (!kill_at_calls(&j, first.dir, r, begin, full ? 1 : 3, &sum)) return;
                name_of(&j, r, name, sizeof name);
                printf("%s: killed at %d of some %d calls; found A %d times, B %d times\n", name,
                    sum.kills, sum.calls, sum.found[1], sum.found[2]);
                CHECK_MSG(few ? sum.kills > 0 : sum.kills > 3 && sum.found[1] > 0,
                    "%s: %d kills, A found %d times", name, sum.kills, sum.found[1]);
                kills += sum.kills;
            }
    printf("%d kills\n", kills);
}

int main(int argc, char **argv) {
    struct sigaction act;
    memset(&act, 0, sizeof act);
    act.sa_handler = on_alarm; /* no SA_RESTART, so that the signal interrupts a wait */
    sigaction(SIGALRM, &act, NULL);
    shared = (page *)mmap(
        NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || !mkdtemp(scratch)) abort();
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "ps") != 0) campaign(strcmp(what, "full") == 0, 0);
    campaign(strcmp(what, "full") == 0, 1);
    shell("rm -rf '%s'", scratch, "");
    return check_done("test_checkpoint_kills");
}
