/* dt_kernels.cu - v0.1.0 - the CUDA side of dt_tensor.h's kernel table - public domain or MIT, see the end of the file

   Compile it with nvcc beside the file that defines DT_IMPLEMENTATION:

       nvcc -O3 train.c dt_kernels.cu -o train -lpthread

   It gives two functions, dt_kernels_cuda() and dt_cuda_ready(), both declared in dt_tensor.h.

   DOES NOT: allocate (scratch is the caller's), keep state, choose a device (the thread's current one is used), add
   with atomics. The table is a part: entries that are NULL (init, mse and its backward) are
   answered by the ops with an error that names the kernel. f32 is served; f64 and i32 by fill, copy, permute, cast and
   reduce too, because a loss is an f64 scalar; bf16 and f16 by cast, copy, and a permute that adds nothing. All else,
   a narrow copy of the parameters among it, is DT_ERR_UNSUPPORTED before anything is launched.

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
    11. Rope and dropout
    12. Embedding
    13. Cross-entropy
    14. Norm and optimizers
    15. Matrix product
    16. Attention
    17. The table

   ORDER OF SUMS. Every sum has an order that depends on sizes only, so the same call gives the same bits on the same
   build. They are not the CPU's bits: long sums are taken in other parts, nvcc contracts a product and a sum into one
   rounding, expf is CUDA's. tests/test_cuda.cc runs these kernels on a CPU and allows 1e-6 relative. What has nothing
   to contract gives the CPU's bits: fill, copy, permute, cast, reduce, max, topk, spread, embedding and its backward,
   square_sums; binary and dropout too, unless they accumulate. Never compile this file with -use_fast_math: nvcc
   defines no macro by which it could be refused here.

   ERRORS. A refused launch is DT_ERR_DEVICE at once. A kernel that fails later shows in a later call, at the latest in
   sync: that is how CUDA works. */

#include "dt_tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#if DT_VERSION != 100
#error "dt_kernels.cu 0.1.0 needs dt_tensor.h 0.1.0: copy all files from one release"
#endif

/* A test runs this file on a CPU (tests/cuda_on_cpu.h): there a launch is a call, and a kernel is static already. */
#ifdef __CUDACC__
#define DT_LAUNCH(kernel, grid, block, smem, stream, ...) kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
#define KERNEL static __global__ void
#define DT_DYN_SMEM(T, name) \
    extern __shared__ __align__(16) unsigned char dt_dyn_smem[]; \
    T *name = reinterpret_cast<T *>(dt_dyn_smem)
#else
#define KERNEL __global__ void
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
};

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

static dt_status cuda_sync(void *stream) {
    return cudaStreamSynchronize(stream_of(stream)) == cudaSuccess ? DT_OK : DT_ERR_DEVICE;
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
    if (queue->own) error = cudaStreamCreateWithFlags(&queue->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) return queue;
    free(queue);
    return refused(text, text_bytes, "cudaStreamCreateWithFlags", error);
}

extern "C" void dt_cuda_close(void *p) {
    cuda_queue *queue = (cuda_queue *)p;
    if (!queue) return;
    cudaStreamSynchronize(queue->stream);
    if (queue->own) cudaStreamDestroy(queue->stream);
    free(queue);
}

extern "C" void *dt_cuda_stream(void *queue) { return stream_of(queue); }
extern "C" int dt_cuda_device(void *queue) { return ((cuda_queue *)queue)->device; }

static void *cuda_open(int place, char *text, size_t text_bytes) {
    int         devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices == 0) error = cudaErrorNoDevice;
    if (error != cudaSuccess) return refused(text, text_bytes, "cudaGetDeviceCount", error);
    dt_cuda_desc desc = { place % devices, NULL };
    return dt_cuda_open(desc, text, text_bytes);
}

// ==== 3. Numbers in storage, blocks, packs ==========================================================================

/* 16-bit numbers are storage: a kernel widens them to float, computes, and rounds once. CUDA's own types for them would
   need its headers where a test has none. */
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

static __device__ float widen(float x) { return x; }
static __device__ float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

/* f16 has 5 bits of exponent. A product with 2^112 moves them to float's bias and makes denormals normal. */
static __device__ float widen(f16 x) {
    unsigned magnitude = (unsigned)(x.bits & 0x7fff) << 13;
    unsigned bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u
                                             : __float_as_uint(__uint_as_float(magnitude) * 5.192296858534828e33f);
    return __uint_as_float(bits | (unsigned)(x.bits & 0x8000) << 16);
}

static __device__ void round_to(float *out, float x) { *out = x; }

/* To nearest, ties to even; rounding could carry a NaN into the sign, so a NaN is only made quiet. */
static __device__ void round_to(bf16 *out, float x) {
    unsigned bits = __float_as_uint(x), rounded = bits + 0x7fffu + (bits >> 16 & 1);
    out->bits = (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) >> 16);
}

/* Below 2^-14 the spacing of f16 is that of floats in [0.5, 1): adding 0.5 rounds. 65,520 and more are infinity. */
static __device__ void round_to(f16 *out, float x) {
    unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    unsigned small = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
    unsigned normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    unsigned h = magnitude < 0x38800000u ? small : normal;
    h = magnitude >= 0x477ff000u ? 0x7c00u : h;
    h = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : h;
    out->bits = (uint16_t)(h | (bits >> 16 & 0x8000u));
}

/* The sum over a warp, for each of its lanes: x + y is y + x, so all lanes get the same bits. */
template <class T>
static __device__ T warp_sum(T v) {
    for (int other = 16; other > 0; other /= 2) v += __shfl_xor_sync(0xffffffffu, v, other);
    return v;
}

/* The sum over a block of BLOCK threads, for each of them: within warps, then warp after warp. */
template <class T>
static __device__ T block_sum(T v) {
    __shared__ T of_warp[WARPS];
    v = warp_sum(v);
    __syncthreads(); /* everyone has read the sum of the call before */
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    T total = of_warp[0];
    for (int w = 1; w < WARPS; w++) total += of_warp[w];
    return total;
}

/* The largest value of a block, for each thread; a NaN loses every comparison. */
static __device__ float block_max(float v) {
    __shared__ float of_warp[WARPS];
    for (int other = 16; other > 0; other /= 2) {
        float theirs = __shfl_xor_sync(0xffffffffu, v, other);
        v = theirs > v ? theirs : v;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    float most = of_warp[0];
    for (int w = 1; w < WARPS; w++) most = of_warp[w] > most ? of_warp[w] : most;
    return most;
}

/* 16 bytes of neighbours in a flat array: what a thread works on at a time. In memory that is aligned (`wide`) a whole
   pack is one access; elsewhere, and at the end, it is element by element, and what lies past the end is zero. */
template <class T>
struct alignas(16) pack {
    enum { N = 16 / sizeof(T) };
    T v[N];
};

template <class T>
static __device__ pack<T> load(const T *p, size_t i, size_t count, bool wide) {
    if (wide && i + pack<T>::N <= count) return *reinterpret_cast<const pack<T> *>(p + i);
    pack<T> x;
    for (int k = 0; k < pack<T>::N; k++) x.v[k] = i + k < count ? p[i + k] : T();
    return x;
}

template <class T>
static __device__ void store(T *p, size_t i, size_t count, bool wide, pack<T> x) {
    if (wide && i + pack<T>::N <= count) {
        *reinterpret_cast<pack<T> *>(p + i) = x;
        return;
    }
    for (int k = 0; k < pack<T>::N; k++)
        if (i + k < count) p[i + k] = x.v[k];
}

static __host__ __device__ bool aligned16(const void *a, const void *b = NULL, const void *c = NULL,
    const void *d = NULL) {
    return (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
}

/* The walk of this thread over a flat array, `each` elements at a time. */
static __device__ size_t flat_first(int each) { return ((size_t)blockIdx.x * BLOCK + threadIdx.x) * each; }
static __device__ size_t flat_step(int each) { return (size_t)gridDim.x * BLOCK * each; }

static __device__ void give(void *out, size_t i, float value, int accumulate) {
    float *to = (float *)out + i;
    *to = accumulate ? *to + value : value;
}

// ==== 4. Fill, copy, reduce =========================================================================================

template <class T>
KERNEL __launch_bounds__(BLOCK) fill_kernel(T *out, size_t count, T value) {
    for (size_t i = flat_first(1); i < count; i += flat_step(1)) out[i] = value;
}

template <class T>
static void fill(const dt_fill_args *a, void *stream) {
    LAUNCH(fill_kernel<T>, a->count, BLOCK, stream, (T *)a->out, a->count, (T)a->value);
}

static dt_status cuda_fill(const dt_fill_args *a, void *stream) {
    if (a->dtype == DT_F32) fill<float>(a, stream);
    else if (a->dtype == DT_F64) fill<double>(a, stream);
    else if (a->dtype == DT_I32) fill<int>(a, stream);
    else return DT_ERR_UNSUPPORTED;
    return launched();
}

/* Unit: the largest piece, of 16, 4 or 1 bytes, that divides every address and length of the copy. */
template <class Unit>
KERNEL __launch_bounds__(BLOCK) copy_kernel(dt_copy_args a) {
    size_t units = a.row_bytes / sizeof(Unit);
    for (size_t i = flat_first(1); i < a.rows * units; i += flat_step(1)) {
        size_t      row = i / units, unit = i % units;
        const Unit *in = (const Unit *)((const char *)a.in + row * a.in_stride);
        Unit       *out = (Unit *)((char *)a.out + row * a.out_stride);
        out[unit] = in[unit];
    }
}

static dt_status cuda_copy(const dt_copy_args *args, void *stream) {
    dt_copy_args a = *args;
    size_t       bytes = a.rows * a.row_bytes;
    if (a.in_stride == a.row_bytes && a.out_stride == a.row_bytes) { /* one long row: its own end is the only odd one */
        a.rows = 1;
        a.row_bytes = bytes;
    }
    size_t all = (size_t)a.in | (size_t)a.out | a.row_bytes;
    if (a.rows > 1) all |= a.in_stride | a.out_stride;
    if (all % 16 == 0) LAUNCH(copy_kernel<uint4>, bytes / 16, BLOCK, stream, a);
    else if (all % 4 == 0) LAUNCH(copy_kernel<unsigned>, bytes / 4, BLOCK, stream, a);
    else LAUNCH(copy_kernel<unsigned char>, bytes, BLOCK, stream, a);
    return launched();
}

/* The inputs of one launch travel in its arguments, because the caller's array of pointers is in host memory. */
enum { MAX_INPUTS = 64 };
struct reduce_inputs {
    const void *p[MAX_INPUTS];
    int         n;
    dt_op       op;
    int         divisor; /* DT_AVG in its last launch: the number of all inputs; else 0 */
    bool        wide;
};

/* As on the CPU each step is rounded to the type; int wraps around. */
static __device__ float  plus(float a, float b) { return a + b; }
static __device__ double plus(double a, double b) { return a + b; }
static __device__ int    plus(int a, int b) { return (int)((unsigned)a + (unsigned)b); }
static __device__ float  times(float a, float b) { return a * b; }
static __device__ double times(double a, double b) { return a * b; }
static __device__ int    times(int a, int b) { return (int)((unsigned)a * (unsigned)b); }

template <class T>
static __device__ T combine(dt_op op, T a, T b) {
    switch (op) {
    case DT_SUM:
    case DT_AVG: return plus(a, b);
    case DT_MAX: return b > a ? b : a;
    case DT_MIN: return b < a ? b : a;
    case DT_PROD: return times(a, b);
    }
    return a;
}

/* A thread reads its elements of all inputs before it writes them, so out may be one of the inputs. */
template <class T>
KERNEL __launch_bounds__(BLOCK) reduce_kernel(T *out, size_t count, reduce_inputs in) {
    const int N = pack<T>::N;
    for (size_t i = flat_first(N); i < count; i += flat_step(N)) {
        pack<T> sum = load((const T *)in.p[0], i, count, in.wide);
        for (int r = 1; r < in.n; r++) {
            pack<T> x = load((const T *)in.p[r], i, count, in.wide);
            for (int k = 0; k < N; k++) sum.v[k] = combine(in.op, sum.v[k], x.v[k]);
        }
        if (in.divisor > 0)
            for (int k = 0; k < N; k++) sum.v[k] /= (T)in.divisor;
        store(out, i, count, in.wide, sum);
    }
}

/* More than MAX_INPUTS inputs take several launches, of which all but the first begin with what out holds: the same
   order. An input that the first launch would overwrite cannot be read by a later one. */
template <class T>
static dt_status reduce(const dt_reduce_args *a, void *stream) {
    for (int r = MAX_INPUTS; r < a->n; r++)
        if (a->in[r] == a->out) return DT_ERR_UNSUPPORTED;
    for (int done = 0; done < a->n;) {
        reduce_inputs in;
        in.n = 0;
        in.op = a->op;
        if (done > 0) in.p[in.n++] = a->out;
        while (done < a->n && in.n < MAX_INPUTS) in.p[in.n++] = a->in[done++];
        in.divisor = a->op == DT_AVG && done == a->n ? a->n : 0;
        in.wide = aligned16(a->out);
        for (int r = 0; r < in.n; r++) in.wide = in.wide && aligned16(in.p[r]);
        LAUNCH(reduce_kernel<T>, a->count, BLOCK * pack<T>::N, stream, (T *)a->out, a->count, in);
    }
    dt_status status = launched();
    for (int k = 0; k < a->n_also && status == DT_OK; k++)
        status = cuda_move(a->also[k], a->out, a->count * sizeof(T), stream);
    return status;
}

static dt_status cuda_reduce(const dt_reduce_args *a, void *stream) {
    if (a->dtype != DT_F32 && a->dtype != DT_F64 && a->dtype != DT_I32) return DT_ERR_UNSUPPORTED;
    if (a->n < 1) return DT_ERR_ARG;
    if (a->dtype == DT_F32) return reduce<float>(a, stream);
    return a->dtype == DT_F64 ? reduce<double>(a, stream) : reduce<int>(a, stream);
}

// ==== 5. Strides: binary, permute ===================================================================================

/* The index of two arrays with strides. Neighbouring dimensions that lie together in both are one here: two tensors of
   one shape have one dimension, a bias over rows two. */
struct strided {
    int     nd; /* at least 1 */
    int64_t d[DT_MAX_DIMS], a[DT_MAX_DIMS], b[DT_MAX_DIMS];
};

static strided strided_of(dt_shape shape, const int64_t *a, const int64_t *b) {
    strided s = { 0, { 0 }, { 0 }, { 0 } };
    for (int i = 0; i < shape.nd; i++) {
        int last = s.nd - 1;
        if (shape.d[i] == 1) continue;
        if (last < 0 || s.a[last] != a[i] * shape.d[i] || s.b[last] != b[i] * shape.d[i]) s.d[last = s.nd++] = 1;
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
        size_t at = i % (size_t)s.d[d];
        i /= (size_t)s.d[d];
        *a += (int64_t)at * s.a[d];
        *b += (int64_t)at * s.b[d];
    }
    *a += (int64_t)i * s.a[0];
    *b += (int64_t)i * s.b[0];
}

/* Whether a pack of the last dimension is one aligned access, or one number repeated. */
static bool packs(const void *p, const int64_t *stride, const strided *s) {
    const int64_t N = pack<float>::N;
    bool          whole = aligned16(p) && stride[s->nd - 1] == 1;
    for (int i = 0; i < s->nd - 1; i++) whole = whole && stride[i] % N == 0;
    return s->d[s->nd - 1] % N == 0 && (whole || stride[s->nd - 1] == 0);
}

static __device__ float binary(int op, float x, float y) {
    switch (op) {
    case DT_SUB: return x - y;
    case DT_MUL: return x * y;
    case DT_DIV: return x / y;
    }
    return x + y;
}

static __device__ pack<float> load_strided(const float *p, int64_t at, int64_t stride) {
    if (stride != 0) return load(p, (size_t)at, (size_t)at + pack<float>::N, true);
    pack<float> x = { { p[at], p[at], p[at], p[at] } };
    return x;
}

/* A thread reads its elements before it writes them, so out may be a or b. */
KERNEL __launch_bounds__(BLOCK) binary_kernel(dt_binary_args a, strided s, size_t count, bool wide) {
    const int    N = pack<float>::N;
    const float *in_a = (const float *)a.a, *in_b = (const float *)a.b;
    for (size_t i = flat_first(N); i < count; i += flat_step(N)) {
        pack<float> x = { { 0, 0, 0, 0 } }, y = x, out;
        int64_t     at_a, at_b;
        if (wide) {
            places(s, i, &at_a, &at_b);
            x = load_strided(in_a, at_a, s.a[s.nd - 1]);
            y = load_strided(in_b, at_b, s.b[s.nd - 1]);
        } else {
            for (int k = 0; k < N && i + k < count; k++) {
                places(s, i + k, &at_a, &at_b);
                x.v[k] = in_a[at_a];
                y.v[k] = in_b[at_b];
            }
        }
        for (int k = 0; k < N; k++) out.v[k] = binary(a.op, x.v[k], y.v[k]);
        if (a.accumulate) {
            pack<float> old = load((const float *)a.out, i, count, wide);
            for (int k = 0; k < N; k++) out.v[k] += old.v[k];
        }
        store((float *)a.out, i, count, wide, out);
    }
}

static dt_status cuda_binary(const dt_binary_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (a->op < DT_ADD || a->op > DT_DIV) return DT_ERR_ARG;
    strided s = strided_of(a->shape, a->stride_a, a->stride_b);
    bool    wide = aligned16(a->out) && packs(a->a, s.a, &s) && packs(a->b, s.b, &s);
    LAUNCH(binary_kernel, count_of(&s), BLOCK * pack<float>::N, stream, *a, s, count_of(&s), wide);
    return launched();
}

/* Unit: a type of the element's size, or the type itself where something is added. */
template <class Unit>
KERNEL __launch_bounds__(BLOCK) permute_kernel(dt_permute_args a, strided s, size_t count) {
    for (size_t i = flat_first(1); i < count; i += flat_step(1)) {
        int64_t from, to;
        places(s, i, &from, &to);
        ((Unit *)a.out)[to] = ((const Unit *)a.in)[from];
    }
}

template <class T>
KERNEL __launch_bounds__(BLOCK) permute_add_kernel(dt_permute_args a, strided s, size_t count) {
    for (size_t i = flat_first(1); i < count; i += flat_step(1)) {
        int64_t from, to;
        places(s, i, &from, &to);
        ((T *)a.out)[to] = plus(((const T *)a.out)[to], ((const T *)a.in)[from]);
    }
}

static dt_status cuda_permute(const dt_permute_args *a, void *stream) {
    strided s = strided_of(a->shape, a->in_stride, a->out_stride);
    size_t  n = count_of(&s);
    bool    add = a->accumulate != 0;
    switch (a->dtype) {
    case DT_F32:
        if (add) LAUNCH(permute_add_kernel<float>, n, BLOCK, stream, *a, s, n);
        else LAUNCH(permute_kernel<unsigned>, n, BLOCK, stream, *a, s, n);
        return launched();
    case DT_F64:
        if (add) LAUNCH(permute_add_kernel<double>, n, BLOCK, stream, *a, s, n);
        else LAUNCH(permute_kernel<uint64_t>, n, BLOCK, stream, *a, s, n);
        return launched();
    case DT_I32:
        if (add) LAUNCH(permute_add_kernel<int>, n, BLOCK, stream, *a, s, n);
        else LAUNCH(permute_kernel<unsigned>, n, BLOCK, stream, *a, s, n);
        return launched();
    case DT_BF16:
    case DT_F16:
        if (add) return DT_ERR_UNSUPPORTED;
        LAUNCH(permute_kernel<uint16_t>, n, BLOCK, stream, *a, s, n);
        return launched();
    }
    return DT_ERR_UNSUPPORTED;
}

// ==== 6. Functions of one number: unary, glu ========================================================================

static __device__ float logistic(float x) { return 1 / (1 + expf(-x)); }

/* The normal distribution function. erfcf keeps its digits where 1 + erff would cancel. */
static __device__ float normal_part(float x) { return 0.5f * erfcf(-0.70710678f * x); }

/* GELU in tanh form: with u = sqrt(2/pi) (x + 0.044715 x^3), 0.5 (1 + tanh u) is the logistic function of 2u: one
   exponential, and no cancellation where tanh u is close to -1. */
#define GELU_A 0.7978845608028654f /* sqrt(2/pi) */
#define GELU_B 0.044715f

/* f(x) */
static __device__ float act(int kind, float x, float scale, float shift) {
    switch (kind) {
    case DT_ACT_GELU: return x / (1 + expf(-2 * GELU_A * (x + GELU_B * x * x * x)));
    case DT_ACT_GELU_ERF: return x * normal_part(x);
    case DT_ACT_SILU: return x * logistic(x);
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

/* gelu'(x) = s + x s (1 - s) 2 u' */
static __device__ float gelu_slope(float x) {
    x = clamped(x, 30);
    float u = GELU_A * (x + GELU_B * x * x * x), du = GELU_A * (1 + 3 * GELU_B * x * x), s = logistic(2 * u);
    return s + 2 * x * s * (1 - s) * du;
}
#undef GELU_A
#undef GELU_B

static __device__ float gelu_erf_slope(float x) {
    x = clamped(x, 30);
    return normal_part(x) + x * 0.3989422804014327f * expf(-0.5f * x * x);
}

static __device__ float silu_slope(float x) {
    x = clamped(x, 80);
    float s = logistic(x);
    return s + x * s * (1 - s);
}

/* d f'(x); d is not multiplied with where nothing passes, so that its infinities stay out */
static __device__ float act_back(int kind, float x, float d, float scale) {
    switch (kind) {
    case DT_ACT_GELU: return d * gelu_slope(x);
    case DT_ACT_GELU_ERF: return d * gelu_erf_slope(x);
    case DT_ACT_SILU: return d * silu_slope(x);
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

static bool known_act(int kind) { return kind >= 0 && kind < DT_ACTS; }

KERNEL __launch_bounds__(BLOCK) unary_kernel(dt_unary_args a) {
    const int N = pack<float>::N;
    float     scale = (float)a.scale, shift = (float)a.shift;
    bool      wide = aligned16(a.out, a.in);
    for (size_t i = flat_first(N); i < a.count; i += flat_step(N)) {
        pack<float> x = load((const float *)a.in, i, a.count, wide);
        for (int k = 0; k < N; k++) x.v[k] = act(a.act, x.v[k], scale, shift);
        store((float *)a.out, i, a.count, wide, x);
    }
}

static dt_status cuda_unary(const dt_unary_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (!known_act(a->act)) return DT_ERR_ARG;
    LAUNCH(unary_kernel, a->count, BLOCK * pack<float>::N, stream, *a);
    return launched();
}

/* in may be NULL for the kinds whose slope does not depend on it. */
KERNEL __launch_bounds__(BLOCK) unary_back_kernel(dt_unary_back_args a) {
    const int N = pack<float>::N;
    float     scale = (float)a.scale;
    bool      wide = aligned16(a.dx, a.dout, a.in);
    for (size_t i = flat_first(N); i < a.count; i += flat_step(N)) {
        pack<float> dout = load((const float *)a.dout, i, a.count, wide), x = { { 0, 0, 0, 0 } }, dx = x;
        if (a.in) x = load((const float *)a.in, i, a.count, wide);
        if (a.accumulate) dx = load((const float *)a.dx, i, a.count, wide);
        for (int k = 0; k < N; k++) dx.v[k] += act_back(a.act, x.v[k], dout.v[k], scale);
        store((float *)a.dx, i, a.count, wide, dx);
    }
}

static dt_status cuda_unary_back(const dt_unary_back_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (!known_act(a->act)) return DT_ERR_ARG;
    LAUNCH(unary_back_kernel, a->count, BLOCK * pack<float>::N, stream, *a);
    return launched();
}

/* arXiv:2002.05202. A thread has one element of the result: its gate and, cols further, its up. */
KERNEL __launch_bounds__(BLOCK) glu_kernel(dt_glu_args a) {
    for (size_t i = flat_first(1); i < a.rows * a.cols; i += flat_step(1)) {
        const float *gate = (const float *)a.in + i + i / a.cols * a.cols;
        ((float *)a.out)[i] = act(a.act, gate[0], 1, 0) * gate[a.cols];
    }
}

static dt_status cuda_glu(const dt_glu_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (!known_act(a->act)) return DT_ERR_ARG;
    LAUNCH(glu_kernel, a->rows * a->cols, BLOCK, stream, *a);
    return launched();
}

KERNEL __launch_bounds__(BLOCK) glu_back_kernel(dt_glu_back_args a) {
    for (size_t i = flat_first(1); i < a.rows * a.cols; i += flat_step(1)) {
        size_t at = i + i / a.cols * a.cols;
        float  gate = ((const float *)a.in)[at], up = ((const float *)a.in)[at + a.cols];
        float  d = ((const float *)a.dout)[i];
        give(a.dx, at, act_back(a.act, gate, d * up, 1), a.accumulate);
        give(a.dx, at + a.cols, act(a.act, gate, 1, 0) * d, a.accumulate);
    }
}

static dt_status cuda_glu_back(const dt_glu_back_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (!known_act(a->act)) return DT_ERR_ARG;
    LAUNCH(glu_back_kernel, a->rows * a->cols, BLOCK, stream, *a);
    return launched();
}

// ==== 7. Cast =======================================================================================================

/* As on the CPU, bit for bit and by the same way: through double, which holds every number of the other types, and from
   there to 16 bits through float. */
template <class T>
static __device__ double number(T x) { return (double)widen(x); }
static __device__ double number(double x) { return x; }
static __device__ double number(int x) { return (double)x; }

template <class T>
static __device__ void round_number(T *out, double x) { round_to(out, (float)x); }
static __device__ void round_number(double *out, double x) { *out = x; }

static __device__ void round_number(int *out, double x) {
    x = x != x ? 0 : x > 2147483647.0 ? 2147483647.0 : x < -2147483648.0 ? -2147483648.0 : x;
    *out = (int)x;
}

template <class To, class From>
KERNEL __launch_bounds__(BLOCK) cast_kernel(dt_cast_args a) {
    To *out = (To *)a.out;
    for (size_t i = flat_first(1); i < a.count; i += flat_step(1)) {
        double x = number(((const From *)a.in)[i]);
        round_number(out + i, a.accumulate ? x + number(out[i]) : x);
    }
}

template <class To>
static dt_status cast_to(const dt_cast_args *a, void *stream) {
    switch (a->from) {
    case DT_F32: LAUNCH((cast_kernel<To, float>), a->count, BLOCK, stream, *a); return launched();
    case DT_BF16: LAUNCH((cast_kernel<To, bf16>), a->count, BLOCK, stream, *a); return launched();
    case DT_F16: LAUNCH((cast_kernel<To, f16>), a->count, BLOCK, stream, *a); return launched();
    case DT_F64: LAUNCH((cast_kernel<To, double>), a->count, BLOCK, stream, *a); return launched();
    case DT_I32: LAUNCH((cast_kernel<To, int>), a->count, BLOCK, stream, *a); return launched();
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

// ==== 8. Sums over a dimension ======================================================================================

/* A block of 32 x 32 threads takes 32 columns. The rows are cut into 32 runs of equal length: threadIdx.y goes down its
   run, r ascending, and the runs' sums are added in ascending order. The cut depends on `rows` alone. */
enum { COLUMNS = 32, RUNS = 32 };

struct row_run { size_t first, end; };

static __device__ row_run my_rows(size_t rows) {
    size_t each = rows / RUNS + (rows % RUNS != 0), first = threadIdx.y * each, end = first + each;
    row_run run = { first < rows ? first : rows, end < rows ? end : rows };
    return run;
}

/* The total of a column from the sums of its runs; for threadIdx.y 0 only. */
static __device__ float add_runs(float sum) {
    __shared__ float of_run[RUNS][COLUMNS];
    __syncthreads(); /* the totals of the call before have been taken */
    of_run[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    float total = 0;
    if (threadIdx.y == 0)
        for (int y = 0; y < RUNS; y++) total += of_run[y][threadIdx.x];
    return total;
}

/* in (outer,n,inner), inner > 1: a block takes 32 neighbouring sums of one `outer`. */
KERNEL __launch_bounds__(COLUMNS *RUNS) sum_columns_kernel(dt_sum_args a) {
    row_run run = my_rows(a.n);
    size_t  tiles = a.inner / COLUMNS + (a.inner % COLUMNS != 0);
    for (size_t tile = blockIdx.x; tile < a.outer * tiles; tile += gridDim.x) {
        size_t       o = tile / tiles, c = tile % tiles * COLUMNS + threadIdx.x;
        const float *in = (const float *)a.in + o * a.n * a.inner;
        float        sum = 0;
        if (c < a.inner)
            for (size_t r = run.first; r < run.end; r++) sum += in[r * a.inner + c];
        sum = add_runs(sum); /* outside of the condition: every thread of the block must come */
        if (threadIdx.y == 0 && c < a.inner) give(a.out, o * a.inner + c, (float)a.scale * sum, a.accumulate);
    }
}

/* inner 1: one block per row, also where there is one row: no scratch, but a sum of everything is one block's work. */
KERNEL __launch_bounds__(BLOCK) sum_rows_kernel(dt_sum_args a) {
    for (size_t o = blockIdx.x; o < a.outer; o += gridDim.x) {
        const float *in = (const float *)a.in + o * a.n;
        float        sum = 0;
        for (size_t j = threadIdx.x; j < a.n; j += BLOCK) sum += in[j];
        sum = block_sum(sum);
        if (threadIdx.x == 0) give(a.out, o, (float)a.scale * sum, a.accumulate);
    }
}

/* n 1: nothing to sum. */
KERNEL __launch_bounds__(BLOCK) scaled_kernel(dt_sum_args a) {
    for (size_t i = flat_first(1); i < a.outer * a.inner; i += flat_step(1))
        give(a.out, i, (float)a.scale * ((const float *)a.in)[i], a.accumulate);
}

static dt_status cuda_sum(const dt_sum_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    size_t tiles = a->outer * (a->inner / COLUMNS + (a->inner % COLUMNS != 0));
    if (a->n == 1) LAUNCH(scaled_kernel, a->outer * a->inner, BLOCK, stream, *a);
    else if (a->inner == 1) LAUNCH(sum_rows_kernel, a->outer, 1, stream, *a);
    else if (tiles > 0)
        DT_LAUNCH(sum_columns_kernel, grid_for(tiles, 1), dim3(COLUMNS, RUNS), 0, stream_of(stream), *a);
    return launched();
}

// ==== 9. Maxima and places ==========================================================================================

/* Indices come from the caller's data, and one outside the table must be answered by this very call, as on the CPU,
   while a kernel can only answer later. So the host reads them, four bytes each, in pieces. That waits for the stream:
   once for the forward and once for the backward. (embedding_back asks only where no forward has: `strict`.) */
static dt_status check_indices(const int32_t *indices, size_t count, int64_t least, int64_t end, void *stream) {
    const size_t PIECE = 4096;
    int32_t      piece[PIECE];
    for (size_t at = 0; at < count; at += PIECE) {
        size_t    have = count - at < PIECE ? count - at : PIECE;
        dt_status status = cuda_move(piece, indices + at, have * sizeof *piece, stream);
        if (status == DT_OK) status = cuda_sync(stream);
        if (status != DT_OK) return status;
        for (size_t i = 0; i < have; i++)
            if (piece[i] < least || piece[i] >= end) return DT_ERR_ARG;
    }
    return DT_OK;
}

/* One thread per maximum, as on the CPU: a NaN never is the maximum, unless it comes first. Meant for a dimension of
   thousands at most: along the last one neighbouring threads read n apart. */
KERNEL __launch_bounds__(BLOCK) max_kernel(dt_max_args a) {
    for (size_t i = flat_first(1); i < a.outer * a.inner; i += flat_step(1)) {
        const float *in = (const float *)a.in + i / a.inner * a.n * a.inner + i % a.inner;
        float        best = in[0];
        int32_t      index = 0;
        for (size_t j = 1; j < a.n; j++) {
            float x = in[j * a.inner];
            if (!(x > best)) continue;
            best = x;
            index = (int32_t)j;
        }
        ((float *)a.out)[i] = best;
        a.index[i] = index;
    }
}

static dt_status cuda_max(const dt_max_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (a->n < 1) return DT_ERR_ARG;
    LAUNCH(max_kernel, a->outer * a->inner, BLOCK, stream, *a);
    return launched();
}

/* One thread per row keeps a sorted list of k in the result itself, as the CPU does: k and cols are numbers of experts.
   A later column never moves ahead of an equal one. */
KERNEL __launch_bounds__(BLOCK) topk_kernel(dt_topk_args a) {
    for (size_t r = flat_first(1); r < a.rows; r += flat_step(1)) {
        const float *x = (const float *)a.in + r * a.cols;
        int32_t     *index = a.index + r * a.k;
        for (size_t c = 0; c < a.cols; c++) {
            size_t at = c < a.k ? c : a.k; /* how many are in the list */
            while (at > 0 && x[c] > x[index[at - 1]]) {
                if (at < a.k) index[at] = index[at - 1];
                at--;
            }
            if (at < a.k) index[at] = (int32_t)c;
        }
        for (size_t j = 0; j < a.k; j++) ((float *)a.values)[r * a.k + j] = x[index[j]];
    }
}

static dt_status cuda_topk(const dt_topk_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (a->k > a->cols) return DT_ERR_ARG;
    LAUNCH(topk_kernel, a->rows, BLOCK, stream, *a);
    return launched();
}

/* One thread per (outer,inner), j ascending: two numbers for one place are added in order. */
KERNEL __launch_bounds__(BLOCK) spread_kernel(dt_spread_args a) {
    for (size_t i = flat_first(1); i < a.outer * a.inner; i += flat_step(1)) {
        size_t o = i / a.inner, c = i % a.inner;
        float *out = (float *)a.out + o * a.n * a.inner + c;
        for (size_t j = 0; j < a.n && !a.accumulate; j++) out[j * a.inner] = 0;
        for (size_t j = 0; j < a.k; j++) {
            size_t from = (o * a.k + j) * a.inner + c;
            out[(size_t)a.index[from] * a.inner] += ((const float *)a.in)[from];
        }
    }
}

static dt_status cuda_spread(const dt_spread_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    dt_status status = check_indices(a->index, a->outer * a->k * a->inner, 0, (int64_t)a->n, stream);
    if (status != DT_OK) return status;
    LAUNCH(spread_kernel, a->outer * a->inner, BLOCK, stream, *a);
    return launched();
}

// ==== 10. Normalisation and softmax =================================================================================

/* Layer normalisation, arXiv:1607.06450: one block per row, two passes over it, because E[x^2] - E[x]^2 cancels.
   RMSNorm, arXiv:1910.07467, is the same with a mean of zero and without a bias. */
KERNEL __launch_bounds__(BLOCK) norm_kernel(dt_norm_args a) {
    const float *gain = (const float *)a.gain, *bias = a.rms ? NULL : (const float *)a.bias;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const float *x = (const float *)a.in + r * a.cols;
        float       *out = (float *)a.out + r * a.cols, sum = 0, squares = 0, mean = 0;
        if (!a.rms) { /* the same for all threads, so all reach the barriers */
            for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) sum += x[c];
            mean = block_sum(sum) / (float)a.cols;
        }
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) squares += (x[c] - mean) * (x[c] - mean);
        float rstd = (float)(1 / sqrt((double)block_sum(squares) / (double)a.cols + a.eps));
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK)
            out[c] = (x[c] - mean) * rstd * gain[c] + (bias ? bias[c] : 0);
        if (threadIdx.x > 0) continue;
        if (!a.rms) ((float *)a.mean)[r] = mean;
        ((float *)a.rstd)[r] = rstd;
    }
}

static dt_status cuda_norm(const dt_norm_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    LAUNCH(norm_kernel, a->rows, 1, stream, *a);
    return launched();
}

static __device__ float mean_of(const dt_norm_back_args &a, size_t r) { return a.rms ? 0 : ((const float *)a.mean)[r]; }

/* dgain(cols) = sum over rows of dout y, dbias(cols) = sum over rows of dout, where y = (x - mean) rstd: as in section
   8, so no scratch is needed and each sum is complete before it leaves. */
KERNEL __launch_bounds__(COLUMNS *RUNS) norm_back_gain_kernel(dt_norm_back_args a) {
    const float *x = (const float *)a.in, *dout = (const float *)a.dout, *rstd = (const float *)a.rstd;
    row_run      run = my_rows(a.rows);
    for (size_t first = (size_t)blockIdx.x * COLUMNS; first < a.cols; first += (size_t)gridDim.x * COLUMNS) {
        size_t c = first + threadIdx.x;
        float  dgain = 0, dbias = 0;
        for (size_t r = run.first; r < run.end && c < a.cols; r++) {
            float d = dout[r * a.cols + c];
            dgain += d * ((x[r * a.cols + c] - mean_of(a, r)) * rstd[r]);
            dbias += d;
        }
        dgain = add_runs(dgain);
        dbias = add_runs(dbias);
        if (threadIdx.y > 0 || c >= a.cols) continue;
        if (a.dgain) give(a.dgain, c, dgain, a.accumulate_gain);
        if (a.dbias) give(a.dbias, c, dbias, a.accumulate_bias);
    }
}

/* With g = dout gain: dx = rstd (g - mean(g) - y mean(g y)); mean(g) is the mean's doing, so RMSNorm has none. One
   block per row. */
KERNEL __launch_bounds__(BLOCK) norm_back_kernel(dt_norm_back_args a) {
    const float *gain = (const float *)a.gain;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const float *x = (const float *)a.in + r * a.cols, *dout = (const float *)a.dout + r * a.cols;
        float        mean = mean_of(a, r), rstd = ((const float *)a.rstd)[r], g_sum = 0, gy_sum = 0;
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) {
            float g = dout[c] * gain[c];
            g_sum += g;
            gy_sum += g * ((x[c] - mean) * rstd);
        }
        float mean_g = block_sum(g_sum) / (float)a.cols, mean_gy = block_sum(gy_sum) / (float)a.cols;
        if (a.rms) mean_g = 0;
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) {
            float g = dout[c] * gain[c], y = (x[c] - mean) * rstd;
            give(a.dx, r * a.cols + c, rstd * (g - mean_g - y * mean_gy), a.accumulate_x);
        }
    }
}

/* The sums over rows come first: dx may lie where dout does. */
static dt_status cuda_norm_back(const dt_norm_back_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if ((a->dgain || a->dbias) && a->cols > 0)
        DT_LAUNCH(norm_back_gain_kernel, grid_for(a->cols, COLUMNS), dim3(COLUMNS, RUNS), 0, stream_of(stream), *a);
    if (a->dx) LAUNCH(norm_back_kernel, a->rows, 1, stream, *a);
    return launched();
}

/* One block per row. out may be in: a thread meets its own columns only. */
KERNEL __launch_bounds__(BLOCK) softmax_kernel(dt_softmax_args a) {
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const float *x = (const float *)a.in + r * a.cols;
        float       *out = (float *)a.out + r * a.cols, most = -INFINITY, sum = 0;
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) most = x[c] > most ? x[c] : most;
        most = block_max(most);
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) sum += out[c] = expf(x[c] - most);
        float inverse = 1 / block_sum(sum);
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) out[c] *= inverse;
    }
}

static dt_status cuda_softmax(const dt_softmax_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (a->cols > 0) LAUNCH(softmax_kernel, a->rows, 1, stream, *a);
    return launched();
}

KERNEL __launch_bounds__(BLOCK) softmax_back_kernel(dt_softmax_back_args a) {
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const float *y = (const float *)a.out + r * a.cols, *dout = (const float *)a.dout + r * a.cols;
        float        sum = 0;
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) sum += y[c] * dout[c];
        sum = block_sum(sum);
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK)
            give(a.dx, r * a.cols + c, y[c] * (dout[c] - sum), a.accumulate);
    }
}

static dt_status cuda_softmax_back(const dt_softmax_back_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    LAUNCH(softmax_back_kernel, a->rows, 1, stream, *a);
    return launched();
}

// ==== 11. Rope and dropout ==========================================================================================

/* arXiv:2104.09864. A thread turns pair i of a token in all its heads, which have one angle; the threads behind the
   pairs copy what does not turn. The angle is taken in double, because a float's cosine of a position in the thousands
   has lost its last digits. A thread reads a pair before it writes it: out may be in. */
KERNEL __launch_bounds__(BLOCK) rope_kernel(dt_rope_args a) {
    size_t half = a.rotary / 2, each = a.dim - half;
    size_t step = a.interleaved ? 2 : 1, apart = a.interleaved ? 1 : half; /* pair i: i step, i step + apart */
    for (size_t at = flat_first(1); at < a.tokens * each; at += flat_step(1)) {
        size_t token = at / each, i = at % each;
        float  cosine = 1, sine = 0;
        if (i < half) {
            double angle = a.positions[token] * pow(a.theta, -2.0 * (double)i / (double)a.rotary);
            cosine = (float)cos(angle);
            sine = (float)(a.inverse ? -sin(angle) : sin(angle));
        }
        for (size_t h = token * a.heads; h < (token + 1) * a.heads; h++) {
            const float *x = (const float *)a.in + h * a.dim;
            if (i < half) {
                float x0 = x[i * step], x1 = x[i * step + apart];
                give(a.out, h * a.dim + i * step, x0 * cosine - x1 * sine, a.accumulate);
                give(a.out, h * a.dim + i * step + apart, x1 * cosine + x0 * sine, a.accumulate);
            } else {
                give(a.out, h * a.dim + half + i, x[half + i], a.accumulate);
            }
        }
    }
}

static dt_status cuda_rope(const dt_rope_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (a->rotary % 2 || a->rotary > a->dim) return DT_ERR_ARG;
    LAUNCH(rope_kernel, a->tokens * (a->dim - a->rotary / 2), BLOCK, stream, *a);
    return launched();
}

/* Philox4x32-10: as in dt_tensor.h, word for word. */
static __device__ void philox(uint64_t key, uint64_t counter, unsigned out[4]) {
    unsigned k0 = (unsigned)key, k1 = (unsigned)(key >> 32);
    unsigned c0 = (unsigned)counter, c1 = (unsigned)(counter >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (unsigned)(p1 >> 32) ^ c1 ^ k0;
        c1 = (unsigned)p1;
        c2 = (unsigned)(p0 >> 32) ^ c3 ^ k1;
        c3 = (unsigned)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Four columns of the full tensor share the four words of counter (token, column / 4): a thread has those of them that
   are here. least: words below it are dropped. */
KERNEL __launch_bounds__(BLOCK) dropout_kernel(dt_dropout_args a, size_t groups, uint64_t least) {
    float scale = (float)(1 / (1 - a.p));
    for (size_t at = flat_first(1); at < a.rows * groups; at += flat_step(1)) {
        size_t   r = at / groups;
        uint64_t token = (unsigned)(a.tokens ? a.tokens[r] : (int32_t)r), group = (uint64_t)a.first / 4 + at % groups;
        unsigned word[4];
        philox(a.key, token << 32 | group, word);
        for (int k = 0; k < 4; k++) {
            int64_t c = (int64_t)(4 * group) + k - a.first;
            if (c < 0 || c >= (int64_t)a.cols) continue;
            float x = ((const float *)a.in)[r * a.cols + (size_t)c];
            give(a.out, r * a.cols + (size_t)c, word[k] < least ? 0 : x * scale, a.accumulate);
        }
    }
}

static dt_status cuda_dropout(const dt_dropout_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    size_t   groups = ((size_t)(a->first % 4) + a->cols + 3) / 4;
    uint64_t least = (uint64_t)(a->p * 4294967296.0);
    if (a->cols > 0) LAUNCH(dropout_kernel, a->rows * groups, BLOCK, stream, *a, groups, least);
    return launched();
}

// ==== 12. Embedding =================================================================================================

KERNEL __launch_bounds__(BLOCK) embedding_kernel(dt_embedding_args a) {
    for (size_t i = flat_first(1); i < a.rows * a.cols; i += flat_step(1)) {
        int64_t id = a.ids[i / a.cols], row = id - a.first;
        bool    here = id >= 0 && row >= 0 && row < a.held;
        ((float *)a.out)[i] = here ? ((const float *)a.table)[(size_t)row * a.cols + i % a.cols] : 0;
    }
}

static dt_status cuda_embedding(const dt_embedding_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    dt_status status = check_indices(a->ids, a->rows, a->holes ? -1 : 0, a->vocab, stream);
    if (status != DT_OK) return status;
    LAUNCH(embedding_kernel, a->rows * a->cols, BLOCK, stream, *a);
    return launched();
}

/* A block owns OWNED rows of the table and looks through all ids, BLOCK at a time. What is its own it adds, r
   ascending, a thread for each column: no sorting, no scratch, no atomics, the CPU's bits. Every id is read held/OWNED
   times, 8,192 ids of a table of 50,257 rows 26 million times from the cache; and the rows of one id wait for each
   other, so that a batch of one word is one block's work. */
enum { OWNED = 16 };

KERNEL __launch_bounds__(BLOCK) embedding_back_kernel(dt_embedding_back_args a) {
    __shared__ int64_t owner[BLOCK];
    float             *table = (float *)a.dtable;
    for (int64_t own = (int64_t)blockIdx.x * OWNED; own < a.held; own += (int64_t)gridDim.x * OWNED) {
        int64_t end = own + OWNED < a.held ? own + OWNED : a.held;
        for (size_t i = (size_t)own * a.cols + threadIdx.x; i < (size_t)end * a.cols && !a.accumulate; i += BLOCK)
            table[i] = 0;
        for (size_t first = 0; first < a.rows; first += BLOCK) {
            size_t  have = a.rows - first < BLOCK ? a.rows - first : (size_t)BLOCK;
            int64_t row = threadIdx.x < have ? a.ids[first + threadIdx.x] - a.first : -1;
            owner[threadIdx.x] = row;
            /* a barrier, for the zeros too; most pieces have nothing for this block */
            if (!__syncthreads_or(row >= own && row < end)) continue;
            for (size_t r = 0; r < have; r++) {
                if (owner[r] < own || owner[r] >= end) continue;
                for (size_t c = threadIdx.x; c < a.cols; c += BLOCK)
                    table[(size_t)owner[r] * a.cols + c] += ((const float *)a.dout)[(first + r) * a.cols + c];
            }
            __syncthreads(); /* the ids have been read */
        }
    }
}

static dt_status cuda_embedding_back(const dt_embedding_back_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    dt_status status = a->strict ? check_indices(a->ids, a->rows, -1, a->held, stream) : DT_OK;
    if (status != DT_OK) return status;
    LAUNCH(embedding_back_kernel, (size_t)a->held, OWNED, stream, *a);
    return launched();
}

// ==== 13. Cross-entropy =============================================================================================

/* max + log(sum of exp(x - max)), for each thread of the block: the largest term is 1, so nothing overflows. The terms
   are f32, their sum is double, so that log is accurate where one term is nearly all of it. */
static __device__ double log_sum_exp(const float *x, size_t cols) {
    float most = -INFINITY;
    for (size_t c = threadIdx.x; c < cols; c += BLOCK) most = x[c] > most ? x[c] : most;
    most = block_max(most);
    double sum = 0;
    for (size_t c = threadIdx.x; c < cols; c += BLOCK) sum += (double)expf(x[c] - most);
    return (double)most + log(block_sum(sum));
}

/* One block per row. The label is the whole block's, so all its threads reach the same barriers. */
KERNEL __launch_bounds__(BLOCK) cross_entropy_kernel(dt_cross_entropy_args a) {
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const float *x = (const float *)a.logits + r * a.cols;
        int32_t      label = a.labels[r];
        double       lse = 0, loss = 0, sum = 0;
        if (label >= 0) {
            lse = log_sum_exp(x, a.vocab);
            loss = lse - (1 - a.smoothing) * (double)x[label];
        }
        if (label >= 0 && a.smoothing > 0) {
            for (size_t c = threadIdx.x; c < a.vocab; c += BLOCK) sum += (double)x[c];
            loss -= a.smoothing * (block_sum(sum) / (double)a.vocab);
        }
        if (threadIdx.x == 0) {
            ((float *)a.lse)[r] = (float)lse;
            a.row_loss[r] = loss;
        }
    }
}

/* One block for all rows: it fetches BLOCK rows at a time, and one thread adds them, r ascending. */
KERNEL __launch_bounds__(BLOCK) loss_total_kernel(dt_cross_entropy_args a) {
    __shared__ double piece[BLOCK], squares[BLOCK];
    double            total = 0, z_total = 0;
    for (size_t first = 0; first < a.rows; first += BLOCK) {
        size_t have = a.rows - first < BLOCK ? a.rows - first : (size_t)BLOCK;
        __syncthreads(); /* the piece before has been added */
        if (threadIdx.x < have) {
            double lse = (double)((const float *)a.lse)[first + threadIdx.x];
            piece[threadIdx.x] = a.row_loss[first + threadIdx.x];
            squares[threadIdx.x] = lse * lse;
        }
        __syncthreads();
        for (size_t i = 0; i < have && threadIdx.x == 0; i++) {
            total += piece[i];
            z_total += squares[i];
        }
    }
    if (threadIdx.x > 0) return;
    *a.loss = (a.add ? *a.loss : 0) + total / a.denominator;
    if (a.z_loss) *a.z_loss = (a.add ? *a.z_loss : 0) + z_total / a.denominator;
}

static dt_status cuda_cross_entropy(const dt_cross_entropy_args *args, void *stream) {
    dt_cross_entropy_args a = *args;
    if (a.dtype != DT_F32 || a.part) return DT_ERR_UNSUPPORTED;
    if (a.vocab == 0) a.vocab = a.cols;
    if (a.vocab > a.cols) return DT_ERR_ARG;
    dt_status status = check_indices(a.labels, a.rows, INT32_MIN, (int64_t)a.vocab, stream);
    if (status != DT_OK) return status;
    LAUNCH(cross_entropy_kernel, a.rows, 1, stream, a);
    LAUNCH(loss_total_kernel, 1, 1, stream, a);
    return launched();
}

/* One block per row: dlogits (+)= factor (exp(x - lse) (1 + 2 z lse) - target), nothing for a row without a label. */
KERNEL __launch_bounds__(BLOCK) cross_entropy_back_kernel(dt_cross_entropy_back_args a) {
    float factor = (float)(*a.upstream * a.scale), off = factor * (float)(a.smoothing / (double)a.vocab);
    float on = factor * (float)(1 - a.smoothing);
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const float *x = (const float *)a.logits + r * a.cols;
        float        lse = ((const float *)a.lse)[r], scale = factor * (1 + (float)(2 * a.z) * lse);
        int64_t      label = a.labels[r];
        if (label < 0 && a.accumulate) continue;
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) {
            float d = 0;
            if (label >= 0 && c < a.vocab) d = scale * expf(x[c] - lse) - off - ((int64_t)c == label ? on : 0.0f);
            give(a.dlogits, r * a.cols + c, d, a.accumulate);
        }
    }
}

static dt_status cuda_cross_entropy_back(const dt_cross_entropy_back_args *args, void *stream) {
    dt_cross_entropy_back_args a = *args;
    if (a.dtype != DT_F32 || a.all > 0) return DT_ERR_UNSUPPORTED;
    if (a.vocab == 0) a.vocab = a.cols;
    if (a.vocab > a.cols) return DT_ERR_ARG;
    dt_status status = check_indices(a.labels, a.rows, INT32_MIN, (int64_t)a.vocab, stream);
    if (status != DT_OK) return status;
    LAUNCH(cross_entropy_back_kernel, a.rows, 1, stream, a);
    return launched();
}

// ==== 14. Norm and optimizers =======================================================================================

/* Half a warp takes a run, 16 runs a block. Lane l adds elements l, l + 16, ..., then lanes are added in halves. That
   is the CPU's order, and a square of a float is exact in double: the norm has the same bits on both. */
KERNEL __launch_bounds__(BLOCK) square_sums_kernel(dt_square_sums_args a) {
    const size_t LANES = 16, EACH = BLOCK / LANES;
    size_t       runs = a.count / DT_RUN + (a.count % DT_RUN != 0), lane = threadIdx.x % LANES;
    for (size_t first = blockIdx.x * EACH; first < runs; first += gridDim.x * EACH) {
        size_t       run = first + threadIdx.x / LANES, left = run < runs ? a.count - run * DT_RUN : 0;
        const float *x = (const float *)a.in + run * DT_RUN;
        double       sum = 0;
        for (size_t j = lane; j < (left < DT_RUN ? left : DT_RUN); j += LANES) sum += (double)x[j] * (double)x[j];
        for (int w = 8; w > 0; w /= 2) sum += __shfl_down_sync(0xffffffffu, sum, w, 16);
        if (lane == 0 && run < runs) a.out[run] = sum;
    }
}

static dt_status cuda_square_sums(const dt_square_sums_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    LAUNCH(square_sums_kernel, a->count, (size_t)DT_RUN * 16, stream, *a);
    return launched();
}

/* The factors of one step, made on the host in double as on the CPU. */
struct adamw_factors { float beta1, beta2, rest1, rest2, eps, rate, root, keep, decay, grad_scale; };

/* m and v are running means of g and g^2. arXiv:1711.05101; coupled: arXiv:1412.6980 with the decay in the gradient. */
KERNEL __launch_bounds__(BLOCK) adamw_kernel(dt_adamw_args a, adamw_factors f) {
    const int N = pack<float>::N;
    float    *params = (float *)a.param, *ms = (float *)a.m, *vs = (float *)a.v;
    bool      wide = aligned16(params, a.grad, ms, vs);
    for (size_t i = flat_first(N); i < a.count; i += flat_step(N)) {
        pack<float> param = load(params, i, a.count, wide), grad = load((const float *)a.grad, i, a.count, wide);
        pack<float> m = load(ms, i, a.count, wide), v = load(vs, i, a.count, wide);
        for (int k = 0; k < N; k++) {
            float g = grad.v[k] * f.grad_scale + f.decay * param.v[k];
            m.v[k] = f.beta1 * m.v[k] + f.rest1 * g;
            v.v[k] = f.beta2 * v.v[k] + f.rest2 * g * g;
            param.v[k] = f.keep * param.v[k] - f.rate * m.v[k] / (sqrtf(v.v[k]) * f.root + f.eps);
        }
        store(params, i, a.count, wide, param);
        store(ms, i, a.count, wide, m);
        store(vs, i, a.count, wide, v);
    }
}

static dt_status cuda_adamw(const dt_adamw_args *a, void *stream) {
    if (a->dtype != DT_F32 || a->narrow) return DT_ERR_UNSUPPORTED;
    if (a->step < 1) return DT_ERR_ARG;
    adamw_factors f;
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
    LAUNCH(adamw_kernel, a->count, BLOCK * pack<float>::N, stream, *a, f);
    return launched();
}

/* Without momentum the buffer is neither read nor written; in the first step it is written only. */
KERNEL __launch_bounds__(BLOCK) sgd_kernel(dt_sgd_args a) {
    const int N = pack<float>::N;
    float    *params = (float *)a.param, *buffers = a.momentum != 0 ? (float *)a.momentum_buffer : NULL;
    float     lr = (float)a.lr, decay = (float)a.weight_decay, scale = (float)a.grad_scale;
    float     momentum = (float)a.momentum;
    bool      wide = aligned16(params, a.grad, buffers);
    for (size_t i = flat_first(N); i < a.count; i += flat_step(N)) {
        pack<float> param = load(params, i, a.count, wide), g = load((const float *)a.grad, i, a.count, wide);
        for (int k = 0; k < N; k++) g.v[k] = g.v[k] * scale + decay * param.v[k];
        if (buffers && a.step > 1) {
            pack<float> b = load(buffers, i, a.count, wide);
            for (int k = 0; k < N; k++) g.v[k] = momentum * b.v[k] + g.v[k];
        }
        if (buffers) store(buffers, i, a.count, wide, g);
        for (int k = 0; k < N; k++) param.v[k] -= lr * g.v[k];
        store(params, i, a.count, wide, param);
    }
}

static dt_status cuda_sgd(const dt_sgd_args *a, void *stream) {
    if (a->dtype != DT_F32 || a->narrow) return DT_ERR_UNSUPPORTED;
    if (a->momentum != 0 && !a->momentum_buffer) return DT_ERR_ARG;
    LAUNCH(sgd_kernel, a->count, BLOCK * pack<float>::N, stream, *a);
    return launched();
}

// ==== 15. Matrix product ============================================================================================

/* Sums live in registers, which only loops of constant length that are unrolled can index. */
#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#define UNROLL_BY(n) DT_PRAGMA(unroll n)
#define DT_PRAGMA(x) _Pragma(#x)
#else
#define UNROLL
#define UNROLL_BY(n)
#endif

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
#undef PTX
#else
#define HAS_SM80 1
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
static void copies_here() { dtc_cp_async_commit(), dtc_cp_async_wait(0); }
#endif

/* Two numbers in a word, the first in its low half. */
template <class T>
static __device__ unsigned pair_of(float x, float y) {
    T low, high;
    round_to(&low, x);
    round_to(&high, y);
    return low.bits | (unsigned)high.bits << 16;
}

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

/* ---- the product ---- */

/* out[at] (+)= v; wide: of float, else of T */
template <class T>
static __device__ void give_as(void *out, int wide, int64_t at, float v, int accumulate) {
    T     *narrow = (T *)out + at;
    float *full = (float *)out + at;
    if (wide) *full = accumulate ? *full + v : v;
    else round_to(narrow, accumulate ? widen(*narrow) + v : v);
}

/* c[at] in column j from its sum of products: all the fusions, in their order. The pointers may be one. */
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

/* A or B as the kernels see it: `rows` of c's rows or columns. across: neighbours of one k lie together. */
struct operand {
    const void *p;
    int64_t     ld, stride;
    int         rows;
    bool        across, wide;
};

static operand operand_of(const void *p, int64_t rows, int64_t k, int64_t ld, int64_t stride, bool across,
    size_t size) {
    size_t  all = (size_t)p | (size_t)(ld | stride | (across ? rows : k)) * size;
    operand x = { p, ld, stride, (int)rows, across, all % 16 == 0 };
    return x;
}

/* Where a block's tile of c begins. */
struct corner { int batch, row, col; };

static __device__ corner corner_of(const dt_matmul_args &a, int tile) {
    int    across = ((int)a.n + tile - 1) / tile, down = ((int)a.m + tile - 1) / tile, i = blockIdx.x;
    corner c = { i / across / down, i / across % down * tile, i % across * tile };
    return c;
}

/* In f32. 16 x 16 threads, each with R x R sums; an element is one chain of multiply-adds, k ascending, whatever the
   tile. What comes from memory next is under way during the sums. */
enum { DEPTH = 16 };

template <int R>
static __device__ void fetch_f32(pack<float> *next, const operand &x, int batch, int row0, int k0, int k) {
    const float *p = (const float *)x.p + batch * x.stride;
    for (int i = 0; i < R / 4; i++) {
        int     at = threadIdx.x + i * BLOCK, in_line = x.across ? 4 * R : DEPTH / 4;
        int     line = (x.across ? k0 : row0) + at / in_line, lines = x.across ? k : x.rows;
        int     first = (x.across ? row0 : k0) + at % in_line * 4, end = x.across ? x.rows : k;
        next[i] = load(p + (line < lines ? line * x.ld : 0), (size_t)first, line < lines ? (size_t)end : 0, x.wide);
    }
}

/* Into the tile (DEPTH,16 R), of packs along the rows. */
template <int R>
static __device__ void keep_f32(pack<float> (*tile)[4 * R + 1], const pack<float> *next, int across) {
    for (int i = 0; i < R / 4; i++) {
        int at = threadIdx.x + i * BLOCK, row = at / (DEPTH / 4), k = at % (DEPTH / 4) * 4;
        if (across) tile[at / (4 * R)][at % (4 * R)] = next[i];
        else for (int e = 0; e < 4; e++) tile[k + e][row / 4].v[row % 4] = next[i].v[e];
    }
}

template <int R>
KERNEL __launch_bounds__(BLOCK, 2) matmul_f32_kernel(dt_matmul_args a, operand x, operand y) {
    __shared__ pack<float> xs[2][DEPTH][4 * R + 1], ys[2][DEPTH][4 * R + 1];
    pack<float> next_x[R / 4], next_y[R / 4];
    float       sum[R][R] = { { 0 } };
    corner      c = corner_of(a, 16 * R);
    int         down = threadIdx.x / 16, across = threadIdx.x % 16;
    bool        idle = c.row + down * 4 >= a.m || c.col + across * 4 >= a.n;
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
            UNROLL for (int i = 0; i < R * R; i++)
                sum[i / R][i % R] += u[i / R / 4].v[i / R % 4] * v[i % R / 4].v[i % 4];
        }
    }
    UNROLL for (int at = 0; at < R * R; at++) {
        int     i = at / R, j = at % R;
        int     row = c.row + i / 4 * 64 + down * 4 + i % 4, col = c.col + j / 4 * 64 + across * 4 + j % 4;
        if (row < a.m && col < a.n) finish<float>(a, c.batch * a.stride_c + row * a.ldc + col, col, sum[i][j]);
    }
}

/* bf16 and f16 on tensor cores: 128 x 128 of c, 64 of k at a time; eight warps with 64 x 32 of c each. */
enum { SIDE = 128, STEP = 64, MATMUL_STAGES = 2 };

template <class T>
static __device__ void fetch_side(T *tile, const operand &x, int batch, int row0, int k0, int k) {
    const T *p = (const T *)x.p + batch * x.stride;
    if (x.across) fetch_tile<T, STEP, SIDE, BLOCK>(tile, p + k0 * x.ld + row0, x.ld, k - k0, x.rows - row0, x.wide);
    else fetch_tile<T, SIDE, STEP, BLOCK>(tile, p + row0 * x.ld + k0, x.ld, x.rows - row0, k - k0, x.wide);
}

/* ACROSS_X, ACROSS_Y: x.across, y.across */
template <class T, bool ACROSS_X, bool ACROSS_Y>
static __device__ void multiply_tiles(float (&sum)[4][4][4], const T *xs, const T *ys, int row, int col) {
    int at_x = ACROSS_X ? columns_first<SIDE>() : rows_first<STEP>();
    int at_y = ACROSS_Y ? rows_first<SIDE>() : columns_first<STEP>();
    UNROLL for (int k = 0; k < STEP; k += 16) {
        unsigned u[4][4], v[2][4];
        UNROLL for (int i = 0; i < 4; i++) {
            if (ACROSS_X) ldmatrix_trans(u[i], xs + k * SIDE + (at_x ^ (row + 16 * i)));
            else ldmatrix(u[i], xs + (row + 16 * i) * STEP + (at_x ^ k));
        }
        UNROLL for (int j = 0; j < 2; j++) {
            if (ACROSS_Y) ldmatrix_trans(v[j], ys + k * SIDE + (at_y ^ (col + 16 * j)));
            else ldmatrix(v[j], ys + (col + 16 * j) * STEP + (at_y ^ k));
        }
        UNROLL for (int i = 0; i < 4; i++)
            UNROLL for (int j = 0; j < 4; j++) mma(T(), sum[i][j], u[i], v[j / 2] + j % 2 * 2);
    }
}

template <class T, bool ACROSS_X, bool ACROSS_Y>
KERNEL __launch_bounds__(BLOCK, 2) matmul_narrow_kernel(dt_matmul_args a, operand x, operand y) {
    DT_DYN_SMEM(T, shared);
    const int SIZE = SIDE * STEP;
    float     sum[4][4][4] = { { { 0 } } };
    corner    c = corner_of(a, SIDE);
    int       warp = threadIdx.x / 32, lane = threadIdx.x % 32, down = warp / 4 * 64, across = warp % 4 * 32;
    T        *xs = shared, *ys = shared + MATMUL_STAGES * SIZE;
    bool      idle = c.row + down >= a.m || c.col + across >= a.n;
    for (int k0 = -STEP, s = 1; k0 < a.k; k0 += STEP, s ^= 1) {
        copies_here();
        __syncthreads(); /* the tiles of this step are there, and all have left those of the step before */
        if (k0 + STEP < a.k) {
            fetch_side(xs + (s ^ 1) * SIZE, x, c.batch, c.row, k0 + STEP, a.k);
            fetch_side(ys + (s ^ 1) * SIZE, y, c.batch, c.col, k0 + STEP, a.k);
            copies_sent();
        }
        if (k0 >= 0 && !idle)
            multiply_tiles<T, ACROSS_X, ACROSS_Y>(sum, xs + s * SIZE, ys + s * SIZE, down, across);
    }
    UNROLL for (int i = 0; i < 64; i++) {
        int row = c.row + down + i / 16 * 16 + i / 2 % 2 * 8 + lane / 4;
        int col = c.col + across + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
        if (row < a.m && col < a.n)
            finish<T>(a, c.batch * a.stride_c + row * a.ldc + col, col, sum[i / 16][i / 4 % 4][i % 4]);
    }
}

/* Blocks of a grid; 0: more than a grid can have. */
static unsigned blocks_of(int64_t rows, int64_t row_tile, int64_t cols, int64_t col_tile, int64_t batch) {
    double all = ceil((double)rows / (double)row_tile) * ceil((double)cols / (double)col_tile) * (double)batch;
    return all <= INT32_MAX ? (unsigned)all : 0;
}

/* A launch with more shared memory than the 48 KB that need no permission; permission is the device's, and cheap. */
#define LAUNCH_SHARED(kernel, blocks, threads, bytes, stream, ...) \
    do { \
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)) != cudaSuccess) { \
            (void)cudaGetLastError(); \
            return DT_ERR_UNSUPPORTED; /* the device has less */ \
        } \
        DT_LAUNCH((kernel), blocks, threads, bytes, stream_of(stream), __VA_ARGS__); \
    } while (0)

static dt_status matmul_f32(const dt_matmul_args &a, const operand &x, const operand &y, void *stream) {
    unsigned large = blocks_of(a.m, 128, a.n, 128, a.batch), small = blocks_of(a.m, 64, a.n, 64, a.batch);
    if (large == 0) return DT_ERR_UNSUPPORTED;
    if (large >= 128 || small == 0) DT_LAUNCH(matmul_f32_kernel<8>, large, BLOCK, 0, stream_of(stream), a, x, y);
    else DT_LAUNCH(matmul_f32_kernel<4>, small, BLOCK, 0, stream_of(stream), a, x, y);
    return launched();
}

template <class T>
static dt_status matmul_narrow(const dt_matmul_args &a, const operand &x, const operand &y, void *stream) {
    unsigned blocks = blocks_of(a.m, SIDE, a.n, SIDE, a.batch);
    size_t   bytes = 2 * MATMUL_STAGES * SIDE * STEP * sizeof(T);
    if (blocks == 0) return DT_ERR_UNSUPPORTED;
#define GO(X, Y) LAUNCH_SHARED((matmul_narrow_kernel<T, X, Y>), blocks, BLOCK, bytes, stream, a, x, y)
    if (x.across && y.across) GO(true, true);
    else if (x.across) GO(true, false);
    else if (y.across) GO(false, true);
    else GO(false, false);
#undef GO
    return launched();
}

static dt_status own_matmul(const dt_matmul_args &a, void *stream) {
    size_t  size = a.dtype == DT_F32 ? 4 : 2;
    operand x = operand_of(a.a, a.m, a.k, a.lda, a.stride_a, a.trans_a != 0, size);
    operand y = operand_of(a.b, a.n, a.k, a.ldb, a.stride_b, a.trans_b == 0, size);
    if (a.dtype == DT_F32) return matmul_f32(a, x, y, stream);
    return a.dtype == DT_BF16 ? matmul_narrow<bf16>(a, x, y, stream) : matmul_narrow<f16>(a, x, y, stream);
}

static dt_status cuda_matmul(const dt_matmul_args *args, void *stream) {
    dt_matmul_args a = *args;
    if (a.dtype != DT_F32 && a.dtype != DT_BF16 && a.dtype != DT_F16) return DT_ERR_UNSUPPORTED;
    if (a.m < 0 || a.n < 0 || a.k < 0 || a.batch < 0 || a.activation < 0 || a.activation >= DT_ACT_AFFINE ||
        (a.derivative && !a.before)) return DT_ERR_ARG;
    if (a.batch == 0) a.batch = 1;
    if (a.lda == 0) a.lda = a.trans_a ? a.m : a.k;
    if (a.ldb == 0) a.ldb = a.trans_b ? a.k : a.n;
    if (a.ldc == 0) a.ldc = a.n;
    if (a.m >= INT32_MAX - SIDE || a.n >= INT32_MAX - SIDE || a.k >= INT32_MAX - STEP) return DT_ERR_UNSUPPORTED;
    return a.m == 0 || a.n == 0 ? launched() : own_matmul(a, stream);
}

// ==== 16. Attention =================================================================================================

/* FlashAttention-2, arXiv:2307.08691. A block has ROWS queries (in keys_back: keys) and walks over the other side, COLS
   at a time, of which a warp takes PART at a time; 16 M of the rows are a warp's. Scores stay in registers, as mma
   leaves them: c[i][j][e] of lane 4 g + t is row 16 i + 8 (e / 2) + g, column 8 j + 2 t + e % 2. A lane has 2 M rows:
   row r is in c[r / 2], with r % 2 for e / 2. f32 is computed in the same places by plain multiply-adds. D is the
   dimension of a head, padded. */

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

/* The first tile of keys from i on that a span of queries sees some of. */
static __device__ int next_keys(const task &s, int sequence, int row0, int rows, int i) {
    span q = span_of(s.q, sequence, row0, rows);
    while (i < s.k.tiles && none_seen(s, q, span_of(s.k, sequence, i * s.k.each, s.k.each))) i++;
    return i;
}

/* The first tile of queries from i on; they come once for each head of a group. */
struct turn { int head, tile; };

static __device__ turn next_queries(const task &s, int sequence, int row0, int rows, turn i) {
    span k = span_of(s.k, sequence, row0, rows);
    for (; i.head < s.group; i.head++, i.tile = 0)
        for (; i.tile < s.q.tiles; i.tile++)
            if (!none_seen(s, span_of(s.q, sequence, i.tile * s.q.each, s.q.each), k)) return i;
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

/* Minus infinity for what is not seen; rows, cols: what `look` says of the warp's rows and of the columns. */
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

/* The same for columns that are not there, from number `have` on. */
template <int M, int J>
static __device__ void hide_rest(float (&c)[M][J][4], int have) {
    UNROLL for (int e = 0; e < M * J * 4; e++)
        if (e / 4 % J * 8 + (int)threadIdx.x % 4 * 2 + e % 2 >= have) c[e / 4 / J][e / 4 % J][e % 4] = -INFINITY;
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

/* ---- tiles ---- */

/* What fits into the registers, 64 K for the THREADS of AT_ONCE blocks, and into the 99 KB of shared memory that every
   GPU since sm_80 gives a block. WHAT: 0 the forward, 1 the backward of queries, 2 that of keys. */
template <class T, int D, int WHAT>
struct form {
    static constexpr bool NARROW = sizeof(T) == 2;
    static constexpr int M = NARROW && (D == 64 || (D == 128 && WHAT < 2)) ? 2 : 1;
    static constexpr int COLS = NARROW ? (D == 64 || (D == 128 && WHAT != 1) ? 64 : 32)
                                       : (D == 256 || (D == 128 && WHAT) ? 16 : 32);
    static constexpr int PART = !NARROW ? COLS : D == 256 && WHAT ? 16 : 32;
    static constexpr int OF_WARPS = NARROW || D == 64 || (D == 128 && !WHAT) ? 4 : 2;
    static constexpr int STAGES = (NARROW && D == 256 && WHAT) || (!NARROW && (D > 64 || WHAT)) ? 1 : 2;
    static constexpr int AT_ONCE = NARROW && D == 64 && !WHAT ? 3 : 2;
    static constexpr int ROWS = 16 * M * OF_WARPS, THREADS = 32 * OF_WARPS;
};

/* A tile of two arrays whose rows lie alike. */
template <class T, int ROWS, int D, int THREADS>
static __device__ void fetch_two(T *x, T *y, const void *from_x, const void *from_y, int64_t at, int ld, int rows,
    const task &s) {
    fetch_tile<T, ROWS, D, THREADS>(x, (const T *)from_x + at, ld, rows, s.dim, s.wide);
    fetch_tile<T, ROWS, D, THREADS>(y, (const T *)from_y + at, ld, rows, s.dim, s.wide);
    copies_sent();
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

/* p = e^(scores - max) in place of the scores, its sums to `sum`, and what was summed before made relative to the new
   maximum. A row that sees nothing yet has maximum -infinity. */
template <int M, int J, int N>
static __device__ void softmax_step(float (&c)[M][J][4], float *most, float *sum, float (&out)[M][N][4], float power) {
    UNROLL for (int r = 0; r < 2 * M; r++) {
        float now = most[r], total = 0;
        UNROLL for (int at = 0; at < 2 * J; at++) now = fmaxf(now, c[r / 2][at / 2][r % 2 * 2 + at % 2]);
        now = row_max(now);
        float base = now == -INFINITY ? 0 : now * power, factor = exp2_of(most[r] * power - base);
        UNROLL for (int at = 0; at < 2 * J; at++) {
            float *p = &c[r / 2][at / 2][r % 2 * 2 + at % 2];
            *p = exp2_of(*p * power - base);
            total += *p;
        }
        UNROLL for (int at = 0; at < 2 * N; at++) out[r / 2][at / 2][r % 2 * 2 + at % 2] *= factor;
        most[r] = now;
        sum[r] = sum[r] * factor + total;
    }
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
KERNEL __launch_bounds__((form<T, D, 0>::THREADS), (form<T, D, 0>::AT_ONCE))
    attention_kernel(dt_attention_args a, task s) {
    typedef form<T, D, 0> F;
    const int M = F::M, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, qs);
    __shared__ int2  rows[F::ROWS], cols[F::STAGES][F::COLS];
    __shared__ float keep[F::ROWS];
    T       *ks = qs + F::ROWS * D, *vs = ks + F::STAGES * SIZE;
    float    out[M][D / 8][4] = { { { 0 } } }, c[M][F::PART / 8][4], most[2 * M], sum[2 * M];
    int      row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS; /* the last see most, and begin first */
    int      sequence = s.first_sequence + blockIdx.z;
    int      own = threadIdx.x / 32 * 16 * M; /* the warp's first row */
    auto     fetch = [&](int i, int stage) {
        int kv = s.first_kv + anew(blockIdx.y) / s.group;
        fetch_two<T, F::COLS, D, F::THREADS>(ks + stage * SIZE, vs + stage * SIZE, a.k, a.v,
                                             key_at(s, sequence, i * F::COLS, kv), s.k_row,
                                             s.k.length - i * F::COLS, s);
        if (threadIdx.x < F::COLS) cols[stage][threadIdx.x] = look(s, s.k, sequence, i * F::COLS + threadIdx.x);
    };
    if (threadIdx.x < F::ROWS) rows[threadIdx.x] = look(s, s.q, sequence, row0 + threadIdx.x);
    UNROLL for (int r = 0; r < 2 * M; r++) {
        most[r] = -INFINITY;
        sum[r] = 0;
    }
    int i = next_keys(s, sequence, row0, F::ROWS, 0);
    fetch_tile<T, F::ROWS, D, F::THREADS>(qs, (const T *)a.q + query_at(s, sequence, row0, blockIdx.y), s.q_row,
                                          s.q.length - row0, s.dim, s.wide);
    if (i < s.k.tiles) fetch(i, 0);
    for (int stage = 0; i < s.k.tiles; stage = (stage + 1) % F::STAGES) {
        copies_here();
        __syncthreads(); /* this tile is there, and all have left the other stage */
        int next = next_keys(s, sequence, row0, F::ROWS, i + 1);
        if (F::STAGES == 2 && next < s.k.tiles) fetch(next, stage ^ 1);
        UNROLL_BY(1) for (int part = 0; part < F::COLS; part += F::PART) {
            int  col0 = i * F::COLS + part;
            span q = span_of(s.q, sequence, row0 + own, 16 * M), k = span_of(s.k, sequence, col0, F::PART);
            if (row0 + own >= s.q.length || col0 >= s.k.length || none_seen(s, q, k)) continue;
            scores<D>(c, qs, own, ks + stage * SIZE + part * D, s.dim);
            if (!all_seen(s, q, k)) hide(c, false, rows + own, cols[stage] + part);
            if (col0 + F::PART > s.k.length) hide_rest(c, s.k.length - col0);
            softmax_step(c, most, sum, out, s.power);
            mix<D>(out, c, vs + stage * SIZE + part * D, s.dim);
        }
        if (F::STAGES == 1) __syncthreads();
        if (F::STAGES == 1 && next < s.k.tiles) fetch(next, 0);
        i = next;
    }
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

/* delta = sum of dout out for each row, a warp per row. */
template <class T>
KERNEL __launch_bounds__(BLOCK) delta_kernel(dt_attention_back_args a, task s, float *delta) {
    int     row = blockIdx.x * WARPS + threadIdx.x / 32, sequence = s.first_sequence + blockIdx.z;
    int     h = s.first_kv * s.group + blockIdx.y;
    int64_t at = query_at(s, sequence, row, h);
    float   sum = 0;
    if (row >= s.q.length) return;
    for (int d = threadIdx.x % 32; d < s.dim; d += 32) {
        float out = a.wide ? ((const float *)a.out)[at + d] : widen(((const T *)a.out)[at + d]);
        sum += widen(((const T *)a.dout)[at + d]) * out;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) delta[delta_at(s, sequence, h, row)] = sum;
}

/* lse of a query in powers of two; infinity, which makes all of p zero, for one that is not there or sees nothing. */
static __device__ float lse_of(const void *lse, const task &s, int sequence, int h, int row) {
    float x = row < s.q.length ? ((const float *)lse)[(sequence * s.heads + h) * s.q.length + row] : INFINITY;
    return x == -INFINITY ? INFINITY : x * (float)LOG2_E;
}

static __device__ float delta_of(const float *delta, const task &s, int sequence, int h, int row) {
    return row < s.q.length ? delta[delta_at(s, sequence, h, row)] : 0;
}

/* dq = scale ds k, where p = e^(scale q k - lse), dp = dout v and ds = p (dp - delta). */
template <class T, int D>
KERNEL __launch_bounds__((form<T, D, 1>::THREADS), (form<T, D, 1>::AT_ONCE))
    queries_back_kernel(dt_attention_back_args a, task s, const float *delta) {
    typedef form<T, D, 1> F;
    const int M = F::M, J = F::PART / 8, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, qs);
    __shared__ int2 rows[F::ROWS], cols[F::STAGES][F::COLS];
    T       *ds = qs + F::ROWS * D, *ks = ds + F::ROWS * D, *vs = ks + F::STAGES * SIZE;
    float    dq[M][D / 8][4] = { { { 0 } } }, c[M][J][4], dp[M][J][4], lse[2 * M], mean[2 * M];
    int      row0 = (s.q.tiles - 1 - blockIdx.x) * F::ROWS, own = threadIdx.x / 32 * 16 * M;
    int      sequence = s.first_sequence + blockIdx.z, h = s.first_kv * s.group + blockIdx.y;
    auto     fetch = [&](int i, int stage) {
        int kv = s.first_kv + anew(blockIdx.y) / s.group;
        fetch_two<T, F::COLS, D, F::THREADS>(ks + stage * SIZE, vs + stage * SIZE, a.k, a.v,
                                             key_at(s, sequence, i * F::COLS, kv), s.k_row,
                                             s.k.length - i * F::COLS, s);
        if (threadIdx.x < F::COLS) cols[stage][threadIdx.x] = look(s, s.k, sequence, i * F::COLS + threadIdx.x);
    };
    if (threadIdx.x < F::ROWS) rows[threadIdx.x] = look(s, s.q, sequence, row0 + threadIdx.x);
    UNROLL for (int r = 0; r < 2 * M; r++) {
        lse[r] = lse_of(a.lse, s, sequence, h, row0 + own + 8 * r + threadIdx.x % 32 / 4);
        mean[r] = delta_of(delta, s, sequence, h, row0 + own + 8 * r + threadIdx.x % 32 / 4);
    }
    int i = next_keys(s, sequence, row0, F::ROWS, 0);
    fetch_two<T, F::ROWS, D, F::THREADS>(qs, ds, a.q, a.dout, query_at(s, sequence, row0, h), s.q_row,
                                         s.q.length - row0, s);
    if (i < s.k.tiles) fetch(i, 0);
    for (int stage = 0; i < s.k.tiles; stage = (stage + 1) % F::STAGES) {
        copies_here();
        __syncthreads();
        int next = next_keys(s, sequence, row0, F::ROWS, i + 1);
        if (F::STAGES == 2 && next < s.k.tiles) fetch(next, stage ^ 1);
        UNROLL_BY(1) for (int part = 0; part < F::COLS; part += F::PART) {
            int  col0 = i * F::COLS + part;
            span q = span_of(s.q, sequence, row0 + own, 16 * M), k = span_of(s.k, sequence, col0, F::PART);
            T   *kt = ks + stage * SIZE + part * D, *vt = vs + stage * SIZE + part * D;
            if (row0 + own >= s.q.length || col0 >= s.k.length || none_seen(s, q, k)) continue;
            scores<D>(c, qs, own, kt, s.dim);
            scores<D>(dp, ds, own, vt, s.dim);
            if (!all_seen(s, q, k)) hide(c, false, rows + own, cols[stage] + part);
            if (col0 + F::PART > s.k.length) hide_rest(c, s.k.length - col0);
            UNROLL for (int e = 0; e < M * J * 4; e++) {
                int    m = e / 4 / J, j = e / 4 % J, r = 2 * m + e % 4 / 2;
                float *x = &c[m][j][e % 4];
                *x = exp2_of(*x * s.power - lse[r]) * (dp[m][j][e % 4] - mean[r]);
            }
            mix<D>(dq, c, kt, s.dim);
        }
        if (F::STAGES == 1) __syncthreads();
        if (F::STAGES == 1 && next < s.k.tiles) fetch(next, 0);
        i = next;
    }
    __syncthreads();
    h = s.first_kv * s.group + anew(blockIdx.y);
    row0 = (s.q.tiles - 1 - anew(blockIdx.x)) * F::ROWS;
    target to = { a.dq, a.wide, a.accumulate_q, NULL, query_at(s, sequence, row0 + own, h), s.q_row,
                  s.q.length - row0 - own, s.scale };
    give_rows<T, D>((float *)qs + own * D, dq, to, s);
}

/* dk = scale ds^T q and dv = p^T dout, over the queries of all heads that share the key's, head after head. WHAT: 1 dk,
   2 dv, 3 both, for which the sums of a large D are too many. */
template <class T, int D, int WHAT>
KERNEL __launch_bounds__((form<T, D, 2>::THREADS), (form<T, D, 2>::AT_ONCE))
    keys_back_kernel(dt_attention_back_args a, task s, const float *delta) {
    typedef form<T, D, 2> F;
    const int M = F::M, J = F::PART / 8, SIZE = F::COLS * D;
    DT_DYN_SMEM(T, ks);
    __shared__ float lse[F::STAGES][F::COLS], mean[F::STAGES][F::COLS];
    __shared__ int2  rows[F::ROWS], cols[F::STAGES][F::COLS];
    T       *vs = ks + F::ROWS * D, *qs = vs + F::ROWS * D, *ds = qs + F::STAGES * SIZE;
    float    dk[M][D / 8][4] = { { { 0 } } }, dv[M][D / 8][4] = { { { 0 } } }, c[M][J][4], dp[M][J][4];
    int      row0 = blockIdx.x * F::ROWS, own = threadIdx.x / 32 * 16 * M;
    int      sequence = s.first_sequence + blockIdx.z, kv = s.first_kv + blockIdx.y, ld = s.k_row;
    auto     fetch = [&](turn i, int stage) {
        int row = i.tile * F::COLS, h = kv * s.group + i.head, thread = threadIdx.x;
        fetch_two<T, F::COLS, D, F::THREADS>(qs + stage * SIZE, ds + stage * SIZE, a.q, a.dout,
                                             query_at(s, sequence, row, h), s.q_row, s.q.length - row, s);
        if (thread >= F::COLS) return;
        lse[stage][thread] = lse_of(a.lse, s, sequence, h, row + thread);
        mean[stage][thread] = delta_of(delta, s, sequence, h, row + thread);
        cols[stage][thread] = look(s, s.q, sequence, row + thread);
    };
    if (threadIdx.x < F::ROWS) rows[threadIdx.x] = look(s, s.k, sequence, row0 + threadIdx.x);
    turn next = { 0, 0 };
    next = next_queries(s, sequence, row0, F::ROWS, next);
    fetch_two<T, F::ROWS, D, F::THREADS>(ks, vs, a.k, a.v, key_at(s, sequence, row0, kv), ld, s.k.length - row0, s);
    if (next.head < s.group) fetch(next, 0);
    for (int stage = 0; next.head < s.group; stage = (stage + 1) % F::STAGES) {
        int tile = next.tile++;
        copies_here();
        __syncthreads();
        next = next_queries(s, sequence, row0, F::ROWS, next);
        if (F::STAGES == 2 && next.head < s.group) fetch(next, stage ^ 1);
        UNROLL_BY(1) for (int part = 0; part < F::COLS; part += F::PART) {
            int  col0 = tile * F::COLS + part;
            span q = span_of(s.q, sequence, col0, F::PART), k = span_of(s.k, sequence, row0 + own, 16 * M);
            T   *qt = qs + stage * SIZE + part * D, *dt = ds + stage * SIZE + part * D;
            if (row0 + own >= s.k.length || col0 >= s.q.length || none_seen(s, q, k)) continue;
            scores<D>(c, ks, own, qt, s.dim);
            if (!all_seen(s, q, k)) hide(c, true, rows + own, cols[stage] + part);
            UNROLL for (int e = 0; e < M * J * 4; e++) {
                float *p = &c[e / 4 / J][e / 4 % J][e % 4];
                *p = exp2_of(*p * s.power - lse[stage][part + e / 4 % J * 8 + threadIdx.x % 4 * 2 + e % 2]);
            }
            if (WHAT & 2) mix<D>(dv, c, dt, s.dim);
            if (WHAT == 2) continue;
            scores<D>(dp, vs, own, dt, s.dim);
            UNROLL for (int e = 0; e < M * J * 4; e++)
                c[e / 4 / J][e / 4 % J][e % 4] *= dp[e / 4 / J][e / 4 % J][e % 4] -
                    mean[stage][part + e / 4 % J * 8 + threadIdx.x % 4 * 2 + e % 2];
            mix<D>(dk, c, qt, s.dim);
        }
        if (F::STAGES == 1) __syncthreads();
        if (F::STAGES == 1 && next.head < s.group) fetch(next, 0);
    }
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

/* Cuts a task into tiles; where there are arrays their spans are made at `work`, of which *used bytes are then taken. */
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

template <class T, int D>
static dt_status attention_of(const dt_attention_args &a, task s, void *stream) {
    typedef form<T, D, 0> F;
    size_t    bytes = (size_t)(F::ROWS + 2 * F::STAGES * F::COLS) * D * sizeof(T), used;
    dt_status status = cut(&s, a.batch, F::ROWS, F::COLS, (char *)a.work, a.work_bytes, &used, stream);
    if (status != DT_OK) return status;
    for (int64_t b = 0; b < a.batch && s.q.tiles > 0; b += MAX_GRID) {
        dim3 grid(s.q.tiles, s.heads, (unsigned)(a.batch - b < MAX_GRID ? a.batch - b : MAX_GRID));
        s.first_sequence = (int)b;
        LAUNCH_SHARED((attention_kernel<T, D>), grid, F::THREADS, bytes, stream, a, s);
    }
    return launched();
}

#define BY_DIM(function, T, a, s, stream) \
    ((a).dim <= 64    ? function<T, 64>(a, s, stream) \
     : (a).dim <= 128 ? function<T, 128>(a, s, stream) \
                      : function<T, 256>(a, s, stream))

#define BY_TYPE(function, a, s, stream) \
    ((a).dtype == DT_F32    ? BY_DIM(function, float, a, s, stream) \
     : (a).dtype == DT_BF16 ? BY_DIM(function, bf16, a, s, stream) \
                            : BY_DIM(function, f16, a, s, stream))

static dt_status cuda_attention(const dt_attention_args *args, void *stream) {
    dt_attention_args a = *args;
    task              s;
    dt_status         status = task_of(&s, a, (size_t)a.q | (size_t)a.k | (size_t)a.v);
    if (status != DT_OK) return status;
    if (a.dtype == DT_F32) a.wide = 1;
    s.fours = s.fours && (size_t)a.out % 16 == 0;
    return BY_TYPE(attention_of, a, s, stream);
}

/* Of `sequences` and kv_heads, of which the tasks name the first. */
template <class T, int D>
static dt_status attention_back_some(const dt_attention_back_args &a, const task &q, const task &k, int sequences,
    int kv_heads, float *delta, void *stream) {
    typedef form<T, D, 1> Q;
    typedef form<T, D, 2> K;
    const int BOTH = D <= 128 ? 3 : 1;
    size_t    bytes_q = (size_t)2 * (Q::ROWS + Q::STAGES * Q::COLS) * D * sizeof(T);
    size_t    bytes_k = (size_t)2 * (K::ROWS + K::STAGES * K::COLS) * D * sizeof(T);
    dim3      rows((unsigned)tiles_of(a.tq, WARPS), kv_heads * q.group, sequences);
    dim3      grid_q(q.q.tiles, kv_heads * q.group, sequences), grid_k(k.k.tiles, kv_heads, sequences);
    if (a.tq > 0) DT_LAUNCH(delta_kernel<T>, rows, BLOCK, 0, stream_of(stream), a, q, delta);
    if (a.tq > 0 && a.dq)
        LAUNCH_SHARED((queries_back_kernel<T, D>), grid_q, Q::THREADS, bytes_q, stream, a, q, delta);
    if (a.tk == 0) return DT_OK;
    if (BOTH == 3 && a.dk && a.dv) {
        LAUNCH_SHARED((keys_back_kernel<T, D, BOTH>), grid_k, K::THREADS, bytes_k, stream, a, k, delta);
        return DT_OK;
    }
    if (a.dk) LAUNCH_SHARED((keys_back_kernel<T, D, 1>), grid_k, K::THREADS, bytes_k, stream, a, k, delta);
    if (a.dv) LAUNCH_SHARED((keys_back_kernel<T, D, 2>), grid_k, K::THREADS, bytes_k, stream, a, k, delta);
    return DT_OK;
}

/* As many sequences at a time as the scratch has room for deltas of, or else as many heads of one. */
template <class T, int D>
static dt_status attention_back_of(const dt_attention_back_args &a, task q, void *stream) {
    typedef form<T, D, 1> Q;
    typedef form<T, D, 2> K;
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
            status = attention_back_some<T, D>(a, q, k, (int)some, (int)(a.kv_heads - kv < kv_heads ? a.kv_heads - kv
                                                                         : kv_heads), delta, stream);
        }
    }
    return status == DT_OK ? launched() : status;
}

static dt_status cuda_attention_back(const dt_attention_back_args *args, void *stream) {
    dt_attention_back_args a = *args;
    task                   s;
    dt_status              status = task_of(&s, a, (size_t)a.q | (size_t)a.k | (size_t)a.v | (size_t)a.dout);
    if (status != DT_OK) return status;
    if (a.dtype == DT_F32) a.wide = 1;
    s.fours = s.fours && ((size_t)a.dq | (size_t)a.dk | (size_t)a.dv) % 16 == 0;
    return BY_TYPE(attention_back_of, a, s, stream);
}
#undef BY_DIM
#undef BY_TYPE
#undef LOG2_E

// ==== 17. The table =================================================================================================

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
        .work_bytes = (size_t)32 << 20, /* what cuBLASLt is recommended to have on Hopper */
        .fill = cuda_fill,
        .init = NULL,
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
        .cross_entropy_join = NULL,
        .cross_entropy_back = cuda_cross_entropy_back,
        .mse = NULL,
        .mse_back = NULL,
        .square_sums = cuda_square_sums,
        .adamw = cuda_adamw,
        .sgd = cuda_sgd,
        .momentum = NULL,
        .frozen_adam = NULL,
        .sign_pack = NULL,
        .sign_unpack = NULL,
    };
    return &table;
}

/* cudaGetDeviceCount does not write its result when it fails, and without a driver it answers "driver version is
   insufficient"; cudaDriverGetVersion tells the two apart: version 0 is no driver at all. */
extern "C" dt_status dt_cuda_ready(char *text, size_t text_bytes) {
    int         devices = 0, driver = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (text_bytes > 0) text[0] = 0;
    if (error == cudaSuccess && devices > 0) return DT_OK;
    (void)cudaGetLastError();
    if (error == cudaSuccess) error = cudaErrorNoDevice;
    bool        no_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    const char *why = no_driver ? "no NVIDIA driver found" : cudaGetErrorName(error);
    if (text_bytes > 0) snprintf(text, text_bytes, "%s", why);
    return DT_ERR_DEVICE;
}

/* Revision history: 0.1.0 (2026) first version.

   LICENCE: your choice of A or B.

   A. Public domain (www.unlicense.org). This is free and unencumbered software released into the public domain.
   Anyone is free to copy, modify, publish, use, compile, sell, or distribute this software, either in source code
   form or as a compiled binary, for any purpose, commercial or non-commercial, and by any means. In jurisdictions
   that recognize copyright laws, the author or authors of this software dedicate any and all copyright interest in
   the software to the public domain. We make this dedication for the benefit of the public at large and to the
   detriment of our heirs and successors. We intend this dedication to be an overt act of relinquishment in perpetuity
   of all present and future rights to this software under copyright law. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT
   WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS
   FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR
   OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH
   THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

   B. MIT. Copyright (c) the dt authors. Permission is hereby granted, free of charge, to any person obtaining a copy
   of this software and associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
   copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to the following
   conditions: the above copyright notice and this permission notice shall be included in all copies or substantial
   portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED,
   INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
   LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE
   SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */
