/* dt_kernels.cu - v0.2.0 - the CUDA kernels of dt_tensor.h's kernel table, and the NCCL backend of
   dt_comm.h - public domain or MIT, see the end of the file

   Only this file needs nvcc. A program that is linked with its object finds the CUDA kernels and
   NCCL by itself:

       nvcc -O3 train.c dt_kernels.cu -lcublasLt -lnccl

       nvcc -O3 -c dt_kernels.cu
       cc -O3 train.c dt_kernels.o -L/usr/local/cuda/lib64 -lcublasLt -lnccl -lcudart -lstdc++ -lm

   This file defines six functions, all declared in dt_tensor.h: dt_kernels_cuda(),
   dt_cuda_ready(), dt_cuda_open(), dt_cuda_close(), dt_cuda_stream() and dt_cuda_device(); and
   dt__nccl_begin(), which dt_comm.h declares. Nearly all other names are in namespace dt_cuda.
   Macros begin with DTK_ or DT_.

   OPTIONS (of nvcc)
       -DDT_NO_CUBLASLT         does without cuBLASLt, and -lcublasLt
       -DDT_NO_NCCL             does without NCCL, and -lnccl. NCCL is used if nvcc finds dt_comm.h
                                and <nccl.h> of NCCL 2.18.1 or later
       -DDT_NCCL_DLOPEN         does not link NCCL, but loads libnccl.so.2 when a run begins, and
                                keeps the library loaded
       -DDT_NCCL_MIN_BYTES=n    messages between devices that are larger than n bytes go through
                                NCCL; 4096 by default. The value must be equal on every rank
       -DDT_NCCL_F32_WINDOW=n   number of elements, 4194304 by default, of each group's f32 window,
                                through which NCCL sums bf16 and f16. The value must be equal on
                                every rank and at least the number of ranks

   DOES NOT. Except for queues and NCCL, this file does not allocate memory, keep state or choose a
   device. A queue is a CUDA stream with the cuBLASLt plans of its matrix products. The caller
   provides scratch memory. A kernel runs on the calling thread's current device. No kernel adds
   with atomics.

   TYPES. Every kernel supports f32, bf16 and f16. Fill, copy, permute, cast and reduce also support
   f64 and i32. Init also supports f64, because a loss is an f64 scalar. Parameters and their
   optimizer state are f32, with an optional 16-bit copy of the parameters. A call with any other
   type, or a reduction of more than MAX_INPUTS (128) 16-bit inputs, launches no kernel and returns
   DT_ERR_UNSUPPORTED.

   CONTENTS
     1. Launching, queues (streams, grid-stride loops)
     2. Device memory (copies, pinned memory, peer access, events)
     3. Storage types, vectors, block reductions (bf16, f16, warp shuffles)
     4. Fill, copy, reduce
     5. Strides: binary, where, permute (broadcasting, transpose)
     6. Activations: unary, glu (GELU, SiLU, SwiGLU, sigmoid, power, clamp)
     7. Cast; quantised weights (NF4, int8)
     8. Sums over a dimension (split reductions)
     9. Checked indices: max, top-k, scatter
    10. Normalisation and softmax (LayerNorm, RMSNorm)
    11. Rotary embedding; counter-based RNG: dropout, init (RoPE, Philox)
    12. Embedding (scatter-add)
    13. Losses (cross-entropy, binary cross-entropy, online softmax, log-sum-exp merge)
    14. Norm and optimizers (gradient norm, digest, AdamW, SGD, 1-bit Adam)
    15. Matrix product (GEMM, packing, tensor cores, mma, wgmma, swizzle, cuBLASLt)
    16. Attention (flash attention, online softmax, log-sum-exp merge, grouped-query attention)
    17. The table
    18. NCCL (collectives and messages between GPUs, failure handling)

   SPEED. All kernels except those of sections 15 and 16 are memory-bound. They access 16 bytes at a
   time, keep rows in registers where these fit, so that each element is read and written once, and
   split sums over rows into enough parts to fill a GPU. Arrays whose length or address does not
   allow 16-byte accesses are processed element by element. cuBLASLt computes a matrix product if
   the call has a queue, and attention runs on tensor cores. For matrix products and attention there
   are also kernels that need neither cuBLASLt nor tensor cores.

   ORDER OF SUMS. The order of every sum depends only on sizes, including the size of the scratch
   memory. So the same call gives the same bits on the same build and kind of device. The bits
   differ from those of dt's CPU kernels: the CPU splits long sums differently, nvcc fuses a product
   and a sum into one instruction that rounds once, and the exponential is CUDA's expf or, for
   16-bit results, the hardware's approximation. tests/cuda/test_cuda.cc runs these kernels on a CPU
   and allows a relative error of 1e-6, and one rounding for 16-bit types. Tensor cores take 16-bit
   operands, so attention in bf16 and f16 rounds its probabilities and their gradients before it
   multiplies them. cuBLASLt chooses the order of its sums by the sizes of the product. In the
   following kernels nvcc can fuse nothing that changes a result, so the results have the same bits
   as on the CPU: fill, copy, permute, cast, quantize, digest, reduce, cumsum, max, topk, scatter,
   patches and its backward (except that of mean pooling, which fuses scale and accumulate), uniform
   init, embedding and its backward, and square_sums. The same holds for binary and dropout if they
   do not accumulate. NaN payloads are unspecified. Never compile this file with -use_fast_math. The
   file cannot refuse that flag, because nvcc defines no macro for it.

   ERRORS. If CUDA refuses a launch, the call returns DT_ERR_DEVICE. A kernel runs asynchronously,
   so a later call reports the kernel's failure, at the latest the sync that waits for the kernel.
   That sync also returns DT_ERR_ARG if a kernel found an index out of range (section 9). */

#include "dt_tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 12
#error "dt_kernels.cu needs CUDA 12 or later"
#endif

#if DT_VERSION != 200
#error "dt_kernels.cu 0.2.0 needs dt_tensor.h 0.2.0: copy all files from one release"
#endif

/* cuBLASLt computes matrix products if nvcc finds the header cublasLt.h. The kernels of section 15
   compute the products that cuBLASLt refuses. -DDT_NO_CUBLASLT uses only the kernels of section 15.
   With a compiler other than nvcc, -DDT_CUBLASLT enables cuBLASLt. */
#if !defined(DT_NO_CUBLASLT) && !defined(DT_CUBLASLT) && defined(__CUDACC__) && \
    defined(__has_include)
#if __has_include(<cublasLt.h>)
#define DT_CUBLASLT
#endif
#endif
#ifdef DT_CUBLASLT
#include <cublasLt.h>
#endif

/* NCCL carries the data of ranks that have a GPU each (section 18). With a compiler other than
   nvcc, -DDT_NCCL enables it. */
#if !defined(DT_NO_NCCL) && !defined(DT_NCCL) && defined(__CUDACC__) && defined(__has_include)
#if __has_include(<nccl.h>) && __has_include("dt_comm.h")
#define DT_NCCL
#endif
#endif
#ifdef DT_NCCL
#define DT__COMM_INTERNALS
#include "dt_comm.h"
#undef DT__COMM_INTERNALS
#include <nccl.h>
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 1)
#error "dt_kernels.cu needs NCCL 2.18.1 or later: ncclCommSplit. -DDT_NO_NCCL builds without"
#endif
#ifdef DT_NCCL_DLOPEN
#include <dlfcn.h>
#endif
#endif

/* Tests compile this file for a CPU with tests/cuda/cuda_on_cpu.h. In that header a launch is a
   function call, and the macro __global__ contains `static`. */
#ifdef __CUDACC__
#define DT_LAUNCH(kernel, grid, block, smem, stream, ...) \
    kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
#define DTK_KERNEL static __global__ void
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DTK_DYN_ALIGN 1024 /* bytes; wgmma's swizzled tiles need this alignment */
#else
#define DTK_DYN_ALIGN 16
#endif
#define DT_DYN_SMEM(T, name) \
    extern __shared__ __align__(DTK_DYN_ALIGN) \
    unsigned char dt_dyn_smem[]; \
    T *name = reinterpret_cast<T *>(dt_dyn_smem)
/* Unrolls a loop over arrays that must stay in registers; nvcc might not unroll it by itself. */
#define DTK_UNROLL _Pragma("unroll")
#define DTK_UNROLL_BY(n) DTK_PRAGMA(unroll n)
#define DTK_PRAGMA(x) _Pragma(#x)
#else
#define DTK_KERNEL __global__ void
#define DTK_UNROLL
#define DTK_UNROLL_BY(n)
#endif

namespace dt_cuda {

// ==== 1. Launching, queues ======================================================================

/* A queue is one rank's CUDA stream with its cuBLASLt plans. A launch returns to the host at once.
   The device runs a queue's kernels in the order of their launches:

       host     launch A, launch B, cuda_sync ............... returns
       device   ......[ kernel A ][ kernel B ]

   A kernel is a grid-stride loop: of T threads in the grid, thread i processes the elements
   i, i + T, i + 2T, ... */

/* A grid has at most MAX_BLOCKS blocks, several times the number that a GPU runs at once. The
   grid-stride loops cover arrays of any size. The argument structs of the kernel table
   (dt_tensor.h) are passed to the kernels by value. */
enum { BLOCK = 256, WARPS = BLOCK / 32, MAX_BLOCKS = 4096 };

/* Returns the number of blocks for n elements if a block processes `each` elements per iteration
   of its loop. */
static unsigned grid_for(size_t n, size_t each) {
    size_t blocks = n / each + (n % each != 0);
    return blocks < MAX_BLOCKS ? (unsigned)blocks : (unsigned)MAX_BLOCKS;
}

static dt_status launch_status() {
    return cudaGetLastError() == cudaSuccess ? DT_OK : DT_ERR_DEVICE;
}

/* Launches a kernel with grid_for(n, each) blocks. Launches nothing if n is 0, because CUDA refuses
   an empty grid. */
#define DTK_LAUNCH(kernel, n, each, stream, ...) \
    do { \
        if ((n) > 0) \
            DT_LAUNCH(kernel, grid_for((n), (each)), BLOCK, 0, stream_of(stream), __VA_ARGS__); \
    } while (0)

/* One rank's queue on a device. The `stream` argument of every function in the kernel table points
   to a queue. If it is NULL, kernels run on the current device's default stream and cuBLASLt is not
   used; tests of single kernels do this. */
struct cuda_queue {
    cudaStream_t stream;
    int device;
    bool owns_stream; /* true if dt_cuda_open created the stream; dt_cuda_close then destroys it */
    /* an int in pinned host memory: nonzero if a kernel has found an index out of range (section 9)
       since the last cuda_sync */
    int *bad_index;
    struct blas *blas; /* NULL until the first matrix product (section 15) */
};

static void blas_close(struct blas *blas);

static cudaStream_t stream_of(void *queue) { return queue ? ((cuda_queue *)queue)->stream : NULL; }

// ==== 2. Device memory ==========================================================================

/* The kernel table's entries that are not kernels: memory, copies, pinned memory, peer access,
   events and queues. An event orders two queues without the host:

       queue 0   [ kernel A ] record(event) [ kernel B ]
       queue 1                wait(event) ..[ kernel C ]      C starts after A has ended */

/* Returns true if `error` is cudaSuccess. Otherwise clears CUDA's last error, because the caller
   reports the failure and the next launch_status must not report it again. */
static bool succeeded(cudaError_t error) {
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error == cudaSuccess;
}

static void *cuda_alloc(void *user, size_t bytes) {
    void *p = NULL;
    (void)user;
    return succeeded(cudaMalloc(&p, bytes)) ? p : NULL;
}

static void cuda_free(void *user, void *p, size_t bytes) {
    (void)user;
    (void)bytes;
    (void)succeeded(cudaFree(p));
}

/* Asynchronous copy. The caller may reuse pageable host memory as soon as cuda_move returns, but
   pinned memory only after cuda_sync. */
static dt_status cuda_move(void *dst, const void *src, size_t bytes, void *stream) {
    if (bytes == 0) return DT_OK;
    bool queued = succeeded(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_of(stream)));
    return queued ? DT_OK : DT_ERR_DEVICE;
}

/* Waits for the queue's kernels and copies. Returns DT_ERR_ARG if a kernel found an index out of
   range (section 9). */
static dt_status cuda_sync(void *stream) {
    cuda_queue *queue = (cuda_queue *)stream;
    if (!succeeded(cudaStreamSynchronize(stream_of(stream)))) return DT_ERR_DEVICE;
    if (!queue || *queue->bad_index == 0) return DT_OK;
    *queue->bad_index = 0;
    return DT_ERR_ARG;
}

/* Allocates pinned memory: host memory that the device can copy from and to while the CPU
   continues. */
static void *cuda_pin(size_t bytes) {
    void *p = NULL;
    return succeeded(cudaMallocHost(&p, bytes)) ? p : NULL;
}

static void cuda_unpin(void *p, size_t bytes) {
    (void)bytes;
    (void)succeeded(cudaFreeHost(p));
}

/* Returns 1 if p points to memory that the device can access (device memory, managed memory or
   pinned host memory), 0 otherwise. */
static int cuda_can_access(const void *p) {
    cudaPointerAttributes of;
    return succeeded(cudaPointerGetAttributes(&of, p)) && of.type != cudaMemoryTypeUnregistered;
}

/* Gives the queue's device access to the memory of devices 0 to max_devices - 1. The access holds
   for all threads of the process. On failure, writes a description of the failure to `text`. */
static dt_status cuda_enable_peer_access(
    void *stream, int max_devices, char *text, size_t text_bytes) {
    int devices = 0, here = ((cuda_queue *)stream)->device;
    cudaError_t error = cudaGetDeviceCount(&devices);
    for (int there = 0; there < devices && there < max_devices && error == cudaSuccess; there++) {
        int can = 0;
        if (there != here) error = cudaDeviceCanAccessPeer(&can, here, there);
        if (can)
            error = cudaDeviceEnablePeerAccess(there, 0);
        else if (there != here && error == cudaSuccess)
            error = cudaErrorPeerAccessUnsupported;
        if (!succeeded(error) && error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;
        if (error != cudaSuccess && text_bytes > 0)
            snprintf(text, text_bytes, "device %d to the memory of device %d: %s", here, there,
                cudaGetErrorName(error));
    }
    return error == cudaSuccess ? DT_OK : DT_ERR_DEVICE;
}

static void *cuda_event_record(void *stream, void *handle) {
    cudaEvent_t event = (cudaEvent_t)handle;
    if (!event && !succeeded(cudaEventCreateWithFlags(&event, cudaEventDisableTiming))) return NULL;
    if (succeeded(cudaEventRecord(event, stream_of(stream)))) return event;
    if (!handle) (void)succeeded(cudaEventDestroy(event));
    return NULL;
}

static int cuda_event_query(void *handle) {
    cudaError_t error = cudaEventQuery((cudaEvent_t)handle);
    return succeeded(error) ? 1 : error == cudaErrorNotReady ? 0 : -1;
}

static dt_status cuda_event_wait(void *stream, void *handle) {
    return succeeded(cudaStreamWaitEvent(stream_of(stream), (cudaEvent_t)handle, 0))
               ? DT_OK
               : DT_ERR_DEVICE;
}

static void cuda_event_destroy(void *handle) {
    if (handle) (void)succeeded(cudaEventDestroy((cudaEvent_t)handle));
}

static void *report_error(char *text, size_t text_bytes, const char *what, cudaError_t error) {
    (void)cudaGetLastError();
    if (text_bytes > 0) snprintf(text, text_bytes, "%s: %s", what, cudaGetErrorName(error));
    return NULL;
}

extern "C" void *dt_cuda_open(dt_cuda_desc desc, char *text, size_t text_bytes) {
    cudaError_t error = cudaSetDevice(desc.device);
    if (error != cudaSuccess) return report_error(text, text_bytes, "cudaSetDevice", error);
    cuda_queue *queue = (cuda_queue *)calloc(1, sizeof *queue);
    if (!queue) return report_error(text, text_bytes, "a queue", cudaErrorMemoryAllocation);
    queue->device = desc.device;
    queue->stream = (cudaStream_t)desc.stream;
    queue->owns_stream = desc.stream == NULL;
    int lowest = 0, highest = 0; /* stream priorities: a smaller number runs first */
    queue->bad_index = (int *)cuda_pin(sizeof *queue->bad_index);
    if (!queue->bad_index)
        error = cudaErrorMemoryAllocation;
    else
        *queue->bad_index = 0;
    if (queue->owns_stream && desc.high_priority && error == cudaSuccess)
        error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    if (queue->owns_stream && error == cudaSuccess)
        error = cudaStreamCreateWithPriority(&queue->stream, cudaStreamNonBlocking, highest);
    if (error == cudaSuccess) return queue;
    if (queue->bad_index) cuda_unpin(queue->bad_index, sizeof *queue->bad_index);
    free(queue);
    return report_error(text, text_bytes, "a stream and its pinned memory", error);
}

extern "C" void dt_cuda_close(void *p) {
    cuda_queue *queue = (cuda_queue *)p;
    if (!queue) return;
    (void)succeeded(cudaStreamSynchronize(queue->stream));
    if (queue->owns_stream) (void)succeeded(cudaStreamDestroy(queue->stream));
    blas_close(queue->blas);
    cuda_unpin(queue->bad_index, sizeof *queue->bad_index);
    free(queue);
}

extern "C" void *dt_cuda_stream(void *queue) { return stream_of(queue); }
extern "C" int dt_cuda_device(void *queue) {
    int current = 0;
    if (queue) return ((cuda_queue *)queue)->device;
    (void)succeeded(cudaGetDevice(&current));
    return current;
}

static void *cuda_open(int local_rank, char *text, size_t text_bytes) {
    int devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices == 0) error = cudaErrorNoDevice;
    if (error != cudaSuccess) return report_error(text, text_bytes, "cudaGetDeviceCount", error);
    dt_cuda_desc desc = { local_rank % devices, NULL, 0 };
    return dt_cuda_open(desc, text, text_bytes);
}

// ==== 3. Storage types, vectors, block reductions ===============================================

/* Most kernels are memory-bound, so a thread reads and writes 16 bytes at a time (a vec) and
   computes in float:

       memory      | b0 b1 b2 b3 b4 b5 b6 b7 |     8 x bf16, read in one access by load_vec
       registers   | f0 f1 f2 f3 f4 f5 f6 f7 |     8 x float, widened by to_floats
       memory      | c0 c1 c2 c3 c4 c5 c6 c7 |     8 x bf16, each rounded once by store_floats

   load_floats is load_vec followed by to_floats. A block reduction first adds within each warp by
   shuffles, then adds the warps' results in shared memory. The order of the additions is fixed. */

/* The 16-bit types are storage types: a kernel widens their values to float, computes, and rounds
   each result once. CUDA's own 16-bit types are not used, because they need CUDA's headers, which a
   machine that runs the tests may lack. For the other dtypes kernels use float, double and int. */
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

/* Calls f<T>(...), where T is the storage type of `dtype`: float, bf16 or f16. Returns
   DT_ERR_UNSUPPORTED for other dtypes. */
#define DTK_BY_DTYPE(dtype, f, ...) \
    ((dtype) == DT_F32       ? f<float>(__VA_ARGS__) \
        : (dtype) == DT_BF16 ? f<bf16>(__VA_ARGS__) \
        : (dtype) == DT_F16  ? f<f16>(__VA_ARGS__) \
                             : DT_ERR_UNSUPPORTED)

/* Defines cuda_##k, the kernel table's function for kernel k, which calls k<T>. */
#define DTK_TABLE_ENTRY(k) \
    static dt_status cuda_##k(const dt_##k##_args *a, void *stream) { \
        return DTK_BY_DTYPE(a->dtype, k, a, stream); \
    }

static __device__ float widen(float x) { return x; }
static __device__ double widen(double x) { return x; }
static __device__ int widen(int x) { return x; }
static __device__ int64_t widen(int64_t x) { return x; }
static __device__ uint8_t widen(uint8_t x) { return x; }
static __device__ float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

static __device__ void round_to(float *out, float x) { *out = x; }
static __device__ void round_to(double *out, double x) { *out = x; }
static __device__ void round_to(int *out, int x) { *out = x; }
static __device__ void round_to(int64_t *out, int64_t x) { *out = x; }
static __device__ void round_to(uint8_t *out, uint8_t x) { *out = x; }

/* Converts to an integer type. Rounds toward zero; a value outside the type's range becomes its
   largest or smallest number, and a NaN becomes 0. */
static __host__ __device__ void saturate(int *out, double x) {
    x = x != x ? 0 : x > 2147483647.0 ? 2147483647.0 : x < -2147483648.0 ? -2147483648.0 : x;
    *out = (int)x;
}
static __host__ __device__ void saturate(int64_t *out, double x) {
    const double limit = 9223372036854775808.0; /* 2^63, which is too large by 1 */
    *out = x != x ? 0 : x >= limit ? INT64_MAX : x <= -limit ? INT64_MIN : (int64_t)x;
}
static __host__ __device__ void saturate(uint8_t *out, double x) {
    *out = (uint8_t)(x > 0 ? (x < 255 ? x : 255) : 0);
}

/* Rounds to nearest, ties to even. GPUs since sm_80 have an instruction for this rounding. The code
   for other devices does not round a NaN but makes the NaN quiet, because rounding up could carry
   into the sign bit. */
static __device__ void round_to(bf16 *out, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#else
    unsigned bits = __float_as_uint(x), rounded = bits + 0x7fffu + (bits >> 16 & 1);
    out->bits = (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) >> 16);
#endif
}

/* On the device each f16 conversion is one instruction. Tests on a CPU use the code after #else,
   where widening multiplies by 2^112: this changes the exponent's bias from f16's to float's and
   makes denormals normal. Rounding adds 0.5 to values below 2^-14. In that range f16 values have
   the same spacing as floats in [0.5, 1), so the addition rounds correctly. Values of 65,520 or
   more become infinity. */
#ifdef __CUDACC__
static __device__ float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

static __device__ void round_to(f16 *out, float x) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
}
#else
static float widen(f16 x) {
    unsigned magnitude = (unsigned)(x.bits & 0x7fff) << 13;
    unsigned bits = magnitude >= 0x0f800000u
                        ? magnitude | 0x7f800000u
                        : __float_as_uint(__uint_as_float(magnitude) * 5.192296858534828e33f);
    return __uint_as_float(bits | (unsigned)(x.bits & 0x8000) << 16);
}

static void round_to(f16 *out, float x) {
    unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    unsigned small = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
    unsigned normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    unsigned h = magnitude < 0x38800000u ? small : normal;
    h = magnitude >= 0x477ff000u ? 0x7c00u : h;
    h = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : h;
    out->bits = (uint16_t)(h | (bits >> 16 & 0x8000u));
}
#endif

/* Warp reduction by butterfly shuffles. Returns the sum over the warp to every lane, and the same
   bits to all lanes, because x + y equals y + x. */
template <class T> static __device__ T warp_sum(T v) {
    for (int other = 16; other > 0; other /= 2) v += __shfl_xor_sync(0xffffffffu, v, other);
    return v;
}

/* Block reduction. Returns the sum over the block to every thread. If THREADS is less than the
   block's size, returns to every thread the sum over its own group of THREADS consecutive threads.
   Each warp computes its sum first, then every thread adds the warps' sums in order. */
template <class T, int THREADS = BLOCK> static __device__ T block_sum(T v) {
    __shared__ T of_warp[32];
    v = warp_sum(v);
    __syncthreads(); /* after this barrier all threads have read the previous call's sum */
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    const T *mine = of_warp + threadIdx.x / THREADS * (THREADS / 32);
    T total = mine[0];
    for (int w = 1; w < THREADS / 32; w++) total += mine[w];
    return total;
}

/* warp_max returns to every thread the maximum over its warp, and block_max the maximum over its
   block. v must not be NaN: every comparison with a NaN is false, so a lane would keep its NaN and
   threads might get different results. The callers leave out NaNs when they compute v. */
static __device__ float warp_max(float v) {
    for (int other = 16; other > 0; other /= 2) {
        float theirs = __shfl_xor_sync(0xffffffffu, v, other);
        v = theirs > v ? theirs : v;
    }
    return v;
}

template <int THREADS = BLOCK> static __device__ float block_max(float v) {
    __shared__ float of_warp[THREADS / 32];
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    float max_value = of_warp[0];
    for (int w = 1; w < THREADS / 32; w++)
        max_value = of_warp[w] > max_value ? of_warp[w] : max_value;
    return max_value;
}

/* A vector of COUNT consecutive elements, 16 bytes by default. A thread loads or stores a vec of up
   to 16 bytes in one memory access, so the vec's address must be a multiple of its size. */
template <class T, int COUNT = 16 / sizeof(T)>
struct alignas(COUNT * sizeof(T) < 16 ? COUNT * sizeof(T) : 16) vec {
    enum { N = COUNT };
    T v[N];
};

template <int N, class T> static __device__ vec<T, N> load_vec(const T *p) {
    return *reinterpret_cast<const vec<T, N> *>(p);
}
template <class T, int N> static __device__ void store_vec(T *p, vec<T, N> x) {
    *reinterpret_cast<vec<T, N> *>(p) = x;
}

/* Loads the vec at p + i. Elements whose index in p is `count` or more are set to zero. The caller
   may set `aligned` only if the address p + i is a multiple of 16. */
template <class T>
static __device__ vec<T> load_vec_bounded(const T *p, size_t i, size_t count, bool aligned) {
    const int N = vec<T>::N;
    if (aligned && i + N <= count) return load_vec<N>(p + i);
    vec<T> x;
    for (int k = 0; k < N; k++) x.v[k] = i + k < count ? p[i + k] : T();
    return x;
}

template <int N, class T> static __device__ vec<float, N> to_floats(vec<T, N> x) {
    vec<float, N> y;
    for (int k = 0; k < N; k++) y.v[k] = widen(x.v[k]);
    return y;
}

template <int N, class T> static __device__ void round_to(vec<T, N> *out, vec<float, N> x) {
    for (int k = 0; k < N; k++) round_to(&out->v[k], x.v[k]);
}

/* Faster versions of to_floats for bf16, and of round_to for bf16 and f16, for sm_80 and later. A
   32-bit word holds two elements, the first element in the low half. Widening takes one instruction
   per element, rounding takes one instruction per word. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <int N> static __device__ vec<float, N> to_floats(vec<bf16, N> x) {
    vec<float, N> y;
    unsigned words[(N + 1) / 2] = { 0 };
    memcpy(words, &x, sizeof x);
    for (int k = 0; k < N; k++)
        y.v[k] = __uint_as_float(k % 2 ? words[k / 2] & 0xffff0000u : words[k / 2] << 16);
    return y;
}

#define DTK_ROUND_PAIRS(T, type) \
    template <int N> static __device__ void round_to(vec<T, N> *out, vec<float, N> x) { \
        unsigned words[(N + 1) / 2]; \
        for (int k = 0; k < N; k += 2) { \
            float high = k + 1 < N ? x.v[k + 1] : 0; \
            asm("cvt.rn." type ".f32 %0, %1, %2;" : "=r"(words[k / 2]) : "f"(high), "f"(x.v[k])); \
        } \
        memcpy(out, words, sizeof *out); \
    }
DTK_ROUND_PAIRS(bf16, "bf16x2")
DTK_ROUND_PAIRS(f16, "f16x2")
#endif

/* Rounds x and y to T and packs them into a word, x in the low half. */
template <class T> static __device__ unsigned pack_pair(float x, float y) {
    vec<float, 2> two = { { x, y } };
    vec<T, 2> rounded;
    unsigned word;
    round_to(&rounded, two);
    memcpy(&word, &rounded, sizeof word);
    return word;
}

template <int N, class T> static __device__ vec<float, N> load_floats(const T *p) {
    return to_floats(load_vec<N>(p));
}

/* A vec that a thread loads some time before it uses the elements. The vec is held as 32-bit words,
   because nvcc would unpack 16-bit elements right after the load, and so wait for the load too
   early. If the size of the vec is not a multiple of 4 bytes, it is held as elements. */
template <class T, int N, bool WORDS = N * sizeof(T) % 4 == 0> struct raw_vec {
    vec<unsigned, N * sizeof(T) / 4> x;
};
template <class T, int N> struct raw_vec<T, N, false> { vec<T, N> x; };

template <int N, class T> static __device__ vec<float, N> to_floats(const raw_vec<T, N> &later) {
    vec<T, N> x;
    memcpy(&x, &later.x, sizeof x);
    return to_floats(x);
}

/* Adds to *sum the vecs at the addresses at(0), at(1), ..., at(n - 1), in this order. A thread has
   COUNT loads in flight at a time. */
template <int COUNT, int N, class F>
static __device__ void add_vecs(vec<float, N> *sum, size_t n, F at) {
    for (size_t e = 0; e < n; e += COUNT) {
        decltype(load_vec<N>(at(e))) x[COUNT];
        DTK_UNROLL
        for (int j = 0; j < COUNT; j++)
            if (e + j < n) x[j] = load_vec<N>(at(e + j));
        DTK_UNROLL
        for (int j = 0; j < COUNT; j++) {
            vec<float, N> next = to_floats(x[j]);
            for (int k = 0; k < N && e + j < n; k++) sum->v[k] += next.v[k];
        }
    }
}

/* Stores N results at p. If `accumulate` is set, adds them to the elements at p. Each result is
   rounded once. */
template <class T, int N>
static __device__ void store_floats(T *p, vec<float, N> x, int accumulate = 0) {
    vec<T, N> rounded;
    if (accumulate) {
        vec<float, N> old = load_floats<N>(p);
        for (int k = 0; k < N; k++) x.v[k] += old.v[k];
    }
    round_to(&rounded, x);
    store_vec(p, rounded);
}

/* store_floats for one element. */
template <class T> static __device__ void store_float(T *to, float value, int accumulate = 0) {
    round_to(to, accumulate ? widen(*to) + value : value);
}

/* store_float with a dtype that is known only at run time. The branches cost little time, because
   only column sums and row sums use store_typed, and these sums write few elements. */
static __device__ void store_typed(
    dt_dtype dtype, void *out, size_t i, float value, int accumulate) {
    if (dtype == DT_F32)
        store_float((float *)out + i, value, accumulate);
    else if (dtype == DT_BF16)
        store_float((bf16 *)out + i, value, accumulate);
    else
        store_float((f16 *)out + i, value, accumulate);
}

/* Returns the dtype of an output: f32 if `wide` is set, else `dtype`. */
static dt_dtype output_dtype(dt_dtype dtype, int wide) { return wide ? DT_F32 : dtype; }

static __host__ __device__ bool aligned16(
    const void *a, const void *b = NULL, const void *c = NULL, const void *d = NULL) {
    return (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
}

/* For a grid-stride loop over a flat array in which a thread processes `each` elements per
   iteration: grid_first returns this thread's first index, grid_step returns the step. */
static __device__ size_t grid_first(int each) {
    return ((size_t)blockIdx.x * BLOCK + threadIdx.x) * each;
}
static __device__ size_t grid_step(int each) { return (size_t)gridDim.x * BLOCK * each; }

/* A type that carries the number N at compile time. The loops below call f(i, constant<N>()) for
   the N elements at index i. If the array is aligned, they call f once per vec, and with N = 1 for
   the elements after the last full vec. Otherwise they always call f with N = 1. f is compiled for
   both values of N. for_each_vec distributes the loop over all blocks of the grid.
   for_each_in_blocks distributes the loop over `blocks` blocks and runs the part of block number
   `block`. */
template <int COUNT> struct constant {
    enum { N = COUNT };
};

template <int N, class F>
static __device__ void for_each_in_blocks(
    unsigned block, unsigned blocks, size_t count, bool aligned, F f) {
    size_t first = (size_t)block * BLOCK + threadIdx.x, step = (size_t)blocks * BLOCK;
    size_t vec_end = aligned ? count / N * N : 0;
    for (size_t i = first * N; i < vec_end; i += step * N) f(i, constant<N>());
    for (size_t i = vec_end + first; i < count; i += step) f(i, constant<1>());
}

template <int N, class F> static __device__ void for_each_vec(size_t count, bool aligned, F f) {
    for_each_in_blocks<N>(blockIdx.x, gridDim.x, count, aligned, f);
}

/* Like for_each_vec, but for an array of `rows` rows of `cols` elements. Calls
   f(row, column, constant<N>()). */
template <int N, class F>
static __device__ void for_each_in_rows(size_t rows, size_t cols, bool aligned, F f) {
    size_t each = aligned && cols % N == 0 ? N : 1, vecs = cols / each;
    if (vecs == 0) return;
    /* Divisions are slow, so they are done once before the loop and not in every iteration. */
    size_t row = grid_first(1) / vecs, at = grid_first(1) % vecs;
    size_t row_stride = grid_step(1) / vecs, vec_stride = grid_step(1) % vecs;
    while (row < rows) {
        if (each == N)
            f(row, at * each, constant<N>());
        else
            f(row, at * each, constant<1>());
        at += vec_stride;
        row += row_stride + (at >= vecs);
        at -= at >= vecs ? vecs : 0;
    }
}

static __host__ __device__ size_t vec_count(size_t cols, int each) {
    return (cols + each - 1) / each;
}

// ==== 4. Fill, copy, reduce =====================================================================

template <class T, class Value>
DTK_KERNEL __launch_bounds__(BLOCK) fill_kernel(T *out, size_t count, Value value) {
    T x;
    round_to(&x, value);
    for_each_vec<vec<T>::N>(count, aligned16(out), [&](size_t i, auto width) {
        const int N = decltype(width)::N;
        vec<T, N> same;
        for (int k = 0; k < N; k++) same.v[k] = x;
        store_vec(out + i, same);
    });
}

template <class T, class Value> static dt_status fill(const dt_fill_args *a, void *stream) {
    DTK_LAUNCH((fill_kernel<T, Value>), a->count, BLOCK * vec<T>::N, stream, (T *)a->out, a->count,
        (Value)a->value);
    return launch_status();
}

template <class T> static dt_status fill_integers(const dt_fill_args *a, void *stream) {
    T value;
    saturate(&value, a->value);
    DTK_LAUNCH(
        (fill_kernel<T, T>), a->count, BLOCK * vec<T>::N, stream, (T *)a->out, a->count, value);
    return launch_status();
}

static dt_status cuda_fill(const dt_fill_args *a, void *stream) {
    switch (a->dtype) {
    case DT_F32: return fill<float, float>(a, stream);
    case DT_BF16: return fill<bf16, float>(a, stream);
    case DT_F16: return fill<f16, float>(a, stream);
    case DT_F64: return fill<double, double>(a, stream);
    case DT_I32: return fill_integers<int>(a, stream);
    case DT_U8: return fill_integers<uint8_t>(a, stream);
    case DT_I64: return fill_integers<int64_t>(a, stream);
    }
    return DT_ERR_UNSUPPORTED;
}

/* Copies rows in words. Word is the largest type of 16, 4, 2 or 1 bytes whose size divides all
   addresses, strides and row lengths of the copy. */
template <class Word> DTK_KERNEL __launch_bounds__(BLOCK) copy_kernel(dt_copy_args a) {
    size_t words = a.row_bytes / sizeof(Word);
    for (size_t i = grid_first(1); i < a.rows * words; i += grid_step(1)) {
        size_t row = i / words, word = i - row * words;
        const Word *in = (const Word *)((const char *)a.in + row * a.in_stride);
        Word *out = (Word *)((char *)a.out + row * a.out_stride);
        out[word] = in[word];
    }
}

static dt_status cuda_copy(const dt_copy_args *args, void *stream) {
    dt_copy_args a = *args;
    size_t bytes = a.rows * a.row_bytes;
    /* Contiguous rows are copied as one row, so only the total length limits the word size. */
    if (a.in_stride == a.row_bytes && a.out_stride == a.row_bytes) {
        a.rows = 1;
        a.row_bytes = bytes;
    }
    size_t all = (size_t)a.in | (size_t)a.out | a.row_bytes;
    if (a.rows > 1) all |= a.in_stride | a.out_stride;
    if (all % 16 == 0)
        DTK_LAUNCH(copy_kernel<uint4>, bytes / 16, BLOCK, stream, a);
    else if (all % 4 == 0)
        DTK_LAUNCH(copy_kernel<unsigned>, bytes / 4, BLOCK, stream, a);
    else if (all % 2 == 0)
        DTK_LAUNCH(copy_kernel<uint16_t>, bytes / 2, BLOCK, stream, a);
    else
        DTK_LAUNCH(copy_kernel<unsigned char>, bytes, BLOCK, stream, a);
    return launch_status();
}

/* The input pointers are part of the kernel's arguments, because the caller's array of pointers is
   in host memory. */
enum { MAX_INPUTS = 128 };
struct reduce_inputs {
    const void *p[MAX_INPUTS];
    int n;
    dt_op op;
    /* in the last launch of a DT_AVG: the number of inputs of all its launches; in all other
       launches: 0 */
    int divisor;
    bool aligned;
};

/* Sums and products. An integer result that overflows wraps around, as on the CPU. */
static __device__ float plus(float a, float b) { return a + b; }
static __device__ double plus(double a, double b) { return a + b; }
static __device__ int plus(int a, int b) { return (int)((unsigned)a + (unsigned)b); }
static __device__ int64_t plus(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a + (uint64_t)b);
}
static __device__ uint8_t plus(uint8_t a, uint8_t b) { return (uint8_t)(a + b); }
static __device__ float times(float a, float b) { return a * b; }
static __device__ double times(double a, double b) { return a * b; }
static __device__ int times(int a, int b) { return (int)((unsigned)a * (unsigned)b); }
static __device__ int64_t times(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a * (uint64_t)b);
}
static __device__ uint8_t times(uint8_t a, uint8_t b) { return (uint8_t)(a * b); }

template <class T> static __device__ T reduce_pair(dt_op op, T a, T b) {
    switch (op) {
    case DT_SUM:
    case DT_AVG: return plus(a, b);
    case DT_MAX: return b > a ? b : a;
    case DT_MIN: return b < a ? b : a;
    case DT_PROD: return times(a, b);
    }
    return a;
}

/* A thread reads its elements of all inputs before it writes the results, so `out` can be one of
   the inputs. Number is the accumulation type. It is float if T has 16 bits, so that partial
   results are not rounded to 16 bits. */
template <class T, class Number>
DTK_KERNEL __launch_bounds__(BLOCK) reduce_kernel(T *out, size_t count, reduce_inputs in) {
    for_each_vec<vec<T>::N>(count, in.aligned, [&](size_t i, auto width) {
        const int N = decltype(width)::N;
        vec<T, N> x = load_vec<N>((const T *)in.p[0] + i);
        Number sum[N];
        for (int k = 0; k < N; k++) sum[k] = widen(x.v[k]);
        for (int r = 1; r < in.n; r++) {
            x = load_vec<N>((const T *)in.p[r] + i);
            for (int k = 0; k < N; k++) sum[k] = reduce_pair(in.op, sum[k], (Number)widen(x.v[k]));
        }
        /* a uint8_t is divided as an int, because the number of inputs may not fit into it */
        for (int k = 0; k < N && in.divisor > 0; k++) sum[k] = (Number)(sum[k] / in.divisor);
        for (int k = 0; k < N; k++) round_to(&x.v[k], sum[k]);
        store_vec(out + i, x);
    });
}

/* A reduction of more than MAX_INPUTS inputs takes several launches. Each launch after the first
   starts from the contents of `out`, so the order of the sum is the same as in one launch. Such a
   reduction is refused in two cases. For 16-bit types, partial results would be rounded between
   launches. If `out` is also an input of a later launch, the first launch would overwrite that
   input. */
template <class T, class Number> static dt_status reduce(const dt_reduce_args *a, void *stream) {
    if (a->n < 1) return DT_ERR_ARG;
    if (a->n > MAX_INPUTS && sizeof(T) < sizeof(Number)) return DT_ERR_UNSUPPORTED;
    for (int r = MAX_INPUTS; r < a->n; r++)
        if (a->in[r] == a->out) return DT_ERR_UNSUPPORTED;
    for (int done = 0; done < a->n;) {
        reduce_inputs in = {};
        in.op = a->op;
        if (done > 0) in.p[in.n++] = a->out;
        while (done < a->n && in.n < MAX_INPUTS) in.p[in.n++] = a->in[done++];
        in.divisor = a->op == DT_AVG && done == a->n ? a->n : 0;
        in.aligned = aligned16(a->out);
        for (int r = 0; r < in.n; r++) in.aligned = in.aligned && aligned16(in.p[r]);
        DTK_LAUNCH((reduce_kernel<T, Number>), a->count, BLOCK * vec<T>::N, stream, (T *)a->out,
            a->count, in);
    }
    dt_status status = launch_status();
    for (int k = 0; k < a->n_copies && status == DT_OK; k++)
        status = cuda_move(a->copies[k], a->out, a->count * sizeof(T), stream);
    return status;
}

static dt_status cuda_reduce(const dt_reduce_args *a, void *stream) {
    switch (a->dtype) {
    case DT_F32: return reduce<float, float>(a, stream);
    case DT_BF16: return reduce<bf16, float>(a, stream);
    case DT_F16: return reduce<f16, float>(a, stream);
    case DT_F64: return reduce<double, double>(a, stream);
    case DT_I32: return reduce<int, int>(a, stream);
    case DT_U8: return reduce<uint8_t, uint8_t>(a, stream);
    case DT_I64: return reduce<int64_t, int64_t>(a, stream);
    }
    return DT_ERR_UNSUPPORTED;
}

// ==== 5. Strides: binary, where, permute ========================================================

/* The dimensions `d` of two arrays and their strides: `a` of the first array, `b` of the second.
   Adjacent dimensions that are contiguous in both arrays are merged. So two contiguous tensors of
   the same shape need one dimension; a matrix and a bias that is added to its rows need two. */
struct strided {
    int nd; /* number of dimensions, at least 1 */
    int64_t d[DT_MAX_DIMS], a[DT_MAX_DIMS], b[DT_MAX_DIMS];
};

static strided make_strided(dt_shape shape, const int64_t *a, const int64_t *b) {
    strided s = { 0, { 0 }, { 0 }, { 0 } };
    for (int i = 0; i < shape.nd; i++) {
        int last = s.nd - 1;
        if (shape.d[i] == 1) continue;
        if (last < 0 || s.a[last] != a[i] * shape.d[i] || s.b[last] != b[i] * shape.d[i])
            s.d[last = s.nd++] = 1;
        s.d[last] *= shape.d[i];
        s.a[last] = a[i];
        s.b[last] = b[i];
    }
    if (s.nd == 0) s.d[s.nd++] = 1;
    return s;
}

/* Returns the number of elements. It does not use a function of dt_tensor.h, so that this file
   links without dt_tensor.h's implementation. */
static size_t element_count(const strided *s) {
    size_t n = 1;
    for (int i = 0; i < s->nd; i++) n *= (size_t)s->d[i];
    return n;
}

static __device__ void offsets_of(const strided &s, size_t i, int64_t *a, int64_t *b) {
    *a = *b = 0;
    for (int d = s.nd - 1; d > 0; d--) {
        size_t next = i / (size_t)s.d[d], at = i - next * (size_t)s.d[d];
        i = next;
        *a += (int64_t)at * s.a[d];
        *b += (int64_t)at * s.b[d];
    }
    *a += (int64_t)i * s.a[0];
    *b += (int64_t)i * s.b[0];
}

/* Returns true if every group of `each` consecutive elements along the last dimension is an aligned
   vec of the array at p, or one repeated element (stride 0). */
static bool can_vectorize(const void *p, const int64_t *stride, const strided *s, int64_t each) {
    bool vectorized = aligned16(p) && stride[s->nd - 1] == 1;
    for (int i = 0; i < s->nd - 1; i++) vectorized = vectorized && stride[i] % each == 0;
    return s->d[s->nd - 1] % each == 0 && (vectorized || stride[s->nd - 1] == 0);
}

static __device__ float apply_binary(int op, float x, float y) {
    switch (op) {
    case DT_SUB: return x - y;
    case DT_MUL: return x * y;
    case DT_DIV: return x / y;
    case DT_MINIMUM: return x < y || x != x ? x : y; /* NaN if x or y is NaN */
    case DT_MAXIMUM: return x > y || x != x ? x : y;
    case DT_LESS: return x < y;
    case DT_LESS_EQUAL: return x <= y;
    case DT_EQUAL: return x == y;
    case DT_STEP: return x < y ? 0 : x == y ? 0.5f : 1;
    }
    return x + y;
}

template <int N, class T>
static __device__ vec<float, N> load_floats_strided(const T *p, int64_t stride) {
    if (stride != 0) return load_floats<N>(p);
    vec<float, N> x;
    for (int k = 0; k < N; k++) x.v[k] = widen(*p);
    return x;
}

/* A thread computes N consecutive elements at a time. It reads its operands before it writes the
   results, so the output can be the array of one operand. */
template <class T, int N>
DTK_KERNEL __launch_bounds__(BLOCK) binary_kernel(dt_binary_args a, strided s, size_t count) {
    for (size_t i = grid_first(N); i < count; i += grid_step(N)) {
        int64_t at_a, at_b;
        offsets_of(s, i, &at_a, &at_b);
        vec<float, N> x = load_floats_strided<N>((const T *)a.a + at_a, s.a[s.nd - 1]);
        vec<float, N> y = load_floats_strided<N>((const T *)a.b + at_b, s.b[s.nd - 1]);
        for (int k = 0; k < N; k++) x.v[k] = apply_binary(a.op, x.v[k], y.v[k]);
        if (a.factor) y = load_floats<N>((const T *)a.factor + i);
        for (int k = 0; k < N && a.factor; k++) x.v[k] *= y.v[k];
        for (int k = 0; k < N && a.negate; k++) x.v[k] = -x.v[k];
        store_floats((T *)a.out + i, x, a.accumulate);
    }
}

template <class T> static dt_status binary(const dt_binary_args *a, void *stream) {
    const int N = vec<T>::N;
    if (a->op < DT_ADD || a->op >= DT_BINARY_OPS) return DT_ERR_ARG;
    strided s = make_strided(a->shape, a->stride_a, a->stride_b);
    bool vectorized = aligned16(a->out) && aligned16(a->factor) &&
                      can_vectorize(a->a, s.a, &s, N) && can_vectorize(a->b, s.b, &s, N);
    if (vectorized)
        DTK_LAUNCH(
            (binary_kernel<T, N>), element_count(&s), BLOCK * N, stream, *a, s, element_count(&s));
    else
        DTK_LAUNCH(
            (binary_kernel<T, 1>), element_count(&s), BLOCK, stream, *a, s, element_count(&s));
    return launch_status();
}
DTK_TABLE_ENTRY(binary)

/* s.a holds the strides of the mask, s.b those of a, and t.a those of b. */
template <class T, int N>
DTK_KERNEL __launch_bounds__(BLOCK)
    where_kernel(dt_where_args a, strided s, strided t, size_t count) {
    for (size_t i = grid_first(N); i < count; i += grid_step(N)) {
        int64_t at_mask, at_a, at_b;
        vec<float, N> x = { { 0 } }, y = { { 0 } };
        offsets_of(t, i, &at_b, &at_a);
        offsets_of(s, i, &at_mask, &at_a);
        vec<float, N> mask = load_floats_strided<N>((const T *)a.mask + at_mask, s.a[s.nd - 1]);
        if (a.a) x = load_floats_strided<N>((const T *)a.a + at_a, s.b[s.nd - 1]);
        if (a.b) y = load_floats_strided<N>((const T *)a.b + at_b, t.a[t.nd - 1]);
        for (int k = 0; k < N; k++) x.v[k] = mask.v[k] != 0 ? x.v[k] : y.v[k];
        store_floats((T *)a.out + i, x, a.accumulate);
    }
}

template <class T> static dt_status where(const dt_where_args *a, void *stream) {
    const int N = vec<T>::N;
    strided s = make_strided(a->shape, a->stride_mask, a->stride_a),
            t = make_strided(a->shape, a->stride_b, a->stride_b);
    bool vectorized = aligned16(a->out) && can_vectorize(a->mask, s.a, &s, N) &&
                      can_vectorize(a->a, s.b, &s, N) && can_vectorize(a->b, t.a, &t, N);
    size_t count = element_count(&s);
    if (vectorized)
        DTK_LAUNCH((where_kernel<T, N>), count, BLOCK * N, stream, *a, s, t, count);
    else
        DTK_LAUNCH((where_kernel<T, 1>), count, BLOCK, stream, *a, s, t, count);
    return launch_status();
}
DTK_TABLE_ENTRY(where)

/* A thread moves N elements at a time. They are a vec if the last dimension is contiguous in the
   input and in the output; otherwise N is 1. s.a holds the output's strides, s.b the input's. */
template <class T, int N>
DTK_KERNEL __launch_bounds__(BLOCK) permute_kernel(dt_permute_args a, strided s, size_t count) {
    for (size_t i = grid_first(N); i < count; i += grid_step(N)) {
        int64_t to, from;
        offsets_of(s, i, &to, &from);
        vec<T, N> x = load_vec<N>((const T *)a.in + from);
        T *out = (T *)a.out + to;
        if (a.accumulate) {
            vec<T, N> old = load_vec<N>(out);
            for (int k = 0; k < N; k++) round_to(&x.v[k], plus(widen(old.v[k]), widen(x.v[k])));
        }
        store_vec(out, x);
    }
}

/* Tiled transpose. The dimension that is contiguous in the input has the length in_dense, and in
   the output the stride out_stride. The dimension that is contiguous in the output has the length
   out_dense, and in the input the stride in_stride. Tiles of 32 x 32 elements pass through shared
   memory, so that global memory is read and written along contiguous rows. A tile's rows have 33
   elements in shared memory, so that reading a column has no bank conflicts. */
struct transpose_shape {
    int64_t in_dense, out_dense, in_stride, out_stride;
};

template <class Word>
DTK_KERNEL __launch_bounds__(BLOCK)
    transpose_kernel(dt_permute_args a, strided rest, transpose_shape t, size_t tiles) {
    __shared__ Word tile[32][33];
    const Word *in = (const Word *)a.in;
    Word *out = (Word *)a.out;
    size_t tiles_across = (size_t)(t.in_dense + 31) / 32,
           each = tiles_across * (size_t)((t.out_dense + 31) / 32);
    int lane = threadIdx.x % 32;
    for (size_t i = blockIdx.x; i < tiles; i += gridDim.x) {
        int64_t to, from, x = (int64_t)(i % each % tiles_across) * 32,
                          y = (int64_t)(i % each / tiles_across) * 32;
        offsets_of(rest, i / each, &to, &from);
        for (int j = threadIdx.x / 32; j < 32; j += WARPS)
            if (y + j < t.out_dense && x + lane < t.in_dense)
                tile[j][lane] = in[from + (y + j) * t.in_stride + x + lane];
        __syncthreads();
        for (int j = threadIdx.x / 32; j < 32; j += WARPS)
            if (x + j < t.in_dense && y + lane < t.out_dense)
                out[to + (x + j) * t.out_stride + y + lane] = tile[lane][j];
        __syncthreads(); /* after this barrier all threads have read the tile */
    }
}

/* If the call is a transpose of at least 8 x 8 elements without accumulation, launches
   transpose_kernel and returns true; otherwise returns false. s.a holds the output's strides, s.b
   the input's. */
template <class Word>
static bool launch_transpose(const dt_permute_args *a, strided s, void *stream) {
    int in = -1, out = -1;
    for (int i = 0; i < s.nd; i++) {
        if (s.a[i] == 1) out = i;
        if (s.b[i] == 1) in = i;
    }
    if (in < 0 || out < 0 || in == out || a->accumulate || s.d[in] < 8 || s.d[out] < 8)
        return false;
    transpose_shape t = { s.d[in], s.d[out], s.b[out], s.a[in] };
    size_t tiles = (size_t)((t.in_dense + 31) / 32) * (size_t)((t.out_dense + 31) / 32);
    s.d[in] = s.d[out] = 1;
    tiles *= element_count(&s);
    DTK_LAUNCH(transpose_kernel<Word>, tiles, 1, stream, *a, s, t, tiles);
    return true;
}

/* Word is an integer type of the same size as T. */
template <class T, class Word> static dt_status permute(const dt_permute_args *a, void *stream) {
    const int N = vec<T>::N;
    strided s = make_strided(a->shape, a->out_stride, a->in_stride);
    int last = s.nd - 1;
    bool vectorized = s.a[last] == 1 && s.b[last] == 1 && can_vectorize(a->out, s.a, &s, N) &&
                      can_vectorize(a->in, s.b, &s, N);
    if (vectorized)
        DTK_LAUNCH(
            (permute_kernel<T, N>), element_count(&s), BLOCK * N, stream, *a, s, element_count(&s));
    else if (!launch_transpose<Word>(a, s, stream))
        DTK_LAUNCH(
            (permute_kernel<T, 1>), element_count(&s), BLOCK, stream, *a, s, element_count(&s));
    return launch_status();
}

static dt_status cuda_permute(const dt_permute_args *a, void *stream) {
    switch (a->dtype) {
    case DT_F32: return permute<float, unsigned>(a, stream);
    case DT_BF16: return permute<bf16, uint16_t>(a, stream);
    case DT_F16: return permute<f16, uint16_t>(a, stream);
    case DT_F64: return permute<double, uint64_t>(a, stream);
    case DT_I32: return permute<int, unsigned>(a, stream);
    case DT_U8: return permute<uint8_t, uint8_t>(a, stream);
    case DT_I64: return permute<int64_t, uint64_t>(a, stream);
    }
    return DT_ERR_UNSUPPORTED;
}

// ==== 6. Activations: unary, glu ================================================================

/* exp_as and divide_as take the type T in which the caller stores the result. If T has 16 bits, the
   last bits of a float are not needed, so the hardware's approximate exponential and division are
   exact enough. The approximations are so fast that the kernels below stay memory-bound. */
#ifdef __CUDACC__
/* Returns approximately exp(x), or 0 if the result is below 2^-126. CUDA's __expf needs extra
   instructions for results below 2^-126. */
static __device__ float fast_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.44269504f * x));
    return y;
}
#else
static float fast_exp(float x) { return __expf(x); }
#endif
template <class T> static __device__ float exp_as(float x) {
    return sizeof(T) == 2 ? fast_exp(x) : expf(x);
}
template <class T> static __device__ float divide_as(float x, float y) {
    return sizeof(T) == 2 ? __fdividef(x, y) : x / y;
}
template <class T> static __device__ float sigmoid_as(float x) {
    return divide_as<T>(1, 1 + exp_as<T>(-x));
}

/* Returns ln(1 + e^-|x|), which is at most ln 2. */
static __device__ float log1p_exp(float x) { return log1pf(expf(-fabsf(x))); }

/* The cumulative distribution function of the normal distribution. For negative x the sum
   1 + erff(x) would cancel, but erfcf stays accurate. */
static __device__ float normal_cdf(float x) { return 0.5f * erfcf(-0.70710678f * x); }

/* GELU in its tanh form: gelu(x) = x 0.5 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3). The
   factor 0.5 (1 + tanh u) is computed as 1 / (1 + exp(-2 u)), the logistic function of 2u, which
   needs only one exponential and does not cancel where tanh u is close to -1. */
#define DTK_GELU_SCALE 0.7978845608028654f /* sqrt(2/pi) */
#define DTK_GELU_CUBIC 0.044715f

/* Returns f(x) for the activation f without parameters that `kind` names (DT_ACT_GELU, ...). T is
   the type in which the caller stores the result. */
template <class T = float> static __device__ float activate(int kind, float x) {
    switch (kind) {
    case DT_ACT_GELU:
        return divide_as<T>(
            x, 1 + exp_as<T>(-2 * DTK_GELU_SCALE * (x + DTK_GELU_CUBIC * x * x * x)));
    case DT_ACT_GELU_ERF: return x * normal_cdf(x);
    case DT_ACT_SILU: return x * sigmoid_as<T>(x);
    case DT_ACT_RELU: return x < 0 ? 0 : x;
    case DT_ACT_TANH: return tanhf(x);
    case DT_ACT_EXP: return expf(x);
    case DT_ACT_LN: return logf(x);
    case DT_ACT_SIGMOID: return sigmoid_as<T>(x);
    case DT_ACT_SOFTPLUS: return (x > 0 ? x : 0) + log1p_exp(x);
    case DT_ACT_SQRT: return sqrtf(x);
    case DT_ACT_ABS: return fabsf(x);
    }
    return x;
}

/* Returns x^y; a square and its derivative without powf. */
static __device__ float power(float x, float y) { return y == 2 ? x * x : y == 1 ? x : powf(x, y); }

/* Like activate, also for activations with parameters. */
template <class T>
static __device__ float activate_with(int kind, float x, float scale, float shift) {
    switch (kind) {
    case DT_ACT_AFFINE: return scale * x + shift;
    case DT_ACT_POW: return power(x, scale);
    case DT_ACT_CLAMP: return x < scale ? scale : x > shift ? shift : x;
    }
    return activate<T>(kind, x);
}

/* Clamps x to [-bound, bound]. For |x| > bound each of the derivatives below is exactly 0 or 1 in
   float. They clamp x, because for large |x| they would multiply infinity by zero and return
   NaN. */
static __device__ float clamped(float x, float bound) {
    x = x < -bound ? -bound : x;
    return x > bound ? bound : x;
}

/* Returns gelu'(x) = s + x s (1 - s) 2 u', with s = 1 / (1 + e) and e = exp(-2 u). The factor 1 - s
   is computed as e s, because the difference would cancel where s is close to 1, and the large
   factor x u' would amplify that error. */
template <class T> static __device__ float gelu_derivative(float x) {
    x = clamped(x, 30);
    float u = DTK_GELU_SCALE * (x + DTK_GELU_CUBIC * x * x * x),
          du = DTK_GELU_SCALE * (1 + 3 * DTK_GELU_CUBIC * x * x);
    float e = exp_as<T>(-clamped(2 * u, 80)), s = divide_as<T>(1, 1 + e);
    return s + 2 * x * s * (e * s) * du;
}
#undef DTK_GELU_SCALE
#undef DTK_GELU_CUBIC

static __device__ float gelu_erf_derivative(float x) {
    x = clamped(x, 30);
    return normal_cdf(x) + x * 0.3989422804014327f * expf(-0.5f * x * x);
}

template <class T> static __device__ float silu_derivative(float x) {
    x = clamped(x, 80);
    float e = exp_as<T>(-x), s = divide_as<T>(1, 1 + e);
    return s + x * s * (e * s);
}

template <class T> static __device__ float sigmoid_derivative(float x) {
    float e = exp_as<T>(-fabsf(x)), s = divide_as<T>(1, 1 + e);
    return s * (e * s);
}

/* Returns d f'(x) for the activation f without parameters that `kind` names. T is the type in which
   the caller stores the result. Where ReLU's derivative is 0 the result is 0, not d * 0, because
   the product would be NaN for an infinite d. */
template <class T = float> static __device__ float activate_back(int kind, float x, float d) {
    switch (kind) {
    case DT_ACT_GELU: return d * gelu_derivative<T>(x);
    case DT_ACT_GELU_ERF: return d * gelu_erf_derivative(x);
    case DT_ACT_SILU: return d * silu_derivative<T>(x);
    case DT_ACT_RELU: return x > 0 ? d : 0;
    case DT_ACT_TANH: {
        float t = tanhf(x);
        return d * (1 - t * t);
    }
    case DT_ACT_EXP: return d * expf(x);
    case DT_ACT_LN: return d / x;
    case DT_ACT_SIGMOID: return d * sigmoid_derivative<T>(x);
    case DT_ACT_SOFTPLUS: return d * sigmoid_as<T>(x);
    case DT_ACT_SQRT: return d / (2 * sqrtf(x));
    case DT_ACT_ABS: return x > 0 ? d : x < 0 ? -d : 0;
    }
    return d;
}

/* Like activate_back, also for activations with parameters. */
template <class T>
static __device__ float activate_back_with(int kind, float x, float d, float scale, float shift) {
    switch (kind) {
    case DT_ACT_AFFINE: return d * scale;
    case DT_ACT_POW: return scale == 0 ? 0 : d * (scale * power(x, scale - 1));
    case DT_ACT_CLAMP: return x > scale && x < shift ? d : 0;
    }
    return activate_back<T>(kind, x, d);
}

/* Calls f(constant<kind>()), so that f knows the activation at compile time. The kernel then
   branches once per vec and not once per element, and the vec's elements are computed in
   parallel. */
template <class F> static __device__ void with_activation(int kind, F f) {
    switch (kind) {
    case DT_ACT_GELU: return f(constant<DT_ACT_GELU>());
    case DT_ACT_GELU_ERF: return f(constant<DT_ACT_GELU_ERF>());
    case DT_ACT_SILU: return f(constant<DT_ACT_SILU>());
    case DT_ACT_RELU: return f(constant<DT_ACT_RELU>());
    case DT_ACT_TANH: return f(constant<DT_ACT_TANH>());
    case DT_ACT_EXP: return f(constant<DT_ACT_EXP>());
    case DT_ACT_LN: return f(constant<DT_ACT_LN>());
    case DT_ACT_SIGMOID: return f(constant<DT_ACT_SIGMOID>());
    case DT_ACT_SOFTPLUS: return f(constant<DT_ACT_SOFTPLUS>());
    case DT_ACT_SQRT: return f(constant<DT_ACT_SQRT>());
    case DT_ACT_ABS: return f(constant<DT_ACT_ABS>());
    case DT_ACT_AFFINE: return f(constant<DT_ACT_AFFINE>());
    case DT_ACT_POW: return f(constant<DT_ACT_POW>());
    case DT_ACT_CLAMP: return f(constant<DT_ACT_CLAMP>());
    }
    f(constant<DT_ACT_NONE>());
}

template <class T> DTK_KERNEL __launch_bounds__(BLOCK) unary_kernel(dt_unary_args a) {
    float scale = (float)a.scale, shift = (float)a.shift;
    for_each_vec<vec<T>::N>(a.count, aligned16(a.out, a.in), [&](size_t i, auto width) {
        const int N = decltype(width)::N;
        vec<float, N> x = load_floats<N>((const T *)a.in + i);
        with_activation(a.act, [&](auto kind) {
            for (int k = 0; k < N; k++)
                x.v[k] = activate_with<T>(decltype(kind)::N, x.v[k], scale, shift);
        });
        store_floats((T *)a.out + i, x);
    });
}

template <class T> static dt_status unary(const dt_unary_args *a, void *stream) {
    if (a->act < 0 || a->act >= DT_ACTS) return DT_ERR_ARG;
    DTK_LAUNCH(unary_kernel<T>, a->count, BLOCK * vec<T>::N, stream, *a);
    return launch_status();
}
DTK_TABLE_ENTRY(unary)

/* a.in may be NULL if the activation's derivative does not depend on the input. */
template <class T> DTK_KERNEL __launch_bounds__(BLOCK) unary_back_kernel(dt_unary_back_args a) {
    float scale = (float)a.scale, shift = (float)a.shift;
    for_each_vec<vec<T>::N>(a.count, aligned16(a.dx, a.dout, a.in), [&](size_t i, auto width) {
        const int N = decltype(width)::N;
        vec<float, N> d = load_floats<N>((const T *)a.dout + i), x = { { 0 } };
        if (a.in) x = load_floats<N>((const T *)a.in + i);
        with_activation(a.act, [&](auto kind) {
            for (int k = 0; k < N; k++)
                d.v[k] = activate_back_with<T>(decltype(kind)::N, x.v[k], d.v[k], scale, shift);
        });
        store_floats((T *)a.dx + i, d, a.accumulate);
    });
}

template <class T> static dt_status unary_back(const dt_unary_back_args *a, void *stream) {
    if (a->act < 0 || a->act >= DT_ACTS) return DT_ERR_ARG;
    DTK_LAUNCH(unary_back_kernel<T>, a->count, BLOCK * vec<T>::N, stream, *a);
    return launch_status();
}
DTK_TABLE_ENTRY(unary_back)

/* Gated linear unit, arXiv:2002.05202: out = act(gate) * up. Each row of `in` has `cols` elements
   of gate, then `cols` elements of up. */
template <class T> DTK_KERNEL __launch_bounds__(BLOCK) glu_kernel(dt_glu_args a) {
    for_each_in_rows<vec<T>::N>(
        a.rows, a.cols, aligned16(a.out, a.in), [&](size_t row, size_t col, auto width) {
            const int N = decltype(width)::N;
            const T *gates = (const T *)a.in + row * 2 * a.cols + col;
            vec<float, N> gate = load_floats<N>(gates), up = load_floats<N>(gates + a.cols);
            with_activation(a.act, [&](auto kind) {
                for (int k = 0; k < N; k++) up.v[k] *= activate<T>(decltype(kind)::N, gate.v[k]);
            });
            store_floats((T *)a.out + row * a.cols + col, up);
        });
}

template <class T> static dt_status glu(const dt_glu_args *a, void *stream) {
    if (a->act < 0 || a->act >= DT_ACT_AFFINE) return DT_ERR_ARG;
    DTK_LAUNCH(glu_kernel<T>, a->rows * a->cols, BLOCK * vec<T>::N, stream, *a);
    return launch_status();
}
DTK_TABLE_ENTRY(glu)

template <class T> DTK_KERNEL __launch_bounds__(BLOCK) glu_back_kernel(dt_glu_back_args a) {
    for_each_in_rows<vec<T>::N>(
        a.rows, a.cols, aligned16(a.dx, a.in, a.dout), [&](size_t row, size_t col, auto width) {
            const int N = decltype(width)::N;
            size_t at = row * 2 * a.cols + col;
            const T *gates = (const T *)a.in + at;
            vec<float, N> gate = load_floats<N>(gates), up = load_floats<N>(gates + a.cols);
            vec<float, N> d = load_floats<N>((const T *)a.dout + row * a.cols + col);
            with_activation(a.act, [&](auto kind) {
                for (int k = 0; k < N; k++) {
                    up.v[k] = activate_back<T>(decltype(kind)::N, gate.v[k], d.v[k] * up.v[k]);
                    gate.v[k] = activate<T>(decltype(kind)::N, gate.v[k]) * d.v[k];
                }
            });
            store_floats((T *)a.dx + at, up, a.accumulate);
            store_floats((T *)a.dx + at + a.cols, gate, a.accumulate);
        });
}

template <class T> static dt_status glu_back(const dt_glu_back_args *a, void *stream) {
    if (a->act < 0 || a->act >= DT_ACT_AFFINE) return DT_ERR_ARG;
    DTK_LAUNCH(glu_back_kernel<T>, a->rows * a->cols, BLOCK * vec<T>::N, stream, *a);
    return launch_status();
}
DTK_TABLE_ENTRY(glu_back)

// ==== 7. Cast; quantised weights ================================================================

/* A cast gives the same bits as on the CPU. The value is first converted to double, which
   represents every value of the other types exactly, except of i64 (see odd_double). A double is converted to a 16-bit type in two
   steps. The first step rounds to float. If the double lies between two floats, this step chooses
   the float whose last bit is 1 (rounding to odd). The second step rounds the float to 16 bits. The
   result is the same as after a single rounding. */
static __device__ float round_to_odd(double x) {
    float f = (float)x;
    unsigned bits = __float_as_uint(f);
    if ((double)f == x || x != x) return f;
    return __uint_as_float((fabs((double)f) > fabs(x) ? bits - 1 : bits) | 1);
}

template <class T> static __device__ void convert(T *out, double x) {
    round_to(out, round_to_odd(x));
}
static __device__ void convert(float *out, double x) { *out = (float)x; }
static __device__ void convert(double *out, double x) { *out = x; }

static __device__ void convert(int *out, double x) { saturate(out, x); }
static __device__ void convert(int64_t *out, double x) { saturate(out, x); }
static __device__ void convert(uint8_t *out, double x) { saturate(out, x); }

/* Converts to double and rounds to odd an integer beyond 2^53, as on the CPU (dt__i64_to_odd). */
static __device__ double odd_double(int64_t x) {
    bool is_exact = x >= -(1ll << 53) && x <= 1ll << 53;
    return (double)(is_exact ? x : (x & ~2047ll) | (x & 2047 ? 2048 : 0));
}

/* A value of type f32, bf16 or f16 is converted to f32, bf16 or f16 without a double in between. */
template <class T> static __device__ void convert(T *out, float x) { round_to(out, x); }
static __device__ void convert(double *out, float x) { *out = (double)x; }
static __device__ void convert(int *out, float x) { convert(out, (double)x); }
static __device__ void convert(int64_t *out, float x) { convert(out, (double)x); }
static __device__ void convert(uint8_t *out, float x) { convert(out, (double)x); }
template <class T> static __device__ void convert(T *out, int x) { convert(out, (double)x); }
template <class T> static __device__ void convert(T *out, uint8_t x) { convert(out, (double)x); }
template <class T> static __device__ void convert(T *out, int64_t x) {
    convert(out, odd_double(x));
}
static __device__ void convert(double *out, int64_t x) { *out = (double)x; }
static __device__ void convert(int64_t *out, int64_t x) { *out = x; }

/* Converts a vec element by element. From float to bf16 or f16 it calls round_to for the whole vec,
   which converts two elements per instruction. */
template <class To, class From, int N>
static __device__ void convert(vec<To, N> *out, vec<From, N> x) {
    for (int k = 0; k < N; k++) convert(&out->v[k], widen(x.v[k]));
}
template <int N> static __device__ void convert(vec<bf16, N> *out, vec<float, N> x) {
    round_to(out, x);
}
template <int N> static __device__ void convert(vec<f16, N> *out, vec<float, N> x) {
    round_to(out, x);
}

/* Returns x + y as a double, so that `convert` then rounds the sum to the type To only once. If x,
   y and To are floats, returns the float sum. The float sum has the same bits as the double sum
   rounded to float, because double has more than twice as many mantissa bits. */
template <class To, class X, class Y> static __device__ double exact_sum(To *, X x, Y y) {
    return (double)x + (double)y;
}
static __device__ float exact_sum(float *, float x, float y) { return x + y; }
template <class To, class Y> static __device__ double exact_sum(To *, int64_t x, Y y) {
    return odd_double(x) + (double)y;
}
static __device__ double exact_sum(double *, int64_t x, double y) { return (double)x + y; }

/* A thread converts MAX_N elements at a time. They take 16 bytes in the larger of the two types, so
   that a warp's accesses to both arrays have no gaps. */
template <class To, class From> DTK_KERNEL __launch_bounds__(BLOCK) cast_kernel(dt_cast_args a) {
    const int MAX_N = sizeof(To) > sizeof(From) ? 16 / sizeof(To) : 16 / sizeof(From);
    for_each_vec<MAX_N>(a.count, aligned16(a.out, a.in), [&](size_t i, auto width) {
        const int N = decltype(width)::N;
        To *out = (To *)a.out + i;
        vec<From, N> x = load_vec<N>((const From *)a.in + i);
        vec<To, N> y;
        if (a.accumulate) {
            y = load_vec<N>(out);
            for (int k = 0; k < N; k++)
                convert(&y.v[k], exact_sum(&y.v[k], widen(x.v[k]), widen(y.v[k])));
        } else {
            convert(&y, x);
        }
        store_vec(out, y);
    });
}

template <class To, class From> static dt_status cast(const dt_cast_args *a, void *stream) {
    DTK_LAUNCH((cast_kernel<To, From>), a->count, BLOCK * 4, stream, *a);
    return launch_status();
}

template <class To> static dt_status cast_to(const dt_cast_args *a, void *stream) {
    switch (a->from) {
    case DT_F32: return cast<To, float>(a, stream);
    case DT_BF16: return cast<To, bf16>(a, stream);
    case DT_F16: return cast<To, f16>(a, stream);
    case DT_F64: return cast<To, double>(a, stream);
    case DT_I32: return cast<To, int>(a, stream);
    case DT_U8: return cast<To, uint8_t>(a, stream);
    case DT_I64: return cast<To, int64_t>(a, stream);
    }
    return DT_ERR_UNSUPPORTED;
}

static dt_status cuda_cast(const dt_cast_args *a, void *stream) {
    if (a->accumulate && (a->dtype == DT_I32 || a->dtype == DT_U8 || a->dtype == DT_I64))
        return DT_ERR_UNSUPPORTED;
    switch (a->dtype) {
    case DT_F32: return cast_to<float>(a, stream);
    case DT_BF16: return cast_to<bf16>(a, stream);
    case DT_F16: return cast_to<f16>(a, stream);
    case DT_F64: return cast_to<double>(a, stream);
    case DT_I32: return cast_to<int>(a, stream);
    case DT_U8: return cast_to<uint8_t>(a, stream);
    case DT_I64: return cast_to<int64_t>(a, stream);
    }
    return DT_ERR_UNSUPPORTED;
}

/* ---- quantised weights ---- */

/* The block formats are described at dt_quant in dt_tensor.h; dt__quantize_block there is the same
   code. */
static __device__ const float nf4_values[16] = DT__NF4_VALUES;

/* A thread quantises a block of 64 elements: weights are quantised once, when they are loaded. */
static __device__ void quantize_block(int quant, const float *in, unsigned char *out) {
    float most = 0;
    for (int i = 0; i < DT__QUANT_BLOCK; i++) most = fabsf(in[i]) > most ? fabsf(in[i]) : most;
    float scale = quant == DT_QUANT_NF4 ? most : most / 127;
    float inverse = 1 / (scale > 1e-38f ? scale : 1e-38f);
    *(float *)(void *)out = scale;
    out += sizeof scale;
    for (int i = 0, high = 0; i < DT__QUANT_BLOCK; i++) {
        float x = in[i] * inverse;
        int code = 0;
        if (quant == DT_QUANT_INT8) {
            out[i] = (unsigned char)(int)rintf(x > 127 ? 127 : x > -127 ? x : -127);
            continue;
        }
        for (int k = 0; k < 15; k++) code += x > (nf4_values[k] + nf4_values[k + 1]) * 0.5f;
        if (i % 2) out[i / 2] = (unsigned char)(high << 4 | code);
        high = code;
    }
}

DTK_KERNEL __launch_bounds__(BLOCK) quantize_kernel(dt_quantize_args a) {
    size_t each = a.quant == DT_QUANT_BF16 ? 1 : DT__QUANT_BLOCK,
           bytes = a.quant == DT_QUANT_INT8 ? 4 + DT__QUANT_BLOCK : 4 + DT__QUANT_BLOCK / 2;
    for_each_vec<1>(a.count / each, false, [&](size_t i, auto) {
        if (a.quant == DT_QUANT_BF16)
            round_to((bf16 *)a.out + i, a.in[i]);
        else
            quantize_block(a.quant, a.in + i * each, (unsigned char *)a.out + i * bytes);
    });
}

static dt_status cuda_quantize(const dt_quantize_args *a, void *stream) {
    if (a->count != 0 && dt_quant_bytes((dt_quant)a->quant, (int64_t)a->count) == 0)
        return DT_ERR_ARG;
    DTK_LAUNCH(quantize_kernel, a->count, BLOCK, stream, *a);
    return launch_status();
}

/* Returns the value of one element of an array of blocks. */
static __device__ float dequantized(int quant, const void *from, size_t at) {
    if (quant == DT_QUANT_BF16) return widen(((const bf16 *)from)[at]);
    size_t bytes = quant == DT_QUANT_INT8 ? 4 + DT__QUANT_BLOCK : 4 + DT__QUANT_BLOCK / 2,
           i = at % DT__QUANT_BLOCK;
    const unsigned char *block = (const unsigned char *)from + at / DT__QUANT_BLOCK * bytes;
    float scale = *(const float *)(const void *)block;
    if (quant == DT_QUANT_INT8) return scale * (float)(signed char)block[4 + i];
    int pair = block[4 + i / 2];
    return scale * nf4_values[i % 2 ? pair & 15 : pair >> 4];
}

/* out (rows,cols) = the elements from `at` on of rows that are ld elements apart. */
template <class T>
DTK_KERNEL __launch_bounds__(BLOCK) dequantize_kernel(
    T *out, int quant, const void *from, size_t at, size_t ld, size_t rows, size_t cols) {
    for_each_in_rows<vec<T>::N>(rows, cols, aligned16(out), [&](size_t r, size_t c, auto width) {
        const int N = decltype(width)::N;
        vec<float, N> x;
        for (int k = 0; k < N; k++) x.v[k] = dequantized(quant, from, at + r * ld + c + k);
        store_floats(out + r * cols + c, x);
    });
}

template <class T>
static dt_status dequantize(void *out, int quant, const void *from, size_t at, size_t ld,
    size_t rows, size_t cols, void *stream) {
    DTK_LAUNCH((dequantize_kernel<T>), rows * cols, BLOCK * vec<T>::N, stream, (T *)out, quant,
        from, at, ld, rows, cols);
    return launch_status();
}

// ==== 8. Sums over a dimension; patches of images ===============================================

/* A sum over many rows of few columns has too few outputs to fill a GPU. So it takes two launches
   if the caller provides scratch memory:

       in, n = 8 rows   | r0 r1 | r2 r3 | r4 r5 | r6 r7 |
       launch 1         |   s0  |   s1  |   s2  |   s3  |     partial sums, one block for each
       launch 2         |              out              |     the sum of the partial sums */

/* The arguments of a sum of `in` (outer,n,inner) over n. Dimension n is split into `parts` parts.
   For each part, the sum times `scale` is stored in `out` (outer,parts,inner), which has the dtype
   `type`. If `accumulate` is set, the sum times `scale` is added to `out` instead. */
struct sum_job {
    const void *in;
    void *out;
    dt_dtype type;
    size_t outer, parts, n, inner;
    float scale;
    int accumulate;
};

/* The elements [first, end) of an array. subrange splits the range `all` into `count` parts and
   returns part i. The parts have equal length, except that the last parts may be shorter or empty.
   Their lengths depend only on `count` and the length of `all`. */
struct range {
    size_t first, end;
};

static __device__ range subrange(range all, size_t count, size_t i) {
    size_t n = all.end - all.first, each = n / count + (n % count != 0),
           first = all.first + i * each;
    range r = { first, first + each };
    if (r.first > all.end) r.first = all.end;
    if (r.end > all.end) r.end = all.end;
    return r;
}

/* A block of 32 x 16 threads sums the columns of 32 adjacent vecs of N elements. The rows are split
   among the 16 values of threadIdx.y. Each thread adds its rows in ascending order. sum_over_rows
   then adds the 16 partial sums of each column in ascending order of threadIdx.y, and returns the
   total of column my_column() to each of the first 32 N threads. */
enum { COLUMN_THREADS = 32, ROW_THREADS = 16 };

static __device__ int my_column() { return threadIdx.y * COLUMN_THREADS + threadIdx.x; }

template <int N> static __device__ float sum_over_rows(vec<float, N> sum) {
    __shared__ vec<float, N> of_thread_row[ROW_THREADS][COLUMN_THREADS];
    int column = my_column();
    float total = 0;
    __syncthreads(); /* after this barrier all threads have read the previous call's totals */
    of_thread_row[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    for (int y = 0; y < ROW_THREADS && column < COLUMN_THREADS * N; y++)
        total += of_thread_row[y][column / N].v[column % N];
    return total;
}

/* Blocks with blockIdx.y = 0 compute the sum described by `a`. If the grid has two rows of blocks,
   those with blockIdx.y = 1 compute the sum described by `b`, which has the same sizes. */
template <class T, int N>
DTK_KERNEL __launch_bounds__(COLUMN_THREADS *ROW_THREADS, 2)
    column_sums_kernel(sum_job a, sum_job b) {
    size_t tiles = vec_count(a.inner, COLUMN_THREADS * N);
    if (blockIdx.y > 0) a = b;
    for (size_t i = blockIdx.x; i < a.outer * a.parts * tiles; i += gridDim.x) {
        size_t part = i / tiles, first = i % tiles * COLUMN_THREADS * N,
               c = first + threadIdx.x * N;
        range all = { 0, a.n },
              mine = subrange(subrange(all, a.parts, part % a.parts), ROW_THREADS, threadIdx.y);
        const T *in = (const T *)a.in + (part / a.parts * a.n + mine.first) * a.inner + c;
        vec<float, N> sum = { { 0 } };
        if (c < a.inner)
            add_vecs<8>(&sum, mine.end - mine.first, [&](size_t r) { return in + r * a.inner; });
        /* every thread of the block must call sum_over_rows, because sum_over_rows has barriers */
        float total = sum_over_rows(sum);
        c = first + my_column();
        if (my_column() < COLUMN_THREADS * N && c < a.inner)
            store_typed(a.type, a.out, part * a.inner + c, a.scale * total, a.accumulate);
    }
}

/* G threads (a warp or a block) process a row together. row_first returns this thread's first row,
   row_step the distance from each of its rows to the next. */
template <int G> static __device__ size_t row_first() {
    return (size_t)blockIdx.x * (BLOCK / G) + threadIdx.x / G;
}
template <int G> static __device__ size_t row_step() { return (size_t)gridDim.x * (BLOCK / G); }
template <int G, class T> static __device__ T group_sum(T v) {
    return G == 32 ? warp_sum(v) : block_sum<T, G>(v);
}
template <int G> static __device__ float group_max(float v) {
    return G == 32 ? warp_max(v) : block_max(v);
}

/* Returns the range of the n elements at p that consists of complete vecs at addresses divisible by
   16. The address p itself need not be divisible by 16. */
template <int N, class T> static __device__ range aligned_range(const T *p, size_t n) {
    size_t head = (16 - (uintptr_t)p % 16) % 16 / sizeof(T);
    if (head > n) head = n;
    range aligned = { head, head + (n - head) / N * N };
    return aligned;
}

/* Loops over the n elements at p with a group of THREADS threads. Calls f(index, constant<N>()) for
   each vec in the aligned range and f(index, constant<1>()) for each element outside of it. */
template <int N, int THREADS, class T, class F>
static __device__ void for_each_in_range(const T *p, size_t n, F f) {
    range aligned = aligned_range<N>(p, n);
    size_t me = threadIdx.x % THREADS;
    if (me < aligned.first) f(me, constant<1>());
    for (size_t c = aligned.first + me * N; c < aligned.end; c += THREADS * N) f(c, constant<N>());
    for (size_t c = aligned.end + me; c < n; c += THREADS) f(c, constant<1>());
}

/* Computes sums with inner = 1: each part of a row of `in` is summed by G threads. */
template <class T, int G> DTK_KERNEL __launch_bounds__(BLOCK) row_sums_kernel(sum_job a) {
    for (size_t part = row_first<G>(); part < a.outer * a.parts; part += row_step<G>()) {
        range all = { 0, a.n }, mine = subrange(all, a.parts, part % a.parts);
        const T *in = (const T *)a.in + part / a.parts * a.n + mine.first;
        float sum = 0;
        for_each_in_range<vec<T>::N, G>(in, mine.end - mine.first, [&](size_t c, auto width) {
            const int N = decltype(width)::N;
            vec<float, N> x = load_floats<N>(in + c);
            for (int k = 0; k < N; k++) sum += x.v[k];
        });
        sum = group_sum<G>(sum);
        if (threadIdx.x % G == 0) store_typed(a.type, a.out, part, a.scale * sum, a.accumulate);
    }
}

/* Computes sums with n = 1, which only scale the elements of `in`. */
template <class T> DTK_KERNEL __launch_bounds__(BLOCK) scaled_kernel(sum_job a) {
    for (size_t i = grid_first(1); i < a.outer * a.inner; i += grid_step(1))
        store_typed(a.type, a.out, i, a.scale * widen(((const T *)a.in)[i]), a.accumulate);
}

template <class T, int N>
static void launch_column_sums(const sum_job &a, const sum_job *b, void *stream) {
    size_t tiles = a.outer * a.parts * vec_count(a.inner, COLUMN_THREADS * N);
    dim3 grid(grid_for(tiles, 1), b ? 2 : 1);
    if (tiles > 0)
        DT_LAUNCH((column_sums_kernel<T, N>), grid, dim3(COLUMN_THREADS, ROW_THREADS), 0,
            stream_of(stream), a, b ? *b : a);
}

/* The number of blocks that fill a GPU: two for each of the 132 multiprocessors of an H100. A sum
   with fewer blocks is split into parts. FILL_BLOCKS is the same on all devices, because the number
   of parts changes the bits of a sum. */
enum { FILL_BLOCKS = 264 };

/* Launches the kernel for the shape of the sum. If there are few columns, a thread sums one column
   instead of a vec of columns, so that more blocks take part. */
template <class T> static void launch_sums(const sum_job &a, void *stream) {
    const int N = vec<T>::N;
    bool few = a.outer * a.parts * vec_count(a.inner, COLUMN_THREADS * N) < FILL_BLOCKS / 4;
    if (a.n == 1)
        DTK_LAUNCH(scaled_kernel<T>, a.outer * a.inner, BLOCK, stream, a);
    else if (a.inner == 1 && a.n <= 1024)
        DTK_LAUNCH((row_sums_kernel<T, 32>), a.outer * a.parts, WARPS, stream, a);
    else if (a.inner == 1)
        DTK_LAUNCH((row_sums_kernel<T, BLOCK>), a.outer * a.parts, 1, stream, a);
    else if (aligned16(a.in) && a.inner % N == 0 && !few)
        launch_column_sums<T, N>(a, NULL, stream);
    else
        launch_column_sums<T, 1>(a, NULL, stream);
}

/* Returns the number of parts into which dimension n is split: 1 without scratch memory or if the
   unsplit sum fills the GPU. */
template <class T> static size_t sum_parts(const dt_sum_args *a) {
    size_t blocks =
        a->outer * (a->inner == 1 ? 1 : vec_count(a->inner, COLUMN_THREADS * vec<T>::N));
    /* a part has at least 4,096 elements if inner is 1, else at least 32 rows */
    size_t max_parts = a->n / (a->inner == 1 ? 4096 : 2 * ROW_THREADS), capacity = 0;
    if (blocks == 0 || blocks >= FILL_BLOCKS || !a->work) return 1;
    capacity = a->work_bytes / sizeof(float) / (a->outer * a->inner);
    max_parts = max_parts < capacity ? max_parts : capacity;
    max_parts = max_parts < FILL_BLOCKS / blocks ? max_parts : FILL_BLOCKS / blocks;
    return max_parts > 1 ? max_parts : 1;
}

template <class T> static dt_status sum(const dt_sum_args *a, void *stream) {
    dt_dtype type = output_dtype(a->dtype, a->wide);
    size_t parts = sum_parts<T>(a);
    sum_job last = { a->in, a->out, type, a->outer, 1, a->n, a->inner, (float)a->scale,
        a->accumulate };
    if (parts > 1) {
        sum_job first = { a->in, a->work, DT_F32, a->outer, parts, a->n, a->inner, 1, 0 };
        launch_sums<T>(first, stream);
        last.in = a->work;
        last.n = parts;
        launch_sums<float>(last, stream);
    } else {
        launch_sums<T>(last, stream);
    }
    return launch_status();
}
DTK_TABLE_ENTRY(sum)

/* Each thread adds one column of n elements in order. The kernel is slow if inner is 1 and n is
   large: a row then keeps one thread busy, because splitting it would change the order. */
template <class T> DTK_KERNEL __launch_bounds__(BLOCK) cumsum_kernel(dt_cumsum_args a) {
    for (size_t i = grid_first(1); i < a.outer * a.inner; i += grid_step(1)) {
        size_t first = i / a.inner * a.n * a.inner + i % a.inner;
        float sum = 0;
        for (size_t l = 0; l < a.n; l++) {
            size_t at = first + (a.reverse ? a.n - 1 - l : l) * a.inner;
            sum += widen(((const T *)a.in)[at]);
            store_float((T *)a.out + at, sum, a.accumulate);
        }
    }
}

template <class T> static dt_status cumsum(const dt_cumsum_args *a, void *stream) {
    DTK_LAUNCH(cumsum_kernel<T>, a->outer * a->inner, BLOCK, stream, *a);
    return launch_status();
}
DTK_TABLE_ENTRY(cumsum)

/* The order of max and topk, in which a NaN is greater than all numbers. */
static __device__ bool is_greater(float a, float b) { return a > b || (a != a && b == b); }

/* im2col, col2im and pooling. A thread computes N channels of one element of a window, of all
   elements of a window in pooling, or of one pixel; the formulas are those of the CPU's kernels. */
template <class T>
DTK_KERNEL __launch_bounds__(BLOCK) patches_kernel(dt_patches_args a, size_t rows) {
    dt_window w = a.window;
    for_each_in_rows<vec<T>::N>(
        rows, (size_t)w.channels, aligned16(a.out, a.in), [&](size_t row, size_t col, auto width) {
            const int N = decltype(width)::N;
            int64_t each = w.kernel[0] * w.kernel[1], at = (int64_t)row / (a.pool ? 1 : each),
                    first = a.pool ? 0 : (int64_t)row - at * each, line = at / w.out[1],
                    image = line / w.out[0], y0 = (line - image * w.out[0]) * w.stride[0],
                    x0 = (at - line * w.out[1]) * w.stride[1];
            size_t to = row * (size_t)w.channels + col;
            vec<float, N> result = {};
            int32_t best[N] = {}; /* of a maximum: its element of the window */
            for (int64_t k = first; k < (a.pool ? each : first + 1); k++) {
                int64_t y = y0 - w.padding[0] + k / w.kernel[1] * w.dilation[0],
                        x = x0 - w.padding[1] + k % w.kernel[1] * w.dilation[1];
                vec<float, N> value;
                for (int i = 0; i < N; i++) value.v[i] = (float)a.pad_value;
                if (y >= 0 && y < w.in[0] && x >= 0 && x < w.in[1])
                    value = load_floats<N>((const T *)a.in +
                                           ((image * w.in[0] + y) * w.in[1] + x) * w.channels +
                                           (int64_t)col);
                if (k == first) result = value;
                for (int i = 0; i < N && a.pool; i++) {
                    bool greater = k == 0 || is_greater(value.v[i], result.v[i]);
                    if (a.pool == DT_POOL_MEAN)
                        result.v[i] = k == 0 ? value.v[i] : result.v[i] + value.v[i];
                    else if (greater) {
                        result.v[i] = value.v[i];
                        best[i] = (int32_t)k;
                    }
                }
            }
            for (int i = 0; i < N && a.pool == DT_POOL_MEAN; i++)
                result.v[i] *= (float)(1.0 / (double)each);
            for (int i = 0; i < N && a.pool == DT_POOL_MAX; i++) a.index[to + i] = best[i];
            store_floats((T *)a.out + to, result);
        });
}

template <class T> static dt_status patches(const dt_patches_args *a, void *stream) {
    const dt_window *w = &a->window;
    int64_t each = a->pool ? 1 : w->kernel[0] * w->kernel[1];
    size_t rows = (size_t)(w->batch * w->out[0] * w->out[1] * each);
    DTK_LAUNCH(patches_kernel<T>, rows * (size_t)w->channels, BLOCK * vec<T>::N, stream, *a, rows);
    return launch_status();
}
DTK_TABLE_ENTRY(patches)

template <class T>
DTK_KERNEL __launch_bounds__(BLOCK) patches_back_kernel(dt_patches_back_args a, size_t pixels) {
    dt_window w = a.window;
    for_each_in_rows<vec<T>::N>(pixels, (size_t)w.channels, aligned16(a.dx, a.dout),
        [&](size_t pixel, size_t col, auto width) {
            const int N = decltype(width)::N;
            int64_t line = (int64_t)pixel / w.in[1], image = line / w.in[0],
                    each = w.kernel[0] * w.kernel[1], y0 = line - image * w.in[0] + w.padding[0],
                    x0 = (int64_t)pixel - line * w.in[1] + w.padding[1];
            vec<float, N> sum;
            for (int i = 0; i < N; i++) sum.v[i] = 0;
            for (int64_t k = 0; k < each; k++) {
                int64_t y = y0 - k / w.kernel[1] * w.dilation[0],
                        x = x0 - k % w.kernel[1] * w.dilation[1];
                if (y < 0 || x < 0 || y % w.stride[0] || x % w.stride[1]) continue;
                y /= w.stride[0];
                x /= w.stride[1];
                if (y >= w.out[0] || x >= w.out[1]) continue;
                int64_t position = (image * w.out[0] + y) * w.out[1] + x,
                        from =
                            (a.pool ? position : position * each + k) * w.channels + (int64_t)col;
                vec<float, N> d = load_floats<N>((const T *)a.dout + from);
                for (int i = 0; i < N; i++)
                    if (a.pool != DT_POOL_MAX || a.index[from + i] == (int32_t)k)
                        sum.v[i] += d.v[i];
            }
            for (int i = 0; i < N && a.pool == DT_POOL_MEAN; i++)
                sum.v[i] *= (float)(1.0 / (double)each);
            store_floats((T *)a.dx + pixel * (size_t)w.channels + col, sum, a.accumulate);
        });
}

template <class T> static dt_status patches_back(const dt_patches_back_args *a, void *stream) {
    const dt_window *w = &a->window;
    size_t pixels = (size_t)(w->batch * w->in[0] * w->in[1]);
    DTK_LAUNCH(patches_back_kernel<T>, pixels * (size_t)w->channels, BLOCK * vec<T>::N, stream, *a,
        pixels);
    return launch_status();
}
DTK_TABLE_ENTRY(patches_back)

// ==== 9. Checked indices: max, top-k, scatter ===================================================

/* Indices come from the caller's data, so an index may be out of range. A check on the host would
   stall the queue in every step, so the kernels check their indices: they skip an invalid index and
   set *bad_index of the queue, which is in pinned memory. The next cuda_sync then returns
   DT_ERR_ARG, and all results since the previous cuda_sync are invalid.

   Tests of single kernels pass no queue, so the kernels cannot set bad_index. In this case
   check_indices reads the indices on the host. It returns DT_ERR_ARG if an index is not in
   [begin, end), as the CPU's kernels do. */
static dt_status check_indices(
    const int32_t *indices, size_t count, int64_t begin, int64_t end, void *queue) {
    const size_t ID_CHUNK = 4096;
    int32_t chunk[ID_CHUNK];
    for (size_t at = 0; at < count && !queue; at += ID_CHUNK) {
        size_t have = count - at < ID_CHUNK ? count - at : ID_CHUNK;
        dt_status status = cuda_move(chunk, indices + at, have * sizeof *chunk, NULL);
        if (status == DT_OK) status = cuda_sync(NULL);
        if (status != DT_OK) return status;
        for (size_t i = 0; i < have; i++)
            if (chunk[i] < begin || chunk[i] >= end) return DT_ERR_ARG;
    }
    return DT_OK;
}

static int *bad_index_of(void *queue) { return queue ? ((cuda_queue *)queue)->bad_index : NULL; }

/* Returns true if `index` is in [begin, end); otherwise sets *bad_index to 1. Several threads may
   do so at the same time, because all of them write the same value. */
static __device__ bool is_valid_index(int64_t index, int64_t begin, int64_t end, int *bad_index) {
    if (index >= begin && index < end) return true;
    if (bad_index) *(volatile int *)bad_index = 1;
    return false;
}

/* Each thread computes one maximum over n elements. The kernel is slow if n exceeds a few thousand
   and inner is 1, because adjacent threads then read addresses n elements apart. */
template <class T> DTK_KERNEL __launch_bounds__(BLOCK) max_kernel(dt_max_args a) {
    for (size_t i = grid_first(1); i < a.outer * a.inner; i += grid_step(1)) {
        const T *in = (const T *)a.in + i / a.inner * a.n * a.inner + i % a.inner;
        float best = widen(in[0]);
        int32_t index = 0;
        for (size_t j = 1; j < a.n; j++) {
            float x = widen(in[j * a.inner]);
            if (!is_greater(x, best)) continue;
            best = x;
            index = (int32_t)j;
        }
        ((T *)a.out)[i] = in[(size_t)index * a.inner];
        a.index[i] = index;
    }
}

template <class T> static dt_status max_of(const dt_max_args *a, void *stream) {
    if (a->n < 1) return DT_ERR_ARG;
    DTK_LAUNCH(max_kernel<T>, a->outer * a->inner, BLOCK, stream, *a);
    return launch_status();
}

static dt_status cuda_max(const dt_max_args *a, void *stream) {
    return DTK_BY_DTYPE(a->dtype, max_of, a, stream);
}

/* One thread per row keeps a sorted list of the k columns with the largest values. The list is in
   the output array a.index, as on the CPU. This is fast enough for a MoE router, where cols is the
   number of experts. Of two columns with the same value, the one with the lower index comes
   first. */
template <class T> DTK_KERNEL __launch_bounds__(BLOCK) topk_kernel(dt_topk_args a) {
    for (size_t r = grid_first(1); r < a.rows; r += grid_step(1)) {
        const T *x = (const T *)a.in + r * a.cols;
        int32_t *index = a.index + r * a.k;
        for (size_t c = 0; c < a.cols; c++) {
            size_t at = c < a.k ? c : a.k; /* place of column c in the list; first the list's end */
            while (at > 0 && is_greater(widen(x[c]), widen(x[index[at - 1]]))) {
                if (at < a.k) index[at] = index[at - 1];
                at--;
            }
            if (at < a.k) index[at] = (int32_t)c;
        }
        for (size_t j = 0; j < a.k; j++) ((T *)a.values)[r * a.k + j] = x[index[j]];
    }
}

template <class T> static dt_status topk(const dt_topk_args *a, void *stream) {
    if (a->k > a->cols) return DT_ERR_ARG;
    DTK_LAUNCH(topk_kernel<T>, a->rows, BLOCK, stream, *a);
    return launch_status();
}
DTK_TABLE_ENTRY(topk)

/* One thread per index of (outer,inner) adds the k values in ascending order of their index in k.
   So values for the same output element are added in a fixed order. The result of each addition is
   rounded to T. */
template <class T>
DTK_KERNEL __launch_bounds__(BLOCK, 2) scatter_kernel(dt_scatter_args a, int *bad_index) {
    for (size_t i = grid_first(1); i < a.outer * a.inner; i += grid_step(1)) {
        size_t o = i / a.inner, c = i % a.inner;
        T *out = (T *)a.out + o * a.n * a.inner + c;
        for (size_t j = 0; j < a.n && !a.accumulate; j++) out[j * a.inner] = T();
        for (size_t j = 0; j < a.k; j++) {
            size_t from = (o * a.k + j) * a.inner + c;
            if (is_valid_index(a.index[from], 0, (int64_t)a.n, bad_index))
                store_float(
                    out + (size_t)a.index[from] * a.inner, widen(((const T *)a.in)[from]), 1);
        }
    }
}

template <class T> static dt_status scatter(const dt_scatter_args *a, void *stream) {
    dt_status status =
        check_indices(a->index, a->outer * a->k * a->inner, 0, (int64_t)a->n, stream);
    if (status != DT_OK) return status;
    DTK_LAUNCH(scatter_kernel<T>, a->outer * a->inner, BLOCK, stream, *a, bad_index_of(stream));
    return launch_status();
}
DTK_TABLE_ENTRY(scatter)

// ==== 10. Normalisation and softmax =============================================================

/* A row that fits into registers is read from memory only once, even if a kernel makes several
   passes over the row. For the softmax of a row x:

       naive          read x, compute the maximum
                      read x, compute the sum of e^(x - max)
                      read x, write e^(x - max) / sum

       this section   read x into registers (thread_row), compute max, compute sum, write

   G threads, a warp or a block, process a row together. Softmax subtracts the maximum, so that the
   exponential does not overflow. */

/* One thread's part of a row that G threads process together. A thread has every G-th vec of N
   elements. Its first K vecs stay in registers, so that a row of up to G K vecs is read once.
   Further vecs are read again in each pass. `cols` must be a multiple of N, and the row's address a
   multiple of a vec's size; for all other rows use N = 1. */
enum { ROW_VECS = 4 };

template <class T, int N, int G, int K = ROW_VECS> struct thread_row {
    const T *p;
    int64_t cols;
    raw_vec<T, N> regs[K];

    __device__ thread_row(const T *row, int64_t cols_) : p(row), cols(cols_) {
        DTK_UNROLL
        for (int j = 0; j < K; j++)
            if (column(j) < cols) regs[j] = *reinterpret_cast<const raw_vec<T, N> *>(p + column(j));
    }
    __device__ int64_t column(int j) const { return (int64_t)(threadIdx.x % G + j * G) * N; }

    /* For each vec calls f(column, elements), where `column` is the index in the row of the vec's
       first element. */
    template <class F> __device__ void for_each(F f) const {
        DTK_UNROLL
        for (int j = 0; j < K; j++)
            if (column(j) < cols) f(column(j), to_floats(regs[j]));
        DTK_UNROLL_BY(1)
        for (int64_t c = column(K); c < cols; c += G * N) f(c, load_floats<N>(p + c));
    }
    /* For each vec calls f(column, elements of this row, elements of the row `other`). */
    template <class F> __device__ void for_each_pair(const thread_row &other, F f) const {
        DTK_UNROLL
        for (int j = 0; j < K; j++)
            if (column(j) < cols) f(column(j), to_floats(regs[j]), to_floats(other.regs[j]));
        DTK_UNROLL_BY(1)
        for (int64_t c = column(K); c < cols; c += G * N)
            f(c, load_floats<N>(p + c), load_floats<N>(other.p + c));
    }
};

/* Launches kernel<T, N, G>. If `vectorized` is set, the kernel reads vecs; otherwise N is 1. One
   warp processes a row if the row can be read in vecs and fits into the warp's registers. Otherwise
   one block processes a row. */
#define DTK_LAUNCH_ROWS(kernel, T, vectorized, rows, cols, stream, ...) \
    do { \
        if (!(vectorized)) \
            DTK_LAUNCH((kernel<T, 1, BLOCK>), rows, 1, stream, __VA_ARGS__); \
        else if ((cols) <= (size_t)32 * ROW_VECS * vec<T>::N) \
            DTK_LAUNCH((kernel<T, vec<T>::N, 32>), rows, WARPS, stream, __VA_ARGS__); \
        else \
            DTK_LAUNCH((kernel<T, vec<T>::N, BLOCK>), rows, 1, stream, __VA_ARGS__); \
    } while (0)

/* Returns to every thread the sums of N values over its group of G threads (a warp, a part of a
   block, or a block). The caller passes `buffer` = 0 and 1 in alternate calls, so that a call need
   not wait until all threads have read the previous call's sums. */
template <int G, int N> static __device__ vec<float, N> group_sums(vec<float, N> v, int buffer) {
    __shared__ vec<float, N> of_warp[2][WARPS];
    for (int k = 0; k < N; k++) v.v[k] = warp_sum(v.v[k]);
    if (G == 32) return v;
    if (threadIdx.x % 32 == 0) of_warp[buffer][threadIdx.x / 32] = v;
    __syncthreads();
    for (int k = 0; k < N; k++) v.v[k] = 0;
    for (int w = 0; w < G / 32; w++)
        for (int k = 0; k < N; k++) v.v[k] += of_warp[buffer][threadIdx.x / G * (G / 32) + w].v[k];
    return v;
}

/* Layer normalisation, arXiv:1607.06450. The variance is computed in a second pass over the
   registers, because the difference E[x^2] - E[x]^2 would cancel. RMSNorm, arXiv:1910.07467, is
   computed in the same way, with a mean of zero and without a bias. */
enum { NORM_ROW_VECS = 6 };

template <class T, int N, int G>
DTK_KERNEL __launch_bounds__(BLOCK, 4) norm_kernel(dt_norm_args a) {
    const T *gains = (const T *)a.gain, *biases = a.rms ? NULL : (const T *)a.bias;
    const float offset = (float)a.gain_offset;
    int buffer = 0;
    for (size_t first = (size_t)blockIdx.x * (BLOCK / G); first < a.rows; first += row_step<G>()) {
        size_t r = first + threadIdx.x / G;
        /* a thread whose row r is past the last row has no columns, but still reaches the
           barriers */
        int64_t cols = r < a.rows ? (int64_t)a.cols : 0;
        thread_row<T, N, G, NORM_ROW_VECS> x((const T *)a.in + r * a.cols, cols);
        T *out = (T *)a.out + r * a.cols;
        vec<float, 1> sum = { { 0 } }, squares = { { 0 } };
        if (!a.rms) { /* all threads take the same branch, so they all reach its barrier */
            x.for_each([&](int64_t, vec<float, N> v) {
                for (int k = 0; k < N; k++) sum.v[0] += v.v[k];
            });
            sum = group_sums<G>(sum, buffer ^= 1);
        }
        float mean = sum.v[0] / (float)a.cols;
        x.for_each([&](int64_t, vec<float, N> v) {
            for (int k = 0; k < N; k++) squares.v[0] += (v.v[k] - mean) * (v.v[k] - mean);
        });
        squares = group_sums<G>(squares, buffer ^= 1);
        float rstd = 1 / sqrtf(squares.v[0] / (float)a.cols + (float)a.eps);
        x.for_each([&](int64_t c, vec<float, N> v) {
            vec<float, N> gain = load_floats<N>(gains + c), bias = { { 0 } };
            if (biases) bias = load_floats<N>(biases + c);
            for (int k = 0; k < N; k++)
                v.v[k] = (v.v[k] - mean) * rstd * (gain.v[k] + offset) + bias.v[k];
            store_floats(out + c, v);
        });
        if (threadIdx.x % G > 0 || r >= a.rows) continue;
        if (!a.rms) ((float *)a.mean)[r] = mean;
        ((float *)a.rstd)[r] = rstd;
    }
}

template <class T> static dt_status norm(const dt_norm_args *a, void *stream) {
    const int N = vec<T>::N;
    size_t each = N * NORM_ROW_VECS; /* columns that a thread holds in registers */
    bool vectorized =
        a->cols % N == 0 && aligned16(a->in, a->out, a->gain, a->rms ? NULL : a->bias);
    if (!vectorized)
        DTK_LAUNCH((norm_kernel<T, 1, BLOCK>), a->rows, 1, stream, *a);
    else if (a->cols <= 32 * each)
        DTK_LAUNCH((norm_kernel<T, N, 32>), a->rows, WARPS, stream, *a);
    else if (a->cols <= 128 * each)
        DTK_LAUNCH((norm_kernel<T, N, 128>), a->rows, BLOCK / 128, stream, *a);
    else
        DTK_LAUNCH((norm_kernel<T, N, BLOCK>), a->rows, 1, stream, *a);
    return launch_status();
}
DTK_TABLE_ENTRY(norm)

/* Loads N gains from column c on and adds the offset. */
template <int N, class T>
static __device__ vec<float, N> gains_at(const dt_norm_back_args &a, const T *gains, int64_t c) {
    vec<float, N> gain = load_floats<N>(gains + c);
    for (int k = 0; k < N; k++) gain.v[k] += (float)a.gain_offset;
    return gain;
}

static __device__ float mean_of(const dt_norm_back_args &a, size_t r) {
    return a.rms ? 0 : ((const float *)a.mean)[r];
}

/* The gradients of a normalisation, with y = (x - mean) rstd and g = dout * gain:

       dx    = rstd (g - mean(g) - y mean(g y))
       dgain = sum over rows of dout * y
       dbias = sum over rows of dout

   The term mean(g) comes from the derivative of the mean, so RMSNorm does not have this term.
   norm_back_kernel computes all three gradients in one pass over the rows. A row has at most G K
   vecs, because each of the G threads that process the row holds K vecs. The scratch memory has the
   shape (2,parts,cols). Each block is one part, and stores the dgain and dbias of its rows in the
   scratch memory.

   store_block_sums adds `sum` over the block's groups of G threads and stores the result in
   `out`. */
template <int N, int G, int K>
static __device__ void store_block_sums(float *out, int64_t cols, vec<float, N> *sum) {
    __shared__ vec<float, N> of_group[BLOCK / G][K * G];
    for (int j = 0; j < K; j++) of_group[threadIdx.x / G][j * G + threadIdx.x % G] = sum[j];
    __syncthreads();
    for (int c = threadIdx.x; c < cols; c += BLOCK) {
        float total = 0;
        for (int group = 0; group < BLOCK / G; group++) total += of_group[group][c / N].v[c % N];
        out[c] = total;
    }
    __syncthreads(); /* after this barrier all threads have read of_group */
}

/* One thread's part of a row of x and of the same row of the output gradient, dout. G threads
   process the row together. If r is past the last row, the row has no columns. */
template <class T, int G, int K> struct norm_row {
    float mean, rstd;
    thread_row<T, vec<T>::N, G, K> x, dout;

    __device__ norm_row(const dt_norm_back_args &a, size_t r)
        : mean(r < a.rows ? mean_of(a, r) : 0), rstd(r < a.rows ? ((const float *)a.rstd)[r] : 0),
          x((const T *)a.in + r * a.cols, r < a.rows ? (int64_t)a.cols : 0),
          dout((const T *)a.dout + r * a.cols, r < a.rows ? (int64_t)a.cols : 0) {}
};

/* Each thread loads its part of the next row before it computes the current row. */
template <class T, int G, int K>
DTK_KERNEL __launch_bounds__(BLOCK, 2) norm_back_kernel(dt_norm_back_args a) {
    const int N = vec<T>::N;
    const T *gains = (const T *)a.gain;
    size_t first = (size_t)blockIdx.x * (BLOCK / G), me = threadIdx.x / G;
    vec<float, N> dgain[K] = { { { 0 } } }, dbias[K] = { { { 0 } } };
    norm_row<T, G, K> next(a, first + me);
    /* `first` is the same for all threads of the block, so all threads reach the barriers */
    for (int buffer = 0; first < a.rows; buffer ^= 1) {
        norm_row<T, G, K> row = next;
        T *dx = (T *)a.dx + (first + me) * a.cols;
        vec<float, 2> sum = { { 0, 0 } }; /* the sums of g and of g y */
        first += row_step<G>();
        next = norm_row<T, G, K>(a, first + me);
        DTK_UNROLL
        for (int j = 0; j < K; j++) {
            if (row.x.column(j) >= row.x.cols) continue;
            vec<float, N> v = to_floats(row.x.regs[j]), d = to_floats(row.dout.regs[j]);
            vec<float, N> gain = gains_at<N>(a, gains, row.x.column(j));
            for (int k = 0; k < N; k++) {
                float y = (v.v[k] - row.mean) * row.rstd, g = d.v[k] * gain.v[k];
                dgain[j].v[k] += d.v[k] * y;
                dbias[j].v[k] += d.v[k];
                sum.v[0] += g;
                sum.v[1] += g * y;
            }
        }
        if (!a.dx) continue;
        sum = group_sums<G>(sum, buffer);
        float mean_g = a.rms ? 0 : sum.v[0] / (float)a.cols,
              slope = row.rstd * (sum.v[1] / (float)a.cols);
        DTK_UNROLL
        for (int j = 0; j < K; j++) {
            if (row.x.column(j) >= row.x.cols) continue;
            vec<float, N> v = to_floats(row.x.regs[j]), d = to_floats(row.dout.regs[j]);
            vec<float, N> gain = gains_at<N>(a, gains, row.x.column(j));
            for (int k = 0; k < N; k++)
                v.v[k] = row.rstd * (d.v[k] * gain.v[k] - mean_g - (v.v[k] - row.mean) * slope);
            store_floats(dx + row.x.column(j), v, a.accumulate_x);
        }
    }
    float *sums = (float *)a.work + blockIdx.x * a.cols;
    if (a.dgain) store_block_sums<N, G, K>(sums, (int64_t)a.cols, dgain);
    if (a.dbias) store_block_sums<N, G, K>(sums + gridDim.x * a.cols, (int64_t)a.cols, dbias);
}

/* Two kernels for rows that norm_back_kernel cannot process, because they are too long, not aligned
   or not a multiple of a vec. norm_back_sums_kernel computes the parts of dgain and dbias,
   norm_back_rows_kernel computes dx. */
template <class T, int N>
DTK_KERNEL __launch_bounds__(COLUMN_THREADS *ROW_THREADS, 1)
    norm_back_sums_kernel(dt_norm_back_args a, size_t parts) {
    size_t tiles = vec_count(a.cols, COLUMN_THREADS * N);
    for (size_t i = blockIdx.x; i < parts * tiles; i += gridDim.x) {
        size_t part = i / tiles, first = i % tiles * COLUMN_THREADS * N,
               c = first + threadIdx.x * N;
        range all = { 0, a.rows },
              mine = subrange(subrange(all, parts, part), ROW_THREADS, threadIdx.y);
        vec<float, N> dgain = { { 0 } }, dbias = { { 0 } };
        for (size_t r = mine.first; r < mine.end && c < a.cols; r++) {
            vec<float, N> x = load_floats<N>((const T *)a.in + r * a.cols + c),
                          d = load_floats<N>((const T *)a.dout + r * a.cols + c);
            float mean = mean_of(a, r), rstd = ((const float *)a.rstd)[r];
            for (int k = 0; k < N; k++) {
                dgain.v[k] += d.v[k] * ((x.v[k] - mean) * rstd);
                dbias.v[k] += d.v[k];
            }
        }
        float gain_total = sum_over_rows(dgain), bias_total = sum_over_rows(dbias),
              *sums = (float *)a.work + part * a.cols;
        c = first + my_column();
        if (my_column() >= COLUMN_THREADS * N || c >= a.cols) continue;
        sums[c] = gain_total;
        sums[parts * a.cols + c] = bias_total;
    }
}

template <class T, int N, int G>
DTK_KERNEL __launch_bounds__(BLOCK, 2) norm_back_rows_kernel(dt_norm_back_args a) {
    const T *gains = (const T *)a.gain;
    for (size_t r = row_first<G>(); r < a.rows; r += row_step<G>()) {
        thread_row<T, N, G> x((const T *)a.in + r * a.cols, (int64_t)a.cols);
        thread_row<T, N, G> dout((const T *)a.dout + r * a.cols, (int64_t)a.cols);
        T *dx = (T *)a.dx + r * a.cols;
        float mean = mean_of(a, r), rstd = ((const float *)a.rstd)[r], g_sum = 0, gy_sum = 0;
        x.for_each_pair(dout, [&](int64_t c, vec<float, N> v, vec<float, N> d) {
            vec<float, N> gain = gains_at<N>(a, gains, c);
            for (int k = 0; k < N; k++) {
                g_sum += d.v[k] * gain.v[k];
                gy_sum += d.v[k] * gain.v[k] * ((v.v[k] - mean) * rstd);
            }
        });
        float mean_g = group_sum<G>(g_sum) / (float)a.cols,
              mean_gy = group_sum<G>(gy_sum) / (float)a.cols;
        if (a.rms) mean_g = 0;
        x.for_each_pair(dout, [&](int64_t c, vec<float, N> v, vec<float, N> d) {
            vec<float, N> gain = gains_at<N>(a, gains, c);
            for (int k = 0; k < N; k++)
                v.v[k] = rstd * (d.v[k] * gain.v[k] - mean_g - (v.v[k] - mean) * rstd * mean_gy);
            store_floats(dx + c, v, a.accumulate_x);
        });
    }
}

/* Returns the number of parts into which the rows are split: one part for every `each` rows, but at
   most FILL_BLOCKS parts, and at most the number of parts that fit into the scratch memory. */
static size_t norm_back_parts(const dt_norm_back_args *a, size_t each) {
    size_t parts = a->rows / each + (a->rows % each != 0),
           capacity = a->work_bytes / sizeof(float) / 2 / a->cols;
    parts = parts < (size_t)FILL_BLOCKS ? parts : (size_t)FILL_BLOCKS;
    return parts < capacity ? parts : capacity;
}

/* Launches norm_back_kernel with one block per part. If the caller wants neither dgain nor dbias,
   `parts` is 0, and grid_for chooses the number of blocks. */
template <class T, int G, int K>
static void norm_back_fused(const dt_norm_back_args *a, size_t parts, void *stream) {
    unsigned grid = parts > 0 ? (unsigned)parts : grid_for(a->rows, BLOCK / G);
    if (a->rows > 0) DT_LAUNCH((norm_back_kernel<T, G, K>), grid, BLOCK, 0, stream_of(stream), *a);
}

/* Computes dgain and dbias before dx, because dx may be the same array as dout. */
template <class T, int N>
static void norm_back_split(const dt_norm_back_args *a, size_t parts, void *stream) {
    size_t tiles = parts * vec_count(a->cols, COLUMN_THREADS * N);
    if (tiles > 0)
        DT_LAUNCH((norm_back_sums_kernel<T, N>), grid_for(tiles, 1),
            dim3(COLUMN_THREADS, ROW_THREADS), 0, stream_of(stream), *a, parts);
    if (a->dx) DTK_LAUNCH((norm_back_rows_kernel<T, N, BLOCK>), a->rows, 1, stream, *a);
}

template <class T> static dt_status norm_back(const dt_norm_back_args *a, void *stream) {
    size_t vecs = vec_count(a->cols, vec<T>::N), parts = 0;
    bool summed = (a->dgain || a->dbias) && a->cols > 0;
    bool vectorized = a->cols % vec<T>::N == 0 && aligned16(a->in, a->dout, a->gain, a->dx);
    bool fused = vectorized && vecs <= BLOCK * 3;
    /* threads per row */
    size_t threads = vecs <= 32 * 3 ? 32 : vecs <= 64 * 3 ? 64 : vecs <= 128 * 3 ? 128 : BLOCK;
    if (summed) parts = norm_back_parts(a, fused ? BLOCK / threads : 2 * ROW_THREADS);
    if (summed && a->rows > 0 && (!a->work || parts == 0)) return DT_ERR_ARG;
    if (fused && threads == 32)
        norm_back_fused<T, 32, 3>(a, parts, stream);
    else if (fused && threads == 64)
        norm_back_fused<T, 64, 3>(a, parts, stream);
    else if (fused && threads == 128)
        norm_back_fused<T, 128, 3>(a, parts, stream);
    else if (fused)
        norm_back_fused<T, BLOCK, 3>(a, parts, stream);
    else if (vectorized)
        norm_back_split<T, vec<T>::N>(a, parts, stream);
    else
        norm_back_split<T, 1>(a, parts, stream);
    sum_job dgain = { a->work, a->dgain, output_dtype(a->dtype, a->wide_gain), 1, 1, parts, a->cols,
        1, a->accumulate_gain };
    sum_job dbias = { (float *)a->work + parts * a->cols, a->dbias,
        output_dtype(a->dtype, a->wide_bias), 1, 1, parts, a->cols, 1, a->accumulate_bias };
    if (a->dgain || a->dbias)
        launch_column_sums<float, 1>(
            a->dgain ? dgain : dbias, a->dgain && a->dbias ? &dbias : NULL, stream);
    return launch_status();
}
DTK_TABLE_ENTRY(norm_back)

/* a.out may be the same array as a.in, because a thread reads and writes only its own columns. */
template <class T, int N, int G>
DTK_KERNEL __launch_bounds__(BLOCK, 2) softmax_kernel(dt_softmax_args a) {
    for (size_t r = row_first<G>(); r < a.rows; r += row_step<G>()) {
        thread_row<T, N, G> x((const T *)a.in + r * a.cols, (int64_t)a.cols);
        T *out = (T *)a.out + r * a.cols;
        float max_value = -INFINITY, sum = 0;
        x.for_each([&](int64_t, vec<float, N> v) {
            for (int k = 0; k < N; k++) max_value = v.v[k] > max_value ? v.v[k] : max_value;
        });
        max_value = group_max<G>(max_value);
        x.for_each([&](int64_t, vec<float, N> v) {
            for (int k = 0; k < N; k++) sum += exp_as<T>(v.v[k] - max_value);
        });
        float inverse = 1 / group_sum<G>(sum);
        x.for_each([&](int64_t c, vec<float, N> v) {
            for (int k = 0; k < N; k++) v.v[k] = exp_as<T>(v.v[k] - max_value) * inverse;
            store_floats(out + c, v);
        });
    }
}

template <class T> static dt_status softmax(const dt_softmax_args *a, void *stream) {
    bool vectorized = a->cols % vec<T>::N == 0 && aligned16(a->in, a->out);
    if (a->cols > 0) DTK_LAUNCH_ROWS(softmax_kernel, T, vectorized, a->rows, a->cols, stream, *a);
    return launch_status();
}
DTK_TABLE_ENTRY(softmax)

template <class T, int N, int G>
DTK_KERNEL __launch_bounds__(BLOCK, 2) softmax_back_kernel(dt_softmax_back_args a) {
    for (size_t r = row_first<G>(); r < a.rows; r += row_step<G>()) {
        thread_row<T, N, G> y((const T *)a.out + r * a.cols, (int64_t)a.cols);
        thread_row<T, N, G> dout((const T *)a.dout + r * a.cols, (int64_t)a.cols);
        T *dx = (T *)a.dx + r * a.cols;
        float sum = 0;
        y.for_each_pair(dout, [&](int64_t, vec<float, N> v, vec<float, N> d) {
            for (int k = 0; k < N; k++) sum += v.v[k] * d.v[k];
        });
        sum = group_sum<G>(sum);
        y.for_each_pair(dout, [&](int64_t c, vec<float, N> v, vec<float, N> d) {
            for (int k = 0; k < N; k++) v.v[k] *= d.v[k] - sum;
            store_floats(dx + c, v, a.accumulate);
        });
    }
}

template <class T> static dt_status softmax_back(const dt_softmax_back_args *a, void *stream) {
    bool vectorized = a->cols % vec<T>::N == 0 && aligned16(a->out, a->dout, a->dx);
    DTK_LAUNCH_ROWS(softmax_back_kernel, T, vectorized, a->rows, a->cols, stream, *a);
    return launch_status();
}
DTK_TABLE_ENTRY(softmax_back)

// ==== 11. Rotary embedding; counter-based RNG: dropout, init ====================================

/* Rotary embedding (RoPE), arXiv:2104.09864. The host computes the frequencies. A block processes
   `each` tokens at a time, chosen so that one head of these tokens has at most BLOCK pairs. The
   block computes one angle for each of these pairs. All heads use the same angles. The block then
   rotates all heads, N pairs at a time. Angles are computed in double, because at positions in the
   thousands a float angle gives a cosine whose last digits are wrong. A thread reads its pairs
   before it writes them, so a.out may be the same array as a.in. */
struct rope_frequencies {
    double of[BLOCK], factor; /* factor: of sines and cosines */
};

/* Rotates pairs i to i + N - 1 of the head at x and stores them in the head at `out`. */
template <class T, int N>
static __device__ void rope_pairs(
    const dt_rope_args &a, const T *x, T *out, const float2 *rotation, int i) {
    int half = (int)a.rotary / 2;
    if (a.interleaved) {
        /* elements per memory access; if N is 1, a pair may be unaligned */
        const int M = N == 1 ? 1 : 2 * N;
        vec<float, M> both[2 * N / M];
        for (int k = 0; k < 2 * N; k += M) both[k / M] = load_floats<M>(x + 2 * i + k);
        for (int k = 0; k < N; k++) {
            float *x0 = &both[2 * k / M].v[2 * k % M],
                  *x1 = &both[(2 * k + 1) / M].v[(2 * k + 1) % M], old = *x0;
            *x0 = old * rotation[i + k].x - *x1 * rotation[i + k].y;
            *x1 = *x1 * rotation[i + k].x + old * rotation[i + k].y;
        }
        for (int k = 0; k < 2 * N; k += M) store_floats(out + 2 * i + k, both[k / M], a.accumulate);
        return;
    }
    vec<float, N> x0 = load_floats<N>(x + i), x1 = load_floats<N>(x + half + i);
    for (int k = 0; k < N; k++) {
        float old = x0.v[k];
        x0.v[k] = old * rotation[i + k].x - x1.v[k] * rotation[i + k].y;
        x1.v[k] = x1.v[k] * rotation[i + k].x + old * rotation[i + k].y;
    }
    store_floats(out + i, x0, a.accumulate);
    store_floats(out + half + i, x1, a.accumulate);
}

template <class T, int N>
DTK_KERNEL __launch_bounds__(BLOCK)
    rope_kernel(dt_rope_args a, rope_frequencies frequencies, int each) {
    __shared__ float2 rotation[BLOCK];
    int half = (int)a.rotary / 2, heads = (int)a.heads, rotated = half / N;
    /* units of work per head: N pairs to rotate, or N elements to copy */
    int head_vecs = (int)(a.dim - a.rotary) / N + rotated;
    for (size_t first = (size_t)blockIdx.x * each; first < a.tokens;
         first += (size_t)gridDim.x * each) {
        int here = a.tokens - first < (size_t)each ? (int)(a.tokens - first) : each,
            me = threadIdx.x;
        __syncthreads(); /* after this barrier all threads have read the previous angles */
        if (me < here * half) {
            double sine, cosine;
            sincos(a.positions[first + me / half] * frequencies.of[me % half], &sine, &cosine);
            rotation[me] = make_float2((float)(frequencies.factor * cosine),
                (float)(frequencies.factor * (a.inverse ? -sine : sine)));
        }
        __syncthreads();
        for (int u = me; u < here * heads * head_vecs; u += BLOCK) {
            /* `head` counts through the heads of all tokens of the block */
            int at_vec = u % head_vecs, head = u / head_vecs;
            const T *x = (const T *)a.in + (first * a.heads + head) * a.dim;
            T *out = (T *)a.out + (first * a.heads + head) * a.dim;
            int at = (int)a.rotary + (at_vec - rotated) * N;
            if (at_vec < rotated)
                rope_pairs<T, N>(a, x, out, rotation + head / heads * half, at_vec * N);
            else
                store_floats(out + at, load_floats<N>(x + at), a.accumulate);
        }
    }
}

template <class T> static dt_status rope(const dt_rope_args *a, void *stream) {
    const size_t N = vec<T>::N;
    size_t half = a->rotary / 2;
    rope_frequencies frequencies;
    if (a->rotary % 2 || a->rotary > a->dim || a->dim > 2 * BLOCK) return DT_ERR_ARG;
    for (size_t i = 0; i < half; i++) frequencies.of[i] = dt_rope_rate(a, i);
    frequencies.factor = a->scaling.kind == DT_ROPE_YARN ? a->scaling.attention : 1;
    int each = half > BLOCK / 8 ? BLOCK / (int)half : 8;
    bool aligned =
        aligned16(a->in, a->out) && a->dim % N == 0 && half % N == 0 && a->rotary % N == 0;
    if (aligned)
        DTK_LAUNCH((rope_kernel<T, vec<T>::N>), a->tokens, each, stream, *a, frequencies, each);
    else
        DTK_LAUNCH((rope_kernel<T, 1>), a->tokens, each, stream, *a, frequencies, each);
    return launch_status();
}
DTK_TABLE_ENTRY(rope)

/* Counter-based RNG, Philox4x32-10. Its random words are the same as those of the RNG in
   dt_tensor.h. */
static __device__ void philox(uint64_t key, uint64_t counter, unsigned out[4]) {
    unsigned k0 = (unsigned)key, k1 = (unsigned)(key >> 32);
    unsigned c0 = (unsigned)counter, c1 = (unsigned)(counter >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        /* nvcc computes both halves of a product in one instruction */
        unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Each group of four columns of the full tensor uses the four random words of one counter, one word
   per column. The counter consists of the token and column / 4. An element is dropped if its word
   is below `threshold`. The kernel reads vecs only if a.offset is a multiple of 4, so that each vec
   begins at the first column of a group. */
template <class T>
DTK_KERNEL __launch_bounds__(BLOCK) dropout_kernel(dt_dropout_args a, unsigned threshold) {
    float scale = (float)(1 / (1 - a.p));
    bool aligned = aligned16(a.in, a.out) && a.offset % 4 == 0;
    for_each_in_rows<vec<T>::N>(a.rows, a.cols, aligned, [&](size_t row, size_t col, auto width) {
        const int N = decltype(width)::N;
        uint64_t token = (unsigned)(a.tokens ? a.tokens[row] : (int32_t)row),
                 column = (uint64_t)a.offset + col;
        vec<float, N> x = load_floats<N>((const T *)a.in + row * a.cols + col);
        unsigned word[4];
        for (int k = 0; k < N; k++) {
            if (k % 4 == 0) philox(a.key, token << 32 | (column + k) / 4, word);
            /* `mine` is word[e]. An index e would move the array `word` out of registers. */
            int e = N > 1 ? k % 4 : (int)(column % 4);
            unsigned mine = e < 2 ? e < 1 ? word[0] : word[1] : e < 3 ? word[2] : word[3];
            x.v[k] = mine < threshold ? 0 : x.v[k] * scale;
        }
        store_floats((T *)a.out + row * a.cols + col, x, a.accumulate);
    });
}

template <class T> static dt_status dropout(const dt_dropout_args *a, void *stream) {
    unsigned threshold = (unsigned)(a->p * 4294967296.0); /* fits, because p is below 1 */
    DTK_LAUNCH(dropout_kernel<T>, a->rows * a->cols, BLOCK * vec<T>::N, stream, *a, threshold);
    return launch_status();
}
DTK_TABLE_ENTRY(dropout)

/* Returns a double in [0, 1) with 53 random bits, made from two random words. */
static __device__ double uniform53(unsigned high, unsigned low) {
    return (double)(((uint64_t)high << 32 | low) >> 11) * (1.0 / 9007199254740992.0);
}

/* Elements 2c and 2c + 1 of the full tensor are made from the four random words of counter c. They
   are two uniform values or, if a.normal is set, a Box-Muller pair of normal values. Uniform values
   have the same bits as on the CPU. Normal values are computed in double, and their last bits may
   differ from the CPU's. A thread processes one counter at a time. Number is the arithmetic type
   of T. */
template <class T, class Number> DTK_KERNEL __launch_bounds__(BLOCK) init_kernel(dt_init_args a) {
    uint64_t skew = a.offset % 2;
    for (uint64_t i = grid_first(1); 2 * i < a.count + skew; i += grid_step(1)) {
        unsigned word[4];
        double pair[2];
        philox(a.key, a.offset / 2 + i, word);
        double u = uniform53(word[0], word[1]), v = uniform53(word[2], word[3]);
        if (a.normal) {
            double radius = a.scale * sqrt(-2 * log(1 - u)); /* 1 - u is in (0, 1] */
            sincos(6.283185307179586 * v, &pair[1], &pair[0]);
            for (int k = 0; k < 2; k++) pair[k] *= radius;
        } else {
            pair[0] = a.scale * (2 * u - 1);
            pair[1] = a.scale * (2 * v - 1);
        }
        /* if skew is 1, the index of element -1 wraps around to a large value and is skipped */
        for (uint64_t k = 0; k < 2; k++)
            if (2 * i + k - skew < a.count)
                round_to((T *)a.out + (2 * i + k - skew), (Number)pair[k]);
    }
}

template <class T, class Number> static dt_status init(const dt_init_args *a, void *stream) {
    DTK_LAUNCH((init_kernel<T, Number>), a->count, 2 * BLOCK, stream, *a);
    return launch_status();
}

static dt_status cuda_init(const dt_init_args *a, void *stream) {
    switch (a->dtype) {
    case DT_F32: return init<float, float>(a, stream);
    case DT_BF16: return init<bf16, float>(a, stream);
    case DT_F16: return init<f16, float>(a, stream);
    case DT_F64: return init<double, double>(a, stream);
    case DT_I32:
    case DT_U8:
    case DT_I64: break;
    }
    return DT_ERR_UNSUPPORTED;
}

// ==== 12. Embedding =============================================================================

template <class T>
DTK_KERNEL __launch_bounds__(BLOCK) embedding_kernel(dt_embedding_args a, int *bad_index) {
    for_each_in_rows<vec<T>::N>(
        a.rows, a.cols, aligned16(a.out, a.table), [&](size_t r, size_t col, auto width) {
            const int N = decltype(width)::N;
            int64_t id = a.ids[r], row = id - a.offset;
            vec<T, N> x = { { T() } };
            bool known = is_valid_index(id, a.allow_empty ? -1 : 0, a.vocab, bad_index) && id >= 0;
            if (known && row >= 0 && row < a.table_rows)
                x = load_vec<N>((const T *)a.table + (size_t)row * a.cols + col);
            store_vec((T *)a.out + r * a.cols + col, x);
        });
}

template <class T> static dt_status embedding(const dt_embedding_args *a, void *stream) {
    dt_status status = check_indices(a->ids, a->rows, a->allow_empty ? -1 : 0, a->vocab, stream);
    if (status != DT_OK) return status;
    DTK_LAUNCH(embedding_kernel<T>, a->rows * a->cols, BLOCK * vec<T>::N, stream, *a,
        bad_index_of(stream));
    return launch_status();
}
DTK_TABLE_ENTRY(embedding)

/* Scatter-add for the gradient of the table. The result has the same bits as on the CPU. The kernel
   uses no atomics, and a table in f32 needs no scratch memory. A block owns at most OWNED_ROWS rows
   of the table. It scans all ids, ID_CHUNK at a time, and lists the positions of those ids whose
   row it owns. It sorts this list by row and adds the listed rows of dout in order, in f32. Every
   block reads all ids: with 16,384 ids and a table of 50,257 rows, the blocks make 26 million
   reads, but these reads hit the cache. */
enum {
    OWNED_ROWS = 32,
    ID_CHUNK = 8 * BLOCK,
    LIST_CAPACITY = 2 * ID_CHUNK,
    MAX_WINDOW = 1 << 26,
    FEW_IDS = 16
};

/* A block's list of the ids of its owned rows, which are the rows [row_begin, end) of the table.
   The list is made from fewer than 2 MAX_WINDOW ids, beginning with id number `base`. An entry of
   `found` is (position of the id after `base`) * OWNED_ROWS + (index of the row among the owned
   rows). An entry of `by_row` is only the position. */
struct owned_list {
    /* `found` is ascending; `by_row` is sorted by row, and ascending within a row */
    unsigned found[LIST_CAPACITY], by_row[LIST_CAPACITY];
    /* of_row: number of ids of each owned row; begin: where the row's entries begin in `by_row`;
       of_warp: number of entries that each warp appends */
    int of_row[OWNED_ROWS], begin[OWNED_ROWS + 1], of_warp[WARPS];
    /* rows[0]: the rows that have at most FEW_IDS ids in the list; rows[1]: the rows that have more
       than FEW_IDS; count: the lengths of rows[0] and rows[1] */
    int rows[2][OWNED_ROWS], count[2];
};

/* Appends to the list those of the ids [first, first + ID_CHUNK) whose row the block owns. Returns
   the list's new length. */
static __device__ int append_owned(owned_list &list, int count, const dt_embedding_back_args &a,
    size_t base, size_t first, int64_t row_begin, int64_t end, int *bad_index) {
    int row[8], mine = 0, before = count, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned hits[8];
    size_t begin = first + warp * 8 * 32 + lane;
    DTK_UNROLL
    for (int k = 0; k < 8; k++) row[k] = begin + k * 32 < a.rows ? a.ids[begin + k * 32] : -1;
    for (int k = 0; k < 8; k++) {
        int64_t at = row[k] - a.offset;
        if (row[k] != -1 && a.check_ids && row_begin == 0)
            is_valid_index(at, 0, a.table_rows, bad_index);
        row[k] = row[k] != -1 && at >= row_begin && at < end ? (int)(at - row_begin) : -1;
        mine += row[k] >= 0;
    }
    /* after this barrier all threads have read the previous list */
    if (!__syncthreads_or(mine)) return count;
    mine = 0;
    for (int k = 0; k < 8; k++) mine += __popc(hits[k] = __ballot_sync(0xffffffffu, row[k] >= 0));
    if (lane == 0) list.of_warp[warp] = mine;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) {
        before += w < warp ? list.of_warp[w] : 0;
        count += list.of_warp[w];
    }
    for (int k = 0; k < 8; k++) {
        int at = before + __popc(hits[k] & ((1u << lane) - 1));
        if (row[k] >= 0)
            list.found[at] = (unsigned)(begin + k * 32 - base) * OWNED_ROWS + (unsigned)row[k];
        before += __popc(hits[k]);
    }
    return count;
}

/* Each warp processes every WARPS-th owned row. If `copy` is set, it copies the row's entries to
   list.by_row; otherwise it stores their number in list.of_row. */
static __device__ void count_owned(owned_list &list, int count, bool copy) {
    int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < OWNED_ROWS; row += WARPS) {
        int at = copy ? list.begin[row] : 0;
        for (int e = 0; e < count; e += 32) {
            unsigned found = e + lane < count ? list.found[e + lane] : 0;
            bool here = e + lane < count && (int)(found % OWNED_ROWS) == row;
            unsigned hits = __ballot_sync(0xffffffffu, here);
            if (copy && here)
                list.by_row[at + __popc(hits & ((1u << lane) - 1))] = found / OWNED_ROWS;
            at += __popc(hits);
        }
        if (!copy && lane == 0) list.of_row[row] = at;
    }
    __syncthreads();
}

/* Sorts the list by row. `rows` is the number of owned rows. A row is put into list.rows only if at
   least min_count ids in the list are of this row. */
static __device__ void sort_owned(owned_list &list, int count, int min_count, int rows) {
    int begin = 0, row = threadIdx.x;
    __syncthreads(); /* after this barrier all threads have appended to the list */
    count_owned(list, count, false);
    for (int before = 0; before < OWNED_ROWS && before < row; before++)
        begin += list.of_row[before];
    if (row <= OWNED_ROWS) list.begin[row] = begin;
    /* only the threads of the first warp enter this loop */
    for (int often = 0; often < 2 && row < OWNED_ROWS; often++) {
        int n = list.of_row[row];
        bool here = often ? n > FEW_IDS : n <= FEW_IDS && n >= min_count && row < rows;
        unsigned hits = __ballot_sync(0xffffffffu, here);
        if (here) list.rows[often][__popc(hits & ((1u << row) - 1))] = row;
        if (row == 0) list.count[often] = __popc(hits);
    }
    __syncthreads();
    count_owned(list, count, true);
}

/* Computes the sums of the table rows in list.rows[often]: adds to each sum the rows of dout that
   list.by_row lists for this table row. A warp processes 32 N columns of a table row at a time.
   Each thread has IN_FLIGHT loads in flight. The sums start from zero if first_pass is set,
   otherwise from their values in `sums`. */
template <int N, int IN_FLIGHT, class T>
static __device__ void add_owned(
    const owned_list &list, int often, float *sums, const T *dout, size_t cols, bool first_pass) {
    int chunks = (int)vec_count(cols, 32 * N);
    for (int u = threadIdx.x / 32; u < list.count[often] * chunks; u += WARPS) {
        int row = list.rows[often][u / chunks], begin = list.begin[row];
        size_t c = (size_t)(u % chunks * 32 + threadIdx.x % 32) * N;
        vec<float, N> sum = { { 0 } };
        if (c >= cols) continue;
        if (!first_pass) sum = load_vec<N>(sums + row * cols + c);
        add_vecs<IN_FLIGHT>(&sum, list.begin[row + 1] - begin,
            [&](size_t e) { return dout + list.by_row[begin + e] * cols + c; });
        store_vec(sums + row * cols + c, sum);
    }
}

/* Computes `sums`, the gradient of the table in f32. The sums start from the values that `sums`
   holds if keep_sums is set, otherwise from zero. `owned` is the number of rows that a block owns
   at a time. a.cols must be a multiple of N. The additions to a row run one after the other, so a
   row with many ids takes long. In these rows a thread processes only LESS columns instead of N, so
   that more warps process the row together. */
template <class T, int N>
DTK_KERNEL __launch_bounds__(BLOCK, 3) embedding_back_kernel(
    dt_embedding_back_args a, float *sums, bool keep_sums, int owned, int *bad_index) {
    const int LESS = (N + 3) / 4;
    __shared__ owned_list list;
    for (int64_t row_begin = (int64_t)blockIdx.x * owned;
         row_begin == 0 || row_begin < a.table_rows; row_begin += (int64_t)gridDim.x * owned) {
        int64_t end = row_begin + owned < a.table_rows ? row_begin + owned : a.table_rows;
        size_t base = 0;
        int count = 0;
        bool first_pass = !keep_sums;
        for (size_t first = 0; first < a.rows || first_pass; first += ID_CHUNK) {
            size_t next = first + ID_CHUNK;
            const T *dout = (const T *)a.dout + base * a.cols;
            float *mine = sums + row_begin * a.cols;
            count = append_owned(list, count, a, base, first, row_begin, end, bad_index);
            if (next < a.rows && count <= LIST_CAPACITY - ID_CHUNK && next - base < MAX_WINDOW)
                continue;
            sort_owned(list, count, first_pass ? 0 : 1, (int)(end - row_begin));
            add_owned<N, 4>(list, 0, mine, dout, a.cols, first_pass);
            add_owned<LESS, 16>(list, 1, mine, dout, a.cols, first_pass);
            first_pass = false;
            base = next;
            count = 0;
        }
    }
}

/* Rounds the complete sums to T and stores them in `out`, or adds them if `accumulate` is set. */
template <class T>
DTK_KERNEL __launch_bounds__(BLOCK)
    rounded_kernel(T *out, const float *sums, size_t count, int accumulate) {
    for_each_vec<vec<T>::N>(count, aligned16(out, sums), [&](size_t i, auto width) {
        store_floats(out + i, load_floats<decltype(width)::N>(sums + i), accumulate);
    });
}

template <class T> static dt_status embedding_back(const dt_embedding_back_args *a, void *stream) {
    const int N = vec<T>::N;
    dt_status status =
        a->check_ids ? check_indices(a->ids, a->rows, -1, a->table_rows, stream) : DT_OK;
    size_t all = (size_t)a->table_rows * a->cols;
    bool in_scratch = sizeof(T) == 2 && !a->wide, keep_sums = a->accumulate && !in_scratch;
    float *sums = (float *)(in_scratch ? a->work : a->dtable);
    T *table = (T *)a->dtable;
    if (status != DT_OK) return status;
    if (in_scratch && (!sums || a->work_bytes < all * sizeof *sums)) return DT_ERR_ARG;
    size_t held =
        a->table_rows > 0 ? (size_t)a->table_rows : 1; /* one block checks an empty table's ids */
    /* a block owns fewer rows if the table is small, so that the blocks fill a GPU */
    int owned = held < FILL_BLOCKS                        ? 1
                : held < (size_t)FILL_BLOCKS * OWNED_ROWS ? (int)(held / FILL_BLOCKS)
                                                          : (int)OWNED_ROWS;
    if (a->cols % N == 0 && aligned16(sums, a->dout))
        DTK_LAUNCH((embedding_back_kernel<T, N>), held, owned, stream, *a, sums, keep_sums, owned,
            bad_index_of(stream));
    else
        DTK_LAUNCH((embedding_back_kernel<T, 1>), held, owned, stream, *a, sums, keep_sums, owned,
            bad_index_of(stream));
    if (in_scratch)
        DTK_LAUNCH(rounded_kernel<T>, all, BLOCK * N, stream, table, (const float *)sums, all,
            a->accumulate);
    return launch_status();
}
DTK_TABLE_ENTRY(embedding_back)

// ==== 13. Losses ================================================================================

/* Cross-entropy. With lse = log(sum of e^x) over the vocabulary,

       loss = lse - x[label]        dx = e^(x - lse) - (1 in the label's column, 0 elsewhere)

   A naive kernel reads a row of logits twice, for the maximum and for the sum. cross_entropy_kernel
   reads the row once (online softmax, see running_lse). The backward recomputes the probabilities
   from lse. In the vocabulary-parallel cross-entropy each rank has some of the columns, and
   computes two values per row: the lse of its columns, and the sum over its columns of target
   probability times logit. cross_entropy_merge_kernel then merges the ranks' results. */

/* A block of LOSS_THREADS threads processes a row of logits, because a vocabulary is long. A single
   block of TOTAL_THREADS threads adds the losses of all rows. */
enum { LOSS_THREADS = 512, TOTAL_THREADS = 512 };

/* Before sm_80, some GPUs run at most 1,024 threads per multiprocessor, which are two blocks. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
enum { LOSS_BLOCKS_PER_SM = 2 };
#else
enum { LOSS_BLOCKS_PER_SM = 3 };
#endif

/* Online softmax, arXiv:1805.02867, computes log(sum of exp(x)) in one pass. Each thread keeps
   `max`, the largest value that it has read, and `sum`, the sum of exp(x - max). When the thread
   reads a larger value, it rescales the sum to the new max, so no exponential overflows. A thread
   adds the exponentials of a few vecs in f32, and adds these partial sums in double. So the log is
   accurate even if one exponential is nearly the entire sum. */
struct running_lse {
    float max;
    double sum;
};

/* Adds VECS vecs of x to *e. The first vec is at column c, and the distance from each vec to the
   next is LOSS_THREADS vecs. Vecs at or after column `end` are skipped. */
template <class T, int N, int VECS>
static __device__ void add_to_lse(running_lse *e, const T *x, size_t c, size_t end) {
    const size_t APART = LOSS_THREADS * N;
    raw_vec<T, N> vecs[VECS];
    float top = e->max, part = 0;
    DTK_UNROLL
    for (int j = 0; j < VECS; j++)
        if (c + j * APART < end)
            vecs[j] = *reinterpret_cast<const raw_vec<T, N> *>(x + c + j * APART);
    DTK_UNROLL
    for (int j = 0; j < VECS; j++) {
        vec<float, N> v = to_floats(vecs[j]);
        for (int k = 0; k < N && c + j * APART < end; k++) top = fmaxf(top, v.v[k]);
    }
    if (top > e->max) e->sum *= (double)expf(e->max - top);
    e->max = top;
    DTK_UNROLL
    for (int j = 0; j < VECS; j++) {
        vec<float, N> v = to_floats(vecs[j]);
        for (int k = 0; k < N && c + j * APART < end; k++) part += exp_as<T>(v.v[k] - top);
    }
    e->sum += (double)part;
}

template <class T> static __device__ double log_sum_exp(const T *x, size_t n) {
    const int N = vec<T>::N, VECS = 4;
    range aligned = aligned_range<N>(x, n);
    size_t me = threadIdx.x;
    running_lse e = { -3.402823466e38f, 0 };
    if (me < aligned.first) add_to_lse<T, 1, 1>(&e, x, me, n);
    for (size_t c = aligned.first + me * N; c < aligned.end; c += LOSS_THREADS * N * VECS)
        add_to_lse<T, N, VECS>(&e, x, c, aligned.end);
    for (size_t c = aligned.end + me; c < n; c += LOSS_THREADS) add_to_lse<T, 1, 1>(&e, x, c, n);
    float top = block_max<LOSS_THREADS>(e.max);
    double sum = block_sum<double, LOSS_THREADS>(e.sum * (double)expf(e.max - top));
    return sum == 0 ? NAN : (double)top + log(sum); /* the sum is 0 if all x are -infinity */
}

template <class T> static __device__ double row_total(const T *x, size_t n) {
    double sum = 0;
    for (size_t c = threadIdx.x; c < n; c += LOSS_THREADS) sum += (double)widen(x[c]);
    return block_sum<double, LOSS_THREADS>(sum);
}

/* The logits are the columns [offset, offset + vocab) of a vocabulary of size full_vocab. A block
   processes one row at a time, so all its threads have the same label and reach the same
   barriers. */
template <class T>
DTK_KERNEL __launch_bounds__(LOSS_THREADS, LOSS_BLOCKS_PER_SM)
    cross_entropy_kernel(dt_cross_entropy_args a, int *bad_index) {
    int64_t vocab = (int64_t)a.vocab;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const T *x = (const T *)a.logits + r * a.cols;
        int64_t label = a.labels[r], here = label - a.offset;
        double lse = 0, target = 0;
        if (label >= 0 &&
            is_valid_index(label, 0, a.full_vocab, threadIdx.x == 0 ? bad_index : NULL)) {
            lse = vocab > 0 ? log_sum_exp(x, a.vocab) : (double)-INFINITY;
            if (here >= 0 && here < vocab) target = (1 - a.smoothing) * (double)widen(x[here]);
            if (a.smoothing > 0 && vocab > 0)
                target += a.smoothing * (row_total(x, a.vocab) / (double)a.full_vocab);
        }
        if (threadIdx.x > 0) continue;
        if (a.partial) {
            a.partial[2 * r] = lse;
            a.partial[2 * r + 1] = target;
        } else {
            ((float *)a.lse)[r] = (float)lse;
            a.row_loss[r] = lse - target;
        }
    }
}

DTK_KERNEL __launch_bounds__(TOTAL_THREADS, 1) loss_total_kernel(dt_cross_entropy_args a) {
    double total = 0, squares = 0;
    for (size_t r = threadIdx.x; r < a.rows; r += TOTAL_THREADS) {
        double lse = (double)((const float *)a.lse)[r];
        total += a.row_loss[r];
        squares += lse * lse;
    }
    total = block_sum<double, TOTAL_THREADS>(total);
    squares = block_sum<double, TOTAL_THREADS>(squares);
    if (threadIdx.x > 0) return;
    *a.loss = (a.accumulate ? *a.loss : 0) + total / a.denominator;
    if (a.z_loss) *a.z_loss = (a.accumulate ? *a.z_loss : 0) + squares / a.denominator;
}

template <class T> static dt_status cross_entropy(const dt_cross_entropy_args *args, void *stream) {
    dt_cross_entropy_args a = *args;
    if (!a.partial && a.vocab == 0) a.vocab = a.cols;
    if (a.vocab > a.cols) return DT_ERR_ARG;
    if (!a.partial) a.offset = 0;
    if (!a.partial) a.full_vocab = (int64_t)a.vocab;
    dt_status status = check_indices(a.labels, a.rows, INT32_MIN, a.full_vocab, stream);
    if (status != DT_OK) return status;
    if (a.rows > 0)
        DT_LAUNCH(cross_entropy_kernel<T>, grid_for(a.rows, 1), LOSS_THREADS, 0, stream_of(stream),
            a, bad_index_of(stream));
    if (!a.partial) DT_LAUNCH(loss_total_kernel, 1, TOTAL_THREADS, 0, stream_of(stream), a);
    return launch_status();
}
DTK_TABLE_ENTRY(cross_entropy)

/* Log-sum-exp merge of the ranks' results of a vocabulary-parallel cross-entropy. The kernel runs
   in one block. A thread processes every TOTAL_THREADS-th row and adds the row's n partial results
   in order. */
DTK_KERNEL __launch_bounds__(TOTAL_THREADS, 1)
    cross_entropy_merge_kernel(dt_cross_entropy_merge_args a) {
    double total = 0, squares = 0;
    for (size_t r = threadIdx.x; r < a.rows; r += TOTAL_THREADS) {
        double lse = 0, target = 0, max_value = -INFINITY, sum = 0;
        for (size_t i = 0; i < a.n; i++) {
            double part = a.partials[2 * (i * a.rows + r)];
            max_value = part > max_value ? part : max_value;
        }
        for (size_t i = 0; i < a.n && a.labels[r] >= 0; i++) {
            sum += (double)expf((float)(a.partials[2 * (i * a.rows + r)] - max_value));
            target += a.partials[2 * (i * a.rows + r) + 1];
        }
        if (a.labels[r] >= 0) lse = max_value + log(sum);
        ((float *)a.lse)[r] = (float)lse;
        total += lse - target;
        squares += lse * lse;
    }
    total = block_sum<double, TOTAL_THREADS>(total);
    squares = block_sum<double, TOTAL_THREADS>(squares);
    if (threadIdx.x > 0) return;
    *a.loss = total / a.denominator;
    if (a.z_loss) *a.z_loss = squares / a.denominator;
}

/* One kernel serves all dtypes, because the partial results are double and lse is float. */
static dt_status cuda_cross_entropy_merge(const dt_cross_entropy_merge_args *a, void *stream) {
    if (a->dtype != DT_F32 && a->dtype != DT_BF16 && a->dtype != DT_F16) return DT_ERR_UNSUPPORTED;
    DT_LAUNCH(cross_entropy_merge_kernel, 1, TOTAL_THREADS, 0, stream_of(stream), *a);
    return launch_status();
}

/* dlogits (+)= factor (exp(x - lse) (1 + 2 z lse) - target), where `factor` is upstream * scale and
   `target` is the column's target probability. The gradient of a row without a label is zero. Each
   element is read once and written once. A row is split into gridDim.y parts, one per block. */
template <class T>
DTK_KERNEL __launch_bounds__(LOSS_THREADS)
    cross_entropy_back_kernel(dt_cross_entropy_back_args a, int *bad_index) {
    const int MAX_N = vec<T>::N;
    float factor = (float)(*a.upstream * a.scale),
          smooth_term = factor * (float)(a.smoothing / (double)a.full_vocab);
    float label_term = factor * (float)(1 - a.smoothing);
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        range all = { 0, a.cols }, mine = subrange(all, gridDim.y, blockIdx.y);
        const T *x = (const T *)a.logits + r * a.cols + mine.first;
        T *out = (T *)a.dlogits + r * a.cols + mine.first;
        float lse = ((const float *)a.lse)[r], scale = factor * (1 + (float)(2 * a.z) * lse);
        int64_t label = a.labels[r], here = label - a.offset - (int64_t)mine.first;
        int64_t vocab = (int64_t)a.vocab - (int64_t)mine.first;
        bool has_label = label >= 0 && is_valid_index(label, 0, a.full_vocab,
                                           threadIdx.x == 0 ? bad_index : NULL);
        auto back = [&](size_t c, auto width) {
            const int N = decltype(width)::N;
            vec<float, N> v = { { 0 } };
            if (has_label) v = load_floats<N>(x + c);
            for (int k = 0; k < N && has_label; k++) {
                float d = scale * exp_as<T>(v.v[k] - lse) - smooth_term -
                          ((int64_t)c + k == here ? label_term : 0.0f);
                v.v[k] = (int64_t)c + k < vocab ? d : 0;
            }
            store_floats(out + c, v, a.accumulate);
        };
        if (!has_label && a.accumulate) continue;
        if ((uintptr_t)out % 16 == (uintptr_t)x % 16)
            for_each_in_range<MAX_N, LOSS_THREADS>(x, mine.end - mine.first, back);
        else
            for_each_in_range<1, LOSS_THREADS>(x, mine.end - mine.first, back);
    }
}

template <class T>
static dt_status cross_entropy_back(const dt_cross_entropy_back_args *args, void *stream) {
    dt_cross_entropy_back_args a = *args;
    if (a.full_vocab == 0 && a.vocab == 0) a.vocab = a.cols;
    if (a.vocab > a.cols) return DT_ERR_ARG;
    if (a.full_vocab == 0) {
        a.offset = 0;
        a.full_vocab = (int64_t)a.vocab;
    }
    dt_status status = check_indices(a.labels, a.rows, INT32_MIN, a.full_vocab, stream);
    if (status != DT_OK) return status;
    /* a row is split into parts if there are too few rows to fill a GPU */
    size_t row_parts = a.rows >= 2 * FILL_BLOCKS ? 1 : 2 * FILL_BLOCKS / (a.rows + 1);
    size_t max_parts = a.cols / (LOSS_THREADS * vec<T>::N);
    row_parts = row_parts > max_parts ? max_parts : row_parts;
    if (a.rows > 0)
        DT_LAUNCH(cross_entropy_back_kernel<T>,
            dim3(grid_for(a.rows, 1), row_parts > 1 ? row_parts : 1), LOSS_THREADS, 0,
            stream_of(stream), a, bad_index_of(stream));
    return launch_status();
}
DTK_TABLE_ENTRY(cross_entropy_back)

/* Returns max(x,0) - x y + ln(1 + e^-|x|), without cancellation where y is 0 or 1. */
static __device__ float bce(float x, float y) {
    return (x > 0 ? x * (1 - y) : -x * y) + log1p_exp(x);
}

/* Squared error and binary cross-entropy. The kernel runs in one block, because it has no scratch
   memory for partial sums. So it is fast enough for the outputs of a model, but not for arrays as
   large as a model's weights. */
template <class T>
DTK_KERNEL __launch_bounds__(TOTAL_THREADS, 1) pair_loss_kernel(dt_pair_loss_args a) {
    const T *x = (const T *)a.a, *y = (const T *)a.b;
    double total = 0;
    auto add = [&](size_t i, auto width) {
        const int N = decltype(width)::N;
        vec<float, N> u = load_floats<N>(x + i), v = load_floats<N>(y + i);
        for (int k = 0; k < N; k++) {
            double difference = (double)u.v[k] - (double)v.v[k];
            total += a.kind == DT_PAIR_BCE ? bce(u.v[k], v.v[k]) : difference * difference;
        }
    };
    if ((uintptr_t)x % 16 == (uintptr_t)y % 16)
        for_each_in_range<vec<T>::N, TOTAL_THREADS>(x, a.count, add);
    else
        for_each_in_range<1, TOTAL_THREADS>(x, a.count, add);
    total = block_sum<double, TOTAL_THREADS>(total);
    if (threadIdx.x == 0) *a.loss = total / a.denominator;
}

template <class T> static dt_status pair_loss(const dt_pair_loss_args *a, void *stream) {
    if (a->kind != DT_PAIR_SQUARE && a->kind != DT_PAIR_BCE) return DT_ERR_ARG;
    DT_LAUNCH(pair_loss_kernel<T>, 1, TOTAL_THREADS, 0, stream_of(stream), *a);
    return launch_status();
}
DTK_TABLE_ENTRY(pair_loss)

template <class T>
DTK_KERNEL __launch_bounds__(BLOCK) pair_loss_back_kernel(dt_pair_loss_back_args a) {
    float factor = (float)(*a.upstream * a.scale);
    for_each_vec<vec<T>::N>(a.count, aligned16(a.da, a.a, a.b), [&](size_t i, auto width) {
        const int N = decltype(width)::N;
        vec<float, N> x = load_floats<N>((const T *)a.a + i),
                      y = load_floats<N>((const T *)a.b + i);
        for (int k = 0; k < N; k++)
            x.v[k] = factor * (a.kind == DT_PAIR_SQUARE   ? x.v[k] - y.v[k]
                                  : a.kind == DT_PAIR_BCE ? sigmoid_as<T>(x.v[k]) - y.v[k]
                                                          : -y.v[k]);
        store_floats((T *)a.da + i, x, a.accumulate);
    });
}

template <class T> static dt_status pair_loss_back(const dt_pair_loss_back_args *a, void *stream) {
    if (a->kind < DT_PAIR_SQUARE || a->kind > DT_PAIR_BCE_TARGET) return DT_ERR_ARG;
    DTK_LAUNCH(pair_loss_back_kernel<T>, a->count, BLOCK * vec<T>::N, stream, *a);
    return launch_status();
}
DTK_TABLE_ENTRY(pair_loss_back)

// ==== 14. Norm and optimizers ===================================================================

/* The optimizers' updates of each element, where p is the parameter and g the gradient:

       SGD      b = momentum b + g + decay p              p -= lr b
       AdamW    m = b1 m + (1 - b1) g
                v = b2 v + (1 - b2) g^2                   p -= lr (m' / (sqrt(v') + eps) + decay p)
                with m' = m / (1 - b1^step), v' = v / (1 - b2^step)

   The gradient norm is summed in pieces of 1,024 elements, in the same order on CPU and GPU. */

/* Half a warp (16 lanes) sums one piece, and a block sums 16 pieces. Lane l adds elements l,
   l + 16, .... Then the upper half of the lanes is added to the lower half until one sum is left.
   The CPU adds in the same order, and the square of a float is exact in double, so the norm has the
   same bits as on the CPU. The f64 instance serves dt_check_finite, because losses are f64. */
enum { PIECE_LANES = 16, PIECES_PER_BLOCK = BLOCK / PIECE_LANES };

static __device__ double lanes_sum(double sum) {
    for (int w = PIECE_LANES / 2; w > 0; w /= 2)
        sum += __shfl_down_sync(0xffffffffu, sum, w, PIECE_LANES);
    return sum;
}

static size_t piece_count(size_t count) { return count / DT_PIECE + (count % DT_PIECE != 0); }

template <class T>
DTK_KERNEL __launch_bounds__(BLOCK) square_sums_kernel(dt_square_sums_args a, size_t pieces) {
    for (size_t first = (size_t)blockIdx.x * PIECES_PER_BLOCK; first < pieces;
         first += (size_t)gridDim.x * PIECES_PER_BLOCK) {
        size_t piece = first + threadIdx.x / PIECE_LANES,
               left = piece < pieces ? a.count - piece * DT_PIECE : 0;
        const T *x = (const T *)a.in + piece * DT_PIECE;
        int end = left < DT_PIECE ? (int)left : DT_PIECE;
        double sum = 0;
        DTK_UNROLL_BY(16)
        for (int j = threadIdx.x % PIECE_LANES; j < end; j += PIECE_LANES)
            sum += (double)widen(x[j]) * (double)widen(x[j]);
        sum = lanes_sum(sum);
        if (threadIdx.x % PIECE_LANES == 0 && piece < pieces) a.out[piece] = sum;
    }
}

template <class T> static dt_status square_sums(const dt_square_sums_args *a, void *stream) {
    DTK_LAUNCH(square_sums_kernel<T>, a->count, (size_t)DT_PIECE * PIECES_PER_BLOCK, stream, *a,
        piece_count(a->count));
    return launch_status();
}
static dt_status cuda_square_sums(const dt_square_sums_args *a, void *stream) {
    return a->dtype == DT_F64 ? square_sums<double>(a, stream)
                              : DTK_BY_DTYPE(a->dtype, square_sums, a, stream);
}

/* Digest: each block sums one of a.parts ranges of words. Sums of integers modulo 2^64 have
   no order, so the digest is equal to the CPU's. a.count and a.offset count words. */
template <class Word> DTK_KERNEL __launch_bounds__(TOTAL_THREADS) digest_kernel(dt_digest_args a) {
    size_t each = a.count / a.parts + 1, first = blockIdx.x * each;
    size_t at = first < a.count ? first : a.count, n = a.count - at < each ? a.count - at : each;
    const Word *x = (const Word *)a.in + at;
    uint32_t index = (uint32_t)(a.offset + at);
    uint64_t sum = 0;
    for_each_in_range<vec<Word>::N, TOTAL_THREADS>(x, n, [&](size_t i, auto width) {
        const int N = decltype(width)::N;
        vec<Word, N> words = load_vec<N>(x + i);
        for (int k = 0; k < N; k++) {
            uint32_t weight = (index + 1 + (uint32_t)i + k) * 2654435761u;
            weight = (weight ^ weight >> 15) * 2246822507u;
            sum += (uint64_t)words.v[k] * (weight ^ weight >> 13);
        }
    });
    sum = block_sum<uint64_t, TOTAL_THREADS>(sum);
    if (threadIdx.x == 0) a.out[blockIdx.x] = sum;
}

template <class Word> static dt_status digest(dt_digest_args a, void *stream) {
    size_t words = dt_dtype_size(a.dtype) / sizeof(Word);
    a.count *= words;
    a.offset *= words;
    DT_LAUNCH(digest_kernel<Word>, (unsigned)a.parts, TOTAL_THREADS, 0, stream_of(stream), a);
    return launch_status();
}

static dt_status cuda_digest(const dt_digest_args *a, void *stream) {
    size_t size = dt_dtype_size(a->dtype);
    return size == 0   ? DT_ERR_UNSUPPORTED
           : size == 1 ? digest<uint8_t>(*a, stream)
           : size == 2 ? digest<uint16_t>(*a, stream)
                       : digest<uint32_t>(*a, stream);
}

/* Parameters and their optimizer state are f32. Narrow is the type of the optional copy of the
   parameters, or float if there is no copy. */
#define DTK_BY_NARROW_DTYPE(a, f, ...) \
    ((a)->dtype != DT_F32 \
            ? DT_ERR_UNSUPPORTED \
            : DTK_BY_DTYPE((a)->model_param ? (a)->model_dtype : DT_F32, f, __VA_ARGS__))

template <class Narrow, int N>
static __device__ void store_narrow_copy(void *narrow, size_t i, vec<float, N> param) {
    if (narrow) store_floats((Narrow *)narrow + i, param);
}

/* One tensor of parameters, and the factors with which the step updates it. The host computes the
   factors in double, as the CPU kernel does, and rounds them to float. */
struct adamw_tensor {
    float *param, *m, *v;
    const float *grad;
    void *narrow;
    size_t count;
    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps, step_size, v_scale, param_scale,
        l2_decay, grad_scale;
};

/* The n tensors that one launch updates. Blocks first[i] to first[i + 1] - 1 update tensor i. The
   struct is a kernel parameter, and kernel parameters are limited to 4 KiB. */
enum { ADAMW_BATCH = 32 };
struct adamw_batch {
    unsigned n, first[ADAMW_BATCH + 1];
    adamw_tensor tensor[ADAMW_BATCH];
};
static_assert(sizeof(adamw_batch) <= 4096, "the parameters of a kernel");

/* AdamW, arXiv:1711.05101: m and v are running means of g and g^2. If `coupled` is set, the kernel
   computes Adam (arXiv:1412.6980), which adds the weight decay to the gradient. */
template <class Narrow> DTK_KERNEL __launch_bounds__(BLOCK) adamw_kernel(adamw_batch all) {
    unsigned mine = 0, end = all.n;
    while (end - mine > 1) { /* binary search: the index of this block's tensor is in [mine, end) */
        unsigned middle = (mine + end) / 2;
        if (blockIdx.x < all.first[middle])
            end = middle;
        else
            mine = middle;
    }
    unsigned first = all.first[mine], blocks = all.first[mine + 1] - first;
    adamw_tensor f = all.tensor[mine];
    bool aligned = aligned16(f.param, f.grad, f.m, f.v) && aligned16(f.narrow);
    for_each_in_blocks<vec<float>::N>(
        blockIdx.x - first, blocks, f.count, aligned, [&](size_t i, auto width) {
            const int N = decltype(width)::N;
            vec<float, N> param = load_vec<N>(f.param + i), grad = load_vec<N>(f.grad + i);
            vec<float, N> m = load_vec<N>(f.m + i), v = load_vec<N>(f.v + i);
            for (int k = 0; k < N; k++) {
                float g = grad.v[k] * f.grad_scale + f.l2_decay * param.v[k];
                m.v[k] = f.beta1 * m.v[k] + f.one_minus_beta1 * g;
                v.v[k] = f.beta2 * v.v[k] + f.one_minus_beta2 * g * g;
                param.v[k] = f.param_scale * param.v[k] -
                             f.step_size * m.v[k] / (sqrtf(v.v[k]) * f.v_scale + f.eps);
            }
            store_vec(f.param + i, param);
            store_vec(f.m + i, m);
            store_vec(f.v + i, v);
            store_narrow_copy<Narrow>(f.narrow, i, param);
        });
}

static adamw_tensor make_adamw_tensor(const dt_adamw_args *a) {
    adamw_tensor f;
    f.param = (float *)a->param;
    f.m = (float *)a->m;
    f.v = (float *)a->v;
    f.grad = (const float *)a->grad;
    f.narrow = a->model_param;
    f.count = a->count;
    f.beta1 = (float)a->beta1;
    f.beta2 = (float)a->beta2;
    f.one_minus_beta1 = (float)(1 - a->beta1);
    f.one_minus_beta2 = (float)(1 - a->beta2);
    f.eps = (float)a->eps;
    f.step_size = (float)(a->lr / (1 - pow(a->beta1, (double)a->step)));
    f.v_scale = (float)(1 / sqrt(1 - pow(a->beta2, (double)a->step)));
    f.param_scale = (float)(a->coupled ? 1 : 1 - a->lr * a->weight_decay);
    f.l2_decay = (float)(a->coupled ? a->weight_decay : 0);
    f.grad_scale = (float)a->grad_scale;
    return f;
}

/* Updates a list of tensors, ADAMW_BATCH in each launch. A small tensor gets one block, and a large
   tensor gets enough blocks to fill a GPU. */
template <class Narrow> static dt_status adamw(const dt_adamw_args *a, void *stream) {
    while (a) {
        adamw_batch all;
        unsigned blocks = 0;
        for (all.n = 0; a && all.n < ADAMW_BATCH; a = a->next) {
            if (a->count == 0) continue;
            all.tensor[all.n] = make_adamw_tensor(a);
            all.first[all.n++] = blocks;
            blocks += grid_for(a->count, BLOCK * vec<float>::N);
        }
        all.first[all.n] = blocks;
        if (blocks > 0) DT_LAUNCH(adamw_kernel<Narrow>, blocks, BLOCK, 0, stream_of(stream), all);
    }
    return launch_status();
}

static dt_status cuda_adamw(const dt_adamw_args *a, void *stream) {
    const dt_adamw_args *of = a; /* an entry with a narrow copy, if there is one */
    for (const dt_adamw_args *n = a; n && a->dtype == DT_F32; n = n->next) {
        if (n->step < 1 || n->dtype != a->dtype || n->model_dtype != a->model_dtype)
            return DT_ERR_ARG;
        if (n->model_param) of = n;
    }
    return DTK_BY_NARROW_DTYPE(of, adamw, a, stream);
}

/* Without momentum, the kernel does not touch the momentum buffer. With momentum, the first step
   writes the buffer without reading it. */
template <class Narrow> DTK_KERNEL __launch_bounds__(BLOCK) sgd_kernel(dt_sgd_args a) {
    float *params = (float *)a.param,
          *buffers = a.momentum != 0 ? (float *)a.momentum_buffer : NULL;
    float lr = (float)a.lr, decay = (float)a.weight_decay, scale = (float)a.grad_scale,
          momentum = (float)a.momentum;
    bool aligned = aligned16(params, a.grad, buffers, a.model_param);
    for_each_vec<vec<float>::N>(a.count, aligned, [&](size_t i, auto width) {
        const int N = decltype(width)::N;
        vec<float, N> param = load_vec<N>(params + i), g = load_vec<N>((const float *)a.grad + i);
        for (int k = 0; k < N; k++) g.v[k] = g.v[k] * scale + decay * param.v[k];
        if (buffers && a.step > 1) {
            vec<float, N> b = load_vec<N>(buffers + i);
            for (int k = 0; k < N; k++) g.v[k] = momentum * b.v[k] + g.v[k];
        }
        if (buffers) store_vec(buffers + i, g);
        for (int k = 0; k < N; k++) param.v[k] -= lr * g.v[k];
        store_vec(params + i, param);
        store_narrow_copy<Narrow>(a.model_param, i, param);
    });
}

template <class Narrow> static dt_status sgd(const dt_sgd_args *a, void *stream) {
    if (a->momentum != 0 && !a->momentum_buffer) return DT_ERR_ARG;
    DTK_LAUNCH(sgd_kernel<Narrow>, a->count, BLOCK * vec<float>::N, stream, *a);
    return launch_status();
}

static dt_status cuda_sgd(const dt_sgd_args *a, void *stream) {
    return DTK_BY_NARROW_DTYPE(a, sgd, a, stream);
}

/* ---- 1-bit Adam ---- */

/* 1-bit Adam, arXiv:2102.02888. After a warm-up, Adam's v is frozen. From then on each rank sends
   only the signs of its momentum, and one scale. A rank keeps the error of this compression and
   adds it to the next momentum x that it sends:

       e = x + error,  send sign(e) and scale = sqrt(mean of e^2),  error = e - scale sign(e) */

DTK_KERNEL __launch_bounds__(BLOCK) momentum_kernel(dt_momentum_args a, float grad_weight) {
    float *ms = (float *)a.m, beta1 = (float)a.beta1;
    const float *grads = (const float *)a.grad;
    for_each_vec<vec<float>::N>(a.count, aligned16(ms, grads), [&](size_t i, auto width) {
        const int N = decltype(width)::N;
        vec<float, N> m = load_vec<N>(ms + i), g = load_vec<N>(grads + i);
        for (int k = 0; k < N; k++) m.v[k] = beta1 * m.v[k] + grad_weight * g.v[k];
        store_vec(ms + i, m);
    });
}

static dt_status cuda_momentum(const dt_momentum_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    float grad_weight = (float)((1 - a->beta1) * a->grad_scale);
    DTK_LAUNCH(momentum_kernel, a->count, BLOCK * vec<float>::N, stream, *a, grad_weight);
    return launch_status();
}

template <class Narrow>
DTK_KERNEL __launch_bounds__(BLOCK) frozen_adam_kernel(dt_frozen_adam_args a, float param_scale) {
    float *params = (float *)a.param, lr = (float)a.lr, eps = (float)a.eps;
    const float *ms = (const float *)a.m, *vs = (const float *)a.v;
    for_each_vec<vec<float>::N>(
        a.count, aligned16(params, ms, vs, a.model_param), [&](size_t i, auto width) {
            const int N = decltype(width)::N;
            vec<float, N> param = load_vec<N>(params + i), m = load_vec<N>(ms + i),
                          v = load_vec<N>(vs + i);
            for (int k = 0; k < N; k++)
                param.v[k] = param_scale * param.v[k] - lr * m.v[k] / (sqrtf(v.v[k]) + eps);
            store_vec(params + i, param);
            store_narrow_copy<Narrow>(a.model_param, i, param);
        });
}

template <class Narrow> static dt_status frozen_adam(const dt_frozen_adam_args *a, void *stream) {
    float param_scale = (float)(1 - a->lr * a->weight_decay);
    DTK_LAUNCH(
        frozen_adam_kernel<Narrow>, a->count, BLOCK * vec<float>::N, stream, *a, param_scale);
    return launch_status();
}

static dt_status cuda_frozen_adam(const dt_frozen_adam_args *a, void *stream) {
    return DTK_BY_NARROW_DTYPE(a, frozen_adam, a, stream);
}

/* A message may begin at any address, so its scale is read and written byte by byte. */
static __device__ double read_scale(const unsigned char *p) {
    double x;
    uint64_t bits = 0;
    for (int i = 7; i >= 0; i--) bits = bits << 8 | p[i];
    memcpy(&x, &bits, sizeof x);
    return x;
}

static __device__ void write_scale(unsigned char *p, double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    for (int i = 0; i < 8; i++) p[i] = (unsigned char)(bits >> 8 * i);
}

/* Replaces `error` by x + error, or by 0 where v is 0. For each piece, writes two values to `sums`
   (2,pieces): the sum of the squares of the new errors, and the number of elements with v != 0. */
DTK_KERNEL __launch_bounds__(BLOCK)
    sign_sums_kernel(dt_sign_pack_args a, double *sums, size_t pieces) {
    const float *x = (const float *)a.x, *v = (const float *)a.v;
    float *error = (float *)a.error;
    for (size_t first = (size_t)blockIdx.x * PIECES_PER_BLOCK; first < pieces;
         first += (size_t)gridDim.x * PIECES_PER_BLOCK) {
        size_t piece = first + threadIdx.x / PIECE_LANES,
               end = (piece + 1) * DT_PIECE < a.count ? (piece + 1) * DT_PIECE : a.count;
        double squares = 0, numbers = 0;
        for (size_t i = piece * DT_PIECE + threadIdx.x % PIECE_LANES; i < end; i += PIECE_LANES) {
            float e = v[i] != 0 ? x[i] + error[i] : 0;
            error[i] = e;
            squares += (double)e * (double)e;
            numbers += v[i] != 0;
        }
        squares = lanes_sum(squares);
        numbers = lanes_sum(numbers);
        if (threadIdx.x % PIECE_LANES > 0 || piece >= pieces) continue;
        sums[piece] = squares;
        sums[pieces + piece] = numbers;
    }
}

/* Computes the scale in one block and writes it to sums[2 * pieces], after the sums. */
DTK_KERNEL __launch_bounds__(TOTAL_THREADS, 1) sign_scale_kernel(double *sums, size_t pieces) {
    double squares = 0, numbers = 0;
    for (size_t i = threadIdx.x; i < pieces; i += TOTAL_THREADS) {
        squares += sums[i];
        numbers += sums[pieces + i];
    }
    squares = block_sum<double, TOTAL_THREADS>(squares);
    numbers = block_sum<double, TOTAL_THREADS>(numbers);
    if (threadIdx.x == 0)
        sums[2 * pieces] = (double)(float)(numbers > 0 ? sqrt(squares / numbers) : 0);
}

/* Each thread writes one byte of signs at a time. The first a.parts threads also write the scale of
   one message each. message_bytes is the number of bytes of one message's signs. */
DTK_KERNEL __launch_bounds__(BLOCK)
    sign_pack_kernel(dt_sign_pack_args a, const double *message_scale, size_t message_bytes) {
    const float *vs = (const float *)a.v;
    float *errors = (float *)a.error, scale = (float)*message_scale;
    unsigned char *out = (unsigned char *)a.out;
    for (size_t i = grid_first(1); i < a.count / 8 || i < a.parts; i += grid_step(1)) {
        unsigned bits = 0;
        if (i < a.parts) write_scale(out + i * (message_bytes + 8) + message_bytes, *message_scale);
        if (i >= a.count / 8) continue;
        for (size_t k = 0; k < 8; k++) {
            float error = errors[8 * i + k];
            bits |= (unsigned)(error >= 0) << k;
            if (vs[8 * i + k] != 0) errors[8 * i + k] = error - (error >= 0 ? scale : -scale);
        }
        out[i + i / message_bytes * 8] = (unsigned char)bits;
    }
}

static dt_status cuda_sign_pack(const dt_sign_pack_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (a->parts < 1 || a->count % (8 * a->parts) != 0) return DT_ERR_ARG;
    size_t pieces = piece_count(a->count), message_bytes = a->count / a->parts / 8;
    double *sums = (double *)a->work;
    if (!sums || a->work_bytes < (2 * pieces + 1) * sizeof *sums) return DT_ERR_ARG;
    DTK_LAUNCH(sign_sums_kernel, pieces, PIECES_PER_BLOCK, stream, *a, sums, pieces);
    DT_LAUNCH(sign_scale_kernel, 1, TOTAL_THREADS, 0, stream_of(stream), sums, pieces);
    DTK_LAUNCH(sign_pack_kernel, a->count / 8 + a->parts, BLOCK, stream, *a,
        (const double *)sums + 2 * pieces, message_bytes);
    return launch_status();
}

/* Each thread reads one byte of signs from every message, and writes 8 elements: the means over the
   messages. */
DTK_KERNEL __launch_bounds__(BLOCK) sign_unpack_kernel(dt_sign_unpack_args a) {
    const unsigned char *in = (const unsigned char *)a.in;
    const float *vs = (const float *)a.v;
    float *out = (float *)a.out;
    size_t bytes = a.count / 8;
    for (size_t i = grid_first(1); i < bytes; i += grid_step(1)) {
        float sum[8] = { 0 };
        for (size_t m = 0; m < a.n; m++) {
            const unsigned char *signs = in + m * (bytes + 8);
            float scale = (float)read_scale(signs + bytes);
            for (int k = 0; k < 8; k++) sum[k] += signs[i] >> k & 1 ? scale : -scale;
        }
        for (size_t k = 0; k < 8; k++)
            out[8 * i + k] = vs[8 * i + k] != 0 ? sum[k] / (float)a.n : 0;
    }
}

static dt_status cuda_sign_unpack(const dt_sign_unpack_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (a->n < 1 || a->count % 8 != 0) return DT_ERR_ARG;
    DTK_LAUNCH(sign_unpack_kernel, a->count / 8, BLOCK, stream, *a);
    return launch_status();
}

// ==== 15. Matrix product ========================================================================

/* GEMM: C = A B. A naive kernel has one thread per element of C; the thread reads a row of A and a
   column of B, 2k loads for k multiply-adds. The kernels of this section compute a tile of C in one
   block from tiles of A and B in shared memory, so one load of an element serves a whole row or
   column of the tile. The block loads the next tiles while it multiplies the current tiles (two
   stages):

                    B  [ k tile ]        for each k tile:
                       [  cols  ]           load the next tiles   (cp.async, or registers)
       A  [ k tile ]   [ C tile ]           C tile += A tile * B tile
          [  rows  ]                     epilogue: bias, activation, residual; store

   Products of f32 use multiply-adds in registers; products of bf16 and f16 use tensor cores (mma).
   If the caller passes a queue, cuBLASLt computes the product unless cuBLASLt refuses it. The
   kernels of this section compute all other products. */

/* ---- tensor core instructions ---- */

/* Each function below wraps one PTX instruction; in tests on a CPU a function with the same result
   replaces it. mma computes d (16,8) += a (16,16) b (16,8), where lane 4 g + t holds the elements
   of d in rows g and g + 8 and columns 2 t and 2 t + 1. cp.async, and mma with bf16 operands, need
   sm_80. Code for older devices multiplies and copies with plain instructions and gets the same
   result. */
#ifdef __CUDACC__
#define DTK_PTX static __device__ __forceinline__
#define DTK_HAS_SM80 (__CUDA_ARCH__ >= 800)

DTK_PTX unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

DTK_PTX void ldmatrix(unsigned *r, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

DTK_PTX void ldmatrix_trans(unsigned *r, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

DTK_PTX float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if DTK_HAS_SM80
#define DTK_MMA(type) \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                 "{%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
DTK_PTX void mma(bf16, float *d, const unsigned *a, const unsigned *b) { DTK_MMA("bf16"); }
DTK_PTX void mma(f16, float *d, const unsigned *a, const unsigned *b) { DTK_MMA("f16"); }
#undef DTK_MMA

/* If `there` is set, copies 16 bytes from global to shared memory; otherwise writes 16 zero bytes
   to shared memory. */
DTK_PTX void cp_async_16(void *shared, const void *global, bool there) {
    asm volatile("{ .reg .pred none; setp.eq.b32 none, %2, 0; cp.async.cg.shared.global [%0], "
                 "[%1], 16, none; }"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"((int)there)
                 : "memory");
}
DTK_PTX void cp_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
DTK_PTX void cp_async_wait_all() { asm volatile("cp.async.wait_all;" : : : "memory"); }
#endif

/* wgmma: a warpgroup (four warps) multiplies 64 rows at a time. It reads B from shared memory, and
   also A unless A is in registers; see smem_matrix. Only code for sm_90a has wgmma. In code for
   other devices, the kernels that use wgmma are empty, and their launch bounds are so small that a
   launch fails. wgmma computes d (64,N) = a b, or d += a b if `add` is set. Warp w holds rows 16 w
   to 16 w + 15 of d, in mma's layout. d is valid after wgmma_wait. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DTK_HAS_WGMMA 1
#define DTK_D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define DTK_D32 \
    DTK_D4(0), DTK_D4(1), DTK_D4(2), DTK_D4(3), DTK_D4(4), DTK_D4(5), DTK_D4(6), DTK_D4(7)
#define DTK_D64 \
    DTK_D32, DTK_D4(8), DTK_D4(9), DTK_D4(10), DTK_D4(11), DTK_D4(12), DTK_D4(13), DTK_D4(14), \
        DTK_D4(15)
#define DTK_P32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DTK_P64 \
    DTK_P32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DTK_DESCRIPTOR_END ", 0x40000040}; "
#define DTK_WGMMA(type, n, add, matrices, places, rest) \
    "{ .reg .pred add; .reg .b64 a, b; setp.ne.b32 add, " add ", 0; " matrices \
    "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" places "}, " rest "; }"
#define DTK_WGMMA_FUNCTIONS(T, type) \
    DTK_PTX void wgmma(T, float(&d)[8][4], unsigned a, unsigned b, int add) { \
        asm volatile(DTK_WGMMA(type, "64", "%34", \
            "mov.b64 a, {%32" DTK_DESCRIPTOR_END "mov.b64 b, {%33" DTK_DESCRIPTOR_END, DTK_P32, \
            "a, b, add, 1, 1, 0, 0") \
                     : DTK_D32 \
                     : "r"(a), "r"(b), "r"(add)); \
    } \
    DTK_PTX void wgmma(T, float(&d)[16][4], unsigned a, unsigned b, int add) { \
        asm volatile(DTK_WGMMA(type, "128", "%66", \
            "mov.b64 a, {%64" DTK_DESCRIPTOR_END "mov.b64 b, {%65" DTK_DESCRIPTOR_END, DTK_P64, \
            "a, b, add, 1, 1, 0, 0") \
                     : DTK_D64 \
                     : "r"(a), "r"(b), "r"(add)); \
    } \
    DTK_PTX void wgmma_from_registers( \
        T, float(&d)[8][4], const unsigned *a, unsigned b, int add) { \
        asm volatile(DTK_WGMMA(type, "64", "%37", "mov.b64 b, {%36" DTK_DESCRIPTOR_END, DTK_P32, \
            "{%32, %33, %34, %35}, b, add, 1, 1, 1") \
                     : DTK_D32 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add)); \
    } \
    DTK_PTX void wgmma_from_registers( \
        T, float(&d)[16][4], const unsigned *a, unsigned b, int add) { \
        asm volatile(DTK_WGMMA(type, "128", "%69", "mov.b64 b, {%68" DTK_DESCRIPTOR_END, DTK_P64, \
            "{%64, %65, %66, %67}, b, add, 1, 1, 1") \
                     : DTK_D64 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add)); \
    }
DTK_WGMMA_FUNCTIONS(bf16, "bf16")
DTK_WGMMA_FUNCTIONS(f16, "f16")
#undef DTK_WGMMA_FUNCTIONS
#undef DTK_WGMMA
#undef DTK_DESCRIPTOR_END
#undef DTK_P64
#undef DTK_P32
#undef DTK_D64
#undef DTK_D32
#undef DTK_D4

/* A matrix in shared memory, in slabs of 64 columns. Each slab begins `slab` elements after the
   previous slab. The matrices of wgmma are K-major: a row runs along k. B of wgmma_from_registers
   is MN-major: it has one row for each k. smem_matrix is the variable half of the wgmma descriptor.
   The constant half says that 8 rows of 128 bytes are contiguous and that their 16-byte units are
   swizzled. `advance` returns the matrix that begins `numbers` elements later in the same slab. */
typedef unsigned smem_matrix;
DTK_PTX smem_matrix smem_matrix_at(const void *p, int slab) {
    return shared_address(p) >> 4 | (unsigned)(slab * 2 >> 4) << 16;
}
DTK_PTX smem_matrix advance(smem_matrix m, int numbers) { return m + (unsigned)(numbers * 2 >> 4); }
DTK_PTX void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
DTK_PTX void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int LEFT> DTK_PTX void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(LEFT) : "memory");
}
DTK_PTX void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
DTK_PTX void wgmma_fence_operand(float &x) { asm volatile("" : "+f"(x) : : "memory"); }
/* Delays the instructions after the call until x has been computed. The caller guarantees x >= 0,
   so the branch is never taken. */
DTK_PTX void order_after(float x) {
    if (x < 0) asm volatile("nanosleep.u32 1;" : : : "memory");
}
#else
#define DTK_HAS_WGMMA 0
typedef unsigned smem_matrix;
template <class T, class sums> DTK_PTX void wgmma(T, sums &, smem_matrix, smem_matrix, int) {}
template <class T, class sums>
DTK_PTX void wgmma_from_registers(T, sums &, const unsigned *, smem_matrix, int) {}
DTK_PTX smem_matrix smem_matrix_at(const void *, int) { return 0; }
DTK_PTX smem_matrix advance(smem_matrix, int) { return 0; }
DTK_PTX void wgmma_fence() {}
DTK_PTX void wgmma_commit() {}
template <int LEFT> DTK_PTX void wgmma_wait() {}
DTK_PTX void fence_proxy_async() {}
DTK_PTX void wgmma_fence_operand(float &) {}
DTK_PTX void order_after(float) {}
#endif
#undef DTK_PTX
#else
#define DTK_HAS_SM80 1
#define DTK_HAS_WGMMA 1
static void ldmatrix(unsigned *r, const void *row) { dtc_ldmatrix_x4(r, row); }
static void ldmatrix_trans(unsigned *r, const void *row) { dtc_ldmatrix_x4_trans(r, row); }
static float exp2_of(float x) { return exp2f(x); }
static void mma(bf16, float *d, const unsigned *a, const unsigned *b) {
    dtc_mma_m16n8k16_bf16(d, a, b);
}
static void mma(f16, float *d, const unsigned *a, const unsigned *b) {
    dtc_mma_m16n8k16_f16(d, a, b);
}
static void cp_async_16(void *shared, const void *global, bool there) {
    alignas(16) static const char none[16] = { 0 };
    dtc_cp_async16(shared, there ? global : none, there ? 16 : 0);
}
static void cp_async_commit() { dtc_cp_async_commit(); }

/* Emulates wgmma: each warp calls the emulation of mma and reads the matrices through their
   descriptors. The products are computed as late as possible, in wgmma_wait. Until then d is NaN,
   so that a test notices a result that is read too early. If a fence is missing, the kernel is
   abandoned. */
struct smem_matrix {
    const char *p;
    int slab;
};
static smem_matrix smem_matrix_at(const void *p, int slab) { return { (const char *)p, slab }; }
static smem_matrix advance(smem_matrix m, int numbers) { return { m.p + 2 * numbers, m.slab }; }

static unsigned element_of(const smem_matrix &m, int row, int col) {
    size_t at = (size_t)m.p + (size_t)(row / 8) * 1024 + row % 8 * 128 +
                col / 64 * (size_t)m.slab * 2 + col % 64 * 2;
    return *(const uint16_t *)(at ^ (at >> 3 & 0x70));
}

struct pending_wgmma {
    void (*execute)(const pending_wgmma &);
    /* initial: the values of d before this product, if `first` is set: no earlier pending product
       changes d */
    float (*d)[4], initial[16][4];
    smem_matrix a, b;
    unsigned u[4];
    int n, add, group;
    bool first;
};
static struct {
    pending_wgmma at[40];
    int done, count, groups;
    bool fenced, needs_proxy_fence;
} pending[2 * BLOCK];

DTC_UNSEEN static pending_wgmma &enqueue_wgmma(
    float (*d)[4], int n, int add, const smem_matrix &b) {
    auto &mine = pending[threadIdx.x];
    pending_wgmma &p = mine.at[mine.count];
    if (!mine.fenced || mine.needs_proxy_fence || mine.count == 40)
        dtc_abandon("wgmma without wgmma_fence or fence_proxy_async");
    p.d = d, p.n = n, p.add = add, p.group = mine.groups, p.first = true;
    p.b.p = b.p, p.b.slab = b.slab;
    for (int i = mine.done; i < mine.count; i++) p.first = p.first && mine.at[i].d != d;
    for (int i = 0; i < 4 * n && p.first; i++) {
        p.initial[i / 4][i % 4] = d[i / 4][i % 4];
        d[i / 4][i % 4] = NAN;
    }
    mine.count++;
    return p;
}

template <class T, bool A_IN_REGISTERS>
DTC_UNSEEN static void execute_wgmma(const pending_wgmma &p) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2, row = threadIdx.x / 32 % 4 * 16 + g;
    unsigned u[4], v[2];
    for (int i = 0; i < 4 * p.n; i++)
        if (p.first || !p.add) p.d[i / 4][i % 4] = p.add ? p.initial[i / 4][i % 4] : 0;
    for (int i = 0; i < 4; i++)
        u[i] = A_IN_REGISTERS ? p.u[i]
                              : element_of(p.a, row + i % 2 * 8, t + i / 2 * 8) |
                                    element_of(p.a, row + i % 2 * 8, t + i / 2 * 8 + 1) << 16;
    for (int j = 0; j < p.n; j++) {
        for (int i = 0; i < 2; i++)
            v[i] = A_IN_REGISTERS ? element_of(p.b, t + 8 * i, 8 * j + g) |
                                        element_of(p.b, t + 8 * i + 1, 8 * j + g) << 16
                                  : element_of(p.b, 8 * j + g, t + 8 * i) |
                                        element_of(p.b, 8 * j + g, t + 8 * i + 1) << 16;
        mma(T(), p.d[j], u, v);
    }
}

template <class T, int J>
DTC_UNSEEN static void wgmma(
    T, float (&d)[J][4], const smem_matrix &a, const smem_matrix &b, int add) {
    pending_wgmma &p = enqueue_wgmma(d, J, add, b);
    p.execute = execute_wgmma<T, false>;
    p.a.p = a.p, p.a.slab = a.slab;
}
template <class T, int J>
DTC_UNSEEN static void wgmma_from_registers(
    T, float (&d)[J][4], const unsigned *a, const smem_matrix &b, int add) {
    pending_wgmma &p = enqueue_wgmma(d, J, add, b);
    p.execute = execute_wgmma<T, true>;
    for (int i = 0; i < 4; i++) p.u[i] = a[i];
}
DTC_UNSEEN static void wgmma_fence() { pending[threadIdx.x].fenced = true; }
DTC_UNSEEN static void wgmma_commit() {
    pending[threadIdx.x].fenced = false, pending[threadIdx.x].groups++;
}
template <int LEFT> DTC_UNSEEN static void wgmma_wait() {
    auto &mine = pending[threadIdx.x];
    for (; mine.done < mine.count && mine.at[mine.done].group < mine.groups - LEFT; mine.done++)
        mine.at[mine.done].execute(mine.at[mine.done]);
    if (mine.done == mine.count) mine.done = mine.count = 0;
}
DTC_UNSEEN static void cp_async_wait_all() {
    dtc_cp_async_commit(), dtc_cp_async_wait(0);
    pending[threadIdx.x].needs_proxy_fence = true;
}
DTC_UNSEEN static void fence_proxy_async() { pending[threadIdx.x].needs_proxy_fence = false; }
static void wgmma_fence_operand(float &) {}
static void order_after(float) {}
#endif

/* Returns the element in the low half of `pair`, or in the high half if `which` is 1. */
template <class T> static __device__ float unpack_half(unsigned pair, int which) {
    T x;
    x.bits = (uint16_t)(which ? pair >> 16 : pair & 0xffff);
    return widen(x);
}

/* mma without tensor cores: multiplies the elements of a and b pair by pair along k. A lane reads
   each pair by a shuffle from the lane that holds the pair. mma_plain is not inlined, because
   unrolled loops call it and nvcc would take many minutes to compile these loops. */
#ifdef __CUDACC__
#define DTK_NOINLINE __noinline__
#else
#define DTK_NOINLINE
#endif
template <class T>
static __device__ DTK_NOINLINE void mma_plain(T, float *d, const unsigned *a, const unsigned *b) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 8; i++) {
        int holder = i % 4, half = i / 4;
        unsigned row[2], col[2];
        row[0] = __shfl_sync(0xffffffffu, a[2 * half], 4 * g + holder);
        row[1] = __shfl_sync(0xffffffffu, a[2 * half + 1], 4 * g + holder);
        col[0] = __shfl_sync(0xffffffffu, b[half], 8 * t + holder);
        col[1] = __shfl_sync(0xffffffffu, b[half], 8 * t + 4 + holder);
        for (int e = 0; e < 8; e++)
            d[e / 2] += unpack_half<T>(row[e / 4], e % 2) * unpack_half<T>(col[e / 2 % 2], e % 2);
    }
}

#if !DTK_HAS_SM80
template <class T> static __device__ void mma(T, float *d, const unsigned *a, const unsigned *b) {
    mma_plain(T(), d, a, b);
}

static __device__ void cp_async_16(void *shared, const void *global, bool there) {
    uint4 x = { 0, 0, 0, 0 };
    if (there) x = *(const uint4 *)global;
    *(uint4 *)shared = x;
}
static __device__ void cp_async_commit() {}
static __device__ void cp_async_wait_all() {}
#endif
#undef DTK_HAS_SM80
#undef DTK_NOINLINE

/* ---- tiles in shared memory ---- */

/* Swizzle: returns the index of (row, col) in a tile whose rows have LD elements, at least 128
   bytes. In 8 consecutive rows, the 16-byte units of one column are in 8 different bank groups, so
   a warp reads 8 rows at once without bank conflicts. Unit u of row r is stored at position
   u ^ (r % 8). The picture shows which unit is stored at each position:

       row 0   0 1 2 3 4 5 6 7
       row 1   1 0 3 2 5 4 7 6
       row 2   2 3 0 1 6 7 4 5 ... */
template <class T, int LD> static __device__ int swizzle(int row, int col) {
    const int N = vec<T>::N;
    return row * LD + (col / N ^ (row & 7)) * N + col % N;
}

/* Returns x, but hides from the compiler how x was computed. The compiler then evaluates an
   expression that contains the result where the expression is used, and does not hold its value in
   registers across a loop. */
static __device__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* Loads a tile from global memory at p, where consecutive rows are `ld` elements apart. Elements of
   the tile beyond `rows` and `cols` are set to zero. Set `aligned` if p, ld and cols are multiples
   of 16 bytes; the copy is then asynchronous. */
template <class T, int ROWS, int LD, int THREADS, class index>
static __device__ void fetch_tile(T *tile, const T *p, index ld, int rows, int cols, bool aligned) {
    const int N = vec<T>::N, VECS = LD / N, DOWN = THREADS / VECS;
    int thread = opaque(threadIdx.x), row = thread / VECS, col = thread % VECS * N;
    index at = row * ld + col;
    if (aligned) {
        DTK_UNROLL
        for (int i = 0; i < ROWS; i += DOWN, at += DOWN * ld)
            if (ROWS % DOWN == 0 || row + i < ROWS)
                cp_async_16(
                    tile + swizzle<T, LD>(row + i, col), p + at, row + i < rows && col < cols);
        return;
    }
    DTK_UNROLL_BY(1)
    for (; row < ROWS; row += DOWN, at += DOWN * ld) {
        vec<T> x = { { T() } };
        DTK_UNROLL
        for (int e = 0; e < N; e++)
            if (row < rows && col + e < cols) x.v[e] = p[at + e];
        *reinterpret_cast<vec<T> *>(tile + swizzle<T, LD>(row, col)) = x;
    }
}

/* These two functions help to load the fragments of mma from a tile. ldmatrix loads four 8 x 8
   matrices, and each lane passes to it the address of one row of 8 elements. The functions return
   the index of that row's first element in the tile. They differ in the order in which the matrices
   0 to 3 cover 16 rows and 16 columns:

       ldmatrix_rows     0 2    for A if the tile's rows run along k; for two fragments of B if the
                         1 3    tile has one row for each k
       ldmatrix_columns  0 1    for two fragments of B if the tile's rows run along k; for A if the
                         2 3    tile has one row for each k

   The result, x, is for matrices that begin at row 0 and column 0 of the tile. LD is a power of
   two, so the swizzle is an exclusive or: for matrices that begin at another column, the index is
   x ^ column; for matrices that begin at another row, a multiple of 8, it is x + row * LD. */
template <int LD> static __device__ int ldmatrix_rows() {
    int lane = opaque(threadIdx.x) % 32;
    return lane % 16 * LD + (lane / 16 ^ lane % 8) * 8;
}

template <int LD> static __device__ int ldmatrix_columns() {
    int lane = opaque(threadIdx.x) % 32;
    return (lane % 8 + lane / 16 * 8) * LD + (lane / 8 % 2 ^ lane % 8) * 8;
}

/* ---- the kernels of this file ---- */

/* Stores v in out[at], or adds v to out[at] if `accumulate` is set. The elements of `out` have the
   type float if `wide` is set, otherwise T. */
template <class T>
static __device__ void store_as(void *out, int wide, int64_t at, float v, int accumulate) {
    T *narrow = (T *)out + at;
    float *full = (float *)out + at;
    if (wide)
        *full = accumulate ? *full + v : v;
    else
        round_to(narrow, accumulate ? widen(*narrow) + v : v);
}

/* Epilogue: adds the bias, applies the activation or multiplies by its derivative, and adds the
   residual. v is the sum of products. The result is stored in c[at], an element of column j. The
   pointers in `a` may be equal. */
template <class T>
static __device__ void apply_epilogue(const dt_matmul_args &a, int64_t at, int64_t j, float v) {
    if (a.bias) v += widen(((const T *)a.bias)[j]);
    if (a.activation_backward) {
        v = activate_back(a.activation, widen(((const T *)a.pre_activation)[at]), v);
    } else {
        if (a.pre_activation) round_to((T *)a.pre_activation + at, v);
        v = activate(a.activation, v);
    }
    if (a.residual) v += widen(((const T *)a.residual)[at]);
    store_as<T>(a.c, a.wide, at, v, a.accumulate);
}

/* One operand of a product: A or B. */
struct operand {
    const void *p;
    /* ld: distance in elements from one row in memory to the next; stride: distance in elements
       from one matrix of the batch to the next */
    int64_t ld, stride;
    int rows; /* for A the number of rows of c, for B the number of columns of c */
    /* mn_major: true if the elements with the same k index are contiguous; aligned: true if the
       matrix can be read in units of 16 bytes */
    bool mn_major, aligned;
};

static operand operand_of(const void *p, int64_t rows, int64_t k, int64_t ld, int64_t stride,
    bool mn_major, size_t size) {
    size_t all = (size_t)p | (size_t)(ld | stride | (mn_major ? rows : k)) * size;
    operand x = { p, ld, stride, (int)rows, mn_major, all % 16 == 0 };
    return x;
}

/* The matrix of the batch, the row and the column at which a block's tile of c begins. */
struct tile_origin {
    int batch, row, col;
};

static __device__ tile_origin tile_origin_of(const dt_matmul_args &a, int tile) {
    int across = ((int)a.n + tile - 1) / tile, down = ((int)a.m + tile - 1) / tile, i = blockIdx.x;
    tile_origin c = { i / across / down, i / across % down * tile, i % across * tile };
    return c;
}

/* Applies the epilogue to a block's tile of c, whose sums are in shared memory. As the sums come
   from shared memory, neighbouring threads store neighbouring elements, and apply_epilogue is
   compiled only once. */
template <class T, int ROWS, int COLS>
static __device__ void apply_epilogue_tile(
    const dt_matmul_args &a, tile_origin c, const float *tile) {
    DTK_UNROLL_BY(1)
    for (int i = threadIdx.x; i < ROWS * COLS; i += BLOCK) {
        int row = c.row + i / COLS, col = c.col + i % COLS;
        if (row < a.m && col < a.n)
            apply_epilogue<T>(a, c.batch * a.stride_c + row * a.ldc + col, col,
                tile[swizzle<float, COLS>(i / COLS, i % COLS)]);
    }
}

/* GEMM in f32. A block has 16 x 16 threads, and each thread computes R x R elements of C. Each
   element is one chain of multiply-adds in ascending k, whatever R is. The next tiles are loaded
   while the current tiles are multiplied. */
enum { F32_TILE_K = 16 };

template <int R>
static __device__ void load_f32_tile(
    vec<float> *next, const operand &x, int batch, int row0, int k0, int k) {
    const float *p = (const float *)x.p + batch * x.stride;
    for (int i = 0; i < R / 4; i++) {
        int at = threadIdx.x + i * BLOCK, in_line = x.mn_major ? 4 * R : F32_TILE_K / 4;
        int line = (x.mn_major ? k0 : row0) + at / in_line, lines = x.mn_major ? k : x.rows;
        int first = (x.mn_major ? row0 : k0) + at % in_line * 4, end = x.mn_major ? x.rows : k;
        next[i] = load_vec_bounded(p + (line < lines ? line * x.ld : 0), (size_t)first,
            line < lines ? (size_t)end : 0, x.aligned);
    }
}

/* Packing: stores the loaded elements in the tile (F32_TILE_K,16 R). In the tile a vec always holds
   the elements of 4 rows with the same k index, whatever the operand's layout in memory. */
template <int R>
static __device__ void store_f32_tile(
    vec<float> (*tile)[4 * R + 1], const vec<float> *next, int mn_major) {
    for (int i = 0; i < R / 4; i++) {
        int at = threadIdx.x + i * BLOCK, row = at / (F32_TILE_K / 4),
            k = at % (F32_TILE_K / 4) * 4;
        if (mn_major)
            tile[at / (4 * R)][at % (4 * R)] = next[i];
        else
            for (int e = 0; e < 4; e++) tile[k + e][row / 4].v[row % 4] = next[i].v[e];
    }
}

template <int R>
DTK_KERNEL __launch_bounds__(BLOCK, 2) matmul_f32_kernel(dt_matmul_args a, operand x, operand y) {
    __shared__ vec<float> tiles[2][2][F32_TILE_K][4 * R + 1];
    vec<float>(*xs)[F32_TILE_K][4 * R + 1] = tiles[0], (*ys)[F32_TILE_K][4 * R + 1] = tiles[1];
    vec<float> next_x[R / 4], next_y[R / 4];
    float sum[R][R] = { { 0 } };
    tile_origin c = tile_origin_of(a, 16 * R);
    int down = threadIdx.x / 16, across = threadIdx.x % 16;
    bool idle = c.row + down * 4 >= a.m || c.col + across * 4 >= a.n;
    load_f32_tile<R>(next_x, x, c.batch, c.row, 0, a.k);
    load_f32_tile<R>(next_y, y, c.batch, c.col, 0, a.k);
    for (int k0 = 0, s = 0; k0 < a.k; k0 += F32_TILE_K, s ^= 1) {
        store_f32_tile<R>(xs[s], next_x, x.mn_major);
        store_f32_tile<R>(ys[s], next_y, y.mn_major);
        /* One barrier per step suffices. The tiles xs[s] and ys[s] are written again only after the
           next barrier, and a thread reaches that barrier only after it has read these tiles. */
        __syncthreads();
        load_f32_tile<R>(next_x, x, c.batch, c.row, k0 + F32_TILE_K, a.k);
        load_f32_tile<R>(next_y, y, c.batch, c.col, k0 + F32_TILE_K, a.k);
        DTK_UNROLL
        for (int k = 0; k < F32_TILE_K; k++) {
            vec<float> u[R / 4], v[R / 4];
            if (idle) break;
            DTK_UNROLL
            for (int i = 0; i < R / 4; i++) {
                u[i] = xs[s][k][16 * i + down];
                v[i] = ys[s][k][16 * i + across];
            }
            DTK_UNROLL
            for (int i = 0; i < R * R; i++)
                sum[i / R][i % R] += u[i / R / 4].v[i / R % 4] * v[i % R / 4].v[i % 4];
        }
    }
    float *tile = (float *)tiles; /* has space for 64 rows of sums */
    DTK_UNROLL
    for (int part = 0; part < R / 4; part++) {
        __syncthreads();
        DTK_UNROLL
        for (int at = 0; at < 4 * R; at++) {
            int row = down * 4 + at / R, col = at % R / 4 * 64 + across * 4 + at % 4;
            tile[swizzle<float, 16 * R>(row, col)] = sum[4 * part + at / R][at % R];
        }
        __syncthreads();
        apply_epilogue_tile<float, 64, 16 * R>(a, c, tile);
        c.row += 64;
    }
}

/* GEMM in bf16 and f16 on tensor cores. A block computes a 128 x 128 tile of c and multiplies 64 k
   indices at a time. Each of the block's eight warps computes 64 x 32 elements. */
enum { TILE_MN = 128, TILE_K = 64, MATMUL_STAGES = 2 };

template <class T>
static __device__ void fetch_operand_tile(
    T *tile, const operand &x, int batch, int row0, int k0, int k) {
    const T *p = (const T *)x.p + batch * x.stride;
    if (x.mn_major)
        fetch_tile<T, TILE_K, TILE_MN, BLOCK>(
            tile, p + k0 * x.ld + row0, x.ld, k - k0, x.rows - row0, x.aligned);
    else
        fetch_tile<T, TILE_MN, TILE_K, BLOCK>(
            tile, p + row0 * x.ld + k0, x.ld, x.rows - row0, k - k0, x.aligned);
}

/* Adds to `sum` the product of a warp's 64 rows of A, from row `row` of the tile xs on, and its 32
   columns of B, from column `col` of the tile ys on. MN_MAJOR_X and MN_MAJOR_Y are mn_major of A
   and of B. */
template <class T, bool MN_MAJOR_X, bool MN_MAJOR_Y>
static __device__ void multiply_tiles(
    float (&sum)[4][4][4], const T *xs, const T *ys, int row, int col) {
    int at_x = MN_MAJOR_X ? ldmatrix_columns<TILE_MN>() : ldmatrix_rows<TILE_K>();
    int at_y = MN_MAJOR_Y ? ldmatrix_rows<TILE_MN>() : ldmatrix_columns<TILE_K>();
    DTK_UNROLL
    for (int k = 0; k < TILE_K; k += 16) {
        unsigned u[4][4], v[2][4];
        DTK_UNROLL
        for (int i = 0; i < 4; i++) {
            if (MN_MAJOR_X)
                ldmatrix_trans(u[i], xs + k * TILE_MN + (at_x ^ (row + 16 * i)));
            else
                ldmatrix(u[i], xs + (row + 16 * i) * TILE_K + (at_x ^ k));
        }
        DTK_UNROLL
        for (int j = 0; j < 2; j++) {
            if (MN_MAJOR_Y)
                ldmatrix_trans(v[j], ys + k * TILE_MN + (at_y ^ (col + 16 * j)));
            else
                ldmatrix(v[j], ys + (col + 16 * j) * TILE_K + (at_y ^ k));
        }
        DTK_UNROLL
        for (int i = 0; i < 4; i++) DTK_UNROLL
        for (int j = 0; j < 4; j++) mma(T(), sum[i][j], u[i], v[j / 2] + j % 2 * 2);
    }
}

template <class T, bool MN_MAJOR_X, bool MN_MAJOR_Y>
DTK_KERNEL __launch_bounds__(BLOCK, 2)
    matmul_narrow_kernel(dt_matmul_args a, operand x, operand y) {
    DT_DYN_SMEM(T, shared);
    const int SIZE = TILE_MN * TILE_K;
    float sum[4][4][4] = { { { 0 } } };
    tile_origin c = tile_origin_of(a, TILE_MN);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, down = warp / 4 * 64,
        across = warp % 4 * 32;
    T *xs = shared, *ys = shared + MATMUL_STAGES * SIZE;
    bool idle = c.row + down >= a.m || c.col + across >= a.n;
    for (int k0 = -TILE_K, s = 1; k0 < a.k; k0 += TILE_K, s ^= 1) {
        cp_async_wait_all();
        /* after the barrier the tiles of this step are in shared memory, and no thread reads the
           tiles of the previous step any more */
        __syncthreads();
        if (k0 + TILE_K < a.k) {
            fetch_operand_tile(xs + (s ^ 1) * SIZE, x, c.batch, c.row, k0 + TILE_K, a.k);
            fetch_operand_tile(ys + (s ^ 1) * SIZE, y, c.batch, c.col, k0 + TILE_K, a.k);
            cp_async_commit();
        }
        if (k0 >= 0 && !idle)
            multiply_tiles<T, MN_MAJOR_X, MN_MAJOR_Y>(
                sum, xs + s * SIZE, ys + s * SIZE, down, across);
    }
    __syncthreads();
    float *tile = (float *)shared; /* 64 KB, the same size as the tiles of two stages */
    DTK_UNROLL
    for (int i = 0; i < 64; i++) {
        int row = down + i / 16 * 16 + i / 2 % 2 * 8 + lane / 4,
            col = across + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
        tile[swizzle<float, TILE_MN>(row, col)] = sum[i / 16][i / 4 % 4][i % 4];
    }
    __syncthreads();
    apply_epilogue_tile<T, TILE_MN, TILE_MN>(a, c, tile);
}

/* Returns the number of blocks of a grid with one block per tile; 0 if the number is too large for
   a grid. */
static unsigned grid_blocks(
    int64_t rows, int64_t row_tile, int64_t cols, int64_t col_tile, int64_t batch) {
    double all = ceil((double)rows / (double)row_tile) * ceil((double)cols / (double)col_tile) *
                 (double)batch;
    return all <= INT32_MAX ? (unsigned)all : 0;
}

/* Launches a kernel that may use more than 48 KB of dynamic shared memory. CUDA allows more than 48
   KB only after a function attribute has been set for the current device. Every launch sets the
   attribute, because setting it takes little time. */
#define DTK_LAUNCH_SHARED(kernel, blocks, threads, bytes, stream, ...) \
    do { \
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, \
                (int)(bytes)) != cudaSuccess) { \
            (void)cudaGetLastError(); \
            return DT_ERR_UNSUPPORTED; /* the device has less shared memory */ \
        } \
        DT_LAUNCH((kernel), blocks, threads, bytes, stream_of(stream), __VA_ARGS__); \
    } while (0)

static dt_status matmul_f32(
    const dt_matmul_args &a, const operand &x, const operand &y, void *stream) {
    unsigned large = grid_blocks(a.m, 128, a.n, 128, a.batch),
             small = grid_blocks(a.m, 64, a.n, 64, a.batch);
    if (large == 0) return DT_ERR_UNSUPPORTED;
    if (large >= 128 || small == 0)
        DT_LAUNCH(matmul_f32_kernel<8>, large, BLOCK, 0, stream_of(stream), a, x, y);
    else
        DT_LAUNCH(matmul_f32_kernel<4>, small, BLOCK, 0, stream_of(stream), a, x, y);
    return launch_status();
}

template <class T>
static dt_status matmul_narrow(
    const dt_matmul_args &a, const operand &x, const operand &y, void *stream) {
    unsigned blocks = grid_blocks(a.m, TILE_MN, a.n, TILE_MN, a.batch);
    size_t bytes = 2 * MATMUL_STAGES * TILE_MN * TILE_K * sizeof(T);
    if (blocks == 0) return DT_ERR_UNSUPPORTED;
#define DTK_GO(X, Y) \
    DTK_LAUNCH_SHARED((matmul_narrow_kernel<T, X, Y>), blocks, BLOCK, bytes, stream, a, x, y)
    if (x.mn_major && y.mn_major)
        DTK_GO(true, true);
    else if (x.mn_major)
        DTK_GO(true, false);
    else if (y.mn_major)
        DTK_GO(false, true);
    else
        DTK_GO(false, false);
#undef DTK_GO
    return launch_status();
}

static dt_status builtin_matmul(const dt_matmul_args &a, void *stream) {
    size_t size = a.dtype == DT_F32 ? 4 : 2;
    operand x = operand_of(a.a, a.m, a.k, a.lda, a.stride_a, a.trans_a != 0, size);
    operand y = operand_of(a.b, a.n, a.k, a.ldb, a.stride_b, a.trans_b == 0, size);
    if (a.dtype == DT_F32) return matmul_f32(a, x, y, stream);
    return a.dtype == DT_BF16 ? matmul_narrow<bf16>(a, x, y, stream)
                              : matmul_narrow<f16>(a, x, y, stream);
}

/* ---- cuBLASLt ---- */

/* cuBLASLt also uses m and n to choose its algorithm, so the bits of an element may depend on m and
   n. With the kernels above, the bits of an element depend only on its row of A, its column of B
   and k. cuBLASLt sums in f32, never in TF32. cuBLASLt's epilogue applies bias and GELU. A separate
   kernel of this file applies the other epilogue operations to the results that cuBLASLt has
   stored, so 16-bit results are rounded twice. If cuBLASLt adds another matrix to a result, the
   result is also rounded once more. */

#ifdef DT_CUBLASLT
/* All values on which the choice of an algorithm depends. Two keys are compared with memcmp. The
   fields align_a to align_d are the alignments of the pointers in bytes, at most 256. */
struct matmul_key {
    int64_t m, n, k, batch, lda, ldb, ldc, stride_a, stride_b, stride_c;
    size_t work_bytes;
    int dtype, wide, trans_a, trans_b, epilogue, has_addend, aux;
    unsigned align_a, align_b, align_c, align_d;
};

/* The algorithm that cuBLASLt chose for one key. `supported` is false if cuBLASLt cannot compute
   the product. cuBLASLt's matrices are column-major, so cuBLASLt computes C^T = B^T A^T. */
struct matmul_plan {
    matmul_key key;
    bool used, supported;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
};

/* The hash of a plan's key gives the first of PLAN_PROBES consecutive slots. The plan is stored in
   the first free slot of these. If none is free, the plan replaces the plan in the first slot. */
enum { PLAN_SLOTS = 256, PLAN_PROBES = 4 };

struct blas {
    cublasLtHandle_t handle; /* NULL if cublasLtCreate failed; it is not called again */
    /* true on Hopper and later GPUs, where cuBLASLt's GELU is as fast as a separate kernel */
    bool gelu;
    matmul_plan plans[PLAN_SLOTS];
};

static void blas_close(blas *b) {
    if (b && b->handle) cublasLtDestroy(b->handle);
    free(b);
}

static blas *get_blas(cuda_queue *queue) {
    int major = 0;
    if (queue->blas) return queue->blas;
    queue->blas = (blas *)calloc(1, sizeof *queue->blas);
    if (!queue->blas) return NULL;
    if (cublasLtCreate(&queue->blas->handle) != CUBLAS_STATUS_SUCCESS) queue->blas->handle = NULL;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, queue->device) ==
        cudaSuccess)
        queue->blas->gelu = major >= 9;
    return queue->blas;
}

static unsigned alignment_of(const void *p) {
    size_t low = (size_t)p & (~(size_t)p + 1);
    return low == 0 || low > 256 ? 256 : (unsigned)low;
}

static cudaDataType_t cuda_type_of(int dtype) {
    return dtype == DT_F32 ? CUDA_R_32F : dtype == DT_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* Describes a row-major matrix (rows,cols) as the column-major matrix (cols,rows). */
static void init_layout(cublasLtMatrixLayoutOpaque_t *l, int dtype, int64_t rows, int64_t cols,
    int64_t ld, int64_t batch, int64_t stride) {
    int32_t count = (int32_t)batch;
    cublasLtMatrixLayoutInit(l, cuda_type_of(dtype), (uint64_t)cols, (uint64_t)rows, ld);
    cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count);
    cublasLtMatrixLayoutSetAttribute(
        l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
}

#define DTK_SET(name, value) \
    cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_##name, &(value), sizeof(value))
#define DTK_PREFER(name, value) \
    cublasLtMatmulPreferenceSetAttribute( \
        &preference, CUBLASLT_MATMUL_PREF_##name, &(value), sizeof(value))

/* Asks cuBLASLt for an algorithm and stores the answer in *p. The preferences exclude split-K
   algorithms that do not add their partial sums in f32, so that each result is rounded only
   once. */
static void make_plan(blas *b, matmul_plan *p, const matmul_key &key) {
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t best;
    cublasOperation_t op_a = key.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = key.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)key.epilogue;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    int found = 0, to = key.wide ? (int)DT_F32 : key.dtype;
    p->key = key;
    p->used = true;
    cublasLtMatmulDescInit(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    DTK_SET(TRANSA, op_a);
    DTK_SET(TRANSB, op_b);
    DTK_SET(EPILOGUE, epilogue);
    if (key.aux) { /* without aux, setting these attributes would make cuBLASLt write to aux */
        DTK_SET(EPILOGUE_AUX_LD, key.ldc);
        DTK_SET(EPILOGUE_AUX_BATCH_STRIDE, key.stride_c);
    }
    init_layout(&p->a, key.dtype, key.trans_b ? key.n : key.k, key.trans_b ? key.k : key.n, key.ldb,
        key.batch, key.stride_b);
    init_layout(&p->b, key.dtype, key.trans_a ? key.k : key.m, key.trans_a ? key.m : key.k, key.lda,
        key.batch, key.stride_a);
    init_layout(&p->c, to, key.m, key.n, key.ldc, key.batch, key.stride_c);
    cublasLtMatmulPreferenceInit(&preference);
    DTK_PREFER(MAX_WORKSPACE_BYTES, key.work_bytes);
    DTK_PREFER(REDUCTION_SCHEME_MASK, schemes);
    DTK_PREFER(MIN_ALIGNMENT_A_BYTES, key.align_b);
    DTK_PREFER(MIN_ALIGNMENT_B_BYTES, key.align_a);
    DTK_PREFER(MIN_ALIGNMENT_C_BYTES, key.align_c);
    DTK_PREFER(MIN_ALIGNMENT_D_BYTES, key.align_d);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        b->handle, &p->desc, &p->a, &p->b, &p->c, &p->c, &preference, 1, &best, &found);
    p->supported =
        status == CUBLAS_STATUS_SUCCESS && found > 0 && best.state == CUBLAS_STATUS_SUCCESS;
    if (!p->supported) return;
    p->algorithm = best.algo;
    p->workspace = best.workspaceSize;
}
#undef DTK_PREFER

static matmul_plan *find_plan(blas *b, const matmul_key &key) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < sizeof key; i++)
        hash = (hash ^ ((const unsigned char *)&key)[i]) * 1099511628211u;
    matmul_plan *first = NULL;
    for (int i = 0; i < PLAN_PROBES; i++) {
        matmul_plan *p = &b->plans[((hash >> 32) + i) % PLAN_SLOTS];
        if (p->used && memcmp(&p->key, &key, sizeof key) == 0) return p;
        if (!first || (first->used && !p->used)) first = p;
    }
    make_plan(b, first, key);
    return first;
}

/* Describes which epilogue operations cuBLASLt applies, and which a separate kernel applies to
   cuBLASLt's results. */
struct blas_split {
    cublasLtEpilogue_t epilogue; /* the epilogue that cuBLASLt applies */
    dt_matmul_args rest;         /* the arguments of the separate kernel */
    const void *addend;          /* the matrix that cuBLASLt adds to the product, or NULL */
    /* output: the matrix to which cuBLASLt writes its result; aux: the matrix of GELU's inputs,
       which cuBLASLt writes in a forward and reads in a backward, or NULL */
    void *output, *aux;
    bool has_remainder; /* true if the separate kernel has any operation to apply */
};

/* Sets *s so that cuBLASLt computes GELU and stores GELU's input as a second result, or computes
   the derivative of GELU from that input. Returns false if cuBLASLt cannot compute this call's
   activation. cuBLASLt's GELU is accurate enough only for 16-bit results. */
static bool split_gelu(const dt_matmul_args &a, blas_split *s) {
    bool aux = !a.pre_activation || (a.ldc % 8 == 0 && (a.batch == 1 || a.stride_c % 8 == 0) &&
                                        (size_t)a.pre_activation % 16 == 0);
    bool bias = !a.bias || (!a.activation_backward && (size_t)a.bias % 16 == 0);
    if (a.activation != DT_ACT_GELU || a.dtype == DT_F32 || !aux || !bias) return false;
    if (a.activation_backward)
        s->epilogue = CUBLASLT_EPILOGUE_DGELU;
    else if (a.pre_activation)
        s->epilogue = a.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    else
        s->epilogue = a.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    s->aux = a.pre_activation;
    s->rest.bias = NULL;
    s->rest.pre_activation = NULL;
    s->rest.activation = s->rest.activation_backward = 0;
    return true;
}

static bool split_call(const dt_matmul_args &a, bool gelu, blas_split *s) {
    bool no_activation = !a.activation && !a.activation_backward && !a.pre_activation;
    if (a.wide && a.dtype != DT_F32 && (a.bias || a.residual || !no_activation)) return false;
    if (a.accumulate && (a.residual || !no_activation)) return false;
    s->rest = a;
    s->rest.accumulate = 0;
    s->addend = a.accumulate ? a.c : NULL;
    s->output = a.c;
    s->aux = NULL;
    if (!gelu || !split_gelu(a, s)) {
        bool bias = a.bias && (size_t)a.bias % 16 == 0;
        s->epilogue = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
        if (bias) s->rest.bias = NULL;
        if (a.accumulate && s->rest.bias) return false;
        if (a.residual && no_activation && !s->rest.bias)
            s->addend = a.residual, s->rest.residual = NULL;
        if (a.pre_activation && !a.activation_backward && !s->rest.bias)
            s->output = a.pre_activation, s->rest.pre_activation = NULL;
    }
    s->has_remainder = s->rest.bias || s->rest.pre_activation || s->rest.activation ||
                       s->rest.residual || s->output != a.c;
    return true;
}

/* Applies the remaining epilogue operations to each element of `from`. cuBLASLt has already rounded
   these elements to T. */
template <class T>
DTK_KERNEL __launch_bounds__(BLOCK) matmul_remainder_kernel(dt_matmul_args a, const T *from) {
    for (size_t i = grid_first(1); i < (size_t)(a.batch * a.m * a.n); i += grid_step(1)) {
        int64_t row = (int64_t)i / a.n, col = (int64_t)i % a.n;
        int64_t at = row / a.m * a.stride_c + row % a.m * a.ldc + col;
        apply_epilogue<T>(a, at, col, widen(from[at]));
    }
}

static dt_status matmul_remainder(const blas_split &s, void *stream) {
    const dt_matmul_args &a = s.rest;
    size_t count = (size_t)(a.batch * a.m * a.n);
    if (!s.has_remainder) return launch_status();
    if (a.dtype == DT_F32)
        DTK_LAUNCH(
            matmul_remainder_kernel<float>, count, BLOCK, stream, a, (const float *)s.output);
    else if (a.dtype == DT_BF16)
        DTK_LAUNCH(matmul_remainder_kernel<bf16>, count, BLOCK, stream, a, (const bf16 *)s.output);
    else
        DTK_LAUNCH(matmul_remainder_kernel<f16>, count, BLOCK, stream, a, (const f16 *)s.output);
    return launch_status();
}

static matmul_key key_of(const dt_matmul_args &a, const blas_split &s) {
    matmul_key key;
    memset(&key, 0, sizeof key); /* clears the padding too, because memcmp compares keys */
    key.m = a.m, key.n = a.n, key.k = a.k, key.batch = a.batch;
    key.lda = a.lda, key.ldb = a.ldb, key.ldc = a.ldc;
    key.stride_a = a.stride_a, key.stride_b = a.stride_b, key.stride_c = a.stride_c;
    key.work_bytes = a.work_bytes;
    key.dtype = a.dtype, key.wide = a.wide, key.trans_a = a.trans_a != 0,
    key.trans_b = a.trans_b != 0;
    key.epilogue = (int)s.epilogue, key.has_addend = s.addend != NULL, key.aux = s.aux != NULL;
    key.align_a = alignment_of(a.a), key.align_b = alignment_of(a.b);
    key.align_c = alignment_of(s.addend ? s.addend : s.output),
    key.align_d = alignment_of(s.output);
    return key;
}

/* Computes the product with cuBLASLt and sets *status. Returns false if cuBLASLt cannot compute the
   product. */
static bool blas_matmul(dt_matmul_args a, cuda_queue *queue, dt_status *status) {
    /* cuBLASLt needs scratch memory that is aligned to 256 bytes */
    size_t off = (256 - (size_t)a.work % 256) % 256;
    blas *b = a.k > 0 && a.batch <= INT32_MAX ? get_blas(queue) : NULL;
    blas_split s;
    matmul_plan *p = NULL;
    float alpha = 1, beta;
    if (!b || !b->handle) return false;
    if (!a.work || a.work_bytes < off) a.work = NULL, a.work_bytes = off = 0;
    a.work = (char *)a.work + off;
    a.work_bytes -= off;
    for (int gelu = b->gelu; gelu >= 0 && (!p || !p->supported); gelu--) {
        if (!split_call(a, gelu, &s)) return false;
        p = find_plan(b, key_of(a, s));
    }
    if (!p->supported) return false;
    beta = s.addend ? 1.0f : 0.0f;
    DTK_SET(BIAS_POINTER, a.bias);
    DTK_SET(EPILOGUE_AUX_POINTER, s.aux);
    cublasStatus_t done = cublasLtMatmul(b->handle, &p->desc, &alpha, a.b, &p->a, a.a, &p->b, &beta,
        s.addend ? s.addend : s.output, &p->c, s.output, &p->c, &p->algorithm, a.work, p->workspace,
        queue->stream);
    p->supported = done == CUBLAS_STATUS_SUCCESS;
    if (p->supported) *status = matmul_remainder(s, queue);
    return p->supported;
}
#undef DTK_SET
#else
static void blas_close(struct blas *) {}
static bool blas_matmul(dt_matmul_args, cuda_queue *, dt_status *) { return false; }
#endif

static dt_status cuda_matmul(const dt_matmul_args *args, void *stream);

/* A product with quantised B: converts a panel of B's columns at a time to T, in the first half of
   the scratch memory, and computes the panel's columns of C. So the whole of B is never in memory,
   and an element of C is one sum over all of K. */
static dt_status quantised_matmul(dt_matmul_args a, void *stream) {
    size_t size = dt_dtype_size(a.dtype), off = (256 - (size_t)a.work % 256) % 256,
           half = a.work_bytes > off ? (a.work_bytes - off) / 512 * 256 : 0;
    int64_t k = a.k > 0 ? a.k : 1, panel = (int64_t)(half / size) / k / DT__QUANT_BLOCK;
    dt_matmul_args each = a;
    const char *const arrays[] = { (char *)a.c, (char *)a.bias, (char *)a.residual,
        (char *)a.pre_activation };
    if (dt_quant_bytes((dt_quant)a.b_quant, a.ldb) == 0 || a.batch > 1 || panel < 1 || !a.work)
        return DT_ERR_ARG;
    panel *= DT__QUANT_BLOCK;
    each.b_quant = 0;
    each.b = (char *)a.work + off;
    each.work = (char *)a.work + off + half;
    each.work_bytes = half;
    for (int64_t j = 0; j < a.n; j += panel) {
        size_t width = a.wide ? sizeof(float) : size, at = (size_t)j;
        each.n = a.n - j < panel ? a.n - j : panel;
        each.ldb = a.trans_b ? a.k : each.n;
        dt_status status = DTK_BY_DTYPE(a.dtype, dequantize, (void *)(size_t)each.b, a.b_quant, a.b,
            a.trans_b ? at * (size_t)a.ldb : at, (size_t)a.ldb, (size_t)(a.trans_b ? each.n : a.k),
            (size_t)each.ldb, stream);
        each.c = (void *)(size_t)(arrays[0] + at * width);
        each.bias = arrays[1] ? arrays[1] + at * size : NULL;
        each.residual = arrays[2] ? arrays[2] + at * size : NULL;
        each.pre_activation = arrays[3] ? (void *)(size_t)(arrays[3] + at * size) : NULL;
        if (status == DT_OK) status = cuda_matmul(&each, stream);
        if (status != DT_OK) return status;
    }
    return DT_OK;
}

static dt_status cuda_matmul(const dt_matmul_args *args, void *stream) {
    dt_matmul_args a = *args;
    dt_status status = DT_OK;
    if (a.dtype != DT_F32 && a.dtype != DT_BF16 && a.dtype != DT_F16) return DT_ERR_UNSUPPORTED;
    if (a.m < 0 || a.n < 0 || a.k < 0 || a.batch < 0 || a.activation < 0 ||
        a.activation >= DT_ACT_AFFINE || (a.activation_backward && !a.pre_activation))
        return DT_ERR_ARG;
    if (a.batch == 0) a.batch = 1;
    if (a.lda == 0) a.lda = a.trans_a ? a.m : a.k;
    if (a.ldb == 0) a.ldb = a.trans_b ? a.k : a.n;
    if (a.ldc == 0) a.ldc = a.n;
    if (a.m == 0 || a.n == 0) return launch_status();
    if (a.b_quant) return quantised_matmul(a, stream);
    if (stream && blas_matmul(a, (cuda_queue *)stream, &status)) return status;
    if (a.m >= INT32_MAX - TILE_MN || a.n >= INT32_MAX - TILE_MN || a.k >= INT32_MAX - TILE_K)
        return DT_ERR_UNSUPPORTED;
    return builtin_matmul(a, stream);
}

// ==== 16. Attention =============================================================================

/* Flash attention (FlashAttention-2, arXiv:2307.08691) computes softmax(scale Q K^T) V without
   storing the matrix of scores. A naive program writes S = scale Q K^T to memory, computes the
   softmax of each row of S and multiplies by V. In flash attention a block holds ROWS queries and
   processes the keys in tiles of COLS keys (online softmax):

                  keys ->  [tile 0][tile 1] ...     S = scale Q K^T, for one tile
       queries    [ Q ]    [  S   ] ->              max' = max(max, S),  f = e^(max - max')
                  [out]                             p = e^(S - max'),    sum' = f sum + sum of p
                                                    out' = f out + p V

   At the end the result is out / sum. The forward also stores lse = max + log(sum). The backward
   recomputes p = e^(S - lse) tile by tile, in two kernels. In the first kernel a block holds
   queries, processes the keys in tiles and computes dq. In the second kernel a block holds keys,
   processes the queries in tiles and computes dk and dv. Read attention_kernel first. */

/* Layout of the scores. A warp computes 16 M of the block's rows, SUBTILE columns at a time. Scores
   stay in registers in mma's layout: c[i][j][e] of lane 4 g + t is the score in row
   16 i + 8 (e / 2) + g and column 8 j + 2 t + e % 2. So a lane has elements of 2 M rows: its r-th
   row consists of those c[r / 2][j][e] for which e / 2 = r % 2. Attention in f32 uses the same
   layout and plain multiply-adds. D is the dimension of a head, padded to 64, 128 or 256.

   Hopper reaches its full speed only with wgmma (FlashAttention-3, arXiv:2407.08608). A warpgroup
   (four warps) computes 64 rows. wgmma reads its operands from shared memory and is asynchronous:
   the warpgroup continues with other work while the tensor cores multiply. wgmma's results have
   mma's layout too, so only the products need separate code. A tile for wgmma is stored as slabs of
   64 columns. A row of a slab has 128 bytes and is swizzled. */

/* ---- attention mask ---- */

/* The smallest and largest position (`first`, `last`) and the smallest and largest document number
   of a set of queries or keys. */
struct span {
    int first, last, document_first, document_last;
};

/* The queries or the keys of a call. A sequence has `length` tokens, which are split into `tiles`
   tiles of tile_size tokens. If `position` is NULL, a token's position is its index + shift. If
   `document` is NULL, all tokens belong to one document. A query attends only to keys of its own
   document. The two arrays are called mask arrays. If a call has any mask array, spans_kernel
   computes `spans` (batch,tiles), the spans of all tiles; otherwise `spans` is NULL. */
struct token_axis {
    const int32_t *position, *document;
    span *spans;
    int length, tile_size, tiles, shift;
};

/* The kernels' arguments besides the pointers to tensors. Integers have 32 bits, because registers
   are scarce. A grid has the dimensions (tiles, heads, sequences). A call may need several grids;
   first_kv and first_sequence are the first kv head and the first sequence of this grid. */
struct attention_shape {
    token_axis q, k;
    /* group: number of query heads per kv head (grouped-query attention); q_row, k_row: number of
       elements in all heads of one token */
    int causal, heads, kv_heads, group, dim, q_row, k_row, first_sequence, first_kv;
    int window;              /* sliding window: number of keys up to the query's own; 0: none */
    float scale, scale_log2; /* scale_log2: the scale for exponentials to base 2 */
    float cap;               /* soft-capping of unscaled scores s: cap tanh(s / cap); 0: none */
    /* aligned: true if inputs can be read 16 bytes at a time; aligned4: true if results can be
       written four elements at a time */
    bool aligned, aligned4;
};

static __device__ int position_of(const token_axis &s, int sequence, int i) {
    return s.position ? s.position[(int64_t)sequence * s.length + i] : i + s.shift;
}

static __device__ int document_of(const token_axis &s, int sequence, int i) {
    return s.document ? s.document[(int64_t)sequence * s.length + i] : 0;
}

/* Returns the span of the `count` tokens that begin with token number `first`. If the call has mask
   arrays, returns the span of the tile that contains these tokens. */
static __device__ span span_of(const token_axis &s, int sequence, int first, int count) {
    first = opaque(first);
    if (s.spans) return s.spans[(int64_t)sequence * s.tiles + first / s.tile_size];
    span x = { first + s.shift, min(first + count, s.length) - 1 + s.shift, 0, 0 };
    return x;
}

/* Computes the spans of all tiles: each warp computes one. */
DTK_KERNEL __launch_bounds__(BLOCK) spans_kernel(token_axis s, int64_t batch) {
    int64_t tile = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int sequence = (int)(tile / s.tiles), first = (int)(tile % s.tiles) * s.tile_size;
    span x = { INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN };
    if (sequence >= batch) return;
    for (int i = first + threadIdx.x % 32; i < min(first + s.tile_size, s.length); i += 32) {
        int position = position_of(s, sequence, i), document = document_of(s, sequence, i);
        x.first = min(x.first, position);
        x.last = max(x.last, position);
        x.document_first = min(x.document_first, document);
        x.document_last = max(x.document_last, document);
    }
    for (int other = 16; other > 0; other /= 2) {
        x.first = min(x.first, __shfl_xor_sync(0xffffffffu, x.first, other));
        x.last = max(x.last, __shfl_xor_sync(0xffffffffu, x.last, other));
        x.document_first =
            min(x.document_first, __shfl_xor_sync(0xffffffffu, x.document_first, other));
        x.document_last =
            max(x.document_last, __shfl_xor_sync(0xffffffffu, x.document_last, other));
    }
    if (threadIdx.x % 32 == 0) s.spans[tile] = x;
}

/* Returns true only if none of the queries attends to any of the keys. */
static __device__ bool fully_masked(const attention_shape &s, span q, span k) {
    return (s.causal && k.first > q.last) || (s.window && q.first - k.last >= s.window) ||
           k.document_first > q.document_last || k.document_last < q.document_first;
}

/* Returns true only if all of the queries attend to all of the keys. In q and in k document_first
   is at most document_last, so the two equations hold only if all tokens have the same document. */
static __device__ bool fully_visible(const attention_shape &s, span q, span k) {
    return (!s.causal || k.last <= q.first) && (!s.window || q.last - k.first < s.window) &&
           q.document_first == k.document_last && q.document_last == k.document_first;
}

/* Returns the index after the last key tile that the `rows` queries from row0 on may attend to. In
   a causal call without mask arrays a query attends to the keys up to its own position. In all
   other calls the function returns the number of key tiles. */
static __device__ int key_tile_end(const attention_shape &s, int row0, int rows) {
    if (s.k.spans || !s.causal) return s.k.tiles;
    int seen = max(min(row0 + rows, s.q.length) + s.q.shift, 0);
    return min((seen + s.k.tile_size - 1) / s.k.tile_size, s.k.tiles);
}

/* Returns the highest index, at most i, of a key tile with a key to which one of the `rows` queries
   from row0 on may attend; -1 if there is none. The kernels process the key tiles from the last to
   the first. With a causal mask, the last tile is partly masked and takes the longest. To process
   it before all others costs the least, because the softmax of whichever tile is processed first
   has no products of a previous tile with which it could overlap. */
static __device__ int next_key_tile(
    const attention_shape &s, int sequence, int row0, int rows, int i) {
    if (!s.k.spans && !s.window) return i;
    span q = span_of(s.q, sequence, row0, rows);
    while (i >= 0 && fully_masked(s, q, span_of(s.k, sequence, i * s.k.tile_size, s.k.tile_size)))
        i--;
    return i;
}

/* A query tile of one head of a group. first_query_tile returns a lower bound for a tile's index:
   in no tile below this bound does a query attend to any key from row0 on. The caller passes the
   bound to next_query_tile as `first`. next_query_tile searches the tiles from i on, head by head
   over all heads of the group. It returns the first tile in which a query may attend to one of the
   `rows` keys from row0 on; if there is none, the result's `head` is s.group. */
struct query_tile {
    int head, tile;
};

static __device__ int first_query_tile(const attention_shape &s, int row0) {
    return s.q.spans || !s.causal ? 0 : min(max(row0 - s.q.shift, 0) / s.q.tile_size, s.q.tiles);
}

static __device__ query_tile next_query_tile(
    const attention_shape &s, int sequence, int row0, int rows, int first, query_tile i) {
    span k = span_of(s.k, sequence, row0, rows);
    if (first >= s.q.tiles) i.head = s.group;
    for (; i.head < s.group; i.head++, i.tile = 0)
        for (i.tile = max(i.tile, first); i.tile < s.q.tiles; i.tile++)
            if ((!s.q.spans && !s.window) ||
                !fully_masked(s, span_of(s.q, sequence, i.tile * s.q.tile_size, s.q.tile_size), k))
                return i;
    return i;
}

/* Returns the position (x) and the document (y) of token i of a sequence. The position is 0 if the
   mask is not causal. */
static __device__ int2 token_at(
    const attention_shape &s, const token_axis &of, int sequence, int i) {
    int2 x = { 0, 0 };
    if (i >= of.length) return x; /* this token is masked by its index, or its scores are unused */
    if (s.causal) x.x = position_of(of, sequence, i);
    x.y = document_of(of, sequence, i);
    return x;
}

/* If the call has mask arrays, stores in `tokens` the results of token_at for the COUNT tokens from
   `first` on, one token per thread. */
template <int COUNT>
static __device__ void load_tokens(
    int2 *tokens, const attention_shape &s, const token_axis &of, int sequence, int first) {
    if (s.k.spans && threadIdx.x < COUNT)
        tokens[threadIdx.x] = token_at(s, of, sequence, first + threadIdx.x);
}

/* Sets masked scores to minus infinity in a call with mask arrays. `rows` and `cols` are the
   results of token_at for the warp's rows and for the columns. */
template <int M, int J>
static __device__ void mask_tokens(float (&c)[M][J][4], const attention_shape &s,
    bool rows_are_keys, const int2 *rows, const int2 *cols) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    DTK_UNROLL
    for (int at = 0; at < 2 * J; at++) {
        int2 col = cols[at / 2 * 8 + 2 * t + at % 2];
        DTK_UNROLL
        for (int r = 0; r < 2 * M; r++) {
            int2 row = rows[8 * r + g];
            int query = rows_are_keys ? col.x : row.x, key = rows_are_keys ? row.x : col.x;
            if (key > query || (s.window && query - key >= s.window) || row.y != col.y)
                c[r / 2][at / 2][r % 2 * 2 + at % 2] = -INFINITY;
        }
    }
}

/* In the warp's row 0, masks the columns below `first` and the columns from `end` on. In row r both
   limits are greater by r * shift_per_row. */
template <int M, int J>
static __device__ void mask_outside(float (&c)[M][J][4], int first, int end, int shift_per_row) {
    int g = threadIdx.x % 32 / 4 * shift_per_row, t = threadIdx.x % 4 * 2;
    DTK_UNROLL
    for (int e = 0; e < M * J * 4; e++) {
        int r = e / 4 / J * 2 + e % 4 / 2, at = e / 4 % J * 8 + e % 2,
            row = 8 * r * shift_per_row + g - t;
        if (at < first + row || at >= end + row) c[e / 4 / J][e / 4 % J][e % 4] = -INFINITY;
    }
}

/* Masks scores whose rows are the queries from row0 on and whose columns are the keys from col0 on.
   Masks the keys that a query does not attend to, and the columns past the last key. `all` is true
   if every query attends to every key. */
template <int M, int J>
static __device__ void mask_keys(float (&c)[M][J][4], const attention_shape &s, int row0, int col0,
    bool all, const int2 *rows, const int2 *cols) {
    if (!all && s.k.spans)
        mask_tokens(c, s, false, rows, cols);
    else if (!all) {
        int end = row0 + s.q.shift + 1 - col0;
        mask_outside(c, s.window ? end - s.window : INT32_MIN / 2, end, 1);
    }
    if (col0 + 8 * J > s.k.length) mask_outside(c, 0, s.k.length - col0, 0);
}

/* Masks transposed scores, whose rows are the keys from row0 on and whose columns are the queries
   from col0 on. Columns past the last query need no mask, because their lse makes p zero. */
template <int M, int J>
static __device__ void mask_queries(float (&c)[M][J][4], const attention_shape &s, int row0,
    int col0, bool all, const int2 *rows, const int2 *cols) {
    if (!all && s.k.spans)
        mask_tokens(c, s, true, rows, cols);
    else if (!all) {
        int first = row0 - s.q.shift - col0;
        mask_outside(c, first, s.window ? first + s.window : INT32_MAX / 2, 1);
    }
}

/* Soft-capping of unscaled scores. */
template <int M, int J>
static __device__ void cap_scores(float (&c)[M][J][4], const attention_shape &s) {
    if (!(s.cap > 0)) return;
    DTK_UNROLL
    for (int e = 0; e < M * J * 4; e++) {
        float *x = &c[e / 4 / J][e / 4 % J][e % 4];
        *x = s.cap * tanhf(*x / s.cap);
    }
}

/* Returns the derivative of soft-capping, 1 - (s / cap)^2, from the probability p = 2^(s scale_log2
   - lse) of the capped score s: to keep all scores would take too many registers. */
static __device__ float cap_slope(const attention_shape &s, float p, float lse) {
    if (!(s.cap > 0) || p == 0) return 1;
    float t = (log2f(p) + lse) / (s.scale_log2 * s.cap);
    return 1 - t * t;
}

/* ---- products of a warp ---- */

/* Computes c = x y^T from the rows of the tile x from `row` on. The version for tensor cores sums
   over all D columns of the tiles; the columns from `dim` on are zero. */
template <int D, int M, int J, class T>
static __device__ void warp_scores(float (&c)[M][J][4], const T *x, int row, const T *y, int dim) {
    int at_x = ldmatrix_rows<D>(), at_y = ldmatrix_columns<D>();
    (void)dim;
    memset(c, 0, sizeof c);
    DTK_UNROLL
    for (int k = 0; k < D; k += 16) {
        unsigned u[M][4];
        DTK_UNROLL
        for (int i = 0; i < M; i++) ldmatrix(u[i], x + (row + 16 * i) * D + (at_x ^ k));
        DTK_UNROLL
        for (int j = 0; j < J; j += 2) {
            unsigned v[4];
            ldmatrix(v, y + 8 * j * D + (at_y ^ k));
            DTK_UNROLL
            for (int i = 0; i < M; i++) {
                mma(T(), c[i][j], u[i], v);
                mma(T(), c[i][j + 1], u[i], v + 2);
            }
        }
    }
}

template <int D, int M, int J>
static __device__ void warp_scores(
    float (&c)[M][J][4], const float *x, int row, const float *y, int dim) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    memset(c, 0, sizeof c);
    DTK_UNROLL_BY(2)
    for (int k = 0; k < dim; k += 4) {
        vec<float> u[2 * M];
        DTK_UNROLL
        for (int r = 0; r < 2 * M; r++)
            u[r] = *(const vec<float> *)(x + swizzle<float, D>(row + 8 * r + g, k));
        DTK_UNROLL
        for (int at = 0; at < 2 * J; at++) {
            vec<float> v =
                *(const vec<float> *)(y + swizzle<float, D>(at / 2 * 8 + 2 * t + at % 2, k));
            DTK_UNROLL
            for (int i = 0; i < 8 * M; i++)
                c[i / 8][at / 2][i / 4 % 2 * 2 + at % 2] += u[i / 4].v[i % 4] * v.v[i % 4];
        }
    }
}

/* Computes c += p y, where the tile y has one row for each column of p. The version for tensor
   cores rounds p to the type of y. */
template <int D, int M, int N, int J, class T>
static __device__ void warp_accumulate(
    float (&c)[M][N][4], const float (&p)[M][J][4], const T *y, int dim) {
    int at_y = ldmatrix_rows<D>();
    (void)dim;
    DTK_UNROLL
    for (int j = 0; j < J; j += 2) {
        unsigned u[M][4];
        DTK_UNROLL
        for (int e = 0; e < 4 * M; e++)
            u[e / 4][e % 4] = pack_pair<T>(
                p[e / 4][j + e / 2 % 2][e % 2 * 2], p[e / 4][j + e / 2 % 2][e % 2 * 2 + 1]);
        DTK_UNROLL
        for (int n = 0; n < N; n += 2) {
            unsigned v[4];
            ldmatrix_trans(v, y + 8 * j * D + (at_y ^ 8 * n));
            DTK_UNROLL
            for (int i = 0; i < M; i++) {
                mma(T(), c[i][n], u[i], v);
                mma(T(), c[i][n + 1], u[i], v + 2);
            }
        }
    }
}

template <int D, int M, int N, int J>
static __device__ void warp_accumulate(
    float (&c)[M][N][4], const float (&p)[M][J][4], const float *y, int dim) {
    int first = threadIdx.x % 32 / 4 * 4, t = threadIdx.x % 4;
    DTK_UNROLL
    for (int at = 0; at < 8 * J; at++) {
        float u[2 * M]; /* column `at` of p, read from the lane that holds it */
        DTK_UNROLL
        for (int r = 0; r < 2 * M; r++)
            u[r] =
                __shfl_sync(0xffffffffu, p[r / 2][at / 8][r % 2 * 2 + at % 2], first + at % 8 / 2);
        DTK_UNROLL
        for (int n = 0; n < N; n++) {
            if (8 * n >= dim) continue;
            const float *v = y + swizzle<float, D>(at, 8 * n + 2 * t);
            DTK_UNROLL
            for (int i = 0; i < 4 * M; i++) c[i / 4][n][i % 4] += u[i / 2] * v[i % 2];
        }
    }
}

/* quad_sum and quad_max return the sum and the maximum over the four lanes that hold one row. All
   four lanes get the result. */
static __device__ float quad_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

static __device__ float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

/* ---- tile sizes ---- */

/* Tile sizes without wgmma. BLOCKS_PER_SM blocks of THREADS threads share the 64 K registers of an
   SM, and on every GPU since sm_80 a block can have 99 KB of shared memory. The sizes were chosen
   to fit into both. PASS is 0 for the forward, 1 for the backward that computes dq, and 2 for the
   backward that computes dk and dv. UNIFORM_ROWS is the number of rows whose threads take the same
   branches. SLAB is the number of columns of a slab. */
template <class T, int D, int PASS, bool USE_WGMMA> struct tile_config {
    static constexpr bool NARROW = sizeof(T) == 2, USES_WGMMA = false;
    static constexpr int M = NARROW && (D == 64 || (D == 128 && PASS < 2)) ? 2 : 1;
    static constexpr int COLS = NARROW ? (D == 64 || (D == 128 && PASS != 1) ? 64 : 32)
                                       : (D == 256 || (D == 128 && PASS) ? 16 : 32);
    static constexpr int SUBTILE = !NARROW ? COLS : D == 256 && PASS ? 16 : 32;
    static constexpr int WARPS_PER_BLOCK = NARROW || D == 64 || (D == 128 && !PASS) ? 4 : 2;
    static constexpr int STAGES =
        (NARROW && D == 256 && PASS) || (!NARROW && (D > 64 || PASS)) ? 1 : 2;
    static constexpr int BLOCKS_PER_SM = NARROW && D == 64 && !PASS ? 3 : 2;
    static constexpr int ROWS = 16 * M * WARPS_PER_BLOCK, THREADS = 32 * WARPS_PER_BLOCK,
                         UNIFORM_ROWS = 16 * M, SLAB = D;
};

/* Tile sizes with wgmma. A block has 227 KB of shared memory. The sizes were chosen by measurements
   on an H100. */
template <class T, int D, int PASS> struct tile_config<T, D, PASS, true> {
    static constexpr bool NARROW = true, USES_WGMMA = true;
    static constexpr int M = 1, WARPGROUPS = D == 64 || PASS ? 1 : 2, STAGES = 2;
    static constexpr int COLS = D == 64 || !PASS ? 128 : 64, SUBTILE = COLS;
    static constexpr int BLOCKS_PER_SM = PASS ? 2 : D == 64 ? 3 : 1;
    static constexpr int ROWS = 64 * WARPGROUPS, THREADS = 128 * WARPGROUPS, UNIFORM_ROWS = 64,
                         SLAB = 64;
};

/* Returns warp_row rounded down to a multiple of UNIFORM_ROWS. The shuffle tells the compiler that
   the result is the same in all lanes of the warp. */
template <class F> static __device__ int uniform_row0(int warp_row) {
    if (F::ROWS == F::UNIFORM_ROWS) return 0;
    warp_row = warp_row / F::UNIFORM_ROWS * F::UNIFORM_ROWS;
    return F::USES_WGMMA ? __shfl_sync(0xffffffffu, warp_row, 0) : warp_row;
}

/* A kernel with PLAIN = true serves calls that have no mask arrays and whose inputs can be read 16
   bytes at a time. The control flow of this kernel depends on no loaded value. So tile addresses
   are in uniform registers, and the kernel can request the next tiles while wgmma instructions are
   in flight: ptxas keeps a wgmma asynchronous across a branch only if the branch is
   warp-uniform. */
static __device__ attention_shape assume_plain(attention_shape s) {
    s.q.spans = s.k.spans = NULL;
    s.aligned = true;
    return s;
}

/* Returns the number of threads for the launch bounds of a kernel. For a kernel that needs wgmma in
   code without wgmma, returns a number that is too small, so that a launch fails. */
template <class F> static constexpr int threads_of() {
    return F::USES_WGMMA && !DTK_HAS_WGMMA ? 32 : F::THREADS;
}

/* ---- products of a tile ---- */

/* Computes c = x y^T from the rows of the tile x from `row` on and the rows of the tile y from
   `col` on. If wgmma is used, c is valid after wait_products. */
template <class F, int D, int X_ROWS, int Y_ROWS, int M, int J, class T>
static __device__ void tile_scores(
    float (&c)[M][J][4], const T *x, int row, const T *y, int col, int dim) {
    if constexpr (F::USES_WGMMA) {
        smem_matrix a = smem_matrix_at(x + row / 64 * 64 * 64, 0),
                    b = smem_matrix_at(y + col * 64, 0);
        wgmma_fence();
        DTK_UNROLL
        for (int k = 0; k < D; k += 16)
            wgmma(T(), c[0], advance(a, k / 64 * X_ROWS * 64 + k % 64),
                advance(b, k / 64 * Y_ROWS * 64 + k % 64), k > 0);
        wgmma_commit();
    } else {
        warp_scores<D>(c, x, row, y + col * D, dim);
    }
}

/* Rounds p to T and packs the results into u, in the layout in which wgmma reads A from
   registers. */
template <class T, int J>
static __device__ void pack_probabilities(unsigned (&u)[J / 2][4], const float (&p)[1][J][4]) {
    DTK_UNROLL
    for (int e = 0; e < 2 * J; e++)
        u[e / 4][e % 4] = pack_pair<T>(p[0][e / 2][e % 2 * 2], p[0][e / 2][e % 2 * 2 + 1]);
}

template <int Y_ROWS, int N, int K, class T>
static __device__ void wgmma_accumulate(
    float (&c)[1][N][4], const unsigned (&u)[K][4], const T *y) {
    smem_matrix b = smem_matrix_at(y, Y_ROWS * 64);
    wgmma_fence();
    DTK_UNROLL
    for (int k = 0; k < K; k++) wgmma_from_registers(T(), c[0], u[k], advance(b, 16 * k * 64), 1);
    wgmma_commit();
}

/* Computes c += p y from the rows of the tile y from `row` on. If wgmma is used, c is valid after
   wait_products. */
template <class F, int D, int Y_ROWS, int M, int N, int J, class T>
static __device__ void tile_accumulate(
    float (&c)[M][N][4], const float (&p)[M][J][4], const T *y, int row, int dim) {
    if constexpr (F::USES_WGMMA) {
        unsigned u[J / 2][4];
        pack_probabilities<T>(u, p);
        wgmma_accumulate<Y_ROWS>(c, u, y + row * 64);
    } else {
        warp_accumulate<D>(c, p, y + row * D, dim);
    }
}

/* Waits until at most the last LEFT products are in flight. c must be the result of a product that
   is then complete. */
template <class F, int LEFT, int M, int J>
static __device__ void wait_products(float (&c)[M][J][4]) {
    if constexpr (F::USES_WGMMA) {
        wgmma_wait<LEFT>();
        DTK_UNROLL
        for (int e = 0; e < M * J * 4; e++) wgmma_fence_operand(c[e / 4 / J][e / 4 % J][e % 4]);
    }
}

/* Waits for the scores c like wait_products, and soft-caps them. */
template <class F, int LEFT, int M, int J>
static __device__ void wait_scores(float (&c)[M][J][4], const attention_shape &s) {
    wait_products<F, LEFT>(c);
    cap_scores(c, s);
}

/* ---- tile loads and stores ---- */

template <class F, int D, class T, int ROWS>
static __device__ void fetch_rows(
    T *tile, const void *from, int64_t at, int ld, int rows, const attention_shape &s) {
    DTK_UNROLL
    for (int col = 0; col < D; col += F::SLAB)
        fetch_tile<T, ROWS, F::SLAB, F::THREADS>(
            tile + col * ROWS, (const T *)from + at + col, ld, rows, s.dim - col, s.aligned);
}

/* Starts to load a tile of each of two arrays that have the same layout. */
template <class F, int D, int ROWS, class T>
static __device__ void fetch_two(T *x, T *y, const void *from_x, const void *from_y, int64_t at,
    int ld, int rows, const attention_shape &s) {
    fetch_rows<F, D, T, ROWS>(x, from_x, at, ld, rows, s);
    fetch_rows<F, D, T, ROWS>(y, from_y, at, ld, rows, s);
    cp_async_commit();
}

/* Waits for this thread's loads, and makes the loaded data visible to wgmma. */
template <class F> static __device__ void wait_tiles() {
    cp_async_wait_all();
    if constexpr (F::USES_WGMMA) fence_proxy_async();
}

/* query_at returns the index of the first element of a query of one head, key_at that of a key. */
static __device__ int64_t query_at(const attention_shape &s, int sequence, int row, int head) {
    return (int64_t)((sequence * s.q.length + row) * s.heads + head) * s.dim;
}

static __device__ int64_t key_at(const attention_shape &s, int sequence, int row, int head) {
    return (int64_t)((sequence * s.k.length + row) * s.kv_heads + head) * s.dim;
}

/* Sets to[e] = v[e] + old * to[e] for e < n. at_once is true if the four elements can be written in
   one access: n is 4 and `to` is aligned. */
template <class T>
static __device__ void store_four(T *to, vec<float> v, int n, bool at_once, float old) {
    struct alignas(4 * sizeof(T)) four {
        T v[4];
    } x;
    if (at_once && old != 0) x = *(const four *)to;
    for (int e = 0; e < 4 && !at_once; e++)
        if (e < n && old != 0) x.v[e] = to[e];
    for (int e = 0; e < 4; e++)
        if (e < n) round_to(&x.v[e], old != 0 ? v.v[e] + old * widen(x.v[e]) : v.v[e]);
    if (at_once) *(four *)to = x;
    for (int e = 0; e < 4 && !at_once; e++)
        if (e < n) to[e] = x.v[e];
}

/* Describes where and how store_rows stores a warp's rows. Row r begins at element at + r * ld of
   `out`. Only the first `rows` rows are stored. store_rows multiplies each value by `factor`. If
   `accumulate` is set, it then adds the old value times old_weight[r] in row r. */
struct row_output {
    void *out;
    int wide, accumulate;    /* wide: 1 if the elements of `out` are f32, 0 if they are T */
    const float *old_weight; /* NULL means a weight of 1 for all rows */
    int64_t at;
    int ld, rows;
    float factor;
};

/* Stores a warp's rows. The values pass through `tile`, an array of floats in shared memory, so
   that neighbouring lanes write neighbouring elements. */
template <class T, int D, int M, int N>
static __device__ void store_rows(
    float *tile, const float (&c)[M][N][4], const row_output &to, const attention_shape &s) {
    int lane = threadIdx.x % 32;
    __syncwarp();
    DTK_UNROLL
    for (int r = 0; r < 2 * M; r++) {
        DTK_UNROLL
        for (int n = 0; n < N; n++) {
            float *two = tile + swizzle<float, D>(8 * r + lane / 4, 8 * n + lane % 4 * 2);
            two[0] = to.factor * c[r / 2][n][r % 2 * 2];
            two[1] = to.factor * c[r / 2][n][r % 2 * 2 + 1];
        }
    }
    __syncwarp();
    DTK_UNROLL_BY(1)
    for (int i = lane; i < 4 * M * D; i += 32) {
        int row = i / (D / 4), col = i % (D / 4) * 4, have = min(s.dim - col, 4);
        if (row >= to.rows || have <= 0) continue;
        vec<float> v = *(const vec<float> *)(tile + swizzle<float, D>(row, col));
        float old = !to.accumulate ? 0 : to.old_weight ? to.old_weight[row] : 1;
        int64_t at = to.at + (int64_t)row * to.ld + col;
        if (to.wide)
            store_four((float *)to.out + at, v, have, s.aligned4, old);
        else
            store_four((T *)to.out + at, v, have, s.aligned4, old);
    }
}

#define DTK_ATTENTION_KERNEL(PASS, USE_WGMMA) \
    DTK_KERNEL __launch_bounds__((threads_of<tile_config<T, D, PASS, USE_WGMMA>>()), \
        (tile_config<T, D, PASS, USE_WGMMA>::BLOCKS_PER_SM))

/* ---- forward ---- */

/* log2(e). e^x is computed as 2^(x DTK_LOG2_E), because 2^x is one instruction. */
#define DTK_LOG2_E 1.4426950408889634

/* Online softmax for one tile of scores:

       max'   = max(max, scores)
       factor = e^(max - max')
       p      = e^(scores - max')
       sum'   = factor sum + sum of p

   The function replaces the scores by p. The caller multiplies its output by `factor`. As long as
   all scores of a row are masked, the row's maximum is -infinity. Maxima and sums are computed in
   four independent chains, because each step of a chain waits for the previous step. */
template <int M, int J>
static __device__ void online_softmax_step(
    float (&c)[M][J][4], float *row_max, float *sum, float (&factor)[2 * M], float scale_log2) {
    DTK_UNROLL
    for (int r = 0; r < 2 * M; r++) {
        float part[4], now;
        DTK_UNROLL
        for (int at = 0; at < 2 * J; at++) {
            float x = c[r / 2][at / 2][r % 2 * 2 + at % 2];
            part[at % 4] = at < 4 ? x : fmaxf(part[at % 4], x);
        }
        now = quad_max(fmaxf(fmaxf(row_max[r], fmaxf(part[0], part[1])), fmaxf(part[2], part[3])));
        float base = now == -INFINITY ? 0 : now * scale_log2;
        factor[r] = exp2_of(row_max[r] * scale_log2 - base);
        DTK_UNROLL
        for (int at = 0; at < 2 * J; at++) {
            float *p = &c[r / 2][at / 2][r % 2 * 2 + at % 2];
            *p = exp2_of(*p * scale_log2 - base);
            part[at % 4] = at < 4 ? *p : part[at % 4] + *p;
        }
        row_max[r] = now;
        sum[r] = sum[r] * factor[r] + ((part[0] + part[1]) + (part[2] + part[3]));
    }
}

template <int M, int N>
static __device__ void scale_rows(float (&out)[M][N][4], const float (&factor)[2 * M]) {
    DTK_UNROLL
    for (int e = 0; e < M * N * 4; e++)
        out[e / 4 / N][e / 4 % N][e % 4] *= factor[e / 4 / N * 2 + e % 4 / 2];
}

/* Log-sum-exp merge: returns log(e^x + e^y). x and y may be -infinity. */
static __device__ float log_add_exp(float x, float y) {
    float high = x > y ? x : y, low = x > y ? y : x;
    return high == -INFINITY ? high : high + log1pf(expf(low - high));
}

/* Divides a warp's rows of `out`, from row0 on, by their sums and writes lse. If a.merge_lse is
   set, a.out and a.lse hold the result over other keys. In this case the function merges the old
   and the new lse, scales the new rows by their weight, and writes the weights of the old rows to
   old_weight, which is in shared memory. */
template <int M, int N>
static __device__ void normalize_rows(const dt_attention_args &a, const attention_shape &s,
    int head, int row0, const float *row_max, const float *sum, float (&out)[M][N][4],
    float *old_weight) {
    int g = threadIdx.x % 32 / 4;
    DTK_UNROLL
    for (int r = 0; r < 2 * M; r++) {
        int row = row0 + 8 * r + g, at = head * s.q.length + row;
        bool there = row < s.q.length;
        float total = quad_sum(sum[r]),
              lse = total > 0 ? row_max[r] * s.scale + logf(total) : -INFINITY;
        float old_lse = a.merge_lse && there ? ((const float *)a.lse)[at] : -INFINITY,
              new_lse = log_add_exp(lse, old_lse);
        float factor = total > 0 ? expf(lse - new_lse) / total : 0;
        DTK_UNROLL
        for (int n = 0; n < 2 * N; n++) out[r / 2][n / 2][r % 2 * 2 + n % 2] *= factor;
        __syncwarp(); /* all four lanes of the row have read the lse that one lane now writes */
        if (threadIdx.x % 4 > 0) continue;
        old_weight[8 * r + g] = old_lse > -INFINITY ? expf(old_lse - new_lse) : 0;
        if (there) ((float *)a.lse)[at] = new_lse;
    }
}

/* Normalises a warp's rows of the output and stores them through `tile`. */
template <class F, int D, int M, class T>
static __device__ void store_output(const dt_attention_args &a, const attention_shape &s,
    int sequence, int warp_row, const float *row_max, const float *sum, float (&out)[M][D / 8][4],
    float *old_weight, T *tile) {
    int h = opaque(blockIdx.y), row0 = (s.q.tiles - 1 - opaque(blockIdx.x)) * F::ROWS;
    normalize_rows(
        a, s, sequence * s.heads + h, row0 + warp_row, row_max, sum, out, old_weight + warp_row);
    row_output to = { a.out, a.wide, a.merge_lse, old_weight + warp_row,
        query_at(s, sequence, row0 + warp_row, h), s.q_row, s.q.length - row0 - warp_row, 1 };
    store_rows<T, D>((float *)tile + warp_row * D, out, to, s);
}

/* Flash attention, forward: computes out = softmax(scale q k^T) v, one tile of keys at a time. A
   block processes F::ROWS queries of one head. */
template <class T, int D>
DTK_ATTENTION_KERNEL(0, false)
attention_kernel(dt_attention_args a, attention_shape s) {
    typedef tile_config<T, D, 0, false> F;
    const int M = F::M, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, qs);
    __shared__ int2 rows[F::ROWS], cols[F::STAGES][F::COLS];
    __shared__ float old_weight[F::ROWS];
    T *ks = qs + F::ROWS * D, *vs = ks + F::STAGES * SIZE;
    float out[M][D / 8][4] = { { { 0 } } }, c[M][F::SUBTILE / 8][4], row_max[2 * M], sum[2 * M],
                     factor[2 * M];
    /* the first blocks process the last queries, which have the most keys in a causal call */
    int row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS;
    int sequence = s.first_sequence + blockIdx.z;
    int warp_row = threadIdx.x / 32 * 16 * M; /* the warp's first row in the block */
    int uniform_row = warp_row / F::UNIFORM_ROWS * F::UNIFORM_ROWS;
    auto fetch = [&](int i, int stage) {
        int kv = s.first_kv + opaque(blockIdx.y) / s.group;
        fetch_two<F, D, F::COLS>(ks + stage * SIZE, vs + stage * SIZE, a.k, a.v,
            key_at(s, sequence, i * F::COLS, kv), s.k_row, s.k.length - i * F::COLS, s);
        load_tokens<F::COLS>(cols[stage], s, s.k, sequence, i * F::COLS);
    };
    load_tokens<F::ROWS>(rows, s, s.q, sequence, row0);
    DTK_UNROLL
    for (int r = 0; r < 2 * M; r++) {
        row_max[r] = -INFINITY;
        sum[r] = 0;
    }
    int i = next_key_tile(s, sequence, row0, F::ROWS, key_tile_end(s, row0, F::ROWS) - 1);
    fetch_rows<F, D, T, F::ROWS>(
        qs, a.q, query_at(s, sequence, row0, blockIdx.y), s.q_row, s.q.length - row0, s);
    if (i >= 0) fetch(i, 0);
    for (int stage = 0; i >= 0; stage = (stage + 1) % F::STAGES) {
        wait_tiles<F>();
        __syncthreads(); /* this tile is loaded, and no thread reads the other stage any more */
        int next = next_key_tile(s, sequence, row0, F::ROWS, i - 1);
        if (F::STAGES == 2 && next >= 0) fetch(next, stage ^ 1);
        DTK_UNROLL_BY(1)
        for (int part = 0; part < F::COLS; part += F::SUBTILE) {
            int col0 = i * F::COLS + part;
            span q = span_of(s.q, sequence, row0 + uniform_row, F::UNIFORM_ROWS),
                 k = span_of(s.k, sequence, col0, F::SUBTILE);
            if (row0 + uniform_row >= s.q.length || col0 >= s.k.length || fully_masked(s, q, k))
                continue;
            tile_scores<F, D, F::ROWS, F::COLS>(c, qs, warp_row, ks + stage * SIZE, part, s.dim);
            wait_scores<F, 0>(c, s);
            mask_keys(c, s, row0 + warp_row, col0, fully_visible(s, q, k), rows + warp_row,
                cols[stage] + part);
            online_softmax_step(c, row_max, sum, factor, s.scale_log2);
            scale_rows(out, factor);
            tile_accumulate<F, D, F::COLS>(out, c, vs + stage * SIZE, part, s.dim);
            wait_products<F, 0>(out);
        }
        if (F::STAGES == 1) __syncthreads();
        if (F::STAGES == 1 && next >= 0) fetch(next, 0);
        i = next;
    }
    cp_async_wait_all(); /* waits for the queries; needed if there was no key tile */
    __syncthreads();     /* after this barrier no thread reads the tiles */
    store_output<F, D>(a, s, sequence, warp_row, row_max, sum, out, old_weight, qs);
}

/* Flash attention, forward, with wgmma. As wgmma is asynchronous, products overlap with the softmax
   (FlashAttention-3). A warpgroup starts two products: the scores of a tile, and the output from
   the probabilities and values of the previous tile. It computes the softmax of the scores while
   the tensor cores compute the output. So the values of a tile are loaded together with the keys of
   the next tile. */
template <class T, int D, bool PLAIN>
DTK_ATTENTION_KERNEL(0, true)
attention_wgmma_kernel(dt_attention_args a, attention_shape s) {
    typedef tile_config<T, D, 0, true> F;
    if constexpr (!DTK_HAS_WGMMA) return;
    if constexpr (PLAIN) s = assume_plain(s);
    const int SIZE = F::COLS * D;
    DT_DYN_SMEM(T, qs);
    __shared__ int2 rows[F::ROWS], cols[2][F::COLS];
    __shared__ float old_weight[F::ROWS];
    T *ks = qs + F::ROWS * D, *vs = ks + 2 * SIZE;
    float out[1][D / 8][4] = { { { 0 } } }, c[1][F::COLS / 8][4], factor[2];
    float row_max[2] = { -INFINITY, -INFINITY }, sum[2] = { 0, 0 };
    unsigned u[F::COLS / 16][4];
    /* the first blocks process the last queries, which have the most keys in a causal call */
    int row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS;
    int sequence = s.first_sequence + blockIdx.z, kv = s.first_kv + opaque(blockIdx.y) / s.group;
    int warp_row = threadIdx.x / 32 * 16, uniform_row = uniform_row0<F>(warp_row);
    int i = next_key_tile(s, sequence, row0, F::ROWS, key_tile_end(s, row0, F::ROWS) - 1),
        previous = -1;
    auto fetch = [&](int keys, int values, int stage) {
        int k0 = keys * F::COLS, v0 = values * F::COLS;
        if (PLAIN || keys >= 0) {
            fetch_rows<F, D, T, F::COLS>(ks + stage * SIZE, a.k, key_at(s, sequence, k0, kv),
                s.k_row, keys >= 0 ? s.k.length - k0 : 0, s);
            load_tokens<F::COLS>(cols[stage], s, s.k, sequence, k0);
        }
        if (values >= 0)
            fetch_rows<F, D, T, F::COLS>(
                vs + stage * SIZE, a.v, key_at(s, sequence, v0, kv), s.k_row, s.k.length - v0, s);
        cp_async_commit();
    };
    load_tokens<F::ROWS>(rows, s, s.q, sequence, row0);
    fetch_rows<F, D, T, F::ROWS>(
        qs, a.q, query_at(s, sequence, row0, blockIdx.y), s.q_row, s.q.length - row0, s);
    fetch(i, previous, 0);
    bool has_probabilities = false;
    for (int stage = 0; i >= 0 || previous >= 0; stage ^= 1) {
        wait_tiles<F>();
        __syncthreads(); /* this tile is loaded, and no thread reads the other stage any more */
        int next = next_key_tile(s, sequence, row0, F::ROWS, i - 1), col0 = i * F::COLS;
        bool visible = i >= 0 && row0 + uniform_row < s.q.length;
        span q = span_of(s.q, sequence, row0 + uniform_row, 64), k = q;
        if (visible) k = span_of(s.k, sequence, col0, F::COLS);
        visible = visible && !fully_masked(s, q, k);
        /* needs no mask: the tile with the last key comes first, when has_probabilities is 0 */
        bool overlapped = visible && has_probabilities && fully_visible(s, q, k);
        if (i >= 0 && !(PLAIN && overlapped)) fetch(next, i, stage ^ 1);
        if (overlapped) {
            tile_scores<F, D, F::ROWS, F::COLS>(c, qs, uniform_row, ks + stage * SIZE, 0, s.dim);
            wgmma_accumulate<F::COLS>(out, u, vs + stage * SIZE);
            if constexpr (PLAIN) fetch(next, i, stage ^ 1);
            wait_scores<F, 1>(c, s);
            online_softmax_step(c, row_max, sum, factor, s.scale_log2);
            order_after(sum[0] + sum[1]);
            wait_products<F, 0>(out);
            scale_rows(out, factor);
            pack_probabilities<T>(u, c);
        } else {
            if (has_probabilities) wgmma_accumulate<F::COLS>(out, u, vs + stage * SIZE);
            wait_products<F, 0>(out);
            if (visible) {
                tile_scores<F, D, F::ROWS, F::COLS>(
                    c, qs, uniform_row, ks + stage * SIZE, 0, s.dim);
                wait_scores<F, 0>(c, s);
                mask_keys(c, s, row0 + warp_row, col0, fully_visible(s, q, k), rows + warp_row,
                    cols[stage]);
                online_softmax_step(c, row_max, sum, factor, s.scale_log2);
                scale_rows(out, factor);
                pack_probabilities<T>(u, c);
            }
        }
        has_probabilities = visible;
        previous = i;
        i = next;
    }
    cp_async_wait_all();
    __syncthreads(); /* after this barrier no thread reads the tiles */
    store_output<F, D>(a, s, sequence, warp_row, row_max, sum, out, old_weight, qs);
}

/* ---- backward ---- */

/* Returns the index of a row's delta in an array for the sequences and heads of one grid. */
static __device__ int delta_at(const attention_shape &s, int sequence, int h, int row) {
    return ((sequence - s.first_sequence) * s.heads + h - s.first_kv * s.group) * s.q.length + row;
}

/* For each row computes delta = sum of dout * out. Eight threads process a row together, so that
   each thread reads 16 bytes of a row of 128 bytes. */
enum { DELTA_LANES = 8, DELTA_ROWS = BLOCK / DELTA_LANES };

template <class T>
DTK_KERNEL __launch_bounds__(BLOCK)
    delta_kernel(dt_attention_back_args a, attention_shape s, float *delta) {
    const int MAX_N = vec<T>::N;
    int row = blockIdx.x * DELTA_ROWS + threadIdx.x / DELTA_LANES, lane = threadIdx.x % DELTA_LANES;
    int sequence = s.first_sequence + blockIdx.z, h = s.first_kv * s.group + blockIdx.y;
    int dim = row < s.q.length ? s.dim : 0,
        vec_dims = s.dim % MAX_N == 0 && aligned16(a.out, a.dout) ? dim : 0;
    int64_t at = query_at(s, sequence, row, h);
    float sum = 0;
    auto add = [&](int64_t i, auto width) {
        const int N = decltype(width)::N;
        vec<float, N> d = load_floats<N>((const T *)a.dout + i), out;
        out = a.wide ? load_floats<N>((const float *)a.out + i)
                     : load_floats<N>((const T *)a.out + i);
        for (int k = 0; k < N; k++) sum += d.v[k] * out.v[k];
    };
    for (int d = lane * MAX_N; d < vec_dims; d += DELTA_LANES * MAX_N)
        add(at + d, constant<MAX_N>());
    for (int d = vec_dims + lane; d < dim; d += DELTA_LANES) add(at + d, constant<1>());
    for (int other = DELTA_LANES / 2; other > 0; other /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (lane == 0 && row < s.q.length) delta[delta_at(s, sequence, h, row)] = sum;
}

static __device__ float lse_at(
    const void *lse, const attention_shape &s, int sequence, int h, int row) {
    return row < s.q.length ? ((const float *)lse)[(sequence * s.heads + h) * s.q.length + row]
                            : -INFINITY;
}

/* Converts a query's lse to base 2. Returns +infinity if lse is -infinity, which makes p zero. lse
   is -infinity if all keys of the query are masked, or in a row past the last query. */
static __device__ float lse_log2(float lse) {
    return lse == -INFINITY ? INFINITY : lse * (float)DTK_LOG2_E;
}

static __device__ float delta_of(
    const float *delta, const attention_shape &s, int sequence, int h, int row) {
    return row < s.q.length ? delta[delta_at(s, sequence, h, row)] : 0;
}

/* Replaces each score s by p = e^(scale s - lse). lse_of(e) returns the lse of element e in base
   2. */
template <int M, int J, class F>
static __device__ void exponentials(float (&c)[M][J][4], float scale_log2, F lse_of) {
    DTK_UNROLL
    for (int e = 0; e < M * J * 4; e++) {
        float *p = &c[e / 4 / J][e / 4 % J][e % 4];
        *p = exp2_of(*p * scale_log2 - lse_of(e));
    }
}

/* Replaces each probability p by ds = p (dp - delta), times the derivative of soft-capping. */
template <int M, int J, class L, class F>
static __device__ void score_gradients(float (&c)[M][J][4], const float (&dp)[M][J][4],
    const attention_shape &s, L lse_of, F delta_of_element) {
    DTK_UNROLL
    for (int e = 0; e < M * J * 4; e++) {
        float *p = &c[e / 4 / J][e / 4 % J][e % 4];
        *p *= (dp[e / 4 / J][e / 4 % J][e % 4] - delta_of_element(e)) * cap_slope(s, *p, lse_of(e));
    }
}

/* Flash attention, backward of the queries: computes dq = scale ds k, where
   p = e^(scale q k^T - lse), dp = dout v^T and ds = p (dp - delta). */
template <class T, int D, bool USE_WGMMA, bool PLAIN>
DTK_ATTENTION_KERNEL(1, USE_WGMMA)
attention_back_q_kernel(dt_attention_back_args a, attention_shape s, const float *delta) {
    typedef tile_config<T, D, 1, USE_WGMMA> F;
    if constexpr (USE_WGMMA && !DTK_HAS_WGMMA) return;
    if constexpr (PLAIN) s = assume_plain(s);
    const int M = F::M, J = F::SUBTILE / 8, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, qs);
    __shared__ int2 rows[F::ROWS], cols[F::STAGES][F::COLS];
    T *ds = qs + F::ROWS * D, *ks = ds + F::ROWS * D, *vs = ks + F::STAGES * SIZE;
    float dq[M][D / 8][4] = { { { 0 } } }, c[M][J][4], dp[M][J][4], lse[2 * M], row_delta[2 * M];
    int row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS, warp_row = threadIdx.x / 32 * 16 * M;
    int uniform_row = uniform_row0<F>(warp_row),
        product_row = USE_WGMMA ? uniform_row : warp_row; /* the first row of the products */
    int sequence = s.first_sequence + blockIdx.z, h = s.first_kv * s.group + blockIdx.y;
    auto fetch = [&](int i, int stage) {
        int kv = s.first_kv + opaque(blockIdx.y) / s.group;
        fetch_two<F, D, F::COLS>(ks + stage * SIZE, vs + stage * SIZE, a.k, a.v,
            key_at(s, sequence, i * F::COLS, kv), s.k_row, s.k.length - i * F::COLS, s);
        load_tokens<F::COLS>(cols[stage], s, s.k, sequence, i * F::COLS);
    };
    load_tokens<F::ROWS>(rows, s, s.q, sequence, row0);
    DTK_UNROLL
    for (int r = 0; r < 2 * M; r++) {
        lse[r] =
            lse_log2(lse_at(a.lse, s, sequence, h, row0 + warp_row + 8 * r + threadIdx.x % 32 / 4));
        row_delta[r] =
            delta_of(delta, s, sequence, h, row0 + warp_row + 8 * r + threadIdx.x % 32 / 4);
    }
    int i = next_key_tile(s, sequence, row0, F::ROWS, key_tile_end(s, row0, F::ROWS) - 1);
    fetch_two<F, D, F::ROWS>(
        qs, ds, a.q, a.dout, query_at(s, sequence, row0, h), s.q_row, s.q.length - row0, s);
    if (i >= 0) fetch(i, 0);
    for (int stage = 0; i >= 0; stage = (stage + 1) % F::STAGES) {
        wait_tiles<F>();
        __syncthreads();
        int next = next_key_tile(s, sequence, row0, F::ROWS, i - 1);
        if (F::STAGES == 2 && next >= 0 && !PLAIN) fetch(next, stage ^ 1);
        DTK_UNROLL_BY(1)
        for (int part = 0; part < F::COLS; part += F::SUBTILE) {
            int col0 = i * F::COLS + part;
            span q = span_of(s.q, sequence, row0 + uniform_row, F::UNIFORM_ROWS),
                 k = span_of(s.k, sequence, col0, F::SUBTILE);
            T *kt = ks + stage * SIZE, *vt = vs + stage * SIZE;
            if (!PLAIN &&
                (row0 + uniform_row >= s.q.length || col0 >= s.k.length || fully_masked(s, q, k)))
                continue;
            tile_scores<F, D, F::ROWS, F::COLS>(c, qs, product_row, kt, part, s.dim);
            tile_scores<F, D, F::ROWS, F::COLS>(dp, ds, product_row, vt, part, s.dim);
            if (PLAIN && next >= 0) fetch(next, stage ^ 1);
            wait_scores<F, 1>(c, s);
            mask_keys(c, s, row0 + warp_row, col0, fully_visible(s, q, k), rows + warp_row,
                cols[stage] + part);
            exponentials(c, s.scale_log2, [&](int e) { return lse[e / 4 / J * 2 + e % 4 / 2]; });
            wait_products<F, 0>(dp);
            score_gradients(
                c, dp, s, [&](int e) { return lse[e / 4 / J * 2 + e % 4 / 2]; },
                [&](int e) { return row_delta[e / 4 / J * 2 + e % 4 / 2]; });
            tile_accumulate<F, D, F::COLS>(dq, c, kt, part, s.dim);
            wait_products<F, 0>(dq);
        }
        if (F::STAGES == 1) __syncthreads();
        if (F::STAGES == 1 && next >= 0) fetch(next, 0);
        i = next;
    }
    cp_async_wait_all();
    __syncthreads();
    h = s.first_kv * s.group + opaque(blockIdx.y);
    row0 = (s.q.tiles - 1 - opaque(blockIdx.x)) * F::ROWS;
    row_output to = { a.dq, a.wide, a.accumulate_q, NULL, query_at(s, sequence, row0 + warp_row, h),
        s.q_row, s.q.length - row0 - warp_row, s.scale };
    store_rows<T, D>((float *)qs + warp_row * D, dq, to, s);
}

/* Stores a warp's rows of dk and dv. The first row begins at element `at`. The values pass through
   `tile` (see store_rows). */
template <class T, int D, int GRADS, int M>
static __device__ void store_key_gradients(const dt_attention_back_args &a,
    const attention_shape &s, int64_t at, int rows, const float (&dk)[M][D / 8][4],
    const float (&dv)[M][D / 8][4], float *tile) {
    row_output to = { a.dk, a.wide, a.accumulate_k, NULL, at, s.k_row, rows, s.scale };
    if (GRADS & 1) store_rows<T, D>(tile, dk, to, s);
    to.out = a.dv;
    to.accumulate = a.accumulate_v;
    to.factor = 1;
    if (GRADS & 2) store_rows<T, D>(tile, dv, to, s);
}

/* Returns the column of element e of a warp's scores. */
template <int J> static __device__ int column_of(int e) {
    return e / 4 % J * 8 + threadIdx.x % 4 * 2 + e % 2;
}

/* Flash attention, backward of the keys and values: computes dk = scale ds^T q and dv = p^T dout.
   The sums run over the queries of all heads that use the same kv head, one head after the other.
   GRADS is 1 for dk, 2 for dv, and 3 for both. With D = 256, computing both would need too many
   registers. */
template <class T, int D, int GRADS, bool USE_WGMMA, bool PLAIN>
DTK_ATTENTION_KERNEL(2, USE_WGMMA)
attention_back_kv_kernel(dt_attention_back_args a, attention_shape s, const float *delta) {
    typedef tile_config<T, D, 2, USE_WGMMA> F;
    if constexpr (USE_WGMMA && !DTK_HAS_WGMMA) return;
    if constexpr (PLAIN) s = assume_plain(s);
    const int M = F::M, J = F::SUBTILE / 8, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, ks);
    __shared__ float lse[F::STAGES][F::COLS], row_delta[F::STAGES][F::COLS];
    __shared__ int2 rows[F::ROWS], cols[F::STAGES][F::COLS];
    T *vs = ks + F::ROWS * D, *qs = vs + F::ROWS * D, *ds = qs + F::STAGES * SIZE;
    float dk[M][D / 8][4] = { { { 0 } } }, dv[M][D / 8][4] = { { { 0 } } }, c[M][J][4], dp[M][J][4];
    float next_lse = 0, next_delta = 0; /* of the next tile, loaded while this one is processed */
    int row0 = blockIdx.x * F::ROWS, warp_row = threadIdx.x / 32 * 16 * M;
    int uniform_row = uniform_row0<F>(warp_row), product_row = USE_WGMMA ? uniform_row : warp_row;
    int sequence = s.first_sequence + blockIdx.z, kv = s.first_kv + blockIdx.y, ld = s.k_row;
    auto fetch = [&](query_tile i, int stage) {
        int row = i.tile * F::COLS, h = kv * s.group + i.head, thread = threadIdx.x;
        fetch_two<F, D, F::COLS>(qs + stage * SIZE, ds + stage * SIZE, a.q, a.dout,
            query_at(s, sequence, row, h), s.q_row, s.q.length - row, s);
        if (thread >= F::COLS) return;
        next_lse = lse_at(a.lse, s, sequence, h, row + thread);
        next_delta = delta_of(delta, s, sequence, h, row + thread);
        if (s.k.spans) cols[stage][thread] = token_at(s, s.q, sequence, row + thread);
    };
    load_tokens<F::ROWS>(rows, s, s.k, sequence, row0);
    int first = first_query_tile(s, row0);
    query_tile next = next_query_tile(s, sequence, row0, F::ROWS, first, query_tile{ 0, 0 });
    fetch_two<F, D, F::ROWS>(
        ks, vs, a.k, a.v, key_at(s, sequence, row0, kv), ld, s.k.length - row0, s);
    if (next.head < s.group) fetch(next, 0);
    for (int stage = 0; next.head < s.group; stage = (stage + 1) % F::STAGES) {
        int tile = next.tile++;
        if (threadIdx.x < F::COLS)
            lse[stage][threadIdx.x] = lse_log2(next_lse),
            row_delta[stage][threadIdx.x] = next_delta;
        wait_tiles<F>(), __syncthreads();
        next = next_query_tile(s, sequence, row0, F::ROWS, first, next);
        if (F::STAGES == 2 && next.head < s.group && !PLAIN) fetch(next, stage ^ 1);
        DTK_UNROLL_BY(1)
        for (int part = 0; part < F::COLS; part += F::SUBTILE) {
            int col0 = tile * F::COLS + part, k_row = row0 + uniform_row;
            span q = span_of(s.q, sequence, col0, F::SUBTILE),
                 k = span_of(s.k, sequence, k_row, F::UNIFORM_ROWS);
            T *qt = qs + stage * SIZE, *dt = ds + stage * SIZE;
            if (!PLAIN && (k_row >= s.k.length || col0 >= s.q.length || fully_masked(s, q, k)))
                continue;
            tile_scores<F, D, F::ROWS, F::COLS>(c, ks, product_row, qt, part, s.dim);
            if (F::USES_WGMMA && GRADS != 2)
                tile_scores<F, D, F::ROWS, F::COLS>(dp, vs, product_row, dt, part, s.dim);
            if (PLAIN && next.head < s.group) fetch(next, stage ^ 1);
            wait_scores<F, GRADS == 2 ? 0 : 1>(c, s);
            mask_queries(c, s, row0 + warp_row, col0, fully_visible(s, q, k), rows + warp_row,
                cols[stage] + part);
            DTK_UNROLL
            for (int e = 0; e < M * J * 4; e++) {
                float *p = &c[e / 4 / J][e / 4 % J][e % 4];
                *p = exp2_of(*p * s.scale_log2 - lse[stage][part + column_of<J>(e)]);
            }
            if (GRADS & 2) tile_accumulate<F, D, F::COLS>(dv, c, dt, part, s.dim);
            if (GRADS == 2) wait_products<F, 0>(dv);
            if (GRADS == 2) continue;
            if (!F::USES_WGMMA)
                tile_scores<F, D, F::ROWS, F::COLS>(dp, vs, product_row, dt, part, s.dim);
            wait_products<F, GRADS / 2>(dp);
            score_gradients(
                c, dp, s, [&](int e) { return lse[stage][part + column_of<J>(e)]; },
                [&](int e) { return row_delta[stage][part + column_of<J>(e)]; });
            tile_accumulate<F, D, F::COLS>(dk, c, qt, part, s.dim);
            wait_products<F, 0>(dk);
            if (GRADS & 2) wait_products<F, 0>(dv);
        }
        if (F::STAGES == 1) __syncthreads();
        if (F::STAGES == 1 && next.head < s.group) fetch(next, 0);
    }
    cp_async_wait_all(), __syncthreads();
    store_key_gradients<T, D, GRADS>(a, s, key_at(s, sequence, row0 + warp_row, kv),
        s.k.length - row0 - warp_row, dk, dv, (float *)ks + warp_row * D);
}

/* ---- launching ---- */

/* largest number of blocks of a grid in its second dimension, and also in its third dimension */
static const int64_t MAX_GRID_YZ = 65535;

static int64_t tile_count(int64_t length, int64_t each) { return (length + each - 1) / each; }

static token_axis make_axis(
    const int32_t *position, const int32_t *document, int64_t length, int each, int64_t shift) {
    token_axis x = { position, document, NULL, (int)length, each, (int)tile_count(length, each),
        (int)shift };
    return x;
}

/* Checks the arguments of a forward or backward call and computes *out, except for the tiles.
   `aligned` is the bitwise or of the addresses of the inputs. Calls whose row indices exceed 32
   bits are refused. The scale must be positive, because the kernels compute the maximum of the
   scores before they multiply by the scale. */
template <class args>
static dt_status make_attention_shape(attention_shape *out, const args &a, size_t aligned) {
    int64_t row = a.heads * a.dim, longest = (a.tq > a.tk ? a.tq : a.tk) + 256;
    dt_attention_mask s = a.mask;
    attention_shape x;
    if (a.dtype != DT_F32 && a.dtype != DT_BF16 && a.dtype != DT_F16) return DT_ERR_UNSUPPORTED;
    if (a.kv_heads < 1 || a.heads % a.kv_heads || !a.work) return DT_ERR_ARG;
    if (a.batch * a.heads * longest > INT32_MAX || row > INT32_MAX / 256 || a.heads > MAX_GRID_YZ ||
        !(a.scale > 0) || a.dim > 256)
        return DT_ERR_UNSUPPORTED;
    if (!s.causal) s.q_position = s.k_position = NULL;
    if (!s.k_document) s.q_document = NULL;
    x.q = make_axis(s.q_position, s.q_document, a.tq, 1, a.tk - a.tq);
    x.k = make_axis(s.k_position, s.k_document, a.tk, 1, 0);
    x.causal = s.causal;
    x.heads = (int)a.heads;
    x.kv_heads = (int)a.kv_heads;
    x.group = (int)(a.heads / a.kv_heads);
    x.dim = (int)a.dim;
    x.q_row = (int)row;
    x.k_row = (int)(a.kv_heads * a.dim);
    x.first_sequence = x.first_kv = 0;
    x.window = !s.causal ? 0 : s.window < INT32_MAX / 2 ? s.window : INT32_MAX / 2;
    x.cap = (float)(a.soft_cap / a.scale);
    x.scale = (float)a.scale;
    x.scale_log2 = (float)(a.scale * DTK_LOG2_E);
    x.aligned = (aligned | (size_t)a.dim * (a.dtype == DT_F32 ? 4 : 2)) % 16 == 0;
    x.aligned4 = a.dim % 4 == 0;
    *out = x;
    return DT_OK;
}

/* Splits the queries and the keys into tiles. If the call has mask arrays, also computes the spans
   of the tiles in the scratch memory `work`. *used is set to the number of bytes of the spans. */
static dt_status split_tiles(attention_shape *s, int64_t batch, int each_q, int each_k, char *work,
    size_t work_bytes, size_t *used, void *stream) {
    bool arrays = s->q.position || s->k.position || s->k.document;
    s->q = make_axis(s->q.position, s->q.document, s->q.length, each_q, s->q.shift);
    s->k = make_axis(s->k.position, s->k.document, s->k.length, each_k, 0);
    int64_t of_q = batch * s->q.tiles, of_k = batch * s->k.tiles;
    *used = arrays ? (size_t)(of_q + of_k) * sizeof(span) : 0;
    if (*used > work_bytes) return DT_ERR_ARG;
    if (!arrays) return DT_OK;
    s->q.spans = (span *)work;
    s->k.spans = s->q.spans + of_q;
    if (of_q > 0)
        DT_LAUNCH(spans_kernel, (unsigned)tile_count(of_q, WARPS), BLOCK, 0, stream_of(stream),
            s->q, batch);
    if (of_k > 0)
        DT_LAUNCH(spans_kernel, (unsigned)tile_count(of_k, WARPS), BLOCK, 0, stream_of(stream),
            s->k, batch);
    return DT_OK;
}

/* Returns true if the kernel's code for this device has wgmma. Code without wgmma has smaller
   launch bounds (see threads_of). */
static bool has_wgmma_code(const void *kernel, int threads) {
    cudaFuncAttributes code;
    if (cudaFuncGetAttributes(&code, kernel) == cudaSuccess)
        return code.maxThreadsPerBlock >= threads;
    (void)cudaGetLastError();
    return false;
}

static bool is_plain(const attention_shape &s) {
    return s.aligned && !s.q.position && !s.k.position && !s.k.document;
}

template <class T, int D, bool USE_WGMMA, class Kernel>
static dt_status attention_with(
    const dt_attention_args &a, attention_shape s, Kernel kernel, void *stream) {
    typedef tile_config<T, D, 0, USE_WGMMA> F;
    size_t bytes = (size_t)(F::ROWS + 2 * F::STAGES * F::COLS) * D * sizeof(T), used;
    dt_status status =
        split_tiles(&s, a.batch, F::ROWS, F::COLS, (char *)a.work, a.work_bytes, &used, stream);
    if (status != DT_OK) return status;
    for (int64_t b = 0; b < a.batch && s.q.tiles > 0; b += MAX_GRID_YZ) {
        dim3 grid(
            s.q.tiles, s.heads, (unsigned)(a.batch - b < MAX_GRID_YZ ? a.batch - b : MAX_GRID_YZ));
        s.first_sequence = (int)b;
        DTK_LAUNCH_SHARED(kernel, grid, F::THREADS, bytes, stream, a, s);
    }
    return launch_status();
}

template <class T, int D>
static dt_status attention_of(const dt_attention_args &a, const attention_shape &s, void *stream) {
    if constexpr (sizeof(T) == 2 && D <= 128)
        if (has_wgmma_code((const void *)attention_wgmma_kernel<T, D, true>,
                tile_config<T, D, 0, true>::THREADS))
            return is_plain(s) ? attention_with<T, D, true>(
                                     a, s, attention_wgmma_kernel<T, D, true>, stream)
                               : attention_with<T, D, true>(
                                     a, s, attention_wgmma_kernel<T, D, false>, stream);
    return attention_with<T, D, false>(a, s, attention_kernel<T, D>, stream);
}

#define DTK_BY_DIM(function, T, a, s, stream) \
    ((a).dim <= 64       ? function<T, 64>(a, s, stream) \
        : (a).dim <= 128 ? function<T, 128>(a, s, stream) \
                         : function<T, 256>(a, s, stream))

#define DTK_BY_DTYPE_AND_DIM(function, a, s, stream) \
    ((a).dtype == DT_F32       ? DTK_BY_DIM(function, float, a, s, stream) \
        : (a).dtype == DT_BF16 ? DTK_BY_DIM(function, bf16, a, s, stream) \
                               : DTK_BY_DIM(function, f16, a, s, stream))

static dt_status cuda_attention(const dt_attention_args *args, void *stream) {
    dt_attention_args a = *args;
    attention_shape s;
    dt_status status = make_attention_shape(&s, a, (size_t)a.q | (size_t)a.k | (size_t)a.v);
    if (status != DT_OK) return status;
    if (a.dtype == DT_F32) a.wide = 1;
    s.aligned4 = s.aligned4 && (size_t)a.out % 16 == 0;
    return DTK_BY_DTYPE_AND_DIM(attention_of, a, s, stream);
}

/* Launches the backward for `sequences` sequences, beginning with q.first_sequence, and for
   `kv_heads` kv heads, beginning with q.first_kv. q and k describe the same call: q has the tiles
   of the backward of the queries, k those of the backward of the keys and values. */
template <class T, int D, bool USE_WGMMA, bool PLAIN>
static dt_status attention_back_some(const dt_attention_back_args &a, const attention_shape &q,
    const attention_shape &k, int sequences, int kv_heads, float *delta, void *stream) {
    typedef tile_config<T, D, 1, USE_WGMMA> Q;
    typedef tile_config<T, D, 2, USE_WGMMA> K;
    const int BOTH = D <= 128 ? 3 : 1;
    size_t bytes_q = (size_t)2 * (Q::ROWS + Q::STAGES * Q::COLS) * D * sizeof(T);
    size_t bytes_k = (size_t)2 * (K::ROWS + K::STAGES * K::COLS) * D * sizeof(T);
    dim3 rows((unsigned)tile_count(a.tq, DELTA_ROWS), kv_heads * q.group, sequences);
    dim3 grid_q(q.q.tiles, kv_heads * q.group, sequences), grid_k(k.k.tiles, kv_heads, sequences);
    if (a.tq > 0) DT_LAUNCH(delta_kernel<T>, rows, BLOCK, 0, stream_of(stream), a, q, delta);
    if (a.tq > 0 && a.dq)
        DTK_LAUNCH_SHARED((attention_back_q_kernel<T, D, USE_WGMMA, PLAIN>), grid_q, Q::THREADS,
            bytes_q, stream, a, q, delta);
    if (a.tk == 0) return DT_OK;
    if (BOTH == 3 && a.dk && a.dv) {
        DTK_LAUNCH_SHARED((attention_back_kv_kernel<T, D, BOTH, USE_WGMMA, PLAIN>), grid_k,
            K::THREADS, bytes_k, stream, a, k, delta);
        return DT_OK;
    }
    if (a.dk)
        DTK_LAUNCH_SHARED((attention_back_kv_kernel<T, D, 1, USE_WGMMA, false>), grid_k, K::THREADS,
            bytes_k, stream, a, k, delta);
    if (a.dv)
        DTK_LAUNCH_SHARED((attention_back_kv_kernel<T, D, 2, USE_WGMMA, false>), grid_k, K::THREADS,
            bytes_k, stream, a, k, delta);
    return DT_OK;
}

/* Launches the backward in portions whose deltas fit into the scratch memory. A portion consists of
   one or more sequences. If the deltas of one sequence do not fit, a portion consists of one or
   more kv heads of a sequence. */
template <class T, int D, bool USE_WGMMA, bool PLAIN>
static dt_status attention_back_with(
    const dt_attention_back_args &a, attention_shape q, void *stream) {
    typedef tile_config<T, D, 1, USE_WGMMA> Q;
    typedef tile_config<T, D, 2, USE_WGMMA> K;
    size_t used_q, used_k;
    attention_shape k = q;
    char *work = (char *)a.work;
    dt_status status =
        split_tiles(&q, a.batch, Q::ROWS, Q::COLS, work, a.work_bytes, &used_q, stream);
    if (status != DT_OK) return status;
    status = split_tiles(
        &k, a.batch, K::COLS, K::ROWS, work + used_q, a.work_bytes - used_q, &used_k, stream);
    if (status != DT_OK) return status;
    float *delta = (float *)(work + used_q + used_k);
    int64_t capacity = (int64_t)((a.work_bytes - used_q - used_k) / sizeof(float)),
            of_kv = q.group * a.tq;
    int64_t kv_heads = of_kv > 0 ? capacity / of_kv : a.kv_heads;
    int64_t sequences = kv_heads / a.kv_heads < MAX_GRID_YZ ? kv_heads / a.kv_heads : MAX_GRID_YZ;
    if (kv_heads == 0) return DT_ERR_ARG;
    if (sequences == 0) sequences = 1;
    if (kv_heads > a.kv_heads) kv_heads = a.kv_heads;
    for (int64_t b = 0; b < a.batch; b += sequences) {
        for (int64_t kv = 0; kv < a.kv_heads && status == DT_OK; kv += kv_heads) {
            int64_t some = a.batch - b < sequences ? a.batch - b : sequences;
            q.first_sequence = k.first_sequence = (int)b;
            q.first_kv = k.first_kv = (int)kv;
            int64_t heads = a.kv_heads - kv < kv_heads ? a.kv_heads - kv : kv_heads;
            status = attention_back_some<T, D, USE_WGMMA, PLAIN>(
                a, q, k, (int)some, (int)heads, delta, stream);
        }
    }
    return status == DT_OK ? launch_status() : status;
}

template <class T, int D>
static dt_status attention_back_of(
    const dt_attention_back_args &a, const attention_shape &s, void *stream) {
    if constexpr (sizeof(T) == 2 && D <= 128)
        if (has_wgmma_code((const void *)attention_back_q_kernel<T, D, true, true>,
                tile_config<T, D, 1, true>::THREADS))
            return is_plain(s) ? attention_back_with<T, D, true, true>(a, s, stream)
                               : attention_back_with<T, D, true, false>(a, s, stream);
    return attention_back_with<T, D, false, false>(a, s, stream);
}

static dt_status cuda_attention_back(const dt_attention_back_args *args, void *stream) {
    dt_attention_back_args a = *args;
    attention_shape s;
    dt_status status =
        make_attention_shape(&s, a, (size_t)a.q | (size_t)a.k | (size_t)a.v | (size_t)a.dout);
    if (status != DT_OK) return status;
    if (a.dtype == DT_F32) a.wide = 1;
    s.aligned4 = s.aligned4 && ((size_t)a.dq | (size_t)a.dk | (size_t)a.dv) % 16 == 0;
    return DTK_BY_DTYPE_AND_DIM(attention_back_of, a, s, stream);
}
#undef DTK_BY_DIM
#undef DTK_BY_DTYPE_AND_DIM
#undef DTK_ATTENTION_KERNEL
#undef DTK_LOG2_E

// ==== 17. The table =============================================================================

extern "C" const dt_kernels *dt_kernels_cuda(void) {
    static const dt_kernels table = { .name = "cuda",
        .alloc = cuda_alloc,
        .free = cuda_free,
        .move = cuda_move,
        .sync = cuda_sync,
        .user = NULL,
        .open = cuda_open,
        .close = dt_cuda_close,
        .pin = cuda_pin,
        .unpin = cuda_unpin,
        .can_access = cuda_can_access,
        .enable_peer_access = cuda_enable_peer_access,
        .event_record = cuda_event_record,
        .event_query = cuda_event_query,
        .event_wait = cuda_event_wait,
        .event_destroy = cuda_event_destroy,
        .work_bytes = (size_t)32 << 20, /* the size that cuBLASLt recommends on Hopper */
        .max_saved_logits = (size_t)1 << 30,
#define DTK_FUNCTION(k) .k = cuda_##k,
        DT_KERNELS(DTK_FUNCTION)
#undef DTK_FUNCTION
    };
    return &table;
}

/* Returns false if this device cannot run this build of the kernels. Writes advice to `text` in
   this case, and also if another build would be faster. Code for an older GPU runs on a newer GPU,
   because the driver compiles the code again when the program starts. Code uses tensor cores only
   if it was compiled for sm_80 or later. Only code for sm_90a uses wgmma, and sm_90a code runs on
   no other GPU. A kernel's attributes say for which GPU the kernel was compiled. */
static bool check_build(char *text, size_t text_bytes) {
    cudaFuncAttributes code;
    int device = 0, major = 0, minor = 0;
    bool known =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
    bool hopper = major == 9 && minor == 0;
    bool pieces =
        cudaFuncGetAttributes(&code, (const void *)(fill_kernel<float, float>)) == cudaSuccess;
    const char *a = hopper ? "a" : "";
    (void)cudaGetLastError();
    if (!known) return true;
    if (!pieces)
        snprintf(text, text_bytes, "this build has no code for an sm_%d%d: nvcc -arch=sm_%d%d%s",
            major, minor, major, minor, a);
    else if (code.ptxVersion / 10 < major ||
             (hopper && !has_wgmma_code((const void *)attention_wgmma_kernel<bf16, 64, true>, 128)))
        snprintf(text, text_bytes,
            "this build is for sm_%d and the GPU is an sm_%d%d: nvcc -arch=sm_%d%d%s makes it "
            "faster",
            code.ptxVersion, major, minor, major, minor, a);
    return pieces;
}

/* If cudaGetDeviceCount fails, it does not set `devices`. Its error, cudaErrorInsufficientDriver,
   is the same for an old driver and for a missing driver. Only cudaDriverGetVersion can tell the
   two cases apart: it sets the version to 0 if there is no driver. */
extern "C" dt_status dt_cuda_ready(char *text, size_t text_bytes) {
    int devices = 0, driver = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (text_bytes > 0) text[0] = 0;
    if (error == cudaSuccess && devices > 0)
        return check_build(text, text_bytes) ? DT_OK : DT_ERR_DEVICE;
    (void)cudaGetLastError();
    if (error == cudaSuccess) error = cudaErrorNoDevice;
    bool no_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    const char *why = no_driver ? "no NVIDIA driver found" : cudaGetErrorName(error);
    if (text_bytes > 0) snprintf(text, text_bytes, "%s", why);
    return DT_ERR_DEVICE;
}

} // namespace dt_cuda

// ==== 18. NCCL ==================================================================================

#ifdef DT_NCCL

/* Each rank has a GPU. Large data in device memory go through NCCL. Everything else goes over the
   rank's transport: scalars, the frames with which ranks compare their calls, wait reports,
   failures, and messages of up to DT_NCCL_MIN_BYTES.

   An nccl channel is an ncclComm with its own stream. Each group has one, made by ncclCommSplit
   from that of its parent group. For messages, each ordered pair of ranks (sender, receiver) gets
   an nccl channel with its first message. (A channel without "nccl" is the number of a group.)

       rank 0: ncclGetUniqueId --broadcast--> all ranks: ncclCommInitRankConfig    (the world)
       parent group: ncclCommSplit                                                 (each group)

   Each collective is enqueued on the stream of its group's nccl channel. That stream first waits
   for an event in the rank's own stream, which marks that the collective's inputs are ready.
   Collectives are enqueued in the order of the group's calls, which is the same on all ranks. The
   host regards a collective as done as soon as it is enqueued; dt_comm.h (section 18) says how it
   completes on the device.

   KNOWN LIMIT. An NCCL kernel occupies the device until the other ranks' kernels of the same
   operation run. If ranks start operations of different groups in different orders, the kernels of
   these operations must run concurrently, and NCCL does not guarantee that they do: with several
   communicators it requires one order on all ranks. So start overlapping operations in the same
   order on all ranks. NCCL 2.26 and later can enforce this order on the device, if the environment
   variable NCCL_LAUNCH_ORDER_IMPLICIT is 1.

   docs.nvidia.com/deeplearning/nccl, "Communicators", "Fault tolerance", "Group calls". */

/* The functions of NCCL that this section calls. With DT_NCCL_DLOPEN they are loaded from
   libnccl.so.2 when a run begins; otherwise the program is linked with NCCL. */
#define DTK_NCCL_FUNCTIONS(X) \
    X(GetUniqueId) \
    X(CommInitRankConfig) \
    X(CommSplit) \
    X(CommGetAsyncError) \
    X(CommFinalize) \
    X(CommDestroy) \
    X(CommAbort) \
    X(GetErrorString) \
    X(GetLastError) \
    X(AllReduce) \
    X(Reduce) \
    X(ReduceScatter) \
    X(AllGather) \
    X(Broadcast) \
    X(Send) \
    X(Recv) \
    X(GroupStart) \
    X(GroupEnd)

struct dt__nccl_channel {
    ncclComm_t comm;
    void *queue;
    bool call_in_progress; /* true if the last call on comm may be in progress */
    bool is_borrowed;      /* true if comm belongs to the program, and dt does not free it */
    /* number of operations so far that were begun (for messages: that the receiver is ready for),
       and that are enqueued on the stream */
    uint64_t begun, enqueued;
    ncclUniqueId id; /* for messages: sender and receiver initialize comm with this id */
    bool has_id;
    float *f32_window; /* (DT_NCCL_F32_WINDOW) memory for sums of 16-bit types in f32 */
};

#ifndef DT_NCCL_F32_WINDOW
#define DT_NCCL_F32_WINDOW (4 << 20) /* number of elements of dt__nccl_channel.f32_window */
#endif
#ifndef DT_NCCL_MIN_BYTES
#define DT_NCCL_MIN_BYTES DT_EAGER_BYTES /* messages with more bytes go through NCCL */
#endif

struct dt__nccl {
    const dt__comm_functions *dt; /* the functions of dt_comm.h */
    const dt_kernels *kernels;
    void *stream; /* the rank's own */
    size_t bytes; /* of this struct and p2p_channels */
    dt__nccl_channel world_channel;
    /* (2 * ranks): element 2 r is for sends to rank r, element 2 r + 1 for receives from rank r */
    dt__nccl_channel *p2p_channels;
#define DTK_NCCL_POINTER(name) decltype(&nccl##name) name;
    DTK_NCCL_FUNCTIONS(DTK_NCCL_POINTER)
#undef DTK_NCCL_POINTER
};

namespace dt_cuda {

static_assert(sizeof(ncclUniqueId) == DT__KEY_BYTES, "an announcement carries an ncclUniqueId");

typedef dt__nccl_channel nccl_channel;

static dt__nccl *nccl_of(const dt_work *work) { return work->comm->world->nccl; }

static bool nccl_failed(const dt__world *world) { return world->nccl->dt->error(world->ctx) != 0; }

/* ---- nccl channels ---- */

/* Communicators are nonblocking: a call may return ncclInProgress, and then no other call may use
   the communicator until ncclCommGetAsyncError says that the call is done. After a failure all
   communicators are aborted, because an abort also ends kernels that hang on the device. */

/* Fails the context with NCCL's error texts. Always returns false. */
static bool nccl_fail(
    dt__world *world, const nccl_channel *channel, const char *what, ncclResult_t result) {
    const dt__nccl *nccl = world->nccl;
    const char *more = nccl->GetLastError(channel ? channel->comm : NULL);
    nccl->dt->fail(world, DT_ERR_COMM, "NCCL: %s: %s%s%s", what, nccl->GetErrorString(result),
        more && more[0] ? ": " : "", more ? more : "");
    return false;
}

/* Checks the result of a call on the communicator. Returns true if the call is done or in progress.
   If the call failed, fails the context and returns false. */
static bool nccl_channel_result(
    dt__world *world, nccl_channel *channel, const char *what, ncclResult_t result) {
    channel->call_in_progress = result == ncclInProgress;
    return result == ncclSuccess || channel->call_in_progress ||
           nccl_fail(world, channel, what, result);
}

/* Returns 1 if no call is in progress, so that the next call may be made; 0 if a call is in
   progress; -1 if the context has failed. */
static int nccl_channel_is_idle(dt__world *world, nccl_channel *channel) {
    ncclResult_t state = ncclSuccess;
    if (nccl_failed(world)) return -1;
    if (!channel->call_in_progress) return 1;
    ncclResult_t result = world->nccl->CommGetAsyncError(channel->comm, &state);
    if (result != ncclSuccess)
        return nccl_fail(world, channel, "ncclCommGetAsyncError", result) - 1;
    if (state == ncclInProgress) return 0;
    return nccl_channel_result(world, channel, "a communicator", state) ? 1 : -1;
}

/* Opens the nccl channel's stream on the rank's device. Returns false with the context failed on
   failure. */
static bool nccl_channel_open(dt__world *world, nccl_channel *channel) {
    char why[160] = "";
    dt_cuda_desc desc = { dt_cuda_device(world->nccl->stream), NULL, 1 };
    if (!channel->queue) channel->queue = dt_cuda_open(desc, why, sizeof why);
    if (!channel->queue) world->nccl->dt->fail(world, DT_ERR_DEVICE, "a queue for NCCL: %s", why);
    return channel->queue != NULL;
}

static ncclConfig_t nccl_config() {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return config;
}

/* Starts ncclCommInitRankConfig. The communicator can be used once nccl_channel_is_idle returns 1.
   Returns false if the context has failed. */
static bool nccl_channel_connect(
    dt__world *world, nccl_channel *channel, ncclUniqueId id, int rank, int size) {
    ncclConfig_t config = nccl_config();
    if (!nccl_channel_open(world, channel)) return false;
    return nccl_channel_result(world, channel, "ncclCommInitRankConfig",
        world->nccl->CommInitRankConfig(&channel->comm, size, id, rank, &config));
}

static void nccl_channel_close(dt__world *world, nccl_channel *channel) {
    const dt__nccl *nccl = world->nccl;
    if (channel->comm && !channel->is_borrowed) nccl->CommDestroy(channel->comm);
    nccl->dt->free(
        world->ctx, DT_MEM_COMM, channel->f32_window, DT_NCCL_F32_WINDOW * sizeof(float));
    dt_cuda_close(channel->queue);
    memset(channel, 0, sizeof *channel);
}

/* A step of dt__comm_functions.wait. */
static int nccl_channel_connected(dt_work *work) {
    return nccl_channel_is_idle(work->comm->world, work->nccl_channel);
}

static void nccl_channel_await(dt_comm *comm, nccl_channel *channel) {
    comm->world->nccl->dt->wait(comm, channel, nccl_channel_connected);
}

/* Starts ncclCommFinalize, which ends once the other ranks of the communicator have called it too.
   The wait for it has a timeout; ncclCommDestroy alone would wait for the other ranks without
   one. */
static void nccl_channel_finalize(dt_comm *comm, nccl_channel *channel) {
    dt__world *world = comm->world;
    nccl_channel_await(comm, channel);
    if (channel->comm && !channel->is_borrowed && !nccl_failed(world))
        nccl_channel_result(
            world, channel, "ncclCommFinalize", world->nccl->CommFinalize(channel->comm));
}

/* ---- a group's collectives ---- */

static ncclDataType_t nccl_type(dt_dtype dtype) {
    switch (dtype) {
    case DT_BF16: return ncclBfloat16;
    case DT_F16: return ncclFloat16;
    case DT_I32: return ncclInt32;
    case DT_U8: return ncclUint8;
    case DT_I64: return ncclInt64;
    case DT_F64: return ncclFloat64;
    default: return ncclFloat32;
    }
}

static ncclRedOp_t nccl_op(dt_op op) {
    switch (op) {
    case DT_AVG: return ncclAvg;
    case DT_MAX: return ncclMax;
    case DT_MIN: return ncclMin;
    case DT_PROD: return ncclProd;
    default: return ncclSum;
    }
}

static size_t nccl_type_bytes(dt_dtype dtype) {
    switch (dtype) {
    case DT_F64:
    case DT_I64: return 8;
    case DT_BF16:
    case DT_F16: return 2;
    case DT_U8: return 1;
    default: return 4;
    }
}

/* Returns the address of element i of a buffer. */
static char *nccl_element(const dt_work *work, const void *p, size_t i) {
    return (char *)p + i * nccl_type_bytes(work->call.dtype);
}

/* Returns 1 if the call's sum must be accumulated in f32. NCCL rounds to the element type at every
   hop. So dt casts bf16 and f16 data of more than two ranks to f32, lets NCCL sum them in f32, and
   rounds once, as on every backend. The data are cast in windows of DT_NCCL_F32_WINDOW elements
   (f32_window). A sum of two values is rounded only once anyway. NCCL chooses the order of a
   sum. */
static bool needs_f32_window(const dt_comm *comm, const dt__call *call) {
    return comm->world->nccl->dt->pattern(call->op)->reduces && nccl_type_bytes(call->dtype) == 2 &&
           comm->base.size > 2 && call->redop != DT_MAX && call->redop != DT_MIN;
}

/* Returns the number of elements of each block in the current window. */
static size_t nccl_window_count(const dt_work *work) {
    size_t left = work->call.count - work->at;
    return left < work->window_count ? left : work->window_count;
}

/* Casts the elements of the current window, on the nccl channel's stream. With back false, casts
   them from call->send to f32_window, for every block of call->send. With back true, casts the
   result from f32_window to call->recv. */
static void nccl_cast(dt_work *work, bool back) {
    const dt__call *call = &work->call;
    const dt__nccl *nccl = nccl_of(work);
    bool all_blocks = !back && nccl->dt->pattern(call->op)->send_blocks;
    int first = call->op == DT__REDUCE_SCATTER && back ? work->comm->base.rank : 0;
    size_t n = nccl_window_count(work);
    for (int i = 0; i < (all_blocks ? work->comm->base.size : 1); i++) {
        size_t at = (all_blocks ? (size_t)i * call->count : 0) + work->at;
        void *narrow = nccl_element(work, back ? call->recv : call->send, at);
        void *wide = work->nccl_channel->f32_window + (size_t)(first + i) * n;
        dt_cast_args a = {};
        a.dtype = back ? call->dtype : DT_F32;
        a.from = back ? DT_F32 : call->dtype;
        a.out = back ? narrow : wide;
        a.in = back ? wide : narrow;
        a.count = n;
        dt_status status = nccl->kernels->cast(&a, work->nccl_channel->queue);
        if (status) nccl->dt->data_failed(work->comm, call, status);
    }
}

/* Enqueues a gather, scatter or all-to-all as sends and receives, all in one NCCL group call. */
static ncclResult_t nccl_enqueue_p2p(dt_work *work, cudaStream_t stream) {
    const dt_comm *comm = work->comm;
    const dt__call *c = &work->call;
    const dt__nccl *nccl = nccl_of(work);
    const dt__pattern *pattern = nccl->dt->pattern(c->op);
    ncclDataType_t type = nccl_type(c->dtype);
    ncclResult_t result = nccl->GroupStart();
    int me = comm->base.rank;
    bool v = c->op == DT__ALL_TO_ALL_V;
    size_t from = 0, at = 0; /* the first element for and of rank `other` */
    for (int other = 0; other < comm->base.size; other++) {
        bool sends =
            (pattern->all_send || me == c->peer) && (pattern->all_recv || other == c->peer);
        bool receives =
            (pattern->all_recv || me == c->peer) && (pattern->all_send || other == c->peer);
        size_t out = v ? c->send_counts[other] : c->count,
               in = v ? c->recv_counts[other] : c->count;
        const char *send = nccl_element(work, c->send, from);
        char *recv = nccl_element(work, c->recv, at);
        from += v || pattern->send_blocks ? out : 0;
        at += v || pattern->all_send ? in : 0;
        if (other == me && send == recv) continue;
        if (sends && out > 0 && result == ncclSuccess)
            result = nccl->Send(send, out, type, other, work->nccl_channel->comm, stream);
        if (receives && in > 0 && result == ncclSuccess)
            result = nccl->Recv(recv, in, type, other, work->nccl_channel->comm, stream);
        if (result == ncclInProgress) result = ncclSuccess; /* GroupEnd returns the final result */
    }
    ncclResult_t end = nccl->GroupEnd();
    return result == ncclSuccess ? end : result;
}

/* Enqueues the current window of a collective on the nccl channel's stream. wide: true if its data
   are in f32_window. */
static ncclResult_t nccl_enqueue_window(dt_work *work, bool wide) {
    const dt__call *c = &work->call;
    const dt__nccl *nccl = nccl_of(work);
    size_t n = nccl_window_count(work);
    const void *send = wide ? work->nccl_channel->f32_window : c->send;
    void *recv = wide ? work->nccl_channel->f32_window : c->recv;
    ncclDataType_t type = nccl_type(wide ? DT_F32 : c->dtype);
    ncclRedOp_t op = nccl_op(c->redop);
    ncclComm_t comm = work->nccl_channel->comm;
    cudaStream_t stream = stream_of(work->nccl_channel->queue);
    switch (c->op) {
    case DT__ALL_REDUCE: return nccl->AllReduce(send, recv, n, type, op, comm, stream);
    case DT__REDUCE: return nccl->Reduce(send, recv, n, type, op, c->peer, comm, stream);
    case DT__REDUCE_SCATTER:
        if (wide) recv = work->nccl_channel->f32_window + (size_t)work->comm->base.rank * n;
        return nccl->ReduceScatter(send, recv, n, type, op, comm, stream);
    case DT__ALL_GATHER: return nccl->AllGather(send, recv, n, type, comm, stream);
    case DT__BROADCAST: return nccl->Broadcast(recv, recv, n, type, c->peer, comm, stream);
    default: return nccl_enqueue_p2p(work, stream);
    }
}

/* Records the event `mark` in the rank's own stream, and returns it. Called when the operation is
   called: once the stream reaches the event, the operation's inputs are ready and no earlier kernel
   uses its outputs. A later event could deadlock, because by then the stream may be waiting for
   data that other ranks send only after this operation. On failure fails the context. */
static void *nccl_record_inputs(dt_work *work, void *mark) {
    const dt__nccl *nccl = nccl_of(work);
    void *made = nccl->kernels->event_record(nccl->stream, mark);
    if (!made) nccl->dt->data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    return made ? made : mark;
}

/* Makes the nccl channel's stream wait for the event `mark`. Returns false with the context failed
   on failure. */
static bool nccl_channel_wait_event(dt_work *work, nccl_channel *channel, void *mark) {
    dt_status status = nccl_of(work)->kernels->event_wait(channel->queue, mark);
    if (status) nccl_of(work)->dt->data_failed(work->comm, &work->call, status);
    return status == DT_OK;
}

/* Counts an operation as enqueued, and records its event after everything that is enqueued on the
   nccl channel's stream. Returns 1, or -1 if the context has failed. */
static int nccl_enqueued(dt_work *work, nccl_channel *channel) {
    const dt__nccl *nccl = nccl_of(work);
    void *mark = nccl->kernels->event_record(channel->queue, work->device_event);
    channel->enqueued++;
    work->nccl_channel = channel;
    work->on_device = 1;
    if (mark)
        work->device_event = mark;
    else
        nccl->dt->data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    return mark ? 1 : -1;
}

/* Advances a collective. Stages. 0: wait until all earlier collectives of the nccl channel are
   enqueued, then enqueue the first window. 1: a window is enqueued; enqueue the next window. */
static int nccl_collective(dt_work *work) {
    dt_comm *comm = work->comm;
    nccl_channel *channel = work->nccl_channel;
    const dt__pattern *pattern = nccl_of(work)->dt->pattern(work->call.op);
    bool wide = needs_f32_window(comm, &work->call),
         sum_here = pattern->all_recv || comm->base.rank == work->call.peer;
    size_t shares = pattern->send_blocks ? (size_t)comm->base.size : 1;
    if (work->nccl_sequence != channel->enqueued + 1) return 0;
    for (;;) {
        int idle = nccl_channel_is_idle(comm->world, channel);
        if (idle <= 0) return idle;
        if (work->stage == 0) {
            if (!nccl_channel_wait_event(work, channel, work->device_event)) return -1;
            work->window_count = wide ? DT_NCCL_F32_WINDOW / shares : work->call.count + 1;
        } else {
            if (wide && sum_here) nccl_cast(work, true);
            work->at += work->window_count;
            if (work->at >= work->call.count) return nccl_enqueued(work, channel);
        }
        work->stage = 1;
        if (wide) nccl_cast(work, false);
        nccl_channel_result(comm->world, channel, pattern->name, nccl_enqueue_window(work, wide));
    }
}

/* Returns nccl_collective if the collective moves data in device memory, and so goes through NCCL;
   else NULL. */
static dt__advance_fn nccl_choose(dt_comm *comm, const dt__call *call) {
    nccl_channel *channel = comm->nccl_channel;
    const dt__comm_functions *dt = comm->world->nccl->dt;
    if (call->host_memory || !channel || !dt->pattern(call->op)->counted) return NULL;
    if (call->count == 0 && call->op != DT__ALL_TO_ALL_V) return NULL;
    if (needs_f32_window(comm, call) && !channel->f32_window)
        channel->f32_window = (float *)dt->alloc(
            comm->world->ctx, DT_MEM_COMM, DT_NCCL_F32_WINDOW * sizeof(float), "sums in f32");
    return nccl_collective;
}

static void nccl_begin(dt_work *work) {
    work->nccl_channel = work->comm->nccl_channel;
    work->in_library = 1;
    work->nccl_sequence = ++work->nccl_channel->begun;
    work->device_event = nccl_record_inputs(work, work->device_event);
}

/* ---- messages ---- */

/* NCCL's messages have no tags: ncclSend and ncclRecv match in the order of their calls. dt_comm.h
   matches the messages (section 13), and the nccl channel numbers those whose receivers are ready:

       sender      announces the message, with the nccl channel's id
       receiver    answers when a receive has matched it; both sides count the answers
       both        call ncclSend and ncclRecv in the order of the answers

   So no message waits for an earlier one whose receive is not posted yet. */

static nccl_channel *nccl_channel_of(const dt__p2p *p2p) {
    const dt_comm *comm = p2p->work->comm;
    return &comm->world->nccl
                ->p2p_channels[2 * comm->group->ranks[p2p->peer] + (p2p->op == DT__RECV)];
}

static int nccl_takes(dt__p2p *p2p) {
    dt_work *work = p2p->work;
    if (work->call.host_memory || p2p->peer == work->comm->base.rank) return 0;
    if (p2p->count * nccl_type_bytes(work->call.dtype) <= DT_NCCL_MIN_BYTES) return 0;
    p2p->device_event = nccl_record_inputs(work, p2p->device_event);
    return 1;
}

static const void *nccl_send_key(dt__p2p *p2p) {
    dt__world *world = p2p->work->comm->world;
    nccl_channel *channel = nccl_channel_of(p2p);
    if (channel->has_id) return &channel->id;
    ncclResult_t result = world->nccl->GetUniqueId(&channel->id);
    channel->has_id = result == ncclSuccess || nccl_fail(world, NULL, "ncclGetUniqueId", result);
    return channel->has_id ? &channel->id : NULL;
}

static void nccl_recv_key(dt__p2p *p2p, const void *key) {
    nccl_channel *channel = nccl_channel_of(p2p);
    if (!channel->has_id) memcpy(&channel->id, key, sizeof channel->id);
    channel->has_id = true;
}

static void nccl_pulled(dt__p2p *p2p) { p2p->pulls = nccl_channel_of(p2p)->begun++; }

/* Advances a message that the receiver is ready for: enqueues it on the nccl channel's stream after
   all messages with lower numbers, and then records the operation's event. If the message is part
   of a collective's algorithm, also makes the rank's own stream wait for it, because the
   algorithm's next round uses the received data. */
static int nccl_bulk(dt__p2p *p2p) {
    dt_work *work = p2p->work;
    dt__world *world = work->comm->world;
    const dt__nccl *nccl = world->nccl;
    nccl_channel *channel = nccl_channel_of(p2p);
    ncclDataType_t type = nccl_type(work->call.dtype);
    bool sends = p2p->op == DT__SEND;
    if (!channel->comm && !nccl_channel_connect(world, channel, channel->id, sends ? 0 : 1, 2))
        return -1;
    int idle = nccl_channel_is_idle(world, channel);
    if (p2p->pulls != channel->enqueued || idle <= 0) return idle < 0 ? -1 : 0;
    if (p2p->moved == 0) {
        if (!nccl_channel_wait_event(work, channel, p2p->device_event)) return -1;
        p2p->moved = p2p->count * nccl_type_bytes(work->call.dtype);
        cudaStream_t stream = stream_of(channel->queue);
        ncclResult_t result =
            sends ? nccl->Send(p2p->send, p2p->count, type, 1, channel->comm, stream)
                  : nccl->Recv(p2p->recv, p2p->count, type, 0, channel->comm, stream);
        if (!nccl_channel_result(world, channel, sends ? "ncclSend" : "ncclRecv", result))
            return -1;
        if (channel->call_in_progress) return 0;
    }
    if (nccl_enqueued(work, channel) < 0) return -1;
    if (!work->algorithm || nccl->kernels->event_wait(nccl->stream, work->device_event) == DT_OK)
        return 1;
    nccl->dt->data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    return -1;
}

/* ---- groups ---- */

/* Splits the nccl channel of `comm`. All ranks of `comm` must call this function. `made` is this
   rank's new group; it gets an nccl channel if it has more than one rank. */
static void nccl_split(dt_comm *comm, dt_comm *made, int color) {
    dt__world *world = comm->world;
    const dt__nccl *nccl = world->nccl;
    ncclConfig_t config = nccl_config();
    bool several = made && made->base.size > 1;
    if (!comm->nccl_channel || nccl_failed(world)) return;
    /* NCCL allows no other operation in flight on a communicator during its split */
    world->listener.drain(world->ctx, 0, world);
    nccl_channel *channel = NULL;
    if (several)
        channel = (nccl_channel *)nccl->dt->alloc(
            world->ctx, DT_MEM_HOST, sizeof *channel, "an nccl channel");
    if (several && !channel) return;
    ncclComm_t child = NULL;
    if (channel) memset(channel, 0, sizeof *channel);
    if (channel) made->nccl_channel = channel;
    if (channel && !nccl_channel_open(world, channel)) return;
    ncclResult_t result =
        nccl->CommSplit(comm->nccl_channel->comm, several ? color : NCCL_SPLIT_NOCOLOR,
            several ? made->base.rank : 0, channel ? &channel->comm : &child, &config);
    if (!nccl_channel_result(world, comm->nccl_channel, "ncclCommSplit", result)) return;
    /* NCCL 2.28 returns ncclSuccess from a split that is still in progress */
    comm->nccl_channel->call_in_progress = true;
    nccl_channel_await(comm, comm->nccl_channel);
    if (!channel || nccl_failed(world)) return;
    channel->call_in_progress = true;
    nccl_channel_await(comm, channel);
}

/* Closes a group's nccl channel. If the group is the world, which is closed last, also frees the
   other NCCL state. */
static void nccl_close(dt_comm *comm) {
    dt__world *world = comm->world;
    dt__nccl *nccl = world->nccl;
    nccl_channel *channel = comm->nccl_channel;
    if (channel) {
        nccl_channel_finalize(comm, channel);
        nccl_channel_await(comm, channel);
        nccl_channel_close(world, channel);
        if (channel != &nccl->world_channel)
            nccl->dt->free(world->ctx, DT_MEM_HOST, channel, sizeof *channel);
        comm->nccl_channel = NULL;
    }
    if (comm != world->comm) return;
    /* Two ranks share a channel, so all are finalized before the first wait: no order of the waits
       can then be a cycle. */
    nccl_channel *p2p = nccl->p2p_channels, *end = p2p + 2 * comm->base.size;
    for (channel = p2p; channel < end; channel++)
        if (channel->comm) nccl_channel_finalize(comm, channel);
    for (channel = p2p; channel < end; channel++) {
        if (channel->comm) nccl_channel_await(comm, channel);
        nccl_channel_close(world, channel);
    }
    world->nccl = NULL;
    nccl->dt->free(world->ctx, DT_MEM_HOST, nccl, nccl->bytes);
}

/* ---- failures ---- */

/* Aborts all communicators after the context has failed, because an abort ends kernels that hang on
   the device. Each abort also frees memory, and so waits until the entire device is idle. All
   aborts are therefore in one NCCL group call, so that none of them waits for kernels of another
   communicator. NCCL 2.22 and later can group aborts; in earlier versions the first abort may wait
   for the second. */
static void nccl_abort(dt__world *world) {
    dt__nccl *nccl = world->nccl;
    nccl->GroupStart();
    for (dt_comm *comm = world->comms; comm; comm = comm->next) {
        if (comm->nccl_channel && comm->nccl_channel->comm)
            nccl->CommAbort(comm->nccl_channel->comm);
        if (comm->nccl_channel) comm->nccl_channel->comm = NULL;
    }
    for (int i = 0; i < 2 * world->comm->base.size; i++) {
        if (nccl->p2p_channels[i].comm) nccl->CommAbort(nccl->p2p_channels[i].comm);
        nccl->p2p_channels[i].comm = NULL;
    }
    nccl->GroupEnd();
}

static void nccl_check_device(dt_work *work) {
    ncclResult_t state = ncclSuccess;
    if (work->nccl_channel && work->nccl_channel->comm)
        nccl_of(work)->CommGetAsyncError(work->nccl_channel->comm, &state);
    if (state != ncclSuccess && state != ncclInProgress)
        nccl_fail(work->comm->world, work->nccl_channel, "a communicator", state);
}

static const dt__direct nccl_direct = {
    .choose = nccl_choose,
    .begin = nccl_begin,
    .takes = nccl_takes,
    .send_key = nccl_send_key,
    .recv_key = nccl_recv_key,
    .pulled = nccl_pulled,
    .bulk = nccl_bulk,
    .split = nccl_split,
    .close = nccl_close,
    .check_device = nccl_check_device,
    .abort = nccl_abort,
};

/* Loads NCCL's functions. Returns NULL, or a text on failure. The library is never closed, because
   it has its own threads, for example a thread that ncclGetUniqueId starts. dt cannot wait for the
   end of these threads, and after a dlclose they would execute unmapped code. In a later run dlopen
   returns the library that is still loaded. */
static const char *nccl_load(dt__nccl *nccl) {
#ifdef DT_NCCL_DLOPEN
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library) return dlerror();
#define DTK_NCCL_LOAD(name) \
    nccl->name = (decltype(nccl->name))dlsym(library, "nccl" #name); \
    if (!nccl->name) return "this libnccl.so.2 has no nccl" #name;
#else
#define DTK_NCCL_LOAD(name) nccl->name = nccl##name;
#endif
    DTK_NCCL_FUNCTIONS(DTK_NCCL_LOAD)
#undef DTK_NCCL_LOAD
    return NULL;
}

/* Warns of lazy kernel loading, which can deadlock the ranks: before CUDA loads a kernel lazily, it
   may wait until the device is idle and so until NCCL's kernels have ended. NCCL's kernels wait for
   the other ranks. One of those may wait for an operation that this rank starts only after the
   kernel is loaded. */
static void nccl_warn_lazy_loading(const dt__world *world) {
    const char *loading = getenv("CUDA_MODULE_LOADING");
    if (world->rank != 0 || (loading && strcmp(loading, "EAGER") == 0)) return;
    world->nccl->dt->log(world->ctx, DT_LOG_NOTICE,
        "backend nccl: set CUDA_MODULE_LOADING=EAGER before the program starts: a kernel "
        "that CUDA loads late can wait for one of NCCL's, and that for another rank");
}

/* Allocates the world's NCCL state. Returns NULL with the context failed on failure. */
static dt__nccl *nccl_make(dt__world *world, const dt__comm_functions *dt) {
    size_t channels = 2 * (size_t)world->comm->base.size,
           bytes = sizeof(dt__nccl) + channels * sizeof(nccl_channel);
    const dt_kernels *kernels = dt->kernels(world->ctx);
    if (!kernels->event_record) {
        dt->fail(world, DT_ERR_UNSUPPORTED,
            "backend nccl: rank %d runs on %s, and needs a CUDA device", world->rank,
            kernels->name);
        return NULL;
    }
    dt__nccl *nccl = (dt__nccl *)dt->alloc(world->ctx, DT_MEM_HOST, bytes, "NCCL");
    if (!nccl) return NULL;
    memset(nccl, 0, bytes);
    nccl->dt = dt;
    nccl->kernels = kernels;
    nccl->stream = dt->stream(world->ctx);
    nccl->bytes = bytes;
    nccl->p2p_channels = (nccl_channel *)(void *)(nccl + 1);
    const char *wrong = nccl_load(nccl);
    if (!wrong) return nccl;
    dt->fail(world, DT_ERR_COMM, "NCCL: %s", wrong);
    dt->free(world->ctx, DT_MEM_HOST, nccl, bytes);
    return NULL;
}

} // namespace dt_cuda

/* Makes the world's nccl channel from the program's communicator `given`. If `given` is NULL, makes
   a communicator from an id that rank 0 broadcasts. */
extern "C" void dt__nccl_begin(dt__world *world, const dt__comm_functions *dt, void *given) {
    using namespace dt_cuda;
    ncclUniqueId id;
    if (dt->struct_bytes != DT__STRUCT_BYTES) {
        dt->fail(world, DT_ERR_ARG,
            "backend nccl: dt_kernels.cu was compiled with another dt_comm.h than the program");
        return;
    }
    dt_comm *comm = world->comm;
    dt__nccl *nccl = nccl_make(world, dt);
    if (!nccl) return;
    world->nccl = nccl;
    comm->direct = &nccl_direct;
    if (comm->base.size == 1) return;
    nccl_warn_lazy_loading(world);
    comm->nccl_channel = &nccl->world_channel;
    if (given) {
        comm->nccl_channel->comm = (ncclComm_t)given;
        comm->nccl_channel->is_borrowed = true;
        nccl_channel_open(world, comm->nccl_channel);
        return;
    }
    memset(&id, 0, sizeof id);
    ncclResult_t result = world->rank == 0 ? nccl->GetUniqueId(&id) : ncclSuccess;
    if (result != ncclSuccess) nccl_fail(world, NULL, "ncclGetUniqueId", result);
    dt__call call = {};
    call.op = DT__BROADCAST;
    call.dtype = DT_I32;
    call.host_memory = 1;
    call.count = sizeof id / sizeof(int32_t);
    call.send = call.recv = &id;
    if (dt->run(comm, call) == DT_OK &&
        nccl_channel_connect(world, comm->nccl_channel, id, comm->base.rank, comm->base.size))
        nccl_channel_await(comm, comm->nccl_channel);
}

#endif /* DT_NCCL */

/* HISTORY
     0.2.0   names in namespace dt_cuda; kernels spread -> scatter, cross_entropy_join ->
             cross_entropy_merge; the NCCL backend, which was in dt_comm.h; new: digest
     0.1.0   first version

   LICENCE: your choice of A or B.

   A. Public domain (www.unlicense.org). This is free and unencumbered software released into the
   public domain. Anyone is free to copy, modify, publish, use, compile, sell, or distribute this
   software, either in source code form or as a compiled binary, for any purpose, commercial or
   non-commercial, and by any means. In jurisdictions that recognize copyright laws, the author or
   authors of this software dedicate any and all copyright interest in the software to the public
   domain. We make this dedication for the benefit of the public at large and to the detriment of
   our heirs and successors. We intend this dedication to be an overt act of relinquishment in
   perpetuity of all present and future rights to this software under copyright law. THE SOFTWARE IS
   PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO
   THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO
   EVENT SHALL THE AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION
   OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE
   USE OR OTHER DEALINGS IN THE SOFTWARE.

   B. MIT. Copyright (c) the dt authors. Permission is hereby granted, free of charge, to any person
   obtaining a copy of this software and associated documentation files (the "Software"), to deal in
   the Software without restriction, including without limitation the rights to use, copy, modify,
   merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons
   to whom the Software is furnished to do so, subject to the following conditions: the above
   copyright notice and this permission notice shall be included in all copies or substantial
   portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS
   OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A
   PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE
   LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
   OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS
   IN THE SOFTWARE. */
