// kernel_cases.h - compares the other kernels of dt_kernels.cu with the CPU's of the same names
//
// cuda_cases.h says what is compared. Products and attention are in attention_cases.h.

#ifndef KERNEL_CASES_H
#define KERNEL_CASES_H

#include "tests/cuda/cuda_cases.h"

// ==== 1. Shapes =================================================================================

// Odd lengths, and more than one block of packs.
static const size_t COUNTS[] = { 0, 1, 3, 4, 17, 127, 1000, 2051 };
static const struct {
    size_t rows, cols;
} SHAPES[] = { { 0, 5 }, { 1, 1 }, { 1, 1000 }, { 3, 17 }, { 17, 3 }, { 31, 4 }, { 127, 1 },
    { 33, 257 }, { 5, 1028 }, { 100, 31 }, { 70, 48 } };

// Rows that fit into the registers of a warp, of a block, and longer ones.
static const struct {
    size_t rows, cols;
} LONG[] = { { 9, 768 }, { 11, 400 }, { 5, 1000 }, { 4, 1536 }, { 3, 2600 }, { 2, 9000 } };

// The type of most arrays; main runs all tests with each of three types.
static dt_dtype TYPE = DT_F32;

static array &put(arrays &all, int placement, size_t count, double floor) {
    return push(all, placement, count, floor, TYPE);
}

static void set(const array &a, size_t k, double x) { dt__set_number(a.dtype, a.data(), k, x); }

// Number of lane orders for kernels whose threads never interact: three for f32, one for the other
// types, because the type makes no difference there.
#define FLAT (TYPE == DT_F32 ? (size_t)3 : (size_t)1)

// One lane order for f16, which has the code paths of bf16.
static void check(
    const std::string &what, const arrays &start, const runner &run, size_t orders = 3) {
    if (TYPE == DT_F16) orders = 1;
    compare(std::string(dt_dtype_name(TYPE)) + " " + what, start, run, orders);
}

// ==== 2. Flat kernels ===========================================================================

static void test_fill() {
    for (dt_dtype dtype : { DT_F32, DT_F64, DT_I32, DT_BF16, DT_F16, DT_U8, DT_I64 })
        for (size_t count : COUNTS)
            for (double value : { 0.0, -3.7, 1e9 }) {
                arrays a;
                push(a, ODD, count, EXACT, dtype);
                compare(dtc_text("fill %s x %zu", dt_dtype_name(dtype), count), a,
                    [=](const dt_kernels *t, arrays &x) {
                        dt_fill_args args = { dtype, x[0].data(), count, value };
                        return t->fill(&args, NULL);
                    });
            }
}

static void compare_copy(
    int placement, size_t rows, size_t row_bytes, size_t out_gap, size_t in_gap) {
    arrays a;
    size_t out_stride = row_bytes + out_gap, in_stride = row_bytes + in_gap;
    push(a, placement, rows * out_stride / 4 + 1, EXACT, DT_I32);
    push(a, placement, rows * in_stride / 4 + 1, EXACT, DT_I32);
    compare(dtc_text("copy %zu x %zu bytes, gaps %zu and %zu", rows, row_bytes, out_gap, in_gap), a,
        [=](const dt_kernels *t, arrays &x) {
            dt_copy_args args = { x[0].data(), x[1].data(), rows, row_bytes, out_stride,
                in_stride };
            return t->copy(&args, NULL);
        });
}

static void test_copy() {
    for (int placement : { ALIGNED, ODD, FIRST_ODD })
        for (size_t row_bytes : { 0, 1, 3, 4, 12, 16, 48, 1001 })
            for (size_t rows : { 0, 1, 3, 17 }) {
                compare_copy(placement, rows, row_bytes, 0, 0);
                compare_copy(placement, rows, row_bytes, 16, 4);
                compare_copy(placement, rows, row_bytes, 1, 32);
                compare_copy(placement, rows, row_bytes, 2, 6);
            }
    arrays a; // one source row copied to many rows
    push(a, ALIGNED, 5 * 8, EXACT);
    push(a, ALIGNED, 8, EXACT);
    compare("copy with stride 0", a, [](const dt_kernels *t, arrays &x) {
        dt_copy_args args = { x[0].data(), x[1].data(), 5, 32, 32, 0 };
        return t->copy(&args, NULL);
    });
}

// alias: the input that is also the output, or -1
static void compare_reduce(
    dt_dtype dtype, dt_op op, size_t count, int n, int alias, int placement) {
    arrays a;
    push(a, placement, count * (size_t)n, EXACT,
        dtype); // all inputs in one array, which also varies their alignment
    push(a, placement, count, EXACT, dtype);
    compare(dtc_text("reduce %s, op %d, %d x %zu, out is %d", dt_dtype_name(dtype), (int)op, n,
                count, alias),
        a, [=](const dt_kernels *t, arrays &x) {
            std::vector<const void *> in((size_t)n + 1);
            size_t each = count * dt_dtype_size(dtype);
            for (int r = 0; r < n; r++) in[(size_t)r] = (char *)x[0].data() + (size_t)r * each;
            void *out = alias < 0 ? x[1].data() : (char *)x[0].data() + (size_t)alias * each;
            void *also[1] = { (char *)x[0].data() +
                              (size_t)(n > 1 ? n - 1 : 0) * each }; // the last input
            dt_reduce_args args = { dtype, out, in.data(), n, count, op, also, n > 1, 0 };
            return t->reduce(&args, NULL);
        });
}

static void test_reduce() {
    for (dt_op op : { DT_SUM, DT_AVG, DT_MAX, DT_MIN, DT_PROD }) {
        for (size_t count : COUNTS)
            for (int placement = 0; placement < PLACEMENTS; placement++) {
                compare_reduce(DT_F32, op, count, 3, -1, placement);
                compare_reduce(DT_F32, op, count, 2, placement % 2, placement);
            }
        for (int n : { 1, 5, 128, 129, 255, 256, 400 })
            compare_reduce(DT_F32, op, 17, n, n > 60 ? 60 : -1, ALIGNED);
        for (dt_dtype dtype : { DT_F64, DT_I32, DT_U8, DT_I64 })
            compare_reduce(dtype, op, 127, 4, 3, HALF);
        for (dt_dtype dtype : { DT_I32, DT_U8, DT_I64 }) compare_reduce(dtype, op, 3, 300, -1, ODD);
        for (dt_dtype dtype : { DT_BF16, DT_F16 })
            for (int placement = 0; placement < PLACEMENTS; placement++) {
                compare_reduce(dtype, op, 1000, 7, placement % 3 - 1, placement);
                compare_reduce(dtype, op, 17, 128, -1, placement);
            }
    }
    compare_reduce(DT_F32, DT_SUM, 3, 0, -1, ALIGNED);

    // Refused by this table only: a late input that the first launch would overwrite.
    std::vector<float> x(200);
    const void *in[200];
    for (int r = 0; r < 200; r++) in[r] = &x[(size_t)r];
    dt_reduce_args args = { DT_F32, &x[150], in, 200, 1, DT_SUM, NULL, 0, 0 };
    CHECK(dt_kernels_cuda()->reduce(&args, NULL) == DT_ERR_UNSUPPORTED);
    args.dtype = DT_BF16; // also refused: 16-bit sums that would be rounded between two launches
    args.out = &x[0];
    CHECK(dt_kernels_cuda()->reduce(&args, NULL) == DT_ERR_UNSUPPORTED);
}

// A strided tensor: extents and strides in elements; stride 0 repeats.
struct view {
    dt_shape shape;
    int64_t a[DT_MAX_DIMS], b[DT_MAX_DIMS];
};

static size_t reach(
    const dt_shape &shape, const int64_t *stride) { // number of elements that a view spans
    size_t last = 0;
    for (int i = 0; i < shape.nd; i++) {
        if (shape.d[i] == 0) return 0;
        last += (size_t)((shape.d[i] - 1) * stride[i]);
    }
    return last + 1;
}

// Equal shapes, a bias over rows and over columns, a scalar, repeated middle dimensions, zero
// dimensions, six dimensions.
static const view VIEWS[] = {
    { { 0, { 0 } }, { 0 }, { 0 } },
    { { 1, { 1003 } }, { 1 }, { 1 } },
    { { 2, { 0, 4 } }, { 4, 1 }, { 4, 1 } },
    { { 2, { 33, 20 } }, { 20, 1 }, { 0, 1 } },
    { { 2, { 33, 20 } }, { 20, 1 }, { 1, 0 } },
    { { 2, { 17, 21 } }, { 0, 1 }, { 21, 1 } },
    { { 2, { 5, 1028 } }, { 1028, 1 }, { 0, 0 } },
    { { 3, { 3, 7, 8 } }, { 56, 8, 1 }, { 8, 0, 1 } },
    { { 3, { 3, 1, 9 } }, { 9, 9, 1 }, { 9, 0, 1 } },
    { { 3, { 4, 6, 8 } }, { 8, 32, 1 }, { 1, 32, 4 } }, // transposed
    { { 3, { 2, 5, 4 } }, { 21, 4, 1 }, { 20, 4, 1 } }, // packs of a are not aligned to 16 bytes
    { { 2, { 7, 3 } }, { 4, 1 },
        { 0, 1 } }, // rows of three with a gap: a pack would reach into the next row
    { { 6, { 2, 3, 1, 2, 3, 4 } }, { 72, 24, 24, 12, 4, 1 }, { 0, 4, 4, 0, 0, 1 } },
    { { 2, { 33, 24 } }, { 24, 1 }, { 0, 1 } },                          // in packs of eight
    { { 4, { 2, 9, 3, 16 } }, { 432, 16, 144, 1 }, { 432, 48, 16, 1 } }, // heads before tokens
    { { 2, { 40, 70 } }, { 70, 1 }, { 1, 40 } }, // transposed: several tiles, partial at both ends
    { { 3, { 3, 33, 9 } }, { 297, 9, 1 }, { 297, 1, 33 } },
    { { 3, { 32, 3, 64 } }, { 3, 1, 96 }, { 192, 64, 1 } },
};

static void test_binary() {
    for (const view &v : VIEWS)
        for (int code = 0; code < DT_BINARY_OPS * 2 * PLACEMENTS; code++) {
            int op = code % DT_BINARY_OPS, accumulate = code / DT_BINARY_OPS % 2,
                placement = code / DT_BINARY_OPS / 2;
            arrays a;
            put(a, placement, (size_t)dt_count(v.shape), EXACT);
            put(a, placement, reach(v.shape, v.a), EXACT);
            array &b = put(a, placement, reach(v.shape, v.b), EXACT);
            for (size_t k = 0; k < b.count && k < a[1].count && op > DT_DIV; k += 3)
                set(b, k, k % 2 ? NAN : a[1].at(k)); // ties and NaNs
            int fused = op % 2;
            put(a, placement, (size_t)dt_count(v.shape), EXACT);
            check(
                dtc_text(
                    "binary %d of view %ld, accumulate %d", op, (long)(&v - VIEWS), accumulate),
                a,
                [=](const dt_kernels *t, arrays &x) {
                    dt_binary_args args = { TYPE, op, x[0].data(), x[1].data(), x[2].data(),
                        v.shape, { 0 }, { 0 }, accumulate, fused ? x[3].data() : NULL, fused };
                    memcpy(args.stride_a, v.a, sizeof v.a);
                    memcpy(args.stride_b, v.b, sizeof v.b);
                    return t->binary(&args, NULL);
                },
                FLAT);
        }
    arrays a; // in place; and an invalid operation
    put(a, ALIGNED, 33 * 24, EXACT);
    put(a, ALIGNED, 24, EXACT);
    for (int op : { (int)DT_MUL, (int)DT_BINARY_OPS, -1 })
        check(dtc_text("binary %d in place", op), a, [=](const dt_kernels *t, arrays &x) {
            dt_binary_args args = { TYPE, op, x[0].data(), x[0].data(), x[1].data(),
                { 2, { 33, 24 } }, { 24, 1 }, { 0, 1 }, 0, NULL, 0 };
            return t->binary(&args, NULL);
        });
}

// The mask has the strides of the view's a, a those of b, and b is dense; or all are rotated.
static void test_where() {
    for (const view &v : VIEWS)
        for (int code = 0; code < 3 * 4 * PLACEMENTS; code++) {
            int rotation = code % 3, absent = code / 3 % 4, placement = code / 12;
            int64_t dense[DT_MAX_DIMS], step = 1;
            for (int d = v.shape.nd - 1; d >= 0; step *= v.shape.d[d--]) dense[d] = step;
            const int64_t *strides[3] = { v.a, v.b, dense };
            arrays a;
            put(a, placement, (size_t)dt_count(v.shape), EXACT);
            for (int k = 0; k < 3; k++)
                put(a, placement, reach(v.shape, strides[(k + rotation) % 3]), EXACT);
            for (size_t k = 0; k < a[1].count; k++)
                if (k % 3) set(a[1], k, k % 3 == 1 ? 0.0 : -0.0); // a third is chosen from a
            check(
                dtc_text("where of view %ld, code %d", (long)(&v - VIEWS), code), a,
                [=](const dt_kernels *t, arrays &x) {
                    dt_where_args args = { TYPE, x[0].data(), x[1].data(),
                        absent & 1 ? NULL : x[2].data(), absent & 2 ? NULL : x[3].data(), v.shape,
                        { 0 }, { 0 }, { 0 }, absent == 3 };
                    const int64_t *const stride[3] = { v.a, v.b, dense };
                    memcpy(args.stride_mask, stride[rotation], sizeof v.a);
                    memcpy(args.stride_a, stride[(1 + rotation) % 3], sizeof v.a);
                    memcpy(args.stride_b, stride[(2 + rotation) % 3], sizeof v.a);
                    return t->where(&args, NULL);
                },
                FLAT);
        }
}

// The result is in the view's a, which never repeats; the input is in b.
static void test_permute() {
    for (const view &v : VIEWS)
        for (dt_dtype dtype : { DT_F32, DT_F64, DT_I32, DT_BF16, DT_F16, DT_U8, DT_I64 })
            for (int code = 0; code < 4; code++) {
                int accumulate = code % 2, placement = code / 2 ? ALIGNED : ODD;
                bool repeats = false;
                arrays a;
                for (int i = 0; i < v.shape.nd; i++) repeats |= v.a[i] == 0;
                if (repeats) continue;
                array &out = push(a, placement, reach(v.shape, v.a), EXACT, dtype);
                array &in = push(a, placement, reach(v.shape, v.b), EXACT, dtype);
                for (size_t k = 0; k < out.count && dtype == DT_I32; k++)
                    out.i()[k] /= 2; // so that sums do not overflow
                for (size_t k = 0; k < in.count && dtype == DT_I32; k++) in.i()[k] /= 2;
                compare(dtc_text("permute %s of view %ld, code %d", dt_dtype_name(dtype),
                            (long)(&v - VIEWS), code),
                    a, [=](const dt_kernels *t, arrays &x) {
                        dt_permute_args args = { dtype, x[0].data(), x[1].data(), v.shape, { 0 },
                            { 0 }, accumulate };
                        memcpy(args.out_stride, v.a, sizeof v.a);
                        memcpy(args.in_stride, v.b, sizeof v.b);
                        return t->permute(&args, NULL);
                    });
            }
}

// Every bit pattern of the 16-bit types; for the other types values that round: half units in the
// last place, the range limits, NaNs.
static void fill_for_cast(array &a) {
    const double odd[] = { 0.0, -0.0, INFINITY, -INFINITY, NAN, 65504, 65519.99, 65520, 6e-8,
        2.9e-8, 3e-8, 6.1e-5, 1e-40, 3.4e38, 3.41e38, 1e300, -2147483649.0, 2147483648.0, 1.5, -1.5,
        1e10, 255.5, 256, 9.3e18, -9.3e18, 9223372036854775808.0 };
    for (size_t k = 0; k < a.count; k++) {
        uint32_t words[4];
        dt__philox(5, k, words);
        if (dt_dtype_size(a.dtype) == 2)
            ((uint16_t *)a.data())[k] = (uint16_t)k;
        else if (a.dtype == DT_F32 && k % 3 == 0)
            memcpy(a.f() + k, words, 4);
        else if (k % 3 == 1)
            dt__set_number(
                a.dtype, a.data(), k, dt__bf16_to_f32((uint16_t)words[0]) * (1 + 1.0 / 256));
        else if (k < 3 * 26)
            dt__set_number(a.dtype, a.data(), k, odd[k / 3]);
        else
            dt__set_number(a.dtype, a.data(), k, random_number() * pow(2, (double)(k % 40) - 25));
    }
}

static void test_cast() {
    const dt_dtype types[] = { DT_F32, DT_F64, DT_I32, DT_BF16, DT_F16, DT_U8, DT_I64 };
    for (dt_dtype to : types)
        for (dt_dtype from : types)
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                arrays a;
                size_t count = dt_dtype_size(from) == 2 ? 65536 + 3 : 3001;
                push(a, accumulate ? ODD : ALIGNED, count, EXACT, to);
                fill_for_cast(push(a, accumulate ? ODD : ALIGNED, count, EXACT, from));
                compare(
                    dtc_text("cast %s to %s, accumulate %d", dt_dtype_name(from), dt_dtype_name(to),
                        accumulate),
                    a,
                    [=](const dt_kernels *t, arrays &x) {
                        dt_cast_args args = { to, from, x[0].data(), x[1].data(), count,
                            accumulate };
                        return t->cast(&args, NULL);
                    },
                    1);
            }
    for (int wrong = 0; wrong < 2; wrong++) {
        dt_cast_args args = { wrong ? (dt_dtype)7 : DT_F32, wrong ? DT_F32 : (dt_dtype)7, NULL,
            NULL, 0, 0 };
        CHECK(dt_kernels_cuda()->cast(&args, NULL) == DT_ERR_UNSUPPORTED);
        CHECK(dt_kernels_cpu()->cast(&args, NULL) == DT_ERR_UNSUPPORTED);
    }
}

// Blocks have equal bytes: zeros, ties between two codes, extreme scales, NaNs and infinities.
static void test_quantize() {
    for (dt_quant quant : { DT_QUANT_BF16, DT_QUANT_INT8, DT_QUANT_NF4 })
        for (int placement : { ALIGNED, FIRST_ODD }) {
            arrays a;
            size_t count = 64 * 43;
            push(a, ALIGNED, dt_quant_bytes(quant, (int64_t)count), EXACT, DT_U8);
            array &in = push(a, placement, count, EXACT, DT_F32);
            for (size_t k = 0; k < count; k++) {
                size_t block = k / 64;
                float x = (float)random_number();
                if (block == 0) x = 0;
                if (block == 1)
                    x = k == 64 ? 1 : (dt__nf4_values[k % 15] + dt__nf4_values[k % 15 + 1]) * 0.5f;
                if (block > 1 && block < 12) x *= powf(10, 8 * (float)block - 50);
                if (block == 12 && k % 7 == 0) x = NAN;
                if (block == 13 && k % 7 == 0) x = k % 2 ? INFINITY : -INFINITY;
                in.f()[k] = x;
            }
            compare(dtc_text("quantize %s", dt_quant_name(quant)), a,
                [=](const dt_kernels *t, arrays &x) {
                    dt_quantize_args args = { (int)quant, x[0].data(), x[1].f(), count };
                    return t->quantize(&args, NULL);
                });
        }
    dt_quantize_args args = { DT_QUANT_NF4, NULL, NULL, 65 };
    CHECK(dt_kernels_cuda()->quantize(&args, NULL) == DT_ERR_ARG);
    CHECK(dt_kernels_cpu()->quantize(&args, NULL) == DT_ERR_ARG);
}

static const float ODD_NUMBERS[] = { 0.0f, -0.0f, 40.0f, -40.0f, 1e20f, -1e20f, INFINITY, -INFINITY,
    NAN };

static void compare_unary(int kind, size_t count, int placement) {
    arrays a;
    double scale = kind == DT_ACT_CLAMP ? -2.5 : 1.5, shift = kind == DT_ACT_CLAMP ? 1.75 : -0.25;
    put(a, placement, count, 0.01);
    array &in = put(a, placement, count, EXACT);
    put(a, placement, count, EXACT);
    for (size_t k = 0; k < count; k++) set(in, k, 3 * in.at(k)); // both tails
    for (size_t k = 0; k < 9 && count > 110; k++) set(in, k * 13, ODD_NUMBERS[k]);
    check(
        dtc_text("unary %d x %zu", kind, count), a,
        [=](const dt_kernels *t, arrays &x) {
            dt_unary_args args = { TYPE, kind, x[0].data(), x[1].data(), count, scale, shift };
            return t->unary(&args, NULL);
        },
        FLAT);
    a[0].floor = 2;                              // the slope may cross zero, and 1 - tanh^2 cancels
    a[0].grain = kind == DT_ACT_TANH ? 1e-9 : 0; // allows more elements to differ
    for (int accumulate = 0; accumulate < 2; accumulate++)
        check(
            dtc_text("unary_back %d x %zu, accumulate %d", kind, count, accumulate), a,
            [=](const dt_kernels *t, arrays &x) {
                bool needless = kind == DT_ACT_NONE || kind == DT_ACT_AFFINE;
                dt_unary_back_args args = { TYPE, kind, x[0].data(), x[2].data(),
                    needless ? NULL : x[1].data(), count, scale, shift, accumulate };
                return t->unary_back(&args, NULL);
            },
            FLAT);
}

static void test_unary() {
    for (int kind = -1; kind <= DT_ACTS; kind++) // -1 and DT_ACTS are invalid kinds
        for (size_t count : COUNTS)
            for (int placement = 0; placement < PLACEMENTS; placement++)
                if (kind == DT_ACT_GELU || count == 127 || placement == 0)
                    compare_unary(kind, count, placement);
}

static void compare_glu(int kind, size_t rows, size_t cols, int placement) {
    arrays a;
    put(a, placement, rows * cols, 1);
    put(a, placement, rows * 2 * cols, EXACT);
    put(a, placement, rows * cols, EXACT);
    put(a, placement, rows * 2 * cols, 4);
    for (size_t k = 0; k < a[1].count && kind == DT_ACT_LN; k++)
        set(a[1], k, fabs(a[1].at(k)) + 0.1);
    check(
        dtc_text("glu %d, %zu x %zu", kind, rows, cols), a,
        [=](const dt_kernels *t, arrays &x) {
            dt_glu_args args = { TYPE, kind, x[0].data(), x[1].data(), rows, cols };
            return t->glu(&args, NULL);
        },
        FLAT);
    for (int accumulate = 0; accumulate < 2; accumulate++)
        check(
            dtc_text("glu_back %d, %zu x %zu, accumulate %d", kind, rows, cols, accumulate), a,
            [=](const dt_kernels *t, arrays &x) {
                dt_glu_back_args args = { TYPE, kind, x[3].data(), x[2].data(), x[1].data(), rows,
                    cols, accumulate };
                return t->glu_back(&args, NULL);
            },
            FLAT);
}

static void test_glu() {
    for (int kind = -1; kind <= DT_ACTS; kind++)
        for (auto shape : SHAPES)
            for (int placement : { ALIGNED, ODD })
                compare_glu(kind, shape.rows, shape.cols, placement);
}

// The dropped elements must be exactly the CPU's: for full rows, and for columns that begin inside
// a group of four.
static void test_dropout() {
    for (auto shape : SHAPES)
        for (int64_t first : { 0, 1, 6, 1000 })
            for (int code = 0; code < 4; code++) {
                size_t rows = shape.rows, cols = shape.cols;
                arrays a;
                put(a, code % 2 ? ODD : ALIGNED, rows * cols, EXACT);
                put(a, code % 2 ? ODD : ALIGNED, rows * cols, EXACT);
                push(a, ODD, rows, EXACT, DT_I32);
                double p = code == 2 ? 0 : 0.3;
                check(
                    dtc_text("dropout %zu x %zu from %ld, code %d", rows, cols, (long)first, code),
                    a,
                    [=](const dt_kernels *t, arrays &x) {
                        dt_dropout_args args = { TYPE, x[0].data(), x[1].data(),
                            code == 1 ? NULL : x[2].i(), rows, cols, first, p, 0x123456789abcdefu,
                            code == 3 };
                        return t->dropout(&args, NULL);
                    },
                    FLAT);
            }
}

// ==== 3. Rows and columns =======================================================================

// room: floats of scratch
static void compare_sum(size_t outer, size_t n, size_t inner, double scale, int accumulate,
    int wide, size_t room, int placement) {
    arrays a;
    push(a, placement, outer * inner, 1 + (double)n, wide ? DT_F32 : TYPE);
    put(a, placement, outer * n * inner, EXACT);
    push(a, placement, room, SCRATCH);
    check(dtc_text("sum %zu x %zu x %zu, accumulate %d, scale %g, wide %d, room %zu", outer, n,
              inner, accumulate, scale, wide, room),
        a, [=](const dt_kernels *t, arrays &x) {
            dt_sum_args args = { TYPE, x[0].data(), x[1].data(), outer, n, inner, scale, accumulate,
                wide, room ? x[2].data() : NULL, room * sizeof(float) };
            return t->sum(&args, NULL);
        });
}

static void test_sum() {
    for (auto shape : SHAPES)
        for (size_t outer : { 0, 1, 3 })
            // bits: accumulate and scale; also over the last dimension
            for (int code = 0; code < 4; code++)
                compare_sum(outer, shape.rows, code == 3 ? 1 : shape.cols, code == 0 ? 1 : -0.3,
                    code % 2, code == 2, 0, code % 2 ? ODD : ALIGNED);
    for (int wide = 0; wide < 2; wide++)
        // none, too little for one part, for two parts, for all
        for (size_t room : { 0, 39, 100, 5000 }) {
            compare_sum(1, 700, 40, 0.5, wide, wide, room, ALIGNED);
            compare_sum(1, 700, 39, 0.5, 1 - wide, wide, room, ODD);
            compare_sum(2, 400, 10, 1, 0, wide, room, ALIGNED);
            compare_sum(2, 9001, 1, -1, wide, wide, room, ODD);
        }
    compare_sum(1, 3001, 1, 0.5, 0, 1, 0, ODD);
}

static void test_cumsum() {
    for (auto shape : SHAPES)
        for (size_t inner : { 1, 5 })
            for (int code = 0; code < 4; code++) {
                size_t outer = shape.rows, n = shape.cols;
                arrays a;
                put(a, code % 2 ? ODD : ALIGNED, outer * n * inner, EXACT);
                put(a, code % 2 ? ODD : ALIGNED, outer * n * inner, EXACT);
                check(
                    dtc_text("cumsum %zu x %zu x %zu, code %d", outer, n, inner, code), a,
                    [=](const dt_kernels *t, arrays &x) {
                        dt_cumsum_args args = { TYPE, x[0].data(), x[1].data(), outer, n, inner,
                            code % 2, code / 2 };
                        return t->cumsum(&args, NULL);
                    },
                    FLAT);
            }
}

// The channels fill packs, or do not.
static void test_patches() {
    static const dt_window windows[] = {
        { 2, { 5, 7 }, { 5, 7 }, 1, { 3, 3 }, { 1, 1 }, { 1, 1 }, { 1, 1 } },
        { 3, { 6, 9 }, { 3, 3 }, 8, { 2, 3 }, { 2, 4 }, { 0, 1 }, { 1, 1 } },
        { 1, { 8, 5 }, { 2, 4 }, 24, { 3, 2 }, { 3, 1 }, { 1, 0 }, { 2, 1 } },
        { 2, { 1, 11 }, { 1, 4 }, 3, { 1, 4 }, { 1, 2 }, { 0, 2 }, { 1, 3 } },
        { 0, { 4, 4 }, { 4, 4 }, 8, { 1, 1 }, { 1, 1 }, { 0, 0 }, { 1, 1 } },
    };
    for (const dt_window &w : windows)
        for (int code = 0; code < 4; code++) {
            size_t pixels = (size_t)(w.batch * w.in[0] * w.in[1] * w.channels);
            size_t count =
                (size_t)(w.batch * w.out[0] * w.out[1] * w.kernel[0] * w.kernel[1] * w.channels);
            arrays a;
            put(a, code % 2 ? ODD : ALIGNED, pixels, EXACT);
            put(a, code % 2 ? ODD : ALIGNED, count, EXACT);
            check(
                dtc_text("patches %ld, code %d", (long)(&w - windows), code), a,
                [=](const dt_kernels *t, arrays &x) {
                    dt_patches_args args = { TYPE, x[1].data(), x[0].data(), w,
                        code / 2 ? -INFINITY : 0.25, DT_POOL_NONE, NULL };
                    return t->patches(&args, NULL);
                },
                FLAT);
            check(
                dtc_text("patches_back %ld, code %d", (long)(&w - windows), code), a,
                [=](const dt_kernels *t, arrays &x) {
                    dt_patches_back_args args = { TYPE, x[0].data(), x[1].data(), w, code / 2,
                        DT_POOL_NONE, NULL };
                    return t->patches_back(&args, NULL);
                },
                FLAT);
        }
}

// Equal elements and NaNs; both pools, forward and backward.
static void test_pool() {
    static const dt_window windows[] = {
        { 2, { 5, 7 }, { 5, 7 }, 1, { 3, 3 }, { 1, 1 }, { 1, 1 }, { 1, 1 } },
        { 3, { 6, 9 }, { 3, 3 }, 8, { 2, 3 }, { 2, 4 }, { 0, 1 }, { 1, 1 } },
        { 1, { 8, 6 }, { 4, 3 }, 24, { 2, 2 }, { 2, 2 }, { 0, 0 }, { 1, 1 } },
    };
    for (const dt_window &w : windows)
        for (int code = 0; code < 8; code++) {
            int pool = code / 2 % 2 ? DT_POOL_MAX : DT_POOL_MEAN;
            size_t pixels = (size_t)(w.batch * w.in[0] * w.in[1] * w.channels),
                   count = (size_t)(w.batch * w.out[0] * w.out[1] * w.channels);
            arrays a;
            array &in = put(a, code % 2 ? ODD : ALIGNED, pixels, EXACT);
            for (size_t k = 0; k < pixels; k++) set(in, k, k % 41 ? floor(in.at(k) * 4) : NAN);
            put(a, code % 2 ? ODD : ALIGNED, count, EXACT);
            push(a, ODD, count, EXACT, DT_I32);
            put(a, code % 2 ? ODD : ALIGNED, count, EXACT);
            put(a, code % 2 ? ODD : ALIGNED, pixels, EXACT);
            check(
                dtc_text("pool %ld, code %d", (long)(&w - windows), code), a,
                [=](const dt_kernels *t, arrays &x) {
                    int32_t *index = pool == DT_POOL_MAX ? x[2].i() : NULL;
                    dt_patches_args args = { TYPE, x[1].data(), x[0].data(), w,
                        pool == DT_POOL_MAX ? -INFINITY : 0, pool, index };
                    dt_patches_back_args back = { TYPE, x[4].data(), x[3].data(), w, code / 4, pool,
                        index };
                    dt_status status = t->patches(&args, NULL);
                    return status == DT_OK ? t->patches_back(&back, NULL) : status;
                },
                FLAT);
        }
}

// Few different values, so that ties occur; NaNs first, later, and two in a row.
static void test_max_and_topk() {
    for (auto shape : SHAPES)
        for (size_t inner : { 1, 5 }) {
            size_t rows = shape.rows, n = shape.cols;
            arrays a;
            put(a, ODD, rows * inner, EXACT);
            push(a, ODD, rows * inner, EXACT, DT_I32);
            array &in = put(a, ODD, rows * n * inner, EXACT);
            for (size_t k = 0; k < in.count; k++) set(in, k, floor(in.at(k) * 4));
            if (rows > 4 && n > 2) {
                set(in, 0, NAN);
                set(in, 2 * n * inner + inner, NAN);
                set(in, 2 * n * inner + 2 * inner, NAN);
            }
            check(
                dtc_text("max %zu x %zu x %zu", rows, n, inner), a,
                [=](const dt_kernels *t, arrays &x) {
                    dt_max_args args = { TYPE, x[0].data(), x[1].i(), x[2].data(), rows, n, inner };
                    return t->max(&args, NULL);
                },
                FLAT);
            if (inner > 1) continue;
            for (size_t k : { (size_t)0, (size_t)1, (size_t)2, n / 2, n, n + 1 }) {
                arrays b;
                put(b, ODD, rows * k, EXACT);
                push(b, ODD, rows * k, EXACT, DT_I32);
                b.emplace_back(a[2]);
                if (rows * n == 0 && k > n) continue;
                check(
                    dtc_text("topk %zu of %zu x %zu", k, rows, n), b,
                    [=](const dt_kernels *t, arrays &x) {
                        dt_topk_args args = { TYPE, x[0].data(), x[1].i(), x[2].data(), rows, n,
                            k };
                        return t->topk(&args, NULL);
                    },
                    FLAT);
            }
        }
    dt_max_args none = { TYPE, NULL, NULL, NULL, 1, 0, 1 };
    CHECK(dt_kernels_cuda()->max(&none, NULL) == DT_ERR_ARG &&
          dt_kernels_cpu()->max(&none, NULL) == DT_ERR_ARG);
}

// places may repeat; then values are added in their order. bad: an index out of range.
static void test_spread() {
    for (int code = 0; code < 2 * 2 * 3; code++) {
        size_t outer = 7, n = 11, k = 4, inner = code % 2 ? 1 : 6;
        int accumulate = code / 2 % 2, bad = code / 4;
        arrays a;
        put(a, ODD, outer * n * inner, EXACT);
        put(a, ODD, outer * k * inner, EXACT);
        array &index = push(a, ODD, outer * k * inner, EXACT, DT_I32);
        for (size_t i = 0; i < index.count; i++) index.i()[i] = (int32_t)(i * i % n);
        if (bad) index.i()[index.count - 1] = bad == 1 ? (int32_t)n : -1;
        check(dtc_text("spread, inner %zu, accumulate %d, bad %d", inner, accumulate, bad), a,
            [=](const dt_kernels *t, arrays &x) {
                dt_scatter_args args = { TYPE, x[0].data(), x[1].data(), x[2].i(), outer, n, k,
                    inner, accumulate };
                return t->scatter(&args, NULL);
            });
    }
}

static void compare_softmax(size_t rows, size_t cols, int size, int placement) {
    arrays a;
    put(a, placement, rows * cols, 0.1);
    array &in = put(a, placement, rows * cols, EXACT);
    push(a, ODD, 6 * cols + 16, SCRATCH);
    for (size_t k = 0; k < in.count; k++) set(in, k, in.at(k) * size);
    if (rows > 30 && cols > 3) {
        set(in, 0, NAN);
        set(in, cols, INFINITY);
        for (size_t c = 0; c < cols; c++) set(in, 2 * cols + c, -INFINITY);
        for (size_t c = 1; c < cols; c++) set(in, 3 * cols + c, -INFINITY);
    }
    for (int in_place = 0; in_place < 2; in_place++)
        check(dtc_text("softmax %zu x %zu of size %d", rows, cols, size), a,
            [=](const dt_kernels *t, arrays &x) {
                if (in_place && x[1].bytes()) memcpy(x[0].data(), x[1].data(), x[1].bytes());
                dt_softmax_args args = { TYPE, x[0].data(), x[in_place ? 0 : 1].data(), rows, cols,
                    x[2].data(), x[2].bytes() };
                return t->softmax(&args, NULL);
            });
    if (size > 1) return;
    a[0].floor = 8 + (double)cols; // the sum of products cancels
    put(a, placement, rows * cols, EXACT);
    for (size_t k = 0; k < in.count; k++) set(a[1], k, 0.25);
    for (int accumulate = 0; accumulate < 2; accumulate++)
        check(dtc_text("softmax_back %zu x %zu, accumulate %d", rows, cols, accumulate), a,
            [=](const dt_kernels *t, arrays &x) {
                dt_softmax_back_args args = { TYPE, x[0].data(), x[3].data(), x[1].data(), rows,
                    cols, accumulate, x[2].data(), x[2].bytes() };
                return t->softmax_back(&args, NULL);
            });
}

static void test_softmax() {
    for (auto shape : SHAPES)
        for (int placement : { ALIGNED, ODD }) {
            compare_softmax(shape.rows, shape.cols, 1, placement);
            compare_softmax(shape.rows, shape.cols, 1000, placement);
        }
    for (auto shape : LONG) compare_softmax(shape.rows, shape.cols, 1, ALIGNED);
}

static void test_rope() {
    const struct {
        size_t tokens, heads, dim, rotary;
    } cases[] = { { 0, 2, 4, 4 }, { 5, 1, 2, 2 }, { 17, 3, 8, 8 }, { 9, 2, 10, 6 }, { 3, 2, 5, 0 },
        { 40, 4, 64, 64 }, { 2, 1, 6, 8 }, { 2, 1, 6, 3 }, { 19, 2, 48, 32 }, { 3, 1, 512, 512 },
        { 3, 1, 514, 2 } };
    for (auto c : cases)
        for (int code = 0; code < 2 * 2 * 2 * 2; code++) {
            int interleaved = code & 1, inverse = code >> 1 & 1, accumulate = code >> 2 & 1,
                in_place = code >> 3;
            size_t count = c.tokens * c.heads * c.dim;
            arrays a;
            dt_rope_scaling scaling = { DT_ROPE_YARN, 4, 100, 1, 8, 1.25, 0 };
            if (c.tokens % 2 == 0) scaling.kind = DT_ROPE_UNSCALED;
            if (in_place && accumulate) continue;
            put(a, in_place ? ODD : ALIGNED, count, 2);
            put(a, in_place ? ODD : ALIGNED, count, EXACT);
            array &position = push(a, ODD, c.tokens, EXACT, DT_I32);
            for (size_t k = 0; k < c.tokens; k++) position.i()[k] = (int32_t)(k * k * 1000 + k);
            check(dtc_text("rope %zu x %zu x %zu, rotary %zu, code %d", c.tokens, c.heads, c.dim,
                      c.rotary, code),
                a, [=](const dt_kernels *t, arrays &x) {
                    if (in_place && count) memcpy(x[0].data(), x[1].data(), x[1].bytes());
                    dt_rope_args args = { TYPE, x[0].data(), x[in_place ? 0 : 1].data(), x[2].i(),
                        c.tokens, c.heads, c.dim, c.rotary, 10000, interleaved, inverse, accumulate,
                        scaling };
                    return t->rope(&args, NULL);
                });
        }
}

// Uniform numbers must equal the CPU's bit for bit; normal ones may differ as log, sin and cos do.
static void test_init() {
    for (dt_dtype dtype : { DT_F32, DT_BF16, DT_F16, DT_F64 })
        for (size_t count : COUNTS)
            for (uint64_t first : { (uint64_t)0, (uint64_t)7, (uint64_t)1 << 40 })
                for (int normal = 0; normal < 2; normal++) {
                    arrays a;
                    push(a, ODD, count, normal ? 1 : EXACT, dtype);
                    compare(
                        dtc_text("init %s x %zu, normal %d", dt_dtype_name(dtype), count, normal),
                        a,
                        [=](const dt_kernels *t, arrays &x) {
                            dt_init_args args = { dtype, x[0].data(), count, normal, 0.02,
                                0x123456789abcdefu, first };
                            return t->init(&args, NULL);
                        },
                        FLAT);
                }
}

// A shard of a table of 53 rows; with holes, every fifth id is -1. bad: an id outside the full
// table.
struct ids_case {
    size_t rows, cols;
    int64_t first, held;
    int32_t bad;
    int holes;
};

static array &push_ids(arrays &a, const ids_case &c) {
    array &ids = push(a, ODD, c.rows, EXACT, DT_I32);
    for (size_t r = 0; r < c.rows; r++)
        ids.i()[r] = c.holes && r % 5 == 4 ? -1 : (int32_t)(r * r % 53);
    if (c.bad) ids.i()[c.rows - 1] = c.bad;
    return ids;
}

static void compare_embedding_back(
    const ids_case &c, int accumulate, int wide, int strict, int placement) {
    arrays a;
    push(a, placement, (size_t)c.held * c.cols, EXACT, wide ? DT_F32 : TYPE);
    put(a, placement, c.rows * c.cols, EXACT);
    push_ids(a, c);
    push(a, placement, (size_t)c.held * c.cols, SCRATCH); // f32 sums
    bool room = dt_dtype_size(TYPE) == 2 && !wide;
    check(dtc_text(
              "embedding_back %zu x %zu, rows %ld + %ld, bad %d, accumulate %d, wide %d, strict %d",
              c.rows, c.cols, (long)c.first, (long)c.held, c.bad, accumulate, wide, strict),
        a, [=](const dt_kernels *t, arrays &x) {
            dt_embedding_back_args args = { TYPE, x[0].data(), x[1].data(), x[2].i(), c.rows,
                c.cols, c.first, c.held, accumulate, wide, room ? x[3].data() : NULL,
                room ? x[3].bytes() : 0, strict };
            dt_status status = t->embedding_back(&args, NULL);
            if (strict) CHECK((status == DT_ERR_ARG) == (c.bad != 0 && c.bad != -1));
            return status;
        });
}

static void compare_embedding(const ids_case &c, int placement = ODD) {
    arrays a;
    put(a, placement, c.rows * c.cols, EXACT);
    put(a, placement, (size_t)c.held * c.cols, EXACT);
    push_ids(a, c);
    check(
        dtc_text("embedding %zu x %zu, rows %ld + %ld, bad %d, holes %d", c.rows, c.cols,
            (long)c.first, (long)c.held, c.bad, c.holes),
        a,
        [=](const dt_kernels *t, arrays &x) {
            dt_embedding_args args = { TYPE, x[0].data(), x[1].data(), x[2].i(), c.rows, c.cols,
                c.first, c.held, 53, c.holes };
            return t->embedding(&args, NULL);
        },
        FLAT);
    if (c.first == 0) compare_embedding_back(c, 0, 0, 1, placement);
    if (c.bad) return;
    for (int wide = 0; wide < (TYPE == DT_F32 ? 1 : 2); wide++)
        for (int accumulate = 0; accumulate < 2; accumulate++)
            compare_embedding_back(c, accumulate, wide, 0, placement);
}

static void test_embedding() {
    for (auto shape : SHAPES) {
        int holes = shape.cols % 2;
        compare_embedding({ shape.rows, shape.cols, 0, 53, 0, holes }, ALIGNED);
        compare_embedding({ shape.rows, shape.cols, 20, 17, 0, 1 - holes });
    }
    compare_embedding({ 5000, 3, 0, 53, 0, 1 }); // ids in several chunks
    compare_embedding({ 3000, 300, 37, 16, 0, 0 }, ALIGNED);
    compare_embedding({ 56000, 2, 16, 1, 0, 0 }); // more occurrences of one row than a list holds
    for (int32_t bad : { -1, -2, 53, INT32_MAX, INT32_MIN })
        compare_embedding({ 17, 5, 0, 53, bad, 0 });
    for (int32_t bad : { -2, 53 }) compare_embedding({ 17, 5, 20, 17, bad, 1 });
}

static void compare_norm(
    int rms, size_t rows, size_t cols, double eps, double shift, int placement, size_t orders = 3) {
    arrays a;
    put(a, placement, rows * cols, 4);
    push(a, ODD, rows, 1);
    push(a, ODD, rows, 0);
    array &in = put(a, placement, rows * cols, EXACT);
    put(a, placement, cols, EXACT);
    put(a, placement, cols, EXACT);
    push(a, ODD, 6 * cols + 16, SCRATCH);
    for (size_t k = 0; k < rows * cols; k++) set(in, k, in.at(k) + shift);
    check(
        dtc_text("norm %zu x %zu, eps %g, rms %d", rows, cols, eps, rms), a,
        [=](const dt_kernels *t, arrays &x) {
            dt_norm_args args = { TYPE, x[0].data(), rms ? NULL : x[1].data(), x[2].data(),
                x[3].data(), x[4].data(), rms ? NULL : x[5].data(), rows, cols, eps, rms,
                x[6].data(), x[6].bytes(), rows % 2 ? 1.0 : 0.0 };
            return t->norm(&args, NULL);
        },
        orders);
}

// Options of a backward. outputs: bits 0, 1, 2 request dx, dgain, dbias; accumulate: add to them;
// wide: dgain and dbias are f32. room: rows of sums that the scratch holds, at least 3.
struct norm_case {
    int rms;
    size_t rows, cols;
    int outputs, accumulate, wide;
    bool in_place;
    size_t room;
};

static void compare_norm_back(const norm_case &c, int placement, size_t orders = 3) {
    arrays a;
    double down = 4 * (1 + (double)c.rows);
    put(a, placement, c.rows * c.cols, 8);
    push(a, placement, c.cols, down, c.wide & 1 ? DT_F32 : TYPE);
    push(a, placement, c.cols, down, c.wide & 2 ? DT_F32 : TYPE);
    array &dout = put(a, placement, c.rows * c.cols, EXACT),
          &in = put(a, placement, c.rows * c.cols, EXACT);
    put(a, placement, c.cols, EXACT);
    array &mean = push(a, ODD, c.rows, EXACT), &rstd = push(a, ODD, c.rows, EXACT);
    push(a, ODD, 2 * c.room * c.cols + 16, SCRATCH);
    for (size_t r = 0; r < c.rows; r++) {
        double sum = 0, squares = 0;
        for (size_t k = 0; k < c.cols && !c.rms; k++) sum += in.at(r * c.cols + k);
        for (size_t k = 0; k < c.cols; k++)
            squares += pow(in.at(r * c.cols + k) - sum / (double)c.cols, 2);
        mean.f()[r] = c.rms ? NAN : (float)(sum / (double)c.cols);
        rstd.f()[r] = (float)(1 / sqrt(squares / (double)c.cols + 1));
    }
    if (c.in_place) {
        memcpy(a[0].data(), dout.data(), dout.bytes());
        dout.floor = SCRATCH;
    }
    check(
        dtc_text("norm_back %zu x %zu, outputs %d, accumulate %d, wide %d, rms %d, room %zu",
            c.rows, c.cols, c.outputs, c.accumulate, c.wide, c.rms, c.room),
        a,
        [=](const dt_kernels *t, arrays &x) {
            void *out[3];
            for (int k = 0; k < 3; k++) out[k] = c.outputs >> k & 1 ? x[(size_t)k].data() : NULL;
            dt_norm_back_args args = { TYPE, out[0], out[1], out[2], x[c.in_place ? 0 : 3].data(),
                x[4].data(), x[5].data(), c.rms ? NULL : x[6].data(), x[7].data(), c.rows, c.cols,
                c.accumulate & 1, c.accumulate >> 1 & 1, c.accumulate >> 2 & 1, c.rms, c.wide & 1,
                c.wide >> 1, x[8].data(), x[8].bytes(), c.rows % 2 ? 1.0 : 0.0 };
            return t->norm_back(&args, NULL);
        },
        orders);
}

static void test_norm() {
    for (auto shape : SHAPES)
        for (int rms = 0; rms < 2; rms++) {
            compare_norm(rms, shape.rows, shape.cols, 1e-5, 0, rms ? ALIGNED : ODD);
            compare_norm_back({ rms, shape.rows, shape.cols, 7, 0, 3, false, 50 }, ALIGNED);
            compare_norm_back(
                { rms, shape.rows, shape.cols, 7, 7, 0, false, 3 }, rms ? ALIGNED : ODD);
        }
    for (auto shape : LONG) {
        compare_norm(0, shape.rows, shape.cols, 1e-5, 1, ALIGNED, 2);
        compare_norm_back({ 0, shape.rows, shape.cols, 7, 1, 1, false, 50 }, ALIGNED, 2);
        compare_norm_back({ 0, shape.rows, shape.cols, 3, 0, 0, true, 3 }, ALIGNED, 2);
    }
    compare_norm(0, 3, 17, 0.5, 3, ODD);
    compare_norm(1, 3, 17, 0.5, 3, ODD);
    for (int bits = 0; bits < 16; bits++) {
        compare_norm_back({ bits / 8, 19, 40, bits % 8, 0, bits % 4, false, 3 }, ALIGNED);
        compare_norm_back({ bits / 8, 5, 37, 7, bits % 8, bits % 4, false, 3 }, ODD);
    }
    compare_norm_back({ 0, 5, 37, 7, 6, 0, true, 3 }, ODD);
    compare_norm_back({ 0, 19, 40, 7, 6, 0, true, 3 }, ALIGNED);
}

// ==== 4. Losses =================================================================================

// Variants of a loss: padding columns, smoothing, z loss, adding a chunk.
struct manner {
    size_t padding;
    double smoothing, z;
    int add;
};
static const manner MANNERS[] = { { 0, 0, 0, 0 }, { 3, 0, 0, 0 }, { 0, 0.1, 0, 1 },
    { 2, 0.3, 0.01, 0 }, { 1, 0, 0.1, 1 } };

// Every seventh row has no label; bad is the row whose label is past the end, or -1.
static void compare_cross_entropy(
    size_t rows, size_t vocab, long bad, double size, size_t orders = 3, manner how = MANNERS[0]) {
    arrays a;
    size_t cols = vocab + how.padding;
    push(a, ODD, 1, (1 + size) * (1 + (double)rows), DT_F64);
    push(a, ODD, rows, 1 + size, DT_F64);
    push(a, ODD, rows, 1 + size);
    array &logits = put(a, rows % 2 ? ODD : ALIGNED, rows * cols, EXACT);
    array &labels = push(a, ODD, rows, EXACT, DT_I32);
    push(a, ODD, 1, pow(10 + size, 2) * (1 + (double)rows), DT_F64);
    push(a, ODD, 6 * cols + 16, SCRATCH);
    for (size_t k = 0; k < rows * cols; k++) set(logits, k, logits.at(k) * size);
    for (size_t r = 0; r < rows; r++)
        labels.i()[r] = r % 7 == 3 ? -1 - (int32_t)r : (int32_t)(r * 5 % vocab);
    if (bad >= 0) labels.i()[bad] = (int32_t)vocab;
    check(
        dtc_text("cross_entropy %zu x %zu + %zu, bad label at %ld, size %g, smoothing %g", rows,
            vocab, how.padding, bad, size, how.smoothing),
        a,
        [=](const dt_kernels *t, arrays &x) {
            dt_cross_entropy_args args = { TYPE, x[0].d(), x[1].d(), x[2].data(), x[3].data(),
                x[4].i(), rows, cols, how.padding ? vocab : 0, 3.5, how.smoothing,
                how.z > 0 ? x[5].d() : NULL, how.add, x[6].data(), x[6].bytes(), NULL, 0, 0 };
            return t->cross_entropy(&args, NULL);
        },
        orders);
}

static void compare_cross_entropy_back(size_t rows, size_t vocab, long bad, int accumulate,
    bool in_place, size_t orders = 3, manner how = MANNERS[0]) {
    arrays a;
    size_t cols = vocab + how.padding;
    int placement = rows % 2 ? ODD : ALIGNED;
    put(a, placement, rows * cols, 1);
    array &logits = put(a, placement, rows * cols, EXACT), &lse = push(a, ODD, rows, EXACT);
    array &labels = push(a, ODD, rows, EXACT, DT_I32);
    push(a, ODD, 1, EXACT, DT_F64);
    push(a, ODD, 6 * cols + 16, SCRATCH);
    for (size_t r = 0; r < rows; r++) {
        double sum = 0;
        for (size_t c = 0; c < vocab; c++) sum += exp(logits.at(r * cols + c));
        lse.f()[r] = (float)log(sum);
        labels.i()[r] = r % 7 == 3 ? -1 : (int32_t)(r * 5 % vocab);
    }
    if (bad >= 0) labels.i()[bad] = INT32_MAX;
    if (in_place && logits.bytes()) memcpy(a[0].data(), logits.data(), logits.bytes());
    check(
        dtc_text(
            "cross_entropy_back %zu x %zu + %zu, bad label at %ld, accumulate %d, smoothing %g",
            rows, vocab, how.padding, bad, accumulate, how.smoothing),
        a,
        [=](const dt_kernels *t, arrays &x) {
            dt_cross_entropy_back_args args = { TYPE, x[0].data(), x[in_place ? 0 : 1].data(),
                x[2].data(), x[3].i(), rows, cols, how.padding ? vocab : 0, x[4].d(), 0.25,
                how.smoothing, how.z, accumulate, x[5].data(), x[5].bytes(), 0, 0 };
            return t->cross_entropy_back(&args, NULL);
        },
        orders);
}

// The loss of a shard, columns [first, first + cols) of 40 of which `vocab` are real, and its
// gradient.
static void compare_part(int64_t first, size_t cols, size_t vocab, double smoothing, bool bad) {
    const size_t rows = 13;
    arrays a;
    push(a, ODD, 2 * rows, 2, DT_F64);
    put(a, ODD, rows * cols, EXACT);
    array &lse = push(a, ODD, rows, EXACT), &labels = push(a, ODD, rows, EXACT, DT_I32);
    put(a, ODD, rows * cols, 1);
    push(a, ODD, 1, EXACT, DT_F64);
    push(a, ODD, 6 * cols + 16, SCRATCH);
    for (size_t r = 0; r < rows; r++) {
        lse.f()[r] += 4;
        labels.i()[r] = r % 7 == 3 ? -1 : (int32_t)(r * 17 % 40);
    }
    if (bad) labels.i()[5] = 40;
    check(dtc_text("cross_entropy of columns %ld + %zu (%zu), smoothing %g", (long)first, vocab,
              cols, smoothing),
        a, [=](const dt_kernels *t, arrays &x) {
            dt_cross_entropy_args args = { TYPE, NULL, NULL, NULL, x[1].data(), x[3].i(), rows,
                cols, vocab, 1, smoothing, NULL, 0, x[6].data(), x[6].bytes(), x[0].d(), first,
                40 };
            return t->cross_entropy(&args, NULL);
        });
    check(dtc_text("cross_entropy_back of columns %ld + %zu (%zu), smoothing %g", (long)first,
              vocab, cols, smoothing),
        a, [=](const dt_kernels *t, arrays &x) {
            dt_cross_entropy_back_args args = { TYPE, x[4].data(), x[1].data(), x[2].data(),
                x[3].i(), rows, cols, vocab, x[5].d(), 0.25, smoothing, 0.01, 0, x[6].data(),
                x[6].bytes(), first, 40 };
            return t->cross_entropy_back(&args, NULL);
        });
}

static void compare_join(size_t n, size_t rows, bool z) {
    arrays a;
    push(a, ODD, 1, 8 * (1 + (double)rows), DT_F64);
    push(a, ODD, rows, 4);
    push(a, ODD, 1, 16 * (1 + (double)rows), DT_F64);
    array &parts = push(a, ODD, 2 * n * rows, EXACT, DT_F64),
          &labels = push(a, ODD, rows, EXACT, DT_I32);
    for (size_t k = 0; k < rows; k++) {
        if (k % 5 == 1) parts.d()[2 * k] = -INFINITY; // a shard without real columns
        if (k % 4 == 2) labels.i()[k] = -1;
    }
    check(dtc_text("cross_entropy_merge of %zu x %zu", n, rows), a,
        [=](const dt_kernels *t, arrays &x) {
            dt_cross_entropy_merge_args args = { TYPE, x[0].d(), x[1].data(), x[3].d(), x[4].i(), n,
                rows, 2.5, z ? x[2].d() : NULL };
            return t->cross_entropy_merge(&args, NULL);
        });
}

// Rows with NaN or infinity: both tables give NaN or infinity for them, and correct results for all
// other rows.
static void test_cross_entropy_special() {
    arrays a;
    push(a, ALIGNED, 1, 1, DT_F64);
    push(a, ALIGNED, 5, 1, DT_F64);
    push(a, ALIGNED, 5, 1);
    array &logits = put(a, ALIGNED, 5 * 300, EXACT), &labels = push(a, ALIGNED, 5, EXACT, DT_I32);
    for (int r = 0; r < 5; r++) labels.i()[r] = 299;
    set(logits, 0 * 300 + 7, NAN);
    set(logits, 1 * 300 + 7, INFINITY);
    for (size_t c = 0; c < 300; c++) set(logits, 2 * 300 + c, -INFINITY);
    for (size_t c = 0; c < 299; c++)
        set(logits, 3 * 300 + c, -INFINITY); // the label has probability 1, so the loss is 0
    push(a, ALIGNED, 6 * 300 + 16, SCRATCH);
    check("cross_entropy with NaN and infinity", a, [](const dt_kernels *t, arrays &x) {
        dt_cross_entropy_args args = { TYPE, x[0].d(), x[1].d(), x[2].data(), x[3].data(), x[4].i(),
            5, 300, 0, 5, 0, NULL, 0, x[5].data(), x[5].bytes(), NULL, 0, 0 };
        return t->cross_entropy(&args, NULL);
    });
}

static void test_cross_entropy() {
    for (auto shape : SHAPES) {
        compare_cross_entropy(shape.rows, shape.cols, -1, 1);
        for (int accumulate = 0; accumulate < 2; accumulate++)
            compare_cross_entropy_back(shape.rows, shape.cols, -1, accumulate, false);
    }
    for (const manner &how : MANNERS) {
        compare_cross_entropy(17, 127, -1, 1, 3, how);
        compare_cross_entropy(70, 3, 5, 1, 3, how); // the label is a padding column
        for (int accumulate = 0; accumulate < 2; accumulate++)
            compare_cross_entropy_back(17, 127, -1, accumulate, accumulate == 0, 3, how);
        compare_cross_entropy_back(17, 5, 4, 0, false, 3, how);
    }
    dt_cross_entropy_args wide = { TYPE, NULL, NULL, NULL, NULL, NULL, 0, 5, 6, 1, 0, NULL, 0, NULL,
        0, NULL, 0, 0 };
    dt_cross_entropy_back_args wide_back = { TYPE, NULL, NULL, NULL, NULL, 0, 5, 6, NULL, 1, 0, 0,
        0, NULL, 0, 0, 0 };
    CHECK(dt_kernels_cuda()->cross_entropy(&wide, NULL) == DT_ERR_ARG);
    CHECK(dt_kernels_cuda()->cross_entropy_back(&wide_back, NULL) == DT_ERR_ARG);
    compare_cross_entropy(17, 127, -1, 1000);
    compare_cross_entropy(2, 20003, -1, 3); // several iterations of a block
    compare_cross_entropy_back(17, 127, -1, 0, true);
    compare_cross_entropy_back(3, 20003, -1, 0, false, 2);
    for (long bad : { 0, 3, 16 }) {
        compare_cross_entropy(17, 5, bad, 1);
        compare_cross_entropy_back(17, 5, bad, 0, false);
        compare_cross_entropy_back(17, 5, bad, 1, false);
    }
    compare_cross_entropy(4100, 1, 4099, 1, 1); // in a later chunk of the labels
    for (double smoothing : { 0.0, 0.2 })
        for (bool bad : { false, true }) {
            compare_part(0, 20, 20, smoothing, bad);
            compare_part(20, 20, 17, smoothing, bad);
            compare_part(40, 20, 0, smoothing, bad);
        }
    for (size_t rows : { 0, 1, 700 }) compare_join(3, rows, rows > 1);
    test_cross_entropy_special();
}

static void test_pair_loss(int kind) {
    for (size_t count : COUNTS)
        for (int placement : { ALIGNED, ODD }) {
            arrays a;
            push(a, ODD, 1, 0, DT_F64);
            put(a, placement, count, EXACT);
            put(a, placement, count, EXACT);
            push(a, ODD, 1, EXACT, DT_F64);
            put(a, placement, count, 1);
            for (size_t k = 0; k < count && kind > DT_PAIR_SQUARE; k++) { // both tails
                set(a[1], k, k % 5 == 4 ? 60 * a[1].at(k) : 4 * a[1].at(k));
                set(a[2], k, k % 3 == 0 ? 1 : k % 3 == 1 ? 0 : fabs(a[2].at(k)) / 2);
            }
            check(dtc_text("pair_loss %d of %zu", kind, count), a,
                [=](const dt_kernels *t, arrays &x) {
                    dt_pair_loss_args args = { TYPE, kind, x[0].d(), x[1].data(), x[2].data(),
                        count, 7 };
                    return t->pair_loss(&args, NULL);
                });
            for (int accumulate = 0; accumulate < 2; accumulate++)
                check(
                    dtc_text("pair_loss_back %d of %zu, accumulate %d", kind, count, accumulate), a,
                    [=](const dt_kernels *t, arrays &x) {
                        dt_pair_loss_back_args args = { TYPE, kind, x[4].data(), x[1].data(),
                            x[2].data(), count, x[3].d(), 0.5, accumulate };
                        return t->pair_loss_back(&args, NULL);
                    },
                    FLAT);
        }
}

// ==== 5. Norm and optimizers ====================================================================

static void compare_square_sums(dt_dtype dtype, double floor) {
    for (size_t count : { 0, 1, 15, 17, 1023, 1024, 1025, 5000, 16 * 1024 + 7, 40000 })
        for (int placement : { ALIGNED, ODD }) {
            arrays a;
            push(a, placement, (count + DT_PIECE - 1) / DT_PIECE, floor, DT_F64);
            push(a, placement, count, EXACT, dtype);
            compare(dtc_text("square_sums %s x %zu", dt_dtype_name(dtype), count), a,
                [=](const dt_kernels *t, arrays &x) {
                    dt_square_sums_args args = { dtype, x[0].d(), x[1].data(), count };
                    return t->square_sums(&args, NULL);
                });
        }
}

// Sums of integers have no order: equal bits, for every type, length, offset and alignment.
static void test_digest() {
    for (dt_dtype dtype : { DT_U8, DT_BF16, DT_F32, DT_I32, DT_I64, DT_F64 })
        for (size_t count : { 0, 1, 15, 257, 1000, 5003, 70001 })
            for (uint64_t offset : { (uint64_t)0, (uint64_t)7, (uint64_t)UINT32_MAX - 100 })
                for (int placement : { ALIGNED, ODD }) {
                    arrays a;
                    size_t parts = count > 5003 ? DT_DIGEST_PARTS : 1 + count % 7;
                    push(a, ALIGNED, parts, EXACT, DT_I64);
                    push(a, placement, count, EXACT, dtype);
                    compare(
                        dtc_text("digest %s x %zu from %llu", dt_dtype_name(dtype), count,
                            (unsigned long long)offset),
                        a,
                        [=](const dt_kernels *t, arrays &x) {
                            dt_digest_args args = { dtype, (uint64_t *)x[0].data(), x[1].data(),
                                count, offset, parts };
                            return t->digest(&args, NULL);
                        },
                        placement == ODD && offset == 7 ? 3 : 1);
                }
}

// Parameters are f32; TYPE is the type of the 16-bit copy, and f32 means no copy.
static void *copy_in(const array &a) { return TYPE == DT_F32 ? NULL : a.data(); }

static void compare_adamw(size_t count, int placement, int64_t step, int coupled, double decay) {
    arrays a;
    push(a, placement, count, 1);
    push(a, placement, count, EXACT);
    push(a, placement, count, 0.1);
    array &v = push(a, placement, count, 0);
    put(a, placement, count, 1);
    for (size_t k = 0; k < count; k++) v.f()[k] = fabsf(v.f()[k]);
    check(
        dtc_text("adamw %zu, step %ld, coupled %d, decay %g", count, (long)step, coupled, decay), a,
        [=](const dt_kernels *t, arrays &x) {
            dt_adamw_args args = { DT_F32, x[0].data(), x[1].data(), x[2].data(), x[3].data(),
                count, 0.1, 0.9, 0.95, 1e-3, decay, 0.5, step, coupled, TYPE, copy_in(x[4]), NULL };
            return t->adamw(&args, NULL);
        },
        FLAT);
}

// The offsets of a list's runs in common arrays: every third run is unaligned, some are empty, one
// takes many blocks.
struct list_run {
    size_t first, count;
};

static std::vector<list_run> list_of(size_t runs, size_t longest) {
    static const size_t counts[] = { 5, 0, 1, 1024, 3000, 64, 4097, 2, 333, 0, 1025 };
    std::vector<list_run> list;
    size_t at = 0;
    for (size_t i = 0; i < runs; i++) {
        size_t count = i == runs / 2 ? longest : counts[i % 11];
        list.push_back({ at + (i % 3 == 1), count });
        at = (at + 1 + count + 7) / 4 * 4;
    }
    return list;
}

// One call for all runs, or one call for each. Every field that may differ between runs does.
static dt_status adamw_list(
    const dt_kernels *t, arrays &x, const std::vector<list_run> &list, int coupled, bool alone) {
    std::vector<dt_adamw_args> args;
    for (size_t i = 0; i < list.size(); i++) {
        size_t at = list[i].first;
        char *narrow = static_cast<char *>(x[4].data()) + at * dt_dtype_size(TYPE);
        args.push_back({ DT_F32, x[0].f() + at, x[1].f() + at, x[2].f() + at, x[3].f() + at,
            list[i].count, 0.01 * (double)(1 + i % 13), 0.9, 0.95, 1e-3, 0.1 * (double)(i % 4), 0.5,
            3, coupled, TYPE, TYPE == DT_F32 || i % 5 == 4 ? NULL : narrow, NULL });
    }
    for (size_t i = 1; i < args.size() && !alone; i++) args[i - 1].next = &args[i];
    dt_status status = t->adamw(&args[0], NULL);
    for (size_t i = 1; i < args.size() && alone && status == DT_OK; i++)
        status = t->adamw(&args[i], NULL);
    return status;
}

// The results must equal the CPU's, and bit for bit those of single calls. A launch takes 32 runs;
// empty runs do not count.
static void compare_adamw_list(size_t runs, size_t longest, int coupled) {
    std::vector<list_run> list = list_of(runs, longest);
    size_t count = list.back().first + list.back().count + 5;
    arrays a;
    push(a, ALIGNED, count, 1);
    push(a, ALIGNED, count, EXACT);
    push(a, ALIGNED, count, 0.1);
    array &v = push(a, ALIGNED, count, 0);
    put(a, ALIGNED, count, 1);
    for (size_t k = 0; k < count; k++) v.f()[k] = fabsf(v.f()[k]);
    std::string what = dtc_text("adamw of %zu runs, coupled %d", runs, coupled);
    check(
        what, a,
        [&](const dt_kernels *t, arrays &x) { return adamw_list(t, x, list, coupled, false); },
        FLAT);
    arrays one = a, many = a;
    CHECK(adamw_list(dt_kernels_cuda(), many, list, coupled, false) == DT_OK);
    CHECK(adamw_list(dt_kernels_cuda(), one, list, coupled, true) == DT_OK);
    CHECK(wait_for(dt_kernels_cuda(), NULL) == DT_OK);
    check_no_mistake(what);
    for (size_t i = 0; i < a.size(); i++)
        CHECK_MSG(
            same_bits(many[i], one[i]), "%s: array %zu differs from single calls", what.c_str(), i);
}

// If the last run of a list is invalid, nothing is launched.
static void test_unlike_runs() {
    float x[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    dt_adamw_args last = { DT_F32, x + 4, x, x + 4, x + 4, 4, 1, 0.9, 0.9, 1, 0, 1, 1, 0, TYPE,
        NULL, NULL };
    for (int wrong = 0; wrong < 3; wrong++) {
        dt_adamw_args bad = last, first = last;
        first.param = first.m = first.v = x;
        first.next = &bad;
        if (wrong == 0) bad.step = 0;
        if (wrong == 1) bad.dtype = DT_F64;
        if (wrong == 2) bad.model_dtype = DT_I32;
        CHECK(dt_kernels_cuda()->adamw(&first, NULL) == DT_ERR_ARG);
    }
    CHECK(x[0] == 1 && x[4] == 5);
    check_no_mistake("a list with an invalid run");
}

// buffer: 0: none, 1: present, 2: present and never written
static void compare_sgd(size_t count, int placement, int64_t step, double momentum, int buffer) {
    arrays a;
    push(a, placement, count, 1);
    push(a, placement, count, EXACT);
    array &b = push(a, placement, count, 1);
    put(a, placement, count, 1);
    for (size_t k = 0; k < count && buffer == 2; k++) b.f()[k] = NAN;
    check(
        dtc_text("sgd %zu, step %ld, momentum %g, buffer %d", count, (long)step, momentum, buffer),
        a,
        [=](const dt_kernels *t, arrays &x) {
            dt_sgd_args args = { DT_F32, x[0].data(), x[1].data(), buffer ? x[2].data() : NULL,
                count, 0.1, momentum, 0.3, 0.5, step, TYPE, copy_in(x[3]) };
            return t->sgd(&args, NULL);
        },
        FLAT);
}

static void compare_frozen(size_t count, int placement) {
    arrays a;
    push(a, placement, count, 1);
    push(a, placement, count, 1);
    array &v = push(a, placement, count, EXACT);
    push(a, placement, count, EXACT);
    put(a, placement, count, 1);
    for (size_t k = 0; k < count; k++) v.f()[k] = fabsf(v.f()[k]);
    check(
        dtc_text("frozen_adam %zu", count), a,
        [=](const dt_kernels *t, arrays &x) {
            dt_frozen_adam_args args = { DT_F32, x[0].data(), x[1].data(), x[2].data(), count, 0.1,
                1e-3, 0.2, TYPE, copy_in(x[4]) };
            return t->frozen_adam(&args, NULL);
        },
        FLAT);
    check(
        dtc_text("momentum %zu", count), a,
        [=](const dt_kernels *t, arrays &x) {
            dt_momentum_args args = { DT_F32, x[1].data(), x[3].data(), count, 0.9, 0.5 };
            return t->momentum(&args, NULL);
        },
        FLAT);
}

static void test_optimizers() {
    for (size_t count : COUNTS)
        for (int placement = 0; placement < PLACEMENTS; placement++) {
            compare_adamw(count, placement, 3, 0, 0.1);
            compare_sgd(count, placement, 2, 0.9, 1);
            compare_frozen(count, placement);
        }
    for (int64_t step : { 0, 1, 2, 1000 })
        for (int coupled = 0; coupled < 2; coupled++) {
            compare_adamw(17, ALIGNED, step, coupled, 0.2);
            compare_adamw(17, ALIGNED, step, coupled, 0);
        }
    for (size_t runs : { 2, 12, 32, 33, 39, 90 }) compare_adamw_list(runs, 9000, runs % 2);
    test_unlike_runs();
    for (int buffer = 0; buffer < 3; buffer++)
        for (double momentum : { 0.0, 0.8 })
            for (int64_t step : { 0, 1, 2 })
                if (buffer < 2 || step < 2) compare_sgd(17, ALIGNED, step, momentum, buffer);
}

// Messages of sign bits. The last 8 bytes are the scale, a float whose last bits may differ.
static void compare_signs(size_t count, size_t parts, int placement, size_t room) {
    size_t bytes = count / 8 + 8 * parts;
    arrays a;
    push(a, placement, (bytes + 3) / 4, EXACT,
        DT_I32); // the messages; their scales are compared below
    push(a, placement, count, EXACT);
    push(a, placement, count, 4);
    array &v = push(a, placement, count, EXACT);
    push(a, ODD, room, SCRATCH, DT_F64);
    push(a, ODD, parts, 0, DT_F64);
    for (size_t k = 0; k < count; k += 3) v.f()[k] = 0;
    memset(a[0].data(), 0, a[0].bytes());
    check(dtc_text("sign_pack %zu in %zu, room %zu", count, parts, room), a,
        [=](const dt_kernels *t, arrays &x) {
            dt_sign_pack_args args = { DT_F32, x[0].data(), x[1].data(), x[2].data(), x[3].data(),
                count, parts, x[4].data(), x[4].bytes() };
            dt_status status = t->sign_pack(&args, NULL);
            if (status == DT_OK) status = wait_for(t, NULL);
            size_t part = parts ? count / parts / 8 : 0;
            for (size_t p = 0; p < parts && status == DT_OK; p++) {
                char *scale = (char *)x[0].data() + p * (part + 8) + part;
                memcpy(x[5].d() + p, scale, 8);
                memset(scale, 0, 8);
            }
            return status;
        });
}

static void test_signs() {
    for (int placement : { ALIGNED, ODD }) {
        compare_signs(8, 1, placement, 3);
        compare_signs(0, 2, placement, 1);
        compare_signs(3 * 1040, 3, placement, 9);
        compare_signs(20 * 1024, 1, placement, 41);
    }
    compare_signs(12, 1, ODD, 3);
    compare_signs(16, 0, ODD, 3);
    for (size_t n : { 0, 1, 3 })
        for (size_t count : { 0, 8, 1040, 12 }) {
            arrays a;
            push(a, ODD, count, EXACT);
            array &in = push(a, ODD, n * (count / 8 + 8) / 4 + 2, EXACT, DT_I32),
                  &v = push(a, ODD, count, EXACT);
            for (size_t k = 0; k < count; k += 3) v.f()[k] = 0;
            for (size_t m = 0; m < n; m++) {
                double scale = 0.1 * (double)(float)(m + 1);
                memcpy((char *)in.data() + m * (count / 8 + 8) + count / 8, &scale, 8);
            }
            check(dtc_text("sign_unpack %zu of %zu", n, count), a,
                [=](const dt_kernels *t, arrays &x) {
                    dt_sign_unpack_args args = { DT_F32, x[0].data(), x[1].data(), x[2].data(),
                        count, n };
                    return t->sign_unpack(&args, NULL);
                });
        }
    dt_sign_pack_args none = { DT_F32, NULL, NULL, NULL, NULL, 8, 1, NULL,
        0 }; // a GPU needs scratch
    CHECK(dt_kernels_cuda()->sign_pack(&none, NULL) == DT_ERR_ARG);
}

// ==== 6. Sizes beyond one grid ==================================================================

// Zeros in pages that are never written, followed by bytes that must not be read.
static float *zero_pages(size_t bytes, size_t beyond) {
#ifdef CUDA_ON_GPU
    void *p = NULL;
    if (dtc_pinned.get(&p, bytes + beyond) != 0) return NULL;
    memset(p, 0, bytes);
    memset((char *)p + bytes, 0xff, beyond); // NaNs
#else
    void *p = mmap(NULL, bytes + beyond, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect((char *)p + bytes, beyond, PROT_NONE) != 0) return NULL;
#endif
    return (float *)p;
}

// With half a warp per run there are many runs, so nearly all numbers are zero.
static void test_square_sums_rounds() {
    const size_t runs = (size_t)MAX_BLOCKS * 16 + 5, bytes = runs * DT_PIECE * sizeof(float),
                 beyond = 1 << 20;
    float *x = zero_pages(bytes, beyond);
    arrays a;
    double *sums = push(a, ALIGNED, runs, EXACT, DT_F64).d(), total = 0;
    if (!CHECK(x)) return;
    x[0] = 2;
    x[(runs - 6) * DT_PIECE] = 3;
    x[runs * DT_PIECE - 2] = 4;
    dt_square_sums_args args = { DT_F32, sums, x, runs * DT_PIECE - 1 };
    CHECK(dt_kernels_cuda()->square_sums(&args, NULL) == DT_OK &&
          wait_for(dt_kernels_cuda(), NULL) == DT_OK);
    for (size_t k = 0; k < runs; k++) total += sums[k];
    CHECK(sums[0] == 4 && sums[runs - 6] == 9 && sums[runs - 1] == 16 && total == 29);
    CHECK(a[0].guards_hold());
#ifdef CUDA_ON_GPU
    dtc_pinned.give(x);
#else
    munmap(x, bytes + beyond);
#endif
}

// Each kind of loop once over more than MAX_BLOCKS blocks, in one lane order, because only indices
// are tested.
static void test_several_rounds() {
    const size_t count = (size_t)MAX_BLOCKS * BLOCK * 4 + 4 * BLOCK + 3;
    arrays a;
    push(a, ODD, count, EXACT);
    compare(
        "fill, several rounds", a,
        [=](const dt_kernels *t, arrays &x) {
            dt_fill_args args = { DT_F32, x[0].data(), count, 0.5 };
            return t->fill(&args, NULL);
        },
        1);
    compare(
        "reduce, several rounds", a,
        [=](const dt_kernels *t, arrays &x) {
            const void *in[] = { x[0].data(), x[0].data() };
            dt_reduce_args args = { DT_F32, x[0].data(), in, 2, count, DT_SUM, NULL, 0, 0 };
            return t->reduce(&args, NULL);
        },
        1);
    arrays turned;
    for (int i = 0; i < 2; i++) push(turned, ODD, (MAX_BLOCKS + 3) * 72, EXACT);
    compare(
        "transposed tiles, several rounds", turned,
        [=](const dt_kernels *t, arrays &x) {
            dt_permute_args args = { DT_F32, x[0].data(), x[1].data(),
                { 3, { MAX_BLOCKS + 3, 8, 9 } }, { 72, 1, 8 }, { 72, 9, 1 }, 0 };
            return t->permute(&args, NULL);
        },
        1);
    compare_norm(0, MAX_BLOCKS + 3, 2, 1e-5, 0, ODD, 1);
    compare_norm_back({ 0, MAX_BLOCKS + 3, 2, 1, 0, 0, false, 3 }, ODD, 1);
    compare_norm_back({ 0, 8 * FILL_BLOCKS + 11, 8, 7, 0, 0, false, FILL_BLOCKS }, ALIGNED, 1);
    compare_cross_entropy(MAX_BLOCKS + 3, 2, -1, 1, 1);
    compare_cross_entropy_back(MAX_BLOCKS + 3, 2, -1, 0, false, 1);
    test_square_sums_rounds();

    arrays sums;
    push(sums, ALIGNED, (size_t)MAX_BLOCKS * 128 + 36, 8);
    push(sums, ALIGNED, 2 * sums[0].count, EXACT);
    compare(
        "sum of columns, several rounds", sums,
        [=](const dt_kernels *t, arrays &x) {
            dt_sum_args args = { DT_F32, x[0].data(), x[1].data(), 1, 2, x[0].count, 1, 1, 0, NULL,
                0 };
            return t->sum(&args, NULL);
        },
        1);
    compare(
        "sum of rows, several rounds", sums,
        [=](const dt_kernels *t, arrays &x) {
            dt_sum_args args = { DT_F32, x[0].data(), x[1].data(), x[0].count, 2, 1, 1, 1, 0, NULL,
                0 };
            return t->sum(&args, NULL);
        },
        1);
    arrays table; // more rows than a grid owns
    push(table, ALIGNED, (size_t)MAX_BLOCKS * OWNED_ROWS + 33, EXACT);
    push(table, ALIGNED, 300, EXACT);
    array &ids = push(table, ALIGNED, 300, EXACT, DT_I32);
    for (size_t r = 0; r < 300; r++) ids.i()[r] = (int32_t)(r * 7919 * 31 % table[0].count);
    ids.i()[299] = (int32_t)table[0].count - 1;
    compare(
        "embedding_back, several rounds", table,
        [=](const dt_kernels *t, arrays &x) {
            dt_embedding_back_args args = { DT_F32, x[0].data(), x[1].data(), x[2].i(), 300, 1, 0,
                (int64_t)x[0].count, 0, 0, NULL, 0, 0 };
            return t->embedding_back(&args, NULL);
        },
        1);
}

// ==== 7. The table ==============================================================================

// Every kernel refuses an unsupported type before any other check; the CPU supports f64.
static void test_types() {
    const dt_kernels *t = dt_kernels_cuda();
    int there = 0;
#define REFUSES(k, type) \
    { \
        dt_##k##_args args; \
        memset(&args, 0, sizeof args); \
        args.dtype = type; \
        CHECK_MSG(t->k(&args, NULL) == DT_ERR_UNSUPPORTED, #k " takes " #type); \
        there++; \
    }
#define REFUSES_ALL(k) REFUSES(k, DT_F64) REFUSES(k, DT_I32) REFUSES(k, (dt_dtype)7)
    REFUSES(fill, (dt_dtype)7)
    REFUSES(reduce, (dt_dtype)7)
    REFUSES(permute, (dt_dtype)7)
    REFUSES(cast, (dt_dtype)7)
    REFUSES(init, DT_I32)
    REFUSES(digest, (dt_dtype)7)
    REFUSES(square_sums, DT_I32)
    REFUSES_ALL(sum)
    REFUSES_ALL(cumsum)
    REFUSES_ALL(patches)
    REFUSES_ALL(patches_back)
    REFUSES_ALL(max)
    REFUSES_ALL(binary)
    REFUSES_ALL(where)
    REFUSES_ALL(unary)
    REFUSES_ALL(unary_back)
    REFUSES_ALL(glu)
    REFUSES_ALL(glu_back)
    REFUSES_ALL(softmax)
    REFUSES_ALL(softmax_back)
    REFUSES_ALL(norm)
    REFUSES_ALL(norm_back)
    REFUSES_ALL(rope)
    REFUSES_ALL(dropout)
    REFUSES_ALL(embedding)
    REFUSES_ALL(embedding_back)
    REFUSES_ALL(topk)
    REFUSES_ALL(scatter)
    REFUSES_ALL(cross_entropy)
    REFUSES_ALL(cross_entropy_merge)
    REFUSES_ALL(cross_entropy_back)
    REFUSES_ALL(pair_loss)
    REFUSES_ALL(pair_loss_back)
    REFUSES_ALL(adamw)
    REFUSES_ALL(sgd)
    REFUSES_ALL(momentum)
    REFUSES_ALL(frozen_adam)
    REFUSES_ALL(sign_pack)
    REFUSES_ALL(sign_unpack)
    REFUSES(adamw, DT_BF16) // parameters in 16 bits have a master copy in f32
    REFUSES(sgd, DT_F16)
#undef REFUSES_ALL
#undef REFUSES
    CHECK(there == 7 + 3 * 32 + 2);
    // a copy of an invalid type is refused, and nothing is touched
    uint16_t narrow[4] = { 1, 2, 3, 4 };
    float x[4] = { 1, 2, 3, 4 };
    dt_adamw_args adamw = { DT_F32, x, x, x, x, 4, 1, 0.9, 0.9, 1, 0, 1, 1, 0, DT_F64, narrow,
        NULL };
    dt_sgd_args sgd = { DT_F32, x, x, NULL, 4, 1, 0, 0, 1, 1, DT_I32, narrow };
    CHECK(t->adamw(&adamw, NULL) == DT_ERR_UNSUPPORTED && t->sgd(&sgd, NULL) == DT_ERR_UNSUPPORTED);
    CHECK(x[0] == 1 && x[3] == 4 && narrow[0] == 1 && narrow[3] == 4);
    check_no_mistake("refusing types");
}

// In a queue kernels check their indices: they read and write nothing out of range, treat such a
// row as one without an id or label, and the next wait reports it once.
static void test_bad_indices() {
    const dt_kernels *t = dt_kernels_cuda();
    dt_cuda_desc desc = { 0, NULL, 0 };
    char text[64] = "";
    void *queue = dt_cuda_open(desc, text, sizeof text);
    arrays a;
    float *table = push(a, ALIGNED, 6, EXACT).f(), *out = push(a, ALIGNED, 8, 0).f();
    float *lse = push(a, ALIGNED, 4, 0).f(), *sums = push(a, ALIGNED, 6, 0).f();
    double *loss = push(a, ALIGNED, 1, 0, DT_F64).d(),
           *row_loss = push(a, ALIGNED, 4, 0, DT_F64).d();
    double *up = push(a, ALIGNED, 1, EXACT, DT_F64).d();
    int32_t *ids = push(a, ALIGNED, 4, EXACT, DT_I32).i();
    if (!CHECK_MSG(queue, "%s", text)) return;
    for (int k = 0; k < 6; k++) table[k] = (float)(k + 1);
    *up = 1;
    for (int32_t bad : { 1, 3, -1, INT32_MAX, INT32_MIN }) {
        bool wrong = bad != 1, wrong_label = bad > 2, wrong_row = bad != 1 && bad != -1;
        ids[0] = 0, ids[1] = bad, ids[2] = 2, ids[3] = 1;
        dt_embedding_args take = { DT_F32, out, table, ids, 4, 2, 0, 3, 3, 0 };
        dt_embedding_back_args give = { DT_F32, sums, table, ids, 3, 2, 0, 3, 0, 0, NULL, 0, 1 };
        dt_scatter_args spread = { DT_F32, out, table, ids, 1, 3, 4, 1, 0 };
        CHECK(t->embedding(&take, queue) == DT_OK);
        CHECK(t->sync(queue) == (wrong ? DT_ERR_ARG : DT_OK) && t->sync(queue) == DT_OK);
        CHECK(out[0] == 1 && out[2] == (wrong ? 0 : 3) && out[5] == 6);
        CHECK(t->embedding_back(&give, queue) == DT_OK);
        CHECK(t->sync(queue) == (wrong_row ? DT_ERR_ARG : DT_OK));
        CHECK(sums[0] == 1 && sums[2] == (wrong ? 0 : 3) && sums[5] == 6);
        CHECK(
            t->scatter(&spread, queue) == DT_OK && t->sync(queue) == (wrong ? DT_ERR_ARG : DT_OK));
        CHECK(out[0] == 1 && out[1] == (wrong ? 4 : 2 + 4) && out[2] == 3);
        dt_cross_entropy_args loss_args = { DT_F32, loss, row_loss, lse, table, ids, 2, 3, 0, 1, 0,
            NULL, 0, NULL, 0, NULL, 0, 0 };
        dt_cross_entropy_back_args back = { DT_F32, out, table, lse, ids, 2, 3, 0, up, 1, 0, 0, 0,
            NULL, 0, 0, 0 };
        CHECK(t->cross_entropy(&loss_args, queue) == DT_OK);
        CHECK(t->sync(queue) == (wrong_label ? DT_ERR_ARG : DT_OK));
        CHECK((row_loss[1] == 0) == wrong && row_loss[0] > 2 && *loss == row_loss[0] + row_loss[1]);
        CHECK(t->cross_entropy_back(&back, queue) == DT_OK);
        CHECK(t->sync(queue) == (wrong_label ? DT_ERR_ARG : DT_OK) && (out[4] == 0) == wrong &&
              out[0] < 0);
    }
    for (const array &x : a) CHECK(x.guards_hold());
    check_no_mistake("indices out of range");
    dt_cuda_close(queue);
}

static void test_memory() {
    const dt_kernels *t = dt_kernels_cuda();
    float there[5] = { 1, 2, 3, 4, 5 }, back[5] = { 0 };
    CHECK(!strcmp(t->name, "cuda"));
    CHECK(t->alloc(t->user, (size_t)1 << 50) == NULL);
    float *p = (float *)t->alloc(t->user, sizeof there);
    if (!CHECK(p)) return;
    CHECK(t->move(p, there, sizeof there, NULL) == DT_OK &&
          t->move(back, p, sizeof back, NULL) == DT_OK);
    CHECK(t->move(NULL, NULL, 0, NULL) == DT_OK);
    CHECK(t->sync(NULL) == DT_OK && !memcmp(there, back, sizeof back));
    t->free(t->user, p, sizeof there);
}

// ==== 8. A small model through the ops ==========================================================

// CUDA's table, with missing entries taken from the CPU's; they can be mixed because device memory
// is host memory here. Calls and memory are counted. The counters are global, so only one chain
// runs at a time.
static struct { size_t live, calls, wrong_streams; } seen;
static void *the_stream;

static void *counting_alloc(void *, size_t bytes) {
    seen.live += bytes;
    return dt_kernels_cuda()->alloc(NULL, bytes);
}

static void counting_free(void *, void *p, size_t bytes) {
    seen.live -= bytes;
    dt_kernels_cuda()->free(NULL, p, bytes);
}

#define COUNTED(k) \
    static dt_status counting_##k(const dt_##k##_args *args, void *stream) { \
        seen.calls++; \
        seen.wrong_streams += stream != the_stream; \
        return dt_kernels_cuda()->k(args, stream); \
    }
COUNTED(norm)
COUNTED(norm_back)
COUNTED(unary)
COUNTED(unary_back)
COUNTED(binary)
COUNTED(sum)
COUNTED(embedding)
COUNTED(embedding_back)
COUNTED(cross_entropy)
COUNTED(cross_entropy_back)
#undef COUNTED

static dt_kernels mixed_table() {
    dt_kernels t = *dt_kernels_cuda();
#define FROM_CPU(k) \
    if (!t.k) t.k = dt_kernels_cpu()->k;
    DT_KERNELS(FROM_CPU)
#undef FROM_CPU
    t.alloc = counting_alloc;
    t.free = counting_free;
    t.norm = counting_norm;
    t.norm_back = counting_norm_back;
    t.unary = counting_unary;
    t.unary_back = counting_unary_back;
    t.binary = counting_binary;
    t.sum = counting_sum;
    t.embedding = counting_embedding;
    t.embedding_back = counting_embedding_back;
    t.cross_entropy = counting_cross_entropy;
    t.cross_entropy_back = counting_cross_entropy_back;
    return t;
}

struct model {
    dt_tensor *table, *gain, *bias, *w1, *b1, *w2, *b2;
};
enum { ROWS = 13, C = 20, H = 37, VOCAB = 11 };

static void model_make(dt_ctx *ctx, model *m) {
    m->table = dt_param(ctx, "table", DT_SHAPE(VOCAB, C), DT_NORMAL(1.0));
    m->gain = dt_param(ctx, "gain", DT_SHAPE(C), DT_ONES);
    m->bias = dt_param(ctx, "bias", DT_SHAPE(C), DT_NORMAL(0.1));
    m->w1 = dt_param(ctx, "w1", DT_SHAPE(H, C), DT_NORMAL(0.2));
    m->b1 = dt_param(ctx, "b1", DT_SHAPE(H), DT_ZEROS);
    m->w2 = dt_param(ctx, "w2", DT_SHAPE(C, H), DT_NORMAL(0.2));
    m->b2 = dt_param(ctx, "b2", DT_SHAPE(C), DT_ZEROS);
}

// x + mlp(layernorm(x)), as in a transformer; the second bias through dt_add
static dt_tensor *mlp(dt_tensor *x, void *user) {
    model *m = (model *)user;
    dt_tensor *h = dt_gelu(dt_linear(dt_layernorm(x, m->gain, m->bias, 0), m->w1, m->b1));
    return dt_add(dt_add(x, dt_linear(h, m->w2, NULL)), m->b2);
}

static dt_tensor *chain_loss(dt_ctx *ctx, model *m, int micro) {
    int32_t ids[ROWS], labels[ROWS];
    for (int r = 0; r < ROWS; r++) {
        ids[r] = (r * 3 + micro) % VOCAB;
        labels[r] = r == 5 ? -1 : (r * 7 + micro) % VOCAB;
    }
    dt_tensor *x = dt_embedding(m->table, dt_input(ctx, DT_I32, DT_SHAPE(ROWS), ids));
    x = dt_block(ctx, mlp, x, m);
    x = dt_block(ctx, mlp, x, m);
    dt_tensor *logits = dt_linear(x, m->table, NULL);
    dt_tensor *loss =
        dt_cross_entropy(logits, dt_input(ctx, DT_I32, DT_SHAPE(ROWS), labels), 2 * (ROWS - 1));
    return dt_loss(loss, loss, 0.125); // adds to the gradient of the f64 scalar
}

// Three SGD steps of two micro-batches. Returns the 6 losses, the first step's gradients and the
// final parameters.
static std::vector<double> run_chain(const dt_kernels *table) {
    std::vector<double> out(6);
    dt_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kernels = table;
    desc.stream = the_stream;
    dt_ctx *ctx = dt_ctx_make(desc);
    model m;
    model_make(ctx, &m);
    for (int step = 1; step <= 3; step++) {
        for (int micro = 0; micro < 2; micro++) {
            dt_micro(ctx, micro, 2);
            dt_tensor *loss = chain_loss(ctx, &m, micro);
            dt_backward(loss);
            out[(size_t)(2 * (step - 1) + micro)] = dt_item(loss);
            dt_reset(ctx);
        }
        for (int u = 0; u < dt_bucket_count(ctx) && dt_error(ctx) == DT_OK; u++) {
            dt_bucket *unit = dt_bucket_get(ctx, u);
            std::vector<float> host(unit->padded);
            dt_sgd_args args = { DT_F32, unit->data, unit->grad, NULL, unit->padded, 0.02, 0, 0.1,
                1, step, DT_F32, NULL };
            ctx->kernels.move(host.data(), unit->grad, unit->padded * sizeof(float), the_stream);
            if (step == 1) out.insert(out.end(), host.begin(), host.end());
            CHECK(ctx->kernels.sgd(&args, the_stream) == DT_OK);
        }
        dt_clear_grads(ctx);
    }
    for (int i = 0; i < dt_param_count(ctx); i++) {
        std::vector<float> host((size_t)dt_count(dt_param_get(ctx, i)->shape));
        dt_read(dt_param_get(ctx, i), host.data());
        out.insert(out.end(), host.begin(), host.end());
    }
    CHECK_MSG(dt_error(ctx) == DT_OK, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    return out;
}

static void test_chain() {
    dt_cuda_desc desc = { 0, NULL, 0 };
    char text[64] = "";
    std::vector<double> want = run_chain(dt_kernels_cpu()), first;
    const dt_kernels table = mixed_table();
    the_stream = dt_cuda_open(desc, text, sizeof text);
    if (!CHECK_MSG(the_stream, "%s", text)) return;
    for (const auto &o : ORDERS) {
        memset(&seen, 0, sizeof seen);
        dtc_set_order(o.order, o.seed);
        std::vector<double> got = run_chain(&table);
        dtc_set_order(DTC_FORWARD, 0);
        check_no_mistake("the chain");
        if (first.empty()) first = got;
        CHECK(got == first);
        size_t wrong = got.size() != want.size();
        for (size_t k = 0; k < got.size() && k < want.size(); k++)
            wrong += !(fabs(got[k] - want[k]) < 2e-6 * fmax(1, fabs(want[k])));
        CHECK_MSG(wrong == 0, "%zu of %zu numbers differ from the CPU's", wrong, want.size());
        CHECK(want[4] > 0 && want[4] < want[0] && want[5] < want[1]); // the losses fall
        CHECK(seen.live == 0);
        CHECK(seen.wrong_streams == 0);
        CHECK_MSG(
            // a block calls 11 kernels, two of them to recompute outputs; the loss calls 2
            seen.calls == 6 * (2 * 11 + 2), "%zu kernel calls", seen.calls);
    }
    dt_cuda_close(the_stream);
}

static void quiet(void *, int, int, const char *) {}

// The error of a step of ops on a table without pair_loss.
static void compare_op_error(
    dt_status status, const char *text, const std::function<void(dt_ctx *ctx)> &step) {
    dt_host host = *dt_host_default();
    dt_kernels table = *dt_kernels_cuda();
    dt_ctx_desc desc;
    host.log = quiet;
    table.pair_loss = NULL;
    memset(&desc, 0, sizeof desc);
    desc.kernels = &table;
    desc.host = &host;
    dt_ctx *ctx = dt_ctx_make(desc);
    step(ctx);
    CHECK(dt_error(ctx) == status);
    CHECK_MSG(strstr(dt_error_text(ctx), text), "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
}

static dt_tensor *zeros_of(dt_ctx *ctx, dt_dtype dtype) {
    const double x[6] = { 0 };
    return dt_input(ctx, dtype, DT_SHAPE(2, 3), x);
}

// A missing kernel is named; a bad label is an error when the loss is read.
static void test_op_errors() {
    compare_op_error(
        DT_ERR_UNSUPPORTED, "kernel pair_loss on cuda: not available", [](dt_ctx *ctx) {
            dt_tensor *t = zeros_of(ctx, DT_F32);
            dt_mse(t, t, 1);
        });
    compare_op_error(DT_ERR_UNSUPPORTED, "kernel unary on cuda: not available",
        [](dt_ctx *ctx) { dt_gelu(zeros_of(ctx, DT_F64)); });
    compare_op_error(DT_ERR_ARG, "a label or a row outside of its table", [](dt_ctx *ctx) {
        const int32_t labels[2] = { 0, 3 };
        dt_tensor *t = zeros_of(ctx, DT_F32);
        dt_tensor *loss = dt_cross_entropy(t, dt_input(ctx, DT_I32, DT_SHAPE(2), labels), 2);
        CHECK(dt_error(ctx) == DT_OK);
        dt_item(loss);
    });
}

// ==== 9. Tests that need cuda_on_cpu.h ==========================================================

#ifndef CUDA_ON_GPU // a real device does not come back after a failed kernel, and its driver cannot be another one

__global__ void stuck(int some) {
    if ((int)threadIdx.x < some) __syncthreads();
}

// After a failed kernel the device is lost.
static void test_lost_device() {
    const dt_kernels *t = dt_kernels_cuda();
    float back[5] = { 0 };
    float *p = (float *)t->alloc(t->user, sizeof back);
    DT_LAUNCH(stuck, 1, 64, 0, 0, 3);
    dt_fill_args fill_args = { DT_F32, p, 5, 7 };
    dt_cross_entropy_args loss_args = { DT_F32, NULL, NULL, NULL, p, (int32_t *)p, 5, 1, 0, 1, 0,
        NULL, 0, NULL, 0, NULL, 0, 0 };
    CHECK(t->fill(&fill_args, NULL) == DT_ERR_DEVICE);
    CHECK(t->cross_entropy(&loss_args, NULL) == DT_ERR_DEVICE);
    CHECK(t->sync(NULL) == DT_ERR_DEVICE);
    CHECK(t->move(back, p, sizeof back, NULL) == DT_ERR_DEVICE);
    CHECK(dtc_error() && strstr(dtc_error(), "divergent barrier"));
    dtc_clear_error();
    CHECK(t->fill(&fill_args, NULL) == DT_OK && p[4] == 7);
    t->free(t->user, p, sizeof back);
    compare_op_error(DT_ERR_DEVICE, "DT_ERR_DEVICE", [](dt_ctx *ctx) {
        dt_tensor *x = zeros_of(ctx, DT_F32);
        DT_LAUNCH(stuck, 1, 64, 0, 0, 3);
        dt_gelu(x);
        CHECK(dtc_error() != NULL);
        dtc_clear_error();
    });
}

static void test_ready() {
    const dtc_machine here = dtc_this_machine;
    char text[64] = "x", small[5];
    CHECK(dt_cuda_ready(text, sizeof text) == DT_OK && text[0] == 0);
    CHECK(dt_cuda_ready(NULL, 0) == DT_OK);
    dtc_this_machine = { 0, 0, cudaErrorInsufficientDriver, 0, 0, 0 };
    CHECK(dt_cuda_ready(text, sizeof text) == DT_ERR_DEVICE &&
          !strcmp(text, "no NVIDIA driver found"));
    CHECK(dt_cuda_ready(small, sizeof small) == DT_ERR_DEVICE && !strcmp(small, "no N"));
    CHECK(dt_cuda_ready(NULL, 0) == DT_ERR_DEVICE);
    dtc_this_machine = { 0, 11000, cudaErrorInsufficientDriver, 0, 0, 0 };
    CHECK(dt_cuda_ready(text, sizeof text) == DT_ERR_DEVICE &&
          !strcmp(text, "cudaErrorInsufficientDriver"));
    dtc_this_machine = { 0, 13000, cudaErrorNoDevice, 0, 0, 0 };
    CHECK(dt_cuda_ready(text, sizeof text) == DT_ERR_DEVICE && !strcmp(text, "cudaErrorNoDevice"));
    dtc_this_machine = { 0, 13000, cudaSuccess, 0, 0, 0 };
    CHECK(dt_cuda_ready(text, sizeof text) == DT_ERR_DEVICE && !strcmp(text, "cudaErrorNoDevice"));
    char advice[160] = "";
    dtc_this_machine = { 1, 13000, cudaSuccess, 90, 75, 32 };
    CHECK(dt_cuda_ready(advice, sizeof advice) == DT_OK);
    CHECK(!strcmp(advice,
        "this build is for sm_75 and the GPU is an sm_90: nvcc -arch=sm_90a makes it faster"));
    dtc_this_machine = { 1, 13000, cudaSuccess, 90, 90,
        32 }; // code without wgmma: kernels that use it are empty
    CHECK(dt_cuda_ready(advice, sizeof advice) == DT_OK);
    CHECK(!strcmp(advice,
        "this build is for sm_90 and the GPU is an sm_90: nvcc -arch=sm_90a makes it faster"));
    dtc_this_machine = { 1, 13000, cudaSuccess, 80, 0, 0 }; // code for sm_90a only
    CHECK(dt_cuda_ready(advice, sizeof advice) == DT_ERR_DEVICE);
    CHECK(!strcmp(advice, "this build has no code for an sm_80: nvcc -arch=sm_80"));
    dtc_this_machine = { 1, 13000, cudaSuccess, 103, 100, 32 };
    CHECK(dt_cuda_ready(advice, sizeof advice) == DT_OK && !advice[0]);
    dtc_this_machine = here;
}

static void keep_notices(void *user, int level, int, const char *text) {
    if (level == DT_LOG_NOTICE) static_cast<std::vector<std::string> *>(user)->push_back(text);
}

// A context without a given table uses the GPU, with a queue that it opens and closes. Without a
// GPU it runs on the CPU, and rank 0 of a job logs one notice.
static void test_default() {
    const dtc_machine here = dtc_this_machine;
    std::vector<std::string> notices;
    dt_host host = *dt_host_default();
    dt_ctx_desc desc;
    host.log = keep_notices;
    host.user = &notices;
    memset(&desc, 0, sizeof desc);
    desc.host = &host;
    for (desc.rank = 0; desc.rank < 3; desc.rank++) {
        desc.local_rank = desc.rank; // on a machine with one device
        dt_ctx *ctx = dt_ctx_make(desc);
        CHECK(!strcmp(dt_ctx_kernels(ctx)->name, "cuda") && dt_error(ctx) == DT_OK);
        CHECK(dt_ctx_stream(ctx) && dt_cuda_stream(dt_ctx_stream(ctx)) &&
              dt_cuda_device(dt_ctx_stream(ctx)) == 0);
        dt_ctx_free(ctx);
    }
    CHECK(notices.empty());
    dtc_this_machine = { 0, 0, cudaErrorInsufficientDriver, 0, 0, 0 };
    for (desc.rank = 0; desc.rank < 3; desc.rank++) {
        dt_ctx *ctx = dt_ctx_make(desc);
        CHECK(!strcmp(dt_ctx_kernels(ctx)->name, "cpu") && dt_error(ctx) == DT_OK);
        dt_ctx_free(ctx);
    }
    CHECK(notices.size() == 1);
    CHECK(
        strstr(notices[0].c_str(), "no CUDA device (no NVIDIA driver found): running on the CPU"));
    desc.kernels = dt_kernels_cuda(); // requested explicitly: without a GPU the run fails
    host.log = quiet;
    dt_ctx *ctx = dt_ctx_make(desc);
    CHECK(dt_error(ctx) == DT_ERR_DEVICE &&
          strstr(dt_error_text(ctx), "cudaErrorInsufficientDriver"));
    dt_ctx_free(ctx);
    dtc_this_machine = here;
}

#endif

// ==== 10. All ===================================================================================

static void test_in_type() {
    test_binary();
    test_where();
    test_unary();
    test_glu();
    test_dropout();
    test_sum();
    test_cumsum();
    test_patches();
    test_pool();
    test_max_and_topk();
    test_spread();
    test_softmax();
    test_rope();
    test_embedding();
    test_norm();
    test_cross_entropy();
    for (int kind = -1; kind <= DT_PAIR_BCE_TARGET + 1; kind++)
        test_pair_loss(kind); // -1, 3: refused
    compare_square_sums(TYPE, EXACT);
    test_optimizers();
}

static void test_other_kernels() {
    test_fill();
    test_copy();
    test_reduce();
    test_permute();
    test_cast();
    test_init();
    test_digest();
    test_quantize();
    compare_square_sums(DT_F64, 0); // nvcc fuses an f64 product with its sum
    for (dt_dtype type : { DT_BF16, DT_F16, DT_F32 }) {
        if (type == DT_F16 && CUDA_ORDERS == 1) continue; // the same code paths as bf16
        TYPE = type;
        test_in_type();
    }
    test_signs();
    if (CUDA_ORDERS > 1) test_several_rounds();
    test_types();
    test_bad_indices();
    test_memory();
    test_chain();
    test_op_errors();
#ifndef CUDA_ON_GPU
    test_lost_device();
    test_ready();
    test_default();
#endif
}

#endif
