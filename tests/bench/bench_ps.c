/* bench_ps.c - the parameter server: latency of a pull, steps of a table and of dense parameters
   Public domain or MIT, at your choice; see LICENSE.

       bench_ps [--backend procs|tcp|threads] [--rounds 2000]

   One server and one worker, f32, Adagrad, synchronous. Cases, each a line of CSV:

       pull        dt_ps_pull_start and dt_ps_wait of 1,024 distinct keys of a table of 100,000 rows
                   of 16 numbers, one after the other
       step        a training step without a model: 53,248 ids, as 2,048 samples of 26 categories
                   have, about a third of them distinct: pull, dt_ps_add of a gradient for each id,
                   dt_ps_step
       dense       dt_ps_dense_read of matrices 416 x 256 and 256 x 128 and dt_backward of their
                   mean, then dt_ps_step
       copies      twelve copies of the memory of the two matrices: the scale for `dense`

   p50_us and p99_us are microseconds, bytes those that the worker sent and received in one
   operation. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/bench/bench.h"

enum { WIDTH = 16, PULL_KEYS = 1024, ROWS = 100000, IDS = 53248, MOST_ROUNDS = 100000 };
static int n_rounds = 2000;
static const char *backend_name = "procs";
static double seconds[MOST_ROUNDS];

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(const char *name, int n, int64_t keys, int64_t bytes) {
    qsort(seconds, (size_t)n, sizeof *seconds, by_size);
    double p50 = seconds[n / 2], p99 = seconds[n * 99 / 100];
    printf("%s,%s,%lld,%.1f,%.1f,%lld,%.2f\n", name, backend_name, (long long)keys, 1e6 * p50,
        1e6 * p99, (long long)bytes, (double)keys / p50 / 1e6);
    fflush(stdout);
}

static uint64_t next_word(uint64_t *x) {
    *x ^= *x << 13;
    *x ^= *x >> 7;
    return *x ^= *x << 17;
}

static void draw(uint64_t *keys, int n, int skewed, uint64_t *x) {
    for (int i = 0; i < n; i++) {
        double u = (double)(next_word(x) >> 11) * 0x1p-53;
        double row = skewed ? pow(u, -1 / 0.05) - 1 : u * ROWS;
        keys[i] = ((uint64_t)fmod(row, ROWS) + 1) * 0x9E3779B97F4A7C15u;
    }
}

static void time_pulls(dt_ps *ps, int table, uint64_t *keys, float *rows, uint64_t *x) {
    int64_t bytes = dt_ps_info(ps).bytes;
    for (int i = 0; i < n_rounds; i++) {
        draw(keys, PULL_KEYS, 0, x);
        double begin = bench_now();
        dt_ps_wait(ps, dt_ps_pull_start(ps, table, keys, PULL_KEYS, rows));
        seconds[i] = bench_now() - begin;
    }
    print("pull", n_rounds, PULL_KEYS, (dt_ps_info(ps).bytes - bytes) / n_rounds);
}

static void time_steps(
    dt_ps *ps, int table, uint64_t *keys, float *rows, const float *grads, uint64_t *x) {
    int n = n_rounds / 20 + 1;
    int64_t bytes = dt_ps_info(ps).bytes;
    for (int i = 0; i < n; i++) {
        draw(keys, IDS, 1, x);
        double begin = bench_now();
        dt_ps_wait(ps, dt_ps_pull_start(ps, table, keys, IDS, rows));
        dt_ps_add(ps, table, keys, IDS, grads);
        dt_ps_step(ps, 0.01);
        seconds[i] = bench_now() - begin;
    }
    print("step", n, IDS, (dt_ps_info(ps).bytes - bytes) / n);
}

static void time_dense(dt_ctx *ctx, dt_ps *ps, const int *tables) {
    int n = n_rounds / 4 + 1;
    int64_t bytes = dt_ps_info(ps).bytes;
    for (int i = 0; i < n; i++) {
        double begin = bench_now();
        dt_tensor *a = dt_ps_dense_read(ps, tables[0]), *b = dt_ps_dense_read(ps, tables[1]);
        dt_backward(dt_add(dt_mean_dims(a, (dt_reduce_desc){ .n = 0 }),
            dt_mean_dims(b, (dt_reduce_desc){ .n = 0 })));
        dt_reset(ctx);
        dt_ps_step(ps, 0.01);
        seconds[i] = bench_now() - begin;
    }
    const size_t matrices = (416 * 256 + 256 * 128) * sizeof(float);
    print("dense", n, 0, (dt_ps_info(ps).bytes - bytes) / n);
    char *memory = (char *)calloc(2, matrices);
    for (int i = 0; i < n && memory; i++) {
        double begin = bench_now();
        for (int k = 0; k < 12; k++)
            memmove(memory + (k % 2 ? matrices : 0), memory + (k % 2 ? 0 : matrices), matrices);
        seconds[i] = bench_now() - begin;
    }
    print("copies", n, 0, 12 * (int64_t)matrices);
    free(memory);
}

static dt_status rank_main(dt_ctx *ctx, void *user) {
    (void)user;
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = 1 });
    dt_table_desc desc = {
        .name = "t", .width = WIDTH, .init = DT_UNIFORM(0.01), .optimizer = DT_TABLE_ADAGRAD
    };
    int table = dt_ps_table(ps, desc), dense[2];
    desc.name = "up";
    dense[0] = dt_ps_dense(ps, desc, DT_SHAPE(416, 256));
    desc.name = "down";
    dense[1] = dt_ps_dense(ps, desc, DT_SHAPE(256, 128));
    if (dt_ps_is_server(ps)) return dt_ps_serve(ps);
    uint64_t *keys = (uint64_t *)malloc(ROWS * sizeof *keys), x = 88172645463325252u;
    float *rows = (float *)malloc(ROWS * WIDTH * sizeof *rows);
    float *grads = (float *)malloc(ROWS * WIDTH * sizeof *grads);
    for (int i = 0; i < ROWS * WIDTH; i++) grads[i] = (float)(next_word(&x) % 1000) / 500 - 1;
    for (uint64_t i = 0; i < ROWS; i++) keys[i] = (i + 1) * 0x9E3779B97F4A7C15u;
    dt_ps_add(ps, table, keys, ROWS, grads); /* makes all rows */
    dt_ps_step(ps, 0.01);
    time_pulls(ps, table, keys, rows, &x);
    time_steps(ps, table, keys, rows, grads, &x);
    time_dense(ctx, ps, dense);
    free(keys);
    free(rows);
    free(grads);
    dt_ps_end(ps);
    return dt_error(ctx);
}

static int run_ranks(dt_backend backend) {
    dt_run_desc d = { .ranks = 2, .backend = backend };
    pid_t child = 0;
    char address[32];
    if (backend == DT_BACKEND_TCP) {
        snprintf(address, sizeof address, "127.0.0.1:%d", 20000 + (int)getpid() % 12000);
        d.rendezvous = address;
        fflush(stdout);
        child = fork();
        d.rank = child == 0;
    }
    dt_status status = dt_run(d, rank_main, NULL);
    if (backend == DT_BACKEND_TCP && child == 0) _exit(status != DT_OK);
    if (child > 0) waitpid(child, NULL, 0);
    return status != DT_OK;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int at = i;
        const char *v;
        if ((v = bench_option(argc, argv, &i, "--backend")))
            backend_name = v;
        else if ((v = bench_option(argc, argv, &i, "--rounds")))
            n_rounds = atoi(v);
        else
            bench_refuse(argc, argv, at, "--backend procs|tcp|threads, --rounds N");
    }
    if (n_rounds < 1 || n_rounds > MOST_ROUNDS) n_rounds = 2000;
    int is_tcp = strcmp(backend_name, "tcp") == 0,
        is_threads = strcmp(backend_name, "threads") == 0;
    bench_print_machine();
    printf("case,backend,keys,p50_us,p99_us,bytes,millions_per_s\n");
    return run_ranks(is_tcp ? DT_BACKEND_TCP : is_threads ? DT_BACKEND_THREADS : DT_BACKEND_PROCS);
}
