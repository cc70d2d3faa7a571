/* 06_ring_all_reduce.c - ring all-reduce from sends and receives, against the library's own ring

   What you learn: ring all-reduce. N ranks sum an array of S bytes, and each rank talks only to its
       two neighbours. The array is divided into N chunks. The reduce-scatter phase has N-1 steps:
       in each step every rank sends one chunk to its right neighbour, receives another chunk from
       its left neighbour and adds the received chunk to its own copy of that chunk. After these
       steps each rank holds the complete sum of one chunk. The all-gather phase has N-1 more steps,
       which pass the complete sums around the ring (Patarasuk and Yuan, 2009). The table shows
       which chunk each rank sends, and of which chunk it then holds the complete sum:

           reduce-scatter   rank 0   rank 1   rank 2   rank 3     all four links are busy
           step 0 sends        3        0        1        2       in every step
           step 1 sends        2        3        0        1
           step 2 sends        1        2        3        0
           complete sum        0        1        2        3

       A rank sends 2(N-1) messages and 2(N-1)/N S bytes in total. No all-reduce can send fewer
       bytes. As an exercise, replace ring_all_reduce below by your own: the program compares its
       messages, its bytes and every bit of its result with the library's ring (DT_RING).
   Run: cc -O3 examples/06_ring_all_reduce.c -o 06_ring_all_reduce -lm -lpthread
       && ./06_ring_all_reduce [procs]
   What you see: both rings send 6 messages and the same bytes, and give the same bits.
   Think about: why do some sums differ in the last bit from the library's default all-reduce? */
#define DT_IMPLEMENTATION
#include "../dt_comm.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { RANKS = 4, COUNT = 10007 }; /* COUNT is prime, so the chunks have unequal sizes */

typedef struct cost {
    size_t messages, bytes;
} cost;
typedef struct result {
    cost own, ring;
    float in[RANKS][COUNT], out[3][COUNT];
    int equal_on_all;
} result;
enum { OWN = 0, RING, DEFAULT }; /* indices of result.out */

/* Chunk i of n holds elements [chunk_begin(i, n), chunk_begin(i + 1, n)). The first COUNT % n
   chunks are one element longer than the others. */
static size_t chunk_begin(int i, int n) {
    size_t each = COUNT / (size_t)n, longer = COUNT % (size_t)n;
    return (size_t)i * each + ((size_t)i < longer ? (size_t)i : longer);
}

/* Sends chunk `out` of x to the right neighbour and receives chunk `in` from the left neighbour
   into `to`. Starts both transfers before it waits for either. If every rank waited for its send to
   finish first, no rank would receive: a deadlock. */
static void exchange(dt_ctx *ctx, const float *x, int out, float *to, int in, cost *c) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), n = dt_comm_size(world), right = (me + 1) % n,
        left = (me + n - 1) % n;
    size_t send_count = chunk_begin(out + 1, n) - chunk_begin(out, n),
           recv_count = chunk_begin(in + 1, n) - chunk_begin(in, n);
    dt_work *send = dt_send_start(world, x + chunk_begin(out, n), send_count, DT_F32, right, 0);
    dt_work *recv = dt_recv_start(world, to, recv_count, DT_F32, left, 0);
    dt_wait(ctx, send);
    dt_wait(ctx, recv);
    c->messages++;
    c->bytes += send_count * sizeof(float);
}

/* Ring all-reduce: x (COUNT) becomes the sum over all ranks. Replace this function by your own. */
static void ring_all_reduce(dt_ctx *ctx, float *x, cost *c) {
    int me = dt_comm_rank(dt_world(ctx)), n = dt_comm_size(dt_world(ctx));
    float received[COUNT];
    /* Reduce-scatter. When this rank sends chunk `out`, the chunk is a sum over step + 1 ranks. */
    for (int step = 0; step < n - 1; step++) {
        int out = (me - 1 - step + 2 * n) % n, in = (out - 1 + n) % n;
        size_t first = chunk_begin(in, n), end = chunk_begin(in + 1, n);
        exchange(ctx, x, out, received, in, c);
        for (size_t i = first; i < end; i++) x[i] = received[i - first] + x[i];
    }
    /* All-gather. The first step sends the chunk whose sum this rank completed. Each later step
       sends the chunk that the step before received. */
    for (int step = 0; step < n - 1; step++) {
        int out = (me - step + n) % n, in = (out - 1 + n) % n;
        exchange(ctx, x, out, x + chunk_begin(in, n), in, c);
    }
}

/* Computes the same all-reduce three times: with ring_all_reduce, with the library's ring and with
   the library's default algorithm. */
static dt_status compare(dt_ctx *ctx, void *user) {
    result *out = (result *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    float own[COUNT], ring[COUNT], plain[COUNT];
    cost c = { 0, 0 };
    memcpy(own, out->in[me], sizeof own);
    ring_all_reduce(ctx, own, &c);
    /* DT_RING sends messages around the ring. The default algorithm may read the memory of other
       ranks instead. */
    dt_comm_set_algorithm(world, DT_RING);
    dt_traffic before = dt_comm_traffic(ctx);
    dt_all_reduce(world, out->in[me], ring, COUNT, DT_F32, DT_SUM);
    dt_traffic after = dt_comm_traffic(ctx);
    dt_comm_set_algorithm(world, DT_ALGORITHM_AUTO);
    dt_all_reduce(world, out->in[me], plain, COUNT, DT_F32, DT_SUM);
    cost library = { after.messages - before.messages, after.bytes - before.bytes };
    double wrong = memcmp(own, ring, sizeof own) != 0 || memcmp(&c, &library, sizeof c) != 0;
    dt_sum_doubles(world, &wrong, 1); /* counts the ranks that found a difference */
    if (me == 0 && dt_error(ctx) == DT_OK) {
        out->own = c;
        out->ring = library;
        out->equal_on_all = wrong == 0;
        memcpy(out->out[OWN], own, sizeof own);
        memcpy(out->out[RING], ring, sizeof ring);
        memcpy(out->out[DEFAULT], plain, sizeof plain);
    }
    return dt_error(ctx);
}

int main(int argc, char **argv) {
    static result r;
    int procs = argc > 1 && strcmp(argv[1], "procs") == 0, differ = 0, in_order = 1, close = 1;
    uint32_t seed = 1;
    for (int i = 0; i < RANKS * COUNT; i++) /* values in [-1/3, 1/3) */
        r.in[i / COUNT][i % COUNT] =
            ((float)((seed = seed * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1) / 3;
    dt_status status = dt_run((dt_run_desc){ .ranks = RANKS,
                                  .backend = procs ? DT_BACKEND_PROCS : DT_BACKEND_THREADS,
                                  .user_bytes = sizeof r,
                                  .kernels = dt_kernels_cpu() },
        compare, &r);
    for (int i = 0; i < COUNT; i++) {
        float sum = ((r.in[0][i] + r.in[1][i]) + r.in[2][i]) + r.in[3][i];
        in_order &= r.out[DEFAULT][i] == sum;
        differ += r.out[OWN][i] != sum;
        close &= fabsf(r.out[OWN][i] - sum) < 1e-6f;
    }
    printf("%d ranks (%s), %d floats      messages  bytes (of rank 0)\n", RANKS,
        procs ? "procs" : "threads", COUNT);
    printf("  your ring                       %3zu  %zu\n", r.own.messages, r.own.bytes);
    printf("  the library's ring (DT_RING)    %3zu  %zu\n", r.ring.messages, r.ring.bytes);
    printf("%d elements of the default all-reduce are rounded differently: the ring starts the sum "
           "of chunk r at rank r+1;\nthe default adds in rank order, so that a result does not "
           "depend on position, size, algorithm or backend.\n",
        differ);
    int ok =
        status == DT_OK && r.equal_on_all && in_order && close && r.own.messages == 2 * (RANKS - 1);
    printf("%s: the two rings %s on every rank; the default is the sum in rank order%s\n",
        ok ? "ok" : "WRONG", r.equal_on_all ? "are the same, bit for bit," : "differ",
        in_order ? "" : ": no");
    return ok ? 0 : 1;
}
