/* mpi_mismatch.c - started by test_mpi.sh with mpirun: the cases of mismatch_cases.h, and correct
   programs, over the MPI backend

       NODE_RANKS=1 mpirun -np 4 mpi_mismatch [SECONDS of timeout]

   The program begins MPI and makes one run after another. Rank 0 gathers the ranks' notes and
   checks them. Prints a line for each failed check; the exit status is 0 if no check failed. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/comm/mismatch_cases.h"
#include "tests/comm/soak.h"

static double timeout_s = 10;

/* Simulates an MPI that reports the completion of a large message late, as the standard allows: the
   receiver has long continued, or all ranks wait for a message that has arrived. */
static double slow_s, over_at;
static MPI_Request slow = MPI_REQUEST_NULL;

int MPI_Issend(const void *buf, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
    MPI_Request *request) {
    int error = PMPI_Issend(buf, count, type, to, tag, comm, request);
    if (slow_s > 0 && tag > 0) slow = *request, over_at = MPI_Wtime() + slow_s;
    return error;
}

int MPI_Irecv(void *buf, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
    MPI_Request *request) {
    int error = PMPI_Irecv(buf, count, type, from, tag, comm, request);
    if (slow_s > 0 && tag > 0) slow = *request, over_at = MPI_Wtime() + slow_s;
    return error;
}

int MPI_Test(MPI_Request *request, int *done, MPI_Status *status) {
    if (*request != slow || slow == MPI_REQUEST_NULL || MPI_Wtime() > over_at)
        return PMPI_Test(request, done, status);
    /* lets MPI make progress */
    return MPI_Iprobe(MPI_ANY_SOURCE, 0, MPI_COMM_WORLD, done, MPI_STATUS_IGNORE), *done = 0;
}

static void no_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_status run_once(dt_status (*fn)(dt_ctx *, void *), void *user, dt_report *report) {
    dt_host host = *dt_host_default();
    dt_run_desc desc;
    host.log = no_log;
    memset(&desc, 0, sizeof desc);
    desc.backend = DT_BACKEND_MPI;
    desc.timeout_s = timeout_s;
    desc.node_ranks = getenv("NODE_RANKS") ? atoi(getenv("NODE_RANKS")) : 1;
    desc.host = &host;
    desc.report = report;
    return dt_run(desc, fn, user);
}

/* Gathers every rank's note on all ranks. */
static void notes_gather(odd_run *run, int me) {
    odd_note mine = run->note[me];
    MPI_Allgather(
        &mine, (int)sizeof mine, MPI_BYTE, run->note, (int)sizeof mine, MPI_BYTE, MPI_COMM_WORLD);
}

static double case_once(odd_run *run, const mismatch *m, uint64_t delays, int me) {
    memset(run, 0, sizeof *run);
    run->what = m;
    run->delays = delays;
    MPI_Barrier(MPI_COMM_WORLD);
    run->note[me].returned = run_once(odd_rank, run, &run->note[me].report);
    notes_gather(run, me);
    return odd_late(run);
}

static void one_case(const mismatch *m, int at, int me, const char *where, lateness *late) {
    odd_run run, again;
    double least = case_once(&run, m, (uint64_t)at, me);
    /* all ranks decide alike, because they have the same notes */
    for (int i = 0; i < 2 && least > 0.1; i++) {
        double s = case_once(&again, m, (uint64_t)(at + i + 1), me);
        if (s < least) least = s;
    }
    if (me > 0) return;
    const char *text = run.note[0].report.text;
    for (int r = 1; r < ODD_RANKS; r++)
        if (strcmp(without_prefix(run.note[r].report.text), without_prefix(text)) != 0 ||
            run.note[r].returned == DT_OK)
            CHECK_MSG(0, "%s: %s: rank %d reports '%s', rank 0 '%s'", where, m->name, r,
                run.note[r].report.text, text);
    check_odd_run(&run, where, run.note[0].returned, &run.note[0].report);
    CHECK_MSG(in_time(least, 0.1), "%s: %s: found after %.0f ms: %s", where, m->name, 1e3 * least,
        without_prefix(text));
    lateness_add(late, least);
}

static void expect_success(dt_status (*fn)(dt_ctx *, void *), void *user, const char *what) {
    dt_report report;
    run_once(fn, user, &report);
    CHECK_MSG(report.status == DT_OK, "%s: %s", what, report.text);
}

/* Rank 0 sends a large message to rank 1, and then small ones to all other ranks. */
static dt_status slow_sends(dt_ctx *ctx, void *user) {
    static char large[20000];
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    (void)user;
    slow_s = me == 0 ? 0.3 : 0;
    if (me == 0) dt_send(world, large, sizeof large / 4, DT_F32, 1, 3);
    slow_s = 0;
    for (int to = 1; to < dt_comm_size(world) && me == 0; to++)
        dt_send(world, large, 1, DT_F32, to, 4);
    if (me == 1) dt_recv(world, large, sizeof large / 4, DT_F32, 0, 3);
    if (me > 0) dt_recv(world, large, 1, DT_F32, 0, 4);
    return dt_error(ctx);
}

/* In one operation every rank waits for the next, in a cycle. */
static dt_status slow_ring(dt_ctx *ctx, void *user) {
    enum { MANY = 8000 };
    dt_comm *world = dt_world(ctx);
    float *a = (float *)calloc(2 * MANY, sizeof *a);
    (void)user;
    dt_comm_set_algorithm(world, DT_RING);
    slow_s = 0.1;
    dt_all_reduce(world, a, a + MANY, MANY, DT_F32, DT_SUM);
    slow_s = 0;
    free(a);
    return dt_error(ctx);
}

static void no_false_alarms(const mismatches *all) {
    odd_run run;
    mismatch right;
    soak program;
    for (int i = 0; i < all->n; i += 5) {
        memset(&run, 0, sizeof run);
        right = all->list[i];
        right.odd_rank = -1;
        run.what = &right;
        run.delays = (uint64_t)i;
        expect_success(odd_rank, &run, right.name);
    }
    expect_success(slow_sends, NULL, "a send whose completion is reported late");
    expect_success(slow_ring, NULL, "an all-reduce whose messages complete late");
    for (int i = 0; i < 20; i++) {
        memset(&program, 0, sizeof program);
        program.seed = (uint64_t)(1 + i) * 104729;
        program.steps = 20;
        program.delay_s = i % 3 ? 1e-3 : 0;
        expect_success(soak_rank, &program, "a random program");
    }
}

/* A deadlock is reported only after all pending traffic has arrived, so every kind of traffic runs
   first. */
static dt_status stuck_rank(dt_ctx *ctx, void *user) {
    enum { MANY = 20000 };
    dt_comm *world = dt_world(ctx),
            *pair = dt_comm_split(world, dt_comm_rank(world) / 2, 0, "pair");
    int me = dt_comm_rank(world);
    float *a = (float *)calloc(2 * MANY, sizeof *a), *b = a + MANY;
    for (int i = 0; i < 3; i++) dt_all_reduce(pair, a, b, 10, DT_F32, DT_SUM);
    dt_all_reduce(world, a, b, MANY, DT_F32, DT_SUM);
    /* all ranks receive, none sends */
    if (*(int *)user == 0) dt_recv(world, a, 10, DT_F32, (me + 1) % ODD_RANKS, 1);
    dt_comm_set_algorithm(pair, DT_RING);
    /* ranks 2 and 3 wait for each other */
    if (me != 3) dt_all_reduce(pair, a, b, 10, DT_F32, DT_SUM);
    dt_all_reduce(world, a, b, 10, DT_F32, DT_SUM);
    free(a);
    return dt_error(ctx);
}

static void deadlocks(int me, const char *where) {
    static const char *const says[] = {
        "rank 3 waits in receive f32 x 10 from its rank 0 with tag 1",
        "rank 2 waits in all-reduce f32 x 10 sum #"
    };
    for (int what = 0; what < 2; what++) {
        dt_report report;
        double begin = dt_host_default()->now(NULL);
        run_once(stuck_rank, &what, &report);
        double took = dt_host_default()->now(NULL) - begin;
        const char *text = without_prefix(report.text);
        if (me > 0) continue;
        CHECK_MSG(strncmp(text, "deadlock: ", 10) == 0 && strstr(text, says[what]),
            "%s: deadlock %d: %s", where, what, report.text);
        CHECK_MSG(in_time(took, 1), "%s: deadlock %d: found after %.1f s", where, what, took);
    }
}

int main(int argc, char **argv) {
    static mismatches all;
    static lateness late;
    int me, size, sum = 0;
    char where[32];
    if (argc > 1) timeout_s = atof(argv[1]);
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != ODD_RANKS) return 2;
    snprintf(where, sizeof where, "mpi, NODE_RANKS %s",
        getenv("NODE_RANKS") ? getenv("NODE_RANKS") : "1");
    cases_all(&all);
    no_false_alarms(&all);
    for (int i = 0; i < all.n; i++) one_case(&all.list[i], i, me, where, &late);
    deadlocks(me, where);
    no_false_alarms(&all); /* after all failures, good programs succeed */
    MPI_Allreduce(&check_failed, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (me == 0) lateness_print(&late, where);
    if (me == 0) printf("%d cases, %d checks failed\n", all.n, sum);
    MPI_Finalize();
    return sum != 0;
}
