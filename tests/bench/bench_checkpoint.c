/* bench_checkpoint.c - a save compared with plain writes, and the cost of saves in the background
   Public domain or MIT, at your choice; see LICENSE.

       bench_checkpoint [--mib 1024] [--dir .] [--repeat 7]

   Two ranks save a checkpoint of --mib MiB, with ZeRO-1 and Adam in f32. Before each save two
   threads write as many bytes into one file, half each, 4 MiB a call, and sync it: that is the
   disk's own time. The speed of a shared disk drifts by more than the difference, so the result is
   the median of the ratios of each save to the write before it. Then two ranks train a GPT and save
   in the background every few steps. The time of the step after a save is compared with that of the
   steps before, by medians too. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "examples/train.h"
#include "tests/bench/bench.h"
#include <fcntl.h>

enum { MOST = 64, PIECE = 4 << 20 };
static char dir[400] = ".", folder[440];
static int64_t mib = 1024;
static int repeat = 7;

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

// ==== The disk alone ============================================================================

typedef struct half {
    const char *path;
    const char *data;
    int64_t from, bytes;
} half;

static void *write_half(void *user) {
    const half *h = (const half *)user;
    int fd = open(h->path, O_RDWR);
    for (int64_t at = 0, n; fd >= 0 && at < h->bytes; at += n) {
        n = h->bytes - at < PIECE ? h->bytes - at : PIECE;
        n = pwrite(fd, h->data + at % (8 * PIECE), (size_t)n, h->from + at);
        if (n <= 0) abort();
    }
    if (fd < 0 || fsync(fd) != 0 || close(fd) != 0) abort();
    return NULL;
}

static double disk_alone(int64_t bytes) {
    static char *data;
    char path[460];
    pthread_t thread[2];
    half h[2];
    if (!data) data = (char *)malloc(9 * PIECE);
    for (size_t i = 0; i < 9 * (size_t)PIECE; i++) data[i] = (char)(i * 2654435761u >> 13);
    snprintf(path, sizeof path, "%s/disk-alone", dir);
    double begin = bench_now();
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || ftruncate(fd, bytes) != 0) abort();
    for (int i = 0; i < 2; i++) {
        h[i] = (half){ path, data, bytes / 2 * i, bytes / 2 };
        if (pthread_create(&thread[i], NULL, write_half, &h[i]) != 0) abort();
    }
    for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
    double seconds = bench_now() - begin;
    close(fd);
    unlink(path);
    return seconds;
}

static void clear(const char *path) {
    char command[500];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    if (system(command) != 0) abort();
}

static dt_status saving(dt_ctx *ctx, void *user) {
    dt_comm *world = dt_world(ctx);
    int first = dt_comm_rank(world) == 0;
    double disk[MOST], save[MOST], ratio[MOST];
    char name[32];
    (void)user;
    for (int i = 0; i < 16; i++) {
        snprintf(name, sizeof name, "w%d", i);
        dt_param(ctx, name, DT_SHAPE(mib * 1048576 / 12 / 16 / 1024, 1024), DT_NORMAL(0.1));
    }
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = 1 });
    dt_checkpoint *c = dt_checkpoint_open(zero, (dt_checkpoint_desc){ .dir = folder });
    for (int i = 0; i < repeat && dt_error(ctx) == DT_OK; i++) {
        if (first) disk[i] = disk_alone(mib * 1048576);
        dt_barrier(world);
        double begin = bench_now();
        dt_checkpoint_save(c);
        dt_barrier(world);
        save[i] = bench_now() - begin;
        if (first) ratio[i] = save[i] / disk[i];
        if (first) printf("%d,%.3f,%.3f,%.2f\n", i + 1, disk[i], save[i], ratio[i]);
        if (first) clear(dt_checkpoint_path(c)); /* outside of both times */
    }
    if (first && dt_error(ctx) == DT_OK) {
        double r = median(ratio, repeat), d = median(disk, repeat), s = median(save, repeat);
        printf("# %lld MiB by 2 ranks: disk %.3f s, save %.3f s, median ratio %.2f\n",
            (long long)mib, d, s, r);
    }
    dt_checkpoint_close(c);
    return dt_error(ctx);
}

// ==== Saves in the background ===================================================================

enum { EVERY = 4, STEPS = 48 };
static double step_ms[STEPS + 1];
static void on_step(dt_ctx *ctx, const train_row *row, void *user) {
    (void)ctx, (void)user;
    step_ms[row->step] = row->ms;
}

static void background(void) {
    train_config c = { .model = { .layers = 6,
                           .width = 384,
                           .heads = 6,
                           .kv_heads = 6,
                           .ffn = 1536,
                           .seq = 128,
                           .vocab = 256,
                           .tied = 1 },
        .mesh = { 2, 1, 1, 1, 1 },
        .zero = { .stage = 1 },
        .lr = { .peak = 1e-3, .steps = STEPS },
        .seq = 128,
        .micro_batch = 8,
        .accum = 1,
        .stop_at = STEPS,
        .save = folder,
        .save_every = EVERY,
        .keep = 1,
        .background = 1,
        .on_step = on_step };
    double after[STEPS], before[STEPS];
    int n = 0;
    if (!train_files_find_sources(&c.data) ||
        dt_run((dt_run_desc){ .ranks = 2 }, train, &c) != DT_OK)
        return;
    for (int s = 2 * EVERY; s < STEPS;
         s += EVERY, n++) { /* the first save also allocates its memory */
        after[n] = step_ms[s + 1];
        before[n] = (step_ms[s - 1] + step_ms[s]) / 2;
    }
    double ratio[STEPS];
    for (int i = 0; i < n; i++) ratio[i] = after[i] / before[i];
    printf("# background: %.1f M parameters, a step %.1f ms, the step after a save %.1f ms, median "
           "ratio %.3f of %d\n",
        (double)gpt_param_count(c.model) / 1e6, median(before, n), median(after, n),
        median(ratio, n), n);
    train_files_free(&c.data);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *text;
        if ((text = bench_option(argc, argv, &i, "--mib")))
            mib = atoll(text);
        else if ((text = bench_option(argc, argv, &i, "--dir")))
            snprintf(dir, sizeof dir, "%s", text);
        else if ((text = bench_option(argc, argv, &i, "--repeat")))
            repeat = atoi(text);
        else
            return fprintf(stderr, "bench_checkpoint [--mib 1024] [--dir .] [--repeat 7]\n"), 2;
    }
    if (repeat < 1 || repeat > MOST || mib < 1) return 2;
    bench_print_machine();
    snprintf(folder, sizeof folder, "%s/bench-checkpoint.%d", dir, (int)getpid());
    puts("run,disk_s,save_s,ratio");
    int failed = dt_run((dt_run_desc){ .ranks = 2 }, saving, NULL) != DT_OK;
    clear(folder);
    if (!failed) background();
    clear(folder);
    return failed;
}
