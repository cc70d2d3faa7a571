/* test_tcp.c - dt_comm.h over sockets: the cases of comm_cases.h, and every way in which a peer can
   end.

   Ranks are forked processes (tcp_jobs.h). A hash of all received data must equal that of the same
   cases on threads. test_rendezvous.c tests how ranks find each other. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/comm/comm_cases.h"
#include "tests/comm/tcp_jobs.h"
#include "tests/comm/words.h"

/* ---- 1. all operations and messages give the bits of threads ---- */

static cases all; /* made before the ranks start */

static dt_status cases_rank(dt_ctx *ctx, void *user) {
    dt_status status = comm_cases(ctx, &all);
    int me = dt_ctx_rank(ctx);
    ((job *)user)->result[me].hash = all.hash[me];
    return status;
}

static void compare_with_threads(cases made) {
    all = made;
    job *tcp = run_job(all.n, cases_rank, 0), *threads = job_make(all.n, cases_rank, 0);
    dt_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.ranks = all.n;
    CHECK(dt_run(desc, cases_rank, threads) == DT_OK);
    check_well(tcp);
    for (int rank = 0; rank < all.n; rank++)
        CHECK_MSG(tcp->result[rank].hash == threads->result[rank].hash && tcp->result[rank].hash,
            "%d ranks: rank %d has different bits than on threads", all.n, rank);
    job_free(tcp);
    job_free(threads);
    cases_free(&all);
}

/* Overlapping send and recv: a legal overlap gives correct results, any other is refused on every
   rank. */
static dt_status overlap_rank(dt_ctx *ctx, void *user) {
    return overlap_of(ctx, (unsigned)((const job *)user)->what);
}

static void test_overlap(void) {
    int refused = 0;
    for (int i = 0; i < 48; i++) {
        job *j = run_job(2 + i % 4, overlap_rank, i);
        for (int rank = 0; rank < j->ranks; rank++)
            CHECK_MSG(j->result[rank].ended &&
                          (j->result[rank].status == DT_OK) == (j->result[0].status == DT_OK),
                "overlap %d: rank %d: %s", i, rank, j->result[rank].report.text);
        refused += j->result[0].status != DT_OK;
        job_free(j);
    }
    CHECK_MSG(refused > 5 && refused < 45, "%d of 48 overlaps are refused", refused);
}

/* A rank may end early if the other ranks need nothing more from it. */
static dt_status early_end_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    float *a = (float *)calloc(1000000, sizeof *a);
    dt_status status = DT_OK;
    (void)user;
    for (int i = 0; i < 1000000; i++) a[i] = (float)i;
    if (me == 1) status = dt_send(world, a, 1000000, DT_F32, 0, 1);
    if (me == 1) dt_send(world, a + 5, 1, DT_F32, 0, 2);
    if (me == 0) {
        nap(0.3);
        memset(a, 0, 1000000 * sizeof *a);
        CHECK(dt_recv(world, a, 1000000, DT_F32, 1, 1) == DT_OK && a[999999] == 999999);
        nap(0.2); /* the ended rank's goodbye has arrived */
        CHECK(dt_recv(world, a, 1, DT_F32, 1, 2) == DT_OK && a[0] == 5);
        status = dt_recv(world, a, 1, DT_F32, 2, 3);
    }
    if (me == 2) {
        nap(0.7);
        status = dt_send(world, a, 1, DT_F32, 0, 3);
    }
    free(a);
    return status;
}

/* Late ranks are no deadlock: in turn each rank waits so long that it reports its wait, while the
   other does not wait. */
static dt_status late_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), x = 0;
    (void)user;
    for (int i = 0; i < 8 && dt_error(ctx) == DT_OK; i++) {
        if (me == i % 2) nap(0.06);
        if (me == i % 2) dt_send(world, &i, 1, DT_I32, 1 - me, 1);
        if (me != i % 2) CHECK(dt_recv(world, &x, 1, DT_I32, 1 - me, 1) == DT_OK && x == i);
    }
    return dt_error(ctx);
}

/* Both ranks wait for one message that is long on its way: no deadlock either. */
static dt_status long_rank(dt_ctx *ctx, void *user) {
    enum { LONG_COUNT = 50000000 };
    dt_comm *world = dt_world(ctx);
    float *a = (float *)calloc(LONG_COUNT, sizeof *a);
    (void)user;
    if (dt_comm_rank(world) == 0)
        dt_send(world, a, LONG_COUNT, DT_F32, 1, 1);
    else
        dt_recv(world, a, LONG_COUNT, DT_F32, 0, 1);
    free(a);
    return dt_error(ctx);
}

/* More started sends than their receiver has credits for: the last ones wait at the sender. */
static dt_status waiting_sends_rank(dt_ctx *ctx, void *user) {
    enum { N = DT__ANNOUNCE_CREDITS + 4000 };
    dt_comm *world = dt_world(ctx);
    int *values = (int *)calloc(N, sizeof *values), last = 0, wrong = 0;
    dt_work **works = (dt_work **)calloc(N, sizeof *works), *work = NULL;
    (void)user;
    for (int i = 0; i < N && dt_comm_rank(world) == 0; i++) {
        values[i] = i;
        works[i] = dt_send_start(world, &values[i], 1, DT_I32, 1, 3);
    }
    if (dt_comm_rank(world) == 0) dt_send(world, &last, 1, DT_I32, 1, 4);
    for (int i = 0; i < N && works[i]; i++) dt_wait(ctx, works[i]);
    if (dt_comm_rank(world) == 1) { /* looks for messages, but receives none of them */
        const dt__peer *peer = dt__peer_of(world->world, 0);
        work = dt_recv_start(world, &last, 1, DT_I32, 0, 4);
        for (double from = seconds(); in_time(seconds() - from, 30) &&
                                      peer->unmatched < DT__ANNOUNCE_CREDITS && !dt_error(ctx);)
            dt_test(ctx, work);
        for (int i = 0; i < 1000; i++) dt_test(ctx, work);
        CHECK_MSG(peer->unmatched == DT__ANNOUNCE_CREDITS, "%llu announcements",
            (unsigned long long)peer->unmatched);
        for (int i = 0; i < N && !dt_error(ctx); i++) {
            dt_recv(world, &values[i], 1, DT_I32, 0, 3);
            wrong += values[i] != i;
        }
        dt_wait(ctx, work);
        CHECK_MSG(wrong == 0, "%d of %d messages are wrong", wrong, N);
    }
    free(values);
    free(works);
    return dt_error(ctx);
}

/* ---- 3. failures ---- */

enum { FAILS = 0, RETURNS, KILLED, GARBAGE, HUGE_FRAME, CUT_FRAME, N_ENDS };
static const char *const end_names[] = { "fails", "returns an error", "is killed", "sends garbage",
    "sends 2^50 bytes", "is killed in a frame" };

static void raw_to_all(dt_comm *world, const void *p, size_t bytes) {
    dt__tcp *t = (dt__tcp *)world->world->transport.user;
    for (int rank = 0; rank < t->size; rank++)
        if (t->peers[rank].fd >= 0 && send(t->peers[rank].fd, p, bytes, MSG_NOSIGNAL) < 0)
            perror("send");
}

static dt_status end_rank(dt_ctx *ctx, int how) {
    static const char garbage[100] = "GET / HTTP/1.1";
    dt__tcp_header frame = { DT__TCP_FRAME_MAGIC, DT__TCP_PACKET, (uint64_t)1 << 50, 0 };
    if (how == FAILS) return dt_fail(ctx, DT_ERR_NUMERIC, "the injected failure");
    if (how == RETURNS) return DT_ERR_IO;
    if (how == GARBAGE) raw_to_all(dt_world(ctx), garbage, sizeof garbage);
    if (how == HUGE_FRAME) raw_to_all(dt_world(ctx), &frame, sizeof frame);
    frame.bytes = 1000;
    if (how == CUT_FRAME) raw_to_all(dt_world(ctx), &frame, sizeof frame);
    if (how == KILLED || how == CUT_FRAME) kill(getpid(), SIGKILL);
    return dt_barrier(dt_world(ctx));
}

/* what: how rank 1 ends, and the operation that the other ranks are in. */
enum { IN_BARRIER = 0, IN_RECV, IN_SEND, IN_ANY, IN_REDUCE, N_PLACES };
static dt_status fault_rank(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    dt_comm *world = dt_world(ctx);
    int how = j->what % 10, place = j->what / 10, n = j->ranks;
    static float big[1000000];
    for (int i = 0; i < 3; i++) dt_barrier(world);
    if (dt_comm_rank(world) == 1) {
        nap(0.05);
        return end_rank(ctx, how);
    }
    if (dt_comm_rank(world) != (n == 2 ? 0 : 2))
        return dt_recv(world, big, 4, DT_F32, n == 2 ? 1 : 2, 8);
    if (place == IN_RECV) return dt_recv(world, big, 4, DT_F32, 1, 8);
    if (place == IN_ANY) return dt_recv_any(world, big, 4, DT_F32, 8, NULL);
    while (place == IN_SEND && dt_error(ctx) == DT_OK) dt_send(world, big, 1000000, DT_F32, 1, 8);
    if (place == IN_REDUCE) return dt_all_reduce(world, big, big, 1000000, DT_F32, DT_SUM);
    return dt_error(ctx) ? dt_error(ctx) : dt_barrier(world);
}

static void check_fault(const job *j, int how) {
    for (int rank = 0; rank < j->ranks; rank++) {
        const rank_result *r = &j->result[rank];
        const char *text = r->report.text;
        char where[96];
        int lost = how >= KILLED, dies = how == KILLED || how == CUT_FRAME;
        snprintf(where, sizeof where, "%d ranks, rank 1 %s, place %d, rank %d", j->ranks,
            end_names[how], j->what / 10, rank);
        if (rank == 1 && dies) continue;
        CHECK_MSG(r->ended && r->status != DT_OK && in_time(r->took, 8), "%s: %s, %.1f s", where,
            dt_status_name(r->status), r->took);
        CHECK_MSG(
            r->host.largest < 100000000, "%s: %zu bytes were allocated", where, r->host.largest);
        if (how == FAILS)
            CHECK_MSG(strcmp(text, "rank 1: the injected failure") == 0 &&
                          r->status == DT_ERR_NUMERIC && r->report.rank == 1 &&
                          r->host.error_lines == (rank == 1),
                "%s: %s (%d lines)", where, text, r->host.error_lines);
        if (how == RETURNS)
            CHECK_MSG(strcmp(text, "rank 1: rank function returned DT_ERR_IO") == 0 &&
                          r->status == DT_ERR_IO && r->report.rank == 1,
                "%s: %s", where, text);
        if (lost && rank != 1) CHECK_MSG(says_lost(text, 1), "%s: %s", where, text);
        if (how == GARBAGE && rank != 1)
            CHECK_MSG(strstr(text, "a malformed frame"), "%s: %s", where, text);
        if (lost) CHECK_MSG(r->host.error_lines <= 1, "%s: %d lines", where, r->host.error_lines);
    }
}

static void test_faults(void) {
    for (int ranks = 2; ranks <= 4; ranks++) {
        for (int how = 0; how < N_ENDS; how++) {
            for (int place = 0; place < N_PLACES; place++) {
                if (ranks == 3 && place > IN_RECV) continue;
                job *j = run_job(ranks, fault_rank, how + 10 * place);
                check_fault(j, how);
                job_free(j);
            }
        }
    }
}

/* Messages that arrived before the sender died are delivered; then the error names the sender. */
static dt_status deliver_then_lost_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    float *a = (float *)calloc(500000, sizeof *a);
    (void)user;
    if (dt_comm_rank(world) == 1) {
        for (int i = 0; i < 500000; i++) a[i] = (float)i;
        dt_send(world, a, 10, DT_F32, 0, 1);
        dt_send(world, a, 10000, DT_F32, 0, 2);
        kill(getpid(), SIGKILL);
    }
    nap(0.2);
    CHECK(dt_recv(world, a, 10000, DT_F32, 1, 2) == DT_OK && a[9999] == 9999);
    CHECK(dt_recv(world, a, 10, DT_F32, 1, 1) == DT_OK && a[9] == 9);
    dt_status status = dt_recv(world, a, 10, DT_F32, 1, 3);
    const char *text = dt_error_text(ctx),
               *begins = "receive f32 x 10 from rank 1 with tag 3 on world at test_tcp.c:";
    CHECK_MSG(status == DT_ERR_PEER && says_lost(text, 1) && strstr(text, begins) &&
                  strstr(text, ": connection"),
        "%s", text);
    free(a);
    return status;
}

/* Rank 0 fails halfway through a large send while the receiver does not poll, what 0: before the
   receive, 1: within it. The failure text follows the message. */
static dt_status half_way_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    enum { N = 4000000 };
    int posted = ((const job *)user)->what;
    float *a = (float *)calloc(N, sizeof *a);
    size_t bad = 0;
    for (int i = 0; i < N; i++) a[i] = 1;
    dt_barrier(world);
    if (dt_comm_rank(world) == 0) {
        dt_work *work = dt_send_start(world, a, N, DT_F32, 1, 0);
        for (int i = 0; i < 100 * posted; i++, nap(1e-3)) dt_test(ctx, work);
        dt_fail(ctx, DT_ERR_NUMERIC, "half-way");
        dt_wait(ctx, work);
        memset(a, 0, N * sizeof *a); /* after the failure the buffer belongs to the caller again */
    } else {
        memset(a, 0, N * sizeof *a);
        dt_work *work = posted ? dt_recv_start(world, a, N, DT_F32, 0, 0) : NULL;
        for (int i = 0; i < 3 * posted; i++, nap(0.01)) dt_test(ctx, work);
        nap(0.6);
        if ((posted ? dt_wait(ctx, work) : dt_recv(world, a, N, DT_F32, 0, 0)) == DT_OK) {
            for (int i = 0; i < N; i++) bad += a[i] != 1;
            CHECK_MSG(bad == 0, "%zu elements of a delivered message are wrong", bad);
        }
        CHECK(dt_barrier(world) != DT_OK && strstr(dt_error_text(ctx), "rank 0: half-way"));
    }
    free(a);
    return dt_error(ctx);
}

/* what 0: a receive from a rank that has ended; 1: a message that no rank receives; 2: different
   counts; 3: a stuck rank */
enum { MISUSE_LINE = __LINE__ + 6 };
static dt_status misuse_rank(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    dt_comm *world = dt_world(ctx);
    float a[16] = { 0 };
    int me = dt_comm_rank(world);
    if (j->what == 0) return me == 1 ? DT_OK : dt_recv(world, a, 4, DT_F32, 1, 0);
    if (j->what == 1 && me == 1) return dt_send(world, a, 10, DT_F32, 0, 4);
    if (j->what == 2)
        return me == 1 ? dt_send(world, a, 10, DT_F32, 0, 4) : dt_recv(world, a, 8, DT_F32, 1, 4);
    if (j->what == 3 && me == 1) nap(1.5);
    if (j->what == 3) return dt_barrier(world);
    return DT_OK;
}

static void test_misuse(void) {
    static const char *const says[] = {
        "rank 0: rank 1 ended without the send that this receive needs: receive f32 x 4 from rank "
        "1 with tag 0 on world at test_tcp.c:%d; check that all ranks run the same steps",
        "rank 0: ended without receiving 40 bytes with tag 4 from rank 1, sent at test_tcp.c:%d",
        "rank 0: rank 1 sends f32 x 10 at test_tcp.c:%d, rank 0 receives f32 x 8 at test_tcp.c:%d "
        "(tag 4 on world); count and type must be equal",
        ": rank 1 did not come; rank 1 (process ",
    };
    for (int what = 0; what < 4; what++) {
        job *j = job_make(2, misuse_rank, what);
        if (what == 3) j->timeout_s = 0.5;
        job_start(j);
        job_wait(j);
        const char *text = j->result[0].report.text;
        const char *begins = "rank 0: timeout 0.5 s in barrier #1 on world at test_tcp.c:";
        char want[256];
        int line = MISUSE_LINE + (what == 2 ? 3 : what);
        snprintf(want, sizeof want, says[what], line, line);
        int same = what < 3
                       ? strcmp(text, want) == 0
                       : strncmp(text, begins, strlen(begins)) == 0 && strstr(text, says[what]);
        CHECK_MSG(j->result[0].status && same, "case %d: %s", what, text);
        CHECK(j->result[0].host.error_lines == 1 && in_time(j->result[0].took, 5));
        job_free(j);
    }
}

/* Makes one call of every kind that allocates. */
static dt_status allocating_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx), *half;
    static float a[30000], b[30000];
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    (void)user;
    dt_send(world, a, 1000, DT_F32, (me + 1) % n, 7); /* arrives before its receive */
    dt_barrier(world);
    dt_all_reduce(world, a, b, 30000, DT_F32, DT_SUM);
    half = dt_comm_split(world, me % 2, 0, "half");
    dt_all_reduce(half, a, b, 10, DT_F32, DT_SUM);
    dt_recv(world, b, 1000, DT_F32, (me + n - 1) % n, 7);
    return dt_error(ctx);
}

static void test_refused_memory(void) {
    long k = 0;
    for (int refused = 1; refused; k++) {
        job *j = job_make(3, allocating_rank, 0);
        j->refuse_rank = 1;
        j->refuse_at = k + 1;
        j->timeout_s = 0.5;
        job_start(j);
        job_wait(j);
        refused = j->result[1].status == DT_ERR_MEM;
        for (int rank = 0; rank < 3 && refused; rank++)
            CHECK_MSG(j->result[rank].status != DT_OK, "allocation %ld: rank %d returns DT_OK",
                k + 1, rank);
        if (!refused) check_well(j);
        job_free(j);
        if (k > 4) k += 2;
    }
    CHECK_MSG(k > 10, "only %ld allocations", k);
}

/* ---- 4. two jobs ---- */

/* Runs the cases except the long ones. */
static dt_status exchange_rank(dt_ctx *ctx, void *user) {
    (void)user;
    exchange(dt_world(ctx));
    from_any(dt_world(ctx));
    return dt_error(ctx);
}

static dt_status mail_rank(dt_ctx *ctx, void *user) {
    (void)user;
    messages_in_ring(dt_world(ctx));
    return dt_error(ctx);
}

static void test_two_jobs(void) {
    job *a = job_make(3, exchange_rank, 0), *b = job_make(4, mail_rank, 0);
    job_start(a);
    job_start(b);
    job_wait(a);
    job_wait(b);
    check_well(a);
    check_well(b);
    job_free(a);
    job_free(b);
}

/* ---- different calls, without the comparison of calls ---- */

static dt_status different_calls_rank(dt_ctx *ctx, void *user) {
    return words_rank(ctx, ((const job *)user)->what);
}

static void test_words(void) {
    for (int what = 0; what < WORDS_CASES; what++) {
        for (int check = -1; check < 2; check += 2) {
            job *j = job_make(2, different_calls_rank, what);
            j->check = check;
            job_start(j);
            job_wait(j);
            const char *text = j->result[0].report.text;
            CHECK_MSG(j->result[0].status == DT_ERR_COMM && words_said(what, text) &&
                          strstr(text, "rank 0") && strstr(text, "rank 1"),
                "case %d, check %d: %s", what, check, text);
            CHECK_MSG(in_time(j->result[0].took, 2), "%.1f s", j->result[0].took);
            job_free(j);
        }
    }
}

/* Calls that differ so that a rank completes its own without the others' messages. */
enum {
    ROOT_OF_EACH,
    SCATTER_EACH,
    NEXT_REDUCES,
    NEXT_GATHERS,
    COUNT_TOO,
    TWO_COUNTS,
    TWO_ROOTS,
    LATE,
    ONE_CALLS,
    LEFT
};
static dt_status left_over_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), n = dt_comm_size(world), a[100] = { 0 }, b[100] = { 0 };
    size_t none[4] = { 0 }, five[4] = { 0, 5 };
    dt_barrier(world);
    dt_comm_set_algorithm(world, DT_DIRECT); /* so that threads exchange messages too */
    switch (((const job *)user)->what) {
    case ROOT_OF_EACH: dt_broadcast(world, a, 10, DT_I32, me); break;
    case SCATTER_EACH: dt_scatter(world, a, b, 10, DT_I32, me); break;
    case NEXT_REDUCES: dt_reduce(world, a, b, 10, DT_I32, DT_SUM, (me + 1) % n); break;
    case NEXT_GATHERS: dt_gather(world, a, b, 10, DT_I32, (me + 1) % n); break;
    case COUNT_TOO: dt_broadcast(world, a, me ? 4 : 8, DT_I32, me); break;
    case TWO_COUNTS: dt_all_to_all_v(world, a, me ? none : five, b, none, DT_I32); break;
    case TWO_ROOTS: /* rank 2's message reaches rank 0 while that waits for rank 1's */
        if (me == 1) nap(0.2);
        dt_broadcast(world, a, 10, DT_I32, me == 2 ? 2 : 1);
        break;
    case LATE: /* rank 0's message reaches rank 1 when that has completed its own call */
        if (me == 0) nap(0.2);
        dt_gather(world, a, b, 10, DT_I32, me == 0 ? 1 : 2);
        if (me == 0) nap(0.5);
        break;
    default:
        if (me == 0) dt_broadcast(world, a, 10, DT_I32, 0);
    }
    return dt_error(ctx);
}

static void test_left_over(void) {
    static const char *const says[LEFT][2] = { { "broadcast i32 x 10 root ", "rank " },
        { "scatter i32 x 10 root ", "rank " }, { "reduce i32 x 10 sum root ", "rank " },
        { "gather i32 x 10 root ", "rank " }, { "broadcast i32 x ", "broadcast i32 x " },
        { "rank 0 sends 5 to rank 1, which expects 0", "all-to-all-v" },
        { "broadcast i32 x 10 root ", "broadcast i32 x 10 root " },
        { "rank 0 calls gather i32 x 10 root 1", "rank 1 calls gather i32 x 10 root 2" },
        { " ended without calling broadcast i32 x 10 root 0 #2 on world, which rank 0 calls at ",
            "test_tcp.c:" } };
    for (int what = 0; what < LEFT; what++) {
        job *j = job_make(3, left_over_rank, what);
        j->check = -1;
        job_start(j);
        job_wait(j);
        for (int rank = 0; rank < 3; rank++) {
            const char *text = j->result[rank].report.text, *first = strstr(text, says[what][0]);
            /* a rank that ended before the failure was found need not learn of it */
            if (what == ONE_CALLS && rank != 1) continue;
            CHECK_MSG(
                j->result[rank].status == DT_ERR_COMM && first && strstr(first, says[what][1]),
                "case %d, rank %d: %s", what, rank, text);
            /* the failure is found when the collective is complete, not when a rank ends */
            CHECK_MSG(what == ONE_CALLS || !strstr(text, "ended"), "case %d, rank %d: %s", what,
                rank, text);
            CHECK_MSG(in_time(j->result[rank].took, 5), "%.1f s", j->result[rank].took);
        }
        dt_report report;
        dt_run_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.ranks = 3;
        desc.report = &report;
        CHECK_MSG(
            dt_run(desc, left_over_rank, j) == DT_ERR_COMM &&
                (what == LATE || strstr(report.text, says[what][0])), /* a thread that has ended */
            "threads, case %d: %s", what, report.text);
        job_free(j);
    }
}

/* Rank 0 sends a message that has no receive yet, while rank 1 waits for rank 0 in another
   operation. An eager message lets rank 0 continue, so this is legal without the comparison of
   calls. A large message waits for its receiver, as over every transport: a deadlock. */
static dt_status crossing_rank(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    dt_comm *world = dt_world(ctx), *other = dt_comm_split(world, 0, 0, "other");
    int me = dt_comm_rank(world);
    size_t count = (size_t)j->what;
    float *a = (float *)calloc(count, sizeof *a), *b = (float *)calloc(2 * count, sizeof *b);
    if (me == 1) dt_barrier(other);
    dt_gather(world, a, b, count, DT_F32, 1);
    if (me == 0) dt_barrier(other);
    free(a);
    free(b);
    return dt_error(ctx);
}

static void test_crossing(void) {
    for (int turn = 0; turn < 2; turn++) {
        job *j = job_make(2, crossing_rank, turn ? 40000000 : DT_EAGER_BYTES / 4);
        j->check = -1;
        job_start(j);
        job_wait(j);
        const char *text = j->result[0].report.text;
        if (turn == 0)
            CHECK_MSG(j->result[0].status == DT_OK && j->result[1].status == DT_OK, "%s", text);
        else
            CHECK_MSG(j->result[0].status == DT_ERR_COMM && strstr(text, "deadlock: ") &&
                          strstr(text, "gather f32 x 40000000 root 1") &&
                          in_time(j->result[0].took, 5),
                "%s", text);
        job_free(j);
    }
}

/* Rank 0 starts as many sends as rank 1 may know of, and rank 1 receives none of them but waits for a
   later message. what 0: rank 0 sends that message; what 1: it waits for its first sends. */
static dt_status held_up_rank(dt_ctx *ctx, void *user) {
    enum { N = DT__ANNOUNCE_CREDITS + DT__EAGER_LIMIT };
    const job *j = (const job *)user;
    dt_comm *world = dt_world(ctx);
    int value = 0;
    if (dt_comm_rank(world) == 1) return dt_recv(world, &value, 1, DT_I32, 0, 4);
    dt_work **works = (dt_work **)calloc(N, sizeof *works);
    for (int i = 0; i < N; i++) works[i] = dt_send_start(world, &value, 1, DT_I32, 1, 3);
    if (j->what == 0) dt_send(world, &value, 1, DT_I32, 1, 4);
    for (int i = 0; i < N; i++) dt_wait(ctx, works[i]);
    free(works);
    return dt_error(ctx);
}

static void check_held_up(const char *where, int what, const dt_report *report, double took) {
    static const char *const waits[] = { "rank 0 waits in send i32 x 1 to ",
        "rank 0 waits in its operation " };
    CHECK_MSG(
        report->status == DT_ERR_COMM && strstr(report->text, "deadlock: ") &&
            strstr(report->text, waits[what]) &&
            strstr(report->text, "rank 1 has no receive for 65536 sends that rank 0 has started") &&
            in_time(took, 15),
        "%s, case %d: after %.1f s: %s", where, what, took, report->text);
}

static void test_held_up(void) {
    for (int what = 0; what < 2; what++) {
        job *j = run_job(2, held_up_rank, what);
        for (int rank = 0; rank < 2; rank++)
            check_held_up("tcp", what, &j->result[rank].report, j->result[rank].took);
        dt_report report;
        dt_run_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.ranks = 2;
        desc.report = &report;
        double from = seconds();
        dt_run(desc, held_up_rank, j);
        check_held_up("threads", what, &report, seconds() - from);
        job_free(j);
    }
}

int main(void) {
    for (int ranks = 1; ranks <= 5; ranks++) compare_with_threads(cases_make(ranks, 2));
    compare_with_threads(cases_windows(3, 4));
    test_overlap();
    run_well(2, many_sends, 0);
    run_well(2, waiting_sends_rank, 0);
    test_held_up();
    run_well(3, early_end_rank, 0);
    run_well(2, late_rank, 0);
    run_well(2, long_rank, 0);
    test_two_jobs();
    test_faults();
    job *j = run_job(2, deliver_then_lost_rank, 0);
    CHECK(j->result[0].ended && says_lost(j->result[0].report.text, 1));
    job_free(j);
    for (int posted = 0; posted < 2; posted++) {
        j = run_job(2, half_way_rank, posted);
        for (int rank = 0; rank < 2; rank++)
            CHECK_MSG(strcmp(j->result[rank].report.text, "rank 0: half-way") == 0, "posted %d: %s",
                posted, j->result[rank].report.text);
        job_free(j);
    }
    test_misuse();
    test_words();
    test_left_over();
    test_crossing();
    test_refused_memory();
    return check_done("test_tcp");
}
