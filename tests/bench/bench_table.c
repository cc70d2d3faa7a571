/* bench_table.c - sparse tables: pull, push, training steps, memory, snapshots
   Public domain or MIT, at your choice; see LICENSE.

       bench_table [--rows 4000000] [--ids 53248] [--dir .]

   One core, f32, row-wise Adagrad. A batch has --ids ids, as 2,048 samples of 26 categories have.
   The keys of a batch are uniform over all rows, or skewed (Zipf-like, about a third of a batch is
   distinct). A step pulls the row of every id and pushes a gradient for every id, so it finds the
   repeated ids, sums their gradients and updates each row once. Figures are of the fastest of 30
   batches, as a shared machine disturbs some. A peer runs only if it is installed:
   tests/bench/peers has none for tables. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/bench/bench.h"

enum { BATCHES = 30 };
static int64_t n_rows = 4000000, n_ids = 53248;
static const char *dir = ".";
static double skew = 0.05;                /* larger: more ids belong to few keys */
static int64_t step_fetched, step_pushed; /* spilled rows and all rows of the timed steps */

static uint64_t next_word(uint64_t *x) {
    *x ^= *x << 13;
    *x ^= *x >> 7;
    return *x ^= *x << 17;
}

/* Keys are scattered, as hashed categories are. */
static uint64_t key_of(uint64_t row) { return (row + 1) * 0x9E3779B97F4A7C15u; }

static void draw(uint64_t *keys, int64_t n, int skewed, uint64_t *x) {
    for (int64_t i = 0; i < n; i++) {
        double u = (double)(next_word(x) >> 11) * 0x1p-53;
        double row = skewed ? pow(u, -1 / skew) - 1 : u * (double)n_rows;
        keys[i] = key_of((uint64_t)fmod(row, (double)n_rows));
    }
}

/* Makes all rows. */
static void fill(dt_table *t, uint64_t *keys, float *grads, int width) {
    memset(grads, 0, (size_t)n_ids * (size_t)width * sizeof *grads);
    for (int64_t at = 0; at < n_rows; at += n_ids) {
        int64_t n = n_rows - at < n_ids ? n_rows - at : n_ids;
        for (int64_t i = 0; i < n; i++) keys[i] = key_of((uint64_t)(at + i));
        dt_table_push_desc d = { .lr = 0, .clock = 1, .unique = 1 };
        dt_table_push(t, keys, (size_t)n, grads, d);
    }
}

/* Returns the seconds of the fastest step. */
static double time_batches(
    dt_table *t, int width, int skewed, uint64_t *keys, float *rows, float *grads) {
    uint64_t x = 88172645463325252u;
    double pull = 1e9, push = 1e9, step = 1e9;
    int64_t distinct = 0;
    for (int64_t i = 0; i < n_ids * width; i++) grads[i] = (float)(next_word(&x) % 1000) / 500 - 1;
    for (int b = 0; b < BATCHES; b++) {
        draw(keys, n_ids, skewed, &x);
        int64_t clock = dt_table_info(t).clock + 1;
        dt_table_push_desc d = { .lr = 0.01, .clock = clock };
        dt_table_push_desc unique = { .lr = 0.01, .clock = clock, .unique = 1 };
        double begin = bench_now();
        dt_table_pull(t, keys, (size_t)n_ids, rows);
        double pulled = bench_now();
        dt_table_push(t, keys, (size_t)n_ids, grads, unique);
        double pushed = bench_now();
        draw(keys, n_ids, skewed, &x);
        dt_table_stats before = dt_table_info(t);
        double start = bench_now();
        dt_table_pull(t, keys, (size_t)n_ids, rows);
        dt_table_push(t, keys, (size_t)n_ids, grads, d);
        double end = bench_now();
        distinct = dt_table_info(t).pushed - before.pushed;
        step_fetched += dt_table_info(t).fetched - before.fetched;
        step_pushed += distinct;
        pull = pulled - begin < pull ? pulled - begin : pull;
        push = pushed - pulled < push ? pushed - pulled : push;
        step = end - start < step ? end - start : step;
    }
    double millions = (double)n_ids / 1e6;
    printf("width %2d %-7s  pull %5.1f M keys/s   push %5.1f M keys/s   step %5.1f M ids/s   "
           "%.0f %% distinct\n",
        width, skewed ? "skewed" : "uniform", millions / pull, millions / push, millions / step,
        100.0 * (double)distinct / (double)n_ids);
    return step;
}

static void time_snapshots(dt_ctx *ctx, dt_table *t, int width) {
    char folder[500], path[600];
    double best[2] = { 1e9, 1e9 };
    int64_t bytes = 0;
    snprintf(folder, sizeof folder, "%s/bench-table.%d", dir, (int)getpid());
    for (int i = 0; i < 3; i++) {
        dt_table_save_desc save = { 0, 1 };
        double begin = bench_now();
        if (dt_table_save(t, folder, save) != DT_OK) break;
        double end = bench_now();
        best[0] = end - begin < best[0] ? end - begin : best[0];
        char name[64];
        dt_checkpoint_newest(dt_ctx_io(ctx), folder, name, sizeof name);
        snprintf(path, sizeof path, "%s/%s/table.bin", folder, name);
        int fd = dt_ctx_io(ctx)->open(NULL, path, DT_IO_READ);
        bytes = dt_ctx_io(ctx)->size(NULL, fd);
        dt_ctx_io(ctx)->close(NULL, fd);
    }
    dt_table_load_desc load = { 0 };
    double begin = bench_now();
    dt_table_load(t, folder, load);
    best[1] = bench_now() - begin;
    printf("width %2d base snapshot: %.0f MB, save %.2f GB/s, load %.2f GB/s\n", width,
        (double)bytes / 1e6, (double)bytes / 1e9 / best[0], (double)bytes / 1e9 / best[1]);
    snprintf(path, sizeof path, "rm -rf '%s'", folder);
    if (system(path) != 0) printf("# %s is left\n", folder);
}

/* A quarter of the rows in memory, the others spilled. The ratio is to the same steps in memory. */
static void time_spilled(double in_memory, uint64_t *keys, float *rows, float *grads) {
    enum { WIDTH = 16 };
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = dt_kernels_cpu() });
    dt_table_desc desc = { .name = "spilled",
        .width = WIDTH,
        .init = DT_UNIFORM(0.01),
        .optimizer = DT_TABLE_ROWWISE_ADAGRAD,
        .memory_limit = (size_t)n_rows * (WIDTH * 4 + 12) / 4,
        .spill = dir };
    dt_table *t = dt_table_make(ctx, desc);
    fill(t, keys, grads, WIDTH);
    step_fetched = step_pushed = 0;
    double step = time_batches(t, WIDTH, 1, keys, rows, grads);
    dt_table_stats s = dt_table_info(t);
    printf(
        "width 16 with %.0f %% of the rows spilled: %.2f of the step's speed in memory; in memory "
        "are %.1f %% of the ids of a step, %.0f %% of its distinct keys\n",
        100.0 * (double)s.spilled / (double)s.rows, in_memory / step,
        100 - 100.0 * (double)step_fetched / (double)(BATCHES * n_ids),
        100 - 100.0 * (double)step_fetched / (double)step_pushed);
    if (dt_error(ctx) != DT_OK) printf("error: %s\n", dt_error_text(ctx));
    dt_ctx_free(ctx);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int at = i;
        const char *v;
        if ((v = bench_option(argc, argv, &i, "--rows")))
            n_rows = atoll(v);
        else if ((v = bench_option(argc, argv, &i, "--ids")))
            n_ids = atoll(v);
        else if ((v = bench_option(argc, argv, &i, "--dir")))
            dir = v;
        else
            bench_refuse(argc, argv, at, "--rows N, --ids N, --dir FOLDER");
    }
    bench_print_machine();
    for (int width = 16; width <= 64; width *= 4) {
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = dt_kernels_cpu() });
        dt_table_desc desc = { .name = "t",
            .width = width,
            .init = DT_UNIFORM(0.01),
            .optimizer = DT_TABLE_ROWWISE_ADAGRAD };
        dt_table *t = dt_table_make(ctx, desc);
        size_t elements = (size_t)n_ids * (size_t)width;
        uint64_t *keys = (uint64_t *)malloc((size_t)n_ids * sizeof *keys);
        float *rows = (float *)malloc(elements * sizeof *rows);
        float *grads = (float *)malloc(elements * sizeof *grads);
        double begin = bench_now();
        fill(t, keys, grads, width);
        double end = bench_now();
        dt_table_stats s = dt_table_info(t);
        double row = (double)width * 4 + 4;
        printf("width %2d making %lld rows: %.1f M rows/s; %.1f bytes a row (a row has %.0f, the "
               "limit is %.1f)\n",
            width, (long long)s.rows, (double)s.rows / 1e6 / (end - begin),
            (double)dt_memory_used(ctx).live_total / (double)s.rows, row, 1.35 * row + 16);
        time_batches(t, width, 0, keys, rows, grads);
        double step = time_batches(t, width, 1, keys, rows, grads);
        time_snapshots(ctx, t, width);
        if (dt_error(ctx) != DT_OK) printf("error: %s\n", dt_error_text(ctx));
        if (width == 16) time_spilled(step, keys, rows, grads);
        if (width == 16) { /* about 90 % of the ids in memory */
            skew = 0.22;
            step = time_batches(t, width, 1, keys, rows, grads);
            time_spilled(step, keys, rows, grads);
            skew = 0.05;
        }
        free(keys);
        free(rows);
        free(grads);
        dt_ctx_free(ctx);
    }
    return 0;
}
