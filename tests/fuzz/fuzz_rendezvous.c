/* fuzz_rendezvous.c - bytes from a hostile connection. The first byte chooses the receiver:

       0   a rank's listener gets raw bytes
       1   a rank's listener gets handshake messages; a proof that begins with 0x01 is replaced by a
           valid one
       2   a rank that connects to rank 0 gets handshake messages as answers, then the table of
           addresses
       3   a rank with established connections gets frames from an authenticated peer

   The second byte is the number of bytes sent at a time, minus 1. A socket pair is the network. */
#include "tests/fuzz/fuzz.h"

enum { RANKS = 3 };

typedef struct hostile {
    dt_ctx *ctx;
    dt__tcp_rendezvous r;
    dt__tcp_link links[RANKS];
    dt__tcp_address addresses[RANKS];
    dt__tcp_pending pending[2];
    uint8_t key[32];
    dt__tcp t;
    dt__tcp_peer peers[RANKS];
    struct pollfd polls[RANKS];
    char input[DT__TCP_INPUT_BYTES];
    int fds[2]; /* dt's end, and the test's end */
    double clock;
    /* what the connecting rank gets as answers; sent when the rank first waits for them */
    const unsigned char *answers;
    size_t answer_bytes;
} hostile;

static void send_answers(hostile *h);

/* Every reading of the clock advances the time, so that no call waits. */
static double fuzz_now(void *user) { return ((hostile *)user)->clock += 0.2; }
static void fuzz_sleep(void *user, double s) {
    (void)s;
    if (((hostile *)user)->answers) send_answers((hostile *)user);
}

static dt_host fuzz_host(hostile *h) {
    dt_host host = *dt_host_default();
    host.user = h;
    host.log = fuzz_silent;
    host.now = fuzz_now;
    host.sleep = fuzz_sleep;
    return host;
}

static void hostile_make(hostile *h, const dt_host *host, int rank) {
    memset(h, 0, sizeof *h);
    h->ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .host = host, .mem_limit = 1 << 20 });
    h->r.ctx = h->t.ctx = h->ctx;
    h->r.watch = dt__stopwatch_start(host, 1e9);
    h->r.rank = h->t.rank = rank;
    h->r.size = h->t.size = RANKS;
    h->r.timeout_s = 1;
    h->r.job = 77;
    h->r.key = h->key;
    h->r.listener = -1;
    h->r.slots = 2;
    h->r.pending = h->pending;
    h->r.addresses = h->addresses;
    h->r.links = h->links;
    h->t.peers = h->peers;
    h->t.links = h->links;
    h->t.polls = h->polls;
    h->t.input = h->input;
    for (int i = 0; i < RANKS; i++) h->links[i].fd = h->peers[i].fd = -1;
    h->pending[0].fd = h->pending[1].fd = -1;
    fuzz_must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, h->fds) == 0, "no sockets");
}

static void hostile_free(hostile *h) {
    dt__tcp *t = &h->t;
    for (int i = 0; i < RANKS; i++) {
        dt__tcp_close_peer(&h->peers[i]);
        dt__tcp_free_bulks(t, h->peers[i].pulls);
        if (h->links[i].fd >= 0) close(h->links[i].fd);
        for (const char *c = h->links[i].host; *c; c += dt_printable(c))
            fuzz_must(dt_printable(c) > 0, "a host's name with control characters");
    }
    dt__tcp_free_bulks(t, t->unused_bulks);
    for (int i = 0; i < 2; i++)
        if (h->pending[i].fd >= 0) close(h->pending[i].fd);
    close(h->fds[1]);
    dt_ctx_free(h->ctx);
}

/* Receives dt's messages; *message: the last complete one. */
static void hostile_receive(hostile *h, dt__tcp_handshake *message) {
    dt__tcp_handshake next;
    while (recv(h->fds[1], &next, sizeof next, MSG_DONTWAIT) == (ssize_t)sizeof next)
        *message = next;
}

/* A handshake message of the input's bytes, with valid magic bytes. A version or kind of 0 is
   replaced by the valid one. */
static dt__tcp_handshake message_of(const unsigned char *data, size_t bytes, uint32_t kind) {
    dt__tcp_handshake message;
    memset(&message, 0, sizeof message);
    memcpy(&message, data, bytes < sizeof message ? bytes : sizeof message);
    memcpy(message.magic, dt__tcp_magic, sizeof message.magic);
    if (!message.version) message.version = DT__TCP_VERSION;
    if (!message.kind) message.kind = kind;
    return message;
}

static void read_listener(hostile *h) {
    if (h->pending[0].fd >= 0) dt__tcp_read_pending(&h->r, &h->pending[0], h->clock);
}

static void fuzz_listener(
    hostile *h, const unsigned char *data, size_t bytes, size_t step, int messages) {
    const size_t size = sizeof(dt__tcp_handshake);
    dt__tcp_handshake theirs, ours;
    int proved = 0;
    memset(&theirs, 0, sizeof theirs);
    h->pending[0].fd = h->fds[0];
    h->pending[0].state = DT__TCP_AWAIT_HELLO;
    h->pending[0].deadline = 1e9;
    for (size_t at = 0; at < bytes && !messages; at += step) {
        send(h->fds[1], data + at, bytes - at < step ? bytes - at : step, MSG_NOSIGNAL);
        read_listener(h);
    }
    dt__tcp_handshake hello = message_of(data, bytes, DT__TCP_HELLO);
    for (int turn = 0; turn < 3 && messages; turn++) {
        size_t from = bytes < size * (size_t)turn ? bytes : size * (size_t)turn;
        dt__tcp_handshake message =
            message_of(data + from, bytes - from, turn ? DT__TCP_PROOF : DT__TCP_HELLO);
        if (turn == 1 && message.proof[0] == 1) {
            dt__tcp_prove(h->key, "caller", &hello, &theirs, message.proof);
            proved = 1;
        }
        for (size_t at = 0; at < size; at += step) {
            send(h->fds[1], (char *)&message + at, size - at < step ? size - at : step,
                MSG_NOSIGNAL);
            read_listener(h);
        }
        hostile_receive(h, turn ? &ours : &theirs);
    }
    for (int i = 0; i < RANKS; i++) {
        fuzz_must(h->links[i].fd < 0 || proved, "a connection is accepted without a proof");
        fuzz_must(h->links[i].fd < 0 || (i > h->r.rank && hello.rank == i && hello.size == RANKS),
            "a connection is accepted as the wrong rank");
    }
    fuzz_must(dt_error(h->ctx) == DT_OK, "an unauthenticated connection fails the job");
}

/* Splits the input into a hello, a welcome and what follows. Returns 1 if the welcome asks for a
   valid proof. */
static int answers_of(
    const unsigned char *data, size_t bytes, dt__tcp_handshake *hello, dt__tcp_handshake *welcome) {
    size_t from = bytes < sizeof *hello ? bytes : sizeof *hello;
    *hello = message_of(data, bytes, DT__TCP_HELLO);
    hello->rank = data[0] & 1 ? 0 : hello->rank;
    *welcome = message_of(data + from, bytes - from, DT__TCP_WELCOME);
    welcome->rank = hello->rank;
    return welcome->proof[0] == 1;
}

/* Receives the connecting rank's hello, whose nonce a valid proof covers, and sends all answers. */
static void send_answers(hostile *h) {
    dt__tcp_handshake hello, welcome, ours;
    size_t bytes = h->answer_bytes, from = bytes < 2 * sizeof ours ? bytes : 2 * sizeof ours;
    memset(&ours, 0, sizeof ours);
    hostile_receive(h, &ours);
    if (answers_of(h->answers, bytes, &hello, &welcome))
        dt__tcp_prove(h->key, "host", &ours, &hello, welcome.proof);
    send(h->fds[1], &hello, sizeof hello, MSG_NOSIGNAL);
    send(h->fds[1], &welcome, sizeof welcome, MSG_NOSIGNAL);
    send(h->fds[1], h->answers + from, bytes - from, MSG_NOSIGNAL);
    shutdown(h->fds[1], SHUT_WR);
    h->answers = NULL;
}

static void fuzz_caller(hostile *h, const unsigned char *data, size_t bytes) {
    const char *reason = "";
    dt__tcp_handshake hello, welcome;
    int proves = answers_of(data, bytes, &hello, &welcome);
    h->r.job = 0;
    h->answers = data;
    h->answer_bytes = bytes;
    int done = dt__tcp_shake_hands(&h->r, h->fds[0], 0, 1e9, &reason);
    fuzz_must((done < 0) == (dt_error(h->ctx) != DT_OK), "the status does not match the error");
    fuzz_must(done <= 0 || proves, "a host is accepted without a proof");
    fuzz_must((h->links[0].fd >= 0) == (done > 0), "a connection is used without a welcome");
    if (done > 0) {
        dt_status status = dt__tcp_recv_table(&h->r);
        fuzz_must(status == dt_error(h->ctx) && strlen(dt_error_text(h->ctx)) < 512,
            "the error has no text");
    }
}

/* Takes all packets that have arrived; returns their number. */
static size_t take_packets(dt__tcp *t) {
    size_t count = 0, packet_bytes = 0;
    int sender = -2;
    while (dt__tcp_recv(t, DT_ANY, &sender, &packet_bytes)) {
        fuzz_must(sender == 0, "a packet has the wrong sender");
        fuzz_must(packet_bytes <= DT_PACKET_BYTES, "a packet is too long");
        count++;
    }
    return count;
}

static void fuzz_frames(hostile *h, const unsigned char *data, size_t bytes, size_t step) {
    char into[3][40], why[512] = "";
    void *request[3];
    dt__tcp *t = &h->t;
    size_t packets = 0;
    h->peers[0].fd = h->fds[0];
    for (int i = 0; i < 3; i++)
        request[i] = dt__tcp_pull(t, 0, (uint64_t)i, into[i], (size_t)(i ? 40 : 4));
    for (size_t at = 0; at < bytes; at += step) {
        send(h->fds[1], data + at, bytes - at < step ? bytes - at : step, MSG_NOSIGNAL);
        packets += take_packets(t);
        fuzz_must(packets <= bytes / sizeof(dt__tcp_header), "more packets than were sent");
    }
    shutdown(h->fds[1], SHUT_WR);
    take_packets(t);
    fuzz_must(dt__tcp_lost(t, 0, why) == (h->peers[0].fd < 0), "a lost connection is not told");
    for (int i = 0; i < 3; i++) {
        if (!request[i]) continue;
        int done = dt__tcp_test(t, request[i], why);
        fuzz_must(done >= 0 || strlen(why) < sizeof why, "the error text is too long");
        if (done == 0 || done == 2) dt__tcp_cancel(t, request[i]);
    }
}

static void fuzz_one(const unsigned char *data, size_t bytes) {
    static hostile h;
    if (bytes < 3) return;
    dt_host host = fuzz_host(&h);
    size_t step = 1 + data[1];
    int mode = data[0] & 3;
    hostile_make(&h, &host, mode == 2 ? 1 : mode == 3 ? 2 : data[0] >> 2 & 1);
    if (mode < 2)
        fuzz_listener(&h, data + 2, bytes - 2, step, mode);
    else if (mode == 2)
        fuzz_caller(&h, data + 2, bytes - 2);
    else
        fuzz_frames(&h, data + 2, bytes - 2, step);
    hostile_free(&h);
}
