/* test_account.c - dt's memory account, compared with the resident pages that the kernel reports

   Forked ranks train a model of some tens of MiB. Each rank reads /proc/self/smaps: the pages of
   its heap in the shared memory segment, and the anonymous pages outside of the segment. All heaps
   are parts of one mapping. MADV_DONTFORK, which is harmless here, makes the kernel list the rank's
   part as a mapping of its own. The account and the resident bytes must agree within 2 MiB: for one
   class where only that class grows, for sums of classes elsewhere. Pages that were never written
   are not resident, but here only the ends of arenas are not written. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"

#include <sys/mman.h>

enum { LAYERS = 8, WIDTH = 920, ROWS = 4, MAX_RANKS = 4 };
static const double near_bytes = 2 << 20;

/* Bytes of a process: in its heap in the shared memory segment, and in private anonymous memory. */
typedef struct pages {
    double heap, private_bytes;
} pages;

static pages resident(const char *begin, const char *end) {
    FILE *f = fopen("/proc/self/smaps", "r");
    char line[512], rights[8];
    unsigned long from = 0, to, kib;
    int in_heap = 0;
    pages p = { 0, 0 };
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) == 3)
            in_heap =
                from >= (unsigned long)(uintptr_t)begin && to <= (unsigned long)(uintptr_t)end;
        else if (in_heap && sscanf(line, "Rss: %lu kB", &kib) == 1)
            p.heap += 1024.0 * (double)kib;
        else if (!in_heap && sscanf(line, "Anonymous: %lu kB", &kib) == 1)
            p.private_bytes += 1024.0 * (double)kib;
    }
    CHECK(f && from);
    if (f) fclose(f);
    return p;
}

/* Bytes in dt's account: of the classes whose memory is in the heap, and of the others. */
static pages counted(dt_ctx *ctx) {
    dt_memory m = dt_memory_used(ctx);
    pages p = { 0, 0 };
    m.live[DT_MEM_TEMP] = 0; /* kernels touch only a part of their scratch */
    for (int i = 0; i < DT_MEM_CLASSES; i++)
        *(dt__is_heap_class((dt_mem)i) ? &p.heap : &p.private_bytes) += (double)m.live[i];
    return p;
}

/* The ranks store their figures here for main to check: checks in a forked rank are not counted. */
enum { PARAMS = 0, OPTIM, GRADS, HEAP, PRIVATE, FIGURES };
static const char *const figures[FIGURES] = { "params", "optim", "grads", "all in the heap",
    "all private memory" };
typedef struct account {
    int stage, keep, ranks;
    double seen[MAX_RANKS][FIGURES], counted[MAX_RANKS][FIGURES];
    size_t padded, largest; /* elements of all buckets, and of the largest */
    /* of rank 0: peak bytes of gathered and reduced buffers, bytes sent in the second step */
    double comm, sent;
} account;

static void store_figure(account *a, dt_ctx *ctx, int what, double seen, double by_dt) {
    a->seen[dt_ctx_rank(ctx)][what] = seen;
    a->counted[dt_ctx_rank(ctx)][what] = by_dt;
}

static dt_tensor *layer(dt_tensor *x, void *user) {
    return dt_linear(x, *(dt_tensor **)user, NULL);
}

/* Trains one step. Parameter 0 is used before and after the blocks, like a GPT's tied embedding. */
static void train_once(dt_ctx *ctx, dt_zero *zero, dt_tensor **w) {
    static const float zeros[ROWS * WIDTH];
    float input[ROWS * WIDTH];
    for (int i = 0; i < ROWS * WIDTH; i++) input[i] = (float)((i + dt_ctx_rank(ctx)) % 13) / 13;
    dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(ROWS, WIDTH), input);
    x = dt_linear(x, w[0], NULL);
    for (int i = 1; i < LAYERS; i++) x = dt_block(ctx, layer, x, &w[i]);
    x = dt_linear(x, w[0], NULL);
    dt_backward(dt_mse(x, dt_input(ctx, DT_F32, DT_SHAPE(ROWS, WIDTH), zeros), ROWS * WIDTH));
    dt_reset(ctx);
    dt_zero_step(zero, 1e-4);
}

static dt_status account_main(dt_ctx *ctx, void *user) {
    account *a = (account *)user;
    const dt__heap *heap = (const dt__heap *)dt_ctx_host(ctx)->user;
    int me = dt_ctx_rank(ctx);
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE),
              begin = ((uintptr_t)(heap + 1) + page - 1) / page * page;
    size_t room = (heap->bytes - page) / page * page;
    const char *from = (const char *)begin, *to = from + room;
    dt_tensor *w[LAYERS];
    if (madvise((void *)begin, room, MADV_DONTFORK) != 0)
        return dt_fail(ctx, DT_ERR_MEM, "madvise");
    for (int i = 0; i < LAYERS; i++) {
        char name[8];
        snprintf(name, sizeof name, "w%d", i);
        w[i] = dt_param(ctx, name, DT_SHAPE(WIDTH, WIDTH), DT_NORMAL(0.02));
    }
    pages before = resident(from, to), start = counted(ctx);
    dt_zero *zero = dt_zero_make(
        ctx, (dt_zero_desc){
                 .stage = a->stage, .keep_gathered = a->keep, .bucket_bytes = 4 * WIDTH * WIDTH });
    pages made = resident(from, to);
    dt_memory m = dt_memory_used(ctx);
    store_figure(a, ctx, PARAMS, made.heap - before.heap, (double)m.live[DT_MEM_PARAMS]);
    store_figure(
        a, ctx, OPTIM, made.private_bytes - before.private_bytes, (double)m.live[DT_MEM_OPTIM]);
    train_once(ctx, zero, w);
    size_t first = dt_comm_bytes(ctx, DT_AXIS_DP);
    train_once(ctx, zero, w);
    pages after = resident(from, to), now = counted(ctx);
    m = dt_memory_used(ctx);
    store_figure(a, ctx, GRADS,
        after.heap - made.heap - (double)(m.live[DT_MEM_COMM] + m.live[DT_MEM_ACTS]),
        (double)m.live[DT_MEM_GRADS]);
    store_figure(a, ctx, HEAP, after.heap - before.heap, now.heap - start.heap);
    store_figure(a, ctx, PRIVATE, after.private_bytes - before.private_bytes,
        now.private_bytes - start.private_bytes);
    for (int u = 0; u < dt_bucket_count(ctx) && me == 0; u++) {
        size_t padded = dt_bucket_get(ctx, u)->padded;
        a->padded += padded;
        if (padded > a->largest) a->largest = padded;
    }
    if (me == 0)
        a->comm = (double)m.peak[DT_MEM_COMM],
        a->sent = (double)(dt_comm_bytes(ctx, DT_AXIS_DP) - first);
    return dt_error(ctx);
}

int main(void) {
    for (int code = 0; code < 8; code++) {
        account a = { .stage = code / 2 % 4, .ranks = 2 + 2 * (code % 2) };
        a.keep = a.stage == 3 && a.ranks == 4;
        if (!CHECK(dt_run((dt_run_desc){ .ranks = a.ranks,
                              .backend = DT_BACKEND_PROCS,
                              .timeout_s = 60,
                              .user_bytes = sizeof a },
                       account_main, &a) == DT_OK))
            continue;
        dt_zero_bytes right = dt_zero_formula((dt_zero_formula_desc){ .elements = (double)a.padded,
            .stage = a.stage,
            .ranks = a.ranks,
            .keep_gathered = a.keep });
        const double formula[3] = { right.params, right.optim, right.grads };
        for (int r = 0; r < a.ranks; r++)
            for (int i = 0; i < FIGURES; i++) {
                CHECK_MSG(fabs(a.seen[r][i] - a.counted[r][i]) <= near_bytes,
                    "stage %d, %d ranks, rank %d, %s: %.0f "
                    "bytes resident, %.0f counted",
                    a.stage, a.ranks, r, figures[i], a.seen[r][i], a.counted[r][i]);
                CHECK_MSG(
                    i > GRADS || (a.counted[r][i] == formula[i] && formula[i] > 2 * near_bytes),
                    "stage %d, %d "
                    "ranks, rank %d, %s: %.0f bytes counted, formula %.0f",
                    a.stage, a.ranks, r, figures[i], a.counted[r][i], i > GRADS ? 0 : formula[i]);
            }
        CHECK_MSG(a.sent == right.sent,
            "stage %d, %d ranks: %.0f bytes sent in a step, formula %.0f", a.stage, a.ranks, a.sent,
            right.sent);
        /* gathered parameters: outside the blocks, of a block and of the next block; gradients: of
           the outer bucket, of another bucket and of two that are being reduced */
        double most = a.stage < 2 ? 0 : a.stage == 2 ? 4 : a.keep ? LAYERS + 4 : 7;
        CHECK_MSG(a.comm <= most * 4 * (double)a.largest + (1 << 20),
            "stage %d: gathered and reduced buffers take %.0f bytes, %.2f buckets", a.stage, a.comm,
            a.comm / 4 / (double)a.largest);
        printf("account, stage %d, %d ranks: params %.2f MiB resident, grads %.2f, optim %.2f, all "
               "%.2f; counted "
               "%.2f\n",
            a.stage, a.ranks, a.seen[0][PARAMS] / 1048576, a.seen[0][GRADS] / 1048576,
            a.seen[0][OPTIM] / 1048576, (a.seen[0][HEAP] + a.seen[0][PRIVATE]) / 1048576,
            (a.counted[0][HEAP] + a.counted[0][PRIVATE]) / 1048576);
    }
    return check_done("test_account");
}
