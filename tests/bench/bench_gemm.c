/* bench_gemm.c - dt's matrix product on the CPU compared with OpenBLAS
   Public domain or MIT, at your choice; see LICENSE.

       make build/bench_gemm && build/bench_gemm [--quick] [--seconds X] [--dtype f32|f64|bf16]
       [--threads N]
                                                 [--openblas PATH]

   The products are those of linear layers: forward y = x w^T (NT), the gradient of the input dx =
   dy w (NN) and of the weight dw = dy^T x (TN). dt and OpenBLAS work on the same memory. Their
   results are compared first; then they run in turns, in short bursts, and the best burst of each
   counts, in processor time. With N threads each runs N products at the same time, one per thread,
   as data-parallel ranks do. bf16_over_f32 comes from bursts in turns as well. */
#define DT_IMPLEMENTATION
#include "dt_tensor.h"

#include "tests/bench/bench.h"

/* A linear layer of `tokens` rows from `in` to `out`. */
typedef struct layer {
    int tokens, out, in;
    int listed; /* counts in the summary; other layers have sizes that no tile divides */
    int f64;    /* is measured in f64 too */
} layer;

static const layer layers[] = {
    { 256, 768, 768, 1, 1 },
    { 256, 3072, 768, 1, 0 },
    { 2048, 384, 1536, 1, 0 },
    { 1024, 1024, 1024, 1, 1 },
    { 256, 50304, 768, 1, 0 },
    { 255, 769, 257, 0, 0 },
    { 33, 65, 17, 0, 0 },
    { 1, 768, 768, 0, 0 },
};
enum { QUICK_LAYERS = 1, LAYERS = sizeof layers / sizeof *layers };

typedef struct settings {
    double seconds; /* minimum time of each side of a case */
    int threads, quick;
    int dtype; /* -1: all */
    const char *openblas;
} settings;

/* The sums of the summary. */
typedef struct summary {
    double log_f32, least_f32, log_bf16;
    int f32, bf16;
} summary;

static const char *const transposed[] = { "NT", "NN", "TN" };

static bench_product product_of(layer l, int kind, dt_dtype dtype, const bench_blas *blas) {
    bench_product p = {
        .dtype = dtype, .m = l.tokens, .n = l.out, .k = l.in, .trans_b = 1, .blas = blas
    };
    if (kind == 1)
        p = (bench_product){ .dtype = dtype, .m = l.tokens, .n = l.in, .k = l.out, .blas = blas };
    if (kind == 2)
        p = (bench_product){
            .dtype = dtype, .m = l.out, .n = l.in, .k = l.tokens, .trans_a = 1, .blas = blas
        };
    return p;
}

static double element(const void *c, dt_dtype dtype, size_t i) {
    uint32_t bits = dtype == DT_BF16 ? (uint32_t)((const uint16_t *)c)[i] << 16 : 0;
    float x;
    memcpy(&x, &bits, sizeof x);
    return dtype == DT_F64    ? ((const double *)c)[i]
           : dtype == DT_BF16 ? (double)x
                              : (double)((const float *)c)[i];
}

/* 0 if the results of dt and OpenBLAS agree to 1e-4 of the largest element, in bf16 (dt rounds its
   result to bf16) to 1e-2. */
static int differs(const bench_product *p) {
    size_t count = (size_t)p->m * (size_t)p->n;
    dt_dtype theirs = p->dtype == DT_F64 ? DT_F64 : DT_F32;
    double most = 0, apart = 0, bound = p->dtype == DT_BF16 ? 1e-2 : 1e-4;
    double *ours = (double *)malloc(count * sizeof *ours);
    if (!ours || bench_product_dt(p) != DT_OK) apart = INFINITY;
    for (size_t i = 0; ours && i < count; i++) ours[i] = element(p->c, p->dtype, i);
    bench_product_blas(p);
    for (size_t i = 0; ours && i < count; i++) {
        double x = element(p->c, theirs, i);
        most = fmax(most, fabs(x));
        apart = isnan(ours[i]) ? INFINITY : fmax(apart, fabs(ours[i] - x));
    }
    free(ours);
    if (apart <= bound * most) return 0;
    fprintf(stderr, "error: %d x %d x %d %s: dt and OpenBLAS differ by %g of %g\n", p->m, p->n,
        p->k, dt_dtype_name(p->dtype), apart, most);
    return 1;
}

/* One case: dt, OpenBLAS if it supports the type, and for bf16 also dt in f32. */
typedef struct contest {
    bench_product *products[3];
    int who[3], count;
    double best[3]; /* GFLOP/s */
} contest;

static void contest_add(contest *c, bench_product *products, int who) {
    c->products[c->count] = products;
    c->who[c->count++] = who;
}

static void contest_run(contest *c, const settings *s) {
    int calls[3], rounds = 0, least = s->quick ? 1 : 5;
    double end = bench_now() + s->seconds * c->count;
    for (int i = 0; i < c->count; i++) calls[i] = bench_calls(c->products[i], c->who[i]);
    while (rounds++ < least || bench_now() < end)
        for (int i = 0; i < c->count; i++)
            c->best[i] = fmax(c->best[i],
                bench_burst_run(c->products[i], s->threads, c->who[i], calls[i]).processor);
}

/* Makes one product for each thread; 0 if out of memory. */
static int make_all(bench_product *products, bench_product like, int threads) {
    for (int t = 0; t < threads; t++) {
        products[t] = like;
        if (!bench_product_make(&products[t], 10 * (uint32_t)t + 1)) return 0;
    }
    return 1;
}

static void free_all(bench_product *products, int threads) {
    for (int t = 0; t < threads; t++) bench_product_free(&products[t]);
    free(products);
}

static void print_row(const bench_product *p, int kind, const settings *s, const char *peer,
    double ours, double theirs) {
    char rate[32], ratio[32];
    printf("%d,%d,%d,%s,%s,%d,%.2f,%s,%s,%s\n", p->m, p->n, p->k, transposed[kind],
        dt_dtype_name(p->dtype), s->threads, ours, peer,
        bench_number(rate, sizeof rate, theirs, "%.2f"),
        bench_number(ratio, sizeof ratio, ours / theirs, "%.3f"));
    fflush(stdout);
}

/* Measures and prints one case; 1 if a result is wrong or memory is short. */
static int run_case(
    layer l, int kind, dt_dtype dtype, const settings *s, const bench_blas *blas, summary *sum) {
    bench_product *mine = (bench_product *)calloc((size_t)s->threads, sizeof *mine);
    bench_product *wide = (bench_product *)calloc((size_t)s->threads, sizeof *wide);
    contest c = { .count = 0 };
    int peer = blas->library && (dtype != DT_BF16 || blas->bf16), failed = !mine || !wide;
    failed = failed || !make_all(mine, product_of(l, kind, dtype, blas), s->threads);
    if (dtype == DT_BF16)
        failed = failed || !make_all(wide, product_of(l, kind, DT_F32, blas), s->threads);
    if (failed) fprintf(stderr, "error: %d x %d x %d: out of memory\n", l.tokens, l.out, l.in);
    failed = failed || (peer && differs(mine));
    contest_add(&c, mine, BENCH_DT);
    if (dtype == DT_BF16) contest_add(&c, wide, BENCH_DT);
    if (peer) contest_add(&c, mine, BENCH_BLAS);
    if (!failed) {
        contest_run(&c, s);
        double ratio = peer ? c.best[0] / c.best[c.count - 1] : NAN;
        print_row(
            mine, kind, s, peer ? blas->name : "none", c.best[0], peer ? c.best[c.count - 1] : NAN);
        if (dtype == DT_F32 && l.listed) {
            sum->log_f32 += log(ratio);
            sum->least_f32 = sum->f32++ ? fmin(sum->least_f32, ratio) : ratio;
        }
        if (dtype == DT_BF16 && l.listed) {
            sum->log_bf16 += log(c.best[0] / c.best[1]);
            sum->bf16++;
        }
    }
    free_all(mine, mine ? s->threads : 0);
    free_all(wide, wide ? s->threads : 0);
    return failed;
}

/* 1 if dt's kernel table multiplies this type. */
static int served(dt_dtype dtype) {
    bench_product p = { .dtype = dtype, .m = 4, .n = 4, .k = 4 };
    int yes = bench_product_make(&p, 1) && bench_product_dt(&p) == DT_OK;
    bench_product_free(&p);
    return yes;
}

static settings parse(int argc, char **argv) {
    static const dt_dtype types[] = { DT_F32, DT_F64, DT_BF16 };
    settings s = { 0.3, 1, 0, -1, NULL };
    const char *v;
    for (int i = 1; i < argc; i++) {
        int good = 1;
        if (strcmp(argv[i], "--quick") == 0)
            s.quick = 1, s.seconds = 0.02;
        else if ((v = bench_option(argc, argv, &i, "--seconds")))
            good = (s.seconds = atof(v)) > 0;
        else if ((v = bench_option(argc, argv, &i, "--threads")))
            good = (s.threads = atoi(v)) > 0 && s.threads <= 64;
        else if ((v = bench_option(argc, argv, &i, "--openblas")))
            s.openblas = v;
        else if ((v = bench_option(argc, argv, &i, "--dtype"))) {
            for (int t = 0; t < 3; t++)
                if (strcmp(v, dt_dtype_name(types[t])) == 0) s.dtype = (int)types[t];
            good = s.dtype >= 0;
        } else
            good = 0;
        if (!good)
            bench_refuse(argc, argv, i,
                "--quick --seconds X --dtype f32|f64|bf16 --threads N --openblas PATH");
    }
    return s;
}

int main(int argc, char **argv) {
    static const dt_dtype types[] = { DT_F32, DT_F64, DT_BF16 };
    char text[3][32];
    settings s = parse(argc, argv);
    summary sum = { 0, NAN, 0, 0, 0 };
    int failed = 0, bf16 = served(DT_BF16);
    bench_print_machine();
    bench_blas blas = bench_blas_find(s.openblas);
    if (!bf16) printf("# dt's kernels do not multiply bf16 in this version: no bf16 rows\n");
    printf("m,n,k,trans,dtype,threads,dt_gflops,peer,peer_gflops,ratio\n");
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < (s.quick ? QUICK_LAYERS : LAYERS); i++)
            for (int kind = 0; kind < 3; kind++) {
                int wanted =
                    s.dtype < 0 ? types[t] != DT_F64 || layers[i].f64 : s.dtype == (int)types[t];
                wanted = wanted && (types[t] != DT_BF16 || bf16);
                if (wanted) failed |= run_case(layers[i], kind, types[t], &s, &blas, &sum);
            }
    double geomean = sum.f32 ? exp(sum.log_f32 / sum.f32) : NAN;
    double gain = sum.bf16 ? exp(sum.log_bf16 / sum.bf16) : NAN;
    printf("summary,geomean_f32,%s\n", bench_number(text[0], sizeof text[0], geomean, "%.3f"));
    printf("summary,min_f32,%s\n", bench_number(text[1], sizeof text[1], sum.least_f32, "%.3f"));
    printf("summary,bf16_over_f32,%s\n", bench_number(text[2], sizeof text[2], gain, "%.3f"));
    return failed;
}
