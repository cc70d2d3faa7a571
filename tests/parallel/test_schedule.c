/* test_schedule.c - schedules of dt_parallel.h: generators, lowering, checker, simulator,
   partitioning of a model, drawings The oracle is a machine that knows only the rules: at each
   clock tick every rank checks if the next action of its list may begin. The machine shares no code
   with the library. It finds a deadlock when no rank makes progress, and its times must equal the
   simulator's. Costs are integers, so all comparisons are ==. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_parallel.h"
#include "tests/support/check.h"
#include "tests/support/memory_io.h"
#include <limits.h>
#include <math.h>

// ==== Helpers ===================================================================================

static dt_host quiet; /* the default table without its log; main fills it */
static long blocks, calls, refuse_at;

static void silent(void *user, int level, int rank, const char *text) {
    (void)user;
    (void)level;
    (void)rank;
    (void)text;
}

static void *counting_alloc(void *user, size_t bytes, dt_mem mem) {
    if (++calls == refuse_at) return NULL;
    void *p = dt_host_default()->alloc(user, bytes, mem);
    if (p) memset(p, 0xA5, bytes); /* callers must not rely on zeroed memory */
    blocks += p != NULL;
    return p;
}

static void counting_free(void *user, void *p, size_t bytes, dt_mem mem) {
    blocks -= p != NULL;
    dt_host_default()->free(user, p, bytes, mem);
}

static dt_ctx *new_ctx(void) { return dt_ctx_make((dt_ctx_desc){ .host = &quiet }); }

static uint32_t random_state = 12345;
static int random_below(int n) { /* 0 .. n-1 */
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (uint32_t)n);
}

enum { MOST = 65536 };
static dt_span spans[MOST];

static const dt_schedule_costs even = { 1, 1, 1, NULL, 0 };

/* Writes a rank's actions as text, such as "F0.1 B3.0"; without chunk numbers if there is only
   one. */
static void list_actions(const dt_schedule *s, int rank, char *out, size_t bytes) {
    size_t used = 0;
    out[0] = 0;
    for (int i = 0; i < dt_schedule_count(s, rank) && used < bytes; i++) {
        const dt_action *a = &dt_schedule_actions(s, rank)[i];
        used += (size_t)snprintf(
            out + used, bytes - used, "%s%c%d", i ? " " : "", " FBIW"[a->phase], a -> micro);
        if (dt_schedule_chunks(s) > 1 && used < bytes)
            used += (size_t)snprintf(out + used, bytes - used, ".%d", a->chunk);
    }
}

static void expect_list(const dt_schedule *s, int rank, const char *want) {
    char got[1024];
    list_actions(s, rank, got, sizeof got);
    CHECK_MSG(
        strcmp(got, want) == 0, "%s, rank %d: %s, not %s", dt_schedule_name(s), rank, got, want);
}

/* A generator that reads such lists; user is an array with one list per rank. */
static void generate_lists(dt_schedule *s, void *user) {
    const char *const *rank = (const char *const *)user;
    for (int r = 0; r < dt_schedule_ranks(s); r++)
        for (const char *at = rank[r]; *at;) {
            dt_phase phase = (dt_phase)(strchr(" FBIW", *at) - " FBIW");
            char *end;
            int micro = (int)strtol(at + 1, &end, 10),
                chunk = *end == '.' ? (int)strtol(end + 1, &end, 10) : 0;
            dt_schedule_add(s, r, phase, micro, chunk);
            at = *end ? end + 1 : end;
        }
}

/* Makes a schedule from lists without the check, and expects dt_schedule_check to report `want`
   ("": correct). With the check, dt_schedule_make must fail with the same text. */
static void expect_text(
    int ranks, int micros, int chunks, const char *const *rank, int cycle, const char *want) {
    char text[1024], all[1200];
    dt_schedule_metrics metrics;
    dt_ctx *ctx = new_ctx();
    dt_schedule_desc d = { .ranks = ranks,
        .micros = micros,
        .chunks = chunks,
        .generate = generate_lists,
        .user = (void *)(uintptr_t)rank,
        .name = "lists",
        .unchecked = 1 };
    dt_schedule *s = dt_schedule_make(ctx, d);
    if (!CHECK_MSG(s != NULL, "%s", dt_error_text(ctx))) return;
    dt_status status = dt_schedule_check(s, &metrics, text, sizeof text);
    CHECK_MSG(strcmp(text, want) == 0, "'%s', not '%s'", text, want);
    CHECK_MSG(status == (*want ? DT_ERR_ARG : DT_OK) && metrics.cycle_length == cycle,
        "%d, a cycle of %d", status, metrics.cycle_length);
    CHECK(dt_error(ctx) == DT_OK);
    if (cycle || !*want)
        CHECK(dt_schedule_simulate(s, even, spans) == (cycle ? DT_ERR_ARG : DT_OK));
    CHECK(dt_error(ctx) == DT_OK);
    dt_schedule_free(s);
    d.unchecked = 0;
    s = dt_schedule_make(ctx, d);
    snprintf(all, sizeof all, "rank 0: dt_schedule_make(lists): %s", want);
    CHECK_MSG((s != NULL) == !*want && dt_error(ctx) == status, "made: %d, status %d", s != NULL,
        dt_error(ctx));
    if (*want)
        CHECK_MSG(strncmp(dt_error_text(ctx), all, strlen(dt_error_text(ctx))) == 0, "%s",
            dt_error_text(ctx));
    dt_ctx_free(ctx); /* frees s, too */
    CHECK_MSG(blocks == 0, "%ld blocks were not freed", blocks);
}

// ==== The machine ===============================================================================

enum { RANKS = 8, STAGES = 32, MICROS = 32, SLOTS = 256 };

typedef struct machine {
    int ranks, micros, stages;
    int forward[STAGES], input[STAGES], weight[STAGES], message;
    int rank_of[STAGES], chunk_of[STAGES];
    int at[RANKS], busy_until[RANKS];
    int begun[STAGES][MICROS][5], ended[STAGES][MICROS][5]; /* by phase; -1: not yet */
    /* the last user of a slot; -1: none yet */
    int slot_stage[RANKS][SLOTS], slot_micro[RANKS][SLOTS];
    int held[RANKS], most_held[RANKS], clash, makespan;
} machine;

static int machine_cost(const machine *m, const dt_action *a, int stage) {
    switch (a->phase) {
    case DT_FORWARD: return m->forward[stage];
    case DT_BACKWARD: return m->input[stage] + m->weight[stage];
    case DT_BACKWARD_INPUT: return m->input[stage];
    case DT_BACKWARD_WEIGHT: return m->weight[stage];
    }
    return 0;
}

/* Begin or end time of the backward that the previous stage waits for: that of B or I. */
static int machine_back(int times[STAGES][MICROS][5], int stage, int micro) {
    int b = times[stage][micro][DT_BACKWARD], i = times[stage][micro][DT_BACKWARD_INPUT];
    return b >= 0 ? b : i;
}

static int machine_arrived(const machine *m, int time, int sent, int from, int to) {
    return sent >= 0 && time >= sent + (m->rank_of[from] == m->rank_of[to] ? 0 : m->message);
}

/* 1 if the slot's content is no longer needed: its backward has ended and the receiver of its
   gradient has begun. */
static int machine_slot_free(machine *m, int rank, int slot, int time) {
    int stage = m->slot_stage[rank][slot], micro = m->slot_micro[rank][slot];
    if (stage < 0) return 1;
    int b = m->ended[stage][micro][DT_BACKWARD], w = m->ended[stage][micro][DT_BACKWARD_WEIGHT];
    int over = (b >= 0 && b <= time) || (w >= 0 && w <= time);
    return over && (stage == 0 || machine_back(m->begun, stage - 1, micro) >= 0);
}

static int machine_may_begin(machine *m, int rank, const dt_action *a, int stage, int time) {
    int own = m->ended[stage][a->micro][DT_FORWARD];
    if (a->phase == DT_FORWARD) {
        int sent = stage > 0 ? m->ended[stage - 1][a->micro][DT_FORWARD] : 0;
        if (stage > 0 && !machine_arrived(m, time, sent, stage - 1, stage)) return 0;
        return machine_slot_free(m, rank, a->slot, time);
    }
    if (a->phase == DT_BACKWARD_WEIGHT) {
        int i = m->ended[stage][a->micro][DT_BACKWARD_INPUT];
        return i >= 0 && i <= time;
    }
    if (own < 0 || own > time) return 0;
    return stage + 1 == m->stages ||
           machine_arrived(m, time, machine_back(m->ended, stage + 1, a->micro), stage + 1, stage);
}

static void machine_begin(
    machine *m, int rank, const dt_action *a, int stage, int time, dt_span *span) {
    int cost = machine_cost(m, a, stage);
    m->begun[stage][a->micro][a->phase] = time;
    m->ended[stage][a->micro][a->phase] = time + cost;
    m->busy_until[rank] = time + cost;
    if (time + cost > m->makespan) m->makespan = time + cost;
    if (a->phase == DT_FORWARD) {
        m->slot_stage[rank][a->slot] = stage;
        m->slot_micro[rank][a->slot] = a->micro;
        if (++m->held[rank] > m->most_held[rank]) m->most_held[rank] = m->held[rank];
    } else if (m->slot_stage[rank][a->slot] != stage || m->slot_micro[rank][a->slot] != a->micro)
        m->clash++;
    if (a->phase == DT_BACKWARD || a->phase == DT_BACKWARD_WEIGHT) m->held[rank]--;
    span->begin = time;
    span->end = time + cost;
}

/* Stage s is chunk s / ranks of rank s % ranks; every stage costs the same. */
static void machine_make(
    machine *m, int ranks, int chunks, int micros, int f, int i, int w, int message) {
    memset(m, 0, sizeof *m);
    m->ranks = ranks;
    m->micros = micros;
    m->stages = ranks * chunks;
    m->message = message;
    for (int s = 0; s < m->stages; s++) {
        m->rank_of[s] = s % ranks;
        m->chunk_of[s] = s / ranks;
        m->forward[s] = f;
        m->input[s] = i;
        m->weight[s] = w;
    }
}

static int is_v(int kind) { return kind == DT_SCHEDULE_ZBV || kind == DT_SCHEDULE_DUALPIPE_V; }

/* Places the stages in a V: rank r has stages r and 2 ranks - 1 - r. */
static void machine_in_v(machine *m) {
    for (int s = m->ranks; s < m->stages; s++) m->rank_of[s] = m->stages - 1 - s;
}

/* Returns 1 if all actions were executed, 0 on deadlock. */
static int machine_run(machine *m, const dt_schedule *s, dt_span *out) {
    int left = dt_schedule_offset(s, m->ranks), last = 0;
    memset(m->at, 0, sizeof m->at);
    memset(m->busy_until, 0, sizeof m->busy_until);
    memset(m->begun, -1, sizeof m->begun);
    memset(m->ended, -1, sizeof m->ended);
    memset(m->slot_stage, -1, sizeof m->slot_stage);
    memset(m->held, 0, sizeof m->held);
    memset(m->most_held, 0, sizeof m->most_held);
    m->clash = m->makespan = 0;
    for (int time = 0; left > 0 && time <= last + m->message; time++) {
        for (int again = 1; again;) {
            again = 0;
            for (int r = 0; r < m->ranks; r++) {
                if (m->at[r] == dt_schedule_count(s, r) || m->busy_until[r] > time) continue;
                const dt_action *a = &dt_schedule_actions(s, r)[m->at[r]];
                int stage = 0;
                while (m->rank_of[stage] != r || m->chunk_of[stage] != a->chunk) stage++;
                if (!machine_may_begin(m, r, a, stage, time)) continue;
                machine_begin(m, r, a, stage, time, &out[dt_schedule_offset(s, r) + m->at[r]]);
                if (m->busy_until[r] > last) last = m->busy_until[r];
                m->at[r]++;
                left--;
                again = 1;
            }
        }
    }
    return left == 0;
}

/* The simulator's times must equal the machine's for every action, and the reported numbers of
   slots and held micro-batches must be correct. */
static void expect_times(machine *m, const dt_schedule *s) {
    static dt_span want[MOST];
    double stages[STAGES * 3];
    dt_schedule_costs costs = { 0, 0, 0, stages, m->message };
    int all = dt_schedule_offset(s, m->ranks), wrong = 0;
    for (int i = 0; i < m->stages; i++) {
        stages[3 * i] = m->forward[i];
        stages[3 * i + 1] = m->input[i];
        stages[3 * i + 2] = m->weight[i];
    }
    if (!CHECK_MSG(machine_run(m, s, want), "%s deadlocks", dt_schedule_name(s))) return;
    if (!CHECK(dt_schedule_simulate(s, costs, spans) == DT_OK)) return;
    for (int i = 0; i < all; i++)
        wrong += spans[i].begin != want[i].begin || spans[i].end != want[i].end;
    CHECK_MSG(wrong == 0, "%s of %d ranks, %d micro-batches: %d of %d times differ",
        dt_schedule_name(s), m->ranks, m->micros, wrong, all);
    CHECK(m->clash == 0);
    CHECK(dt_schedule_bubble_of(s, spans, -1).makespan == m->makespan);
    for (int r = 0; r < m->ranks; r++) {
        int used = 0;
        for (int i = 0; i < dt_schedule_count(s, r); i++) {
            int slot = dt_schedule_actions(s, r)[i].slot;
            if (slot >= used) used = slot + 1;
        }
        CHECK_MSG(
            m->most_held[r] == dt_schedule_max_in_flight(s, r) && used == dt_schedule_slots(s, r),
            "%s, rank %d of %d: "
            "holds %d, reported %d; %d slots, reported %d",
            dt_schedule_name(s), r, m->ranks, m->most_held[r], dt_schedule_max_in_flight(s, r),
            used, dt_schedule_slots(s, r));
    }
}

/* The machine's makespan with a slot per micro-batch and chunk, so that no rank waits for a slot.
   Changes the slots of s. */
static int makespan_with_plenty(const machine *m, dt_schedule *s) {
    static machine plenty;
    static dt_span out[MOST];
    plenty = *m;
    for (int r = 0; r < m->ranks; r++)
        for (int i = 0; i < dt_schedule_count(s, r); i++) {
            dt_action *a = (dt_action *)(uintptr_t)&dt_schedule_actions(s, r)[i];
            a->slot = a->micro * dt_schedule_chunks(s) + a->chunk;
        }
    return machine_run(&plenty, s, out) ? plenty.makespan : -1;
}

// ==== 1. Generators =============================================================================

static void test_orders(void) {
    dt_ctx *ctx = new_ctx();
    dt_schedule *s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_NAIVE, .ranks = 2, .micros = 3 });
    for (int r = 0; r < 2; r++) expect_list(s, r, "F0 B0 F1 B1 F2 B2");
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_AFAB, .ranks = 2, .micros = 3 });
    for (int r = 0; r < 2; r++) expect_list(s, r, "F0 F1 F2 B0 B1 B2");
    CHECK(strcmp(dt_schedule_name(s), "AFAB") == 0 && dt_schedule_micro_group(s) == 0);
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_1F1B, .ranks = 3, .micros = 4 });
    expect_list(s, 0, "F0 F1 F2 B0 F3 B1 B2 B3");
    expect_list(s, 1, "F0 F1 B0 F2 B1 F3 B2 B3");
    expect_list(s, 2, "F0 B0 F1 B1 F2 B2 F3 B3");
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_1F1B, .ranks = 3, .micros = 1 });
    for (int r = 0; r < 3; r++) expect_list(s, r, "F0 B0");
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_INTERLEAVED, .ranks = 2, .micros = 4 });
    expect_list(
        s, 0, "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0");
    expect_list(
        s, 1, "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0");
    CHECK(dt_schedule_chunks(s) == 2 && dt_schedule_stages(s) == 4 &&
          dt_schedule_micro_group(s) == 2);
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){
                 .kind = DT_SCHEDULE_INTERLEAVED, .ranks = 2, .micros = 5, .micro_group = 3 });
    expect_list(s, 1,
        "F0.0 F1.0 F2.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.0 B0.0 F4.0 B1.0 F3.1 B2.0 F4.1 B3.1 B4.1 "
        "B3.0 "
        "B4.0");
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_ZB, .ranks = 3, .micros = 4 });
    expect_list(s, 0, "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3");
    expect_list(s, 1, "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3");
    expect_list(s, 2, "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3");
    /* as ScheduleZBVZeroBubble and ScheduleDualPipeV of PyTorch 2.15 list them */
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_ZBV, .ranks = 2, .micros = 4 });
    expect_list(s, 0,
        "F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F3.0 I0.0 W0.0 F2.1 I2.1 W2.1 I1.0 W1.0 "
        "F3.1 I3.1 W3.1 I2.0 W2.0 I3.0 W3.0");
    expect_list(s, 1,
        "F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 F2.0 I0.0 W0.0 F2.1 I1.1 W1.1 F3.0 I1.0 W1.0 F3.1 I2.1 "
        "W2.1 I2.0 I3.1 I3.0 W2.0 W3.1 W3.0");
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_DUALPIPE_V, .ranks = 3, .micros = 6 });
    expect_list(s, 0,
        "F0.0 F1.0 F2.0 F3.0 F4.0 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F2.1 F5.0 B2.1 F3.1 B0.0 B3.1 F4.1 "
        "B1.0 B4.1 F5.1 B2.0 B5.1 I3.0 W3.0 I4.0 W4.0 I5.0 W5.0");
    expect_list(s, 1,
        "F0.0 F1.0 F2.0 F0.1 F3.0 F1.1 I0.1 W0.1 F2.1 F4.0 B1.1 F3.1 B0.0 F5.0 B2.1 F4.1 B1.0 B3.1 "
        "F5.1 B2.0 B4.1 B3.0 I5.1 I4.0 W5.1 I5.0 W4.0 W5.0");
    expect_list(s, 2,
        "F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 F3.0 B0.1 F3.1 B0.0 F4.0 B1.1 F4.1 B1.0 F5.0 B2.1 F5.1 B2.0 "
        "B3.1 B3.0 B4.1 I4.0 I5.1 I5.0 W4.0 W5.1 W5.0");
    CHECK(dt_schedule_chunks(s) == 2 && dt_schedule_rank_of(s, 0) == 0 &&
          dt_schedule_rank_of(s, 3) == 2 && dt_schedule_rank_of(s, 5) == 0);
    dt_ctx_free(ctx);
    CHECK_MSG(blocks == 0, "%ld blocks were not freed", blocks);
}

static void test_lowering(void) {
    dt_ctx *ctx = new_ctx();
    dt_schedule *s = dt_schedule_make(
        ctx, (dt_schedule_desc){
                 .kind = DT_SCHEDULE_INTERLEAVED, .ranks = 2, .micros = 2, .chunks = 2 });
    dt_schedule_metrics metrics;
    const dt_action *a = dt_schedule_actions(s, 0); /* F0.0 F1.0 F0.1 F1.1 B0.1 .. */
    if (!CHECK_MSG(dt_schedule_count(s, 0) == 8, "%s", dt_error_text(ctx))) return;
    CHECK(a[0].stage == 0 && a[0].recv_from == -1 && a[0].send_to == 1);
    CHECK(a[2].stage == 2 && a[2].recv_from == 1 && a[2].send_to == 1);
    CHECK(a[4].phase == DT_BACKWARD && a[4].chunk == 1 && a[4].stage == 2 && a[4].recv_from == 1 &&
          a[4].send_to == 1);
    CHECK(a[6].phase == DT_BACKWARD && a[6].chunk == 0 && a[6].stage == 0 && a[6].recv_from == 1 &&
          a[6].send_to == -1);
    CHECK(a[4].slot == a[2].slot && a[6].slot == a[0].slot && a[0].slot != a[2].slot);
    a = dt_schedule_actions(s, 1); /* F0.0 F1.0 F0.1 B0.1 .. */
    CHECK(a[2].stage == 3 && a[2].recv_from == 0 && a[2].send_to == -1 && a[3].recv_from == -1 &&
          a[3].send_to == 0);
    CHECK(dt_schedule_check(s, &metrics, NULL, 0) == DT_OK);
    CHECK_MSG(metrics.actions == 16 && metrics.messages == 12 && metrics.max_in_flight == 4 &&
                  metrics.cycle_length == 0,
        "%d actions, %d "
        "messages, %d held",
        metrics.actions, metrics.messages, metrics.max_in_flight);
    CHECK(dt_schedule_stage_of(s, 1, 1) == 3 && dt_schedule_rank_of(s, 3) == 1 &&
          dt_schedule_rank_of(s, 2) == 0);
    CHECK(dt_schedule_offset(s, 0) == 0 && dt_schedule_offset(s, 1) == 8 &&
          dt_schedule_offset(s, 2) == 16);
    CHECK(dt_schedule_stage_of(s, 2, 0) == -1 && dt_schedule_stage_of(s, 0, 2) == -1);
    CHECK(dt_schedule_rank_of(s, 4) == -1);
    CHECK(
        !dt_schedule_actions(s, 2) && !dt_schedule_actions(s, -1) && dt_schedule_count(s, 2) == 0);
    CHECK(dt_schedule_max_in_flight(s, 2) == 0 && dt_schedule_slots(s, -1) == 0 &&
          dt_schedule_rank_of(s, -1) == -1);
    CHECK(dt_schedule_ranks(NULL) == 0 && dt_schedule_count(NULL, 0) == 0 &&
          *dt_schedule_name(NULL) == 0);
    CHECK(dt_schedule_offset(NULL, 0) == 0 && dt_schedule_stages(NULL) == 0 &&
          dt_schedule_micros(NULL) == 0);
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_ZB, .ranks = 2, .micros = 2 });
    a = dt_schedule_actions(s, 1); /* F0 I0 F1 I1 W0 W1 */
    CHECK(a[1].phase == DT_BACKWARD_INPUT && a[1].recv_from == -1 && a[1].send_to == 0);
    CHECK(a[4].phase == DT_BACKWARD_WEIGHT && a[4].recv_from == -1 && a[4].send_to == -1 &&
          a[4].slot == a[0].slot);
    dt_ctx_free(ctx);
}

// ==== 2. Figures ================================================================================

/* The micro-batches that a rank holds, and the idle time of the schedule as a fraction top / bottom
   of the work; bottom 0: unknown. */
typedef struct figures {
    int held;
    int64_t top, bottom;
} figures;

/* With few micro-batches each one more fills two of the idle times of a chunk. */
static figures figures_in_v(int dualpipe, int p, int m, int r) {
    int idle = (dualpipe ? 5 : 4) * (p - 1) - 2 * (m - 1) + 2 * (dualpipe && m > p);
    int held = m + 1 + r < 2 * m ? m + 1 + r : 2 * m, most = 2 * p + dualpipe;
    return (figures){ held < most ? held : most, idle < p - 1 ? p - 1 : idle, 6 * (int64_t)m };
}

static figures figures_of(int kind, int p, int m, int v, int r, int group) {
    int left = p - r < m ? p - r : m, ahead = 2 * (p - r - 1) + (v - 1) * group + 1;
    figures f = { 0, 0, 0 };
    switch (kind) {
    case DT_SCHEDULE_NAIVE: return (figures){ 1, p - 1, 1 };
    case DT_SCHEDULE_AFAB: return (figures){ m, p - 1, m };
    case DT_SCHEDULE_1F1B: return (figures){ left, p - 1, m };
    case DT_SCHEDULE_INTERLEAVED:
        return (figures){ ahead < m * v ? ahead : m * v, p - 1, m % p == 0 ? (int64_t)v * m : 0 };
    case DT_SCHEDULE_ZB: return (figures){ p < m ? p : m, p - 1, m >= p ? 3 * (int64_t)m : 0 };
    case DT_SCHEDULE_ZBV:
    case DT_SCHEDULE_DUALPIPE_V: return figures_in_v(kind == DT_SCHEDULE_DUALPIPE_V, p, m, r);
    }
    return f;
}

/* Slots besides those of the micro-batches that the rank holds. */
static int slots_fit(int kind, int p, int m, int v, int r, int more) {
    if (kind == DT_SCHEDULE_ZBV) return more == (m >= 2 * p - r);
    if (kind == DT_SCHEDULE_DUALPIPE_V) return more == (m > p);
    return more == 0 ||
           (kind == DT_SCHEDULE_INTERLEAVED && v > 1 && more > 0 && (m % p || more == 1));
}

/* Under ZB-V no rank idles between its first and its last action. */
static void expect_no_idle(const dt_schedule *s, int rank, double work) {
    const dt_span *own = spans + dt_schedule_offset(s, rank);
    double busy = own[dt_schedule_count(s, rank) - 1].end - own[0].begin;
    CHECK_MSG(busy == work, "%s rank %d: %g of %g", dt_schedule_name(s), rank, work, busy);
}

static void expect_figures(dt_ctx *ctx, int kind, int p, int m, int v) {
    dt_schedule *s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = kind, .ranks = p, .micros = m, .chunks = v });
    dt_schedule_metrics metrics;
    machine mach;
    if (!CHECK_MSG(s != NULL, "%s", dt_error_text(ctx))) return;
    CHECK(dt_schedule_check(s, &metrics, NULL, 0) == DT_OK);
    int crossing = p > 1 ? 2 * m * (p * v - 1 - is_v(kind)) : 0;
    CHECK_MSG(metrics.messages == crossing, "%s p %d m %d v %d: %d messages", dt_schedule_name(s),
        p, m, v, metrics.messages);
    for (int r = 0; r < p; r++) {
        figures f = figures_of(kind, p, m, v, r, dt_schedule_micro_group(s));
        int more = dt_schedule_slots(s, r) - dt_schedule_max_in_flight(s, r);
        int fits = slots_fit(kind, p, m, v, r, more);
        CHECK_MSG(dt_schedule_max_in_flight(s, r) == f.held && fits,
            "%s p %d m %d v %d rank %d: holds %d, not %d; %d slots", dt_schedule_name(s), p, m, v,
            r, dt_schedule_max_in_flight(s, r), f.held, dt_schedule_slots(s, r));
    }
    CHECK(dt_schedule_simulate(s, even, spans) == DT_OK);
    figures f = figures_of(kind, p, m, v, 0, 1);
    dt_schedule_bubble b = dt_schedule_bubble_of(s, spans, -1);
    CHECK(b.work == 3.0 * m * v);
    if (f.bottom)
        CHECK_MSG((b.makespan - b.work) * (double)f.bottom == (double)f.top * b.work,
            "%s p %d m %d v %d: %g idle of "
            "%g",
            dt_schedule_name(s), p, m, v, b.makespan - b.work, b.work);
    for (int r = 0; r < p && f.bottom; r++) { /* all ranks have equal work */
        dt_schedule_bubble own = dt_schedule_bubble_of(s, spans, r);
        CHECK(own.idle_per_work == b.idle_per_work &&
              own.idle_per_makespan == b.idle_per_makespan && own.work == b.work);
        if (kind == DT_SCHEDULE_ZBV && m >= 2 * p) expect_no_idle(s, r, own.work);
    }
    CHECK(b.idle_per_work == (b.makespan - b.work) / b.work &&
          b.idle_per_makespan == (b.makespan - b.work) / b.makespan);
    if (p <= 8 && m <= 17) {
        machine_make(&mach, p, v, m, 1, 1, 1, 0);
        if (is_v(kind)) machine_in_v(&mach);
        expect_times(&mach, s);
        machine_make(&mach, p, v, m, 2, 3, 1, 1);
        if (is_v(kind)) machine_in_v(&mach);
        for (int i = 0; i < mach.stages; i++) mach.forward[i] += i % 3;
        expect_times(&mach, s);
    }
    dt_schedule_free(s);
}

static void test_figures(void) {
    dt_ctx *ctx = new_ctx();
    for (int p = 1; p <= 8; p++)
        for (int m = 1; m <= 32; m++)
            for (int kind = 0; kind < DT_SCHEDULES; kind++)
                for (int v = 1; v <= (kind == DT_SCHEDULE_INTERLEAVED ? 4 : 1); v++)
                    expect_figures(ctx, kind, p, m, is_v(kind) ? 2 : v);
    for (int p = 1; p <= 6; p++) /* exactly the legal group sizes are accepted */
        for (int m = 1; m <= 13; m++)
            for (int g = 1; g <= m + 1; g++) {
                dt_ctx *own = new_ctx();
                int fits = m < p ? g == m : g >= p && g <= m && (m % g == 0 || m % g >= p);
                dt_schedule *s =
                    dt_schedule_make(own, (dt_schedule_desc){ .kind = DT_SCHEDULE_INTERLEAVED,
                                              .ranks = p,
                                              .micros = m,
                                              .chunks = 3,
                                              .micro_group = g });
                CHECK_MSG((s != NULL) == fits, "p %d m %d G %d: %s", p, m, g, dt_error_text(own));
                dt_ctx_free(own);
            }
    dt_ctx_free(ctx);
    CHECK_MSG(blocks == 0, "%ld blocks were not freed", blocks);
}

/* Extra slots: as many as requested, up to the number of micro-batches. With one extra slot,
   messages may take time and no rank waits for a slot. */
static void test_extra_slots(void) {
    static machine m;
    for (int kind = 0; kind < DT_SCHEDULES; kind++)
        for (int spare = 0; spare < 4; spare++) {
            dt_ctx *ctx = new_ctx();
            dt_schedule_desc d = { .kind = kind, .ranks = 4, .micros = 8 };
            dt_schedule *least = dt_schedule_make(ctx, d);
            d.extra_slots = spare;
            dt_schedule *s = dt_schedule_make(ctx, d);
            if (!CHECK_MSG(s != NULL, "%s", dt_error_text(ctx))) return;
            int v = dt_schedule_chunks(s);
            for (int r = 0; r < 4; r++) {
                int want = dt_schedule_slots(least, r) + spare;
                CHECK(dt_schedule_slots(s, r) == (want < 8 * v ? want : 8 * v));
                CHECK(dt_schedule_max_in_flight(s, r) == dt_schedule_max_in_flight(least, r));
            }
            machine_make(&m, 4, v, 8, 10, 10, 10, 2);
            if (is_v(kind)) machine_in_v(&m);
            expect_times(&m, s);
            int least_time = makespan_with_plenty(&m, s), waits = m.makespan > least_time;
            CHECK_MSG(spare == 0 || !waits, "%s, %d spare: %d, not %d", dt_schedule_name(s), spare,
                m.makespan, least_time);
            if (spare == 0)
                CHECK(waits == (kind == DT_SCHEDULE_1F1B || kind == DT_SCHEDULE_INTERLEAVED));
            dt_ctx_free(ctx);
        }
}

// ==== 3. Wrong schedules ========================================================================

static void test_wrong_schedules(void) {
    const char *right[] = { "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2" };
    expect_text(2, 3, 1, right, 0, "");
    /* rank 0's list is that of the last stage */
    const char *swapped[] = { "F0 B0 F1 F2 B1 B2", "F0 F1 B0 B1 F2 B2" };
    expect_text(2, 3, 1, swapped, 2,
        "deadlock: rank 0 waits at B(micro 0) for B(micro 0) of rank 1, which is queued "
        "behind F(micro 1); rank 1 waits at F(micro 1) for F(micro 1) of rank 0, which is queued "
        "behind B(micro 0)");
    /* rank 0 waits for the cycle but is not part of it */
    const char *ahead[] = { "F0 B0 F1 B1", "F0 B0 F1 B1", "F0 F1 B0 B1" };
    expect_text(3, 2, 1, ahead, 2,
        "deadlock: rank 1 waits at B(micro 0) for B(micro 0) of rank 2, which is queued behind "
        "F(micro 1); rank 2 waits at F(micro 1) for F(micro 1) of rank 1, which is queued behind "
        "B(micro 0)");
    const char *three[] = { "F0.1 F0.0 B0.1 B0.0", "F0.0 F0.1 B0.1 B0.0", "F0.0 F0.1 B0.1 B0.0" };
    expect_text(3, 1, 2, three, 3,
        "deadlock: rank 0 waits at F(micro 0, chunk 1) for F(micro 0, chunk 0) of rank 2; "
        "rank 2 waits at F(micro 0, chunk 0) for F(micro 0, chunk 0) of rank 1; rank 1 waits at "
        "F(micro 0, chunk 0) "
        "for F(micro 0, chunk 0) of rank 0, which is queued behind F(micro 0, chunk 1)");
    const char *alone[] = { "F0 F1 B0 B1", "B0 F0 F1 B1" };
    expect_text(2, 2, 1, alone, 1,
        "deadlock: rank 1 waits at B(micro 0) for F(micro 0), which is queued behind "
        "B(micro 0)");
    const char *weight[] = { "F0 W0 I0" };
    expect_text(1, 1, 1, weight, 1,
        "deadlock: rank 0 waits at W(micro 0) for I(micro 0), which is queued behind "
        "W(micro 0)");
    const char *chunks[] = { "F0.0 B0.1 F0.1 B0.0", "F0.0 F0.1 B0.1 B0.0" };
    expect_text(2, 1, 2, chunks, 1,
        "deadlock: rank 0 waits at B(micro 0, chunk 1) for F(micro 0, chunk 1), which "
        "is queued behind B(micro 0, chunk 1)");
    const char *late[] = { "F0 F1 B1 B0" };
    expect_text(1, 2, 1, late, 0,
        "rank 0: B(micro 0) comes after B(micro 1), but gradients are added in ascending "
        "order");
    const char *late_weight[] = { "F0 F1 I0 I1 W1 W0" };
    expect_text(1, 2, 1, late_weight, 0,
        "rank 0: W(micro 0) comes after W(micro 1), but gradients are added in "
        "ascending order");
    /* only actions that add gradients must be in order */
    const char *inputs[] = { "F0 F1 I1 I0 W0 W1" };
    expect_text(1, 2, 1, inputs, 0, "");
    const char *mixed[] = { "F0 F1 I0 W0 B1" };
    expect_text(1, 2, 1, mixed, 0, "");
    const char *twice[] = { "F0 F0 B0" };
    expect_text(1, 1, 1, twice, 0, "rank 0: F(micro 0) comes a second time, as its action 1");
    const char *two_ways[] = { "F0 I0 B0 W0" };
    expect_text(1, 1, 1, two_ways, 0, "rank 0: B(micro 0) comes a second time, as its action 2");
    const char *beside[] = { "F0 B0 W0" };
    expect_text(1, 1, 1, beside, 0,
        "rank 0: W(micro 0) occurs besides B(micro 0), which is the full backward");
    const char *no_weight[] = { "F0 I0" };
    expect_text(1, 1, 1, no_weight, 0, "rank 0: W(micro 0) is missing");
    const char *no_input[] = { "F0 W0" };
    expect_text(1, 1, 1, no_input, 0, "rank 0: I(micro 0) is missing");
    const char *no_forward[] = { "F0.0 F0.1 B0.1 B0.0", "F0.0 B0.1 B0.0" };
    expect_text(2, 1, 2, no_forward, 0, "rank 1: F(micro 0, chunk 1) is missing");
    const char *nothing[] = { "" };
    expect_text(1, 1, 1, nothing, 0, "rank 0: F(micro 0) is missing");
    const char *no_backward[] = { "F0 B0", "F0" };
    expect_text(2, 1, 1, no_backward, 0, "rank 1: B(micro 0) is missing");
}

/* A case where slots for the held micro-batches are too few. */
static void test_too_few_slots(void) {
    char text[1024], brief[24];
    dt_schedule_metrics metrics;
    dt_schedule_desc d = {
        .kind = DT_SCHEDULE_INTERLEAVED, .ranks = 2, .micros = 4, .min_slots = 1, .unchecked = 1
    };
    dt_ctx *ctx = new_ctx();
    dt_schedule *s = dt_schedule_make(ctx, d);
    CHECK(dt_schedule_check(s, &metrics, text, sizeof text) == DT_ERR_ARG &&
          metrics.cycle_length == 2);
    CHECK_MSG(
        strcmp(text,
            "deadlock: rank 0 waits at F(micro 3, chunk 0) for its slot 2, until rank 1 begins "
            "B(micro "
            "0, chunk 0), which is queued behind F(micro 2, chunk 0); rank 1 waits at F(micro 2, "
            "chunk 0) for its slot 2, "
            "until rank 0 begins B(micro 1, chunk 1), which is queued behind F(micro 3, chunk "
            "0)") == 0,
        "%s", text);
    CHECK(dt_schedule_check(s, NULL, brief, sizeof brief) == DT_ERR_ARG);
    CHECK(strcmp(brief, "deadlock: rank 0 waits ") == 0);
    CHECK(dt_schedule_max_in_flight(s, 0) == dt_schedule_slots(s, 0) &&
          dt_schedule_max_in_flight(s, 1) == dt_schedule_slots(s, 1));
    CHECK(dt_schedule_check(NULL, &metrics, text, sizeof text) == DT_ERR_ARG &&
          strcmp(text, "no schedule") == 0);
    CHECK(dt_error(ctx) == DT_OK);
    /* the other kinds need no more slots than held micro-batches */
    for (int kind = 0; kind < DT_SCHEDULES; kind++) {
        if (kind == DT_SCHEDULE_INTERLEAVED || is_v(kind)) continue;
        d.kind = kind;
        d.ranks = 4;
        d.micros = 9;
        d.unchecked = 0;
        CHECK_MSG(dt_schedule_make(ctx, d) != NULL, "%s", dt_error_text(ctx));
    }
    dt_ctx_free(ctx);
}

// ==== 4. Any schedule against the machine =======================================================

enum { ACTIONS = 64 };
typedef struct programs {
    int ranks, count[RANKS]; /* ranks: for v_stage_of_programs */
    dt_action action[RANKS][ACTIONS];
} programs;

static void generate_programs(dt_schedule *s, void *user) {
    const programs *p = (const programs *)user;
    for (int r = 0; r < dt_schedule_ranks(s); r++)
        for (int i = 0; i < p->count[r]; i++)
            dt_schedule_add(
                s, r, p->action[r][i].phase, p->action[r][i].micro, p->action[r][i].chunk);
}

/* Makes a correct schedule: repeatedly chooses a rank and an action whose inputs are ready. */
static void random_correct(programs *p, int ranks, int chunks, int micros) {
    static int done[STAGES][MICROS][5];
    int stages = ranks * chunks, left = 0;
    memset(p, 0, sizeof *p);
    memset(done, 0, sizeof done);
    static int split[STAGES][MICROS];
    for (int s = 0; s < stages; s++)
        for (int j = 0; j < micros; j++) {
            split[s][j] = random_below(2);
            left += 2 + split[s][j];
        }
    while (left > 0) {
        int s = random_below(stages), j = random_below(micros), r = s % ranks;
        dt_phase phase = (dt_phase)(1 + random_below(4));
        int back =
            s + 1 == stages || done[s + 1][j][DT_BACKWARD] || done[s + 1][j][DT_BACKWARD_INPUT];
        int added = j == 0 || done[s][j - 1][DT_BACKWARD] || done[s][j - 1][DT_BACKWARD_WEIGHT];
        int may = 0;
        if (phase == DT_FORWARD) may = s == 0 || done[s - 1][j][DT_FORWARD];
        if (phase == DT_BACKWARD) may = !split[s][j] && done[s][j][DT_FORWARD] && back && added;
        if (phase == DT_BACKWARD_INPUT) may = split[s][j] && done[s][j][DT_FORWARD] && back;
        if (phase == DT_BACKWARD_WEIGHT) may = done[s][j][DT_BACKWARD_INPUT] && added;
        if (!may || done[s][j][phase]) continue;
        dt_action *a = &p->action[r][p->count[r]++];
        a->phase = phase;
        a->micro = j;
        a->chunk = s / ranks;
        done[s][j][phase] = 1;
        left--;
    }
}

static void random_swaps(programs *p, int ranks, int swaps) {
    for (int i = 0; i < swaps; i++) {
        int r = random_below(ranks), a = random_below(p->count[r]), b = random_below(p->count[r]);
        dt_action keep = p->action[r][a];
        p->action[r][a] = p->action[r][b];
        p->action[r][b] = keep;
    }
}

static int ascending(const programs *p, int ranks, int chunks) {
    for (int r = 0; r < ranks; r++)
        for (int c = 0; c < chunks; c++)
            for (int i = 0, last = -1; i < p->count[r]; i++) {
                const dt_action *a = &p->action[r][i];
                if (a->chunk != c || a->phase == DT_FORWARD || a->phase == DT_BACKWARD_INPUT)
                    continue;
                if (a->micro < last) return 0;
                last = a->micro;
            }
    return 1;
}

/* For each "rank R waits at X" in the text, X must be the action at which the machine's rank R is
   blocked. */
static void expect_blocked(const machine *m, const dt_schedule *s, const char *text, int cycle) {
    int found = 0, seen[RANKS] = { 0 };
    const char *at = strstr(text, "rank ");
    CHECK_MSG(strncmp(text, "deadlock: rank ", 15) == 0, "%s", text);
    for (; at && *at; at = strstr(at + 1, "; rank ") ? strstr(at + 1, "; rank ") + 2 : NULL) {
        int r = atoi(at + 5), stands = r >= 0 && r < m->ranks && m->at[r] < dt_schedule_count(s, r);
        char want[100];
        if (!CHECK_MSG(stands && !seen[r], "rank %d is not blocked: %s", r, text)) return;
        const dt_action *a = &dt_schedule_actions(s, r)[m->at[r]];
        seen[r] = 1;
        found++;
        if (dt_schedule_chunks(s) > 1)
            snprintf(want, sizeof want, "rank %d waits at %c(micro %d, chunk %d) for ", r,
                " FBIW"[a->phase], a -> micro, a -> chunk);
        else
            snprintf(want, sizeof want, "rank %d waits at %c(micro %d) for ", r, " FBIW"[a->phase],
                a -> micro);
        CHECK_MSG(strncmp(at, want, strlen(want)) == 0, "%s: not %s", text, want);
    }
    CHECK_MSG(found == cycle && cycle > 0, "%d in the text, a cycle of %d: %s", found, cycle, text);
}

static void test_random(void) {
    static programs p;
    static machine m;
    static dt_span out[MOST];
    char text[2048];
    int right = 0, stopped = 0, disordered = 0, waited = 0;
    for (int round = 0; round < 12000; round++) {
        int ranks = 1 + random_below(4), chunks = 1 + random_below(2), micros = 1 + random_below(4),
            tight = random_below(3) == 0;
        dt_ctx *ctx = new_ctx();
        random_correct(&p, ranks, chunks, micros);
        int swaps = random_below(2) * random_below(4) * (1 + random_below(2) * 10);
        random_swaps(&p, ranks, swaps);
        dt_schedule *s = dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = ranks,
                                                   .micros = micros,
                                                   .chunks = chunks,
                                                   .generate = generate_programs,
                                                   .user = &p,
                                                   .unchecked = 1,
                                                   .min_slots = tight });
        dt_schedule_metrics metrics;
        machine_make(&m, ranks, chunks, micros, 1, 1, 1, 0);
        dt_status status = dt_schedule_check(s, &metrics, text, sizeof text);
        int ends = machine_run(&m, s, out), order = ascending(&p, ranks, chunks);
        CHECK_MSG((status == DT_OK) == (ends && order),
            "status %d, but the schedule %s, ascending %d: %s", status, ends ? "ends" : "stops",
            order, text);
        CHECK((metrics.cycle_length == 0) == ends);
        /* the default slots never cause a deadlock */
        if (swaps == 0 && !tight) CHECK_MSG(status == DT_OK, "%s", text);
        if (!ends) {
            expect_blocked(&m, s, text, metrics.cycle_length);
            waited += strstr(text, "for its slot") != NULL;
        } else {
            expect_times(&m, s);
            double makespan = dt_schedule_bubble_of(s, spans, -1).makespan;
            if (!tight) {
                dt_schedule *wide = dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = ranks,
                                                              .micros = micros,
                                                              .chunks = chunks,
                                                              .generate = generate_programs,
                                                              .user = &p,
                                                              .unchecked = 1 });
                CHECK(makespan_with_plenty(&m, wide) == makespan);
            }
            int f = 1 + random_below(3), i = 1 + random_below(3), w = 1 + random_below(3);
            machine_make(&m, ranks, chunks, micros, f, i, w, random_below(3));
            for (int k = 0; k < m.stages; k++) m.input[k] += random_below(3);
            expect_times(&m, s);
        }
        right += status == DT_OK;
        stopped += !ends;
        disordered += ends && !order;
        dt_ctx_free(ctx);
    }
    CHECK_MSG(right > 3000 && stopped > 1500 && disordered > 50 && waited > 20,
        "%d correct, %d deadlocks (%d for a slot), "
        "%d out of order",
        right, stopped, waited, disordered);
    CHECK_MSG(blocks == 0, "%ld blocks were not freed", blocks);
}

static int v_stage_of_programs(int rank, int chunk, void *user) {
    return chunk ? 2 * ((const programs *)user)->ranks - 1 - rank : rank;
}

/* Swaps two actions of a rank in every kind of schedule. */
static void test_swapped(void) {
    static programs p;
    static machine m;
    static dt_span out[MOST];
    char text[2048];
    int stopped = 0;
    for (int round = 0; round < 3000; round++) {
        int kind = random_below(DT_SCHEDULES), ranks = 2 + random_below(3),
            micros = 2 + random_below(5), r = random_below(ranks);
        dt_ctx *ctx = new_ctx();
        dt_schedule *s = dt_schedule_make(
            ctx, (dt_schedule_desc){ .kind = kind, .ranks = ranks, .micros = micros });
        int chunks = dt_schedule_chunks(s);
        if (!CHECK_MSG(s != NULL, "%s", dt_error_text(ctx))) return;
        p.ranks = ranks;
        for (int q = 0; q < ranks; q++) {
            p.count[q] = dt_schedule_count(s, q);
            memcpy(p.action[q], dt_schedule_actions(s, q), (size_t)p.count[q] * sizeof(dt_action));
        }
        int i = random_below(p.count[r]), j = random_below(p.count[r]);
        dt_action keep = p.action[r][i];
        p.action[r][i] = p.action[r][j];
        p.action[r][j] = keep;
        s = dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = ranks,
                                      .micros = micros,
                                      .chunks = chunks,
                                      .generate = generate_programs,
                                      .stage_of = is_v(kind) ? v_stage_of_programs : NULL,
                                      .user = &p,
                                      .unchecked = 1 });
        dt_schedule_metrics metrics;
        machine_make(&m, ranks, chunks, micros, 1, 1, 1, 0);
        if (is_v(kind)) machine_in_v(&m);
        int ends = machine_run(&m, s, out);
        dt_status status = dt_schedule_check(s, &metrics, text, sizeof text);
        CHECK_MSG((status == DT_OK) == (ends && ascending(&p, ranks, chunks)), "%s", text);
        if (!ends) expect_blocked(&m, s, text, metrics.cycle_length);
        stopped += !ends;
        dt_ctx_free(ctx);
    }
    CHECK_MSG(stopped > 1000 && stopped < 2900, "%d deadlocks", stopped);
}

// ==== 5. User-defined schedules =================================================================

/* Stages 0 .. p-1 down the ranks and p .. 2p-1 up again. */
static int v_stage(int rank, int chunk, void *user) {
    int p = *(const int *)user;
    return chunk == 0 ? rank : 2 * p - 1 - rank;
}

static void generate_v(dt_schedule *s, void *user) {
    int p = dt_schedule_ranks(s), m = dt_schedule_micros(s);
    CHECK(p == *(const int *)user && dt_schedule_stages(s) == 2 * p &&
          dt_schedule_stage_of(s, 0, 1) == 2 * p - 1);
    for (int r = 0; r < p; r++)
        for (int j = 0; j < m; j++) {
            dt_schedule_add(s, r, DT_FORWARD, j, 0);
            dt_schedule_add(s, r, DT_FORWARD, j, 1);
            dt_schedule_add(s, r, DT_BACKWARD, j, 1);
            dt_schedule_add(s, r, DT_BACKWARD, j, 0);
        }
}

static void test_v_schedule(void) {
    static machine m;
    int p = 3;
    dt_schedule_metrics metrics;
    dt_ctx *ctx = new_ctx();
    dt_schedule *s = dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = p,
                                               .micros = 4,
                                               .chunks = 2,
                                               .generate = generate_v,
                                               .stage_of = v_stage,
                                               .user = &p,
                                               .name = "vee" });
    if (!CHECK_MSG(s != NULL, "%s", dt_error_text(ctx))) return;
    CHECK(strcmp(dt_schedule_name(s), "vee") == 0 && dt_schedule_rank_of(s, 5) == 0 &&
          dt_schedule_rank_of(s, 3) == 2);
    /* stages 2 and 3 are neighbours on the same rank */
    const dt_action *a = dt_schedule_actions(s, 2);
    CHECK(a[0].stage == 2 && a[0].send_to == 2 && a[1].stage == 3 && a[1].recv_from == 2 &&
          a[1].send_to == 1);
    CHECK(a[2].stage == 3 && a[2].recv_from == 1 && a[2].send_to == 2 && a[3].recv_from == 2 &&
          a[3].send_to == 1);
    CHECK(dt_schedule_check(s, &metrics, NULL, 0) == DT_OK);
    CHECK_MSG(metrics.messages == 4 * 2 * 4 && metrics.max_in_flight == 2, "%d messages, %d held",
        metrics.messages, metrics.max_in_flight);
    machine_make(&m, p, 2, 4, 2, 1, 3, 5);
    for (int st = 0; st < 6; st++) {
        m.rank_of[st] = st < p ? st : 2 * p - 1 - st;
        m.chunk_of[st] = st >= p;
    }
    expect_times(&m, s); /* a message to the same rank takes no time */
    dt_ctx_free(ctx);
}

static int stage_used_twice(int rank, int chunk, void *user) {
    (void)user;
    return rank + chunk;
}
static int stage_out_of_range(int rank, int chunk, void *user) {
    (void)user;
    return rank == 1 ? 9 : chunk;
}
static void generate_bad(dt_schedule *s, void *user) {
    const int *a = (const int *)user;
    dt_schedule_add(s, a[0], (dt_phase)a[1], a[2], a[3]);
}
static void generate_endless(dt_schedule *s, void *user) {
    (void)user;
    for (int i = 0; i < 1000 && dt_schedule_add(s, 0, DT_FORWARD, 0, 0) == DT_OK;) i++;
}

static void expect_refused(dt_schedule_desc d, const char *want) {
    dt_ctx *ctx = new_ctx();
    dt_schedule *s = dt_schedule_make(ctx, d);
    CHECK_MSG(!s && dt_error(ctx) == DT_ERR_ARG && strcmp(dt_error_text(ctx), want) == 0,
        "'%s', not '%s'", dt_error_text(ctx), want);
    CHECK(!dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = 1, .micros = 1 })); /* sticky */
    dt_ctx_free(ctx);
    CHECK_MSG(blocks == 0, "%ld blocks were not freed", blocks);
}

static void test_refused(void) {
    dt_schedule_desc d = { .kind = 7, .ranks = 2, .micros = 3 };
    expect_refused(d, "rank 0: dt_schedule_make: there is no kind 7 of schedule");
    d.kind = -1;
    expect_refused(d, "rank 0: dt_schedule_make: there is no kind -1 of schedule");
    d = (dt_schedule_desc){ .ranks = 0, .micros = 3 };
    expect_refused(d, "rank 0: dt_schedule_make: 3 micro-batches through 1 chunks of each of 0 "
                      "ranks; use at least 1 "
                      "of each, and no more than 67108864 in all");
    d = (dt_schedule_desc){ .ranks = 1 << 20, .micros = 1 << 20 };
    expect_refused(d, "rank 0: dt_schedule_make: 1048576 micro-batches through 1 chunks of each of "
                      "1048576 ranks; use "
                      "at least 1 of each, and no more than 67108864 in all");
    d = (dt_schedule_desc){ .kind = DT_SCHEDULE_1F1B, .ranks = 2, .micros = 3, .chunks = 2 };
    expect_refused(d, "rank 0: dt_schedule_make(1F1B): 2 chunks; only interleaved has several");
    d = (dt_schedule_desc){ .kind = DT_SCHEDULE_ZBV, .ranks = 2, .micros = 3, .chunks = 3 };
    expect_refused(
        d, "rank 0: dt_schedule_make(ZB-V): 3 chunks; each rank has 2, the sides of the V");
    d = (dt_schedule_desc){ .kind = DT_SCHEDULE_ZB, .ranks = 2, .micros = 3, .extra_slots = -1 };
    expect_refused(d, "rank 0: dt_schedule_make: -1 extra slots");
    d = (dt_schedule_desc){ .kind = DT_SCHEDULE_ZB, .ranks = 2, .micros = 3, .micro_group = 2 };
    expect_refused(d, "rank 0: dt_schedule_make: groups of 2; only interleaved has groups");
    d = (dt_schedule_desc){
        .kind = DT_SCHEDULE_INTERLEAVED, .ranks = 4, .micros = 17, .micro_group = 4
    };
    expect_refused(d, "rank 0: dt_schedule_make(interleaved): groups of 4 do not split 17 "
                      "micro-batches for 4 ranks so "
                      "that each fills them; use 6 or 17");
    d.ranks = d.micros = 5;
    expect_refused(d, "rank 0: dt_schedule_make(interleaved): groups of 4 do not split 5 "
                      "micro-batches for 5 ranks so that each fills them; use 5");
    d = (dt_schedule_desc){
        .ranks = 2, .micros = 1, .chunks = 2, .generate = generate_v, .stage_of = stage_used_twice
    };
    expect_refused(d, "rank 0: dt_schedule_make(custom schedule): stage 1 is chunk 1 of "
                      "rank 0 and chunk 0 of "
                      "rank 1");
    d.stage_of = stage_out_of_range;
    expect_refused(
        d, "rank 0: dt_schedule_make(custom schedule): chunk 0 of rank 1 is stage 9 of 4");
    int bad[5][4] = { { 2, 1, 0, 0 }, { 0, 5, 0, 0 }, { 0, 0, 0, 0 }, { 0, 1, 3, 0 },
        { 0, 1, 0, 1 } };
    for (int i = 0; i < 5; i++) {
        char want[200];
        snprintf(want, sizeof want,
            "rank 0: dt_schedule_add(x): phase %d of micro-batch %d of 3 in chunk %d of 1 of "
            "rank %d of 2",
            bad[i][1], bad[i][2], bad[i][3], bad[i][0]);
        expect_refused(
            (dt_schedule_desc){
                .ranks = 2, .micros = 3, .generate = generate_bad, .user = bad[i], .name = "x" },
            want);
    }
    expect_refused(
        (dt_schedule_desc){ .ranks = 1, .micros = 2, .generate = generate_endless, .name = "x" },
        "rank 0: dt_schedule_add(x): rank 0 has 8 actions already");
    dt_ctx *ctx = new_ctx();
    dt_schedule *s = dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = 1, .micros = 2 });
    CHECK(dt_schedule_add(s, 0, DT_FORWARD, 0, 0) == DT_ERR_ARG && dt_error(ctx) == DT_ERR_ARG);
    CHECK(dt_schedule_add(NULL, 0, DT_FORWARD, 0, 0) == DT_ERR_ARG);
    dt_schedule_free(NULL);
    dt_ctx_free(ctx);
    CHECK_MSG(blocks == 0, "%ld blocks were not freed", blocks);
}

/* Refuses every allocation in turn: the error must say so, and all memory must be freed. */
static void test_memory(void) {
    int refused = 0;
    for (long at = 1; at < 200; at++) {
        calls = 0;
        refuse_at = 0;
        dt_ctx *ctx = new_ctx();
        refuse_at = calls + at;
        dt_schedule *s = dt_schedule_make(
            ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_ZB, .ranks = 3, .micros = 9 });
        int reached = calls >= refuse_at;
        refuse_at = 0;
        CHECK_MSG((s == NULL) == reached && dt_error(ctx) == (reached ? DT_ERR_MEM : DT_OK),
            "allocation %ld: %s", at, dt_error_text(ctx));
        refused += reached;
        if (at % 2) dt_schedule_free(s);
        dt_ctx_free(ctx);
        CHECK_MSG(blocks == 0, "allocation %ld: %ld blocks were not freed", at, blocks);
    }
    CHECK_MSG(refused >= 8, "only %d allocations refused", refused);
}

// ==== 6. The simulator ==========================================================================

static void expect_spans(const dt_schedule *s, int rank, int n, const double *want) {
    for (int i = 0; i < n; i++) {
        dt_span got = spans[dt_schedule_offset(s, rank) + i];
        CHECK_MSG(got.begin == want[2 * i] && got.end == want[2 * i + 1],
            "rank %d action %d: %g to %g, not %g to %g", rank, i, got.begin, got.end, want[2 * i],
            want[2 * i + 1]);
    }
}

static void test_simulate(void) {
    dt_ctx *ctx = new_ctx();
    dt_schedule *s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_1F1B, .ranks = 2, .micros = 2 });
    double stages[6] = { 2, 1, 3, 5, 2, 2 };
    dt_schedule_costs costs = { 0, 0, 0, stages, 0.5 };
    double first[8] = { 0, 2, 2, 4, 12, 16, 21.5, 25.5 },
           last[8] = { 2.5, 7.5, 7.5, 11.5, 12, 17, 17, 21 };
    CHECK(dt_schedule_simulate(s, costs, spans) == DT_OK);
    expect_spans(s, 0, 4, first); /* F0 F1 B0 B1 */
    /* F0 B0 F1 B1: F1 waits for its one slot until rank 0 has begun B0 */
    expect_spans(s, 1, 4, last);
    dt_schedule_bubble b = dt_schedule_bubble_of(s, spans, -1),
                       own = dt_schedule_bubble_of(s, spans, 0);
    CHECK(b.makespan == 25.5 && b.work == 18 && b.idle_per_work == 7.5 / 18 &&
          b.idle_per_makespan == 7.5 / 25.5);
    CHECK(own.makespan == 25.5 && own.work == 12 && own.idle_per_work == 13.5 / 12 &&
          own.idle_per_makespan == 13.5 / 25.5);
    double freed[8] = { 0, 2, 2, 4, 12, 16, 21, 25 },
           sooner[8] = { 2.5, 7.5, 7.5, 11.5, 11.5, 16.5, 16.5, 20.5 };
    dt_schedule *spare = dt_schedule_make(ctx,
        (dt_schedule_desc){ .kind = DT_SCHEDULE_1F1B, .ranks = 2, .micros = 2, .extra_slots = 1 });
    CHECK(dt_schedule_simulate(spare, costs, spans) == DT_OK);
    expect_spans(spare, 0, 4, freed);
    expect_spans(spare, 1, 4, sooner);
    CHECK(dt_schedule_simulate(s, costs, spans) == DT_OK);
    for (int i = 0; i < 8; i++) { /* like a measurement: with another start time */
        spans[i].begin += 100;
        spans[i].end += 100;
    }
    b = dt_schedule_bubble_of(s, spans, 1);
    CHECK(b.makespan == 25.5 && b.work == 18);
    b = dt_schedule_bubble_of(s, spans, 2);
    CHECK(b.makespan == 0 && b.work == 0 && b.idle_per_work == 0);
    b = dt_schedule_bubble_of(NULL, spans, 0);
    CHECK(b.makespan == 0);
    dt_schedule_costs none = { 0, 0, 0, NULL, 0 };
    CHECK(dt_schedule_simulate(s, none, spans) == DT_OK);
    b = dt_schedule_bubble_of(s, spans, -1);
    CHECK(b.makespan == 0 && b.idle_per_work == 0 && b.idle_per_makespan == 0);
    CHECK(dt_schedule_simulate(NULL, even, spans) == DT_ERR_ARG && dt_error(ctx) == DT_OK);
    for (int i = 0; i < 5; i++) {
        double bad[6] = { 1, 1, 1, 1, 1, i == 4 ? -1 : 1 };
        dt_schedule_costs wrong = { i == 0 ? -1 : 1, i == 1 ? NAN : 1, i == 2 ? INFINITY : 1,
            i == 4 ? bad : NULL, i == 3 ? -1 : 0 };
        dt_ctx *own_ctx = new_ctx();
        dt_schedule *t = dt_schedule_make(own_ctx, (dt_schedule_desc){ .ranks = 2, .micros = 1 });
        CHECK(
            dt_schedule_simulate(t, wrong, spans) == DT_ERR_ARG && dt_error(own_ctx) == DT_ERR_ARG);
        dt_ctx_free(own_ctx);
    }
    const char *stops[] = { "F0 F1 B1 B0", "F0 F1 B0 B1" };
    dt_schedule *wrong = dt_schedule_make(ctx,
        (dt_schedule_desc){
            .ranks = 2, .micros = 2, .generate = generate_lists, .user = stops, .unchecked = 1 });
    /* only the order of gradients is wrong */
    CHECK(dt_schedule_simulate(wrong, even, spans) == DT_OK);
    const char *late[] = { "F0 B0 F1 B1", "F0 F1 B0 B1" };
    wrong = dt_schedule_make(ctx,
        (dt_schedule_desc){
            .ranks = 2, .micros = 2, .generate = generate_lists, .user = late, .unchecked = 1 });
    CHECK(dt_schedule_simulate(wrong, even, spans) == DT_ERR_ARG && dt_error(ctx) == DT_OK);
    CHECK(spans[0].end == 1 && spans[1].begin > spans[1].end && spans[4].end == 2 &&
          spans[5].begin > spans[5].end);
    b = dt_schedule_bubble_of(wrong, spans, -1);
    CHECK(b.makespan == 2 && b.work == 1);
    dt_ctx_free(ctx);
}

// ==== 7. Partitioning a model ===================================================================

/* The smallest possible maximum of the stages' costs, by brute force. */
static double best_partition(const double *costs, int n, int stages) {
    double best = INFINITY, sum = 0;
    if (stages == 1) {
        for (int i = 0; i < n; i++) sum += costs[i];
        return sum;
    }
    for (int i = 1; i <= n - stages + 1; i++) {
        sum += costs[i - 1];
        double rest = best_partition(costs + i, n - i, stages - 1), worst = rest > sum ? rest : sum;
        if (worst < best) best = worst;
    }
    return best;
}

static double max_stage_cost(const double *costs, int n, int stages, const int *first) {
    double worst = 0;
    int ok = first[0] == 0 && first[stages] == n;
    for (int part = 0; part < stages; part++) {
        double sum = 0;
        ok &= first[part] < first[part + 1];
        for (int i = first[part]; ok && i < first[part + 1]; i++) sum += costs[i];
        if (sum > worst) worst = sum;
    }
    return ok ? worst : -1;
}

static void test_partition(void) {
    double costs[64], even_costs[64];
    int first[65];
    char text[200];
    for (int i = 0; i < 64; i++) even_costs[i] = 1;
    for (int round = 0; round < 4000; round++) {
        int n = 1 + random_below(9), stages = 1 + random_below(n);
        for (int i = 0; i < n; i++)
            costs[i] = random_below(3) ? random_below(9) : random_below(2) * 40;
        CHECK(dt_partition_stages(costs, n, stages, first, text, sizeof text) == DT_OK &&
              text[0] == 0);
        double worst = max_stage_cost(costs, n, stages, first),
               best = best_partition(costs, n, stages);
        CHECK_MSG(worst == best, "%d items, %d stages: %g, not %g", n, stages, worst, best);
        /* costs whose sums round */
        for (int i = 0; i < n; i++) costs[i] = 0.1 * (1 + random_below(7));
        CHECK(dt_partition_stages(costs, n, stages, first, text, sizeof text) == DT_OK);
        worst = max_stage_cost(costs, n, stages, first);
        CHECK_MSG(worst >= 0 && worst <= best_partition(costs, n, stages) * (1 + 1e-14),
            "%d items, %d stages: %.17g", n, stages, worst);
    }
    /* equal items: stage sizes differ by at most 1, smaller ones first */
    for (int n = 1; n <= 48; n++)
        for (int stages = 1; stages <= n; stages++) {
            CHECK(dt_partition_stages(even_costs, n, stages, first, text, sizeof text) == DT_OK);
            for (int part = 0; part < stages; part++)
                CHECK_MSG(
                    first[part + 1] - first[part] == n / stages + (part >= stages - n % stages),
                    "%d items, %d "
                    "stages: part %d has %d",
                    n, stages, part, first[part + 1] - first[part]);
        }
    double model[6] = { 3, 4, 4, 4, 4, 9 }; /* embedding, layers, head */
    CHECK(dt_partition_stages(model, 6, 3, first, text, sizeof text) == DT_OK && first[1] == 3 &&
          first[2] == 5);
    CHECK(dt_partition_stages(even_costs, 3, 4, first, text, sizeof text) == DT_ERR_ARG);
    CHECK_MSG(strcmp(text,
                  "3 items for 4 stages: each stage needs at least 1; use 3 stages or fewer") == 0,
        "%s", text);
    CHECK(dt_partition_stages(even_costs, 0, 1, first, text, sizeof text) == DT_ERR_ARG);
    CHECK(dt_partition_stages(even_costs, 3, 0, first, text, sizeof text) == DT_ERR_ARG);
    even_costs[1] = -2;
    CHECK(dt_partition_stages(even_costs, 3, 2, first, text, sizeof text) == DT_ERR_ARG);
    CHECK_MSG(strcmp(text, "item 1 costs -2; costs are 0 or more, and their sum is finite") == 0,
        "%s", text);
    even_costs[1] = NAN;
    CHECK(dt_partition_stages(even_costs, 3, 2, first, NULL, 0) == DT_ERR_ARG);
    even_costs[1] = even_costs[0] = 1.7e308;
    CHECK(dt_partition_stages(even_costs, 3, 2, first, text, sizeof text) == DT_ERR_ARG);
}

// ==== 8. Drawings ===============================================================================

static void test_text(void) {
    dt_ctx *ctx = new_ctx();
    dt_schedule *s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_1F1B, .ranks = 2, .micros = 3 });
    char text[400];
    dt_schedule_simulate(s, even, spans);
    CHECK(dt_schedule_text(s, spans, 12, text, sizeof text) == DT_OK);
    CHECK_MSG(strcmp(text, "rank  0 |01..aa2bb.cc|\nrank  1 |.0aa1bb2cc..|\n") == 0, "%s", text);
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_ZB, .ranks = 2, .micros = 3 });
    dt_schedule_simulate(s, even, spans);
    CHECK(dt_schedule_text(s, spans, 10, text, sizeof text) == DT_OK);
    CHECK_MSG(strcmp(text, "rank  0 |01.aA2bBcC|\nrank  1 |.0a1bA2cBC|\n") == 0, "%s", text);
    CHECK(dt_schedule_text(s, spans, 0, text, 2 * (72 + 12) + 1) == DT_OK &&
          strlen(text) == 2 * (72 + 11));
    CHECK(dt_schedule_text(s, spans, 10, text, 2 * (10 + 11)) == DT_ERR_ARG);
    CHECK(dt_schedule_text(s, spans, -1, text, sizeof text) == DT_ERR_ARG);
    CHECK(dt_schedule_text(NULL, spans, 10, text, sizeof text) == DT_ERR_ARG);
    s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_AFAB, .ranks = 1, .micros = 12 });
    dt_schedule_simulate(s, even, spans);
    CHECK(dt_schedule_text(s, spans, 36, text, sizeof text) == DT_OK);
    CHECK_MSG(strcmp(text, "rank  0 |012345678901aabbccddeeffgghhiijjaabb|\n") == 0, "%s", text);
    dt_ctx_free(ctx);
}

/* 1 if a text is well-formed XML of the simple kind that drawings use. */
static int well_formed(const char *s, int *rects, int *texts) {
    char stack[16][16];
    int depth = 0, roots = 0;
    *rects = *texts = 0;
    while (*s) {
        if (*s == '&' && strncmp(s, "&lt;", 4) && strncmp(s, "&gt;", 4) && strncmp(s, "&amp;", 5))
            return 0;
        if ((unsigned char)*s < 0x20 && *s != '\n') return 0;
        if (*s == '>') return 0;
        if (*s++ != '<') {
            if (depth == 0 && s[-1] != '\n') return 0;
            continue;
        }
        int closes = *s == '/';
        size_t n = strspn(s += closes, "abcdefghijklmnopqrstuvwxyz");
        char name[16];
        if (n == 0 || n >= sizeof name) return 0;
        memcpy(name, s, n);
        name[n] = 0;
        s += n;
        if (closes) {
            if (*s++ != '>' || depth == 0 || strcmp(stack[--depth], name)) return 0;
            continue;
        }
        *rects += strcmp(name, "rect") == 0;
        *texts += strcmp(name, "text") == 0;
        roots += depth == 0;
        while (*s == ' ') { /* name="value" */
            s += 1 + strspn(s + 1, "abcdefghijklmnopqrstuvwxyz-0123456789");
            if (*s++ != '=' || *s++ != '"') return 0;
            s += strcspn(s, "\"<&");
            if (*s++ != '"') return 0;
        }
        int single = *s == '/';
        s += single;
        if (*s++ != '>' || depth == 16) return 0;
        if (!single) memcpy(stack[depth++], name, sizeof name);
    }
    return depth == 0 && roots == 1;
}

static const char *read_drawing(memory_fs *fs, const char *name) {
    static char text[1 << 22];
    int i = memory_at(fs, name);
    if (i < 0 || fs->file[i].size >= sizeof text) return "";
    memcpy(text, fs->file[i].data, fs->file[i].size);
    text[fs->file[i].size] = 0;
    return text;
}

static void test_svg(void) {
    memory_fs fs;
    dt_io io = memory_io(&fs);
    int rects = 0, texts = 0;
    memset(&fs, 0, sizeof fs);
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet, .io = &io });
    dt_schedule *s = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_INTERLEAVED, .ranks = 4, .micros = 8 });
    dt_schedule *z = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_ZB, .ranks = 4, .micros = 8 });
    dt_span *other = spans + MOST / 2;
    if (!CHECK_MSG(s && z, "%s", dt_error_text(ctx))) return;
    dt_schedule_simulate(s, (dt_schedule_costs){ 0.5, 0.5, 0.5, NULL, 0 }, spans);
    dt_schedule_simulate(z, even, other);
    dt_timeline lines[2] = { { "a <b> & \"c\"\x01 \xc3\xa9", s, spans }, { NULL, z, other } };
    CHECK(dt_schedule_svg(ctx, "two.svg", lines, 2) == DT_OK);
    const char *text = read_drawing(&fs, "two.svg");
    CHECK(well_formed(text, &rects, &texts));
    /* boxes, rows, background, and the legend: 4 phases with 2 shades */
    CHECK_MSG(rects == 4 * 32 + 4 * 24 + 8 + 1 + 8, "%d boxes", rects);
    CHECK_MSG(texts == 4 * 32 + 4 * 24 + 8 + 2 + 5, "%d texts", texts);
    CHECK(strstr(text, ">a &lt;b&gt; &amp; \"c\"  \xc3\xa9: 28.5 s, bubble 18.8 % of the work, "
                       "15.8 % of the time<"));
    CHECK(strstr(text, ">zero-bubble: 27.0 s, bubble 12.5 % of the work, 11.1 % of the time<"));
    CHECK(strstr(text, "<title>rank 3: B(micro 7, chunk 0), stage 3: 1.00 s from "));
    CHECK(strstr(
        text, "<title>rank 0: F(micro 0, chunk 0), stage 0: 500 ms from 0.00 us on</title>"));
    CHECK(memory_at(&fs, "two.svg.tmp") < 0 && fs.open == 0);
    /* measured spans: the same drawing with another start time */
    for (int i = 0; i < 4 * 32; i++) {
        spans[i].begin += 1000;
        spans[i].end += 1000;
    }
    char *before = (char *)malloc(strlen(text) + 1);
    memcpy(before, text, strlen(text) + 1);
    CHECK(dt_schedule_svg(ctx, "two.svg", lines, 2) == DT_OK &&
          strcmp(read_drawing(&fs, "two.svg"), before) == 0);
    free(before);
    dt_schedule *big = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_1F1B, .ranks = 16, .micros = 64 });
    dt_schedule_simulate(big, even, spans);
    dt_timeline line = { NULL, big, spans };
    CHECK(dt_schedule_svg(ctx, "big.svg", &line, 1) == DT_OK &&
          well_formed(read_drawing(&fs, "big.svg"), &rects, &texts));
    CHECK_MSG(rects == 2 * 16 * 64 + 16 + 1 + 2 && texts == 2 * 16 * 64 + 16 + 1 + 2,
        "%d boxes, %d texts: numbers are missing or doubled", rects, texts);
    const char *late[] = { "F0 B0 F1 B1", "F0 F1 B0 B1" }; /* deadlocks after two actions */
    dt_schedule *wrong = dt_schedule_make(ctx,
        (dt_schedule_desc){
            .ranks = 2, .micros = 2, .generate = generate_lists, .user = late, .unchecked = 1 });
    dt_schedule_simulate(wrong, even, spans);
    line.schedule = wrong;
    CHECK(dt_schedule_svg(ctx, "stops.svg", &line, 1) == DT_OK &&
          well_formed(read_drawing(&fs, "stops.svg"), &rects, &texts));
    CHECK_MSG(rects == 2 + 2 + 1 + 2, "%d boxes", rects);
    dt_schedule_simulate(big, (dt_schedule_costs){ 0, 0, 0, NULL, 0 }, spans);
    line.schedule = big;
    CHECK(dt_schedule_svg(ctx, "none.svg", &line, 1) == DT_OK &&
          well_formed(read_drawing(&fs, "none.svg"), &rects, &texts));
    dt_ctx_free(ctx);
    memory_clear(&fs);
}

/* Whichever call of the I/O table fails, the file is complete or absent. Also schedules that cannot
   be drawn. */
static void test_svg_fails(void) {
    int failed = 0;
    for (int call = 1; call < 20; call++) {
        memory_fs fs;
        dt_io io = memory_io(&fs);
        int rects, texts;
        memset(&fs, 0, sizeof fs);
        memory_put(&fs, "a.svg", "old", 3);
        fs.fail_at = call;
        fs.reason = ENOSPC;
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet, .io = &io });
        dt_schedule *s = dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = 2, .micros = 2 });
        dt_timeline line = { NULL, s, spans };
        dt_schedule_simulate(s, even, spans);
        dt_status status = dt_schedule_svg(ctx, "a.svg", &line, 1);
        int old = strcmp(read_drawing(&fs, "a.svg"), "old") == 0;
        CHECK_MSG(old || well_formed(read_drawing(&fs, "a.svg"), &rects, &texts),
            "after a failure of call %d the file is incomplete", call);
        CHECK(status == DT_OK || status == DT_ERR_IO);
        CHECK(status != DT_OK || !old);
        failed += old;
        dt_ctx_free(ctx);
        memory_clear(&fs);
    }
    CHECK_MSG(failed >= 3, "only %d calls failed", failed);
    for (int i = 0; i < 5; i++) {
        dt_ctx *ctx = new_ctx();
        dt_schedule *s = dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = 2, .micros = 2 });
        dt_timeline line = { i == 0 ? "\xff" : NULL, i == 1 ? NULL : s, i == 2 ? NULL : spans };
        CHECK(dt_schedule_svg(ctx, i == 3 ? NULL : "a.svg", &line, i == 4 ? 0 : 1) == DT_ERR_ARG);
        CHECK(dt_error(ctx) == DT_ERR_ARG);
        dt_ctx_free(ctx);
    }
    CHECK_MSG(blocks == 0, "%ld blocks were not freed", blocks);
}

/* ---- schedules as text ---- */

static void expect_same(const dt_schedule *a, const dt_schedule *b) {
    int p = dt_schedule_ranks(a), same = p == dt_schedule_ranks(b);
    for (int i = 0; i < dt_schedule_stages(a); i++)
        same &= dt_schedule_rank_of(a, i) == dt_schedule_rank_of(b, i);
    for (int r = 0; r < p && same; r++) {
        same &= dt_schedule_count(a, r) == dt_schedule_count(b, r);
        for (int i = 0; same && i < dt_schedule_count(a, r); i++) {
            dt_action x = dt_schedule_actions(a, r)[i], y = dt_schedule_actions(b, r)[i];
            same &= x.phase == y.phase && x.micro == y.micro && x.stage == y.stage &&
                    x.slot == y.slot && x.send_to == y.send_to && x.recv_from == y.recv_from;
        }
    }
    CHECK_MSG(same, "%s: another schedule is read than was written", dt_schedule_name(a));
}

/* What dt_schedule_write writes, dt_schedule_read reads. */
static void test_written(void) {
    for (int kind = 0; kind < DT_SCHEDULES; kind++)
        for (int p = 1; p <= 4; p++) {
            static memory_fs fs;
            memset(&fs, 0, sizeof fs);
            dt_io io = memory_io(&fs);
            dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet, .io = &io });
            dt_schedule *a = dt_schedule_make(
                ctx, (dt_schedule_desc){ .kind = kind, .ranks = p, .micros = 3 * p - kind % 2 });
            CHECK(dt_schedule_write(ctx, "a.txt", a) == DT_OK);
            dt_schedule *b = dt_schedule_read(ctx, "a.txt", (dt_schedule_desc){ .ranks = p });
            if (CHECK_MSG(b != NULL, "%s", dt_error_text(ctx))) expect_same(a, b);
            CHECK(dt_schedule_write(ctx, "a.txt", NULL) == DT_ERR_ARG);
            dt_ctx_free(ctx);
            memory_clear(&fs);
            CHECK_MSG(blocks == 0, "%ld blocks were not freed", blocks);
        }
}

static void expect_read(const char *text, size_t bytes, const char *want) {
    static memory_fs fs;
    memset(&fs, 0, sizeof fs);
    dt_io io = memory_io(&fs);
    memory_put(&fs, "b.txt", text, bytes);
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet, .io = &io });
    dt_schedule *s = dt_schedule_read(ctx, "b.txt", (dt_schedule_desc){ .micros = 2 });
    const char *got = dt_error_text(ctx);
    CHECK_MSG((s != NULL) == !*want &&
                  (s || (strncmp(got, "rank 0: b.txt", 13) == 0 && strcmp(got + 13, want) == 0)),
        "'%s', not '%s'", got, want);
    dt_ctx_free(ctx);
    memory_clear(&fs);
    CHECK_MSG(blocks == 0, "%ld blocks were not freed", blocks);
}

static void test_read(void) {
    static const struct {
        const char *text, *want;
    } cases[] = {
        { "# a comment\n\n ranks 2,chunks 1 , micros 2\r\nrank 0: F(micro 0)F( micro 1 ) B(micro "
          "0) "
          "B(micro 1, chunk 0) # end\nrank 1: F(micro 0) B(micro 0)\nrank 1:F(micro 1)B(micro 1)",
            "" },
        { "", ":1: 'ranks P, chunks V, micros M' is needed, not ''" },
        { "rank 0: F(micro 0)", ":1: 'ranks P, chunks V, micros M' is needed, not 'rank 0: F(micro "
                                "0)'" },
        { "ranks 1, chunks 1, micros 3", ":1: a schedule of 3 micro-batches, but 2 are needed" },
        { "\nranks 0, chunks 1, micros 2", ":2: 0 ranks; use 1 to 1048576" },
        { "ranks 999999, chunks 99, micros 2", ":1: 999999 x 99 stages; use no more than 1048576" },
        { "ranks 1, chunks 1, micros 9999999999",
            ":1: 'ranks P, chunks V, micros M' is needed, not 'ranks 1, chunks 1, micros "
            "9999999999'" },
        { "ranks 1, chunks 1, micros 2\nB(micro 0)", ":2: 'rank R:' is needed, not 'B(micro 0)'" },
        { "ranks 1, chunks 1, micros 2\nrank 1: F(micro 0)", ":2: rank 1 of 1, counted from 0" },
        { "ranks 1, chunks 1, micros 2\nrank 0: F(micro 0) G(micro 1)",
            ":2: F, B, I or W(micro j, chunk c) is needed, not 'G(micro 1)'" },
        { "ranks 1, chunks 1, micros 2\nrank 0: F(micro 0) F(micro 2)",
            ":2: rank 0: F(micro 2, chunk 0): there are 2 micro-batches and 1 chunks, counted from "
            "0" },
        { "ranks 1, chunks 1, micros 2\nrank 0: F(micro 0) F(micro 0)\n\nrank 0: F(micro 0)",
            ": rank 0: F(micro 0) (line 2) comes a second time, as its action 1" },
        { "ranks 1, chunks 1, micros 2\nrank 0: F(micro 0) B(micro 0)\nrank 0: B(micro 1)\nrank 0: "
          "F(micro 1)",
            ": deadlock: rank 0 waits at B(micro 1) (line 3) for F(micro 1) (line 4), which is "
            "queued behind B(micro 1) (line 3)" },
        { "ranks 1, chunks 2, micros 2\nrank 0: stages 1", ":2: a stage for each chunk is needed, "
                                                           "not ''" },
        { "ranks 1, chunks 2, micros 2\nrank 0: stages 1 0\nrank 0: stages 0 1",
            ":3: rank 0 has its stages already" },
        { "ranks 2, chunks 1, micros 2\nrank 0: stages 0\nrank 1: stages 2",
            ":3: rank 1: chunk 0 is stage 2 of 2, counted from 0" },
        { "ranks 3, chunks 1, micros 2\nrank 1: stages 0\nrank 0: F(micro 0)",
            ": a line 'rank R: stages ..' is missing for ranks 0, 2; all ranks need one, or none" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_read(cases[i].text, strlen(cases[i].text), cases[i].want);
    expect_read("ranks 1, chunks 1, micros 2\n\0", 29, ":1: the file has a NUL");
}

int main(void) {
    quiet = *dt_host_default();
    quiet.log = silent;
    quiet.alloc = counting_alloc;
    quiet.free = counting_free;
    test_orders();
    test_lowering();
    test_figures();
    test_extra_slots();
    test_wrong_schedules();
    test_too_few_slots();
    test_random();
    test_swapped();
    test_v_schedule();
    test_refused();
    test_memory();
    test_simulate();
    test_partition();
    test_text();
    test_svg();
    test_svg_fails();
    test_written();
    test_read();
    return check_done("test_schedule");
}
