/* fuzz_rendezvous.c - what a hostile connection can say. The first byte says to whom:

       0   the door of a rank: raw bytes
       1   the same, as cards; a proof that begins with 0x01 becomes one that is right
       2   a rank that calls rank 0, which answers with such cards; the table of all places may
           follow
       3   a rank that has connections, from a peer which has proved who it is: frames

   The second byte: how many bytes come at a time. A pair of sockets stands for the network. */
#include "tests/fuzz/fuzz.h"

enum { RANKS = 3 };

typedef struct hostile {
    dt_ctx *ctx;
    dt__tcp t;
    dt__tcp_peer peers[RANKS];
    struct pollfd polls[RANKS];
    dt__tcp_pending guests[2];
    dt__tcp_listener door;
    char input[DT__TCP_INPUT_BYTES];
    int fds[2]; /* the library's end, and ours */
    double clock;
} hostile;

/* Time passes with each look at the clock: no wait is a wait. */
static double fuzz_now(void *user) { return ((hostile *)user)->clock += 0.2; }
static void fuzz_sleep(void *user, double s) { (void)user, (void)s; }

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
    h->t.ctx = h->ctx;
    h->t.host = host;
    h->t.watch = dt__stopwatch_start(host, 1e9);
    h->t.rank = rank;
    h->t.size = RANKS;
    h->t.timeout_s = 1;
    h->t.job = 77;
    h->t.peers = h->peers;
    h->t.polls = h->polls;
    h->t.input = h->input;
    h->t.listener = &h->door;
    h->door.fd = -1;
    h->door.first_rank = rank + 1;
    h->door.pending = h->guests;
    h->door.slots = 2;
    for (int i = 0; i < RANKS; i++) h->peers[i].fd = -1, h->peers[i].rank = i;
    h->guests[0].fd = h->guests[1].fd = -1;
    fuzz_must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, h->fds) == 0, "no sockets");
}

static void hostile_free(hostile *h) {
    dt__tcp *t = &h->t;
    for (int i = 0; i < RANKS; i++) {
        dt__tcp_close_peer(&h->peers[i], DT__TCP_LOST);
        for (const char *c = h->peers[i].host; *c; c += dt_printable(c))
            fuzz_must(dt_printable(c) > 0, "a host's name that a terminal minds");
    }
    while (t->unexpected) dt__tcp_unexpected_remove(t, t->unexpected);
    while (t->free_requests) {
        dt__tcp_request *r = t->free_requests;
        t->free_requests = r->next;
        dt_free(t->ctx, DT_MEM_HOST, r, sizeof *r);
    }
    for (int i = 0; i < 2; i++)
        if (h->guests[i].fd >= 0) close(h->guests[i].fd);
    close(h->fds[1]);
    dt_ctx_free(h->ctx);
}

/* What the library has said to us; the last whole card stays in *card. */
static void hostile_hear(hostile *h, dt__tcp_handshake *card) {
    dt__tcp_handshake next;
    while (recv(h->fds[1], &next, sizeof next, MSG_DONTWAIT) == (ssize_t)sizeof next) *card = next;
}

/* A card of the input's bytes, as far as they go, that begins as a card; of version and kind a 0 is
   the right one. */
static dt__tcp_handshake card_of(const unsigned char *data, size_t bytes, uint32_t kind) {
    dt__tcp_handshake card;
    memset(&card, 0, sizeof card);
    memcpy(&card, data, bytes < sizeof card ? bytes : sizeof card);
    memcpy(card.magic, dt__tcp_magic, sizeof card.magic);
    if (!card.version) card.version = DT__TCP_VERSION;
    if (!card.kind) card.kind = kind;
    return card;
}

static void door_listens(hostile *h) {
    if (h->guests[0].fd >= 0) dt__tcp_read_pending(&h->t, &h->guests[0], h->clock);
}

static void fuzz_door(hostile *h, const unsigned char *data, size_t bytes, size_t step, int cards) {
    const size_t whole = sizeof(dt__tcp_handshake);
    dt__tcp_handshake theirs, ours;
    int proved = 0;
    memset(&theirs, 0, sizeof theirs);
    h->guests[0].fd = h->fds[0];
    h->guests[0].deadline = 1e9;
    for (size_t at = 0; at < bytes && !cards; at += step) {
        send(h->fds[1], data + at, bytes - at < step ? bytes - at : step, MSG_NOSIGNAL);
        door_listens(h);
    }
    dt__tcp_handshake hello = card_of(data, bytes, DT__TCP_HELLO);
    for (int turn = 0; turn < 3 && cards; turn++) {
        size_t from = bytes < whole * (size_t)turn ? bytes : whole * (size_t)turn;
        dt__tcp_handshake card =
            card_of(data + from, bytes - from, turn ? DT__TCP_PROOF : DT__TCP_HELLO);
        if (turn == 1 && card.proof[0] == 1) {
            dt__tcp_prove(&h->t, "caller", &hello, &theirs, card.proof);
            proved = 1;
        }
        for (size_t at = 0; at < whole; at += step) {
            send(
                h->fds[1], (char *)&card + at, whole - at < step ? whole - at : step, MSG_NOSIGNAL);
            door_listens(h);
        }
        hostile_hear(h, turn ? &ours : &theirs);
    }
    for (int i = 0; i < RANKS; i++) {
        fuzz_must(h->peers[i].fd < 0 || proved, "a seat without a proof");
        fuzz_must(h->peers[i].fd < 0 || (i > h->t.rank && hello.rank == i && hello.size == RANKS),
            "a wrong seat");
    }
    fuzz_must(dt_error(h->ctx) == DT_OK, "a stranger ends the job");
}

static void fuzz_caller(hostile *h, const unsigned char *data, size_t bytes) {
    dt__tcp_address places[RANKS], there = { 0, 1 };
    const char *reason = "";
    const size_t whole = sizeof(dt__tcp_handshake);
    dt__tcp_handshake hello = card_of(data, bytes, DT__TCP_HELLO), welcome, ours;
    h->t.job = 0;
    hello.rank = data[0] & 1 ? 0 : hello.rank;
    /* what it will say first is known here: its nonce is the first of a seed of zeros */
    ours = dt__tcp_handshake_make(&h->t, DT__TCP_HELLO);
    h->t.nonce_count = 0;
    size_t from = bytes < whole ? bytes : whole;
    welcome = card_of(data + from, bytes - from, DT__TCP_WELCOME);
    welcome.rank = hello.rank;
    int proves = welcome.proof[0] == 1;
    if (proves) dt__tcp_prove(&h->t, "host", &ours, &hello, welcome.proof);
    send(h->fds[1], &hello, sizeof hello, MSG_NOSIGNAL);
    send(h->fds[1], &welcome, sizeof welcome, MSG_NOSIGNAL);
    from = bytes < 2 * whole ? bytes : 2 * whole;
    send(h->fds[1], data + from, bytes - from, MSG_NOSIGNAL);
    shutdown(h->fds[1], SHUT_WR);
    int done = dt__tcp_shake_hands(&h->t, h->fds[0], 0, there, 1e9, &reason);
    fuzz_must((done < 0) == (dt_error(h->ctx) != DT_OK), "no reason, or one too many");
    fuzz_must(done <= 0 || proves, "a host without a proof");
    fuzz_must((h->peers[0].fd >= 0) == (done > 0), "a seat without a welcome");
    if (done > 0) {
        dt_status status = dt__tcp_recv_table(&h->t, places);
        fuzz_must(status == dt_error(h->ctx) && strlen(dt_error_text(h->ctx)) < 512, "no text");
    } else {
        close(h->fds[0]);
    }
}

static void fuzz_frames(hostile *h, const unsigned char *data, size_t bytes, size_t step) {
    char into[3][40], why[512];
    void *request[3];
    dt__tcp *t = &h->t;
    h->peers[0].fd = h->fds[0];
    h->door.fd = -1;
    t->listener = NULL;
    for (int i = 0; i < 3; i++)
        request[i] = dt__tcp_recv(t, i ? 0 : DT_ANY, 0, i, into[i], (size_t)(i ? 40 : 4));
    for (size_t at = 0; at < bytes; at += step) {
        send(h->fds[1], data + at, bytes - at < step ? bytes - at : step, MSG_NOSIGNAL);
        dt__tcp_progress(t);
        size_t kept = 0;
        for (dt__tcp_message *m = t->unexpected; m; m = m->next) kept += m->is_complete;
        fuzz_must(kept <= bytes / sizeof(dt__tcp_frame), "more messages than came");
    }
    shutdown(h->fds[1], SHUT_WR);
    dt__tcp_progress(t);
    fuzz_must(
        h->peers[0].state != DT__TCP_OPEN || h->peers[0].fd >= 0, "open without a connection");
    for (int i = 0; i < 3; i++) {
        int from = -2, done = 0;
        size_t got = 0;
        uint64_t word = 0;
        if (!request[i]) continue;
        done = dt__tcp_test(t, request[i], &from, &word, &got, why);
        fuzz_must(done <= 0 || from == 0, "a message from nobody");
        fuzz_must(done >= 0 || strlen(why) < sizeof why, "no reason");
        if (done == 0) dt__tcp_cancel(t, request[i]);
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
        fuzz_door(&h, data + 2, bytes - 2, step, mode);
    else if (mode == 2)
        fuzz_caller(&h, data + 2, bytes - 2);
    else
        fuzz_frames(&h, data + 2, bytes - 2, step);
    hostile_free(&h);
}
