// attention_cases.h - compares products and attention of dt_kernels.cu with the CPU's
//
// cuda_cases.h says what is compared. Errors are relative to the magnitude of the summed terms: |a|
// |b| for a product, the largest value or gradient for attention. Tensor cores read attention's
// scores and their gradients in 16 bits.

#ifndef ATTENTION_CASES_H
#define ATTENTION_CASES_H

#include "tests/cuda/cuda_cases.h"

// ==== 1. Matrix product =========================================================================

struct product {
    dt_dtype dtype;
    int64_t m, n, k, batch;
    int trans; // bits: 1: a is transposed, 2: b
    int placement;
    int gap; // elements between rows, and between batches
    int bias, activation, before, derivative, residual, accumulate, wide;
    int shared = 0; // all products read one matrix: 1 a, 2 b
};

static std::string name_of(const product &p) {
    return dtc_text("%s product %ld x %ld x %ld x %ld, trans %d, placed %d, gap %d, bias %d, act "
                    "%d, before %d, "
                    "derivative %d, residual %d, accumulate %d, wide %d",
        dt_dtype_name(p.dtype), (long)p.batch, (long)p.m, (long)p.n, (long)p.k, p.trans,
        p.placement, p.gap, p.bias, p.activation, p.before, p.derivative, p.residual, p.accumulate,
        p.wide);
}

// Arrays: c, a, b, bias, residual, before, scratch.
static arrays product_arrays(const product &p, const dt_matmul_args &m) {
    arrays x;
    dt_dtype to = p.wide ? DT_F32 : p.dtype;
    size_t batch = (size_t)(p.batch ? p.batch : 1), c_count = batch * (size_t)m.stride_c;
    double size = (double)p.k + 4;
    push(x, p.placement, c_count, size, to);
    push(x, p.placement, batch * (size_t)m.stride_a, EXACT, p.dtype);
    push(x, p.placement, batch * (size_t)m.stride_b, EXACT, p.dtype);
    push(x, p.placement, (size_t)p.n, EXACT, p.dtype);
    push(x, p.placement, c_count, EXACT, p.dtype);
    push(x, p.placement, c_count, p.before && !p.derivative ? size : (double)EXACT, p.dtype);
    push(x, ALIGNED, dt_matmul_work(p.n, p.k, p.dtype) / 4 + 1, SCRATCH);
    for (size_t i = 0; i < x[4].count && (p.activation == DT_ACT_LN || p.activation == DT_ACT_SQRT);
         i++) // no logarithm and no square root of values near 0
        if (p.derivative) dt__set_number(p.dtype, x[5].data(), i, 1 + fabs(x[5].at(i)));
    return x;
}

static void *the_queue; // NULL here; test_cuda_blas.cc sets one

// A product whose B has blocks: the same bytes on the CPU and on the device. Scratch memory for
// `columns` columns of B makes several panels. In bf16 the device rounds the blocks' values first,
// because tensor cores need 16-bit operands.
static void compare_quantised(
    dt_dtype dtype, dt_quant quant, int64_t m, int64_t n, int64_t k, int trans_b, int64_t columns) {
    arrays x;
    int64_t count = n * k, ldb = trans_b ? k : n;
    std::vector<float> values((size_t)count);
    for (float &v : values) v = (float)random_number();
    push(x, ALIGNED, (size_t)(m * n), (double)k + 4, dtype);
    push(x, ALIGNED, (size_t)(m * k), EXACT, dtype);
    push(x, ALIGNED, dt_quant_bytes(quant, count), EXACT, DT_U8);
    push(x, ALIGNED, (size_t)n, EXACT, dtype);
    push(x, ALIGNED, (size_t)(m * n), EXACT, dtype);
    push(x, ALIGNED, (size_t)(2 * columns * k + 256), SCRATCH);
    CHECK(dt_quantize(quant, values.data(), count, x[2].data()) == DT_OK);
    CHECK(dt_dequantize(quant, x[2].data(), count, values.data()) == DT_OK);
    std::vector<uint16_t> rounded;
    for (float v : values) rounded.push_back(dt__f32_to_bf16(v));
    compare(dtc_text("%s product with %s, %ld x %ld x %ld, trans %d", dt_dtype_name(dtype),
                dt_quant_name(quant), (long)m, (long)n, (long)k, trans_b),
        x, [=](const dt_kernels *t, arrays &all) {
            dt_matmul_args args;
            memset(&args, 0, sizeof args);
            args.dtype = dtype, args.m = m, args.n = n, args.k = k, args.trans_b = trans_b;
            args.c = all[0].data(), args.a = all[1].data(), args.b = all[2].data();
            args.bias = all[3].data(), args.residual = all[4].data();
            args.b_quant = (int)quant, args.ldb = ldb;
            args.work = all[5].data(), args.work_bytes = all[5].bytes();
            if (t == dt_kernels_cpu()) args.work = NULL, args.work_bytes = 0;
            if (t == dt_kernels_cpu() && dtype == DT_BF16)
                args.b = rounded.data(), args.b_quant = 0;
            dt_status status = t->matmul(&args, the_queue);
            return status == DT_OK ? wait_for(t, the_queue) : status;
        });
}

static void test_quantised_products() {
    for (dt_dtype dtype : { DT_F32, DT_BF16 })
        for (dt_quant quant : { DT_QUANT_BF16, DT_QUANT_INT8, DT_QUANT_NF4 })
            for (int trans_b = 0; trans_b < 2; trans_b++) {
                compare_quantised(dtype, quant, 5, 192, 128, trans_b, 64);
                compare_quantised(dtype, quant, 33, 64, 64, trans_b, 256);
            }
    compare_quantised(DT_F32, DT_QUANT_NF4, 3, 70, 64, 1, 64);
}

static void compare_product(const product &p, size_t orders = 3, double grain = 0) {
    dt_matmul_args m;
    memset(&m, 0, sizeof m);
    m.dtype = p.dtype;
    m.m = p.m, m.n = p.n, m.k = p.k, m.batch = p.batch;
    m.trans_a = p.trans & 1, m.trans_b = p.trans >> 1;
    m.lda = (m.trans_a ? p.m : p.k) + p.gap, m.ldb = (m.trans_b ? p.k : p.n) + p.gap,
    m.ldc = p.n + p.gap;
    m.stride_a = m.lda * (m.trans_a ? p.k : p.m) + p.gap;
    m.stride_b = m.ldb * (m.trans_b ? p.n : p.k) + p.gap;
    m.stride_c = m.ldc * p.m + p.gap;
    arrays start = product_arrays(p, m);
    if (p.gap == 0) m.lda = m.ldb = m.ldc = 0; // dense
    if (p.shared == 1) m.stride_a = 0;
    if (p.shared == 2) m.stride_b = 0;
    start[0].grain = start[5].grain = grain;
    m.activation = p.activation, m.activation_backward = p.derivative, m.accumulate = p.accumulate,
    m.wide = p.wide;
    compare(
        name_of(p), start,
        [=](const dt_kernels *t, arrays &x) {
            dt_matmul_args args = m;
            args.c = x[0].data(), args.a = x[1].data(), args.b = x[2].data();
            args.bias = p.bias ? x[3].data() : NULL;
            args.residual = p.residual ? x[4].data() : NULL;
            args.pre_activation = p.before || p.derivative ? x[5].data() : NULL;
            args.work = x[6].data(), args.work_bytes = x[6].bytes();
            dt_status status = t->matmul(&args, the_queue);
            return status == DT_OK ? wait_for(t, the_queue) : status;
        },
        orders);
}

#if CUDA_ORDERS > 1
static const dt_dtype TYPES[] = { DT_F32, DT_BF16, DT_F16 };
static const int64_t LENGTHS[] = { 1, 17, 33, 65, 129 };
#else // the race detector: f16 has the code paths of bf16; lengths of up to three tiles
static const dt_dtype TYPES[] = { DT_F32, DT_BF16 };
static const int64_t LENGTHS[] = { 17, 65, 129 };
#endif

static void test_product_shapes() {
    static const int64_t sizes[][3] = { { 1, 1, 1 }, { 1, 17, 33 }, { 17, 1, 65 }, { 33, 65, 1 },
        { 65, 33, 17 }, { 5, 7, 0 }, { 129, 130, 40 }, { 64, 64, 64 }, { 8, 200, 100 } };
    for (dt_dtype dtype : TYPES)
        for (const auto &s : sizes)
            for (int trans = 0; trans < 4; trans++) {
                product p = { dtype, s[0], s[1], s[2], 0, trans, ALIGNED, 0, 0, 0, 0, 0, 0, 0, 0 };
                compare_product(p);
                p.placement = trans % 2 ? ODD : FIRST_ODD;
                p.gap = trans == 3 ? 8 : 3;
                p.batch = 1 + trans % 3;
                compare_product(p, 1);
            }
    for (dt_dtype dtype : TYPES) {
        compare_product({ dtype, 0, 5, 5, 0, 0, ALIGNED, 0, 1, 0, 0, 0, 0, 0, 0 }, 1);
        compare_product({ dtype, 5, 0, 5, 0, 0, ALIGNED, 0, 0, 0, 0, 0, 0, 0, 0 }, 1);
        for (int trans = 0; trans < 4; trans++)
            for (int shared = 0; shared < 3; shared++)
                compare_product(
                    { dtype, 136, 144, 200, 2, trans, ALIGNED, 8, 0, 0, 0, 0, 0, 0, 0, shared }, 1);
    }
    compare_product({ DT_F32, 1409, 1430, 3, 0, 2, ALIGNED, 0, 0, 0, 0, 0, 0, 0, 0 },
        1); // enough for large tiles
}

static void test_product_fusions() {
    for (dt_dtype dtype : TYPES)
        for (int act = DT_ACT_NONE; act < DT_ACT_AFFINE; act++)
            for (int code = 0; code < 32; code++) {
                product p = { dtype, 19, 21, 9, 2, 2, ALIGNED, 5, code & 1, act, code >> 1 & 1, 0,
                    code >> 2 & 1, code >> 3 & 1, code >> 4 & 1 };
                if (act == DT_ACT_LN || act == DT_ACT_EXP) p.k = 1; // so that values stay small
                // the logarithm and the square root of sums around 0 are ill-conditioned
                if (act != DT_ACT_LN && act != DT_ACT_SQRT) compare_product(p, 1);
                p.before = 0, p.derivative = 1;
                compare_product(p, 1);
            }
    compare_product(
        { DT_F32, 19, 21, 9, 0, 0, ALIGNED, 0, 0, DT_ACT_AFFINE, 0, 0, 0, 0, 0 }, 1); // refused
}

// ==== 2. Attention ==============================================================================

enum {
    DEFAULT,
    DOCUMENTS,
    ZIGZAG,
    SHUFFLED,
    BLIND,
    SIGHTS,
    QUARTER = SIGHTS
}; // the mask: which keys a query attends to

struct attention_case {
    dt_dtype dtype;
    int64_t batch, tq, tk, heads, kv_heads, dim;
    int causal, sight, placement, wide, accumulate; // forward: merge
    int window = 0;                                 // 0: none
    double cap = 0;                                 // soft-capping; 0: none
};

static std::string name_of(const char *what, const attention_case &c) {
    return dtc_text("%s %s, batch %ld, %ld queries, %ld keys, %ld/%ld heads of %ld, causal %d, "
                    "sight %d, placed %d, "
                    "wide %d, added %d, window %d, cap %g",
        dt_dtype_name(c.dtype), what, (long)c.batch, (long)c.tq, (long)c.tk, (long)c.heads,
        (long)c.kv_heads, (long)c.dim, c.causal, c.sight, c.placement, c.wide, c.accumulate,
        c.window, c.cap);
}

enum { Q, K, V, Q_POSITION, K_POSITION, Q_DOCUMENT, K_DOCUMENT, WORK, OUT, LSE, DOUT, DQ, DK, DV };

// Fills in positions or documents of tokens; the first token has index `first`.
static void fill_numbers(array &a, int kind, int64_t length, int64_t first, bool documents) {
    for (size_t i = 0; i < a.count; i++) {
        int64_t at = (int64_t)i % length, other = (int64_t)(i * 7919 % 31);
        if (documents && kind == QUARTER) a.i()[i] = at >= length * 3 / 4;
        // documents of odd lengths; interleaved documents; or a document that no other token has
        else if (documents)
            a.i()[i] = (int32_t)(kind == DOCUMENTS  ? (first + at) / 19
                                 : kind == SHUFFLED ? other % 3
                                                    : 5);
        else if (kind == ZIGZAG)
            a.i()[i] = (int32_t)(at < length / 2 ? at : 2 * length + at);
        else if (kind == SHUFFLED)
            a.i()[i] = (int32_t)((at * 37 + 11) % length);
        else
            a.i()[i] =
                (int32_t)(at < length / 3 ? -5 : at); // BLIND: the first queries precede all keys
    }
}

static arrays attention_arrays(const attention_case &c) {
    arrays x;
    dt_dtype to = c.wide ? DT_F32 : c.dtype;
    size_t n_q = (size_t)(c.batch * c.tq), n_k = (size_t)(c.batch * c.tk);
    size_t q = n_q * (size_t)(c.heads * c.dim), k = n_k * (size_t)(c.kv_heads * c.dim);
    double size = 4, grads = 4 * sqrt((double)(c.tq * c.heads / c.kv_heads));
    for (size_t count : { q, k, k }) push(x, c.placement, count, EXACT, c.dtype);
    fill_numbers(push(x, ALIGNED, n_q, EXACT, DT_I32), c.sight, c.tq, c.tk - c.tq, false);
    fill_numbers(
        push(x, ALIGNED, n_k, EXACT, DT_I32), c.sight == BLIND ? -1 : c.sight, c.tk, 0, false);
    fill_numbers(push(x, ALIGNED, n_q, EXACT, DT_I32), c.sight, c.tq, c.tk - c.tq, true);
    fill_numbers(push(x, ALIGNED, n_k, EXACT, DT_I32), c.sight, c.tk, 0, true);
    for (size_t i = 0; i < n_k && c.sight == BLIND; i++)
        x[K_POSITION].i()[i] = (int32_t)(i % (size_t)c.tk);
    push(x, ALIGNED, dt_attention_work(c.tk, c.dim, c.dtype) / 4 + 65536, SCRATCH);
    push(x, c.placement, q, size, to);
    push(x, ALIGNED, n_q * (size_t)c.heads, size, DT_F32);
    push(x, c.placement, q, EXACT, c.dtype);
    push(x, c.placement, q, size * sqrt((double)c.dim), to);
    push(x, c.placement, k, grads, to);
    push(x, c.placement, k, grads, to);
    return x;
}

static dt_attention_mask mask_of(const attention_case &c, const arrays &x) {
    dt_attention_mask s = { c.causal, NULL, NULL, NULL, NULL, c.window };
    if (c.sight >= ZIGZAG && c.sight < SIGHTS)
        s.q_position = x[Q_POSITION].i(), s.k_position = x[K_POSITION].i();
    if (c.sight == DOCUMENTS || c.sight == SHUFFLED || c.sight == QUARTER)
        s.q_document = x[Q_DOCUMENT].i(), s.k_document = x[K_DOCUMENT].i();
    if (c.sight == BLIND && !c.causal)
        s.k_document = x[K_DOCUMENT].i(); // document 5, but the queries have document 0
    return s;
}

static dt_status run_attention(const dt_kernels *t, const attention_case &c, int merge, arrays &x) {
    dt_attention_args a;
    memset(&a, 0, sizeof a);
    a.dtype = c.dtype;
    a.out = x[OUT].data(), a.lse = x[LSE].data(), a.q = x[Q].data(), a.k = x[K].data(),
    a.v = x[V].data();
    a.batch = c.batch, a.tq = c.tq, a.tk = c.tk, a.heads = c.heads, a.kv_heads = c.kv_heads,
    a.dim = c.dim;
    a.scale = 1 / sqrt((double)c.dim), a.mask = mask_of(c, x), a.merge_lse = merge, a.wide = c.wide;
    a.work = x[WORK].data(), a.work_bytes = x[WORK].bytes(), a.soft_cap = c.cap;
    return t->attention(&a, NULL);
}

static dt_status run_attention_back(
    const dt_kernels *t, const attention_case &c, int leave, arrays &x) {
    dt_attention_back_args a;
    memset(&a, 0, sizeof a);
    a.dtype = c.dtype;
    a.dq = leave & 1 ? NULL : x[DQ].data();
    a.dk = leave & 2 ? NULL : x[DK].data();
    a.dv = leave & 4 ? NULL : x[DV].data();
    a.dout = x[DOUT].data(), a.out = x[OUT].data(), a.lse = x[LSE].data();
    a.q = x[Q].data(), a.k = x[K].data(), a.v = x[V].data();
    a.batch = c.batch, a.tq = c.tq, a.tk = c.tk, a.heads = c.heads, a.kv_heads = c.kv_heads,
    a.dim = c.dim;
    a.scale = 1 / sqrt((double)c.dim), a.mask = mask_of(c, x), a.wide = c.wide;
    a.accumulate_q = c.accumulate & 1, a.accumulate_k = c.accumulate >> 1 & 1,
    a.accumulate_v = c.accumulate >> 2 & 1;
    a.work = x[WORK].data(), a.work_bytes = x[WORK].bytes(), a.soft_cap = c.cap;
    return t->attention_back(&a, NULL);
}

static void compare_attention(const attention_case &c, size_t orders = 3) {
    arrays start = attention_arrays(c);
    double grain = dt_dtype_size(c.dtype) == 2 ? step_of(c.dtype, 1) : 0; // of p
    start[OUT].grain = grain;
    // the partial result to merge with has no keys either
    for (size_t i = 0; i < start[LSE].count; i += 5)
        if (c.sight == BLIND) start[LSE].f()[i] = -INFINITY;
    compare(
        name_of("attention", c), start,
        [=](const dt_kernels *t, arrays &x) { return run_attention(t, c, c.accumulate, x); },
        orders);
}

// The out and lse for a backward come from the forward of the CPU's kernel.
static void compare_attention_back(const attention_case &c, size_t orders = 3, int leave = 0) {
    arrays start = attention_arrays(c);
    double grain = dt_dtype_size(c.dtype) == 2 ? step_of(c.dtype, 1) : 0;
    CHECK(run_attention(dt_kernels_cpu(), c, 0, start) == DT_OK);
    start[OUT].floor = start[LSE].floor = EXACT;
    start[DQ].grain = 4 * grain;
    start[DK].grain = start[DV].grain = 8 * grain;
    compare(
        name_of("attention_back", c), start,
        [=](const dt_kernels *t, arrays &x) { return run_attention_back(t, c, leave, x); }, orders);
}

static void compare_both(const attention_case &c, size_t orders = 1) {
    compare_attention(c, orders);
    compare_attention_back(c, orders);
}

static bool only_bf16; // set for the second run, which uses the warp kernels

// Lengths around tile borders; head dimensions below, equal to and between those that tiles are
// made for.
static void test_attention_lengths() {
    for (dt_dtype dtype : TYPES) {
        if (only_bf16 && dtype != DT_BF16) continue;
        if (dtype == DT_F16) continue; // the code paths of bf16: test_attention_fields
        for (int64_t tq : LENGTHS)
            for (int64_t tk : LENGTHS) {
                bool all = tq == tk || tq + tk == 146;
                for (int64_t dim : { 16, 64, 80 }) {
                    attention_case c = { dtype, 1, tq, tk, 2, 1, dim, tq <= tk, DEFAULT, ALIGNED, 0,
                        0 };
                    if (all || dim == 16) compare_both(c, dim == 64 && all ? 3 : 1);
                }
            }
        compare_both({ dtype, 1, 100, 140, 1, 1, 80, 1, DEFAULT, ALIGNED, 0,
            0 }); // keys that half of a block attends to
        compare_both({ dtype, 1, 256, 256, 1, 1, 80, 1, QUARTER, ALIGNED, 0,
            0 });                      // documents that divide a block
        for (int64_t dim : { 64, 80 }) // consecutive tiles without a mask
            compare_both({ dtype, 1, 20, 300, 1, 1, dim, dim > 64, DEFAULT, ALIGNED, 0, 0 });
        for (int64_t dim : { 1, 5, 24, 65, 100, 128, 132, 200, 256 })
            compare_both({ dtype, 1, 40, 70, 2, 1, dim, 1, DEFAULT, ALIGNED, 0, 0 },
                dim == 256 || dim == 128 ? 3 : 1);
    }
}

// Several sequences, grouped heads, masks, unaligned memory, f32 results, accumulation.
static void test_attention_fields() {
    for (dt_dtype dtype : TYPES) {
        if (only_bf16 && dtype != DT_BF16) continue;
        for (int64_t kv_heads : { 1, 2, 4, 8 })
            compare_both({ dtype, 2, 37, 37, 8, kv_heads, 32, 1, DEFAULT, ALIGNED, 0, 0 });
        for (int sight = 0; sight < SIGHTS; sight++)
            for (int causal = 0; causal < 2; causal++) {
                compare_both(
                    { dtype, 2, 150, 150, 2, 1, 16, causal, sight, ALIGNED, 0, 0 }, causal ? 3 : 1);
                compare_both({ dtype, 1, 30, 190, 2, 2, 24, causal, sight, ALIGNED, 1, 0 });
                compare_both({ dtype, 1, 150, 60, 1, 1, 72, causal, sight, ODD, 0, 0 });
            }
        for (int placement = 0; placement < PLACEMENTS; placement++)
            for (int64_t dim : { 16, 17, 18 })
                compare_both(
                    { dtype, 1, 20, 35, 2, 1, dim, 1, DEFAULT, placement, placement % 2, 7 });
        for (int accumulate = 0; accumulate < 8; accumulate++)
            for (int wide = 0; wide < 2; wide++)
                compare_attention_back(
                    { dtype, 1, 20, 35, 2, 1, 16, 0, DEFAULT, ALIGNED, wide, accumulate }, 1,
                    7 - accumulate);
    }
    for (int64_t dim : { 64, 256 }) // omits each of dq, dk, dv
        for (int leave = 0; leave < 8; leave++)
            compare_attention_back(
                { DT_BF16, 1, 20, 35, 2, 1, dim, 1, DEFAULT, ALIGNED, 0, 0 }, 1, leave);
}

// Sliding windows and soft-capping, with and without mask arrays; windows shorter and longer than a
// tile.
static void test_attention_window() {
    for (dt_dtype dtype : TYPES) {
        if (only_bf16 && dtype != DT_BF16) continue;
        if (dtype == DT_F16) continue;    // the code paths of bf16
        for (int window : { 2, 20, 100 }) // 2: one key of the tile before the queries' own
            for (int sight : { DEFAULT, DOCUMENTS, SHUFFLED }) {
                compare_both({ dtype, 1, 150, 150, 2, 1, 16, 1, sight, ALIGNED, 0, 0, window });
                compare_both({ dtype, 1, 70, 190, 1, 1, 72, 1, sight, ALIGNED, 1, 0, window, 0.7 });
            }
        compare_both({ dtype, 2, 37, 60, 2, 2, 32, 0, DEFAULT, ALIGNED, 0, 0, 0, 0.5 });
        compare_both({ dtype, 1, 150, 60, 1, 1, 72, 1, ZIGZAG, ODD, 0, 0, 20, 0.5 });
        compare_both({ dtype, 1, 300, 300, 1, 1, 128, 1, DEFAULT, ALIGNED, 0, 0, 30 }, 3);
    }
}

// Attention over half of the keys, merged with attention over the other half, equals attention over
// all keys.
static void test_merge() {
    for (dt_dtype dtype : TYPES)
        for (int sight = 0; sight < SIGHTS; sight++) {
            attention_case c = { dtype, 1, 50, 90, 2, 1, 32, sight != DEFAULT, sight, ALIGNED, 1,
                1 };
            compare_attention(c, 3);
            c.sight = DEFAULT, c.causal = 0;
            arrays whole = attention_arrays(c), parts = whole;
            CHECK(run_attention(dt_kernels_cuda(), c, 0, whole) == DT_OK);
            dt_attention_args a;
            for (int half = 0; half < 2; half++) {
                memset(&a, 0, sizeof a);
                size_t skip = (size_t)(half ? 50 * c.kv_heads * c.dim : 0) * dt_dtype_size(dtype);
                a.dtype = dtype;
                a.out = parts[OUT].data(), a.lse = parts[LSE].data(), a.q = parts[Q].data();
                a.k = (char *)parts[K].data() + skip, a.v = (char *)parts[V].data() + skip;
                a.batch = 1, a.tq = c.tq, a.tk = half ? 40 : 50, a.heads = 2, a.kv_heads = 1,
                a.dim = c.dim;
                a.scale = 1 / sqrt((double)c.dim), a.merge_lse = half, a.wide = 1;
                a.work = parts[WORK].data(), a.work_bytes = parts[WORK].bytes();
                CHECK(dt_kernels_cuda()->attention(&a, NULL) == DT_OK);
            }
            CHECK(wait_for(dt_kernels_cuda(), NULL) == DT_OK);
            parts[OUT].grain = dtype == DT_F32 ? 0 : step_of(dtype, 1);
            CHECK(agrees("halves", OUT, parts[OUT], whole[OUT]) &&
                  agrees("halves", LSE, parts[LSE], whole[LSE]));
        }
}

// The scratch has room for the deltas of only three of eight heads, and then for none.
static void test_small_scratch() {
    attention_case c = { DT_F32, 2, 33, 33, 4, 4, 16, 1, DEFAULT, ALIGNED, 0, 0 };
    for (int64_t kv_heads : { 4, 2 })
        for (size_t heads : { 1, 2, 3, 4, 7, 0 }) {
            c.kv_heads = kv_heads;
            arrays start = attention_arrays(c), got = start;
            CHECK(run_attention(dt_kernels_cpu(), c, 0, start) == DT_OK);
            arrays want = start;
            CHECK(run_attention_back(dt_kernels_cpu(), c, 0, want) == DT_OK);
            arrays small = start;
            small[WORK].count = heads * 33;
            dt_status status = run_attention_back(dt_kernels_cuda(), c, 0, small);
            CHECK(wait_for(dt_kernels_cuda(), NULL) == DT_OK);
            CHECK(status == (heads * (size_t)kv_heads < 4 ? DT_ERR_ARG : DT_OK));
            for (size_t i = DQ; i <= DV && status == DT_OK; i++)
                CHECK(agrees("small scratch", i, small[i], want[i]));
        }
}

static void test_attention_refusals() {
    attention_case c = { DT_F32, 1, 5, 5, 3, 2, 8, 1, DEFAULT, ALIGNED, 0, 0 };
    compare_attention(c, 1); // kv_heads does not divide heads
    c.heads = 2;
    arrays x = attention_arrays(c);
    const dt_kernels *t = dt_kernels_cuda();
    c.dim = 257;
    CHECK(run_attention(t, c, 0, x) == DT_ERR_UNSUPPORTED &&
          run_attention_back(t, c, 0, x) == DT_ERR_UNSUPPORTED);
    c.dim = 8, c.dtype = DT_F64;
    CHECK(run_attention(t, c, 0, x) == DT_ERR_UNSUPPORTED &&
          run_attention_back(t, c, 0, x) == DT_ERR_UNSUPPORTED);
    c.dtype = DT_F32, c.kv_heads = 0;
    CHECK(run_attention(t, c, 0, x) == DT_ERR_ARG && run_attention_back(t, c, 0, x) == DT_ERR_ARG);
    c.kv_heads = 2, c.batch = 0;
    CHECK(run_attention(t, c, 0, x) == DT_OK && run_attention_back(t, c, 0, x) == DT_OK);
    c.batch = 1, c.sight = ZIGZAG, x[WORK].count = 1; // no room for spans
    CHECK(run_attention(t, c, 0, x) == DT_ERR_ARG && run_attention_back(t, c, 0, x) == DT_ERR_ARG);
    dt_matmul_args m;
    memset(&m, 0, sizeof m);
    m.dtype = DT_F64;
    CHECK(t->matmul(&m, NULL) == DT_ERR_UNSUPPORTED);
    m.dtype = DT_F32;
    CHECK(t->matmul(&m, NULL) == DT_OK);
    m.n = -1;
    CHECK(t->matmul(&m, NULL) == DT_ERR_ARG);
    m.n = 1, m.activation_backward = 1;
    CHECK(t->matmul(&m, NULL) == DT_ERR_ARG);
    check_no_mistake("refusals");
}

// ==== 3. mma ====================================================================================

// not on a GPU: mma_plain is for older GPUs and is inside dt_kernels.o
#if !defined(CUDA_ON_GPU) && !defined(DTC_QUEUED)
struct fragments {
    float d[2][32][4];
    unsigned a[32][4], b[32][2];
};

template <class T> __global__ void mma_both(fragments *f, T) {
    int lane = threadIdx.x;
    mma(T(), f->d[0][lane], f->a[lane], f->b[lane]);
    mma_plain(T(), f->d[1][lane], f->a[lane], f->b[lane]);
}

// Compares the replacement for mma on older GPUs with the emulated instruction.
template <class T> static void test_mma() {
    fragments f;
    for (unsigned *p = f.a[0]; p < f.b[0] + 64; p++)
        *p = pack_pair<T>((float)random_number(), (float)random_number());
    for (int i = 0; i < 128; i++)
        f.d[0][i / 4][i % 4] = f.d[1][i / 4][i % 4] = (float)random_number();
    DT_LAUNCH(mma_both<T>, 1, 32, 0, NULL, &f, T());
    check_no_mistake("mma");
    for (int i = 0; i < 128; i++) CHECK(fabs(f.d[0][i / 4][i % 4] - f.d[1][i / 4][i % 4]) < 1e-5);
}
#endif

static void test_products_and_attention() {
    test_product_shapes();
    test_quantised_products();
    if (CUDA_ORDERS > 1) test_product_fusions();
    test_attention_lengths();
    test_attention_fields();
    test_attention_window();
    test_merge();
    test_small_scratch();
    test_attention_refusals();
#if !defined(CUDA_ON_GPU) && !defined(DTC_QUEUED)
    only_bf16 =
        true; // without wgmma: the kernels that use it are empty, and say so by how few threads they take
    dtc_this_machine.threads = 32;
    test_attention_lengths();
    test_attention_fields();
    test_attention_window();
    test_mma<bf16>();
    test_mma<f16>();
#endif
}

#endif
