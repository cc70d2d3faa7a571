/* test_kernels.c - the CPU kernels of dt_tensor.h, with every instruction set and in every type,
   compared with plain loops
   Public domain or MIT, at your choice; see LICENSE.

   Promises under test: A result in bf16 or f16 is the f32 result rounded once. An element of a
   matrix product depends only on its row, its column and K, so that any part of the product has the
   same bits. AVX2 and AVX-512 give equal bits, except in matrix products and attention; the plain
   set, which has no fused multiply-add, does so too in kernels without elementary functions. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#define DT__STREAM_BYTES 1024 /* so that the larger arrays of the tests are streamed */
#include "tests/support/amx.h"

#include "dt_tensor.h"
#include "tests/support/check.h"
#include "tests/support/meter.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

static const char *const isa_name[DT__ISAS + 2] = { "plain", "simd", "avx512", "avx512 pairs",
    "amx tiles" };
/* bf16 products by AVX-512 dot products of pairs and by emulated AMX tiles, tested like instruction
   sets of their own. matmul uses them where they are faster. */
enum { PAIRS = DT__ISAS, TILES };

static dt_status multiply(dt_dtype type, int isa, const dt_matmul_args *a) {
#if defined(__x86_64__)
    if (isa >= PAIRS) {
        dt_status status = dt__matmul_with_f32_avx512(a, isa == TILES ? 2 : 1);
        CHECK_MSG(amx_in_use == 0, "%d threads have not released their tiles", amx_in_use);
        return status;
    }
#endif
    return dt__variant_of(type, isa)->matmul(a);
}
static const dt_dtype float_types[4] = { DT_F32, DT_F64, DT_BF16, DT_F16 };

/* The parameters of the activations that have some; LOW and HIGH are those of DT_ACT_CLAMP. */
static const double SCALE = 1.5, SHIFT = -0.25, LOW = -0.75, HIGH = 0.5;

static double naive_act(int act, double x) {
    switch (act) {
    case DT_ACT_GELU: return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case DT_ACT_GELU_ERF: return x * 0.5 * erfc(-x / sqrt(2));
    case DT_ACT_SILU: return x / (1 + exp(-x));
    case DT_ACT_RELU: return x > 0 ? x : 0;
    case DT_ACT_TANH: return tanh(x);
    case DT_ACT_EXP: return exp(x);
    case DT_ACT_LN: return log(x);
    case DT_ACT_SIGMOID: return 1 / (1 + exp(-x));
    case DT_ACT_SOFTPLUS: return log1p(exp(x));
    case DT_ACT_SQRT: return sqrt(x);
    case DT_ACT_ABS: return fabs(x);
    case DT_ACT_AFFINE: return SCALE * x + SHIFT;
    case DT_ACT_POW: return pow(x, SCALE);
    case DT_ACT_CLAMP: return fmin(fmax(x, LOW), HIGH);
    default: return x;
    }
}

static double naive_slope(int act, double x) {
    double s = 1 / (1 + exp(-x)), t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    switch (act) {
    case DT_ACT_GELU:
        return 0.5 * (1 + t) +
               0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
    case DT_ACT_GELU_ERF:
        return 0.5 * erfc(-x / sqrt(2)) + x * 0.3989422804014327 * exp(-x * x / 2);
    case DT_ACT_SILU: return s + x * s * (1 - s);
    case DT_ACT_RELU: return x > 0;
    case DT_ACT_TANH: return 1 - tanh(x) * tanh(x);
    case DT_ACT_EXP: return exp(x);
    case DT_ACT_LN: return 1 / x;
    case DT_ACT_SIGMOID: return s * (1 - s);
    case DT_ACT_SOFTPLUS: return s;
    case DT_ACT_SQRT: return 0.5 / sqrt(x);
    case DT_ACT_ABS: return x > 0 ? 1 : -1;
    case DT_ACT_AFFINE: return SCALE;
    case DT_ACT_POW: return SCALE * pow(x, SCALE - 1);
    case DT_ACT_CLAMP: return x > LOW && x < HIGH;
    default: return 1;
    }
}

static void *noise_array(dt_dtype dtype, size_t n, uint64_t seed) {
    void *x = room(n * 8 + 64);
    for (size_t i = 0; i < n; i++) put(x, dtype, (int64_t)i, noise(seed, i));
    return x;
}

static int is_narrow(dt_dtype dtype) { return dtype == DT_BF16 || dtype == DT_F16; }

/* Relative rounding error of the type, plus an allowance for the rounding of f32 and f64 sums. */
static double type_error(dt_dtype dtype) {
    return dtype == DT_F64    ? 2e-14
           : dtype == DT_F32  ? 4e-6
           : dtype == DT_BF16 ? 1.0 / 256 + 4e-6
                              : 1.0 / 2048 + 4e-6;
}

// ==== 1. Products ===============================================================================

typedef struct product {
    dt_matmul_args a;
    dt_dtype to; /* type of c */
    /* (batch,m,n); bound: sum of |a * b|, to which the rounding error is proportional */
    double *want, *before, *bound;
} product;

/* The product with sums in long double. */
static void product_naive(product *p, const void *c0) {
    const dt_matmul_args *a = &p->a;
    dt_dtype type = a->dtype;
    size_t count_a = (size_t)(a->stride_a * a->batch), count_b = (size_t)(a->stride_b * a->batch);
    double *da = (double *)room(count_a * 8), *db = (double *)room(count_b * 8);
    for (size_t i = 0; i < count_a; i++) da[i] = get(a->a, type, (int64_t)i);
    for (size_t i = 0; i < count_b; i++) db[i] = get(a->b, type, (int64_t)i);
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t i = 0; i < a->m; i++)
            for (int64_t j = 0; j < a->n; j++) {
                long double sum = 0, size = 0;
                int64_t to = (b * a->m + i) * a->n + j, at = b * a->stride_c + i * a->ldc + j;
                for (int64_t q = 0; q < a->k; q++) {
                    int64_t ia = b * a->stride_a + (a->trans_a ? q * a->lda + i : i * a->lda + q);
                    int64_t ib = b * a->stride_b + (a->trans_b ? j * a->ldb + q : q * a->ldb + j);
                    long double term = (long double)da[ia] * db[ib];
                    sum += term;
                    size += fabsl(term);
                }
                if (a->bias) sum += get(a->bias, type, j);
                if (a->activation_backward)
                    sum *= naive_slope(a->activation, get(a->pre_activation, type, at));
                else if (a->activation)
                    p->before[to] = (double)sum, sum = naive_act(a->activation, (double)sum);
                else
                    p->before[to] = (double)sum;
                if (a->residual) sum += get(a->residual, type, at);
                if (a->accumulate) sum += get(c0, p->to, at);
                p->want[to] = (double)sum;
                p->bound[to] = (double)size + 4;
            }
    free(da);
    free(db);
}

/* Compares c and pre_activation with the naive results. The padding between the rows of c must be
   unchanged. */
static void product_compare(const product *p, const char *set, const void *c0, size_t room_c) {
    const dt_matmul_args *a = &p->a;
    double eps = a->dtype == DT_F64 ? 2.3e-16 : 1.2e-7, worst = 0, worst_before = 0;
    double step = is_narrow(p->to) ? type_error(p->to) : 0,
           step_before = is_narrow(a->dtype) ? type_error(a->dtype) : 0;
    char *seen = (char *)room(room_c);
    int touched = 0;
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t i = 0; i < a->m; i++)
            for (int64_t j = 0; j < a->n; j++) {
                int64_t to = (b * a->m + i) * a->n + j, at = b * a->stride_c + i * a->ldc + j;
                double unit = eps * p->bound[to] * (4 + sqrt((double)a->k)), error = 0;
                double unit_before = unit + step_before * fabs(p->before[to]);
                if (a->pre_activation && !a->activation_backward)
                    error =
                        fabs(get(a->pre_activation, a->dtype, at) - p->before[to]) / unit_before;
                worst_before = fmax(worst_before, error);
                error =
                    fabs(get(a->c, p->to, at) - p->want[to]) / (unit + step * fabs(p->want[to]));
                if (!(error <= worst)) worst = error;
                seen[at] = 1;
            }
    for (size_t i = 0; i < room_c; i++)
        touched += !seen[i] && get(a->c, p->to, (int64_t)i) != get(c0, p->to, (int64_t)i);
    free(seen);
    CHECK_MSG(worst <= 1 && worst_before <= 1 && touched == 0,
        "matmul %s %s (%lld,%lld,%lld) trans %d %d: error %.2g "
        "of the bound, pre-activation %.2g, %d elements of padding changed",
        set, dt_dtype_name(a->dtype), (long long)a->m, (long long)a->n, (long long)a->k, a->trans_a,
        a->trans_b, worst, worst_before, touched);
}

/* One matrix product by `isa`, packed in work_bytes of memory; 0: the kernel that does not pack.
   Bits of kind: 1 A transposed, 2 B transposed, 4 fused bias, activation and residual, 8 batches
   and padded strides, 16 fused activation backward, 32 result in the accumulation type. */
static void product_case(
    dt_dtype type, int isa, int64_t m, int64_t n, int64_t k, int kind, size_t work_bytes) {
    int ta = kind & 1, tb = kind >> 1 & 1, fused = kind >> 2 & 1, pad = kind >> 3 & 1 ? 3 : 0;
    product p = { .a = { .dtype = type,
                      .m = m,
                      .n = n,
                      .k = k,
                      .batch = pad ? 3 : 1,
                      .trans_a = ta,
                      .trans_b = tb } };
    dt_matmul_args *a = &p.a;
    a->lda = (ta ? m : k) + pad;
    a->ldb = (tb ? k : n) + pad;
    a->ldc = n + pad;
    a->stride_a = a->lda * (ta ? k : m) + pad;
    a->stride_b = a->ldb * (tb ? n : k) + 2 * pad;
    a->stride_c = a->ldc * m + pad;
    a->activation_backward = kind >> 4 & 1;
    a->wide = kind >> 5 & 1;
    p.to = a->wide && is_narrow(type) ? DT_F32 : type;
    size_t room_c = (size_t)(a->stride_c * a->batch), count = (size_t)(m * n * a->batch);
    void *mem[7] = { noise_array(type, (size_t)(a->stride_a * a->batch), 1),
        noise_array(type, (size_t)(a->stride_b * a->batch), 2), noise_array(p.to, room_c, 3),
        noise_array(p.to, room_c, 3), noise_array(type, (size_t)n, 4), noise_array(type, room_c, 5),
        noise_array(type, room_c, 6) };
    a->a = mem[0];
    a->b = mem[1];
    a->c = mem[2];
    if (fused) {
        a->bias = a->activation_backward ? NULL : mem[4];
        a->residual = mem[5];
        a->pre_activation = mem[6];
        a->activation =
            a->activation_backward ? 1 + (int)((m + 2 * n + k) % 5) : (int)((m + n + 2 * k) % 6);
    }
    a->activation_backward &= fused;
    a->accumulate = (fused || k == 1) && ta == tb;
    a->work = work_bytes ? room(work_bytes) : NULL;
    a->work_bytes = work_bytes;
    p.want = (double *)room(count * 8);
    p.before = (double *)room(count * 8);
    p.bound = (double *)room(count * 8);
    product_naive(&p, mem[3]);
    dt_matmul_args args = p.a;
    if (!pad) { /* 0 selects the default value */
        args.batch = args.lda = args.ldb = args.ldc = 0;
    }
    CHECK(multiply(type, isa, &args) == DT_OK);
    product_compare(&p, isa_name[isa], mem[3], room_c);
    for (int i = 0; i < 7; i++) free(mem[i]);
    free(a->work);
    free(p.want);
    free(p.before);
    free(p.bound);
}

static void products(dt_dtype type, int isa) {
    static const int64_t size[][3] = { { 1, 1, 1 }, { 3, 17, 127 }, { 17, 127, 3 }, { 127, 3, 17 },
        { 15, 33, 65 }, { 1, 127, 17 }, { 29, 1, 5 }, { 14, 32, 64 }, { 5, 7, 0 }, { 17, 33, 1601 },
        { 461, 3, 517 }, { 3, 530, 520 }, { 5, 35, 2051 }, { 1, 300, 77 }, { 1, 45, 700 },
        { 300, 1, 77 }, { 16, 16, 16 }, { 17, 65, 33 }, { 9, 70, 150 }, { 40, 20, 600 },
        { 15, 130, 129 }, { 70, 530, 1 }, { 530, 70, 1 } };
    for (size_t s = 0; s < sizeof size / sizeof *size; s++)
        /* in sizes 9 to 12 K, M or N exceeds one block; the later sizes are those of one row or
           column, of all heights of the micro-kernel, of the limits of multiplying in place, and of
           outer products */
        for (int kind = 0; kind < 64; kind += s < 9 || s == 21 ? 1 : s < 13 ? 11 : 7) {
            if ((kind & 16 && !(kind & 4)) || (kind & 32 && !is_narrow(type))) continue;
            if (s > 2 && s < 9 && kind % 5 != (int)s % 5) continue;
            int64_t m = size[s][0], n = size[s][1], k = size[s][2];
            product_case(type, isa, m, n, k, kind, dt_matmul_work(n, k, type));
            if (s < 4 && kind < 16) product_case(type, isa, m, n, k, kind, 0);
        }
    char work[64];
    float one[4] = { 0 };
    dt_matmul_args small = { .dtype = type,
        .a = one,
        .b = one,
        .c = one,
        .m = 1,
        .n = 1,
        .k = 1,
        .work = work,
        .work_bytes = sizeof work };
    CHECK(multiply(type, isa, &small) == DT_ERR_ARG);
    small.m = -1;
    CHECK(multiply(type, isa, &small) == DT_ERR_ARG);
}

/* An element has the same bits in the full product and in any rectangle of it, also in one row and in
   one column. Bits of kind: 1 A transposed, 2 B transposed, 4 fused bias and activation, 8 elements
   from 2^60 down to denormals, whose products are denormals too. */
static void product_bits(dt_dtype type, int isa, int64_t M, int64_t N, int64_t K, int kind) {
    size_t size = dt_dtype_size(type), work_bytes = dt_matmul_work(N, K, type);
    void *a = noise_array(type, (size_t)(M * K), 1), *b = noise_array(type, (size_t)(N * K), 2);
    void *whole = room((size_t)(M * N) * size), *part = room((size_t)(M * N) * size),
         *work = room(work_bytes);
    void *bias = noise_array(type, (size_t)N, 3);
    for (int64_t i = 0; kind & 8 && i < M * K; i++) put(a, type, i, ldexp(1.4, 60 - (int)i % 195));
    for (int64_t i = 0; kind & 8 && i < N * K; i++) put(b, type, i, ldexp(-1, 60 - (int)i % 195));
    if (kind & 16) put(b, type, (kind & 2 ? K : 1) + 1, HUGE_VAL); /* in column 1 or 2 */
    dt_matmul_args all = { .dtype = type,
        .c = whole,
        .a = a,
        .b = b,
        .m = M,
        .n = N,
        .k = K,
        .trans_a = kind & 1,
        .trans_b = kind >> 1 & 1,
        .lda = kind & 1 ? M : K,
        .ldb = kind & 2 ? K : N,
        .work = work,
        .work_bytes = work_bytes };
    if (kind & 4) all.bias = bias, all.activation = DT_ACT_SILU;
    CHECK(multiply(type, isa, &all) == DT_OK);
    int wrong = 0;
    for (int t = 0; t < 16; t++) {
        int i0 = below(5, (uint64_t)t, (int)M), j0 = below(6, (uint64_t)t, (int)N);
        int m = 1 + below(7, (uint64_t)t, (int)M - i0), n = 1 + below(8, (uint64_t)t, (int)N - j0);
        if (t % 4 == 0) m = 1, j0 = 0, n = (int)N;
        if (t % 4 == 1) n = 1, i0 = 0, m = (int)M;
        if (t % 4 == 2) m = 1 + t % 17 < M - i0 ? 1 + t % 17 : (int)M - i0;
        dt_matmul_args some = all;
        some.c = part;
        some.m = m;
        some.n = n;
        some.a = (char *)a + (size_t)(i0 * (kind & 1 ? 1 : K)) * size;
        some.b = (char *)b + (size_t)(j0 * (kind & 2 ? K : 1)) * size;
        if (kind & 4) some.bias = (char *)bias + (size_t)j0 * size;
        some.work_bytes = dt_matmul_work(n, K, type);
        some.work = room(some.work_bytes); /* so that a sanitizer sees its end */
        CHECK(multiply(type, isa, &some) == DT_OK);
        free(some.work);
        for (int i = 0; i < m; i++)
            wrong += memcmp((char *)part + (size_t)(i * n) * size,
                         (char *)whole + (size_t)((i0 + i) * N + j0) * size, (size_t)n * size) != 0;
    }
    CHECK_MSG(wrong == 0,
        "matmul %s %s (%lld,%lld,%lld) kind %d: %d rows have other bits in a part of the product",
        isa_name[isa], dt_dtype_name(type), (long long)M, (long long)N, (long long)K, kind, wrong);
    free(a);
    free(b);
    free(whole);
    free(part);
    free(work);
    free(bias);
}

// ==== 2. Every other kernel, compared with plain loops ==========================================

/* Runs all kernels with one instruction set in one type. Holds the arrays to free and two hashes of
   the bytes of every output: [1] of the kernels with elementary functions, [0] of the others. */
typedef struct bench {
    const dt__variant *v;
    dt_dtype t;
    int isa, n_all;
    void *all[2048];
    uint64_t hash[2];
    int elementary; /* the hash that `same` extends */
    uint64_t seed;
    double worst;
    const double *terms; /* see same */
} bench;

enum { R = 19, C = 37, N = R * C };

static void *keep(bench *b, void *p) {
    if (b->n_all < 2048) b->all[b->n_all++] = p;
    return p;
}

/* n random values. */
static void *array_of(bench *b, dt_dtype type, size_t n, double scale) {
    void *x = keep(b, room(n * 8 + 64));
    b->seed++;
    for (size_t i = 0; i < n; i++) put(x, type, (int64_t)i, scale * noise(b->seed, i));
    return x;
}
static void *array(bench *b, size_t n) { return array_of(b, b->t, n, 2); }
static double *doubles(bench *b, size_t n) { return (double *)keep(b, room(n * 8 + 8)); }
/* a copy in f64, taken before a kernel adds to x */
static double *before(bench *b, const void *x, dt_dtype type, size_t n) {
    double *d = doubles(b, n);
    for (size_t i = 0; i < n; i++) d[i] = get(x, type, (int64_t)i);
    return d;
}

/* 1 if attention rounds its softmax p and the gradient ds to bf16, for products of pairs. */
static int rounds_softmax(const bench *b) {
#if defined(__x86_64__)
    return b->t == DT_BF16 && b->isa == DT__AVX512 && dt__bf16_pairs_are_fast();
#else
    return (void)b, 0;
#endif
}

/* Compares an output with the expected values. scale: the magnitude of the terms of a sum. If
   b->terms is set, one factor of each term is rounded to bf16, which makes errors of up to 2^-8 of
   the sum of the terms' sizes, terms[i]. */
static void same(bench *b, const char *what, const void *x, dt_dtype type, const double *want,
    size_t n, double scale) {
    double most = 0, error = type_error(type) + (is_narrow(b->t) && !is_narrow(type) ? 4e-6 : 0);
    double least = type == DT_F16 ? 6e-8 : 0; /* the smallest number of f16 */
    size_t at = 0, size = dt_dtype_size(type);
    for (size_t i = 0; i < n; i++) {
        double rounding = is_narrow(type)
                              ? (error - 4e-6) * fabs(want[i]) + 4e-6 * fmax(fabs(want[i]), scale)
                              : error * fmax(fabs(want[i]), scale);
        if (b->terms) rounding += 0x1.01p-8 * b->terms[i];
        double e = fabs(get(x, type, (int64_t)i) - want[i]) / (rounding + least);
        if (get(x, type, (int64_t)i) == want[i]) e = 0;
        if (!(e <= most)) most = e, at = i;
    }
    CHECK_MSG(most <= 1, "%s %s %s: element %zu is %.9g, not %.9g: %.2g of the tolerance", what,
        isa_name[b->isa], dt_dtype_name(b->t), at, get(x, type, (int64_t)at), want[at], most);
    b->worst = fmax(b->worst, most);
    uint64_t *hash = &b->hash[b->elementary];
    for (size_t i = 0; i < n * size; i++)
        *hash = (*hash ^ ((const unsigned char *)x)[i]) * 0x100000001b3u;
}
/* A kernel must clear the upper halves of the vector registers before it returns (vzeroupper): while
   they hold data, the SSE code of the program takes up to six times as long. The processor tells
   whether they do: bit 2 of the extended register 1. The compiler clears them only if it
   optimizes. */
#if defined(__x86_64__) && defined(__OPTIMIZE__)
static int upper_halves_in_use(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
    return low >> 2 & 1;
}
__attribute__((target("avx"))) static void clear_upper_halves(void) { _mm256_zeroupper(); }
/* Bit 2 of EAX of CPUID leaf 13, subleaf 1: xgetbv reads register 1. */
static int tells_upper_halves(void) {
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx") || !__get_cpuid_count(13, 1, &a, &b, &c, &d)) return 0;
    if (!(a >> 2 & 1)) return 0;
    clear_upper_halves();
    return !upper_halves_in_use();
}
#else
static int upper_halves_in_use(void) { return 0; }
static int tells_upper_halves(void) { return 0; }
#endif
static int tells_upper; /* of this machine, set by main */

/* Checks the status of a kernel, and how it leaves the registers. */
static int returned_well(dt_status status) {
    return status == DT_OK && !(tells_upper && upper_halves_in_use());
}
#define OK(call) \
    CHECK_MSG(returned_well(call), "%s %s: %s fails, or leaves the upper halves in use", \
        isa_name[b->isa], dt_dtype_name(b->t), #call)

/* Returns 1 if the function is defined for positive numbers only. */
static int takes_positive(int act) {
    return act == DT_ACT_LN || act == DT_ACT_SQRT || act == DT_ACT_POW;
}

static void bench_unary(bench *b) {
    for (int act = 0; act < DT_ACTS; act++)
        for (int add = 0; add < 2; add++) {
            double scale = act == DT_ACT_CLAMP ? LOW : SCALE,
                   shift = act == DT_ACT_CLAMP ? HIGH : SHIFT;
            void *x = array_of(b, b->t, N, 8), *y = array(b, N), *d = array(b, N),
                 *dx = array(b, N);
            double *f = doubles(b, N), *g = before(b, dx, b->t, N);
            for (int i = 0; i < N; i++) {
                if (takes_positive(act)) put(x, b->t, i, 0.1 + fabs(get(x, b->t, i)));
                double in = get(x, b->t, i), up = get(d, b->t, i);
                f[i] = naive_act(act, in);
                g[i] = (add ? g[i] : 0) + up * naive_slope(act, in);
            }
            dt_unary_args a = { b->t, act, y, x, N, scale, shift };
            dt_unary_back_args back = { b->t, act, dx, d, x, N, scale, shift, add };
            OK(b->v->unary(&a));
            OK(b->v->unary_back(&back));
            same(b, "unary", y, b->t, f, N, 1);
            same(b, "unary_back", dx, b->t, g, N, 4);
        }
    dt_unary_args none = { b->t, DT_ACTS, NULL, NULL, 0, 0, 0 };
    dt_unary_back_args back = { b->t, -1, NULL, NULL, NULL, 0, 0, 0, 0 };
    CHECK(b->v->unary(&none) == DT_ERR_ARG && b->v->unary_back(&back) == DT_ERR_ARG);
}

/* Values and derivatives at the edges of a function's domain, at its kinks and far out. An infinite
   gradient of the output stays away from inputs with the derivative 0. */
static void bench_unary_edges(bench *b) {
    static const double i = INFINITY;
    static const struct edge {
        int act;
        double scale, shift, x, y, slope;
    } edges[] = {
        { DT_ACT_SIGMOID, 0, 0, 0, 0.5, 0.25 },
        { DT_ACT_SIGMOID, 0, 0, 1000, 1, 0 },
        { DT_ACT_SIGMOID, 0, 0, -1000, 0, 0 },
        { DT_ACT_SOFTPLUS, 0, 0, 1000, 1000, 1 },
        { DT_ACT_SOFTPLUS, 0, 0, -1000, 0, 0 },
        { DT_ACT_SQRT, 0, 0, 0, 0, i },
        { DT_ACT_SQRT, 0, 0, 4, 2, 0.25 },
        { DT_ACT_ABS, 0, 0, 0, 0, 0 },
        { DT_ACT_ABS, 0, 0, -0.0, 0, 0 },
        { DT_ACT_ABS, 0, 0, -i, i, -1 },
        { DT_ACT_POW, 2, 0, -3, 9, -6 },
        { DT_ACT_POW, 3, 0, -2, -8, 12 },
        { DT_ACT_POW, 1, 0, 0, 0, 1 },
        { DT_ACT_POW, 0, 0, 0, 1, 0 },
        { DT_ACT_POW, 0, 0, NAN, 1, 0 },
        { DT_ACT_POW, -1, 0, 2, 0.5, -0.25 },
        { DT_ACT_POW, -1, 0, 0, i, -i },
        { DT_ACT_POW, 0.5, 0, 0, 0, i },
        { DT_ACT_CLAMP, -1, 2, -1, -1, 0 },
        { DT_ACT_CLAMP, -1, 2, 2, 2, 0 },
        { DT_ACT_CLAMP, -1, 2, -1.5, -1, 0 },
        { DT_ACT_CLAMP, -1, 2, 2.5, 2, 0 },
        { DT_ACT_CLAMP, -1, i, 3, 3, 1 },
        { DT_ACT_CLAMP, -1, i, -i, -1, 0 },
        { DT_ACT_CLAMP, -1, 2, NAN, NAN, 0 },
    };
    for (size_t e = 0; e < sizeof edges / sizeof *edges; e++) {
        const struct edge *k = &edges[e];
        double slope = k->slope, one[3] = { 1, 1, i };
        void *x = array(b, 3), *y = array(b, 3), *d = array(b, 3), *dx = array(b, 3);
        for (int j = 0; j < 3; j++) put(x, b->t, j, k->x), put(d, b->t, j, one[j]);
        dt_unary_args a = { b->t, k->act, y, x, 3, k->scale, k->shift };
        dt_unary_back_args back = { b->t, k->act, dx, d, x, 3, k->scale, k->shift, 0 };
        OK(b->v->unary(&a));
        OK(b->v->unary_back(&back));
        double f = get(y, b->t, 1), g = get(dx, b->t, 1);
        CHECK_MSG((f == k->y && !signbit(f) == !signbit(k->y + 0)) || (isnan(f) && isnan(k->y)),
            "function %d (%g, %g) of %g is %g", k->act, k->scale, k->shift, k->x, f);
        CHECK_MSG(g == slope, "its derivative is %g, not %g", g, slope);
        int steps = k->act == DT_ACT_ABS || k->act == DT_ACT_CLAMP || k->scale == 0;
        if (k->act >= DT_ACT_ABS && slope == 0 && steps) CHECK(get(dx, b->t, 2) == 0);
    }
}

static double naive_binary(int op, double p, double q) {
    switch (op) {
    case DT_ADD: return p + q;
    case DT_SUB: return p - q;
    case DT_MUL: return p * q;
    case DT_DIV: return p / q;
    case DT_MINIMUM: return isnan(p) || isnan(q) ? NAN : fmin(p, q);
    case DT_MAXIMUM: return isnan(p) || isnan(q) ? NAN : fmax(p, q);
    case DT_LESS: return p < q;
    case DT_LESS_EQUAL: return p <= q;
    case DT_EQUAL: return p == q;
    default: return p < q ? 0 : p == q ? 0.5 : 1;
    }
}

/* Minimum, maximum and comparisons of all pairs of special values. */
static void bench_binary_special(bench *b) {
    enum { SPECIAL = 7 };
    static const double special[SPECIAL] = { 0, -0.0, 1, -1, INFINITY, -INFINITY, NAN };
    void *x = array(b, SPECIAL), *out = array(b, SPECIAL * SPECIAL);
    for (int i = 0; i < SPECIAL; i++) put(x, b->t, i, special[i]);
    for (int op = DT_MINIMUM; op < DT_BINARY_OPS; op++) {
        dt_binary_args a = { .dtype = b->t,
            .op = op,
            .out = out,
            .a = x,
            .b = x,
            .shape = DT_SHAPE(SPECIAL, SPECIAL),
            .stride_a = { 1, 0 },
            .stride_b = { 0, 1 } };
        OK(b->v->binary(&a));
        for (int i = 0; i < SPECIAL * SPECIAL; i++) {
            double p = special[i / SPECIAL], q = special[i % SPECIAL],
                   want = naive_binary(op, p, q), got = get(out, b->t, i);
            CHECK_MSG(got == want || (isnan(got) && isnan(want)), "binary %d of %g and %g is %g",
                op, p, q, got);
        }
    }
}

static void bench_binary(bench *b) {
    static const int64_t stride[3][2][3] = { { { 185, 5, 1 }, { 185, 5, 1 } },
        { { 0, 5, 1 }, { 37, 1, 0 } }, { { 5, 0, 1 }, { 1, 3, 0 } } };
    for (int op = 0; op < DT_BINARY_OPS; op++)
        for (int s = 0; s < 6; s++) {
            void *x = array(b, N), *y = array(b, N), *out = array(b, N), *factor = array(b, N);
            double *want = before(b, out, b->t, 3 * 37 * 5);
            dt_shape shape = DT_SHAPE(3, 37, 5);
            int fused = (op + s) % 2; /* multiplies by -factor */
            for (int i = 0; i < N; i++) {
                if (op < DT_MINIMUM) put(y, b->t, i, 1.5 + get(y, b->t, i) / 2);
                if (op > DT_MAXIMUM && i % 3 == 0) put(y, b->t, i, get(x, b->t, i)); /* ties */
            }
            dt_binary_args a = { .dtype = b->t,
                .op = op,
                .out = out,
                .a = x,
                .b = y,
                .shape = shape,
                .accumulate = s > 2,
                .factor = fused ? factor : NULL,
                .negate = fused };
            memcpy(a.stride_a, stride[s % 3][0], sizeof stride[0][0]);
            memcpy(a.stride_b, stride[s % 3][1], sizeof stride[0][0]);
            for (int i = 0; i < 3 * 37 * 5; i++) {
                int64_t ia =
                    i / 185 * a.stride_a[0] + i / 5 % 37 * a.stride_a[1] + i % 5 * a.stride_a[2];
                int64_t ib =
                    i / 185 * a.stride_b[0] + i / 5 % 37 * a.stride_b[1] + i % 5 * a.stride_b[2];
                double p = get(x, b->t, ia), q = get(y, b->t, ib);
                want[i] = (s > 2 ? want[i] : 0) +
                          naive_binary(op, p, q) * (fused ? -get(factor, b->t, i) : 1);
            }
            OK(b->v->binary(&a));
            same(b, "binary", out, b->t, want, 3 * 37 * 5, 1);
            a.op = DT_BINARY_OPS;
            CHECK(b->v->binary(&a) == DT_ERR_ARG);
        }
}

/* Element by element; a strided mask, a repeated a, and zeros in place of b. A NaN that is not
   chosen does not show. */
static void bench_where(bench *b) {
    void *mask = array(b, N), *x = array(b, N), *y = array(b, N), *out = array(b, N);
    for (int i = 0; i < N; i++) {
        if (i % 3) put(mask, b->t, i, i % 3 == 1 ? 0 : -0.0);
        if (i % 5 == 0) put(i % 3 ? x : y, b->t, i, NAN);
    }
    put(mask, b->t, 0, NAN); /* not 0 */
    dt_where_args a = { .dtype = b->t,
        .out = out,
        .mask = mask,
        .a = x,
        .b = y,
        .shape = DT_SHAPE(N),
        .stride_mask = { 1 },
        .stride_a = { 1 },
        .stride_b = { 1 } };
    OK(b->v->where(&a));
    for (int i = 0; i < N; i++) CHECK(get(out, b->t, i) == get(i % 3 ? y : x, b->t, i));
    for (int add = 0; add < 2; add++) {
        double *want = before(b, out, b->t, R * C);
        dt_where_args zeros = { .dtype = b->t,
            .out = out,
            .mask = mask,
            .a = x,
            .shape = DT_SHAPE(R, C),
            .stride_mask = { 1, R },
            .stride_a = { 0, 1 },
            .accumulate = add };
        for (int i = 0; i < C; i++) put(x, b->t, i, 0.25 + i);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) {
                double *to = &want[r * C + c], chosen = (r + c * R) % 3 ? 0 : 0.25 + c;
                *to = (add ? *to : 0) + chosen;
            }
        OK(b->v->where(&zeros));
        same(b, "where", out, b->t, want, R * C, 1);
    }
}

/* A permutation with a repeated dimension (stride 0), stored and accumulated. */
static void bench_permute(bench *b) {
    for (int add = 0; add < 2; add++) {
        void *x = array(b, N), *out = array(b, 3 * N);
        double *want = before(b, out, b->t, 3 * N);
        dt_permute_args a = { .dtype = b->t,
            .out = out,
            .in = x,
            .shape = DT_SHAPE(R, 3, C),
            .out_stride = { 1, R * C, R },
            .in_stride = { C, 0, 1 },
            .accumulate = add };
        for (int r = 0; r < R; r++)
            for (int k = 0; k < 3; k++)
                for (int c = 0; c < C; c++) {
                    double *to = &want[r + k * N + c * R];
                    *to = (add ? *to : 0) + get(x, b->t, r * C + c);
                }
        OK(b->v->permute(&a));
        same(b, "permute", out, b->t, want, 3 * N, 1);
    }
    /* transposes of several tiles, and of one row and one column */
    const int64_t sizes[][2] = { { 67, 70 }, { 1, 70 }, { 70, 1 }, { 2, 64 }, { 130, 1100 } };
    for (int s = 0; s < 5; s++)
        for (int add = 0; add < 2; add++) {
            int64_t rows = sizes[s][0], cols = sizes[s][1];
            void *x = array(b, rows * cols), *out = array(b, rows * cols);
            double *want = before(b, out, b->t, rows * cols);
            dt_permute_args a = { .dtype = b->t,
                .out = out,
                .in = x,
                .shape = DT_SHAPE(cols, rows),
                .out_stride = { rows, 1 },
                .in_stride = { 1, cols },
                .accumulate = add };
            for (int64_t i = 0; i < rows * cols; i++)
                want[i] = (add ? want[i] : 0) + get(x, b->t, i % rows * cols + i / rows);
            OK(b->v->permute(&a));
            same(b, "transpose", out, b->t, want, rows * cols, 1);
        }
    void *one = array(b, 1), *to = array(b, 1);
    dt_permute_args a = { .dtype = b->t, .out = to, .in = one, .shape = DT_SCALAR };
    OK(b->v->permute(&a));
    CHECK(get(to, b->t, 0) == get(one, b->t, 0));
}

/* The first of equal maxima, in rows of several strips and in columns; the largest values stand in
   the first half, the first of them at various places. */
static void bench_max(bench *b) {
    enum { LONG = 1100 };
    for (int test = 0; test < 12; test++) {
        int inner = test % 2 ? 3 : 1, n = LONG / inner, shift = 9 * test;
        void *x = array(b, 2 * n * inner), *out = array(b, 2 * inner);
        int32_t index[6];
        for (int i = 0; i < 2 * n * inner; i++)
            put(x, b->t, i, i / inner % n < n / 2 ? (i + shift) * 37 % 61 : i * 37 % 59);
        dt_max_args a = { b->t, out, index, x, 2, n, inner };
        OK(b->v->max(&a));
        for (int k = 0; k < 2 * inner; k++) {
            int first = 0, base = k / inner * n * inner + k % inner;
            for (int j = 1; j < n; j++)
                if (get(x, b->t, base + j * inner) > get(x, b->t, base + first * inner)) first = j;
            CHECK_MSG(index[k] == first && get(out, b->t, k) == get(x, b->t, base + first * inner),
                "max %s %s of %d columns: %d is element %d, not %d", isa_name[b->isa],
                dt_dtype_name(b->t), inner, k, index[k], first);
        }
    }
}

static void bench_glu(bench *b) {
    for (int act = DT_ACT_GELU; act <= DT_ACT_TANH; act++)
        for (int add = 0; add < 2; add++) {
            void *x = array_of(b, b->t, 2 * N, 6), *y = array(b, N), *d = array(b, N),
                 *dx = array(b, 2 * N);
            double *f = doubles(b, N), *g = before(b, dx, b->t, 2 * N);
            for (int i = 0; i < N; i++) {
                int gate = i / C * 2 * C + i % C;
                double p = get(x, b->t, gate), up = get(x, b->t, gate + C), dy = get(d, b->t, i);
                f[i] = naive_act(act, p) * up;
                g[gate] = (add ? g[gate] : 0) + dy * up * naive_slope(act, p);
                g[gate + C] = (add ? g[gate + C] : 0) + dy * naive_act(act, p);
            }
            dt_glu_args a = { b->t, act, y, x, R, C };
            dt_glu_back_args back = { b->t, act, dx, d, x, R, C, add };
            OK(b->v->glu(&a));
            OK(b->v->glu_back(&back));
            same(b, "glu", y, b->t, f, N, 4);
            same(b, "glu_back", dx, b->t, g, 2 * N, 8);
            a.act = back.act = DT_ACT_AFFINE; /* has parameters */
            CHECK(b->v->glu(&a) == DT_ERR_ARG && b->v->glu_back(&back) == DT_ERR_ARG);
        }
}

static void bench_sum(bench *b) {
    static const size_t shape[4][3] = { { 3, 17, 5 }, { 1, R, C }, { R, C, 1 }, { 1, 701, 1 } };
    for (int s = 0; s < 16; s++) {
        size_t outer = shape[s % 4][0], n = shape[s % 4][1], inner = shape[s % 4][2];
        int add = s / 4 % 2, wide = s / 8;
        dt_dtype to = wide && is_narrow(b->t) ? DT_F32 : b->t;
        void *x = array(b, N), *out = array_of(b, to, outer * inner, 1);
        double *want = before(b, out, to, outer * inner);
        for (size_t i = 0; i < outer * inner; i++) {
            double sum = 0;
            for (size_t j = 0; j < n; j++)
                sum += get(x, b->t, (int64_t)((i / inner * n + j) * inner + i % inner));
            want[i] = (add ? want[i] : 0) + 0.375 * sum;
        }
        dt_sum_args a = { b->t, out, x, outer, n, inner, 0.375, add, wide, NULL, 0 };
        OK(b->v->sum(&a));
        same(b, "sum", out, to, want, outer * inner, 4);
    }
}

static void bench_cumsum(bench *b) {
    static const size_t shape[4][3] = { { 3, 17, 5 }, { 1, R, C }, { 2, 3, 521 }, { 2, 521, 1 } };
    for (int s = 0; s < 16; s++) {
        size_t outer = shape[s % 4][0], n = shape[s % 4][1], inner = shape[s % 4][2],
               count = outer * n * inner;
        int reverse = s / 4 % 2, add = s / 8;
        void *x = array(b, count), *out = array(b, count);
        double *want = before(b, out, b->t, count);
        for (size_t i = 0; i < count; i++) {
            size_t j = i / inner % n;
            double sum = 0;
            for (size_t l = reverse ? j : 0; l < (reverse ? n : j + 1); l++)
                sum += get(x, b->t, (int64_t)(i + l * inner - j * inner));
            want[i] = (add ? want[i] : 0) + sum;
        }
        dt_cumsum_args a = { b->t, out, x, outer, n, inner, reverse, add };
        OK(b->v->cumsum(&a));
        same(b, "cumsum", out, b->t, want, count, 64);
    }
}

static void bench_patches(bench *b) {
    static const dt_window windows[] = {
        { 2, { 5, 7 }, { 5, 7 }, 1, { 3, 3 }, { 1, 1 }, { 1, 1 }, { 1, 1 } },
        { 1, { 6, 9 }, { 3, 3 }, 5, { 2, 3 }, { 2, 4 }, { 0, 1 }, { 1, 1 } },
        { 1, { 8, 5 }, { 2, 4 }, 3, { 3, 2 }, { 3, 1 }, { 1, 0 }, { 2, 1 } },
        { 2, { 1, 3 }, { 1, 2 }, 521, { 1, 2 }, { 1, 2 }, { 0, 1 }, { 1, 1 } },
    };
    for (int s = 0; s < 8; s++) {
        const dt_window w = windows[s % 4];
        int64_t each = w.kernel[0] * w.kernel[1], pixels = w.batch * w.in[0] * w.in[1] * w.channels,
                count = w.batch * w.out[0] * w.out[1] * each * w.channels, add = s / 4;
        void *x = array(b, (size_t)pixels), *out = array(b, (size_t)count),
             *dx = array(b, (size_t)pixels), *dout = array(b, (size_t)count);
        double *want = doubles(b, (size_t)count), *back = before(b, dx, b->t, (size_t)pixels);
        if (!add) memset(back, 0, (size_t)pixels * sizeof *back);
        for (int64_t i = 0; i < count; i++) {
            int64_t c = i % w.channels, k = i / w.channels % each, at = i / w.channels / each;
            int64_t column = at % w.out[1] * w.stride[1] + k % w.kernel[1] * w.dilation[1] -
                             w.padding[1],
                    row = at / w.out[1] % w.out[0] * w.stride[0] + k / w.kernel[1] * w.dilation[0] -
                          w.padding[0],
                    image = at / w.out[1] / w.out[0];
            int64_t from = ((image * w.in[0] + row) * w.in[1] + column) * w.channels + c;
            int outside = row < 0 || row >= w.in[0] || column < 0 || column >= w.in[1];
            want[i] = outside ? -0.5 : get(x, b->t, from);
            if (!outside) back[from] += get(dout, b->t, i);
        }
        dt_patches_args a = { .dtype = b->t, .out = out, .in = x, .window = w, .pad_value = -0.5 };
        dt_patches_back_args d = {
            .dtype = b->t, .dx = dx, .dout = dout, .window = w, .accumulate = (int)add
        };
        OK(b->v->patches(&a));
        OK(b->v->patches_back(&d));
        same(b, "patches", out, b->t, want, (size_t)count, 1);
        same(b, "patches_back", dx, b->t, back, (size_t)pixels, 16);
    }
}

/* Pooling equals the maximum or mean of the patches; x has equal elements and NaNs. */
static void bench_pool(bench *b) {
    static const dt_window windows[] = {
        { 2, { 5, 7 }, { 5, 7 }, 1, { 3, 3 }, { 1, 1 }, { 1, 1 }, { 1, 1 } },
        { 1, { 6, 9 }, { 3, 3 }, 5, { 2, 3 }, { 2, 4 }, { 0, 1 }, { 1, 1 } },
        { 2, { 3, 6 }, { 1, 3 }, 521, { 2, 2 }, { 2, 2 }, { 0, 0 }, { 1, 1 } },
    };
    for (int s = 0; s < 12; s++) {
        const dt_window w = windows[s % 3];
        int pool = s / 3 % 2 ? DT_POOL_MAX : DT_POOL_MEAN, add = s / 6;
        int64_t each = w.kernel[0] * w.kernel[1], C = w.channels,
                pixels = w.batch * w.in[0] * w.in[1] * C, count = w.batch * w.out[0] * w.out[1] * C;
        void *x = array(b, (size_t)pixels), *out = array(b, (size_t)count),
             *dx = array(b, (size_t)pixels), *dout = array(b, (size_t)count),
             *all = array(b, (size_t)(count * each));
        int32_t *index = (int32_t *)keep(b, room((size_t)count * 4));
        double *want = doubles(b, (size_t)count), *back = before(b, dx, b->t, (size_t)pixels);
        for (int64_t i = 0; i < pixels; i++) put(x, b->t, i, i % 41 ? (double)(i * 7 % 5) : NAN);
        if (!add) memset(back, 0, (size_t)pixels * sizeof *back);
        double pad = pool == DT_POOL_MAX ? -INFINITY : 0;
        dt_patches_args a = { b->t, all, x, w, pad, DT_POOL_NONE, NULL };
        OK(b->v->patches(&a));
        for (int64_t i = 0; i < count; i++) {
            int64_t at = i / C, c = i % C, column = at % w.out[1] * w.stride[1] - w.padding[1],
                    row = at / w.out[1] % w.out[0] * w.stride[0] - w.padding[0],
                    image = at / w.out[1] / w.out[0], best = 0;
            want[i] = 0;
            for (int64_t k = 0; k < each; k++) {
                double value = get(all, b->t, (at * each + k) * C + c),
                       max = get(all, b->t, (at * each + best) * C + c);
                if (value > max || (isnan(value) && !isnan(max))) best = k;
                want[i] += value / (double)each;
            }
            if (pool == DT_POOL_MAX) want[i] = get(all, b->t, (at * each + best) * C + c);
            for (int64_t k = 0; k < each; k++) {
                int64_t y = row + k / w.kernel[1] * w.dilation[0],
                        z = column + k % w.kernel[1] * w.dilation[1];
                double d = get(dout, b->t, i);
                if (pool == DT_POOL_MEAN || k == best)
                    if (y >= 0 && y < w.in[0] && z >= 0 && z < w.in[1])
                        back[((image * w.in[0] + y) * w.in[1] + z) * C + c] +=
                            pool == DT_POOL_MEAN ? d / (double)each : d;
            }
        }
        a.out = out, a.pool = pool, a.index = index;
        dt_patches_back_args d = { b->t, dx, dout, w, add, pool, index };
        OK(b->v->patches(&a));
        OK(b->v->patches_back(&d));
        for (int64_t i = 0; i < count; i++) /* same compares numbers only */
            if (isnan(want[i]) && isnan(get(out, b->t, i))) put(out, b->t, i, want[i] = 99);
        same(b, "pool", out, b->t, want, (size_t)count, 16);
        same(b, "pool_back", dx, b->t, back, (size_t)pixels, 32);
    }
}

static void bench_pick(bench *b) {
    void *x = array(b, N), *y = array(b, N), *dx = array(b, N);
    int32_t *index = (int32_t *)keep(b, room(N * 4));
    for (int i = 0; i < N; i++)
        put(x, b->t, i, floor(4 * get(x, b->t, i)) / 4); /* with equal elements */
    dt_max_args a = { b->t, y, index, x, 3, 17, 13 };
    OK(b->v->max(&a));
    double *want = doubles(b, N), *back = before(b, dx, b->t, N);
    int wrong = 0;
    for (int i = 0; i < 39; i++) {
        int best = 0;
        for (int j = 1; j < 17; j++)
            if (get(x, b->t, (i / 13 * 17 + j) * 13 + i % 13) >
                get(x, b->t, (i / 13 * 17 + best) * 13 + i % 13))
                best = j;
        wrong += index[i] != best;
        want[i] = get(x, b->t, (i / 13 * 17 + best) * 13 + i % 13);
        back[(i / 13 * 17 + best) * 13 + i % 13] += want[i];
    }
    CHECK_MSG(wrong == 0, "max %s: %d indices are wrong", isa_name[b->isa], wrong);
    same(b, "max", y, b->t, want, 39, 1);
    dt_scatter_args spread = { b->t, dx, y, index, 3, 17, 1, 13, 1 };
    OK(b->v->scatter(&spread));
    same(b, "scatter", dx, b->t, back, 3 * 17 * 13, 2);
    memset(back, 0, N * 8);
    dt_topk_args top = { b->t, y, index, x, R, C, 5 };
    OK(b->v->topk(&top));
    for (int r = 0; r < R; r++) /* the largest element not yet taken; of equal ones the first */
        for (int j = 0; j < 5; j++) {
            int best = -1;
            for (int c = 0; c < C; c++)
                if (back[r * C + c] == 0 &&
                    (best < 0 || get(x, b->t, r * C + c) > get(x, b->t, r * C + best)))
                    best = c;
            back[r * C + best] = 1;
            want[r * 5 + j] = get(x, b->t, r * C + best);
            wrong += index[r * 5 + j] != best;
        }
    CHECK_MSG(wrong == 0, "topk %s %s: %d indices are wrong", isa_name[b->isa], dt_dtype_name(b->t),
        wrong);
    same(b, "topk", y, b->t, want, R * 5, 1);
    for (int i = 0; i < N; i++) back[i] = 0;
    for (int i = 0; i < R * 5; i++) back[i / 5 * C + index[i]] = want[i];
    dt_scatter_args rows = { b->t, dx, y, index, R, C, 5, 1, 0 };
    OK(b->v->scatter(&rows));
    same(b, "scatter of topk", dx, b->t, back, N, 1);
    index[3] = C;
    top.k = C + 1;
    a.n = 0;
    CHECK(b->v->scatter(&rows) == DT_ERR_ARG && b->v->topk(&top) == DT_ERR_ARG &&
          b->v->max(&a) == DT_ERR_ARG);
}

static void bench_softmax(bench *b) {
    for (int add = 0; add < 2; add++) {
        void *x = array_of(b, b->t, N, 9), *y = array(b, N), *d = array(b, N), *dx = array(b, N);
        size_t work_bytes = dt_row_work(C, b->t);
        void *work = keep(b, room(work_bytes));
        double *want = doubles(b, N), *back = before(b, dx, b->t, N);
        dt_softmax_args a = { b->t, y, x, R, C, work, work_bytes };
        OK(b->v->softmax(&a));
        for (int r = 0; r < R; r++) {
            double sum = 0, dot = 0;
            for (int c = 0; c < C; c++) sum += exp(get(x, b->t, r * C + c));
            for (int c = 0; c < C; c++) want[r * C + c] = exp(get(x, b->t, r * C + c)) / sum;
            for (int c = 0; c < C; c++) dot += get(y, b->t, r * C + c) * get(d, b->t, r * C + c);
            for (int c = 0; c < C; c++) {
                double *to = &back[r * C + c];
                *to = (add ? *to : 0) + get(y, b->t, r * C + c) * (get(d, b->t, r * C + c) - dot);
            }
        }
        same(b, "softmax", y, b->t, want, N, 0.01);
        dt_softmax_back_args g = { b->t, dx, d, y, R, C, add, work, work_bytes };
        OK(b->v->softmax_back(&g));
        same(b, "softmax_back", dx, b->t, back, N, 1);
        a.work_bytes--;
        g.work_bytes--;
        CHECK(b->v->softmax(&a) == DT_ERR_ARG && b->v->softmax_back(&g) == DT_ERR_ARG);
        a.work = NULL;
        CHECK(b->v->softmax(&a) == DT_ERR_ARG);
    }
}

/* Bits of kind: 1 RMSNorm, 2 accumulate gradients, 4 gradients in the accumulation type. */
static void bench_norm(bench *b, int kind) {
    int rms = kind & 1, add = kind >> 1 & 1, wide = kind >> 2;
    dt_dtype stat = is_narrow(b->t) ? DT_F32 : b->t, to = wide ? stat : b->t;
    size_t work_bytes = dt_row_work(C, b->t);
    void *x = array(b, N), *gain = array(b, C), *bias = array(b, C), *y = array(b, N),
         *d = array(b, N);
    void *dx = array(b, N), *dg = array_of(b, to, C, 1), *db = array_of(b, to, C, 1),
         *work = keep(b, room(work_bytes));
    void *mean = array_of(b, stat, R, 1), *rstd = array_of(b, stat, R, 1);
    double *f = doubles(b, N), *gx = before(b, dx, b->t, N), *gg = before(b, dg, to, C),
           *gb = before(b, db, to, C);
    double *m = doubles(b, R), *s = doubles(b, R);
    for (int c = 0; c < C && !add; c++) gg[c] = gb[c] = 0;
    for (int r = 0; r < R; r++) {
        double mg = 0, mgy = 0;
        for (int c = 0; c < C && !rms; c++) m[r] += get(x, b->t, r * C + c) / C;
        for (int c = 0; c < C; c++) s[r] += pow(get(x, b->t, r * C + c) - m[r], 2) / C;
        s[r] = 1 / sqrt(s[r] + 0.01);
        for (int c = 0; c < C; c++) {
            double u = (get(x, b->t, r * C + c) - m[r]) * s[r], dy = get(d, b->t, r * C + c),
                   w = get(gain, b->t, c);
            f[r * C + c] = u * w + (rms ? 0 : get(bias, b->t, c));
            gg[c] += dy * u;
            gb[c] += dy;
            mg += rms ? 0 : dy * w / C;
            mgy += dy * w * u / C;
        }
        for (int c = 0; c < C; c++) {
            double u = (get(x, b->t, r * C + c) - m[r]) * s[r];
            double g = get(d, b->t, r * C + c) * get(gain, b->t, c);
            gx[r * C + c] = (add ? gx[r * C + c] : 0) + s[r] * (g - mg - u * mgy);
        }
    }
    dt_norm_args a = { .dtype = b->t,
        .out = y,
        .mean = rms ? NULL : mean,
        .rstd = rstd,
        .in = x,
        .gain = gain,
        .bias = rms ? NULL : bias,
        .rows = R,
        .cols = C,
        .eps = 0.01,
        .rms = rms,
        .work = work,
        .work_bytes = work_bytes };
    dt_norm_back_args g = { b->t, dx, dg, rms ? NULL : db, d, x, gain, a.mean, rstd, R, C, add, add,
        add, rms, wide, wide, work, work_bytes, 0 };
    OK(b->v->norm(&a));
    OK(b->v->norm_back(&g));
    same(b, "norm", y, b->t, f, N, 2);
    if (!rms) same(b, "mean", mean, stat, m, R, 1), same(b, "dbias", db, to, gb, C, 4);
    same(b, "rstd", rstd, stat, s, R, 1);
    same(b, "norm_back", dx, b->t, gx, N, 4);
    same(b, "dgain", dg, to, gg, C, 8);
    a.work_bytes--;
    g.work_bytes--;
    CHECK(b->v->norm(&a) == DT_ERR_ARG && b->v->norm_back(&g) == DT_ERR_ARG);
}

/* Bits of kind: 1 rotate neighbouring elements, 2 the inverse rotation, 4 accumulate. */
static void bench_rope(bench *b, int kind) {
    enum { T = 5, H = 3, D = 38, ROTARY = 14 };
    int apart = kind & 1 ? 1 : ROTARY / 2, add = kind >> 2;
    void *x = array(b, T * H * D), *y = array(b, T * H * D);
    double *want = before(b, y, b->t, T * H * D);
    int32_t at[T] = { 0, 7, -2, 4099, 31000 };
    for (int i = 0; i < T * H * D; i++) {
        int c = i % D, pair = kind & 1 ? c / 2 : c % (ROTARY / 2),
            second = kind & 1 ? c % 2 : c >= ROTARY / 2;
        double angle = at[i / (H * D)] * pow(1e4, -2.0 * pair / ROTARY) * (kind & 2 ? -1 : 1),
               v = get(x, b->t, i);
        double other = c < ROTARY ? get(x, b->t, second ? i - apart : i + apart) : 0;
        if (c < ROTARY) v = v * cos(angle) + (second ? other : -other) * sin(angle);
        want[i] = (add ? want[i] : 0) + v;
    }
    dt_rope_args a = { b->t, y, x, at, T, H, D, ROTARY, 1e4, kind & 1, kind >> 1 & 1, add,
        { .kind = 0 } };
    OK(b->v->rope(&a));
    same(b, "rope", y, b->t, want, T * H * D, 2);
    a.rotary = 15;
    CHECK(b->v->rope(&a) == DT_ERR_ARG);
    a.rotary = D + 2;
    CHECK(b->v->rope(&a) == DT_ERR_ARG);
    a.dim = 514;
    CHECK(b->v->rope(&a) == DT_ERR_ARG);
}

static void bench_rows(bench *b) {
    int32_t ids[R];
    for (int i = 0; i < R; i++) ids[i] = i % 6 == 5 ? -1 : i * 7 % 17;
    void *x = array(b, N), *y = array(b, N), *d = array(b, N);
    double *want = doubles(b, N);
    for (int i = 0; i < N; i++) {
        int row = ids[i / C] - 3;
        want[i] = row >= 0 && row < 11 ? get(x, b->t, row * C + i % C) : 0;
    }
    dt_embedding_args a = { b->t, y, x, ids, R, C, 3, 11, 17, 1 };
    OK(b->v->embedding(&a));
    same(b, "embedding", y, b->t, want, N, 1);
    a.allow_empty = 0;
    CHECK(b->v->embedding(&a) == DT_ERR_ARG);
    for (int kind = 0; kind < 4; kind++) {
        dt_dtype to = kind & 2 && is_narrow(b->t) ? DT_F32 : b->t;
        void *table = array_of(b, to, 11 * C, 1), *work = keep(b, room(11 * C * 4));
        double *sum = before(b, table, to, 11 * C);
        for (int i = 0; i < 11 * C && !(kind & 1); i++) sum[i] = 0;
        for (int i = 0; i < N; i++)
            if (ids[i / C] >= 3 && ids[i / C] < 14)
                sum[(ids[i / C] - 3) * C + i % C] += get(d, b->t, i);
        dt_embedding_back_args back = { b->t, table, d, ids, R, C, 3, 11, kind & 1, kind >> 1, NULL,
            0, 0 };
        if (is_narrow(to)) {
            CHECK(b->v->embedding_back(&back) == DT_ERR_ARG);
            back.work = work;
            back.work_bytes = 11 * C * 4 - 1;
            CHECK(b->v->embedding_back(&back) == DT_ERR_ARG);
            back.work_bytes++;
        }
        OK(b->v->embedding_back(&back));
        same(b, "embedding_back", table, to, sum, 11 * C, 4);
        back.check_ids = 1; /* now an id outside the table is an error; -1 still means no id */
        back.offset = 0;
        CHECK(b->v->embedding_back(&back) == DT_ERR_ARG);
        back.rows = 1;
        ids[0] = -1;
        OK(b->v->embedding_back(&back));
        for (int32_t bad = -2; bad < 12; bad += 13) {
            ids[0] = bad;
            CHECK(b->v->embedding_back(&back) == DT_ERR_ARG);
        }
        ids[0] = 0;
    }
}

/* Bits of kind: 1 padded columns, 2 label smoothing, 4 z-loss, 8 accumulate. */
static void bench_cross_entropy(bench *b, int kind) {
    int vocab = kind & 1 ? C - 4 : C, add = kind >> 3;
    double s = kind & 2 ? 0.2 : 0, z = kind & 4 ? 0.05 : 0, loss[2] = { 3, 5 }, up = 0.7,
           row_loss[R], want[2] = { 0, 0 };
    dt_dtype stat = is_narrow(b->t) ? DT_F32 : b->t;
    void *x = array_of(b, b->t, N, 5), *lse = array_of(b, stat, R, 1), *dx = array(b, N);
    size_t work_bytes = dt_row_work(C, b->t);
    void *work = keep(b, room(work_bytes));
    double *l = doubles(b, R), *g = before(b, dx, b->t, N);
    int32_t labels[R];
    for (int r = 0; r < R; r++) {
        double sum = 0, mean = 0;
        labels[r] = r % 5 == 3 ? -1 - r : r * 11 % vocab;
        for (int c = 0; c < vocab; c++)
            sum += exp(get(x, b->t, r * C + c)), mean += get(x, b->t, r * C + c) / vocab;
        l[r] = labels[r] < 0 ? 0 : log(sum);
        if (labels[r] >= 0) want[0] += l[r] - (1 - s) * get(x, b->t, r * C + labels[r]) - s * mean;
        want[1] += l[r] * l[r];
        for (int c = 0; c < C; c++) {
            double target = (c == labels[r] ? 1 - s : 0) + s / vocab,
                   p = exp(get(x, b->t, r * C + c) - l[r]);
            double d =
                labels[r] < 0 || c >= vocab ? 0 : 0.7 * 0.3 * (p * (1 + 2 * z * l[r]) - target);
            g[r * C + c] = (add ? g[r * C + c] : 0) + d;
        }
    }
    for (int i = 0; i < 2; i++) want[i] = want[i] / 3 + (add ? loss[i] : 0);
    dt_cross_entropy_args a = { b->t, loss, row_loss, lse, x, labels, R, C,
        kind & 1 ? (size_t)vocab : 0, 3, s, loss + 1, add, work, work_bytes, NULL, 0, 0 };
    dt_cross_entropy_back_args back = { b->t, dx, x, lse, labels, R, C,
        kind & 1 ? (size_t)vocab : 0, &up, 0.3, s, z, add, work, work_bytes, 0, 0 };
    OK(b->v->cross_entropy(&a));
    OK(b->v->cross_entropy_back(&back));
    same(b, "lse", lse, stat, l, R, 1);
    CHECK_MSG(fabs(loss[0] - want[0]) < 1e-5 && fabs(loss[1] - want[1]) < 1e-4,
        "loss %s %s: %.9g and %.9g, not %.9g and %.9g", isa_name[b->isa], dt_dtype_name(b->t),
        loss[0], loss[1], want[0], want[1]);
    same(b, "cross_entropy_back", dx, b->t, g, N, 1);
    labels[2] = vocab;
    CHECK(b->v->cross_entropy(&a) == DT_ERR_ARG && b->v->cross_entropy_back(&back) == DT_ERR_ARG);
    labels[2] = 0;
    a.work_bytes = back.work_bytes = work_bytes - 1;
    CHECK(b->v->cross_entropy(&a) == DT_ERR_ARG && b->v->cross_entropy_back(&back) == DT_ERR_ARG);
    a.work_bytes = work_bytes;
    a.vocab = C + 1;
    CHECK(b->v->cross_entropy(&a) == DT_ERR_ARG);
}

/* Binary cross-entropy of logits up to 200 and targets between 0 and 1, most of them 0 or 1. */
static void bench_bce(bench *b) {
    enum { LONG = DT_PIECE + 77 };
    void *x = array(b, LONG), *y = array(b, LONG), *dx = array(b, LONG), *dy = array(b, LONG);
    double *gx = before(b, dx, b->t, LONG), *gy = before(b, dy, b->t, LONG), loss = 0, total = 0,
           up = 0.5;
    for (int i = 0; i < LONG; i++) {
        put(x, b->t, i, get(x, b->t, i) * (i % 4 ? 4 : 200));
        put(y, b->t, i, i % 3 < 2 ? i % 3 : fabs(get(y, b->t, i)));
        double p = get(x, b->t, i), q = get(y, b->t, i);
        total += p > 0 ? p * (1 - q) + log1p(exp(-p)) : -p * q + log1p(exp(p));
        gx[i] += 0.5 * 0.3 * (1 / (1 + exp(-p)) - q);
        gy[i] -= 0.5 * 0.3 * p;
    }
    dt_pair_loss_args a = { b->t, DT_PAIR_BCE, &loss, x, y, LONG, 3 };
    dt_pair_loss_back_args back = { b->t, DT_PAIR_BCE, dx, x, y, LONG, &up, 0.3, 1 },
                           target = { b->t, DT_PAIR_BCE_TARGET, dy, y, x, LONG, &up, 0.3, 1 };
    OK(b->v->pair_loss(&a));
    OK(b->v->pair_loss_back(&back));
    OK(b->v->pair_loss_back(&target));
    CHECK_MSG(fabs(loss - total / 3) < (b->t == DT_F64 ? 1e-14 : 1e-6) * total,
        "loss %.9g, not %.9g", loss, total / 3);
    same(b, "bce back", dx, b->t, gx, LONG, 1);
    same(b, "bce target", dy, b->t, gy, LONG, 1);
    /* a right and sure answer still has a loss, which a sum with cancellation would lose */
    put(x, b->t, 0, -20);
    put(y, b->t, 0, 0);
    a.count = 1;
    OK(b->v->pair_loss(&a));
    CHECK(fabs(loss * 3 / log1p(exp(-20)) - 1) < 1e-5);
    a.kind = DT_PAIR_BCE_TARGET, back.kind = DT_PAIR_BCE_TARGET + 1;
    CHECK(b->v->pair_loss(&a) == DT_ERR_ARG && b->v->pair_loss_back(&back) == DT_ERR_ARG);
}

static void bench_others(bench *b) {
    enum { LONG = 2 * DT_PIECE + 77 };
    void *x = array(b, LONG), *y = array(b, LONG), *dx = array(b, LONG);
    double *g = before(b, dx, b->t, LONG), *want = doubles(b, LONG), sums[3], loss = 0, up = 0.5,
           total = 0;
    double squares[3] = { 0 };
    for (int i = 0; i < LONG; i++) {
        double p = get(x, b->t, i), q = get(y, b->t, i);
        total += (p - q) * (p - q);
        squares[i / DT_PIECE] += p * p;
        g[i] += 0.5 * 0.3 * (p - q);
        want[i] = 0.1;
    }
    dt_pair_loss_args mse = { b->t, DT_PAIR_SQUARE, &loss, x, y, LONG, 3 };
    dt_pair_loss_back_args back = { b->t, DT_PAIR_SQUARE, dx, x, y, LONG, &up, 0.3, 1 };
    dt_square_sums_args square = { b->t, sums, x, LONG };
    OK(b->v->pair_loss(&mse));
    OK(b->v->pair_loss_back(&back));
    OK(b->v->square_sums(&square));
    CHECK(fabs(loss - total / 3) < 1e-9 * total);
    for (int i = 0; i < 3; i++) CHECK(fabs(sums[i] - squares[i]) < 1e-12 * squares[i]);
    same(b, "mse_back", dx, b->t, g, LONG, 1);
    dt_fill_args fill = { b->t, x, LONG, 0.1 };
    OK(b->v->fill(&fill));
    same(b, "fill", x, b->t, want, LONG, 0);
    for (int normal = 0; normal < 2; normal++) { /* all elements, and 100 of them from the middle */
        dt_init_args a = { b->t, x, LONG, normal, 0.5, 12345, 77 },
                     part = { b->t, y, 100, normal, 0.5, 12345, 77 + 601 };
        OK(b->v->init(&a));
        OK(b->v->init(&part));
        CHECK(memcmp((char *)x + 601 * dt_dtype_size(b->t), y, 100 * dt_dtype_size(b->t)) == 0);
        same(b, "init", x, b->t, before(b, x, b->t, LONG), LONG, 1);
    }
}

/* SGD, Adam and AdamW, which also write a 16-bit copy of the f32 or f64 parameter. */
static void bench_updates(bench *b) {
    if (is_narrow(b->t)) return;
    for (int kind = 0; kind < 4; kind++) {
        dt_dtype narrow = kind & 1 ? DT_BF16 : DT_F16;
        void *p = array(b, N), *g = array(b, N), *m = array(b, N), *v = array(b, N),
             *copy = array_of(b, narrow, N, 1);
        double *want = before(b, p, b->t, N), *wm = before(b, m, b->t, N), *wv = doubles(b, N);
        for (int i = 0; i < N; i++) {
            put(v, b->t, i, fabs(get(v, b->t, i)));
            double x = want[i], d = 0.5 * get(g, b->t, i);
            if (kind < 2) {
                wm[i] = 0.9 * wm[i] + d + 0.01 * x;
                want[i] = x - 0.1 * wm[i];
            } else {
                if (kind == 3) d += 0.1 * x;
                wm[i] = 0.9 * wm[i] + 0.1 * d;
                wv[i] = 0.99 * get(v, b->t, i) + 0.01 * d * d;
                double step =
                    0.01 * wm[i] / (1 - pow(0.9, 3)) / (sqrt(wv[i] / (1 - pow(0.99, 3))) + 1e-8);
                want[i] = x * (kind == 3 ? 1 : 1 - 0.01 * 0.1) - step;
            }
        }
        dt_sgd_args sgd = { b->t, p, g, m, N, 0.1, 0.9, 0.01, 0.5, 2, narrow, copy };
        dt_adamw_args adamw = { b->t, p, g, m, v, N, 0.01, 0.9, 0.99, 1e-8, 0.1, 0.5, 3, kind == 3,
            narrow, copy, NULL };
        if (kind < 2)
            OK(b->v->sgd(&sgd));
        else
            OK(b->v->adamw(&adamw));
        same(b, "updated", p, b->t, want, N, 1);
        same(b, "first moment", m, b->t, wm, N, 1);
        if (kind > 1) same(b, "second moment", v, b->t, wv, N, 1);
        int wrong = 0;
        for (int i = 0; i < N; i++) wrong += ((uint16_t *)copy)[i] != to16(narrow, get(p, b->t, i));
        CHECK_MSG(wrong == 0, "%d values of the 16-bit copy differ from the parameter", wrong);
    }
}

/* One call with a list of updates has the bits of one call for each update. Every second update has
   misaligned arrays. */
static void bench_update_lists(bench *b) {
    enum { RUNS = 6, EACH = 2100, ARRAYS = 5 };
    static const size_t counts[RUNS] = { 5, 0, 1, 700, 2050, 33 };
    size_t size = dt_dtype_size(b->t), bytes = ARRAYS * EACH * size;
    for (int kind = 0; kind < 4 && !is_narrow(b->t); kind++) {
        dt_adamw_args list[RUNS], alone[RUNS];
        char *data[2][RUNS], *start = (char *)keep(b, room(bytes));
        for (int i = 0; i < RUNS; i++) {
            data[0][i] = (char *)array(b, ARRAYS * EACH);
            data[1][i] = (char *)keep(b, room(bytes));
            for (int k = 3 * EACH; k < 4 * EACH; k++)
                put(data[0][i], b->t, k, fabs(get(data[0][i], b->t, k)));
            memcpy(data[1][i], data[0][i], bytes);
            for (int copy = 0; copy < 2; copy++) {
                char *p = data[copy][i] + (size_t)(i % 2) * size,
                     *narrow = data[copy][i] + 4 * EACH * size + i % 2 * 2;
                dt_adamw_args a = { b->t, p, p + EACH * size, p + 2 * EACH * size,
                    p + 3 * EACH * size, counts[i], 0.01 * (i + 1), 0.9, 0.99, 1e-8, i % 3 * 0.1,
                    0.5, 3, kind % 2, DT_F16, kind > 1 ? narrow : NULL,
                    copy || i == RUNS - 1 ? NULL : &list[i + 1] };
                *(copy ? &alone[i] : &list[i]) = a;
            }
        }
        memcpy(start, data[0][4], bytes);
        for (int wrong = 0; wrong < 3; wrong++) { /* an invalid update: none is made */
            dt_adamw_args right = list[RUNS - 1];
            if (wrong == 0) list[RUNS - 1].step = 0;
            if (wrong == 1) list[RUNS - 1].dtype = b->t == DT_F32 ? DT_F64 : DT_F32;
            if (wrong == 2) list[RUNS - 1].model_dtype = DT_BF16;
            CHECK(b->v->adamw(list) == DT_ERR_ARG && memcmp(start, data[0][4], bytes) == 0);
            list[RUNS - 1] = right;
        }
        OK(b->v->adamw(list));
        for (int i = 0; i < RUNS; i++) {
            OK(b->v->adamw(&alone[i]));
            CHECK_MSG(memcmp(data[0][i], data[1][i], bytes) == 0,
                "update %d of a list differs, kind %d", i, kind);
        }
        CHECK(memcmp(start, data[0][4], bytes) != 0);
    }
}

/* The kernels of 1-bit Adam: packs MANY values into 3 messages and unpacks 2 of them. Values
   without a second moment are skipped. */
static void bench_signs(bench *b) {
    enum { PART = 1096, MANY = 3 * PART, BYTES = PART / 8 + 8 };
    if (is_narrow(b->t)) return;
    void *x = array(b, MANY), *error = array(b, MANY), *v = array(b, MANY),
         *copy = array_of(b, DT_BF16, MANY, 1);
    void *mean = array(b, PART), *m = array(b, MANY), *p = array(b, MANY);
    double *left = before(b, error, b->t, MANY), *read = doubles(b, PART), squares = 0, numbers = 0,
           scale, sent;
    double *wm = before(b, m, b->t, MANY), *wp = before(b, p, b->t, MANY);
    unsigned char *out = (unsigned char *)keep(b, room(3 * BYTES));
    for (int i = 0; i < MANY; i++) {
        put(v, b->t, i, i % 7 == 3 ? 0 : fabs(get(v, b->t, i)) + 0.01);
        if (i == 5) put(x, b->t, i, -left[i]); /* their sum is 0, which counts as positive */
        left[i] = i % 7 == 3 ? 0 : get(x, b->t, i) + left[i];
        squares += left[i] * left[i];
        numbers += i % 7 != 3;
        wm[i] = 0.9 * wm[i] + 0.1 * 4 * get(x, b->t, i);
        wp[i] = wp[i] - 0.3 * (wm[i] / (sqrt(get(v, b->t, i)) + 0.25) + 0.1 * wp[i]);
    }
    scale = sqrt(squares / numbers);
    dt_sign_pack_args pack = { b->t, out, x, error, v, MANY, 3, NULL, 0 };
    dt_sign_unpack_args unpack = { b->t, mean, out + BYTES, v, PART, 2 };
    OK(b->v->sign_pack(&pack));
    OK(b->v->sign_unpack(&unpack));
    int wrong = 0;
    for (int i = 0; i < MANY; i++) {
        const unsigned char *message = out + i / PART * BYTES;
        double sign = left[i] >= 0 ? 1 : -1;
        wrong += (message[i % PART / 8] >> i % 8 & 1) != (sign > 0);
        /* unpacking skips by the second moments of the first part */
        if (i >= PART && i % PART % 7 != 3) read[i % PART] += sign * scale / 2;
        if (i % 7 != 3) left[i] -= sign * scale;
    }
    for (int k = 0; k < 3; k++) {
        memcpy(&sent, out + k * BYTES + PART / 8, 8);
        CHECK_MSG(fabs(sent - scale) <= 1e-6 * scale, "scale %g, not %g", sent, scale);
    }
    CHECK_MSG(wrong == 0, "%d of %d signs are wrong", wrong, MANY);
    same(b, "compression error of signs", error, b->t, left, MANY, 1);
    same(b, "mean of signs", mean, b->t, read, PART, 1);
    dt_momentum_args momentum = { b->t, m, x, MANY, 0.9, 4 };
    dt_frozen_adam_args update = { b->t, p, m, v, MANY, 0.3, 0.25, 0.1, DT_BF16, copy };
    OK(b->v->momentum(&momentum));
    OK(b->v->frozen_adam(&update));
    same(b, "momentum", m, b->t, wm, MANY, 1);
    same(b, "frozen update", p, b->t, wp, MANY, 1);
    for (int i = 0; i < MANY; i++) wrong += ((uint16_t *)copy)[i] != to16(DT_BF16, get(p, b->t, i));
    CHECK_MSG(wrong == 0, "%d values of the 16-bit copy differ from the parameter", wrong);
    pack.parts = 5;
    unpack.n = 0;
    CHECK(b->v->sign_pack(&pack) == DT_ERR_ARG && b->v->sign_unpack(&unpack) == DT_ERR_ARG);
}

/* Dropout keeps the right fraction of values. Which values it keeps depends on the key, the token
   and the column, not on the order of tokens or on the rank that holds the column. */
static void bench_dropout(bench *b) {
    enum { ROWS = 101, COLS = 203 };
    void *x = array(b, ROWS * COLS), *y = array(b, ROWS * COLS), *z = array(b, ROWS * COLS);
    double *want = doubles(b, ROWS * COLS), kept = 0;
    int32_t tokens[ROWS], permuted[ROWS];
    size_t size = dt_dtype_size(b->t);
    int wrong = 0;
    for (int r = 0; r < ROWS; r++) tokens[r] = r, permuted[r] = 5 * r % ROWS;
    for (int i = 0; i < ROWS * COLS; i++) put(x, b->t, i, 1 + fabs(get(x, b->t, i)));
    dt_dropout_args a = { b->t, y, x, tokens, ROWS, COLS, 0, 0.3, 99, 0 };
    OK(b->v->dropout(&a));
    for (int i = 0; i < ROWS * COLS; i++) {
        int zero = get(y, b->t, i) == 0;
        kept += !zero;
        want[i] = zero ? 0 : get(x, b->t, i) / 0.7;
    }
    same(b, "dropout", y, b->t, want, ROWS * COLS, 0);
    CHECK_MSG(fabs(kept / (ROWS * COLS) - 0.7) < 0.012, "dropout of 0.3 keeps %.4f",
        kept / (ROWS * COLS));
    a.out = z;
    a.tokens = NULL;
    OK(b->v->dropout(&a)); /* NULL tokens: a row's token is its index; the same values drop */
    CHECK(memcmp(y, z, ROWS * COLS * size) == 0);
    a.tokens = permuted; /* the same tokens and values in permuted rows */
    for (int i = 0; i < ROWS * COLS; i++)
        put(z, b->t, i, get(x, b->t, permuted[i / COLS] * COLS + i % COLS));
    void *in = keep(b, room(ROWS * COLS * 8));
    memcpy(in, z, ROWS * COLS * size);
    a.in = in;
    OK(b->v->dropout(&a));
    for (int i = 0; i < ROWS * COLS; i++)
        wrong += get(z, b->t, i) != get(y, b->t, permuted[i / COLS] * COLS + i % COLS);
    CHECK_MSG(wrong == 0, "dropout: %d values depend on the order of tokens", wrong);
    /* columns from `first` on, as a rank with a shard of the columns has them */
    for (int first = 1; first < COLS; first += 67) {
        int n = COLS - first;
        for (int i = 0; i < ROWS * n; i++)
            put(in, b->t, i, get(x, b->t, i / n * COLS + first + i % n));
        dt_dropout_args part = { b->t, z, in, tokens, ROWS, (size_t)n, first, 0.3, 99, 0 };
        OK(b->v->dropout(&part));
        for (int i = 0; i < ROWS * n; i++)
            wrong += get(z, b->t, i) != get(y, b->t, i / n * COLS + first + i % n);
        CHECK_MSG(
            wrong == 0, "dropout: %d values differ in a shard from column %d on", wrong, first);
    }
    a.key = 100;
    OK(b->v->dropout(&a));
    double both = 0;
    for (int i = 0; i < ROWS * COLS; i++)
        both += get(z, b->t, i) != 0 && get(y, b->t, permuted[i / COLS] * COLS + i % COLS) != 0;
    CHECK_MSG(fabs(both / (ROWS * COLS) - 0.49) < 0.015,
        "dropout: %.3f of the values are kept with both of two keys", both / (ROWS * COLS));
}

/* Integers beyond 2^53, which no double represents, and results that wrap. */
static void integers_wrap(void) {
    static const struct {
        dt_op op;
        int64_t x[3], want;
    } wide[] = { { DT_SUM, { INT64_MAX, 1, 0 }, INT64_MIN },
        { DT_SUM, { (1ll << 53) + 1, 1ll << 53, 1 }, (1ll << 54) + 2 },
        { DT_SUM, { INT64_MIN, -1, INT64_MIN }, -1 },
        { DT_AVG, { INT64_MAX, INT64_MAX, INT64_MAX }, (INT64_MAX - 2) / 3 },
        { DT_AVG, { -7, -7, -6 }, -6 }, { DT_MAX, { INT64_MAX - 1, INT64_MAX, 7 }, INT64_MAX },
        { DT_MIN, { INT64_MIN + 1, INT64_MIN, 7 }, INT64_MIN },
        { DT_PROD, { 3037000501, 3037000501, 1 }, -9223372030635300615ll },
        { DT_PROD, { 94906267, 94906267, 3 }, 27021598547625867ll } };
    static const struct {
        dt_op op;
        uint8_t x[3], want;
    } bytes[] = { { DT_SUM, { 200, 100, 3 }, 47 }, { DT_AVG, { 100, 50, 30 }, 60 },
        { DT_AVG, { 200, 100, 3 }, 15 }, { DT_MAX, { 127, 128, 255 }, 255 },
        { DT_MIN, { 127, 128, 255 }, 127 }, { DT_PROD, { 16, 17, 3 }, 48 } };
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        int64_t out = 0;
        const void *in[3] = { &wide[i].x[0], &wide[i].x[1], &wide[i].x[2] };
        dt_reduce_args a = { DT_I64, &out, in, 3, 1, wide[i].op, NULL, 0, 0 };
        CHECK(dt_kernels_cpu()->reduce(&a, NULL) == DT_OK);
        CHECK_MSG(out == wide[i].want, "case %zu: %lld", i, (long long)out);
    }
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
        uint8_t out = 0;
        const void *in[3] = { &bytes[i].x[0], &bytes[i].x[1], &bytes[i].x[2] };
        dt_reduce_args a = { DT_U8, &out, in, 3, 1, bytes[i].op, NULL, 0, 0 };
        CHECK(dt_kernels_cpu()->reduce(&a, NULL) == DT_OK);
        CHECK_MSG(out == bytes[i].want, "bytes, case %zu: %d", i, out);
    }
    uint8_t one[256], average = 0; /* 256 does not fit into a byte */
    const void *many[256];
    for (int r = 0; r < 256; r++) one[r] = 1, many[r] = &one[r];
    dt_reduce_args a = { DT_U8, &average, many, 256, 1, DT_AVG, NULL, 0, 0 };
    CHECK(dt_kernels_cpu()->reduce(&a, NULL) == DT_OK && average == 0);
    int64_t in[2] = { INT64_MAX, 2 }, out[2] = { 1, INT64_MAX }, filled[3] = { 0 };
    dt_permute_args add = { DT_I64, out, in, { 1, { 2 } }, { 1 }, { 1 }, 1 };
    CHECK(dt_kernels_cpu()->permute(&add, NULL) == DT_OK && out[0] == INT64_MIN &&
          out[1] == INT64_MIN + 1);
    dt_fill_args fill = { DT_I64, filled, 2, 1e30 };
    CHECK(dt_kernels_cpu()->fill(&fill, NULL) == DT_OK && filled[1] == INT64_MAX && !filled[2]);
}

/* Casts of i64 round once, also beyond 2^53. */
static void long_casts(void) {
    static const struct {
        int64_t x;
        float as_f32;
        double as_f64;
    } cases[] = { { (1ll << 53) + 1, 0x1p53f, 0x1p53 }, { INT64_MAX, 0x1p63f, 0x1p63 },
        { INT64_MIN, -0x1p63f, -0x1p63 }, /* just above half a unit of f32: */
        { (1ll << 60) + (1ll << 36) + 1, 0x1.000002p60f, 0x1.000001p60 },
        { -(1ll << 60) - (1ll << 36) - 1, -0x1.000002p60f, -0x1.000001p60 },
        { (1ll << 60) + (1ll << 36), 0x1p60f, 0x1.000001p60 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float f = 0;
        double d = 0;
        int64_t same = 0;
        int32_t low = 0;
        uint8_t byte = 7;
        dt_cast_args a = { DT_F32, DT_I64, &f, &cases[i].x, 1, 0 };
        CHECK(dt_kernels_cpu()->cast(&a, NULL) == DT_OK);
        a.dtype = DT_F64, a.out = &d;
        CHECK(dt_kernels_cpu()->cast(&a, NULL) == DT_OK);
        a.dtype = DT_I64, a.out = &same;
        CHECK(dt_kernels_cpu()->cast(&a, NULL) == DT_OK);
        a.dtype = DT_I32, a.out = &low;
        CHECK(dt_kernels_cpu()->cast(&a, NULL) == DT_OK);
        a.dtype = DT_U8, a.out = &byte;
        CHECK(dt_kernels_cpu()->cast(&a, NULL) == DT_OK);
        CHECK_MSG(f == cases[i].as_f32 && d == cases[i].as_f64 && same == cases[i].x &&
                      low == (cases[i].x > 0 ? INT32_MAX : INT32_MIN) &&
                      byte == (cases[i].x > 0 ? 255 : 0),
            "cast %lld: %a %a %lld %d %d", (long long)cases[i].x, (double)f, d, (long long)same,
            low, byte);
    }
    double limits[4] = { 0x1p63, -0x1p63, 0x1.fffffffffffffp62, NAN };
    int64_t got[4];
    dt_cast_args a = { DT_I64, DT_F64, got, limits, 4, 0 };
    CHECK(dt_kernels_cpu()->cast(&a, NULL) == DT_OK && got[0] == INT64_MAX && got[1] == INT64_MIN &&
          got[2] == INT64_MAX - 1023 && got[3] == 0);
}

/* A product without rows or columns writes nothing. */
static void empty_products(void) {
    static char work[1 << 20];
    static const dt_dtype types[] = { DT_F32, DT_F64, DT_BF16 };
    for (int s = 0; s < 3 * 4 * 4; s++) {
        int64_t m = s % 4 < 2 ? 0 : 1 + s % 4 % 2 * 2, n = s % 4 < 2 ? 1 + s % 4 * 2 : 0;
        float a[64] = { 0 }, b[64] = { 0 };
        uint32_t c[2] = { 77, 77 };
        dt_matmul_args product = { .dtype = types[s / 16],
            .c = c,
            .a = a,
            .b = b,
            .m = m,
            .n = n,
            .k = s / 4 % 2 ? 1 : 4,
            .trans_a = s / 8 % 2,
            .trans_b = !(s / 8 % 2),
            .work = work,
            .work_bytes = sizeof work };
        CHECK(dt_kernels_cpu()->matmul(&product, NULL) == DT_OK);
        CHECK_MSG(c[0] == 77 && c[1] == 77, "%d x %d", (int)m, (int)n);
    }
}

/* A NaN stays a NaN in bf16, also if rounding its bits up would give -0. Vectors and the elements
   after them are converted by different code. */
static void nan_casts(void) {
    enum { COUNT = 35 };
    uint32_t in[COUNT];
    uint16_t out[COUNT];
    for (int i = 0; i < COUNT; i++) in[i] = i % 2 ? 0x7fffffffu : 0xff800001u;
    dt_cast_args a = { DT_BF16, DT_F32, out, in, COUNT, 0 };
    CHECK(dt_kernels_cpu()->cast(&a, NULL) == DT_OK);
    for (int i = 0; i < COUNT; i++) CHECK((out[i] & 0x7fff) > 0x7f80);
}

/* Every reduce operation in every type: in place, to three outputs of which two are inputs, and
   with streaming stores to three misaligned outputs. No memory outside of the outputs changes. */
static void reductions(void) {
    static const dt_dtype type[] = { DT_F32, DT_F64, DT_I32, DT_BF16, DT_F16, DT_I64 };
    for (int t = 0; t < 6; t++)
        for (int op = DT_SUM; op <= DT_PROD; op++) {
            enum { N = 1100, INPUTS = 3 };
            double want[N];
            char data[INPUTS][N * 8];
            void *in[INPUTS];
            for (int r = 0; r < INPUTS; r++) {
                in[r] = data[r];
                for (int i = 0; i < N; i++) {
                    double x = 1 + below(40 + (uint64_t)r, (uint64_t)i, 9);
                    put(data[r], type[t], i, x);
                    if (r == 0)
                        want[i] = x;
                    else if (op == DT_MAX)
                        want[i] = fmax(want[i], x);
                    else if (op == DT_MIN)
                        want[i] = fmin(want[i], x);
                    else
                        want[i] = op == DT_PROD ? want[i] * x : want[i] + x;
                    if (op != DT_AVG || r < INPUTS - 1) continue;
                    want[i] = dt__integer(type[t]) ? floor(want[i] / 3) : want[i] / 3;
                    if (type[t] == DT_F32) want[i] = (double)(float)want[i];
                }
                for (int i = 0; i < N && r == INPUTS - 1 && is_narrow(type[t]); i++)
                    want[i] = from16(type[t], to16(type[t], (double)(float)want[i]));
            }
            enum { PAD = 40 };
            static char copy[INPUTS][N * 8], place[INPUTS][PAD + N * 8 + 64];
            size_t size = dt_dtype_size(type[t]);
            for (int way = 0; way < 3; way++) { /* in place, several outputs, misaligned */
                memcpy(copy, data, sizeof data);
                memset(place, 77, sizeof place);
                for (int r = 0; r < INPUTS; r++) in[r] = copy[r];
                void *out[INPUTS] = { copy[1], copy[2], place[0] + PAD };
                for (int r = 0; r < INPUTS && way == 2; r++)
                    out[r] = place[r] + PAD + size * (size_t)r * 3;
                dt_reduce_args a = { type[t], out[0], (const void *const *)in, INPUTS, N, (dt_op)op,
                    out + 1, way ? 2 : 0, way == 2 };
                CHECK(dt_kernels_cpu()->reduce(&a, NULL) == DT_OK);
                int wrong = 0;
                for (int r = 0; r < (way ? 3 : 1); r++) {
                    for (int i = 0; i < N; i++) wrong += get(out[r], type[t], i) != want[i];
                    if (way == 2)
                        wrong += ((char *)out[r])[-1] != 77 || ((char *)out[r])[N * size] != 77;
                }
                wrong += memcmp(copy[0], data[0], sizeof data[0]) != 0;
                wrong += way == 0 && memcmp(copy[2], data[2], sizeof data[2]) != 0;
                CHECK_MSG(wrong == 0, "reduce %d of %s, way %d: %d wrong", op,
                    dt_dtype_name(type[t]), way, wrong);
            }
        }
    int32_t big = INT32_MAX, one = 1, sum = 0;
    const void *two[2] = { &big, &one };
    dt_reduce_args wrap = { DT_I32, &sum, two, 2, 1, DT_SUM, NULL, 0, 0 };
    CHECK(dt_kernels_cpu()->reduce(&wrap, NULL) == DT_OK && sum == INT32_MIN);
    wrap.n = 0;
    CHECK(dt_kernels_cpu()->reduce(&wrap, NULL) == DT_ERR_ARG);
    integers_wrap();
    char from[24] = "abcdefghijklmnopqrstuvw", to[24] = "-----------------------";
    dt_copy_args copy = { to, from, 3, 2, 5, 7 };
    CHECK(dt_kernels_cpu()->copy(&copy, NULL) == DT_OK && !strcmp(to, "ab---hi---op-----------"));
}

// ==== 3. Attention ==============================================================================

typedef struct heads {
    int64_t B, TQ, TK, H, K, D;
    dt_attention_mask sight;
    double cap; /* soft-capping; 0: none */
} heads;

static double capped(const heads *h, double score) {
    return h->cap > 0 ? h->cap * tanh(score / h->cap) : score;
}

static int sees(const heads *h, int64_t s, int64_t i, int64_t j) {
    const dt_attention_mask *g = &h->sight;
    int32_t p = g->q_position ? g->q_position[s * h->TQ + i] : (int32_t)(i + h->TK - h->TQ);
    int32_t q = g->k_position ? g->k_position[s * h->TK + j] : (int32_t)j;
    if (g->causal && q > p) return 0;
    if (g->window && q <= (int64_t)p - g->window) return 0;
    return !g->q_document || g->q_document[s * h->TQ + i] == g->k_document[s * h->TK + j];
}

/* Index of an element of q and out (keys 0), or of k and v (keys 1). */
static int64_t place(const heads *h, int keys, int64_t s, int64_t t, int64_t head, int64_t d) {
    return keys ? ((s * h->TK + t) * h->K + head * h->K / h->H) * h->D + d
                : ((s * h->TQ + t) * h->H + head) * h->D + d;
}

/* out and the log-sum-exp lse, computed from their definition. */
static void naive_attention(const heads *h, dt_dtype t, const void *q, const void *k, const void *v,
    double *out, double *lse) {
    double *p = (double *)room((size_t)h->TK * 8);
    for (int64_t s = 0; s < h->B; s++)
        for (int64_t head = 0; head < h->H; head++)
            for (int64_t i = 0; i < h->TQ; i++) {
                double sum = 0;
                for (int64_t j = 0; j < h->TK; j++) {
                    double dot = 0;
                    for (int64_t d = 0; d < h->D; d++)
                        dot += get(q, t, place(h, 0, s, i, head, d)) *
                               get(k, t, place(h, 1, s, j, head, d));
                    p[j] = sees(h, s, i, j) ? exp(capped(h, 0.6 * dot)) : 0;
                    sum += p[j];
                }
                lse[(s * h->H + head) * h->TQ + i] = sum > 0 ? log(sum) : -INFINITY;
                for (int64_t d = 0; d < h->D; d++) {
                    double mix = 0;
                    for (int64_t j = 0; j < h->TK && sum > 0; j++)
                        mix += p[j] / sum * get(v, t, place(h, 1, s, j, head, d));
                    out[place(h, 0, s, i, head, d)] = mix;
                }
            }
    free(p);
}

/* The gradients, computed from a->out and a->lse. If `sizes` is 1, the sums of the sizes of their
   terms instead. */
static void naive_attention_back(const heads *h, const dt_attention_back_args *a, dt_dtype to,
    dt_dtype stat, double *dq, double *dk, double *dv, int sizes) {
    dt_dtype t = a->dtype;
    double factor = a->scale;
    for (int64_t s = 0; s < h->B; s++)
        for (int64_t head = 0; head < h->H; head++)
            for (int64_t i = 0; i < h->TQ; i++) {
                double lse = get(a->lse, stat, (s * h->H + head) * h->TQ + i), mean = 0;
                for (int64_t d = 0; d < h->D; d++)
                    mean += get(a->dout, t, place(h, 0, s, i, head, d)) *
                            get(a->out, to, place(h, 0, s, i, head, d));
                for (int64_t j = 0; j < h->TK && lse > -INFINITY; j++) {
                    double dot = 0, dp = 0;
                    for (int64_t d = 0; d < h->D; d++) {
                        dot += get(a->q, t, place(h, 0, s, i, head, d)) *
                               get(a->k, t, place(h, 1, s, j, head, d));
                        dp += get(a->dout, t, place(h, 0, s, i, head, d)) *
                              get(a->v, t, place(h, 1, s, j, head, d));
                    }
                    double slope = h->cap > 0 ? 1 / pow(cosh(factor * dot / h->cap), 2) : 1;
                    double p = sees(h, s, i, j) ? exp(capped(h, factor * dot) - lse) : 0,
                           ds = p * (dp - mean) * factor * slope;
                    for (int64_t d = 0; d < h->D; d++) {
                        double x = ds * get(a->k, t, place(h, 1, s, j, head, d)),
                               y = ds * get(a->q, t, place(h, 0, s, i, head, d)),
                               z = p * get(a->dout, t, place(h, 0, s, i, head, d));
                        dq[place(h, 0, s, i, head, d)] += sizes ? fabs(x) : x;
                        dk[place(h, 1, s, j, head, d)] += sizes ? fabs(y) : y;
                        dv[place(h, 1, s, j, head, d)] += sizes ? fabs(z) : z;
                    }
                }
            }
}

/* Compares out and the gradients with the expected values f and g[3]; a gradient that is NULL in
   `a` is left out. */
static void same_attention(bench *b, const heads *h, const dt_attention_back_args *a, dt_dtype to,
    const char *const name[4], const double *const want[4], double out_scale, double grad_scale) {
    size_t nq = (size_t)(h->B * h->TQ * h->H * h->D), nk = (size_t)(h->B * h->TK * h->K * h->D);
    double *terms[4] = { doubles(b, nq), doubles(b, nq), doubles(b, nk), doubles(b, nk) };
    const void *got[4] = { a->out, a->dq, a->dk, a->dv };
    /* out is a mean of values of at most 2, and its terms are not above 2 */
    for (size_t i = 0; i < nq; i++) terms[0][i] = 2;
    naive_attention_back(
        h, a, to, is_narrow(b->t) ? DT_F32 : b->t, terms[1], terms[2], terms[3], 1);
    for (int i = 0; i < 4; i++) {
        b->terms = rounds_softmax(b) ? terms[i] : NULL;
        if (want[i] && got[i])
            same(b, name[i], got[i], to, want[i], i < 2 ? nq : nk, i ? grad_scale : out_scale);
    }
    b->terms = NULL;
}

/* Bits of kind: 1 not causal, 2 positions, 4 documents, 8 accumulation type, 16 accumulate, 32 soft
   cap, 64 window. */
static void bench_attention(bench *b, heads h, int kind) {
    int wide = kind >> 3 & 1, add = kind >> 4 & 1;
    dt_dtype stat = is_narrow(b->t) ? DT_F32 : b->t, to = wide ? stat : b->t;
    size_t nq = (size_t)(h.B * h.TQ * h.H * h.D), nk = (size_t)(h.B * h.TK * h.K * h.D),
           rows = (size_t)(h.B * h.H * h.TQ);
    int32_t p[400], kp[400], d[400], kd[400];
    for (int i = 0; i < 400; i++) {
        p[i] = (int32_t)(i * 5 % h.TQ) - (i % 11 == 7 ? 1000 : 0);
        kp[i] = (int32_t)(i * 7 % h.TK);
        d[i] = i % 13 == 4 ? 77 : i % 3;
        kd[i] = i / 2 % 3;
    }
    h.sight = (dt_attention_mask){ !(kind & 1), kind & 2 ? p : NULL, kind & 2 ? kp : NULL,
        kind & 4 ? d : NULL, kind & 4 ? kd : NULL, kind & 64 && !(kind & 1) ? 4 : 0 };
    h.cap = kind & 32 ? 0.4 : 0;
    void *q = array(b, nq), *k = array(b, nk), *v = array(b, nk), *out = array_of(b, to, nq, 1),
         *dout = array(b, nq);
    void *lse = array_of(b, stat, rows, 1), *dq = array_of(b, to, nq, 1),
         *dk = array_of(b, to, nk, 1);
    void *dv = array_of(b, to, nk, 1);
    size_t work_bytes = dt_attention_work(h.TK, h.D, b->t);
    void *work = keep(b, room(work_bytes));
    double *f = doubles(b, nq), *l = doubles(b, rows),
           *g[3] = { before(b, dq, to, nq), before(b, dk, to, nk), before(b, dv, to, nk) };
    for (int i = 0; i < 3 && !add; i++) memset(g[i], 0, 8 * (i ? nk : nq));
    dt_attention_args a = { b->t, out, lse, q, k, v, h.B, h.TQ, h.TK, h.H, h.K, h.D, 0.6, h.sight,
        0, wide, work, work_bytes, h.cap };
    naive_attention(&h, b->t, q, k, v, f, l);
    OK(b->v->attention(&a));
    same(b, "lse of attention", lse, stat, l, rows, 4);
    dt_attention_back_args back = { b->t, dq, dk, dv, dout, out, lse, q, k, v, h.B, h.TQ, h.TK, h.H,
        h.K, h.D, 0.6, h.sight, add, add, add, wide, work, work_bytes, h.cap };
    naive_attention_back(&h, &back, to, stat, g[0], g[1], g[2], 0);
    OK(b->v->attention_back(&back));
    static const char *const name[4] = { "attention", "dq", "dk", "dv" };
    same_attention(b, &h, &back, to, name, (const double *[4]){ f, g[0], g[1], g[2] }, 2, 16);
    a.work_bytes = dt_attention_work(0, h.D, b->t) - 1; /* the forward's does not depend on TK */
    back.work_bytes--;
    CHECK(b->v->attention(&a) == DT_ERR_ARG && b->v->attention_back(&back) == DT_ERR_ARG);
    a.work_bytes = back.work_bytes = work_bytes;
    a.kv_heads = back.kv_heads = h.H + 1;
    CHECK(b->v->attention(&a) == DT_ERR_ARG && b->v->attention_back(&back) == DT_ERR_ARG);
}

/* Copies keys first .. first + n - 1 of every sequence. */
static void *some_keys(bench *b, const heads *h, const void *k, int64_t first, int64_t n) {
    size_t row = (size_t)(h->K * h->D) * dt_dtype_size(b->t);
    char *part = (char *)keep(b, room((size_t)(h->B * n) * row + 8));
    for (int64_t s = 0; s < h->B; s++)
        memcpy(part + (size_t)(s * n) * row, (const char *)k + (size_t)(s * h->TK + first) * row,
            (size_t)n * row);
    return part;
}

/* Attention over blocks of `step` keys, first to last or last to first: out, lse and all gradients
   equal those over all keys at once. */
static void bench_merge(bench *b, int64_t step, int backwards) {
    heads h = { 2, 21, 45, 4, 2, 5, { .causal = 0 }, 0 };
    dt_dtype stat = is_narrow(b->t) ? DT_F32 : b->t;
    size_t nq = 2 * 21 * 4 * 5, nk = 2 * 45 * 2 * 5, rows = 2 * 4 * 21,
           work_bytes = dt_attention_work(45, 5, b->t);
    void *q = array(b, nq), *k = array(b, nk), *v = array(b, nk), *dout = array(b, nq),
         *out = array_of(b, stat, nq, 1);
    void *lse = array_of(b, stat, rows, 1), *dq = array_of(b, stat, nq, 1),
         *work = keep(b, room(work_bytes));
    double *f = doubles(b, nq), *l = doubles(b, rows),
           *g[3] = { doubles(b, nq), doubles(b, nk), doubles(b, nk) };
    int32_t p[42], kp[90];
    for (int i = 0; i < 42; i++) p[i] = i % 21 * 2 - (i % 21 == 6 ? 100 : 0);
    for (int i = 0; i < 90; i++) kp[i] = i % 45 * 2 % 45;
    h.sight = (dt_attention_mask){ 1, p, kp, NULL, NULL, 30 };
    naive_attention(&h, b->t, q, k, v, f, l);
    dt_attention_back_args back = { b->t, dq, NULL, NULL, dout, out, lse, q, k, v, 2, 21, 45, 4, 2,
        5, 0.6, h.sight, 0, 0, 0, 1, work, work_bytes, 0 };
    for (int pass = 0; pass < 2; pass++) {
        int64_t count = (h.TK + step - 1) / step;
        for (int64_t turn = 0; turn < count; turn++) {
            int64_t first = (backwards ? count - 1 - turn : turn) * step,
                    n = h.TK - first < step ? h.TK - first : step;
            void *some_k = some_keys(b, &h, k, first, n), *some_v = some_keys(b, &h, v, first, n);
            int32_t part_p[90];
            for (int64_t i = 0; i < 2 * n; i++) part_p[i] = kp[i / n * 45 + first + i % n];
            dt_attention_mask sight = { 1, p, part_p, NULL, NULL, 30 };
            if (pass == 0) {
                dt_attention_args a = { b->t, out, lse, q, some_k, some_v, 2, 21, n, 4, 2, 5, 0.6,
                    sight, turn > 0, 1, work, work_bytes, 0 };
                OK(b->v->attention(&a));
                continue;
            }
            size_t part = (size_t)(2 * n * 2 * 5);
            heads some = { 2, 21, n, 4, 2, 5, sight, 0 };
            void *dk = array_of(b, stat, part, 1), *dv = array_of(b, stat, part, 1);
            double *w[3] = { doubles(b, nq), doubles(b, part), doubles(b, part) };
            dt_attention_back_args one = back;
            one.dk = dk, one.dv = dv, one.k = some_k, one.v = some_v, one.tk = n, one.mask = sight,
            one.accumulate_q = turn > 0;
            OK(b->v->attention_back(&one));
            naive_attention_back(&some, &one, stat, stat, w[0], w[1], w[2], 0);
            static const char *const name[4] = { "", "", "dk of a block of keys",
                "dv of a block of keys" };
            same_attention(
                b, &some, &one, stat, name, (const double *[4]){ NULL, NULL, w[1], w[2] }, 2, 16);
        }
        if (pass) break;
        same(b, "lse by blocks of keys", lse, stat, l, rows, 4);
        naive_attention_back(&h, &back, stat, stat, g[0], g[1], g[2], 0);
    }
    static const char *const names[4] = { "attention by blocks of keys", "dq by blocks of keys", "",
        "" };
    same_attention(b, &h, &back, stat, names, (const double *[4]){ f, g[0], NULL, NULL }, 2, 16);
}

/* Flash attention equals naive attention, with whole and partial tiles and several blocks. */
static void bench_flash_and_naive(bench *b, heads h, int kind) {
    int add = kind & 1, wide = is_narrow(b->t) || (kind & 2); /* compares before rounding */
    dt_dtype stat = is_narrow(b->t) ? DT_F32 : b->t, to = wide ? stat : b->t;
    size_t nq = (size_t)(h.B * h.TQ * h.H * h.D), nk = (size_t)(h.B * h.TK * h.K * h.D),
           rows = (size_t)(h.B * h.H * h.TQ), n[5] = { nq, rows, nq, nk, nk };
    int32_t *ints = (int32_t *)keep(b, room(4 * 400 * sizeof(int32_t)));
    for (int i = 0; i < 400; i++) {
        ints[i] = i * 3 % 331 - (i % 17 == 5 ? 1000 : 0); /* some queries see no key */
        ints[400 + i] = i * 2;
        ints[800 + i] = i / 50, ints[1200 + i] = i / 70;
    }
    h.sight = (dt_attention_mask){ !(kind & 4), kind & 8 ? ints : NULL,
        kind & 8 ? ints + 400 : NULL, kind & 16 ? ints + 800 : NULL, kind & 16 ? ints + 1200 : NULL,
        kind & 32 && !(kind & 4) ? 20 : 0 };
    h.cap = kind & 64 ? 0.4 : 0;
    void *q = array(b, nq), *k = array(b, nk), *v = array(b, nk), *dout = array(b, nq), *r[2][5];
    for (int i = 0; i < 5; i++) {
        size_t bytes = n[i] * dt_dtype_size(i == 1 ? stat : to);
        r[0][i] = array_of(b, i == 1 ? stat : to, n[i], 1);
        r[1][i] = keep(b, room(bytes + 8));
        memcpy(r[1][i], r[0][i], bytes);
    }
    size_t work_bytes = dt_attention_work(h.TK, h.D, b->t);
    void *work = keep(b, room(work_bytes));
    dt_attention_back_args flash;
    for (int naive = 0; naive < 2; naive++) {
        void **x = r[naive], *scratch = naive ? NULL : work;
        dt_attention_args a = { b->t, x[0], x[1], q, k, v, h.B, h.TQ, h.TK, h.H, h.K, h.D, 0.3,
            h.sight, add, wide, scratch, work_bytes, h.cap };
        OK(b->v->attention(&a));
        dt_attention_back_args g = { b->t, x[2], x[3], x[4], dout, r[0][0], r[0][1], q, k, v, h.B,
            h.TQ, h.TK, h.H, h.K, h.D, 0.3, h.sight, add, add, add, wide, scratch, work_bytes,
            h.cap };
        OK(b->v->attention_back(&g));
        if (!naive) flash = g;
    }
    static const char *const name[4] = { "flash out", "flash dq", "flash dk", "flash dv" };
    const double *want[5];
    for (int i = 0; i < 5; i++) want[i] = before(b, r[1][i], i == 1 ? stat : to, n[i]);
    same(b, "flash lse", r[0][1], stat, want[1], n[1], 4);
    same_attention(
        b, &h, &flash, to, name, (const double *[4]){ want[0], want[2], want[3], want[4] }, 4, 32);
}

/* The bits of a query's out, lse and dq depend on the query and on the keys it sees only. All rows
   are computed at once, then some of them alone: one sequence, one query, and only the keys up to
   its position. `wide` results show the bits before rounding. */
static void bench_attention_rows(bench *b, heads h) {
    dt_dtype stat = is_narrow(b->t) ? DT_F32 : b->t;
    size_t width = (size_t)(h.H * h.D), nq = (size_t)(h.B * h.TQ) * width,
           size = dt_dtype_size(b->t), nk = (size_t)(h.B * h.TK * h.K * h.D),
           bytes = dt_dtype_size(stat), work_bytes = dt_attention_work(h.TK, h.D, b->t);
    char *q = (char *)array(b, nq), *k = (char *)array(b, nk), *v = (char *)array(b, nk),
         *dout = (char *)array(b, nq), *out = (char *)array_of(b, stat, nq, 1),
         *lse = (char *)array_of(b, stat, nq, 1), *dq = (char *)array_of(b, stat, nq, 1);
    void *one_out = array_of(b, stat, width, 1), *one_lse = array_of(b, stat, (size_t)h.H, 1),
         *one_dq = array_of(b, stat, width, 1), *work = keep(b, room(work_bytes));
    dt_attention_args a = { b->t, out, lse, q, k, v, h.B, h.TQ, h.TK, h.H, h.K, h.D, 0.6,
        { .causal = 1 }, 0, 1, work, work_bytes, 0 };
    dt_attention_back_args g = { b->t, dq, NULL, NULL, dout, out, lse, q, k, v, h.B, h.TQ, h.TK,
        h.H, h.K, h.D, 0.6, { .causal = 1 }, 0, 0, 0, 1, work, work_bytes, 0 };
    OK(b->v->attention(&a));
    OK(b->v->attention_back(&g));
    for (int64_t row = 0; row < h.B * h.TQ; row += 7) {
        int64_t s = row / h.TQ, i = row % h.TQ;
        size_t query = (size_t)row * width, key = (size_t)(s * h.TK * h.K * h.D);
        dt_attention_args one = a;
        one.out = one_out, one.lse = one_lse, one.batch = one.tq = 1, one.tk = i + h.TK - h.TQ + 1;
        one.q = q + query * size, one.k = k + key * size, one.v = v + key * size;
        OK(b->v->attention(&one));
        dt_attention_back_args back = g;
        back.dq = one_dq, back.dout = dout + query * size, back.out = one_out, back.lse = one_lse;
        back.q = one.q, back.k = one.k, back.v = one.v, back.batch = back.tq = 1, back.tk = one.tk;
        OK(b->v->attention_back(&back));
        int equal = memcmp(one_out, out + query * bytes, width * bytes) == 0 &&
                    memcmp(one_dq, dq + query * bytes, width * bytes) == 0;
        for (int64_t head = 0; head < h.H; head++)
            equal = equal && memcmp((char *)one_lse + (size_t)head * bytes,
                                 lse + (size_t)((s * h.H + head) * h.TQ + i) * bytes, bytes) == 0;
        CHECK_MSG(equal, "%s: query %d of sequence %d has other bits alone", dt_dtype_name(b->t),
            (int)i, (int)s);
    }
}

static void bench_all_attention(bench *b) {
    static const heads tiles[3] = { { 1, 131, 131, 2, 1, 9, { .causal = 0 }, 0 },
        { 1, 1, 129, 4, 2, 65, { .causal = 0 }, 0 }, { 1, 257, 66, 1, 1, 33, { .causal = 0 }, 0 } };
    for (int s = 0; s < 3; s++)
        for (int kind = 0; kind < 128; kind += kind < 32 ? 3 : 5) {
            int first = b->n_all;
            bench_flash_and_naive(b, tiles[s], kind);
            while (b->n_all > first) free(b->all[--b->n_all]);
        }
    static const heads size[6] = { { 1, 1, 1, 1, 1, 1, { .causal = 0 }, 0 },
        { 2, 19, 23, 4, 2, 3, { .causal = 0 }, 0 }, { 1, 37, 37, 3, 1, 17, { .causal = 0 }, 0 },
        { 1, 9, 70, 2, 2, 33, { .causal = 0 }, 0 }, { 1, 40, 5, 2, 1, 5, { .causal = 0 }, 0 },
        /* two queries; the first one sees an odd number of the keys in the last tile */
        { 1, 2, 70, 2, 2, 33, { .causal = 0 }, 0 } };
    for (int s = 0; s < 6; s++)
        for (int kind = 0; kind < 128; kind += s == 1 && kind < 32 ? 1 : 3) {
            int first = b->n_all;
            bench_attention(b, size[s], kind);
            while (b->n_all > first) free(b->all[--b->n_all]);
        }
    static const heads rows[2] = { { 2, 70, 150, 4, 2, 9, { .causal = 0 }, 0 },
        { 1, 300, 300, 1, 1, 16, { .causal = 0 }, 0 } };
    for (int s = 0; s < 2; s++) {
        int first = b->n_all;
        bench_attention_rows(b, rows[s]);
        while (b->n_all > first) free(b->all[--b->n_all]);
    }
    for (int64_t step = 1; step <= 45; step = step * 2 + step / 3)
        for (int backwards = 0; backwards < 2; backwards++) {
            int first = b->n_all;
            bench_merge(b, step, backwards);
            while (b->n_all > first) free(b->all[--b->n_all]);
        }
}

// ==== 4. All instruction sets, all types ========================================================

/* Runs all kernels but matrix products and attention, whose bits depend on the instruction set. */
static void bench_all(bench *b) {
    static const struct {
        void (*run)(bench *);
        int elementary;
    } group[] = { { bench_unary, 1 }, { bench_unary_edges, 1 }, { bench_binary, 0 },
        { bench_binary_special, 0 }, { bench_where, 0 }, { bench_bce, 1 }, { bench_permute, 0 },
        { bench_max, 0 }, { bench_glu, 1 }, { bench_sum, 0 }, { bench_pick, 0 },
        { bench_softmax, 1 }, { bench_rows, 0 }, { bench_others, 0 }, { bench_updates, 0 },
        { bench_update_lists, 0 }, { bench_signs, 0 }, { bench_dropout, 0 }, { bench_cumsum, 0 },
        { bench_patches, 0 }, { bench_pool, 0 } };
    for (size_t i = 0; i < sizeof group / sizeof *group; i++) {
        b->elementary = group[i].elementary;
        group[i].run(b);
        while (b->n_all > 0) free(b->all[--b->n_all]);
    }
    for (int kind = 0; kind < 16; kind++) {
        b->elementary = 0;
        if (kind < 8) bench_norm(b, kind);
        if (kind < 8) bench_rope(b, kind);
        b->elementary = 1;
        bench_cross_entropy(b, kind);
        while (b->n_all > 0) free(b->all[--b->n_all]);
    }
}

/* The threads of OpenMP are the same for all instruction sets, so the best one is enough for them. */
static int first_isa(void) {
#ifdef DT_USE_OMP
    return check_all_cases() ? 0 : dt__best_isa();
#else
    return 0;
#endif
}

/* All instruction sets give the same bits, except that the elementary functions of f32 and the
   16-bit types use fused multiply-adds where the set has them. Every set is compared with the exact
   values within the same tolerance. */
static void test_all_kernels(void) {
    for (int t = 0; t < 4; t++) {
        uint64_t expected[2] = { 0 };
        double worst = 0, worst_attention = 0;
        for (int isa = first_isa(); isa <= dt__best_isa(); isa++) {
            bench b = { .v = dt__variant_of(float_types[t], isa), .t = float_types[t], .isa = isa };
            bench_all(&b);
            for (int e = 0; e < 2; e++) {
                int first = e == 1 && float_types[t] != DT_F64 && isa == 1;
                if (isa == first_isa() || first) expected[e] = b.hash[e];
                CHECK_MSG(b.hash[e] == expected[e], "%s: the bits of %s differ%s",
                    dt_dtype_name(b.t), isa_name[isa], e ? " in elementary functions" : "");
            }
            worst = fmax(worst, b.worst);
            b.worst = 0;
            bench_all_attention(&b);
            worst_attention = fmax(worst_attention, b.worst);
        }
        printf("%s: largest error of kernels %.2f, of attention %.2f of the tolerance\n",
            dt_dtype_name(float_types[t]), worst, worst_attention);
    }
}

// ==== 5. Numbers: conversions, exp, log, tanh, NaN ==============================================

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static int same16(dt_dtype type, uint16_t a, uint16_t b) {
    return isnan(from16(type, a)) ? isnan(from16(type, b)) && (a & 0x8000) == (b & 0x8000) : a == b;
}

/* All 65,536 numbers of both types to f32 and back. Floats midway between two neighbours, and the
   floats next to the midpoint, round to nearest even. */
static void conversions(void) {
    for (int t = 0; t < 2; t++) {
        dt_dtype type = t ? DT_F16 : DT_BF16;
        int wrong = 0, back = 0, middle = 0, sampled = 0;
        for (uint32_t h = 0; h < 65536; h++) {
            float x = t ? dt__f16_to_f32((uint16_t)h) : dt__bf16_to_f32((uint16_t)h);
            double want = from16(type, (uint16_t)h), next = from16(type, (uint16_t)(h + 1));
            wrong += isnan(want) ? !isnan(x) : (double)x != want || !signbit(x) != !signbit(want);
            back += !same16(type, (uint16_t)h, t ? dt__f32_to_f16(x) : dt__f32_to_bf16(x));
            if (isnan(want) || isnan(next) || isinf(want) || signbit(want) != signbit(next))
                continue;
            /* the value that would follow the largest finite one */
            if (isinf(next)) next = 2 * want - from16(type, (uint16_t)(h - 1));
            float half = (float)((want + next) / 2),
                  near[3] = { half, nextafterf(half, 0), nextafterf(half, INFINITY) };
            for (int i = 0; i < 3; i++) {
                uint16_t ours = t ? dt__f32_to_f16(near[i]) : dt__f32_to_bf16(near[i]);
                middle += ours != to16(type, (double)near[i]);
            }
        }
        for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 4099) {
            float x = float_of((uint32_t)bits);
            sampled +=
                !same16(type, t ? dt__f32_to_f16(x) : dt__f32_to_bf16(x), to16(type, (double)x));
        }
        CHECK_MSG(wrong + back + middle + sampled == 0,
            "%s: wrong are %d in f32, %d back from f32, %d at midpoints, %d of a sample",
            dt_dtype_name(type), wrong, back, middle, sampled);
    }
}

/* From every type to every type, stored and accumulated. */
static void casts(void) {
    static const double values[] = { 0, -0.0, 1, -1.5, 2.5, 0.49999999, 1e-8, 6e-8, 3e-5, 257,
        2049.5, 65504, 65519.9, 65520, -7e4, 1e30, -1e300, 2147483646.5, 2147483647, 2147483648.0,
        -2147483648.0, -2147483649.0, INFINITY, -INFINITY, NAN, 16777217, 1.00390625, 1.01171875,
        1.0009765625, 1.00048828125, 3.4e38, 3.4028236e38 };
    enum { COUNT = sizeof values / sizeof *values, REPEAT = 40 };
    static const dt_dtype types[] = { DT_F32, DT_BF16, DT_F16, DT_F64, DT_I32, DT_U8, DT_I64 };
    static const double least[] = { 0, 0, 0, 0, -2147483648.0, 0, -0x1p63 },
                        most[] = { 0, 0, 0, 0, 2147483647.0, 255, 0x1p63 };
    for (int f = 0; f < 7; f++)
        for (int t = 0; t < 7; t++)
            for (int add = 0; add < 2; add++) {
                size_t n = COUNT * REPEAT;
                void *in = room(n * 8), *out = noise_array(types[t], n, 5),
                     *old = noise_array(types[t], n, 5);
                int wrong = 0;
                for (size_t i = 0; i < n; i++) {
                    double x = values[i % COUNT];
                    if (dt__integer(types[f]))
                        x = isnan(x) ? 7 : fmax(fmin(x, f == 6 ? 0x1p62 : most[f]), least[f]);
                    put(in, types[f], (int64_t)i, x);
                }
                dt_cast_args a = { types[t], types[f], out, in, n, add };
                dt_status status = dt_kernels_cpu()->cast(&a, NULL);
                CHECK(status == (add && dt__integer(types[t]) ? DT_ERR_UNSUPPORTED : DT_OK));
                for (size_t i = 0; i < n && status == DT_OK; i++) {
                    double x = get(in, types[f], (int64_t)i), one = 0;
                    if (add) x += get(old, types[t], (int64_t)i);
                    if (dt__integer(types[t]))
                        x = isnan(x) ? 0 : fmax(fmin(trunc(x), most[t]), least[t]);
                    else if (types[t] == DT_F32)
                        x = (double)(float)x;
                    put(&one, types[t], 0, x);
                    double want = get(&one, types[t], 0), ours = get(out, types[t], (int64_t)i);
                    wrong += isnan(want)
                                 ? !isnan(ours)
                                 : ours != want || (!add && !signbit(ours) != !signbit(want));
                }
                CHECK_MSG(wrong == 0, "cast %s to %s%s: %d wrong", dt_dtype_name(types[f]),
                    dt_dtype_name(types[t]), add ? ", added" : "", wrong);
                free(in);
                free(out);
                free(old);
            }
}

/* The error in ulp of the exact value as a float; below the smallest normal float, in its ulp. */
static double ulp_error(float ours, double exact) {
    int e = 0;
    if (!(fabs(exact) <= 3.4028235e38)) return fabs(ours) > 3.3e38 ? 0 : 1e9;
    frexp(exact, &e);
    return fabs((double)ours - exact) / ldexp(1, (e < -125 ? -125 : e) - 24);
}

/* The elementary functions of one instruction set. */
typedef struct functions {
    float (*exp)(float), (*log)(float), (*tanh)(float), (*log1p)(float), (*exp_down)(float);
    float (*phi)(float, float);
} functions;
#define FUNCTIONS(suffix) \
    { \
        dt__exp##suffix, dt__log##suffix, dt__tanh##suffix, dt__log1p##suffix, \
            dt__exp_down##suffix, dt__phi##suffix \
    }
static const functions functions_of[] = { FUNCTIONS(_f32_plain),
#if defined(__x86_64__)
    FUNCTIONS(_f32_avx2), FUNCTIONS(_f32_avx512)
#elif defined(__aarch64__)
    FUNCTIONS(_f32_neon)
#endif
};

/* Tests every 2,039th of all floats. */
static void accuracy(int isa) {
    const functions *f32 = &functions_of[isa];
    double worst[6] = { 0 }, tail = 0, below_normal = 0;
    float at[6] = { 0 };
    int nan_wrong = 0, large = 0;
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 2039) {
        float x = float_of((uint32_t)bits), ours[6] = { f32->exp(x), f32->log(x), f32->tanh(x),
            f32->phi(x, f32->exp_down(-0.5f * x * x)), f32->log1p(x), f32->exp_down(x) };
        double exact[6] = { exp(x), log(x), tanh(x), 0.5 * erfc(-0.70710678118654752440 * x),
            log1p(x), exp(x) };
        for (int f = 0; f < 6; f++) {
            if (f == 4 && (x < 0 || x > 1)) continue; /* not for these */
            if (f == 5 && x > 0) continue;
            if (isnan(exact[f])) {
                nan_wrong += !isnan(ours[f]);
                continue;
            }
            double e = ulp_error(ours[f], exact[f]);
            if (isinf(exact[f])) e = ours[f] == exact[f] ? 0 : 1e9;
            if (f == 0 && exact[f] < 1.2e-38) { /* a subnormal result is rounded twice */
                below_normal = fmax(below_normal, e);
                continue;
            }
            if (f == 5 && exact[f] < 1.2e-38) { /* no subnormal results */
                large += !(ours[f] >= 0 && ours[f] < 1.2e-38f);
                continue;
            }
            if (f == 3 && x < -1) { /* e^(-x^2/2): its error grows with the exponent x^2 */
                tail = fmax(tail, exact[f] < 1e-37 ? 0 : e / (1 + x * x));
                continue;
            }
            if (e > worst[f]) worst[f] = e, at[f] = x;
        }
    }
    printf("%s: exp %.2f ulp (at %g), subnormal results %.2f, exp_down %.2f; log %.2f (at %g); "
           "tanh %.2f (at %g); phi %.2f (at %g), its tail %.2f (1 + x^2); log1p %.2f (at %g)\n",
        isa_name[isa], worst[0], at[0], below_normal, worst[5], worst[1], at[1], worst[2], at[2],
        worst[3], at[3], tail, worst[4], at[4]);
    CHECK_MSG(worst[0] <= 1.1 && below_normal <= 1.1, "exp: %.2f ulp at %.9g", worst[0], at[0]);
    CHECK_MSG(worst[1] <= 1.0, "log: %.2f ulp at %.9g", worst[1], at[1]);
    CHECK_MSG(worst[2] <= 4, "tanh: %.2f ulp at %.9g", worst[2], at[2]);
    CHECK_MSG(worst[3] <= 6 && tail < 3, "phi: %.2f ulp at %.9g, tail %.2f", worst[3], at[3], tail);
    CHECK_MSG(worst[4] <= 3, "log1p: %.2f ulp at %.9g", worst[4], at[4]);
    CHECK_MSG(worst[5] <= 1.1 && large == 0,
        "exp_down: %.2f ulp at %.9g, %d results that are not 0", worst[5], at[5], large);
    CHECK_MSG(nan_wrong == 0, "%d results should be NaN", nan_wrong);
    CHECK(f32->exp(0) == 1 && f32->exp_down(0) == 1 && f32->log(1) == 0 && f32->tanh(0) == 0 &&
          f32->phi(0, 1) == 0.5f);
}

/* GELU and SiLU at very large arguments, 0 and NaN. */
static void far_values(void) {
    static const double x[6] = { 1e4, -1e4, 1e30, -1e30, 0, NAN },
                        y[6] = { 1e4, 0, 1e30, 0, 0, NAN };
    for (int t = 0; t < 2; t++)
        for (int act = DT_ACT_GELU; act <= DT_ACT_SILU; act++)
            for (int i = 0; i < 6; i++) {
                dt_dtype type = t ? DT_F64 : DT_F32;
                double in = 0, out = 7, dx = 7, dy = 0;
                put(&in, type, 0, x[i]);
                put(&dy, type, 0, 1);
                dt_unary_args f = { type, act, &out, &in, 1, 0, 0 };
                dt_unary_back_args back = { type, act, &dx, &dy, &in, 1, 0, 0, 0 };
                CHECK(dt_kernels_cpu()->unary(&f, NULL) == DT_OK &&
                      dt_kernels_cpu()->unary_back(&back, NULL) == DT_OK);
                CHECK(isnan(x[i]) ? isnan(get(&out, type, 0))
                                  : get(&out, type, 0) == (t ? y[i] : (double)(float)y[i]));
                double slope = get(&dx, type, 0), want = x[i] > 0 ? 1 : x[i] < 0 ? 0 : 0.5;
                CHECK(isnan(x[i]) ? isnan(slope) : fabs(slope - want) < 1e-30);
            }
}

static int nans(const void *x, dt_dtype t, int from, int to) {
    int n = 0;
    for (int i = from; i < to; i++) n += isnan(get(x, t, i));
    return n;
}

/* A NaN input makes exactly the outputs that depend on it NaN. Exceptions: DT_MAX of reduce skips a
   NaN that is not the first element, and the derivatives of ReLU, |x| and the clamp at NaN are
   0. */
static void nan_elementwise(bench *b) {
    void *x = array(b, N), *y = array(b, N), *z = array(b, 2 * N), *two = array(b, 2 * N);
    put(x, b->t, 40, NAN);
    put(two, b->t, 2 * C + 3, NAN); /* a gate of row 1 */
    for (int act = 0; act < DT_ACTS; act++) {
        double low = act == DT_ACT_CLAMP ? -9 : 1.5;
        dt_unary_args a = { b->t, act, z, x, N, low, 9 };
        OK(b->v->unary(&a));
        CHECK_MSG(isnan(get(z, b->t, 40)), "unary %d loses a NaN", act);
        CHECK(takes_positive(act) || nans(z, b->t, 0, N) == 1);
        dt_unary_back_args back = { b->t, act, z, x, y, N, low, 9, 0 };
        put(y, b->t, 40, 2);
        OK(b->v->unary_back(&back));
        CHECK_MSG((takes_positive(act) || nans(z, b->t, 0, N) == 1) && isnan(get(z, b->t, 40)),
            "unary_back %d: %d outputs are NaN", act, nans(z, b->t, 0, N));
        back.dout = y, back.in = x;
        OK(b->v->unary_back(&back));
        int expected = act != DT_ACT_NONE && act != DT_ACT_RELU && act != DT_ACT_AFFINE &&
                       act != DT_ACT_ABS && act != DT_ACT_CLAMP;
        CHECK_MSG(isnan(get(z, b->t, 40)) == expected,
            "unary_back %d: the NaN of the input is lost, or spreads", act);
    }
    dt_binary_args a = { .dtype = b->t,
        .op = DT_ADD,
        .out = z,
        .a = x,
        .b = y,
        .shape = DT_SHAPE(N),
        .stride_a = { 1 },
        .stride_b = { 1 } };
    for (a.op = 0; a.op < DT_LESS; a.op++) {
        OK(b->v->binary(&a));
        CHECK(nans(z, b->t, 0, N) == 1 && isnan(get(z, b->t, 40)));
    }
    dt_glu_args glu = { b->t, DT_ACT_SILU, z, two, R, C };
    dt_glu_back_args glu_back = { b->t, DT_ACT_SILU, z, y, two, R, C, 0 };
    OK(b->v->glu(&glu));
    CHECK(nans(z, b->t, 0, N) == 1 && isnan(get(z, b->t, C + 3)));
    OK(b->v->glu_back(&glu_back));
    CHECK(nans(z, b->t, 0, 2 * N) == 2 && isnan(get(z, b->t, 2 * C + 3)) &&
          isnan(get(z, b->t, 3 * C + 3)));
    dt_sum_args sum = { b->t, z, x, R, C, 1, 1, 0, 0, NULL, 0 };
    OK(b->v->sum(&sum));
    CHECK(nans(z, b->t, 0, R) == 1 && isnan(get(z, b->t, 1)));
    const void *both[2] = { y, x };
    dt_reduce_args reduce = { b->t, z, both, 2, N, DT_AVG, NULL, 0, 0 };
    OK(b->v->reduce(&reduce));
    CHECK(nans(z, b->t, 0, N) == 1);
    dt_dropout_args drop = { b->t, z, x, NULL, R, C, 0, 1e-9, 5, 0 };
    OK(b->v->dropout(&drop));
    CHECK(nans(z, b->t, 0, N) == 1);
    int32_t at[R] = { 0 };
    dt_rope_args rope = { b->t, z, x, at, R, 1, C, 36, 1e4, 0, 0, 0, { .kind = 0 } };
    OK(b->v->rope(&rope));
    CHECK(nans(z, b->t, 0, N) == 2);
    double squares = 0, loss = 0;
    dt_square_sums_args square = { b->t, &squares, x, N };
    dt_pair_loss_args mse = { b->t, DT_PAIR_SQUARE, &loss, x, y, N, 1 };
    CHECK(b->v->square_sums(&square) == DT_OK && isnan(squares) && b->v->pair_loss(&mse) == DT_OK &&
          isnan(loss));
}

/* max and topk order NaNs as PyTorch's torch.max and torch.topk: the values are those of PyTorch 2,
   for the rows and, of max, for columns. */
static void nan_pick(bench *b) {
    enum { ROWS = 5, COLS = 4, K = 3 };
    const double n = NAN, i = INFINITY;
    const double in[ROWS][COLS] = { { 1, n, 3, 2 }, { n, i, n, 5 }, { -i, -i, n, -i },
        { 4, 3, 2, 1 }, { n, n, n, n } };
    const double top[ROWS][K] = { { n, 3, 2 }, { n, n, i }, { n, -i, -i }, { 4, 3, 2 },
        { n, n, n } };
    const int32_t max_at[ROWS] = { 1, 0, 2, 0, 0 };
    /* of equal elements, which PyTorch orders as it likes, the first */
    const int32_t top_at[ROWS][K] = { { 1, 2, 3 }, { 0, 2, 1 }, { 2, 0, 1 }, { 0, 1, 2 },
        { 0, 1, 2 } };
    void *x = array(b, ROWS * COLS), *turned = array(b, ROWS * COLS), *y = array(b, ROWS * K);
    int32_t index[ROWS * K];
    for (int k = 0; k < ROWS * COLS; k++) {
        put(x, b->t, k, in[k / COLS][k % COLS]);
        put(turned, b->t, k, in[k % ROWS][k / ROWS]);
    }
    for (int columns = 0; columns < 2; columns++) {
        dt_max_args max = { b->t, y, index, columns ? turned : x, columns ? 1 : ROWS, COLS,
            columns ? ROWS : 1 };
        OK(b->v->max(&max));
        for (int r = 0; r < ROWS; r++)
            CHECK_MSG(
                index[r] == max_at[r] && (r == 3 ? get(y, b->t, r) == 4 : isnan(get(y, b->t, r))),
                "max %s %s: row %d is element %d, %g", isa_name[b->isa], dt_dtype_name(b->t), r,
                index[r], get(y, b->t, r));
    }
    dt_topk_args args = { b->t, y, index, x, ROWS, COLS, K };
    OK(b->v->topk(&args));
    for (int k = 0; k < ROWS * K; k++) {
        double want = top[k / K][k % K], got = get(y, b->t, k);
        CHECK_MSG(index[k] == top_at[k / K][k % K] && (isnan(want) ? isnan(got) : want == got),
            "topk %s %s: place %d of row %d is element %d, %g", isa_name[b->isa],
            dt_dtype_name(b->t), k % K, k / K, index[k], got);
    }
}

static void nan_rows(bench *b) {
    size_t work_bytes =
        dt_row_work(C, b->t) + dt_matmul_work(C, C, b->t) + dt_attention_work(R, 3, b->t);
    void *x = array(b, N), *y = array(b, N), *z = array(b, N), *work = keep(b, room(work_bytes));
    void *stat = keep(b, room(N * 8)), *more = keep(b, room(N * 8));
    int32_t labels[R] = { 0 };
    double loss = 0, row_loss[R], up = 1;
    put(x, b->t, 40, NAN); /* row 1, column 3 */
    dt_softmax_args s = { b->t, z, x, R, C, work, work_bytes };
    OK(b->v->softmax(&s));
    CHECK(nans(z, b->t, 0, N) == C && nans(z, b->t, C, 2 * C) == C);
    for (int rms = 0; rms < 2; rms++) {
        dt_norm_args a = { b->t, z, more, stat, x, y, y, R, C, 1e-5, rms, work, work_bytes, 0 };
        OK(b->v->norm(&a));
        CHECK(nans(z, b->t, 0, N) == C && nans(z, b->t, C, 2 * C) == C);
    }
    dt_cross_entropy_args ce = { b->t, &loss, row_loss, stat, x, labels, R, C, 0, 1, 0, NULL, 0,
        work, work_bytes, NULL, 0, 0 };
    dt_cross_entropy_back_args back = { b->t, z, x, stat, labels, R, C, 0, &up, 1, 0, 0, 0, work,
        work_bytes, 0, 0 };
    OK(b->v->cross_entropy(&ce));
    OK(b->v->cross_entropy_back(&back));
    CHECK(isnan(loss) && !isnan(row_loss[0]) && isnan(row_loss[1]) && nans(z, b->t, 0, N) == C);
    dt_matmul_args product = { .dtype = b->t,
        .c = z,
        .a = x,
        .b = y,
        .m = R,
        .n = 17,
        .k = C,
        .work = work,
        .work_bytes = work_bytes };
    OK(b->v->matmul(&product)); /* the NaN is in row 1 of A */
    CHECK(nans(z, b->t, 0, R * 17) == 17 && nans(z, b->t, 17, 34) == 17);
    dt_attention_mask sight = { .causal = 1 };
    put(x, b->t, 40, 1);
    put(x, b->t, 3 * (R - 2) + 1, NAN); /* the key of the last token but one */
    dt_attention_args a = { b->t, z, stat, y, x, y, 1, R, R, 1, 1, 3, 0.5, sight, 0, 0, work,
        work_bytes, 0 };
    OK(b->v->attention(&a));
    CHECK(nans(z, b->t, 0, 3 * (R - 2)) == 0 && nans(z, b->t, 3 * (R - 2), 3 * R) == 6);
}

static void test_numbers(void) {
    conversions();
    casts();
    long_casts();
    empty_products();
    nan_casts();
    for (int isa = 0; isa <= dt__best_isa(); isa++) accuracy(isa);
    far_values();
    for (int t = 0; t < 4; t++)
        for (int isa = 0; isa <= dt__best_isa(); isa++) {
            bench b = { .v = dt__variant_of(float_types[t], isa), .t = float_types[t], .isa = isa };
            nan_elementwise(&b);
            nan_pick(&b);
            nan_rows(&b);
            while (b.n_all > 0) free(b.all[--b.n_all]);
        }
}

/* All tests of products in one type with one instruction set. */
static void products_by(dt_dtype type, int isa) {
    products(type, isa);
    for (int kind = 0; kind < 8; kind++) product_bits(type, isa, 45, 171, 129, kind);
    for (int kind = 8; kind < 12; kind++) product_bits(type, isa, 200, 233, 1, kind);
    product_bits(type, isa, 9, 25, 19, 2); /* rows of 32 columns at a time: B is small */
    product_bits(type, isa, 9, 25, 35, 2);
    /* an infinity stays in its column, also of an odd K, whose last pair is half empty */
    for (int k = 3; k < 40; k += 2) product_bits(type, isa, 9, 32, k, 18);
    product_bits(type, isa, 461, 37, 600, 6);
    product_bits(type, isa, 15, 541, 520, 6);
    product_bits(type, isa, 29, 35, 1601, 6);
    product_bits(type, isa, 20, 300, 611, 0);
    /* several blocks of columns, with all of K in one block (bf16 pairs) or in two: the packed panels
       of A serve the next block of columns in the first case only */
    product_bits(type, isa, 130, 800, 1520, 2);
}

#if defined(__x86_64__)
static int amx_asked;
static long amx_permit(void) { return amx_asked++, 0; }
static long amx_refuse(void) { return amx_asked++, -1; }

/* AMX needs both bits of the system and a permission, which is asked for. */
static void test_amx_is_usable(void) {
    unsigned xcr0 = 3u << 17;
    CHECK(dt__amx_is_usable(xcr0, amx_permit) && amx_asked == 1);
    CHECK(!dt__amx_is_usable(xcr0, amx_refuse) && amx_asked == 2);
    for (int bit = 0; bit < 32; bit++)
        CHECK(dt__amx_is_usable(xcr0 & ~(1u << bit), amx_permit) == (bit != 17 && bit != 18));
}

/* AMX adds the even and the odd of each 32 k indices separately, then both sums, then the result to
   the element, which starts at zero. All three kinds of operands and K of one and of two blocks
   have these bits. The elements reach down to denormals, which are zeros. */
static void product_order(void) {
    enum { M = 35, N = 37, MOST = 1650 };
    static const int ks[] = { 1, 2, 31, 33, 64, 95, MOST };
    uint16_t *a = noise_array(DT_BF16, M * MOST, 11), *b = noise_array(DT_BF16, N * MOST, 12);
    for (int i = 0; i < M * MOST; i += 3) put(a, DT_BF16, i, ldexp(1.4, i % 260 - 140));
    float *c = room(M * N * sizeof *c);
    for (int t = 0; t < 3 * 7; t++) {
        int K = ks[t % 7], ta = t / 7 == 1, tb = t / 7 == 2, wrong = 0;
        dt_matmul_args p = { .dtype = DT_BF16, .c = c, .a = a, .b = b, .m = M, .n = N, .k = K };
        p.trans_a = ta, p.trans_b = tb, p.wide = 1;
        p.work_bytes = dt_matmul_work(N, K, DT_BF16), p.work = room(p.work_bytes);
        CHECK(multiply(DT_BF16, TILES, &p) == DT_OK);
        free(p.work);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) {
                float all = 0;
                for (int k = 0; k < K; k += 32) {
                    float even = 0, odd = 0;
                    for (int l = k; l < K && l < k + 32; l++) {
                        float *sum = l % 2 ? &odd : &even;
                        float x = (float)get(a, DT_BF16, ta ? l * M + i : i * K + l);
                        float y = (float)get(b, DT_BF16, tb ? j * K + l : l * N + j);
                        *sum = amx_flush(fmaf(amx_flush(x), amx_flush(y), *sum));
                    }
                    all = amx_flush(all + amx_flush(even + odd));
                }
                wrong += memcmp(&all, c + i * N + j, sizeof all) != 0;
            }
        CHECK_MSG(wrong == 0, "amx, K %d, form %d: %d elements have other bits", K, t / 7, wrong);
    }
    free(a);
    free(b);
    free(c);
}
#endif

static void test_products(void) {
    for (int isa = first_isa(); isa < DT__ISAS; isa++) {
        if (isa > dt__best_isa() || !dt__variant_of(DT_F32, isa)) {
            char text[64];
            snprintf(text, sizeof text, "kernels with %s: not on this machine", isa_name[isa]);
            check_skip(text);
            continue;
        }
        for (int t = 0; t < 4; t++) products_by(float_types[t], isa);
    }
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bf16"))
        products_by(DT_BF16, PAIRS);
    else
#endif
        check_skip("bf16 products by pairs: not on this machine");
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw")) {
        test_amx_is_usable();
        products_by(DT_BF16, TILES);
        product_order();
    } else
#endif
        check_skip("bf16 products by AMX tiles: not on this machine");
}

/* The scratch memory lies where row 70 of C would be if the 16-bit C had elements of the compute
   type: the tile of that row must be stored in C all the same. */
static void product_near_scratch(dt_dtype dtype) {
    enum { M = 96, N = 16, K = 16, ROW = 70 };
    static _Alignas(64) char memory[1 << 19];
    uint16_t a[M * K], b[K * N], far[M * N];
    size_t bytes = dt_matmul_work(N, K, dtype), at = ROW * N * sizeof(float);
    CHECK(bytes + at <= sizeof memory && M * N * sizeof *far <= at);
    for (int i = 0; i < M * K; i++) a[i] = (uint16_t)(0x3c00 + i % 61);
    for (int i = 0; i < K * N; i++) b[i] = (uint16_t)(0x3c00 + i % 53);
    dt_matmul_args far_args = { .dtype = dtype, .c = far, .a = a, .b = b, .m = M, .n = N, .k = K };
    memset(memory, 0xff, sizeof memory);
    dt_matmul_args near_args = far_args;
    near_args.c = memory;
    near_args.work = memory + at;
    near_args.work_bytes = bytes;
    CHECK(dt_kernels_cpu()->matmul(&far_args, NULL) == DT_OK &&
          dt_kernels_cpu()->matmul(&near_args, NULL) == DT_OK);
    CHECK_MSG(memcmp(memory, far, sizeof far) == 0, "%s: scratch behind C changes the product",
        dt_dtype_name(dtype));
}

/* Returns the sum of the parts. */
static uint64_t digest_of(dt_dtype t, const void *in, size_t count, uint64_t offset) {
    uint64_t parts[DT_DIGEST_PARTS], sum = 0;
    dt_digest_args a = { t, parts, in, count, offset, 1 + count % DT_DIGEST_PARTS };
    CHECK(dt_kernels_cpu()->digest(&a, NULL) == DT_OK);
    for (size_t p = 0; p < a.parts; p++) sum += parts[p];
    return sum;
}

/* Digests of parts add up, at any cut; a flipped bit and a swap change the digest. */
static void test_digest(void) {
    enum { BYTES = 8 * 1003 };
    static const dt_dtype types[] = { DT_U8, DT_BF16, DT_F16, DT_F32, DT_I32, DT_I64, DT_F64 };
    unsigned char in[BYTES];
    for (int i = 0; i < BYTES; i++) in[i] = (unsigned char)((unsigned)i * 2654435761u >> 13);
    for (int k = 0; k < 7; k++) {
        size_t size = dt_dtype_size(types[k]), count = BYTES / size - 1;
        uint64_t all = digest_of(types[k], in, count, 77);
        for (size_t cut = 0; cut <= count; cut += count / 5 + 3)
            CHECK(all == digest_of(types[k], in, cut, 77) +
                             digest_of(types[k], in + cut * size, count - cut, 77 + cut));
        CHECK(all != digest_of(types[k], in, count, 78));
        for (size_t i = 0; i < count * size; i += 37) {
            unsigned char *p = in + i, old = *p;
            *p ^= (unsigned char)(1 << i % 8);
            CHECK(digest_of(types[k], in, count, 77) != all);
            *p = old;
        }
        size_t last = (count - 1) * size;
        if (!CHECK(memcmp(in, in + last, size) != 0)) return;
        for (size_t i = 0; i < size; i++) {
            unsigned char first = in[i];
            in[i] = in[last + i];
            in[last + i] = first;
        }
        CHECK(digest_of(types[k], in, count, 77) != all);
    }
}

int main(void) {
    tells_upper = tells_upper_halves();
    test_digest();
    test_products();
    product_near_scratch(DT_F16);
    product_near_scratch(DT_BF16);
    test_all_kernels();
    reductions();
    test_numbers();
    return check_done("test_kernels");
}
