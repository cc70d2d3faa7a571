/* dt_tensor.h - v0.2.0 - one rank of a training job: tensors, memory, autograd tape, kernels,
   weight files - public domain or MIT, see the end of the file

   This is the lowest of four single-header libraries that train transformers on many ranks:

       dt_tensor.h     one rank: tensors, memory, tape, kernels, weight files (usable alone)
       dt_comm.h       groups of ranks: launch, collectives, faults
       dt_parallel.h   layouts: mesh, placements, schedules, data order
       dt_zero.h       training state: optimizers, ZeRO, precision, offload, checkpoints
       dt_kernels.cu   the CUDA kernel table, and NCCL

   It gives you eager tensors with an autograd tape (reverse-mode differentiation), parameters that
   are slices of a full logical tensor, memory in which every byte has an owner and a class, CPU
   kernels, and weight files (safetensors, llm.c).

   dt_tensor.h does not start threads (with DT_USE_OMP, OpenMP starts threads), install signal
   handlers, call exit or abort, keep global state, or read the environment. It prints only through
   the log hook.

   QUICK EXAMPLE

       #define DT_IMPLEMENTATION
       #include "dt_tensor.h"
       #include <stdio.h>

       int main(void) {
           // the CPU's kernels, because this program reads w->data itself
           dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = dt_kernels_cpu() });
           dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(1, 3), DT_NORMAL(0.1));
           float x[6] = { 1, 2, 3, 4, 5, 6 }, y[2] = { 1, -1 };
           for (int step = 0; step < 100; step++) {
               dt_tensor *out = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(2, 3), x), w, NULL);
               dt_tensor *loss = dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(2, 1), y), 2);
               if (dt_backward(loss) != DT_OK) break;    // check before your own code reads data
               for (int i = 0; i < 3; i++) ((float *)w->data)[i] -= 0.01f * ((float *)w->grad)[i];
               if (step % 20 == 0) printf("step %d loss %g\n", step, dt_item(loss));
               dt_clear_grads(ctx);
               dt_reset(ctx);
           }
           int failed = dt_error(ctx) != DT_OK;
           if (failed) puts(dt_error_text(ctx));
           dt_ctx_free(ctx);
           return failed;
       }

   BUILD
       cc -O2 train.c -lm -lpthread                 C11 or C++17; gcc, clang; no -march needed
       echo '#include "dt_tensor.h"' | cc -O2 -DDT_IMPLEMENTATION -x c -c -o dt.o -
       cc -O2 train.c dt.o -lm -lpthread            the same in two commands, with a train.c that
                                                    does not define DT_IMPLEMENTATION: after an edit
                                                    of train.c only the second one, which takes less
                                                    than a second, is needed
       g++ -std=c++20 -Wextra -Wno-missing-field-initializers
                                                    g++ warns about the fields that your
                                                    (dt_ctx_desc){ .seed = 1 } leaves zero
       nvcc -O3 train.c dt_kernels.cu -lcublasLt -lnccl     CUDA; or compile train.c with cc and
                                                            link it with dt_kernels.o

   OPTIONS (define before including: everywhere, that is, in every file that includes dt headers, or
   only in the implementation, that is, the file that defines DT_IMPLEMENTATION)
       DT_IMPLEMENTATION   compiles the code, not only the declarations. Define it in exactly one
                           file.
       DT_STATIC           makes all functions static, so that several files may each have their
                           own copy of the code. Each file then needs DT_IMPLEMENTATION, or gcc
                           warns.                                                      (everywhere)
       DT_NO_KERNELS       leaves out all CPU kernels except fill, copy, cast, digest, quantize,
                           reduce and permute, for a program that only communicates (dt_comm.h).
                           The program compiles in half of the time and is half as large.
                           On the CPU an op that needs another kernel fails: DT_ERR_UNSUPPORTED.
                                                                                   (implementation)
       DT_USE_CBLAS        computes f32 and f64 matrix products with <cblas.h>. Link a BLAS, for
                           example with -lopenblas.                                (implementation)
       DT_USE_OMP          runs several threads inside a rank; the results have the same bits.
                           Compile with -fopenmp.                                  (implementation)
       DT_USE_AMX          computes bf16 matrix products with the tiles of Intel's AMX where the
                           processor has them (Linux). Tested by emulation only.   (implementation)

   CONTENTS
     1. Status, element types, shapes (mixed precision: bf16 and f16 storage)
     2. Kernel table (one struct per kernel, its fusions, device events)
     3. Host and io tables
     4. Context, errors, memory account
     5. Tensors and parameters (placements: replicate, shard, partial sum; sharding, local slice,
        gradient placement; quantised weights: NF4, int8, QLoRA)
     6. Buckets and listeners (gradient bucket, flat parameter, gradient accumulation,
        overlap of communication and computation)
     7. Ops (linear, LoRA adapter, grouped linear, batched matmul, convolution, pooling, embedding,
        layer normalization, RMSNorm, QK-norm, group normalization, comparisons, masks, where,
        reductions, argmax, one-hot, rotary embedding, dropout, attention, sliding window,
        soft-capping, cross-entropy, binary cross-entropy)
     8. Tape and blocks (autograd tape, activation checkpointing (recompute), selective recompute,
        loss scaling, backward in two halves for zero bubble, truncated BPTT, NaN detection,
        gradient check)
     9. Weight files (JSON, safetensors, llm.c, state dict)
    10. Implementation: base helpers (bf16 and f16 conversion, NF4 quantization)
    11. Default host and io tables
    12. Context, errors, memory account: code
    13. Counter-based RNG (Philox)
    14. Parameters, slices and buckets: code (gradient bucket, gradient accumulation)
    15. Arenas and buffers (activation memory, transient memory)
    16. Tape: code (autograd tape, owners of tensors' data, transient tensors)
    17. Placements: code (sharding propagation: one rule for each op)
    18. Blocks and backward: code (activation checkpointing (recompute), memory under dt_no_grad,
        gradient check)
    19. Ops: linear, norms, elementwise functions (forward and backward of each op)
    20. Ops: arithmetic, sums, shapes (broadcasting, minimum, comparisons, where, reductions,
        argmax, permute)
    21. Ops: adapters, products of activations, cumulative sums, convolution (LoRA, batched matmul,
        im2col, pooling, group normalization)
    22. Ops: rows by index (embedding, gather, scatter, one-hot, embedding bag)
    23. Ops: rotary embedding, dropout, attention, losses (RoPE scaling, YaRN,
        sliding-window attention, soft-capping)
    24. JSON
    25. Reading and writing files (atomic commit: write, fsync, rename, fsync)
    26. Weight files: formats and reading (safetensors, llm.c)
    27. Weight files: parameters and writing
    28. Arithmetic on the CPU (vectorized exp, ln, tanh)
    29. Matrix product on the CPU (GEMM: packing, micro-kernel, epilogue)
    30. CPU kernels: elementwise, rows, norms (rotary embedding, im2col, pooling)
    31. CPU kernels: attention (naive attention, flash attention, online softmax, log-sum-exp merge,
        grouped-query attention)
    32. CPU kernels: losses and optimizers (cross-entropy; Adam, 1-bit Adam)
    33. CPU kernels compiled once for each type (random numbers, rows by index, dropout)
    34. The CPU kernel table

   CONTRACT
     Memory     The context owns everything it hands out. Parameters live until dt_ctx_free; other
                tensors live until dt_reset. A tensor that is used in the step after that fails with
                its name; only AddressSanitizer (-fsanitize=address) finds every later use. Data
                made inside a recomputed dt_block live only while
                the block runs, and so do data made inside a block under dt_no_grad. Host buffers
                that you pass are copied. A program whose steps are all alike allocates memory in
                its first steps only; later growth is logged.
     Errors     The context records the first failure with its text (dt_error, dt_error_text); a
                function that records one is said to fail the context (dt_fail).
                After a failure ops do nothing and return NULL, and dt_item returns NaN. An op with
                a NULL input returns NULL too. So a loop needs no checks: check once at the end.
                Only reading a member of a NULL tensor, such as x->shape, crashes: use dt_dim.
     Threads    A context belongs to one thread at a time. Contexts share nothing.
     Order      Every sum has a stated order that does not depend on tiling or threads: the same
                program gives the same bits on processors of one kind. An element of a
                matrix product depends only on its row of A, its column of B and the length of the
                sum, unless CBLAS computes the product. A micro-batch's weight gradient is complete
                before it is added to anything.
     Tags       A tag says which ranks must make a call. [local]: any rank may make the call by
                itself. [pairwise]: two ranks make the call. [collective: group]: every rank of the
                group makes the call. */

#ifndef DT_TENSOR_H
#define DT_TENSOR_H

#define DT_VERSION 200 /* 0.2.0; the dt headers check that their versions agree */

#if defined(DT_IMPLEMENTATION) && !defined(_GNU_SOURCE)
/* With -std=c11 libc declares clock_gettime and some other functions only under this macro. The
   macro has no effect if a libc header was included before it. */
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>

#ifdef __FAST_MATH__
#error "dt promises equal bits: compile without -ffast-math"
#endif

#ifdef DT_STATIC
#define DT_API static __attribute__((unused))
#else
#define DT_API extern
#endif
/* A weak reference: the address of a function that is not linked is NULL. */
#ifdef __ELF__
#define DT__WEAK __attribute__((weak))
#else
#define DT__WEAK
#endif
#define DT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

/* The implementations are written in C. Between DT__CPP_WARNINGS_OFF and DT__CPP_WARNINGS_ON, C++
   compilers do not warn about compound literals, designated initialisers or missing ones. */
#if defined(__cplusplus) && defined(__GNUC__)
#define DT__CPP_WARNINGS_OFF \
    _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wpedantic\"") \
        _Pragma("GCC diagnostic ignored \"-Wmissing-field-initializers\"") \
            _Pragma("GCC diagnostic ignored \"-Wpragmas\"") /* g++ < 12 lacks the next warning */ \
        _Pragma("GCC diagnostic ignored \"-Wc++20-extensions\"")
#define DT__CPP_WARNINGS_ON _Pragma("GCC diagnostic pop")
#else
#define DT__CPP_WARNINGS_OFF
#define DT__CPP_WARNINGS_ON
#endif

/* gcc compiles the code between DT__COLD_BEGIN and DT__COLD_END with -Og if the program is
   optimized at all. This is all code outside of the kernels: it waits for kernels, messages and
   files, and -O2 or -O3 would make it compile several times as long, but not measurably faster.
   clang has no such pragma. */
#if defined(__OPTIMIZE__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define DT__COLD_BEGIN _Pragma("GCC push_options") _Pragma("GCC optimize(\"Og\")")
#define DT__COLD_END _Pragma("GCC pop_options")
#else
#define DT__COLD_BEGIN
#define DT__COLD_END
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ==== 1. Status, element types, shapes ==========================================================

/* The result of a call. dt_error_text returns the details: rank, shapes, reason. */
typedef enum dt_status {
    DT_OK = 0,
    DT_ERR_ARG,        /* an invalid value, for example a negative count */
    DT_ERR_SHAPE,      /* shapes or element types that do not match */
    DT_ERR_MEM,        /* an allocation failed, or would exceed mem_limit */
    DT_ERR_IO,         /* a file operation failed, or a file is damaged */
    DT_ERR_DEVICE,     /* the accelerator reported an error */
    DT_ERR_COMM,       /* ranks called different operations, or a rank left the job too early */
    DT_ERR_TIMEOUT,    /* a wait reached its time limit */
    DT_ERR_PEER,       /* another rank failed first; the error text names that rank */
    DT_ERR_NUMERIC,    /* a NaN or infinity with which training cannot continue */
    DT_ERR_UNSUPPORTED /* not available in this version or for these arguments */
} dt_status;

/* Element types. Mixed precision: BF16 and F16 are storage types only; kernels widen BF16 and F16
   elements to f32 and compute in f32. F64 is for tests on the CPU. U8 is a byte, and I64 a counter
   or an offset. Integers have no gradients. Functions that copy or convert elements take every
   type: dt_input, dt_read, dt_write, dt_reshape, dt_slice, dt_select, dt_concat, dt_transpose,
   dt_permute, dt_broadcast_to, dt_cast, weight
   files and the collectives of dt_comm.h. Parameters and all other ops refuse integers; ids, labels
   and positions are I32. */
typedef enum dt_dtype { DT_F32 = 0, DT_BF16, DT_F16, DT_F64, DT_I32, DT_U8, DT_I64 } dt_dtype;

/* Reduction operators. The values of the ranks are combined in rank order. */
typedef enum dt_op { DT_SUM = 0, DT_AVG, DT_MAX, DT_MIN, DT_PROD } dt_op;

#define DT_MAX_DIMS 6
typedef struct dt_shape {
    int nd;                 /* number of dimensions; 0 for a scalar */
    int64_t d[DT_MAX_DIMS]; /* sizes; row-major: the last index varies fastest */
} dt_shape;

/* DT__LITERAL(T){ ... } is a value of type T: a compound literal in C, T{ ... } in C++. */
#ifdef __cplusplus
#define DT__LITERAL(T) T
#else
#define DT__LITERAL(T) (T)
#endif

/* DT_SHAPE(B, T, C) takes integers of any type. DT_SCALAR has no dimensions. */
#ifdef __cplusplus /* C++ forbids narrowing size_t to int64_t inside braces */
extern "C++" {
template <class... sizes> static inline constexpr dt_shape dt__shape_of(sizes... n) {
    return dt_shape{ (int)sizeof...(n), { (int64_t)n... } };
}
}
#define DT_SHAPE(...) dt__shape_of(__VA_ARGS__)
#else
#define DT_SHAPE(...) \
    ((dt_shape){ (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), { __VA_ARGS__ } })
#endif
#define DT_SCALAR (DT__LITERAL(dt_shape){ 0, { 0 } })

/* [local] Returns the size of one element in bytes; 0 for an unknown type. */
DT_API size_t dt_dtype_size(dt_dtype dtype);
/* [local] Returns the name of the type: "f32", "i32", ... */
DT_API const char *dt_dtype_name(dt_dtype dtype);
/* [local] Returns the name of the status: "DT_ERR_SHAPE", ... */
DT_API const char *dt_status_name(dt_status status);
/* [local] Returns the number of elements; 1 for a scalar; -1 if the shape is invalid, that is, if
   it has more than DT_MAX_DIMS dimensions, a negative dimension, or more elements than int64_t can
   count. */
DT_API int64_t dt_count(dt_shape shape);

// ==== 2. Kernel table ===========================================================================

/* A device is a table of functions: memory, streams, and one entry per kernel. An op calls
   ctx->kernels.NAME(&args, stream) and never asks which device runs the kernel.

       op (section 19) --> dt_kernels { alloc, move, ..., matmul, attention, ... } --> CPU or CUDA

   Another table may replace some or all entries of the CPU's table, for example the CUDA table, a
   table for dry runs that only counts, or a table of naive kernels written in a course. */

/* The kernel list: DT_KERNELS(X) names every kernel once. One argument struct per kernel follows.
   The optional fields of a struct fuse further operations into the kernel. The groups say for which
   types and instruction sets the CPU's kernel is compiled (section 34).

   A kernel gets one argument struct and a stream. It returns DT_OK, DT_ERR_UNSUPPORTED (the table
   does not support a type or field that the arguments use) or DT_ERR_ARG. A kernel allocates no
   memory: the caller provides scratch memory as `work`. Arrays are dense and row-major unless a
   stride says otherwise.

   T is the element type that the field dtype names. bf16 and f16 are storage types: a kernel widens
   each element to f32, computes in f32, and rounds once, to nearest even, when it stores the
   result. Fast attention may also round the softmax and its gradient to bf16, as flash attention on
   GPUs does. If T is bf16 or f16, the values saved for the backward (mean, rstd, lse) are f32. If
   `wide` is 1 and T is bf16 or f16, an output is f32, for example the gradient of a parameter. If
   `accumulate` is 1, the kernel adds the finished result to the output; if `accumulate` is 0, the
   kernel overwrites the output. In the formulas (+)= stands for both. The order of each sum depends
   only on the array sizes that the kernel's comment names. */
// clang-format off
#define DT__COPY_KERNELS(X) X(cast) X(fill) X(reduce) X(permute)
#define DT__VECTOR_KERNELS(X) \
    X(sum) X(cumsum) X(max) X(binary) X(where) X(unary) X(unary_back) X(glu) X(glu_back) \
    X(softmax) X(softmax_back) X(norm) X(norm_back) X(rope) X(patches) X(patches_back) \
    X(embedding_back) X(square_sums) X(cross_entropy) X(cross_entropy_back) X(pair_loss) \
    X(pair_loss_back) X(adamw)
#define DT__PRODUCT_KERNELS(X) X(matmul) X(attention) X(attention_back)
#define DT__SCALAR_KERNELS(X) \
    X(init) X(scatter) X(topk) X(dropout) X(embedding) X(cross_entropy_merge) X(sgd) \
    X(momentum) X(frozen_adam) X(sign_pack) X(sign_unpack)
// clang-format on
#define DT__VARIANT_KERNELS(X) \
    DT__COPY_KERNELS(X) DT__VECTOR_KERNELS(X) DT__PRODUCT_KERNELS(X) DT__SCALAR_KERNELS(X)
#define DT_KERNELS(X) X(copy) X(digest) X(quantize) DT__VARIANT_KERNELS(X)

typedef struct dt_fill_args { /* out[i] = value */
    dt_dtype dtype;
    void *out;
    size_t count;
    double value;
} dt_fill_args;

/* out[i] = f(key, offset + i), where f is the counter-based RNG of section 13 */
typedef struct dt_init_args {
    dt_dtype dtype;
    void *out;
    size_t count;
    /* 0: values are uniform in [-scale, scale); 1: normal, with standard deviation `scale` */
    int normal;
    double scale;
    uint64_t key, offset; /* offset: global index of out[0] */
} dt_init_args;

/* Copies `rows` rows of row_bytes bytes each between two strided arrays. Strides are in bytes. */
typedef struct dt_copy_args {
    void *out;
    const void *in;
    size_t rows, row_bytes, out_stride, in_stride;
} dt_copy_args;

/* out[..] (+)= in[..] for all indices within `shape`; does slice, concat, transpose and repeat */
typedef struct dt_permute_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    dt_shape shape;
    /* strides are in elements; an in_stride of 0 repeats an element */
    int64_t out_stride[DT_MAX_DIMS], in_stride[DT_MAX_DIMS];
    int accumulate;
} dt_permute_args;

/* out[i] (+)= in[i]. A floating-point result is rounded once, to nearest even. An integer result is
   rounded towards zero, and saturates at the type's smallest and largest value; a NaN becomes 0. */
typedef struct dt_cast_args {
    dt_dtype dtype, from;
    void *out;
    const void *in;
    size_t count;
    int accumulate;
} dt_cast_args;

/* The 16 values of NF4, the quantiles of a normal distribution (arXiv:2305.14314, appendix E). */
#define DT__NF4_VALUES \
    { \
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, \
            -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f, \
            0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, \
            0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, \
            1.0f \
    }
#define DT__QUANT_BLOCK 64 /* elements of a block of INT8 and NF4 */

/* out = blocks of the format `quant` (a dt_quant, section 5) of `count` elements, a multiple of the
   block. A NaN gives a finite code, the same in every table; dt_quantize refuses it */
typedef struct dt_quantize_args {
    int quant;
    void *out;
    const float *in;
    size_t count;
} dt_quantize_args;

/* out[i] = in[0][i] op in[1][i] op ..., combined in that order; `out` may also be one of the
   inputs */
typedef struct dt_reduce_args {
    dt_dtype dtype;
    void *out;
    const void *const *in;
    int n;
    size_t count;
    dt_op op;
    /* n_copies further outputs, which receive the same result; each may also be an input */
    void *const *copies;
    int n_copies;
    /* 1 (a hint): outputs are not inputs nor in a near cache, so non-temporal stores are faster */
    int non_temporal;
} dt_reduce_args;

/* out[o,i] (+)= scale * sum over j of in[o,j,i], in ascending j; `in` has shape (outer,n,inner) */
typedef struct dt_sum_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    size_t outer, n, inner;
    double scale;
    int accumulate, wide;
    /* optional scratch memory of any size: with it, a GPU sums several segments in parallel */
    void *work;
    size_t work_bytes;
} dt_sum_args;

/* out[o,j,i] (+)= sum over l <= j of in[o,l,i], in ascending l; if reverse is 1, the sum over l >=
   j, in descending l. Both arrays have shape (outer,n,inner). */
typedef struct dt_cumsum_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    size_t outer, n, inner;
    int reverse, accumulate;
} dt_cumsum_args;

/* A window that slides over the height and width (index 0 and 1 of the arrays) of images. Position
   o of the window begins at o * stride - padding, and its elements are `dilation` apart. */
typedef struct dt_window {
    int64_t batch, in[2], out[2], channels; /* images, their size, number of positions, channels */
    int64_t kernel[2], stride[2], padding[2], dilation[2];
} dt_window;

/* im2col. out[b,y,x,k,c] is element k of the window at position (y,x), k = row * kernel[1] +
   column; pad_value outside of the image. `in` has shape (batch,in,in,channels), `out` has shape
   (batch,out,out,kernel * kernel,channels).

   Pooling: if `pool` is not 0, `out` has shape (batch,out,out,channels), and out[b,y,x,c] is the
   maximum of the elements, as in the kernel max, or their mean, added in ascending k. */
enum { DT_POOL_NONE = 0, DT_POOL_MAX, DT_POOL_MEAN };
typedef struct dt_patches_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    dt_window window;
    double pad_value;
    int pool;       /* a DT_POOL_* */
    int32_t *index; /* with DT_POOL_MAX: receives the first k with the maximum; of out's shape */
} dt_patches_args;

/* col2im, the backward of patches. dx of an element (+)= the sum of dout of its copies, in
   ascending k. DT_POOL_MAX adds only the copies that are maxima; DT_POOL_MEAN divides the sum by
   the number of elements of a window. */
typedef struct dt_patches_back_args {
    dt_dtype dtype;
    void *dx;
    const void *dout;
    dt_window window;
    int accumulate, pool;
    const int32_t *index; /* with DT_POOL_MAX: the index that patches stored */
} dt_patches_back_args;

/* out[o,i] = max over j of in[o,j,i]; index[o,i] = the first j with that value. A NaN is greater
   than all numbers. The scatter kernel is the backward of max. */
typedef struct dt_max_args {
    dt_dtype dtype;
    void *out;
    int32_t *index;
    const void *in;
    size_t outer, n, inner;
} dt_max_args;

/* A NaN in either input makes MINIMUM and MAXIMUM NaN. The comparisons LESS (a < b), LESS_EQUAL and
   EQUAL give 1 or 0. STEP is 0 where a < b, 1/2 where a = b, and else 1: the slope of MAXIMUM. */
enum { DT_ADD = 0, DT_SUB, DT_MUL, DT_DIV, DT_MINIMUM, DT_MAXIMUM };
enum { DT_LESS = DT_MAXIMUM + 1, DT_LESS_EQUAL, DT_EQUAL, DT_STEP, DT_BINARY_OPS };
/* out (+)= (a op b) * factor; `out` is dense and has shape `shape`; a stride of 0 repeats an
   element of `a` or `b` (broadcasting) */
typedef struct dt_binary_args {
    dt_dtype dtype;
    int op;
    void *out;
    const void *a, *b;
    dt_shape shape;
    int64_t stride_a[DT_MAX_DIMS], stride_b[DT_MAX_DIMS]; /* in elements */
    int accumulate;
    const void *factor; /* NULL, or a dense array of shape `shape` */
    int negate;         /* 1: out (+)= -(a op b) * factor */
} dt_binary_args;

/* out (+)= a where mask != 0, else b. `out` is dense and has shape `shape`; a stride of 0 repeats
   an element. a or b may be NULL, which means zeros. */
typedef struct dt_where_args {
    dt_dtype dtype; /* also of `mask` */
    void *out;
    const void *mask, *a, *b;
    dt_shape shape;
    int64_t stride_mask[DT_MAX_DIMS], stride_a[DT_MAX_DIMS], stride_b[DT_MAX_DIMS];
    int accumulate;
} dt_where_args;

/* Activation functions. GELU is the tanh form 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), and
   GELU_ERF is x times the normal distribution function (both arXiv:1606.08415). SILU is x / (1 +
   e^-x), SIGMOID 1 / (1 + e^-x) and SOFTPLUS ln(1 + e^x). The functions from AFFINE on have
   parameters, so only the kernels unary and unary_back serve them: AFFINE is scale * x + shift, POW
   is x^scale, and CLAMP is x, but at least `scale` and at most `shift`. */
enum {
    DT_ACT_NONE = 0,
    DT_ACT_GELU,
    DT_ACT_GELU_ERF,
    DT_ACT_SILU,
    DT_ACT_RELU,
    DT_ACT_TANH,
    DT_ACT_EXP,
    DT_ACT_LN,
    DT_ACT_SIGMOID,
    DT_ACT_SOFTPLUS,
    DT_ACT_SQRT,
    DT_ACT_ABS,
    DT_ACT_AFFINE,
    DT_ACT_POW,
    DT_ACT_CLAMP,
    DT_ACTS
};
typedef struct dt_unary_args { /* out[i] = f(in[i]), where f is `act` */
    dt_dtype dtype;
    int act;
    void *out;
    const void *in;
    size_t count;
    double scale, shift; /* the parameters of DT_ACT_AFFINE, DT_ACT_POW and DT_ACT_CLAMP */
} dt_unary_args;

typedef struct dt_unary_back_args { /* dx[i] (+)= dout[i] * f'(in[i]), where f is `act` */
    dt_dtype dtype;
    int act;
    void *dx;
    const void *dout, *in;
    size_t count;
    double scale, shift;
    int accumulate;
} dt_unary_back_args;

/* Gated linear unit: out[r,c] = f(gate) * up, where f is `act`, a DT_ACT_* before DT_ACT_AFFINE,
   gate = in[r,0,c] and up = in[r,1,c]. `in` has shape (rows,2,cols), `out` has shape
   (rows,cols). */
typedef struct dt_glu_args {
    dt_dtype dtype;
    int act;
    void *out;
    const void *in;
    size_t rows, cols;
} dt_glu_args;

typedef struct dt_glu_back_args { /* backward of glu; dx has shape (rows,2,cols) */
    dt_dtype dtype;
    int act;
    void *dx;
    const void *dout, *in;
    size_t rows, cols;
    int accumulate;
} dt_glu_back_args;

/* For each row of `cols` elements: out = e^(in - max) / sum of e^(in - max). */
typedef struct dt_softmax_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    size_t rows, cols;
    void *work;
    size_t work_bytes; /* at least dt_row_work(cols, dtype) */
} dt_softmax_args;

/* For each row: dx (+)= out * (dout - sum of dout * out). */
typedef struct dt_softmax_back_args {
    dt_dtype dtype;
    void *dx;
    const void *dout, *out;
    size_t rows, cols;
    int accumulate;
    void *work;
    size_t work_bytes;
} dt_softmax_back_args;

/* For each row of `cols` elements: out = (in - mean) * rstd * (gain + gain_offset) + bias. */
typedef struct dt_norm_args {
    dt_dtype dtype;
    /* mean and rstd have shape (rows), f32 or f64, and are saved for the backward */
    void *out, *mean, *rstd;
    const void *in, *gain, *bias;
    size_t rows, cols;
    double eps;
    /* 1: RMSNorm, which subtracts no mean and adds no bias; mean and bias are NULL */
    int rms;
    void *work;
    size_t work_bytes; /* at least dt_row_work(cols, dtype) */
    double gain_offset;
} dt_norm_args;

/* Backward of norm. Each of dx, dgain and dbias may be NULL. Rows are added in ascending order. */
typedef struct dt_norm_back_args {
    dt_dtype dtype;
    void *dx, *dgain, *dbias;
    const void *dout, *in, *gain, *mean, *rstd;
    size_t rows, cols;
    int accumulate_x, accumulate_gain, accumulate_bias, rms;
    int wide_gain, wide_bias;
    /* at least dt_row_work(cols, dtype) bytes; with a larger buffer, a GPU sums several segments in
       parallel */
    void *work;
    size_t work_bytes;
    double gain_offset;
} dt_norm_back_args;

/* RoPE scaling: makes the pairs rotate more slowly, for sequences longer than the `original` tokens
   of the pre-training. Let n_i = original theta^(-2i/rotary) / (2 pi) be the number of turns that
   pair i makes in `original` tokens.

       LINEAR  divides all rates by `factor` (position interpolation, arXiv:2306.15595)
       LLAMA3  keeps the rates of pairs with n_i > high and divides those with n_i < low by
               `factor`; between the bounds it interpolates, linearly in n_i (Llama 3.1, as Hugging
               Face's rope_type "llama3")
       YARN    the same, but interpolates linearly in i (arXiv:2309.00071). Also multiplies sines
               and cosines by `attention`, so the scores are multiplied by its square */
enum { DT_ROPE_UNSCALED = 0, DT_ROPE_LINEAR, DT_ROPE_LLAMA3, DT_ROPE_YARN };
typedef struct dt_rope_scaling {
    int kind;         /* DT_ROPE_* */
    double factor;    /* at least 1 */
    double original;  /* for LLAMA3 and YARN */
    double low, high; /* 0 < low < high; 0 means 1 and 4 for LLAMA3, 1 and 32 for YARN */
    double attention; /* 0 means 0.1 ln(factor) + 1 */
    int exact_bounds; /* 1: YaRN's bounds on i are not rounded outwards (Hugging Face: truncate) */
} dt_rope_scaling;

/* Rotary embedding: rotates pair i of each head of each token by the angle position * rate, where
   `position` is the token's position and the rate is dt_rope_rate. */
typedef struct dt_rope_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    const int32_t *positions; /* (tokens) */
    /* `in` has shape (tokens,heads,dim); in each head the first `rotary` of the dim elements are
       rotated, and the other elements are copied */
    size_t tokens, heads, dim, rotary;
    double theta; /* at least 1 */
    /* 1: pair i is elements 2i and 2i + 1; 0: pair i is elements i and i + rotary/2 */
    int interleaved;
    int inverse, accumulate; /* inverse 1: rotate by the negative angle, as the backward does */
    dt_rope_scaling scaling; /* with all defaults filled in */
} dt_rope_args;

/* out[r,c] (+)= in[r,c] / (1 - p), or 0 if the element is dropped. Whether it is dropped is decided
   by the counter-based RNG from `key`, tokens[r] and the column offset + c. */
typedef struct dt_dropout_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    const int32_t *tokens; /* (rows); NULL means that row r is token r */
    size_t rows, cols;
    int64_t offset; /* column 0 of `in` is this column of the full tensor */
    double p;
    uint64_t key;
    int accumulate;
} dt_dropout_args;

/* out[r] = table[ids[r] - offset], a row of `cols` elements; zeros if another rank holds the id's
   row */
typedef struct dt_embedding_args {
    dt_dtype dtype;
    void *out;
    const void *table;
    const int32_t *ids;
    size_t rows, cols;
    /* `table` holds the ids offset .. offset + table_rows - 1 of the vocabulary 0 .. vocab - 1; an
       id outside the vocabulary fails with DT_ERR_ARG */
    int64_t offset, table_rows, vocab;
    int allow_empty; /* 1: an id of -1 gives zeros; 0: an id of -1 fails */
} dt_embedding_args;

/* dtable[ids[r] - offset] += dout[r], in ascending r; if accumulate is 0, dtable begins at zero. */
typedef struct dt_embedding_back_args {
    dt_dtype dtype;
    void *dtable;
    const void *dout;
    const int32_t *ids;
    size_t rows, cols;
    int64_t offset, table_rows;
    int accumulate, wide;
    void *work;
    size_t work_bytes; /* 4 * table_rows * cols; work is NULL unless dtable is bf16 or f16 */
    /* 1: an id that is neither in the table nor -1 fails with DT_ERR_ARG, and offset must be 0; 0:
       an id that is not in the table is skipped */
    int check_ids;
} dt_embedding_back_args;

/* The k largest elements of each row in descending order. Of equal elements the one in the lowest
   column comes first. A NaN is greater than all numbers, and all NaNs are equal. */
typedef struct dt_topk_args {
    dt_dtype dtype;
    void *values;
    int32_t *index;
    const void *in;
    size_t rows, cols, k;
} dt_topk_args;

/* out[o,index[o,j,i],i] (+)= in[o,j,i]; if accumulate is 0, the other elements of `out` become 0.
   This is the backward of topk and max. */
typedef struct dt_scatter_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    const int32_t *index; /* (outer,k,inner), each index in 0 .. n - 1 */
    size_t outer, n, k, inner;
    int accumulate;
} dt_scatter_args;

/* GEMM: c (+)= act(A B + bias) + residual, for each of `batch` pairs of matrices A (m,k) and B
   (k,n). */
typedef struct dt_matmul_args {
    dt_dtype dtype;
    void *c;
    const void *a, *b;
    int64_t m, n, k, batch;               /* batch 0 means 1 */
    int trans_a, trans_b;                 /* 1: `a` is stored as (k,m), `b` as (n,k) */
    int64_t lda, ldb, ldc;                /* elements from one stored row to the next; 0: dense */
    int64_t stride_a, stride_b, stride_c; /* elements from one matrix to the next */
    const void *bias;                     /* (n) of T, or NULL */
    const void *residual;                 /* of c's shape, but always of T; or NULL */
    int activation;                       /* the DT_ACT_* that is act, before DT_ACT_AFFINE */
    /* NULL, or receives A B + bias, before the activation; of c's shape, but always of T */
    void *pre_activation;
    /* 1: computes the backward of the activation instead: c = (A B) * act'(pre_activation) */
    int activation_backward;
    int accumulate, wide;
    void *work;
    size_t work_bytes; /* dt_matmul_work bytes; if work is NULL, the CPU computes without packing */
    /* If not 0, a dt_quant: `b` has blocks of this format, and each stored row has whole blocks.
       Products by other libraries first convert a panel of columns of B, in `work` */
    int b_quant;
} dt_matmul_args;

/* Attention: out = softmax(scale q k^T) v. The shapes are q and out (B,TQ,H,D), k and v (B,TK,K,D),
   and lse (B,H,TQ) in f32 or f64. H is a multiple of K (grouped-query attention). A causal query
   attends to the keys whose position is not after the query's. By default key j has position j and
   query i has position i + TK - TQ. With document numbers (B,TQ) and (B,TK), a query attends only
   to keys of its own document. A query without keys gets out 0 and lse -infinity.

   Sliding-window attention: if mask.window > 0, a causal query attends only to the last `window`
   keys up to its own, itself included. Tiles of keys outside the window are skipped, so the work is
   proportional to T * window. Soft-capping (Gemma 2, arXiv:2408.00118): if soft_cap > 0, a score s
   becomes soft_cap tanh(s / soft_cap) before the mask and the softmax. */
typedef struct dt_attention_mask { /* attention mask: says which keys a query attends to */
    int causal;
    /* positions and document numbers of queries (B,TQ) and keys (B,TK); each may be NULL */
    const int32_t *q_position, *k_position, *q_document, *k_document;
    int window; /* 0: no window; only with causal */
} dt_attention_mask;

typedef struct dt_attention_args {
    dt_dtype dtype;
    void *out, *lse;
    const void *q, *k, *v;
    int64_t batch, tq, tk, heads, kv_heads, dim;
    double scale;
    dt_attention_mask mask;
    /* Log-sum-exp merge. If merge_lse is 1, `out` and lse hold the result over other keys at the
       call, and the result over all keys after the call. */
    int merge_lse;
    int wide;
    void *work;
    size_t work_bytes; /* dt_attention_work(0, dim, dtype); if work is NULL, naive attention */
    double soft_cap;   /* 0: none */
} dt_attention_args;

/* Backward of attention. Recomputes the scores from lse. k and v may be one block of the keys: if
   `out` and lse come from all keys, the gradients of the blocks add up to the gradient over all
   keys. Each of dq, dk and dv may be NULL. */
typedef struct dt_attention_back_args {
    dt_dtype dtype;
    void *dq, *dk, *dv;
    const void *dout, *out, *lse, *q, *k, *v;
    int64_t batch, tq, tk, heads, kv_heads, dim;
    double scale;
    dt_attention_mask mask;
    int accumulate_q, accumulate_k, accumulate_v;
    int wide; /* applies to dq, dk, dv and out, but not to dout */
    void *work;
    size_t work_bytes; /* dt_attention_work(tk, dim, dtype); if work is NULL, naive attention */
    double soft_cap;
} dt_attention_back_args;

/* *loss = (sum over the rows with label >= 0 of lse - x[label]) / denominator, where x is the row
   of logits and lse = log(sum of e^x). Columns from `vocab` on are padding: they enter no sum and
   get no gradient. With label smoothing s the target probability is s / vocab in every column, plus
   1 - s at the label (arXiv:1512.00567). */
typedef struct dt_cross_entropy_args {
    dt_dtype dtype;
    /* row_loss is (rows) in double; lse is (rows) in f32 or f64 */
    double *loss, *row_loss;
    void *lse;
    const void *logits;
    const int32_t *labels;
    size_t rows, cols, vocab;
    double denominator, smoothing;
    /* if not NULL, receives sum of lse^2 / denominator (arXiv:2204.02311) */
    double *z_loss;
    /* 1: adds to loss and z_loss, for a caller that passes the rows in several chunks */
    int accumulate;
    void *work;
    size_t work_bytes; /* dt_row_work bytes */
    /* Vocabulary-parallel cross-entropy. If partial is not NULL, column 0 is column `offset` of
       full_vocab columns; the first `vocab` columns (vocab may be 0) are real, the rest is padding.
       The kernel then writes only partial (rows,2): for each row the lse of these columns, and the
       sum over these columns of target probability times logit; both are 0 for a label < 0. */
    double *partial;
    int64_t offset, full_vocab;
} dt_cross_entropy_args;

/* Computes the loss from the `partial` arrays of n ranks: partials (n,rows,2), combined in rank
   order. */
typedef struct dt_cross_entropy_merge_args {
    dt_dtype dtype;
    double *loss;
    void *lse;
    const double *partials;
    const int32_t *labels;
    size_t n, rows;
    double denominator, *z_loss; /* lse, loss and z_loss: as in dt_cross_entropy_args */
} dt_cross_entropy_merge_args;

/* dlogits (+)= factor * (softmax * (1 + 2 z lse) - target), where factor = *upstream * scale; 0 in
   rows with label < 0. dlogits may be the same array as logits. */
typedef struct dt_cross_entropy_back_args {
    dt_dtype dtype;
    void *dlogits;
    const void *logits, *lse;
    const int32_t *labels;
    size_t rows, cols, vocab;
    const double *upstream;
    double scale, smoothing, z;
    int accumulate;
    void *work;
    size_t work_bytes;          /* dt_row_work bytes */
    int64_t offset, full_vocab; /* if full_vocab > 0: as in dt_cross_entropy_args */
} dt_cross_entropy_back_args;

/* Losses of pairs of elements. SQUARE is (a - b)^2. BCE, the binary cross-entropy of the logit a
   and the target b, is max(a,0) - a b + ln(1 + e^-|a|). BCE_TARGET, only for pair_loss_back, is BCE
   of the target a and the logit b. */
enum { DT_PAIR_SQUARE = 0, DT_PAIR_BCE, DT_PAIR_BCE_TARGET };
/* *loss = sum of the losses of all pairs / denominator. The sums of pieces of 1,024 elements are
   added in ascending order. */
typedef struct dt_pair_loss_args {
    dt_dtype dtype;
    int kind; /* DT_PAIR_SQUARE or DT_PAIR_BCE */
    double *loss;
    const void *a, *b;
    size_t count;
    double denominator;
} dt_pair_loss_args;

/* da[i] (+)= *upstream * scale * slope. The slope is a - b for SQUARE, so scale has the factor 2;
   1 / (1 + e^-a) - b for BCE; and -b for BCE_TARGET. */
typedef struct dt_pair_loss_back_args {
    dt_dtype dtype;
    int kind; /* a DT_PAIR_* */
    void *da;
    const void *a, *b;
    size_t count;
    const double *upstream;
    double scale;
    int accumulate;
} dt_pair_loss_back_args;

/* Number of elements in one piece of a gradient norm: kernels compute one sum of squares per piece,
   and ranks exchange these sums. */
#define DT_PIECE 1024
/* Gradient norm: out[i] = sum of in[j]^2, in double, over the DT_PIECE elements j of piece i. */
typedef struct dt_square_sums_args {
    dt_dtype dtype;
    double *out;
    const void *in;
    size_t count;
} dt_square_sums_args;

/* Digest of the elements [offset, offset + count) of a tensor, to compare copies: the sum modulo
   2^64 of each word (4 bytes, or a smaller element) times a weight, for word i of the tensor
   w = (i + 1) * 2654435761; w = (w ^ w >> 15) * 2246822507; w ^= w >> 13, modulo 2^32. out[p] is
   the digest of range p; each range has (number of words) / parts + 1 words, so the last ranges may
   be empty. Digests of ranges add up. In a tensor of fewer than 2^32 - 1 words a changed word or a
   swap of two changes the digest, because weights are less than 2^32, distinct and not 0. */
#define DT_DIGEST_PARTS 256
typedef struct dt_digest_args {
    dt_dtype dtype;
    uint64_t *out; /* (parts) */
    const void *in;
    size_t count;
    uint64_t offset;
    size_t parts; /* 1 to DT_DIGEST_PARTS */
} dt_digest_args;

/* One optimizer step over a flat array. AdamW: arXiv:1711.05101. Adam with L2 (coupled):
   arXiv:1412.6980. */
typedef struct dt_adamw_args {
    /* all arrays are of T, which is f32 or f64 */
    dt_dtype dtype;
    void *param;
    const void *grad;
    void *m, *v;
    size_t count;
    double lr, beta1, beta2, eps, weight_decay, grad_scale; /* the gradient is grad * grad_scale */
    /* this step, from 1, for the bias correction 1 - beta^step; INT64_MAX: no correction */
    int64_t step;
    /* 0: weight decay is decoupled from the moments (AdamW); 1: weight decay is added to the
       gradient (Adam) */
    int coupled;
    /* Mixed precision: if model_param is not NULL, it receives `param` rounded to model_dtype, bf16
       or f16, and `param` is the master weight */
    dt_dtype model_dtype;
    void *model_param;
    /* Linked list of further arrays to update in the same call; the last has next = NULL. A GPU
       updates many small arrays in one launch. All have the same types and do not overlap. */
    const struct dt_adamw_args *next;
} dt_adamw_args;

/* SGD with momentum: b = momentum * b + g, then p -= lr * b, where p is param, b is momentum_buffer
   and g = grad * grad_scale + weight_decay * p. The first step sets b = g. */
typedef struct dt_sgd_args {
    dt_dtype dtype;
    void *param;
    const void *grad;
    void *momentum_buffer;
    size_t count;
    double lr, momentum, weight_decay, grad_scale;
    int64_t step;
    dt_dtype model_dtype;
    void *model_param; /* as in dt_adamw_args */
} dt_sgd_args;

/* 1-bit Adam, arXiv:2102.02888. Once v is frozen, a step updates the rank's momentum, packs the
   momentum as signs for the exchange (sign_pack, sign_unpack), and updates the parameters. A
   message is `count` signs and then the scale of the signs, a double. Bit i % 8 of byte i / 8 is 1
   if element i is not negative. An element with v = 0 never had a gradient, or is padding: the
   element enters no sum, and its error and mean are 0. */
typedef struct dt_momentum_args { /* m = beta1 * m + (1 - beta1) * grad * grad_scale */
    /* DT_F32 or DT_F64, as in the three kernels below */
    dt_dtype dtype;
    void *m;
    const void *grad;
    size_t count;
    double beta1, grad_scale;
} dt_momentum_args;

/* p -= lr * (m / (sqrt(v) + eps) + weight_decay * p), where p is param; m and v do not change */
typedef struct dt_frozen_adam_args {
    dt_dtype dtype;
    void *param;
    const void *m, *v;
    size_t count;
    double lr, eps, weight_decay;
    dt_dtype model_dtype;
    void *model_param; /* as in dt_adamw_args */
} dt_frozen_adam_args;

/* Writes `parts` messages to `out`, each with count / parts signs of x + error. count / parts is a
   multiple of 8. All messages have one scale, |x + error| / sqrt(number of elements), where |.| is
   the Euclidean norm. */
typedef struct dt_sign_pack_args {
    dt_dtype dtype;
    void *out;
    const void *x;
    void *error; /* before the call the error of the last messages, then of these */
    const void *v;
    size_t count, parts;
    /* two doubles for each DT_PIECE elements of count, and one more; the CPU needs no scratch */
    void *work;
    size_t work_bytes;
} dt_sign_pack_args;

/* out[i] = mean of element i over n messages of `count` signs, added in the order of the
   messages */
typedef struct dt_sign_unpack_args {
    dt_dtype dtype;
    void *out;
    const void *in, *v;
    size_t count, n;
} dt_sign_unpack_args;

/* The kernel table of a device: how to allocate tensor memory, and the kernels. To replace a
   kernel, copy a table and change an entry. A call of a kernel whose entry is NULL fails with
   DT_ERR_UNSUPPORTED and the kernel's name. */
typedef struct dt_kernels {
    const char *name;                         /* "cpu", "cuda" */
    void *(*alloc)(void *user, size_t bytes); /* NULL: the host table allocates */
    void (*free)(void *user, void *p, size_t bytes);
    /* copies bytes between host and device memory, in any direction */
    dt_status (*move)(void *dst, const void *src, size_t bytes, void *stream);
    /* Waits until the stream is empty. Returns DT_ERR_ARG if a kernel has skipped an index outside
       its table since the last sync: a device checks indices only after the kernel's call has
       returned. If the entry is NULL, kernels are synchronous. */
    dt_status (*sync)(void *stream);
    void *user;
    /* Opens a stream, which kernels receive as `stream`. local_rank is the rank's number on its
       machine. Returns NULL on failure, with the reason in `text`. The CPU's entry is NULL, because
       its kernels are synchronous. */
    void *(*open)(int local_rank, char *text, size_t text_bytes);
    void (*close)(void *stream);
    /* Allocates pinned host memory: `move` copies pinned memory at full speed and may return before
       the copy is complete. If the entry is NULL, the host table allocates the memory. */
    void *(*pin)(size_t bytes);
    void (*unpin)(void *p, size_t bytes);
    /* Returns 1 if kernels can read and write p. If the entry is NULL, kernels can access all
       memory. */
    int (*can_access)(const void *p);
    /* Lets kernels of this stream access the memory of devices 0 .. max_devices - 1, because ranks
       that are threads read and write each other's memory. On failure returns DT_ERR_DEVICE with
       the reason in `text`. If the entry is NULL, access is always possible. */
    dt_status (*enable_peer_access)(void *stream, int max_devices, char *text, size_t text_bytes);
    /* Device events. event_record marks the end of all work that is in the stream now. The mark is
       `event`, which is reused, or a new event if `event` is NULL. If the device refuses,
       event_record returns NULL; the caller then still owns `event`, which stays valid. event_query
       returns 1 if the device has passed the event, 0 if it has not yet, and -1 if the event
       failed. event_wait makes later work of this stream wait for an event of another stream. */
    void *(*event_record)(void *stream, void *event);
    int (*event_query)(void *event);
    dt_status (*event_wait)(void *stream, void *event);
    void (*event_destroy)(void *event);
    size_t work_bytes; /* smallest useful scratch size for products, attention and sums */
    /* dt_linear_cross_entropy saves its logits for the backward if there are at most
       max_saved_logits of them; 0: it saves none */
    size_t max_saved_logits;
#define DT_KERNEL_ENTRY(k) dt_status (*k)(const dt_##k##_args *args, void *stream);
    DT_KERNELS(DT_KERNEL_ENTRY)
#undef DT_KERNEL_ENTRY
} dt_kernels;

/* [local] Returns the kernel table of the CPU, which is constant and shared by all contexts. */
DT_API const dt_kernels *dt_kernels_cpu(void);
/* [local] Return how many bytes of scratch memory CPU kernels need: matmul (dt_matmul_work),
   softmax, norm and cross-entropy (dt_row_work), and attention (dt_attention_work; the forward
   needs the bytes for tk = 0, whatever its number of keys is). They return 0 for a negative size
   and SIZE_MAX on overflow. */
DT_API size_t dt_matmul_work(int64_t n, int64_t k, dt_dtype dtype);
DT_API size_t dt_row_work(int64_t cols, dt_dtype dtype);
DT_API size_t dt_attention_work(int64_t tk, int64_t dim, dt_dtype dtype);
/* Returns the rate of pair i in radians per token: theta^(-2i/rotary), with RoPE scaling. For
   kernels of the table; a->scaling must have its defaults filled in. */
DT_API double dt_rope_rate(const dt_rope_args *a, size_t i);

/* CUDA. dt_kernels.cu defines the functions below, and a program uses CUDA if it is linked with the
   object of dt_kernels.cu. They are weak references: without that object their addresses are NULL,
   so a program that can do without CUDA tests `if (dt_cuda_ready)` before it calls any of them. A
   weak reference does not load an object from an archive (.a): name dt_kernels.o itself. */

/* [local] Returns the kernel table of dt_kernels.cu, never NULL. dt_cuda_ready says whether a GPU
   can be used. */
extern DT__WEAK const dt_kernels *dt_kernels_cuda(void);
/* [local] Returns DT_OK if a GPU can be used, else DT_ERR_DEVICE with the reason in `text` ("no
   NVIDIA driver found"). With DT_OK, `text` is "", or advises a value of nvcc's -arch if
   dt_kernels.cu was not compiled for the device. */
extern DT__WEAK dt_status dt_cuda_ready(char *text, size_t text_bytes);
/* [local] dt_cuda_open opens a stream on a device of your choice, or wraps your own stream, for use
   as dt_ctx_desc.stream. The device becomes the calling thread's current device. Returns NULL on
   failure, with the reason in `text`. If dt_ctx_desc.stream is NULL, the context itself opens a
   stream, on device local_rank modulo the number of devices, and closes it. dt_cuda_close waits for
   the stream's work; a wrapped stream stays open. Calls on a context, and dt_cuda_close, must come
   from a thread whose current device is the stream's device; a thread with another current
   device must call cudaSetDevice before such a call. */
typedef struct dt_cuda_desc {
    int device;
    void *stream;      /* a cudaStream_t of that device; NULL: dt_cuda_open creates a stream */
    int high_priority; /* kernels of this stream are scheduled before kernels of other streams */
} dt_cuda_desc;
extern DT__WEAK void *dt_cuda_open(dt_cuda_desc desc, char *text, size_t text_bytes);
extern DT__WEAK void dt_cuda_close(void *queue);
/* [local] dt_cuda_stream returns the cudaStream_t in which the context's kernels run, and your own
   kernels may run in it too. dt_cuda_device returns the stream's device. Pass queue =
   dt_ctx_stream(ctx). If `queue` is NULL, the functions return the default stream and the thread's
   current device. */
extern DT__WEAK void *dt_cuda_stream(void *queue);
extern DT__WEAK int dt_cuda_device(void *queue);

// ==== 3. Host and io tables =====================================================================

/* The library uses the operating system only through two tables: dt_host (memory, clock, sleep,
   log) and dt_io (files). Tests wrap these tables to inject faults, run a virtual clock or limit
   memory. */

/* Memory classes: what memory is used for. dt_memory counts the bytes of each class separately. */
typedef enum dt_mem {
    DT_MEM_PARAMS = 0, /* parameter values in buckets */
    DT_MEM_GRADS,      /* gradients accumulated until the update */
    DT_MEM_OPTIM,      /* optimizer state */
    DT_MEM_ACTS,       /* arenas of blocks: activations and their gradients */
    DT_MEM_COMM,       /* communication buffers, gathered buckets, micro-batch gradients */
    DT_MEM_HOST,       /* bookkeeping: contexts, names, tape nodes */
    DT_MEM_TEMP,       /* scratch memory of kernels */
    DT_MEM_CLASSES
} dt_mem;

/* Log levels. The default table prints errors and notices, not details. */
enum { DT_LOG_ERROR = 0, DT_LOG_NOTICE, DT_LOG_DETAIL };

/* The library allocates, waits, reads the clock and prints only through this table. */
typedef struct dt_host {
    void *user;
    /* returns memory aligned to 64 bytes, or NULL if the host refuses */
    void *(*alloc)(void *user, size_t bytes, dt_mem mem);
    void (*free)(void *user, void *p, size_t bytes, dt_mem mem);
    double (*now)(void *user);                 /* monotonic clock, in seconds */
    void (*sleep)(void *user, double seconds); /* 0 s: yields to another thread */
    void (*log)(void *user, int level, int rank, const char *text);
    /* Returns zeroed memory that is shared with forks of this process and whose pages are allocated
       when first touched; NULL if the host refuses. If the entries map, unmap and discard are all
       NULL, ranks cannot be forked. */
    void *(*map)(void *user, size_t bytes);
    void (*unmap)(void *user, void *p, size_t bytes);
    /* frees the whole pages within [p, p + bytes) of mapped memory, which then read as zero */
    void (*discard)(void *user, void *p, size_t bytes);
} dt_host;

/* How to open a file. Modes that write do not follow a symbolic link at the path (O_NOFOLLOW).
   Every mode refuses a FIFO, a device or a socket, without blocking. */
typedef enum dt_io_mode {
    DT_IO_READ = 0, /* an existing file, or a folder to fsync */
    DT_IO_WRITE,    /* an existing file, for reading and writing, as in all modes below */
    DT_IO_CREATE,   /* a new file; errno EEXIST if it exists */
    DT_IO_PRIVATE,  /* a new file that other users cannot read */
    DT_IO_LOCK      /* an existing file without other hard links, or a new one */
} dt_io_mode;

/* Files. On failure every call returns -1 and sets errno; errno is ENOENT or ENOTDIR if the file
   does not exist. */
typedef struct dt_io {
    void *user;
    /* returns a file descriptor; `mode` is a dt_io_mode */
    int (*open)(void *user, const char *path, int mode);
    int (*close)(void *user, int fd);
    int64_t (*size)(void *user, int fd);
    int64_t (*pread)(void *user, int fd, void *buf, size_t bytes, int64_t offset);
    int64_t (*pwrite)(void *user, int fd, const void *buf, size_t bytes, int64_t offset);
    int (*fsync)(void *user, int fd);
    int (*rename)(void *user, const char *from, const char *to);
    int (*resize)(void *user, int fd, int64_t bytes); /* new bytes are zero */
    int (*remove)(void *user, const char *path); /* removes a file, or the symbolic link itself */
    /* writes bytes offset .. offset + bytes - 1 of the file to disk and evicts them from the page
       cache; may be NULL */
    int (*sync_and_evict)(void *user, int fd, int64_t bytes, int64_t offset);
    /* The entries below are needed only by checkpoints; a table without them cannot write
       checkpoints. */
    int (*make_folder)(void *user, const char *path); /* creates a folder */
    /* Calls each() for every entry of a folder except . and ..; each() may remove that entry. */
    int (*list_folder)(
        void *user, const char *path, void (*each)(void *arg, const char *name), void *arg);
    /* Locks the file until it is closed or its process ends for any reason. Fails with errno
       EWOULDBLOCK if another process holds the lock. */
    int (*lock)(void *user, int fd);
    /* Removes the named files from a folder, in order, then the folder if it is empty. Follows no
       symbolic link: if the folder or a file is a link, removes the link. */
    int (*remove_folder)(void *user, const char *path, const char *const *names, int n);
} dt_io;

/* [local] Return the tables that use libc; both are constant. */
DT_API const dt_host *dt_host_default(void);
DT_API const dt_io *dt_io_default(void);

// ==== 4. Context, errors, memory account ========================================================

/* A context is one rank. All state is in the context, because a rank may be a thread: the library
   has no global variables.

       dt_ctx --+-- kernel, host and io tables
                +-- first error (sticky) and its text
                +-- bytes by class, live and peak
                +-- parameters in registration order, their buckets
                +-- tapes: trees of blocks with their arenas
                +-- listeners: how dt_comm.h and dt_zero.h attach */

typedef struct dt_ctx dt_ctx; /* one rank: its memory, tapes, parameters, first error */
typedef struct dt_tensor dt_tensor;
/* This rank's handle of a process group (dt_comm.h). The struct begins with a dt_group. */
typedef struct dt_comm dt_comm;

/* The part of a dt_comm that this header uses: this rank's number in the group, the group's size,
   its members and its name. */
typedef struct dt_group {
    int rank, size;
    const int *ranks; /* (size) the members' world ranks; NULL: not known */
    const char *name;
    int pipeline; /* 1: the members are pipeline stages, so they run different ops */
} dt_group;

typedef struct dt_ctx_desc {
    uint64_t seed; /* of the initial values, see section 5; 0 means 1 */
    int rank;      /* number of this rank, for messages */
    /* NULL means dt_kernels_cuda() if the program is linked with it and dt_cuda_ready returns
       DT_OK, else dt_kernels_cpu() */
    const dt_kernels *kernels;
    const dt_host *host; /* NULL means dt_host_default() */
    const dt_io *io;     /* NULL means dt_io_default() */
    void *stream;        /* passed to every kernel; NULL: the context opens a stream */
    /* This rank's number among the ranks of its machine (torchrun's LOCAL_RANK). The rank uses
       device local_rank modulo the number of devices. Calls on a context with a device must come
       from a thread whose current device is the context's device. dt_ctx_make sets the current
       device of the calling thread, and dt_run sets the current device of each rank's thread. */
    int local_rank;
    size_t mem_limit; /* most bytes that may be live in all classes together; 0: no limit */
} dt_ctx_desc;

/* [local] Makes a context. Returns NULL if the host table refuses the memory. dt_run makes a
   context for each rank; a program without dt_run calls dt_ctx_make itself. */
DT_API dt_ctx *dt_ctx_make(dt_ctx_desc desc);
/* [local] Frees everything the context owns. NULL is allowed. */
DT_API void dt_ctx_free(dt_ctx *ctx);

/* [local] Return the tables, stream, rank and seed of the context; NULL or 0 if ctx is NULL. */
DT_API const dt_kernels *dt_ctx_kernels(const dt_ctx *ctx);
DT_API const dt_host *dt_ctx_host(const dt_ctx *ctx);
DT_API const dt_io *dt_ctx_io(const dt_ctx *ctx);
DT_API void *dt_ctx_stream(const dt_ctx *ctx);
DT_API int dt_ctx_rank(const dt_ctx *ctx);
DT_API uint64_t dt_ctx_seed(const dt_ctx *ctx);
/* [local] dt_ctx_attach stores a pointer in the context and dt_ctx_attached returns the pointer.
   dt_comm.h stores this rank's world there; this header does not use the pointer. */
DT_API void *dt_ctx_attached(const dt_ctx *ctx);
DT_API void dt_ctx_attach(dt_ctx *ctx, void *upper);

/* [local] Fails the context: records the first failure with its reason, logs the failure and tells
   the listeners, so that the other ranks learn of it. Later failures are not recorded. Returns
   status. Call dt_fail from your own ops too. */
DT_API dt_status dt_fail(dt_ctx *ctx, dt_status status, const char *fmt, ...) DT_PRINTF(3, 4);
/* [local] Returns the status of the first failure, for the rest of the context's life; DT_OK if
   there was no failure; DT_ERR_MEM if ctx is NULL. */
DT_API dt_status dt_error(const dt_ctx *ctx);
/* [local] Returns the text of the first failure, for example "rank 3: dt_linear(w1): x (8,128) and
   w (64,256): 128 != 256"; "" if there was no failure. */
DT_API const char *dt_error_text(const dt_ctx *ctx);
/* [local] Sends one line to the log hook. Control characters and bytes that are not UTF-8 become
   \xNN, as in dt_error_text. */
DT_API void dt_log(dt_ctx *ctx, int level, const char *fmt, ...) DT_PRINTF(3, 4);
/* [local] Returns the length in bytes of the printable UTF-8 character at s (s ends with NUL); 0
   for a control character (C0, DEL, C1) or an invalid byte, which dt's messages show as \xNN. */
DT_API size_t dt_printable(const char *s);

/* CALL SITES. Functions that wait for other ranks are also macros, which pass the source line of
   the call: error texts, wait reports and records of operations name that line. Ops are no macros:
   if an op at ZeRO-3 has to wait for a parameter's values, error texts name the op instead of a
   line. To name a function itself, for example to take its address, put its name in parentheses or
   write no argument list after it. */
typedef struct dt_site {
    const char *file; /* NULL: not known */
    int line;
} dt_site;
/* [local] Set the call site of the context's next operation. Return ctx or t. */
DT_API dt_ctx *dt_ctx_here(dt_ctx *ctx, const char *file, int line);
DT_API dt_tensor *dt_tensor_here(const dt_tensor *t, const char *file, int line);
/* the call site as two arguments: the last 31 characters of the file's name, and the line */
#define DT_SITE &__FILE__[sizeof __FILE__ > 32 ? sizeof __FILE__ - 32 : 0], __LINE__

typedef struct dt_memory {
    size_t live[DT_MEM_CLASSES], peak[DT_MEM_CLASSES]; /* bytes of each class */
    /* bytes of all classes; peak_total is the peak of the sum, not the sum of the peaks */
    size_t live_total, peak_total;
    size_t allocations; /* calls of the allocator so far */
} dt_memory;

/* [local] Returns the bytes of each class. Only dt_alloc, dt_free, dt_pin and dt_unpin change these
   counters. */
DT_API dt_memory dt_memory_used(const dt_ctx *ctx);
/* [local] Sets each peak to the bytes that are live now. */
DT_API void dt_memory_reset_peak(dt_ctx *ctx);

/* [local] Allocates memory of class `mem`: from the host table for DT_MEM_HOST, from the kernel
   table for all other classes. Returns NULL without an error if bytes is 0. If the table returns
   NULL, or if the allocation would exceed mem_limit, the function fails the context with
   DT_ERR_MEM. The error text has `what` and the bytes, and the log hook gets a notice with the live
   bytes and the peak of each class. */
DT_API void *dt_alloc(dt_ctx *ctx, dt_mem mem, size_t bytes, const char *what);
/* [local] Frees memory from dt_alloc, with `mem` and `bytes` of the allocation; p may be NULL. */
DT_API void dt_free(dt_ctx *ctx, dt_mem mem, void *p, size_t bytes);
/* [local] dt_pin allocates pinned host memory of class DT_MEM_HOST: a device copies to and from
   this memory without the CPU. Before dt_unpin, wait for the copies in flight, because dt_unpin
   does not wait. */
DT_API void *dt_pin(dt_ctx *ctx, size_t bytes, const char *what);
DT_API void dt_unpin(dt_ctx *ctx, void *p, size_t bytes);
/* [local] Returns scratch memory of at least `bytes`, valid until the next dt_scratch call. The
   context keeps one buffer, which grows to the largest request. */
DT_API void *dt_scratch(dt_ctx *ctx, size_t bytes);

// ==== 5. Tensors and parameters =================================================================

/* A parameter is a slice of a full logical tensor. Up to three pairs {group, dim} say how the
   tensor is sharded (DTensor's Shard). A rank stores only its local slice. For example, if w has
   shape (4,6) and dimension 1 is sharded over a group of 4 ranks:

       column     0 1 | 2 3 | 4 5 | - -       local shape (4,2) on every rank, ceil(6 / 4) columns;
       rank        0     1     2     3        rank 3's slice lies past the end: padding, all zero

   Initial values are a function of (seed, name, global index), so every layout starts from the same
   model.

   A tensor carries its placement over each group of more than one rank that a dt_redistribute,
   dt_place, layer of dt_parallel.h or dt_param_desc has named for it or for its inputs, as in
   PyTorch's DTensor (GSPMD, arXiv:2105.04663). With dt_zero_make, a parameter without a statement
   is COPY over the data group and REPLICATE over other groups. Sharding propagation: the rule of an
   op computes the placement of the result from those of the inputs, or fails the context, because
   local arithmetic would silently give another number. A part of the rules; d is the dimension that
   is sharded:

       op                           result of SHARD(d)                result of PARTIAL
       GELU, exp, ..                SHARD(d)                          refused
       scale, cast, transpose, ..   SHARD(where d goes)               PARTIAL
       add, subtract, concat        SHARD(d)                      *   PARTIAL, if all inputs are
       multiply                     SHARD(d)                      *   PARTIAL, if exactly one is
       divide                       SHARD(d)                      *   PARTIAL, if the numerator is;
                                                                      refused for the denominator
       sum over d                   PARTIAL                           PARTIAL
       mean over d, slice along d   refused                           PARTIAL
       concat along d               refused                           PARTIAL, if all inputs are
       maximum over d, softmax or   refused                           refused
       norm along d
       x w^T, d is summed           PARTIAL, if x and w are sharded   PARTIAL, if exactly one is
       x w^T, d is an output or     SHARD(where d goes)           *
       a row
       bias, residual               as add                            refused; dt_row_linear adds
                                                                      them after the sum
       attention                    heads; tokens: dt_cp_attention    refused
       cross-entropy                PARTIAL over rows, refused        refused
                                    along the vocabulary

       *  An input that lacks d gets only a part of its gradient on each rank, so it must be COPY:
          an activation by dt_tp_enter, a parameter by DT_GRAD_PARTIAL.

   REPLICATE and COPY stay as they are; of two inputs with gradients one cannot be REPLICATE and the
   other COPY. A LOCAL tensor counts as REPLICATE beside a sharded weight and beside a partial sum,
   and fits to any other. dt_reshape keeps a shard if its blocks still begin where a new dimension
   begins: (T,2*4) SHARD(1) -> (T,2,4) is SHARD(1). With one head per rank, (T,4) -> (T,1,4) could
   be SHARD(1) or SHARD(2): UNPLACED. Nothing is known about the result of an op of your own
   (dt_record), and it fits to any other tensor, until dt_place states its placement. */

typedef struct dt_param_info dt_param_info;
typedef struct dt_block_state dt_block_state;

/* How a tensor is placed over a group of N ranks. In code the placements are DT_REPLICATE, DT_COPY,
   DT_SHARD(dim) and DT_PARTIAL:

       REPLICATE   every rank has the whole value and the whole gradient
       COPY        every rank has the whole value; each rank's gradient is a partial sum, and the
                   gradient of the tensor is the sum over the ranks
       SHARD(dim)  rank r has shard r of N equal shards along dim
       PARTIAL     each rank's value is a partial sum, and the value of the tensor is the sum over
                   the ranks; every rank has the whole gradient
       UNPLACED    nothing is known, and nothing is checked
       LOCAL       no group has been named for the tensor; dt_placement_of returns UNPLACED

   The gradient of a COPY tensor is PARTIAL, and the gradient of a PARTIAL tensor is COPY. The
   gradient of a REPLICATE or SHARD tensor has the same placement as the tensor. */
enum {
    DT_PLACEMENT_REPLICATE = 0,
    DT_PLACEMENT_COPY,
    DT_PLACEMENT_SHARD,
    DT_PLACEMENT_PARTIAL,
    DT_PLACEMENT_NONE
};
typedef struct dt_placement {
    int kind, dim;
} dt_placement;
#define DT_REPLICATE (DT__LITERAL(dt_placement){ DT_PLACEMENT_REPLICATE, 0 })
#define DT_COPY (DT__LITERAL(dt_placement){ DT_PLACEMENT_COPY, 0 })
#define DT_SHARD(dim) (DT__LITERAL(dt_placement){ DT_PLACEMENT_SHARD, (dim) })
#define DT_PARTIAL (DT__LITERAL(dt_placement){ DT_PLACEMENT_PARTIAL, 0 })
#define DT_UNPLACED (DT__LITERAL(dt_placement){ DT_PLACEMENT_NONE, 0 })
/* The placements of a tensor, one for each group that was named for it (private). */
typedef struct dt_placements dt_placements;

struct dt_tensor { /* your code may read and print a tensor; only ops write it */
    /* Device memory, dense, row-major. Its owner is the bucket (parameters), the base (views), else
       the tensor itself or its block. NULL after the data were dropped, and for a parameter without
       storage or that is not gathered. */
    void *data;
    /* The gradient: memory like `data`, but in f32 for a bf16 or f16 parameter. dt_backward sets
       the gradient of parameters and dt_require_grad tensors, except of parameters at ZeRO-2 and
       ZeRO-3, where a rank keeps only a shard of the gradient (dt_zero_grad). With dt_zero a
       parameter's gradient is valid until the next step's first dt_block: do not keep the pointer,
       which may be NULL or another one after that. The gradient of any other tensor is valid only
       until the backward of its op. */
    void *grad;
    dt_shape shape; /* local shape, that of this rank's slice */
    dt_dtype dtype;
    const char *name; /* the name of the parameter, or of the op that made the tensor */
    dt_ctx *ctx;
    int needs_grad;
    dt_tensor *base;      /* in a view: the tensor whose data and gradient the view uses */
    dt_param_info *param; /* NULL if not a parameter */

    /* private: */
    dt_block_state *block;           /* the block to which the tensor belongs */
    int block_index;                 /* of the dt_block call that made it; 0: outside of blocks */
    dt_tensor *next;                 /* in the list of the tensors of a block, newest first */
    struct dt_node *producer;        /* the recorded op that made this tensor, or NULL */
    int readers;                     /* how many ops took it as an input, except under dt_no_grad */
    int read_by_weights;             /* 1: the weight half of an op's backward reads the data */
    dt_tensor *shares;               /* the tensor whose memory it uses (dt_alias, dt_linear) */
    int last_use;                    /* 1: dt_last_use was called */
    const dt_placements *placements; /* NULL: LOCAL; see dt_placement_of */
    /* DT__IN_ARENA .., DT__GRAD_IN_ARENA ..: who owns `data` and `grad` (section 16) */
    int storage, grad_storage;
    /* if dimension 0 varies from step to step: its largest size, or DT__NO_BOUND; else 0 */
    int64_t max_rows;
    /* NULL, or how `data` and `grad` move between ranks in pieces while ops compute (section 16) */
    struct dt__flow *flow, *grad_flow;
    int deferred_reads;      /* number of deferred weight halves that read `data` (section 18) */
    int drop_after_deferred; /* 1: the last of them drops `data` */
};

typedef struct dt_init {
    int kind;
    double scale;
} dt_init;
#define DT_ZEROS (DT__LITERAL(dt_init){ 0, 0.0 })
#define DT_ONES (DT__LITERAL(dt_init){ 1, 1.0 })
#define DT_NORMAL(std) (DT__LITERAL(dt_init){ 2, (std) })
#define DT_UNIFORM(a) (DT__LITERAL(dt_init){ 3, (a) }) /* in [-a, a) */

/* Shard over a group: rank r of the n ranks of comm holds slice r of n equal slices along dimension
   dim. comm NULL means not sharded. */
typedef struct dt_shard_spec {
    dt_comm *comm;
    int dim;
} dt_shard_spec;
enum { DT_GRAD_REPLICATED = 0, DT_GRAD_PARTIAL };
/* DT_GRAD_PARTIAL: each rank's gradient is a partial sum; the gradients must be added over comm.
   DT_GRAD_REPLICATED: all ranks have the same gradient. */
typedef struct dt_grad_placement {
    dt_comm *comm;
    int kind;
} dt_grad_placement;

/* Quantised storage of frozen weights (QLoRA, arXiv:2305.14314). The last dimension is divided into
   blocks, and each block is a scale and one small code for each element:

       BF16    2 bytes for each element                                     blocks of 1
       INT8    68 bytes: scale = max|x| / 127 (f32), then 64 codes          blocks of 64
               round(x / scale); value = scale * code
       NF4     36 bytes: scale = max|x| (f32), then 32 bytes with two       blocks of 64
               4-bit codes each, the first in the high nibble;
               value = scale * table[code]

   The table and the rounding of NF4 are those of bitsandbytes: codes and scales have the same bits,
   but each scale is stored beside its codes. A product converts blocks to f32 values, a tile at a
   time. In a bf16 or f16 model the CUDA kernels round these values to the model's type; the CPU
   computes with the f32 values. */
typedef enum dt_quant { DT_QUANT_NONE = 0, DT_QUANT_BF16, DT_QUANT_INT8, DT_QUANT_NF4 } dt_quant;
/* [local] Returns the name of a format: "nf4", ...; "none" for DT_QUANT_NONE. */
DT_API const char *dt_quant_name(dt_quant quant);
/* [local] Returns the bytes of `count` elements, 0 if count is not a multiple of the block or the
   format is unknown or DT_QUANT_NONE. */
DT_API size_t dt_quant_bytes(dt_quant quant, int64_t count);
/* [local] Convert `count` elements in host memory, a multiple of the block, to blocks and back.
   Return DT_ERR_ARG for another count or format. dt_quantize returns DT_ERR_NUMERIC for a NaN or an
   infinity, which INT8 and NF4 cannot store. */
DT_API dt_status dt_quantize(dt_quant quant, const float *in, int64_t count, void *out);
DT_API dt_status dt_dequantize(dt_quant quant, const void *in, int64_t count, float *out);

/* How a parameter is sharded and trained. For LoRA, freeze the base weight (frozen = 1) and give
   its layer a dt_adapter. */
typedef struct dt_param_desc {
    dt_shard_spec shards[3]; /* the groups that shard the full tensor, and along which dimensions */
    /* Groups over which the gradient is not placed as usual. Usually (dt_zero.h) the gradient is
       summed over the data group, sharded over the groups in `shards`, and replicated over all
       other groups. */
    dt_grad_placement grad_placements[2];
    int frozen; /* 1: no gradient, no update */
    /* 1: no weight decay, and no matrix for Muon, like a parameter with fewer than 2 dimensions */
    int no_decay;
    double lr_scale; /* 0 means 1 */
    dt_dtype dtype;  /* 0 means DT_F32 */
    /* How many of the leading dimensions count matrices, for optimizers that treat matrices as a
       whole (Muon): experts (E,F,C) are E matrices with 1, gate and up (2,F,C) two. The last
       dimension is the matrix's columns, the dimensions between are its rows: with 0, (H,D,C) is
       one matrix (H*D,C). At most the number of dimensions minus 2 */
    int matrices;
    /* Quantised storage (QLoRA) of a frozen weight; DT_QUANT_NONE: elements of type `dtype`. A
       quantised parameter is a DT_U8 tensor: the last dimension of its shape and of `full` counts
       the bytes of the blocks, and dt_read, checkpoints and the memory account see these bytes.
       `dtype` has no effect. Only the linear layers (dt_linear_at, dt_column_linear, dt_row_linear,
       dt_grouped_linear) compute with it. dt_weights_load quantises a float tensor of a file. If a
       group shards the last dimension, each rank's part must be whole blocks */
    dt_quant quant;
    /* 1: other pipeline stages of this rank may use the parameter, too: tied embeddings, if one
       rank has the first and the last stage (ZB-V, DualPipe-V). The last backward of the
       parameter's own stage completes the step's gradient: run the other stages' backwards before
       it */
    int shared_stages;
} dt_param_desc;

/* Local slice: the part of a full logical tensor that a rank holds. If the group's size does not
   divide a dimension, the last slices reach past the dimension's end. The part of a slice past the
   end is padding: zero, without a gradient, not counted and not saved. */
typedef struct dt_local_slice {
    int64_t lo[DT_MAX_DIMS]; /* index in the full tensor where the slice begins */
    int64_t n[DT_MAX_DIMS];  /* size of the slice = ceil(full size / group size) */
    /* how many of the n indices lie inside the full tensor; the others are padding */
    int64_t inside[DT_MAX_DIMS];
} dt_local_slice;

typedef struct dt_bucket dt_bucket;

struct dt_param_info { /* the data of a parameter besides its tensor; read-only */
    int index;         /* in registration order */
    dt_shape full;     /* shape of the full logical tensor */
    dt_local_slice slice;
    dt_init init;
    dt_param_desc desc;
    int scope;            /* number of dt_scope and dt_stage calls before its registration */
    int stage;            /* from dt_stage */
    int group;            /* parameter group (dt_zero.h); the same for a bucket's parameters */
    int by_matrix;        /* 1: Muon updates it (dt_zero.h); the same for a bucket's parameters */
    dt_bucket *bucket;    /* NULL until dt_buckets_make */
    size_t offset, count; /* offset in the bucket and local size, in elements */
    int grad_started;     /* 1: an op has written this micro-batch's gradient */
};

/* [local] Registers a parameter of type f32 that is not sharded. The parameter has no memory and no
   values until dt_buckets_make. Fails if the name is taken or dt_buckets_make has already run. */
DT_API dt_tensor *dt_param(dt_ctx *ctx, const char *name, dt_shape full, dt_init init);
/* [local] Registers a parameter as dt_param does, with shardings, gradient placements and flags.
   Every rank passes the same full shape. */
DT_API dt_tensor *dt_param_at(
    dt_ctx *ctx, const char *name, dt_shape full, dt_init init, dt_param_desc desc);
/* [local] Sets a prefix, for example "h.0.", for the names of all parameters registered after this
   call, and begins a new bucket. NULL means no prefix. The text is copied. */
DT_API void dt_scope(dt_ctx *ctx, const char *prefix);
/* [local] Pipeline parallelism: all parameters registered after this call belong to stage `stage`
   >= 0, and a new bucket begins. A rank may hold several stages; each stage has a separate tape
   (section 8). Without this call the stage is 0. After this call dt_zero_make accepts a rank
   without parameters. */
DT_API void dt_stage(dt_ctx *ctx, int stage);
/* [local] Return the number of parameters, parameter `index` in registration order, and the
   parameter with a name. The last two return NULL if there is no parameter with this index or
   name. */
DT_API int dt_param_count(const dt_ctx *ctx);
DT_API dt_tensor *dt_param_get(const dt_ctx *ctx, int index);
DT_API dt_tensor *dt_param_find(const dt_ctx *ctx, const char *name);
/* [local] Returns this rank's local slice of a tensor of shape `full` that is sharded as `shards`
   say (NULL: not sharded); all 0 if `full` is invalid. A sharding along a dimension that `full`
   does not have is ignored. */
DT_API dt_local_slice dt_local_slice_of(dt_shape full, const dt_shard_spec shards[3]);

/* [local] Returns a new tensor with a copy of the data at `host`, without a gradient, valid until
   dt_reset. If `host` is NULL, the contents are undefined. */
DT_API dt_tensor *dt_input(dt_ctx *ctx, dt_dtype dtype, dt_shape shape, const void *host);
/* [local] Records the placement of x over a group, for an input and for the result of your own op;
   the data of x stay. Returns x. Fails with DT_ERR_ARG if x is known to have another placement, if
   x is a parameter (dt_param_desc says its placement), or if x has no dimension placement.dim.
   DT_UNPLACED forgets what is known, so that nothing is checked. A group of one rank has no
   placements. */
DT_API dt_tensor *dt_place(dt_tensor *x, dt_comm *comm, dt_placement placement);
/* [local] Returns the placement of x over a group; DT_UNPLACED if nothing is known. */
DT_API dt_placement dt_placement_of(const dt_tensor *x, const dt_comm *comm);
/* [local] Returns the size of dimension i of x's shape; i < 0 counts from the end, so -1 is the
   last. Returns 0 if x is NULL. If x has no dimension i, fails the context with DT_ERR_ARG and
   returns 0. */
DT_API int64_t dt_dim(const dt_tensor *x, int i);
/* [local]; for a parameter at ZeRO-3 [collective: its data group]. dt_read copies all elements of a
   tensor to host memory, dt_write copies them from host memory. Both wait for the stream. */
DT_API dt_status dt_read(const dt_tensor *t, void *host);
DT_API dt_status dt_write(dt_tensor *t, const void *host);
/* [local] Returns the device address of t's values; NULL after a failure. In your own op use
   dt_data instead of t->data if t may be a parameter: at ZeRO-3 dt_data gathers the values
   ([collective: the parameter's data group]), which are freed when the block ends. dt_read and
   dt_write gather a parameter in the same way. */
DT_API void *dt_data(dt_tensor *t);
/* [local] Returns the value of a tensor with one element; NaN if t is NULL or its context has
   failed. A tensor with any other number of elements fails the context with DT_ERR_ARG. An i64
   beyond 2^53 is rounded; dt_read copies it exactly. Waits for the stream. */
DT_API double dt_item(const dt_tensor *t);
/* [local]; for a parameter at ZeRO-3 [collective: its data group]. Prints a tensor to the log hook:
   a line with its name, type and shape, then its values as PyTorch prints them. If there are more
   than 1,000 elements, prints only the first three and the last three indices of each dimension. */
DT_API void dt_print(const dt_tensor *t);

// ==== 6. Buckets and listeners ==================================================================

/* A bucket stores consecutive parameters in one flat array: the gradient bucket of DDP and
   ZeRO-1/2, the flat parameter of FSDP/ZeRO-3. Padding makes the number of elements a multiple
   of 1,024 x the group's size, so N ranks hold N equal shards:

       | wq        | wk  | wv  | bias | padding |      params, in registration order
       | shard 0     | shard 1     | shard 2    |      rank r keeps shard r

   Buckets follow DDP (arXiv:2006.15704), and shards follow ZeRO (arXiv:1910.02054). The upper
   layers attach as listeners. Overlap of communication and computation: a listener starts the
   reduction of a bucket's gradient in grad_ready, while the backward of earlier layers still runs.
   A listener gathers a sharded bucket's values when an op first reads them. */

/* States of a bucket's gradient. Section 14 shows the changes without a listener, section 8 of
   dt_zero.h those of ZeRO. */
typedef enum dt_grad_state {
    DT_GRAD_EMPTY,       /* no sum in grad, which holds old values */
    DT_GRAD_WRITING,     /* a backward writes this micro-batch's gradient to micro_grad */
    DT_GRAD_ACCUMULATED, /* grad holds the sum over the finished micro-batches */
    DT_GRAD_READY,       /* complete; waits for its turn to be reduced */
    DT_GRAD_REDUCING,    /* a collective sums it over ranks */
    DT_GRAD_REDUCED,     /* summed over ranks, after the step's last micro-batch */
    DT_GRAD_FINAL        /* summed over the pipeline stages that share it, too */
} dt_grad_state;

/* Gradient bucket. Stores consecutive parameters of one scope that have the same dtype, shardings,
   gradient placements, parameter group and `frozen` flag. A new bucket begins where a bucket would
   exceed bucket_bytes. Padding is zero. */
struct dt_bucket {
    int index, first_param, n_params;
    /* Types of the values; of micro_grad: f32 for bf16 and f16 parameters; of grad, the sum over
       micro-batches and ranks: grad_dtype, or dtype for 16-bit gradients (dt_zero_desc) */
    dt_dtype dtype, grad_dtype, sum_dtype;
    int frozen;           /* dt_param_desc.frozen of its parameters */
    int paused;           /* 1: none of its parameters gets a gradient for now (dt_zero_freeze) */
    int stage;            /* from dt_stage */
    size_t count, padded; /* elements */
    /* (padded) the values. In a sharded bucket `data` has memory class DT_MEM_COMM, and is NULL
       unless gathered */
    void *data;
    /* (shard_count) the values that this rank keeps, of class DT_MEM_PARAMS: its shard of a sharded
       bucket, all of `data` of any other bucket. NULL while the values are offloaded */
    void *shard;
    size_t shard_offset, shard_count; /* in elements of data */
    /* (grad_count) gradient accumulation: the sum over the finished micro-batches, of the elements
       from grad_offset on. Of class DT_MEM_GRADS, and allocated when first needed; with
       grad_offloaded a listener provides it */
    void *grad;
    size_t grad_offset, grad_count;
    int grad_offloaded;
    /* grad_borrows 1: grad may lie in unused memory of a block's arena, if the step has one
       micro-batch (section 15); grad_borrowed 1: it does */
    int grad_borrows, grad_borrowed;
    /* (padded) this micro-batch's gradient, until it has been added to grad; may be the same memory
       as grad. When complete it is rounded to sum_dtype */
    void *micro_grad;
    int micros; /* number of micro-batches whose gradients are in grad */
    dt_grad_state grad_state;
    /* 1: a listener (dt_zero.h) reduces each micro-batch's gradient over ranks, before it is added
       to grad */
    int reduce_each_micro;
    /* number of parameters whose gradient is not complete yet in the current backward; -1: the
       bucket's gradient is complete */
    int pending_params;
};

typedef struct dt_buckets_desc {
    size_t bucket_bytes; /* 0 means 25 MiB */
    size_t pad;          /* a bucket is padded to a multiple of `pad` elements; 0 means 1 */
    /* 1: the values are offloaded: a listener's release() stores them, and its gather() loads them
       again */
    int offloaded;
    /* NULL, or a function that says which parts of `bucket` this rank keeps. At the call the bucket
       has its parameters and its padded size, and keeps all values and gradients. The function may
       change padded, shard_offset, shard_count, grad_offset, grad_count, grad_offloaded,
       grad_borrows, reduce_each_micro and sum_dtype. dt_buckets_make fails with DT_ERR_ARG if
       padded is less than the number of the parameters' elements, or a part reaches past it */
    void (*shard)(dt_bucket *bucket, void *user);
    void *user;
    /* size of the caller's struct of a bucket, whose first member is a dt_bucket; 0 means
       sizeof(dt_bucket). Its other members are zero at first */
    size_t struct_bytes;
} dt_buckets_desc;

/* [local] Allocates storage for all registered parameters and writes the initial values.
   dt_zero_make calls this function. Without dt_zero_make, the first use of a parameter calls
   dt_buckets_make with a zeroed desc. */
DT_API dt_status dt_buckets_make(dt_ctx *ctx, dt_buckets_desc desc);
DT_API int dt_bucket_count(const dt_ctx *ctx);
DT_API dt_bucket *dt_bucket_get(const dt_ctx *ctx, int index);
/* [local] Clears the gradients, also reduced ones: the next backward starts their sums from 0. */
DT_API void dt_clear_grads(dt_ctx *ctx);

typedef enum dt_phase {
    DT_FORWARD = 1,
    DT_BACKWARD,
    DT_BACKWARD_INPUT,
    DT_BACKWARD_WEIGHT
} dt_phase;
typedef struct dt_event {
    dt_phase phase;
    /* 0 if the event is about the whole micro-batch; n > 0 if it is about the micro-batch's
       dt_block call n, counted from 1 */
    int block;
    int micro, last; /* from dt_micro; last is 1 in the step's last micro-batch */
    int stage;       /* from dt_tape */
} dt_event;

/* Callbacks with which an upper layer attaches to this header. Each entry may be NULL. The caller
   owns the struct, which must stay valid until dt_unlisten or until `closing` is called. */
typedef struct dt_listener {
    void (*enter)(dt_ctx *ctx, const dt_event *event, void *user);
    void (*leave)(dt_ctx *ctx, const dt_event *event, void *user);
    /* Called when a bucket's gradient of this micro-batch is complete: it has been added to
       bucket->grad, or it is in bucket->micro_grad if the listener reduces each micro-batch. */
    void (*grad_ready)(dt_ctx *ctx, dt_bucket *bucket, int last, void *user);
    /* called by the first dt_fail; returns 1 if another rank has logged the failure */
    int (*failed)(dt_ctx *ctx, dt_status status, const char *text, void *user);
    /* called at the start of dt_ctx_free; frees the memory that the listener allocated from the
       context */
    void (*closing)(dt_ctx *ctx, void *user);
    void *user;
    /* called after each kernel of an op, so that pending operations make progress */
    void (*kernel_done)(dt_ctx *ctx, void *user);
    /* called before a sharded bucket is read; gathers its data */
    void (*gather)(dt_ctx *ctx, dt_bucket *bucket, void *user);
    /* Called when a read or write of the gathered values is done. If `written` is 1, the values
       changed: the listener saves this rank's shard. If `unused` is 1, the gather was for this
       access only: the listener frees the gathered data. */
    void (*release)(dt_ctx *ctx, dt_bucket *bucket, int written, int unused, void *user);
    void (*reset)(dt_ctx *ctx, void *user); /* called after dt_reset has freed the tensors */
    /* Called before the host waits for the device without a timeout, because pending operations may
       depend on other ranks. Finishes the operations in flight; if `all` is 1, also operations that
       the program has started but not waited for. Returns 1 if none still runs on the device. */
    int (*drain)(dt_ctx *ctx, int all, void *user);
    struct dt_listener *next; /* set by dt_listen */
} dt_listener;
/* [local] dt_listen appends a listener to the context's list, dt_unlisten removes a listener. */
DT_API void dt_listen(dt_ctx *ctx, dt_listener *listener);
DT_API void dt_unlisten(dt_ctx *ctx, dt_listener *listener);
/* [local] Gradient accumulation: says that the next forward and backward are those of micro-batch
   `index` of the `count` micro-batches of this step. Without this call, index is 0 and count is
   1. */
DT_API void dt_micro(dt_ctx *ctx, int index, int count);

// ==== 7. Ops ====================================================================================

/* An op checks shapes, allocates its output in the current block's arena, runs one or more kernels
   and records itself on the tape (section 8). The op's backward adds to the gradients of the op's
   inputs. */

/* All ops are [local]. An op returns a tensor that lives until dt_reset, or NULL after a failure.
   In shapes, (..,X) means any leading dimensions. A negative dimension counts from the end: -1 is
   the last. The types of floating-point inputs must agree. Mixed precision: bf16 and f16 ops
   compute in f32 and round once. */

/* LoRA adapter of a linear layer (arXiv:2106.09685): adds scale * (dropout(x) a^T) b^T to x w^T. w
   is usually frozen, and may be quantised (QLoRA). Over a group that shards the layer's weight:

       column-parallel   a is not sharded, with gradient placement DT_GRAD_PARTIAL, because each
                         rank has only its outputs' part of a's gradient; b is sharded along its
                         outputs as w is
       row-parallel      a is sharded along I as w is; b is not sharded, with gradient placement
                         DT_GRAD_PARTIAL. The adapter's output is a partial sum as x w^T is, so
                         their sum needs no further communication */
typedef struct dt_adapter {
    dt_tensor *a, *b;  /* (r,I) and (O..,r); a NULL: no adapter */
    double scale;      /* alpha / r */
    double dropout;    /* probability; drops elements of the adapter's input, not of x w^T */
    uint64_t key;      /* as in dt_dropout: another key for each step and each adapter */
    dt_tensor *tokens; /* as in dt_dropout; NULL: row r is token r */
} dt_adapter;

typedef struct dt_linear_desc {
    int activation;      /* a DT_ACT_* before DT_ACT_AFFINE, applied to x w^T + b; 0: none */
    dt_tensor *residual; /* of the result's shape, added last; NULL: none */
    /* LoRA: NULL or one adapter, whose output is added before the activation. If parts is 2 to 8, w
       is (parts,O..,I), and adapters[i] belongs to w[i]; its `a` is NULL if w[i] has no adapter.
       Not for dt_grouped_linear */
    const dt_adapter *adapters;
    int parts;
} dt_linear_desc;
/* x (..,I), w (O..,I), b (O..) or NULL -> (..,O..): x w^T + b. w may have several output
   dimensions, and may be quantised (dt_param_desc.quant): the product converts a tile of its blocks
   at a time, never the whole matrix. dt_linear_at fuses the activation and the residual into the
   GEMM, so less memory is read, and the residual is not saved. With adapters and an activation both
   are ops of their own. */
DT_API dt_tensor *dt_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b);
DT_API dt_tensor *dt_linear_at(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc);
/* Grouped linear (grouped GEMM). x (..,I), w (G,O..,I), b (G,O..) or NULL -> (..,O..): the rows of
   x are G groups in order, and group g is multiplied by w[g]. rows (G), in host memory, has the
   number of rows of each group; it is copied. A group may have no rows: then its gradients of w and
   b are 0. Fails with DT_ERR_ARG if rows is NULL, and with DT_ERR_SHAPE if a count is negative or
   the counts do not sum to x's number of rows. */
DT_API dt_tensor *dt_grouped_linear(
    dt_tensor *x, dt_tensor *w, dt_tensor *b, const int64_t *rows, dt_linear_desc desc);
typedef struct dt_matmul_desc {
    int trans_a, trans_b; /* 1: a is (..,K,M), b is (..,N,K) */
} dt_matmul_desc;
/* Batched matmul. a (..,M,K), b (..,K,N) -> (..,M,N): the product a b for each index of the leading
   dimensions, which must be equal; or one operand is a single matrix that all products share. The
   gradient of a shared matrix is the sum over the products. If b is shared and a is not transposed,
   one product over all rows computes this sum; otherwise the products are added one after the
   other, in ascending order, in f32 for 16-bit types. */
DT_API dt_tensor *dt_matmul(dt_tensor *a, dt_tensor *b, dt_matmul_desc desc);
/* A window that slides over the height and width (index 0 and 1) of images (B,H,W,C); features are
   last, as everywhere in dt (PyTorch has them second). It has OH x OW positions, where (OW with W)

       OH = (H + 2 padding - dilation (kernel - 1) - 1) / stride + 1, rounded down */
typedef struct dt_window_desc {
    int kernel[2];   /* size of the window; a convolution reads it from w instead */
    int stride[2];   /* step from one position to the next; 0: 1, in pooling the kernel */
    int padding[2];  /* elements added before and behind the image: zeros, or pad_value */
    int dilation[2]; /* distance of the window's elements; 0: 1 */
} dt_window_desc;
/* im2col (PyTorch: unfold). x (B,H,W,C) -> (B,OH,OW,KH*KW,C): the elements of the window at each
   position, pad_value outside of the image. The backward is col2im. */
DT_API dt_tensor *dt_patches(dt_tensor *x, dt_window_desc desc, double pad_value);
/* Convolution (cross-correlation, as in PyTorch) as im2col and a GEMM. x (B,H,W,C), w (O,KH,KW,C),
   b (O) or NULL -> (B,OH,OW,O). The patches stay in memory until the backward: KH * KW times as
   many elements as x at stride 1. dt_conv1d: x (B,W,C), w (O,K,C) -> (B,OW,O); it reads index 0 of
   desc. */
DT_API dt_tensor *dt_conv2d(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_window_desc desc);
DT_API dt_tensor *dt_conv1d(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_window_desc desc);
/* Pooling of x (B,H,W,C) -> (B,OH,OW,C): the maximum or the mean over each window. A mean counts
   the zeros of the padding, as PyTorch's count_include_pad does. The padding is at most half the
   kernel. */
DT_API dt_tensor *dt_max_pool2d(dt_tensor *x, dt_window_desc desc);
DT_API dt_tensor *dt_avg_pool2d(dt_tensor *x, dt_window_desc desc);
/* Group normalization of x (B,..,C), gain (C) and bias (C): for each index of B, each of `groups`
   groups of adjacent channels has mean 0 and variance 1 before gain and bias; eps 0 means 1e-5.
   Computed from dt_layernorm, with several copies of x. Over a group of ranks x, gain and bias may
   be sharded along C; `groups` still counts the groups of all ranks, and no group may be divided
   over two ranks (DT_ERR_SHAPE). arXiv:1803.08494. */
DT_API dt_tensor *dt_group_norm(
    dt_tensor *x, int groups, dt_tensor *gain, dt_tensor *bias, double eps);
/* table (V,C), ids (..) i32 -> (..,C): row ids[i] of the table for each id. An id outside the full
   table fails. If the table is sharded along V, ids whose rows other ranks hold give zeros, so the
   results of the group's ranks are partial sums (DT_PARTIAL). */
DT_API dt_tensor *dt_embedding(dt_tensor *table, dt_tensor *ids);

/* Layer normalization of x (..,C), gain (C) and bias (C) or NULL; eps 0 means 1e-5.
   arXiv:1607.06450. */
DT_API dt_tensor *dt_layernorm(dt_tensor *x, dt_tensor *gain, dt_tensor *bias, double eps);
/* RMSNorm, also QK-norm, of x (..,C) with gain (C): x / sqrt(mean(x^2) + eps) * gain; eps 0 means
   1e-5. arXiv:1910.07467. QK-norm (as in Qwen 3, arXiv:2505.09388) is the RMSNorm of q and of k,
   (B,T,H,D) with a gain (D), before dt_rope. Over tp each rank has other heads: register the gain
   with the gradient placement DT_GRAD_PARTIAL. */
DT_API dt_tensor *dt_rmsnorm(dt_tensor *x, dt_tensor *gain, double eps);
typedef struct dt_rmsnorm_desc {
    double eps; /* 0 means 1e-5 */
    /* added to the gain in f32 (f64 in an f64 model), so that it is not rounded to 16 bits: Gemma's
       files store gain - 1 */
    double gain_offset;
} dt_rmsnorm_desc;
/* dt_rmsnorm with further options. */
DT_API dt_tensor *dt_rmsnorm_at(dt_tensor *x, dt_tensor *gain, dt_rmsnorm_desc desc);
/* x (..,C): e^x / sum of e^x, over the last dimension. */
DT_API dt_tensor *dt_softmax(dt_tensor *x);
/* x (..,C): ln of dt_softmax, finite where dt_softmax rounds to 0, for policy gradients and for the
   divergence of two distributions. Computed from dt_exp and dt_ln, with several copies of x:
   dt_cross_entropy needs none. */
DT_API dt_tensor *dt_log_softmax(dt_tensor *x);

/* Element-wise functions. dt_gelu is the tanh form and dt_gelu_erf the exact form
   (arXiv:1606.08415); dt_silu is x / (1 + e^-x), dt_sigmoid 1 / (1 + e^-x) and dt_softplus
   ln(1 + e^x). As in PyTorch, the gradient of dt_abs is 0 at 0, and that of dt_sqrt is infinite
   there. */
DT_API dt_tensor *dt_gelu(dt_tensor *x);
DT_API dt_tensor *dt_gelu_erf(dt_tensor *x);
DT_API dt_tensor *dt_silu(dt_tensor *x);
DT_API dt_tensor *dt_relu(dt_tensor *x);
DT_API dt_tensor *dt_tanh(dt_tensor *x);
DT_API dt_tensor *dt_exp(dt_tensor *x);
DT_API dt_tensor *dt_ln(dt_tensor *x);
DT_API dt_tensor *dt_sigmoid(dt_tensor *x);
DT_API dt_tensor *dt_softplus(dt_tensor *x);
DT_API dt_tensor *dt_sqrt(dt_tensor *x);
DT_API dt_tensor *dt_abs(dt_tensor *x);
/* x^exponent; NaN if x is negative and the exponent is no integer. */
DT_API dt_tensor *dt_pow(dt_tensor *x, double exponent);
/* x, but at least `low` and at most `high`; either may be infinite. A NaN stays a NaN. The gradient
   passes where low < x < high: at the bounds it is 0, like that of dt_relu at 0 and as in PyTorch
   2.15 (older releases pass it at the bounds). Fails with DT_ERR_ARG unless low <= high. */
DT_API dt_tensor *dt_clamp(dt_tensor *x, double low, double high);
/* scale * x + shift */
DT_API dt_tensor *dt_affine(dt_tensor *x, double scale, double shift);
/* x (..,2,F) -> (..,F): silu(gate) * up, where gate is x[..,0,:] and up is x[..,1,:].
   arXiv:2002.05202. */
DT_API dt_tensor *dt_swiglu(dt_tensor *x);
/* dt_swiglu with gelu (the tanh form) instead of silu: GeGLU. */
DT_API dt_tensor *dt_geglu(dt_tensor *x);

/* a + b, a - b, a * b, a / b, element by element, with broadcasting: shapes are aligned at their
   ends, and a dimension that is 1 or missing repeats. Mixed types: a scalar without dimensions is
   cast to the type of a tensor with dimensions, and of two scalars the narrower one to the type of
   the wider. So an f64 loss plus an f32 term is an f64 loss. This also holds for dt_minimum,
   dt_maximum and the comparisons below. */
DT_API dt_tensor *dt_add(dt_tensor *a, dt_tensor *b);
DT_API dt_tensor *dt_sub(dt_tensor *a, dt_tensor *b);
DT_API dt_tensor *dt_mul(dt_tensor *a, dt_tensor *b);
DT_API dt_tensor *dt_div(dt_tensor *a, dt_tensor *b);
/* The smaller or greater of a and b, with broadcasting. As in PyTorch, a NaN in either makes the
   result NaN, and each of two equal elements gets half of the gradient. */
DT_API dt_tensor *dt_minimum(dt_tensor *a, dt_tensor *b);
DT_API dt_tensor *dt_maximum(dt_tensor *a, dt_tensor *b);
/* Masks: 1 where a < b, a <= b or a = b, else 0, in the type of a and b, with broadcasting. A
   comparison with a NaN gives 0. No gradient passes. For integers compare their casts: a cast to
   f32 is exact up to 2^24. */
DT_API dt_tensor *dt_less(dt_tensor *a, dt_tensor *b);
DT_API dt_tensor *dt_less_equal(dt_tensor *a, dt_tensor *b);
DT_API dt_tensor *dt_equal(dt_tensor *a, dt_tensor *b);
/* a where mask != 0, else b, with broadcasting of all three. The mask has the type of a and b. The
   gradient passes only to the chosen element, so a NaN in the other does no harm; none passes to
   the mask. */
DT_API dt_tensor *dt_where(dt_tensor *mask, dt_tensor *a, dt_tensor *b);
/* `value` where mask != 0, else x, with broadcasting. */
DT_API dt_tensor *dt_masked_fill(dt_tensor *x, dt_tensor *mask, double value);

enum { DT_ALL = -100 }; /* passed as `dim`: reduces all dimensions to a scalar */
/* Sum, mean or maximum over dimension `dim`, which the result does not have. The gradient of
   dt_max_over goes to the first of equal elements. As in PyTorch, the maximum of elements with a
   NaN is NaN, and the gradient goes to the first NaN. */
DT_API dt_tensor *dt_sum_over(dt_tensor *x, int dim);
DT_API dt_tensor *dt_mean_over(dt_tensor *x, int dim);
DT_API dt_tensor *dt_max_over(dt_tensor *x, int dim);
/* The index, i32, of the element that dt_max_over chooses: its position along `dim`, or for DT_ALL
   its position in x. */
DT_API dt_tensor *dt_argmax(dt_tensor *x, int dim);

typedef struct dt_reduce_desc {
    int dims[DT_MAX_DIMS]; /* the dimensions to reduce, in any order, each once */
    int n;                 /* number of `dims`; 0: all dimensions of x */
    int keepdim;           /* 1: the result keeps these dimensions, with size 1 */
} dt_reduce_desc;
/* Sum, mean or maximum over several dimensions, in the row-major order of x. Each result is rounded
   once. Dimensions that are not adjacent are first moved behind the others, in a copy of x. */
DT_API dt_tensor *dt_sum_dims(dt_tensor *x, dt_reduce_desc desc);
DT_API dt_tensor *dt_mean_dims(dt_tensor *x, dt_reduce_desc desc);
DT_API dt_tensor *dt_max_dims(dt_tensor *x, dt_reduce_desc desc);
/* Cumulative sum: element j along dimension `dim` is the sum of the elements 0 .. j, added in
   ascending order. Has x's shape. */
DT_API dt_tensor *dt_cumsum(dt_tensor *x, int dim);

/* Returns x with another shape that has the same number of elements. One size may be -1: it becomes
   the size that gives this number. The result is a view; nothing is copied. */
DT_API dt_tensor *dt_reshape(dt_tensor *x, dt_shape shape);
/* All three copy. dt_slice returns indices first .. first + count - 1 of dimension `dim`. dt_select
   returns index `index` of dimension `dim`, which the result does not have; index -1 is the last.
   dt_concat joins n tensors, at most 8, along dimension `dim`. If all n tensors are NULL, dt_concat
   only returns NULL: without a tensor it has no context in which to record an error. */
DT_API dt_tensor *dt_slice(dt_tensor *x, int dim, int64_t first, int64_t count);
DT_API dt_tensor *dt_select(dt_tensor *x, int dim, int64_t index);
DT_API dt_tensor *dt_concat(dt_tensor *const *x, int n, int dim);
/* dt_permute: dimension i of the result is dimension order[i] of x; `order` has an entry for each
   dimension. dt_transpose exchanges two dimensions. Both copy x. */
DT_API dt_tensor *dt_permute(dt_tensor *x, const int *order);
DT_API dt_tensor *dt_transpose(dt_tensor *x, int dim_a, int dim_b);
/* Repeats x to `shape`: shapes are aligned at their ends, and a dimension of x that is 1 or missing
   repeats. The backward sums over the repetitions. */
DT_API dt_tensor *dt_broadcast_to(dt_tensor *x, dt_shape shape);
/* Converts x to another element type. No gradient passes through a cast to or from an integer
   type. */
DT_API dt_tensor *dt_cast(dt_tensor *x, dt_dtype dtype);

/* x (R,C), rows (..) i32 -> (..,C): copies row rows[i] of x for each i; -1 gives a row of zeros. */
DT_API dt_tensor *dt_gather_rows(dt_tensor *x, dt_tensor *rows);
/* x (..,C), rows (..) i32 -> (count,C): adds row i of x to row rows[i] of the result, in ascending
   i. Skips row i if rows[i] is -1; any other value outside 0 .. count - 1 fails. */
DT_API dt_tensor *dt_scatter_rows(dt_tensor *x, dt_tensor *rows, int64_t count);
/* EmbeddingBag with weights. x (R,C), rows (..,k) i32, weights (..,k) in f32 (f64 if x is f64) ->
   (..,C): the sum over j, in ascending j, of weights[..,j] times row rows[..,j] of x, rounded once.
   Skips j if rows[..,j] is -1; the gradient of that weight is 0. Any other row outside 0 .. R - 1
   fails with DT_ERR_ARG; k = 0, or weights of another shape or type, with DT_ERR_SHAPE. In 16 bits
   the backward rounds each weight times gradient before it adds them. */
DT_API dt_tensor *dt_embedding_bag(dt_tensor *x, dt_tensor *rows, dt_tensor *weights);
/* x (..,N) -> (..,k): the k largest elements of each row, in descending order; of equal elements,
   the one with the lowest index comes first. As in PyTorch, NaNs come before all numbers. *index
   receives the indices (..,k), i32. */
DT_API dt_tensor *dt_topk(dt_tensor *x, int k, dt_tensor **index);

/* ids (..) i32 -> (..,classes) of a floating-point type: 1 at column ids[..], 0 in the others. An
   id outside 0 .. classes - 1 fails. */
DT_API dt_tensor *dt_one_hot(dt_tensor *ids, int64_t classes, dt_dtype dtype);

typedef struct dt_rope_desc {
    double theta; /* at least 1; 0 means 10000 */
    int rotary;   /* how many of a head's D elements are rotated; 0 means all */
    /* 1: pair i is elements 2i and 2i + 1, as Meta stores weights; 0: i and i + rotary/2 */
    int interleaved;
    dt_rope_scaling scaling; /* RoPE scaling: LINEAR, LLAMA3, YARN; zeros mean none */
} dt_rope_desc;
/* Rotary embedding. x (B,T,H,D), positions (B,T) i32: rotates pair i of each head by the angle
   position * theta^(-2i/rotary). arXiv:2104.09864. A theta below 1, and a scaling with an unknown
   kind or with numbers out of range, fail with DT_ERR_ARG. */
DT_API dt_tensor *dt_rope(dt_tensor *x, dt_tensor *positions, dt_rope_desc desc);

/* Dropout of x (..,C): zeroes each element with probability p and divides the others by 1 - p.
   Which elements are zeroed depends only on (key, tokens (..) i32, column) (counter-based RNG). The
   column is that of the full tensor: over a group x may be placed DT_SHARD(its last dimension). If
   you pass the global index of each token, and another key for each step and each dropout of the
   model, then every layout and every recomputation drops the same elements. tokens NULL means that
   row r is token r. */
DT_API dt_tensor *dt_dropout(dt_tensor *x, double p, uint64_t key, dt_tensor *tokens);

typedef struct dt_attn_desc {
    int kv_heads; /* 0, or the number of heads K of k and v */
    int full;     /* 1: every query attends to every key; 0: causal */
    /* positions of queries (B,TQ) and keys (B,TK), i32; if both are NULL, key j has position j and
       query i has position i + TK - TQ */
    dt_tensor *positions, *key_positions;
    /* Sequence packing: document numbers of queries (B,TQ) and keys (B,TK), i32, for documents
       packed into one sequence. For a padding mask give padding another number than tokens. If
       TQ = TK and key_documents is NULL, the keys have the queries' document numbers. */
    dt_tensor *documents, *key_documents;
    dt_tensor **lse; /* if not NULL, receives the log-sum-exp (B,H,TQ) */
    /* Sliding-window attention, arXiv:2004.05150: a query at position i attends to the keys at
       positions i - window + 1 .. i; 0 means no window. Only for causal attention */
    int window;
    /* soft-capping (arXiv:2408.00118): a score s becomes soft_cap tanh(s / soft_cap); 0: none */
    double soft_cap;
    double scale; /* factor of the scores; 0 means 1/sqrt(D) */
} dt_attn_desc;
/* Flash attention, with grouped-query attention. q (B,TQ,H,D), k and v (B,TK,K,D), where H is a
   multiple of K -> (B,TQ,H,D). A causal query attends to the keys of its own document whose
   position is not after the query's. No TQ x TK matrix is stored: the backward recomputes the
   scores from lse. arXiv:2205.14135. */
DT_API dt_tensor *dt_attention(dt_tensor *q, dt_tensor *k, dt_tensor *v, dt_attn_desc desc);

/* Vocabulary-parallel cross-entropy: this rank's columns are one shard of the vocabulary, and other
   ranks have the other shards. dt_parallel.h fills in this struct. */
typedef struct dt_vocab_shard {
    int count;          /* number of shards; 0: not sharded */
    int64_t offset;     /* vocabulary index of this rank's column 0 */
    int64_t full_vocab; /* number of columns of all shards without padding */
    /* gathers the `count` values at `mine` of every rank into `each`, in rank order */
    dt_status (*gather)(void *user, const double *mine, double *each, size_t count);
    void *user;
} dt_vocab_shard;

typedef struct dt_loss_desc {
    /* columns from `vocab` on are padding: they enter no sum and get no gradient; 0: no padding */
    int64_t vocab;
    double smoothing; /* label smoothing, arXiv:1512.00567 */
    /* weight of the z-loss: the backward adds the gradient of z_weight * sum of lse^2 / denominator
       (arXiv:2204.02311) */
    double z_weight;
    /* NULL, or receives the f64 scalar sum of lse^2 / denominator, which is not in the loss */
    dt_tensor **z_loss;
    /* if shard.count > 0, vocab is the number of this rank's columns without padding, and 0 means
       that all of them are padding */
    dt_vocab_shard shard;
} dt_loss_desc;
/* logits (..,V), labels (..) i32 -> f64 scalar in nats: the sum over all rows with label >= 0,
   divided by denominator. Pass as denominator the number of labels of the step on all ranks
   (dt_count_labels); then the loss needs no further scaling in any layout. */
DT_API dt_tensor *dt_cross_entropy(dt_tensor *logits, dt_tensor *labels, double denominator);
DT_API dt_tensor *dt_cross_entropy_at(
    dt_tensor *logits, dt_tensor *labels, double denominator, dt_loss_desc desc);
/* Cross-entropy of the logits x w^T, where x is (..,C) and w is (V,C), computed a few rows at a
   time. On a CPU the full logits are never in memory, and the backward recomputes the logits. A GPU
   saves the logits if their number is at most max_saved_logits of its kernel table (2^30, which is
   2 GiB in bf16); otherwise the GPU recomputes the logits as the CPU does. */
DT_API dt_tensor *dt_linear_cross_entropy(
    dt_tensor *x, dt_tensor *w, dt_tensor *labels, double denominator, dt_loss_desc desc);
/* The sum of (a - b)^2 over all elements, divided by denominator, as an f64 scalar. */
DT_API dt_tensor *dt_mse(dt_tensor *a, dt_tensor *b, double denominator);
/* Binary cross-entropy with logits: the sum over all elements of -t ln p - (1 - t) ln(1 - p), where
   p = sigmoid(logit) and t is the target, divided by denominator, as an f64 scalar. Logits and
   targets have one shape and type. The result is exact for large logits too. */
DT_API dt_tensor *dt_bce_with_logits(dt_tensor *logits, dt_tensor *targets, double denominator);
/* Attaches an auxiliary loss to x: returns x; the backward also adds the gradient of weight *
   scalar, even if the main loss is on another rank. */
DT_API dt_tensor *dt_loss(dt_tensor *x, dt_tensor *scalar, double weight);

// ==== 8. Tape and blocks ========================================================================

/* Autograd tape: each op appends a node, and the backward walks the nodes from last to first. In
   the naive version all outputs are saved:

       forward    x --linear--> h --gelu--> g --linear--> y --> loss     saves x, h, g
       backward   dx <--------- dh <------- dg <--------- dy <-- 1       reads x, h, g

   A block groups the ops of a layer. dt_block(ctx, fn, x, user) is the unit of memory, of ZeRO-3
   gathers and of pipeline stages. When a block ends, the outputs of its elementwise functions,
   norms and gated units are dropped (here g); the backward computes each again before it reads it,
   in one pass over memory. So does a read of the tensor before the backward; after it, a read
   fails. Activation checkpointing (recompute, arXiv:1604.06174): with .recompute = 1 a block saves
   only its input and output, and its backward first runs fn again. So L blocks need memory for L
   outputs and for the activations of one block, and the step costs one more forward. Zero bubble
   schedules run the backward in two halves: first the input gradients, later the weight gradients
   (arXiv:2401.10241). */

enum { DT_MAX_INPUTS = 8 };
typedef struct dt_node dt_node;
typedef dt_status (*dt_backward_fn)(dt_node *node);
struct dt_node { /* one recorded op */
    const char *name;
    dt_tensor *out;
    dt_tensor *in[DT_MAX_INPUTS];
    int n_in;
    unsigned want;          /* bit i is 1: the backward must compute the gradient of in[i] */
    unsigned unread_inputs; /* from dt_record_desc */
    unsigned weight_inputs; /* bit i is 1: only gradients of parameters read the data of in[i] */
    /* narrow[i]: the 16-bit gradient of in[i], a bf16 or f16 parameter, that is not yet added to
       the f32 gradient */
    void *narrow[DT_MAX_INPUTS];
    dt_backward_fn backward;
    /* from dt_record_desc, if the data of `out` are dropped and made again; else NULL */
    dt_backward_fn recompute;
    int recompute_from_saved; /* 1: `recompute` reads no input */
    void *saved;              /* data that the op saved for its backward */
    dt_block_state *child;    /* the block, if the node is a dt_block call; NULL for an op */
    dt_node *prev;
    dt_node *next_deferred; /* in the list of deferred weight halves */
};

/* YOUR OWN OP. Make the output tensor, compute its data, then record the op with its backward:

       dt_tensor *out = x ? dt_new(x->ctx, x->dtype, x->shape) : NULL;
       const float *in = dt_data(x);       // for a parameter at ZeRO-3, x->data may be NULL
       if (!out || !in) return NULL;       // an earlier op has failed
       ... fill out->data from in ...
       return dt_record(out, (dt_record_desc){ .name = "square", .in = { x },
                                               .backward = square_back });

   Nothing is known about the placement of the result, unless dt_place states it (section 5). In
   square_back all inputs have their data. Add to each gradient that is wanted:

       float *dx = dt_wants(node, 0) ? dt_grad(node, 0) : NULL, *dy = node->out->grad;
       if (dx) ... dx[i] += ... */
typedef struct dt_record_desc {
    const char *name; /* not copied; it must stay valid until the second dt_reset after this call */
    /* the inputs; if n_in is 0, the list ends at the first NULL; if n_in > 0, an input may be
       NULL */
    dt_tensor *in[DT_MAX_INPUTS];
    int n_in;
    dt_backward_fn backward;
    /* number of bytes of zeroed host memory that node->saved points to until dt_reset; 0: none */
    size_t saved_bytes;
    /* if `out` is a transient tensor: computes its data again; NULL if no backward reads them */
    dt_backward_fn recompute;
    /* bit i is 1: the backward does not read the data of in[i], so if these data were dropped, they
       are not computed again */
    unsigned unread_inputs;
} dt_record_desc;
/* [local] Returns a new tensor with undefined contents, which belongs to the current block. */
DT_API dt_tensor *dt_new(dt_ctx *ctx, dt_dtype dtype, dt_shape shape);
/* [local] As dt_new, for an op whose output has x's dimension 0. If that dimension varies from step
   to step (dt_dispatch), allocates for the largest size, so that later steps do not allocate; if
   shape.d[0] is not x's, allocates as dt_new does. There is no transient form. */
DT_API dt_tensor *dt_new_rows(const dt_tensor *x, dt_dtype dtype, dt_shape shape);
/* [local] Returns a new transient tensor: its data are dropped when the forward of its block ends,
   and made again by desc.recompute before a backward that reads them. Its gradient is dropped after
   the backward of its op. A transient tensor is needed only for a short time, for example a partial
   sum before its reduction over ranks, or a gathered tensor of which this rank keeps a shard. If
   dt_record records no op for the tensor, nothing can make its data again. */
DT_API dt_tensor *dt_new_transient(dt_ctx *ctx, dt_dtype dtype, dt_shape shape);
/* [local] Returns a tensor that has the data of x and a gradient of its own: the output of an op
   that is the identity in the forward. dt_alias copies the data only if they may be freed while the
   result still lives: those of a transient tensor, or of a gathered parameter. Under dt_no_grad the
   result is a view of x. */
DT_API dt_tensor *dt_alias(dt_tensor *x);
/* [local] Records an op with inputs desc.in and output `out` on the tape, or nothing if no input
   needs a gradient. Returns `out`. */
DT_API dt_tensor *dt_record(dt_tensor *out, dt_record_desc desc);
/* [local] Records as dt_record does, and returns node->saved for you to fill; NULL if nothing was
   recorded. */
DT_API void *dt_record_saved(dt_tensor *out, dt_record_desc desc);
/* [local] For your own backward. dt_wants returns 1 if the gradient of in[i] is wanted, else 0.
   dt_grad returns the array to which the backward adds that gradient; a new array is zeroed. If the
   node has no input i, dt_wants returns 0, and dt_grad fails the context and returns NULL. */
DT_API int dt_wants(const dt_node *node, int i);
DT_API void *dt_grad(dt_node *node, int i);
/* [local] Returns the type of t->grad: f32 if t is a bf16 or f16 parameter or NULL, otherwise
   t->dtype. The array that dt_grad returns in a backward always has type t->dtype. */
DT_API dt_dtype dt_grad_dtype(const dt_tensor *t);
/* [local] Returns the same array as dt_grad, but does not zero a new array. Sets *accumulate to 1
   if the backward must add to the array, to 0 if it must overwrite the array. */
DT_API void *dt_grad_raw(dt_node *node, int i, int *accumulate);

/* [local] Runs fn(x, user) as one block and returns its result. A block is the unit of memory, of
   recompute, of ZeRO-3 gathers, of pipeline stages and of the trace. fn may use tensors made before
   the block. fn must return a tensor, which may be x; if fn returns NULL, the context fails. Blocks
   may nest. */
typedef dt_tensor *(*dt_block_fn)(dt_tensor *x, void *user);
DT_API dt_tensor *dt_block(dt_ctx *ctx, dt_block_fn fn, dt_tensor *x, void *user);

typedef struct dt_block_desc {
    /* 1: activation checkpointing: the block saves only its output and runs fn again in the
       backward */
    int recompute;
    /* if not 0, fn receives a copy of the user_bytes bytes at `user`, so `user` may point to a
       local variable */
    size_t user_bytes;
    /* 1: under dt_no_grad x and the block's output stay valid until dt_reset, for U-net skips and
       for hidden states that you collect */
    int keep;
} dt_block_desc;
/* [local] Activation checkpointing (recompute) of a layer, or selective recompute of a few ops, if
   desc.recompute is 1; otherwise runs a block as dt_block does. A recomputed block gives the same
   bits as a plain block and costs one more run of fn.

   After the forward, the data of all tensors that fn made are freed. Before that the output is
   copied to memory that outlives the block, unless fn returns x or another tensor made outside the
   block. The backward runs fn again on the same x and `user`, which must stay valid until then. It
   then runs the backward of the ops of this second run, and frees their data. With a backward in
   two halves, the input half runs fn and the weight half frees the data. Auxiliary losses (dt_loss)
   count once. Gradients of dt_require_grad tensors stay valid until dt_reset. Blocks inside this
   block, recomputed or not, are freed and run again with it. Selective recompute (arXiv:2205.05198)
   is a block around a few ops that have large outputs and are cheap to compute, for example
   attention.

   Both runs of fn must be the same: if the second run has other ops, other parameters or another
   output shape, the backward fails. While fn runs, the data of its tensors are valid; a later use
   of a tensor whose data were freed fails. */
DT_API dt_tensor *dt_block_at(
    dt_ctx *ctx, dt_block_fn fn, dt_tensor *x, void *user, dt_block_desc desc);
/* [local] Returns 1 while a recomputed block runs for the second time, else 0. Counters in fn or in
   a listener should count only while dt_recomputing returns 0. */
DT_API int dt_recomputing(const dt_ctx *ctx);

/* [local] Runs the backward from `loss`, a scalar, to every parameter and tensor that needs a
   gradient. Adds the parameters' gradients to the gradients in the buckets. */
DT_API dt_status dt_backward(dt_tensor *loss);
/* [local] Run dt_backward in two halves, for zero bubble schedules. dt_backward_input computes the
   gradients of activations; dt_backward_weight, called later, computes the gradients of parameters.
   The result has the same bits as that of dt_backward. */
DT_API dt_status dt_backward_input(dt_tensor *loss);
DT_API dt_status dt_backward_weight(dt_tensor *loss);
/* [local] Runs the backward, or one of its halves, from any tensor y. phase is DT_BACKWARD,
   DT_BACKWARD_INPUT or DT_BACKWARD_WEIGHT. `grad`, of y's shape and type, is the gradient of the
   loss (times the loss scale) with respect to y; the backward may overwrite it. If y is a scalar,
   `grad` may be NULL, which means 1 times the loss scale. If y needs no gradient, all parameters of
   this tape get a gradient of zero. */
DT_API dt_status dt_backward_at(dt_tensor *y, dt_tensor *grad, dt_phase phase);
/* [local] Loss scaling: sets the gradient of the loss with which dt_backward starts; it is 1 at
   first. All gradients become `scale` times larger, which keeps f16 gradients in range
   (arXiv:1710.03740). dt_zero.h sets the scale and divides the gradients by it. */
DT_API void dt_loss_scale(dt_ctx *ctx, double scale);
/* [local] Frees all tensors of the current tape except parameters. Call dt_reset after each
   micro-batch. */
DT_API void dt_reset(dt_ctx *ctx);
/* [local] Keeps state across dt_reset, as PyTorch's detach().clone(): the hidden state of a
   recurrent network (truncated backpropagation through time, BPTT), caches, running averages.
   dt_keep copies t. The copy has t's placements and no gradient, counts as activation memory, and
   lives until dt_forget or dt_ctx_free. Call dt_keep in every step: the new copy replaces the
   earlier copy of the same name, which stays valid until the next dt_reset of this tape, because
   the backward may read it. Fails inside a recomputed block, which runs twice.

       h = dt_keep(h, "hidden");  dt_backward(loss);  dt_zero_step(..);  dt_reset(ctx);

   dt_forget removes the copy of this name; the next dt_reset of this tape frees it. DT_ERR_ARG:
   there is no copy of this name. */
DT_API dt_tensor *dt_keep(dt_tensor *t, const char *name);
DT_API dt_status dt_forget(dt_ctx *ctx, const char *name);
/* [local] Selects tape number `tape`, for a micro-batch of pipeline stage `stage`. A pipeline has
   several micro-batches alive at once, each on its own tape: ops, the backward and dt_reset work on
   the tape selected last. A backward gives gradients only to the buckets of `stage`. A tape keeps
   its memory for reuse. Tapes are numbered from 0; keep the numbers small, because the table of
   tapes has an entry for each number. At first tape 0 and stage 0 are selected. Fails inside a
   block. Fails if the tape holds ops of another stage: call dt_reset first. */
DT_API void dt_tape(dt_ctx *ctx, int tape, int stage);
/* [local] Lets the backward compute the gradient of t, for example of an input: t->grad is valid
   from the backward to dt_reset. Call dt_require_grad before the first use of t. Returns t. */
DT_API dt_tensor *dt_require_grad(dt_tensor *t);
/* [local] In place: states that only the next op reads the data of x. If that op is dt_rope,
   dt_dropout, dt_add or dt_sub, and x has the shape of its result, it writes the result over the
   data of x and takes no memory of its own:

       q = dt_rope(dt_last_use(q), positions, desc);

   The tape checks that this changes nothing: the op makes a new tensor as usual if x is no output
   of an op in the same block, if another op has read x, or if the backward of x's op reads its
   output, as that of dt_softmax does. After it was overwritten, every use of the old x fails.
   Returns x. */
DT_API dt_tensor *dt_last_use(dt_tensor *x);
/* [local] Returns x without its history, as PyTorch's detach(): no gradient passes from the result
   to x. It has the data and placements of x, which are copied only where dt_alias copies them. */
DT_API dt_tensor *dt_detach(dt_tensor *x);
/* [local] If `on` is 1, ops record nothing from now on (for evaluation and generation); if `on` is
   0, they record again.

   Inference memory does not grow with the number of layers if each layer is a dt_block. When a
   block under dt_no_grad ends, the data of all tensors that it made are dropped, except those of
   the tensor that it returns. When the next block begins at the same level, and its x is the last
   block's output or was made after it, the last block's x and output are dropped, unless they are
   the new block's x:

       x1 = dt_add(x0, dt_block(ctx, f, x0, u));      y = f(x0) is made, the rest of f dropped
       x2 = dt_add(x1, dt_block(ctx, f, x1, u));      x0 and y are dropped when this block begins

   To use the x or the output of a block later than that, set dt_block_desc.keep. A tensor that you
   pass to blocks through `user` only, such as positions or a mask, stays valid until dt_reset if it
   was made outside of blocks. So does a tensor that a recorded op has read. A later use of a
   dropped tensor fails. */
DT_API void dt_no_grad(dt_ctx *ctx, int on);
/* [local] Finds the op that makes a NaN (PyTorch: detect_anomaly). While `on` is 1, the output of
   each op is tested, and after each op's backward the gradients that it wrote; this is slow. The
   first NaN in a forward, and the first NaN or Inf in a backward, fails the context with
   DT_ERR_NUMERIC. The text names the op, the element, the block, the micro-batch and the pipeline
   stage, and says whether an input of the op already had the NaN. An Inf in the forward does not
   fail, because masks contain it; the text names the first op that made one. Ops under dt_no_grad
   are not tested. */
DT_API void dt_check_finite(dt_ctx *ctx, int on);

/* The largest difference that dt_grad_check has found: |gradient - numeric| / max(1, |numeric|). */
typedef struct dt_grad_difference {
    double difference;       /* Inf after a failure */
    const dt_tensor *tensor; /* the input, NULL after a failure */
    int64_t element;         /* index in its local slice, row-major */
    double gradient;         /* of this element, from the backward */
    double numeric;          /* its central difference (f(x + step) - f(x - step)) / (2 step) */
} dt_grad_difference;
/* [local] Gradient check: compares the gradients of a function with finite differences, to test an
   op of your own (PyTorch's gradcheck). `loss` computes a scalar from the n `inputs`, which are f64
   parameters, or other f64 tensors after dt_require_grad. dt_grad_check calls `loss` once, runs the
   backward, and then calls `loss` twice for each element of the inputs; at the end the inputs have
   their old values, and the gradients are cleared. step 0 means 1e-6. Fails with DT_ERR_ARG if an
   input is not f64, needs no gradient, or gets none. Call dt_reset before the next forward. */
DT_API dt_grad_difference dt_grad_check(dt_ctx *ctx, dt_tensor *(*loss)(void *user), void *user,
    dt_tensor *const *inputs, int n, double step);

// ==== 9. Weight files ===========================================================================

/* A weight file consists of a header, which names tensors, and the tensors' data. safetensors:

       | N: 8 bytes | {"wte": {"dtype":"F32", "shape":[257,64], "data_offsets":[0,65792]}} | data |

   A rank reads only its own slice of each tensor. The files do not depend on the layout. */

/* Files are not trusted: dt checks sizes before it multiplies them, and names before it uses them
   as paths. An inconsistent file fails with DT_ERR_IO; the error text has the file's name and the
   reason. All file access uses pread and pwrite of the io table. */

/* [local] Reads a complete file of at most `limit` bytes. Returns its text with an appended NUL,
   which *bytes does not count. Free the text with dt_free(ctx, DT_MEM_HOST, text, *bytes + 1). */
DT_API char *dt_file_read(dt_ctx *ctx, const char *path, size_t limit, size_t *bytes);
/* [local] Writes a file atomically: writes a temporary file in the same folder, calls fsync and
   renames the temporary file. After a failure the old file is unchanged. */
DT_API dt_status dt_file_write(dt_ctx *ctx, const char *path, const void *data, size_t bytes);

/* A parsed JSON text: an array of nodes; node 0 is the root. The syntax is RFC 8259, but stricter
   where two readers could disagree. These are errors: a duplicate key, -0, an integer beyond 2^53,
   a number that a double cannot hold, and more than 64 levels, 4,194,304 values or 100,000,000
   bytes. Error texts name the position: "config.json:3:17: ...".

   The text is UTF-8, but a string may hold any bytes, because a path may: a byte that is not valid
   UTF-8 is written as \udc80 .. \udcff, and reading converts that escape back to the byte (PEP 383,
   Python's surrogateescape). Every other lone surrogate is an error. */
typedef struct dt_json dt_json;
typedef enum dt_json_kind {
    DT_JSON_NULL = 0,
    DT_JSON_BOOL,
    DT_JSON_NUMBER,
    DT_JSON_STRING,
    DT_JSON_ARRAY,
    DT_JSON_OBJECT
} dt_json_kind;
/* [local] Parses `bytes` bytes of text. `name` appears in error texts. The result points to `name`
   and `text`, which must stay valid until dt_json_free. Returns NULL after a failure. */
DT_API dt_json *dt_json_parse(dt_ctx *ctx, const char *name, const char *text, size_t bytes);
DT_API void dt_json_free(dt_json *json);
/* [local] Read a node. If the node does not exist or is of another kind, the functions below return
   0, NULL or -1. Members of an object are in the order of their keys. A string is NUL-terminated
   and may contain NULs; *bytes receives its length, and `bytes` may be NULL. */
DT_API dt_json_kind dt_json_kind_of(const dt_json *json, int node);
/* [local] Returns the number of elements of an array or of members of an object. */
DT_API int dt_json_count(const dt_json *json, int node);
/* [local] Returns the node of element i of an array, or of the value of member i of an object. */
DT_API int dt_json_at(const dt_json *json, int node, int i);
/* [local] Returns the key of the object member whose value is this node. */
DT_API const char *dt_json_key(const dt_json *json, int node, size_t *bytes);
DT_API int dt_json_find(const dt_json *json, int node, const char *key);
DT_API const char *dt_json_string(const dt_json *json, int node, size_t *bytes);
DT_API int dt_json_number(const dt_json *json, int node, double *out);
/* [local] Sets *out to the node's number and returns 1; returns 0 if the number has a fraction. */
DT_API int dt_json_int(const dt_json *json, int node, int64_t *out);
DT_API int dt_json_bool(const dt_json *json, int node, int *out);
/* [local] Fails the context. The error text begins with the node's position: "config.json:3:17:
   heads: a number is needed". */
DT_API dt_status dt_json_fail(const dt_json *json, int node, const char *fmt, ...) DT_PRINTF(3, 4);

/* A JSON writer. Set ctx and zero the other fields. To write an element of an array, pass NULL as
   the `key` of the functions below. A number is written so that it reads back as the same double,
   in every locale. Until dt_json_out_free, `text` holds the JSON: `used` bytes and a terminating
   NUL. */
typedef struct dt_json_out {
    dt_ctx *ctx;
    char *text;
    size_t used, capacity;
} dt_json_out;
/* [local] dt_json_open begins an object ('{') or an array ('['); dt_json_close ends it. */
DT_API void dt_json_open(dt_json_out *out, const char *key, char bracket);
DT_API void dt_json_close(dt_json_out *out, char bracket);
/* [local] Writes a string; value NULL is written as null. */
DT_API void dt_json_put_string(dt_json_out *out, const char *key, const char *value);
/* [local] Writes a number; fails with DT_ERR_ARG if value is not finite. */
DT_API void dt_json_put_number(dt_json_out *out, const char *key, double value);
/* [local] Writes a number with a decimal point or an exponent, for readers that distinguish floats
   from integers, as Python's do. */
DT_API void dt_json_put_float(dt_json_out *out, const char *key, double value);
DT_API void dt_json_put_int(dt_json_out *out, const char *key, int64_t value);
DT_API void dt_json_put_bool(dt_json_out *out, const char *key, int value);
DT_API void dt_json_out_free(dt_json_out *out);

/* An open file of named tensors, in one of two formats. safetensors: one file, or
   model.safetensors.index.json and the shards that it names. llm.c: its model .bin, of version 3
   (f32) or 5 (bf16), with the tensors wte wpe ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw
   fcb fcprojw fcprojb lnfw lnfb; a tensor that each layer has is one tensor for all layers. */
typedef struct dt_weights dt_weights;

typedef struct dt_weight {
    const char *name;
    const char *type; /* the type's name in safetensors: "F32", "BF16", "U8", ... */
    /* 1 if the tensor can be read; 0 if it can only be listed, because it has more than DT_MAX_DIMS
       dimensions (then `shape` is (count)), or its type is F4, F6_*, F8_E8M0, F8_*FNUZ or C64 */
    int readable;
    /* the type, or the smallest dt_dtype for its values: U8 for BOOL; I32 for I8, I16 and U16; I64
       for U32 and U64; BF16 for F8_E4M3 and F8_E5M2 */
    dt_dtype dtype;
    dt_shape shape;
    int64_t count; /* number of elements */
} dt_weight;

/* The header of an llm.c model, in the order of the file; all 0 for other files. wte has
   padded_vocab rows; rows from vocab on are unused. */
typedef struct dt_llmc {
    int32_t version, seq, vocab, layers, heads, width, padded_vocab;
} dt_llmc;

/* [local] Opens a file, or a folder that contains model.safetensors or
   model.safetensors.index.json. Returns NULL after a failure (DT_ERR_IO). */
DT_API dt_weights *dt_weights_open(dt_ctx *ctx, const char *path);
DT_API int dt_weights_count(const dt_weights *w);
/* [local] Returns the description of tensor `index`; NULL if index is out of range. */
DT_API const dt_weight *dt_weights_get(const dt_weights *w, int index);
/* [local] Returns the tensor's index, or -1 if no tensor has this name. */
DT_API int dt_weights_find(const dt_weights *w, const char *name);
DT_API dt_llmc dt_weights_llmc(const dt_weights *w);
/* [local] Returns the value of `key` in "__metadata__" of the file (of the first file, if there are
   several), or NULL. */
DT_API const char *dt_weights_metadata(const dt_weights *w, const char *key);
/* [local] Reads `count` elements of a tensor in row-major order, beginning with element `first`,
   and converts them to type `as`. Floating-point types convert to each other, rounded to nearest
   even. Integers convert to integers: an element that `as` does not hold fails with DT_ERR_IO, and
   the error names it. */
DT_API dt_status dt_weights_read(
    dt_weights *w, int index, int64_t first, int64_t count, dt_dtype as, void *host);

/* Maps rows of a parameter to a part of a tensor in a file. The parameter is seen as a matrix with
   `columns` columns, and the file's tensor as a matrix whose rows are as long as the tensor's last
   dimension. */
typedef struct dt_weight_part {
    const char *name; /* of the file's tensor */
    /* number of the parameter's rows in this part; 0 means all remaining rows */
    int64_t rows;
    /* size that the file's matrix must have; 0 means exactly the rows (columns) of this part */
    int64_t file_rows, file_columns;
    int64_t row, column; /* first row and column of this part in the file's matrix */
    int transposed;      /* 1: the file stores the parameter's columns as rows */
    /* 1: the part is the file's whole tensor in row-major order, whatever its shape. Besides `name`
       only `rows` may be set */
    int flat;
} dt_weight_part;
/* [local] Fills this rank's slice of a parameter, however the parameter is sharded, and reads only
   that slice from the file. The n parts cover consecutive rows of the parameter. columns 0 means
   the parameter's last dimension. Example: GPT-2's v (H,D,C) is a part of c_attn (C,3C):

       dt_weight_part part = { .name = "h.0.attn.c_attn.weight", .file_columns = 3 * C,
                               .column = 2 * C, .transposed = 1 };
       dt_weights_load(w, v, 0, &part, 1);

   The bias of v (H,D) is a part of a tensor (3C): pass columns = C, file_columns = 3 * C and
   column = 2 * C. Call dt_weights_load after dt_zero_make. */
DT_API dt_status dt_weights_load(
    dt_weights *w, dt_tensor *param, int64_t columns, const dt_weight_part *parts, int n);

typedef struct dt_load_desc {
    /* Writes the file's name for the parameter `name` to `out` and returns 1; returns 0 to leave
       the parameter as it is. NULL: the file uses the parameters' names. */
    int (*rename)(void *user, const char *name, char *out, size_t size);
    void *user;
    int partial; /* 1: loads what fits; 0: any difference fails before a parameter changes */
} dt_load_desc;

/* Result of dt_weights_load_all. missing: parameters without a tensor in the file. mismatched:
   tensors with another number of elements than their parameter, or of integers where numbers are
   needed. unexpected: tensors that no parameter takes. The text names the first of each. */
typedef struct dt_load_report {
    int loaded, missing, mismatched, unexpected;
    char text[512];
} dt_load_report;
/* [local] Calls dt_weights_load for every parameter of the context. A tensor of another shape with
   as many elements is reshaped. Fails with DT_ERR_SHAPE and the report's text unless everything
   fits or desc.partial is 1. On a rank that has one stage of a pipeline `unexpected` is 0, because
   other ranks take the other tensors. report may be NULL. PyTorch: load_state_dict. */
DT_API dt_status dt_weights_load_all(dt_weights *w, dt_load_desc desc, dt_load_report *report);

typedef struct dt_weights_desc {
    /* if the tensors have more than shard_bytes bytes, writes model-00001-of-0000N.safetensors and
       so on with an index; 0 means one file */
    int64_t shard_bytes;
    /* llmc.version 3 or 5: writes an llm.c model, whose tensors need no declaration; 0:
       safetensors */
    dt_llmc llmc;
} dt_weights_desc;
/* [local] Begins a file. Declare all tensors, then write all their elements, in any order.
   dt_weights_close gives the complete files their final names; after a failure before
   dt_weights_close the old files are unchanged. Shards are replaced one after the other, and their
   index last. A safetensors file begins with the metadata {"format":"pt"}. */
DT_API dt_weights *dt_weights_create(dt_ctx *ctx, const char *path, dt_weights_desc desc);
/* [local] Declares a tensor. Returns its index, or -1 after a failure. */
DT_API int dt_weights_declare(dt_weights *w, const char *name, dt_dtype dtype, dt_shape shape);
/* [local] Writes elements first .. first + count - 1 of a tensor. Write each element once. In an
   llm.c model you may leave out the padding rows of wte (rows vocab .. padded_vocab - 1), which
   become 0. */
DT_API dt_status dt_weights_write(
    dt_weights *w, int index, int64_t first, int64_t count, dt_dtype from, const void *host);
/* [local] Writes a parameter that is not sharded, as the inverse of dt_weights_load. */
DT_API dt_status dt_weights_save(
    dt_weights *w, dt_tensor *param, int64_t columns, const dt_weight_part *parts, int n);
/* [local] Ends reading or writing, and frees w; w may be NULL. dt_ctx_free closes files that are
   still open, and discards files that are still being written. */
DT_API dt_status dt_weights_close(dt_weights *w);

/* Call sites, see section 4. */
#define dt_read(t, ...) dt_read(dt_tensor_here(t, DT_SITE), __VA_ARGS__)
#define dt_write(t, ...) dt_write(dt_tensor_here(t, DT_SITE), __VA_ARGS__)
#define dt_data(t) dt_data(dt_tensor_here(t, DT_SITE))
#define dt_item(t) dt_item(dt_tensor_here(t, DT_SITE))
#define dt_backward(loss) dt_backward(dt_tensor_here(loss, DT_SITE))
#define dt_backward_input(loss) dt_backward_input(dt_tensor_here(loss, DT_SITE))
#define dt_backward_weight(loss) dt_backward_weight(dt_tensor_here(loss, DT_SITE))
#define dt_backward_at(y, ...) dt_backward_at(dt_tensor_here(y, DT_SITE), __VA_ARGS__)

#ifdef __cplusplus
}
#endif
#endif /* DT_TENSOR_H */

#if defined(DT_IMPLEMENTATION) && !defined(DT_TENSOR_IMPL)
#define DT_TENSOR_IMPL

DT__CPP_WARNINGS_OFF

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef CLOCK_MONOTONIC
#error "dt: #define _GNU_SOURCE before the first #include of the implementation file, or use gnu11"
#endif

DT__COLD_BEGIN

#ifdef __cplusplus
extern "C" {
#endif

// ==== 10. Implementation: base helpers ==========================================================

/* in the order of dt_dtype */
static const struct {
    const char *name;
    size_t size;
} dt__dtypes[] = { { "f32", 4 }, { "bf16", 2 }, { "f16", 2 }, { "f64", 8 }, { "i32", 4 },
    { "u8", 1 }, { "i64", 8 } };

static int dt__dtype_known(dt_dtype dtype) {
    return (size_t)dtype < sizeof dt__dtypes / sizeof *dt__dtypes;
}

size_t dt_dtype_size(dt_dtype dtype) { return dt__dtype_known(dtype) ? dt__dtypes[dtype].size : 0; }
const char *dt_dtype_name(dt_dtype dtype) {
    return dt__dtype_known(dtype) ? dt__dtypes[dtype].name : "unknown type";
}

const char *dt_status_name(dt_status status) {
    static const char *const names[] = { "DT_OK", "DT_ERR_ARG", "DT_ERR_SHAPE", "DT_ERR_MEM",
        "DT_ERR_IO", "DT_ERR_DEVICE", "DT_ERR_COMM", "DT_ERR_TIMEOUT", "DT_ERR_PEER",
        "DT_ERR_NUMERIC", "DT_ERR_UNSUPPORTED" };
    int i = (int)status;
    return i >= 0 && i <= (int)DT_ERR_UNSUPPORTED ? names[i] : "unknown status";
}

/* Checked product and sum of counts. Return 1; 0 after an overflow or for a negative operand. */
static int dt__mul_ok(int64_t a, int64_t b, int64_t *out) {
    return a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, out);
}

static int dt__add_ok(int64_t a, int64_t b, int64_t *out) {
    return a >= 0 && b >= 0 && !__builtin_add_overflow(a, b, out);
}

int64_t dt_count(dt_shape shape) {
    int64_t n = 1;
    if (shape.nd < 0 || shape.nd > DT_MAX_DIMS) return -1;
    for (int i = 0; i < shape.nd; i++)
        if (!dt__mul_ok(n, shape.d[i], &n)) return -1;
    return n;
}

/* Returns what is wrong with a shape, or NULL if it is valid. A valid shape has at most 6
   dimensions, no dimension below `least`, and a size in bytes far below SIZE_MAX. */
static const char *dt__shape_problem(dt_shape shape, int64_t least) {
    int64_t limit = INT64_MAX / 16;
    if (shape.nd < 0) return "a negative number of dimensions";
    if (shape.nd > DT_MAX_DIMS) return "more than 6 dimensions";
    for (int i = 0; i < shape.nd; i++) {
        if (shape.d[i] < least)
            return least ? "each dimension must be 1 or more" : "a dimension is negative";
        if (shape.d[i] > limit) return "more elements than can be counted";
        if (shape.d[i] > 0) limit /= shape.d[i];
    }
    return NULL;
}

static int dt__same_shape(dt_shape a, dt_shape b) {
    if (a.nd != b.nd) return 0;
    for (int i = 0; i < a.nd; i++)
        if (a.d[i] != b.d[i]) return 0;
    return 1;
}

/* Appends to the string `text`, a buffer of `bytes` bytes of which *at are used. Cuts off what does
   not fit. `bytes` may be 0. */
static void dt__append_list(char *text, size_t bytes, size_t *at, const char *fmt, va_list args) {
    if (*at + 1 >= bytes) return;
    int length = vsnprintf(text + *at, bytes - *at, fmt, args);
    if (length > 0) *at = *at + (size_t)length < bytes ? *at + (size_t)length : bytes - 1;
}

/* A text that functions return by value, so that no caller has to free it. dt__format makes a text,
   dt__put appends to it; both cut off what does not fit. */
typedef struct dt__text {
    char s[504];
    size_t used;
} dt__text;

DT_PRINTF(2, 3) static void dt__put(dt__text *text, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    dt__append_list(text->s, sizeof text->s, &text->used, fmt, args);
    va_end(args);
}

DT_PRINTF(1, 2) static dt__text dt__format(const char *fmt, ...) {
    dt__text text;
    va_list args;
    text.used = 0;
    text.s[0] = 0;
    va_start(args, fmt);
    dt__append_list(text.s, sizeof text.s, &text.used, fmt, args);
    va_end(args);
    return text;
}

static dt__text dt__shape_text(dt_shape shape) {
    dt__text t = dt__format("(");
    for (int i = 0; i < shape.nd && i < DT_MAX_DIMS; i++)
        dt__put(&t, i ? ",%lld" : "%lld", (long long)shape.d[i]);
    dt__put(&t, shape.nd > DT_MAX_DIMS ? ",..)" : ")");
    return t;
}

/* Sorts the n elements of v with a bottom-up merge sort, which is stable and takes O(n log n) time.
   Skips a merge if the two runs are already in order. `scratch` has space for n elements. */
typedef int (*dt__less_fn)(const void *user, uint32_t a, uint32_t b);
static void dt__sort(uint32_t *v, uint32_t *scratch, size_t n, dt__less_fn less, const void *user) {
    for (size_t width = 1; width < n; width *= 2)
        for (size_t lo = 0; lo + width < n; lo += 2 * width) {
            size_t mid = lo + width, end = mid + width < n ? mid + width : n, i = 0, j = mid,
                   k = lo;
            if (!less(user, v[mid], v[mid - 1])) continue;
            memcpy(scratch, v + lo, width * sizeof *v);
            while (i < width && j < end)
                v[k++] = less(user, v[j], scratch[i]) ? v[j++] : scratch[i++];
            while (i < width) v[k++] = scratch[i++];
        }
}

/* Returns the digest of bytes that are compared with the same bytes in another run, on another rank
   or in a file. `h` is the digest of the bytes before them. */
static uint64_t dt__digest(uint64_t h, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)data + i, bytes - i < 8 ? bytes - i : 8);
        h = (h ^ word) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    return h;
}

/* Returns the tensor that owns t's data and gradient. A view shares the data and gradient of its
   owner, and all bookkeeping is on the owner. */
static dt_tensor *dt__owner(dt_tensor *t) {
    while (t->base) t = t->base;
    return t;
}

static size_t dt__bytes(const dt_tensor *t) {
    return (size_t)dt_count(t->shape) * dt_dtype_size(t->dtype);
}

/* A function that kernels call. Kernels have their own target options, so gcc inlines a function
   into them only with always_inline. */
#define DT__INLINE static inline __attribute__((always_inline))

DT__INLINE uint32_t dt__float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

DT__INLINE float dt__bits_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Mixed precision: convert bf16 and f16 to f32, and f32 to them, rounded to nearest even; a NaN
   stays a NaN. The code selects values instead of branching, so that loops vectorise. */
DT__INLINE float dt__bf16_to_f32(uint16_t h) { return dt__bits_float((uint32_t)h << 16); }

DT__INLINE uint16_t dt__f32_to_bf16(float f) {
    uint32_t u = dt__float_bits(f);
    uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : rounded);
}

DT__INLINE float dt__f16_to_f32(uint16_t h) {
    uint32_t mag = h & 0x7fff, sign = (uint32_t)(h & 0x8000) << 16;
    /* the result for values below 2^-14: mag times the smallest subnormal, 2^-24 */
    uint32_t tiny = dt__float_bits((float)(int32_t)mag * 0x1p-24f);
    /* the result for all other values: changes the exponent's bias from 15 to 127 */
    uint32_t rest = (mag << 13) + (mag >= 0x7c00 ? 0x70000000 : 0x38000000);
    return dt__bits_float((mag < 0x400 ? tiny : rest) | sign);
}

DT__INLINE uint16_t dt__f32_to_f16(float f) {
    uint32_t u = dt__float_bits(f), mag = u & 0x7fffffff;
    /* for results below 2^-14: the last bit of the f32 number 0.5 + x is 2^-24, so the addition
       rounds */
    uint32_t tiny = dt__float_bits(dt__bits_float(mag) + 0.5f) - 0x3f000000;
    uint32_t rest = (mag - 0x38000000 + 0xfff + (mag >> 13 & 1)) >> 13;
    uint32_t huge = mag > 0x7f800000 ? 0x7e00 | (mag >> 13 & 0x3ff) : 0x7c00;
    return (uint16_t)((mag < 0x38800000      ? tiny
                          : mag < 0x47800000 ? rest
                                             : huge) |
                      (u >> 16 & 0x8000));
}

/* Round to odd. Converts a double to a float that will be rounded again, to 16 bits. If the
   conversion to float is not exact, sets the float's last bit. The second rounding then gives the
   result of a single rounding, because it sees that the value was not exact. */
static float dt__f64_to_odd(double x) {
    float f = (float)x;
    uint32_t u = dt__float_bits(f);
    if ((double)f == x || x != x) return f;
    return dt__bits_float((fabs((double)f) > fabs(x) ? u - 1 : u) | 1);
}

/* Read and write element i of an array of any type. */
static inline double dt__number(dt_dtype dtype, const void *array, size_t i) {
    switch (dtype) {
    case DT_F32: return (double)((const float *)array)[i];
    case DT_BF16: return (double)dt__bf16_to_f32(((const uint16_t *)array)[i]);
    case DT_F16: return (double)dt__f16_to_f32(((const uint16_t *)array)[i]);
    case DT_F64: return ((const double *)array)[i];
    case DT_I32: return (double)((const int32_t *)array)[i];
    case DT_U8: return (double)((const uint8_t *)array)[i];
    case DT_I64: return (double)((const int64_t *)array)[i];
    }
    return NAN;
}

static inline void dt__set_number(dt_dtype dtype, void *array, size_t i, double x) {
    switch (dtype) {
    case DT_F32: ((float *)array)[i] = (float)x; break;
    case DT_BF16: ((uint16_t *)array)[i] = dt__f32_to_bf16(dt__f64_to_odd(x)); break;
    case DT_F16: ((uint16_t *)array)[i] = dt__f32_to_f16(dt__f64_to_odd(x)); break;
    case DT_F64: ((double *)array)[i] = x; break;
    case DT_I32:
        x = x != x ? 0 : x > 2147483647.0 ? 2147483647.0 : x < -2147483648.0 ? -2147483648.0 : x;
        ((int32_t *)array)[i] = (int32_t)x;
        break;
    case DT_U8: ((uint8_t *)array)[i] = (uint8_t)(x > 0 ? (x < 255 ? x : 255) : 0); break;
    case DT_I64: /* 2^63 itself is too large, and the largest double below it is not */
        ((int64_t *)array)[i] = x != x         ? 0
                                : x >= 0x1p63  ? INT64_MAX
                                : x <= -0x1p63 ? INT64_MIN
                                               : (int64_t)x;
        break;
    }
}

static const float dt__nf4_values[16] = DT__NF4_VALUES;

/* in the order of dt_quant: elements and bytes of a block */
static const struct {
    const char *name;
    int64_t elements, bytes;
} dt__quants[] = { { "none", 0, 0 }, { "bf16", 1, 2 },
    { "int8", DT__QUANT_BLOCK, 4 + DT__QUANT_BLOCK },
    { "nf4", DT__QUANT_BLOCK, 4 + DT__QUANT_BLOCK / 2 } };
#define DT__QUANTS ((int)(sizeof dt__quants / sizeof *dt__quants))

static int dt__quant_known(int quant) { return quant > 0 && quant < DT__QUANTS; }
const char *dt_quant_name(dt_quant quant) {
    return (int)quant >= 0 && (int)quant < DT__QUANTS ? dt__quants[quant].name : "unknown format";
}
size_t dt_quant_bytes(dt_quant quant, int64_t count) {
    if (!dt__quant_known((int)quant) || count < 0 || count % dt__quants[quant].elements) return 0;
    return (size_t)(count / dt__quants[quant].elements * dt__quants[quant].bytes);
}

/* Quantises one block of 64 elements, as the CPU code of bitsandbytes does: a value half-way
   between two entries of the table gets the lower one. */
static void dt__quantize_block(int quant, const float *in, unsigned char *out) {
    float most = 0, inverse, scale;
    for (int i = 0; i < DT__QUANT_BLOCK; i++) most = fabsf(in[i]) > most ? fabsf(in[i]) : most;
    scale = quant == DT_QUANT_NF4 ? most : most / 127;
    inverse = 1 / (scale > 1e-38f ? scale : 1e-38f);
    memcpy(out, &scale, sizeof scale);
    out += sizeof scale;
    if (quant == DT_QUANT_NF4) memset(out, 0, DT__QUANT_BLOCK / 2);
    for (int i = 0; i < DT__QUANT_BLOCK; i++) {
        float x = in[i] * inverse;
        int code = 0;
        if (quant == DT_QUANT_INT8) {
            out[i] = (unsigned char)(int)rintf(x > 127 ? 127 : x > -127 ? x : -127);
            continue;
        }
        for (int k = 0; k < 15; k++) code += x > (dt__nf4_values[k] + dt__nf4_values[k + 1]) * 0.5f;
        out[i / 2] |= (unsigned char)(i % 2 ? code : code << 4);
    }
}

static dt_status dt__quantize_all(dt_quant quant, const float *in, int64_t count, void *out) {
    if (count != 0 && (dt_quant_bytes(quant, count) == 0 || !in || !out)) return DT_ERR_ARG;
    for (int64_t i = 0; quant == DT_QUANT_BF16 && i < count; i++)
        ((uint16_t *)out)[i] = dt__f32_to_bf16(in[i]);
    for (int64_t i = 0; quant != DT_QUANT_BF16 && i < count; i += DT__QUANT_BLOCK)
        dt__quantize_block((int)quant, in + i, (unsigned char *)out + dt_quant_bytes(quant, i));
    return DT_OK;
}

dt_status dt_quantize(dt_quant quant, const float *in, int64_t count, void *out) {
    for (int64_t i = 0; in && quant != DT_QUANT_BF16 && i < count; i++)
        if (!(fabsf(in[i]) <= 3.40282347e38f)) return DT_ERR_NUMERIC;
    return dt__quantize_all(quant, in, count, out);
}

/* Converts elements [at, at + n) of an array of blocks to their values. */
DT__INLINE void dt__dequantize(int quant, const void *from, int64_t at, int64_t n, float *out) {
    if (quant == DT_QUANT_BF16) {
        const uint16_t *in = (const uint16_t *)from + at;
        for (int64_t i = 0; i < n; i++) out[i] = dt__bf16_to_f32(in[i]);
        return;
    }
    int64_t bytes = quant == DT_QUANT_INT8 ? 4 + DT__QUANT_BLOCK : 4 + DT__QUANT_BLOCK / 2;
    for (int64_t have; n > 0; at += have, n -= have, out += have) {
        int64_t first = at % DT__QUANT_BLOCK;
        const unsigned char *code = (const unsigned char *)from + at / DT__QUANT_BLOCK * bytes + 4;
        float scale;
        memcpy(&scale, code - 4, sizeof scale);
        have = n < DT__QUANT_BLOCK - first ? n : DT__QUANT_BLOCK - first;
        if (quant == DT_QUANT_INT8)
            for (int64_t i = 0; i < have; i++) out[i] = scale * (float)(int8_t)code[first + i];
        else
            for (int64_t i = 0; i < have; i++) {
                int pair = code[(first + i) / 2];
                out[i] = scale * dt__nf4_values[(first + i) % 2 ? pair & 15 : pair >> 4];
            }
    }
}

dt_status dt_dequantize(dt_quant quant, const void *in, int64_t count, float *out) {
    if (count != 0 && (dt_quant_bytes(quant, count) == 0 || !in || !out)) return DT_ERR_ARG;
    dt__dequantize((int)quant, in, 0, count, out);
    return DT_OK;
}

DT__INLINE int dt__narrow(dt_dtype dtype) { return dtype == DT_BF16 || dtype == DT_F16; }
DT__INLINE int dt__integer(dt_dtype dtype) {
    return dtype == DT_I32 || dtype == DT_U8 || dtype == DT_I64;
}
DT__INLINE dt_dtype dt__wide(dt_dtype dtype, int wide) {
    return wide && dt__narrow(dtype) ? DT_F32 : dtype;
}

/* size of the type in which the CPU computes on elements of this dtype */
static size_t dt__real_size(dt_dtype dtype) { return dtype == DT_F64 ? 8 : 4; }

// ==== 11. Default host and io tables ============================================================

static void *dt__host_alloc(void *user, size_t bytes, dt_mem mem) {
    const size_t huge = (size_t)2 << 20;
    void *p = NULL;
    (void)user;
    (void)mem;
    if (posix_memalign(&p, bytes < 2 * huge ? 64 : huge, bytes) != 0) return NULL;
#ifdef MADV_HUGEPAGE /* for large blocks: fewer page faults and misses of the TLB */
    if (bytes >= 2 * huge) madvise(p, bytes / huge * huge, MADV_HUGEPAGE);
#endif
    return p;
}

static void dt__host_free(void *user, void *p, size_t bytes, dt_mem mem) {
    (void)user;
    (void)bytes;
    (void)mem;
    free(p);
}

static double dt__host_now(void *user) {
    struct timespec t;
    (void)user;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void dt__host_sleep(void *user, double seconds) {
    (void)user;
    if (seconds <= 0) {
        sched_yield();
        return;
    }
    struct timespec t;
    t.tv_sec = (time_t)seconds;
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    nanosleep(&t, NULL);
}

/* Returns 1 if RLIMIT_FSIZE allows a file of `bytes` bytes, else 0 with errno EFBIG. Writes are
   checked first, because a write beyond the limit raises SIGXFSZ, which ends the program. */
static int dt__io_allowed(uint64_t bytes) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return 1;
    if (bytes <= (uint64_t)limit.rlim_cur) return 1;
    errno = EFBIG;
    return 0;
}

/* Writes one line to standard error, with one write call, so that the lines of several ranks do not
   mix. Drops the line if the reader of standard error accepts no data for a second: a rank that
   waited longer would hang the job. */
static void dt__host_log(void *user, int level, int rank, const char *text) {
    char line[700];
    struct stat st;
    struct pollfd to = { 2, POLLOUT, 0 };
    (void)user;
    (void)rank;
    if (level > DT_LOG_NOTICE) return;
    int n = snprintf(line, sizeof line, "dt: %s%s\n", level == DT_LOG_ERROR ? "error: " : "", text);
    if (n < 0) return;
    if ((size_t)n >= sizeof line) n = (int)sizeof line - 1;
    if (fstat(2, &st) == 0 && S_ISREG(st.st_mode) && !dt__io_allowed((uint64_t)st.st_size + 1))
        return;
    /* a failure of this write cannot be reported, because there is no other log */
    if (poll(&to, 1, 1000) <= 0 || write(2, line, (size_t)n) < 0) return;
}

static void *dt__host_map(void *user, size_t bytes) {
    (void)user;
    void *p = mmap(
        NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void dt__host_unmap(void *user, void *p, size_t bytes) {
    (void)user;
    munmap(p, bytes);
}

static void dt__host_discard(void *user, void *p, size_t bytes) {
    (void)user;
#ifdef MADV_REMOVE
    madvise(p, bytes, MADV_REMOVE);
#else
    memset(p, 0, bytes);
#endif
}

/* Opens /dev/null on each of the descriptors 0 to 2 that is closed, as SQLite does. Returns -1 on
   failure. Call this function before every call that opens a descriptor: if a job starts with
   descriptor 2 closed, the next file or socket would become descriptor 2, and log lines would be
   written to it. */
static int dt__io_guard_std_fds(void) {
    for (int fd = 0; fd <= 2; fd++) {
        int null = fcntl(fd, F_GETFD) >= 0 ? fd : open("/dev/null", O_RDWR);
        /* not ENOENT, with which callers would conclude that their file is absent */
        if (null < 0) return errno = EBADF, -1;
        if (null > 2) close(null); /* another thread has opened descriptor fd first */
    }
    return 0;
}

static int dt__io_open(void *user, const char *path, int mode) {
    static const int flags[] = { O_RDONLY, O_RDWR | O_NOFOLLOW, /* DT_IO_READ, DT_IO_WRITE */
        O_RDWR | O_NOFOLLOW | O_CREAT | O_EXCL,                 /* DT_IO_CREATE */
        O_RDWR | O_NOFOLLOW | O_CREAT | O_EXCL,                 /* DT_IO_PRIVATE */
        O_RDWR | O_NOFOLLOW | O_CREAT };                        /* DT_IO_LOCK */
    struct stat st;
    (void)user;
    if (mode < DT_IO_READ || mode > DT_IO_LOCK) return errno = EINVAL, -1;
    if (dt__io_guard_std_fds() != 0) return -1;
    mode_t rights = mode == DT_IO_PRIVATE ? 0600 : 0666;
    int fd = open(path, flags[mode] | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, rights);
    if (fd < 0 && errno == ENOENT) /* the target of a link may be on a disk that is not mounted */
        errno = lstat(path, &st) == 0 && S_ISLNK(st.st_mode) ? ELOOP : ENOENT;
    if (fd < 0) return -1;
    int reason = 0; /* dt__io_reason explains the values of `reason` */
    if (fstat(fd, &st) != 0)
        reason = errno;
    else if (!S_ISREG(st.st_mode) && !(S_ISDIR(st.st_mode) && mode == DT_IO_READ))
        reason = S_ISFIFO(st.st_mode) ? ESPIPE : ENODEV;
    else if (mode == DT_IO_LOCK && st.st_nlink != 1)
        reason = EMLINK;
    if (reason == 0) return fd;
    close(fd);
    errno = reason;
    return -1;
}

static int dt__io_close(void *user, int fd) {
    (void)user;
    return close(fd);
}

static int64_t dt__io_size(void *user, int fd) {
    struct stat st;
    (void)user;
    if (fstat(fd, &st) != 0) return -1;
    if (!S_ISREG(st.st_mode)) {
        errno = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
        return -1;
    }
    return (int64_t)st.st_size;
}

static int64_t dt__io_pread(void *user, int fd, void *buf, size_t bytes, int64_t offset) {
    (void)user;
    return (int64_t)pread(fd, buf, bytes, (off_t)offset);
}

/* Only the first byte is checked against RLIMIT_FSIZE: a write that crosses the limit writes up to
   the limit and returns a short count. */
static int64_t dt__io_pwrite(void *user, int fd, const void *buf, size_t bytes, int64_t offset) {
    (void)user;
    if (bytes > 0 && !dt__io_allowed((uint64_t)offset + 1)) return -1;
    return (int64_t)pwrite(fd, buf, bytes, (off_t)offset);
}

static int dt__io_fsync(void *user, int fd) {
    (void)user;
    return fsync(fd);
}

static int dt__io_rename(void *user, const char *from, const char *to) {
    (void)user;
    return rename(from, to);
}

static int dt__io_resize(void *user, int fd, int64_t bytes) {
    (void)user;
    return dt__io_allowed((uint64_t)bytes) ? ftruncate(fd, (off_t)bytes) : -1;
}

static int dt__io_remove(void *user, const char *path) {
    (void)user;
    return unlink(path);
}

static int dt__io_make_folder(void *user, const char *path) {
    (void)user;
    return mkdir(path, 0777);
}

static int dt__io_list_folder(
    void *user, const char *path, void (*each)(void *arg, const char *name), void *arg) {
    (void)user;
    if (dt__io_guard_std_fds() != 0) return -1;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (fd >= 0 && !d) close(fd);
    if (!d) return -1;
    errno = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL; errno = 0)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) each(arg, e->d_name);
    int reason = errno; /* closedir may change errno */
    closedir(d);
    errno = reason;
    return reason ? -1 : 0;
}

static int dt__io_lock(void *user, int fd) {
    (void)user;
    return flock(fd, LOCK_EX | LOCK_NB);
}

/* Removes files through a directory descriptor, because a link could replace the path between two
   calls. */
static int dt__io_remove_folder(void *user, const char *path, const char *const *names, int n) {
    struct stat st;
    int failed = 0;
    (void)user;
    if (dt__io_guard_std_fds() != 0) return -1;
    if (fstatat(AT_FDCWD, path, &st, AT_SYMLINK_NOFOLLOW) != 0) return -1;
    if (S_ISLNK(st.st_mode)) return unlink(path);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return -1;
    for (int i = 0; i < n && !failed; i++)
        failed = unlinkat(fd, names[i], 0) != 0 && errno != ENOENT;
    int reason = errno; /* close may change errno */
    close(fd);
    errno = reason;
    return failed ? -1 : rmdir(path);
}

static int dt__io_sync_and_evict(void *user, int fd, int64_t bytes, int64_t offset) {
    (void)user;
#if defined(SYS_sync_file_range) && defined(POSIX_FADV_DONTNEED)
    enum { WAIT_BEFORE = 1, WRITE = 2, WAIT_AFTER = 4 }; /* libc needs _GNU_SOURCE to name them */
    /* The kernel reports a disk error only once: if sync_file_range reports one, fsync might
       succeed. So call fsync only if the file system does not support sync_file_range. */
    if (syscall(SYS_sync_file_range, fd, (off_t)offset, (off_t)bytes,
            WAIT_BEFORE | WRITE | WAIT_AFTER) != 0) {
        if (errno != ENOSYS && errno != EINVAL && errno != ESPIPE) return -1;
        if (fsync(fd) != 0) return -1;
    }
    posix_fadvise(fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM); /* no read-ahead: its pages would stay cached */
    return 0;
#else
    (void)bytes;
    (void)offset;
    return fsync(fd);
#endif
}

static const dt_host dt__host_table = { .alloc = dt__host_alloc,
    .free = dt__host_free,
    .now = dt__host_now,
    .sleep = dt__host_sleep,
    .log = dt__host_log,
    .map = dt__host_map,
    .unmap = dt__host_unmap,
    .discard = dt__host_discard };
static const dt_io dt__io_table = { .open = dt__io_open,
    .close = dt__io_close,
    .size = dt__io_size,
    .pread = dt__io_pread,
    .pwrite = dt__io_pwrite,
    .fsync = dt__io_fsync,
    .rename = dt__io_rename,
    .resize = dt__io_resize,
    .remove = dt__io_remove,
    .sync_and_evict = dt__io_sync_and_evict,
    .make_folder = dt__io_make_folder,
    .list_folder = dt__io_list_folder,
    .lock = dt__io_lock,
    .remove_folder = dt__io_remove_folder };

const dt_host *dt_host_default(void) { return &dt__host_table; }
const dt_io *dt_io_default(void) { return &dt__io_table; }

// ==== 12. Context, errors, memory account: code =================================================

/* Memory accounting: every byte has one class, and only dt__account changes the counters:

       dt_alloc(ctx, class, n)      live[class] += n, peak[class] = max(peak[class], live[class])
       dt_free(ctx, class, p, n)    live[class] -= n

   Errors are sticky: dt_fail records the first error, later ops return NULL, and a listener
   (dt_comm.h) tells the other ranks. */

/* Arena: a bump allocator, which frees all its allocations at once (section 15). */
typedef struct dt__chunk {
    struct dt__chunk *next;
    char *data;
    size_t size, used;
} dt__chunk;

typedef struct dt__arena {
    dt_mem mem;
    const char *what;       /* its owner in error texts; NULL: "an arena" */
    size_t min_chunk;       /* size of the first chunk, unless a request is larger */
    int borrows;            /* 1: its chunks are buffers of the pool, which a reset gives back */
    dt__chunk *chunks;      /* list; the current chunk comes first */
    int number;             /* of an arena of a pool: its place in the pool */
    struct dt__arena *next; /* if this arena is free: the next one of its pool */
} dt__arena;

/* Device memory or pinned memory that was freed while device operations were in flight, and is
   cached for the next request of the same size. */
typedef struct dt__cached_memory {
    void *p;
    size_t bytes;
    int pinned;
} dt__cached_memory;

/* A reusable buffer (section 15). */
typedef struct dt__buffer {
    void *data;
    size_t bytes;
    dt_mem mem;
    int busy;            /* number of users: more than 1 if a block's arena lends memory */
    int free_at_release; /* 1: the last user frees the memory */
    int any_size;        /* 1: a request of any size may take it; 0: only one of exactly `bytes` */
    int64_t last_step;   /* the number of dt_clear_grads calls when it was last in use */
    char *unused;        /* (unused_bytes) no tensor needs these bytes before the reset */
    size_t unused_bytes;
} dt__buffer;

/* The number of activation bytes that each block of a stage has needed so far, by the block's index
   in its micro-batch. */
typedef struct dt__stage_sizes {
    size_t *bytes;
    int capacity;
} dt__stage_sizes;

struct dt_ctx {
    dt_kernels kernels;
    dt_host host;
    dt_io io;
    void *stream;
    int owns_stream; /* this context opened the stream and closes it */
    uint64_t seed;
    int rank;
    void *attached;
    dt_status status;
    /* 1: the context failed because a read of a file failed; the file itself may be intact */
    int read_failed;
    char text[512];
    dt_memory memory;
    size_t mem_limit;
    dt__cached_memory *cached;
    int n_cached, cached_capacity;
    void *work;
    size_t work_bytes;
    dt_listener *listeners;

    /* of the training state: the groups over which it sums the gradients of dense parameters and of
       experts (NULL: one rank) */
    const dt_group *data_groups[2];
    const dt_group *expert_groups[2]; /* groups that shard experts (NULL: one rank) */
    int has_training_state;

    dt_tensor **params; /* (param_capacity); the first n_params are used */
    int n_params, param_capacity;
    char *scope_prefix;
    size_t scope_bytes;
    int scope, stage, has_stages; /* has_stages 1: dt_stage was called */
    /* (n_buckets) structs of bucket_struct_bytes, each of which begins with a dt_bucket */
    char *buckets;
    size_t bucket_struct_bytes;
    int n_buckets;
    dt__buffer *buffers;
    int n_buffers, buffer_capacity;
    struct dt__kept *keep_list; /* list of the tensors of dt_keep */
    int64_t resets;             /* number of dt_reset calls so far */

    dt_block_state **tapes; /* (tape_capacity) root blocks; NULL for unused numbers */
    int tape_capacity;
    dt_block_state *root, *current; /* of the selected tape */
    dt_block_state *entered_block;  /* innermost entered block that was not left yet */
    /* 1 during a gather for one access that is outside of any op */
    int outside_op;
    /* dt_check_finite is on; the first op since then that made an Inf, and its block */
    int check_finite;
    int inf_block;
    const char *inf_op;
    /* the first micro-batch of the step whose loss is not finite, -1 if there is none; on a device
       only known with check_finite */
    int bad_loss_micro;
    struct dt__flow *arriving; /* list of the data that arrive in pieces */
    struct dt__flow *gathers;  /* list of the incoming flows that have not ended */
    dt_node *deferred;         /* ops whose weight half is deferred, oldest first */
    dt__stage_sizes *stage_sizes;
    int stage_capacity;
    dt__arena *grad_pool;
    /* free arenas for the data of recomputed blocks */
    dt__arena *recompute_pool;
    int n_arenas; /* number of arenas that both pools have made */
    /* fingerprint of the ops that the current block has recorded; 0 if there are none */
    uint64_t fingerprint;
    int recomputing; /* nesting depth of second runs of recomputed blocks */
    int micro, micro_count;
    int no_grad;
    double loss_scale;
    int64_t steps; /* number of dt_clear_grads calls so far; every training step makes one call */
    /* call sites: next_site of the next operation, as its macro has set it; site of the public
       function that runs now, which all its operations share. NULL files if not known */
    dt_site next_site, site;
    int warned_unused_input; /* 1: dt_pipe_run has logged its notice about a stage's input */
};

/* Updates the memory counters: sign is +1 for an allocation, -1 for a free. No other function
   changes the counters of bytes. */
static void dt__account(dt_ctx *ctx, dt_mem mem, size_t bytes, int sign) {
    dt_memory *m = &ctx->memory;
    if (sign < 0) {
        m->live[mem] -= bytes;
        m->live_total -= bytes;
        return;
    }
    m->live[mem] += bytes;
    m->live_total += bytes;
    if (m->live[mem] > m->peak[mem]) m->peak[mem] = m->live[mem];
    if (m->live_total > m->peak_total) m->peak_total = m->live_total;
}

static int dt__from_host(const dt_ctx *ctx, dt_mem mem) {
    return mem == DT_MEM_HOST || !ctx->kernels.alloc;
}

static void *dt__host_zeroed(dt_ctx *ctx, size_t bytes, const char *what) {
    void *p = dt_alloc(ctx, DT_MEM_HOST, bytes, what);
    if (p) memset(p, 0, bytes);
    return p;
}

/* Returns `array` if it has capacity for one more element. Otherwise copies it to a larger array,
   frees the old array and returns the new array. Returns NULL after a failure. */
static void *dt__grow(
    dt_ctx *ctx, void *array, int used, int *capacity, size_t element, const char *what) {
    if (used < *capacity) return array;
    int more = *capacity ? 2 * *capacity : 16;
    void *p = dt__host_zeroed(ctx, (size_t)more * element, what);
    if (!p) return NULL;
    if (array) memcpy(p, array, (size_t)used * element);
    dt_free(ctx, DT_MEM_HOST, array, (size_t)*capacity * element);
    *capacity = more;
    return p;
}

/* Caches freed device memory for the next request of the same size. cudaFree waits until the device
   is idle; while an operation in flight waits for this rank's next call, that is a deadlock. So
   memory that is freed while operations are in flight goes to the cache. The rank's stream orders
   the old and the new use. Returns 1 if the memory was cached, else 0. */
static int dt__device_cache_put(dt_ctx *ctx, void *p, size_t bytes, int pinned) {
    dt__cached_memory *grown = (dt__cached_memory *)dt__grow(ctx, ctx->cached, ctx->n_cached,
        &ctx->cached_capacity, sizeof *grown, "cached device memory");
    if (!grown) return 0;
    ctx->cached = grown;
    grown[ctx->n_cached].p = p;
    grown[ctx->n_cached].bytes = bytes;
    grown[ctx->n_cached++].pinned = pinned;
    return 1;
}

static void *dt__device_cache_get(dt_ctx *ctx, size_t bytes, int pinned) {
    for (int i = 0; i < ctx->n_cached; i++) {
        if (ctx->cached[i].bytes != bytes || ctx->cached[i].pinned != pinned) continue;
        void *p = ctx->cached[i].p;
        ctx->cached[i] = ctx->cached[--ctx->n_cached];
        return p;
    }
    return NULL;
}

static void dt__device_free(dt_ctx *ctx, void *p, size_t bytes, int pinned) {
    if (pinned)
        ctx->kernels.unpin(p, bytes);
    else
        ctx->kernels.free(ctx->kernels.user, p, bytes);
}

static void dt__device_cache_free(dt_ctx *ctx) {
    while (ctx->n_cached > 0) {
        dt__cached_memory k = ctx->cached[--ctx->n_cached];
        dt__device_free(ctx, k.p, k.bytes, k.pinned);
    }
}

/* Calls the listeners' drain. Call dt__drain before a device wait without a timeout, because
   pending operations may depend on other ranks. Returns 1 if no pending operation still runs on the
   device, else 0. */
static int dt__drain(dt_ctx *ctx, int all) {
    int idle = 1;
    for (dt_listener *l = ctx->listeners; l; l = l->next)
        if (l->drain && !l->drain(ctx, all, l->user)) idle = 0;
    if (idle) dt__device_cache_free(ctx);
    return idle;
}

static void *dt__alloc_uncounted(dt_ctx *ctx, dt_mem mem, size_t bytes, int pinned) {
    if (pinned ? !ctx->kernels.pin : dt__from_host(ctx, mem))
        return ctx->host.alloc(ctx->host.user, bytes, mem);
    void *p = dt__device_cache_get(ctx, bytes, pinned);
    for (int attempt = 0; !p && attempt < 2; attempt++) {
        /* no drain for pinned memory: pending operations themselves allocate pinned memory when
           they make progress, and must not wait for their own end */
        if (attempt > 0 && (pinned || ctx->n_cached == 0 || !dt__drain(ctx, 1))) break;
        p = pinned ? ctx->kernels.pin(bytes) : ctx->kernels.alloc(ctx->kernels.user, bytes);
    }
    return p;
}

static void *dt__alloc_counted(
    dt_ctx *ctx, dt_mem mem, size_t bytes, const char *what, int pinned) {
    static const char *const classes[DT_MEM_CLASSES] = { "params", "grads", "optim", "acts", "comm",
        "host", "temp" };
    char limit[48] = "";
    if (bytes == 0 || dt_error(ctx) != DT_OK) return NULL;
    if ((unsigned)mem >= (unsigned)DT_MEM_CLASSES) {
        dt_fail(ctx, DT_ERR_ARG, "%s: there is no memory class %d", what, (int)mem);
        return NULL;
    }
    const dt_memory *m = &ctx->memory;
    int over_limit =
        ctx->mem_limit && (bytes > ctx->mem_limit || m->live_total > ctx->mem_limit - bytes);
    void *p = over_limit ? NULL : dt__alloc_uncounted(ctx, mem, bytes, pinned);
    if (!p) {
        if (over_limit) snprintf(limit, sizeof limit, " of a limit of %zu", ctx->mem_limit);
        dt_fail(ctx, DT_ERR_MEM, "%s: %zu bytes of class %s were refused; %zu bytes are in use%s",
            what, bytes, classes[mem], m->live_total, limit);
        dt__text table = dt__format("live bytes (and peak):");
        for (int i = 0; i < DT_MEM_CLASSES; i++)
            dt__put(&table, " %s %zu (%zu)", classes[i], m->live[i], m->peak[i]);
        dt_log(ctx, DT_LOG_NOTICE, "rank %d: %s", ctx->rank, table.s);
        return NULL;
    }
    dt__account(ctx, mem, bytes, +1);
    ctx->memory.allocations++;
    return p;
}

void *dt_alloc(dt_ctx *ctx, dt_mem mem, size_t bytes, const char *what) {
    return dt__alloc_counted(ctx, mem, bytes, what, 0);
}
void *dt_pin(dt_ctx *ctx, size_t bytes, const char *what) {
    return dt__alloc_counted(ctx, DT_MEM_HOST, bytes, what, 1);
}

static void dt__free_counted(dt_ctx *ctx, dt_mem mem, void *p, size_t bytes, int pinned) {
    if (!p) return;
    if (pinned ? !ctx->kernels.unpin : dt__from_host(ctx, mem))
        ctx->host.free(ctx->host.user, p, bytes, mem);
    else if ((!pinned && dt__drain(ctx, 0)) || !dt__device_cache_put(ctx, p, bytes, pinned))
        dt__device_free(ctx, p, bytes, pinned);
    dt__account(ctx, mem, bytes, -1);
}

void dt_free(dt_ctx *ctx, dt_mem mem, void *p, size_t bytes) {
    dt__free_counted(ctx, mem, p, bytes, 0);
}
void dt_unpin(dt_ctx *ctx, void *p, size_t bytes) {
    dt__free_counted(ctx, DT_MEM_HOST, p, bytes, 1);
}

void *dt_scratch(dt_ctx *ctx, size_t bytes) {
    if (dt_error(ctx) != DT_OK) return NULL;
    if (bytes <= ctx->work_bytes) return ctx->work;
    dt_free(ctx, DT_MEM_TEMP, ctx->work, ctx->work_bytes);
    ctx->work_bytes = 0;
    ctx->work = dt_alloc(ctx, DT_MEM_TEMP, bytes, "scratch of a kernel");
    if (!ctx->work) return NULL;
    ctx->work_bytes = bytes;
    dt_log(ctx, DT_LOG_DETAIL, "scratch grows to %zu bytes", bytes);
    return ctx->work;
}

dt_memory dt_memory_used(const dt_ctx *ctx) {
    dt_memory none;
    if (ctx) return ctx->memory;
    memset(&none, 0, sizeof none);
    return none;
}

void dt_memory_reset_peak(dt_ctx *ctx) {
    if (!ctx) return;
    for (int i = 0; i < DT_MEM_CLASSES; i++) ctx->memory.peak[i] = ctx->memory.live[i];
    ctx->memory.peak_total = ctx->memory.live_total;
}

/* Returns the default kernel table: the GPU's if dt_kernels.cu is linked and dt_cuda_ready returns
   DT_OK, else the CPU's. Rank 0 logs why the GPU is not used, or the advice of dt_cuda_ready. */
static const dt_kernels *dt__kernels_default(dt_ctx *ctx) {
#ifdef __ELF__
    char text[160] = "";
    if (!dt_cuda_ready) return dt_kernels_cpu();
    dt_status ready = dt_cuda_ready(text, sizeof text);
    if (ctx->rank == 0 && ready != DT_OK)
        dt_log(ctx, DT_LOG_NOTICE, "no CUDA device (%s): running on the CPU", text);
    if (ctx->rank == 0 && ready == DT_OK && text[0]) dt_log(ctx, DT_LOG_NOTICE, "%s", text);
    if (ready == DT_OK) return dt_kernels_cuda();
#endif
    (void)ctx;
    return dt_kernels_cpu();
}

dt_ctx *dt_ctx_make(dt_ctx_desc desc) {
    const dt_host *host = desc.host ? desc.host : dt_host_default();
    dt_ctx *ctx = (dt_ctx *)host->alloc(host->user, sizeof *ctx, DT_MEM_HOST);
    char text[160] = "";
    if (!ctx) return NULL;
    memset(ctx, 0, sizeof *ctx);
    ctx->host = *host;
    ctx->io = desc.io ? *desc.io : *dt_io_default();
    ctx->rank = desc.rank;
    ctx->seed = desc.seed ? desc.seed : 1;
    ctx->micro_count = 1;
    ctx->bad_loss_micro = -1;
    ctx->loss_scale = 1;
    ctx->mem_limit = desc.mem_limit;
    dt__account(ctx, DT_MEM_HOST, sizeof *ctx, +1);
    ctx->memory.allocations = 1;
    ctx->kernels = *(desc.kernels ? desc.kernels : dt__kernels_default(ctx));
    ctx->stream = desc.stream;
    if (!desc.stream && ctx->kernels.open) {
        ctx->stream = ctx->kernels.open(desc.local_rank, text, sizeof text);
        ctx->owns_stream = ctx->stream != NULL;
        if (!ctx->stream)
            dt_fail(ctx, DT_ERR_DEVICE, "dt_ctx_make: %s: %s", ctx->kernels.name, text);
    }
    return ctx;
}

static void dt__tape_free(dt_ctx *ctx);
static void dt__kept_free(dt_ctx *ctx);
static void dt__params_free(dt_ctx *ctx);
static void dt__buffers_free(dt_ctx *ctx);
static void *dt__buffer_acquire(dt_ctx *ctx, dt_mem mem, size_t bytes);
static void dt__buffer_release(dt_ctx *ctx, void *data);
static void dt__buffer_free(dt_ctx *ctx, void *data);
static dt__buffer *dt__buffer_of(dt_ctx *ctx, const void *data);
static void *dt__unused_take(dt_ctx *ctx, size_t bytes);

void dt_ctx_free(dt_ctx *ctx) {
    if (!ctx) return;
    while (ctx->listeners) {
        /* remove l from the list first, because l->closing may free l */
        dt_listener *l = ctx->listeners;
        ctx->listeners = l->next;
        if (l->closing) l->closing(ctx, l->user);
    }
    dt__tape_free(ctx);
    dt__kept_free(ctx);
    dt__params_free(ctx);
    dt__buffers_free(ctx);
    dt_free(ctx, DT_MEM_TEMP, ctx->work, ctx->work_bytes);
    dt__device_cache_free(ctx);
    dt_free(ctx, DT_MEM_HOST, ctx->cached, (size_t)ctx->cached_capacity * sizeof *ctx->cached);
    if (ctx->owns_stream) ctx->kernels.close(ctx->stream);
    dt_host host = ctx->host;
    host.free(host.user, ctx, sizeof *ctx, DT_MEM_HOST);
}

const dt_kernels *dt_ctx_kernels(const dt_ctx *ctx) { return ctx ? &ctx->kernels : NULL; }
const dt_host *dt_ctx_host(const dt_ctx *ctx) { return ctx ? &ctx->host : NULL; }
const dt_io *dt_ctx_io(const dt_ctx *ctx) { return ctx ? &ctx->io : NULL; }
void *dt_ctx_stream(const dt_ctx *ctx) { return ctx ? ctx->stream : NULL; }
int dt_ctx_rank(const dt_ctx *ctx) { return ctx ? ctx->rank : 0; }
uint64_t dt_ctx_seed(const dt_ctx *ctx) { return ctx ? ctx->seed : 0; }
void *dt_ctx_attached(const dt_ctx *ctx) { return ctx ? ctx->attached : NULL; }
void dt_ctx_attach(dt_ctx *ctx, void *upper) {
    if (ctx) ctx->attached = upper;
}

size_t dt_printable(const char *s) {
    /* least[n]: smallest printable code point whose encoding has n bytes */
    static const uint32_t least[] = { 0, 0x20, 0xa0, 0x800, 0x10000 };
    unsigned char first = (unsigned char)(s ? *s : 0);
    size_t n = first < 0x80   ? 1
               : first < 0xc0 ? 0
               : first < 0xe0 ? 2
               : first < 0xf0 ? 3
               : first < 0xf8 ? 4
                              : 0;
    uint32_t code = n > 1 ? first & 0x7fu >> n : first;
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (s[i] & 0x3f);
    }
    return code < least[n] || code == 0x7f || (code >= 0xd800 && code < 0xe000) || code > 0x10ffff
               ? 0
               : n;
}

/* Turns a message into one printable line: each unprintable byte becomes \xNN, and the result is
   truncated to `bytes` bytes. Every message passes through dt__escape, because a message may quote
   paths, names in files and texts from other ranks. */
static void dt__escape(char *text, size_t bytes) {
    char raw[700] = "";
    size_t at = 0, n = strlen(text) < sizeof raw ? strlen(text) : sizeof raw - 1;
    memcpy(raw, text, n);
    for (size_t i = 0, length; i < n; i += length ? length : 1) {
        length = dt_printable(raw + i);
        if (at + (length ? length : 4) >= bytes) break;
        if (length)
            memcpy(text + at, raw + i, length);
        else
            snprintf(text + at, bytes - at, "\\x%02x", (unsigned char)raw[i]);
        at += length ? length : 4;
    }
    text[at] = 0;
}

void dt_log(dt_ctx *ctx, int level, const char *fmt, ...) {
    char text[640];
    va_list args;
    if (!ctx || !fmt) return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    dt__escape(text, sizeof text);
    ctx->host.log(ctx->host.user, level, ctx->rank, text);
}

/* Returns " at train.c:88"; for a gather of an op, whose line is not known, " in dt_linear". Cuts
   the name as the frames between ranks do, so that a text shows each site in one form. */
static dt__text dt__site_text(const char *file, int line) {
    if (!file || !file[0]) return dt__format("%s", "");
    if (!line) return dt__format(" in %.31s", file);
    const char *slash = strrchr(file, '/');
    return dt__format(" at %.31s:%d", slash ? slash + 1 : file, line);
}

/* Returns 1 if a text names a call site; " at t.c:88" does not name " at t.c:8". */
static int dt__names_site(const char *text, const dt__text *at) {
    for (const char *s = text; (s = strstr(s, at->s)) != NULL; s++) {
        int c = s[at->used], letter = c | 32;
        if (c != '_' && (c < '0' || c > '9') && (letter < 'a' || letter > 'z')) return 1;
    }
    return 0;
}

dt_status dt_fail(dt_ctx *ctx, dt_status status, const char *fmt, ...) {
    va_list args;
    if (!ctx || status == DT_OK || ctx->status != DT_OK) return status;
    ctx->status = status;
    dt__text at = dt__site_text(ctx->site.file, ctx->site.line);
    const char *called = ctx->site.line ? "; called" : ";";
    size_t site_bytes = at.used + strlen(called), capacity = sizeof ctx->text - site_bytes;
    int n = snprintf(ctx->text, capacity, "rank %d: ", ctx->rank);
    va_start(args, fmt);
    vsnprintf(ctx->text + n, capacity - (size_t)n, fmt ? fmt : "no reason was given", args);
    va_end(args);
    /* the sign of a NaN is unspecified, so printf may print nan or -nan: remove the sign */
    for (char *s = strstr(ctx->text, " -nan"); s; s = strstr(s + 1, " -nan"))
        if (strchr(" ,:;)", s[5])) memmove(s + 1, s + 2, strlen(s + 2) + 1);
    /* name the user's line, unless the text does; a peer's text already names the peer's line */
    if (status != DT_ERR_PEER && !dt__names_site(ctx->text, &at))
        snprintf(strchr(ctx->text, 0), site_bytes + 1, "%s%s", called, at.s);
    dt__escape(ctx->text, sizeof ctx->text);
    int logged = status == DT_ERR_PEER; /* if another rank failed first, it logs the error */
    for (dt_listener *l = ctx->listeners; l; l = l->next)
        if (l->failed) logged |= l->failed(ctx, status, ctx->text, l->user);
    dt_log(ctx, logged ? DT_LOG_DETAIL : DT_LOG_ERROR, "%s", ctx->text);
    return status;
}

dt_ctx *dt_ctx_here(dt_ctx *ctx, const char *file, int line) {
    size_t n = file && line ? strlen(file) : 0;
    dt_site here = { n > 31 ? file + n - 31 : file, line }; /* the last 31 bytes, as DT_SITE */
    if (ctx) ctx->next_site = here;
    return ctx;
}

dt_tensor *dt_tensor_here(const dt_tensor *t, const char *file, int line) {
    if (t) dt_ctx_here(t->ctx, file, line);
    return (dt_tensor *)t;
}

/* A public function that does several operations opens its call site, and closes it with the value
   that dt__site_open has returned. If public functions call each other, the outermost call's site
   stays open, because that is the line of the user. */
static dt_site dt__site_open(dt_ctx *ctx) {
    dt_site outer = { NULL, 0 }, none = outer;
    if (!ctx) return outer;
    outer = ctx->site;
    if (!outer.file) ctx->site = ctx->next_site;
    ctx->next_site = none;
    return outer;
}

static void dt__site_close(dt_ctx *ctx, dt_site outer) {
    if (ctx) ctx->site = outer;
}

/* Defines dt_NAME: dt__NAME with the call site that its macro has set; `context` may be NULL. */
#define DT__DEFINE_AT_SITE(type, name, context, parameters, ...) \
    type(dt_##name) parameters { \
        dt_ctx *at = (context); \
        dt_site outer = dt__site_open(at); \
        type result = dt__##name(__VA_ARGS__); \
        dt__site_close(at, outer); \
        return result; \
    }

dt_status dt_error(const dt_ctx *ctx) { return ctx ? ctx->status : DT_ERR_MEM; }
const char *dt_error_text(const dt_ctx *ctx) {
    return ctx ? ctx->text : "no context: out of memory";
}

/* DT__CALL runs kernel k of the context's table. DT__KERNEL and DT__OP also fail the context if the
   kernel fails; the error text then begins with `what` or with the op's name. */
#define DT__CALL(ctx, k, args) \
    ((ctx)->kernels.k ? (ctx)->kernels.k((args), (ctx)->stream) : DT_ERR_UNSUPPORTED)
#define DT__KERNEL(ctx, what, k, args) \
    dt__kernel_done((ctx), (what), NULL, #k, DT__CALL(ctx, k, args))
#define DT__OP(op, x, k, args) \
    dt__kernel_done((x)->ctx, (op), (x)->name, #k, DT__CALL((x)->ctx, k, args))

static dt_status dt__kernel_done(
    dt_ctx *ctx, const char *what, const char *of, const char *kernel, dt_status status) {
    if (status == DT_OK) {
        for (dt_listener *l = ctx->listeners; l; l = l->next)
            if (l->kernel_done) l->kernel_done(ctx, l->user);
        return ctx->status;
    }
#ifdef DT_NO_KERNELS
    const char *missing = "not available for these arguments, or left out by DT_NO_KERNELS";
#else
    const char *missing = "not available for these arguments";
#endif
    const char *why = status == DT_ERR_UNSUPPORTED ? missing
                      : status == DT_ERR_ARG ? "an index, a value or the scratch is out of range"
                                             : dt_status_name(status);
    return dt_fail(ctx, status, "%s%s%s%s: kernel %s on %s: %s", what, of ? "(" : "", of ? of : "",
        of ? ")" : "", kernel, ctx->kernels.name, why);
}

static dt_status dt__move(dt_ctx *ctx, void *dst, const void *src, size_t bytes) {
    if (bytes == 0) return DT_OK;
    if (!ctx->kernels.move) {
        memcpy(dst, src, bytes);
        return DT_OK;
    }
    /* CUDA copies up to STAGED bytes from pageable memory through a staging buffer, without waiting
       for the device */
    enum { STAGED = 64 << 10 };
    int (*reaches)(const void *) = ctx->kernels.can_access;
    /* a copy to pageable memory, or a larger copy from pageable memory, waits for the device: drain
       before it */
    if (reaches && (!reaches(dst) || (bytes > STAGED && !reaches(src)))) dt__drain(ctx, 0);
    dt_status status = ctx->kernels.move(dst, src, bytes, ctx->stream);
    return status == DT_OK
               ? DT_OK
               : dt_fail(ctx, status, "copying %zu bytes on %s", bytes, ctx->kernels.name);
}

static dt_status dt__sync(dt_ctx *ctx) {
    dt__drain(ctx, 0);
    dt_status status = ctx->kernels.sync ? ctx->kernels.sync(ctx->stream) : DT_OK;
    /* CUDA kernels report a bad index only when the host waits for the stream */
    if (status == DT_ERR_ARG)
        return dt_fail(ctx, status,
            "on %s since the last wait: an id, a label or a row outside of its table; "
            "the CPU's kernels (dt_kernels_cpu) would name it",
            ctx->kernels.name);
    return status == DT_OK ? DT_OK : dt_fail(ctx, status, "waiting for %s", ctx->kernels.name);
}

/* Copies bytes and waits for the copy, so that both memories can be used at once. */
static dt_status dt__move_now(dt_ctx *ctx, void *to, const void *from, size_t bytes) {
    return dt__move(ctx, to, from, bytes) == DT_OK ? dt__sync(ctx) : ctx->status;
}

static dt_status dt__fill(dt_ctx *ctx, dt_dtype dtype, void *out, size_t count, double value) {
    if (count == 0) return DT_OK;
    dt_fill_args a = { dtype, out, count, value };
    return DT__KERNEL(ctx, "filling", fill, &a);
}

/* If accumulate is 1: out += in, else out = in. */
static dt_status dt__accumulate(
    dt_ctx *ctx, dt_dtype dtype, void *out, const void *in, size_t count, int accumulate) {
    if (!accumulate) return dt__move(ctx, out, in, count * dt_dtype_size(dtype));
    const void *terms[2] = { out, in };
    dt_reduce_args a = {
        .dtype = dtype, .out = out, .in = terms, .n = 2, .count = count, .op = DT_SUM
    };
    return DT__KERNEL(ctx, "adding", reduce, &a);
}

void dt_listen(dt_ctx *ctx, dt_listener *listener) {
    if (!ctx || !listener) return;
    dt_listener **at = &ctx->listeners;
    while (*at) at = &(*at)->next;
    listener->next = NULL;
    *at = listener;
}

void dt_unlisten(dt_ctx *ctx, dt_listener *listener) {
    if (!ctx) return;
    for (dt_listener **at = &ctx->listeners; *at; at = &(*at)->next)
        if (*at == listener) {
            *at = listener->next;
            return;
        }
}

// ==== 13. Counter-based RNG =====================================================================

/* Counter-based RNG: each random number is a pure function of (key, counter), not the next number
   of a sequence with state. With the naive version, one generator per process, every layout would
   get different values.

       key = hash(seed, "h.0.attn.wq")      value i of the full tensor = philox(key, i / 4)[i % 4]

   Any rank can compute any element of any tensor. So every layout starts from the same model, and
   dropout drops the same activations. */

/* Counter-based RNG. Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as
   1, 2, 3; SC11). Sets out to four random words, a pure function of (key, counter). */
static void dt__philox(uint64_t key, uint64_t counter, uint32_t out[4]) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Returns the RNG key for a name: the FNV-1a hash of the name, mixed with the seed so that the keys
   of neighbouring seeds give independent numbers. */
static uint64_t dt__stream_key(uint64_t seed, const char *name) {
    uint64_t h = 0xcbf29ce484222325u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001b3u;
    uint32_t mixed[4];
    dt__philox(seed, h, mixed);
    return (uint64_t)mixed[0] << 32 | mixed[1];
}

// ==== 14. Parameters, slices and buckets: code ==================================================

/* Gradient accumulation: a step runs several micro-batches, and a bucket adds up their gradients.
   In the naive version every op adds its gradient directly to the sum. In dt each micro-batch's
   gradient is complete before it is added to the sum. So the additions have a fixed order,
   micro-batch by micro-batch:

       micro-batch 0:  ops write -> grad                           then grad_ready
       micro-batch j:  ops write -> buffer, grad += buffer         then grad_ready

   A bucket's gradient is complete when the backward of every recorded use of its parameters has
   run. Then listeners may reduce the gradient over ranks while the backward of earlier layers still
   runs. With reduce_each_micro (ZeRO-2, ZeRO-3) a listener first sums the buffer over ranks, and
   `grad` is only this rank's shard. Section 8 of dt_zero.h draws the listener's states.

       EMPTY --dt__grad_begin--> WRITING --dt__grad_complete--> READY, then a listener's states,
         ^                        |    ^                        if it reduces each micro-batch
         |          dt__grad_add  v    |  dt__grad_begin
         +--dt_clear_grads-- ACCUMULATED */

dt_local_slice dt_local_slice_of(dt_shape full, const dt_shard_spec shards[3]) {
    dt_local_slice slice;
    int64_t end[DT_MAX_DIMS]; /* where this rank's slice ends in the full tensor */
    memset(&slice, 0, sizeof slice);
    if (dt__shape_problem(full, 0)) return slice;
    for (int i = 0; i < full.nd; i++) slice.n[i] = end[i] = full.d[i];
    for (int c = 0; shards && c < 3; c++) {
        const dt_group *group = (const dt_group *)shards[c].comm;
        if (!group || shards[c].dim < 0 || shards[c].dim >= full.nd) continue;
        /* a second sharding of the same dimension divides the slice that the first one left */
        int dim = shards[c].dim;
        slice.n[dim] = (slice.n[dim] + group->size - 1) / group->size;
        slice.lo[dim] += group->rank * slice.n[dim];
        if (slice.lo[dim] + slice.n[dim] < end[dim]) end[dim] = slice.lo[dim] + slice.n[dim];
    }
    for (int i = 0; i < full.nd; i++)
        slice.inside[i] = end[i] > slice.lo[i] ? end[i] - slice.lo[i] : 0;
    return slice;
}

/* Iterates over a local slice without its padding, in runs of elements that are contiguous both in
   the local slice and in the full tensor. */
typedef struct dt__slice_walk {
    dt_shape full;
    dt_local_slice slice;
    int64_t at[DT_MAX_DIMS];
    int outer;     /* a run covers dimensions outer and above; `at` counts through the others */
    int64_t count; /* number of elements of a run */
    int done;
    int64_t local, global; /* index of the run's first element in the slice, in the full tensor */
} dt__slice_walk;

static dt__slice_walk dt__slice_begin(dt_shape full, dt_local_slice slice) {
    dt__slice_walk w;
    memset(&w, 0, sizeof w);
    w.full = full;
    w.slice = slice;
    w.count = 1;
    w.outer = full.nd;
    /* as long as no inner dimension is sharded, the next outer dimension extends the run */
    int contiguous = 1;
    while (w.outer > 0 && contiguous) {
        w.outer--;
        w.count *= slice.inside[w.outer];
        contiguous = slice.n[w.outer] == full.d[w.outer];
    }
    for (int i = 0; i < full.nd; i++) w.done |= slice.inside[i] == 0;
    return w;
}

static int dt__slice_next(dt__slice_walk *w) {
    if (w->done) return 0;
    w->local = w->global = 0;
    for (int i = 0; i < w->full.nd; i++) {
        w->local = w->local * w->slice.n[i] + w->at[i];
        w->global = w->global * w->full.d[i] + w->slice.lo[i] + w->at[i];
    }
    int i = w->outer - 1;
    while (i >= 0 && ++w->at[i] == w->slice.inside[i]) w->at[i--] = 0;
    if (i < 0) w->done = 1;
    return 1;
}

/* Zeroes the padding of a local array: the elements outside the full tensor, which lie between the
   runs of a slice walk. */
static void dt__zero_padding(dt_ctx *ctx, const dt_param_info *p, dt_dtype dtype, void *array) {
    size_t size = dt_dtype_size(dtype);
    int64_t done = 0;
    int has_padding = 0;
    for (int i = 0; i < p->full.nd; i++) has_padding |= p->slice.inside[i] != p->slice.n[i];
    if (!has_padding) return;
    dt__slice_walk walk = dt__slice_begin(p->full, p->slice);
    while (dt__slice_next(&walk)) {
        dt__fill(ctx, dtype, (char *)array + (size_t)done * size, (size_t)(walk.local - done), 0);
        done = walk.local + walk.count;
    }
    dt__fill(ctx, dtype, (char *)array + (size_t)done * size, p->count - (size_t)done, 0);
}

static dt__text dt__printable_name(const char *name);

/* Checks that a name is printable, because names are written to files and messages. */
static dt_status dt__name_check(dt_ctx *ctx, const char *op, const char *name) {
    size_t length = 1;
    for (const char *s = name; *s && length; s += length) length = dt_printable(s);
    return length == 0
               ? dt_fail(ctx, DT_ERR_ARG, "%s(%s): a name is UTF-8 without control characters", op,
                     dt__printable_name(name).s)
               : DT_OK;
}

void dt_scope(dt_ctx *ctx, const char *prefix) {
    if (!ctx || ctx->status != DT_OK ||
        (prefix && dt__name_check(ctx, "dt_scope", prefix) != DT_OK))
        return;
    dt_free(ctx, DT_MEM_HOST, ctx->scope_prefix, ctx->scope_bytes);
    ctx->scope_prefix = NULL;
    ctx->scope_bytes = 0;
    ctx->scope++;
    if (!prefix || !*prefix) return;
    size_t bytes = strlen(prefix) + 1;
    ctx->scope_prefix = (char *)dt_alloc(ctx, DT_MEM_HOST, bytes, "dt_scope");
    if (!ctx->scope_prefix) return;
    memcpy(ctx->scope_prefix, prefix, bytes);
    ctx->scope_bytes = bytes;
}

void dt_stage(dt_ctx *ctx, int stage) {
    if (!ctx || ctx->status != DT_OK) return;
    if (stage < 0 || stage > 1 << 20) {
        dt_fail(ctx, DT_ERR_ARG, "dt_stage: %d; use 0 to %d", stage, 1 << 20);
        return;
    }
    ctx->stage = stage;
    ctx->has_stages = 1;
    ctx->scope++;
}

/* The placement of a tensor over one group. A shard of dimension dim begins at every index of the
   dimensions before it. dt_reshape may merge these dimensions into dim: then `outer` is the product
   of those that are in dim now, and the shard's part of dim is (outer, size / outer) instead of
   (1, size). */
typedef struct dt__placed {
    const dt_group *group;
    dt_placement at;
    int64_t outer;
} dt__placed;

enum { DT__MAX_PLACED = 6 };
struct dt_placements {
    int n;
    int any; /* 1: an op of the user made the tensor, so nothing is known over other groups */
    /* of two groups that shard one dimension, the second shards the slices of the first */
    dt__placed by_group[DT__MAX_PLACED];
};

/* Nothing is known about the tensor over any group. */
static const dt_placements dt__unknown_placements = { .n = 0, .any = 1 };

/* Appends a placement. Forgets all of them if there are too many groups. */
static void dt__placements_add(dt_placements *list, dt__placed p) {
    if (list->n < DT__MAX_PLACED) {
        list->by_group[list->n++] = p;
    } else {
        list->n = 0;
        list->any = 1;
    }
}

/* The placements that a parameter's description states. */
static dt_placements dt__param_placements(const dt_param_desc *d) {
    dt_placements list;
    memset(&list, 0, sizeof list);
    for (int i = 0; i < 5; i++) {
        const dt_comm *comm = i < 3 ? d->shards[i].comm : d->grad_placements[i - 3].comm;
        dt__placed p = { (const dt_group *)comm, DT_REPLICATE, 1 };
        if (!comm || p.group->size == 1) continue;
        if (i < 3)
            p.at = DT_SHARD(d->shards[i].dim);
        else if (d->grad_placements[i - 3].kind == DT_GRAD_PARTIAL)
            p.at = DT_COPY;
        dt__placements_add(&list, p);
    }
    return list;
}

/* A parameter's tensor and info; the name follows in the same allocation. */
typedef struct dt__param_memory {
    dt_tensor tensor;
    dt_param_info info;
    dt_placements placements;
} dt__param_memory;

static size_t dt__param_bytes(const char *name) {
    return sizeof(dt__param_memory) + strlen(name) + 1;
}

/* Checks that a quantised parameter is frozen and that no sharding cuts a block. */
static dt_status dt__param_check_quant(
    dt_ctx *ctx, const char *name, dt_shape full, dt_param_desc d) {
    int64_t last = full.nd ? full.d[full.nd - 1] : 1, ranks = 1;
    if (!dt__quant_known((int)d.quant) || !d.frozen || full.nd < 2)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_param(%s): quantised storage %s of %s%s: a frozen weight of two dimensions or more "
            "is needed",
            name, dt_quant_name(d.quant), dt__shape_text(full).s,
            d.frozen ? "" : ", which is not frozen");
    int64_t block = dt__quants[d.quant].elements;
    for (int i = 0; i < 3; i++)
        if (d.shards[i].comm && d.shards[i].dim == full.nd - 1)
            ranks *= ((const dt_group *)d.shards[i].comm)->size;
    if (last % (block * ranks) != 0)
        return dt_fail(ctx, DT_ERR_SHAPE,
            "dt_param(%s): the last dimension of %s is not a multiple of %lld: %lld elements of a "
            "%s block x %lld ranks that shard it",
            name, dt__shape_text(full).s, (long long)(block * ranks), (long long)block,
            dt_quant_name(d.quant), (long long)ranks);
    return DT_OK;
}

static dt_status dt__param_check(
    dt_ctx *ctx, const char *name, dt_shape full, dt_init init, dt_param_desc d) {
    if (!name || !*name) return dt_fail(ctx, DT_ERR_ARG, "dt_param: a parameter needs a name");
    if (dt__name_check(ctx, "dt_param", name) != DT_OK) return ctx->status;
    if (ctx->buckets)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_param(%s): parameters have their storage already; register "
            "all of them before dt_zero_make and before the first use",
            name);
    const char *bad = dt__shape_problem(full, 1);
    if (bad)
        return dt_fail(
            ctx, DT_ERR_SHAPE, "dt_param(%s): shape %s: %s", name, dt__shape_text(full).s, bad);
    dt__text why = { "", 0 }, shape = dt__shape_text(full);
    for (int c = 0; c < 3; c++) {
        dt_shard_spec s = d.shards[c];
        if (s.comm && (s.dim < 0 || s.dim >= full.nd))
            why = dt__format("sharding of dimension %d of %s", s.dim, shape.s);
        for (int e = 0; e < c; e++)
            if (s.comm && s.comm == d.shards[e].comm && s.dim == d.shards[e].dim)
                why = dt__format(
                    "dimension %d of %s is sharded twice over one group", s.dim, shape.s);
    }
    if (init.kind < 0 || init.kind > 3 || !(init.scale >= 0 && init.scale < HUGE_VAL))
        why =
            dt__format("initial values of kind %d and scale %g; it must be finite and not negative",
                init.kind, init.scale);
    if (!(d.lr_scale >= 0 && d.lr_scale < HUGE_VAL))
        why = dt__format("lr_scale %g; it must be finite and not negative", d.lr_scale);
    if (d.matrices < 0 || (d.matrices > 0 && d.matrices > full.nd - 2))
        why = dt__format(
            "%d dimensions of %s count matrices; a matrix needs 2 more", d.matrices, shape.s);
    if (dt_dtype_size(d.dtype) == 0 || dt__integer(d.dtype))
        why = dt__format("type %s; use f32, bf16, f16 or f64", dt_dtype_name(d.dtype));
    if (why.used) return dt_fail(ctx, DT_ERR_ARG, "dt_param(%s): %s", name, why.s);
    return d.quant ? dt__param_check_quant(ctx, name, full, d) : DT_OK;
}

dt_tensor *dt_param(dt_ctx *ctx, const char *name, dt_shape full, dt_init init) {
    dt_param_desc desc;
    memset(&desc, 0, sizeof desc);
    return dt_param_at(ctx, name, full, init, desc);
}

dt_tensor *dt_param_at(
    dt_ctx *ctx, const char *name, dt_shape full, dt_init init, dt_param_desc desc) {
    if (!ctx || ctx->status != DT_OK) return NULL;
    if (dt__param_check(ctx, name, full, init, desc) != DT_OK) return NULL;
    if (desc.quant) { /* from here on the parameter is a tensor of bytes */
        desc.dtype = DT_U8;
        full.d[full.nd - 1] = (int64_t)dt_quant_bytes(desc.quant, full.d[full.nd - 1]);
    }
    const char *prefix = ctx->scope_prefix ? ctx->scope_prefix : "";
    size_t prefix_length = strlen(prefix),
           bytes = sizeof(dt__param_memory) + prefix_length + strlen(name) + 1;
    dt_tensor **grown = (dt_tensor **)dt__grow(
        ctx, ctx->params, ctx->n_params, &ctx->param_capacity, sizeof *grown, "dt_param");
    if (!grown) return NULL;
    ctx->params = grown;
    dt__param_memory *memory = (dt__param_memory *)dt__host_zeroed(ctx, bytes, name);
    if (!memory) return NULL;
    char *own_name = (char *)(memory + 1);
    memcpy(own_name, prefix, prefix_length);
    memcpy(own_name + prefix_length, name, strlen(name));
    if (dt_param_find(ctx, own_name)) {
        dt_fail(ctx, DT_ERR_ARG, "dt_param(%s): the name is taken", own_name);
        dt_free(ctx, DT_MEM_HOST, memory, bytes);
        return NULL;
    }
    dt_tensor *t = &memory->tensor;
    dt_param_info *p = &memory->info;
    p->index = ctx->n_params;
    p->full = full;
    p->slice = dt_local_slice_of(full, desc.shards);
    p->init = init;
    p->desc = desc;
    p->scope = ctx->scope;
    p->stage = ctx->stage;
    t->shape.nd = full.nd;
    for (int i = 0; i < full.nd; i++) t->shape.d[i] = p->slice.n[i];
    p->count = (size_t)dt_count(t->shape);
    t->dtype = desc.dtype;
    t->name = own_name;
    t->ctx = ctx;
    t->needs_grad = !desc.frozen;
    t->param = p;
    memory->placements = dt__param_placements(&desc);
    if (memory->placements.n) t->placements = &memory->placements;
    ctx->params[ctx->n_params++] = t;
    return t;
}

int dt_param_count(const dt_ctx *ctx) { return ctx ? ctx->n_params : 0; }
dt_tensor *dt_param_get(const dt_ctx *ctx, int index) {
    return index >= 0 && index < dt_param_count(ctx) ? ctx->params[index] : NULL;
}

dt_tensor *dt_param_find(const dt_ctx *ctx, const char *name) {
    for (int i = 0; name && i < dt_param_count(ctx); i++)
        if (strcmp(ctx->params[i]->name, name) == 0) return ctx->params[i];
    return NULL;
}

/* Returns 1 if two parameters can share a bucket: every bucket operation treats both alike. */
static int dt__same_bucket(const dt_tensor *a, const dt_tensor *b) {
    const dt_param_desc *x = &a->param->desc, *y = &b->param->desc;
    if (a->dtype != b->dtype || x->quant != y->quant || a->param->scope != b->param->scope ||
        a->param->group != b->param->group || a->param->by_matrix != b->param->by_matrix ||
        !x->frozen != !y->frozen)
        return 0;
    for (int i = 0; i < 3; i++)
        if (x->shards[i].comm != y->shards[i].comm) return 0;
    for (int i = 0; i < 2; i++)
        if (x->grad_placements[i].comm != y->grad_placements[i].comm ||
            x->grad_placements[i].kind != y->grad_placements[i].kind)
            return 0;
    return 1;
}

/* Returns 1 if parameter i begins a new bucket. open: number of elements that the current bucket
   has so far. */
static int dt__begins_bucket(const dt_ctx *ctx, int i, size_t open, size_t bucket_bytes) {
    const dt_tensor *t = ctx->params[i];
    return i == 0 || !dt__same_bucket(ctx->params[i - 1], t) ||
           (open + t->param->count) * dt_dtype_size(t->dtype) > bucket_bytes;
}

static void dt__buckets_plan(dt_ctx *ctx, size_t bucket_bytes) {
    int u = -1;
    for (int i = 0; i < ctx->n_params; i++) {
        dt_param_info *p = ctx->params[i]->param;
        if (dt__begins_bucket(ctx, i, u < 0 ? 0 : dt_bucket_get(ctx, u)->count, bucket_bytes)) {
            dt_bucket *bucket = dt_bucket_get(ctx, ++u);
            bucket->index = u;
            bucket->first_param = i;
            bucket->dtype = ctx->params[i]->dtype;
            bucket->grad_dtype = bucket->sum_dtype = dt__wide(bucket->dtype, 1);
            bucket->frozen = p->desc.frozen != 0;
            bucket->stage = p->stage;
        }
        p->bucket = dt_bucket_get(ctx, u);
        p->offset = p->bucket->count;
        p->bucket->count += p->count;
        p->bucket->n_params++;
    }
}

/* Writes initial values. */
static dt_status dt__init_values(dt_ctx *ctx, const dt_tensor *t, dt_init_args a) {
    return t->param->init.kind == 1 ? dt__fill(ctx, a.dtype, a.out, a.count, a.scale)
                                    : DT__KERNEL(ctx, t->name, init, &a);
}

/* Writes bytes [a.offset, a.offset + a.count) of a quantised parameter. ZeRO-3 may begin or end a
   shard inside of a block, so whole blocks are made in scratch memory, up to CHUNK at a time. */
static dt_status dt__init_blocks(dt_ctx *ctx, const dt_tensor *t, dt_init_args a) {
    enum { CHUNK = 1 << 16 }; /* elements */
    int quant = (int)t->param->desc.quant;
    uint64_t elements = (uint64_t)dt__quants[quant].elements, end = a.offset + a.count,
             bytes = (uint64_t)dt__quants[quant].bytes, block = a.offset / bytes, step;
    char *scratch = (char *)dt_scratch(ctx, CHUNK * 2 * sizeof(float));
    for (; scratch && block * bytes < end && ctx->status == DT_OK; block += step) {
        dt_init_args values = a;
        uint64_t left = (end - block * bytes + bytes - 1) / bytes;
        step = left < CHUNK / elements ? left : CHUNK / elements;
        values.dtype = DT_F32;
        values.out = scratch + CHUNK * sizeof(float);
        values.count = (size_t)(step * elements);
        values.offset = block * elements;
        dt_quantize_args q = { quant, scratch, (const float *)values.out, values.count };
        if (dt__init_values(ctx, t, values) != DT_OK ||
            DT__KERNEL(ctx, t->name, quantize, &q) != DT_OK)
            break;
        uint64_t from = block * bytes < a.offset ? a.offset : block * bytes,
                 to = (block + step) * bytes < end ? (block + step) * bytes : end;
        dt__move(ctx, (char *)a.out + (from - a.offset), scratch + (from - block * bytes),
            (size_t)(to - from));
    }
    return ctx->status;
}

/* Writes the initial values of the parameter's elements that are in this rank's shard of the
   bucket. The caller has zeroed the shard. */
static dt_status dt__param_init(dt_ctx *ctx, const dt_tensor *t) {
    const dt_param_info *p = t->param;
    const dt_bucket *bucket = p->bucket;
    size_t size = dt_dtype_size(t->dtype), end = bucket->shard_offset + bucket->shard_count;
    uint64_t key = dt__stream_key(ctx->seed, t->name);
    dt__slice_walk walk = dt__slice_begin(p->full, p->slice);
    while (p->init.kind > 0 && dt__slice_next(&walk)) {
        size_t at = p->offset + (size_t)walk.local, stop = at + (size_t)walk.count;
        size_t from = at > bucket->shard_offset ? at : bucket->shard_offset,
               to = stop < end ? stop : end;
        if (from >= to) continue;
        dt_init_args a = { .dtype = t->dtype,
            .out = (char *)bucket->shard + (from - bucket->shard_offset) * size,
            .count = to - from,
            .normal = p->init.kind == 2,
            .scale = p->init.scale,
            .key = key,
            .offset = (uint64_t)walk.global + (from - at) };
        if (p->desc.quant)
            dt__init_blocks(ctx, t, a);
        else
            dt__init_values(ctx, t, a);
        if (ctx->status != DT_OK) break;
    }
    return ctx->status;
}

/* Sets the data of a bucket, and of its parameters' tensors. data NULL: the parameters have no
   values. */
static void dt__bucket_set_data(dt_ctx *ctx, dt_bucket *bucket, void *data) {
    bucket->data = data;
    for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++) {
        dt_tensor *t = ctx->params[i];
        t->data = data ? (char *)data + t->param->offset * dt_dtype_size(bucket->dtype) : NULL;
    }
}

static void dt__bucket_release(dt_ctx *ctx, dt_bucket *bucket, int written, int unused) {
    for (dt_listener *l = ctx->listeners; l && (written || unused); l = l->next)
        if (l->release) l->release(ctx, bucket, written, unused, l->user);
}

/* Allocates this rank's shard of a bucket, never the other shards, and writes the shard's initial
   values. */
static dt_status dt__bucket_alloc(dt_ctx *ctx, dt_bucket *bucket, const dt_buckets_desc *desc) {
    size_t bytes = bucket->shard_count * dt_dtype_size(bucket->dtype);
    bucket->shard = dt_alloc(ctx, DT_MEM_PARAMS, bytes, "parameters");
    if (!bucket->shard ||
        dt__fill(ctx, bucket->dtype, bucket->shard, bucket->shard_count, 0) != DT_OK)
        return ctx->status;
    for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++)
        if (dt__param_init(ctx, ctx->params[i]) != DT_OK) return ctx->status;
    if (bucket->shard_count == bucket->padded && !desc->offloaded)
        dt__bucket_set_data(ctx, bucket, bucket->shard);
    if (!desc->offloaded) return ctx->status;
    dt__bucket_release(ctx, bucket, 1, 1);
    dt_free(ctx, DT_MEM_PARAMS, bucket->shard, bytes);
    bucket->shard = NULL;
    return ctx->status;
}

/* Sets the padded size of a bucket, and which parts of it this rank keeps. */
static dt_status dt__bucket_shard(dt_ctx *ctx, dt_bucket *bucket, const dt_buckets_desc *desc) {
    size_t pad = desc->pad ? desc->pad : 1;
    bucket->padded = (bucket->count + pad - 1) / pad * pad;
    bucket->shard_count = bucket->grad_count = bucket->padded;
    if (desc->shard) desc->shard(bucket, desc->user);
    if (bucket->padded < bucket->count || bucket->shard_count > bucket->padded ||
        bucket->shard_offset > bucket->padded - bucket->shard_count ||
        bucket->grad_count > bucket->padded ||
        bucket->grad_offset > bucket->padded - bucket->grad_count)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_buckets_make: bucket %d of %zu elements, padded to %zu: this rank cannot keep the "
            "values [%zu, %zu) and the gradients [%zu, %zu)",
            bucket->index, bucket->count, bucket->padded, bucket->shard_offset,
            bucket->shard_offset + bucket->shard_count, bucket->grad_offset,
            bucket->grad_offset + bucket->grad_count);
    return DT_OK;
}

dt_status dt_buckets_make(dt_ctx *ctx, dt_buckets_desc desc) {
    size_t bucket_bytes = desc.bucket_bytes ? desc.bucket_bytes : (size_t)25 << 20, open = 0,
           struct_bytes = desc.struct_bytes ? desc.struct_bytes : sizeof(dt_bucket);
    if (!ctx || ctx->status != DT_OK) return dt_error(ctx);
    if (ctx->buckets)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_buckets_make: parameters have their storage already; call "
            "dt_zero_make once and before the first use of a parameter");
    if (struct_bytes < sizeof(dt_bucket))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_buckets_make: struct_bytes %zu; a struct that begins with a dt_bucket has %zu",
            struct_bytes, sizeof(dt_bucket));
    if (ctx->n_params == 0 && ctx->has_stages)
        return DT_OK; /* a pipeline stage may have no parameters */
    if (ctx->n_params == 0)
        return dt_fail(ctx, DT_ERR_ARG, "dt_buckets_make: no parameters were registered");
    for (int i = 0; i < ctx->n_params; i++) {
        int begins = dt__begins_bucket(ctx, i, open, bucket_bytes);
        open = (begins ? 0 : open) + ctx->params[i]->param->count;
        ctx->n_buckets += begins;
    }
    ctx->bucket_struct_bytes = struct_bytes;
    ctx->buckets = (char *)dt__host_zeroed(
        ctx, (size_t)ctx->n_buckets * ctx->bucket_struct_bytes, "dt_buckets_make");
    if (!ctx->buckets) {
        ctx->n_buckets = 0;
        return ctx->status;
    }
    dt__buckets_plan(ctx, bucket_bytes);
    for (int u = 0; u < ctx->n_buckets && ctx->status == DT_OK; u++)
        dt__bucket_shard(ctx, dt_bucket_get(ctx, u), &desc);
    for (int u = 0; u < ctx->n_buckets && ctx->status == DT_OK; u++)
        dt__bucket_alloc(ctx, dt_bucket_get(ctx, u), &desc);
    return ctx->status;
}

int dt_bucket_count(const dt_ctx *ctx) { return ctx ? ctx->n_buckets : 0; }
dt_bucket *dt_bucket_get(const dt_ctx *ctx, int index) {
    if (index < 0 || index >= dt_bucket_count(ctx)) return NULL;
    return (dt_bucket *)(void *)(ctx->buckets + (size_t)index * ctx->bucket_struct_bytes);
}

/* Changes the state of a bucket's gradient; fails if the change is not an arrow of the path. */
static dt_status dt__grad_enter(dt_ctx *ctx, dt_bucket *bucket, dt_grad_state to) {
    enum {
        EMPTY = 1 << DT_GRAD_EMPTY,
        WRITING = 1 << DT_GRAD_WRITING,
        ACCUMULATED = 1 << DT_GRAD_ACCUMULATED,
        READY = 1 << DT_GRAD_READY,
        REDUCING = 1 << DT_GRAD_REDUCING,
        REDUCED = 1 << DT_GRAD_REDUCED
    };
    static const unsigned char from[] = {
        EMPTY | ACCUMULATED | REDUCED | 1 << DT_GRAD_FINAL, /* to DT_GRAD_EMPTY */
        EMPTY | ACCUMULATED,                                /* to DT_GRAD_WRITING */
        WRITING | REDUCING,                                 /* to DT_GRAD_ACCUMULATED */
        WRITING | ACCUMULATED,                              /* to DT_GRAD_READY */
        READY,                                              /* to DT_GRAD_REDUCING */
        ACCUMULATED,                                        /* to DT_GRAD_REDUCED */
        REDUCED,                                            /* to DT_GRAD_FINAL */
    };
    static const char *const names[] = { "empty", "being written", "accumulated", "ready",
        "being reduced", "reduced", "final" };
    if (ctx->status != DT_OK) return ctx->status;
    if (to == DT_GRAD_WRITING && bucket->grad_state >= DT_GRAD_READY)
        return dt_fail(ctx, DT_ERR_ARG,
            "a gradient came after the step's last micro-batch: call dt_zero_step after it, and "
            "dt_micro(ctx, i, n) before each of n micro-batches");
    if (!(from[to] >> bucket->grad_state & 1))
        return dt_fail(ctx, DT_ERR_ARG,
            "the gradient of bucket %d is %s and cannot become %s: call dt_clear_grads and "
            "dt_zero_step only between two backwards",
            bucket->index, names[bucket->grad_state], names[to]);
    bucket->grad_state = to;
    return DT_OK;
}

void dt_clear_grads(dt_ctx *ctx) {
    if (ctx) ctx->steps++;
    for (int u = 0; u < dt_bucket_count(ctx); u++) {
        dt_bucket *bucket = dt_bucket_get(ctx, u);
        bucket->micros = 0;
        dt__grad_enter(ctx, bucket, DT_GRAD_EMPTY);
    }
}

static dt_status dt__grad_sum_alloc(dt_ctx *ctx, dt_bucket *bucket) {
    size_t size = dt_dtype_size(bucket->sum_dtype), bytes = bucket->grad_count * size;
    int published = bucket->grad_count == bucket->padded && bucket->sum_dtype == bucket->grad_dtype;
    int borrows = published && bucket->grad_borrows && ctx->micro_count == 1;
    if (bucket->grad || bucket->grad_offloaded) return ctx->status;
    /* borrowed memory is not zeroed: the only micro-batch writes every element */
    if (borrows && (bucket->grad = dt__unused_take(ctx, bytes))) {
        bucket->grad_borrowed = 1;
        dt__account(ctx, DT_MEM_ACTS, bytes, -1);
        dt__account(ctx, DT_MEM_GRADS, bytes, +1);
    } else if (!(bucket->grad = dt_alloc(ctx, DT_MEM_GRADS, bytes, "gradients")) ||
               dt__fill(ctx, bucket->sum_dtype, bucket->grad, bucket->grad_count, 0) != DT_OK)
        return ctx->status;
    for (int i = 0; i < bucket->n_params && published; i++) {
        dt_tensor *t = ctx->params[bucket->first_param + i];
        t->grad = (char *)bucket->grad + t->param->offset * size;
    }
    return DT_OK;
}

/* Frees the memory of a bucket's gradient, or ends its use of a buffer. */
static void dt__grad_sum_free(dt_ctx *ctx, dt_bucket *bucket) {
    size_t bytes = bucket->grad_count * dt_dtype_size(bucket->sum_dtype);
    if (bucket->grad_borrowed || bucket->grad_offloaded)
        dt__buffer_release(ctx, bucket->grad);
    else
        dt_free(ctx, DT_MEM_GRADS, bucket->grad, bytes);
    if (bucket->grad_borrowed) dt__account(ctx, DT_MEM_GRADS, bytes, -1);
    if (bucket->grad_borrowed) dt__account(ctx, DT_MEM_ACTS, bytes, +1);
    for (int i = 0; i < bucket->n_params; i++) ctx->params[bucket->first_param + i]->grad = NULL;
    bucket->grad = NULL;
    bucket->grad_borrowed = 0;
}

/* Returns memory for a bucket's gradient of this micro-batch in the given type: `grad` itself if it
   is as large, of this type, and holds no sum yet; else a buffer. */
static void *dt__micro_grad_acquire(dt_ctx *ctx, dt_bucket *bucket, dt_dtype dtype) {
    int uses_grad = bucket->grad && bucket->grad_count == bucket->padded && bucket->micros == 0 &&
                    bucket->sum_dtype == dtype;
    return uses_grad ? bucket->grad
                     : dt__buffer_acquire(ctx, DT_MEM_COMM, bucket->padded * dt_dtype_size(dtype));
}

/* Provides memory to which ops write a bucket's gradient of this micro-batch. Each micro-batch's
   gradient is complete before it is added. */
static dt_status dt__grad_begin(dt_ctx *ctx, dt_bucket *bucket) {
    size_t size = dt_dtype_size(bucket->grad_dtype), padding = bucket->padded - bucket->count;
    if (dt__grad_enter(ctx, bucket, DT_GRAD_WRITING) != DT_OK ||
        dt__grad_sum_alloc(ctx, bucket) != DT_OK)
        return ctx->status;
    bucket->micro_grad = dt__micro_grad_acquire(ctx, bucket, bucket->grad_dtype);
    if (!bucket->micro_grad) return ctx->status;
    return dt__fill(
        ctx, bucket->grad_dtype, (char *)bucket->micro_grad + bucket->count * size, padding, 0);
}

static void dt__grad_buffer_release(dt_ctx *ctx, dt_bucket *bucket) {
    if (bucket->micro_grad != bucket->grad) dt__buffer_release(ctx, bucket->micro_grad);
    bucket->micro_grad = NULL;
}

/* Rounds a complete gradient of this micro-batch to the type of the sums. */
static dt_status dt__grad_round(dt_ctx *ctx, dt_bucket *bucket) {
    if (bucket->sum_dtype == bucket->grad_dtype) return DT_OK;
    void *rounded = dt__micro_grad_acquire(ctx, bucket, bucket->sum_dtype);
    dt_cast_args a = { .dtype = bucket->sum_dtype,
        .from = bucket->grad_dtype,
        .out = rounded,
        .in = bucket->micro_grad,
        .count = bucket->padded };
    if (rounded) DT__KERNEL(ctx, "16-bit gradients", cast, &a);
    dt__grad_buffer_release(ctx, bucket);
    bucket->micro_grad = rounded;
    return ctx->status;
}

/* Gradient accumulation: adds this micro-batch's gradient, if it has not been added, to the sum. */
static dt_status dt__grad_add(dt_ctx *ctx, dt_bucket *bucket) {
    size_t skipped = bucket->grad_offset * dt_dtype_size(bucket->sum_dtype);
    bucket->micros += bucket->micro_grad != NULL;
    if (bucket->micro_grad && bucket->micro_grad != bucket->grad)
        dt__accumulate(ctx, bucket->sum_dtype, bucket->grad, (char *)bucket->micro_grad + skipped,
            bucket->grad_count, bucket->micros > 1);
    dt__grad_buffer_release(ctx, bucket);
    return dt__grad_enter(ctx, bucket, DT_GRAD_ACCUMULATED);
}

/* Returns the array to which an op writes a parameter's gradient of this micro-batch. */
static void *dt__param_grad(dt_ctx *ctx, dt_tensor *t, int *accumulate) {
    dt_param_info *p = t->param;
    dt_bucket *bucket = p->bucket;
    if (bucket->grad_state != DT_GRAD_WRITING && dt__grad_begin(ctx, bucket) != DT_OK) return NULL;
    *accumulate = p->grad_started;
    p->grad_started = 1;
    return (char *)bucket->micro_grad + p->offset * dt_dtype_size(bucket->grad_dtype);
}

enum { DT__COMPLETE = -1 };

/* Completes a bucket's gradient of this micro-batch, after the last op that writes to it: zeroes
   the gradients that no op wrote, rounds the gradient to the type of the sums, adds it to the sum
   unless a listener reduces it first, and calls the listeners. */
static void dt__grad_complete(dt_ctx *ctx, dt_bucket *bucket) {
    bucket->pending_params = DT__COMPLETE;
    if (ctx->status != DT_OK ||
        (bucket->grad_state != DT_GRAD_WRITING && dt__grad_begin(ctx, bucket) != DT_OK))
        return;
    for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++) {
        dt_param_info *p = ctx->params[i]->param;
        void *g = (char *)bucket->micro_grad + p->offset * dt_dtype_size(bucket->grad_dtype);
        if (!p->grad_started)
            dt__fill(ctx, bucket->grad_dtype, g, p->count, 0);
        else
            dt__zero_padding(ctx, p, bucket->grad_dtype, g);
        p->grad_started = 0;
    }
    if (dt__grad_round(ctx, bucket) != DT_OK ||
        (bucket->reduce_each_micro ? dt__grad_enter(ctx, bucket, DT_GRAD_READY)
                                   : dt__grad_add(ctx, bucket)))
        return; /* after a failure no listener may reduce an incomplete gradient */
    for (dt_listener *l = ctx->listeners; l; l = l->next)
        if (l->grad_ready) l->grad_ready(ctx, bucket, ctx->micro == ctx->micro_count - 1, l->user);
}

/* Frees a bucket's gradient and its sharding: a later backward without ZeRO makes the whole
   gradient. */
static void dt__grad_free(dt_ctx *ctx, dt_bucket *bucket) {
    dt__grad_buffer_release(ctx, bucket);
    dt__grad_sum_free(ctx, bucket);
    bucket->grad_offset = 0;
    bucket->grad_count = bucket->padded;
    bucket->grad_offloaded = bucket->grad_borrows = bucket->reduce_each_micro = bucket->micros = 0;
    bucket->sum_dtype = bucket->grad_dtype;
    bucket->grad_state = DT_GRAD_EMPTY;
}

static void dt__params_free(dt_ctx *ctx) {
    for (int u = 0; u < ctx->n_buckets; u++) {
        dt_bucket *bucket = dt_bucket_get(ctx, u);
        dt_free(
            ctx, DT_MEM_PARAMS, bucket->shard, bucket->shard_count * dt_dtype_size(bucket->dtype));
        dt__grad_free(ctx, bucket);
    }
    dt_free(ctx, DT_MEM_HOST, ctx->buckets, (size_t)ctx->n_buckets * ctx->bucket_struct_bytes);
    for (int i = 0; i < ctx->n_params; i++)
        dt_free(ctx, DT_MEM_HOST, ctx->params[i], dt__param_bytes(ctx->params[i]->name));
    dt_free(ctx, DT_MEM_HOST, ctx->params, (size_t)ctx->param_capacity * sizeof *ctx->params);
    dt_free(ctx, DT_MEM_HOST, ctx->scope_prefix, ctx->scope_bytes);
}

// ==== 15. Arenas and buffers ====================================================================

/* An arena is a bump allocator: allocation advances an offset, and a reset of the offset frees all
   tensors at once. An arena grows by chunks. After a reset, the arena replaces several chunks by
   one chunk of the total size.

       | tensor | tensor | tensor |   free   |      alloc: used += bytes      reset: used = 0

   A buffer holds the data of one tensor that is dropped before its block's arena is reset, a
   bucket's gradient of one micro-batch, a bucket's gathered values, or the chunk of a block. All
   buffers come from one pool.

   Lending. In the backward a linear op uses its pre-activation for the last time, but the block's
   chunk is free only at the reset. Until then, and until the first block of the next step's
   forward, gradients of parameters of layers whose backward comes later may lie there; likewise
   where a gated unit's gradient has overwritten its input. Only dt_zero at stages 0 and 1 with one
   micro-batch a step asks for it.

       chunk of block l:  | x | pre-activation of l:  free ... | dw of block l - 1 | y |

   Steady memory: a step that makes the requests of the step before, in the same order, gets the
   same buffers and allocates nothing. So the memory of the second step is that of every later step,
   and a dry run of two steps knows it. No choice may depend on what earlier steps have left:

     - a request of a fixed size gets a free buffer of exactly this size. There are then as many
       buffers of a size as were in use at the same time. A buffer that two steps have not used is
       freed when another size is needed
     - a tensor may have another size in each step, for example the rows that experts receive. A
       tensor gets the first free buffer of any size, in the order in which the buffers were made;
       a buffer that is too small is replaced. Tensors of DT__SPLIT_BACKWARD have fixed sizes
     - a pool of arenas hands out the first free arena, in the order in which they were made */

#if defined(__SANITIZE_ADDRESS__)
#define DT__ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DT__ASAN 1
#endif
#endif
#ifndef DT__ASAN
/* 1 with AddressSanitizer: every tensor is then a separate allocation, so the sanitizer sees reads
   past a tensor's end and reads after a reset. */
#define DT__ASAN 0
#endif

enum { DT__MIN_CHUNK_ACTS = 4 << 10, DT__MIN_CHUNK_META = 8 << 10, DT__MAX_GROWTH = 64 << 10 };

static size_t dt__arena_used(const dt__arena *a) {
    size_t total = 0;
    for (const dt__chunk *c = a->chunks; c; c = c->next) total += c->used;
    return total;
}

static void *dt__arena_alloc(dt_ctx *ctx, dt__arena *a, size_t bytes) {
    if (bytes == 0) bytes = 1;
    /* with AddressSanitizer keep the exact size, so that the sanitizer sees a read of the first
       byte past the end */
    if (!DT__ASAN) bytes = (bytes + 63) / 64 * 64;
    dt__chunk *c = a->chunks;
    if (!c || c->size - c->used < bytes) {
        /* an arena that is too small doubles, up to DT__MAX_GROWTH */
        size_t used = dt__arena_used(a),
               min = used < DT__MAX_GROWTH ? used : (size_t)DT__MAX_GROWTH;
        if (used == 0) min = a->min_chunk;
        size_t size = DT__ASAN || bytes > min ? bytes : min;
        const char *what = a->what ? a->what : "an arena";
        int empty = c && !c->data; /* the struct of a chunk that went back to the pool */
        if (!empty) c = (dt__chunk *)dt__host_zeroed(ctx, sizeof *c, what);
        if (!c) return NULL;
        c->data = (char *)(a->borrows ? dt__buffer_acquire(ctx, a->mem, size)
                                      : dt_alloc(ctx, a->mem, size, what));
        if (!c->data) {
            if (!empty) dt_free(ctx, DT_MEM_HOST, c, sizeof *c);
            return NULL;
        }
        dt_log(ctx, DT_LOG_DETAIL, "an arena grows by %zu bytes", size);
        c->size = size;
        if (!empty) c->next = a->chunks;
        a->chunks = c;
    }
    void *p = c->data + c->used;
    c->used += bytes;
    return p;
}

static void dt__arena_free(dt_ctx *ctx, dt__arena *a) {
    while (a->chunks) {
        dt__chunk *c = a->chunks;
        a->chunks = c->next;
        if (a->borrows)
            dt__buffer_free(ctx, c->data);
        else
            dt_free(ctx, a->mem, c->data, c->size);
        dt_free(ctx, DT_MEM_HOST, c, sizeof *c);
    }
}

/* Empties the arena. If the arena has several chunks, frees them; the next allocation makes one
   chunk of the total size. */
static void dt__arena_reset(dt_ctx *ctx, dt__arena *a) {
    size_t total = dt__arena_used(a);
    dt__chunk *c = a->chunks;
    if (!c) return;
    if (c->next || DT__ASAN) {
        dt__arena_free(ctx, a);
        if (total > a->min_chunk) a->min_chunk = total;
        return;
    }
    c->used = 0;
    if (!a->borrows || !c->data) return;
    if (c->size == a->min_chunk)
        dt__buffer_release(ctx, c->data);
    else
        dt__buffer_free(ctx, c->data); /* no later chunk has this size */
    c->data = NULL;
    c->size = 0;
}

/* Takes the first free arena of a pool, or makes one if none is free. */
static dt__arena *dt__arena_acquire(dt_ctx *ctx, dt__arena **pool) {
    dt__arena *a = *pool;
    if (a) {
        *pool = a->next;
        return a;
    }
    a = (dt__arena *)dt__host_zeroed(ctx, sizeof *a, "an arena");
    if (!a) return NULL;
    a->mem = DT_MEM_ACTS;
    a->min_chunk = DT__MIN_CHUNK_ACTS;
    a->number = ctx->n_arenas++;
    return a;
}

/* Empties arena *a, returns it to its place in a pool, and sets *a to NULL. *a may be NULL. */
static void dt__arena_release(dt_ctx *ctx, dt__arena **pool, dt__arena **a) {
    if (!*a) return;
    dt__arena_reset(ctx, *a);
    while (*pool && (*pool)->number < (*a)->number) pool = &(*pool)->next;
    (*a)->next = *pool;
    *pool = *a;
    *a = NULL;
}

static void dt__arenas_free(dt_ctx *ctx, dt__arena **pool) {
    while (*pool) {
        dt__arena *a = *pool;
        *pool = a->next;
        dt__arena_free(ctx, a);
        dt_free(ctx, DT_MEM_HOST, a, sizeof *a);
    }
}

/* Frees the buffers of exact sizes that no request has taken in the last two steps: the program's
   sizes have changed. Steps that are alike never lose a buffer. */
static void dt__buffers_evict(dt_ctx *ctx, dt_mem mem) {
    for (int i = 0; i < ctx->n_buffers; i++) {
        dt__buffer *s = &ctx->buffers[i];
        if (!s->data || s->busy || s->any_size || s->mem != mem || s->last_step + 2 >= ctx->steps)
            continue;
        dt_free(ctx, mem, s->data, s->bytes);
        s->data = NULL;
    }
}

/* Returns an entry of the table of buffers that has no memory; NULL after a failure. */
static dt__buffer *dt__buffer_entry(dt_ctx *ctx) {
    dt__buffer *grown = (dt__buffer *)dt__grow(ctx, ctx->buffers, ctx->n_buffers,
        &ctx->buffer_capacity, sizeof *grown, "table of buffers");
    if (!grown) return NULL;
    ctx->buffers = grown;
    memset(&grown[ctx->n_buffers], 0, sizeof *grown);
    return &grown[ctx->n_buffers++];
}

/* Returns a buffer of class `mem` with at least `bytes` bytes: of exactly this size, or, if
   any_size is 1, the first free buffer of any size. Returns NULL after a failure. */
static void *dt__buffer_acquire_at(dt_ctx *ctx, dt_mem mem, size_t bytes, int any_size) {
    dt__buffer *found = NULL, *hole = NULL;
    if (bytes == 0) bytes = 1;
    for (int i = 0; i < ctx->n_buffers && !found; i++) {
        dt__buffer *s = &ctx->buffers[i];
        if (!s->data && !hole) hole = s;
        if (!s->data || s->busy || s->mem != mem || s->any_size != any_size) continue;
        if (any_size || s->bytes == bytes) found = s;
    }
    if (found && found->bytes < bytes) {
        dt_free(ctx, mem, found->data, found->bytes);
        found->data = NULL;
    }
    if (!found && !any_size) dt__buffers_evict(ctx, mem);
    /* a new buffer for tensors comes last, so that the order of those before it stays; with
       AddressSanitizer every buffer is new */
    if (!found) found = hole && (DT__ASAN || !any_size) ? hole : dt__buffer_entry(ctx);
    if (!found) return NULL;
    if (!found->data) {
        found->data = dt_alloc(ctx, mem, bytes, "a buffer");
        if (!found->data) return NULL;
        found->bytes = bytes;
        found->mem = mem;
        found->any_size = any_size;
    }
    found->busy = 1;
    found->last_step = ctx->steps;
    return found->data;
}

static void *dt__buffer_acquire(dt_ctx *ctx, dt_mem mem, size_t bytes) {
    return dt__buffer_acquire_at(ctx, mem, bytes, 0);
}

/* Returns the buffer in which the data lie, or NULL. */
static dt__buffer *dt__buffer_of(dt_ctx *ctx, const void *data) {
    for (dt__buffer *s = ctx->buffers; data && s < ctx->buffers + ctx->n_buffers; s++)
        if (s->data && (uintptr_t)data - (uintptr_t)s->data < s->bytes) return s;
    return NULL;
}

/* Ends one use of the buffer that has the address `data`, which may be NULL or in no buffer. When
   the last use ends, the buffer returns to the pool, or is freed if free_at_release is set. */
static void dt__buffer_release(dt_ctx *ctx, void *data) {
    dt__buffer *s = dt__buffer_of(ctx, data);
    if (!s) return;
    s->last_step = ctx->steps;
    if (s->busy > 0 && --s->busy > 0) return;
    if (!s->free_at_release && !DT__ASAN)
        return; /* the sanitizer sees a later use of freed memory */
    dt_free(ctx, s->mem, s->data, s->bytes);
    s->data = NULL;
    s->free_at_release = 0;
}

/* Frees a buffer after its last use. data may be NULL. */
static void dt__buffer_free(dt_ctx *ctx, void *data) {
    dt__buffer *s = dt__buffer_of(ctx, data);
    if (s) s->free_at_release = 1;
    dt__buffer_release(ctx, data);
}

/* Lends `bytes` bytes of the first unused region that is larger. Returns NULL if none is. The
   borrower ends its use of the arena's buffer with dt__buffer_release. */
static void *dt__unused_take(dt_ctx *ctx, size_t bytes) {
    for (dt__buffer *s = ctx->buffers; s < ctx->buffers + ctx->n_buffers; s++) {
        if (s->unused_bytes <= bytes) continue;
        s->unused_bytes = (s->unused_bytes - bytes) / 64 * 64; /* from the end, aligned */
        s->busy++;
        return s->unused + s->unused_bytes;
    }
    return NULL;
}

static void dt__buffers_free(dt_ctx *ctx) {
    for (int i = 0; i < ctx->n_buffers; i++)
        dt_free(ctx, ctx->buffers[i].mem, ctx->buffers[i].data, ctx->buffers[i].bytes);
    dt_free(ctx, DT_MEM_HOST, ctx->buffers, (size_t)ctx->buffer_capacity * sizeof *ctx->buffers);
}

// ==== 16. Tape: code ============================================================================

/* Each tape is a tree of blocks, whose root is the micro-batch. A node is an op or a child block:

       root:  [embedding] [block 1] [block 2] [norm] [loss]          newest <- prev <- prev ...
                              |         `-- [linear] [gelu] [linear]
                              `------------ [linear] [gelu] [linear] */

enum { DT__FORWARD_ONLY = 0, DT__INPUT_HALF_DONE, DT__BACKWARD_DONE };

/* A block: its recorded ops, newest first, and the memory of the ops' outputs. Block 0, the root of
   a tape, is the micro-batch; dt_block makes the other blocks. A reset returns the blocks with
   their structs to the tape's pool. The memory of a block's data is one buffer, of the size that
   the block has needed before (dt__block_bytes), so all tapes of a pipeline share it.

   A recomputed block, and every block inside it, borrows an arena for its data from
   ctx->recompute_pool. A plain block keeps its arena, so the two kinds of blocks have separate
   pools. The structs of tensors and nodes (meta) stay until the second reset, so that dt can report
   a use of freed data, also after the reset that freed them: two arenas take turns. The data of
   `out` are in the parent's arena, but the gradient of `out` is in the block's: in the parent's,
   the gradients of all outputs would be alive at once. */
struct dt_block_state {
    dt_ctx *ctx;
    dt_block_state *parent;
    dt_block_state *children, *sibling; /* lists, newest child first */
    int index;
    dt_node *newest;
    /* arena of the data of the block's tensors: &own_acts, or an arena borrowed from
       recompute_pool; NULL after these data were freed */
    dt__arena *acts;
    dt__arena own_acts; /* its chunks come from the pool of buffers */
    dt__arena meta;     /* structs of tensors and nodes, in host memory */
    dt__arena old_meta; /* those from before the last reset, which are dead */
    /* arena of the gradients of the block's tensors, from their first use to the end of the block's
       backward; else NULL */
    dt__arena *grads;
    /* The fields from pending_uses to stage are used in the root only. pending_uses: (n_params) for
       each parameter, number of its recorded uses whose backward has not run yet */
    int *pending_uses;
    int backward_done; /* DT__FORWARD_ONLY .. DT__BACKWARD_DONE */
    int split;         /* 1: the backward of this micro-batch will run in two halves */
    int n_blocks;      /* number of dt_block calls of this micro-batch */
    /* free blocks with their arenas: [0] plain, [1] recomputed */
    dt_block_state *pool[2];
    int stage;
    /* fingerprint of the recorded ops, including those of blocks inside; 0 if there are none */
    uint64_t fingerprint;
    dt_block_fn fn; /* the function to run again if the block is recomputed, else NULL */
    void *user;     /* its argument */
    int no_grad;    /* 1: the block began under dt_no_grad */
    /* y: the tensor that fn returned. out: the copy of y in the parent's memory; NULL if y was made
       outside the block */
    dt_tensor *y, *out;
    dt_block_state *rerun; /* the block of the second run */
    int is_rerun;          /* 1: this block is a second run */
    dt_tensor *tensors;    /* list of the tensors whose data the block owns, newest first */
    /* under dt_no_grad: x and output of the last block inside this block */
    dt_tensor *last_x, *last_y;
};

static dt_block_state *dt__block_acquire(dt_ctx *ctx, int recomputed) {
    dt_block_state *b = ctx->root ? ctx->root->pool[recomputed] : NULL;
    if (b) {
        ctx->root->pool[recomputed] = b->sibling;
    } else {
        b = (dt_block_state *)dt__host_zeroed(ctx, sizeof *b, "a block");
        if (!b) return NULL;
        b->ctx = ctx;
        b->own_acts.mem = DT_MEM_ACTS;
        b->own_acts.borrows = 1;
        b->meta.mem = b->old_meta.mem = DT_MEM_HOST;
        b->meta.min_chunk = b->old_meta.min_chunk = DT__MIN_CHUNK_META;
    }
    b->parent = b->children = b->sibling = b->rerun = NULL;
    b->acts = &b->own_acts;
    b->index = b->is_rerun = 0;
    b->fn = NULL;
    b->out = b->tensors = b->last_x = b->last_y = NULL;
    return b;
}

/* Returns the size of the arena of block `index` of a stage, which is 0 if no micro-batch has run
   this block before; NULL after a failure. */
static size_t *dt__block_bytes(dt_ctx *ctx, int stage, int index) {
    while (stage >= ctx->stage_capacity) {
        dt__stage_sizes *grown = (dt__stage_sizes *)dt__grow(ctx, ctx->stage_sizes,
            ctx->stage_capacity, &ctx->stage_capacity, sizeof *grown, "sizes of stages");
        if (!grown) return NULL;
        ctx->stage_sizes = grown;
    }
    dt__stage_sizes *sizes = &ctx->stage_sizes[stage];
    while (index >= sizes->capacity) {
        size_t *grown = (size_t *)dt__grow(
            ctx, sizes->bytes, sizes->capacity, &sizes->capacity, sizeof *grown, "sizes of blocks");
        if (!grown) return NULL;
        sizes->bytes = grown;
    }
    return &sizes->bytes[index];
}

/* Before a block's first tensor: its arena gets one chunk of the size that the block needed in
   earlier micro-batches. */
static dt_status dt__block_size_begin(dt_ctx *ctx, dt_block_state *b) {
    const size_t *bytes = dt__block_bytes(ctx, ctx->root->stage, b->index);
    if (bytes) b->own_acts.min_chunk = *bytes ? *bytes : (size_t)DT__MIN_CHUNK_ACTS;
    return ctx->status;
}

/* After a block's last tensor: records the size that the block needed. */
static void dt__block_size_end(dt_ctx *ctx, dt_block_state *b) {
    size_t *bytes = dt__block_bytes(ctx, ctx->root->stage, b->index),
           used = dt__arena_used(&b->own_acts);
    if (!bytes) return;
    if (used > *bytes) *bytes = used;
    if (used > 0) b->own_acts.min_chunk = *bytes;
}

/* Who owns a tensor's data, and when the data are dropped. Parameters follow their bucket and views
   their base; any other tensor's `storage` is:

       storage              memory          dropped when                      made again by
       DT__IN_ARENA         block's arena   a recomputed block ends; reset    the block's second run
       DT__TRANSIENT        its own, COMM   its block ends; again after the   node->recompute, if a
                                            backward of its op                backward reads them
       DT__NO_GRAD          its own, ACTS   its block ends or the next        nothing
                                            block begins; see dt_no_grad
       DT__KEPT             its own, ACTS   reset                             nothing
       DT__SPLIT_BACKWARD   its own, ACTS   after the input half, unless      the block's second run
                                            the weight half reads them; reset
       DT__RECOMPUTED       its own, ACTS   its block ends, unless it is      node->recompute, if
                                            the block's output; again after   anything reads them
                                            the backward of its op
       DT__OVERWRITTEN      that of the     after dt_last_use the op's result  nothing
                            op's result     overwrote them; or the gradient
                            or gradient     did in the backward (dt__grad_in_place)
       DT__DEAD             none            by the last reset                 nothing

   DT__RECOMPUTED is for the outputs of ops in a block that cost one pass over memory: norms,
   activation functions, gated units. A layer then keeps what its matrix products read only for the
   time of two products. A block's second run keeps these data, because its backward follows at
   once. Outside of blocks they are not used.

   In the root, transient data stay until the backward of their op or the reset, because no call
   marks the end of the root's forward. A tensor of DT__NO_GRAD that a recorded op has read is not
   dropped before the reset, because the op's backward may read it. `data` is NULL from the drop
   on. DT__SPLIT_BACKWARD keeps the memory of zero bubble schedules low, in which several
   micro-batches wait for their weight half; tensors below DT__MIN_BUFFER bytes, and those whose
   size depends on the data, stay in the arena. */
enum {
    DT__IN_ARENA = 0,
    DT__TRANSIENT,
    DT__NO_GRAD,
    DT__KEPT,
    DT__SPLIT_BACKWARD,
    DT__RECOMPUTED,
    DT__OVERWRITTEN,
    DT__DEAD
};
enum { DT__NO_BOUND = -1 };        /* value of max_rows: the size has no bound */
enum { DT__MIN_BUFFER = 1 << 10 }; /* bytes; smaller tensors stay in the arena */

/* Returns the bytes of memory for the data, or the gradient, of t for max_rows rows. */
static size_t dt__reserved_bytes(const dt_tensor *t) {
    dt_shape shape = t->shape;
    if (t->max_rows > shape.d[0]) shape.d[0] = t->max_rows;
    return (size_t)dt_count(shape) * dt_dtype_size(t->dtype);
}

/* Returns 1 if the data or the gradient of t may have a buffer of their own, which has a fixed
   size. */
static int dt__has_buffer(const dt_tensor *t) {
    return t->max_rows != DT__NO_BOUND && dt__reserved_bytes(t) >= DT__MIN_BUFFER;
}

/* Returns max_rows of a tensor that keeps dimension 0 of x, which may be NULL. */
static int64_t dt__max_rows_kept(const dt_tensor *x, dt_shape shape) {
    return x && shape.nd > 0 && x->shape.nd > 0 && shape.d[0] == x->shape.d[0] ? x->max_rows : 0;
}

/* Gives t memory for its data. Returns the data; NULL after a failure. */
static void *dt__data_alloc(dt_tensor *t) {
    dt_ctx *ctx = t->ctx;
    dt_mem mem = t->storage == DT__TRANSIENT ? DT_MEM_COMM : DT_MEM_ACTS;
    size_t bytes = DT__ASAN ? dt__bytes(t) : (dt__reserved_bytes(t) + 63) / 64 * 64;
    int fixed = t->storage == DT__SPLIT_BACKWARD || t->storage == DT__RECOMPUTED;
    t->data = t->storage == DT__IN_ARENA ? dt__arena_alloc(ctx, t->block->acts, bytes)
                                         : dt__buffer_acquire_at(ctx, mem, bytes, !fixed);
    return t->data;
}

/* Data or a gradient that moves between ranks in pieces of rows, while ops compute with the other
   pieces. dt_parallel.h makes the flows; dt_tensor.h knows only in which order the pieces come:

       incoming    an op waits for piece 0, computes with its rows, waits for piece 1, ...
       outgoing    an op computes the rows of piece 0, lets them leave, computes piece 1, ...

   The array is (sequences, shards, rows, width). A piece is a range of the sequences * rows rows
   of one shard, and these rows of all shards travel together. Without sequence parallelism there
   is one sequence and one shard, so a piece is one range of rows. */
typedef struct dt__flow dt__flow;
struct dt__flow {
    int incoming; /* 1: the pieces arrive; 0: they leave */
    int pieces;
    int done; /* pieces that have arrived, or that have left this rank */
    int64_t sequences, shards, rows;
    /* waits for piece `done`, or lets piece `done` leave, and counts it */
    dt_status (*next)(dt__flow *flow);
    struct dt__flow_product *products; /* incoming: products of the arriving rows, oldest first */
    dt__flow *next_arriving;           /* in the list ctx->arriving */
    /* incoming: what this rank sends to the others; the buffer to release at the end */
    const void *source;
    void *sent_buffer;
    dt__flow *next_gather; /* in the list ctx->gathers */
};

/* Returns the first row of piece p within a shard. If there are enough sequences, a piece consists
   of whole sequences, so its rows are one range of the array. */
static int64_t dt__flow_bound(const dt__flow *f, int p) {
    return f->sequences >= f->pieces ? f->sequences * p / f->pieces * f->rows
                                     : f->sequences * f->rows * p / f->pieces;
}

/* Finds one range of rows of the array that belongs to piece p: the range that starts in shard
   `shard` at row *at of the shard. Stores the range and moves *at behind it. */
static void dt__flow_range(
    const dt__flow *f, int p, int64_t shard, int64_t *at, int64_t *row, int64_t *count) {
    int64_t end = dt__flow_bound(f, p + 1), sequence = *at / f->rows, in = *at % f->rows;
    *count = f->rows - in < end - *at ? f->rows - in : end - *at;
    *row = (sequence * f->shards + shard) * f->rows + in;
    *at += *count;
}

static void dt__flow_run_products(dt_ctx *ctx, const dt__flow *f, int p);

/* Releases a buffer of a tensor. If an incoming flow still sends from the buffer, the end of the
   flow releases it. p may be NULL. */
static void dt__buffer_drop(dt_ctx *ctx, void *p) {
    const dt__buffer *b = dt__buffer_of(ctx, p);
    for (dt__flow *f = b ? ctx->gathers : NULL; f; f = f->next_gather)
        if ((uintptr_t)f->source - (uintptr_t)b->data < b->bytes) {
            f->sent_buffer = p;
            return;
        }
    dt__buffer_release(ctx, p);
}

/* Waits for the next piece of incoming data, and multiplies its rows. */
static void dt__flow_arrive_next(dt_ctx *ctx, dt__flow *f) {
    dt__flow **at = &ctx->gathers;
    f->next(f);
    while (*at && *at != f) at = &(*at)->next_gather;
    if (*at && f->done == f->pieces) *at = f->next_gather;
    if (f->done == f->pieces) dt__buffer_drop(ctx, f->sent_buffer);
    dt__flow_run_products(ctx, f, f->done - 1);
}

/* Waits for all pieces of incoming data. `f` may be NULL. */
static dt_status dt__flow_arrive(dt_ctx *ctx, dt__flow *f) {
    while (f && f->incoming && f->done < f->pieces) dt__flow_arrive_next(ctx, f);
    return ctx->status;
}

/* Completes all data that arrive in pieces, and the products of their rows: before an op of the
   user may read them, a block's parameters may be released, or other blocks run. */
static void dt__flows_arrive(dt_ctx *ctx) {
    for (dt__flow *f = ctx->arriving; f; f = f->next_arriving) dt__flow_arrive(ctx, f);
    ctx->arriving = NULL;
}

/* Lends p, the memory of t's data in its block's arena, to gradients of parameters. A buffer
   remembers only its largest unused region. The arena of a recomputed block, which the next block
   needs, does not come from the pool of buffers and lends nothing; nor does a tensor whose size
   depends on the data, because no choice may depend on it. */
static void dt__data_lend(const dt_tensor *t, void *p) {
    dt__buffer *s = dt__buffer_of(t->ctx, p);
    size_t bytes = dt__reserved_bytes(t);
    if (DT__ASAN || t->block == t->ctx->root || !s || bytes <= s->unused_bytes ||
        !dt__has_buffer(t))
        return;
    s->unused = (char *)p;
    s->unused_bytes = bytes;
}

/* Drops the data of t. The memory of DT__IN_ARENA is freed with the arena. */
static void dt__data_drop(dt_tensor *t) {
    dt__flow_arrive(t->ctx, t->flow);
    if (t->data && t->storage != DT__IN_ARENA && !t->shares) dt__buffer_drop(t->ctx, t->data);
    t->data = NULL;
}

static void dt__data_drop_if_unread(dt_tensor *t) {
    if (t->storage == DT__NO_GRAD && !t->readers) dt__data_drop(t);
}

/* Who owns a tensor's gradient: its `grad_storage` is

       grad_storage         memory                        dropped after the
       DT__GRAD_IN_ARENA    arena of its block's grads    backward of the block
       DT__GRAD_IN_PLACE    that of the data              backward of the tensor's op
       DT__GRAD_OWN         its own, ACTS                 backward of the tensor's op
       DT__GRAD_TRANSIENT   its own, COMM                 backward of the tensor's op
       DT__GRAD_KEPT        its own, ACTS                 reset; see dt_require_grad

   DT__GRAD_OWN is the rule: the backward goes from new to old, so after the backward of its op
   nothing reads a gradient, and the next gradient of this size takes the buffer. A block's backward
   then holds the gradients of two or three neighbouring ops, not those of all its ops. Only small
   gradients, and those whose size depends on the data, are in the arena (dt__has_buffer). */
enum { DT__GRAD_IN_ARENA = 0, DT__GRAD_IN_PLACE, DT__GRAD_OWN, DT__GRAD_TRANSIENT, DT__GRAD_KEPT };

/* Drops the gradient of t: releases its buffer, or lends the memory if the gradient lies in that of
   the data. Before the reset, leaves one of DT__GRAD_KEPT. */
static void dt__grad_drop(dt_tensor *t, int at_reset) {
    if (t->grad_storage == DT__GRAD_IN_ARENA) return;
    if (t->grad_storage == DT__GRAD_KEPT && !at_reset) return;
    dt__flow_arrive(t->ctx, t->grad_flow);
    if (t->grad_storage == DT__GRAD_IN_PLACE)
        dt__data_lend(t, t->grad);
    else
        dt__buffer_drop(t->ctx, t->grad);
    t->grad = NULL;
}

/* Marks a tensor whose data a reset has freed. A later use fails (dt__fail_if_dropped). */
static void dt__tensor_bury(dt_tensor *t) {
    dt__flow_arrive(t->ctx, t->flow);
    dt__flow_arrive(t->ctx, t->grad_flow);
    t->flow = t->grad_flow = NULL;
    t->data = t->grad = NULL;
    t->base = NULL;
    t->producer = NULL;
    t->storage = DT__DEAD;
}

/* Drops the data of all tensors of a block and of the blocks inside it, and releases the borrowed
   arenas. Children come first, newest first, so that the next block with the same structure gets
   the same arenas for the same children. */
static void dt__block_drop(dt_ctx *ctx, dt_block_state *b) {
    for (dt_block_state *child = b->children; child; child = child->sibling)
        dt__block_drop(ctx, child);
    for (dt_tensor *t = b->tensors; t; t = t->next) {
        if (t->base) continue;
        dt__data_drop(t);
        dt__grad_drop(t, 0);
    }
    if (b->acts != &b->own_acts) dt__arena_release(ctx, &ctx->recompute_pool, &b->acts);
}

/* Returns the root block of the selected tape. Selects tape 0 if none was selected. */
static dt_block_state *dt__root(dt_ctx *ctx) {
    if (!ctx->root) dt_tape(ctx, 0, 0);
    return ctx->root;
}

/* Allocates storage for the parameters if dt_zero_make did not. */
static dt_status dt__ensure_storage(dt_ctx *ctx) {
    dt_buckets_desc defaults = { 0 };
    return ctx->buckets ? DT_OK : dt_buckets_make(ctx, defaults);
}

/* Makes the values of x readable. Waits for a tensor that is still arriving. If x is a parameter,
   allocates storage and gathers a sharded bucket for `op`; NULL: outside of ops. If x is a view of
   a parameter, updates its data pointer too. */
static dt_status dt__ensure_values(const char *op, dt_tensor *x) {
    dt_tensor *t = dt__owner(x);
    dt_ctx *ctx = t->ctx;
    dt_site outer = ctx->site, in_op = { op, 0 };
    if (!t->param) {
        x->data = t->data;
        return dt__flow_arrive(ctx, t->flow);
    }
    if (dt__ensure_storage(ctx) != DT_OK) return ctx->status;
    ctx->outside_op = !op;
    if (!outer.file) ctx->site = in_op;
    if (!t->data)
        for (dt_listener *l = ctx->listeners; l; l = l->next)
            if (l->gather) l->gather(ctx, t->param->bucket, l->user);
    ctx->outside_op = 0;
    ctx->site = outer;
    if (!t->data)
        return dt_fail(ctx, DT_ERR_ARG,
            "%s: its values are sharded over ranks, and nothing gathers them: dt_zero_free has run",
            t->name);
    x->data = t->data;
    return ctx->status;
}

/* Copies a tensor outside of any op: writes the tensor if `from` is not NULL, else reads it to
   `host`. If this access gathered a sharded parameter, the gathered values are released at once. */
static dt_status dt__read_or_write(dt_tensor *t, void *host, const void *from) {
    dt_ctx *ctx = t->ctx;
    dt_param_info *param = dt__owner(t)->param; /* t may be a view */
    int gathered = param && !dt__owner(t)->data;
    if (dt__ensure_values(NULL, t) != DT_OK) return ctx->status;
    dt__move(ctx, from ? t->data : host, from ? from : t->data, dt__bytes(t));
    if (ctx->status == DT_OK) dt__sync(ctx);
    if (param) dt__bucket_release(ctx, param->bucket, from != NULL, gathered);
    return ctx->status;
}

/* Returns a block and all blocks inside it to the pools. Children are released newest first, so
   that the first child is on top of the pool at the end, and the next micro-batch gets the blocks
   in the same order. */
static void dt__block_release(dt_ctx *ctx, dt_block_state *b) {
    while (b->children) {
        dt_block_state *child = b->children;
        b->children = child->sibling;
        dt__block_release(ctx, child);
    }
    for (dt_tensor *t = b->tensors; t; t = t->next) {
        if (!t->base) dt__grad_drop(t, 1);
        dt__tensor_bury(t);
    }
    dt__arena_release(ctx, &ctx->grad_pool, &b->grads);
    int recomputed = b->acts != &b->own_acts;
    dt__block_size_end(ctx, b);
    dt__arena_reset(ctx, &b->own_acts);
    int several = b->old_meta.chunks && b->old_meta.chunks->next;
    dt__arena_reset(ctx, &b->old_meta);
    /* one chunk now, so that only the second step allocates and no later one */
    if (several && !DT__ASAN && dt__arena_alloc(ctx, &b->old_meta, b->old_meta.min_chunk))
        b->old_meta.chunks->used = 0;
    dt__arena dead = b->meta;
    size_t used = dt__arena_used(&dead);
    b->meta = b->old_meta;
    b->old_meta = dead;
    if (used > b->meta.min_chunk) b->meta.min_chunk = used; /* the next step needs as much */
    b->newest = NULL;
    b->tensors = b->last_x = b->last_y = NULL;
    b->sibling = ctx->root->pool[recomputed];
    ctx->root->pool[recomputed] = b;
}

static void dt__block_free(dt_ctx *ctx, dt_block_state *b) {
    dt__arena_free(ctx, &b->own_acts);
    dt__arena_free(ctx, &b->meta);
    dt__arena_free(ctx, &b->old_meta);
    dt_free(ctx, DT_MEM_HOST, b, sizeof *b);
}

/* Calls the listeners' reset: they cancel prefetches and drop pointers to freed tensors. */
static void dt__notify_reset(dt_ctx *ctx) {
    for (dt_listener *l = ctx->listeners; l; l = l->next)
        if (l->reset) l->reset(ctx, l->user);
}

void dt_reset(dt_ctx *ctx) {
    if (!ctx || !ctx->root) return;
    dt__flows_arrive(ctx);
    if (ctx->current != ctx->root) {
        dt_fail(ctx, DT_ERR_ARG, "dt_reset: inside a dt_block, whose tensors are in use");
        return;
    }
    dt_block_state *root = ctx->root;
    /* all data first: the struct of a block's output may lie in the meta arena of a child */
    dt__block_drop(ctx, root);
    dt__block_release(ctx, root);
    for (int i = 0; i < ctx->n_buffers; i++) ctx->buffers[i].unused_bytes = 0;
    root->pool[0] = root->sibling; /* the root stays in use, so take it from the pool */
    root->sibling = NULL;
    root->backward_done = root->n_blocks = root->split = 0;
    if (root->pending_uses)
        memset(root->pending_uses, 0, (size_t)ctx->n_params * sizeof *root->pending_uses);
    ctx->current = root;
    ctx->entered_block = NULL;
    ctx->inf_op = NULL;
    ctx->fingerprint = 0;
    ctx->resets++;
    dt__notify_reset(ctx);
}

void dt_tape(dt_ctx *ctx, int tape, int stage) {
    if (!ctx || ctx->status != DT_OK) return;
    if (tape < 0 || stage < 0 || ctx->current != ctx->root) {
        dt_fail(ctx, DT_ERR_ARG, "dt_tape: tape %d of stage %d%s", tape, stage,
            ctx->current != ctx->root ? " inside a dt_block" : "");
        return;
    }
    while (ctx->tape_capacity <= tape) {
        dt_block_state **grown = (dt_block_state **)dt__grow(
            ctx, ctx->tapes, ctx->tape_capacity, &ctx->tape_capacity, sizeof *grown, "tapes");
        if (!grown) return;
        ctx->tapes = grown;
    }
    dt_block_state *root = ctx->tapes[tape];
    if (!root) {
        ctx->root = NULL; /* a new tape starts with an empty pool */
        root = dt__block_acquire(ctx, 0);
        if (!root) return;
        ctx->tapes[tape] = root;
    }
    if (root->stage != stage && root->newest) {
        dt_fail(ctx, DT_ERR_ARG,
            "dt_tape: tape %d holds ops of stage %d; dt_reset comes before it is stage %d's", tape,
            root->stage, stage);
        return;
    }
    int same = ctx->root == root, begins = root->stage != stage || !root->own_acts.min_chunk;
    root->stage = stage;
    ctx->root = ctx->current = root;
    if (begins && dt__block_size_begin(ctx, root) != DT_OK) return;
    ctx->entered_block = NULL;
    if (!same) dt__notify_reset(ctx); /* prefetches were for the other tape */
}

static void dt__tape_free(dt_ctx *ctx) {
    for (int t = 0; t < ctx->tape_capacity; t++) {
        dt_block_state *root = ctx->tapes[t];
        if (!root) continue;
        ctx->root = ctx->current = root;
        dt_reset(ctx);
        dt_free(ctx, DT_MEM_HOST, root->pending_uses,
            (size_t)ctx->n_params * sizeof *root->pending_uses);
        for (int recomputed = 0; recomputed < 2; recomputed++)
            while (root->pool[recomputed]) {
                dt_block_state *b = root->pool[recomputed];
                root->pool[recomputed] = b->sibling;
                dt__block_free(ctx, b);
            }
        dt__block_free(ctx, root);
    }
    ctx->root = ctx->current = NULL;
    dt_free(ctx, DT_MEM_HOST, ctx->tapes, (size_t)ctx->tape_capacity * sizeof *ctx->tapes);
    for (int i = 0; i < ctx->stage_capacity; i++)
        dt_free(ctx, DT_MEM_HOST, ctx->stage_sizes[i].bytes,
            (size_t)ctx->stage_sizes[i].capacity * sizeof(size_t));
    dt_free(
        ctx, DT_MEM_HOST, ctx->stage_sizes, (size_t)ctx->stage_capacity * sizeof *ctx->stage_sizes);
    dt__arenas_free(ctx, &ctx->grad_pool);
    dt__arenas_free(ctx, &ctx->recompute_pool);
}

static void *dt__meta(dt_ctx *ctx, size_t bytes) {
    void *p = dt__root(ctx) ? dt__arena_alloc(ctx, &ctx->current->meta, bytes) : NULL;
    if (p) memset(p, 0, bytes);
    return p;
}

static dt_tensor *dt__tensor(dt_ctx *ctx, dt_dtype dtype, dt_shape shape, const char *name) {
    if (!ctx || ctx->status != DT_OK) return NULL;
    if (dt_dtype_size(dtype) == 0) {
        dt_fail(ctx, DT_ERR_ARG, "%s: element type %d", name, (int)dtype);
        return NULL;
    }
    const char *bad = dt__shape_problem(shape, 0);
    if (bad) {
        dt_fail(ctx, DT_ERR_SHAPE, "%s: shape %s: %s", name, dt__shape_text(shape).s, bad);
        return NULL;
    }
    dt_tensor *t = (dt_tensor *)dt__meta(ctx, sizeof *t);
    if (!t) return NULL;
    t->shape = shape;
    t->dtype = dtype;
    t->name = name;
    t->ctx = ctx;
    t->block = ctx->current;
    t->block_index = t->block->index;
    t->next = t->block->tensors;
    return t->block->tensors = t;
}

/* Makes the output of an op that keeps dimension 0 of `rows`, which may be NULL. `storage`:
   DT__IN_ARENA; DT__TRANSIENT, see dt_new_transient; DT__RECOMPUTED if the op is recorded with a
   `recompute` of about one pass over memory. */
static dt_tensor *dt__new_output(dt_ctx *ctx, const dt_tensor *rows, dt_dtype dtype, dt_shape shape,
    const char *name, int storage) {
    dt_tensor *t = dt__tensor(ctx, dtype, shape, name);
    if (!t) return NULL;
    int no_grad = ctx->no_grad && (t->block->no_grad || t->block == ctx->root);
    int transient = storage == DT__TRANSIENT;
    t->max_rows = dt__max_rows_kept(rows, shape);
    int split = ctx->root->split && dt__has_buffer(t);
    if (!transient && (ctx->no_grad || t->block == ctx->root || !dt__has_buffer(t)))
        storage = DT__IN_ARENA;
    t->storage = storage ? storage : no_grad ? DT__NO_GRAD : split ? DT__SPLIT_BACKWARD : 0;
    t->grad_storage = transient ? DT__GRAD_TRANSIENT : DT__GRAD_IN_ARENA;
    return dt__data_alloc(t) ? t : NULL;
}

/* bit of unread_inputs: the backward does not read the data of the output */
enum { DT__UNREAD_OUTPUT = 1 << DT_MAX_INPUTS };

/* value of needs_grad: dt_require_grad was called, so the gradient stays valid after the backward
   of the tensor's block */
enum { DT__KEEP_GRAD = 2 };

dt_tensor *dt_last_use(dt_tensor *x) {
    if (x) x->last_use = 1;
    return x;
}

/* Returns 1 if nothing will read the data of x again after the op that takes it now, and whose
   backward does not read them: dt_last_use says so of the forward, and the tape of the backward. A
   test for NaN reads inputs after the op. */
static int dt__can_overwrite(const dt_tensor *x) {
    const dt_node *n = x->producer;
    return x->last_use && n && n->out == x && n->unread_inputs & DT__UNREAD_OUTPUT &&
           x->readers == 0 && !x->read_by_weights && x->needs_grad != DT__KEEP_GRAD &&
           (x->storage == DT__IN_ARENA || x->storage == DT__SPLIT_BACKWARD) &&
           x->block == x->ctx->current && !x->ctx->no_grad && !x->ctx->check_finite;
}

/* Makes the output of an op that may write it over the data of x, of the same type and shape. */
static dt_tensor *dt__new_output_over(dt_tensor *x, const char *name) {
    if (!dt__can_overwrite(x)) return dt__new_output(x->ctx, x, x->dtype, x->shape, name, 0);
    dt_tensor *y = dt__tensor(x->ctx, x->dtype, x->shape, name);
    if (!y) return NULL;
    y->max_rows = x->max_rows;
    y->storage = x->storage;
    y->data = x->data;
    return y;
}

/* After the op has been recorded: if it has overwritten x, the data belong to y alone. */
static dt_tensor *dt__overwritten(dt_tensor *x, dt_tensor *y) {
    if (!y || x->base || x->data != y->data) return y;
    x->data = NULL;
    x->storage = DT__OVERWRITTEN;
    return y;
}

/* The output of an op of the user, which then reads the data of its inputs. */
static dt_tensor *dt__new_own(dt_ctx *ctx, const dt_tensor *rows, dt_dtype dtype, dt_shape shape,
    const char *name, int transient) {
    if (ctx) dt__flows_arrive(ctx);
    return dt__new_output(ctx, rows, dtype, shape, name, transient);
}

dt_tensor *dt_new(dt_ctx *ctx, dt_dtype dtype, dt_shape shape) {
    return dt__new_own(ctx, NULL, dtype, shape, "tensor", 0);
}
dt_tensor *dt_new_rows(const dt_tensor *x, dt_dtype dtype, dt_shape shape) {
    return x ? dt__new_own(x->ctx, x, dtype, shape, "tensor", 0) : NULL;
}
dt_tensor *dt_new_transient(dt_ctx *ctx, dt_dtype dtype, dt_shape shape) {
    return dt__new_own(ctx, NULL, dtype, shape, "transient tensor", 1);
}

static const char *dt__kept_name(const dt_tensor *t);
static dt_status dt__make_readable(dt_ctx *ctx, dt_tensor *x);

/* If the data of t were dropped, makes them again, or fails the context and returns 1. */
static int dt__fail_if_dropped(const char *op, dt_tensor *t) {
    if (t->storage == DT__DEAD) {
        const char *name = dt__kept_name(t);
        if (name) {
            dt_fail(t->ctx, DT_ERR_ARG,
                "%s(%s): this tensor %s %s is gone: a later dt_keep or dt_forget of '%s' has ended "
                "it; use the tensor that the latest dt_keep returned",
                op, t->name, dt_dtype_name(t->dtype), dt__shape_text(t->shape).s, name);
            return 1;
        }
        dt__text place = t->block_index ? dt__format("block %d", t->block_index)
                                        : dt__format("a forward outside of blocks");
        dt_fail(t->ctx, DT_ERR_ARG,
            "%s(%s): this tensor %s %s, which %s made in %s, is gone: dt_reset has freed it. To "
            "carry values to the next step, dt_keep them before dt_reset",
            op, t->name, dt_dtype_name(t->dtype), dt__shape_text(t->shape).s, t->name, place.s);
        return 1;
    }
    static const char *const why[] = {
        "was made inside a recomputed dt_block and is gone; use it there, or return it from the "
        "block",
        "is transient, for example gathered from shards, and was dropped when its dt_block ended; "
        "use it inside the block",
        "was dropped under dt_no_grad, because its dt_block ended or a later one began; return it "
        "from the block, or set dt_block_desc.keep in the block that has it as x or output",
        "was dropped after the input half of its backward",
        "was dropped by the backward, which has used it; read it before dt_backward, or dt_keep it",
        "was overwritten: by the op that read it after dt_last_use, or by its gradient in the "
        "backward; use the op's result, or call dt_keep on the tensor first"
    };
    dt_tensor *owner = dt__owner(t);
    if (owner->data || owner->param || !owner->block) return 0;
    int storage = owner->storage;
    if (storage == DT__RECOMPUTED && !owner->block->acts) storage = DT__IN_ARENA;
    /* after the backward the parameters may change, so an op would compute other data */
    if (storage == DT__RECOMPUTED && (!t->ctx->root->backward_done || t->ctx->recomputing))
        return dt__make_readable(t->ctx, t) != DT_OK;
    if (storage == DT__SPLIT_BACKWARD && !t->ctx->root->backward_done) storage = DT__IN_ARENA;
    if (storage >= DT__KEPT) storage--;
    dt_fail(t->ctx, DT_ERR_ARG, "%s(%s): the tensor %s", op, t->name, why[storage]);
    return 1;
}

/* Adds the name and the parameters of a recorded op to the fingerprint. After that the fingerprint
   is never 0. */
static void dt__add_fingerprint(dt_ctx *ctx, const char *name, dt_tensor *const *in, int n) {
    uint64_t h = dt__digest(ctx->fingerprint, name, name ? strlen(name) : 0);
    for (int i = 0; i < n; i++) {
        const dt_param_info *p = in[i] ? dt__owner(in[i])->param : NULL;
        int input = p ? 2 + p->index : in[i] != NULL;
        h = dt__digest(h, &input, sizeof input);
    }
    ctx->fingerprint = h | 1;
}

/* Counts one use of a parameter in this micro-batch. Returns 0 on failure. No parameter can be
   added any more, because the parameters have their storage, so n_params is final. A use by another
   stage (dt_param_desc.shared_stages) is not counted: its gradient stays in the bucket's
   micro_grad, and the next backward of the parameter's own stage completes it. */
static int dt__count_use(dt_ctx *ctx, const dt_tensor *t) {
    const dt_param_info *p = t->param;
    int **pending_uses = &ctx->root->pending_uses;
    if (p->stage != ctx->root->stage && p->desc.shared_stages) return 1;
    if (p->stage != ctx->root->stage)
        return dt_fail(ctx, DT_ERR_ARG,
                   "%s belongs to stage %d and is used on a tape of "
                   "stage %d: dt_stage comes before the dt_param of a stage; a parameter of two "
                   "stages needs a copy in each, placed DT_GRAD_PARTIAL",
                   t->name, p->stage, ctx->root->stage) == DT_OK;
    if (!*pending_uses)
        *pending_uses =
            (int *)dt__host_zeroed(ctx, (size_t)ctx->n_params * sizeof **pending_uses, "the tape");
    if (*pending_uses) (*pending_uses)[p->index]++;
    return *pending_uses != NULL;
}

/* ---- dt_check_finite ---- */

/* Returns the index of the first element that is NaN, or with `inf` = 1 also Inf; -1 if there is
   none. A kernel sums the squares of each piece. The host copies and searches only pieces whose sum
   is NaN or Inf: an element is, or the square of a large f64 overflows. */
static int64_t dt__find_bad(dt_ctx *ctx, dt_dtype dtype, const void *data, int64_t count, int inf) {
    double sums[DT_PIECE], copy[DT_PIECE]; /* sums of DT_PIECE pieces at a time */
    size_t size = dt_dtype_size(dtype), all = data && !dt__integer(dtype) ? (size_t)count : 0;
    for (size_t at = 0, i = 0, n; at < all; at += n, i = (i + 1) % DT_PIECE) {
        dt_square_sums_args a = { dtype, NULL, (const char *)data + at * size, all - at };
        n = a.count < DT_PIECE ? a.count : DT_PIECE;
        if (a.count > DT_PIECE * DT_PIECE) a.count = DT_PIECE * DT_PIECE;
        size_t bytes = (a.count + DT_PIECE - 1) / DT_PIECE * sizeof *sums;
        if (i == 0 && (!(a.out = (double *)dt_scratch(ctx, bytes)) ||
                          DT__KERNEL(ctx, "the search for a NaN", square_sums, &a) != DT_OK ||
                          dt__move_now(ctx, sums, a.out, bytes) != DT_OK))
            break;
        if (inf ? isfinite(sums[i]) : !isnan(sums[i])) continue;
        if (dt__move_now(ctx, copy, a.in, n * size) != DT_OK) break;
        for (size_t k = 0; k < n; k++) {
            double x = dt__number(dtype, copy, k);
            if (isnan(x) || (inf && isinf(x))) return (int64_t)(at + k);
        }
    }
    return -1;
}

static int64_t dt__find_bad_value(const dt_tensor *t, int inf) {
    return t ? dt__find_bad(t->ctx, t->dtype, t->data, dt_count(t->shape), inf) : -1;
}

/* Returns a description of the place in the program: "in block 3, micro-batch 2 of 4, stage 1". */
static dt__text dt__place_text(const dt_ctx *ctx, const dt_block_state *b) {
    dt__text text =
        b && b->index ? dt__format("in block %d", b->index) : dt__format("outside of blocks");
    if (ctx->micro_count > 1)
        dt__put(&text, ", micro-batch %d of %d", ctx->micro + 1, ctx->micro_count);
    if (ctx->has_stages) dt__put(&text, ", stage %d", ctx->root->stage);
    if (ctx->inf_op && ctx->inf_block)
        dt__put(&text, "; the first Inf came from %s in block %d", ctx->inf_op, ctx->inf_block);
    else if (ctx->inf_op)
        dt__put(&text, "; the first Inf came from %s, outside of blocks", ctx->inf_op);
    return text;
}

/* Fails if the output of an op has a NaN. */
static dt_status dt__check_output(
    dt_ctx *ctx, const char *op, dt_tensor *const *in, int n, const dt_tensor *out) {
    int64_t at = dt__find_bad_value(out, 0);
    if (at < 0 && !ctx->inf_op && dt__find_bad_value(out, 1) >= 0) {
        ctx->inf_op = op;
        ctx->inf_block = ctx->current->index;
        for (int i = 0; i < n; i++) /* an input from outside may have brought it */
            if (dt__find_bad_value(in[i], 1) >= 0) ctx->inf_op = in[i]->name;
    }
    if (at < 0) return ctx->status;
    dt__text place = dt__place_text(ctx, ctx->current);
    for (int i = 0; i < n; i++) {
        int64_t from = dt__find_bad_value(in[i], 0);
        if (from >= 0)
            return dt_fail(ctx, DT_ERR_NUMERIC,
                "%s, %s: element %lld of its input %d, %.40s %.60s, is NaN; no tested op made it%s",
                op, place.s, (long long)from, i, in[i]->name, dt__shape_text(in[i]->shape).s,
                strcmp(in[i]->name, "dt_input") ? "" : ": check the data passed to dt_input");
    }
    return dt_fail(ctx, DT_ERR_NUMERIC,
        "%s makes a NaN, %s: element %lld of its output %.60s; its inputs on this rank have no NaN",
        op, place.s, (long long)at, dt__shape_text(out->shape).s);
}

/* Autograd tape. Appends a node for an op to the current block's list and returns it; NULL if no
   input needs a gradient, or after a failure. dt__node_backward runs the node's backward. */
static dt_node *dt__record(dt_tensor *out, dt_ctx *ctx, const dt_record_desc *d) {
    int n = d->n_in, needed = 0;
    if (ctx->status != DT_OK || ctx->no_grad || !dt__root(ctx)) return NULL;
    if (n < 0 || n > DT_MAX_INPUTS || !d->backward) {
        dt_fail(ctx, DT_ERR_ARG, "%s: %d inputs, at most %d, and a backward are needed", d->name, n,
            DT_MAX_INPUTS);
        return NULL;
    }
    if (n == 0)
        while (n < DT_MAX_INPUTS && d->in[n]) n++;
    for (int i = 0; i < n; i++) {
        if (!d->in[i]) continue;
        if (d->in[i]->ctx != ctx) {
            dt_fail(
                ctx, DT_ERR_ARG, "%s(%s): a tensor of another context", d->name, d->in[i]->name);
            return NULL;
        }
        if (dt__fail_if_dropped(d->name, d->in[i])) return NULL;
        if (dt__owner(d->in[i])->param && dt__ensure_storage(ctx) != DT_OK) return NULL;
        needed |= d->in[i]->needs_grad;
        dt__owner(d->in[i])->readers++;
    }
    if (ctx->check_finite && out && dt__flow_arrive(ctx, out->flow) != DT_OK) return NULL;
    if (ctx->check_finite && dt__check_output(ctx, d->name, d->in, n, out) != DT_OK) return NULL;
    if (!needed) return NULL;
    if (ctx->root->backward_done && !ctx->recomputing) {
        dt_fail(ctx, DT_ERR_ARG,
            "%s: the backward of this micro-batch has run; call dt_reset before the next forward",
            d->name);
        return NULL;
    }
    dt_node *node = (dt_node *)dt__meta(ctx, sizeof *node);
    if (!node) return NULL;
    if (d->saved_bytes && !(node->saved = dt__meta(ctx, d->saved_bytes))) return NULL;
    node->name = d->name;
    node->out = out;
    node->n_in = n;
    node->backward = d->backward;
    node->unread_inputs = d->unread_inputs;
    if (out && (out->storage == DT__TRANSIENT || out->storage == DT__RECOMPUTED))
        node->recompute = d->recompute;
    for (int i = 0; i < n; i++) {
        node->in[i] = d->in[i];
        dt_tensor *owner = d->in[i] ? dt__owner(d->in[i]) : NULL;
        /* in a recomputed block the first run has already counted the uses */
        int counts = owner && owner->param && owner->needs_grad && !ctx->recomputing;
        if (counts && !dt__count_use(ctx, owner)) return NULL;
    }
    dt__add_fingerprint(ctx, d->name, node->in, n);
    node->prev = ctx->current->newest;
    ctx->current->newest = node;
    if (out) {
        out->needs_grad = 1;
        out->producer = node;
    }
    return node;
}

/* Records an op of this library, whose result has its placements already. */
static dt_tensor *dt__record_op(dt_tensor *out, dt_record_desc d) {
    out->name = d.name;
    dt__record(out, out->ctx, &d);
    return out->ctx->status == DT_OK ? out : NULL;
}

/* Records an op of the user, about whose result nothing is known unless dt_place has said it. */
static dt_node *dt__record_own(dt_tensor *out, const dt_record_desc *d) {
    dt_node *node = out ? dt__record(out, out->ctx, d) : NULL;
    /* without gradients too, so that evaluation refuses nothing that training accepts */
    if (out && out->ctx->status == DT_OK && !out->placements)
        out->placements = &dt__unknown_placements;
    return node;
}

void *dt_record_saved(dt_tensor *out, dt_record_desc desc) {
    desc.unread_inputs &= DT__UNREAD_OUTPUT - 1; /* this bit is private */
    dt_node *node = dt__record_own(out, &desc);
    return node ? node->saved : NULL;
}

dt_tensor *dt_record(dt_tensor *out, dt_record_desc desc) {
    if (out) out->name = desc.name;
    desc.unread_inputs &= DT__UNREAD_OUTPUT - 1;
    dt__record_own(out, &desc);
    return out && out->ctx->status == DT_OK ? out : NULL;
}

// ==== 17. Placements: code ======================================================================

/* Sharding propagation (PyTorch's DTensor, GSPMD: arXiv:2105.04663). A rule names the dimensions of
   an op's inputs and of its result as einsum does, so one function can move a shard from an input
   to the result for every op:

       dt_linear      x    w    b  residual     result      . and * are any number of dimensions,
                     .i+, *i+,  *,   .*    ->     .*        + says that the op sums over i

       x SHARD(last), w SHARD(last)   shards of i, which is summed              PARTIAL
       w SHARD(0), x COPY             a shard of *, which x lacks               SHARD of *
       x SHARD(1), b REPLICATE        a shard of ., which b lacks: each rank    refused
                                      gets a part of the gradient of b

   Each group is an axis of its own, and the rule applies to one axis after the other. If an input
   is placed over a group and another input over its subgroups, the axes are the subgroups: kv heads
   are sharded over one subgroup of tp and COPY over another. */

/* In `dims` each letter is a dimension, and each of . * ^ any number of dimensions. If an op has
   more inputs than the rule has terms, the last term repeats. A mark behind a dimension says what
   becomes of a shard of it:

       no mark   SHARD of the same dimension of the result
       +         PARTIAL: the op sums over the dimension
       !         refused: the op needs the whole dimension
       &         REPLICATE: the ranks combine their results inside the op
       ~         UNPLACED: the op moves rows to other rows */
typedef struct dt__rule {
    const char *dims;
    unsigned nonlinear; /* bit i is 1: the result is not linear in input i, so PARTIAL is refused */
    unsigned addends;   /* bit i is 1: input i is added to the product of the other inputs */
    int broadcast;      /* 1: an input with fewer dimensions is aligned at the end */
    int activation;     /* 1: a nonlinear function follows the product */
    unsigned constants; /* bit i is 1: no gradient passes to input i */
    const char *whole;  /* another way to compute along a sharded dimension marked ! */
} dt__rule;

/* The sharding rules of all ops; dt_reshape has dt__reshape_placed. FUNCTION: dt_gelu, dt_exp, ..;
   SCALE: dt_affine without shift, dt_cast; MAXIMUM: dt_minimum too; COMPARE: dt_less, ..; MAX:
   dt_argmax too; *_KEEPDIM: the op keeps the dimension ^, with size 1; SLICE: also dt_cumsum;
   PERMUTE: before dt__propagate_permute; LAST: dt_softmax, dt_topk; ADD: also dt_broadcast_to;
   MATMUL_NT: b is transposed (N: not, T: yes). PATCHES_PADDED: with a pad_value that is not 0.
   TABLE: an embedding whose table is a parameter, so ids whose rows other ranks hold give zeros.
   DROPOUT_ROWS: each rank numbers its own rows. EXCHANGE: dt_all_to_all_rows. PAIR_LOSS: dt_mse,
   dt_bce_with_logits. */
#define DT__SHARDING_RULES(X) \
    X(FUNCTION, ". -> .", .nonlinear = 1) \
    X(SCALE, ". -> .", .nonlinear = 0) \
    X(ADD, ". -> .", .addends = ~0u, .broadcast = 1) \
    X(MUL, ". -> .", .broadcast = 1) \
    X(DIV, ". -> .", .nonlinear = 2, .broadcast = 1) \
    X(MAXIMUM, ". -> .", .nonlinear = ~0u, .broadcast = 1) \
    X(WHERE, ". -> .", .nonlinear = ~0u, .broadcast = 1, .constants = 1) \
    X(COMPARE, ". -> .", .nonlinear = ~0u, .broadcast = 1, .constants = ~0u) \
    X(SUM, ".^+* -> .*", .nonlinear = 0) \
    X(SUM_KEEPDIM, ".^+* -> .^*", .nonlinear = 0) \
    X(MEAN, ".^!* -> .*", .whole = "dt_sum_over gives partial sums") \
    X(MEAN_KEEPDIM, ".^!* -> .^*", .whole = "dt_sum_dims gives partial sums") \
    X(MAX, ".^!* -> .*", .nonlinear = 1) \
    X(MAX_KEEPDIM, ".^!* -> .^*", .nonlinear = 1) \
    X(SLICE, ".^!* -> .^*", .nonlinear = 0) \
    X(SELECT, ".^!* -> .*", .nonlinear = 0) \
    X(CONCAT, ".^!* -> .^*", .addends = ~0u) \
    X(PERMUTE, ".^ -> .^", .nonlinear = 0) \
    X(LAST, ".c! -> .c", .nonlinear = 1) \
    X(ONE_HOT, ". -> .c", .nonlinear = 1) \
    X(NORM, ".c!, c!, c! -> .c", .nonlinear = ~0u, .addends = 4) \
    X(GLU, ".t!f -> .f", .nonlinear = 1) \
    X(LINEAR, ".i+, *i+, *, .* -> .*", .addends = 12) \
    X(LINEAR_ACTIVATION, ".i+, *i+, *, .* -> .*", .addends = 12, .activation = 1) \
    X(MATMUL_NN, ".mk+, .k+n -> .mn", .broadcast = 1) \
    X(MATMUL_NT, ".mk+, .nk+ -> .mn", .broadcast = 1) \
    X(MATMUL_TN, ".k+m, .k+n -> .mn", .broadcast = 1) \
    X(MATMUL_TT, ".k+m, .nk+ -> .mn", .broadcast = 1) \
    X(PATCHES, "bh!w!c -> byxkc", .nonlinear = 0) \
    X(PATCHES_PADDED, "bh!w!c -> byxkc", .nonlinear = 1) \
    X(MEAN_POOL, "bh!w!c -> byxc", .nonlinear = 0) \
    X(MAX_POOL, "bh!w!c -> byxc", .nonlinear = 1) \
    X(CONV, "b^!c+, o*!c+, o -> b^o", .addends = 4) \
    X(GROUP_NORM, "b^!c, c, c -> b^c", .nonlinear = ~0u, .addends = 4) \
    X(GROUPED, ".i+, g~*i+, g~*, .* -> .*", .addends = 12) \
    X(GROUPED_ACTIVATION, ".i+, g~*i+, g~*, .* -> .*", .addends = 12, .activation = 1) \
    X(TABLE, "v+c, . -> .c", .nonlinear = 2) \
    X(GATHER, "v~c, . -> .c", .nonlinear = 2) \
    X(SCATTER, ".~c, .~ -> rc", .nonlinear = 2) \
    X(BAG, "r~c, .k+, .k+ -> .c", .nonlinear = 2) \
    X(EXCHANGE, "r~* -> r*", .nonlinear = 0) \
    X(ROPE, "bthd!, bt -> bthd", .nonlinear = 2) \
    X(DROPOUT, ".c, . -> .c", .nonlinear = 2) \
    X(DROPOUT_ROWS, ".!c -> .c", .whole = "pass the numbers of this rank's tokens") \
    X(ATTENTION, "bqhd!, bk!hd!, bk!hd! -> bqhd", .nonlinear = 7, \
        .whole = "dt_cp_attention attends to the keys of all ranks") \
    X(ATTENTION_CAUSAL, "bq!hd!, bk!hd!, bk!hd! -> bqhd", .nonlinear = 7, \
        .whole = "dt_cp_attention attends to the keys of all ranks") \
    X(RING, "bthd!, bthd!, bthd! -> bthd", .nonlinear = 7) \
    X(LOSS, ".+c!, .+ ->", .nonlinear = 3, \
        .whole = "dt_vocab_cross_entropy computes the loss of sharded logits") \
    X(VOCAB_LOSS, ".+c&, .+ ->", .nonlinear = 3) \
    X(LINEAR_LOSS, ".+i!, .+, v!i! ->", .nonlinear = 7, \
        .whole = "dt_vocab_linear_cross_entropy takes a w that is sharded along V") \
    X(VOCAB_LINEAR_LOSS, ".+i!, .+, v&i! ->", .nonlinear = 7) \
    X(PAIR_LOSS, ".+ ->", .nonlinear = 3)

#define DT__RULE_NUMBER(name, text, ...) DT__RULE_##name,
enum { DT__SHARDING_RULES(DT__RULE_NUMBER) DT__RULES };
#undef DT__RULE_NUMBER
#define DT__RULE_ROW(name, text, ...) { .dims = text, __VA_ARGS__ },
static const dt__rule dt__rules[DT__RULES] = { DT__SHARDING_RULES(DT__RULE_ROW) };
#undef DT__RULE_ROW

/* Returns 1 if all ranks of b are ranks of a. Linear in a->size if both have the same order. */
static int dt__group_contains(const dt_group *a, const dt_group *b) {
    if (a == b) return 1;
    if (!a || !b || !a->ranks || !b->ranks || b->size > a->size) return 0;
    for (int i = 0, at = 0; i < b->size; i++) {
        int before = at, rank = b->ranks[i];
        while (at < a->size && a->ranks[at] != rank) at++;
        if (at < a->size) continue;
        for (at = 0; at < before && a->ranks[at] != rank;) at++;
        if (at == before) return 0;
    }
    return 1;
}

static const char *dt__group_name(const dt_group *group) {
    return group->name ? group->name : "a group";
}

/* LOCAL: kind of a placement over a group that was not named for the tensor: every rank has a
   tensor of its own, or all have the same one */
enum { DT__LOCAL = DT_PLACEMENT_NONE + 1 };

static dt__text dt__placement_text(dt_placement p) {
    static const char *const names[] = { "REPLICATE", "COPY", "SHARD", "PARTIAL", "UNPLACED" };
    if (p.kind == DT_PLACEMENT_SHARD) return dt__format("SHARD(%d)", p.dim);
    return dt__format("%s", p.kind >= 0 && p.kind < DT__LOCAL ? names[p.kind] : "no placement");
}

/* Returns 1 if the training state sums the gradient of a parameter over the group. */
static int dt__sums_over(const dt_ctx *ctx, const dt_param_desc *d, const dt_group *group) {
    int expert = 0;
    for (int i = 0; d && i < 5; i++) {
        const dt_group *g =
            (const dt_group *)(i < 3 ? d->shards[i].comm : d->grad_placements[i - 3].comm);
        expert |= g && (g == ctx->expert_groups[0] || g == ctx->expert_groups[1] ||
                           (i < 3 && dt__group_contains(ctx->data_groups[0], g)));
    }
    return dt__group_contains(ctx->data_groups[expert], group);
}

/* Returns the placement of t over a group that contains no other group of t. Without a statement a
   parameter is placed as dt_param_desc says; without a training state this is unknown. */
static dt__placed dt__placed_over(const dt_tensor *t, const dt_group *group) {
    const dt_placements *list = t->placements;
    const dt_param_info *param = dt__owner((dt_tensor *)t)->param;
    dt__placed p = { group, { DT__LOCAL, 0 }, 1 };
    for (int i = 0; list && i < list->n; i++)
        if (dt__group_contains(list->by_group[i].group, group)) {
            p = list->by_group[i];
            p.group = group;
            return p;
        }
    if (list && list->any) p.at.kind = DT_PLACEMENT_NONE;
    if (param && t->ctx->has_training_state)
        p.at = dt__sums_over(t->ctx, &param->desc, group) ? DT_COPY : DT_REPLICATE;
    return p;
}

/* ---- one op over one group ---- */

/* The dimensions of an input or of the result, as the rule names them. */
typedef struct dt__term {
    int fits; /* 0: the tensor has another number of dimensions */
    int label[DT_MAX_DIMS];
    char mark[DT_MAX_DIMS];
} dt__term;

typedef struct dt__operand {
    const dt_tensor *t; /* NULL: the product of the factors */
    dt_shape shape;
    dt__term term;
    int linear, wants_grad, is_param;
    dt__placed p; /* over the group in hand */
} dt__operand;

/* An op whose result is being placed. */
typedef struct dt__propagation {
    const char *op;
    const dt__rule *rule;
    dt_tensor *y;
    const dt_group *group; /* in hand */
    dt__term out;
    int n;
    dt__operand in[DT_MAX_INPUTS];
} dt__propagation;

static const char dt__term_groups[] = ".*^";

/* Parses one term of a rule and moves *at behind it. length: number of dimensions of . * and ^. */
static dt__term dt__term_of(const char **at, int nd, const int length[3], int broadcast) {
    dt__term t;
    int n = 0, label[4 * DT_MAX_DIMS], skip;
    char mark[4 * DT_MAX_DIMS];
    memset(&t, 0, sizeof t);
    for (; **at && **at != ',' && **at != '-'; ++*at) {
        const char *g = **at == ' ' ? NULL : strchr(dt__term_groups, **at);
        char m = (*at)[1] && strchr("+!&~", (*at)[1]) ? (*at)[1] : 0;
        if (**at == ' ') continue;
        for (int i = 0; i < (g ? length[g - dt__term_groups] : 1) && n < 4 * DT_MAX_DIMS; i++) {
            label[n] = g ? (int)(g - dt__term_groups + 1) * 16 + i : **at;
            mark[n++] = m;
        }
        *at += m != 0;
    }
    skip = n - nd;
    t.fits = skip == 0 || (broadcast && skip > 0);
    for (int i = 0; i < nd && t.fits; i++) {
        t.label[i] = label[i + skip];
        t.mark[i] = mark[i + skip];
    }
    return t;
}

/* Computes length[k] of . * and ^ where it is -1, from the numbers of dimensions of the inputs. */
static void dt__term_lengths(const dt__propagation *c, int length[3]) {
    const char *at = c->rule->dims;
    for (int i = 0; i < c->n && *at != '-'; i++) {
        int known = 0, open = -1, opens = 0;
        for (; *at && *at != ',' && *at != '-'; at++) {
            const char *g = *at == ' ' ? NULL : strchr(dt__term_groups, *at);
            if (*at >= 'a' && *at <= 'z') known++;
            if (!g) continue;
            int k = (int)(g - dt__term_groups);
            if (length[k] >= 0) known += length[k];
            if (length[k] < 0) open = k, opens++;
        }
        if (*at == ',') at++;
        int left = c->in[i].shape.nd - known;
        if (c->in[i].t && opens == 1) length[open] = left > 0 ? left : 0;
    }
    for (int k = 0; k < 3; k++)
        if (length[k] < 0) length[k] = 0;
}

static void dt__propagation_terms(dt__propagation *c, int length[3]) {
    const char *at = c->rule->dims, *term = at;
    dt__term_lengths(c, length);
    for (int i = 0; i < c->n; i++) {
        at = term;
        c->in[i].term = dt__term_of(&at, c->in[i].shape.nd, length, c->rule->broadcast);
        if (*at == ',') term = at + 1;
    }
    at = strstr(c->rule->dims, "->") + 2;
    c->out = dt__term_of(&at, c->y->shape.nd, length, 0);
}

/* Fails the context with the reason why the op cannot run. Returns 0. */
DT_PRINTF(2, 3) static int dt__refuse(const dt__propagation *c, const char *fmt, ...) {
    const char *names[2] = { NULL, NULL };
    char reason[400];
    va_list args;
    for (int i = c->n - 1; i >= 0; i--)
        if (c->in[i].t) names[1] = names[0], names[0] = c->in[i].t->name;
    va_start(args, fmt);
    vsnprintf(reason, sizeof reason, fmt, args);
    va_end(args);
    return dt_fail(c->y->ctx, DT_ERR_ARG, "%s(%.40s%s%.40s): %s", c->op, names[0],
               names[1] ? ", " : "", names[1] ? names[1] : "", reason) == DT_OK;
}

static dt__text dt__operand_text(const dt__operand *o) {
    if (!o->t) return dt__format("the product");
    return dt__format("%.40s %.40s", o->t->name, dt__shape_text(o->shape).s);
}

static int dt__refuse_partial(const dt__propagation *c, const dt__operand *o) {
    const char *name = dt__group_name(c->group);
    return dt__refuse(c,
        "%s is a partial sum over '%s' that has not been taken, and the op is not linear: "
        "dt_redistribute(x, %s, DT_PARTIAL, DT_REPLICATE) comes first",
        dt__operand_text(o).s, name, name);
}

static int dt__refuse_addend(
    const dt__propagation *c, const dt__operand *sum, const dt__operand *o) {
    const char *name = dt__group_name(c->group);
    return dt__refuse(c,
        "%s is a partial sum over '%s', to which each of the %d ranks would add %s: take the sum "
        "first, dt_redistribute(x, %s, DT_PARTIAL, DT_REPLICATE), or use dt_row_linear, which adds "
        "bias and residual once; dt_place says that an input is a partial sum too",
        dt__operand_text(sum).s, name, c->group->size, dt__operand_text(o).s, name);
}

static int dt__refuse_whole(const dt__propagation *c, const dt__operand *o) {
    const char *name = dt__group_name(c->group), *whole = c->rule->whole;
    return dt__refuse(c,
        "dimension %d of %s is sharded over '%s', and the op needs the whole dimension: "
        "dt_redistribute(x, %s, DT_SHARD(%d), DT_REPLICATE) gathers it%s%s",
        o->p.at.dim, dt__operand_text(o).s, name, name, o->p.at.dim, whole ? "; " : "",
        whole ? whole : "");
}

static int dt__refuse_mixed(const dt__propagation *c, const dt__operand *a, const dt__operand *b) {
    return dt__refuse(c,
        "over '%s' %s is %s and %s is %s, which do not fit: redistribute one of them "
        "(dt_redistribute)",
        dt__group_name(c->group), dt__operand_text(a).s, dt__placement_text(a->p.at).s,
        dt__operand_text(b).s, dt__placement_text(b->p.at).s);
}

/* The gradient of o would be a partial sum on each rank, because `other` is sharded, partial or
   COPY. */
static int dt__refuse_grad(
    const dt__propagation *c, const dt__operand *o, const dt__operand *other) {
    const char *name = dt__group_name(c->group);
    if (o->is_param)
        return dt__refuse(c,
            "%s is %s over '%s', so the gradient of the parameter %s is a partial sum on each "
            "rank: give it the gradient placement { %s, DT_GRAD_PARTIAL }, or, if it is also used "
            "outside of the region, pass dt_tp_enter(%.40s, %s, DT_REPLICATE) here",
            dt__operand_text(other).s, dt__placement_text(other->p.at).s, name,
            o->t ? o->t->name : "", name, o->t ? o->t->name : "", name);
    return dt__refuse(c,
        "%s is %s over '%s', so the gradient of %s would be a partial sum on each rank: "
        "dt_tp_enter(x, %s, DT_REPLICATE), or dt_redistribute(x, %s, DT_REPLICATE, DT_COPY), "
        "comes first",
        dt__operand_text(other).s, dt__placement_text(other->p.at).s, name, dt__operand_text(o).s,
        name, name);
}

/* Returns the dimension of a term that has this label; -1 if none has. */
static int dt__dim_of(const dt__term *term, int nd, int label) {
    for (int d = 0; d < nd && term->fits; d++)
        if (term->label[d] == label) return d;
    return -1;
}

/* Returns 1 if `known` has all dimensions of o. */
static int dt__covers(const dt__operand *known, const dt__operand *o) {
    int covered = o->term.fits;
    for (int d = 0; d < o->shape.nd && covered; d++)
        covered = dt__dim_of(&known->term, known->shape.nd, o->term.label[d]) >= 0;
    return covered;
}

/* Combines operands that are neither SHARD nor PARTIAL. */
static int dt__combine_whole(
    const dt__propagation *c, dt__operand *const *in, int n, dt__placed *out) {
    const dt__operand *copy = NULL, *whole = NULL, *known = NULL;
    int unknown = 0;
    for (int i = 0; i < n; i++) {
        int kind = in[i]->p.at.kind;
        unknown |= kind == DT_PLACEMENT_NONE;
        if (kind == DT_PLACEMENT_COPY && in[i]->wants_grad) copy = in[i];
        if (kind == DT_PLACEMENT_REPLICATE && in[i]->wants_grad) whole = in[i];
        if (kind <= DT_PLACEMENT_COPY && (!known || kind == DT_PLACEMENT_COPY)) known = in[i];
    }
    if (copy && whole && !whole->is_param && copy->is_param)
        return dt__refuse(c,
            "every rank of '%s' has the whole gradient of %s, but %s has the gradient placement "
            "DT_GRAD_PARTIAL, so its gradient would be added %d times: leave the gradient "
            "placement out, and inside of the region pass dt_tp_enter(%.40s, %s, DT_REPLICATE)",
            dt__group_name(c->group), dt__operand_text(whole).s, copy->t->name, c->group->size,
            copy->t->name, dt__group_name(c->group));
    if (copy && whole) return dt__refuse_grad(c, whole, copy);
    for (int i = 0; i < n && known && !unknown; i++) {
        int covered = 0;
        if (in[i]->p.at.kind != DT__LOCAL || in[i]->is_param) continue;
        for (int k = 0; k < n; k++)
            covered |= in[k]->p.at.kind <= DT_PLACEMENT_COPY && dt__covers(in[k], in[i]);
        unknown = !covered;
    }
    out->at.kind = unknown ? (int)DT_PLACEMENT_NONE : (int)DT__LOCAL;
    if (!known || unknown) return 1;
    out->at = copy || (!whole && known->p.at.kind == DT_PLACEMENT_COPY) ? DT_COPY : DT_REPLICATE;
    return 1;
}

/* Refuses an operand that is not sharded beside a sharded one: because it has the sharded dimension
   in full, or because it lacks this dimension, so that its gradient is a partial sum. */
static int dt__beside_shard(const dt__propagation *c, const dt__operand *s, const dt__operand *o) {
    int kind = o->p.at.kind, dim = s->p.at.dim,
        d = dt__dim_of(&o->term, o->shape.nd, s->term.label[dim]);
    /* a dimension of size 1 is broadcast, unless the op sums over it */
    if (d >= 0 && (o->shape.d[d] > 1 || s->term.mark[dim] == '+')) {
        int whole = kind <= DT_PLACEMENT_COPY && !o->is_param;
        return whole || o->shape.d[d] > s->shape.d[dim] ? dt__refuse_mixed(c, s, o) : 1;
    }
    /* a sharded parameter is no replica of data parallelism, so nothing sums over its group */
    int entered = kind != DT__LOCAL || o->is_param || !s->is_param ||
                  dt__sums_over(c->y->ctx, NULL, c->group);
    return o->wants_grad && (kind == DT_PLACEMENT_REPLICATE || !entered) ? dt__refuse_grad(c, o, s)
                                                                         : 1;
}

/* Computes the placement of the product (sum 0) or sum (sum 1) of the operands over c->group. */
static int dt__combine_operands(
    const dt__propagation *c, dt__operand *const *in, int n, int sum, dt__placed *out) {
    const dt__operand *s = NULL, *p = NULL; /* an operand that is SHARD, one that is PARTIAL */
    for (int i = 0; i < n; i++) {
        const dt__operand *o = in[i];
        int kind = o->p.at.kind;
        if (kind == DT_PLACEMENT_PARTIAL && !sum && (!o->linear || p))
            return dt__refuse_partial(c, o);
        if (kind == DT_PLACEMENT_PARTIAL) p = o;
        if (kind != DT_PLACEMENT_SHARD) continue;
        if (o->term.mark[o->p.at.dim] == '!') return dt__refuse_whole(c, o);
        if (s &&
            (s->term.label[s->p.at.dim] != o->term.label[o->p.at.dim] || s->p.outer != o->p.outer))
            return dt__refuse_mixed(c, s, o);
        if (!s || o->is_param) s = o;
    }
    if (p && s) return dt__refuse_mixed(c, p, s);
    if (!p && !s) return dt__combine_whole(c, in, n, out);
    char mark = s ? s->term.mark[s->p.at.dim] : 0;
    for (int i = 0; i < n; i++) {
        const dt__operand *o = in[i];
        int kind = o->p.at.kind, other = kind <= DT_PLACEMENT_COPY || kind == DT__LOCAL;
        if (!other) continue;
        if (p && sum) return dt__refuse_addend(c, p, o);
        if (p && o->wants_grad && kind == DT_PLACEMENT_REPLICATE) return dt__refuse_grad(c, o, p);
        if (s && mark != '~' && !dt__beside_shard(c, s, o)) return 0;
    }
    out->at = mark == '~' ? DT_UNPLACED : mark == '&' ? DT_REPLICATE : DT_PARTIAL;
    if (!s || mark) return 1;
    int dim = dt__dim_of(&c->out, c->y->shape.nd, s->term.label[s->p.at.dim]);
    out->at = dim < 0 ? DT_UNPLACED : DT_SHARD(dim);
    out->outer = s->p.outer;
    return 1;
}

/* Computes the placement of the result over c->group: first of the product of the factors, then of
   its sum with the addends. */
static int dt__propagate_over(dt__propagation *c, dt__placed *out) {
    dt__operand *factors[DT_MAX_INPUTS], *addends[DT_MAX_INPUTS + 1], product;
    int n_factors = 0, n_addends = 0;
    memset(&product, 0, sizeof product);
    for (int i = 0; i < c->n; i++) {
        dt__operand *o = &c->in[i];
        if (!o->t) continue;
        o->p = dt__placed_over(o->t, c->group);
        if (o->p.at.kind == DT_PLACEMENT_SHARD && !o->term.fits) o->p.at = DT_UNPLACED;
        product.wants_grad |= o->wants_grad;
        if (c->rule->addends >> i & 1)
            addends[n_addends++] = o;
        else
            factors[n_factors++] = o;
    }
    out->group = c->group;
    out->at.dim = 0;
    out->outer = 1;
    if (n_factors && !dt__combine_operands(c, factors, n_factors, 0, out)) return 0;
    if (n_factors && !n_addends && !c->rule->activation) return 1;
    if (n_factors) {
        product.term = c->out;
        product.shape = c->y->shape;
        product.linear = !c->rule->activation;
        product.p = *out;
        addends[n_addends++] = &product;
        if (!product.linear && out->at.kind == DT_PLACEMENT_PARTIAL)
            return dt__refuse_partial(c, &product);
    }
    return dt__combine_operands(c, addends, n_addends, 1, out);
}

/* ---- all groups of an op ---- */

enum { DT__MAX_GROUPS = DT_MAX_INPUTS * DT__MAX_PLACED };

/* Merges equal placements over the subgroups of `group` into one placement over the group. If the
   subgroups do not make up the group, nothing is known over the rest. */
static void dt__merge_subgroups(dt_placements *list, const dt_group *group) {
    dt_placements others;
    const dt__placed *one = NULL;
    int size = 1, equal = 1;
    memset(&others, 0, sizeof others);
    others.any = list->any;
    for (int i = 0; i < list->n; i++) {
        const dt__placed *p = &list->by_group[i];
        if (!dt__group_contains(group, p->group)) {
            dt__placements_add(&others, *p);
            continue;
        }
        if (!one) one = p;
        size *= p->group->size;
        equal &= p->at.kind == one->at.kind && p->at.dim == one->at.dim && p->outer == one->outer;
    }
    dt__placed merged = { group, DT_UNPLACED, 1 };
    if (size != group->size) {
        dt__placements_add(list, merged);
    } else if (one && equal) {
        merged.at = one->at;
        merged.outer = one->outer;
        dt__placements_add(&others, merged);
        *list = others;
    }
}

/* Collects the groups over which the inputs are placed, each once. Returns their number. */
static int dt__groups_of(const dt__propagation *c, const dt_group **groups) {
    int n = 0;
    for (int i = 0; i < c->n; i++) {
        const dt_placements *list = c->in[i].t ? c->in[i].t->placements : NULL;
        for (int k = 0; list && k < list->n; k++) {
            const dt_group *g = list->by_group[k].group;
            int at = 0;
            if (g->pipeline) continue;
            while (at < n && !(groups[at]->size == g->size && dt__group_contains(groups[at], g)))
                at++;
            if (at == n) groups[n++] = g;
        }
    }
    return n;
}

/* Returns 1 if one of the groups is a subgroup of groups[i] with fewer ranks. */
static int dt__has_subgroup(const dt_group *const *groups, int n, int i) {
    for (int k = 0; k < n; k++)
        if (groups[k]->size < groups[i]->size && dt__group_contains(groups[i], groups[k])) return 1;
    return 0;
}

/* Gives t the placements of the list. An equal list of `like`, which may be NULL, is shared. */
static int dt__placements_set(dt_tensor *t, const dt_placements *list, const dt_tensor *like) {
    const dt_placements *old = like ? like->placements : NULL;
    t->placements = NULL;
    if (list->n == 0 && !list->any) return 1;
    if (old && memcmp(old, list, sizeof *old) == 0) {
        t->placements = old;
        return 1;
    }
    dt_placements *copy = (dt_placements *)dt__meta(t->ctx, sizeof *copy);
    if (copy) *copy = *list;
    t->placements = copy;
    return copy != NULL;
}

/* Applies a rule: gives y its placements. before, inner: the lengths of '.' and '^' in the rule, or
   -1 where they follow from the inputs. Returns 0 after failing the context. */
__attribute__((noinline)) static int dt__propagate_all(
    const char *op, dt_tensor *y, int rule, int before, int inner, dt_tensor *const *in, int n) {
    dt__propagation c;
    dt_placements list;
    const dt_group *groups[DT__MAX_GROUPS];
    int length[3] = { before, -1, inner };
    memset(&c, 0, sizeof c);
    memset(&list, 0, sizeof list);
    c.op = op;
    c.rule = &dt__rules[rule];
    c.y = y;
    c.n = n;
    for (int i = 0; i < n; i++) {
        if (!in[i]) continue;
        const dt_tensor *owner = dt__owner(in[i]);
        c.in[i].t = in[i];
        c.in[i].shape = in[i]->shape;
        c.in[i].linear = !(c.rule->nonlinear >> i & 1);
        c.in[i].wants_grad = in[i]->needs_grad && !y->ctx->no_grad && !(c.rule->constants >> i & 1);
        c.in[i].is_param = owner->param != NULL;
        list.any |= in[i]->placements && in[i]->placements->any;
    }
    if (c.rule->broadcast && before < 0) length[0] = y->shape.nd;
    dt__propagation_terms(&c, length);
    int n_groups = dt__groups_of(&c, groups);
    for (int i = 0; i < n_groups; i++) {
        dt__placed p = { groups[i], DT_UNPLACED, 1 };
        c.group = groups[i];
        if (dt__has_subgroup(groups, n_groups, i)) continue;
        if (!dt__propagate_over(&c, &p)) return 0;
        if (p.at.kind != DT__LOCAL) dt__placements_add(&list, p);
    }
    for (int i = 0; i < n_groups; i++)
        if (dt__has_subgroup(groups, n_groups, i)) dt__merge_subgroups(&list, groups[i]);
    return dt__placements_set(y, &list, in[0]);
}

/* Sharding propagation of an op with result y (NULL: an earlier failure). Costs a test for each
   input if all inputs are LOCAL. */
static int dt__propagate_at(
    const char *op, dt_tensor *y, int rule, int before, int inner, dt_tensor *const *in, int n) {
    int placed = 0;
    for (int i = 0; i < n; i++) placed |= in[i] && in[i]->placements;
    if (!y || !placed) return y != NULL;
    return dt__propagate_all(op, y, rule, before, inner, in, n);
}

DT__INLINE int dt__propagate(
    const char *op, dt_tensor *y, int rule, dt_tensor *a, dt_tensor *b, dt_tensor *c) {
    dt_tensor *in[3] = { a, b, c };
    return dt__propagate_at(op, y, rule, -1, -1, in, 3);
}

/* ---- reshape; statements of placements ---- */

/* A shard begins at every index of the dimensions before it, so it stays a shard if a dimension of
   the new shape begins or is divided there. Of two such dimensions, one has size 1 and nothing says
   which of them is sharded in full: then the placement is unknown, also if the shape stays, unless
   the first dimension has size 1: a batch. One index a rank could be merged with the dimension
   before it or behind it: unknown, except for heads, dimension 2, if batch and tokens stay. */
static dt__placed dt__reshape_placed(dt__placed p, dt_shape from, dt_shape to) {
    int64_t begins = p.outer, at = 1;
    int found = 0, dim = p.at.dim, unchanged = dim < to.nd && (dim < 2 || to.d[dim - 1] > 1);
    if (p.at.kind != DT_PLACEMENT_SHARD) return p;
    for (int d = 0; d < dim; d++) begins *= from.d[d];
    for (int d = 0; d <= dim && unchanged; d++) unchanged = from.d[d] == to.d[d];
    int divisible = dt_count(from) > 0 && from.d[dim] > p.outer; /* more than one index a rank */
    if (unchanged && divisible) return p;
    dt__placed q = p;
    divisible |= dt_count(from) > 0 && dim == 2 && p.outer == 1 && to.nd > 2 &&
                 to.d[0] == from.d[0] && to.d[1] == from.d[1];
    for (int d = 0; d < to.nd && divisible; at *= to.d[d++]) {
        if (at > begins || begins % at || (at * to.d[d]) % begins || at * to.d[d] == begins)
            if (at != begins) continue;
        q.at.dim = d;
        q.outer = begins / at;
        found++;
    }
    if (found == 1) return q;
    q.at = DT_UNPLACED;
    q.outer = 1;
    return q;
}

static int dt__propagate_reshape(dt_tensor *y, const dt_tensor *x) {
    dt_placements list;
    if (!x->placements) return 1;
    list = *x->placements;
    for (int i = 0; i < list.n; i++)
        list.by_group[i] = dt__reshape_placed(list.by_group[i], x->shape, y->shape);
    return dt__placements_set(y, &list, x);
}

/* Gives y the placements of x, except over `group`, where it is placed as `placement`. Over a group
   that overlaps with `group` nothing is known any more. x and y may be one tensor. */
static int dt__placement_set(
    dt_tensor *y, const dt_tensor *x, const dt_group *group, dt_placement placement) {
    dt_placements list;
    dt__placed mine = { group, placement, 1 };
    int added = 0;
    memset(&list, 0, sizeof list);
    if (x->placements) list.any = x->placements->any;
    for (int i = 0; x->placements && i < x->placements->n; i++) {
        dt__placed p = x->placements->by_group[i];
        if (dt__group_contains(group, p.group)) continue;
        if (dt__group_contains(p.group, group)) { /* dt__placed_over finds the smaller one first */
            if (!added++) dt__placements_add(&list, mine);
            p.at = DT_UNPLACED;
        }
        dt__placements_add(&list, p);
    }
    if (!added) dt__placements_add(&list, mine);
    return dt__placements_set(y, &list, NULL);
}

/* Returns 1 if x may be placed as `placement` over the group; else fails the context. `hint` says
   how to mend it. */
static int dt__placement_expect(const char *op, const dt_tensor *x, const dt_group *group,
    dt_placement placement, const char *hint) {
    if (!group || group->size == 1) return 1;
    if (!x->placements && !dt__owner((dt_tensor *)x)->param) return 1;
    dt__placed p = dt__placed_over(x, group);
    int kind = p.at.kind, wants_grad = x->needs_grad && !x->ctx->no_grad;
    int known = kind != DT_PLACEMENT_NONE && kind != DT__LOCAL;
    int equal = kind == placement.kind &&
                (kind != DT_PLACEMENT_SHARD || (p.at.dim == placement.dim && p.outer == 1));
    /* REPLICATE and COPY differ only in the gradient */
    if (kind <= DT_PLACEMENT_COPY && placement.kind <= DT_PLACEMENT_COPY) equal |= !wants_grad;
    if (!known || equal) return 1;
    return dt_fail(x->ctx, DT_ERR_ARG, "%s(%s): %s %s is %s%s over '%s', not %s: %s", op, x->name,
               x->name, dt__shape_text(x->shape).s, dt__placement_text(p.at).s,
               p.outer > 1 ? ", merged with other dimensions," : "", dt__group_name(group),
               dt__placement_text(placement).s, hint) == DT_OK;
}

/* Refuses a loss that is COPY: its backward begins with the whole gradient on every rank. Over
   ranks whose gradients the training state adds, each rank's loss is its part of the sum. */
static int dt__loss_expect(const char *op, const dt_tensor *loss) {
    const dt_placements *list = loss->placements;
    for (int i = 0; list && i < list->n; i++) {
        const dt_group *group = list->by_group[i].group;
        if (list->by_group[i].at.kind != DT_PLACEMENT_COPY || dt__sums_over(loss->ctx, NULL, group))
            continue;
        dt__text hint = dt__format(
            "every rank computes the same loss after dt_tp_enter, so the gradient would be added "
            "once for each rank; compute it outside of the region, or divide it by the ranks and "
            "state that with dt_place(loss, %s, DT_UNPLACED)",
            dt__group_name(group));
        if (!dt__placement_expect(op, loss, group, DT_REPLICATE, hint.s)) return 0;
    }
    return 1;
}

dt_tensor *dt_place(dt_tensor *x, dt_comm *comm, dt_placement placement) {
    const dt_group *group = (const dt_group *)comm;
    if (!x || x->ctx->status != DT_OK) return NULL;
    int shard = placement.kind == DT_PLACEMENT_SHARD,
        bad = placement.kind < 0 || placement.kind > DT_PLACEMENT_NONE ||
              (shard && (placement.dim < 0 || placement.dim >= x->shape.nd));
    if (bad || dt__owner(x)->param) {
        dt_fail(x->ctx, DT_ERR_ARG, "dt_place(%s): %s %s: %s", x->name, dt__shape_text(x->shape).s,
            dt__placement_text(placement).s,
            bad ? "there is no such placement or dimension"
                : "dt_param_desc says how a parameter is placed");
        return NULL;
    }
    if (!group || group->size == 1) return x;
    if (!shard) placement.dim = 0;
    dt_placement known = dt_placement_of(x, comm);
    if (known.kind == placement.kind && known.dim == placement.dim &&
        known.kind < DT_PLACEMENT_NONE)
        return x; /* the order of the shards stays */
    if (placement.kind != DT_PLACEMENT_NONE &&
        !dt__placement_expect(
            "dt_place", x, group, placement, "dt_redistribute changes a placement"))
        return NULL;
    return dt__placement_set(x, x, group, placement) ? x : NULL;
}

dt_placement dt_placement_of(const dt_tensor *x, const dt_comm *comm) {
    const dt_group *group = (const dt_group *)comm;
    dt__placed p = { group, DT_UNPLACED, 1 };
    if (x && group && group->size > 1) p = dt__placed_over(x, group);
    return p.at.kind == DT__LOCAL || p.outer > 1 ? DT_UNPLACED : p.at;
}

// ==== 18. Blocks and backward: code =============================================================

/* A block runs its function with itself as the current block. The backward walks the nodes from
   newest to oldest, and enters a child block when it reaches the block's node. Recompute
   (arXiv:1604.06174): the backward of a recomputed block first runs fn again as a new block,
   `rerun`, and then walks the nodes of `rerun`. The data of `rerun` are in arenas that one
   recomputed block frees and the next one reuses. So the peak memory of L blocks is that of one
   block:

       forward    [block 1] [block 2] [block 3]         each drops its data, and keeps x and out
       backward   [rerun 3] [back 3] drop [rerun 2] [back 2] drop [rerun 1] [back 1] drop */

/* Returns 1 if the node has an input i. A user's backward may pass any value of i. */
static int dt__has_input(const dt_node *node, int i) {
    return node && i >= 0 && i < node->n_in && node->in[i];
}

int dt_wants(const dt_node *node, int i) { return dt__has_input(node, i) && (node->want >> i & 1); }

/* Allocates memory that is valid until the end of the backward of block `home`. */
static void *dt__grad_alloc(dt_ctx *ctx, dt_block_state *home, size_t bytes) {
    if (!home->grads) home->grads = dt__arena_acquire(ctx, &ctx->grad_pool);
    return home->grads ? dt__arena_alloc(ctx, home->grads, bytes) : NULL;
}

/* Allocates the gradient of t, which is not a parameter. */
static void *dt__new_grad(dt_tensor *t) {
    size_t bytes = DT__ASAN ? dt__bytes(t) : (dt__reserved_bytes(t) + 63) / 64 * 64;
    int how = t->grad_storage;
    if (how == DT__GRAD_IN_ARENA && dt__has_buffer(t)) how = DT__GRAD_OWN;
    if (t->needs_grad == DT__KEEP_GRAD) how = DT__GRAD_KEPT;
    t->grad_storage = how;
    if (how == DT__GRAD_IN_ARENA) return t->grad = dt__grad_alloc(t->ctx, t->block, bytes);
    dt_mem mem = how == DT__GRAD_TRANSIENT ? DT_MEM_COMM : DT_MEM_ACTS;
    return t->grad = dt__buffer_acquire_at(t->ctx, mem, bytes, how != DT__GRAD_OWN);
}

dt_dtype dt_grad_dtype(const dt_tensor *t) {
    return t ? dt__wide(t->dtype, t->param != NULL) : DT_F32;
}

/* Returns the gradient array as dt_grad_raw does, for ops that can write the f32 gradient of a bf16
   or f16 parameter themselves. Sets *wide to 1 if in[i] is a bf16 or f16 parameter, else to 0. */
static void *dt__grad_wide(dt_node *node, int i, int *accumulate, int *wide) {
    dt_tensor *t = dt__owner(node->in[i]);
    *wide = t->param && dt__narrow(t->dtype);
    if (t->param) return dt__param_grad(t->ctx, t, accumulate);
    *accumulate = t->grad != NULL;
    return t->grad ? t->grad : dt__new_grad(t);
}

/* An op that does not use dt__grad_wide writes a gradient in the tensor's own type. After its
   backward dt__widen_grads adds that gradient to the f32 gradient of the parameter. */
void *dt_grad_raw(dt_node *node, int i, int *accumulate) {
    if (!dt__has_input(node, i)) {
        if (node && node->out)
            dt_fail(node->out->ctx, DT_ERR_ARG, "dt_grad: %s has no input %d: it has %d inputs%s",
                node->name, i, node->n_in,
                i >= 0 && i < node->n_in ? ", and this one is NULL" : "");
        return NULL;
    }
    if (!accumulate) return NULL;
    dt_tensor *t = dt__owner(node->in[i]);
    int wide = 0;
    if (!t->param || !dt__narrow(t->dtype)) return dt__grad_wide(node, i, accumulate, &wide);
    *accumulate = node->narrow[i] != NULL;
    dt_block_state *home = node->out ? node->out->block : t->ctx->root;
    if (!node->narrow[i]) node->narrow[i] = dt__grad_alloc(t->ctx, home, dt__bytes(t));
    return node->narrow[i];
}

/* Mixed precision: adds the 16-bit gradients that an op wrote to the parameters' f32 gradients. */
static dt_status dt__widen_grads(dt_ctx *ctx, dt_node *n) {
    for (int i = 0; i < n->n_in; i++) {
        if (!n->narrow[i]) continue;
        dt_tensor *t = dt__owner(n->in[i]);
        dt_cast_args a = { .dtype = DT_F32,
            .from = t->dtype,
            .in = n->narrow[i],
            .count = (size_t)dt_count(t->shape) };
        a.out = dt__param_grad(ctx, t, &a.accumulate);
        n->narrow[i] = NULL;
        if (!a.out || DT__KERNEL(ctx, n->name, cast, &a) != DT_OK) return dt_error(ctx);
    }
    return DT_OK;
}

/* Like dt_grad_raw(n, 0, accumulate), for an op that reads each element of in[0] before it writes
   the element's gradient. If no other backward reads in[0]'s data, the gradient overwrites them. */
static void *dt__grad_in_place(dt_node *n, int *accumulate) {
    dt_tensor *x = n->in[0];
    const dt_node *maker = x->producer;
    if (!maker || maker->out != x || !(maker->unread_inputs & DT__UNREAD_OUTPUT) || x->grad ||
        x->readers != 1 || x->read_by_weights || x->needs_grad == DT__KEEP_GRAD ||
        x->storage != DT__IN_ARENA || !dt__has_buffer(x) || x->block == x->ctx->root ||
        x->block != n->out->block || x->grad_storage != DT__GRAD_IN_ARENA || x->grad_flow ||
        n->out->deferred_reads || x->ctx->check_finite)
        return dt_grad_raw(n, 0, accumulate);
    x->grad = x->data;
    x->data = NULL;
    x->storage = DT__OVERWRITTEN;
    x->grad_storage = DT__GRAD_IN_PLACE;
    *accumulate = 0;
    return x->grad;
}

void *dt_grad(dt_node *node, int i) {
    int accumulate = 0;
    void *g = dt_grad_raw(node, i, &accumulate);
    dt_tensor *t = g ? dt__owner(node->in[i]) : NULL;
    if (g && !accumulate) dt__fill(t->ctx, t->dtype, g, (size_t)dt_count(t->shape), 0);
    return g;
}

static void dt__notify_phase(dt_ctx *ctx, const dt_block_state *b, dt_phase phase, int entering) {
    dt_event event = { .phase = phase,
        .block = b->index,
        .micro = ctx->micro,
        .last = ctx->micro == ctx->micro_count - 1,
        .stage = ctx->root->stage };
    ctx->entered_block = (dt_block_state *)b;
    for (dt_listener *l = ctx->listeners; l; l = l->next) {
        if (entering && l->enter) l->enter(ctx, &event, l->user);
        if (!entering && l->leave) l->leave(ctx, &event, l->user);
    }
    if (!entering) ctx->entered_block = b->parent;
}

static dt_block_state *dt__block_open(
    dt_ctx *ctx, dt_block_state *parent, int index, int recomputed) {
    dt_block_state *b = dt__block_acquire(ctx, recomputed);
    if (!b) return NULL;
    b->parent = parent;
    b->sibling = parent->children;
    parent->children = b;
    b->index = index;
    b->no_grad = ctx->no_grad;
    if (recomputed) b->acts = dt__arena_acquire(ctx, &ctx->recompute_pool);
    return b->acts && dt__block_size_begin(ctx, b) == DT_OK ? b : NULL;
}

/* Ends the forward of block b, whose function has returned y: drops the data of transient and
   recomputed tensors and, if the block began under dt_no_grad, of all other tensors except the
   output, which moves to the parent. A second run keeps its transient tensors, because its backward
   follows at once. */
static void dt__block_end_forward(dt_block_state *b, dt_tensor *y) {
    dt_tensor *output = y ? dt__owner(y) : NULL, **at = &b->tensors;
    const dt_tensor *used = output && output->shares ? output->shares : output;
    while (*at) {
        dt_tensor *t = *at;
        if (t->storage == DT__TRANSIENT && !b->ctx->recomputing) dt__data_drop(t);
        if (t->storage == DT__RECOMPUTED && !b->is_rerun && t != output && t != used)
            dt__data_drop(t);
        if (t != output && b->no_grad) dt__data_drop_if_unread(t);
        if (t != output || (t->storage != DT__NO_GRAD && t->storage != DT__KEPT)) {
            at = &t->next;
            continue;
        }
        *at = t->next;
        t->block = b->parent;
        t->next = t->block->tensors;
        t->block->tensors = t;
    }
}

/* Under dt_no_grad a block with input x begins in `parent`: drops the last block's input and output
   if x is that output or was made after it. */
static void dt__no_grad_begin(dt_block_state *parent, dt_tensor *x) {
    dt_tensor *last[2] = { parent->last_x, parent->last_y }, *t = parent->tensors;
    if (!x || !last[1]) return;
    x = dt__owner(x);
    while (t && t != x && t != last[1]) t = t->next;
    for (int i = 0; t && t == x && i < 2; i++)
        if (last[i] && last[i] != x && last[i]->block == parent) dt__data_drop_if_unread(last[i]);
}

/* A block in `parent` has ended under dt_no_grad: saves input and output for dt__no_grad_begin. */
static void dt__no_grad_end(dt_block_state *parent, dt_tensor *x, dt_tensor *y, int keep) {
    dt_tensor *last[2] = { x ? dt__owner(x) : NULL, y ? dt__owner(y) : NULL };
    for (int i = 0; keep && i < 2; i++)
        if (last[i] && last[i]->storage == DT__NO_GRAD) last[i]->storage = DT__KEPT;
    parent->last_x = last[0];
    parent->last_y = last[1];
}

/* Runs fn with b as the current block. Returns the result of fn; NULL after a failure. */
static dt_tensor *dt__block_run(dt_block_state *b, dt_block_fn fn, dt_tensor *x, void *user) {
    dt_ctx *ctx = b->ctx;
    dt_block_state *outer = ctx->current;
    uint64_t fingerprint = ctx->fingerprint;
    dt__flows_arrive(ctx); /* those of the outer block */
    ctx->current = b;
    ctx->fingerprint = 0;
    dt__notify_phase(ctx, b, DT_FORWARD, 1);
    dt_tensor *y = fn(x, user);
    dt__flows_arrive(ctx);
    dt__notify_phase(ctx, b, DT_FORWARD, 0);
    ctx->current = outer;
    dt__block_end_forward(b, y);
    dt__block_size_end(ctx, b);
    b->fingerprint = ctx->fingerprint;
    ctx->fingerprint = b->fingerprint
                           ? dt__digest(fingerprint, &b->fingerprint, sizeof b->fingerprint) | 1
                           : fingerprint;
    if (!y && !ctx->recomputing)
        dt_fail(ctx, DT_ERR_ARG, "dt_block %d: its function returned NULL", b->index);
    return ctx->status == DT_OK ? y : NULL;
}

static int dt__made_in(const dt_block_state *b, const dt_tensor *t) {
    const dt_block_state *home = t->block;
    while (home && home != b) home = home->parent;
    return home != NULL;
}

/* Returns the output of a recomputed block: a copy of y in the parent's memory, or y itself if y
   was made outside the block. */
static dt_tensor *dt__block_output(dt_ctx *ctx, dt_block_state *b, dt_tensor *y) {
    b->y = y;
    if (!y || dt__fail_if_dropped("dt_block", y) || !dt__made_in(b, dt__owner(y))) return y;
    dt_tensor *out = dt__new_output(ctx, y, y->dtype, y->shape, y->name, 0);
    if (!out || dt__move(ctx, out->data, dt__owner(y)->data, dt__bytes(y)) != DT_OK) return NULL;
    out->needs_grad = y->needs_grad ? dt__owner(y)->needs_grad : 0;
    out->placements = y->placements;
    out->block = b;
    b->out = out;
    return out;
}

dt_tensor *dt_block_at(dt_ctx *ctx, dt_block_fn fn, dt_tensor *x, void *user, dt_block_desc desc) {
    if (!ctx || ctx->status != DT_OK || !dt__root(ctx)) return NULL;
    if (!fn) dt_fail(ctx, DT_ERR_ARG, "dt_block: no function");
    if (!fn || (x && dt__fail_if_dropped("dt_block", x))) return NULL;
    dt_block_state *parent = ctx->current;
    if (ctx->no_grad) desc.recompute = 0; /* the block saves nothing in any case */
    if (ctx->no_grad) dt__no_grad_begin(parent, x);
    int recomputed = desc.recompute || parent->acts != &parent->own_acts;
    dt_block_state *b = dt__block_open(ctx, parent, ++ctx->root->n_blocks, recomputed);
    if (!b) return NULL;
    if (desc.user_bytes && user) {
        void *copy = dt__arena_alloc(ctx, &b->meta, desc.user_bytes);
        if (!copy) return NULL;
        user = memcpy(copy, user, desc.user_bytes);
    }
    if (desc.recompute) b->fn = fn;
    b->user = user;
    dt_tensor *y = dt__block_run(b, fn, x, user);
    if (b->no_grad) dt__no_grad_end(parent, x, y, desc.keep);
    if (desc.recompute) {
        y = dt__block_output(ctx, b, y);
        dt__block_drop(ctx, b);
    }
    if (ctx->status != DT_OK) return NULL;
    if (!b->fingerprint) return y;
    dt_node *node = (dt_node *)dt__meta(ctx, sizeof *node);
    if (!node) return NULL;
    node->name = "dt_block";
    node->child = b;
    node->in[0] = x;
    node->n_in = 1;
    node->prev = parent->newest;
    parent->newest = node;
    return y;
}

dt_tensor *dt_block(dt_ctx *ctx, dt_block_fn fn, dt_tensor *x, void *user) {
    dt_block_desc plain = { 0, 0, 0 };
    return dt_block_at(ctx, fn, x, user, plain);
}

int dt_recomputing(const dt_ctx *ctx) { return ctx && ctx->recomputing > 0; }

void dt_micro(dt_ctx *ctx, int index, int count) {
    if (!ctx || ctx->status != DT_OK) return;
    if (count < 1 || index < 0 || index >= count) {
        dt_fail(ctx, DT_ERR_ARG, "dt_micro: micro-batch %d of %d", index, count);
        return;
    }
    ctx->micro = index;
    ctx->micro_count = count;
}

void dt_no_grad(dt_ctx *ctx, int on) {
    if (ctx) ctx->no_grad = on;
}

void dt_check_finite(dt_ctx *ctx, int on) {
    if (!ctx) return;
    ctx->check_finite = on;
    ctx->inf_op = NULL;
}

/* ---- dt_keep ---- */

static dt_ctx *dt__op_context(const char *op, int n, dt_tensor *a, dt_tensor *b, dt_tensor *c);

/* A tensor that belongs to no block, so no reset frees its data. When it is replaced it joins the
   list of the tape's root, and the next reset frees its data as those of all other tensors. The
   struct is used again one reset later: until then a use of the replaced tensor fails. */
typedef struct dt__kept {
    dt_tensor t;
    dt_placements placements;
    char *name;
    int current;         /* 1: the newest of its name */
    int64_t replaced_at; /* value of ctx->resets */
    struct dt__kept *next;
} dt__kept;

static dt__kept *dt__kept_find(const dt_ctx *ctx, const char *name) {
    dt__kept *k = ctx->keep_list;
    while (k && (!k->current || strcmp(k->name, name) != 0)) k = k->next;
    return k;
}

/* Returns the name under which dt_keep made t, or NULL if dt_keep did not make it. */
static const char *dt__kept_name(const dt_tensor *t) {
    const dt__kept *k = t->ctx->keep_list;
    while (k && &k->t != t) k = k->next;
    return k ? k->name : NULL;
}

/* Returns a struct for a tensor of this name; NULL after a failure. */
static dt__kept *dt__kept_struct(dt_ctx *ctx, const char *name) {
    dt__kept *k = ctx->keep_list;
    while (k && (k->current || k->t.storage != DT__DEAD || ctx->resets < k->replaced_at + 2 ||
                    strcmp(k->name, name) != 0))
        k = k->next;
    if (k) return k;
    k = (dt__kept *)dt__host_zeroed(ctx, sizeof *k + strlen(name) + 1, "dt_keep");
    if (!k) return NULL;
    k->name = strcpy((char *)(k + 1), name);
    k->t.storage = DT__DEAD;
    k->next = ctx->keep_list;
    return ctx->keep_list = k;
}

static void dt__kept_replace(dt_ctx *ctx, dt__kept *k) {
    if (!k) return;
    k->current = 0;
    k->replaced_at = ctx->resets;
    k->t.block = ctx->root;
    k->t.next = ctx->root->tensors;
    ctx->root->tensors = &k->t;
}

dt_tensor *dt_keep(dt_tensor *t, const char *name) {
    dt_ctx *ctx = dt__op_context("dt_keep", 1, t, NULL, NULL);
    if (!ctx || !dt__root(ctx)) return NULL;
    if (!name || !*name) dt_fail(ctx, DT_ERR_ARG, "dt_keep(%s): a name is needed", t->name);
    for (const dt_block_state *b = ctx->current; b; b = b->parent)
        if (b->acts != &b->own_acts)
            dt_fail(ctx, DT_ERR_ARG,
                "dt_keep(%s): inside a recomputed dt_block, which runs twice; return the tensor "
                "from the block and keep it there",
                t->name);
    dt__kept *k = ctx->status == DT_OK ? dt__kept_struct(ctx, name) : NULL;
    if (!k) return NULL;
    memset(&k->t, 0, sizeof k->t);
    k->t.ctx = ctx;
    k->t.name = k->name;
    k->t.dtype = t->dtype;
    k->t.shape = t->shape;
    k->t.max_rows = t->max_rows;
    k->t.storage = DT__KEPT;
    if (t->placements) {
        k->placements = *t->placements;
        k->t.placements = &k->placements;
    }
    if (!dt__data_alloc(&k->t) || dt__move(ctx, k->t.data, t->data, dt__bytes(t)) != DT_OK) {
        dt__data_drop(&k->t);
        k->t.storage = DT__DEAD;
        return NULL;
    }
    dt__kept_replace(ctx, dt__kept_find(ctx, name));
    k->current = 1;
    return &k->t;
}

dt_status dt_forget(dt_ctx *ctx, const char *name) {
    if (!ctx || ctx->status != DT_OK) return ctx ? ctx->status : DT_ERR_ARG;
    dt__kept *k = name && dt__root(ctx) ? dt__kept_find(ctx, name) : NULL;
    if (!k)
        return dt_fail(ctx, DT_ERR_ARG, "dt_forget: dt_keep has no tensor '%s'",
            name ? dt__printable_name(name).s : "");
    dt__kept_replace(ctx, k);
    return DT_OK;
}

/* Frees the structs; the data are freed with all buffers. */
static void dt__kept_free(dt_ctx *ctx) {
    while (ctx->keep_list) {
        dt__kept *k = ctx->keep_list;
        ctx->keep_list = k->next;
        dt_free(ctx, DT_MEM_HOST, k, sizeof *k + strlen(k->name) + 1);
    }
}

dt_tensor *dt_require_grad(dt_tensor *t) {
    if (!t || t->ctx->status != DT_OK) return NULL;
    dt_tensor *owner = dt__owner(t);
    const char *why = dt__integer(t->dtype) ? "integers have no gradient"
                      : owner->param        ? "the parameter is frozen"
                      : !owner->block       ? "a tensor of dt_keep has no gradient; "
                                              "use an op's result"
                      : owner->readers      ? "an op has used it already, without a gradient"
                                            : NULL;
    if (owner->needs_grad && owner->param) return t;
    if (why && !owner->needs_grad) {
        dt_fail(t->ctx, DT_ERR_ARG, "dt_require_grad(%s): %s", t->name, why);
        return NULL;
    }
    owner->needs_grad = t->needs_grad = DT__KEEP_GRAD;
    owner->grad_storage = DT__GRAD_IN_ARENA;
    return t;
}

/* Counts down the pending uses of a node's parameters; called after the backward of the node. When
   a bucket has no parameter with pending uses left, its gradient is complete. */
static void dt__node_uses_done(dt_ctx *ctx, const dt_node *n) {
    for (int i = 0; i < n->n_in; i++) {
        const dt_tensor *t = n->in[i] ? dt__owner(n->in[i]) : NULL;
        if (!t || !t->param || !t->needs_grad || t->param->stage != ctx->root->stage) continue;
        dt_bucket *bucket = t->param->bucket;
        if (--ctx->root->pending_uses[t->param->index] == 0 && --bucket->pending_params == 0)
            dt__grad_complete(ctx, bucket);
    }
}

static dt_status dt__linear_back(dt_node *n);
static int dt__linear_fuses(const dt_node *n);
static int dt__linear_output_in_place(dt_node *n);
static dt_status dt__block_rerun(dt_block_state *b, dt_tensor *x);

/* Makes dropped data again: those of a tensor by the op that made it, those of a recomputed block
   by a second run of its function. The inputs come first. */
static dt_status dt__make_again(dt_ctx *ctx, dt_node *n) {
    for (int i = 0; i < n->n_in && !n->recompute_from_saved; i++) {
        if (dt__make_readable(ctx, n->in[i]) != DT_OK) return dt_error(ctx);
        if (!n->child && n->in[i] && dt__owner(n->in[i])->param &&
            dt__ensure_values(n->name, n->in[i]) != DT_OK)
            return dt_error(ctx);
    }
    if (n->child) return dt__block_rerun(n->child, n->in[0]);
    int in_place = n->recompute_from_saved && dt__linear_output_in_place(n);
    return in_place || dt__data_alloc(n->out) ? n->recompute(n) : dt_error(ctx);
}

/* Makes the data of x again if x is a transient or recomputed tensor, or a view of one, and was
   dropped. */
static dt_status dt__make_readable(dt_ctx *ctx, dt_tensor *x) {
    dt_tensor *t = x ? dt__owner(x) : NULL;
    dt_node *n = t ? t->producer : NULL;
    if (!t || !((n && n->recompute) || t->shares)) return DT_OK;
    if (!t->data && t->shares) {
        if (dt__make_readable(ctx, t->shares) != DT_OK) return dt_error(ctx);
        t->data = t->shares->data;
    }
    if (!t->data && dt__make_again(ctx, n) != DT_OK) return dt_error(ctx);
    x->data = t->data;
    return DT_OK;
}

/* Makes the inputs of a node readable for its backward: makes the dropped tensors again that this
   backward, or this half of it, reads, and gathers parameters. */
static dt_status dt__make_inputs_readable(dt_ctx *ctx, dt_node *n, dt_phase phase) {
    /* a deferred weight half follows soon: its input travels while the input half is computed */
    int is_split = phase == DT_BACKWARD_INPUT && ctx->root->backward_done == DT__INPUT_HALF_DONE;
    /* x is made again after a fused dx, in the memory of its pre-activation */
    int is_fused = phase == DT_BACKWARD && n->backward == dt__linear_back && dt__linear_fuses(n);
    unsigned unread = n->unread_inputs | (is_split || is_fused ? n->weight_inputs : 0);
    for (int i = 0; i < n->n_in; i++) {
        if (!(unread >> i & 1) && dt__make_readable(ctx, n->in[i]) != DT_OK) return dt_error(ctx);
        /* a linear op computes dx while x is still arriving */
        if (n->in[i] && n->backward != dt__linear_back &&
            dt__flow_arrive(ctx, dt__owner(n->in[i])->flow) != DT_OK)
            return dt_error(ctx);
        if (n->in[i] && dt__owner(n->in[i])->param && dt__ensure_values(n->name, n->in[i]) != DT_OK)
            return dt_error(ctx);
    }
    return DT_OK;
}

static void dt__block_backward(dt_block_state *b, dt_phase phase);

/* Fails if a gradient that the backward of a node has written is not finite. */
static dt_status dt__check_grads(dt_ctx *ctx, const dt_node *n) {
    for (int i = 0; i < n->n_in; i++) {
        const dt_tensor *t = n->want >> i & 1 ? dt__owner(n->in[i]) : NULL;
        if (!t) continue;
        dt_dtype dtype = dt_grad_dtype(t);
        void *grad = t->grad;
        if (t->param)
            grad = t->param->grad_started ? (char *)t->param->bucket->micro_grad +
                                                t->param->offset * dt_dtype_size(dtype)
                                          : NULL;
        /* what ops write to the padding of a slice does not count */
        if (t->param && grad) dt__zero_padding(ctx, t->param, dtype, grad);
        if (dt__flow_arrive(ctx, t->grad_flow) != DT_OK) return dt_error(ctx);
        int64_t at = dt__find_bad(ctx, dtype, grad, dt_count(t->shape), 1);
        if (at < 0) continue;
        const dt_tensor *y = n->out ? dt__owner(n->out) : NULL;
        int had = y && dt__find_bad(ctx, y->dtype, y->grad, dt_count(y->shape), 1) >= 0;
        return dt_fail(ctx, DT_ERR_NUMERIC,
            "backward of %s, %s: element %lld of the gradient of %.40s %.60s is not finite; the "
            "gradient of its output %s",
            n->name, dt__place_text(ctx, ctx->entered_block).s, (long long)at, t->name,
            dt__shape_text(t->shape).s, had ? "already was not" : "is finite");
    }
    return DT_OK;
}

/* The weight half of an op reads x. If the data of x were dropped, its op runs again and reads its
   inputs. */
static void dt__keep_for_weights(dt_tensor *x) {
    dt_tensor *t = dt__owner(x);
    if (t->shares) t = t->shares;
    const dt_node *n =
        t->storage == DT__TRANSIENT || t->storage == DT__RECOMPUTED ? t->producer : NULL;
    t->read_by_weights = 1;
    for (int i = 0; n && n->recompute && !n->recompute_from_saved && i < n->n_in; i++)
        if (n->in[i]) dt__keep_for_weights(n->in[i]);
}

/* After the input half of a node: drops the output's data unless the weight half of a node reads
   them. The nodes that read the output have come before, because the backward goes from new to
   old. */
static void dt__drop_after_input_half(const dt_node *n, int weights) {
    for (int i = 0; i < n->n_in && weights; i++)
        if (n->in[i] && !(n->unread_inputs >> i & 1)) dt__keep_for_weights(n->in[i]);
    dt_tensor *out = n->out;
    if (!out || out->storage != DT__SPLIT_BACKWARD || out->base || out->read_by_weights) return;
    if (!weights || n->unread_inputs & DT__UNREAD_OUTPUT) dt__data_drop(out);
}

/* Runs the backward of an op, or one half of it. */
static void dt__op_backward(dt_ctx *ctx, dt_node *n, dt_phase phase) {
    n->want = 0;
    /* without an output the node is an auxiliary loss, whose backward needs no output gradient */
    int reached = !n->out || dt__owner(n->out)->grad, weights = 0;
    for (int i = 0; reached && i < n->n_in; i++) {
        const dt_tensor *t = n->in[i];
        if (!t || !t->needs_grad) continue;
        int is_weight = dt__owner(n->in[i])->param != NULL;
        weights |= is_weight;
        if (phase == DT_BACKWARD || is_weight == (phase == DT_BACKWARD_WEIGHT)) n->want |= 1u << i;
    }
    /* a linear op waits for the pieces of its output's gradient itself */
    if (n->out && (!n->want || n->backward != dt__linear_back))
        dt__flow_arrive(ctx, dt__owner(n->out)->grad_flow);
    if (n->want && ctx->status == DT_OK) {
        dt_status status = dt__make_inputs_readable(ctx, n, phase);
        if (status == DT_OK) status = n->backward(n);
        if (status == DT_OK) status = dt__widen_grads(ctx, n);
        if (status != DT_OK) dt_fail(ctx, status, "backward of %s", n->name);
        if (ctx->check_finite && ctx->status == DT_OK) dt__check_grads(ctx, n);
    }
    int is_dropped =
        n->out && (n->out->storage == DT__TRANSIENT || n->out->storage == DT__RECOMPUTED);
    if (n->out && n->out->deferred_reads)
        n->out->drop_after_deferred = is_dropped;
    else if (is_dropped)
        dt__data_drop(n->out);
    /* the weight half of the backward still reads the gradient of an output of weights */
    if (n->out && (phase != DT_BACKWARD_INPUT || !weights)) dt__grad_drop(n->out, 0);
    if (phase != DT_BACKWARD_INPUT) dt__node_uses_done(ctx, n);
    if (phase == DT_BACKWARD_INPUT) dt__drop_after_input_half(n, weights);
}

/* Deferred weight halves. While the gradient of a layer's input is on its way to or from other
   ranks (dt__flow), the backward has nothing to do but products of weight gradients. So a linear op
   with such traffic runs its input half at once and its weight half later, when the backward is
   about to wait for traffic. When that is depends on the program only, never on time, so all ranks
   run the same operations in the same order, and a dry run counts the same memory:

       products    dx2 | dx1 | dw2 | (wait) | dw1 | ...
       link              | dx1 ---------- |   | dy of the next layer |

   The halves run in the order of the backward, before the block's backward ends. */

/* Returns 1 if the op's backward runs in two halves because its gradients travel in pieces. */
static int dt__defers_weights(const dt_ctx *ctx, const dt_node *n, dt_phase phase) {
    if (phase != DT_BACKWARD || n->backward != dt__linear_back || ctx->check_finite) return 0;
    const dt_tensor *x = n->in[0], *w = n->in[1];
    int travels = n->out->flow || n->out->grad_flow || x->grad_flow;
    return travels && x->needs_grad && !dt__owner(n->in[0])->param && w->needs_grad;
}

/* Counts a deferred weight half that reads x (change 1), or the end of one (-1), after which x may
   be dropped. A transient x is made again from its op's inputs, so these stay too. */
static void dt__count_deferred(dt_tensor *x, int change) {
    dt_tensor *t = dt__owner(x);
    const dt_node *n = t->storage == DT__TRANSIENT ? t->producer : NULL;
    t->deferred_reads += change;
    if (t->deferred_reads == 0 && t->drop_after_deferred) dt__data_drop(t);
    if (t->shares) dt__count_deferred(t->shares, change);
    for (int i = 0; n && i < n->n_in && !t->shares; i++)
        if (n->in[i]) dt__count_deferred(n->in[i], change);
}

/* Returns 1 if an op of the block whose backward comes after n's has traffic. */
static int dt__traffic_follows(const dt_node *n) {
    for (n = n ? n->prev : NULL; n; n = n->prev)
        if (n->backward == dt__linear_back && (n->out->flow || n->in[0]->grad_flow)) return 1;
    return 0;
}

/* Runs deferred weight halves, the oldest first. If the caller is about to wait for the gradient of
   node n, leaves the newest half for the traffic of the block's next layer. n NULL: runs all. */
static void dt__run_deferred(dt_ctx *ctx, const dt_node *n) {
    int keep = dt__traffic_follows(n), count = 0;
    for (const dt_node *d = ctx->deferred; d; d = d->next_deferred) count++;
    for (; count > keep; count--) {
        dt_node *first = ctx->deferred;
        ctx->deferred = first->next_deferred;
        if (ctx->status == DT_OK) dt__op_backward(ctx, first, DT_BACKWARD_WEIGHT);
        dt__count_deferred(first->in[0], -1);
    }
}

/* Returns 1 if a deferred weight half and the op n use the same parameter: its gradient is summed
   in the order of the backward. */
static int dt__shares_deferred(const dt_ctx *ctx, const dt_node *n) {
    for (const dt_node *d = ctx->deferred; d; d = d->next_deferred)
        for (int i = 0; i < n->n_in; i++)
            for (int k = 1; k < 3; k++)
                if (n->in[i] && d->in[k] && dt__owner(n->in[i]) == dt__owner(d->in[k])) return 1;
    return 0;
}

static void dt__node_backward(dt_ctx *ctx, dt_node *n, dt_phase phase) {
    if (n->child) {
        dt_block_state *b = n->child;
        if (b->fn && phase != DT_BACKWARD_WEIGHT) dt__make_again(ctx, n);
        if (ctx->status == DT_OK) dt__block_backward(b->fn ? b->rerun : b, phase);
        if (ctx->status == DT_OK && b->fn && phase != DT_BACKWARD_INPUT)
            dt__block_drop(ctx, b->rerun);
        return;
    }
    if (dt__shares_deferred(ctx, n)) dt__run_deferred(ctx, NULL);
    if (!dt__defers_weights(ctx, n, phase)) {
        dt__op_backward(ctx, n, phase);
        return;
    }
    dt__op_backward(ctx, n, DT_BACKWARD_INPUT);
    dt_node **last = &ctx->deferred;
    while (*last) last = &(*last)->next_deferred;
    *last = n;
    n->next_deferred = NULL;
    dt__count_deferred(n->in[0], 1);
}

/* Returns a description of a tensor: "dt_add f32 (2,3)". */
static dt__text dt__tensor_text(const dt_tensor *t) {
    return t ? dt__format(
                   "%.20s %s %.60s", t->name, dt_dtype_name(t->dtype), dt__shape_text(t->shape).s)
             : dt__format("nothing");
}

/* Returns 1 if the second run of b recorded the same ops as the first and returned a matching
   tensor; otherwise fails the context and returns 0. */
static int dt__block_check_rerun(const dt_block_state *b, dt_tensor *y) {
    dt_ctx *ctx = b->ctx;
    int alike = !y == !b->y && b->rerun->fingerprint == b->fingerprint;
    dt_tensor *first = b->y;
    if (alike && y && !b->out) alike = dt__owner(y) == dt__owner(first);
    if (alike && b->out)
        alike = dt__made_in(b->rerun, dt__owner(y)) && y->dtype == first->dtype &&
                dt__same_shape(y->shape, first->shape);
    if (alike) return 1;
    dt_fail(ctx, DT_ERR_ARG,
        "dt_block %d: run again for the backward, its function returned %s and recorded %s ops; "
        "before it returned %s. A recomputed block must repeat itself",
        b->index, dt__tensor_text(y).s,
        b->rerun->fingerprint == b->fingerprint ? "the same" : "other", dt__tensor_text(first).s);
    return 0;
}

/* Activation checkpointing (recompute). Runs the function of a recomputed block again on x and
   records its ops. Parameter uses and block numbers were counted in the first run and are not
   counted again. The gradient of the block's output becomes the gradient of the tensor that the
   second run returns. */
static dt_status dt__block_rerun(dt_block_state *b, dt_tensor *x) {
    dt_ctx *ctx = b->ctx;
    int blocks = ctx->root->n_blocks, no_grad = ctx->no_grad;
    ctx->no_grad = 0; /* as in the first run: under dt_no_grad no block is recomputed */
    dt_block_state *rerun = b->rerun = dt__block_open(ctx, b->parent, b->index, 1);
    if (rerun) {
        rerun->is_rerun = 1;
        rerun->grads = b->grads;
        b->grads = NULL;
        ctx->root->n_blocks = b->index;
        ctx->recomputing++;
        dt_tensor *y = dt__block_run(rerun, b->fn, x, b->user);
        ctx->recomputing--;
        ctx->root->n_blocks = blocks;
        if (ctx->status == DT_OK && dt__block_check_rerun(b, y) && b->out) {
            dt__owner(y)->grad = b->out->grad;
            if (b->out->grad_storage == DT__GRAD_OWN) {
                dt__owner(y)->grad_storage = DT__GRAD_OWN;
                b->out->grad_storage = DT__GRAD_IN_ARENA; /* the second run drops the buffer */
            }
            /* after dt_require_grad the gradient stays valid after the backward */
            if (b->out->needs_grad == DT__KEEP_GRAD) dt__owner(y)->needs_grad = DT__KEEP_GRAD;
        }
    }
    ctx->no_grad = no_grad;
    return ctx->status;
}

static void dt__block_backward(dt_block_state *b, dt_phase phase) {
    dt_ctx *ctx = b->ctx;
    dt__notify_phase(ctx, b, phase, 1);
    for (dt_node *n = b->newest; n && ctx->status == DT_OK; n = n->prev)
        dt__node_backward(ctx, n, phase);
    dt__run_deferred(ctx, NULL);
    dt__notify_phase(ctx, b, phase, 0);
    if (phase != DT_BACKWARD_INPUT && b != ctx->root)
        dt__arena_release(ctx, &ctx->grad_pool, &b->grads);
}

/* Sets the gradient of y, with which the backward begins: to `grad`, or to the loss scale if `grad`
   is NULL. */
static dt_status dt__backward_seed(dt_tensor *y, dt_tensor *grad) {
    dt_ctx *ctx = y->ctx;
    dt_tensor *t = dt__owner(y);
    if (grad) {
        t->grad_storage = DT__GRAD_IN_ARENA;
        t->grad = grad->data;
        return DT_OK;
    }
    if (ctx->micro == 0) ctx->bad_loss_micro = -1;
    if (ctx->bad_loss_micro < 0 && (!ctx->kernels.sync || ctx->check_finite) &&
        dt__find_bad_value(y, 1) >= 0)
        ctx->bad_loss_micro = ctx->micro;
    return dt__new_grad(t) ? dt__fill(ctx, t->dtype, t->grad, 1, ctx->loss_scale) : ctx->status;
}

void dt_loss_scale(dt_ctx *ctx, double scale) {
    if (ctx) ctx->loss_scale = scale;
}

/* Checks that the loss is not a parameter, that no block is open, and that a micro-batch runs its
   backward once, or both halves once and in order. */
static dt_status dt__backward_begin(dt_tensor *loss, dt_phase phase) {
    dt_ctx *ctx = loss->ctx;
    int done = ctx->root ? ctx->root->backward_done : 0, weights = phase == DT_BACKWARD_WEIGHT;
    const char *why =
        dt__owner(loss)->param                   ? "the loss is a parameter"
        : ctx->current != ctx->root              ? "inside a dt_block"
        : weights && done != DT__INPUT_HALF_DONE ? "dt_backward_input comes first, each once"
        : !weights && done
            ? "the backward of this micro-batch has run; add losses with dt_loss, and "
              "call dt_reset before the next forward"
            : NULL;
    if (why)
        return dt_fail(
            ctx, DT_ERR_ARG, "dt_backward%s(%s): %s", weights ? "_weight" : "", loss->name, why);
    ctx->root->backward_done = phase == DT_BACKWARD_INPUT ? DT__INPUT_HALF_DONE : DT__BACKWARD_DONE;
    dt__flows_arrive(ctx);
    return ctx->status;
}

static dt_status dt__backward_check(dt_tensor *y, dt_tensor *grad, dt_phase phase) {
    dt_ctx *ctx = y->ctx;
    if (phase < DT_BACKWARD || phase > DT_BACKWARD_WEIGHT)
        return dt_fail(ctx, DT_ERR_ARG, "dt_backward_at(%s): phase %d", y->name, (int)phase);
    if (!grad && (dt_count(y->shape) != 1 || dt__integer(y->dtype)))
        return dt_fail(ctx, DT_ERR_SHAPE, "dt_backward(%s): %s %s is no scalar", y->name,
            dt_dtype_name(y->dtype), dt__shape_text(y->shape).s);
    if (grad && grad->ctx != ctx)
        return dt_fail(
            ctx, DT_ERR_ARG, "dt_backward_at(%s): a gradient of another context", y->name);
    if (grad && (grad->dtype != y->dtype || !dt__same_shape(grad->shape, y->shape)))
        return dt_fail(ctx, DT_ERR_SHAPE, "dt_backward_at(%s): %s %s has a gradient %s", y->name,
            dt_dtype_name(y->dtype), dt__shape_text(y->shape).s, dt__tensor_text(grad).s);
    if ((phase != DT_BACKWARD_WEIGHT && dt__fail_if_dropped("dt_backward", y)) ||
        (grad && dt__fail_if_dropped("dt_backward", grad)))
        return ctx->status;
    if (grad && dt__ensure_values("dt_backward", grad) != DT_OK) return ctx->status;
    if (!y->needs_grad && !grad)
        return dt_fail(ctx, DT_ERR_ARG, "dt_backward(%s): no parameter leads to it%s", y->name,
            ctx->no_grad ? " (dt_no_grad is on)" : "");
    if (!grad && !dt__loss_expect("dt_backward", y)) return ctx->status;
    return dt__backward_begin(y, phase);
}

static dt_status dt__backward_at(dt_tensor *y, dt_tensor *grad, dt_phase phase) {
    if (!y || y->ctx->status != DT_OK) return y ? y->ctx->status : DT_ERR_ARG;
    dt_ctx *ctx = y->ctx;
    if (dt__backward_check(y, grad, phase) != DT_OK) return ctx->status;
    if (phase != DT_BACKWARD_WEIGHT && y->needs_grad && dt__backward_seed(y, grad) != DT_OK)
        return ctx->status;
    if (phase == DT_BACKWARD_INPUT) {
        dt__block_backward(ctx->root, phase);
        return ctx->status;
    }
    for (int u = 0; u < ctx->n_buckets; u++)
        if (dt_bucket_get(ctx, u)->stage == ctx->root->stage)
            dt_bucket_get(ctx, u)->pending_params = 0;
    for (int i = 0; i < ctx->n_params && ctx->root->pending_uses; i++)
        if (ctx->root->pending_uses[i] > 0) ctx->params[i]->param->bucket->pending_params++;
    dt__block_backward(ctx->root, phase);
    /* complete the other buckets of this stage too: no op used their parameters, so their gradient
       is zero */
    for (int u = ctx->n_buckets - 1; u >= 0 && ctx->status == DT_OK; u--) {
        dt_bucket *bucket = dt_bucket_get(ctx, u);
        if (bucket->stage == ctx->root->stage && bucket->pending_params != DT__COMPLETE &&
            !bucket->frozen && !bucket->paused)
            dt__grad_complete(ctx, bucket);
    }
    return ctx->status;
}

DT__DEFINE_AT_SITE(dt_status, backward_at, y ? y->ctx : NULL,
    (dt_tensor * y, dt_tensor *grad, dt_phase phase), y, grad, phase)
dt_status(dt_backward)(dt_tensor *loss) { return (dt_backward_at)(loss, NULL, DT_BACKWARD); }
dt_status(dt_backward_input)(dt_tensor *loss) {
    return (dt_backward_at)(loss, NULL, DT_BACKWARD_INPUT);
}
dt_status(dt_backward_weight)(dt_tensor *loss) {
    return (dt_backward_at)(loss, NULL, DT_BACKWARD_WEIGHT);
}

/* ---- dt_grad_check ---- */

typedef struct dt__grad_check {
    dt_tensor *(*loss)(void *user);
    void *user;
} dt__grad_check;

static dt_tensor *dt__grad_check_block(dt_tensor *x, void *user) {
    const dt__grad_check *c = (const dt__grad_check *)user;
    (void)x;
    return c->loss(c->user);
}

/* Returns the loss with element i of x changed by `step`; `values` are x's values. */
static double dt__grad_check_loss(
    dt__grad_check *c, dt_tensor *x, double *values, int64_t i, double step) {
    double before = values[i];
    values[i] += step;
    if ((dt_write)(x, values) != DT_OK) return NAN;
    /* under dt_no_grad the end of a block frees its tensors */
    double loss = (dt_item)(dt_block(x->ctx, dt__grad_check_block, x, c));
    values[i] = before;
    return (dt_write)(x, values) == DT_OK ? loss : NAN;
}

static void dt__grad_check_input(
    dt__grad_check *c, dt_tensor *x, double *host, double step, dt_grad_difference *worst) {
    dt_ctx *ctx = x->ctx;
    int64_t n = dt_count(x->shape);
    double *values = host, *grad = host + n;
    const dt_tensor *t = dt__owner(x);
    if (!t->grad) {
        dt_fail(ctx, DT_ERR_ARG, "dt_grad_check(%s): %s", x->name,
            t->param && !t->param->bucket->data
                ? "ZeRO-3 shards it and its gradient; check it before dt_zero_make"
                : "the loss gives it no gradient here");
        return;
    }
    if (dt__move_now(ctx, grad, t->grad, (size_t)n * sizeof *grad) != DT_OK ||
        (dt_read)(x, values) != DT_OK)
        return;
    for (int64_t i = 0; i < n && ctx->status == DT_OK; i++) {
        double above = dt__grad_check_loss(c, x, values, i, step),
               below = dt__grad_check_loss(c, x, values, i, -step);
        double numeric = (above - below) / (2 * step), g = grad[i] / ctx->loss_scale,
               difference = fabs(g - numeric) / fmax(1, fabs(numeric));
        if (isnan(difference)) difference = HUGE_VAL;
        if (!worst->tensor || difference > worst->difference)
            *worst = (dt_grad_difference){ difference, x, i, g, numeric };
    }
}

dt_grad_difference dt_grad_check(dt_ctx *ctx, dt_tensor *(*loss)(void *user), void *user,
    dt_tensor *const *inputs, int n, double step) {
    dt_grad_difference none = { .difference = HUGE_VAL }, worst = none;
    dt__grad_check c = { loss, user };
    size_t bytes = 0;
    if (!ctx || ctx->status != DT_OK) return none;
    if (!loss || !inputs || n < 1 || !(step >= 0))
        dt_fail(ctx, DT_ERR_ARG, "dt_grad_check: %d inputs, step %g, %s", n, step,
            loss ? "a function" : "no function");
    for (int i = 0; i < n && ctx->status == DT_OK; i++) {
        dt_tensor *x = inputs[i];
        if (!x || x->ctx != ctx || x->dtype != DT_F64 || dt__owner(x) != x || !x->needs_grad) {
            dt_fail(ctx, DT_ERR_ARG,
                "dt_grad_check: input %d, %s, is no f64 tensor of dt_require_grad or parameter", i,
                dt__tensor_text(x).s);
            return none;
        }
        bytes = dt__bytes(x) > bytes ? dt__bytes(x) : bytes;
    }
    double *host =
        ctx->status == DT_OK ? (double *)dt_alloc(ctx, DT_MEM_HOST, 2 * bytes, "gradients") : NULL;
    int ready = host && (dt_backward)(loss(user)) == DT_OK;
    int no_grad = ctx->no_grad;
    ctx->no_grad = 1;
    for (int i = 0; i < n && ready && ctx->status == DT_OK; i++)
        dt__grad_check_input(&c, inputs[i], host, step > 0 ? step : 1e-6, &worst);
    ctx->no_grad = no_grad;
    dt_free(ctx, DT_MEM_HOST, host, 2 * bytes);
    if (ctx->status != DT_OK || !ready) return none;
    dt_clear_grads(ctx);
    return worst;
}

// ==== 19. Ops: linear, norms, elementwise functions =============================================

/* An op checks its inputs, makes its output, calls one kernel and records itself on the tape:

       forward    y = f(x, w)         dt_linear, ...          records { inputs, backward, saved }
       backward   dx (+)= dy df/dx    dt__linear_back, ...    reads saved, writes the inputs' grads

   A backward computes only the gradients for which dt_wants returns 1: a pipeline schedule may run
   it in two halves, first for the input gradients and later for the weight gradients. A kernel's
   `accumulate` is 0 for a tensor's first gradient, which overwrites the buffer, and 1 for every
   later gradient, which is added. The code of an op is the same on every device. */

dt_tensor *dt_input(dt_ctx *ctx, dt_dtype dtype, dt_shape shape, const void *host) {
    dt_tensor *t = dt__new_output(ctx, NULL, dtype, shape, "dt_input", 0);
    if (t && host) (dt_write)(t, host);
    return t && ctx->status == DT_OK ? t : NULL;
}

/* Copies the data of t to `out`, or `in` to the data of t. */
static dt_status dt__host_copy(const char *op, dt_tensor *t, void *out, const void *in) {
    if (!t || t->ctx->status != DT_OK) return t ? t->ctx->status : DT_ERR_ARG;
    if (!out && !in && dt__bytes(t))
        return dt_fail(t->ctx, DT_ERR_ARG, "%s(%s): host memory is NULL", op, t->name);
    return dt__fail_if_dropped(op, t) ? t->ctx->status : dt__read_or_write(t, out, in);
}

static dt_status dt__read(const dt_tensor *t, void *host) {
    return dt__host_copy("dt_read", (dt_tensor *)t, host, NULL);
}
static dt_status dt__write(dt_tensor *t, const void *host) {
    return dt__host_copy("dt_write", t, NULL, host);
}
static void *dt__data(dt_tensor *t) {
    if (!t || t->ctx->status != DT_OK || dt__fail_if_dropped("dt_data", t)) return NULL;
    return dt__ensure_values("dt_data", t) == DT_OK ? t->data : NULL;
}
static double dt__item(const dt_tensor *t) {
    union {
        float f;
        double d;
        int32_t i;
        int64_t wide;
    } value;
    value.d = NAN;
    if (!t) return NAN;
    if (dt_count(t->shape) != 1) {
        dt_fail(t->ctx, DT_ERR_ARG, "dt_item(%s): %s %s has %lld elements, not 1", t->name,
            dt_dtype_name(t->dtype), dt__shape_text(t->shape).s, (long long)dt_count(t->shape));
        return NAN;
    }
    if (dt__host_copy("dt_item", (dt_tensor *)t, &value, NULL) != DT_OK) return NAN;
    return dt__number(t->dtype, &value, 0);
}
/* ---- dt_print ---- */

typedef struct dt__print {
    const dt_tensor *t;
    const void *values;
    int folds;    /* 1: prints only the ends of a dimension */
    dt__text row; /* text of the line that is not printed yet */
} dt__print;

static void dt__print_end_row(dt__print *p, int indent) {
    dt_log(p->t->ctx, DT_LOG_NOTICE, "%s", p->row.s);
    p->row = dt__format("%*s", indent, "");
}

static void dt__print_value(dt__print *p, int64_t i) {
    double x = dt__number(p->t->dtype, p->values, (size_t)i);
    if (p->t->dtype == DT_I64)
        dt__put(&p->row, "%lld", (long long)((const int64_t *)p->values)[i]);
    else if (isnan(x))
        dt__put(&p->row, "nan");
    else
        dt__put(&p->row, dt__integer(p->t->dtype) ? "%.0f" : "%.5g", x);
}

/* Prints dimension `dim` of the elements from number `first` on. */
static void dt__print_dim(dt__print *p, int dim, int64_t first) {
    enum { ENDS = 3, COLUMNS = 80 };
    int nd = p->t->shape.nd;
    int64_t n = dim < nd ? p->t->shape.d[dim] : 0, stride = 1;
    if (dim == nd) {
        dt__print_value(p, first);
        return;
    }
    for (int d = dim + 1; d < nd; d++) stride *= p->t->shape.d[d];
    dt__put(&p->row, "[");
    for (int64_t i = 0; i < n; i++) {
        int last = dim + 1 == nd, skips = p->folds && i == ENDS && n > 2 * ENDS;
        if (skips) {
            dt__put(&p->row, last ? "..., " : "...,");
            if (!last) dt__print_end_row(p, dim + 1);
            i = n - ENDS;
        }
        dt__print_dim(p, dim + 1, first + i * stride);
        if (i + 1 < n) dt__put(&p->row, last ? ", " : ",");
        if (i + 1 < n && (!last || p->row.used > COLUMNS)) dt__print_end_row(p, dim + 1);
    }
    dt__put(&p->row, "]");
}

void dt_print(const dt_tensor *t) {
    enum { ALL = 1000 };
    if (!t || t->ctx->status != DT_OK) return;
    dt__print p = { .t = t, .folds = dt_count(t->shape) > ALL };
    size_t bytes = dt__bytes(t);
    void *host = dt_alloc(t->ctx, DT_MEM_HOST, bytes ? bytes : 1, "dt_print");
    p.values = host;
    p.row = dt__format("%.200s %s %s%s", t->name ? dt__printable_name(t->name).s : "",
        dt_dtype_name(t->dtype), dt__shape_text(t->shape).s, t->shape.nd ? "" : ": ");
    if (host && dt__host_copy("dt_print", (dt_tensor *)t, host, NULL) == DT_OK) {
        if (t->shape.nd > 0) dt__print_end_row(&p, 0);
        if (dt_count(t->shape) > 0)
            dt__print_dim(&p, 0, 0);
        else
            dt__put(&p.row, "[]");
        dt__print_end_row(&p, 0);
    }
    dt_free(t->ctx, DT_MEM_HOST, host, bytes ? bytes : 1);
}

DT__DEFINE_AT_SITE(dt_status, read, t ? t->ctx : NULL, (const dt_tensor *t, void *host), t, host)
DT__DEFINE_AT_SITE(dt_status, write, t ? t->ctx : NULL, (dt_tensor * t, const void *host), t, host)
DT__DEFINE_AT_SITE(void *, data, t ? t->ctx : NULL, (dt_tensor * t), t)
DT__DEFINE_AT_SITE(double, item, t ? t->ctx : NULL, (const dt_tensor *t), t)

/* Fails the context of the first input that is not NULL and returns NULL. An op calls this function
   if one of its inputs is NULL, for example the result of dt_param_find for a misspelt name. After
   an earlier failure a NULL input is normal, and the context keeps the text of that failure. */
static dt_ctx *dt__null_input(const char *op, dt_tensor *a, dt_tensor *b, dt_tensor *c) {
    dt_tensor *t = a ? a : b ? b : c;
    if (t)
        dt_fail(t->ctx, DT_ERR_ARG, "%s(%s): another input is NULL, number %d", op, t->name,
            a && b ? 2
            : a    ? 1
                   : 0);
    return NULL;
}

/* dt__op_context for an op that waits for input i itself, in pieces, if bit i of in_pieces is 1. */
static dt_ctx *dt__op_context_at(
    const char *op, int n, dt_tensor *a, dt_tensor *b, dt_tensor *c, unsigned in_pieces) {
    dt_tensor *all[3] = { a, b, c };
    if (!a || (n > 1 && !b) || (n > 2 && !c)) return dt__null_input(op, a, b, c);
    dt_ctx *ctx = a->ctx;
    /* opens the first tape before parameters are gathered, because that cancels gathers */
    if (ctx->status != DT_OK || !dt__root(ctx)) return NULL;
    for (int i = 0; i < 3; i++) {
        if (!all[i]) continue;
        if (all[i]->ctx != ctx) {
            dt_fail(ctx, DT_ERR_ARG, "%s(%s): a tensor of another context", op, all[i]->name);
            return NULL;
        }
        if (dt__fail_if_dropped(op, all[i])) return NULL;
        int arrives = in_pieces >> i & 1 && !dt__owner(all[i])->param;
        if (!arrives && dt__ensure_values(op, all[i]) != DT_OK) return NULL;
    }
    return ctx;
}

/* Returns the inputs' context, or NULL if the op cannot run: one of the first n inputs is NULL, the
   context has failed, an input belongs to another context, or an input's data was freed. Allocates
   and gathers the values of an input that is a parameter, and waits for an input that is still
   arriving. Other inputs may be NULL. */
static dt_ctx *dt__op_context(const char *op, int n, dt_tensor *a, dt_tensor *b, dt_tensor *c) {
    return dt__op_context_at(op, n, a, b, c, 0);
}

/* Fails the context with a text that gives the shapes and types of both tensors. Returns NULL. */
static dt_tensor *dt__mismatch(
    const char *op, const dt_tensor *a, const dt_tensor *b, const char *why) {
    dt_fail(a->ctx, DT_ERR_SHAPE, "%s(%s, %s): %s %s and %s %s: %s", op, a->name, b->name,
        dt_dtype_name(a->dtype), dt__shape_text(a->shape).s, dt_dtype_name(b->dtype),
        dt__shape_text(b->shape).s, why);
    return NULL;
}

static size_t dt__last_dim(const dt_tensor *t) {
    return t->shape.nd ? (size_t)t->shape.d[t->shape.nd - 1] : 1;
}
static size_t dt__row_count(const dt_tensor *t) {
    size_t rows = 1;
    for (int i = 0; i + 1 < t->shape.nd; i++) rows *= (size_t)t->shape.d[i];
    return rows;
}

static dt_tensor *dt__shape_error(const char *op, const dt_tensor *x, const char *why) {
    dt_fail(x->ctx, DT_ERR_SHAPE, "%s(%s): %s %s: %s", op, x->name, dt_dtype_name(x->dtype),
        dt__shape_text(x->shape).s, why);
    return NULL;
}

/* Like dt__op_context_at, but it also fails the context and returns NULL if x holds integers. */
static dt_ctx *dt__float_op_context_at(
    const char *op, int n, dt_tensor *x, dt_tensor *b, dt_tensor *c, unsigned in_pieces) {
    dt_ctx *ctx = dt__op_context_at(op, n, x, b, c, in_pieces);
    if (!ctx || !dt__integer(x->dtype)) return ctx;
    dt__shape_error(op, x, "not for integers");
    return NULL;
}
static dt_ctx *dt__float_op_context(
    const char *op, int n, dt_tensor *x, dt_tensor *b, dt_tensor *c) {
    return dt__float_op_context_at(op, n, x, b, c, 0);
}

/* Finds the first index outside [min, n) and fails the context with the value and the position of
   that index. The kernel's DT_ERR_ARG does not say which index is bad. */
static void dt__index_error(const char *op, const dt_tensor *x, const char *index_name,
    const dt_tensor *index, int64_t min, int64_t n, const char *table, const char *items) {
    int32_t chunk[256];
    int64_t count = dt_count(index->shape);
    for (int64_t at = 0; at < count && x->ctx->status == DT_OK; at++) {
        int64_t left = count - at < 256 ? count - at : 256;
        if (at % 256 == 0 &&
            (dt__move(x->ctx, chunk, (int32_t *)index->data + at, (size_t)left * 4) != DT_OK ||
                dt__sync(x->ctx) != DT_OK))
            return;
        if (chunk[at % 256] < min || chunk[at % 256] >= n)
            dt_fail(x->ctx, DT_ERR_ARG, "%s(%s): %s %d at place %lld; %s has %lld %s", op, x->name,
                index_name, chunk[at % 256], (long long)at, table, (long long)n, items);
    }
}

/* Makes the output of an elementwise op on x, with the shape and type of x. */
static dt_tensor *dt__new_like(dt_tensor *x, const char *op, int storage) {
    dt_ctx *ctx = dt__float_op_context(op, 1, x, NULL, NULL);
    return ctx ? dt__new_output(ctx, x, x->dtype, x->shape, op, storage) : NULL;
}

/* Fills in the tape record of an op with up to three inputs. */
static dt_record_desc dt__make_record(const char *name, dt_tensor *a, dt_tensor *b, dt_tensor *c,
    dt_backward_fn backward, size_t saved_bytes) {
    dt_record_desc d;
    memset(&d, 0, sizeof d);
    d.name = name;
    d.in[0] = a;
    d.in[1] = b;
    d.in[2] = c;
    d.n_in = 3;
    d.backward = backward;
    d.saved_bytes = saved_bytes;
    return d;
}

/* Records y, as dt_record does, with a copy of *saved for the backward. */
static dt_tensor *dt__record_with(dt_tensor *y, dt_record_desc d, const void *saved) {
    dt_node *node = dt__record(y, y->ctx, &d);
    if (node && node->saved) memcpy(node->saved, saved, d.saved_bytes);
    return y->ctx->status == DT_OK ? y : NULL;
}

/* Returns the bytes of scratch memory for a matrix product, an attention or sums over rows: the
   larger of `bytes`, which the CPU kernel needs, and the kernel table's work_bytes, which the
   device needs. */
static size_t dt__scratch_bytes(const dt_ctx *ctx, size_t bytes) {
    return bytes > ctx->kernels.work_bytes ? bytes : ctx->kernels.work_bytes;
}

/* Runs one matrix product, with scratch memory from the context. */
static dt_status dt__matmul(dt_ctx *ctx, const char *op, const char *operand, dt_matmul_args a) {
    if (a.m == 0 || a.n == 0) return DT_OK;
    a.work_bytes = dt__scratch_bytes(ctx, dt_matmul_work(a.n, a.k, a.dtype));
    a.work = dt_scratch(ctx, a.work_bytes);
    return a.work ? dt__kernel_done(ctx, op, operand, "matmul", DT__CALL(ctx, matmul, &a))
                  : ctx->status;
}

/* Returns the address of an element of an array. */
static void *dt__element(const void *array, dt_dtype dtype, int64_t index) {
    return (char *)array + index * (int64_t)dt_dtype_size(dtype);
}

/* dt__matmul for `count` of the rows of c and of the operands that have a row for each row of c. */
static dt_status dt__matmul_rows(dt_ctx *ctx, const char *op, const char *operand, dt_matmul_args a,
    int64_t row, int64_t count) {
    a.m = count;
    a.a = dt__element(a.a, a.dtype, row * a.k);
    a.c = dt__element(a.c, a.dtype, row * a.n);
    if (a.residual) a.residual = dt__element(a.residual, a.dtype, row * a.n);
    if (a.pre_activation) a.pre_activation = dt__element(a.pre_activation, a.dtype, row * a.n);
    return dt__matmul(ctx, op, operand, a);
}

/* Overlap of communication and computation: a product whose operand a arrives in pieces or whose
   result c leaves in pieces (Megatron-LM's tp-comm-overlap; PyTorch's async TP). The traffic of one
   piece runs while the rows of another piece are multiplied:

       a arrives     link      | a0 | a1 | a2 |          c leaves            | c0 | c1 | c2 |
                     product        | a0 | a1 | a2 |               | c0 | c1 | c2 |

   In the forward the products of arriving rows wait in a list, and each piece runs through all of
   them: through the three products of q, k and v, or through both products of an MLP, whose sums
   then leave in pieces. The first reader that is no product completes them all.

   An element of c depends on its row, its column and K only, so the bits are those of one
   product. */
typedef struct dt__flow_product {
    const char *op, *operand;
    dt_matmul_args a;
    dt__flow *leaves; /* the flow of c; may be NULL */
    struct dt__flow_product *next;
} dt__flow_product;

/* Multiplies the rows of piece p of a flow, and lets the piece of the result leave. */
static dt_status dt__flow_multiply(
    dt_ctx *ctx, const dt__flow *f, int p, const dt__flow_product *product) {
    int64_t begin = dt__flow_bound(f, p), end = dt__flow_bound(f, p + 1), row, count;
    const char *op = product->op, *operand = product->operand;
    if (f->sequences >= f->pieces || f->shards == 1) {
        dt__matmul_rows(ctx, op, operand, product->a, begin * f->shards, (end - begin) * f->shards);
    } else {
        for (int64_t shard = 0; shard < f->shards; shard++)
            for (int64_t at = begin; at < end && ctx->status == DT_OK;) {
                dt__flow_range(f, p, shard, &at, &row, &count);
                dt__matmul_rows(ctx, op, operand, product->a, row, count);
            }
    }
    if (ctx->status == DT_OK && product->leaves) product->leaves->next(product->leaves);
    return ctx->status;
}

/* Runs the products of piece p, which has arrived. */
static void dt__flow_run_products(dt_ctx *ctx, const dt__flow *f, int p) {
    for (const dt__flow_product *t = f->products; t && ctx->status == DT_OK; t = t->next)
        dt__flow_multiply(ctx, f, p, t);
}

/* Appends a product of the arriving rows of f, in a block's forward. Returns 0 if that is not
   possible: f has begun to arrive, or the result leaves in other pieces. */
static int dt__flow_append(dt_ctx *ctx, dt__flow *f, dt__flow_product product) {
    const dt__flow *leaves = product.leaves;
    dt__flow_product **at = &f->products, *copy;
    if (f->done > 0 || ctx->current == ctx->root) return 0;
    if (leaves && (leaves->pieces != f->pieces || leaves->sequences != f->sequences ||
                      leaves->shards != f->shards || leaves->rows != f->rows))
        return 0;
    if (!(copy = (dt__flow_product *)dt__meta(ctx, sizeof *copy))) return 0;
    while (*at) at = &(*at)->next;
    *copy = product;
    *at = copy;
    return 1;
}

/* Runs a product in the pieces of the flows, either of which may be NULL. */
static dt_status dt__matmul_flow(dt_ctx *ctx, const char *op, const char *operand, dt_matmul_args a,
    dt__flow *arrives, dt__flow *leaves) {
    const dt__flow_product product = { op, operand, a, leaves, NULL };
    if (arrives && leaves && dt__flow_arrive(ctx, arrives) != DT_OK) return dt_error(ctx);
    dt__flow *f = leaves ? leaves : arrives;
    if (!f || f->done == f->pieces) return dt__matmul(ctx, op, operand, a);
    for (int p = 0; p < f->pieces && ctx->status == DT_OK; p++) {
        while (f->incoming && f->done <= p) dt__flow_arrive_next(ctx, f);
        if (ctx->status == DT_OK) dt__flow_multiply(ctx, f, p, &product);
    }
    return ctx->status;
}

/* Adds g to the gradient of in[i], or stores it if it is the first gradient of in[i]. */
static dt_status dt__add_grad(dt_node *n, int i, const void *g) {
    dt_tensor *t = n->in[i];
    int accumulate = 0;
    void *sum = dt_grad_raw(n, i, &accumulate);
    size_t count = (size_t)dt_count(t->shape);
    return sum ? dt__accumulate(t->ctx, t->dtype, sum, g, count, accumulate) : dt_error(t->ctx);
}

/* Adds the output's gradient to the gradient of in[i]. can_move is 1 if nothing reads the output's
   gradient after this call. In this case in[i] takes over the output's buffer without a copy,
   provided that in[i] is not a parameter and has no gradient yet. */
static dt_status dt__pass_grad(dt_node *n, int i, int can_move) {
    dt_tensor *t = dt__owner(n->in[i]), *out = dt__owner(n->out);
    if (can_move && !t->param && !t->grad && t->needs_grad != DT__KEEP_GRAD &&
        out->grad_storage == DT__GRAD_OWN) {
        t->grad = out->grad;
        t->grad_storage = DT__GRAD_OWN;
        out->grad = NULL;
        return DT_OK;
    }
    return dt__add_grad(n, i, out->grad);
}

typedef struct dt__linear_saved {
    int activation;
    dt_tensor *pre_activation; /* the values x w^T + b; NULL if there is no activation */
    int activation_grad_done;  /* 1 if pre_activation->grad has been computed */
    const int64_t *rows;       /* number of rows of each group; NULL: one group of all rows */
    int flags;                 /* DT__LINEAR_* */
    /* 1: no op has read x before this one, so this op's backward is the last that adds to x's
       gradient, whose pieces may leave */
    int completes_input_grad;
} dt__linear_saved;

enum {
    DT__LINEAR_TRANSIENT = 1, /* the result is a transient tensor that no backward reads */
    /* The bias is not added, and its gradient is 0. For a rank whose partial sum has no bias: there
       the op still reads the bias, so that its gradient is complete at the same op on all ranks. */
    DT__LINEAR_NO_BIAS = 2
};

/* Sizes of the products of a linear op: each group of rows is multiplied by a matrix (out,in). */
typedef struct dt__linear_sizes {
    int64_t groups, in, out;
} dt__linear_sizes;

/* Returns the format of a quantized weight; 0 for any other tensor. A view has the format of its
   owner if it has the owner's last dimension, that is, whole rows of blocks. */
static int dt__quant_of(const dt_tensor *w) {
    const dt_tensor *owner = dt__owner((dt_tensor *)(uintptr_t)w);
    return owner->param && dt__last_dim(w) == dt__last_dim(owner) ? (int)owner->param->desc.quant
                                                                  : 0;
}

/* Returns the number of elements in a row of a weight. */
static int64_t dt__weight_columns(const dt_tensor *w) {
    int64_t last = (int64_t)dt__last_dim(w);
    int quant = dt__quant_of(w);
    return quant ? last / dt__quants[quant].bytes * dt__quants[quant].elements : last;
}

static dt__linear_sizes dt__linear_sizes_of(const dt_tensor *w, const int64_t *rows) {
    dt__linear_sizes s = { rows ? w->shape.d[0] : 1, dt__weight_columns(w), 0 };
    s.out = (int64_t)dt__row_count(w) / s.groups;
    return s;
}

static int64_t dt__group_rows(const dt_tensor *x, const int64_t *rows, int64_t group) {
    return rows ? rows[group] : (int64_t)dt__row_count(x);
}

/* Returns the address of an element of a weight, at which a block begins if it is quantised. */
static void *dt__weight_element(const dt_tensor *w, int64_t index) {
    int quant = dt__quant_of(w);
    return quant ? (char *)w->data + dt_quant_bytes((dt_quant)quant, index)
                 : (char *)dt__element(w->data, w->dtype, index);
}

/* Returns the gradient of the pre-activation, d = dy act'(pre_activation). Usually d overwrites dy,
   because nothing else reads dy. In two cases d gets a separate buffer: if the user reads dy after
   the backward, or if the residual is a parameter and the other half of a split backward will still
   read dy as the residual's gradient. */
static void *dt__linear_activation_grad(dt_node *n) {
    dt__linear_saved *saved = (dt__linear_saved *)n->saved;
    dt_tensor *y = n->out;
    dt_ctx *ctx = y->ctx;
    size_t bytes = dt__bytes(y);
    if (!saved->pre_activation) return y->grad;
    dt_unary_back_args a = { .dtype = y->dtype,
        .act = saved->activation,
        .dx = y->grad,
        .dout = y->grad,
        .in = saved->pre_activation->data,
        .count = (size_t)dt_count(y->shape) };
    int residual_pending = n->in[3] && n->in[3]->needs_grad && !dt_wants(n, 3);
    if (saved->activation_grad_done) return saved->pre_activation->grad;
    if (y->needs_grad == DT__KEEP_GRAD || residual_pending)
        a.dx = dt__grad_alloc(ctx, y->block, bytes);
    if (!a.dx || DT__KERNEL(ctx, n->name, unary_back, &a) != DT_OK) return NULL;
    saved->activation_grad_done = 1;
    saved->pre_activation->grad = a.dx;
    return a.dx;
}

/* Returns 1 if the matrix product that computes dx also computes the backward of the previous
   layer's activation: x is the output of a linear layer with an activation, and only this op reads
   x. The product then stores the gradient of the previous layer's pre-activation. */
static int dt__linear_fuses(const dt_node *n) {
    const dt_tensor *x = dt__owner(n->in[0]);
    const dt_node *maker = x->producer;
    /* not fused if x belongs to another block: a recomputed block's output has no producer; or if
       the previous layer has a residual, because its backward needs x's gradient */
    return n->want & 1 && x->readers == 1 && x->needs_grad != DT__KEEP_GRAD && !x->grad && maker &&
           maker->backward == dt__linear_back && x->block == n->out->block &&
           ((const dt__linear_saved *)maker->saved)->pre_activation && !maker->in[3];
}

/* If the pre-activation of a linear op already has its gradient, lets the op's output, which is
   recomputed next, overwrite the pre-activation: nothing else reads it. Returns 1 if so. */
static int dt__linear_output_in_place(dt_node *n) {
    const dt__linear_saved *saved = (const dt__linear_saved *)n->saved;
    if (!saved->activation_grad_done || !saved->pre_activation->data) return 0;
    n->out->shares = saved->pre_activation;
    n->out->data = saved->pre_activation->data;
    return 1;
}

/* Computes dx = d w, dw = d^T x and db, the sums of d's columns, for each group of rows. The
   arguments are those of the whole arrays; a gradient that is not wanted is NULL. */
static dt_status dt__linear_back_groups(
    dt_node *n, const void *d, dt_matmul_args dx, dt_matmul_args dw, dt_sum_args db) {
    const dt__linear_saved *saved = (const dt__linear_saved *)n->saved;
    const int64_t *rows = saved->rows;
    dt_tensor *x = n->in[0], *w = n->in[1];
    dt_dtype type = x->dtype;
    dt__linear_sizes s = dt__linear_sizes_of(w, rows);
    dt__flow *arrives = rows ? NULL : n->out->grad_flow;
    dt__flow *leaves = saved->completes_input_grad && !rows ? x->grad_flow : NULL;
    for (int64_t g = 0, at = 0; dx.c && g < s.groups; at += dt__group_rows(x, rows, g++)) {
        dt_matmul_args a = dx;
        a.c = dt__element(dx.c, dt__wide(type, dx.wide), at * s.in);
        a.a = dt__element(d, type, at * s.out);
        a.b = dt__weight_element(w, g * s.out * s.in);
        a.b_quant = dt__quant_of(w);
        a.m = dt__group_rows(x, rows, g);
        if (dx.pre_activation) a.pre_activation = dt__element(dx.pre_activation, type, at * s.in);
        if (dt__matmul_flow(x->ctx, n->name, NULL, a, arrives, leaves) != DT_OK)
            return dt_error(x->ctx);
    }
    /* x, if it was left out before a fused dx: see dt__make_inputs_readable */
    if (dw.c && dt__make_readable(x->ctx, n->in[0]) != DT_OK) return dt_error(x->ctx);
    /* dw sums over all rows of d and x, so its chain is that of one product */
    if (dt__flow_arrive(x->ctx, n->out->grad_flow) != DT_OK ||
        ((dw.c || db.out) && dt__flow_arrive(x->ctx, dt__owner(x)->flow) != DT_OK))
        return dt_error(x->ctx);
    /* the scratch for dw = d^T x depends on the number of rows, and takes the most rows from the
       beginning */
    int64_t most = (int64_t)(dt__reserved_bytes(x) / dt_dtype_size(type)) / (s.in ? s.in : 1);
    if (rows && dw.c &&
        !dt_scratch(x->ctx, dt__scratch_bytes(x->ctx, dt_matmul_work(s.in, most, type))))
        return dt_error(x->ctx);
    for (int64_t g = 0, at = 0; dw.c && g < s.groups; at += dt__group_rows(x, rows, g++)) {
        dt_matmul_args a = dw;
        a.c = dt__element(dw.c, dt__wide(type, dw.wide), g * s.out * s.in);
        a.a = dt__element(d, type, at * s.out);
        a.b = dt__element(x->data, type, at * s.in);
        a.k = dt__group_rows(x, rows, g);
        if (dt__matmul(x->ctx, n->name, NULL, a) != DT_OK) return dt_error(x->ctx);
    }
    for (int64_t g = 0, at = 0; db.out && g < s.groups; at += dt__group_rows(x, rows, g++)) {
        dt_sum_args a = db;
        a.out = dt__element(db.out, dt__wide(type, db.wide), g * s.out);
        a.in = dt__element(d, type, at * s.out);
        a.n = saved->flags & DT__LINEAR_NO_BIAS ? 0 : (size_t)dt__group_rows(x, rows, g);
        a.work_bytes = dt__scratch_bytes(x->ctx, 0);
        a.work = dt_scratch(x->ctx, a.work_bytes);
        if (DT__KERNEL(x->ctx, n->name, sum, &a) != DT_OK) return dt_error(x->ctx);
    }
    return DT_OK;
}

/* The backward of y = act(x w^T + b) + residual. Let d be the gradient of x w^T + b. Then dx = d w,
   dw = d^T x, each element of db is the sum of a column of d, and the residual's gradient is dy. */
static dt_status dt__linear_back(dt_node *n) {
    dt_tensor *x = n->in[0], *w = n->in[1], *b = n->in[2];
    const dt__linear_saved *saved = (const dt__linear_saved *)n->saved;
    dt_tensor *pre = saved->pre_activation; /* NULL without an activation */
    dt_ctx *ctx = x->ctx;
    dt__linear_sizes s = dt__linear_sizes_of(w, saved->rows);
    dt_matmul_args dx = { .dtype = x->dtype, .n = s.in, .k = s.out },
                   dw = { .dtype = x->dtype, .m = s.out, .n = s.in, .trans_a = 1 };
    dt_sum_args db = { .dtype = x->dtype, .outer = 1, .inner = (size_t)s.out, .scale = 1 };
    /* 1 if no weight half follows that must still read the output's gradient; x may be a parameter
       too */
    int complete = (!w->needs_grad || dt_wants(n, 1)) && (!b || !b->needs_grad || dt_wants(n, 2)) &&
                   (!x->needs_grad || dt_wants(n, 0));
    /* these read the whole gradient before the first product does */
    if ((pre || saved->rows) && dt__flow_arrive(ctx, n->out->grad_flow) != DT_OK)
        return dt_error(ctx);
    if (dt_wants(n, 3) && pre && dt__pass_grad(n, 3, 0) != DT_OK) return dt_error(ctx);
    void *d = dt__linear_activation_grad(n);
    /* nothing reads these data again, unless the backward is split: then the weight half of a later
       op computes the output again (a deferred weight half has kept it) */
    int read_again =
        n->out->storage == DT__RECOMPUTED && ctx->root->backward_done == DT__INPUT_HALF_DONE;
    if (d && pre && !read_again) {
        if (pre->storage == DT__IN_ARENA && !n->out->deferred_reads) dt__data_lend(pre, pre->data);
        dt__data_drop(pre);
    }
    int is_fused = dt__linear_fuses(n); /* asked before dt__grad_wide gives x a gradient */
    if (!d || (dt_wants(n, 0) && !(dx.c = dt__grad_wide(n, 0, &dx.accumulate, &dx.wide))))
        return dt_error(ctx);
    if (dx.c && n->out->grad_flow) dt__run_deferred(ctx, NULL);
    if (is_fused) {
        dt__linear_saved *previous = (dt__linear_saved *)dt__owner(x)->producer->saved;
        dx.activation_backward = previous->activation_grad_done = 1;
        dx.activation = previous->activation;
        dx.pre_activation = previous->pre_activation->data;
        previous->pre_activation->grad = dx.c;
    }
    if ((dt_wants(n, 1) && !(dw.c = dt__grad_wide(n, 1, &dw.accumulate, &dw.wide))) ||
        (dt_wants(n, 2) && !(db.out = dt__grad_wide(n, 2, &db.accumulate, &db.wide))) ||
        dt__linear_back_groups(n, d, dx, dw, db) != DT_OK)
        return dt_error(ctx);
    return dt_wants(n, 3) && !pre ? dt__pass_grad(n, 3, complete) : DT_OK;
}

/* Returns 1 if `rows` has the number of rows of each of w's groups of x's rows. */
static int dt__groups_fit(const dt_tensor *x, const dt_tensor *w, const int64_t *rows) {
    int64_t sum = 0, least = 0;
    for (int64_t g = 0; g < w->shape.d[0]; g++) {
        sum += rows[g];
        if (rows[g] < least) least = rows[g];
    }
    return w->shape.d[0] > 0 && least == 0 && sum == (int64_t)dt__row_count(x);
}

/* Returns 1 if the inputs of a linear layer fit together, else fails the context and returns 0.
   *shape receives the shape of the layer's result. */
static int dt__linear_fits(const char *op, dt_tensor *x, dt_tensor *w, dt_tensor *b,
    dt_tensor *residual, const int64_t *rows, dt_shape *shape) {
    const char *why = NULL;
    dt_tensor *other = w;
    int skip = rows != NULL; /* the result has no dimension for the groups */
    *shape = x->shape;
    if ((x->dtype != w->dtype && !dt__quant_of(w)) || (b && b->dtype != x->dtype))
        why = "types differ";
    else if (w->shape.nd < 2 + skip || x->shape.nd < 1 ||
             (int64_t)dt__last_dim(x) != dt__weight_columns(w))
        why = rows ? "the last dimensions must agree, and w needs three"
                   : "the last dimensions must agree, and w needs two";
    else if (rows && !dt__groups_fit(x, w, rows))
        why = "the groups need 0 rows or more, and all of x's rows together";
    else if (b && (size_t)dt_count(b->shape) != dt__row_count(w))
        why = "the bias must have w's shape less its last dimension", x = w, other = b;
    else if (x->shape.nd + w->shape.nd - 2 - skip > DT_MAX_DIMS)
        why = "the result has too many dimensions";
    if (!why) {
        shape->nd = x->shape.nd - 1;
        for (int i = skip; i < w->shape.nd - 1; i++) shape->d[shape->nd++] = w->shape.d[i];
        if (residual &&
            (dt_count(residual->shape) != dt_count(*shape) || residual->dtype != x->dtype))
            why = "the residual must have the shape and type of the result", other = residual;
    }
    if (why) dt__mismatch(op, x, other, why);
    return !why;
}

static const dt_linear_desc dt__plain_linear = { .activation = 0 };

dt_tensor *dt_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b) {
    return dt_linear_at(x, w, b, dt__plain_linear);
}

/* Computes y and, unless it is NULL, pre_activation. */
static dt_status dt__linear_run(const char *op, dt_tensor *x, dt_tensor *w, dt_tensor *b,
    dt_linear_desc desc, const int64_t *rows, dt_tensor *y, dt_tensor *pre_activation) {
    dt_dtype type = x->dtype;
    dt_tensor *residual = desc.residual;
    dt__linear_sizes s = dt__linear_sizes_of(w, rows);
    for (int64_t g = 0, at = 0; g < s.groups; at += dt__group_rows(x, rows, g++)) {
        dt_matmul_args a = { .dtype = type,
            .c = dt__element(y->data, type, at * s.out),
            .a = dt__element(x->data, type, at * s.in),
            .b = dt__weight_element(w, g * s.out * s.in),
            .m = dt__group_rows(x, rows, g),
            .n = s.out,
            .k = s.in,
            .trans_b = 1,
            .activation = desc.activation,
            .b_quant = dt__quant_of(w) };
        a.bias = b ? dt__element(b->data, type, g * s.out) : NULL;
        a.residual = residual ? dt__element(residual->data, type, at * s.out) : NULL;
        if (pre_activation) a.pre_activation = dt__element(pre_activation->data, type, at * s.out);
        const dt__flow_product product = { op, w->name, a, y->flow, NULL };
        int arrives = !rows && x->flow && x->flow->done < x->flow->pieces;
        if (arrives && dt__flow_append(x->ctx, x->flow, product)) {
            if (!y->flow) y->flow = x->flow;
            if (pre_activation) pre_activation->flow = x->flow;
        } else if (dt__matmul_flow(x->ctx, op, w->name, a, x->flow, y->flow) != DT_OK)
            return dt_error(x->ctx);
    }
    return DT_OK;
}

/* The sharding rule of a linear op. */
static int dt__propagate_linear(const char *op, dt_tensor *y, dt_tensor *x, dt_tensor *w,
    dt_tensor *b, dt_linear_desc desc, int grouped, const dt_group *bias_group) {
    int rule = grouped ? DT__RULE_GROUPED : DT__RULE_LINEAR;
    dt_tensor partial, *in[4] = { x, w, b, desc.residual };
    if (desc.activation) rule++; /* DT__RULE_*_ACTIVATION */
    if (y && b && bias_group && bias_group->size > 1) {
        if (!dt__placement_expect(op, b, bias_group, DT_COPY,
                "only rank 0 adds the bias, so give it the gradient placement DT_GRAD_PARTIAL"))
            return 0;
        partial = *b;
        if (!dt__placement_set(&partial, b, bias_group, DT_PARTIAL)) return 0;
        in[2] = &partial;
    }
    return dt__propagate_at(op, y, rule, -1, -1, in, 4);
}

/* Computes the output of a linear op again, from the pre-activation. In 16 bits the product applies
   the activation before it rounds the pre-activation, so these outputs are stored. */
static dt_status dt__linear_recompute(dt_node *n) {
    const dt__linear_saved *saved = (const dt__linear_saved *)n->saved;
    dt_unary_args a = { .dtype = n->out->dtype,
        .act = saved->activation,
        .out = n->out->data,
        .in = saved->pre_activation->data,
        .count = (size_t)dt_count(n->out->shape) };
    return DT__KERNEL(n->out->ctx, n->name, unary, &a);
}

/* A linear op between its two steps: dt__linear_make makes the output, dt__linear_run_op computes
   and records it. In between, the output may get a flow, in which its rows leave. */
typedef struct dt__linear_op {
    dt_tensor *x, *w, *b;
    dt_linear_desc desc;
    const int64_t *rows; /* not NULL: dt_grouped_linear */
    int flags;           /* bits DT__LINEAR_* */
    int recomputes;      /* the output is computed again from the pre-activation */
    dt_tensor *y, *pre_activation;
} dt__linear_op;

static const char *dt__linear_name(const dt__linear_op *l) {
    return l->rows ? "dt_grouped_linear" : "dt_linear";
}

/* Checks the inputs and makes l->y. If bias_group is not NULL, only its rank 0 adds the bias, so
   the bias is a partial sum over it. Returns 0 after a failure. */
static int dt__linear_make(dt__linear_op *l, const dt_group *bias_group) {
    const char *op = dt__linear_name(l);
    dt_tensor *x = l->x, *w = l->w, *b = l->b;
    dt_linear_desc desc = l->desc;
    const unsigned in_pieces = !l->rows && x && !x->base;
    dt_ctx *ctx = dt__float_op_context_at(op, 2, x, w, b, in_pieces);
    dt_shape shape;
    if (!ctx || (desc.residual && !dt__op_context_at(op, 1, x, desc.residual, NULL, in_pieces)))
        return 0;
    if (!dt__linear_fits(op, x, w, b, desc.residual, l->rows, &shape)) return 0;
    if (desc.adapters)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED, "%s(%s): a grouped layer has no adapters", op,
                   w->name) == DT_OK;
    if (desc.activation < 0 || desc.activation >= DT_ACT_AFFINE)
        return dt_fail(ctx, DT_ERR_ARG, "%s(%s): activation %d", op, w->name, desc.activation) ==
               DT_OK;
    int keep_pre_activation = desc.activation && !ctx->no_grad &&
                              (x->needs_grad || w->needs_grad || (b && b->needs_grad));
    l->recomputes = keep_pre_activation && !desc.residual && !dt__narrow(x->dtype);
    l->y = dt__new_output(ctx, x, x->dtype, shape, op,
        l->flags & DT__LINEAR_TRANSIENT ? DT__TRANSIENT
        : l->recomputes                 ? DT__RECOMPUTED
                                        : DT__IN_ARENA);
    if (bias_group && bias_group->rank > 0) l->flags |= DT__LINEAR_NO_BIAS;
    if (!dt__propagate_linear(op, l->y, x, w, b, desc, l->rows != NULL, bias_group)) return 0;
    if (keep_pre_activation)
        l->pre_activation = dt__new_output(ctx, x, x->dtype, shape, "pre_activation", 0);
    return !keep_pre_activation || l->pre_activation;
}

static dt_tensor *dt__linear_run_op(const dt__linear_op *l) {
    const char *op = dt__linear_name(l);
    dt_tensor *x = l->x, *w = l->w, *b = l->b;
    dt_ctx *ctx = x->ctx;
    if (dt__linear_run(op, x, w, l->flags & DT__LINEAR_NO_BIAS ? NULL : b, l->desc, l->rows, l->y,
            l->pre_activation) != DT_OK)
        return NULL;
    dt__linear_saved saved = { .activation = l->desc.activation,
        .pre_activation = l->pre_activation,
        .flags = l->flags,
        .completes_input_grad = dt__owner(x)->readers == 0 };
    dt_record_desc d = dt__make_record(op, x, w, b, dt__linear_back, sizeof saved);
    d.in[3] = l->desc.residual;
    d.n_in = 4;
    d.unread_inputs = 1u << 3 | DT__UNREAD_OUTPUT;
    size_t bytes = l->rows && !ctx->no_grad ? (size_t)w->shape.d[0] * sizeof *l->rows : 0;
    void *copy = bytes ? dt__meta(ctx, bytes) : NULL;
    if (copy) saved.rows = (const int64_t *)memcpy(copy, l->rows, bytes);
    if (l->recomputes) d.recompute = dt__linear_recompute;
    dt_tensor *y = dt__record_with(l->y, d, &saved);
    if (!y || !y->producer) return y;
    y->producer->recompute_from_saved = l->recomputes;
    /* x, unless w is an activation, whose gradient belongs to the input half */
    y->producer->weight_inputs = dt__owner(w)->param != NULL;
    return y;
}

/* dt_linear_at or, if `rows` is not NULL, dt_grouped_linear. */
static dt_tensor *dt__linear(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc,
    const int64_t *rows, int flags, const dt_group *bias_group) {
    dt__linear_op l = { x, w, b, desc, rows, flags, 0, NULL, NULL };
    return dt__linear_make(&l, bias_group) ? dt__linear_run_op(&l) : NULL;
}

dt_tensor *dt_grouped_linear(
    dt_tensor *x, dt_tensor *w, dt_tensor *b, const int64_t *rows, dt_linear_desc desc) {
    if (rows || !x) return dt__linear(x, w, b, desc, rows, 0, NULL);
    dt_fail(x->ctx, DT_ERR_ARG, "dt_grouped_linear(%s): rows is NULL", x->name);
    return NULL;
}

static dt_tensor *dt__linear_adapted(
    dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc, int flags);

dt_tensor *dt_linear_at(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc) {
    return desc.adapters ? dt__linear_adapted(x, w, b, desc, 0)
                         : dt__linear(x, w, b, desc, NULL, 0, NULL);
}

/* ---- norms ---- */

typedef struct dt__norm_saved {
    dt_tensor *mean, *rstd;
    dt_tensor *added; /* the bias, or zeros; NULL for RMSNorm */
    double eps, gain_offset;
} dt__norm_saved;

static dt_status dt__norm_back(dt_node *n) {
    const dt__norm_saved *saved = (const dt__norm_saved *)n->saved;
    dt_tensor *x = n->in[0], *gain = n->in[1];
    dt_ctx *ctx = x->ctx;
    dt_norm_back_args a = { .dtype = x->dtype,
        .dout = n->out->grad,
        .in = x->data,
        .gain = gain->data,
        .mean = saved->mean ? saved->mean->data : NULL,
        .rstd = saved->rstd->data,
        .rows = dt__row_count(x),
        .cols = dt__last_dim(x),
        .rms = !saved->mean,
        .gain_offset = saved->gain_offset };
    if (dt_wants(n, 0) && !(a.dx = dt_grad_raw(n, 0, &a.accumulate_x))) return dt_error(ctx);
    if (dt_wants(n, 1) && !(a.dgain = dt__grad_wide(n, 1, &a.accumulate_gain, &a.wide_gain)))
        return dt_error(ctx);
    if (dt_wants(n, 2) && !(a.dbias = dt__grad_wide(n, 2, &a.accumulate_bias, &a.wide_bias)))
        return dt_error(ctx);
    a.work_bytes = dt__scratch_bytes(ctx, dt_row_work((int64_t)a.cols, x->dtype));
    a.work = dt_scratch(ctx, a.work_bytes);
    return a.work ? DT__KERNEL(ctx, n->name, norm_back, &a) : dt_error(ctx);
}

/* Returns zeros with the shape and the placements of x. */
static dt_tensor *dt__zeros_like(dt_tensor *x) {
    dt_tensor *y = dt__new_output(x->ctx, x, x->dtype, x->shape, "zeros", 0);
    size_t count = (size_t)dt_count(x->shape);
    if (!y || dt__fill(x->ctx, x->dtype, y->data, count, 0) != DT_OK) return NULL;
    y->placements = x->placements;
    return y;
}

/* Computes y, the mean and the reciprocal of the deviation of each row. */
static dt_status dt__norm_run(
    const char *op, dt_tensor *x, dt_tensor *gain, dt_tensor *y, const dt__norm_saved *s) {
    dt_norm_args a = { .dtype = x->dtype,
        .out = y->data,
        .mean = s->mean ? s->mean->data : NULL,
        .rstd = s->rstd->data,
        .in = x->data,
        .gain = gain->data,
        .bias = s->added ? s->added->data : NULL,
        .rows = dt__row_count(x),
        .cols = dt__last_dim(x),
        .eps = s->eps,
        .rms = !s->mean,
        .gain_offset = s->gain_offset };
    a.work_bytes = dt_row_work((int64_t)a.cols, x->dtype);
    a.work = dt_scratch(x->ctx, a.work_bytes);
    return a.work ? DT__OP(op, gain, norm, &a) : dt_error(x->ctx);
}

static dt_status dt__norm_recompute(dt_node *n) {
    return dt__norm_run(n->name, n->in[0], n->in[1], n->out, (const dt__norm_saved *)n->saved);
}

/* RMSNorm, which has no bias, or layer normalization, whose bias may be NULL. */
static dt_tensor *dt__norm(
    const char *op, int rms, dt_tensor *x, dt_tensor *gain, dt_tensor *bias, dt_rmsnorm_desc desc) {
    dt_ctx *ctx = dt__float_op_context(op, 2, x, gain, bias);
    if (!ctx) return NULL;
    if (x->shape.nd < 1 || (size_t)dt_count(gain->shape) != dt__last_dim(x) ||
        x->dtype != gain->dtype)
        return dt__mismatch(op, x, gain, "the gain must have x's last dimension and type");
    if (bias && ((size_t)dt_count(bias->shape) != dt__last_dim(x) || x->dtype != bias->dtype))
        return dt__mismatch(op, x, bias, "the bias must have x's last dimension and type");
    dt_shape row = x->shape;
    row.nd--;
    int recorded = x->needs_grad || gain->needs_grad || (bias && bias->needs_grad);
    dt_tensor *y =
        dt__new_output(ctx, x, x->dtype, x->shape, op, recorded ? DT__RECOMPUTED : DT__IN_ARENA);
    dt_tensor *rstd = dt__new_output(ctx, x, dt__wide(x->dtype, 1), row, "rstd", 0);
    dt_tensor *mean = rms ? NULL : dt__new_output(ctx, x, dt__wide(x->dtype, 1), row, "mean", 0);
    /* the kernel of layer normalization always adds a bias */
    dt_tensor *added = bias || rms ? bias : dt__zeros_like(gain);
    if (!y || !rstd || (!rms && (!mean || !added))) return NULL;
    if (!dt__propagate(op, y, DT__RULE_NORM, x, gain, bias)) return NULL;
    dt__norm_saved saved = { mean, rstd, added, desc.eps > 0 ? desc.eps : 1e-5, desc.gain_offset };
    if (dt__norm_run(op, x, gain, y, &saved) != DT_OK) return NULL;
    dt_record_desc d = dt__make_record(op, x, gain, bias, dt__norm_back, sizeof saved);
    d.recompute = dt__norm_recompute;
    d.unread_inputs = DT__UNREAD_OUTPUT;
    return dt__record_with(y, d, &saved);
}

dt_tensor *dt_layernorm(dt_tensor *x, dt_tensor *gain, dt_tensor *bias, double eps) {
    return dt__norm("dt_layernorm", 0, x, gain, bias, (dt_rmsnorm_desc){ .eps = eps });
}

dt_tensor *dt_rmsnorm_at(dt_tensor *x, dt_tensor *gain, dt_rmsnorm_desc desc) {
    return dt__norm("dt_rmsnorm", 1, x, gain, NULL, desc);
}

dt_tensor *dt_rmsnorm(dt_tensor *x, dt_tensor *gain, double eps) {
    return dt_rmsnorm_at(x, gain, (dt_rmsnorm_desc){ .eps = eps });
}

static dt_status dt__softmax_back(dt_node *n) {
    dt_tensor *y = n->out;
    dt_softmax_back_args a = { .dtype = y->dtype,
        .dout = y->grad,
        .out = y->data,
        .rows = dt__row_count(y),
        .cols = dt__last_dim(y) };
    a.dx = dt_grad_raw(n, 0, &a.accumulate);
    a.work_bytes = dt_row_work((int64_t)a.cols, y->dtype);
    a.work = dt_scratch(y->ctx, a.work_bytes);
    return a.dx && a.work ? DT__KERNEL(y->ctx, n->name, softmax_back, &a) : dt_error(y->ctx);
}

dt_tensor *dt_softmax(dt_tensor *x) {
    dt_tensor *y = dt__new_like(x, "dt_softmax", DT__IN_ARENA);
    if (!dt__propagate("dt_softmax", y, DT__RULE_LAST, x, NULL, NULL)) return NULL;
    dt_softmax_args a = { .dtype = x->dtype,
        .out = y->data,
        .in = x->data,
        .rows = dt__row_count(x),
        .cols = dt__last_dim(x) };
    a.work_bytes = dt_row_work((int64_t)a.cols, x->dtype);
    a.work = dt_scratch(x->ctx, a.work_bytes);
    if (!a.work || DT__OP("dt_softmax", x, softmax, &a) != DT_OK) return NULL;
    return dt__record_op(y, dt__make_record("dt_softmax", x, NULL, NULL, dt__softmax_back, 0));
}

/* ---- elementwise functions ---- */

typedef struct dt__unary_saved {
    int act;
    double scale, shift;
} dt__unary_saved;

static dt_status dt__unary_back(dt_node *n) {
    const dt__unary_saved *saved = (const dt__unary_saved *)n->saved;
    dt_tensor *x = n->in[0];
    dt_unary_back_args a = { .dtype = x->dtype,
        .act = saved->act,
        .dout = n->out->grad,
        .in = x->data,
        .count = (size_t)dt_count(x->shape),
        .scale = saved->scale,
        .shift = saved->shift };
    a.dx = dt_grad_raw(n, 0, &a.accumulate);
    return a.dx ? DT__KERNEL(x->ctx, n->name, unary_back, &a) : dt_error(x->ctx);
}

static dt_status dt__unary_run(
    const char *op, dt_tensor *x, dt_tensor *y, const dt__unary_saved *saved) {
    dt_unary_args a = { .dtype = x->dtype,
        .act = saved->act,
        .out = y->data,
        .in = x->data,
        .count = (size_t)dt_count(x->shape),
        .scale = saved->scale,
        .shift = saved->shift };
    return DT__OP(op, x, unary, &a);
}

static dt_status dt__unary_recompute(dt_node *n) {
    return dt__unary_run(n->name, n->in[0], n->out, (const dt__unary_saved *)n->saved);
}

static dt_tensor *dt__unary(const char *op, dt_tensor *x, int act, double scale, double shift) {
    dt__unary_saved saved = { act, scale, shift };
    dt_tensor *y = dt__new_like(x, op, x && x->needs_grad ? DT__RECOMPUTED : DT__IN_ARENA);
    int rule = act == DT_ACT_AFFINE && shift == 0 ? DT__RULE_SCALE : DT__RULE_FUNCTION;
    if (!dt__propagate(op, y, rule, x, NULL, NULL)) return NULL;
    if (dt__unary_run(op, x, y, &saved) != DT_OK) return NULL;
    dt_record_desc d = dt__make_record(op, x, NULL, NULL, dt__unary_back, sizeof saved);
    d.recompute = dt__unary_recompute;
    d.unread_inputs = DT__UNREAD_OUTPUT;
    return dt__record_with(y, d, &saved);
}

dt_tensor *dt_gelu(dt_tensor *x) { return dt__unary("dt_gelu", x, DT_ACT_GELU, 1, 0); }
dt_tensor *dt_gelu_erf(dt_tensor *x) { return dt__unary("dt_gelu_erf", x, DT_ACT_GELU_ERF, 1, 0); }
dt_tensor *dt_silu(dt_tensor *x) { return dt__unary("dt_silu", x, DT_ACT_SILU, 1, 0); }
dt_tensor *dt_relu(dt_tensor *x) { return dt__unary("dt_relu", x, DT_ACT_RELU, 1, 0); }
dt_tensor *dt_tanh(dt_tensor *x) { return dt__unary("dt_tanh", x, DT_ACT_TANH, 1, 0); }
dt_tensor *dt_exp(dt_tensor *x) { return dt__unary("dt_exp", x, DT_ACT_EXP, 1, 0); }
dt_tensor *dt_ln(dt_tensor *x) { return dt__unary("dt_ln", x, DT_ACT_LN, 1, 0); }
dt_tensor *dt_sigmoid(dt_tensor *x) { return dt__unary("dt_sigmoid", x, DT_ACT_SIGMOID, 1, 0); }
dt_tensor *dt_softplus(dt_tensor *x) { return dt__unary("dt_softplus", x, DT_ACT_SOFTPLUS, 1, 0); }
dt_tensor *dt_sqrt(dt_tensor *x) { return dt__unary("dt_sqrt", x, DT_ACT_SQRT, 1, 0); }
dt_tensor *dt_abs(dt_tensor *x) { return dt__unary("dt_abs", x, DT_ACT_ABS, 1, 0); }
dt_tensor *dt_pow(dt_tensor *x, double exponent) {
    return dt__unary("dt_pow", x, DT_ACT_POW, exponent, 0);
}
dt_tensor *dt_clamp(dt_tensor *x, double low, double high) {
    if (!x || low <= high) return dt__unary("dt_clamp", x, DT_ACT_CLAMP, low, high);
    dt_fail(x->ctx, DT_ERR_ARG, "dt_clamp(%s): low %g must be at most high %g", x->name, low, high);
    return NULL;
}
dt_tensor *dt_affine(dt_tensor *x, double scale, double shift) {
    return dt__unary("dt_affine", x, DT_ACT_AFFINE, scale, shift);
}

static dt_status dt__glu_back(dt_node *n) {
    dt_tensor *x = n->in[0];
    dt_glu_back_args a = { .dtype = x->dtype,
        .act = *(const int *)n->saved,
        .dout = n->out->grad,
        .in = x->data,
        .rows = dt__row_count(n->out),
        .cols = dt__last_dim(x) };
    a.dx = dt__grad_in_place(n, &a.accumulate);
    return a.dx ? DT__KERNEL(x->ctx, n->name, glu_back, &a) : dt_error(x->ctx);
}

/* act: the DT_ACT_* of the gate */
static dt_status dt__glu_run(const char *op, dt_tensor *x, dt_tensor *y, int act) {
    dt_glu_args a = { .dtype = x->dtype,
        .act = act,
        .out = y->data,
        .in = x->data,
        .rows = dt__row_count(y),
        .cols = dt__last_dim(x) };
    return DT__OP(op, x, glu, &a);
}

static dt_status dt__glu_recompute(dt_node *n) {
    return dt__glu_run(n->name, n->in[0], n->out, *(const int *)n->saved);
}

static dt_tensor *dt__glu(const char *op, dt_tensor *x, int act) {
    dt_ctx *ctx = dt__float_op_context(op, 1, x, NULL, NULL);
    if (!ctx) return NULL;
    dt_shape shape = x->shape;
    if (shape.nd < 2 || shape.d[shape.nd - 2] != 2)
        return dt__shape_error(op, x, "gate and up (..,2,F) are needed");
    shape.d[shape.nd - 2] = shape.d[shape.nd - 1];
    shape.nd--;
    dt_tensor *y =
        dt__new_output(ctx, x, x->dtype, shape, op, x->needs_grad ? DT__RECOMPUTED : DT__IN_ARENA);
    if (!dt__propagate(op, y, DT__RULE_GLU, x, NULL, NULL)) return NULL;
    if (dt__glu_run(op, x, y, act) != DT_OK) return NULL;
    dt_record_desc d = dt__make_record(op, x, NULL, NULL, dt__glu_back, sizeof act);
    d.recompute = dt__glu_recompute;
    d.unread_inputs = DT__UNREAD_OUTPUT;
    return dt__record_with(y, d, &act);
}

dt_tensor *dt_swiglu(dt_tensor *x) { return dt__glu("dt_swiglu", x, DT_ACT_SILU); }
dt_tensor *dt_geglu(dt_tensor *x) { return dt__glu("dt_geglu", x, DT_ACT_GELU); }

// ==== 20. Ops: arithmetic, sums, shapes =========================================================

/* Splits one scratch allocation into n buffers; buffer i has bytes[i] bytes, rounded up to a
   multiple of 64. Returns 1, or 0 on failure. */
static int dt__split_scratch(dt_ctx *ctx, const size_t *bytes, char **buffers, int n) {
    size_t all = 64, at = 0;
    for (int i = 0; i < n; i++) all += (bytes[i] + 63) / 64 * 64;
    char *p = (char *)dt_scratch(ctx, all);
    for (int i = 0; i < n; i++) {
        buffers[i] = p ? p + at : NULL;
        at += (bytes[i] + 63) / 64 * 64;
    }
    return p != NULL;
}

/* Broadcasting. *out receives the shape of the result of an elementwise op on tensors of shapes `a`
   and b. stride_a and stride_b receive the strides of these tensors along the dimensions of *out.
   If a tensor lacks a dimension or has size 1 in it, its stride is 0, so that its elements repeat.
   Returns 1, or 0 if the shapes do not fit. */
static int dt__broadcast(
    dt_shape a, dt_shape b, dt_shape *out, int64_t *stride_a, int64_t *stride_b) {
    int64_t step_a = 1, step_b = 1;
    *out = a.nd >= b.nd ? a : b;
    for (int i = out->nd - 1, ia = a.nd - 1, ib = b.nd - 1; i >= 0; i--, ia--, ib--) {
        int64_t na = ia >= 0 ? a.d[ia] : 1, nb = ib >= 0 ? b.d[ib] : 1;
        if (na != nb && na != 1 && nb != 1) return 0;
        out->d[i] = na == 1 ? nb : na;
        stride_a[i] = na == 1 ? 0 : step_a;
        stride_b[i] = nb == 1 ? 0 : step_b;
        step_a *= na;
        step_b *= nb;
    }
    return 1;
}

/* The backward of broadcasting. Adds scale * g to the gradient of in[i], summed over the dimensions
   along which the forward repeated in[i]. g has the output's shape. Each kernel call sums over one
   group of adjacent repeated dimensions, beginning with the last group. The intermediate results
   alternate between the two buffers. */
static dt_status dt__sum_to(
    dt_node *n, int i, const void *g, double scale, void *const buffers[2]) {
    dt_tensor *t = n->in[i];
    dt_shape at = n->out->shape;
    dt_dtype dtype = t->dtype;
    int skip = at.nd - t->shape.nd, which = 0, left = 0, repeats[DT_MAX_DIMS];
    for (int d = 0; d < at.nd; d++)
        left += repeats[d] = at.d[d] != (d < skip ? 1 : t->shape.d[d - skip]);
    if (left == 0 && scale == 1) return dt__add_grad(n, i, g); /* no broadcasting */
    for (int end = at.nd;;) {
        dt_sum_args a = { .dtype = dtype,
            .out = buffers[which],
            .in = g,
            .outer = 1,
            .n = 1,
            .inner = 1,
            .scale = 1 };
        for (; end > 0 && !repeats[end - 1]; end--) a.inner *= (size_t)at.d[end - 1];
        for (; end > 0 && repeats[end - 1]; end--, left--) a.n *= (size_t)at.d[end - 1];
        for (int d = 0; d < end; d++) a.outer *= (size_t)at.d[d];
        a.wide = dt_grad_dtype(t) != t->dtype; /* intermediate sums have the gradient's type */
        if (left == 0) {
            a.scale = scale;
            a.work = buffers[which]; /* free, because this last sum is stored in the gradient */
            a.work_bytes = dt__bytes(n->out);
            a.out = dt__grad_wide(n, i, &a.accumulate, &a.wide);
        }
        if (!a.out || DT__KERNEL(t->ctx, n->name, sum, &a) != DT_OK || left == 0)
            return dt_error(t->ctx);
        dtype = dt__wide(dtype, a.wide);
        for (int d = end; d < at.nd; d++) { /* dimensions end .. nd - 1 are now summed */
            if (repeats[d]) at.d[d] = 1;
            repeats[d] = 0;
        }
        g = buffers[which];
        which = 1 - which;
        end = at.nd;
    }
}

/* Adds the gradient that the kernel's arguments describe to that of input i: directly if they have
   the same shape, otherwise as a sum over the dimensions that broadcasting repeats. */
static dt_status dt__binary_term(
    dt_node *n, int i, dt_binary_args *a, void *term, void *const buffers[2]) {
    int same = dt__same_shape(n->in[i]->shape, n->out->shape);
    a->out = same ? dt_grad_raw(n, i, &a->accumulate) : term;
    if (!a->out || DT__KERNEL(n->out->ctx, n->name, binary, a) != DT_OK)
        return dt_error(n->out->ctx);
    return same ? DT_OK : dt__sum_to(n, i, term, 1, buffers);
}

/* The backward of dt_add, dt_sub, dt_mul, dt_div, dt_minimum and dt_maximum. Uses d(a+b) = da + db,
   d(ab) = b da + a db, d(a/b) = da / b - (a/b) db / b and d max(a,b) = step(a,b) da + step(b,a) db,
   where step is DT_STEP; min(a,b) has the steps exchanged. */
static dt_status dt__binary_back(dt_node *n) {
    dt_tensor *out = n->out;
    dt_ctx *ctx = out->ctx;
    int op = *(const int *)n->saved, sums = op == DT_SUB;
    for (int i = 0; i < 2; i++) sums |= !dt__same_shape(n->in[i]->shape, out->shape);
    size_t bytes[3] = { sums && op >= DT_MUL ? dt__bytes(out) : 0, sums ? dt__bytes(out) : 0,
        sums ? dt__bytes(out) : 0 };
    char *work[3];
    if (!dt__split_scratch(ctx, bytes, work, 3)) return dt_error(ctx);
    void *buffers[2] = { work[1], work[2] };
    for (int i = 0; i < 2; i++) {
        dt_binary_args a = { .dtype = out->dtype, .op = op, .a = out->grad };
        dt_tensor *left = out, *right = n->in[op == DT_DIV ? 1 : 1 - i];
        if (!dt_wants(n, i)) continue;
        if (op == DT_ADD || op == DT_SUB) {
            double sign = op == DT_SUB && i == 1 ? -1 : 1;
            if (dt__sum_to(n, i, out->grad, sign, buffers) != DT_OK) return dt_error(ctx);
            continue;
        }
        if (op == DT_MINIMUM || op == DT_MAXIMUM) {
            left = n->in[op == DT_MAXIMUM ? i : 1 - i]; /* the larger one if i was selected */
            right = n->in[op == DT_MAXIMUM ? 1 - i : i];
            a.op = DT_STEP;
            a.a = left->data;
            a.factor = out->grad;
        }
        if (op == DT_DIV && i == 1) a.factor = out->data, a.negate = 1;
        a.b = right->data;
        dt__broadcast(left->shape, right->shape, &a.shape, a.stride_a, a.stride_b);
        if (dt__binary_term(n, i, &a, work[0], buffers) != DT_OK) return dt_error(ctx);
    }
    return DT_OK;
}

/* Casts a scalar of another type than the other operand: to the type of a tensor with dimensions,
   or to the wider type of two scalars. Not if one of them holds integers. */
static void dt__cast_scalar(dt_tensor **a, dt_tensor **b) {
    size_t size_a = dt_dtype_size((*a)->dtype), size_b = dt_dtype_size((*b)->dtype);
    int scalar_a = (*a)->shape.nd == 0, scalar_b = (*b)->shape.nd == 0;
    if ((*a)->dtype == (*b)->dtype || dt__integer((*a)->dtype) || dt__integer((*b)->dtype)) return;
    if (scalar_a && (!scalar_b || size_a < size_b))
        *a = dt_cast(*a, (*b)->dtype);
    else if (scalar_b && (!scalar_a || size_b < size_a))
        *b = dt_cast(*b, (*a)->dtype);
}

static dt_tensor *dt__binary(const char *name, int op, dt_tensor *a, dt_tensor *b) {
    dt_ctx *ctx = dt__float_op_context(name, 2, a, b, NULL);
    if (!ctx) return NULL;
    dt__cast_scalar(&a, &b);
    if (!a || !b) return NULL;
    dt_binary_args args = { .dtype = a->dtype, .op = op };
    if (a->dtype != b->dtype)
        return dt__mismatch(name, a, b,
            dt__integer(b->dtype) ? "not for integers; dt_cast makes floats of them"
                                  : "types must be equal, unless one is a scalar");
    if (!dt__broadcast(a->shape, b->shape, &args.shape, args.stride_a, args.stride_b))
        return dt__mismatch(name, a, b, "dimensions, counted from the last, must be equal or 1");
    const dt_tensor *rows = a->max_rows && a->shape.nd == args.shape.nd ? a : b;
    dt_tensor *over = op >= DT_MUL || a == b ? NULL : dt__can_overwrite(b) ? b : a;
    if (over && !dt__same_shape(over->shape, args.shape)) over = NULL;
    dt_tensor *y = over ? dt__new_output_over(over, name)
                        : dt__new_output(ctx, rows, a->dtype, args.shape, name, 0);
    int rule = op == DT_MUL    ? DT__RULE_MUL
               : op == DT_DIV  ? DT__RULE_DIV
               : op < DT_MUL   ? DT__RULE_ADD
               : op >= DT_LESS ? DT__RULE_COMPARE
                               : DT__RULE_MAXIMUM;
    if (!dt__propagate(name, y, rule, a, b, NULL)) return NULL;
    args.out = y->data;
    args.a = a->data;
    args.b = b->data;
    if (DT__OP(name, a, binary, &args) != DT_OK) return NULL;
    if (rule == DT__RULE_COMPARE) return y;
    dt_record_desc d = dt__make_record(name, a, b, NULL, dt__binary_back, sizeof op);
    if (op < DT_MUL) d.unread_inputs = 3 | DT__UNREAD_OUTPUT;
    y = dt__record_with(y, d, &op);
    return over ? dt__overwritten(over, y) : y;
}

dt_tensor *dt_add(dt_tensor *a, dt_tensor *b) { return dt__binary("dt_add", DT_ADD, a, b); }
dt_tensor *dt_sub(dt_tensor *a, dt_tensor *b) { return dt__binary("dt_sub", DT_SUB, a, b); }
dt_tensor *dt_mul(dt_tensor *a, dt_tensor *b) { return dt__binary("dt_mul", DT_MUL, a, b); }
dt_tensor *dt_div(dt_tensor *a, dt_tensor *b) { return dt__binary("dt_div", DT_DIV, a, b); }
dt_tensor *dt_minimum(dt_tensor *a, dt_tensor *b) {
    return dt__binary("dt_minimum", DT_MINIMUM, a, b);
}
dt_tensor *dt_maximum(dt_tensor *a, dt_tensor *b) {
    return dt__binary("dt_maximum", DT_MAXIMUM, a, b);
}
dt_tensor *dt_less(dt_tensor *a, dt_tensor *b) { return dt__binary("dt_less", DT_LESS, a, b); }
dt_tensor *dt_less_equal(dt_tensor *a, dt_tensor *b) {
    return dt__binary("dt_less_equal", DT_LESS_EQUAL, a, b);
}
dt_tensor *dt_equal(dt_tensor *a, dt_tensor *b) { return dt__binary("dt_equal", DT_EQUAL, a, b); }

/* The backward of dt_where: each input gets the gradient where it was chosen, and 0 elsewhere. */
static dt_status dt__where_back(dt_node *n) {
    dt_tensor *out = n->out, *mask = n->in[0];
    size_t bytes[3] = { dt__bytes(out), dt__bytes(out), dt__bytes(out) };
    char *work[3];
    if (!dt__split_scratch(out->ctx, bytes, work, 3)) return dt_error(out->ctx);
    void *buffers[2] = { work[1], work[2] };
    for (int i = 1; i < 3; i++) {
        dt_where_args args = { .dtype = out->dtype, .out = work[0], .mask = mask->data };
        if (!dt_wants(n, i)) continue;
        *(i == 1 ? &args.a : &args.b) = out->grad;
        dt__broadcast(out->shape, mask->shape, &args.shape, args.stride_a, args.stride_mask);
        memcpy(args.stride_b, args.stride_a, sizeof args.stride_b);
        if (DT__KERNEL(out->ctx, n->name, where, &args) != DT_OK ||
            dt__sum_to(n, i, work[0], 1, buffers) != DT_OK)
            return dt_error(out->ctx);
    }
    return DT_OK;
}

static dt_tensor *dt__where(const char *op, dt_tensor *mask, dt_tensor *a, dt_tensor *b) {
    dt_ctx *ctx = dt__float_op_context(op, 3, mask, a, b);
    if (!ctx) return NULL;
    dt_where_args args = { .dtype = a->dtype };
    dt_shape shape;
    int64_t dense[DT_MAX_DIMS];
    if (a->dtype != b->dtype || !dt__broadcast(a->shape, b->shape, &shape, dense, args.stride_b))
        return dt__mismatch(op, a, b, "types must be equal, and dimensions equal or 1");
    if (mask->dtype != a->dtype ||
        !dt__broadcast(shape, mask->shape, &args.shape, dense, args.stride_mask))
        return dt__mismatch(op, mask, a, "types must be equal, and dimensions equal or 1");
    dt__broadcast(args.shape, mask->shape, &shape, dense, args.stride_mask);
    dt__broadcast(args.shape, b->shape, &shape, dense, args.stride_b);
    dt__broadcast(args.shape, a->shape, &shape, dense, args.stride_a);
    const dt_tensor *rows = a->max_rows && a->shape.nd == args.shape.nd ? a : b;
    dt_tensor *y = dt__new_output(ctx, rows, a->dtype, args.shape, op, 0);
    if (!dt__propagate(op, y, DT__RULE_WHERE, mask, a, b)) return NULL;
    args.out = y->data;
    args.mask = mask->data;
    args.a = a->data;
    args.b = b->data;
    if (DT__OP(op, a, where, &args) != DT_OK) return NULL;
    return dt__record_op(y, dt__make_record(op, mask, a, b, dt__where_back, 0));
}

dt_tensor *dt_where(dt_tensor *mask, dt_tensor *a, dt_tensor *b) {
    return dt__where("dt_where", mask, a, b);
}

dt_tensor *dt_masked_fill(dt_tensor *x, dt_tensor *mask, double value) {
    dt_ctx *ctx = dt__float_op_context("dt_masked_fill", 2, x, mask, NULL);
    dt_tensor *fill = ctx ? dt__new_output(ctx, NULL, x->dtype, DT_SCALAR, "value", 0) : NULL;
    if (!fill || dt__fill(ctx, x->dtype, fill->data, 1, value) != DT_OK) return NULL;
    return dt__where("dt_masked_fill", mask, fill, x);
}

/* ---- sums and maxima ---- */

/* Returns the number of a dimension of x; -1 means the last one, -2 the one before. Returns -1
   after failing the context if x has no such dimension. */
static int dt__dim_number(const char *op, const dt_tensor *x, int dim) {
    int nd = x->shape.nd, at = dim < 0 ? dim + nd : dim;
    if (at >= 0 && at < nd) return at;
    dt_fail(x->ctx, DT_ERR_ARG, "%s(%s): %s %s has no dimension %d%s", op, x->name,
        dt_dtype_name(x->dtype), dt__shape_text(x->shape).s, dim,
        nd ? dt__format("; use 0 to %d, or -%d to -1 from the end", nd - 1, nd).s : "");
    return -1;
}

int64_t dt_dim(const dt_tensor *x, int i) {
    int at = x ? dt__dim_number("dt_dim", x, i) : -1;
    return at >= 0 ? x->shape.d[at] : 0;
}

/* As dt__dim_number; also refuses a dimension that is in *used already, and adds it: bit i of *used
   is 1 if dimension i was named. */
static int dt__dim_once(const char *op, const dt_tensor *x, int dim, unsigned *used) {
    int at = dt__dim_number(op, x, dim);
    if (at < 0) return -1;
    if (*used >> at & 1) {
        dt_fail(x->ctx, DT_ERR_ARG, "%s(%s): dimension %d of %s is named twice", op, x->name, at,
            dt__shape_text(x->shape).s);
        return -1;
    }
    *used |= 1u << at;
    return at;
}

/* x seen as a tensor of shape (outer,n,inner), where n is the number of elements of dimensions
   first .. first + count - 1. */
typedef struct dt__dim_split {
    size_t outer, n, inner;
    dt_shape reduced; /* x's shape without these dimensions; if keepdim is 1, they have size 1 */
    int first, count, keepdim;
} dt__dim_split;

static dt__dim_split dt__split(const dt_tensor *x, int first, int count, int keepdim) {
    dt__dim_split a = { 1, 1, 1, DT_SCALAR, first, count, keepdim };
    for (int i = 0; i < x->shape.nd; i++) {
        int inside = i >= first && i < first + count;
        size_t *extent = inside ? &a.n : i < first ? &a.outer : &a.inner;
        *extent *= (size_t)x->shape.d[i];
        if (!inside || keepdim) a.reduced.d[a.reduced.nd++] = inside ? 1 : x->shape.d[i];
    }
    return a;
}

/* The split at dimension `dim`, or at all dimensions if it is DT_ALL. */
static int dt__split_at_dim(const char *op, const dt_tensor *x, int dim, dt__dim_split *a) {
    int all = dim == DT_ALL, at = all ? 0 : dt__dim_number(op, x, dim);
    if (at >= 0) *a = dt__split(x, at, all ? x->shape.nd : 1, 0);
    return at >= 0;
}

/* The sharding rule of an op on the dimensions of a split; the next rule is that of keepdim. */
static int dt__propagate_split(
    const char *op, dt_tensor *y, int rule, dt_tensor *x, const dt__dim_split *r) {
    return dt__propagate_at(op, y, rule + r->keepdim, r->first, r->count, &x, 1);
}

typedef struct dt__sum_saved {
    dt__dim_split split;
    double scale;
    dt_tensor *index;
} dt__sum_saved;

/* Adds scale times the output's gradient to dx, repeated along the summed dimension. */
static dt_status dt__sum_back(dt_node *n) {
    const dt__sum_saved *saved = (const dt__sum_saved *)n->saved;
    dt_tensor *x = n->in[0], *y = n->out;
    const dt__dim_split *r = &saved->split;
    dt_permute_args a = { .dtype = x->dtype,
        .in = y->grad,
        .shape = DT_SHAPE((int64_t)r->outer, (int64_t)r->n, (int64_t)r->inner),
        .out_stride = { (int64_t)(r->n * r->inner), (int64_t)r->inner, 1 },
        .in_stride = { (int64_t)r->inner, 0, 1 } };
    dt_unary_args scale = { .dtype = y->dtype,
        .act = DT_ACT_AFFINE,
        .in = y->grad,
        .count = (size_t)dt_count(y->shape),
        .scale = saved->scale };
    if (saved->scale != 1) {
        a.in = scale.out = dt_scratch(x->ctx, dt__reserved_bytes(y));
        if (!a.in || DT__KERNEL(x->ctx, n->name, unary, &scale) != DT_OK) return dt_error(x->ctx);
    }
    a.out = dt_grad_raw(n, 0, &a.accumulate);
    return a.out ? DT__KERNEL(x->ctx, n->name, permute, &a) : dt_error(x->ctx);
}

static dt_tensor *dt__sum_at(const char *op, dt_tensor *x, dt__dim_split r, int mean) {
    dt_ctx *ctx = x->ctx;
    double scale = mean ? 1.0 / (double)r.n : 1;
    dt_tensor *y = dt__new_output(ctx, r.first ? x : NULL, x->dtype, r.reduced, op, 0);
    if (!dt__propagate_split(op, y, mean ? DT__RULE_MEAN : DT__RULE_SUM, x, &r)) return NULL;
    dt_sum_args a = { .dtype = x->dtype,
        .out = y->data,
        .in = x->data,
        .outer = r.outer,
        .n = r.n,
        .inner = r.inner,
        .scale = scale,
        .work_bytes = dt__scratch_bytes(ctx, 0) };
    a.work = dt_scratch(ctx, a.work_bytes);
    if (DT__OP(op, x, sum, &a) != DT_OK) return NULL;
    dt__sum_saved saved = { r, scale, NULL };
    return dt__record_with(
        y, dt__make_record(op, x, NULL, NULL, dt__sum_back, sizeof saved), &saved);
}

static dt_tensor *dt__sum(const char *op, dt_tensor *x, dt__dim_split r) {
    return dt__sum_at(op, x, r, 0);
}
static dt_tensor *dt__mean(const char *op, dt_tensor *x, dt__dim_split r) {
    return dt__sum_at(op, x, r, 1);
}

/* The backward of dt_max_over and dt_topk. Adds each gradient to that of the selected element. */
static dt_status dt__select_back(dt_node *n) {
    const dt__sum_saved *saved = (const dt__sum_saved *)n->saved;
    dt_tensor *x = n->in[0];
    size_t others = saved->split.outer * saved->split.inner;
    dt_scatter_args a = { .dtype = x->dtype,
        .in = n->out->grad,
        .index = (int32_t *)saved->index->data,
        .outer = saved->split.outer,
        .n = saved->split.n,
        .k = others ? (size_t)dt_count(n->out->shape) / others : 0,
        .inner = saved->split.inner };
    a.out = dt_grad_raw(n, 0, &a.accumulate);
    return a.out ? DT__KERNEL(x->ctx, n->name, scatter, &a) : dt_error(x->ctx);
}

static dt_tensor *dt__select_record(
    const char *op, dt_tensor *x, dt_tensor *y, dt_tensor *index, dt__dim_split r) {
    dt__sum_saved saved = { r, 1, index };
    return dt__record_with(
        y, dt__make_record(op, x, NULL, NULL, dt__select_back, sizeof saved), &saved);
}

/* The maximum, or its index if `arg` is 1: then the maxima are needed only during the kernel. */
static dt_tensor *dt__max_at(const char *op, dt_tensor *x, dt__dim_split r, int arg) {
    dt_ctx *ctx = x->ctx;
    const dt_tensor *rows = r.first ? x : NULL;
    if (r.n == 0) return dt__shape_error(op, x, "an empty dimension has no maximum");
    dt_tensor *y = dt__new_output(ctx, rows, arg ? DT_I32 : x->dtype, r.reduced, op, 0);
    dt_tensor *index = arg ? y : dt__new_output(ctx, rows, DT_I32, r.reduced, "index", 0);
    if (!index || !dt__propagate_split(op, y, DT__RULE_MAX, x, &r)) return NULL;
    dt_max_args a = { .dtype = x->dtype,
        .out = arg ? dt_scratch(ctx, r.outer * r.inner * dt_dtype_size(x->dtype) + 1) : y->data,
        .index = (int32_t *)index->data,
        .in = x->data,
        .outer = r.outer,
        .n = r.n,
        .inner = r.inner };
    if (!a.out || DT__OP(op, x, max, &a) != DT_OK) return NULL;
    return arg ? y : dt__select_record(op, x, y, index, r);
}
static dt_tensor *dt__max(const char *op, dt_tensor *x, dt__dim_split r) {
    return dt__max_at(op, x, r, 0);
}
static dt_tensor *dt__argmax(const char *op, dt_tensor *x, dt__dim_split r) {
    return dt__max_at(op, x, r, 1);
}

typedef dt_tensor *(*dt__reduce_fn)(const char *op, dt_tensor *x, dt__dim_split r);

static dt_tensor *dt__reduce_over(const char *op, dt_tensor *x, int dim, dt__reduce_fn reduce) {
    dt__dim_split r;
    int fits = dt__float_op_context(op, 1, x, NULL, NULL) && dt__split_at_dim(op, x, dim, &r);
    return fits ? reduce(op, x, r) : NULL;
}

dt_tensor *dt_sum_over(dt_tensor *x, int dim) {
    return dt__reduce_over("dt_sum_over", x, dim, dt__sum);
}
dt_tensor *dt_mean_over(dt_tensor *x, int dim) {
    return dt__reduce_over("dt_mean_over", x, dim, dt__mean);
}
dt_tensor *dt_max_over(dt_tensor *x, int dim) {
    return dt__reduce_over("dt_max_over", x, dim, dt__max);
}

dt_tensor *dt_argmax(dt_tensor *x, int dim) {
    return dt__reduce_over("dt_argmax", x, dim, dt__argmax);
}

dt_tensor *dt_topk(dt_tensor *x, int k, dt_tensor **index) {
    dt_ctx *ctx = dt__float_op_context("dt_topk", 1, x, NULL, NULL);
    if (!ctx) return NULL;
    if (x->shape.nd < 1 || k < 1 || k > x->shape.d[x->shape.nd - 1])
        return dt__shape_error("dt_topk", x, "k must be 1 up to the last dimension");
    dt_shape shape = x->shape;
    shape.d[shape.nd - 1] = k;
    dt__dim_split r = { dt__row_count(x), dt__last_dim(x), 1, shape, 0, 0, 0 };
    dt_tensor *y = dt__new_output(ctx, x, x->dtype, shape, "dt_topk", 0),
              *at = dt__new_output(ctx, x, DT_I32, shape, "index", 0);
    if (!at || !dt__propagate("dt_topk", y, DT__RULE_LAST, x, NULL, NULL)) return NULL;
    at->placements = y->placements;
    dt_topk_args a = { .dtype = x->dtype,
        .values = y->data,
        .index = (int32_t *)at->data,
        .in = x->data,
        .rows = r.outer,
        .cols = r.n,
        .k = (size_t)k };
    if (DT__OP("dt_topk", x, topk, &a) != DT_OK) return NULL;
    if (index) *index = at;
    return dt__select_record("dt_topk", x, y, at, r);
}

/* ---- other shapes ---- */

/* Makes a view: a second tensor that shares x's data and gradient. Because the gradient is shared,
   nothing is recorded on the tape. */
static dt_tensor *dt__view(dt_tensor *x, dt_shape shape, const char *name) {
    dt_ctx *ctx = dt__op_context(name, 1, x, NULL, NULL);
    dt_tensor *y = ctx ? dt__tensor(ctx, x->dtype, shape, name) : NULL;
    if (!y) return NULL;
    y->base = x;
    y->data = x->data;
    y->needs_grad = x->needs_grad;
    y->max_rows = dt__max_rows_kept(x, shape);
    return y;
}

dt_tensor *dt_alias(dt_tensor *x) {
    dt_ctx *ctx = dt__op_context("dt_alias", 1, x, NULL, NULL);
    if (!ctx) return NULL;
    dt_tensor *owner = dt__owner(x), *y;
    if (ctx->no_grad) {
        y = dt__view(x, x->shape, x->name);
        if (y) y->needs_grad = 0;
        return y;
    }
    /* copies the data if they may be dropped before the alias; recomputed data are shared, because
       whoever reads the alias makes them again */
    int copied = (owner->storage != DT__IN_ARENA && owner->storage != DT__SPLIT_BACKWARD &&
                     owner->storage != DT__RECOMPUTED) ||
                 (owner->param && owner->param->bucket->data != owner->param->bucket->shard);
    y = copied ? dt__new_output(ctx, x, x->dtype, x->shape, x->name, 0)
               : dt__tensor(ctx, x->dtype, x->shape, x->name);
    if (y && copied && dt__move(ctx, y->data, x->data, dt__bytes(x)) != DT_OK) return NULL;
    if (y && !copied) y->data = x->data;
    if (y && owner->storage == DT__RECOMPUTED) {
        y->storage = DT__RECOMPUTED;
        y->shares = owner->shares ? owner->shares : owner;
    }
    if (y) y->max_rows = x->max_rows;
    owner->read_by_weights = 1; /* so the data stay until the alias is dropped */
    return y;
}

dt_tensor *dt_detach(dt_tensor *x) {
    dt_tensor *y = dt_alias(x);
    return dt__propagate("dt_detach", y, DT__RULE_SCALE, x, NULL, NULL) ? y : NULL;
}

/* Replaces a size of -1 in *shape by the size that gives as many elements as x has. Returns 1, or 0
   after failing the context. */
static int dt__shape_complete(const dt_tensor *x, dt_shape *shape) {
    int open = -1, several = 0;
    for (int i = 0; i < shape->nd && i < DT_MAX_DIMS; i++)
        if (shape->d[i] == -1) several |= open >= 0, open = i;
    if (open < 0) return 1;
    dt_shape rest = *shape;
    rest.d[open] = 1;
    int64_t count = dt_count(x->shape), each = several ? 0 : dt_count(rest);
    if (each > 0 && count % each == 0) {
        shape->d[open] = count / each;
        return 1;
    }
    return dt_fail(x->ctx, DT_ERR_SHAPE, "dt_reshape(%s): %s and %s: %s", x->name,
               dt__shape_text(x->shape).s, dt__shape_text(*shape).s,
               several ? "only one size can be -1"
                       : "no size in place of -1 gives the same element count") == DT_OK;
}

dt_tensor *dt_reshape(dt_tensor *x, dt_shape shape) {
    if (x && x->ctx->status == DT_OK && !dt__shape_complete(x, &shape)) return NULL;
    dt_tensor *y = dt__view(x, shape, "dt_reshape");
    if (!y) return NULL;
    if (dt_count(shape) == dt_count(x->shape)) return dt__propagate_reshape(y, x) ? y : NULL;
    dt_fail(x->ctx, DT_ERR_SHAPE, "dt_reshape(%s): %s and %s: element counts differ", x->name,
        dt__shape_text(x->shape).s, dt__shape_text(shape).s);
    return NULL;
}

static void dt__dense_strides(dt_shape shape, int64_t *stride) {
    int64_t step = 1;
    for (int i = shape.nd - 1; i >= 0; i--) {
        stride[i] = step;
        step *= shape.d[i];
    }
}

/* dt_slice, dt_select, dt_concat and dt_permute make one strided copy for each input. Their
   backward makes the same copies in the other direction. In dt_concat, input i fills a region of
   the output. In dt_slice and dt_select the output is a region of the input, and in dt_permute the
   region is all of it. */
typedef struct dt__strided_saved {
    dt_shape region[DT_MAX_INPUTS];
    int64_t out_offset[DT_MAX_INPUTS], in_offset[DT_MAX_INPUTS]; /* in elements */
    int64_t out_stride[DT_MAX_DIMS], in_stride[DT_MAX_INPUTS][DT_MAX_DIMS];
} dt__strided_saved;

static dt_status dt__strided_copy(const char *op, const dt_tensor *x, const dt__strided_saved *m,
    int i, void *out, const void *in, int back, int accumulate) {
    dt_dtype dtype = x->dtype;
    size_t size = dt_dtype_size(dtype);
    dt_permute_args a = { .dtype = dtype, .shape = m->region[i], .accumulate = accumulate };
    memcpy(back ? a.in_stride : a.out_stride, m->out_stride, sizeof a.in_stride);
    memcpy(back ? a.out_stride : a.in_stride, m->in_stride[i], sizeof a.in_stride);
    a.out = (char *)out + (size_t)(back ? m->in_offset[i] : m->out_offset[i]) * size;
    a.in = (const char *)in + (size_t)(back ? m->out_offset[i] : m->in_offset[i]) * size;
    return dt_count(a.shape) == 0 ? DT_OK : DT__OP(op, x, permute, &a);
}

static dt_status dt__strided_back(dt_node *n) {
    const dt__strided_saved *m = (const dt__strided_saved *)n->saved;
    dt_ctx *ctx = n->out->ctx;
    for (int i = 0; i < n->n_in; i++) {
        if (!dt_wants(n, i)) continue;
        dt_tensor *x = n->in[i];
        int accumulate = 0;
        void *dx = dt_grad_raw(n, i, &accumulate);
        if (dx && !accumulate && dt_count(m->region[i]) < dt_count(x->shape))
            dt__fill(ctx, x->dtype, dx, (size_t)dt_count(x->shape), 0);
        if (!dx || dt__strided_copy(n->name, x, m, i, dx, n->out->grad, 1, accumulate) != DT_OK)
            return dt_error(ctx);
    }
    return DT_OK;
}

/* rule, before, inner: the sharding rule, see dt__propagate_all. */
static dt_tensor *dt__strided_op(const char *op, dt_tensor *const *x, int n, dt_shape shape,
    const dt__strided_saved *m, int rule, int before, int inner) {
    int varies = 0;
    while (varies < n - 1 && !x[varies]->max_rows) varies++;
    dt_tensor *y = dt__new_output(x[0]->ctx, before ? x[varies] : NULL, x[0]->dtype, shape, op, 0);
    if (!dt__propagate_at(op, y, rule, before, inner, x, n)) return NULL;
    for (int i = 0; i < n; i++)
        if (dt__strided_copy(op, x[i], m, i, y->data, x[i]->data, 0, 0) != DT_OK) return NULL;
    dt_record_desc d = dt__make_record(op, NULL, NULL, NULL, dt__strided_back, sizeof *m);
    for (int i = 0; i < n; i++) d.in[i] = x[i];
    d.n_in = n;
    d.unread_inputs = (1u << n) - 1;
    return dt__record_with(y, d, m);
}

dt_tensor *dt_slice(dt_tensor *x, int dim, int64_t first, int64_t count) {
    dt_ctx *ctx = dt__op_context("dt_slice", 1, x, NULL, NULL);
    dt__strided_saved m;
    if (!ctx || (dim = dt__dim_number("dt_slice", x, dim)) < 0) return NULL;
    memset(&m, 0, sizeof m);
    if (first < 0 || count < 0 || first > x->shape.d[dim] - count) {
        dt_fail(ctx, DT_ERR_SHAPE, "dt_slice(%s): %lld from %lld of dimension %d of %s", x->name,
            (long long)count, (long long)first, dim, dt__shape_text(x->shape).s);
        return NULL;
    }
    m.region[0] = x->shape;
    m.region[0].d[dim] = count;
    dt__dense_strides(m.region[0], m.out_stride);
    dt__dense_strides(x->shape, m.in_stride[0]);
    m.in_offset[0] = first * m.in_stride[0][dim];
    int whole = count == x->shape.d[dim];
    return dt__strided_op("dt_slice", &x, 1, m.region[0], &m,
        whole ? DT__RULE_SCALE : DT__RULE_SLICE, whole ? -1 : dim, 1);
}

dt_tensor *dt_select(dt_tensor *x, int dim, int64_t index) {
    int64_t stride[DT_MAX_DIMS];
    dt__strided_saved m;
    if (!dt__op_context("dt_select", 1, x, NULL, NULL)) return NULL;
    int at = dt__dim_number("dt_select", x, dim);
    if (at < 0) return NULL;
    int64_t size = x->shape.d[at], i = index < 0 ? index + size : index;
    if (i < 0 || i >= size) {
        dt_fail(x->ctx, DT_ERR_SHAPE, "dt_select(%s): index %lld of dimension %d of %s", x->name,
            (long long)index, at, dt__shape_text(x->shape).s);
        return NULL;
    }
    memset(&m, 0, sizeof m);
    dt__dense_strides(x->shape, stride);
    for (int d = 0; d < x->shape.nd; d++) {
        if (d == at) continue;
        m.in_stride[0][m.region[0].nd] = stride[d];
        m.region[0].d[m.region[0].nd++] = x->shape.d[d];
    }
    dt__dense_strides(m.region[0], m.out_stride);
    m.in_offset[0] = i * stride[at];
    return dt__strided_op("dt_select", &x, 1, m.region[0], &m, DT__RULE_SELECT, at, 1);
}

dt_tensor *dt_concat(dt_tensor *const *x, int n, int dim) {
    dt__strided_saved m;
    memset(&m, 0, sizeof m);
    for (int i = 0; x && i < n && n <= DT_MAX_INPUTS; i++)
        if (!x[i] || !x[0]) dt__null_input("dt_concat", x[0], x[i], NULL);
    if (!x || n < 1 || !x[0] || x[0]->ctx->status != DT_OK) return NULL;
    dt_ctx *ctx = x[0]->ctx;
    dt_shape shape = x[0]->shape;
    if (n > DT_MAX_INPUTS) {
        dt_fail(ctx, DT_ERR_ARG, "dt_concat: %d tensors, at most %d", n, DT_MAX_INPUTS);
        return NULL;
    }
    if ((dim = dt__dim_number("dt_concat", x[0], dim)) < 0) return NULL;
    shape.d[dim] = 0;
    for (int i = 0; i < n; i++) {
        if (!dt__op_context("dt_concat", 1, x[0], x[i], NULL)) return NULL;
        m.region[i] = x[i]->shape;
        m.region[i].d[dim] = x[0]->shape.d[dim];
        if (!dt__same_shape(m.region[i], x[0]->shape) || x[i]->dtype != x[0]->dtype)
            return dt__mismatch(
                "dt_concat", x[0], x[i], "types and all other dimensions must be equal");
        m.region[i] = x[i]->shape;
        m.out_offset[i] = shape.d[dim];
        dt__dense_strides(x[i]->shape, m.in_stride[i]);
        shape.d[dim] += x[i]->shape.d[dim];
    }
    dt__dense_strides(shape, m.out_stride);
    for (int i = 0; i < n; i++) m.out_offset[i] *= m.out_stride[dim];
    return dt__strided_op("dt_concat", x, n, shape, &m, DT__RULE_CONCAT, dim, 1);
}

/* y has the placements of x. Renames the dimensions of the shards, because dimension i of y is
   dimension order[i] of x. */
static int dt__propagate_permute(dt_tensor *y, const int *order) {
    if (!y->placements) return 1;
    dt_placements list = *y->placements;
    for (int i = 0; i < list.n; i++) {
        dt_placement *p = &list.by_group[i].at;
        int d = 0;
        if (p->kind != DT_PLACEMENT_SHARD) continue;
        while (order[d] != p->dim) d++;
        p->dim = d;
    }
    return dt__placements_set(y, &list, y);
}

/* dt_permute with an order of valid dimensions. */
static dt_tensor *dt__permute(const char *op, dt_tensor *x, const int *order) {
    int64_t stride[DT_MAX_DIMS];
    int nd = x->shape.nd, keeps_first = nd > 0 && order[0] == 0;
    dt__strided_saved m;
    memset(&m, 0, sizeof m);
    dt__dense_strides(x->shape, stride);
    m.region[0].nd = nd;
    for (int i = 0; i < nd; i++) {
        m.region[0].d[i] = x->shape.d[order[i]];
        m.in_stride[0][i] = stride[order[i]];
    }
    dt__dense_strides(m.region[0], m.out_stride);
    dt_tensor *y =
        dt__strided_op(op, &x, 1, m.region[0], &m, DT__RULE_PERMUTE, keeps_first, nd - keeps_first);
    return y && dt__propagate_permute(y, order) ? y : NULL;
}

dt_tensor *dt_permute(dt_tensor *x, const int *order) {
    int at[DT_MAX_DIMS];
    unsigned used = 0;
    if (!dt__op_context("dt_permute", 1, x, NULL, NULL)) return NULL;
    if (!order && x->shape.nd) return dt__shape_error("dt_permute", x, "the order is NULL");
    for (int i = 0; i < x->shape.nd; i++)
        if ((at[i] = dt__dim_once("dt_permute", x, order[i], &used)) < 0) return NULL;
    return dt__permute("dt_permute", x, at);
}

dt_tensor *dt_transpose(dt_tensor *x, int dim_a, int dim_b) {
    int order[DT_MAX_DIMS];
    if (!dt__op_context("dt_transpose", 1, x, NULL, NULL)) return NULL;
    int a = dt__dim_number("dt_transpose", x, dim_a),
        b = a < 0 ? a : dt__dim_number("dt_transpose", x, dim_b);
    if (b < 0) return NULL;
    for (int i = 0; i < x->shape.nd; i++) order[i] = i == a ? b : i == b ? a : i;
    return dt__permute("dt_transpose", x, order);
}

/* Reduces the dimensions of desc. If they are not adjacent, moves them behind the others first, and
   back after the reduction if they are kept. */
static dt_tensor *dt__reduce_dims(
    const char *op, dt_tensor *x, dt_reduce_desc desc, dt__reduce_fn reduce) {
    int order[DT_MAX_DIMS], back[DT_MAX_DIMS], n = 0, first = 0;
    unsigned reduced = 0;
    if (!dt__float_op_context(op, 1, x, NULL, NULL)) return NULL;
    int nd = x->shape.nd, count = desc.n ? desc.n : nd, keepdim = desc.keepdim != 0;
    if (desc.n < 0 || desc.n > DT_MAX_DIMS) {
        dt_fail(x->ctx, DT_ERR_ARG, "%s(%s): %d dimensions of %s", op, x->name, desc.n,
            dt__shape_text(x->shape).s);
        return NULL;
    }
    for (int i = 0; i < count; i++)
        if (dt__dim_once(op, x, desc.n ? desc.dims[i] : i, &reduced) < 0) return NULL;
    while (first < nd && !(reduced >> first & 1)) first++;
    if (reduced >> first == (1u << count) - 1)
        return reduce(op, x, dt__split(x, first, count, keepdim));
    for (unsigned pass = 0; pass < 2; pass++)
        for (int i = 0; i < nd; i++)
            if ((reduced >> i & 1) == pass) back[i] = n, order[n++] = i;
    x = dt__permute(op, x, order);
    dt_tensor *y = x ? reduce(op, x, dt__split(x, nd - count, count, keepdim)) : NULL;
    return y && keepdim ? dt__permute(op, y, back) : y;
}

dt_tensor *dt_sum_dims(dt_tensor *x, dt_reduce_desc desc) {
    return dt__reduce_dims("dt_sum_dims", x, desc, dt__sum);
}
dt_tensor *dt_mean_dims(dt_tensor *x, dt_reduce_desc desc) {
    return dt__reduce_dims("dt_mean_dims", x, desc, dt__mean);
}
dt_tensor *dt_max_dims(dt_tensor *x, dt_reduce_desc desc) {
    return dt__reduce_dims("dt_max_dims", x, desc, dt__max);
}

static dt_status dt__broadcast_back(dt_node *n) {
    size_t bytes = (dt__bytes(n->out) + 63) / 64 * 64;
    char *work = (char *)dt_scratch(n->out->ctx, 2 * bytes + 64);
    void *buffers[2] = { work, work ? work + bytes : NULL };
    return work ? dt__sum_to(n, 0, n->out->grad, 1, buffers) : dt_error(n->out->ctx);
}

/* Refuses a shard of a dimension that is repeated: each rank would repeat its own indices. */
static int dt__broadcast_fits(const dt_tensor *x, dt_shape shape) {
    for (int i = 0; x->placements && i < x->placements->n; i++) {
        const dt__placed *p = &x->placements->by_group[i];
        int dim = p->at.dim, to = dim + shape.nd - x->shape.nd;
        if (p->at.kind != DT_PLACEMENT_SHARD || x->shape.d[dim] == shape.d[to]) continue;
        const char *name = dt__group_name(p->group);
        return dt_fail(x->ctx, DT_ERR_ARG,
                   "dt_broadcast_to(%s): dimension %d of %s is sharded over '%s', and only a whole "
                   "dimension of size 1 can repeat: dt_redistribute(x, %s, DT_SHARD(%d), "
                   "DT_REPLICATE) gathers it",
                   x->name, dim, dt__shape_text(x->shape).s, name, name, dim) == DT_OK;
    }
    return 1;
}

dt_tensor *dt_broadcast_to(dt_tensor *x, dt_shape shape) {
    dt_ctx *ctx = dt__op_context("dt_broadcast_to", 1, x, NULL, NULL);
    dt_permute_args a = { .dtype = ctx ? x->dtype : DT_F32 };
    int64_t unused[DT_MAX_DIMS];
    if (!ctx) return NULL;
    dt_tensor *y = dt__new_output(
        ctx, x->shape.nd == shape.nd ? x : NULL, x->dtype, shape, "dt_broadcast_to", 0);
    if (!y) return NULL;
    if (!dt__broadcast(x->shape, shape, &a.shape, a.in_stride, unused) ||
        !dt__same_shape(a.shape, shape))
        return dt__mismatch("dt_broadcast_to", x, y,
            "dimensions, counted from the last, must be equal, 1 or missing");
    if (!dt__broadcast_fits(x, shape) ||
        !dt__propagate("dt_broadcast_to", y, DT__RULE_ADD, x, NULL, NULL))
        return NULL;
    dt__dense_strides(shape, a.out_stride);
    a.out = y->data;
    a.in = x->data;
    if (dt_count(shape) != 0 && DT__OP("dt_broadcast_to", x, permute, &a) != DT_OK) return NULL;
    return dt__record_op(
        y, dt__make_record("dt_broadcast_to", x, NULL, NULL, dt__broadcast_back, 0));
}

static dt_status dt__cast_back(dt_node *n) {
    dt_tensor *x = n->in[0];
    dt_cast_args a = { .dtype = x->dtype,
        .from = n->out->dtype,
        .in = n->out->grad,
        .count = (size_t)dt_count(x->shape) };
    int wide = 0;
    a.out = dt__grad_wide(n, 0, &a.accumulate, &wide);
    a.dtype = dt__wide(x->dtype, wide);
    return a.out ? DT__KERNEL(x->ctx, n->name, cast, &a) : dt_error(x->ctx);
}

static dt_status dt__cast_run(const dt_tensor *x, dt_tensor *y) {
    dt_cast_args a = { .dtype = y->dtype,
        .from = x->dtype,
        .out = y->data,
        .in = x->data,
        .count = (size_t)dt_count(x->shape) };
    return DT__OP("dt_cast", x, cast, &a);
}

static dt_status dt__cast_recompute(dt_node *n) { return dt__cast_run(n->in[0], n->out); }

/* dt_cast; transient 1: the result is a transient tensor. */
static dt_tensor *dt__cast(dt_tensor *x, dt_dtype dtype, int transient) {
    dt_ctx *ctx = dt__op_context("dt_cast", 1, x, NULL, NULL);
    dt_tensor *y = ctx ? dt__new_output(ctx, x, dtype, x->shape, "dt_cast", transient) : NULL;
    int rule = dt__integer(dtype) ? DT__RULE_FUNCTION : DT__RULE_SCALE;
    if (!dt__propagate("dt_cast", y, rule, x, NULL, NULL) || dt__cast_run(x, y) != DT_OK)
        return NULL;
    if (dt__integer(dtype) || dt__integer(x->dtype)) return y;
    dt_record_desc d = dt__make_record("dt_cast", x, NULL, NULL, dt__cast_back, 0);
    d.recompute = dt__cast_recompute;
    d.unread_inputs = 1;
    return dt__record_op(y, d);
}

dt_tensor *dt_cast(dt_tensor *x, dt_dtype dtype) { return dt__cast(x, dtype, 0); }

// ==== 21. Ops: adapters, products of activations, cumulative sums, convolution ==================

/* LoRA (arXiv:2106.09685). The weight w is frozen, and two small matrices learn a change of w of
   rank r. The adapter consists of ordinary ops, so it works in every layout:

       x --------------- w^T (I,O) ----------------(+)---> y
         \-- dropout -- a^T (I,r) -- scale -- b^T (r,O) --/                        */

/* Returns y + scale * (dropout(x) a^T) b^T; without y only the adapter's output. */
static dt_tensor *dt__adapter(dt_tensor *x, const dt_adapter *d, dt_tensor *y, int flags) {
    dt_linear_desc add = { .residual = y };
    if (x && d->dropout != 0) x = dt_dropout(x, d->dropout, d->key, d->tokens);
    dt_tensor *h = dt_affine(dt_linear(x, d->a, NULL), d->scale, 0);
    return h ? dt__linear(h, d->b, NULL, add, NULL, flags, NULL) : NULL;
}

/* Returns the outputs of the adapters of a weight (parts,O..,I), (..,parts,O..): zeros for a part
   without an adapter. NULL if no part has one. */
static dt_tensor *dt__adapter_parts(dt_tensor *x, const dt_linear_desc *d) {
    dt_tensor *each[DT_MAX_INPUTS] = { NULL }, *some = NULL;
    int at = x->shape.nd - 1;
    for (int i = 0; i < d->parts; i++) {
        if (!d->adapters[i].a) continue;
        dt_tensor *y = dt__adapter(x, &d->adapters[i], NULL, 0);
        if (!y) return NULL;
        dt_shape shape = y->shape;
        for (int k = shape.nd++; k > at; k--) shape.d[k] = shape.d[k - 1];
        shape.d[at] = 1;
        each[i] = some = dt_reshape(y, shape);
    }
    for (int i = 0; some && i < d->parts; i++)
        if (!each[i]) each[i] = dt__zeros_like(some);
    return some ? dt_concat(each, d->parts, at) : NULL;
}

/* dt_linear_at with adapters; `flags` of the result as in dt__linear. */
static dt_tensor *dt__linear_adapted(
    dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc, int flags) {
    dt_linear_desc base = { .activation = 0 };
    const dt_adapter *one = desc.parts > 1 ? NULL : desc.adapters;
    if (!x || !w) {
        dt__null_input("dt_linear", x, w, NULL);
        return NULL;
    }
    if (desc.parts < 0 || desc.parts > DT_MAX_INPUTS ||
        (desc.parts > 1 && (w->shape.nd < 3 || w->shape.d[0] != desc.parts))) {
        dt_fail(x->ctx, DT_ERR_SHAPE, "dt_linear(%s): adapters for %d parts of a weight %s",
            w->name, desc.parts, dt__shape_text(w->shape).s);
        return NULL;
    }
    if (!desc.activation) base.residual = desc.residual;
    int nothing_follows = one && !one->a && !desc.activation;
    dt_tensor *y = dt__linear(x, w, b, base, NULL, nothing_follows ? flags : 0, NULL);
    if (!y) return NULL;
    if (one && one->a) {
        y = dt__adapter(x, one, y, desc.activation ? 0 : flags);
    } else if (!one) {
        dt_tensor *more = dt__adapter_parts(x, &desc);
        if (more) y = dt_add(y, more);
    }
    if (!desc.activation || !y || x->ctx->status != DT_OK)
        return x->ctx->status == DT_OK ? y : NULL;
    y = dt__unary("dt_linear", y, desc.activation, 1, 0);
    return desc.residual ? dt_add(y, desc.residual) : y;
}

/* A batched product c = op(a) op(b), where op transposes or not, and da, db from dc. T: transposed.

       a        b        c       da stored like a       db stored like b
       (M,K)    (K,N)    a b     dc b^T                 a^T dc
       (M,K)    (N,K)T   a b^T   dc b                   dc^T a
       (K,M)T   (K,N)    a^T b   b dc^T                 a dc
       (K,M)T   (N,K)T   a^T b^T b^T dc^T               dc^T a^T

   An operand of two dimensions that all products of the batch read has stride 0. If that is b, and
   a is not transposed, the batch is one product with batch * M rows. */
typedef struct dt__product {
    int trans_a, trans_b;
    int64_t batch, m, n, k, stride_a, stride_b; /* stride 0: all products read one matrix */
} dt__product;

/* Computes products into the gradient of in[i]. */
static dt_status dt__product_grad(dt_node *n, int i, dt_matmul_args a) {
    a.c = dt__grad_wide(n, i, &a.accumulate, &a.wide);
    a.stride_c = a.m * a.n;
    if (!a.c) return dt_error(n->out->ctx);
    return a.batch ? dt__matmul(n->out->ctx, n->name, NULL, a) : DT_OK;
}

/* The gradient of in[i], which all products read: the sum of one product for each, in ascending
   order. The sum is complete, in scratch memory in f32 or f64, before it is added. */
static dt_status dt__product_shared_grad(dt_node *n, int i, dt_matmul_args a) {
    dt_ctx *ctx = n->out->ctx;
    dt_dtype sum_type = dt__wide(a.dtype, 1);
    int64_t batch = a.batch, k = a.k;
    int wide = 0;
    size_t count = (size_t)(a.m * a.n),
           work = dt__scratch_bytes(ctx, dt_matmul_work(a.n, k, a.dtype));
    work = (work + 63) / 64 * 64; /* dt__matmul uses the scratch memory before the sum */
    char *scratch = (char *)dt_scratch(ctx, work + count * dt_dtype_size(sum_type) + 64);
    if (!scratch) return dt_error(ctx);
    const void *from_a = a.a, *from_b = a.b;
    a.c = scratch + work;
    a.batch = 1;
    a.wide = 1;
    for (int64_t p = 0; p < batch || p == 0; p++) {
        a.k = batch ? k : 0; /* without products the gradient is 0 */
        a.a = dt__element(from_a, a.dtype, p * a.stride_a);
        a.b = dt__element(from_b, a.dtype, p * a.stride_b);
        a.accumulate = p > 0;
        if (dt__matmul(ctx, n->name, NULL, a) != DT_OK) return dt_error(ctx);
    }
    dt_cast_args sum = { .from = sum_type, .in = scratch + work, .count = count };
    sum.out = dt__grad_wide(n, i, &sum.accumulate, &wide);
    sum.dtype = dt__wide(a.dtype, wide);
    return sum.out ? DT__KERNEL(ctx, n->name, cast, &sum) : dt_error(ctx);
}

static dt_status dt__product_back(dt_node *n) {
    const dt__product *p = (const dt__product *)n->saved;
    int ta = p->trans_a, tb = p->trans_b, shared_a = p->batch != 1 && p->stride_a == 0,
        shared_b = p->batch != 1 && p->stride_b == 0;
    const void *a = n->in[0]->data, *b = n->in[1]->data, *dc = n->out->grad;
    int64_t stride_c = p->m * p->n;
    dt_matmul_args da = { .dtype = n->out->dtype,
        .a = ta ? b : dc,
        .b = ta ? dc : b,
        .m = ta ? p->k : p->m,
        .n = ta ? p->m : p->k,
        .k = p->n,
        .batch = p->batch,
        .trans_a = ta && tb,
        .trans_b = ta || !tb,
        .stride_a = ta ? p->stride_b : stride_c,
        .stride_b = ta ? stride_c : p->stride_b };
    dt_matmul_args db = { .dtype = n->out->dtype,
        .a = tb ? dc : a,
        .b = tb ? a : dc,
        .m = tb ? p->n : p->k,
        .n = tb ? p->k : p->n,
        .k = p->m,
        .batch = p->batch,
        .trans_a = tb || !ta,
        .trans_b = tb && ta,
        .stride_a = tb ? stride_c : p->stride_a,
        .stride_b = tb ? p->stride_a : stride_c };
    dt_status status = DT_OK;
    if (dt_wants(n, 0))
        status = shared_a ? dt__product_shared_grad(n, 0, da) : dt__product_grad(n, 0, da);
    if (dt_wants(n, 1) && status == DT_OK)
        status = shared_b ? dt__product_shared_grad(n, 1, db) : dt__product_grad(n, 1, db);
    return status;
}

/* Sets *p and the result's shape. Returns 1 if the operands fit, else 0 after failing the
   context. */
static int dt__product_of(
    const dt_tensor *a, const dt_tensor *b, dt_matmul_desc desc, dt__product *p, dt_shape *shape) {
    const dt_tensor *batched = a->shape.nd >= b->shape.nd ? a : b;
    int lead = batched->shape.nd - 2, ta = desc.trans_a != 0, tb = desc.trans_b != 0, equal = 1;
    const char *why = NULL;
    if (a->dtype != b->dtype)
        why = "types must be equal";
    else if (a->shape.nd < 2 || b->shape.nd < 2)
        why = "each operand needs two dimensions or more";
    if (!why) {
        const int64_t *last_a = a->shape.d + a->shape.nd - 2,
                      *last_b = b->shape.d + b->shape.nd - 2;
        dt__product fits = { ta, tb, 1, last_a[ta], last_b[!tb], last_a[!ta],
            a->shape.nd == 2 ? 0 : last_a[0] * last_a[1],
            b->shape.nd == 2 ? 0 : last_b[0] * last_b[1] };
        for (int i = 0; i < lead; i++) fits.batch *= batched->shape.d[i];
        for (int i = 0; i < lead && a->shape.nd == b->shape.nd; i++)
            equal &= a->shape.d[i] == b->shape.d[i];
        if (last_b[tb] != fits.k)
            why = "the dimensions that are summed must be equal: a (..,M,K) b (..,K,N), or "
                  "transposed a (..,K,M), b (..,N,K)";
        else if (!equal || (a->shape.nd != b->shape.nd && a->shape.nd != 2 && b->shape.nd != 2))
            why = "the leading dimensions must be equal, or one operand has two dimensions";
        *p = fits;
    }
    if (why) return dt__mismatch("dt_matmul", a, b, why) != NULL;
    *shape = batched->shape;
    shape->d[lead] = p->m;
    shape->d[lead + 1] = p->n;
    if (b->shape.nd == 2 && !ta) { /* one product with the rows of all matrices of a */
        p->m *= p->batch;
        p->batch = 1;
    }
    return 1;
}

dt_tensor *dt_matmul(dt_tensor *a, dt_tensor *b, dt_matmul_desc desc) {
    dt_ctx *ctx = dt__float_op_context("dt_matmul", 2, a, b, NULL);
    dt_tensor *both[2] = { a, b };
    dt_shape shape;
    dt__product p;
    if (!ctx || !dt__product_of(a, b, desc, &p, &shape)) return NULL;
    int keeps_first = shape.nd > 2 || !p.trans_a, /* dimension 0 of an input */
        rule = DT__RULE_MATMUL_NN + 2 * p.trans_a + p.trans_b;
    dt_tensor *y = dt__new_output(ctx,
        !keeps_first                 ? NULL
        : a->shape.nd >= b->shape.nd ? a
                                     : b,
        a->dtype, shape, "dt_matmul", 0);
    if (!dt__propagate_at("dt_matmul", y, rule, shape.nd - 2, -1, both, 2)) return NULL;
    dt_matmul_args args = { .dtype = a->dtype,
        .c = y->data,
        .a = a->data,
        .b = b->data,
        .m = p.m,
        .n = p.n,
        .k = p.k,
        .batch = p.batch,
        .trans_a = p.trans_a,
        .trans_b = p.trans_b,
        .stride_a = p.stride_a,
        .stride_b = p.stride_b,
        .stride_c = p.m * p.n };
    if (p.batch && dt__matmul(ctx, "dt_matmul", a->name, args) != DT_OK) return NULL;
    dt_record_desc d = dt__make_record("dt_matmul", a, b, NULL, dt__product_back, sizeof p);
    d.unread_inputs = DT__UNREAD_OUTPUT;
    return dt__record_with(y, d, &p);
}

/* ---- cumulative sums ---- */

static dt_status dt__cumsum_back(dt_node *n) {
    const dt__dim_split *r = (const dt__dim_split *)n->saved;
    dt_cumsum_args a = { .dtype = n->out->dtype,
        .in = n->out->grad,
        .outer = r->outer,
        .n = r->n,
        .inner = r->inner,
        .reverse = 1 };
    a.out = dt_grad_raw(n, 0, &a.accumulate);
    return a.out ? DT__KERNEL(n->out->ctx, n->name, cumsum, &a) : dt_error(n->out->ctx);
}

dt_tensor *dt_cumsum(dt_tensor *x, int dim) {
    dt_ctx *ctx = dt__float_op_context("dt_cumsum", 1, x, NULL, NULL);
    int at = ctx ? dt__dim_number("dt_cumsum", x, dim) : -1;
    if (at < 0) return NULL;
    dt__dim_split r = dt__split(x, at, 1, 0);
    dt_tensor *y = dt__new_output(ctx, x, x->dtype, x->shape, "dt_cumsum", 0);
    if (!dt__propagate_split("dt_cumsum", y, DT__RULE_SLICE, x, &r)) return NULL;
    dt_cumsum_args a = { .dtype = x->dtype,
        .out = y->data,
        .in = x->data,
        .outer = r.outer,
        .n = r.n,
        .inner = r.inner };
    if (DT__OP("dt_cumsum", x, cumsum, &a) != DT_OK) return NULL;
    return dt__record_with(
        y, dt__make_record("dt_cumsum", x, NULL, NULL, dt__cumsum_back, sizeof r), &r);
}

/* ---- convolution ---- */

/* Sets *w from the images x and the window. Returns 1, or 0 after failing the context. */
static int dt__window_of(const char *op, dt_tensor *x, dt_window_desc desc, dt_window *w) {
    memset(w, 0, sizeof *w);
    if (x->shape.nd != 4) return dt__shape_error(op, x, "images (B,H,W,C) are needed") != NULL;
    w->batch = x->shape.d[0];
    w->channels = x->shape.d[3];
    for (int i = 0; i < 2; i++) {
        w->in[i] = x->shape.d[1 + i];
        w->kernel[i] = desc.kernel[i];
        w->stride[i] = desc.stride[i] ? desc.stride[i] : 1;
        w->padding[i] = desc.padding[i];
        w->dilation[i] = desc.dilation[i] ? desc.dilation[i] : 1;
        int64_t left = w->in[i] + 2 * w->padding[i] - w->dilation[i] * (w->kernel[i] - 1) - 1;
        int bad = w->kernel[i] < 1 || w->stride[i] < 1 || w->padding[i] < 0 || w->dilation[i] < 1;
        if (bad || left < 0)
            return dt_fail(x->ctx, bad ? DT_ERR_ARG : DT_ERR_SHAPE,
                       "%s(%s): kernel %d, stride %d, padding %d and dilation %d along %s of %s%s",
                       op, x->name, desc.kernel[i], desc.stride[i], desc.padding[i],
                       desc.dilation[i], i ? "the width" : "the height", dt__shape_text(x->shape).s,
                       bad ? "" : ": the window is larger than the image") == DT_OK;
        w->out[i] = left / w->stride[i] + 1;
    }
    return 1;
}

typedef struct dt__patches_saved {
    dt_window window;
    int pool;
    dt_tensor *index; /* NULL without DT_POOL_MAX */
} dt__patches_saved;

static dt_status dt__patches_back(dt_node *n) {
    const dt__patches_saved *saved = (const dt__patches_saved *)n->saved;
    dt_patches_back_args a = { .dtype = n->out->dtype,
        .dout = n->out->grad,
        .window = saved->window,
        .pool = saved->pool,
        .index = saved->index ? (const int32_t *)saved->index->data : NULL };
    a.dx = dt_grad_raw(n, 0, &a.accumulate);
    return a.dx ? DT__KERNEL(n->out->ctx, n->name, patches_back, &a) : dt_error(n->out->ctx);
}

/* im2col, or pooling if `pool` is not DT_POOL_NONE. */
static dt_tensor *dt__patches(
    const char *op, dt_tensor *x, dt_window_desc desc, double pad_value, int pool) {
    dt_ctx *ctx = dt__float_op_context(op, 1, x, NULL, NULL);
    dt__patches_saved saved = { .pool = pool };
    dt_window *w = &saved.window;
    if (!ctx || !dt__window_of(op, x, desc, w)) return NULL;
    dt_shape shape =
        DT_SHAPE(w->batch, w->out[0], w->out[1], w->kernel[0] * w->kernel[1], w->channels);
    if (pool) shape = DT_SHAPE(w->batch, w->out[0], w->out[1], w->channels);
    dt_tensor *y = dt__new_output(ctx, x, x->dtype, shape, op, 0);
    if (pool == DT_POOL_MAX) saved.index = dt__new_output(ctx, x, DT_I32, shape, "index", 0);
    int rule = pad_value != 0 ? DT__RULE_PATCHES_PADDED : DT__RULE_PATCHES;
    if (pool) rule = pool == DT_POOL_MAX ? DT__RULE_MAX_POOL : DT__RULE_MEAN_POOL;
    if (pool == DT_POOL_MAX && !saved.index) return NULL;
    if (!dt__propagate(op, y, rule, x, NULL, NULL)) return NULL;
    dt_patches_args a = { .dtype = x->dtype,
        .out = y->data,
        .in = x->data,
        .window = *w,
        .pad_value = pad_value,
        .pool = pool,
        .index = saved.index ? (int32_t *)saved.index->data : NULL };
    if (DT__OP(op, x, patches, &a) != DT_OK) return NULL;
    dt_record_desc d = dt__make_record(op, x, NULL, NULL, dt__patches_back, sizeof saved);
    d.unread_inputs = 1 | DT__UNREAD_OUTPUT;
    return dt__record_with(y, d, &saved);
}

static dt_tensor *dt__as_type(dt_tensor *x, dt_dtype type) {
    return !x || x->dtype == type ? x : dt_cast(x, type);
}

/* Gives y, the result of a composed op's last step, the op's name and placements. `placed` is a
   view that has both. */
static dt_tensor *dt__composed(dt_tensor *y, const dt_tensor *placed) {
    if (!y) return NULL;
    y->name = placed->name;
    y->placements = placed->placements;
    return y;
}

/* ln of softmax(x) is z - ln(sum of e^z), where z = x - max x; the maximum cancels in the gradient.
   16-bit types are f32 up to the end, so that the result is rounded once. */
dt_tensor *dt_log_softmax(dt_tensor *x) {
    const dt_reduce_desc last = { { -1 }, 1, 1 };
    dt_tensor *placed = dt__float_op_context("dt_log_softmax", 1, x, NULL, NULL)
                            ? dt__view(x, x->shape, "dt_log_softmax")
                            : NULL;
    if (!placed || !dt__propagate("dt_log_softmax", placed, DT__RULE_LAST, x, NULL, NULL))
        return NULL;
    if (dt__last_dim(x) == 0 || x->shape.nd == 0)
        return dt__shape_error("dt_log_softmax", x, "(..,C) is needed, with at least one column");
    dt_tensor *z = dt__as_type(x, dt__wide(x->dtype, 1));
    z = dt_sub(z, dt_detach(dt_max_dims(z, last)));
    z = dt__as_type(dt_sub(z, dt_ln(dt_sum_dims(dt_exp(z), last))), x->dtype);
    return dt__composed(z, placed);
}

dt_tensor *dt_patches(dt_tensor *x, dt_window_desc desc, double pad_value) {
    return dt__patches("dt_patches", x, desc, pad_value, DT_POOL_NONE);
}

/* The placements of a composed op's result, from the op's rule and not from its steps, in which a
   reshape may lose them. Returns a view of x, (B,..,C), with these placements. */
static dt_tensor *dt__placed_of(
    const char *op, int rule, dt_tensor *x, dt_tensor *b, dt_tensor *c) {
    dt_tensor *in[3] = { x, b, c }, *y = dt__view(x, x->shape, op);
    return dt__propagate_at(op, y, rule, -1, x->shape.nd - 2, in, 3) ? y : NULL;
}

dt_tensor *dt_conv2d(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_window_desc desc) {
    if (!dt__float_op_context("dt_conv2d", 2, x, w, b)) return NULL;
    if (x->shape.nd != 4 || w->shape.nd != 4 || x->shape.d[3] != w->shape.d[3])
        return dt__mismatch("dt_conv2d", x, w, "x (B,H,W,C) and w (O,KH,KW,C) are needed");
    dt_tensor *placed = dt__placed_of("dt_conv2d", DT__RULE_CONV, x, w, b);
    if (!placed) return NULL;
    for (int i = 0; i < 2; i++)
        desc.kernel[i] = w->shape.d[1 + i] < INT32_MAX ? (int)w->shape.d[1 + i] : INT32_MAX;
    dt_tensor *p = dt__patches("dt_conv2d", x, desc, 0, DT_POOL_NONE);
    if (!p) return NULL;
    int64_t each = p->shape.d[3] * p->shape.d[4]; /* elements of a window */
    p = dt_reshape(p, DT_SHAPE(p->shape.d[0], p->shape.d[1], p->shape.d[2], each));
    dt_tensor *y = p ? dt_linear(p, dt_reshape(w, DT_SHAPE(w->shape.d[0], each)), b) : NULL;
    return dt__composed(y, placed);
}

/* An image of height 1. */
dt_tensor *dt_conv1d(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_window_desc desc) {
    dt_window_desc row = { { 1, 0 }, { 1, desc.stride[0] }, { 0, desc.padding[0] },
        { 1, desc.dilation[0] } };
    if (!dt__float_op_context("dt_conv1d", 2, x, w, b)) return NULL;
    if (x->shape.nd != 3 || w->shape.nd != 3)
        return dt__mismatch("dt_conv1d", x, w, "x (B,W,C) and w (O,K,C) are needed");
    const int64_t *s = x->shape.d, *k = w->shape.d;
    dt_tensor *placed = dt__placed_of("dt_conv1d", DT__RULE_CONV, x, w, b);
    if (!placed) return NULL;
    dt_tensor *y = dt_reshape(x, DT_SHAPE(s[0], 1, s[1], s[2]));
    if (y) y = dt_conv2d(y, dt_reshape(w, DT_SHAPE(k[0], 1, k[1], k[2])), b, row);
    if (y) y = dt_reshape(y, DT_SHAPE(s[0], y->shape.d[2], k[0]));
    return dt__composed(y, placed);
}

static dt_tensor *dt__pool(const char *op, dt_tensor *x, dt_window_desc desc, int pool) {
    int wide = 0; /* a window could lie in the padding */
    for (int i = 0; i < 2; i++) {
        if (desc.stride[i] == 0) desc.stride[i] = desc.kernel[i];
        wide |= desc.kernel[i] > 0 && desc.padding[i] > desc.kernel[i] / 2;
    }
    if (x && wide) {
        dt_fail(x->ctx, DT_ERR_ARG,
            "%s(%s): padding %d and %d is more than half the kernel, %d x %d", op, x->name,
            desc.padding[0], desc.padding[1], desc.kernel[0], desc.kernel[1]);
        return NULL;
    }
    return dt__patches(op, x, desc, pool == DT_POOL_MAX ? -INFINITY : 0, pool);
}

dt_tensor *dt_max_pool2d(dt_tensor *x, dt_window_desc desc) {
    return dt__pool("dt_max_pool2d", x, desc, DT_POOL_MAX);
}
dt_tensor *dt_avg_pool2d(dt_tensor *x, dt_window_desc desc) {
    return dt__pool("dt_avg_pool2d", x, desc, DT_POOL_MEAN);
}

/* Returns the number of ranks that shard dimension `dim` of t. */
static int64_t dt__shards_along(const dt_tensor *t, int dim) {
    int64_t shards = 1;
    for (int i = 0; t->placements && i < t->placements->n; i++) {
        const dt__placed *p = &t->placements->by_group[i];
        if (p->at.kind == DT_PLACEMENT_SHARD && p->at.dim == dim) shards *= p->group->size;
    }
    return shards;
}

/* Returns this rank's number of groups of channels; 0 if the ranks that shard the channels do not
   have whole groups. x may be unplaced, for example from another pipeline stage. */
static int dt__local_groups(const dt_tensor *x, const dt_tensor *gain, int groups) {
    int64_t shards = dt__shards_along(x, x->shape.nd - 1), of_gain = dt__shards_along(gain, 0);
    if (of_gain > shards) shards = of_gain;
    /* a shard may have padding */
    int whole = !gain->param || gain->param->full.d[0] == (int64_t)dt__last_dim(x) * shards;
    return whole && groups % shards == 0 ? (int)(groups / shards) : 0;
}

/* Each group of channels of each image becomes a row of a layer normalization without gain and
   bias; y = rows * gain + bias. 16-bit types are f32 from the normalization on, so that y is
   rounded once. */
dt_tensor *dt_group_norm(dt_tensor *x, int groups, dt_tensor *gain, dt_tensor *bias, double eps) {
    static const int groups_first[4] = { 0, 2, 1, 3 };
    const char *op = "dt_group_norm";
    dt_tensor *in[3] = { x, gain, bias };
    dt_ctx *ctx = dt__float_op_context(op, 3, x, gain, bias);
    if (!ctx) return NULL;
    int64_t B = x->shape.nd ? x->shape.d[0] : 0, C = (int64_t)dt__last_dim(x), pixels = 1;
    if (x->shape.nd >= 2 && groups > 0) groups = dt__local_groups(x, gain, groups);
    if (x->shape.nd < 2 || groups < 1 || C < 1 || C % groups)
        return dt__shape_error(op, x,
            "(B,..,C) is needed, with C a multiple of the groups, and whole groups in each shard");
    for (int i = 1; i < 3; i++)
        if (in[i]->shape.nd != 1 || in[i]->shape.d[0] != C || in[i]->dtype != x->dtype)
            return dt__mismatch(op, x, in[i], "gain and bias need shape (C) and x's type");
    for (int i = 1; i + 1 < x->shape.nd; i++) pixels *= x->shape.d[i];
    dt_tensor *placed = dt__placed_of(op, DT__RULE_GROUP_NORM, x, gain, bias);
    if (!placed) return NULL;
    dt_dtype wide = dt__wide(x->dtype, 1);
    int64_t each = C / groups, row = pixels * each;
    dt_tensor *one = dt_new(ctx, wide, DT_SHAPE(row)), *none = dt_new(ctx, wide, DT_SHAPE(row));
    if (!none || dt__fill(ctx, wide, one->data, (size_t)row, 1) != DT_OK ||
        dt__fill(ctx, wide, none->data, (size_t)row, 0) != DT_OK)
        return NULL;
    dt_tensor *y = dt_permute(dt_reshape(x, DT_SHAPE(B, pixels, groups, each)), groups_first);
    if (y) y = dt__as_type(dt_reshape(y, DT_SHAPE(B, groups, row)), wide);
    if (y) y = dt_layernorm(y, one, none, eps);
    if (y) y = dt_permute(dt_reshape(y, DT_SHAPE(B, groups, pixels, each)), groups_first);
    if (y) y = dt_mul(dt_reshape(y, x->shape), dt__as_type(gain, wide));
    if (y) y = dt__as_type(dt_add(y, dt__as_type(bias, wide)), x->dtype);
    return dt__composed(y, placed);
}

// ==== 22. Ops: rows by index ====================================================================

/* An index (..) i32 selects rows of a table. A gather copies the rows that the index selects, and a
   scatter adds each row to the row that its index selects; each is the backward of the other:

       gather     y[i] = x[index[i]]                       embedding, dt_gather_rows
       scatter    y[index[i]] += x[i], in ascending i      dt_scatter_rows
       bag        y[i] = sum over j of weights[i,j] x[index[i,j]]      dt_embedding_bag */

/* *offset and *rows receive the first row and the number of rows of the full table that this rank
   holds: all rows, or the local slice along dimension 0. *vocab receives the number of rows of the
   full table. */
static void dt__table_slice(
    const dt_tensor *table, int64_t *offset, int64_t *rows, int64_t *vocab) {
    const dt_param_info *p = table->param;
    *offset = p ? p->slice.lo[0] : 0;
    *rows = p ? p->slice.inside[0] : table->shape.d[0];
    *vocab = p ? p->full.d[0] : table->shape.d[0];
}

/* Returns the bytes of work memory that the embedding_back kernel needs for the gradient of a
   table. */
static size_t dt__table_work_bytes(dt_tensor *table) {
    int in_work = dt__narrow(table->dtype) && !dt__owner(table)->param;
    return in_work ? dt__reserved_bytes(table) / dt_dtype_size(table->dtype) * sizeof(float) : 0;
}

/* The node's inputs are a table and ids. Adds row i of dout to the gradient of row ids[i] of the
   table, for each id. `work` has dt__table_work_bytes(table) bytes. */
static dt_status dt__embedding_back_from(dt_node *n, const void *dout, void *work) {
    dt_tensor *table = n->in[0], *ids = n->in[1];
    int64_t vocab = 0;
    dt_embedding_back_args a = { .dtype = table->dtype,
        .dout = dout,
        .ids = (const int32_t *)ids->data,
        .rows = (size_t)dt_count(ids->shape),
        .cols = dt__last_dim(table),
        .work = work,
        .work_bytes = dt__table_work_bytes(table) };
    dt__table_slice(table, &a.offset, &a.table_rows, &vocab);
    a.dtable = dt__grad_wide(n, 0, &a.accumulate, &a.wide);
    return a.dtable && dt_count(table->shape) > 0
               ? DT__KERNEL(table->ctx, n->name, embedding_back, &a)
               : dt_error(table->ctx);
}

static dt_status dt__embedding_back(dt_node *n) {
    size_t bytes = dt__table_work_bytes(n->in[0]);
    void *work = bytes ? dt_scratch(n->out->ctx, bytes) : NULL;
    return bytes && !work ? dt_error(n->out->ctx) : dt__embedding_back_from(n, n->out->grad, work);
}

/* Copies row ids[i] of the table to row i of `out`, for `count` ids at `ids`. allow_empty 1: -1
   gives a row of zeros. `checked` is the tensor that an error text shows the ids of. */
static dt_status dt__lookup_run(const char *op, const dt_tensor *table, const dt_tensor *checked,
    const void *ids, size_t count, int allow_empty, void *out) {
    dt_embedding_args a = { .dtype = table->dtype,
        .out = out,
        .table = table->data,
        .ids = (const int32_t *)ids,
        .rows = count,
        .cols = dt__last_dim(table),
        .allow_empty = allow_empty };
    dt__table_slice(table, &a.offset, &a.table_rows, &a.vocab);
    dt_status status = DT__CALL(table->ctx, embedding, &a);
    if (status == DT_ERR_ARG)
        dt__index_error(op, table, allow_empty ? "row" : "id", checked, allow_empty ? -1 : 0,
            a.vocab, "the table", "rows");
    return dt__kernel_done(table->ctx, op, table->name, "embedding", status);
}

/* allow_empty 1: -1 gives a row of zeros. transient 1: the result is a transient tensor that no
   backward reads. */
static dt_tensor *dt__lookup_rows(
    const char *op, dt_tensor *table, dt_tensor *ids, int allow_empty, int transient) {
    dt_ctx *ctx = dt__op_context(op, 2, table, ids, NULL);
    if (!ctx) return NULL;
    if (table->shape.nd != 2 || ids->dtype != DT_I32 || ids->shape.nd >= DT_MAX_DIMS)
        return dt__mismatch(op, table, ids, "a table (V,C) and i32 ids are needed");
    dt_shape shape = ids->shape;
    shape.d[shape.nd++] = table->shape.d[1];
    dt_tensor *out = dt__new_output(ctx, ids, table->dtype, shape, op, transient);
    int rule = table->param ? DT__RULE_TABLE : DT__RULE_GATHER;
    if (!dt__propagate(op, out, rule, table, ids, NULL) ||
        dt__lookup_run(op, table, ids, ids->data, (size_t)dt_count(ids->shape), allow_empty,
            out->data) != DT_OK)
        return NULL;
    dt_record_desc d = dt__make_record(op, table, ids, NULL, dt__embedding_back, 0);
    d.unread_inputs = 1 | DT__UNREAD_OUTPUT;
    return dt__record_op(out, d);
}

dt_tensor *dt_embedding(dt_tensor *table, dt_tensor *ids) {
    return dt__lookup_rows("dt_embedding", table, ids, 0, 0);
}
dt_tensor *dt_gather_rows(dt_tensor *x, dt_tensor *rows) {
    return dt__lookup_rows("dt_gather_rows", x, rows, 1, 0);
}

/* The backward of dt_scatter_rows: gathers the gradient's rows. */
static dt_status dt__scatter_back(dt_node *n) {
    dt_tensor *x = n->in[0], *rows = n->in[1], *y = n->out;
    int accumulate = 0;
    void *dx = dt_grad_raw(n, 0, &accumulate),
         *to = accumulate ? dt_scratch(x->ctx, dt__reserved_bytes(x)) : dx;
    dt_embedding_args a = { .dtype = x->dtype,
        .out = to,
        .table = y->grad,
        .ids = (const int32_t *)rows->data,
        .rows = dt__row_count(x),
        .cols = dt__last_dim(x),
        .table_rows = y->shape.d[0],
        .vocab = y->shape.d[0],
        .allow_empty = 1 };
    if (!to || DT__KERNEL(x->ctx, n->name, embedding, &a) != DT_OK) return dt_error(x->ctx);
    return accumulate ? dt__accumulate(x->ctx, x->dtype, dx, to, (size_t)dt_count(x->shape), 1)
                      : DT_OK;
}

dt_tensor *dt_scatter_rows(dt_tensor *x, dt_tensor *rows, int64_t count) {
    const char *op = "dt_scatter_rows";
    dt_ctx *ctx = dt__float_op_context(op, 2, x, rows, NULL);
    if (!ctx) return NULL;
    if (x->shape.nd < 1 || rows->dtype != DT_I32 ||
        (size_t)dt_count(rows->shape) != dt__row_count(x))
        return dt__mismatch(
            op, x, rows, "x (..,C) and one i32 row for each of its rows are needed");
    if (count < 0) return dt__shape_error(op, x, "count, the number of result rows, is negative");
    dt_tensor *y =
        dt__new_output(ctx, NULL, x->dtype, DT_SHAPE(count, (int64_t)dt__last_dim(x)), op, 0);
    if (!dt__propagate(op, y, DT__RULE_SCATTER, x, rows, NULL)) return NULL;
    dt_embedding_back_args a = { .dtype = x->dtype,
        .dtable = y->data,
        .dout = x->data,
        .ids = (const int32_t *)rows->data,
        .rows = dt__row_count(x),
        .cols = dt__last_dim(x),
        .table_rows = count,
        .check_ids = 1 };
    if (dt__narrow(x->dtype)) {
        a.work_bytes = (size_t)count * a.cols * sizeof(float);
        /* the kernel needs `work` even for an empty result */
        if (!(a.work = dt_scratch(ctx, a.work_bytes + 1))) return NULL;
    }
    dt_status status = DT__CALL(ctx, embedding_back, &a);
    if (status == DT_ERR_ARG) dt__index_error(op, x, "row", rows, -1, count, "the result", "rows");
    if (dt__kernel_done(ctx, op, x->name, "embedding_back", status) != DT_OK) return NULL;
    dt_record_desc d = dt__make_record(op, x, rows, NULL, dt__scatter_back, 0);
    d.unread_inputs = 1;
    return dt__record_op(y, d);
}

dt_tensor *dt_one_hot(dt_tensor *ids, int64_t classes, dt_dtype dtype) {
    const char *op = "dt_one_hot";
    dt_ctx *ctx = dt__op_context(op, 1, ids, NULL, NULL);
    if (!ctx) return NULL;
    size_t size = dt_dtype_size(dtype);
    dt_shape shape = ids->shape;
    if (ids->dtype != DT_I32 || shape.nd == DT_MAX_DIMS || classes < 1 || classes > INT32_MAX ||
        size == 0 || dt__integer(dtype))
        return dt__shape_error(op, ids,
            "i32 ids of at most 5 dimensions, 1 class or more and a floating-point type are "
            "needed");
    shape.d[shape.nd++] = classes;
    dt_tensor *y = dt__new_output(ctx, ids, dtype, shape, op, 0);
    if (!dt__propagate(op, y, DT__RULE_ONE_HOT, ids, NULL, NULL)) return NULL;
    size_t count = (size_t)dt_count(ids->shape);
    dt_scatter_args a = { .dtype = dtype,
        .out = y->data,
        .in = dt_scratch(ctx, count * size + 1),
        .index = (const int32_t *)ids->data,
        .outer = count,
        .n = (size_t)classes,
        .k = 1,
        .inner = 1 };
    if (!a.in || dt__fill(ctx, dtype, (void *)(uintptr_t)a.in, count, 1) != DT_OK) return NULL;
    dt_status status = DT__CALL(ctx, scatter, &a);
    if (status == DT_ERR_ARG)
        dt__index_error(op, ids, "id", ids, 0, classes, "the result", "classes");
    return dt__kernel_done(ctx, op, ids->name, "scatter", status) == DT_OK ? y : NULL;
}

/* ---- weighted sums of rows ---- */

/* Casts `count` elements of the type of x, bf16 or f16, to f32; if `back` is 1, casts from f32 to
   the type of x. Returns `out`. For other types of x returns `in` without a copy. */
static const void *dt__cast_rows(
    const char *op, const dt_tensor *x, int back, const void *in, void *out, size_t count) {
    dt_dtype wide = dt__wide(x->dtype, 1);
    dt_cast_args a = { .dtype = back ? x->dtype : wide,
        .from = back ? wide : x->dtype,
        .out = out,
        .in = in,
        .count = count };
    if (!dt__narrow(x->dtype)) return in;
    DT__KERNEL(x->ctx, op, cast, &a);
    return out;
}

/* Sums in the type of the weights: y (n,C) = sum over j of weights (n,k) times the rows of x that
   column j of the index (n,k) selects. */
static dt_status dt__bag_run(
    const dt_tensor *x, const dt_tensor *rows, const dt_tensor *weights, dt_tensor *y) {
    const char *op = y->name;
    dt_ctx *ctx = y->ctx;
    int64_t k = (int64_t)dt__last_dim(rows), n = (int64_t)dt__row_count(rows),
            C = (int64_t)dt__last_dim(x);
    size_t count = (size_t)(n * C), real = dt_dtype_size(weights->dtype),
           wide = dt__narrow(x->dtype) ? count * real : 0;
    size_t bytes[4] = { (size_t)(n * k) * sizeof(int32_t), dt__bytes(y), wide, wide };
    char *buffers[4];
    if (count == 0) return DT_OK;
    if (!dt__split_scratch(ctx, bytes, buffers, 4)) return dt_error(ctx);
    dt_permute_args columns = { .dtype = DT_I32,
        .out = buffers[0],
        .in = rows->data,
        .shape = DT_SHAPE(k, n),
        .out_stride = { n, 1 },
        .in_stride = { 1, k } };
    DT__KERNEL(ctx, op, permute, &columns);
    void *sum = wide ? buffers[3] : y->data;
    for (int64_t j = 0; j < k; j++) {
        if (dt__lookup_run(op, x, rows, (int32_t *)buffers[0] + j * n, (size_t)n, 1, buffers[1]) !=
            DT_OK)
            return dt_error(ctx);
        dt_binary_args a = { .dtype = weights->dtype,
            .op = DT_MUL,
            .out = sum,
            .a = dt__cast_rows(op, x, 0, buffers[1], buffers[2], count),
            .b = (const char *)weights->data + (size_t)j * real,
            .shape = DT_SHAPE(n, C),
            .stride_a = { C, 1 },
            .stride_b = { k, 0 },
            .accumulate = j > 0 };
        if (DT__KERNEL(ctx, op, binary, &a) != DT_OK) return dt_error(ctx);
    }
    dt__cast_rows(op, y, 1, sum, y->data, count);
    return dt_error(ctx);
}

/* out (n,k,C) = dy (n,C), repeated along k, times b. b_stride has the strides of b. */
static dt_status dt__bag_product(
    dt_node *n, const void *dy, const void *b, const int64_t *b_stride, void *out) {
    const dt_tensor *weights = n->in[2];
    int64_t C = (int64_t)dt__last_dim(n->out);
    dt_binary_args a = { .dtype = weights->dtype,
        .op = DT_MUL,
        .out = out,
        .a = dy,
        .b = b,
        .shape = DT_SHAPE((int64_t)dt__row_count(weights), (int64_t)dt__last_dim(weights), C),
        .stride_a = { C, 0, 1 },
        .stride_b = { b_stride[0], b_stride[1], b_stride[2] } };
    return dt_count(a.shape) > 0 ? DT__KERNEL(n->out->ctx, n->name, binary, &a) : DT_OK;
}

/* The gradient of weight j is the dot product of dy and the row that j selects; the row's gradient
   is weight j times dy. */
static dt_status dt__bag_back(dt_node *n) {
    dt_tensor *x = n->in[0], *rows = n->in[1], *weights = n->in[2], *y = n->out;
    dt_ctx *ctx = y->ctx;
    int64_t k = (int64_t)dt__last_dim(rows), C = (int64_t)dt__last_dim(x);
    size_t choices = (size_t)dt_count(rows->shape), count = choices * (size_t)C,
           real = dt_dtype_size(weights->dtype), narrow = dt__narrow(x->dtype) ? 1 : 0;
    size_t bytes[4] = { count * real, narrow * count * dt_dtype_size(x->dtype),
        narrow * (size_t)dt_count(y->shape) * real, dt__table_work_bytes(x) };
    char *buffers[4], *product;
    if (!dt__split_scratch(ctx, bytes, buffers, 4)) return dt_error(ctx);
    product = buffers[0];
    const void *dy = dt__cast_rows(n->name, x, 0, y->grad, buffers[2], (size_t)dt_count(y->shape));
    if (dt_wants(n, 2)) {
        char *selected = narrow ? buffers[1] : product;
        int64_t strides[3] = { k * C, C, 1 };
        dt_sum_args sum = { .dtype = weights->dtype,
            .in = product,
            .outer = choices,
            .n = (size_t)C,
            .inner = 1,
            .scale = 1 };
        sum.out = dt_grad_raw(n, 2, &sum.accumulate);
        if (!sum.out || dt__lookup_run(n->name, x, rows, rows->data, choices, 1, selected) != DT_OK)
            return dt_error(ctx);
        dt__cast_rows(n->name, x, 0, selected, product, count);
        if (dt__bag_product(n, dy, product, strides, product) != DT_OK ||
            DT__KERNEL(ctx, n->name, sum, &sum) != DT_OK)
            return dt_error(ctx);
    }
    int64_t strides[3] = { k, 1, 0 };
    if (!dt_wants(n, 0)) return dt_error(ctx);
    if (dt__bag_product(n, dy, weights->data, strides, product) != DT_OK) return dt_error(ctx);
    return dt__embedding_back_from(
        n, dt__cast_rows(n->name, x, 1, product, buffers[1], count), buffers[3]);
}

dt_tensor *dt_embedding_bag(dt_tensor *x, dt_tensor *rows, dt_tensor *weights) {
    const char *op = "dt_embedding_bag";
    dt_ctx *ctx = dt__float_op_context(op, 3, x, rows, weights);
    if (!ctx) return NULL;
    if (x->shape.nd != 2 || rows->dtype != DT_I32 || rows->shape.nd < 1 || dt__last_dim(rows) < 1)
        return dt__mismatch(op, x, rows, "x (R,C) and i32 rows (..,k) are needed");
    if (!dt__same_shape(rows->shape, weights->shape) || weights->dtype != dt__wide(x->dtype, 1))
        return dt__mismatch(
            op, rows, weights, "each row needs a weight in f32, or in f64 if x is f64");
    dt_shape shape = rows->shape;
    shape.d[shape.nd - 1] = x->shape.d[1];
    dt_tensor *y = dt__new_output(ctx, rows, x->dtype, shape, op, 0);
    if (!dt__propagate(op, y, DT__RULE_BAG, x, rows, weights) ||
        dt__bag_run(x, rows, weights, y) != DT_OK)
        return NULL;
    dt_record_desc d = dt__make_record(op, x, rows, weights, dt__bag_back, 0);
    d.unread_inputs = !weights->needs_grad;
    return dt__record_op(y, d);
}

// ==== 23. Ops: rotary embedding, dropout, attention, losses =====================================

/* YaRN: returns the index of the pair that turns `turns` times in `original` tokens. */
static double dt__yarn_pair(const dt_rope_args *a, double turns) {
    return (double)a->rotary * log(a->scaling.original / (turns * 6.283185307179586477)) /
           (2 * log(a->theta));
}

double dt_rope_rate(const dt_rope_args *a, size_t i) {
    if (!a) return 0;
    const dt_rope_scaling *s = &a->scaling;
    double rate = pow(a->theta, -2.0 * (double)i / (double)a->rotary), keep = 0;
    if (s->kind == DT_ROPE_UNSCALED) return rate;
    if (s->kind == DT_ROPE_LLAMA3)
        keep = (s->original * rate / 6.283185307179586477 - s->low) / (s->high - s->low);
    if (s->kind == DT_ROPE_YARN) {
        double first = dt__yarn_pair(a, s->high), last = dt__yarn_pair(a, s->low);
        if (!s->exact_bounds) first = floor(first), last = ceil(last);
        first = first > 0 ? first : 0;
        last = last < (double)a->rotary - 1 ? last : (double)a->rotary - 1;
        if (first == last) last += 0.001; /* as in the published code: a step, not 0/0 */
        keep = 1 - ((double)i - first) / (last - first);
    }
    /* the rate is a mixture of the unscaled and the divided rate */
    keep = keep < 0 ? 0 : keep > 1 ? 1 : keep;
    return keep * rate + (1 - keep) * (rate / s->factor);
}

static dt_rope_scaling dt__rope_scaling(dt_rope_scaling s) {
    if (s.low == 0) s.low = 1;
    if (s.high == 0) s.high = s.kind == DT_ROPE_YARN ? 32 : 4;
    if (s.kind != DT_ROPE_YARN)
        s.attention = 1;
    else if (s.attention == 0)
        s.attention = 0.1 * log(s.factor) + 1;
    return s;
}

/* Returns 1, or 0 after an error if a number of the scaling is out of range. */
static int dt__rope_scaling_fits(dt_tensor *x, dt_rope_scaling s) {
    s = dt__rope_scaling(s);
    if (s.kind == DT_ROPE_UNSCALED) return 1;
    if (s.kind < 0 || s.kind > DT_ROPE_YARN)
        dt_fail(x->ctx, DT_ERR_ARG,
            "dt_rope(%s): RoPE scaling of kind %d; the kinds are DT_ROPE_UNSCALED to DT_ROPE_YARN",
            x->name, s.kind);
    else if (!(s.factor >= 1 && s.factor < HUGE_VAL))
        dt_fail(x->ctx, DT_ERR_ARG, "dt_rope(%s): RoPE scaling by a factor of %g, below 1", x->name,
            s.factor);
    else if (s.kind != DT_ROPE_LINEAR && !(s.original > 0 && s.low > 0 && s.low < s.high &&
                                             s.high < HUGE_VAL && s.attention > 0))
        dt_fail(x->ctx, DT_ERR_ARG,
            "dt_rope(%s): RoPE scaling from %g tokens with bounds %g and %g, attention %g; needed "
            "are tokens > 0, 0 < low < high and attention > 0",
            x->name, s.original, s.low, s.high, s.attention);
    return x->ctx->status == DT_OK;
}

static dt_rope_args dt__rope_args(const dt_tensor *x, const dt_tensor *positions, dt_rope_desc d) {
    dt_rope_args a = { .dtype = x->dtype,
        .positions = (const int32_t *)positions->data,
        .tokens = (size_t)dt_count(positions->shape),
        .heads = (size_t)x->shape.d[2],
        .dim = (size_t)x->shape.d[3],
        .rotary = d.rotary ? (size_t)d.rotary : (size_t)x->shape.d[3],
        .theta = d.theta != 0 ? d.theta : 10000,
        .interleaved = d.interleaved,
        .scaling = dt__rope_scaling(d.scaling) };
    return a;
}

/* Applies the inverse rotation, because the transpose of a rotation is its inverse. */
static dt_status dt__rope_back(dt_node *n) {
    dt_tensor *x = n->in[0];
    dt_rope_args a = dt__rope_args(x, n->in[1], *(const dt_rope_desc *)n->saved);
    a.in = n->out->grad;
    a.inverse = 1;
    a.out = dt_grad_raw(n, 0, &a.accumulate);
    return a.out ? DT__KERNEL(x->ctx, n->name, rope, &a) : dt_error(x->ctx);
}

dt_tensor *dt_rope(dt_tensor *x, dt_tensor *positions, dt_rope_desc desc) {
    dt_ctx *ctx = dt__float_op_context("dt_rope", 2, x, positions, NULL);
    if (!ctx) return NULL;
    if (x->shape.nd != 4 || positions->dtype != DT_I32 ||
        dt_count(positions->shape) != x->shape.d[0] * x->shape.d[1])
        return dt__mismatch(
            "dt_rope", x, positions, "x (B,T,H,D) and i32 positions (B,T) are needed");
    int64_t D = x->shape.d[3], rotary = desc.rotary ? desc.rotary : D;
    if (rotary < 0 || rotary > D || rotary % 2 || D > 512) {
        dt_fail(ctx, DT_ERR_SHAPE,
            "dt_rope(%s): %lld of %lld dimensions are rotary: an even number, of at most 512",
            x->name, (long long)rotary, (long long)D);
        return NULL;
    }
    if (desc.theta != 0 && !(desc.theta >= 1 && desc.theta < HUGE_VAL)) {
        dt_fail(ctx, DT_ERR_ARG,
            "dt_rope(%s): theta %g; it must be finite and at least 1, or 0 for 10000", x->name,
            desc.theta);
        return NULL;
    }
    if (!dt__rope_scaling_fits(x, desc.scaling)) return NULL;
    dt_tensor *y = dt__new_output_over(x, "dt_rope");
    if (!dt__propagate("dt_rope", y, DT__RULE_ROPE, x, positions, NULL)) return NULL;
    dt_rope_args a = dt__rope_args(x, positions, desc);
    a.in = x->data;
    a.out = y->data;
    if (DT__OP("dt_rope", x, rope, &a) != DT_OK) return NULL;
    dt_record_desc d = dt__make_record("dt_rope", x, positions, NULL, dt__rope_back, sizeof desc);
    d.unread_inputs = 1 | DT__UNREAD_OUTPUT;
    return dt__overwritten(x, dt__record_with(y, d, &desc));
}

typedef struct dt__dropout_saved {
    double p;
    uint64_t key;
} dt__dropout_saved;

/* Returns the column of the full tensor that is column 0 of x, whose last dimension may be
   sharded. */
static int64_t dt__first_column(const dt_tensor *x) {
    int64_t shard = 0;
    for (int i = 0; x->placements && i < x->placements->n; i++) {
        const dt__placed *p = &x->placements->by_group[i];
        if (p->at.kind == DT_PLACEMENT_SHARD && p->at.dim == x->shape.nd - 1 && p->outer == 1)
            shard = shard * p->group->size + p->group->rank;
    }
    return shard * (int64_t)dt__last_dim(x);
}

static dt_dropout_args dt__dropout_args(
    const dt_tensor *x, const dt_tensor *tokens, double p, uint64_t key) {
    dt_dropout_args a = { .dtype = x->dtype,
        .tokens = tokens ? (const int32_t *)tokens->data : NULL,
        .rows = dt__row_count(x),
        .cols = dt__last_dim(x),
        .offset = dt__first_column(x),
        .p = p,
        .key = key };
    return a;
}

static dt_status dt__dropout_back(dt_node *n) {
    const dt__dropout_saved *saved = (const dt__dropout_saved *)n->saved;
    dt_tensor *x = n->in[0];
    dt_dropout_args a = dt__dropout_args(x, n->in[1], saved->p, saved->key);
    a.in = n->out->grad;
    a.out = dt_grad_raw(n, 0, &a.accumulate);
    return a.out ? DT__KERNEL(x->ctx, n->name, dropout, &a) : dt_error(x->ctx);
}

dt_tensor *dt_dropout(dt_tensor *x, double p, uint64_t key, dt_tensor *tokens) {
    dt_ctx *ctx = dt__float_op_context("dt_dropout", 1, x, tokens, NULL);
    if (!ctx || p == 0) return ctx ? x : NULL;
    if (!(p > 0 && p < 1)) {
        dt_fail(ctx, DT_ERR_ARG, "dt_dropout(%s): probability %g; it lies in [0,1)", x->name, p);
        return NULL;
    }
    if (tokens && (tokens->dtype != DT_I32 || (size_t)dt_count(tokens->shape) != dt__row_count(x)))
        return dt__mismatch(
            "dt_dropout", x, tokens, "one i32 token for each row of x (..,C) is needed");
    dt_tensor *y = dt__new_output_over(x, "dt_dropout");
    int rule = tokens ? DT__RULE_DROPOUT : DT__RULE_DROPOUT_ROWS;
    if (!dt__propagate("dt_dropout", y, rule, x, tokens, NULL)) return NULL;
    dt_dropout_args a = dt__dropout_args(x, tokens, p, key);
    a.in = x->data;
    a.out = y->data;
    if (DT__OP("dt_dropout", x, dropout, &a) != DT_OK) return NULL;
    dt__dropout_saved saved = { p, key };
    dt_record_desc d =
        dt__make_record("dt_dropout", x, tokens, NULL, dt__dropout_back, sizeof saved);
    d.unread_inputs = 1 | DT__UNREAD_OUTPUT;
    return dt__overwritten(x, dt__record_with(y, d, &saved));
}

/* ---- attention ---- */

typedef struct dt__attention_saved {
    dt_tensor *lse;
    dt_attention_mask mask;
    double scale, soft_cap;
} dt__attention_saved;

static double dt__attention_scale(const dt_tensor *q, double scale) {
    return scale > 0 ? scale : 1.0 / sqrt((double)q->shape.d[3]);
}

/* The fields from q to dim of the arguments of a kernel. */
#define DT__ATTENTION_INPUTS(Q, K, V) \
    .q = Q->data, .k = K->data, .v = V->data, .batch = Q->shape.d[0], .tq = Q->shape.d[1], \
    .tk = K->shape.d[1], .heads = Q->shape.d[2], .kv_heads = K->shape.d[2], .dim = Q->shape.d[3]

static dt_status dt__attention_back(dt_node *n) {
    const dt__attention_saved *saved = (const dt__attention_saved *)n->saved;
    dt_tensor *q = n->in[0], *k = n->in[1], *v = n->in[2];
    dt_ctx *ctx = q->ctx;
    dt_attention_back_args a = { .dtype = q->dtype,
        .dout = n->out->grad,
        .out = n->out->data,
        .lse = saved->lse->data,
        DT__ATTENTION_INPUTS(q, k, v),
        .scale = saved->scale,
        .mask = saved->mask,
        .soft_cap = saved->soft_cap };
    if (dt_wants(n, 0) && !(a.dq = dt_grad_raw(n, 0, &a.accumulate_q))) return dt_error(ctx);
    if (dt_wants(n, 1) && !(a.dk = dt_grad_raw(n, 1, &a.accumulate_k))) return dt_error(ctx);
    if (dt_wants(n, 2) && !(a.dv = dt_grad_raw(n, 2, &a.accumulate_v))) return dt_error(ctx);
    a.work_bytes = dt__scratch_bytes(ctx, dt_attention_work(a.tk, a.dim, q->dtype));
    a.work = dt_scratch(ctx, a.work_bytes);
    return a.work ? DT__KERNEL(ctx, n->name, attention_back, &a) : dt_error(ctx);
}

static int dt__attention_fits(
    const dt_tensor *q, const dt_tensor *k, const dt_tensor *v, int kv_heads) {
    const int64_t *a = q->shape.d, *b = k->shape.d;
    const char *op = "dt_attention";
    if (q->dtype != k->dtype)
        dt__mismatch(op, q, k, "q and k must have one type");
    else if (k->dtype != v->dtype || !dt__same_shape(k->shape, v->shape))
        dt__mismatch(op, k, v, "k and v must have one type and shape");
    else if (q->shape.nd != 4 || k->shape.nd != 4 || a[0] != b[0] || a[3] != b[3] || a[3] < 1 ||
             b[2] < 1 || a[2] % b[2])
        dt__mismatch(op, q, k, "q (B,TQ,H,D), k and v (B,TK,K,D), H a multiple of K are needed");
    else if (kv_heads && kv_heads != b[2])
        dt_fail(q->ctx, DT_ERR_SHAPE, "%s(%s, %s): kv_heads %d, but k %s has %lld", op, q->name,
            k->name, kv_heads, dt__shape_text(k->shape).s, (long long)b[2]);
    return q->ctx->status == DT_OK;
}

/* Checks the numbers of an attention. Returns 1, or 0 after an error. */
static int dt__attention_options_fit(const dt_tensor *q, int full, dt_attn_desc d) {
    if (d.window < 0 || (d.window > 0 && full))
        dt_fail(q->ctx, DT_ERR_ARG,
            "dt_attention(%s): a window of %d keys%s; a sliding window needs causal attention and "
            "has at least 1 key, and 0 means no window",
            q->name, d.window, full ? " without a causal mask" : "");
    else if (!(d.soft_cap >= 0 && d.soft_cap < HUGE_VAL && d.scale >= 0 && d.scale < HUGE_VAL))
        dt_fail(q->ctx, DT_ERR_ARG, "dt_attention(%s): soft_cap %g, scale %g; both are at least 0",
            q->name, d.soft_cap, d.scale);
    return q->ctx->status == DT_OK;
}

/* Returns the data of `ints`, which holds a position or a document number for each token of x
   (B,T,H,D). Returns NULL if `ints` is NULL, which is not an error. Sets *bad to 1 on an error. */
static const int32_t *dt__token_ints(dt_tensor *x, dt_tensor *ints, int *bad) {
    if (!ints) return NULL;
    if (!dt__op_context("dt_attention", 1, x, ints, NULL))
        *bad = 1;
    else if (ints->dtype != DT_I32 || dt_count(ints->shape) != x->shape.d[0] * x->shape.d[1]) {
        dt__mismatch(
            "dt_attention", x, ints, "positions and documents are i32, one for each token");
        *bad = 1;
    }
    return (const int32_t *)ints->data;
}

/* Fills in the attention mask. Returns 1, or 0 if the tensors of positions or of document numbers
   do not fit q and k. */
static int dt__mask_make(dt_tensor *q, dt_tensor *k, dt_attn_desc d, dt_attention_mask *s) {
    int bad = 0, same = q->shape.d[1] == k->shape.d[1];
    s->causal = !d.full;
    s->window = d.window;
    if (same && !d.key_positions) d.key_positions = d.positions;
    if (same && !d.key_documents) d.key_documents = d.documents;
    s->q_position = dt__token_ints(q, d.positions, &bad);
    s->k_position = dt__token_ints(k, d.key_positions, &bad);
    s->q_document = dt__token_ints(q, d.documents, &bad);
    s->k_document = dt__token_ints(k, d.key_documents, &bad);
    if (bad || !s->q_document == !s->k_document) return !bad;
    dt_fail(q->ctx, DT_ERR_ARG, "dt_attention: documents of queries and of keys, both or none");
    return 0;
}

dt_tensor *dt_attention(dt_tensor *q, dt_tensor *k, dt_tensor *v, dt_attn_desc desc) {
    dt_ctx *ctx = dt__float_op_context("dt_attention", 3, q, k, v);
    dt_attention_mask mask;
    if (!ctx) return NULL;
    if (!dt__attention_fits(q, k, v, desc.kv_heads)) return NULL;
    if (!dt__attention_options_fit(q, desc.full, desc)) return NULL;
    if (!dt__mask_make(q, k, desc, &mask)) return NULL;
    dt_tensor *y = dt__new_output(ctx, q, q->dtype, q->shape, "dt_attention", 0);
    dt_shape lse_shape = DT_SHAPE(q->shape.d[0], q->shape.d[2], q->shape.d[1]);
    dt_tensor *lse = dt__new_output(ctx, q, dt__wide(q->dtype, 1), lse_shape, "lse", 0);
    /* without positions a causal mask takes the queries to be the last tokens of the keys */
    int rule = desc.full || desc.positions ? DT__RULE_ATTENTION : DT__RULE_ATTENTION_CAUSAL;
    if (!lse || !dt__propagate("dt_attention", y, rule, q, k, v)) return NULL;
    dt_attention_args a = { .dtype = q->dtype,
        .out = y->data,
        .lse = lse->data,
        DT__ATTENTION_INPUTS(q, k, v),
        .scale = dt__attention_scale(q, desc.scale),
        .mask = mask,
        .soft_cap = desc.soft_cap };
    a.work_bytes = dt__scratch_bytes(ctx, dt_attention_work(0, a.dim, q->dtype));
    a.work = dt_scratch(ctx, a.work_bytes);
    if (!a.work || DT__OP("dt_attention", q, attention, &a) != DT_OK) return NULL;
    if (desc.lse) *desc.lse = lse;
    dt__attention_saved saved = { lse, mask, a.scale, a.soft_cap };
    return dt__record_with(
        y, dt__make_record("dt_attention", q, k, v, dt__attention_back, sizeof saved), &saved);
}

/* ---- losses ---- */

typedef struct dt__loss_saved {
    dt_tensor *lse;
    dt_tensor *logits;   /* all logits, or NULL if the backward recomputes the logits */
    int logits_are_grad; /* 1 if the backward has overwritten the saved logits with dlogits */
    double scale;
    dt_loss_desc desc;
} dt__loss_saved;

static int dt__denominator(dt_ctx *ctx, const char *op, double denominator) {
    if (!(denominator > 0 && denominator < HUGE_VAL))
        dt_fail(ctx, DT_ERR_ARG,
            "%s: denominator %g; give the number of labels or elements of the whole step", op,
            denominator);
    return dt_error(ctx) == DT_OK;
}

static int dt__loss_desc_ok(
    dt_ctx *ctx, const char *op, dt_loss_desc d, int64_t columns, double denominator) {
    if (!dt__denominator(ctx, op, denominator)) return 0;
    const dt_vocab_shard *s = &d.shard;
    if (s->count != 0 && (s->count < 0 || !s->gather || s->offset < 0 || s->full_vocab < 1))
        dt_fail(ctx, DT_ERR_ARG, "%s: %d parts of a vocabulary of %lld, this from %lld on%s", op,
            s->count, (long long)s->full_vocab, (long long)s->offset,
            s->gather ? "" : ", and no gather");
    else if (!(d.vocab >= 0 && d.vocab <= columns && d.smoothing >= 0 && d.smoothing < 1 &&
                 d.z_weight >= 0))
        dt_fail(ctx, DT_ERR_ARG,
            "%s: vocab %lld of %lld columns, smoothing %g in [0,1), z_weight %g", op,
            (long long)d.vocab, (long long)columns, d.smoothing, d.z_weight);
    return dt_error(ctx) == DT_OK;
}

/* Cross-entropy in chunks of rows. dt_cross_entropy_at has one chunk, whose logits are its input.
   dt_linear_cross_entropy holds the logits of one chunk at a time. The backward computes them again
   and overwrites them with their gradient, dlogits:

       forward, each chunk of rows     logits = x w^T  ->  loss, lse
       backward, each chunk of rows    logits = x w^T  ->  dlogits  ->  dx, dw += dlogits^T x

   Returns the number of rows of such a chunk. A chunk has about 2^20 logits, or about
   max_saved_logits if the kernel table sets that field. It has at least 64 and at most 4,096 rows,
   so that the matrix products are efficient. On one device the number of rows of a chunk depends on
   V alone, so that the bits of w's gradient do not depend on the number of rows of x. There is one
   exception. If the number of all logits is at most max_saved_logits, the forward saves all logits,
   and w's gradient is one matrix product over all rows. */
static int64_t dt__loss_chunk_rows(const dt_ctx *ctx, int64_t vocab) {
    int64_t max_logits =
        ctx->kernels.max_saved_logits ? (int64_t)ctx->kernels.max_saved_logits : (int64_t)1 << 20;
    int64_t rows = max_logits / (vocab > 0 ? vocab : 1);
    return rows < 64 ? 64 : rows > 4096 ? 4096 : rows;
}

static int dt__loss_keeps_logits(const dt_ctx *ctx, const dt_tensor *x, const dt_tensor *w) {
    double numbers = (double)dt__row_count(x) * (double)w->shape.d[0];
    return numbers > 0 && numbers <= (double)ctx->kernels.max_saved_logits && !ctx->no_grad &&
           (x->needs_grad || w->needs_grad);
}

/* A chunk of `rows` rows and its scratch memory. That memory holds, in this order: the logits, the
   partial results of a vocabulary-parallel loss for all rows of x (this rank's, then those of all
   `shards` ranks), the loss of each row, the cross-entropy kernel's scratch memory for one row
   (`row`), and the scratch memory of the matrix products (`product`). */
typedef struct dt__loss_chunk {
    int64_t rows;
    char *logits;
    double *row_loss, *partial;
    void *row, *product;
    size_t row_bytes, product_bytes;
} dt__loss_chunk;

/* w is NULL for a loss whose logits are x. all_logits: the logits of all rows, or NULL. */
static int dt__loss_chunk_make(
    dt_tensor *x, const dt_tensor *w, const dt_tensor *all_logits, int shards, dt__loss_chunk *k) {
    dt_ctx *ctx = x->ctx;
    int64_t C = (int64_t)dt__last_dim(x), V = w ? w->shape.d[0] : C,
            all = (int64_t)dt__row_count(x);
    int64_t rows =
        all_logits || all < dt__loss_chunk_rows(ctx, V) ? all : dt__loss_chunk_rows(ctx, V);
    size_t a = dt_matmul_work(V, C, x->dtype), b = dt_matmul_work(C, V, x->dtype);
    size_t c = dt_matmul_work(C, rows, x->dtype);
    size_t logits = all_logits ? 0 : ((size_t)(rows * V) * dt_dtype_size(x->dtype) + 63) / 64 * 64;
    size_t partials = shards ? 2 * (size_t)all * (size_t)(shards + 1) : 0;
    k->row_bytes = (dt_row_work(V, x->dtype) + 63) / 64 * 64;
    k->product_bytes = w ? dt__scratch_bytes(ctx, a > b ? a > c ? a : c : b > c ? b : c) : 0;
    k->rows = rows > 0 ? rows : 1;
    k->logits = (char *)dt_scratch(ctx,
        logits + ((size_t)rows + partials) * sizeof(double) + k->row_bytes + k->product_bytes + 64);
    if (!k->logits) return 0;
    k->partial = (double *)(k->logits + logits);
    k->row_loss = k->partial + partials;
    k->row = k->row_loss + rows;
    k->product = (char *)k->row + k->row_bytes;
    if (all_logits) k->logits = (char *)all_logits->data;
    return 1;
}

/* Computes the logits of rows [r, r + rows) of x into k->logits. */
static dt_status dt__loss_logits(const char *op, const dt_tensor *x, const dt_tensor *w,
    const dt__loss_chunk *k, int64_t r, int64_t rows) {
    int64_t C = (int64_t)dt__last_dim(w);
    size_t at = (size_t)(r * C) * dt_dtype_size(x->dtype);
    dt_matmul_args a = { .dtype = x->dtype,
        .c = k->logits,
        .a = (char *)x->data + at,
        .b = w->data,
        .m = rows,
        .n = w->shape.d[0],
        .k = C,
        .trans_b = 1,
        .work = k->product,
        .work_bytes = k->product_bytes };
    return DT__KERNEL(x->ctx, op, matmul, &a);
}

static dt_status dt__cross_entropy_back(dt_node *n) {
    dt__loss_saved *saved = (dt__loss_saved *)n->saved;
    dt_tensor *x = n->in[0], *labels = n->in[1], *w = n->in[2];
    dt_ctx *ctx = x->ctx;
    int64_t all = (int64_t)dt__row_count(x), C = (int64_t)dt__last_dim(x),
            V = w ? w->shape.d[0] : C;
    size_t size = dt_dtype_size(x->dtype);
    dt__loss_chunk k;
    if (!dt__loss_chunk_make(x, w, saved->logits, 0, &k)) return dt_error(ctx);
    dt_cross_entropy_back_args a = { .dtype = x->dtype,
        .dlogits = k.logits,
        .logits = k.logits,
        .cols = (size_t)V,
        .vocab = (size_t)saved->desc.vocab,
        .upstream = (const double *)n->out->grad,
        .scale = saved->scale,
        .smoothing = saved->desc.smoothing,
        .z = saved->desc.z_weight,
        .work = k.row,
        .work_bytes = k.row_bytes,
        .offset = saved->desc.shard.offset,
        .full_vocab = saved->desc.shard.full_vocab };
    dt_matmul_args dx = { .dtype = x->dtype, .a = k.logits, .n = C, .k = V },
                   dw = { .dtype = x->dtype, .a = k.logits, .m = V, .n = C, .trans_a = 1 };
    if (!w && !(a.dlogits = dt_grad_raw(n, 0, &a.accumulate))) return dt_error(ctx);
    if (w && dt_wants(n, 0) && !(dx.c = dt__grad_wide(n, 0, &dx.accumulate, &dx.wide)))
        return dt_error(ctx);
    if (w && dt_wants(n, 2) && !(dw.c = dt__grad_wide(n, 2, &dw.accumulate, &dw.wide)))
        return dt_error(ctx);
    dx.work = dw.work = k.product;
    dx.work_bytes = dw.work_bytes = k.product_bytes;
    /* the loop runs once even if x has no rows, to write zero gradients */
    for (int64_t r = 0; r < all || r == 0; r += k.rows) {
        int64_t rows = all - r < k.rows ? all - r : k.rows;
        if (rows > 0 && !saved->logits && dt__loss_logits(n->name, x, w, &k, r, rows) != DT_OK)
            return dt_error(ctx);
        a.lse = (char *)saved->lse->data + (size_t)r * dt_dtype_size(saved->lse->dtype);
        a.labels = (const int32_t *)labels->data + r;
        a.rows = (size_t)rows;
        if (!saved->logits_are_grad && DT__KERNEL(ctx, n->name, cross_entropy_back, &a) != DT_OK)
            return dt_error(ctx);
        if (!w) continue;
        /* saved logits are overwritten once: the other half of a split backward reads dlogits */
        saved->logits_are_grad = saved->logits != NULL;
        dt_matmul_args p = dx;
        p.m = dw.k = rows;
        p.b = w->data;
        p.c = (char *)dx.c + (size_t)(r * C) * (dx.wide ? sizeof(float) : size);
        dw.b = (char *)x->data + (size_t)(r * C) * size;
        if (dx.c && DT__KERNEL(ctx, n->name, matmul, &p) != DT_OK) return dt_error(ctx);
        if (dw.c && DT__KERNEL(ctx, n->name, matmul, &dw) != DT_OK) return dt_error(ctx);
        dw.accumulate = 1;
    }
    return DT_OK;
}

/* Vocabulary-parallel cross-entropy, the exchange. Gathers every rank's partial results,
   {log-sum-exp, target} of each row, and merges them into the loss. a->partial holds this rank's
   results, of shape (rows,2), followed by space for the results of all ranks, of shape
   (shard.count,rows,2). */
static dt_status dt__loss_merge(
    const char *op, dt_tensor *x, const dt_cross_entropy_args *a, dt_vocab_shard shard) {
    dt_cross_entropy_merge_args m = { .dtype = a->dtype,
        .loss = a->loss,
        .lse = a->lse,
        .partials = a->partial + 2 * a->rows,
        .labels = a->labels,
        .n = (size_t)shard.count,
        .rows = a->rows,
        .denominator = a->denominator,
        .z_loss = a->z_loss };
    dt_status status = shard.gather(shard.user, a->partial, a->partial + 2 * a->rows, 2 * a->rows);
    if (status != DT_OK)
        return dt_fail(x->ctx, status, "%s(%s): merging %d parts", op, x->name, shard.count);
    return DT__OP(op, x, cross_entropy_merge, &m);
}

/* Cross-entropy of the logits x w^T, or of the logits x if w is NULL. */
static dt_tensor *dt__cross_entropy(const char *op, dt_tensor *x, dt_tensor *w, dt_tensor *labels,
    double denominator, dt_loss_desc desc) {
    dt_ctx *ctx = x->ctx;
    int64_t all = (int64_t)dt__row_count(x), V = w ? w->shape.d[0] : (int64_t)dt__last_dim(x);
    dt__loss_chunk k;
    if (labels->dtype != DT_I32 || dt_count(labels->shape) != all)
        return dt__mismatch(op, x, labels, "one i32 label a row is needed");
    if (!dt__loss_desc_ok(ctx, op, desc, V, denominator)) return NULL;
    if (!desc.shard.count) { /* the vocabulary is one shard */
        desc.shard.offset = 0;
        desc.shard.full_vocab = desc.vocab = desc.vocab ? desc.vocab : V;
    }
    dt_tensor *loss = dt__new_output(ctx, NULL, DT_F64, DT_SCALAR, op, 0), *z = NULL,
              *logits = w ? NULL : x;
    dt_tensor *lse = dt__new_output(ctx, x, dt__wide(x->dtype, 1), DT_SHAPE(all), "lse", 0);
    if (desc.z_loss) *desc.z_loss = z = dt__new_output(ctx, NULL, DT_F64, DT_SCALAR, "z loss", 0);
    if (w && dt__loss_keeps_logits(ctx, x, w))
        logits = dt__new_output(ctx, x, x->dtype, DT_SHAPE(all, V), "logits", 0);
    int rule = w ? (desc.shard.count ? DT__RULE_VOCAB_LINEAR_LOSS : DT__RULE_LINEAR_LOSS)
                 : (desc.shard.count ? DT__RULE_VOCAB_LOSS : DT__RULE_LOSS);
    if (ctx->status != DT_OK || !dt__propagate(op, loss, rule, x, labels, w)) return NULL;
    if (z) z->placements = loss->placements;
    if (!dt__loss_chunk_make(x, w, logits, desc.shard.count, &k)) return NULL;
    dt_cross_entropy_args a = { .dtype = x->dtype,
        .loss = (double *)loss->data,
        .row_loss = k.row_loss,
        .lse = lse->data,
        .logits = k.logits,
        .labels = (const int32_t *)labels->data,
        .rows = (size_t)all,
        .cols = (size_t)V,
        .vocab = (size_t)desc.vocab,
        .denominator = denominator,
        .smoothing = desc.smoothing,
        .z_loss = z ? (double *)z->data : NULL,
        .work = k.row,
        .work_bytes = k.row_bytes,
        .partial = desc.shard.count ? k.partial : NULL,
        .offset = desc.shard.offset,
        .full_vocab = desc.shard.full_vocab };
    for (int64_t r = 0; r < all || r == 0; r += k.rows) {
        int64_t rows = all - r < k.rows ? all - r : k.rows;
        if (w && rows > 0 && dt__loss_logits(op, x, w, &k, r, rows) != DT_OK) return NULL;
        dt_cross_entropy_args chunk = a;
        chunk.lse = (char *)a.lse + (size_t)r * dt_dtype_size(lse->dtype);
        chunk.labels = a.labels + r;
        chunk.rows = (size_t)rows;
        chunk.accumulate = r > 0;
        if (a.partial) chunk.partial = a.partial + 2 * r;
        dt_status status = DT__CALL(ctx, cross_entropy, &chunk);
        if (status == DT_ERR_ARG)
            dt__index_error(
                op, x, "label", labels, INT32_MIN, a.full_vocab, "the vocabulary", "entries");
        if (dt__kernel_done(ctx, op, x->name, "cross_entropy", status) != DT_OK) return NULL;
    }
    if (a.partial && dt__loss_merge(op, x, &a, desc.shard) != DT_OK) return NULL;
    dt__loss_saved saved = { lse, logits, 0, 1.0 / denominator, desc };
    return dt__record_with(
        loss, dt__make_record(op, x, labels, w, dt__cross_entropy_back, sizeof saved), &saved);
}

dt_tensor *dt_cross_entropy(dt_tensor *logits, dt_tensor *labels, double denominator) {
    dt_loss_desc none;
    memset(&none, 0, sizeof none);
    return dt_cross_entropy_at(logits, labels, denominator, none);
}

dt_tensor *dt_cross_entropy_at(
    dt_tensor *logits, dt_tensor *labels, double denominator, dt_loss_desc desc) {
    const char *op = "dt_cross_entropy";
    dt_ctx *ctx = dt__float_op_context(op, 2, logits, labels, NULL);
    if (!ctx) return NULL;
    if (logits->shape.nd < 1) return dt__shape_error(op, logits, "logits (..,V) are needed");
    return dt__cross_entropy(op, logits, NULL, labels, denominator, desc);
}

dt_tensor *dt_linear_cross_entropy(
    dt_tensor *x, dt_tensor *w, dt_tensor *labels, double denominator, dt_loss_desc desc) {
    const char *op = "dt_linear_cross_entropy";
    dt_ctx *ctx = dt__float_op_context(op, 3, x, w, labels);
    if (!ctx) return NULL;
    if (w->shape.nd != 2 || x->shape.nd < 1 || dt__last_dim(x) != dt__last_dim(w) ||
        x->dtype != w->dtype)
        return dt__mismatch(op, x, w, "x (..,C) and w (V,C) of one type are needed");
    return dt__cross_entropy(op, x, w, labels, denominator, desc);
}

typedef struct dt__pair_loss_saved {
    int kind;
    double scale;
} dt__pair_loss_saved;

/* The gradient of b is that of a with the inputs exchanged. */
static dt_status dt__pair_loss_back(dt_node *n) {
    const dt__pair_loss_saved *saved = (const dt__pair_loss_saved *)n->saved;
    for (int i = 0; i < 2; i++) {
        if (!dt_wants(n, i)) continue;
        dt_tensor *a = n->in[i], *b = n->in[1 - i];
        dt_pair_loss_back_args args = { .dtype = a->dtype,
            .kind = i == 1 && saved->kind == DT_PAIR_BCE ? DT_PAIR_BCE_TARGET : saved->kind,
            .a = a->data,
            .b = b->data,
            .count = (size_t)dt_count(a->shape),
            .upstream = (const double *)n->out->grad,
            .scale = saved->scale };
        args.da = dt_grad_raw(n, i, &args.accumulate);
        if (!args.da || DT__KERNEL(a->ctx, n->name, pair_loss_back, &args) != DT_OK)
            return dt_error(a->ctx);
    }
    return DT_OK;
}

static dt_tensor *dt__pair_loss(
    const char *op, int kind, dt_tensor *a, dt_tensor *b, double denominator) {
    dt_ctx *ctx = dt__float_op_context(op, 2, a, b, NULL);
    if (!ctx || !dt__denominator(ctx, op, denominator)) return NULL;
    if (!dt__same_shape(a->shape, b->shape) || a->dtype != b->dtype)
        return dt__mismatch(op, a, b, "shapes and types must be equal");
    dt_tensor *loss = dt__new_output(ctx, NULL, DT_F64, DT_SCALAR, op, 0);
    if (!dt__propagate(op, loss, DT__RULE_PAIR_LOSS, a, b, NULL)) return NULL;
    dt_pair_loss_args args = { .dtype = a->dtype,
        .kind = kind,
        .loss = (double *)loss->data,
        .a = a->data,
        .b = b->data,
        .count = (size_t)dt_count(a->shape),
        .denominator = denominator };
    if (DT__KERNEL(ctx, op, pair_loss, &args) != DT_OK) return NULL;
    dt__pair_loss_saved saved = { kind, (kind == DT_PAIR_SQUARE ? 2.0 : 1.0) / denominator };
    return dt__record_with(
        loss, dt__make_record(op, a, b, NULL, dt__pair_loss_back, sizeof saved), &saved);
}

dt_tensor *dt_mse(dt_tensor *a, dt_tensor *b, double denominator) {
    return dt__pair_loss("dt_mse", DT_PAIR_SQUARE, a, b, denominator);
}

dt_tensor *dt_bce_with_logits(dt_tensor *logits, dt_tensor *targets, double denominator) {
    return dt__pair_loss("dt_bce_with_logits", DT_PAIR_BCE, logits, targets, denominator);
}

static dt_status dt__side_loss_back(dt_node *n) {
    dt_tensor *s = n->in[0];
    void *weight = dt_scratch(s->ctx, sizeof(double)); /* holds one element of any type */
    double scale = *(const double *)n->saved * s->ctx->loss_scale;
    if (!weight || dt__fill(s->ctx, s->dtype, weight, 1, scale) != DT_OK) return dt_error(s->ctx);
    return dt__add_grad(n, 0, weight);
}

dt_tensor *dt_loss(dt_tensor *x, dt_tensor *scalar, double weight) {
    dt_ctx *ctx = dt__op_context("dt_loss", 2, x, scalar, NULL);
    if (!ctx) return NULL;
    if (dt_count(scalar->shape) != 1 || dt__integer(scalar->dtype))
        return dt__mismatch("dt_loss", x, scalar, "a side loss is a scalar");
    if (scalar->needs_grad && !dt__loss_expect("dt_loss", scalar)) return NULL;
    dt_record_desc d =
        dt__make_record("dt_loss", scalar, NULL, NULL, dt__side_loss_back, sizeof weight);
    dt_node *node = dt__record(NULL, ctx, &d);
    if (node) *(double *)node->saved = weight;
    return ctx->status == DT_OK ? x : NULL;
}

// ==== 24. JSON ==================================================================================

/* A recursive-descent parser (RFC 8259) that reads the text twice. The first pass validates the
   text and counts nodes and string bytes; the second pass fills one allocation of the counted size.
   The nodes are in the order of the text, so a container precedes its children:

       {"a": [1, 2], "b": true}    node  0 object   1 array a   2 number   3 number   4 bool b
                                   next  5          4           3          4          5

   Limits on bytes, nodes, string length, depth and digits bound the cost of hostile input. */

enum {
    DT__JSON_BYTES = 100000000,
    DT__JSON_NODES = 1 << 22,
    DT__JSON_STRING = 16 << 20,
    DT__JSON_DEPTH = 64,
    DT__JSON_DIGITS = 800
};

typedef struct dt__json_node {
    uint32_t at;   /* the value's byte offset in the text */
    uint32_t key;  /* offset of an object member's key in `chars`; 0 if the node is no member */
    uint32_t next; /* index of the next node that is not a descendant of this node */
    uint32_t kind : 3, count : 29; /* a dt_json_kind; the number of children */
    /* `first` of a string is its offset in `chars`. `first` of a container is the index in `order`
       of its first child. `first` of a bool is 1 for true, 0 for false. */
    union {
        double number;
        uint32_t first;
    } u;
} dt__json_node;

struct dt_json {
    dt_ctx *ctx;
    const char *name, *text;
    size_t bytes, memory; /* of the text; of this struct with the arrays that lie behind it */
    uint32_t nodes;
    dt__json_node *node; /* `nodes` elements; a node precedes its descendants */
    /* `nodes` elements: the indices of all nodes. The children of a container are consecutive; the
       members of an object are sorted by key */
    uint32_t *order;
    uint32_t *scratch; /* `nodes` elements of scratch memory for sorting */
    char *chars;       /* all strings: each is 4 bytes of length, its bytes and a NUL */
};

/* The state of one pass over the text. The first pass stores no nodes and no strings. */
typedef struct dt__json_parser {
    dt_json *doc;
    size_t at, chars;
    uint32_t nodes, children;
    int depth;
} dt__json_parser;

/* Returns a printable form of a name from a file, truncated to 80 bytes, for an error text. */
static dt__text dt__printable_name(const char *name) {
    enum { LONGEST = 96 }; /* bytes of the printable form */
    dt__text t = dt__format(strlen(name) > 80 ? "%.80s.." : "%s", name);
    dt__escape(t.s, LONGEST);
    return t;
}

static int dt__json_error(const dt_json *d, size_t at, const char *fmt, ...) DT_PRINTF(3, 4);
static dt_status dt__json_error_at(const dt_json *d, size_t at, const char *fmt, va_list args) {
    char reason[256];
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at; i++) {
        if (d->text[i] == '\n')
            line++, column = 1;
        else
            column += ((unsigned char)d->text[i] & 0xc0) != 0x80; /* counts UTF-8 characters */
    }
    vsnprintf(reason, sizeof reason, fmt ? fmt : "no reason was given", args);
    return dt_fail(d->ctx, DT_ERR_IO, "%s:%zu:%zu: %s", d->name, line, column, reason);
}

static int dt__json_error(const dt_json *d, size_t at, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    dt__json_error_at(d, at, fmt, args);
    va_end(args);
    return 0;
}

static const char *dt__json_string_at(const dt_json *d, uint32_t offset, size_t *bytes) {
    uint32_t n;
    memcpy(&n, d->chars + offset, sizeof n);
    if (bytes) *bytes = n;
    return d->chars + offset + sizeof n;
}

static int dt__string_order(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    return order ? order : a_bytes < b_bytes ? -1 : a_bytes > b_bytes;
}

static int dt__json_compare(const dt_json *d, uint32_t a, uint32_t b) {
    size_t a_bytes, b_bytes;
    const char *x = dt__json_string_at(d, d->node[a].key, &a_bytes),
               *y = dt__json_string_at(d, d->node[b].key, &b_bytes);
    return dt__string_order(x, a_bytes, y, b_bytes);
}

static int dt__json_less(const void *user, uint32_t a, uint32_t b) {
    return dt__json_compare((const dt_json *)user, a, b) < 0;
}

/* Returns the offset of the first byte that is not valid UTF-8, or n if all n bytes are valid.
   Overlong forms and surrogates are not valid. */
static size_t dt__utf8_first_invalid(const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    for (size_t i = 0; i < n;) {
        unsigned c = s[i], more = c < 0x80 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
        unsigned min = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
        unsigned max = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        if (more && (c < 0xc2 || c > 0xf4 || more >= n - i || s[i + 1] < min || s[i + 1] > max))
            return i;
        for (unsigned k = 2; k <= more; k++)
            if ((s[i + k] & 0xc0) != 0x80) return i;
        i += more + 1;
    }
    return n;
}

/* An unsigned big integer of n digits in base 2^32, lowest digit first, without leading zeros. `w`
   has enough digits for every number that the parser accepts. */
typedef struct dt__big {
    int n;
    uint32_t w[192];
} dt__big;

static void dt__big_mul(dt__big *b, uint32_t by, uint32_t add) {
    uint64_t carry = add;
    for (int i = 0; i < b->n; i++) {
        carry += (uint64_t)b->w[i] * by;
        b->w[i] = (uint32_t)carry;
        carry >>= 32;
    }
    if (carry) b->w[b->n++] = (uint32_t)carry;
}

/* Divides by `by` and returns the remainder. */
static uint32_t dt__big_div(dt__big *b, uint32_t by) {
    uint64_t rest = 0;
    for (int i = b->n - 1; i >= 0; i--) {
        rest = rest << 32 | b->w[i];
        b->w[i] = (uint32_t)(rest / by);
        rest %= by;
    }
    while (b->n > 0 && b->w[b->n - 1] == 0) b->n--;
    return (uint32_t)rest;
}

/* Stores in *out the double that is nearest to digits * 10^exponent; ties go to the even double.
   Returns 1, or 0 if that double is infinite or 0. The digits are those among the n characters of
   s; other characters, such as the decimal point, are skipped. This function replaces libc's
   strtod, which depends on the locale. It computes digits * 2^shift * 5^exponent in big integers:
   the rounding depends only on the highest 64 bits and on whether anything lies below them. */
static int dt__decimal_to_double(const char *s, size_t n, int64_t exponent, double *out) {
    dt__big a = { 0, { 0 } };
    int64_t digits = 0, left = exponent < 0 ? -exponent : exponent;
    uint32_t below = 0; /* not 0 if a division left a remainder */
    for (size_t i = 0; i < n; i++)
        if (s[i] >= '0' && s[i] <= '9' && (digits || s[i] != '0')) {
            dt__big_mul(&a, 10, (uint32_t)(s[i] - '0'));
            digits++;
        }
    if (digits + exponent > 310 || digits + exponent < -330) return 0;
    /* 3 words, and one for each division by 5^13, so that 64 bits are left after the divisions */
    int words = 3 + (exponent < 0 ? (int)(left / 13) : 0);
    memmove(a.w + words, a.w, (size_t)a.n * sizeof *a.w);
    memset(a.w, 0, (size_t)words * sizeof *a.w);
    a.n += words;
    while (left > 0) {
        uint32_t by = left < 13 ? 5 : 1220703125; /* 5 or 5^13 */
        left -= left < 13 ? 1 : 13;
        if (exponent < 0)
            below |= dt__big_div(&a, by);
        else
            dt__big_mul(&a, by, 0);
    }
    int zeros = __builtin_clz(a.w[a.n - 1]);
    uint64_t q = (uint64_t)a.w[a.n - 1] << 32 | a.w[a.n - 2], half = (uint64_t)1 << 63;
    q = q << zeros | (uint64_t)a.w[a.n - 3] << zeros >> 32;
    below |= a.w[a.n - 3] << zeros;
    for (int i = 0; i < a.n - 3; i++) below |= a.w[i];
    int top = 32 * (a.n - words) - 1 - zeros + (int)exponent; /* the exponent of q's highest bit */
    /* number of low bits of q that are rounded away; greater for a denormal */
    int drop = top < -1022 ? 11 - 1022 - top : 11;
    if (drop > 64) return 0;
    uint64_t mantissa = drop < 64 ? q >> drop : 0, remainder = drop < 64 ? q << (64 - drop) : q;
    mantissa += remainder > half || (remainder == half && (below || (mantissa & 1)));
    *out = ldexp((double)mantissa, top - 63 + drop);
    return mantissa > 0 && isfinite(*out);
}

static int dt__json_skip_digits(dt__json_parser *in) {
    const dt_json *d = in->doc;
    size_t begin = in->at;
    while (in->at < d->bytes && d->text[in->at] >= '0' && d->text[in->at] <= '9') in->at++;
    return in->at > begin ? 1 : dt__json_error(d, in->at, "a digit is needed");
}

/* If the next byte is c, consumes it and returns 1. Otherwise returns 0. */
static int dt__json_accept(dt__json_parser *in, char c) {
    int yes = in->at < in->doc->bytes && in->doc->text[in->at] == c;
    in->at += (size_t)yes;
    return yes;
}

static int dt__json_parse_exponent(dt__json_parser *in, int64_t *exponent) {
    int64_t value = 0;
    int minus = dt__json_accept(in, '-');
    if (!minus) dt__json_accept(in, '+');
    size_t begin = in->at;
    if (!dt__json_skip_digits(in)) return 0;
    for (size_t i = begin; i < in->at; i++)
        value = value < 100000 ? 10 * value + in->doc->text[i] - '0' : value;
    *exponent += minus ? -value : value;
    return 1;
}

static int dt__json_parse_number(dt__json_parser *in, double *out) {
    const dt_json *d = in->doc;
    size_t begin = in->at, first, point = 0, end;
    int64_t exponent = 0, integer = 0;
    int minus = dt__json_accept(in, '-'), is_integer = 1, zero = 1;
    first = in->at;
    if (!dt__json_accept(in, '0') && !dt__json_skip_digits(in)) return 0;
    point = in->at;
    if (dt__json_accept(in, '.')) {
        is_integer = 0;
        if (!dt__json_skip_digits(in)) return 0;
        exponent = -(int64_t)(in->at - point - 1);
    }
    end = in->at;
    if (dt__json_accept(in, 'e') || dt__json_accept(in, 'E')) {
        is_integer = 0;
        if (!dt__json_parse_exponent(in, &exponent)) return 0;
    }
    if (end - first > DT__JSON_DIGITS)
        return dt__json_error(d, begin, "a number of more than %d digits", DT__JSON_DIGITS);
    for (size_t i = first; i < end; i++) zero &= d->text[i] == '0' || d->text[i] == '.';
    if (zero && minus) return dt__json_error(d, begin, "-0 is not allowed: write 0");
    *out = 0;
    if (is_integer) {
        for (size_t i = first; i < end && integer <= (int64_t)1 << 53; i++)
            integer = 10 * integer + d->text[i] - '0';
        if (integer > (int64_t)1 << 53) return dt__json_error(d, begin, "an integer beyond 2^53");
        *out = (double)integer;
    } else if (!zero && !dt__decimal_to_double(d->text + first, end - first, exponent, out)) {
        return dt__json_error(d, begin, "a number that no double can represent");
    }
    if (minus) *out = -*out;
    return 1;
}

static int dt__json_parse_hex(dt__json_parser *in, uint32_t *out) {
    *out = 0;
    for (int i = 0; i < 4; i++, in->at++) {
        int c = in->at < in->doc->bytes ? in->doc->text[in->at] : 0, low = c | 32;
        if (!(c >= '0' && c <= '9') && !(low >= 'a' && low <= 'f'))
            return dt__json_error(in->doc, in->at, "\\u needs four hexadecimal digits");
        *out = *out << 4 | (uint32_t)(c <= '9' ? c - '0' : low - 'a' + 10);
    }
    return 1;
}

/* Decodes the escape after a backslash to `out`. An escape from \udc80 to \udcff becomes one raw
   byte, as in Python's surrogateescape. Returns the number of bytes stored, or 0 on an error. */
static int dt__json_parse_escape(dt__json_parser *in, char out[4]) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    size_t begin = in->at - 1;
    uint32_t code, low = 0;
    for (int i = 0; i < 8; i++)
        if (dt__json_accept(in, from[i])) {
            out[0] = to[i];
            return 1;
        }
    if (!dt__json_accept(in, 'u'))
        return dt__json_error(in->doc, begin, "no such escape in a string");
    if (!dt__json_parse_hex(in, &code)) return 0;
    if (code >= 0xdc80 && code <= 0xdcff) {
        out[0] = (char)(code & 0xff);
        return 1;
    }
    if (code >= 0xd800 && code < 0xe000) {
        int pair = code < 0xdc00 && dt__json_accept(in, '\\') && dt__json_accept(in, 'u');
        if (pair && !dt__json_parse_hex(in, &low)) return 0;
        if (low < 0xdc00 || low > 0xdfff)
            return dt__json_error(in->doc, begin, "half of a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    int n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)(n == 1 ? code : (0xf00u >> n & 0xff) | code);
    return n;
}

/* Appends a string, whose opening quote is the next byte, to `chars`; *offset receives its offset
   there. */
static int dt__json_parse_string(dt__json_parser *in, uint32_t *offset) {
    const dt_json *d = in->doc;
    size_t begin = in->at++;
    char *out = d->node ? d->chars + in->chars + 4 : NULL;
    uint32_t n = 0;
    while (!dt__json_accept(in, '"')) {
        char decoded[4];
        int size = 1;
        if (in->at >= d->bytes) return dt__json_error(d, begin, "a string without an end");
        decoded[0] = d->text[in->at++];
        if ((unsigned char)decoded[0] < 32)
            return dt__json_error(d, in->at - 1, "a control character in a string");
        if (decoded[0] == '\\' && (size = dt__json_parse_escape(in, decoded)) == 0) return 0;
        if (out) memcpy(out + n, decoded, (size_t)size);
        n += (uint32_t)size;
        if (n > DT__JSON_STRING)
            return dt__json_error(d, begin, "a string of more than %d bytes", DT__JSON_STRING);
    }
    *offset = (uint32_t)in->chars;
    if (out) memcpy(out - 4, &n, 4);
    if (out) out[n] = 0;
    in->chars += n + 5;
    return 1;
}

static void dt__json_skip_space(dt__json_parser *in) {
    while (dt__json_accept(in, ' ') || dt__json_accept(in, '\n') || dt__json_accept(in, '\r') ||
           dt__json_accept(in, '\t')) {
    }
}

static int dt__json_literal(dt__json_parser *in, const char *word) {
    size_t n = strlen(word);
    if (in->doc->bytes - in->at < n || memcmp(in->doc->text + in->at, word, n) != 0)
        return dt__json_error(in->doc, in->at, "a value is needed");
    in->at += n;
    return 1;
}

/* Lists the children of a container, which has been parsed, in `order`. Sorts the members of an
   object by key, for dt_json_find and to find duplicate keys. */
static int dt__json_index_children(dt__json_parser *in, uint32_t self, dt__json_node *node) {
    dt_json *d = in->doc;
    if (!d->node) return 1;
    uint32_t first = node->u.first = in->children;
    for (uint32_t c = self + 1; c < in->nodes; c = d->node[c].next) d->order[in->children++] = c;
    if (node->kind == DT_JSON_ARRAY) return 1;
    dt__sort(d->order + first, d->scratch, node->count, dt__json_less, d);
    for (uint32_t i = first + 1; i < in->children; i++)
        if (dt__json_compare(d, d->order[i - 1], d->order[i]) == 0) {
            const char *key = dt__json_string_at(d, d->node[d->order[i]].key, NULL);
            return dt__json_error(
                d, d->node[d->order[i]].at, "'%s' is there twice", dt__printable_name(key).s);
        }
    return 1;
}

static int dt__json_parse_value(dt__json_parser *in, uint32_t key);

static int dt__json_parse_container(
    dt__json_parser *in, uint32_t self, dt__json_node *node, char end) {
    const dt_json *d = in->doc;
    if (++in->depth > DT__JSON_DEPTH)
        return dt__json_error(d, in->at, "more than %d levels", DT__JSON_DEPTH);
    in->at++;
    dt__json_skip_space(in);
    int more = !dt__json_accept(in, end);
    while (more) {
        uint32_t key = 0;
        if (end == '}') {
            if (in->at >= d->bytes || d->text[in->at] != '"')
                return dt__json_error(d, in->at, "a key in quotes is needed");
            if (!dt__json_parse_string(in, &key)) return 0;
            dt__json_skip_space(in);
            if (!dt__json_accept(in, ':')) return dt__json_error(d, in->at, "a colon is needed");
        }
        dt__json_skip_space(in);
        if (!dt__json_parse_value(in, key)) return 0;
        node->count++;
        dt__json_skip_space(in);
        more = dt__json_accept(in, ',');
        dt__json_skip_space(in);
        if (!more && !dt__json_accept(in, end))
            return dt__json_error(d, in->at, "a comma or '%c' is needed", end);
    }
    in->depth--;
    return dt__json_index_children(in, self, node);
}

static int dt__json_parse_value(dt__json_parser *in, uint32_t key) {
    dt_json *d = in->doc;
    char c = in->at < d->bytes ? d->text[in->at] : 0;
    dt__json_node node = { (uint32_t)in->at, key, 0, DT_JSON_NULL, 0, { 0 } };
    uint32_t self = in->nodes++, offset = 0;
    int ok;
    if (in->nodes > DT__JSON_NODES)
        return dt__json_error(d, in->at, "more than %d values", DT__JSON_NODES);
    if (c == '{' || c == '[') {
        node.kind = c == '{' ? DT_JSON_OBJECT : DT_JSON_ARRAY;
        ok = dt__json_parse_container(in, self, &node, c == '{' ? '}' : ']');
    } else if (c == '"') {
        node.kind = DT_JSON_STRING;
        ok = dt__json_parse_string(in, &offset);
        node.u.first = offset;
    } else if (c == '-' || (c >= '0' && c <= '9')) {
        node.kind = DT_JSON_NUMBER;
        ok = dt__json_parse_number(in, &node.u.number);
    } else {
        node.kind = c == 'n' ? DT_JSON_NULL : DT_JSON_BOOL;
        node.u.first = c == 't';
        ok = dt__json_literal(in, c == 'n' ? "null" : c == 't' ? "true" : "false");
    }
    node.next = in->nodes;
    if (ok && d->node) d->node[self] = node;
    return ok;
}

static int dt__json_document(dt_json *d, dt__json_parser *in) {
    memset(in, 0, sizeof *in);
    in->doc = d;
    dt__json_skip_space(in);
    if (!dt__json_parse_value(in, 0)) return 0;
    dt__json_skip_space(in);
    return in->at == d->bytes ? 1 : dt__json_error(d, in->at, "something follows the end");
}

dt_json *dt_json_parse(dt_ctx *ctx, const char *name, const char *text, size_t bytes) {
    if (dt_error(ctx) != DT_OK) return NULL;
    dt_json counted = { .ctx = ctx, .name = name ? name : "JSON", .text = text, .bytes = bytes },
            *d;
    dt__json_parser in;
    name = counted.name;
    if (!text && bytes)
        dt_fail(
            ctx, DT_ERR_ARG, "dt_json_parse(%s): %zu bytes of text, which is NULL", name, bytes);
    else if (bytes > DT__JSON_BYTES)
        dt_fail(ctx, DT_ERR_IO, "%s: %zu bytes of JSON, at most %d", name, bytes, DT__JSON_BYTES);
    if (dt_error(ctx) != DT_OK) return NULL;
    size_t bad = dt__utf8_first_invalid(text, bytes);
    if (bad < bytes) dt__json_error(&counted, bad, "this is not UTF-8");
    if (bad < bytes || !dt__json_document(&counted, &in)) return NULL;
    counted.nodes = in.nodes;
    counted.memory =
        sizeof counted + in.nodes * (sizeof *counted.node + 2 * sizeof *counted.order) + in.chars;
    d = (dt_json *)dt_alloc(ctx, DT_MEM_HOST, counted.memory, name);
    if (!d) return NULL;
    *d = counted;
    d->node = (dt__json_node *)(d + 1);
    d->order = (uint32_t *)(d->node + d->nodes);
    d->scratch = d->order + d->nodes;
    d->chars = (char *)(d->scratch + d->nodes);
    if (dt__json_document(d, &in)) return d;
    dt_json_free(d);
    return NULL;
}

void dt_json_free(dt_json *json) {
    if (json) dt_free(json->ctx, DT_MEM_HOST, json, json->memory);
}

static const dt__json_node *dt__json_get(const dt_json *d, int node) {
    return d && node >= 0 && (uint32_t)node < d->nodes ? &d->node[node] : NULL;
}

static const dt__json_node *dt__json_is(const dt_json *d, int node, dt_json_kind kind) {
    const dt__json_node *n = dt__json_get(d, node);
    return n && n->kind == (uint32_t)kind ? n : NULL;
}

dt_json_kind dt_json_kind_of(const dt_json *d, int node) {
    const dt__json_node *n = dt__json_get(d, node);
    return n ? (dt_json_kind)n->kind : DT_JSON_NULL;
}

int dt_json_count(const dt_json *d, int node) {
    const dt__json_node *n = dt__json_get(d, node);
    return n ? (int)n->count : 0;
}

int dt_json_at(const dt_json *d, int node, int i) {
    if (i < 0 || i >= dt_json_count(d, node)) return -1;
    return (int)d->order[d->node[node].u.first + (uint32_t)i];
}

const char *dt_json_key(const dt_json *d, int node, size_t *bytes) {
    return dt__json_get(d, node) ? dt__json_string_at(d, d->node[node].key, bytes) : NULL;
}

int dt_json_find(const dt_json *d, int node, const char *key) {
    const dt__json_node *n = dt__json_is(d, node, DT_JSON_OBJECT);
    int lo = 0, hi = n && key ? (int)n->count : 0;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        size_t bytes = 0;
        const char *have = dt_json_key(d, dt_json_at(d, node, mid), &bytes);
        int order = dt__string_order(key, strlen(key), have, bytes);
        if (order == 0) return dt_json_at(d, node, mid);
        if (order < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return -1;
}

const char *dt_json_string(const dt_json *d, int node, size_t *bytes) {
    const dt__json_node *n = dt__json_is(d, node, DT_JSON_STRING);
    return n ? dt__json_string_at(d, n->u.first, bytes) : NULL;
}

int dt_json_number(const dt_json *d, int node, double *out) {
    const dt__json_node *n = dt__json_is(d, node, DT_JSON_NUMBER);
    if (n && out) *out = n->u.number;
    return n != NULL;
}

int dt_json_int(const dt_json *d, int node, int64_t *out) {
    double v;
    if (!dt_json_number(d, node, &v) || v != floor(v) || fabs(v) > 9007199254740992.0) return 0;
    if (out) *out = (int64_t)v;
    return 1;
}

int dt_json_bool(const dt_json *d, int node, int *out) {
    const dt__json_node *n = dt__json_is(d, node, DT_JSON_BOOL);
    if (n && out) *out = (int)n->u.first;
    return n != NULL;
}

dt_status dt_json_fail(const dt_json *d, int node, const char *fmt, ...) {
    va_list args;
    if (!d) return DT_ERR_ARG;
    va_start(args, fmt);
    dt_status status =
        dt__json_error_at(d, dt__json_get(d, node) ? d->node[node].at : 0, fmt, args);
    va_end(args);
    return status;
}

static void dt__json_write(dt_json_out *o, const char *s, size_t n) {
    if (!o) return;
    if (o->used + n + 1 > o->capacity && dt_error(o->ctx) == DT_OK) {
        size_t capacity = 2 * (o->used + n + 1) + 256;
        char *text = (char *)dt_alloc(o->ctx, DT_MEM_HOST, capacity, "JSON");
        if (!text) return;
        if (o->text) memcpy(text, o->text, o->used);
        dt_free(o->ctx, DT_MEM_HOST, o->text, o->capacity);
        o->text = text;
        o->capacity = capacity;
    }
    if (dt_error(o->ctx) != DT_OK) return;
    memcpy(o->text + o->used, s, n);
    o->used += n;
    o->text[o->used] = 0;
}

static void dt__json_quote(dt_json_out *o, const char *s) {
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const char *end = s + strlen(s), *bad = s + dt__utf8_first_invalid(s, strlen(s));
    dt__json_write(o, "\"", 1);
    for (; *s; s++) {
        char code[8] = { '\\', 0 };
        const char *escape = strchr(from, *s);
        if (escape)
            code[1] = to[escape - from];
        else if ((unsigned char)*s < 32)
            snprintf(code, sizeof code, "\\u%04x", (unsigned)*s);
        else if (s == bad)
            snprintf(code, sizeof code, "\\udc%02x", (unsigned)(unsigned char)*s);
        if (s == bad) bad += 1 + dt__utf8_first_invalid(s + 1, (size_t)(end - s - 1));
        if (code[1])
            dt__json_write(o, code, strlen(code));
        else
            dt__json_write(o, s, 1);
    }
    dt__json_write(o, "\"", 1);
}

/* Writes what precedes a value: a comma, unless it is the first in its container, and the key. */
static void dt__json_separator(dt_json_out *o, const char *key) {
    char last = o && o->used ? o->text[o->used - 1] : '{';
    if (last != '{' && last != '[') dt__json_write(o, ",", 1);
    if (!key) return;
    dt__json_quote(o, key);
    dt__json_write(o, ":", 1);
}

void dt_json_open(dt_json_out *o, const char *key, char bracket) {
    dt__json_separator(o, key);
    dt__json_write(o, &bracket, 1);
}

void dt_json_close(dt_json_out *o, char bracket) { dt__json_write(o, &bracket, 1); }

void dt_json_put_string(dt_json_out *o, const char *key, const char *value) {
    dt__json_separator(o, key);
    if (value)
        dt__json_quote(o, value);
    else
        dt__json_write(o, "null", 4);
}

/* Writes 15, 16 or 17 significant digits, the fewest that parse back to the same value, with '.'
   instead of the locale's decimal point, which may have several bytes. */
static void dt__json_put_real(dt_json_out *o, const char *key, double value, int is_float) {
    char raw[48], text[48] = "0.0";
    double parsed = 0;
    dt_json d;
    dt__json_parser in;
    if (!o) return;
    if (!is_float) text[1] = 0;
    if (!isfinite(value)) dt_fail(o->ctx, DT_ERR_ARG, "JSON: %g is no number there", value);
    memset(&d, 0, sizeof d);
    memset(&in, 0, sizeof in);
    d.text = text;
    in.doc = &d;
    for (int digits = 15;
         digits <= 17 && dt_error(o->ctx) == DT_OK && value != 0 && parsed != value; digits++) {
        size_t n = 0;
        snprintf(raw, sizeof raw, "%.*g", digits, value);
        for (const char *s = raw; *s; s++) {
            int keep = (*s >= '0' && *s <= '9') || *s == 'e' || *s == '-' || *s == '+';
            if (keep || (n && text[n - 1] != '.')) text[n++] = keep ? *s : '.';
        }
        text[n] = 0;
        if ((is_float || fabs(value) > 9007199254740992.0) && !strpbrk(text, ".e"))
            memcpy(text + n, ".0", 3), n += 2;
        in.at = 0;
        d.bytes = n;
        dt__json_parse_number(&in, &parsed);
    }
    dt__json_separator(o, key);
    dt__json_write(o, text, strlen(text));
}

void dt_json_put_number(dt_json_out *o, const char *key, double value) {
    dt__json_put_real(o, key, value, 0);
}
void dt_json_put_float(dt_json_out *o, const char *key, double value) {
    dt__json_put_real(o, key, value, 1);
}

void dt_json_put_int(dt_json_out *o, const char *key, int64_t value) {
    char text[24];
    dt__json_separator(o, key);
    dt__json_write(o, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)value));
}

void dt_json_put_bool(dt_json_out *o, const char *key, int value) {
    dt__json_separator(o, key);
    dt__json_write(o, value ? "true" : "false", value ? 4 : 5);
}

void dt_json_out_free(dt_json_out *o) {
    if (!o) return;
    dt_free(o->ctx, DT_MEM_HOST, o->text, o->capacity);
    o->text = NULL;
    o->used = o->capacity = 0;
}

// ==== 25. Reading and writing files =============================================================

static char *dt__concat_text(dt_ctx *ctx, const char *a, size_t a_bytes, const char *b) {
    char *s = (char *)dt_alloc(ctx, DT_MEM_HOST, a_bytes + strlen(b) + 1, "a path");
    if (!s) return NULL;
    memcpy(s, a, a_bytes);
    memcpy(s + a_bytes, b, strlen(b) + 1);
    return s;
}

/* Returns the temporary name: path.tmp on rank 0 and path.<rank>.tmp on other ranks, so that ranks
   that write the same path do not overwrite each other's temporary file. The last rename wins. */
static char *dt__temp_name(dt_ctx *ctx, const char *path) {
    char end[32];
    snprintf(end, sizeof end, ".%d.tmp", ctx->rank);
    return dt__concat_text(ctx, path, strlen(path), ctx->rank ? end : ".tmp");
}

static void dt__string_free(dt_ctx *ctx, char *s) {
    if (s) dt_free(ctx, DT_MEM_HOST, s, strlen(s) + 1);
}

/* Returns a description of errno, which the io table has set. */
enum { DT__SHORTER = -1 }; /* not an errno: a read has reached the end of the file */
static const char *dt__io_reason(void) {
    switch (errno) {
    case 0: return "the io table refused";
    case DT__SHORTER: return "the file has become shorter";
    case ESPIPE: return "it is a FIFO, not a regular file";
    case ENODEV:
    case ENXIO: return "it is a device or a socket, not a regular file";
    case ELOOP: return "it is a symbolic link that is not followed, or that leads nowhere";
    case EMLINK: return "it has another hard link; writing it would change that file too";
    case EFBIG: return "File too large, for ulimit -f or for the file system";
    default: return strerror(errno);
    }
}

static int dt__io_absent(void) { return errno == ENOENT || errno == ENOTDIR; }

/* Opens a file; errno is 0 after a failure for which the io table gives no reason. */
static int dt__open(const dt_io *io, const char *path, int mode) {
    errno = 0;
    return io->open(io->user, path, mode);
}

/* Returns 1 if the file or folder can be opened. Else returns 0, with the reason in errno. */
static int dt__io_exists(const dt_io *io, const char *path) {
    int fd = dt__open(io, path, DT_IO_READ);
    if (fd >= 0) io->close(io->user, fd);
    return fd >= 0;
}

/* Returns the last component of a path, which points into `path`. */
static const char *dt__path_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Fails the context after a failed io call, with the formatted text and the description of errno.
   Sets ctx->read_failed if the file itself may be intact: unless it is absent, a directory, a FIFO
   or too short. */
static dt_status dt__io_fail(dt_ctx *ctx, const char *fmt, ...) DT_PRINTF(2, 3);
static dt_status dt__io_fail(dt_ctx *ctx, const char *fmt, ...) {
    char text[sizeof ctx->text];
    const char *reason = dt__io_reason();
    int unread = !dt__io_absent() && errno != EISDIR && errno != ESPIPE && errno != DT__SHORTER;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (ctx->status == DT_OK) ctx->read_failed = unread;
    return dt_fail(ctx, DT_ERR_IO, "%s: %s", text, reason);
}

/* Reads or writes `bytes` bytes at offset `at`, in several calls if one call transfers fewer bytes.
   Returns the number of bytes transferred. If it is less than `bytes`, *end is 1 if a read reached
   the end of the file or a write accepted no bytes, 0 if the io table reported an error. */
static int64_t dt__io_transfer(
    const dt_io *io, int fd, int writing, void *data, int64_t bytes, int64_t at, int *end) {
    int64_t done = 0, n = 1;
    while (done < bytes) {
        char *next = (char *)data + done;
        errno = 0;
        n = writing ? io->pwrite(io->user, fd, next, (size_t)(bytes - done), at + done)
                    : io->pread(io->user, fd, next, (size_t)(bytes - done), at + done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0 || n > bytes - done) break;
        done += n;
    }
    *end = done < bytes && n >= 0;
    return done;
}

/* Reads exactly `bytes` bytes at offset `at`, or fails with an error that names `item`. */
static dt_status dt__file_read_at(
    dt_ctx *ctx, const char *path, int fd, void *out, int64_t bytes, int64_t at, const char *item) {
    int end = 0;
    int64_t done = dt__io_transfer(&ctx->io, fd, 0, out, bytes, at, &end);
    if (done == bytes) return DT_OK;
    if (end) errno = DT__SHORTER;
    return dt__io_fail(
        ctx, "%s: %s, byte %lld", path, dt__printable_name(item).s, (long long)(at + done));
}

/* File writer. Every file that must not be lost is written in these steps:

       create PATH.tmp -> write -> fsync -> close -> rename to PATH -> fsync the folder

   At any instant PATH is the old file or the complete new file. The writer calls only functions of
   the io table, so that a thread that must not touch the context may use it. After its first
   failure its functions do nothing, except that dt__writer_sync_close still closes. */
enum { DT__PATH_BYTES = 1024 };
typedef struct dt__writer {
    dt_io io;
    char why[DT__PATH_BYTES + 200]; /* text of the first failure, or "" */
} dt__writer;

static void dt__writer_fail(dt__writer *w, const char *path, const char *what) {
    if (w->why[0]) return;
    snprintf(w->why, sizeof w->why, "%.*s: %s: %s", DT__PATH_BYTES, path, what, dt__io_reason());
}

/* Fails the context if the writer has failed. `func` is a prefix of the error text, or NULL. */
static dt_status dt__writer_check(dt_ctx *ctx, const dt__writer *w, const char *func) {
    if (!w->why[0] || ctx->status != DT_OK) return ctx->status;
    return dt_fail(ctx, DT_ERR_IO, "%s%s%s", func ? func : "", func ? ": " : "", w->why);
}

/* Sets the size of a new file, which is then zero. */
static void dt__writer_resize(dt__writer *w, const char *path, int fd, int64_t bytes) {
    char what[64];
    errno = 0;
    snprintf(what, sizeof what, "making room for %lld bytes", (long long)bytes);
    if (w->io.resize(w->io.user, fd, bytes) != 0) dt__writer_fail(w, path, what);
}

/* Creates a file of `bytes` zero bytes. `path` is a temporary name: if a killed job has left a file
   or a link of this name, removes that file or link first. Returns the descriptor, or -1. The
   caller closes the file even if only its size could not be set. */
static int dt__writer_create(dt__writer *w, const char *path, int64_t bytes) {
    const dt_io *io = &w->io;
    if (w->why[0]) return -1;
    int fd = dt__open(io, path, DT_IO_CREATE);
    if (fd < 0 && errno == EEXIST && io->remove(io->user, path) == 0)
        fd = dt__open(io, path, DT_IO_CREATE);
    if (fd < 0)
        dt__writer_fail(w, path, "open");
    else
        dt__writer_resize(w, path, fd, bytes);
    return fd;
}

/* Reads or writes `bytes` bytes at offset `at`. `doing` begins the text of a failure, which counts
   bytes from offset `base`. */
static void dt__writer_transfer(dt__writer *w, const char *path, int fd, int writing,
    const char *doing, void *data, int64_t bytes, int64_t at, int64_t base) {
    char what[100];
    int end = 0;
    if (w->why[0]) return;
    int64_t done = dt__io_transfer(&w->io, fd, writing, data, bytes, at, &end);
    if (done == bytes) return;
    snprintf(what, sizeof what, "%s, byte %lld", doing, (long long)(at + done - base));
    if (end) errno = writing ? ENOSPC : DT__SHORTER;
    dt__writer_fail(w, path, what);
}

static void dt__writer_write(
    dt__writer *w, const char *path, int fd, const void *data, int64_t bytes, int64_t at) {
    dt__writer_transfer(w, path, fd, 1, "writing", (void *)(uintptr_t)data, bytes, at, 0);
}

/* Calls fsync, then close. Some disk errors are reported only by fsync, and only once. */
static void dt__writer_sync_close(dt__writer *w, const char *path, int fd) {
    errno = 0;
    if (!w->why[0] && w->io.fsync(w->io.user, fd) != 0) dt__writer_fail(w, path, "fsync");
    errno = 0;
    if (w->io.close(w->io.user, fd) != 0) dt__writer_fail(w, path, "close");
}

/* Makes the names in a folder durable. EINVAL is ignored: some file systems cannot sync a folder
   and do not need to. tolerated: an errno of open that is not a failure; 0; or DT__ANY_ERRNO. */
enum { DT__ANY_ERRNO = -1 };
static void dt__writer_sync_folder(dt__writer *w, const char *folder, int tolerated) {
    if (w->why[0]) return;
    int fd = dt__open(&w->io, folder, DT_IO_READ);
    if (fd < 0 && tolerated != DT__ANY_ERRNO && (errno == 0 || errno != tolerated))
        dt__writer_fail(w, folder, "open");
    if (fd < 0) return;
    errno = 0;
    if (w->io.fsync(w->io.user, fd) != 0 && errno != EINVAL) dt__writer_fail(w, folder, "fsync");
    w->io.close(w->io.user, fd);
}

/* Calls fsync on the folder that contains `path`. */
static void dt__writer_sync_parent(dt__writer *w, const char *path, int tolerated) {
    char folder[4096] = "."; /* Linux opens no longer path */
    size_t n = (size_t)(dt__path_name(path) - path);
    if (n >= sizeof folder) {
        errno = ENAMETOOLONG;
        dt__writer_fail(w, path, "fsync of its folder");
        return;
    }
    if (n > 0) memcpy(folder, path, n), folder[n] = 0;
    dt__writer_sync_folder(w, folder, tolerated);
}

/* Commits a file or a folder: renames `temp` to `path`. The rename is the instant of the commit. */
static void dt__writer_rename(dt__writer *w, const char *temp, const char *path, int tolerated) {
    if (w->why[0]) return;
    errno = 0;
    if (w->io.rename(w->io.user, temp, path) != 0) dt__writer_fail(w, path, "rename");
    dt__writer_sync_parent(w, path, tolerated);
}

/* A file that one rank writes from its creation to its commit. */
typedef struct dt__new_file {
    dt__writer writer;
    char *temp;
    int fd;
} dt__new_file;

static dt_status dt__new_file_begin(dt_ctx *ctx, dt__new_file *f, const char *path, int64_t bytes) {
    f->writer.io = ctx->io;
    f->writer.why[0] = 0;
    f->temp = dt__temp_name(ctx, path);
    f->fd = f->temp ? dt__writer_create(&f->writer, f->temp, bytes) : -1;
    return dt__writer_check(ctx, &f->writer, NULL);
}

static dt_status dt__new_file_write(
    dt_ctx *ctx, dt__new_file *f, const void *data, int64_t bytes, int64_t at) {
    if (ctx->status == DT_OK) dt__writer_write(&f->writer, f->temp, f->fd, data, bytes, at);
    return dt__writer_check(ctx, &f->writer, NULL);
}

/* Commits the file; after a failure of the context removes it. */
static dt_status dt__new_file_end(dt_ctx *ctx, dt__new_file *f, const char *path) {
    if (f->fd >= 0) {
        dt__writer_sync_close(&f->writer, f->temp, f->fd);
        if (ctx->status == DT_OK) dt__writer_rename(&f->writer, f->temp, path, DT__ANY_ERRNO);
        if (dt__writer_check(ctx, &f->writer, NULL) != DT_OK) ctx->io.remove(ctx->io.user, f->temp);
    }
    dt__string_free(ctx, f->temp);
    return ctx->status;
}

/* Opens a file. Returns its descriptor, or fails the context and returns -1. */
static int dt__file_open(dt_ctx *ctx, const char *path, int mode) {
    if (ctx->status != DT_OK) return -1;
    int fd = dt__open(&ctx->io, path, mode);
    if (fd < 0) dt__io_fail(ctx, "%s", path);
    return fd;
}

char *dt_file_read(dt_ctx *ctx, const char *path, size_t limit, size_t *bytes) {
    if (dt_error(ctx) != DT_OK) return NULL;
    if (!path || !bytes) {
        dt_fail(ctx, DT_ERR_ARG, "dt_file_read(%s): path or bytes is NULL", path ? path : "NULL");
        return NULL;
    }
    int fd = dt__file_open(ctx, path, DT_IO_READ);
    if (fd < 0) return NULL;
    char *text = NULL;
    errno = 0;
    int64_t size = ctx->io.size(ctx->io.user, fd);
    if (size < 0)
        dt__io_fail(ctx, "%s", path);
    else if ((uint64_t)size > limit)
        dt_fail(ctx, DT_ERR_IO, "%s: %lld bytes, at most %zu", path, (long long)size, limit);
    else
        text = (char *)dt_alloc(ctx, DT_MEM_HOST, (size_t)size + 1, path);
    if (text) *bytes = (size_t)size, text[size] = 0;
    if (text && dt__file_read_at(ctx, path, fd, text, size, 0, "text") != DT_OK) {
        dt_free(ctx, DT_MEM_HOST, text, (size_t)size + 1);
        text = NULL;
    }
    ctx->io.close(ctx->io.user, fd);
    return text;
}

dt_status dt_file_write(dt_ctx *ctx, const char *path, const void *data, size_t bytes) {
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    if (!path || (!data && bytes))
        return dt_fail(ctx, DT_ERR_ARG, "dt_file_write(%s): path is NULL, or data of %zu bytes is",
            path ? path : "NULL", bytes);
    dt__new_file f;
    dt__new_file_begin(ctx, &f, path, (int64_t)bytes);
    dt__new_file_write(ctx, &f, data, (int64_t)bytes, 0);
    return dt__new_file_end(ctx, &f, path);
}

// ==== 26. Weight files: formats and reading =====================================================

/* Two formats: safetensors (huggingface.co/docs/safetensors), in one file or in shards with an
   index, and the model files of llm.c.

       safetensors   | 8 bytes: N | JSON, N bytes | data of all tensors, without gaps |
                     JSON: { "name": { "dtype": "F32", "shape": [4,8], "data_offsets": [0,128] } }
       llm.c         | 256 int32: magic, version, sizes | 16 tensors in a fixed order |

   Input files are untrusted: sizes are checked for overflow, and the tensors must cover the data
   exactly. */

/* Bytes of two buffers of dt_weights: convert_buffer holds file data during a type conversion, and
   staging holds elements on their way between a file and a parameter. */
enum { DT__CONVERT_BYTES = 256 << 10, DT__STAGING_BYTES = 1 << 20 };

/* How the elements of a type are stored in a file. */
enum {
    DT__FORM_UNKNOWN = 0, /* tensors can only be listed */
    DT__FORM_DTYPE,       /* as in memory */
    DT__FORM_BOOL,        /* a byte, 0 or 1 */
    DT__FORM_SIGNED,
    DT__FORM_UNSIGNED,
    DT__FORM_E5M2, /* 8-bit floats: 5 bits of exponent and 2 of mantissa, or 4 and 3 */
    DT__FORM_E4M3  /* (arXiv:2209.05433) */
};
typedef struct dt__type {
    const char *name;
    int bits, form;
    dt_dtype dtype; /* holds every value of the type, except U64 from 2^63 on */
} dt__type;
// clang-format off
/* The element types, in the order of the enum of the safetensors library. A writer sorts the
   tensors of a file by type, from the last type of this list to the first. */
static const dt__type dt__types[] = {
    { "BOOL", 8, DT__FORM_BOOL, DT_U8 },
    { "F4", 4, DT__FORM_UNKNOWN, DT_F32 },
    { "F6_E2M3", 6, DT__FORM_UNKNOWN, DT_F32 },
    { "F6_E3M2", 6, DT__FORM_UNKNOWN, DT_F32 },
    { "U8", 8, DT__FORM_DTYPE, DT_U8 },
    { "I8", 8, DT__FORM_SIGNED, DT_I32 },
    { "F8_E5M2", 8, DT__FORM_E5M2, DT_BF16 },
    { "F8_E4M3", 8, DT__FORM_E4M3, DT_BF16 },
    { "F8_E8M0", 8, DT__FORM_UNKNOWN, DT_F32 },
    { "F8_E4M3FNUZ", 8, DT__FORM_UNKNOWN, DT_F32 },
    { "F8_E5M2FNUZ", 8, DT__FORM_UNKNOWN, DT_F32 },
    { "I16", 16, DT__FORM_SIGNED, DT_I32 },
    { "U16", 16, DT__FORM_UNSIGNED, DT_I32 },
    { "F16", 16, DT__FORM_DTYPE, DT_F16 },
    { "BF16", 16, DT__FORM_DTYPE, DT_BF16 },
    { "I32", 32, DT__FORM_DTYPE, DT_I32 },
    { "U32", 32, DT__FORM_UNSIGNED, DT_I64 },
    { "F32", 32, DT__FORM_DTYPE, DT_F32 },
    { "C64", 64, DT__FORM_UNKNOWN, DT_F32 },
    { "F64", 64, DT__FORM_DTYPE, DT_F64 },
    { "I64", 64, DT__FORM_DTYPE, DT_I64 },
    { "U64", 64, DT__FORM_UNSIGNED, DT_I64 },
};
// clang-format on
enum { DT__TYPES = sizeof dt__types / sizeof *dt__types };

/* The tensors of an llm.c model, in file order. Each character of `dims` gives a dimension: P is
   the padded vocabulary, T the number of positions, L the number of layers, C the width, 3 is three
   times the width, 4 is four times the width. */
static const struct {
    const char *name, *dims;
} dt__llmc_tensors[16] = { { .name = "wte", .dims = "PC" }, { .name = "wpe", .dims = "TC" },
    { .name = "ln1w", .dims = "LC" }, { .name = "ln1b", .dims = "LC" },
    { .name = "qkvw", .dims = "L3C" }, { .name = "qkvb", .dims = "L3" },
    { .name = "attprojw", .dims = "LCC" }, { .name = "attprojb", .dims = "LC" },
    { .name = "ln2w", .dims = "LC" }, { .name = "ln2b", .dims = "LC" },
    { .name = "fcw", .dims = "L4C" }, { .name = "fcb", .dims = "L4" },
    { .name = "fcprojw", .dims = "LC4" }, { .name = "fcprojb", .dims = "LC" },
    { .name = "lnfw", .dims = "C" }, { .name = "lnfb", .dims = "C" } };
enum { DT__LLMC_MAGIC = 20240326, DT__LLMC_HEADER_BYTES = 1024 };

typedef struct dt__weight {
    dt_weight t;
    int file, type;            /* indices into dt_weights.file and dt__types */
    int64_t bytes, offset;     /* the tensor's size; the position of its first byte in the file */
    int64_t written, expected; /* numbers of elements: written so far; to be written in all */
    char *own_name; /* a declared tensor's name; others lie in the JSON header or are constants */
} dt__weight;

typedef struct dt__weight_file {
    char *path, *temp; /* final name; temporary name while the file is being written */
    char *header;      /* the bytes of the file before the data */
    dt_json *json;     /* the parsed header; owns the tensors' names */
    size_t path_bytes, temp_bytes, header_bytes;
    int64_t bytes;
    int temp_exists; /* 1 if `temp` may exist, so that a failure must remove it */
} dt__weight_file;

/* A function that receives the elements written to a handle, so that no file is created. In a
   checkpoint every rank has a handle with the complete layout, and its sink receives the elements
   that this rank writes: elements [first, first + count) of tensor `index`, converted to the file's
   type, which begin at byte `offset` of the file. */
typedef struct dt__sink {
    void (*put)(
        void *user, int index, int64_t first, int64_t count, const void *data, int64_t offset);
    void *user;
} dt__sink;

struct dt_weights {
    dt_ctx *ctx;
    dt_listener listener; /* closes the handle when the context is freed */
    int writing;
    int layout_done;      /* 1 if files and offsets are assigned; no further tensor */
    dt_weights_desc desc; /* desc.llmc is set even if the handle is open for reading */
    char *path;
    dt__weight_file *file;
    dt__weight *weight;
    int files, file_capacity, weights, weight_capacity;
    /* 2 * order_capacity elements: sorted indices into `weight`, then scratch memory for sorting */
    uint32_t *order;
    int order_capacity;
    /* The open file's descriptor and index in `file`, or -1. A handle has only one file open at a
       time, because many ranks may read many files. */
    int fd, open_file;
    char *convert_buffer, *staging;
    dt__sink sink; /* if sink.put is not NULL, it receives all elements, and no file is created */
    dt__writer writer;
    /* dt_weights_save writes only share `share` of `shares`, because other ranks hold the same
       elements and write the other shares; 0 shares: all elements */
    int share, shares;
    int fewer_rows; /* 1: dt_weights_load may load only the first rows of a parameter */
};

// ---- Handles

static void dt__weights_close_file(dt_weights *w) {
    dt_ctx *ctx = w->ctx;
    if (w->fd >= 0 && w->writing && ctx->status == DT_OK) {
        dt__writer_sync_close(&w->writer, w->file[w->open_file].temp, w->fd);
        dt__writer_check(ctx, &w->writer, NULL);
    } else if (w->fd >= 0) {
        ctx->io.close(ctx->io.user, w->fd);
    }
    w->fd = w->open_file = -1;
}

static dt_status dt__weights_use_file(dt_weights *w, int f) {
    dt_ctx *ctx = w->ctx;
    if (w->open_file == f) return ctx->status;
    dt__weights_close_file(w);
    const char *path = w->writing ? w->file[f].temp : w->file[f].path;
    w->fd = dt__file_open(ctx, path, w->writing ? DT_IO_WRITE : DT_IO_READ);
    if (w->fd >= 0) w->open_file = f;
    return ctx->status;
}

static void dt__weights_free(dt_ctx *ctx, void *user) {
    dt_weights *w = (dt_weights *)user;
    dt__weights_close_file(w);
    for (int f = 0; f < w->files; f++) {
        dt__weight_file *file = &w->file[f];
        if (file->temp_exists) ctx->io.remove(ctx->io.user, file->temp);
        dt_json_free(file->json);
        dt_free(ctx, DT_MEM_HOST, file->header, file->header_bytes);
        dt__string_free(ctx, file->path);
        dt__string_free(ctx, file->temp);
    }
    for (int i = 0; i < w->weights; i++) dt__string_free(ctx, w->weight[i].own_name);
    dt_free(ctx, DT_MEM_HOST, w->file, (size_t)w->file_capacity * sizeof *w->file);
    dt_free(ctx, DT_MEM_HOST, w->weight, (size_t)w->weight_capacity * sizeof *w->weight);
    dt_free(ctx, DT_MEM_HOST, w->order, 2 * (size_t)w->order_capacity * sizeof *w->order);
    dt_free(ctx, DT_MEM_HOST, w->convert_buffer, w->convert_buffer ? DT__CONVERT_BYTES : 0);
    dt_free(ctx, DT_MEM_HOST, w->staging, w->staging ? DT__STAGING_BYTES : 0);
    dt__string_free(ctx, w->path);
    dt_free(ctx, DT_MEM_HOST, w, sizeof *w);
}

static dt_weights *dt__weights_new(dt_ctx *ctx, const char *path, int writing) {
    if (dt_error(ctx) != DT_OK) return NULL;
    if (!path)
        dt_fail(ctx, DT_ERR_ARG, "%s: the path is NULL",
            writing ? "dt_weights_create" : "dt_weights_open");
    /* fails if another handle writes the same path: both would use the same temporary file */
    for (dt_listener *l = ctx->listeners; l && writing && path; l = l->next) {
        const dt_weights *other =
            l->closing == dt__weights_free ? (const dt_weights *)l->user : NULL;
        if (other && other->writing && strcmp(other->path, path) == 0)
            dt_fail(ctx, DT_ERR_ARG, "dt_weights_create(%s): it is being written already", path);
    }
    if (ctx->status != DT_OK) return NULL;
    dt_weights *w = (dt_weights *)dt__host_zeroed(ctx, sizeof *w, path);
    if (!w) return NULL;
    w->ctx = ctx;
    w->writing = writing;
    w->writer.io = ctx->io;
    w->fd = w->open_file = -1;
    w->listener.closing = dt__weights_free;
    w->listener.user = w;
    dt_listen(ctx, &w->listener);
    w->path = dt__concat_text(ctx, path, strlen(path), "");
    return w;
}

static void dt__weights_destroy(dt_weights *w) {
    dt_unlisten(w->ctx, &w->listener);
    dt__weights_free(w->ctx, w);
}

/* Appends a file to the handle's list. Takes ownership of `path`, even on failure. */
static dt__weight_file *dt__weights_add_file(dt_weights *w, char *path) {
    dt__weight_file *grown = (dt__weight_file *)dt__grow(
        w->ctx, w->file, w->files, &w->file_capacity, sizeof *grown, "files");
    if (!path || !grown) {
        dt__string_free(w->ctx, path);
        return NULL;
    }
    w->file = grown;
    memset(&w->file[w->files], 0, sizeof *w->file);
    w->file[w->files].path = path;
    return &w->file[w->files++];
}

static dt__weight *dt__weights_add_tensor(dt_weights *w, const dt__weight *weight) {
    dt__weight *grown = (dt__weight *)dt__grow(
        w->ctx, w->weight, w->weights, &w->weight_capacity, sizeof *grown, "tensors");
    if (!grown) return NULL;
    w->weight = grown;
    w->weight[w->weights] = *weight;
    return &w->weight[w->weights++];
}

static int dt__type_of(dt_dtype dtype) {
    int type = 0;
    while (dt__types[type].form != DT__FORM_DTYPE || dt__types[type].dtype != dtype) type++;
    return type;
}

static void dt__weight_set_type(dt__weight *t, int type) {
    t->type = type;
    t->t.type = dt__types[type].name;
    t->t.readable = dt__types[type].form != DT__FORM_UNKNOWN;
    t->t.dtype = dt__types[type].dtype;
}

static int dt__by_name(const void *user, uint32_t a, uint32_t b) {
    const dt__weight *t = (const dt__weight *)user;
    return strcmp(t[a].t.name, t[b].t.name) < 0;
}

/* Orders tensors by offset. Of tensors with the same offset, empty tensors come first. */
static int dt__by_offset(const void *user, uint32_t a, uint32_t b) {
    const dt__weight *t = (const dt__weight *)user;
    return t[a].offset != t[b].offset ? t[a].offset < t[b].offset : t[a].bytes < t[b].bytes;
}

static int dt__by_type(const void *user, uint32_t a, uint32_t b) {
    const dt__weight *t = (const dt__weight *)user;
    return t[a].type != t[b].type ? t[a].type > t[b].type : dt__by_name(user, a, b);
}

/* Stores the indices `first` .. w->weights - 1 in w->order, sorted by `less`. */
static dt_status dt__weights_sort(dt_weights *w, int first, dt__less_fn less) {
    int n = w->weights - first;
    if (w->weights > w->order_capacity) {
        dt_free(w->ctx, DT_MEM_HOST, w->order, 2 * (size_t)w->order_capacity * sizeof *w->order);
        w->order_capacity = 0;
        w->order = (uint32_t *)dt_alloc(
            w->ctx, DT_MEM_HOST, 2 * (size_t)w->weights * sizeof *w->order, "tensors");
        if (!w->order) return w->ctx->status;
        w->order_capacity = w->weights;
    }
    for (int i = 0; i < n; i++) w->order[i] = (uint32_t)(first + i);
    if (n > 1) dt__sort(w->order, w->order + w->order_capacity, (size_t)n, less, w->weight);
    return DT_OK;
}

/* Sorts all tensors by name. Fails if two tensors have the same name. */
static dt_status dt__weights_sort_names(dt_weights *w) {
    if (dt__weights_sort(w, 0, dt__by_name) != DT_OK) return w->ctx->status;
    for (int i = 1; i < w->weights; i++)
        if (!dt__by_name(w->weight, w->order[i - 1], w->order[i]))
            return dt_fail(w->ctx, w->writing ? DT_ERR_ARG : DT_ERR_IO,
                "%s: tensor '%s' is there twice", w->path,
                dt__printable_name(w->weight[w->order[i]].t.name).s);
    return DT_OK;
}

// ---- Reading

/* Reads the entry of one tensor in a safetensors header. */
static dt_status dt__safetensors_entry(dt_weights *w, int f, int node) {
    dt__weight_file *file = &w->file[f];
    const dt_json *j = file->json;
    dt__weight t;
    size_t bytes = 0;
    int64_t begin, end, size = 1;
    memset(&t, 0, sizeof t);
    t.file = f;
    t.t.name = dt_json_key(j, node, &bytes);
    if (strlen(t.t.name) != bytes) return dt_json_fail(j, node, "a tensor's name holds a NUL");
    if (dt__utf8_first_invalid(t.t.name, bytes) < bytes)
        return dt_json_fail(j, node, "a tensor's name is not UTF-8");
    dt__text name = dt__printable_name(t.t.name);
    int shape = dt_json_find(j, node, "shape"), offsets = dt_json_find(j, node, "data_offsets");
    const char *type = dt_json_string(j, dt_json_find(j, node, "dtype"), NULL);
    if (!type || dt_json_kind_of(j, shape) != DT_JSON_ARRAY ||
        dt_json_kind_of(j, offsets) != DT_JSON_ARRAY || dt_json_count(j, node) != 3 ||
        dt_json_count(j, offsets) != 2)
        return dt_json_fail(j, node,
            "tensor '%s': dtype, shape and two data_offsets are needed, and no more", name.s);
    while (t.type < DT__TYPES && strcmp(dt__types[t.type].name, type) != 0) t.type++;
    if (t.type == DT__TYPES)
        return dt_json_fail(
            j, node, "tensor '%s': unknown type '%s'", name.s, dt__printable_name(type).s);
    dt__weight_set_type(&t, t.type);
    for (int i = 0; i < dt_json_count(j, shape); i++) {
        int64_t d = 0;
        if (!dt_json_int(j, dt_json_at(j, shape, i), &d) || d < 0)
            return dt_json_fail(j, node, "tensor '%s': dimension %d is no count", name.s, i);
        if (!dt__mul_ok(size, d, &size))
            return dt_json_fail(
                j, node, "tensor '%s': dimension %d: more elements than can be counted", name.s, i);
        if (i < DT_MAX_DIMS) t.t.shape.d[t.t.shape.nd++] = d;
    }
    if (dt_json_count(j, shape) > DT_MAX_DIMS) { /* the tensor can be listed, but not read */
        t.t.readable = 0;
        t.t.shape = DT_SHAPE(size);
    }
    t.t.count = size;
    if (!dt__mul_ok(size, dt__types[t.type].bits, &size) || size % 8 != 0)
        return dt_json_fail(j, node, "tensor '%s': %s of %s has no size in bytes", name.s,
            dt__shape_text(t.t.shape).s, type);
    if (!dt_json_int(j, dt_json_at(j, offsets, 0), &begin) ||
        !dt_json_int(j, dt_json_at(j, offsets, 1), &end) || begin < 0 || end < begin ||
        end - begin != size / 8 || !dt__add_ok(begin, (int64_t)file->header_bytes, &t.offset))
        return dt_json_fail(j, node, "tensor '%s': its data_offsets are not those of %s of %s",
            name.s, dt__shape_text(t.t.shape).s, type);
    t.bytes = end - begin;
    return dt__weights_add_tensor(w, &t) ? DT_OK : w->ctx->status;
}

static dt_status dt__safetensors_metadata(const dt_json *j, int node) {
    if (dt_json_kind_of(j, node) != DT_JSON_OBJECT)
        return dt_json_fail(j, node, "__metadata__ is no object");
    for (int i = 0; i < dt_json_count(j, node); i++)
        if (!dt_json_string(j, dt_json_at(j, node, i), NULL))
            return dt_json_fail(j, dt_json_at(j, node, i), "__metadata__ holds strings only");
    return DT_OK;
}

/* Fails unless the tensors of file f, those with index >= `first`, cover the file's data exactly.
   With a gap or an overlap, two programs could find different contents. */
static dt_status dt__safetensors_check_cover(dt_weights *w, int f, int first) {
    const dt__weight_file *file = &w->file[f];
    int64_t at = (int64_t)file->header_bytes;
    if (dt__weights_sort(w, first, dt__by_offset) != DT_OK) return w->ctx->status;
    for (int i = 0; i < w->weights - first; i++) {
        const dt__weight *t = &w->weight[w->order[i]];
        if (t->offset != at)
            return dt_fail(w->ctx, DT_ERR_IO,
                "%s: tensor '%s' begins at byte %lld, but the one before it ends at %lld",
                file->path, dt__printable_name(t->t.name).s, (long long)t->offset, (long long)at);
        if (!dt__add_ok(at, t->bytes, &at)) break;
    }
    return at == file->bytes
               ? DT_OK
               : dt_fail(w->ctx, DT_ERR_IO, "%s: %lld bytes, but its tensors end at byte %lld",
                     file->path, (long long)file->bytes, (long long)at);
}

static dt_status dt__safetensors_open(dt_weights *w, int f, uint64_t json_bytes) {
    dt__weight_file *file = &w->file[f];
    dt_ctx *ctx = w->ctx;
    int first = w->weights;
    if (json_bytes > DT__JSON_BYTES || (int64_t)json_bytes > file->bytes - 8)
        return dt_fail(ctx, DT_ERR_IO,
            "%s: neither safetensors (a header of %llu bytes in a file of %lld, at most %d) nor an "
            "llm.c model",
            file->path, (unsigned long long)json_bytes, (long long)file->bytes, DT__JSON_BYTES);
    file->header_bytes = (size_t)json_bytes + 8;
    file->header = (char *)dt_alloc(ctx, DT_MEM_HOST, file->header_bytes, "a header");
    if (!file->header) return ctx->status;
    if (dt__file_read_at(ctx, file->path, w->fd, file->header, (int64_t)file->header_bytes, 0,
            "header") != DT_OK)
        return ctx->status;
    if (json_bytes < 2 || file->header[8] != '{')
        return dt_fail(ctx, DT_ERR_IO, "%s: the header does not begin with '{'", file->path);
    file->json = dt_json_parse(ctx, file->path, file->header + 8, (size_t)json_bytes);
    int metadata = dt_json_find(file->json, 0, "__metadata__");
    if (metadata >= 0) dt__safetensors_metadata(file->json, metadata);
    for (int i = 0; i < dt_json_count(file->json, 0) && ctx->status == DT_OK; i++)
        if (dt_json_at(file->json, 0, i) != metadata)
            dt__safetensors_entry(w, f, dt_json_at(file->json, 0, i));
    return ctx->status == DT_OK ? dt__safetensors_check_cover(w, f, first) : ctx->status;
}

/* Fills in *t for tensor i of an llm.c model. Returns 0 if the tensor's size overflows. */
static int dt__llmc_tensor(const dt_llmc *m, int i, dt__weight *t) {
    const char *dims = dt__llmc_tensors[i].dims;
    memset(t, 0, sizeof *t);
    dt__weight_set_type(t, dt__type_of(m->version == 5 ? DT_BF16 : DT_F32));
    t->t.name = dt__llmc_tensors[i].name;
    t->t.count = 1;
    for (; *dims; dims++) {
        int64_t d = *dims == 'P' ? m->padded_vocab : *dims == 'T' ? m->seq : m->layers;
        if (*dims == 'C' || (*dims >= '0' && *dims <= '9'))
            d = (*dims == 'C' ? 1 : *dims - '0') * (int64_t)m->width;
        t->t.shape.d[t->t.shape.nd++] = d;
        if (!dt__mul_ok(t->t.count, d, &t->t.count)) return 0;
    }
    t->expected = i == 0 ? m->vocab * (int64_t)m->width : t->t.count;
    return dt__mul_ok(t->t.count, (int64_t)dt_dtype_size(t->t.dtype), &t->bytes);
}

/* Lists all 16 tensors of an llm.c model. *end receives the size of the file in bytes. */
static dt_status dt__llmc_list_tensors(dt_weights *w, int f, int64_t *end) {
    const dt_llmc *m = &w->desc.llmc;
    *end = DT__LLMC_HEADER_BYTES;
    if ((m->version != 3 && m->version != 5) || m->seq < 1 || m->vocab < 1 || m->layers < 1 ||
        m->heads < 1 || m->width < 1 || m->width % m->heads != 0 || m->padded_vocab < m->vocab)
        return dt_fail(w->ctx, w->writing ? DT_ERR_ARG : DT_ERR_IO,
            "%s: llm.c model of version %d (3 and 5 are known), seq %d, vocab %d of %d, layers %d, "
            "heads %d, width %d",
            w->path, m->version, m->seq, m->vocab, m->padded_vocab, m->layers, m->heads, m->width);
    for (int i = 0; i < 16; i++) {
        dt__weight t;
        int ok = dt__llmc_tensor(m, i, &t);
        t.file = f;
        t.offset = *end;
        if (!ok || !dt__add_ok(*end, t.bytes, end))
            return dt_fail(
                w->ctx, DT_ERR_IO, "%s: the size of tensor '%s' is no number", w->path, t.t.name);
        if (!dt__weights_add_tensor(w, &t)) return w->ctx->status;
    }
    return DT_OK;
}

static dt_status dt__llmc_open(dt_weights *w, int f) {
    dt__weight_file *file = &w->file[f];
    int32_t words[8];
    int64_t end;
    if (dt__file_read_at(w->ctx, file->path, w->fd, words, sizeof words, 0, "header") != DT_OK)
        return w->ctx->status;
    memcpy(&w->desc.llmc, words + 1, sizeof w->desc.llmc);
    if (dt__llmc_list_tensors(w, f, &end) != DT_OK) return w->ctx->status;
    return end == file->bytes
               ? DT_OK
               : dt_fail(w->ctx, DT_ERR_IO, "%s: %lld bytes, but a model of its sizes has %lld",
                     file->path, (long long)file->bytes, (long long)end);
}

/* Opens one file, recognizes its format and reads its header. Takes ownership of `path`. */
static dt_status dt__weights_read_header(dt_weights *w, char *path) {
    dt_ctx *ctx = w->ctx;
    dt__weight_file *file = dt__weights_add_file(w, path);
    int f = w->files - 1;
    uint64_t first_bytes;
    if (!file || dt__weights_use_file(w, f) != DT_OK) return ctx->status;
    errno = 0;
    file->bytes = ctx->io.size(ctx->io.user, w->fd);
    if (file->bytes < 0 && errno == EISDIR)
        return dt_fail(ctx, DT_ERR_IO,
            "%s: a folder without model.safetensors and model.safetensors.index.json", path);
    if (file->bytes < 0) return dt__io_fail(ctx, "%s", path);
    if (file->bytes < 8)
        return dt_fail(
            ctx, DT_ERR_IO, "%s: %lld bytes are no weights", path, (long long)file->bytes);
    if (dt__file_read_at(ctx, path, w->fd, &first_bytes, sizeof first_bytes, 0, "header") != DT_OK)
        return ctx->status;
    if ((uint32_t)first_bytes == DT__LLMC_MAGIC && w->files == 1 &&
        file->bytes >= DT__LLMC_HEADER_BYTES)
        return dt__llmc_open(w, f);
    return dt__safetensors_open(w, f, first_bytes);
}

/* Reads the headers of the shards that an index names, which lie in the directory of the index.
   Fails unless each tensor is in the file that the index names for it. */
static dt_status dt__index_shards(dt_weights *w, const dt_json *j, int map, const char *path) {
    size_t folder = (size_t)(dt__path_name(path) - path), bytes = 0;
    for (int i = 0; i < dt_json_count(j, map); i++) {
        int node = dt_json_at(j, map, i), f = 0;
        const char *name = dt_json_string(j, node, &bytes), *tensor = dt_json_key(j, node, NULL);
        if (!name || !bytes || strlen(name) != bytes || strchr(name, '/') || strchr(name, '\\') ||
            strstr(name, ".."))
            return dt_json_fail(j, node, "'%s' is not the name of a file beside the index",
                dt__printable_name(name ? name : "").s);
        while (f < w->files && strcmp(w->file[f].path + folder, name) != 0) f++;
        if (f == w->files) dt__weights_read_header(w, dt__concat_text(w->ctx, path, folder, name));
        if (w->ctx->status != DT_OK) return w->ctx->status;
        if (dt_json_find(w->file[f].json, 0, tensor) < 0)
            return dt_json_fail(j, node, "tensor '%s' is not in '%s'", dt__printable_name(tensor).s,
                dt__printable_name(name).s);
    }
    return DT_OK;
}

static dt_status dt__index_open(dt_weights *w, const char *path) {
    size_t bytes;
    char *text = dt_file_read(w->ctx, path, DT__JSON_BYTES, &bytes);
    dt_json *j = text ? dt_json_parse(w->ctx, path, text, bytes) : NULL;
    int map = dt_json_find(j, 0, "weight_map");
    if (j && dt_json_kind_of(j, map) != DT_JSON_OBJECT)
        dt_json_fail(j, 0, "there is no weight_map");
    if (w->ctx->status == DT_OK) dt__index_shards(w, j, map, path);
    dt_json_free(j);
    if (text) dt_free(w->ctx, DT_MEM_HOST, text, bytes + 1);
    return w->ctx->status;
}

/* Returns the path w->path followed by `name` if a file of this path exists, else NULL. Fails the
   context if the file exists but cannot be opened. */
static char *dt__weights_find_file(dt_weights *w, const char *name) {
    dt_ctx *ctx = w->ctx;
    char *path = ctx->status == DT_OK ? dt__concat_text(ctx, w->path, strlen(w->path), name) : NULL;
    if (!path || dt__io_exists(&ctx->io, path)) return path;
    if (!dt__io_absent()) dt__io_fail(ctx, "%s", path);
    dt__string_free(ctx, path);
    return NULL;
}

static int dt__ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

dt_weights *dt_weights_open(dt_ctx *ctx, const char *path) {
    dt_weights *w = dt__weights_new(ctx, path, 0);
    if (!w) return NULL;
    char *one = dt__weights_find_file(w, "/model.safetensors"), *index = NULL;
    if (!one) index = dt__weights_find_file(w, "/model.safetensors.index.json");
    if (one)
        dt__weights_read_header(w, one);
    else if (index || dt__ends_with(path, ".index.json"))
        dt__index_open(w, index ? index : path);
    else if (ctx->status == DT_OK)
        dt__weights_read_header(w, dt__concat_text(ctx, path, strlen(path), ""));
    dt__string_free(ctx, index);
    if (ctx->status == DT_OK && dt__weights_sort_names(w) == DT_OK) return w;
    dt__weights_destroy(w);
    return NULL;
}

int dt_weights_count(const dt_weights *w) { return w ? w->weights : 0; }

const dt_weight *dt_weights_get(const dt_weights *w, int index) {
    return index >= 0 && index < dt_weights_count(w) ? &w->weight[index].t : NULL;
}

int dt_weights_find(const dt_weights *w, const char *name) {
    int lo = 0, hi = name ? dt_weights_count(w) : 0;
    if (w && w->writing && !w->layout_done) { /* w->order is not sorted yet */
        while (lo < hi && strcmp(w->weight[lo].t.name, name) != 0) lo++;
        return lo < hi ? lo : -1;
    }
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2, order = strcmp(name, w->weight[w->order[mid]].t.name);
        if (order == 0) return (int)w->order[mid];
        if (order < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return -1;
}

dt_llmc dt_weights_llmc(const dt_weights *w) {
    dt_llmc none = { 0 };
    return w ? w->desc.llmc : none;
}

const char *dt_weights_metadata(const dt_weights *w, const char *key) {
    const dt_json *j = w && w->files ? w->file[0].json : NULL;
    return dt_json_string(j, dt_json_find(j, dt_json_find(j, 0, "__metadata__"), key), NULL);
}

/* Converts elements through f32, several times faster than the cast kernel, which converts through
   f64. From f64 to 16 bits the first rounding is to odd, so that the result is rounded once. */
static void dt__convert(dt_dtype to, void *out, dt_dtype from, const void *in, int64_t count) {
    float f[512];
    if (to == from) memcpy(out, in, (size_t)count * dt_dtype_size(to));
    for (int64_t at = 0; at < count && to != from;) {
        int n = count - at < 512 ? (int)(count - at) : 512;
        const char *source = (const char *)in + (size_t)at * dt_dtype_size(from);
        char *target = (char *)out + (size_t)at * dt_dtype_size(to);
        if (from == DT_F32) memcpy(f, source, (size_t)n * sizeof *f);
        for (int i = 0; i < n && from == DT_BF16; i++)
            f[i] = dt__bf16_to_f32(((const uint16_t *)source)[i]);
        for (int i = 0; i < n && from == DT_F16; i++)
            f[i] = dt__f16_to_f32(((const uint16_t *)source)[i]);
        for (int i = 0; i < n && from == DT_F64; i++) {
            double x = ((const double *)source)[i];
            f[i] = to == DT_F32 ? (float)x : dt__f64_to_odd(x);
        }
        if (to == DT_F32) memcpy(target, f, (size_t)n * sizeof *f);
        for (int i = 0; i < n && to == DT_BF16; i++)
            ((uint16_t *)target)[i] = dt__f32_to_bf16(f[i]);
        for (int i = 0; i < n && to == DT_F16; i++) ((uint16_t *)target)[i] = dt__f32_to_f16(f[i]);
        for (int i = 0; i < n && to == DT_F64; i++) ((double *)target)[i] = (double)f[i];
        at += n;
    }
}

/* Reads element i of a tensor of integers. *ok receives 0 if it is no value of its type. */
static int64_t dt__stored_integer(const dt__type *type, const void *data, int64_t i, int *ok) {
    int bytes = type->bits / 8, is_signed = type->form == DT__FORM_SIGNED ||
                                            (type->form == DT__FORM_DTYPE && type->dtype != DT_U8);
    uint64_t bits = 0, sign = (uint64_t)1 << (type->bits - 1);
    memcpy(&bits, (const char *)data + i * bytes, (size_t)bytes); /* little-endian, as dt's hosts */
    *ok = type->form == DT__FORM_BOOL ? bits <= 1 : is_signed || bytes < 8 || bits < sign;
    return (int64_t)(is_signed && bytes < 8 ? (bits ^ sign) - sign : bits);
}

/* E5M2 is the upper half of an f16. E4M3 has no infinity, and one NaN of each sign. */
static float dt__f8_to_f32(int form, uint8_t bits) {
    if (form == DT__FORM_E5M2) return dt__f16_to_f32((uint16_t)(bits << 8));
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float x = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    if ((bits & 127) == 127) x = NAN;
    return bits & 128 ? -x : x;
}

/* Converts elements of a type that no dt_dtype is, or integers to another type. Returns the index
   of the first element that is no value of its type, or that `to` does not hold; count if there is
   none. *value receives that element. */
static int64_t dt__convert_stored(
    dt_dtype to, void *out, const dt__type *type, const void *in, int64_t count, int64_t *value) {
    for (int64_t i = 0; i < count; i++) {
        if (!dt__integer(to)) {
            dt__set_number(
                to, out, (size_t)i, (double)dt__f8_to_f32(type->form, ((const uint8_t *)in)[i]));
            continue;
        }
        int ok = 1;
        int64_t x = *value = dt__stored_integer(type, in, i, &ok);
        if (!ok || (to == DT_U8 && (x < 0 || x > UINT8_MAX)) ||
            (to == DT_I32 && (x < INT32_MIN || x > INT32_MAX)))
            return i;
        if (to == DT_U8)
            ((uint8_t *)out)[i] = (uint8_t)x;
        else if (to == DT_I32)
            ((int32_t *)out)[i] = (int32_t)x;
        else
            ((int64_t *)out)[i] = x;
    }
    return count;
}

/* Fails the context unless elements [first, first + count) can be transferred as `dtype`. */
static dt_status dt__weights_check_range(const dt_weights *w, const char *func, int writing,
    int index, int64_t first, int64_t count, dt_dtype dtype) {
    const dt_weight *t = dt_weights_get(w, index);
    if (!w || w->ctx->status != DT_OK) return w ? w->ctx->status : DT_ERR_ARG;
    if (!t || w->writing != writing)
        return dt_fail(w->ctx, DT_ERR_ARG, "%s(%s): tensor %d of %d, of a file open for %s", func,
            w->path, index, w->weights, w->writing ? "writing" : "reading");
    if (first < 0 || count < 0 || first > t->count || count > t->count - first)
        return dt_fail(w->ctx, DT_ERR_ARG,
            "%s(%s): elements %lld..%lld of %lld (%lld from %lld on)", func,
            dt__printable_name(t->name).s, (long long)first,
            (long long)((uint64_t)first + (uint64_t)count), (long long)t->count, (long long)count,
            (long long)first);
    if (!t->readable && dt__types[w->weight[index].type].form != DT__FORM_UNKNOWN)
        return dt_fail(w->ctx, DT_ERR_UNSUPPORTED, "%s(%s): it has more than %d dimensions", func,
            dt__printable_name(t->name).s, DT_MAX_DIMS);
    if (!t->readable || dt_dtype_size(dtype) == 0 ||
        (writing && t->dtype != dtype && dt__integer(dtype)) ||
        dt__integer(t->dtype) != dt__integer(dtype))
        return dt_fail(w->ctx, DT_ERR_UNSUPPORTED, "%s(%s): no conversion between %s and %s", func,
            dt__printable_name(t->name).s, t->type, dt_dtype_name(dtype));
    return DT_OK;
}

/* Converts n elements that were read, which are elements `first`.. of tensor t. */
static dt_status dt__weights_convert(dt_weights *w, const dt__weight *t, dt_dtype to, void *out,
    const void *in, int64_t first, int64_t n) {
    const dt__type *type = &dt__types[t->type];
    int64_t bad, value = 0;
    if (type->form == DT__FORM_DTYPE && !dt__integer(to)) {
        dt__convert(to, out, type->dtype, in, n);
        return DT_OK;
    }
    if ((bad = dt__convert_stored(to, out, type, in, n, &value)) == n) return DT_OK;
    return dt_fail(w->ctx, DT_ERR_IO, "%s: element %lld of '%s' is %s%lld, which is no %s",
        w->file[t->file].path, (long long)(first + bad), dt__printable_name(t->t.name).s,
        type->form == DT__FORM_UNSIGNED && value < 0 ? "more than " : "",
        (long long)(type->form == DT__FORM_UNSIGNED && value < 0 ? INT64_MAX : value),
        type->form == DT__FORM_BOOL && value > 1 ? "BOOL" : dt_dtype_name(to));
}

static char *dt__weights_buffer(dt_weights *w, char **buffer, size_t bytes) {
    if (!*buffer)
        *buffer = (char *)dt_alloc(w->ctx, DT_MEM_HOST, bytes, "a buffer of a weight file");
    return *buffer;
}

static dt_status dt__weights_layout(dt_weights *w);

/* Reads or writes elements of a tensor, which have type `dtype` at `host`. */
static dt_status dt__weights_access(dt_weights *w, int writing, int index, int64_t first,
    int64_t count, dt_dtype dtype, void *host) {
    const char *func = writing ? "dt_weights_write" : "dt_weights_read";
    dt_status status = dt__weights_check_range(w, func, writing, index, first, count, dtype);
    if (status != DT_OK || (writing && dt__weights_layout(w) != DT_OK))
        return w ? w->ctx->status : status;
    dt__weight *t = &w->weight[index];
    const dt__weight_file *file = &w->file[t->file];
    const dt__type *type = &dt__types[t->type];
    int converts = dtype != t->t.dtype || type->form != DT__FORM_DTYPE;
    int64_t size = type->bits / 8, own_size = (int64_t)dt_dtype_size(dtype);
    int64_t step = converts ? DT__CONVERT_BYTES / size : count;
    if (writing && count > t->t.count - t->written)
        return dt_fail(w->ctx, DT_ERR_ARG, "dt_weights_write(%s): elements were written twice",
            dt__printable_name(t->t.name).s);
    if (!w->sink.put && count > 0 && dt__weights_use_file(w, t->file) != DT_OK)
        return w->ctx->status;
    if (converts && !dt__weights_buffer(w, &w->convert_buffer, DT__CONVERT_BYTES))
        return w->ctx->status;
    for (int64_t done = 0; done < count && w->ctx->status == DT_OK; done += step) {
        int64_t n = count - done < step ? count - done : step,
                at = t->offset + (first + done) * size;
        char *own = (char *)host + done * own_size, *data = converts ? w->convert_buffer : own;
        if (writing && converts) dt__convert(t->t.dtype, data, dtype, own, n);
        if (w->sink.put)
            w->sink.put(w->sink.user, index, first + done, n, data, at);
        else if (writing)
            dt__writer_write(&w->writer, file->temp, w->fd, data, n * size, at);
        else
            dt__file_read_at(w->ctx, file->path, w->fd, data, n * size, at, t->t.name);
        if (!writing && converts && w->ctx->status == DT_OK)
            dt__weights_convert(w, t, dtype, own, data, first + done, n);
    }
    if (dt__writer_check(w->ctx, &w->writer, NULL) == DT_OK && writing) t->written += count;
    return w->ctx->status;
}

dt_status dt_weights_read(
    dt_weights *w, int index, int64_t first, int64_t count, dt_dtype as, void *host) {
    return dt__weights_access(w, 0, index, first, count, as, host);
}

dt_status dt_weights_write(
    dt_weights *w, int index, int64_t first, int64_t count, dt_dtype from, const void *host) {
    return dt__weights_access(w, 1, index, first, count, from, (void *)(uintptr_t)host);
}

// ==== 27. Weight files: parameters and writing ==================================================

/* A parameter's local slice is a set of contiguous ranges of the tensor in the file. A transposed
   slice is copied in tiles, each of which fits the staging buffer. */

/* A dt_weight_part with its defaults filled in. */
typedef struct dt__weight_rect {
    dt_tensor *param;
    int index;                   /* index of the file's tensor in dt_weights.weight */
    int64_t at, rows, columns;   /* rows [at, at + rows) of the parameter as a matrix */
    int64_t row, column, stride; /* where they begin in the file's matrix of `stride` columns */
    int transposed;              /* 1 if the file's matrix holds the rectangle's transpose */
} dt__weight_rect;

static dt_status dt__rect_make(dt_weights *w, const dt_weight_part *part, dt__weight_rect *r) {
    const char *func = w->writing ? "dt_weights_save" : "dt_weights_load",
               *name = part->name ? part->name : "";
    dt_tensor *p = r->param;
    int64_t left = dt_count(p->param->full) / r->columns - r->at;
    r->index = dt_weights_find(w, name);
    const dt_weight *t = dt_weights_get(w, r->index);
    if (!t)
        return dt_fail(w->ctx, w->writing ? DT_ERR_ARG : DT_ERR_IO, "%s(%s): %s has no tensor '%s'",
            func, p->name, w->path, dt__printable_name(name).s);
    r->rows = part->rows ? part->rows : left;
    if (part->flat) {
        r->row = r->column = r->transposed = 0;
        r->stride = r->columns;
        if (part->row || part->column || part->transposed || part->file_rows ||
            part->file_columns || r->rows < 1 || r->rows > left)
            return dt_fail(w->ctx, DT_ERR_ARG,
                "%s(%s): '%s' is flat: of the other fields only rows may be set, to 1 .. %lld",
                func, p->name, dt__printable_name(name).s, (long long)left);
        return r->rows * r->columns == t->count
                   ? DT_OK
                   : dt_fail(w->ctx, DT_ERR_SHAPE,
                         "%s(%s): %s needs %lld elements of '%s', but %s has %s", func, p->name,
                         dt__shape_text(p->param->full).s, (long long)(r->rows * r->columns),
                         dt__printable_name(name).s, w->path, dt__shape_text(t->shape).s);
    }
    r->row = part->row;
    r->column = part->column;
    r->transposed = part->transposed;
    int64_t tall = r->transposed ? r->columns : r->rows,
            wide = r->transposed ? r->rows : r->columns;
    int64_t rows = part->file_rows ? part->file_rows : tall;
    r->stride = part->file_columns ? part->file_columns : wide;
    if (r->rows < 1 || r->rows > left || r->row < 0 || r->column < 0 || tall > rows ||
        r->row > rows - tall || wide > r->stride || r->column > r->stride - wide)
        return dt_fail(w->ctx, DT_ERR_ARG,
            "%s(%s): %lld of %lld rows of %lld, at (%lld,%lld) of (%lld,%lld) of '%s'", func,
            p->name, (long long)r->rows, (long long)left, (long long)r->columns, (long long)r->row,
            (long long)r->column, (long long)rows, (long long)r->stride, name);
    int64_t have = t->shape.nd ? t->shape.d[t->shape.nd - 1] : 1;
    if (have != r->stride || t->count / have != rows)
        return dt_fail(w->ctx, DT_ERR_SHAPE,
            "%s(%s): %s needs %s'%s' of (%lld,%lld), but %s has %s", func, p->name,
            dt__shape_text(p->param->full).s, r->transposed ? "transposed " : "",
            dt__printable_name(name).s, (long long)rows, (long long)r->stride, w->path,
            dt__shape_text(t->shape).s);
    return DT_OK;
}

/* Copies elements [first, first + count) of the file's tensor between the file and `host`. */
static dt_status dt__rect_access_file(
    dt_weights *w, const dt__weight_rect *r, int64_t first, int64_t count, void *host) {
    return dt__weights_access(w, w->writing, r->index, first, count, r->param->dtype, host);
}

/* Copies local elements [first, first + count) of the parameter between the parameter and `host`.
 */
static dt_status dt__rect_access_param(
    dt_weights *w, const dt__weight_rect *r, int64_t first, int64_t count, void *host) {
    size_t size = dt_dtype_size(r->param->dtype), bytes = (size_t)count * size;
    void *at = (char *)r->param->data + (size_t)first * size;
    return dt__move_now(w->ctx, w->writing ? host : at, w->writing ? at : host, bytes);
}

/* Narrows the range [*begin, *end) to the share that this rank writes. */
static void dt__weights_share(const dt_weights *w, int64_t *begin, int64_t *end) {
    int64_t from = *begin, n = *end - *begin;
    if (!w->shares) return;
    *begin = from + n / w->shares * w->share + n % w->shares * w->share / w->shares;
    *end = from + n / w->shares * (w->share + 1) + n % w->shares * (w->share + 1) / w->shares;
}

/* Copies a rectangle that is not transposed. A contiguous range of the local slice is contiguous in
   the file too, up to the end of the rectangle's row if the file's rows are longer. */
static dt_status dt__rect_copy_rows(dt_weights *w, const dt__weight_rect *r) {
    const dt_param_info *p = r->param->param;
    /* the smallest range of elements of the full tensor that contains the whole slice */
    int64_t begin = 0, end = 0;
    int64_t max_elements = DT__STAGING_BYTES / (int64_t)dt_dtype_size(r->param->dtype);
    for (int i = 0; i < p->full.nd; i++) {
        begin = begin * p->full.d[i] + p->slice.lo[i];
        end = end * p->full.d[i] + p->slice.lo[i] + p->slice.inside[i] - 1;
    }
    end++;
    dt__weights_share(w, &begin, &end);
    if (begin < r->at * r->columns) begin = r->at * r->columns;
    if (end > (r->at + r->rows) * r->columns) end = (r->at + r->rows) * r->columns;
    dt__slice_walk walk = dt__slice_begin(p->full, p->slice);
    while (dt__slice_next(&walk)) {
        int64_t g = walk.global < begin ? begin : walk.global, n;
        int64_t stop = walk.global + walk.count < end ? walk.global + walk.count : end;
        for (; g < stop && w->ctx->status == DT_OK; g += n) {
            int64_t row = g / r->columns - r->at, column = g % r->columns;
            n = stop - g < max_elements ? stop - g : max_elements;
            if (r->stride != r->columns && n > r->columns - column) n = r->columns - column;
            int64_t at = (r->row + row) * r->stride + r->column + column,
                    local = walk.local + g - walk.global;
            if (w->writing) dt__rect_access_param(w, r, local, n, w->staging);
            if (dt__rect_access_file(w, r, at, n, w->staging) == DT_OK && !w->writing)
                dt__rect_access_param(w, r, local, n, w->staging);
        }
    }
    return w->ctx->status;
}

static void dt__copy_strided(
    void *out, int64_t out_step, const void *in, int64_t in_step, int64_t n, size_t size) {
    char *o = (char *)out;
    const char *i = (const char *)in;
    for (; n > 0; n--, o += out_step * (int64_t)size, i += in_step * (int64_t)size) {
        if (size == 2)
            memcpy(o, i, 2); /* a memcpy of constant size compiles to one move instruction */
        else if (size == 4)
            memcpy(o, i, 4);
        else
            memcpy(o, i, 8);
    }
}

/* Copies one tile of a transposed parameter: rows [row, row + rows) and columns [column, column +
   columns), through the staging buffer, so that both the file and the parameter are accessed in
   contiguous ranges. `local` is the index of the tile's first element in the local slice, `pitch`
   the distance in elements between two rows of the local slice. */
static dt_status dt__rect_copy_tile(dt_weights *w, const dt__weight_rect *r, int64_t row,
    int64_t rows, int64_t column, int64_t columns, int64_t local, int64_t pitch) {
    size_t size = dt_dtype_size(r->param->dtype);
    char *tile = w->staging, *file_row = w->staging + (size_t)rows * (size_t)columns * size;
    int64_t rows_per_move = columns == pitch ? rows : 1; /* rows that each dt__move copies */
    for (int64_t i = 0; i < rows && w->writing; i += rows_per_move)
        if (dt__rect_access_param(w, r, local + i * pitch, rows_per_move * columns,
                tile + (size_t)(i * columns) * size) != DT_OK)
            return w->ctx->status;
    for (int64_t c = 0; c < columns; c++) {
        int64_t at = (r->row + column + c) * r->stride + r->column + row - r->at;
        char *corner = tile + (size_t)c * size;
        if (w->writing) dt__copy_strided(file_row, 1, corner, columns, rows, size);
        if (dt__rect_access_file(w, r, at, rows, file_row) != DT_OK) return w->ctx->status;
        if (!w->writing) dt__copy_strided(corner, columns, file_row, 1, rows, size);
    }
    for (int64_t i = 0; i < rows && !w->writing; i += rows_per_move)
        if (dt__rect_access_param(w, r, local + i * pitch, rows_per_move * columns,
                tile + (size_t)(i * columns) * size) != DT_OK)
            return w->ctx->status;
    return DT_OK;
}

/* Copies a transposed rectangle. All dimensions of the local slice except the last select ranges of
   the parameter's rows. */
static dt_status dt__rect_copy_transposed(dt_weights *w, const dt__weight_rect *r) {
    const dt_param_info *p = r->param->param;
    dt_shape lead = p->full;
    int last = --lead.nd;
    int64_t pitch = p->slice.n[last], width = p->slice.inside[last];
    int64_t wide = width < 1024 ? width : 1024;
    /* wide + 1, because the buffer holds a tile of tall * wide elements and `tall` elements of a
       row of the file */
    int64_t tall = DT__STAGING_BYTES / ((wide + 1) * (int64_t)dt_dtype_size(r->param->dtype));
    int64_t first_column = 0, end_column = width;
    dt__slice_walk walk = dt__slice_begin(lead, p->slice);
    dt__weights_share(w, &first_column, &end_column);
    while (first_column < end_column && dt__slice_next(&walk)) {
        int64_t row = walk.global < r->at ? r->at : walk.global;
        int64_t stop =
            walk.global + walk.count < r->at + r->rows ? walk.global + walk.count : r->at + r->rows;
        for (; row < stop; row += tall)
            for (int64_t c = first_column; c < end_column; c += wide) {
                int64_t rows = stop - row < tall ? stop - row : tall,
                        columns = end_column - c < wide ? end_column - c : wide;
                int64_t local = (walk.local + row - walk.global) * pitch + c;
                if (dt__rect_copy_tile(
                        w, r, row, rows, p->slice.lo[last] + c, columns, local, pitch) != DT_OK)
                    return w->ctx->status;
            }
    }
    return w->ctx->status;
}

/* Copies a parameter whose data are in memory, part by part. */
static dt_status dt__weights_copy_parts(
    dt_weights *w, dt_tensor *param, int64_t columns, const dt_weight_part *parts, int n) {
    const char *func = w->writing ? "dt_weights_save" : "dt_weights_load";
    dt_ctx *ctx = w->ctx;
    const dt_param_info *p = param->param;
    int64_t last = p->full.nd ? p->full.d[p->full.nd - 1] : 1;
    dt__weight_rect r;
    memset(&r, 0, sizeof r);
    r.param = param;
    r.columns = columns ? columns : last;
    if (r.columns < 1 || dt_count(p->full) % r.columns != 0)
        return dt_fail(ctx, DT_ERR_ARG, "%s(%s): %s has no %lld columns", func, param->name,
            dt__shape_text(p->full).s, (long long)columns);
    for (int i = 0; i < n; i++) {
        if (dt__rect_make(w, &parts[i], &r) != DT_OK) return ctx->status;
        if (r.transposed && (r.columns != last || p->full.nd == 0))
            return dt_fail(ctx, DT_ERR_ARG,
                "%s(%s): transposed, its columns are its last dimension", func, param->name);
        if (!dt__weights_buffer(w, &w->staging, DT__STAGING_BYTES)) return ctx->status;
        if ((r.transposed ? dt__rect_copy_transposed(w, &r) : dt__rect_copy_rows(w, &r)) != DT_OK)
            return ctx->status;
        r.at += r.rows;
    }
    return r.at == dt_count(p->full) / r.columns || (w->fewer_rows && !w->writing)
               ? DT_OK
               : dt_fail(ctx, DT_ERR_ARG, "%s(%s): the parts are %lld of %lld rows", func,
                     param->name, (long long)r.at, (long long)(dt_count(p->full) / r.columns));
}

/* Returns 1 if dt_weights_load must quantize: the parameter is quantized, and the file's tensor has
   floating-point numbers, not blocks. */
static int dt__quantises(
    dt_weights *w, const dt_tensor *param, const dt_weight_part *parts, int n) {
    const dt_weight *t =
        n > 0 && parts[0].name ? dt_weights_get(w, dt_weights_find(w, parts[0].name)) : NULL;
    return param->param->desc.quant && !w->writing && t && !dt__integer(t->dtype);
}

/* Returns the parameter with the shape and slice of its values; those of a quantized parameter
   itself count the bytes of blocks. */
static dt_param_info dt__logical_param(const dt_tensor *param) {
    dt_param_info p = *param->param;
    int quant = (int)p.desc.quant, last = p.full.nd - 1;
    if (!quant) return p;
    int64_t *const sizes[] = { &p.full.d[last], &p.slice.lo[last], &p.slice.n[last],
        &p.slice.inside[last] };
    for (int i = 0; i < 4; i++)
        *sizes[i] = *sizes[i] / dt__quants[quant].bytes * dt__quants[quant].elements;
    return p;
}

#ifndef DT__QUANT_BAND /* a test makes bands small */
#define DT__QUANT_BAND (1 << 20)
#endif
/* Reads a quantized parameter from tensors of floating-point numbers: reads a band of rows
   (dimension 0 of the local slice) as f32, at most DT__QUANT_BAND elements or one row, and
   quantizes it, so that the whole f32 tensor is never in memory. */
static dt_status dt__quantised_load(
    dt_weights *w, dt_tensor *param, int64_t columns, const dt_weight_part *parts, int n) {
    dt_ctx *ctx = w->ctx;
    const int quant = (int)param->param->desc.quant;
    dt_param_info whole = dt__logical_param(param), p = whole;
    dt_tensor band = *param;
    int64_t rows = whole.slice.n[0], per_row = 1;
    for (int i = 1; i < whole.full.nd; i++) per_row *= whole.slice.n[i];
    int64_t step = per_row < DT__QUANT_BAND ? DT__QUANT_BAND / per_row : 1;
    if (step > rows) step = rows;
    size_t values = (size_t)(step * per_row) * sizeof(float),
           blocks = dt_quant_bytes((dt_quant)quant, step * per_row);
    char *memory = (char *)dt_alloc(ctx, DT_MEM_HOST, values + blocks, "quantising weights");
    p.desc.quant = DT_QUANT_NONE;
    band.param = &p;
    band.dtype = DT_F32;
    band.data = memory;
    for (int64_t at = 0; memory && at < rows && ctx->status == DT_OK; at += step) {
        int64_t left = whole.slice.inside[0] - at, here = rows - at < step ? rows - at : step;
        p.slice.lo[0] = whole.slice.lo[0] + at;
        p.slice.n[0] = here;
        p.slice.inside[0] = left < 0 ? 0 : left < here ? left : here;
        memset(memory, 0, values);
        if (dt__weights_copy_parts(w, &band, columns, parts, n) != DT_OK) break;
        if (dt_quantize((dt_quant)quant, (float *)(void *)memory, here * per_row,
                memory + values) != DT_OK) {
            dt_fail(ctx, DT_ERR_NUMERIC,
                "dt_weights_load(%s): a value is not finite, which %s cannot store", param->name,
                dt_quant_name((dt_quant)quant));
            break;
        }
        dt__move_now(ctx, (char *)param->data + dt_quant_bytes((dt_quant)quant, at * per_row),
            memory + values, dt_quant_bytes((dt_quant)quant, here * per_row));
    }
    dt_free(ctx, DT_MEM_HOST, memory, values + blocks);
    return ctx->status;
}

static dt_status dt__weights_copy_param(dt_weights *w, int writing, dt_tensor *param,
    int64_t columns, const dt_weight_part *parts, int n) {
    const char *func = writing ? "dt_weights_save" : "dt_weights_load";
    if (!w || w->ctx->status != DT_OK) return w ? w->ctx->status : DT_ERR_ARG;
    dt_ctx *ctx = w->ctx;
    if (!param)
        return dt_fail(ctx, DT_ERR_ARG, "%s('%s'): the parameter is NULL", func,
            n > 0 && parts && parts[0].name ? dt__printable_name(parts[0].name).s : "");
    if (!param->param || param->ctx != ctx || w->writing != writing)
        return dt_fail(ctx, DT_ERR_ARG,
            "%s(%s): a parameter of this context and a file open for %s are needed", func,
            param->name, writing ? "writing" : "reading");
    const dt_param_info *p = param->param;
    if (n > 0 && !parts)
        return dt_fail(ctx, DT_ERR_ARG, "%s(%s): its %d parts are NULL", func, param->name, n);
    for (int i = 0; i < p->full.nd && writing && !w->sink.put; i++)
        if (p->slice.n[i] != p->full.d[i])
            return dt_fail(ctx, DT_ERR_UNSUPPORTED,
                "%s(%s): it is sharded, %s of %s; save it from a single rank", func, param->name,
                dt__shape_text(param->shape).s, dt__shape_text(p->full).s);
    if (dt__ensure_storage(ctx) != DT_OK) return ctx->status;
    int gathered = !param->data;
    if (dt__ensure_values(NULL, param) != DT_OK) return ctx->status;
    if ((dt__quantises(w, param, parts, n)
                ? dt__quantised_load(w, param, columns, parts, n)
                : dt__weights_copy_parts(w, param, columns, parts, n)) != DT_OK)
        return ctx->status;
    dt__bucket_release(ctx, p->bucket, !writing, gathered);
    return DT_OK;
}

dt_status dt_weights_load(
    dt_weights *w, dt_tensor *param, int64_t columns, const dt_weight_part *parts, int n) {
    return dt__weights_copy_param(w, 0, param, columns, parts, n);
}

dt_status dt_weights_save(
    dt_weights *w, dt_tensor *param, int64_t columns, const dt_weight_part *parts, int n) {
    return dt__weights_copy_param(w, 1, param, columns, parts, n);
}

// ---- All parameters

/* Counts one difference, and appends it to the list if it is one of the first three. */
DT_PRINTF(3, 4)
static void dt__add_difference(dt__text *list, int *count, const char *format, ...) {
    char one[200];
    va_list args;
    va_start(args, format);
    vsnprintf(one, sizeof one, format, args);
    va_end(args);
    if (*count < 3) dt__put(list, "%s%s", *count ? ", " : "", one);
    if (*count == 3) dt__put(list, ", ..");
    ++*count;
}

typedef struct dt__load_all {
    dt_weights *w;
    dt_load_desc desc;
    char name[256];       /* of the parameter in hand, in the file */
    unsigned char *taken; /* tensor i of the file has a parameter */
} dt__load_all;

/* Sets a->name. Returns the index of the tensor in the file; -1 if the file has no tensor of this
   name; -2 if the parameter is left as it is. */
static int dt__load_index(dt__load_all *a, const dt_tensor *param) {
    snprintf(a->name, sizeof a->name, "%s", param->name);
    if (a->desc.rename && !a->desc.rename(a->desc.user, param->name, a->name, sizeof a->name))
        return -2;
    return dt_weights_find(a->w, a->name);
}

static int dt__weight_fits(const dt_weight *t, const dt_tensor *param) {
    if (dt__integer(t->dtype)) /* blocks of a quantised parameter */
        return param->param->desc.quant && t->dtype == DT_U8 &&
               t->count == dt_count(param->param->full);
    return t->readable && t->count == dt_count(dt__logical_param(param).full);
}

static void dt__load_compare(dt__load_all *a, dt_load_report *report) {
    static const char *const kinds[] = { "missing", "mismatched", "unexpected" };
    dt_ctx *ctx = a->w->ctx;
    int *const counts[] = { &report->missing, &report->mismatched, &report->unexpected };
    dt__text list[3], all = dt__format("%s", "");
    for (int k = 0; k < 3; k++) list[k] = all;
    for (int i = 0; i < ctx->n_params; i++) {
        const dt_tensor *param = ctx->params[i];
        int at = dt__load_index(a, param);
        const dt_weight *t = dt_weights_get(a->w, at);
        if (at == -1) dt__add_difference(&list[0], counts[0], "%s", dt__printable_name(a->name).s);
        if (!t) continue;
        a->taken[at] = 1;
        if (dt__weight_fits(t, param))
            report->loaded++;
        else
            dt__add_difference(&list[1], counts[1], "%.60s %.40s is %s %.40s in the file",
                param->name, dt__shape_text(param->param->full).s, t->type,
                dt__shape_text(t->shape).s);
    }
    for (int i = 0; i < a->w->weights && !ctx->has_stages; i++)
        if (!a->taken[i])
            dt__add_difference(
                &list[2], counts[2], "%s", dt__printable_name(a->w->weight[i].t.name).s);
    for (int k = 0; k < 3; k++)
        if (*counts[k])
            dt__put(&all, "%s%d %s: %.160s", all.s[0] ? "; " : "", *counts[k], kinds[k], list[k].s);
    snprintf(report->text, sizeof report->text, "%s", all.s);
}

dt_status dt_weights_load_all(dt_weights *w, dt_load_desc desc, dt_load_report *report) {
    dt_load_report own, *r = report ? report : &own;
    dt__load_all a;
    memset(r, 0, sizeof *r);
    if (!w || w->ctx->status != DT_OK) return w ? w->ctx->status : DT_ERR_ARG;
    dt_ctx *ctx = w->ctx;
    if (w->writing)
        return dt_fail(ctx, DT_ERR_ARG, "dt_weights_load_all(%s): it is open for writing", w->path);
    memset(&a, 0, sizeof a);
    a.w = w;
    a.desc = desc;
    a.taken = (unsigned char *)dt__host_zeroed(ctx, (size_t)w->weights + 1, "names of tensors");
    if (!a.taken) return ctx->status;
    dt__load_compare(&a, r);
    if (!desc.partial && r->missing + r->mismatched + r->unexpected > 0)
        dt_fail(ctx, DT_ERR_SHAPE, "dt_weights_load_all(%s): %s", w->path, r->text);
    for (int i = 0; i < ctx->n_params && ctx->status == DT_OK; i++) {
        int at = dt__load_index(&a, ctx->params[i]);
        const dt_weight *t = dt_weights_get(w, at);
        dt_weight_part part = { .name = a.name, .flat = 1 };
        if (t && dt__weight_fits(t, ctx->params[i]))
            dt_weights_load(w, ctx->params[i], 0, &part, 1);
    }
    dt_free(ctx, DT_MEM_HOST, a.taken, (size_t)w->weights + 1);
    return ctx->status;
}

// ---- Writing

dt_weights *dt_weights_create(dt_ctx *ctx, const char *path, dt_weights_desc desc) {
    int64_t end;
    dt_weights *w = dt__weights_new(ctx, path, 1);
    if (!w) return NULL;
    w->desc = desc;
    if (desc.llmc.version) dt__llmc_list_tensors(w, 0, &end);
    if (desc.shard_bytes &&
        (desc.shard_bytes < 0 || desc.llmc.version || !dt__ends_with(path, ".safetensors")))
        dt_fail(ctx, DT_ERR_ARG,
            "dt_weights_create(%s): shards of %lld bytes need a name ending in .safetensors", path,
            (long long)desc.shard_bytes);
    if (ctx->status == DT_OK) return w;
    dt__weights_destroy(w);
    return NULL;
}

int dt_weights_declare(dt_weights *w, const char *name, dt_dtype dtype, dt_shape shape) {
    dt__weight t;
    memset(&t, 0, sizeof t);
    if (!w || w->ctx->status != DT_OK) return -1;
    const char *reason = !w->writing            ? "the file is open for reading"
                         : w->layout_done       ? "elements have been written already"
                         : w->desc.llmc.version ? "the tensors of an llm.c model are given"
                         : !name                ? "a tensor needs a name"
                         : strcmp(name, "__metadata__") == 0 ? "the name is taken by the format"
                         : dt__utf8_first_invalid(name, strlen(name)) < strlen(name)
                             ? "the name is not UTF-8"
                         : dt_dtype_size(dtype) == 0 ? "there is no such type"
                                                     : dt__shape_problem(shape, 0);
    if (reason) {
        dt_fail(w->ctx, DT_ERR_ARG, "dt_weights_declare(%s): '%s' of type %s and shape %s: %s",
            w->path, name ? dt__printable_name(name).s : "", dt_dtype_name(dtype),
            dt__shape_text(shape).s, reason);
        return -1;
    }
    dt__weight_set_type(&t, dt__type_of(dtype));
    t.t.shape = shape;
    t.t.count = t.expected = dt_count(shape);
    t.bytes = t.t.count * (int64_t)dt_dtype_size(dtype);
    t.t.name = t.own_name = dt__concat_text(w->ctx, name, strlen(name), "");
    if (t.own_name && dt__weights_add_tensor(w, &t)) return w->weights - 1;
    dt__string_free(w->ctx, t.own_name);
    return -1;
}

/* Assigns the tensors to files, in the order in which they were declared, and names the files. */
static dt_status dt__safetensors_assign_files(dt_weights *w) {
    int64_t total = 0, size = 0, max_bytes = w->desc.shard_bytes;
    int f = 0;
    size_t stem = strlen(w->path) - (dt__ends_with(w->path, ".safetensors") ? 12 : 0);
    for (int i = 0; i < w->weights; i++)
        if (!dt__add_ok(total, w->weight[i].bytes, &total))
            return dt_fail(w->ctx, DT_ERR_ARG, "%s: the size of all tensors is no number", w->path);
    if (!max_bytes || total <= max_bytes) max_bytes = INT64_MAX;
    for (int i = 0; i < w->weights; i++) {
        if (size > 0 && w->weight[i].bytes > max_bytes - size) f++, size = 0;
        w->weight[i].file = f;
        size += w->weight[i].bytes;
    }
    for (int i = 0; i <= f && w->ctx->status == DT_OK; i++) {
        char number[48];
        snprintf(number, sizeof number, "-%05d-of-%05d.safetensors", i + 1, f + 1);
        dt__weights_add_file(w, max_bytes < INT64_MAX
                                    ? dt__concat_text(w->ctx, w->path, stem, number)
                                    : dt__concat_text(w->ctx, w->path, strlen(w->path), ""));
    }
    return w->ctx->status;
}

/* Creates file f under its temporary name and writes the file's header, of head_bytes bytes. */
static dt_status dt__weights_create_file(dt_weights *w, int f, int64_t head_bytes) {
    dt__weight_file *file = &w->file[f];
    dt__weights_close_file(w);
    if (!(file->temp = dt__temp_name(w->ctx, file->path))) return w->ctx->status;
    w->fd = dt__writer_create(&w->writer, file->temp, file->bytes);
    file->temp_exists = w->fd >= 0;
    w->open_file = w->fd >= 0 ? f : -1;
    dt__writer_write(&w->writer, file->temp, w->fd, file->header, head_bytes, 0);
    return dt__writer_check(w->ctx, &w->writer, NULL);
}

/* Makes the header of file f, with its tensors in the order of w->order, and sets their offsets.
   Creates the file unless the handle has a sink. */
static dt_status dt__safetensors_write_header(dt_weights *w, int f) {
    dt__weight_file *file = &w->file[f];
    dt_json_out out = { w->ctx, NULL, 0, 0 };
    int64_t at = 0;
    uint64_t n = 0;
    dt__json_write(&out, (const char *)&n, sizeof n); /* space for the header's length, set below */
    dt__json_write(&out, "{\"__metadata__\":{\"format\":\"pt\"}", 31);
    for (int i = 0; i < w->weights; i++) {
        dt__weight *t = &w->weight[w->order[i]];
        if (t->file != f) continue;
        dt_json_open(&out, t->t.name, '{');
        dt_json_put_string(&out, "dtype", t->t.type);
        dt_json_open(&out, "shape", '[');
        for (int k = 0; k < t->t.shape.nd; k++) dt_json_put_int(&out, NULL, t->t.shape.d[k]);
        dt_json_close(&out, ']');
        dt_json_open(&out, "data_offsets", '[');
        dt_json_put_int(&out, NULL, at);
        t->offset = at;
        dt_json_put_int(&out, NULL, at += t->bytes);
        dt_json_close(&out, ']');
        dt_json_close(&out, '}');
    }
    dt_json_close(&out, '}');
    while (out.used % 8 != 0 && w->ctx->status == DT_OK) dt__json_write(&out, " ", 1);
    n = out.used - 8;
    if (n > DT__JSON_BYTES && w->ctx->status == DT_OK)
        dt_fail(w->ctx, DT_ERR_ARG, "%s: a header of %zu bytes, at most %d", file->path, (size_t)n,
            DT__JSON_BYTES);
    if (out.text) memcpy(out.text, &n, sizeof n);
    file->header = out.text;
    file->header_bytes = out.capacity;
    file->bytes = (int64_t)out.used + at;
    for (int i = 0; i < w->weights; i++)
        if (w->weight[i].file == f) w->weight[i].offset += (int64_t)out.used;
    return w->ctx->status == DT_OK && !w->sink.put
               ? dt__weights_create_file(w, f, (int64_t)out.used)
               : w->ctx->status;
}

static dt_status dt__llmc_write_header(dt_weights *w) {
    int32_t magic = DT__LLMC_MAGIC;
    dt__weight_file *file =
        dt__weights_add_file(w, dt__concat_text(w->ctx, w->path, strlen(w->path), ""));
    if (!file ||
        !(file->header = (char *)dt__host_zeroed(w->ctx, DT__LLMC_HEADER_BYTES, "a header")))
        return w->ctx->status;
    memcpy(file->header, &magic, sizeof magic);
    memcpy(file->header + sizeof magic, &w->desc.llmc, sizeof w->desc.llmc);
    file->header_bytes = DT__LLMC_HEADER_BYTES;
    file->bytes = w->weight[15].offset + w->weight[15].bytes;
    return w->sink.put ? w->ctx->status : dt__weights_create_file(w, 0, DT__LLMC_HEADER_BYTES);
}

/* Fixes the layout at the first write: assigns the tensors to files, sets their offsets and writes
   the headers. Later calls do nothing. */
static dt_status dt__weights_layout(dt_weights *w) {
    if (w->layout_done || w->ctx->status != DT_OK || dt__weights_sort_names(w) != DT_OK)
        return w->ctx->status;
    if (w->desc.llmc.version) {
        dt__llmc_write_header(w);
    } else if (dt__safetensors_assign_files(w) == DT_OK &&
               dt__weights_sort(w, 0, dt__by_type) == DT_OK) {
        for (int f = 0; f < w->files && w->ctx->status == DT_OK; f++)
            dt__safetensors_write_header(w, f);
        dt__weights_sort_names(w);
    }
    w->layout_done = 1;
    return w->ctx->status;
}

static dt_status dt__index_write(dt_weights *w) {
    dt_json_out out = { w->ctx, NULL, 0, 0 };
    char *path = dt__concat_text(w->ctx, w->path, strlen(w->path), ".index.json");
    int64_t total = 0;
    for (int i = 0; i < w->weights; i++) total += w->weight[i].bytes;
    dt_json_open(&out, NULL, '{');
    dt_json_open(&out, "metadata", '{');
    dt_json_put_int(&out, "total_size", total);
    dt_json_close(&out, '}');
    dt_json_open(&out, "weight_map", '{');
    for (int i = 0; i < w->weights; i++) {
        const dt__weight *t = &w->weight[w->order[i]];
        dt_json_put_string(&out, t->t.name, dt__path_name(w->file[t->file].path));
    }
    dt_json_close(&out, '}');
    dt_json_close(&out, '}');
    if (path && dt_file_write(w->ctx, path, out.text, out.used) == DT_OK) {
        /* removes an older single file, which dt_weights_open would open instead of the shards */
        errno = 0;
        if (w->ctx->io.remove(w->ctx->io.user, w->path) != 0 && errno != 0 && errno != ENOENT)
            dt__io_fail(w->ctx, "%s: removing this file, which is older than its shards", w->path);
    }
    dt_json_out_free(&out);
    dt__string_free(w->ctx, path);
    return w->ctx->status;
}

/* Checks that all elements were written, then syncs and renames the files. */
static dt_status dt__weights_commit(dt_weights *w) {
    if (dt__weights_layout(w) != DT_OK) return w->ctx->status;
    for (int i = 0; i < w->weights; i++) {
        const dt__weight *t = &w->weight[i];
        if (t->written < t->expected)
            return dt_fail(w->ctx, DT_ERR_ARG,
                "dt_weights_close(%s): tensor '%s' has %lld of its %lld elements", w->path,
                dt__printable_name(t->t.name).s, (long long)t->written, (long long)t->expected);
    }
    dt__weights_close_file(w);
    for (int f = 0; f < w->files && w->ctx->status == DT_OK; f++) {
        dt__writer_rename(&w->writer, w->file[f].temp, w->file[f].path, DT__ANY_ERRNO);
        if (dt__writer_check(w->ctx, &w->writer, NULL) == DT_OK) w->file[f].temp_exists = 0;
    }
    int sharded = w->files && strcmp(w->file[0].path, w->path) != 0;
    return w->ctx->status == DT_OK && sharded ? dt__index_write(w) : w->ctx->status;
}

dt_status dt_weights_close(dt_weights *w) {
    if (!w) return DT_OK;
    dt_ctx *ctx = w->ctx;
    if (w->writing && !w->sink.put) dt__weights_commit(w);
    dt__weights_destroy(w);
    return ctx->status;
}

DT__COLD_END

// ==== 28. Arithmetic on the CPU =================================================================

/* Code that sections 29 to 33 share: elementary functions, block sizes and scratch sizes, and loops
   over strided arrays.

   Summation order. A result must not depend on the number of threads, nor on the compiler's choice
   of instructions. Therefore, in the rest of this file, the compiler must not contract a product
   and a sum to a fused multiply-add (fp-contract=off), and every sum has a fixed number of lanes.
   Fused multiply-adds are written out where they pay: in the micro-kernels of sections 29 and 31
   and in the elementary functions (DT__FMA). The plain instruction set has none, so its results may
   differ by roundings from those of the other sets. Outside the micro-kernels AVX2 and AVX-512 give
   the same bits. Each result is computed by one thread: the terms of a sum are never divided among
   threads. */

/* Turns off contraction. clang obeys the standard pragma; gcc ignores it and has the option
   fp-contract instead. no-trapping-math, which changes no value, lets gcc vectorize loops that
   contain a ? b : c. This is safe, because no code reads the exception flags. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#ifdef __CUDACC__
#pragma nv_diag_suppress 1675 /* nvcc does not know the next pragma, but passes it on to gcc */
#endif
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "no-trapping-math")
#endif

/* Instruction sets of the CPU, slowest first. The plain set, which has no special instructions, is
   always compiled. dt__best_isa chooses one set at run time. */
enum { DT__PLAIN = 0, DT__SIMD = 1 /* AVX2 with FMA, or NEON */, DT__AVX512 = 2, DT__ISAS = 3 };

#ifndef DT_NO_KERNELS
/* Vectors with the alignment of one element, because a vector may begin at any element. */
typedef float dt__float4 __attribute__((vector_size(16), may_alias, aligned(4)));
typedef double dt__double2 __attribute__((vector_size(16), may_alias, aligned(8)));
typedef float dt__word __attribute__((may_alias)); /* 4 bytes: a float, or a pair of bf16 */

/* Square roots of vectors for the plain instruction set. The compiler does not vectorize a loop
   over sqrtf, because sqrtf may set errno. */
static inline dt__float4 dt__sqrt4(dt__float4 v) {
#if defined(__SSE2__)
    return (dt__float4)_mm_sqrt_ps((__m128)v);
#else
    for (int i = 0; i < 4; i++) v[i] = sqrtf(v[i]);
    return v;
#endif
}

static inline dt__double2 dt__sqrt2(dt__double2 v) {
    for (int i = 0; i < 2; i++) v[i] = sqrt(v[i]);
    return v;
}

/* Converts two words of the counter-based RNG to a value in [0, 1) with 53 random bits. */
static double dt__uniform53(uint32_t high, uint32_t low) {
    return (double)(((uint64_t)high << 32 | low) >> 11) * (1.0 / 9007199254740992.0);
}

static void *dt__align64(void *p) { return (char *)p + (64 - ((uintptr_t)p & 63)) % 64; }
#endif /* DT_NO_KERNELS */

/* Requests n elements of an array ahead of their use; they need not exist. The processor prefetches
   by itself what is read in order. It does not prefetch the beginning of the next page or of the
   next row of a slice, nor loads with a mask, to which compilers turn a ? b : c in a loop. */
DT__INLINE void dt__prefetch(dt_dtype dtype, const void *array, int64_t at, int64_t n) {
    int64_t size = (int64_t)dt_dtype_size(dtype);
    uintptr_t p = (uintptr_t)array + (uintptr_t)(at * size);
    for (int64_t i = 0; i < n * size; i += 64) __builtin_prefetch((const void *)(p + (uintptr_t)i));
}

/* Makes the non-temporal stores of this thread visible to other threads before its next stores. The
   barrier at the end of an OpenMP loop does the same for the threads of the loop. */
static void dt__stream_fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* How DT__K(store) writes: 0 replaces the elements, 1 adds to them, DT__STREAM replaces them with
   non-temporal stores. A core's share of the last cache level rarely holds DT__STREAM_BYTES until
   the next op reads them; the tests define a small number. */
enum { DT__STREAM = -1 };
enum { DT__L2_BYTES = 512 << 10 }; /* an operand of this size stays in L2 between its uses */
#ifndef DT__STREAM_BYTES
#define DT__STREAM_BYTES ((size_t)8 << 20)
#endif
static int dt__store_mode(int accumulate, int64_t count, dt_dtype dtype) {
    size_t bytes = (size_t)count * dt_dtype_size(dtype);
    return accumulate ? 1 : bytes >= DT__STREAM_BYTES ? DT__STREAM : 0;
}

#ifdef DT_USE_CBLAS
#include <cblas.h>
#include <limits.h>
#endif

/* With DT_USE_OMP, matrix products, attention and elementwise kernels divide their results among
   OpenMP threads. The bits do not change. */
#ifdef DT_USE_OMP
#include <omp.h>
#define DT__PARALLEL _Pragma("omp parallel for schedule(static) num_threads(dt__omp_threads())")
static int dt__omp_threads(void) { return omp_in_parallel() ? 1 : omp_get_max_threads(); }
#else
#define DT__PARALLEL
static int dt__omp_threads(void) { return 1; }
#endif

#ifndef DT_NO_KERNELS
static int dt__omp_thread(void) {
#ifdef DT_USE_OMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Returns 1 if the processor multiplies pairs of bf16 (instruction vdpbf16ps) faster than floats,
   as AMD processors do. Intel processors have the instruction, but reach only half the rate of
   float: 86 against 172 GFLOP/s, measured on one core of the fifth Xeon generation. On Intel
   processors, packing widens bf16 to float instead. */
#if defined(__x86_64__)
static int dt__bf16_pairs_are_fast(void) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd");
}
#endif

/* AMX, the matrix unit of Intel processors since the fourth Xeon generation. It has eight tiles,
   registers of 16 rows of 64 bytes. One instruction (tdpbf16ps) adds the product of a tile of 16
   rows by 16 pairs of bf16 and a tile of 16 pairs by 16 columns to a tile of 16 x 16 floats. The
   operations below are the instructions. A test may define all of them, DT__AMX and
   dt__amx_is_ready itself, as an emulation; the rest of the product is then the same code. */
#if defined(DT_USE_AMX) && !defined(DT__AMX) && defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define DT__AMX __attribute__((target("amx-tile,amx-bf16"), noinline))
#define DT__TILE_CONFIGURE(config) _tile_loadconfig(config)
#define DT__TILE_RELEASE() _tile_release()
#define DT__TILE_ZERO(t) _tile_zero(t)
#define DT__TILE_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define DT__TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define DT__TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#define DT__AMX_DETECT
#endif

#ifdef DT__AMX
/* Returns 1 if AMX can be used: the operating system has enabled the tiles and their configuration
   (bits 17 and 18 of `xcr0`), and `ask`, which asks for the permission to use them, returns 0. */
static int dt__amx_is_usable(unsigned xcr0, long (*ask)(void)) {
    return (xcr0 >> 17 & 3) == 3 && ask() == 0;
}

#ifdef DT__AMX_DETECT
/* Linux reserves memory for the tiles of threads only if a process asks (ARCH_REQ_XCOMP_PERM, for
   state 18, XTILEDATA). Without permission, tile instructions raise SIGILL. The permission holds
   for all threads of the process and for the processes that it forks. */
static long dt__amx_ask(void) { return syscall(SYS_arch_prctl, 0x1023, 18); }

/* Every processor with tiles has tdpbf16ps and vdpbf16ps. Nothing is remembered between products:
   xgetbv and a permission held already cost less than cpuid, which virtual machines trap. */
static int dt__amx_is_ready(void) {
    unsigned xcr0, high;
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_is("intel")) return 0;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    return dt__amx_is_usable(xcr0, dt__amx_ask);
}
#endif

/* Gives all tiles of the calling thread 16 rows of 64 bytes. The configuration is constant: gcc
   does not know that the instruction reads all 64 bytes, and drops stores to a local one. */
DT__AMX static void dt__amx_begin(void) {
    static const struct {
        uint8_t palette, start_row, zero[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = { 1, 0, { 0 }, { 64, 64, 64, 64, 64, 64, 64, 64 },
        { 16, 16, 16, 16, 16, 16, 16, 16 } };
    DT__TILE_CONFIGURE(&config);
}

/* Ends the use of tiles, so that a context switch need not save them. */
DT__AMX static void dt__amx_end(void) { DT__TILE_RELEASE(); }

/* The micro-kernel of AMX. Computes c(32,32) += A(32,k) B(k,32) in tiles 0 to 3, with A in tiles 4
   and 5, B in 6 and 7. A step is 32 k indices: its part of A is 32 rows of 16 words, its part of B
   16 rows of 32 words. The first `whole` steps of B begin at `b`, one more may be at `last`. If
   `low` is 0, only the upper 16 rows of c are computed. The sums start at 0 if `fresh` is set. */
DT__AMX static void dt__amx_micro_kernel(int64_t steps, int64_t whole, const float *a,
    const float *b, const float *last, float *c, int low, int fresh) {
    /* gcc does not know that tile loads read memory: stores before them must be complete */
    __asm__ volatile("" ::: "memory");
    DT__TILE_ZERO(0);
    DT__TILE_ZERO(1);
    DT__TILE_ZERO(2);
    DT__TILE_ZERO(3);
    if (!fresh) {
        DT__TILE_LOAD(0, c, 128);
        DT__TILE_LOAD(1, c + 16, 128);
    }
    if (!fresh && low) {
        DT__TILE_LOAD(2, c + 16 * 32, 128);
        DT__TILE_LOAD(3, c + 16 * 32 + 16, 128);
    }
    for (int64_t s = 0; s < steps; s++, a += 32 * 16, b += 16 * 32) {
        if (s == whole) b = last;
        DT__TILE_LOAD(4, a, 64);
        DT__TILE_LOAD(6, b, 128);
        DT__TILE_LOAD(7, b + 16, 128);
        DT__TILE_DOT(0, 4, 6);
        DT__TILE_DOT(1, 4, 7);
        if (!low) continue;
        DT__TILE_LOAD(5, a + 16 * 16, 64);
        DT__TILE_DOT(2, 5, 6);
        DT__TILE_DOT(3, 5, 7);
    }
    DT__TILE_STORE(0, c, 128);
    DT__TILE_STORE(1, c + 16, 128);
    if (!low) return;
    DT__TILE_STORE(2, c + 16 * 32, 128);
    DT__TILE_STORE(3, c + 16 * 32 + 16, 128);
}
#endif
#endif /* DT_NO_KERNELS */

/* Block sizes of the matrix product (section 29). The block sizes decide which data stays in which
   cache and change no bit of the result. */
enum {
    DT__MAX_KC = 768, /* most steps of K in a block; a panel of A of 14 x 768 floats has 42 KB */
    DT__B_BLOCK_BYTES = 1152 << 10, /* size of a packed block of B in bytes */
    DT__A_PANELS = 8,               /* number of panels of A that are packed together */
    /* Most panels of rows in a block of C if K has several blocks. If K is one block, up to this
       many packed panels of A are kept and used for all blocks of columns. */
    DT__C_PANELS = 20,
    /* Most steps of K and columns in a block of a thin product, whose rows are one panel of A. If
       B is transposed, a panel of B stays in L1 until it is multiplied. Otherwise a block reads a
       few rows of B along their whole length, which the processor's prefetchers follow. */
    DT__THIN_KC_TRANSPOSED = 64,
    DT__THIN_KC = 32,
    DT__THIN_NC = 1024
};

#ifndef DT_NO_KERNELS
typedef struct dt__gemm_blocks {
    int64_t kc, nc;  /* steps of K and columns of B in a block */
    int64_t b_block; /* elements of B that are packed together */
    int64_t c_tiles; /* elements of the unfinished tiles of C */
} dt__gemm_blocks;

/* thin_kc is 0, or the most steps of K in a block of a thin product. A tile of C has at most `rows`
   rows. */
static dt__gemm_blocks dt__gemm_blocks_make(
    int64_t rows, int64_t n, int64_t steps, size_t size, int64_t thin_kc) {
    int64_t max_kc = thin_kc ? thin_kc : (int64_t)DT__MAX_KC, k_blocks = 1, n_blocks = 1;
    dt__gemm_blocks p = { steps > 1 ? steps : 1, (n + 31) / 32 * 32, 0, 14 * 32 };
    if (steps > max_kc) {
        k_blocks = (steps + max_kc - 1) / max_kc;
        p.kc = (steps + k_blocks - 1) / k_blocks;
    }
    int64_t max_nc =
        thin_kc ? (int64_t)DT__THIN_NC : DT__B_BLOCK_BYTES / (int64_t)size / p.kc / 32 * 32;
    if (n > max_nc) {
        n_blocks = (n + max_nc - 1) / max_nc;
        /* round up to a multiple of 32, the width of the widest tile */
        p.nc = ((n + n_blocks - 1) / n_blocks + 31) / 32 * 32;
    }
    p.b_block = p.kc * (thin_kc ? 32 : p.nc);
    if (k_blocks > 1) p.c_tiles = (thin_kc ? 1 : DT__C_PANELS) * rows * p.nc;
    return p;
}
#endif

/* Scratch memory for more elements than DT__MAX_WORK fits in no memory. For such sizes dt_row_work
   and dt_attention_work return SIZE_MAX. */
#define DT__MAX_WORK ((int64_t)1 << 48)

/* The scratch memory holds DT__C_PANELS panels of A, of at most 14 rows each, a block of B, and
   tiles of C. Packing writes up to two elements past a panel. The size grows with n and k, so
   scratch memory for the largest of several matrix products is enough for each of them. */
size_t dt_matmul_work(int64_t n, int64_t k, dt_dtype dtype) {
    size_t size = dt__real_size(dtype), nc, kc, elements,
           block = size == 8 ? DT__B_BLOCK_BYTES / 8 : DT__B_BLOCK_BYTES / 4;
    if (n < 0 || k < 0) return 0;
    nc = ((size_t)n + 31) / 32 * 32 + 32;
    kc = k < 1 ? 1 : k < DT__MAX_KC ? (size_t)k : (size_t)DT__MAX_KC;
    elements =
        (nc < block && nc * kc < block ? nc * kc : block) + kc * DT__C_PANELS * 14 + 14 * 32 + 2;
    if (k > DT__MAX_KC) /* blocks of K then have at least DT__MAX_KC / 2 steps, so nc is limited */
        elements += DT__C_PANELS * 14 * (nc < 2 * block / DT__MAX_KC ? nc : 2 * block / DT__MAX_KC);
    return (elements * size + 127) / 64 * 64 * (size_t)dt__omp_threads();
}

/* The scratch memory holds six rows in the compute type: widened rows and sums over rows. */
size_t dt_row_work(int64_t cols, dt_dtype dtype) {
    if (cols < 0 || cols > DT__MAX_WORK) return cols < 0 ? 0 : (size_t)-1;
    return 6 * (size_t)cols * dt__real_size(dtype) + 64;
}

/* The maximum number of columns of a tile. */
enum { DT__LANES = 32 };

/* The size of a block of queries and of a tile of keys in attention (section 31). The borders
   decide the order of the sums. A tile of keys is read again for every block of queries, from
   strided rows that the L2 cache may no longer hold. Many queries in a block make this rare. */
enum { DT__QUERY_BLOCK = 256, DT__KEY_TILE = 64 };
/* The elements between two rows of an array whose columns are the queries of a block. Rows a power
   of 2 apart would share few sets of the L1 cache and evict each other. */
enum { DT__LANE_ROW = DT__QUERY_BLOCK + 16 };
/* The most queries of a block that are computed one by one: faster than a block if most lanes would
   be empty. */
enum { DT__FEW_QUERIES = 4 };

/* The scratch memory holds the arrays of the struct attention_work of section 31: 9 arrays for a
   block and a tile, p and ds rounded to bf16, and the gradients of tk keys and values. */
size_t dt_attention_work(int64_t tk, int64_t dim, dt_dtype dtype) {
    if (tk < 0 || dim < 0) return 0;
    if (tk > DT__MAX_WORK || dim > DT__MAX_WORK || tk + 1024 > DT__MAX_WORK / (dim + DT__LANES))
        return (size_t)-1;
    size_t keys = (size_t)(tk + 15) / 16 * 16,
           wide = (size_t)(dim + DT__LANES - 1) / DT__LANES * DT__LANES;
    size_t scores = DT__KEY_TILE * DT__LANE_ROW,
           tiles = (2 * DT__KEY_TILE + 2 * DT__QUERY_BLOCK + 3 * DT__LANE_ROW) * wide + 2 * scores;
    if (dtype == DT_BF16) tiles += 3 * scores / 2;
    return ((tiles + 2 * keys * wide) * dt__real_size(dtype) + 127) / 64 * 64 *
           (size_t)dt__omp_threads();
}

/* Strip mining: kernels process this many elements at a time, in buffers on the stack. */
#define DT__STRIP 512
/* A transpose copies tiles of DT__TILE columns and DT__TILE_ROWS rows of the result. Memory is fast
   only in long pieces: a tile is read in columns of DT__TILE_ROWS elements, prefetched while the
   previous tile is written in rows of DT__TILE elements. */
#define DT__TILE 32
#define DT__TILE_ROWS 256

/* Iterates over an array of any shape in strips: at most DT__STRIP elements along the last
   dimension. */
typedef struct dt__strips {
    dt_shape shape;
    /* the indices of the current strip's first element, the offset of this element in a dense
       array, and the number of elements in the strip */
    int64_t at[DT_MAX_DIMS], out, n;
    int done;
} dt__strips;

static dt__strips dt__strips_begin(dt_shape shape) {
    dt__strips r;
    memset(&r, 0, sizeof r);
    if (shape.nd == 0) shape.d[shape.nd++] = 1;
    r.shape = shape;
    r.done = dt_count(shape) == 0;
    return r;
}

/* Returns the offset of the current strip in an array with these strides. */
static int64_t dt__strips_offset(const dt__strips *r, const int64_t *stride) {
    int64_t offset = 0;
    for (int i = 0; i < r->shape.nd; i++) offset += r->at[i] * stride[i];
    return offset;
}

/* Advances to the next strip and returns 1, or returns 0 after the last strip. *a and *b receive
   the strip's offsets in two arrays, whose strides are stride_a and stride_b. */
static int dt__strips_next(
    dt__strips *r, const int64_t *stride_a, const int64_t *stride_b, int64_t *a, int64_t *b) {
    int last = r->shape.nd - 1, i = last;
    r->out += r->n;
    r->at[last] += r->n;
    while (r->n && i > 0 && r->at[i] == r->shape.d[i]) {
        r->at[i--] = 0;
        r->at[i]++;
    }
    if (r->done || (r->n && r->at[0] == r->shape.d[0])) return 0;
    int64_t left = r->shape.d[last] - r->at[last];
    r->n = left < DT__STRIP ? left : DT__STRIP;
    *a = dt__strips_offset(r, stride_a);
    *b = dt__strips_offset(r, stride_b);
    return 1;
}

/* Returns the element of an i64 array as a double. Beyond 2^53 a double does not represent every
   integer: the result is then rounded to odd in 43 bits or more, so that a second rounding, to f32
   or 16 bits, rounds correctly. */
static double dt__i64_to_odd(int64_t x) {
    int is_exact = x >= -((int64_t)1 << 53) && x <= (int64_t)1 << 53;
    return (double)(is_exact ? x : (x & ~(int64_t)2047) | (x & 2047 ? 2048 : 0));
}

/* Converts each element to double, which represents every value of the other types except i64, and
   then to the output's type. */
static dt_status dt__cast_any(const dt_cast_args *a) {
    double x[DT__STRIP];
    if (dt_dtype_size(a->dtype) == 0 || dt_dtype_size(a->from) == 0 ||
        (a->accumulate && dt__integer(a->dtype)))
        return DT_ERR_UNSUPPORTED;
    for (size_t at = 0; at < a->count; at += DT__STRIP) {
        size_t n = a->count - at < DT__STRIP ? a->count - at : DT__STRIP;
        if (a->from == DT_I64 && a->dtype != DT_F64)
            for (size_t i = 0; i < n; i++) x[i] = dt__i64_to_odd(((const int64_t *)a->in)[at + i]);
        else
            for (size_t i = 0; i < n; i++) x[i] = dt__number(a->from, a->in, at + i);
        if (a->accumulate)
            for (size_t i = 0; i < n; i++) x[i] += dt__number(a->dtype, a->out, at + i);
        for (size_t i = 0; i < n; i++) dt__set_number(a->dtype, a->out, at + i, x[i]);
    }
    return DT_OK;
}

/* Returns the same copy with its dimensions in the order of the output, without dimensions of size
   1, and with neighbours merged that are dense in both arrays. So strips are long, and a transpose
   writes along its last dimension. */
static dt_permute_args dt__permute_ordered(dt_permute_args a) {
    dt_permute_args to = a;
    int n = 0;
    for (int i = 0; i < a.shape.nd; i++) {
        int at = n++;
        if (a.shape.d[i] == 1) {
            n--;
            continue;
        }
        for (; at > 0 && to.out_stride[at - 1] < a.out_stride[i]; at--) {
            to.shape.d[at] = to.shape.d[at - 1];
            to.in_stride[at] = to.in_stride[at - 1];
            to.out_stride[at] = to.out_stride[at - 1];
        }
        to.shape.d[at] = a.shape.d[i];
        to.in_stride[at] = a.in_stride[i];
        to.out_stride[at] = a.out_stride[i];
    }
    to.shape.nd = n > 0 ? 1 : 0;
    for (int i = 1; i < n; i++) {
        int last = to.shape.nd - 1;
        int64_t d = to.shape.d[i];
        int merge = to.in_stride[last] == to.in_stride[i] * d &&
                    to.out_stride[last] == to.out_stride[i] * d;
        last = merge ? last : to.shape.nd++;
        to.shape.d[last] = merge ? to.shape.d[last] * d : d;
        to.in_stride[last] = to.in_stride[i];
        to.out_stride[last] = to.out_stride[i];
    }
    if (n == 0) to.shape = DT_SHAPE(1), to.in_stride[0] = to.out_stride[0] = 1;
    return to;
}

/* The kernels of one compute type and one instruction set. */
typedef struct dt__variant {
#define DT__VARIANT_ENTRY(k) dt_status (*k)(const dt_##k##_args *a);
    DT__VARIANT_KERNELS(DT__VARIANT_ENTRY)
#undef DT__VARIANT_ENTRY
} dt__variant;

#ifdef __cplusplus
}
#endif

DT__CPP_WARNINGS_ON
#endif /* DT_TENSOR_IMPL */

#ifdef DT__BITS
/* Section 34 includes this part of the file once for every compute type and instruction set.
   DT__BITS selects the compute type (32 for float, 64 for double, 1 for int32_t, 2 for int64_t, 3
   for uint8_t) and DT__ISA the instruction set. DT__FLOATS is 0 for the integer types, and with
   DT_NO_KERNELS for all types: then only the kernels that communication needs are compiled.
   DT__K(name) appends the type and the instruction set to a name. DT__FN begins every function. The
   loops are plain C that the compiler vectorizes. Intrinsics are used only in the
   micro-kernel of the matrix product, transpositions, square roots and non-temporal stores. */
/* Unrolls the loop that follows, of at most 32 iterations, whose index selects registers. Compilers
   other than gcc do so by themselves. DT__INDEPENDENT promises that no iteration of the loop that
   follows reads what another one writes; gcc then compiles no copy for arrays that overlap. */
#if defined(__GNUC__) && !defined(__clang__)
#define DT__UNROLL _Pragma("GCC unroll 32")
#define DT__INDEPENDENT _Pragma("GCC ivdep")
#else
#define DT__UNROLL
#define DT__INDEPENDENT
#endif
#define DT__JOIN2(name, suffix) dt__##name##suffix
#define DT__JOIN(name, suffix) DT__JOIN2(name, suffix)
#define DT__K(name) DT__JOIN(name, DT__SUFFIX)

#if DT__BITS == 32
#define DT__REAL float
#define DT__WIDE float
#define DT__ABS(x) __builtin_fabsf(x)
#define DT__COPYSIGN(x, sign) __builtin_copysignf(x, sign)
#define DT__EXP(x) DT__K(exp)(x)
#define DT__EXP_DOWN(x) DT__K(exp_down)(x)
#define DT__LOG(x) DT__K(log)(x)
#define DT__LOG1P(x) DT__K(log1p)(x)
#define DT__POW(x, y) powf(x, y)
#define DT__TANH(x) DT__K(tanh)(x)
#define DT__GEMM cblas_sgemm
#elif DT__BITS == 64
#define DT__REAL double
#define DT__WIDE double
#define DT__ABS(x) __builtin_fabs(x)
#define DT__COPYSIGN(x, sign) __builtin_copysign(x, sign)
#define DT__EXP(x) exp(x)
#define DT__EXP_DOWN(x) exp(x)
#define DT__LOG(x) log(x)
#define DT__LOG1P(x) log1p(x)
#define DT__POW(x, y) pow(x, y)
#define DT__TANH(x) tanh(x)
#define DT__GEMM cblas_dgemm
#elif DT__BITS == 1
#define DT__REAL int32_t
#define DT__WIDE int64_t
#define DT__SUFFIX _i32
#elif DT__BITS == 2
#define DT__REAL int64_t
#define DT__WIDE uint64_t /* wraps around without undefined behaviour */
#define DT__SUFFIX _i64
#else
#define DT__REAL uint8_t
#define DT__WIDE uint32_t
#define DT__SUFFIX _u8
#endif
#if DT__BITS >= 32 && !defined(DT_NO_KERNELS)
#define DT__FLOATS 1
#else
#define DT__FLOATS 0
#endif
/* The groups of kernels that this pass compiles: see section 34. */
#if DT__BITS != 64 || DT__ISA == 0
#define DT__VECTORS 1
#define DT__VECTOR(name) DT__K(name)
#else
#define DT__VECTORS 0
#define DT__VECTOR(name) DT__JOIN(name, _f64_plain)
#endif
#define DT__SCALARS (DT__ISA == 0)
#if DT__BITS == 32
#define DT__SCALAR(name) DT__JOIN(name, _f32_plain)
#else
#define DT__SCALAR(name) DT__JOIN(name, _f64_plain)
#endif

/* A fused multiply-add of floats, if the instruction set has one: a b + c, rounded once. */
#if DT__ISA == 0
#define DT__FMA(a, b, c) ((a) * (b) + (c))
#else
#define DT__FMA(a, b, c) __builtin_fmaf(a, b, c)
#endif

/* A tile of the matrix product has DT__MR rows of two vectors each (DT__NR columns). A tile of
   attention has DT__ATTENTION_MR rows. The sums of a tile must fit in the vector registers: 14 rows
   x 2 vectors in 32 registers with AVX-512, 6 x 2 in 16 with AVX2, 8 x 2 in 32 with NEON, 4 x 2 in
   16 with the 16-byte vectors of the plain instruction set. */
#if DT__BITS < 32
#define DT__FN static
#elif DT__ISA == 2 /* AVX-512 */
#define DT__FN static __attribute__((target("avx512f")))
#define DT__MR 14
#define DT__MATMUL_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define DT__ATTENTION_MR 8
#define DT__ATTENTION_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define DT__SUFFIX _f32_avx512
#define DT__V __m512
#define DT__ZERO _mm512_setzero_ps()
#define DT__LOAD(p) _mm512_loadu_ps(p)
#define DT__STORE(p, v) _mm512_storeu_ps(p, v)
#define DT__FMADD(x, v, sum) _mm512_fmadd_ps(_mm512_set1_ps(x), v, sum)
#define DT__SQRT(v) _mm512_maskz_sqrt_ps(0xffff, v) /* gcc 12 warns about _mm512_sqrt_ps in C++ */
#elif DT__ISA == 1 && defined(__x86_64__)           /* AVX2 and FMA */
#define DT__FN static __attribute__((target("avx2,fma")))
#define DT__MR 6
#define DT__MATMUL_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define DT__ATTENTION_MR 4
#define DT__ATTENTION_ROWS(X) X(0) X(1) X(2) X(3)
#if DT__BITS == 32
#define DT__SUFFIX _f32_avx2
#define DT__V __m256
#define DT__ZERO _mm256_setzero_ps()
#define DT__LOAD(p) _mm256_loadu_ps(p)
#define DT__STORE(p, v) _mm256_storeu_ps(p, v)
#define DT__FMADD(x, v, sum) _mm256_fmadd_ps(_mm256_set1_ps(x), v, sum)
#define DT__SQRT(v) _mm256_sqrt_ps(v)
#else
#define DT__SUFFIX _f64_avx2
#define DT__V __m256d
#define DT__ZERO _mm256_setzero_pd()
#define DT__LOAD(p) _mm256_loadu_pd(p)
#define DT__STORE(p, v) _mm256_storeu_pd(p, v)
#define DT__FMADD(x, v, sum) _mm256_fmadd_pd(_mm256_set1_pd(x), v, sum)
#define DT__SQRT(v) _mm256_sqrt_pd(v)
#endif
#elif DT__ISA == 1 /* NEON */
#define DT__FN static
#define DT__MR 8
#define DT__MATMUL_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define DT__ATTENTION_MR 8
#define DT__ATTENTION_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#if DT__BITS == 32
#define DT__SUFFIX _f32_neon
#define DT__V float32x4_t
#define DT__ZERO vdupq_n_f32(0)
#define DT__LOAD(p) vld1q_f32(p)
#define DT__STORE(p, v) vst1q_f32(p, v)
#define DT__FMADD(x, v, sum) vfmaq_n_f32(sum, v, x)
#define DT__SQRT(v) vsqrtq_f32(v)
#else
#define DT__SUFFIX _f64_neon
#define DT__V float64x2_t
#define DT__ZERO vdupq_n_f64(0)
#define DT__LOAD(p) vld1q_f64(p)
#define DT__STORE(p, v) vst1q_f64(p, v)
#define DT__FMADD(x, v, sum) vfmaq_n_f64(sum, v, x)
#define DT__SQRT(v) vsqrtq_f64(v)
#endif
#else /* plain: vectors of 16 bytes; DT__FMADD is a product and a sum instead of an FMA */
#define DT__FN static
#define DT__MR 4
#define DT__MATMUL_ROWS(X) X(0) X(1) X(2) X(3)
#define DT__ATTENTION_MR 4
#define DT__ATTENTION_ROWS(X) X(0) X(1) X(2) X(3)
#if DT__BITS == 32
#define DT__SUFFIX _f32_plain
#define DT__V dt__float4
#define DT__SQRT(v) dt__sqrt4(v)
#else
#define DT__SUFFIX _f64_plain
#define DT__V dt__double2
#define DT__SQRT(v) dt__sqrt2(v)
#endif
#define DT__ZERO \
    (DT__V) { 0 }
#define DT__LOAD(p) (*(const DT__V *)(p))
#define DT__STORE(p, v) (*(DT__V *)(p) = (v))
#define DT__FMADD(x, v, sum) ((sum) + (x) * (v))
#endif
/* a function for the bodies of loops, which the compiler vectorizes */
#define DT__FN_INLINE DT__FN inline __attribute__((always_inline))

#if DT__FLOATS
#define DT__NV ((int64_t)(sizeof(DT__V) / sizeof(DT__REAL))) /* elements per vector */
#define DT__NR (2 * DT__NV)                                  /* columns per tile */
/* DT__MR rounded up to a multiple of DT__NV; this adds at most two */
#define DT__MR_ROUNDED ((DT__MR + DT__NV - 1) / DT__NV * DT__NV)
#endif

/* gcc compiles the kernels with the vectorizer and the cheap optimizations of -O1, whatever the
   program's -O is. The other optimizations of -O2 and -O3 make the kernels hardly faster, but twice
   as long to compile and twice as large. With expensive-optimizations gcc clears the upper halves
   of the vector registers before it returns (vzeroupper); SSE code would be slow after a kernel
   that leaves data there. The plain kernels of x86-64 and AArch64 are compiled like cold code:
   nearly all of these processors have the wider vectors. */
#if defined(__OPTIMIZE__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && \
    (DT__ISA > 0 || !(defined(__x86_64__) || defined(__aarch64__)))
#pragma GCC push_options
#pragma GCC optimize("O1", "tree-vectorize", "vect-cost-model=dynamic", "expensive-optimizations")
#pragma GCC optimize("no-thread-jumps")
#else
DT__COLD_BEGIN
#endif

/* ---- elementary functions ---- */

#if DT__FLOATS
/* Returns x between -most and most; NaN for NaN. */
DT__FN_INLINE DT__REAL DT__K(within)(DT__REAL x, DT__REAL most) {
    DT__REAL size = DT__ABS(x);
    return DT__COPYSIGN(size > most ? most : size, x);
}

/* Returns condition ? a : b, and reads both: gcc compiles a load under a condition to a branch, or
   to a masked load through a stack slot, which waits for the vector before. */
DT__FN_INLINE DT__REAL DT__K(select)(int condition, DT__REAL a, DT__REAL b) {
    return condition ? a : b;
}
#endif

#if DT__BITS == 32 && DT__FLOATS
/* The functions have no branches, so that loops over them are vectorized. Long polynomials are
   split into parts whose chains of dependent operations are short: the processor then overlaps more
   elements.

   All exponentials share this reduction: write x = n ln 2 + r with an integer n and |r| <= ln 2 /
   2; then e^x = 2^n e^r = 2^n + 2^n d with d = e^r - 1, the result. Adding 1.5 * 2^23 to x / ln 2
   rounds it to the integer n and leaves n in the low bits. d is r + r^2 times a polynomial, which
   is fitted to a relative error of 3e-9 in e^r. */
DT__FN_INLINE float DT__K(exp_reduced)(float x, uint32_t *n) {
    const float magic = 12582912.0f;
    float shifted = DT__FMA(x, 1.44269504f, magic), rounded = shifted - magic;
    /* ln 2 is the sum of two constants, and the product of n and the first constant is exact */
    float r = DT__FMA(rounded, -0.693359375f, x);
    r = DT__FMA(rounded, 2.12194440e-4f, r);
    float z = r * r, p = DT__FMA(8.3687152874e-3f, r, 4.1668387890e-2f);
    p = DT__FMA(1.3814602071e-3f, z, p);
    p = DT__FMA(p, z, DT__FMA(1.6666520645e-1f, r, 4.9999993449e-1f));
    memcpy(n, &shifted, 4);
    *n -= 0x4b400000u; /* the bits of magic */
    return DT__FMA(p, z, r);
}

/* Returns 2^n for -127 <= n <= 127; 0 in place of 2^-127. */
DT__FN_INLINE float DT__K(power_of_2)(uint32_t n) {
    uint32_t bits = (n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
}

/* Returns e^x, within 1.1 ulp. Multiplies by 2^n in two steps, so that results below 2^-126 become
   denormal and results that are too large become infinite. */
DT__FN_INLINE float DT__K(exp)(float x) {
    uint32_t n, half;
    /* e^-105 rounds to 0 and e^105 to infinity */
    float d = DT__K(exp_reduced)(DT__K(within)(x, 105.0f), &n), power;
    half = ((n + 256) >> 1) - 128; /* n + 256 is positive */
    power = DT__K(power_of_2)(half);
    return DT__FMA(d, power, power) * DT__K(power_of_2)(n - half);
}

/* Returns e^x, within 1.1 ulp, for x <= 0 and for the positive x that roundings leave of 0; NaN for
   NaN. Results below 2^-126.5 are 0. */
DT__FN_INLINE float DT__K(exp_down)(float x) {
    uint32_t n;
    float d = DT__K(exp_reduced)(x < -88.0f ? -88.0f : x, &n), power = DT__K(power_of_2)(n);
    return DT__FMA(d, power, power);
}

/* Returns ln x, within 1 ulp: ln x = e ln 2 + ln m, where x = 2^e m and m is in [sqrt(1/2),
   sqrt 2). */
DT__FN_INLINE float DT__K(log)(float x) {
    float normal = x < 1.17549435e-38f ? x * 8388608.0f : x, m;
    uint32_t bits, m_bits;
    memcpy(&bits, &normal, 4);
    bits -= 0x3f3504f3u; /* the bits of sqrt(1/2) */
    m_bits = (bits & 0x7fffffu) + 0x3f3504f3u;
    memcpy(&m, &m_bits, 4);
    float e = (float)((int32_t)bits >> 23) - (x < 1.17549435e-38f ? 23.0f : 0.0f), f = m - 1.0f,
          z = f * f;
    float p = DT__FMA(7.0376836292e-2f, z, 1.1676998740e-1f), q = -1.1514610310e-1f;
    p = DT__FMA(p, z, 1.4249322787e-1f);
    p = DT__FMA(p, z, 2.0000714765e-1f);
    p = DT__FMA(p, z, 3.3333331174e-1f);
    q = DT__FMA(q, z, -1.2420140846e-1f);
    q = DT__FMA(q, z, -1.6668057665e-1f);
    q = DT__FMA(q, z, -2.4999993993e-1f);
    p = DT__FMA(q, f, p);
    p = DT__FMA(-0.5f, z, DT__FMA(f * z, p, -2.12194440e-4f * e)) + f;
    p = DT__FMA(0.693359375f, e, p);
    p = x > 3.40282347e38f ? x : p; /* ln of infinity is infinity */
    return x > 0.0f ? p : x == 0.0f ? -INFINITY : NAN;
}

/* Returns ln(1 + x) for 0 <= x <= 1, within 2 ulp: twice the inverse hyperbolic tangent of
   s = x / (2 + x), a polynomial in s^2, which is fitted to a relative error of 5e-9. */
DT__FN_INLINE float DT__K(log1p)(float x) {
    float s = x / (2.0f + x), z = s * s;
    float p =
        DT__FMA(DT__FMA(0.14012398f, z, 0.13999534f), z * z, DT__FMA(0.20010851f, z, 0.33333206f));
    s += s;
    return DT__FMA(s * z, p, s);
}

/* Returns tanh x: -d / (2 + d), where d = e^(-2|x|) - 1 = 2^n (e^r - 1) + (2^n - 1) does not cancel
   if x is near 0. */
DT__FN_INLINE float DT__K(tanh)(float x) {
    uint32_t n;
    float y = -2.0f * __builtin_fabsf(x), d = DT__K(exp_reduced)(y < -60.0f ? -60.0f : y, &n),
          power = DT__K(power_of_2)(n);
    d = DT__FMA(d, power, power - 1.0f);
    return __builtin_copysignf(d / (2.0f + d), x);
}

/* Returns the standard normal distribution function of x, where `bell` is e^(-x^2/2). The lower
   tail, divided by `bell`, is a quotient of polynomials in |x|, which is fitted to a relative error
   of 5e-9 for |x| <= 13.5; beyond, `bell` is 0. */
DT__FN_INLINE float DT__K(phi)(float x, float bell) {
    float size = __builtin_fabsf(x), u = size > 13.5f ? 13.5f : size;
    float p = DT__FMA(4.0370040e-3f, u, 4.0098092e-2f), q = DT__FMA(1.0119129e-2f, u, 0.10051822f);
    p = DT__FMA(p, u, 0.18164591f);
    q = DT__FMA(q, u, 0.46527545f);
    p = DT__FMA(p, u, 0.43614634f);
    q = DT__FMA(q, u, 1.1958965f);
    p = DT__FMA(p, u, 0.5f);
    q = DT__FMA(q, u, 1.6701776f);
    float tail = p / DT__FMA(q, u, 1.0f) * bell;
    return x < 0 ? tail : 1.0f - tail;
}
#elif DT__FLOATS && DT__VECTORS
DT__FN_INLINE double DT__K(phi)(double x, double bell) {
    (void)bell;
    return 0.5 * erfc(-0.7071067811865476 * x);
}
#endif

/* ---- loading and storing ---- */

#if DT__BITS == 32
#if DT__ISA == 2 /* dt__bf16_to_f32 and dt__f32_to_bf16 of 16 elements; masked: gcc 12 warns else */
DT__FN_INLINE __m512 DT__K(widen16)(const uint16_t *in) {
    __m512i x =
        _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i *)(const void *)in));
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, x, 16));
}

DT__FN_INLINE void DT__K(narrow16)(uint16_t *out, __m512 x) {
    __m512i u = _mm512_castps_si512(x), high = _mm512_maskz_srli_epi32(0xffff, u, 16),
            odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    u = _mm512_maskz_srli_epi32(0xffff, u, 16);
    u = _mm512_mask_or_epi32(
        u, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)(void *)out, _mm512_maskz_cvtepi32_epi16(0xffff, u));
}
#endif

DT__FN void DT__K(widen)(dt_dtype dtype, const uint16_t *in, int64_t n, DT__REAL *out) {
    int64_t i = 0;
#if DT__ISA == 2
    for (; dtype == DT_BF16 && i + 16 <= n; i += 16) DT__STORE(out + i, DT__K(widen16)(in + i));
#endif
    if (dtype == DT_BF16)
        for (; i < n; i++) out[i] = dt__bf16_to_f32(in[i]);
    else
        for (; i < n; i++) out[i] = dt__f16_to_f32(in[i]);
}

DT__FN void DT__K(narrow)(dt_dtype dtype, uint16_t *out, int64_t n, const DT__REAL *in) {
    int64_t i = 0;
#if DT__ISA == 2
    for (; dtype == DT_BF16 && i + 16 <= n; i += 16) DT__K(narrow16)(out + i, DT__LOAD(in + i));
#endif
    if (dtype == DT_BF16)
        for (; i < n; i++) out[i] = dt__f32_to_bf16(in[i]);
    else
        for (; i < n; i++) out[i] = dt__f32_to_f16(in[i]);
}
#endif

/* Returns the n elements at `at` in the compute type: a pointer into the array if its elements have
   this type, otherwise `buf`, filled with the widened elements. */
DT__FN const DT__REAL *DT__K(load)(
    dt_dtype dtype, const void *array, int64_t at, int64_t n, DT__REAL *buf) {
#if DT__BITS == 32
    if (dt__narrow(dtype)) {
        DT__K(widen)(dtype, (const uint16_t *)array + at, n, buf);
        return buf;
    }
#endif
    (void)dtype, (void)n, (void)buf;
    return (const DT__REAL *)array + at;
}

#if DT__VECTORS
/* Like load, for n <= DT__STRIP elements that are `stride` apart. */
DT__FN const DT__REAL *DT__K(load_strided)(
    dt_dtype dtype, const void *array, int64_t at, int64_t stride, int64_t n, DT__REAL *buf) {
    if (stride == 1) return DT__K(load)(dtype, array, at, n, buf);
#if DT__BITS == 32
    if (dt__narrow(dtype)) {
        uint16_t in[DT__STRIP];
        for (int64_t i = 0; i < n; i++) in[i] = ((const uint16_t *)array)[at + i * stride];
        DT__K(widen)(dtype, in, n, buf);
        return buf;
    }
#endif
    const DT__REAL *x = (const DT__REAL *)array + at;
    DT__REAL first = *x; /* repeated if stride is 0 */
    if (stride == 0)
        for (int64_t i = 0; i < n; i++) buf[i] = first;
    else
        for (int64_t i = 0; i < n; i++) buf[i] = x[i * stride];
    return buf;
}
#endif

/* Copies with non-temporal stores: they neither read the destination into the cache, as an ordinary
   store does, nor evict anything from it. They are fast only if they fill whole cache lines.
   dt__stream_fence must follow before another thread learns about the data. */
DT__FN_INLINE void DT__K(stream_copy)(void *to, const void *from, size_t bytes) {
    char *dst = (char *)to;
    const char *src = (const char *)from;
    size_t at = 0;
#if DT__ISA == 2 || defined(__SSE2__)
    at = (64 - (uintptr_t)dst % 64) % 64;
    at = at < bytes ? at : bytes;
    if (at > 0) memcpy(dst, src, at); /* a call takes as long as the stores of short rows */
    for (; at + 64 <= bytes; at += 64)
#if DT__ISA == 2
        _mm512_stream_si512((__m512i *)(void *)(dst + at), _mm512_loadu_si512(src + at));
#else
        for (size_t i = at; i < at + 64; i += 16)
            _mm_stream_si128(
                (__m128i *)(void *)(dst + i), _mm_loadu_si128((const __m128i *)(src + i)));
#endif
#endif
    if (at < bytes) memcpy(dst + at, src + at, bytes - at);
}

#if DT__FLOATS && DT__VECTORS
/* Returns where to compute results that `store` gets next: in the array itself, if they are stored
   there as they are, otherwise in buf. */
DT__FN DT__REAL *DT__K(results)(dt_dtype dtype, void *array, int64_t at, DT__REAL *buf, int mode) {
    int direct = array && mode == 0 && dt_dtype_size(dtype) == sizeof(DT__REAL);
    return direct ? (DT__REAL *)array + at : buf;
}
#endif

/* Stores the n finished results of `row` in the array, beginning at element `at`; `mode` is that of
   dt__store_mode. Rounds each element once. Does nothing if `array` is NULL. */
DT__FN void DT__K(store)(
    dt_dtype dtype, void *array, int64_t at, int64_t n, const DT__REAL *row, int mode) {
    if (!array) return;
#if DT__BITS == 32
    if (dt__narrow(dtype)) {
        DT__REAL sum[DT__STRIP];
        uint16_t rounded[DT__STRIP];
        for (int64_t j = 0; j < n; j += DT__STRIP) {
            int64_t have = n - j < DT__STRIP ? n - j : DT__STRIP;
            uint16_t *out = (uint16_t *)array + at + j;
            if (mode > 0) DT__K(widen)(dtype, out, have, sum);
            if (mode > 0)
                for (int64_t i = 0; i < have; i++) sum[i] += row[j + i];
            DT__K(narrow)
            (dtype, mode == DT__STREAM ? rounded : out, have, mode > 0 ? sum : row + j);
            if (mode == DT__STREAM) DT__K(stream_copy)(out, rounded, (size_t)have * sizeof *out);
        }
        return;
    }
#elif DT__BITS == 64
    if (dt__narrow(dtype)) { /* used for the 16-bit copy of a parameter of type double */
        for (int64_t i = 0; i < n; i++) dt__set_number(dtype, array, (size_t)(at + i), row[i]);
        return;
    }
#endif
    DT__REAL *out = (DT__REAL *)array + at;
    (void)dtype;
    if (mode > 0)
        for (int64_t i = 0; i < n; i++) out[i] = (DT__REAL)((DT__WIDE)out[i] + (DT__WIDE)row[i]);
    else if (mode == DT__STREAM)
        DT__K(stream_copy)(out, row, (size_t)n * sizeof *out);
    else if (out != row)
        memcpy(out, row, (size_t)n * sizeof *out);
}

#if DT__VECTORS
/* load and store for rows so short that a call takes as long as the copy. Unlike `store`,
   store_short needs an array. */
DT__FN_INLINE const DT__REAL *DT__K(load_short)(
    dt_dtype dtype, const void *array, int64_t at, int64_t n, DT__REAL *buf) {
    return dt__narrow(dtype) ? DT__K(load)(dtype, array, at, n, buf) : (const DT__REAL *)array + at;
}

DT__FN_INLINE void DT__K(store_short)(
    dt_dtype dtype, void *array, int64_t at, int64_t n, const DT__REAL *row, int mode) {
    if (mode == DT__STREAM && !dt__narrow(dtype))
        DT__K(stream_copy)((DT__REAL *)array + at, row, (size_t)n * sizeof *row);
    else
        DT__K(store)(dtype, array, at, n, row, mode);
}
#endif

/* `transpose` copies DT__TRANSPOSE rows of n words to columns of a panel. It may write a row of the
   panel past the panel's width; the next row overwrites the excess. */
#if DT__ISA == 2
#define DT__TRANSPOSE 16
/* masked forms, because gcc 12 warns about the unmasked forms in C++ */
#define DT__LOW(x, y) _mm512_maskz_unpacklo_ps(0xffff, x, y)
#define DT__HIGH(x, y) _mm512_maskz_unpackhi_ps(0xffff, x, y)
#define DT__LOW2(x, y) \
    _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xff, _mm512_castps_pd(x), _mm512_castps_pd(y)))
#define DT__HIGH2(x, y) \
    _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xff, _mm512_castps_pd(x), _mm512_castps_pd(y)))
#define DT__EVEN(x, y) _mm512_maskz_shuffle_f32x4(0xffff, x, y, 0x88)
#define DT__ODD(x, y) _mm512_maskz_shuffle_f32x4(0xffff, x, y, 0xdd)
#define DT__ROW_PIECES(x, y) \
    _mm512_castpd_ps(_mm512_mask_broadcast_f64x4( \
        _mm512_castpd256_pd512(_mm256_loadu_pd((const double *)(const void *)(x))), 0xf0, \
        _mm256_loadu_pd((const double *)(const void *)(y))))
/* Transposes 16 x 16 words, 8 words of each row at a time. The loads place pieces of two rows in
   one vector. Then three steps interleave the words of pairs of vectors, the pairs of words, and
   whole quarters of vectors. */
DT__FN inline __attribute__((always_inline)) void DT__K(transpose_words)(
    __m512 *to, const DT__REAL *const *row, int64_t p) {
    __m512 r[8], t[8];
    DT__UNROLL
    for (int h = 0; h < 16; h += 8, p += 8) {
        DT__UNROLL
        for (int i = 0; i < 8; i++) {
            int at = i + i / 4 * 4; /* rows 0 to 3 with 4 to 7, rows 8 to 11 with 12 to 15 */
            r[i] = DT__ROW_PIECES(row[at] + p, row[at + 4] + p);
        }
        DT__UNROLL
        for (int i = 0; i < 8; i += 2) {
            t[i] = DT__LOW(r[i], r[i + 1]);
            t[i + 1] = DT__HIGH(r[i], r[i + 1]);
        }
        DT__UNROLL
        for (int i = 0; i < 8; i += 4) {
            r[i] = DT__LOW2(t[i], t[i + 2]);
            r[i + 1] = DT__HIGH2(t[i], t[i + 2]);
            r[i + 2] = DT__LOW2(t[i + 1], t[i + 3]);
            r[i + 3] = DT__HIGH2(t[i + 1], t[i + 3]);
        }
        DT__UNROLL
        for (int c = 0; c < 4; c++) {
            to[h + c] = DT__EVEN(r[c], r[4 + c]);
            to[h + 4 + c] = DT__ODD(r[c], r[4 + c]);
        }
    }
}

DT__FN void DT__K(transpose_block)(
    DT__REAL *panel, int64_t width, const DT__REAL *const *row, int64_t p) {
    __m512 t[16];
    /* rows are far apart in memory: the processor's own prefetchers follow too few of them */
    DT__UNROLL
    for (int i = 0; i < 16; i++) __builtin_prefetch(row[i] + p + 32);
    DT__K(transpose_words)(t, row, p);
    DT__UNROLL
    for (int i = 0; i < 16; i++) _mm512_storeu_ps(panel + (p + i) * width, t[i]);
}
#undef DT__LOW
#undef DT__HIGH
#undef DT__LOW2
#undef DT__HIGH2
#undef DT__EVEN
#undef DT__ODD
#undef DT__ROW_PIECES
#else
#define DT__TRANSPOSE 4
DT__FN void DT__K(transpose_block)(
    DT__REAL *panel, int64_t width, const DT__REAL *const *row, int64_t p) {
#if DT__BITS == 32 && defined(__SSE2__)
    __m128 v0 = _mm_loadu_ps(row[0] + p), v1 = _mm_loadu_ps(row[1] + p),
           v2 = _mm_loadu_ps(row[2] + p);
    __m128 v3 = _mm_loadu_ps(row[3] + p);
    _MM_TRANSPOSE4_PS(v0, v1, v2, v3);
    _mm_storeu_ps(panel + p * width, v0);
    _mm_storeu_ps(panel + (p + 1) * width, v1);
    _mm_storeu_ps(panel + (p + 2) * width, v2);
    _mm_storeu_ps(panel + (p + 3) * width, v3);
#else
    for (int64_t i = p; i < p + 4; i++)
        for (int l = 0; l < 4; l++) panel[i * width + l] = row[l][i];
#endif
}
#endif

DT__FN void DT__K(transpose)(
    DT__REAL *panel, int64_t width, const DT__REAL *const *row, int64_t n) {
    int64_t full = n - n % DT__TRANSPOSE;
    for (int64_t p = 0; p < full; p += DT__TRANSPOSE) DT__K(transpose_block)(panel, width, row, p);
    for (int64_t p = full; p < n; p++)
        for (int l = 0; l < DT__TRANSPOSE; l++) panel[p * width + l] = row[l][p];
}

#if DT__FLOATS && DT__VECTORS

/* ---- activations ---- */

/* The activations f(x) and their slopes are functions of x and e = e^-|u|, which cannot become
   infinite. A first loop computes e for all elements, a second one the results: the chains of
   dependent operations in a loop are then so short that the processor overlaps several vectors. */

/* Returns 1 / (1 + e^-u). */
DT__FN_INLINE DT__REAL DT__K(logistic)(DT__REAL u, DT__REAL e) { return (u < 0 ? e : 1) / (1 + e); }

/* Returns the derivative of the logistic function, s (1 - s). */
DT__FN_INLINE DT__REAL DT__K(logistic_slope)(DT__REAL e) { return e / ((1 + e) * (1 + e)); }

/* Returns s = 1 / (1 + e^-u), the factor of a gated function x s, and the function's slope
   s + x s (1 - s) u'. u has the sign of x. s (1 - s) is computed from e, because the difference
   1 - s has too few digits where s is close to 1. An infinite x times zero would be NaN, so
   callers limit x to a size at which s is exactly 0 or 1 in f32. */
DT__FN_INLINE DT__REAL DT__K(gated)(DT__REAL x, DT__REAL e, DT__REAL du, DT__REAL *slope) {
    DT__REAL inverse = 1 / (1 + e), s = (x < 0 ? e : 1) * inverse;
    *slope = DT__FMA(x * du, e * inverse * inverse, s);
    return s;
}

/* Computes y = sqrt(x), with vector instructions. y may be x. */
DT__FN void DT__K(square_roots)(const DT__REAL *x, int64_t n, DT__REAL *y) {
    DT__REAL rest[sizeof(DT__V) / sizeof(DT__REAL)] = { 0 };
    int64_t i = 0;
    for (; i + DT__NV <= n; i += DT__NV) DT__STORE(y + i, DT__SQRT(DT__LOAD(x + i)));
    memcpy(rest, x + i, (size_t)(n - i) * sizeof *rest);
    DT__STORE(rest, DT__SQRT(DT__LOAD(rest)));
    memcpy(y + i, rest, (size_t)(n - i) * sizeof *rest);
}

/* One case of a switch over functions: computes out[i] = value for each i < n. */
#define DT__EACH(function, out, value) \
    case function: \
        DT__INDEPENDENT \
        for (int64_t i = 0; i < n; i++) (out)[i] = (value); \
        break
/* The same for functions of x and e = e^-|u| (exp_minus_abs), with the x and e of its function. */
#define DT__EACH_WITH_EXP(function, out, value) \
    case function: \
        DT__K(exp_minus_abs)(act, x, n, e); \
        DT__INDEPENDENT \
        for (int64_t i = 0; i < n; i++) (out)[i] = (value); \
        break

/* Computes y = x^e. A square, the usual case, needs no call of the C library. y may be x. */
DT__FN void DT__K(powers)(const DT__REAL *x, int64_t n, DT__REAL e, DT__REAL *y) {
    if (e == 2)
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * x[i];
    else if (e == 1)
        memmove(y, x, (size_t)n * sizeof *y);
    else
        for (int64_t i = 0; i < n; i++) y[i] = DT__POW(x[i], e);
}

/* Computes dx = d e x^(e - 1). dx may be d. */
DT__FN void DT__K(powers_back)(
    const DT__REAL *x, const DT__REAL *d, int64_t n, DT__REAL *dx, DT__REAL e) {
    if (e == 2)
        for (int64_t i = 0; i < n; i++) dx[i] = d[i] * (2 * x[i]);
    else
        for (int64_t i = 0; i < n; i++)
            dx[i] = e == 0 ? 0 : d[i] * (e * (e == 1 ? 1 : DT__POW(x[i], e - 1)));
}

/* The tanh form of GELU is 0.5 x (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), which is
   x s(2u): no cancellation where tanh u is near -1. DT__GELU_2U is 2u and DT__GELU_2DU its
   derivative. */
#define DT__GELU_A ((DT__REAL)1.5957691216057308) /* 2 sqrt(2/pi) */
#define DT__GELU_B ((DT__REAL)0.07135481627260025)
#define DT__GELU_2U(x) ((x)*DT__FMA(DT__GELU_B, (x) * (x), DT__GELU_A))
#define DT__GELU_2DU(x) DT__FMA(3 * DT__GELU_B, (x) * (x), DT__GELU_A)

/* Computes e = e^-|u| for n <= DT__STRIP elements. u is x for SiLU, sigmoid and softplus, 2x for
   tanh, the doubled argument of the tanh for GELU, and x^2 / 2 for the erf form of GELU. e must not
   overlap x. */
DT__FN void DT__K(exp_minus_abs)(int act, const DT__REAL *x, int64_t n, DT__REAL *e) {
    switch (act) {
        DT__EACH(DT_ACT_GELU, e, -DT__ABS(DT__GELU_2U(x[i])));
        DT__EACH(DT_ACT_GELU_ERF, e, (DT__REAL)-0.5 * x[i] * x[i]);
        DT__EACH(DT_ACT_TANH, e, -2 * DT__ABS(x[i]));
    default:
        for (int64_t i = 0; i < n; i++) e[i] = -DT__ABS(x[i]);
        break;
    }
    for (int64_t i = 0; i < n; i++) e[i] = DT__EXP_DOWN(e[i]);
}

/* Computes y = f(x), where f is the activation `act`, for n <= DT__STRIP. y may be x. */
DT__FN void DT__K(act)(
    int act, const DT__REAL *x, int64_t n, DT__REAL *y, DT__REAL scale, DT__REAL shift) {
    DT__REAL e[DT__STRIP];
    switch (act) {
    case DT_ACT_GELU: /* the same formula as SiLU with another u */
        DT__EACH_WITH_EXP(DT_ACT_SILU, y, x[i] * DT__K(logistic)(x[i], e[i]));
        DT__EACH_WITH_EXP(DT_ACT_GELU_ERF, y, x[i] * DT__K(phi)(x[i], e[i]));
        DT__EACH(DT_ACT_RELU, y, x[i] < 0 ? 0 : x[i]);
        DT__EACH(DT_ACT_TANH, y, DT__TANH(x[i]));
        DT__EACH(DT_ACT_EXP, y, DT__EXP(x[i]));
        DT__EACH(DT_ACT_LN, y, DT__LOG(x[i]));
        DT__EACH_WITH_EXP(DT_ACT_SIGMOID, y, DT__K(logistic)(x[i], e[i]));
        DT__EACH_WITH_EXP(DT_ACT_SOFTPLUS, y, (x[i] > 0 ? x[i] : 0) + DT__LOG1P(e[i]));
        DT__EACH(DT_ACT_ABS, y, x[i] < 0 ? -x[i] : x[i] + 0); /* -0 + 0 is 0 */
        DT__EACH(DT_ACT_AFFINE, y, scale * x[i] + shift);
        DT__EACH(DT_ACT_CLAMP, y, x[i] < scale ? scale : x[i] > shift ? shift : x[i]);
    case DT_ACT_POW: DT__K(powers)(x, n, scale, y); break;
    case DT_ACT_SQRT: DT__K(square_roots)(x, n, y); break;
    default:
        if (y != x) memcpy(y, x, (size_t)n * sizeof *y);
        break;
    }
}

DT__FN_INLINE DT__REAL DT__K(gated_slope)(int act, DT__REAL x, DT__REAL e) {
    DT__REAL slope;
    x = DT__K(within)(x, act == DT_ACT_SILU ? 88 : 30);
    DT__K(gated)(x, e, act == DT_ACT_SILU ? 1 : DT__GELU_2DU(x), &slope);
    return slope;
}

/* Returns the derivative of the erf form of GELU: the normal distribution function of x plus x
   times the normal density. */
DT__FN_INLINE DT__REAL DT__K(gelu_erf_slope)(DT__REAL x, DT__REAL e) {
    x = DT__K(within)(x, 30);
    return DT__FMA(x * (DT__REAL)0.3989422804014327, e, DT__K(phi)(x, e));
}

DT__FN void DT__K(sqrt_back)(const DT__REAL *x, const DT__REAL *d, int64_t n, DT__REAL *dx) {
    DT__REAL root[DT__LANES];
    for (int64_t at = 0; at < n; at += DT__LANES) {
        int64_t have = n - at < DT__LANES ? n - at : (int64_t)DT__LANES;
        DT__K(square_roots)(x + at, have, root);
        for (int64_t i = 0; i < have; i++) dx[at + i] = d[at + i] / (2 * root[i]);
    }
}

/* Computes dx = d f'(x), where f is the activation `act`, for n <= DT__STRIP. dx may be d. Where
   the derivative is 0, dx is 0, also if d is infinite. The derivative of tanh x is 4 times that of
   the logistic function at 2x. */
DT__FN void DT__K(act_back)(int act, const DT__REAL *x, const DT__REAL *d, int64_t n, DT__REAL *dx,
    DT__REAL scale, DT__REAL shift) {
    DT__REAL e[DT__STRIP];
    switch (act) {
        DT__EACH_WITH_EXP(DT_ACT_GELU, dx, d[i] * DT__K(gated_slope)(DT_ACT_GELU, x[i], e[i]));
        DT__EACH_WITH_EXP(DT_ACT_GELU_ERF, dx, d[i] * DT__K(gelu_erf_slope)(x[i], e[i]));
        DT__EACH_WITH_EXP(DT_ACT_SILU, dx, d[i] * DT__K(gated_slope)(DT_ACT_SILU, x[i], e[i]));
        DT__EACH(DT_ACT_RELU, dx, DT__K(select)(x[i] > 0, d[i], 0));
        DT__EACH_WITH_EXP(DT_ACT_TANH, dx, d[i] * (4 * DT__K(logistic_slope)(e[i])));
        DT__EACH(DT_ACT_EXP, dx, d[i] * DT__EXP(x[i]));
        DT__EACH(DT_ACT_LN, dx, d[i] / x[i]);
        DT__EACH_WITH_EXP(DT_ACT_SIGMOID, dx, d[i] * DT__K(logistic_slope)(e[i]));
        DT__EACH_WITH_EXP(DT_ACT_SOFTPLUS, dx, d[i] * DT__K(logistic)(x[i], e[i]));
        DT__EACH(DT_ACT_ABS, dx, DT__K(select)(x[i] > 0, d[i], x[i] < 0 ? -d[i] : 0));
        DT__EACH(DT_ACT_AFFINE, dx, d[i] * scale);
        DT__EACH(DT_ACT_CLAMP, dx, DT__K(select)((x[i] > scale) & (x[i] < shift), d[i], 0));
    case DT_ACT_POW: DT__K(powers_back)(x, d, n, dx, scale); break;
    case DT_ACT_SQRT: DT__K(sqrt_back)(x, d, n, dx); break;
    default:
        if (dx != d) memcpy(dx, d, (size_t)n * sizeof *dx);
        break;
    }
}
#endif /* vector kernels */

#if DT__FLOATS

// ==== 29. Matrix product on the CPU =============================================================

/* GEMM: C = A B. The naive product (matmul_naive) computes each element as a dot product over K, as
   in the definition, and reads all of B from memory for every row of A. The fast product
   (matmul_packed) follows Goto and van de Geijn, doi:10.1145/1356052.1356053: it packs blocks so
   that each stays in one cache level, and a micro-kernel computes a tile of C in registers.

                                 nc columns
                               +----+----+----+
                               |    | NR |    |  kc     B: one kc x nc block, in panels of NR
                               +----+----+----+            columns; stays in L2
                kc
            +---------+        +----+----+----+
         MR |         |        |    |tile|    |  MR     C: a tile of MR x NR sums in registers
            +---------+        +----+----+----+
       A: panels of MR rows; the current panel stays in L1, which is assumed to have 48 KB

       packing       panel[p] = the MR elements of A (or NR of B) of step p, contiguous in memory
       micro-kernel  for p < kc:  tile(MR,NR) += A panel[p]^T B panel[p]
       epilogue      bias, activation, residual, accumulate: once, while the tile is in cache

   Every element of C is one chain of K multiply-adds in ascending order of k, whatever the block
   sizes are, so the block sizes change no bit. */

/* Loads the n elements from element `at` on to a row of a tile, or adds them to the row. */
DT__FN_INLINE void DT__K(load_tile_row)(
    dt_dtype dtype, const void *array, int64_t at, int64_t n, DT__REAL *row, int add) {
    DT__REAL buf[DT__LANES];
#if DT__BITS == 32 && DT__ISA == 2
    const uint16_t *half = (const uint16_t *)array + at;
    for (int64_t j = 0; j < n && n == DT__NR && dtype == DT_BF16; j += DT__NV) {
        DT__V x = DT__K(widen16)(half + j);
        if (add) x += DT__LOAD(row + j);
        DT__STORE(row + j, x);
    }
    if (n == DT__NR && dtype == DT_BF16) return;
#endif
    const DT__REAL *x = DT__K(load)(dtype, array, at, n, buf);
    for (int64_t j = 0; j < n; j++) row[j] = add ? x[j] + row[j] : x[j];
}

/* Stores a row of a tile from element `at` on. */
DT__FN_INLINE void DT__K(store_tile_row)(
    dt_dtype dtype, void *array, int64_t at, int64_t n, const DT__REAL *row) {
#if DT__BITS == 32 && DT__ISA == 2
    uint16_t *half = (uint16_t *)array + at;
    for (int64_t j = 0; j < n && n == DT__NR && dtype == DT_BF16; j += DT__NV)
        DT__K(narrow16)(half + j, DT__LOAD(row + j));
    if (n == DT__NR && dtype == DT_BF16) return;
#endif
    DT__REAL *out = (DT__REAL *)array + at;
    if (dt__narrow(dtype))
        DT__K(store)(dtype, array, at, n, row, 0);
    else
        for (int64_t j = 0; j < n && out != row; j++) out[j] = row[j];
}

/* Epilogue. Applies bias, activation (or its backward), residual and accumulation to rows x cols
   finished sums, and stores the results in C from element `at`, which lies in column j0. Overwrites
   the tile. All matrix products use this epilogue. The activation runs once over all rows of the
   tile, including the padding between rows: if there are several rows, they are DT__NR elements
   apart. The function is inlined twice: with the constant width of a full tile, and with a variable
   width. */
DT__FN_INLINE void DT__K(epilogue_rows)(const dt_matmul_args *a, int64_t at, int64_t j0,
    int64_t rows, int64_t cols, DT__REAL *tile, int64_t ld) {
    DT__REAL pre_activation[DT__MR * DT__NR];
    dt_dtype to = dt__wide(a->dtype, a->wide);
    int64_t all = (rows - 1) * ld + cols;
    if (a->activation_backward && cols < DT__NR) memset(pre_activation, 0, sizeof pre_activation);
    for (int64_t i = 0; i < rows; i++) {
        DT__REAL *t = tile + i * ld, *x = pre_activation + i * DT__NR;
        int64_t from = at + i * a->ldc;
        if (a->bias) DT__K(load_tile_row)(a->dtype, a->bias, j0, cols, t, 1);
        if (a->activation_backward)
            DT__K(load_tile_row)(a->dtype, a->pre_activation, from, cols, x, 0);
        else if (a->pre_activation)
            DT__K(store_tile_row)(a->dtype, a->pre_activation, from, cols, t);
    }
    if (a->activation_backward)
        DT__VECTOR(act_back)(a->activation, pre_activation, tile, all, tile, 1, 0);
    else if (a->activation)
        DT__VECTOR(act)(a->activation, tile, all, tile, 1, 0);
    for (int64_t i = 0; i < rows; i++, at += a->ldc) {
        DT__REAL *t = tile + i * ld;
        if (a->residual) DT__K(load_tile_row)(a->dtype, a->residual, at, cols, t, 1);
        if (a->accumulate) DT__K(load_tile_row)(to, a->c, at, cols, t, 1);
        DT__K(store_tile_row)(to, a->c, at, cols, t);
    }
}

/* Runs the epilogue for the tile at row i0, column j0 of one matrix of the batch. Does nothing
   if the tile lies in C itself and no fusion is set. A tile never lies in a C of 16-bit elements,
   whose addresses must not be compared: in elements of the compute type they reach past C, to the
   scratch memory. */
DT__FN void DT__K(matmul_epilogue)(const dt_matmul_args *a, int64_t batch, int64_t i0, int64_t j0,
    int64_t rows, int64_t cols, DT__REAL *tile, int64_t ld) {
    int64_t at = batch * a->stride_c + i0 * a->ldc + j0;
    int in_place = !dt__narrow(dt__wide(a->dtype, a->wide)) && tile == (DT__REAL *)a->c + at;
    if (in_place && !a->bias && !a->pre_activation && !a->activation && !a->residual) return;
    if (cols == DT__NR)
        DT__K(epilogue_rows)(a, at, j0, rows, DT__NR, tile, ld);
    else
        DT__K(epilogue_rows)(a, at, j0, rows, cols, tile, ld);
}

/* Prefetches a tile, rows x cols elements from element `at` on, of an array with C's layout. */
DT__FN_INLINE void DT__K(prefetch_tile)(const dt_matmul_args *a, const void *array, int64_t size,
    int64_t at, int64_t rows, int64_t cols) {
    const char *from = (const char *)array + at * size;
    for (int64_t i = 0; i < rows; i++, from += a->ldc * size)
        for (int64_t j = 0; j < cols * size; j += 64) __builtin_prefetch(from + j);
}

/* Prefetches the arrays of a tile's epilogue before the tile is computed: those that it reads, and
   of those that it writes C, if it adds to C, and the pre-activations, because its stores would
   otherwise wait for them. */
DT__FN void DT__K(prefetch_epilogue)(
    const dt_matmul_args *a, int64_t batch, int64_t i0, int64_t j0, int64_t rows, int64_t cols) {
    int64_t at = batch * a->stride_c + i0 * a->ldc + j0, size = (int64_t)dt_dtype_size(a->dtype);
    if (a->pre_activation) DT__K(prefetch_tile)(a, a->pre_activation, size, at, rows, cols);
    if (a->residual) DT__K(prefetch_tile)(a, a->residual, size, at, rows, cols);
    if (!a->residual && !a->accumulate) return;
    size = (int64_t)dt_dtype_size(dt__wide(a->dtype, a->wide));
    DT__K(prefetch_tile)(a, a->c, size, at, rows, cols);
}

/* Like load, for operand B: if `quant` is not 0, `array` has blocks of this format. load_operand
   converts only the n elements that the product reads next. */
DT__FN const DT__REAL *DT__K(load_operand)(
    dt_dtype dtype, int quant, const void *array, int64_t at, int64_t n, DT__REAL *buf) {
    if (!quant) return DT__K(load)(dtype, array, at, n, buf);
#if DT__BITS == 32
    dt__dequantize(quant, array, at, n, buf);
#else
    float values[DT__QUANT_BLOCK];
    for (int64_t i = 0, have; i < n; i += have) {
        have = n - i < DT__QUANT_BLOCK ? n - i : DT__QUANT_BLOCK;
        dt__dequantize(quant, array, at + i, have, values);
        for (int64_t k = 0; k < have; k++) buf[i + k] = (DT__REAL)values[k];
    }
#endif
    return buf;
}

/* The naive product: computes every element as a dot product over K, in ascending order of k. */
DT__FN void DT__K(matmul_naive)(const dt_matmul_args *a, int64_t batch) {
    for (int64_t i = 0; i < a->m; i++) {
        for (int64_t j = 0; j < a->n; j++) {
            DT__REAL sum = 0, x, y;
            for (int64_t p = 0; p < a->k; p++) {
                int64_t at_a = batch * a->stride_a + (a->trans_a ? p * a->lda + i : i * a->lda + p);
                int64_t at_b = batch * a->stride_b + (a->trans_b ? j * a->ldb + p : p * a->ldb + j);
                sum += *DT__K(load)(a->dtype, a->a, at_a, 1, &x) *
                       *DT__K(load_operand)(a->dtype, a->b_quant, a->b, at_b, 1, &y);
            }
            DT__K(matmul_epilogue)(a, batch, i, j, 1, 1, &sum, 1);
        }
    }
}

/* Micro-kernel. Computes tile(R,NR) += A(R,k) B(k,NR): each of the k steps adds an outer product.
   Element i of step p of A is a[i * row + p * step], and rows of B are ldb elements apart, so that
   panels and operands in their place are read alike. Rows of the tile are `ld` elements apart. The
   2 x R vectors of sums stay in registers; the sums start at zero if `fresh` is set, else at the
   tile's values. The tile's second vector has `lanes` columns. Every element is one chain of
   multiply-adds, in the order of the steps. */
typedef void (*DT__K(micro_kernel))(int64_t k, const DT__REAL *a, int64_t row, int64_t step,
    const DT__REAL *b, int64_t ldb, DT__REAL *tile, int64_t ld, int fresh, int lanes);
typedef void (*DT__K(panel_kernel))(int64_t k, const DT__REAL *a, const DT__REAL *b, DT__REAL *tile,
    int64_t ld, int fresh, const char *prefetch, int64_t prefetch_stride);
typedef void (*DT__K(columns_kernel))(
    const DT__REAL *a, const char *b, int64_t ldb, int64_t cols, int64_t bytes, DT__REAL *tile);
typedef void (*DT__K(row_kernel))(int64_t terms, const DT__REAL *a, int64_t step, const void *from,
    int64_t ldb, DT__REAL *tile, int fresh);
typedef void (*DT__K(outer_kernel))(DT__REAL a, const DT__REAL *b, int64_t n, DT__REAL *row);
#define DT__ROWS_1(X) X(0)
#define DT__ROWS_2(X) DT__ROWS_1(X) X(1)
#define DT__ROWS_4(X) DT__ROWS_2(X) X(2) X(3)
#define DT__ROWS_8(X) DT__ROWS_4(X) X(4) X(5) X(6) X(7)
#if DT__ISA == 2
#define DT__LANES_MASK __mmask16 mask = (__mmask16)((1u << lanes) - 1)
#if DT__BITS == 32
#define DT__LOAD_LANES(p) _mm512_maskz_loadu_ps(mask, p)
#define DT__STORE_LANES(p, v) _mm512_mask_storeu_ps(p, mask, v)
#else
#define DT__LOAD_LANES(p) _mm512_maskz_loadu_pd((__mmask8)mask, p)
#define DT__STORE_LANES(p, v) _mm512_mask_storeu_pd(p, (__mmask8)mask, v)
#endif
#else
#define DT__LANES_MASK (void)lanes
#define DT__LOAD_LANES(p) DT__LOAD(p)
#define DT__STORE_LANES(p, v) DT__STORE(p, v)
#endif
#define DT__MICRO_ZERO(i) DT__V c##i##_0 = DT__ZERO, c##i##_1 = DT__ZERO;
#define DT__MICRO_START(i) \
    DT__V c##i##_0 = fresh ? DT__ZERO : DT__LOAD(tile + i * ld), \
          c##i##_1 = fresh ? DT__ZERO : DT__LOAD_LANES(tile + i * ld + DT__NV);
#define DT__MICRO_STEP(i) \
    c##i##_0 = DT__FMADD(a[i * row], b0, c##i##_0); \
    c##i##_1 = DT__FMADD(a[i * row], b1, c##i##_1);
#define DT__MICRO_STORE(i) \
    DT__STORE(tile + i * ld, c##i##_0); \
    DT__STORE(tile + i * ld + DT__NV, c##i##_1);
#define DT__MICRO_LAST(i) \
    DT__STORE(tile + i * ld, c##i##_0); \
    DT__STORE_LANES(tile + i * ld + DT__NV, c##i##_1);
#define DT__MICRO_KERNEL(name, ROWS, STEP) \
    DT__FN void DT__K(name)(int64_t k, const DT__REAL *a, int64_t row, int64_t step, \
        const DT__REAL *b, int64_t ldb, DT__REAL *tile, int64_t ld, int fresh, int lanes) { \
        DT__LANES_MASK; \
        (void)row; \
        ROWS(DT__MICRO_START) \
        for (int64_t p = 0; p < k; p++, a += step, b += ldb) { \
            DT__V b0 = DT__LOAD(b), b1 = DT__LOAD_LANES(b + DT__NV); \
            ROWS(STEP) \
        } \
        ROWS(DT__MICRO_LAST) \
    }

/* The micro-kernel for a tile of one vector of columns at the right edge of C. */
#define DT__EDGE_ZERO(i) DT__V c##i = fresh ? DT__ZERO : DT__LOAD_LANES(tile + i * ld);
#define DT__EDGE_STEP(i) c##i = DT__FMADD(a[i * row], b0, c##i);
#define DT__EDGE_STORE(i) DT__STORE_LANES(tile + i * ld, c##i);
#define DT__EDGE_KERNEL(name, ROWS, STEP) \
    DT__FN void DT__K(name)(int64_t k, const DT__REAL *a, int64_t row, int64_t step, \
        const DT__REAL *b, int64_t ldb, DT__REAL *tile, int64_t ld, int fresh, int lanes) { \
        DT__LANES_MASK; \
        (void)row; \
        ROWS(DT__EDGE_ZERO) \
        for (int64_t p = 0; p < k; p++, a += step, b += ldb) { \
            DT__V b0 = DT__LOAD_LANES(b); \
            ROWS(STEP) \
        } \
        ROWS(DT__EDGE_STORE) \
    }

/* The micro-kernel of one row of A and 8 vectors of columns, for products of one row: it reads long
   pieces of the rows of B, which the processor's prefetchers follow. */
#define DT__EIGHT(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define DT__WIDE_ZERO(i) DT__V c##i = fresh ? DT__ZERO : DT__LOAD(tile + i * DT__NV);
#define DT__WIDE_STEP(i) c##i = DT__FMADD(*a, DT__LOAD(b + i * DT__NV), c##i);
#define DT__WIDE_STORE(i) DT__STORE(tile + i * DT__NV, c##i);
DT__FN void DT__K(row_micro_kernel)(int64_t terms, const DT__REAL *a, int64_t step,
    const void *from, int64_t ldb, DT__REAL *tile, int fresh) {
    const DT__REAL *b = (const DT__REAL *)from;
    DT__EIGHT(DT__WIDE_ZERO)
    for (int64_t p = 0; p < terms; p++, a += step, b += ldb) {
        DT__EIGHT(DT__WIDE_STEP)
    }
    DT__EIGHT(DT__WIDE_STORE)
}

/* The micro-kernel of one row of A and at most 32 columns of a B that is stored transposed: column
   j lies in `bytes` bytes of memory, which begin ldb bytes after those of column j - 1. Transposes
   16 x 16 words of B in registers. Every lane adds the products of its column in the order of the
   steps, as all micro-kernels do. Each multiply-add waits for the one before it in its sum, so two
   vectors of independent sums overlap.

   The processor's own prefetchers do not follow 32 columns at a time. So the kernel divides the
   columns into pieces of `run` <= 8 cache lines. While it multiplies one piece, it prefetches the
   next piece, column by column. L1 holds both. The prefetches are non-temporal, because each
   element of B is read once. From memory this is twice as fast as without prefetching. */
#define DT__COLUMNS_KERNEL(name, FMADD) \
    DT__FN void DT__K(name)(const DT__REAL *a, const char *b, int64_t ldb, int64_t cols, \
        int64_t bytes, DT__REAL *tile) { \
        const dt__word *x = (const dt__word *)a; \
        const DT__REAL *col[32]; \
        DT__REAL last[17][16]; \
        __m512 t[16], sum = DT__ZERO, second = DT__ZERO; \
        int64_t blocks = bytes / 64, rest = bytes % 64, pieces = (blocks + 7) / 8, run = 0; \
        int64_t width = cols > 16 ? 32 : 16; \
        if (pieces > 0) run = (blocks + pieces - 1) / pieces; \
        for (int64_t i = 0; i < 32; i++) \
            col[i] = (const DT__REAL *)(const void *)(b + (i < cols ? i : cols - 1) * ldb); \
        for (int64_t at = 0, end; at < blocks; at = end) { \
            end = at + run < blocks ? at + run : blocks; \
            const char *next = end < blocks ? b + 64 * end : b + width * ldb; \
            for (int64_t p = 16 * at; p < 16 * end; p += 16) { \
                for (int64_t j = 0; j < width; j += run, next += ldb) { \
                    DT__UNROLL for (int i = 0; i < 8; i++) \
                        __builtin_prefetch(next + 64 * i, 0, 0); \
                } \
                DT__K(transpose_words)(t, col, p); \
                DT__UNROLL for (int i = 0; i < 16; i++) sum = FMADD(x[p + i], t[i], sum); \
                if (width == 16) continue; \
                DT__K(transpose_words)(t, col + 16, p); \
                DT__UNROLL for (int i = 0; i < 16; i++) second = FMADD(x[p + i], t[i], second); \
            } \
        } \
        DT__STORE(tile, sum); \
        DT__STORE(tile + 16, second); \
        /* the rest, less than a block, is copied: a load would read past the columns */ \
        for (int64_t j = 0; rest > 0 && j < cols; j += 16) { \
            memset(last, 0, sizeof last); /* the last word may be half a pair */ \
            for (int i = 0; i < 16; i++) \
                memcpy(last[i], col[j + i] + 16 * blocks, (size_t)rest), col[i] = last[i]; \
            memcpy(last[16], a + 16 * blocks, (size_t)rest); \
            DT__K(transpose_words)(t, col, 0); \
            DT__UNROLL for (int i = 0; i < 16; i++) DT__STORE(last[i], t[i]); \
            sum = DT__LOAD(tile + j); \
            for (int64_t i = 0; 4 * i < rest; i++) \
                sum = FMADD(last[16][i], DT__LOAD(last[i]), sum); \
            DT__STORE(tile + j, sum); \
        } \
    }

/* The micro-kernel of a whole tile and packed panels, which most of a large product takes. Constant
   distances between the elements of a step need no registers. Unless prefetch_stride is 0, the
   micro-kernel also prefetches the data that will be packed next: one cache line every 8 steps,
   starting at `prefetch`, and prefetch_stride bytes apart. */
#define DT__PANEL_KERNEL(name, STEP) \
    DT__FN void DT__K(name)(int64_t k, const DT__REAL *a, const DT__REAL *b, DT__REAL *tile, \
        int64_t ld, int fresh, const char *prefetch, int64_t prefetch_stride) { \
        const int64_t row = 1, lanes = DT__NV; \
        DT__LANES_MASK; \
        DT__MATMUL_ROWS(DT__MICRO_START) \
        for (int64_t p = 0; p < k; p++, a += DT__MR, b += DT__NR) { \
            if (prefetch_stride && p % 8 == 0) { \
                __builtin_prefetch(prefetch, 0, 2); \
                prefetch += prefetch_stride; \
            } \
            DT__V b0 = DT__LOAD(b), b1 = DT__LOAD(b + DT__NV); \
            DT__MATMUL_ROWS(STEP) \
        } \
        DT__MATMUL_ROWS(DT__MICRO_STORE) \
    }
DT__PANEL_KERNEL(panel_micro_kernel, DT__MICRO_STEP)

/* The micro-kernels of several heights. The last rows of C take the tallest ones that fit, so no
   kernel reads or computes rows that A does not have. */
static const int64_t DT__K(micro_heights)[] = { DT__MR, 8, 4, 2, 1 };
#if DT__MR > 8
#define DT__MICRO_KERNEL_8(KERNEL, name, STEP) KERNEL(name##_8, DT__ROWS_8, STEP)
#define DT__MICRO_8(name) DT__K(name##_8)
#else /* a height that no tile reaches */
#define DT__MICRO_KERNEL_8(KERNEL, name, STEP)
#define DT__MICRO_8(name) NULL
#endif
#define DT__MICRO_KERNELS(KERNEL, name, STEP) \
    KERNEL(name##_full, DT__MATMUL_ROWS, STEP) \
    DT__MICRO_KERNEL_8(KERNEL, name, STEP) \
    KERNEL(name##_4, DT__ROWS_4, STEP) \
    KERNEL(name##_2, DT__ROWS_2, STEP) \
    KERNEL(name##_1, DT__ROWS_1, STEP) \
    static const DT__K(micro_kernel) DT__K(name##s)[] = { DT__K(name##_full), DT__MICRO_8(name), \
        DT__K(name##_4), DT__K(name##_2), DT__K(name##_1) };
DT__MICRO_KERNELS(DT__MICRO_KERNEL, matmul_micro_kernel, DT__MICRO_STEP)
#if DT__ISA == 2
DT__MICRO_KERNELS(DT__EDGE_KERNEL, matmul_edge_kernel, DT__EDGE_STEP)
DT__COLUMNS_KERNEL(columns_micro_kernel, DT__FMADD)
#endif

/* The micro-kernel of attention. Computes the sums from zero like the one above, but element i of
   step p is a[i * row + p * step], so that `a` needs no packing, and rows of `b` are ldb elements
   apart. Stores the sums in the tile, or, if `factor` is not NULL, tile = factor * tile + sums,
   with one factor for each column. There is a version for a panel of rows and one for a single row,
   each for floats and for pairs of bf16. */
#define DT__MICRO_ADD(i) \
    c##i##_0 += DT__LOAD(tile + i * ld) * f0; \
    c##i##_1 += DT__LOAD(tile + i * ld + DT__NV) * f1;
#define DT__ATTENTION_KERNEL(name, ROWS, STEP) \
    DT__FN __attribute__((noinline)) void DT__K(name)(int64_t k, const DT__REAL *a, int64_t row, \
        int64_t step, const DT__REAL *b, int64_t ldb, DT__REAL *tile, int64_t ld, \
        const DT__REAL *factor) { \
        (void)row, (void)ld; \
        ROWS(DT__MICRO_ZERO) \
        for (int64_t p = 0; p < k; p++, a += step, b += ldb) { \
            DT__V b0 = DT__LOAD(b), b1 = DT__LOAD(b + DT__NV); \
            ROWS(STEP) \
        } \
        if (factor) { \
            DT__V f0 = DT__LOAD(factor), f1 = DT__LOAD(factor + DT__NV); \
            ROWS(DT__MICRO_ADD) \
        } \
        ROWS(DT__MICRO_STORE) \
    }
DT__ATTENTION_KERNEL(attention_micro_kernel, DT__ATTENTION_ROWS, DT__MICRO_STEP)
DT__ATTENTION_KERNEL(attention_row_kernel, DT__ROWS_1, DT__MICRO_STEP)

/* The micro-kernel for bf16, which uses the processor's dot product of pairs (vdpbf16ps). A 32-bit
   word holds the elements of k indices 2p and 2p + 1. A panel of words is read like a panel of
   floats. Each step adds both products of a pair to the sum. */
#if DT__ISA == 2
#define DT__PAIR_FMADD(x, v, sum) _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_ps(x), (__m512bh)(v))
#define DT__PAIR_STEP(i) \
    c##i##_0 = DT__PAIR_FMADD(a[i * row], b0, c##i##_0); \
    c##i##_1 = DT__PAIR_FMADD(a[i * row], b1, c##i##_1);
#pragma push_macro("DT__FN")
#undef DT__FN
#define DT__FN static __attribute__((target("avx512f,avx512bf16")))
DT__ATTENTION_KERNEL(attention_pair_micro_kernel, DT__ATTENTION_ROWS, DT__PAIR_STEP)
DT__ATTENTION_KERNEL(attention_pair_row_kernel, DT__ROWS_1, DT__PAIR_STEP)
DT__PANEL_KERNEL(panel_pair_micro_kernel, DT__PAIR_STEP)
DT__MICRO_KERNELS(DT__MICRO_KERNEL, matmul_pair_micro_kernel, DT__PAIR_STEP)
DT__COLUMNS_KERNEL(columns_pair_micro_kernel, DT__PAIR_FMADD)
/* One row of an outer product in bf16. Shifts each widened element back to bf16, in the low half of
   its word; the high half is 0. vdpbf16ps takes denormals for zeros and a multiply-add of floats
   does not, so DT__FMADD would give other bits than the micro-kernels of tiles. */
#define DT__FIRST_OF_PAIR(v) _mm512_maskz_srli_epi32(0xffff, (__m512i)(v), 16)
DT__FN void DT__K(outer_pair_kernel)(DT__REAL a, const DT__REAL *b, int64_t n, DT__REAL *row) {
    __m512bh x = (__m512bh)DT__FIRST_OF_PAIR(_mm512_set1_ps(a));
    for (int64_t j = 0; j < n; j += DT__NV)
        DT__STORE(
            row + j, _mm512_dpbf16_ps(DT__ZERO, x, (__m512bh)DT__FIRST_OF_PAIR(DT__LOAD(b + j))));
}
#define DT__EDGE_PAIR_STEP(i) c##i = DT__PAIR_FMADD(a[i * row], b0, c##i);
DT__MICRO_KERNELS(DT__EDGE_KERNEL, matmul_pair_edge_kernel, DT__EDGE_PAIR_STEP)

/* row_micro_kernel for pairs: zips 32 elements of two rows of B to two vectors of words. It reads
   short pieces of `terms` rows, so it prefetches the same columns of the next `terms` rows, which
   the next block of K reads. */
#define DT__ZIP_STEP(i, j, at) \
    { \
        __m512i one = _mm512_loadu_si512(b + at), \
                two = _mm512_maskz_loadu_epi16(second, next + at); \
        __builtin_prefetch(b + terms * ldb + at); \
        __builtin_prefetch(next + terms * ldb + at); \
        __m512i low = _mm512_permutex2var_epi16(one, first_half, two), \
                high = _mm512_permutex2var_epi16(one, second_half, two); \
        c##i = DT__PAIR_FMADD(*a, low, c##i); \
        c##j = DT__PAIR_FMADD(*a, high, c##j); \
    }
#undef DT__FN
#define DT__FN static __attribute__((target("avx512f,avx512bw,avx512bf16")))
DT__FN void DT__K(row_pair_micro_kernel)(int64_t terms, const DT__REAL *a, int64_t step,
    const void *from, int64_t ldb, DT__REAL *tile, int fresh) {
    const uint16_t *b = (const uint16_t *)from;
    uint16_t order[64];
    for (int i = 0; i < 64; i++) order[i] = (uint16_t)(i / 2 + i % 2 * 32);
    __m512i first_half = _mm512_loadu_si512(order), second_half = _mm512_loadu_si512(order + 32);
    DT__EIGHT(DT__WIDE_ZERO)
    for (int64_t p = 0; p < terms; p += 2, a += step, b += 2 * ldb) {
        __mmask32 second = p + 1 < terms ? 0xffffffff : 0;
        const uint16_t *next = second ? b + ldb : b;
        DT__ZIP_STEP(0, 1, 0)
        DT__ZIP_STEP(2, 3, 32)
        DT__ZIP_STEP(4, 5, 64)
        DT__ZIP_STEP(6, 7, 96)
    }
    DT__EIGHT(DT__WIDE_STORE)
}
#pragma pop_macro("DT__FN")
#endif
/* the other macros of the micro-kernels have the same text for every instruction set */
#undef DT__LANES_MASK
#undef DT__LOAD_LANES
#undef DT__STORE_LANES
#undef DT__MICRO_KERNEL_8
#undef DT__MICRO_8

/* The parameters and arrays of one fast matrix product. A step is one k index, or a pair of k
   indices if `pairs` is set. The arrays lie in the caller's scratch memory. */
typedef struct DT__K(gemm_plan) {
    const dt_matmul_args *args;
    dt__gemm_blocks blocks;
    DT__REAL *a_panels; /* up to DT__C_PANELS panels of A, each (kc,MR) */
    DT__REAL *b_block;  /* a block of B, (kc,nc), in panels of NR columns; the block stays in L2 */
    /* The unfinished tiles of one block of C. There is only one tile if all of K is one block or if
       C itself holds the unfinished sums. */
    DT__REAL *c_tiles;
    int single_k_block; /* 1 if all of K is one block */
    int c_in_place;     /* 1 if C itself holds unfinished sums, because it has the compute type */
    int a_in_place;     /* 1 if the micro-kernel reads A itself, not packed panels of it */
    int b_in_place;     /* the same for B, except for columns that are less than a panel */
    int small;          /* 1 if A and B have at most 32 KB each, and nothing is packed or copied */
    int thin;  /* 1 if A is one panel: each panel of B is packed just before it is multiplied */
    int row;   /* 1 if A is one row (GEMV), for which there are wider micro-kernels */
    int pairs; /* 1 if a step is a pair of bf16 elements */
    int amx;   /* 1 if AMX tiles multiply the pairs (matmul_amx) */
    const DT__K(micro_kernel) * kernels; /* by height, as in micro_heights */
    const DT__K(micro_kernel) * edges;   /* the same; NULL: edges are whole tiles of panels */
    DT__K(panel_kernel) panel_kernel;
    DT__K(row_kernel) row_kernel;         /* or NULL */
    DT__K(columns_kernel) columns_kernel; /* or NULL */
    DT__K(outer_kernel) outer_kernel;     /* or NULL */
} DT__K(gemm_plan);

/* Chooses which operands are multiplied where they lie. Packing an operand pays if it is read
   several times from beyond L1, and is needed if its elements must be converted or transposed. */
DT__FN void DT__K(plan_packing)(DT__K(gemm_plan) * w) {
    const int64_t in_l1 = 32768 / (int64_t)sizeof(DT__REAL); /* elements of an operand in L1 */
    const dt_matmul_args *a = w->args;
    int convert = dt__narrow(a->dtype);
    w->thin = a->m <= DT__MR;
    w->row = a->m == 1;
    w->a_in_place = !convert && (w->thin || a->m * a->k <= in_l1);
    if (w->row && !a->trans_b && !a->b_quant && !convert) w->row_kernel = DT__K(row_micro_kernel);
#if DT__ISA == 2
    if (w->row && !a->trans_b && w->pairs) w->row_kernel = DT__K(row_pair_micro_kernel);
    /* columns_kernel reads A as dense, aligned 4-byte words: floats, or pairs of bf16 */
    int words = (!a->trans_a || a->lda == 1) && (uintptr_t)a->a % sizeof(DT__REAL) == 0 &&
                (a->batch == 1 || !w->pairs || a->stride_a % 2 == 0);
    if (w->row && a->trans_b && words && w->pairs)
        w->columns_kernel = DT__K(columns_pair_micro_kernel);
    else if (w->row && a->trans_b && words && !convert && !a->b_quant)
        w->columns_kernel = DT__K(columns_micro_kernel);
#endif
    w->b_in_place = !convert && !a->trans_b && !a->b_quant && (w->thin || a->n * a->k <= in_l1);
    w->c_in_place = !a->accumulate && !dt__narrow(dt__wide(a->dtype, a->wide)) &&
                    a->residual != a->c && a->pre_activation != a->c;
    w->small = w->a_in_place && w->b_in_place && w->c_in_place && !w->row && !a->activation &&
               a->m * a->k <= in_l1 && a->n * a->k <= in_l1 && (w->edges || a->n % DT__NR == 0);
}

#if DT__ISA == 2
/* `pack` for pairs of source rows: zips rows 2p and 2p + 1 to row p of all panels, at most 32 words
   at a time, and prefetches the rows 16 source rows ahead. If `terms` is odd, the last row is
   zipped with zeros. */
#pragma push_macro("DT__FN")
#undef DT__FN
#define DT__FN static __attribute__((target("avx512f,avx512bw")))
DT__FN void DT__K(pack_pairs)(
    DT__REAL *to, int64_t width, const uint16_t *from, int64_t ld, int64_t count, int64_t terms) {
    uint16_t order[64];
    for (int i = 0; i < 64; i++) order[i] = (uint16_t)(i / 2 + i % 2 * 32);
    __m512i first_half = _mm512_loadu_si512(order), second_half = _mm512_loadu_si512(order + 32);
    __mmask16 words = (__mmask16)(width < 16 ? (1 << width) - 1 : 0xffff);
    for (int64_t p = 0; p < terms; p += 2, from += 2 * ld, to += width) {
        __mmask32 second = p + 1 < terms ? 0xffffffff : 0;
        const uint16_t *next = second ? from + ld : from, *ahead = from + 16 * ld;
        DT__REAL *panel = to;
        for (int64_t j = 0; j < count + 32; j += 32) { /* each cache line once */
            __builtin_prefetch(ahead + j);
            __builtin_prefetch(ahead + ld + j);
        }
        for (int64_t j = 0; j < count; j += width, panel += (terms + 1) / 2 * width) {
            int64_t have = count - j < width ? count - j : width;
            __mmask32 in = 0xffffffff >> (32 - have);
            __m512i one = _mm512_maskz_loadu_epi16(in, from + j),
                    two = _mm512_maskz_loadu_epi16(in & second, next + j);
            _mm512_mask_storeu_epi32(panel, words, _mm512_permutex2var_epi16(one, first_half, two));
            if (width > 16)
                _mm512_storeu_si512(panel + 16, _mm512_permutex2var_epi16(one, second_half, two));
        }
    }
}
#pragma pop_macro("DT__FN")
#endif

/* Packs one panel (steps,width) from a source of the same orientation: row p of the source, which
   begins at element `at` + p * ld, becomes row p of the panel. The source has `have` columns; if
   that is less than `width`, the other columns of the panel are set to zero. */
DT__FN void DT__K(pack_rows)(dt_dtype dtype, int quant, DT__REAL *panel, int64_t width,
    const void *from, int64_t at, int64_t ld, int64_t have, int64_t terms) {
    /* 1 if DT__MR_ROUNDED elements of each row can be copied without leaving the source row. This
       copy overruns the panel's row, and the copy of the next row overwrites the excess. */
    int can_overrun = have >= DT__MR_ROUNDED;
    if (have > width) have = width;
    /* 1 if a memcpy of constant size can copy a row */
    int fixed_size =
        !quant && !dt__narrow(dtype) && have == width && (width == DT__NR || width == DT__MR);
    for (int64_t p = 0; p < terms; p++, panel += width, at += ld) {
        const DT__REAL *row = DT__K(load_operand)(dtype, quant, from, at, have, panel);
        int64_t i = 0;
        if (fixed_size) { /* the same columns of the next 16 rows, which `pack` copies next */
            __builtin_prefetch(row + 16 * ld);
            __builtin_prefetch(row + 16 * ld + DT__NV);
        }
        if (fixed_size && width == DT__NR)
            memcpy(panel, row, DT__NR * sizeof *row);
        else if (fixed_size && can_overrun && p + 1 < terms)
            memcpy(panel, row, DT__MR_ROUNDED * sizeof *row);
        else if (fixed_size)
            memcpy(panel, row, DT__MR * sizeof *row);
        if (fixed_size) continue;
        for (; i < have; i++) panel[i] = row[i];
        for (; i < width; i++) panel[i] = 0;
    }
}

/* Loads `terms` elements of one row, at most 64, in the form that the micro-kernel reads: an array
   with one word per step. A word is one element; if `pairs` is 1, it is two 16-bit elements. If no
   conversion is needed, returns a pointer into the source. Otherwise fills and returns `buf`. */
DT__FN const DT__REAL *DT__K(load_words)(dt_dtype dtype, int quant, int pairs, const void *from,
    int64_t at, int64_t terms, DT__REAL *buf) {
#if DT__ISA == 2
    if (pairs && terms == 64) return (const DT__REAL *)((const uint16_t *)from + at);
    if (pairs) {
        memset(buf, 0, 32 * sizeof *buf);
        memcpy(buf, (const uint16_t *)from + at, (size_t)terms * 2);
        return buf;
    }
#endif
    (void)pairs;
    if (!quant && !dt__narrow(dtype)) return (const DT__REAL *)from + at; /* a row may be short */
    return DT__K(load_operand)(dtype, quant, from, at, terms, buf);
}

/* Packs one panel (steps,width) from a source whose row i becomes column i of the panel. Transposes
   the elements of 64 k indices at a time, so that these elements stay in L1. */
DT__FN void DT__K(pack_columns)(dt_dtype dtype, int quant, int pairs, DT__REAL *panel,
    int64_t width, const void *from, int64_t at, int64_t ld, int64_t have, int64_t terms) {
    static const DT__REAL none[64] = { 0 };
    DT__REAL buf[DT__TRANSPOSE][64];
    for (int64_t p = 0; p < terms; p += 64) {
        int64_t n = terms - p < 64 ? terms - p : 64, steps = pairs ? (n + 1) / 2 : n;
        /* begins with the last columns: their transposition may write past the panel's width, into
           the first columns of the next row, which a later iteration writes */
        for (int64_t i = (width - 1) / DT__TRANSPOSE * DT__TRANSPOSE; i >= 0; i -= DT__TRANSPOSE) {
            const DT__REAL *row[DT__TRANSPOSE];
            for (int l = 0; l < DT__TRANSPOSE; l++)
                row[l] = i + l < have ? DT__K(load_words)(dtype, quant, pairs, from,
                                            at + (i + l) * ld + p, n, buf[l])
                                      : none;
            DT__K(transpose)(panel + i, width, row, steps);
        }
        panel += steps * width;
    }
}

/* Packing. Copies `count` rows of A or columns of B to panels, in the order in which the
   micro-kernel reads them, and converts them to the compute type; `quant` is B's dt_quant, 0 for A.
   If `transpose` is 1, each row of the source is a row of A or a column of B. If `transpose` is 0,
   each row of the source belongs to one k index. In this case 16 source rows are copied to all
   panels before the next 16 rows, so that all elements of a source row are read at about the same
   time. */
DT__FN void DT__K(pack)(const DT__K(gemm_plan) * w, int quant, DT__REAL *to, int64_t width,
    const void *from, int64_t at, int64_t ld, int transpose, int64_t count, int64_t terms) {
    dt_dtype dtype = w->args->dtype;
    int64_t kc = w->pairs ? (terms + 1) / 2 : terms, step = transpose ? terms : 16;
#if DT__ISA == 2
    if (w->pairs && !transpose) {
        DT__K(pack_pairs)(to, width, (const uint16_t *)from + at, ld, count, terms);
        return;
    }
#endif
    for (int64_t p = 0; p < terms; p += step) {
        DT__REAL *panel = to + p * width;
        int64_t n = terms - p < step ? terms - p : step;
        for (int64_t j = 0; j < count; j += width, panel += kc * width) {
            if (transpose) DT__K(pack_columns)
            (dtype, quant, w->pairs, panel, width, from, at + j * ld, ld, count - j, n);
            else DT__K(pack_rows)(
                dtype, quant, panel, width, from, at + p * ld + j, ld, count - j, n);
        }
    }
}

/* Returns the address from which the micro-kernel prefetches, while it computes tile number `tile`
   of the current group of panels of A. Each tile prefetches a part of the next group, whose first
   row is row i of A: one cache line every 8 steps, *stride bytes apart. The whole group at once
   would delay one tile. If there is nothing to prefetch, returns NULL and sets *stride to 0.
   Nothing is prefetched if A is stored transposed and its rows are a multiple of 4096 bytes apart:
   the rows would share few cache sets and evict each other. */
DT__FN const char *DT__K(prefetch_next_a)(const DT__K(gemm_plan) * w, int64_t at, int64_t i,
    int64_t i1, int64_t terms, int64_t tile, int64_t *stride) {
    const dt_matmul_args *a = w->args;
    int64_t size = (int64_t)dt_dtype_size(a->dtype), row = a->lda * size, last = i1 - 1 - i,
            line = tile / 8 * 64;
    const char *from = (const char *)a->a + (at + i * (a->trans_a ? 1 : a->lda)) * size;
    int pages = a->trans_a && row % 4096 == 0;
    *stride = last < 0 || pages ? 0 : a->trans_a ? row : 8 * size;
    if (*stride == 0) return NULL;
    if (last >= DT__A_PANELS * DT__MR) last = DT__A_PANELS * DT__MR - 1;
    if (!a->trans_a) return from + (tile < last ? tile : last) * row;
    return from + tile % 8 * (terms / 8) * row + (line < last * size ? line : last * size);
}

/* Copies rows x cols elements of a tile at the edge of C, from C to the tile or back. */
DT__FN void DT__K(copy_edge)(DT__REAL *to, int64_t to_ld, const DT__REAL *from, int64_t from_ld,
    int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + i * to_ld, from + i * from_ld, (size_t)cols * sizeof *to);
}

/* What a micro-kernel reads of A for one panel, and what it prefetches. */
typedef struct DT__K(gemm_panel) {
    const DT__REAL *a;
    int64_t row, step;
    const char *prefetch;
    int64_t prefetch_stride;
} DT__K(gemm_panel);

/* Returns the number of rows of the next tile; `left` rows of C remain. */
DT__FN_INLINE int64_t DT__K(tile_rows)(int64_t left, int a_in_place) {
    /* two tiles of 8 rows take less time than one of 14 and one of 2 */
    if (a_in_place && DT__MR > 8 && left / 2 == 8) return 8;
    return left < DT__MR ? left : DT__MR;
}

/* Adds the products of k steps to rows x cols elements of a tile, with the tallest micro-kernels
   that fit. */
DT__FN void DT__K(multiply_tile)(const DT__K(gemm_plan) * w, const DT__K(gemm_panel) * a,
    int64_t rows, int64_t cols, int64_t k, const DT__REAL *b, int64_t ldb, DT__REAL *tile,
    int64_t ld, int fresh) {
    const DT__K(micro_kernel) *kernels = cols <= DT__NV && w->edges ? w->edges : w->kernels;
    int lanes = (int)(cols <= DT__NV ? cols : cols - DT__NV); /* columns in the last vector */
    if (rows == DT__MR && cols == DT__NR && !w->a_in_place && ldb == DT__NR) {
        w->panel_kernel(k, a->a, b, tile, ld, fresh, a->prefetch, a->prefetch_stride);
        return;
    }
    for (int64_t i = 0, at = 0, height; i < rows; i += height) {
        while (DT__K(micro_heights)[at] > rows - i) at++;
        height = DT__K(micro_heights)[at];
        kernels[at](k, a->a + i * a->row, a->row, a->step, b, ldb, tile + i * ld, ld, fresh, lanes);
    }
}

/* Packs columns [j, j + count) of the block of B that begins at element `at`. */
DT__FN void DT__K(pack_b)(
    const DT__K(gemm_plan) * w, int64_t at, int64_t j, int64_t count, int64_t terms) {
    const dt_matmul_args *a = w->args;
    DT__K(pack)
    (w, a->b_quant, w->b_block, DT__NR, a->b, at + j * (a->trans_b ? a->ldb : 1), a->ldb,
        a->trans_b, count, terms);
}

/* A block of the product: rows [i0, i1) and columns [j0, j1) of C, k indices [p0, p1). */
typedef struct DT__K(gemm_block) {
    int64_t batch, i0, i1, j0, j1, p0, p1;
    int64_t terms, kc;      /* k indices and steps */
    int64_t from_a, from_b; /* the operands' elements at row 0 or column 0, k index p0 */
    int a_is_packed;        /* 1 if the previous block of columns packed the same panels of A */
} DT__K(gemm_block);

/* Adds the products of a block to rows [i, i + rows) and columns [j, j + cols) of C. `tile` is the
   memory of their unfinished sums, if these are not in C. */
DT__FN void DT__K(matmul_tile)(const DT__K(gemm_plan) * w, const DT__K(gemm_block) * x,
    const DT__K(gemm_panel) * panel, int64_t i, int64_t rows, int64_t j, int64_t cols,
    DT__REAL *tile) {
    const dt_matmul_args *a = w->args;
    DT__REAL *c = (DT__REAL *)a->c + x->batch * a->stride_c + i * a->ldc + j;
    const DT__REAL *b = w->b_block;
    int64_t ld = DT__NR, ldb = DT__NR;
    /* `dense` is 1 if the tile must be one dense array, over which the activation runs */
    int last = x->p1 == a->k, dense = last && a->activation, whole = cols >= DT__NR || w->edges;
    int full = whole && w->c_in_place && !dense, edge = w->c_in_place && !full;
    int in_place = w->b_in_place && whole;
    if (in_place)
        b = (const DT__REAL *)a->b + x->from_b + j, ldb = a->ldb;
    else if (cols <= DT__NR && (w->b_in_place || w->thin))
        DT__K(pack_b)(w, x->from_b, j, cols, x->terms);
    else if (!w->thin)
        b += (j - x->j0) * x->kc;
    if (full) tile = c, ld = a->ldc;
    if (edge && x->p0 > 0) DT__K(copy_edge)(tile, DT__NR, c, a->ldc, rows, cols);
    if (last) DT__K(prefetch_epilogue)(a, x->batch, i, j, rows, cols);
    if (cols > DT__NR)
        w->row_kernel(x->terms, panel->a, panel->step,
            (const char *)a->b + (x->from_b + j) * (int64_t)dt_dtype_size(a->dtype), a->ldb, tile,
            x->p0 == 0);
    else
        DT__K(multiply_tile)(w, panel, rows, cols, x->kc, b, ldb, tile, ld, x->p0 == 0);
    for (int64_t at = 0; at < cols && last; at += DT__NR) DT__K(matmul_epilogue)
    (a, x->batch, i, j + at, rows, cols - at < DT__NR ? cols - at : DT__NR, tile + at, ld);
    if (!last && edge) DT__K(copy_edge)(c, a->ldc, tile, DT__NR, rows, cols);
}

/* Adds the products of a block to C. Packs what is not multiplied in its place: the block of B,
   then groups of panels of A. Multiplies each panel of A by every panel of B. */
DT__FN void DT__K(matmul_block)(const DT__K(gemm_plan) * w, const DT__K(gemm_block) * x) {
    const dt_matmul_args *a = w->args;
    int64_t a_row = a->trans_a ? 1 : a->lda, tile_number = 0; /* within the group of panels */
    int64_t height = w->row ? 1 : DT__MR;
    int keep_a = x->i1 - x->i0 <= DT__C_PANELS * DT__MR; /* all panels fit in a_panels */
    /* `at` is the offset of the current tile in c_tiles; it stays 0 if c_tiles is a single tile */
    int64_t at = 0, keep = !w->single_k_block && !w->c_in_place;
    DT__K(gemm_panel) panel = { NULL, 1, DT__MR, NULL, 0 };
    if (w->a_in_place) panel.row = a_row, panel.step = a->trans_a ? a->lda : 1;
    if (!w->b_in_place && !w->thin) DT__K(pack_b)(w, x->from_b, x->j0, x->j1 - x->j0, x->terms);
    for (int64_t i = x->i0, rows; i < x->i1; i += rows) {
        int64_t left = x->i1 - i, index = (i - x->i0) / DT__MR, number = index % DT__A_PANELS;
        DT__REAL *packed = w->a_panels + (keep_a ? index : number) * x->kc * DT__MR;
        rows = DT__K(tile_rows)(left, w->a_in_place);
        panel.a = w->a_in_place ? (const DT__REAL *)a->a + x->from_a + i * a_row : packed;
        if (number == 0) tile_number = 0;
        if (number == 0 && !w->a_in_place && !x->a_is_packed) DT__K(pack)
        (w, 0, packed, DT__MR, a->a, x->from_a + i * a_row, a->lda, !a->trans_a,
            left < DT__A_PANELS * DT__MR ? left : DT__A_PANELS * DT__MR, x->terms);
        for (int64_t j = x->j0, cols; j < x->j1; j += cols) {
            cols = x->j1 - j < DT__NR ? x->j1 - j : DT__NR;
            if (w->row_kernel && x->j1 - j >= 4 * DT__NR) cols = 4 * DT__NR;
            if (!w->a_in_place && !x->a_is_packed)
                panel.prefetch =
                    DT__K(prefetch_next_a)(w, x->from_a, i + (DT__A_PANELS - number) * DT__MR,
                        x->i1, x->terms, tile_number++, &panel.prefetch_stride);
            DT__K(matmul_tile)(w, x, &panel, i, rows, j, cols, w->c_tiles + at);
            if (keep) at += height * (cols > DT__NR ? cols : DT__NR);
        }
    }
}

/* GEMM, the fast product. Loops over blocks of C and blocks of K. Between two blocks of K, the
   partial sums of a block of C are kept in memory in the compute type. The next block of K
   continues from the same values, so the division of K into blocks changes no bit. */
DT__FN void DT__K(matmul_packed)(const DT__K(gemm_plan) * w, int64_t batch, int64_t i_first,
    int64_t i_end, int64_t j_first, int64_t j_end) {
    const dt_matmul_args *a = w->args;
    int64_t terms = w->blocks.kc * (w->pairs ? 2 : 1), nc = w->blocks.nc, m = i_end - i_first;
    int64_t max_rows = DT__C_PANELS * DT__MR,
            blocks = w->single_k_block || w->c_in_place ? 1 : (m + max_rows - 1) / max_rows;
    int64_t rows = blocks > 1 ? (m + blocks - 1) / blocks : m > 1 ? m : 1;
    for (int64_t i0 = i_first; i0 < i_end; i0 += rows) {
        int64_t i1 = i0 + rows < i_end ? i0 + rows : i_end;
        for (int64_t j0 = j_first; j0 < j_end; j0 += nc) {
            int64_t j1 = j0 + nc < j_end ? j0 + nc : j_end, p = 0;
            do { /* runs once even if K is 0, so that C is written */
                int64_t end = p + terms < a->k ? p + terms : a->k;
                DT__K(gemm_block)
                x = { batch, i0, i1, j0, j1, p, end, end - p, 0,
                    batch * a->stride_a + p * (a->trans_a ? a->lda : 1),
                    batch * a->stride_b + p * (a->trans_b ? 1 : a->ldb),
                    j0 > j_first && w->single_k_block && i1 - i0 <= DT__C_PANELS * DT__MR };
                x.kc = w->pairs ? (x.terms + 1) / 2 : x.terms;
                DT__K(matmul_block)(w, &x);
                p = end;
            } while (p < a->k);
        }
    }
}

#if DT__ISA == 2 && defined(DT__AMX)
/* Packs `rows` <= 32 rows of A from element `at` on for dt__amx_micro_kernel. Missing rows and
   terms become zeros. */
DT__FN void DT__K(pack_amx)(
    const dt_matmul_args *a, DT__REAL *to, int64_t at, int64_t rows, int64_t terms) {
    const uint16_t *from = (const uint16_t *)a->a + at;
    DT__REAL zipped[16 * 16];
    const DT__REAL *pairs[16];
    for (int p = 0; p < 16; p++) pairs[p] = zipped + 16 * p;
    for (int64_t p = 0; p < terms; p += 32, to += 32 * 16) {
        int64_t n = terms - p < 32 ? terms - p : 32;
        if (n < 32 || rows < 32) memset(to, 0, 32 * 16 * sizeof *to);
        for (int64_t i = 0; i < rows && !a->trans_a; i++)
            memcpy(to + 16 * i, from + i * a->lda + p, (size_t)n * sizeof *from);
        for (int64_t i = 0; i < rows && a->trans_a; i += 16) {
            memset(zipped, 0, sizeof zipped);
            DT__K(pack_pairs)
            (zipped, 16, from + p * a->lda + i, a->lda, rows - i < 16 ? rows - i : 16, n);
            DT__K(transpose)(to + 16 * i, 16, pairs, 16);
        }
    }
}

/* Multiplies a packed panel of rows [i, i + rows) of A by all panels of the packed block of B. `c`
   is the memory of the unfinished sums, 32 x 32 for each panel of B, or NULL if all of K is one
   block. */
DT__FN void DT__K(multiply_amx)(const DT__K(gemm_plan) * w, const DT__K(gemm_block) * x,
    const DT__REAL *panel, int64_t i, int64_t rows, DT__REAL *c) {
    const dt_matmul_args *a = w->args;
    DT__REAL sums[32 * 32], last[16 * 32] = { 0 };
    int64_t steps = (x->kc + 15) / 16, whole = x->kc / 16;
    for (int64_t j = x->j0; j < x->j1; j += 32) {
        const DT__REAL *b = w->b_block + (j - x->j0) * x->kc;
        int64_t cols = x->j1 - j < 32 ? x->j1 - j : 32;
        DT__REAL *tile = c ? c + (j - x->j0) * 32 : sums;
        /* the rest of a panel of B is shorter than a tile */
        memcpy(last, b + whole * 16 * 32, (size_t)(x->kc % 16) * 32 * sizeof *b);
        dt__amx_micro_kernel(steps, whole, panel, b, last, tile, rows > 16, x->p0 == 0);
        if (x->p1 < a->k) continue;
        for (int64_t r = 0, height; r < rows; r += height) {
            height = rows - r < DT__MR ? rows - r : DT__MR;
            DT__K(matmul_epilogue)(a, x->batch, i + r, j, height, cols, tile + r * 32, 32);
        }
    }
}

/* The product by AMX, with the blocks and the packing of B of matmul_packed. tdpbf16ps adds the
   even and the odd of 32 k indices separately, then both sums, then the result to the tile. So its
   bits differ from those of multiply-adds and of vdpbf16ps. On a processor with AMX, every product
   of bf16 is computed here, also of one row or column: an element then depends on its row, its
   column and K only. A block of K is a multiple of 32 terms or all of K, so the block sizes change
   no bit. */
DT__FN void DT__K(matmul_amx)(const DT__K(gemm_plan) * w, int64_t batch, int64_t i_first,
    int64_t i_end, int64_t j_first, int64_t j_end) {
    const dt_matmul_args *a = w->args;
    int64_t terms = 2 * w->blocks.kc, nc = w->blocks.nc;
    /* 8 panels of 32 rows are less than the DT__C_PANELS of 14 that c_tiles has room for */
    int64_t max_rows = w->single_k_block ? a->m : 256;
    dt__amx_begin();
    for (int64_t i0 = i_first; i0 < i_end; i0 += max_rows) {
        int64_t i1 = i0 + max_rows < i_end ? i0 + max_rows : i_end;
        for (int64_t j0 = j_first; j0 < j_end; j0 += nc) {
            int64_t j1 = j0 + nc < j_end ? j0 + nc : j_end, p = 0;
            do { /* runs once even if K is 0, so that C is written */
                int64_t end = p + terms < a->k ? p + terms : a->k;
                DT__K(gemm_block)
                x = { batch, i0, i1, j0, j1, p, end, end - p, (end - p + 1) / 2,
                    batch * a->stride_a + p * (a->trans_a ? a->lda : 1),
                    batch * a->stride_b + p * (a->trans_b ? 1 : a->ldb), 0 };
                DT__K(pack_b)(w, x.from_b, j0, j1 - j0, x.terms);
                for (int64_t i = i0; i < i1; i += 32) {
                    int64_t rows = i1 - i < 32 ? i1 - i : 32;
                    DT__K(pack_amx)
                    (a, w->a_panels, x.from_a + i * (a->trans_a ? 1 : a->lda), rows, x.terms);
                    DT__K(multiply_amx)
                    (w, &x, w->a_panels, i, rows,
                        w->single_k_block ? NULL : w->c_tiles + (i - i0) * nc);
                }
                p = end;
            } while (p < a->k);
        }
    }
    dt__amx_end();
}
#endif

/* Product of small matrices: reads A and B and writes C in place, without packing, blocks or
   scratch memory. An element's sum has the same order as in a large product. */
DT__FN void DT__K(matmul_small)(const DT__K(gemm_plan) * w, int64_t batch) {
    const dt_matmul_args *a = w->args;
    const DT__REAL *b = (const DT__REAL *)a->b + batch * a->stride_b;
    DT__REAL *c = (DT__REAL *)a->c + batch * a->stride_c;
    int fused = a->bias || a->pre_activation || a->residual;
    DT__K(gemm_panel)
    panel = { (const DT__REAL *)a->a + batch * a->stride_a, a->trans_a ? 1 : a->lda,
        a->trans_a ? a->lda : 1, NULL, 0 };
    for (int64_t i = 0, rows; i < a->m; i += rows) {
        rows = DT__K(tile_rows)(a->m - i, 1);
        for (int64_t j = 0; j < a->n; j += DT__NR) {
            int64_t cols = a->n - j < DT__NR ? a->n - j : DT__NR;
            DT__K(multiply_tile)
            (w, &panel, rows, cols, a->k, b + j, a->ldb, c + j, a->ldc, 1);
            if (fused) DT__K(matmul_epilogue)(a, batch, i, j, rows, cols, c + j, a->ldc);
        }
        panel.a += rows * panel.row, c += rows * a->ldc;
    }
}

/* GEMV, the product of one row of A and a B that is stored transposed. Nothing is packed: columns
   [first, end) of C read their columns of B once, in the order of memory. */
DT__FN void DT__K(matmul_columns)(
    const DT__K(gemm_plan) * w, int64_t batch, int64_t first, int64_t end) {
    const dt_matmul_args *a = w->args;
    int64_t size = (int64_t)dt_dtype_size(a->dtype), ldb = a->ldb * size;
    const char *x = (const char *)a->a + batch * a->stride_a * size,
               *b = (const char *)a->b + batch * a->stride_b * size;
    DT__REAL tile[DT__NR];
    /* 16 columns at a time are faster from memory, where the weights of a generated token come
       from: fewer streams. 32 are faster if B stays in L2. */
    int64_t width = a->n * ldb < DT__L2_BYTES ? DT__NR : DT__NR / 2;
    for (int64_t j = first; j < end; j += width) {
        int64_t cols = end - j < width ? end - j : width;
        DT__K(prefetch_epilogue)(a, batch, 0, j, 1, cols);
        w->columns_kernel(
            (const DT__REAL *)(const void *)x, b + j * ldb, ldb, cols, a->k * size, tile);
        DT__K(matmul_epilogue)(a, batch, 0, j, 1, cols, tile, DT__NR);
    }
}

/* Outer product, the product of a column of A and a row of B (K is 1), such as the gradient of a
   weight from one row. Both are dense in memory. Writes rows [i0, i1) and columns [j0, j1) of C in
   long pieces, and with non-temporal stores if C is large. */
DT__FN void DT__K(matmul_outer)(
    const DT__K(gemm_plan) * w, int64_t batch, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    const dt_matmul_args *a = w->args;
    DT__REAL row[DT__STRIP], buf_a[64], b[DT__STRIP] = { 0 };
    dt_dtype to = dt__wide(a->dtype, a->wide);
    int mode = dt__store_mode(a->accumulate, a->m * a->n, to);
    for (int64_t i = i0; i < i1; i += 64) {
        int64_t rows = i1 - i < 64 ? i1 - i : 64;
        const DT__REAL *x = DT__K(load)(a->dtype, a->a, batch * a->stride_a + i, rows, buf_a);
        for (int64_t j = j0; j < j1; j += DT__STRIP) {
            int64_t n = j1 - j < DT__STRIP ? j1 - j : DT__STRIP;
            const DT__REAL *y = DT__K(load)(a->dtype, a->b, batch * a->stride_b + j, n, b);
            if (y != b) memcpy(b, y, (size_t)n * sizeof *b); /* so that whole vectors can be read */
            for (int64_t r = 0; r < rows; r++) {
                if (w->outer_kernel) w->outer_kernel(x[r], b, n, row);
                for (int64_t k = 0; k < n && !w->outer_kernel; k += DT__NV)
                    DT__STORE(row + k, DT__FMADD(x[r], DT__LOAD(b + k), DT__ZERO));
                DT__K(store)
                (to, a->c, batch * a->stride_c + (i + r) * a->ldc + j, n, row, mode);
            }
        }
    }
}

#ifdef DT_USE_CBLAS
/* The matrix product by CBLAS, which chooses its own summation order. If a fusion is set, CBLAS
   writes blocks of rows to `work`, and the epilogue stores the rows of each block in C. If `work`
   can hold fewer than 16 rows, the blocks would be too small to be fast, and the caller uses
   matmul_packed instead. */
DT__FN void DT__K(matmul_cblas)(const dt_matmul_args *a, int64_t batch) {
    CBLAS_TRANSPOSE ta = a->trans_a ? CblasTrans : CblasNoTrans,
                    tb = a->trans_b ? CblasTrans : CblasNoTrans;
    int fused = a->bias || a->pre_activation || a->activation || a->residual || a->accumulate;
    int64_t max_rows = fused ? (int64_t)(a->work_bytes / sizeof(DT__REAL)) / a->n : a->m;
    for (int64_t i = 0; i < a->m; i += max_rows) {
        int64_t rows = a->m - i < max_rows ? a->m - i : max_rows;
        const DT__REAL *from =
            (const DT__REAL *)a->a + batch * a->stride_a + i * (a->trans_a ? 1 : a->lda);
        const DT__REAL *b = (const DT__REAL *)a->b + batch * a->stride_b;
        DT__REAL *c =
            fused ? (DT__REAL *)a->work : (DT__REAL *)a->c + batch * a->stride_c + i * a->ldc;
        int64_t ld = fused ? a->n : a->ldc;
        DT__GEMM(CblasRowMajor, ta, tb, (int)rows, (int)a->n, (int)a->k, 1, from, (int)a->lda, b,
            (int)a->ldb, 0, c, (int)ld);
        for (int64_t at = 0; at < rows * a->n && fused;) {
            int64_t r = at / a->n, j = at % a->n, cols = a->n - j < DT__NR ? a->n - j : DT__NR;
            DT__K(matmul_epilogue)(a, batch, i + r, j, 1, cols, c + at, ld);
            at += cols;
        }
    }
}
#endif

/* Makes a product of one row of a product of one column: C^T = B^T A^T. Every element stays the
   same sum. The column of C must be dense. */
DT__FN void DT__K(matmul_transpose)(dt_matmul_args *a) {
    dt_matmul_args b = *a;
    b.a = a->b, b.b = a->a;
    b.m = a->n, b.n = a->m;
    b.trans_a = !a->trans_b, b.trans_b = !a->trans_a;
    b.lda = a->ldb, b.ldb = a->lda;
    b.stride_a = a->stride_b, b.stride_b = a->stride_a;
    *a = b;
}

/* Computes rows [first, end) of C if C has more rows than columns, else columns [first, end). */
DT__FN void DT__K(matmul_share)(
    const DT__K(gemm_plan) * w, int outer, int64_t batch, int64_t first, int64_t end) {
    const dt_matmul_args *a = w->args;
    int by_rows = a->m > a->n;
    int64_t i0 = by_rows ? first : 0, i1 = by_rows ? end : a->m;
    int64_t j0 = by_rows ? 0 : first, j1 = by_rows ? a->n : end;
    if (w->columns_kernel)
        DT__K(matmul_columns)(w, batch, first, end);
    else if (outer)
        DT__K(matmul_outer)(w, batch, i0, i1, j0, j1);
#if DT__ISA == 2 && defined(DT__AMX)
    else if (w->amx)
        DT__K(matmul_amx)(w, batch, i0, i1, j0, j1);
#endif
    else
        DT__K(matmul_packed)(w, batch, i0, i1, j0, j1);
}

/* Computes the matrix product. If `pairs` is 1, the micro-kernel uses the dot product of bf16
   pairs, if `pairs` is 2, that of AMX tiles. The processor must support it. */
DT__FN dt_status DT__K(matmul_with)(const dt_matmul_args *args, int pairs) {
    dt_matmul_args a = *args;
    if (a.m < 0 || a.n < 0 || a.k < 0 || a.batch < 0 || a.activation < 0 ||
        a.activation >= DT_ACT_AFFINE || (a.activation_backward && !a.pre_activation))
        return DT_ERR_ARG;
    if (a.m == 0 || a.n == 0) return DT_OK;
    if (a.batch == 0) a.batch = 1;
    if (a.lda == 0) a.lda = a.trans_a ? a.m : a.k;
    if (a.ldb == 0) a.ldb = a.trans_b ? a.k : a.n;
    if (a.ldc == 0) a.ldc = a.n;
    if (a.b_quant && !dt_quant_bytes((dt_quant)a.b_quant, a.ldb)) return DT_ERR_ARG;
    if (!a.work) {
        for (int64_t i = 0; i < a.batch; i++) DT__K(matmul_naive)(&a, i);
        return DT_OK;
    }
    if (a.work_bytes < dt_matmul_work(a.n, a.k, a.dtype)) return DT_ERR_ARG;
#ifdef DT_USE_CBLAS
    int fits = a.m < INT_MAX && a.n < INT_MAX && a.k < INT_MAX && a.lda < INT_MAX &&
               a.ldb < INT_MAX && a.ldc < INT_MAX;
    if (fits && !dt__narrow(a.dtype) && !a.b_quant && a.k > 0 &&
        (size_t)a.n * 16 * sizeof(DT__REAL) <= a.work_bytes) {
        for (int64_t i = 0; i < a.batch && a.m > 0 && a.n > 0; i++) DT__K(matmul_cblas)(&a, i);
        return DT_OK;
    }
#endif
    if (a.n == 1 && a.m > 1 && a.ldc == 1 && !a.bias && !a.b_quant) DT__K(matmul_transpose)(&a);
    int outer = a.k == 1 && a.m > 1 && (a.trans_a || a.lda == 1) && (!a.trans_b || a.ldb == 1) &&
                !a.bias && !a.pre_activation && !a.activation && !a.residual && !a.b_quant;
    DT__K(gemm_plan) w;
    w.args = &a;
    w.edges = NULL, w.row_kernel = NULL, w.columns_kernel = NULL, w.outer_kernel = NULL;
    w.panel_kernel = DT__K(panel_micro_kernel);
    w.kernels = DT__K(matmul_micro_kernels);
#if DT__ISA == 2
    w.edges = DT__K(matmul_edge_kernels);
    if (pairs) w.panel_kernel = DT__K(panel_pair_micro_kernel);
    if (pairs) w.kernels = DT__K(matmul_pair_micro_kernels);
    if (pairs) w.edges = DT__K(matmul_pair_edge_kernels);
    if (pairs) w.outer_kernel = DT__K(outer_pair_kernel);
#endif
    w.pairs = pairs != 0;
    DT__K(plan_packing)(&w);
    w.amx = pairs == 2;
    if (w.amx) w.columns_kernel = NULL, w.row = w.thin = outer = 0;
    int threads = dt__omp_threads(), small = w.small && !outer && threads == 1;
    for (int64_t i = 0; small && i < a.batch; i++) DT__K(matmul_small)(&w, i);
    if (small) return DT_OK;
    int64_t steps = w.pairs ? (a.k + 1) / 2 : a.k,
            unit = (steps + DT__MAX_KC - 1) / DT__MAX_KC * 16;
    /* each of several blocks of K has a multiple of AMX's 16 steps */
    if (w.amx && unit > 16) steps = (steps + unit - 1) / unit * unit;
    int64_t thin_kc = !w.thin ? 0 : a.trans_b ? DT__THIN_KC_TRANSPOSED : DT__THIN_KC;
    w.blocks = dt__gemm_blocks_make(w.row ? 1 : 14, a.n, steps, sizeof(DT__REAL), thin_kc);
    w.single_k_block = steps <= w.blocks.kc;
    if (w.amx && w.single_k_block) w.blocks.c_tiles = 0; /* a panel for AMX needs the memory */
    int64_t shares = a.m * a.n * a.k < 1 << 18 ? 1 : dt__omp_threads(),
            side = a.m > a.n ? a.m : a.n;
    int64_t each = shares == 1 ? side : ((side + shares - 1) / shares + 31) / 32 * 32;
    int64_t stride = threads == 1 ? 0 : (int64_t)(a.work_bytes / (size_t)threads);
    DT__PARALLEL
    for (int64_t share = 0; share < a.batch * shares; share++) {
        /* each iteration uses the thread's own scratch memory */
        DT__K(gemm_plan) copy, *own = &w;
        if (threads > 1) copy = w, own = &copy;
        int64_t batch = shares == 1 ? share : share / shares,
                first = (share - batch * shares) * each,
                end = first + each < side ? first + each : side;
        own->c_tiles = (DT__REAL *)dt__align64((char *)a.work + dt__omp_thread() * stride);
        own->b_block = own->c_tiles + own->blocks.c_tiles;
        own->a_panels = own->b_block + own->blocks.b_block;
        DT__K(matmul_share)(own, outer, batch, first, end);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(matmul)(const dt_matmul_args *a) {
#if DT__ISA == 2 && defined(DT__AMX)
    if (a->dtype == DT_BF16 && !a->b_quant && dt__amx_is_ready()) return DT__K(matmul_with)(a, 2);
#endif
#if DT__ISA == 2
    if (a->dtype == DT_BF16 && !a->b_quant && dt__bf16_pairs_are_fast())
        return DT__K(matmul_with)(a, 1);
#endif
    return DT__K(matmul_with)(a, 0);
}
#endif

// ==== 30. CPU kernels: elementwise, rows, norms =================================================

/* The kernels of section 2. Most kernels work in strips: load widens bf16 and f16 to the compute
   type, the loop computes, store rounds once. A sum of n elements is computed in 16 lanes. At the
   end the upper half of the lanes is added to the lower half until one lane is left:

       lane l  = x[l] + x[l+16] + x[l+32] + ...
       lane l += lane l+8,  then l+4,  then l+2,  then l+1

   So the order of the sum depends on n alone, and the compiler can vectorize the sum without
   reordering. */

#if DT__VECTORS
DT__FN dt_status DT__K(fill)(const dt_fill_args *a) {
    DT__REAL strip[DT__STRIP], value;
#if DT__BITS < 32
    dt__set_number(a->dtype, &value, 0, a->value);
#else
    value = (DT__REAL)a->value;
#endif
    for (int i = 0; i < DT__STRIP; i++) strip[i] = value;
    int64_t n = (int64_t)a->count;
    int mode = dt__store_mode(0, n, a->dtype);
    for (int64_t at = 0; at < n; at += DT__STRIP)
        DT__K(store)(a->dtype, a->out, at, n - at < DT__STRIP ? n - at : DT__STRIP, strip, mode);
    return DT_OK;
}

/* Reduces elements [at, at + n) of all inputs, in the order of the inputs, and then stores the
   result in all outputs, so an output may also be an input. The result of each operation is rounded
   to the compute type (integers wrap around). DT_AVG divides the finished sum by the number of
   inputs, which may not fit into a uint8_t. */
DT__FN_INLINE void DT__K(reduce_strip)(const dt_reduce_args *a, size_t at, int64_t n, int narrow) {
    DT__REAL sums[DT__STRIP], left[DT__STRIP], right[DT__STRIP];
    const DT__REAL *x = DT__K(load)(a->dtype, a->in[0], (int64_t)at, n, left);
    for (int r = 1; r < a->n; r++) {
        const DT__REAL *in = DT__K(load)(a->dtype, a->in[r], (int64_t)at, n, right);
        switch (a->op) {
        case DT_SUM:
        case DT_AVG:
            for (int64_t i = 0; i < n; i++) sums[i] = (DT__REAL)((DT__WIDE)x[i] + (DT__WIDE)in[i]);
            break;
        case DT_MAX:
            for (int64_t i = 0; i < n; i++) sums[i] = in[i] > x[i] ? in[i] : x[i];
            break;
        case DT_MIN:
            for (int64_t i = 0; i < n; i++) sums[i] = in[i] < x[i] ? in[i] : x[i];
            break;
        case DT_PROD:
            for (int64_t i = 0; i < n; i++) sums[i] = (DT__REAL)((DT__WIDE)x[i] * (DT__WIDE)in[i]);
            break;
        }
        x = sums;
    }
    if (a->n == 1) memcpy(sums, x, (size_t)n * sizeof *sums);
    if (a->op == DT_AVG)
        for (int64_t i = 0; i < n; i++)
#if DT__BITS < 32
            sums[i] = (DT__REAL)(sums[i] / a->n);
#else
            sums[i] /= (DT__REAL)a->n;
#endif
    if (narrow) DT__K(store)(a->dtype, right, 0, n, sums, 0);
    const char *result = (const char *)(narrow ? right : sums);
    size_t size = narrow ? sizeof(uint16_t) : sizeof *sums;
    for (int k = -1; k < a->n_copies; k++) {
        char *out = (char *)(k < 0 ? a->out : a->copies[k]) + at * size;
        if (a->non_temporal)
            DT__K(stream_copy)(out, result, (size_t)n * size);
        else
            memcpy(out, result, (size_t)n * size);
    }
}

/* A short strip of constant length stays in registers or the first cache level, and all inputs and
   outputs move forward together, which keeps the hardware prefetchers on each of them. Narrow types
   are converted in longer strips. */
DT__FN dt_status DT__K(reduce)(const dt_reduce_args *a) {
    enum { SHORT_STRIP = 128 };
    int narrow = dt__narrow(a->dtype);
    size_t at = 0;
    if (a->n < 1) return DT_ERR_ARG;
    for (; !narrow && at + SHORT_STRIP <= a->count; at += SHORT_STRIP)
        DT__K(reduce_strip)(a, at, SHORT_STRIP, 0);
    for (; at < a->count; at += DT__STRIP) DT__K(reduce_strip)
    (a, at, a->count - at < DT__STRIP ? (int64_t)(a->count - at) : DT__STRIP, narrow);
    return DT_OK;
}

/* Between f32, bf16 and f16 an element is widened to f32 and rounded once. */
DT__FN dt_status DT__K(cast)(const dt_cast_args *a) {
    size_t size = dt_dtype_size(a->from);
    if (a->dtype == a->from && !a->accumulate && size > 0) {
        if (a->count > 0) memcpy(a->out, a->in, a->count * size);
        return DT_OK;
    }
#if DT__BITS == 32
    DT__REAL buf[DT__STRIP];
    int64_t count = (int64_t)a->count;
    int mode = dt__store_mode(a->accumulate, count, a->dtype);
    int from_float = a->from == DT_F32 || dt__narrow(a->from);
    for (int64_t at = 0; from_float && !(a->accumulate && dt__narrow(a->dtype)); at += DT__STRIP) {
        int64_t n = count - at < DT__STRIP ? count - at : DT__STRIP;
        if (n <= 0) return DT_OK;
        const DT__REAL *x = DT__K(load)(a->from, a->in, at, n, buf);
        DT__K(store)(a->dtype, a->out, at, n, x, mode);
    }
#endif
    return dt__cast_any(a);
}

/* Copies one tile of a transpose: `in` is dense along dimension `rows`, out along the last, so both
   are read and written in whole cache lines. Meanwhile prefetches the next tile, at `next`. */
DT__FN void DT__K(permute_tile)(const dt_permute_args *a, int rows, int64_t in, int64_t next,
    int64_t out, int64_t n_rows, int64_t n_cols, int mode) {
    enum { PIECE = 16 };
    DT__REAL tile[PIECE * DT__TILE], buf[DT__TRANSPOSE][PIECE];
    int64_t in_step = a->in_stride[a->shape.nd - 1];
    for (int64_t done = 0; done < n_rows; done += PIECE) {
        int64_t have = n_rows - done < PIECE ? n_rows - done : (int64_t)PIECE;
        for (int64_t c = done * n_cols / n_rows; c < (done + have) * n_cols / n_rows; c++)
            dt__prefetch(a->dtype, a->in, next + c * in_step, n_rows);
        for (int64_t c = 0; c < n_cols; c += DT__TRANSPOSE) {
            const DT__REAL *row[DT__TRANSPOSE];
            for (int64_t l = 0; l < DT__TRANSPOSE; l++) { /* the last column again past the edge */
                int64_t column = c + l < n_cols ? c + l : n_cols - 1;
                row[l] =
                    DT__K(load_short)(a->dtype, a->in, in + column * in_step + done, have, buf[l]);
            }
            DT__K(transpose)(tile + c, DT__TILE, row, have);
        }
        for (int64_t r = 0; r < have; r++, out += a->out_stride[rows])
            DT__K(store_short)(a->dtype, a->out, out, n_cols, tile + r * DT__TILE, mode);
    }
}

/* Transposes the last dimension and dimension `rows`, in tiles. */
DT__FN void DT__K(permute_tiles)(const dt_permute_args *a, int rows, int mode) {
    int last = a->shape.nd - 1;
    int64_t n_rows = a->shape.d[rows], n_cols = a->shape.d[last], in_step = a->in_stride[last], in,
            out;
    dt_shape others = a->shape;
    others.d[rows] = others.d[last] = 1;
    dt__strips s = dt__strips_begin(others);
    while (dt__strips_next(&s, a->in_stride, a->out_stride, &in, &out))
        for (int64_t r = 0; r < n_rows; r += DT__TILE_ROWS)
            for (int64_t c = 0; c < n_cols; c += DT__TILE) {
                int64_t from = in + r + c * in_step,
                        next = c + DT__TILE < n_cols ? from + DT__TILE * in_step
                                                     : in + r + DT__TILE_ROWS,
                        rows_left = n_rows - r, cols_left = n_cols - c;
                DT__K(permute_tile)
                (a, rows, from, next, out + r * a->out_stride[rows] + c,
                    rows_left < DT__TILE_ROWS ? rows_left : DT__TILE_ROWS,
                    cols_left < DT__TILE ? cols_left : DT__TILE, mode);
            }
}

DT__FN dt_status DT__K(permute)(const dt_permute_args *args) {
    DT__REAL buf[DT__STRIP];
    dt_permute_args ordered = dt__permute_ordered(*args), *a = &ordered;
    dt__strips r = dt__strips_begin(a->shape);
    int64_t in, out, last = r.shape.nd - 1, in_step = a->in_stride[last],
                     out_step = a->out_stride[last];
    int mode = dt__store_mode(a->accumulate, dt_count(a->shape), a->dtype);
    for (int i = 0; i < last; i++)
        if (a->in_stride[i] == 1 && in_step > 1 && out_step == 1) {
            DT__K(permute_tiles)(a, i, mode);
            return DT_OK;
        }
    int more = dt__strips_next(&r, a->in_stride, a->out_stride, &in, &out);
    while (more) {
        int64_t count = r.n, to = out, n = out_step == 1 ? count : 1; /* n: stored by each call */
        const DT__REAL *x = DT__K(load_strided)(a->dtype, a->in, in, in_step, count, buf);
        more = dt__strips_next(&r, a->in_stride, a->out_stride, &in, &out);
        if (more && in_step == 1) dt__prefetch(a->dtype, a->in, in, r.n);
        for (int64_t i = 0; i < count; i += n)
            DT__K(store)(a->dtype, a->out, to + i * out_step, n, x + i, mode);
    }
    return DT_OK;
}

#endif /* vector kernels */

#if DT__FLOATS

/* A statement that keeps gcc from vectorizing the loop around it: the last elements of a sum are
   too few for vectors. */
#define DT__NOT_VECTORIZED __asm__ volatile("")

/* Sets `total` to the sum of TERM, an expression in j, over 0 <= j < n. The sum is computed in 16
   lanes, in the order described at the head of this section. */
#define DT__SUM(T, total, n, TERM) \
    do { \
        T lane_[16] = { 0 }; \
        int64_t at_ = 0; \
        for (; at_ + 16 <= (n); at_ += 16) DT__INDEPENDENT \
        for (int64_t l_ = 0; l_ < 16; l_++) { \
            int64_t j = at_ + l_; \
            lane_[l_] += TERM; \
        } \
        for (int64_t l_ = 0; l_ < (n)-at_; l_++) { \
            int64_t j = at_ + l_; \
            lane_[l_] += TERM; \
            DT__NOT_VECTORIZED; \
        } \
        for (int l_ = 0; l_ < 8; l_++) lane_[l_] += lane_[l_ + 8]; \
        for (int l_ = 0; l_ < 4; l_++) lane_[l_] += lane_[l_ + 4]; \
        for (int l_ = 0; l_ < 2; l_++) lane_[l_] += lane_[l_ + 2]; \
        (total) = lane_[0] + lane_[1]; \
    } while (0)
#endif /* floating types */

#if DT__FLOATS && DT__VECTORS

DT__FN DT__REAL DT__K(total)(const DT__REAL *x, int64_t n) {
    DT__REAL total;
    DT__SUM(DT__REAL, total, n, x[j]);
    return total;
}

DT__FN DT__REAL DT__K(dot)(const DT__REAL *x, const DT__REAL *y, int64_t n) {
    DT__REAL total;
    DT__SUM(DT__REAL, total, n, x[j] * y[j]);
    return total;
}

/* Returns the maximum of n >= 1 elements. The comparisons may skip a NaN. This does not hide the
   NaN, because the callers then compute the exponentials of all elements. */
DT__FN DT__REAL DT__K(largest)(const DT__REAL *x, int64_t n) {
    DT__REAL lane[16], max;
    int64_t at = 0;
    for (int l = 0; l < 16; l++) lane[l] = x[0];
    for (; at + 32 <= n; at += 32)
        for (int l = 0; l < 16; l++) {
            max = x[at + l] > x[at + l + 16] ? x[at + l] : x[at + l + 16];
            lane[l] = max > lane[l] ? max : lane[l];
        }
    for (; at < n; at++) lane[at % 16] = x[at] > lane[at % 16] ? x[at] : lane[at % 16];
    for (int l = 0; l < 8; l++) lane[l] = lane[l + 8] > lane[l] ? lane[l + 8] : lane[l];
    for (int l = 0; l < 4; l++) lane[l] = lane[l + 4] > lane[l] ? lane[l + 4] : lane[l];
    max = lane[0];
    for (int l = 1; l < 4; l++) max = lane[l] > max ? lane[l] : max;
    return max;
}

/* Computes y = e^(x - max) and returns the sum of y. */
DT__FN DT__REAL DT__K(exponentials)(
    const DT__REAL *__restrict__ x, int64_t n, DT__REAL max, DT__REAL *__restrict__ y) {
    DT__REAL total;
    DT__SUM(DT__REAL, total, n, (y[j] = DT__EXP_DOWN(x[j] - max)));
    return total;
}

DT__FN dt_status DT__K(binary)(const dt_binary_args *a) {
    DT__REAL out[DT__STRIP], buf_x[DT__STRIP], buf_y[DT__STRIP];
    dt__strips r = dt__strips_begin(a->shape);
    int64_t at_x, at_y, last = r.shape.nd - 1, step_x = a->stride_a[last],
                        step_y = a->stride_b[last];
    int mode = dt__store_mode(a->accumulate, dt_count(a->shape), a->dtype);
    while (dt__strips_next(&r, a->stride_a, a->stride_b, &at_x, &at_y)) {
        const DT__REAL *x = DT__K(load_strided)(a->dtype, a->a, at_x, step_x, r.n, buf_x);
        const DT__REAL *y = DT__K(load_strided)(a->dtype, a->b, at_y, step_y, r.n, buf_y);
        int64_t n = r.n;
        switch (a->op) {
            DT__EACH(DT_ADD, out, x[i] + y[i]);
            DT__EACH(DT_SUB, out, x[i] - y[i]);
            DT__EACH(DT_MUL, out, x[i] * y[i]);
            DT__EACH(DT_DIV, out, x[i] / y[i]);
            /* x != x: a NaN, which no other comparison chooses */
            DT__EACH(DT_MINIMUM, out, x[i] < y[i] || x[i] != x[i] ? x[i] : y[i]);
            DT__EACH(DT_MAXIMUM, out, x[i] > y[i] || x[i] != x[i] ? x[i] : y[i]);
            DT__EACH(DT_LESS, out, x[i] < y[i] ? 1 : 0);
            DT__EACH(DT_LESS_EQUAL, out, x[i] <= y[i] ? 1 : 0);
            DT__EACH(DT_EQUAL, out, x[i] == y[i] ? 1 : 0);
            DT__EACH(DT_STEP, out, x[i] < y[i] ? 0 : x[i] == y[i] ? (DT__REAL)0.5 : 1);
        default: return DT_ERR_ARG;
        }
        if (a->factor) {
            const DT__REAL *factor = DT__K(load)(a->dtype, a->factor, r.out, n, buf_x);
            for (int64_t i = 0; i < n; i++) out[i] *= factor[i];
        }
        if (a->negate)
            for (int64_t i = 0; i < n; i++) out[i] = -out[i];
        DT__K(store)(a->dtype, a->out, r.out, r.n, out, mode);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(where)(const dt_where_args *a) {
    DT__REAL out[DT__STRIP], buf_m[DT__STRIP], buf_x[DT__STRIP], buf_y[DT__STRIP];
    DT__REAL zeros[DT__STRIP] = { 0 };
    dt__strips r = dt__strips_begin(a->shape);
    int64_t at_m, at_x, last = r.shape.nd - 1;
    int mode = dt__store_mode(a->accumulate, dt_count(a->shape), a->dtype);
    while (dt__strips_next(&r, a->stride_mask, a->stride_a, &at_m, &at_x)) {
        int64_t at_y = dt__strips_offset(&r, a->stride_b);
        const DT__REAL *x = zeros, *y = zeros,
                       *mask = DT__K(load_strided)(
                           a->dtype, a->mask, at_m, a->stride_mask[last], r.n, buf_m);
        if (a->a) x = DT__K(load_strided)(a->dtype, a->a, at_x, a->stride_a[last], r.n, buf_x);
        if (a->b) y = DT__K(load_strided)(a->dtype, a->b, at_y, a->stride_b[last], r.n, buf_y);
        if (a->a) dt__prefetch(a->dtype, a->a, at_x + r.n, r.n);
        if (a->b) dt__prefetch(a->dtype, a->b, at_y + r.n, r.n);
        for (int64_t i = 0; i < r.n; i++) out[i] = DT__K(select)(mask[i] != 0, x[i], y[i]);
        DT__K(store)(a->dtype, a->out, r.out, r.n, out, mode);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(unary)(const dt_unary_args *a) {
    int64_t count = (int64_t)a->count;
    int mode = dt__store_mode(0, count, a->dtype);
    if (a->act < 0 || a->act >= DT_ACTS) return DT_ERR_ARG;
    DT__PARALLEL
    for (int64_t at = 0; at < count; at += DT__STRIP) {
        DT__REAL out[DT__STRIP], buf[DT__STRIP];
        int64_t n = count - at < DT__STRIP ? count - at : DT__STRIP;
        const DT__REAL *x = DT__K(load)(a->dtype, a->in, at, n, buf);
        dt__prefetch(a->dtype, a->in, at + n, n);
        DT__K(act)(a->act, x, n, out, (DT__REAL)a->scale, (DT__REAL)a->shift);
        DT__K(store)(a->dtype, a->out, at, n, out, mode);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(unary_back)(const dt_unary_back_args *a) {
    int64_t count = (int64_t)a->count;
    int mode = dt__store_mode(a->accumulate, count, a->dtype),
        is_choice = a->act == DT_ACT_RELU || a->act == DT_ACT_ABS || a->act == DT_ACT_CLAMP;
    if (a->act < 0 || a->act >= DT_ACTS) return DT_ERR_ARG;
    DT__PARALLEL
    for (int64_t at = 0; at < count; at += DT__STRIP) {
        DT__REAL dx[DT__STRIP], buf_x[DT__STRIP], buf_d[DT__STRIP];
        int64_t n = count - at < DT__STRIP ? count - at : DT__STRIP;
        const DT__REAL *x = a->in ? DT__K(load)(a->dtype, a->in, at, n, buf_x) : NULL;
        const DT__REAL *dout = DT__K(load)(a->dtype, a->dout, at, n, buf_d);
        if (is_choice) dt__prefetch(a->dtype, a->dout, at + n, n);
        DT__K(act_back)(a->act, x, dout, n, dx, (DT__REAL)a->scale, (DT__REAL)a->shift);
        DT__K(store)(a->dtype, a->dx, at, n, dx, mode);
    }
    return DT_OK;
}

/* Gated linear unit, arXiv:2002.05202: act(gate) * up; a row of the input holds gate and up. */
DT__FN dt_status DT__K(glu)(const dt_glu_args *a) {
    DT__REAL out[DT__STRIP], buf[DT__STRIP];
    int64_t cols = (int64_t)a->cols;
    int mode = dt__store_mode(0, (int64_t)a->rows * cols, a->dtype);
    if (a->act < 0 || a->act >= DT_ACT_AFFINE) return DT_ERR_ARG;
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        for (int64_t c = 0; c < cols; c += DT__STRIP) {
            int64_t n = cols - c < DT__STRIP ? cols - c : DT__STRIP;
            const DT__REAL *gate = DT__K(load)(a->dtype, a->in, 2 * r * cols + c, n, buf);
            dt__prefetch(a->dtype, a->in, (2 * r + 2) * cols + c, n);
            dt__prefetch(a->dtype, a->in, (2 * r + 3) * cols + c, n);
            DT__K(act)(a->act, gate, n, out, 1, 0);
            const DT__REAL *up = DT__K(load)(a->dtype, a->in, (2 * r + 1) * cols + c, n, buf);
            for (int64_t i = 0; i < n; i++) out[i] *= up[i];
            DT__K(store)(a->dtype, a->out, r * cols + c, n, out, mode);
        }
    }
    return DT_OK;
}

/* Computes the gradients of gate and up from that of act(gate) * up. Value and slope of SiLU and
   GELU share an exponential. */
DT__FN void DT__K(glu_slopes)(int act, const DT__REAL *gate, const DT__REAL *up,
    const DT__REAL *dout, int64_t n, DT__REAL *dgate, DT__REAL *dup) {
    DT__REAL slope, e[DT__STRIP];
#define DT__GATED(du, most) \
    DT__K(exp_minus_abs)(act, gate, n, e); \
    for (int64_t i = 0; i < n; i++) { \
        DT__REAL x = DT__K(within)(gate[i], most); \
        dup[i] = dout[i] * (gate[i] * DT__K(gated)(x, e[i], du, &slope)); \
        dgate[i] = dout[i] * up[i] * slope; \
    }
    if (act == DT_ACT_SILU) {
        DT__GATED(1, 88)
    } else if (act == DT_ACT_GELU) {
        DT__GATED(DT__GELU_2DU(x), 30)
    } else {
        for (int64_t i = 0; i < n; i++) dup[i] = dout[i] * up[i];
        DT__K(act_back)(act, gate, dup, n, dgate, 1, 0);
        DT__K(act)(act, gate, n, dup, 1, 0);
        for (int64_t i = 0; i < n; i++) dup[i] *= dout[i];
    }
#undef DT__GATED
}

DT__FN dt_status DT__K(glu_back)(const dt_glu_back_args *a) {
    DT__REAL dgate[DT__STRIP], dup[DT__STRIP], buf_x[DT__STRIP], buf_up[DT__STRIP],
        buf_d[DT__STRIP];
    int64_t cols = (int64_t)a->cols;
    int mode = dt__store_mode(a->accumulate, 2 * (int64_t)a->rows * cols, a->dtype);
    if (a->act < 0 || a->act >= DT_ACT_AFFINE) return DT_ERR_ARG;
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        for (int64_t c = 0; c < cols; c += DT__STRIP) {
            int64_t n = cols - c < DT__STRIP ? cols - c : DT__STRIP, gate_at = 2 * r * cols + c,
                    up_at = gate_at + cols;
            const DT__REAL *gate = DT__K(load)(a->dtype, a->in, gate_at, n, buf_x);
            const DT__REAL *up = DT__K(load)(a->dtype, a->in, up_at, n, buf_up);
            const DT__REAL *dout = DT__K(load)(a->dtype, a->dout, r * cols + c, n, buf_d);
            dt__prefetch(a->dtype, a->in, gate_at + 2 * cols, n);
            dt__prefetch(a->dtype, a->in, up_at + 2 * cols, n);
            dt__prefetch(a->dtype, a->dout, (r + 1) * cols + c, n);
            DT__K(glu_slopes)(a->act, gate, up, dout, n, dgate, dup);
            DT__K(store)(a->dtype, a->dx, gate_at, n, dgate, mode);
            DT__K(store)(a->dtype, a->dx, up_at, n, dup, mode);
        }
    }
    return DT_OK;
}

/* Sums along the last dimension. Each strip is summed in 16 lanes, and the sums of the strips are
   added in order. */
DT__FN dt_status DT__K(sum_rows)(const dt_sum_args *a) {
    DT__REAL buf[DT__STRIP];
    int64_t n = (int64_t)a->n;
    for (int64_t o = 0; o < (int64_t)a->outer; o++) {
        DT__REAL total = 0, partial;
        for (int64_t at = 0; at < n; at += DT__STRIP) {
            int64_t have = n - at < DT__STRIP ? n - at : DT__STRIP;
            const DT__REAL *x = DT__K(load)(a->dtype, a->in, o * n + at, have, buf);
            DT__SUM(DT__REAL, partial, have, x[j]);
            total += partial;
        }
        total *= (DT__REAL)a->scale;
        DT__K(store)(dt__wide(a->dtype, a->wide), a->out, o, 1, &total, a->accumulate);
    }
    return DT_OK;
}

/* Sums strips of columns over all n rows. Each sum is complete before it is added to the output. */
DT__FN dt_status DT__K(sum)(const dt_sum_args *a) {
    DT__REAL sum[DT__STRIP], buf[DT__STRIP], scale = (DT__REAL)a->scale;
    int64_t inner = (int64_t)a->inner, n = (int64_t)a->n;
    if (inner == 1) return DT__K(sum_rows)(a);
    for (int64_t o = 0; o < (int64_t)a->outer; o++) {
        for (int64_t c = 0; c < inner; c += DT__STRIP) {
            int64_t have = inner - c < DT__STRIP ? inner - c : DT__STRIP;
            memset(sum, 0, sizeof sum);
            int64_t j = 0;
            for (; !dt__narrow(a->dtype) && j + 4 <= n; j += 4) {
                const DT__REAL *x = (const DT__REAL *)a->in + (o * n + j) * inner + c;
                for (int64_t i = 0; i < have; i++)
                    sum[i] = sum[i] + x[i] + x[inner + i] + x[2 * inner + i] + x[3 * inner + i];
            }
            for (; j < n; j++) {
                const DT__REAL *x =
                    DT__K(load)(a->dtype, a->in, (o * n + j) * inner + c, have, buf);
                for (int64_t i = 0; i < have; i++) sum[i] += x[i];
            }
            if (scale != 1)
                for (int64_t i = 0; i < have; i++) sum[i] *= scale;
            DT__K(store)
            (dt__wide(a->dtype, a->wide), a->out, o * inner + c, have, sum, a->accumulate);
        }
    }
    return DT_OK;
}

/* Cumulative sums of rows. Each addition of a row waits for the one before, so 16 rows advance
   together: a transposed strip has them in the lanes of vectors. */
DT__FN void DT__K(cumsum_rows)(const dt_cumsum_args *a) {
    enum { ROWS = 16, VECTORS = ROWS * sizeof(DT__REAL) / sizeof(DT__V), SHORT_STRIP = 32 };
    DT__REAL out[ROWS][SHORT_STRIP], tile[SHORT_STRIP][ROWS] = { { 0 } }, last[ROWS];
    int64_t n = (int64_t)a->n, outer = (int64_t)a->outer;
    int mode = dt__store_mode(a->accumulate, outer * n, a->dtype);
    for (int64_t o = 0; o < outer; o += ROWS) {
        int rows = outer - o < ROWS ? (int)(outer - o) : ROWS;
        memset(last, 0, sizeof last);
        for (int64_t done = 0; done < n; done += SHORT_STRIP) {
            int64_t have = n - done < SHORT_STRIP ? n - done : (int64_t)SHORT_STRIP,
                    at = o * n + (a->reverse ? n - done - have : done);
            const DT__REAL *x[ROWS];
            for (int r = 0; r < ROWS; r++) { /* the last row again for rows that do not exist */
                int64_t from = at + (r < rows ? r : rows - 1) * n;
                x[r] = DT__K(load_short)(a->dtype, a->in, from, have, out[r]);
                dt__prefetch(a->dtype, a->in, from + (a->reverse ? -have : have), SHORT_STRIP);
            }
            for (int r = 0; r < ROWS; r += DT__TRANSPOSE)
                DT__K(transpose)(tile[0] + r, ROWS, x + r, have);
            DT__V sum[VECTORS];
            DT__UNROLL
            for (int v = 0; v < VECTORS; v++) sum[v] = DT__LOAD(last + v * DT__NV);
            for (int64_t l = 0; l < have; l++) {
                DT__REAL *term = tile[a->reverse ? have - 1 - l : l];
                DT__UNROLL
                for (int v = 0; v < VECTORS; v++) {
                    sum[v] = sum[v] + DT__LOAD(term + v * DT__NV);
                    DT__STORE(term + v * DT__NV, sum[v]);
                }
            }
            DT__UNROLL
            for (int v = 0; v < VECTORS; v++) DT__STORE(last + v * DT__NV, sum[v]);
            for (int64_t i = 0; i < have; i += DT__TRANSPOSE) {
                for (int r = 0; r < DT__TRANSPOSE; r++) x[r] = tile[i + r];
                DT__K(transpose)(out[0] + i, SHORT_STRIP, x, ROWS);
            }
            for (int r = 0; r < rows; r++)
                DT__K(store_short)(a->dtype, a->out, at + r * n, have, out[r], mode);
        }
    }
}

/* Adds row after row, in bands of columns whose sums fit into the first cache level. */
DT__FN dt_status DT__K(cumsum)(const dt_cumsum_args *a) {
    enum { BAND = 8 * DT__STRIP };
    DT__REAL sum[BAND], buf[DT__STRIP];
    int64_t inner = (int64_t)a->inner, n = (int64_t)a->n;
    int mode = dt__store_mode(a->accumulate, (int64_t)a->outer * n * inner, a->dtype);
    if (inner == 1) DT__K(cumsum_rows)(a);
    for (int64_t o = 0; o < (int64_t)a->outer && inner > 1; o++)
        for (int64_t band = 0; band < inner; band += BAND) {
            int64_t end = inner - band < BAND ? inner - band : (int64_t)BAND;
            memset(sum, 0, (size_t)end * sizeof *sum);
            for (int64_t l = 0; l < n; l++)
                for (int64_t c = 0; c < end; c += DT__STRIP) {
                    int64_t have = end - c < DT__STRIP ? end - c : DT__STRIP,
                            at = (o * n + (a->reverse ? n - 1 - l : l)) * inner + band + c;
                    const DT__REAL *x = DT__K(load)(a->dtype, a->in, at, have, buf);
                    dt__prefetch(a->dtype, a->in, a->reverse ? at - inner : at + inner, have);
                    for (int64_t i = 0; i < have; i++) sum[c + i] += x[i];
                    DT__K(store)(a->dtype, a->out, at, have, sum + c, mode);
                }
        }
    return DT_OK;
}

/* Returns 1 if a is greater than b in the order of max and topk, in which a NaN is greater than all
   numbers. */
DT__FN inline int DT__K(is_greater)(DT__REAL a, DT__REAL b) {
    return (a > b) | ((a != a) & (b == b));
}

/* Sixteen candidates for the maximum of a row, and their indices. */
typedef struct DT__K(maxima) {
    DT__REAL best[16];
    int32_t index[16];
} DT__K(maxima);

/* Compares elements at, at + 1, .. with the candidates. Returns 1 in lane l of nan if there is a
   NaN. */
DT__FN_INLINE void DT__K(maxima_update)(
    DT__K(maxima) * m, const DT__REAL *x, int32_t at, int32_t *nan) {
    for (int32_t l = 0; l < 16; l++) {
        DT__REAL value = x[l];
        m->index[l] = value > m->best[l] ? at + l : m->index[l];
        m->best[l] = value > m->best[l] ? value : m->best[l];
        nan[l] |= value != value;
    }
}

/* Finds the maximum of a strip and its index: the first NaN, or without a NaN the first maximum.
   Two groups of candidates halve the chain of dependent comparisons. */
DT__FN int32_t DT__K(argmax)(const DT__REAL *x, int32_t n) {
    DT__K(maxima) even, odd;
    int32_t nan[16] = { 0 }, nans = 0, at = 0, first = 0;
    for (int l = 0; l < 16; l++)
        even.best[l] = odd.best[l] = x[0], even.index[l] = odd.index[l] = 0;
    for (; at + 32 <= n; at += 32) {
        DT__K(maxima_update)(&even, x + at, at, nan);
        DT__K(maxima_update)(&odd, x + at + 16, at + 16, nan);
    }
    for (int l = 0; l < 16; l++) nans |= nan[l];
    for (int32_t i = at; i < n; i++) nans |= x[i] != x[i];
    while (nans && x[first] == x[first]) first++;
    if (nans) return first;
    for (int l = 0; l < 16; l++) {
        int is_odd = odd.best[l] > even.best[l] ||
                     (odd.best[l] == even.best[l] && odd.index[l] < even.index[l]);
        even.best[l] = is_odd ? odd.best[l] : even.best[l];
        even.index[l] = is_odd ? odd.index[l] : even.index[l];
    }
    DT__REAL best = even.best[0];
    first = even.index[0];
    for (int l = 1; l < 16; l++) {
        int is_better = even.best[l] > best || (even.best[l] == best && even.index[l] < first);
        best = is_better ? even.best[l] : best;
        first = is_better ? even.index[l] : first;
    }
    for (; at < n; at++)
        if (x[at] > x[first]) first = at;
    return first;
}

/* Finds the maximum and its index in each row. */
DT__FN dt_status DT__K(max_rows)(const dt_max_args *a) {
    enum { LONG_STRIP = 4 * DT__STRIP };
    DT__REAL buf[LONG_STRIP];
    int64_t n = (int64_t)a->n;
    for (int64_t o = 0; o < (int64_t)a->outer; o++) {
        DT__REAL best = 0;
        for (int64_t at = 0; at < n; at += LONG_STRIP) {
            int64_t have = n - at < LONG_STRIP ? n - at : (int64_t)LONG_STRIP;
            const DT__REAL *x = DT__K(load)(a->dtype, a->in, o * n + at, have, buf);
            dt__prefetch(a->dtype, a->in, o * n + at + have, have);
            int32_t i = DT__K(argmax)(x, (int32_t)have);
            if (at > 0 && !DT__K(is_greater)(x[i], best)) continue;
            best = x[i];
            a->index[o] = (int32_t)at + i;
        }
        DT__K(store)(a->dtype, a->out, o, 1, &best, 0);
    }
    return DT_OK;
}

/* Updates the maxima of n columns, and their rows, with row j, in the order of is_greater, but in a
   form that the compiler vectorizes. */
DT__FN void DT__K(maxima_of_rows)(
    const DT__REAL *x, int64_t n, int32_t j, DT__REAL *best, int32_t *index) {
    for (int64_t i = 0; i < n; i++) {
        DT__REAL a = x[i], b = best[i], larger = b != b ? b : a; /* if not a <= b: a NaN is large */
        int32_t before = index[i], row = b != b ? before : j;
        index[i] = a <= b ? before : row;
        best[i] = a <= b ? b : larger;
    }
}

/* Finds the maximum and its index, in strips of columns. */
DT__FN dt_status DT__K(max)(const dt_max_args *a) {
    DT__REAL best[DT__STRIP], buf[DT__STRIP];
    int64_t inner = (int64_t)a->inner, n = (int64_t)a->n;
    if (n < 1) return DT_ERR_ARG;
    if (inner == 1) return DT__K(max_rows)(a);
    for (int64_t o = 0; o < (int64_t)a->outer; o++) {
        for (int64_t c = 0; c < inner; c += DT__STRIP) {
            int64_t have = inner - c < DT__STRIP ? inner - c : DT__STRIP;
            int32_t *index = a->index + o * inner + c;
            memcpy(best, DT__K(load)(a->dtype, a->in, o * n * inner + c, have, buf),
                (size_t)have * sizeof *best);
            memset(index, 0, (size_t)have * sizeof *index);
            for (int64_t j = 1; j < n; j++) {
                const DT__REAL *x =
                    DT__K(load)(a->dtype, a->in, (o * n + j) * inner + c, have, buf);
                DT__K(maxima_of_rows)(x, have, (int32_t)j, best, index);
            }
            DT__K(store)(a->dtype, a->out, o * inner + c, have, best, 0);
        }
    }
    return DT_OK;
}

/* Returns gain + offset: `gain` itself if the offset is 0, else the array `to`. */
DT__FN const DT__REAL *DT__K(offset_gain)(
    DT__REAL *to, const DT__REAL *gain, int64_t cols, double offset) {
    if (offset == 0) return gain;
    for (int64_t c = 0; c < cols; c++) to[c] = gain[c] + (DT__REAL)offset;
    return to;
}

/* Layer normalization, arXiv:1607.06450. Makes two passes over the row, because E[x^2] - E[x]^2
   cancels. RMSNorm, arXiv:1910.07467, is the same computation with a mean of zero and no bias. */
DT__FN dt_status DT__K(norm)(const dt_norm_args *a) {
    int64_t cols = (int64_t)a->cols;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype)) return DT_ERR_ARG;
    DT__REAL *buf = (DT__REAL *)dt__align64(a->work), *out = buf + cols, *gain_buf = out + cols;
    const DT__REAL *gain = DT__K(load)(a->dtype, a->gain, 0, cols, gain_buf);
    const DT__REAL *bias = a->rms ? NULL : DT__K(load)(a->dtype, a->bias, 0, cols, gain_buf + cols);
    gain = DT__K(offset_gain)(gain_buf, gain, cols, a->gain_offset);
    int mode = dt__store_mode(0, (int64_t)a->rows * cols, a->dtype);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        const DT__REAL *x = DT__K(load)(a->dtype, a->in, r * cols, cols, buf);
        DT__REAL variance, mean = a->rms ? 0 : DT__K(total)(x, cols) / (DT__REAL)cols;
        DT__SUM(DT__REAL, variance, cols, (x[j] - mean) * (x[j] - mean));
        DT__REAL rstd = (DT__REAL)(1 / sqrt((double)variance / (double)cols + a->eps));
        DT__REAL *y = DT__K(results)(a->dtype, a->out, r * cols, out, mode);
        if (a->rms)
            for (int64_t c = 0; c < cols; c++) y[c] = x[c] * rstd * gain[c];
        else
            for (int64_t c = 0; c < cols; c++) y[c] = (x[c] - mean) * rstd * gain[c] + bias[c];
        DT__K(store)(a->dtype, a->out, r * cols, cols, y, mode);
        if (!a->rms) ((DT__REAL *)a->mean)[r] = mean;
        ((DT__REAL *)a->rstd)[r] = rstd;
    }
    return DT_OK;
}

/* The first pass of norm_back over a row: computes y, adds the row to dgain and dbias, and returns
   the sum of g. */
DT__FN DT__REAL DT__K(norm_back_row)(const DT__REAL *__restrict__ x,
    const DT__REAL *__restrict__ dout, const DT__REAL *__restrict__ gain, DT__REAL mean,
    DT__REAL rstd, int64_t cols, DT__REAL *__restrict__ y, DT__REAL *__restrict__ dgain,
    DT__REAL *__restrict__ dbias) {
    DT__REAL total;
    DT__SUM(DT__REAL, total, cols,
        (y[j] = (x[j] - mean) * rstd, dgain[j] += dout[j] * y[j], dbias[j] += dout[j],
            dout[j] * gain[j]));
    return total;
}

/* The backward of norm. Let y = (x - mean) rstd and g = dout gain. Then dx = rstd (g - mean(g) - y
   mean(g y)), dgain is the sum over rows of dout y, and dbias is the sum over rows of dout. The
   term mean(g) comes from the derivative of the mean, so RMSNorm does not have this term. `work`
   holds y, dx, widened rows, and the sums dgain and dbias, which are stored only when they are
   complete. */
DT__FN dt_status DT__K(norm_back)(const dt_norm_back_args *a) {
    int64_t cols = (int64_t)a->cols, ahead = cols < 2 * DT__STRIP ? cols : 2 * DT__STRIP;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype)) return DT_ERR_ARG;
    DT__REAL *y = (DT__REAL *)dt__align64(a->work), *dx = y + cols, *dgain = dx + cols,
             *dbias = dgain + cols;
    DT__REAL *buf = dbias + cols, *gain_buf = buf + cols;
    const DT__REAL *gain = DT__K(load)(a->dtype, a->gain, 0, cols, gain_buf);
    gain = DT__K(offset_gain)(gain_buf, gain, cols, a->gain_offset);
    memset(dgain, 0, 2 * (size_t)cols * sizeof *dgain);
    int mode = dt__store_mode(a->accumulate_x, (int64_t)a->rows * cols, a->dtype);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        DT__REAL mean = a->rms ? 0 : ((const DT__REAL *)a->mean)[r],
                 rstd = ((const DT__REAL *)a->rstd)[r];
        const DT__REAL *x = DT__K(load)(a->dtype, a->in, r * cols, cols, dx), /* before dx is */
            *dout = DT__K(load)(a->dtype, a->dout, r * cols, cols, buf);
        DT__REAL mean_g = DT__K(norm_back_row)(x, dout, gain, mean, rstd, cols, y, dgain, dbias);
        if (!a->dx) continue;
        DT__REAL mean_gy;
        dt__prefetch(a->dtype, a->in, (r + 1) * cols, ahead); /* while this row is in the cache */
        DT__SUM(DT__REAL, mean_gy, cols, dout[j] * gain[j] * y[j]);
        dt__prefetch(a->dtype, a->dout, (r + 1) * cols, ahead);
        mean_g = a->rms ? 0 : mean_g / (DT__REAL)cols;
        mean_gy /= (DT__REAL)cols;
        for (int64_t c = 0; c < cols; c++)
            dx[c] = rstd * (dout[c] * gain[c] - mean_g - y[c] * mean_gy);
        DT__K(store)(a->dtype, a->dx, r * cols, cols, dx, mode);
    }
    DT__K(store)(dt__wide(a->dtype, a->wide_gain), a->dgain, 0, cols, dgain, a->accumulate_gain);
    DT__K(store)(dt__wide(a->dtype, a->wide_bias), a->dbias, 0, cols, dbias, a->accumulate_bias);
    return DT_OK;
}

DT__FN dt_status DT__K(softmax)(const dt_softmax_args *a) {
    int64_t cols = (int64_t)a->cols;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype)) return DT_ERR_ARG;
    DT__REAL *out = (DT__REAL *)dt__align64(a->work), *buf = out + cols;
    int mode = dt__store_mode(0, (int64_t)a->rows * cols, a->dtype);
    for (int64_t r = 0; r < (int64_t)a->rows && cols > 0; r++) {
        const DT__REAL *x = DT__K(load)(a->dtype, a->in, r * cols, cols, buf);
        dt__prefetch(a->dtype, a->in, (r + 1) * cols, cols < 2 * DT__STRIP ? cols : 2 * DT__STRIP);
        DT__REAL inverse = 1 / DT__K(exponentials)(x, cols, DT__K(largest)(x, cols), out);
        DT__REAL *y = DT__K(results)(a->dtype, a->out, r * cols, out, mode);
        for (int64_t c = 0; c < cols; c++) y[c] = out[c] * inverse;
        DT__K(store)(a->dtype, a->out, r * cols, cols, y, mode);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(softmax_back)(const dt_softmax_back_args *a) {
    int64_t cols = (int64_t)a->cols;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype)) return DT_ERR_ARG;
    DT__REAL *dx = (DT__REAL *)dt__align64(a->work), *buf_y = dx + cols, *buf_d = buf_y + cols;
    int mode = dt__store_mode(a->accumulate, (int64_t)a->rows * cols, a->dtype);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        const DT__REAL *y = DT__K(load)(a->dtype, a->out, r * cols, cols, buf_y);
        const DT__REAL *dout = DT__K(load)(a->dtype, a->dout, r * cols, cols, buf_d);
        DT__REAL mean = DT__K(dot)(y, dout, cols);
        for (int64_t c = 0; c < cols; c++) dx[c] = y[c] * (dout[c] - mean);
        DT__K(store)(a->dtype, a->dx, r * cols, cols, dx, mode);
    }
    return DT_OK;
}

/* Computes the sine and cosine of an angle below 2^31, within 2^-52. Writes angle = n pi/2 + r with
   an integer n and |r| <= pi/4. pi/2 is the sum of three constants; the products of n and the first
   two are exact. The polynomials in r are those of fdlibm. Adding 1.5 * 2^52 rounds to the integer
   n and leaves n in the low bits, as in exp_reduced; n mod 4 is the quadrant. */
DT__FN_INLINE void DT__K(sine_cosine)(double angle, double *sine, double *cosine) {
    const double magic = 6755399441055744.0;
    double shifted = angle * 0.6366197723675814 + magic, n = shifted - magic;
    double r =
        angle - n * 1.570796012878418 - n * 3.139164164167596e-07 - n * 6.223372171896613e-14;
    double z = r * r, s = 1.58969099521155010221e-10, c = -1.13596475577881948265e-11;
    s = ((s * z - 2.50507602534068634195e-08) * z + 2.75573137070700676789e-06) * z;
    s = ((s - 1.98412698298579493134e-04) * z + 8.33333333332248946124e-03) * z;
    s = r + r * z * (s - 1.66666666666666324348e-01);
    c = ((c * z + 2.08757232129817482790e-09) * z - 2.75573143513906633035e-07) * z;
    c = ((c + 2.48015872894767294178e-05) * z - 1.38888888888741095749e-03) * z;
    c = 1 - (0.5 * z - z * z * (c + 4.16666666666666019037e-02));
    uint64_t quadrant;
    memcpy(&quadrant, &shifted, 8);
    double a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
    *sine = quadrant & 2 ? -a : a;
    *cosine = (quadrant + 1) & 2 ? -b : b;
}

/* Rotates the pairs of one head: pair i is elements 2i and 2i + 1 if interleaved, else i and
   half + i. */
DT__FN void DT__K(rotate)(const DT__REAL *__restrict__ x, const DT__REAL *__restrict__ cosine,
    const DT__REAL *__restrict__ sine, int64_t half, int interleaved, DT__REAL *__restrict__ out) {
    if (interleaved)
        for (int64_t i = 0; i < half; i++) {
            out[2 * i] = x[2 * i] * cosine[i] - x[2 * i + 1] * sine[i];
            out[2 * i + 1] = x[2 * i + 1] * cosine[i] + x[2 * i] * sine[i];
        }
    else
        for (int64_t i = 0; i < half; i++) {
            out[i] = x[i] * cosine[i] - x[half + i] * sine[i];
            out[half + i] = x[half + i] * cosine[i] + x[i] * sine[i];
        }
}

/* Rotary embedding (RoPE), arXiv:2104.09864. Rotates pair i of a head's elements, (x0, x1), by the
   angle position * rate(i). The rotated pair is (x0 cos - x1 sin, x1 cos + x0 sin). All
   heads of a token have the same angles. Angles, sines and cosines are computed in double, because
   in float the cosine loses its last digits at positions in the thousands. */
DT__FN dt_status DT__K(rope)(const dt_rope_args *a) {
    enum { MAX_PAIRS = 256 };
    int64_t dim = (int64_t)a->dim, rotary = (int64_t)a->rotary, half = rotary / 2,
            heads = (int64_t)a->heads, n;
    DT__REAL cosine[MAX_PAIRS], sine[MAX_PAIRS], buf[2 * MAX_PAIRS], out[2 * MAX_PAIRS];
    double rate[MAX_PAIRS];
    int mode = dt__store_mode(a->accumulate, (int64_t)a->tokens * heads * dim, a->dtype);
    if (rotary % 2 || rotary > dim || dim > 2 * MAX_PAIRS) return DT_ERR_ARG;
    for (int64_t i = 0; i < half; i++) rate[i] = dt_rope_rate(a, (size_t)i);
    double factor = a->scaling.kind == DT_ROPE_YARN ? a->scaling.attention : 1,
           sign = a->inverse ? -factor : factor;
    for (int64_t t = 0; t < (int64_t)a->tokens && dim > 0; t++) {
        double position = a->positions[t];
        for (int64_t i = 0; i < half; i++) {
            double s, c;
            DT__K(sine_cosine)(position * rate[i], &s, &c);
            cosine[i] = (DT__REAL)(factor * c);
            sine[i] = (DT__REAL)(sign * s);
        }
        for (int64_t h = t * heads; h < (t + 1) * heads; h += n) { /* as many heads as fit in buf */
            int64_t left = (t + 1) * heads - h;
            n = left < 2 * MAX_PAIRS / dim ? left : 2 * MAX_PAIRS / dim;
            const DT__REAL *x = DT__K(load)(a->dtype, a->in, h * dim, n * dim, buf);
            dt__prefetch(a->dtype, a->in, (h + n) * dim, n * dim);
            for (int64_t at = 0; at < n * dim; at += dim) {
                DT__K(rotate)(x + at, cosine, sine, half, a->interleaved, out + at);
                for (int64_t i = rotary; i < dim; i++) out[at + i] = x[at + i];
            }
            DT__K(store)(a->dtype, a->out, h * dim, n * dim, out, mode);
        }
    }
    return DT_OK;
}

/* Pooling, one step: adds element k of a window, in n channels, to the sums in `best`, or compares
   it with the maxima in `best`. */
DT__FN void DT__K(pool)(
    int pool, int32_t k, const DT__REAL *x, int64_t n, DT__REAL *best, int32_t *index) {
    if (k == 0) {
        memcpy(best, x, (size_t)n * sizeof *best);
        memset(index, 0, (size_t)n * sizeof *index);
    } else if (pool == DT_POOL_MEAN) {
        for (int64_t i = 0; i < n; i++) best[i] += x[i];
    } else {
        DT__K(maxima_of_rows)(x, n, k, best, index);
    }
}

/* im2col and pooling. Copies or combines a window's elements in order, in strips of channels. */
DT__FN dt_status DT__K(patches)(const dt_patches_args *a) {
    const dt_window *w = &a->window;
    DT__REAL buf[DT__STRIP], pad[DT__STRIP], best[DT__STRIP];
    int32_t index[DT__STRIP];
    int64_t each = w->kernel[0] * w->kernel[1], C = w->channels,
            positions = w->batch * w->out[0] * w->out[1], per_position = a->pool ? 1 : each;
    int mode = dt__store_mode(0, positions * per_position * C, a->dtype);
    for (int i = 0; i < DT__STRIP; i++) pad[i] = (DT__REAL)a->pad_value;
    for (int64_t at = 0; at < positions * C;) {
        int64_t c = at % C, n = C - c < DT__STRIP ? C - c : DT__STRIP, position = at / C,
                line = position / w->out[1], k = 0, to = position * per_position * C + c;
        int64_t image = line / w->out[0],
                y = (line - image * w->out[0]) * w->stride[0] - w->padding[0],
                x = (position - line * w->out[1]) * w->stride[1] - w->padding[1];
        for (int64_t row = y; k < each; row += w->dilation[0])
            for (int64_t i = 0; i < w->kernel[1]; i++, k++) {
                int64_t column = x + i * w->dilation[1],
                        from = ((image * w->in[0] + row) * w->in[1] + column) * C + c;
                int inside = row >= 0 && row < w->in[0] && column >= 0 && column < w->in[1];
                const DT__REAL *in = inside ? DT__K(load)(a->dtype, a->in, from, n, buf) : pad;
                dt__prefetch(a->dtype, a->in, from + (c + n < C ? n : w->stride[1] * C - c), n);
                if (!a->pool)
                    DT__K(store)(a->dtype, a->out, to + k * C, n, in, mode);
                else
                    DT__K(pool)(a->pool, (int32_t)k, in, n, best, index);
            }
        if (a->pool == DT_POOL_MEAN)
            for (int64_t i = 0; i < n; i++) best[i] *= (DT__REAL)(1.0 / (double)each);
        if (a->pool) DT__K(store)(a->dtype, a->out, to, n, best, mode);
        if (a->pool == DT_POOL_MAX && mode == DT__STREAM)
            DT__K(stream_copy)(a->index + to, index, (size_t)n * sizeof *index);
        else if (a->pool == DT_POOL_MAX)
            memcpy(a->index + to, index, (size_t)n * sizeof *index);
        at += n;
    }
    return DT_OK;
}

/* Returns the window position whose element k along `axis` (0: height, 1: width) is `pixel`:
   position * stride = pixel + padding - k * dilation. Returns -1 if there is none. */
DT__FN int64_t DT__K(window_position)(const dt_window *w, int axis, int64_t pixel, int64_t k) {
    int64_t at = pixel + w->padding[axis] - k * w->dilation[axis], position = at / w->stride[axis];
    int exists = at >= 0 && position < w->out[axis] && position * w->stride[axis] == at;
    return exists ? position : -1;
}

/* col2im and the backward of pooling. Collects the gradients of a pixel from all windows. */
DT__FN dt_status DT__K(patches_back)(const dt_patches_back_args *a) {
    const dt_window *w = &a->window;
    DT__REAL sum[DT__STRIP], buf[DT__STRIP];
    int64_t each = w->kernel[0] * w->kernel[1], C = w->channels,
            count = w->batch * w->in[0] * w->in[1] * C, n;
    int mode = dt__store_mode(a->accumulate, count, a->dtype);
    for (int64_t at = 0; at < count; at += n) {
        int64_t pixel = at / C, c = at - pixel * C, line = pixel / w->in[1],
                image = line / w->in[0];
        n = C - c < DT__STRIP ? C - c : DT__STRIP;
        memset(sum, 0, (size_t)n * sizeof *sum);
        for (int64_t i = 0; i < w->kernel[0]; i++) {
            int64_t y = DT__K(window_position)(w, 0, line - image * w->in[0], i);
            for (int64_t j = 0; j < w->kernel[1] && y >= 0; j++) {
                int64_t x = DT__K(window_position)(w, 1, pixel - line * w->in[1], j),
                        k = i * w->kernel[1] + j, from = (image * w->out[0] + y) * w->out[1] + x;
                if (x < 0) continue;
                from = (a->pool ? from : from * each + k) * C + c;
                const DT__REAL *d = DT__K(load)(a->dtype, a->dout, from, n, buf);
                if (a->pool == DT_POOL_MAX)
                    for (int64_t l = 0; l < n; l++)
                        sum[l] += DT__K(select)(a->index[from + l] == (int32_t)k, d[l], 0);
                else
                    for (int64_t l = 0; l < n; l++) sum[l] += d[l];
            }
        }
        if (a->pool == DT_POOL_MEAN)
            for (int64_t l = 0; l < n; l++) sum[l] *= (DT__REAL)(1.0 / (double)each);
        DT__K(store)(a->dtype, a->dx, at, n, sum, mode);
    }
    return DT_OK;
}

/* Adds the rows of dout, in order, to the rows of the table's gradient that their ids select. If
   the gradient is bf16 or f16, `work` holds the sums in the compute type. */
DT__FN dt_status DT__K(embedding_back)(const dt_embedding_back_args *a) {
    dt_dtype type = dt__wide(a->dtype, a->wide);
    int64_t cols = (int64_t)a->cols, all = a->table_rows * cols;
    int in_work = dt__narrow(type), accumulate = a->accumulate && !in_work;
    DT__REAL buf[DT__STRIP], *sum = (DT__REAL *)(in_work ? a->work : a->dtable);
    if (in_work && (!sum || a->work_bytes < (size_t)all * sizeof *sum)) return DT_ERR_ARG;
    if (!accumulate) memset(sum, 0, (size_t)all * sizeof *sum);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        int64_t row = a->ids[r] - a->offset;
        if ((row < 0 || row >= a->table_rows) && a->check_ids && a->ids[r] != -1) return DT_ERR_ARG;
        if (row < 0 || row >= a->table_rows) continue;
        for (int64_t c = 0; c < cols; c += DT__STRIP) {
            int64_t n = cols - c < DT__STRIP ? cols - c : DT__STRIP;
            const DT__REAL *dout = DT__K(load)(a->dtype, a->dout, r * cols + c, n, buf);
            DT__REAL *to = sum + row * cols + c;
            for (int64_t i = 0; i < n; i++) to[i] += dout[i];
        }
    }
    if (in_work) DT__K(store)(type, a->dtable, 0, all, sum, a->accumulate);
    return DT_OK;
}

#endif /* vector kernels of floating types */

// ==== 31. CPU kernels: attention ================================================================

/* Attention: out = softmax(scale q k^T) v. The naive version computes this definition.
   Flash attention, arXiv:2205.14135, computes the same result from tiles of keys, and never stores
   a matrix of TQ x TK scores. Online softmax keeps three values for each query: the maximum m of
   the scores so far, the sum l of e^(s - m), and the weighted sum o of e^(s - m) v. The scores s of
   the next tile of keys update them:

       m' = max(m, max s)    l' = e^(m - m') l + sum e^(s - m')    o' = e^(m - m') o + e^(s - m') v

   After the last tile out = o / l, and lse = m + log l (log-sum-exp). The backward recomputes
   p = e^(s - lse) tile by tile. The forward needs scratch memory for one block of queries and one
   tile of keys, whatever T is; the backward also needs the gradients of one head's keys and values.

                      tiles of keys           Each query of a block is one vector lane: scores^T is
                  +------+------+------+      (keys,queries), out^T is (dim,queries). So m, l and
       block of   | all  | some | none |      the factor e^(m - m') are vectors, and maxima and sums
       queries    |  of the keys are   |      over keys stay within a lane. A tile of which no query
                  |  visible   |skipped|      sees a key is skipped; a tile of which each query sees
                  +------+------+------+      all keys needs no mask.

   One micro-kernel computes all products. It reads its first operand with any strides, so nothing
   is transposed except q, dout, out and dq, once per block of queries:

       product                               first operand, one value at a time    vectors
       scores^T (keys,queries)  = k q^T      k, row by row                         q^T
       out^T    (dim,queries)  += v^T p^T    v, column by column                   p^T
       dp^T     (keys,queries)  = v dout^T   v, row by row                         dout^T
       dq^T     (dim,queries)  += k^T ds^T   k, column by column                   ds^T
       dv, dk   (keys,dim)     += p^T dout, ds^T q    p^T, ds^T, row by row        dout, q

   A sum over keys is one chain within each tile, and the sums of the tiles are added in ascending
   order. Tiles begin at multiples of DT__KEY_TILE keys for every query, and a key that a query does
   not see adds an exact zero. So the bits of a query's result do not depend on the other queries.
   If some queries of a block see a key whose v is not finite, the results of the other queries of
   the block become NaN too, because 0 times v is NaN.

   A block of few queries, as in generation, would leave most lanes empty. Each of its queries is
   computed by itself, with keys, then elements of v, as vector lanes; all sums keep their order.

   bf16 on processors with a fast dot product of pairs (section 29): a 32-bit word holds two
   consecutive terms of a sum, and a product takes half as many steps. Sums over dim read rows of q,
   k, v and dout as they are. Sums over keys or queries read words of two rows, and round p and ds
   to bf16. Scores, softmax and all sums are f32. */

/* this part is compiled once, before the kernels of the floating types */
#if DT__BITS == 1 && !defined(DT_NO_KERNELS)

/* ---- naive attention ---- */

/* Returns the dot product of n elements of x from `at_x` and of y from `at_y`. */
static double dt__naive_dot(
    dt_dtype tx, const void *x, int64_t at_x, dt_dtype ty, const void *y, int64_t at_y, int64_t n) {
    double sum = 0;
    for (int64_t d = 0; d < n; d++)
        sum += dt__number(tx, x, (size_t)(at_x + d)) * dt__number(ty, y, (size_t)(at_y + d));
    return sum;
}

/* Adds `weight` times the n elements of x from `at` to `sum`. A weight of 0 adds nothing. */
static void dt__naive_add(
    double *sum, double weight, dt_dtype type, const void *x, int64_t at, int64_t n) {
    for (int64_t d = 0; d < n && weight != 0; d++)
        sum[d] += weight * dt__number(type, x, (size_t)(at + d));
}

/* The index of the first element of query i of head h in q and out, and of the key j that this head
   reads in k and v. */
static int64_t dt__query_at(const dt_attention_args *a, int64_t s, int64_t h, int64_t i) {
    return ((s * a->tq + i) * a->heads + h) * a->dim;
}
static int64_t dt__key_at(const dt_attention_args *a, int64_t s, int64_t h, int64_t j) {
    return ((s * a->tk + j) * a->kv_heads + h * a->kv_heads / a->heads) * a->dim;
}

/* Returns the score of a query and a key: scale q k, soft-capped if soft_cap is set; -infinity if
   the mask hides the key. */
static double dt__naive_score(
    const dt_attention_args *a, int64_t s, int64_t h, int64_t i, int64_t j) {
    const dt_attention_mask *m = &a->mask;
    int64_t query = s * a->tq + i, key = s * a->tk + j;
    int64_t q_position = m->q_position ? m->q_position[query] : i + a->tk - a->tq,
            k_position = m->k_position ? m->k_position[key] : j;
    if (m->causal && k_position > q_position) return -INFINITY;
    if (m->window && q_position - k_position >= m->window) return -INFINITY;
    int32_t document = m->q_document ? m->q_document[query] : 0;
    if (m->k_document && m->k_document[key] != document) return -INFINITY;
    double score = a->scale * dt__naive_dot(a->dtype, a->q, dt__query_at(a, s, h, i), a->dtype,
                                  a->k, dt__key_at(a, s, h, j), a->dim);
    return a->soft_cap > 0 ? a->soft_cap * tanh(score / a->soft_cap) : score;
}

/* Naive attention, in double: for each query the scores of all keys, their softmax
   e^(score - lse), and the product of the softmax and v. Computes the scores again for each step,
   because a kernel has no memory of its own. With merge_lse, the result so far is one more key with
   the score `before`. */
static dt_status dt__naive_attention(const dt_attention_args *a) {
    dt_dtype to = dt__wide(a->dtype, a->wide), stat = dt__wide(a->dtype, 1);
    for (int64_t row = 0; row < a->batch * a->heads * a->tq; row++) { /* a row of lse (B,H,TQ) */
        int64_t i = row % a->tq, h = row / a->tq % a->heads, s = row / a->tq / a->heads,
                out = dt__query_at(a, s, h, i);
        double before = a->merge_lse ? dt__number(stat, a->lse, (size_t)row) : -INFINITY;
        double max = before, sum, lse, mix[DT__STRIP];
        for (int64_t j = 0; j < a->tk; j++) max = fmax(max, dt__naive_score(a, s, h, i, j));
        if (max == -INFINITY) max = 0; /* the query sees no key */
        sum = exp(before - max);
        for (int64_t j = 0; j < a->tk; j++) sum += exp(dt__naive_score(a, s, h, i, j) - max);
        lse = max + log(sum);
        dt__set_number(stat, a->lse, (size_t)row, lse);
        for (int64_t d = 0; d < a->dim; d += DT__STRIP) {
            int64_t n = a->dim - d < DT__STRIP ? a->dim - d : DT__STRIP;
            memset(mix, 0, sizeof mix);
            if (a->merge_lse && sum != 0)
                dt__naive_add(mix, exp(before - lse), to, a->out, out + d, n);
            for (int64_t j = 0; j < a->tk && sum != 0; j++)
                dt__naive_add(mix, exp(dt__naive_score(a, s, h, i, j) - lse), a->dtype, a->v,
                    dt__key_at(a, s, h, j) + d, n);
            for (int64_t c = 0; c < n; c++)
                dt__set_number(to, a->out, (size_t)(out + d + c), mix[c]);
        }
    }
    return DT_OK;
}

/* Computes p = e^(score - lse) of one query and one key, and the gradient of q k: with
   dp = dout v, ds = scale p (dp - sum over keys of p dp), where the sum equals dout out. The
   derivative of soft-capping is 1 - (score / soft_cap)^2. */
static void dt__naive_pair(const dt_attention_back_args *g, const dt_attention_args *a, int64_t s,
    int64_t h, int64_t i, int64_t j, double *p, double *ds) {
    int64_t q = dt__query_at(a, s, h, i), k = dt__key_at(a, s, h, j), D = a->dim;
    double lse =
        dt__number(dt__wide(a->dtype, 1), a->lse, (size_t)((s * a->heads + h) * a->tq + i));
    double score = dt__naive_score(a, s, h, i, j);
    *p = lse > -INFINITY ? exp(score - lse) : 0;
    *ds = 0;
    if (*p == 0) return;
    double t = a->soft_cap > 0 ? score / a->soft_cap : 0;
    *ds = a->scale * *p * (1 - t * t) *
          (dt__naive_dot(a->dtype, g->dout, q, a->dtype, a->v, k, D) -
              dt__naive_dot(a->dtype, g->dout, q, dt__wide(a->dtype, a->wide), a->out, q, D));
}

/* Stores n elements of a gradient, or adds them to it. Does nothing if `array` is NULL. */
static void dt__naive_store(
    dt_dtype type, void *array, int64_t at, int64_t n, const double *sum, int accumulate) {
    for (int64_t d = 0; d < n && array; d++)
        dt__set_number(type, array, (size_t)(at + d),
            sum[d] + (accumulate ? dt__number(type, array, (size_t)(at + d)) : 0));
}

/* The naive backward: dq = sum over keys of ds k, dk = sum over queries of ds q, dv = sum over
   queries of p dout. The queries of all heads that read a key add to the key's gradients. */
static dt_status dt__naive_attention_back(
    const dt_attention_back_args *g, const dt_attention_args *a) {
    dt_dtype to = dt__wide(a->dtype, a->wide), type = a->dtype;
    int64_t H = a->heads, group = H / a->kv_heads;
    double p, ds, sum[DT__STRIP], sum_v[DT__STRIP];
    for (int64_t d = 0; d < a->dim; d += DT__STRIP) {
        int64_t n = a->dim - d < DT__STRIP ? a->dim - d : DT__STRIP;
        for (int64_t row = 0; row < a->batch * H * a->tq; row++) {
            int64_t i = row % a->tq, h = row / a->tq % H, s = row / a->tq / H;
            memset(sum, 0, sizeof sum);
            for (int64_t j = 0; j < a->tk && g->dq; j++) {
                dt__naive_pair(g, a, s, h, i, j, &p, &ds);
                dt__naive_add(sum, ds, type, a->k, dt__key_at(a, s, h, j) + d, n);
            }
            dt__naive_store(to, g->dq, dt__query_at(a, s, h, i) + d, n, sum, g->accumulate_q);
        }
        for (int64_t row = 0; row < a->batch * a->kv_heads * a->tk; row++) {
            int64_t j = row % a->tk, kv = row / a->tk % a->kv_heads, s = row / a->tk / a->kv_heads,
                    key = dt__key_at(a, s, kv * group, j) + d;
            memset(sum, 0, sizeof sum);
            memset(sum_v, 0, sizeof sum_v);
            for (int64_t r = 0; r < group * a->tq; r++) {
                int64_t h = kv * group + r / a->tq, i = r % a->tq,
                        query = dt__query_at(a, s, h, i) + d;
                dt__naive_pair(g, a, s, h, i, j, &p, &ds);
                dt__naive_add(sum, ds, type, a->q, query, n);
                dt__naive_add(sum_v, p, type, g->dout, query, n);
            }
            dt__naive_store(to, g->dk, key, n, sum, g->accumulate_k);
            dt__naive_store(to, g->dv, key, n, sum_v, g->accumulate_v);
        }
    }
    return DT_OK;
}

/* ---- flash attention: which keys the queries see ---- */

typedef struct dt__query_range { /* the positions and documents of some queries */
    int32_t latest, earliest, lowest, highest;
} dt__query_range;

/* A block of queries. All query heads that read one key/value head form one list of queries: first
   all queries of the first head, then those of the next. Blocks divide this list, so the heads
   share the tiles of keys (grouped-query attention, arXiv:2305.13245: H query heads share K
   key/value heads; K = H is multi-head attention, K = 1 is multi-query attention). The lanes of a
   block are computed in groups of NR. */
typedef struct dt__query_block {
    int64_t queries, lanes;          /* lanes: `queries` rounded up to a multiple of NR */
    int64_t at[DT__QUERY_BLOCK];     /* the query's first element in q and out */
    int64_t lse_at[DT__QUERY_BLOCK]; /* the query's element in lse */
    int32_t position[DT__QUERY_BLOCK], document[DT__QUERY_BLOCK];
    dt__query_range range[DT__QUERY_BLOCK / 4]; /* of each group of NR >= 4 lanes */
} dt__query_block;

/* A tile of keys. */
typedef struct dt__key_tile {
    int64_t first, count;
    int32_t position[DT__KEY_TILE], document[DT__KEY_TILE];
} dt__key_tile;

/* The keys of a tile that a group of NR queries sees: no query sees keys from `end` on, and all
   queries see all keys before `unmasked`. A sliding window also hides keys at the start of a tile:
   they are masked, or end is 0 if no query sees any key. */
typedef struct dt__visible {
    int64_t unmasked, end;
} dt__visible;

/* Returns the range of the nr queries from `lane` on. */
static dt__query_range dt__query_range_make(
    const dt_attention_args *a, const dt__query_block *b, int64_t lane, int64_t nr) {
    dt__query_range q = { INT32_MIN, INT32_MAX, INT32_MAX, INT32_MIN };
    for (int64_t l = lane; l < lane + nr; l++) {
        q.latest = b->position[l] > q.latest ? b->position[l] : q.latest;
        q.earliest = b->position[l] < q.earliest ? b->position[l] : q.earliest;
        q.lowest = b->document[l] < q.lowest ? b->document[l] : q.lowest;
        q.highest = b->document[l] > q.highest ? b->document[l] : q.highest;
    }
    if (!a->mask.causal) q.latest = q.earliest = INT32_MAX;
    return q;
}

/* Makes the block that begins with query `first` of key/value head kv of sequence s. Lanes after
   the last query copy its position and document, so they widen no range of visible keys. */
static void dt__query_block_make(dt__query_block *b, const dt_attention_args *a, int64_t s,
    int64_t kv, int64_t first, int64_t nr) {
    int64_t group = a->heads / a->kv_heads, left = group * a->tq - first;
    const dt_attention_mask *m = &a->mask;
    b->queries = left < DT__QUERY_BLOCK ? left : (int64_t)DT__QUERY_BLOCK;
    b->lanes = (b->queries + nr - 1) / nr * nr;
    for (int64_t l = 0; l < b->lanes; l++) {
        int64_t r = first + (l < b->queries ? l : b->queries - 1), h = kv * group + r / a->tq,
                i = r % a->tq;
        b->at[l] = dt__query_at(a, s, h, i);
        b->lse_at[l] = (s * a->heads + h) * a->tq + i;
        b->position[l] =
            m->q_position ? m->q_position[s * a->tq + i] : (int32_t)(i + a->tk - a->tq);
        b->document[l] = m->k_document && m->q_document ? m->q_document[s * a->tq + i] : 0;
    }
    for (int64_t l = 0; l < b->lanes; l += nr) b->range[l / nr] = dt__query_range_make(a, b, l, nr);
}

/* Returns 1 if the mask hides key j of the tile from a query. */
static int dt__is_hidden(const dt_attention_mask *m, int32_t position, int32_t document,
    const dt__key_tile *t, int64_t j) {
    return (m->causal && t->position[j] > position) ||
           (m->window && position >= (int64_t)t->position[j] + m->window) ||
           (m->k_document && t->document[j] != document);
}

static void dt__key_tile_make(
    dt__key_tile *t, const dt_attention_args *a, int64_t s, int64_t first) {
    const dt_attention_mask *m = &a->mask;
    t->first = first;
    t->count = a->tk - first < DT__KEY_TILE ? a->tk - first : (int64_t)DT__KEY_TILE;
    for (int64_t j = 0; j < t->count; j++) {
        t->position[j] =
            m->k_position ? m->k_position[s * a->tk + first + j] : (int32_t)(first + j);
        t->document[j] = m->k_document ? m->k_document[s * a->tk + first + j] : 0;
    }
}

/* Returns which keys of the tile the queries of a range see. */
static dt__visible dt__visible_keys(
    const dt_attention_args *a, dt__query_range q, const dt__key_tile *t) {
    dt__visible v = { 0, t->count };
    /* keys up to these positions are before the window of every query, and of some query */
    int64_t all_past = a->mask.window ? (int64_t)q.earliest - a->mask.window : INT64_MIN,
            some_past = a->mask.window ? (int64_t)q.latest - a->mask.window : INT64_MIN;
    if (!a->mask.k_position && !a->mask.k_document) { /* keys lie at their positions */
        int64_t seen = (int64_t)q.latest + 1 - t->first, all = (int64_t)q.earliest + 1 - t->first;
        if (seen < v.end) v.end = seen > 0 ? seen : 0;
        if (t->first + v.end - 1 <= all_past) v.end = 0;
        if (t->first > some_past && all > 0) v.unmasked = all < v.end ? all : v.end;
        return v;
    }
    while (
        v.end > 0 && (t->position[v.end - 1] > q.latest || t->position[v.end - 1] <= all_past ||
                         t->document[v.end - 1] > q.highest || t->document[v.end - 1] < q.lowest))
        v.end--;
    while (v.unmasked < v.end && t->position[v.unmasked] <= q.earliest &&
           t->position[v.unmasked] > some_past && t->document[v.unmasked] == q.lowest &&
           q.lowest == q.highest)
        v.unmasked++;
    return v;
}

/* Sliding-window attention skips the tiles of keys before the window, and causal attention those
   after the queries. Returns the first key of the first tile that may be visible to a query of the
   block; sets *end to a bound after the last key. If the keys have positions of their own
   (mask.k_position), the range is all keys. */
static int64_t dt__key_range(const dt_attention_args *a, const dt__query_block *b, int64_t *end) {
    int64_t first = 0;
    *end = a->tk;
    if (!a->mask.causal || a->mask.k_position) return 0;
    dt__query_range q = dt__query_range_make(a, b, 0, b->queries);
    if ((int64_t)q.latest + 1 < *end) *end = (int64_t)q.latest + 1;
    if (a->mask.window) first = (int64_t)q.earliest - a->mask.window + 1;
    return first > 0 ? first / DT__KEY_TILE * DT__KEY_TILE : 0;
}

/* Finds out which keys of the tile each group of nr lanes sees. Returns the number of keys up to
   the last one that any query of the block sees; 0 means that the tile is skipped. */
static int64_t dt__visible_tile(const dt_attention_args *a, const dt__query_block *b, int64_t nr,
    const dt__key_tile *t, dt__visible *visible) {
    int64_t end = 0;
    for (int64_t lane = 0; lane < b->lanes; lane += nr) {
        visible[lane / nr] = dt__visible_keys(a, b->range[lane / nr], t);
        end = visible[lane / nr].end > end ? visible[lane / nr].end : end;
    }
    return end;
}

#elif DT__FLOATS /* the flash kernels of one floating type */

/* ---- flash attention ---- */

static const DT__REAL DT__K(ones)[DT__LANES] = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 };

/* The scratch arrays of one thread. D is the dimension of a head, QB is DT__QUERY_BLOCK, KT is
   DT__KEY_TILE. `wide` is D rounded up to a multiple of DT__LANES. A word is one element, or a pair
   of bf16 if `per` is 2; the shapes count words, with W = wide / per. An operand's name ends in
   `_keys` or `_queries` if words go along keys or queries. Without pairs, such an array is the one
   above it. */
typedef struct DT__K(attention_work) {
    int64_t wide, per, row;    /* row: words of a row, W */
    DT__REAL *k, *v;           /* (KT,W) each: the tile of keys */
    DT__REAL *k_keys, *v_keys; /* (KT / per,wide) */
    DT__REAL *q, *dout;        /* (QB,W): the block; without pairs q is multiplied by scale */
    DT__REAL *q_queries, *dout_queries; /* (QB / per,wide) */
    DT__REAL *q_lanes, *dout_lanes;     /* (W,QB) each: q and dout transposed */
    DT__REAL *p, *ds;                   /* (KT,QB) elements: p^T and ds^T */
    DT__REAL *p_keys, *ds_keys;         /* (KT / per,QB) */
    DT__REAL *p_queries, *ds_queries;   /* (KT,QB / per) */
    DT__REAL *out;        /* (wide,QB) elements: out^T in the forward, dq^T in the backward */
    DT__REAL *out_rows;   /* (QB,wide) elements: `out` transposed, in the memory of q */
    DT__REAL *dk, *dv;    /* (keys,wide) each: the sums of one head; only the backward has them */
    DT__REAL score_scale; /* factor of the scores: scale with pairs, 1 without */
    /* for each query of the block, in the forward: m and l; in the backward: lse and dout out */
    DT__REAL max[DT__QUERY_BLOCK], sum[DT__QUERY_BLOCK];
    DT__REAL lse[DT__QUERY_BLOCK], mean[DT__QUERY_BLOCK];
    void (*micro_kernel)(int64_t k, const DT__REAL *a, int64_t row, int64_t step, const DT__REAL *b,
        int64_t ldb, DT__REAL *tile, int64_t ld, const DT__REAL *factor);
    void (*row_kernel)(int64_t k, const DT__REAL *a, int64_t row, int64_t step, const DT__REAL *b,
        int64_t ldb, DT__REAL *tile, int64_t ld, const DT__REAL *factor);
} DT__K(attention_work);

/* Returns a / per, rounded up: the steps of a sum of n terms. */
DT__FN int64_t DT__K(steps)(const DT__K(attention_work) * w, int64_t n) {
    return (n + w->per - 1) / w->per;
}

/* Divides one thread's scratch memory of `bytes` bytes. */
DT__FN void DT__K(attention_work_at)(
    DT__K(attention_work) * w, void *work, size_t bytes, int64_t tk, const dt_attention_args *a) {
    int64_t wide = (a->dim + DT__LANES - 1) / DT__LANES * DT__LANES, keys = (tk + 15) / 16 * 16;
    int64_t scores = DT__KEY_TILE * DT__LANE_ROW;
    char *own = (char *)work + (size_t)dt__omp_thread() * bytes;
    w->wide = w->row = wide;
    w->per = 1;
    w->k = w->k_keys = (DT__REAL *)dt__align64(own);
    w->v = w->v_keys = w->k + DT__KEY_TILE * wide;
    w->q = w->q_queries = w->out_rows = w->v + DT__KEY_TILE * wide;
    w->dout = w->dout_queries = w->q + DT__QUERY_BLOCK * wide;
    w->q_lanes = w->dout + DT__QUERY_BLOCK * wide;
    w->dout_lanes = w->q_lanes + DT__LANE_ROW * wide;
    w->out = w->dout_lanes + DT__LANE_ROW * wide;
    w->p = w->p_keys = w->p_queries = w->out + DT__LANE_ROW * wide;
    w->ds = w->ds_keys = w->ds_queries = w->p + scores;
    w->dk = w->ds + scores;
    w->score_scale = 1;
    w->micro_kernel = DT__K(attention_micro_kernel);
    w->row_kernel = DT__K(attention_row_kernel);
#if DT__ISA == 2
    if (a->dtype == DT_BF16 && dt__bf16_pairs_are_fast()) {
        w->per = 2;
        w->row = wide / 2;
        w->k_keys = w->k + DT__KEY_TILE * wide / 2;
        w->v_keys = w->v + DT__KEY_TILE * wide / 2;
        w->q_queries = w->q + DT__QUERY_BLOCK * wide / 2;
        w->dout_queries = w->dout + DT__QUERY_BLOCK * wide / 2;
        w->p_keys = w->p_queries = w->ds + scores;
        w->ds_keys = w->p_keys + scores / 2;
        w->ds_queries = w->ds_keys + scores / 2;
        w->dk = w->ds_queries + scores / 2;
        w->score_scale = (DT__REAL)a->scale;
        w->micro_kernel = DT__K(attention_pair_micro_kernel);
        w->row_kernel = DT__K(attention_pair_row_kernel);
    }
#endif
    w->dv = w->dk + keys * wide;
}

/* Loads one row of `dim` elements, and fills it up with zeros. */
DT__FN void DT__K(load_row)(DT__REAL *to, const DT__K(attention_work) * w, dt_dtype dtype,
    const void *from, int64_t at, int64_t dim) {
    if (w->per > 1) {
        const uint16_t *half = (const uint16_t *)from + at;
        for (; dim >= 32; dim -= 32, to += 16, half += 32) memcpy(to, half, 64);
        if (dim > 0) memcpy(memset(to, 0, 64), half, (size_t)dim * 2);
        return;
    }
    const DT__REAL *row = DT__K(load)(dtype, from, at, dim, to);
    if (row != to) memcpy(to, row, (size_t)dim * sizeof *to);
    for (int64_t i = dim; i < w->wide; i++) to[i] = 0;
}

/* Makes words along rows from `n` rows of words along columns: word i of row r holds element i of
   rows 2r and 2r + 1. Does nothing without pairs, or if `to` is NULL. */
DT__FN void DT__K(pair_rows)(
    DT__REAL *to, const DT__K(attention_work) * w, const DT__REAL *rows, int64_t n) {
#if DT__ISA == 2
    const uint16_t *row = (const uint16_t *)rows;
    for (int64_t r = 0; r < n && w->per > 1 && to; r += 2, row += 2 * w->wide)
        for (int64_t i = 0; i < w->wide; i += 16, to += 16) {
            __m256i one = _mm256_loadu_si256((const __m256i *)(const void *)(row + i)), two = one;
            if (r + 1 < n)
                two = _mm256_loadu_si256((const __m256i *)(const void *)(row + w->wide + i));
            __m512i low = _mm512_maskz_cvtepu16_epi32(0xffff, one),
                    high = _mm512_maskz_slli_epi32(
                        0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, two), 16);
            _mm512_storeu_si512(to, r + 1 < n ? _mm512_or_si512(low, high) : low);
        }
#else
    (void)to, (void)w, (void)rows, (void)n;
#endif
}

/* Loads the first n keys or values of a tile, and zeros for the keys that complete the last panel
   of DT__ATTENTION_MR keys. */
DT__FN void DT__K(load_keys)(DT__REAL *to, DT__REAL *to_keys, const DT__K(attention_work) * w,
    const dt_attention_args *a, const void *from, int64_t at, int64_t n) {
    int64_t all = (n + DT__ATTENTION_MR - 1) / DT__ATTENTION_MR * DT__ATTENTION_MR;
    int64_t ld = a->kv_heads * a->dim;
    for (int64_t j = 0; j < n; j++) {
        /* the next tile: a head's rows lie apart, so the processor does not prefetch them */
        dt__prefetch(a->dtype, from, at + (j + DT__KEY_TILE) * ld, a->dim);
        DT__K(load_row)(to + j * w->row, w, a->dtype, from, at + j * ld, a->dim);
    }
    if (all > n) memset(to + n * w->row, 0, (size_t)((all - n) * w->row) * sizeof *to);
    DT__K(pair_rows)(to_keys, w, to, all);
}

/* Loads the block's rows of q or dout, times `scale`, and transposes them to `lanes`, unless that
   is NULL. Lanes without a query are zero. */
DT__FN void DT__K(load_queries)(DT__REAL *rows, DT__REAL *queries, DT__REAL *lanes,
    const DT__K(attention_work) * w, const dt_attention_args *a, const dt__query_block *b,
    const void *from, DT__REAL scale) {
    for (int64_t l = 0; l < b->lanes; l++) {
        DT__REAL *row = rows + l * w->row;
        if (l + 16 < b->queries) dt__prefetch(a->dtype, from, b->at[l + 16], a->dim);
        if (l < b->queries)
            DT__K(load_row)(row, w, a->dtype, from, b->at[l], a->dim);
        else
            memset(row, 0, (size_t)w->row * sizeof *row);
        for (int64_t i = 0; i < a->dim && w->per == 1; i++) row[i] *= scale;
    }
    DT__K(pair_rows)(queries, w, rows, b->lanes);
    for (int64_t l = 0; l < b->lanes && lanes; l += DT__TRANSPOSE) {
        const DT__REAL *row[DT__TRANSPOSE];
        for (int64_t i = 0; i < DT__TRANSPOSE; i++) row[i] = rows + (l + i) * w->row;
        DT__K(transpose)(lanes + l, DT__LANE_ROW, row, DT__K(steps)(w, a->dim));
    }
}

/* Rounds 32 elements to bf16: to 16 words. */
#if DT__ISA == 2
#pragma push_macro("DT__FN")
#undef DT__FN
#define DT__FN static __attribute__((target("avx512f,avx512bw,avx512bf16")))
DT__FN inline void DT__K(pair_lanes)(DT__REAL *to, const DT__REAL *x) {
    __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
    _mm512_storeu_si512(to, (__m512i)pairs);
}

/* Rounds n rows of NR scores, which are DT__LANE_ROW elements apart, to words along keys and to
   words along queries. Either result may be NULL. If n is odd, row n is zero. */
DT__FN void DT__K(pair_scores)(
    DT__REAL *by_keys, DT__REAL *by_queries, const DT__REAL *scores, int64_t lane, int64_t n) {
    int16_t order[32]; /* word i of the result: elements i and 16 + i */
    for (int i = 0; i < 32; i++) order[i] = (int16_t)(i / 2 + i % 2 * 16);
    __m512i interleave = _mm512_loadu_si512(order);
    for (int64_t j = 0; j < n; j += 2) {
        const DT__REAL *row = scores + j * DT__LANE_ROW + lane, *next = row + DT__LANE_ROW;
        for (int64_t l = 0; l < DT__NR && by_keys; l += 16) {
            __m512 one = _mm512_loadu_ps(row + l), two = _mm512_loadu_ps(next + l);
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(two, one);
            both = _mm512_maskz_permutexvar_epi16(0xffffffffu, interleave, both);
            _mm512_storeu_si512(by_keys + j / 2 * DT__LANE_ROW + lane + l, both);
        }
        for (int64_t i = j; i < j + 2 && by_queries; i++, row = next)
            DT__K(pair_lanes)(by_queries + (i * DT__LANE_ROW + lane) / 2, row);
    }
}
#pragma pop_macro("DT__FN")
#endif

/* Transposes w->out into w->out_rows, one row for each query. */
DT__FN void DT__K(transpose_out)(const DT__K(attention_work) * w, const dt__query_block *b) {
    for (int64_t d = 0; d < w->wide; d += DT__TRANSPOSE) {
        const DT__REAL *row[DT__TRANSPOSE];
        for (int64_t i = 0; i < DT__TRANSPOSE; i++) row[i] = w->out + (d + i) * DT__LANE_ROW;
        DT__K(transpose)(w->out_rows + d, w->wide, row, b->lanes);
    }
}

/* Masks key j of the tile: sets row[l] to -infinity for every query l that does not see the key. */
DT__FN void DT__K(mask_row)(DT__REAL *row, const dt_attention_mask *mask, const int32_t *position,
    const int32_t *document, const dt__key_tile *t, int64_t j) {
    int32_t k_position = mask->causal ? t->position[j] : INT32_MIN, k_document = t->document[j];
    for (int l = 0; l < DT__NR; l++)
        row[l] = DT__K(select)(k_position > position[l], (DT__REAL)-INFINITY, row[l]);
    if (mask->window) {
        int64_t last = (int64_t)k_position + mask->window; /* the first query past the window */
        for (int l = 0; l < DT__NR; l++)
            row[l] = DT__K(select)(position[l] >= last, (DT__REAL)-INFINITY, row[l]);
    }
    if (!mask->k_document) return;
    for (int l = 0; l < DT__NR; l++)
        row[l] = DT__K(select)(k_document != document[l], (DT__REAL)-INFINITY, row[l]);
}

/* Soft-capping of a row of scores: s becomes cap tanh(s / cap). */
DT__FN void DT__K(cap_row)(DT__REAL *row, DT__REAL cap) {
    for (int l = 0; l < DT__NR; l++) row[l] = cap * DT__TANH(row[l] / cap);
}

/* Computes `to` (keys,NR) for the first n keys of the tile and NR lanes: the products of `rows`,
   which is k or v, and `lanes`, which is q^T or dout^T. */
DT__FN void DT__K(scores)(DT__REAL *to, const DT__K(attention_work) * w, const DT__REAL *rows,
    const DT__REAL *lanes, int64_t n, int64_t dim) {
    for (int64_t j = 0; j < n; j += DT__ATTENTION_MR)
        w->micro_kernel(DT__K(steps)(w, dim), rows + j * w->row, w->row, 1, lanes, DT__LANE_ROW,
            to + j * DT__LANE_ROW, DT__LANE_ROW, NULL);
}

/* Computes to = factor * to + rows^T scores: (dim,NR) for NR lanes, summed over the first n keys of
   the tile. `rows` is v or k; `scores` is p^T or ds^T; both have words along keys. */
DT__FN void DT__K(weighted_sums)(DT__REAL *to, const DT__K(attention_work) * w,
    const DT__REAL *rows, const DT__REAL *scores, int64_t n, int64_t dim, const DT__REAL *factor) {
    for (int64_t d = 0; d < dim; d += DT__ATTENTION_MR)
        w->micro_kernel(DT__K(steps)(w, n), rows + d, 1, w->wide, scores, DT__LANE_ROW,
            to + d * DT__LANE_ROW, DT__LANE_ROW, factor);
}

/* Scales, caps and masks the scores of key j and NR lanes; masks all scores from key v.end on. */
DT__FN void DT__K(finish_scores)(DT__REAL *row, const DT__K(attention_work) * w,
    const dt_attention_args *a, const dt__query_block *b, int64_t lane, const dt__key_tile *t,
    dt__visible v, int64_t j) {
    DT__REAL scale = w->score_scale;
    for (int l = 0; l < DT__NR; l++) row[l] *= scale;
    if (a->soft_cap > 0) DT__K(cap_row)(row, (DT__REAL)a->soft_cap);
    if (j >= v.unmasked && j < v.end) DT__K(mask_row)
    (row, &a->mask, b->position + lane, b->document + lane, t, j);
    for (int l = 0; l < DT__NR && j >= v.end; l++) row[l] = (DT__REAL)-INFINITY;
}

/* Online softmax of a tile for NR lanes. Replaces the scores s in w->p by p = e^(s - m'), and
   updates m and l, a panel of keys at a time in registers. factor[l] receives e^(m - m'). */
#define DT__SOFTMAX_MAX(i) \
    x = row[i * DT__LANE_ROW + l] * scale; \
    row[i * DT__LANE_ROW + l] = x; \
    m = x > m ? x : m;
#define DT__SOFTMAX_SUM(i) x += row[i * DT__LANE_ROW + l];
DT__FN void DT__K(softmax_tile)(DT__K(attention_work) * w, const dt_attention_args *a,
    const dt__query_block *b, int64_t lane, const dt__key_tile *t, dt__visible v,
    DT__REAL *factor) {
    DT__REAL max[DT__NR], sum[DT__NR], *row = w->p + lane, x, m;
    for (int l = 0; l < DT__NR; l++) max[l] = w->max[lane + l];
    for (int64_t j = 0; j < v.end; j += DT__ATTENTION_MR, row += DT__ATTENTION_MR * DT__LANE_ROW) {
        int finish = a->soft_cap > 0 || j + DT__ATTENTION_MR > v.unmasked;
        DT__REAL scale = finish ? 1 : w->score_scale;
        for (int64_t i = 0; i < DT__ATTENTION_MR && finish; i++)
            DT__K(finish_scores)(row + i * DT__LANE_ROW, w, a, b, lane, t, v, j + i);
        for (int l = 0; l < DT__NR; l++) {
            m = max[l];
            DT__ATTENTION_ROWS(DT__SOFTMAX_MAX)
            max[l] = m;
        }
    }
    for (int l = 0; l < DT__NR; l++) {
        m = w->max[lane + l];
        w->max[lane + l] = max[l];
        /* if the query has seen no key yet, 0 in place of m' gives e^(-infinity - 0) = 0 */
        max[l] = max[l] == (DT__REAL)-INFINITY ? 0 : max[l];
        factor[l] = DT__EXP(m - max[l]);
        sum[l] = 0;
    }
    row = w->p + lane;
    for (int64_t j = 0; j < v.end; j += DT__ATTENTION_MR, row += DT__ATTENTION_MR * DT__LANE_ROW) {
        for (DT__REAL *at = row; at < row + DT__ATTENTION_MR * DT__LANE_ROW; at += DT__LANE_ROW)
            for (int l = 0; l < DT__NR; l++) at[l] = DT__EXP_DOWN(at[l] - max[l]);
        for (int l = 0; l < DT__NR; l++) {
            x = sum[l];
            DT__ATTENTION_ROWS(DT__SOFTMAX_SUM)
            sum[l] = x;
        }
    }
    for (int l = 0; l < DT__NR; l++) w->sum[lane + l] = w->sum[lane + l] * factor[l] + sum[l];
}

/* Stores out = o / l and lse = m + log l of the block's queries. Log-sum-exp merge: if merge_lse is
   set, out and lse hold the result for other keys on entry, and the result for both sets of keys on
   return. With out_here and lse_here, the result for this call's keys, the merged result is

       lse' = log(e^lse + e^lse_here)    out' = e^(lse - lse') out + e^(lse_here - lse') out_here */
DT__FN void DT__K(store_out)(
    const DT__K(attention_work) * w, const dt_attention_args *a, const dt__query_block *b) {
    dt_dtype to = dt__wide(a->dtype, a->wide);
    for (int64_t r = 0; r < b->queries; r++) {
        DT__REAL buf[DT__STRIP],
            *lse = (DT__REAL *)a->lse + b->lse_at[r], sum = w->sum[r],
            lse_here = sum > 0 ? w->max[r] + DT__LOG(sum) : (DT__REAL)-INFINITY, old_factor = 0,
            factor = 0, lse_both = lse_here;
        if (a->merge_lse && *lse > lse_here)
            lse_both = *lse + DT__LOG(1 + DT__EXP(lse_here - *lse));
        else if (a->merge_lse && lse_here > (DT__REAL)-INFINITY)
            lse_both = lse_here + DT__LOG(1 + DT__EXP(*lse - lse_here));
        if (sum > 0) factor = DT__EXP(lse_here - lse_both) / sum;
        if (a->merge_lse && *lse > (DT__REAL)-INFINITY) old_factor = DT__EXP(*lse - lse_both);
        *lse = lse_both;
        for (int64_t d = 0; d < a->dim; d += DT__STRIP) {
            int64_t n = a->dim - d < DT__STRIP ? a->dim - d : DT__STRIP, at = b->at[r] + d;
            DT__REAL *row = w->out_rows + r * w->wide + d;
            for (int64_t i = 0; i < n; i++) row[i] *= factor;
            if (a->merge_lse) {
                const DT__REAL *old_out = DT__K(load)(to, a->out, at, n, buf);
                for (int64_t i = 0; i < n; i++) row[i] += old_factor * old_out[i];
            }
            DT__K(store)(to, a->out, at, n, row, 0);
        }
    }
}

/* Online softmax of a tile for query r, whose scores are the first elements of w->p: computes what
   softmax_tile computes for one of its lanes. Returns e^(m - m'). */
DT__FN DT__REAL DT__K(softmax_row)(DT__K(attention_work) * w, const dt_attention_args *a,
    const dt__query_block *b, int64_t r, const dt__key_tile *t, dt__visible v) {
    DT__REAL *s = w->p, max = w->max[r], sum = 0, factor;
    for (int64_t j = 0; j < v.end; j++) s[j] *= w->score_scale;
    for (int64_t j = 0; j < v.end && a->soft_cap > 0; j += DT__NR)
        DT__K(cap_row)(s + j, (DT__REAL)a->soft_cap);
    for (int64_t j = v.unmasked; j < v.end; j++)
        if (dt__is_hidden(&a->mask, b->position[r], b->document[r], t, j)) s[j] = -INFINITY;
    for (int64_t j = 0; j < v.end; j++) max = s[j] > max ? s[j] : max;
    DT__REAL shift = max == (DT__REAL)-INFINITY ? 0 : max; /* as in softmax_tile */
    factor = DT__EXP(w->max[r] - shift);
    for (int64_t j = 0; j < v.end; j++) s[j] = DT__EXP_DOWN(s[j] - shift);
    for (int64_t j = 0; j < v.end; j++) sum += s[j];
    w->max[r] = max;
    w->sum[r] = w->sum[r] * factor + sum;
    return factor;
}

/* Flash attention of query r, one of few, over one tile of keys. `keys` (W,KT) holds the tile's
   keys transposed, `out` (wide) the query's sums. */
DT__FN void DT__K(attention_row)(DT__K(attention_work) * w, const dt_attention_args *a,
    const dt__query_block *b, int64_t r, const dt__key_tile *t, const DT__REAL *keys,
    DT__REAL *out) {
    dt__visible v = dt__visible_keys(a, dt__query_range_make(a, b, r, 1), t);
    DT__REAL factor[DT__NR], value;
    if (v.end == 0) return;
    for (int64_t j = 0; j < v.end; j += DT__NR)
        w->row_kernel(DT__K(steps)(w, a->dim), w->q + r * w->row, 0, 1, keys + j, DT__KEY_TILE,
            w->p + j, 0, NULL);
    value = DT__K(softmax_row)(w, a, b, r, t, v);
    for (int l = 0; l < DT__NR; l++) factor[l] = value;
#if DT__ISA == 2
    if (w->per > 1) {
        w->p[v.end] = 0; /* the other half of the last word if v.end is odd */
        for (int64_t j = 0; j < v.end; j += DT__NR) DT__K(pair_lanes)(w->p_keys + j / 2, w->p + j);
    }
#endif
    for (int64_t d = 0; d < w->wide; d += DT__NR)
        w->row_kernel(
            DT__K(steps)(w, v.end), w->p_keys, 0, 1, w->v_keys + d, w->wide, out + d, 0, factor);
}

/* Flash attention of a block of few queries over one tile of keys. */
DT__FN void DT__K(attention_rows)(DT__K(attention_work) * w, const dt_attention_args *a,
    const dt__query_block *b, const dt__key_tile *t, int64_t end) {
    DT__REAL *keys = w->dout_lanes; /* memory that only the backward needs */
    for (int64_t j = 0; j < end; j += DT__TRANSPOSE) {
        const DT__REAL *row[DT__TRANSPOSE]; /* keys after the end are not read again */
        for (int64_t i = 0; i < DT__TRANSPOSE; i++) row[i] = w->k + (j + i) * w->row;
        DT__K(transpose)(keys + j, DT__KEY_TILE, row, DT__K(steps)(w, a->dim));
    }
    for (int64_t r = 0; r < b->queries; r++)
        DT__K(attention_row)(w, a, b, r, t, keys, w->out_rows + r * w->wide);
}

/* Flash attention of a block of queries, as lanes, over one tile of keys. */
DT__FN void DT__K(attention_lanes)(DT__K(attention_work) * w, const dt_attention_args *a,
    const dt__query_block *b, const dt__key_tile *t, const dt__visible *visible) {
    DT__REAL factor[DT__NR];
    for (int64_t lane = 0; lane < b->lanes; lane += DT__NR) {
        dt__visible v = visible[lane / DT__NR];
        if (v.end == 0) continue;
        DT__K(scores)(w->p + lane, w, w->k, w->q_lanes + lane, v.end, a->dim);
        DT__K(softmax_tile)(w, a, b, lane, t, v, factor);
#if DT__ISA == 2
        if (w->per > 1) DT__K(pair_scores)(w->p_keys, NULL, w->p, lane, v.end);
#endif
        DT__K(weighted_sums)
        (w->out + lane, w, w->v_keys, w->p_keys + lane, v.end, a->dim, factor);
    }
}

/* Flash attention of one block of queries: all tiles of keys in ascending order. */
DT__FN void DT__K(attention_block)(
    const dt_attention_args *a, int64_t s, int64_t kv, int64_t first) {
    DT__K(attention_work) w;
    dt__query_block b;
    dt__key_tile t;
    dt__visible visible[DT__QUERY_BLOCK / DT__NR];
    int64_t last;
    DT__K(attention_work_at)(&w, a->work, a->work_bytes, 0, a);
    dt__query_block_make(&b, a, s, kv, first, DT__NR);
    int few = b.queries <= DT__FEW_QUERIES;
    DT__K(load_queries)
    (w.q, NULL, few ? NULL : w.q_lanes, &w, a, &b, a->q, (DT__REAL)a->scale);
    if (few) w.out_rows = w.out; /* `out` is not transposed, and q stays */
    memset(w.out, 0, (size_t)((few ? b.queries : (int64_t)DT__LANE_ROW) * w.wide) * sizeof *w.out);
    for (int64_t l = 0; l < b.lanes; l++) w.max[l] = (DT__REAL)-INFINITY, w.sum[l] = 0;
    for (int64_t j = dt__key_range(a, &b, &last); j < last; j += DT__KEY_TILE) {
        dt__key_tile_make(&t, a, s, j);
        int64_t end = dt__visible_tile(a, &b, DT__NR, &t, visible),
                at = ((s * a->tk + j) * a->kv_heads + kv) * a->dim;
        if (end == 0) continue;
        DT__K(load_keys)(w.k, NULL, &w, a, a->k, at, end);
        DT__K(load_keys)(w.v, w.v_keys, &w, a, a->v, at, end);
        if (few)
            DT__K(attention_rows)(&w, a, &b, &t, end);
        else
            DT__K(attention_lanes)(&w, a, &b, &t, visible);
    }
    if (!few) DT__K(transpose_out)(&w, &b);
    DT__K(store_out)(&w, a, &b);
}

DT__FN dt_status DT__K(attention)(const dt_attention_args *a) {
    int64_t K = a->kv_heads;
    if (K < 1 || a->heads % K) return DT_ERR_ARG;
    if (!a->work) return dt__naive_attention(a);
    if (a->work_bytes < dt_attention_work(0, a->dim, a->dtype)) return DT_ERR_ARG;
    int64_t queries = a->heads / K * a->tq,
            blocks = (queries + DT__QUERY_BLOCK - 1) / DT__QUERY_BLOCK;
    dt_attention_args own = *a;
    own.work_bytes /= (size_t)dt__omp_threads(); /* the bytes of each thread */
    DT__PARALLEL
    for (int64_t g = 0; g < a->batch * K * blocks; g++) DT__K(attention_block)
    (&own, g / blocks / K, g / blocks % K, g % blocks * DT__QUERY_BLOCK);
    return DT_OK;
}

/* Loads lse and the mean of dp, which is dot(dout, out), of each query of the block. */
DT__FN void DT__K(load_softmax)(DT__K(attention_work) * w, const dt_attention_args *a,
    const dt__query_block *b, const void *dout_array) {
    for (int64_t l = 0; l < b->lanes; l++) {
        DT__REAL buf[DT__STRIP], dout_buf[DT__STRIP], partial;
        /* infinity makes p = 0 if the lane has no query, or if the query sees no key */
        w->lse[l] = (DT__REAL)INFINITY;
        w->mean[l] = 0;
        if (l >= b->queries) continue;
        if (l + 16 < b->queries)
            dt__prefetch(dt__wide(a->dtype, a->wide), a->out, b->at[l + 16], a->dim);
        DT__REAL lse = ((const DT__REAL *)a->lse)[b->lse_at[l]];
        if (lse > (DT__REAL)-INFINITY) w->lse[l] = lse;
        for (int64_t d = 0; d < a->dim; d += DT__STRIP) {
            int64_t n = a->dim - d < DT__STRIP ? a->dim - d : DT__STRIP;
            const DT__REAL *dout = DT__K(load)(a->dtype, dout_array, b->at[l] + d, n, dout_buf);
            const DT__REAL *out =
                DT__K(load)(dt__wide(a->dtype, a->wide), a->out, b->at[l] + d, n, buf);
            DT__SUM(DT__REAL, partial, n, dout[j] * out[j]);
            w->mean[l] += partial;
        }
    }
}

/* The backward of softmax for NR lanes of a tile: p = e^(s - lse) and ds = p (dp - mean), with
   soft-capping times its derivative 1 - (s / cap)^2. On entry w->p holds the scores and w->ds holds
   dp. On return they hold p and ds, which are 0 from key v.end up to `end`. */
DT__FN void DT__K(softmax_back_tile)(const DT__K(attention_work) * w, const dt_attention_args *a,
    const dt__query_block *b, int64_t lane, const dt__key_tile *t, dt__visible v, int64_t end) {
    const DT__REAL *lse = w->lse + lane, *mean = w->mean + lane, cap = (DT__REAL)a->soft_cap;
    for (int64_t j = 0; j < end; j++) {
        DT__REAL *p = w->p + j * DT__LANE_ROW + lane, *ds = w->ds + j * DT__LANE_ROW + lane, x;
        int finish = cap > 0 || j >= v.unmasked;
        DT__REAL scale = finish ? 1 : w->score_scale;
        if (j >= v.end) {
            for (int l = 0; l < DT__NR; l++) p[l] = ds[l] = 0;
            continue;
        }
        for (int l = 0; l < DT__NR; l++) ds[l] -= mean[l];
        if (finish) DT__K(finish_scores)(p, w, a, b, lane, t, v, j);
        for (int l = 0; l < DT__NR && cap > 0; l++)
            ds[l] *= p[l] < -cap ? 0 : 1 - p[l] / cap * (p[l] / cap);
        DT__INDEPENDENT
        for (int l = 0; l < DT__NR; l++) {
            x = DT__EXP_DOWN(p[l] * scale - lse[l]);
            ds[l] = x * ds[l];
            p[l] = x;
        }
    }
}

DT__FN void DT__K(scale_row)(DT__REAL *row, int64_t n, DT__REAL factor) {
    for (int64_t i = 0; i < n; i++) row[i] *= factor;
}

/* Adds the contribution of the lanes [lane, lane + n) to the gradients of the first `end` keys of a
   tile. `to` (keys,wide) is dk or dv; `scores` is ds^T or p^T; `rows` is q or dout; both have words
   along queries. */
DT__FN void DT__K(add_key_grads)(DT__REAL *to, const DT__K(attention_work) * w,
    const DT__REAL *scores, const DT__REAL *rows, int64_t lane, int64_t n, int64_t end,
    int64_t dim) {
    for (int64_t j = 0; j < end; j += DT__ATTENTION_MR)
        for (int64_t d = 0; d < dim; d += DT__NR)
            w->micro_kernel(n / w->per, scores + (j * DT__LANE_ROW + lane) / w->per,
                DT__LANE_ROW / w->per, 1, rows + lane / w->per * w->wide + d, w->wide,
                to + j * w->wide + d, w->wide, DT__K(ones));
}

/* The backward of one block of queries and one tile of keys. */
DT__FN void DT__K(attention_back_tile)(const dt_attention_back_args *g,
    const DT__K(attention_work) * w, const dt_attention_args *a, const dt__query_block *b,
    const dt__key_tile *t, const dt__visible *visible, int64_t end) {
    int64_t first = b->lanes, last = 0, D = a->dim;
    for (int64_t lane = 0; lane < b->lanes; lane += DT__NR) {
        if (visible[lane / DT__NR].end == 0) continue;
        if (first > lane) first = lane;
        last = lane + DT__NR;
    }
    end = (end + DT__ATTENTION_MR - 1) / DT__ATTENTION_MR * DT__ATTENTION_MR;
    for (int64_t lane = first; lane < last; lane += DT__NR) {
        dt__visible v = visible[lane / DT__NR];
        DT__K(scores)(w->p + lane, w, w->k, w->q_lanes + lane, v.end, D);
        DT__K(scores)(w->ds + lane, w, w->v, w->dout_lanes + lane, v.end, D);
        DT__K(softmax_back_tile)(w, a, b, lane, t, v, end);
#if DT__ISA == 2
        if (w->per > 1) {
            DT__K(pair_scores)(NULL, w->p_queries, w->p, lane, end);
            DT__K(pair_scores)(w->ds_keys, w->ds_queries, w->ds, lane, end);
        }
#endif
        if (g->dq) DT__K(weighted_sums)
        (w->out + lane, w, w->k_keys, w->ds_keys + lane, v.end, D, DT__K(ones));
    }
    if (g->dk) DT__K(add_key_grads)
    (w->dk + t->first * w->wide, w, w->ds_queries, w->q_queries, first, last - first, end, D);
    if (g->dv) DT__K(add_key_grads)
    (w->dv + t->first * w->wide, w, w->p_queries, w->dout_queries, first, last - first, end, D);
}

DT__FN void DT__K(attention_back_block)(const dt_attention_back_args *g, DT__K(attention_work) * w,
    const dt_attention_args *a, int64_t s, int64_t kv, int64_t first) {
    dt__query_block b;
    dt__key_tile t;
    dt__visible visible[DT__QUERY_BLOCK / DT__NR];
    int64_t last;
    dt__query_block_make(&b, a, s, kv, first, DT__NR);
    DT__K(load_queries)(w->q, w->q_queries, w->q_lanes, w, a, &b, a->q, (DT__REAL)a->scale);
    DT__K(load_queries)(w->dout, w->dout_queries, w->dout_lanes, w, a, &b, g->dout, 1);
    DT__K(load_softmax)(w, a, &b, g->dout);
    for (int64_t d = 0; d < w->wide; d++)
        memset(w->out + d * DT__LANE_ROW, 0, (size_t)b.lanes * sizeof *w->out);
    for (int64_t j = dt__key_range(a, &b, &last); j < last; j += DT__KEY_TILE) {
        dt__key_tile_make(&t, a, s, j);
        int64_t end = dt__visible_tile(a, &b, DT__NR, &t, visible),
                at = ((s * a->tk + j) * a->kv_heads + kv) * a->dim;
        if (end == 0) continue;
        DT__K(load_keys)(w->k, w->k_keys, w, a, a->k, at, end);
        DT__K(load_keys)(w->v, NULL, w, a, a->v, at, end);
        DT__K(attention_back_tile)(g, w, a, &b, &t, visible, end);
    }
    if (!g->dq) return;
    DT__K(transpose_out)(w, &b);
    DT__K(scale_row)(w->out_rows, b.queries * w->wide, (DT__REAL)a->scale);
    for (int64_t r = 0; r < b.queries; r++) {
        DT__REAL *row = w->out_rows + r * w->wide;
        DT__K(store)(dt__wide(a->dtype, a->wide), g->dq, b.at[r], a->dim, row, g->accumulate_q);
    }
}

/* The backward of one key/value head. The gradient of its keys and values is a sum over the blocks
   of queries, in ascending order. */
DT__FN void DT__K(attention_back_kv_head)(
    const dt_attention_back_args *g, const dt_attention_args *a, int64_t s, int64_t kv) {
    DT__K(attention_work) w;
    int64_t queries = a->heads / a->kv_heads * a->tq, D = a->dim;
    dt_dtype to = dt__wide(a->dtype, a->wide);
    DT__K(attention_work_at)(&w, g->work, g->work_bytes, a->tk, a);
    memset(w.dk, 0, (size_t)(2 * (w.dv - w.dk)) * sizeof *w.dk); /* clears dk and dv */
    for (int64_t first = 0; first < queries; first += DT__QUERY_BLOCK)
        DT__K(attention_back_block)(g, &w, a, s, kv, first);
    if (w.score_scale != 1) DT__K(scale_row)(w.dk, a->tk * w.wide, w.score_scale);
    for (int64_t j = 0; j < a->tk; j++) {
        int64_t at = ((s * a->tk + j) * a->kv_heads + kv) * D, ahead = at + 8 * a->kv_heads * D;
        if (g->dk) dt__prefetch(to, g->dk, ahead, D);
        if (g->dv) dt__prefetch(to, g->dv, ahead, D);
        DT__K(store)(to, g->dk, at, D, w.dk + j * w.wide, g->accumulate_k);
        DT__K(store)(to, g->dv, at, D, w.dv + j * w.wide, g->accumulate_v);
    }
}

DT__FN dt_status DT__K(attention_back)(const dt_attention_back_args *g) {
    int64_t K = g->kv_heads;
    /* the arguments in the form that the code of the forward reads; nothing writes out and lse */
    dt_attention_args a = { .dtype = g->dtype,
        .out = (void *)(uintptr_t)g->out,
        .lse = (void *)(uintptr_t)g->lse,
        .q = g->q,
        .k = g->k,
        .v = g->v,
        .batch = g->batch,
        .tq = g->tq,
        .tk = g->tk,
        .heads = g->heads,
        .kv_heads = K,
        .dim = g->dim,
        .scale = g->scale,
        .mask = g->mask,
        .merge_lse = 0,
        .wide = g->wide,
        .soft_cap = g->soft_cap };
    if (K < 1 || g->heads % K) return DT_ERR_ARG;
    if (!g->work) return dt__naive_attention_back(g, &a);
    if (g->work_bytes < dt_attention_work(g->tk, g->dim, g->dtype)) return DT_ERR_ARG;
    dt_attention_back_args own = *g;
    own.work_bytes /= (size_t)dt__omp_threads(); /* the bytes of each thread */
    DT__PARALLEL
    for (int64_t i = 0; i < g->batch * K; i++)
        DT__K(attention_back_kv_head)(&own, &a, i / K, i % K);
    return DT_OK;
}
#endif

// ==== 32. CPU kernels: losses and optimizers ====================================================

#if DT__FLOATS && DT__VECTORS
/* Log-sum-exp of the first n logits of a row: returns max + log(sum of e^(x - max)). The largest
   term is 1, so nothing overflows. The exponentials are computed in the compute type, their sum and
   its logarithm in double. Meanwhile prefetches the next row, which begins at element `next`. */
DT__FN double DT__K(log_sum_exp)(
    const dt_cross_entropy_args *a, const DT__REAL *x, int64_t n, int64_t next) {
    DT__REAL max = DT__K(largest)(x, n), e[DT__STRIP];
    double sum = 0;
    for (int64_t c = 0; c < n; c += DT__STRIP) {
        int64_t have = n - c < DT__STRIP ? n - c : DT__STRIP;
        double partial;
        dt__prefetch(a->dtype, a->logits, next + c, have);
        for (int64_t i = 0; i < have; i++) e[i] = DT__EXP_DOWN(x[c + i] - max);
        DT__SUM(double, partial, have, (double)e[j]);
        sum += partial;
    }
    return (double)max + log(sum);
}

/* Computes three values for each row: lse, the log-sum-exp over the columns; `on`, the label's
   target probability times its logit, if the label is one of the columns; and `off`, the sum of the
   target probability of smoothing times logit. If the vocabulary is not sharded, the loss is
   lse - on - off. Otherwise cross_entropy_merge combines the values of all shards. */
DT__FN dt_status DT__K(cross_entropy)(const dt_cross_entropy_args *a) {
    double total = 0, squares = 0, s = a->smoothing;
    int64_t cols = (int64_t)a->cols, vocab = a->vocab || a->partial ? (int64_t)a->vocab : cols;
    int64_t all = a->partial ? a->full_vocab : vocab, offset = a->partial ? a->offset : 0;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype) || vocab > cols) return DT_ERR_ARG;
    for (size_t r = 0; r < a->rows; r++) {
        int64_t at = (int64_t)r * cols;
        const DT__REAL *x =
            DT__K(load)(a->dtype, a->logits, at, cols, (DT__REAL *)dt__align64(a->work));
        int64_t label = a->labels[r], column = label - offset;
        double lse = 0, on = 0, off = 0;
        if (label >= all) return DT_ERR_ARG;
        if (label >= 0) lse = vocab > 0 ? DT__K(log_sum_exp)(a, x, vocab, at + cols) : -INFINITY;
        if (label >= 0 && column >= 0 && column < vocab) on = (1 - s) * (double)x[column];
        if (label >= 0 && s > 0) {
            DT__SUM(double, off, vocab, (double)x[j]);
            off = s * (off / (double)all);
        }
        if (a->partial) {
            a->partial[2 * r] = lse;
            a->partial[2 * r + 1] = on + off;
            continue;
        }
        ((DT__REAL *)a->lse)[r] = (DT__REAL)lse;
        a->row_loss[r] = lse - on - off;
        total += a->row_loss[r];
        squares += lse * lse;
    }
    if (a->partial) return DT_OK;
    *a->loss = (a->accumulate ? *a->loss : 0) + total / a->denominator;
    if (a->z_loss) *a->z_loss = (a->accumulate ? *a->z_loss : 0) + squares / a->denominator;
    return DT_OK;
}

DT__FN dt_status DT__K(cross_entropy_back)(const dt_cross_entropy_back_args *a) {
    DT__REAL factor = (DT__REAL)(*a->upstream * a->scale);
    int64_t cols = (int64_t)a->cols, vocab = a->vocab || a->full_vocab ? (int64_t)a->vocab : cols;
    int64_t all = a->full_vocab ? a->full_vocab : vocab;
    int mode = dt__store_mode(a->accumulate, (int64_t)a->rows * cols, a->dtype);
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype) || vocab > cols) return DT_ERR_ARG;
    DT__REAL *d = (DT__REAL *)dt__align64(a->work), *buf = d + cols;
    DT__REAL off = factor * (DT__REAL)(a->smoothing / (double)all),
             on = factor * (DT__REAL)(1 - a->smoothing);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        const DT__REAL *x = DT__K(load)(a->dtype, a->logits, r * cols, cols, buf);
        DT__REAL lse = ((const DT__REAL *)a->lse)[r],
                 scale = factor * (1 + (DT__REAL)(2 * a->z) * lse);
        int64_t label = a->labels[r], column = label - a->offset;
        if (label >= all) return DT_ERR_ARG;
        int64_t real = label >= 0 ? vocab : 0; /* columns with a gradient */
        memset(d + real, 0, (size_t)(cols - real) * sizeof *d);
        for (int64_t c = 0; c < real; c++) d[c] = scale * DT__EXP_DOWN(x[c] - lse) - off;
        if (label >= 0 && column >= 0 && column < vocab) d[column] -= on;
        DT__K(store)(a->dtype, a->dlogits, r * cols, cols, d, mode);
    }
    return DT_OK;
}

/* BCE is max(x,0) - x y + ln(1 + e^-|x|), without cancellation where y is 0 or 1. */
DT__FN dt_status DT__K(pair_loss)(const dt_pair_loss_args *a) {
    double total = 0;
    if (a->kind != DT_PAIR_SQUARE && a->kind != DT_PAIR_BCE) return DT_ERR_ARG;
    DT__REAL buf_x[DT_PIECE], buf_y[DT_PIECE], e[DT_PIECE];
    for (size_t start = 0; start < a->count; start += DT_PIECE) {
        int64_t n = a->count - start < DT_PIECE ? (int64_t)(a->count - start) : DT_PIECE;
        const DT__REAL *x = DT__K(load)(a->dtype, a->a, (int64_t)start, n, buf_x);
        const DT__REAL *y = DT__K(load)(a->dtype, a->b, (int64_t)start, n, buf_y);
        double piece;
        if (a->kind == DT_PAIR_BCE) {
            DT__K(exp_minus_abs)(DT_ACT_SIGMOID, x, n, e);
            DT__SUM(double, piece, n,
                (double)((x[j] > 0 ? x[j] * (1 - y[j]) : -x[j] * y[j]) + DT__LOG1P(e[j])));
        } else
            DT__SUM(
                double, piece, n, ((double)x[j] - (double)y[j]) * ((double)x[j] - (double)y[j]));
        total += piece;
    }
    *a->loss = total / a->denominator;
    return DT_OK;
}

DT__FN dt_status DT__K(pair_loss_back)(const dt_pair_loss_back_args *a) {
    DT__REAL d[DT__STRIP], e[DT__STRIP], buf_x[DT__STRIP], buf_y[DT__STRIP],
        factor = (DT__REAL)(*a->upstream * a->scale);
    if (a->kind < DT_PAIR_SQUARE || a->kind > DT_PAIR_BCE_TARGET) return DT_ERR_ARG;
    int64_t count = (int64_t)a->count;
    int mode = dt__store_mode(a->accumulate, count, a->dtype);
    for (int64_t at = 0; at < count; at += DT__STRIP) {
        int64_t n = count - at < DT__STRIP ? count - at : DT__STRIP;
        const DT__REAL *x = DT__K(load)(a->dtype, a->a, at, n, buf_x),
                       *y = DT__K(load)(a->dtype, a->b, at, n, buf_y);
        if (a->kind == DT_PAIR_BCE) DT__K(exp_minus_abs)(DT_ACT_SIGMOID, x, n, e);
        switch (a->kind) {
            DT__EACH(DT_PAIR_SQUARE, d, factor * (x[i] - y[i]));
            DT__EACH(DT_PAIR_BCE, d, factor * (DT__K(logistic)(x[i], e[i]) - y[i]));
            DT__EACH(DT_PAIR_BCE_TARGET, d, factor * -y[i]);
        }
        DT__K(store)(a->dtype, a->da, at, n, d, mode);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(square_sums)(const dt_square_sums_args *a) {
    DT__REAL buf[DT_PIECE];
    for (size_t piece = 0; piece * DT_PIECE < a->count; piece++) {
        size_t left = a->count - piece * DT_PIECE;
        int64_t n = left < DT_PIECE ? (int64_t)left : DT_PIECE;
        const DT__REAL *x = DT__K(load)(a->dtype, a->in, (int64_t)(piece * DT_PIECE), n, buf);
        DT__SUM(double, a->out[piece], n, (double)x[j] * (double)x[j]);
    }
    return DT_OK;
}

/* Adam and AdamW. m and v are running means of g and g^2. Both start at zero and are therefore
   biased toward zero; dividing by 1 - beta^step corrects the bias. Decoupled weight decay (AdamW)
   multiplies the parameter by 1 - lr * weight_decay. Coupled weight decay (Adam) adds weight_decay
   * param to the gradient. */
DT__FN void DT__K(adamw_update)(const dt_adamw_args *a) {
    DT__REAL *__restrict__ param = (DT__REAL *)a->param;
    DT__REAL *__restrict__ m = (DT__REAL *)a->m, *__restrict__ v = (DT__REAL *)a->v;
    const DT__REAL *grad = (const DT__REAL *)a->grad;
    DT__REAL beta1 = (DT__REAL)a->beta1, beta2 = (DT__REAL)a->beta2, eps = (DT__REAL)a->eps;
    DT__REAL one_minus_beta1 = (DT__REAL)(1 - a->beta1), one_minus_beta2 = (DT__REAL)(1 - a->beta2),
             grad_scale = (DT__REAL)a->grad_scale;
    DT__REAL rate = (DT__REAL)(a->lr / (1 - pow(a->beta1, (double)a->step)));
    DT__REAL unbias = (DT__REAL)(1 / sqrt(1 - pow(a->beta2, (double)a->step)));
    DT__REAL shrink = (DT__REAL)(a->coupled ? 1 : 1 - a->lr * a->weight_decay);
    DT__REAL decay = (DT__REAL)(a->coupled ? a->weight_decay : 0);
    DT__PARALLEL
    for (size_t at = 0; at < a->count; at += DT__STRIP) {
        DT__REAL root[DT__STRIP] = { 0 };
        size_t end = a->count - at < DT__STRIP ? a->count : at + DT__STRIP;
        for (size_t i = at; i < end; i++) {
            DT__REAL g = grad[i] * grad_scale + decay * param[i];
            m[i] = beta1 * m[i] + one_minus_beta1 * g;
            v[i] = beta2 * v[i] + one_minus_beta2 * g * g;
            root[i - at] = v[i];
        }
        DT__K(square_roots)(root, DT__STRIP, root);
        for (size_t i = at; i < end; i++)
            param[i] = shrink * param[i] - rate * m[i] / (root[i - at] * unbias + eps);
        DT__K(store)
        (a->model_dtype, a->model_param, (int64_t)at, (int64_t)(end - at), param + at, 0);
    }
}

DT__FN dt_status DT__K(adamw)(const dt_adamw_args *a) {
    for (const dt_adamw_args *n = a; n; n = n->next) /* checks all arguments before any update */
        if (n->step < 1 || n->dtype != a->dtype || n->model_dtype != a->model_dtype)
            return DT_ERR_ARG;
    for (; a; a = a->next) DT__K(adamw_update)(a);
    return DT_OK;
}
#endif /* vector kernels of floating types */

// ==== 33. CPU kernels compiled once for each type ===============================================

/* Random numbers, rows by index, simple optimizers, 1-bit Adam. Wider vectors do not
   pay here: the kernels compute one element at a time, or wait for memory. */

#if DT__FLOATS && DT__SCALARS

/* Initial values from the counter-based RNG. The four words of counter c give the elements with
   global indices 2c and 2c + 1: two uniform values, or the Box-Muller pair sqrt(-2 ln u) cos(2 pi
   v), sqrt(-2 ln u) sin(2 pi v). So a rank can compute any range of a parameter without the other
   ranks. */
DT__FN dt_status DT__K(init)(const dt_init_args *a) {
    DT__REAL out[DT__STRIP];
    for (uint64_t at = 0; at < a->count; at += DT__STRIP) {
        uint64_t end = a->count - at < DT__STRIP ? a->count : at + DT__STRIP;
        for (uint64_t i = at; i < end;) {
            uint64_t index = a->offset + i;
            double pair[2];
            uint32_t word[4];
            dt__philox(a->key, index / 2, word);
            double u = dt__uniform53(word[0], word[1]), v = dt__uniform53(word[2], word[3]);
            if (a->normal) {
                /* log(1 - u) is finite, because 1 - u is in (0, 1] */
                double radius = a->scale * sqrt(-2 * log(1 - u)), angle = 6.283185307179586 * v;
                pair[0] = radius * cos(angle);
                pair[1] = radius * sin(angle);
            } else {
                pair[0] = a->scale * (2 * u - 1);
                pair[1] = a->scale * (2 * v - 1);
            }
            for (; i < end && (a->offset + i) / 2 == index / 2; i++)
                out[i - at] = (DT__REAL)pair[(a->offset + i) & 1];
        }
        DT__K(store)(a->dtype, a->out, (int64_t)at, (int64_t)(end - at), out, 0);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(scatter)(const dt_scatter_args *a) {
    int64_t n = (int64_t)a->n, k = (int64_t)a->k, inner = (int64_t)a->inner;
    dt_fill_args zeros = { a->dtype, a->out, a->outer * a->n * a->inner, 0 };
    DT__REAL one;
    if (!a->accumulate) DT__K(fill)(&zeros);
    for (int64_t o = 0; o < (int64_t)a->outer; o++) {
        for (int64_t j = 0; j < k * inner; j++) {
            int64_t to = a->index[o * k * inner + j];
            if (to < 0 || to >= n) return DT_ERR_ARG;
            const DT__REAL *x = DT__K(load)(a->dtype, a->in, o * k * inner + j, 1, &one);
            DT__K(store)(a->dtype, a->out, (o * n + to) * inner + j % inner, 1, x, 1);
        }
    }
    return DT_OK;
}

/* Inserts each column of a row into a sorted list of at most k columns, which is fast enough
   because k is small. Columns with equal values keep their order. */
DT__FN dt_status DT__K(topk)(const dt_topk_args *a) {
    int64_t cols = (int64_t)a->cols, k = (int64_t)a->k;
    DT__REAL value, other;
    if (k > cols) return DT_ERR_ARG;
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        int32_t *index = a->index + r * k;
        for (int64_t c = 0; c < cols; c++) {
            const DT__REAL *x = DT__K(load)(a->dtype, a->in, r * cols + c, 1, &value);
            int64_t at = c < k ? c : k; /* first the length of the list, then the insertion point */
            while (at > 0 && DT__K(is_greater)(*x, *DT__K(load)(a->dtype, a->in,
                                                       r * cols + index[at - 1], 1, &other))) {
                if (at < k) index[at] = index[at - 1];
                at--;
            }
            if (at < k) index[at] = (int32_t)c;
        }
        for (int64_t j = 0; j < k; j++) {
            const DT__REAL *x = DT__K(load)(a->dtype, a->in, r * cols + index[j], 1, &value);
            DT__K(store)(a->dtype, a->values, r * k + j, 1, x, 0);
        }
    }
    return DT_OK;
}

/* Dropout. Columns 4c to 4c + 3 of a token use the four random words of counter (token, c). Whether
   an element is dropped depends on `key`, token and column alone, so every rank and every
   recomputation drops the same elements. */
DT__FN dt_status DT__K(dropout)(const dt_dropout_args *a) {
    DT__REAL out[DT__STRIP], buf[DT__STRIP], scale = (DT__REAL)(1 / (1 - a->p));
    int64_t cols = (int64_t)a->cols;
    uint64_t threshold = (uint64_t)(a->p * 4294967296.0);
    int mode = dt__store_mode(a->accumulate, (int64_t)a->rows * cols, a->dtype);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        uint64_t token = (uint64_t)(uint32_t)(a->tokens ? a->tokens[r] : (int32_t)r) << 32;
        for (int64_t c = 0; c < cols; c += DT__STRIP) {
            int64_t n = cols - c < DT__STRIP ? cols - c : DT__STRIP;
            const DT__REAL *x = DT__K(load)(a->dtype, a->in, r * cols + c, n, buf);
            uint32_t word[4];
            for (int64_t i = 0; i < n; i++) {
                uint64_t column = (uint64_t)(a->offset + c + i);
                if (i == 0 || column % 4 == 0) dt__philox(a->key, token | column / 4, word);
                out[i] = word[column % 4] < threshold ? 0 : x[i] * scale;
            }
            DT__K(store)(a->dtype, a->out, r * cols + c, n, out, mode);
        }
    }
    return DT_OK;
}

DT__FN dt_status DT__K(embedding)(const dt_embedding_args *a) {
    size_t bytes = a->cols * dt_dtype_size(a->dtype);
    for (size_t r = 0; r < a->rows; r++) {
        int64_t id = a->ids[r], row = id - a->offset;
        char *out = (char *)a->out + r * bytes;
        int empty = a->allow_empty && id == -1;
        if (!empty && (id < 0 || id >= a->vocab)) return DT_ERR_ARG;
        if (empty || row < 0 || row >= a->table_rows)
            memset(out, 0, bytes);
        else
            memcpy(out, (const char *)a->table + (size_t)row * bytes, bytes);
    }
    return DT_OK;
}

/* Combines the partial results of all ranks into the loss. For each row, lse = max + log(sum over
   ranks of e^(the rank's lse - max)), where max is the largest lse of any rank, and the target
   values of all ranks are added. */
DT__FN dt_status DT__K(cross_entropy_merge)(const dt_cross_entropy_merge_args *a) {
    double total = 0, squares = 0;
    for (size_t r = 0; r < a->rows; r++) {
        double lse = 0, target = 0, max = -INFINITY, sum = 0;
        for (size_t i = 0; i < a->n; i++)
            max =
                a->partials[2 * (i * a->rows + r)] > max ? a->partials[2 * (i * a->rows + r)] : max;
        for (size_t i = 0; i < a->n && a->labels[r] >= 0; i++) {
            sum += (double)DT__EXP((DT__REAL)(a->partials[2 * (i * a->rows + r)] - max));
            target += a->partials[2 * (i * a->rows + r) + 1];
        }
        if (a->labels[r] >= 0) lse = max + log(sum);
        ((DT__REAL *)a->lse)[r] = (DT__REAL)lse;
        total += lse - target;
        squares += lse * lse;
    }
    *a->loss = total / a->denominator;
    if (a->z_loss) *a->z_loss = squares / a->denominator;
    return DT_OK;
}

DT__FN dt_status DT__K(sgd)(const dt_sgd_args *a) {
    DT__REAL *param = (DT__REAL *)a->param, *buffer = (DT__REAL *)a->momentum_buffer;
    const DT__REAL *grad = (const DT__REAL *)a->grad;
    DT__REAL lr = (DT__REAL)a->lr, decay = (DT__REAL)a->weight_decay,
             grad_scale = (DT__REAL)a->grad_scale;
    DT__REAL momentum = (DT__REAL)(a->step > 1 ? a->momentum : 0);
    if (a->momentum != 0 && !buffer) return DT_ERR_ARG;
    /* the first step sets the momentum buffer to g */
    if (a->momentum != 0 && a->step <= 1) memset(buffer, 0, a->count * sizeof *buffer);
    for (size_t i = 0; i < a->count && a->momentum == 0; i++)
        param[i] -= lr * (grad[i] * grad_scale + decay * param[i]);
    for (size_t i = 0; i < a->count && a->momentum != 0; i++) {
        buffer[i] = momentum * buffer[i] + (grad[i] * grad_scale + decay * param[i]);
        param[i] -= lr * buffer[i];
    }
    DT__K(store)(a->model_dtype, a->model_param, 0, (int64_t)a->count, param, 0);
    return DT_OK;
}

DT__FN dt_status DT__K(momentum)(const dt_momentum_args *a) {
    DT__REAL *m = (DT__REAL *)a->m, beta1 = (DT__REAL)a->beta1,
             grad_factor = (DT__REAL)((1 - a->beta1) * a->grad_scale);
    const DT__REAL *grad = (const DT__REAL *)a->grad;
    for (size_t i = 0; i < a->count; i++) m[i] = beta1 * m[i] + grad_factor * grad[i];
    return DT_OK;
}

DT__FN dt_status DT__K(frozen_adam)(const dt_frozen_adam_args *a) {
    DT__REAL *param = (DT__REAL *)a->param, lr = (DT__REAL)a->lr, eps = (DT__REAL)a->eps;
    DT__REAL shrink = (DT__REAL)(1 - a->lr * a->weight_decay);
    const DT__REAL *m = (const DT__REAL *)a->m, *v = (const DT__REAL *)a->v;
    for (size_t at = 0; at < a->count; at += DT__STRIP) {
        DT__REAL root[DT__STRIP] = { 0 };
        size_t n = a->count - at < DT__STRIP ? a->count - at : DT__STRIP;
        memcpy(root, v + at, n * sizeof *root);
        DT__K(square_roots)(root, DT__STRIP, root);
        for (size_t i = 0; i < n; i++)
            param[at + i] = shrink * param[at + i] - lr * m[at + i] / (root[i] + eps);
        DT__K(store)(a->model_dtype, a->model_param, (int64_t)at, (int64_t)n, param + at, 0);
    }
    return DT_OK;
}

/* 1-bit Adam: packs signs with error feedback. The first pass adds x to `error` and computes the
   scale, the root mean square of `error`. The second pass packs the signs of `error` and subtracts
   the value that is sent, sign times scale, from `error`. Where v is 0, `error` stays 0. */
DT__FN dt_status DT__K(sign_pack)(const dt_sign_pack_args *a) {
    DT__REAL *error = (DT__REAL *)a->error;
    const DT__REAL *x = (const DT__REAL *)a->x, *v = (const DT__REAL *)a->v;
    double squares = 0, numbers = 0;
    if (a->parts < 1 || a->count % (8 * a->parts) != 0) return DT_ERR_ARG;
    int64_t count = (int64_t)a->count;
    for (int64_t start = 0; start < count; start += DT_PIECE) {
        int64_t n = count - start < DT_PIECE ? count - start : DT_PIECE;
        double sum;
        for (int64_t i = 0; i < n; i++)
            error[i + start] = v[i + start] != 0 ? x[i + start] + error[i + start] : 0;
        DT__SUM(double, sum, n, (double)error[j + start] * (double)error[j + start]);
        squares += sum;
        for (int64_t i = 0; i < n; i++) numbers += v[i + start] != 0;
    }
    DT__REAL scale = (DT__REAL)(numbers > 0 ? sqrt(squares / numbers) : 0);
    double sent = (double)scale;
    size_t sign_bytes = a->count / a->parts / 8; /* bytes of signs in one of the `parts` messages */
    for (size_t byte = 0; byte < a->count / 8; byte++) {
        unsigned bits = 0;
        for (size_t i = 8 * byte; i < 8 * byte + 8; i++) {
            bits |= (unsigned)(error[i] >= 0) << (i - 8 * byte);
            if (v[i] != 0) error[i] -= error[i] >= 0 ? scale : -scale;
        }
        ((unsigned char *)a->out)[byte + byte / sign_bytes * sizeof sent] = (unsigned char)bits;
    }
    for (size_t p = 0; p < a->parts; p++)
        memcpy((char *)a->out + p * (sign_bytes + sizeof sent) + sign_bytes, &sent, sizeof sent);
    return DT_OK;
}

DT__FN dt_status DT__K(sign_unpack)(const dt_sign_unpack_args *a) {
    DT__REAL *out = (DT__REAL *)a->out;
    const DT__REAL *v = (const DT__REAL *)a->v;
    double sent;
    size_t bytes = a->count / 8;
    if (a->n < 1 || a->count % 8 != 0) return DT_ERR_ARG;
    memset(out, 0, a->count * sizeof *out);
    for (size_t k = 0; k < a->n; k++) {
        const unsigned char *signs = (const unsigned char *)a->in + k * (bytes + sizeof sent);
        memcpy(&sent, signs + bytes, sizeof sent);
        DT__REAL scale = (DT__REAL)sent;
        for (size_t i = 0; i < a->count; i++) out[i] += signs[i / 8] >> i % 8 & 1 ? scale : -scale;
    }
    for (size_t i = 0; i < a->count; i++) out[i] = v[i] != 0 ? out[i] / (DT__REAL)a->n : 0;
    return DT_OK;
}
#endif /* scalar kernels of floating types */

/* The kernels of this compute type and instruction set. dt__variant_of (section 34) chooses among
   these tables. */
#define DT__COPY_ENTRY(k) DT__VECTOR(k),
#if DT__FLOATS
#define DT__VECTOR_ENTRY(k) DT__VECTOR(k),
#define DT__PRODUCT_ENTRY(k) DT__K(k),
#define DT__SCALAR_ENTRY(k) DT__SCALAR(k),
#else
#define DT__VECTOR_ENTRY(k) NULL,
#define DT__PRODUCT_ENTRY(k) NULL,
#define DT__SCALAR_ENTRY(k) NULL,
#endif
static const dt__variant DT__K(variant) = { DT__COPY_KERNELS(DT__COPY_ENTRY) DT__VECTOR_KERNELS(
    DT__VECTOR_ENTRY) DT__PRODUCT_KERNELS(DT__PRODUCT_ENTRY) DT__SCALAR_KERNELS(DT__SCALAR_ENTRY) };
DT__COLD_END
#undef DT__COPY_ENTRY
#undef DT__VECTOR_ENTRY
#undef DT__PRODUCT_ENTRY
#undef DT__SCALAR_ENTRY
#undef DT__SUM
#undef DT__NOT_VECTORIZED
#undef DT__VECTORS
#undef DT__VECTOR
#undef DT__SCALARS
#undef DT__SCALAR
#undef DT__UNROLL
#undef DT__INDEPENDENT
#undef DT__JOIN2
#undef DT__JOIN
#undef DT__K
#undef DT__REAL
#undef DT__WIDE
#undef DT__FLOATS
#undef DT__ABS
#undef DT__COPYSIGN
#undef DT__FMA
#undef DT__EXP
#undef DT__EXP_DOWN
#undef DT__LOG
#undef DT__LOG1P
#undef DT__POW
#undef DT__FN
#undef DT__FN_INLINE
#undef DT__SUFFIX
#undef DT__NV
#undef DT__NR
#undef DT__MR_ROUNDED
#undef DT__V
#undef DT__ZERO
#undef DT__LOAD
#undef DT__STORE
#undef DT__FMADD
#undef DT__SQRT
#undef DT__TRANSPOSE
#undef DT__MR
#undef DT__ATTENTION_MR
#undef DT__MATMUL_ROWS
#undef DT__ATTENTION_ROWS
#undef DT__TANH
#undef DT__GEMM
#undef DT__EACH
#undef DT__EACH_WITH_EXP
#undef DT__GELU_A
#undef DT__GELU_B
#undef DT__GELU_2U
#undef DT__GELU_2DU
#undef DT__BITS
#undef DT__ISA
#endif /* DT__BITS */

#if defined(DT_IMPLEMENTATION) && !defined(DT__TENSOR_TABLE) && !defined(DT__BITS)
#define DT__TENSOR_TABLE

DT__CPP_WARNINGS_OFF

#ifdef __cplusplus
extern "C" {
#endif

// ==== 34. The CPU kernel table ==================================================================

/* Includes sections 29 to 33, and the end of 28, once for each compute type and instruction set.
   Each pass compiles only the groups of kernels (section 2) that wider vectors make faster:

                                 copy   vector   product   scalar
       i32, i64, u8 plain         x
       f32, f64 plain             x       x         x        x
       f32 AVX2 or NEON           x       x         x
       f64 AVX2 or NEON                             x
       f32 AVX-512                x       x         x

   The other entries of a table are the plain kernels. f64 is a type for tests: its elementwise
   functions come from libm, which wider vectors do not make faster, and its products use AVX2 on
   processors with AVX-512 too. At run time dt__best_isa
   chooses the best instruction set that the machine supports. bf16 and f16 use the f32 kernels. */
#define DT__BITS 1
#define DT__ISA 0
#include "dt_tensor.h"
#define DT__BITS 2
#define DT__ISA 0
#include "dt_tensor.h"
#define DT__BITS 3
#define DT__ISA 0
#include "dt_tensor.h"
#define DT__BITS 32
#define DT__ISA 0
#include "dt_tensor.h"
#define DT__BITS 64
#define DT__ISA 0
#include "dt_tensor.h"
#if defined(__x86_64__) || defined(__aarch64__)
#define DT__BITS 32
#define DT__ISA 1
#include "dt_tensor.h"
#ifndef DT_NO_KERNELS
#define DT__BITS 64
#define DT__ISA 1
#include "dt_tensor.h"
#endif
#endif
#if defined(__x86_64__)
#define DT__BITS 32
#define DT__ISA 2
#include "dt_tensor.h"
#endif

/* Returns the best instruction set that this machine supports. */
static int dt__best_isa(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return DT__AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return DT__SIMD;
    return DT__PLAIN;
#elif defined(__aarch64__)
    return DT__SIMD;
#else
    return DT__PLAIN;
#endif
}

/* Returns the kernels of a type and instruction set, or NULL if this build has none. Tests use this
   function to run every instruction set up to the one that dt__best_isa returns. */
static const dt__variant *dt__variant_of(dt_dtype dtype, int isa) {
    static const dt__variant *const f32[DT__ISAS] = {
        &dt__variant_f32_plain,
#if defined(__x86_64__)
        &dt__variant_f32_avx2,
        &dt__variant_f32_avx512,
#elif defined(__aarch64__)
        &dt__variant_f32_neon,
#endif
    };
    static const dt__variant *const f64[DT__ISAS] = {
        &dt__variant_f64_plain,
#if defined(DT_NO_KERNELS)
        &dt__variant_f64_plain,
        &dt__variant_f64_plain,
#elif defined(__x86_64__)
        &dt__variant_f64_avx2,
        &dt__variant_f64_avx2,
#elif defined(__aarch64__)
        &dt__variant_f64_neon,
#endif
    };
    /* the kernels of the 16-bit types compute in float */
    if (dtype == DT_F32 || dt__narrow(dtype)) return f32[isa];
    if (dtype == DT_F64) return f64[isa];
    if (dtype == DT_I32) return &dt__variant_i32;
    if (dtype == DT_I64) return &dt__variant_i64;
    return dtype == DT_U8 ? &dt__variant_u8 : NULL;
}

#define DT__DISPATCH(k) \
    static dt_status dt__cpu_##k(const dt_##k##_args *a, void *stream) { \
        (void)stream; \
        const dt__variant *variant = dt__variant_of(a->dtype, dt__best_isa()); \
        dt_status status = variant && variant->k ? variant->k(a) : DT_ERR_UNSUPPORTED; \
        dt__stream_fence(); \
        return status; \
    }
DT__VARIANT_KERNELS(DT__DISPATCH)
#undef DT__DISPATCH

static dt_status dt__cpu_move(void *dst, const void *src, size_t bytes, void *stream) {
    (void)stream;
    if (bytes != 0) memcpy(dst, src, bytes);
    return DT_OK;
}

static dt_status dt__cpu_quantize(const dt_quantize_args *a, void *stream) {
    (void)stream;
    return dt__quantize_all((dt_quant)a->quant, a->in, (int64_t)a->count, a->out);
}

static dt_status dt__cpu_copy(const dt_copy_args *a, void *stream) {
    (void)stream;
    if (a->out_stride == a->row_bytes && a->in_stride == a->row_bytes) {
        if (a->rows * a->row_bytes != 0) memcpy(a->out, a->in, a->rows * a->row_bytes);
        return DT_OK;
    }
    for (size_t r = 0; r < a->rows; r++)
        memcpy((char *)a->out + r * a->out_stride, (const char *)a->in + r * a->in_stride,
            a->row_bytes);
    return DT_OK;
}

/* 2^32 consecutive words have distinct weights. Compilers vectorize the loop of each size. */
static dt_status dt__cpu_digest(const dt_digest_args *a, void *stream) {
    size_t bytes = dt_dtype_size(a->dtype), size = bytes < 4 ? bytes : 4, words = bytes > 4 ? 2 : 1,
           count = a->count * words, each = count / a->parts + 1;
    (void)stream;
    for (size_t part = 0, at = 0; part < a->parts && size; part++) {
        const char *in = (const char *)a->in + at * size;
        uint32_t n = (uint32_t)(count - at < each ? count - at : each),
                 first = (uint32_t)(a->offset * words + at) + 1;
        uint64_t sum = 0;
#define DT__WORDS(type) \
    for (uint32_t k = 0; k < n && size == sizeof(type); k++) { \
        type word; \
        memcpy(&word, in + sizeof word * k, sizeof word); \
        uint32_t weight = (first + k) * 2654435761u; \
        weight = (weight ^ weight >> 15) * 2246822507u; \
        sum += (uint64_t)word * (weight ^ weight >> 13); \
    } \
    (void)0
        DT__WORDS(uint32_t);
        DT__WORDS(uint16_t);
        DT__WORDS(uint8_t);
#undef DT__WORDS
        a->out[part] = sum;
        at += n;
    }
    return size ? DT_OK : DT_ERR_UNSUPPORTED;
}

const dt_kernels *dt_kernels_cpu(void) {
#define DT__TABLE_ENTRY(k) .k = dt__cpu_##k,
    static const dt_kernels table = {
        .name = "cpu", .move = dt__cpu_move, DT_KERNELS(DT__TABLE_ENTRY)
    };
#undef DT__TABLE_ENTRY
    return &table;
}

#if defined(__clang__)
#pragma STDC FP_CONTRACT DEFAULT
#elif defined(__GNUC__)
#pragma GCC pop_options
#ifdef __CUDACC__
#pragma nv_diag_default 1675
#endif
#endif

#ifdef __cplusplus
}
#endif

DT__CPP_WARNINGS_ON
#endif /* DT__TENSOR_TABLE */

/* HISTORY
     0.2.0   names replaced by the usual terms, old -> new: dt_unit* -> dt_bucket* (kept -> shard,
             first -> shard_offset, run -> shard_count, passing -> micro_grad, over -> grad_state),
             dt_units_desc.elsewhere -> .offloaded, .hand_over -> dt_bucket.reduce_each_micro,
             .shard sets the fields of a bucket; dt_box -> dt_local_slice; dt_cut -> dt_shard_spec,
             cuts -> shards; dt_mark -> dt_grad_placement, DT_PART -> DT_GRAD_PARTIAL, DT_SAME ->
             DT_GRAD_REPLICATED; dt_sight -> dt_attention_mask; DT_RUN -> DT_PIECE; dt_node: blind,
             remake -> unread_inputs, recompute; dt_param_info: box, unit -> slice, bucket;
             dt_json_shut -> dt_json_close, dt_json_drop -> dt_json_out_free; kernels spread ->
             scatter, cross_entropy_join -> cross_entropy_merge; dt_ctx_desc.place -> local_rank;
             dt_listener.settle -> drain; dt_loss_part -> dt_vocab_shard (parts, first, all ->
             count, offset, full_vocab). dt_io.open takes a dt_io_mode in place of 0, 1 and
             DT_IO_NEW. New: placements (dt_placement comes from dt_parallel.h), call sites,
             transient tensors (dt_new_transient), dt_new_rows, dt_grouped_linear, dt_embedding_bag,
             dt_check_finite, DT_NO_KERNELS, DT_U8, DT_I64, dt_matmul, dt_permute, dt_select,
             dt_broadcast_to, dt_sum_dims and its kin, dt_cumsum, dt_patches, convolution, pooling,
             dt_group_norm, negative dimensions, -1 in dt_reshape, dt_sigmoid and its kin,
             dt_minimum, comparisons, dt_where, dt_bce_with_logits, dt_one_hot, dt_argmax, dt_keep,
             dt_weights_load_all, dt_adapter (LoRA), dt_param_desc.quant (quantized weights), RoPE
             scaling, sliding windows and soft-capping of attention, dt_rmsnorm_at, dt_geglu,
             dt_log_softmax, dt_detach, dt_print, dt_grad_check, dt_last_use,
             dt_param_desc.matrices and shared_stages; the kernels digest, quantize, where, cumsum,
             patches and patches_back, which your own table needs too, pair_loss in place of mse,
             the fields factor and negate of dt_binary_args. Under dt_no_grad a block drops what it
             made. A tensor that is used after dt_reset fails; so does dt_grad with an index
             that the node does not have. dt_max_over and dt_topk order NaN above all numbers
     0.1.0   one rank: tensors, tape, blocks, units, memory account, CPU kernels, JSON, weight files

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
