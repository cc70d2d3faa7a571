/* tcp_visitor.h - a client that is not a rank and connects to a job: it speaks the handshake
   message by message, so it can send what no rank would send; or it is one of many attackers.
   Include it after dt_comm.h. */
#ifndef TCP_VISITOR_H
#define TCP_VISITOR_H

#include <sys/resource.h>

static inline dt__tcp_address loopback(int port) {
    dt__tcp_address place = { 0, 0 };
    place.ip = htonl(INADDR_LOOPBACK);
    place.port = (uint32_t)port;
    return place;
}

/* Opens a TCP connection, retrying for two seconds. Returns -1 on failure. */
static inline int connect_to(dt__tcp_address place) {
    struct sockaddr_in at = dt__tcp_sockaddr(place);
    const dt_host *host = dt_host_default();
    for (double until = host->now(NULL) + 2; host->now(NULL) < until; host->sleep(NULL, 1e-3)) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&at, sizeof at) == 0) return fd;
        close(fd);
    }
    return -1;
}

/* A visitor's state: the messages that it sends and receives. */
typedef struct visit {
    dt__tcp_address place; /* the address to connect to */
    int fd;
    uint8_t key[32];
    dt__tcp_handshake ours, theirs, proof, answer;
} visit;

static inline visit visit_make(dt__tcp_address place, int rank, int size, const char *secret) {
    visit v;
    memset(&v, 0, sizeof v);
    v.place = place;
    v.fd = -1;
    dt__sha256_of(secret, strlen(secret), v.key);
    memcpy(v.ours.magic, dt__tcp_magic, sizeof v.ours.magic);
    v.ours.version = DT__TCP_VERSION;
    v.ours.kind = DT__TCP_HELLO;
    v.ours.rank = rank;
    v.ours.size = size;
    v.ours.pid = 4711;
    v.ours.address = place;
    snprintf(v.ours.host, sizeof v.ours.host, "visitor");
    memset(v.ours.nonce, 7, sizeof v.ours.nonce);
    v.proof = v.ours;
    v.proof.kind = DT__TCP_PROOF;
    return v;
}

static inline int receive_message(int fd, dt__tcp_handshake *card) {
    memset(card, 0, sizeof *card);
    return recv(fd, card, sizeof *card, MSG_WAITALL) == (ssize_t)sizeof *card;
}

/* Exchanges hellos and sends the proof, unchanged if `as_is`. Returns 1 if there is an answer. */
static inline int shake_hands(visit *v, int as_is) {
    v->fd = connect_to(v->place);
    if (v->fd < 0) return 0;
    send(v->fd, &v->ours, sizeof v->ours, MSG_NOSIGNAL);
    if (!receive_message(v->fd, &v->theirs)) return 0;
    if (!as_is) dt__tcp_prove(v->key, "caller", &v->ours, &v->theirs, v->proof.proof);
    send(v->fd, &v->proof, sizeof v->proof, MSG_NOSIGNAL);
    return receive_message(v->fd, &v->answer);
}

static inline int is_accepted(const visit *v) {
    return v->answer.kind == DT__TCP_WELCOME &&
           dt__tcp_is_proof(v->key, "host", &v->ours, &v->theirs, v->answer.proof);
}

/* Keeps `n` connections open until it is killed, each behaving as `what` says. A connection that
   the job closes is opened again a little later. `from`: the source address, different from the
   ranks', because the attack would use up the ranks' ports. */
enum { SILENT = 0, SLOW, HALF, SCANNER, FLOOD, N_ATTACKS };
static const char *const attack_names[] = { "1,000 silent connections", "1,000 slow connections",
    "1,000 partial and complete hellos", "a scanner", "repeated 1 MB of garbage" };

static inline void attack(dt__tcp_address place, int what, dt__tcp_address from) {
    static int fds[1000], at[1000];
    static double next[1000];
    static char garbage[1 << 20];
    struct sockaddr_in to = dt__tcp_sockaddr(place), own = dt__tcp_sockaddr(from);
    const dt_host *host = dt_host_default();
    int one = 1;
    visit v = visit_make(place, 1, 4, "");
    int n = what == SCANNER ? 20 : what == FLOOD ? 4 : 1000;
    struct rlimit most = { 2000, 2000 };
    setrlimit(RLIMIT_NOFILE, &most);
    memset(garbage, 'x', sizeof garbage);
    for (int i = 0; i < n; i++) fds[i] = -1;
    for (double tick = 0;; host->sleep(NULL, 1e-3)) {
        int drop = host->now(NULL) > tick + 0.1;
        if (drop) tick = host->now(NULL);
        for (int i = 0; i < n; i++) {
            char c;
            if (fds[i] >= 0 && (what == SCANNER || recv(fds[i], &c, 1, MSG_DONTWAIT) == 0 ||
                                   (errno != EAGAIN && errno != EWOULDBLOCK))) {
                close(fds[i]);
                fds[i] = -1;
            }
            if (fds[i] < 0 && host->now(NULL) < next[i]) continue;
            if (fds[i] < 0) {
                next[i] = host->now(NULL) + (what == SCANNER ? 0.01 : what == FLOOD ? 0.05 : 0.1);
                fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
                at[i] = 0;
                setsockopt(fds[i], IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
                if (bind(fds[i], (struct sockaddr *)&own, sizeof own) != 0 ||
                    (connect(fds[i], (struct sockaddr *)&to, sizeof to) != 0 &&
                        errno != EINPROGRESS)) {
                    close(fds[i]);
                    fds[i] = -1;
                    continue;
                }
                if (what == HALF) send(fds[i], &v.ours, i % 2 ? 100 : sizeof v.ours, MSG_NOSIGNAL);
            }
            if (what == FLOOD) send(fds[i], garbage, sizeof garbage, MSG_NOSIGNAL);
            if (what == SLOW && drop && at[i] < 100)
                send(fds[i], (char *)&v.ours + at[i]++, 1, MSG_NOSIGNAL);
        }
    }
}

#endif
