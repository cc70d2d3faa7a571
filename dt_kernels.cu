/* dt_kernels.cu - v0.1.0 - the CUDA side of dt_tensor.h's kernel table - public domain or MIT, see
   the end of the file

   Compile it with nvcc beside the file that defines DT_IMPLEMENTATION:

       nvcc -O3 train.c dt_kernels.cu -lcublasLt -lnccl     -lnccl is for dt_comm.h; -DDT_NO_NCCL
                                                            builds without

   It gives six functions, all declared in dt_tensor.h: dt_kernels_cuda(), dt_cuda_ready(),
   dt_cuda_open(), dt_cuda_close(), dt_cuda_stream() and dt_cuda_device().

   DOES NOT: allocate but for a queue (scratch is the caller's), keep state outside of queues (one
   has a stream and the plans of its products), choose a device but where a queue is opened (a
   kernel runs on the thread's current one), add with atomics. f32, bf16 and f16 are served; f64 and
   i32 by fill, copy, permute, cast and reduce too, f64 by init, because a loss is an f64 scalar.
   Parameters and their state are f32, with a copy in 16 bits. All else, and a reduction of more
   than MAX_INPUTS inputs of 16 bits, is DT_ERR_UNSUPPORTED before anything is launched.

   CONTENTS
     1. Launching, queues
     2. Device memory
     3. Numbers in storage, blocks, packs
     4. Fill, copy, reduce
     5. Strides: binary, permute
     6. Functions of one number: unary, glu
     7. Cast
     8. Sums over a dimension
     9. Maxima and places
    10. Normalisation and softmax
    11. Rope; the counter RNG: dropout, init
    12. Embedding
    13. Losses
    14. Norm and optimizers
    15. Matrix product
    16. Attention
    17. The table

   SPEED. All kernels but those of sections 15 and 16 wait for memory. So each number is read and
   written once where that can be: 16 bytes at a time, rows in registers, sums over rows in as many
   parts as fill a GPU. Odd lengths and places are served element by element. Products are
   cuBLASLt's where there is a queue, and attention runs on tensor cores; both have kernels that
   need neither.

   ORDER OF SUMS. Every sum has an order that depends on sizes only, that of the scratch among them,
   so the same call gives the same bits on the same build and kind of device. They are not the CPU's
   bits: long sums are taken in other parts, nvcc makes one rounding of a product and a sum, expf is
   CUDA's, for 16 bits the hardware's. tests/cuda/test_cuda.cc runs these kernels on a CPU and allows
   1e-6 relative, and in 16 bits one rounding. Tensor cores are given 16 bits: attention in bf16 and
   f16 rounds its probabilities and their gradients on the way, and what cuBLASLt adds up in has an
   order of its own, by the sizes of the product. What has nothing to contract gives the CPU's bits:
   fill, copy, permute, cast, reduce, max, topk, spread, uniform init, embedding and its backward,
   square_sums; binary and dropout too, unless they accumulate. What a NaN carries is nobody's
   business. Never compile this file with -use_fast_math: nvcc defines no macro by which it could be
   refused here.

   ERRORS. A refused launch is DT_ERR_DEVICE at once. A kernel that fails later shows in a later
   call, at the latest in sync: that is how CUDA works. An index outside of its table shows in sync
   as DT_ERR_ARG: see section 9. */

#include "dt_tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 12
#error "dt_kernels.cu needs CUDA 12 or later"
#endif

#if DT_VERSION != 100
#error "dt_kernels.cu 0.1.0 needs dt_tensor.h 0.1.0: copy all files from one release"
#endif

/* Products by cuBLASLt where nvcc finds it, and by the kernels here where it refuses:
   -DDT_NO_CUBLASLT for these alone. Other compilers take it on request. */
#if !defined(DT_NO_CUBLASLT) && !defined(DT_CUBLASLT) && defined(__CUDACC__) && \
    defined(__has_include)
#if __has_include(<cublasLt.h>)
#define DT_CUBLASLT
#endif
#endif
#ifdef DT_CUBLASLT
#include <cublasLt.h>
#endif

/* A test runs this file on a CPU (tests/cuda/cuda_on_cpu.h): there a launch is a call, and a kernel is
   static already. */
#ifdef __CUDACC__
#define DT_LAUNCH(kernel, grid, block, smem, stream, ...) \
    kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
#define KERNEL static __global__ void
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DT_DYN_ALIGN 1024 /* for wgmma */
#else
#define DT_DYN_ALIGN 16
#endif
#define DT_DYN_SMEM(T, name) \
    extern __shared__ __align__(DT_DYN_ALIGN) \
    unsigned char dt_dyn_smem[]; \
    T *name = reinterpret_cast<T *>(dt_dyn_smem)
/* before loops over what must stay in registers, where nvcc might not see it */
#define UNROLL _Pragma("unroll")
#define UNROLL_BY(n) DT_PRAGMA(unroll n)
#define DT_PRAGMA(x) _Pragma(#x)
#else
#define KERNEL __global__ void
#define UNROLL
#define UNROLL_BY(n)
#endif

// ==== 1. Launching, queues ======================================================================

/* Kernels take the table's args structs by value. A grid has at most MAX_BLOCKS blocks, several
   times what a GPU runs at once; kernels walk on in steps of the grid, so that any size is
   served. */
enum { BLOCK = 256, WARPS = BLOCK / 32, MAX_BLOCKS = 4096 };

/* Blocks for n elements of which a block takes `each` at a time. */
static unsigned grid_for(size_t n, size_t each) {
    size_t blocks = n / each + (n % each != 0);
    return blocks < MAX_BLOCKS ? (unsigned)blocks : (unsigned)MAX_BLOCKS;
}

static dt_status launched() { return cudaGetLastError() == cudaSuccess ? DT_OK : DT_ERR_DEVICE; }

/* An empty grid is an error to CUDA, so nothing is launched for n = 0. */
#define LAUNCH(kernel, n, each, stream, ...) \
    do { \
        if ((n) > 0) \
            DT_LAUNCH(kernel, grid_for((n), (each)), BLOCK, 0, stream_of(stream), __VA_ARGS__); \
    } while (0)

/* What a rank has of a device: every kernel's `stream`. NULL is the thread's current device and its
   default stream, without a library: for tests of single kernels. */
struct cuda_queue {
    cudaStream_t stream;
    int device;
    bool own; /* the stream was made here */
    /* pinned: not 0 if a kernel met an index outside of its table, see section 9 */
    int *bad;
    struct blas *blas; /* NULL before the first product; see section 15 */
};

static void blas_close(struct blas *blas);

static cudaStream_t stream_of(void *queue) { return queue ? ((cuda_queue *)queue)->stream : NULL; }

// ==== 2. Device memory ==========================================================================

/* Memory, copies, marks, devices. What a call here refuses is its answer, and must not show at the
   next launch too. */

static bool went_well(cudaError_t error) {
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error == cudaSuccess;
}

static void *cuda_alloc(void *user, size_t bytes) {
    void *p = NULL;
    (void)user;
    return went_well(cudaMalloc(&p, bytes)) ? p : NULL;
}

static void cuda_free(void *user, void *p, size_t bytes) {
    (void)user;
    (void)bytes;
    (void)went_well(cudaFree(p));
}

/* Pageable host memory may be read or written again as soon as this returns; pinned memory after
   cuda_sync. */
static dt_status cuda_move(void *dst, const void *src, size_t bytes, void *stream) {
    if (bytes == 0) return DT_OK;
    bool moves = went_well(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_of(stream)));
    return moves ? DT_OK : DT_ERR_DEVICE;
}

/* Kernels look at their indices themselves, and what they found is told here: see section 9. */
static dt_status cuda_sync(void *stream) {
    cuda_queue *queue = (cuda_queue *)stream;
    if (!went_well(cudaStreamSynchronize(stream_of(stream)))) return DT_ERR_DEVICE;
    if (!queue || *queue->bad == 0) return DT_OK;
    *queue->bad = 0;
    return DT_ERR_ARG;
}

/* Pinned memory: the device reads and writes it by itself, while the processor goes on. */
static void *cuda_pin(size_t bytes) {
    void *p = NULL;
    return went_well(cudaMallocHost(&p, bytes)) ? p : NULL;
}

static void cuda_unpin(void *p, size_t bytes) {
    (void)bytes;
    (void)went_well(cudaFreeHost(p));
}

/* Device memory, managed memory, and what is pinned. */
static int cuda_reaches(const void *p) {
    cudaPointerAttributes of;
    return went_well(cudaPointerGetAttributes(&of, p)) && of.type != cudaMemoryTypeUnregistered;
}

/* What has been enabled once is enabled for all threads of the process. */
static dt_status cuda_share(void *stream, int places, char *text, size_t text_bytes) {
    int devices = 0, here = ((cuda_queue *)stream)->device;
    cudaError_t error = cudaGetDeviceCount(&devices);
    for (int there = 0; there < devices && there < places && error == cudaSuccess; there++) {
        int can = 0;
        if (there != here) error = cudaDeviceCanAccessPeer(&can, here, there);
        if (can)
            error = cudaDeviceEnablePeerAccess(there, 0);
        else if (there != here && error == cudaSuccess)
            error = cudaErrorPeerAccessUnsupported;
        if (!went_well(error) && error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;
        if (error != cudaSuccess && text_bytes > 0)
            snprintf(text, text_bytes, "device %d to the memory of device %d: %s", here, there,
                cudaGetErrorName(error));
    }
    return error == cudaSuccess ? DT_OK : DT_ERR_DEVICE;
}

static void *cuda_mark(void *stream, void *mark) {
    cudaEvent_t event = (cudaEvent_t)mark;
    if (!event && !went_well(cudaEventCreateWithFlags(&event, cudaEventDisableTiming))) return NULL;
    if (went_well(cudaEventRecord(event, stream_of(stream)))) return event;
    if (!mark) (void)went_well(cudaEventDestroy(event));
    return NULL;
}

static int cuda_passed(void *mark) {
    cudaError_t error = cudaEventQuery((cudaEvent_t)mark);
    return went_well(error) ? 1 : error == cudaErrorNotReady ? 0 : -1;
}

static dt_status cuda_after(void *stream, void *mark) {
    return went_well(cudaStreamWaitEvent(stream_of(stream), (cudaEvent_t)mark, 0)) ? DT_OK
                                                                                   : DT_ERR_DEVICE;
}

static void cuda_unmark(void *mark) {
    if (mark) (void)went_well(cudaEventDestroy((cudaEvent_t)mark));
}

static void *refused(char *text, size_t text_bytes, const char *what, cudaError_t error) {
    (void)cudaGetLastError();
    if (text_bytes > 0) snprintf(text, text_bytes, "%s: %s", what, cudaGetErrorName(error));
    return NULL;
}

extern "C" void *dt_cuda_open(dt_cuda_desc desc, char *text, size_t text_bytes) {
    cudaError_t error = cudaSetDevice(desc.device);
    if (error != cudaSuccess) return refused(text, text_bytes, "cudaSetDevice", error);
    cuda_queue *queue = (cuda_queue *)calloc(1, sizeof *queue);
    if (!queue) return refused(text, text_bytes, "a queue", cudaErrorMemoryAllocation);
    queue->device = desc.device;
    queue->stream = (cudaStream_t)desc.stream;
    queue->own = desc.stream == NULL;
    int least = 0, most = 0; /* priorities: the smaller number goes first */
    queue->bad = (int *)cuda_pin(sizeof *queue->bad);
    if (!queue->bad)
        error = cudaErrorMemoryAllocation;
    else
        *queue->bad = 0;
    if (queue->own && desc.urgent && error == cudaSuccess)
        error = cudaDeviceGetStreamPriorityRange(&least, &most);
    if (queue->own && error == cudaSuccess)
        error = cudaStreamCreateWithPriority(&queue->stream, cudaStreamNonBlocking, most);
    if (error == cudaSuccess) return queue;
    if (queue->bad) cuda_unpin(queue->bad, sizeof *queue->bad);
    free(queue);
    return refused(text, text_bytes, "a stream and its pinned memory", error);
}

extern "C" void dt_cuda_close(void *p) {
    cuda_queue *queue = (cuda_queue *)p;
    if (!queue) return;
    (void)went_well(cudaStreamSynchronize(queue->stream));
    if (queue->own) (void)went_well(cudaStreamDestroy(queue->stream));
    blas_close(queue->blas);
    cuda_unpin(queue->bad, sizeof *queue->bad);
    free(queue);
}

extern "C" void *dt_cuda_stream(void *queue) { return stream_of(queue); }
extern "C" int dt_cuda_device(void *queue) {
    int current = 0;
    if (queue) return ((cuda_queue *)queue)->device;
    (void)went_well(cudaGetDevice(&current));
    return current;
}

static void *cuda_open(int place, char *text, size_t text_bytes) {
    int devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices == 0) error = cudaErrorNoDevice;
    if (error != cudaSuccess) return refused(text, text_bytes, "cudaGetDeviceCount", error);
    dt_cuda_desc desc = { place % devices, NULL, 0 };
    return dt_cuda_open(desc, text, text_bytes);
}

// ==== 3. Numbers in storage, blocks, packs ======================================================

/* 16-bit numbers are storage: a kernel widens them to float, computes, and rounds once. CUDA's own
   types for them would need its headers where a test has none. The other types are what they
   are. */
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

/* f<T>(...) for the T of a dtype that is computed with in f32. */
#define BY_TYPE(dtype, f, ...) \
    ((dtype) == DT_F32       ? f<float>(__VA_ARGS__) \
        : (dtype) == DT_BF16 ? f<bf16>(__VA_ARGS__) \
        : (dtype) == DT_F16  ? f<f16>(__VA_ARGS__) \
                             : DT_ERR_UNSUPPORTED)

/* The table's function for kernel k from k<T>. */
#define TYPED(k) \
    static dt_status cuda_##k(const dt_##k##_args *a, void *stream) { \
        return BY_TYPE(a->dtype, k, a, stream); \
    }

static __device__ float widen(float x) { return x; }
static __device__ double widen(double x) { return x; }
static __device__ int widen(int x) { return x; }
static __device__ float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

static __device__ void round_to(float *out, float x) { *out = x; }
static __device__ void round_to(double *out, double x) { *out = x; }
static __device__ void round_to(int *out, int x) { *out = x; }

/* To nearest, ties to even; rounding could carry a NaN into the sign, so a NaN is only made quiet.
   Since sm_80 one instruction does it. */
static __device__ void round_to(bf16 *out, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#else
    unsigned bits = __float_as_uint(x), rounded = bits + 0x7fffu + (bits >> 16 & 1);
    out->bits = (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) >> 16);
#endif
}

/* f16 is CUDA's own business, in one instruction each. What a test has in its place: f16 has 5 bits
   of exponent, and a product with 2^112 moves them to float's bias and makes denormals normal;
   below 2^-14 the spacing of f16 is that of floats in [0.5, 1), so that adding 0.5 rounds; 65,520
   and more are infinity. */
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

/* The sum over a warp, for each of its lanes: x + y is y + x, so all lanes get the same bits. */
template <class T> static __device__ T warp_sum(T v) {
    for (int other = 16; other > 0; other /= 2) v += __shfl_xor_sync(0xffffffffu, v, other);
    return v;
}

/* The sum over a block, or over every THREADS threads of it, for each of its threads: within warps,
   then warp after warp. */
template <class T, int THREADS = BLOCK> static __device__ T block_sum(T v) {
    __shared__ T of_warp[32];
    v = warp_sum(v);
    __syncthreads(); /* everyone has read the sum of the call before */
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    const T *mine = of_warp + threadIdx.x / THREADS * (THREADS / 32);
    T total = mine[0];
    for (int w = 1; w < THREADS / 32; w++) total += mine[w];
    return total;
}

/* The largest value of a warp, and of a block, for each thread; a NaN loses every comparison. */
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
    float most = of_warp[0];
    for (int w = 1; w < THREADS / 32; w++) most = of_warp[w] > most ? of_warp[w] : most;
    return most;
}

/* Neighbours in an array, 16 bytes of them unless COUNT says otherwise: what a thread works on at a
   time, in one access if it lies at a multiple of its size. */
template <class T, int COUNT = 16 / sizeof(T)>
struct alignas(COUNT * sizeof(T) < 16 ? COUNT * sizeof(T) : 16) pack {
    enum { N = COUNT };
    T v[N];
};

template <int N, class T> static __device__ pack<T, N> take(const T *p) {
    return *reinterpret_cast<const pack<T, N> *>(p);
}
template <class T, int N> static __device__ void put(T *p, pack<T, N> x) {
    *reinterpret_cast<pack<T, N> *>(p) = x;
}

/* A pack that may be cut by the end of its array: what lies past it is zero. aligned: p + i is. */
template <class T>
static __device__ pack<T> load(const T *p, size_t i, size_t count, bool aligned) {
    const int N = pack<T>::N;
    if (aligned && i + N <= count) return take<N>(p + i);
    pack<T> x;
    for (int k = 0; k < N; k++) x.v[k] = i + k < count ? p[i + k] : T();
    return x;
}

/* N numbers to compute with. */
template <int N, class T> static __device__ pack<float, N> widened(pack<T, N> x) {
    pack<float, N> y;
    for (int k = 0; k < N; k++) y.v[k] = widen(x.v[k]);
    return y;
}

/* N finished results, each rounded once. */
template <int N, class T> static __device__ void round_to(pack<T, N> *out, pack<float, N> x) {
    for (int k = 0; k < N; k++) round_to(&out->v[k], x.v[k]);
}

/* The same where two numbers are a word, the first its low half: an instruction for each, or for
   both. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <int N> static __device__ pack<float, N> widened(pack<bf16, N> x) {
    pack<float, N> y;
    unsigned words[(N + 1) / 2] = { 0 };
    memcpy(words, &x, sizeof x);
    for (int k = 0; k < N; k++)
        y.v[k] = __uint_as_float(k % 2 ? words[k / 2] & 0xffff0000u : words[k / 2] << 16);
    return y;
}

#define ROUND_PAIRS(T, type) \
    template <int N> static __device__ void round_to(pack<T, N> *out, pack<float, N> x) { \
        unsigned words[(N + 1) / 2]; \
        for (int k = 0; k < N; k += 2) { \
            float high = k + 1 < N ? x.v[k + 1] : 0; \
            asm("cvt.rn." type ".f32 %0, %1, %2;" : "=r"(words[k / 2]) : "f"(high), "f"(x.v[k])); \
        } \
        memcpy(out, words, sizeof *out); \
    }
ROUND_PAIRS(bf16, "bf16x2")
ROUND_PAIRS(f16, "f16x2")
#endif

/* Two numbers in a word, the first in its low half. */
template <class T> static __device__ unsigned pair_of(float x, float y) {
    pack<float, 2> two = { { x, y } };
    pack<T, 2> rounded;
    unsigned word;
    round_to(&rounded, two);
    memcpy(&word, &rounded, sizeof word);
    return word;
}

template <int N, class T> static __device__ pack<float, N> get(const T *p) {
    return widened(take<N>(p));
}

/* A pack that is used later: words, because numbers of 16 bits would be taken apart, and waited
   for, when they come. */
template <class T, int N, bool WORDS = N * sizeof(T) % 4 == 0> struct held {
    pack<unsigned, N * sizeof(T) / 4> x;
};
template <class T, int N> struct held<T, N, false> { pack<T, N> x; };

template <int N, class T> static __device__ pack<float, N> widened(const held<T, N> &later) {
    pack<T, N> x;
    memcpy(&x, &later.x, sizeof x);
    return widened(x);
}

/* sum += the packs at at(0), at(1), ..., at(n - 1), in this order; COUNT of them are on their way
   at a time. */
template <int COUNT, int N, class F>
static __device__ void add_packs(pack<float, N> *sum, size_t n, F at) {
    for (size_t e = 0; e < n; e += COUNT) {
        decltype(take<N>(at(e))) x[COUNT];
        UNROLL
        for (int j = 0; j < COUNT; j++)
            if (e + j < n) x[j] = take<N>(at(e + j));
        UNROLL
        for (int j = 0; j < COUNT; j++) {
            pack<float, N> next = widened(x[j]);
            for (int k = 0; k < N && e + j < n; k++) sum->v[k] += next.v[k];
        }
    }
}

/* p[0..] (+)= N finished results, rounded once. */
template <class T, int N> static __device__ void give(T *p, pack<float, N> x, int accumulate = 0) {
    pack<T, N> rounded;
    if (accumulate) {
        pack<float, N> old = get<N>(p);
        for (int k = 0; k < N; k++) x.v[k] += old.v[k];
    }
    round_to(&rounded, x);
    put(p, rounded);
}

/* The same of one number. */
template <class T> static __device__ void give_one(T *to, float value, int accumulate = 0) {
    round_to(to, accumulate ? widen(*to) + value : value);
}

/* The same where only the host knows the type: sums, which are few. */
static __device__ void give_typed(
    dt_dtype dtype, void *out, size_t i, float value, int accumulate) {
    if (dtype == DT_F32)
        give_one((float *)out + i, value, accumulate);
    else if (dtype == DT_BF16)
        give_one((bf16 *)out + i, value, accumulate);
    else
        give_one((f16 *)out + i, value, accumulate);
}

/* The type of an output that is f32 where `wide` says so. */
static dt_dtype widened_type(dt_dtype dtype, int wide) { return wide ? DT_F32 : dtype; }

static __host__ __device__ bool aligned16(
    const void *a, const void *b = NULL, const void *c = NULL, const void *d = NULL) {
    return (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
}

/* The walk of this thread over a flat array, `each` elements at a time. */
static __device__ size_t flat_first(int each) {
    return ((size_t)blockIdx.x * BLOCK + threadIdx.x) * each;
}
static __device__ size_t flat_step(int each) { return (size_t)gridDim.x * BLOCK * each; }

/* A walk calls f(.., by) for so many numbers at a time: packs where they are whole and aligned,
   else single ones. f is compiled for both. The blocks that share it are the grid's, or some of
   them. */
template <int COUNT> struct by {
    enum { N = COUNT };
};

template <int N, class F>
static __device__ void each_of_blocks(
    unsigned block, unsigned blocks, size_t count, bool aligned, F f) {
    size_t first = (size_t)block * BLOCK + threadIdx.x, step = (size_t)blocks * BLOCK;
    size_t whole = aligned ? count / N * N : 0;
    for (size_t i = first * N; i < whole; i += step * N) f(i, by<N>());
    for (size_t i = whole + first; i < count; i += step) f(i, by<1>());
}

template <int N, class F> static __device__ void each_flat(size_t count, bool aligned, F f) {
    each_of_blocks<N>(blockIdx.x, gridDim.x, count, aligned, f);
}

/* The same over rows of cols numbers: f(row, column, by). */
template <int N, class F>
static __device__ void each_in_rows(size_t rows, size_t cols, bool aligned, F f) {
    size_t each = aligned && cols % N == 0 ? N : 1, packs = cols / each;
    if (packs == 0) return;
    /* divided once, not for each step */
    size_t row = flat_first(1) / packs, at = flat_first(1) % packs;
    size_t rows_on = flat_step(1) / packs, on = flat_step(1) % packs;
    while (row < rows) {
        if (each == N)
            f(row, at * each, by<N>());
        else
            f(row, at * each, by<1>());
        at += on;
        row += rows_on + (at >= packs);
        at -= at >= packs ? packs : 0;
    }
}

static __host__ __device__ size_t packs_in(size_t cols, int each) {
    return (cols + each - 1) / each;
}

// ==== 4. Fill, copy, reduce =====================================================================

template <class T, class Value>
KERNEL __launch_bounds__(BLOCK) fill_kernel(T *out, size_t count, Value value) {
    T x;
    round_to(&x, value);
    each_flat<pack<T>::N>(count, aligned16(out), [&](size_t i, auto by) {
        const int N = decltype(by)::N;
        pack<T, N> same;
        for (int k = 0; k < N; k++) same.v[k] = x;
        put(out + i, same);
    });
}

template <class T, class Value> static dt_status fill(const dt_fill_args *a, void *stream) {
    LAUNCH((fill_kernel<T, Value>), a->count, BLOCK * pack<T>::N, stream, (T *)a->out, a->count,
        (Value)a->value);
    return launched();
}

static dt_status cuda_fill(const dt_fill_args *a, void *stream) {
    switch (a->dtype) {
    case DT_F32: return fill<float, float>(a, stream);
    case DT_BF16: return fill<bf16, float>(a, stream);
    case DT_F16: return fill<f16, float>(a, stream);
    case DT_F64: return fill<double, double>(a, stream);
    case DT_I32: return fill<int, int>(a, stream);
    }
    return DT_ERR_UNSUPPORTED;
}

/* Unit: the largest piece, of 16, 4, 2 or 1 bytes, that divides every address and length of the
   copy. */
template <class Unit> KERNEL __launch_bounds__(BLOCK) copy_kernel(dt_copy_args a) {
    size_t units = a.row_bytes / sizeof(Unit);
    for (size_t i = flat_first(1); i < a.rows * units; i += flat_step(1)) {
        size_t row = i / units, unit = i - row * units;
        const Unit *in = (const Unit *)((const char *)a.in + row * a.in_stride);
        Unit *out = (Unit *)((char *)a.out + row * a.out_stride);
        out[unit] = in[unit];
    }
}

static dt_status cuda_copy(const dt_copy_args *args, void *stream) {
    dt_copy_args a = *args;
    size_t bytes = a.rows * a.row_bytes;
    /* one long row: its own end is the only odd one */
    if (a.in_stride == a.row_bytes && a.out_stride == a.row_bytes) {
        a.rows = 1;
        a.row_bytes = bytes;
    }
    size_t all = (size_t)a.in | (size_t)a.out | a.row_bytes;
    if (a.rows > 1) all |= a.in_stride | a.out_stride;
    if (all % 16 == 0)
        LAUNCH(copy_kernel<uint4>, bytes / 16, BLOCK, stream, a);
    else if (all % 4 == 0)
        LAUNCH(copy_kernel<unsigned>, bytes / 4, BLOCK, stream, a);
    else if (all % 2 == 0)
        LAUNCH(copy_kernel<uint16_t>, bytes / 2, BLOCK, stream, a);
    else
        LAUNCH(copy_kernel<unsigned char>, bytes, BLOCK, stream, a);
    return launched();
}

/* The inputs of one launch travel in its arguments, because the caller's array of pointers is in
   host memory. */
enum { MAX_INPUTS = 128 };
struct reduce_inputs {
    const void *p[MAX_INPUTS];
    int n;
    dt_op op;
    int divisor; /* DT_AVG in its last launch: the number of all inputs; else 0 */
    bool aligned;
};

/* int wraps around, as on the CPU. */
static __device__ float plus(float a, float b) { return a + b; }
static __device__ double plus(double a, double b) { return a + b; }
static __device__ int plus(int a, int b) { return (int)((unsigned)a + (unsigned)b); }
static __device__ float times(float a, float b) { return a * b; }
static __device__ double times(double a, double b) { return a * b; }
static __device__ int times(int a, int b) { return (int)((unsigned)a * (unsigned)b); }

template <class T> static __device__ T combine(dt_op op, T a, T b) {
    switch (op) {
    case DT_SUM:
    case DT_AVG: return plus(a, b);
    case DT_MAX: return b > a ? b : a;
    case DT_MIN: return b < a ? b : a;
    case DT_PROD: return times(a, b);
    }
    return a;
}

/* A thread reads its elements of all inputs before it writes them, so out may be one of the inputs.
   Number is what T is computed in: steps in 16 bits would round each time. */
template <class T, class Number>
KERNEL __launch_bounds__(BLOCK) reduce_kernel(T *out, size_t count, reduce_inputs in) {
    each_flat<pack<T>::N>(count, in.aligned, [&](size_t i, auto by) {
        const int N = decltype(by)::N;
        pack<T, N> x = take<N>((const T *)in.p[0] + i);
        Number sum[N];
        for (int k = 0; k < N; k++) sum[k] = widen(x.v[k]);
        for (int r = 1; r < in.n; r++) {
            x = take<N>((const T *)in.p[r] + i);
            for (int k = 0; k < N; k++) sum[k] = combine(in.op, sum[k], (Number)widen(x.v[k]));
        }
        for (int k = 0; k < N && in.divisor > 0; k++) sum[k] /= (Number)in.divisor;
        for (int k = 0; k < N; k++) round_to(&x.v[k], sum[k]);
        put(out + i, x);
    });
}

/* More than MAX_INPUTS inputs take several launches, of which all but the first begin with what out
   holds: the same order. But 16 bits would be rounded in between, and an input that the first
   launch would overwrite cannot be read by a later one. */
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
        LAUNCH((reduce_kernel<T, Number>), a->count, BLOCK * pack<T>::N, stream, (T *)a->out,
            a->count, in);
    }
    dt_status status = launched();
    for (int k = 0; k < a->n_also && status == DT_OK; k++)
        status = cuda_move(a->also[k], a->out, a->count * sizeof(T), stream);
    return status;
}

static dt_status cuda_reduce(const dt_reduce_args *a, void *stream) {
    switch (a->dtype) {
    case DT_F32: return reduce<float, float>(a, stream);
    case DT_BF16: return reduce<bf16, float>(a, stream);
    case DT_F16: return reduce<f16, float>(a, stream);
    case DT_F64: return reduce<double, double>(a, stream);
    case DT_I32: return reduce<int, int>(a, stream);
    }
    return DT_ERR_UNSUPPORTED;
}

// ==== 5. Strides: binary, permute ===============================================================

/* The index of two arrays with strides. Neighbouring dimensions that lie together in both are one
   here: two tensors of one shape have one dimension, a bias over rows two. */
struct strided {
    int nd; /* at least 1 */
    int64_t d[DT_MAX_DIMS], a[DT_MAX_DIMS], b[DT_MAX_DIMS];
};

static strided strided_of(dt_shape shape, const int64_t *a, const int64_t *b) {
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

/* Elements; without one of dt_tensor.h's functions, so that this file links alone. */
static size_t count_of(const strided *s) {
    size_t n = 1;
    for (int i = 0; i < s->nd; i++) n *= (size_t)s->d[i];
    return n;
}

static __device__ void places(const strided &s, size_t i, int64_t *a, int64_t *b) {
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

/* Whether a pack of each numbers of the last dimension is one aligned access, or one number
   repeated. */
static bool packs(const void *p, const int64_t *stride, const strided *s, int64_t each) {
    bool whole = aligned16(p) && stride[s->nd - 1] == 1;
    for (int i = 0; i < s->nd - 1; i++) whole = whole && stride[i] % each == 0;
    return s->d[s->nd - 1] % each == 0 && (whole || stride[s->nd - 1] == 0);
}

static __device__ float binary(int op, float x, float y) {
    switch (op) {
    case DT_SUB: return x - y;
    case DT_MUL: return x * y;
    case DT_DIV: return x / y;
    }
    return x + y;
}

template <int N, class T> static __device__ pack<float, N> get_strided(const T *p, int64_t stride) {
    if (stride != 0) return get<N>(p);
    pack<float, N> x;
    for (int k = 0; k < N; k++) x.v[k] = widen(*p);
    return x;
}

/* N neighbours at a time. A thread reads its elements before it writes them, so out may be a or
   b. */
template <class T, int N>
KERNEL __launch_bounds__(BLOCK) binary_kernel(dt_binary_args a, strided s, size_t count) {
    for (size_t i = flat_first(N); i < count; i += flat_step(N)) {
        int64_t at_a, at_b;
        places(s, i, &at_a, &at_b);
        pack<float, N> x = get_strided<N>((const T *)a.a + at_a, s.a[s.nd - 1]);
        pack<float, N> y = get_strided<N>((const T *)a.b + at_b, s.b[s.nd - 1]);
        for (int k = 0; k < N; k++) x.v[k] = binary(a.op, x.v[k], y.v[k]);
        give((T *)a.out + i, x, a.accumulate);
    }
}

template <class T> static dt_status binary(const dt_binary_args *a, void *stream) {
    const int N = pack<T>::N;
    if (a->op < DT_ADD || a->op > DT_DIV) return DT_ERR_ARG;
    strided s = strided_of(a->shape, a->stride_a, a->stride_b);
    bool whole = aligned16(a->out) && packs(a->a, s.a, &s, N) && packs(a->b, s.b, &s, N);
    if (whole)
        LAUNCH((binary_kernel<T, N>), count_of(&s), BLOCK * N, stream, *a, s, count_of(&s));
    else
        LAUNCH((binary_kernel<T, 1>), count_of(&s), BLOCK, stream, *a, s, count_of(&s));
    return launched();
}
TYPED(binary)

/* N neighbours at a time: a pack where both sides have them together, else one. a of s is out. */
template <class T, int N>
KERNEL __launch_bounds__(BLOCK) permute_kernel(dt_permute_args a, strided s, size_t count) {
    for (size_t i = flat_first(N); i < count; i += flat_step(N)) {
        int64_t to, from;
        places(s, i, &to, &from);
        pack<T, N> x = take<N>((const T *)a.in + from);
        T *out = (T *)a.out + to;
        if (a.accumulate) {
            pack<T, N> old = take<N>(out);
            for (int k = 0; k < N; k++) round_to(&x.v[k], plus(widen(old.v[k]), widen(x.v[k])));
        }
        put(out, x);
    }
}

/* Two dimensions that change places: `across` is dense in the input, `down` in the output. Tiles of
   32 x 32 go through shared memory, so that both sides are read and written along their rows; its
   rows are one longer, so that a column of it lies in different banks. */
struct quarter_turn {
    int64_t across, down, in_stride, out_stride;
};

template <class Unit>
KERNEL __launch_bounds__(BLOCK)
    transpose_kernel(dt_permute_args a, strided rest, quarter_turn t, size_t tiles) {
    __shared__ Unit tile[32][33];
    const Unit *in = (const Unit *)a.in;
    Unit *out = (Unit *)a.out;
    size_t wide = (size_t)(t.across + 31) / 32, each = wide * (size_t)((t.down + 31) / 32);
    int lane = threadIdx.x % 32;
    for (size_t i = blockIdx.x; i < tiles; i += gridDim.x) {
        int64_t to, from, x = (int64_t)(i % each % wide) * 32, y = (int64_t)(i % each / wide) * 32;
        places(rest, i / each, &to, &from);
        for (int j = threadIdx.x / 32; j < 32; j += WARPS)
            if (y + j < t.down && x + lane < t.across)
                tile[j][lane] = in[from + (y + j) * t.in_stride + x + lane];
        __syncthreads();
        for (int j = threadIdx.x / 32; j < 32; j += WARPS)
            if (x + j < t.across && y + lane < t.down)
                out[to + (x + j) * t.out_stride + y + lane] = tile[lane][j];
        __syncthreads(); /* the tile has been read */
    }
}

/* Launches transpose_kernel if s (a: out, b: in) is such a turn, else answers false. Small ones are
   not worth it. */
template <class Unit> static bool transposed(const dt_permute_args *a, strided s, void *stream) {
    int in = -1, out = -1;
    for (int i = 0; i < s.nd; i++) {
        if (s.a[i] == 1) out = i;
        if (s.b[i] == 1) in = i;
    }
    if (in < 0 || out < 0 || in == out || a->accumulate || s.d[in] < 8 || s.d[out] < 8)
        return false;
    quarter_turn t = { s.d[in], s.d[out], s.b[out], s.a[in] };
    size_t tiles = (size_t)((t.across + 31) / 32) * (size_t)((t.down + 31) / 32);
    s.d[in] = s.d[out] = 1;
    tiles *= count_of(&s);
    LAUNCH(transpose_kernel<Unit>, tiles, 1, stream, *a, s, t, tiles);
    return true;
}

/* Unit: any type of T's size */
template <class T, class Unit> static dt_status permute(const dt_permute_args *a, void *stream) {
    const int N = pack<T>::N;
    strided s = strided_of(a->shape, a->out_stride, a->in_stride);
    int last = s.nd - 1;
    bool whole =
        s.a[last] == 1 && s.b[last] == 1 && packs(a->out, s.a, &s, N) && packs(a->in, s.b, &s, N);
    if (whole)
        LAUNCH((permute_kernel<T, N>), count_of(&s), BLOCK * N, stream, *a, s, count_of(&s));
    else if (!transposed<Unit>(a, s, stream))
        LAUNCH((permute_kernel<T, 1>), count_of(&s), BLOCK, stream, *a, s, count_of(&s));
    return launched();
}

static dt_status cuda_permute(const dt_permute_args *a, void *stream) {
    switch (a->dtype) {
    case DT_F32: return permute<float, unsigned>(a, stream);
    case DT_BF16: return permute<bf16, uint16_t>(a, stream);
    case DT_F16: return permute<f16, uint16_t>(a, stream);
    case DT_F64: return permute<double, uint64_t>(a, stream);
    case DT_I32: return permute<int, unsigned>(a, stream);
    }
    return DT_ERR_UNSUPPORTED;
}

// ==== 6. Functions of one number: unary, glu ====================================================

/* What is rounded to 16 bits in the end needs no last bits of a float: there the hardware's
   exponential and quotient do, with which the functions below cost less than their numbers' way
   from memory. */
#ifdef __CUDACC__
/* 0 below 2^-126, which spares __expf's way there */
static __device__ float quick_exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.44269504f * x));
    return y;
}
#else
static float quick_exponential(float x) { return __expf(x); }
#endif
template <class T> static __device__ float exponential(float x) {
    return sizeof(T) == 2 ? quick_exponential(x) : expf(x);
}
template <class T> static __device__ float quotient(float x, float y) {
    return sizeof(T) == 2 ? __fdividef(x, y) : x / y;
}
template <class T> static __device__ float logistic(float x) {
    return quotient<T>(1, 1 + exponential<T>(-x));
}

/* The normal distribution function. erfcf keeps its digits where 1 + erff would cancel. */
static __device__ float normal_part(float x) { return 0.5f * erfcf(-0.70710678f * x); }

/* GELU in tanh form: with u = sqrt(2/pi) (x + 0.044715 x^3), 0.5 (1 + tanh u) is the logistic
   function of 2u: one exponential, and no cancellation where tanh u is close to -1. */
#define GELU_A 0.7978845608028654f /* sqrt(2/pi) */
#define GELU_B 0.044715f

/* f(x), to be stored in T */
template <class T = float>
static __device__ float act(int kind, float x, float scale, float shift) {
    switch (kind) {
    case DT_ACT_GELU:
        return quotient<T>(x, 1 + exponential<T>(-2 * GELU_A * (x + GELU_B * x * x * x)));
    case DT_ACT_GELU_ERF: return x * normal_part(x);
    case DT_ACT_SILU: return x * logistic<T>(x);
    case DT_ACT_RELU: return x < 0 ? 0 : x;
    case DT_ACT_TANH: return tanhf(x);
    case DT_ACT_EXP: return expf(x);
    case DT_ACT_LN: return logf(x);
    case DT_ACT_AFFINE: return scale * x + shift;
    }
    return x;
}

/* Past these bounds a slope is 0 or 1; the clamp keeps infinity times zero away. */
static __device__ float clamped(float x, float bound) {
    x = x < -bound ? -bound : x;
    return x > bound ? bound : x;
}

/* gelu'(x) = s + x s (1 - s) 2 u'. With s = 1 / (1 + e), 1 - s is e s: where s is close to 1, and
   x^3 large, a difference would have too few digits. */
template <class T> static __device__ float gelu_slope(float x) {
    x = clamped(x, 30);
    float u = GELU_A * (x + GELU_B * x * x * x), du = GELU_A * (1 + 3 * GELU_B * x * x);
    float e = exponential<T>(-clamped(2 * u, 80)), s = quotient<T>(1, 1 + e);
    return s + 2 * x * s * (e * s) * du;
}
#undef GELU_A
#undef GELU_B

static __device__ float gelu_erf_slope(float x) {
    x = clamped(x, 30);
    return normal_part(x) + x * 0.3989422804014327f * expf(-0.5f * x * x);
}

template <class T> static __device__ float silu_slope(float x) {
    x = clamped(x, 80);
    float e = exponential<T>(-x), s = quotient<T>(1, 1 + e);
    return s + x * s * (e * s);
}

/* d f'(x), to be stored in T; d is not multiplied with where nothing passes, so that its infinities
   stay out */
template <class T = float>
static __device__ float act_back(int kind, float x, float d, float scale) {
    switch (kind) {
    case DT_ACT_GELU: return d * gelu_slope<T>(x);
    case DT_ACT_GELU_ERF: return d * gelu_erf_slope(x);
    case DT_ACT_SILU: return d * silu_slope<T>(x);
    case DT_ACT_RELU: return x > 0 ? d : 0;
    case DT_ACT_TANH: {
        float t = tanhf(x);
        return d * (1 - t * t);
    }
    case DT_ACT_EXP: return d * expf(x);
    case DT_ACT_LN: return d / x;
    case DT_ACT_AFFINE: return d * scale;
    }
    return d;
}

/* f(by<kind>()): a walk chooses once for a pack, so that its numbers are computed side by side. */
template <class F> static __device__ void for_act(int kind, F f) {
    switch (kind) {
    case DT_ACT_GELU: return f(by<DT_ACT_GELU>());
    case DT_ACT_GELU_ERF: return f(by<DT_ACT_GELU_ERF>());
    case DT_ACT_SILU: return f(by<DT_ACT_SILU>());
    case DT_ACT_RELU: return f(by<DT_ACT_RELU>());
    case DT_ACT_TANH: return f(by<DT_ACT_TANH>());
    case DT_ACT_EXP: return f(by<DT_ACT_EXP>());
    case DT_ACT_LN: return f(by<DT_ACT_LN>());
    case DT_ACT_AFFINE: return f(by<DT_ACT_AFFINE>());
    }
    f(by<DT_ACT_NONE>());
}

static bool known_act(int kind) { return kind >= 0 && kind < DT_ACTS; }

template <class T> KERNEL __launch_bounds__(BLOCK) unary_kernel(dt_unary_args a) {
    float scale = (float)a.scale, shift = (float)a.shift;
    each_flat<pack<T>::N>(a.count, aligned16(a.out, a.in), [&](size_t i, auto by) {
        const int N = decltype(by)::N;
        pack<float, N> x = get<N>((const T *)a.in + i);
        for_act(a.act, [&](auto kind) {
            for (int k = 0; k < N; k++) x.v[k] = act<T>(decltype(kind)::N, x.v[k], scale, shift);
        });
        give((T *)a.out + i, x);
    });
}

template <class T> static dt_status unary(const dt_unary_args *a, void *stream) {
    if (!known_act(a->act)) return DT_ERR_ARG;
    LAUNCH(unary_kernel<T>, a->count, BLOCK * pack<T>::N, stream, *a);
    return launched();
}
TYPED(unary)

/* in may be NULL for the kinds whose slope does not depend on it. */
template <class T> KERNEL __launch_bounds__(BLOCK) unary_back_kernel(dt_unary_back_args a) {
    float scale = (float)a.scale;
    each_flat<pack<T>::N>(a.count, aligned16(a.dx, a.dout, a.in), [&](size_t i, auto by) {
        const int N = decltype(by)::N;
        pack<float, N> d = get<N>((const T *)a.dout + i), x = { { 0 } };
        if (a.in) x = get<N>((const T *)a.in + i);
        for_act(a.act, [&](auto kind) {
            for (int k = 0; k < N; k++)
                d.v[k] = act_back<T>(decltype(kind)::N, x.v[k], d.v[k], scale);
        });
        give((T *)a.dx + i, d, a.accumulate);
    });
}

template <class T> static dt_status unary_back(const dt_unary_back_args *a, void *stream) {
    if (!known_act(a->act)) return DT_ERR_ARG;
    LAUNCH(unary_back_kernel<T>, a->count, BLOCK * pack<T>::N, stream, *a);
    return launched();
}
TYPED(unary_back)

/* arXiv:2002.05202. A thread has a pack of the result: its gates and, cols further, its ups. */
template <class T> KERNEL __launch_bounds__(BLOCK) glu_kernel(dt_glu_args a) {
    each_in_rows<pack<T>::N>(
        a.rows, a.cols, aligned16(a.out, a.in), [&](size_t row, size_t col, auto by) {
            const int N = decltype(by)::N;
            const T *gates = (const T *)a.in + row * 2 * a.cols + col;
            pack<float, N> gate = get<N>(gates), up = get<N>(gates + a.cols);
            for_act(a.act, [&](auto kind) {
                for (int k = 0; k < N; k++) up.v[k] *= act<T>(decltype(kind)::N, gate.v[k], 1, 0);
            });
            give((T *)a.out + row * a.cols + col, up);
        });
}

template <class T> static dt_status glu(const dt_glu_args *a, void *stream) {
    if (!known_act(a->act)) return DT_ERR_ARG;
    LAUNCH(glu_kernel<T>, a->rows * a->cols, BLOCK * pack<T>::N, stream, *a);
    return launched();
}
TYPED(glu)

template <class T> KERNEL __launch_bounds__(BLOCK) glu_back_kernel(dt_glu_back_args a) {
    each_in_rows<pack<T>::N>(
        a.rows, a.cols, aligned16(a.dx, a.in, a.dout), [&](size_t row, size_t col, auto by) {
            const int N = decltype(by)::N;
            size_t at = row * 2 * a.cols + col;
            const T *gates = (const T *)a.in + at;
            pack<float, N> gate = get<N>(gates), up = get<N>(gates + a.cols);
            pack<float, N> d = get<N>((const T *)a.dout + row * a.cols + col);
            for_act(a.act, [&](auto kind) {
                for (int k = 0; k < N; k++) {
                    up.v[k] = act_back<T>(decltype(kind)::N, gate.v[k], d.v[k] * up.v[k], 1);
                    gate.v[k] = act<T>(decltype(kind)::N, gate.v[k], 1, 0) * d.v[k];
                }
            });
            give((T *)a.dx + at, up, a.accumulate);
            give((T *)a.dx + at + a.cols, gate, a.accumulate);
        });
}

template <class T> static dt_status glu_back(const dt_glu_back_args *a, void *stream) {
    if (!known_act(a->act)) return DT_ERR_ARG;
    LAUNCH(glu_back_kernel<T>, a->rows * a->cols, BLOCK * pack<T>::N, stream, *a);
    return launched();
}
TYPED(glu_back)

// ==== 7. Cast ===================================================================================

/* As on the CPU, bit for bit: by way of double, which holds every number of the other types. From
   there to 16 bits it goes through a float whose last bit still knows that something was cut off
   ("round to odd"), so that the second rounding gives what one would have. */
static __device__ float to_odd(double x) {
    float f = (float)x;
    unsigned bits = __float_as_uint(f);
    if ((double)f == x || x != x) return f;
    return __uint_as_float((fabs((double)f) > fabs(x) ? bits - 1 : bits) | 1);
}

template <class T> static __device__ void convert(T *out, double x) { round_to(out, to_odd(x)); }
static __device__ void convert(float *out, double x) { *out = (float)x; }
static __device__ void convert(double *out, double x) { *out = x; }

static __device__ void convert(int *out, double x) {
    x = x != x ? 0 : x > 2147483647.0 ? 2147483647.0 : x < -2147483648.0 ? -2147483648.0 : x;
    *out = (int)x;
}

/* What is a float when it is widened needs no double on its way to float and 16 bits. */
template <class T> static __device__ void convert(T *out, float x) { round_to(out, x); }
static __device__ void convert(double *out, float x) { *out = (double)x; }
static __device__ void convert(int *out, float x) { convert(out, (double)x); }
template <class T> static __device__ void convert(T *out, int x) { convert(out, (double)x); }

/* Packs: a loop, but for floats to 16 bits. */
template <class To, class From, int N>
static __device__ void convert(pack<To, N> *out, pack<From, N> x) {
    for (int k = 0; k < N; k++) convert(&out->v[k], widen(x.v[k]));
}
template <int N> static __device__ void convert(pack<bf16, N> *out, pack<float, N> x) {
    round_to(out, x);
}
template <int N> static __device__ void convert(pack<f16, N> *out, pack<float, N> x) {
    round_to(out, x);
}

/* What x and y give when it is rounded once. Two floats' sum may go through a double on its way to
   float or not: that has more than twice the digits. */
template <class To, class X, class Y> static __device__ double plus_for(To *, X x, Y y) {
    return (double)x + (double)y;
}
static __device__ float plus_for(float *, float x, float y) { return x + y; }

/* As many numbers at a time as are 16 bytes of the wider type: accesses of a warp have no gaps. */
template <class To, class From> KERNEL __launch_bounds__(BLOCK) cast_kernel(dt_cast_args a) {
    const int MOST = sizeof(To) > sizeof(From) ? 16 / sizeof(To) : 16 / sizeof(From);
    each_flat<MOST>(a.count, aligned16(a.out, a.in), [&](size_t i, auto by) {
        const int N = decltype(by)::N;
        To *out = (To *)a.out + i;
        pack<From, N> x = take<N>((const From *)a.in + i);
        pack<To, N> y;
        if (a.accumulate) {
            y = take<N>(out);
            for (int k = 0; k < N; k++)
                convert(&y.v[k], plus_for(&y.v[k], widen(x.v[k]), widen(y.v[k])));
        } else {
            convert(&y, x);
        }
        put(out, y);
    });
}

template <class To, class From> static dt_status cast(const dt_cast_args *a, void *stream) {
    LAUNCH((cast_kernel<To, From>), a->count, BLOCK * 4, stream, *a);
    return launched();
}

template <class To> static dt_status cast_to(const dt_cast_args *a, void *stream) {
    switch (a->from) {
    case DT_F32: return cast<To, float>(a, stream);
    case DT_BF16: return cast<To, bf16>(a, stream);
    case DT_F16: return cast<To, f16>(a, stream);
    case DT_F64: return cast<To, double>(a, stream);
    case DT_I32: return cast<To, int>(a, stream);
    }
    return DT_ERR_UNSUPPORTED;
}

static dt_status cuda_cast(const dt_cast_args *a, void *stream) {
    switch (a->dtype) {
    case DT_F32: return cast_to<float>(a, stream);
    case DT_BF16: return cast_to<bf16>(a, stream);
    case DT_F16: return cast_to<f16>(a, stream);
    case DT_F64: return cast_to<double>(a, stream);
    case DT_I32: return a->accumulate ? DT_ERR_UNSUPPORTED : cast_to<int>(a, stream);
    }
    return DT_ERR_UNSUPPORTED;
}

// ==== 8. Sums over a dimension ==================================================================

/* in (outer,n,inner) to out (outer,parts,inner), of type `type`: the n are cut into parts, each
   summed on its own. With scratch a sum is taken twice: of parts, enough to fill a GPU, and of what
   they gave. */
struct sums {
    const void *in;
    void *out;
    dt_dtype type;
    size_t outer, parts, n, inner;
    float scale;
    int accumulate;
};

/* Some of n, and number i of the `count` runs of equal length that they are cut into: the cut
   depends on n alone. */
struct run {
    size_t first, end;
};

static __device__ run run_of(run all, size_t count, size_t i) {
    size_t n = all.end - all.first, each = n / count + (n % count != 0),
           first = all.first + i * each;
    run r = { first, first + each };
    if (r.first > all.end) r.first = all.end;
    if (r.end > all.end) r.end = all.end;
    return r;
}

/* A block of 32 lanes x 16 runs takes 32 packs of neighbouring columns: threadIdx.y goes down its
   run, ascending, and the runs' sums are added in ascending order. The total of one column is for
   each of the first 32 N threads. */
enum { COLUMNS = 32, RUNS = 16 };

static __device__ int my_column() { return threadIdx.y * COLUMNS + threadIdx.x; }

template <int N> static __device__ float add_runs(pack<float, N> sum) {
    __shared__ pack<float, N> of_run[RUNS][COLUMNS];
    int column = my_column();
    float total = 0;
    __syncthreads(); /* the totals of the call before have been taken */
    of_run[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    for (int y = 0; y < RUNS && column < COLUMNS * N; y++)
        total += of_run[y][column / N].v[column % N];
    return total;
}

/* Two sums of the same sizes, or one of them. */
template <class T, int N>
KERNEL __launch_bounds__(COLUMNS *RUNS, 2) column_sums_kernel(sums a, sums b) {
    size_t tiles = packs_in(a.inner, COLUMNS * N);
    if (blockIdx.y > 0) a = b;
    for (size_t i = blockIdx.x; i < a.outer * a.parts * tiles; i += gridDim.x) {
        size_t part = i / tiles, first = i % tiles * COLUMNS * N, c = first + threadIdx.x * N;
        run all = { 0, a.n },
            mine = run_of(run_of(all, a.parts, part % a.parts), RUNS, threadIdx.y);
        const T *in = (const T *)a.in + (part / a.parts * a.n + mine.first) * a.inner + c;
        pack<float, N> sum = { { 0 } };
        if (c < a.inner)
            add_packs<8>(&sum, mine.end - mine.first, [&](size_t r) { return in + r * a.inner; });
        /* outside of any condition: every thread of the block must come */
        float total = add_runs(sum);
        c = first + my_column();
        if (my_column() < COLUMNS * N && c < a.inner)
            give_typed(a.type, a.out, part * a.inner + c, a.scale * total, a.accumulate);
    }
}

/* Rows, each the business of G threads, a warp or a block: which they begin with, and how many
   further is the next. */
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

/* Which of n numbers at p are whole packs at multiples of 16 bytes, wherever p lies. */
template <int N, class T> static __device__ run whole_packs(const T *p, size_t n) {
    size_t head = (16 - (uintptr_t)p % 16) % 16 / sizeof(T);
    if (head > n) head = n;
    run whole = { head, head + (n - head) / N * N };
    return whole;
}

/* The walk of THREADS threads over n numbers that are all theirs: f(place, by). */
template <int N, int THREADS, class T, class F>
static __device__ void each_in_run(const T *p, size_t n, F f) {
    run whole = whole_packs<N>(p, n);
    size_t me = threadIdx.x % THREADS;
    if (me < whole.first) f(me, by<1>());
    for (size_t c = whole.first + me * N; c < whole.end; c += THREADS * N) f(c, by<N>());
    for (size_t c = whole.end + me; c < n; c += THREADS) f(c, by<1>());
}

/* inner 1 */
template <class T, int G> KERNEL __launch_bounds__(BLOCK) row_sums_kernel(sums a) {
    for (size_t part = row_first<G>(); part < a.outer * a.parts; part += row_step<G>()) {
        run all = { 0, a.n }, mine = run_of(all, a.parts, part % a.parts);
        const T *in = (const T *)a.in + part / a.parts * a.n + mine.first;
        float sum = 0;
        each_in_run<pack<T>::N, G>(in, mine.end - mine.first, [&](size_t c, auto by) {
            const int N = decltype(by)::N;
            pack<float, N> x = get<N>(in + c);
            for (int k = 0; k < N; k++) sum += x.v[k];
        });
        sum = group_sum<G>(sum);
        if (threadIdx.x % G == 0) give_typed(a.type, a.out, part, a.scale * sum, a.accumulate);
    }
}

/* n 1: nothing to sum. */
template <class T> KERNEL __launch_bounds__(BLOCK) scaled_kernel(sums a) {
    for (size_t i = flat_first(1); i < a.outer * a.inner; i += flat_step(1))
        give_typed(a.type, a.out, i, a.scale * widen(((const T *)a.in)[i]), a.accumulate);
}

template <class T, int N>
static void launch_column_sums(const sums &a, const sums *b, void *stream) {
    size_t tiles = a.outer * a.parts * packs_in(a.inner, COLUMNS * N);
    dim3 grid(grid_for(tiles, 1), b ? 2 : 1);
    if (tiles > 0)
        DT_LAUNCH((column_sums_kernel<T, N>), grid, dim3(COLUMNS, RUNS), 0, stream_of(stream), a,
            b ? *b : a);
}

/* Blocks that fill a GPU, for which sums are cut into parts: two for each of the 132
   multiprocessors of an H100. A number of its own for every device would give every device its own
   sums. */
enum { FILL = 264 };

/* Few columns are taken one by one, so that they are the business of more blocks. */
template <class T> static void launch_sums(const sums &a, void *stream) {
    const int N = pack<T>::N;
    bool few = a.outer * a.parts * packs_in(a.inner, COLUMNS * N) < FILL / 4;
    if (a.n == 1)
        LAUNCH(scaled_kernel<T>, a.outer * a.inner, BLOCK, stream, a);
    else if (a.inner == 1 && a.n <= 1024)
        LAUNCH((row_sums_kernel<T, 32>), a.outer * a.parts, WARPS, stream, a);
    else if (a.inner == 1)
        LAUNCH((row_sums_kernel<T, BLOCK>), a.outer * a.parts, 1, stream, a);
    else if (aligned16(a.in) && a.inner % N == 0 && !few)
        launch_column_sums<T, N>(a, NULL, stream);
    else
        launch_column_sums<T, 1>(a, NULL, stream);
}

template <class T> static size_t parts_for(const dt_sum_args *a) {
    size_t blocks = a->outer * (a->inner == 1 ? 1 : packs_in(a->inner, COLUMNS * pack<T>::N));
    /* no part shorter than that */
    size_t most = a->n / (a->inner == 1 ? 4096 : 2 * RUNS), room = 0;
    if (blocks == 0 || blocks >= FILL || !a->work) return 1;
    room = a->work_bytes / sizeof(float) / (a->outer * a->inner);
    most = most < room ? most : room;
    most = most < FILL / blocks ? most : FILL / blocks;
    return most > 1 ? most : 1;
}

template <class T> static dt_status sum(const dt_sum_args *a, void *stream) {
    dt_dtype type = widened_type(a->dtype, a->wide);
    size_t parts = parts_for<T>(a);
    sums last = { a->in, a->out, type, a->outer, 1, a->n, a->inner, (float)a->scale,
        a->accumulate };
    if (parts > 1) {
        sums first = { a->in, a->work, DT_F32, a->outer, parts, a->n, a->inner, 1, 0 };
        launch_sums<T>(first, stream);
        last.in = a->work;
        last.n = parts;
        launch_sums<float>(last, stream);
    } else {
        launch_sums<T>(last, stream);
    }
    return launched();
}
TYPED(sum)

// ==== 9. Maxima and places ======================================================================

/* Indices come from the caller's data, and one outside the table must not be used. To look at them
   here would stop the queue in every step, so the kernels look: for them a wrong index is none, and
   a word in pinned memory tells of it. cuda_sync answers it, with DT_ERR_ARG; what was computed
   since the sync before is void then. Without a queue, in tests of single kernels, there is no such
   word: the host reads the indices, and the answer is at once, as on the CPU. */
static dt_status check_indices(
    const int32_t *indices, size_t count, int64_t least, int64_t end, void *queue) {
    const size_t PIECE = 4096;
    int32_t piece[PIECE];
    for (size_t at = 0; at < count && !queue; at += PIECE) {
        size_t have = count - at < PIECE ? count - at : PIECE;
        dt_status status = cuda_move(piece, indices + at, have * sizeof *piece, NULL);
        if (status == DT_OK) status = cuda_sync(NULL);
        if (status != DT_OK) return status;
        for (size_t i = 0; i < have; i++)
            if (piece[i] < least || piece[i] >= end) return DT_ERR_ARG;
    }
    return DT_OK;
}

static int *bad_of(void *queue) { return queue ? ((cuda_queue *)queue)->bad : NULL; }

/* Whether an index may be used. All that write to bad write the same. */
static __device__ bool good(int64_t index, int64_t least, int64_t end, int *bad) {
    if (index >= least && index < end) return true;
    if (bad) *(volatile int *)bad = 1;
    return false;
}

/* One thread per maximum, as on the CPU: a NaN never is the maximum, unless it comes first. Meant
   for a dimension of thousands at most: along the last one neighbouring threads read n apart. */
template <class T> KERNEL __launch_bounds__(BLOCK) max_kernel(dt_max_args a) {
    for (size_t i = flat_first(1); i < a.outer * a.inner; i += flat_step(1)) {
        const T *in = (const T *)a.in + i / a.inner * a.n * a.inner + i % a.inner;
        float best = widen(in[0]);
        int32_t index = 0;
        for (size_t j = 1; j < a.n; j++) {
            float x = widen(in[j * a.inner]);
            if (!(x > best)) continue;
            best = x;
            index = (int32_t)j;
        }
        ((T *)a.out)[i] = in[(size_t)index * a.inner];
        a.index[i] = index;
    }
}

template <class T> static dt_status max_of(const dt_max_args *a, void *stream) {
    if (a->n < 1) return DT_ERR_ARG;
    LAUNCH(max_kernel<T>, a->outer * a->inner, BLOCK, stream, *a);
    return launched();
}

static dt_status cuda_max(const dt_max_args *a, void *stream) {
    return BY_TYPE(a->dtype, max_of, a, stream);
}

/* One thread per row keeps a sorted list of k in the result itself, as the CPU does: k and cols are
   numbers of experts. A later column never moves ahead of an equal one. */
template <class T> KERNEL __launch_bounds__(BLOCK) topk_kernel(dt_topk_args a) {
    for (size_t r = flat_first(1); r < a.rows; r += flat_step(1)) {
        const T *x = (const T *)a.in + r * a.cols;
        int32_t *index = a.index + r * a.k;
        for (size_t c = 0; c < a.cols; c++) {
            size_t at = c < a.k ? c : a.k; /* how many are in the list */
            while (at > 0 && widen(x[c]) > widen(x[index[at - 1]])) {
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
    LAUNCH(topk_kernel<T>, a->rows, BLOCK, stream, *a);
    return launched();
}
TYPED(topk)

/* One thread per (outer,inner), j ascending: two numbers for one place are added in order, each sum
   rounded. */
template <class T> KERNEL __launch_bounds__(BLOCK, 2) spread_kernel(dt_spread_args a, int *bad) {
    for (size_t i = flat_first(1); i < a.outer * a.inner; i += flat_step(1)) {
        size_t o = i / a.inner, c = i % a.inner;
        T *out = (T *)a.out + o * a.n * a.inner + c;
        for (size_t j = 0; j < a.n && !a.accumulate; j++) out[j * a.inner] = T();
        for (size_t j = 0; j < a.k; j++) {
            size_t from = (o * a.k + j) * a.inner + c;
            if (good(a.index[from], 0, (int64_t)a.n, bad))
                give_one(out + (size_t)a.index[from] * a.inner, widen(((const T *)a.in)[from]), 1);
        }
    }
}

template <class T> static dt_status spread(const dt_spread_args *a, void *stream) {
    dt_status status =
        check_indices(a->index, a->outer * a->k * a->inner, 0, (int64_t)a->n, stream);
    if (status != DT_OK) return status;
    LAUNCH(spread_kernel<T>, a->outer * a->inner, BLOCK, stream, *a, bad_of(stream));
    return launched();
}
TYPED(spread)

// ==== 10. Normalisation and softmax =============================================================

/* What one of G threads has of a row: pack after pack of N, G packs apart. K packs stay in
   registers, so that a row of that length is read once; what is beyond is read each time. cols is a
   multiple of N, and packs are aligned; rows of another kind have N 1. */
enum { KEPT = 4 };

template <class T, int N, int G, int K = KEPT> struct row_share {
    const T *p;
    int64_t cols;
    held<T, N> kept[K];

    __device__ row_share(const T *row, int64_t cols_) : p(row), cols(cols_) {
        UNROLL
        for (int j = 0; j < K; j++)
            if (place(j) < cols) kept[j] = *reinterpret_cast<const held<T, N> *>(p + place(j));
    }
    __device__ int64_t place(int j) const { return (int64_t)(threadIdx.x % G + j * G) * N; }

    /* f(column of the first, numbers) for each pack */
    template <class F> __device__ void each(F f) const {
        UNROLL
        for (int j = 0; j < K; j++)
            if (place(j) < cols) f(place(j), widened(kept[j]));
        UNROLL_BY(1)
        for (int64_t c = place(K); c < cols; c += G * N) f(c, get<N>(p + c));
    }
    /* The same for two rows. */
    template <class F> __device__ void each_with(const row_share &other, F f) const {
        UNROLL
        for (int j = 0; j < K; j++)
            if (place(j) < cols) f(place(j), widened(kept[j]), widened(other.kept[j]));
        UNROLL_BY(1)
        for (int64_t c = place(K); c < cols; c += G * N) f(c, get<N>(p + c), get<N>(other.p + c));
    }
};

/* Launches kernel<T, N, G>: in packs if the rows allow it (`whole`), by a warp for each row that it
   can keep. */
#define LAUNCH_ROWS(kernel, T, whole, rows, cols, stream, ...) \
    do { \
        if (!(whole)) \
            LAUNCH((kernel<T, 1, BLOCK>), rows, 1, stream, __VA_ARGS__); \
        else if ((cols) <= (size_t)32 * KEPT * pack<T>::N) \
            LAUNCH((kernel<T, pack<T>::N, 32>), rows, WARPS, stream, __VA_ARGS__); \
        else \
            LAUNCH((kernel<T, pack<T>::N, BLOCK>), rows, 1, stream, __VA_ARGS__); \
    } while (0)

/* The sums of N numbers over every G threads, a warp or part of a block, for each of them. turn is
   0 and 1 by turns, so that the call before needs no barrier of its own. */
template <int G, int N> static __device__ pack<float, N> group_sums(pack<float, N> v, int turn) {
    __shared__ pack<float, N> of_warp[2][WARPS];
    for (int k = 0; k < N; k++) v.v[k] = warp_sum(v.v[k]);
    if (G == 32) return v;
    if (threadIdx.x % 32 == 0) of_warp[turn][threadIdx.x / 32] = v;
    __syncthreads();
    for (int k = 0; k < N; k++) v.v[k] = 0;
    for (int w = 0; w < G / 32; w++)
        for (int k = 0; k < N; k++) v.v[k] += of_warp[turn][threadIdx.x / G * (G / 32) + w].v[k];
    return v;
}

/* Layer normalisation, arXiv:1607.06450: two passes over what is kept, because E[x^2] - E[x]^2
   cancels. RMSNorm, arXiv:1910.07467, is the same with a mean of zero and without a bias. */
enum { NORM_KEPT = 6 };

template <class T, int N, int G> KERNEL __launch_bounds__(BLOCK, 4) norm_kernel(dt_norm_args a) {
    const T *gains = (const T *)a.gain, *biases = a.rms ? NULL : (const T *)a.bias;
    int turn = 0;
    for (size_t first = (size_t)blockIdx.x * (BLOCK / G); first < a.rows; first += row_step<G>()) {
        size_t r = first + threadIdx.x / G;
        /* all threads come to the barriers */
        int64_t cols = r < a.rows ? (int64_t)a.cols : 0;
        row_share<T, N, G, NORM_KEPT> x((const T *)a.in + r * a.cols, cols);
        T *out = (T *)a.out + r * a.cols;
        pack<float, 1> sum = { { 0 } }, squares = { { 0 } };
        if (!a.rms) { /* the same for all threads */
            x.each([&](int64_t, pack<float, N> v) {
                for (int k = 0; k < N; k++) sum.v[0] += v.v[k];
            });
            sum = group_sums<G>(sum, turn ^= 1);
        }
        float mean = sum.v[0] / (float)a.cols;
        x.each([&](int64_t, pack<float, N> v) {
            for (int k = 0; k < N; k++) squares.v[0] += (v.v[k] - mean) * (v.v[k] - mean);
        });
        squares = group_sums<G>(squares, turn ^= 1);
        float rstd = 1 / sqrtf(squares.v[0] / (float)a.cols + (float)a.eps);
        x.each([&](int64_t c, pack<float, N> v) {
            pack<float, N> gain = get<N>(gains + c), bias = { { 0 } };
            if (biases) bias = get<N>(biases + c);
            for (int k = 0; k < N; k++) v.v[k] = (v.v[k] - mean) * rstd * gain.v[k] + bias.v[k];
            give(out + c, v);
        });
        if (threadIdx.x % G > 0 || r >= a.rows) continue;
        if (!a.rms) ((float *)a.mean)[r] = mean;
        ((float *)a.rstd)[r] = rstd;
    }
}

template <class T> static dt_status norm(const dt_norm_args *a, void *stream) {
    const int N = pack<T>::N;
    size_t each = N * NORM_KEPT; /* columns that a thread keeps */
    bool whole = a->cols % N == 0 && aligned16(a->in, a->out, a->gain, a->rms ? NULL : a->bias);
    if (!whole)
        LAUNCH((norm_kernel<T, 1, BLOCK>), a->rows, 1, stream, *a);
    else if (a->cols <= 32 * each)
        LAUNCH((norm_kernel<T, N, 32>), a->rows, WARPS, stream, *a);
    else if (a->cols <= 128 * each)
        LAUNCH((norm_kernel<T, N, 128>), a->rows, BLOCK / 128, stream, *a);
    else
        LAUNCH((norm_kernel<T, N, BLOCK>), a->rows, 1, stream, *a);
    return launched();
}
TYPED(norm)

static __device__ float mean_of(const dt_norm_back_args &a, size_t r) {
    return a.rms ? 0 : ((const float *)a.mean)[r];
}

/* With y = (x - mean) rstd and g = dout gain: dx = rstd (g - mean(g) - y mean(g y)), dgain = sum
   over rows of dout y, dbias = sum over rows of dout; mean(g) is the mean's doing, so RMSNorm has
   none. Everything at once, for rows of at most K packs for each of G threads: a block leaves the
   sums over its rows in scratch, (2,parts,cols) of all. */
template <int N, int G, int K>
static __device__ void leave_sums(float *out, int64_t cols, pack<float, N> *sum) {
    __shared__ pack<float, N> of_group[BLOCK / G][K * G];
    for (int j = 0; j < K; j++) of_group[threadIdx.x / G][j * G + threadIdx.x % G] = sum[j];
    __syncthreads();
    for (int c = threadIdx.x; c < cols; c += BLOCK) {
        float total = 0;
        for (int group = 0; group < BLOCK / G; group++) total += of_group[group][c / N].v[c % N];
        out[c] = total;
    }
    __syncthreads(); /* the sums have been read */
}

/* A row and its gradient, as one of G threads has them; a row past the end has no columns. */
template <class T, int G, int K> struct norm_row {
    float mean, rstd;
    row_share<T, pack<T>::N, G, K> x, dout;

    __device__ norm_row(const dt_norm_back_args &a, size_t r)
        : mean(r < a.rows ? mean_of(a, r) : 0), rstd(r < a.rows ? ((const float *)a.rstd)[r] : 0),
          x((const T *)a.in + r * a.cols, r < a.rows ? (int64_t)a.cols : 0),
          dout((const T *)a.dout + r * a.cols, r < a.rows ? (int64_t)a.cols : 0) {}
};

/* The next row is on its way while one is computed. */
template <class T, int G, int K>
KERNEL __launch_bounds__(BLOCK, 2) norm_back_kernel(dt_norm_back_args a) {
    const int N = pack<T>::N;
    const T *gains = (const T *)a.gain;
    size_t first = (size_t)blockIdx.x * (BLOCK / G), me = threadIdx.x / G;
    pack<float, N> dgain[K] = { { { 0 } } }, dbias[K] = { { { 0 } } };
    norm_row<T, G, K> next(a, first + me);
    /* of the block: all its threads come to the barriers */
    for (int turn = 0; first < a.rows; turn ^= 1) {
        norm_row<T, G, K> row = next;
        T *dx = (T *)a.dx + (first + me) * a.cols;
        pack<float, 2> sum = { { 0, 0 } }; /* of g, of g y */
        first += row_step<G>();
        next = norm_row<T, G, K>(a, first + me);
        UNROLL
        for (int j = 0; j < K; j++) {
            if (row.x.place(j) >= row.x.cols) continue;
            pack<float, N> v = widened(row.x.kept[j]), d = widened(row.dout.kept[j]);
            pack<float, N> gain = get<N>(gains + row.x.place(j));
            for (int k = 0; k < N; k++) {
                float y = (v.v[k] - row.mean) * row.rstd, g = d.v[k] * gain.v[k];
                dgain[j].v[k] += d.v[k] * y;
                dbias[j].v[k] += d.v[k];
                sum.v[0] += g;
                sum.v[1] += g * y;
            }
        }
        if (!a.dx) continue;
        sum = group_sums<G>(sum, turn);
        float mean_g = a.rms ? 0 : sum.v[0] / (float)a.cols,
              slope = row.rstd * (sum.v[1] / (float)a.cols);
        UNROLL
        for (int j = 0; j < K; j++) {
            if (row.x.place(j) >= row.x.cols) continue;
            pack<float, N> v = widened(row.x.kept[j]), d = widened(row.dout.kept[j]);
            pack<float, N> gain = get<N>(gains + row.x.place(j));
            for (int k = 0; k < N; k++)
                v.v[k] = row.rstd * (d.v[k] * gain.v[k] - mean_g - (v.v[k] - row.mean) * slope);
            give(dx + row.x.place(j), v, a.accumulate_x);
        }
    }
    float *sums = (float *)a.work + blockIdx.x * a.cols;
    if (a.dgain) leave_sums<N, G, K>(sums, (int64_t)a.cols, dgain);
    if (a.dbias) leave_sums<N, G, K>(sums + gridDim.x * a.cols, (int64_t)a.cols, dbias);
}

/* The same in two kernels, for longer and for odd rows. */
template <class T, int N>
KERNEL __launch_bounds__(COLUMNS *RUNS, 1)
    norm_back_sums_kernel(dt_norm_back_args a, size_t parts) {
    size_t tiles = packs_in(a.cols, COLUMNS * N);
    for (size_t i = blockIdx.x; i < parts * tiles; i += gridDim.x) {
        size_t part = i / tiles, first = i % tiles * COLUMNS * N, c = first + threadIdx.x * N;
        run all = { 0, a.rows }, mine = run_of(run_of(all, parts, part), RUNS, threadIdx.y);
        pack<float, N> dgain = { { 0 } }, dbias = { { 0 } };
        for (size_t r = mine.first; r < mine.end && c < a.cols; r++) {
            pack<float, N> x = get<N>((const T *)a.in + r * a.cols + c),
                           d = get<N>((const T *)a.dout + r * a.cols + c);
            float mean = mean_of(a, r), rstd = ((const float *)a.rstd)[r];
            for (int k = 0; k < N; k++) {
                dgain.v[k] += d.v[k] * ((x.v[k] - mean) * rstd);
                dbias.v[k] += d.v[k];
            }
        }
        float gain_total = add_runs(dgain), bias_total = add_runs(dbias),
              *sums = (float *)a.work + part * a.cols;
        c = first + my_column();
        if (my_column() >= COLUMNS * N || c >= a.cols) continue;
        sums[c] = gain_total;
        sums[parts * a.cols + c] = bias_total;
    }
}

template <class T, int N, int G>
KERNEL __launch_bounds__(BLOCK, 2) norm_back_rows_kernel(dt_norm_back_args a) {
    const T *gains = (const T *)a.gain;
    for (size_t r = row_first<G>(); r < a.rows; r += row_step<G>()) {
        row_share<T, N, G> x((const T *)a.in + r * a.cols, (int64_t)a.cols);
        row_share<T, N, G> dout((const T *)a.dout + r * a.cols, (int64_t)a.cols);
        T *dx = (T *)a.dx + r * a.cols;
        float mean = mean_of(a, r), rstd = ((const float *)a.rstd)[r], g_sum = 0, gy_sum = 0;
        x.each_with(dout, [&](int64_t c, pack<float, N> v, pack<float, N> d) {
            pack<float, N> gain = get<N>(gains + c);
            for (int k = 0; k < N; k++) {
                g_sum += d.v[k] * gain.v[k];
                gy_sum += d.v[k] * gain.v[k] * ((v.v[k] - mean) * rstd);
            }
        });
        float mean_g = group_sum<G>(g_sum) / (float)a.cols,
              mean_gy = group_sum<G>(gy_sum) / (float)a.cols;
        if (a.rms) mean_g = 0;
        x.each_with(dout, [&](int64_t c, pack<float, N> v, pack<float, N> d) {
            pack<float, N> gain = get<N>(gains + c);
            for (int k = 0; k < N; k++)
                v.v[k] = rstd * (d.v[k] * gain.v[k] - mean_g - (v.v[k] - mean) * rstd * mean_gy);
            give(dx + c, v, a.accumulate_x);
        });
    }
}

/* Into how many parts the rows are cut, `each` or more of them: as many as fill a GPU and find
   room. */
static size_t norm_back_parts(const dt_norm_back_args *a, size_t each) {
    size_t parts = a->rows / each + (a->rows % each != 0),
           room = a->work_bytes / sizeof(float) / 2 / a->cols;
    parts = parts < (size_t)FILL ? parts : (size_t)FILL;
    return parts < room ? parts : room;
}

/* The blocks that leave sums are as many as the parts; without sums they are as for any other
   kernel. */
template <class T, int G, int K>
static void norm_back_at_once(const dt_norm_back_args *a, size_t parts, void *stream) {
    unsigned grid = parts > 0 ? (unsigned)parts : grid_for(a->rows, BLOCK / G);
    if (a->rows > 0) DT_LAUNCH((norm_back_kernel<T, G, K>), grid, BLOCK, 0, stream_of(stream), *a);
}

/* The sums over rows come first: dx may lie where dout does. */
template <class T, int N>
static void norm_back_apart(const dt_norm_back_args *a, size_t parts, void *stream) {
    size_t tiles = parts * packs_in(a->cols, COLUMNS * N);
    if (tiles > 0)
        DT_LAUNCH((norm_back_sums_kernel<T, N>), grid_for(tiles, 1), dim3(COLUMNS, RUNS), 0,
            stream_of(stream), *a, parts);
    if (a->dx) LAUNCH((norm_back_rows_kernel<T, N, BLOCK>), a->rows, 1, stream, *a);
}

template <class T> static dt_status norm_back(const dt_norm_back_args *a, void *stream) {
    size_t packs = packs_in(a->cols, pack<T>::N), parts = 0;
    bool summed = (a->dgain || a->dbias) && a->cols > 0;
    bool whole = a->cols % pack<T>::N == 0 && aligned16(a->in, a->dout, a->gain, a->dx);
    bool at_once = whole && packs <= BLOCK * 3;
    /* for a row */
    size_t threads = packs <= 32 * 3 ? 32 : packs <= 64 * 3 ? 64 : packs <= 128 * 3 ? 128 : BLOCK;
    if (summed) parts = norm_back_parts(a, at_once ? BLOCK / threads : 2 * RUNS);
    if (summed && a->rows > 0 && (!a->work || parts == 0)) return DT_ERR_ARG;
    if (at_once && threads == 32)
        norm_back_at_once<T, 32, 3>(a, parts, stream);
    else if (at_once && threads == 64)
        norm_back_at_once<T, 64, 3>(a, parts, stream);
    else if (at_once && threads == 128)
        norm_back_at_once<T, 128, 3>(a, parts, stream);
    else if (at_once)
        norm_back_at_once<T, BLOCK, 3>(a, parts, stream);
    else if (whole)
        norm_back_apart<T, pack<T>::N>(a, parts, stream);
    else
        norm_back_apart<T, 1>(a, parts, stream);
    sums dgain = { a->work, a->dgain, widened_type(a->dtype, a->wide_gain), 1, 1, parts, a->cols, 1,
        a->accumulate_gain };
    sums dbias = { (float *)a->work + parts * a->cols, a->dbias,
        widened_type(a->dtype, a->wide_bias), 1, 1, parts, a->cols, 1, a->accumulate_bias };
    if (a->dgain || a->dbias)
        launch_column_sums<float, 1>(
            a->dgain ? dgain : dbias, a->dgain && a->dbias ? &dbias : NULL, stream);
    return launched();
}
TYPED(norm_back)

/* out may be in: a thread meets its own columns only. */
template <class T, int N, int G>
KERNEL __launch_bounds__(BLOCK, 2) softmax_kernel(dt_softmax_args a) {
    for (size_t r = row_first<G>(); r < a.rows; r += row_step<G>()) {
        row_share<T, N, G> x((const T *)a.in + r * a.cols, (int64_t)a.cols);
        T *out = (T *)a.out + r * a.cols;
        float most = -INFINITY, sum = 0;
        x.each([&](int64_t, pack<float, N> v) {
            for (int k = 0; k < N; k++) most = v.v[k] > most ? v.v[k] : most;
        });
        most = group_max<G>(most);
        x.each([&](int64_t, pack<float, N> v) {
            for (int k = 0; k < N; k++) sum += exponential<T>(v.v[k] - most);
        });
        float inverse = 1 / group_sum<G>(sum);
        x.each([&](int64_t c, pack<float, N> v) {
            for (int k = 0; k < N; k++) v.v[k] = exponential<T>(v.v[k] - most) * inverse;
            give(out + c, v);
        });
    }
}

template <class T> static dt_status softmax(const dt_softmax_args *a, void *stream) {
    bool whole = a->cols % pack<T>::N == 0 && aligned16(a->in, a->out);
    if (a->cols > 0) LAUNCH_ROWS(softmax_kernel, T, whole, a->rows, a->cols, stream, *a);
    return launched();
}
TYPED(softmax)

template <class T, int N, int G>
KERNEL __launch_bounds__(BLOCK, 2) softmax_back_kernel(dt_softmax_back_args a) {
    for (size_t r = row_first<G>(); r < a.rows; r += row_step<G>()) {
        row_share<T, N, G> y((const T *)a.out + r * a.cols, (int64_t)a.cols);
        row_share<T, N, G> dout((const T *)a.dout + r * a.cols, (int64_t)a.cols);
        T *dx = (T *)a.dx + r * a.cols;
        float sum = 0;
        y.each_with(dout, [&](int64_t, pack<float, N> v, pack<float, N> d) {
            for (int k = 0; k < N; k++) sum += v.v[k] * d.v[k];
        });
        sum = group_sum<G>(sum);
        y.each_with(dout, [&](int64_t c, pack<float, N> v, pack<float, N> d) {
            for (int k = 0; k < N; k++) v.v[k] *= d.v[k] - sum;
            give(dx + c, v, a.accumulate);
        });
    }
}

template <class T> static dt_status softmax_back(const dt_softmax_back_args *a, void *stream) {
    bool whole = a->cols % pack<T>::N == 0 && aligned16(a->out, a->dout, a->dx);
    LAUNCH_ROWS(softmax_back_kernel, T, whole, a->rows, a->cols, stream, *a);
    return launched();
}
TYPED(softmax_back)

// ==== 11. Rope; the counter RNG: dropout, init ==================================================

/* arXiv:2104.09864. A block takes as many tokens as have BLOCK pairs: first their angles, which
   serve all heads, then all heads, N pairs at a time. Angles are taken in double, because a float's
   cosine of a position in the thousands has lost its last digits; their rates are made on the host.
   A thread reads pairs before it writes them: out may be in. */
struct rope_rates {
    double of[BLOCK];
};

template <class T, int N>
static __device__ void rope_pairs(
    const dt_rope_args &a, const T *x, T *out, const float2 *turn, int i) {
    int half = (int)a.rotary / 2;
    if (a.interleaved) {
        const int M = N == 1 ? 1 : 2 * N; /* a pair may lie at an odd place */
        pack<float, M> both[2 * N / M];
        for (int k = 0; k < 2 * N; k += M) both[k / M] = get<M>(x + 2 * i + k);
        for (int k = 0; k < N; k++) {
            float *x0 = &both[2 * k / M].v[2 * k % M],
                  *x1 = &both[(2 * k + 1) / M].v[(2 * k + 1) % M], old = *x0;
            *x0 = old * turn[i + k].x - *x1 * turn[i + k].y;
            *x1 = *x1 * turn[i + k].x + old * turn[i + k].y;
        }
        for (int k = 0; k < 2 * N; k += M) give(out + 2 * i + k, both[k / M], a.accumulate);
        return;
    }
    pack<float, N> x0 = get<N>(x + i), x1 = get<N>(x + half + i);
    for (int k = 0; k < N; k++) {
        float old = x0.v[k];
        x0.v[k] = old * turn[i + k].x - x1.v[k] * turn[i + k].y;
        x1.v[k] = x1.v[k] * turn[i + k].x + old * turn[i + k].y;
    }
    give(out + i, x0, a.accumulate);
    give(out + half + i, x1, a.accumulate);
}

template <class T, int N>
KERNEL __launch_bounds__(BLOCK) rope_kernel(dt_rope_args a, rope_rates rates, int each) {
    __shared__ float2 turn[BLOCK];
    int half = (int)a.rotary / 2, heads = (int)a.heads, turning = half / N;
    int units = (int)(a.dim - a.rotary) / N + turning; /* of a head */
    for (size_t first = (size_t)blockIdx.x * each; first < a.tokens;
         first += (size_t)gridDim.x * each) {
        int here = a.tokens - first < (size_t)each ? (int)(a.tokens - first) : each,
            me = threadIdx.x;
        __syncthreads(); /* the angles before have been used */
        if (me < here * half) {
            double sine, cosine;
            sincos(a.positions[first + me / half] * rates.of[me % half], &sine, &cosine);
            turn[me] = make_float2((float)cosine, (float)(a.inverse ? -sine : sine));
        }
        __syncthreads();
        for (int u = me; u < here * heads * units; u += BLOCK) {
            int unit = u % units, head = u / units; /* of all these tokens */
            const T *x = (const T *)a.in + (first * a.heads + head) * a.dim;
            T *out = (T *)a.out + (first * a.heads + head) * a.dim;
            int at = (int)a.rotary + (unit - turning) * N;
            if (unit < turning)
                rope_pairs<T, N>(a, x, out, turn + head / heads * half, unit * N);
            else
                give(out + at, get<N>(x + at), a.accumulate);
        }
    }
}

template <class T> static dt_status rope(const dt_rope_args *a, void *stream) {
    const size_t N = pack<T>::N;
    size_t half = a->rotary / 2;
    rope_rates rates;
    if (a->rotary % 2 || a->rotary > a->dim || a->dim > 2 * BLOCK) return DT_ERR_ARG;
    for (size_t i = 0; i < half; i++)
        rates.of[i] = pow(a->theta, -2.0 * (double)i / (double)a->rotary);
    int each = half > BLOCK / 8 ? BLOCK / (int)half : 8;
    bool aligned =
        aligned16(a->in, a->out) && a->dim % N == 0 && half % N == 0 && a->rotary % N == 0;
    if (aligned)
        LAUNCH((rope_kernel<T, pack<T>::N>), a->tokens, each, stream, *a, rates, each);
    else
        LAUNCH((rope_kernel<T, 1>), a->tokens, each, stream, *a, rates, each);
    return launched();
}
TYPED(rope)

/* Philox4x32-10: as in dt_tensor.h, word for word. */
static __device__ void philox(uint64_t key, uint64_t counter, unsigned out[4]) {
    unsigned k0 = (unsigned)key, k1 = (unsigned)(key >> 32);
    unsigned c0 = (unsigned)counter, c1 = (unsigned)(counter >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0; /* one instruction */
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

/* Four columns of the full tensor share the four words of counter (token, column / 4). Packs are
   taken where they begin at such a group. least: words below it are dropped. */
template <class T>
KERNEL __launch_bounds__(BLOCK) dropout_kernel(dt_dropout_args a, unsigned least) {
    float scale = (float)(1 / (1 - a.p));
    bool aligned = aligned16(a.in, a.out) && a.first % 4 == 0;
    each_in_rows<pack<T>::N>(a.rows, a.cols, aligned, [&](size_t row, size_t col, auto by) {
        const int N = decltype(by)::N;
        uint64_t token = (unsigned)(a.tokens ? a.tokens[row] : (int32_t)row),
                 column = (uint64_t)a.first + col;
        pack<float, N> x = get<N>((const T *)a.in + row * a.cols + col);
        unsigned word[4];
        for (int k = 0; k < N; k++) {
            if (k % 4 == 0) philox(a.key, token << 32 | (column + k) / 4, word);
            /* which word, without an index into registers */
            int e = N > 1 ? k % 4 : (int)(column % 4);
            unsigned mine = e < 2 ? e < 1 ? word[0] : word[1] : e < 3 ? word[2] : word[3];
            x.v[k] = mine < least ? 0 : x.v[k] * scale;
        }
        give((T *)a.out + row * a.cols + col, x, a.accumulate);
    });
}

template <class T> static dt_status dropout(const dt_dropout_args *a, void *stream) {
    unsigned least = (unsigned)(a->p * 4294967296.0); /* p is below 1 */
    LAUNCH(dropout_kernel<T>, a->rows * a->cols, BLOCK * pack<T>::N, stream, *a, least);
    return launched();
}
TYPED(dropout)

/* Two words as a number in [0, 1) with 53 bits. */
static __device__ double unit(unsigned high, unsigned low) {
    return (double)(((uint64_t)high << 32 | low) >> 11) * (1.0 / 9007199254740992.0);
}

/* Elements 2c and 2c + 1 of the full tensor come from the four words of counter c: two uniform
   numbers, which are the CPU's to the bit, or a Box-Muller pair, where the last bits of a double
   may differ from the CPU's. A thread has one counter. Number: what T is computed in. */
template <class T, class Number> KERNEL __launch_bounds__(BLOCK) init_kernel(dt_init_args a) {
    uint64_t skew = a.first % 2;
    for (uint64_t i = flat_first(1); 2 * i < a.count + skew; i += flat_step(1)) {
        unsigned word[4];
        double pair[2];
        philox(a.key, a.first / 2 + i, word);
        double u = unit(word[0], word[1]), v = unit(word[2], word[3]);
        if (a.normal) {
            double radius = a.scale * sqrt(-2 * log(1 - u)); /* 1 - u in (0, 1] */
            sincos(6.283185307179586 * v, &pair[1], &pair[0]);
            for (int k = 0; k < 2; k++) pair[k] *= radius;
        } else {
            pair[0] = a.scale * (2 * u - 1);
            pair[1] = a.scale * (2 * v - 1);
        }
        /* what is before the first wraps around, to a large number */
        for (uint64_t k = 0; k < 2; k++)
            if (2 * i + k - skew < a.count)
                round_to((T *)a.out + (2 * i + k - skew), (Number)pair[k]);
    }
}

template <class T, class Number> static dt_status init(const dt_init_args *a, void *stream) {
    LAUNCH((init_kernel<T, Number>), a->count, 2 * BLOCK, stream, *a);
    return launched();
}

static dt_status cuda_init(const dt_init_args *a, void *stream) {
    switch (a->dtype) {
    case DT_F32: return init<float, float>(a, stream);
    case DT_BF16: return init<bf16, float>(a, stream);
    case DT_F16: return init<f16, float>(a, stream);
    case DT_F64: return init<double, double>(a, stream);
    case DT_I32: break;
    }
    return DT_ERR_UNSUPPORTED;
}

// ==== 12. Embedding =============================================================================

template <class T> KERNEL __launch_bounds__(BLOCK) embedding_kernel(dt_embedding_args a, int *bad) {
    each_in_rows<pack<T>::N>(
        a.rows, a.cols, aligned16(a.out, a.table), [&](size_t r, size_t col, auto by) {
            const int N = decltype(by)::N;
            int64_t id = a.ids[r], row = id - a.first;
            pack<T, N> x = { { T() } };
            bool known = good(id, a.holes ? -1 : 0, a.vocab, bad) && id >= 0;
            if (known && row >= 0 && row < a.held)
                x = take<N>((const T *)a.table + (size_t)row * a.cols + col);
            put((T *)a.out + r * a.cols + col, x);
        });
}

template <class T> static dt_status embedding(const dt_embedding_args *a, void *stream) {
    dt_status status = check_indices(a->ids, a->rows, a->holes ? -1 : 0, a->vocab, stream);
    if (status != DT_OK) return status;
    LAUNCH(embedding_kernel<T>, a->rows * a->cols, BLOCK * pack<T>::N, stream, *a, bad_of(stream));
    return launched();
}
TYPED(embedding)

/* A block owns at most OWNED rows of the table and looks through all ids, PIECE at a time, for
   those that are its own. It lists their places, in the order of its rows, and then adds: rows of
   dout in order, in f32. These are the CPU's bits, without scratch and atomics. All ids are read
   once by each block, 16,384 ids for a table of 50,257 rows 26 million times, but from the
   cache. */
enum { OWNED = 32, PIECE = 8 * BLOCK, LISTED = 2 * PIECE, WINDOW = 1 << 26, FEW = 16 };

/* The rows own .. end of the table, and those of the ids from `base` on, fewer than 2 WINDOW, that
   name them: how far from base times OWNED, plus the row's number among the owned. */
struct owned_list {
    unsigned found[LISTED], by_row[LISTED]; /* ascending; and row after row, each ascending */
    int of_row[OWNED], begin[OWNED + 1], of_warp[WARPS];
    /* those that are named up to FEW times, and those that are more often */
    int rows[2][OWNED], count[2];
};

/* Appends to the list what ids first .. first + PIECE bring. Answers how many it has then. */
static __device__ int list_owned(owned_list &list, int count, const dt_embedding_back_args &a,
    size_t base, size_t first, int64_t own, int64_t end, int *bad) {
    int row[8], mine = 0, before = count, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned hits[8];
    size_t begin = first + warp * 8 * 32 + lane;
    UNROLL
    for (int k = 0; k < 8; k++) row[k] = begin + k * 32 < a.rows ? a.ids[begin + k * 32] : -1;
    for (int k = 0; k < 8; k++) {
        int64_t at = row[k] - a.first;
        if (row[k] != -1 && a.strict && own == 0) good(at, 0, a.held, bad);
        row[k] = row[k] != -1 && at >= own && at < end ? (int)(at - own) : -1;
        mine += row[k] >= 0;
    }
    if (!__syncthreads_or(mine)) return count; /* a barrier: the list before has been used */
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
            list.found[at] = (unsigned)(begin + k * 32 - base) * OWNED + (unsigned)row[k];
        before += __popc(hits[k]);
    }
    return count;
}

/* Takes every WARPS-th row, a warp each: counts what is found for it, and copies that to
   list.by_row where `copy`. */
static __device__ void count_owned(owned_list &list, int count, bool copy) {
    int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < OWNED; row += WARPS) {
        int at = copy ? list.begin[row] : 0;
        for (int e = 0; e < count; e += 32) {
            unsigned found = e + lane < count ? list.found[e + lane] : 0;
            bool here = e + lane < count && (int)(found % OWNED) == row;
            unsigned hits = __ballot_sync(0xffffffffu, here);
            if (copy && here) list.by_row[at + __popc(hits & ((1u << lane) - 1))] = found / OWNED;
            at += __popc(hits);
        }
        if (!copy && lane == 0) list.of_row[row] = at;
    }
    __syncthreads();
}

/* least: how often a row must be named to be in list.rows. rows: those that are owned. */
static __device__ void sort_owned(owned_list &list, int count, int least, int rows) {
    int begin = 0, row = threadIdx.x;
    __syncthreads(); /* the list is complete */
    count_owned(list, count, false);
    for (int before = 0; before < OWNED && before < row; before++) begin += list.of_row[before];
    if (row <= OWNED) list.begin[row] = begin;
    for (int often = 0; often < 2 && row < OWNED; often++) { /* the first warp's lanes */
        int n = list.of_row[row];
        bool here = often ? n > FEW : n <= FEW && n >= least && row < rows;
        unsigned hits = __ballot_sync(0xffffffffu, here);
        if (here) list.rows[often][__popc(hits & ((1u << row) - 1))] = row;
        if (row == 0) list.count[often] = __popc(hits);
    }
    __syncthreads();
    count_owned(list, count, true);
}

/* Adds what was found for the rows that are named often, or are not: a warp takes 32 N columns of a
   row, and AT_ONCE of what is to be added is on its way at a time. anew: sums are not there yet. */
template <int N, int AT_ONCE, class T>
static __device__ void add_owned(
    const owned_list &list, int often, float *sums, const T *dout, size_t cols, bool anew) {
    int chunks = (int)packs_in(cols, 32 * N);
    for (int u = threadIdx.x / 32; u < list.count[often] * chunks; u += WARPS) {
        int row = list.rows[often][u / chunks], begin = list.begin[row];
        size_t c = (size_t)(u % chunks * 32 + threadIdx.x % 32) * N;
        pack<float, N> sum = { { 0 } };
        if (c >= cols) continue;
        if (!anew) sum = take<N>(sums + row * cols + c);
        add_packs<AT_ONCE>(&sum, list.begin[row + 1] - begin,
            [&](size_t e) { return dout + list.by_row[begin + e] * cols + c; });
        put(sums + row * cols + c, sum);
    }
}

/* keep: sums are there already. owned: rows of a block. cols is a multiple of N. A row that is
   named often is cut into more pieces, because the order makes it wait for each of them. */
template <class T, int N>
KERNEL __launch_bounds__(BLOCK, 3)
    embedding_back_kernel(dt_embedding_back_args a, float *sums, bool keep, int owned, int *bad) {
    const int LESS = (N + 3) / 4;
    __shared__ owned_list list;
    for (int64_t own = (int64_t)blockIdx.x * owned; own == 0 || own < a.held;
         own += (int64_t)gridDim.x * owned) {
        int64_t end = own + owned < a.held ? own + owned : a.held;
        size_t base = 0;
        int count = 0;
        bool anew = !keep;
        for (size_t first = 0; first < a.rows || anew; first += PIECE) {
            size_t next = first + PIECE;
            const T *dout = (const T *)a.dout + base * a.cols;
            float *mine = sums + own * a.cols;
            count = list_owned(list, count, a, base, first, own, end, bad);
            if (next < a.rows && count <= LISTED - PIECE && next - base < WINDOW) continue;
            sort_owned(list, count, anew ? 0 : 1, (int)(end - own));
            add_owned<N, 4>(list, 0, mine, dout, a.cols, anew);
            add_owned<LESS, 16>(list, 1, mine, dout, a.cols, anew);
            anew = false;
            base = next;
            count = 0;
        }
    }
}

/* Finished sums to 16 bits. */
template <class T>
KERNEL __launch_bounds__(BLOCK)
    rounded_kernel(T *out, const float *sums, size_t count, int accumulate) {
    each_flat<pack<T>::N>(count, aligned16(out, sums),
        [&](size_t i, auto by) { give(out + i, get<decltype(by)::N>(sums + i), accumulate); });
}

template <class T> static dt_status embedding_back(const dt_embedding_back_args *a, void *stream) {
    const int N = pack<T>::N;
    dt_status status = a->strict ? check_indices(a->ids, a->rows, -1, a->held, stream) : DT_OK;
    size_t all = (size_t)a->held * a->cols;
    bool apart = sizeof(T) == 2 && !a->wide, keep = a->accumulate && !apart;
    float *sums = (float *)(apart ? a->work : a->dtable);
    T *table = (T *)a->dtable;
    if (status != DT_OK) return status;
    if (apart && (!sums || a->work_bytes < all * sizeof *sums)) return DT_ERR_ARG;
    size_t held = a->held > 0 ? (size_t)a->held : 1; /* ids are looked at all the same */
    /* to fill a GPU */
    int owned = held < FILL ? 1 : held < (size_t)FILL * OWNED ? (int)(held / FILL) : (int)OWNED;
    if (a->cols % N == 0 && aligned16(sums, a->dout))
        LAUNCH((embedding_back_kernel<T, N>), held, owned, stream, *a, sums, keep, owned,
            bad_of(stream));
    else
        LAUNCH((embedding_back_kernel<T, 1>), held, owned, stream, *a, sums, keep, owned,
            bad_of(stream));
    if (apart)
        LAUNCH(rounded_kernel<T>, all, BLOCK * N, stream, table, (const float *)sums, all,
            a->accumulate);
    return launched();
}
TYPED(embedding_back)

// ==== 13. Losses ================================================================================

/* A row of logits is a block's, because a vocabulary is long. */
enum { LOSS_BLOCK = 512, TOTAL_BLOCK = 512 };

/* Before sm_80 a multiprocessor may have no more than 1,024 threads. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
enum { LOSS_AT_ONCE = 2 };
#else
enum { LOSS_AT_ONCE = 3 };
#endif

/* log(sum of exp(x)) in one pass, for each thread of the block: a thread's terms are relative to
   the largest number that it has met (arXiv:1805.02867), so nothing overflows. The terms are f32,
   sums of some packs of them are added in double, so that log is accurate where one term is nearly
   all of it. */
struct exponentials {
    float most;
    double sum;
};

/* Adds PACKS packs of x, LOSS_BLOCK packs apart and before `end`. */
template <class T, int N, int PACKS>
static __device__ void add_exponentials(exponentials *e, const T *x, size_t c, size_t end) {
    const size_t APART = LOSS_BLOCK * N;
    held<T, N> packs[PACKS];
    float top = e->most, part = 0;
    UNROLL
    for (int j = 0; j < PACKS; j++)
        if (c + j * APART < end)
            packs[j] = *reinterpret_cast<const held<T, N> *>(x + c + j * APART);
    UNROLL
    for (int j = 0; j < PACKS; j++) {
        pack<float, N> v = widened(packs[j]);
        for (int k = 0; k < N && c + j * APART < end; k++) top = fmaxf(top, v.v[k]);
    }
    if (top > e->most) e->sum *= (double)expf(e->most - top);
    e->most = top;
    UNROLL
    for (int j = 0; j < PACKS; j++) {
        pack<float, N> v = widened(packs[j]);
        for (int k = 0; k < N && c + j * APART < end; k++) part += exponential<T>(v.v[k] - top);
    }
    e->sum += (double)part;
}

template <class T> static __device__ double log_sum_exp(const T *x, size_t n) {
    const int N = pack<T>::N, PACKS = 4;
    run whole = whole_packs<N>(x, n);
    size_t me = threadIdx.x;
    exponentials e = { -3.402823466e38f, 0 };
    if (me < whole.first) add_exponentials<T, 1, 1>(&e, x, me, n);
    for (size_t c = whole.first + me * N; c < whole.end; c += LOSS_BLOCK * N * PACKS)
        add_exponentials<T, N, PACKS>(&e, x, c, whole.end);
    for (size_t c = whole.end + me; c < n; c += LOSS_BLOCK) add_exponentials<T, 1, 1>(&e, x, c, n);
    float top = block_max<LOSS_BLOCK>(e.most);
    double sum = block_sum<double, LOSS_BLOCK>(e.sum * (double)expf(e.most - top));
    return sum == 0 ? NAN : (double)top + log(sum); /* 0: all are -infinity */
}

template <class T> static __device__ double row_total(const T *x, size_t n) {
    double sum = 0;
    for (size_t c = threadIdx.x; c < n; c += LOSS_BLOCK) sum += (double)widen(x[c]);
    return block_sum<double, LOSS_BLOCK>(sum);
}

/* The columns are those from `first` on of `all`. The label is the whole block's, so all its
   threads reach the same barriers. */
template <class T>
KERNEL __launch_bounds__(LOSS_BLOCK, LOSS_AT_ONCE)
    cross_entropy_kernel(dt_cross_entropy_args a, int *bad) {
    int64_t vocab = (int64_t)a.vocab;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const T *x = (const T *)a.logits + r * a.cols;
        int64_t label = a.labels[r], here = label - a.first;
        double lse = 0, target = 0;
        if (label >= 0 && good(label, 0, a.all, threadIdx.x == 0 ? bad : NULL)) {
            lse = vocab > 0 ? log_sum_exp(x, a.vocab) : (double)-INFINITY;
            if (here >= 0 && here < vocab) target = (1 - a.smoothing) * (double)widen(x[here]);
            if (a.smoothing > 0 && vocab > 0)
                target += a.smoothing * (row_total(x, a.vocab) / (double)a.all);
        }
        if (threadIdx.x > 0) continue;
        if (a.part) {
            a.part[2 * r] = lse;
            a.part[2 * r + 1] = target;
        } else {
            ((float *)a.lse)[r] = (float)lse;
            a.row_loss[r] = lse - target;
        }
    }
}

/* One block for all rows. */
KERNEL __launch_bounds__(TOTAL_BLOCK, 1) loss_total_kernel(dt_cross_entropy_args a) {
    double total = 0, squares = 0;
    for (size_t r = threadIdx.x; r < a.rows; r += TOTAL_BLOCK) {
        double lse = (double)((const float *)a.lse)[r];
        total += a.row_loss[r];
        squares += lse * lse;
    }
    total = block_sum<double, TOTAL_BLOCK>(total);
    squares = block_sum<double, TOTAL_BLOCK>(squares);
    if (threadIdx.x > 0) return;
    *a.loss = (a.add ? *a.loss : 0) + total / a.denominator;
    if (a.z_loss) *a.z_loss = (a.add ? *a.z_loss : 0) + squares / a.denominator;
}

template <class T> static dt_status cross_entropy(const dt_cross_entropy_args *args, void *stream) {
    dt_cross_entropy_args a = *args;
    if (!a.part && a.vocab == 0) a.vocab = a.cols;
    if (a.vocab > a.cols) return DT_ERR_ARG;
    if (!a.part) a.first = 0;
    if (!a.part) a.all = (int64_t)a.vocab;
    dt_status status = check_indices(a.labels, a.rows, INT32_MIN, a.all, stream);
    if (status != DT_OK) return status;
    if (a.rows > 0)
        DT_LAUNCH(cross_entropy_kernel<T>, grid_for(a.rows, 1), LOSS_BLOCK, 0, stream_of(stream), a,
            bad_of(stream));
    if (!a.part) DT_LAUNCH(loss_total_kernel, 1, TOTAL_BLOCK, 0, stream_of(stream), a);
    return launched();
}
TYPED(cross_entropy)

/* One block: a thread has every TOTAL_BLOCK-th row, of which it adds the parts in their order. */
KERNEL __launch_bounds__(TOTAL_BLOCK, 1) cross_entropy_join_kernel(dt_cross_entropy_join_args a) {
    double total = 0, squares = 0;
    for (size_t r = threadIdx.x; r < a.rows; r += TOTAL_BLOCK) {
        double lse = 0, target = 0, most = -INFINITY, sum = 0;
        for (size_t i = 0; i < a.n; i++) {
            double part = a.parts[2 * (i * a.rows + r)];
            most = part > most ? part : most;
        }
        for (size_t i = 0; i < a.n && a.labels[r] >= 0; i++) {
            sum += (double)expf((float)(a.parts[2 * (i * a.rows + r)] - most));
            target += a.parts[2 * (i * a.rows + r) + 1];
        }
        if (a.labels[r] >= 0) lse = most + log(sum);
        ((float *)a.lse)[r] = (float)lse;
        total += lse - target;
        squares += lse * lse;
    }
    total = block_sum<double, TOTAL_BLOCK>(total);
    squares = block_sum<double, TOTAL_BLOCK>(squares);
    if (threadIdx.x > 0) return;
    *a.loss = total / a.denominator;
    if (a.z_loss) *a.z_loss = squares / a.denominator;
}

/* The same for all types: parts and lse are not of T. */
static dt_status cuda_cross_entropy_join(const dt_cross_entropy_join_args *a, void *stream) {
    if (a->dtype != DT_F32 && a->dtype != DT_BF16 && a->dtype != DT_F16) return DT_ERR_UNSUPPORTED;
    DT_LAUNCH(cross_entropy_join_kernel, 1, TOTAL_BLOCK, 0, stream_of(stream), *a);
    return launched();
}

/* dlogits (+)= factor (exp(x - lse) (1 + 2 z lse) - target), nothing for a row without a label:
   read once, written once. A row is cut into gridDim.y pieces. */
template <class T>
KERNEL __launch_bounds__(LOSS_BLOCK)
    cross_entropy_back_kernel(dt_cross_entropy_back_args a, int *bad) {
    const int MOST = pack<T>::N;
    float factor = (float)(*a.upstream * a.scale),
          off = factor * (float)(a.smoothing / (double)a.all);
    float on = factor * (float)(1 - a.smoothing);
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        run all = { 0, a.cols }, mine = run_of(all, gridDim.y, blockIdx.y);
        const T *x = (const T *)a.logits + r * a.cols + mine.first;
        T *out = (T *)a.dlogits + r * a.cols + mine.first;
        float lse = ((const float *)a.lse)[r], scale = factor * (1 + (float)(2 * a.z) * lse);
        int64_t label = a.labels[r], here = label - a.first - (int64_t)mine.first;
        int64_t vocab = (int64_t)a.vocab - (int64_t)mine.first;
        bool counts = label >= 0 && good(label, 0, a.all, threadIdx.x == 0 ? bad : NULL);
        auto back = [&](size_t c, auto by) {
            const int N = decltype(by)::N;
            pack<float, N> v = { { 0 } };
            if (counts) v = get<N>(x + c);
            for (int k = 0; k < N && counts; k++) {
                float d = scale * exponential<T>(v.v[k] - lse) - off -
                          ((int64_t)c + k == here ? on : 0.0f);
                v.v[k] = (int64_t)c + k < vocab ? d : 0;
            }
            give(out + c, v, a.accumulate);
        };
        if (!counts && a.accumulate) continue;
        if ((uintptr_t)out % 16 == (uintptr_t)x % 16)
            each_in_run<MOST, LOSS_BLOCK>(x, mine.end - mine.first, back);
        else
            each_in_run<1, LOSS_BLOCK>(x, mine.end - mine.first, back);
    }
}

template <class T>
static dt_status cross_entropy_back(const dt_cross_entropy_back_args *args, void *stream) {
    dt_cross_entropy_back_args a = *args;
    if (a.all == 0 && a.vocab == 0) a.vocab = a.cols;
    if (a.vocab > a.cols) return DT_ERR_ARG;
    if (a.all == 0) {
        a.first = 0;
        a.all = (int64_t)a.vocab;
    }
    dt_status status = check_indices(a.labels, a.rows, INT32_MIN, a.all, stream);
    if (status != DT_OK) return status;
    /* few rows, too, fill a GPU */
    size_t pieces = a.rows >= 2 * FILL ? 1 : 2 * FILL / (a.rows + 1);
    size_t most = a.cols / (LOSS_BLOCK * pack<T>::N);
    pieces = pieces > most ? most : pieces;
    if (a.rows > 0)
        DT_LAUNCH(cross_entropy_back_kernel<T>, dim3(grid_for(a.rows, 1), pieces > 1 ? pieces : 1),
            LOSS_BLOCK, 0, stream_of(stream), a, bad_of(stream));
    return launched();
}
TYPED(cross_entropy_back)

/* One block, because there is no scratch: for outputs of a model, not for its weights. */
template <class T> KERNEL __launch_bounds__(TOTAL_BLOCK, 1) mse_kernel(dt_mse_args a) {
    const T *x = (const T *)a.a, *y = (const T *)a.b;
    double total = 0;
    auto add = [&](size_t i, auto by) {
        const int N = decltype(by)::N;
        pack<float, N> u = get<N>(x + i), v = get<N>(y + i);
        for (int k = 0; k < N; k++)
            total += ((double)u.v[k] - (double)v.v[k]) * ((double)u.v[k] - (double)v.v[k]);
    };
    if ((uintptr_t)x % 16 == (uintptr_t)y % 16)
        each_in_run<pack<T>::N, TOTAL_BLOCK>(x, a.count, add);
    else
        each_in_run<1, TOTAL_BLOCK>(x, a.count, add);
    total = block_sum<double, TOTAL_BLOCK>(total);
    if (threadIdx.x == 0) *a.loss = total / a.denominator;
}

template <class T> static dt_status mse(const dt_mse_args *a, void *stream) {
    DT_LAUNCH(mse_kernel<T>, 1, TOTAL_BLOCK, 0, stream_of(stream), *a);
    return launched();
}
TYPED(mse)

template <class T> KERNEL __launch_bounds__(BLOCK) mse_back_kernel(dt_mse_back_args a) {
    float factor = (float)(*a.upstream * a.scale);
    each_flat<pack<T>::N>(a.count, aligned16(a.da, a.a, a.b), [&](size_t i, auto by) {
        const int N = decltype(by)::N;
        pack<float, N> x = get<N>((const T *)a.a + i), y = get<N>((const T *)a.b + i);
        for (int k = 0; k < N; k++) x.v[k] = factor * (x.v[k] - y.v[k]);
        give((T *)a.da + i, x, a.accumulate);
    });
}

template <class T> static dt_status mse_back(const dt_mse_back_args *a, void *stream) {
    LAUNCH(mse_back_kernel<T>, a->count, BLOCK * pack<T>::N, stream, *a);
    return launched();
}
TYPED(mse_back)

// ==== 14. Norm and optimizers ===================================================================

/* Half a warp takes a run, 16 runs a block. Lane l adds elements l, l + 16, ..., then lanes are
   added in halves. That is the CPU's order, and a square of a float is exact in double: the norm
   has the same bits on both. */
enum { LANES = 16, RUNS_EACH = BLOCK / LANES };

static __device__ double lanes_sum(double sum) {
    for (int w = LANES / 2; w > 0; w /= 2) sum += __shfl_down_sync(0xffffffffu, sum, w, LANES);
    return sum;
}

static size_t runs_in(size_t count) { return count / DT_PIECE + (count % DT_PIECE != 0); }

template <class T>
KERNEL __launch_bounds__(BLOCK) square_sums_kernel(dt_square_sums_args a, size_t runs) {
    for (size_t first = (size_t)blockIdx.x * RUNS_EACH; first < runs;
         first += (size_t)gridDim.x * RUNS_EACH) {
        size_t run = first + threadIdx.x / LANES, left = run < runs ? a.count - run * DT_PIECE : 0;
        const T *x = (const T *)a.in + run * DT_PIECE;
        int end = left < DT_PIECE ? (int)left : DT_PIECE;
        double sum = 0;
        UNROLL_BY(16)
        for (int j = threadIdx.x % LANES; j < end; j += LANES)
            sum += (double)widen(x[j]) * (double)widen(x[j]);
        sum = lanes_sum(sum);
        if (threadIdx.x % LANES == 0 && run < runs) a.out[run] = sum;
    }
}

template <class T> static dt_status square_sums(const dt_square_sums_args *a, void *stream) {
    LAUNCH(square_sums_kernel<T>, a->count, (size_t)DT_PIECE * RUNS_EACH, stream, *a,
        runs_in(a->count));
    return launched();
}
TYPED(square_sums)

/* Parameters and their state are f32; Narrow is the type of a copy of the parameters, which may be
   there. */
#define BY_NARROW(a, f, ...) \
    ((a)->dtype != DT_F32 ? DT_ERR_UNSUPPORTED \
                          : BY_TYPE((a)->narrow ? (a)->narrow_dtype : DT_F32, f, __VA_ARGS__))

template <class Narrow, int N>
static __device__ void give_copy(void *narrow, size_t i, pack<float, N> param) {
    if (narrow) give((Narrow *)narrow + i, param);
}

/* A run of parameters and the factors of its step, which are made on the host in double as on the
   CPU. */
struct adamw_run {
    float *param, *m, *v;
    const float *grad;
    void *narrow;
    size_t count;
    float beta1, beta2, rest1, rest2, eps, rate, root, keep, decay, grad_scale;
};

/* What one launch updates: run r by the blocks from first[r] up to first[r + 1]. All of it are a
   kernel's parameters, which may have 4 KiB. */
enum { ADAMW_RUNS = 32 };
struct adamw_runs {
    unsigned n, first[ADAMW_RUNS + 1];
    adamw_run run[ADAMW_RUNS];
};
static_assert(sizeof(adamw_runs) <= 4096, "the parameters of a kernel");

/* m and v are running means of g and g^2. arXiv:1711.05101; coupled: arXiv:1412.6980 with the decay
   in the gradient. */
template <class Narrow> KERNEL __launch_bounds__(BLOCK) adamw_kernel(adamw_runs all) {
    unsigned mine = 0, end = all.n;
    while (end - mine > 1) { /* the run of this block lies in [mine, end) */
        unsigned middle = (mine + end) / 2;
        if (blockIdx.x < all.first[middle])
            end = middle;
        else
            mine = middle;
    }
    unsigned first = all.first[mine], blocks = all.first[mine + 1] - first;
    adamw_run f = all.run[mine];
    bool aligned = aligned16(f.param, f.grad, f.m, f.v) && aligned16(f.narrow);
    each_of_blocks<pack<float>::N>(
        blockIdx.x - first, blocks, f.count, aligned, [&](size_t i, auto by) {
            const int N = decltype(by)::N;
            pack<float, N> param = take<N>(f.param + i), grad = take<N>(f.grad + i);
            pack<float, N> m = take<N>(f.m + i), v = take<N>(f.v + i);
            for (int k = 0; k < N; k++) {
                float g = grad.v[k] * f.grad_scale + f.decay * param.v[k];
                m.v[k] = f.beta1 * m.v[k] + f.rest1 * g;
                v.v[k] = f.beta2 * v.v[k] + f.rest2 * g * g;
                param.v[k] =
                    f.keep * param.v[k] - f.rate * m.v[k] / (sqrtf(v.v[k]) * f.root + f.eps);
            }
            put(f.param + i, param);
            put(f.m + i, m);
            put(f.v + i, v);
            give_copy<Narrow>(f.narrow, i, param);
        });
}

static adamw_run adamw_run_of(const dt_adamw_args *a) {
    adamw_run f;
    f.param = (float *)a->param;
    f.m = (float *)a->m;
    f.v = (float *)a->v;
    f.grad = (const float *)a->grad;
    f.narrow = a->narrow;
    f.count = a->count;
    f.beta1 = (float)a->beta1;
    f.beta2 = (float)a->beta2;
    f.rest1 = (float)(1 - a->beta1);
    f.rest2 = (float)(1 - a->beta2);
    f.eps = (float)a->eps;
    f.rate = (float)(a->lr / (1 - pow(a->beta1, (double)a->step)));
    f.root = (float)(1 / sqrt(1 - pow(a->beta2, (double)a->step)));
    f.keep = (float)(a->coupled ? 1 : 1 - a->lr * a->weight_decay);
    f.decay = (float)(a->coupled ? a->weight_decay : 0);
    f.grad_scale = (float)a->grad_scale;
    return f;
}

/* Each run gets the blocks it would have alone: a small one gets one, and a large one as many as
   fill a GPU. */
template <class Narrow> static dt_status adamw(const dt_adamw_args *a, void *stream) {
    while (a) {
        adamw_runs all;
        unsigned blocks = 0;
        for (all.n = 0; a && all.n < ADAMW_RUNS; a = a->next) {
            if (a->count == 0) continue;
            all.run[all.n] = adamw_run_of(a);
            all.first[all.n++] = blocks;
            blocks += grid_for(a->count, BLOCK * pack<float>::N);
        }
        all.first[all.n] = blocks;
        if (blocks > 0) DT_LAUNCH(adamw_kernel<Narrow>, blocks, BLOCK, 0, stream_of(stream), all);
    }
    return launched();
}

static dt_status cuda_adamw(const dt_adamw_args *a, void *stream) {
    const dt_adamw_args *of = a; /* one with a copy, whose type counts, if there is any */
    for (const dt_adamw_args *n = a; n && a->dtype == DT_F32; n = n->next) {
        if (n->step < 1 || n->dtype != a->dtype || n->narrow_dtype != a->narrow_dtype)
            return DT_ERR_ARG;
        if (n->narrow) of = n;
    }
    return BY_NARROW(of, adamw, a, stream);
}

/* Without momentum the buffer is neither read nor written; in the first step it is written only. */
template <class Narrow> KERNEL __launch_bounds__(BLOCK) sgd_kernel(dt_sgd_args a) {
    float *params = (float *)a.param,
          *buffers = a.momentum != 0 ? (float *)a.momentum_buffer : NULL;
    float lr = (float)a.lr, decay = (float)a.weight_decay, scale = (float)a.grad_scale,
          momentum = (float)a.momentum;
    bool aligned = aligned16(params, a.grad, buffers, a.narrow);
    each_flat<pack<float>::N>(a.count, aligned, [&](size_t i, auto by) {
        const int N = decltype(by)::N;
        pack<float, N> param = take<N>(params + i), g = take<N>((const float *)a.grad + i);
        for (int k = 0; k < N; k++) g.v[k] = g.v[k] * scale + decay * param.v[k];
        if (buffers && a.step > 1) {
            pack<float, N> b = take<N>(buffers + i);
            for (int k = 0; k < N; k++) g.v[k] = momentum * b.v[k] + g.v[k];
        }
        if (buffers) put(buffers + i, g);
        for (int k = 0; k < N; k++) param.v[k] -= lr * g.v[k];
        put(params + i, param);
        give_copy<Narrow>(a.narrow, i, param);
    });
}

template <class Narrow> static dt_status sgd(const dt_sgd_args *a, void *stream) {
    if (a->momentum != 0 && !a->momentum_buffer) return DT_ERR_ARG;
    LAUNCH(sgd_kernel<Narrow>, a->count, BLOCK * pack<float>::N, stream, *a);
    return launched();
}

static dt_status cuda_sgd(const dt_sgd_args *a, void *stream) {
    return BY_NARROW(a, sgd, a, stream);
}

/* ---- 1-bit Adam, arXiv:2102.02888 ---- */

KERNEL __launch_bounds__(BLOCK) momentum_kernel(dt_momentum_args a, float rest) {
    float *ms = (float *)a.m, beta1 = (float)a.beta1;
    const float *grads = (const float *)a.grad;
    each_flat<pack<float>::N>(a.count, aligned16(ms, grads), [&](size_t i, auto by) {
        const int N = decltype(by)::N;
        pack<float, N> m = take<N>(ms + i), g = take<N>(grads + i);
        for (int k = 0; k < N; k++) m.v[k] = beta1 * m.v[k] + rest * g.v[k];
        put(ms + i, m);
    });
}

static dt_status cuda_momentum(const dt_momentum_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    float rest = (float)((1 - a->beta1) * a->grad_scale);
    LAUNCH(momentum_kernel, a->count, BLOCK * pack<float>::N, stream, *a, rest);
    return launched();
}

template <class Narrow>
KERNEL __launch_bounds__(BLOCK) frozen_adam_kernel(dt_frozen_adam_args a, float keep) {
    float *params = (float *)a.param, lr = (float)a.lr, eps = (float)a.eps;
    const float *ms = (const float *)a.m, *vs = (const float *)a.v;
    each_flat<pack<float>::N>(a.count, aligned16(params, ms, vs, a.narrow), [&](size_t i, auto by) {
        const int N = decltype(by)::N;
        pack<float, N> param = take<N>(params + i), m = take<N>(ms + i), v = take<N>(vs + i);
        for (int k = 0; k < N; k++)
            param.v[k] = keep * param.v[k] - lr * m.v[k] / (sqrtf(v.v[k]) + eps);
        put(params + i, param);
        give_copy<Narrow>(a.narrow, i, param);
    });
}

template <class Narrow> static dt_status frozen_adam(const dt_frozen_adam_args *a, void *stream) {
    float keep = (float)(1 - a->lr * a->weight_decay);
    LAUNCH(frozen_adam_kernel<Narrow>, a->count, BLOCK * pack<float>::N, stream, *a, keep);
    return launched();
}

static dt_status cuda_frozen_adam(const dt_frozen_adam_args *a, void *stream) {
    return BY_NARROW(a, frozen_adam, a, stream);
}

/* Messages lie anywhere, so their scale is moved byte by byte. */
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

/* Leaves x + error in error, and the sum of its squares and its numbers in sums (2,runs). */
KERNEL __launch_bounds__(BLOCK) sign_sums_kernel(dt_sign_pack_args a, double *sums, size_t runs) {
    const float *x = (const float *)a.x, *v = (const float *)a.v;
    float *error = (float *)a.error;
    for (size_t first = (size_t)blockIdx.x * RUNS_EACH; first < runs;
         first += (size_t)gridDim.x * RUNS_EACH) {
        size_t run = first + threadIdx.x / LANES,
               end = (run + 1) * DT_PIECE < a.count ? (run + 1) * DT_PIECE : a.count;
        double squares = 0, numbers = 0;
        for (size_t i = run * DT_PIECE + threadIdx.x % LANES; i < end; i += LANES) {
            float e = v[i] != 0 ? x[i] + error[i] : 0;
            error[i] = e;
            squares += (double)e * (double)e;
            numbers += v[i] != 0;
        }
        squares = lanes_sum(squares);
        numbers = lanes_sum(numbers);
        if (threadIdx.x % LANES > 0 || run >= runs) continue;
        sums[run] = squares;
        sums[runs + run] = numbers;
    }
}

/* One block: the scale, behind the sums. */
KERNEL __launch_bounds__(TOTAL_BLOCK, 1) sign_scale_kernel(double *sums, size_t runs) {
    double squares = 0, numbers = 0;
    for (size_t i = threadIdx.x; i < runs; i += TOTAL_BLOCK) {
        squares += sums[i];
        numbers += sums[runs + i];
    }
    squares = block_sum<double, TOTAL_BLOCK>(squares);
    numbers = block_sum<double, TOTAL_BLOCK>(numbers);
    if (threadIdx.x == 0)
        sums[2 * runs] = (double)(float)(numbers > 0 ? sqrt(squares / numbers) : 0);
}

/* A thread has a byte of signs; the first threads write the scale of a message too. part: bytes of
   its signs. */
KERNEL __launch_bounds__(BLOCK)
    sign_pack_kernel(dt_sign_pack_args a, const double *sent, size_t part) {
    const float *vs = (const float *)a.v;
    float *errors = (float *)a.error, scale = (float)*sent;
    unsigned char *out = (unsigned char *)a.out;
    for (size_t i = flat_first(1); i < a.count / 8 || i < a.parts; i += flat_step(1)) {
        unsigned bits = 0;
        if (i < a.parts) write_scale(out + i * (part + 8) + part, *sent);
        if (i >= a.count / 8) continue;
        for (size_t k = 0; k < 8; k++) {
            float error = errors[8 * i + k];
            bits |= (unsigned)(error >= 0) << k;
            if (vs[8 * i + k] != 0) errors[8 * i + k] = error - (error >= 0 ? scale : -scale);
        }
        out[i + i / part * 8] = (unsigned char)bits;
    }
}

static dt_status cuda_sign_pack(const dt_sign_pack_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (a->parts < 1 || a->count % (8 * a->parts) != 0) return DT_ERR_ARG;
    size_t runs = runs_in(a->count), part = a->count / a->parts / 8;
    double *sums = (double *)a->work;
    if (!sums || a->work_bytes < (2 * runs + 1) * sizeof *sums) return DT_ERR_ARG;
    LAUNCH(sign_sums_kernel, runs, RUNS_EACH, stream, *a, sums, runs);
    DT_LAUNCH(sign_scale_kernel, 1, TOTAL_BLOCK, 0, stream_of(stream), sums, runs);
    LAUNCH(sign_pack_kernel, a->count / 8 + a->parts, BLOCK, stream, *a,
        (const double *)sums + 2 * runs, part);
    return launched();
}

/* A thread has a byte of each message. */
KERNEL __launch_bounds__(BLOCK) sign_unpack_kernel(dt_sign_unpack_args a) {
    const unsigned char *in = (const unsigned char *)a.in;
    const float *vs = (const float *)a.v;
    float *out = (float *)a.out;
    size_t bytes = a.count / 8;
    for (size_t i = flat_first(1); i < bytes; i += flat_step(1)) {
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
    LAUNCH(sign_unpack_kernel, a->count / 8, BLOCK, stream, *a);
    return launched();
}

// ==== 15. Matrix product ========================================================================

/* ---- what tensor cores are fed with ---- */

/* Each wrapper is one PTX instruction, or what a test puts in its place. mma: d (16,8) += a (16,16)
   b (16,8); lane 4 g + t holds rows g and g + 8 of d, columns 2 t and 2 t + 1. bf16 products and
   cp.async need sm_80: older code adds and copies plainly, to the same end. */
#ifdef __CUDACC__
#define PTX static __device__ __forceinline__
#define HAS_SM80 (__CUDA_ARCH__ >= 800)

PTX unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

PTX void ldmatrix(unsigned *r, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

PTX void ldmatrix_trans(unsigned *r, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

PTX float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if HAS_SM80
#define MMA(type) \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                 "{%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
PTX void mma(bf16, float *d, const unsigned *a, const unsigned *b) { MMA("bf16"); }
PTX void mma(f16, float *d, const unsigned *a, const unsigned *b) { MMA("f16"); }
#undef MMA

/* 16 bytes from global memory, or zeros. */
PTX void copy16(void *shared, const void *global, bool there) {
    asm volatile("{ .reg .pred none; setp.eq.b32 none, %2, 0; cp.async.cg.shared.global [%0], "
                 "[%1], 16, none; }"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"((int)there)
                 : "memory");
}
PTX void copies_sent() { asm volatile("cp.async.commit_group;" : : : "memory"); }
PTX void copies_here() { asm volatile("cp.async.wait_all;" : : : "memory"); }
#endif

/* wgmma: four warps, a group, multiply 64 rows at a time, with B (and A) read from shared memory;
   see `matrix`. Only code for sm_90a has it: elsewhere the kernels that use it are empty, and
   cannot be launched with as many threads as they want. d (64,N) = a b, plus d if `add`: of warp w
   rows 16 w .. 16 w + 15, in the places of mma. What has been started is done after group_done. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_GROUPS 1
#define D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define D32 D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7)
#define D64 D32, D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15)
#define P32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define P64 \
    P32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OTHER ", 0x40000040}; "
#define WGMMA(type, n, add, matrices, places, rest) \
    "{ .reg .pred add; .reg .b64 a, b; setp.ne.b32 add, " add ", 0; " matrices \
    "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" places "}, " rest "; }"
#define WGMMAS(T, type) \
    PTX void wgmma(T, float(&d)[8][4], unsigned a, unsigned b, int add) { \
        asm volatile(WGMMA(type, "64", "%34", "mov.b64 a, {%32" OTHER "mov.b64 b, {%33" OTHER, \
            P32, "a, b, add, 1, 1, 0, 0") \
                     : D32 \
                     : "r"(a), "r"(b), "r"(add)); \
    } \
    PTX void wgmma(T, float(&d)[16][4], unsigned a, unsigned b, int add) { \
        asm volatile(WGMMA(type, "128", "%66", "mov.b64 a, {%64" OTHER "mov.b64 b, {%65" OTHER, \
            P64, "a, b, add, 1, 1, 0, 0") \
                     : D64 \
                     : "r"(a), "r"(b), "r"(add)); \
    } \
    PTX void wgmma_across(T, float(&d)[8][4], const unsigned *a, unsigned b, int add) { \
        asm volatile(WGMMA(type, "64", "%37", "mov.b64 b, {%36" OTHER, P32, \
            "{%32, %33, %34, %35}, b, add, 1, 1, 1") \
                     : D32 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add)); \
    } \
    PTX void wgmma_across(T, float(&d)[16][4], const unsigned *a, unsigned b, int add) { \
        asm volatile(WGMMA(type, "128", "%69", "mov.b64 b, {%68" OTHER, P64, \
            "{%64, %65, %66, %67}, b, add, 1, 1, 1") \
                     : D64 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add)); \
    }
WGMMAS(bf16, "bf16")
WGMMAS(f16, "f16")
#undef WGMMAS
#undef WGMMA
#undef OTHER
#undef P64
#undef P32
#undef D64
#undef D32
#undef D4

/* A matrix in shared memory: rows of 64 numbers, k along them or (wgmma_across) a row for each k;
   `slab` numbers on are the next 64 columns. This is the part of its descriptor that differs; the
   other says that 8 rows of 128 bytes lie together, their 16 bytes exchanged. `further` numbers on
   in the same slab. */
typedef unsigned matrix;
PTX matrix matrix_at(const void *p, int slab) {
    return shared_address(p) >> 4 | (unsigned)(slab * 2 >> 4) << 16;
}
PTX matrix further(matrix m, int numbers) { return m + (unsigned)(numbers * 2 >> 4); }
PTX void group_begin() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
PTX void group_sent() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int LEFT> PTX void group_done() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(LEFT) : "memory");
}
PTX void copies_seen() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
PTX void hold(float &x) { asm volatile("" : "+f"(x) : : "memory"); }
/* What follows is not taken before x, which is never negative, is known. */
PTX void after(float x) {
    if (x < 0) asm volatile("nanosleep.u32 1;" : : : "memory");
}
#else
#define HAS_GROUPS 0
typedef unsigned matrix;
template <class T, class sums> PTX void wgmma(T, sums &, matrix, matrix, int) {}
template <class T, class sums> PTX void wgmma_across(T, sums &, const unsigned *, matrix, int) {}
PTX matrix matrix_at(const void *, int) { return 0; }
PTX matrix further(matrix, int) { return 0; }
PTX void group_begin() {}
PTX void group_sent() {}
template <int LEFT> PTX void group_done() {}
PTX void copies_seen() {}
PTX void hold(float &) {}
PTX void after(float) {}
#endif
#undef PTX
#else
#define HAS_SM80 1
#define HAS_GROUPS 1
static void ldmatrix(unsigned *r, const void *row) { dtc_ldmatrix_x4(r, row); }
static void ldmatrix_trans(unsigned *r, const void *row) { dtc_ldmatrix_x4_trans(r, row); }
static float exp2_of(float x) { return exp2f(x); }
static void mma(bf16, float *d, const unsigned *a, const unsigned *b) {
    dtc_mma_m16n8k16_bf16(d, a, b);
}
static void mma(f16, float *d, const unsigned *a, const unsigned *b) {
    dtc_mma_m16n8k16_f16(d, a, b);
}
static void copy16(void *shared, const void *global, bool there) {
    alignas(16) static const char none[16] = { 0 };
    dtc_cp_async16(shared, there ? global : none, there ? 16 : 0);
}
static void copies_sent() { dtc_cp_async_commit(); }

/* Warp by warp by mma, from what the matrices are said to be. As late as can be: in group_done;
   until then sums are NaN. A forgotten fence is a mistake that ends the kernel. */
struct matrix {
    const char *p;
    int slab;
};
static matrix matrix_at(const void *p, int slab) { return { (const char *)p, slab }; }
static matrix further(matrix m, int numbers) { return { m.p + 2 * numbers, m.slab }; }

static unsigned number_in(const matrix &m, int row, int col) {
    size_t at = (size_t)m.p + (size_t)(row / 8) * 1024 + row % 8 * 128 +
                col / 64 * (size_t)m.slab * 2 + col % 64 * 2;
    return *(const uint16_t *)(at ^ (at >> 3 & 0x70));
}

struct wgmma_begun {
    void (*run)(const wgmma_begun &);
    float (*d)[4], before[16][4]; /* before: what d held, of the first that changes it */
    matrix a, b;
    unsigned u[4];
    int n, add, group;
    bool first;
};
static struct {
    wgmma_begun at[40];
    int done, count, groups;
    bool begun, unseen;
} under_way[2 * BLOCK];

DTC_UNSEEN static wgmma_begun &begin_product(float (*d)[4], int n, int add, const matrix &b) {
    auto &mine = under_way[threadIdx.x];
    wgmma_begun &p = mine.at[mine.count];
    if (!mine.begun || mine.unseen || mine.count == 40)
        dtc_abandon("wgmma without group_begin or copies_seen");
    p.d = d, p.n = n, p.add = add, p.group = mine.groups, p.first = true;
    p.b.p = b.p, p.b.slab = b.slab;
    for (int i = mine.done; i < mine.count; i++) p.first = p.first && mine.at[i].d != d;
    for (int i = 0; i < 4 * n && p.first; i++) {
        p.before[i / 4][i % 4] = d[i / 4][i % 4];
        d[i / 4][i % 4] = NAN;
    }
    mine.count++;
    return p;
}

template <class T, bool ACROSS> DTC_UNSEEN static void run_product(const wgmma_begun &p) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2, row = threadIdx.x / 32 % 4 * 16 + g;
    unsigned u[4], v[2];
    for (int i = 0; i < 4 * p.n; i++)
        if (p.first || !p.add) p.d[i / 4][i % 4] = p.add ? p.before[i / 4][i % 4] : 0;
    for (int i = 0; i < 4; i++)
        u[i] = ACROSS ? p.u[i]
                      : number_in(p.a, row + i % 2 * 8, t + i / 2 * 8) |
                            number_in(p.a, row + i % 2 * 8, t + i / 2 * 8 + 1) << 16;
    for (int j = 0; j < p.n; j++) {
        for (int i = 0; i < 2; i++)
            v[i] = ACROSS ? number_in(p.b, t + 8 * i, 8 * j + g) |
                                number_in(p.b, t + 8 * i + 1, 8 * j + g) << 16
                          : number_in(p.b, 8 * j + g, t + 8 * i) |
                                number_in(p.b, 8 * j + g, t + 8 * i + 1) << 16;
        mma(T(), p.d[j], u, v);
    }
}

template <class T, int J>
DTC_UNSEEN static void wgmma(T, float (&d)[J][4], const matrix &a, const matrix &b, int add) {
    wgmma_begun &p = begin_product(d, J, add, b);
    p.run = run_product<T, false>;
    p.a.p = a.p, p.a.slab = a.slab;
}
template <class T, int J>
DTC_UNSEEN static void wgmma_across(
    T, float (&d)[J][4], const unsigned *a, const matrix &b, int add) {
    wgmma_begun &p = begin_product(d, J, add, b);
    p.run = run_product<T, true>;
    for (int i = 0; i < 4; i++) p.u[i] = a[i];
}
DTC_UNSEEN static void group_begin() { under_way[threadIdx.x].begun = true; }
DTC_UNSEEN static void group_sent() {
    under_way[threadIdx.x].begun = false, under_way[threadIdx.x].groups++;
}
template <int LEFT> DTC_UNSEEN static void group_done() {
    auto &mine = under_way[threadIdx.x];
    for (; mine.done < mine.count && mine.at[mine.done].group < mine.groups - LEFT; mine.done++)
        mine.at[mine.done].run(mine.at[mine.done]);
    if (mine.done == mine.count) mine.done = mine.count = 0;
}
DTC_UNSEEN static void copies_here() {
    dtc_cp_async_commit(), dtc_cp_async_wait(0);
    under_way[threadIdx.x].unseen = true;
}
DTC_UNSEEN static void copies_seen() { under_way[threadIdx.x].unseen = false; }
static void hold(float &) {}
static void after(float) {}
#endif

template <class T> static __device__ float half_of(unsigned pair, int which) {
    T x;
    x.bits = (uint16_t)(which ? pair >> 16 : pair & 0xffff);
    return widen(x);
}

/* mma without tensor cores: pair after pair along k, each from the lane that holds it. Not inlined:
   it is called in unrolled loops, which would take nvcc many minutes. */
#ifdef __CUDACC__
#define APART __noinline__
#else
#define APART
#endif
template <class T>
static __device__ APART void mma_plain(T, float *d, const unsigned *a, const unsigned *b) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 8; i++) {
        int holder = i % 4, late = i / 4;
        unsigned row[2], col[2];
        row[0] = __shfl_sync(0xffffffffu, a[2 * late], 4 * g + holder);
        row[1] = __shfl_sync(0xffffffffu, a[2 * late + 1], 4 * g + holder);
        col[0] = __shfl_sync(0xffffffffu, b[late], 8 * t + holder);
        col[1] = __shfl_sync(0xffffffffu, b[late], 8 * t + 4 + holder);
        for (int e = 0; e < 8; e++)
            d[e / 2] += half_of<T>(row[e / 4], e % 2) * half_of<T>(col[e / 2 % 2], e % 2);
    }
}

#if !HAS_SM80
template <class T> static __device__ void mma(T, float *d, const unsigned *a, const unsigned *b) {
    mma_plain(T(), d, a, b);
}

static __device__ void copy16(void *shared, const void *global, bool there) {
    uint4 x = { 0, 0, 0, 0 };
    if (there) x = *(const uint4 *)global;
    *(uint4 *)shared = x;
}
static __device__ void copies_sent() {}
static __device__ void copies_here() {}
#endif
#undef HAS_SM80
#undef APART

/* ---- tiles in shared memory ---- */

/* A tile has rows of LD numbers, at least 128 bytes. The 16 bytes of a column lie in another bank
   group for each of 8 rows, so that 8 rows are read at once. */
template <class T, int LD> static __device__ int place(int row, int col) {
    const int N = pack<T>::N;
    return row * LD + (col / N ^ (row & 7)) * N + col % N;
}

/* x, which the compiler does not see to be x: what is made from it is made where it is used, and is
   not held in registers over a loop. */
static __device__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* A tile from memory at p, whose rows are ld apart; beyond `rows` and `cols` it is zero.
   Asynchronous where `wide`: where p, ld and cols are multiples of 16 bytes. */
template <class T, int ROWS, int LD, int THREADS, class index>
static __device__ void fetch_tile(T *tile, const T *p, index ld, int rows, int cols, bool wide) {
    const int N = pack<T>::N, PACKS = LD / N, DOWN = THREADS / PACKS;
    int thread = anew(threadIdx.x), row = thread / PACKS, col = thread % PACKS * N;
    index at = row * ld + col;
    if (wide) {
        UNROLL for (int i = 0; i < ROWS;
                    i += DOWN, at += DOWN * ld) if (ROWS % DOWN == 0 || row + i < ROWS)
            copy16(tile + place<T, LD>(row + i, col), p + at, row + i < rows && col < cols);
        return;
    }
    UNROLL_BY(1) for (; row < ROWS; row += DOWN, at += DOWN * ld) {
        pack<T> x = { { T() } };
        UNROLL for (int e = 0; e < N; e++) if (row < rows && col + e < cols) x.v[e] = p[at + e];
        *reinterpret_cast<pack<T> *>(tile + place<T, LD>(row, col)) = x;
    }
}

/* Fragments of mma from tiles. ldmatrix takes four 8 x 8 matrices, and of each lane the place of
   one row: of 16 rows, and then of the same rows 8 columns on, for A from a tile with rows of k,
   and for two fragments of B from one with a row for each k; the other way round for two fragments
   of B from rows of k, and for A from a row for each k. That place, in row 0 and column 0. With LD
   a power of two `place` is an exclusive or, so that (x ^ column) is that of another column, and x
   + row LD, row a multiple of 8, that of another row. */
template <int LD> static __device__ int rows_first() {
    int lane = anew(threadIdx.x) % 32;
    return lane % 16 * LD + (lane / 16 ^ lane % 8) * 8;
}

template <int LD> static __device__ int columns_first() {
    int lane = anew(threadIdx.x) % 32;
    return (lane % 8 + lane / 16 * 8) * LD + (lane / 8 % 2 ^ lane % 8) * 8;
}

/* ---- the product ---- */

/* out[at] (+)= v; wide: of float, else of T */
template <class T>
static __device__ void give_as(void *out, int wide, int64_t at, float v, int accumulate) {
    T *narrow = (T *)out + at;
    float *full = (float *)out + at;
    if (wide)
        *full = accumulate ? *full + v : v;
    else
        round_to(narrow, accumulate ? widen(*narrow) + v : v);
}

/* c[at] in column j from its sum of products: all the fusions, in their order. The pointers may be
   one. */
template <class T>
static __device__ void finish(const dt_matmul_args &a, int64_t at, int64_t j, float v) {
    if (a.bias) v += widen(((const T *)a.bias)[j]);
    if (a.derivative) {
        v = act_back(a.activation, widen(((const T *)a.before)[at]), v, 1);
    } else {
        if (a.before) round_to((T *)a.before + at, v);
        v = act(a.activation, v, 1, 0);
    }
    if (a.residual) v += widen(((const T *)a.residual)[at]);
    give_as<T>(a.c, a.wide, at, v, a.accumulate);
}

/* A or B as the kernels see it: `rows` of c's rows or columns. across: neighbours of one k lie
   together. */
struct operand {
    const void *p;
    int64_t ld, stride;
    int rows;
    bool across, wide;
};

static operand operand_of(
    const void *p, int64_t rows, int64_t k, int64_t ld, int64_t stride, bool across, size_t size) {
    size_t all = (size_t)p | (size_t)(ld | stride | (across ? rows : k)) * size;
    operand x = { p, ld, stride, (int)rows, across, all % 16 == 0 };
    return x;
}

/* Where a block's tile of c begins. */
struct corner {
    int batch, row, col;
};

static __device__ corner corner_of(const dt_matmul_args &a, int tile) {
    int across = ((int)a.n + tile - 1) / tile, down = ((int)a.m + tile - 1) / tile, i = blockIdx.x;
    corner c = { i / across / down, i / across % down * tile, i % across * tile };
    return c;
}

/* The end of a block's tile, whose sums lie in shared memory: neighbours go to threads side by
   side, and `finish` is in the code once. */
template <class T, int ROWS, int COLS>
static __device__ void finish_tile(const dt_matmul_args &a, corner c, const float *tile) {
    UNROLL_BY(1) for (int i = threadIdx.x; i < ROWS * COLS; i += BLOCK) {
        int row = c.row + i / COLS, col = c.col + i % COLS;
        if (row < a.m && col < a.n)
            finish<T>(a, c.batch * a.stride_c + row * a.ldc + col, col,
                tile[place<float, COLS>(i / COLS, i % COLS)]);
    }
}

/* In f32. 16 x 16 threads, each with R x R sums; an element is one chain of multiply-adds, k
   ascending, whatever the tile. What comes from memory next is under way during the sums. */
enum { DEPTH = 16 };

template <int R>
static __device__ void fetch_f32(
    pack<float> *next, const operand &x, int batch, int row0, int k0, int k) {
    const float *p = (const float *)x.p + batch * x.stride;
    for (int i = 0; i < R / 4; i++) {
        int at = threadIdx.x + i * BLOCK, in_line = x.across ? 4 * R : DEPTH / 4;
        int line = (x.across ? k0 : row0) + at / in_line, lines = x.across ? k : x.rows;
        int first = (x.across ? row0 : k0) + at % in_line * 4, end = x.across ? x.rows : k;
        next[i] = load(p + (line < lines ? line * x.ld : 0), (size_t)first,
            line < lines ? (size_t)end : 0, x.wide);
    }
}

/* Into the tile (DEPTH,16 R), of packs along the rows. */
template <int R>
static __device__ void keep_f32(
    pack<float> (*tile)[4 * R + 1], const pack<float> *next, int across) {
    for (int i = 0; i < R / 4; i++) {
        int at = threadIdx.x + i * BLOCK, row = at / (DEPTH / 4), k = at % (DEPTH / 4) * 4;
        if (across)
            tile[at / (4 * R)][at % (4 * R)] = next[i];
        else
            for (int e = 0; e < 4; e++) tile[k + e][row / 4].v[row % 4] = next[i].v[e];
    }
}

template <int R>
KERNEL __launch_bounds__(BLOCK, 2) matmul_f32_kernel(dt_matmul_args a, operand x, operand y) {
    __shared__ pack<float> tiles[2][2][DEPTH][4 * R + 1];
    pack<float>(*xs)[DEPTH][4 * R + 1] = tiles[0], (*ys)[DEPTH][4 * R + 1] = tiles[1];
    pack<float> next_x[R / 4], next_y[R / 4];
    float sum[R][R] = { { 0 } };
    corner c = corner_of(a, 16 * R);
    int down = threadIdx.x / 16, across = threadIdx.x % 16;
    bool idle = c.row + down * 4 >= a.m || c.col + across * 4 >= a.n;
    fetch_f32<R>(next_x, x, c.batch, c.row, 0, a.k);
    fetch_f32<R>(next_y, y, c.batch, c.col, 0, a.k);
    for (int k0 = 0, s = 0; k0 < a.k; k0 += DEPTH, s ^= 1) {
        keep_f32<R>(xs[s], next_x, x.across);
        keep_f32<R>(ys[s], next_y, y.across);
        __syncthreads(); /* the one barrier: two steps on, all have left this half */
        fetch_f32<R>(next_x, x, c.batch, c.row, k0 + DEPTH, a.k);
        fetch_f32<R>(next_y, y, c.batch, c.col, k0 + DEPTH, a.k);
        UNROLL for (int k = 0; k < DEPTH; k++) {
            pack<float> u[R / 4], v[R / 4];
            if (idle) break;
            UNROLL for (int i = 0; i < R / 4; i++) {
                u[i] = xs[s][k][16 * i + down];
                v[i] = ys[s][k][16 * i + across];
            }
            UNROLL for (int i = 0; i < R * R; i++) sum[i / R][i % R] +=
                u[i / R / 4].v[i / R % 4] * v[i % R / 4].v[i % 4];
        }
    }
    float *tile = (float *)tiles; /* has room for 64 rows */
    UNROLL for (int part = 0; part < R / 4; part++) {
        __syncthreads();
        UNROLL for (int at = 0; at < 4 * R; at++) {
            int row = down * 4 + at / R, col = at % R / 4 * 64 + across * 4 + at % 4;
            tile[place<float, 16 * R>(row, col)] = sum[4 * part + at / R][at % R];
        }
        __syncthreads();
        finish_tile<float, 64, 16 * R>(a, c, tile);
        c.row += 64;
    }
}

/* bf16 and f16 on tensor cores: 128 x 128 of c, 64 of k at a time; eight warps with 64 x 32 of c
   each. */
enum { SIDE = 128, STEP = 64, MATMUL_STAGES = 2 };

template <class T>
static __device__ void fetch_side(T *tile, const operand &x, int batch, int row0, int k0, int k) {
    const T *p = (const T *)x.p + batch * x.stride;
    if (x.across)
        fetch_tile<T, STEP, SIDE, BLOCK>(
            tile, p + k0 * x.ld + row0, x.ld, k - k0, x.rows - row0, x.wide);
    else
        fetch_tile<T, SIDE, STEP, BLOCK>(
            tile, p + row0 * x.ld + k0, x.ld, x.rows - row0, k - k0, x.wide);
}

/* ACROSS_X, ACROSS_Y: x.across, y.across */
template <class T, bool ACROSS_X, bool ACROSS_Y>
static __device__ void multiply_tiles(
    float (&sum)[4][4][4], const T *xs, const T *ys, int row, int col) {
    int at_x = ACROSS_X ? columns_first<SIDE>() : rows_first<STEP>();
    int at_y = ACROSS_Y ? rows_first<SIDE>() : columns_first<STEP>();
    UNROLL for (int k = 0; k < STEP; k += 16) {
        unsigned u[4][4], v[2][4];
        UNROLL for (int i = 0; i < 4; i++) {
            if (ACROSS_X)
                ldmatrix_trans(u[i], xs + k * SIDE + (at_x ^ (row + 16 * i)));
            else
                ldmatrix(u[i], xs + (row + 16 * i) * STEP + (at_x ^ k));
        }
        UNROLL for (int j = 0; j < 2; j++) {
            if (ACROSS_Y)
                ldmatrix_trans(v[j], ys + k * SIDE + (at_y ^ (col + 16 * j)));
            else
                ldmatrix(v[j], ys + (col + 16 * j) * STEP + (at_y ^ k));
        }
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++)
            mma(T(), sum[i][j], u[i], v[j / 2] + j % 2 * 2);
    }
}

template <class T, bool ACROSS_X, bool ACROSS_Y>
KERNEL __launch_bounds__(BLOCK, 2) matmul_narrow_kernel(dt_matmul_args a, operand x, operand y) {
    DT_DYN_SMEM(T, shared);
    const int SIZE = SIDE * STEP;
    float sum[4][4][4] = { { { 0 } } };
    corner c = corner_of(a, SIDE);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, down = warp / 4 * 64,
        across = warp % 4 * 32;
    T *xs = shared, *ys = shared + MATMUL_STAGES * SIZE;
    bool idle = c.row + down >= a.m || c.col + across >= a.n;
    for (int k0 = -STEP, s = 1; k0 < a.k; k0 += STEP, s ^= 1) {
        copies_here();
        /* the tiles of this step are there, and all have left those of the step before */
        __syncthreads();
        if (k0 + STEP < a.k) {
            fetch_side(xs + (s ^ 1) * SIZE, x, c.batch, c.row, k0 + STEP, a.k);
            fetch_side(ys + (s ^ 1) * SIZE, y, c.batch, c.col, k0 + STEP, a.k);
            copies_sent();
        }
        if (k0 >= 0 && !idle)
            multiply_tiles<T, ACROSS_X, ACROSS_Y>(sum, xs + s * SIZE, ys + s * SIZE, down, across);
    }
    __syncthreads();
    float *tile = (float *)shared; /* 64 KB, as the tiles of two stages */
    UNROLL for (int i = 0; i < 64; i++) {
        int row = down + i / 16 * 16 + i / 2 % 2 * 8 + lane / 4,
            col = across + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
        tile[place<float, SIDE>(row, col)] = sum[i / 16][i / 4 % 4][i % 4];
    }
    __syncthreads();
    finish_tile<T, SIDE, SIDE>(a, c, tile);
}

/* Blocks of a grid; 0: more than a grid can have. */
static unsigned blocks_of(
    int64_t rows, int64_t row_tile, int64_t cols, int64_t col_tile, int64_t batch) {
    double all = ceil((double)rows / (double)row_tile) * ceil((double)cols / (double)col_tile) *
                 (double)batch;
    return all <= INT32_MAX ? (unsigned)all : 0;
}

/* A launch with more shared memory than the 48 KB that need no permission; permission is the
   device's, and cheap. */
#define LAUNCH_SHARED(kernel, blocks, threads, bytes, stream, ...) \
    do { \
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, \
                (int)(bytes)) != cudaSuccess) { \
            (void)cudaGetLastError(); \
            return DT_ERR_UNSUPPORTED; /* the device has less */ \
        } \
        DT_LAUNCH((kernel), blocks, threads, bytes, stream_of(stream), __VA_ARGS__); \
    } while (0)

static dt_status matmul_f32(
    const dt_matmul_args &a, const operand &x, const operand &y, void *stream) {
    unsigned large = blocks_of(a.m, 128, a.n, 128, a.batch),
             small = blocks_of(a.m, 64, a.n, 64, a.batch);
    if (large == 0) return DT_ERR_UNSUPPORTED;
    if (large >= 128 || small == 0)
        DT_LAUNCH(matmul_f32_kernel<8>, large, BLOCK, 0, stream_of(stream), a, x, y);
    else
        DT_LAUNCH(matmul_f32_kernel<4>, small, BLOCK, 0, stream_of(stream), a, x, y);
    return launched();
}

template <class T>
static dt_status matmul_narrow(
    const dt_matmul_args &a, const operand &x, const operand &y, void *stream) {
    unsigned blocks = blocks_of(a.m, SIDE, a.n, SIDE, a.batch);
    size_t bytes = 2 * MATMUL_STAGES * SIDE * STEP * sizeof(T);
    if (blocks == 0) return DT_ERR_UNSUPPORTED;
#define GO(X, Y) \
    LAUNCH_SHARED((matmul_narrow_kernel<T, X, Y>), blocks, BLOCK, bytes, stream, a, x, y)
    if (x.across && y.across)
        GO(true, true);
    else if (x.across)
        GO(true, false);
    else if (y.across)
        GO(false, true);
    else
        GO(false, false);
#undef GO
    return launched();
}

static dt_status own_matmul(const dt_matmul_args &a, void *stream) {
    size_t size = a.dtype == DT_F32 ? 4 : 2;
    operand x = operand_of(a.a, a.m, a.k, a.lda, a.stride_a, a.trans_a != 0, size);
    operand y = operand_of(a.b, a.n, a.k, a.ldb, a.stride_b, a.trans_b == 0, size);
    if (a.dtype == DT_F32) return matmul_f32(a, x, y, stream);
    return a.dtype == DT_BF16 ? matmul_narrow<bf16>(a, x, y, stream)
                              : matmul_narrow<f16>(a, x, y, stream);
}

/* ---- by cuBLASLt ---- */

/* Which algorithm it takes depends on m and n too: an element depends on its row, its column and k
   only with the kernels above. Its sums are f32's, never TF32's. Bias and GELU are its own work;
   what else follows is done after it, on results that have been rounded once more where they are
   stored in 16 bits; so are those that it adds itself. */

#ifdef DT_CUBLASLT
/* All that an algorithm depends on; compared as bytes. Alignments are those of the pointers, up to
   256. */
struct product_key {
    int64_t m, n, k, batch, lda, ldb, ldc, stride_a, stride_b, stride_c;
    size_t work_bytes;
    int dtype, wide, trans_a, trans_b, epilogue, adds, aux;
    unsigned align_a, align_b, align_c, align_d;
};

/* A product that cuBLASLt has been asked for: column-major, so that C^T = B^T A^T is what it
   computes. */
struct product_plan {
    product_key key;
    bool used, works;
    cublasLtMatmulDescOpaque_t what;
    cublasLtMatrixLayoutOpaque_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
};

/* A plan lies at one of TRIES places from its hash on; when others lie there the first gives
   way. */
enum { PLANS = 256, TRIES = 4 };

struct blas {
    cublasLtHandle_t handle; /* NULL: the library could not start, and is not asked again */
    bool gelu;               /* its GELU is no slower than one apart: since Hopper */
    product_plan plans[PLANS];
};

static void blas_close(blas *b) {
    if (b && b->handle) cublasLtDestroy(b->handle);
    free(b);
}

static blas *blas_of(cuda_queue *queue) {
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

static cudaDataType_t number_of(int dtype) {
    return dtype == DT_F32 ? CUDA_R_32F : dtype == DT_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* rows and columns as stored by rows: the other way round by columns. */
static void layout_of(cublasLtMatrixLayoutOpaque_t *l, int dtype, int64_t rows, int64_t cols,
    int64_t ld, int64_t batch, int64_t stride) {
    int32_t count = (int32_t)batch;
    cublasLtMatrixLayoutInit(l, number_of(dtype), (uint64_t)cols, (uint64_t)rows, ld);
    cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count);
    cublasLtMatrixLayoutSetAttribute(
        l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
}

#define SET(name, value) \
    cublasLtMatmulDescSetAttribute(&p->what, CUBLASLT_MATMUL_DESC_##name, &(value), sizeof(value))
#define PREFER(name, value) \
    cublasLtMatmulPreferenceSetAttribute( \
        &wish, CUBLASLT_MATMUL_PREF_##name, &(value), sizeof(value))

/* Sums in parts are added in f32, so that a result is rounded once. */
static void plan_make(blas *b, product_plan *p, const product_key &key) {
    cublasLtMatmulPreferenceOpaque_t wish;
    cublasLtMatmulHeuristicResult_t best;
    cublasOperation_t op_a = key.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = key.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)key.epilogue;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    int found = 0, to = key.wide ? (int)DT_F32 : key.dtype;
    p->key = key;
    p->used = true;
    cublasLtMatmulDescInit(&p->what, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    SET(TRANSA, op_a);
    SET(TRANSB, op_b);
    SET(EPILOGUE, epilogue);
    if (key.aux) { /* without one they make the library write to it */
        SET(EPILOGUE_AUX_LD, key.ldc);
        SET(EPILOGUE_AUX_BATCH_STRIDE, key.stride_c);
    }
    layout_of(&p->a, key.dtype, key.trans_b ? key.n : key.k, key.trans_b ? key.k : key.n, key.ldb,
        key.batch, key.stride_b);
    layout_of(&p->b, key.dtype, key.trans_a ? key.k : key.m, key.trans_a ? key.m : key.k, key.lda,
        key.batch, key.stride_a);
    layout_of(&p->c, to, key.m, key.n, key.ldc, key.batch, key.stride_c);
    cublasLtMatmulPreferenceInit(&wish);
    PREFER(MAX_WORKSPACE_BYTES, key.work_bytes);
    PREFER(REDUCTION_SCHEME_MASK, schemes);
    PREFER(MIN_ALIGNMENT_A_BYTES, key.align_b);
    PREFER(MIN_ALIGNMENT_B_BYTES, key.align_a);
    PREFER(MIN_ALIGNMENT_C_BYTES, key.align_c);
    PREFER(MIN_ALIGNMENT_D_BYTES, key.align_d);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        b->handle, &p->what, &p->a, &p->b, &p->c, &p->c, &wish, 1, &best, &found);
    p->works = status == CUBLAS_STATUS_SUCCESS && found > 0 && best.state == CUBLAS_STATUS_SUCCESS;
    if (!p->works) return;
    p->algorithm = best.algo;
    p->workspace = best.workspaceSize;
}
#undef PREFER

static product_plan *plan_of(blas *b, const product_key &key) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < sizeof key; i++)
        hash = (hash ^ ((const unsigned char *)&key)[i]) * 1099511628211u;
    product_plan *first = NULL;
    for (int i = 0; i < TRIES; i++) {
        product_plan *p = &b->plans[((hash >> 32) + i) % PLANS];
        if (p->used && memcmp(&p->key, &key, sizeof key) == 0) return p;
        if (!first || (first->used && !p->used)) first = p;
    }
    plan_make(b, first, key);
    return first;
}

/* How a call is shared: the library's epilogue, and what is left in `rest` for a kernel after it.
   from: where the library reads what it adds, or NULL; to: where it writes. False: not its work. */
struct blas_split {
    cublasLtEpilogue_t epilogue;
    dt_matmul_args rest;
    const void *from;
    void *to, *aux; /* aux: the value before GELU, written or read, or NULL */
    bool more;      /* something is left */
};

/* GELU with the value before it, or its derivative from that value, at once: the library's is good
   for 16 bits. */
static bool split_gelu(const dt_matmul_args &a, blas_split *s) {
    bool aux = !a.before || (a.ldc % 8 == 0 && (a.batch == 1 || a.stride_c % 8 == 0) &&
                                (size_t)a.before % 16 == 0);
    bool bias = !a.bias || (!a.derivative && (size_t)a.bias % 16 == 0);
    if (a.activation != DT_ACT_GELU || a.dtype == DT_F32 || !aux || !bias) return false;
    if (a.derivative)
        s->epilogue = CUBLASLT_EPILOGUE_DGELU;
    else if (a.before)
        s->epilogue = a.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    else
        s->epilogue = a.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    s->aux = a.before;
    s->rest.bias = NULL;
    s->rest.before = NULL;
    s->rest.activation = s->rest.derivative = 0;
    return true;
}

static bool split_call(const dt_matmul_args &a, bool gelu, blas_split *s) {
    bool plain = !a.activation && !a.derivative && !a.before;
    if (a.wide && a.dtype != DT_F32 && (a.bias || a.residual || !plain)) return false;
    if (a.accumulate && (a.residual || !plain)) return false;
    s->rest = a;
    s->rest.accumulate = 0;
    s->from = a.accumulate ? a.c : NULL;
    s->to = a.c;
    s->aux = NULL;
    if (!gelu || !split_gelu(a, s)) {
        bool bias = a.bias && (size_t)a.bias % 16 == 0;
        s->epilogue = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
        if (bias) s->rest.bias = NULL;
        if (a.accumulate && s->rest.bias) return false;
        if (a.residual && plain && !s->rest.bias) s->from = a.residual, s->rest.residual = NULL;
        if (a.before && !a.derivative && !s->rest.bias) s->to = a.before, s->rest.before = NULL;
    }
    s->more =
        s->rest.bias || s->rest.before || s->rest.activation || s->rest.residual || s->to != a.c;
    return true;
}

/* What is left of each element, which the library has written at `from`, rounded. */
template <class T>
KERNEL __launch_bounds__(BLOCK) matmul_rest_kernel(dt_matmul_args a, const T *from) {
    for (size_t i = flat_first(1); i < (size_t)(a.batch * a.m * a.n); i += flat_step(1)) {
        int64_t row = (int64_t)i / a.n, col = (int64_t)i % a.n;
        int64_t at = row / a.m * a.stride_c + row % a.m * a.ldc + col;
        finish<T>(a, at, col, widen(from[at]));
    }
}

static dt_status matmul_rest(const blas_split &s, void *stream) {
    const dt_matmul_args &a = s.rest;
    size_t count = (size_t)(a.batch * a.m * a.n);
    if (!s.more) return launched();
    if (a.dtype == DT_F32)
        LAUNCH(matmul_rest_kernel<float>, count, BLOCK, stream, a, (const float *)s.to);
    else if (a.dtype == DT_BF16)
        LAUNCH(matmul_rest_kernel<bf16>, count, BLOCK, stream, a, (const bf16 *)s.to);
    else
        LAUNCH(matmul_rest_kernel<f16>, count, BLOCK, stream, a, (const f16 *)s.to);
    return launched();
}

static product_key key_of(const dt_matmul_args &a, const blas_split &s) {
    product_key key;
    memset(&key, 0, sizeof key); /* what lies between members too */
    key.m = a.m, key.n = a.n, key.k = a.k, key.batch = a.batch;
    key.lda = a.lda, key.ldb = a.ldb, key.ldc = a.ldc;
    key.stride_a = a.stride_a, key.stride_b = a.stride_b, key.stride_c = a.stride_c;
    key.work_bytes = a.work_bytes;
    key.dtype = a.dtype, key.wide = a.wide, key.trans_a = a.trans_a != 0,
    key.trans_b = a.trans_b != 0;
    key.epilogue = (int)s.epilogue, key.adds = s.from != NULL, key.aux = s.aux != NULL;
    key.align_a = alignment_of(a.a), key.align_b = alignment_of(a.b);
    key.align_c = alignment_of(s.from ? s.from : s.to), key.align_d = alignment_of(s.to);
    return key;
}

/* False: the library cannot, and nothing has been done. */
static bool blas_matmul(dt_matmul_args a, cuda_queue *queue, dt_status *status) {
    /* it refuses scratch that lies elsewhere */
    size_t off = (256 - (size_t)a.work % 256) % 256;
    blas *b = a.k > 0 && a.batch <= INT32_MAX ? blas_of(queue) : NULL;
    blas_split s;
    product_plan *p = NULL;
    float one = 1, adds;
    if (!b || !b->handle) return false;
    if (!a.work || a.work_bytes < off) a.work = NULL, a.work_bytes = off = 0;
    a.work = (char *)a.work + off;
    a.work_bytes -= off;
    for (int gelu = b->gelu; gelu >= 0 && (!p || !p->works); gelu--) {
        if (!split_call(a, gelu, &s)) return false;
        p = plan_of(b, key_of(a, s));
    }
    if (!p->works) return false;
    adds = s.from ? 1.0f : 0.0f;
    SET(BIAS_POINTER, a.bias);
    SET(EPILOGUE_AUX_POINTER, s.aux);
    cublasStatus_t done = cublasLtMatmul(b->handle, &p->what, &one, a.b, &p->a, a.a, &p->b, &adds,
        s.from ? s.from : s.to, &p->c, s.to, &p->c, &p->algorithm, a.work, p->workspace,
        queue->stream);
    p->works = done == CUBLAS_STATUS_SUCCESS;
    if (p->works) *status = matmul_rest(s, queue);
    return p->works;
}
#undef SET
#else
static void blas_close(struct blas *) {}
static bool blas_matmul(dt_matmul_args, cuda_queue *, dt_status *) { return false; }
#endif

static dt_status cuda_matmul(const dt_matmul_args *args, void *stream) {
    dt_matmul_args a = *args;
    dt_status status = DT_OK;
    if (a.dtype != DT_F32 && a.dtype != DT_BF16 && a.dtype != DT_F16) return DT_ERR_UNSUPPORTED;
    if (a.m < 0 || a.n < 0 || a.k < 0 || a.batch < 0 || a.activation < 0 ||
        a.activation >= DT_ACT_AFFINE || (a.derivative && !a.before))
        return DT_ERR_ARG;
    if (a.batch == 0) a.batch = 1;
    if (a.lda == 0) a.lda = a.trans_a ? a.m : a.k;
    if (a.ldb == 0) a.ldb = a.trans_b ? a.k : a.n;
    if (a.ldc == 0) a.ldc = a.n;
    if (a.m == 0 || a.n == 0) return launched();
    if (stream && blas_matmul(a, (cuda_queue *)stream, &status)) return status;
    if (a.m >= INT32_MAX - SIDE || a.n >= INT32_MAX - SIDE || a.k >= INT32_MAX - STEP)
        return DT_ERR_UNSUPPORTED;
    return own_matmul(a, stream);
}

// ==== 16. Attention =============================================================================

/* FlashAttention-2, arXiv:2307.08691. A block has ROWS queries (in keys_back: keys) and walks over
   the other side, COLS at a time, of which a warp takes PART at a time; 16 M of the rows are a
   warp's. Scores stay in registers, as mma leaves them: c[i][j][e] of lane 4 g + t is row 16 i + 8
   (e / 2) + g, column 8 j + 2 t + e % 2. A lane has 2 M rows: row r is in c[r / 2], with r % 2 for
   e / 2. f32 is computed in the same places by plain multiply-adds. D is the dimension of a head,
   padded.

   A Hopper's fast tensor cores are fed by wgmma (arXiv:2407.08608 says how): a group of four warps
   has 64 rows, reads its operands from shared memory, and goes on while they are multiplied. Scores
   lie in the same places, so all but the products is shared. Its tiles are slabs of 64 columns:
   rows of 128 bytes, as `place` lays them. */

/* ---- who sees whom ---- */

/* The least and the greatest of some queries or keys. */
struct span {
    int first, last, document_first, document_last;
};

/* Queries or keys: `length` of each sequence, in tiles of `each`. Without an array positions are
   index + shift, and all documents one. With an array there are spans of tiles, (batch,tiles), made
   before. */
struct side {
    const int32_t *position, *document;
    span *spans;
    int length, each, tiles, shift;
};

/* What kernels know beside the pointers: in 32 bits, because registers are scarce. power: scale in
   powers of two. A grid is (tiles, heads, sequences), from first_kv, first_sequence on. */
struct task {
    side q, k;
    /* *_row: of all heads */
    int causal, heads, kv_heads, group, dim, q_row, k_row, first_sequence, first_kv;
    float scale, power;
    /* inputs can be read 16 bytes at a time, results written four numbers at a time */
    bool wide, fours;
};

static __device__ int position_of(const side &s, int sequence, int i) {
    return s.position ? s.position[(int64_t)sequence * s.length + i] : i + s.shift;
}

static __device__ int document_of(const side &s, int sequence, int i) {
    return s.document ? s.document[(int64_t)sequence * s.length + i] : 0;
}

/* Of `count` from `first` on; where there are arrays, of the tile they lie in. */
static __device__ span span_of(const side &s, int sequence, int first, int count) {
    first = anew(first);
    if (s.spans) return s.spans[(int64_t)sequence * s.tiles + first / s.each];
    span x = { first + s.shift, min(first + count, s.length) - 1 + s.shift, 0, 0 };
    return x;
}

/* A warp per tile. */
KERNEL __launch_bounds__(BLOCK) spans_kernel(side s, int64_t batch) {
    int64_t tile = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int sequence = (int)(tile / s.tiles), first = (int)(tile % s.tiles) * s.each;
    span x = { INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN };
    if (sequence >= batch) return;
    for (int i = first + threadIdx.x % 32; i < min(first + s.each, s.length); i += 32) {
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

static __device__ bool none_seen(const task &s, span q, span k) {
    return (s.causal && k.first > q.last) || k.document_first > q.document_last ||
           k.document_last < q.document_first;
}

/* With first <= last on both sides, the documents below are one. */
static __device__ bool all_seen(const task &s, span q, span k) {
    return (!s.causal || k.last <= q.first) && q.document_first == k.document_last &&
           q.document_last == k.document_first;
}

/* Without arrays queries see all keys up to their own place: tiles from `end` on are seen by none
   of `rows`. */
static __device__ int end_of_keys(const task &s, int row0, int rows) {
    if (s.k.spans || !s.causal) return s.k.tiles;
    int seen = max(min(row0 + rows, s.q.length) + s.q.shift, 0);
    return min((seen + s.k.each - 1) / s.k.each, s.k.tiles);
}

/* The last tile of keys up to tile i that a span of queries sees some of; -1: none. From the last
   to the first, because a tile of which only a part is seen, the slowest, is then the first one,
   which has nothing beside it anyway. */
static __device__ int next_keys(const task &s, int sequence, int row0, int rows, int i) {
    if (!s.k.spans) return i;
    span q = span_of(s.q, sequence, row0, rows);
    while (i >= 0 && none_seen(s, q, span_of(s.k, sequence, i * s.k.each, s.k.each))) i--;
    return i;
}

/* The same of queries, which come once for each head of a group: none before tile `first` sees the
   keys. */
struct visit {
    int head, tile;
};

static __device__ int first_of_queries(const task &s, int row0) {
    return s.q.spans || !s.causal ? 0 : min(max(row0 - s.q.shift, 0) / s.q.each, s.q.tiles);
}

static __device__ visit next_queries(
    const task &s, int sequence, int row0, int rows, int first, visit i) {
    span k = span_of(s.k, sequence, row0, rows);
    if (first >= s.q.tiles) i.head = s.group;
    for (; i.head < s.group; i.head++, i.tile = 0)
        for (i.tile = max(i.tile, first); i.tile < s.q.tiles; i.tile++)
            if (!s.q.spans || !none_seen(s, span_of(s.q, sequence, i.tile * s.q.each, s.q.each), k))
                return i;
    return i;
}

/* Position and document of what a tile has: of row i of it by the caller's thread. */
static __device__ int2 look(const task &s, const side &of, int sequence, int i) {
    int2 x = { 0, 0 };
    if (i >= of.length) return x; /* hidden otherwise, or never looked at */
    if (s.causal) x.x = position_of(of, sequence, i);
    x.y = document_of(of, sequence, i);
    return x;
}

/* Minus infinity for what is not seen. With arrays; rows, cols: what `look` says of the warp's rows
   and the columns. */
template <int M, int J>
static __device__ void hide(
    float (&c)[M][J][4], bool rows_are_keys, const int2 *rows, const int2 *cols) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    UNROLL for (int at = 0; at < 2 * J; at++) {
        int2 col = cols[at / 2 * 8 + 2 * t + at % 2];
        UNROLL for (int r = 0; r < 2 * M; r++) {
            int2 row = rows[8 * r + g];
            bool late = rows_are_keys ? row.x > col.x : col.x > row.x;
            if (late || row.y != col.y) c[r / 2][at / 2][r % 2 * 2 + at % 2] = -INFINITY;
        }
    }
}

/* Columns before `first` and from `end` on, both of the warp's first row and `later` more for each
   row after it. */
template <int M, int J>
static __device__ void hide_outside(float (&c)[M][J][4], int first, int end, int later) {
    int g = threadIdx.x % 32 / 4 * later, t = threadIdx.x % 4 * 2;
    UNROLL for (int e = 0; e < M * J * 4; e++) {
        int r = e / 4 / J * 2 + e % 4 / 2, at = e / 4 % J * 8 + e % 2, row = 8 * r * later + g - t;
        if (at < first + row || at >= end + row) c[e / 4 / J][e / 4 % J][e % 4] = -INFINITY;
    }
}

/* What queries from row0 on do not see of keys from col0 on, and keys that are not there. */
template <int M, int J>
static __device__ void hide_keys(float (&c)[M][J][4], const task &s, int row0, int col0, bool all,
    const int2 *rows, const int2 *cols) {
    if (!all && s.k.spans)
        hide(c, false, rows, cols);
    else if (!all)
        hide_outside(c, INT32_MIN / 2, row0 + s.q.shift + 1 - col0, 1);
    if (col0 + 8 * J > s.k.length) hide_outside(c, 0, s.k.length - col0, 0);
}

/* The other way round, of queries from col0 on; p of those that are not there is zero by their
   lse. */
template <int M, int J>
static __device__ void hide_queries(float (&c)[M][J][4], const task &s, int row0, int col0,
    bool all, const int2 *rows, const int2 *cols) {
    if (!all && s.k.spans)
        hide(c, true, rows, cols);
    else if (!all)
        hide_outside(c, row0 - s.q.shift - col0, INT32_MAX / 2, 1);
}

/* ---- products of a warp ---- */

/* c = rows of x, from `row` on, times rows of y. The sums go over all of D, beyond `dim` of which
   tiles are zero. */
template <int D, int M, int J, class T>
static __device__ void scores(float (&c)[M][J][4], const T *x, int row, const T *y, int dim) {
    int at_x = rows_first<D>(), at_y = columns_first<D>();
    (void)dim;
    memset(c, 0, sizeof c);
    UNROLL for (int k = 0; k < D; k += 16) {
        unsigned u[M][4];
        UNROLL for (int i = 0; i < M; i++) ldmatrix(u[i], x + (row + 16 * i) * D + (at_x ^ k));
        UNROLL for (int j = 0; j < J; j += 2) {
            unsigned v[4];
            ldmatrix(v, y + 8 * j * D + (at_y ^ k));
            UNROLL for (int i = 0; i < M; i++) {
                mma(T(), c[i][j], u[i], v);
                mma(T(), c[i][j + 1], u[i], v + 2);
            }
        }
    }
}

template <int D, int M, int J>
static __device__ void scores(
    float (&c)[M][J][4], const float *x, int row, const float *y, int dim) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    memset(c, 0, sizeof c);
    UNROLL_BY(2) for (int k = 0; k < dim; k += 4) {
        pack<float> u[2 * M];
        UNROLL for (int r = 0; r < 2 * M; r++) u[r] =
            *(const pack<float> *)(x + place<float, D>(row + 8 * r + g, k));
        UNROLL for (int at = 0; at < 2 * J; at++) {
            pack<float> v =
                *(const pack<float> *)(y + place<float, D>(at / 2 * 8 + 2 * t + at % 2, k));
            UNROLL for (int i = 0; i < 8 * M; i++) c[i / 8][at / 2][i / 4 % 2 * 2 + at % 2] +=
                u[i / 4].v[i % 4] * v.v[i % 4];
        }
    }
}

/* c += p times the tile y, which has a row for each column of p. On tensor cores p is rounded to
   y's type. */
template <int D, int M, int N, int J, class T>
static __device__ void mix(float (&c)[M][N][4], const float (&p)[M][J][4], const T *y, int dim) {
    int at_y = rows_first<D>();
    (void)dim;
    UNROLL for (int j = 0; j < J; j += 2) {
        unsigned u[M][4];
        UNROLL for (int e = 0; e < 4 * M; e++) u[e / 4][e % 4] =
            pair_of<T>(p[e / 4][j + e / 2 % 2][e % 2 * 2], p[e / 4][j + e / 2 % 2][e % 2 * 2 + 1]);
        UNROLL for (int n = 0; n < N; n += 2) {
            unsigned v[4];
            ldmatrix_trans(v, y + 8 * j * D + (at_y ^ 8 * n));
            UNROLL for (int i = 0; i < M; i++) {
                mma(T(), c[i][n], u[i], v);
                mma(T(), c[i][n + 1], u[i], v + 2);
            }
        }
    }
}

template <int D, int M, int N, int J>
static __device__ void mix(
    float (&c)[M][N][4], const float (&p)[M][J][4], const float *y, int dim) {
    int first = threadIdx.x % 32 / 4 * 4, t = threadIdx.x % 4;
    UNROLL for (int at = 0; at < 8 * J; at++) {
        float u[2 * M]; /* of the lane of this row that has column `at` */
        UNROLL for (int r = 0; r < 2 * M; r++) u[r] =
            __shfl_sync(0xffffffffu, p[r / 2][at / 8][r % 2 * 2 + at % 2], first + at % 8 / 2);
        UNROLL for (int n = 0; n < N; n++) {
            if (8 * n >= dim) continue;
            const float *v = y + place<float, D>(at, 8 * n + 2 * t);
            UNROLL for (int i = 0; i < 4 * M; i++) c[i / 4][n][i % 4] += u[i / 2] * v[i % 2];
        }
    }
}

/* The sum, or the largest, of the four lanes that share a row, for each of them. */
static __device__ float row_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

static __device__ float row_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

/* ---- forms ---- */

/* What fits into the registers, 64 K for the THREADS of AT_ONCE blocks, and into the 99 KB of
   shared memory that every GPU since sm_80 gives a block. WHAT: 0 the forward, 1 the backward of
   queries, 2 that of keys. TOGETHER: rows that do the same; SLAB: columns of a tile that lie
   together. */
template <class T, int D, int WHAT, bool GROUPS> struct form {
    static constexpr bool NARROW = sizeof(T) == 2, GROUP = false;
    static constexpr int M = NARROW && (D == 64 || (D == 128 && WHAT < 2)) ? 2 : 1;
    static constexpr int COLS = NARROW ? (D == 64 || (D == 128 && WHAT != 1) ? 64 : 32)
                                       : (D == 256 || (D == 128 && WHAT) ? 16 : 32);
    static constexpr int PART = !NARROW ? COLS : D == 256 && WHAT ? 16 : 32;
    static constexpr int OF_WARPS = NARROW || D == 64 || (D == 128 && !WHAT) ? 4 : 2;
    static constexpr int STAGES =
        (NARROW && D == 256 && WHAT) || (!NARROW && (D > 64 || WHAT)) ? 1 : 2;
    static constexpr int AT_ONCE = NARROW && D == 64 && !WHAT ? 3 : 2;
    static constexpr int ROWS = 16 * M * OF_WARPS, THREADS = 32 * OF_WARPS, TOGETHER = 16 * M,
                         SLAB = D;
};

/* With wgmma, where a block has 227 KB: measured on an H100. */
template <class T, int D, int WHAT> struct form<T, D, WHAT, true> {
    static constexpr bool NARROW = true, GROUP = true;
    static constexpr int M = 1, OF_GROUPS = D == 64 || WHAT ? 1 : 2, STAGES = 2;
    static constexpr int COLS = D == 64 || !WHAT ? 128 : 64, PART = COLS;
    static constexpr int AT_ONCE = WHAT ? 2 : D == 64 ? 3 : 1;
    static constexpr int ROWS = 64 * OF_GROUPS, THREADS = 128 * OF_GROUPS, TOGETHER = 64, SLAB = 64;
};

/* The first of the TOGETHER rows that a warp's row `own` is one of, so that the compiler sees that
   a warp shares it. */
template <class F> static __device__ int together(int own) {
    if (F::ROWS == F::TOGETHER) return 0;
    own = own / F::TOGETHER * F::TOGETHER;
    return F::GROUP ? __shfl_sync(0xffffffffu, own, 0) : own;
}

/* A task that is PLAIN: without arrays, and 16 bytes can be read at a time. The way through its
   loop depends on nothing that is read, so that places of tiles lie in registers that a warp
   shares, and the next tiles can be asked for while products are under way: ptxas lets them go on
   over a branch only if all of a warp take the same way. */
static __device__ task plain(task s) {
    s.q.spans = s.k.spans = NULL;
    s.wide = true;
    return s;
}

template <class F> static constexpr int threads_of() {
    return F::GROUP && !HAS_GROUPS ? 32 : F::THREADS;
}

/* ---- products ---- */

/* c = rows of the tile x, from `row` on, times rows of the tile y, from `col` on. A group has it
   after `done`. */
template <class F, int D, int X_ROWS, int Y_ROWS, int M, int J, class T>
static __device__ void scores_of(
    float (&c)[M][J][4], const T *x, int row, const T *y, int col, int dim) {
    if constexpr (F::GROUP) {
        matrix a = matrix_at(x + row / 64 * 64 * 64, 0), b = matrix_at(y + col * 64, 0);
        group_begin();
        UNROLL for (int k = 0; k < D; k += 16)
            wgmma(T(), c[0], further(a, k / 64 * X_ROWS * 64 + k % 64),
                further(b, k / 64 * Y_ROWS * 64 + k % 64), k > 0);
        group_sent();
    } else {
        scores<D>(c, x, row, y + col * D, dim);
    }
}

/* p, rounded, as a group multiplies with it. */
template <class T, int J>
static __device__ void pack_rows(unsigned (&u)[J / 2][4], const float (&p)[1][J][4]) {
    UNROLL for (int e = 0; e < 2 * J; e++) u[e / 4][e % 4] =
        pair_of<T>(p[0][e / 2][e % 2 * 2], p[0][e / 2][e % 2 * 2 + 1]);
}

template <int Y_ROWS, int N, int K, class T>
static __device__ void mix_packed(float (&c)[1][N][4], const unsigned (&u)[K][4], const T *y) {
    matrix b = matrix_at(y, Y_ROWS * 64);
    group_begin();
    UNROLL for (int k = 0; k < K; k++) wgmma_across(T(), c[0], u[k], further(b, 16 * k * 64), 1);
    group_sent();
}

/* c += p times rows of the tile y, from `row` on. */
template <class F, int D, int Y_ROWS, int M, int N, int J, class T>
static __device__ void mix_of(
    float (&c)[M][N][4], const float (&p)[M][J][4], const T *y, int row, int dim) {
    if constexpr (F::GROUP) {
        unsigned u[J / 2][4];
        pack_rows<T>(u, p);
        mix_packed<Y_ROWS>(c, u, y + row * 64);
    } else {
        mix<D>(c, p, y + row * D, dim);
    }
}

/* All but the last LEFT products have been made, c among them. */
template <class F, int LEFT, int M, int J> static __device__ void done(float (&c)[M][J][4]) {
    if constexpr (F::GROUP) {
        group_done<LEFT>();
        UNROLL for (int e = 0; e < M * J * 4; e++) hold(c[e / 4 / J][e / 4 % J][e % 4]);
    }
}

/* ---- tiles ---- */

template <class F, int D, class T, int ROWS>
static __device__ void fetch_rows(
    T *tile, const void *from, int64_t at, int ld, int rows, const task &s) {
    UNROLL for (int col = 0; col < D; col += F::SLAB) fetch_tile<T, ROWS, F::SLAB, F::THREADS>(
        tile + col * ROWS, (const T *)from + at + col, ld, rows, s.dim - col, s.wide);
}

/* A tile of two arrays whose rows lie alike. */
template <class F, int D, int ROWS, class T>
static __device__ void fetch_two(T *x, T *y, const void *from_x, const void *from_y, int64_t at,
    int ld, int rows, const task &s) {
    fetch_rows<F, D, T, ROWS>(x, from_x, at, ld, rows, s);
    fetch_rows<F, D, T, ROWS>(y, from_y, at, ld, rows, s);
    copies_sent();
}

/* What this thread has fetched is there, for a group to read too. */
template <class F> static __device__ void tiles_here() {
    copies_here();
    if constexpr (F::GROUP) copies_seen();
}

/* Element of a row of queries; of keys. */
static __device__ int64_t query_at(const task &s, int sequence, int row, int head) {
    return (int64_t)((sequence * s.q.length + row) * s.heads + head) * s.dim;
}

static __device__ int64_t key_at(const task &s, int sequence, int row, int head) {
    return (int64_t)((sequence * s.k.length + row) * s.kv_heads + head) * s.dim;
}

/* Four neighbours, of which n are there: v, and `old` times what is there already. */
template <class T>
static __device__ void give_four(T *to, pack<float> v, int n, bool at_once, float old) {
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

/* Where a warp's rows go: from element `at` on, ld apart, the first `rows` of them; multiplied with
   `factor`. What is there already is added if `accumulate`; of row r, keep[r] times. */
struct target {
    void *out;
    int wide, accumulate;
    const float *keep; /* or NULL: once */
    int64_t at;
    int ld, rows;
    float factor;
};

/* By way of the warp's rows of a tile of floats, so that what a warp writes at once lies
   together. */
template <class T, int D, int M, int N>
static __device__ void give_rows(
    float *tile, const float (&c)[M][N][4], const target &to, const task &s) {
    int lane = threadIdx.x % 32;
    __syncwarp();
    UNROLL for (int r = 0; r < 2 * M; r++) {
        UNROLL for (int n = 0; n < N; n++) {
            float *two = tile + place<float, D>(8 * r + lane / 4, 8 * n + lane % 4 * 2);
            two[0] = to.factor * c[r / 2][n][r % 2 * 2];
            two[1] = to.factor * c[r / 2][n][r % 2 * 2 + 1];
        }
    }
    __syncwarp();
    UNROLL_BY(1) for (int i = lane; i < 4 * M * D; i += 32) {
        int row = i / (D / 4), col = i % (D / 4) * 4, have = min(s.dim - col, 4);
        if (row >= to.rows || have <= 0) continue;
        pack<float> v = *(const pack<float> *)(tile + place<float, D>(row, col));
        float old = !to.accumulate ? 0 : to.keep ? to.keep[row] : 1;
        int64_t at = to.at + (int64_t)row * to.ld + col;
        if (to.wide)
            give_four((float *)to.out + at, v, have, s.fours, old);
        else
            give_four((T *)to.out + at, v, have, s.fours, old);
    }
}

/* ---- forward ---- */

#define LOG2_E 1.4426950408889634 /* e^x is 2^(x LOG2_E), which is one instruction */

/* p = e^(scores - max) in place of the scores, and its sums to `sum`. factor: what was summed
   before is to be multiplied with, for it is relative to the maximum before. A row that sees
   nothing yet has maximum -infinity. Maxima and sums are taken in four parts, because each step of
   one waits for the step before. */
template <int M, int J>
static __device__ void softmax_step(
    float (&c)[M][J][4], float *most, float *sum, float (&factor)[2 * M], float power) {
    UNROLL for (int r = 0; r < 2 * M; r++) {
        float part[4], now;
        UNROLL for (int at = 0; at < 2 * J; at++) {
            float x = c[r / 2][at / 2][r % 2 * 2 + at % 2];
            part[at % 4] = at < 4 ? x : fmaxf(part[at % 4], x);
        }
        now = row_max(fmaxf(fmaxf(most[r], fmaxf(part[0], part[1])), fmaxf(part[2], part[3])));
        float base = now == -INFINITY ? 0 : now * power;
        factor[r] = exp2_of(most[r] * power - base);
        UNROLL for (int at = 0; at < 2 * J; at++) {
            float *p = &c[r / 2][at / 2][r % 2 * 2 + at % 2];
            *p = exp2_of(*p * power - base);
            part[at % 4] = at < 4 ? *p : part[at % 4] + *p;
        }
        most[r] = now;
        sum[r] = sum[r] * factor[r] + ((part[0] + part[1]) + (part[2] + part[3]));
    }
}

template <int M, int N>
static __device__ void scale_rows(float (&out)[M][N][4], const float (&factor)[2 * M]) {
    UNROLL for (int e = 0; e < M * N * 4; e++) out[e / 4 / N][e / 4 % N][e % 4] *=
        factor[e / 4 / N * 2 + e % 4 / 2];
}

/* log(e^x + e^y), of which either may be minus infinity */
static __device__ float join_lse(float x, float y) {
    float high = x > y ? x : y, low = x > y ? y : x;
    return high == -INFINITY ? high : high + log1pf(expf(low - high));
}

/* Divides a warp's rows, from `row0` on, by their sums and writes lse. With `merge` both count with
   what out and lse hold over other keys: keep, of the warp's rows in shared memory, is how much of
   that remains. */
template <int M, int N>
static __device__ void attention_end(const dt_attention_args &a, const task &s, int head, int row0,
    const float *most, const float *sum, float (&out)[M][N][4], float *keep) {
    int g = threadIdx.x % 32 / 4;
    UNROLL for (int r = 0; r < 2 * M; r++) {
        int row = row0 + 8 * r + g, at = head * s.q.length + row;
        bool there = row < s.q.length;
        float total = row_sum(sum[r]),
              mine = total > 0 ? most[r] * s.scale + logf(total) : -INFINITY;
        float before = a.merge && there ? ((const float *)a.lse)[at] : -INFINITY,
              both = join_lse(mine, before);
        float factor = total > 0 ? expf(mine - both) / total : 0;
        UNROLL for (int n = 0; n < 2 * N; n++) out[r / 2][n / 2][r % 2 * 2 + n % 2] *= factor;
        __syncwarp(); /* all lanes of the row have read what one now writes */
        if (threadIdx.x % 4 > 0) continue;
        keep[8 * r + g] = before > -INFINITY ? expf(before - both) : 0;
        if (there) ((float *)a.lse)[at] = both;
    }
}

template <class T, int D>
KERNEL __launch_bounds__((form<T, D, 0, false>::THREADS), (form<T, D, 0, false>::AT_ONCE))
    attention_kernel(dt_attention_args a, task s) {
    typedef form<T, D, 0, false> F;
    const int M = F::M, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, qs);
    __shared__ int2 rows[F::ROWS], cols[F::STAGES][F::COLS];
    __shared__ float keep[F::ROWS];
    T *ks = qs + F::ROWS * D, *vs = ks + F::STAGES * SIZE;
    float out[M][D / 8][4] = { { { 0 } } }, c[M][F::PART / 8][4], most[2 * M], sum[2 * M],
                     factor[2 * M];
    int row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS; /* the last see most, and begin first */
    int sequence = s.first_sequence + blockIdx.z;
    int own = threadIdx.x / 32 * 16 * M; /* the warp's first row */
    int mine = own / F::TOGETHER * F::TOGETHER;
    auto fetch = [&](int i, int stage) {
        int kv = s.first_kv + anew(blockIdx.y) / s.group;
        fetch_two<F, D, F::COLS>(ks + stage * SIZE, vs + stage * SIZE, a.k, a.v,
            key_at(s, sequence, i * F::COLS, kv), s.k_row, s.k.length - i * F::COLS, s);
        if (s.k.spans && threadIdx.x < F::COLS)
            cols[stage][threadIdx.x] = look(s, s.k, sequence, i * F::COLS + threadIdx.x);
    };
    if (s.k.spans && threadIdx.x < F::ROWS)
        rows[threadIdx.x] = look(s, s.q, sequence, row0 + threadIdx.x);
    UNROLL for (int r = 0; r < 2 * M; r++) {
        most[r] = -INFINITY;
        sum[r] = 0;
    }
    int i = next_keys(s, sequence, row0, F::ROWS, end_of_keys(s, row0, F::ROWS) - 1);
    fetch_rows<F, D, T, F::ROWS>(
        qs, a.q, query_at(s, sequence, row0, blockIdx.y), s.q_row, s.q.length - row0, s);
    if (i >= 0) fetch(i, 0);
    for (int stage = 0; i >= 0; stage = (stage + 1) % F::STAGES) {
        tiles_here<F>();
        __syncthreads(); /* this tile is there, and all have left the other stage */
        int next = next_keys(s, sequence, row0, F::ROWS, i - 1);
        if (F::STAGES == 2 && next >= 0) fetch(next, stage ^ 1);
        UNROLL_BY(1) for (int part = 0; part < F::COLS; part += F::PART) {
            int col0 = i * F::COLS + part;
            span q = span_of(s.q, sequence, row0 + mine, F::TOGETHER),
                 k = span_of(s.k, sequence, col0, F::PART);
            if (row0 + mine >= s.q.length || col0 >= s.k.length || none_seen(s, q, k)) continue;
            scores_of<F, D, F::ROWS, F::COLS>(c, qs, own, ks + stage * SIZE, part, s.dim);
            done<F, 0>(c);
            hide_keys(c, s, row0 + own, col0, all_seen(s, q, k), rows + own, cols[stage] + part);
            softmax_step(c, most, sum, factor, s.power);
            scale_rows(out, factor);
            mix_of<F, D, F::COLS>(out, c, vs + stage * SIZE, part, s.dim);
            done<F, 0>(out);
        }
        if (F::STAGES == 1) __syncthreads();
        if (F::STAGES == 1 && next >= 0) fetch(next, 0);
        i = next;
    }
    copies_here();   /* also where no tile was looked at */
    __syncthreads(); /* the tiles have been read */
    int h = anew(blockIdx.y);
    row0 = (s.q.tiles - 1 - anew(blockIdx.x)) * F::ROWS;
    attention_end(a, s, sequence * s.heads + h, row0 + own, most, sum, out, keep + own);
    target to = { a.out, a.wide, a.merge, keep + own, query_at(s, sequence, row0 + own, h), s.q_row,
        s.q.length - row0 - own, 1 };
    give_rows<T, D>((float *)qs + own * D, out, to, s);
}

/* By groups, which multiply while they do other things: a group first begins the scores of a tile
   and the output of the tile before, and makes the softmax of the one during the other. So values
   come with the keys of the next tile. */
template <class T, int D, bool PLAIN>
KERNEL __launch_bounds__((threads_of<form<T, D, 0, true>>()), (form<T, D, 0, true>::AT_ONCE))
    attention_groups_kernel(dt_attention_args a, task s) {
    typedef form<T, D, 0, true> F;
    if constexpr (!HAS_GROUPS) return;
    if constexpr (PLAIN) s = plain(s);
    const int SIZE = F::COLS * D;
    DT_DYN_SMEM(T, qs);
    __shared__ int2 rows[F::ROWS], cols[2][F::COLS];
    __shared__ float keep[F::ROWS];
    T *ks = qs + F::ROWS * D, *vs = ks + 2 * SIZE;
    float out[1][D / 8][4] = { { { 0 } } }, c[1][F::COLS / 8][4], most[2], sum[2] = { 0, 0 },
                     factor[2];
    unsigned u[F::COLS / 16][4];
    int row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS; /* the last see most, and begin first */
    int sequence = s.first_sequence + blockIdx.z, kv = s.first_kv + anew(blockIdx.y) / s.group;
    int own = threadIdx.x / 32 * 16, mine = together<F>(own);
    int i = next_keys(s, sequence, row0, F::ROWS, end_of_keys(s, row0, F::ROWS) - 1), before = -1;
    auto fetch = [&](int keys, int values, int stage) {
        int k0 = keys * F::COLS, v0 = values * F::COLS;
        if (PLAIN || keys >= 0) {
            fetch_rows<F, D, T, F::COLS>(ks + stage * SIZE, a.k, key_at(s, sequence, k0, kv),
                s.k_row, keys >= 0 ? s.k.length - k0 : 0, s);
            if (s.k.spans && threadIdx.x < F::COLS)
                cols[stage][threadIdx.x] = look(s, s.k, sequence, k0 + threadIdx.x);
        }
        if (values >= 0)
            fetch_rows<F, D, T, F::COLS>(
                vs + stage * SIZE, a.v, key_at(s, sequence, v0, kv), s.k_row, s.k.length - v0, s);
        copies_sent();
    };
    if (s.k.spans && threadIdx.x < F::ROWS)
        rows[threadIdx.x] = look(s, s.q, sequence, row0 + threadIdx.x);
    most[0] = most[1] = -INFINITY;
    fetch_rows<F, D, T, F::ROWS>(
        qs, a.q, query_at(s, sequence, row0, blockIdx.y), s.q_row, s.q.length - row0, s);
    fetch(i, before, 0);
    bool mixes = false;
    for (int stage = 0; i >= 0 || before >= 0; stage ^= 1) {
        tiles_here<F>();
        __syncthreads(); /* this tile is there, and all have left the other stage */
        int next = next_keys(s, sequence, row0, F::ROWS, i - 1), col0 = i * F::COLS;
        bool sees = i >= 0 && row0 + mine < s.q.length;
        span q = span_of(s.q, sequence, row0 + mine, 64), k = q;
        if (sees) k = span_of(s.k, sequence, col0, F::COLS);
        sees = sees && !none_seen(s, q, k);
        /* not the tile with the last key, which comes first */
        bool beside = sees && mixes && all_seen(s, q, k);
        if (i >= 0 && !(PLAIN && beside)) fetch(next, i, stage ^ 1);
        if (beside) {
            scores_of<F, D, F::ROWS, F::COLS>(c, qs, mine, ks + stage * SIZE, 0, s.dim);
            mix_packed<F::COLS>(out, u, vs + stage * SIZE);
            if constexpr (PLAIN) fetch(next, i, stage ^ 1);
            done<F, 1>(c);
            softmax_step(c, most, sum, factor, s.power);
            after(sum[0] + sum[1]);
            done<F, 0>(out);
            scale_rows(out, factor);
            pack_rows<T>(u, c);
        } else {
            if (mixes) mix_packed<F::COLS>(out, u, vs + stage * SIZE);
            done<F, 0>(out);
            if (sees) {
                scores_of<F, D, F::ROWS, F::COLS>(c, qs, mine, ks + stage * SIZE, 0, s.dim);
                done<F, 0>(c);
                hide_keys(c, s, row0 + own, col0, all_seen(s, q, k), rows + own, cols[stage]);
                softmax_step(c, most, sum, factor, s.power);
                scale_rows(out, factor);
                pack_rows<T>(u, c);
            }
        }
        mixes = sees;
        before = i;
        i = next;
    }
    copies_here();
    __syncthreads(); /* the tiles have been read */
    int h = anew(blockIdx.y);
    row0 = (s.q.tiles - 1 - anew(blockIdx.x)) * F::ROWS;
    attention_end(a, s, sequence * s.heads + h, row0 + own, most, sum, out, keep + own);
    target to = { a.out, a.wide, a.merge, keep + own, query_at(s, sequence, row0 + own, h), s.q_row,
        s.q.length - row0 - own, 1 };
    give_rows<T, D>((float *)qs + own * D, out, to, s);
}

/* ---- backward ---- */

/* Deltas are those of the sequences and heads of one grid. */
static __device__ int delta_at(const task &s, int sequence, int h, int row) {
    return ((sequence - s.first_sequence) * s.heads + h - s.first_kv * s.group) * s.q.length + row;
}

/* delta = sum of dout out for each row. Eight threads have a row, so that each reads 16 bytes of a
   usual one. */
enum { DELTA_LANES = 8, DELTA_ROWS = BLOCK / DELTA_LANES };

template <class T>
KERNEL __launch_bounds__(BLOCK) delta_kernel(dt_attention_back_args a, task s, float *delta) {
    const int MOST = pack<T>::N;
    int row = blockIdx.x * DELTA_ROWS + threadIdx.x / DELTA_LANES, lane = threadIdx.x % DELTA_LANES;
    int sequence = s.first_sequence + blockIdx.z, h = s.first_kv * s.group + blockIdx.y;
    int dim = row < s.q.length ? s.dim : 0,
        whole = s.dim % MOST == 0 && aligned16(a.out, a.dout) ? dim : 0;
    int64_t at = query_at(s, sequence, row, h);
    float sum = 0;
    auto add = [&](int64_t i, auto by) {
        const int N = decltype(by)::N;
        pack<float, N> d = get<N>((const T *)a.dout + i), out;
        out = a.wide ? get<N>((const float *)a.out + i) : get<N>((const T *)a.out + i);
        for (int k = 0; k < N; k++) sum += d.v[k] * out.v[k];
    };
    for (int d = lane * MOST; d < whole; d += DELTA_LANES * MOST) add(at + d, by<MOST>());
    for (int d = whole + lane; d < dim; d += DELTA_LANES) add(at + d, by<1>());
    for (int other = DELTA_LANES / 2; other > 0; other /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (lane == 0 && row < s.q.length) delta[delta_at(s, sequence, h, row)] = sum;
}

static __device__ float lse_at(const void *lse, const task &s, int sequence, int h, int row) {
    return row < s.q.length ? ((const float *)lse)[(sequence * s.heads + h) * s.q.length + row]
                            : -INFINITY;
}

/* lse of a query in powers of two; infinity, which makes all of p zero, for one that is not there
   or sees nothing. */
static __device__ float exponent_of(float lse) {
    return lse == -INFINITY ? INFINITY : lse * (float)LOG2_E;
}

static __device__ float delta_of(const float *delta, const task &s, int sequence, int h, int row) {
    return row < s.q.length ? delta[delta_at(s, sequence, h, row)] : 0;
}

/* dq = scale ds k, where p = e^(scale q k - lse), dp = dout v and ds = p (dp - delta). */
template <class T, int D, bool GROUPS, bool PLAIN>
KERNEL __launch_bounds__((threads_of<form<T, D, 1, GROUPS>>()), (form<T, D, 1, GROUPS>::AT_ONCE))
    queries_back_kernel(dt_attention_back_args a, task s, const float *delta) {
    typedef form<T, D, 1, GROUPS> F;
    if constexpr (GROUPS && !HAS_GROUPS) return;
    if constexpr (PLAIN) s = plain(s);
    const int M = F::M, J = F::PART / 8, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, qs);
    __shared__ int2 rows[F::ROWS], cols[F::STAGES][F::COLS];
    T *ds = qs + F::ROWS * D, *ks = ds + F::ROWS * D, *vs = ks + F::STAGES * SIZE;
    float dq[M][D / 8][4] = { { { 0 } } }, c[M][J][4], dp[M][J][4], lse[2 * M], mean[2 * M];
    int row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS, own = threadIdx.x / 32 * 16 * M;
    int mine = together<F>(own), from = GROUPS ? mine : own; /* a product's first row */
    int sequence = s.first_sequence + blockIdx.z, h = s.first_kv * s.group + blockIdx.y;
    auto fetch = [&](int i, int stage) {
        int kv = s.first_kv + anew(blockIdx.y) / s.group;
        fetch_two<F, D, F::COLS>(ks + stage * SIZE, vs + stage * SIZE, a.k, a.v,
            key_at(s, sequence, i * F::COLS, kv), s.k_row, s.k.length - i * F::COLS, s);
        if (s.k.spans && threadIdx.x < F::COLS)
            cols[stage][threadIdx.x] = look(s, s.k, sequence, i * F::COLS + threadIdx.x);
    };
    if (s.k.spans && threadIdx.x < F::ROWS)
        rows[threadIdx.x] = look(s, s.q, sequence, row0 + threadIdx.x);
    UNROLL for (int r = 0; r < 2 * M; r++) {
        lse[r] =
            exponent_of(lse_at(a.lse, s, sequence, h, row0 + own + 8 * r + threadIdx.x % 32 / 4));
        mean[r] = delta_of(delta, s, sequence, h, row0 + own + 8 * r + threadIdx.x % 32 / 4);
    }
    int i = next_keys(s, sequence, row0, F::ROWS, end_of_keys(s, row0, F::ROWS) - 1);
    fetch_two<F, D, F::ROWS>(
        qs, ds, a.q, a.dout, query_at(s, sequence, row0, h), s.q_row, s.q.length - row0, s);
    if (i >= 0) fetch(i, 0);
    for (int stage = 0; i >= 0; stage = (stage + 1) % F::STAGES) {
        tiles_here<F>();
        __syncthreads();
        int next = next_keys(s, sequence, row0, F::ROWS, i - 1);
        if (F::STAGES == 2 && next >= 0 && !PLAIN) fetch(next, stage ^ 1);
        UNROLL_BY(1) for (int part = 0; part < F::COLS; part += F::PART) {
            int col0 = i * F::COLS + part;
            span q = span_of(s.q, sequence, row0 + mine, F::TOGETHER),
                 k = span_of(s.k, sequence, col0, F::PART);
            T *kt = ks + stage * SIZE, *vt = vs + stage * SIZE;
            if (!PLAIN && (row0 + mine >= s.q.length || col0 >= s.k.length || none_seen(s, q, k)))
                continue;
            scores_of<F, D, F::ROWS, F::COLS>(c, qs, from, kt, part, s.dim);
            scores_of<F, D, F::ROWS, F::COLS>(dp, ds, from, vt, part, s.dim);
            if (PLAIN && next >= 0) fetch(next, stage ^ 1);
            done<F, 1>(c);
            hide_keys(c, s, row0 + own, col0, all_seen(s, q, k), rows + own, cols[stage] + part);
            UNROLL for (int e = 0; e < M * J * 4; e++) {
                float *p = &c[e / 4 / J][e / 4 % J][e % 4];
                *p = exp2_of(*p * s.power - lse[e / 4 / J * 2 + e % 4 / 2]);
            }
            done<F, 0>(dp);
            UNROLL for (int e = 0; e < M * J * 4; e++) c[e / 4 / J][e / 4 % J][e % 4] *=
                dp[e / 4 / J][e / 4 % J][e % 4] - mean[e / 4 / J * 2 + e % 4 / 2];
            mix_of<F, D, F::COLS>(dq, c, kt, part, s.dim);
            done<F, 0>(dq);
        }
        if (F::STAGES == 1) __syncthreads();
        if (F::STAGES == 1 && next >= 0) fetch(next, 0);
        i = next;
    }
    copies_here();
    __syncthreads();
    h = s.first_kv * s.group + anew(blockIdx.y);
    row0 = (s.q.tiles - 1 - anew(blockIdx.x)) * F::ROWS;
    target to = { a.dq, a.wide, a.accumulate_q, NULL, query_at(s, sequence, row0 + own, h), s.q_row,
        s.q.length - row0 - own, s.scale };
    give_rows<T, D>((float *)qs + own * D, dq, to, s);
}

/* dk = scale ds^T q and dv = p^T dout, over the queries of all heads that share the key's, head
   after head. WHAT: 1 dk, 2 dv, 3 both, for which the sums of a large D are too many. */
template <class T, int D, int WHAT, bool GROUPS, bool PLAIN>
KERNEL __launch_bounds__((threads_of<form<T, D, 2, GROUPS>>()), (form<T, D, 2, GROUPS>::AT_ONCE))
    keys_back_kernel(dt_attention_back_args a, task s, const float *delta) {
    typedef form<T, D, 2, GROUPS> F;
    if constexpr (GROUPS && !HAS_GROUPS) return;
    if constexpr (PLAIN) s = plain(s);
    const int M = F::M, J = F::PART / 8, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, ks);
    __shared__ float lse[F::STAGES][F::COLS], mean[F::STAGES][F::COLS];
    __shared__ int2 rows[F::ROWS], cols[F::STAGES][F::COLS];
    T *vs = ks + F::ROWS * D, *qs = vs + F::ROWS * D, *ds = qs + F::STAGES * SIZE;
    float dk[M][D / 8][4] = { { { 0 } } }, dv[M][D / 8][4] = { { { 0 } } }, c[M][J][4], dp[M][J][4];
    /* of a query of the next tile: on their way while this one is computed */
    float row_lse = 0, row_mean = 0;
    int row0 = blockIdx.x * F::ROWS, own = threadIdx.x / 32 * 16 * M;
    int mine = together<F>(own), from = GROUPS ? mine : own; /* a product's first row */
    int sequence = s.first_sequence + blockIdx.z, kv = s.first_kv + blockIdx.y, ld = s.k_row;
    auto fetch = [&](visit i, int stage) {
        int row = i.tile * F::COLS, h = kv * s.group + i.head, thread = threadIdx.x;
        fetch_two<F, D, F::COLS>(qs + stage * SIZE, ds + stage * SIZE, a.q, a.dout,
            query_at(s, sequence, row, h), s.q_row, s.q.length - row, s);
        if (thread >= F::COLS) return;
        row_lse = lse_at(a.lse, s, sequence, h, row + thread);
        row_mean = delta_of(delta, s, sequence, h, row + thread);
        if (s.k.spans) cols[stage][thread] = look(s, s.q, sequence, row + thread);
    };
    if (s.k.spans && threadIdx.x < F::ROWS)
        rows[threadIdx.x] = look(s, s.k, sequence, row0 + threadIdx.x);
    int first = first_of_queries(s, row0);
    visit next = next_queries(s, sequence, row0, F::ROWS, first, visit{ 0, 0 });
    fetch_two<F, D, F::ROWS>(
        ks, vs, a.k, a.v, key_at(s, sequence, row0, kv), ld, s.k.length - row0, s);
    if (next.head < s.group) fetch(next, 0);
    for (int stage = 0; next.head < s.group; stage = (stage + 1) % F::STAGES) {
        int tile = next.tile++;
        if (threadIdx.x < F::COLS) {
            lse[stage][threadIdx.x] = exponent_of(row_lse);
            mean[stage][threadIdx.x] = row_mean;
        }
        tiles_here<F>();
        __syncthreads();
        next = next_queries(s, sequence, row0, F::ROWS, first, next);
        if (F::STAGES == 2 && next.head < s.group && !PLAIN) fetch(next, stage ^ 1);
        UNROLL_BY(1) for (int part = 0; part < F::COLS; part += F::PART) {
            int col0 = tile * F::COLS + part;
            span q = span_of(s.q, sequence, col0, F::PART),
                 k = span_of(s.k, sequence, row0 + mine, F::TOGETHER);
            T *qt = qs + stage * SIZE, *dt = ds + stage * SIZE;
            if (!PLAIN && (row0 + mine >= s.k.length || col0 >= s.q.length || none_seen(s, q, k)))
                continue;
            scores_of<F, D, F::ROWS, F::COLS>(c, ks, from, qt, part, s.dim);
            if (F::GROUP && WHAT != 2)
                scores_of<F, D, F::ROWS, F::COLS>(dp, vs, from, dt, part, s.dim);
            if (PLAIN && next.head < s.group) fetch(next, stage ^ 1);
            done<F, WHAT == 2 ? 0 : 1>(c);
            hide_queries(c, s, row0 + own, col0, all_seen(s, q, k), rows + own, cols[stage] + part);
            UNROLL for (int e = 0; e < M * J * 4; e++) {
                float *p = &c[e / 4 / J][e / 4 % J][e % 4];
                *p = exp2_of(
                    *p * s.power - lse[stage][part + e / 4 % J * 8 + threadIdx.x % 4 * 2 + e % 2]);
            }
            if (WHAT & 2) mix_of<F, D, F::COLS>(dv, c, dt, part, s.dim);
            if (WHAT == 2) done<F, 0>(dv);
            if (WHAT == 2) continue;
            if (!F::GROUP) scores_of<F, D, F::ROWS, F::COLS>(dp, vs, from, dt, part, s.dim);
            done<F, WHAT / 2>(dp);
            UNROLL for (int e = 0; e < M * J * 4; e++) c[e / 4 / J][e / 4 % J][e % 4] *=
                dp[e / 4 / J][e / 4 % J][e % 4] -
                mean[stage][part + e / 4 % J * 8 + threadIdx.x % 4 * 2 + e % 2];
            mix_of<F, D, F::COLS>(dk, c, qt, part, s.dim);
            done<F, 0>(dk);
            if (WHAT & 2) done<F, 0>(dv);
        }
        if (F::STAGES == 1) __syncthreads();
        if (F::STAGES == 1 && next.head < s.group) fetch(next, 0);
    }
    copies_here();
    __syncthreads();
    target to = { a.dk, a.wide, a.accumulate_k, NULL, key_at(s, sequence, row0 + own, kv), ld,
        s.k.length - row0 - own, s.scale };
    if (WHAT & 1) give_rows<T, D>((float *)ks + own * D, dk, to, s);
    to.out = a.dv;
    to.accumulate = a.accumulate_v;
    to.factor = 1;
    if (WHAT & 2) give_rows<T, D>((float *)ks + own * D, dv, to, s);
}

/* ---- launching ---- */

static const int64_t MAX_GRID = 65535; /* blocks of a grid in its second and third dimension */

static int64_t tiles_of(int64_t length, int64_t each) { return (length + each - 1) / each; }

static side side_of(
    const int32_t *position, const int32_t *document, int64_t length, int each, int64_t shift) {
    side x = { position, document, NULL, (int)length, each, (int)tiles_of(length, each),
        (int)shift };
    return x;
}

/* What is the same forward and backward. Rows are numbered in 32 bits; a scale that is not positive
   would make the largest score the smallest. */
template <class args> static dt_status task_of(task *out, const args &a, size_t aligned) {
    int64_t row = a.heads * a.dim, longest = (a.tq > a.tk ? a.tq : a.tk) + 256;
    dt_attention_mask s = a.sight;
    task x;
    if (a.dtype != DT_F32 && a.dtype != DT_BF16 && a.dtype != DT_F16) return DT_ERR_UNSUPPORTED;
    if (a.kv_heads < 1 || a.heads % a.kv_heads || !a.work) return DT_ERR_ARG;
    if (a.batch * a.heads * longest > INT32_MAX || row > INT32_MAX / 256 || a.heads > MAX_GRID ||
        !(a.scale > 0) || a.dim > 256)
        return DT_ERR_UNSUPPORTED;
    if (!s.causal) s.q_position = s.k_position = NULL;
    if (!s.k_document) s.q_document = NULL;
    x.q = side_of(s.q_position, s.q_document, a.tq, 1, a.tk - a.tq);
    x.k = side_of(s.k_position, s.k_document, a.tk, 1, 0);
    x.causal = s.causal;
    x.heads = (int)a.heads;
    x.kv_heads = (int)a.kv_heads;
    x.group = (int)(a.heads / a.kv_heads);
    x.dim = (int)a.dim;
    x.q_row = (int)row;
    x.k_row = (int)(a.kv_heads * a.dim);
    x.first_sequence = x.first_kv = 0;
    x.scale = (float)a.scale;
    x.power = (float)(a.scale * LOG2_E);
    x.wide = (aligned | (size_t)a.dim * dt_dtype_size(a.dtype)) % 16 == 0;
    x.fours = a.dim % 4 == 0;
    *out = x;
    return DT_OK;
}

/* Cuts a task into tiles; where there are arrays the spans are made at `work`, of which *used bytes
   are then taken. */
static dt_status cut(task *s, int64_t batch, int each_q, int each_k, char *work, size_t work_bytes,
    size_t *used, void *stream) {
    bool arrays = s->q.position || s->k.position || s->k.document;
    s->q = side_of(s->q.position, s->q.document, s->q.length, each_q, s->q.shift);
    s->k = side_of(s->k.position, s->k.document, s->k.length, each_k, 0);
    int64_t of_q = batch * s->q.tiles, of_k = batch * s->k.tiles;
    *used = arrays ? (size_t)(of_q + of_k) * sizeof(span) : 0;
    if (*used > work_bytes) return DT_ERR_ARG;
    if (!arrays) return DT_OK;
    s->q.spans = (span *)work;
    s->k.spans = s->q.spans + of_q;
    if (of_q > 0)
        DT_LAUNCH(spans_kernel, (unsigned)tiles_of(of_q, WARPS), BLOCK, 0, stream_of(stream), s->q,
            batch);
    if (of_k > 0)
        DT_LAUNCH(spans_kernel, (unsigned)tiles_of(of_k, WARPS), BLOCK, 0, stream_of(stream), s->k,
            batch);
    return DT_OK;
}

/* Whether a kernel has been compiled for this device so that it can use wgmma. */
static bool takes(const void *kernel, int threads) {
    cudaFuncAttributes code;
    if (cudaFuncGetAttributes(&code, kernel) == cudaSuccess)
        return code.maxThreadsPerBlock >= threads;
    (void)cudaGetLastError();
    return false;
}

static bool is_plain(const task &s) {
    return s.wide && !s.q.position && !s.k.position && !s.k.document;
}

template <class T, int D, bool GROUPS, class run>
static dt_status attention_with(const dt_attention_args &a, task s, run kernel, void *stream) {
    typedef form<T, D, 0, GROUPS> F;
    size_t bytes = (size_t)(F::ROWS + 2 * F::STAGES * F::COLS) * D * sizeof(T), used;
    dt_status status =
        cut(&s, a.batch, F::ROWS, F::COLS, (char *)a.work, a.work_bytes, &used, stream);
    if (status != DT_OK) return status;
    for (int64_t b = 0; b < a.batch && s.q.tiles > 0; b += MAX_GRID) {
        dim3 grid(s.q.tiles, s.heads, (unsigned)(a.batch - b < MAX_GRID ? a.batch - b : MAX_GRID));
        s.first_sequence = (int)b;
        LAUNCH_SHARED(kernel, grid, F::THREADS, bytes, stream, a, s);
    }
    return launched();
}

template <class T, int D>
static dt_status attention_of(const dt_attention_args &a, const task &s, void *stream) {
    if constexpr (sizeof(T) == 2 && D <= 128)
        if (takes((const void *)attention_groups_kernel<T, D, true>, form<T, D, 0, true>::THREADS))
            return is_plain(s) ? attention_with<T, D, true>(
                                     a, s, attention_groups_kernel<T, D, true>, stream)
                               : attention_with<T, D, true>(
                                     a, s, attention_groups_kernel<T, D, false>, stream);
    return attention_with<T, D, false>(a, s, attention_kernel<T, D>, stream);
}

#define BY_DIM(function, T, a, s, stream) \
    ((a).dim <= 64       ? function<T, 64>(a, s, stream) \
        : (a).dim <= 128 ? function<T, 128>(a, s, stream) \
                         : function<T, 256>(a, s, stream))

#define BY_TYPE_AND_DIM(function, a, s, stream) \
    ((a).dtype == DT_F32       ? BY_DIM(function, float, a, s, stream) \
        : (a).dtype == DT_BF16 ? BY_DIM(function, bf16, a, s, stream) \
                               : BY_DIM(function, f16, a, s, stream))

static dt_status cuda_attention(const dt_attention_args *args, void *stream) {
    dt_attention_args a = *args;
    task s;
    dt_status status = task_of(&s, a, (size_t)a.q | (size_t)a.k | (size_t)a.v);
    if (status != DT_OK) return status;
    if (a.dtype == DT_F32) a.wide = 1;
    s.fours = s.fours && (size_t)a.out % 16 == 0;
    return BY_TYPE_AND_DIM(attention_of, a, s, stream);
}

/* Of `sequences` and kv_heads, of which the tasks name the first. */
template <class T, int D, bool GROUPS, bool PLAIN>
static dt_status attention_back_some(const dt_attention_back_args &a, const task &q, const task &k,
    int sequences, int kv_heads, float *delta, void *stream) {
    typedef form<T, D, 1, GROUPS> Q;
    typedef form<T, D, 2, GROUPS> K;
    const int BOTH = D <= 128 ? 3 : 1;
    size_t bytes_q = (size_t)2 * (Q::ROWS + Q::STAGES * Q::COLS) * D * sizeof(T);
    size_t bytes_k = (size_t)2 * (K::ROWS + K::STAGES * K::COLS) * D * sizeof(T);
    dim3 rows((unsigned)tiles_of(a.tq, DELTA_ROWS), kv_heads * q.group, sequences);
    dim3 grid_q(q.q.tiles, kv_heads * q.group, sequences), grid_k(k.k.tiles, kv_heads, sequences);
    if (a.tq > 0) DT_LAUNCH(delta_kernel<T>, rows, BLOCK, 0, stream_of(stream), a, q, delta);
    if (a.tq > 0 && a.dq)
        LAUNCH_SHARED((queries_back_kernel<T, D, GROUPS, PLAIN>), grid_q, Q::THREADS, bytes_q,
            stream, a, q, delta);
    if (a.tk == 0) return DT_OK;
    if (BOTH == 3 && a.dk && a.dv) {
        LAUNCH_SHARED((keys_back_kernel<T, D, BOTH, GROUPS, PLAIN>), grid_k, K::THREADS, bytes_k,
            stream, a, k, delta);
        return DT_OK;
    }
    if (a.dk)
        LAUNCH_SHARED((keys_back_kernel<T, D, 1, GROUPS, false>), grid_k, K::THREADS, bytes_k,
            stream, a, k, delta);
    if (a.dv)
        LAUNCH_SHARED((keys_back_kernel<T, D, 2, GROUPS, false>), grid_k, K::THREADS, bytes_k,
            stream, a, k, delta);
    return DT_OK;
}

/* As many sequences at a time as the scratch has room for deltas of, or else as many heads of
   one. */
template <class T, int D, bool GROUPS, bool PLAIN>
static dt_status attention_back_with(const dt_attention_back_args &a, task q, void *stream) {
    typedef form<T, D, 1, GROUPS> Q;
    typedef form<T, D, 2, GROUPS> K;
    size_t used_q, used_k;
    task k = q;
    char *work = (char *)a.work;
    dt_status status = cut(&q, a.batch, Q::ROWS, Q::COLS, work, a.work_bytes, &used_q, stream);
    if (status != DT_OK) return status;
    status =
        cut(&k, a.batch, K::COLS, K::ROWS, work + used_q, a.work_bytes - used_q, &used_k, stream);
    if (status != DT_OK) return status;
    float *delta = (float *)(work + used_q + used_k);
    int64_t room = (int64_t)((a.work_bytes - used_q - used_k) / sizeof(float)),
            of_kv = q.group * a.tq;
    int64_t kv_heads = of_kv > 0 ? room / of_kv : a.kv_heads;
    int64_t sequences = kv_heads / a.kv_heads < MAX_GRID ? kv_heads / a.kv_heads : MAX_GRID;
    if (kv_heads == 0) return DT_ERR_ARG;
    if (sequences == 0) sequences = 1;
    if (kv_heads > a.kv_heads) kv_heads = a.kv_heads;
    for (int64_t b = 0; b < a.batch; b += sequences) {
        for (int64_t kv = 0; kv < a.kv_heads && status == DT_OK; kv += kv_heads) {
            int64_t some = a.batch - b < sequences ? a.batch - b : sequences;
            q.first_sequence = k.first_sequence = (int)b;
            q.first_kv = k.first_kv = (int)kv;
            int64_t heads = a.kv_heads - kv < kv_heads ? a.kv_heads - kv : kv_heads;
            status = attention_back_some<T, D, GROUPS, PLAIN>(
                a, q, k, (int)some, (int)heads, delta, stream);
        }
    }
    return status == DT_OK ? launched() : status;
}

template <class T, int D>
static dt_status attention_back_of(const dt_attention_back_args &a, const task &s, void *stream) {
    if constexpr (sizeof(T) == 2 && D <= 128)
        if (takes(
                (const void *)queries_back_kernel<T, D, true, true>, form<T, D, 1, true>::THREADS))
            return is_plain(s) ? attention_back_with<T, D, true, true>(a, s, stream)
                               : attention_back_with<T, D, true, false>(a, s, stream);
    return attention_back_with<T, D, false, false>(a, s, stream);
}

static dt_status cuda_attention_back(const dt_attention_back_args *args, void *stream) {
    dt_attention_back_args a = *args;
    task s;
    dt_status status = task_of(&s, a, (size_t)a.q | (size_t)a.k | (size_t)a.v | (size_t)a.dout);
    if (status != DT_OK) return status;
    if (a.dtype == DT_F32) a.wide = 1;
    s.fours = s.fours && ((size_t)a.dq | (size_t)a.dk | (size_t)a.dv) % 16 == 0;
    return BY_TYPE_AND_DIM(attention_back_of, a, s, stream);
}
#undef BY_DIM
#undef BY_TYPE_AND_DIM
#undef LOG2_E

// ==== 17. The table =============================================================================

extern "C" const dt_kernels *dt_kernels_cuda(void) {
    static const dt_kernels table = {
        .name = "cuda",
        .alloc = cuda_alloc,
        .free = cuda_free,
        .move = cuda_move,
        .sync = cuda_sync,
        .user = NULL,
        .open = cuda_open,
        .close = dt_cuda_close,
        .pin = cuda_pin,
        .unpin = cuda_unpin,
        .reaches = cuda_reaches,
        .share = cuda_share,
        .mark = cuda_mark,
        .passed = cuda_passed,
        .after = cuda_after,
        .unmark = cuda_unmark,
        .work_bytes = (size_t)32 << 20, /* what cuBLASLt is recommended to have on Hopper */
        .loss_numbers = (size_t)1 << 30,
        .fill = cuda_fill,
        .init = cuda_init,
        .copy = cuda_copy,
        .permute = cuda_permute,
        .cast = cuda_cast,
        .reduce = cuda_reduce,
        .sum = cuda_sum,
        .max = cuda_max,
        .binary = cuda_binary,
        .unary = cuda_unary,
        .unary_back = cuda_unary_back,
        .glu = cuda_glu,
        .glu_back = cuda_glu_back,
        .softmax = cuda_softmax,
        .softmax_back = cuda_softmax_back,
        .norm = cuda_norm,
        .norm_back = cuda_norm_back,
        .rope = cuda_rope,
        .dropout = cuda_dropout,
        .embedding = cuda_embedding,
        .embedding_back = cuda_embedding_back,
        .topk = cuda_topk,
        .spread = cuda_spread,
        .matmul = cuda_matmul,
        .attention = cuda_attention,
        .attention_back = cuda_attention_back,
        .cross_entropy = cuda_cross_entropy,
        .cross_entropy_join = cuda_cross_entropy_join,
        .cross_entropy_back = cuda_cross_entropy_back,
        .mse = cuda_mse,
        .mse_back = cuda_mse_back,
        .square_sums = cuda_square_sums,
        .adamw = cuda_adamw,
        .sgd = cuda_sgd,
        .momentum = cuda_momentum,
        .frozen_adam = cuda_frozen_adam,
        .sign_pack = cuda_sign_pack,
        .sign_unpack = cuda_sign_unpack,
    };
    return &table;
}

/* Code for an older GPU runs on a newer one, compiled once more at start; what is for tensor cores
   is in it only from sm_80 on, and wgmma in none but sm_90a, which runs nowhere else. A kernel
   knows for which GPU it was written. False: this device cannot run it. */
static bool advise(char *text, size_t text_bytes) {
    cudaFuncAttributes code;
    int device = 0, major = 0, minor = 0;
    bool known =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
    bool hopper = major == 9 && minor == 0;
    bool runs =
        cudaFuncGetAttributes(&code, (const void *)(fill_kernel<float, float>)) == cudaSuccess;
    const char *a = hopper ? "a" : "";
    (void)cudaGetLastError();
    if (!known) return true;
    if (!runs)
        snprintf(text, text_bytes, "this build has no code for an sm_%d%d: nvcc -arch=sm_%d%d%s",
            major, minor, major, minor, a);
    else if (code.ptxVersion / 10 < major ||
             (hopper && !takes((const void *)attention_groups_kernel<bf16, 64, true>, 128)))
        snprintf(text, text_bytes,
            "this build is for sm_%d and the GPU is an sm_%d%d: nvcc -arch=sm_%d%d%s makes it "
            "faster",
            code.ptxVersion, major, minor, major, minor, a);
    return runs;
}

/* cudaGetDeviceCount does not write its result when it fails, and without a driver it answers
   "driver version is insufficient"; cudaDriverGetVersion tells the two apart: version 0 is no
   driver at all. */
extern "C" dt_status dt_cuda_ready(char *text, size_t text_bytes) {
    int devices = 0, driver = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (text_bytes > 0) text[0] = 0;
    if (error == cudaSuccess && devices > 0)
        return advise(text, text_bytes) ? DT_OK : DT_ERR_DEVICE;
    (void)cudaGetLastError();
    if (error == cudaSuccess) error = cudaErrorNoDevice;
    bool no_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    const char *why = no_driver ? "no NVIDIA driver found" : cudaGetErrorName(error);
    if (text_bytes > 0) snprintf(text, text_bytes, "%s", why);
    return DT_ERR_DEVICE;
}

/* Revision history: 0.1.0 (2026) first version.

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
