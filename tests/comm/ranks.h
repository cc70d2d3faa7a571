/* ranks.h - shared by the tests of dt_comm.h: a host table that counts, and runs that store their
   outcome.

   Included after dt_comm.h with its implementation. */
#ifndef RANKS_H
#define RANKS_H

#include "tests/comm/rank_data.h"
#include "tests/support/jitter.h"

#include <sys/mman.h>

/* ---- a host table that counts, and refuses on demand ---- */

typedef struct spy {
    dt_host host;
    const dt_host *base;
    long live, calls; /* blocks; allocations so far */
    long refuse_at;   /* number of the allocation to refuse, from 1; 0: none */
    int refuse_all_later;
    int error_lines;
    char line[512]; /* the last error line */
} spy;

static void *spy_alloc(void *user, size_t bytes, dt_mem mem) {
    spy *s = (spy *)user;
    long call = __atomic_add_fetch(&s->calls, 1, __ATOMIC_SEQ_CST);
    if (s->refuse_at && (call == s->refuse_at || (s->refuse_all_later && call > s->refuse_at)))
        return NULL;
    void *p = s->base->alloc(s->base->user, bytes, mem);
    /* callers must not rely on zeroed memory */
    if (p) memset(p, 0xA5, bytes < 65536 ? bytes : 65536);
    if (p) __atomic_add_fetch(&s->live, 1, __ATOMIC_SEQ_CST);
    return p;
}

static void spy_free(void *user, void *p, size_t bytes, dt_mem mem) {
    spy *s = (spy *)user;
    if (p) __atomic_sub_fetch(&s->live, 1, __ATOMIC_SEQ_CST);
    s->base->free(s->base->user, p, bytes, mem);
}

static double spy_now(void *user) {
    spy *s = (spy *)user;
    return s->base->now(s->base->user);
}
static void spy_sleep(void *user, double seconds) {
    spy *s = (spy *)user;
    s->base->sleep(s->base->user, seconds);
}

static void spy_log(void *user, int level, int rank, const char *text) {
    spy *s = (spy *)user;
    (void)rank;
    if (level != DT_LOG_ERROR) return;
    if (__atomic_fetch_add(&s->error_lines, 1, __ATOMIC_SEQ_CST) == 0)
        snprintf(s->line, sizeof s->line, "%s", text);
}

static void spy_make(spy *s) {
    memset(s, 0, sizeof *s);
    s->base = dt_host_default();
    s->host.user = s;
    s->host.alloc = spy_alloc;
    s->host.free = spy_free;
    s->host.now = spy_now;
    s->host.sleep = spy_sleep;
    s->host.log = spy_log;
}

static double seconds(void) { return dt_host_default()->now(NULL); }

/* ---- running ---- */

typedef dt_status (*rank_fn)(dt_ctx *ctx, void *user);

/* The outcome of a run: each rank's final error status and text, the report, the duration. */
typedef struct outcome {
    spy host;
    dt_run_desc desc;
    rank_fn fn;
    void *user;
    dt_status status, error[MAX_RANKS];
    char text[MAX_RANKS][512];
    int ended[MAX_RANKS];
    dt_report report;
    double took;
} outcome;

/* Memory that forked ranks write for main: mapped before the fork, used by one run at a time. */
typedef struct board {
    int passed, failed, ended[MAX_RANKS];
    dt_status error[MAX_RANKS];
    char text[MAX_RANKS][512];
} board;
static board *shared_board;

static dt_status run_rank(dt_ctx *ctx, void *user) {
    outcome *o = (outcome *)user;
    int rank = dt_comm_rank(dt_world(ctx));
    dt_status status = o->fn(ctx, o->user);
    o->error[rank] = dt_error(ctx);
    snprintf(o->text[rank], sizeof o->text[rank], "%s", dt_error_text(ctx));
    o->ended[rank] = 1;
    if (o->desc.backend == DT_BACKEND_PROCS) {
        shared_board->error[rank] = o->error[rank];
        memcpy(shared_board->text[rank], o->text[rank], sizeof o->text[rank]);
        __atomic_fetch_add(&shared_board->passed, check_passed, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&shared_board->failed, check_failed, __ATOMIC_SEQ_CST);
        shared_board->ended[rank] = 1;
    }
    return status;
}

static void prepare(outcome *o, int ranks, rank_fn fn, void *user) {
    memset(o, 0, sizeof *o);
    spy_make(&o->host);
    o->desc.ranks = ranks;
    o->desc.timeout_s = 60;
    o->desc.host = &o->host.host;
    o->desc.report = &o->report;
    o->fn = fn;
    o->user = user;
}

static dt_status start(outcome *o) {
    double from = seconds();
    int procs = o->desc.backend == DT_BACKEND_PROCS;
    /* runs over threads may be active at the same time */
    int passed = procs ? check_passed : 0, failed = procs ? check_failed : 0;
    if (procs) {
        if (!shared_board)
            shared_board = (board *)mmap(NULL, sizeof *shared_board, PROT_READ | PROT_WRITE,
                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        memset(shared_board, 0, sizeof *shared_board);
        check_passed = check_failed = 0; /* each fork starts its own counters */
    }
    o->status = dt_run(o->desc, run_rank, o);
    o->took = seconds() - from;
    if (procs) {
        check_passed = passed + shared_board->passed;
        check_failed = failed + shared_board->failed;
        memcpy(o->error, shared_board->error, sizeof o->error);
        memcpy(o->text, shared_board->text, sizeof o->text);
        memcpy(o->ended, shared_board->ended, sizeof o->ended);
    }
    CHECK_MSG(o->status == o->report.status, "dt_run returns %s, reports %s",
        dt_status_name(o->status), dt_status_name(o->report.status));
    CHECK_MSG(o->host.live == 0, "%ld blocks were not freed", o->host.live);
    return o->status;
}

static dt_status run(outcome *o, int ranks, rank_fn fn, void *user) {
    prepare(o, ranks, fn, user);
    return start(o);
}

/* A run that must succeed without an error line. */
static void run_well(int ranks, rank_fn fn, void *user) {
    outcome o;
    run(&o, ranks, fn, user);
    CHECK_MSG(
        o.status == DT_OK, "%d ranks: %s: %s", ranks, dt_status_name(o.status), o.report.text);
    CHECK_MSG(o.host.error_lines == 0, "%d ranks: succeeded but logged %s", ranks, o.host.line);
}

/* A run of forked ranks with the default host table: dt_alloc returns shared memory. */
__attribute__((unused)) static void prepare_procs(outcome *o, int ranks, rank_fn fn, void *user) {
    prepare(o, ranks, fn, user);
    o->desc.backend = DT_BACKEND_PROCS;
    o->desc.host = NULL;
}

/* A run over threads (0) or forks (1) that must succeed without an error line. */
__attribute__((unused)) static void run_well_on(int procs, int ranks, rank_fn fn, void *user) {
    outcome o;
    if (!procs) {
        run_well(ranks, fn, user);
        return;
    }
    prepare_procs(&o, ranks, fn, user);
    start(&o);
    CHECK_MSG(
        o.status == DT_OK, "%d forks: %s: %s", ranks, dt_status_name(o.status), o.report.text);
}

#endif
