/* test_comm_procs.c - dt_comm.h: forked ranks and how they end, their heaps, and dt_comm_attach
   with user threads and a user transport. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#include <sys/types.h>
#include <unistd.h>

/* The library calls this fork. forks_left counts down; at 0 the call fails; below 0 it never
   fails. */
static int forks_left = -1;
static pid_t test_fork(void) {
    if (forks_left == 0) return -1;
    if (forks_left > 0) forks_left--;
    return fork();
}
#define fork test_fork
#define DT_IMPLEMENTATION
#include "dt_comm.h"
#undef fork

#include "tests/comm/ranks.h"

#include <errno.h>

static void quiet_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}
static dt_host quiet;

static void prepare_quiet(outcome *o, int ranks, rank_fn fn, void *user) {
    prepare_procs(o, ranks, fn, user);
    o->desc.host = &quiet;
}

/* Number of shared mappings in /proc/self/maps, which a run must not increase. */
static int shared_mappings(void) {
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    while (f && fgets(line, sizeof line, f)) n += strstr(line, "rw-s") != NULL;
    if (f) fclose(f);
    return n;
}

/* ---- 1. how ranks end ---- */

enum { KILLS, KILLS_IN_COPY, EXITS, EXITS_0, FAILS, STUCK, KILLS_IN_RECORD, WAYS };
typedef struct ending {
    int way, rank;
    uint64_t seed;
} ending;

static int dying_copy;
static dt_status deadly_move(void *dst, const void *src, size_t bytes, void *stream) {
    if (dying_copy && bytes > DT_EAGER_BYTES) kill(getpid(), SIGKILL);
    return dt_kernels_cpu()->move(dst, src, bytes, stream);
}
static int deadly_failed(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    (void)ctx, (void)status, (void)text, (void)user;
    kill(getpid(), SIGKILL);
    return 0;
}

static dt_status ending_rank(dt_ctx *ctx, void *user) {
    const ending *e = (const ending *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), n = dt_comm_size(world);
    size_t count = 20000;
    float *a = (float *)calloc((size_t)n * count, 4),
          *b = (float *)dt_alloc(ctx, DT_MEM_COMM, (size_t)n * count * 4, "b");
    dt_work *work = NULL;
    for (int round = 0; round < 30 && !dt_error(ctx); round++) {
        if (me == e->rank && round == (int)(e->seed % 20)) {
            switch (e->way) {
            case KILLS: kill(getpid(), SIGKILL); break;
            case KILLS_IN_COPY: dying_copy = 1; break;
            case EXITS: exit(7); break;
            case EXITS_0: exit(0); break;
            case FAILS: dt_fail(ctx, DT_ERR_NUMERIC, "by itself"); break;
            case STUCK:
                for (;;) pause();
                break;
            default: {
                static dt_listener deadly;
                deadly.failed = deadly_failed;
                /* before the world's listener, so that the rank dies between claim and record */
                deadly.next = ctx->listeners;
                ctx->listeners = &deadly;
                dt_send(world, a, 1, DT_F32, 99, 0);
            }
            }
        }
        switch (mix(e->seed + (uint64_t)round) % 6) {
        case 0: dt_all_reduce(world, a, b, count, DT_F32, DT_SUM); break;
        /* buffers in the heap, which other ranks read */
        case 1: dt_all_gather(world, b, a, count, DT_F32); break;
        case 2: dt_all_to_all(world, a, b, count, DT_F32); break;
        case 3: dt_barrier(world); break;
        case 4:
            work = dt_broadcast_start(world, b, count, DT_F32, round % n);
            dt_wait(ctx, work);
            break;
        default:
            work = dt_send_start(world, a, count, DT_F32, (me + 1) % n, 0);
            dt_recv(world, b, count, DT_F32, (me + n - 1) % n, 0);
            dt_wait(ctx, work);
        }
    }
    dt_free(ctx, DT_MEM_COMM, b, (size_t)n * count * 4);
    free(a);
    return dt_error(ctx);
}

static void test_endings(void) {
    dt_kernels kernels = *dt_kernels_cpu();
    kernels.move = deadly_move;
    int before = 0;
    for (int way = 0; way < WAYS; way++) {
        for (int i = 0; i < 8; i++) {
            outcome o;
            ending e = { way, i % 4, (uint64_t)(100 * way + 7 * i) };
            char says[2][96] = { "", "" };
            prepare_quiet(&o, 4, ending_rank, &e);
            o.desc.kernels = &kernels;
            if (way == STUCK) o.desc.timeout_s = 0.3;
            if (way == STUCK && i > 2) continue;
            start(&o);
            /* the shared board is mapped by now */
            if (way == 0 && i == 0) before = shared_mappings();
            snprintf(says[0], sizeof says[0], "rank %d", e.rank);
            if (way == KILLS || way == KILLS_IN_COPY || way == KILLS_IN_RECORD)
                snprintf(says[1], sizeof says[1], ") was ended by signal 9");
            if (way == EXITS)
                snprintf(says[1], sizeof says[1], ") exited with status 7 in its rank function");
            if (way == EXITS_0)
                snprintf(says[1], sizeof says[1], ") exited with status 0 in its rank function");
            if (way == FAILS) snprintf(says[1], sizeof says[1], "by itself");
            if (way == STUCK)
                snprintf(says[0], sizeof says[0], " %d did not", e.rank),
                    snprintf(says[1], sizeof says[1], "timeout 0.3 s");
            int timed_out = way == STUCK && (strstr(o.report.text, "did not send") ||
                                                strstr(o.report.text, "did not receive") ||
                                                strstr(o.report.text, "did not"));
            CHECK_MSG(o.status != DT_OK && (timed_out || strstr(o.report.text, says[0])) &&
                          strstr(o.report.text, says[1]) && in_time(o.took, 20),
                "way %d, rank %d: %s, %.1f s", way, e.rank, o.report.text, o.took);
            if (way < FAILS) CHECK_MSG(strstr(o.report.text, "(process "), "%s", o.report.text);
            for (int r = 0; r < 4; r++)
                if (r != e.rank)
                    CHECK_MSG(o.ended[r] && o.error[r], "way %d: rank %d: %s", way, r,
                        dt_status_name(o.error[r]));
            /* no child process remains */
            CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
            CHECK_MSG(shared_mappings() == before, "way %d: %d shared mappings, %d before", way,
                shared_mappings(), before);
        }
    }
}

/* A half-written failure record is logged, too. */
static int logged;
static void count_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)rank, (void)text;
    logged += level == DT_LOG_ERROR;
}

static dt_status empty_rank(dt_ctx *ctx, void *user) {
    (void)user;
    return dt_barrier(dt_world(ctx));
}

typedef struct shared_user {
    int hits;
    char text[16][32];
    double sum;
} shared_user;
static dt_status user_rank(dt_ctx *ctx, void *user) {
    shared_user *u = (shared_user *)user;
    int me = dt_comm_rank(dt_world(ctx));
    __atomic_fetch_add(&u->hits, 1, __ATOMIC_SEQ_CST);
    CHECK(u->sum == 2.5);
    snprintf(u->text[me], 32, "rank %d, %d", me, (int)getpid());
    dt_barrier(dt_world(ctx));
    /* all ranks see the same memory */
    return u->hits == dt_comm_size(dt_world(ctx)) ? DT_OK : DT_ERR_COMM;
}

/* A host table with a user alloc: memory that other ranks must access is still in the shared memory
   segment. */
static void *own_alloc(void *user, size_t bytes, dt_mem mem) {
    CHECK_MSG(
        mem == DT_MEM_HOST || mem == DT_MEM_TEMP || mem == DT_MEM_OPTIM, "class %d", (int)mem);
    return dt_host_default()->alloc(user, bytes, mem);
}

static dt_status own_table_rank(dt_ctx *ctx, void *user) {
    enum { COUNT = 100000 };
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), bad = 0;
    float *a = (float *)malloc(COUNT * sizeof *a), *b = (float *)malloc(COUNT * sizeof *b);
    (void)user;
    for (int i = 0; i < COUNT; i++) a[i] = (float)(me + i % 7);
    CHECK(dt_all_reduce(world, a, b, COUNT, DT_F32, DT_SUM) == DT_OK);
    for (int i = 0; i < COUNT; i++) bad += b[i] != (float)(3 + 3 * (i % 7));
    if (me == 0) CHECK(dt_send(world, a, COUNT, DT_F32, 1, 0) == DT_OK);
    if (me == 1) CHECK(dt_recv(world, b, COUNT, DT_F32, 0, 0) == DT_OK);
    for (int i = 0; i < COUNT && me == 1; i++) bad += b[i] != (float)(i % 7);
    CHECK_MSG(bad == 0, "%d wrong elements", bad);
    free(a);
    free(b);
    return dt_error(ctx);
}

static void test_processes(void) {
    outcome o;
    for (int k = 0; k < 4; k++) {
        char says[64];
        forks_left = k;
        prepare_quiet(&o, 4, empty_rank, NULL);
        start(&o);
        snprintf(says, sizeof says, "rank %d: its process could not be started", k);
        CHECK_MSG(o.status == DT_ERR_MEM && strcmp(o.report.text, says) == 0 && in_time(o.took, 20),
            "%s", o.report.text);
        for (int r = 0; r < k; r++) CHECK(o.error[r] == DT_ERR_PEER && strstr(o.text[r], says));
        CHECK(waitpid(-1, NULL, WNOHANG) == -1);
    }
    forks_left = -1;
    shared_user u;
    memset(&u, 0, sizeof u);
    u.sum = 2.5;
    dt_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.ranks = 5;
    desc.backend = DT_BACKEND_PROCS;
    desc.user_bytes = sizeof u;
    CHECK(dt_run(desc, user_rank, &u) == DT_OK && u.hits == 5);
    for (int r = 0; r < 5; r++)
        CHECK(atoi(u.text[r] + 5) == r && !strstr(u.text[r], u.text[(r + 1) % 5] + 8));
    /* text in a stdio buffer at the fork is printed only once */
    int out[2];
    char text[256];
    CHECK(pipe(out) == 0);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(out[1], 1);
        close(out[0]);
        printf("<before>");
        desc.user_bytes = 0;
        dt_run(desc, empty_rank, NULL);
        printf("<after>");
        fflush(stdout);
        _exit(0);
    }
    close(out[1]);
    size_t at = 0;
    for (ssize_t got;
         at < sizeof text - 1 && (got = read(out[0], text + at, sizeof text - 1 - at)) > 0;)
        at += (size_t)got;
    text[at] = 0;
    waitpid(pid, NULL, 0);
    close(out[0]);
    CHECK_MSG(strcmp(text, "<before><after>") == 0, "%s", text);
    /* a table without map is refused; a half-written record is logged */
    dt_host no_map = quiet;
    no_map.map = NULL;
    prepare_procs(&o, 2, empty_rank, NULL);
    o.desc.host = &no_map;
    CHECK(start(&o) == DT_ERR_UNSUPPORTED && strstr(o.report.text, "maps memory"));
    dt_host own = quiet;
    own.alloc = own_alloc;
    prepare_procs(&o, 3, own_table_rank, NULL);
    o.desc.host = &own;
    CHECK_MSG(start(&o) == DT_OK, "%s", o.report.text);
    dt_host counting = quiet;
    counting.log = count_log;
    ending e = { KILLS_IN_RECORD, 1, 3 };
    prepare_procs(&o, 3, ending_rank, &e);
    o.desc.host = &counting;
    start(&o);
    CHECK_MSG(o.status == DT_ERR_PEER && logged == 1, "logged %d: %s", logged, o.report.text);
}

/* ---- 2. heaps ---- */

enum { BLOCKS = 300 };
static dt_status heap_rank(dt_ctx *ctx, void *user) {
    struct {
        unsigned char *p;
        size_t bytes;
        unsigned char mark;
    } b[BLOCKS];
    uint64_t h = (uint64_t)dt_comm_rank(dt_world(ctx)) + *(const uint64_t *)user;
    const dt__heap *heap = (const dt__heap *)dt_ctx_host(ctx)->user;
    const dt__free_block *rest = heap->list.next; /* all that has never been used */
    size_t bad = 0, unreachable = 0, rest_bytes = rest->bytes;
    memset(b, 0, sizeof b);
    for (int step = 0; step < 20000; step++) {
        h = mix(h + 1);
        int i = (int)(h % BLOCKS);
        if (b[i].p) {
            for (size_t k = 0; k < b[i].bytes; k += k < 300 || k + 300 > b[i].bytes ? 1 : 97)
                bad += b[i].p[k] != b[i].mark;
            dt_free(ctx, DT_MEM_COMM, b[i].p, b[i].bytes);
            b[i].p = NULL;
        } else {
            b[i].bytes = 1 + (h >> 16) % (h >> 60 ? 3000 : 300000);
            b[i].mark = (unsigned char)(h >> 8);
            b[i].p = (unsigned char *)dt_alloc(ctx, DT_MEM_COMM, b[i].bytes, "a block");
            if (!b[i].p) return dt_error(ctx);
            unreachable +=
                !dt__reachable(dt_world(ctx)->world->shared, b[i].p) || (uintptr_t)b[i].p % 64;
            for (int j = 0; j < BLOCKS; j++)
                bad += j != i && b[j].p && b[j].p < b[i].p + b[i].bytes &&
                       b[i].p < b[j].p + b[j].bytes;
            memset(b[i].p, b[i].mark, b[i].bytes);
        }
    }
    for (int i = 0; i < BLOCKS; i++) dt_free(ctx, DT_MEM_COMM, b[i].p, b[i].bytes);
    CHECK_MSG(bad == 0 && unreachable == 0, "%zu bytes or blocks wrong, %zu unreachable", bad,
        unreachable);
    /* all free blocks were merged */
    CHECK_MSG(!rest->next && heap->list.next == rest && rest->bytes == rest_bytes,
        "%zu bytes of the heap are still used or not merged", rest_bytes - heap->list.next->bytes);
    return dt_error(ctx);
}

static dt_status fill_heap_rank(dt_ctx *ctx, void *user) {
    (void)user;
    const dt__heap *heap = (const dt__heap *)dt_ctx_host(ctx)->user;
    /* the memory is not touched */
    void *p = dt_alloc(ctx, DT_MEM_COMM, heap->list.next->bytes - 4096, "nearly all");
    CHECK(p && dt_alloc(ctx, DT_MEM_COMM, 65536, "too much") == NULL);
    return dt_error(ctx);
}

static void test_heaps(void) {
    outcome o;
    uint64_t seed = 5;
    run_well_on(1, 2, heap_rank, &seed);
    prepare_quiet(&o, 2, fill_heap_rank, NULL);
    start(&o);
    CHECK_MSG(o.status == DT_ERR_MEM && strstr(o.report.text, "too much"), "%s", o.report.text);
}

/* ---- 3. dt_comm_attach: user threads, user transport ---- */

/* Packets in memory, in the order of their sends. A pair of ranks has at most WINDOW packets under
   way. After refuse_after sends the link of the next one breaks, which both ranks learn of. */
enum { WINDOW = 4 };
typedef struct packet {
    struct packet *next;
    int from, to;
    size_t bytes;
    char *data;
} packet;
typedef struct net {
    pthread_mutex_t lock;
    packet *packets;
    int refuse_after, sends, live;
    int broken[MAX_RANKS][MAX_RANKS], closed[MAX_RANKS];
    /* if not 0: the time until which rank 3 receives nothing from rank 1; set by a failure packet
       from rank 1 to rank 3 if slow_failure is 1 */
    double held_until;
    int slow_failure;
} net;
typedef struct port {
    net *n;
    int rank;
    packet *received; /* the packet that the last net_recv returned */
} port;

static void packet_free(net *n, packet *k) {
    if (!k) return;
    free(k->data);
    free(k);
    n->live--;
}

static int packets_from(const net *n, int from, int to) {
    int count = 0;
    for (const packet *k = n->packets; k; k = k->next) count += k->from == from && k->to == to;
    return count;
}

static int net_send(
    void *user, int to, const void *head, size_t head_bytes, const void *body, size_t body_bytes) {
    port *p = (port *)user;
    net *n = p->n;
    packet **at = &n->packets;
    int answer = 1;
    if (to == p->rank || head_bytes + body_bytes > DT_PACKET_BYTES)
        CHECK_MSG(0, "a packet of %zu bytes to rank %d", head_bytes + body_bytes, to);
    pthread_mutex_lock(&n->lock);
    if (n->slow_failure && p->rank == 1 && to == 3 && ((const dt__frame *)head)->kind == DT__ABORT)
        n->held_until = seconds() + 0.2;
    if (!n->closed[to] && packets_from(n, p->rank, to) == WINDOW)
        answer = 0;
    else if (n->sends++ == n->refuse_after && n->refuse_after)
        n->broken[p->rank][to] = n->broken[to][p->rank] = 1;
    if (n->broken[p->rank][to]) answer = -1;
    if (answer == 1 && !n->closed[to]) {
        packet *k = (packet *)calloc(1, sizeof *k);
        k->from = p->rank, k->to = to, k->bytes = head_bytes + body_bytes;
        k->data = (char *)malloc(k->bytes);
        memcpy(k->data, head, head_bytes);
        if (body_bytes) memcpy(k->data + head_bytes, body, body_bytes);
        while (*at) at = &(*at)->next;
        *at = k;
        n->live++;
    }
    pthread_mutex_unlock(&n->lock);
    return answer;
}

static const void *net_recv(void *user, int from, int *sender, size_t *bytes) {
    port *p = (port *)user;
    packet **at = &p->n->packets, *k;
    pthread_mutex_lock(&p->n->lock);
    packet_free(p->n, p->received);
    int is_held = p->rank == 3 && seconds() < p->n->held_until;
    while (*at && ((*at)->to != p->rank || (from != DT_ANY && (*at)->from != from) ||
                      (is_held && (*at)->from == 1)))
        at = &(*at)->next;
    p->received = k = *at;
    if (k) *at = k->next, *sender = k->from, *bytes = k->bytes;
    pthread_mutex_unlock(&p->n->lock);
    return k ? k->data : NULL;
}

/* A link is lost once its packets have been received. */
static int net_lost(void *user, int rank, char *why) {
    port *p = (port *)user;
    pthread_mutex_lock(&p->n->lock);
    int lost = (p->n->closed[rank] || p->n->broken[p->rank][rank]) && rank != p->rank &&
               !packets_from(p->n, rank, p->rank);
    pthread_mutex_unlock(&p->n->lock);
    if (lost) snprintf(why, 512, "the link to rank %d was lost", rank);
    return lost;
}

static void net_close(port *p) {
    pthread_mutex_lock(&p->n->lock);
    p->n->closed[p->rank] = 1;
    packet_free(p->n, p->received);
    p->received = NULL;
    pthread_mutex_unlock(&p->n->lock);
}

static dt_transport net_table(port *p) {
    dt_transport t;
    memset(&t, 0, sizeof t);
    t.name = "queues";
    t.user = p;
    t.send = net_send;
    t.recv = net_recv;
    t.lost = net_lost;
    return t;
}

typedef struct own {
    pthread_t thread;
    dt_team *team;
    port port;
    int size, mode, attached;
    spy *host;
    dt_status status;
    char text[512];
} own;
enum { GOOD, ONE_FAILS, REFUSED };

/* Calls every operation with integer values. */
static void call_everything(dt_ctx *ctx, dt_comm *c) {
    int n = dt_comm_size(c), me = dt_comm_rank(c), bad = 0, from = -1;
    size_t counts[] = { 1, 7, 3000 };
    for (int a = 0; a < DT_ALGORITHMS; a++) {
        dt_comm_set_algorithm(c, (dt_algorithm)a);
        for (int k = 0; k < 3; k++) {
            size_t m = counts[k], all = m * (size_t)n, out[MAX_RANKS], in[MAX_RANKS];
            int32_t *x = (int32_t *)malloc(all * 4), *y = (int32_t *)malloc(all * 4);
            for (size_t i = 0; i < all; i++) x[i] = (int32_t)(i * 3) + me;
            int sum = n * (n - 1) / 2, root = (int)(m % (size_t)n);
            dt_all_reduce(c, x, y, m, DT_I32, DT_SUM);
            for (size_t i = 0; i < m; i++) bad += y[i] != (int32_t)(i * 3) * n + sum;
            dt_reduce(c, x, y, m, DT_I32, DT_MAX, root);
            for (size_t i = 0; i < m && me == root; i++) bad += y[i] != (int32_t)(i * 3) + n - 1;
            dt_reduce_scatter(c, x, y, m, DT_I32, DT_SUM);
            for (size_t i = 0; i < m; i++)
                bad += y[i] != (int32_t)((i + (size_t)me * m) * 3) * n + sum;
            dt_all_gather(c, x, y, m, DT_I32);
            for (size_t i = 0; i < all; i++) bad += y[i] != (int32_t)(i % m * 3) + (int)(i / m);
            memset(y, 0, all * 4);
            dt_gather(c, x, y, m, DT_I32, root);
            for (size_t i = 0; i < all && me == root; i++)
                bad += y[i] != (int32_t)(i % m * 3) + (int)(i / m);
            dt_scatter(c, x, y, m, DT_I32, root);
            for (size_t i = 0; i < m; i++)
                bad += y[i] != (int32_t)((i + (size_t)me * m) * 3) + root;
            dt_work *work = dt_all_to_all_start(c, x, y, m, DT_I32);
            dt_barrier(c);
            dt_wait(ctx, work);
            for (size_t i = 0; i < all; i++)
                bad += y[i] != (int32_t)((i % m + (size_t)me * m) * 3) + (int)(i / m);
            for (int r = 0; r < n; r++) out[r] = in[r] = (size_t)((me + r) % 2) * m;
            dt_all_to_all_v(c, x, out, y, in, DT_I32);
            size_t at = 0;
            for (int r = 0; r < n; at += in[r], r++) bad += in[r] && (y[at] - r) % 3 != 0;
            if (me == root) memcpy(y, x, m * 4);
            dt_broadcast(c, y, m, DT_I32, root);
            for (size_t i = 0; i < m; i++) bad += y[i] != (int32_t)(i * 3) + root;
            work = dt_send_start(c, x, m, DT_I32, (me + 1) % n, 4);
            dt_recv_any(c, y, m, DT_I32, 4, &from);
            bad += from != (me + n - 1) % n || y[0] != from;
            dt_wait(ctx, work);
            bad += dt_mean(c, me) != (n - 1) / 2.0 ||
                   dt_agree(c, me == n - 1 ? DT_ERR_IO : DT_OK) != DT_ERR_IO;
            free(x);
            free(y);
        }
    }
    dt_comm_set_algorithm(c, DT_ALGORITHM_AUTO);
    CHECK_MSG(bad == 0 && dt_error(ctx) == DT_OK, "rank %d of %d: %d wrong: %s", me, n, bad,
        dt_error_text(ctx));
}

static void *own_thread(void *arg) {
    own *o = (own *)arg;
    dt_ctx_desc cd;
    memset(&cd, 0, sizeof cd);
    cd.rank = o->port.rank;
    cd.host = &o->host->host;
    dt_ctx *ctx = o->team ? dt_team_ctx(o->team, o->port.rank) : dt_ctx_make(cd);
    dt_transport t = net_table(&o->port);
    dt_attach_desc d;
    memset(&d, 0, sizeof d);
    d.rank = o->port.rank;
    d.team = o->team;
    if (!o->team) d.transport = &t, d.size = o->size, d.timeout_s = 30;
    if (!ctx) {
        o->status = DT_ERR_MEM;
        net_close(&o->port);
        return NULL;
    }
    dt_comm *world = dt_comm_attach(ctx, d);
    if (world && o->mode == GOOD) {
        call_everything(ctx, world);
        dt_comm *turned = dt_comm_split(world, 0, -dt_comm_rank(world), "turned");
        dt_comm *half = dt_comm_split(world, dt_comm_rank(world) % 2, 0, "half");
        CHECK(dt_comm_rank(turned) == o->size - 1 - dt_comm_rank(world));
        call_everything(ctx, turned);
        call_everything(ctx, half);
        call_everything(ctx, world);
        if (o->size == 1)
            CHECK(!dt_comm_attach(ctx, d) && strstr(dt_error_text(ctx), "attached already"));
        o->status = DT_OK;
    } else if (world) {
        float x[100] = { 0 }, y[100];
        for (int i = 0; i < 20 && !dt_error(ctx); i++) {
            dt_work *work = dt_recv_start(world, y, 100, DT_F32, (o->port.rank + 1) % o->size, 3);
            dt_work *other = dt_all_reduce_start(world, x, x, 100, DT_F32, DT_SUM);
            if (o->mode == ONE_FAILS && i == 7 && o->port.rank == 1)
                dt_fail(ctx, DT_ERR_NUMERIC, "a failure of this rank");
            dt_send(world, x, 100, DT_F32, (o->port.rank + o->size - 1) % o->size, 3);
            dt_comm *s = i % 5 == 0 ? dt_comm_split(world, 0, 0, "s") : world;
            dt_mean(s, 1);
            dt_wait(ctx, other);
            dt_wait(ctx, work);
        }
    }
    if (o->mode != GOOD) o->status = dt_error(ctx);
    snprintf(o->text, sizeof o->text, "%s", dt_error_text(ctx));
    o->attached = world != NULL;
    dt_comm_detach(ctx, dt_error(ctx));
    dt_ctx_free(ctx);
    net_close(&o->port);
    return NULL;
}

static double own_run(own *all, int n, int mode, int team, spy *host, net *q) {
    dt_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.ranks = n;
    desc.host = &host->host;
    dt_team *t = team ? dt_team_make(desc) : NULL;
    double from = seconds();
    pthread_mutex_init(&q->lock, NULL);
    memset(all, 0, (size_t)n * sizeof *all);
    for (int r = 0; r < n; r++) {
        all[r].team = t, all[r].port.n = q, all[r].port.rank = r, all[r].size = n,
        all[r].mode = mode, all[r].host = host;
        pthread_create(&all[r].thread, NULL, own_thread, &all[r]);
    }
    for (int r = 0; r < n; r++) pthread_join(all[r].thread, NULL);
    if (t) dt_team_free(t);
    while (q->packets) {
        packet *k = q->packets;
        q->packets = k->next;
        packet_free(q, k);
    }
    return seconds() - from;
}

static void test_attach(void) {
    own all[8];
    for (int team = 0; team < 2; team++) {
        for (int n = 1; n <= 5; n++) {
            spy host;
            net q;
            spy_make(&host);
            memset(&q, 0, sizeof q);
            own_run(all, n, GOOD, team, &host, &q);
            for (int r = 0; r < n; r++) CHECK(all[r].status == DT_OK && all[r].attached);
            CHECK_MSG(host.live == 0 && q.live == 0,
                "team %d: %ld blocks, %d packets were not freed", team, host.live, q.live);
        }
        for (int turn = 0; turn < 4; turn++) {
            spy host;
            net q;
            spy_make(&host);
            memset(&q, 0, sizeof q);
            q.slow_failure =
                1; /* rank 3 hears that ranks 0 and 2 end before it hears of the failure */
            double took = own_run(all, 4, ONE_FAILS, team, &host, &q);
            for (int r = 0; r < 4; r++)
                CHECK_MSG(all[r].status && strstr(all[r].text, "a failure of this rank"),
                    "team %d: %s", team, all[r].text);
            CHECK_MSG(host.live == 0 && q.live == 0 && in_time(took, 10),
                "not freed: %ld blocks, %d packets; %.1f s", host.live, q.live, took);
        }
    }
    /* allocations, and then transport calls, fail: all ranks learn of it, and everything is
       freed */
    for (long k = 1; k < 60; k++) {
        for (int what = 0; what < 2; what++) {
            spy host;
            net q;
            spy_make(&host);
            memset(&q, 0, sizeof q);
            if (what)
                q.refuse_after = (int)k;
            else
                host.refuse_at = k;
            double took = own_run(all, 3, REFUSED, 0, &host, &q);
            int failed = 0;
            for (int r = 0; r < 3; r++) failed += all[r].status != DT_OK;
            CHECK_MSG(
                host.live == 0 && q.live == 0 && in_time(took, 10) && (failed == 3 || failed == 0),
                "%d at %ld: %ld blocks, %d packets, %.1f s, %d failed: %s", what, k, host.live,
                q.live, took, failed, all[0].text);
            CHECK_MSG((failed > 0) == (host.error_lines > 0), "%d at %ld: %d error lines: %s", what,
                k, host.error_lines, all[0].text);
        }
    }
    dt_attach_desc d;
    for (int i = 0; i < 5; i++) {
        dt_ctx_desc cd;
        spy host;
        spy_make(&host);
        memset(&cd, 0, sizeof cd);
        memset(&d, 0, sizeof d);
        cd.host = &host.host;
        dt_ctx *ctx = dt_ctx_make(cd);
        dt_transport t = net_table(NULL);
        if (i > 0) d.transport = &t;
        d.size = i == 2 ? 0 : 2;
        d.rank = i == 3 ? 2 : i == 4 ? -1 : 0;
        if (i != 1) CHECK(dt_comm_attach(ctx, d) == NULL && dt_error(ctx) == DT_ERR_ARG);
        CHECK(dt_comm_attach(NULL, d) == NULL);
        dt_comm_detach(ctx, DT_OK);
        dt_ctx_free(ctx);
        CHECK(host.live == 0);
    }
    spy host;
    spy_make(&host);
    dt_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.ranks = 2;
    desc.host = &host.host;
    dt_team *team = dt_team_make(desc);
    CHECK(dt_team_ctx(team, 2) == NULL && dt_team_ctx(team, -1) == NULL &&
          dt_team_free(team) == DT_ERR_ARG && host.live == 0);
}

/* ---- 4. a hash over many rounds ---- */

typedef struct rounds {
    long n;
    uint64_t hash[8];
} rounds;
static dt_status rounds_rank(dt_ctx *ctx, void *user) {
    rounds *r = (rounds *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    static int32_t mine[4000];
    int32_t *heap = (int32_t *)dt_alloc(ctx, DT_MEM_COMM, sizeof mine, "rounds");
    uint64_t hash = 1, jitter = (uint64_t)me;
    for (long round = 0; round < r->n && !dt_error(ctx); round++) {
        size_t count = mix((uint64_t)round) % 40 ? mix((uint64_t)round) % 64
                                                 : mix((uint64_t)round) / 64 % 4000;
        int32_t *x = (round + me) % 3 ? mine : heap;
        jitter = mix(jitter + 1);
        for (volatile int spin = 0; spin < (int)(jitter % 200); spin++) {
        }
        if (jitter % 5000 == 1) dt_ctx_host(ctx)->sleep(dt_ctx_host(ctx)->user, 1e-4);
        for (size_t i = 0; i < count; i++) x[i] = (int32_t)(round + me + (long)i);
        dt_barrier(world);
        dt_all_reduce(world, x, x, count, DT_I32, DT_SUM);
        for (size_t i = 0; i < count; i++) hash = hash * 31 + (uint32_t)x[i];
    }
    r->hash[me] = hash;
    return dt_error(ctx);
}

static void test_rounds(void) {
    rounds r;
    memset(&r, 0, sizeof r);
    r.n = getenv("DT_ROUNDS") ? atol(getenv("DT_ROUNDS")) : 5000;
    uint64_t want = 1;
    for (long round = 0; round < r.n; round++) {
        size_t count = mix((uint64_t)round) % 40 ? mix((uint64_t)round) % 64
                                                 : mix((uint64_t)round) / 64 % 4000;
        for (size_t i = 0; i < count; i++) want = want * 31 + (uint32_t)(4 * (round + (long)i) + 6);
    }
    dt_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.ranks = 4;
    desc.backend = DT_BACKEND_PROCS;
    desc.user_bytes = sizeof r;
    double from = seconds();
    CHECK(dt_run(desc, rounds_rank, &r) == DT_OK);
    for (int i = 0; i < 4; i++) CHECK_MSG(r.hash[i] == want, "rank %d: wrong hash", i);
    printf("4 forks: %ld rounds of barrier and all-reduce in %.2f s\n", r.n, seconds() - from);
}

/* ---- 5. packets that no rank of dt sends ---- */

/* A transport whose rank 1 sends one packet, `bytes` bytes of a frame and its data. */
typedef struct forger {
    struct {
        dt__frame frame;
        char data[DT__PACKET_DATA];
    } packet;
    size_t bytes;
} forger;

static int forger_send(
    void *user, int to, const void *head, size_t head_bytes, const void *body, size_t body_bytes) {
    (void)user, (void)to, (void)head, (void)head_bytes, (void)body, (void)body_bytes;
    return 1;
}
static const void *forger_recv(void *user, int from, int *sender, size_t *bytes) {
    forger *f = (forger *)user;
    (void)from;
    *sender = 1;
    *bytes = f->bytes;
    f->bytes = 0;
    return *bytes ? &f->packet : NULL;
}

static dt_comm *forger_make(forger **f, const dt_host *host) {
    *f = (forger *)calloc(1, sizeof **f);
    dt_transport t = { .name = "forger", .user = *f, .send = forger_send, .recv = forger_recv };
    dt_attach_desc attach = { .transport = &t, .size = 2, .timeout_s = 2 };
    return dt_comm_attach(dt_ctx_make((dt_ctx_desc){ .host = host }), attach);
}

static void forger_free(forger *f, dt_ctx *ctx) {
    dt_comm_detach(ctx, DT_OK);
    dt_ctx_free(ctx);
    free(f);
}

/* Each row is a packet for a receive of 100 floats, and a word of the error; NULL: it is valid. A
   frame's size that is believed makes the receive read past the packet. */
static void test_forged_packets(void) {
    static const struct {
        unsigned kind;
        size_t count, says, data; /* the frame's count and bytes; the bytes that follow it */
        uint64_t credits;
        const char *word;
    } rows[] = { { DT__EAGER, 100, 400, 400, 0, NULL }, { DT__EAGER, 100, 0, 0, 0, "sends" },
        { DT__EAGER, 100, 396, 396, 0, "99" }, { DT__EAGER, 100, 400, 396, 0, "malformed" },
        { DT__EAGER, 100, 396, 400, 0, "malformed" }, { DT__EAGER, 99, 396, 396, 0, "f32 x 99" },
        { DT__EAGER, 100, 400, 400, 1, "malformed" }, { 0, 100, 400, 400, 0, "malformed" },
        { 99, 100, 400, 400, 0, "malformed" }, { DT__PULL, 100, 400, 0, 0, "malformed" },
        { DT__DONE, 100, 400, 0, 0, "malformed" }, { DT__DATA, 100, 400, 400, 0, "malformed" },
        { DT__REPORT, 100, 400, 8, 0, "malformed" }, { DT__CREDIT, 100, 0, 0, 0, "malformed" } };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        float got[100];
        forger *f;
        dt_comm *world = forger_make(&f, &quiet);
        dt_ctx *ctx = world->world->ctx;
        dt__call call = { .op = DT__SEND, .dtype = DT_F32, .count = rows[i].count };
        f->packet.frame.kind = rows[i].kind;
        f->packet.frame.channel = world ? world->group->channel : 0;
        f->packet.frame.packed_call = dt__pack_call(&call);
        f->packet.frame.count = rows[i].count;
        f->packet.frame.tag = 5;
        f->packet.frame.bytes = rows[i].says;
        f->packet.frame.id = 1;
        f->packet.frame.credits = rows[i].credits;
        f->bytes = sizeof f->packet.frame + rows[i].data;
        dt_status status = dt_recv(world, got, 100, DT_F32, 1, 5);
        CHECK_MSG(rows[i].word ? status == DT_ERR_COMM && strstr(dt_error_text(ctx), rows[i].word)
                               : status == DT_OK,
            "packet %zu: %s: %s", i, dt_status_name(status), dt_error_text(ctx));
        forger_free(f, ctx);
    }
}

/* Rank 1 has called a collective that this rank completes without it. The name of the call's file
   has no end and control bytes. */
static void test_forged_file(void) {
    forger *f;
    dt_comm *world = forger_make(&f, &quiet);
    dt_ctx *ctx = world->world->ctx;
    dt__call call = { .op = DT__BROADCAST, .dtype = DT_F32, .peer = 1, .count = 4 };
    float a[4];
    world->world->check = -1; /* no comparison before the calls */
    f->packet.frame.kind = DT__EAGER;
    f->packet.frame.packed_call = dt__pack_call(&call);
    f->packet.frame.bytes = sizeof a;
    f->packet.frame.count = 4;
    f->packet.frame.seq = f->packet.frame.id = 1;
    f->packet.frame.tag = -3;
    f->packet.frame.line = 7;
    memset(f->packet.frame.file, 'x', sizeof f->packet.frame.file);
    f->packet.frame.file[1] = '\033';
    f->bytes = sizeof f->packet.frame + sizeof a;
    dt__poll(world->world, DT_ANY);
    dt_status status = dt_broadcast(world, a, 4, DT_F32, 0);
    CHECK_MSG(status == DT_ERR_COMM &&
                  strstr(dt_error_text(ctx),
                      "at x\\x1bxxxxxxxxxxxxxxxxxxxxxxxxxxxxx:7, rank 0 calls broadcast"),
        "%s: %s", dt_status_name(status), dt_error_text(ctx));
    forger_free(f, ctx);
}

/* A rank announces messages, or sends small ones, that no rank receives. */
static void test_forged_credits(void) {
    for (int is_eager = 0; is_eager < 2; is_eager++) {
        const long most = is_eager ? DT__EAGER_LIMIT : DT__ANNOUNCE_CREDITS;
        forger *f;
        spy host;
        spy_make(&host);
        dt_comm *world = forger_make(&f, &host.host);
        dt_ctx *ctx = world->world->ctx;
        f->packet.frame.kind = is_eager ? DT__EAGER : DT__ANNOUNCE;
        f->packet.frame.bytes = is_eager ? 0 : (uint64_t)20 << 30;
        f->packet.frame.tag = 5;
        long sent = 0;
        for (; sent < most + 10 && dt_error(ctx) == DT_OK; sent++) {
            f->packet.frame.id++;
            f->bytes = sizeof f->packet.frame;
            dt__poll(world->world, DT_ANY);
        }
        CHECK_MSG(
            sent == most + 1 && dt_error(ctx) == DT_ERR_COMM &&
                strstr(dt_error_text(ctx), "rank 1 has sent more messages than it had credits"),
            "after %ld messages: %s", sent, dt_error_text(ctx));
        size_t peak = dt_memory_used(ctx).peak[DT_MEM_HOST];
        CHECK_MSG(peak < (size_t)300 * (size_t)most + (1 << 20), "%zu bytes", peak);
        forger_free(f, ctx);
        CHECK(host.live == 0);
    }
}

/* The receiver of a large message shares no memory with this rank: it cannot have read it. */
static void test_forged_answers(void) {
    static float large[5000];
    for (int is_done = 0; is_done < 2; is_done++) {
        forger *f;
        dt_comm *world = forger_make(&f, &quiet);
        dt_ctx *ctx = world->world->ctx;
        f->packet.frame.kind = is_done ? DT__DONE : DT__PULL;
        f->packet.frame.id = 1;
        f->bytes = sizeof f->packet.frame;
        dt_status status = dt_send(world, large, 5000, DT_F32, 1, 3);
        CHECK_MSG(is_done ? status == DT_ERR_COMM && strstr(dt_error_text(ctx), "malformed")
                          : status == DT_OK,
            "%d: %s: %s", is_done, dt_status_name(status), dt_error_text(ctx));
        forger_free(f, ctx);
    }
}

int main(int argc, char **argv) {
    int all = argc < 2;
    quiet = *dt_host_default();
    quiet.log = quiet_log;
#define PART(name) (all || strcmp(argv[1], name) == 0)
    if (PART("endings")) test_endings();
    if (PART("processes")) test_processes();
    if (PART("heaps")) test_heaps();
    if (PART("attach")) test_attach();
    if (PART("rounds")) test_rounds();
    if (PART("forged")) test_forged_packets();
    if (PART("forged")) test_forged_file();
    if (PART("forged")) test_forged_credits();
    if (PART("forged")) test_forged_answers();
    return check_done("test_comm_procs");
}
