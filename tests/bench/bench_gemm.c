/* bench_gemm.c - dt's matrix product on the CPU compared with OpenBLAS and PyTorch
   Public domain or MIT, at your choice; see LICENSE.

       make build/bench_gemm && build/bench_gemm [--quick] [--seconds X] [--dtype f32|f64|bf16]
       [--threads N] [--openblas PATH] [--python PATH]

   The products are those of linear layers: forward y = x w^T (NT), the gradient of the input dx =
   dy w (NN) and of the weight dw = dy^T x (TN). They come in three groups: GPT shapes, shapes under
   64, and matrix-vector products (GEMV), whose rows also count as memory traffic: a GEMV of a matrix
   beyond the caches is compared with the triad of bench.h.

   The peer of f32 and f64 is OpenBLAS, which works on the same memory; the results are compared
   first. The peer of bf16 is PyTorch, which calls oneDNN: peers/torch_gemm.py by --python,
   $DT_BENCH_PYTHON or python3, with one thread and only without --threads. dt and its peer run in
   turns, in short bursts, and the best burst of each counts, in processor time. With N threads each
   runs N products at the same time, one per thread, as data-parallel ranks do. bf16_over_f32 comes
   from bursts in turns as well. */
#define DT_IMPLEMENTATION
#include "dt_tensor.h"

#include "tests/bench/bench.h"

enum { GPT, SMALL, VECTOR, OTHER, GROUPS = OTHER }; /* groups of the summary; OTHER is in none */
static const char *const group_names[] = { "gpt", "under_64", "gemv" };

/* A linear layer of `tokens` rows from `in` to `out`. */
typedef struct layer {
    int tokens, out, in, group;
    int f64; /* is measured in f64 too */
} layer;

static const layer layers[] = {
    { 256, 768, 768, GPT, 1 },
    { 256, 3072, 768, GPT, 0 },
    { 2048, 384, 1536, GPT, 0 },
    { 1024, 1024, 1024, GPT, 1 },
    { 256, 50304, 768, GPT, 0 },
    { 255, 769, 257, OTHER, 0 },
    { 16, 16, 16, SMALL, 0 },
    { 33, 65, 17, SMALL, 0 },
    { 48, 40, 56, SMALL, 0 },
    { 64, 64, 64, SMALL, 0 },
    { 1, 768, 768, VECTOR, 0 },
    { 1, 3072, 768, VECTOR, 0 },
    { 1, 50304, 768, VECTOR, 0 },
    { 768, 1, 768, VECTOR, 0 },
};
enum { QUICK_LAYERS = 1, LAYERS = sizeof layers / sizeof *layers };

typedef struct settings {
    double seconds; /* minimum time of each side of a case */
    int threads, quick;
    int dtype; /* -1: all */
    const char *openblas, *python;
} settings;

/* A geometric mean. */
typedef struct mean {
    double log_sum, least;
    int n;
} mean;

static void mean_add(mean *m, double x) {
    if (!isfinite(x) || x <= 0) return;
    m->log_sum += log(x);
    m->least = m->n++ ? fmin(m->least, x) : x;
}

/* The ratios of the summary, by group and by form (NT, NN, TN). */
typedef struct summary {
    mean f32[GROUPS], bf16[GROUPS], over_f32, over_f32_by_form[3];
    mean triad; /* share of the triad's rate, of the products beyond the caches */
    double triad_gbs;
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

// ==== PyTorch ===================================================================================

/* Processor seconds of `calls` products by PyTorch; infinity if the peer does not answer. */
static double torch_seconds(const bench_peer *peer, const bench_product *p, int calls) {
    double seconds;
    fprintf(peer->ask, "%d %d %d %d %d %d\n", p->m, p->n, p->k, p->trans_a, p->trans_b, calls);
    fflush(peer->ask);
    return fscanf(peer->answer, "%lf", &seconds) == 1 ? seconds : INFINITY;
}

// ==== Cases =====================================================================================

/* One case: dt, its peer if there is one, and for bf16 also dt in f32. */
enum { OURS, PEER, WIDE, SIDES };
typedef struct contest {
    bench_product *products[SIDES]; /* NULL: does not take part */
    const bench_peer *torch;        /* the peer, or NULL: OpenBLAS */
    double best[SIDES];             /* GFLOP/s */
} contest;

static double contest_burst(const contest *c, int side, int threads, int calls) {
    const bench_product *p = c->products[side];
    if (side == PEER && c->torch)
        return calls * bench_product_gflop(p) / torch_seconds(c->torch, p, calls);
    return bench_burst_run(p, threads, side == PEER ? BENCH_BLAS : BENCH_DT, calls).processor;
}

static void contest_run(contest *c, const settings *s) {
    int calls[SIDES], rounds = 0, least = s->quick ? 1 : 5, sides = 0;
    for (int i = 0; i < SIDES; i++) {
        if (!c->products[i]) continue;
        sides++;
        /* PyTorch makes as many calls as dt */
        calls[i] = i == PEER && c->torch
                       ? calls[OURS]
                       : bench_calls(c->products[i], i == PEER ? BENCH_BLAS : BENCH_DT);
    }
    double end = bench_now() + s->seconds * sides;
    while (rounds++ < least || bench_now() < end)
        for (int i = 0; i < SIDES; i++)
            if (c->products[i])
                c->best[i] = fmax(c->best[i], contest_burst(c, i, s->threads, calls[i]));
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

/* Adds the ratios of a case to the summary. */
static void count_case(const contest *c, layer l, int kind, summary *sum) {
    const bench_product *p = c->products[OURS];
    double ratio = c->products[PEER] ? c->best[OURS] / c->best[PEER] : NAN,
           size = (double)dt_dtype_size(p->dtype),
           bytes = size * ((double)p->m * p->k + (double)p->k * p->n + (double)p->m * p->n);
    if (l.group != OTHER && p->dtype == DT_F32) mean_add(&sum->f32[l.group], ratio);
    if (l.group != OTHER && p->dtype == DT_BF16) mean_add(&sum->bf16[l.group], ratio);
    if (l.group == GPT && c->products[WIDE]) {
        mean_add(&sum->over_f32, c->best[OURS] / c->best[WIDE]);
        mean_add(&sum->over_f32_by_form[kind], c->best[OURS] / c->best[WIDE]);
    }
    if (l.group != VECTOR || bytes < BENCH_TRIAD_BYTES || sum->triad_gbs <= 0) return;
    double share = 1e-9 * bytes * c->best[OURS] / bench_product_gflop(p) / sum->triad_gbs;
    printf("# %d x %d x %d %s %s: %.2f of the triad\n", p->m, p->n, p->k, transposed[kind],
        dt_dtype_name(p->dtype), share);
    if (p->dtype == DT_F32) mean_add(&sum->triad, share);
}

/* Measures and prints one case; 1 if a result is wrong or memory is short. */
static int run_case(layer l, int kind, dt_dtype dtype, const settings *s, const bench_blas *blas,
    const bench_peer *torch, summary *sum) {
    bench_product *mine = (bench_product *)calloc((size_t)s->threads, sizeof *mine);
    bench_product *wide = (bench_product *)calloc((size_t)s->threads, sizeof *wide);
    contest c = { { mine, NULL, NULL }, dtype == DT_BF16 ? torch : NULL, { 0, 0, 0 } };
    int peer = dtype == DT_BF16 ? torch->pid > 0 && s->threads == 1 : blas->library != NULL;
    int failed = !mine || !wide;
    failed = failed || !make_all(mine, product_of(l, kind, dtype, blas), s->threads);
    if (dtype == DT_BF16)
        failed = failed || !make_all(wide, product_of(l, kind, DT_F32, blas), s->threads);
    if (failed) fprintf(stderr, "error: %d x %d x %d: out of memory\n", l.tokens, l.out, l.in);
    if (peer) c.products[PEER] = mine;
    if (dtype == DT_BF16) c.products[WIDE] = wide;
    if (blas->library && (dtype != DT_BF16 || blas->bf16)) failed = failed || differs(mine);
    if (!failed) {
        contest_run(&c, s);
        print_row(mine, kind, s,
            !peer     ? "none"
            : c.torch ? torch->name
                      : blas->name,
            c.best[OURS], peer ? c.best[PEER] : NAN);
        count_case(&c, l, kind, sum);
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
    settings s = { 0.3, 1, 0, -1, NULL, getenv("DT_BENCH_PYTHON") };
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
        else if ((v = bench_option(argc, argv, &i, "--python")))
            s.python = v;
        else if ((v = bench_option(argc, argv, &i, "--dtype"))) {
            for (int t = 0; t < 3; t++)
                if (strcmp(v, dt_dtype_name(types[t])) == 0) s.dtype = (int)types[t];
            good = s.dtype >= 0;
        } else
            good = 0;
        if (!good)
            bench_refuse(argc, argv, i,
                "--quick --seconds X --dtype f32|f64|bf16 --threads N --openblas PATH "
                "--python PATH");
    }
    if (!s.python) s.python = "python3";
    return s;
}

static void print_mean(const char *name, const char *group, double x) {
    char text[32];
    printf("summary,%s%s,%s\n", name, group, bench_number(text, sizeof text, x, "%.3f"));
}

static void print_summary(const summary *s) {
    static const char *const forms[] = { "_nt", "_nn", "_tn" };
#define MEAN(m) ((m).n ? exp((m).log_sum / (m).n) : NAN)
#define LEAST(m) ((m).n ? (m).least : NAN)
    print_mean("geomean_f32", "", MEAN(s->f32[GPT]));
    print_mean("min_f32", "", LEAST(s->f32[GPT]));
    print_mean("bf16_over_f32", "", MEAN(s->over_f32));
    for (int g = SMALL; g < GROUPS; g++)
        print_mean("geomean_f32_", group_names[g], MEAN(s->f32[g]));
    print_mean("gemv_triad_share", "", MEAN(s->triad));
    for (int f = 0; f < 3; f++) print_mean("bf16_over_f32", forms[f], MEAN(s->over_f32_by_form[f]));
    for (int g = 0; g < GROUPS; g++) print_mean("geomean_bf16_", group_names[g], MEAN(s->bf16[g]));
}

int main(int argc, char **argv) {
    static const dt_dtype types[] = { DT_F32, DT_F64, DT_BF16 };
    settings s = parse(argc, argv);
    summary sum;
    memset(&sum, 0, sizeof sum);
    int failed = 0, bf16 = served(DT_BF16),
        torch_runs = s.threads == 1 && s.dtype != (int)DT_F32 && s.dtype != (int)DT_F64;
    bench_print_machine();
    bench_blas blas = bench_blas_find(s.openblas);
    bench_peer torch = { 0, NULL, NULL, "none" };
    if (bf16 && torch_runs)
        torch = bench_peer_start(
            s.python, "tests/bench/peers/torch_gemm.py", 120 + 3 * 3 * LAYERS * (s.seconds + 2));
    if (!s.quick) sum.triad_gbs = bench_triad_gbs();
    if (!s.quick) printf("# triad: %.1f GB/s\n", sum.triad_gbs);
    if (!bf16) printf("# dt's kernels do not multiply bf16 in this version: no bf16 rows\n");
    printf("m,n,k,trans,dtype,threads,dt_gflops,peer,peer_gflops,ratio\n");
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < (s.quick ? QUICK_LAYERS : LAYERS); i++)
            for (int kind = 0; kind < 3; kind++) {
                int wanted =
                    s.dtype < 0 ? types[t] != DT_F64 || layers[i].f64 : s.dtype == (int)types[t];
                wanted = wanted && (types[t] != DT_BF16 || bf16);
                if (wanted) failed |= run_case(layers[i], kind, types[t], &s, &blas, &torch, &sum);
            }
    bench_peer_end(&torch);
    print_summary(&sum);
    return failed;
}
