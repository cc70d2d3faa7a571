/* intruder.h - an accepted rank that sends what no rank would send: the inputs of
   tests/fuzz/corpus/packets, for fuzz_packets.c and test_attack.c. The first byte of an input
   chooses the operation that rank 0 runs meanwhile (its low bits), whether rank 1 hangs up at the
   end (0x40), and in fuzz_packets.c whether large messages go in packets (0x80). Records follow:

       1 byte    0x01: raw bytes of the stream, else a packet, whose header is added; 0x02: sent
                 when rank 0 first waits after the record before, else at once
       2 bytes   the length, low byte first
       bytes     a dt__frame and its data, or raw bytes

   Include it after dt_comm.h. */
#ifndef INTRUDER_H
#define INTRUDER_H

enum { INTRUDER_OPERATIONS = 10, INTRUDER_FLOATS = 1200 /* more than DT_EAGER_BYTES */ };

typedef struct intruder {
    const unsigned char *data, *end; /* the records that have not been sent */
    int fd, operation, hangs_up;
} intruder;

static inline intruder intruder_make(const unsigned char *data, size_t bytes, int fd) {
    intruder in = { data + 1, data + bytes, fd, (data[0] & 0x3f) % INTRUDER_OPERATIONS,
        (data[0] & 0x40) != 0 };
    return in;
}

static inline int intruder_has_more(const intruder *in) { return in->end - in->data >= 3; }

/* Sends a packet, or raw bytes, as far as the socket takes them. */
static inline void intruder_put(int fd, const void *packet, size_t bytes, int is_raw) {
    dt__tcp_header header = { DT__TCP_FRAME_MAGIC, DT__TCP_PACKET, bytes, 0 };
    if (!is_raw) send(fd, &header, sizeof header, MSG_NOSIGNAL);
    send(fd, packet, bytes, MSG_NOSIGNAL);
}

/* Sends the records up to the next one that waits. is_waiting: rank 0 waits, so that one is due. */
static inline void intruder_send(intruder *in, int is_waiting) {
    for (; intruder_has_more(in); is_waiting = 0) {
        int how = in->data[0];
        size_t bytes = (size_t)in->data[1] | (size_t)in->data[2] << 8,
               left = (size_t)(in->end - in->data) - 3;
        if (how & 2 && !is_waiting) return;
        if (bytes > left) bytes = left;
        intruder_put(in->fd, in->data + 3, bytes, how & 1);
        in->data += 3 + bytes;
    }
    if (in->hangs_up) shutdown(in->fd, SHUT_WR);
}

/* What rank 0 does. a, b: INTRUDER_FLOATS floats. */
static inline void intruder_operate(dt_comm *world, int operation, float *a, float *b) {
    enum { N = INTRUDER_FLOATS };
    dt_ctx *ctx = world->world->ctx;
    dt_work *works[20];
    dt_comm *half;
    int from = 0;
    switch (operation) {
    case 0: dt_recv(world, a + N - 10, 10, DT_F32, 1, 5); break; /* up to the buffer's end */
    case 1: dt_recv_any(world, a + N - 10, 10, DT_F32, 5, &from); break;
    case 2: dt_recv(world, a, N, DT_F32, 1, 5); break;
    case 3: dt_send(world, a, N, DT_F32, 1, 5); break;
    case 4: dt_all_reduce(world, a, b, 10, DT_F32, DT_SUM); break;
    case 5: dt_all_reduce(world, a, b, N, DT_F32, DT_SUM); break;
    case 6:
        half = dt_comm_split(world, 0, 0, "half");
        dt_barrier(half);
        break;
    case 7: dt_broadcast(world, a, N, DT_F32, 1); break;
    case 8: /* more than there are credits */
        for (int i = 0; i < 20; i++) works[i] = dt_send_start(world, a, 10, DT_F32, 1, i);
        for (int i = 0; i < 20; i++) dt_wait(ctx, works[i]);
        break;
    default:
        works[0] = dt_recv_start(world, a, N / 2, DT_F32, 1, 5);
        works[1] = dt_send_start(world, b, N, DT_F32, 1, 6);
        works[2] = dt_recv_start(world, a + N / 2, 10, DT_F32, 1, 7);
        for (int i = 0; i < 3; i++) dt_wait(ctx, works[i]);
    }
}

/* 1 if an error text names rank 1. Nobody in particular is to send to dt_recv_any, and an abort says
   that any rank has failed. */
static inline int intruder_is_named(int operation, const char *text) {
    return !text[0] || operation == 1 || strstr(text, "rank 1") ||
           strstr(text, "peer failed first: rank ");
}

/* 1 if the text is one line of printable UTF-8. */
static inline int is_line(const char *text) {
    for (size_t length; *text; text += length)
        if ((length = dt_printable(text)) == 0) return 0;
    return 1;
}

#endif
