/* test_fake_kernels.cc - kernels of cuda_on_cpu.h in the streams of fake_cuda.c (-DDTC_QUEUED) */
#include "tests/support/check.h"
#if defined(__has_include) && __has_include(<cublasLt.h>) && __has_include(<nccl.h>)
#define DTC_QUEUED
#include "tests/cuda/cuda_on_cpu.h"
#include "tests/cuda/fake_cuda.h"

enum { N = 100 };

__global__ void add(float *p, int n, float x) {
    int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) p[i] += x;
}

__global__ void divergent(float *p) {
    if (threadIdx.x == 0) __syncthreads();
    p[threadIdx.x] = 1;
}

static float *x;
static cudaStream_t stream;

static void start() {
    fake_cuda_reset();
    fake_cuda_devices(2);
    fake_cuda_order(FAKE_CUDA_LAZY);
    CHECK(cudaMalloc(reinterpret_cast<void **>(&x), N * sizeof *x) == cudaSuccess);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaMemsetAsync(x, 0, N * sizeof *x, stream) == cudaSuccess);
}

/* A kernel runs at a wait, with the arguments that the launch had. */
static void test_late() {
    float out[N], late = 0;
    float *pinned;
    start();
    CHECK(cudaMallocHost(reinterpret_cast<void **>(&pinned), N * sizeof *x) == cudaSuccess);
    float by = 2;
    DT_LAUNCH(add, 1, 128, 0, stream, x, N, by);
    by = 3;
    DT_LAUNCH(add, 4, 32, 0, stream, x, N, by);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaMemcpyAsync(pinned, x, N * sizeof *x, cudaMemcpyDefault, stream) == cudaSuccess);
    late = pinned[N - 1];
    CHECK(late != 5);
    CHECK(cudaMemcpyAsync(out, x, sizeof out, cudaMemcpyDefault, stream) == cudaSuccess);
    CHECK(pinned[N - 1] == 5 && out[0] == 5 && out[N - 1] == 5);
    CHECK(cudaFree(x) == cudaSuccess && cudaFreeHost(pinned) == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK(!fake_cuda_error() && fake_cuda_leaks(1) == 0);
}

/* A launch beyond the limits is refused at once and has no further effect; a kernel's mistake makes
   its device fail permanently. */
static void test_mistakes() {
    start();
    DT_LAUNCH(add, 1, 2048, 0, stream, x, N, 2.0f);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(fake_cuda_error() && strstr(fake_cuda_error(), "a block cannot be"));
    fake_cuda_clear_error();
    DT_LAUNCH(divergent, 1, 64, 0, stream, x);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaErrorLaunchFailure);
    CHECK(fake_cuda_error() && strstr(fake_cuda_error(), "divergent barrier"));
    DT_LAUNCH(add, 1, 128, 0, stream, x, N, 2.0f);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure &&
          cudaGetLastError() == cudaErrorLaunchFailure);

    CHECK(cudaSetDevice(1) == cudaSuccess);
    static_cast<void>(cudaGetLastError());
    float *y, out = 0;
    cudaStream_t other;
    CHECK(cudaMalloc(reinterpret_cast<void **>(&y), sizeof *y) == cudaSuccess);
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaMemsetAsync(y, 0, sizeof *y, other) == cudaSuccess);
    DT_LAUNCH(add, 1, 32, 0, other, y, 1, 7.0f);
    CHECK(
        cudaMemcpyAsync(&out, y, sizeof out, cudaMemcpyDefault, other) == cudaSuccess && out == 7);
    DT_LAUNCH(add, 1, 32, 0, stream, y, 1, 7.0f); /* device 0's stream */
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    fake_cuda_reset();
}

int main() {
    test_late();
    test_mistakes();
    return check_done("test_fake_kernels");
}

#else
int main() {
    check_skip("kernels in streams of fake_cuda.c: needs cublasLt.h and nccl.h");
    return check_done("test_fake_kernels");
}
#endif
