/* ranks.h - what the tests of dt_comm.h share: a host table that counts, runs whose outcome is kept, data.

   Included after dt_comm.h with its implementation. */
#ifndef RANKS_H
#define RANKS_H

#include "check.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { MAX_RANKS = 32 };

/* ---- a host table that counts, and refuses on demand ------------------------------------------------------------ */

typedef struct spy {
    dt_host        host;
    const dt_host *base;
    long           live, calls;         /* blocks; allocations so far */
    long           refuse_at;           /* this allocation is refused, counted from 1; 0: none */
    int            refuse_all_later;
    int            error_lines;
    char           line[512];           /* the last error line */
} spy;

static void *spy_alloc(void *user, size_t bytes, dt_mem mem) {
    spy *s = (spy *)user;
    long call = __atomic_add_fetch(&s->calls, 1, __ATOMIC_SEQ_CST);
    if (s->refuse_at && (call == s->refuse_at || (s->refuse_all_later && call > s->refuse_at))) return NULL;
    void *p = s->base->alloc(s->base->user, bytes, mem);
    if (p) memset(p, 0xA5, bytes < 65536 ? bytes : 65536);  /* nobody may rely on zeros */
    if (p) __atomic_add_fetch(&s->live, 1, __ATOMIC_SEQ_CST);
    return p;
}

static void spy_free(void *user, void *p, size_t bytes, dt_mem mem) {
    spy *s = (spy *)user;
    if (p) __atomic_sub_fetch(&s->live, 1, __ATOMIC_SEQ_CST);
    s->base->free(s->base->user, p, bytes, mem);
}

static double spy_now(void *user) { spy *s = (spy *)user; return s->base->now(s->base->user); }
static void spy_sleep(void *user, double seconds) { spy *s = (spy *)user; s->base->sleep(s->base->user, seconds); }

static void spy_log(void *user, int level, int rank, const char *text) {
    spy *s = (spy *)user;
    (void)rank;
    if (level != DT_LOG_ERROR) return;
    if (__atomic_fetch_add(&s->error_lines, 1, __ATOMIC_SEQ_CST) == 0) snprintf(s->line, sizeof s->line, "%s", text);
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

/* ---- running ---------------------------------------------------------------------------------------------------- */

typedef dt_status (*rank_fn)(dt_ctx *ctx, void *user);

/* What is left of a run: what each rank's context said at the end, the report, the time. */
typedef struct outcome {
    spy       host;
    dt_run_desc desc;
    rank_fn   fn;
    void     *user;
    dt_status status, error[MAX_RANKS];
    char      text[MAX_RANKS][512];
    int       ended[MAX_RANKS];
    dt_report report;
    double    took;
} outcome;

/* What forked ranks write for main: shared before the fork, one such run at a time. */
typedef struct board {
    int       passed, failed, ended[MAX_RANKS];
    dt_status error[MAX_RANKS];
    char      text[MAX_RANKS][512];
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
    int procs = o->desc.backend == DT_BACKEND_PROCS, passed = check_passed, failed = check_failed;
    if (procs) {
        if (!shared_board) shared_board = (board *)mmap(NULL, sizeof *shared_board, PROT_READ | PROT_WRITE,
                                                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        memset(shared_board, 0, sizeof *shared_board);
        check_passed = check_failed = 0;    /* each fork counts its own from here */
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
    CHECK_MSG(o->status == o->report.status, "dt_run returns %s, reports %s", dt_status_name(o->status),
              dt_status_name(o->report.status));
    CHECK_MSG(o->host.live == 0, "%ld blocks are left", o->host.live);
    return o->status;
}

static dt_status run(outcome *o, int ranks, rank_fn fn, void *user) {
    prepare(o, ranks, fn, user);
    return start(o);
}

/* A run that must succeed without a word. */
static void run_well(int ranks, rank_fn fn, void *user) {
    outcome o;
    run(&o, ranks, fn, user);
    CHECK_MSG(o.status == DT_OK, "%d ranks: %s: %s", ranks, dt_status_name(o.status), o.report.text);
    CHECK_MSG(o.host.error_lines == 0, "%d ranks: logged %s", ranks, o.host.line);
}


/* A run of forked ranks, with the default host table: dt_alloc's memory is in the range. */
__attribute__((unused)) static void prepare_procs(outcome *o, int ranks, rank_fn fn, void *user) {
    prepare(o, ranks, fn, user);
    o->desc.backend = DT_BACKEND_PROCS;
    o->desc.host = NULL;
}

/* A run over threads (0) or forks (1) that must succeed without a word. */
__attribute__((unused)) static void run_well_on(int procs, int ranks, rank_fn fn, void *user) {
    outcome o;
    if (!procs) {
        run_well(ranks, fn, user);
        return;
    }
    prepare_procs(&o, ranks, fn, user);
    start(&o);
    CHECK_MSG(o.status == DT_OK, "%d forks: %s: %s", ranks, dt_status_name(o.status), o.report.text);
}

/* ---- data: what ranks send, and what must come of it ---- */

/* Element i of what rank r sends: such that a float sum in another order has other bits, and an int product fits. */
static double element(int rank, size_t i, dt_dtype dtype, dt_op op) {
    uint64_t h = ((uint64_t)rank * 1000003u + i) * 0x9E3779B97F4A7C15u;
    h ^= h >> 29;
    if (dtype == DT_I32) return (double)(int)(h % 7) - 3;
    double x = (double)(h % 2000003u) / 1000001.5 - 1;     /* [-1, 1) */
    return op == DT_PROD ? 1 + x / 8 : x * (h & 1 ? 100 : 1);
}

/* A float as bf16 or f16, to nearest with ties to even, by arithmetic on doubles: nothing of the library's. */
__attribute__((unused)) static double rounded(dt_dtype dtype, float x) {
    int exponent;
    double part = frexp((double)x, &exponent);     /* in [1/2, 1) */
    int digits = dtype == DT_BF16 ? 8 : exponent < -13 ? 11 + exponent + 13 : 11;
    return ldexp(nearbyint(ldexp(part, digits)), exponent - digits);
}

__attribute__((unused)) static int narrow(dt_dtype dtype) { return dtype == DT_BF16 || dtype == DT_F16; }

/* What a rank really sends: the element as its type holds it. */
__attribute__((unused)) static double held(int rank, size_t i, dt_dtype dtype, dt_op op) {
    double x = element(rank, i, dtype, op);
    return narrow(dtype) ? rounded(dtype, (float)x) : dtype == DT_F32 ? (double)(float)x : x;
}

/* Numbers that the type holds exactly: for those of 16 bits a shift, or the widest float with its exponent. */
__attribute__((unused)) static void put(void *buf, dt_dtype dtype, size_t i, double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, small = (uint32_t)ldexp(fabs(x), 24), normal = (bits >> 13) - (112u << 10);
    if (dtype == DT_BF16) ((uint16_t *)buf)[i] = (uint16_t)(bits >> 16);
    else if (dtype == DT_F16)
        ((uint16_t *)buf)[i] = (uint16_t)(sign | (fabs(x) < ldexp(1, -14) ? small : normal & 0x7fff));
    else if (dtype == DT_F32) ((float *)buf)[i] = f;
    else if (dtype == DT_F64) ((double *)buf)[i] = x;
    else ((int32_t *)buf)[i] = (int32_t)x;
}

__attribute__((unused)) static double get(const void *buf, dt_dtype dtype, size_t i) {
    if (dtype == DT_F32) return ((const float *)buf)[i];
    if (dtype == DT_F64) return ((const double *)buf)[i];
    if (dtype == DT_I32) return ((const int32_t *)buf)[i];
    uint32_t h = ((const uint16_t *)buf)[i], bits = h << 16;
    float f;
    memcpy(&f, &bits, 4);
    if (dtype == DT_BF16) return f;
    int exponent = h >> 10 & 31, part = h & 1023;
    double x = exponent ? ldexp(1024 + part, exponent - 25) : ldexp(part, -24);
    return h & 0x8000 ? -x : x;
}

#define FOLD(T, a, b) \
    (op == DT_MAX ? ((b) > (a) ? (b) : (a)) : op == DT_MIN ? ((b) < (a) ? (b) : (a)) \
     : op == DT_PROD ? (T)((a) * (b)) : (T)((a) + (b)))

/* The naive reduction of element i over n ranks, in rank order, each step rounded to the type; bf16 and f16 are reduced
   as floats and rounded once. */
__attribute__((unused)) static double naive(int n, size_t i, dt_dtype dtype, dt_op op) {
    double d = held(0, i, dtype, op);
    float f = (float)d;
    int32_t k = (int32_t)d;
    for (int r = 1; r < n; r++) {
        double dr = held(r, i, dtype, op);
        float fr = (float)dr;
        int32_t kr = (int32_t)dr;
        f = FOLD(float, f, fr);
        d = FOLD(double, d, dr);
        k = FOLD(int32_t, k, kr);
    }
    if (op == DT_AVG) f /= (float)n, d /= n, k /= n;
    return narrow(dtype) ? rounded(dtype, f) : dtype == DT_F32 ? (double)f : dtype == DT_F64 ? d : (double)k;
}

#endif
