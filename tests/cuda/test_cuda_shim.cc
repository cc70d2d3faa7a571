// test_cuda_shim.cc - cuda_on_cpu.h runs correct kernels correctly and reports mistakes
//
//     g++ -std=c++17 -O1 -g -Wall -Wextra -fsanitize=address,undefined test_cuda_shim.cc
//
// The first half are kernels like those of dt_kernels.cu, which must give the same bits in every
// lane order. The second half are planted mistakes, which must be reported or change the bits.

#include "tests/support/check.h"
#include "tests/cuda/cuda_on_cpu.h"

#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

typedef std::vector<float> floats;

static const unsigned FULL = 0xffffffffu;
static const struct {
    int order;
    unsigned seed;
} ORDERS[] = { { DTC_FORWARD, 0 }, { DTC_REVERSE, 0 }, { DTC_PERMUTED, 1 }, { DTC_PERMUTED, 2 },
    { DTC_PERMUTED, 3 } };

// Runs `once` in every order. True if all results have equal bits. Stores the first result in
// *first.
template <class Run> static bool same_in_all_orders(Run once, floats *first) {
    bool same = true;
    first->clear();
    for (const auto &o : ORDERS) {
        dtc_set_order(o.order, o.seed);
        floats result = once();
        if (first->empty()) *first = result;
        same &= !memcmp(first->data(), result.data(), result.size() * sizeof(float));
    }
    dtc_set_order(DTC_FORWARD, 0);
    return same;
}

// A repeatable series of numbers whose sum depends on the order of addition.
static floats numbers(size_t n) {
    floats x(n);
    unsigned state = 1;
    for (float &v : x) {
        state = state * 1664525u + 1013904223u;
        v = static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
    }
    return x;
}

// True if the previous launch was abandoned with a text that contains `part`. Clears the error.
static bool reported(const char *part) {
    const char *error = dtc_error();
    bool found = error && strstr(error, part);
    if (!found) printf("wanted \"%s\", got: %s\n", part, error ? error : "nothing");
    found = found && cudaGetLastError() != cudaSuccess;
    dtc_clear_error();
    return found && !dtc_error() && cudaGetLastError() == cudaSuccess;
}

// ==== 1. Correct kernels ========================================================================

static __device__ __forceinline__ float warp_sum(float v) {
    for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}

// The sum over the block, for every thread. WITH_BARRIER false is a planted mistake.
template <bool WITH_BARRIER> static __device__ float block_sum(float v) {
    __shared__ float partial[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    v = warp_sum(v);
    if (lane == 0) partial[warp] = v;
    if (WITH_BARRIER) __syncthreads();
    v = warp_sum(lane < warps ? partial[lane] : 0.0f);
    __syncthreads();
    return v;
}

template <bool WITH_BARRIER>
__global__ void __launch_bounds__(1024) row_sums(float *out, const float *x, int columns) {
    const float *row = x + static_cast<size_t>(blockIdx.x) * columns;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += __ldg(row + i);
    sum = block_sum<WITH_BARRIER>(sum);
    if (threadIdx.x == 0) __stcs(out + blockIdx.x, sum);
}

template <bool WITH_BARRIER> static floats run_row_sums(const floats &x, int rows, int block) {
    floats out(rows);
    DT_LAUNCH(row_sums<WITH_BARRIER>, rows, block, 0, 0, out.data(), x.data(),
        static_cast<int>(x.size()) / rows);
    return out;
}

static void test_block_reduce() {
    const int rows = 5, columns = 1237;
    floats x = numbers(rows * columns), got;
    for (int block : { 32, 96, 256, 1024 }) {
        CHECK(same_in_all_orders([&] { return run_row_sums<true>(x, rows, block); }, &got));
        for (int r = 0; r < rows; r++) {
            double want = 0;
            for (int c = 0; c < columns; c++) want += x[r * columns + c];
            CHECK_MSG(fabs(want - got[r]) < 1e-4, "row %d, block %d: %g", r, block, got[r]);
        }
    }
    CHECK(!dtc_error());
}

// 32 x 32 tiles, 32 x 8 threads; the tile's rows are padded against bank conflicts.
__global__ void transpose(float *out, const float *in, int rows, int columns) {
    DT_DYN_SMEM(float, tile);
    int x = blockIdx.x * 32 + threadIdx.x;
    for (int j = threadIdx.y; j < 32; j += blockDim.y) {
        int y = blockIdx.y * 32 + j;
        if (x < columns && y < rows)
            tile[j * 33 + threadIdx.x] = in[static_cast<size_t>(y) * columns + x];
    }
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x;
    for (int j = threadIdx.y; j < 32; j += blockDim.y) {
        int y = blockIdx.x * 32 + j;
        if (x < rows && y < columns)
            out[static_cast<size_t>(y) * rows + x] = tile[threadIdx.x * 33 + j];
    }
}

static void test_transpose() {
    const int rows = 75, columns = 130;
    floats in = numbers(rows * columns), got;
    CHECK(same_in_all_orders(
        [&] {
            floats out(rows * columns);
            DT_LAUNCH(transpose, dim3((columns + 31) / 32, (rows + 31) / 32), dim3(32, 8),
                32 * 33 * sizeof(float), 0, out.data(), in.data(), rows, columns);
            return out;
        },
        &got));
    int wrong = 0;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) wrong += got[c * rows + r] != in[r * columns + c];
    CHECK_MSG(wrong == 0, "%d of %d elements are wrong", wrong, rows * columns);
    CHECK(!dtc_error());
}

// Inclusive prefix sums, one warp per block of 32 numbers.
__global__ void warp_scan(float *out, const float *in) {
    int lane = threadIdx.x % warpSize, i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = in[i];
    for (int offset = 1; offset < warpSize; offset *= 2) {
        float before = __shfl_up_sync(0xffffffffu, v, offset);
        if (lane >= offset) v += before;
    }
    out[i] = v;
}

static void test_warp_scan() {
    const int n = 4 * 64;
    floats in = numbers(n), got;
    CHECK(same_in_all_orders(
        [&] {
            floats out(n);
            DT_LAUNCH(warp_scan, n / 64, 64, 0, 0, out.data(), in.data());
            return out;
        },
        &got));
    double want = 0;
    for (int i = 0; i < n; i++) {
        want = in[i] + (i % 32 ? want : 0);
        CHECK_MSG(fabs(want - got[i]) < 1e-5, "prefix %d: %g, not %g", i, got[i], want);
    }
    CHECK(!dtc_error());
}

// Each block stores its sum; the last block to finish adds the sums in block order.
__global__ void total(float *sum, float *partial, unsigned *done, const float *x, int n) {
    __shared__ bool last;
    float v = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        v += x[i];
    v = block_sum<true>(v);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = v;
        __threadfence();
        last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    v = threadIdx.x < gridDim.x ? __ldcg(partial + threadIdx.x) : 0.0f;
    v = block_sum<true>(v);
    if (threadIdx.x == 0) *sum = v;
}

static void test_last_block() {
    const int n = 10007, blocks = 9;
    floats x = numbers(n), got;
    unsigned done = 0;
    CHECK(same_in_all_orders(
        [&] {
            floats sum(1), partial(blocks);
            DT_LAUNCH(total, blocks, 128, 0, 0, sum.data(), partial.data(), &done, x.data(), n);
            return sum;
        },
        &got));
    double want = 0;
    for (float v : x) want += v;
    CHECK_MSG(fabs(want - got[0]) < 1e-3, "%g, not %g", got[0], want);
    CHECK(done == 0); // atomicInc has wrapped to 0, ready for the next launch
    CHECK(!dtc_error());
}

// ==== 2. Single operations ======================================================================

// Every shuffle with segments of 8 lanes; out has one row of 32 per shuffle.
__global__ void shuffles(int *out) {
    int lane = threadIdx.x;
    out[0 * 32 + lane] = __shfl_sync(0xffffffffu, lane, 11, 8);
    out[1 * 32 + lane] = __shfl_up_sync(0xffffffffu, lane, 3, 8);
    out[2 * 32 + lane] = __shfl_down_sync(0xffffffffu, lane, 3, 8);
    out[3 * 32 + lane] = __shfl_xor_sync(0xffffffffu, lane, 12, 8);
    out[4 * 32 + lane] = __shfl_sync(0xffffffffu, __shfl_sync(0xffffffffu, lane, lane + 1), 5);
}

// Two halves of a warp take different branches, each with its own mask, and then converge.
__global__ void halves(unsigned *out) {
    unsigned lane = threadIdx.x;
    unsigned v;
    if (lane < 16)
        v = __ballot_sync(0x0000ffffu, lane % 3 == 0);
    else
        v = __any_sync(0xffff0000u, lane == 20) + 2 * __any_sync(0xffff0000u, lane == 2) +
            4 * __all_sync(0xffff0000u, lane > 15) + 8 * __all_sync(0xffff0000u, lane > 16);
    __syncwarp();
    out[lane] = v + __shfl_xor_sync(0xffffffffu, lane, 1);
}

__global__ void barriers(int *out) {
    int i = threadIdx.x + threadIdx.y * blockDim.x + threadIdx.z * blockDim.x * blockDim.y;
    int count = __syncthreads_count(i % 5 == 0);
    int any = __syncthreads_or(i == 17) + 2 * __syncthreads_or(i < 0);
    int all = __syncthreads_and(i >= 0) + 2 * __syncthreads_and(i != 17);
    out[i] = count * 100 + any * 10 + all;
}

static void test_operations() {
    std::vector<int> s(5 * 32), b(60);
    std::vector<unsigned> h(32);
    DT_LAUNCH(shuffles, 1, 32, 0, nullptr, s.data());
    DT_LAUNCH(halves, 1, 32, 0, nullptr, h.data());
    DT_LAUNCH(barriers, 1, dim3(5, 3, 4), 0, nullptr, b.data());
    CHECK(!dtc_error());
    for (int lane = 0; lane < 32; lane++) {
        int first = lane & ~7;
        CHECK(s[lane] == first + 3);
        CHECK(s[32 + lane] == (lane - 3 >= first ? lane - 3 : lane));
        CHECK(s[64 + lane] == (lane + 3 < first + 8 ? lane + 3 : lane));
        CHECK(s[96 + lane] == ((lane ^ 12) < first + 8 ? lane ^ 12 : lane));
        CHECK(s[128 + lane] == 6);
        CHECK(h[lane] == (lane < 16 ? 0x9249u : 5u) + (lane ^ 1));
    }
    for (int v : b) CHECK(v == 12 * 100 + 1 * 10 + 1);
}

__global__ void atomics(int *v, unsigned *u, float *f, unsigned long long *w) {
    int i = threadIdx.x;
    atomicAdd(v, 1);
    atomicSub(v + 1, 2);
    atomicMin(v + 2, -i);
    atomicMax(v + 3, i);
    atomicOr(u, 1u << i);
    atomicAnd(u + 1, ~(1u << i));
    atomicCAS(u + 2, 0, 7);
    atomicExch(u + 3, 9);
    atomicAdd(f, 0.5f);
    atomicAdd(w, 1);
}

__global__ void intrinsics(float *out, float4 v, double half) {
    out[0] = rsqrtf(v.x);
    out[1] = __uint_as_float(__float_as_uint(v.y)) + __int_as_float(__float_as_int(v.z));
    out[2] = __fdividef(v.w, 4.0f) + __expf(0.0f) + __logf(1.0f);
    out[3] = __fmaf_rn(2.0f, 3.0f, __fadd_rn(1.0f, __fmul_rn(2.0f, 2.0f))) + fmaxf(0.0f, -1.0f);
    out[4] = static_cast<float>(__popc(0xf0u) + __ffs(8) + __clz(1) + min(3, 4) + max(3, 4));
    out[5] = static_cast<float>(__umulhi(1u << 31, 6u) * half);
}

static void test_atomics_and_math() {
    int v[4] = { 0, 0, 5, 5 };
    unsigned u[4] = { 0, FULL, 0, 0 };
    float f = 0;
    unsigned long long w = 0;
    DT_LAUNCH(atomics, 1, 32, 0, 0, v, u, &f, &w);
    CHECK(v[0] == 32 && v[1] == -64 && v[2] == -31 && v[3] == 31);
    CHECK(u[0] == FULL && u[1] == 0 && u[2] == 7 && u[3] == 9);
    CHECK(f == 16.0f && w == 32);

    float out[6];
    DT_LAUNCH(intrinsics, 1, 1, 0, 0, out, make_float4(4.0f, 1.5f, 2.0f, 8.0f), 0.5f);
    CHECK(out[0] == 0.5f && out[1] == 3.5f && out[2] == 3.0f && out[3] == 11.0f);
    CHECK(out[4] == 4 + 4 + 31 + 3 + 4 && out[5] == 1.5f);
    CHECK(!dtc_error());
}

// Multiplies tiles of 16-bit numbers in shared memory with ldmatrix and mma, as attention kernels
// do: one warp computes d[16][8] = a[16][K] b[K][8]. b is stored as b[8][K], as mma needs it, or as
// b[K][8].
template <bool bf16, bool b_transposed>
__global__ void tile_product(float *d, const uint16_t *a, const uint16_t *b, int K) {
    DT_DYN_SMEM(uint16_t, tiles); // a[16][16], then b[16][8] or b[8][16]
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    float sum[4] = { 0, 0, 0, 0 };
    for (int k = 0; k < K; k += 16) {
        __syncwarp();
        for (int i = lane; i < 16 * 16; i += 32) tiles[i] = a[i / 16 * K + k + i % 16];
        for (int i = lane; i < 8 * 16; i += 32)
            tiles[256 + i] = b_transposed ? b[i / 16 * K + k + i % 16] : b[k * 8 + i];
        __syncwarp();
        unsigned fa[4], fb[2];
        dtc_ldmatrix_x4(fa, tiles + lane % 16 * 16 + lane / 16 * 8);
        if (b_transposed)
            dtc_ldmatrix_x2(fb, tiles + 256 + lane % 8 * 16 + lane / 8 % 2 * 8);
        else
            dtc_ldmatrix_x2_trans(fb, tiles + 256 + lane % 16 * 8);
        if (bf16)
            dtc_mma_m16n8k16_bf16(sum, fa, fb);
        else
            dtc_mma_m16n8k16_f16(sum, fa, fb);
    }
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}

// Two warps load 4 matrices each and transpose them with one instruction.
__global__ void transpose_8x8(uint16_t *out, const uint16_t *in) {
    __shared__ uint4 rows[2][4 * 8]; // a row of 8 numbers is 16 bytes
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    memcpy(&rows[warp][lane], in + threadIdx.x * 8, 16);
    __syncwarp();
    unsigned r[4];
    dtc_ldmatrix_x4_trans(r, &rows[warp][lane]);
    for (int m = 0; m < 4; m++)
        memcpy(out + ((warp * 4 + m) * 8 + lane / 4) * 8 + lane % 4 * 2, &r[m], 4);
}

static double bf16_number(uint16_t bits) { return dtc_bf16_to_float(bits); }

static double f16_number(uint16_t bits) // sign, 5 bits of exponent, 10 of fraction
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double x = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits >> 15 ? -x : x;
}

// Numbers between 2^-3 and 2 of both signs, and a few zeros and denormals.
static std::vector<uint16_t> narrow_numbers(size_t n, bool bf16) {
    std::vector<uint16_t> x(n);
    unsigned state = 7;
    for (uint16_t &v : x) {
        state = state * 1664525u + 1013904223u;
        unsigned exponent = (bf16 ? 124 : 12) + (state >> 30),
                 fraction = state >> 8 & (bf16 ? 127 : 1023);
        if ((state >> 20 & 15) == 0) exponent = 0;
        v = static_cast<uint16_t>((state >> 29 & 1) << 15 | exponent << (bf16 ? 7 : 10) | fraction);
    }
    return x;
}

template <bool bf16, bool b_transposed> static void compare_tile_product(int K) {
    std::vector<uint16_t> a = narrow_numbers(16 * K, bf16), b = narrow_numbers(8 * K, bf16);
    double (*number)(uint16_t) = bf16 ? bf16_number : f16_number;
    floats got;
    CHECK(same_in_all_orders(
        [&] {
            floats d(16 * 8);
            DT_LAUNCH((tile_product<bf16, b_transposed>), 1, 32, 384 * 2, 0, d.data(), a.data(),
                b.data(), K);
            return d;
        },
        &got));
    CHECK(!dtc_error());
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            double want = 0;
            for (int k = 0; k < K; k++)
                want += number(a[i * K + k]) * number(b_transposed ? b[j * K + k] : b[k * 8 + j]);
            CHECK_MSG(fabs(want - got[i * 8 + j]) < 1e-6 * K,
                "bf16 %d, K %d, d[%d][%d]: %g, not %g", bf16, K, i, j, got[i * 8 + j], want);
        }
}

static void test_tensor_cores() {
    for (int K : { 16, 80 }) {
        compare_tile_product<true, true>(K);
        compare_tile_product<true, false>(K);
        compare_tile_product<false, true>(K);
        compare_tile_product<false, false>(K);
    }
    CHECK(dtc_f16_to_float(0x7c00) == INFINITY && dtc_f16_to_float(0xfc00) == -INFINITY);
    CHECK(std::isnan(dtc_f16_to_float(0x7e01)) && dtc_f16_to_float(0x8001) == -ldexpf(1, -24));

    std::vector<uint16_t> in = narrow_numbers(2 * 4 * 64, true), out(in.size());
    DT_LAUNCH(transpose_8x8, 1, 64, 0, 0, out.data(), in.data());
    int wrong = 0;
    for (int i = 0; i < 2 * 4 * 64; i++) wrong += out[i] != in[i / 64 * 64 + i % 8 * 8 + i / 8 % 8];
    CHECK_MSG(wrong == 0, "%d elements of the transposed matrices are wrong", wrong);
    CHECK(!dtc_error());
}

// Adds n tiles of 128 floats; the next tile is fetched while one is added. `left`: groups that may
// be pending when a tile is read, correct is 1. `barrier`: correct is 1.
__global__ void pipeline(float *out, const float *in, int n, int left, int barrier) {
    __shared__ float4 tile[2][32];
    int i = threadIdx.x;
    float4 sum = make_float4(0, 0, 0, 0);
    dtc_cp_async16(&tile[0][i], in + 4 * i, 16);
    dtc_cp_async_commit();
    for (int t = 0; t < n; t++) {
        if (t + 1 < n)
            dtc_cp_async16(&tile[(t + 1) % 2][i], in + 128 * (t + 1) + 4 * i, t + 2 < n ? 16 : 4);
        dtc_cp_async_commit(); // an empty group at the end keeps the count
        dtc_cp_async_wait(left);
        if (barrier) __syncthreads();
        float4 x = tile[t % 2][31 - i];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
        if (barrier) __syncthreads();
    }
    memcpy(out + 4 * (31 - i), &sum, 16);
    dtc_cp_async_wait(0);
}

static void test_async_copies() {
    const int n = 5;
    alignas(16) static float in[n * 128];
    floats x = numbers(n * 128), got;
    std::copy(x.begin(), x.end(), in);
    auto run = [&](int left, int barrier) {
        return same_in_all_orders(
            [&] {
                floats out(128);
                DT_LAUNCH(pipeline, 1, 32, 0, 0, out.data(), in, n, left, barrier);
                return out;
            },
            &got);
    };
    CHECK(run(1, 1));
    for (int i = 0; i < 128; i++) {
        double want = 0;
        for (int t = 0; t < n; t++)
            // the last tile's copies are cut after 4 bytes
            want += t < n - 1 || i % 4 == 0 ? x[t * 128 + i] : 0;
        CHECK_MSG(fabs(want - got[i]) < 1e-5, "sum %d: %g, not %g", i, got[i], want);
    }
    CHECK(run(0, 1) && !std::isnan(got[0])); // waits for more groups than needed
    CHECK(run(2, 1) && std::isnan(got[0]));  // waits for too few groups
    // reads bytes that neighbouring threads have not waited for
    CHECK(!run(1, 0) || std::isnan(got[0]));
    CHECK(!dtc_error());
}

// ==== 3. Launches ===============================================================================

__global__ void where(uint3 *block, uint3 *thread, int expect) {
    unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    block[b] = blockIdx;
    thread[t] = threadIdx;
    if (expect != 1) block[b].x = 99;
}

static void test_indices() {
    for (const auto &o : ORDERS) {
        std::vector<uint3> block(2 * 3 * 4), thread(5 * 2 * 3);
        int evaluated = 0;
        dtc_set_order(o.order, o.seed);
        DT_LAUNCH(
            where, dim3(2, 3, 4), dim3(5, 2, 3), 0, 0, block.data(), thread.data(), ++evaluated);
        CHECK(evaluated == 1);
        for (unsigned i = 0; i < block.size(); i++)
            CHECK(block[i].x == i % 2 && block[i].y == i / 2 % 3 && block[i].z == i / 6);
        for (unsigned i = 0; i < thread.size(); i++)
            CHECK(thread[i].x == i % 5 && thread[i].y == i / 5 % 2 && thread[i].z == i / 10);
    }
    dtc_set_order(DTC_FORWARD, 0);
    CHECK(!dtc_error());
}

template <class T, int N> __global__ void fill(T *out, T value) { out[threadIdx.x] = value * N; }

template <class T> __global__ void copy(T *out, const T *in) { out[threadIdx.x] = in[threadIdx.x]; }

static void test_templates() {
    double a[32], b[32];
    DT_LAUNCH((fill<double, 3>), 1, 32, 0, 0, a, 0.5f);
    DT_LAUNCH(copy, 1, 32, 0, 0, b, a); // T found in the arguments
    for (double v : b) CHECK(v == 1.5);
    CHECK(!dtc_error());
}

// Stores the order in which threads of all blocks arrive.
__global__ void arrivals(int *log, int *arrived) {
    log[atomicAdd(arrived, 1)] = blockIdx.x * blockDim.x + threadIdx.x;
}

static std::vector<int> run_arrivals(int order, unsigned seed) {
    std::vector<int> log(3 * 70);
    int arrived = 0;
    dtc_set_order(order, seed);
    DT_LAUNCH(arrivals, 3, 70, 0, 0, log.data(), &arrived);
    dtc_set_order(DTC_FORWARD, 0);
    return log;
}

static void test_orders() {
    std::vector<int> forward = run_arrivals(DTC_FORWARD, 0), reverse = run_arrivals(DTC_REVERSE, 0);
    for (int i = 0; i < 210; i++) CHECK(forward[i] == i && reverse[i] == 209 - i);

    std::vector<int> one = run_arrivals(DTC_PERMUTED, 1), two = run_arrivals(DTC_PERMUTED, 2);
    CHECK(one == run_arrivals(DTC_PERMUTED, 1));
    CHECK(one != two && one != forward && one != reverse);
    int repeated = 0; // blocks whose lanes ran in the same order as the first block's
    for (int block = 1; block < 3; block++) {
        bool same = true;
        for (int i = 0; i < 70; i++) same &= one[i] % 70 == one[block * 70 + i] % 70;
        repeated += same;
    }
    CHECK(repeated == 0);
    std::sort(one.begin(), one.end());
    CHECK(one == forward);
}

// Writes the first and the last float of its dynamic shared memory.
__global__ void fill_dynamic(float *out, int n) {
    DT_DYN_SMEM(float, buffer);
    buffer[0] = 1.0f;
    buffer[n - 1] = 2.0f;
    *out = buffer[0] + buffer[n - 1];
}

static void launch_fill(int bytes, float *out) {
    DT_LAUNCH(fill_dynamic, 1, 1, bytes, 0, out, bytes / 4);
}

static void test_limits() {
    float out = 0;
    launch_fill(48 << 10, &out);
    CHECK(out == 3.0f && !dtc_error());
    launch_fill((48 << 10) + 4, &out);
    CHECK(reported("dynamic shared memory"));
    auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CHECK(cudaFuncSetAttribute(fill_dynamic, attribute, 228 << 10) == cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute(fill_dynamic, attribute, 100 << 10) == cudaSuccess);
    out = 0;
    launch_fill(100 << 10, &out);
    CHECK(out == 3.0f && !dtc_error());

    DT_LAUNCH(fill_dynamic, 1, 1025, 4, 0, &out, 1);
    CHECK(reported("a block cannot be (1025,1,1)"));
    DT_LAUNCH(fill_dynamic, 0, 1, 4, 0, &out, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    CHECK(reported("a grid cannot be (0,1,1)"));
    DT_LAUNCH(fill_dynamic, dim3(1, 65536), 1, 4, 0, &out, 1);
    CHECK(reported("a grid cannot be (1,65536,1)"));
}

// Ranks may be threads that share one GPU.
static void test_host_threads() {
    floats x = numbers(4096), got[4];
    std::vector<std::thread> ranks;
    for (floats &mine : got)
        ranks.emplace_back([&mine, &x] {
            for (int i = 0; i < 20; i++) mine = run_row_sums<true>(x, 8, 64);
        });
    for (std::thread &rank : ranks) rank.join();
    for (const floats &mine : got) CHECK(mine == got[0]);
    CHECK(!dtc_error());
}

// ==== 4. Planted mistakes that change results ===================================================

__global__ void read_unwritten(float *out) {
    __shared__ float half_written[64], never_written[64];
    if (threadIdx.x < 32) half_written[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = half_written[threadIdx.x];
    out[64 + threadIdx.x] = never_written[threadIdx.x];
}

template <class T> // GCC 12 ignores the section of variables in templates
__global__ void read_unwritten_in_template(T *out) {
    __shared__ T never_written[64];
    out[threadIdx.x] = never_written[threadIdx.x];
    never_written[threadIdx.x] = 1;
}

__global__ void read_unwritten_dynamic(float *out) {
    DT_DYN_SMEM(float, buffer);
    out[threadIdx.x] = buffer[threadIdx.x];
    __syncthreads();
    buffer[threadIdx.x] = 1.0f; // the next block must not see these values
}

// The same race inside one warp, where older GPUs ran lanes in lockstep.
__global__ void neighbour(float *out, int with_barrier) {
    __shared__ float mine[32];
    mine[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (with_barrier) __syncwarp();
    out[threadIdx.x] = mine[(threadIdx.x + 1) % 32];
}

static void test_changed_results() {
    floats x = numbers(2000), got;
    CHECK(!same_in_all_orders([&] { return run_row_sums<false>(x, 2, 256); }, &got));
    CHECK(!dtc_error()); // a race is not reported; only the bits differ

    for (int with_barrier : { 0, 1 }) {
        bool same = same_in_all_orders(
            [&] {
                floats out(32);
                DT_LAUNCH(neighbour, 1, 32, 0, 0, out.data(), with_barrier);
                return out;
            },
            &got);
        CHECK(same == (with_barrier == 1));
    }

    float out[128];
    DT_LAUNCH(read_unwritten, 1, 64, 0, 0, out);
    for (int i = 0; i < 128; i++) CHECK(i < 32 ? out[i] == 1.0f : std::isnan(out[i]));
    DT_LAUNCH(read_unwritten_in_template, 2, 64, 0, 0, out);
    for (int i = 0; i < 64; i++) CHECK(std::isnan(out[i]));
    DT_LAUNCH(read_unwritten_dynamic, 2, 64, 64 * sizeof(float), 0, out);
    for (int i = 0; i < 64; i++) CHECK(std::isnan(out[i]));
    CHECK(!dtc_error());
}

// ==== 5. Planted mistakes that are reported =====================================================

__global__ void two_barriers_on_one_line(int *out) {
    if (threadIdx.x < 32) {
        __syncthreads();
        *out = 1;
    } else {
        __syncthreads();
        *out = 2;
    }
}

__global__ void exit_before_barrier(int n) {
    if (static_cast<int>(threadIdx.x) >= n) return;
    __syncthreads();
}

__global__ void shuffle_with_exited(float *out) {
    if (threadIdx.x == 31) return;
    out[threadIdx.x] = warp_sum(1.0f);
}

__global__ void shuffle_in_part_of_warp(float *out) { out[threadIdx.x] = warp_sum(1.0f); }

__global__ void read_outside_mask(int *out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1, 16);
}

__global__ void not_in_own_mask(int *out) { out[threadIdx.x] = __ballot_sync(0x0000ffffu, 1); }

__global__ void odd_width(int *out) { out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0, 12); }

__global__ void two_warp_operations(int *out) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __any_sync(0xffffffffu, 1);
    else
        out[threadIdx.x] = __all_sync(0xffffffffu, 1);
}

__global__ void different_masks(int *out) {
    unsigned mask = threadIdx.x < 16 ? 0xffffffffu : 0xffffff0fu;
    out[threadIdx.x] = __ballot_sync(mask, 1) != 0;
}

__global__ void warp_against_block(int *out) {
    if (threadIdx.x % 32 < 16) __syncwarp();
    __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void mma_without_a_lane(float *out) {
    unsigned a[4] = { 0, 0, 0, 0 };
    if (threadIdx.x != 5) dtc_mma_m16n8k16_bf16(out + 4 * threadIdx.x, a, a);
}

__global__ void mma_or_shuffle(float *out) {
    unsigned a[4] = { 0, 0, 0, 0 };
    if (threadIdx.x < 16)
        dtc_mma_m16n8k16_f16(out, a, a);
    else
        __syncwarp();
}

// ldmatrix and cp.async at invalid addresses; `which` selects the call.
__global__ void odd_address(const float *global, int which) {
    __shared__ float4 tile[32];
    unsigned r[4];
    char *mine = reinterpret_cast<char *>(&tile[threadIdx.x]);
    const char *source = reinterpret_cast<const char *>(global);
    switch (which) {
    case 0: dtc_ldmatrix_x4(r, threadIdx.x == 9 ? mine + 8 : mine); break;
    case 1: dtc_ldmatrix_x4_trans(r, global); break;
    case 2: dtc_ldmatrix_x2(r, threadIdx.x == 15 ? nullptr : mine); break;
    case 3: dtc_cp_async16(mine + 4, source, 16); break;
    case 4: dtc_cp_async16(const_cast<char *>(source), source, 16); break;
    case 5: dtc_cp_async16(mine, source + 4, 16); break;
    case 6: dtc_cp_async16(mine, mine, 16); break;
    case 7: dtc_cp_async16(mine, source, 17); break;
    // addresses of lanes 16-31 are ignored
    case 8: dtc_ldmatrix_x2(r, threadIdx.x < 16 ? mine : nullptr); break;
    case 9: dtc_cp_async16(mine, source, 16); break; // without a wait
    }
}

// Waits for a block that may not have started yet.
__global__ void wait_for_all_blocks(unsigned *arrived) {
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < gridDim.x) {
    }
}

// Puts parameters on the stack, where abandoned threads have left theirs.
struct table {
    float v[512];
};

__global__ void pick(float *out, table t, int stride) {
    out[threadIdx.x] = t.v[threadIdx.x * stride];
}

static bool picks_right() {
    float out[64];
    table t;
    for (int i = 0; i < 512; i++) t.v[i] = static_cast<float>(i);
    DT_LAUNCH(pick, 1, 64, 0, 0, out, t, 8);
    for (int i = 0; i < 64; i++)
        if (out[i] != static_cast<float>(8 * i)) return false;
    return true;
}

static void launch_mistakes(float *f, int *out) {
    DT_LAUNCH(two_barriers_on_one_line, 1, 64, 0, 0, out);
    CHECK(reported("threads wait at different ones"));
    DT_LAUNCH(exit_before_barrier, 1, 64, 0, 0, 40);
    CHECK(reported("threads exited before it"));
    DT_LAUNCH(shuffle_with_exited, 1, 32, 0, 0, f);
    CHECK(reported("names a lane that has exited"));
    DT_LAUNCH(shuffle_in_part_of_warp, 1, 40, 0, 0, f);
    CHECK(reported("names a lane that the block does not have"));
    DT_LAUNCH(read_outside_mask, 1, 32, 0, 0, out);
    CHECK(reported("which is not in the mask 0000ffff"));
    DT_LAUNCH(not_in_own_mask, 1, 32, 0, 0, out);
    CHECK(reported("is not in its own mask"));
    DT_LAUNCH(odd_width, 1, 32, 0, 0, out);
    CHECK(reported("width 12"));
    DT_LAUNCH(two_warp_operations, 1, 32, 0, 0, out);
    CHECK(reported("wait at different warp operations"));
    DT_LAUNCH(different_masks, 1, 32, 0, 0, out);
    CHECK(reported("wait at different warp operations"));
    DT_LAUNCH(warp_against_block, 1, 64, 0, 0, out);
    CHECK(reported("deadlock"));
    DT_LAUNCH(mma_without_a_lane, 1, 32, 0, 0, f);
    CHECK(reported("names a lane that has exited"));
    DT_LAUNCH(mma_or_shuffle, 1, 32, 0, 0, f);
    CHECK(reported("wait at different warp operations"));
    alignas(16) static const float global[8] = {};
    const char *const odd[] = { "not a multiple of 16", "not in shared", "not in shared",
        "not a multiple of 16", "not in shared", "in global memory", "in global memory",
        "17 bytes" };
    for (int which = 0; which < 8; which++) {
        DT_LAUNCH(odd_address, 1, 32, 0, 0, global, which);
        CHECK(reported(odd[which]));
    }
    DT_LAUNCH(odd_address, 1, 32, 0, 0, global, 9);
    CHECK(reported("exits with a cp.async that it has not waited for"));
    DT_LAUNCH(odd_address, 1, 32, 0, 0, global, 8);
    CHECK(!dtc_error());
    unsigned arrived = 0;
    DT_LAUNCH(wait_for_all_blocks, 2, 1, 0, 0, &arrived);
    CHECK(reported("deadlock"));
}

static void test_reported_mistakes() {
    floats x = numbers(2000), f(128);
    std::vector<int> out(64);
    floats right = run_row_sums<true>(x, 2, 1024);
    for (const auto &o : ORDERS) {
        dtc_set_order(o.order, o.seed);
        launch_mistakes(f.data(), out.data());
        CHECK(run_row_sums<true>(x, 2, 1024) == right); // the abandoned fibers restart
        CHECK(picks_right());
    }
    dtc_set_order(DTC_FORWARD, 0);
}

// Checks the text of a report, and that an error stops later launches until it is cleared.
static void test_report() {
    floats x(64, 1.0f);
    DT_LAUNCH(exit_before_barrier, dim3(3, 2), 64, 0, 0, 40);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
    CHECK(run_row_sums<true>(x, 1, 64)[0] == 0.0f);
    const char *error = dtc_error();
    if (CHECK(error != nullptr)) {
        CHECK(strstr(error, "exit_before_barrier: block (0,0,0): divergent barrier"));
        CHECK(strstr(error, "threads 0-39 wait at __syncthreads, "));
        CHECK(strstr(error, "test_cuda_shim.cc:"));
        CHECK(strstr(error, "threads 40-63 have exited"));
    }
    dtc_clear_error();
    CHECK(run_row_sums<true>(x, 1, 64)[0] == 64.0f);
    CHECK(!dtc_error());
}

// ==== 6. Planted mistakes that end the program ==================================================

// True if `run`, in a child process, faults or is ended by a sanitizer.
template <class Run> static bool ends_program(Run run) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        close(2); // hides the sanitizer's report of this expected fault
        run();
        _exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return false;
    return WIFSIGNALED(status) || WEXITSTATUS(status) != 0;
}

static __device__ int use_stack(int kilobytes) {
    volatile char frame[1024];
    frame[kilobytes % 1024] = 1;
    return kilobytes ? use_stack(kilobytes - 1) + frame[kilobytes % 1024] : 0;
}

__global__ void deep(int *out, int kilobytes) { *out = use_stack(kilobytes); }

// Each is an array of 8.
template <class T>
__global__ void write_at(T *out, int global_index, int dynamic_index, int shared_index) {
    DT_DYN_SMEM(T, buffer);
    __shared__ T array[8];
    T *place = array; // a pointer of unknown bounds, which -fsanitize=undefined does not check
    asm volatile("" : "+r"(place));
    out[global_index] = 1;
    buffer[dynamic_index] = 1;
    place[shared_index] = 1;
}

static void test_faults() {
    int sum = 0; // a stack overflow faults at the guard and never writes to another stack
    const int too_deep = (DTC_STACK_BYTES + DTC_GUARD_BYTES) / 1024;
    CHECK(!ends_program([&] { DT_LAUNCH(deep, 1, 64, 0, 0, &sum, too_deep / 8); }));
    CHECK(ends_program([&] { DT_LAUNCH(deep, 1, 64, 0, 0, &sum, too_deep); }));

    auto write = [](int global_index, int dynamic_index, int shared_index) {
        floats out(8);
        DT_LAUNCH(write_at, 1, 1, 8 * sizeof(float), 0, out.data(), global_index, dynamic_index,
            shared_index);
    };
    CHECK(!ends_program([&] { write(7, 7, 7); }));
#ifdef DTC_ASAN
    CHECK(ends_program([&] { write(8, 7, 7); }));
    CHECK(ends_program([&] { write(7, 8, 7); }));
#ifndef __clang__
    CHECK(ends_program([&] { write(7, 7, 8); }));
#endif
#else
    check_skip("writes out of bounds: need -fsanitize=address");
#endif
}

// A block's shared memory is undefined: NaN here, in every block of every launch, whatever an earlier
// block stored. From the third launch on the simulator fills only what the kernel is known to use.
__global__ void leftover(float *out) {
    __shared__ float number;
    out[blockIdx.x] = number;
    number = 1;
}

static void test_leftover() {
    enum { BLOCKS = 3 };
    for (int launch = 0; launch < 20; launch++) {
        float out[BLOCKS] = {};
        DT_LAUNCH(leftover, BLOCKS, 1, 0, 0, out);
        for (float x : out) CHECK_MSG(std::isnan(x), "launch %d: %g", launch, x);
    }
}

int main() {
    test_leftover();
    test_block_reduce();
    test_transpose();
    test_warp_scan();
    test_last_block();
    test_operations();
    test_atomics_and_math();
    test_tensor_cores();
    test_async_copies();
    test_indices();
    test_templates();
    test_orders();
    test_limits();
    test_host_threads();
    test_changed_results();
    test_reported_mistakes();
    test_report();
    test_faults();
    return check_done("test_cuda_shim");
}
