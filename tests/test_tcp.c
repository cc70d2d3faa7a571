/* test_tcp.c - dt_comm.h over sockets: the cases of comm_cases.h, and every way in which a peer can go.

   Ranks are forks, each a dt_run of its own with backend tcp on a free port of the loopback. What they find lies in
   memory that all share: their checks, reports and times, and a hash of all that they received, which must be that of
   the same cases on threads. Every rank must give back all its memory and all its descriptors. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "comm_cases.h"

#include <signal.h>
#include <sys/mman.h>

enum { MOST = 8 };

static double seconds(void) { return dt_host_default()->now(NULL); }
static void nap(double s) { dt_host_default()->sleep(NULL, s); }

/* ---- a host table that counts ------------------------------------------------------------------------------------ */

typedef struct spy {
    dt_host host;
    long    live, calls, refuse_at;     /* this allocation is refused, counted from 1; 0: none */
    size_t  largest;
    int     error_lines;
} spy;

static void *spy_alloc(void *user, size_t bytes, dt_mem mem) {
    spy *s = (spy *)user;
    if (++s->calls == s->refuse_at) return NULL;
    void *p = dt_host_default()->alloc(NULL, bytes, mem);
    if (bytes > s->largest) s->largest = bytes;
    if (p) memset(p, 0xA5, bytes < 65536 ? bytes : 65536);
    s->live += p != NULL;
    return p;
}

static void spy_free(void *user, void *p, size_t bytes, dt_mem mem) {
    ((spy *)user)->live -= p != NULL;
    dt_host_default()->free(NULL, p, bytes, mem);
}

static void spy_log(void *user, int level, int rank, const char *text) {
    (void)rank, (void)text;
    ((spy *)user)->error_lines += level == DT_LOG_ERROR;
}

static void spy_make(spy *s) {
    memset(s, 0, sizeof *s);
    s->host = *dt_host_default();
    s->host.user = s;
    s->host.alloc = spy_alloc;
    s->host.free = spy_free;
    s->host.log = spy_log;
}

static int open_descriptors(void) {
    int n = 0;
    for (int fd = 0; fd < 512; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* ---- jobs -------------------------------------------------------------------------------------------------------- */

typedef dt_status (*rank_fn)(dt_ctx *ctx, void *user);

typedef struct rank_result {
    dt_status status;
    dt_report report;
    double    took;
    int       ended, passed, failed;    /* ended: dt_run has returned; checks */
    int       error_lines, signal;
    size_t    largest;
    uint64_t  hash;
} rank_result;

typedef struct job {
    int         ranks, port;
    double      timeout_s;
    rank_fn     fn;
    int         what;           /* for the rank function */
    int         absent;         /* bits: these ranks never come */
    int         refuse_rank;    /* this rank is refused this allocation */
    long        refuse_at;
    double      late[MOST];     /* ranks come that much later */
    pid_t       pid[MOST];
    double      begun;
    rank_result result[MOST];
} job;

static job *job_make(int ranks, rank_fn fn, int what) {
    job *j = (job *)mmap(NULL, sizeof *j, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(j, 0, sizeof *j);
    j->ranks = ranks;
    j->fn = fn;
    j->what = what;
    j->timeout_s = 20;
    dt__tcp_place any = { 0, 0 };
    any.address = htonl(INADDR_LOOPBACK);
    int fd = dt__tcp_listen(any, 1);
    j->port = (int)dt__tcp_own_place(fd).port;
    close(fd);
    return j;
}

static void job_free(job *j) { munmap(j, sizeof *j); }

static void child(job *j, int rank) {
    rank_result *r = &j->result[rank];
    spy s;
    dt_run_desc desc;
    char rendezvous[64];
    check_passed = check_failed = 0;
    if (j->late[rank] > 0) nap(j->late[rank]);
    spy_make(&s);
    if (rank == j->refuse_rank) s.refuse_at = j->refuse_at;
    memset(&desc, 0, sizeof desc);
    snprintf(rendezvous, sizeof rendezvous, "127.0.0.1:%d", j->port);
    desc.ranks = j->ranks;
    desc.backend = DT_BACKEND_TCP;
    desc.timeout_s = j->timeout_s;
    desc.host = &s.host;
    desc.report = &r->report;
    desc.rank = rank;
    desc.rendezvous = rendezvous;
    int descriptors = open_descriptors();
    double from = seconds();
    r->status = dt_run(desc, j->fn, j);
    r->took = seconds() - from;
    CHECK_MSG(r->status == r->report.status, "rank %d returns %d, reports %d", rank, r->status, r->report.status);
    CHECK_MSG(s.live == 0, "rank %d: %ld blocks are left: %s", rank, s.live, r->report.text);
    CHECK_MSG(open_descriptors() == descriptors, "rank %d: descriptors are left: %s", rank, r->report.text);
    CHECK_MSG((r->status == DT_OK) == (r->report.text[0] == 0), "%s", r->report.text);
    r->error_lines = s.error_lines;
    r->largest = s.largest;
    r->passed = check_passed;
    r->failed = check_failed;
    r->ended = 1;
}

static void job_start(job *j) {
    fflush(NULL);
    j->begun = seconds();
    for (int rank = 0; rank < j->ranks; rank++) {
        if (j->absent >> rank & 1) continue;
        pid_t pid = fork();
        if (pid == 0) {
            alarm(90);
            child(j, rank);
            fflush(NULL);
            _exit(0);
        }
        j->pid[rank] = pid;     /* by the parent alone: the memory is shared */
    }
}

/* Waits for all; those that hang are killed and counted. */
static void job_wait(job *j) {
    for (int rank = 0; rank < j->ranks; rank++) {
        int status = 0, gone = j->pid[rank] <= 0;
        while (!gone) {
            gone = waitpid(j->pid[rank], &status, WNOHANG) != 0;
            if (gone) break;
            if (!CHECK_MSG(seconds() - j->begun < 60, "rank %d of %d hangs", rank, j->ranks)) {
                kill(j->pid[rank], SIGKILL);
                waitpid(j->pid[rank], &status, 0);
                break;
            }
            nap(1e-3);
        }
        j->result[rank].signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
        check_passed += j->result[rank].passed;
        check_failed += j->result[rank].failed;
    }
}

static job *run_job(int ranks, rank_fn fn, int what) {
    job *j = job_make(ranks, fn, what);
    job_start(j);
    job_wait(j);
    return j;
}

static void check_well(const job *j) {
    for (int rank = 0; rank < j->ranks; rank++) {
        const rank_result *r = &j->result[rank];
        CHECK_MSG(r->ended && r->status == DT_OK && r->error_lines == 0,
                  "%d ranks, case %d: rank %d: %s (%d lines, signal %d)", j->ranks, j->what, rank,
                  r->ended ? r->report.text : "did not end", r->error_lines, r->signal);
    }
}

static void run_well(int ranks, rank_fn fn, int what) {
    job *j = run_job(ranks, fn, what);
    check_well(j);
    job_free(j);
}

/* ---- 1. all operations and messages, the bits of threads --------------------------------------------------------- */

static cases all;       /* made before the ranks start */

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
                  "%d ranks: rank %d has other bits than on threads", all.n, rank);
    job_free(tcp);
    job_free(threads);
    cases_free(&all);
}

static dt_status short_rank(dt_ctx *ctx, void *user) {
    (void)user;
    return dt_barrier(dt_world(ctx));
}

/* A rank that ends early is missed by nobody who needs no more of it. */
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
        nap(0.2);   /* its goodbye is here */
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

/* ---- 3. failures ------------------------------------------------------------------------------------------------- */

enum { FAILS = 0, RETURNS, KILLED, GARBAGE, HUGE_FRAME, CUT_FRAME, N_ENDS };
static const char *const end_names[] = { "fails", "returns an error", "is killed", "sends garbage", "sends 2^50 bytes",
                                         "is killed in a frame" };

static void raw_to_all(dt_comm *world, const void *p, size_t bytes) {
    dt__tcp *t = (dt__tcp *)world->world->transport.user;
    for (int rank = 0; rank < t->size; rank++)
        if (t->peers[rank].fd >= 0 && send(t->peers[rank].fd, p, bytes, MSG_NOSIGNAL) < 0) perror("send");
}

static dt_status come_to_an_end(dt_ctx *ctx, int how) {
    static const char garbage[100] = "GET / HTTP/1.1";
    dt__tcp_frame frame = { DT__TCP_FRAME, DT__TCP_DATA, 0, 0, (uint64_t)1 << 50 };
    if (how == FAILS) return dt_fail(ctx, DT_ERR_NUMERIC, "the injected failure");
    if (how == RETURNS) return DT_ERR_IO;
    if (how == GARBAGE) raw_to_all(dt_world(ctx), garbage, sizeof garbage);
    if (how == HUGE_FRAME) raw_to_all(dt_world(ctx), &frame, sizeof frame);
    frame.bytes = 1000;
    if (how == CUT_FRAME) raw_to_all(dt_world(ctx), &frame, sizeof frame);
    if (how == KILLED || how == CUT_FRAME) kill(getpid(), SIGKILL);
    return dt_barrier(dt_world(ctx));
}

/* what: how rank 1 ends, and in which operation the others then are. */
enum { IN_BARRIER = 0, IN_RECV, IN_SEND, IN_ANY, IN_REDUCE, N_PLACES };
static dt_status fault_rank(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    dt_comm *world = dt_world(ctx);
    int how = j->what % 10, place = j->what / 10, n = j->ranks;
    static float big[1000000];
    for (int i = 0; i < 3; i++) dt_barrier(world);
    if (dt_comm_rank(world) == 1) {
        nap(0.05);
        return come_to_an_end(ctx, how);
    }
    if (dt_comm_rank(world) != (n == 2 ? 0 : 2)) return dt_recv(world, big, 4, DT_F32, n == 2 ? 1 : 2, 8);
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
        snprintf(where, sizeof where, "%d ranks, rank 1 %s, place %d, rank %d", j->ranks, end_names[how], j->what / 10,
                 rank);
        if (rank == 1 && dies) continue;
        CHECK_MSG(r->ended && r->status != DT_OK && r->took < 8, "%s: %s, %.1f s", where, dt_status_name(r->status),
                  r->took);
        CHECK_MSG(r->largest < 100000000, "%s: %zu bytes were taken", where, r->largest);
        if (how == FAILS)
            CHECK_MSG(strcmp(text, "rank 1: the injected failure") == 0 && r->status == DT_ERR_NUMERIC &&
                      r->report.rank == 1 && r->error_lines == (rank == 1), "%s: %s (%d lines)", where, text,
                      r->error_lines);
        if (how == RETURNS)
            CHECK_MSG(strcmp(text, "rank 1: rank function returned DT_ERR_IO") == 0 && r->status == DT_ERR_IO &&
                      r->report.rank == 1, "%s: %s", where, text);
        if (lost && rank != 1) CHECK_MSG(strstr(text, "connection to rank 1 was lost"), "%s: %s", where, text);
        if (how == GARBAGE && rank != 1) CHECK_MSG(strstr(text, "what is no message"), "%s: %s", where, text);
        if (lost) CHECK_MSG(r->error_lines <= 1, "%s: %d lines", where, r->error_lines);
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

/* What had come before the sender died is delivered first; then its name is said. */
static dt_status legacy_rank(dt_ctx *ctx, void *user) {
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
    CHECK(status == DT_ERR_PEER && strstr(dt_error_text(ctx), "receive f32 x 10 from rank 1 with tag 3 on world: "
                                                              "connection to rank 1 was lost"));
    free(a);
    return status;
}

/* Rank 0 fails with a large send half-way, whose receiver is not looking. The text comes behind the message. */
static dt_status half_way_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    enum { N = 4000000 };
    float *a = (float *)calloc(N, sizeof *a);
    size_t bad = 0;
    (void)user;
    for (int i = 0; i < N; i++) a[i] = 1;
    dt_barrier(world);
    if (dt_comm_rank(world) == 0) {
        dt_work *work = dt_send_start(world, a, N, DT_F32, 1, 0);
        dt_fail(ctx, DT_ERR_NUMERIC, "half-way");
        dt_wait(ctx, work);
        memset(a, 0, N * sizeof *a);    /* it is the caller's again */
    } else {
        memset(a, 0, N * sizeof *a);
        nap(0.6);
        if (dt_recv(world, a, N, DT_F32, 0, 0) == DT_OK) {
            for (int i = 0; i < N; i++) bad += a[i] != 1;
            CHECK_MSG(bad == 0, "%zu elements of a delivered message are wrong", bad);
        }
        CHECK(dt_barrier(world) != DT_OK && strstr(dt_error_text(ctx), "rank 0: half-way"));
    }
    free(a);
    return dt_error(ctx);
}

/* what 0: more is expected of a rank that has ended; 1: a message nobody received; 2: other counts; 3: a rank is
   stuck */
static dt_status misuse_rank(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    dt_comm *world = dt_world(ctx);
    float a[16] = { 0 };
    int me = dt_comm_rank(world);
    if (j->what == 0) return me == 1 ? DT_OK : dt_recv(world, a, 4, DT_F32, 1, 0);
    if (j->what == 1 && me == 1) return dt_send(world, a, 10, DT_F32, 0, 4);
    if (j->what == 2) return me == 1 ? dt_send(world, a, 10, DT_F32, 0, 4) : dt_recv(world, a, 8, DT_F32, 1, 4);
    if (j->what == 3 && me == 1) nap(1.5);
    if (j->what == 3) return dt_barrier(world);
    return DT_OK;
}

static void test_misuse(void) {
    static const char *const says[] = {
        "rank 0: receive f32 x 4 from rank 1 with tag 0 on world: rank 1 has ended",
        "rank 0: ended without receiving 40 bytes with tag 4 from rank 1",
        "rank 0: rank 1 sends f32 x 10, rank 0 receives f32 x 8 (tag 4 on world)",
        ": rank 1 did not send it",
    };
    for (int what = 0; what < 4; what++) {
        job *j = job_make(2, misuse_rank, what);
        if (what == 3) j->timeout_s = 0.5;
        job_start(j);
        job_wait(j);
        const char *text = j->result[0].report.text;
        const char *begins = "rank 0: timeout 0.5 s in receive f32 x 0 from rank 1 of barrier #1 on world at test_tcp.c:";
        int same = what < 3 ? strcmp(text, says[what]) == 0
                            : strncmp(text, begins, strlen(begins)) == 0 && strstr(text, says[what]);
        CHECK_MSG(j->result[0].status && same, "case %d: %s", what, text);
        CHECK(j->result[0].error_lines == 1 && j->result[0].took < 5);
        job_free(j);
    }
}

/* Something of everything that allocates. */
static dt_status hungry_rank(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx), *half;
    static float a[30000], b[30000];
    int n = dt_comm_size(world), me = dt_comm_rank(world);
    (void)user;
    dt_send(world, a, 1000, DT_F32, (me + 1) % n, 7);   /* comes before it is asked for */
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
        job *j = job_make(3, hungry_rank, 0);
        j->refuse_rank = 1;
        j->refuse_at = k + 1;
        j->timeout_s = 0.5;
        job_start(j);
        job_wait(j);
        refused = j->result[1].status == DT_ERR_MEM;
        for (int rank = 0; rank < 3 && refused; rank++)
            CHECK_MSG(j->result[rank].status != DT_OK, "allocation %ld: rank %d: DT_OK", k + 1, rank);
        if (!refused) check_well(j);
        job_free(j);
        if (k > 4) k += 2;
    }
    CHECK_MSG(k > 10, "%ld allocations", k);
}

/* ---- 4. the rendezvous ------------------------------------------------------------------------------------------- */

static dt__tcp_place loopback(int port) {
    dt__tcp_place place = { 0, 0 };
    place.address = htonl(INADDR_LOOPBACK);
    place.port = (uint32_t)port;
    return place;
}

/* A plain connection to the port, as soon as there is one; -1: none for two seconds. */
static int knock(int port) {
    struct sockaddr_in at = dt__tcp_sockaddr(loopback(port));
    for (double until = seconds() + 2; seconds() < until; nap(1e-3)) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&at, sizeof at) == 0) return fd;
        close(fd);
    }
    return -1;
}

static dt__tcp_hello hello_of(int rank, int size) {
    dt__tcp_hello hello;
    memset(&hello, 0, sizeof hello);
    memcpy(hello.magic, dt__tcp_magic, sizeof hello.magic);
    hello.version = DT__TCP_VERSION;
    hello.rank = rank;
    hello.size = size;
    hello.place = loopback(1);
    return hello;
}

static void expect_refusal(int port, dt__tcp_hello hello, const char *says) {
    dt__tcp_answer answer;
    int fd = knock(port);
    memset(&answer, 0, sizeof answer);
    if (!CHECK(fd >= 0)) return;
    send(fd, &hello, sizeof hello, MSG_NOSIGNAL);
    ssize_t n = recv(fd, &answer, sizeof answer, MSG_WAITALL);
    CHECK_MSG(n == (ssize_t)sizeof answer && answer.refused == DT__TCP_REFUSED && strstr(answer.text, says),
              "%zd bytes, %s", n, answer.text);
    close(fd);
}

/* All kinds of strangers at the door of rank 0 while it waits for ranks 2 and 3. */
static void test_strangers(void) {
    enum { IDLE = 100 };
    int idle[IDLE], fd;
    char garbage[300];
    job *j = job_make(4, short_rank, 0);
    j->late[2] = j->late[3] = 1.5;
    memset(garbage, 'x', sizeof garbage);
    job_start(j);
    for (int i = 0; i < IDLE; i++) idle[i] = i < 40 ? knock(j->port) : -1;     /* say nothing, and stay */
    fd = knock(j->port);
    CHECK(fd >= 0 && send(fd, garbage, sizeof garbage, MSG_NOSIGNAL) == (ssize_t)sizeof garbage);
    char c;
    CHECK(recv(fd, &c, 1, 0) <= 0);     /* is hung up on */
    close(fd);
    fd = knock(j->port);
    dt__tcp_hello hello = hello_of(2, 4);
    CHECK(send(fd, &hello, 20, MSG_NOSIGNAL) == 20);    /* half a hello, and silence */
    int half = fd;
    close(knock(j->port));      /* comes and goes */
    expect_refusal(j->port, hello_of(2, 3), "it is of 3 ranks, the job has 4");
    expect_refusal(j->port, hello_of(4, 4), "rank 4 is none here");
    expect_refusal(j->port, hello_of(0, 4), "rank 0 is none here");
    expect_refusal(j->port, hello_of(-1, 4), "rank -1 is none here");
    nap(0.1);   /* rank 1 has come */
    expect_refusal(j->port, hello_of(1, 4), "rank 1 is there already");
    hello.version = 7;
    expect_refusal(j->port, hello, "version 7 of the protocol, not 1");
    hello = hello_of(2, 4);     /* takes the seat, and leaves before the real one comes */
    fd = knock(j->port);
    CHECK(send(fd, &hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello);
    nap(0.1);
    close(fd);
    for (int i = 40; i < IDLE; i++)     /* more than there are guests */
        idle[i] = i > 40 && idle[i - 1] < 0 ? -1 : knock(j->port);
    job_wait(j);
    check_well(j);
    CHECK_MSG(j->result[0].took < 8, "%.1f s", j->result[0].took);
    for (int i = 0; i < IDLE; i++) close(idle[i]);
    close(half);
    job_free(j);
}

static void test_absent(void) {
    job *j = job_make(4, short_rank, 0);
    j->absent = 1 << 2;
    j->timeout_s = 1;
    job_start(j);
    job_wait(j);
    for (int rank = 0; rank < 4; rank += rank == 1 ? 2 : 1) {
        const rank_result *r = &j->result[rank];
        CHECK_MSG(r->status && strstr(r->report.text, "of 4 ranks rank 2 did not come") && r->took < 5,
                  "rank %d: %s, %.1f s", rank, r->report.text, r->took);
        CHECK(r->status == (rank ? DT_ERR_PEER : DT_ERR_TIMEOUT));
    }
    job_free(j);
    j = job_make(3, short_rank, 0);
    j->absent = 1;
    j->timeout_s = 0.7;
    job_start(j);
    job_wait(j);
    for (int rank = 1; rank < 3; rank++)
        CHECK_MSG(j->result[rank].status == DT_ERR_TIMEOUT && j->result[rank].took < 5 &&
                  strstr(j->result[rank].report.text, "rank 0 did not come to 127.0.0.1:"), "%s",
                  j->result[rank].report.text);
    job_free(j);
    j = job_make(3, short_rank, 0);     /* rank 0 comes last */
    j->late[0] = 0.5;
    job_start(j);
    job_wait(j);
    check_well(j);
    job_free(j);
}

/* A rank's part of the cases that leaves out the long ones. */
static dt_status exchange_rank(dt_ctx *ctx, void *user) {
    (void)user;
    exchange(dt_world(ctx));
    from_any(dt_world(ctx));
    return dt_error(ctx);
}

static dt_status mail_rank(dt_ctx *ctx, void *user) {
    (void)user;
    mail(dt_world(ctx));
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

static dt_status alone_rank(dt_ctx *ctx, void *user) {
    float x = 3, y = 0;
    (void)user;
    CHECK(dt_all_reduce(dt_world(ctx), &x, &y, 1, DT_F32, DT_SUM) == DT_OK && y == 3);
    CHECK(dt_send(dt_world(ctx), &x, 1, DT_F32, 0, 0) == DT_OK);
    y = 0;
    CHECK(dt_recv(dt_world(ctx), &y, 1, DT_F32, 0, 0) == DT_OK && y == 3);
    return dt_barrier(dt_world(ctx));
}

static void test_descriptions(void) {
    static const char *const places[] = { "nowhere", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:x",
                                          "1.2.3:4", "127.0.0.1:29500 ", "::1:4" };
    spy s;
    dt_report report;
    dt_run_desc desc;
    spy_make(&s);
    memset(&desc, 0, sizeof desc);
    desc.backend = DT_BACKEND_TCP;
    desc.host = &s.host;
    desc.report = &report;
    CHECK(dt_run(desc, alone_rank, NULL) == DT_OK);     /* one rank needs no sockets */
    CHECK(s.live == 0 && s.error_lines == 0);
    for (int i = 0; i < 8; i++) {
        desc.rendezvous = places[i];
        CHECK_MSG(dt_run(desc, alone_rank, NULL) == DT_ERR_ARG && strstr(report.text, places[i]), "%s", report.text);
    }
    desc.rendezvous = "localhost:1";
    CHECK(dt_run(desc, alone_rank, NULL) == DT_OK);
    desc.rank = 1;
    CHECK(dt_run(desc, alone_rank, NULL) == DT_ERR_ARG && strstr(report.text, "rank 1 of 1") && report.rank == -1);
    desc.rank = -1;
    CHECK(dt_run(desc, alone_rank, NULL) == DT_ERR_ARG);
    dt_kernels device = *dt_kernels_cpu();
    device.alloc = (void *(*)(void *, size_t))(void *)spy_alloc;
    desc.rank = 0;
    desc.kernels = &device;
    CHECK(dt_run(desc, alone_rank, NULL) == DT_ERR_UNSUPPORTED);
    desc.kernels = NULL;
    int fd = dt__tcp_listen(loopback(0), 1);        /* a port that is taken */
    char place[64];
    snprintf(place, sizeof place, "127.0.0.1:%d", (int)dt__tcp_own_place(fd).port);
    desc.ranks = 2;
    desc.rendezvous = place;
    CHECK_MSG(dt_run(desc, short_rank, NULL) == DT_ERR_COMM && strstr(report.text, "another program does") &&
              strstr(report.text, place), "%s", report.text);
    close(fd);
    desc.rendezvous = "203.0.113.7:5";      /* only rank 0 need have the address */
    CHECK_MSG(dt_run(desc, short_rank, NULL) == DT_ERR_COMM && strstr(report.text, "not this machine's"), "%s",
              report.text);
    CHECK(s.live == 0);
}

int main(void) {
    test_descriptions();
    for (int ranks = 1; ranks <= 5; ranks++) compare_with_threads(cases_make(ranks, 2));
    compare_with_threads(cases_windows(3, 4));
    run_well(3, early_end_rank, 0);
    test_two_jobs();
    test_faults();
    job *j = run_job(2, legacy_rank, 0);
    CHECK(j->result[0].ended && strstr(j->result[0].report.text, "connection to rank 1 was lost"));
    job_free(j);
    j = run_job(2, half_way_rank, 0);
    for (int rank = 0; rank < 2; rank++)
        CHECK_MSG(strcmp(j->result[rank].report.text, "rank 0: half-way") == 0, "%s", j->result[rank].report.text);
    job_free(j);
    test_misuse();
    test_refused_memory();
    test_strangers();
    test_absent();
    return check_done("test_tcp");
}
