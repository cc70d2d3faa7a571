/* test_virtual_clock.c - a dry run's virtual clock shows the time that its costs predict

   A dry run with dt_dry.seconds has a virtual clock: kernels advance it by their cost, waits for
   operations by the time of the simulated link. Pipelines of linear layers run dry under every
   schedule, and every action's begin and end must equal dt_schedule_simulate's with the same costs.
   Then single collectives over networks with levels, overlap of an all-reduce with kernels, and the
   predicted trace. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_parallel.h"
#include "tests/support/check.h"
#include <unistd.h>

/* messages of 8 KiB, which wait for their receiver */
enum { ROWS = 64, WIDTH = 32, MOST_RANKS = 8, MOST_STAGES = 16 };
#define SPEED 256e6 /* FLOP/s of the imagined device */

static double seconds_of(void *user, const dt_dry_kernel *kernel) {
    (void)user;
    return kernel->flops / SPEED;
}

static int near(double a, double b) { return fabs(a - b) <= 1e-9 * (1 + fabs(b)); }

// ==== Pipelines =================================================================================

typedef struct pipe_case {
    int kind, ranks, chunks, micros;
    double latency;
    dt_tensor *w[MOST_STAGES];
    dt_dry dry[MOST_RANKS];
} pipe_case;

typedef struct pipe_rank {
    const pipe_case *c;
    dt_ctx *ctx;
    dt_tensor *w[MOST_STAGES];
    int stages;
} pipe_rank;

/* Stage s is s % 3 + 1 linear layers, so that the stages take unequal times. */
static int layers_of(int stage) { return stage % 3 + 1; }

static dt_tensor *stage_fn(dt_tensor *x, int stage, int micro, void *user) {
    pipe_rank *r = (pipe_rank *)user;
    static const float input[ROWS * WIDTH] = { 1 };
    (void)micro;
    if (stage == 0) x = dt_input(r->ctx, DT_F32, DT_SHAPE(ROWS, WIDTH), input);
    for (int i = 0; i < layers_of(stage); i++) x = dt_linear(x, r->w[stage], NULL);
    return stage + 1 < r->stages || !x ? x : dt_sum_over(x, DT_ALL);
}

static dt_status pipe_main(dt_ctx *ctx, void *user) {
    pipe_case *c = (pipe_case *)user;
    dt_comm *world = dt_world(ctx);
    pipe_rank r = { .c = c, .ctx = ctx, .stages = c->ranks * c->chunks };
    dt_dry *dry = &c->dry[dt_ctx_rank(ctx)];
    dry->seconds = seconds_of;
    dt_dry_begin(ctx, dry);
    dt_schedule *s = dt_schedule_make(ctx, (dt_schedule_desc){ .kind = c->kind,
                                               .ranks = c->ranks,
                                               .chunks = c->chunks,
                                               .micros = c->micros,
                                               .extra_slots = c->micros });
    /* with spare slots, because the simulator lets a slot wait until the receiver begins its action,
       and the executor only until it has posted the receive, one action before */
    if (!s) return dt_error(ctx);
    for (int i = 0; i < r.stages; i++) {
        char name[20];
        snprintf(name, sizeof name, "w%d", i);
        dt_stage(ctx, i);
        if (dt_schedule_rank_of(s, i) == dt_ctx_rank(ctx))
            r.w[i] = dt_param(ctx, name, DT_SHAPE(WIDTH, WIDTH), DT_ZEROS);
    }
    int n = dt_schedule_offset(s, c->ranks);
    dt_span *spans = (dt_span *)calloc((size_t)n, sizeof *spans),
            *all = (dt_span *)calloc((size_t)n, sizeof *all),
            *ideal = (dt_span *)calloc((size_t)n, sizeof *ideal);
    double costs[3 * MOST_STAGES], product = 2.0 * ROWS * WIDTH * WIDTH / SPEED;
    for (int i = 0; i < r.stages; i++) {
        costs[3 * i] = costs[3 * i + 2] = layers_of(i) * product;
        costs[3 * i + 1] = (layers_of(i) - (i == 0)) * product; /* the data need no gradient */
    }
    dt_pipe_run(
        ctx, (dt_pipe_desc){
                 .comm = world, .schedule = s, .run = stage_fn, .user = &r, .spans = spans });
    dt_pipe_gather_spans(world, s, spans, all);
    dt_schedule_simulate(s, (dt_schedule_costs){ .stages = costs, .message = c->latency }, ideal);
    for (int rank = 0, i = 0; rank < c->ranks && dt_ctx_rank(ctx) == 0; rank++)
        for (int k = 0; k < dt_schedule_count(s, rank); k++, i++)
            if (!CHECK_MSG(near(all[i].begin, ideal[i].begin) && near(all[i].end, ideal[i].end),
                    "%s, %d ranks, %d chunks, %d micros, latency %g: rank %d, action %d from %.9f "
                    "to %.9f, simulated %.9f to %.9f",
                    dt_schedule_name(s), c->ranks, c->chunks, c->micros, c->latency, rank, k,
                    all[i].begin, all[i].end, ideal[i].begin, ideal[i].end))
                k = rank = 1 << 20;
    free(spans);
    free(all);
    free(ideal);
    return dt_error(ctx);
}

static void test_pipelines(void) {
    static const int kinds[] = { DT_SCHEDULE_NAIVE, DT_SCHEDULE_AFAB, DT_SCHEDULE_1F1B,
        DT_SCHEDULE_INTERLEAVED, DT_SCHEDULE_ZB, DT_SCHEDULE_ZBV, DT_SCHEDULE_DUALPIPE_V };
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int ranks = 2; ranks <= 4; ranks += 2)
            for (int late = 0; late < 2; late++) {
                int two = kinds[k] == DT_SCHEDULE_INTERLEAVED || kinds[k] == DT_SCHEDULE_ZBV ||
                          kinds[k] == DT_SCHEDULE_DUALPIPE_V;
                pipe_case c = { kinds[k], ranks, two ? 2 : 1, 2 * ranks, late ? 1e-4 : 0, { NULL },
                    { { 0 } } };
                dt_report report;
                dt_run((dt_run_desc){ .ranks = ranks, .report = &report, .link = { c.latency } },
                    pipe_main, &c);
                CHECK_MSG(report.status == DT_OK, "%s", report.text);
            }
}

// ==== Networks with levels ======================================================================

enum { COUNT = 4096, WORLD = 8 };

static const dt_level levels[] = { { 2, 1e-6, 1e9 }, { 4, 1e-5, 1e8 } };
static const double beyond_latency = 1e-3, beyond_bytes = 1e7;

/* The predicted time of an all-reduce of COUNT f32 over n neighbouring ranks. */
static double all_reduce_seconds(int n) {
    double bytes = floor(2.0 * (n - 1) / n * COUNT * 4);
    for (int i = 0; i < 2; i++)
        if (n <= levels[i].ranks) return levels[i].latency_s + bytes / levels[i].bytes_per_s;
    return beyond_latency + bytes / beyond_bytes;
}

/* Groups of four ranks whose second one comes last. */
static int odd_last(int rank, int *key, void *user) {
    (void)user;
    *key = rank % 4 == 1 ? 4 : rank % 4;
    return rank / 4;
}

typedef struct network_case {
    dt_dry dry[WORLD];
    const char *trace;
} network_case;

static dt_status network_main(dt_ctx *ctx, void *user) {
    network_case *c = (network_case *)user;
    dt_comm *world = dt_world(ctx);
    dt_dry *dry = &c->dry[dt_ctx_rank(ctx)];
    dry->seconds = seconds_of;
    dt_dry_begin(ctx, dry);
    const dt_host *host = dt_ctx_host(ctx);
    CHECK(host->now(host->user) == 0);
    int sizes[] = { 2, 4, 8 };
    dt_comm *group[3];
    for (int i = 0; i < 3; i++)
        group[i] = dt_comm_split_by(world, dt_color_block, &sizes[i], "block");
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(WIDTH, WIDTH), DT_ZEROS),
              *x = dt_input(ctx, DT_F32, DT_SHAPE(COUNT), NULL);
    if (!w || !x || dt_error(ctx)) return dt_error(ctx);
    static const float input[ROWS * WIDTH] = { 1 };
    dt_tensor *rows = dt_input(ctx, DT_F32, DT_SHAPE(ROWS, WIDTH), input);
    double product = 2.0 * ROWS * WIDTH * WIDTH / SPEED;
    if (c->trace) dt_trace_start(ctx, 0);
    for (int i = 0; i < 3; i++) {
        double begin = dry->now;
        dt_all_reduce(group[i], x->data, x->data, COUNT, DT_F32, DT_SUM);
        CHECK_MSG(near(dry->now - begin, all_reduce_seconds(sizes[i])),
            "an all-reduce over %d ranks takes %.9f s, not %.9f", sizes[i], dry->now - begin,
            all_reduce_seconds(sizes[i]));
        for (int products = 0; products <= 8; products += 4) { /* hidden behind kernels, or not */
            begin = dry->now;
            dt_work *work = dt_all_reduce_start(group[i], x->data, x->data, COUNT, DT_F32, DT_SUM);
            for (int k = 0; k < products; k++) dt_linear(rows, w, NULL);
            CHECK(near(dry->now - begin, products * product));
            dt_wait(ctx, work);
            CHECK(near(dry->now - begin, fmax(products * product, all_reduce_seconds(sizes[i]))));
        }
    }
    /* keys may change the order of the ranks: 0 2 3 1 are on two switches of level 0 */
    dt_comm *permuted = dt_comm_split_by(world, odd_last, NULL, "permuted");
    double before = dry->now;
    dt_all_reduce(permuted, x->data, x->data, COUNT, DT_F32, DT_SUM);
    CHECK(near(dry->now - before, all_reduce_seconds(4)));
    /* two operations of one level take turns; those of two levels do not wait for each other */
    for (int other = 0; other < 2; other++) {
        double begin = dry->now;
        dt_work *first = dt_all_reduce_start(group[0], x->data, x->data, COUNT, DT_F32, DT_SUM),
                *second =
                    dt_all_reduce_start(group[other], x->data, x->data, COUNT, DT_F32, DT_SUM);
        dt_wait(ctx, first);
        CHECK(near(dry->now - begin, all_reduce_seconds(2)));
        dt_wait(ctx, second);
        CHECK(near(dry->now - begin, other ? all_reduce_seconds(4) : 2 * all_reduce_seconds(2)));
    }
    /* a collective ends with its last rank: odd ranks come one product later */
    dt_barrier(world);
    double begin = dry->now, late = dt_comm_has_phantoms(group[0]) ? 0 : product;
    if (dt_ctx_rank(ctx) % 2 == 1) dt_linear(rows, w, NULL);
    dt_all_reduce(group[0], x->data, x->data, COUNT, DT_F32, DT_SUM);
    CHECK_MSG(near(dry->now - begin, late + all_reduce_seconds(2)),
        "rank %d: with a late rank the all-reduce ends after %.9f s, not %.9f", dt_ctx_rank(ctx),
        dry->now - begin, late + all_reduce_seconds(2));
    double now = dry->now, all = now;
    dt_all_reduce(world, &now, &all, 1, DT_F64, DT_MAX);
    if (c->trace) dt_trace_write(world, c->trace);
    return dt_error(ctx);
}

/* Returns how often the file contains the text. */
static int file_has(const char *path, const char *text) {
    static char all[1 << 20];
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(all, 1, sizeof all - 1, f) : 0;
    int found = 0;
    all[n] = 0;
    if (f) fclose(f);
    for (const char *at = all; (at = strstr(at, text)); at++) found++;
    return found;
}

static void test_networks(void) {
    char path[] = "/tmp/virtual-clock-XXXXXX", text[80];
    int fd = mkstemp(path);
    if (!CHECK(fd >= 0)) return;
    close(fd);
    for (int present = 0; present <= 2; present += 2) {
        network_case c = { .trace = path };
        dt_report report;
        dt_link link = { beyond_latency, beyond_bytes, levels, 2 };
        dt_run((dt_run_desc){ .ranks = WORLD, .report = &report, .link = link, .present = present },
            network_main, &c);
        CHECK_MSG(report.status == DT_OK, "%s", report.text);
        /* the predicted trace has the predicted times, in microseconds */
        snprintf(text, sizeof text, "\"dur\":%.3f", all_reduce_seconds(8) * 1e6);
        CHECK_MSG(file_has(path, text), "the trace has no %s", text);
        /* A started operation ends when its time is over, not when the rank waits for it. A rank
           has six or seven operations of two ranks that last this long, two of them behind kernels,
           and four waits. */
        snprintf(text, sizeof text, "\"dur\":%.3f", all_reduce_seconds(2) * 1e6);
        int n = file_has(path, text), ran = present ? present : WORLD;
        CHECK_MSG(n >= 10 * ran, "the trace has %d times %s", n, text);
        CHECK(file_has(path, "\"pid\":4") > 0 && (file_has(path, "\"pid\":1,") > 0) == !present);
    }
    unlink(path);
}

/* Over a simulated link in real time, a message arrives when its send ends. */
static dt_status late_main(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    const dt_host *host = dt_ctx_host(ctx);
    char data[1000] = "";
    (void)user;
    dt_barrier(world);
    double begin = host->now(host->user);
    dt_work *work = dt_comm_rank(world) == 0 ? dt_send_start(world, data, 1000, DT_U8, 1, 0)
                                             : dt_recv_start(world, data, 1000, DT_U8, 0, 0);
    dt_wait(ctx, work);
    double seconds = host->now(host->user) - begin;
    CHECK_MSG(seconds >= 0.019, "rank %d: the message took %g s", dt_comm_rank(world), seconds);
    return dt_error(ctx);
}

/* A fault strikes in a dry run with a virtual clock too, which adds its own call table. */
static dt_status fault_main(dt_ctx *ctx, void *user) {
    dt_dry *dry = (dt_dry *)user + dt_ctx_rank(ctx);
    double x = 1;
    dry->seconds = seconds_of;
    dt_dry_begin(ctx, dry);
    dt_all_reduce(dt_world(ctx), &x, &x, 1, DT_F64, DT_SUM);
    dt_all_reduce(dt_world(ctx), &x, &x, 1, DT_F64, DT_SUM);
    return dt_error(ctx);
}

static int no_send(
    void *user, int to, const void *head, size_t head_bytes, const void *body, size_t bytes) {
    (void)user, (void)to, (void)head, (void)head_bytes, (void)body, (void)bytes;
    return 1;
}
static const void *no_recv(void *user, int from, int *sender, size_t *bytes) {
    (void)user, (void)from, (void)sender, (void)bytes;
    return NULL;
}

/* What a transport refuses: a wrong link, and a virtual clock. */
static void test_transport(void) {
    dt_transport transport = { .name = "none", .send = no_send, .recv = no_recv };
    static const dt_level level[1] = { { 0, 0, 0 } };
    for (int i = 0; i < 3; i++) {
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .rank = 0 });
        dt_link link = { 0, 0, level, i == 0 ? 100 : 1 };
        if (i == 2) link.n_levels = 0;
        dt_comm *world = dt_comm_attach(
            ctx, (dt_attach_desc){ .transport = &transport, .size = 2, .link = link });
        if (i < 2) CHECK(!world && dt_error(ctx) == DT_ERR_ARG);
        dt_dry dry = { .seconds = seconds_of };
        if (i == 2) CHECK(world && dt_dry_begin(ctx, &dry) == DT_ERR_UNSUPPORTED);
        if (i == 2) dt_comm_detach(ctx, DT_ERR_UNSUPPORTED);
        dt_ctx_free(ctx);
    }
}

static void test_link(void) {
    dt_dry dry[2] = { { 0 } };
    static const dt_level falling[] = { { 4, 0, 0 }, { 2, 0, 0 } },
                          odd[] = { { 2, 0, 0 }, { 3, 0, 0 } }, negative[] = { { 2, -1, 0 } };
    static const struct {
        dt_link link;
        const char *text;
    } wrong[] = { { { 0, 0, falling, 2 }, "level 1 of the link has 2 ranks" },
        { { 0, 0, odd, 2 }, "level 1 of the link has 3 ranks, and the level inside it 2" },
        { { 0, 0, negative, 1 }, "level 0 of the link: -1 s" },
        { { 0, 0, NULL, 1 }, "link with 1 levels" }, { { 0, 0, falling, 8 }, "link with 8 levels" },
        { { -1, 0, NULL, 0 }, "link of -1 s" } };
    dt_report report;
    dt_run((dt_run_desc){ .ranks = 2, .report = &report, .link = { 0, 5e4, NULL, 0 } }, late_main,
        NULL);
    CHECK_MSG(report.status == DT_OK, "%s", report.text);
    dt_run((dt_run_desc){ .ranks = 2, .report = &report, .fault = "exit:rank=1:seq=2" }, fault_main,
        dry);
    CHECK_MSG(report.status != DT_OK && report.rank == 1, "rank %d: %s", report.rank, report.text);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        dt_run(
            (dt_run_desc){ .ranks = 2, .report = &report, .link = wrong[i].link }, late_main, NULL);
        CHECK_MSG(
            report.status == DT_ERR_ARG && strstr(report.text, wrong[i].text), "%s", report.text);
    }
}

int main(void) {
    test_pipelines();
    test_networks();
    test_link();
    test_transport();
    return check_done("test_virtual_clock");
}
