/* mismatch_cases.h - ranks that disagree: the calls of one odd rank of four and of the other ranks,
   and the words that the error text must contain.

   A case is two short programs, one for the odd rank and one for the other ranks, which differ from
   operation `first` on; and the words that the text must contain. Included after dt_comm.h with its
   implementation, by test_mismatch.c and mpi_mismatch.c. */
#ifndef MISMATCH_CASES_H
#define MISMATCH_CASES_H

#include "tests/support/check.h"
#include "tests/support/jitter.h"

#include <ctype.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

static double mono(void) { /* a clock that all processes of the machine share */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void nap(double s) {
    struct timespec t;
    t.tv_sec = (time_t)s;
    t.tv_nsec = (long)(1e9 * (s - (double)t.tv_sec));
    nanosleep(&t, NULL);
}

/* ---- the calls of ranks ---- */

enum { ODD_RANKS = 4, ODD_STEPS = 8, ODD_CASES = 256, ODD_WORDS = 4, MANY = 20000 };
enum {
    K_ALL_REDUCE,
    K_REDUCE,
    K_REDUCE_SCATTER,
    K_ALL_GATHER,
    K_GATHER,
    K_SCATTER,
    K_ALL_TO_ALL,
    K_ALL_TO_ALL_V,
    K_BROADCAST,
    K_BARRIER,
    KINDS,
    K_STEP = KINDS
};
static const char *const kind_names[KINDS + 1] = { "all-reduce", "reduce", "reduce-scatter",
    "all-gather", "gather", "scatter", "all-to-all", "all-to-all-v", "broadcast", "barrier",
    "dt_comm_step" };

static int has_sum(int kind) { return kind <= K_REDUCE_SCATTER; }
static int has_root(int kind) {
    return kind == K_REDUCE || kind == K_GATHER || kind == K_SCATTER || kind == K_BROADCAST;
}

/* PAIR: ranks 0,1 and 2,3. TRIO: 0,1,2; rank 3 skips its operations */
enum { G_WORLD, G_PAIR, G_TRIO, GROUPS };
static const char *const group_names[GROUPS] = { "world", "pair", "trio" };

typedef struct step {
    int kind, group, root;
    size_t count;
    dt_dtype dtype;
    dt_op redop;
} step;

static step step_of(int kind) {
    step s;
    s.kind = kind;
    s.group = G_WORLD;
    s.root = 0;
    s.count = 10;
    s.dtype = DT_F32;
    s.redop = DT_SUM;
    return s;
}

/* One line for each kind: a text must name the line of each side's call. */
enum { FIRST_SITE = __LINE__ + 5 };
#define FOUR s->count, s->dtype
static dt_status step_do(
    const step *s, dt_comm *comm, const void *a, void *b, const size_t *counts) {
    switch (s->kind) {
    case K_ALL_REDUCE: return dt_all_reduce(comm, a, b, FOUR, s->redop);
    case K_REDUCE: return dt_reduce(comm, a, b, FOUR, s->redop, s->root);
    case K_REDUCE_SCATTER: return dt_reduce_scatter(comm, a, b, FOUR, s->redop);
    case K_ALL_GATHER: return dt_all_gather(comm, a, b, FOUR);
    case K_GATHER: return dt_gather(comm, a, b, FOUR, s->root);
    case K_SCATTER: return dt_scatter(comm, a, b, FOUR, s->root);
    case K_ALL_TO_ALL: return dt_all_to_all(comm, a, b, FOUR);
    case K_ALL_TO_ALL_V: return dt_all_to_all_v(comm, a, counts, b, counts, s->dtype);
    case K_BROADCAST: return dt_broadcast(comm, b, FOUR, s->root);
    case K_BARRIER: return dt_barrier(comm);
    case K_STEP: return dt_comm_step(comm);
    default: return DT_ERR_ARG;
    }
}
static int site_of(int kind) { return FIRST_SITE + kind; }

/* ---- cases ---- */

typedef struct mismatch {
    char name[128];
    int odd_rank;
    step others[ODD_STEPS], odd[ODD_STEPS];
    int n_others, n_odd, first;
    char word[ODD_WORDS][24]; /* "": none */
    int site[2];              /* kinds of call whose source lines the text must name; -1: none */
} mismatch;

typedef struct mismatches {
    mismatch list[ODD_CASES];
    int n;
} mismatches;

/* Adds n operations on which all ranks agree. */
static void agree_on(mismatch *m, int n, int at) {
    static const int kinds[] = { K_ALL_REDUCE, K_BARRIER, K_BROADCAST, K_ALL_GATHER,
        K_REDUCE_SCATTER };
    for (int i = 0; i < n; i++) {
        step s = step_of(kinds[(at + i) % 5]);
        s.group = (at + i) % 3 == 2 ? G_PAIR : G_WORLD;
        m->others[m->n_others++] = m->odd[m->n_odd++] = s;
    }
}

static mismatch *case_begin(mismatches *all, const char *name) {
    mismatch *m = &all->list[all->n];
    memset(m, 0, sizeof *m);
    snprintf(m->name, sizeof m->name, "%s", name);
    m->odd_rank = (all->n + 1) % ODD_RANKS;
    m->site[0] = m->site[1] = -1;
    agree_on(m, 2 + all->n % 2, all->n);
    m->first = m->n_others;
    return m;
}

static void case_end(mismatches *all, mismatch *m) {
    agree_on(m, 2, all->n + 1);
    all->n += all->n + 1 < ODD_CASES;
}

static void two_words(mismatch *m, const char *a, const char *b) {
    int at = 0;
    while (at < ODD_WORDS - 2 && m->word[at][0]) at++;
    snprintf(m->word[at], sizeof m->word[at], "%s", a);
    snprintf(m->word[at + 1], sizeof m->word[at + 1], "%s", b);
}

/* All ranks call s, except the odd rank, which calls odd. */
static void in_place_of(
    mismatches *all, const char *name, step s, step odd, const char *a, const char *b) {
    mismatch *m = case_begin(all, name);
    m->others[m->n_others++] = s;
    m->odd[m->n_odd++] = odd;
    m->site[0] = s.kind;
    m->site[1] = odd.kind;
    two_words(m, kind_names[s.kind], kind_names[odd.kind]);
    two_words(m, a, b);
    case_end(all, m);
}

static void cases_of_kinds(mismatches *all) {
    char name[128];
    for (int a = 0; a < KINDS; a++)
        for (int b = 0; b < KINDS; b++) {
            if (a == b) continue;
            snprintf(name, sizeof name, "kind: %s for %s", kind_names[b], kind_names[a]);
            in_place_of(all, name, step_of(a), step_of(b), "", "");
        }
}

static void cases_of_arguments(mismatches *all) {
    static const dt_dtype types[] = { DT_F32, DT_BF16, DT_F16, DT_F64, DT_I32 };
    static const char *const type_names[] = { "f32", "bf16", "f16", "f64", "i32" };
    static const dt_op ops[] = { DT_SUM, DT_AVG, DT_MAX, DT_MIN, DT_PROD };
    static const char *const op_names[] = { "sum", "avg", "max", "min", "prod" };
    static const size_t counts[][2] = { { 10, 12 }, { 12, 10 }, { 10, 0 }, { 0, 10 }, { 10, 3000 },
        { MANY, 10 } };
    char name[128], one[24], other[24];
    for (int k = 0; k < K_BARRIER; k++) {
        step s = step_of(k), odd = s;
        int a = k % 5, b = (k + 1 + k / 5) % 5;
        s.dtype = types[a];
        odd.dtype = types[b];
        snprintf(name, sizeof name, "dtype: %s of %s for %s", kind_names[k], type_names[b],
            type_names[a]);
        in_place_of(all, name, s, odd, type_names[a], type_names[b]);
        for (int i = k % 3; i < 6; i += 3) {
            s = odd = step_of(k);
            s.count = counts[i][0];
            odd.count = counts[i][1];
            snprintf(one, sizeof one, "%zu", s.count);
            snprintf(other, sizeof other, "%zu", odd.count);
            snprintf(name, sizeof name, "count: %s of %s for %s", kind_names[k], other, one);
            in_place_of(all, name, s, odd, one, other);
            /* the operations match, only a share differs */
            if (k == K_ALL_TO_ALL_V) all->list[all->n - 1].site[1] = -1;
        }
        for (int i = 0; i < 2 && has_root(k); i++) {
            s = odd = step_of(k);
            s.root = i ? 3 : 0;
            odd.root = i ? 1 : 2;
            snprintf(one, sizeof one, "root %d", s.root);
            snprintf(other, sizeof other, "root %d", odd.root);
            snprintf(name, sizeof name, "root: %s, %s for %s", kind_names[k], other, one);
            in_place_of(all, name, s, odd, one, other);
        }
        for (int i = 0; i < 2 && has_sum(k); i++) {
            a = (k + i) % 5;
            b = (k + 3 * i + 2) % 5;
            s = odd = step_of(k);
            s.redop = ops[a];
            odd.redop = ops[b];
            snprintf(
                name, sizeof name, "redop: %s, %s for %s", kind_names[k], op_names[b], op_names[a]);
            in_place_of(all, name, s, odd, op_names[a], op_names[b]);
        }
    }
}

/* The same operation on another group; and the calls on two groups, or of two operations, in
   exchanged order. */
static void cases_of_groups(mismatches *all) {
    static const int pairs[][2] = { { K_ALL_REDUCE, K_BARRIER }, { K_BROADCAST, K_REDUCE },
        { K_ALL_GATHER, K_SCATTER }, { K_ALL_TO_ALL, K_ALL_TO_ALL_V },
        { K_GATHER, K_REDUCE_SCATTER }, { K_BARRIER, K_BROADCAST } };
    char name[128];
    for (int k = 0; k < KINDS; k++) {
        step s = step_of(k), odd = s;
        int of_trio = k % 4 == 1 && (all->n + 1) % ODD_RANKS != 3; /* rank 3 is not in the trio */
        if (k % 2)
            s.group = of_trio ? G_TRIO : G_PAIR;
        else
            odd.group = G_PAIR;
        snprintf(name, sizeof name, "group: %s of %s for %s", kind_names[k], group_names[odd.group],
            group_names[s.group]);
        in_place_of(all, name, s, odd, group_names[s.group], group_names[odd.group]);
    }
    for (int k = 0; k < KINDS; k += 2) {
        snprintf(name, sizeof name, "order: %s of world and pair", kind_names[k]);
        mismatch *m = case_begin(all, name);
        m->others[m->n_others++] = m->odd[m->n_odd + 1] = step_of(k);
        m->others[m->n_others] = step_of(k);
        m->others[m->n_others].group = G_PAIR;
        m->odd[m->n_odd] = m->others[m->n_others++];
        m->n_odd += 2;
        m->site[0] = k;
        two_words(m, kind_names[k], "");
        two_words(m, "world", "pair");
        case_end(all, m);
    }
    for (int i = 0; i < 6; i++) {
        snprintf(name, sizeof name, "order: %s and %s", kind_names[pairs[i][0]],
            kind_names[pairs[i][1]]);
        mismatch *m = case_begin(all, name);
        for (int k = 0; k < 2; k++) {
            m->others[m->n_others++] = step_of(pairs[i][k]);
            m->odd[m->n_odd++] = step_of(pairs[i][1 - k]);
            m->site[k] = pairs[i][k];
        }
        two_words(m, kind_names[pairs[i][0]], kind_names[pairs[i][1]]);
        case_end(all, m);
    }
}

/* One rank skips a call. It then calls the next operation, or ends, or (with many equal calls) ends
   one call early. */
static void cases_of_missing(mismatches *all) {
    char name[128];
    for (int k = 0; k < KINDS; k++) {
        int next = (k + 3) % KINDS;
        snprintf(name, sizeof name, "missing: %s before %s", kind_names[k], kind_names[next]);
        mismatch *m = case_begin(all, name);
        m->others[m->n_others++] = step_of(k);
        m->others[m->n_others++] = m->odd[m->n_odd++] = step_of(next);
        m->site[0] = k;
        m->site[1] = next;
        two_words(m, kind_names[k], kind_names[next]);
        case_end(all, m);
    }
    for (int k = 0; k < KINDS; k++) {
        snprintf(name, sizeof name, "missing: %s at the end", kind_names[k]);
        mismatch *m = case_begin(all, name);
        m->others[m->n_others++] = step_of(k);
        m->site[0] = k;
        two_words(m, kind_names[k], "ended without");
        all->n += all->n + 1 < ODD_CASES;
    }
    for (int k = 0; k < KINDS; k += 2) {
        snprintf(name, sizeof name, "missing: one of four times %s", kind_names[k]);
        mismatch *m = case_begin(all, name);
        for (int i = 0; i < 4; i++) m->others[m->n_others++] = step_of(k);
        for (int i = 0; i < 3; i++) m->odd[m->n_odd++] = step_of(k);
        m->first += 3;
        m->site[0] = k;
        two_words(m, kind_names[k], "ended without");
        all->n += all->n + 1 < ODD_CASES;
    }
    for (int k = 0; k < KINDS; k++) {
        snprintf(name, sizeof name, "missing: %s at a step's end", kind_names[k]);
        mismatch *m = case_begin(all, name);
        m->others[m->n_others++] = step_of(k);
        m->others[m->n_others++] = m->odd[m->n_odd++] = step_of(K_STEP);
        m->site[0] = k;
        two_words(m, kind_names[k], "step");
        case_end(all, m);
    }
}

static void cases_all(mismatches *all) {
    all->n = 0;
    cases_of_kinds(all);
    cases_of_arguments(all);
    cases_of_groups(all);
    cases_of_missing(all);
}

/* ---- running one ---- */

typedef struct odd_note {
    double entered, failed; /* times of the last call or the end, and of learning of the failure */
    int done, ended;        /* done: completed operations; ended: 1 if the rank reached its end */
    dt_status status;
    char text[512];
    dt_report report; /* for ranks that call dt_run themselves */
    dt_status returned;
} odd_note;

typedef struct odd_run {
    const mismatch *what;
    uint64_t delays; /* seed for which rank is a little late */
    odd_note note[ODD_RANKS];
} odd_run;

static dt_status odd_rank(dt_ctx *ctx, void *user) {
    odd_run *run = (odd_run *)user;
    const mismatch *m = run->what;
    dt_comm *groups[GROUPS];
    int me = dt_comm_rank(dt_world(ctx)), odd = me == m->odd_rank;
    odd_note *note = &run->note[me];
    const step *steps = odd ? m->odd : m->others;
    int n = odd ? m->n_odd : m->n_others;
    size_t bytes = (size_t)ODD_RANKS * MANY * 8;
    char *a = (char *)calloc(2, bytes), *b = a + bytes;
    groups[G_WORLD] = dt_world(ctx);
    groups[G_PAIR] = dt_comm_split(dt_world(ctx), me / 2, 0, "pair");
    groups[G_TRIO] = dt_comm_split(dt_world(ctx), me < 3 ? 0 : -1, 0, "trio");
    for (int i = 0; i < n && !dt_error(ctx); i++) {
        size_t counts[ODD_RANKS];
        for (int r = 0; r < ODD_RANKS; r++) counts[r] = steps[i].count;
        if (i == m->first && (run->delays >> 2) % 4 == (uint64_t)me)
            nap(1e-3 * (double)(run->delays % 4));
        if (!groups[steps[i].group]) continue;
        note->entered = mono();
        if (step_do(&steps[i], groups[steps[i].group], a, b, counts) == DT_OK) note->done = i + 1;
    }
    if (!dt_error(ctx)) {
        note->ended = 1;
        note->entered = mono();
    }
    note->failed = mono();
    note->status = dt_error(ctx);
    snprintf(note->text, sizeof note->text, "%s", dt_error_text(ctx));
    free(a);
    /* a failed context makes the run fail even if the rank function returns DT_OK */
    return DT_OK;
}

/* ---- checking a case ---- */

/* A text without its "rank N: " and "peer failed first: " prefixes. */
static const char *without_prefix(const char *text) {
    for (;;) {
        int at = 0;
        sscanf(text, "rank %*d: %n", &at);
        if (at == 0 && strncmp(text, "peer failed first: ", 19) == 0) at = 19;
        if (at == 0) return text;
        text += at;
    }
}

/* "reduce" is not in "all-reduce". */
static int has_word(const char *text, const char *word) {
    size_t length = strlen(word);
    for (const char *p = text; (p = strstr(p, word)); p++) {
        int before = p == text ? ' ' : p[-1], after = p[length];
        if (!isalnum(before) && before != '-' && !isalnum(after) && after != '-') return 1;
    }
    return 0;
}

static double odd_late(const odd_run *run) {
    double entered = 0, failed = 0;
    for (int r = 0; r < ODD_RANKS; r++) {
        if (run->note[r].entered > entered) entered = run->note[r].entered;
        if (!run->note[r].ended && run->note[r].failed > failed) failed = run->note[r].failed;
    }
    return failed - entered;
}

static int names_others(const char *text, int odd) {
    char rank[16];
    int others = 0, itself = 0;
    for (int r = 0; r < ODD_RANKS; r++) {
        snprintf(rank, sizeof rank, "rank %d", r);
        *(r == odd ? &itself : &others) += has_word(text, rank);
    }
    return itself && others > 0;
}

/* 1 if the odd rank is in the group of this rank's call; otherwise the call succeeds. */
static int meets_odd(const mismatch *m, int rank) {
    int group = m->others[m->first].group;
    if (group == G_PAIR) return rank / 2 == m->odd_rank / 2;
    return group == G_WORLD || rank < 3;
}

/* Checks the first failure of the job, as reported: equal on all ranks, and with all required
   words. */
static void check_odd_run(
    const odd_run *run, const char *where, dt_status status, const dt_report *report) {
    const mismatch *m = run->what;
    const char *text = without_prefix(report->text), *missing = NULL;
    char site[48];
    CHECK_MSG(status != DT_OK && report->status == status,
        "%s: %s: dt_run returns %s, reports %s: %s", where, m->name, dt_status_name(status),
        dt_status_name(report->status), report->text);
    CHECK_MSG(status != DT_ERR_TIMEOUT, "%s: %s: a timeout: %s", where, m->name, text);
    for (int r = 0; r < ODD_RANKS; r++) {
        const odd_note *note = &run->note[r];
        if (note->ended) continue;
        CHECK_MSG(strcmp(without_prefix(note->text), text) == 0,
            "%s: %s: rank %d has '%s', the report '%s'", where, m->name, r, note->text, text);
        CHECK_MSG(!meets_odd(m, r) || note->done <= m->first,
            "%s: %s: rank %d passed the mismatch: %s", where, m->name, r, text);
    }
    CHECK_MSG(names_others(text, m->odd_rank),
        "%s: %s: not both ranks are named (rank %d is odd): %s", where, m->name, m->odd_rank, text);
    for (int i = 0; i < ODD_WORDS; i++)
        if (m->word[i][0] && !has_word(text, m->word[i])) missing = m->word[i];
    CHECK_MSG(!missing, "%s: %s: '%s' is not in: %s", where, m->name, missing ? missing : "", text);
    for (int i = 0; i < 2; i++) {
        if (m->site[i] < 0) continue;
        snprintf(site, sizeof site, "mismatch_cases.h:%d", site_of(m->site[i]));
        CHECK_MSG(has_word(text, site), "%s: %s: '%s' is not in: %s", where, m->name, site, text);
    }
}

/* ---- how late they were ---- */

typedef struct lateness {
    double s[4096];
    int n;
} lateness;

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

__attribute__((unused)) static void lateness_add(lateness *l, double s) {
    if (l->n < 4096) l->s[l->n++] = s;
}

__attribute__((unused)) static double lateness_at(lateness *l, double part) {
    if (l->n == 0) return 0;
    qsort(l->s, (size_t)l->n, sizeof l->s[0], by_size);
    int i = (int)(part * (double)l->n);
    return l->s[i < l->n ? i : l->n - 1];
}

__attribute__((unused)) static void lateness_print(lateness *l, const char *what) {
    printf("%s: %d, late by %.2f ms (median), %.2f ms (99th percentile), %.2f ms (max)\n", what,
        l->n, 1e3 * lateness_at(l, 0.5), 1e3 * lateness_at(l, 0.99), 1e3 * lateness_at(l, 1));
    fflush(stdout);
}

#endif
