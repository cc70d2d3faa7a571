/* mpi_ranks.c - started by test_mpi.sh with mpirun: the cases of comm_cases.h over the MPI backend,
   and its failures

       mpirun -np 4 mpi_ranks cases 4         all cases; dt_run begins and ends MPI. Prints a hash
                                              of all results
       mpi_ranks threads 4                    the same for ranks that are threads
       mpirun -np 4 mpi_ranks failures        the program begins MPI; one failing run after
                                              another
       mpirun -np 4 mpi_ranks timeout|killed|killed_late
                                              a rank that does not arrive, or dies during a
                                              collective, or dies when the others have ended

   The program replaces MPI_Issend to count the messages given to MPI, their bytes without frames,
   and the packets and bulk data for ranks of the same machine. Prints a line for each
   failed check; the exit status is 0 if no check failed. */
#define _GNU_SOURCE
/* with a fake device (dt_kernels_cuda below): its kernel table is the CPU's, and requests for a
   device are counted */
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/comm/comm_cases.h"
#include "tests/comm/words.h"
#include "tests/support/jitter.h"

#include <signal.h>

static long long isends, isend_bytes, isends_near;
static int asked;

const dt_kernels *dt_kernels_cuda(void) { return dt_kernels_cpu(); }

dt_status dt_cuda_ready(char *text, size_t text_bytes) {
    asked++;
    if (text_bytes > 0) text[0] = 0;
    return DT_OK;
}

/* dt_run_desc.node_ranks: from NODE_RANKS, else 1. */
static int node_ranks(void) { return getenv("NODE_RANKS") ? atoi(getenv("NODE_RANKS")) : 1; }

/* 1 if rank `to` is on this rank's machine. */
static int is_near(int to) {
    int me, node = node_ranks();
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    return node == 0 || to / node == me / node;
}

int MPI_Issend(const void *buf, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
    MPI_Request *request) {
    const dt__frame *frame = (const dt__frame *)buf;
    int is_packet = tag == 0, is_message = is_packet && frame->kind <= DT__ANNOUNCE;
    isends += is_message;
    if (is_message) isend_bytes += count - (long long)sizeof *frame;
    if (!is_packet) isend_bytes += count; /* of bulk data */
    isends_near += is_near(to);
    return PMPI_Issend(buf, count, type, to, tag, comm, request);
}

/* ---- the cases ---- */

static cases short_ones, long_ones; /* one copy per process; shared by threads */
static int under_mpi;

static void all_make(int ranks) {
    short_ones = cases_make(ranks, ranks > 4 ? 3 : 1); /* because there are few cores */
    long_ones = cases_windows(ranks, ranks > 4 ? 12 : 4);
}

static void all_free(void) {
    cases_free(&short_ones);
    cases_free(&long_ones);
}

/* A large all-reduce over machines with equal numbers of ranks sends 2 S over each border between
   machines, split over the ranks of a machine. Sums are in the group's rank order, which may differ
   from the world's. */
static void bytes_between_machines(dt_ctx *ctx, int me, int n) {
    enum { MANY = 1 << 18 };
    int node = node_ranks(), bad = 0;
    dt_comm *turned = dt_comm_split(dt_world(ctx), 0, -me, "turned");
    if (node < 2 || node >= n || n % node) return;
    float *a = (float *)malloc(2 * MANY * sizeof *a), *sum = a + MANY;
    for (int i = 0; i < MANY; i++) a[i] = 1.0f / (float)(me + 1 + i % 1000);
    long long before = isend_bytes,
              chunk = 4 * (long long)(dt__chunk_offset(MANY, node, (n - 1 - me) % node + 1) -
                                      dt__chunk_offset(MANY, node, (n - 1 - me) % node));
    CHECK(dt_all_reduce(turned, a, sum, MANY, DT_F32, DT_SUM) == DT_OK);
    long long bytes = isend_bytes - before, want = chunk * ((me >= node) + (me < n - node));
    CHECK_MSG(bytes == want, "rank %d: %lld bytes of an all-reduce leave its machine, not %lld", me,
        bytes, want);
    for (int i = 0; i < MANY; i++) {
        float in_order = 1.0f / (float)(n + i % 1000);
        for (int r = n - 2; r >= 0; r--) in_order += 1.0f / (float)(r + 1 + i % 1000);
        bad += sum[i] != in_order;
    }
    CHECK_MSG(bad == 0, "rank %d: %d sums of a reversed group are in the wrong order", me, bad);
    double all = (double)bytes;
    dt_sum_doubles(dt_world(ctx), &all, 1);
    CHECK_MSG(all == 2.0 * (n / node - 1) * sizeof *a * MANY,
        "%.0f bytes of an all-reduce leave machines", all);
    free(a);
}

/* Rank 0 starts many multi-round operations at once; the other ranks run them one after another. */
static void rank_0_runs_ahead(dt_ctx *ctx, int me, int n) {
    enum { OPS_AHEAD = 20, EACH = 3000 };
    float *a = (float *)malloc((size_t)(OPS_AHEAD * n + 1) * EACH * sizeof *a),
          *mine = a + OPS_AHEAD * n * EACH;
    dt_work *works[OPS_AHEAD] = { NULL };
    int bad = 0;
    for (int i = 0; i < EACH; i++) mine[i] = (float)me;
    for (int k = 0; k < OPS_AHEAD; k++) {
        float *all = a + k * n * EACH;
        if (me > 0)
            dt_all_gather(dt_world(ctx), mine, all, EACH, DT_F32);
        else
            works[k] = dt_all_gather_start(dt_world(ctx), mine, all, EACH, DT_F32);
    }
    for (int k = 0; k < OPS_AHEAD && me == 0; k++) dt_wait(ctx, works[k]);
    for (int i = 0; i < OPS_AHEAD * n * EACH; i++) bad += a[i] != (float)(i / EACH % n);
    CHECK_MSG(bad == 0 && dt_error(ctx) == DT_OK, "rank %d: %d gathered values are wrong", me, bad);
    free(a);
}

/* A group uses shared memory exactly if all its ranks are on one node. */
static void check_shared_memory(dt_ctx *ctx, int me, int n) {
    dt_comm *world = dt_world(ctx);
    int node = node_ranks(), all = node == 0 || node >= n;
    CHECK_MSG((world->group->members != NULL) == (node != 1 && all),
        "wrong backend for the world, %d ranks per node", node);
    dt_comm *near = dt_comm_split(world, node ? me / node : 0, 0, "near");
    dt_comm *far = dt_comm_split(world, me % 2, 0, "far");
    if (dt_comm_size(near) > 1)
        CHECK_MSG(near->group->members != NULL,
            "rank %d: its node's group does not use shared memory", me);
    if (node == 2 && dt_comm_size(far) > 1)
        CHECK_MSG(
            far->group->members == NULL, "rank %d: a group across nodes uses shared memory", me);
    int32_t one = 1, sum = 0;
    CHECK(dt_all_reduce(near, &one, &sum, 1, DT_I32, DT_SUM) == DT_OK && sum == dt_comm_size(near));
    CHECK(dt_all_reduce(far, &one, &sum, 1, DT_I32, DT_SUM) == DT_OK && sum == dt_comm_size(far));
    /* MPI may need progress on the sender, which is already in the barrier */
    char room[DT_EAGER_BYTES] = "";
    if (me == 0) dt_send(world, room, DT_EAGER_BYTES / 4, DT_F32, 1, 3);
    if (me == 1) dt_recv(world, room, DT_EAGER_BYTES / 4, DT_F32, 0, 3);
    CHECK(dt_barrier(world) == DT_OK);
}

/* Rank 0 prints a hash of all that all ranks received, and the checks of all processes. */
static dt_status cases_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    uint64_t mine[2], all[2 * MAX_RANKS];
    dt_status status = comm_cases(ctx, &short_ones);
    if (!status) status = comm_cases(ctx, &long_ones);
    dt_traffic traffic = dt_comm_traffic(ctx);
    (void)user;
    if (under_mpi) {
        int node = node_ranks(), all = node == 0 || node >= n;
        int alone = node == 1 || (node > 1 && me == n - 1 && me % node == 0);
        /* messages to the rank itself do not go over MPI */
        long long others =
            (long long)traffic.messages - (long long)dt__peer_of(world->world, me)->messages;
        int equal = others == isends && (long long)traffic.bytes > isend_bytes;
        int fewer = others > isends && (long long)traffic.bytes > isend_bytes;
        CHECK_MSG((alone ? equal : fewer) && (isends > 0) == !all,
            "rank %d counts %lld messages to others, %zu bytes; MPI was given %lld of %lld", me,
            others, traffic.bytes, isends, isend_bytes);
        check_shared_memory(ctx, me, n);
        bytes_between_machines(ctx, me, n);
        rank_0_runs_ahead(ctx, me, n);
        CHECK_MSG(
            isends_near == 0, "rank %d: %lld messages to its machine go over MPI", me, isends_near);
    }
    double checks[2] = { check_passed, check_failed };
    mine[0] = short_ones.hash[me], mine[1] = long_ones.hash[me];
    dt_all_gather(world, mine, all, 2, DT_F64);
    dt_sum_doubles(world, checks, 2);
    for (int i = 1; i < 2 * n; i++) all[0] = all[0] * 31 + all[i];
    if (dt_error(ctx) || me > 0) return dt_error(ctx);
    printf("results %016llx\n", (unsigned long long)all[0]);
    if (under_mpi) printf("%.0f checks passed, %.0f failed\n", checks[0], checks[1]);
    return status;
}

static int cases_under_mpi(int ranks) {
    int ended = 0;
    dt_report report;
    under_mpi = 1;
    all_make(ranks);
    dt_status status = dt_run((dt_run_desc){ .backend = DT_BACKEND_MPI,
                                  .timeout_s = 60,
                                  .node_ranks = node_ranks(),
                                  .kernels = dt_kernels_cpu(),
                                  .check = -1 },
        cases_rank, NULL);
    /* calls are not compared above, because comparisons are messages, too; test_mismatch.c tests
       them */
    MPI_Finalized(&ended);
    CHECK(status == DT_OK && ended);
    CHECK_MSG(asked == 0, "a run on the CPU asks %d times for a device", asked);
    CHECK(dt_run((dt_run_desc){ .backend = DT_BACKEND_MPI, .report = &report }, cases_rank, NULL) ==
          DT_ERR_COMM);
    CHECK_MSG(strstr(report.text, "has ended in this process") != NULL, "%s", report.text);
    all_free();
    return check_failed != 0;
}

static int cases_over_threads(int ranks) {
    all_make(ranks);
    dt_status status = dt_run((dt_run_desc){ .ranks = ranks }, cases_rank, NULL);
    all_free();
    return status != DT_OK || check_failed != 0;
}

/* ---- failures ---- */

enum {
    FINE,
    ONE_FAILS,
    RETURNS,
    LOST,
    TOO_LONG,
    TOO_SHORT,
    TAG,
    LARGE,
    RANKS,
    ONE_RANKS,
    ENDS,
    ELSEWHERE,
    MIDDLE,
    KINDS
};
static const char *const kinds[] = { "fine", "one fails", "one returns an error",
    "a message is lost", "a message is longer than its receive", "a message is shorter",
    "a tag above MPI_TAG_UB", "large sends are pending", "another number of ranks",
    "another number of ranks on one", "one ends before a collective of its node",
    "one fails while others only sum on their node", "one fails in the middle of a large sum" };

typedef struct plan {
    int kind, victim;
} plan;

static int too_long, too_short; /* lines of the sends; each receive is in the next line */

static dt_status failing_rank(dt_ctx *ctx, void *user) {
    const plan *p = (const plan *)user;
    dt_comm *world = dt_world(ctx);
    enum { MANY = 300000 };
    int me = dt_comm_rank(world), n = dt_comm_size(world), other = me ^ 1;
    float *a = (float *)calloc(2 * MANY, sizeof *a), *b = a + MANY;
    dt_all_reduce(world, a, b, 100, DT_F32, DT_SUM);
    if (p->kind == ONE_FAILS && me == p->victim) dt_fail(ctx, DT_ERR_NUMERIC, "planted on %d", me);
    if (p->kind == RETURNS && me == p->victim) return free(a), DT_ERR_IO;
    if (p->kind == LOST && me == p->victim) dt_send(world, a, 3, DT_F32, (me + 1) % n, 7);
    too_long = __LINE__ + 1;
    if (p->kind == TOO_LONG && me == 0) dt_send(world, a, 30, DT_F32, 1, 1);
    if (p->kind == TOO_LONG && me == 1) dt_recv(world, a, 10, DT_F32, 0, 1);
    too_short = __LINE__ + 1;
    if (p->kind == TOO_SHORT && me == 0) dt_send(world, a, 10, DT_F32, 1, 1);
    if (p->kind == TOO_SHORT && me == 1) dt_recv(world, a, 30, DT_F32, 0, 1);
    if (p->kind == TAG && me == 0) dt_send(world, a, 10, DT_F32, 1, 0x7fffffff);
    if (p->kind == TAG && me == 1) dt_recv(world, b, 10, DT_F32, 0, 0x7fffffff);
    if (p->kind == LARGE && me == p->victim) dt_fail(ctx, DT_ERR_NUMERIC, "planted on %d", me);
    if (p->kind == LARGE && other < n) {
        dt_work *in = dt_recv_start(world, b, MANY, DT_F32, other, 2);
        dt_send(world, a, MANY, DT_F32, other, 2);
        dt_wait(ctx, in);
        /* no rank receives these */
        for (int r = 0; r < n; r++) dt_send_start(world, a, MANY, DT_F32, r, 3);
    }
    if (p->kind == ENDS) {
        int node = node_ranks();
        dt_comm *near = dt_comm_split(world, node ? me / node : 0, 0, "near");
        if (me != p->victim) dt_all_reduce(near, a, b, 100, DT_F32, DT_SUM);
        return free(a), dt_error(ctx);
    }
    if (p->kind == ELSEWHERE) {
        dt_comm *near = dt_comm_split(world, me / 2, 0, "near");
        if (me == p->victim) return free(a), dt_fail(ctx, DT_ERR_NUMERIC, "planted on %d", me);
        for (int i = 0; i < 10000000 && me < 2 && !dt_error(ctx); i++)
            dt_all_reduce(near, a, b, 1, DT_F32, DT_SUM);
        return free(a), dt_error(ctx);
    }
    if (p->kind == MIDDLE && me == p->victim) {
        dt_work *work = dt_all_reduce_start(world, a, b, MANY, DT_F32, DT_SUM);
        for (int i = 0; i < 100; i++) dt_test(ctx, work);
        dt_fail(ctx, DT_ERR_NUMERIC, "planted on %d", me);
        dt_wait(ctx, work);
    }
    if (p->kind != LOST && p->kind != FINE) dt_all_reduce(world, a, b, MANY, DT_F32, DT_SUM);
    free(a);
    return dt_error(ctx);
}

static int log_lines;
static void counting_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)rank, (void)text;
    log_lines += level == DT_LOG_ERROR;
}

static void one_failure(int kind, int victim, int rank, int size) {
    static const dt_status wanted[] = { DT_OK, DT_ERR_NUMERIC, DT_ERR_IO, DT_ERR_COMM, DT_ERR_COMM,
        DT_ERR_COMM, DT_OK, DT_ERR_NUMERIC, DT_ERR_ARG, DT_ERR_ARG, DT_ERR_COMM, DT_ERR_NUMERIC,
        DT_ERR_NUMERIC };
    plan p = { kind, victim };
    char text[128];
    dt_report report;
    dt_host host = *dt_host_default();
    double begin = host.now(host.user);
    host.log = counting_log;
    log_lines = 0;
    dt_status status = dt_run(
        (dt_run_desc){ .backend = DT_BACKEND_MPI,
            .timeout_s = 20,
            .report = &report,
            .host = &host,
            .ranks = kind == RANKS || (kind == ONE_RANKS && rank == victim) ? size + 1 : size,
            .node_ranks = node_ranks() },
        failing_rank, &p);
    double took = host.now(host.user) - begin;
    CHECK_MSG(status == wanted[kind] && in_time(took, 10), "%s, %d: rank %d after %.1f s: %s %s",
        kinds[kind], victim, rank, took, dt_status_name(status), report.text);
    text[0] = 0;
    if (kind == ONE_FAILS || kind == LARGE || kind == ELSEWHERE || kind == MIDDLE)
        snprintf(text, sizeof text, "rank %d: planted on %d", victim, victim);
    if (kind == RETURNS) snprintf(text, sizeof text, "rank %d: rank function returned", victim);
    if (kind == LOST)
        snprintf(text, sizeof text, "rank %d: ended without receiving", (victim + 1) % size);
    if (kind == TOO_LONG)
        snprintf(text, sizeof text,
            "rank 0 sends f32 x 30 at mpi_ranks.c:%d, rank 1 receives f32 x 10 at mpi_ranks.c:%d",
            too_long, too_long + 1);
    if (kind == TOO_SHORT)
        snprintf(text, sizeof text,
            "rank 0 sends f32 x 10 at mpi_ranks.c:%d, rank 1 receives f32 x 30 at mpi_ranks.c:%d",
            too_short, too_short + 1);
    if (kind == ENDS)
        snprintf(text, sizeof text, "rank %d ended without calling all-reduce", victim);
    if (kind == RANKS || kind == ONE_RANKS)
        snprintf(text, sizeof text, "%d ranks, but MPI started %d", size + 1, size);
    CHECK_MSG(strstr(report.text, text) != NULL, "%s, %d: rank %d reports '%s'", kinds[kind],
        victim, rank, report.text);
    int lines = log_lines, all = 0;
    MPI_Allreduce(&lines, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (kind != RANKS)
        CHECK_MSG(all == (wanted[kind] != DT_OK), "%s, %d: %d ranks log an error", kinds[kind],
            victim, all);
}

static dt_status different_calls(dt_ctx *ctx, void *what) { return words_rank(ctx, *(int *)what); }

/* Ranks make different calls; only the call description in their messages reveals it. */
static void words(void) {
    dt_host host = *dt_host_default();
    host.log = counting_log;
    for (int what = 0; what < WORDS_CASES; what++) {
        dt_report report;
        dt_status status = dt_run((dt_run_desc){ .backend = DT_BACKEND_MPI,
                                      .timeout_s = 20,
                                      .report = &report,
                                      .host = &host,
                                      .node_ranks = node_ranks(),
                                      .check = -1 },
            different_calls, &what);
        CHECK_MSG(status == DT_ERR_COMM && words_said(what, report.text), "words %d: %s", what,
            report.text);
    }
}

static int failures(void) {
    int rank, size, bad = 0, running = 0, all = 0;
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int kind = FINE; kind < KINDS; kind++)
        for (int victim = 0; victim < size; victim++) {
            if ((kind == TOO_LONG || kind == TOO_SHORT || kind == TAG || kind == RANKS ||
                    kind == FINE) &&
                victim)
                continue;
            int node = node_ranks() ? node_ranks() : size, first = victim / node * node;
            if (kind == ELSEWHERE && victim < 2) continue;
            /* the rank is alone on its node */
            if (kind == ENDS && (node == 1 || (first + 1 == size))) continue;
            one_failure(kind, victim, rank, size);
        }
    words();
    one_failure(FINE, 0, rank, size); /* after all failures, a good run succeeds */
    MPI_Finalized(&running);
    CHECK(!running);
    bad = check_failed;
    MPI_Allreduce(&bad, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Finalize();
    return all != 0;
}

/* ---- ranks that do not arrive ---- */

static dt_status sleeping_rank(dt_ctx *ctx, void *user) {
    enum { MANY = 100000 };
    static float x[MANY], y[MANY];
    int last = dt_comm_rank(dt_world(ctx)) == dt_comm_size(dt_world(ctx)) - 1;
    if (last && *(int *)user) raise(SIGKILL);
    if (last) dt_host_default()->sleep(NULL, 600);
    return dt_all_reduce(dt_world(ctx), x, y, MANY, DT_F32, DT_SUM);
}

/* The last rank dies when the others have ended and wait for it in the final synchronization. */
static dt_status dying_late_rank(dt_ctx *ctx, void *user) {
    (void)user;
    if (dt_comm_rank(dt_world(ctx)) != dt_comm_size(dt_world(ctx)) - 1) return DT_OK;
    dt_host_default()->sleep(NULL, 1);
    return (dt_status)raise(SIGKILL);
}

static int rank_never_arrives(int killed, int late) {
    dt_report report;
    double begin = dt_host_default()->now(NULL);
    dt_status status = dt_run((dt_run_desc){ .backend = DT_BACKEND_MPI,
                                  .timeout_s = late ? 120 : 1,
                                  .report = &report,
                                  .node_ranks = node_ranks() },
        late ? dying_late_rank : sleeping_rank, &killed);
    fprintf(stderr, "%s after %.0f s: %s\n", dt_status_name(status),
        dt_host_default()->now(NULL) - begin, report.text);
    return status == DT_ERR_TIMEOUT ? 3 : 1;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    if (strcmp(mode, "cases") == 0 && argc > 2) return cases_under_mpi(atoi(argv[2]));
    if (strcmp(mode, "failures") == 0) return failures();
    if (strcmp(mode, "timeout") == 0) return rank_never_arrives(0, 0);
    if (strcmp(mode, "killed") == 0) return rank_never_arrives(1, 0);
    if (strcmp(mode, "killed_late") == 0) return rank_never_arrives(1, 1);
    if (strcmp(mode, "threads") == 0 && argc > 2) return cases_over_threads(atoi(argv[2]));
    return 2;
}
