/* mpi_ranks.c - what test_mpi.sh starts with mpirun: the MPI backend against naive results, and its failures

       mpirun -np 4 mpi_ranks collectives     every operation; dt_run begins and ends MPI. Prints a number that all
       mpi_ranks threads 4                    results make: the same for ranks that are threads
       mpirun -np 4 mpi_ranks failures        the program begins MPI; runs that fail follow each other
       mpirun -np 4 mpi_ranks timeout|killed  a rank that does not come, or dies

   MPI_Isend is this program's: it counts what MPI is given. A line for each check that failed, status 0 if none did. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "check.h"

#include <signal.h>
#include <stdlib.h>

static long long isends, isend_bytes;

int MPI_Isend(const void *buf, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request) {
    MPI_Count size = 0;
    PMPI_Type_size_x(type, &size);
    isends++;
    isend_bytes += count * size;
    return PMPI_Isend(buf, count, type, to, tag, comm, request);
}

/* ---- every operation --------------------------------------------------------------------------------------------- */

static float value(int rank, size_t i) {
    uint32_t h = ((uint32_t)rank * 1000003u + (uint32_t)i) * 2654435761u;
    h ^= h >> 15;
    return (float)((int)(h % 20001) - 10000) / 7.0f * (h & 1 ? 1.0f : 1e-3f);
}

static float naive(int n, size_t i, dt_op op) {
    float x = value(0, i);
    for (int r = 1; r < n; r++) {
        float y = value(r, i);
        x = op == DT_MAX ? (y > x ? y : x) : x + y;
    }
    return op == DT_AVG ? x / (float)n : x;
}

typedef struct test {
    dt_comm  *comm;
    int       n, me;
    size_t    count;
    float    *a, *b;        /* n * count + 64 each */
    uint64_t *hash;
    const char *how;
} test;

static void note(const test *t, const void *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) *t->hash = (*t->hash ^ ((const unsigned char *)p)[i]) * 0x100000001B3u;
}

static void fill(const test *t, size_t n) {
    for (size_t i = 0; i < n; i++) t->a[i] = value(t->me, i);
    for (size_t i = 0; i < (size_t)t->n * t->count; i++) t->b[i] = -1;
}

/* n elements at b: element i is that of rank `rank` from `first` on; rank -1: the reduction. */
static size_t differ(const float *b, int rank, size_t first, size_t n, int size, dt_op op) {
    size_t bad = 0;
    for (size_t i = 0; i < n; i++) bad += b[i] != (rank < 0 ? naive(size, first + i, op) : value(rank, first + i));
    return bad;
}

static void say(const test *t, const char *what, dt_status status, size_t bad) {
    note(t, t->b, (size_t)t->n * t->count * sizeof(float));
    CHECK_MSG(status == DT_OK && bad == 0, "%s %s x %zu, rank %d of %d: %s, %zu differ", t->how, what, t->count, t->me,
              t->n, dt_status_name(status), bad);
}

static void sums(const test *t) {
    static const dt_op ops[] = { DT_SUM, DT_MAX, DT_AVG };
    size_t c = t->count, n = (size_t)t->n;
    int root = (int)(c % n);
    for (int i = 0; i < 3; i++) {
        fill(t, c);
        dt_status status = dt_all_reduce(t->comm, t->a, t->b, c, DT_F32, ops[i]);
        say(t, "all-reduce", status, differ(t->b, -1, 0, c, t->n, ops[i]));
    }
    fill(t, c);
    dt_status status = dt_reduce(t->comm, t->a, t->b, c, DT_F32, DT_SUM, root);
    say(t, "reduce", status, t->me == root ? differ(t->b, -1, 0, c, t->n, DT_SUM) : 0);
    fill(t, n * c);
    status = dt_reduce_scatter(t->comm, t->a, t->b, c, DT_F32, DT_SUM);
    say(t, "reduce-scatter", status, differ(t->b, -1, (size_t)t->me * c, c, t->n, DT_SUM));
    fill(t, c);
    status = dt_all_reduce(t->comm, t->a, t->a, c, DT_F32, DT_SUM);     /* in place */
    say(t, "all-reduce in place", status, differ(t->a, -1, 0, c, t->n, DT_SUM));
}

static void moves(const test *t) {
    size_t c = t->count, n = (size_t)t->n, bad = 0;
    int root = (int)((c + 1) % n);
    fill(t, c);
    dt_status status = dt_all_gather(t->comm, t->a, t->b, c, DT_F32);
    for (int r = 0; r < t->n; r++) bad += differ(t->b + (size_t)r * c, r, 0, c, t->n, DT_SUM);
    say(t, "all-gather", status, bad);
    fill(t, c);
    status = dt_gather(t->comm, t->a, t->b, c, DT_F32, root);
    bad = 0;
    for (int r = 0; r < t->n && t->me == root; r++) bad += differ(t->b + (size_t)r * c, r, 0, c, t->n, DT_SUM);
    say(t, "gather", status, bad);
    fill(t, n * c);
    status = dt_scatter(t->comm, t->a, t->b, c, DT_F32, root);
    say(t, "scatter", status, differ(t->b, root, (size_t)t->me * c, c, t->n, DT_SUM));
    fill(t, n * c);
    status = dt_all_to_all(t->comm, t->a, t->b, c, DT_F32);
    bad = 0;
    for (int r = 0; r < t->n; r++) bad += differ(t->b + (size_t)r * c, r, (size_t)t->me * c, c, t->n, DT_SUM);
    say(t, "all-to-all", status, bad);
    fill(t, c);
    memcpy(t->b, t->a, c * sizeof(float));
    status = dt_broadcast(t->comm, t->b, c, DT_F32, root);
    say(t, "broadcast", status, differ(t->b, root, 0, c, t->n, DT_SUM));
    size_t out[8], in[8], at = 0;       /* rank i sends (i + j) % 3 parts of its buffer to rank j */
    for (int r = 0; r < t->n; r++) out[r] = in[r] = c / 3 * (size_t)((t->me + r) % 3);
    fill(t, n * c);
    status = dt_all_to_all_v(t->comm, t->a, out, t->b, in, DT_F32);
    bad = 0;
    for (int r = 0; r < t->n; r++) {
        size_t first = 0;
        for (int j = 0; j < t->me; j++) first += c / 3 * (size_t)((r + j) % 3);
        bad += differ(t->b + at, r, first, in[r], t->n, DT_SUM);
        at += in[r];
    }
    say(t, "all-to-all-v", status, bad);
}

/* Messages to the right neighbour and from the left, of every size; started ones; from whoever comes first. */
static void mail(dt_ctx *ctx, const test *t) {
    size_t c = t->count, bad = 0;
    int ring = strcmp(t->how, "ring") == 0;    /* sums in another order */
    int right = (t->me + 1) % t->n, left = (t->me + t->n - 1) % t->n, from = -1;
    dt_transfer both[2] = { { t->a, NULL, c, DT_F32, right, 5 }, { NULL, t->b, c, DT_F32, left, 5 } };
    fill(t, c);
    dt_status status = dt_exchange(t->comm, both, 2);
    say(t, "exchange", status, differ(t->b, left, 0, c, t->n, DT_SUM));
    fill(t, c);
    dt_work *sum = dt_all_reduce_start(t->comm, t->a, t->b, c, DT_F32, DT_SUM);
    dt_work *spread = dt_all_gather_start(t->comm, &t->me, t->a + c, 1, DT_I32);
    dt_wait(ctx, spread);
    status = dt_wait(ctx, sum);
    for (int r = 0; r < t->n; r++) bad += ((int32_t *)(void *)(t->a + c))[r] != r;
    say(t, "two started", status, bad + (ring ? 0 : differ(t->b, -1, 0, c, t->n, DT_SUM)));
    bad = 0;
    if (t->me != 0) dt_send(t->comm, t->a, c, DT_F32, 0, 6);
    for (int r = 1; r < t->n && t->me == 0; r++) {
        dt_recv_any(t->comm, t->b, c, DT_F32, 6, &from);
        bad += from < 1 || from >= t->n || differ(t->b, from, 0, c, t->n, DT_SUM);
    }
    for (size_t i = 0; i < (size_t)t->n * c; i++) t->b[i] = 0;     /* who came first is no matter */
    say(t, "from any", dt_error(ctx), bad);
}

/* How many ranks share memory, as dt_run_desc has it; 1 unless NODE_RANKS says it. */
static int node_ranks(void) { return getenv("NODE_RANKS") ? atoi(getenv("NODE_RANKS")) : 1; }

/* A group shares memory if all its ranks are on one node, and only then. */
static void sharing(dt_ctx *ctx, int me, int n) {
    dt_comm *world = dt_world(ctx);
    int node = node_ranks(), all = node == 0 || node >= n;
    CHECK_MSG((world->ops->collective != NULL) == (node != 1 && all), "the world, %d ranks a node", node);
    dt_comm *near = dt_comm_split(world, node ? me / node : 0, 0, "near");
    dt_comm *far = dt_comm_split(world, me % 2, 0, "far");
    if (dt_comm_size(near) > 1) CHECK_MSG(near->ops->collective != NULL, "rank %d: its node's group", me);
    if (node == 2 && dt_comm_size(far) > 1) CHECK_MSG(far->ops->collective == NULL, "rank %d: a group apart", me);
    int32_t one = 1, sum = 0;
    CHECK(dt_all_reduce(near, &one, &sum, 1, DT_I32, DT_SUM) == DT_OK && sum == dt_comm_size(near));
    CHECK(dt_all_reduce(far, &one, &sum, 1, DT_I32, DT_SUM) == DT_OK && sum == dt_comm_size(far));
}

/* More groups than communicators, all at work at once, which the ranks start in different orders. */
static void crowd(dt_ctx *ctx, const test *t) {
    enum { GROUPS = 12 };
    dt_comm *group[GROUPS];
    dt_work *work[GROUPS];
    int32_t  mine[GROUPS], sum[GROUPS];
    int      bad = 0;
    for (int g = 0; g < GROUPS; g++) group[g] = dt_comm_split(t->comm, 0, t->me, "crowd");
    for (int i = 0; i < GROUPS; i++) {
        int g = t->me % 2 ? GROUPS - 1 - i : i;
        mine[g] = 1000 * g + t->me;
        work[g] = dt_all_reduce_start(group[g], &mine[g], &sum[g], 1, DT_I32, DT_SUM);
    }
    for (int g = 0; g < GROUPS; g++) {
        dt_wait(ctx, work[g]);
        bad += sum[g] != 1000 * g * t->n + t->n * (t->n - 1) / 2;
    }
    CHECK_MSG(bad == 0, "%d of %d groups have another's sum", bad, (int)GROUPS);
}

static dt_status operations(dt_ctx *ctx, void *user) {
    static const char *const names[] = { "auto", "direct", "ring", "doubling", "tree" };
    static const size_t counts[] = { 0, 1, 3, 1000, 5001, 70000 };
    dt_comm *world = dt_world(ctx);
    uint64_t hash = 0xCBF29CE484222325u, all[8] = { 0 };
    test     t = { world, dt_comm_size(world), dt_comm_rank(world), 0, NULL, NULL, &hash, "" };
    t.a = (float *)malloc(2 * ((size_t)t.n * 70000 + 64) * sizeof(float));
    t.b = t.a + (size_t)t.n * 70000 + 64;
    for (int algorithm = 0; algorithm < DT_ALGORITHMS; algorithm++) {
        t.how = names[algorithm];
        dt_comm_set_algorithm(world, (dt_algorithm)algorithm);
        for (int i = 0; i < 6; i++) {
            t.count = counts[i];
            if (algorithm != DT_RING) sums(&t);
            moves(&t);
            mail(ctx, &t);
        }
    }
    dt_comm_set_algorithm(world, DT_ALGORITHM_AUTO);
    char room[2][DT_EAGER_BYTES];       /* small messages need no receiver yet: to itself, and each to its neighbour */
    int  right = (t.me + 1) % t.n, left = (t.me + t.n - 1) % t.n, bad = 0;
    for (int i = 0; i < 7; i++) {
        memset(room[0], 16 * t.me + i, DT_EAGER_BYTES);
        dt_send(world, room[0], DT_EAGER_BYTES / 4, DT_F32, t.me, 9);
        dt_send(world, room[0], DT_EAGER_BYTES / 4, DT_F32, right, 8);
    }
    for (int i = 0; i < 7; i++) {
        dt_recv(world, room[0], DT_EAGER_BYTES / 4, DT_F32, t.me, 9);
        dt_recv(world, room[1], DT_EAGER_BYTES / 4, DT_F32, left, 8);
        bad += room[0][5] != (char)(16 * t.me + i) || room[1][DT_EAGER_BYTES - 1] != (char)(16 * left + i);
    }
    CHECK_MSG(bad == 0 && dt_error(ctx) == DT_OK, "%d small messages are wrong", bad);
    for (int i = 0; i < 20; i++) {      /* more groups than communicators, and groups of groups */
        dt_comm *half = dt_comm_split(world, (t.me + i) % 2, i % 2 ? -t.me : t.me, "half");
        dt_comm *own = dt_comm_split(half, 0, dt_comm_rank(half), "again");
        int32_t  me = t.me, sum[3] = { 0, 0, 0 };
        dt_work *work[3];
        work[0] = dt_all_reduce_start(half, &me, &sum[0], 1, DT_I32, DT_SUM);
        work[1] = dt_all_reduce_start(world, &me, &sum[1], 1, DT_I32, DT_SUM);
        work[2] = dt_all_reduce_start(own, &me, &sum[2], 1, DT_I32, DT_SUM);
        for (int k = 0; k < 3; k++) dt_wait(ctx, work[(k + i) % 3]);
        int32_t like = 0;
        for (int r = t.me % 2; r < t.n; r += 2) like += r;
        CHECK_MSG(sum[0] == like && sum[1] == t.n * (t.n - 1) / 2 && sum[2] == like, "split %d on rank %d: %d %d %d", i,
                  t.me, sum[0], sum[1], sum[2]);
    }
    crowd(ctx, &t);
    if (user) sharing(ctx, t.me, t.n);
    double d[2] = { 0.1 * t.me, 1 };
    dt_sum_doubles(world, d, 2);
    note(&t, d, sizeof d);
    CHECK(d[1] == t.n && dt_agree(world, t.me == t.n - 1 ? DT_ERR_IO : DT_OK) == DT_ERR_IO);
    dt_barrier(world);
    if (user) {
        dt_traffic traffic = dt_comm_traffic(ctx);
        CHECK_MSG((long long)traffic.messages == isends && (long long)traffic.bytes == isend_bytes && isends > 0,
                  "rank %d counts %zu messages of %zu bytes, MPI was given %lld of %lld", t.me, traffic.messages,
                  traffic.bytes, isends, isend_bytes);
    }
    dt_all_gather(world, &hash, all, 1, DT_F64);
    for (int r = 1; r < t.n; r++) all[0] = all[0] * 31 + all[r];
    if (t.me == 0) printf("results %016llx\n", (unsigned long long)all[0]);
    free(t.a);
    return dt_error(ctx);
}

static int collectives(void) {
    int ended = 0;
    dt_report report;
    dt_status status = dt_run((dt_run_desc){ .backend = DT_BACKEND_MPI, .timeout_s = 60, .node_ranks = node_ranks() },
        operations, &status);
    MPI_Finalized(&ended);
    CHECK(status == DT_OK && ended);
    CHECK(dt_run((dt_run_desc){ .backend = DT_BACKEND_MPI, .report = &report }, operations, NULL) == DT_ERR_COMM);
    CHECK_MSG(strstr(report.text, "has ended in this process") != NULL, "%s", report.text);
    return check_failed != 0;
}

/* ---- failures ---------------------------------------------------------------------------------------------------- */

enum { FINE, ONE_FAILS, RETURNS, LOST, TOO_LONG, TOO_SHORT, TAG, LARGE, RANKS, ONE_RANKS, ENDS, KINDS };
static const char *const kinds[] = { "fine", "one fails", "one returns an error", "a message is lost",
    "a message is longer than its receive", "a message is shorter", "a tag above MPI_TAG_UB", "large sends are pending",
    "another number of ranks", "another number of ranks on one", "one ends before a collective of its node" };

typedef struct plan { int kind, victim; } plan;

static dt_status failing(dt_ctx *ctx, void *user) {
    const plan *p = (const plan *)user;
    dt_comm    *world = dt_world(ctx);
    enum { MANY = 300000 };
    int         me = dt_comm_rank(world), n = dt_comm_size(world), other = me ^ 1;
    float      *a = (float *)calloc(2 * MANY, sizeof *a), *b = a + MANY;
    dt_all_reduce(world, a, b, 100, DT_F32, DT_SUM);
    if (p->kind == ONE_FAILS && me == p->victim) dt_fail(ctx, DT_ERR_NUMERIC, "planted on %d", me);
    if (p->kind == RETURNS && me == p->victim) return free(a), DT_ERR_IO;
    if (p->kind == LOST && me == p->victim) dt_send(world, a, 3, DT_F32, (me + 1) % n, 7);
    if (p->kind == TOO_LONG && me == 0) dt_send(world, a, 30, DT_F32, 1, 1);
    if (p->kind == TOO_LONG && me == 1) dt_recv(world, a, 10, DT_F32, 0, 1);
    if (p->kind == TOO_SHORT && me == 0) dt_send(world, a, 10, DT_F32, 1, 1);
    if (p->kind == TOO_SHORT && me == 1) dt_recv(world, a, 30, DT_F32, 0, 1);
    if (p->kind == TAG && me == 0) dt_send(world, a, 10, DT_F32, 1, 0x7fffffff);
    if (p->kind == LARGE && me == p->victim) dt_fail(ctx, DT_ERR_NUMERIC, "planted on %d", me);
    if (p->kind == LARGE && other < n) {
        dt_work *in = dt_recv_start(world, b, MANY, DT_F32, other, 2);
        dt_send(world, a, MANY, DT_F32, other, 2);
        dt_wait(ctx, in);
        for (int r = 0; r < n; r++) dt_send_start(world, a, MANY, DT_F32, r, 3);     /* nobody receives these */
    }
    if (p->kind == ENDS) {
        int      node = node_ranks();
        dt_comm *near = dt_comm_split(world, node ? me / node : 0, 0, "near");
        if (me != p->victim) dt_all_reduce(near, a, b, 100, DT_F32, DT_SUM);
        return free(a), dt_error(ctx);
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
    static const dt_status wanted[] = { DT_OK, DT_ERR_NUMERIC, DT_ERR_IO, DT_ERR_COMM, DT_ERR_COMM, DT_ERR_COMM,
        DT_ERR_COMM, DT_ERR_NUMERIC, DT_ERR_ARG, DT_ERR_ARG, DT_ERR_COMM };
    plan      p = { kind, victim };
    char      text[64];
    dt_report report;
    dt_host   host = *dt_host_default();
    double    begin = host.now(host.user);
    host.log = counting_log;
    log_lines = 0;
    dt_status status = dt_run((dt_run_desc){ .backend = DT_BACKEND_MPI, .timeout_s = 20, .report = &report,
        .host = &host, .ranks = kind == RANKS || (kind == ONE_RANKS && rank == victim) ? size + 1 : size,
        .node_ranks = node_ranks() }, failing, &p);
    double took = host.now(host.user) - begin;
    CHECK_MSG(status == wanted[kind] && took < 10, "%s, %d: rank %d after %.1f s: %s %s", kinds[kind], victim, rank,
              took,
              dt_status_name(status), report.text);
    text[0] = 0;
    if (kind == ONE_FAILS || kind == LARGE) snprintf(text, sizeof text, "rank %d: planted on %d", victim, victim);
    if (kind == RETURNS) snprintf(text, sizeof text, "rank %d: rank function returned", victim);
    if (kind == LOST) snprintf(text, sizeof text, "rank %d: ended without receiving", (victim + 1) % size);
    if (kind == TOO_LONG) snprintf(text, sizeof text, "%s", strstr(report.text, "the message is longer") ?
        "receive f32 x 10 from rank 0" : "rank 0 sends f32 x 30, rank 1 receives f32 x 10"); /* MPICH cannot say more */
    if (kind == TOO_SHORT) snprintf(text, sizeof text, "rank 0 sends f32 x 10, rank 1 receives f32 x 30");
    if (kind == TAG) snprintf(text, sizeof text, "MPI_TAG_UB");
    if (kind == ENDS) snprintf(text, sizeof text, "rank %d ended without calling all-reduce", victim);
    if (kind == RANKS || kind == ONE_RANKS) snprintf(text, sizeof text, "%d ranks, but MPI started %d", size + 1, size);
    CHECK_MSG(strstr(report.text, text) != NULL, "%s, %d: rank %d reports '%s'", kinds[kind], victim, rank,
              report.text);
    int lines = log_lines, all = 0;
    MPI_Allreduce(&lines, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (kind != RANKS) CHECK_MSG(all == (kind != FINE), "%s, %d: %d ranks log an error", kinds[kind], victim, all);
}

static int failures(void) {
    int rank, size, bad = 0, running = 0, all = 0;
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int kind = FINE; kind < KINDS; kind++)
        for (int victim = 0; victim < size; victim++) {
            if ((kind == TOO_LONG || kind == TOO_SHORT || kind == TAG || kind == RANKS || kind == FINE)
                && victim) continue;
            int node = node_ranks() ? node_ranks() : size, first = victim / node * node;
            if (kind == ENDS && (node == 1 || (first + 1 == size))) continue;   /* no other on its node */
            one_failure(kind, victim, rank, size);
        }
    one_failure(FINE, 0, rank, size);       /* after all that, all is well again */
    MPI_Finalized(&running);
    CHECK(!running);
    bad = check_failed;
    MPI_Allreduce(&bad, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Finalize();
    return all != 0;
}

/* ---- ranks that do not come -------------------------------------------------------------------------------------- */

static dt_status sleeper(dt_ctx *ctx, void *user) {
    float x = 1, y;
    int   last = dt_comm_rank(dt_world(ctx)) == dt_comm_size(dt_world(ctx)) - 1;
    if (last && *(int *)user) raise(SIGKILL);
    if (last) dt_host_default()->sleep(NULL, 600);
    return dt_all_reduce(dt_world(ctx), &x, &y, 1, DT_F32, DT_SUM);
}

static int absent(int killed) {
    dt_report report;
    double    begin = dt_host_default()->now(NULL);
    dt_status status = dt_run((dt_run_desc){ .backend = DT_BACKEND_MPI, .timeout_s = 1, .report = &report,
        .node_ranks = node_ranks() }, sleeper, &killed);
    fprintf(stderr, "%s after %.0f s: %s\n", dt_status_name(status), dt_host_default()->now(NULL) - begin, report.text);
    return status == DT_ERR_TIMEOUT ? 3 : 1;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    if (strcmp(mode, "collectives") == 0) return collectives();
    if (strcmp(mode, "failures") == 0) return failures();
    if (strcmp(mode, "timeout") == 0 || strcmp(mode, "killed") == 0) return absent(mode[0] == 'k');
    if (strcmp(mode, "threads") == 0 && argc > 2)
        return dt_run((dt_run_desc){ .ranks = atoi(argv[2]) }, operations, NULL) != DT_OK || check_failed != 0;
    return 2;
}
