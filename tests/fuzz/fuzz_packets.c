/* fuzz_packets.c - what a rank that has been accepted sends: rank 0 of 2 runs an operation over TCP
   while rank 1 sends the input (tests/comm/intruder.h has its format). A socket pair is the
   network. Rank 0 may fail, but its error names rank 1, texts are printable, and no byte outside of
   its buffers changes. */
#include "tests/fuzz/fuzz.h"
#include "tests/comm/intruder.h"

enum { PACKETS_GUARD = 64, PACKETS_MEMORY = 1 << 20 };

typedef struct packets {
    intruder in;
    double clock;
} packets;

static void packets_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank;
    fuzz_must(is_line(text), "a line of the log has control characters");
}

/* Every reading of the clock advances the time, so that no call waits long. */
static double packets_now(void *user) { return ((packets *)user)->clock += 0.05; }

static void packets_sleep(void *user, double s) {
    packets *p = (packets *)user;
    char sink[4096];
    p->clock += s;
    while (recv(p->in.fd, sink, sizeof sink, MSG_DONTWAIT) > 0) {
    }
    intruder_send(&p->in, 1);
}

/* Makes the connections of rank 0 without a rendezvous. */
static dt__tcp *packets_tcp(dt_ctx *ctx, int fd) {
    size_t bytes = dt__tcp_bytes(2);
    dt__tcp *t = (dt__tcp *)dt_alloc(ctx, DT_MEM_HOST, bytes, "connections");
    fuzz_must(t != NULL, "no memory");
    memset(t, 0, bytes);
    t->ctx = ctx;
    t->size = 2;
    t->peers = (dt__tcp_peer *)(void *)(t + 1);
    t->polls = (struct pollfd *)(void *)(t->peers + t->size);
    t->links = (dt__tcp_link *)(void *)(t->polls + t->size);
    t->input = (char *)t + bytes - DT__TCP_INPUT_BYTES;
    t->peers[0].fd = -1;
    t->peers[1].fd = fd;
    snprintf(t->links[1].host, sizeof t->links[1].host, "fuzz");
    return t;
}

static void fuzz_one(const unsigned char *data, size_t bytes) {
    enum { EACH = INTRUDER_FLOATS + PACKETS_GUARD };
    static float memory[2 * EACH];
    int fds[2];
    if (bytes < 4) return;
    fuzz_must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0, "no sockets");
    packets p = { intruder_make(data, bytes, fds[1]), 1 };
    dt_host host = *dt_host_default();
    host.user = &p;
    host.log = packets_log;
    host.now = packets_now;
    host.sleep = packets_sleep;
    memset(memory, 0x5a, sizeof memory);
    dt_ctx_desc desc = { .seed = 1, .host = &host, .mem_limit = PACKETS_MEMORY };
    dt_ctx *ctx = dt_ctx_make(desc);
    dt__tcp *t = packets_tcp(ctx, fds[0]);
    dt_transport transport = dt__tcp_transport(t);
    if (data[0] & 0x80) transport.push = NULL, transport.pull = NULL;
    dt_attach_desc attach = { .transport = &transport, .size = 2, .timeout_s = 1 };
    dt_comm *world = dt_comm_attach(ctx, attach);
    intruder_send(&p.in, 0);
    intruder_operate(world, p.in.operation, memory, memory + EACH);
    dt_comm_detach(ctx, DT_OK);
    const char *text = dt_error_text(ctx);
    fuzz_must(is_line(text) && strlen(text) < 512, "the error is not a printable line");
    if (!intruder_is_named(p.in.operation, text)) fprintf(stderr, "%s\n", text);
    fuzz_must(intruder_is_named(p.in.operation, text), "the error does not name the rank");
    for (int i = 0; i < 2 * EACH; i++)
        fuzz_must(i % EACH < INTRUDER_FLOATS || memcmp(&memory[i], "\x5a\x5a\x5a\x5a", 4) == 0,
            "a byte outside of the buffers has changed");
    dt__tcp_free(t);
    dt_ctx_free(ctx);
    close(fds[1]);
}
