/* 16_own_transport.c - a transport of your own: training over UDP that loses datagrams

   What you learn: what dt needs from a network. A transport sends and receives packets; everything
       else is written once, in dt. Packets must arrive once, whole and in order. UDP promises none
       of this, and this program also drops 10 % of its datagrams. Go-back-N repairs it: packets to
       a peer are numbered. The sender keeps a packet in a window until the peer acknowledges it.
       The receiver takes only the number that it expects, and always answers with the number that
       it expects next (a cumulative acknowledgement). After 2 ms without progress the sender sends
       its whole window again. TCP adds congestion control and keeps packets that come early.

           rank 0: window 5 6 7     5 ------------> taken       rank 1 expects 6
                                    6 -----x lost
                   window 6 7       <------- ack 6
                                    7 ------------> dropped     rank 1 expects 6
                   2 ms later       6, 7 ---------> taken       rank 1 expects 8
                   window empty     <------- ack 8
   Run: cc -O3 examples/16_own_transport.c -o 16_own_transport -lm -lpthread
       && ./16_own_transport
   What you see: dp 2 x tp 2 over this network has the losses of one rank. Then rank 3 falls silent
       in the middle of a run. After the timeout the run ends, and the error says who was missing.
   Think about: why must a rank that has ended still answer for a while (udp_close)? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <arpa/inet.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 4, WINDOW = 16 }; /* WINDOW: a power of 2, because the numbers wrap around */

/* ---- the transport ---- */

typedef struct datagram {            /* without a packet it is only an acknowledgement */
    uint32_t job, from, number, ack; /* ack: the number that the sender expects next */
    uint64_t packet[DT_PACKET_BYTES / 8];
} datagram;
enum { HEADER = offsetof(datagram, packet), JOB = 16 }; /* JOB: marks the datagrams of this job */
typedef struct peer {
    datagram window[WINDOW]; /* packet `number` is window[number % WINDOW] */
    size_t bytes[WINDOW];
    uint32_t acked, next; /* packets [acked, next) to this peer are not acknowledged */
    uint32_t expected;    /* number of the next packet from this peer */
    double progress_at;   /* when the window last moved or was last sent again */
} peer;
typedef struct udp { /* one rank's end, used by one thread */
    int fd, rank, loss_percent;
    uint32_t random;
    struct sockaddr_in address[RANKS];
    peer peers[RANKS];
    datagram in, answer;
    long sent, lost, again;
} udp;

static double seconds(void) { return dt_host_default()->now(NULL); }

/* Sends a datagram once, or loses it. A datagram that the kernel refuses is lost too. */
static void transmit(udp *u, int to, datagram *d, size_t bytes) {
    d->job = JOB, d->from = (uint32_t)u->rank, d->ack = u->peers[to].expected;
    u->random = u->random * 1664525u + 1013904223u;
    int lost = (int)((u->random >> 16) % 100) < u->loss_percent;
    u->sent++, u->lost += lost;
    const struct sockaddr *address = (const struct sockaddr *)&u->address[to];
    if (!lost) sendto(u->fd, d, HEADER + bytes, MSG_DONTWAIT, address, sizeof u->address[to]);
}

static int udp_send(
    void *user, int to, const void *head, size_t head_bytes, const void *body, size_t body_bytes) {
    udp *u = (udp *)user;
    peer *p = &u->peers[to];
    datagram *d = &p->window[p->next % WINDOW];
    if (p->next - p->acked == WINDOW) return 0; /* the window is full: dt tries again later */
    if (p->next == p->acked) p->progress_at = seconds();
    memcpy(d->packet, head, head_bytes);
    if (body_bytes) memcpy((char *)d->packet + head_bytes, body, body_bytes);
    p->bytes[p->next % WINDOW] = head_bytes + body_bytes;
    d->number = p->next++;
    transmit(u, to, d, head_bytes + body_bytes);
    return 1;
}

/* Sends each window again that has made no progress for 2 ms. */
static void send_again(udp *u) {
    double now = seconds();
    for (int to = 0; to < RANKS; to++) {
        peer *p = &u->peers[to];
        if (p->acked == p->next || now < p->progress_at + 0.002) continue;
        p->progress_at = now;
        for (uint32_t n = p->acked; n != p->next; n++, u->again++)
            transmit(u, to, &p->window[n % WINDOW], p->bytes[n % WINDOW]);
    }
}

/* One socket receives the packets of all ranks, so this function ignores `from`. */
static const void *udp_recv(void *user, int from, int *sender, size_t *bytes) {
    udp *u = (udp *)user;
    datagram *d = &u->in;
    (void)from;
    for (ssize_t got; (got = recv(u->fd, d, sizeof *d, MSG_DONTWAIT)) >= 0;) {
        if (got < HEADER || d->job != JOB || d->from >= RANKS) continue; /* a stranger's */
        peer *p = &u->peers[d->from];
        /* datagrams may overtake each other, so an old acknowledgement may come late */
        if (d->ack != p->acked && d->ack - p->acked <= p->next - p->acked)
            p->acked = d->ack, p->progress_at = seconds();
        if (got == HEADER) continue;
        int taken = d->number == p->expected;
        p->expected += (uint32_t)taken;
        /* also answers a repeated packet, because the first answer may be lost */
        transmit(u, (int)d->from, &u->answer, 0);
        *sender = (int)d->from, *bytes = (size_t)got - HEADER;
        if (taken) return d->packet;
    }
    send_again(u);
    return NULL;
}

/* Makes the ends of all ranks. Ranks in several processes would exchange their addresses. */
static int udp_open(udp *all) {
    struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
    socklen_t size = sizeof any;
    memset(all, 0, RANKS * sizeof *all);
    for (int i = 0; i < RANKS; i++) {
        struct sockaddr *address = (struct sockaddr *)&all[0].address[i];
        int fd = all[i].fd = socket(AF_INET, SOCK_DGRAM, 0);
        all[i].rank = i, all[i].random = (uint32_t)i, all[i].loss_percent = 10;
        if (bind(fd, (struct sockaddr *)&any, size) || getsockname(fd, address, &size)) return 0;
    }
    for (int i = 1; i < RANKS; i++) memcpy(all[i].address, all[0].address, sizeof all[0].address);
    return 1;
}

/* Sends until the last packets are acknowledged, for at most 0.5 s, and then answers for 50 ms. */
static void udp_close(udp *u) {
    double now = seconds(), limit = now + 0.5, end = now;
    for (int sender; now < end + 0.05; now = seconds()) {
        struct pollfd readable = { u->fd, POLLIN, 0 };
        size_t bytes;
        poll(&readable, 1, 1);
        udp_recv(u, DT_ANY, &sender, &bytes);
        for (int i = 0; i < RANKS; i++)
            if (now < limit && u->peers[i].acked != u->peers[i].next) end = now;
    }
    close(u->fd);
}

/* ---- training over it ---- */

enum { STEPS = 61, SILENT_AT = 30, B = 64, C = 32, F = 256 }; /* B samples a step; widths C, F */

typedef struct rank {
    udp *u; /* NULL: the run of one rank */
    int silent;
    double timeout_s, loss[STEPS];
    char error[1024];
} rank;

static dt_status train(dt_ctx *ctx, void *user) {
    rank *r = (rank *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = r->u ? 2 : 1 }); /* dp is ranks/tp */
    dt_param_desc rows = { .shards = { { mesh.tp, 0 } } }, cols = { .shards = { { mesh.tp, 1 } } };
    dt_tensor *up = dt_param_at(ctx, "up", DT_SHAPE(F, C), DT_NORMAL(0.2), rows),
              *down = dt_param_at(ctx, "down", DT_SHAPE(C, F), DT_NORMAL(0.05), cols);
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh, .stage = 1 });
    int n = B / mesh.replicas * C, first = mesh.replica * n;
    for (int step = 0; step < STEPS && dt_error(ctx) == DT_OK; step++) {
        float x[B * C], y[B * C];
        for (int i = 0; i < n; i++) x[i] = sinf(0.7f * (float)((step * B * C + first + i) % 997));
        for (int i = 0; i < n; i++) y[i] = x[i] * x[i ^ 1];
        if (r->silent && step == SILENT_AT) r->u->loss_percent = 100;
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(n / C, C), x),
                  *want = dt_input(ctx, DT_F32, DT_SHAPE(n / C, C), y);
        dt_linear_desc gelu = { .activation = DT_ACT_GELU };
        dt_tensor *h = dt_column_linear(in, up, NULL, gelu, mesh.tp, DT_REPLICATE);
        h = dt_row_linear(h, down, NULL, NULL, mesh.tp, DT_REPLICATE);
        dt_tensor *loss = dt_mse(h, want, B * C);
        dt_backward(loss);
        r->loss[step] = dt_item(loss);
        dt_sum_doubles(mesh.data, &r->loss[step], 1);
        dt_zero_step(opt, 0.003);
        dt_reset(ctx);
    }
    snprintf(r->error, sizeof r->error, "%s", dt_error_text(ctx));
    return dt_error(ctx);
}

/* `lost` stays NULL: a silent peer may be computing, so dt decides after timeout_s. */
static void *rank_thread(void *user) {
    rank *r = (rank *)user;
    dt_transport udp_table = { .name = "udp", .user = r->u, .send = udp_send, .recv = udp_recv };
    dt_attach_desc desc = { .rank = r->u->rank, .size = RANKS, .timeout_s = r->timeout_s };
    desc.transport = &udp_table;
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .rank = desc.rank });
    dt_comm_attach(ctx, desc);
    dt_comm_detach(ctx, train(ctx, r));
    dt_ctx_free(ctx);
    udp_close(r->u);
    return NULL;
}

/* Runs the ranks over UDP. Rank `silent` (-1: none) sends nothing from step SILENT_AT on. */
static int run(rank *ranks, udp *all, int silent, double timeout_s) {
    pthread_t threads[RANKS];
    if (!udp_open(all)) return 0;
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (rank){ .u = &all[i], .silent = i == silent, .timeout_s = timeout_s };
        pthread_create(&threads[i], NULL, rank_thread, &ranks[i]);
    }
    for (int i = 0; i < RANKS; i++) pthread_join(threads[i], NULL);
    return 1;
}

int main(void) {
    static rank one, ranks[RANKS];
    static udp all[RANKS];
    double worst = 0;
    int ok = dt_run((dt_run_desc){ .ranks = 1 }, train, &one) == DT_OK && run(ranks, all, -1, 20);
    printf(" step        1 rank   dp 2 x tp 2 over UDP\n");
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < RANKS; i++)
            worst = fmax(worst, fabs(ranks[i].loss[step] - one.loss[step]));
        if (step % 20 == 0)
            printf("%5d  %12.8f  %12.8f\n", step, one.loss[step], ranks[0].loss[step]);
    }
    ok &= worst < 1e-5 && one.loss[STEPS - 1] < one.loss[0] / 4;
    printf("rank 0 sent %ld datagrams: %ld were lost, %ld repeat a packet\n\n", all[0].sent,
        all[0].lost, all[0].again);
    ok &= run(ranks, all, 3, 2);
    printf("rank 3 sends nothing from step %d on; the timeout is 2 s:\n", SILENT_AT);
    int named = 0; /* another rank's error may name a rank that itself waits for rank 3 */
    for (int i = 0; i < RANKS; i++) {
        printf("    %s\n", ranks[i].error);
        named +=
            i != 3 && (strstr(ranks[i].error, "rank 3") || strstr(ranks[i].error, "3 did not"));
        ok &= ranks[i].error[0] != 0;
    }
    ok &= named > 0;
    printf("%s: the losses differ by at most %.1e\n", ok ? "ok" : "WRONG", worst);
    return ok ? 0 : 1;
}
