/* 15_own_kernel.cu - an op of your own on a GPU: CUDA kernels on dt tensors, in your own stream

   What you learn: launch your kernels into dt_cuda_stream(dt_ctx_stream(ctx)), the stream of dt's
       own kernels. In this stream they run after the kernels that write their inputs and before the
       kernels that read their outputs, without any synchronization. With dt_cuda_open a context
       uses a stream that you created; without it the context creates a stream, and dt_cuda_stream
       returns that stream. In C++ the fields of { .seed = 1, .. } must be in the order of the
       struct.
   Run: nvcc -O3 -arch=sm_90a examples/15_own_kernel.cu dt_kernels.cu -lcublasLt -lnccl
       -o 15_own_kernel && ./15_own_kernel
   What you see: the op, out = x * x, and its gradient agree with dt_mul. Without a GPU the program
       says so and ends.
   Think about: why must the host not read out->data directly after the launch? */
#define DT_IMPLEMENTATION
#include "../dt_tensor.h"
#include <math.h>
#include <stdio.h>

enum { N = 1000, BLOCK = 256 };

__global__ void square_kernel(float *out, const float *x, size_t n) {
    size_t i = blockIdx.x * (size_t)BLOCK + threadIdx.x;
    if (i < n) out[i] = x[i] * x[i];
}

__global__ void square_back_kernel(float *dx, const float *dout, const float *x, size_t n) {
    size_t i = blockIdx.x * (size_t)BLOCK + threadIdx.x;
    if (i < n) dx[i] += 2 * x[i] * dout[i]; /* adds, because gradients accumulate */
}

static unsigned blocks_for(size_t n) { return (unsigned)((n + BLOCK - 1) / BLOCK); }
static cudaStream_t stream_of(dt_ctx *ctx) {
    return (cudaStream_t)dt_cuda_stream(dt_ctx_stream(ctx));
}

/* Records an error in the context if CUDA refused the launch. If a kernel fails while it runs, a
   later CUDA call reports the failure. */
static dt_status launched(dt_ctx *ctx, const char *op) {
    cudaError_t error = cudaGetLastError();
    return error == cudaSuccess
               ? DT_OK
               : dt_fail(ctx, DT_ERR_DEVICE, "%s: %s", op, cudaGetErrorName(error));
}

static dt_status square_back(dt_node *node) {
    dt_tensor *x = node->in[0];
    size_t n = (size_t)dt_count(x->shape);
    float *dx = dt_wants(node, 0) ? (float *)dt_grad(node, 0) : NULL;
    if (!dx) return dt_error(x->ctx);
    square_back_kernel<<<blocks_for(n), BLOCK, 0, stream_of(x->ctx)>>>(
        dx, (const float *)node->out->grad, (const float *)dt_data(x), n);
    return launched(x->ctx, "square's backward");
}

/* The op. Returns x * x for x in f32. x must not be empty, because CUDA refuses a launch of 0
   blocks. */
static dt_tensor *square(dt_tensor *x) {
    dt_tensor *out = x ? dt_new(x->ctx, DT_F32, x->shape) : NULL;
    if (!out) return NULL;
    size_t n = (size_t)dt_count(x->shape);
    square_kernel<<<blocks_for(n), BLOCK, 0, stream_of(x->ctx)>>>(
        (float *)out->data, (const float *)dt_data(x), n);
    if (launched(x->ctx, "square") != DT_OK) return NULL;
    return dt_record(
        out, (dt_record_desc){ .name = "square", .in = { x }, .backward = square_back });
}

int main(void) {
    char why[256] = "";
    float values[N], grad[2][N];
    double sum[2], worst = 0;
    cudaStream_t mine;
    if (dt_cuda_ready(why, sizeof why) != DT_OK)
        return printf("ok: nothing to do without a GPU (%s)\n", why), 0;
    if (cudaSetDevice(0) != cudaSuccess || cudaStreamCreate(&mine) != cudaSuccess) return 1;
    void *queue = dt_cuda_open((dt_cuda_desc){ .device = 0, .stream = mine }, why, sizeof why);
    if (!queue) return printf("dt_cuda_open: %s\n", why), 1;
    dt_ctx *ctx =
        dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = dt_kernels_cuda(), .stream = queue });
    for (int i = 0; i < N; i++) values[i] = (float)(i % 17 - 8) / 8;
    for (int own = 0; own < 2; own++) {
        dt_tensor *x = dt_require_grad(dt_input(ctx, DT_F32, DT_SHAPE(N), values));
        dt_tensor *loss = dt_sum_over(own ? square(x) : dt_mul(x, x), DT_ALL);
        if (dt_backward(loss) == DT_OK)
            cudaMemcpyAsync(
                grad[own], x->grad, sizeof grad[own], cudaMemcpyDefault, stream_of(ctx));
        sum[own] = dt_item(loss); /* waits for the stream, hence also for the copy */
        dt_reset(ctx);
    }
    int ok = dt_error(ctx) == DT_OK && fabs(sum[1] - sum[0]) < 1e-3;
    for (int i = 0; ok && i < N; i++) worst = fmax(worst, fabs(grad[1][i] - grad[0][i]));
    /* in this order, because the context uses `queue`, and `queue` uses the stream */
    dt_ctx_free(ctx);
    dt_cuda_close(queue);
    cudaStreamDestroy(mine);
    printf("%s: sums %.3f and %.3f; gradients differ by at most %.1e\n",
        ok && worst < 1e-6 ? "ok" : "WRONG", sum[0], sum[1], worst);
    return !(ok && worst < 1e-6);
}
