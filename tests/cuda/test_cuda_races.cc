// test_cuda_races.cc - are the kernels of dt_kernels.cu free of races?
//
// First come kernels with planted races, which the detector of cuda_races.cc must report, and
// kernels without races, which it must not report. Then the cases of test_cuda.cc run under the
// detector. The Makefile has the compiler options; the arguments are those of test_cuda.

#define CUDA_ORDERS 1 // the detector does not need the race to happen
#include "tests/cuda/attention_cases.h"
#include "tests/cuda/kernel_cases.h"

// ==== 1. Planted races, and the same kernels without races ======================================

// True if the previous launch was reported with all of `parts`. Clears the report.
static bool reported(std::initializer_list<const char *> parts) {
    const char *error = dtc_error();
    bool found = error != NULL;
    for (const char *part : parts) found = found && strstr(error, part);
    if (!found) printf("got: %s\n", error ? error : "nothing");
    dtc_clear_error();
    return found;
}

// Each warp passes its numbers to the next; `barriers` selects the barriers in between.
enum { BEFORE_READING = 1, BEFORE_REUSE = 2 };
__global__ void exchange(float *out, int barriers) {
    __shared__ float theirs[64];
    int i = (int)threadIdx.x;
    for (int round = 0; round < 2; round++) {
        theirs[i] = (float)(i + round);
        if (barriers & BEFORE_READING) __syncthreads();
        out[i] = theirs[(i + 32) % 64];
        if (barriers & BEFORE_REUSE) __syncthreads();
    }
}

// All threads read a number that a thread of one warp then replaces. barrier: 1 for the block, 2
// for that warp only.
__global__ void broadcast(float *out, int barrier) {
    __shared__ float number;
    if (threadIdx.x == 0) number = 1;
    __syncthreads();
    out[threadIdx.x] = number;
    if (barrier == 1) __syncthreads();
    if (barrier == 2) __syncwarp();
    if (threadIdx.x == 0) number = 2;
}

static void test_block_races() {
    float out[64];
    DT_LAUNCH(exchange, 2, 64, 0, 0, out, BEFORE_READING | BEFORE_REUSE);
    CHECK(reported(
        { "race in global memory", "the blocks are in no order" })); // both blocks write to out
    DT_LAUNCH(exchange, 1, 64, 0, 0, out, BEFORE_READING | BEFORE_REUSE);
    DT_LAUNCH(exchange, 1, 64, 0, 0, out,
        BEFORE_READING | BEFORE_REUSE); // launches come one after another
    check_no_mistake("an exchange with all barriers");
    DT_LAUNCH(exchange, 1, 64, 0, 0, out, BEFORE_REUSE);
    CHECK(reported({ "exchange: race in shared memory", "no __syncthreads",
        "reads 4 bytes: exchange", "writes 4 bytes: exchange", "test_cuda_races.cc:" }));
    DT_LAUNCH(exchange, 1, 64, 0, 0, out, BEFORE_READING);
    CHECK(reported(
        { "race in shared memory", "no __syncthreads", "reads 4 bytes", "writes 4 bytes" }));
    DT_LAUNCH(broadcast, 1, 64, 0, 0, out, 1);
    check_no_mistake("a broadcast");
    for (int order : { DTC_FORWARD, DTC_REVERSE }) {
        dtc_set_order(order, 0);
        DT_LAUNCH(broadcast, 1, 64, 0, 0, out, 0);
        CHECK(reported({ "race in shared memory", "no __sync", "thread (0,0,0) writes 4 bytes" }));
        DT_LAUNCH(broadcast, 1, 64, 0, 0, out, 2);
        CHECK(reported(
            { "race in shared memory", "no __syncthreads", "thread (0,0,0) writes 4 bytes" }));
    }
    for (int seed = 0; seed < 8;
         seed++) { // the first reader may be in the writing warp or in another one
        dtc_set_order(DTC_PERMUTED, seed);
        DT_LAUNCH(broadcast, 1, 64, 0, 0, out, 2);
        CHECK(reported(
            { "race in shared memory", "no __syncthreads", "thread (0,0,0) writes 4 bytes" }));
    }
    dtc_set_order(DTC_FORWARD, 0);
}

// A lane reads its neighbour's number. how: 0: no barrier; 1: a shuffle, which orders nothing; 2:
// __syncwarp; 3: __syncwarp for each half, with the neighbour in the same half; 4: with the
// neighbour in the other half.
__global__ void neighbour(float *out, int how) {
    __shared__ float mine[32];
    unsigned lane = threadIdx.x, half = lane < 16 ? 0xffffu : 0xffff0000u;
    mine[lane] = 1;
    if (how == 1) __shfl_sync(0xffffffffu, lane, 0);
    if (how == 2) __syncwarp();
    if (how > 2) __syncwarp(half);
    out[lane] = mine[how == 4 ? lane ^ 16 : lane ^ 1];
}

static void test_warp_races() {
    float out[32];
    for (int how = 0; how < 5; how++) {
        DT_LAUNCH(neighbour, 1, 32, 0, 0, out, how);
        if (how == 2 || how == 3)
            check_no_mistake("a neighbour's number after __syncwarp");
        else
            CHECK(reported({ "race in shared memory", "no __syncwarp or __syncthreads" }));
    }
}

// Neighbours of every size: the bytes of a word, the words of a pack. overlap: one byte too many.
template <class T> __global__ void side_by_side(T *out, size_t bytes, int overlap) {
    char *mine = (char *)out + threadIdx.x * bytes;
    if (bytes == sizeof(T))
        *(T *)mine = T();
    else
        memset(mine, 0, bytes + (size_t)overlap);
}

__global__ void copy_back(char *to, const char *from) { // reads the bytes that the neighbour writes
    memcpy(to + threadIdx.x * 40, from + threadIdx.x * 40 + 40, 30);
}

static void test_sizes() {
    alignas(16) static char memory[64 * 48], other[64 * 48];
    DT_LAUNCH(side_by_side<unsigned char>, 1, 64, 0, 0, (unsigned char *)memory, (size_t)1, 0);
    DT_LAUNCH(side_by_side<uint16_t>, 1, 64, 0, 0, (uint16_t *)memory, (size_t)2, 0);
    DT_LAUNCH(side_by_side<float4>, 1, 64, 0, 0, (float4 *)memory, (size_t)16, 0);
    DT_LAUNCH(side_by_side<float4>, 1, 64, 0, 0, (float4 *)memory, (size_t)43, 0);
    DT_LAUNCH(
        side_by_side<float4>, 2, 1, 0, 0, (float4 *)memory, (size_t)43, 0); // one element twice
    CHECK(reported({ "blocks are in no order" }));
    DT_LAUNCH(copy_back, 1, 64, 0, 0, other, memory);
    check_no_mistake("neighbours");
    DT_LAUNCH(side_by_side<float4>, 1, 64, 0, 0, (float4 *)memory, (size_t)43, 1);
    CHECK(reported({ "race in global memory", "writes 44 bytes" }));
    DT_LAUNCH(copy_back, 1, 64, 0, 0, memory, memory);
    CHECK(reported({ "race in global memory", "copy_back" }));
}

// The last block to finish adds the results of all blocks; correct only with `with_fence`.
__global__ void last_block(float *sum, float *partial, unsigned *done, int with_fence) {
    __shared__ bool last;
    partial[blockIdx.x * 64 + threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (with_fence) __threadfence();
        last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    float total = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x * 64; i += 64) total += partial[i];
    atomicAdd(sum, total);
}

__global__ void count(unsigned *n, int plainly) {
    if (plainly && threadIdx.x == 33)
        *n = *n + 1;
    else
        atomicAdd(n, 1);
}

__global__ void tell(int *word, int plainly) { // all threads write the same value
    if (plainly)
        *word = 1;
    else
        *(volatile int *)word = 1;
}

static void test_atomics() {
    float sum = 0, partial[5 * 64];
    unsigned done = 0;
    for (int order : { DTC_FORWARD, DTC_REVERSE }) {
        dtc_set_order(order, 0);
        DT_LAUNCH(last_block, 5, 64, 0, 0, &sum, partial, &done, 1);
        check_no_mistake("the last block");
        DT_LAUNCH(last_block, 5, 64, 0, 0, &sum, partial, &done, 0);
        CHECK(reported({ "race in global memory", "the blocks are in no order", "reads 4 bytes",
            "writes 4 bytes" }));
        done = 0;
        DT_LAUNCH(count, 3, 64, 0, 0, &done, 0);
        check_no_mistake("counting");
        DT_LAUNCH(count, 1, 64, 0, 0, &done, 1);
        CHECK(reported({ "race in global memory", "atomically changes 4 bytes" }));
        done = 0;
    }
    dtc_set_order(DTC_FORWARD, 0);
    CHECK(sum == 2 * 5 * 64);
    int word = 0;
    DT_LAUNCH(tell, 3, 64, 0, 0, &word, 0);
    check_no_mistake("telling through volatile");
    DT_LAUNCH(tell, 3, 64, 0, 0, &word, 1);
    CHECK(reported({ "race in global memory", "writes 4 bytes" }));
}

// Loads tiles alternately into two buffers. which: 0: correct; 1: no barrier after the wait; 2: the
// next tile is requested while the previous one may still be read.
__global__ void fetch_tiles(float *out, const float *in, int which) {
    __shared__ float4 tile[2][64];
    int i = (int)threadIdx.x;
    float sum = 0;
    dtc_cp_async16(&tile[0][i], in + 4 * i, 16);
    dtc_cp_async_commit();
    for (int t = 0; t < 4; t++) {
        if (which != 2 && t > 0) __syncthreads();
        dtc_cp_async16(&tile[(t + 1) % 2][i], in + 4 * i, 16);
        dtc_cp_async_commit();
        dtc_cp_async_wait(1);
        if (which != 1) __syncthreads();
        sum += tile[t % 2][63 - i].x;
    }
    dtc_cp_async_wait(0);
    out[i] = sum;
}

// A warp reads rows that other lanes have written.
__global__ void fetch_rows(unsigned *out, int barrier) {
    __shared__ uint4 rows[32];
    unsigned r[4], lane = threadIdx.x;
    rows[31 - lane] = make_uint4(1, 2, 3, 4);
    if (barrier) __syncwarp();
    dtc_ldmatrix_x4(r, &rows[lane]);
    out[lane] = r[0] + r[3];
}

static void test_asynchronous() {
    alignas(16) static float in[256];
    float out[64];
    unsigned bits[32];
    DT_LAUNCH(fetch_tiles, 1, 64, 0, 0, out, in, 0);
    check_no_mistake("tiles");
    DT_LAUNCH(fetch_tiles, 1, 64, 0, 0, out, in, 1);
    CHECK(reported(
        { "race in shared memory", "writes 16 bytes: fetch_tiles", "reads 4 bytes: fetch_tiles" }));
    DT_LAUNCH(fetch_tiles, 1, 64, 0, 0, out, in, 2);
    CHECK(reported(
        { "race in shared memory", "writes 16 bytes: fetch_tiles", "reads 4 bytes: fetch_tiles" }));
    DT_LAUNCH(fetch_rows, 1, 32, 0, 0, bits, 1);
    check_no_mistake("rows");
    DT_LAUNCH(fetch_rows, 1, 32, 0, 0, bits, 0);
    CHECK(reported({ "race in shared memory", "reads 16 bytes: fetch_rows" }));
}

// ==== 2. One barrier through two calls ==========================================================

static __device__ float sum_of_halves(float v) {
    __syncthreads();
    return v + __shfl_xor_sync(0xffffffffu, v, 1);
}

__global__ void two_calls(float *out, int divergent) {
    float v = (float)threadIdx.x;
    if (!divergent)
        v = sum_of_halves(v);
    else if (threadIdx.x < 32)
        v = sum_of_halves(v);
    else
        v = sum_of_halves(v + 1);
    out[threadIdx.x] = v;
}

static __device__ int vote(int yes) { return __any_sync(0xffffffffu, yes); }

__global__ void two_votes(float *out) {
    out[threadIdx.x] = (float)(threadIdx.x % 2 ? vote(1) : 2 * vote(0));
}

static void test_divergence() {
    float out[64];
    DT_LAUNCH(two_calls, 1, 32, 0, 0, out, 0);
    DT_LAUNCH(two_calls, 1, 64, 0, 0, out, 0); // some fibers were used before, some are new
    check_no_mistake("a helper that all call");
    DT_LAUNCH(two_calls, 1, 64, 0, 0, out, 1);
    CHECK(
        reported({ "divergent barrier: threads wait at different ones", "called from two_calls" }));
    DT_LAUNCH(two_votes, 1, 32, 0, 0, out);
    CHECK(
        reported({ "lanes of a warp wait at different warp operations", "called from two_votes" }));
}

int main(int argc, char **argv) {
    const char *part = argc > 1 ? argv[1] : "";
    test_block_races();
    test_warp_races();
    test_sizes();
    test_atomics();
    test_asynchronous();
    test_divergence();
    if (check_failed == 0) { // the kernels are tested only if the detector works
        if (strcmp(part, "attention") != 0) test_other_kernels();
        if (strcmp(part, "others") != 0) test_products_and_attention();
    }
    return check_done("test_cuda_races");
}
