/* 06_ring_all_reduce.c - a ring all-reduce from sends and receives, against the library's own

   What you learn: N ranks sum an array of S bytes although each talks to its two neighbours only.
   The array is cut into N shares. First each share goes round once and every rank adds its part:
   after N-1 steps rank r holds the whole sum of share r. Then the sums go round once more. That is
   2(N-1) messages and 2(N-1)/N S bytes a rank, which is the least possible, and all links are busy
   all the time. Write yours over ring_all_reduce: the program compares its messages, bytes and
   result with the library's ring, bit for bit. Run: cc -O3 examples/06_ring_all_reduce.c -o
   06_ring_all_reduce -lm -lpthread && ./06_ring_all_reduce [procs] */
#define DT_IMPLEMENTATION
#include "../dt_comm.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { RANKS = 4, COUNT = 10007 }; /* a prime: no number of shares divides it */

typedef struct cost {
    size_t messages, bytes;
} cost;
typedef struct result {
    cost own, ring;
    float in[RANKS][COUNT], out[3][COUNT];
    int equal_on_all;
} result;
enum { OWN = 0, RING, DEFAULT }; /* of result.out */

/* Share i of n is the elements share_first(i, n) .. share_first(i + 1, n) - 1: the first shares are
   one longer. */
static size_t share_first(int i, int n) {
    size_t each = COUNT / (size_t)n, longer = COUNT % (size_t)n;
    return (size_t)i * each + ((size_t)i < longer ? (size_t)i : longer);
}

/* Sends share `out` of x to the right while share `in` of the left neighbour arrives in `to`. Both
   are started before either is waited for: if all ranks first sent and then received, each would
   wait for its neighbour to receive. */
static void pass(dt_ctx *ctx, const float *x, int out, float *to, int in, cost *c) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), n = dt_comm_size(world), right = (me + 1) % n,
        left = (me + n - 1) % n;
    size_t goes = share_first(out + 1, n) - share_first(out, n),
           comes = share_first(in + 1, n) - share_first(in, n);
    dt_work *send = dt_send_start(world, x + share_first(out, n), goes, DT_F32, right, 0);
    dt_work *recv = dt_recv_start(world, to, comes, DT_F32, left, 0);
    dt_wait(ctx, send);
    dt_wait(ctx, recv);
    c->messages++;
    c->bytes += goes * sizeof(float);
}

/* x (COUNT) becomes the sum over all ranks. Replace this function by yours. */
static void ring_all_reduce(dt_ctx *ctx, float *x, cost *c) {
    int me = dt_comm_rank(dt_world(ctx)), n = dt_comm_size(dt_world(ctx));
    float came[COUNT];
    /* sums: share `out` has step + 1 ranks' parts in it */
    for (int step = 0; step < n - 1; step++) {
        int out = (me - 1 - step + 2 * n) % n, in = (out - 1 + n) % n;
        size_t first = share_first(in, n), end = share_first(in + 1, n);
        pass(ctx, x, out, came, in, c);
        for (size_t i = first; i < end; i++) x[i] = came[i - first] + x[i];
    }
    /* what came in the step before goes on; the first is our own sum */
    for (int step = 0; step < n - 1; step++) {
        int out = (me - step + n) % n, in = (out - 1 + n) % n;
        pass(ctx, x, out, x + share_first(in, n), in, c);
    }
}

/* Every rank: the same sum three ways. */
static dt_status compare(dt_ctx *ctx, void *user) {
    result *out = (result *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world);
    float own[COUNT], ring[COUNT], plain[COUNT];
    cost c = { 0, 0 };
    memcpy(own, out->in[me], sizeof own);
    ring_all_reduce(ctx, own, &c);
    /* as messages round the ring, not in each other's memory */
    dt_comm_set_algorithm(world, DT_RING);
    dt_traffic before = dt_comm_traffic(ctx);
    dt_all_reduce(world, out->in[me], ring, COUNT, DT_F32, DT_SUM);
    dt_traffic after = dt_comm_traffic(ctx);
    dt_comm_set_algorithm(world, DT_ALGORITHM_AUTO);
    dt_all_reduce(world, out->in[me], plain, COUNT, DT_F32, DT_SUM);
    cost library = { after.messages - before.messages, after.bytes - before.bytes };
    double wrong = memcmp(own, ring, sizeof own) != 0 || memcmp(&c, &library, sizeof c) != 0;
    dt_sum_doubles(world, &wrong, 1); /* on how many ranks */
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
    for (int i = 0; i < RANKS * COUNT; i++) /* numbers in [-1/3, 1/3) */
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
    printf("%d of the default's sums round otherwise: a ring begins share r at rank r+1; the "
           "default adds in rank "
           "order, so that\nneither the number's place nor size, algorithm or backend changes a "
           "result.\n",
        differ);
    int ok =
        status == DT_OK && r.equal_on_all && in_order && close && r.own.messages == 2 * (RANKS - 1);
    printf("%s: the two rings %s on every rank; the default is the sum in rank order%s\n",
        ok ? "ok" : "WRONG", r.equal_on_all ? "are the same, bit for bit," : "differ",
        in_order ? "" : ": no");
    return ok ? 0 : 1;
}
