/* bench.h - shared by the benchmarks: bursts, matrix products, and OpenBLAS as a peer
   Public domain or MIT, at your choice; see LICENSE.

   Include it after dt_tensor.h or a header that includes dt_tensor.h. Everything is static.

   The speed of a shared machine drifts, so figures from different minutes are not compared. dt and
   its peer run in turns, in short bursts, in one process; the best burst of each counts, in
   processor time.

   A peer is a library that a program looks for when it runs; it is never linked. Each program
   prints the peers that it found in lines that begin with #. */
#ifndef BENCH_H
#define BENCH_H

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static inline double bench_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Processor time of this thread in seconds, on which other load has little influence. */
static inline double bench_thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Prints the first line of every benchmark: the processor and the number of cores. */
static inline void bench_print_machine(void) {
    char line[512], model[256] = "unknown processor";
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %255[^\n]", model) == 1) break;
    if (f) fclose(f);
    printf("# machine: %s, %ld cores\n", model, sysconf(_SC_NPROCESSORS_ONLN));
}

/* The value of option `name`, written --name V or --name=V at argv[*i]. NULL if argv[*i] is another
   option. */
static inline const char *bench_option(int argc, char **argv, int *i, const char *name) {
    size_t length = strlen(name);
    if (strncmp(argv[*i], name, length) != 0) return NULL;
    if (argv[*i][length] == '=') return argv[*i] + length + 1;
    return argv[*i][length] == 0 && *i + 1 < argc ? argv[++*i] : NULL;
}

/* Ends the program: argv[i] is not an option, or its value is not valid. */
static inline void bench_refuse(int argc, char **argv, int i, const char *options) {
    fprintf(stderr, "error: %s: the options are %s\n", argv[i < argc ? i : argc - 1], options);
    exit(2);
}

/* Formats a number for CSV: nan unless it is finite. */
static inline const char *bench_number(char *text, size_t room, double x, const char *format) {
    if (isfinite(x))
        snprintf(text, room, format, x);
    else
        snprintf(text, room, "nan");
    return text;
}

// ==== OpenBLAS ==================================================================================

typedef void (*bench_sgemm)(int, int, int, int, int, int, float, const float *, int, const float *,
    int, float, float *, int);
typedef void (*bench_dgemm)(int, int, int, int, int, int, double, const double *, int,
    const double *, int, double, double *, int);
typedef void (*bench_sbgemm)(int, int, int, int, int, int, float, const uint16_t *, int,
    const uint16_t *, int, float, float *, int);
enum { BENCH_ROW_MAJOR = 101, BENCH_PLAIN = 111, BENCH_TRANSPOSED = 112 }; /* cblas.h's numbers */

typedef struct bench_blas {
    void *library; /* NULL: not found */
    bench_sgemm f32;
    bench_dgemm f64;
    bench_sbgemm bf16; /* NULL if this build has none; the result is f32 */
    char name[96];     /* "openblas-0.3.21-SkylakeX" */
} bench_blas;

static inline void *bench_symbol(void *library, const char *name) {
    return library ? dlsym(library, name) : NULL;
}

/* Loads OpenBLAS into this process, with one thread. */
static inline bench_blas bench_blas_load(const char *path) {
    static const char *const places[] = { "libopenblas.so.0", "libopenblas.so" };
    bench_blas b = { NULL, NULL, NULL, NULL, "none" };
    if (path) b.library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (int i = 0; !path && !b.library && i < 2; i++)
        b.library = dlopen(places[i], RTLD_NOW | RTLD_LOCAL);
    *(void **)&b.f32 = bench_symbol(b.library, "cblas_sgemm");
    *(void **)&b.f64 = bench_symbol(b.library, "cblas_dgemm");
    *(void **)&b.bf16 = bench_symbol(b.library, "cblas_sbgemm");
    void (*threads)(int);
    char *(*core)(void), *(*config)(void);
    *(void **)&threads = bench_symbol(b.library, "openblas_set_num_threads");
    *(void **)&core = bench_symbol(b.library, "openblas_get_corename");
    *(void **)&config = bench_symbol(b.library, "openblas_get_config");
    if (!b.f32 || !b.f64 || !threads) {
        b.library = NULL;
        return b;
    }
    threads(1);
    char version[32] = "";
    if (config) sscanf(config(), "OpenBLAS %31s", version);
    snprintf(b.name, sizeof b.name, "openblas-%s-%s", version, core ? core() : "");
    return b;
}

/* The best GFLOP/s of a product of 768 x 768 x 768 in a quarter of a second. */
static inline double bench_blas_rate(const bench_blas *b) {
    enum { N = 768 };
    float *x = (float *)calloc(3 * N * N, sizeof *x);
    double best = 0, end = bench_now() + 0.25;
    while (x && bench_now() < end) {
        double start = bench_thread_seconds();
        b->f32(BENCH_ROW_MAJOR, BENCH_PLAIN, BENCH_PLAIN, N, N, N, 1, x, N, x + N * N, N, 0,
            x + 2 * N * N, N);
        best = fmax(best, 2e-9 * N * N * N / (bench_thread_seconds() - start));
    }
    free(x);
    return best;
}

/* The rate of OpenBLAS with the kernels for processor `core`; 0 on failure. Measured in a child
   process, because OpenBLAS reads the name when it is loaded, and kernels for another processor may
   crash. */
static inline double bench_blas_try(const char *path, const char *core) {
    int pipe_of[2], status;
    double rate = 0;
    fflush(stdout);
    if (pipe(pipe_of) != 0) return 0;
    pid_t child = fork();
    if (child == 0) {
        if (*core) setenv("OPENBLAS_CORETYPE", core, 1);
        bench_blas b = bench_blas_load(path);
        rate = b.library ? bench_blas_rate(&b) : 0;
        _exit(write(pipe_of[1], &rate, sizeof rate) != sizeof rate);
    }
    close(pipe_of[1]);
    if (child < 0 || read(pipe_of[0], &rate, sizeof rate) != sizeof rate) rate = 0;
    close(pipe_of[0]);
    if (child > 0) waitpid(child, &status, 0);
    return rate;
}

/* OpenBLAS with the kernels that are fastest on this machine. By default a build that is older than
   the processor takes the kernels of a much older processor. */
static inline bench_blas bench_blas_find(const char *path) {
#if defined(__aarch64__)
    static const char *const cores[] = { "", "NEOVERSEV1", "NEOVERSEN1", "ARMV8" };
#else
    static const char *const cores[] = { "", "SapphireRapids", "Cooperlake", "SkylakeX", "Haswell",
        "Zen" };
#endif
    int n = (int)(sizeof cores / sizeof *cores), best = 0;
    double rate[sizeof cores / sizeof *cores];
    bench_blas b = { NULL, NULL, NULL, NULL, "none" };
    for (int i = 0; i < n; i++) {
        rate[i] = bench_blas_try(path, cores[i]);
        if (rate[i] > 1.02 * rate[best]) best = i;
        if (rate[0] == 0) break;
    }
    if (rate[0] > 0) {
        printf("# OpenBLAS, GFLOP/s of 768 x 768 x 768 by OPENBLAS_CORETYPE:");
        for (int i = 0; i < n; i++)
            if (rate[i] > 0) printf(" %s %.0f", *cores[i] ? cores[i] : "(unset)", rate[i]);
        if (*cores[best]) setenv("OPENBLAS_CORETYPE", cores[best], 1);
        b = bench_blas_load(path);
        printf("\n# peer: %s\n", b.name);
    } else {
        printf("# peer: OpenBLAS is not installed%s%s; on Debian: apt-get install "
               "libopenblas0-pthread, elsewhere give "
               "--openblas PATH\n",
            path ? " at " : "", path ? path : "");
    }
    return b;
}

// ==== PyTorch ===================================================================================

/* A process of a script of tests/bench/peers, and pipes to and from it. First the script prints the
   version of PyTorch, then it answers each line with a line. */
typedef struct bench_peer {
    pid_t pid; /* 0: none */
    FILE *ask, *answer;
    char name[96]; /* "pytorch-2.15.0" */
} bench_peer;

static inline void bench_peer_end(bench_peer *p) {
    if (p->pid <= 0) return;
    fclose(p->ask);
    fclose(p->answer);
    waitpid(p->pid, NULL, 0);
    p->pid = 0;
}

/* The peer ends by itself after limit_s, so that one that hangs does not stop the benchmark. */
static inline bench_peer bench_peer_start(const char *python, const char *script, double limit_s) {
    bench_peer p = { 0, NULL, NULL, "none" };
    int to[2], from[2];
    char version[64] = "";
    fflush(stdout);
    if (pipe(to) != 0 || pipe(from) != 0) return p;
    p.pid = fork();
    if (p.pid == 0) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        close(to[1]);
        close(from[0]);
        alarm((unsigned)limit_s);
        if (freopen("/dev/null", "w", stderr)) execlp(python, python, script, (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    p.ask = fdopen(to[1], "w");
    p.answer = fdopen(from[0], "r");
    if (p.pid > 0 && fgets(version, sizeof version, p.answer)) {
        version[strcspn(version, "\n")] = 0;
        snprintf(p.name, sizeof p.name, "pytorch-%s", version);
        printf("# peer: %s\n", p.name);
    } else {
        bench_peer_end(&p);
        printf("# peer: PyTorch is not installed for %s; give --python PATH\n", python);
    }
    return p;
}

// ==== Products ==================================================================================

/* c (m,n) = A (m,k) B (k,n); A is stored (k,m) with trans_a, B (n,k) with trans_b. */
typedef struct bench_product {
    dt_dtype dtype;
    int m, n, k, trans_a, trans_b;
    void *a, *b, *c, *work;
    size_t work_bytes;
    const bench_blas *blas;
} bench_product;

/* Pseudo-random values in [-1,1); bf16 takes the upper half of a float. */
static inline void *bench_operand(dt_dtype dtype, size_t count, uint32_t seed) {
    size_t size = dt_dtype_size(dtype);
    void *p = aligned_alloc(64, (count * size + 63) / 64 * 64);
    for (size_t i = 0; p && i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        float x = (float)(int32_t)seed / 2147483648.0f;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (dtype == DT_F64)
            ((double *)p)[i] = x;
        else if (dtype == DT_BF16)
            ((uint16_t *)p)[i] = (uint16_t)(bits >> 16);
        else
            ((float *)p)[i] = x;
    }
    return p;
}

static inline void bench_product_free(bench_product *p) {
    free(p->a);
    free(p->b);
    free(p->c);
    free(p->work);
    p->a = p->b = p->c = p->work = NULL;
}

/* Allocates and fills the operands; 0 if out of memory. The result of bf16 operands has space for
   f32. */
static inline int bench_product_make(bench_product *p, uint32_t seed) {
    size_t m = (size_t)p->m, n = (size_t)p->n, k = (size_t)p->k;
    p->work_bytes = dt_matmul_work(p->n, p->k, p->dtype);
    p->a = bench_operand(p->dtype, m * k, seed);
    p->b = bench_operand(p->dtype, k * n, seed + 1);
    p->c = bench_operand(p->dtype == DT_F64 ? DT_F64 : DT_F32, m * n, seed + 2);
    p->work = aligned_alloc(64, (p->work_bytes + 63) / 64 * 64);
    if (p->a && p->b && p->c && p->work) return 1;
    bench_product_free(p);
    return 0;
}

static inline dt_status bench_product_dt(const bench_product *p) {
    dt_matmul_args args = { .dtype = p->dtype,
        .c = p->c,
        .a = p->a,
        .b = p->b,
        .m = p->m,
        .n = p->n,
        .k = p->k,
        .trans_a = p->trans_a,
        .trans_b = p->trans_b,
        .work = p->work,
        .work_bytes = p->work_bytes };
    return dt_kernels_cpu()->matmul(&args, NULL);
}

static inline void bench_product_blas(const bench_product *p) {
    int ta = p->trans_a ? BENCH_TRANSPOSED : BENCH_PLAIN,
        tb = p->trans_b ? BENCH_TRANSPOSED : BENCH_PLAIN;
    int lda = p->trans_a ? p->m : p->k, ldb = p->trans_b ? p->k : p->n, row = BENCH_ROW_MAJOR;
    if (p->dtype == DT_F64)
        p->blas->f64(row, ta, tb, p->m, p->n, p->k, 1, (const double *)p->a, lda,
            (const double *)p->b, ldb, 0, (double *)p->c, p->n);
    else if (p->dtype == DT_BF16)
        p->blas->bf16(row, ta, tb, p->m, p->n, p->k, 1, (const uint16_t *)p->a, lda,
            (const uint16_t *)p->b, ldb, 0, (float *)p->c, p->n);
    else
        p->blas->f32(row, ta, tb, p->m, p->n, p->k, 1, (const float *)p->a, lda,
            (const float *)p->b, ldb, 0, (float *)p->c, p->n);
}

static inline double bench_product_gflop(const bench_product *p) {
    return 2e-9 * (double)p->m * (double)p->n * (double)p->k;
}

// ==== Triad =====================================================================================

/* The triad a[i] = b[i] + s c[i] of J. McCalpin's STREAM over arrays of n floats. It moves three
   times 4 bytes per element: the memory rate of one core. */
typedef struct bench_triad {
    float *a, *b, *c;
    size_t n;
} bench_triad;

static inline void bench_triad_free(bench_triad *t) {
    free(t->a);
    free(t->b);
    free(t->c);
    t->a = t->b = t->c = NULL;
}

/* 0 if out of memory. */
static inline int bench_triad_make(bench_triad *t, size_t n) {
    *t = (bench_triad){ (float *)bench_operand(DT_F32, n, 1), (float *)bench_operand(DT_F32, n, 2),
        (float *)bench_operand(DT_F32, n, 3), n };
    if (t->a && t->b && t->c) return 1;
    bench_triad_free(t);
    return 0;
}

/* Processor time of one pass. */
static inline double bench_triad_seconds(const bench_triad *t) {
    float *restrict a = t->a;
    const float *restrict b = t->b, *restrict c = t->c;
    double start = bench_thread_seconds();
    for (size_t i = 0; i < t->n; i++) a[i] = b[i] + 3 * c[i];
    return bench_thread_seconds() - start;
}

/* Arrays of this size are beyond the caches. */
#define BENCH_TRIAD_BYTES (64 << 20)

/* The best rate of ten passes in GB/s; 0 if out of memory. */
static inline double bench_triad_gbs(void) {
    bench_triad t;
    double best = INFINITY;
    if (!bench_triad_make(&t, BENCH_TRIAD_BYTES / sizeof(float))) return 0;
    for (int pass = 0; pass < 10; pass++) best = fmin(best, bench_triad_seconds(&t));
    bench_triad_free(&t);
    return 3e-9 * BENCH_TRIAD_BYTES / best;
}

// ==== Bursts ====================================================================================

enum { BENCH_DT = 0, BENCH_BLAS };

/* The work of one thread in a burst: dt or the peer multiplies `calls` times. */
typedef struct bench_burst {
    const bench_product *product;
    int who, calls;
    double seconds; /* processor time taken */
} bench_burst;

/* GFLOP/s of all threads together, by wall-clock time and by processor time. The latter is the rate
   if each thread had a core to itself. */
typedef struct bench_rate {
    double wall, processor;
} bench_rate;

static inline void *bench_burst_thread(void *user) {
    bench_burst *b = (bench_burst *)user;
    double start = bench_thread_seconds();
    for (int i = 0; i < b->calls; i++) {
        if (b->who == BENCH_DT)
            bench_product_dt(b->product);
        else
            bench_product_blas(b->product);
    }
    b->seconds = bench_thread_seconds() - start;
    return NULL;
}

/* Runs a burst in each of `threads` threads; each thread has its own product. */
static inline bench_rate bench_burst_run(
    const bench_product *products, int threads, int who, int calls) {
    enum { MOST = 64 };
    pthread_t thread[MOST];
    bench_burst burst[MOST];
    bench_rate rate = { 0, 0 };
    double start = bench_now(), gflop = calls * bench_product_gflop(products);
    int n = threads < MOST ? threads : MOST, made[MOST] = { 0 };
    for (int i = 0; i < n; i++) burst[i] = (bench_burst){ &products[i], who, calls, 0 };
    for (int i = 1; i < n; i++)
        made[i] = pthread_create(&thread[i], NULL, bench_burst_thread, &burst[i]) == 0;
    bench_burst_thread(&burst[0]);
    for (int i = 1; i < n; i++) {
        if (made[i])
            pthread_join(thread[i], NULL);
        else
            bench_burst_thread(&burst[i]);
    }
    rate.wall = n * gflop / (bench_now() - start);
    for (int i = 0; i < n; i++) rate.processor += gflop / fmax(burst[i].seconds, 1e-9);
    return rate;
}

/* The number of calls in a burst: one, or as many as take 10 ms. */
static inline int bench_calls(const bench_product *product, int who) {
    bench_burst once = { product, who, 1, 0 };
    bench_burst_thread(&once);
    double calls = 0.01 / fmax(once.seconds, 1e-7);
    return calls < 1 ? 1 : (int)calls;
}

#endif /* BENCH_H */
