/* test_trace.c - the trace of dt_comm.h: the file holds what the ranks did.

   A run counts its own operations and bytes, over threads, forks and a transport. The test reads
   the trace with the strict JSON reader and compares: slices nest in each track, every operation
   occurs once, the durations add up to dt_comm_seconds, and arrows join each send to its
   receive. */
#define _GNU_SOURCE

#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/support/check.h"
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RANKS = 4, KINDS = 14, SLICES = 20000 };

static const char *const kinds[KINDS] = { "all-reduce", "reduce", "reduce-scatter", "all-gather",
    "gather", "scatter", "all-to-all", "all-to-all-v", "broadcast", "barrier", "dt_sum_doubles",
    "dt_agree", "send", "receive" };
static char path[256];

/* ---- the run ---- */

/* A rank's own counts, in memory shared by forked ranks: the `user` of the run. */
typedef struct tally {
    int calls[KINDS], splits, waits, marks;
    size_t bytes[KINDS];
    double seconds; /* in blocking operations */
    size_t lost;
    double loss[2];     /* without and with a trace */
    size_t allocations; /* in a step with a trace */
} tally;
typedef struct shared {
    tally of[MAX_RANKS];
    int ranks;
} shared;

static size_t sent(dt_ctx *ctx) {
    return dt_comm_bytes(ctx, DT_AXIS_NONE) + dt_comm_bytes(ctx, DT_AXIS_DP);
}

/* One blocking operation, counted. */
#define DO(kind, call) \
    do { \
        size_t before = sent(ctx); \
        double from = dt_comm_seconds(ctx); \
        call; \
        t->calls[kind]++; \
        t->bytes[kind] += sent(ctx) - before; \
        t->seconds += dt_comm_seconds(ctx) - from; \
    } while (0)
/* Waits for a started operation, and counts it. */
#define WAIT(kind, work) \
    do { \
        size_t before = sent(ctx); \
        dt_wait(ctx, work); \
        t->calls[kind]++; \
        t->waits++; \
        t->bytes[kind] += sent(ctx) - before; \
    } while (0)

enum {
    ALL_REDUCE,
    REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    GATHER,
    SCATTER,
    ALL_TO_ALL,
    ALL_TO_ALL_V,
    BROADCAST,
    BARRIER,
    SUM_DOUBLES,
    AGREE,
    SEND,
    RECEIVE
};

static void blocking(dt_ctx *ctx, dt_comm *dp, tally *t) {
    int n = dt_comm_size(dp), me = dt_comm_rank(dp);
    float in[64], out[64];
    double d = 1;
    size_t counts[MAX_RANKS], back[MAX_RANKS];
    memset(in, 0, sizeof in);
    for (int i = 0; i < n; i++) counts[i] = (size_t)(me + i), back[i] = (size_t)(i + me);
    DO(ALL_REDUCE, dt_all_reduce(dp, in, out, 7, DT_F32, DT_SUM));
    DO(REDUCE, dt_reduce(dp, in, out, 7, DT_F32, DT_SUM, n - 1));
    DO(REDUCE_SCATTER, dt_reduce_scatter(dp, in, out, 5, DT_F32, DT_SUM));
    DO(ALL_GATHER, dt_all_gather(dp, in, out, 5, DT_F32));
    DO(GATHER, dt_gather(dp, in, out, 5, DT_F32, 0));
    DO(SCATTER, dt_scatter(dp, in, out, 3, DT_F32, 0));
    DO(ALL_TO_ALL, dt_all_to_all(dp, in, out, 3, DT_F32));
    DO(ALL_TO_ALL_V, dt_all_to_all_v(dp, in, counts, out, back, DT_F32));
    DO(BROADCAST, dt_broadcast(dp, out, 9, DT_F32, 0));
    DO(BARRIER, dt_barrier(dp));
    DO(SUM_DOUBLES, dt_sum_doubles(dp, &d, 1));
    DO(AGREE, dt_agree(dp, DT_OK));
}

/* Messages around the ring: some eager, some too large for that, one received from any. */
static void messages(dt_ctx *ctx, dt_comm *dp, tally *t, int any) {
    enum { LONG = 3000 };
    static float zeros[LONG];
    float *in = zeros, *out = (float *)malloc(LONG * sizeof *out);
    int n = dt_comm_size(dp), me = dt_comm_rank(dp), right = (me + 1) % n, left = (me + n - 1) % n;
    dt_work *w[4];
    for (int i = 0; i < 3; i++) {
        DO(SEND, dt_send(dp, in, (size_t)(5 + i), DT_F32, right, i));
    }
    for (int i = 2; i >= 0; i--) {
        if (i == 1 && any)
            DO(RECEIVE, dt_recv_any(dp, out, 6, DT_F32, 1, NULL));
        else
            DO(RECEIVE, dt_recv(dp, out, (size_t)(5 + i), DT_F32, left, i));
    }
    if (n > 1) { /* a blocking send of this size to the same rank would deadlock */
        w[0] = dt_recv_start(dp, out, LONG, DT_F32, left, 9);
        w[1] = dt_send_start(dp, in, LONG, DT_F32, right, 9);
        w[2] = dt_send_start(dp, in, 3, DT_F32, right, 9);
        WAIT(SEND, w[1]);
        WAIT(RECEIVE, w[0]);
        w[3] = dt_recv_start(dp, out, 3, DT_F32, left, 9);
        WAIT(RECEIVE, w[3]);
        WAIT(SEND, w[2]);
    }
    free(out);
}

/* Concurrent started operations, with blocking ones in between. */
static void overlap(dt_ctx *ctx, dt_comm *dp, tally *t) {
    float a[3][16], b[3][16];
    dt_work *w[3];
    memset(a, 0, sizeof a);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 3; i++) w[i] = dt_all_reduce_start(dp, a[i], b[i], 16, DT_F32, DT_SUM);
        DO(BARRIER, dt_barrier(dp));
        for (int i = 2; i >= 0; i--) WAIT(ALL_REDUCE, w[i]);
    }
}

static dt_tensor *layer(dt_tensor *x, void *user) {
    dt_tensor *w = (dt_tensor *)user;
    dt_trace_begin(x->ctx, "in the layer");
    dt_tensor *y = dt_linear(x, w, NULL);
    dt_trace_end(x->ctx);
    return y;
}

/* Two micro-batches through two blocks, the second recomputed. */
static double step(dt_ctx *ctx, dt_tensor **w, const float *x) {
    double loss = 0;
    for (int micro = 0; micro < 2; micro++) {
        dt_micro(ctx, micro, 2);
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(4, 8), x);
        dt_tensor *h = dt_block(ctx, layer, in, w[0]);
        h = dt_block_at(ctx, layer, h, w[1], (dt_block_desc){ .recompute = 1 });
        dt_tensor *mse = dt_mse(h, in, 32);
        dt_backward(mse);
        loss += dt_item(mse);
        dt_reset(ctx);
    }
    dt_clear_grads(ctx);
    return loss;
}

static const char *const odd_names[] = { "a \"quoted\" \\ name", "line\nbreak \x01\x1f\x7f",
    "\xc3\xa4\xe2\x82\xac", "bad \xff\xc3",
    "cut in a character: 012345678901234567\xc3\xa4\xc3\xa4", "" };
enum { ODD_NAMES = sizeof odd_names / sizeof *odd_names };

static dt_status trace_everything(dt_ctx *ctx, void *user) {
    shared *s = (shared *)user;
    dt_comm *world = dt_world(ctx);
    tally *t = &s->of[dt_comm_rank(world)];
    dt_tensor *w[2] = { dt_param(ctx, "w0", DT_SHAPE(8, 8), DT_NORMAL(1)),
        dt_param(ctx, "w1", DT_SHAPE(8, 8), DT_NORMAL(1)) };
    float x[32];
    for (int i = 0; i < 32; i++) x[i] = (float)(i % 7) / 7;
    t->loss[0] = step(ctx, w, x);
    dt_trace_start(ctx, 4096);
    double from = dt_comm_seconds(ctx);
    dt_comm *dp = dt_comm_split(world, 0, dt_comm_rank(world), "d\"\\\n\xff");
    t->seconds += dt_comm_seconds(ctx) - from;
    t->splits += s->ranks > 0 ? 2 : 1;
    dt_comm_set_axis(dp, DT_AXIS_DP);
    t->loss[1] = step(ctx, w, x);
    blocking(ctx, dp, t);
    messages(ctx, dp, t, s->ranks > 0);
    overlap(ctx, dp, t);
    size_t allocations = dt_memory_used(ctx).allocations;
    step(ctx, w, x);
    blocking(ctx, dp, t);
    overlap(ctx, dp, t);
    for (int i = 0; i < ODD_NAMES; i++) dt_trace_begin(ctx, odd_names[i]), t->marks++;
    for (int i = 0; i < ODD_NAMES + 3; i++) dt_trace_end(ctx); /* surplus calls do nothing */
    t->allocations = dt_memory_used(ctx).allocations - allocations;
    dt_comm_set_algorithm(dp, DT_RING);
    blocking(ctx, dp, t);
    t->lost = dt_trace_lost(ctx);
    size_t bytes = sent(ctx), messages_sent = dt_comm_traffic(ctx).messages;
    double seconds = dt_comm_seconds(ctx);
    dt_trace_begin(ctx, "still open");
    dt_trace_write(world, path);
    CHECK(sent(ctx) == bytes && dt_comm_seconds(ctx) == seconds &&
          dt_comm_traffic(ctx).messages == messages_sent);
    return dt_error(ctx);
}

/* ---- the file ---- */

typedef struct slice {
    char ph, name[128], cat[24], group[64], algorithm[16];
    int pid, tid, started, peer;
    int64_t ts, dur, bytes, seq, id; /* nanoseconds */
} slice;

typedef struct traced {
    slice *v;
    int n;
    int lost[MAX_RANKS];
} traced;

static void copy_string(const dt_json *j, int node, const char *key, char *out, size_t room) {
    size_t bytes = 0;
    const char *s = dt_json_string(j, dt_json_find(j, node, key), &bytes);
    if (s) snprintf(out, room, "%s", s);
}

static int64_t ns_of(const dt_json *j, int node, const char *key) {
    double us = NAN;
    dt_json_number(j, dt_json_find(j, node, key), &us);
    CHECK_MSG(isfinite(us) && us >= 0, "time %s is %g", key, us);
    return (int64_t)llround(us * 1000);
}

static int int_of(const dt_json *j, int node, const char *key, int none) {
    int64_t x = none;
    dt_json_int(j, dt_json_find(j, node, key), &x);
    return (int)x;
}

static void read_event(const dt_json *j, int node, slice *s) {
    char ph[8] = "";
    memset(s, 0, sizeof *s);
    copy_string(j, node, "ph", ph, sizeof ph);
    s->ph = ph[0];
    copy_string(j, node, "name", s->name, sizeof s->name);
    copy_string(j, node, "cat", s->cat, sizeof s->cat);
    s->pid = int_of(j, node, "pid", -1);
    s->tid = int_of(j, node, "tid", -1);
    CHECK_MSG(strchr("XMCsf", s->ph) && strlen(ph) == 1 && s->pid >= 0 && s->tid >= 0,
        "unexpected event phase '%s'", ph);
    if (s->ph != 'M') s->ts = ns_of(j, node, "ts");
    if (s->ph == 'X') s->dur = ns_of(j, node, "dur");
    dt_json_int(j, dt_json_find(j, node, "id"), &s->id);
    int args = dt_json_find(j, node, "args");
    if (args < 0) return;
    copy_string(j, args, "group", s->group, sizeof s->group);
    copy_string(j, args, "algorithm", s->algorithm, sizeof s->algorithm);
    s->peer = int_of(j, args, "peer", -1);
    dt_json_int(j, dt_json_find(j, args, "bytes"), &s->bytes);
    dt_json_int(j, dt_json_find(j, args, "seq"), &s->seq);
    dt_json_bool(j, dt_json_find(j, args, "started"), &s->started);
    if (s->ph == 'M') copy_string(j, args, "name", s->group, sizeof s->group);
    if (s->ph == 'C') dt_json_int(j, dt_json_find(j, args, "acts"), &s->bytes);
}

static traced read_trace(const char *file) {
    traced t = { (slice *)calloc(SLICES, sizeof(slice)), 0, { 0 } };
    size_t bytes = 0;
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ 0 });
    char *text = dt_file_read(ctx, file, (size_t)1 << 26, &bytes);
    dt_json *j = text ? dt_json_parse(ctx, file, text, bytes) : NULL;
    int events = j ? dt_json_find(j, 0, "traceEvents") : -1,
        other = j ? dt_json_find(j, 0, "otherData") : -1;
    CHECK_MSG(events >= 0, "%s: %s", file, dt_error_text(ctx));
    for (int i = 0; events >= 0 && i < dt_json_count(j, events) && t.n < SLICES; i++)
        read_event(j, dt_json_at(j, events, i), &t.v[t.n++]);
    int lost = j ? dt_json_find(j, other, "lost") : -1;
    for (int i = 0; lost >= 0 && i < dt_json_count(j, lost) && i < MAX_RANKS; i++) {
        int64_t n = 0;
        dt_json_int(j, dt_json_at(j, lost, i), &n);
        t.lost[i] = (int)n;
    }
    if (j) dt_json_free(j);
    if (text) dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
    dt_ctx_free(ctx);
    return t;
}

/* In every track each slice is inside the open slice or after it, and the file is in this order. */
static void check_nesting(const traced *t, const char *what) {
    for (int pid = 0; pid < MAX_RANKS; pid++) {
        for (int tid = 0; tid < 64; tid++) {
            int64_t open[64], before = 0;
            int depth = 0, wrong = 0;
            for (int i = 0; i < t->n; i++) {
                const slice *s = &t->v[i];
                if (s->ph != 'X' || s->pid != pid || s->tid != tid) continue;
                wrong += s->ts < before;
                before = s->ts;
                while (depth > 0 && s->ts >= open[depth - 1] &&
                       !(s->dur == 0 && s->ts == open[depth - 1]))
                    depth--;
                wrong += depth > 0 && s->ts + s->dur > open[depth - 1];
                if (depth < 64) open[depth++] = s->ts + s->dur;
                wrong += tid > 0 && depth > 1 && s->dur > 0;
            }
            CHECK_MSG(wrong == 0, "%s: %d slices of rank %d, track %d do not nest", what, wrong,
                pid, tid);
        }
    }
}

static int has_prefix(const char *s, const char *prefix) {
    size_t n = strlen(prefix);
    return strncmp(s, prefix, n) == 0 && s[n] == ' ';
}

static void check_operations(const traced *t, const shared *s, int rank, const char *what) {
    const tally *own = &s->of[rank];
    double seconds = 0;
    int ops = 0, started = 0, waits = 0, splits = 0;
    for (int k = 0; k < KINDS; k++) {
        int calls = 0;
        int64_t bytes = 0;
        for (int i = 0; i < t->n; i++) {
            const slice *e = &t->v[i];
            if (e->ph != 'X' || e->pid != rank || strcmp(e->cat, "comm") != 0) continue;
            if (!has_prefix(e->name, kinds[k])) continue;
            calls++;
            bytes += e->bytes;
        }
        CHECK_MSG(calls == own->calls[k], "%s, rank %d: %d slices of %s, called %d times", what,
            rank, calls, kinds[k], own->calls[k]);
        CHECK_MSG((size_t)bytes == own->bytes[k], "%s, rank %d: %lld bytes of %s, counted %zu",
            what, rank, (long long)bytes, kinds[k], own->bytes[k]);
        ops += calls;
    }
    for (int i = 0; i < t->n; i++) {
        const slice *e = &t->v[i];
        if (e->ph != 'X' || e->pid != rank) continue;
        waits += strcmp(e->cat, "wait") == 0;
        CHECK_MSG((strcmp(e->cat, "comm") == 0) == (e->tid > 0), "%s: %s in track %d", what,
            e->name, e->tid);
        if (strcmp(e->cat, "comm") != 0) continue;
        splits += has_prefix(e->name, "dt_comm_split");
        started += e->started;
        if (!e->started) seconds += 1e-9 * (double)e->dur;
        if (!e->started) CHECK(e->tid == 1);
    }
    CHECK_MSG(waits == own->waits && started == own->waits, "%s: %d waits, %d started", what, waits,
        started);
    CHECK_MSG(splits == own->splits, "%s: %d splits", what, splits);
    CHECK_MSG(fabs(seconds - own->seconds) <= 2e-9 * (ops + 2),
        "%s: slices of %.9f s, dt_comm_seconds %.9f", what, seconds, own->seconds);
}

static int count_named(const traced *t, int rank, const char *cat, const char *name) {
    int n = 0;
    for (int i = 0; i < t->n; i++) {
        const slice *e = &t->v[i];
        n += e->ph == 'X' && e->pid == rank && strcmp(e->cat, cat) == 0 &&
             strcmp(e->name, name) == 0;
    }
    return n;
}

static void check_compute(const traced *t, int rank, const char *what) {
    static const char *const blocks[][2] = { { "fwd", "F 0 block 1" }, { "fwd", "F 1 block 1" },
        { "fwd", "F 0 block 2" }, { "recompute", "F 1 block 2 again" },
        { "recompute", "F 0 block 2 again" }, { "bwd", "B 0" }, { "bwd", "B 1" },
        { "bwd", "B 0 block 1" }, { "bwd", "B 1 block 2" } };
    static const char *const names[ODD_NAMES] = { "a \"quoted\" \\ name",
        "line\nbreak \x01\x1f\x7f", "\xc3\xa4\xe2\x82\xac", "bad \xef\xbf\xbd\xef\xbf\xbd",
        "cut in a character: 012345678901234567\xef\xbf\xbd", "" };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        CHECK_MSG(count_named(t, rank, blocks[i][0], blocks[i][1]) == 2, "%s: %d of %s %s", what,
            count_named(t, rank, blocks[i][0], blocks[i][1]), blocks[i][0], blocks[i][1]);
    for (int i = 0; i < ODD_NAMES; i++)
        CHECK_MSG(count_named(t, rank, "mark", names[i]) == 1, "%s: mark '%s'", what, names[i]);
    CHECK(count_named(t, rank, "mark", "in the layer") == 2 * 2 * 3);
    CHECK(count_named(t, rank, "mark", "still open") == 0);
    int memory = 0, process = 0, tracks = 0;
    int64_t most = 0;
    for (int i = 0; i < t->n; i++) {
        const slice *e = &t->v[i];
        if (e->pid != rank) continue;
        memory += e->ph == 'C' && strcmp(e->name, "memory") == 0;
        if (e->ph == 'C' && e->bytes > most) most = e->bytes;
        process +=
            e->ph == 'M' && strcmp(e->name, "process_name") == 0 && e->group[5] == '0' + rank;
        if (e->ph == 'M' && strcmp(e->name, "thread_name") == 0)
            tracks |= strcmp(e->group, "compute") == 0 ? 1 : strcmp(e->group, "comm") == 0 ? 2 : 4;
        if (e->ph == 'X' && strcmp(e->cat, "comm") == 0 && e->group[0] == 'd')
            CHECK_MSG(
                strcmp(e->group, "d\"\\\n\xef\xbf\xbd") == 0, "%s: group '%s'", what, e->group);
    }
    CHECK_MSG(memory >= 2 && most > 0 && process == 1 && (tracks & 3) == 3,
        "%s: %d memory, %d process, %d tracks", what, memory, process, tracks);
}

static int is_in(const slice *s, const slice *e) {
    return e->pid == s->pid && e->tid == s->tid && e->ts <= s->ts && s->ts <= e->ts + e->dur;
}

/* Each arrow has two ends: the first in a send, the second in the matching receive of the other
   rank, not earlier. */
static void check_arrows(const traced *t, int ranks, double slack, const char *what) {
    int begins = 0, receives = 0, all_ends = 0;
    for (int i = 0; i < t->n; i++) {
        const slice *s = &t->v[i], *f = NULL, *from = NULL, *to = NULL;
        receives += s->ph == 'X' && has_prefix(s->name, "receive") && s->cat[0] == 'c';
        all_ends += s->ph == 'f';
        if (s->ph != 's') continue;
        begins++;
        int ends = 0;
        for (int k = 0; k < t->n; k++)
            if (t->v[k].ph == 'f' && t->v[k].id == s->id && strcmp(t->v[k].cat, s->cat) == 0)
                f = &t->v[k], ends++;
        CHECK_MSG(ends == 1, "%s: arrow %lld has %d ends", what, (long long)s->id, ends);
        for (int k = 0; k < t->n && f; k++) {
            const slice *e = &t->v[k];
            if (e->ph != 'X' || strcmp(e->cat, "comm") != 0) continue;
            if (has_prefix(e->name, "send") && is_in(s, e)) from = e;
            if (has_prefix(e->name, "receive") && is_in(f, e)) to = e;
        }
        CHECK_MSG(from && to && from->peer == f->pid && to->peer == s->pid,
            "%s: an arrow's end is not inside its slice", what);
        int64_t length = f ? f->ts - s->ts : 0;
        CHECK_MSG(
            (double)length >= -1e9 * slack, "%s: an arrow of %lld ns", what, (long long)length);
    }
    CHECK_MSG(begins == receives && begins == all_ends && begins > 0,
        "%s: %d arrows with %d ends, %d receives of %d ranks", what, begins, all_ends, receives,
        ranks);
}

static void test_backend(dt_backend backend, int ranks) {
    shared s;
    char what[64];
    dt_run_desc desc = {
        .ranks = ranks, .backend = backend, .timeout_s = 60, .user_bytes = sizeof s
    };
    snprintf(what, sizeof what, "%s, %d ranks", backend == DT_BACKEND_PROCS ? "procs" : "threads",
        ranks);
    memset(&s, 0, sizeof s);
    s.ranks = ranks;
    CHECK(dt_run(desc, trace_everything, &s) == DT_OK);
    traced t = read_trace(path);
    check_nesting(&t, what);
    for (int rank = 0; rank < ranks; rank++) {
        check_operations(&t, &s, rank, what);
        check_compute(&t, rank, what);
        CHECK_MSG(s.of[rank].loss[0] == s.of[rank].loss[1] && s.of[rank].loss[0] > 0,
            "%s: loss %.17g without a trace, "
            "%.17g with one",
            what, s.of[rank].loss[0], s.of[rank].loss[1]);
        CHECK_MSG(UNDER_ASAN || s.of[rank].allocations == 0, "%s: %zu allocations in a step", what,
            s.of[rank].allocations);
        CHECK(s.of[rank].lost == 0 && t.lost[rank] == 0);
    }
    check_arrows(&t, ranks, 0, what);
    int rings = 0;
    for (int i = 0; i < t.n; i++) rings += strcmp(t.v[i].algorithm, "ring") == 0;
    CHECK_MSG((rings > 0) == (ranks > 1), "%s: %d slices with the ring's name", what, rings);
    free(t.v);
    remove(path);
}

/* ---- a ring that overflows ---- */

static int notices;
static void count_log(void *user, int level, int rank, const char *text) {
    (void)user;
    (void)rank;
    if (level == DT_LOG_NOTICE && strstr(text, "lost"))
        __atomic_fetch_add(&notices, 1, __ATOMIC_SEQ_CST);
}

static void mark(dt_ctx *ctx, int i) {
    char name[16];
    snprintf(name, sizeof name, "m%d", i);
    dt_trace_begin(ctx, name);
    dt_trace_end(ctx);
}

static dt_status overflow(dt_ctx *ctx, void *user) {
    int me = dt_ctx_rank(ctx);
    (void)user;
    dt_trace_start(ctx, 50);
    /* rank 0's ring has room, rank 1's overflows */
    for (int i = 0; i < 30 + 170 * me; i++) mark(ctx, i);
    /* one of the lost events is a memory event */
    CHECK_MSG(dt_trace_lost(ctx) == (me ? 151u : 0u), "%zu lost", dt_trace_lost(ctx));
    dt_trace_write(dt_world(ctx), path);
    for (int i = 0; i < 25; i++) mark(ctx, 1000 + i);
    char second[300];
    snprintf(second, sizeof second, "%s.2", path);
    dt_trace_write(dt_world(ctx), second);
    CHECK(dt_trace_start(ctx, 5) == DT_ERR_ARG);
    return DT_OK;
}

/* Marks m<first>, m<first + 1>, .. in order, and nothing before them. */
static void check_marks(const traced *t, int rank, int want, int first, int gap_at, int then) {
    int n = 0, next = first;
    for (int i = 0; i < t->n; i++) {
        if (t->v[i].ph != 'X' || t->v[i].pid != rank) continue;
        CHECK_MSG(atoi(t->v[i].name + 1) == next, "mark %d of rank %d is %s, not m%d", n, rank,
            t->v[i].name, next);
        next = ++n == gap_at ? then : next + 1;
    }
    CHECK_MSG(n == want, "rank %d: %d marks are kept, not %d", rank, n, want);
}

static void test_overflow(void) {
    char second[300];
    dt_host host = *dt_host_default();
    dt_run_desc desc = { .ranks = 2, .timeout_s = 60, .host = &host };
    host.log = count_log;
    snprintf(second, sizeof second, "%s.2", path);
    CHECK(dt_run(desc, overflow, NULL) == DT_ERR_ARG); /* because of the second dt_trace_start */
    traced t = read_trace(path);
    check_marks(&t, 0, 30, 0, 0, 0);
    check_marks(&t, 1, 50, 150, 0, 0);
    CHECK(t.lost[0] == 0 && t.lost[1] == 151);
    free(t.v);
    t = read_trace(second);
    /* writing the trace has cached work objects, so there is one more memory event: 31 + 26 events
       are 7 too many, one of them a memory event */
    check_marks(&t, 0, 49, 6, 24, 1000);
    check_marks(&t, 1, 49, 176, 24, 1000);
    CHECK_MSG(t.lost[0] == 7 && t.lost[1] == 177, "%d and %d lost", t.lost[0], t.lost[1]);
    CHECK_MSG(notices == 3, "%d notices of lost events", notices);
    free(t.v);
    remove(path);
    remove(second);
}

/* The ring of one rank has lost the first messages: these have no arrows, and the other messages
   keep theirs. */
static dt_status lossy_messages(dt_ctx *ctx, void *user) {
    int me = dt_ctx_rank(ctx), lossy = *(int *)user;
    dt_trace_start(ctx, me == lossy ? 5 : 100);
    for (int i = 0; i < 20; i++) {
        if (me)
            dt_recv(dt_world(ctx), &i, 1, DT_I32, 0, 3);
        else
            dt_send(dt_world(ctx), &i, 1, DT_I32, 1, 3);
    }
    return dt_trace_write(dt_world(ctx), path);
}

static void test_lost_arrows(void) {
    dt_host host = *dt_host_default();
    dt_run_desc desc = { .ranks = 2, .timeout_s = 60, .host = &host };
    host.log = count_log;
    for (int lossy = 0; lossy < 2; lossy++) {
        CHECK(dt_run(desc, lossy_messages, &lossy) == DT_OK);
        traced t = read_trace(path);
        if (lossy == 1) check_arrows(&t, 2, 0, "forgetful receiver");
        int begins = 0, ends = 0;
        for (int i = 0; i < t.n; i++) begins += t.v[i].ph == 's', ends += t.v[i].ph == 'f';
        CHECK_MSG(begins == 5 && ends == 5, "%d arrows with %d ends for 5 messages that both know",
            begins, ends);
        free(t.v);
        remove(path);
    }
}

/* ---- marks that do not match blocks ---- */

static dt_tensor *unbalanced_marks_layer(dt_tensor *x, void *user) {
    (void)user;
    dt_trace_end(x->ctx); /* must not end the mark outside the block */
    dt_trace_begin(x->ctx, "never ended");
    return dt_add(x, x);
}

static dt_status misuse(dt_ctx *ctx, void *user) {
    float one = 1;
    (void)user;
    dt_trace_begin(ctx, "before the trace");
    dt_trace_end(ctx);
    CHECK(dt_trace_lost(ctx) == 0);
    dt_trace_start(ctx, 0);
    dt_trace_end(ctx);
    dt_trace_begin(ctx, "outside");
    dt_block(ctx, unbalanced_marks_layer, dt_input(ctx, DT_F32, DT_SHAPE(1), &one), NULL);
    dt_trace_end(ctx);
    for (int i = 0; i < 40; i++) dt_trace_begin(ctx, "deep");
    for (int i = 0; i < 40; i++) dt_trace_end(ctx);
    dt_trace_begin(ctx, NULL);
    dt_trace_end(ctx);
    CHECK_MSG(dt_trace_lost(ctx) == 8, "%zu are too deep", dt_trace_lost(ctx));
    return dt_trace_write(dt_world(ctx), path);
}

static void test_misuse(void) {
    dt_host host = *dt_host_default();
    dt_run_desc desc = { .ranks = 1, .timeout_s = 60, .host = &host };
    host.log = count_log;
    CHECK(dt_run(desc, misuse, NULL) == DT_OK);
    traced t = read_trace(path);
    check_nesting(&t, "misuse");
    CHECK(count_named(&t, 0, "mark", "outside") == 1 &&
          count_named(&t, 0, "mark", "never ended") == 1);
    CHECK(count_named(&t, 0, "mark", "deep") == 32 &&
          count_named(&t, 0, "mark", "before the trace") == 0);
    const slice *out = NULL, *block = NULL, *never = NULL;
    for (int i = 0; i < t.n; i++) {
        if (strcmp(t.v[i].name, "outside") == 0) out = &t.v[i];
        if (strcmp(t.v[i].name, "F 0 block 1") == 0) block = &t.v[i];
        if (strcmp(t.v[i].name, "never ended") == 0) never = &t.v[i];
    }
    CHECK(out && block && never && out < block && block < never &&
          never->ts + never->dur <= block->ts + block->dur);
    free(t.v);
    remove(path);
    CHECK(dt_trace_write(NULL, path) == DT_ERR_ARG && dt_trace_start(NULL, 1) != DT_OK &&
          dt_trace_lost(NULL) == 0);
    dt_trace_begin(NULL, "x");
    dt_trace_end(NULL);
}

/* ---- files that cannot be written ---- */

static int writes_left = -1; /* writes before the disk is full; below 0: unlimited */

static int64_t full_pwrite(void *user, int fd, const void *buf, size_t bytes, int64_t offset) {
    (void)user;
    if (writes_left == 0) {
        errno = ENOSPC;
        return -1;
    }
    if (writes_left > 0) writes_left--;
    return dt_io_default()->pwrite(NULL, fd, buf, bytes, offset);
}

static dt_status write_to(dt_ctx *ctx, void *user) {
    dt_trace_start(ctx, 2000);
    for (int i = 0; i < 1000; i++) mark(ctx, i);
    return dt_trace_write(dt_world(ctx), (const char *)user);
}

static void test_no_file(void) {
    char temp[300], missing[] = "no/such/folder/trace.json";
    dt_report report;
    dt_io io = *dt_io_default();
    dt_host host = *dt_host_default();
    dt_run_desc desc = { .ranks = 3, .timeout_s = 60, .report = &report, .io = &io, .host = &host };
    io.pwrite = full_pwrite;
    host.log = count_log;
    CHECK(dt_run(desc, write_to, missing) == DT_ERR_IO);
    CHECK_MSG(
        report.rank == 0 && strstr(report.text, missing) && strstr(report.text, "No such file"),
        "unexpected text: %s", report.text);
    snprintf(temp, sizeof temp, "%s.tmp", path);
    for (int left = 0; left < 4; left++) { /* the old file remains, and no temporary file */
        FILE *old = fopen(path, "w");
        fputs("old", old);
        fclose(old);
        writes_left = left;
        CHECK(dt_run(desc, write_to, path) == DT_ERR_IO);
        writes_left = -1;
        CHECK_MSG(strstr(report.text, "No space left"), "unexpected text: %s", report.text);
        char text[8] = "";
        old = fopen(path, "r");
        CHECK(old && fgets(text, sizeof text, old) && strcmp(text, "old") == 0);
        if (old) fclose(old);
        CHECK(fopen(temp, "r") == NULL);
    }
    remove(path);
}

/* ---- ranks with different clocks, over a transport ---- */

/* Packets in memory. The packets to a rank arrive in the order of their sends. */
typedef struct letter {
    int used, from, to;
    size_t bytes;
    uint64_t data[DT_PACKET_BYTES / 8];
    long order;
} letter;
typedef struct post {
    pthread_mutex_t lock;
    letter box[512];
    long order;
} post;
typedef struct end {
    post *post;
    int rank;
    double ahead;
    letter *received; /* in use until the next post_recv */
} end;

static int post_send(
    void *user, int to, const void *head, size_t head_bytes, const void *body, size_t body_bytes) {
    end *e = (end *)user;
    int i = 0;
    pthread_mutex_lock(&e->post->lock);
    while (i < 512 && e->post->box[i].used) i++;
    if (i < 512) {
        letter *l = &e->post->box[i];
        l->used = 1, l->from = e->rank, l->to = to, l->bytes = head_bytes + body_bytes;
        l->order = e->post->order++;
        memcpy(l->data, head, head_bytes);
        if (body_bytes) memcpy((char *)l->data + head_bytes, body, body_bytes);
    }
    pthread_mutex_unlock(&e->post->lock);
    return i < 512;
}

static const void *post_recv(void *user, int from, int *sender, size_t *bytes) {
    end *e = (end *)user;
    letter *found = NULL;
    pthread_mutex_lock(&e->post->lock);
    if (e->received) e->received->used = 0;
    for (int i = 0; i < 512; i++) {
        letter *l = &e->post->box[i];
        if (!l->used || l->to != e->rank || (from != DT_ANY && l->from != from)) continue;
        if (!found || l->order < found->order) found = l;
    }
    if (found) *sender = found->from, *bytes = found->bytes;
    e->received = found;
    pthread_mutex_unlock(&e->post->lock);
    return found ? found->data : NULL;
}

static double skewed_now(void *user) { return dt_host_default()->now(NULL) + ((end *)user)->ahead; }
static void *skewed_alloc(void *user, size_t bytes, dt_mem mem) {
    (void)user;
    return dt_host_default()->alloc(NULL, bytes, mem);
}

typedef struct job {
    end end;
    int ranks;
    shared *shared;
    dt_status status;
    pthread_t thread;
} job;

static void *transport_rank(void *arg) {
    job *j = (job *)arg;
    dt_host host = *dt_host_default();
    dt_transport transport = {
        .name = "post", .user = &j->end, .send = post_send, .recv = post_recv
    };
    host.user = &j->end;
    host.now = skewed_now;
    host.alloc = skewed_alloc;
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .rank = j->end.rank, .host = &host });
    dt_attach_desc desc = {
        .rank = j->end.rank, .transport = &transport, .size = j->ranks, .timeout_s = 60
    };
    dt_comm_attach(ctx, desc);
    j->status = trace_everything(ctx, j->shared);
    CHECK_MSG(j->status == DT_OK, "%s", dt_error_text(ctx));
    dt_comm_detach(ctx, j->status);
    dt_ctx_free(ctx);
    return NULL;
}

static void test_transport(int ranks) {
    static post p; /* 4 MB; the packets of an earlier run are dropped */
    memset(&p, 0, sizeof p);
    pthread_mutex_init(&p.lock, NULL);
    shared s;
    job jobs[MAX_RANKS];
    /* without receives from any rank, after which clock offsets are unknown */
    memset(&s, 0, sizeof s);
    for (int i = 0; i < ranks; i++) {
        double ahead = (i * 37 % 5 - 2) * 1000.0 + 5000;
        jobs[i] =
            (job){ .end = { .post = &p, .rank = i, .ahead = ahead }, .ranks = ranks, .shared = &s };
        pthread_create(&jobs[i].thread, NULL, transport_rank, &jobs[i]);
    }
    for (int i = 0; i < ranks; i++) pthread_join(jobs[i].thread, NULL);
    traced t = read_trace(path);
    for (int rank = 0; rank < ranks; rank++) {
        s.of[rank].splits = 2;
        check_operations(&t, &s, rank, "transport");
    }
    check_nesting(&t, "transport");
    check_arrows(&t, ranks, 0.2, "transport");
    /* clocks differ by up to 4000 s; after alignment all ranks must be in the barrier at the same
       time */
    int64_t last_in = 0, first_out = INT64_MAX;
    for (int rank = 0; rank < ranks; rank++) {
        for (int i = 0; i < t.n; i++) {
            const slice *e = &t.v[i];
            if (e->ph != 'X' || e->pid != rank || !has_prefix(e->name, "barrier") ||
                strcmp(e->cat, "comm"))
                continue;
            if (e->ts > last_in) last_in = e->ts;
            if (e->ts + e->dur < first_out) first_out = e->ts + e->dur;
            break;
        }
    }
    double late = 1e-9 * (double)(last_in - first_out);
    CHECK_MSG(late < 0.2, "in the first barrier a rank is %.3f s late", late);
    free(t.v);
    remove(path);
}

/* ---- a simulated link that delays started operations ---- */

static dt_status overlapped_link(dt_ctx *ctx, void *user) {
    float a[256] = { 0 }, b[256];
    (void)user;
    dt_trace_start(ctx, 100);
    dt_work *w = dt_all_reduce_start(dt_world(ctx), a, b, 256, DT_F32, DT_SUM);
    dt_trace_begin(ctx, "compute");
    double until = dt_ctx_host(ctx)->now(dt_ctx_host(ctx)->user) + 0.1;
    while (dt_ctx_host(ctx)->now(dt_ctx_host(ctx)->user) < until) dt_test(ctx, w);
    dt_trace_end(ctx);
    dt_wait(ctx, w);
    return dt_trace_write(dt_world(ctx), path);
}

/* 20 ms on the link during 100 ms of work: the operation ends before the work, so no rank waits. */
static void test_overlapped_link(void) {
    dt_run_desc desc = { .ranks = 2, .timeout_s = 60, .link = { 0.02, 0 } };
    CHECK(dt_run(desc, overlapped_link, NULL) == DT_OK);
    traced t = read_trace(path);
    for (int i = 0; i < t.n; i++) {
        const slice *e = &t.v[i];
        if (strcmp(e->name, "all-reduce world") == 0)
            CHECK_MSG(e->started && e->tid == 1 && e->dur >= 19900000 && e->dur < 99000000,
                "the all-reduce took %lld ns", (long long)e->dur);
        if (strcmp(e->name, "wait all-reduce world") == 0)
            CHECK_MSG(e->dur < 50000000, "the wait took %lld ns", (long long)e->dur);
    }
    CHECK(count_named(&t, 0, "comm", "all-reduce world") == 1);
    CHECK(count_named(&t, 1, "wait", "wait all-reduce world") == 1);
    free(t.v);
    remove(path);
}

/* ---- cost: test_trace cost ---- */

/* Nanoseconds of one iteration, the minimum of 20 rounds. */
static double least(dt_ctx *ctx, int what) {
    enum { N = 50000 };
    const dt_host *host = dt_ctx_host(ctx);
    dt_comm *world = dt_world(ctx);
    double best = 1e30;
    for (int round = 0; round < 20; round++) {
        double from = host->now(host->user);
        for (int i = 0; i < N && what == 0; i++) dt_barrier(world);
        for (int i = 0; i < N && what == 1; i++) dt_trace_begin(ctx, "a mark"), dt_trace_end(ctx);
        for (int i = 0; i < N && what == 2; i++) host->now(host->user);
        double took = host->now(host->user) - from;
        if (took < best) best = took;
    }
    return 1e9 * best / N;
}

static dt_status cost(dt_ctx *ctx, void *user) {
    (void)user;
    double op = least(ctx, 0), marks = least(ctx, 1);
    printf("without: barrier of one rank %.1f ns, mark %.1f ns\n", op, marks);
    dt_trace_start(ctx, 65536);
    printf("with a trace: %.1f ns more, mark %.1f ns; ", least(ctx, 0) - op, least(ctx, 1));
    printf("reading the clock: %.1f ns\n", least(ctx, 2));
    double from = dt_ctx_host(ctx)->now(NULL);
    dt_trace_write(dt_world(ctx), path);
    printf("65536 events written in %.3f s\n", dt_ctx_host(ctx)->now(NULL) - from);
    return dt_error(ctx);
}

int main(int argc, char **argv) {
    snprintf(path, sizeof path, "/tmp/dt_test_trace.%d.json", (int)getpid());
    if (argc > 1 && strcmp(argv[1], "cost") == 0) {
        int failed = dt_run((dt_run_desc){ .ranks = 1 }, cost, NULL) != DT_OK;
        remove(path);
        return failed;
    }
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        test_backend(DT_BACKEND_THREADS, ranks);
        test_backend(DT_BACKEND_PROCS, ranks);
    }
    test_transport(2);
    test_transport(4);
    test_overflow();
    test_lost_arrows();
    test_misuse();
    test_no_file();
    test_overlapped_link();
    return check_done("test_trace");
}
