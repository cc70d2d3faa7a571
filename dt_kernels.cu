/* dt_kernels.cu - v0.1.0 - the CUDA side of dt_tensor.h's kernel table - public domain or MIT, see the end of the file

   Compile it with nvcc beside the file that defines DT_IMPLEMENTATION:

       nvcc -O3 train.c dt_kernels.cu -o train -lpthread

   It gives two functions, dt_kernels_cuda() and dt_cuda_ready(), both declared in dt_tensor.h.

   DOES NOT: allocate (scratch is the caller's), keep state, choose a device (the thread's current one is used), add
   with atomics. The table is a part: entries that are NULL are answered by the ops with an error that names the kernel.
   f32 is served; f64 and i32 by fill, copy and reduce only, because a loss is an f64 scalar.

   CONTENTS
     1. Launching
     2. Device memory
     3. Blocks and packs
     4. Fill, copy, reduce, add
     5. Sums over rows
     6. Layer normalisation
     7. GELU
     8. Cross-entropy
     9. Norm and optimizers
    10. The table

   ORDER OF SUMS. Every sum has an order that depends on sizes only, so the same call gives the same bits on the same
   build. They are not the CPU's bits: long sums are taken in other parts, nvcc contracts a product and a sum into one
   rounding, expf is CUDA's. tests/test_cuda.cc runs these kernels on a CPU and allows 1e-6 relative. fill, copy,
   reduce, add and square_sums have nothing to contract and give the CPU's bits. Never compile this file with
   -use_fast_math: nvcc defines no macro by which it could be refused here.

   ERRORS. A refused launch is DT_ERR_DEVICE at once. A kernel that fails later shows in a later call, at the latest in
   sync: that is how CUDA works. */

#include "dt_tensor.h"

#include <math.h>
#include <stdio.h>

#if DT_VERSION != 100
#error "dt_kernels.cu 0.1.0 needs dt_tensor.h 0.1.0: copy all files from one release"
#endif

/* A test runs this file on a CPU (tests/cuda_on_cpu.h): there a launch is a call, and a kernel is static already. */
#ifdef __CUDACC__
#define DT_LAUNCH(kernel, grid, block, smem, stream, ...) kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
#define KERNEL static __global__ void
#else
#define KERNEL __global__ void
#endif

// ==== 1. Launching ==================================================================================================

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
        if ((n) > 0) DT_LAUNCH(kernel, grid_for((n), (each)), BLOCK, 0, (cudaStream_t)(stream), __VA_ARGS__); \
    } while (0)

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
    cudaError_t error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, (cudaStream_t)stream);
    return error == cudaSuccess ? DT_OK : DT_ERR_DEVICE;
}

static dt_status cuda_sync(void *stream) {
    return cudaStreamSynchronize((cudaStream_t)stream) == cudaSuccess ? DT_OK : DT_ERR_DEVICE;
}

// ==== 3. Blocks and packs ===========================================================================================

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
    for (int k = 0; k < pack<T>::N; k++) x.v[k] = i + k < count ? p[i + k] : T(0);
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

// ==== 4. Fill, copy, reduce, add ====================================================================================

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
    return launched();
}

static dt_status cuda_reduce(const dt_reduce_args *a, void *stream) {
    if (a->n < 1) return DT_ERR_ARG;
    if (a->dtype == DT_F32) return reduce<float>(a, stream);
    if (a->dtype == DT_F64) return reduce<double>(a, stream);
    if (a->dtype == DT_I32) return reduce<int>(a, stream);
    return DT_ERR_UNSUPPORTED;
}

/* out(rows,cols) = a(rows,cols) + b(cols) */
KERNEL __launch_bounds__(BLOCK) add_kernel(dt_add_args a) {
    const int    N = pack<float>::N;
    size_t       count = a.rows * a.cols;
    const float *b = (const float *)a.b;
    bool         wide = aligned16(a.out, a.a, a.b) && (a.rows == 1 || a.cols % N == 0); /* no pack in two rows */
    for (size_t i = flat_first(N); i < count; i += flat_step(N)) {
        size_t      c = a.rows == 1 ? i : i % a.cols;
        pack<float> x = load((const float *)a.a, i, count, wide);
        if (wide) {
            pack<float> y = load(b, c, a.cols, true);
            for (int k = 0; k < N; k++) x.v[k] += y.v[k];
        } else {
            for (int k = 0; k < N; k++, c = c + 1 < a.cols ? c + 1 : 0) x.v[k] += b[c];
        }
        store((float *)a.out, i, count, wide, x);
    }
}

static dt_status cuda_add(const dt_add_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    LAUNCH(add_kernel, a->rows * a->cols, BLOCK * pack<float>::N, stream, *a);
    return launched();
}

// ==== 5. Sums over rows =============================================================================================

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

static __device__ void give(void *out, size_t i, float value, int accumulate) {
    float *to = (float *)out + i;
    *to = accumulate ? *to + value : value;
}

KERNEL __launch_bounds__(COLUMNS *RUNS) column_sum_kernel(dt_column_sum_args a) {
    const float *in = (const float *)a.in;
    row_run      run = my_rows(a.rows);
    for (size_t first = (size_t)blockIdx.x * COLUMNS; first < a.cols; first += (size_t)gridDim.x * COLUMNS) {
        size_t c = first + threadIdx.x;
        float  sum = 0;
        if (c < a.cols)
            for (size_t r = run.first; r < run.end; r++) sum += in[r * a.cols + c];
        sum = add_runs(sum); /* outside of the condition: every thread of the block must come */
        if (threadIdx.y == 0 && c < a.cols) give(a.out, c, sum, a.accumulate);
    }
}

static dt_status cuda_column_sum(const dt_column_sum_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (a->cols > 0)
        DT_LAUNCH(column_sum_kernel, grid_for(a->cols, COLUMNS), dim3(COLUMNS, RUNS), 0, (cudaStream_t)stream, *a);
    return launched();
}

// ==== 6. Layer normalisation ========================================================================================

/* arXiv:1607.06450. One block per row, two passes over it, because E[x^2] - E[x]^2 cancels. */
KERNEL __launch_bounds__(BLOCK) layernorm_kernel(dt_layernorm_args a) {
    const float *gain = (const float *)a.gain, *bias = (const float *)a.bias;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const float *x = (const float *)a.in + r * a.cols;
        float       *out = (float *)a.out + r * a.cols, sum = 0, squares = 0;
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) sum += x[c];
        float mean = block_sum(sum) / (float)a.cols;
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) squares += (x[c] - mean) * (x[c] - mean);
        float rstd = (float)(1 / sqrt((double)block_sum(squares) / (double)a.cols + a.eps));
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) out[c] = (x[c] - mean) * rstd * gain[c] + bias[c];
        if (threadIdx.x == 0) {
            ((float *)a.mean)[r] = mean;
            ((float *)a.rstd)[r] = rstd;
        }
    }
}

static dt_status cuda_layernorm(const dt_layernorm_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    LAUNCH(layernorm_kernel, a->rows, 1, stream, *a);
    return launched();
}

/* dgain(cols) = sum over rows of dout y, dbias(cols) = sum over rows of dout, where y = (x - mean) rstd: as in section
   5, so no scratch is needed and each sum is complete before it leaves. */
KERNEL __launch_bounds__(COLUMNS *RUNS) layernorm_back_gain_kernel(dt_layernorm_back_args a) {
    const float *x = (const float *)a.in, *dout = (const float *)a.dout;
    const float *mean = (const float *)a.mean, *rstd = (const float *)a.rstd;
    row_run      run = my_rows(a.rows);
    for (size_t first = (size_t)blockIdx.x * COLUMNS; first < a.cols; first += (size_t)gridDim.x * COLUMNS) {
        size_t c = first + threadIdx.x;
        float  dgain = 0, dbias = 0;
        for (size_t r = run.first; r < run.end && c < a.cols; r++) {
            float d = dout[r * a.cols + c];
            dgain += d * ((x[r * a.cols + c] - mean[r]) * rstd[r]);
            dbias += d;
        }
        dgain = add_runs(dgain);
        dbias = add_runs(dbias);
        if (threadIdx.y > 0 || c >= a.cols) continue;
        if (a.dgain) give(a.dgain, c, dgain, a.accumulate_gain);
        if (a.dbias) give(a.dbias, c, dbias, a.accumulate_bias);
    }
}

/* With g = dout gain: dx = rstd (g - mean(g) - y mean(g y)). One block per row. */
KERNEL __launch_bounds__(BLOCK) layernorm_back_kernel(dt_layernorm_back_args a) {
    const float *gain = (const float *)a.gain;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const float *x = (const float *)a.in + r * a.cols, *dout = (const float *)a.dout + r * a.cols;
        float        mean = ((const float *)a.mean)[r], rstd = ((const float *)a.rstd)[r], g_sum = 0, gy_sum = 0;
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) {
            float g = dout[c] * gain[c];
            g_sum += g;
            gy_sum += g * ((x[c] - mean) * rstd);
        }
        float mean_g = block_sum(g_sum) / (float)a.cols, mean_gy = block_sum(gy_sum) / (float)a.cols;
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) {
            float g = dout[c] * gain[c], y = (x[c] - mean) * rstd;
            give(a.dx, r * a.cols + c, rstd * (g - mean_g - y * mean_gy), a.accumulate_x);
        }
    }
}

/* The sums over rows come first: dx may lie where dout does. */
static dt_status cuda_layernorm_back(const dt_layernorm_back_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if ((a->dgain || a->dbias) && a->cols > 0)
        DT_LAUNCH(layernorm_back_gain_kernel, grid_for(a->cols, COLUMNS), dim3(COLUMNS, RUNS), 0, (cudaStream_t)stream,
            *a);
    if (a->dx) LAUNCH(layernorm_back_kernel, a->rows, 1, stream, *a);
    return launched();
}

// ==== 7. GELU =======================================================================================================

/* Tanh form, arXiv:1606.08415. With u = sqrt(2/pi) (x + 0.044715 x^3), 0.5 (1 + tanh u) is the logistic function
   s = 1 / (1 + exp(-2u)): one exponential, and no cancellation where tanh u is close to -1. */
#define GELU_A 0.7978845608028654f /* sqrt(2/pi) */
#define GELU_B 0.044715f

static __device__ float gelu(float x) {
    float u = GELU_A * (x + GELU_B * x * x * x);
    return x / (1 + expf(-2 * u));
}

/* gelu' = s + x s (1 - s) 2 u'. Past +-30 the second term is zero; the clamp keeps infinity times zero away. */
static __device__ float gelu_slope(float x) {
    x = x < -30 ? -30 : x;
    x = x > 30 ? 30 : x;
    float u = GELU_A * (x + GELU_B * x * x * x), du = GELU_A * (1 + 3 * GELU_B * x * x);
    float s = 1 / (1 + expf(-2 * u));
    return s + 2 * x * s * (1 - s) * du;
}
#undef GELU_A
#undef GELU_B

KERNEL __launch_bounds__(BLOCK) gelu_kernel(dt_gelu_args a) {
    const int N = pack<float>::N;
    bool      wide = aligned16(a.out, a.in);
    for (size_t i = flat_first(N); i < a.count; i += flat_step(N)) {
        pack<float> x = load((const float *)a.in, i, a.count, wide);
        for (int k = 0; k < N; k++) x.v[k] = gelu(x.v[k]);
        store((float *)a.out, i, a.count, wide, x);
    }
}

static dt_status cuda_gelu(const dt_gelu_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    LAUNCH(gelu_kernel, a->count, BLOCK * pack<float>::N, stream, *a);
    return launched();
}

KERNEL __launch_bounds__(BLOCK) gelu_back_kernel(dt_gelu_back_args a) {
    const int N = pack<float>::N;
    bool      wide = aligned16(a.dx, a.dout, a.in);
    for (size_t i = flat_first(N); i < a.count; i += flat_step(N)) {
        pack<float> x = load((const float *)a.in, i, a.count, wide);
        pack<float> dout = load((const float *)a.dout, i, a.count, wide), dx = { { 0, 0, 0, 0 } };
        if (a.accumulate) dx = load((const float *)a.dx, i, a.count, wide);
        for (int k = 0; k < N; k++) dx.v[k] += dout.v[k] * gelu_slope(x.v[k]);
        store((float *)a.dx, i, a.count, wide, dx);
    }
}

static dt_status cuda_gelu_back(const dt_gelu_back_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    LAUNCH(gelu_back_kernel, a->count, BLOCK * pack<float>::N, stream, *a);
    return launched();
}

// ==== 8. Cross-entropy ==============================================================================================

/* A label past the last column is the caller's error and must be answered by this very call, as on the CPU, while a
   kernel can only answer later. So the labels, four bytes a row, are read by the host in pieces. That waits for the
   stream: once for the forward and once for the backward of a micro-batch. */
static dt_status check_labels(const int32_t *labels, size_t rows, size_t cols, void *stream) {
    const size_t PIECE = 4096;
    int32_t      piece[PIECE];
    for (size_t at = 0; at < rows; at += PIECE) {
        size_t    have = rows - at < PIECE ? rows - at : PIECE;
        dt_status status = cuda_move(piece, labels + at, have * sizeof *piece, stream);
        if (status == DT_OK) status = cuda_sync(stream);
        if (status != DT_OK) return status;
        for (size_t i = 0; i < have; i++)
            if (piece[i] >= (int64_t)cols) return DT_ERR_ARG;
    }
    return DT_OK;
}

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
        double       lse = 0, loss = 0;
        if (label >= 0) {
            lse = log_sum_exp(x, a.cols);
            loss = lse - (double)x[label];
        }
        if (threadIdx.x == 0) {
            ((float *)a.lse)[r] = (float)lse;
            a.row_loss[r] = loss;
        }
    }
}

/* One block for all rows: it fetches BLOCK losses at a time, and one thread adds them, r ascending. */
KERNEL __launch_bounds__(BLOCK) loss_total_kernel(dt_cross_entropy_args a) {
    __shared__ double piece[BLOCK];
    double            total = 0;
    for (size_t first = 0; first < a.rows; first += BLOCK) {
        size_t have = a.rows - first < BLOCK ? a.rows - first : (size_t)BLOCK;
        __syncthreads(); /* the piece before has been added */
        if (threadIdx.x < have) piece[threadIdx.x] = a.row_loss[first + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0)
            for (size_t i = 0; i < have; i++) total += piece[i];
    }
    if (threadIdx.x == 0) *a.loss = total / a.denominator;
}

static dt_status cuda_cross_entropy(const dt_cross_entropy_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    dt_status status = check_labels(a->labels, a->rows, a->cols, stream);
    if (status != DT_OK) return status;
    LAUNCH(cross_entropy_kernel, a->rows, 1, stream, *a);
    LAUNCH(loss_total_kernel, 1, 1, stream, *a);
    return launched();
}

/* One block per row: dlogits (+)= upstream scale (exp(x - lse) - [c == label]), nothing for a row without a label. */
KERNEL __launch_bounds__(BLOCK) cross_entropy_back_kernel(dt_cross_entropy_back_args a) {
    float factor = (float)(*a.upstream * a.scale);
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const float *x = (const float *)a.logits + r * a.cols;
        float        lse = ((const float *)a.lse)[r];
        int64_t      label = a.labels[r];
        if (label < 0 && a.accumulate) continue;
        for (size_t c = threadIdx.x; c < a.cols; c += BLOCK) {
            float p = 0;
            if (label >= 0) p = factor * (expf(x[c] - lse) - ((int64_t)c == label ? 1.0f : 0.0f));
            give(a.dlogits, r * a.cols + c, p, a.accumulate);
        }
    }
}

static dt_status cuda_cross_entropy_back(const dt_cross_entropy_back_args *a, void *stream) {
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    dt_status status = check_labels(a->labels, a->rows, a->cols, stream);
    if (status != DT_OK) return status;
    LAUNCH(cross_entropy_back_kernel, a->rows, 1, stream, *a);
    return launched();
}

// ==== 9. Norm and optimizers ========================================================================================

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
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
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
    if (a->dtype != DT_F32) return DT_ERR_UNSUPPORTED;
    if (a->momentum != 0 && !a->momentum_buffer) return DT_ERR_ARG;
    LAUNCH(sgd_kernel, a->count, BLOCK * pack<float>::N, stream, *a);
    return launched();
}

// ==== 10. The table =================================================================================================

extern "C" const dt_kernels *dt_kernels_cuda(void) {
    static const dt_kernels table = {
        .name = "cuda",
        .alloc = cuda_alloc,
        .free = cuda_free,
        .move = cuda_move,
        .sync = cuda_sync,
        .user = NULL,
        .fill = cuda_fill,
        .init = NULL,
        .copy = cuda_copy,
        .reduce = cuda_reduce,
        .add = cuda_add,
        .column_sum = cuda_column_sum,
        .matmul = NULL,
        .layernorm = cuda_layernorm,
        .layernorm_back = cuda_layernorm_back,
        .gelu = cuda_gelu,
        .gelu_back = cuda_gelu_back,
        .embedding = NULL,
        .embedding_back = NULL,
        .attention = NULL,
        .attention_back = NULL,
        .cross_entropy = cuda_cross_entropy,
        .cross_entropy_back = cuda_cross_entropy_back,
        .mse = NULL,
        .mse_back = NULL,
        .square_sums = cuda_square_sums,
        .adamw = cuda_adamw,
        .sgd = cuda_sgd,
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
