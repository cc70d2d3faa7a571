/* test_ps_save.c - snapshots and faults of a parameter server (dt_ps_save, dt_ps_load)

   A job trains two tables and saves after the steps that its plan marks: 'b' a base, 'd' a delta,
   's' removes old rows (owned mode only), '.' nothing. Another job, with other numbers of servers
   and workers, owned or served, loads and goes on. The final rows must have the bits of a job that
   was not interrupted. Gradients are multiples of 1/16 and depend on the rows only by their sign, so
   that sums have no rounding and the number of workers is free too.

   Disks are simulated (disk_sim.h): each call failing, a disk that is full at any byte, power cuts.
   Each rank is also killed at every 24th of its operations (`test_ps_save full`: at every one); test_checkpoint_kills.c kills ranks at the
   system calls of a save. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include "tests/zero/disk_sim.h"

enum { KEYS = 60, WIDTH_A = 5, WIDTH_B = 3, STEPS = 9, SHARDS = 12 };

typedef struct job {
    int workers, servers, mode;
    const char *plan; /* of each step, from step 1; "" : no saves */
    int steps;        /* the last step */
    int load, keep;
    int64_t clock; /* that dt_ps_load returned */
    float a[KEYS * WIDTH_A], b[KEYS * WIDTH_B];
    dt_io *io;
    dt_backend backend;
    const char *fault;
    dt_report report;
} job;

static void no_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* Adds the gradients of the shards of data that belong to this worker. */
static void add_gradients(dt_ps *ps, const int *tables, int step, int worker, int workers) {
    for (int shard = worker; shard < SHARDS; shard += workers)
        for (int t = 0; t < 2; t++) {
            int width = t ? WIDTH_B : WIDTH_A, n = t ? 1 : 4; /* few keys of b: some grow old */
            uint64_t key[4];
            float rows[4 * WIDTH_A], grads[4 * WIDTH_A];
            uint32_t x = (uint32_t)(shard * 7919 + step * 104729 + t * 611953 + 1);
            for (int i = 0; i < n; i++) {
                x = x * 1664525u + 1013904223u;
                uint32_t k = (x >> 16) % KEYS;
                key[i] = (uint64_t)(k % 3 ? k : k % 7) * 0x9E3779B97F4A7C15ull;
            }
            dt_ps_wait(ps, dt_ps_pull_start(ps, tables[t], key, (size_t)n, rows));
            for (int i = 0; i < n * width; i++)
                grads[i] = (float)((shard * 37 + step * 5 + i * 3) % 23 - 11) / 16 +
                           (rows[i] > 0 ? 0.25f : -0.25f);
            dt_ps_add(ps, tables[t], key, (size_t)n, grads);
        }
}

static void make_tables(dt_ps *ps, int *tables) {
    tables[0] = dt_ps_table(ps, (dt_table_desc){ .name = "a",
                                    .width = WIDTH_A,
                                    .init = DT_NORMAL(0.5),
                                    .optimizer = DT_TABLE_ADAGRAD,
                                    .admit_count = 2 });
    tables[1] = dt_ps_table(ps, (dt_table_desc){ .name = "b",
                                    .width = WIDTH_B,
                                    .init = DT_NORMAL(0.5),
                                    .optimizer = DT_TABLE_ADAM,
                                    .ttl = 1 });
}

static void read_rows(dt_ps *ps, const int *tables, job *j) {
    uint64_t keys[KEYS];
    float a[KEYS * WIDTH_A], b[KEYS * WIDTH_B];
    for (int i = 0; i < KEYS; i++) keys[i] = (uint64_t)i * 0x9E3779B97F4A7C15ull;
    dt_ps_wait(ps, dt_ps_pull_start(ps, tables[0], keys, KEYS, a));
    dt_ps_wait(ps, dt_ps_pull_start(ps, tables[1], keys, KEYS, b));
    if (!ps || dt_ctx_rank(ps->ctx) != 0) return;
    memcpy(j->a, a, sizeof a);
    memcpy(j->b, b, sizeof b);
}

static dt_status job_rank(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    int rank = dt_ctx_rank(ctx), tables[2];
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = j->servers, .mode = j->mode });
    make_tables(ps, tables);
    int64_t clock = j->load ? dt_ps_load(ps, "d") : 0;
    if (rank == 0) j->clock = clock;
    if (clock < 0) return dt_error(ctx);
    if (dt_ps_is_server(ps)) return dt_ps_serve(ps);
    for (int step = (int)clock + 1; step <= j->steps && dt_error(ctx) == DT_OK; step++) {
        add_gradients(ps, tables, step, rank, j->workers);
        dt_ps_step(ps, 0.1);
        char what = step <= (int)strlen(j->plan) ? j->plan[step - 1] : '.';
        if (what == 's' && dt_ps_owned(ps, tables[1]))
            dt_table_shrink(dt_ps_owned(ps, tables[1]), step - 1);
        if (what == 'b' || what == 'd')
            dt_ps_save(ps, "d/", (dt_ps_save_desc){ .delta = what == 'd', .keep = j->keep });
    }
    read_rows(ps, tables, j);
    dt_ps_end(ps);
    return dt_error(ctx);
}

static dt_status run(job *j) {
    dt_host host = *dt_host_default();
    host.log = no_log;
    memset(&j->report, 0, sizeof j->report);
    return dt_run((dt_run_desc){ .ranks = j->workers + j->servers,
                      .backend = j->backend,
                      .timeout_s = 60,
                      .host = &host,
                      .io = j->io,
                      .report = &j->report,
                      .user_bytes = sizeof *j,
                      .fault = j->fault },
        job_rank, j);
}

static int same_rows(const job *a, const job *b) {
    return memcmp(a->a, b->a, sizeof a->a) == 0 && memcmp(a->b, b->b, sizeof a->b) == 0;
}

/* Runs a job and checks that it has the rows of `want`; NULL: not compared. */
static job check_run(job j, dt_io *io, const job *want, int64_t clock, const char *what) {
    j.io = io;
    dt_status status = run(&j);
    CHECK_MSG(status == DT_OK && j.clock == clock, "%s, %d workers, %d servers: clock %lld: %s",
        what, j.workers, j.servers, (long long)j.clock, j.report.text);
    CHECK_MSG(!want || status != DT_OK || same_rows(&j, want),
        "%s, %d workers, %d servers: the rows differ", what, j.workers, j.servers);
    return j;
}

/* ---- resuming ---- */

/* A job that stops after some step and one that loads have together the bits of one job. */
static void test_resume(void) {
    static const struct {
        int workers, servers;
        const char *plan;
        int stop, clock;
    } firsts[] = { { 2, 1, ".b.d.d", 6, 6 }, { 2, 3, ".b.d.d", 7, 6 }, { 1, 2, "...b.", 5, 4 },
        { 3, 0, ".b.sdd", 6, 6 }, { 4, 0, "dddb", 0, 0 }, { 2, 0, "bs.d.b.", 7, 6 } };
    static const int seconds[][2] = { { 2, 1 }, { 2, 3 }, { 1, 0 }, { 3, 0 }, { 3, 2 } };
    for (size_t i = 0; i < sizeof firsts / sizeof firsts[0]; i++)
        for (size_t k = 0; k < sizeof seconds / sizeof seconds[0]; k++) {
            disk d;
            disk_seat seat = { &d, "", 0, 0, 0 };
            dt_io io = disk_io(&seat);
            disk_make(&d);
            job first = { .workers = firsts[i].workers,
                .servers = firsts[i].servers,
                .plan = firsts[i].plan,
                .steps = firsts[i].stop };
            job whole = first, second = { .workers = seconds[k][0],
                .servers = seconds[k][1],
                .plan = "......bd",
                .steps = STEPS,
                .load = 1 };
            whole.steps = STEPS;
            if (firsts[i].stop) {
                check_run(first, &io, NULL, 0, "the first job");
            } else {
                whole.plan = "";
            }
            /* the whole job saves on a disk of its own */
            disk other;
            disk_seat other_seat = { &other, "", 0, 0, 0 };
            dt_io other_io = disk_io(&other_seat);
            disk_make(&other);
            whole = check_run(whole, &other_io, NULL, 0, "the whole job");
            check_run(second, &io, &whole, firsts[i].clock, "resumed");
            check_run(second, &io, &whole, 8, "resumed again");
            CHECK_MSG(d.open == 0, "%d files are open", d.open);
            disk_free(&d);
            disk_free(&other);
        }
}

/* An asynchronous run can be saved too; its clock goes on. */
static void test_async(void) {
    disk d;
    disk_seat seat = { &d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    disk_make(&d);
    job j = { .workers = 3, .servers = 2, .mode = DT_PS_ASYNC, .plan = "..b..d", .steps = 6 };
    j = check_run(j, &io, NULL, 0, "asynchronous");
    job k = { .workers = 2, .servers = 1, .mode = DT_PS_ASYNC, .plan = "", .steps = 6, .load = 1 };
    check_run(k, &io, &j, 6, "asynchronous");
    disk_free(&d);
}

/* ---- damage ---- */

static void flip(disk *d, const char *path, size_t at) {
    int node = disk_find(d, "", path);
    if (CHECK_MSG(node >= 0, "%s is missing", path))
        d->node[node].data[at % d->node[node].size] ^= 4;
}

/* A damaged or torn delta: the base and the deltas before it count. */
static void test_damage(void) {
    static const char *const files[] = { "owner-0-table-0.bin", "owner-1-table-1.bin", "ps.bin" };
    for (int i = 0; i < 18; i++) {
        int part = i % 3, victim = i / 3 % 3 * 2 + 2, kind = i / 9; /* step 2, 4 or 6 */
        disk d;
        disk_seat seat = { &d, "", 0, 0, 0 };
        dt_io io = disk_io(&seat);
        char path[100];
        disk_make(&d);
        job j = { .workers = 2, .servers = 2, .plan = ".b.d.d", .steps = 6 };
        check_run(j, &io, NULL, 0, "to be damaged");
        snprintf(path, sizeof path, "d/step-%d/%s", victim, files[part]);
        if (kind)
            flip(&d, path, 41 + 97 * (size_t)i);
        else if (CHECK(disk_find(&d, "", path) >= 0))
            d.node[disk_find(&d, "", path)].size -= 8;
        job whole = { .workers = 2, .servers = 2, .plan = "", .steps = STEPS }, next = whole;
        next.load = 1;
        next.servers = 1 + i % 2;
        next.io = &io;
        if (victim == 2) {
            CHECK_MSG(run(&next) == DT_ERR_IO && strstr(next.report.text, "no snapshot in d is"),
                "%s is damaged: %s", path, next.report.text);
        } else {
            whole = check_run(whole, &io, NULL, 0, "whole");
            check_run(next, &io, &whole, victim - 2, path);
        }
        disk_free(&d);
    }
}

/* ---- failing disks ---- */

/* Loads what a failed save has left, and trains to the end. Returns the clock that was loaded. */
static int64_t check_image(disk *image, const job *whole, const char *what) {
    disk_seat seat = { image, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    job next = { .workers = 2, .servers = 1, .plan = "", .steps = STEPS, .load = 1, .io = &io };
    dt_status status = run(&next);
    CHECK_MSG(status == DT_OK && same_rows(&next, whole), "%s: clock %lld: %s", what,
        (long long)next.clock, next.report.text);
    return next.clock;
}

/* Each io call of the saves fails, or the disk is full at some byte: the job names the failure, and
   the snapshots before count. */
static void test_failing_saves(void) {
    job whole = { .workers = 2, .servers = 2, .plan = "", .steps = STEPS };
    run(&whole);
    long calls = 1, seen[7] = { 0 };
    int64_t written = 0;
    for (int kind = 0; kind < 2; kind++) /* a failing call; a full disk */
        for (long at = 0; at == 0 || at <= (kind ? (long)written : calls);
             at += kind                ? written / (check_all_cases() ? 60 : 12)
                   : check_all_cases() ? 1
                                       : 4) {
            disk d, image;
            disk_seat seat = { &d, "", 0, 1, 0 };
            dt_io io = disk_io(&seat);
            char what[80];
            disk_make(&d);
            if (kind)
                d.fault.room = at > 0 ? at - 1 : -1;
            else if (at > 0)
                d.fault = (disk_fault){ DISK_FAILS, 0, at, 0, EIO, -1 };
            job j = { .workers = 2, .servers = 2, .plan = ".b.d.d", .steps = 6, .io = &io };
            dt_status status = run(&j);
            snprintf(what, sizeof what, kind ? "full after %ld bytes" : "call %ld fails", at);
            if (at == 0 || d.hits == 0)
                CHECK_MSG(status == DT_OK, "%s: %s", what, j.report.text);
            else
                CHECK_MSG(status == DT_OK ||
                              (status == DT_ERR_IO &&
                                  strstr(j.report.text, kind ? "No space" : "Input/output")),
                    "%s: %s", what, j.report.text);
            if (at == 0) calls = seat.calls, written = d.written;
            disk_copy(&image, &d);
            int64_t clock = check_image(&image, &whole, what);
            if (clock >= 0 && clock < 7) seen[clock]++;
            CHECK_MSG(status == DT_OK ? clock == 6 : 1, "%s: clock %lld", what, (long long)clock);
            disk_free(&image);
            disk_free(&d);
        }
    CHECK_MSG(seen[0] && seen[2] && seen[4] && seen[6], "loaded clocks: 0 %ld, 2 %ld, 4 %ld, 6 %ld",
        seen[0], seen[2], seen[4], seen[6]);
}

/* The power fails at any change of the disk: a snapshot is complete or absent. */
static void test_power(void) {
    job whole = { .workers = 2, .servers = 2, .plan = "", .steps = STEPS };
    run(&whole);
    disk d, image;
    disk_seat seat = { &d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    disk_make(&d);
    job j = { .workers = 2, .servers = 2, .plan = ".b.d.d", .steps = 6 };
    check_run(j, &io, NULL, 0, "before the power fails");
    long seen[7] = { 0 };
    for (long end = d.n_ops; end >= 0; end -= check_all_cases() ? 1 : 3)
        for (uint64_t seed = 0; seed < DISK_SEEDS + 1; seed++) {
            char what[80];
            snprintf(what, sizeof what, "power cut after %ld changes, seed %d", end, (int)seed);
            disk_cut(&image, &d, end, seed == DISK_SEEDS ? 1000 + (uint64_t)end : seed);
            int64_t clock = check_image(&image, &whole, what);
            if (clock >= 0 && clock < 7) seen[clock]++;
            disk_free(&image);
        }
    CHECK_MSG(seen[0] && seen[2] && seen[4] && seen[6], "loaded clocks: 0 %ld, 2 %ld, 4 %ld, 6 %ld",
        seen[0], seen[2], seen[4], seen[6]);
    disk_free(&d);
}

static void shell(const char *command) {
    if (system(command) != 0) abort();
}

/* Each rank is killed at every n-th of its operations. The job names it, and
   a job that starts again from the last whole snapshot ends with the rows of an undisturbed one. */
static void test_kills(int every) {
    char scratch[] = "/tmp/test_ps_save.XXXXXX", back[200], clean[64];
    job whole = { .workers = 2, .servers = 2, .plan = "", .steps = STEPS };
    run(&whole);
    if (!getcwd(back, sizeof back) || !mkdtemp(scratch) || chdir(scratch) != 0) abort();
    long kills = 0, seen[7] = { 0 };
    for (int r = 0; r < 4; r++)
        for (int seq = every == 1 ? 1 : 1 + r * 2;; seq += every) {
            char fault[40], who[40];
            snprintf(fault, sizeof fault, "kill:rank=%d:seq=%d", r, seq);
            snprintf(who, sizeof who, "rank %d (process", r);
            shell("rm -rf d");
            job j = { .workers = 2, .servers = 2, .plan = ".b.d.d", .steps = STEPS };
            j.backend = DT_BACKEND_PROCS;
            j.fault = fault;
            dt_status status = run(&j);
            if (status == DT_OK) break; /* the rank has fewer operations */
            CHECK_MSG(status == DT_ERR_PEER && strstr(j.report.text, who) &&
                          strstr(j.report.text, "signal 9"),
                "%s: status %d, %s", fault, (int)status, j.report.text);
            j.fault = NULL;
            j.load = 1;
            j.backend = DT_BACKEND_THREADS;
            status = run(&j);
            CHECK_MSG(status == DT_OK && same_rows(&j, &whole), "%s: from clock %lld: %s", fault,
                (long long)j.clock, j.report.text);
            if (j.clock >= 0 && j.clock < 7) seen[j.clock]++;
            kills++;
        }
    if (chdir(back) != 0) abort();
    snprintf(clean, sizeof clean, "rm -rf '%s'", scratch);
    shell(clean);
    printf("%ld kills; clocks of the restarts: 0 %ld, 2 %ld, 4 %ld, 6 %ld\n", kills, seen[0],
        seen[2], seen[4], seen[6]);
    CHECK_MSG(kills > 20 && seen[0] && seen[2] && seen[4] && seen[6], "%ld kills", kills);
}

/* ---- workers that leave ---- */

enum { NEVER_STEPS, NEVER_ENDS, SERVER_LEAVES, LEAVE_KINDS };
typedef struct leaving {
    int kind;
    char notice[300]; /* of the server */
} leaving;

static void note(void *user, int level, int rank, const char *text) {
    leaving *l = (leaving *)user;
    (void)level, (void)rank;
    if (strstr(text, "waited for")) snprintf(l->notice, sizeof l->notice, "%s", text);
}

static dt_status leaving_rank(dt_ctx *ctx, void *user) {
    leaving *l = (leaving *)user;
    const int rank = dt_ctx_rank(ctx);
    uint64_t key = 7;
    float g[2] = { 1, 2 };
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = 1 });
    int t = dt_ps_table(ps, (dt_table_desc){ .name = "t", .width = 2 });
    if (dt_ps_is_server(ps)) {
        if (l->kind != SERVER_LEAVES) dt_ps_serve(ps);
    } else {
        for (int step = 0; step < 3 && dt_error(ctx) == DT_OK; step++) {
            dt_ps_wait(ps, dt_ps_pull_start(ps, t, &key, 1, g));
            if (rank == 1 && l->kind == NEVER_STEPS) {
                usleep(3000000);
                break;
            }
            dt_ps_add(ps, t, &key, 1, g);
            dt_ps_step(ps, 0.1);
            if (rank == 1 && l->kind == NEVER_ENDS && step == 1) break;
        }
        if (rank == 0) dt_ps_end(ps);
    }
    return dt_error(ctx);
}

/* A worker that stops, a worker that returns without dt_ps_end and a server that returns without
   dt_ps_serve are named, with the line of the program where another rank waits. */
static void test_leaving(void) {
    for (int kind = 0; kind < LEAVE_KINDS; kind++) {
        static const char *const texts[] = { "timeout 1.0 s in receive", "rank 1: receive u8 x 64",
            "rank 2 ended without the send that this receive needs" };
        static const dt_status statuses[] = { DT_ERR_TIMEOUT, DT_ERR_ARG, DT_ERR_COMM };
        leaving l = { .kind = kind };
        dt_report report;
        dt_host host = *dt_host_default();
        host.log = note;
        host.user = &l;
        memset(&report, 0, sizeof report);
        dt_status status =
            dt_run((dt_run_desc){ .ranks = 3, .timeout_s = 1, .host = &host, .report = &report },
                leaving_rank, &l);
        CHECK_MSG(status == statuses[kind] && strstr(report.text, texts[kind]) &&
                      strstr(report.text, "test_ps_save.c:"),
            "leaving %d: status %d: %s", kind, (int)status, report.text);
        if (kind == NEVER_STEPS)
            CHECK_MSG(strstr(l.notice, "waited for worker 1, which has done 0 steps"),
                "the server says: %s", l.notice);
    }
}

/* Old bases go, with their deltas and all their files. */
static void test_keep(void) {
    disk d;
    disk_seat seat = { &d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    disk_make(&d);
    job j = { .workers = 2, .servers = 2, .plan = "bdbdbd", .steps = 6, .keep = 2 };
    check_run(j, &io, NULL, 0, "keep 2");
    CHECK(disk_find(&d, "", "d/step-1") < 0 && disk_find(&d, "", "d/step-2") < 0);
    for (int i = 3; i <= 6; i++) {
        char path[40];
        snprintf(path, sizeof path, "d/step-%d/owner-1-table-1.bin", i);
        CHECK_MSG(disk_find(&d, "", path) >= 0, "%s is missing", path);
    }
    disk_free(&d);
}

/* ---- GEO ---- */

/* Trains for 3 of the 4 steps between two exchanges and saves, or loads; then reads the row. */
static dt_status geo_rank(dt_ctx *ctx, void *user) {
    float *row = (float *)user, g[2] = { 1, 2 };
    const uint64_t key = 7;
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = 1, .mode = DT_PS_GEO, .geo_steps = 4 });
    int t = dt_ps_table(ps, (dt_table_desc){ .name = "t", .width = 2 });
    int64_t clock = dt_ps_load(ps, "d");
    if (dt_ps_is_server(ps)) return dt_ps_serve(ps);
    for (int i = 0; i < 3 && clock == 0; i++) {
        dt_ps_add(ps, t, &key, 1, g);
        dt_ps_step(ps, 0.5);
    }
    if (clock == 0) {
        dt_ps_add(ps, t, &key, 0, g); /* no gradient that would have to be pushed */
        dt_ps_save(ps, "d", (dt_ps_save_desc){ 0, 0 });
    }
    dt_ps_wait(ps, dt_ps_pull_start(ps, t, &key, 1, row));
    return dt_ps_end(ps);
}

/* A snapshot between two exchanges has the steps since the last one. */
static void test_geo(void) {
    disk d;
    disk_seat seat = { &d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    float before[2] = { 0, 0 }, after[2] = { 0, 0 };
    disk_make(&d);
    dt_run_desc desc = { .ranks = 2, .timeout_s = 30 };
    desc.io = &io;
    CHECK(dt_run(desc, geo_rank, before) == DT_OK && before[0] == -1.5f && before[1] == -3.0f);
    CHECK(dt_run(desc, geo_rank, after) == DT_OK);
    CHECK_MSG(after[0] == before[0] && after[1] == before[1], "before the save %g %g, loaded %g %g",
        before[0], before[1], after[0], after[1]);
    disk_free(&d);
}

/* ---- mistakes ---- */

enum {
    SAVE_DELTA,
    SAVE_SUMS,
    SAVE_NULL,
    SAVE_AFTER_END,
    SAVE_STEPS_ON,
    SAVE_OTHER_CLOCK,
    SAVE_OTHER_DESC,
    SAVE_UNKNOWN,
    SAVE_TABLE_BETWEEN,
    SAVE_OTHER_OWNED,
    TABLE_LATE,
    LOAD_LATE,
    LOAD_TABLES,
    LOAD_WIDTH,
    SAVE_KINDS
};
typedef struct mistake {
    int kind, mode;
} mistake;

static dt_status mistake_rank(dt_ctx *ctx, void *user) {
    const mistake m = *(const mistake *)user;
    const int rank = dt_ctx_rank(ctx), other = rank == 1;
    uint64_t key = 7;
    float g[2] = { 1, 2 };
    dt_ps_save_desc base = { 0, 0 }, delta = { 1, 0 };
    const int owned = m.kind == SAVE_TABLE_BETWEEN || m.kind == SAVE_OTHER_OWNED;
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = !owned, .mode = m.mode });
    int t = dt_ps_table(ps, (dt_table_desc){ .name = "t", .width = m.kind == LOAD_WIDTH ? 1 : 2 });
    if (m.kind == LOAD_TABLES) dt_ps_table(ps, (dt_table_desc){ .name = "u", .width = 2 });
    if (m.kind == LOAD_TABLES || m.kind == LOAD_WIDTH) dt_ps_load(ps, "old");
    if (dt_ps_is_server(ps)) return dt_ps_serve(ps);
    dt_ps_add(ps, t, &key, 1, g);
    dt_ps_step(ps, 0.1);
    if (m.kind == SAVE_DELTA) dt_ps_save(ps, "d", delta);
    if (m.kind == SAVE_SUMS) dt_ps_add(ps, t, &key, 1, g);
    if (m.kind == SAVE_NULL) dt_ps_save(ps, NULL, base);
    if (m.kind == SAVE_AFTER_END) dt_ps_end(ps);
    if (m.kind == SAVE_STEPS_ON && other) {
        dt_ps_add(ps, t, &key, 1, g);
        dt_ps_step(ps, 0.1);
        dt_ps_wait(ps, dt_ps_pull_start(ps, t, &key, 1, g));
        return dt_ps_end(ps);
    }
    if (m.kind == SAVE_OTHER_CLOCK && other && m.mode == DT_PS_ASYNC) dt_ps_step(ps, 0.1);
    if (m.kind == SAVE_OTHER_DESC && other) base.keep = 3;
    if (m.kind == SAVE_OTHER_OWNED) dt_ps_save(ps, "d", base);
    if (m.kind == SAVE_OTHER_OWNED && other) base = delta;
    if (m.kind == TABLE_LATE) dt_ps_table(ps, (dt_table_desc){ .name = "u", .width = 2 });
    if (m.kind == SAVE_TABLE_BETWEEN) {
        dt_ps_save(ps, "d", base);
        dt_table_save(dt_ps_owned(ps, t), rank ? rank == 1 ? "t1" : "t2" : "t0",
            (dt_table_save_desc){ 0, 0 });
    }
    if (m.kind == LOAD_LATE) dt_ps_load(ps, "old");
    dt_ps_save(
        ps, m.kind == SAVE_UNKNOWN ? "old" : "d", m.kind == SAVE_TABLE_BETWEEN ? delta : base);
    dt_ps_end(ps);
    return dt_error(ctx);
}

static void test_mistakes(void) {
    static const char *const texts[] = { "a delta needs a snapshot", "gradients are not pushed",
        "dir is NULL", "dt_ps_end was called", "but worker 1 steps on", "but worker ",
        "but worker 1 saves after another step or with other arguments",
        "old has step-1 already, which was not loaded", "a delta needs a snapshot",
        "an argument differs between ranks 0 and 1", "before the first step and snapshot",
        "before the first step", "old/step-1 has 1 tables, this parameter server has 2",
        "is of another table: width 2" };
    for (int mode = DT_PS_SYNC; mode <= DT_PS_ASYNC; mode++)
        for (int kind = 0; kind < SAVE_KINDS; kind++) {
            if ((kind == SAVE_OTHER_CLOCK && mode == DT_PS_SYNC) ||
                ((kind == SAVE_TABLE_BETWEEN || kind == SAVE_OTHER_OWNED) && mode != DT_PS_SYNC))
                continue;
            mistake old = { SAVE_KINDS, 0 }, m = { kind, mode };
            disk d;
            disk_seat seat = { &d, "", 0, 0, 0 };
            dt_io io = disk_io(&seat);
            dt_report report;
            dt_host host = *dt_host_default();
            host.log = no_log;
            memset(&report, 0, sizeof report);
            disk_make(&d);
            dt_run_desc desc = { .ranks = 3, .timeout_s = 30, .host = &host };
            desc.io = &io;
            desc.report = &report;
            CHECK_MSG(dt_run(desc, mistake_rank, &old) == DT_OK, "%s", report.text);
            io.rename(io.user, "d", "old");
            memset(&report, 0, sizeof report);
            dt_status status = dt_run(desc, mistake_rank, &m);
            CHECK_MSG(status == (kind == SAVE_UNKNOWN ? DT_ERR_IO : DT_ERR_ARG) &&
                          strstr(report.text, texts[kind]),
                "mistake %d, mode %d: status %d, %s", kind, mode, (int)status, report.text);
            disk_free(&d);
        }
}

/* Another program saves to the folder: the error names its process. */
static void test_lock(void) {
    disk d;
    disk_seat seat = { &d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    disk_make(&d);
    io.make_folder(io.user, "d");
    int fd = io.open(io.user, "d/lock", DT_IO_LOCK);
    io.lock(io.user, fd);
    io.pwrite(io.user, fd, "process 77 on here\n", 19, 0);
    job j = { .workers = 2, .servers = 2, .plan = "b", .steps = 2, .io = &io };
    CHECK_MSG(
        run(&j) == DT_ERR_IO && strstr(j.report.text, "process 77 on here saves there already"),
        "%s", j.report.text);
    io.close(io.user, fd);
    check_run(j, &io, NULL, 0, "unlocked");
    CHECK(d.open == 0);
    disk_free(&d);
}

int main(int argc, char **argv) {
    int full = argc > 1 && strcmp(argv[1], "full") == 0;
    test_resume();
    test_async();
    test_damage();
    test_failing_saves();
    test_power();
    test_kills(full ? 1 : check_all_cases() ? 10 : 24);
    test_leaving();
    test_keep();
    test_geo();
    test_mistakes();
    test_lock();
    return check_done("test_ps_save");
}
