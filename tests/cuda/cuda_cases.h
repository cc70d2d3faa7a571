// cuda_cases.h - compares kernels of dt_kernels.cu with the CPU's: arrays and their comparison
//
// The kernels run through cuda_on_cpu.h, so no GPU and no CUDA toolkit are needed. Each call is
// made once with the CPU's table and, on copies of the same memory, in up to three lane orders with
// CUDA's table (draw_orders). The status must agree, results must be within 1e-6 (equal bits where
// the kernel promises them), the orders must agree in every bit, and inputs and the bytes around
// every array must be unchanged. 16-bit results may differ by one more rounding.
//
// With -DCUDA_ON_GPU the kernels run on a GPU (cuda_on_gpu.h), three times instead of in three
// orders.

#ifndef CUDA_CASES_H
#define CUDA_CASES_H

#include "tests/support/check.h"
#ifdef CUDA_ON_GPU
#include "tests/cuda/cuda_on_gpu.h"
#else
#include "tests/cuda/cuda_on_cpu.h"
#endif

#define DT_IMPLEMENTATION
#include "dt_tensor.h"

#ifdef CUDA_ON_GPU // dt_kernels.o does not tell the sizes that cases are made for
enum { BLOCK = 256, MAX_BLOCKS = 4096, FILL_BLOCKS = 264, OWNED_ROWS = 32 };
#else
#include "dt_kernels.cu"
using namespace dt_cuda;
static_assert(BLOCK == 256 && MAX_BLOCKS == 4096 && FILL_BLOCKS == 264 && OWNED_ROWS == 32,
    "cases on a GPU are made for these");
#endif

#ifdef DTC_QUEUED
#include "tests/cuda/fake_cuda.h"
#endif

#include <cmath>
#include <initializer_list>
#include <vector>

static const struct {
    int order;
    unsigned seed;
} ORDERS[] = { { DTC_FORWARD, 0 }, { DTC_REVERSE, 0 }, { DTC_PERMUTED, 1 } };

#ifndef CUDA_ORDERS // the most lane orders per case; test_cuda_races.cc sets one
#define CUDA_ORDERS 3
#endif

#ifdef DTC_ASAN
static const size_t GUARD = 0; // ASan checks the end
#else
static const size_t GUARD = 32;
#endif

// Values of array.floor. SCRATCH: contents are not compared; EXACT: equal bits, or both NaN.
enum { SCRATCH = -1, EXACT = -2 };

// The memory of one argument. It begins `offset` bytes after a multiple of 64 and ends where the
// allocation ends. Errors are relative to the value, or to `floor` if the value is smaller: the
// magnitude of terms that cancel.
struct array {
    dt_dtype dtype;
    size_t count, offset;
    double floor;
    double grain = 0; // magnitude of intermediate values that the kernel rounds to 16 bits
    char *base;

    array(dt_dtype dtype_, size_t count_, size_t offset_, double floor_)
        : dtype(dtype_), count(count_), offset(offset_), floor(floor_), base(make()) {}
    array(const array &a)
        : dtype(a.dtype), count(a.count), offset(a.offset), floor(a.floor), grain(a.grain),
          base(make()) {
        memcpy(data(), a.data(), bytes());
    }
    array &operator=(const array &) = delete;
#ifdef DTC_QUEUED // memory of a device of fake_cuda.c
    ~array() { cudaFree(base); }
    static int new_memory(void **p, size_t bytes) { return cudaMalloc(p, bytes); }
#elif defined(CUDA_ON_GPU) // which the host shares
    ~array() { dtc_pinned.give(base); }
    static int new_memory(void **p, size_t bytes) { return dtc_pinned.get(p, bytes); }
#else
    ~array() { free(base); }
    static int new_memory(void **p, size_t bytes) { return posix_memalign(p, 64, bytes); }
#endif

    char *make() const {
        void *p = NULL;
        if (new_memory(&p, offset + bytes() + GUARD) != 0) exit(1);
        memset(p, 0xa5, offset + bytes() + GUARD);
        return static_cast<char *>(p);
    }
    size_t bytes() const { return count * dt_dtype_size(dtype); }
    void *data() const { return base + offset; }
    float *f() const { return reinterpret_cast<float *>(base + offset); }
    double *d() const { return reinterpret_cast<double *>(base + offset); }
    int32_t *i() const { return reinterpret_cast<int32_t *>(base + offset); }
    double at(size_t k) const { return dt__number(dtype, data(), k); }

    bool guards_hold() const {
        for (size_t k = 0; k < offset; k++)
            if (base[k] != '\xa5') return false;
        for (size_t k = 0; k < GUARD; k++)
            if (base[offset + bytes() + k] != '\xa5') return false;
        return true;
    }
};
typedef std::vector<array> arrays;

static uint64_t random_state = 1;

static double random_number() { // in [-2, 2), repeatable
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(random_state >> 40) / (1 << 22) - 2;
}

// Placement of arrays: all at multiples of 16, all odd, only the first odd, at multiples of 8.
enum { ALIGNED, ODD, FIRST_ODD, HALF, PLACEMENTS };

static size_t offset_for(int placement, size_t index, dt_dtype dtype) {
    size_t odd = dt_dtype_size(dtype);
    return placement == ODD         ? odd
           : placement == FIRST_ODD ? (index == 0 ? odd : 0)
           : placement == HALF      ? 8
                                    : 0;
}

// Appends a new array with random numbers. floor: see struct array.
static array &push(
    arrays &all, int placement, size_t count, double floor, dt_dtype dtype = DT_F32) {
    if (all.capacity() < 16) all.reserve(16); // so that references to elements stay valid
    all.emplace_back(dtype, count, offset_for(placement, all.size(), dtype), floor);
    array &a = all.back();
    for (size_t k = 0; k < count; k++)
        dt__set_number(dtype, a.data(), k,
            random_number() * (dtype == DT_I32      ? 1e9
                                  : dtype == DT_I64 ? 9e18
                                  : dtype == DT_U8  ? 256
                                                    : 1));
    for (size_t k = 0; k < count && dtype == DT_I64; k++) // more digits than a double has
        ((int64_t *)a.data())[k] += (int64_t)(k * 7919 % 100003);
    return a;
}

// The distance from a number to the next 16-bit number; denormals use that of the smallest normal
// number.
static double step_of(dt_dtype dtype, double x) {
    int least = dtype == DT_BF16 ? -126 : -14, exponent = x != 0 ? std::ilogb(x) : least;
    return ldexp(1, (exponent > least ? exponent : least) - (dtype == DT_BF16 ? 7 : 10));
}

static bool close_enough(const array &a, double got, double want) {
    if (std::isnan(want)) return std::isnan(got);
    double more = dt_dtype_size(a.dtype) == 2 && !std::isinf(want) ? step_of(a.dtype, want) : 0;
    return got == want || fabs(got - want) <= 1e-6 * fmax(fabs(want), a.floor) + more + a.grain;
}

// True if `got` equals `want` within tolerance; prints the first difference. Of 16-bit results that
// are only rounded, few may differ at all.
static bool agrees(const std::string &what, size_t index, const array &got, const array &want) {
    if (got.floor == SCRATCH || got.bytes() == 0) return true;
    if (memcmp(got.data(), want.data(), got.bytes()) == 0) return true;
    size_t other = 0,
           some = dt_dtype_size(got.dtype) == 2 && got.grain == 0 ? 2 + got.count / 20 : got.count;
    for (size_t k = 0; k < got.count; k++) {
        bool fine = got.floor == EXACT ? memcmp((char *)got.data() + k * dt_dtype_size(got.dtype),
                                             (char *)want.data() + k * dt_dtype_size(got.dtype),
                                             dt_dtype_size(got.dtype)) == 0
                                       : close_enough(got, got.at(k), want.at(k));
        other += got.at(k) != want.at(k) && !std::isnan(want.at(k));
        fine |= std::isnan(got.at(k)) && std::isnan(want.at(k));
        if (fine && other <= some) continue;
        printf("%s: array %zu, element %zu of %zu: %.9g, not %.9g\n", what.c_str(), index, k,
            got.count, got.at(k), want.at(k));
        return false;
    }
    return true;
}

static bool same_bits(const array &a, const array &b) {
    return a.floor == SCRATCH || a.bytes() == 0 || memcmp(a.data(), b.data(), a.bytes()) == 0;
}

// Reports an abandoned launch as a failure, and clears it so that the next call runs.
static void check_no_mistake(const std::string &what) {
#ifdef DTC_QUEUED
    const char *error = fake_cuda_error();
    CHECK_MSG(!error, "%s: %s", what.c_str(), error);
    fake_cuda_clear_error();
#else
    const char *error = dtc_error();
    CHECK_MSG(!error, "%s: %s", what.c_str(), error);
    dtc_clear_error();
#endif
}

typedef std::function<dt_status(const dt_kernels *table, arrays &a)> runner;

// Call before the host reads what a kernel writes. The CPU's table needs no wait.
static dt_status wait_for(const dt_kernels *t, void *queue) {
    return t->sync ? t->sync(queue) : DT_OK;
}

// The lane orders of a case, a range of ORDERS, from its number. A quarter of the cases, drawn by
// number, have all orders, and the others one order each, by turns. The race detector takes ten
// times as long, and sees an eighth of the cases. With CASES=all, on a GPU and in
// test_cuda_blas.cc, all cases have all orders.
struct order_range {
    size_t begin, end;
};
static order_range draw_orders(size_t orders) {
    static uint32_t n;
#if defined(CUDA_ON_GPU) || defined(DTC_QUEUED)
    static const bool all = true;
#else
    static const bool all = check_all_cases();
#endif
    uint32_t number = n++;
    const uint32_t one_in = CUDA_ORDERS == 1 ? 8 : 4;
    if (all || (number * 2654435761u >> 16) % one_in == 0) return { 0, orders };
    if (CUDA_ORDERS == 1) return { 0, 0 };
    return { number % orders, number % orders + 1 };
}

// Makes one call with both tables and compares, as described at the top.
static void compare(
    const std::string &what, const arrays &start, const runner &run, size_t orders = 3) {
    const order_range range = draw_orders(orders < CUDA_ORDERS ? orders : CUDA_ORDERS);
    if (range.begin == range.end) return;
    arrays want = start, first;
    dt_status status = run(dt_kernels_cpu(), want);
    for (size_t o = range.begin; o < range.end; o++) {
        arrays got = start;
        dtc_set_order(ORDERS[o].order, ORDERS[o].seed);
        dt_status answer = run(dt_kernels_cuda(), got);
        if (answer == DT_OK) answer = wait_for(dt_kernels_cuda(), NULL);
        dtc_set_order(DTC_FORWARD, 0);
        check_no_mistake(what);
        CHECK_MSG(answer == status, "%s: %s, not %s", what.c_str(), dt_status_name(answer),
            dt_status_name(status));
        if (o == range.begin)
            for (const array &a : got) first.push_back(a);
        for (size_t i = 0; i < got.size() && status == DT_OK; i++) {
            CHECK_MSG(agrees(what, i, got[i], want[i]), "%s: array %zu differs from the CPU's",
                what.c_str(), i);
            CHECK_MSG(same_bits(got[i], first[i]),
                "%s: array %zu differs from the first lane order", what.c_str(), i);
        }
        for (size_t i = 0; i < got.size(); i++)
            CHECK_MSG(got[i].guards_hold(), "%s: wrote outside array %zu", what.c_str(), i);
    }
}

#endif
