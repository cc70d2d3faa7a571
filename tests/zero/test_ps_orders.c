/* test_ps_orders.c - a parameter server under every order in which its requests can arrive

   Two workers of three steps and one server run over a scripted transport, as coroutines of one
   thread. A worker's packets to the server wait in a queue until no rank can go on; then the script
   chooses the worker whose next request arrives. A depth-first search over these choices runs every
   order once:

       worker 0   pull step pull step pull step pull end          0 0 1 0 1 1 ...   a script
       worker 1   pull step pull step pull step pull end

   Answers are delivered at once: a late answer is the same to the server as a late next request. A
   second search, of one step, chooses each packet, so that the other worker's packets come between
   the header and the payload of a request. In each run: no pull is staler than the bound, own steps
   are always included, nobody waits for ever, and bound 0 has the bits of synchronous training.
   Over all runs the workers run ahead as far as the bound. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include <malloc.h>
#include <ucontext.h>

enum { RANKS = 3, SERVER = 2, STACK = 512 << 10, MOST_CHOICES = 256, ROUNDS = 3 };

typedef struct packet {
    struct packet *next;
    int held; /* 1: the script delivers it */
    size_t bytes;
    uint64_t data[];
} packet;

typedef struct rank {
    ucontext_t context;
    char *stack;
    int ended, scripted, number, delivered;
    packet *queue[RANKS], **last[RANKS]; /* packets from each rank */
    packet *taken;                       /* the one that `recv` returned last */
} rank;

typedef struct script {
    int choice[MOST_CHOICES], n, at; /* 1: worker 1 */
    int is_open[MOST_CHOICES];       /* 1: the other worker can be chosen too, later */
} script;

static struct world {
    rank ranks[RANKS];
    ucontext_t scheduler;
    int current, moved; /* moved: a packet was sent or taken */
    int steps, mode, staleness, by_packets;
    int too_old, own, farthest, deadlock;
    dt_status status[RANKS];
    char text[RANKS][300];
    float final[4]; /* bits of the table of sums */
} w;

static void yield(void) {
    rank *r = &w.ranks[w.current];
    swapcontext(&r->context, &w.scheduler);
}

static double frozen(void *user) { return (void)user, 1; }
static void no_sleep(void *user, double seconds) {
    (void)user, (void)seconds;
    yield();
}
static void no_log(void *user, int level, int number, const char *text) {
    (void)user, (void)level, (void)number, (void)text;
}

static int put(
    void *user, int to, const void *head, size_t head_bytes, const void *body, size_t body_bytes) {
    rank *r = (rank *)user, *peer = &w.ranks[to];
    packet *p = (packet *)malloc(sizeof *p + head_bytes + body_bytes);
    if (!p) abort();
    p->next = NULL;
    p->held = r->scripted && to == SERVER;
    p->bytes = head_bytes + body_bytes;
    memcpy(p->data, head, head_bytes);
    if (body_bytes) memcpy((char *)p->data + head_bytes, body, body_bytes);
    *peer->last[r->number] = p;
    peer->last[r->number] = &p->next;
    w.moved = 1;
    return 1;
}

static const void *take(void *user, int from, int *sender, size_t *bytes) {
    rank *r = (rank *)user;
    for (int i = 0; i < RANKS; i++) {
        packet *p = r->queue[i];
        if ((from != DT_ANY && from != i) || !p || p->held) continue;
        r->queue[i] = p->next;
        if (!p->next) r->last[i] = &r->queue[i];
        free(r->taken);
        r->taken = p;
        *sender = i;
        *bytes = p->bytes;
        w.moved = 1;
        return p->data;
    }
    return NULL;
}

/* A row of the first table counts the steps of a worker; the second one adds up both workers'
   gradients, whose rounding depends on the order. */
static dt_status work(dt_ctx *ctx, int number) {
    uint64_t keys[2] = { 0, UINT64_MAX }, shared = 5;
    float rows[2], one = -1, g[2];
    dt_ps *ps =
        dt_ps_make(ctx, (dt_ps_desc){ .servers = 1, .mode = w.mode, .staleness = w.staleness });
    int counts = dt_ps_table(ps, (dt_table_desc){ .name = "counts", .width = 1 });
    int sums = dt_ps_table(
        ps, (dt_table_desc){
                .name = "sums", .width = 2, .init = DT_NORMAL(1), .optimizer = DT_TABLE_ADAGRAD });
    w.ranks[number].scripted = 1;
    if (number == SERVER) {
        dt_ps_serve(ps);
        if (dt_error(ctx) == DT_OK) dt_table_pull(dt_ps_owned(ps, sums), &shared, 1, w.final);
        if (dt_error(ctx) == DT_OK) dt_table_pull(dt_ps_owned(ps, counts), keys, 2, w.final + 2);
        return dt_error(ctx);
    }
    for (int step = 0; step <= w.steps && dt_error(ctx) == DT_OK; step++) {
        if (dt_ps_wait(ps, dt_ps_pull_start(ps, counts, keys, 2, rows)) != DT_OK) break;
        for (int i = 0; i < 2; i++) {
            int late = step - (int)rows[i];
            w.own += i == number && late != 0;
            w.too_old += late > w.staleness;
            if (late > w.farthest) w.farthest = late;
        }
        if (step == w.steps) break;
        for (int c = 0; c < 2; c++)
            g[c] = 0.1f + 0.7f * (float)number + 0.3f * (float)(step * (c + 1));
        dt_ps_add(ps, counts, &keys[number], 1, &one);
        dt_ps_add(ps, sums, &shared, 1, g);
        dt_ps_step(ps, 1);
    }
    dt_ps_end(ps);
    return dt_error(ctx);
}

static void rank_main(int number) {
    static dt_host host;
    static int ready;
    rank *r = &w.ranks[number];
    if (!ready) {
        host = *dt_host_default();
        host.now = frozen;
        host.sleep = no_sleep;
        host.log = no_log;
        ready = 1;
    }
    dt_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank = number;
    desc.host = &host;
    dt_ctx *ctx = dt_ctx_make(desc);
    dt_transport transport;
    memset(&transport, 0, sizeof transport);
    transport.name = "script";
    transport.user = r;
    transport.send = put;
    transport.recv = take;
    dt_attach_desc attach;
    memset(&attach, 0, sizeof attach);
    attach.rank = number;
    attach.size = RANKS;
    attach.transport = &transport;
    dt_comm_attach(ctx, attach);
    dt_status status = work(ctx, number);
    r->scripted = 0;
    dt_comm_detach(ctx, status);
    w.status[number] = dt_error(ctx);
    snprintf(w.text[number], sizeof w.text[number], "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    r->ended = 1;
    yield();
}

/* A worker's next packet for the server, if the script must deliver it; else NULL. */
static packet *held(int worker) {
    packet *p = w.ranks[SERVER].queue[worker];
    return p && p->held ? p : NULL;
}

/* Delivers a worker's next packet. A header and its payload are the packets 2 i and 2 i + 1. */
static void deliver(int worker) {
    held(worker)->held = 0;
    w.ranks[worker].delivered++;
}

/* Runs the ranks in turn until none can go on. */
static void run_ranks(void) {
    for (int idle = 0; idle < ROUNDS; idle++) {
        w.moved = 0;
        for (w.current = 0; w.current < RANKS; w.current++)
            if (!w.ranks[w.current].ended) swapcontext(&w.scheduler, &w.ranks[w.current].context);
        if (w.moved) idle = -1;
    }
}

static void start_rank(int number) {
    rank *r = &w.ranks[number];
    char *stack = r->stack;
    memset(r, 0, sizeof *r);
    r->stack = stack;
    r->number = number;
    for (int k = 0; k < RANKS; k++) r->last[k] = &r->queue[k];
    getcontext(&r->context);
    r->context.uc_stack.ss_sp = stack;
    r->context.uc_stack.ss_size = STACK;
    makecontext(&r->context, (void (*)(void))rank_main, 1, number);
}

/* Runs one order: follows the script, and beyond its end chooses worker 0 while it can. */
static void run_order(script *s) {
    w.too_old = w.own = w.deadlock = 0;
    s->at = 0;
    for (int i = 0; i < RANKS; i++) start_rank(i);
    for (;;) {
        run_ranks();
        if (w.ranks[0].ended && w.ranks[1].ended && w.ranks[SERVER].ended) break;
        int can[2] = { held(0) != NULL, held(1) != NULL };
        for (int i = 0; i < 2 && !w.by_packets; i++)
            if (can[i] && w.ranks[i].delivered % 2) can[1 - i] = 0; /* first the payload */
        if ((!can[0] && !can[1]) || s->at == MOST_CHOICES) {
            w.deadlock = 1;
            break;
        }
        if (s->at == s->n) {
            s->choice[s->n] = !can[0];
            s->is_open[s->n++] = can[0] && can[1];
        }
        deliver(s->choice[s->at++]);
    }
    for (int i = 0; i < RANKS; i++) {
        for (int k = 0; k < RANKS; k++)
            for (packet *p = w.ranks[i].queue[k], *next; p; p = next) {
                next = p->next;
                free(p);
            }
        free(w.ranks[i].taken);
    }
}

/* Goes on to the next order. Returns 0 after the last one. */
static int next_order(script *s) {
    while (s->n > 0 && !s->is_open[s->n - 1]) s->n--;
    if (s->n == 0) return 0;
    s->choice[s->n - 1] = 1;
    s->is_open[s->n - 1] = 0;
    return 1;
}

static void search(int staleness, int steps, int by_packets) {
    script s;
    float want[4];
    long runs = 0;
    memset(&s, 0, sizeof s);
    w.steps = steps;
    w.by_packets = by_packets;
    w.mode = DT_PS_SYNC;
    w.staleness = 0;
    run_order(&s);
    memcpy(want, w.final, sizeof want);
    memset(&s, 0, sizeof s);
    w.mode = DT_PS_SSP;
    w.staleness = staleness;
    w.farthest = 0;
    do {
        run_order(&s);
        runs++;
        int ok = !w.deadlock && !w.too_old && !w.own;
        for (int i = 0; i < RANKS; i++) ok &= w.status[i] == DT_OK;
        ok &= w.final[2] == (float)steps && w.final[3] == (float)steps;
        if (staleness == 0) ok &= memcmp(want, w.final, sizeof w.final) == 0;
        if (!CHECK_MSG(ok,
                "bound %d, order %ld: deadlock %d, %d numbers too old, %d own steps missing, "
                "totals %g %g; %s%s%s",
                staleness, runs, w.deadlock, w.too_old, w.own, (double)w.final[2],
                (double)w.final[3], w.text[0], w.text[1], w.text[2]))
            return;
    } while (next_order(&s) && runs < 200000);
    printf("bound %d, %d steps, by %s: %ld orders, staleness up to %d\n", staleness, steps,
        by_packets ? "packets" : "requests", runs, w.farthest);
    CHECK_MSG(w.farthest == (staleness < steps ? staleness : steps),
        "bound %d: workers run ahead only %d steps", staleness, w.farthest);
    CHECK_MSG(runs > 300 && runs < 200000, "%ld orders", runs);
}

int main(void) {
#if defined(__SANITIZE_THREAD__)
    check_skip("test_ps_orders: the race detector cannot follow coroutines");
    return check_done("test_ps_orders");
#endif
    mallopt(M_MMAP_THRESHOLD, 1 << 30); /* keep the memory of the contexts from run to run */
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    for (int i = 0; i < RANKS; i++)
        if (!(w.ranks[i].stack = (char *)malloc(STACK))) abort();
    for (int staleness = 0; staleness <= 2; staleness++) search(staleness, 3, 0);
    for (int staleness = 0; staleness <= 1; staleness++) search(staleness, 1, 1);
    for (int i = 0; i < RANKS; i++) free(w.ranks[i].stack);
    return check_done("test_ps_orders");
}
