/* dt_kernels.cu - v0.1.0 - the CUDA side of dt_tensor.h's kernel table - public domain or MIT, see the end of the file

   Compile it with nvcc beside the file that defines DT_IMPLEMENTATION:

       nvcc -O3 train.c dt_kernels.cu -o train -lcublasLt -lpthread

   It gives two functions, dt_kernels_cuda() and dt_cuda_ready(), both declared in dt_tensor.h.

   DOES NOT: allocate but for a queue (scratch is the caller's), keep state, choose a device (the thread's current one
   is used), add with atomics. f32, bf16 and f16 are served; f64 and i32 by fill, copy, permute, cast and reduce too,
   f64 by init, because a loss is an f64 scalar. Parameters and their state are f32, with a copy in 16 bits. All else,
   and a reduction of more than MAX_INPUTS inputs of 16 bits, is DT_ERR_UNSUPPORTED before anything is launched.

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

   SPEED. All kernels but those of sections 15 and 16 wait for memory. So each number is read and written once where
   that can be: 16 bytes at a time, rows in registers, sums over rows in as many parts as fill a GPU. Odd lengths and
   places are served element by element. Products are cuBLASLt's where there is a queue, and attention runs on tensor
   cores; both have kernels that need neither.

   ORDER OF SUMS. Every sum has an order that depends on sizes only, that of the scratch among them, so the same call
   gives the same bits on the same build and kind of device. They are not the CPU's bits: long sums are taken in other
   parts, nvcc makes one rounding of a product and a sum, expf is CUDA's, for 16 bits the hardware's. tests/test_cuda.cc
   runs these kernels on a CPU and allows 1e-6 relative, and in 16 bits one rounding. Tensor cores are given 16 bits:
   attention in bf16 and f16 rounds its probabilities and their gradients on the way, and what cuBLASLt adds up in has
   an order of its own, by the sizes of the product. What has nothing to contract gives the CPU's bits: fill, copy,
   permute, cast, reduce, max, topk, spread, uniform init, embedding and its backward, square_sums; binary and dropout
   too, unless they accumulate. What a NaN carries is nobody's business. Never compile this file with -use_fast_math:
   nvcc defines no macro by which it could be refused here.

   ERRORS. A refused launch is DT_ERR_DEVICE at once. A kernel that fails later shows in a later call, at the latest in
   sync: that is how CUDA works. An index outside of its table shows in sync as DT_ERR_ARG: see section 9. */

#include "/work/main/dt_tensor.h"

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

/* Products by cuBLASLt where nvcc finds it, and by the kernels here where it refuses: -DDT_NO_CUBLASLT for these alone.
   Other compilers take it on request. */
#if !defined(DT_NO_CUBLASLT) && !defined(DT_CUBLASLT) && defined(__CUDACC__) && defined(__has_include)
#if __has_include(<cublasLt.h>)
#define DT_CUBLASLT
#endif
#endif
#ifdef DT_CUBLASLT
#include <cublasLt.h>
#endif

/* A test runs this file on a CPU (tests/cuda_on_cpu.h): there a launch is a call, and a kernel is static already. */
#ifdef __CUDACC__
#define DT_LAUNCH(kernel, grid, block, smem, stream, ...) kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
#define KERNEL static __global__ void
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DT_DYN_ALIGN 1024 /* for wgmma */
#else
#define DT_DYN_ALIGN 16
#endif
#define DT_DYN_SMEM(T, name) \
    extern __shared__ __align__(DT_DYN_ALIGN) unsigned char dt_dyn_smem[]; \
    T *name = reinterpret_cast<T *>(dt_dyn_smem)
#define UNROLL _Pragma("unroll") /* before loops over what must stay in registers, where nvcc might not see it */
#define UNROLL_BY(n) DT_PRAGMA(unroll n)
#define DT_PRAGMA(x) _Pragma(#x)
#else
#define KERNEL __global__ void
#define UNROLL
#define UNROLL_BY(n)
#endif

// ==== 1. Launching, queues ==========================================================================================

/* Kernels take the table's args structs by value. A grid has at most MAX_BLOCKS blocks, several times what a GPU runs
   at once; kernels walk on in steps of the grid, so that any size is served. */
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
        if ((n) > 0) DT_LAUNCH(kernel, grid_for((n), (each)), BLOCK, 0, stream_of(stream), __VA_ARGS__); \
    } while (0)

/* What a rank has of a device: every kernel's `stream`. NULL is the thread's current device and its default stream,
   without a library: for tests of single kernels. */
struct cuda_queue {
    cudaStream_t stream;
    int          device;
    bool         own; /* the stream was made here */
    int         *bad; /* pinned: not 0 if a kernel met an index outside of its table, see section 9 */
    struct blas *blas; /* NULL before the first product; see section 15 */
};

static void blas_close(struct blas *blas);

static cudaStream_t stream_of(void *queue) { return queue ? ((cuda_queue *)queue)->stream : NULL; }

// ==== 2. Device memory ==============================================================================================

/* All calls of the CUDA runtime but launches and cudaGetLastError. */

static void *cuda_alloc(void *user, size_t bytes) {
    void *p = NULL;
    (void)user;
    if (cudaMalloc(&p, bytes) == cudaSuccess) return p;
    (void)cudaGetLastError(); /* the refusal is answered here; it must not show at the next launch */
    return NULL;
}

static void cuda_free(void *user, void *p, size_t bytes) {
    (void)user;
    (void)bytes;
    cudaFree(p);
}

/* Pageable host memory may be read or written again as soon as this returns; pinned memory after cuda_sync. */
static dt_status cuda_move(void *dst, const void *src, size_t bytes, void *stream) {
    if (bytes == 0) return DT_OK;
    cudaError_t error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_of(stream));
    return error == cudaSuccess ? DT_OK : DT_ERR_DEVICE;
}

/* Kernels look at their indices themselves, and what they found is told here: see section 9. */
static dt_status cuda_sync(void *stream) {
    cuda_queue *queue = (cuda_queue *)stream;
    if (cudaStreamSynchronize(stream_of(stream)) != cudaSuccess) return DT_ERR_DEVICE;
    if (!queue || *queue->bad == 0) return DT_OK;
    *queue->bad = 0;
    return DT_ERR_ARG;
}

/* Pinned memory: the device reads and writes it by itself, while the processor goes on. */
static void *cuda_pin(size_t bytes) {
    void *p = NULL;
    if (cudaMallocHost(&p, bytes) == cudaSuccess) return p;
    (void)cudaGetLastError();
    return NULL;
}

static void cuda_unpin(void *p, size_t bytes) {
    (void)bytes;
    cudaFreeHost(p);
}

/* Device memory, managed memory, and what is pinned. */
static int cuda_reaches(const void *p) {
    cudaPointerAttributes of;
    if (cudaPointerGetAttributes(&of, p) == cudaSuccess) return of.type != cudaMemoryTypeUnregistered;
    (void)cudaGetLastError();
    return 0;
}

/* What has been enabled once is enabled for all threads of the process. */
static dt_status cuda_share(void *stream, int places, char *text, size_t text_bytes) {
    int         devices = 0, here = ((cuda_queue *)stream)->device;
    cudaError_t error = cudaGetDeviceCount(&devices);
    for (int there = 0; there < devices && there < places && error == cudaSuccess; there++) {
        int can = 0;
        if (there != here) error = cudaDeviceCanAccessPeer(&can, here, there);
        if (can) error = cudaDeviceEnablePeerAccess(there, 0);
        else if (there != here && error == cudaSuccess) error = cudaErrorPeerAccessUnsupported;
        if (error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;
        (void)cudaGetLastError();
        if (error != cudaSuccess && text_bytes > 0)
            snprintf(text, text_bytes, "device %d to the memory of device %d: %s", here, there,
                     cudaGetErrorName(error));
    }
    return error == cudaSuccess ? DT_OK : DT_ERR_DEVICE;
}

static void *cuda_mark(void *stream, void *mark) {
    cudaEvent_t event = (cudaEvent_t)mark;
    if (!event && cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) return NULL;
    return cudaEventRecord(event, stream_of(stream)) == cudaSuccess ? event : NULL;
}

static int cuda_passed(void *mark) {
    cudaError_t error = cudaEventQuery((cudaEvent_t)mark);
    if (error == cudaErrorNotReady) (void)cudaGetLastError(); /* it must not show at the next launch */
    return error == cudaSuccess ? 1 : error == cudaErrorNotReady ? 0 : -1;
}

static dt_status cuda_after(void *stream, void *mark) {
    cudaError_t error = cudaStreamWaitEvent(stream_of(stream), (cudaEvent_t)mark, 0);
    return error == cudaSuccess ? DT_OK : DT_ERR_DEVICE;
}

static void cuda_unmark(void *mark) {
    if (mark) cudaEventDestroy((cudaEvent_t)mark);
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
    if (!queue->bad) error = cudaErrorMemoryAllocation;
    else *queue->bad = 0;
    if (queue->own && desc.urgent && error == cudaSuccess) error = cudaDeviceGetStreamPriorityRange(&least, &most);
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
    cudaStreamSynchronize(queue->stream);
    if (queue->own) cudaStreamDestroy(queue->stream);
    blas_close(queue->blas);
    cuda_unpin(queue->bad, sizeof *queue->bad);
    free(queue);
}

extern "C" void *dt_cuda_stream(void *queue) { return stream_of(queue); }
extern "C" int dt_cuda_device(void *queue) { return ((cuda_queue *)queue)->device; }

static void *cuda_open(int place, char *text, size_t text_bytes) {
    int         devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices == 0) error = cudaErrorNoDevice;
    if (error != cudaSuccess) return refused(text, text_bytes, "cudaGetDeviceCount", error);
    dt_cuda_desc desc = { place % devices, NULL, 0 };
    return dt_cuda_open(desc, text, text_bytes);
}

// ==== 3. Numbers in storage, blocks, packs ==========================================================================

/* 16-bit numbers are storage: a kernel widens them to float, computes, and rounds once. CUDA's own types for them would
   need its headers where a test has none. The other types are what they are. */
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

/* f<T>(...) for the T of a dtype that is computed with in f32. */
#define BY_TYPE(dtype, f, ...) \
    ((dtype) == DT_F32 ? f<float>(__VA_ARGS__) : (dtype) == DT_BF16 ? f<bf16>(__VA_ARGS__) \
                                               : (dtype) == DT_F16  ? f<f16>(__VA_ARGS__) : DT_ERR_UNSUPPORTED)

/* The table's function for kernel k from k<T>. */
#define TYPED(k) \
    static dt_status cuda_##k(const dt_##k##_args *a, void *stream) { return BY_TYPE(a->dtype, k, a, stream); }

static __device__ float  widen(float x) { return x; }
static __device__ double widen(double x) { return x; }
static __device__ int    widen(int x) { return x; }
static __device__ float  widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

static __device__ void round_to(float *out, float x) { *out = x; }
static __device__ void round_to(double *out, double x) { *out = x; }
static __device__ void round_to(int *out, int x) { *out = x; }

/* To nearest, ties to even; rounding could carry a NaN into the sign, so a NaN is only made quiet. Since sm_80 one
   instruction does it. */
static __device__ void round_to(bf16 *out, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#else
    unsigned bits = __float_as_uint(x), rounded = bits + 0x7fffu + (bits >> 16 & 1);
    out->bits = (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) >> 16);
#endif
}

/* f16 is CUDA's own business, in one instruction each. What a test has in its place: f16 has 5 bits of exponent, and a
   product with 2^112 moves them to float's bias and makes denormals normal; below 2^-14 the spacing of f16 is that of
   floats in [0.5, 1), so that adding 0.5 rounds; 65,520 and more are infinity. */
#ifdef __CUDACC__
static __device__ float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

static __device__ void round_to(f16 *out, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(x)); }
#else
static float widen(f16 x) {
    unsigned magnitude = (unsigned)(x.bits & 0x7fff) << 13;
    unsigned bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u
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
template <class T>
static __device__ T warp_sum(T v) {
    for (int other = 16; other > 0; other /= 2) v += __shfl_xor_sync(0xffffffffu, v, other);
    return v;
}

/* The sum over a block, or over every THREADS threads of it, for each of its threads: within warps, then warp after
   warp. */
template <class T, int THREADS = BLOCK>
static __device__ T block_sum(T v) {
    __shared__ T of_warp[32];
    v = warp_sum(v);
    __syncthreads(); /* everyone has read the sum of the call before */
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    const T *mine = of_warp + threadIdx.x / THREADS * (THREADS / 32);
    T        total = mine[0];
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

template <int THREADS = BLOCK>
static __device__ float block_max(float v) {
    __shared__ float of_warp[THREADS / 32];
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    float most = of_warp[0];
    for (int w = 1; w < THREADS / 32; w++) most = of_warp[w] > most ? of_warp[w] : most;
    return most;
}

/* Neighbours in an array, 16 bytes of them unless COUNT says otherwise: what a thread works on at a time, in one access
   if it lies at a multiple of its size. */
template <class T, int COUNT = 16 / sizeof(T)>
struct alignas(COUNT * sizeof(T) < 16 ? COUNT * sizeof(T) : 16) pack {
    enum { N = COUNT };
    T v[N];
};

template <int N, class T>
static __device__ pack<T, N> take(const T *p) { return *reinterpret_cast<const pack<T, N> *>(p); }
template <class T, int N>
static __device__ void put(T *p, pack<T, N> x) { *reinterpret_cast<pack<T, N> *>(p) = x; }

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
template <int N, class T>
static __device__ pack<float, N> widened(pack<T, N> x) {
    pack<float, N> y;
    for (int k = 0; k < N; k++) y.v[k] = widen(x.v[k]);
    return y;
}

/* N finished results, each rounded once. */
template <int N, class T>
static __device__ void round_to(pack<T, N> *out, pack<float, N> x) {
    for (int k = 0; k < N; k++) round_to(&out->v[k], x.v[k]);
}

/* The same where two numbers are a word, the first its low half: an instruction for each, or for both. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <int N>
static __device__ pack<float, N> widened(pack<bf16, N> x) {
    pack<float, N> y;
    unsigned       words[(N + 1) / 2] = { 0 };
    memcpy(words, &x, sizeof x);
    for (int k = 0; k < N; k++) y.v[k] = __uint_as_float(k % 2 ? words[k / 2] & 0xffff0000u : words[k / 2] << 16);
    return y;
}

#define ROUND_PAIRS(T, type) \
    template <int N> \
    static __device__ void round_to(pack<T, N> *out, pack<float, N> x) { \
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
template <class T>
static __device__ unsigned pair_of(float x, float y) {
    pack<float, 2> two = { { x, y } };
    pack<T, 2>     rounded;
    unsigned       word;
    round_to(&rounded, two);
    memcpy(&word, &rounded, sizeof word);
    return word;
}

template <int N, class T>
static __device__ pack<float, N> get(const T *p) { return widened(take<N>(p)); }

/* A pack that is used later: words, because numbers of 16 bits would be taken apart, and waited for, when they come. */
template <class T, int N, bool WORDS = N * sizeof(T) % 4 == 0>
struct held {
    pack<unsigned, N * sizeof(T) / 4> x;
};
template <class T, int N>
struct held<T, N, false> {
    pack<T, N> x;
};

template <int N, class T>
static __device__ pack<float, N> widened(const held<T, N> &later) {
    pack<T, N> x;
    memcpy(&x, &later.x, sizeof x);
    return widened(x);
}

/* sum += the packs at at(0), at(1), ..., at(n - 1), in this order; COUNT of them are on their way at a time. */
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
template <class T, int N>
static __device__ void give(T *p, pack<float, N> x, int accumulate = 0) {
    pack<T, N> rounded;
    if (accumulate) {
        pack<float, N> old = get<N>(p);
        for (int k = 0; k < N; k++) x.v[k] += old.v[k];
    }
    round_to(&rounded, x);
    put(p, rounded);
}

/* The same of one number. */
template <class T>
static __device__ void give_one(T *to, float value, int accumulate = 0) {
    round_to(to, accumulate ? widen(*to) + value : value);
}

/* The same where only the host knows the type: sums, which are few. */
static __device__ void give_typed(dt_dtype dtype, void *out, size_t i, float value, int accumulate) {
    if (dtype == DT_F32) give_one((float *)out + i, value, accumulate);
    else if (dtype == DT_BF16) give_one((bf16 *)out + i, value, accumulate);
    else give_one((f16 *)out + i, value, accumulate);
}

/* The type of an output that is f32 where `wide` says so. */
static dt_dtype widened_type(dt_dtype dtype, int wide) { return wide ? DT_F32 : dtype; }

static __host__ __device__ bool aligned16(const void *a, const void *b = NULL, const void *c = NULL,
    const void *d = NULL) {
    return (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
}

/* The walk of this thread over a flat array, `each` elements at a time. */
static __device__ size_t flat_first(int each) { return ((size_t)blockIdx.x * BLOCK + threadIdx.x) * each; }
static __device__ size_t flat_step(int each) { return (size_t)gridDim.x * BLOCK * each; }

/* A walk calls f(.., by) for so many numbers at a time: packs where they are whole and aligned, else single ones. f is
   compiled for both. The blocks that share it are the grid's, or some of them. */
template <int COUNT>
struct by { enum { N = COUNT }; };

template <int N, class F>
static __device__ void each_of_blocks(unsigned block, unsigned blocks, size_t count, bool aligned, F f) {
    size_t first = (size_t)block * BLOCK + threadIdx.x, step = (size_t)blocks * BLOCK;
    size_t whole = aligned ? count / N * N : 0;
    for (size_t i = first * N; i < whole; i += step * N) f(i, by<N>());
    for (size_t i = whole + first; i < count; i += step) f(i, by<1>());
}

template <int N, class F>
static __device__ void each_flat(size_t count, bool aligned, F f) {
    each_of_blocks<N>(blockIdx.x, gridDim.x, count, aligned, f);
}

/* The same over rows of cols numbers: f(row, column, by). */
template <int N, class F>
static __device__ void each_in_rows(size_t rows, size_t cols, bool aligned, F f) {
    size_t each = aligned && cols % N == 0 ? N : 1, packs = cols / each;
    if (packs == 0) return;
    size_t row = flat_first(1) / packs, at = flat_first(1) % packs; /* divided once, not for each step */
    size_t rows_on = flat_step(1) / packs, on = flat_step(1) % packs;
    while (row < rows) {
        if (each == N) f(row, at * each, by<N>());
        else f(row, at * each, by<1>());
        at += on;
        row += rows_on + (at >= packs);
        at -= at >= packs ? packs : 0;
    }
}

static __host__ __device__ size_t packs_in(size_t cols, int each) { return (cols + each - 1) / each; }

// ==== 15. Matrix product ============================================================================================

/* ---- what tensor cores are fed with ---- */

/* Each wrapper is one PTX instruction, or what a test puts in its place. mma: d (16,8) += a (16,16) b (16,8); lane
   4 g + t holds rows g and g + 8 of d, columns 2 t and 2 t + 1. bf16 products and cp.async need sm_80: older code adds
   and copies plainly, to the same end. */
#ifdef __CUDACC__
#define PTX static __device__ __forceinline__
#define HAS_SM80 (__CUDA_ARCH__ >= 800)

PTX unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

PTX void ldmatrix(unsigned *r, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

PTX void ldmatrix_trans(unsigned *r, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

PTX float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if HAS_SM80
#define MMA(type) \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                 "{%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
PTX void mma(bf16, float *d, const unsigned *a, const unsigned *b) { MMA("bf16"); }
PTX void mma(f16, float *d, const unsigned *a, const unsigned *b) { MMA("f16"); }
#undef MMA

/* 16 bytes from global memory, or zeros. */
PTX void copy16(void *shared, const void *global, bool there) {
    asm volatile("{ .reg .pred none; setp.eq.b32 none, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, none; }"
                 : : "r"(shared_address(shared)), "l"(global), "r"((int)there) : "memory");
}
PTX void copies_sent() { asm volatile("cp.async.commit_group;" : : : "memory"); }
PTX void copies_here() { asm volatile("cp.async.wait_all;" : : : "memory"); }
#endif

/* wgmma: four warps, a group, multiply 64 rows at a time, with B (and A) read from shared memory; see `matrix`. Only
   code for sm_90a has it: elsewhere the kernels that use it are empty, and cannot be launched with as many threads as
   they want. d (64,N) = a b, plus d if `add`: of warp w rows 16 w .. 16 w + 15, in the places of mma. What has been
   started is done after group_done. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_GROUPS 1
#define D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define D32 D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7)
#define D64 D32, D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15)
#define P32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define P64 P32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OTHER ", 0x40000040}; "
#define WGMMA(type, n, add, matrices, places, rest) \
    "{ .reg .pred add; .reg .b64 a, b; setp.ne.b32 add, " add ", 0; " matrices \
    "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type \
    " {" places "}, " rest "; }"
#define WGMMAS(T, type) \
    PTX void wgmma(T, float (&d)[8][4], unsigned a, unsigned b, int add) { \
        asm volatile(WGMMA(type, "64", "%34", "mov.b64 a, {%32" OTHER "mov.b64 b, {%33" OTHER, P32, \
                           "a, b, add, 1, 1, 0, 0") \
                     : D32 : "r"(a), "r"(b), "r"(add)); \
    } \
    PTX void wgmma(T, float (&d)[16][4], unsigned a, unsigned b, int add) { \
        asm volatile(WGMMA(type, "128", "%66", "mov.b64 a, {%64" OTHER "mov.b64 b, {%65" OTHER, P64, \
                           "a, b, add, 1, 1, 0, 0") \
                     : D64 : "r"(a), "r"(b), "r"(add)); \
    } \
    PTX void wgmma_across(T, float (&d)[8][4], const unsigned *a, unsigned b, int add) { \
        asm volatile(WGMMA(type, "64", "%37", "mov.b64 b, {%36" OTHER, P32, "{%32, %33, %34, %35}, b, add, 1, 1, 1") \
                     : D32 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add)); \
    } \
    PTX void wgmma_across(T, float (&d)[16][4], const unsigned *a, unsigned b, int add) { \
        asm volatile(WGMMA(type, "128", "%69", "mov.b64 b, {%68" OTHER, P64, "{%64, %65, %66, %67}, b, add, 1, 1, 1") \
                     : D64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add)); \
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

/* A matrix in shared memory: rows of 64 numbers, k along them or (wgmma_across) a row for each k; `slab` numbers on are
   the next 64 columns. This is the part of its descriptor that differs; the other says that 8 rows of 128 bytes lie
   together, their 16 bytes exchanged. `further` numbers on in the same slab. */
typedef unsigned matrix;
PTX matrix matrix_at(const void *p, int slab) { return shared_address(p) >> 4 | (unsigned)(slab * 2 >> 4) << 16; }
PTX matrix further(matrix m, int numbers) { return m + (unsigned)(numbers * 2 >> 4); }
PTX void group_begin() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
PTX void group_sent() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int LEFT>
PTX void group_done() { asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(LEFT) : "memory"); }
PTX void copies_seen() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
PTX void hold(float &x) { asm volatile("" : "+f"(x) : : "memory"); }
/* What follows is not taken before x, which is never negative, is known. */
PTX void after(float x) {
    if (x < 0) asm volatile("nanosleep.u32 1;" : : : "memory");
}
#else
#define HAS_GROUPS 0
typedef unsigned matrix;
template <class T, class sums>
PTX void wgmma(T, sums &, matrix, matrix, int) {}
template <class T, class sums>
PTX void wgmma_across(T, sums &, const unsigned *, matrix, int) {}
PTX matrix matrix_at(const void *, int) { return 0; }
PTX matrix further(matrix, int) { return 0; }
PTX void group_begin() {}
PTX void group_sent() {}
template <int LEFT>
PTX void group_done() {}
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
static void mma(bf16, float *d, const unsigned *a, const unsigned *b) { dtc_mma_m16n8k16_bf16(d, a, b); }
static void mma(f16, float *d, const unsigned *a, const unsigned *b) { dtc_mma_m16n8k16_f16(d, a, b); }
static void copy16(void *shared, const void *global, bool there) {
    alignas(16) static const char none[16] = { 0 };
    dtc_cp_async16(shared, there ? global : none, there ? 16 : 0);
}
static void copies_sent() { dtc_cp_async_commit(); }

/* Warp by warp by mma, from what the matrices are said to be. As late as can be: in group_done; until then sums are
   NaN. A forgotten fence is a mistake that ends the kernel. */
struct matrix { const char *p; int slab; };
static matrix matrix_at(const void *p, int slab) { return { (const char *)p, slab }; }
static matrix further(matrix m, int numbers) { return { m.p + 2 * numbers, m.slab }; }

static unsigned number_in(const matrix &m, int row, int col) {
    size_t at = (size_t)m.p + (size_t)(row / 8) * 1024 + row % 8 * 128 + col / 64 * (size_t)m.slab * 2 + col % 64 * 2;
    return *(const uint16_t *)(at ^ (at >> 3 & 0x70));
}

struct wgmma_begun {
    void        (*run)(const wgmma_begun &);
    float       (*d)[4], before[16][4]; /* before: what d held, of the first that changes it */
    matrix        a, b;
    unsigned      u[4];
    int           n, add, group;
    bool          first;
};
static struct { wgmma_begun at[32]; int count, groups; bool begun, unseen; } under_way[2 * BLOCK];

static wgmma_begun &begin_product(float (*d)[4], int n, int add, matrix b) {
    auto        &mine = under_way[threadIdx.x];
    wgmma_begun &p = mine.at[mine.count];
    if (!mine.begun || mine.unseen || mine.count == 32) dtc_abandon("wgmma without group_begin or copies_seen");
    p.d = d, p.n = n, p.add = add, p.b = b, p.group = mine.groups, p.first = true;
    for (int i = 0; i < mine.count; i++) p.first = p.first && mine.at[i].d != d;
    if (p.first) memcpy(p.before, d, (size_t)n * sizeof *d), memset((void *)d, 0xff, (size_t)n * sizeof *d);
    mine.count++;
    return p;
}

template <class T, bool ACROSS>
static void run_product(const wgmma_begun &p) {
    int      g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2, row = threadIdx.x / 32 % 4 * 16 + g;
    unsigned u[4], v[2];
    memcpy(u, p.u, sizeof u);
    if (p.first) memcpy(p.d, p.before, (size_t)p.n * sizeof *p.d);
    if (!p.add) memset((void *)p.d, 0, (size_t)p.n * sizeof *p.d);
    for (int i = 0; i < 4 && !ACROSS; i++)
        u[i] = number_in(p.a, row + i % 2 * 8, t + i / 2 * 8) |
               number_in(p.a, row + i % 2 * 8, t + i / 2 * 8 + 1) << 16;
    for (int j = 0; j < p.n; j++) {
        for (int i = 0; i < 2; i++)
            v[i] = ACROSS ? number_in(p.b, t + 8 * i, 8 * j + g) | number_in(p.b, t + 8 * i + 1, 8 * j + g) << 16
                          : number_in(p.b, 8 * j + g, t + 8 * i) | number_in(p.b, 8 * j + g, t + 8 * i + 1) << 16;
        mma(T(), p.d[j], u, v);
    }
}

template <class T, int J>
static void wgmma(T, float (&d)[J][4], const matrix &a, const matrix &b, int add) {
    wgmma_begun &p = begin_product(d, J, add, b);
    p.run = run_product<T, false>;
    p.a = a;
}
template <class T, int J>
static void wgmma_across(T, float (&d)[J][4], const unsigned *a, const matrix &b, int add) {
    wgmma_begun &p = begin_product(d, J, add, b);
    p.run = run_product<T, true>;
    memcpy(p.u, a, sizeof p.u);
}
static void group_begin() { under_way[threadIdx.x].begun = true; }
static void group_sent() { under_way[threadIdx.x].begun = false, under_way[threadIdx.x].groups++; }
template <int LEFT>
static void group_done() {
    auto &mine = under_way[threadIdx.x];
    int   done = 0;
    for (; done < mine.count && mine.at[done].group < mine.groups - LEFT; done++) mine.at[done].run(mine.at[done]);
    mine.count -= done;
    memmove((void *)mine.at, mine.at + done, (size_t)mine.count * sizeof *mine.at);
}
static void copies_here() {
    dtc_cp_async_commit(), dtc_cp_async_wait(0);
    under_way[threadIdx.x].unseen = true;
}
static void copies_seen() { under_way[threadIdx.x].unseen = false; }
static void hold(float &) {}
static void after(float) {}
#endif

template <class T>
static __device__ float half_of(unsigned pair, int which) {
    T x;
    x.bits = (uint16_t)(which ? pair >> 16 : pair & 0xffff);
    return widen(x);
}

/* mma without tensor cores: pair after pair along k, each from the lane that holds it. */
template <class T>
static __device__ void mma_plain(T, float *d, const unsigned *a, const unsigned *b) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 8; i++) {
        int      holder = i % 4, late = i / 4;
        unsigned row[2], col[2];
        row[0] = __shfl_sync(0xffffffffu, a[2 * late], 4 * g + holder);
        row[1] = __shfl_sync(0xffffffffu, a[2 * late + 1], 4 * g + holder);
        col[0] = __shfl_sync(0xffffffffu, b[late], 8 * t + holder);
        col[1] = __shfl_sync(0xffffffffu, b[late], 8 * t + 4 + holder);
        for (int e = 0; e < 8; e++) d[e / 2] += half_of<T>(row[e / 4], e % 2) * half_of<T>(col[e / 2 % 2], e % 2);
    }
}

#if !HAS_SM80
template <class T>
static __device__ void mma(T, float *d, const unsigned *a, const unsigned *b) { mma_plain(T(), d, a, b); }

static __device__ void copy16(void *shared, const void *global, bool there) {
    uint4 x = { 0, 0, 0, 0 };
    if (there) x = *(const uint4 *)global;
    *(uint4 *)shared = x;
}
static __device__ void copies_sent() {}
static __device__ void copies_here() {}
#endif
#undef HAS_SM80

/* ---- tiles in shared memory ---- */

/* A tile has rows of LD numbers, at least 128 bytes. The 16 bytes of a column lie in another bank group for each of 8
   rows, so that 8 rows are read at once. */
template <class T, int LD>
static __device__ int place(int row, int col) {
    const int N = pack<T>::N;
    return row * LD + (col / N ^ (row & 7)) * N + col % N;
}

/* x, which the compiler does not see to be x: what is made from it is made where it is used, and is not held in
   registers over a loop. */
static __device__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* A tile from memory at p, whose rows are ld apart; beyond `rows` and `cols` it is zero. Asynchronous where `wide`:
   where p, ld and cols are multiples of 16 bytes. */
template <class T, int ROWS, int LD, int THREADS, class index>
static __device__ void fetch_tile(T *tile, const T *p, index ld, int rows, int cols, bool wide) {
    const int N = pack<T>::N, PACKS = LD / N, DOWN = THREADS / PACKS;
    int       thread = anew(threadIdx.x), row = thread / PACKS, col = thread % PACKS * N;
    index     at = row * ld + col;
    if (wide) {
        UNROLL for (int i = 0; i < ROWS; i += DOWN, at += DOWN * ld)
            if (ROWS % DOWN == 0 || row + i < ROWS)
                copy16(tile + place<T, LD>(row + i, col), p + at, row + i < rows && col < cols);
        return;
    }
    UNROLL_BY(1) for (; row < ROWS; row += DOWN, at += DOWN * ld) {
        pack<T> x = { { T() } };
        UNROLL for (int e = 0; e < N; e++)
            if (row < rows && col + e < cols) x.v[e] = p[at + e];
        *reinterpret_cast<pack<T> *>(tile + place<T, LD>(row, col)) = x;
    }
}

/* Fragments of mma from tiles. ldmatrix takes four 8 x 8 matrices, and of each lane the place of one row: of 16 rows,
   and then of the same rows 8 columns on, for A from a tile with rows of k, and for two fragments of B from one with a
   row for each k; the other way round for two fragments of B from rows of k, and for A from a row for each k. That
   place, in row 0 and column 0. With LD a power of two `place` is an exclusive or, so that (x ^ column) is that of
   another column, and x + row LD, row a multiple of 8, that of another row. */
template <int LD>
static __device__ int rows_first() {
    int lane = anew(threadIdx.x) % 32;
    return lane % 16 * LD + (lane / 16 ^ lane % 8) * 8;
}

template <int LD>
static __device__ int columns_first() {
    int lane = anew(threadIdx.x) % 32;
    return (lane % 8 + lane / 16 * 8) * LD + (lane / 8 % 2 ^ lane % 8) * 8;
}

static void blas_close(struct blas *) {}
/* A launch with more shared memory than the 48 KB that need no permission; permission is the device's, and cheap. */
#define LAUNCH_SHARED(kernel, blocks, threads, bytes, stream, ...) \
    do { \
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)) != cudaSuccess) { \
            (void)cudaGetLastError(); \
            return DT_ERR_UNSUPPORTED; /* the device has less */ \
        } \
        DT_LAUNCH((kernel), blocks, threads, bytes, stream_of(stream), __VA_ARGS__); \
    } while (0)

// ==== 16. Attention =================================================================================================

/* FlashAttention-2, arXiv:2307.08691. A block has ROWS queries (in keys_back: keys) and walks over the other side, COLS
   at a time, of which a warp takes PART at a time; 16 M of the rows are a warp's. Scores stay in registers, as mma
   leaves them: c[i][j][e] of lane 4 g + t is row 16 i + 8 (e / 2) + g, column 8 j + 2 t + e % 2. A lane has 2 M rows:
   row r is in c[r / 2], with r % 2 for e / 2. f32 is computed in the same places by plain multiply-adds. D is the
   dimension of a head, padded.

   A Hopper's fast tensor cores are fed by wgmma (arXiv:2407.08608 says how): a group of four warps has 64 rows, reads
   its operands from shared memory, and goes on while they are multiplied. Scores lie in the same places, so all but the
   products is shared. Its tiles are slabs of 64 columns: rows of 128 bytes, as `place` lays them. */

/* ---- who sees whom ---- */

/* The least and the greatest of some queries or keys. */
struct span { int first, last, document_first, document_last; };

/* Queries or keys: `length` of each sequence, in tiles of `each`. Without an array positions are index + shift, and all
   documents one. With an array there are spans of tiles, (batch,tiles), made before. */
struct side {
    const int32_t *position, *document;
    span          *spans;
    int            length, each, tiles, shift;
};

/* What kernels know beside the pointers: in 32 bits, because registers are scarce. power: scale in powers of two. A
   grid is (tiles, heads, sequences), from first_kv, first_sequence on. */
struct task {
    side  q, k;
    int   causal, heads, kv_heads, group, dim, q_row, k_row, first_sequence, first_kv; /* *_row: of all heads */
    float scale, power;
    bool  wide, fours; /* inputs can be read 16 bytes at a time, results written four numbers at a time */
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
    int     sequence = (int)(tile / s.tiles), first = (int)(tile % s.tiles) * s.each;
    span    x = { INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN };
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
        x.document_first = min(x.document_first, __shfl_xor_sync(0xffffffffu, x.document_first, other));
        x.document_last = max(x.document_last, __shfl_xor_sync(0xffffffffu, x.document_last, other));
    }
    if (threadIdx.x % 32 == 0) s.spans[tile] = x;
}

static __device__ bool none_seen(const task &s, span q, span k) {
    return (s.causal && k.first > q.last) || k.document_first > q.document_last || k.document_last < q.document_first;
}

/* With first <= last on both sides, the documents below are one. */
static __device__ bool all_seen(const task &s, span q, span k) {
    return (!s.causal || k.last <= q.first) && q.document_first == k.document_last &&
           q.document_last == k.document_first;
}

/* Without arrays queries see all keys up to their own place: tiles from `end` on are seen by none of `rows`. */
static __device__ int end_of_keys(const task &s, int row0, int rows) {
    if (s.k.spans || !s.causal) return s.k.tiles;
    int seen = max(min(row0 + rows, s.q.length) + s.q.shift, 0);
    return min((seen + s.k.each - 1) / s.k.each, s.k.tiles);
}

/* The first tile of keys from i on that a span of queries sees some of; `end` and more: none. */
static __device__ int next_keys(const task &s, int sequence, int row0, int rows, int end, int i) {
    if (!s.k.spans) return i;
    span q = span_of(s.q, sequence, row0, rows);
    while (i < end && none_seen(s, q, span_of(s.k, sequence, i * s.k.each, s.k.each))) i++;
    return i;
}

/* The same of queries, which come once for each head of a group: none before tile `first` sees the keys. */
struct visit { int head, tile; };

static __device__ int first_of_queries(const task &s, int row0) {
    return s.q.spans || !s.causal ? 0 : min(max(row0 - s.q.shift, 0) / s.q.each, s.q.tiles);
}

static __device__ visit next_queries(const task &s, int sequence, int row0, int rows, int first, visit i) {
    span k = span_of(s.k, sequence, row0, rows);
    if (first >= s.q.tiles) i.head = s.group;
    for (; i.head < s.group; i.head++, i.tile = 0)
        for (i.tile = max(i.tile, first); i.tile < s.q.tiles; i.tile++)
            if (!s.q.spans || !none_seen(s, span_of(s.q, sequence, i.tile * s.q.each, s.q.each), k)) return i;
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

/* Minus infinity for what is not seen. With arrays; rows, cols: what `look` says of the warp's rows and the columns. */
template <int M, int J>
static __device__ void hide(float (&c)[M][J][4], bool rows_are_keys, const int2 *rows, const int2 *cols) {
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

/* Columns before `first` and from `end` on, both of the warp's first row and `later` more for each row after it. */
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
static __device__ void hide_keys(float (&c)[M][J][4], const task &s, int row0, int col0, bool all, const int2 *rows,
    const int2 *cols) {
    if (!all && s.k.spans) hide(c, false, rows, cols);
    else if (!all) hide_outside(c, INT32_MIN / 2, row0 + s.q.shift + 1 - col0, 1);
    if (col0 + 8 * J > s.k.length) hide_outside(c, 0, s.k.length - col0, 0);
}

/* The other way round, of queries from col0 on; p of those that are not there is zero by their lse. */
template <int M, int J>
static __device__ void hide_queries(float (&c)[M][J][4], const task &s, int row0, int col0, bool all, const int2 *rows,
    const int2 *cols) {
    if (!all && s.k.spans) hide(c, true, rows, cols);
    else if (!all) hide_outside(c, row0 - s.q.shift - col0, INT32_MAX / 2, 1);
}

/* ---- products of a warp ---- */

/* c = rows of x, from `row` on, times rows of y. The sums go over all of D, beyond `dim` of which tiles are zero. */
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
static __device__ void scores(float (&c)[M][J][4], const float *x, int row, const float *y, int dim) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    memset(c, 0, sizeof c);
    UNROLL_BY(2) for (int k = 0; k < dim; k += 4) {
        pack<float> u[2 * M];
        UNROLL for (int r = 0; r < 2 * M; r++) u[r] = *(const pack<float> *)(x + place<float, D>(row + 8 * r + g, k));
        UNROLL for (int at = 0; at < 2 * J; at++) {
            pack<float> v = *(const pack<float> *)(y + place<float, D>(at / 2 * 8 + 2 * t + at % 2, k));
            UNROLL for (int i = 0; i < 8 * M; i++)
                c[i / 8][at / 2][i / 4 % 2 * 2 + at % 2] += u[i / 4].v[i % 4] * v.v[i % 4];
        }
    }
}

/* c += p times the tile y, which has a row for each column of p. On tensor cores p is rounded to y's type. */
template <int D, int M, int N, int J, class T>
static __device__ void mix(float (&c)[M][N][4], const float (&p)[M][J][4], const T *y, int dim) {
    int at_y = rows_first<D>();
    (void)dim;
    UNROLL for (int j = 0; j < J; j += 2) {
        unsigned u[M][4];
        UNROLL for (int e = 0; e < 4 * M; e++)
            u[e / 4][e % 4] = pair_of<T>(p[e / 4][j + e / 2 % 2][e % 2 * 2], p[e / 4][j + e / 2 % 2][e % 2 * 2 + 1]);
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
static __device__ void mix(float (&c)[M][N][4], const float (&p)[M][J][4], const float *y, int dim) {
    int first = threadIdx.x % 32 / 4 * 4, t = threadIdx.x % 4;
    UNROLL for (int at = 0; at < 8 * J; at++) {
        float u[2 * M]; /* of the lane of this row that has column `at` */
        UNROLL for (int r = 0; r < 2 * M; r++)
            u[r] = __shfl_sync(0xffffffffu, p[r / 2][at / 8][r % 2 * 2 + at % 2], first + at % 8 / 2);
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

/* What fits into the registers, 64 K for the THREADS of AT_ONCE blocks, and into the 99 KB of shared memory that every
   GPU since sm_80 gives a block. WHAT: 0 the forward, 1 the backward of queries, 2 that of keys. TOGETHER: rows that do
   the same; SLAB: columns of a tile that lie together. */
template <class T, int D, int WHAT, bool GROUPS>
struct form {
    static constexpr bool NARROW = sizeof(T) == 2, GROUP = false;
    static constexpr int M = NARROW && (D == 64 || (D == 128 && WHAT < 2)) ? 2 : 1;
    static constexpr int COLS = NARROW ? (D == 64 || (D == 128 && WHAT != 1) ? 64 : 32)
                                       : (D == 256 || (D == 128 && WHAT) ? 16 : 32);
    static constexpr int PART = !NARROW ? COLS : D == 256 && WHAT ? 16 : 32;
    static constexpr int OF_WARPS = NARROW || D == 64 || (D == 128 && !WHAT) ? 4 : 2;
    static constexpr int STAGES = (NARROW && D == 256 && WHAT) || (!NARROW && (D > 64 || WHAT)) ? 1 : 2;
    static constexpr int AT_ONCE = NARROW && D == 64 && !WHAT ? 3 : 2;
    static constexpr int ROWS = 16 * M * OF_WARPS, THREADS = 32 * OF_WARPS, TOGETHER = 16 * M, SLAB = D;
};

/* With wgmma, where a block has 227 KB: measured on an H100. */
template <class T, int D, int WHAT>
struct form<T, D, WHAT, true> {
    static constexpr bool NARROW = true, GROUP = true;
    static constexpr int M = 1, OF_GROUPS = D == 64 || WHAT ? 1 : 2, STAGES = 2;
    static constexpr int COLS = D == 64 || !WHAT ? 128 : 64, PART = COLS;
    static constexpr int AT_ONCE = WHAT ? 2 : D == 64 ? 3 : 1;
    static constexpr int ROWS = 64 * OF_GROUPS, THREADS = 128 * OF_GROUPS, TOGETHER = 64, SLAB = 64;
};

template <class F>
static constexpr int threads_of() { return F::GROUP && !HAS_GROUPS ? 32 : F::THREADS; }

/* ---- products ---- */

/* c = rows of the tile x, from `row` on, times rows of the tile y, from `col` on. A group has it after `done`. */
template <class F, int D, int X_ROWS, int Y_ROWS, int M, int J, class T>
static __device__ void scores_of(float (&c)[M][J][4], const T *x, int row, const T *y, int col, int dim) {
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
    UNROLL for (int e = 0; e < 2 * J; e++)
        u[e / 4][e % 4] = pair_of<T>(p[0][e / 2][e % 2 * 2], p[0][e / 2][e % 2 * 2 + 1]);
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
static __device__ void mix_of(float (&c)[M][N][4], const float (&p)[M][J][4], const T *y, int row, int dim) {
    if constexpr (F::GROUP) {
        unsigned u[J / 2][4];
        pack_rows<T>(u, p);
        mix_packed<Y_ROWS>(c, u, y + row * 64);
    } else {
        mix<D>(c, p, y + row * D, dim);
    }
}

/* All but the last LEFT products have been made, c among them. */
template <class F, int LEFT, int M, int J>
static __device__ void done(float (&c)[M][J][4]) {
    if constexpr (F::GROUP) {
        group_done<LEFT>();
        UNROLL for (int e = 0; e < M * J * 4; e++) hold(c[e / 4 / J][e / 4 % J][e % 4]);
    }
}

/* ---- tiles ---- */

template <class F, int D, class T, int ROWS>
static __device__ void fetch_rows(T *tile, const void *from, int64_t at, int ld, int rows, const task &s) {
    UNROLL for (int col = 0; col < D; col += F::SLAB)
        fetch_tile<T, ROWS, F::SLAB, F::THREADS>(tile + col * ROWS, (const T *)from + at + col, ld, rows, s.dim - col,
                                                 s.wide);
}

/* A tile of two arrays whose rows lie alike. */
template <class F, int D, int ROWS, class T>
static __device__ void fetch_two(T *x, T *y, const void *from_x, const void *from_y, int64_t at, int ld, int rows,
    const task &s) {
    fetch_rows<F, D, T, ROWS>(x, from_x, at, ld, rows, s);
    fetch_rows<F, D, T, ROWS>(y, from_y, at, ld, rows, s);
    copies_sent();
}

/* What this thread has fetched is there, for a group to read too. */
template <class F>
static __device__ void tiles_here() {
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
    struct alignas(4 * sizeof(T)) four { T v[4]; } x;
    if (at_once && old != 0) x = *(const four *)to;
    for (int e = 0; e < 4 && !at_once; e++)
        if (e < n && old != 0) x.v[e] = to[e];
    for (int e = 0; e < 4; e++)
        if (e < n) round_to(&x.v[e], old != 0 ? v.v[e] + old * widen(x.v[e]) : v.v[e]);
    if (at_once) *(four *)to = x;
    for (int e = 0; e < 4 && !at_once; e++)
        if (e < n) to[e] = x.v[e];
}

/* Where a warp's rows go: from element `at` on, ld apart, the first `rows` of them; multiplied with `factor`. What is
   there already is added if `accumulate`; of row r, keep[r] times. */
struct target {
    void        *out;
    int          wide, accumulate;
    const float *keep; /* or NULL: once */
    int64_t      at;
    int          ld, rows;
    float        factor;
};

/* By way of the warp's rows of a tile of floats, so that what a warp writes at once lies together. */
template <class T, int D, int M, int N>
static __device__ void give_rows(float *tile, const float (&c)[M][N][4], const target &to, const task &s) {
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
        float       old = !to.accumulate ? 0 : to.keep ? to.keep[row] : 1;
        int64_t     at = to.at + (int64_t)row * to.ld + col;
        if (to.wide) give_four((float *)to.out + at, v, have, s.fours, old);
        else give_four((T *)to.out + at, v, have, s.fours, old);
    }
}

/* ---- forward ---- */

#define LOG2_E 1.4426950408889634 /* e^x is 2^(x LOG2_E), which is one instruction */

/* p = e^(scores - max) in place of the scores, and its sums to `sum`. factor: what was summed before is to be
   multiplied with, for it is relative to the maximum before. A row that sees nothing yet has maximum -infinity. Maxima
   and sums are taken in four parts, because each step of one waits for the step before. */
template <int M, int J>
static __device__ void softmax_step(float (&c)[M][J][4], float *most, float *sum, float (&factor)[2 * M], float power) {
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
    UNROLL for (int e = 0; e < M * N * 4; e++) out[e / 4 / N][e / 4 % N][e % 4] *= factor[e / 4 / N * 2 + e % 4 / 2];
}

/* log(e^x + e^y), of which either may be minus infinity */
static __device__ float join_lse(float x, float y) {
    float high = x > y ? x : y, low = x > y ? y : x;
    return high == -INFINITY ? high : high + log1pf(expf(low - high));
}

/* Divides a warp's rows, from `row0` on, by their sums and writes lse. With `merge` both count with what out and lse
   hold over other keys: keep, of the warp's rows in shared memory, is how much of that remains. */
template <int M, int N>
static __device__ void attention_end(const dt_attention_args &a, const task &s, int head, int row0, const float *most,
    const float *sum, float (&out)[M][N][4], float *keep) {
    int g = threadIdx.x % 32 / 4;
    UNROLL for (int r = 0; r < 2 * M; r++) {
        int     row = row0 + 8 * r + g, at = head * s.q.length + row;
        bool    there = row < s.q.length;
        float   total = row_sum(sum[r]), mine = total > 0 ? most[r] * s.scale + logf(total) : -INFINITY;
        float   before = a.merge && there ? ((const float *)a.lse)[at] : -INFINITY, both = join_lse(mine, before);
        float   factor = total > 0 ? expf(mine - both) / total : 0;
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
    __shared__ int2  rows[F::ROWS], cols[F::STAGES][F::COLS];
    __shared__ float keep[F::ROWS];
    T       *ks = qs + F::ROWS * D, *vs = ks + F::STAGES * SIZE;
    float    out[M][D / 8][4] = { { { 0 } } }, c[M][F::PART / 8][4], most[2 * M], sum[2 * M], factor[2 * M];
    int      row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS; /* the last see most, and begin first */
    int      sequence = s.first_sequence + blockIdx.z;
    int      own = threadIdx.x / 32 * 16 * M; /* the warp's first row */
    int      mine = own / F::TOGETHER * F::TOGETHER;
    auto     fetch = [&](int i, int stage) {
        int kv = s.first_kv + anew(blockIdx.y) / s.group;
        fetch_two<F, D, F::COLS>(ks + stage * SIZE, vs + stage * SIZE, a.k, a.v, key_at(s, sequence, i * F::COLS, kv),
                                 s.k_row, s.k.length - i * F::COLS, s);
        if (s.k.spans && threadIdx.x < F::COLS)
            cols[stage][threadIdx.x] = look(s, s.k, sequence, i * F::COLS + threadIdx.x);
    };
    if (s.k.spans && threadIdx.x < F::ROWS) rows[threadIdx.x] = look(s, s.q, sequence, row0 + threadIdx.x);
    UNROLL for (int r = 0; r < 2 * M; r++) {
        most[r] = -INFINITY;
        sum[r] = 0;
    }
    int end = end_of_keys(s, row0, F::ROWS), i = next_keys(s, sequence, row0, F::ROWS, end, 0);
    fetch_rows<F, D, T, F::ROWS>(qs, a.q, query_at(s, sequence, row0, blockIdx.y), s.q_row, s.q.length - row0, s);
    if (i < end) fetch(i, 0);
    for (int stage = 0; i < end; stage = (stage + 1) % F::STAGES) {
        tiles_here<F>();
        __syncthreads(); /* this tile is there, and all have left the other stage */
        int next = next_keys(s, sequence, row0, F::ROWS, end, i + 1);
        if (F::STAGES == 2 && next < end) fetch(next, stage ^ 1);
        UNROLL_BY(1) for (int part = 0; part < F::COLS; part += F::PART) {
            int  col0 = i * F::COLS + part;
            span q = span_of(s.q, sequence, row0 + mine, F::TOGETHER), k = span_of(s.k, sequence, col0, F::PART);
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
        if (F::STAGES == 1 && next < end) fetch(next, 0);
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

/* By groups, which multiply while they do other things: a group first begins the scores of a tile and the output of the
   tile before, and makes the softmax of the one during the other. So values come with the keys of the next tile. */
template <class T, int D>
KERNEL __launch_bounds__((threads_of<form<T, D, 0, true>>()), (form<T, D, 0, true>::AT_ONCE))
    attention_groups_kernel(dt_attention_args a, task s) {
    typedef form<T, D, 0, true> F;
    if constexpr (!HAS_GROUPS) return;
    const int SIZE = F::COLS * D;
    DT_DYN_SMEM(T, qs);
    __shared__ int2  rows[F::ROWS], cols[2][F::COLS];
    __shared__ float keep[F::ROWS];
    T       *ks = qs + F::ROWS * D, *vs = ks + 2 * SIZE;
    float    out[1][D / 8][4] = { { { 0 } } }, c[1][F::COLS / 8][4], most[2], sum[2] = { 0, 0 }, factor[2];
    unsigned u[F::COLS / 16][4];
    int      row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS; /* the last see most, and begin first */
    int      sequence = s.first_sequence + blockIdx.z, kv = s.first_kv + anew(blockIdx.y) / s.group;
    int      own = threadIdx.x / 32 * 16, mine = own / 64 * 64;
    int      end = end_of_keys(s, row0, F::ROWS), i = next_keys(s, sequence, row0, F::ROWS, end, 0), before = -1;
    auto     fetch = [&](int keys, int values, int stage) {
        int k0 = keys * F::COLS, v0 = values * F::COLS;
        if (keys < end) {
            fetch_rows<F, D, T, F::COLS>(ks + stage * SIZE, a.k, key_at(s, sequence, k0, kv), s.k_row,
                                         s.k.length - k0, s);
            if (s.k.spans && threadIdx.x < F::COLS) cols[stage][threadIdx.x] = look(s, s.k, sequence, k0 + threadIdx.x);
        }
        if (values >= 0)
            fetch_rows<F, D, T, F::COLS>(vs + stage * SIZE, a.v, key_at(s, sequence, v0, kv), s.k_row,
                                         s.k.length - v0, s);
        copies_sent();
    };
    if (s.k.spans && threadIdx.x < F::ROWS) rows[threadIdx.x] = look(s, s.q, sequence, row0 + threadIdx.x);
    most[0] = most[1] = -INFINITY;
    fetch_rows<F, D, T, F::ROWS>(qs, a.q, query_at(s, sequence, row0, blockIdx.y), s.q_row, s.q.length - row0, s);
    fetch(i, before, 0);
    bool mixes = false;
    for (int stage = 0; i < end || before >= 0; stage ^= 1) {
        tiles_here<F>();
        __syncthreads(); /* this tile is there, and all have left the other stage */
        int  next = next_keys(s, sequence, row0, F::ROWS, end, i + 1), col0 = i * F::COLS;
        bool sees = i < end && row0 + mine < s.q.length;
        if (i < end) fetch(next, i, stage ^ 1);
        span q = span_of(s.q, sequence, row0 + mine, 64), k = q;
        if (sees) k = span_of(s.k, sequence, col0, F::COLS);
        sees = sees && !none_seen(s, q, k);
        bool all = col0 + F::COLS <= s.k.length && all_seen(s, q, k);
        if (sees && all && mixes) { /* without a branch: before one nvcc would wait for all that is under way */
            scores_of<F, D, F::ROWS, F::COLS>(c, qs, own, ks + stage * SIZE, 0, s.dim);
            mix_packed<F::COLS>(out, u, vs + stage * SIZE);
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
                scores_of<F, D, F::ROWS, F::COLS>(c, qs, own, ks + stage * SIZE, 0, s.dim);
                done<F, 0>(c);
                hide_keys(c, s, row0 + own, col0, all_seen(s, q, k), rows + own, cols[stage]);
                softmax_step(c, most, sum, factor, s.power);
                scale_rows(out, factor);
                pack_rows<T>(u, c);
            }
        }
        mixes = sees;
        before = i < end ? i : -1;
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

/* delta = sum of dout out for each row. Eight threads have a row, so that each reads 16 bytes of a usual one. */
enum { DELTA_LANES = 8, DELTA_ROWS = BLOCK / DELTA_LANES };

template <class T>
KERNEL __launch_bounds__(BLOCK) delta_kernel(dt_attention_back_args a, task s, float *delta) {
    const int MOST = pack<T>::N;
    int       row = blockIdx.x * DELTA_ROWS + threadIdx.x / DELTA_LANES, lane = threadIdx.x % DELTA_LANES;
    int       sequence = s.first_sequence + blockIdx.z, h = s.first_kv * s.group + blockIdx.y;
    int       dim = row < s.q.length ? s.dim : 0, whole = s.dim % MOST == 0 && aligned16(a.out, a.dout) ? dim : 0;
    int64_t   at = query_at(s, sequence, row, h);
    float     sum = 0;
    auto      add = [&](int64_t i, auto by) {
        const int      N = decltype(by)::N;
        pack<float, N> d = get<N>((const T *)a.dout + i), out;
        out = a.wide ? get<N>((const float *)a.out + i) : get<N>((const T *)a.out + i);
        for (int k = 0; k < N; k++) sum += d.v[k] * out.v[k];
    };
    for (int d = lane * MOST; d < whole; d += DELTA_LANES * MOST) add(at + d, by<MOST>());
    for (int d = whole + lane; d < dim; d += DELTA_LANES) add(at + d, by<1>());
    for (int other = DELTA_LANES / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (lane == 0 && row < s.q.length) delta[delta_at(s, sequence, h, row)] = sum;
}

static __device__ float lse_at(const void *lse, const task &s, int sequence, int h, int row) {
    return row < s.q.length ? ((const float *)lse)[(sequence * s.heads + h) * s.q.length + row] : -INFINITY;
}

/* lse of a query in powers of two; infinity, which makes all of p zero, for one that is not there or sees nothing. */
static __device__ float exponent_of(float lse) { return lse == -INFINITY ? INFINITY : lse * (float)LOG2_E; }

static __device__ float delta_of(const float *delta, const task &s, int sequence, int h, int row) {
    return row < s.q.length ? delta[delta_at(s, sequence, h, row)] : 0;
}

/* dq = scale ds k, where p = e^(scale q k - lse), dp = dout v and ds = p (dp - delta). */
template <class T, int D, bool GROUPS>
KERNEL __launch_bounds__((threads_of<form<T, D, 1, GROUPS>>()), (form<T, D, 1, GROUPS>::AT_ONCE))
    queries_back_kernel(dt_attention_back_args a, task s, const float *delta) {
    typedef form<T, D, 1, GROUPS> F;
    if constexpr (GROUPS && !HAS_GROUPS) return;
    const int M = F::M, J = F::PART / 8, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, qs);
    __shared__ int2 rows[F::ROWS], cols[F::STAGES][F::COLS];
    T       *ds = qs + F::ROWS * D, *ks = ds + F::ROWS * D, *vs = ks + F::STAGES * SIZE;
    float    dq[M][D / 8][4] = { { { 0 } } }, c[M][J][4], dp[M][J][4], lse[2 * M], mean[2 * M];
    int      row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS, own = threadIdx.x / 32 * 16 * M;
    int      mine = own / F::TOGETHER * F::TOGETHER;
    int      sequence = s.first_sequence + blockIdx.z, h = s.first_kv * s.group + blockIdx.y;
    auto     fetch = [&](int i, int stage) {
        int kv = s.first_kv + anew(blockIdx.y) / s.group;
        fetch_two<F, D, F::COLS>(ks + stage * SIZE, vs + stage * SIZE, a.k, a.v, key_at(s, sequence, i * F::COLS, kv),
                                 s.k_row, s.k.length - i * F::COLS, s);
        if (s.k.spans && threadIdx.x < F::COLS)
            cols[stage][threadIdx.x] = look(s, s.k, sequence, i * F::COLS + threadIdx.x);
    };
    if (s.k.spans && threadIdx.x < F::ROWS) rows[threadIdx.x] = look(s, s.q, sequence, row0 + threadIdx.x);
    UNROLL for (int r = 0; r < 2 * M; r++) {
        lse[r] = exponent_of(lse_at(a.lse, s, sequence, h, row0 + own + 8 * r + threadIdx.x % 32 / 4));
        mean[r] = delta_of(delta, s, sequence, h, row0 + own + 8 * r + threadIdx.x % 32 / 4);
    }
    int end = end_of_keys(s, row0, F::ROWS), i = next_keys(s, sequence, row0, F::ROWS, end, 0);
    fetch_two<F, D, F::ROWS>(qs, ds, a.q, a.dout, query_at(s, sequence, row0, h), s.q_row, s.q.length - row0, s);
    if (i < end) fetch(i, 0);
    for (int stage = 0; i < end; stage = (stage + 1) % F::STAGES) {
        tiles_here<F>();
        __syncthreads();
        int next = next_keys(s, sequence, row0, F::ROWS, end, i + 1);
        if (F::STAGES == 2 && next < end) fetch(next, stage ^ 1);
        UNROLL_BY(1) for (int part = 0; part < F::COLS; part += F::PART) {
            int  col0 = i * F::COLS + part;
            span q = span_of(s.q, sequence, row0 + mine, F::TOGETHER), k = span_of(s.k, sequence, col0, F::PART);
            T   *kt = ks + stage * SIZE, *vt = vs + stage * SIZE;
            if (row0 + mine >= s.q.length || col0 >= s.k.length || none_seen(s, q, k)) continue;
            scores_of<F, D, F::ROWS, F::COLS>(c, qs, own, kt, part, s.dim);
            scores_of<F, D, F::ROWS, F::COLS>(dp, ds, own, vt, part, s.dim);
            done<F, 1>(c);
            hide_keys(c, s, row0 + own, col0, all_seen(s, q, k), rows + own, cols[stage] + part);
            UNROLL for (int e = 0; e < M * J * 4; e++) {
                float *p = &c[e / 4 / J][e / 4 % J][e % 4];
                *p = exp2_of(*p * s.power - lse[e / 4 / J * 2 + e % 4 / 2]);
            }
            done<F, 0>(dp);
            UNROLL for (int e = 0; e < M * J * 4; e++)
                c[e / 4 / J][e / 4 % J][e % 4] *= dp[e / 4 / J][e / 4 % J][e % 4] - mean[e / 4 / J * 2 + e % 4 / 2];
            mix_of<F, D, F::COLS>(dq, c, kt, part, s.dim);
            done<F, 0>(dq);
        }
        if (F::STAGES == 1) __syncthreads();
        if (F::STAGES == 1 && next < end) fetch(next, 0);
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

/* dk = scale ds^T q and dv = p^T dout, over the queries of all heads that share the key's, head after head. WHAT: 1 dk,
   2 dv, 3 both, for which the sums of a large D are too many. */
template <class T, int D, int WHAT, bool GROUPS>
KERNEL __launch_bounds__((threads_of<form<T, D, 2, GROUPS>>()), (form<T, D, 2, GROUPS>::AT_ONCE))
    keys_back_kernel(dt_attention_back_args a, task s, const float *delta) {
    typedef form<T, D, 2, GROUPS> F;
    if constexpr (GROUPS && !HAS_GROUPS) return;
    const int M = F::M, J = F::PART / 8, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, ks);
    __shared__ float lse[F::STAGES][F::COLS], mean[F::STAGES][F::COLS];
    __shared__ int2  rows[F::ROWS], cols[F::STAGES][F::COLS];
    T       *vs = ks + F::ROWS * D, *qs = vs + F::ROWS * D, *ds = qs + F::STAGES * SIZE;
    float    dk[M][D / 8][4] = { { { 0 } } }, dv[M][D / 8][4] = { { { 0 } } }, c[M][J][4], dp[M][J][4];
    float    row_lse = 0, row_mean = 0; /* of a query of the next tile: on their way while this one is computed */
    int      row0 = blockIdx.x * F::ROWS, own = threadIdx.x / 32 * 16 * M;
    int      mine = own / F::TOGETHER * F::TOGETHER;
    int      sequence = s.first_sequence + blockIdx.z, kv = s.first_kv + blockIdx.y, ld = s.k_row;
    auto     fetch = [&](visit i, int stage) {
        int row = i.tile * F::COLS, h = kv * s.group + i.head, thread = threadIdx.x;
        fetch_two<F, D, F::COLS>(qs + stage * SIZE, ds + stage * SIZE, a.q, a.dout, query_at(s, sequence, row, h),
                                 s.q_row, s.q.length - row, s);
        if (thread >= F::COLS) return;
        row_lse = lse_at(a.lse, s, sequence, h, row + thread);
        row_mean = delta_of(delta, s, sequence, h, row + thread);
        if (s.k.spans) cols[stage][thread] = look(s, s.q, sequence, row + thread);
    };
    if (s.k.spans && threadIdx.x < F::ROWS) rows[threadIdx.x] = look(s, s.k, sequence, row0 + threadIdx.x);
    int   first = first_of_queries(s, row0);
    visit next = { 0, 0 };
    next = next_queries(s, sequence, row0, F::ROWS, first, next);
    fetch_two<F, D, F::ROWS>(ks, vs, a.k, a.v, key_at(s, sequence, row0, kv), ld, s.k.length - row0, s);
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
        if (F::STAGES == 2 && next.head < s.group) fetch(next, stage ^ 1);
        UNROLL_BY(1) for (int part = 0; part < F::COLS; part += F::PART) {
            int  col0 = tile * F::COLS + part;
            span q = span_of(s.q, sequence, col0, F::PART), k = span_of(s.k, sequence, row0 + mine, F::TOGETHER);
            T   *qt = qs + stage * SIZE, *dt = ds + stage * SIZE;
            if (row0 + mine >= s.k.length || col0 >= s.q.length || none_seen(s, q, k)) continue;
            scores_of<F, D, F::ROWS, F::COLS>(c, ks, own, qt, part, s.dim);
            if (F::GROUP && WHAT != 2) scores_of<F, D, F::ROWS, F::COLS>(dp, vs, own, dt, part, s.dim);
            done<F, WHAT == 2 ? 0 : 1>(c);
            hide_queries(c, s, row0 + own, col0, all_seen(s, q, k), rows + own, cols[stage] + part);
            UNROLL for (int e = 0; e < M * J * 4; e++) {
                float *p = &c[e / 4 / J][e / 4 % J][e % 4];
                *p = exp2_of(*p * s.power - lse[stage][part + e / 4 % J * 8 + threadIdx.x % 4 * 2 + e % 2]);
            }
            if (WHAT & 2) mix_of<F, D, F::COLS>(dv, c, dt, part, s.dim);
            if (WHAT == 2) {
                done<F, 0>(dv);
                continue;
            }
            if (!F::GROUP) scores_of<F, D, F::ROWS, F::COLS>(dp, vs, own, dt, part, s.dim);
            done<F, WHAT / 2>(dp);
            UNROLL for (int e = 0; e < M * J * 4; e++)
                c[e / 4 / J][e / 4 % J][e % 4] *= dp[e / 4 / J][e / 4 % J][e % 4] -
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
    target to = { a.dk, a.wide, a.accumulate_k, NULL, key_at(s, sequence, row0 + own, kv), ld, s.k.length - row0 - own,
                  s.scale };
    if (WHAT & 1) give_rows<T, D>((float *)ks + own * D, dk, to, s);
    to.out = a.dv;
    to.accumulate = a.accumulate_v;
    to.factor = 1;
    if (WHAT & 2) give_rows<T, D>((float *)ks + own * D, dv, to, s);
}

/* ---- launching ---- */

static const int64_t MAX_GRID = 65535; /* blocks of a grid in its second and third dimension */

static int64_t tiles_of(int64_t length, int64_t each) { return (length + each - 1) / each; }

static side side_of(const int32_t *position, const int32_t *document, int64_t length, int each, int64_t shift) {
    side x = { position, document, NULL, (int)length, each, (int)tiles_of(length, each), (int)shift };
    return x;
}

/* What is the same forward and backward. Rows are numbered in 32 bits; a scale that is not positive would make the
   largest score the smallest. */
template <class args>
static dt_status task_of(task *out, const args &a, size_t aligned) {
    int64_t  row = a.heads * a.dim, longest = (a.tq > a.tk ? a.tq : a.tk) + 256;
    dt_sight s = a.sight;
    task     x;
    if (a.dtype != DT_F32 && a.dtype != DT_BF16 && a.dtype != DT_F16) return DT_ERR_UNSUPPORTED;
    if (a.kv_heads < 1 || a.heads % a.kv_heads || !a.work) return DT_ERR_ARG;
    if (a.batch * a.heads * longest > INT32_MAX || row > INT32_MAX / 256 || a.heads > MAX_GRID || !(a.scale > 0) ||
        a.dim > 256) return DT_ERR_UNSUPPORTED;
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

/* Cuts a task into tiles; where there are arrays the spans are made at `work`, of which *used bytes are then taken. */
static dt_status cut(task *s, int64_t batch, int each_q, int each_k, char *work, size_t work_bytes, size_t *used,
    void *stream) {
    bool arrays = s->q.position || s->k.position || s->k.document;
    s->q = side_of(s->q.position, s->q.document, s->q.length, each_q, s->q.shift);
    s->k = side_of(s->k.position, s->k.document, s->k.length, each_k, 0);
    int64_t of_q = batch * s->q.tiles, of_k = batch * s->k.tiles;
    *used = arrays ? (size_t)(of_q + of_k) * sizeof(span) : 0;
    if (*used > work_bytes) return DT_ERR_ARG;
    if (!arrays) return DT_OK;
    s->q.spans = (span *)work;
    s->k.spans = s->q.spans + of_q;
    if (of_q > 0) DT_LAUNCH(spans_kernel, (unsigned)tiles_of(of_q, WARPS), BLOCK, 0, stream_of(stream), s->q, batch);
    if (of_k > 0) DT_LAUNCH(spans_kernel, (unsigned)tiles_of(of_k, WARPS), BLOCK, 0, stream_of(stream), s->k, batch);
    return DT_OK;
}

/* Whether a kernel has been compiled for this device so that it can use wgmma. */
static bool takes(const void *kernel, int threads) {
    cudaFuncAttributes code;
    if (cudaFuncGetAttributes(&code, kernel) == cudaSuccess) return code.maxThreadsPerBlock >= threads;
    (void)cudaGetLastError();
    return false;
}

template <class T, int D, bool GROUPS, class run>
static dt_status attention_with(const dt_attention_args &a, task s, run kernel, void *stream) {
    typedef form<T, D, 0, GROUPS> F;
    size_t    bytes = (size_t)(F::ROWS + 2 * F::STAGES * F::COLS) * D * sizeof(T), used;
    dt_status status = cut(&s, a.batch, F::ROWS, F::COLS, (char *)a.work, a.work_bytes, &used, stream);
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
        if (takes((const void *)attention_groups_kernel<T, D>, form<T, D, 0, true>::THREADS))
            return attention_with<T, D, true>(a, s, attention_groups_kernel<T, D>, stream);
    return attention_with<T, D, false>(a, s, attention_kernel<T, D>, stream);
}

#define BY_DIM(function, T, a, s, stream) \
    ((a).dim <= 64    ? function<T, 64>(a, s, stream) \
     : (a).dim <= 128 ? function<T, 128>(a, s, stream) \
                      : function<T, 256>(a, s, stream))

/* Of `sequences` and kv_heads, of which the tasks name the first. */
template <class T, int D, bool GROUPS>
static dt_status attention_back_some(const dt_attention_back_args &a, const task &q, const task &k, int sequences,
    int kv_heads, float *delta, void *stream) {
    typedef form<T, D, 1, GROUPS> Q;
    typedef form<T, D, 2, GROUPS> K;
    const int BOTH = D <= 128 ? 3 : 1;
    size_t    bytes_q = (size_t)2 * (Q::ROWS + Q::STAGES * Q::COLS) * D * sizeof(T);
    size_t    bytes_k = (size_t)2 * (K::ROWS + K::STAGES * K::COLS) * D * sizeof(T);
    dim3      rows((unsigned)tiles_of(a.tq, DELTA_ROWS), kv_heads * q.group, sequences);
    dim3      grid_q(q.q.tiles, kv_heads * q.group, sequences), grid_k(k.k.tiles, kv_heads, sequences);
    if (a.tq > 0) DT_LAUNCH(delta_kernel<T>, rows, BLOCK, 0, stream_of(stream), a, q, delta);
    if (a.tq > 0 && a.dq)
        LAUNCH_SHARED((queries_back_kernel<T, D, GROUPS>), grid_q, Q::THREADS, bytes_q, stream, a, q, delta);
    if (a.tk == 0) return DT_OK;
    if (BOTH == 3 && a.dk && a.dv) {
        LAUNCH_SHARED((keys_back_kernel<T, D, BOTH, GROUPS>), grid_k, K::THREADS, bytes_k, stream, a, k, delta);
        return DT_OK;
    }
    if (a.dk) LAUNCH_SHARED((keys_back_kernel<T, D, 1, GROUPS>), grid_k, K::THREADS, bytes_k, stream, a, k, delta);
    if (a.dv) LAUNCH_SHARED((keys_back_kernel<T, D, 2, GROUPS>), grid_k, K::THREADS, bytes_k, stream, a, k, delta);
    return DT_OK;
}

/* As many sequences at a time as the scratch has room for deltas of, or else as many heads of one. */
template <class T, int D, bool GROUPS>
static dt_status attention_back_with(const dt_attention_back_args &a, task q, void *stream) {
    typedef form<T, D, 1, GROUPS> Q;
    typedef form<T, D, 2, GROUPS> K;
    size_t    used_q, used_k;
    task      k = q;
    char     *work = (char *)a.work;
    dt_status status = cut(&q, a.batch, Q::ROWS, Q::COLS, work, a.work_bytes, &used_q, stream);
    if (status != DT_OK) return status;
    status = cut(&k, a.batch, K::COLS, K::ROWS, work + used_q, a.work_bytes - used_q, &used_k, stream);
    if (status != DT_OK) return status;
    float  *delta = (float *)(work + used_q + used_k);
    int64_t room = (int64_t)((a.work_bytes - used_q - used_k) / sizeof(float)), of_kv = q.group * a.tq;
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
            status = attention_back_some<T, D, GROUPS>(a, q, k, (int)some, (int)heads, delta, stream);
        }
    }
    return status == DT_OK ? launched() : status;
}

template <class T, int D>
static dt_status attention_back_of(const dt_attention_back_args &a, const task &s, void *stream) {
    if constexpr (sizeof(T) == 2 && D <= 128)
        if (takes((const void *)queries_back_kernel<T, D, true>, form<T, D, 1, true>::THREADS))
            return attention_back_with<T, D, true>(a, s, stream);
    return attention_back_with<T, D, false>(a, s, stream);
}


#include "main.inc"
