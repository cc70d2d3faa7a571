/* rank_data.h - the data that ranks send in the tests of dt_comm.h, and the expected results by
   naive arithmetic.

   Included after dt_comm.h with its implementation. */
#ifndef RANK_DATA_H
#define RANK_DATA_H

#include "tests/support/check.h"

#include <stdlib.h>

enum { MAX_RANKS = 32 };

__attribute__((unused)) static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 31) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    return x ^ x >> 32;
}

/* Element i of rank r's send buffer. A float sum in another order has other bits; an int product
   does not overflow. */
static double element(int rank, size_t i, dt_dtype dtype, dt_op op) {
    uint64_t h = ((uint64_t)rank * 1000003u + i) * 0x9E3779B97F4A7C15u;
    h ^= h >> 29;
    if (dtype == DT_I32 || dtype == DT_I64) return (double)(int)(h % 7) - 3;
    if (dtype == DT_U8) return (double)(int)(h % 7);
    double x = (double)(h % 2000003u) / 1000001.5 - 1; /* [-1, 1) */
    return op == DT_PROD ? 1 + x / 8 : x * (h & 1 ? 100 : 1);
}

/* Rounds a float to bf16 or f16, to nearest with ties to even, with double arithmetic; shares no
   code with the library. */
__attribute__((unused)) static double rounded(dt_dtype dtype, float x) {
    int exponent;
    double part = frexp((double)x, &exponent); /* in [1/2, 1) */
    int digits = dtype == DT_BF16 ? 8 : exponent < -13 ? 11 + exponent + 13 : 11;
    return ldexp(nearbyint(ldexp(part, digits)), exponent - digits);
}

__attribute__((unused)) static int narrow(dt_dtype dtype) {
    return dtype == DT_BF16 || dtype == DT_F16;
}

/* The element that a rank really sends: rounded to its type. */
__attribute__((unused)) static double sent_value(int rank, size_t i, dt_dtype dtype, dt_op op) {
    double x = element(rank, i, dtype, op);
    return narrow(dtype) ? rounded(dtype, (float)x) : dtype == DT_F32 ? (double)(float)x : x;
}

/* Stores x, which the type represents exactly: bf16 is the upper half of the float; f16 is packed
   from its exponent and mantissa. */
__attribute__((unused)) static void put(void *buf, dt_dtype dtype, size_t i, double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, small = (uint32_t)ldexp(fabs(x), 24),
             normal = (bits >> 13) - (112u << 10);
    if (dtype == DT_BF16)
        ((uint16_t *)buf)[i] = (uint16_t)(bits >> 16);
    else if (dtype == DT_F16)
        ((uint16_t *)buf)[i] =
            (uint16_t)(sign | (fabs(x) < ldexp(1, -14) ? small : normal & 0x7fff));
    else if (dtype == DT_F32)
        ((float *)buf)[i] = f;
    else if (dtype == DT_F64)
        ((double *)buf)[i] = x;
    else if (dtype == DT_U8)
        ((uint8_t *)buf)[i] = (uint8_t)x;
    else if (dtype == DT_I64)
        ((int64_t *)buf)[i] = (int64_t)x;
    else
        ((int32_t *)buf)[i] = (int32_t)x;
}

__attribute__((unused)) static double get(const void *buf, dt_dtype dtype, size_t i) {
    if (dtype == DT_F32) return ((const float *)buf)[i];
    if (dtype == DT_F64) return ((const double *)buf)[i];
    if (dtype == DT_I32) return ((const int32_t *)buf)[i];
    if (dtype == DT_U8) return ((const uint8_t *)buf)[i];
    if (dtype == DT_I64) return (double)((const int64_t *)buf)[i];
    uint32_t h = ((const uint16_t *)buf)[i], bits = h << 16;
    float f;
    memcpy(&f, &bits, 4);
    if (dtype == DT_BF16) return f;
    int exponent = h >> 10 & 31, part = h & 1023;
    double x = exponent ? ldexp(1024 + part, exponent - 25) : ldexp(part, -24);
    return h & 0x8000 ? -x : x;
}

#define FOLD(T, a, b) \
    (op == DT_MAX       ? ((b) > (a) ? (b) : (a)) \
        : op == DT_MIN  ? ((b) < (a) ? (b) : (a)) \
        : op == DT_PROD ? (T)((a) * (b)) \
                        : (T)((a) + (b)))

/* The naive reduction of element i over n ranks, in rank order. Each step is rounded to the type;
   bf16 and f16 are reduced as floats and rounded once. */
__attribute__((unused)) static double naive(int n, size_t i, dt_dtype dtype, dt_op op) {
    double d = sent_value(0, i, dtype, op);
    float f = (float)d;
    int32_t k = (int32_t)d;
    for (int r = 1; r < n; r++) {
        double dr = sent_value(r, i, dtype, op);
        float fr = (float)dr;
        int32_t kr = (int32_t)dr;
        f = FOLD(float, f, fr);
        d = FOLD(double, d, dr);
        k = FOLD(int32_t, (int64_t)k, (int64_t)kr); /* a product wraps */
    }
    if (op == DT_AVG) f /= (float)n, d /= n, k /= n;
    return narrow(dtype)     ? rounded(dtype, f)
           : dtype == DT_F32 ? (double)f
           : dtype == DT_F64 ? d
           : dtype == DT_U8  ? (double)(uint8_t)k
                             : (double)k;
}

/* ---- integers that wrap ---- */

__attribute__((unused)) static int is_whole(dt_dtype dtype) {
    return dtype == DT_U8 || dtype == DT_I64;
}

/* Element i of rank r's send buffer of u8 or i64, with all bits random: neither a double nor a
   float represents most i64, and almost every sum and product wraps. */
static uint64_t whole(int rank, size_t i) { return mix(((uint64_t)rank << 40) + i); }

/* Stores whole(rank, i) or, in the other types, sent_value(rank, i) as element k. */
__attribute__((unused)) static void put_sent(
    void *buf, dt_dtype dtype, size_t k, int rank, size_t i, dt_op op) {
    if (dtype == DT_I64)
        ((uint64_t *)buf)[k] = whole(rank, i);
    else if (dtype == DT_U8)
        ((uint8_t *)buf)[k] = (uint8_t)whole(rank, i);
    else
        put(buf, dtype, k, sent_value(rank, i, dtype, op));
}

/* Stores the naive reduction of element i over n ranks as element k. Two's complement: the low bits
   of a sum or product depend only on the low bits of its operands. */
__attribute__((unused)) static void put_naive(
    void *buf, dt_dtype dtype, size_t k, int n, size_t i, dt_op op) {
    if (!is_whole(dtype)) {
        put(buf, dtype, k, naive(n, i, dtype, op));
        return;
    }
    uint64_t mask = dtype == DT_U8 ? 255 : ~(uint64_t)0, x = whole(0, i) & mask;
    for (int r = 1; r < n; r++) {
        uint64_t y = whole(r, i) & mask;
        int greater = (int64_t)y > (int64_t)x; /* a masked u8 is not negative */
        x = op == DT_MAX    ? (greater ? y : x)
            : op == DT_MIN  ? (greater ? x : y)
            : op == DT_PROD ? x * y & mask
                            : (x + y) & mask;
    }
    if (op == DT_AVG) x = (uint64_t)((int64_t)x / n);
    if (dtype == DT_U8)
        ((uint8_t *)buf)[k] = (uint8_t)x;
    else
        ((uint64_t *)buf)[k] = x;
}

#endif
