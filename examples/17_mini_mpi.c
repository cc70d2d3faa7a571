/* 17_mini_mpi.c - dt_comm.h alone: bytes, 64-bit counters and packed structs, as with a small MPI

   What you learn: a program without tensors. Each rank owns a piece of a ring of cells (the
       automaton "rule 110"), exchanges its outermost cells with its neighbours in every generation
       (a halo exchange of DT_U8), and counts its live cells. At the end a reduce adds the counters
       (DT_I64), and a gather collects a struct from every rank as bytes. DT_NO_KERNELS leaves out
       the CPU kernels that only tensors need: the program compiles faster.
   Run: cc -O3 examples/17_mini_mpi.c -o 17_mini_mpi -lm -lpthread && ./17_mini_mpi [procs]
   What you see: 4 ranks count the same live cells as one rank.
   Think about: how often must ranks exchange if each message carries 10 cells? */
#define DT_NO_KERNELS
#define DT_IMPLEMENTATION
#include "../dt_comm.h"
#include <stdio.h>
#include <string.h>

enum { RANKS = 4, CELLS = 101, GENERATIONS = 2000 }; /* CELLS: of one rank */

typedef struct piece { /* what a rank reports */
    int64_t live;      /* live cells of all generations */
    uint8_t last[CELLS];
} piece;
typedef struct result {
    int64_t live;
    piece of[RANKS];
} result;

/* Computes the next n cells, from cells[1] on; returns how many live. */
static int64_t next_generation(uint8_t *cells, int n) {
    uint8_t left = cells[0];
    int64_t live = 0;
    for (int i = 1; i <= n; i++) {
        int pattern = left << 2 | cells[i] << 1 | cells[i + 1];
        left = cells[i];
        live += cells[i] = (uint8_t)(110 >> pattern & 1);
    }
    return live;
}

static dt_status automaton(dt_ctx *ctx, void *user) {
    result *out = (result *)user; /* shared by all ranks */
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), n = dt_comm_size(world), right = (me + 1) % n,
        left = (me + n - 1) % n;
    uint8_t cells[CELLS + 2] = { 0 };
    piece mine = { 0, { 0 } };
    if (me == n - 1) cells[CELLS] = 1; /* one live cell */
    for (int g = 0; g < GENERATIONS && dt_error(ctx) == DT_OK; g++) {
        /* the last argument of a transfer tells the two messages between two ranks apart */
        dt_transfer halo[4] = { { &cells[1], NULL, 1, DT_U8, left, 0 },
            { &cells[CELLS], NULL, 1, DT_U8, right, 1 }, { NULL, &cells[0], 1, DT_U8, left, 1 },
            { NULL, &cells[CELLS + 1], 1, DT_U8, right, 0 } };
        dt_exchange(world, halo, 4);
        mine.live += next_generation(cells, CELLS);
    }
    memcpy(mine.last, cells + 1, CELLS);
    dt_reduce(world, &mine.live, &out->live, 1, DT_I64, DT_SUM, 0);
    return dt_gather(world, &mine, out->of, sizeof mine, DT_U8, 0);
}

int main(int argc, char **argv) {
    static result r;
    static uint8_t all[RANKS * CELLS + 2]; /* the same ring on one rank */
    int procs = argc > 1 && strcmp(argv[1], "procs") == 0, wrong = 0, total = RANKS * CELLS;
    int64_t live = 0;
    dt_status status = dt_run((dt_run_desc){ .ranks = RANKS,
                                  .backend = procs ? DT_BACKEND_PROCS : DT_BACKEND_THREADS,
                                  .user_bytes = sizeof r },
        automaton, &r);
    all[total] = 1;
    for (int g = 0; g < GENERATIONS; g++)
        all[0] = all[total], all[total + 1] = all[1], live += next_generation(all, total);
    for (int i = 0; i < RANKS; i++) wrong += memcmp(r.of[i].last, all + 1 + i * CELLS, CELLS) != 0;
    printf("%d ranks (%s), %d cells, %d generations: %lld live cells, %lld on one rank\n", RANKS,
        procs ? "procs" : "threads", total, GENERATIONS, (long long)r.live, (long long)live);
    wrong += status != DT_OK || r.live != live;
    puts(wrong ? "WRONG: different cells" : "ok: the same cells");
    return wrong != 0;
}
