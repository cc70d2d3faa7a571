/* wire.h - two hosts and the network between them: loss, delay, reordering, duplication,
   corruption, partitions

   A host is a network namespace with one tun device. The process that holds both devices is the
   network: it reads a host's packets from its device, delays them as the conditions say, and writes
   them to the other host's device. Without offload flags a tun device delivers complete IP packets
   with checksums, so the receiving host drops a packet with a flipped bit, as on a real network.
   The system outside is not touched, and nothing remains when the process ends.

   All random choices follow from the seed. A flow (a pair of ports, in one direction) loses at most
   `most` packets in a row, so the time that TCP needs is bounded, not only likely to be short.
   Include it after dt_comm.h. */
#ifndef WIRE_H
#define WIRE_H

#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/ioctl.h>

enum { WIRE_MTU = 1500, WIRE_QUEUE = 4096, WIRE_FLOWS = 1024 };

typedef struct conditions {    /* of one direction */
    double loss, twice, spoil; /* fractions of packets that are lost, duplicated, corrupted */
    /* the most packets lost or corrupted in a row in one flow; 0: no limit */
    int most;
    /* jitter: upper bound of a random extra delay per packet, which reorders packets */
    double delay_s, jitter_s;
    double bytes_per_s; /* 0: unlimited */
    size_t queue_bytes; /* of a slow link; packets beyond it are dropped */
    int cut;
} conditions;

typedef struct packet {
    double due;
    uint64_t order;
    int to, bytes;
    uint8_t data[WIRE_MTU];
} packet;

typedef struct wire {
    /* descriptors of each host's tun device and network namespace */
    int device[2], host[2];
    conditions now[2]; /* for packets from host 0 and from host 1 */
    uint64_t chance, order;
    packet *heap[WIRE_QUEUE]; /* the packet that is due first is at the top */
    int n;
    double free_at[2];           /* time at which a slow link's queue is empty */
    uint8_t lost[2][WIRE_FLOWS]; /* packets lost in a row, per flow */
    long passed, dropped, repeated, spoiled, cut;
    double late; /* the longest delay with which this process woke up */
} wire;

static double wire_now(void) { return dt_host_default()->now(NULL); }

/* splitmix64 (S. Vigna): 64 random bits, from the state alone. */
static uint64_t next_bits(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static double next_share(uint64_t *state) {
    return (double)(next_bits(state) >> 11) / 9007199254740992.0;
}
static double next_between(uint64_t *state, double low, double high) {
    return low + (high - low) * next_share(state);
}
static int next_below(uint64_t *state, int n) { return (int)(next_bits(state) % (uint64_t)n); }

/* 10.77.4.1, 10.77.4.2 */
static uint32_t wire_address(int host) { return htonl(0x0a4d0401u + (uint32_t)host); }

/* ---- the hosts ---- */

static int host_ioctl(int fd, unsigned long what, struct ifreq *ask, const char *name) {
    snprintf(ask->ifr_name, sizeof ask->ifr_name, "%s", name);
    return ioctl(fd, what, ask) == 0;
}

static int host_address(int fd, unsigned long what, struct ifreq *ask, uint32_t address) {
    struct sockaddr_in at;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = address;
    memcpy(&ask->ifr_addr, &at, sizeof at);
    return host_ioctl(fd, what, ask, "tun0");
}

static int host_up(int fd, const char *name) {
    struct ifreq ask;
    memset(&ask, 0, sizeof ask);
    if (!host_ioctl(fd, SIOCGIFFLAGS, &ask, name)) return 0;
    ask.ifr_flags = (short)(ask.ifr_flags | IFF_UP);
    return host_ioctl(fd, SIOCSIFFLAGS, &ask, name);
}

/* Moves this process into a new namespace, which becomes host `i`. Returns NULL, or what this
   system lacks. */
static const char *host_make(wire *w, int i) {
    struct ifreq ask;
    memset(&ask, 0, sizeof ask);
    if (unshare(CLONE_NEWNET) != 0) return "no network namespaces for this user";
    w->host[i] = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    w->device[i] = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (w->device[i] < 0) return "no /dev/net/tun";
    ask.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (!host_ioctl(w->device[i], TUNSETIFF, &ask, "tun0")) return "no tun devices";
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    memset(&ask, 0, sizeof ask);
    int well = w->host[i] >= 0 && fd >= 0 && host_up(fd, "lo") &&
               host_address(fd, SIOCSIFADDR, &ask, wire_address(i)) &&
               host_address(fd, SIOCSIFNETMASK, &ask, htonl(0xffffff00u)) && host_up(fd, "tun0");
    if (fd >= 0) close(fd);
    return well ? NULL : "a tun device cannot be set up";
}

static const char *wire_make(wire *w) {
    memset(w, 0, sizeof *w);
    const char *why = host_make(w, 0);
    return why ? why : host_make(w, 1);
}

/* ---- the network ---- */

static int wire_before(const packet *a, const packet *b) {
    return a->due < b->due || (a->due == b->due && a->order < b->order);
}

static void wire_push(wire *w, packet *p) {
    int i = w->n++;
    for (; i > 0 && wire_before(p, w->heap[(i - 1) / 2]); i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = p;
}

static packet *wire_pop(wire *w) {
    packet *top = w->heap[0], *last = w->heap[--w->n];
    int i = 0;
    for (int child = 1; child < w->n; child = 2 * i + 1) {
        if (child + 1 < w->n && wire_before(w->heap[child + 1], w->heap[child])) child++;
        if (!wire_before(w->heap[child], last)) break;
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = last;
    return top;
}

/* The loss counter of a packet's flow, found by its ports or its protocol. */
static uint8_t *wire_flow(wire *w, int from, const packet *p) {
    size_t header = (size_t)(p->data[0] & 15) * 4;
    uint32_t ports = p->data[9];
    if (p->data[9] == 6 && p->bytes >= (int)header + 4)
        memcpy(&ports, p->data + header, sizeof ports);
    return &w->lost[from][(ports * 2654435761u) >> 22];
}

/* The arrival time of a packet sent now; below 0 if it is lost. */
static double wire_due(wire *w, int from, packet *p, double now) {
    const conditions *c = &w->now[from];
    uint8_t *in_a_row = wire_flow(w, from, p);
    int may = !c->most || *in_a_row < c->most;
    int lost = next_share(&w->chance) < c->loss && may,
        spoilt = next_share(&w->chance) < c->spoil && may;
    *in_a_row = (uint8_t)(!lost && !spoilt ? 0 : *in_a_row < 255 ? *in_a_row + 1 : 255);
    if (c->cut) return w->cut++, -1;
    if (lost) return w->dropped++, -1;
    if (spoilt) {
        int bit = next_below(&w->chance, 8 * p->bytes);
        p->data[bit / 8] = (uint8_t)(p->data[bit / 8] ^ 1 << bit % 8);
        w->spoiled++;
    }
    double due = now + c->delay_s + c->jitter_s * next_share(&w->chance);
    if (c->bytes_per_s <= 0) return due;
    if (w->free_at[from] < now) w->free_at[from] = now;
    if ((w->free_at[from] - now) * c->bytes_per_s > (double)c->queue_bytes) return w->dropped++, -1;
    w->free_at[from] += p->bytes / c->bytes_per_s;
    return due + w->free_at[from] - now;
}

static void wire_take(wire *w, int from) {
    for (int turn = 0; turn < 64; turn++) {
        static packet p;
        ssize_t n = read(w->device[from], p.data, sizeof p.data);
        if (n <= 0) return;
        p.bytes = (int)n;
        p.to = 1 - from;
        double now = wire_now();
        int copies = 1 + (next_share(&w->chance) < w->now[from].twice);
        w->repeated += copies - 1;
        for (int i = 0; i < copies; i++) {
            packet *kept = w->n < WIRE_QUEUE ? (packet *)malloc(sizeof *kept) : NULL;
            if (!kept) continue;
            memcpy(kept, &p, offsetof(packet, data) + (size_t)n);
            kept->due = wire_due(w, from, kept, now);
            kept->order = w->order++;
            if (kept->due < 0)
                free(kept);
            else
                wire_push(w, kept);
        }
    }
}

/* Transfers packets for this time. */
static void wire_carry(wire *w, double seconds) {
    double now = wire_now(), until = now + seconds;
    if (w->n && w->heap[0]->due < until) until = w->heap[0]->due;
    struct pollfd look[2] = { { w->device[0], POLLIN, 0 }, { w->device[1], POLLIN, 0 } };
    struct timespec wait = { 0, until > now ? (long)((until - now) * 1e9) : 0 };
    int ready = ppoll(look, 2, &wait, NULL);
    now = wire_now();
    if (ready == 0 && now - until > w->late) w->late = now - until;
    for (int from = 0; from < 2; from++)
        if (look[from].revents) wire_take(w, from);
    while (w->n && w->heap[0]->due <= now) {
        packet *p = wire_pop(w);
        /* the device may refuse corrupted packets */
        if (write(w->device[p->to], p->data, (size_t)p->bytes) > 0) w->passed++;
        free(p);
    }
}

/* Prepares the network for the next job: no pending packets, a new seed. */
static void wire_reset(wire *w, uint64_t seed) {
    static uint8_t waste[WIRE_MTU];
    while (w->n) free(wire_pop(w));
    for (int i = 0; i < 2; i++)
        while (read(w->device[i], waste, sizeof waste) > 0) {
        }
    memset(w->now, 0, sizeof w->now);
    memset(w->lost, 0, sizeof w->lost);
    w->free_at[0] = w->free_at[1] = w->late = 0;
    w->passed = w->dropped = w->repeated = w->spoiled = w->cut = 0;
    w->chance = seed;
}

#endif
