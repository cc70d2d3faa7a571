/* dt_tensor.h - v0.1.0 - one rank of a training job: tensors, memory, tape, kernels, weight files -
   public domain or MIT, see the end of the file

   This is the lowest of four single-header libraries that train transformers on many ranks:

       dt_tensor.h     one rank: tensors, memory, tape, kernels, weight files      (this file, usable alone)
       dt_comm.h       groups of ranks: launch, collectives, faults
       dt_parallel.h   layouts: mesh, placements, data order
       dt_zero.h       training state: optimizers, ZeRO, clipping
       dt_kernels.cu   the CUDA side of the kernel table

   It gives you eager tensors with a tape (reverse-mode differentiation), parameters that are boxes
   of a full logical tensor, memory whose every byte has an owner and a class, CPU kernels, and
   weight files (safetensors, llm.c).

   DOES NOT: start threads (OpenMP does, where DT_USE_OMP asks for it), install signal handlers,
   call exit or abort, keep global state, print except through the log hook, read the environment.

   QUICK EXAMPLE

       #define DT_IMPLEMENTATION
       #include "dt_tensor.h"
       #include <stdio.h>

       int main(void) {
           dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = dt_kernels_cpu() });  //
                                                                                                we
                                                                                                look
                                                                                                at
                                                                                                data
           dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(1, 3), DT_NORMAL(0.1));
           float x[6] = { 1, 2, 3, 4, 5, 6 }, y[2] = { 1, -1 };
           for (int step = 0; step < 100; step++) {
               dt_tensor *out = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(2, 3), x), w, NULL);
               dt_tensor *loss = dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(2, 1), y), 2);
               if (dt_backward(loss) != DT_OK) break;    // your own code looks at data: so check
                                                         before it
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
       cc -O3 train.c -lm -lpthread                 C11 or C++17; gcc, clang; no -march needed
       g++ -Wextra -Wno-missing-field-initializers  g++ alone warns of what (dt_ctx_desc){ .seed = 1
                                                    } leaves zero
       nvcc -O3 train.c dt_kernels.cu -lcublasLt -lnccl     CUDA; nvcc sets __NVCC__, which turns
                                                            DT_USE_CUDA on

   OPTIONS (define before including)
       DT_IMPLEMENTATION   in exactly one file: the code, not only the declarations
       DT_STATIC           everything static: several files may each have their own copy. A file
                           that includes dt
                           has the code too then: DT_IMPLEMENTATION in each, or gcc warns            (everywhere)
       DT_USE_CUDA         CUDA runtime calls and dt_kernels.cu (set by nvcc): in the
                           implementation, and in each file that calls dt_cuda_* or dt_kernels_cuda
       DT_NO_CUDA          not even under nvcc                                                   (implementation)
       DT_USE_CBLAS        products of f32 and f64 by <cblas.h>; link one, e.g. -lopenblas       (implementation)
       DT_USE_OMP          threads inside a rank, with -fopenmp; the same bits                   (implementation)

   CONTENTS
     1. Status, element types, shapes
     2. Kernel table
     3. Host and io tables
     4. Context, errors, memory account
     5. Tensors and parameters
     6. Units and listeners
     7. Ops
     8. Tape and blocks
     9. Weight files
    10. Implementation: base helpers
    11. Default host and io tables
    12. Context, errors, memory account: code
    13. Counter RNG
    14. Parameters, boxes and units: code
    15. Arenas
    16. Tape and blocks: code
    17. Ops: code
    18. JSON
    19. Weight files: code
    20. Arithmetic on the CPU
    21. Matrix product on the CPU
    22. CPU kernels, once over float and double
    23. The CPU kernel table

   CONTRACT
     Memory     The context owns all it hands out. Parameters live until dt_ctx_free; everything
                else an op returns lives until dt_reset (data made inside a recomputed dt_block only
                while it runs). Host buffers you pass are copied and never kept. After the first
                steps a steady program allocates nothing; growth is logged.
     Errors     The first failure is kept with its text (dt_error, dt_error_text). Ops after it do
                nothing and return NULL; NULL in gives NULL out; dt_item gives NaN. So a loop needs
                no checks: look once at the end.
     Threads    A context belongs to one thread at a time. Contexts share nothing.
     Order      Every sum has a stated order that does not depend on tiling or threads: the same
                program gives the same bits on processors of one kind. An element of a product
                depends on its row, its column and K only, unless CBLAS makes it. A micro-batch's
                weight gradient is complete before it is added to anything.
     Tags       [local] any rank by itself; [pairwise] two ranks; [collective: group] every rank of
                the group. */

#ifndef DT_TENSOR_H
#define DT_TENSOR_H

#define DT_VERSION 100 /* 0.1.0; every dt header checks that it meets the same number */

#if defined(DT_IMPLEMENTATION) && !defined(_GNU_SOURCE)
/* with -std=c11 the clock and the like are declared only so; too late if libc came first */
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>

#ifdef __FAST_MATH__
#error "dt promises equal bits: compile without -ffast-math"
#endif

#if defined(__NVCC__) && !defined(DT_NO_CUDA) && !defined(DT_USE_CUDA)
#define DT_USE_CUDA
#endif

#ifdef DT_STATIC
#define DT_API static __attribute__((unused))
#else
#define DT_API extern
#endif
#define DT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

#ifdef __cplusplus
extern "C" {
#endif

// ==== 1. Status, element types, shapes ==========================================================

/* What a call answers. The detail (rank, shapes, reason) is in dt_error_text. */
typedef enum dt_status {
    DT_OK = 0,
    DT_ERR_ARG,        /* a value that makes no sense: a negative count, an id outside the table */
    DT_ERR_SHAPE,      /* shapes or element types that do not fit each other */
    DT_ERR_MEM,        /* the host or device table refused memory */
    DT_ERR_IO,         /* a file */
    DT_ERR_DEVICE,     /* the accelerator's own error */
    DT_ERR_COMM,       /* ranks called different operations, or a rank left too early */
    DT_ERR_TIMEOUT,    /* a wait reached its limit */
    DT_ERR_PEER,       /* another rank failed first; the text names it */
    DT_ERR_NUMERIC,    /* NaN or infinity where training cannot go on */
    DT_ERR_UNSUPPORTED /* not in this version */
} dt_status;

/* Element types. BF16 and F16 are storage: kernels compute in f32. F64 is for tests on the CPU. */
typedef enum dt_dtype { DT_F32 = 0, DT_BF16, DT_F16, DT_F64, DT_I32 } dt_dtype;

/* How several values become one, in rank order. */
typedef enum dt_op { DT_SUM = 0, DT_AVG, DT_MAX, DT_MIN, DT_PROD } dt_op;

#define DT_MAX_DIMS 6
typedef struct dt_shape {
    int nd;                 /* 0 is a scalar */
    int64_t d[DT_MAX_DIMS]; /* row-major: d[nd-1] varies fastest */
} dt_shape;

/* DT_SHAPE(B, T, C), of integers of any type; DT_SCALAR has no dimension */
#ifdef __cplusplus /* where a list of int64_t takes no size_t */
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
#define DT_SCALAR ((dt_shape){ 0, { 0 } })

/* [local] Bytes of one element; 0 for an unknown type. */
DT_API size_t dt_dtype_size(dt_dtype dtype);
/* [local] "f32", "i32", ... */
DT_API const char *dt_dtype_name(dt_dtype dtype);
/* [local] "DT_ERR_SHAPE", ... */
DT_API const char *dt_status_name(dt_status status);
/* [local] Number of elements; 1 for a scalar; -1 if the shape is invalid: more than DT_MAX_DIMS
   dimensions, a negative one, or more elements than int64_t can count. */
DT_API int64_t dt_count(dt_shape shape);

// ==== 2. Kernel table ===========================================================================

/* Every kernel once. A kernel gets one plain struct and a stream, and answers DT_OK,
   DT_ERR_UNSUPPORTED (this table does not serve that type or field) or DT_ERR_ARG. It allocates
   nothing: `work` is scratch the caller lends. Arrays are dense and row-major unless a stride says
   otherwise. T is the struct's dtype. bf16 and f16 are storage: every number is widened to f32,
   computed with, and rounded to nearest even once when the result is stored; what is kept for a
   backward (mean, rstd, lse) is f32 then. `wide` says that an output is f32 although T is bf16 or
   f16: gradients of parameters. `accumulate` adds the finished result to what the output holds;
   without it the output is overwritten. Sums have an order that depends on the sizes named in the
   comment only. */
#define DT_KERNELS(X) \
    X(fill) \
    X(init) \
    X(copy) \
    X(permute) \
    X(cast) \
    X(reduce) \
    X(sum) \
    X(max) \
    X(binary) \
    X(unary) \
    X(unary_back) \
    X(glu) \
    X(glu_back) \
    X(softmax) \
    X(softmax_back) \
    X(norm) \
    X(norm_back) \
    X(rope) \
    X(dropout) \
    X(embedding) \
    X(embedding_back) \
    X(topk) \
    X(spread) \
    X(matmul) \
    X(attention) \
    X(attention_back) \
    X(cross_entropy) \
    X(cross_entropy_join) \
    X(cross_entropy_back) \
    X(mse) \
    X(mse_back) \
    X(square_sums) \
    X(adamw) \
    X(sgd) \
    X(momentum) \
    X(frozen_adam) \
    X(sign_pack) \
    X(sign_unpack)

typedef struct dt_fill_args { /* out[i] = value */
    dt_dtype dtype;
    void *out;
    size_t count;
    double value;
} dt_fill_args;

typedef struct dt_init_args { /* out[i] = f(key, first + i): the counter RNG, see section 13 */
    dt_dtype dtype;
    void *out;
    size_t count;
    /* 0: uniform in [-scale, scale); 1: normal with standard deviation scale */
    int normal;
    double scale;
    uint64_t key, first; /* first: global index of out[0] */
} dt_init_args;

typedef struct dt_copy_args { /* rows of bytes between two strided places; strides in bytes */
    void *out;
    const void *in;
    size_t rows, row_bytes, out_stride, in_stride;
} dt_copy_args;

/* out[..] (+)= in[..] over all indices of shape: slice, join, transpose, repeat */
typedef struct dt_permute_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    dt_shape shape;
    int64_t out_stride[DT_MAX_DIMS], in_stride[DT_MAX_DIMS]; /* in elements; of in, 0 repeats */
    int accumulate;
} dt_permute_args;

/* out[i] (+)= in[i]; to a narrower type rounded to nearest even, to i32 towards zero */
typedef struct dt_cast_args {
    dt_dtype dtype, from;
    void *out;
    const void *in;
    size_t count;
    int accumulate;
} dt_cast_args;

/* out[i] = in[0][i] op in[1][i] op ..., in that order; out may be one of the inputs */
typedef struct dt_reduce_args {
    dt_dtype dtype;
    void *out;
    const void *const *in;
    int n;
    size_t count;
    dt_op op;
    void *const *also;
    int n_also; /* must get the same result; may be inputs too */
    /* hint: outputs are no inputs and in no near cache; non-temporal stores pay */
    int far;
} dt_reduce_args;

/* out[o,i] (+)= scale * sum over j of in[o,j,i], j ascending; in (outer,n,inner) */
typedef struct dt_sum_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    size_t outer, n, inner;
    double scale;
    int accumulate, wide;
    /* any, NULL too: with some, a GPU sums many parts at a time */
    void *work;
    size_t work_bytes;
} dt_sum_args;

/* out[o,i] = max over j of in[o,j,i], index its first j; backward: spread */
typedef struct dt_max_args {
    dt_dtype dtype;
    void *out;
    int32_t *index;
    const void *in;
    size_t outer, n, inner;
} dt_max_args;

enum { DT_ADD = 0, DT_SUB, DT_MUL, DT_DIV };
/* out, dense of `shape` (+)= a op b; a stride of 0 repeats (broadcasts) */
typedef struct dt_binary_args {
    dt_dtype dtype;
    int op;
    void *out;
    const void *a, *b;
    dt_shape shape;
    int64_t stride_a[DT_MAX_DIMS], stride_b[DT_MAX_DIMS]; /* in elements */
    int accumulate;
} dt_binary_args;

/* Functions of one number. GELU is the tanh form 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))),
   GELU_ERF x times the normal distribution function (both arXiv:1606.08415), SILU x / (1 + e^-x).
   AFFINE is scale x + shift. */
enum {
    DT_ACT_NONE = 0,
    DT_ACT_GELU,
    DT_ACT_GELU_ERF,
    DT_ACT_SILU,
    DT_ACT_RELU,
    DT_ACT_TANH,
    DT_ACT_EXP,
    DT_ACT_LN,
    DT_ACT_AFFINE,
    DT_ACTS
};
typedef struct dt_unary_args { /* out[i] = f(in[i]) */
    /* of AFFINE */
    dt_dtype dtype;
    int act;
    void *out;
    const void *in;
    size_t count;
    double scale, shift;
} dt_unary_args;

typedef struct dt_unary_back_args { /* dx[i] (+)= dout[i] f'(in[i]) */
    dt_dtype dtype;
    int act;
    void *dx;
    const void *dout, *in;
    size_t count;
    double scale;
    int accumulate;
} dt_unary_back_args;

/* out[r,c] = f(in[r,0,c]) in[r,1,c]: gate and up; in (rows,2,cols), out (rows,cols) */
typedef struct dt_glu_args {
    dt_dtype dtype;
    int act;
    void *out;
    const void *in;
    size_t rows, cols;
} dt_glu_args;

typedef struct dt_glu_back_args { /* dx (rows,2,cols) */
    dt_dtype dtype;
    int act;
    void *dx;
    const void *dout, *in;
    size_t rows, cols;
    int accumulate;
} dt_glu_back_args;

typedef struct dt_softmax_args { /* each row of cols: out = e^(in - max) / sum */
    /* dt_row_work */
    dt_dtype dtype;
    void *out;
    const void *in;
    size_t rows, cols;
    void *work;
    size_t work_bytes;
} dt_softmax_args;

typedef struct dt_softmax_back_args { /* dx (+)= out (dout - sum of dout out) */
    dt_dtype dtype;
    void *dx;
    const void *dout, *out;
    size_t rows, cols;
    int accumulate;
    void *work;
    size_t work_bytes;
} dt_softmax_back_args;

typedef struct dt_norm_args { /* out = (in - mean) * rstd * gain + bias over each row of cols */
    /* mean, rstd: (rows) f32 or f64, kept for the backward */
    dt_dtype dtype;
    void *out, *mean, *rstd;
    const void *in, *gain, *bias;
    size_t rows, cols;
    double eps;
    /* 1: mean is taken as 0 and bias as none (RMSNorm); both NULL */
    int rms;
    void *work;
    size_t work_bytes; /* dt_row_work bytes */
} dt_norm_args;

/* each of dx, dgain, dbias may be NULL; sums over rows ascending */
typedef struct dt_norm_back_args {
    dt_dtype dtype;
    void *dx, *dgain, *dbias;
    const void *dout, *in, *gain, *mean, *rstd;
    size_t rows, cols;
    int accumulate_x, accumulate_gain, accumulate_bias, rms;
    int wide_gain, wide_bias;
    /* dt_row_work bytes; with more, a GPU sums many parts at a time */
    void *work;
    size_t work_bytes;
} dt_norm_back_args;

/* rotates pairs of each head of a token by position * theta^(-2i/rotary), i the pair */
typedef struct dt_rope_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    const int32_t *positions; /* (tokens) */
    /* in (tokens,heads,dim): the first `rotary` of dim turn, the rest is copied */
    size_t tokens, heads, dim, rotary;
    double theta;
    int interleaved;         /* pair i is 2i, 2i+1; else i, i + rotary/2 */
    int inverse, accumulate; /* inverse: by the negative angle, which is the backward */
} dt_rope_args;

/* out[r,c] (+)= in[r,c] / (1 - p) where (key, tokens[r], c) keeps it, else 0 */
typedef struct dt_dropout_args {
    dt_dtype dtype;
    void *out;
    const void *in;
    const int32_t *tokens; /* (rows), or NULL: r */
    size_t rows, cols;
    int64_t first; /* first: which column of the full tensor column 0 is */
    double p;
    uint64_t key;
    int accumulate;
} dt_dropout_args;

/* out[r] = table[ids[r] - first]; zero where the id is another rank's */
typedef struct dt_embedding_args {
    dt_dtype dtype;
    void *out;
    const void *table;
    const int32_t *ids;
    size_t rows, cols;
    /* this table holds ids first .. first+held-1 of vocab; DT_ERR_ARG outside vocab */
    int64_t first, held, vocab;
    int holes; /* 1: an id of -1 gives zeros */
} dt_embedding_args;

typedef struct dt_embedding_back_args { /* dtable[ids[r] - first] += dout[r], r ascending */
    dt_dtype dtype;
    void *dtable;
    const void *dout;
    const int32_t *ids;
    size_t rows, cols;
    int64_t first, held;
    int accumulate, wide;
    void *work;
    size_t work_bytes; /* 4 held cols bytes where dtable is bf16 or f16, else NULL */
    /* 1: first is 0, and an id that is neither held nor -1 is DT_ERR_ARG */
    int strict;
} dt_embedding_back_args;

typedef struct dt_topk_args { /* each row's k largest, largest first, ties to the lower column */
    dt_dtype dtype;
    void *values;
    int32_t *index;
    const void *in;
    size_t rows, cols, k;
} dt_topk_args;

/* out[o,index[o,j,i],i] (+)= in[o,j,i], zero elsewhere: the backward of topk and max */
typedef struct dt_spread_args {
    /* index < n, j < k */
    dt_dtype dtype;
    void *out;
    const void *in;
    const int32_t *index;
    size_t outer, n, k, inner;
    int accumulate;
} dt_spread_args;

/* c (+)= act(A B + bias) + residual; A (m,k), B (k,n), for each of `batch` */
typedef struct dt_matmul_args {
    dt_dtype dtype;
    void *c;
    const void *a, *b;
    int64_t m, n, k, batch;               /* batch 0 -> 1 */
    int trans_a, trans_b;                 /* a is stored (k,m), b is stored (n,k) */
    int64_t lda, ldb, ldc;                /* elements between rows as stored; 0 -> dense */
    int64_t stride_a, stride_b, stride_c; /* elements between batches */
    const void *bias;                     /* (n) of T, or NULL */
    const void *residual;                 /* as c but always of T, or NULL */
    int activation;                       /* DT_ACT_* without AFFINE */
    /* as c but always of T: receives the value before the activation; or NULL */
    void *before;
    /* 1: c = (A B) * act'(before) instead: the backward of an activation */
    int derivative;
    int accumulate, wide;
    void *work;
    size_t work_bytes; /* dt_matmul_work bytes, or NULL: the naive product */
} dt_matmul_args;

/* softmax(scale q k^T) v; q, out (B,TQ,H,D), k, v (B,TK,K,D), lse (B,H,TQ) f32 or f64. A causal
   query sees the keys whose position is not after its own. Positions default to j for key j and i +
   tk - tq for query i. With documents, (B,TQ) and (B,TK), a query sees its own document only. A
   query that sees nothing gets 0, and lse -infinity. */
typedef struct dt_attention_mask { /* which keys a query sees */
    /* each may be NULL */
    int causal;
    const int32_t *q_position, *k_position, *q_document, *k_document;
} dt_attention_mask;

typedef struct dt_attention_args {
    dt_dtype dtype;
    void *out, *lse;
    const void *q, *k, *v;
    int64_t batch, tq, tk, heads, kv_heads, dim;
    double scale;
    dt_attention_mask sight;
    /* 1: out and lse hold the result over other keys, and receive that over both */
    int merge;
    int wide;
    void *work;
    size_t work_bytes; /* dt_attention_work bytes */
} dt_attention_args;

/* Scores are computed again from lse. k and v may be some of the keys: with out and lse of all
   keys, the gradients of blocks of keys add up to the whole. Each of dq, dk, dv may be NULL. */
typedef struct dt_attention_back_args {
    dt_dtype dtype;
    void *dq, *dk, *dv;
    const void *dout, *out, *lse, *q, *k, *v;
    int64_t batch, tq, tk, heads, kv_heads, dim;
    double scale;
    dt_attention_mask sight;
    int accumulate_q, accumulate_k, accumulate_v;
    int wide; /* of dq, dk, dv and out, not of dout */
    void *work;
    size_t work_bytes;
} dt_attention_back_args;

/* *loss = (sum over rows with label >= 0 of lse - x[label]) / denominator, where lse = log(sum of
   e^x). Columns from `vocab` on are padding: they count nowhere and get no gradient. smoothing s:
   the target is 1 - s at the label and s / vocab everywhere (arXiv:1512.00567). */
typedef struct dt_cross_entropy_args {
    /* row_loss (rows) double, lse (rows) f32 or f64 */
    dt_dtype dtype;
    double *loss, *row_loss;
    void *lse;
    const void *logits;
    const int32_t *labels;
    size_t rows, cols, vocab;
    double denominator, smoothing;
    /* NULL, or receives sum of lse^2 / denominator (arXiv:2204.02311) */
    double *z_loss;
    int add; /* 1: loss and z_loss are added to: chunks of rows */
    void *work;
    size_t work_bytes; /* dt_row_work bytes */
    /* not NULL: the columns are a part of `all`, from `first` on, of which the first */
    double *part;
    /* `vocab`, none too, are no padding. part (rows,2) alone is written: each row's */
    int64_t first, all;
    /* own lse, and what of its target lies here; 0 and 0 for a label < 0 */
} dt_cross_entropy_args;

/* the loss of n parts: parts (n,rows,2), added in that order */
typedef struct dt_cross_entropy_join_args {
    dt_dtype dtype;
    double *loss;
    void *lse;
    const double *parts;
    const int32_t *labels;
    size_t n, rows;
    double denominator, *z_loss; /* lse, loss and z_loss as of cross_entropy */
} dt_cross_entropy_join_args;

/* dlogits (+)= factor (softmax (1 + 2 z lse) - target); 0 for label < 0 */
typedef struct dt_cross_entropy_back_args {
    dt_dtype dtype;
    void *dlogits;
    const void *logits, *lse;
    const int32_t *labels;
    size_t rows, cols, vocab;
    /* factor = *upstream times scale */
    const double *upstream;
    double scale, smoothing, z;
    int accumulate;
    void *work;
    size_t work_bytes;  /* dt_row_work bytes; dlogits may be logits */
    int64_t first, all; /* all > 0: the columns are a part, as of cross_entropy */
} dt_cross_entropy_back_args;

/* *loss = sum of (a - b)^2 / denominator, in runs of 1,024 elements, ascending */
typedef struct dt_mse_args {
    dt_dtype dtype;
    double *loss;
    const void *a, *b;
    size_t count;
    double denominator;
} dt_mse_args;

typedef struct dt_mse_back_args { /* da[i] (+)= *upstream * scale * (a - b) */
    dt_dtype dtype;
    void *da;
    const void *a, *b;
    size_t count;
    const double *upstream;
    double scale;
    int accumulate;
} dt_mse_back_args;

/* elements of one run of a norm: the unit in which sums of squares are taken and shared */
#define DT_PIECE 1024
/* out[i] = sum of in[j]^2 over run i of DT_PIECE elements, j ascending, in double */
typedef struct dt_square_sums_args {
    dt_dtype dtype;
    double *out;
    const void *in;
    size_t count;
} dt_square_sums_args;

/* one step over a flat run; arXiv:1711.05101; coupled: arXiv:1412.6980 with L2 */
typedef struct dt_adamw_args {
    /* all of T, which is f32 or f64 */
    dt_dtype dtype;
    void *param;
    const void *grad;
    void *m, *v;
    size_t count;
    double lr, beta1, beta2, eps, weight_decay, grad_scale; /* the gradient is grad * grad_scale */
    /* from 1: bias correction 1 - beta^step, which of INT64_MAX is none */
    int64_t step;
    /* 0: decay apart from the moments (AdamW); 1: added to the gradient (Adam) */
    int coupled;
    /* receives param rounded to bf16 or f16: param is then the master; or NULL */
    dt_dtype narrow_dtype;
    void *narrow;
    /* another run of the same types, in the same call, or NULL: a GPU takes many */
    const struct dt_adamw_args *next;
} dt_adamw_args; /* small ones in one launch. No run overlaps another */

/* b = momentum b + g; p -= lr b; g includes weight_decay p; the first step sets b = g */
typedef struct dt_sgd_args {
    dt_dtype dtype;
    void *param;
    const void *grad;
    void *momentum_buffer;
    size_t count;
    double lr, momentum, weight_decay, grad_scale;
    int64_t step;
    dt_dtype narrow_dtype;
    void *narrow; /* as of adamw */
} dt_sgd_args;

/* 1-bit Adam, arXiv:2102.02888. Once v is frozen, a step is three kernels' work: each rank's
   momentum, its exchange as signs, the update. A message is `count` signs, bit i % 8 of byte i / 8
   being 1 where number i is not negative, and then their scale, a double. An element whose v is 0
   never had a gradient, or is padding: it counts nowhere, and its number, error and mean are 0. */
typedef struct dt_momentum_args { /* m = beta1 m + (1 - beta1) grad grad_scale */
    /* T is f32 or f64, as below */
    dt_dtype dtype;
    void *m;
    const void *grad;
    size_t count;
    double beta1, grad_scale;
} dt_momentum_args;

/* p -= lr (m / (sqrt(v) + eps) + weight_decay p); m and v stay as they are */
typedef struct dt_frozen_adam_args {
    dt_dtype dtype;
    void *param;
    const void *m, *v;
    size_t count;
    double lr, eps, weight_decay;
    dt_dtype narrow_dtype;
    void *narrow; /* as of adamw */
} dt_frozen_adam_args;

/* out: (parts) messages of count / parts signs of x + error; count / parts in 8s */
typedef struct dt_sign_pack_args {
    dt_dtype dtype;
    void *out;
    const void *x;
    void *error;
    const void *v;
    size_t count, parts;
    /* two doubles for each DT_PIECE of count, and one; the CPU wants none */
    void *work;
    size_t work_bytes;
    /* one scale for all, |x + error| / sqrt(their number); error: what the messages leave */
} dt_sign_pack_args;

/* out[i] = mean of number i of n messages of `count` signs, added in order */
typedef struct dt_sign_unpack_args {
    dt_dtype dtype;
    void *out;
    const void *in, *v;
    size_t count, n;
} dt_sign_unpack_args;

/* A device: where tensor memory comes from, and its kernels. Copy one and change an entry to
   replace a kernel. A NULL kernel is answered with DT_ERR_UNSUPPORTED and the kernel's name. */
typedef struct dt_kernels {
    const char *name;                         /* "cpu", "cuda" */
    void *(*alloc)(void *user, size_t bytes); /* NULL -> the host table's */
    void (*free)(void *user, void *p, size_t bytes);
    /* host or device to either */
    dt_status (*move)(void *dst, const void *src, size_t bytes, void *stream);
    /* Wait until the stream is empty; NULL -> nothing. DT_ERR_ARG: since the last time a kernel met
       an index outside of its table, which it left out. For a table whose kernels do not wait to
       answer that themselves. */
    dt_status (*sync)(void *stream);
    void *user;
    /* A rank's queue of work on the device: the `stream` of its kernels. place: the rank's number
       among those of its machine. NULL with the reason in text. The CPU has none: what it was asked
       for is done when a kernel returns. */
    void *(*open)(int place, char *text, size_t text_bytes);
    void (*close)(void *stream);
    /* host memory that moves at full speed, also after */
    void *(*pin)(size_t bytes);
    /* move has returned; NULL: the host table's */
    void (*unpin)(void *p, size_t bytes);
    /* may kernels read and write there? NULL: everywhere */
    int (*reaches)(const void *p);
    /* Kernels of this queue are to reach the memory of the devices of places 0 .. places-1: ranks
       that are threads read and write each other's. DT_ERR_DEVICE with the reason in text; NULL:
       they do. */
    dt_status (*share)(void *stream, int places, char *text, size_t text_bytes);
    /* A mark in a queue: the place behind all that it holds now. mark NULL makes one, else it is
       set anew; NULL: refused. passed: 1 the device is past it, 0 not yet, -1 it has failed. after:
       what the queue gets from now on waits for the mark of another queue. A mark that was refused
       is as it was, and stays yours. */
    void *(*mark)(void *stream, void *mark);
    int (*passed)(void *mark);
    dt_status (*after)(void *stream, void *mark);
    void (*unmark)(void *mark);
    size_t work_bytes; /* the least scratch that products, attention and sums want */
    /* so many logits dt_linear_cross_entropy keeps for its backward; 0: none, see there */
    size_t loss_numbers;
#define DT_KERNEL_ENTRY(k) dt_status (*k)(const dt_##k##_args *args, void *stream);
    DT_KERNELS(DT_KERNEL_ENTRY)
#undef DT_KERNEL_ENTRY
} dt_kernels;

/* [local] The CPU's table. Constant, shared by all contexts. */
DT_API const dt_kernels *dt_kernels_cpu(void);
/* [local] Scratch bytes for the CPU kernels of that name: 0 for a negative size, SIZE_MAX on
   overflow. */
DT_API size_t dt_matmul_work(int64_t n, int64_t k, dt_dtype dtype);
DT_API size_t dt_row_work(int64_t cols, dt_dtype dtype);
DT_API size_t dt_attention_work(int64_t tk, int64_t dim, dt_dtype dtype);
#ifdef DT_USE_CUDA
/* [local] The table in dt_kernels.cu. Never NULL; whether a GPU can be used is dt_cuda_ready's
   answer. */
extern const dt_kernels *dt_kernels_cuda(void);
/* [local] DT_OK, or DT_ERR_DEVICE with the reason in text ("no NVIDIA driver found"). With DT_OK
   text is "" or advice: the -arch that the device needs and dt_kernels.cu was not compiled for. */
extern dt_status dt_cuda_ready(char *text, size_t text_bytes);
/* [local] A queue of work on a device, for dt_ctx_desc.stream: on a device of your choice, or in a
   stream of your own. The calling thread's current device is that one from then on. NULL with the
   reason in text. A context that is given none opens one on device place % devices, and closes it.
   Closing waits for the queue; your stream remains. Calls on a context, and closing a queue, come
   from a thread whose current device is the queue's: another one calls cudaSetDevice first. */
typedef struct dt_cuda_desc {
    int device;
    void *stream; /* a cudaStream_t of that device; NULL: a new one */
    int urgent;   /* what the new one holds goes before other queues' work */
} dt_cuda_desc;
extern void *dt_cuda_open(dt_cuda_desc desc, char *text, size_t text_bytes);
extern void dt_cuda_close(void *queue);
/* [local] Of dt_ctx_stream(ctx), the cudaStream_t in which its kernels run and yours may; and its
   device. Of NULL the default stream, and the thread's current device. */
extern void *dt_cuda_stream(void *queue);
extern int dt_cuda_device(void *queue);
#endif

// ==== 3. Host and io tables =====================================================================

/* What a byte is for. dt_memory counts each class apart. */
typedef enum dt_mem {
    DT_MEM_PARAMS = 0, /* parameter values of units */
    DT_MEM_GRADS,      /* gradients that are kept until the update */
    DT_MEM_OPTIM,      /* optimizer state */
    DT_MEM_ACTS,       /* arenas of blocks: activations and their gradients */
    DT_MEM_COMM,       /* buffers of communication; gathered units and passing gradients */
    DT_MEM_HOST,       /* bookkeeping: contexts, names, tape nodes */
    DT_MEM_TEMP,       /* scratch that kernels are lent */
    DT_MEM_CLASSES
} dt_mem;

/* Levels of log: errors and notices are printed by the default table, details are not. */
enum { DT_LOG_ERROR = 0, DT_LOG_NOTICE, DT_LOG_DETAIL };

/* The world outside: the library allocates, waits, reads the clock and prints through this table
   only. */
typedef struct dt_host {
    void *user;
    /* 64-byte aligned, or NULL: refused */
    void *(*alloc)(void *user, size_t bytes, dt_mem mem);
    void (*free)(void *user, void *p, size_t bytes, dt_mem mem);
    double (*now)(void *user);                 /* seconds, monotonic */
    void (*sleep)(void *user, double seconds); /* 0: let another thread run */
    void (*log)(void *user, int level, int rank, const char *text);
    /* Zeroed memory that forks of this process share, of which no page exists before it is touched;
       NULL: refused. All three may be NULL: then ranks cannot be forked. */
    void *(*map)(void *user, size_t bytes);
    void (*unmap)(void *user, void *p, size_t bytes);
    /* whole pages of it are given back, and zero again */
    void (*discard)(void *user, void *p, size_t bytes);
} dt_host;

/* How to open a file. Modes that write do not follow a symbolic link in the file's place
   (O_NOFOLLOW). Every mode refuses a FIFO, a device or a socket, without blocking. */
typedef enum dt_io_mode {
    DT_IO_READ = 0, /* an existing file, or a folder to fsync */
    DT_IO_WRITE,    /* an existing file, to read and write, as in all modes below */
    DT_IO_CREATE,   /* a new file; errno EEXIST if it exists */
    DT_IO_PRIVATE,  /* a new file that other users cannot read */
    DT_IO_LOCK      /* an existing file without other hard links, or a new one */
} dt_io_mode;

/* Files. Every call returns -1 on failure and sets errno: ENOENT or ENOTDIR if no such file
   exists. */
typedef struct dt_io {
    void *user;
    /* a descriptor; mode: a dt_io_mode */
    int (*open)(void *user, const char *path, int mode);
    int (*close)(void *user, int fd);
    int64_t (*size)(void *user, int fd);
    int64_t (*pread)(void *user, int fd, void *buf, size_t bytes, int64_t offset);
    int64_t (*pwrite)(void *user, int fd, const void *buf, size_t bytes, int64_t offset);
    int (*fsync)(void *user, int fd);
    int (*rename)(void *user, const char *from, const char *to);
    int (*resize)(void *user, int fd, int64_t bytes); /* what is new is zero */
    int (*remove)(void *user, const char *path);      /* a file, or the symbolic link */
    /* to disk, and out of memory; or NULL */
    int (*forget)(void *user, int fd, int64_t bytes, int64_t offset);
    /* What checkpoints need besides; a table without them has none. */
    int (*make)(void *user, const char *path); /* a new folder */
    /* Calls each for every entry of a folder but . and ..; each may remove that entry. */
    int (*list)(void *user, const char *path, void (*each)(void *arg, const char *name), void *arg);
    /* until it is closed, however its process ends; errno EWOULDBLOCK: another has it */
    int (*lock)(void *user, int fd);
    /* Removes the named files from a folder, in order, then the folder if it is empty. Follows no
       symbolic link: removes a link in place of the folder or of a file. */
    int (*remove_folder)(void *user, const char *path, const char *const *names, int n);
} dt_io;

/* [local] The tables that use libc; constant. */
DT_API const dt_host *dt_host_default(void);
DT_API const dt_io *dt_io_default(void);

// ==== 4. Context, errors, memory account ========================================================

typedef struct dt_ctx dt_ctx; /* one rank: its memory, tape, parameters, first error */
typedef struct dt_tensor dt_tensor;
/* this rank's end of a group of ranks: dt_comm.h. It begins with a dt_group. */
typedef struct dt_comm dt_comm;

/* What this header needs to know of a group: this rank's place in it. */
typedef struct dt_group {
    int rank, size;
} dt_group;

typedef struct dt_ctx_desc {
    uint64_t seed; /* 0 -> 1; initial values are f(seed, name, global index) */
    int rank;      /* for messages */
    /* NULL -> dt_kernels_cpu(); with DT_USE_CUDA dt_kernels_cuda() where dt_cuda_ready answers
       DT_OK */
    const dt_kernels *kernels;
    const dt_host *host; /* NULL -> dt_host_default() */
    const dt_io *io;     /* NULL -> dt_io_default() */
    void *stream;        /* handed to every kernel; NULL -> what the table opens */
    /* this rank's number among those of its machine: a device's table takes the device of that
       number, modulo their number. Calls on a context with a device come from a thread whose
       current device is that one: dt_ctx_make's caller is, and dt_run's ranks are */
    int place;
    size_t mem_limit; /* bytes that may be live, over all classes; 0: no limit */
} dt_ctx_desc;

/* [local] NULL when the host table refuses the memory. dt_run makes one for each rank; alone, make
   it yourself. */
DT_API dt_ctx *dt_ctx_make(dt_ctx_desc desc);
/* [local] Frees all that the context owns. NULL is allowed. */
DT_API void dt_ctx_free(dt_ctx *ctx);

/* [local] The tables and the rank the context was made with; NULL or 0 if ctx is NULL. */
DT_API const dt_kernels *dt_ctx_kernels(const dt_ctx *ctx);
DT_API const dt_host *dt_ctx_host(const dt_ctx *ctx);
DT_API const dt_io *dt_ctx_io(const dt_ctx *ctx);
DT_API void *dt_ctx_stream(const dt_ctx *ctx);
DT_API int dt_ctx_rank(const dt_ctx *ctx);
DT_API uint64_t dt_ctx_seed(const dt_ctx *ctx);
/* [local] One pointer for the layer above (dt_comm.h keeps this rank's world here); not used by
   this header. */
DT_API void *dt_ctx_attached(const dt_ctx *ctx);
DT_API void dt_ctx_attach(dt_ctx *ctx, void *upper);

/* [local] Records the first failure with its reason, tells the listeners (so that peers learn of
   it) and logs it. Later calls change nothing. Returns status. Yours to call too, from your own
   ops. */
DT_API dt_status dt_fail(dt_ctx *ctx, dt_status status, const char *fmt, ...) DT_PRINTF(3, 4);
/* [local] The first failure, DT_OK if none. Sticky. DT_ERR_MEM for ctx NULL. */
DT_API dt_status dt_error(const dt_ctx *ctx);
/* [local] "rank 3: dt_linear(w1): x (8,128) and w (64,256): 128 != 256"; "" if none. */
DT_API const char *dt_error_text(const dt_ctx *ctx);
/* [local] Sends one line to the log hook. Control characters and bytes that are not UTF-8 become
   \xNN, as in dt_error_text. */
DT_API void dt_log(dt_ctx *ctx, int level, const char *fmt, ...) DT_PRINTF(3, 4);
/* [local] The length in bytes of the printable UTF-8 character at s (which ends with NUL); 0 for a
   control character (C0, DEL, C1) or an invalid byte. dt's messages show such a byte as \xNN. */
DT_API size_t dt_printable(const char *s);

typedef struct dt_memory {
    size_t live[DT_MEM_CLASSES], peak[DT_MEM_CLASSES]; /* bytes */
    /* peak_total: of the sum, not the sum of peaks */
    size_t live_total, peak_total;
    size_t allocations; /* calls of the allocator so far */
} dt_memory;

/* [local] Bytes by class. Counters move only in dt_alloc and dt_free. */
DT_API dt_memory dt_memory_used(const dt_ctx *ctx);
/* [local] Peaks begin again at what is live. */
DT_API void dt_memory_reset_peak(dt_ctx *ctx);

/* [local] bytes of class mem, from the device table for tensor classes and from the host table for
   DT_MEM_HOST. bytes 0 gives NULL without an error; a refusal, by a table or because mem_limit
   would be exceeded, fails the context (DT_ERR_MEM, naming what and how much), and the log hook
   gets a notice: live bytes and peak of each class. */
DT_API void *dt_alloc(dt_ctx *ctx, dt_mem mem, size_t bytes, const char *what);
/* [local] p from dt_alloc with the same mem and bytes; NULL is allowed. */
DT_API void dt_free(dt_ctx *ctx, dt_mem mem, void *p, size_t bytes);
/* [local] Host memory, class host, that a device's table copies to and from without the processor
   (pinned). Wait until its copies are done before dt_unpin, which does not. */
DT_API void *dt_pin(dt_ctx *ctx, size_t bytes, const char *what);
DT_API void dt_unpin(dt_ctx *ctx, void *p, size_t bytes);
/* [local] Scratch of at least `bytes` until the next dt_scratch call: one buffer that grows to the
   largest request. */
DT_API void *dt_scratch(dt_ctx *ctx, size_t bytes);

// ==== 5. Tensors and parameters =================================================================

typedef struct dt_param_info dt_param_info;
typedef struct dt_block_state dt_block_state;

struct dt_tensor { /* read it, print it, index it; ops write it */
    /* device memory, dense, row-major; for a parameter NULL until it has storage */
    void *data;
    /* as data, but f32 for a bf16 or f16 parameter. Of parameters and dt_require_grad tensors: set
       by dt_backward, but NULL for parameters at ZeRO 2 and 3, which keep a part (dt_zero_grad). Of
       others: valid inside their block's backward only */
    void *grad;
    dt_shape shape; /* local: what this rank holds */
    dt_dtype dtype;
    const char *name; /* a parameter's name, else the op that made it */
    dt_ctx *ctx;
    int needs_grad;
    dt_tensor *base;        /* a view has the base's data, and its gradient is the base's */
    dt_param_info *param;   /* NULL unless a parameter */
    dt_block_state *block;  /* the block whose arena holds it */
    struct dt_node *maker;  /* the recorded op that made it, if any */
    int readers;            /* how often ops have taken it as an input, but for dt_no_grad */
    struct dt__arena *room; /* of a brief tensor (section 16) while it has data, else NULL */
    dt_tensor *brief_next;  /* brief tensors of a block */
    int brief;
};

typedef struct dt_init {
    int kind;
    double scale;
} dt_init;
#define DT_ZEROS ((dt_init){ 0, 0.0 })
#define DT_ONES ((dt_init){ 1, 1.0 })
#define DT_NORMAL(std) ((dt_init){ 2, (std) })
#define DT_UNIFORM(a) ((dt_init){ 3, (a) }) /* in [-a, a) */

/* comm NULL: no cut; else part comm-rank of comm-size */
typedef struct dt_shard_spec {
    dt_comm *comm;
    int dim;
} dt_shard_spec;
enum { DT_GRAD_REPLICATED = 0, DT_GRAD_PARTIAL };
/* DT_GRAD_PARTIAL: each rank's gradient is a part of the sum */
typedef struct dt_grad_placement {
    dt_comm *comm;
    int kind;
} dt_grad_placement;

typedef struct dt_param_desc {
    dt_shard_spec shards[3]; /* which box of the full tensor this rank owns */
    dt_grad_placement
        grad_placements[2]; /* groups along which copies differ from the mesh's rule (dt_zero.h) */
    int frozen;             /* no gradient, no update */
    int no_decay;           /* no weight decay; parameters of fewer than 2 dimensions never decay */
    double lr_scale;        /* 0 -> 1 */
    dt_dtype dtype;         /* 0 -> DT_F32 */
} dt_param_desc;

/* The part of a full logical tensor that a rank owns. It may reach past the end of a dimension that
   its group's size does not divide: that part is zero, gets no gradient, is not counted and not
   saved. */
typedef struct dt_local_slice {
    int64_t lo[DT_MAX_DIMS];     /* first index, in the full tensor */
    int64_t n[DT_MAX_DIMS];      /* local extent = ceil(full / parts) */
    int64_t inside[DT_MAX_DIMS]; /* how much of n lies inside the full tensor */
} dt_local_slice;

typedef struct dt_bucket dt_bucket;

struct dt_param_info { /* what a parameter is beyond its tensor; read-only */
    int index;         /* order of registration */
    dt_shape full;     /* the logical tensor */
    dt_local_slice box;
    dt_init init;
    dt_param_desc desc;
    int scope;            /* dt_scope and dt_stage calls before it */
    int stage;            /* of dt_stage */
    dt_bucket *unit;      /* NULL before storage is made */
    size_t offset, count; /* elements: place in the unit, local size */
    int written;          /* this micro-batch's gradient has been started */
};

/* [local] Registers a parameter; no memory and no values yet. dtype f32, not cut. Fails when the
   name is taken or storage has been made already. */
DT_API dt_tensor *dt_param(dt_ctx *ctx, const char *name, dt_shape full, dt_init init);
/* [local] The same with cuts, marks and flags. Every rank names the same full shape. */
DT_API dt_tensor *dt_param_at(
    dt_ctx *ctx, const char *name, dt_shape full, dt_init init, dt_param_desc desc);
/* [local] Names of parameters registered from here on begin with prefix ("h.0."), and no unit
   crosses this point. NULL ends it. The text is copied. */
DT_API void dt_scope(dt_ctx *ctx, const char *prefix);
/* [local] Parameters registered from here on belong to stage `stage` >= 0 of a pipeline, and no
   unit crosses this point. A rank may have several stages; each has a tape of its own (section 8).
   Default 0. Once it is called, dt_zero_make accepts a rank without parameters. */
DT_API void dt_stage(dt_ctx *ctx, int stage);
/* [local] Parameters in order of registration; NULL out of range. */
DT_API int dt_param_count(const dt_ctx *ctx);
DT_API dt_tensor *dt_param_get(const dt_ctx *ctx, int index);
DT_API dt_tensor *dt_param_find(const dt_ctx *ctx, const char *name);
/* [local] The box of `full` that `cuts` (NULL: none) leave to this rank; all 0 if full is invalid.
   A cut of a dimension that full lacks is ignored. */
DT_API dt_local_slice dt_local_slice_of(dt_shape full, const dt_shard_spec shards[3]);

/* [local] A copy of host data as a tensor without gradient, until dt_reset. host NULL: contents
   undefined. */
DT_API dt_tensor *dt_input(dt_ctx *ctx, dt_dtype dtype, dt_shape shape, const void *host);
/* [local], of a parameter at ZeRO-3 [collective: its data group]. Copies elements between a tensor
   and host memory. Waits for the stream. */
DT_API dt_status dt_read(const dt_tensor *t, void *host);
DT_API dt_status dt_write(dt_tensor *t, const void *host);
/* [local] Where t's values are now: what your own op reads instead of t->data where t may be a
   parameter, whose values ZeRO-3 gathers for it ([collective: the parameter's data group]) and
   frees when the block ends. NULL after a failure. The same holds for dt_read and dt_write of a
   parameter. */
DT_API void *dt_data(dt_tensor *t);
/* [local] A scalar's value. NaN if t is NULL or its context has failed. Waits for the stream. */
DT_API double dt_item(const dt_tensor *t);

// ==== 6. Units and listeners ====================================================================

/* Consecutive parameters of one scope with equal type, cuts, marks and trainability, stored
   together, split at bucket_bytes: the bucket of data parallelism and the piece that ZeRO cuts into
   runs. Padding is zero. */
struct dt_bucket {
    int index, first_param, params;
    dt_dtype dtype, grad_dtype; /* gradients of bf16 and f16 are f32 */
    int frozen;
    int stage;            /* of dt_stage */
    size_t count, padded; /* elements */
    /* (padded) values. Of a cut unit: only while it is gathered, class comm, else NULL */
    void *data;
    /* (run) those this rank keeps, class params: data itself, or its run of a cut unit */
    void *kept;
    size_t first, run; /* which those are */
    /* (padded) sum over the finished micro-batches, class grads; made when first needed */
    void *grad;
    /* where this micro-batch's gradient goes while it is incomplete; may be grad */
    void *passing;
    int filled; /* grad holds at least one micro-batch */
    /* parameters whose gradient is still to come in the current backward */
    int pending;
};

typedef struct dt_buckets_desc {
    size_t bucket_bytes; /* 0 -> 25 MiB */
    size_t pad;          /* units are padded to a multiple of this many elements; 0 -> 1 */
    /* 1: values that a rank keeps of a cut unit are not kept here: a listener's release takes them,
       its gather has them */
    int elsewhere;
    /* 1: grad is not made: grad_ready finds each micro-batch's gradient in passing */
    int hand_over;
    /* If not NULL: the padding of each unit (*pad), and that this rank keeps run `part` of `parts`
       equal ones of its values; as they come they are pad above and 0 of 1. */
    void (*cut)(const dt_bucket *unit, size_t *pad, int *parts, int *part, void *user);
    void *user;
} dt_buckets_desc;

/* [local] Gives every registered parameter storage and its initial values. Called by dt_zero_make,
   or with defaults at the first use of a parameter. */
DT_API dt_status dt_buckets_make(dt_ctx *ctx, dt_buckets_desc desc);
DT_API int dt_bucket_count(const dt_ctx *ctx);
DT_API dt_bucket *dt_bucket_get(const dt_ctx *ctx, int index);
/* [local] The next backward starts the gradient sums from zero. */
DT_API void dt_clear_grads(dt_ctx *ctx);

typedef enum dt_phase {
    DT_FORWARD = 1,
    DT_BACKWARD,
    DT_BACKWARD_INPUT,
    DT_BACKWARD_WEIGHT
} dt_phase;
typedef struct dt_event {
    dt_phase phase;
    /* 0: the whole micro-batch; else order of the dt_block call in it, from 1 */
    int block;
    int micro, last; /* as told by dt_micro */
    int stage;       /* as told by dt_tape */
} dt_event;

/* How an upper layer attaches to this one. Each entry may be NULL. The struct is yours and must
   outlive its use. */
typedef struct dt_listener {
    void (*enter)(dt_ctx *ctx, const dt_event *event, void *user);
    void (*leave)(dt_ctx *ctx, const dt_event *event, void *user);
    /* unit->grad holds this micro-batch too; or unit->passing holds it alone: who takes it sets
       passing to NULL */
    void (*grad_ready)(dt_ctx *ctx, dt_bucket *unit, int last, void *user);
    /* 1: another rank has logged it */
    int (*failed)(dt_ctx *ctx, dt_status status, const char *text, void *user);
    /* dt_ctx_free begins: give back what you took from the context */
    void (*closing)(dt_ctx *ctx, void *user);
    void *user;
    /* after each kernel of an op: what is under way may move on */
    void (*kernel_done)(dt_ctx *ctx, void *user);
    /* a cut unit is about to be read: make its data whole */
    void (*gather)(dt_ctx *ctx, dt_bucket *unit, void *user);
    /* What was whole for one access only may go; what its owner wrote into the whole has to be
       kept. */
    void (*release)(dt_ctx *ctx, dt_bucket *unit, int written, int unused, void *user);
    void (*reset)(dt_ctx *ctx, void *user); /* dt_reset has freed the tensors */
    /* The host may be about to wait for the device, without a limit. all: what was started and not
       waited for has to end too. 1: nothing of it goes on there now. */
    int (*settle)(dt_ctx *ctx, int all, void *user);
    struct dt_listener *next; /* set by dt_listen */
} dt_listener;
/* [local] Appends to the chain; removes from it. */
DT_API void dt_listen(dt_ctx *ctx, dt_listener *listener);
DT_API void dt_unlisten(dt_ctx *ctx, dt_listener *listener);
/* [local] What follows is micro-batch `index` of `count` of this step. Default 0 of 1. */
DT_API void dt_micro(dt_ctx *ctx, int index, int count);

// ==== 7. Ops ====================================================================================

/* All [local]. Each returns a tensor that lives until dt_reset, or NULL after a failure. Shapes:
   (..,X) has any leading dimensions. Types of floating inputs must agree; bf16 and f16 are computed
   in f32 and rounded once. */

typedef struct dt_linear_desc {
    int activation;      /* DT_ACT_*, but not AFFINE, applied to x w^T + b; 0: none */
    dt_tensor *residual; /* of the result's shape, added last; NULL: none */
} dt_linear_desc;
/* x (..,I), w (O..,I), b (O..) or NULL -> (..,O..): x w^T + b. w may have several output
   dimensions. The long form joins what follows to the product: less memory is read, and the
   residual is not kept. */
DT_API dt_tensor *dt_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b);
DT_API dt_tensor *dt_linear_at(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc);
/* table (V,C), ids (..) i32 -> (..,C). An id outside the full table fails. A table cut along V
   gives zero rows for ids of other ranks: the result is PARTIAL over the cut's group. */
DT_API dt_tensor *dt_embedding(dt_tensor *table, dt_tensor *ids);

/* x (..,C), gain (C), bias (C); eps 0 -> 1e-5. arXiv:1607.06450. */
DT_API dt_tensor *dt_layernorm(dt_tensor *x, dt_tensor *gain, dt_tensor *bias, double eps);
/* x / sqrt(mean of x^2 + eps) * gain; eps 0 -> 1e-5. arXiv:1910.07467. */
DT_API dt_tensor *dt_rmsnorm(dt_tensor *x, dt_tensor *gain, double eps);
/* e^x / sum of e^x over the last dimension. */
DT_API dt_tensor *dt_softmax(dt_tensor *x);

/* Functions of each number: gelu in the tanh form and exact, arXiv:1606.08415; silu(x) = x / (1 +
   e^-x). */
DT_API dt_tensor *dt_gelu(dt_tensor *x);
DT_API dt_tensor *dt_gelu_erf(dt_tensor *x);
DT_API dt_tensor *dt_silu(dt_tensor *x);
DT_API dt_tensor *dt_relu(dt_tensor *x);
DT_API dt_tensor *dt_tanh(dt_tensor *x);
DT_API dt_tensor *dt_exp(dt_tensor *x);
DT_API dt_tensor *dt_ln(dt_tensor *x);
/* scale x + shift */
DT_API dt_tensor *dt_affine(dt_tensor *x, double scale, double shift);
/* x (..,2,F), gate and up -> (..,F): silu(gate) up. arXiv:2002.05202. */
DT_API dt_tensor *dt_swiglu(dt_tensor *x);

/* a op b, element by element. Shapes are aligned at their ends; a dimension of 1, or one that is
   missing, repeats. */
DT_API dt_tensor *dt_add(dt_tensor *a, dt_tensor *b);
DT_API dt_tensor *dt_sub(dt_tensor *a, dt_tensor *b);
DT_API dt_tensor *dt_mul(dt_tensor *a, dt_tensor *b);
DT_API dt_tensor *dt_div(dt_tensor *a, dt_tensor *b);

enum { DT_ALL = -100 }; /* as a dimension: all of them, to a scalar */
/* Over one dimension, counted from 0, which disappears. max: its gradient goes to the first of
   equal ones. */
DT_API dt_tensor *dt_sum_over(dt_tensor *x, int dim);
DT_API dt_tensor *dt_mean_over(dt_tensor *x, int dim);
DT_API dt_tensor *dt_max_over(dt_tensor *x, int dim);

/* Another shape with the same count; a view, free. */
DT_API dt_tensor *dt_reshape(dt_tensor *x, dt_shape shape);
/* count indices of one dimension, from `first`; n tensors, at most 8, joined along one dimension
   (all of them NULL: NULL and no failure, since none tells the context); two dimensions
   exchanged. */
DT_API dt_tensor *dt_slice(dt_tensor *x, int dim, int64_t first, int64_t count);
DT_API dt_tensor *dt_concat(dt_tensor *const *x, int n, int dim);
DT_API dt_tensor *dt_transpose(dt_tensor *x, int dim_a, int dim_b);
/* Another element type. From i32 there is no way back for a gradient. */
DT_API dt_tensor *dt_cast(dt_tensor *x, dt_dtype dtype);

/* x (R,C), rows (..) i32 -> (..,C): copies of rows of x; row -1 gives zeros. */
DT_API dt_tensor *dt_gather_rows(dt_tensor *x, dt_tensor *rows);
/* x (..,C), rows (..) i32 -> (count,C): row i of x is added to row rows[i], in ascending i; -1 goes
   nowhere, another number outside fails. */
DT_API dt_tensor *dt_scatter_rows(dt_tensor *x, dt_tensor *rows, int64_t count);
/* x (..,N) -> (..,k) largest, in descending order, ties to the lower index; *index receives their
   places, i32. */
DT_API dt_tensor *dt_topk(dt_tensor *x, int k, dt_tensor **index);

typedef struct dt_rope_desc {
    double theta; /* 0 -> 10000 */
    int rotary;   /* how many of D turn; 0 -> all */
    /* 1: pairs are neighbours (2i, 2i+1), as Meta writes them; 0: halves (i, i + rotary/2) */
    int interleaved;
} dt_rope_desc;
/* x (B,T,H,D), positions (B,T) i32: turns pairs of each head by position * theta^(-2i/rotary).
   arXiv:2104.09864. */
DT_API dt_tensor *dt_rope(dt_tensor *x, dt_tensor *positions, dt_rope_desc desc);

/* x (..,C): each number is zeroed with probability p, the others divided by 1 - p. What is zeroed
   is a function of (key, tokens (..) i32, column) alone: give the global index of each token, and a
   key that differs by step and place, and every layout and every recomputation drops the same
   numbers. tokens NULL: rows are counted. */
DT_API dt_tensor *dt_dropout(dt_tensor *x, double p, uint64_t key, dt_tensor *tokens);

typedef struct dt_attn_desc {
    int kv_heads; /* 0 -> k's own; otherwise must agree with it */
    int full;     /* 1: every query sees every key; default causal */
    /* (B,TQ), (B,TK) i32; both NULL: key j is at j, query i at i + TK - TQ */
    dt_tensor *positions, *key_positions;
    /* the same of documents packed into a sequence. Where TQ = TK, the keys' NULL means the
       queries'. */
    dt_tensor *documents, *key_documents;
    dt_tensor **lse; /* not NULL: receives the log-sum-exp (B,H,TQ) */
} dt_attn_desc;
/* q (B,TQ,H,D), k and v (B,TK,K,D), H a multiple of K -> (B,TQ,H,D), scale 1/sqrt(D). A causal
   query sees the keys whose position is not after its own, of its own document. No TQ x TK matrix
   is kept: the backward computes the scores again from lse. arXiv:2205.14135. */
DT_API dt_tensor *dt_attention(dt_tensor *q, dt_tensor *k, dt_tensor *v, dt_attn_desc desc);

/* Where the columns are one of several parts of a vocabulary, which other ranks hold (dt_parallel.h
   fills it in). */
typedef struct dt_loss_part {
    int parts; /* 0: this is the whole */
    /* index of column 0 here, and columns of all parts, padding not counted */
    int64_t first, all;
    /* each: (parts,count) */
    dt_status (*gather)(void *user, const double *mine, double *each, size_t count);
    void *user;
} dt_loss_part;

typedef struct dt_loss_desc {
    /* columns from here on are padding: not in the sum, no gradient; 0 -> all count */
    int64_t vocab;
    double smoothing; /* label smoothing, arXiv:1512.00567 */
    /* adds the gradient of z_weight * sum of lse^2 / denominator (arXiv:2204.02311) */
    double z_weight;
    /* not NULL: receives that sum without the weight, f64: it is not in the loss */
    dt_tensor **z_loss;
    dt_loss_part part; /* vocab is then of the columns here, and 0: none count */
} dt_loss_desc;
/* logits (..,V), labels (..) i32 -> f64 scalar in nats: the sum over labels >= 0, divided by
   denominator. Give the count of labels of the whole step over all ranks (dt_tokens) and the loss
   needs no further scaling in any layout. */
DT_API dt_tensor *dt_cross_entropy(dt_tensor *logits, dt_tensor *labels, double denominator);
DT_API dt_tensor *dt_cross_entropy_at(
    dt_tensor *logits, dt_tensor *labels, double denominator, dt_loss_desc desc);
/* The same of logits x w^T, x (..,C), w (V,C), a few rows at a time: on a CPU all logits are never
   in memory, and the backward computes them again. A GPU keeps them where they are at most 2^30
   numbers (2 GiB in bf16), see loss_numbers; more go as on a CPU. */
DT_API dt_tensor *dt_linear_cross_entropy(
    dt_tensor *x, dt_tensor *w, dt_tensor *labels, double denominator, dt_loss_desc desc);
/* Sum of (a - b)^2 over all elements divided by denominator -> f64 scalar. */
DT_API dt_tensor *dt_mse(dt_tensor *a, dt_tensor *b, double denominator);
/* Attaches a side loss: returns x, and the backward also runs through weight * scalar, wherever the
   true loss is. */
DT_API dt_tensor *dt_loss(dt_tensor *x, dt_tensor *scalar, double weight);

// ==== 8. Tape and blocks ========================================================================

enum { DT_MAX_INPUTS = 8 };
typedef struct dt_node dt_node;
typedef dt_status (*dt_backward_fn)(dt_node *node);
struct dt_node { /* one recorded op */
    const char *name;
    dt_tensor *out;
    dt_tensor *in[DT_MAX_INPUTS];
    int n_in;
    unsigned want;  /* bit i: the gradient of in[i] is wanted now */
    unsigned blind; /* bit i: the backward does not read the data of in[i] */
    /* gradients of bf16 and f16 parameters before they are widened */
    void *narrow[DT_MAX_INPUTS];
    dt_backward_fn backward;
    /* makes the data of a brief output again; NULL: no backward reads them */
    dt_backward_fn remake;
    void *saved;           /* what the op kept for its backward */
    dt_block_state *child; /* a dt_block call instead of an op */
    dt_node *prev;
};

/* YOUR OWN OP. Make the output, compute it, then record how to go back:
       dt_tensor *out = dt_new(x->ctx, x->dtype, x->shape); ...fill out->data from dt_data(x): of a
       parameter at ZeRO-3, x->data may be NULL... return dt_record(out, (dt_record_desc){ .name =
       "square", .in = { x }, .backward = square_back });
   and in square_back, where all inputs have their data, add to each gradient that is wanted:
       if (dt_wants(node, 0)) { float *dx = dt_grad(node, 0), *dy = node->out->grad; ... dx[i] +=
       ... } */
typedef struct dt_record_desc {
    const char *name; /* not copied: it must live until dt_reset */
    /* up to the first NULL, unless n_in says more: an input may be NULL */
    dt_tensor *in[DT_MAX_INPUTS];
    int n_in;
    dt_backward_fn backward;
    /* zeroed memory at node->saved, host memory, until dt_reset */
    size_t saved_bytes;
} dt_record_desc;
/* [local] A tensor of undefined contents in the current block's arena. */
DT_API dt_tensor *dt_new(dt_ctx *ctx, dt_dtype dtype, dt_shape shape);
/* [local] The same data as x (no copy, but of what dt_tp_enter has gathered: it goes before what is
   made of it) with a gradient of its own: the output of an op that is the identity forward. */
DT_API dt_tensor *dt_alias(dt_tensor *x);
/* [local] Records an op with inputs desc.in and output out; keeps nothing if no input needs a
   gradient. Returns out. */
DT_API dt_tensor *dt_record(dt_tensor *out, dt_record_desc desc);
/* [local] The same, and the saved memory to fill; NULL when nothing was recorded. */
DT_API void *dt_record_saved(dt_tensor *out, dt_record_desc desc);
/* [local] In a backward: whether in[i]'s gradient is wanted; where to add it (zero where it is
   new). 0 or NULL if the node has no such input. */
DT_API int dt_wants(const dt_node *node, int i);
DT_API void *dt_grad(dt_node *node, int i);
/* [local] The type of t->grad: t's own, but f32 for a bf16 or f16 parameter or if t is NULL. In a
   backward, dt_grad is of t's own. */
DT_API dt_dtype dt_grad_dtype(const dt_tensor *t);
/* [local] The same without the zeroing: *accumulate says whether to add or to overwrite. */
DT_API void *dt_grad_raw(dt_node *node, int i, int *accumulate);

/* [local] Runs fn as one block: a unit of memory, of recompute, of ZeRO-3, of pipeline stages and
   of the trace. fn may use tensors made before it, and returns one (x, if there is nothing else):
   NULL fails. Blocks may nest. */
typedef dt_tensor *(*dt_block_fn)(dt_tensor *x, void *user);
DT_API dt_tensor *dt_block(dt_ctx *ctx, dt_block_fn fn, dt_tensor *x, void *user);

typedef struct dt_block_desc {
    /* 1: keep the output only and run fn again in the backward, arXiv:1604.06174 */
    int recompute;
    /* not 0: fn gets a copy of so many bytes at user, so that user may be a local variable */
    size_t user_bytes;
} dt_block_desc;
/* [local] The same with a choice. A recomputed block gives the bits of a plain one and costs one
   more run of fn. After the forward the data of all that fn made are freed; the output is copied to
   where it outlives the block (not if fn returns x or another tensor made outside). The backward
   runs fn on the same x and user, which must live until then, goes back through what that recorded,
   and frees it; of two halves, the input half runs fn and the weight half frees. Side losses count
   once, gradients of dt_require_grad tensors last until dt_reset. Blocks inside, recomputed or not,
   are freed and run again with it. fn must repeat itself: other ops, parameters, or another output
   shape the second time fail; so does the use of a tensor that is gone. fn sees its data while it
   runs. */
DT_API dt_tensor *dt_block_at(
    dt_ctx *ctx, dt_block_fn fn, dt_tensor *x, void *user, dt_block_desc desc);
/* [local] 1 while a block runs for the second time: what fn or a listener counts, it counts only
   when this is 0. */
DT_API int dt_recomputing(const dt_ctx *ctx);

/* [local] From loss (a scalar) back to every parameter and tensor that needs a gradient. Adds to
   units' gradients. */
DT_API dt_status dt_backward(dt_tensor *loss);
/* [local] The same in two halves: gradients of activations first, of parameters later. Bits as
   dt_backward. */
DT_API dt_status dt_backward_input(dt_tensor *loss);
DT_API dt_status dt_backward_weight(dt_tensor *loss);
/* [local] The same in any phase of DT_BACKWARD and its two halves, from any tensor y: grad, of y's
   shape and type, is the gradient of the loss, loss scale included, with respect to y; it is used
   up. NULL for a scalar: 1, scaled. If y needs no gradient, all of this tape's parameters have a
   gradient of zero. */
DT_API dt_status dt_backward_at(dt_tensor *y, dt_tensor *grad, dt_phase phase);
/* [local] What the gradient of a loss begins with, 1 at first: all gradients are so many times
   larger, which keeps those of f16 in its range (arXiv:1710.03740). dt_zero.h sets it and divides
   it out again. */
DT_API void dt_loss_scale(dt_ctx *ctx, double scale);
/* [local] Frees every tensor of the current tape, which is all but parameters. Call after each
   micro-batch. */
DT_API void dt_reset(dt_ctx *ctx);
/* [local] Several micro-batches may be alive at once, as a pipeline has them: ops, the backward and
   dt_reset work on the tape named last, which keeps its memory, and in a backward only units of
   `stage` get a gradient. Tapes are numbered from 0, as small as may be; default 0, stage 0. Not
   inside a block, nor another stage before dt_reset. */
DT_API void dt_tape(dt_ctx *ctx, int tape, int stage);
/* [local] An input gets a gradient too (t->grad after the backward, until dt_reset). Call before
   its first use. */
DT_API dt_tensor *dt_require_grad(dt_tensor *t);
/* [local] on 1: ops record nothing (evaluation, generation); 0: they do again. */
DT_API void dt_no_grad(dt_ctx *ctx, int on);

// ==== 9. Weight files ===========================================================================

/* Nothing in a file is believed: sizes are checked before they are multiplied, names before they
   become paths, and a file that lies is DT_ERR_IO with its name and the reason. All file access is
   pread and pwrite of the io table. */

/* [local] A whole file of at most `limit` bytes, ended by a NUL that is not counted. Free it with
   dt_free(ctx, DT_MEM_HOST, text, *bytes + 1). */
DT_API char *dt_file_read(dt_ctx *ctx, const char *path, size_t limit, size_t *bytes);
/* [local] Writes a whole file, or leaves the old one: a temporary file beside it, fsync, rename. */
DT_API dt_status dt_file_write(dt_ctx *ctx, const char *path, const void *data, size_t bytes);

/* A JSON text as an array of nodes; node 0 is the whole. RFC 8259, and stricter where a reader
   could be misled: a duplicate key, -0, an integer beyond 2^53, a number that a double cannot hold,
   more than 64 levels, 4,194,304 values or 100,000,000 bytes are errors. Messages say where:
   "config.json:3:17: ...".

   The text is UTF-8, but a string may hold any bytes, as paths do: an invalid byte is written as
   \udc80 .. \udcff and read back from it (PEP 383, Python's surrogateescape). Every other lone
   surrogate is an error. */
typedef struct dt_json dt_json;
typedef enum dt_json_kind {
    DT_JSON_NULL = 0,
    DT_JSON_BOOL,
    DT_JSON_NUMBER,
    DT_JSON_STRING,
    DT_JSON_ARRAY,
    DT_JSON_OBJECT
} dt_json_kind;
/* [local] name is for messages. Keeps pointers to name and text until dt_json_free. */
DT_API dt_json *dt_json_parse(dt_ctx *ctx, const char *name, const char *text, size_t bytes);
DT_API void dt_json_free(dt_json *json);
/* [local] These answer 0, NULL or -1 where there is no such node or it is of another kind. Members
   of an object come in the order of their keys. A string is NUL-terminated and may hold NULs: bytes
   (may be NULL) receives its length. */
DT_API dt_json_kind dt_json_kind_of(const dt_json *json, int node);
/* elements or members */
DT_API int dt_json_count(const dt_json *json, int node);
/* element i; value of member i */
DT_API int dt_json_at(const dt_json *json, int node, int i);
/* of a member, from its value */
DT_API const char *dt_json_key(const dt_json *json, int node, size_t *bytes);
DT_API int dt_json_find(const dt_json *json, int node, const char *key);
DT_API const char *dt_json_string(const dt_json *json, int node, size_t *bytes);
DT_API int dt_json_number(const dt_json *json, int node, double *out);
/* a number without a fraction */
DT_API int dt_json_int(const dt_json *json, int node, int64_t *out);
DT_API int dt_json_bool(const dt_json *json, int node, int *out);
/* [local] Fails the context with the node's place in front: "config.json:3:17: heads: a number is
   needed". */
DT_API dt_status dt_json_fail(const dt_json *json, int node, const char *fmt, ...) DT_PRINTF(3, 4);

/* Writes JSON: begin it zeroed but for ctx. key NULL: an element of an array. Numbers read back as
   the same double, whatever the locale. The text is `text`, `used` bytes and a NUL, until
   dt_json_drop. */
typedef struct dt_json_out {
    dt_ctx *ctx;
    char *text;
    size_t used, room;
} dt_json_out;
/* [local] bracket is '{' or '['; dt_json_shut ends it with '}' or ']'. */
DT_API void dt_json_open(dt_json_out *out, const char *key, char bracket);
DT_API void dt_json_shut(dt_json_out *out, char bracket);
/* NULL becomes null */
DT_API void dt_json_put_string(dt_json_out *out, const char *key, const char *value);
/* finite, else DT_ERR_ARG */
DT_API void dt_json_put_number(dt_json_out *out, const char *key, double value);
DT_API void dt_json_put_int(dt_json_out *out, const char *key, int64_t value);
DT_API void dt_json_put_bool(dt_json_out *out, const char *key, int value);
DT_API void dt_json_drop(dt_json_out *out);

/* Named tensors in files: safetensors (one file, or model.safetensors.index.json and its shards)
   and llm.c's model .bin (version 3 f32, 5 bf16; tensors wte wpe ln1w ln1b qkvw qkvb attprojw
   attprojb ln2w ln2b fcw fcb fcprojw fcprojb lnfw lnfb, all layers of a kind in one). */
typedef struct dt_weights dt_weights;

typedef struct dt_weight {
    const char *name;
    const char *type; /* as safetensors names it: "F32", "BF16", "U8", ... */
    /* its elements are of a dt_dtype and it has at most DT_MAX_DIMS dimensions; others can be
       listed only, those of more dimensions with shape (count) */
    int readable;
    dt_dtype dtype;
    dt_shape shape;
    int64_t count; /* elements */
} dt_weight;

typedef struct dt_llmc { /* the head of an llm.c model; all 0 for other files */
    /* wte has padded_vocab rows, the last unused */
    int version, seq, vocab, layers, heads, width, padded_vocab;
} dt_llmc;

/* [local] path: a file, or a folder with model.safetensors or model.safetensors.index.json. NULL
   after DT_ERR_IO. */
DT_API dt_weights *dt_weights_open(dt_ctx *ctx, const char *path);
DT_API int dt_weights_count(const dt_weights *w);
/* NULL out of range */
DT_API const dt_weight *dt_weights_get(const dt_weights *w, int index);
/* an index, or -1 */
DT_API int dt_weights_find(const dt_weights *w, const char *name);
DT_API dt_llmc dt_weights_llmc(const dt_weights *w);
/* [local] What "__metadata__" of the (first) file holds under key, or NULL. */
DT_API const char *dt_weights_metadata(const dt_weights *w, const char *key);
/* [local] count elements in row-major order from element first, as type `as`. i32 is read as i32
   only; the others convert into each other, rounded to nearest even. */
DT_API dt_status dt_weights_read(
    dt_weights *w, int index, int64_t first, int64_t count, dt_dtype as, void *host);

/* Where rows of a parameter lie in a file. The parameter is seen as a matrix of `columns` columns,
   its rows one after the other; the tensor of the file as a matrix of its last dimension's
   columns. */
typedef struct dt_weight_part {
    const char *name; /* the file's tensor */
    /* how many of the parameter's rows it holds; 0 -> those that are left */
    int64_t rows;
    /* what the file's matrix must be; 0 -> these rows (columns) and no more */
    int64_t file_rows, file_columns;
    int64_t row, column; /* where in it they begin */
    int transposed;      /* the file has the parameter's columns as rows */
} dt_weight_part;
/* [local] Fills what this rank owns of a parameter, whatever its cuts, from one or more parts that
   follow each other; reads only that. columns 0 -> the parameter's last dimension. GPT-2's v
   (H,D,C) out of c_attn, (C,3C):
       dt_weight_part part = { .name = "h.0.attn.c_attn.weight", .file_columns = 3 * C, .column = 2
       * C,
                               .transposed = 1 };
       dt_weights_load(w, v, 0, &part, 1);
   and its bias (H,D) out of (3C): columns = C, file_columns = 3 * C, column = 2 * C. After
   dt_zero_make. */
DT_API dt_status dt_weights_load(
    dt_weights *w, dt_tensor *param, int64_t columns, const dt_weight_part *parts, int n);

typedef struct dt_weights_desc {
    /* more data than that become model-00001-of-0000N.safetensors and an index; 0: never */
    int64_t shard_bytes;
    /* version 3 or 5: an llm.c model, whose tensors need not be declared; 0: safetensors */
    dt_llmc llmc;
} dt_weights_desc;
/* [local] Begins a file: declare all tensors, then write all their elements, in any order. The
   files appear under their names at dt_weights_close, once complete; whatever fails before leaves
   the old ones (a set of shards is replaced file by file, its index last). safetensors begin with
   the metadata {"format":"pt"}. */
DT_API dt_weights *dt_weights_create(dt_ctx *ctx, const char *path, dt_weights_desc desc);
/* [local] Returns the tensor's index, or -1. */
DT_API int dt_weights_declare(dt_weights *w, const char *name, dt_dtype dtype, dt_shape shape);
/* [local] Each element is written once; those of llm.c's unused vocabulary rows may be left out:
   they become 0. */
DT_API dt_status dt_weights_write(
    dt_weights *w, int index, int64_t first, int64_t count, dt_dtype from, const void *host);
/* [local] The inverse of dt_weights_load, for a parameter that is not cut. */
DT_API dt_status dt_weights_save(
    dt_weights *w, dt_tensor *param, int64_t columns, const dt_weight_part *parts, int n);
/* [local] Ends reading or writing. NULL is allowed. What is open when the context ends is closed:
   files being written are given up then. */
DT_API dt_status dt_weights_close(dt_weights *w);

#ifdef __cplusplus
}
#endif
#endif /* DT_TENSOR_H */

#if defined(DT_IMPLEMENTATION) && !defined(DT_TENSOR_IMPL)
#define DT_TENSOR_IMPL

#if defined(__cplusplus) && defined(__GNUC__) && !defined(__clang__)
/* C does not warn of fields that a designated initialiser leaves zero; g++ does */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#endif

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
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef CLOCK_MONOTONIC
#error \
    "dt: #define _GNU_SOURCE before the first #include of the implementation file, or compile with -std=gnu11"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ==== 10. Implementation: base helpers ==========================================================

size_t dt_dtype_size(dt_dtype dtype) {
    switch (dtype) {
    case DT_F32: return 4;
    case DT_BF16: return 2;
    case DT_F16: return 2;
    case DT_F64: return 8;
    case DT_I32: return 4;
    }
    return 0;
}

const char *dt_dtype_name(dt_dtype dtype) {
    switch (dtype) {
    case DT_F32: return "f32";
    case DT_BF16: return "bf16";
    case DT_F16: return "f16";
    case DT_F64: return "f64";
    case DT_I32: return "i32";
    }
    return "unknown type";
}

const char *dt_status_name(dt_status status) {
    static const char *const names[] = { "DT_OK", "DT_ERR_ARG", "DT_ERR_SHAPE", "DT_ERR_MEM",
        "DT_ERR_IO", "DT_ERR_DEVICE", "DT_ERR_COMM", "DT_ERR_TIMEOUT", "DT_ERR_PEER",
        "DT_ERR_NUMERIC", "DT_ERR_UNSUPPORTED" };
    int i = (int)status;
    return i >= 0 && i <= (int)DT_ERR_UNSUPPORTED ? names[i] : "unknown status";
}

/* Product and sum of counts; 0 if an operand is negative or the result overflows. */
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

/* What is wrong with a shape, or NULL: at most 6 dimensions, none below `least`, and bytes that a
   size_t holds with room to spare. */
static const char *dt__shape_bad(dt_shape shape, int64_t least) {
    int64_t most = INT64_MAX / 16;
    if (shape.nd < 0) return "a negative number of dimensions";
    if (shape.nd > DT_MAX_DIMS) return "more than 6 dimensions";
    for (int i = 0; i < shape.nd; i++) {
        if (shape.d[i] < least)
            return least ? "each dimension must be 1 or more" : "a dimension is negative";
        if (shape.d[i] > most) return "more elements than can be counted";
        if (shape.d[i] > 0) most /= shape.d[i];
    }
    return NULL;
}

static int dt__same_shape(dt_shape a, dt_shape b) {
    if (a.nd != b.nd) return 0;
    for (int i = 0; i < a.nd; i++)
        if (a.d[i] != b.d[i]) return 0;
    return 1;
}

typedef struct dt__text {
    char s[96];
} dt__text;

static dt__text dt__shape_text(dt_shape shape) {
    dt__text t;
    size_t used = 0;
    used += (size_t)snprintf(t.s, sizeof t.s, "(");
    for (int i = 0; i < shape.nd && i < DT_MAX_DIMS && used < sizeof t.s - 1; i++) {
        int n =
            snprintf(t.s + used, sizeof t.s - used, i ? ",%lld" : "%lld", (long long)shape.d[i]);
        used += (size_t)n < sizeof t.s - used ? (size_t)n : sizeof t.s - used - 1;
    }
    snprintf(t.s + used, sizeof t.s - used, shape.nd > DT_MAX_DIMS ? ",..)" : ")");
    return t;
}

/* A view and what it views share data and gradient: all bookkeeping is on the tensor that owns
   them. */
static dt_tensor *dt__owner(dt_tensor *t) {
    while (t->base) t = t->base;
    return t;
}

static size_t dt__bytes(const dt_tensor *t) {
    return (size_t)dt_count(t->shape) * dt_dtype_size(t->dtype);
}

/* gcc copies a function into kernels, which have options of their own, only where it must. */
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

/* bf16 and f16, rounded to nearest even; a NaN stays one. Selections only, no branches, so that
   loops vectorise. */
DT__INLINE float dt__bf16_to_f32(uint16_t h) { return dt__bits_float((uint32_t)h << 16); }

DT__INLINE uint16_t dt__f32_to_bf16(float f) {
    uint32_t u = dt__float_bits(f);
    uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : rounded);
}

DT__INLINE float dt__f16_to_f32(uint16_t h) {
    uint32_t mag = h & 0x7fff, sign = (uint32_t)(h & 0x8000) << 16;
    /* below 2^-14: mag times the smallest step */
    uint32_t tiny = dt__float_bits((float)(int32_t)mag * 0x1p-24f);
    /* the exponent's bias: 15 becomes 127 */
    uint32_t rest = (mag << 13) + (mag >= 0x7c00 ? 0x70000000 : 0x38000000);
    return dt__bits_float((mag < 0x400 ? tiny : rest) | sign);
}

DT__INLINE uint16_t dt__f32_to_f16(float f) {
    uint32_t u = dt__float_bits(f), mag = u & 0x7fffffff;
    /* the last bit of 0.5 + x is 2^-24 */
    uint32_t tiny = dt__float_bits(dt__bits_float(mag) + 0.5f) - 0x3f000000;
    uint32_t rest = (mag - 0x38000000 + 0xfff + (mag >> 13 & 1)) >> 13;
    uint32_t huge = mag > 0x7f800000 ? 0x7e00 | (mag >> 13 & 0x3ff) : 0x7c00;
    return (uint16_t)((mag < 0x38800000      ? tiny
                          : mag < 0x47800000 ? rest
                                             : huge) |
                      (u >> 16 & 0x8000));
}

/* Round to odd: when a double becomes a float that is rounded again to 16 bits, the second rounding
   sees a last bit that still knows something was cut off, and so gives what one rounding would
   have. */
static float dt__f64_to_odd(double x) {
    float f = (float)x;
    uint32_t u = dt__float_bits(f);
    if ((double)f == x || x != x) return f;
    return dt__bits_float((fabs((double)f) > fabs(x) ? u - 1 : u) | 1);
}

/* One element of any type. */
static inline double dt__number(dt_dtype dtype, const void *array, size_t i) {
    switch (dtype) {
    case DT_F32: return (double)((const float *)array)[i];
    case DT_BF16: return (double)dt__bf16_to_f32(((const uint16_t *)array)[i]);
    case DT_F16: return (double)dt__f16_to_f32(((const uint16_t *)array)[i]);
    case DT_F64: return ((const double *)array)[i];
    case DT_I32: return (double)((const int32_t *)array)[i];
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
    }
}

DT__INLINE int dt__narrow(dt_dtype dtype) { return dtype == DT_BF16 || dtype == DT_F16; }
DT__INLINE dt_dtype dt__wide(dt_dtype dtype, int wide) {
    return wide && dt__narrow(dtype) ? DT_F32 : dtype;
}

/* The type that the CPU computes in. */
static size_t dt__real_size(dt_dtype dtype) { return dtype == DT_F64 ? 8 : 4; }

// ==== 11. Default host and io tables ============================================================

static void *dt__host_alloc(void *user, size_t bytes, dt_mem mem) {
    void *p = NULL;
    (void)user;
    (void)mem;
    return posix_memalign(&p, 64, bytes) == 0 ? p : NULL;
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

/* Whether RLIMIT_FSIZE allows a file of `bytes` bytes; errno says EFBIG if not. A write beyond the
   limit would raise SIGXFSZ, which ends the program. */
static int dt__io_allowed(uint64_t bytes) {
    struct rlimit most;
    if (getrlimit(RLIMIT_FSIZE, &most) != 0 || most.rlim_cur == RLIM_INFINITY) return 1;
    if (bytes <= (uint64_t)most.rlim_cur) return 1;
    errno = EFBIG;
    return 0;
}

/* One write a line, so that lines of several ranks do not mix. A line is dropped if the reader of
   standard error takes nothing for a second: a rank that waited for that reader would hang the
   job. */
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
    /* nobody is left to tell */
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

/* Opens /dev/null on each closed descriptor of 0 to 2, as SQLite does; -1 if it cannot. Call before
   any call that opens a descriptor: a job that starts with one of these closed would get its number
   for the next file or socket, and printed lines would go there. */
static int dt__io_guard(void) {
    for (int fd = 0; fd <= 2; fd++) {
        int null = fcntl(fd, F_GETFD) >= 0 ? fd : open("/dev/null", O_RDWR);
        /* not ENOENT, which would say that a file is absent */
        if (null < 0) return errno = EBADF, -1;
        if (null > 2) close(null); /* another thread was faster */
    }
    return 0;
}

static int dt__io_open(void *user, const char *path, int mode) {
    static const int flags[] = { O_RDONLY, O_RDWR | O_NOFOLLOW, /* DT_IO_READ, _WRITE, */
        O_RDWR | O_NOFOLLOW | O_CREAT | O_EXCL,                 /* _CREATE, */
        O_RDWR | O_NOFOLLOW | O_CREAT | O_EXCL,                 /* _PRIVATE, */
        O_RDWR | O_NOFOLLOW | O_CREAT };                        /* _LOCK */
    struct stat st;
    (void)user;
    if (mode < DT_IO_READ || mode > DT_IO_LOCK) return errno = EINVAL, -1;
    if (dt__io_guard() != 0) return -1;
    mode_t rights = mode == DT_IO_PRIVATE ? 0600 : 0666;
    int fd = open(path, flags[mode] | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, rights);
    if (fd < 0 && errno == ENOENT) /* the target of a link may be on a disk that is not mounted */
        errno = lstat(path, &st) == 0 && S_ISLNK(st.st_mode) ? ELOOP : ENOENT;
    if (fd < 0) return -1;
    int reason = 0; /* dt__io_why tells them */
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

/* Writes up to RLIMIT_FSIZE and returns a short count, as pwrite does. */
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

static int dt__io_make(void *user, const char *path) {
    (void)user;
    return mkdir(path, 0777);
}

static int dt__io_list(
    void *user, const char *path, void (*each)(void *arg, const char *name), void *arg) {
    (void)user;
    if (dt__io_guard() != 0) return -1;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (fd >= 0 && !d) close(fd);
    if (!d) return -1;
    errno = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL; errno = 0)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) each(arg, e->d_name);
    int reason = errno; /* closedir may change it */
    closedir(d);
    errno = reason;
    return reason ? -1 : 0;
}

static int dt__io_lock(void *user, int fd) {
    (void)user;
    return flock(fd, LOCK_EX | LOCK_NB);
}

/* Works on a directory descriptor: by path, a link put in the folder's place meanwhile would be
   followed. */
static int dt__io_remove_folder(void *user, const char *path, const char *const *names, int n) {
    struct stat st;
    int failed = 0;
    (void)user;
    if (dt__io_guard() != 0) return -1;
    if (fstatat(AT_FDCWD, path, &st, AT_SYMLINK_NOFOLLOW) != 0) return -1;
    if (S_ISLNK(st.st_mode)) return unlink(path);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return -1;
    for (int i = 0; i < n && !failed; i++)
        failed = unlinkat(fd, names[i], 0) != 0 && errno != ENOENT;
    int reason = errno; /* close may change it */
    close(fd);
    errno = reason;
    return failed ? -1 : rmdir(path);
}

static int dt__io_forget(void *user, int fd, int64_t bytes, int64_t offset) {
    (void)user;
#if defined(__linux__) && defined(POSIX_FADV_DONTNEED)
    int how = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    /* an error of the disk is told once: fsync is for files that have no ranges */
    if (sync_file_range(fd, (off_t)offset, (off_t)bytes, how) != 0) {
        if (errno != ENOSYS && errno != EINVAL && errno != ESPIPE) return -1;
        if (fsync(fd) != 0) return -1;
    }
    posix_fadvise(fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM); /* what is read ahead unasked would stay */
    return 0;
#else
    (void)bytes;
    (void)offset;
    return fsync(fd);
#endif
}

static const dt_host dt__host_table = { NULL, dt__host_alloc, dt__host_free, dt__host_now,
    dt__host_sleep, dt__host_log, dt__host_map, dt__host_unmap, dt__host_discard };
static const dt_io dt__io_table = { NULL, dt__io_open, dt__io_close, dt__io_size, dt__io_pread,
    dt__io_pwrite, dt__io_fsync, dt__io_rename, dt__io_resize, dt__io_remove, dt__io_forget,
    dt__io_make, dt__io_list, dt__io_lock, dt__io_remove_folder };

const dt_host *dt_host_default(void) { return &dt__host_table; }
const dt_io *dt_io_default(void) { return &dt__io_table; }

// ==== 12. Context, errors, memory account: code =================================================

/* Memory that grows by chunks and is freed whole: section 15. */
typedef struct dt__chunk {
    struct dt__chunk *next;
    char *data;
    size_t size, used;
} dt__chunk;

typedef struct dt__arena {
    dt_mem mem;
    size_t least;           /* size of the next chunk, if the request is smaller */
    dt__chunk *chunks;      /* the one in use first */
    struct dt__arena *next; /* in a pool of arenas */
} dt__arena;

/* Memory of a device's table that was given back while something went on there. */
typedef struct dt__kept {
    void *p;
    size_t bytes;
    int pinned;
} dt__kept;

/* A buffer for a unit's passing gradient or gathered values, kept for reuse. */
typedef struct dt__spare {
    void *data;
    size_t bytes;
    int busy;
} dt__spare;

struct dt_ctx {
    dt_kernels kernels;
    dt_host host;
    dt_io io;
    void *stream;
    int opened; /* the stream is this context's to close */
    uint64_t seed;
    int rank;
    void *attached;
    dt_status status;
    int unread; /* the failure: a file could not be read, yet may be good */
    char text[512];
    dt_memory memory;
    size_t mem_limit;
    dt__kept *kept;
    int n_kept, kept_room;
    void *work;
    size_t work_bytes;
    dt_listener *listeners;

    dt_tensor **params; /* (param_room), n_params used */
    int n_params, param_room;
    char *scope_prefix;
    size_t scope_bytes;
    int scope, stage, staged; /* staged: dt_stage was called */
    dt_bucket *units;
    int n_units;
    int hand_over; /* of dt_buckets_desc */
    dt__spare *spares;
    int n_spares, spare_room;

    dt_block_state **tapes; /* (tape_room) roots, NULL where there is none yet */
    int tape_room;
    dt_block_state *root, *current; /* root: of the tape in use */
    dt_block_state *inside;         /* the innermost block that a listener saw enter */
    /* what is gathered now is for one access outside of any op */
    int aside;
    dt__arena *grad_pool;
    /* data of recomputed blocks: what one gives back the next one takes */
    dt__arena *lent_pool;
    dt__arena *brief_pool; /* data of brief tensors, one each */
    int brief;             /* ops make brief tensors now */
    /* digest of what the open block has recorded so far; 0: nothing */
    uint64_t trail;
    int recomputing; /* depth of second runs */
    int micro, micro_count;
    int no_grad;
    double loss_scale;
};

/* Moves the counters: the only place that does. */
static void dt__account(dt_ctx *ctx, dt_mem mem, size_t bytes, int sign) {
    dt_memory *m = &ctx->memory;
    if (sign < 0) {
        m->live[mem] -= bytes;
        m->live_total -= bytes;
        return;
    }
    m->live[mem] += bytes;
    m->live_total += bytes;
    m->allocations++;
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

/* Makes room for one more element in a growing array of bookkeeping. */
static void *dt__grow(
    dt_ctx *ctx, void *array, int used, int *room, size_t element, const char *what) {
    if (used < *room) return array;
    int more = *room ? 2 * *room : 16;
    void *p = dt__host_zeroed(ctx, (size_t)more * element, what);
    if (!p) return NULL;
    if (array) memcpy(p, array, (size_t)used * element);
    dt_free(ctx, DT_MEM_HOST, array, (size_t)*room * element);
    *room = more;
    return p;
}

/* A device gives memory back when it is idle, and what goes on there may need what this rank does
   next. So memory that is given back meanwhile is kept, for who asks for as many bytes: the rank's
   queue has it in order. 1: it is kept. */
static int dt__kept_put(dt_ctx *ctx, void *p, size_t bytes, int pinned) {
    dt__kept *grown = (dt__kept *)dt__grow(
        ctx, ctx->kept, ctx->n_kept, &ctx->kept_room, sizeof *grown, "kept memory");
    if (!grown) return 0;
    ctx->kept = grown;
    grown[ctx->n_kept].p = p;
    grown[ctx->n_kept].bytes = bytes;
    grown[ctx->n_kept++].pinned = pinned;
    return 1;
}

static void *dt__kept_take(dt_ctx *ctx, size_t bytes, int pinned) {
    for (int i = 0; i < ctx->n_kept; i++) {
        if (ctx->kept[i].bytes != bytes || ctx->kept[i].pinned != pinned) continue;
        void *p = ctx->kept[i].p;
        ctx->kept[i] = ctx->kept[--ctx->n_kept];
        return p;
    }
    return NULL;
}

static void dt__kept_free(dt_ctx *ctx) {
    while (ctx->n_kept > 0) {
        dt__kept k = ctx->kept[--ctx->n_kept];
        if (k.pinned)
            ctx->kernels.unpin(k.p, k.bytes);
        else
            ctx->kernels.free(ctx->kernels.user, k.p, k.bytes);
    }
}

/* What waits for the device without a limit comes after this: of what is under way there some may
   wait for others. 1: nothing is any more. */
static int dt__settle(dt_ctx *ctx, int all) {
    int idle = 1;
    for (dt_listener *l = ctx->listeners; l; l = l->next)
        if (l->settle && !l->settle(ctx, all, l->user)) idle = 0;
    if (idle) dt__kept_free(ctx);
    return idle;
}

static void *dt__ask(dt_ctx *ctx, dt_mem mem, size_t bytes, int pinned) {
    if (pinned ? !ctx->kernels.pin : dt__from_host(ctx, mem))
        return ctx->host.alloc(ctx->host.user, bytes, mem);
    void *p = dt__kept_take(ctx, bytes, pinned);
    for (int turn = 0; !p && turn < 2; turn++) {
        /* not for pinned memory: operations ask for it as they move on, and cannot wait for
           themselves */
        if (turn > 0 && (pinned || ctx->n_kept == 0 || !dt__settle(ctx, 1))) break;
        p = pinned ? ctx->kernels.pin(bytes) : ctx->kernels.alloc(ctx->kernels.user, bytes);
    }
    return p;
}

static void *dt__take(dt_ctx *ctx, dt_mem mem, size_t bytes, const char *what, int pinned) {
    static const char *const classes[DT_MEM_CLASSES] = { "params", "grads", "optim", "acts", "comm",
        "host", "temp" };
    char limit[48] = "", table[512] = "";
    if (bytes == 0 || dt_error(ctx) != DT_OK) return NULL;
    if ((unsigned)mem >= (unsigned)DT_MEM_CLASSES) {
        dt_fail(ctx, DT_ERR_ARG, "%s: there is no memory class %d", what, (int)mem);
        return NULL;
    }
    const dt_memory *m = &ctx->memory;
    int over = ctx->mem_limit && (bytes > ctx->mem_limit || m->live_total > ctx->mem_limit - bytes);
    void *p = over ? NULL : dt__ask(ctx, mem, bytes, pinned);
    if (!p) {
        if (over) snprintf(limit, sizeof limit, " of a limit of %zu", ctx->mem_limit);
        dt_fail(ctx, DT_ERR_MEM, "%s: %zu bytes of class %s were refused; %zu bytes are in use%s",
            what, bytes, classes[mem], m->live_total, limit);
        for (int i = 0, at = 0; i < DT_MEM_CLASSES; i++)
            at += snprintf(table + at, sizeof table - (size_t)at, " %s %zu (%zu)", classes[i],
                m->live[i], m->peak[i]);
        dt_log(ctx, DT_LOG_NOTICE, "rank %d: live bytes (and peak):%s", ctx->rank, table);
        return NULL;
    }
    dt__account(ctx, mem, bytes, +1);
    return p;
}

void *dt_alloc(dt_ctx *ctx, dt_mem mem, size_t bytes, const char *what) {
    return dt__take(ctx, mem, bytes, what, 0);
}
void *dt_pin(dt_ctx *ctx, size_t bytes, const char *what) {
    return dt__take(ctx, DT_MEM_HOST, bytes, what, 1);
}

void dt_free(dt_ctx *ctx, dt_mem mem, void *p, size_t bytes) {
    if (!p) return;
    if (dt__from_host(ctx, mem))
        ctx->host.free(ctx->host.user, p, bytes, mem);
    else if (dt__settle(ctx, 0) || !dt__kept_put(ctx, p, bytes, 0))
        ctx->kernels.free(ctx->kernels.user, p, bytes);
    dt__account(ctx, mem, bytes, -1);
}

void dt_unpin(dt_ctx *ctx, void *p, size_t bytes) {
    if (!p || !ctx->kernels.unpin) {
        dt_free(ctx, DT_MEM_HOST, p, bytes);
        return;
    }
    if (!dt__kept_put(ctx, p, bytes, 1)) ctx->kernels.unpin(p, bytes);
    dt__account(ctx, DT_MEM_HOST, bytes, -1);
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

/* Under CUDA the GPU is the default where there is one; rank 0 says in one line what its ranks run
   on. */
static const dt_kernels *dt__kernels_default(dt_ctx *ctx) {
#ifdef DT_USE_CUDA
    char text[160] = "";
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
    ctx->loss_scale = 1;
    ctx->mem_limit = desc.mem_limit;
    dt__account(ctx, DT_MEM_HOST, sizeof *ctx, +1);
    ctx->kernels = *(desc.kernels ? desc.kernels : dt__kernels_default(ctx));
    ctx->stream = desc.stream;
    if (!desc.stream && ctx->kernels.open) {
        ctx->stream = ctx->kernels.open(desc.place, text, sizeof text);
        ctx->opened = ctx->stream != NULL;
        if (!ctx->stream)
            dt_fail(ctx, DT_ERR_DEVICE, "dt_ctx_make: %s: %s", ctx->kernels.name, text);
    }
    return ctx;
}

static void dt__tape_free(dt_ctx *ctx);
static void dt__params_free(dt_ctx *ctx);

void dt_ctx_free(dt_ctx *ctx) {
    if (!ctx) return;
    while (ctx->listeners) {
        dt_listener *l = ctx->listeners; /* off the chain first: what it does may free it */
        ctx->listeners = l->next;
        if (l->closing) l->closing(ctx, l->user);
    }
    dt__tape_free(ctx);
    dt__params_free(ctx);
    dt_free(ctx, DT_MEM_TEMP, ctx->work, ctx->work_bytes);
    dt__kept_free(ctx);
    dt_free(ctx, DT_MEM_HOST, ctx->kept, (size_t)ctx->kept_room * sizeof *ctx->kept);
    if (ctx->opened) ctx->kernels.close(ctx->stream);
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
    static const uint32_t least[] = { 0, 0x20, 0xa0, 0x800, 0x10000 }; /* least code of n bytes */
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

/* Makes a message one printable line: each unprintable byte becomes \xNN, and the result is cut to
   `bytes`. Every message passes through here, because it may quote paths, names in files and texts
   of other ranks. */
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

dt_status dt_fail(dt_ctx *ctx, dt_status status, const char *fmt, ...) {
    va_list args;
    if (!ctx || status == DT_OK || ctx->status != DT_OK) return status;
    ctx->status = status;
    int n = snprintf(ctx->text, sizeof ctx->text, "rank %d: ", ctx->rank);
    va_start(args, fmt);
    vsnprintf(ctx->text + n, sizeof ctx->text - (size_t)n, fmt ? fmt : "no reason was given", args);
    va_end(args);
    /* a NaN's sign tells nothing */
    for (char *s = strstr(ctx->text, " -nan"); s; s = strstr(s + 1, " -nan"))
        if (strchr(" ,:;)", s[5])) memmove(s + 1, s + 2, strlen(s + 2) + 1);
    dt__escape(ctx->text, sizeof ctx->text);
    int told = status == DT_ERR_PEER; /* the first culprit speaks; the others keep quiet */
    for (dt_listener *l = ctx->listeners; l; l = l->next)
        if (l->failed) told |= l->failed(ctx, status, ctx->text, l->user);
    dt_log(ctx, told ? DT_LOG_DETAIL : DT_LOG_ERROR, "%s", ctx->text);
    return status;
}

dt_status dt_error(const dt_ctx *ctx) { return ctx ? ctx->status : DT_ERR_MEM; }
const char *dt_error_text(const dt_ctx *ctx) {
    return ctx ? ctx->text : "no context: out of memory";
}

/* Runs kernel k of the context's table, or fails naming the op. */
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
    const char *why = status == DT_ERR_UNSUPPORTED ? "not available for these arguments"
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
    /* of memory that it does not reach a device takes so much along at once */
    enum { STAGED = 64 << 10 };
    int (*reaches)(const void *) = ctx->kernels.reaches;
    /* such a copy waits */
    if (reaches && (!reaches(dst) || (bytes > STAGED && !reaches(src)))) dt__settle(ctx, 0);
    dt_status status = ctx->kernels.move(dst, src, bytes, ctx->stream);
    return status == DT_OK
               ? DT_OK
               : dt_fail(ctx, status, "copying %zu bytes on %s", bytes, ctx->kernels.name);
}

static dt_status dt__sync(dt_ctx *ctx) {
    dt__settle(ctx, 0);
    dt_status status = ctx->kernels.sync ? ctx->kernels.sync(ctx->stream) : DT_OK;
    /* a device that does not stop to look at indices tells of a bad one only now */
    if (status == DT_ERR_ARG)
        return dt_fail(ctx, status,
            "on %s since it was last waited for: an id, a label or a row outside of its table; "
            "the CPU's kernels (dt_kernels_cpu) would name it",
            ctx->kernels.name);
    return status == DT_OK ? DT_OK : dt_fail(ctx, status, "waiting for %s", ctx->kernels.name);
}

static dt_status dt__fill(dt_ctx *ctx, dt_dtype dtype, void *out, size_t count, double value) {
    if (count == 0) return DT_OK;
    dt_fill_args a = { dtype, out, count, value };
    return DT__KERNEL(ctx, "filling", fill, &a);
}

/* out = in, or out += in */
static dt_status dt__accumulate(
    dt_ctx *ctx, dt_dtype dtype, void *out, const void *in, size_t count, int accumulate) {
    if (!accumulate) return dt__move(ctx, out, in, count * dt_dtype_size(dtype));
    const void *terms[2] = { out, in };
    dt_reduce_args a = { dtype, out, terms, 2, count, DT_SUM, NULL, 0, 0 };
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

// ==== 13. Counter RNG ===========================================================================

/* Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC11):
   four random words as a pure function of (key, counter). Any rank can so compute any element of
   any tensor, and every layout starts from the same model. */
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

/* The key of a named stream: FNV-1a of the name, mixed with the seed so that neighbouring seeds
   share nothing. */
static uint64_t dt__stream_key(uint64_t seed, const char *name) {
    uint64_t h = 0xcbf29ce484222325u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001b3u;
    uint32_t mixed[4];
    dt__philox(seed, h, mixed);
    return (uint64_t)mixed[0] << 32 | mixed[1];
}

// ==== 14. Parameters, boxes and units: code =====================================================

dt_local_slice dt_local_slice_of(dt_shape full, const dt_shard_spec shards[3]) {
    dt_local_slice box;
    int64_t end[DT_MAX_DIMS]; /* where what this rank owns ends, in the full tensor */
    memset(&box, 0, sizeof box);
    if (dt__shape_bad(full, 0)) return box;
    for (int i = 0; i < full.nd; i++) box.n[i] = end[i] = full.d[i];
    for (int c = 0; shards && c < 3; c++) {
        const dt_group *group = (const dt_group *)shards[c].comm;
        if (!group || shards[c].dim < 0 || shards[c].dim >= full.nd) continue;
        int dim = shards[c].dim; /* a second cut of the same dimension cuts what the first left */
        box.n[dim] = (box.n[dim] + group->size - 1) / group->size;
        box.lo[dim] += group->rank * box.n[dim];
        if (box.lo[dim] + box.n[dim] < end[dim]) end[dim] = box.lo[dim] + box.n[dim];
    }
    for (int i = 0; i < full.nd; i++) box.inside[i] = end[i] > box.lo[i] ? end[i] - box.lo[i] : 0;
    return box;
}

/* Walks the part of a box that lies inside the full tensor, in runs that are contiguous both
   locally and globally. */
typedef struct dt__box_walk {
    dt_shape full;
    dt_local_slice box;
    int64_t at[DT_MAX_DIMS];
    int outer;   /* dimensions walked by `at`; those below belong to a run */
    int64_t run; /* elements of a run */
    int done;
    int64_t local, global; /* of the current run's first element */
} dt__box_walk;

static dt__box_walk dt__box_begin(dt_shape full, dt_local_slice box) {
    dt__box_walk w;
    memset(&w, 0, sizeof w);
    w.full = full;
    w.box = box;
    w.run = 1;
    w.outer = full.nd;
    int whole = 1; /* dimensions below are complete, so the next one up extends the run */
    while (w.outer > 0 && whole) {
        w.outer--;
        w.run *= box.inside[w.outer];
        whole = box.n[w.outer] == full.d[w.outer];
    }
    for (int i = 0; i < full.nd; i++) w.done |= box.inside[i] == 0;
    return w;
}

static int dt__box_next(dt__box_walk *w) {
    if (w->done) return 0;
    w->local = w->global = 0;
    for (int i = 0; i < w->full.nd; i++) {
        w->local = w->local * w->box.n[i] + w->at[i];
        w->global = w->global * w->full.d[i] + w->box.lo[i] + w->at[i];
    }
    int i = w->outer - 1;
    while (i >= 0 && ++w->at[i] == w->box.inside[i]) w->at[i--] = 0;
    if (i < 0) w->done = 1;
    return 1;
}

/* A box reaches past the end where its group's size does not divide the dimension. */
static int dt__box_overhangs(dt_shape full, dt_local_slice box) {
    for (int i = 0; i < full.nd; i++)
        if (box.inside[i] != box.n[i]) return 1;
    return 0;
}

/* Zeroes the elements of a local array that lie outside the full tensor: the gaps between the
   walk's runs. */
static void dt__zero_overhang(dt_ctx *ctx, const dt_param_info *p, dt_dtype dtype, void *array) {
    if (!dt__box_overhangs(p->full, p->box)) return;
    size_t size = dt_dtype_size(dtype);
    int64_t done = 0;
    dt__box_walk walk = dt__box_begin(p->full, p->box);
    while (dt__box_next(&walk)) {
        dt__fill(ctx, dtype, (char *)array + (size_t)done * size, (size_t)(walk.local - done), 0);
        done = walk.local + walk.run;
    }
    dt__fill(ctx, dtype, (char *)array + (size_t)done * size, p->count - (size_t)done, 0);
}

static dt__text dt__name_text(const char *name);

/* A name goes to files and messages. */
static dt_status dt__name_check(dt_ctx *ctx, const char *op, const char *name) {
    size_t length = 1;
    for (const char *s = name; *s && length; s += length) length = dt_printable(s);
    return length == 0
               ? dt_fail(ctx, DT_ERR_ARG, "%s(%s): a name is UTF-8 without control characters", op,
                     dt__name_text(name).s)
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
    ctx->staged = 1;
    ctx->scope++;
}

/* A tensor, its info and its name in one piece of memory. */
typedef struct dt__param_memory {
    dt_tensor tensor;
    dt_param_info info;
} dt__param_memory;

static size_t dt__param_bytes(const char *name) {
    return sizeof(dt__param_memory) + strlen(name) + 1;
}

static dt_status dt__param_check(
    dt_ctx *ctx, const char *name, dt_shape full, dt_init init, dt_param_desc d) {
    if (!name || !*name) return dt_fail(ctx, DT_ERR_ARG, "dt_param: a parameter needs a name");
    if (dt__name_check(ctx, "dt_param", name) != DT_OK) return ctx->status;
    if (ctx->units)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_param(%s): parameters have their storage already; register "
            "all of them before dt_zero_make and before the first use",
            name);
    const char *bad = dt__shape_bad(full, 1);
    if (bad)
        return dt_fail(
            ctx, DT_ERR_SHAPE, "dt_param(%s): shape %s: %s", name, dt__shape_text(full).s, bad);
    for (int c = 0; c < 3; c++) {
        if (d.shards[c].comm && (d.shards[c].dim < 0 || d.shards[c].dim >= full.nd))
            return dt_fail(ctx, DT_ERR_ARG, "dt_param(%s): cut of dimension %d of %s", name,
                d.shards[c].dim, dt__shape_text(full).s);
        for (int e = 0; e < c; e++)
            if (d.shards[c].comm && d.shards[c].comm == d.shards[e].comm &&
                d.shards[c].dim == d.shards[e].dim)
                return dt_fail(ctx, DT_ERR_ARG,
                    "dt_param(%s): dimension %d of %s is cut twice by one group", name,
                    d.shards[c].dim, dt__shape_text(full).s);
    }
    if (init.kind < 0 || init.kind > 3 || !(init.scale >= 0 && init.scale < HUGE_VAL))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_param(%s): initial values of kind %d and scale %g; it is finite and not "
            "negative",
            name, init.kind, init.scale);
    if (!(d.lr_scale >= 0 && d.lr_scale < HUGE_VAL))
        return dt_fail(ctx, DT_ERR_ARG, "dt_param(%s): lr_scale %g; it is finite and not negative",
            name, d.lr_scale);
    if (dt_dtype_size(d.dtype) == 0 || d.dtype == DT_I32)
        return dt_fail(ctx, DT_ERR_ARG, "dt_param(%s): type %s; use f32, bf16, f16 or f64", name,
            dt_dtype_name(d.dtype));
    return DT_OK;
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
    const char *prefix = ctx->scope_prefix ? ctx->scope_prefix : "";
    size_t before = strlen(prefix), bytes = sizeof(dt__param_memory) + before + strlen(name) + 1;
    dt_tensor **grown = (dt_tensor **)dt__grow(
        ctx, ctx->params, ctx->n_params, &ctx->param_room, sizeof *grown, "dt_param");
    if (!grown) return NULL;
    ctx->params = grown;
    dt__param_memory *memory = (dt__param_memory *)dt__host_zeroed(ctx, bytes, name);
    if (!memory) return NULL;
    char *own_name = (char *)(memory + 1);
    memcpy(own_name, prefix, before);
    memcpy(own_name + before, name, strlen(name));
    if (dt_param_find(ctx, own_name)) {
        dt_fail(ctx, DT_ERR_ARG, "dt_param(%s): the name is taken", own_name);
        dt_free(ctx, DT_MEM_HOST, memory, bytes);
        return NULL;
    }
    dt_tensor *t = &memory->tensor;
    dt_param_info *p = &memory->info;
    p->index = ctx->n_params;
    p->full = full;
    p->box = dt_local_slice_of(full, desc.shards);
    p->init = init;
    p->desc = desc;
    p->scope = ctx->scope;
    p->stage = ctx->stage;
    t->shape.nd = full.nd;
    for (int i = 0; i < full.nd; i++) t->shape.d[i] = p->box.n[i];
    p->count = (size_t)dt_count(t->shape);
    t->dtype = desc.dtype;
    t->name = own_name;
    t->ctx = ctx;
    t->needs_grad = !desc.frozen;
    t->param = p;
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

/* Two parameters may share a unit when everything that is done to a unit is the same for both. */
static int dt__same_unit(const dt_tensor *a, const dt_tensor *b) {
    const dt_param_desc *x = &a->param->desc, *y = &b->param->desc;
    if (a->dtype != b->dtype || a->param->scope != b->param->scope || !x->frozen != !y->frozen)
        return 0;
    for (int i = 0; i < 3; i++)
        if (x->shards[i].comm != y->shards[i].comm) return 0;
    for (int i = 0; i < 2; i++)
        if (x->grad_placements[i].comm != y->grad_placements[i].comm ||
            x->grad_placements[i].kind != y->grad_placements[i].kind)
            return 0;
    return 1;
}

/* Whether parameter i begins a new unit, given the elements the open unit holds. */
static int dt__begins_unit(const dt_ctx *ctx, int i, size_t open, size_t bucket_bytes) {
    const dt_tensor *t = ctx->params[i];
    return i == 0 || !dt__same_unit(ctx->params[i - 1], t) ||
           (open + t->param->count) * dt_dtype_size(t->dtype) > bucket_bytes;
}

static void dt__units_plan(dt_ctx *ctx, size_t bucket_bytes) {
    int u = -1;
    for (int i = 0; i < ctx->n_params; i++) {
        dt_param_info *p = ctx->params[i]->param;
        if (dt__begins_unit(ctx, i, u < 0 ? 0 : ctx->units[u].count, bucket_bytes)) {
            dt_bucket *unit = &ctx->units[++u];
            unit->index = u;
            unit->first_param = i;
            unit->dtype = ctx->params[i]->dtype;
            unit->grad_dtype = dt__wide(unit->dtype, 1);
            unit->frozen = p->desc.frozen != 0;
            unit->stage = p->stage;
        }
        p->unit = &ctx->units[u];
        p->offset = p->unit->count;
        p->unit->count += p->count;
        p->unit->params++;
    }
}

/* Initial values of those elements of a parameter that lie in the kept run of its unit, which is
   zero before. */
static dt_status dt__param_values(dt_ctx *ctx, const dt_tensor *t) {
    const dt_param_info *p = t->param;
    const dt_bucket *unit = p->unit;
    size_t size = dt_dtype_size(t->dtype), end = unit->first + unit->run;
    uint64_t key = dt__stream_key(ctx->seed, t->name);
    dt__box_walk walk = dt__box_begin(p->full, p->box);
    while (p->init.kind > 0 && dt__box_next(&walk)) {
        size_t at = p->offset + (size_t)walk.local, stop = at + (size_t)walk.run;
        size_t from = at > unit->first ? at : unit->first, to = stop < end ? stop : end;
        if (from >= to) continue;
        dt_init_args a = { t->dtype, (char *)unit->kept + (from - unit->first) * size, to - from,
            p->init.kind == 2, p->init.scale, key, (uint64_t)walk.global + (from - at) };
        if (p->init.kind == 1)
            dt__fill(ctx, t->dtype, a.out, a.count, a.scale);
        else
            DT__KERNEL(ctx, t->name, init, &a);
        if (ctx->status != DT_OK) break;
    }
    return ctx->status;
}

/* Where the values of a unit's parameters are: its data, or nowhere. */
static void dt__unit_place(dt_ctx *ctx, dt_bucket *unit, void *data) {
    unit->data = data;
    for (int i = unit->first_param; i < unit->first_param + unit->params; i++) {
        dt_tensor *t = ctx->params[i];
        t->data = data ? (char *)data + t->param->offset * dt_dtype_size(unit->dtype) : NULL;
    }
}

static void dt__unit_release(dt_ctx *ctx, dt_bucket *unit, int written, int unused) {
    for (dt_listener *l = ctx->listeners; l && (written || unused); l = l->next)
        if (l->release) l->release(ctx, unit, written, unused, l->user);
}

/* No rank ever holds more than its run, not even of the initial values. */
static dt_status dt__unit_storage(dt_ctx *ctx, dt_bucket *unit, const dt_buckets_desc *desc) {
    size_t bytes = unit->run * dt_dtype_size(unit->dtype);
    unit->kept = dt_alloc(ctx, DT_MEM_PARAMS, bytes, "parameters");
    if (!unit->kept || dt__fill(ctx, unit->dtype, unit->kept, unit->run, 0) != DT_OK)
        return ctx->status;
    for (int i = unit->first_param; i < unit->first_param + unit->params; i++)
        if (dt__param_values(ctx, ctx->params[i]) != DT_OK) return ctx->status;
    if (unit->run == unit->padded && !desc->elsewhere) dt__unit_place(ctx, unit, unit->kept);
    if (!desc->elsewhere) return ctx->status;
    dt__unit_release(ctx, unit, 1, 1);
    dt_free(ctx, DT_MEM_PARAMS, unit->kept, bytes);
    unit->kept = NULL;
    return ctx->status;
}

/* How much padding a unit has, and which run of it this rank keeps. */
static dt_status dt__unit_cut(dt_ctx *ctx, dt_bucket *unit, const dt_buckets_desc *desc) {
    size_t pad = desc->pad ? desc->pad : 1;
    int parts = 1, part = 0;
    if (desc->cut) desc->cut(unit, &pad, &parts, &part, desc->user);
    if (parts < 1 || part < 0 || part >= parts || pad % (size_t)parts != 0)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_buckets_make: run %d of %d of units padded to %zu elements", part, parts, pad);
    unit->padded = (unit->count + pad - 1) / pad * pad;
    unit->run = unit->padded / (size_t)parts;
    unit->first = (size_t)part * unit->run;
    return DT_OK;
}

dt_status dt_buckets_make(dt_ctx *ctx, dt_buckets_desc desc) {
    size_t bucket_bytes = desc.bucket_bytes ? desc.bucket_bytes : (size_t)25 << 20, open = 0;
    if (!ctx || ctx->status != DT_OK) return dt_error(ctx);
    if (ctx->units)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_buckets_make: parameters have their storage already; call "
            "dt_zero_make once and before the first use of a parameter");
    if (ctx->n_params == 0 && ctx->staged) return DT_OK; /* a stage of a pipeline may have none */
    if (ctx->n_params == 0)
        return dt_fail(ctx, DT_ERR_ARG, "dt_buckets_make: no parameters were registered");
    for (int i = 0; i < ctx->n_params; i++) {
        int begins = dt__begins_unit(ctx, i, open, bucket_bytes);
        open = (begins ? 0 : open) + ctx->params[i]->param->count;
        ctx->n_units += begins;
    }
    ctx->units = (dt_bucket *)dt__host_zeroed(
        ctx, (size_t)ctx->n_units * sizeof *ctx->units, "dt_buckets_make");
    if (!ctx->units) {
        ctx->n_units = 0;
        return ctx->status;
    }
    ctx->hand_over = desc.hand_over;
    dt__units_plan(ctx, bucket_bytes);
    for (int u = 0; u < ctx->n_units && ctx->status == DT_OK; u++)
        dt__unit_cut(ctx, &ctx->units[u], &desc);
    for (int u = 0; u < ctx->n_units && ctx->status == DT_OK; u++)
        dt__unit_storage(ctx, &ctx->units[u], &desc);
    return ctx->status;
}

int dt_bucket_count(const dt_ctx *ctx) { return ctx ? ctx->n_units : 0; }
dt_bucket *dt_bucket_get(const dt_ctx *ctx, int index) {
    return index >= 0 && index < dt_bucket_count(ctx) ? &ctx->units[index] : NULL;
}

void dt_clear_grads(dt_ctx *ctx) {
    for (int u = 0; u < dt_bucket_count(ctx); u++) ctx->units[u].filled = 0;
}

/* A buffer for what a unit has in passing: a micro-batch's gradient, gathered values. The smallest
   that is large enough. */
static void *dt__spare_take(dt_ctx *ctx, size_t bytes) {
    dt__spare *best = NULL;
    for (int i = 0; i < ctx->n_spares; i++) {
        dt__spare *s = &ctx->spares[i];
        if (!s->busy && s->bytes >= bytes && (!best || s->bytes < best->bytes)) best = s;
    }
    if (best) {
        best->busy = 1;
        return best->data;
    }
    dt__spare *grown = (dt__spare *)dt__grow(
        ctx, ctx->spares, ctx->n_spares, &ctx->spare_room, sizeof *grown, "passing units");
    if (!grown) return NULL;
    ctx->spares = grown;
    dt__spare *s = &ctx->spares[ctx->n_spares];
    s->data = dt_alloc(ctx, DT_MEM_COMM, bytes, "a gathered unit or a passing gradient");
    if (!s->data) return NULL;
    s->bytes = bytes;
    s->busy = 1;
    ctx->n_spares++;
    return s->data;
}

static void dt__spare_give(dt_ctx *ctx, void *data) {
    for (int i = 0; i < ctx->n_spares; i++)
        if (ctx->spares[i].data == data) ctx->spares[i].busy = 0;
}

static dt_status dt__unit_grad(dt_ctx *ctx, dt_bucket *unit) {
    if (unit->grad || ctx->hand_over) return ctx->status;
    size_t size = dt_dtype_size(unit->grad_dtype);
    unit->grad = dt_alloc(ctx, DT_MEM_GRADS, unit->padded * size, "gradients");
    if (!unit->grad) return ctx->status;
    for (int i = unit->first_param; i < unit->first_param + unit->params; i++)
        ctx->params[i]->grad = (char *)unit->grad + ctx->params[i]->param->offset * size;
    return dt__fill(ctx, unit->grad_dtype, unit->grad, unit->padded, 0);
}

/* Opens a unit's gradient of this micro-batch. Handed over, it has its padding too, which is
   zero. */
static void *dt__unit_passing(dt_ctx *ctx, dt_bucket *unit) {
    size_t size = dt_dtype_size(unit->grad_dtype), padding = unit->padded - unit->count;
    if (dt__unit_grad(ctx, unit) != DT_OK) return NULL;
    if (!ctx->hand_over)
        return unit->passing = unit->filled ? dt__spare_take(ctx, unit->count * size) : unit->grad;
    unit->passing = dt__spare_take(ctx, unit->padded * size);
    if (unit->passing)
        dt__fill(ctx, unit->grad_dtype, (char *)unit->passing + unit->count * size, padding, 0);
    return unit->passing;
}

/* Where an op puts a parameter's gradient of this micro-batch. The first micro-batch goes straight
   to the sum, later ones through a buffer, so that each is complete before it is added. */
static void *dt__param_grad(dt_ctx *ctx, dt_tensor *t, int *accumulate) {
    dt_param_info *p = t->param;
    dt_bucket *unit = p->unit;
    if (!unit->passing && !dt__unit_passing(ctx, unit)) return NULL;
    *accumulate = p->written;
    p->written = 1;
    return (char *)unit->passing + p->offset * dt_dtype_size(unit->grad_dtype);
}

static void dt__passing_close(dt_ctx *ctx, dt_bucket *unit) {
    if (unit->passing != unit->grad) dt__spare_give(ctx, unit->passing);
    unit->passing = NULL;
}

enum { DT__COMPLETE = -1 };

/* All gradients of this micro-batch have reached the unit: add them to the sum and say so. */
static void dt__unit_complete(dt_ctx *ctx, dt_bucket *unit) {
    size_t size = dt_dtype_size(unit->grad_dtype);
    unit->pending = DT__COMPLETE;
    if (ctx->status != DT_OK || dt__unit_grad(ctx, unit) != DT_OK) return;
    if (ctx->hand_over && !unit->passing && !dt__unit_passing(ctx, unit)) return;
    void *passing = unit->passing ? unit->passing : unit->filled ? NULL : unit->grad;
    for (int i = unit->first_param; passing && i < unit->first_param + unit->params; i++) {
        dt_param_info *p = ctx->params[i]->param;
        void *g = (char *)passing + p->offset * size;
        if (!p->written)
            dt__fill(ctx, unit->grad_dtype, g, p->count, 0);
        else
            dt__zero_overhang(ctx, p, unit->grad_dtype, g);
        p->written = 0;
    }
    if (passing && passing != unit->grad && !ctx->hand_over)
        dt__accumulate(ctx, unit->grad_dtype, unit->grad, passing, unit->count, 1);
    if (!ctx->hand_over) dt__passing_close(ctx, unit);
    if (ctx->status != DT_OK) return; /* nobody may take half a gradient for a whole one */
    unit->filled = 1;
    for (dt_listener *l = ctx->listeners; l; l = l->next)
        if (l->grad_ready) l->grad_ready(ctx, unit, ctx->micro == ctx->micro_count - 1, l->user);
    dt__passing_close(ctx, unit);
}

static void dt__params_free(dt_ctx *ctx) {
    for (int u = 0; u < ctx->n_units; u++) {
        dt_bucket *unit = &ctx->units[u];
        dt_free(ctx, DT_MEM_PARAMS, unit->kept, unit->run * dt_dtype_size(unit->dtype));
        dt_free(ctx, DT_MEM_GRADS, unit->grad, unit->padded * dt_dtype_size(unit->grad_dtype));
    }
    dt_free(ctx, DT_MEM_HOST, ctx->units, (size_t)ctx->n_units * sizeof *ctx->units);
    for (int i = 0; i < ctx->n_spares; i++)
        dt_free(ctx, DT_MEM_COMM, ctx->spares[i].data, ctx->spares[i].bytes);
    dt_free(ctx, DT_MEM_HOST, ctx->spares, (size_t)ctx->spare_room * sizeof *ctx->spares);
    for (int i = 0; i < ctx->n_params; i++)
        dt_free(ctx, DT_MEM_HOST, ctx->params[i], dt__param_bytes(ctx->params[i]->name));
    dt_free(ctx, DT_MEM_HOST, ctx->params, (size_t)ctx->param_room * sizeof *ctx->params);
    dt_free(ctx, DT_MEM_HOST, ctx->scope_prefix, ctx->scope_bytes);
}

// ==== 15. Arenas ================================================================================

#if defined(__SANITIZE_ADDRESS__)
#define DT__ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DT__ASAN 1
#endif
#endif
#ifndef DT__ASAN
/* 1: every tensor is its own allocation: the sanitizer sees reads past it and after a reset */
#define DT__ASAN 0
#endif

enum { DT__LEAST_ACTS = 64 << 10, DT__LEAST_META = 8 << 10 };

static void *dt__arena_alloc(dt_ctx *ctx, dt__arena *a, size_t bytes) {
    if (bytes == 0) bytes = 1;
    /* the sanitizer is to see the first byte past the end */
    if (!DT__ASAN) bytes = (bytes + 63) / 64 * 64;
    dt__chunk *c = a->chunks;
    if (!c || c->size - c->used < bytes) {
        size_t size = DT__ASAN || bytes > a->least ? bytes : a->least;
        c = (dt__chunk *)dt__host_zeroed(ctx, sizeof *c, "an arena");
        if (!c) return NULL;
        c->data = (char *)dt_alloc(ctx, a->mem, size, "an arena");
        if (!c->data) {
            dt_free(ctx, DT_MEM_HOST, c, sizeof *c);
            return NULL;
        }
        dt_log(ctx, DT_LOG_DETAIL, "an arena grows by %zu bytes", size);
        c->size = size;
        c->next = a->chunks;
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
        dt_free(ctx, a->mem, c->data, c->size);
        dt_free(ctx, DT_MEM_HOST, c, sizeof *c);
    }
}

/* Empties the arena. Several chunks become one of their total size at the next use: after the first
   steps an arena is one chunk and nothing is allocated. */
static void dt__arena_reset(dt_ctx *ctx, dt__arena *a) {
    size_t total = 0;
    if (!a->chunks) return;
    for (dt__chunk *c = a->chunks; c; c = c->next) total += c->used;
    if (a->chunks->next || DT__ASAN) {
        dt__arena_free(ctx, a);
        if (total > a->least) a->least = total;
    } else {
        a->chunks->used = 0;
    }
}

/* An arena from a pool, or a new one: for activations, but that of brief tensors for communication.
   The last one given is the first one taken. */
static dt__arena *dt__arena_take(dt_ctx *ctx, dt__arena **pool) {
    dt__arena *a = *pool;
    if (a) {
        *pool = a->next;
        return a;
    }
    a = (dt__arena *)dt__host_zeroed(ctx, sizeof *a, "an arena");
    if (!a) return NULL;
    a->mem = pool == &ctx->brief_pool ? DT_MEM_COMM : DT_MEM_ACTS;
    a->least = DT__LEAST_ACTS;
    return a;
}

/* Empties *a, if there is one, and gives it to a pool. */
static void dt__arena_give(dt_ctx *ctx, dt__arena **pool, dt__arena **a) {
    if (!*a) return;
    dt__arena_reset(ctx, *a);
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

// ==== 16. Tape and blocks: code =================================================================

/* A block: the ops it recorded, newest first, and the memory of what they made. Block 0 (the root)
   is the micro-batch, a tape; dt_block makes children. A block keeps its arenas when a reset
   returns it to the pool of its tape, so the k-th block of every step finds memory of its own size.

   A recomputed block, and every block inside one, is lent an arena for its data and gives it back
   when it is dropped: a step lends the same few arenas over and over. Lent blocks have a pool of
   their own, or a plain block would find the arena of another. Tensors and nodes themselves stay
   until the reset, so that a pointer to one that is gone can still be told from a good one. The
   second run is a block of its own, `again`: what the first made is gone for good. The gradient of
   `out` lives with the block, not with the parent whose arena holds its data: else the gradients of
   all outputs would be alive together. */
struct dt_block_state {
    dt_ctx *ctx;
    dt_block_state *parent;
    dt_block_state *children, *sibling; /* newest child first */
    int index;
    dt_node *newest;
    dt__arena *acts; /* data of tensors: own, or lent; NULL: dropped */
    dt__arena own;
    dt__arena meta; /* tensors and nodes themselves: host memory */
    /* gradients of its tensors, from their first use to its backward's end */
    dt__arena *grads;
    /* root only, as to stage: (n_params): recorded uses still to go back through */
    int *uses;
    /* 1: the input half of its backward has run, 2: all of it */
    int done;
    int blocks; /* dt_block calls of this micro-batch */
    /* blocks that a reset gave back, with their arenas: own, lent */
    dt_block_state *pool[2];
    int stage;
    /* digest of what it recorded, blocks inside included; 0: nothing */
    uint64_t trail;
    /* of a recomputed block, else NULL: what to run again, on what */
    dt_block_fn fn;
    dt_tensor *x;
    void *user;
    int no_grad;
    /* what fn returned; its copy for the parent, NULL if y was made outside */
    dt_tensor *y, *out;
    dt_block_state *again; /* its second run */
    dt_tensor *briefs;     /* newest first */
};

static dt_block_state *dt__block_take(dt_ctx *ctx, int lent) {
    dt_block_state *b = ctx->root ? ctx->root->pool[lent] : NULL;
    if (b) {
        ctx->root->pool[lent] = b->sibling;
    } else {
        b = (dt_block_state *)dt__host_zeroed(ctx, sizeof *b, "a block");
        if (!b) return NULL;
        b->ctx = ctx;
        b->own.mem = DT_MEM_ACTS;
        b->own.least = DT__LEAST_ACTS;
        b->meta.mem = DT_MEM_HOST;
        b->meta.least = DT__LEAST_META;
    }
    b->parent = b->children = b->sibling = b->again = NULL;
    b->acts = &b->own;
    b->fn = NULL;
    b->out = NULL;
    b->briefs = NULL;
    return b;
}

/* A brief tensor is one that a layout needs only in passing: a sum over ranks before it is taken,
   or a whole of which this rank keeps a part. Its data lie apart from the block's arena and are
   given back when the forward of the block ends. If the backward reads them, the op that made them
   makes them again (remake), and they go once more when the backward of that op is over. Tensors of
   the root are not dropped: its forward has no end. */
static void dt__brief_drop(dt_ctx *ctx, dt_tensor *t) {
    dt__arena_give(ctx, &ctx->brief_pool, &t->room);
    t->data = NULL;
}

static void dt__briefs_drop(dt_ctx *ctx, dt_block_state *b) {
    for (dt_tensor *t = b->briefs; t; t = t->brief_next) dt__brief_drop(ctx, t);
}

static void *dt__brief_data(dt_ctx *ctx, dt_tensor *t) {
    if (!t->room) t->room = dt__arena_take(ctx, &ctx->brief_pool);
    t->data = t->room ? dt__arena_alloc(ctx, t->room, dt__bytes(t)) : NULL;
    return t->data;
}

/* The root of tape 0 if none was named, made at its first use. */
static dt_block_state *dt__root(dt_ctx *ctx) {
    if (!ctx->root) dt_tape(ctx, 0, 0);
    return ctx->root;
}

/* Storage for parameters that no optimizer asked for. */
static dt_status dt__storage(dt_ctx *ctx) {
    dt_buckets_desc defaults = { 0, 0, 0, 0, NULL, NULL };
    return ctx->units ? DT_OK : dt_buckets_make(ctx, defaults);
}

/* The values of a parameter that is read now: storage is made, a cut unit is gathered. A view
   follows. */
static dt_status dt__present(dt_tensor *x) {
    dt_tensor *t = dt__owner(x);
    dt_ctx *ctx = t->ctx;
    if (t->param && dt__storage(ctx) != DT_OK) return ctx->status;
    if (t->param && !t->data)
        for (dt_listener *l = ctx->listeners; l; l = l->next)
            if (l->gather) l->gather(ctx, t->param->unit, l->user);
    if (t->param && !t->data)
        return dt_fail(ctx, DT_ERR_ARG,
            "%s: its values are cut over ranks, and nobody gathers "
            "them: dt_zero_free has run",
            t->name);
    x->data = t->data;
    return ctx->status;
}

static dt_status dt__present_aside(dt_tensor *t) {
    t->ctx->aside = 1;
    dt_status status = dt__present(t);
    t->ctx->aside = 0;
    return status;
}

/* Reads or writes a parameter as a whole outside of any op: what was gathered for it alone is
   released at once. */
static dt_status dt__access(dt_tensor *t, void *host, const void *from) {
    dt_ctx *ctx = t->ctx;
    dt_param_info *param = dt__owner(t)->param; /* of a view too */
    int gathered = param && !dt__owner(t)->data;
    if (param && dt__present_aside(t) != DT_OK) return ctx->status;
    dt_bucket *unit = param ? param->unit : NULL;
    dt__move(ctx, from ? t->data : host, from ? from : t->data, dt__bytes(t));
    if (ctx->status == DT_OK) dt__sync(ctx);
    if (unit) dt__unit_release(ctx, unit, from != NULL, gathered);
    return ctx->status;
}

/* Gives back a block and all below it. Children were pushed newest first, so the pool ends with the
   first child on top and the next micro-batch takes the blocks in the same order. */
static void dt__block_give(dt_ctx *ctx, dt_block_state *b) {
    while (b->children) {
        dt_block_state *child = b->children;
        b->children = child->sibling;
        dt__block_give(ctx, child);
    }
    dt__arena_give(ctx, &ctx->grad_pool, &b->grads);
    dt__briefs_drop(ctx, b);
    int lent = b->acts != &b->own;
    if (lent) dt__arena_give(ctx, &ctx->lent_pool, &b->acts);
    dt__arena_reset(ctx, &b->own);
    dt__arena_reset(ctx, &b->meta);
    b->newest = NULL;
    b->briefs = NULL;
    b->sibling = ctx->root->pool[lent];
    ctx->root->pool[lent] = b;
}

static void dt__block_free(dt_ctx *ctx, dt_block_state *b) {
    dt__arena_free(ctx, &b->own);
    dt__arena_free(ctx, &b->meta);
    dt_free(ctx, DT_MEM_HOST, b, sizeof *b);
}

/* What listeners have started for the next op ends. */
static void dt__tell_reset(dt_ctx *ctx) {
    for (dt_listener *l = ctx->listeners; l; l = l->next)
        if (l->reset) l->reset(ctx, l->user);
}

void dt_reset(dt_ctx *ctx) {
    if (!ctx || !ctx->root) return;
    if (ctx->current != ctx->root) {
        dt_fail(ctx, DT_ERR_ARG, "dt_reset: inside a dt_block, whose tensors are in use");
        return;
    }
    dt_block_state *root = ctx->root;
    dt__block_give(ctx, root);
    root->pool[0] = root->sibling; /* the root stays the root */
    root->sibling = NULL;
    root->done = root->blocks = 0;
    if (root->uses) memset(root->uses, 0, (size_t)ctx->n_params * sizeof *root->uses);
    ctx->current = root;
    ctx->inside = NULL;
    ctx->trail = 0;
    dt__tell_reset(ctx);
}

/* Room for tape number `tape`. */
static dt_status dt__tape_room(dt_ctx *ctx, int tape) {
    while (ctx->tape_room <= tape) {
        dt_block_state **grown = (dt_block_state **)dt__grow(
            ctx, ctx->tapes, ctx->tape_room, &ctx->tape_room, sizeof *grown, "tapes");
        if (!grown) return ctx->status;
        ctx->tapes = grown;
    }
    return DT_OK;
}

void dt_tape(dt_ctx *ctx, int tape, int stage) {
    if (!ctx || ctx->status != DT_OK) return;
    if (tape < 0 || stage < 0 || ctx->current != ctx->root) {
        dt_fail(ctx, DT_ERR_ARG, "dt_tape: tape %d of stage %d%s", tape, stage,
            ctx->current != ctx->root ? " inside a dt_block" : "");
        return;
    }
    if (dt__tape_room(ctx, tape) != DT_OK) return;
    dt_block_state *root = ctx->tapes[tape];
    if (!root) {
        ctx->root = NULL; /* a new tape has a pool of its own */
        root = dt__block_take(ctx, 0);
        if (!root) return;
        ctx->tapes[tape] = root;
    }
    if (root->stage != stage && root->newest) {
        dt_fail(ctx, DT_ERR_ARG,
            "dt_tape: tape %d holds ops of stage %d; dt_reset comes before it is stage %d's", tape,
            root->stage, stage);
        return;
    }
    int same = ctx->root == root;
    root->stage = stage;
    ctx->root = ctx->current = root;
    ctx->inside = NULL;
    if (!same) dt__tell_reset(ctx); /* what listeners have under way is another tape's */
}

static void dt__tape_free(dt_ctx *ctx) {
    for (int t = 0; t < ctx->tape_room; t++) {
        dt_block_state *root = ctx->tapes[t];
        if (!root) continue;
        ctx->root = ctx->current = root;
        dt_reset(ctx);
        dt_free(ctx, DT_MEM_HOST, root->uses, (size_t)ctx->n_params * sizeof *root->uses);
        for (int lent = 0; lent < 2; lent++)
            while (root->pool[lent]) {
                dt_block_state *b = root->pool[lent];
                root->pool[lent] = b->sibling;
                dt__block_free(ctx, b);
            }
        dt__block_free(ctx, root);
    }
    ctx->root = ctx->current = NULL;
    dt_free(ctx, DT_MEM_HOST, ctx->tapes, (size_t)ctx->tape_room * sizeof *ctx->tapes);
    dt__arenas_free(ctx, &ctx->grad_pool);
    dt__arenas_free(ctx, &ctx->lent_pool);
    dt__arenas_free(ctx, &ctx->brief_pool);
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
    const char *bad = dt__shape_bad(shape, 0);
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
    return t;
}

static dt_tensor *dt__new_named(dt_ctx *ctx, dt_dtype dtype, dt_shape shape, const char *name) {
    dt_tensor *t = dt__tensor(ctx, dtype, shape, name);
    if (!t) return NULL;
    if (ctx->brief) {
        t->brief = 1;
        t->brief_next = t->block->briefs;
        t->block->briefs = t;
        return dt__brief_data(ctx, t) ? t : NULL;
    }
    t->data = dt__arena_alloc(ctx, t->block->acts, dt__bytes(t));
    return t->data ? t : NULL;
}

dt_tensor *dt_new(dt_ctx *ctx, dt_dtype dtype, dt_shape shape) {
    return dt__new_named(ctx, dtype, shape, "tensor");
}

/* Fails if the tensor's data went with a recomputed block. The output of such a block has its data
   with the parent. */
static int dt__gone(const char *op, const dt_tensor *t) {
    const dt_tensor *owner = t;
    while (owner->base) owner = owner->base;
    const dt_block_state *home =
        owner->block && owner == owner->block->out ? owner->block->parent : owner->block;
    if (owner->brief && !owner->data)
        return dt_fail(t->ctx, DT_ERR_ARG,
                   "%s(%s): the tensor was whole only inside its dt_block, where this rank "
                   "keeps a part of it",
                   op, t->name) != DT_OK;
    if (!home || home->acts) return 0;
    dt_fail(t->ctx, DT_ERR_ARG,
        "%s(%s): the tensor was made inside a recomputed dt_block and is gone; use it there, "
        "or return it from the block",
        op, t->name);
    return 1;
}

/* Adds one recorded op to the digest: its name and its parameters. Never 0. */
static void dt__trail(dt_ctx *ctx, const char *name, dt_tensor *const *in, int n) {
    uint64_t h = ctx->trail;
    for (; name && *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001B3u;
    for (int i = 0; i < n; i++) {
        const dt_param_info *p = in[i] ? dt__owner(in[i])->param : NULL;
        h = (h ^ (p ? 2 + (uint64_t)p->index : in[i] != NULL)) * 0x100000001B3u;
    }
    ctx->trail = h | 1;
}

/* Counts one use of a parameter in this micro-batch. Its storage exists, so no parameter can be
   added any more. */
static int dt__use(dt_ctx *ctx, const dt_tensor *t) {
    const dt_param_info *p = t->param;
    int **uses = &ctx->root->uses;
    if (p->stage != ctx->root->stage)
        return dt_fail(ctx, DT_ERR_ARG,
                   "%s belongs to stage %d and is used on a tape of "
                   "stage %d: a stage on another rank has a copy, marked DT_GRAD_PARTIAL",
                   t->name, p->stage, ctx->root->stage) == DT_OK;
    if (!*uses)
        *uses = (int *)dt__host_zeroed(ctx, (size_t)ctx->n_params * sizeof **uses, "the tape");
    if (*uses) (*uses)[p->index]++;
    return *uses != NULL;
}

/* Adds a node to the current block. NULL when there is nothing to go back to. */
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
        if (dt__gone(d->name, d->in[i])) return NULL;
        if (dt__owner(d->in[i])->param && dt__storage(ctx) != DT_OK) return NULL;
        needed |= d->in[i]->needs_grad;
        dt__owner(d->in[i])->readers++;
    }
    if (!needed) return NULL;
    if (ctx->root->done && !ctx->recomputing) {
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
    for (int i = 0; i < n; i++) {
        node->in[i] = d->in[i];
        dt_tensor *owner = d->in[i] ? dt__owner(d->in[i]) : NULL;
        /* the first run has counted */
        int counts = owner && owner->param && owner->needs_grad && !ctx->recomputing;
        if (counts && !dt__use(ctx, owner)) return NULL;
    }
    dt__trail(ctx, d->name, node->in, n);
    node->prev = ctx->current->newest;
    ctx->current->newest = node;
    if (out) {
        out->needs_grad = 1;
        out->maker = node;
    }
    return node;
}

void *dt_record_saved(dt_tensor *out, dt_record_desc desc) {
    dt_node *node = out ? dt__record(out, out->ctx, &desc) : NULL;
    return node ? node->saved : NULL;
}

dt_tensor *dt_record(dt_tensor *out, dt_record_desc desc) {
    if (out) {
        out->name = desc.name;
        dt__record(out, out->ctx, &desc);
    }
    return out && out->ctx->status == DT_OK ? out : NULL;
}

/* Whether the node has an input i: a caller's backward may pass any i. */
static int dt__has_input(const dt_node *node, int i) {
    return node && i >= 0 && i < node->n_in && node->in[i];
}

int dt_wants(const dt_node *node, int i) { return dt__has_input(node, i) && (node->want >> i & 1); }

/* of needs_grad: the user reads the gradient, so it outlives the backward of its block */
enum { DT__KEPT = 2 };

/* Memory that lives until the backward of a block is over. */
static void *dt__grad_room(dt_ctx *ctx, dt_block_state *home, size_t bytes) {
    if (!home->grads) home->grads = dt__arena_take(ctx, &ctx->grad_pool);
    return home->grads ? dt__arena_alloc(ctx, home->grads, bytes) : NULL;
}

dt_dtype dt_grad_dtype(const dt_tensor *t) {
    return t ? dt__wide(t->dtype, t->param != NULL) : DT_F32;
}

/* dt_grad_raw for ops that can add to the f32 gradient of a bf16 or f16 parameter: *wide says that
   it is one. */
static void *dt__grad_wide(dt_node *node, int i, int *accumulate, int *wide) {
    dt_tensor *t = dt__owner(node->in[i]);
    *wide = t->param && dt__narrow(t->dtype);
    if (t->param) return dt__param_grad(t->ctx, t, accumulate);
    *accumulate = t->grad != NULL;
    if (!t->grad)
        t->grad = dt__grad_room(
            t->ctx, t->needs_grad == DT__KEPT ? t->ctx->root : t->block, dt__bytes(t));
    return t->grad;
}

/* Other ops write the gradient in the tensor's own type; dt__node_back adds it up where that is not
   the gradient's. */
void *dt_grad_raw(dt_node *node, int i, int *accumulate) {
    if (!dt__has_input(node, i) || !accumulate) return NULL;
    dt_tensor *t = dt__owner(node->in[i]);
    int wide = 0;
    if (!t->param || !dt__narrow(t->dtype)) return dt__grad_wide(node, i, accumulate, &wide);
    *accumulate = node->narrow[i] != NULL;
    dt_block_state *home = node->out ? node->out->block : t->ctx->root;
    if (!node->narrow[i]) node->narrow[i] = dt__grad_room(t->ctx, home, dt__bytes(t));
    return node->narrow[i];
}

/* Adds gradients that an op wrote in 16 bits to the parameters' f32 ones. */
static dt_status dt__widen_grads(dt_ctx *ctx, dt_node *n) {
    for (int i = 0; i < n->n_in; i++) {
        if (!n->narrow[i]) continue;
        dt_tensor *t = dt__owner(n->in[i]);
        dt_cast_args a = { DT_F32, t->dtype, NULL, n->narrow[i], (size_t)dt_count(t->shape), 0 };
        a.out = dt__param_grad(ctx, t, &a.accumulate);
        n->narrow[i] = NULL;
        if (!a.out || DT__KERNEL(ctx, n->name, cast, &a) != DT_OK) return dt_error(ctx);
    }
    return DT_OK;
}

void *dt_grad(dt_node *node, int i) {
    int accumulate = 0;
    void *g = dt_grad_raw(node, i, &accumulate);
    dt_tensor *t = g ? dt__owner(node->in[i]) : NULL;
    if (g && !accumulate) dt__fill(t->ctx, t->dtype, g, (size_t)dt_count(t->shape), 0);
    return g;
}

static void dt__emit(dt_ctx *ctx, const dt_block_state *b, dt_phase phase, int entering) {
    dt_event event = { phase, b->index, ctx->micro, ctx->micro == ctx->micro_count - 1,
        ctx->root->stage };
    ctx->inside = (dt_block_state *)b;
    for (dt_listener *l = ctx->listeners; l; l = l->next) {
        if (entering && l->enter) l->enter(ctx, &event, l->user);
        if (!entering && l->leave) l->leave(ctx, &event, l->user);
    }
    if (!entering) ctx->inside = b->parent;
}

/* A new block below parent. */
static dt_block_state *dt__block_open(dt_ctx *ctx, dt_block_state *parent, int index, int lent) {
    dt_block_state *b = dt__block_take(ctx, lent);
    if (!b) return NULL;
    b->parent = parent;
    b->sibling = parent->children;
    parent->children = b;
    b->index = index;
    if (lent) b->acts = dt__arena_take(ctx, &ctx->lent_pool);
    return b->acts ? b : NULL;
}

/* What fn returns, with b as the current block. */
static dt_tensor *dt__block_run(dt_block_state *b, dt_block_fn fn, dt_tensor *x, void *user) {
    dt_ctx *ctx = b->ctx;
    dt_block_state *outer = ctx->current;
    uint64_t trail = ctx->trail;
    ctx->current = b;
    ctx->trail = 0;
    dt__emit(ctx, b, DT_FORWARD, 1);
    dt_tensor *y = fn(x, user);
    dt__emit(ctx, b, DT_FORWARD, 0);
    if (!ctx->recomputing) dt__briefs_drop(ctx, b); /* else the backward follows at once */
    ctx->current = outer;
    b->trail = ctx->trail;
    ctx->trail = b->trail ? (trail ^ b->trail) * 0x100000001B3u | 1 : trail;
    if (!y && !ctx->recomputing)
        dt_fail(ctx, DT_ERR_ARG, "dt_block %d: its function returned NULL", b->index);
    return ctx->status == DT_OK ? y : NULL;
}

static int dt__made_in(const dt_block_state *b, const dt_tensor *t) {
    const dt_block_state *home = t->block;
    while (home && home != b) home = home->parent;
    return home != NULL;
}

/* Gives back the data of a lent block and of all inside it. In this order the next block that is
   built alike takes the same arenas for the same parts. */
static void dt__block_drop(dt_ctx *ctx, dt_block_state *b) {
    for (dt_block_state *child = b->children; child; child = child->sibling)
        dt__block_drop(ctx, child);
    dt__briefs_drop(ctx, b);
    dt__arena_give(ctx, &ctx->lent_pool, &b->acts);
}

/* The output of a recomputed block: a copy with the parent's data, or y itself if it was made
   outside. */
static dt_tensor *dt__block_out(dt_ctx *ctx, dt_block_state *b, dt_tensor *y) {
    b->y = y;
    if (!y || dt__gone("dt_block", y) || !dt__made_in(b, dt__owner(y))) return y;
    dt_tensor *out = dt__new_named(ctx, y->dtype, y->shape, y->name);
    if (!out || dt__move(ctx, out->data, dt__owner(y)->data, dt__bytes(y)) != DT_OK) return NULL;
    out->needs_grad = y->needs_grad ? dt__owner(y)->needs_grad : 0;
    out->block = b;
    b->out = out;
    return out;
}

/* What a second run has to find: the function, its arguments, whether it records. */
static int dt__block_remember(dt_block_state *b, dt_block_fn fn, dt_tensor *x, void *user) {
    b->fn = fn;
    b->x = x;
    b->user = user;
    b->no_grad = b->ctx->no_grad;
    return !x || !dt__gone("dt_block", x);
}

dt_tensor *dt_block_at(dt_ctx *ctx, dt_block_fn fn, dt_tensor *x, void *user, dt_block_desc desc) {
    if (!ctx || ctx->status != DT_OK || !dt__root(ctx)) return NULL;
    if (!fn) dt_fail(ctx, DT_ERR_ARG, "dt_block: no function");
    if (!fn) return NULL;
    dt_block_state *parent = ctx->current;
    int lent = desc.recompute || parent->acts != &parent->own;
    dt_block_state *b = dt__block_open(ctx, parent, ++ctx->root->blocks, lent);
    if (!b) return NULL;
    if (desc.user_bytes && user) {
        void *copy = dt__arena_alloc(ctx, &b->meta, desc.user_bytes);
        if (!copy) return NULL;
        user = memcpy(copy, user, desc.user_bytes);
    }
    if (desc.recompute && !dt__block_remember(b, fn, x, user)) return NULL;
    dt_tensor *y = dt__block_run(b, fn, x, user);
    if (desc.recompute) {
        y = dt__block_out(ctx, b, y);
        dt__block_drop(ctx, b);
    }
    if (ctx->status != DT_OK) return NULL;
    if (!b->trail) return y;
    dt_node *node = (dt_node *)dt__meta(ctx, sizeof *node);
    if (!node) return NULL;
    node->name = "dt_block";
    node->child = b;
    node->prev = parent->newest;
    parent->newest = node;
    return y;
}

dt_tensor *dt_block(dt_ctx *ctx, dt_block_fn fn, dt_tensor *x, void *user) {
    dt_block_desc plain = { 0, 0 };
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

dt_tensor *dt_require_grad(dt_tensor *t) {
    if (!t || t->ctx->status != DT_OK) return NULL;
    if (t->dtype == DT_I32) {
        dt_fail(t->ctx, DT_ERR_ARG, "dt_require_grad(%s): integers have no gradient", t->name);
        return NULL;
    }
    if (dt__owner(t)->param) {
        if (!dt__owner(t)->param->desc.frozen) return t;
        dt_fail(t->ctx, DT_ERR_ARG, "dt_require_grad(%s): the parameter is frozen", t->name);
        return NULL;
    }
    if (!dt__owner(t)->needs_grad && dt__owner(t)->readers) {
        dt_fail(t->ctx, DT_ERR_ARG,
            "dt_require_grad(%s): an op has used it already, without a gradient", t->name);
        return NULL;
    }
    dt__owner(t)->needs_grad = t->needs_grad = DT__KEPT;
    return t;
}

/* One use of each parameter of the node is done; a unit with none left is complete. */
static void dt__node_used(dt_ctx *ctx, const dt_node *n) {
    for (int i = 0; i < n->n_in; i++) {
        const dt_tensor *t = n->in[i] ? dt__owner(n->in[i]) : NULL;
        if (!t || !t->param || !t->needs_grad) continue;
        dt_bucket *unit = t->param->unit;
        if (--ctx->root->uses[t->param->index] == 0 && --unit->pending == 0)
            dt__unit_complete(ctx, unit);
    }
}

/* The data of x, if it was brief: first those of what it was made of. */
static dt_status dt__remake_one(dt_ctx *ctx, dt_tensor *x) {
    dt_tensor *t = x ? dt__owner(x) : NULL;
    dt_node *n = t && t->brief ? t->maker : NULL;
    if (!n || !n->remake) return DT_OK;
    for (int i = 0; i < n->n_in && !t->data; i++)
        if (dt__remake_one(ctx, n->in[i]) != DT_OK) return dt_error(ctx);
    if (!t->data && (!dt__brief_data(ctx, t) || n->remake(n) != DT_OK)) return dt_error(ctx);
    x->data = t->data; /* of a view too */
    return DT_OK;
}

/* All that the backward of a node reads. */
static dt_status dt__remake(dt_ctx *ctx, dt_node *n) {
    for (int i = 0; i < n->n_in; i++) {
        if (!(n->blind >> i & 1) && dt__remake_one(ctx, n->in[i]) != DT_OK) return dt_error(ctx);
        if (n->in[i] && dt__owner(n->in[i])->param && dt__present(n->in[i]) != DT_OK)
            return dt_error(ctx);
    }
    return DT_OK;
}

static void dt__block_back(dt_block_state *b, dt_phase phase);

static void dt__node_back(dt_ctx *ctx, dt_node *n, dt_phase phase) {
    if (n->child) {
        dt__block_back(n->child, phase);
        return;
    }
    n->want = 0;
    /* no output: a side loss, its own source of gradient */
    int reached = !n->out || dt__owner(n->out)->grad;
    for (int i = 0; reached && i < n->n_in; i++) {
        const dt_tensor *t = n->in[i];
        if (!t || !t->needs_grad) continue;
        int is_weight = dt__owner(n->in[i])->param != NULL;
        if (phase == DT_BACKWARD || is_weight == (phase == DT_BACKWARD_WEIGHT)) n->want |= 1u << i;
    }
    if (n->want) {
        dt_status status = dt__remake(ctx, n);
        if (status == DT_OK) status = n->backward(n);
        if (status == DT_OK) status = dt__widen_grads(ctx, n);
        if (status != DT_OK) dt_fail(ctx, status, "backward of %s", n->name);
    }
    if (n->out && n->out->brief) dt__brief_drop(ctx, n->out);
    if (phase != DT_BACKWARD_INPUT) dt__node_used(ctx, n);
}

/* "dt_add f32 (2,3)" */
static dt__text dt__tensor_text(const dt_tensor *t) {
    dt__text text = { "nothing" };
    if (t)
        snprintf(text.s, sizeof text.s, "%.20s %s %.60s", t->name, dt_dtype_name(t->dtype),
            dt__shape_text(t->shape).s);
    return text;
}

/* Whether the second run of b gave what the first did; fails if not. */
static int dt__block_repeats(const dt_block_state *b, dt_tensor *y) {
    dt_ctx *ctx = b->ctx;
    int alike = !y == !b->y && b->again->trail == b->trail;
    dt_tensor *first = b->y;
    if (alike && y && !b->out) alike = dt__owner(y) == dt__owner(first);
    if (alike && b->out)
        alike = dt__made_in(b->again, dt__owner(y)) && y->dtype == first->dtype &&
                dt__same_shape(y->shape, first->shape);
    if (alike) return 1;
    dt_fail(ctx, DT_ERR_ARG,
        "dt_block %d: run again for the backward, its function returned %s and recorded %s ops; "
        "before it returned %s. A recomputed block must repeat itself",
        b->index, dt__tensor_text(y).s, b->again->trail == b->trail ? "the same" : "other",
        dt__tensor_text(first).s);
    return 0;
}

/* Runs the function of a recomputed block again, recording this time for good. Its uses of
   parameters are counted already, its blocks have their numbers already; the gradient of the output
   passes to what the function returns. */
static void dt__block_again(dt_block_state *b) {
    dt_ctx *ctx = b->ctx;
    int blocks = ctx->root->blocks, no_grad = ctx->no_grad;
    dt_block_state *again = b->again = dt__block_open(ctx, b->parent, b->index, 1);
    if (!again) return;
    again->grads = b->grads;
    b->grads = NULL;
    ctx->root->blocks = b->index;
    ctx->no_grad = b->no_grad;
    ctx->recomputing++;
    dt_tensor *y =
        dt__remake_one(ctx, b->x) == DT_OK ? dt__block_run(again, b->fn, b->x, b->user) : NULL;
    ctx->recomputing--;
    ctx->no_grad = no_grad;
    ctx->root->blocks = blocks;
    if (ctx->status != DT_OK || !dt__block_repeats(b, y) || !b->out) return;
    dt__owner(y)->grad = b->out->grad;
    /* nobody may use it up */
    if (b->out->needs_grad == DT__KEPT) dt__owner(y)->needs_grad = DT__KEPT;
}

static void dt__block_back(dt_block_state *b, dt_phase phase) {
    dt_ctx *ctx = b->ctx;
    if (b->fn) { /* recomputed: the way back leads through its second run */
        if (phase != DT_BACKWARD_WEIGHT) dt__block_again(b);
        if (ctx->status == DT_OK) dt__block_back(b->again, phase);
        if (ctx->status == DT_OK && phase != DT_BACKWARD_INPUT) dt__block_drop(ctx, b->again);
        return;
    }
    dt__emit(ctx, b, phase, 1);
    for (dt_node *n = b->newest; n && ctx->status == DT_OK; n = n->prev)
        dt__node_back(ctx, n, phase);
    dt__emit(ctx, b, phase, 0);
    if (phase != DT_BACKWARD_INPUT && b != ctx->root)
        dt__arena_give(ctx, &ctx->grad_pool, &b->grads);
}

/* The gradient that the backward begins with: grad, or a one. */
static dt_status dt__seed(dt_tensor *y, dt_tensor *grad) {
    dt_ctx *ctx = y->ctx;
    dt_tensor *t = dt__owner(y);
    if (grad) {
        t->grad = grad->data;
        return DT_OK;
    }
    t->grad = dt__grad_room(ctx, t->needs_grad == DT__KEPT ? ctx->root : t->block, dt__bytes(t));
    return t->grad ? dt__fill(ctx, t->dtype, t->grad, 1, ctx->loss_scale) : ctx->status;
}

void dt_loss_scale(dt_ctx *ctx, double scale) {
    if (ctx) ctx->loss_scale = scale;
}

/* A parameter has no tape behind it, an open block is not on the tape yet, and a half runs once, in
   its turn. */
static dt_status dt__backward_turn(dt_tensor *loss, dt_phase phase) {
    dt_ctx *ctx = loss->ctx;
    if (dt__owner(loss)->param)
        return dt_fail(ctx, DT_ERR_ARG, "dt_backward(%s): the loss is a parameter", loss->name);
    if (ctx->current != ctx->root)
        return dt_fail(ctx, DT_ERR_ARG, "dt_backward(%s): inside a dt_block", loss->name);
    if (phase == DT_BACKWARD_WEIGHT && ctx->root->done != 1)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_backward_weight(%s): dt_backward_input comes first, each once", loss->name);
    if (phase != DT_BACKWARD_WEIGHT && ctx->root->done)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_backward(%s): the backward of this micro-batch has run; "
            "add losses with dt_loss, and call dt_reset before the next forward",
            loss->name);
    ctx->root->done = phase == DT_BACKWARD_INPUT ? 1 : 2;
    return DT_OK;
}

static dt_status dt__backward_check(dt_tensor *y, const dt_tensor *grad, dt_phase phase) {
    dt_ctx *ctx = y->ctx;
    if (phase < DT_BACKWARD || phase > DT_BACKWARD_WEIGHT)
        return dt_fail(ctx, DT_ERR_ARG, "dt_backward_at(%s): phase %d", y->name, (int)phase);
    if (!grad && (dt_count(y->shape) != 1 || y->dtype == DT_I32))
        return dt_fail(ctx, DT_ERR_SHAPE, "dt_backward(%s): %s %s is no scalar", y->name,
            dt_dtype_name(y->dtype), dt__shape_text(y->shape).s);
    if (grad && (grad->dtype != y->dtype || !dt__same_shape(grad->shape, y->shape)))
        return dt_fail(ctx, DT_ERR_SHAPE, "dt_backward_at(%s): %s %s has a gradient %s", y->name,
            dt_dtype_name(y->dtype), dt__shape_text(y->shape).s, dt__tensor_text(grad).s);
    if (dt__gone("dt_backward", y)) return ctx->status;
    if (!y->needs_grad && !grad)
        return dt_fail(ctx, DT_ERR_ARG, "dt_backward(%s): no parameter leads to it%s", y->name,
            ctx->no_grad ? " (dt_no_grad is on)" : "");
    return dt__backward_turn(y, phase);
}

dt_status dt_backward_at(dt_tensor *y, dt_tensor *grad, dt_phase phase) {
    if (!y || y->ctx->status != DT_OK) return y ? y->ctx->status : DT_ERR_ARG;
    dt_ctx *ctx = y->ctx;
    if (dt__backward_check(y, grad, phase) != DT_OK) return ctx->status;
    if (phase != DT_BACKWARD_WEIGHT && y->needs_grad && dt__seed(y, grad) != DT_OK)
        return ctx->status;
    if (phase == DT_BACKWARD_INPUT) {
        dt__block_back(ctx->root, phase);
        return ctx->status;
    }
    for (int u = 0; u < ctx->n_units; u++)
        if (ctx->units[u].stage == ctx->root->stage) ctx->units[u].pending = 0;
    for (int i = 0; i < ctx->n_params && ctx->root->uses; i++)
        if (ctx->root->uses[i] > 0) ctx->params[i]->param->unit->pending++;
    dt__block_back(ctx->root, phase);
    /* units of this stage that the micro-batch did not reach are complete too: their gradient is
       zero */
    for (int u = ctx->n_units - 1; u >= 0 && ctx->status == DT_OK; u--) {
        dt_bucket *unit = &ctx->units[u];
        if (unit->stage == ctx->root->stage && unit->pending != DT__COMPLETE && !unit->frozen)
            dt__unit_complete(ctx, unit);
    }
    return ctx->status;
}

dt_status dt_backward(dt_tensor *loss) { return dt_backward_at(loss, NULL, DT_BACKWARD); }
dt_status dt_backward_input(dt_tensor *loss) {
    return dt_backward_at(loss, NULL, DT_BACKWARD_INPUT);
}
dt_status dt_backward_weight(dt_tensor *loss) {
    return dt_backward_at(loss, NULL, DT_BACKWARD_WEIGHT);
}

// ==== 17. Ops: code =============================================================================

dt_tensor *dt_input(dt_ctx *ctx, dt_dtype dtype, dt_shape shape, const void *host) {
    dt_tensor *t = dt__new_named(ctx, dtype, shape, "dt_input");
    if (t && host) dt_write(t, host);
    return t && ctx->status == DT_OK ? t : NULL;
}

dt_status dt_read(const dt_tensor *t, void *host) {
    if (!t || t->ctx->status != DT_OK) return t ? t->ctx->status : DT_ERR_ARG;
    if (!host && dt__bytes(t))
        return dt_fail(t->ctx, DT_ERR_ARG, "dt_read(%s): host memory is NULL", t->name);
    if (dt__gone("dt_read", t)) return t->ctx->status;
    return dt__access((dt_tensor *)t, host, NULL);
}

dt_status dt_write(dt_tensor *t, const void *host) {
    if (!t || t->ctx->status != DT_OK) return t ? t->ctx->status : DT_ERR_ARG;
    if (!host && dt__bytes(t))
        return dt_fail(t->ctx, DT_ERR_ARG, "dt_write(%s): host memory is NULL", t->name);
    if (dt__gone("dt_write", t)) return t->ctx->status;
    return dt__access(t, NULL, host);
}

void *dt_data(dt_tensor *t) {
    if (!t || t->ctx->status != DT_OK || dt__gone("dt_data", t)) return NULL;
    return dt__present(t) == DT_OK ? t->data : NULL;
}

double dt_item(const dt_tensor *t) {
    union {
        float f;
        double d;
        int32_t i;
    } value;
    value.d = NAN;
    if (!t || dt_count(t->shape) != 1 || dt_read(t, &value) != DT_OK) return NAN;
    return dt__number(t->dtype, &value, 0);
}

/* The context if an op may run on these inputs: none NULL, none from a failed or another context,
   all with storage. */
static dt_ctx *dt__op(const char *op, dt_tensor *a, dt_tensor *b, dt_tensor *c) {
    dt_tensor *all[3] = { a, b, c };
    if (!a || a->ctx->status != DT_OK) return NULL;
    dt_ctx *ctx = a->ctx;
    for (int i = 0; i < 3; i++) {
        if (!all[i]) continue;
        if (all[i]->ctx != ctx) {
            dt_fail(ctx, DT_ERR_ARG, "%s(%s): a tensor of another context", op, all[i]->name);
            return NULL;
        }
        if (dt__gone(op, all[i])) return NULL;
        if (dt__present(all[i]) != DT_OK) return NULL;
    }
    return ctx;
}

/* The answer to a NULL among an op's inputs. After a failure that is normal; otherwise it is one, a
   misspelt dt_param_find for example. Which of the inputs is there to tell does not matter. */
static dt_ctx *dt__missing(const char *op, dt_tensor *a, dt_tensor *b, dt_tensor *c) {
    dt_tensor *t = a ? a : b ? b : c;
    if (t) dt_fail(t->ctx, DT_ERR_ARG, "%s(%s): another input is NULL", op, t->name);
    return NULL;
}

/* Fails with the shapes of both. */
static dt_tensor *dt__mismatch(
    const char *op, const dt_tensor *a, const dt_tensor *b, const char *why) {
    dt_fail(a->ctx, DT_ERR_SHAPE, "%s(%s, %s): %s %s and %s %s: %s", op, a->name, b->name,
        dt_dtype_name(a->dtype), dt__shape_text(a->shape).s, dt_dtype_name(b->dtype),
        dt__shape_text(b->shape).s, why);
    return NULL;
}

static size_t dt__last(const dt_tensor *t) {
    return t->shape.nd ? (size_t)t->shape.d[t->shape.nd - 1] : 1;
}
static size_t dt__rows(const dt_tensor *t) {
    size_t rows = 1;
    for (int i = 0; i + 1 < t->shape.nd; i++) rows *= (size_t)t->shape.d[i];
    return rows;
}

static dt_tensor *dt__unfit(const char *op, const dt_tensor *x, const char *why) {
    dt_fail(x->ctx, DT_ERR_SHAPE, "%s(%s): %s %s: %s", op, x->name, dt_dtype_name(x->dtype),
        dt__shape_text(x->shape).s, why);
    return NULL;
}

/* dt__op where x must not be integers. */
static dt_ctx *dt__op_real(const char *op, dt_tensor *x, dt_tensor *b, dt_tensor *c) {
    dt_ctx *ctx = dt__op(op, x, b, c);
    if (!ctx || x->dtype != DT_I32) return ctx;
    dt__unfit(op, x, "not for integers");
    return NULL;
}

/* A kernel that was given indices answers DT_ERR_ARG and no more: fails naming the first that is
   not least .. n-1. */
static void dt__blame_index(const char *op, const dt_tensor *x, const char *what,
    const dt_tensor *index, int64_t least, int64_t n, const char *of, const char *unit) {
    int32_t piece[256];
    int64_t count = dt_count(index->shape);
    for (int64_t at = 0; at < count && x->ctx->status == DT_OK; at++) {
        int64_t left = count - at < 256 ? count - at : 256;
        if (at % 256 == 0 &&
            (dt__move(x->ctx, piece, (int32_t *)index->data + at, (size_t)left * 4) != DT_OK ||
                dt__sync(x->ctx) != DT_OK))
            return;
        if (piece[at % 256] < least || piece[at % 256] >= n)
            dt_fail(x->ctx, DT_ERR_ARG, "%s(%s): %s %d at place %lld; %s has %lld %s", op, x->name,
                what, piece[at % 256], (long long)at, of, (long long)n, unit);
    }
}

/* The output of an op on each number of x. */
static dt_tensor *dt__like(dt_tensor *x, const char *op) {
    dt_ctx *ctx = dt__op_real(op, x, NULL, NULL);
    return ctx ? dt__new_named(ctx, x->dtype, x->shape, op) : NULL;
}

/* Inputs of a recorded op with the usual fields. */
static dt_record_desc dt__desc(const char *name, dt_tensor *a, dt_tensor *b, dt_tensor *c,
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

/* Scratch for a product, attention or sums over rows: what the CPU's kernel wants, or the device's
   if that is more. */
static size_t dt__lent(const dt_ctx *ctx, size_t bytes) {
    return bytes > ctx->kernels.work_bytes ? bytes : ctx->kernels.work_bytes;
}

/* One dense product with scratch from the context. */
static dt_status dt__matmul(dt_ctx *ctx, const char *op, const char *of, dt_matmul_args a) {
    if (a.m == 0 || a.n == 0) return DT_OK;
    a.work_bytes = dt__lent(ctx, dt_matmul_work(a.n, a.k, a.dtype));
    a.work = dt_scratch(ctx, a.work_bytes);
    return a.work ? dt__kernel_done(ctx, op, of, "matmul", DT__CALL(ctx, matmul, &a)) : ctx->status;
}

/* in[i]'s gradient (+)= the output's own, which no one reads after this: where in[i] has none yet
   and lives as long, the buffer changes hands. */
static dt_status dt__pass_grad(dt_node *n, int i, int may_take) {
    dt_tensor *t = dt__owner(n->in[i]), *out = dt__owner(n->out);
    int accumulate = 0;
    if (may_take && !t->param && !t->grad && t->block == out->block && t->needs_grad != DT__KEPT &&
        out->needs_grad != DT__KEPT) {
        t->grad = out->grad;
        return DT_OK;
    }
    void *g = dt_grad_raw(n, i, &accumulate);
    size_t count = (size_t)dt_count(t->shape);
    return g ? dt__accumulate(t->ctx, t->dtype, g, out->grad, count, accumulate) : dt_error(t->ctx);
}

typedef struct dt__linear_saved {
    int activation;
    dt_tensor *before; /* x w^T + b, where an activation follows */
    int turned;        /* the output's gradient has become that of `before` */
} dt__linear_saved;

static dt_status dt__linear_back(dt_node *n);

/* In place, because the output's gradient has no other reader; only a gradient that the user keeps
   is left alone, and one that a residual in the other half of the backward, a parameter, is still
   to get. */
static void *dt__linear_turn(dt_node *n) {
    dt__linear_saved *saved = (dt__linear_saved *)n->saved;
    dt_tensor *y = n->out;
    dt_ctx *ctx = y->ctx;
    size_t bytes = dt__bytes(y);
    if (!saved->before) return y->grad;
    dt_unary_back_args a = { .dtype = y->dtype,
        .act = saved->activation,
        .dx = y->grad,
        .dout = y->grad,
        .in = saved->before->data,
        .count = (size_t)dt_count(y->shape) };
    int waiting = n->in[3] && n->in[3]->needs_grad && !dt_wants(n, 3);
    if (saved->turned) return saved->before->grad;
    if (y->needs_grad == DT__KEPT || waiting) a.dx = dt__grad_room(ctx, y->block, bytes);
    if (!a.dx || DT__KERNEL(ctx, n->name, unary_back, &a) != DT_OK) return NULL;
    saved->turned = 1;
    saved->before->grad = a.dx;
    return a.dx;
}

/* Where x is the activation of another linear layer and this op its only reader, the product that
   makes x's gradient goes on to that of `before` at once. */
static void dt__linear_turn_input(dt_node *n, dt_matmul_args *a) {
    dt_tensor *x = dt__owner(n->in[0]);
    dt_node *maker = x->maker;
    if (x->readers != 1 || x->needs_grad == DT__KEPT || a->accumulate || !maker ||
        maker->backward != dt__linear_back ||
        /* another block may be recomputed, whose output has no maker */
        x->block != n->out->block)
        return;
    dt__linear_saved *saved = (dt__linear_saved *)maker->saved;
    if (!saved->before || maker->in[3]) return; /* a residual would need the gradient as it is */
    a->derivative = 1;
    a->activation = saved->activation;
    a->before = saved->before->data;
    saved->before->grad = a->c;
    saved->turned = 1;
}

/* y = act(x w^T + b) + residual. With d the gradient of x w^T + b: dx = d w, dw = d^T x, db = the
   column sums of d. */
static dt_status dt__linear_back(dt_node *n) {
    dt_tensor *x = n->in[0], *w = n->in[1], *b = n->in[2];
    dt_ctx *ctx = x->ctx;
    int64_t rows = (int64_t)dt__rows(x), in = (int64_t)dt__last(w), out = (int64_t)dt__rows(w);
    int all = (!w->needs_grad || dt_wants(n, 1)) && (!b || !b->needs_grad || dt_wants(n, 2)) &&
              (!x->needs_grad || dt_wants(n, 0)); /* no half of this is still to come */
    int plain = !((dt__linear_saved *)n->saved)->before;
    if (dt_wants(n, 3) && !plain && dt__pass_grad(n, 3, 0) != DT_OK) return dt_error(ctx);
    void *d = dt__linear_turn(n);
    if (!d) return dt_error(ctx);
    if (dt_wants(n, 0)) {
        dt_matmul_args a = {
            .dtype = x->dtype, .a = d, .b = w->data, .m = rows, .n = in, .k = out
        };
        a.c = dt__grad_wide(n, 0, &a.accumulate, &a.wide);
        dt__linear_turn_input(n, &a);
        if (!a.c || dt__matmul(ctx, n->name, NULL, a) != DT_OK) return dt_error(ctx);
    }
    if (dt_wants(n, 1)) {
        dt_matmul_args a = {
            .dtype = x->dtype, .a = d, .b = x->data, .m = out, .n = in, .k = rows, .trans_a = 1
        };
        a.c = dt__grad_wide(n, 1, &a.accumulate, &a.wide);
        if (!a.c || dt__matmul(ctx, n->name, NULL, a) != DT_OK) return dt_error(ctx);
    }
    if (dt_wants(n, 2)) {
        dt_sum_args a = { .dtype = x->dtype,
            .in = d,
            .outer = 1,
            .n = (size_t)rows,
            .inner = (size_t)out,
            .scale = 1,
            .work_bytes = dt__lent(ctx, 0) };
        a.work = dt_scratch(ctx, a.work_bytes);
        a.out = dt__grad_wide(n, 2, &a.accumulate, &a.wide);
        if (!a.out || DT__KERNEL(ctx, n->name, sum, &a) != DT_OK) return dt_error(ctx);
    }
    if (dt_wants(n, 3) && plain) return dt__pass_grad(n, 3, all);
    return DT_OK;
}

/* Whether the inputs of a linear layer fit each other; *shape is the result's. */
static int dt__linear_fits(
    dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_tensor *residual, dt_shape *shape) {
    const char *why = NULL;
    dt_tensor *other = w;
    *shape = x->shape;
    if (x->dtype != w->dtype || (b && b->dtype != w->dtype))
        why = "types differ";
    else if (w->shape.nd < 2 || x->shape.nd < 1 || dt__last(x) != dt__last(w))
        why = "the last dimensions must agree, and w needs two";
    else if (b && (size_t)dt_count(b->shape) != dt__rows(w))
        why = "the bias must have w's shape less its last dimension", x = w, other = b;
    else if (x->shape.nd + w->shape.nd - 2 > DT_MAX_DIMS)
        why = "the result has too many dimensions";
    if (!why) {
        shape->nd = x->shape.nd + w->shape.nd - 2;
        for (int i = 0; i < w->shape.nd - 1; i++) shape->d[x->shape.nd - 1 + i] = w->shape.d[i];
        if (residual &&
            (dt_count(residual->shape) != dt_count(*shape) || residual->dtype != x->dtype))
            why = "the residual must have the shape and type of the result", other = residual;
    }
    if (why) dt__mismatch("dt_linear", x, other, why);
    return !why;
}

dt_tensor *dt_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b) {
    dt_linear_desc none = { 0, NULL };
    return dt_linear_at(x, w, b, none);
}

dt_tensor *dt_linear_at(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc) {
    dt_ctx *ctx = x && w ? dt__op_real("dt_linear", x, w, b) : dt__missing("dt_linear", x, w, b);
    dt_shape shape;
    if (!ctx || (desc.residual && !dt__op("dt_linear", x, desc.residual, NULL))) return NULL;
    if (!dt__linear_fits(x, w, b, desc.residual, &shape)) return NULL;
    if (desc.activation < 0 || desc.activation >= DT_ACT_AFFINE) {
        dt_fail(ctx, DT_ERR_ARG, "dt_linear(%s): activation %d", w->name, desc.activation);
        return NULL;
    }
    dt_tensor *y = dt__new_named(ctx, x->dtype, shape, "dt_linear"), *before = NULL;
    if (!y) return NULL;
    dt_matmul_args a = { .dtype = x->dtype,
        .c = y->data,
        .a = x->data,
        .b = w->data,
        .m = (int64_t)dt__rows(x),
        .n = (int64_t)dt__rows(w),
        .k = (int64_t)dt__last(w),
        .trans_b = 1,
        .activation = desc.activation };
    a.bias = b ? b->data : NULL;
    a.residual = desc.residual ? desc.residual->data : NULL;
    int keep = desc.activation && !ctx->no_grad &&
               (x->needs_grad || w->needs_grad || (b && b->needs_grad));
    if (keep && !(before = dt__new_named(ctx, x->dtype, shape, "before"))) return NULL;
    a.before = before ? before->data : NULL;
    if (dt__matmul(ctx, "dt_linear", w->name, a) != DT_OK) return NULL;
    dt_record_desc d = dt__desc("dt_linear", x, w, b, dt__linear_back, sizeof(dt__linear_saved));
    d.in[3] = desc.residual;
    d.n_in = 4;
    dt__linear_saved *saved = (dt__linear_saved *)dt_record_saved(y, d);
    if (saved) {
        saved->activation = desc.activation;
        saved->before = before;
    }
    return ctx->status == DT_OK ? y : NULL;
}

/* ---- norms ---- */

typedef struct dt__norm_saved {
    dt_tensor *mean, *rstd;
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
        .rows = dt__rows(x),
        .cols = dt__last(x),
        .rms = !saved->mean };
    if (dt_wants(n, 0) && !(a.dx = dt_grad_raw(n, 0, &a.accumulate_x))) return dt_error(ctx);
    if (dt_wants(n, 1) && !(a.dgain = dt__grad_wide(n, 1, &a.accumulate_gain, &a.wide_gain)))
        return dt_error(ctx);
    if (dt_wants(n, 2) && !(a.dbias = dt__grad_wide(n, 2, &a.accumulate_bias, &a.wide_bias)))
        return dt_error(ctx);
    a.work_bytes = dt__lent(ctx, dt_row_work((int64_t)a.cols, x->dtype));
    a.work = dt_scratch(ctx, a.work_bytes);
    return a.work ? DT__KERNEL(ctx, n->name, norm_back, &a) : dt_error(ctx);
}

/* Layer normalisation, or RMSNorm where bias is NULL. */
static dt_tensor *dt__norm(
    const char *op, dt_tensor *x, dt_tensor *gain, dt_tensor *bias, double eps) {
    dt_ctx *ctx = dt__op_real(op, x, gain, bias);
    if (!ctx) return NULL;
    if (x->shape.nd < 1 || (size_t)dt_count(gain->shape) != dt__last(x) || x->dtype != gain->dtype)
        return dt__mismatch(op, x, gain, "the gain must have x's last dimension and type");
    if (bias && ((size_t)dt_count(bias->shape) != dt__last(x) || x->dtype != bias->dtype))
        return dt__mismatch(op, x, bias, "the bias must have x's last dimension and type");
    dt_shape row = DT_SHAPE((int64_t)dt__rows(x));
    dt_tensor *y = dt__new_named(ctx, x->dtype, x->shape, op);
    dt_tensor *rstd = dt__new_named(ctx, dt__wide(x->dtype, 1), row, "rstd");
    dt_tensor *mean = bias ? dt__new_named(ctx, dt__wide(x->dtype, 1), row, "mean") : NULL;
    if (!y || !rstd || (bias && !mean)) return NULL;
    dt_norm_args a = { .dtype = x->dtype,
        .out = y->data,
        .mean = mean ? mean->data : NULL,
        .rstd = rstd->data,
        .in = x->data,
        .gain = gain->data,
        .bias = bias ? bias->data : NULL,
        .rows = dt__rows(x),
        .cols = dt__last(x),
        .eps = eps > 0 ? eps : 1e-5,
        .rms = !bias };
    a.work_bytes = dt_row_work((int64_t)a.cols, x->dtype);
    a.work = dt_scratch(ctx, a.work_bytes);
    if (!a.work || DT__OP(op, gain, norm, &a) != DT_OK) return NULL;
    dt__norm_saved *saved = (dt__norm_saved *)dt_record_saved(
        y, dt__desc(op, x, gain, bias, dt__norm_back, sizeof *saved));
    if (saved) {
        saved->mean = mean;
        saved->rstd = rstd;
    }
    return ctx->status == DT_OK ? y : NULL;
}

dt_tensor *dt_layernorm(dt_tensor *x, dt_tensor *gain, dt_tensor *bias, double eps) {
    if (x && gain && bias) return dt__norm("dt_layernorm", x, gain, bias, eps);
    dt__missing("dt_layernorm", x, gain, bias);
    return NULL;
}

dt_tensor *dt_rmsnorm(dt_tensor *x, dt_tensor *gain, double eps) {
    if (x && gain) return dt__norm("dt_rmsnorm", x, gain, NULL, eps);
    dt__missing("dt_rmsnorm", x, gain, NULL);
    return NULL;
}

static dt_status dt__softmax_back(dt_node *n) {
    dt_tensor *y = n->out;
    dt_softmax_back_args a = { .dtype = y->dtype,
        .dx = NULL,
        .dout = y->grad,
        .out = y->data,
        .rows = dt__rows(y),
        .cols = dt__last(y) };
    a.dx = dt_grad_raw(n, 0, &a.accumulate);
    a.work_bytes = dt_row_work((int64_t)a.cols, y->dtype);
    a.work = dt_scratch(y->ctx, a.work_bytes);
    return a.dx && a.work ? DT__KERNEL(y->ctx, n->name, softmax_back, &a) : dt_error(y->ctx);
}

dt_tensor *dt_softmax(dt_tensor *x) {
    dt_tensor *y = dt__like(x, "dt_softmax");
    if (!y) return NULL;
    dt_softmax_args a = {
        .dtype = x->dtype, .out = y->data, .in = x->data, .rows = dt__rows(x), .cols = dt__last(x)
    };
    a.work_bytes = dt_row_work((int64_t)a.cols, x->dtype);
    a.work = dt_scratch(x->ctx, a.work_bytes);
    if (!a.work || DT__OP("dt_softmax", x, softmax, &a) != DT_OK) return NULL;
    return dt_record(y, dt__desc("dt_softmax", x, NULL, NULL, dt__softmax_back, 0));
}

/* ---- functions of each number ---- */

typedef struct dt__unary_saved {
    int act;
    double scale;
} dt__unary_saved;

static dt_status dt__unary_back(dt_node *n) {
    const dt__unary_saved *saved = (const dt__unary_saved *)n->saved;
    dt_tensor *x = n->in[0];
    dt_unary_back_args a = { .dtype = x->dtype,
        .act = saved->act,
        .dx = NULL,
        .dout = n->out->grad,
        .in = x->data,
        .count = (size_t)dt_count(x->shape),
        .scale = saved->scale };
    a.dx = dt_grad_raw(n, 0, &a.accumulate);
    return a.dx ? DT__KERNEL(x->ctx, n->name, unary_back, &a) : dt_error(x->ctx);
}

static dt_tensor *dt__unary(const char *op, dt_tensor *x, int act, double scale, double shift) {
    dt_tensor *y = dt__like(x, op);
    if (!y) return NULL;
    dt_unary_args a = { x->dtype, act, y->data, x->data, (size_t)dt_count(x->shape), scale, shift };
    if (DT__OP(op, x, unary, &a) != DT_OK) return NULL;
    dt__unary_saved *saved = (dt__unary_saved *)dt_record_saved(
        y, dt__desc(op, x, NULL, NULL, dt__unary_back, sizeof *saved));
    if (saved) {
        saved->act = act;
        saved->scale = scale;
    }
    return x->ctx->status == DT_OK ? y : NULL;
}

dt_tensor *dt_gelu(dt_tensor *x) { return dt__unary("dt_gelu", x, DT_ACT_GELU, 1, 0); }
dt_tensor *dt_gelu_erf(dt_tensor *x) { return dt__unary("dt_gelu_erf", x, DT_ACT_GELU_ERF, 1, 0); }
dt_tensor *dt_silu(dt_tensor *x) { return dt__unary("dt_silu", x, DT_ACT_SILU, 1, 0); }
dt_tensor *dt_relu(dt_tensor *x) { return dt__unary("dt_relu", x, DT_ACT_RELU, 1, 0); }
dt_tensor *dt_tanh(dt_tensor *x) { return dt__unary("dt_tanh", x, DT_ACT_TANH, 1, 0); }
dt_tensor *dt_exp(dt_tensor *x) { return dt__unary("dt_exp", x, DT_ACT_EXP, 1, 0); }
dt_tensor *dt_ln(dt_tensor *x) { return dt__unary("dt_ln", x, DT_ACT_LN, 1, 0); }
dt_tensor *dt_affine(dt_tensor *x, double scale, double shift) {
    return dt__unary("dt_affine", x, DT_ACT_AFFINE, scale, shift);
}

static dt_status dt__swiglu_back(dt_node *n) {
    dt_tensor *x = n->in[0];
    dt_glu_back_args a = { .dtype = x->dtype,
        .act = DT_ACT_SILU,
        .dx = NULL,
        .dout = n->out->grad,
        .in = x->data,
        .rows = dt__rows(n->out),
        .cols = dt__last(x) };
    a.dx = dt_grad_raw(n, 0, &a.accumulate);
    return a.dx ? DT__KERNEL(x->ctx, n->name, glu_back, &a) : dt_error(x->ctx);
}

dt_tensor *dt_swiglu(dt_tensor *x) {
    dt_ctx *ctx = dt__op_real("dt_swiglu", x, NULL, NULL);
    if (!ctx) return NULL;
    dt_shape shape = x->shape;
    if (shape.nd < 2 || shape.d[shape.nd - 2] != 2)
        return dt__unfit("dt_swiglu", x, "gate and up (..,2,F) are needed");
    shape.d[shape.nd - 2] = shape.d[shape.nd - 1];
    shape.nd--;
    dt_tensor *y = dt__new_named(ctx, x->dtype, shape, "dt_swiglu");
    if (!y) return NULL;
    dt_glu_args a = { x->dtype, DT_ACT_SILU, y->data, x->data, dt__rows(y), dt__last(x) };
    if (DT__OP("dt_swiglu", x, glu, &a) != DT_OK) return NULL;
    return dt_record(y, dt__desc("dt_swiglu", x, NULL, NULL, dt__swiglu_back, 0));
}

/* ---- arithmetic with repeating dimensions ---- */

/* The shape of a op b, and the strides that make a dimension of 1, or a missing one, repeat. 0:
   they do not fit. */
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

/* in[i]'s gradient (+)= scale * g, where g has the output's shape and in[i] may repeat in it:
   dimensions that repeat are summed, neighbours at once, the last first, through two buffers that
   take turns. */
static dt_status dt__sum_to(dt_node *n, int i, const void *g, double scale, void *const turns[2]) {
    dt_tensor *t = n->in[i];
    dt_shape at = n->out->shape;
    dt_dtype dtype = t->dtype;
    int skip = at.nd - t->shape.nd, turn = 0, left = 0, repeats[DT_MAX_DIMS];
    for (int d = 0; d < at.nd; d++)
        left += repeats[d] = at.d[d] != (d < skip ? 1 : t->shape.d[d - skip]);
    if (left == 0 && scale == 1) { /* the same shape: only added */
        int accumulate = 0;
        void *to = dt_grad_raw(n, i, &accumulate);
        return to ? dt__accumulate(t->ctx, t->dtype, to, g, (size_t)dt_count(at), accumulate)
                  : dt_error(t->ctx);
    }
    for (int end = at.nd;;) {
        dt_sum_args a = {
            .dtype = dtype, .out = turns[turn], .in = g, .outer = 1, .n = 1, .inner = 1, .scale = 1
        };
        for (; end > 0 && !repeats[end - 1]; end--) a.inner *= (size_t)at.d[end - 1];
        for (; end > 0 && repeats[end - 1]; end--, left--) a.n *= (size_t)at.d[end - 1];
        for (int d = 0; d < end; d++) a.outer *= (size_t)at.d[d];
        a.wide = dt_grad_dtype(t) != t->dtype; /* a parameter's sums are f32 all the way */
        if (left == 0) {
            a.scale = scale;
            a.work = turns[turn]; /* free, since the last sum goes elsewhere */
            a.work_bytes = dt__bytes(n->out);
            a.out = dt__grad_wide(n, i, &a.accumulate, &a.wide);
        }
        if (!a.out || DT__KERNEL(t->ctx, n->name, sum, &a) != DT_OK || left == 0)
            return dt_error(t->ctx);
        dtype = dt__wide(dtype, a.wide);
        for (int d = end; d < at.nd; d++) { /* what was summed is gone */
            if (repeats[d]) at.d[d] = 1;
            repeats[d] = 0;
        }
        g = turns[turn];
        turn = 1 - turn;
        end = at.nd;
    }
}

typedef struct dt__binary_saved {
    int op;
} dt__binary_saved;

/* d(a+b) = da + db; d(ab) = b da + a db; d(a/b) = da / b - (a/b) db / b. */
static dt_status dt__binary_back(dt_node *n) {
    dt_tensor *out = n->out, *b = n->in[1];
    dt_ctx *ctx = out->ctx;
    int op = ((dt__binary_saved *)n->saved)->op;
    size_t bytes = dt__bytes(out);
    char *work = (char *)dt_scratch(ctx, 3 * (bytes + 64));
    if (!work) return dt_error(ctx);
    void *term = work,
         *turns[2] = { work + (bytes + 64) / 64 * 64, work + 2 * ((bytes + 64) / 64 * 64) };
    for (int i = 0; i < 2; i++) {
        const void *g = out->grad;
        dt_binary_args a = { .dtype = out->dtype, .op = op, .out = term, .a = out->grad };
        if (!dt_wants(n, i)) continue;
        dt_tensor *factor = op == DT_DIV ? b : n->in[1 - i];
        if (op == DT_MUL || op == DT_DIV) {
            dt__broadcast(out->shape, factor->shape, &a.shape, a.stride_a, a.stride_b);
            a.b = factor->data;
            if (DT__KERNEL(ctx, n->name, binary, &a) != DT_OK) return dt_error(ctx);
            g = term;
        }
        if (op == DT_DIV && i == 1) {
            dt_binary_args times = {
                .dtype = out->dtype, .op = DT_MUL, .out = term, .a = term, .b = out->data
            };
            dt__broadcast(out->shape, out->shape, &times.shape, times.stride_a, times.stride_b);
            if (DT__KERNEL(ctx, n->name, binary, &times) != DT_OK) return dt_error(ctx);
        }
        double sign = i == 1 && (op == DT_SUB || op == DT_DIV) ? -1 : 1;
        if (dt__sum_to(n, i, g, sign, turns) != DT_OK) return dt_error(ctx);
    }
    return DT_OK;
}

static dt_tensor *dt__binary(const char *name, int op, dt_tensor *a, dt_tensor *b) {
    dt_ctx *ctx = a && b ? dt__op_real(name, a, b, NULL) : dt__missing(name, a, b, NULL);
    if (!ctx) return NULL;
    dt_binary_args args = { .dtype = a->dtype, .op = op };
    if (a->dtype != b->dtype) return dt__mismatch(name, a, b, "types must be equal");
    if (!dt__broadcast(a->shape, b->shape, &args.shape, args.stride_a, args.stride_b))
        return dt__mismatch(name, a, b, "dimensions, counted from the last, must be equal or 1");
    dt_tensor *y = dt__new_named(ctx, a->dtype, args.shape, name);
    if (!y) return NULL;
    args.out = y->data;
    args.a = a->data;
    args.b = b->data;
    if (DT__OP(name, a, binary, &args) != DT_OK) return NULL;
    dt__binary_saved *saved = (dt__binary_saved *)dt_record_saved(
        y, dt__desc(name, a, b, NULL, dt__binary_back, sizeof *saved));
    if (saved) saved->op = op;
    return ctx->status == DT_OK ? y : NULL;
}

dt_tensor *dt_add(dt_tensor *a, dt_tensor *b) { return dt__binary("dt_add", DT_ADD, a, b); }
dt_tensor *dt_sub(dt_tensor *a, dt_tensor *b) { return dt__binary("dt_sub", DT_SUB, a, b); }
dt_tensor *dt_mul(dt_tensor *a, dt_tensor *b) { return dt__binary("dt_mul", DT_MUL, a, b); }
dt_tensor *dt_div(dt_tensor *a, dt_tensor *b) { return dt__binary("dt_div", DT_DIV, a, b); }

/* ---- sums and maxima ---- */

/* x as (outer,n,inner) around dimension dim, and its shape without it; n is everything for
   DT_ALL. */
typedef struct dt__around {
    size_t outer, n, inner;
    dt_shape without;
} dt__around;

static int dt__around_dim(const char *op, dt_tensor *x, int dim, dt__around *a) {
    a->outer = a->n = a->inner = 1;
    a->without = DT_SCALAR;
    if ((dim < 0 && dim != DT_ALL) || dim >= x->shape.nd) {
        dt_fail(x->ctx, DT_ERR_ARG, "%s(%s): dimension %d of %s %s; use 0 to %d, or DT_ALL", op,
            x->name, dim, dt_dtype_name(x->dtype), dt__shape_text(x->shape).s, x->shape.nd - 1);
        return 0;
    }
    for (int i = 0; i < x->shape.nd; i++) {
        size_t *part = dim == DT_ALL || i == dim ? &a->n : i < dim ? &a->outer : &a->inner;
        *part *= (size_t)x->shape.d[i];
        if (part != &a->n) a->without.d[a->without.nd++] = x->shape.d[i];
    }
    return 1;
}

typedef struct dt__sum_saved {
    dt__around around;
    double scale;
    dt_tensor *index;
} dt__sum_saved;

/* dx (+)= scale * the output's gradient, repeated along the dimension that was summed. */
static dt_status dt__sum_back(dt_node *n) {
    const dt__sum_saved *saved = (const dt__sum_saved *)n->saved;
    dt_tensor *x = n->in[0], *y = n->out;
    const dt__around *r = &saved->around;
    dt_permute_args a = { .dtype = x->dtype,
        .out = NULL,
        .in = y->grad,
        .shape = DT_SHAPE((int64_t)r->outer, (int64_t)r->n, (int64_t)r->inner),
        .out_stride = { (int64_t)(r->n * r->inner), (int64_t)r->inner, 1 },
        .in_stride = { (int64_t)r->inner, 0, 1 } };
    dt_unary_args scale = { y->dtype, DT_ACT_AFFINE, NULL, y->grad, (size_t)dt_count(y->shape),
        saved->scale, 0 };
    if (saved->scale != 1) {
        a.in = scale.out = dt_scratch(x->ctx, dt__bytes(y));
        if (!a.in || DT__KERNEL(x->ctx, n->name, unary, &scale) != DT_OK) return dt_error(x->ctx);
    }
    a.out = dt_grad_raw(n, 0, &a.accumulate);
    return a.out ? DT__KERNEL(x->ctx, n->name, permute, &a) : dt_error(x->ctx);
}

static dt_tensor *dt__sum(const char *op, dt_tensor *x, int dim, int mean) {
    dt_ctx *ctx = dt__op_real(op, x, NULL, NULL);
    dt__around r;
    if (!ctx || !dt__around_dim(op, x, dim, &r)) return NULL;
    double scale = mean ? 1.0 / (double)r.n : 1;
    dt_tensor *y = dt__new_named(ctx, x->dtype, r.without, op);
    if (!y) return NULL;
    dt_sum_args a = { .dtype = x->dtype,
        .out = y->data,
        .in = x->data,
        .outer = r.outer,
        .n = r.n,
        .inner = r.inner,
        .scale = scale,
        .work_bytes = dt__lent(ctx, 0) };
    a.work = dt_scratch(ctx, a.work_bytes);
    if (DT__OP(op, x, sum, &a) != DT_OK) return NULL;
    dt__sum_saved *saved = (dt__sum_saved *)dt_record_saved(
        y, dt__desc(op, x, NULL, NULL, dt__sum_back, sizeof *saved));
    if (saved) {
        saved->around = r;
        saved->scale = scale;
    }
    return ctx->status == DT_OK ? y : NULL;
}

dt_tensor *dt_sum_over(dt_tensor *x, int dim) { return dt__sum("dt_sum_over", x, dim, 0); }
dt_tensor *dt_mean_over(dt_tensor *x, int dim) { return dt__sum("dt_mean_over", x, dim, 1); }

/* The backward of max and topk: each gradient goes where its number came from. */
static dt_status dt__pick_back(dt_node *n) {
    const dt__sum_saved *saved = (const dt__sum_saved *)n->saved;
    dt_tensor *x = n->in[0];
    size_t others = saved->around.outer * saved->around.inner;
    dt_spread_args a = { .dtype = x->dtype,
        .out = NULL,
        .in = n->out->grad,
        .index = (int32_t *)saved->index->data,
        .outer = saved->around.outer,
        .n = saved->around.n,
        .k = others ? (size_t)dt_count(n->out->shape) / others : 0,
        .inner = saved->around.inner };
    a.out = dt_grad_raw(n, 0, &a.accumulate);
    return a.out ? DT__KERNEL(x->ctx, n->name, spread, &a) : dt_error(x->ctx);
}

static dt_tensor *dt__pick_done(
    const char *op, dt_tensor *x, dt_tensor *y, dt_tensor *index, dt__around r) {
    dt__sum_saved *saved = (dt__sum_saved *)dt_record_saved(
        y, dt__desc(op, x, NULL, NULL, dt__pick_back, sizeof *saved));
    if (saved) {
        saved->around = r;
        saved->index = index;
    }
    return x->ctx->status == DT_OK ? y : NULL;
}

dt_tensor *dt_max_over(dt_tensor *x, int dim) {
    dt_ctx *ctx = dt__op_real("dt_max_over", x, NULL, NULL);
    dt__around r;
    if (!ctx || !dt__around_dim("dt_max_over", x, dim, &r)) return NULL;
    if (r.n == 0) return dt__unfit("dt_max_over", x, "nothing has no maximum");
    dt_tensor *y = dt__new_named(ctx, x->dtype, r.without, "dt_max_over");
    dt_tensor *index = dt__new_named(ctx, DT_I32, r.without, "index");
    if (!y || !index) return NULL;
    dt_max_args a = { x->dtype, y->data, (int32_t *)index->data, x->data, r.outer, r.n, r.inner };
    if (DT__OP("dt_max_over", x, max, &a) != DT_OK) return NULL;
    return dt__pick_done("dt_max_over", x, y, index, r);
}

dt_tensor *dt_topk(dt_tensor *x, int k, dt_tensor **index) {
    dt_ctx *ctx = dt__op_real("dt_topk", x, NULL, NULL);
    if (!ctx) return NULL;
    if (x->shape.nd < 1 || k < 1 || k > x->shape.d[x->shape.nd - 1])
        return dt__unfit("dt_topk", x, "k must be 1 up to the last dimension");
    dt_shape shape = x->shape;
    shape.d[shape.nd - 1] = k;
    dt__around r = { dt__rows(x), dt__last(x), 1, shape };
    dt_tensor *y = dt__new_named(ctx, x->dtype, shape, "dt_topk"),
              *at = dt__new_named(ctx, DT_I32, shape, "index");
    if (!y || !at) return NULL;
    dt_topk_args a = { x->dtype, y->data, (int32_t *)at->data, x->data, r.outer, r.n, (size_t)k };
    if (DT__OP("dt_topk", x, topk, &a) != DT_OK) return NULL;
    if (index) *index = at;
    return dt__pick_done("dt_topk", x, y, at, r);
}

/* ---- other shapes ---- */

/* Another tensor over the same data; the gradient is the base's, so a view needs no op on the
   tape. */
static dt_tensor *dt__view(dt_tensor *x, dt_shape shape, const char *name) {
    dt_ctx *ctx = dt__op(name, x, NULL, NULL);
    dt_tensor *y = ctx ? dt__tensor(ctx, x->dtype, shape, name) : NULL;
    if (!y) return NULL;
    y->base = x;
    y->data = x->data;
    y->needs_grad = x->needs_grad;
    return y;
}

dt_tensor *dt_alias(dt_tensor *x) {
    dt_ctx *ctx = dt__op("dt_alias", x, NULL, NULL);
    /* data that go before what is made of them are copied */
    dt_tensor *owner = ctx ? dt__owner(x) : NULL;
    int copied = ctx && (owner->brief ||
                            (owner->param && owner->param->unit->data != owner->param->unit->kept));
    dt_tensor *y = copied ? dt__new_named(ctx, x->dtype, x->shape, x->name)
                   : ctx  ? dt__tensor(ctx, x->dtype, x->shape, x->name)
                          : NULL;
    if (y && copied && dt__move(ctx, y->data, x->data, dt__bytes(x)) != DT_OK) return NULL;
    if (y && !copied) y->data = x->data;
    return y;
}

dt_tensor *dt_reshape(dt_tensor *x, dt_shape shape) {
    dt_tensor *y = dt__view(x, shape, "dt_reshape");
    if (!y || dt_count(shape) == dt_count(x->shape)) return y;
    dt_fail(x->ctx, DT_ERR_SHAPE, "dt_reshape(%s): %s and %s: element counts differ", x->name,
        dt__shape_text(x->shape).s, dt__shape_text(shape).s);
    return NULL;
}

static void dt__dense(dt_shape shape, int64_t *stride) {
    int64_t step = 1;
    for (int i = shape.nd - 1; i >= 0; i--) {
        stride[i] = step;
        step *= shape.d[i];
    }
}

/* Slice, concatenation and transposition are one strided copy, and so is each one's backward: the
   other way round. Input i of a node is `box` of the output (concat) or the other way (slice,
   transposition). */
typedef struct dt__move_saved {
    dt_shape box[DT_MAX_INPUTS];
    int64_t out_at[DT_MAX_INPUTS], in_at[DT_MAX_INPUTS]; /* elements */
    int64_t out_stride[DT_MAX_DIMS], in_stride[DT_MAX_INPUTS][DT_MAX_DIMS];
} dt__move_saved;

static dt_status dt__move_one(const char *op, const dt_tensor *x, const dt__move_saved *m, int i,
    void *out, const void *in, int back, int accumulate) {
    dt_dtype dtype = x->dtype;
    size_t size = dt_dtype_size(dtype);
    dt_permute_args a = { .dtype = dtype, .shape = m->box[i], .accumulate = accumulate };
    memcpy(back ? a.in_stride : a.out_stride, m->out_stride, sizeof a.in_stride);
    memcpy(back ? a.out_stride : a.in_stride, m->in_stride[i], sizeof a.in_stride);
    a.out = (char *)out + (size_t)(back ? m->in_at[i] : m->out_at[i]) * size;
    a.in = (const char *)in + (size_t)(back ? m->out_at[i] : m->in_at[i]) * size;
    return dt_count(a.shape) == 0 ? DT_OK : DT__OP(op, x, permute, &a);
}

static dt_status dt__move_back(dt_node *n) {
    const dt__move_saved *m = (const dt__move_saved *)n->saved;
    dt_ctx *ctx = n->out->ctx;
    for (int i = 0; i < n->n_in; i++) {
        if (!dt_wants(n, i)) continue;
        dt_tensor *x = n->in[i];
        int accumulate = 1;
        void *dx = dt_count(m->box[i]) < dt_count(x->shape) ? dt_grad(n, i)
                                                            : dt_grad_raw(n, i, &accumulate);
        if (!dx || dt__move_one(n->name, x, m, i, dx, n->out->grad, 1, accumulate) != DT_OK)
            return dt_error(ctx);
    }
    return DT_OK;
}

static dt_tensor *dt__move_op(
    const char *op, dt_tensor *const *x, int n, dt_shape shape, const dt__move_saved *m) {
    dt_ctx *ctx = x[0]->ctx;
    dt_tensor *y = dt__new_named(ctx, x[0]->dtype, shape, op);
    for (int i = 0; y && i < n; i++)
        if (dt__move_one(op, x[i], m, i, y->data, x[i]->data, 0, 0) != DT_OK) return NULL;
    if (!y) return NULL;
    dt_record_desc d = dt__desc(op, NULL, NULL, NULL, dt__move_back, sizeof *m);
    for (int i = 0; i < n; i++) d.in[i] = x[i];
    d.n_in = n;
    dt__move_saved *saved = (dt__move_saved *)dt_record_saved(y, d);
    if (saved) *saved = *m;
    return ctx->status == DT_OK ? y : NULL;
}

dt_tensor *dt_slice(dt_tensor *x, int dim, int64_t first, int64_t count) {
    dt_ctx *ctx = dt__op("dt_slice", x, NULL, NULL);
    dt__move_saved m;
    if (!ctx) return NULL;
    memset(&m, 0, sizeof m);
    if (dim < 0 || dim >= x->shape.nd || first < 0 || count < 0 ||
        first > x->shape.d[dim] - count) {
        dt_fail(ctx, DT_ERR_SHAPE, "dt_slice(%s): %lld from %lld of dimension %d of %s", x->name,
            (long long)count, (long long)first, dim, dt__shape_text(x->shape).s);
        return NULL;
    }
    m.box[0] = x->shape;
    m.box[0].d[dim] = count;
    dt__dense(m.box[0], m.out_stride);
    dt__dense(x->shape, m.in_stride[0]);
    m.in_at[0] = first * m.in_stride[0][dim];
    return dt__move_op("dt_slice", &x, 1, m.box[0], &m);
}

dt_tensor *dt_concat(dt_tensor *const *x, int n, int dim) {
    dt__move_saved m;
    memset(&m, 0, sizeof m);
    for (int i = 0; x && i < n && n <= DT_MAX_INPUTS; i++)
        if (!x[i] || !x[0]) dt__missing("dt_concat", x[0], x[i], NULL);
    if (!x || n < 1 || !x[0] || x[0]->ctx->status != DT_OK) return NULL;
    dt_ctx *ctx = x[0]->ctx;
    dt_shape shape = x[0]->shape;
    if (n > DT_MAX_INPUTS || dim < 0 || dim >= shape.nd) {
        dt_fail(ctx, DT_ERR_ARG, "dt_concat: %d tensors, at most %d, along dimension %d of %s", n,
            DT_MAX_INPUTS, dim, dt__shape_text(shape).s);
        return NULL;
    }
    shape.d[dim] = 0;
    for (int i = 0; i < n; i++) {
        if (!dt__op("dt_concat", x[0], x[i], NULL)) return NULL;
        m.box[i] = x[i]->shape;
        m.box[i].d[dim] = x[0]->shape.d[dim];
        if (!dt__same_shape(m.box[i], x[0]->shape) || x[i]->dtype != x[0]->dtype)
            return dt__mismatch(
                "dt_concat", x[0], x[i], "types and all other dimensions must be equal");
        m.box[i] = x[i]->shape;
        m.out_at[i] = shape.d[dim];
        dt__dense(x[i]->shape, m.in_stride[i]);
        shape.d[dim] += x[i]->shape.d[dim];
    }
    dt__dense(shape, m.out_stride);
    for (int i = 0; i < n; i++) m.out_at[i] *= m.out_stride[dim];
    return dt__move_op("dt_concat", x, n, shape, &m);
}

dt_tensor *dt_transpose(dt_tensor *x, int dim_a, int dim_b) {
    dt_ctx *ctx = dt__op("dt_transpose", x, NULL, NULL);
    dt__move_saved m;
    if (!ctx) return NULL;
    memset(&m, 0, sizeof m);
    if (dim_a < 0 || dim_b < 0 || dim_a >= x->shape.nd || dim_b >= x->shape.nd) {
        dt_fail(ctx, DT_ERR_SHAPE, "dt_transpose(%s): dimensions %d and %d of %s", x->name, dim_a,
            dim_b, dt__shape_text(x->shape).s);
        return NULL;
    }
    m.box[0] = x->shape;
    m.box[0].d[dim_a] = x->shape.d[dim_b];
    m.box[0].d[dim_b] = x->shape.d[dim_a];
    dt__dense(m.box[0], m.out_stride);
    dt__dense(x->shape, m.in_stride[0]);
    int64_t stride = m.in_stride[0][dim_a];
    m.in_stride[0][dim_a] = m.in_stride[0][dim_b];
    m.in_stride[0][dim_b] = stride;
    return dt__move_op("dt_transpose", &x, 1, m.box[0], &m);
}

static dt_status dt__cast_back(dt_node *n) {
    dt_tensor *x = n->in[0];
    dt_cast_args a = { x->dtype, n->out->dtype, NULL, n->out->grad, (size_t)dt_count(x->shape), 0 };
    int wide = 0;
    a.out = dt__grad_wide(n, 0, &a.accumulate, &wide);
    a.dtype = dt__wide(x->dtype, wide);
    return a.out ? DT__KERNEL(x->ctx, n->name, cast, &a) : dt_error(x->ctx);
}

dt_tensor *dt_cast(dt_tensor *x, dt_dtype dtype) {
    dt_ctx *ctx = dt__op("dt_cast", x, NULL, NULL);
    dt_tensor *y = ctx ? dt__new_named(ctx, dtype, x->shape, "dt_cast") : NULL;
    if (!y) return NULL;
    dt_cast_args a = { dtype, x->dtype, y->data, x->data, (size_t)dt_count(x->shape), 0 };
    if (DT__OP("dt_cast", x, cast, &a) != DT_OK) return NULL;
    if (dtype == DT_I32 || x->dtype == DT_I32) return y;
    return dt_record(y, dt__desc("dt_cast", x, NULL, NULL, dt__cast_back, 0));
}

/* ---- rows by index ---- */

/* Which ids of the full table a table holds: all, or its box along dimension 0. */
static void dt__vocab(const dt_tensor *table, int64_t *first, int64_t *held, int64_t *vocab) {
    const dt_param_info *p = table->param;
    *first = p ? p->box.lo[0] : 0;
    *held = p ? p->box.inside[0] : table->shape.d[0];
    *vocab = p ? p->full.d[0] : table->shape.d[0];
}

static dt_status dt__embedding_back(dt_node *n) {
    dt_tensor *table = n->in[0], *ids = n->in[1];
    dt_ctx *ctx = table->ctx;
    int64_t vocab = 0;
    dt_embedding_back_args a = { .dtype = table->dtype,
        .dout = n->out->grad,
        .ids = (const int32_t *)ids->data,
        .rows = (size_t)dt_count(ids->shape),
        .cols = dt__last(table) };
    dt__vocab(table, &a.first, &a.held, &vocab);
    a.dtable = dt__grad_wide(n, 0, &a.accumulate, &a.wide);
    if (dt__narrow(dt__wide(table->dtype, a.wide))) {
        a.work_bytes = (size_t)a.held * a.cols * sizeof(float);
        if (a.work_bytes && !(a.work = dt_scratch(ctx, a.work_bytes))) return dt_error(ctx);
    }
    return a.dtable ? DT__KERNEL(ctx, n->name, embedding_back, &a) : dt_error(ctx);
}

static dt_tensor *dt__rows_of(const char *op, dt_tensor *table, dt_tensor *ids, int holes) {
    dt_ctx *ctx = table && ids ? dt__op(op, table, ids, NULL) : dt__missing(op, table, ids, NULL);
    if (!ctx) return NULL;
    if (table->shape.nd != 2 || ids->dtype != DT_I32 || ids->shape.nd >= DT_MAX_DIMS)
        return dt__mismatch(op, table, ids, "a table (V,C) and i32 ids are needed");
    dt_shape shape = ids->shape;
    shape.d[shape.nd++] = table->shape.d[1];
    dt_tensor *out = dt__new_named(ctx, table->dtype, shape, op);
    if (!out) return NULL;
    dt_embedding_args a = { .dtype = table->dtype,
        .out = out->data,
        .table = table->data,
        .ids = (const int32_t *)ids->data,
        .rows = (size_t)dt_count(ids->shape),
        .cols = dt__last(table),
        .holes = holes };
    dt__vocab(table, &a.first, &a.held, &a.vocab);
    dt_status status = DT__CALL(ctx, embedding, &a);
    if (status == DT_ERR_ARG)
        dt__blame_index(
            op, table, holes ? "row" : "id", ids, holes ? -1 : 0, a.vocab, "the table", "rows");
    if (dt__kernel_done(ctx, op, table->name, "embedding", status) != DT_OK) return NULL;
    return dt_record(out, dt__desc(op, table, ids, NULL, dt__embedding_back, 0));
}

dt_tensor *dt_embedding(dt_tensor *table, dt_tensor *ids) {
    return dt__rows_of("dt_embedding", table, ids, 0);
}
dt_tensor *dt_gather_rows(dt_tensor *x, dt_tensor *rows) {
    return dt__rows_of("dt_gather_rows", x, rows, 1);
}

/* The gradient of scattered rows is gathered. */
static dt_status dt__scatter_back(dt_node *n) {
    dt_tensor *x = n->in[0], *rows = n->in[1], *y = n->out;
    int accumulate = 0;
    void *dx = dt_grad_raw(n, 0, &accumulate),
         *to = accumulate ? dt_scratch(x->ctx, dt__bytes(x)) : dx;
    dt_embedding_args a = { .dtype = x->dtype,
        .out = to,
        .table = y->grad,
        .ids = (const int32_t *)rows->data,
        .rows = dt__rows(x),
        .cols = dt__last(x),
        .held = y->shape.d[0],
        .vocab = y->shape.d[0],
        .holes = 1 };
    if (!to || DT__KERNEL(x->ctx, n->name, embedding, &a) != DT_OK) return dt_error(x->ctx);
    return accumulate ? dt__accumulate(x->ctx, x->dtype, dx, to, (size_t)dt_count(x->shape), 1)
                      : DT_OK;
}

dt_tensor *dt_scatter_rows(dt_tensor *x, dt_tensor *rows, int64_t count) {
    const char *op = "dt_scatter_rows";
    dt_ctx *ctx = x && rows ? dt__op_real(op, x, rows, NULL) : dt__missing(op, x, rows, NULL);
    if (!ctx) return NULL;
    if (x->shape.nd < 1 || rows->dtype != DT_I32 || (size_t)dt_count(rows->shape) != dt__rows(x) ||
        count < 0)
        return dt__mismatch(
            op, x, rows, "x (..,C) and one i32 row for each of its rows are needed");
    dt_tensor *y = dt__new_named(ctx, x->dtype, DT_SHAPE(count, (int64_t)dt__last(x)), op);
    if (!y) return NULL;
    dt_embedding_back_args a = { .dtype = x->dtype,
        .dtable = y->data,
        .dout = x->data,
        .ids = (const int32_t *)rows->data,
        .rows = dt__rows(x),
        .cols = dt__last(x),
        .held = count,
        .strict = 1 };
    if (dt__narrow(x->dtype)) {
        a.work_bytes = (size_t)count * a.cols * sizeof(float);
        if (a.work_bytes && !(a.work = dt_scratch(ctx, a.work_bytes))) return NULL;
    }
    dt_status status = DT__CALL(ctx, embedding_back, &a);
    if (status == DT_ERR_ARG) dt__blame_index(op, x, "row", rows, -1, count, "the result", "rows");
    if (dt__kernel_done(ctx, op, x->name, "embedding_back", status) != DT_OK) return NULL;
    return dt_record(y, dt__desc(op, x, rows, NULL, dt__scatter_back, 0));
}

/* ---- positions and dropout ---- */

typedef struct dt__rope_saved {
    dt_rope_desc desc;
} dt__rope_saved;

static dt_rope_args dt__rope_args(const dt_tensor *x, const dt_tensor *positions, dt_rope_desc d) {
    dt_rope_args a = { .dtype = x->dtype,
        .positions = (const int32_t *)positions->data,
        .tokens = (size_t)dt_count(positions->shape),
        .heads = (size_t)x->shape.d[2],
        .dim = (size_t)x->shape.d[3],
        .rotary = d.rotary ? (size_t)d.rotary : (size_t)x->shape.d[3],
        .theta = d.theta > 0 ? d.theta : 10000,
        .interleaved = d.interleaved };
    return a;
}

/* A rotation's transposition is the rotation back. */
static dt_status dt__rope_back(dt_node *n) {
    dt_tensor *x = n->in[0];
    dt_rope_args a = dt__rope_args(x, n->in[1], ((dt__rope_saved *)n->saved)->desc);
    a.in = n->out->grad;
    a.inverse = 1;
    a.out = dt_grad_raw(n, 0, &a.accumulate);
    return a.out ? DT__KERNEL(x->ctx, n->name, rope, &a) : dt_error(x->ctx);
}

dt_tensor *dt_rope(dt_tensor *x, dt_tensor *positions, dt_rope_desc desc) {
    int both = x && positions;
    dt_ctx *ctx = both ? dt__op_real("dt_rope", x, positions, NULL)
                       : dt__missing("dt_rope", x, positions, NULL);
    if (!ctx) return NULL;
    if (x->shape.nd != 4 || positions->dtype != DT_I32 ||
        dt_count(positions->shape) != x->shape.d[0] * x->shape.d[1])
        return dt__mismatch(
            "dt_rope", x, positions, "x (B,T,H,D) and i32 positions (B,T) are needed");
    int64_t D = x->shape.d[3], turn = desc.rotary ? desc.rotary : D;
    if (turn < 0 || turn > D || turn % 2 || D > 512) {
        dt_fail(ctx, DT_ERR_SHAPE,
            "dt_rope(%s): %lld of %lld dimensions are to turn: an even number, of at most 512",
            x->name, (long long)turn, (long long)D);
        return NULL;
    }
    dt_tensor *y = dt__new_named(ctx, x->dtype, x->shape, "dt_rope");
    if (!y) return NULL;
    dt_rope_args a = dt__rope_args(x, positions, desc);
    a.in = x->data;
    a.out = y->data;
    if (DT__OP("dt_rope", x, rope, &a) != DT_OK) return NULL;
    dt__rope_saved *saved = (dt__rope_saved *)dt_record_saved(
        y, dt__desc("dt_rope", x, positions, NULL, dt__rope_back, sizeof *saved));
    if (saved) saved->desc = desc;
    return ctx->status == DT_OK ? y : NULL;
}

typedef struct dt__dropout_saved {
    double p;
    uint64_t key;
} dt__dropout_saved;

static dt_dropout_args dt__dropout_args(
    const dt_tensor *x, const dt_tensor *tokens, double p, uint64_t key) {
    dt_dropout_args a = { .dtype = x->dtype,
        .tokens = tokens ? (const int32_t *)tokens->data : NULL,
        .rows = dt__rows(x),
        .cols = dt__last(x),
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
    dt_ctx *ctx = dt__op_real("dt_dropout", x, tokens, NULL);
    if (!ctx || p == 0) return ctx ? x : NULL;
    if (!(p > 0 && p < 1)) {
        dt_fail(ctx, DT_ERR_ARG, "dt_dropout(%s): probability %g; it lies in [0,1)", x->name, p);
        return NULL;
    }
    if (tokens && (tokens->dtype != DT_I32 || (size_t)dt_count(tokens->shape) != dt__rows(x)))
        return dt__mismatch(
            "dt_dropout", x, tokens, "one i32 token for each row of x (..,C) is needed");
    dt_tensor *y = dt__new_named(ctx, x->dtype, x->shape, "dt_dropout");
    if (!y) return NULL;
    dt_dropout_args a = dt__dropout_args(x, tokens, p, key);
    a.in = x->data;
    a.out = y->data;
    if (DT__OP("dt_dropout", x, dropout, &a) != DT_OK) return NULL;
    dt__dropout_saved *saved = (dt__dropout_saved *)dt_record_saved(
        y, dt__desc("dt_dropout", x, tokens, NULL, dt__dropout_back, sizeof *saved));
    if (saved) {
        saved->p = p;
        saved->key = key;
    }
    return ctx->status == DT_OK ? y : NULL;
}

/* ---- attention ---- */

typedef struct dt__attention_saved {
    dt_tensor *lse;
    dt_attention_mask sight;
} dt__attention_saved;

static dt_status dt__attention_back(dt_node *n) {
    const dt__attention_saved *saved = (const dt__attention_saved *)n->saved;
    dt_tensor *q = n->in[0], *k = n->in[1], *v = n->in[2];
    dt_ctx *ctx = q->ctx;
    dt_attention_back_args a = { .dtype = q->dtype,
        .dq = NULL,
        .dk = NULL,
        .dv = NULL,
        .dout = n->out->grad,
        .out = n->out->data,
        .lse = saved->lse->data,
        .q = q->data,
        .k = k->data,
        .v = v->data,
        .batch = q->shape.d[0],
        .tq = q->shape.d[1],
        .tk = k->shape.d[1],
        .heads = q->shape.d[2],
        .kv_heads = k->shape.d[2],
        .dim = q->shape.d[3],
        .scale = 1.0 / sqrt((double)q->shape.d[3]),
        .sight = saved->sight };
    if (dt_wants(n, 0) && !(a.dq = dt_grad_raw(n, 0, &a.accumulate_q))) return dt_error(ctx);
    if (dt_wants(n, 1) && !(a.dk = dt_grad_raw(n, 1, &a.accumulate_k))) return dt_error(ctx);
    if (dt_wants(n, 2) && !(a.dv = dt_grad_raw(n, 2, &a.accumulate_v))) return dt_error(ctx);
    a.work_bytes = dt__lent(ctx, dt_attention_work(a.tk, a.dim, q->dtype));
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

/* One number for each token of a (B,T,H,D) tensor. NULL: none given, which is no failure (*bad
   stays). */
static const int32_t *dt__per_token(dt_tensor *x, dt_tensor *numbers, int *bad) {
    if (!numbers) return NULL;
    if (!dt__op("dt_attention", x, numbers, NULL))
        *bad = 1;
    else if (numbers->dtype != DT_I32 ||
             dt_count(numbers->shape) != x->shape.d[0] * x->shape.d[1]) {
        dt__mismatch(
            "dt_attention", x, numbers, "positions and documents are i32, one for each token");
        *bad = 1;
    }
    return (const int32_t *)numbers->data;
}

/* 0 when something given does not fit. */
static int dt__sight_of(dt_tensor *q, dt_tensor *k, dt_attn_desc d, dt_attention_mask *s) {
    int bad = 0, same = q->shape.d[1] == k->shape.d[1];
    s->causal = !d.full;
    s->q_position = dt__per_token(q, d.positions, &bad);
    s->k_position = dt__per_token(k,
        d.key_positions ? d.key_positions
        : same          ? d.positions
                        : NULL,
        &bad);
    s->q_document = dt__per_token(q, d.documents, &bad);
    s->k_document = dt__per_token(k,
        d.key_documents ? d.key_documents
        : same          ? d.documents
                        : NULL,
        &bad);
    if (bad || !s->q_document == !s->k_document) return !bad;
    dt_fail(q->ctx, DT_ERR_ARG, "dt_attention: documents of queries and of keys, both or none");
    return 0;
}

dt_tensor *dt_attention(dt_tensor *q, dt_tensor *k, dt_tensor *v, dt_attn_desc desc) {
    dt_ctx *ctx =
        q && k && v ? dt__op_real("dt_attention", q, k, v) : dt__missing("dt_attention", q, k, v);
    dt_attention_mask sight;
    if (!ctx) return NULL;
    if (!dt__attention_fits(q, k, v, desc.kv_heads)) return NULL;
    if (!dt__sight_of(q, k, desc, &sight)) return NULL;
    dt_tensor *y = dt__new_named(ctx, q->dtype, q->shape, "dt_attention");
    dt_shape lse_shape = DT_SHAPE(q->shape.d[0], q->shape.d[2], q->shape.d[1]);
    dt_tensor *lse = dt__new_named(ctx, dt__wide(q->dtype, 1), lse_shape, "lse");
    if (!y || !lse) return NULL;
    dt_attention_args a = { .dtype = q->dtype,
        .out = y->data,
        .lse = lse->data,
        .q = q->data,
        .k = k->data,
        .v = v->data,
        .batch = q->shape.d[0],
        .tq = q->shape.d[1],
        .tk = k->shape.d[1],
        .heads = q->shape.d[2],
        .kv_heads = k->shape.d[2],
        .dim = q->shape.d[3],
        .scale = 1.0 / sqrt((double)q->shape.d[3]),
        .sight = sight };
    a.work_bytes = dt__lent(ctx, dt_attention_work(a.tk, a.dim, q->dtype));
    a.work = dt_scratch(ctx, a.work_bytes);
    if (!a.work || DT__OP("dt_attention", q, attention, &a) != DT_OK) return NULL;
    if (desc.lse) *desc.lse = lse;
    dt_record_desc d =
        dt__desc("dt_attention", q, k, v, dt__attention_back, sizeof(dt__attention_saved));
    dt__attention_saved *saved = (dt__attention_saved *)dt_record_saved(y, d);
    if (saved) {
        saved->lse = lse;
        saved->sight = sight;
    }
    return ctx->status == DT_OK ? y : NULL;
}

/* ---- losses ---- */

/* logits: kept, or NULL; turned: they have become their gradient. */
typedef struct dt__loss_saved {
    dt_tensor *lse, *logits;
    int turned;
    double scale;
    dt_loss_desc desc;
} dt__loss_saved;

static int dt__denominator(dt_ctx *ctx, const char *op, double denominator) {
    if (denominator > 0 && denominator < HUGE_VAL) return 1;
    dt_fail(ctx, DT_ERR_ARG,
        "%s: denominator %g; give the number of labels or elements of the whole step", op,
        denominator);
    return 0;
}

static int dt__loss_desc_ok(
    dt_ctx *ctx, const char *op, dt_loss_desc d, int64_t columns, double denominator) {
    if (!dt__denominator(ctx, op, denominator)) return 0;
    const dt_loss_part *p = &d.part;
    if (p->parts != 0 && (p->parts < 0 || !p->gather || p->first < 0 || p->all < 1))
        dt_fail(ctx, DT_ERR_ARG, "%s: %d parts of a vocabulary of %lld, this from %lld on%s", op,
            p->parts, (long long)p->all, (long long)p->first, p->gather ? "" : ", and no gather");
    if (dt_error(ctx) != DT_OK) return 0;
    if (d.vocab >= 0 && d.vocab <= columns && d.smoothing >= 0 && d.smoothing < 1 &&
        d.z_weight >= 0)
        return 1;
    dt_fail(ctx, DT_ERR_ARG, "%s: vocab %lld of %lld columns, smoothing %g in [0,1), z_weight %g",
        op, (long long)d.vocab, (long long)columns, d.smoothing, d.z_weight);
    return 0;
}

/* What a loss over rows makes beside itself. */
typedef struct dt__loss_parts {
    dt_tensor *loss, *lse, *z, *logits;
} dt__loss_parts;

static int dt__loss_begin(const char *op, dt_tensor *x, dt_loss_desc d, dt__loss_parts *p) {
    dt_ctx *ctx = x->ctx;
    p->loss = dt__new_named(ctx, DT_F64, DT_SCALAR, op);
    p->lse = dt__new_named(ctx, dt__wide(x->dtype, 1), DT_SHAPE((int64_t)dt__rows(x)), "lse");
    p->logits = NULL;
    p->z = d.z_loss ? dt__new_named(ctx, DT_F64, DT_SCALAR, "z loss") : NULL;
    if (d.z_loss) *d.z_loss = p->z;
    return p->loss && p->lse && (p->z || !d.z_loss);
}

static dt_tensor *dt__loss_end(const char *op, dt_tensor *x, dt_tensor *w, dt_tensor *labels,
    dt__loss_parts p, double denominator, dt_loss_desc desc, dt_backward_fn backward) {
    dt__loss_saved *saved = (dt__loss_saved *)dt_record_saved(
        p.loss, dt__desc(op, x, labels, w, backward, sizeof *saved));
    if (saved) {
        saved->lse = p.lse;
        saved->logits = p.logits;
        saved->scale = 1.0 / denominator;
        saved->desc = desc;
    }
    return x->ctx->status == DT_OK ? p.loss : NULL;
}

static dt_status dt__loss_kernel(
    const char *op, const dt_tensor *x, const dt_tensor *labels, const dt_cross_entropy_args *a) {
    dt_status status = DT__CALL(x->ctx, cross_entropy, a);
    if (status == DT_ERR_ARG)
        dt__blame_index(op, x, "label", labels, INT32_MIN,
            a->part ? a->all : (int64_t)(a->vocab ? a->vocab : a->cols), "the vocabulary",
            "entries");
    return dt__kernel_done(x->ctx, op, x->name, "cross_entropy", status);
}

/* Doubles of scratch that parts of a vocabulary want: this rank's, and those of all. */
static size_t dt__loss_part_room(dt_loss_part part, size_t rows) {
    return part.parts ? 2 * rows * (size_t)(part.parts + 1) : 0;
}

/* mine (rows,2), and behind it room for those of all parts, become the loss. */
static dt_status dt__loss_join(const char *op, dt_tensor *x, dt_tensor *labels,
    const dt__loss_parts *p, dt_loss_part part, double denominator, double *mine) {
    size_t rows = dt__rows(x);
    dt_status status = part.gather(part.user, mine, mine + 2 * rows, 2 * rows);
    dt_cross_entropy_join_args a = { x->dtype, (double *)p->loss->data, p->lse->data,
        mine + 2 * rows, (const int32_t *)labels->data, (size_t)part.parts, rows, denominator,
        p->z ? (double *)p->z->data : NULL };
    if (status != DT_OK)
        return dt_fail(x->ctx, status, "%s(%s): joining %d parts", op, x->name, part.parts);
    return DT__OP(op, x, cross_entropy_join, &a);
}

static dt_status dt__cross_entropy_back(dt_node *n) {
    const dt__loss_saved *saved = (const dt__loss_saved *)n->saved;
    dt_tensor *logits = n->in[0], *labels = n->in[1];
    dt_ctx *ctx = logits->ctx;
    dt_cross_entropy_back_args a = { .dtype = logits->dtype,
        .dlogits = NULL,
        .logits = logits->data,
        .lse = saved->lse->data,
        .labels = (const int32_t *)labels->data,
        .rows = dt__rows(logits),
        .cols = dt__last(logits),
        .vocab = (size_t)saved->desc.vocab,
        .upstream = (const double *)n->out->grad,
        .scale = saved->scale,
        .smoothing = saved->desc.smoothing,
        .z = saved->desc.z_weight,
        .first = saved->desc.part.first,
        .all = saved->desc.part.all };
    a.dlogits = dt_grad_raw(n, 0, &a.accumulate);
    a.work_bytes = dt_row_work((int64_t)a.cols, a.dtype);
    a.work = dt_scratch(ctx, a.work_bytes);
    return a.dlogits && a.work ? DT__KERNEL(ctx, n->name, cross_entropy_back, &a) : dt_error(ctx);
}

dt_tensor *dt_cross_entropy(dt_tensor *logits, dt_tensor *labels, double denominator) {
    dt_loss_desc none;
    memset(&none, 0, sizeof none);
    return dt_cross_entropy_at(logits, labels, denominator, none);
}

dt_tensor *dt_cross_entropy_at(
    dt_tensor *logits, dt_tensor *labels, double denominator, dt_loss_desc desc) {
    const char *op = "dt_cross_entropy";
    dt_ctx *ctx = logits && labels ? dt__op_real(op, logits, labels, NULL)
                                   : dt__missing(op, logits, labels, NULL);
    dt__loss_parts p;
    if (!ctx) return NULL;
    if (logits->shape.nd < 1 || labels->dtype != DT_I32 ||
        (size_t)dt_count(labels->shape) != dt__rows(logits))
        return dt__mismatch(op, logits, labels, "logits (..,V) and one i32 label a row are needed");
    if (!dt__loss_desc_ok(ctx, op, desc, (int64_t)dt__last(logits), denominator)) return NULL;
    if (!dt__loss_begin(op, logits, desc, &p)) return NULL;
    size_t rows = dt__rows(logits),
           row_work = dt_row_work((int64_t)dt__last(logits), logits->dtype);
    size_t room = dt__loss_part_room(desc.part, rows);
    double *part = (double *)dt_scratch(ctx, (room + rows + 8) * sizeof *part + row_work),
           *row_loss = part + room;
    if (!part) return NULL;
    dt_cross_entropy_args a = { .dtype = logits->dtype,
        .loss = (double *)p.loss->data,
        .row_loss = row_loss,
        .lse = p.lse->data,
        .logits = logits->data,
        .labels = (const int32_t *)labels->data,
        .rows = rows,
        .cols = dt__last(logits),
        .vocab = (size_t)desc.vocab,
        .denominator = denominator,
        .smoothing = desc.smoothing,
        .z_loss = p.z ? (double *)p.z->data : NULL,
        .work = row_loss + rows,
        .work_bytes = row_work,
        .part = room ? part : NULL,
        .first = desc.part.first,
        .all = desc.part.all };
    if (dt__loss_kernel(op, logits, labels, &a) != DT_OK) return NULL;
    if (a.part && dt__loss_join(op, logits, labels, &p, desc.part, denominator, part) != DT_OK)
        return NULL;
    return dt__loss_end(op, logits, NULL, labels, p, denominator, desc, dt__cross_entropy_back);
}

/* Rows of logits at a time: about 2^20 numbers, on a GPU more, and enough rows to make a product of
   it. A function of V alone, so that the bits of the gradient of w do not depend on the number of
   rows. They are made once more in the backward, where they become their own gradient. A table that
   has memory for them keeps up to loss_numbers: then the gradient of w is one product over all
   rows. */
static int64_t dt__loss_rows(const dt_ctx *ctx, int64_t vocab) {
    int64_t most =
        ctx->kernels.loss_numbers ? (int64_t)ctx->kernels.loss_numbers : (int64_t)1 << 20;
    int64_t rows = most / (vocab > 0 ? vocab : 1);
    return rows < 64 ? 64 : rows > 4096 ? 4096 : rows;
}

static int dt__loss_keeps(const dt_ctx *ctx, const dt_tensor *x, const dt_tensor *w) {
    double numbers = (double)dt__rows(x) * (double)w->shape.d[0];
    return numbers > 0 && numbers <= (double)ctx->kernels.loss_numbers && !ctx->no_grad &&
           (x->needs_grad || w->needs_grad);
}

/* Scratch of one chunk: its logits, row losses, a row, and what its products want. Behind them that
   of parts. */
typedef struct dt__loss_work {
    int64_t rows;
    char *logits;
    double *row_loss, *part;
    void *row, *product;
    size_t row_bytes, product_bytes;
} dt__loss_work;

static int dt__loss_work_make(dt_ctx *ctx, const dt_tensor *x, const dt_tensor *w, size_t room,
    const dt_tensor *kept, dt__loss_work *k) {
    int64_t C = (int64_t)dt__last(w), V = w->shape.d[0], all = (int64_t)dt__rows(x);
    /* no more than there are */
    int64_t rows = kept || all < dt__loss_rows(ctx, V) ? all : dt__loss_rows(ctx, V);
    size_t a = dt_matmul_work(V, C, x->dtype), b = dt_matmul_work(C, V, x->dtype);
    size_t c = dt_matmul_work(C, rows, x->dtype);
    size_t logits = kept ? 0 : ((size_t)(rows * V) * dt_dtype_size(x->dtype) + 63) / 64 * 64;
    k->row_bytes = (dt_row_work(V, x->dtype) + 63) / 64 * 64;
    k->product_bytes = dt__lent(ctx, a > b ? a > c ? a : c : b > c ? b : c);
    k->rows = rows > 0 ? rows : 1;
    k->logits = (char *)dt_scratch(ctx,
        logits + ((size_t)rows + room) * sizeof(double) + k->row_bytes + k->product_bytes + 64);
    k->part = (double *)(k->logits + logits);
    k->row_loss = k->part + room;
    k->row = k->row_loss + rows;
    k->product = (char *)k->row + k->row_bytes;
    if (k->logits && kept) k->logits = (char *)kept->data;
    return k->logits != NULL;
}

/* Logits of rows r .. r + rows. */
static dt_status dt__loss_logits(const char *op, const dt_tensor *x, const dt_tensor *w,
    const dt__loss_work *k, int64_t r, int64_t rows) {
    int64_t C = (int64_t)dt__last(w);
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

static dt_status dt__linear_cross_entropy_back(dt_node *n) {
    dt__loss_saved *saved = (dt__loss_saved *)n->saved;
    dt_tensor *x = n->in[0], *labels = n->in[1], *w = n->in[2], *kept = saved->logits;
    dt_ctx *ctx = x->ctx;
    dt__loss_work k;
    int64_t all = (int64_t)dt__rows(x), C = (int64_t)dt__last(w), V = w->shape.d[0];
    size_t size = dt_dtype_size(x->dtype);
    dt_matmul_args dx = { .dtype = x->dtype, .n = C, .k = V },
                   dw = { .dtype = x->dtype, .m = V, .n = C, .trans_a = 1 };
    if (!dt__loss_work_make(ctx, x, w, 0, kept, &k)) return dt_error(ctx);
    if (dt_wants(n, 0) && !(dx.c = dt__grad_wide(n, 0, &dx.accumulate, &dx.wide)))
        return dt_error(ctx);
    if (dt_wants(n, 2) && !(dw.c = dt__grad_wide(n, 2, &dw.accumulate, &dw.wide)))
        return dt_error(ctx);
    /* once even if there are no rows: gradients of zero */
    for (int64_t r = 0; r < all || r == 0; r += k.rows) {
        int64_t rows = all - r < k.rows ? all - r : k.rows;
        if (rows > 0 && !kept && dt__loss_logits(n->name, x, w, &k, r, rows) != DT_OK)
            return dt_error(ctx);
        dt_cross_entropy_back_args a = { .dtype = x->dtype,
            .dlogits = k.logits,
            .logits = k.logits,
            .lse = (char *)saved->lse->data + (size_t)r * dt_dtype_size(saved->lse->dtype),
            .labels = (const int32_t *)labels->data + r,
            .rows = (size_t)rows,
            .cols = (size_t)V,
            .vocab = (size_t)saved->desc.vocab,
            .upstream = (const double *)n->out->grad,
            .scale = saved->scale,
            .smoothing = saved->desc.smoothing,
            .z = saved->desc.z_weight,
            .work = k.row,
            .work_bytes = k.row_bytes,
            .first = saved->desc.part.first,
            .all = saved->desc.part.all };
        if (!saved->turned && DT__KERNEL(ctx, n->name, cross_entropy_back, &a) != DT_OK)
            return dt_error(ctx);
        saved->turned = kept != NULL; /* the other half of the backward finds them so */
        dt_matmul_args p = dx;
        p.m = rows;
        p.a = k.logits;
        p.b = w->data;
        p.c = (char *)dx.c + (size_t)(r * C) * (dx.wide ? sizeof(float) : size);
        p.work = dw.work = k.product;
        p.work_bytes = dw.work_bytes = k.product_bytes;
        if (dx.c && DT__KERNEL(ctx, n->name, matmul, &p) != DT_OK) return dt_error(ctx);
        dw.k = rows;
        dw.a = k.logits;
        dw.b = (char *)x->data + (size_t)(r * C) * size;
        if (dw.c && DT__KERNEL(ctx, n->name, matmul, &dw) != DT_OK) return dt_error(ctx);
        dw.accumulate = 1;
    }
    return DT_OK;
}

dt_tensor *dt_linear_cross_entropy(
    dt_tensor *x, dt_tensor *w, dt_tensor *labels, double denominator, dt_loss_desc desc) {
    const char *op = "dt_linear_cross_entropy";
    dt_ctx *ctx = x && w && labels ? dt__op_real(op, x, w, labels) : dt__missing(op, x, w, labels);
    dt__loss_parts p;
    dt__loss_work k;
    if (!ctx) return NULL;
    if (w->shape.nd != 2 || x->shape.nd < 1 || dt__last(x) != dt__last(w) || x->dtype != w->dtype)
        return dt__mismatch(op, x, w, "x (..,C) and w (V,C) of one type are needed");
    if (labels->dtype != DT_I32 || (size_t)dt_count(labels->shape) != dt__rows(x))
        return dt__mismatch(op, x, labels, "one i32 label a row is needed");
    if (!dt__loss_desc_ok(ctx, op, desc, w->shape.d[0], denominator) ||
        !dt__loss_begin(op, x, desc, &p))
        return NULL;
    size_t room = dt__loss_part_room(desc.part, dt__rows(x));
    int64_t all = (int64_t)dt__rows(x), V = w->shape.d[0];
    int keeps = dt__loss_keeps(ctx, x, w);
    if (keeps && !(p.logits = dt__new_named(ctx, x->dtype, DT_SHAPE(all, V), "logits")))
        return NULL;
    if (!dt__loss_work_make(ctx, x, w, room, p.logits, &k)) return NULL;
    for (int64_t r = 0; r < all || r == 0; r += k.rows) {
        int64_t rows = all - r < k.rows ? all - r : k.rows;
        if (rows > 0 && dt__loss_logits(op, x, w, &k, r, rows) != DT_OK) return NULL;
        dt_cross_entropy_args a = { .dtype = x->dtype,
            .loss = (double *)p.loss->data,
            .row_loss = k.row_loss,
            .lse = (char *)p.lse->data + (size_t)r * dt_dtype_size(p.lse->dtype),
            .logits = k.logits,
            .labels = (const int32_t *)labels->data + r,
            .rows = (size_t)rows,
            .cols = (size_t)w->shape.d[0],
            .vocab = (size_t)desc.vocab,
            .denominator = denominator,
            .smoothing = desc.smoothing,
            .z_loss = p.z ? (double *)p.z->data : NULL,
            .add = r > 0,
            .work = k.row,
            .work_bytes = k.row_bytes,
            .part = room ? k.part + 2 * r : NULL,
            .first = desc.part.first,
            .all = desc.part.all };
        if (dt__loss_kernel(op, x, labels, &a) != DT_OK) return NULL;
    }
    if (room && dt__loss_join(op, x, labels, &p, desc.part, denominator, k.part) != DT_OK)
        return NULL;
    return dt__loss_end(op, x, w, labels, p, denominator, desc, dt__linear_cross_entropy_back);
}

static dt_status dt__mse_back(dt_node *n) {
    const dt__loss_saved *saved = (const dt__loss_saved *)n->saved;
    for (int i = 0; i < 2; i++) { /* d/db is d/da with a and b exchanged */
        if (!dt_wants(n, i)) continue;
        dt_tensor *a = n->in[i], *b = n->in[1 - i];
        dt_mse_back_args args = { .dtype = a->dtype,
            .da = NULL,
            .a = a->data,
            .b = b->data,
            .count = (size_t)dt_count(a->shape),
            .upstream = (const double *)n->out->grad,
            .scale = saved->scale };
        args.da = dt_grad_raw(n, i, &args.accumulate);
        if (!args.da || DT__KERNEL(a->ctx, n->name, mse_back, &args) != DT_OK)
            return dt_error(a->ctx);
    }
    return DT_OK;
}

dt_tensor *dt_mse(dt_tensor *a, dt_tensor *b, double denominator) {
    dt_ctx *ctx = a && b ? dt__op_real("dt_mse", a, b, NULL) : dt__missing("dt_mse", a, b, NULL);
    if (!ctx || !dt__denominator(ctx, "dt_mse", denominator)) return NULL;
    if (!dt__same_shape(a->shape, b->shape) || a->dtype != b->dtype)
        return dt__mismatch("dt_mse", a, b, "shapes and types must be equal");
    dt_tensor *loss = dt__new_named(ctx, DT_F64, DT_SCALAR, "dt_mse");
    if (!loss) return NULL;
    dt_mse_args args = { a->dtype, (double *)loss->data, a->data, b->data,
        (size_t)dt_count(a->shape), denominator };
    if (DT__KERNEL(ctx, "dt_mse", mse, &args) != DT_OK) return NULL;
    dt_record_desc d = dt__desc("dt_mse", a, b, NULL, dt__mse_back, sizeof(dt__loss_saved));
    dt__loss_saved *saved = (dt__loss_saved *)dt_record_saved(loss, d);
    if (saved) saved->scale = 2.0 / denominator;
    return ctx->status == DT_OK ? loss : NULL;
}

static dt_status dt__side_loss_back(dt_node *n) {
    dt_tensor *s = n->in[0];
    const dt__loss_saved *saved = (const dt__loss_saved *)n->saved;
    int accumulate = 0;
    void *ds = dt_grad_raw(n, 0, &accumulate);
    if (!ds) return dt_error(s->ctx);
    void *weight = dt_scratch(s->ctx, sizeof(double)); /* one element of either type */
    if (!weight ||
        dt__fill(s->ctx, s->dtype, weight, 1, saved->scale * s->ctx->loss_scale) != DT_OK)
        return dt_error(s->ctx);
    return dt__accumulate(s->ctx, s->dtype, ds, weight, 1, accumulate);
}

dt_tensor *dt_loss(dt_tensor *x, dt_tensor *scalar, double weight) {
    dt_ctx *ctx =
        x && scalar ? dt__op("dt_loss", x, scalar, NULL) : dt__missing("dt_loss", x, scalar, NULL);
    if (!ctx) return NULL;
    if (dt_count(scalar->shape) != 1 || scalar->dtype == DT_I32)
        return dt__mismatch("dt_loss", x, scalar, "a side loss is a scalar");
    dt_record_desc d =
        dt__desc("dt_loss", scalar, NULL, NULL, dt__side_loss_back, sizeof(dt__loss_saved));
    dt_node *node = dt__record(NULL, ctx, &d);
    if (node) ((dt__loss_saved *)node->saved)->scale = weight;
    return ctx->status == DT_OK ? x : NULL;
}

// ==== 18. JSON ==================================================================================

enum {
    DT__JSON_BYTES = 100000000,
    DT__JSON_NODES = 1 << 22,
    DT__JSON_STRING = 16 << 20,
    DT__JSON_DEPTH = 64,
    DT__JSON_DIGITS = 800
};

typedef struct dt__json_node {
    uint32_t at;   /* byte of the text */
    uint32_t key;  /* of a member: its key in chars */
    uint32_t next; /* the node after this one and all below it */
    uint32_t kind : 3, count : 29;
    /* first: a string in chars, or a container's first child in order */
    union {
        double number;
        uint32_t first;
    } u;
} dt__json_node;

struct dt_json {
    dt_ctx *ctx;
    const char *name, *text;
    size_t bytes, memory; /* of the text; of this struct and what follows it */
    uint32_t nodes;
    dt__json_node *node; /* (nodes), each before those below it */
    /* (nodes): the children of each container together, members by key; for sorting */
    uint32_t *order, *scratch;
    char *chars; /* strings: 4 bytes of length, the text, a NUL */
};

/* One walk over the text. The first only counts; the second fills. */
typedef struct dt__json_in {
    dt_json *doc;
    size_t at, chars;
    uint32_t nodes, children;
    int depth;
} dt__json_in;

/* A name from a file for a message: printable, and cut to 80 bytes. */
static dt__text dt__name_text(const char *name) {
    dt__text t;
    if (snprintf(t.s, 81, "%s", name) > 80) memcpy(t.s + 80, "..", 3);
    dt__escape(t.s, sizeof t.s);
    return t;
}

static int dt__json_bad(const dt_json *d, size_t at, const char *fmt, ...) DT_PRINTF(3, 4);
static dt_status dt__json_say(const dt_json *d, size_t at, const char *fmt, va_list args) {
    char why[256];
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at; i++) {
        if (d->text[i] == '\n')
            line++, column = 1;
        else
            column += ((unsigned char)d->text[i] & 0xc0) != 0x80; /* characters, not bytes */
    }
    vsnprintf(why, sizeof why, fmt ? fmt : "no reason was given", args);
    return dt_fail(d->ctx, DT_ERR_IO, "%s:%zu:%zu: %s", d->name, line, column, why);
}

static int dt__json_bad(const dt_json *d, size_t at, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    dt__json_say(d, at, fmt, args);
    va_end(args);
    return 0;
}

/* Bottom-up merge sort: never quadratic, and quick where pieces are in order already. scratch has
   room for n. */
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

static const char *dt__json_chars(const dt_json *d, uint32_t where, size_t *bytes) {
    uint32_t n;
    memcpy(&n, d->chars + where, sizeof n);
    if (bytes) *bytes = n;
    return d->chars + where + sizeof n;
}

static int dt__string_order(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    return order ? order : a_bytes < b_bytes ? -1 : a_bytes > b_bytes;
}

static int dt__json_compare(const dt_json *d, uint32_t a, uint32_t b) {
    size_t a_bytes, b_bytes;
    const char *x = dt__json_chars(d, d->node[a].key, &a_bytes),
               *y = dt__json_chars(d, d->node[b].key, &b_bytes);
    return dt__string_order(x, a_bytes, y, b_bytes);
}

static int dt__json_less(const void *user, uint32_t a, uint32_t b) {
    return dt__json_compare((const dt_json *)user, a, b) < 0;
}

/* The first byte that does not belong to UTF-8 (no overlong forms, no surrogates), or n. */
static size_t dt__utf8_bad(const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    for (size_t i = 0; i < n;) {
        unsigned c = s[i], more = c < 0x80 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
        unsigned least = c == 0xe0   ? 0xa0
                         : c == 0xf0 ? 0x90
                                     : 0x80,
                 most = c == 0xed   ? 0x9f
                        : c == 0xf4 ? 0x8f
                                    : 0xbf;
        if (more && (c < 0xc2 || c > 0xf4 || more >= n - i || s[i + 1] < least || s[i + 1] > most))
            return i;
        for (unsigned k = 2; k <= more; k++)
            if ((s[i + k] & 0xc0) != 0x80) return i;
        i += more + 1;
    }
    return n;
}

/* An unsigned integer of any length that numbers need: the base is 2^32, the lowest digit first. */
typedef struct dt__big {
    int n;
    uint32_t w[96];
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

static void dt__big_shift(dt__big *b, int bits) {
    for (; bits > 0; bits -= 31) dt__big_mul(b, (uint32_t)1 << (bits < 31 ? bits : 31), 0);
}

static void dt__big_fives(dt__big *b, int power) {
    for (; power >= 13; power -= 13) dt__big_mul(b, 1220703125, 0);
    for (; power > 0; power--) dt__big_mul(b, 5, 0);
}

static int dt__big_bits(const dt__big *b) { return 32 * b->n - __builtin_clz(b->w[b->n - 1]); }

/* a -= b if it can. */
static int dt__big_take(dt__big *a, const dt__big *b) {
    int i = a->n - 1;
    if (a->n != b->n) {
        if (a->n < b->n) return 0;
    } else {
        while (i > 0 && a->w[i] == b->w[i]) i--;
        if (a->w[i] < b->w[i]) return 0;
    }
    int64_t borrow = 0;
    for (i = 0; i < a->n; i++) {
        borrow += (int64_t)a->w[i] - (i < b->n ? b->w[i] : 0);
        a->w[i] = (uint32_t)borrow;
        borrow >>= 32;
    }
    while (a->n > 0 && a->w[a->n - 1] == 0) a->n--;
    return 1;
}

/* digits * 10^exponent as the nearest double, ties to even; 0 when that is infinite or 0. digits:
   of a number in s, the sign and the point skipped. libc's strtod depends on the locale, so this is
   a division of its own: 64 bits of the quotient and whether something is left decide every
   case. */
static int dt__decimal(const char *s, size_t n, int64_t exponent, double *out) {
    dt__big a = { 0, { 0 } }, b = { 1, { 1 } };
    int64_t digits = 0;
    for (size_t i = 0; i < n; i++)
        if (s[i] >= '0' && s[i] <= '9' && (digits || s[i] != '0')) {
            dt__big_mul(&a, 10, (uint32_t)(s[i] - '0'));
            digits++;
        }
    if (digits + exponent > 310 || digits + exponent < -330) return 0;
    dt__big_fives(exponent > 0 ? &a : &b, (int)(exponent > 0 ? exponent : -exponent));
    int top = dt__big_bits(&a) - dt__big_bits(&b); /* a / b is in (2^(top-1), 2^(top+1)) */
    dt__big_shift(top > 0 ? &b : &a, top > 0 ? top : -top);
    uint64_t q = (uint64_t)dt__big_take(&a, &b);
    if (!q) {
        top--;
        dt__big_mul(&a, 2, 0);
        q = (uint64_t)dt__big_take(&a, &b);
    }
    for (int i = 0; i < 63; i++) {
        dt__big_mul(&a, 2, 0);
        q = q << 1 | (uint64_t)dt__big_take(&a, &b);
    }
    top += (int)exponent; /* of q's highest bit; of 10^exponent the twos are still missing */
    int drop = top < -1022 ? 11 - 1022 - top : 11; /* denormals keep fewer bits */
    if (drop > 64) return 0;
    uint64_t kept = drop < 64 ? q >> drop : 0, rest = drop < 64 ? q << (64 - drop) : q,
             half = (uint64_t)1 << 63;
    kept += rest > half || (rest == half && (a.n > 0 || (kept & 1)));
    *out = ldexp((double)kept, top - 63 + drop);
    return kept > 0 && isfinite(*out);
}

static int dt__json_digits(dt__json_in *in) {
    const dt_json *d = in->doc;
    size_t begin = in->at;
    while (in->at < d->bytes && d->text[in->at] >= '0' && d->text[in->at] <= '9') in->at++;
    return in->at > begin ? 1 : dt__json_bad(d, in->at, "a digit is needed");
}

/* Whether the next byte is c; if so, it is past. */
static int dt__json_past(dt__json_in *in, char c) {
    int yes = in->at < in->doc->bytes && in->doc->text[in->at] == c;
    in->at += (size_t)yes;
    return yes;
}

static int dt__json_exponent(dt__json_in *in, int64_t *exponent) {
    int64_t value = 0;
    int minus = dt__json_past(in, '-');
    if (!minus) dt__json_past(in, '+');
    size_t begin = in->at;
    if (!dt__json_digits(in)) return 0;
    for (size_t i = begin; i < in->at; i++)
        value = value < 100000 ? 10 * value + in->doc->text[i] - '0' : value;
    *exponent += minus ? -value : value;
    return 1;
}

static int dt__json_read_number(dt__json_in *in, double *out) {
    const dt_json *d = in->doc;
    size_t begin = in->at, first, point = 0, end;
    int64_t exponent = 0, whole = 0;
    int minus = dt__json_past(in, '-'), plain = 1, zero = 1;
    first = in->at;
    if (!dt__json_past(in, '0') && !dt__json_digits(in)) return 0;
    point = in->at;
    if (dt__json_past(in, '.')) {
        plain = 0;
        if (!dt__json_digits(in)) return 0;
        exponent = -(int64_t)(in->at - point - 1);
    }
    end = in->at;
    if (dt__json_past(in, 'e') || dt__json_past(in, 'E')) {
        plain = 0;
        if (!dt__json_exponent(in, &exponent)) return 0;
    }
    if (end - first > DT__JSON_DIGITS)
        return dt__json_bad(d, begin, "a number of more than %d digits", DT__JSON_DIGITS);
    for (size_t i = first; i < end; i++) zero &= d->text[i] == '0' || d->text[i] == '.';
    if (zero && minus) return dt__json_bad(d, begin, "-0 is not allowed: write 0");
    *out = 0;
    if (plain) {
        for (size_t i = first; i < end && whole <= (int64_t)1 << 53; i++)
            whole = 10 * whole + d->text[i] - '0';
        if (whole > (int64_t)1 << 53) return dt__json_bad(d, begin, "an integer beyond 2^53");
        *out = (double)whole;
    } else if (!zero && !dt__decimal(d->text + first, end - first, exponent, out)) {
        return dt__json_bad(d, begin, "a number that no double is near to");
    }
    if (minus) *out = -*out;
    return 1;
}

static int dt__json_hex(dt__json_in *in, uint32_t *out) {
    *out = 0;
    for (int i = 0; i < 4; i++, in->at++) {
        int c = in->at < in->doc->bytes ? in->doc->text[in->at] : 0, low = c | 32;
        if (!(c >= '0' && c <= '9') && !(low >= 'a' && low <= 'f'))
            return dt__json_bad(in->doc, in->at, "\\u needs four hexadecimal digits");
        *out = *out << 4 | (uint32_t)(c <= '9' ? c - '0' : low - 'a' + 10);
    }
    return 1;
}

/* Decodes the escape after a backslash into out, as UTF-8 or one raw byte; its length, or 0. */
static int dt__json_escape(dt__json_in *in, char out[4]) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    size_t begin = in->at - 1;
    uint32_t code, low = 0;
    for (int i = 0; i < 8; i++)
        if (dt__json_past(in, from[i])) {
            out[0] = to[i];
            return 1;
        }
    if (!dt__json_past(in, 'u')) return dt__json_bad(in->doc, begin, "no such escape in a string");
    if (!dt__json_hex(in, &code)) return 0;
    if (code >= 0xdc80 && code <= 0xdcff) {
        out[0] = (char)(code & 0xff);
        return 1;
    }
    if (code >= 0xd800 && code < 0xe000) {
        int pair = code < 0xdc00 && dt__json_past(in, '\\') && dt__json_past(in, 'u');
        if (pair && !dt__json_hex(in, &low)) return 0;
        if (low < 0xdc00 || low > 0xdfff)
            return dt__json_bad(in->doc, begin, "half of a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    int n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)(n == 1 ? code : (0xf00u >> n & 0xff) | code);
    return n;
}

/* At a quote: the string goes to chars, its place to *where. */
static int dt__json_read_string(dt__json_in *in, uint32_t *where) {
    const dt_json *d = in->doc;
    size_t begin = in->at++;
    char *out = d->node ? d->chars + in->chars + 4 : NULL;
    uint32_t n = 0;
    while (!dt__json_past(in, '"')) {
        char piece[4];
        int size = 1;
        if (in->at >= d->bytes) return dt__json_bad(d, begin, "a string without an end");
        piece[0] = d->text[in->at++];
        if ((unsigned char)piece[0] < 32)
            return dt__json_bad(d, in->at - 1, "a control character in a string");
        if (piece[0] == '\\' && (size = dt__json_escape(in, piece)) == 0) return 0;
        if (out) memcpy(out + n, piece, (size_t)size);
        n += (uint32_t)size;
        if (n > DT__JSON_STRING)
            return dt__json_bad(d, begin, "a string of more than %d bytes", DT__JSON_STRING);
    }
    *where = (uint32_t)in->chars;
    if (out) memcpy(out - 4, &n, 4);
    if (out) out[n] = 0;
    in->chars += n + 5;
    return 1;
}

static void dt__json_space(dt__json_in *in) {
    while (dt__json_past(in, ' ') || dt__json_past(in, '\n') || dt__json_past(in, '\r') ||
           dt__json_past(in, '\t')) {
    }
}

static int dt__json_word(dt__json_in *in, const char *word) {
    size_t n = strlen(word);
    if (in->doc->bytes - in->at < n || memcmp(in->doc->text + in->at, word, n) != 0)
        return dt__json_bad(in->doc, in->at, "a value is needed");
    in->at += n;
    return 1;
}

/* All below a container is read: its children, in a row, members sorted so that equal keys meet. */
static int dt__json_collect(dt__json_in *in, uint32_t self, dt__json_node *node) {
    dt_json *d = in->doc;
    if (!d->node) return 1;
    uint32_t first = node->u.first = in->children;
    for (uint32_t c = self + 1; c < in->nodes; c = d->node[c].next) d->order[in->children++] = c;
    if (node->kind == DT_JSON_ARRAY) return 1;
    dt__sort(d->order + first, d->scratch, node->count, dt__json_less, d);
    for (uint32_t i = first + 1; i < in->children; i++)
        if (dt__json_compare(d, d->order[i - 1], d->order[i]) == 0) {
            const char *key = dt__json_chars(d, d->node[d->order[i]].key, NULL);
            return dt__json_bad(
                d, d->node[d->order[i]].at, "'%s' is there twice", dt__name_text(key).s);
        }
    return 1;
}

static int dt__json_value(dt__json_in *in, uint32_t key);

static int dt__json_container(dt__json_in *in, uint32_t self, dt__json_node *node, char end) {
    const dt_json *d = in->doc;
    if (++in->depth > DT__JSON_DEPTH)
        return dt__json_bad(d, in->at, "more than %d levels", DT__JSON_DEPTH);
    in->at++;
    dt__json_space(in);
    int more = !dt__json_past(in, end);
    while (more) {
        uint32_t key = 0;
        if (end == '}') {
            if (in->at >= d->bytes || d->text[in->at] != '"')
                return dt__json_bad(d, in->at, "a key in quotes is needed");
            if (!dt__json_read_string(in, &key)) return 0;
            dt__json_space(in);
            if (!dt__json_past(in, ':')) return dt__json_bad(d, in->at, "a colon is needed");
        }
        dt__json_space(in);
        if (!dt__json_value(in, key)) return 0;
        node->count++;
        dt__json_space(in);
        more = dt__json_past(in, ',');
        dt__json_space(in);
        if (!more && !dt__json_past(in, end))
            return dt__json_bad(d, in->at, "a comma or '%c' is needed", end);
    }
    in->depth--;
    return dt__json_collect(in, self, node);
}

static int dt__json_value(dt__json_in *in, uint32_t key) {
    dt_json *d = in->doc;
    char c = in->at < d->bytes ? d->text[in->at] : 0;
    dt__json_node node = { (uint32_t)in->at, key, 0, DT_JSON_NULL, 0, { 0 } };
    uint32_t self = in->nodes++, where = 0;
    int ok;
    if (in->nodes > DT__JSON_NODES)
        return dt__json_bad(d, in->at, "more than %d values", DT__JSON_NODES);
    if (c == '{' || c == '[') {
        node.kind = c == '{' ? DT_JSON_OBJECT : DT_JSON_ARRAY;
        ok = dt__json_container(in, self, &node, c == '{' ? '}' : ']');
    } else if (c == '"') {
        node.kind = DT_JSON_STRING;
        ok = dt__json_read_string(in, &where);
        node.u.first = where;
    } else if (c == '-' || (c >= '0' && c <= '9')) {
        node.kind = DT_JSON_NUMBER;
        ok = dt__json_read_number(in, &node.u.number);
    } else {
        node.kind = c == 'n' ? DT_JSON_NULL : DT_JSON_BOOL;
        node.u.first = c == 't';
        ok = dt__json_word(in, c == 'n' ? "null" : c == 't' ? "true" : "false");
    }
    node.next = in->nodes;
    if (ok && d->node) d->node[self] = node;
    return ok;
}

static int dt__json_whole(dt_json *d, dt__json_in *in) {
    memset(in, 0, sizeof *in);
    in->doc = d;
    dt__json_space(in);
    if (!dt__json_value(in, 0)) return 0;
    dt__json_space(in);
    return in->at == d->bytes ? 1 : dt__json_bad(d, in->at, "something follows the end");
}

dt_json *dt_json_parse(dt_ctx *ctx, const char *name, const char *text, size_t bytes) {
    dt_json head, *d;
    dt__json_in in;
    if (dt_error(ctx) != DT_OK) return NULL;
    if (!name) name = "JSON";
    if (!text && bytes) {
        dt_fail(
            ctx, DT_ERR_ARG, "dt_json_parse(%s): %zu bytes of text, which is NULL", name, bytes);
        return NULL;
    }
    memset(&head, 0, sizeof head);
    head.ctx = ctx;
    head.name = name;
    head.text = text;
    head.bytes = bytes;
    if (bytes > DT__JSON_BYTES) {
        dt_fail(ctx, DT_ERR_IO, "%s: %zu bytes of JSON, at most %d", name, bytes, DT__JSON_BYTES);
        return NULL;
    }
    size_t bad = dt__utf8_bad(text, bytes);
    if (bad < bytes) dt__json_bad(&head, bad, "this is not UTF-8");
    if (bad < bytes || !dt__json_whole(&head, &in)) return NULL;
    head.nodes = in.nodes;
    head.memory = sizeof head + in.nodes * (sizeof *head.node + 2 * sizeof *head.order) + in.chars;
    d = (dt_json *)dt_alloc(ctx, DT_MEM_HOST, head.memory, name);
    if (!d) return NULL;
    *d = head;
    d->node = (dt__json_node *)(d + 1);
    d->order = (uint32_t *)(d->node + d->nodes);
    d->scratch = d->order + d->nodes;
    d->chars = (char *)(d->scratch + d->nodes);
    if (dt__json_whole(d, &in)) return d;
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
    return i >= 0 && i < dt_json_count(d, node) ? (int)d->order[d->node[node].u.first + (uint32_t)i]
                                                : -1;
}

const char *dt_json_key(const dt_json *d, int node, size_t *bytes) {
    return dt__json_get(d, node) ? dt__json_chars(d, d->node[node].key, bytes) : NULL;
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
    return n ? dt__json_chars(d, n->u.first, bytes) : NULL;
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
    dt_status status = dt__json_say(d, dt__json_get(d, node) ? d->node[node].at : 0, fmt, args);
    va_end(args);
    return status;
}

static void dt__json_write(dt_json_out *o, const char *s, size_t n) {
    if (!o) return;
    if (o->used + n + 1 > o->room && dt_error(o->ctx) == DT_OK) {
        size_t room = 2 * (o->used + n + 1) + 256;
        char *text = (char *)dt_alloc(o->ctx, DT_MEM_HOST, room, "JSON");
        if (!text) return;
        if (o->text) memcpy(text, o->text, o->used);
        dt_free(o->ctx, DT_MEM_HOST, o->text, o->room);
        o->text = text;
        o->room = room;
    }
    if (dt_error(o->ctx) != DT_OK) return;
    memcpy(o->text + o->used, s, n);
    o->used += n;
    o->text[o->used] = 0;
}

static void dt__json_quote(dt_json_out *o, const char *s) {
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const char *end = s + strlen(s);
    const char *bad = s + dt__utf8_bad(s, strlen(s)); /* the next invalid byte */
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
        if (s == bad) bad += 1 + dt__utf8_bad(s + 1, (size_t)(end - s - 1));
        if (code[1])
            dt__json_write(o, code, strlen(code));
        else
            dt__json_write(o, s, 1);
    }
    dt__json_write(o, "\"", 1);
}

/* What comes before a value: a comma unless it is the first, and the key. */
static void dt__json_next(dt_json_out *o, const char *key) {
    char last = o && o->used ? o->text[o->used - 1] : '{';
    if (last != '{' && last != '[') dt__json_write(o, ",", 1);
    if (!key) return;
    dt__json_quote(o, key);
    dt__json_write(o, ":", 1);
}

void dt_json_open(dt_json_out *o, const char *key, char bracket) {
    dt__json_next(o, key);
    dt__json_write(o, &bracket, 1);
}

void dt_json_shut(dt_json_out *o, char bracket) { dt__json_write(o, &bracket, 1); }

void dt_json_put_string(dt_json_out *o, const char *key, const char *value) {
    dt__json_next(o, key);
    if (value)
        dt__json_quote(o, value);
    else
        dt__json_write(o, "null", 4);
}

/* The fewest of 15 to 17 digits that read back the same. A locale may have its own point, even of
   several bytes. */
void dt_json_put_number(dt_json_out *o, const char *key, double value) {
    char raw[48], text[48] = "0";
    double back = 0;
    dt_json d;
    dt__json_in in;
    if (!o) return;
    if (!isfinite(value)) dt_fail(o->ctx, DT_ERR_ARG, "JSON: %g is no number there", value);
    memset(&d, 0, sizeof d);
    d.text = text;
    for (int digits = 15; digits <= 17 && dt_error(o->ctx) == DT_OK && value != 0 && back != value;
         digits++) {
        size_t n = 0;
        snprintf(raw, sizeof raw, "%.*g", digits, value);
        for (const char *s = raw; *s; s++) {
            int plain = (*s >= '0' && *s <= '9') || *s == 'e' || *s == '-' || *s == '+';
            if (plain || (n && text[n - 1] != '.')) text[n++] = plain ? *s : '.';
        }
        text[n] = 0;
        if (fabs(value) > 9007199254740992.0 && !strpbrk(text, ".e"))
            memcpy(text + n, ".0", 3), n += 2;
        memset(&in, 0, sizeof in);
        in.doc = &d;
        d.bytes = n;
        dt__json_read_number(&in, &back);
    }
    dt__json_next(o, key);
    dt__json_write(o, text, strlen(text));
}

void dt_json_put_int(dt_json_out *o, const char *key, int64_t value) {
    char text[24];
    dt__json_next(o, key);
    dt__json_write(o, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)value));
}

void dt_json_put_bool(dt_json_out *o, const char *key, int value) {
    dt__json_next(o, key);
    dt__json_write(o, value ? "true" : "false", value ? 4 : 5);
}

void dt_json_drop(dt_json_out *o) {
    if (!o) return;
    dt_free(o->ctx, DT_MEM_HOST, o->text, o->room);
    o->text = NULL;
    o->used = o->room = 0;
}

// ==== 19. Weight files: code ====================================================================

/* bytes read at once where they must be converted; of a tile */
enum { DT__WINDOW = 256 << 10, DT__STAGE = 1 << 20 };

typedef struct dt__type {
    const char *name;
    int bits, readable;
    dt_dtype dtype;
} dt__type;
/* The types of safetensors, in its order: a writer puts the last ones first. */
static const dt__type dt__types[] = { { "BOOL", 8, 0, DT_F32 }, { "F4", 4, 0, DT_F32 },
    { "F6_E2M3", 6, 0, DT_F32 }, { "F6_E3M2", 6, 0, DT_F32 }, { "U8", 8, 0, DT_F32 },
    { "I8", 8, 0, DT_F32 }, { "F8_E5M2", 8, 0, DT_F32 }, { "F8_E4M3", 8, 0, DT_F32 },
    { "F8_E8M0", 8, 0, DT_F32 }, { "F8_E4M3FNUZ", 8, 0, DT_F32 }, { "F8_E5M2FNUZ", 8, 0, DT_F32 },
    { "I16", 16, 0, DT_F32 }, { "U16", 16, 0, DT_F32 }, { "F16", 16, 1, DT_F16 },
    { "BF16", 16, 1, DT_BF16 }, { "I32", 32, 1, DT_I32 }, { "U32", 32, 0, DT_F32 },
    { "F32", 32, 1, DT_F32 }, { "C64", 64, 0, DT_F32 }, { "F64", 64, 1, DT_F64 },
    { "I64", 64, 0, DT_F32 }, { "U64", 64, 0, DT_F32 } };
enum { DT__TYPES = sizeof dt__types / sizeof *dt__types };

/* The tensors of an llm.c model, in its order. Dimensions: P padded vocabulary, T positions, L
   layers, C width, 3 and 4 that many times C. */
static const struct {
    const char *name, *dims;
} dt__llmc_tensors[16] = { { "wte", "PC" }, { "wpe", "TC" }, { "ln1w", "LC" }, { "ln1b", "LC" },
    { "qkvw", "L3C" }, { "qkvb", "L3" }, { "attprojw", "LCC" }, { "attprojb", "LC" },
    { "ln2w", "LC" }, { "ln2b", "LC" }, { "fcw", "L4C" }, { "fcb", "L4" }, { "fcprojw", "LC4" },
    { "fcprojb", "LC" }, { "lnfw", "C" }, { "lnfb", "C" } };
enum { DT__LLMC_MAGIC = 20240326, DT__LLMC_HEAD = 1024 };

typedef struct dt__weight {
    dt_weight t;
    int file, type;        /* places in the tables */
    int64_t bytes, offset; /* offset: of its first byte in the file */
    int64_t written, due;  /* elements written; how many must be */
    /* of a tensor that was declared; other names are in the header or constant */
    char *own_name;
} dt__weight;

typedef struct dt__weight_file {
    char *path, *temp; /* temp: the name while it is being written */
    char *head;        /* all before the data */
    dt_json *json;     /* of head: holds the names */
    size_t path_bytes, temp_bytes, head_bytes;
    int64_t bytes;
    int open; /* temp may exist */
} dt__weight_file;

/* Where several ranks write one file, each has a handle that knows all tensors and places, and its
   elements go here, in the file's type: `count` from element `first` of tensor `index`, for byte
   `offset` of the file. */
typedef struct dt__sink {
    void (*put)(
        void *user, int index, int64_t first, int64_t count, const void *data, int64_t offset);
    void *user;
} dt__sink;

struct dt_weights {
    dt_ctx *ctx;
    dt_listener listener; /* closes it with the context */
    int writing, laid;    /* laid: files and offsets are settled */
    dt_weights_desc desc; /* desc.llmc of what is read too */
    char *path;
    dt__weight_file *file;
    dt__weight *weight;
    int files, file_room, weights, weight_room;
    uint32_t *order; /* (2 order_room): weights by name, and room to sort */
    int order_room;
    int fd, current; /* the one file that is open: many ranks may read many files */
    char *window, *stage;
    dt__sink sink; /* put not NULL: takes what is written; no file is made here */
    /* dt_weights_save writes this part of what the rank has; 0 parts: all */
    int part, parts;
};

static char *dt__join(dt_ctx *ctx, const char *a, size_t a_bytes, const char *b) {
    char *s = (char *)dt_alloc(ctx, DT_MEM_HOST, a_bytes + strlen(b) + 1, "a path");
    if (!s) return NULL;
    memcpy(s, a, a_bytes);
    memcpy(s + a_bytes, b, strlen(b) + 1);
    return s;
}

/* Ranks that write one file at once must not write into each other's: the last to finish wins. */
static char *dt__temp_name(dt_ctx *ctx, const char *path) {
    char end[32];
    snprintf(end, sizeof end, ".%d.tmp", ctx->rank);
    return dt__join(ctx, path, strlen(path), ctx->rank ? end : ".tmp");
}

static void dt__text_drop(dt_ctx *ctx, char *s) {
    if (s) dt_free(ctx, DT_MEM_HOST, s, strlen(s) + 1);
}

/* The text of an errno that the io table set. */
static const char *dt__io_why(int reason) {
    switch (reason) {
    case 0: return "the io table refused";
    case ESPIPE: return "it is a FIFO, not a regular file";
    case ENODEV:
    case ENXIO: return "it is a device or a socket, not a regular file";
    case ELOOP: return "it is a symbolic link that is not followed, or that leads nowhere";
    case EMLINK: return "it has another hard link; writing it would change that file too";
    case EFBIG: return "File too large, for ulimit -f or for the file system";
    default: return strerror(reason);
    }
}
static const char *dt__io_reason(void) { return dt__io_why(errno); }

static int dt__io_absent(void) { return errno == ENOENT || errno == ENOTDIR; }

/* Fails with "...: " and errno's text, after a failed io call. Sets ctx->unread (the file may be
   good), unless it is absent, a folder or a FIFO. */
static dt_status dt__io_fail(dt_ctx *ctx, const char *fmt, ...) DT_PRINTF(2, 3);
static dt_status dt__io_fail(dt_ctx *ctx, const char *fmt, ...) {
    char text[sizeof ctx->text];
    const char *reason = dt__io_reason();
    int unread = !dt__io_absent() && errno != EISDIR && errno != ESPIPE;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (ctx->status == DT_OK) ctx->unread = unread;
    return dt_fail(ctx, DT_ERR_IO, "%s: %s", text, reason);
}

/* Creates a file under a temporary name. First removes one (or a link) that a killed job left. */
static int dt__io_create(const dt_io *io, const char *path) {
    errno = 0;
    int fd = io->open(io->user, path, DT_IO_CREATE);
    if (fd >= 0 || errno != EEXIST || io->remove(io->user, path) != 0) return fd;
    errno = 0;
    return io->open(io->user, path, DT_IO_CREATE);
}

/* Moves bytes between memory and a file: how many went. The io table may take them piece by piece.
   *end: not all went because none were left, or taken; else errno says why, where the table sets
   it. */
static int64_t dt__io_move(
    const dt_io *io, int fd, int writing, void *data, int64_t bytes, int64_t at, int *end) {
    int64_t done = 0, n = 1;
    while (done < bytes) {
        char *here = (char *)data + done;
        errno = 0;
        n = writing ? io->pwrite(io->user, fd, here, (size_t)(bytes - done), at + done)
                    : io->pread(io->user, fd, here, (size_t)(bytes - done), at + done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0 || n > bytes - done) break;
        done += n;
    }
    *end = done < bytes && n >= 0;
    return done;
}

/* Bytes of an open file, all of them or an error that names `what`. */
static dt_status dt__file_get(
    dt_ctx *ctx, const char *path, int fd, void *out, int64_t bytes, int64_t at, const char *what) {
    int end = 0;
    int64_t done = dt__io_move(&ctx->io, fd, 0, out, bytes, at, &end);
    if (done == bytes) return DT_OK;
    if (!end)
        return dt__io_fail(
            ctx, "%s: %s, byte %lld", path, dt__name_text(what).s, (long long)(at + done));
    return dt_fail(ctx, DT_ERR_IO, "%s: %s, byte %lld: the file has become shorter", path,
        dt__name_text(what).s, (long long)(at + done));
}

static dt_status dt__file_put(
    dt_ctx *ctx, const char *path, int fd, const void *in, int64_t bytes, int64_t at) {
    int end = 0;
    int64_t done = dt__io_move(&ctx->io, fd, 1, (void *)(uintptr_t)in, bytes, at, &end);
    return done == bytes ? DT_OK
                         : dt__io_fail(ctx, "%s: writing byte %lld", path, (long long)(at + done));
}

/* A descriptor, or -1 and the context has failed. For writing: creates a file of `bytes` zeros;
   path is a temporary name. */
static int dt__file_open(dt_ctx *ctx, const char *path, int writing, int64_t bytes) {
    const dt_io *io = &ctx->io;
    if (ctx->status != DT_OK) return -1;
    errno = 0;
    int fd = writing ? dt__io_create(io, path) : io->open(io->user, path, DT_IO_READ);
    if (fd < 0) dt__io_fail(ctx, "%s", path);
    if (fd < 0 || !writing) return fd;
    errno = 0;
    if (io->resize(io->user, fd, bytes) == 0) return fd;
    dt__io_fail(ctx, "%s: making room for %lld bytes", path, (long long)bytes);
    io->close(io->user, fd);
    io->remove(io->user, path);
    return -1;
}

/* Closes what was written, once it is on the disk: an error of the disk may show no earlier. */
static dt_status dt__file_shut(dt_ctx *ctx, const char *path, int fd) {
    errno = 0;
    int synced = ctx->status == DT_OK ? ctx->io.fsync(ctx->io.user, fd) : 0;
    if (synced != 0) dt__io_fail(ctx, "%s: fsync", path);
    errno = 0;
    if (ctx->io.close(ctx->io.user, fd) != 0) dt__io_fail(ctx, "%s: close", path);
    return ctx->status;
}

/* temp becomes path; then the folder is synced, which makes the new name last. A table or a file
   system that does not open folders has no such step. */
static dt_status dt__file_publish(dt_ctx *ctx, const char *temp, const char *path) {
    const char *slash = strrchr(path, '/');
    errno = 0;
    if (ctx->io.rename(ctx->io.user, temp, path) != 0)
        return dt__io_fail(ctx, "%s: rename from %s", path, temp);
    char *folder =
        slash ? dt__join(ctx, path, (size_t)(slash - path) + 1, "") : dt__join(ctx, ".", 1, "");
    int fd = folder ? ctx->io.open(ctx->io.user, folder, DT_IO_READ) : -1;
    errno = 0;
    if (fd >= 0 && ctx->io.fsync(ctx->io.user, fd) != 0 && errno != EINVAL)
        dt__io_fail(ctx, "%s: fsync", folder);
    if (fd >= 0) ctx->io.close(ctx->io.user, fd);
    dt__text_drop(ctx, folder);
    return ctx->status;
}

char *dt_file_read(dt_ctx *ctx, const char *path, size_t limit, size_t *bytes) {
    if (dt_error(ctx) != DT_OK) return NULL;
    if (!path || !bytes) {
        dt_fail(ctx, DT_ERR_ARG, "dt_file_read(%s): path or bytes is NULL", path ? path : "NULL");
        return NULL;
    }
    int fd = dt__file_open(ctx, path, 0, 0);
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
    if (text) {
        *bytes = (size_t)size;
        text[size] = 0;
        if (dt__file_get(ctx, path, fd, text, size, 0, "text") != DT_OK) {
            dt_free(ctx, DT_MEM_HOST, text, (size_t)size + 1);
            text = NULL;
        }
    }
    ctx->io.close(ctx->io.user, fd);
    return text;
}

dt_status dt_file_write(dt_ctx *ctx, const char *path, const void *data, size_t bytes) {
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    if (!path || (!data && bytes))
        return dt_fail(ctx, DT_ERR_ARG, "dt_file_write(%s): path is NULL, or data of %zu bytes is",
            path ? path : "NULL", bytes);
    char *temp = dt__temp_name(ctx, path);
    int fd = temp ? dt__file_open(ctx, temp, 1, (int64_t)bytes) : -1;
    if (fd >= 0) {
        dt__file_put(ctx, temp, fd, data, (int64_t)bytes, 0);
        dt__file_shut(ctx, temp, fd);
    }
    if (ctx->status == DT_OK) dt__file_publish(ctx, temp, path);
    if (ctx->status != DT_OK && fd >= 0) ctx->io.remove(ctx->io.user, temp);
    dt__text_drop(ctx, temp);
    return ctx->status;
}

// ---- The handle

static void dt__weights_shut(dt_weights *w) {
    if (w->fd >= 0 && w->writing)
        dt__file_shut(w->ctx, w->file[w->current].temp, w->fd);
    else if (w->fd >= 0)
        w->ctx->io.close(w->ctx->io.user, w->fd);
    w->fd = w->current = -1;
}

static dt_status dt__weights_use(dt_weights *w, int f) {
    dt_ctx *ctx = w->ctx;
    if (w->current == f) return ctx->status;
    dt__weights_shut(w);
    const char *path = w->writing ? w->file[f].temp : w->file[f].path;
    if (ctx->status != DT_OK) return ctx->status;
    errno = 0;
    w->fd = ctx->io.open(ctx->io.user, path, w->writing ? DT_IO_WRITE : DT_IO_READ);
    if (w->fd < 0) return dt__io_fail(ctx, "%s", path);
    w->current = f;
    return DT_OK;
}

static void dt__weights_free(dt_ctx *ctx, void *user) {
    dt_weights *w = (dt_weights *)user;
    dt__weights_shut(w);
    for (int f = 0; f < w->files; f++) {
        dt__weight_file *file = &w->file[f];
        if (file->open) ctx->io.remove(ctx->io.user, file->temp);
        dt_json_free(file->json);
        dt_free(ctx, DT_MEM_HOST, file->head, file->head_bytes);
        dt__text_drop(ctx, file->path);
        dt__text_drop(ctx, file->temp);
    }
    for (int i = 0; i < w->weights; i++) dt__text_drop(ctx, w->weight[i].own_name);
    dt_free(ctx, DT_MEM_HOST, w->file, (size_t)w->file_room * sizeof *w->file);
    dt_free(ctx, DT_MEM_HOST, w->weight, (size_t)w->weight_room * sizeof *w->weight);
    dt_free(ctx, DT_MEM_HOST, w->order, 2 * (size_t)w->order_room * sizeof *w->order);
    dt_free(ctx, DT_MEM_HOST, w->window, w->window ? DT__WINDOW : 0);
    dt_free(ctx, DT_MEM_HOST, w->stage, w->stage ? DT__STAGE : 0);
    dt__text_drop(ctx, w->path);
    dt_free(ctx, DT_MEM_HOST, w, sizeof *w);
}

static dt_weights *dt__weights_new(dt_ctx *ctx, const char *path, int writing) {
    if (dt_error(ctx) != DT_OK) return NULL;
    if (!path)
        dt_fail(ctx, DT_ERR_ARG, "%s: the path is NULL",
            writing ? "dt_weights_create" : "dt_weights_open");
    /* two would share a temporary file */
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
    w->fd = w->current = -1;
    w->listener.closing = dt__weights_free;
    w->listener.user = w;
    dt_listen(ctx, &w->listener);
    w->path = dt__join(ctx, path, strlen(path), "");
    return w;
}

static void dt__weights_end(dt_weights *w) {
    dt_unlisten(w->ctx, &w->listener);
    dt__weights_free(w->ctx, w);
}

/* Takes over path. */
static dt__weight_file *dt__weights_file(dt_weights *w, char *path) {
    dt__weight_file *grown = (dt__weight_file *)dt__grow(
        w->ctx, w->file, w->files, &w->file_room, sizeof *grown, "files");
    if (!path || !grown) {
        dt__text_drop(w->ctx, path);
        return NULL;
    }
    w->file = grown;
    memset(&w->file[w->files], 0, sizeof *w->file);
    w->file[w->files].path = path;
    return &w->file[w->files++];
}

static dt__weight *dt__weights_add(dt_weights *w, const dt__weight *weight) {
    dt__weight *grown = (dt__weight *)dt__grow(
        w->ctx, w->weight, w->weights, &w->weight_room, sizeof *grown, "tensors");
    if (!grown) return NULL;
    w->weight = grown;
    w->weight[w->weights] = *weight;
    return &w->weight[w->weights++];
}

static int dt__by_name(const void *user, uint32_t a, uint32_t b) {
    const dt__weight *t = (const dt__weight *)user;
    return strcmp(t[a].t.name, t[b].t.name) < 0;
}

/* the empty ones of a place come first */
static int dt__by_offset(const void *user, uint32_t a, uint32_t b) {
    const dt__weight *t = (const dt__weight *)user;
    return t[a].offset != t[b].offset ? t[a].offset < t[b].offset : t[a].bytes < t[b].bytes;
}

static int dt__by_type(const void *user, uint32_t a, uint32_t b) {
    const dt__weight *t = (const dt__weight *)user;
    return t[a].type != t[b].type ? t[a].type > t[b].type : dt__by_name(user, a, b);
}

/* Weights first .. of the table, in w->order, sorted. */
static dt_status dt__weights_sort(dt_weights *w, int first, dt__less_fn less) {
    int n = w->weights - first;
    if (w->weights > w->order_room) {
        dt_free(w->ctx, DT_MEM_HOST, w->order, 2 * (size_t)w->order_room * sizeof *w->order);
        w->order_room = 0;
        w->order = (uint32_t *)dt_alloc(
            w->ctx, DT_MEM_HOST, 2 * (size_t)w->weights * sizeof *w->order, "tensors");
        if (!w->order) return w->ctx->status;
        w->order_room = w->weights;
    }
    for (int i = 0; i < n; i++) w->order[i] = (uint32_t)(first + i);
    if (n > 1) dt__sort(w->order, w->order + w->order_room, (size_t)n, less, w->weight);
    return DT_OK;
}

/* All tensors are known: sorts them by name. Two of one name are an error. */
static dt_status dt__weights_names(dt_weights *w) {
    if (dt__weights_sort(w, 0, dt__by_name) != DT_OK) return w->ctx->status;
    for (int i = 1; i < w->weights; i++)
        if (!dt__by_name(w->weight, w->order[i - 1], w->order[i]))
            return dt_fail(w->ctx, w->writing ? DT_ERR_ARG : DT_ERR_IO,
                "%s: tensor '%s' is there twice", w->path,
                dt__name_text(w->weight[w->order[i]].t.name).s);
    return DT_OK;
}

// ---- Reading

/* One member of a safetensors header. */
static dt_status dt__st_tensor(dt_weights *w, int f, int node) {
    dt__weight_file *file = &w->file[f];
    const dt_json *j = file->json;
    dt__weight t;
    size_t bytes = 0;
    int64_t begin, end, size = 1;
    memset(&t, 0, sizeof t);
    t.file = f;
    t.t.name = dt_json_key(j, node, &bytes);
    if (strlen(t.t.name) != bytes) return dt_json_fail(j, node, "a tensor's name holds a NUL");
    if (dt__utf8_bad(t.t.name, bytes) < bytes)
        return dt_json_fail(j, node, "a tensor's name is not UTF-8");
    dt__text name = dt__name_text(t.t.name);
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
            j, node, "tensor '%s': unknown type '%s'", name.s, dt__name_text(type).s);
    t.t.type = dt__types[t.type].name;
    t.t.readable = dt__types[t.type].readable;
    t.t.dtype = dt__types[t.type].dtype;
    for (int i = 0; i < dt_json_count(j, shape); i++) {
        int64_t d = 0;
        if (!dt_json_int(j, dt_json_at(j, shape, i), &d) || d < 0)
            return dt_json_fail(j, node, "tensor '%s': dimension %d is no count", name.s, i);
        if (!dt__mul_ok(size, d, &size))
            return dt_json_fail(
                j, node, "tensor '%s': dimension %d: more elements than can be counted", name.s, i);
        if (i < DT_MAX_DIMS) t.t.shape.d[t.t.shape.nd++] = d;
    }
    if (dt_json_count(j, shape) > DT_MAX_DIMS) { /* it can be listed, not read */
        t.t.readable = 0;
        t.t.shape = DT_SHAPE(size);
    }
    t.t.count = size;
    if (!dt__mul_ok(size, dt__types[t.type].bits, &size) || size % 8 != 0)
        return dt_json_fail(j, node, "tensor '%s': %s of %s has no size in bytes", name.s,
            dt__shape_text(t.t.shape).s, type);
    if (!dt_json_int(j, dt_json_at(j, offsets, 0), &begin) ||
        !dt_json_int(j, dt_json_at(j, offsets, 1), &end) || begin < 0 || end < begin ||
        end - begin != size / 8 || !dt__add_ok(begin, (int64_t)file->head_bytes, &t.offset))
        return dt_json_fail(j, node, "tensor '%s': its data_offsets are not those of %s of %s",
            name.s, dt__shape_text(t.t.shape).s, type);
    t.bytes = end - begin;
    return dt__weights_add(w, &t) ? DT_OK : w->ctx->status;
}

static dt_status dt__st_metadata(const dt_json *j, int node) {
    if (dt_json_kind_of(j, node) != DT_JSON_OBJECT)
        return dt_json_fail(j, node, "__metadata__ is no object");
    for (int i = 0; i < dt_json_count(j, node); i++)
        if (!dt_json_string(j, dt_json_at(j, node, i), NULL))
            return dt_json_fail(j, dt_json_at(j, node, i), "__metadata__ holds strings only");
    return DT_OK;
}

/* The tensors of one file, beginning with `first`, must fill its data exactly: no hole, no overlap,
   nothing behind. So one file cannot be two things to two readers. */
static dt_status dt__st_cover(dt_weights *w, int f, int first) {
    const dt__weight_file *file = &w->file[f];
    int64_t at = (int64_t)file->head_bytes;
    if (dt__weights_sort(w, first, dt__by_offset) != DT_OK) return w->ctx->status;
    for (int i = 0; i < w->weights - first; i++) {
        const dt__weight *t = &w->weight[w->order[i]];
        if (t->offset != at)
            return dt_fail(w->ctx, DT_ERR_IO,
                "%s: tensor '%s' begins at byte %lld, but the one before it ends at %lld",
                file->path, dt__name_text(t->t.name).s, (long long)t->offset, (long long)at);
        if (!dt__add_ok(at, t->bytes, &at)) break;
    }
    return at == file->bytes
               ? DT_OK
               : dt_fail(w->ctx, DT_ERR_IO, "%s: %lld bytes, but its tensors end at byte %lld",
                     file->path, (long long)file->bytes, (long long)at);
}

static dt_status dt__st_open(dt_weights *w, int f, uint64_t head) {
    dt__weight_file *file = &w->file[f];
    dt_ctx *ctx = w->ctx;
    int first = w->weights;
    if (head > DT__JSON_BYTES || (int64_t)head > file->bytes - 8)
        return dt_fail(ctx, DT_ERR_IO,
            "%s: neither safetensors (a header of %llu bytes in a file of %lld, at most %d) "
            "nor an llm.c model",
            file->path, (unsigned long long)head, (long long)file->bytes, DT__JSON_BYTES);
    file->head_bytes = (size_t)head + 8;
    file->head = (char *)dt_alloc(ctx, DT_MEM_HOST, file->head_bytes, "a header");
    if (!file->head) return ctx->status;
    if (dt__file_get(ctx, file->path, w->fd, file->head, (int64_t)file->head_bytes, 0, "header") !=
        DT_OK)
        return ctx->status;
    if (head < 2 || file->head[8] != '{')
        return dt_fail(ctx, DT_ERR_IO, "%s: the header does not begin with '{'", file->path);
    file->json = dt_json_parse(ctx, file->path, file->head + 8, (size_t)head);
    int metadata = dt_json_find(file->json, 0, "__metadata__");
    if (metadata >= 0) dt__st_metadata(file->json, metadata);
    for (int i = 0; i < dt_json_count(file->json, 0) && ctx->status == DT_OK; i++)
        if (dt_json_at(file->json, 0, i) != metadata)
            dt__st_tensor(w, f, dt_json_at(file->json, 0, i));
    return ctx->status == DT_OK ? dt__st_cover(w, f, first) : ctx->status;
}

/* Tensor i of an llm.c model whose sizes were checked; 0 where its size is no number. */
static int dt__llmc_tensor(const dt_llmc *m, int i, dt__weight *t) {
    const char *dims = dt__llmc_tensors[i].dims;
    int64_t C = m->width;
    memset(t, 0, sizeof *t);
    t->t.name = dt__llmc_tensors[i].name;
    t->t.type = m->version == 5 ? "BF16" : "F32";
    t->t.readable = 1;
    t->t.dtype = m->version == 5 ? DT_BF16 : DT_F32;
    t->t.count = 1;
    for (; *dims; dims++) {
        int64_t d = *dims == 'P'   ? m->padded_vocab
                    : *dims == 'T' ? m->seq
                    : *dims == 'L' ? m->layers
                    : *dims == 'C' ? C
                                   : (*dims - '0') * C;
        t->t.shape.d[t->t.shape.nd++] = d;
        if (!dt__mul_ok(t->t.count, d, &t->t.count)) return 0;
    }
    t->due = i == 0 ? m->vocab * C : t->t.count;
    return dt__mul_ok(t->t.count, (int64_t)dt_dtype_size(t->t.dtype), &t->bytes);
}

/* All 16 tensors, one after the other; *end is where the file ends. */
static dt_status dt__llmc_list(dt_weights *w, int f, int64_t *end) {
    const dt_llmc *m = &w->desc.llmc;
    *end = DT__LLMC_HEAD;
    if ((m->version != 3 && m->version != 5) || m->seq < 1 || m->vocab < 1 || m->layers < 1 ||
        m->heads < 1 || m->width < 1 || m->width % m->heads != 0 || m->padded_vocab < m->vocab)
        return dt_fail(w->ctx, w->writing ? DT_ERR_ARG : DT_ERR_IO,
            "%s: llm.c model of version %d (3 and 5 are "
            "known), seq %d, vocab %d of %d, layers %d, heads %d, width %d",
            w->path, m->version, m->seq, m->vocab, m->padded_vocab, m->layers, m->heads, m->width);
    for (int i = 0; i < 16; i++) {
        dt__weight t;
        int ok = dt__llmc_tensor(m, i, &t);
        t.file = f;
        t.offset = *end;
        if (!ok || !dt__add_ok(*end, t.bytes, end))
            return dt_fail(
                w->ctx, DT_ERR_IO, "%s: the size of tensor '%s' is no number", w->path, t.t.name);
        if (!dt__weights_add(w, &t)) return w->ctx->status;
    }
    return DT_OK;
}

static dt_status dt__llmc_open(dt_weights *w, int f) {
    dt__weight_file *file = &w->file[f];
    int32_t head[8];
    int64_t end;
    if (dt__file_get(w->ctx, file->path, w->fd, head, sizeof head, 0, "header") != DT_OK)
        return w->ctx->status;
    dt_llmc m = { head[1], head[2], head[3], head[4], head[5], head[6], head[7] };
    w->desc.llmc = m;
    if (dt__llmc_list(w, f, &end) != DT_OK) return w->ctx->status;
    return end == file->bytes
               ? DT_OK
               : dt_fail(w->ctx, DT_ERR_IO, "%s: %lld bytes, but a model of its sizes has %lld",
                     file->path, (long long)file->bytes, (long long)end);
}

/* One file and its kind. Takes over path. */
static dt_status dt__weights_scan(dt_weights *w, char *path) {
    dt_ctx *ctx = w->ctx;
    dt__weight_file *file = dt__weights_file(w, path);
    int f = w->files - 1;
    uint64_t head;
    if (!file || dt__weights_use(w, f) != DT_OK) return ctx->status;
    errno = 0;
    file->bytes = ctx->io.size(ctx->io.user, w->fd);
    if (file->bytes < 0 && errno == EISDIR)
        return dt_fail(ctx, DT_ERR_IO,
            "%s: a folder without model.safetensors and model.safetensors.index.json", path);
    if (file->bytes < 0) return dt__io_fail(ctx, "%s", path);
    if (file->bytes < 8)
        return dt_fail(
            ctx, DT_ERR_IO, "%s: %lld bytes are no weights", path, (long long)file->bytes);
    if (dt__file_get(ctx, path, w->fd, &head, sizeof head, 0, "header") != DT_OK)
        return ctx->status;
    if ((uint32_t)head == DT__LLMC_MAGIC && w->files == 1 && file->bytes >= DT__LLMC_HEAD)
        return dt__llmc_open(w, f);
    return dt__st_open(w, f, head);
}

/* The shards that an index names, each in the index's folder. */
static dt_status dt__index_shards(dt_weights *w, const dt_json *j, int map, const char *path) {
    const char *slash = strrchr(path, '/');
    size_t folder = slash ? (size_t)(slash - path) + 1 : 0, bytes = 0;
    for (int i = 0; i < dt_json_count(j, map) && w->ctx->status == DT_OK; i++) {
        int node = dt_json_at(j, map, i), f = 0;
        const char *name = dt_json_string(j, node, &bytes);
        if (!name || !bytes || strlen(name) != bytes || strchr(name, '/') || strchr(name, '\\') ||
            strstr(name, ".."))
            return dt_json_fail(j, node, "'%s' is not the name of a file beside the index",
                dt__name_text(name ? name : "").s);
        while (f < w->files && strcmp(w->file[f].path + folder, name) != 0) f++;
        if (f == w->files) dt__weights_scan(w, dt__join(w->ctx, path, folder, name));
    }
    return w->ctx->status;
}

/* What an index names must be where it says. */
static dt_status dt__index_check(dt_weights *w, const dt_json *j, int map, const char *path) {
    const char *slash = strrchr(path, '/');
    size_t folder = slash ? (size_t)(slash - path) + 1 : 0;
    for (int i = 0; i < dt_json_count(j, map); i++) {
        int node = dt_json_at(j, map, i), at = dt_weights_find(w, dt_json_key(j, node, NULL));
        const char *name = dt_json_string(j, node, NULL);
        if (at < 0 || strcmp(w->file[w->weight[at].file].path + folder, name) != 0)
            return dt_json_fail(j, node, "tensor '%s' is not in '%s'",
                dt__name_text(dt_json_key(j, node, NULL)).s, dt__name_text(name).s);
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
    if (w->ctx->status == DT_OK && dt__index_shards(w, j, map, path) == DT_OK &&
        dt__weights_names(w) == DT_OK)
        dt__index_check(w, j, map, path);
    dt_json_free(j);
    if (text) dt_free(w->ctx, DT_MEM_HOST, text, bytes + 1);
    return w->ctx->status;
}

/* path + name if there is such a file, else NULL. What is not simply absent is an error. */
static char *dt__weights_in(dt_weights *w, const char *name) {
    dt_ctx *ctx = w->ctx;
    char *path = ctx->status == DT_OK ? dt__join(ctx, w->path, strlen(w->path), name) : NULL;
    if (!path) return NULL;
    errno = 0;
    int fd = ctx->io.open(ctx->io.user, path, DT_IO_READ);
    if (fd >= 0) {
        ctx->io.close(ctx->io.user, fd);
        return path;
    }
    if (!dt__io_absent()) dt__io_fail(ctx, "%s", path);
    dt__text_drop(ctx, path);
    return NULL;
}

static int dt__ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

dt_weights *dt_weights_open(dt_ctx *ctx, const char *path) {
    dt_weights *w = dt__weights_new(ctx, path, 0);
    if (!w) return NULL;
    char *one = dt__weights_in(w, "/model.safetensors"), *index = NULL;
    if (!one) index = dt__weights_in(w, "/model.safetensors.index.json");
    if (one)
        dt__weights_scan(w, one);
    else if (index)
        dt__index_open(w, index);
    else if (dt__ends_with(path, ".index.json"))
        dt__index_open(w, path);
    else if (ctx->status == DT_OK)
        dt__weights_scan(w, dt__join(ctx, path, strlen(path), ""));
    dt__text_drop(ctx, index);
    if (ctx->status == DT_OK && dt__weights_names(w) == DT_OK) return w;
    dt__weights_end(w);
    return NULL;
}

int dt_weights_count(const dt_weights *w) { return w ? w->weights : 0; }

const dt_weight *dt_weights_get(const dt_weights *w, int index) {
    return index >= 0 && index < dt_weights_count(w) ? &w->weight[index].t : NULL;
}

int dt_weights_find(const dt_weights *w, const char *name) {
    int lo = 0, hi = name ? dt_weights_count(w) : 0;
    if (w && w->writing && !w->laid) { /* not sorted yet */
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
    dt_llmc none = { 0, 0, 0, 0, 0, 0, 0 };
    return w ? w->desc.llmc : none;
}

const char *dt_weights_metadata(const dt_weights *w, const char *key) {
    const dt_json *j = w && w->files ? w->file[0].json : NULL;
    return dt_json_string(j, dt_json_find(j, dt_json_find(j, 0, "__metadata__"), key), NULL);
}

/* out = in as another type, both in host memory. Every pair but f64 to f64 passes through
   floats. */
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

/* What is wrong with moving such a run between a tensor and host memory. */
static dt_status dt__weights_check(const dt_weights *w, const char *what, int writing, int index,
    int64_t first, int64_t count, dt_dtype dtype) {
    const dt_weight *t = dt_weights_get(w, index);
    if (!w || w->ctx->status != DT_OK) return w ? w->ctx->status : DT_ERR_ARG;
    if (!t || w->writing != writing)
        return dt_fail(w->ctx, DT_ERR_ARG, "%s(%s): tensor %d of %d, of a file open for %s", what,
            w->path, index, w->weights, w->writing ? "writing" : "reading");
    if (first < 0 || count < 0 || first > t->count || count > t->count - first)
        return dt_fail(w->ctx, DT_ERR_ARG,
            "%s(%s): elements %lld..%lld of %lld (%lld from %lld on)", what,
            dt__name_text(t->name).s, (long long)first,
            (long long)((uint64_t)first + (uint64_t)count), (long long)t->count, (long long)count,
            (long long)first);
    if (!t->readable && dt__types[w->weight[index].type].readable)
        return dt_fail(w->ctx, DT_ERR_UNSUPPORTED, "%s(%s): it has more than %d dimensions", what,
            dt__name_text(t->name).s, DT_MAX_DIMS);
    if (!t->readable || dt_dtype_size(dtype) == 0 ||
        (t->dtype != dtype && (t->dtype == DT_I32 || dtype == DT_I32)))
        return dt_fail(w->ctx, DT_ERR_UNSUPPORTED, "%s(%s): no conversion between %s and %s", what,
            dt__name_text(t->name).s, t->type, dt_dtype_name(dtype));
    return DT_OK;
}

static char *dt__weights_buffer(dt_weights *w, char **buffer, size_t bytes) {
    if (!*buffer) *buffer = (char *)dt_alloc(w->ctx, DT_MEM_HOST, bytes, "a window into a file");
    return *buffer;
}

dt_status dt_weights_read(
    dt_weights *w, int index, int64_t first, int64_t count, dt_dtype as, void *host) {
    dt_status status = dt__weights_check(w, "dt_weights_read", 0, index, first, count, as);
    if (status != DT_OK || count == 0) return status;
    const dt__weight *t = &w->weight[index];
    const char *path = w->file[t->file].path;
    int64_t size = (int64_t)dt_dtype_size(t->t.dtype), step = DT__WINDOW / size;
    int64_t at = t->offset + first * size;
    if (dt__weights_use(w, t->file) != DT_OK) return w->ctx->status;
    if (as == t->t.dtype)
        return dt__file_get(w->ctx, path, w->fd, host, count * size, at, t->t.name);
    if (!dt__weights_buffer(w, &w->window, DT__WINDOW)) return w->ctx->status;
    for (int64_t done = 0; done < count; done += step) {
        int64_t n = count - done < step ? count - done : step;
        if (dt__file_get(w->ctx, path, w->fd, w->window, n * size, at + done * size, t->t.name) !=
            DT_OK)
            break;
        dt__convert(as, (char *)host + (size_t)done * dt_dtype_size(as), t->t.dtype, w->window, n);
    }
    return w->ctx->status;
}

// ---- Parameters out of files and into them

/* A dt_weight_part with its defaults filled in. */
typedef struct dt__rect {
    dt_tensor *param;
    int index; /* of the file's tensor */
    /* rows at .. at + rows - 1 of the parameter seen as a matrix of `columns` */
    int64_t at, rows, columns;
    /* where they begin in the file's matrix, and how many columns that has */
    int64_t row, column, stride;
    int transposed;
} dt__rect;

static dt_status dt__rect_make(dt_weights *w, const dt_weight_part *part, dt__rect *r) {
    const char *what = w->writing ? "dt_weights_save" : "dt_weights_load",
               *name = part->name ? part->name : "";
    dt_tensor *p = r->param;
    int64_t left = dt_count(p->param->full) / r->columns - r->at;
    r->index = dt_weights_find(w, name);
    const dt_weight *t = dt_weights_get(w, r->index);
    if (!t)
        return dt_fail(w->ctx, w->writing ? DT_ERR_ARG : DT_ERR_IO, "%s(%s): %s has no tensor '%s'",
            what, p->name, w->path, dt__name_text(name).s);
    r->rows = part->rows ? part->rows : left;
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
            "%s(%s): %lld of %lld rows of %lld, at (%lld,%lld) of (%lld,%lld) of '%s'", what,
            p->name, (long long)r->rows, (long long)left, (long long)r->columns, (long long)r->row,
            (long long)r->column, (long long)rows, (long long)r->stride, name);
    int64_t have = t->shape.nd ? t->shape.d[t->shape.nd - 1] : 1;
    if (have != r->stride || t->count / have != rows)
        return dt_fail(w->ctx, DT_ERR_SHAPE,
            "%s(%s): %s needs %s'%s' of (%lld,%lld), but %s has %s", what, p->name,
            dt__shape_text(p->param->full).s, r->transposed ? "transposed " : "",
            dt__name_text(name).s, (long long)rows, (long long)r->stride, w->path,
            dt__shape_text(t->shape).s);
    return DT_OK;
}

/* A run of the file's tensor: into host memory, or out of it where the file is written. */
static dt_status dt__rect_file(
    dt_weights *w, const dt__rect *r, int64_t first, int64_t count, void *host) {
    dt_dtype dtype = r->param->dtype;
    return w->writing ? dt_weights_write(w, r->index, first, count, dtype, host)
                      : dt_weights_read(w, r->index, first, count, dtype, host);
}

/* A run of the parameter's local elements, the other way round. */
static dt_status dt__rect_param(
    dt_weights *w, const dt__rect *r, int64_t first, int64_t count, void *host) {
    size_t size = dt_dtype_size(r->param->dtype), bytes = (size_t)count * size;
    void *at = (char *)r->param->data + (size_t)first * size;
    if (dt__move(w->ctx, w->writing ? host : at, w->writing ? at : host, bytes) != DT_OK)
        return w->ctx->status;
    return dt__sync(w->ctx); /* host memory is used again at once */
}

/* This rank's part of the numbers *begin .. *end - 1, where ranks share out what all of them
   have. */
static void dt__weights_part(const dt_weights *w, int64_t *begin, int64_t *end) {
    int64_t from = *begin, n = *end - *begin;
    if (!w->parts) return;
    *begin = from + n / w->parts * w->part + n % w->parts * w->part / w->parts;
    *end = from + n / w->parts * (w->part + 1) + n % w->parts * (w->part + 1) / w->parts;
}

/* As stored: runs of the box are runs of the file, as far as a row of it goes. */
static dt_status dt__rect_runs(dt_weights *w, const dt__rect *r) {
    const dt_param_info *p = r->param->param;
    /* from the box's first element in the full tensor to behind its last */
    int64_t begin = 0, end = 0;
    int64_t most = DT__STAGE / (int64_t)dt_dtype_size(r->param->dtype);
    for (int i = 0; i < p->full.nd; i++) {
        begin = begin * p->full.d[i] + p->box.lo[i];
        end = end * p->full.d[i] + p->box.lo[i] + p->box.inside[i] - 1;
    }
    end++;
    dt__weights_part(w, &begin, &end);
    if (begin < r->at * r->columns) begin = r->at * r->columns;
    if (end > (r->at + r->rows) * r->columns) end = (r->at + r->rows) * r->columns;
    dt__box_walk walk = dt__box_begin(p->full, p->box);
    while (dt__box_next(&walk)) {
        int64_t g = walk.global < begin ? begin : walk.global;
        int64_t stop = walk.global + walk.run < end ? walk.global + walk.run : end;
        while (g < stop) {
            int64_t row = g / r->columns - r->at, column = g % r->columns,
                    n = stop - g < most ? stop - g : most;
            if (r->stride != r->columns && n > r->columns - column) n = r->columns - column;
            int64_t at = (r->row + row) * r->stride + r->column + column,
                    local = walk.local + g - walk.global;
            if (w->writing && dt__rect_param(w, r, local, n, w->stage) != DT_OK)
                return w->ctx->status;
            if (dt__rect_file(w, r, at, n, w->stage) != DT_OK) return w->ctx->status;
            if (!w->writing && dt__rect_param(w, r, local, n, w->stage) != DT_OK)
                return w->ctx->status;
            g += n;
        }
    }
    return w->ctx->status;
}

static void dt__strided(
    void *out, int64_t out_step, const void *in, int64_t in_step, int64_t n, size_t size) {
    char *o = (char *)out;
    const char *i = (const char *)in;
    for (; n > 0; n--, o += out_step * (int64_t)size, i += in_step * (int64_t)size) {
        if (size == 2)
            memcpy(o, i, 2); /* sizes that the compiler knows are plain moves */
        else if (size == 4)
            memcpy(o, i, 4);
        else
            memcpy(o, i, 8);
    }
}

/* Rows row .. row+rows-1 and columns column .. column+columns-1 of the parameter are columns and
   rows of the file. They pass through one tile of the stage, so that the file is read in runs and
   the parameter is not touched crosswise. local: the parameter's element of the tile's corner,
   `pitch` apart from the next row's. */
static dt_status dt__rect_tile(dt_weights *w, const dt__rect *r, int64_t row, int64_t rows,
    int64_t column, int64_t columns, int64_t local, int64_t pitch) {
    size_t size = dt_dtype_size(r->param->dtype);
    char *tile = w->stage, *run = w->stage + (size_t)rows * (size_t)columns * size;
    int64_t whole = columns == pitch ? rows : 1; /* rows that one move takes */
    for (int64_t i = 0; i < rows && w->writing; i += whole)
        if (dt__rect_param(w, r, local + i * pitch, whole * columns,
                tile + (size_t)(i * columns) * size) != DT_OK)
            return w->ctx->status;
    for (int64_t c = 0; c < columns; c++) {
        int64_t at = (r->row + column + c) * r->stride + r->column + row - r->at;
        char *corner = tile + (size_t)c * size;
        if (w->writing) dt__strided(run, 1, corner, columns, rows, size);
        if (dt__rect_file(w, r, at, rows, run) != DT_OK) return w->ctx->status;
        if (!w->writing) dt__strided(corner, columns, run, 1, rows, size);
    }
    for (int64_t i = 0; i < rows && !w->writing; i += whole)
        if (dt__rect_param(w, r, local + i * pitch, whole * columns,
                tile + (size_t)(i * columns) * size) != DT_OK)
            return w->ctx->status;
    return DT_OK;
}

/* Transposed: the leading dimensions of the box are runs of rows, cut into tiles that fit the stage
   with one run. */
static dt_status dt__rect_tiles(dt_weights *w, const dt__rect *r) {
    const dt_param_info *p = r->param->param;
    dt_shape lead = p->full;
    int last = --lead.nd;
    int64_t pitch = p->box.n[last], width = p->box.inside[last];
    int64_t wide = width < 1024 ? width : 1024;
    /* + 1: the run */
    int64_t tall = DT__STAGE / ((wide + 1) * (int64_t)dt_dtype_size(r->param->dtype));
    int64_t from = 0, to = width;
    dt__box_walk walk = dt__box_begin(lead, p->box);
    dt__weights_part(w, &from, &to);
    while (from < to && dt__box_next(&walk)) {
        int64_t row = walk.global < r->at ? r->at : walk.global;
        int64_t stop =
            walk.global + walk.run < r->at + r->rows ? walk.global + walk.run : r->at + r->rows;
        for (; row < stop; row += tall)
            for (int64_t c = from; c < to; c += wide) {
                int64_t rows = stop - row < tall ? stop - row : tall,
                        columns = to - c < wide ? to - c : wide;
                int64_t local = (walk.local + row - walk.global) * pitch + c;
                if (dt__rect_tile(w, r, row, rows, p->box.lo[last] + c, columns, local, pitch) !=
                    DT_OK)
                    return w->ctx->status;
            }
    }
    return w->ctx->status;
}

static dt_status dt__weights_param(dt_weights *w, const char *what, int writing, dt_tensor *param,
    int64_t columns, const dt_weight_part *parts, int n) {
    dt__rect r;
    memset(&r, 0, sizeof r);
    if (!w || w->ctx->status != DT_OK) return w ? w->ctx->status : DT_ERR_ARG;
    dt_ctx *ctx = w->ctx;
    if (!param)
        return dt_fail(ctx, DT_ERR_ARG, "%s('%s'): the parameter is NULL", what,
            n > 0 && parts && parts[0].name ? dt__name_text(parts[0].name).s : "");
    if (!param->param || param->ctx != ctx || w->writing != writing)
        return dt_fail(ctx, DT_ERR_ARG,
            "%s(%s): a parameter of this context and a file open for %s are needed", what,
            param->name, writing ? "writing" : "reading");
    const dt_param_info *p = param->param;
    int64_t last = p->full.nd ? p->full.d[p->full.nd - 1] : 1;
    r.param = param;
    r.columns = columns ? columns : last;
    if (n > 0 && !parts)
        return dt_fail(ctx, DT_ERR_ARG, "%s(%s): its %d parts are NULL", what, param->name, n);
    if (r.columns < 1 || dt_count(p->full) % r.columns != 0)
        return dt_fail(ctx, DT_ERR_ARG, "%s(%s): %s has no %lld columns", what, param->name,
            dt__shape_text(p->full).s, (long long)columns);
    for (int i = 0; i < p->full.nd && writing && !w->sink.put; i++)
        if (p->box.n[i] != p->full.d[i])
            return dt_fail(ctx, DT_ERR_UNSUPPORTED,
                "%s(%s): it is cut, %s of %s; save it from a single rank", what, param->name,
                dt__shape_text(param->shape).s, dt__shape_text(p->full).s);
    if (dt__storage(ctx) != DT_OK) return ctx->status;
    int gathered = !param->data;
    if (dt__present_aside(param) != DT_OK) return ctx->status;
    for (int i = 0; i < n; i++) {
        if (dt__rect_make(w, &parts[i], &r) != DT_OK) return ctx->status;
        if (r.transposed && (r.columns != last || p->full.nd == 0))
            return dt_fail(ctx, DT_ERR_ARG,
                "%s(%s): transposed, its columns are its last dimension", what, param->name);
        if (!dt__weights_buffer(w, &w->stage, DT__STAGE)) return ctx->status;
        if ((r.transposed ? dt__rect_tiles(w, &r) : dt__rect_runs(w, &r)) != DT_OK)
            return ctx->status;
        r.at += r.rows;
    }
    dt__unit_release(ctx, p->unit, !writing, gathered);
    return r.at == dt_count(p->full) / r.columns ? DT_OK
                                                 : dt_fail(ctx, DT_ERR_ARG,
                                                       "%s(%s): the parts are %lld of "
                                                       "%lld rows",
                                                       what, param->name, (long long)r.at,
                                                       (long long)(dt_count(p->full) / r.columns));
}

dt_status dt_weights_load(
    dt_weights *w, dt_tensor *param, int64_t columns, const dt_weight_part *parts, int n) {
    return dt__weights_param(w, "dt_weights_load", 0, param, columns, parts, n);
}

dt_status dt_weights_save(
    dt_weights *w, dt_tensor *param, int64_t columns, const dt_weight_part *parts, int n) {
    return dt__weights_param(w, "dt_weights_save", 1, param, columns, parts, n);
}

// ---- Writing

dt_weights *dt_weights_create(dt_ctx *ctx, const char *path, dt_weights_desc desc) {
    int64_t end;
    dt_weights *w = dt__weights_new(ctx, path, 1);
    if (!w) return NULL;
    w->desc = desc;
    if (desc.llmc.version) dt__llmc_list(w, 0, &end);
    if (desc.shard_bytes &&
        (desc.shard_bytes < 0 || desc.llmc.version || !dt__ends_with(path, ".safetensors")))
        dt_fail(ctx, DT_ERR_ARG,
            "dt_weights_create(%s): shards of %lld bytes need a name ending in .safetensors", path,
            (long long)desc.shard_bytes);
    if (ctx->status == DT_OK) return w;
    dt__weights_end(w);
    return NULL;
}

int dt_weights_declare(dt_weights *w, const char *name, dt_dtype dtype, dt_shape shape) {
    dt__weight t;
    memset(&t, 0, sizeof t);
    if (!w || w->ctx->status != DT_OK) return -1;
    const char *bad = !w->writing            ? "the file is open for reading"
                      : w->laid              ? "elements have been written already"
                      : w->desc.llmc.version ? "the tensors of an llm.c model are given"
                      : !name                ? "a tensor needs a name"
                      : strcmp(name, "__metadata__") == 0 ? "the name is taken by the format"
                      : dt__utf8_bad(name, strlen(name)) < strlen(name) ? "the name is not UTF-8"
                      : dt_dtype_size(dtype) == 0                       ? "there is no such type"
                                                                        : dt__shape_bad(shape, 0);
    if (bad) {
        dt_fail(w->ctx, DT_ERR_ARG, "dt_weights_declare(%s): '%s' of type %s and shape %s: %s",
            w->path, name ? dt__name_text(name).s : "", dt_dtype_name(dtype),
            dt__shape_text(shape).s, bad);
        return -1;
    }
    while (!dt__types[t.type].readable || dt__types[t.type].dtype != dtype) t.type++;
    t.t.type = dt__types[t.type].name;
    t.t.readable = 1;
    t.t.dtype = dtype;
    t.t.shape = shape;
    t.t.count = t.due = dt_count(shape);
    t.bytes = t.t.count * (int64_t)dt_dtype_size(dtype);
    t.t.name = t.own_name = dt__join(w->ctx, name, strlen(name), "");
    if (t.own_name && dt__weights_add(w, &t)) return w->weights - 1;
    dt__text_drop(w->ctx, t.own_name);
    return -1;
}

/* Which file each tensor goes to, in order of declaration, and the files' names. */
static dt_status dt__st_files(dt_weights *w) {
    int64_t total = 0, size = 0, most = w->desc.shard_bytes;
    int f = 0;
    size_t stem = strlen(w->path) - (dt__ends_with(w->path, ".safetensors") ? 12 : 0);
    for (int i = 0; i < w->weights; i++)
        if (!dt__add_ok(total, w->weight[i].bytes, &total))
            return dt_fail(w->ctx, DT_ERR_ARG, "%s: the size of all tensors is no number", w->path);
    if (!most || total <= most) most = INT64_MAX;
    for (int i = 0; i < w->weights; i++) {
        if (size > 0 && w->weight[i].bytes > most - size) f++, size = 0;
        w->weight[i].file = f;
        size += w->weight[i].bytes;
    }
    for (int i = 0; i <= f && w->ctx->status == DT_OK; i++) {
        char number[48];
        snprintf(number, sizeof number, "-%05d-of-%05d.safetensors", i + 1, f + 1);
        dt__weights_file(w, most < INT64_MAX ? dt__join(w->ctx, w->path, stem, number)
                                             : dt__join(w->ctx, w->path, strlen(w->path), ""));
    }
    return w->ctx->status;
}

/* Makes file f under its temporary name, with its header; what is not written later is zero. */
static dt_status dt__file_start(dt_weights *w, int f, int64_t head_bytes) {
    dt__weight_file *file = &w->file[f];
    dt__weights_shut(w);
    if (!(file->temp = dt__temp_name(w->ctx, file->path))) return w->ctx->status;
    w->fd = dt__file_open(w->ctx, file->temp, 1, file->bytes);
    if (w->fd < 0) return w->ctx->status;
    file->open = 1;
    w->current = f;
    return dt__file_put(w->ctx, file->temp, w->fd, file->head, head_bytes, 0);
}

/* The header of file f, whose tensors come in w->order; gives them their offsets. */
static dt_status dt__st_head(dt_weights *w, int f) {
    dt__weight_file *file = &w->file[f];
    dt_json_out out = { w->ctx, NULL, 0, 0 };
    int64_t at = 0;
    uint64_t n = 0;
    dt__json_write(&out, (const char *)&n, sizeof n); /* the length; filled in below */
    dt__json_write(&out, "{\"__metadata__\":{\"format\":\"pt\"}", 31);
    for (int i = 0; i < w->weights; i++) {
        dt__weight *t = &w->weight[w->order[i]];
        if (t->file != f) continue;
        dt_json_open(&out, t->t.name, '{');
        dt_json_put_string(&out, "dtype", t->t.type);
        dt_json_open(&out, "shape", '[');
        for (int k = 0; k < t->t.shape.nd; k++) dt_json_put_int(&out, NULL, t->t.shape.d[k]);
        dt_json_shut(&out, ']');
        dt_json_open(&out, "data_offsets", '[');
        dt_json_put_int(&out, NULL, at);
        t->offset = at;
        dt_json_put_int(&out, NULL, at += t->bytes);
        dt_json_shut(&out, ']');
        dt_json_shut(&out, '}');
    }
    dt_json_shut(&out, '}');
    while (out.used % 8 != 0 && w->ctx->status == DT_OK) dt__json_write(&out, " ", 1);
    n = out.used - 8;
    if (n > DT__JSON_BYTES && w->ctx->status == DT_OK)
        dt_fail(w->ctx, DT_ERR_ARG, "%s: a header of %zu bytes, at most %d", file->path, (size_t)n,
            DT__JSON_BYTES);
    if (out.text) memcpy(out.text, &n, sizeof n);
    file->head = out.text;
    file->head_bytes = out.room;
    file->bytes = (int64_t)out.used + at;
    for (int i = 0; i < w->weights; i++)
        if (w->weight[i].file == f) w->weight[i].offset += (int64_t)out.used;
    return w->ctx->status == DT_OK && !w->sink.put ? dt__file_start(w, f, (int64_t)out.used)
                                                   : w->ctx->status;
}

static dt_status dt__llmc_head(dt_weights *w) {
    const dt_llmc *m = &w->desc.llmc;
    int32_t words[8] = { DT__LLMC_MAGIC, m->version, m->seq, m->vocab, m->layers, m->heads,
        m->width, m->padded_vocab };
    dt__weight_file *file = dt__weights_file(w, dt__join(w->ctx, w->path, strlen(w->path), ""));
    if (!file || !(file->head = (char *)dt__host_zeroed(w->ctx, DT__LLMC_HEAD, "a header")))
        return w->ctx->status;
    memcpy(file->head, words, sizeof words);
    file->head_bytes = DT__LLMC_HEAD;
    file->bytes = w->weight[15].offset + w->weight[15].bytes;
    return w->sink.put ? w->ctx->status : dt__file_start(w, 0, DT__LLMC_HEAD);
}

/* The list of tensors is complete: files, offsets, headers. */
static dt_status dt__weights_lay(dt_weights *w) {
    if (w->laid || w->ctx->status != DT_OK || dt__weights_names(w) != DT_OK) return w->ctx->status;
    if (w->desc.llmc.version) {
        dt__llmc_head(w);
    } else if (dt__st_files(w) == DT_OK && dt__weights_sort(w, 0, dt__by_type) == DT_OK) {
        for (int f = 0; f < w->files && w->ctx->status == DT_OK; f++) dt__st_head(w, f);
        dt__weights_names(w);
    }
    w->laid = 1;
    return w->ctx->status;
}

dt_status dt_weights_write(
    dt_weights *w, int index, int64_t first, int64_t count, dt_dtype from, const void *host) {
    dt_status status = dt__weights_check(w, "dt_weights_write", 1, index, first, count, from);
    if (status != DT_OK || dt__weights_lay(w) != DT_OK) return w ? w->ctx->status : status;
    dt__weight *t = &w->weight[index];
    const char *path = w->file[t->file].temp;
    int64_t size = (int64_t)dt_dtype_size(t->t.dtype), at = t->offset + first * size;
    int64_t step = from != t->t.dtype ? DT__WINDOW / size : count;
    if (count > t->t.count - t->written)
        return dt_fail(w->ctx, DT_ERR_ARG, "dt_weights_write(%s): elements were written twice",
            dt__name_text(t->t.name).s);
    if (!w->sink.put && dt__weights_use(w, t->file) != DT_OK) return w->ctx->status;
    if (from != t->t.dtype && !dt__weights_buffer(w, &w->window, DT__WINDOW)) return w->ctx->status;
    for (int64_t done = 0; done < count; done += step) {
        int64_t n = count - done < step ? count - done : step;
        const char *in = (const char *)host + (size_t)done * dt_dtype_size(from);
        if (from != t->t.dtype) {
            dt__convert(t->t.dtype, w->window, from, in, n);
            in = w->window;
        }
        if (w->sink.put)
            w->sink.put(w->sink.user, index, first + done, n, in, at + done * size);
        else if (dt__file_put(w->ctx, path, w->fd, in, n * size, at + done * size) != DT_OK)
            return w->ctx->status;
    }
    t->written += count;
    return DT_OK;
}

static dt_status dt__index_write(dt_weights *w) {
    dt_json_out out = { w->ctx, NULL, 0, 0 };
    char *path = dt__join(w->ctx, w->path, strlen(w->path), ".index.json");
    int64_t total = 0;
    for (int i = 0; i < w->weights; i++) total += w->weight[i].bytes;
    dt_json_open(&out, NULL, '{');
    dt_json_open(&out, "metadata", '{');
    dt_json_put_int(&out, "total_size", total);
    dt_json_shut(&out, '}');
    dt_json_open(&out, "weight_map", '{');
    for (int i = 0; i < w->weights; i++) {
        const dt__weight *t = &w->weight[w->order[i]];
        const char *file = w->file[t->file].path, *slash = strrchr(file, '/');
        dt_json_put_string(&out, t->t.name, slash ? slash + 1 : file);
    }
    dt_json_shut(&out, '}');
    dt_json_shut(&out, '}');
    if (path && dt_file_write(w->ctx, path, out.text, out.used) == DT_OK) {
        errno = 0; /* an older single file would be read in place of the shards */
        if (w->ctx->io.remove(w->ctx->io.user, w->path) != 0 && errno != 0 && errno != ENOENT)
            dt__io_fail(w->ctx, "%s: it is older than its shards, but stays", w->path);
    }
    dt_json_drop(&out);
    dt__text_drop(w->ctx, path);
    return w->ctx->status;
}

/* All is written: the temporary files get their names. */
static dt_status dt__weights_publish(dt_weights *w) {
    if (dt__weights_lay(w) != DT_OK) return w->ctx->status;
    for (int i = 0; i < w->weights; i++) {
        const dt__weight *t = &w->weight[i];
        if (t->written < t->due)
            return dt_fail(w->ctx, DT_ERR_ARG,
                "dt_weights_close(%s): tensor '%s' has %lld of its %lld elements", w->path,
                dt__name_text(t->t.name).s, (long long)t->written, (long long)t->due);
    }
    dt__weights_shut(w);
    for (int f = 0; f < w->files && w->ctx->status == DT_OK; f++)
        if (dt__file_publish(w->ctx, w->file[f].temp, w->file[f].path) == DT_OK)
            w->file[f].open = 0;
    int sharded = w->files && strcmp(w->file[0].path, w->path) != 0;
    return w->ctx->status == DT_OK && sharded ? dt__index_write(w) : w->ctx->status;
}

dt_status dt_weights_close(dt_weights *w) {
    if (!w) return DT_OK;
    dt_ctx *ctx = w->ctx;
    if (w->writing && !w->sink.put) dt__weights_publish(w);
    dt__weights_end(w);
    return ctx->status;
}

// ==== 20. Arithmetic on the CPU =================================================================

/* From here on no product and sum may be contracted to one rounding: the same source must give the
   same bits on every instruction set. clang knows the standard pragma; gcc ignores that one and
   takes an option instead. The others change no value. Nobody reads the exception flags, so loops
   with a ? b : c vectorise; and what -O3 copies loops and functions for is written out here
   already: without that a build takes a quarter less time and as much less code. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#ifdef __CUDACC__
#pragma nv_diag_suppress 1675 /* nvcc does not know the next pragma, and hands it to gcc */
#endif
#pragma GCC push_options
#pragma GCC optimize( \
    "fp-contract=off", "no-trapping-math", "no-unswitch-loops", "no-split-loops", "no-peel-loops")
#pragma GCC optimize("no-ipa-cp-clone", "no-tree-loop-distribution")
#endif

/* Instruction sets, worst first. Set 0 is always there; the others are chosen at run time by
   dt__isa_best. */
enum { DT__PLAIN = 0, DT__SIMD = 1 /* AVX2 with FMA, or NEON */, DT__AVX512 = 2, DT__ISAS = 3 };
/* C may lie anywhere */
typedef float dt__float4 __attribute__((vector_size(16), may_alias, aligned(4)));
typedef double dt__double2 __attribute__((vector_size(16), may_alias, aligned(8)));

/* Square roots of the plain set. A loop over sqrtf does not vectorise, because sqrtf may set
   errno. */
static inline dt__float4 dt__root4(dt__float4 v) {
#if defined(__SSE2__)
    return (dt__float4)_mm_sqrt_ps((__m128)v);
#else
    for (int i = 0; i < 4; i++) v[i] = sqrtf(v[i]);
    return v;
#endif
}

static inline dt__double2 dt__root2(dt__double2 v) {
    for (int i = 0; i < 2; i++) v[i] = sqrt(v[i]);
    return v;
}

/* e^x in float, within 1.1 ulp, without branches, so that loops over it vectorise; the coefficients
   are Cephes'. x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to an integer and
   leaves it in the low bits. 2^n is applied in two halves, so that results below 2^-126 come out
   denormal and large ones infinite. */
DT__INLINE float dt__expf(float x) {
    const float magic = 12582912.0f;
    /* e^-105 rounds to 0, e^89 to infinity; a NaN passes both comparisons */
    x = x < -105.0f ? -105.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = x * 1.44269504f + magic, n = shifted - magic;
    /* ln 2 in two parts; the product with the first is exact */
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits, low_bits, high_bits;
    float low, high;
    memcpy(&bits, &shifted, 4);
    bits = bits - 0x4b400000u + 256; /* n + 256, positive */
    low_bits = (bits / 2 - 1) << 23; /* 2^(half of n) */
    high_bits = (bits - bits / 2 - 1) << 23;
    memcpy(&low, &low_bits, 4);
    memcpy(&high, &high_bits, 4);
    return p * low * high;
}

/* ln x in float, within 1 ulp, as above: x = 2^e m with m in [sqrt(1/2), sqrt 2). */
DT__INLINE float dt__logf(float x) {
    float normal = x < 1.17549435e-38f ? x * 8388608.0f : x, m;
    uint32_t bits, m_bits;
    memcpy(&bits, &normal, 4);
    bits -= 0x3f3504f3u; /* the bits of sqrt(1/2) */
    m_bits = (bits & 0x7fffffu) + 0x3f3504f3u;
    memcpy(&m, &m_bits, 4);
    float e = (float)((int32_t)bits >> 23) - (x < 1.17549435e-38f ? 23.0f : 0.0f), f = m - 1.0f,
          z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    p = f * z * p - 2.12194440e-4f * e - 0.5f * z + f + 0.693359375f * e;
    p = x > 3.40282347e38f || x != x ? x : p; /* infinity and NaN are their own logarithms */
    p = x == 0.0f ? -INFINITY : p;
    return x < 0.0f ? NAN : p;
}

/* tanh x in float: a polynomial where 1 - 2 / (e^2x + 1) would cancel. */
DT__INLINE float dt__tanhf(float x) {
    float z = x * x, far = 1.0f - 2.0f / (dt__expf(2.0f * x) + 1.0f);
    float p = -5.997020093e-3f;
    p = p * z + 2.091450411e-2f;
    p = p * z - 5.382798285e-2f;
    p = p * z + 1.333253472e-1f;
    p = p * z - 3.333332266e-1f;
    return z < 0.39f ? x + x * z * p : far;
}

/* The normal distribution function in float: e^(x^2/2) times its lower tail is a polynomial in 1 /
   (1 + |x| / sqrt 8), fitted to a relative error of 5e-8. */
DT__INLINE float dt__phif(float x) {
    float z = (x < 0 ? -x : x) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z);
    float p = 1.617393085e-2f;
    p = p * t - 1.435691533e-1f;
    p = p * t + 4.745959941e-1f;
    p = p * t - 7.278496308e-1f;
    p = p * t + 4.665797343e-1f;
    p = p * t - 1.210152256e-1f;
    p = p * t + 2.327887633e-1f;
    p = p * t + 2.372273263e-1f;
    p = p * t + 2.830107842e-1f;
    p = p * t + 2.820574645e-1f;
    float tail = 0.5f * t * p * dt__expf(-z * z);
    return x < 0 ? tail : 1.0f - tail;
}

/* Two words of the counter RNG as a number in [0, 1) with 53 bits. */
static double dt__unit(uint32_t high, uint32_t low) {
    return (double)(((uint64_t)high << 32 | low) >> 11) * (1.0 / 9007199254740992.0);
}

static void *dt__align64(void *p) { return (char *)p + (64 - ((uintptr_t)p & 63)) % 64; }

#ifdef DT_USE_CBLAS
#include <cblas.h>
#include <limits.h>
#endif

/* With DT_USE_OMP, products, attention and what goes over single numbers share their work among
   OpenMP's threads. Each result is computed by one thread in the same order, so the bits do not
   change. */
#ifdef DT_USE_OMP
#include <omp.h>
#define DT__PARALLEL _Pragma("omp parallel for schedule(static) num_threads(dt__omp_threads())")
static int dt__omp_threads(void) { return omp_in_parallel() ? 1 : omp_get_max_threads(); }
static int dt__omp_thread(void) { return omp_get_thread_num(); }
#else
#define DT__PARALLEL
static int dt__omp_threads(void) { return 1; }
static int dt__omp_thread(void) { return 0; }
#endif

/* Whether the processor multiplies pairs of bf16 faster than it does floats. All that have the
   instruction could use it, but Intel's run it at half the rate of float: measured, 86 against 172
   GFLOP/s of one core of the fifth Xeon generation. They widen while they pack. */
#if defined(__x86_64__)
static int dt__pairs_pay(void) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd");
}
#endif

/* Into which pieces a product is cut. They decide what stays in which cache, and no bit of the
   result. */
enum {
    DT__DEPTH = 512,        /* steps of K at a time, at most: a panel of 14 x 512 floats is 28 KB */
    DT__BLOCK = 1152 << 10, /* bytes of a block of B */
    DT__GROUP = 8,          /* panels of A packed at a time */
    /* panels of rows whose unfinished tiles wait, where K is more than one piece */
    DT__PANELS = 20
};
typedef struct dt__pieces {
    int64_t depth, columns, tiles;
} dt__pieces;

static dt__pieces dt__matmul_pieces(int64_t n, int64_t steps, size_t size) {
    int64_t pieces = (steps + DT__DEPTH - 1) / DT__DEPTH, blocks;
    dt__pieces p = { 1, 32, 14 * 32 };
    if (pieces > 0) p.depth = (steps + pieces - 1) / pieces;
    p.columns = DT__BLOCK / (int64_t)size / p.depth / 32 * 32;
    blocks = (n + p.columns - 1) / p.columns;
    /* no tile is wider than 32 */
    if (blocks > 0) p.columns = ((n + blocks - 1) / blocks + 31) / 32 * 32;
    if (pieces > 1) p.tiles = DT__PANELS * 14 * p.columns;
    return p;
}

/* elements; no memory holds more, so scratch is SIZE_MAX */
#define DT__WORK_MOST ((int64_t)1 << 48)

/* Room for panels of A of at most 14 rows, a block of B, and tiles; two numbers are written past a
   panel. Never less for a larger product, so that scratch for the largest of several serves all. */
size_t dt_matmul_work(int64_t n, int64_t k, dt_dtype dtype) {
    size_t size = dt__real_size(dtype), wide, depth, block = DT__BLOCK / size, numbers;
    if (n < 0 || k < 0) return 0;
    wide = ((size_t)n + 31) / 32 * 32 + 32;
    depth = k < 1 ? 1 : k < DT__DEPTH ? (size_t)k : (size_t)DT__DEPTH;
    numbers = (wide < block / depth ? wide * depth : block) + depth * DT__GROUP * 14 + 14 * 32 + 2;
    if (k > DT__DEPTH) /* pieces are then at least half as deep, and as much wider */
        numbers += DT__PANELS * 14 * (wide < 2 * block / DT__DEPTH ? wide : 2 * block / DT__DEPTH);
    return (numbers * size + 127) / 64 * 64 * (size_t)dt__omp_threads();
}

/* Room for six rows: a kernel's rows widened, and sums over rows. */
size_t dt_row_work(int64_t cols, dt_dtype dtype) {
    if (cols < 0 || cols > DT__WORK_MOST) return cols < 0 ? 0 : (size_t)-1;
    return 6 * (size_t)cols * dt__real_size(dtype) + 64;
}

/* no vector tile has more columns, no tile of attention more than 8 rows */
enum { DT__LANES = 32 };

/* What attention keeps for a head, in numbers of the type computed in: see attention_scratch. */
size_t dt_attention_work(int64_t tk, int64_t dim, dt_dtype dtype) {
    if (tk < 0 || dim < 0) return 0;
    if (tk > DT__WORK_MOST || dim > DT__WORK_MOST || tk + 16 > DT__WORK_MOST / (dim + DT__LANES))
        return (size_t)-1;
    size_t keys = (size_t)(tk + 15) / 16 * 16,
           dims = (size_t)(dim + DT__LANES - 1) / DT__LANES * DT__LANES;
    size_t of_keys = 6 * keys * dims + 3 * keys * DT__LANES + 4 * keys,
           of_queries = (6 * dims + 16) * DT__LANES;
    return ((of_keys + of_queries) * dt__real_size(dtype) + 127) / 64 * 64 *
           (size_t)dt__omp_threads();
}

/* numbers that a kernel takes at a time: what it widens or sums is on the stack */
#define DT__TILE 512

/* Goes over an array of some shape in runs of at most DT__TILE elements of the last dimension. */
typedef struct dt__runs {
    dt_shape shape;
    /* indices of the run's first element; its place if dense; its length */
    int64_t at[DT_MAX_DIMS], out, n;
    int done;
} dt__runs;

static dt__runs dt__runs_begin(dt_shape shape) {
    dt__runs r;
    memset(&r, 0, sizeof r);
    if (shape.nd == 0) shape.d[shape.nd++] = 1;
    r.shape = shape;
    r.done = dt_count(shape) == 0;
    return r;
}

/* The next run, and where it begins in arrays with these strides. */
static int dt__runs_next(
    dt__runs *r, const int64_t *stride_a, const int64_t *stride_b, int64_t *a, int64_t *b) {
    int last = r->shape.nd - 1, i = last;
    r->out += r->n;
    r->at[last] += r->n;
    while (r->n && i > 0 && r->at[i] == r->shape.d[i]) {
        r->at[i--] = 0;
        r->at[i]++;
    }
    if (r->done || (r->n && r->at[0] == r->shape.d[0])) return 0;
    int64_t left = r->shape.d[last] - r->at[last];
    r->n = left < DT__TILE ? left : DT__TILE;
    *a = *b = 0;
    for (i = 0; i <= last; i++) {
        *a += r->at[i] * stride_a[i];
        *b += r->at[i] * stride_b[i];
    }
    return 1;
}

/* The kernels of one type to compute in and one instruction set. */
#define DT__FLOAT_KERNELS(X) \
    X(init) \
    X(sum) \
    X(max) \
    X(binary) \
    X(unary) \
    X(unary_back) \
    X(glu) \
    X(glu_back) \
    X(softmax) \
    X(softmax_back) \
    X(norm) \
    X(norm_back) \
    X(rope) \
    X(dropout) \
    X(embedding) \
    X(embedding_back) \
    X(topk) \
    X(spread) \
    X(matmul) \
    X(attention) \
    X(attention_back) \
    X(cross_entropy) \
    X(cross_entropy_join) \
    X(cross_entropy_back) \
    X(mse) \
    X(mse_back) \
    X(square_sums) \
    X(adamw) \
    X(sgd) \
    X(momentum) \
    X(frozen_adam) \
    X(sign_pack) \
    X(sign_unpack)
#define DT__VARIANT_KERNELS(X) X(fill) X(reduce) X(permute) DT__FLOAT_KERNELS(X)
typedef struct dt__variant {
#define DT__VARIANT_ENTRY(k) dt_status (*k)(const dt_##k##_args *a);
    DT__VARIANT_KERNELS(DT__VARIANT_ENTRY)
#undef DT__VARIANT_ENTRY
} dt__variant;

#ifdef __cplusplus
}
#endif

#if defined(__cplusplus) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif /* DT_TENSOR_IMPL */

#ifdef DT__BITS
/* This part of the file is read once for every element type and instruction set: the header
   includes itself with DT__BITS (32 float, 64 double, 1 int32_t) and DT__ISA set. DT__K(name) is
   name with the type and the set appended, DT__FN begins every function. The loops are plain C that
   the compiler vectorises (-O3); only the tile of the matrix product is written with intrinsics. No
   operation here may be contracted to a fused multiply-add, and partial sums have a fixed number of
   lanes, so every instruction set gives the same bits outside the matrix product. */
#define DT__JOIN2(name, suffix) dt__##name##suffix
#define DT__JOIN(name, suffix) DT__JOIN2(name, suffix)
#define DT__K(name) DT__JOIN(name, DT__SUFFIX)

#if DT__BITS == 32
#define DT__REAL float
#define DT__WIDE float
#define DT__EXP(x) dt__expf(x)
#define DT__LOG(x) dt__logf(x)
#define DT__TANH(x) dt__tanhf(x)
#define DT__PHI(x) dt__phif(x)
#define DT__GEMM cblas_sgemm
#elif DT__BITS == 64
#define DT__REAL double
#define DT__WIDE double
#define DT__EXP(x) exp(x)
#define DT__LOG(x) log(x)
#define DT__TANH(x) tanh(x)
#define DT__PHI(x) (0.5 * erfc(-0.7071067811865476 * (x)))
#define DT__GEMM cblas_dgemm
#else
#define DT__REAL int32_t
#define DT__WIDE int64_t
#endif

/* The tile of the product is DT__MR rows of two vectors. Its sums must fit the registers: 14 rows x
   2 of 32 registers with AVX-512, 6 x 2 of 16 with AVX2, 8 x 2 of 32 with NEON, 4 x 2 of 16 with
   any 16-byte vector. */
#if DT__BITS == 1
#define DT__FN static
#define DT__SUFFIX _i32
#elif DT__ISA == 2 /* AVX-512 */
#define DT__FN static __attribute__((target("avx512f")))
#define DT__MR 14
#define DT__ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define DT__MA 8
#define DT__ROWS_A(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#if DT__BITS == 32
#define DT__SUFFIX _f32_avx512
#define DT__V __m512
#define DT__ZERO _mm512_setzero_ps()
#define DT__LOAD(p) _mm512_loadu_ps(p)
#define DT__STORE(p, v) _mm512_storeu_ps(p, v)
#define DT__FMADD(x, v, sum) _mm512_fmadd_ps(_mm512_set1_ps(x), v, sum)
#define DT__ROOT(v) _mm512_maskz_sqrt_ps(0xffff, v) /* gcc 12 warns of the plain form in C++ */
#else
#define DT__SUFFIX _f64_avx512
#define DT__V __m512d
#define DT__ZERO _mm512_setzero_pd()
#define DT__LOAD(p) _mm512_loadu_pd(p)
#define DT__STORE(p, v) _mm512_storeu_pd(p, v)
#define DT__FMADD(x, v, sum) _mm512_fmadd_pd(_mm512_set1_pd(x), v, sum)
#define DT__ROOT(v) _mm512_maskz_sqrt_pd(0xff, v)
#endif
#elif DT__ISA == 1 && defined(__x86_64__) /* AVX2 and FMA */
#define DT__FN static __attribute__((target("avx2,fma")))
#define DT__MR 6
#define DT__ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define DT__MA 4
#define DT__ROWS_A(X) X(0) X(1) X(2) X(3)
#if DT__BITS == 32
#define DT__SUFFIX _f32_avx2
#define DT__V __m256
#define DT__ZERO _mm256_setzero_ps()
#define DT__LOAD(p) _mm256_loadu_ps(p)
#define DT__STORE(p, v) _mm256_storeu_ps(p, v)
#define DT__FMADD(x, v, sum) _mm256_fmadd_ps(_mm256_set1_ps(x), v, sum)
#define DT__ROOT(v) _mm256_sqrt_ps(v)
#else
#define DT__SUFFIX _f64_avx2
#define DT__V __m256d
#define DT__ZERO _mm256_setzero_pd()
#define DT__LOAD(p) _mm256_loadu_pd(p)
#define DT__STORE(p, v) _mm256_storeu_pd(p, v)
#define DT__FMADD(x, v, sum) _mm256_fmadd_pd(_mm256_set1_pd(x), v, sum)
#define DT__ROOT(v) _mm256_sqrt_pd(v)
#endif
#elif DT__ISA == 1 /* NEON */
#define DT__FN static
#define DT__MR 8
#define DT__ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define DT__MA 8
#define DT__ROWS_A(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#if DT__BITS == 32
#define DT__SUFFIX _f32_neon
#define DT__V float32x4_t
#define DT__ZERO vdupq_n_f32(0)
#define DT__LOAD(p) vld1q_f32(p)
#define DT__STORE(p, v) vst1q_f32(p, v)
#define DT__FMADD(x, v, sum) vfmaq_n_f32(sum, v, x)
#define DT__ROOT(v) vsqrtq_f32(v)
#else
#define DT__SUFFIX _f64_neon
#define DT__V float64x2_t
#define DT__ZERO vdupq_n_f64(0)
#define DT__LOAD(p) vld1q_f64(p)
#define DT__STORE(p, v) vst1q_f64(p, v)
#define DT__FMADD(x, v, sum) vfmaq_n_f64(sum, v, x)
#define DT__ROOT(v) vsqrtq_f64(v)
#endif
#else /* plain: 16-byte vectors of the compiler, a product and a sum */
#define DT__FN static
#define DT__MR 4
#define DT__ROWS(X) X(0) X(1) X(2) X(3)
#define DT__MA 4
#define DT__ROWS_A(X) X(0) X(1) X(2) X(3)
#if DT__BITS == 32
#define DT__SUFFIX _f32_plain
#define DT__V dt__float4
#define DT__ROOT(v) dt__root4(v)
#else
#define DT__SUFFIX _f64_plain
#define DT__V dt__double2
#define DT__ROOT(v) dt__root2(v)
#endif
#define DT__ZERO \
    (DT__V) { 0 }
#define DT__LOAD(p) (*(const DT__V *)(p))
#define DT__STORE(p, v) (*(DT__V *)(p) = (v))
#define DT__FMADD(x, v, sum) ((sum) + (x) * (v))
#endif

#if DT__BITS != 1 /* the product is for floating types only */
#define DT__NV ((int64_t)(sizeof(DT__V) / sizeof(DT__REAL))) /* elements of a vector */
#define DT__NR (2 * DT__NV)                                  /* columns of a tile */
/* its rows as whole vectors: at most two more */
#define DT__MORE ((DT__MR + DT__NV - 1) / DT__NV * DT__NV)
#endif

/* ---- numbers in storage ---- */

#if DT__BITS == 32
DT__FN void DT__K(widen)(dt_dtype dtype, const uint16_t *in, int64_t n, DT__REAL *out) {
    if (dtype == DT_BF16)
        for (int64_t i = 0; i < n; i++) out[i] = dt__bf16_to_f32(in[i]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = dt__f16_to_f32(in[i]);
}

DT__FN void DT__K(narrow)(dt_dtype dtype, uint16_t *out, int64_t n, const DT__REAL *in) {
    if (dtype == DT_BF16)
        for (int64_t i = 0; i < n; i++) out[i] = dt__f32_to_bf16(in[i]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = dt__f32_to_f16(in[i]);
}
#endif

/* n numbers of an array from element `at`, to compute with: where they lie, or widened in buf. */
DT__FN const DT__REAL *DT__K(get)(
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

/* The same of numbers that lie `stride` apart. */
DT__FN const DT__REAL *DT__K(get_apart)(
    dt_dtype dtype, const void *array, int64_t at, int64_t stride, int64_t n, DT__REAL *buf) {
    if (stride == 1) return DT__K(get)(dtype, array, at, n, buf);
    for (int64_t i = 0; i < n; i++) {
        DT__REAL one;
        buf[i] = *DT__K(get)(dtype, array, at + i * stride, 1, &one);
    }
    return buf;
}

/* array[at..] (+)= n finished results, rounded once. Nothing where array is NULL. */
DT__FN void DT__K(give)(
    dt_dtype dtype, void *array, int64_t at, int64_t n, const DT__REAL *row, int accumulate) {
    if (!array) return;
#if DT__BITS == 32
    if (dt__narrow(dtype)) {
        DT__REAL sum[DT__TILE];
        for (int64_t j = 0; j < n; j += DT__TILE) {
            int64_t have = n - j < DT__TILE ? n - j : DT__TILE;
            uint16_t *out = (uint16_t *)array + at + j;
            if (accumulate) DT__K(widen)(dtype, out, have, sum);
            if (accumulate)
                for (int64_t i = 0; i < have; i++) sum[i] += row[j + i];
            DT__K(narrow)(dtype, out, have, accumulate ? sum : row + j);
        }
        return;
    }
#elif DT__BITS == 64
    if (dt__narrow(dtype)) { /* the 16-bit copy of a parameter */
        for (int64_t i = 0; i < n; i++) dt__set_number(dtype, array, (size_t)(at + i), row[i]);
        return;
    }
#endif
    DT__REAL *out = (DT__REAL *)array + at;
    (void)dtype;
    if (accumulate)
        for (int64_t i = 0; i < n; i++) out[i] += row[i];
    else if (out != row)
        memcpy(out, row, (size_t)n * sizeof *out);
}

#if DT__BITS != 1

/* ---- functions of one number ---- */

/* With u = sqrt(2/pi) (x + 0.044715 x^3), 0.5 (1 + tanh u) is the logistic function 1 / (1 +
   e^(-2u)): one exponential, and no cancellation where tanh u is close to -1. */
#define DT__GELU_A ((DT__REAL)0.7978845608028654) /* sqrt(2/pi) */
#define DT__GELU_B ((DT__REAL)0.044715)
#define DT__LOGISTIC(x) (1 / (1 + DT__EXP(-(x))))

/* y = f(x); y may be x. */
DT__FN void DT__K(act)(
    int act, const DT__REAL *x, int64_t n, DT__REAL *y, DT__REAL scale, DT__REAL shift) {
    switch (act) {
    case DT_ACT_GELU:
        for (int64_t i = 0; i < n; i++)
            y[i] = x[i] / (1 + DT__EXP(-2 * DT__GELU_A * (x[i] + DT__GELU_B * x[i] * x[i] * x[i])));
        break;
    case DT_ACT_GELU_ERF:
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * DT__PHI(x[i]);
        break;
    case DT_ACT_SILU:
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * DT__LOGISTIC(x[i]);
        break;
    case DT_ACT_RELU:
        for (int64_t i = 0; i < n; i++) y[i] = x[i] < 0 ? 0 : x[i];
        break;
    case DT_ACT_TANH:
        for (int64_t i = 0; i < n; i++) y[i] = DT__TANH(x[i]);
        break;
    case DT_ACT_EXP:
        for (int64_t i = 0; i < n; i++) y[i] = DT__EXP(x[i]);
        break;
    case DT_ACT_LN:
        for (int64_t i = 0; i < n; i++) y[i] = DT__LOG(x[i]);
        break;
    case DT_ACT_AFFINE:
        for (int64_t i = 0; i < n; i++) y[i] = scale * x[i] + shift;
        break;
    default:
        if (y != x) memcpy(y, x, (size_t)n * sizeof *y);
        break;
    }
}

/* gelu'(x) = s + x s (1 - s) 2 u'. Past +-30 the second term is zero; the clamps keep infinity
   times zero away. With s = 1 / (1 + e), 1 - s is e s: where s is close to 1, and x^3 large, a
   difference would have too few digits. */
DT__FN inline DT__REAL DT__K(gelu_slope)(DT__REAL x) {
    x = x < -30 ? -30 : x;
    x = x > 30 ? 30 : x;
    DT__REAL u = DT__GELU_A * (x + DT__GELU_B * x * x * x),
             du = DT__GELU_A * (1 + 3 * DT__GELU_B * x * x);
    u = u < -40 ? -40 : u;
    u = u > 40 ? 40 : u;
    DT__REAL e = DT__EXP(-2 * u), s = 1 / (1 + e);
    return s + 2 * x * s * (e * s) * du;
}

/* phi(x) + x times the normal density */
DT__FN inline DT__REAL DT__K(gelu_erf_slope)(DT__REAL x) {
    x = x < -30 ? -30 : x;
    x = x > 30 ? 30 : x;
    return DT__PHI(x) + x * (DT__REAL)0.3989422804014327 * DT__EXP((DT__REAL)-0.5 * x * x);
}

DT__FN inline DT__REAL DT__K(silu_slope)(DT__REAL x) {
    x = x < -80 ? -80 : x; /* e^80 is finite, and -80 e^-80 is nothing beside any x */
    x = x > 80 ? 80 : x;
    DT__REAL e = DT__EXP(-x), s = 1 / (1 + e);
    return s + x * s * (e * s);
}

DT__FN inline DT__REAL DT__K(tanh_slope)(DT__REAL x) {
    DT__REAL t = DT__TANH(x);
    return 1 - t * t;
}

/* dx = d f'(x); dx may be d. */
DT__FN void DT__K(act_back)(
    int act, const DT__REAL *x, const DT__REAL *d, int64_t n, DT__REAL *dx, DT__REAL scale) {
    switch (act) {
    case DT_ACT_GELU:
        for (int64_t i = 0; i < n; i++) dx[i] = d[i] * DT__K(gelu_slope)(x[i]);
        break;
    case DT_ACT_GELU_ERF:
        for (int64_t i = 0; i < n; i++) dx[i] = d[i] * DT__K(gelu_erf_slope)(x[i]);
        break;
    case DT_ACT_SILU:
        for (int64_t i = 0; i < n; i++) dx[i] = d[i] * DT__K(silu_slope)(x[i]);
        break;
    case DT_ACT_RELU:
        for (int64_t i = 0; i < n; i++) dx[i] = x[i] > 0 ? d[i] : 0;
        break;
    case DT_ACT_TANH:
        for (int64_t i = 0; i < n; i++) dx[i] = d[i] * DT__K(tanh_slope)(x[i]);
        break;
    case DT_ACT_EXP:
        for (int64_t i = 0; i < n; i++) dx[i] = d[i] * DT__EXP(x[i]);
        break;
    case DT_ACT_LN:
        for (int64_t i = 0; i < n; i++) dx[i] = d[i] / x[i];
        break;
    case DT_ACT_AFFINE:
        for (int64_t i = 0; i < n; i++) dx[i] = d[i] * scale;
        break;
    default:
        if (dx != d) memcpy(dx, d, (size_t)n * sizeof *dx);
        break;
    }
}
#undef DT__GELU_A
#undef DT__GELU_B

// ==== 21. Matrix product on the CPU =============================================================

/* `rows` x `cols` finished sums of A B to C, at element `at` and column j0: all the fusions are
   here, so that every product shares them. An activation goes over all rows at once, and over what
   lies between them: rows are NR apart, unless it is one. Inlined with the constant width of a full
   tile and once more for the others. The tile is lost. */
DT__FN inline __attribute__((always_inline)) void DT__K(finish_rows)(const dt_matmul_args *a,
    int64_t at, int64_t j0, int64_t rows, int64_t cols, DT__REAL *tile, int64_t ld) {
    DT__REAL buf[DT__LANES], before[14 * DT__LANES];
    const DT__REAL *x = before;
    dt_dtype to = dt__wide(a->dtype, a->wide);
    int64_t all = (rows - 1) * ld + cols;
    const DT__REAL *bias = a->bias ? DT__K(get)(a->dtype, a->bias, j0, cols, buf) : NULL;
    if (a->derivative && cols < DT__NR) memset(before, 0, sizeof before);
    for (int64_t i = 0; i < rows; i++) {
        DT__REAL *t = tile + i * ld;
        if (bias)
            for (int64_t j = 0; j < cols; j++) t[j] += bias[j];
        if (a->before && !a->derivative)
            DT__K(give)(a->dtype, a->before, at + i * a->ldc, cols, t, 0);
        if (!a->derivative) continue;
        x = DT__K(get)(a->dtype, a->before, at + i * a->ldc, cols, before + i * DT__NR);
        if (rows > 1)
            for (int64_t j = 0; j < cols; j++) before[i * DT__NR + j] = x[j];
    }
    if (a->derivative)
        DT__K(act_back)(a->activation, rows > 1 ? before : x, tile, all, tile, 1);
    else if (a->activation)
        DT__K(act)(a->activation, tile, all, tile, 1, 0);
    for (int64_t i = 0; i < rows; i++, at += a->ldc) {
        DT__REAL *t = tile + i * ld;
        if (a->residual) {
            const DT__REAL *residual = DT__K(get)(a->dtype, a->residual, at, cols, buf);
            for (int64_t j = 0; j < cols; j++) t[j] += residual[j];
        }
        if (dt__narrow(to)) {
            DT__K(give)(to, a->c, at, cols, t, a->accumulate);
            continue;
        }
        DT__REAL *c = (DT__REAL *)a->c + at;
        if (a->accumulate)
            for (int64_t j = 0; j < cols; j++) c[j] += t[j];
        else if (c != t)
            for (int64_t j = 0; j < cols; j++) c[j] = t[j];
    }
}

/* The same at (i0, j0) of one batch. */
DT__FN void DT__K(matmul_finish)(const dt_matmul_args *a, int64_t batch, int64_t i0, int64_t j0,
    int64_t rows, int64_t cols, DT__REAL *tile, int64_t ld) {
    int64_t at = batch * a->stride_c + i0 * a->ldc + j0;
    if (tile == (DT__REAL *)a->c + at && !a->bias && !a->before && !a->activation && !a->residual)
        return;
    if (cols == DT__NR)
        DT__K(finish_rows)(a, at, j0, rows, DT__NR, tile, ld);
    else
        DT__K(finish_rows)(a, at, j0, rows, cols, tile, ld);
}

/* What the end of a tile will read is asked for before the tile is summed, so that it is there in
   time. */
DT__FN void DT__K(ask_end)(
    const dt_matmul_args *a, int64_t batch, int64_t i0, int64_t j0, int64_t rows, int64_t cols) {
    const char *from = (const char *)(a->derivative ? a->before : a->residual);
    int64_t at = batch * a->stride_c + i0 * a->ldc + j0, size = (int64_t)dt_dtype_size(a->dtype);
    for (int64_t i = 0; from && i < rows; i++)
        for (int64_t j = 0; j < cols * size; j += 64)
            __builtin_prefetch(from + (at + i * a->ldc) * size + j);
}

/* The product as it is defined: every element a dot product of K terms, k ascending. */
DT__FN void DT__K(matmul_naive)(const dt_matmul_args *a, int64_t batch) {
    for (int64_t i = 0; i < a->m; i++) {
        for (int64_t j = 0; j < a->n; j++) {
            DT__REAL sum = 0, x, y;
            for (int64_t p = 0; p < a->k; p++) {
                int64_t at_a = batch * a->stride_a + (a->trans_a ? p * a->lda + i : i * a->lda + p);
                int64_t at_b = batch * a->stride_b + (a->trans_b ? j * a->ldb + p : p * a->ldb + j);
                sum += *DT__K(get)(a->dtype, a->a, at_a, 1, &x) *
                       *DT__K(get)(a->dtype, a->b, at_b, 1, &y);
            }
            DT__K(matmul_finish)(a, batch, i, j, 1, 1, &sum, 1);
        }
    }
}

/* One tile, the only place with intrinsics: tile(R,NR) += panel_a(k,R)^T panel_b(k,NR), where R is
   MR for the product and MA for attention; rows of panel_a are `step` apart and the tile's rows ld.
   The 2 x R sums stay in registers, from zero if the tile is fresh; an element is one chain of K
   multiply-adds, k ascending, wherever its tile lies. Meanwhile comes what is read later: unless
   apart is 0, every 8 steps a line from `ask` on. */
#define DT__TILE_ZERO(i) DT__V c##i##_0 = DT__ZERO, c##i##_1 = DT__ZERO;
#define DT__TILE_LOAD(i) \
    c##i##_0 = DT__LOAD(tile + i * ld); \
    c##i##_1 = DT__LOAD(tile + i * ld + DT__NV);
#define DT__TILE_STEP(i) \
    c##i##_0 = DT__FMADD(a[i], b0, c##i##_0); \
    c##i##_1 = DT__FMADD(a[i], b1, c##i##_1);
#define DT__TILE_STORE(i) \
    DT__STORE(tile + i * ld, c##i##_0); \
    DT__STORE(tile + i * ld + DT__NV, c##i##_1);
#define DT__TILE_FUNCTION(name, ROWS, STEP) \
    DT__FN void DT__K(name)(int64_t k, const DT__REAL *a, int64_t step, const DT__REAL *b, \
        DT__REAL *tile, int64_t ld, int fresh, const char *ask, int64_t apart) { \
        ROWS(DT__TILE_ZERO) \
        if (!fresh) { \
            ROWS(DT__TILE_LOAD) \
        } \
        for (int64_t p = 0; p < k; p++, a += step, b += DT__NR) { \
            if (apart && p % 8 == 0) { \
                __builtin_prefetch(ask, 0, 2); \
                ask += apart; \
            } \
            DT__V b0 = DT__LOAD(b), b1 = DT__LOAD(b + DT__NV); \
            ROWS(STEP) \
        } \
        ROWS(DT__TILE_STORE) \
    }
DT__TILE_FUNCTION(matmul_tile, DT__ROWS, DT__TILE_STEP)
DT__TILE_FUNCTION(attention_tile, DT__ROWS_A, DT__TILE_STEP)

/* bf16 by the processor's own dot product of pairs: a word holds terms 2p and 2p + 1, and a tile of
   words is read like a tile of floats. Each step adds the two products of a pair to the sum. */
#if DT__BITS == 32 && DT__ISA == 2
#define DT__PAIR_STEP(i) \
    c##i##_0 = _mm512_dpbf16_ps(c##i##_0, (__m512bh)_mm512_set1_ps(a[i]), (__m512bh)b0); \
    c##i##_1 = _mm512_dpbf16_ps(c##i##_1, (__m512bh)_mm512_set1_ps(a[i]), (__m512bh)b1);
#pragma push_macro("DT__FN")
#undef DT__FN
#define DT__FN static __attribute__((target("avx512f,avx512bf16")))
DT__TILE_FUNCTION(matmul_pair_tile, DT__ROWS, DT__PAIR_STEP)
#pragma pop_macro("DT__FN")
#undef DT__PAIR_STEP
#endif
#undef DT__TILE_FUNCTION
#undef DT__TILE_ZERO
#undef DT__TILE_LOAD
#undef DT__TILE_STEP
#undef DT__TILE_STORE

/* What the fast product keeps in `work`, and how. A step is one term of K, or a pair of bf16
   terms. */
typedef struct DT__K(matmul_plan) {
    const dt_matmul_args *args;
    dt__pieces pieces;
    /* DT__GROUP panels of A: depth x MR each; the one in use stays in the first-level cache */
    DT__REAL *a;
    /* a block of B in panels: depth x columns, stays in the second-level cache */
    DT__REAL *b;
    /* unfinished tiles of one block of C; one tile where K is one piece or C itself can hold
       them */
    DT__REAL *tiles;
    int whole; /* K is one piece */
    /* C has the type computed in and is overwritten: tiles are summed where they belong */
    int in_c;
    int pairs;
    void (*tile)(int64_t k, const DT__REAL *a, int64_t step, const DT__REAL *b, DT__REAL *to,
        int64_t ld, int fresh, const char *ask, int64_t apart);
} DT__K(matmul_plan);

/* Packing makes what the tile reads one stream. A panel (steps,width) from a source whose row p is
   row p of the panel, at element `at`; columns past `have` are zero and go through the tile like
   any others. */
DT__FN void DT__K(pack_rows)(dt_dtype dtype, int pairs, DT__REAL *panel, int64_t width,
    const void *from, int64_t at, int64_t ld, int64_t have, int64_t terms) {
    int more = have >= DT__MORE; /* what is copied past a panel's row, the next one overwrites */
    if (have > width) have = width;
#if DT__BITS == 32 && DT__ISA == 2
    if (pairs) {
        for (int64_t p = 0; p < terms; p += 2, panel += width, at += 2 * ld) {
            const uint16_t *one = (const uint16_t *)from + at,
                           *two = p + 1 < terms ? one + ld : NULL;
            uint32_t words[DT__LANES] = { 0 };
            for (int64_t i = 0; i < have; i++) words[i] = one[i];
            if (two)
                for (int64_t i = 0; i < have; i++) words[i] |= (uint32_t)two[i] << 16;
            memcpy(panel, words, (size_t)width * sizeof *words);
        }
        return;
    }
#endif
    (void)pairs;
    /* sizes known to cc */
    int plain = !dt__narrow(dtype) && have == width && (width == DT__NR || width == DT__MR);
    for (int64_t p = 0; p < terms; p++, panel += width, at += ld) {
        const DT__REAL *row = DT__K(get)(dtype, from, at, have, panel);
        int64_t i = 0;
        if (plain && width == DT__NR)
            memcpy(panel, row, DT__NR * sizeof *row);
        else if (plain && more && p + 1 < terms)
            memcpy(panel, row, DT__MORE * sizeof *row);
        else if (plain)
            memcpy(panel, row, DT__MR * sizeof *row);
        if (plain) continue;
        for (; i < have; i++) panel[i] = row[i];
        for (; i < width; i++) panel[i] = 0;
    }
}

/* Rows of n words become as many columns of a panel, DT__TURN at a time. What a row of the panel
   writes past its width, the next one overwrites. */
#if DT__BITS == 32 && DT__ISA == 2
#define DT__TURN 16
/* gcc 12 warns of the plain forms in C++ */
#define DT__LOW(x, y) _mm512_maskz_unpacklo_ps(0xffff, x, y)
#define DT__HIGH(x, y) _mm512_maskz_unpackhi_ps(0xffff, x, y)
#define DT__LOW2(x, y) \
    _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xff, _mm512_castps_pd(x), _mm512_castps_pd(y)))
#define DT__HIGH2(x, y) \
    _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xff, _mm512_castps_pd(x), _mm512_castps_pd(y)))
#define DT__EVEN(x, y) _mm512_maskz_shuffle_f32x4(0xffff, x, y, 0x88)
#define DT__ODD(x, y) _mm512_maskz_shuffle_f32x4(0xffff, x, y, 0xdd)
/* 16 x 16: pairs of rows, then fours in each quarter of a vector, then the quarters. */
DT__FN void DT__K(turn_block)(
    DT__REAL *panel, int64_t width, const DT__REAL *const *row, int64_t p) {
    __m512 r[16], t[16];
    for (int i = 0; i < 16; i += 2) {
        __m512 x = _mm512_loadu_ps(row[i] + p), y = _mm512_loadu_ps(row[i + 1] + p);
        t[i] = DT__LOW(x, y);
        t[i + 1] = DT__HIGH(x, y);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = DT__LOW2(t[i], t[i + 2]);
        r[i + 1] = DT__HIGH2(t[i], t[i + 2]);
        r[i + 2] = DT__LOW2(t[i + 1], t[i + 3]);
        r[i + 3] = DT__HIGH2(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        __m512 x = DT__EVEN(r[c], r[4 + c]), y = DT__ODD(r[c], r[4 + c]);
        __m512 z = DT__EVEN(r[8 + c], r[12 + c]), w = DT__ODD(r[8 + c], r[12 + c]);
        t[c] = DT__EVEN(x, z);
        t[4 + c] = DT__EVEN(y, w);
        t[8 + c] = DT__ODD(x, z);
        t[12 + c] = DT__ODD(y, w);
    }
    for (int i = 0; i < 16; i++) _mm512_storeu_ps(panel + (p + i) * width, t[i]);
}
#undef DT__LOW
#undef DT__HIGH
#undef DT__LOW2
#undef DT__HIGH2
#undef DT__EVEN
#undef DT__ODD
#else
#define DT__TURN 4
DT__FN void DT__K(turn_block)(
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

DT__FN void DT__K(turn)(DT__REAL *panel, int64_t width, const DT__REAL *const *row, int64_t n) {
    int64_t whole = n - n % DT__TURN;
    for (int64_t p = 0; p < whole; p += DT__TURN) DT__K(turn_block)(panel, width, row, p);
    for (int64_t p = whole; p < n; p++)
        for (int l = 0; l < DT__TURN; l++) panel[p * width + l] = row[l][p];
}

/* 64 terms at most of one row as words: where they lie, or made in buf. */
DT__FN const DT__REAL *DT__K(words)(
    dt_dtype dtype, int pairs, const void *from, int64_t at, int64_t terms, DT__REAL *buf) {
#if DT__BITS == 32 && DT__ISA == 2
    if (pairs) {
        memset(buf, 0, 64 * sizeof *buf);
        memcpy(buf, (const uint16_t *)from + at, (size_t)terms * 2);
        return buf;
    }
#endif
    (void)pairs;
    return DT__K(get)(dtype, from, at, terms, buf);
}

/* A panel (steps,width) from a source whose row i is column i of the panel: a transposition, in
   pieces of 64 terms that stay in the first-level cache. */
DT__FN void DT__K(pack_columns)(dt_dtype dtype, int pairs, DT__REAL *panel, int64_t width,
    const void *from, int64_t at, int64_t ld, int64_t have, int64_t terms) {
    static const DT__REAL none[64] = { 0 };
    DT__REAL buf[DT__TURN][64];
    for (int64_t p = 0; p < terms; p += 64) {
        int64_t n = terms - p < 64 ? terms - p : 64, steps = pairs ? (n + 1) / 2 : n;
        /* the last columns first */
        for (int64_t i = (width - 1) / DT__TURN * DT__TURN; i >= 0; i -= DT__TURN) {
            const DT__REAL *row[DT__TURN];
            for (int l = 0; l < DT__TURN; l++)
                row[l] = i + l < have
                             ? DT__K(words)(dtype, pairs, from, at + (i + l) * ld + p, n, buf[l])
                             : none;
            DT__K(turn)(panel + i, width, row, steps);
        }
        panel += steps * width;
    }
}

/* Panels of `count` rows of A or columns of B; turned: each lies in one row as stored. Otherwise
   all of them in one pass over the terms, so that the numbers of a row are read together. */
DT__FN void DT__K(pack)(const DT__K(matmul_plan) * w, DT__REAL *to, int64_t width, const void *from,
    int64_t at, int64_t ld, int turned, int64_t count, int64_t terms) {
    dt_dtype dtype = w->args->dtype;
    /* even, for pairs */
    int64_t depth = w->pairs ? (terms + 1) / 2 : terms, step = turned ? terms : 16;
    for (int64_t p = 0; p < terms; p += step) {
        DT__REAL *panel = to + (w->pairs ? p / 2 : p) * width;
        int64_t n = terms - p < step ? terms - p : step;
        for (int64_t j = 0; j < count; j += width, panel += depth * width) {
            if (turned) DT__K(pack_columns)
            (dtype, w->pairs, panel, width, from, at + j * ld, ld, count - j, n);
            else DT__K(pack_rows)(
                dtype, w->pairs, panel, width, from, at + p * ld + j, ld, count - j, n);
        }
    }
}

/* What tile number `tile` of a group asks for: its part of the next group of A, whose first row is
   i; every 8 steps of the tile one more line, `apart` bytes further. All at once would keep the
   tile waiting for as long as packing. Terms that lie whole pages apart are not asked for: they
   share few sets of a cache and would push each other out. */
DT__FN const char *DT__K(ask)(const DT__K(matmul_plan) * w, int64_t at, int64_t i, int64_t i1,
    int64_t terms, int64_t tile, int64_t *apart) {
    const dt_matmul_args *a = w->args;
    int64_t size = (int64_t)dt_dtype_size(a->dtype), row = a->lda * size, last = i1 - 1 - i,
            line = tile / 8 * 64;
    const char *from = (const char *)a->a + (at + i * (a->trans_a ? 1 : a->lda)) * size;
    int pages = a->trans_a && row % 4096 == 0;
    *apart = last < 0 || pages ? 0 : a->trans_a ? row : 8 * size;
    if (*apart == 0) return NULL;
    if (last >= DT__GROUP * DT__MR) last = DT__GROUP * DT__MR - 1;
    if (!a->trans_a) return from + (tile < last ? tile : last) * row;
    return from + tile % 8 * (terms / 8) * row + (line < last * size ? line : last * size);
}

/* A part of a tile to or from C. */
DT__FN void DT__K(edge)(DT__REAL *to, int64_t to_ld, const DT__REAL *from, int64_t from_ld,
    int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + i * to_ld, from + i * from_ld, (size_t)cols * sizeof *to);
}

/* Rows i0..i1, columns j0..j1, terms p0..p1: packs this piece of B, then each panel of A meets
   every panel of it. */
DT__FN void DT__K(matmul_piece)(const DT__K(matmul_plan) * w, int64_t batch, int64_t i0, int64_t i1,
    int64_t j0, int64_t j1, int64_t p0, int64_t p1) {
    const dt_matmul_args *a = w->args;
    int64_t from_a = batch * a->stride_a + p0 * (a->trans_a ? a->lda : 1), terms = p1 - p0;
    int64_t from_b = batch * a->stride_b + p0 * (a->trans_b ? 1 : a->ldb),
            depth = w->pairs ? (terms + 1) / 2 : terms;
    /* tiles: one for all, or all */
    int64_t at = 0, next = w->whole || w->in_c ? 0 : DT__MR * DT__NR;
    int64_t number = 0, apart; /* of a tile in its group */
    DT__K(pack)
    (w, w->b, DT__NR, a->b, from_b + j0 * (a->trans_b ? a->ldb : 1), a->ldb, a->trans_b, j1 - j0,
        terms);
    for (int64_t i = i0; i < i1; i += DT__MR) {
        int64_t rows = i1 - i < DT__MR ? i1 - i : DT__MR, panel = (i - i0) / DT__MR % DT__GROUP;
        if (panel == 0) number = 0;
        if (panel == 0) DT__K(pack)
        (w, w->a, DT__MR, a->a, from_a + i * (a->trans_a ? 1 : a->lda), a->lda, !a->trans_a,
            i1 - i < DT__GROUP * DT__MR ? i1 - i : DT__GROUP * DT__MR, terms);
        for (int64_t j = j0; j < j1; j += DT__NR, at += next) {
            int64_t cols = j1 - j < DT__NR ? j1 - j : DT__NR, ld = DT__NR;
            DT__REAL *tile = w->tiles + at,
                     *c = (DT__REAL *)a->c + batch * a->stride_c + i * a->ldc + j;
            /* an activation goes over all of a tile */
            int last = p1 == a->k, dense = last && a->activation;
            int full = rows == DT__MR && cols == DT__NR && w->in_c && !dense,
                edge = w->in_c && !full;
            if (full) tile = c, ld = a->ldc;
            if (edge && p0 > 0) DT__K(edge)(tile, DT__NR, c, a->ldc, rows, cols);
            if (last) DT__K(ask_end)(a, batch, i, j, rows, cols);
            const char *ask = DT__K(ask)(
                w, from_a, i + (DT__GROUP - panel) * DT__MR, i1, terms, number++, &apart);
            w->tile(depth, w->a + panel * depth * DT__MR, DT__MR, w->b + (j - j0) * depth, tile, ld,
                p0 == 0, ask, apart);
            if (last)
                DT__K(matmul_finish)(a, batch, i, j, rows, cols, tile, ld);
            else if (edge)
                DT__K(edge)(c, a->ldc, tile, DT__NR, rows, cols);
        }
    }
}

/* The fast product, after Goto and van de Geijn (doi:10.1145/1356052.1356053). Where K is several
   pieces, the sums of a block of C wait in memory between them. They come back unchanged, so
   cutting K changes no bit. */
DT__FN void DT__K(matmul_packed)(const DT__K(matmul_plan) * w, int64_t batch, int64_t i_first,
    int64_t i_end, int64_t j_first, int64_t j_end) {
    const dt_matmul_args *a = w->args;
    int64_t terms = w->pieces.depth * (w->pairs ? 2 : 1), columns = w->pieces.columns,
            m = i_end - i_first;
    int64_t most = DT__PANELS * DT__MR, blocks = w->whole || w->in_c ? 1 : (m + most - 1) / most;
    int64_t rows = blocks > 0 ? (m + blocks - 1) / blocks : 1;
    for (int64_t i0 = i_first; i0 < i_end; i0 += rows) {
        int64_t i1 = i0 + rows < i_end ? i0 + rows : i_end;
        for (int64_t j0 = j_first; j0 < j_end; j0 += columns) {
            int64_t j1 = j0 + columns < j_end ? j0 + columns : j_end, p = 0;
            do { /* once even if K is 0 */
                int64_t end = p + terms < a->k ? p + terms : a->k;
                DT__K(matmul_piece)(w, batch, i0, i1, j0, j1, p, end);
                p = end;
            } while (p < a->k);
        }
    }
}

#ifdef DT_USE_CBLAS
/* The product by CBLAS, which sums in an order of its own. Where something follows, some rows at a
   time go to `work` and are finished from there like our own; fewer than 16 would be slow, and are
   left to our own. */
DT__FN void DT__K(matmul_cblas)(const dt_matmul_args *a, int64_t batch) {
    CBLAS_TRANSPOSE ta = a->trans_a ? CblasTrans : CblasNoTrans,
                    tb = a->trans_b ? CblasTrans : CblasNoTrans;
    int fused = a->bias || a->before || a->activation || a->residual || a->accumulate;
    int64_t most = fused ? (int64_t)(a->work_bytes / sizeof(DT__REAL)) / a->n : a->m;
    for (int64_t i = 0; i < a->m; i += most) {
        int64_t rows = a->m - i < most ? a->m - i : most;
        const DT__REAL *from =
            (const DT__REAL *)a->a + batch * a->stride_a + i * (a->trans_a ? 1 : a->lda);
        const DT__REAL *b = (const DT__REAL *)a->b + batch * a->stride_b;
        DT__REAL *c =
            fused ? (DT__REAL *)a->work : (DT__REAL *)a->c + batch * a->stride_c + i * a->ldc;
        int64_t ld = fused ? a->n : a->ldc;
        DT__GEMM(CblasRowMajor, ta, tb, (int)rows, (int)a->n, (int)a->k, 1, from, (int)a->lda, b,
            (int)a->ldb, 0, c, (int)ld);
        for (int64_t r = 0; r < rows && fused; r++)
            DT__K(matmul_finish)(a, batch, i + r, 0, 1, a->n, c + r * ld, ld);
    }
}
#endif

/* pairs: 1 for bf16 by the processor's dot product of pairs, which it must have. */
DT__FN dt_status DT__K(matmul_by)(const dt_matmul_args *args, int pairs) {
    dt_matmul_args a = *args;
    if (a.m < 0 || a.n < 0 || a.k < 0 || a.batch < 0 || a.activation < 0 ||
        a.activation >= DT_ACT_AFFINE || (a.derivative && !a.before))
        return DT_ERR_ARG;
    if (a.batch == 0) a.batch = 1;
    if (a.lda == 0) a.lda = a.trans_a ? a.m : a.k;
    if (a.ldb == 0) a.ldb = a.trans_b ? a.k : a.n;
    if (a.ldc == 0) a.ldc = a.n;
    if (!a.work) {
        for (int64_t i = 0; i < a.batch; i++) DT__K(matmul_naive)(&a, i);
        return DT_OK;
    }
    if (a.work_bytes < dt_matmul_work(a.n, a.k, a.dtype)) return DT_ERR_ARG;
#ifdef DT_USE_CBLAS
    int fits = a.m < INT_MAX && a.n < INT_MAX && a.k < INT_MAX && a.lda < INT_MAX &&
               a.ldb < INT_MAX && a.ldc < INT_MAX;
    if (fits && !dt__narrow(a.dtype) && a.k > 0 &&
        (size_t)a.n * 16 * sizeof(DT__REAL) <= a.work_bytes) {
        for (int64_t i = 0; i < a.batch && a.m > 0 && a.n > 0; i++) DT__K(matmul_cblas)(&a, i);
        return DT_OK;
    }
#endif
    DT__K(matmul_plan) w;
    memset(&w, 0, sizeof w);
    w.args = &a;
    w.tile = DT__K(matmul_tile);
#if DT__BITS == 32 && DT__ISA == 2
    if (pairs) w.tile = DT__K(matmul_pair_tile);
#endif
    w.pairs = pairs;
    int64_t steps = w.pairs ? (a.k + 1) / 2 : a.k;
    w.pieces = dt__matmul_pieces(a.n, steps, sizeof(DT__REAL));
    w.whole = steps <= w.pieces.depth;
    w.in_c = !a.accumulate && !dt__narrow(dt__wide(a.dtype, a.wide)) && a.residual != a.c &&
             a.before != a.c;
    int64_t parts = a.m * a.n * a.k < 1 << 18 ? 1 : dt__omp_threads(), of = a.m > a.n ? a.m : a.n;
    int64_t each = ((of + parts - 1) / parts + 31) / 32 * 32;
    int64_t stride = (int64_t)(a.work_bytes / (size_t)dt__omp_threads());
    DT__PARALLEL
    for (int64_t part = 0; part < a.batch * parts; part++) {
        /* this thread's scratch, and its part of the longer side of C */
        DT__K(matmul_plan) mine = w;
        int64_t first = part % parts * each, end = first + each < of ? first + each : of;
        mine.tiles = (DT__REAL *)dt__align64((char *)a.work + dt__omp_thread() * stride);
        mine.b = mine.tiles + w.pieces.tiles;
        mine.a = mine.b + w.pieces.depth * w.pieces.columns;
        if (a.m > a.n)
            DT__K(matmul_packed)(&mine, part / parts, first, end, 0, a.n);
        else
            DT__K(matmul_packed)(&mine, part / parts, 0, a.m, first, end);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(matmul)(const dt_matmul_args *a) {
#if DT__BITS == 32 && DT__ISA == 2
    if (a->dtype == DT_BF16 && dt__pairs_pay()) return DT__K(matmul_by)(a, 1);
#endif
    return DT__K(matmul_by)(a, 0);
}
#endif

// ==== 22. CPU kernels, once over float and double ===============================================

DT__FN dt_status DT__K(fill)(const dt_fill_args *a) {
    DT__REAL tile[DT__TILE], value = (DT__REAL)a->value;
    for (int i = 0; i < DT__TILE; i++) tile[i] = value;
    for (int64_t at = 0, n = (int64_t)a->count; at < n; at += DT__TILE)
        DT__K(give)(a->dtype, a->out, at, n - at < DT__TILE ? n - at : DT__TILE, tile, 0);
    return DT_OK;
}

/* A copy past the caches, which neither reads what it overwrites nor drives out what else is there:
   fast only with stores of a whole line. Others may see it late: a fence must come before they are
   told. */
DT__FN void DT__K(far_copy)(char *dst, const char *src, size_t bytes) {
    size_t at = 0;
#if DT__ISA == 2
    at = (64 - (uintptr_t)dst % 64) % 64;
    at = at < bytes ? at : bytes;
    memcpy(dst, src, at);
    for (; at + 64 <= bytes; at += 64)
        _mm512_stream_si512((__m512i *)(void *)(dst + at), _mm512_loadu_si512(src + at));
#endif
    memcpy(dst + at, src + at, bytes - at);
}

/* The sums of elements first .. first+n in all places that a reduction has for them. */
DT__FN void DT__K(spread_sums)(const dt_reduce_args *a, const char *sums, size_t first, size_t n) {
    size_t size = dt_dtype_size(a->dtype), at = first * size;
    if (a->far) DT__K(far_copy)((char *)a->out + at, sums, n * size);
    for (int k = 0; k < a->n_also; k++) {
        char *out = (char *)a->also[k] + at;
        if (a->far)
            DT__K(far_copy)(out, sums, n * size);
        else
            memcpy(out, sums, n * size);
    }
}

/* Tile after tile of elements through all inputs in order, so that outputs may be among them. Each
   step is rounded to the type computed in (int32_t wraps); DT_AVG divides the finished sum. */
DT__FN dt_status DT__K(reduce)(const dt_reduce_args *a) {
    DT__REAL tile[DT__TILE], left[DT__TILE], right[DT__TILE];
    int narrow = dt__narrow(a->dtype);
    if (a->n < 1) return DT_ERR_ARG;
    for (size_t at = 0; at < a->count; at += DT__TILE) {
        int64_t n = a->count - at < DT__TILE ? (int64_t)(a->count - at) : DT__TILE;
        /* may be an input: written in the last round only */
        DT__REAL *out = narrow || a->far ? tile : (DT__REAL *)a->out + at;
        const DT__REAL *x = DT__K(get)(a->dtype, a->in[0], (int64_t)at, n, left);
        for (int r = 1; r < a->n; r++) {
            const DT__REAL *in = DT__K(get)(a->dtype, a->in[r], (int64_t)at, n, right);
            DT__REAL *to = r == a->n - 1 ? out : tile;
            switch (a->op) {
            case DT_SUM:
            case DT_AVG:
                for (int64_t i = 0; i < n; i++) to[i] = (DT__REAL)((DT__WIDE)x[i] + in[i]);
                break;
            case DT_MAX:
                for (int64_t i = 0; i < n; i++) to[i] = in[i] > x[i] ? in[i] : x[i];
                break;
            case DT_MIN:
                for (int64_t i = 0; i < n; i++) to[i] = in[i] < x[i] ? in[i] : x[i];
                break;
            case DT_PROD:
                for (int64_t i = 0; i < n; i++) to[i] = (DT__REAL)((DT__WIDE)x[i] * in[i]);
                break;
            }
            x = to;
        }
        if (a->n == 1 && x != out) memcpy(out, x, (size_t)n * sizeof *out);
        if (a->op == DT_AVG)
            for (int64_t i = 0; i < n; i++) out[i] /= (DT__REAL)a->n;
        char *sums = a->far ? (char *)(narrow ? right : tile)
                            : (char *)a->out + at * dt_dtype_size(a->dtype);
        if (narrow) DT__K(give)(a->dtype, sums, 0, n, tile, 0);
        DT__K(spread_sums)(a, sums, at, (size_t)n);
    }
#if DT__ISA == 2
    if (a->far) _mm_sfence();
#endif
    return DT_OK;
}

DT__FN dt_status DT__K(permute)(const dt_permute_args *a) {
    DT__REAL buf[DT__TILE];
    int64_t in, out, last = a->shape.nd ? a->shape.nd - 1 : 0;
    int64_t in_apart = a->shape.nd ? a->in_stride[last] : 1,
            out_apart = a->shape.nd ? a->out_stride[last] : 1;
    dt__runs r = dt__runs_begin(a->shape);
    while (dt__runs_next(&r, a->in_stride, a->out_stride, &in, &out)) {
        const DT__REAL *x = DT__K(get_apart)(a->dtype, a->in, in, in_apart, r.n, buf);
        int64_t n = out_apart == 1 ? r.n : 1; /* numbers that lie together */
        for (int64_t i = 0; i < r.n; i += n)
            DT__K(give)(a->dtype, a->out, out + i * out_apart, n, x + i, a->accumulate);
    }
    return DT_OK;
}

#if DT__BITS != 1 /* the rest is for floating types only */

/* total = sum over j < n of TERM, an expression in j. Lane l takes j = l, l + 16, ...; then lanes
   are added in halves. The order depends on n alone, and 16 lanes are what lets a compiler
   vectorise a sum without reordering it. */
#define DT__SUM(T, total, n, TERM) \
    do { \
        T lane[16] = { 0 }; \
        int64_t at = 0; \
        for (; at + 16 <= (n); at += 16) \
            for (int64_t l = 0; l < 16; l++) { \
                int64_t j = at + l; \
                lane[l] += TERM; \
            } \
        for (int64_t l = 0; l < (n)-at; l++) { \
            int64_t j = at + l; \
            lane[l] += TERM; \
        } \
        for (int w = 8; w; w /= 2) \
            for (int l = 0; l < w; l++) lane[l] += lane[l + w]; \
        (total) = lane[0]; \
    } while (0)

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

/* n >= 1. A NaN is skipped here and met again by the exponentials. */
DT__FN DT__REAL DT__K(largest)(const DT__REAL *x, int64_t n) {
    DT__REAL lane[16];
    int64_t at = 0;
    for (int l = 0; l < 16; l++) lane[l] = x[0];
    for (; at + 16 <= n; at += 16)
        for (int l = 0; l < 16; l++) lane[l] = x[at + l] > lane[l] ? x[at + l] : lane[l];
    for (; at < n; at++) lane[0] = x[at] > lane[0] ? x[at] : lane[0];
    for (int l = 1; l < 16; l++) lane[0] = lane[l] > lane[0] ? lane[l] : lane[0];
    return lane[0];
}

/* Elements 2c and 2c + 1 (global index) come from the four words of counter c: two uniform numbers,
   or one Box-Muller pair z = sqrt(-2 ln u) (cos, sin)(2 pi v). Any rank can so make any run of a
   parameter by itself. */
DT__FN dt_status DT__K(init)(const dt_init_args *a) {
    DT__REAL out[DT__TILE];
    for (uint64_t at = 0; at < a->count; at += DT__TILE) {
        uint64_t end = a->count - at < DT__TILE ? a->count : at + DT__TILE;
        for (uint64_t i = at; i < end;) {
            uint64_t index = a->first + i;
            double pair[2];
            uint32_t word[4];
            dt__philox(a->key, index / 2, word);
            double u = dt__unit(word[0], word[1]), v = dt__unit(word[2], word[3]);
            if (a->normal) {
                /* 1 - u in (0, 1] */
                double radius = a->scale * sqrt(-2 * log(1 - u)), angle = 6.283185307179586 * v;
                pair[0] = radius * cos(angle);
                pair[1] = radius * sin(angle);
            } else {
                pair[0] = a->scale * (2 * u - 1);
                pair[1] = a->scale * (2 * v - 1);
            }
            for (; i < end && (a->first + i) / 2 == index / 2; i++)
                out[i - at] = (DT__REAL)pair[(a->first + i) & 1];
        }
        DT__K(give)(a->dtype, a->out, (int64_t)at, (int64_t)(end - at), out, 0);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(binary)(const dt_binary_args *a) {
    DT__REAL out[DT__TILE], buf_x[DT__TILE], buf_y[DT__TILE];
    int64_t at_x, at_y, last = a->shape.nd ? a->shape.nd - 1 : 0;
    int64_t apart_x = a->shape.nd ? a->stride_a[last] : 1,
            apart_y = a->shape.nd ? a->stride_b[last] : 1;
    dt__runs r = dt__runs_begin(a->shape);
    while (dt__runs_next(&r, a->stride_a, a->stride_b, &at_x, &at_y)) {
        const DT__REAL *x = DT__K(get_apart)(a->dtype, a->a, at_x, apart_x, r.n, buf_x);
        const DT__REAL *y = DT__K(get_apart)(a->dtype, a->b, at_y, apart_y, r.n, buf_y);
        switch (a->op) {
        case DT_ADD:
            for (int64_t i = 0; i < r.n; i++) out[i] = x[i] + y[i];
            break;
        case DT_SUB:
            for (int64_t i = 0; i < r.n; i++) out[i] = x[i] - y[i];
            break;
        case DT_MUL:
            for (int64_t i = 0; i < r.n; i++) out[i] = x[i] * y[i];
            break;
        case DT_DIV:
            for (int64_t i = 0; i < r.n; i++) out[i] = x[i] / y[i];
            break;
        default: return DT_ERR_ARG;
        }
        DT__K(give)(a->dtype, a->out, r.out, r.n, out, a->accumulate);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(unary)(const dt_unary_args *a) {
    int64_t count = (int64_t)a->count;
    if (a->act < 0 || a->act >= DT_ACTS) return DT_ERR_ARG;
    DT__PARALLEL
    for (int64_t at = 0; at < count; at += DT__TILE) {
        DT__REAL out[DT__TILE], buf[DT__TILE];
        int64_t n = count - at < DT__TILE ? count - at : DT__TILE;
        DT__K(act)
        (a->act, DT__K(get)(a->dtype, a->in, at, n, buf), n, out, (DT__REAL)a->scale,
            (DT__REAL)a->shift);
        DT__K(give)(a->dtype, a->out, at, n, out, 0);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(unary_back)(const dt_unary_back_args *a) {
    int64_t count = (int64_t)a->count;
    if (a->act < 0 || a->act >= DT_ACTS) return DT_ERR_ARG;
    DT__PARALLEL
    for (int64_t at = 0; at < count; at += DT__TILE) {
        DT__REAL dx[DT__TILE], buf_x[DT__TILE], buf_d[DT__TILE];
        int64_t n = count - at < DT__TILE ? count - at : DT__TILE;
        const DT__REAL *x = a->in ? DT__K(get)(a->dtype, a->in, at, n, buf_x) : NULL;
        DT__K(act_back)
        (a->act, x, DT__K(get)(a->dtype, a->dout, at, n, buf_d), n, dx, (DT__REAL)a->scale);
        DT__K(give)(a->dtype, a->dx, at, n, dx, a->accumulate);
    }
    return DT_OK;
}

/* Gated linear units, arXiv:2002.05202. */
DT__FN dt_status DT__K(glu)(const dt_glu_args *a) {
    DT__REAL out[DT__TILE], buf[DT__TILE];
    int64_t cols = (int64_t)a->cols;
    if (a->act < 0 || a->act >= DT_ACTS) return DT_ERR_ARG;
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        for (int64_t c = 0; c < cols; c += DT__TILE) {
            int64_t n = cols - c < DT__TILE ? cols - c : DT__TILE;
            DT__K(act)(a->act, DT__K(get)(a->dtype, a->in, 2 * r * cols + c, n, buf), n, out, 1, 0);
            const DT__REAL *up = DT__K(get)(a->dtype, a->in, (2 * r + 1) * cols + c, n, buf);
            for (int64_t i = 0; i < n; i++) out[i] *= up[i];
            DT__K(give)(a->dtype, a->out, r * cols + c, n, out, 0);
        }
    }
    return DT_OK;
}

DT__FN dt_status DT__K(glu_back)(const dt_glu_back_args *a) {
    DT__REAL d[DT__TILE], buf_x[DT__TILE], buf_up[DT__TILE], buf_d[DT__TILE];
    int64_t cols = (int64_t)a->cols;
    if (a->act < 0 || a->act >= DT_ACTS) return DT_ERR_ARG;
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        for (int64_t c = 0; c < cols; c += DT__TILE) {
            int64_t n = cols - c < DT__TILE ? cols - c : DT__TILE, gate_at = 2 * r * cols + c,
                    up_at = gate_at + cols;
            const DT__REAL *gate = DT__K(get)(a->dtype, a->in, gate_at, n, buf_x);
            const DT__REAL *up = DT__K(get)(a->dtype, a->in, up_at, n, buf_up);
            const DT__REAL *dout = DT__K(get)(a->dtype, a->dout, r * cols + c, n, buf_d);
            for (int64_t i = 0; i < n; i++) d[i] = dout[i] * up[i];
            DT__K(act_back)(a->act, gate, d, n, d, 1);
            DT__K(give)(a->dtype, a->dx, gate_at, n, d, a->accumulate);
            DT__K(act)(a->act, gate, n, d, 1, 0);
            for (int64_t i = 0; i < n; i++) d[i] *= dout[i];
            DT__K(give)(a->dtype, a->dx, up_at, n, d, a->accumulate);
        }
    }
    return DT_OK;
}

/* A tile of columns goes down all of `n` before it is added to anything; a sum along the last
   dimension has lanes. */
DT__FN dt_status DT__K(sum_rows)(const dt_sum_args *a) {
    DT__REAL buf[DT__TILE];
    int64_t n = (int64_t)a->n;
    for (int64_t o = 0; o < (int64_t)a->outer; o++) {
        DT__REAL total = 0, part;
        for (int64_t at = 0; at < n; at += DT__TILE) {
            int64_t have = n - at < DT__TILE ? n - at : DT__TILE;
            const DT__REAL *x = DT__K(get)(a->dtype, a->in, o * n + at, have, buf);
            DT__SUM(DT__REAL, part, have, x[j]);
            total += part;
        }
        total *= (DT__REAL)a->scale;
        DT__K(give)(dt__wide(a->dtype, a->wide), a->out, o, 1, &total, a->accumulate);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(sum)(const dt_sum_args *a) {
    DT__REAL sum[DT__TILE], buf[DT__TILE], scale = (DT__REAL)a->scale;
    int64_t inner = (int64_t)a->inner, n = (int64_t)a->n;
    if (inner == 1) return DT__K(sum_rows)(a);
    for (int64_t o = 0; o < (int64_t)a->outer; o++) {
        for (int64_t c = 0; c < inner; c += DT__TILE) {
            int64_t have = inner - c < DT__TILE ? inner - c : DT__TILE;
            memset(sum, 0, sizeof sum);
            for (int64_t j = 0; j < n; j++) {
                const DT__REAL *x = DT__K(get)(a->dtype, a->in, (o * n + j) * inner + c, have, buf);
                for (int64_t i = 0; i < have; i++) sum[i] += x[i];
            }
            if (scale != 1)
                for (int64_t i = 0; i < have; i++) sum[i] *= scale;
            DT__K(give)
            (dt__wide(a->dtype, a->wide), a->out, o * inner + c, have, sum, a->accumulate);
        }
    }
    return DT_OK;
}

/* A NaN never is the maximum, unless it comes first. */
DT__FN dt_status DT__K(max)(const dt_max_args *a) {
    DT__REAL best[DT__TILE], buf[DT__TILE];
    int64_t inner = (int64_t)a->inner, n = (int64_t)a->n;
    if (n < 1) return DT_ERR_ARG;
    for (int64_t o = 0; o < (int64_t)a->outer; o++) {
        for (int64_t c = 0; c < inner; c += DT__TILE) {
            int64_t have = inner - c < DT__TILE ? inner - c : DT__TILE;
            int32_t *index = a->index + o * inner + c;
            for (int64_t j = 0; j < n; j++) {
                const DT__REAL *x = DT__K(get)(a->dtype, a->in, (o * n + j) * inner + c, have, buf);
                for (int64_t i = 0; i < have; i++) {
                    if (j > 0 && !(x[i] > best[i])) continue;
                    best[i] = x[i];
                    index[i] = (int32_t)j;
                }
            }
            DT__K(give)(a->dtype, a->out, o * inner + c, have, best, 0);
        }
    }
    return DT_OK;
}

DT__FN dt_status DT__K(spread)(const dt_spread_args *a) {
    int64_t n = (int64_t)a->n, k = (int64_t)a->k, inner = (int64_t)a->inner;
    DT__REAL zero[DT__TILE] = { 0 }, one;
    for (int64_t at = 0, all = (int64_t)a->outer * n * inner; at < all && !a->accumulate;
         at += DT__TILE)
        DT__K(give)(a->dtype, a->out, at, all - at < DT__TILE ? all - at : DT__TILE, zero, 0);
    for (int64_t o = 0; o < (int64_t)a->outer; o++) {
        for (int64_t j = 0; j < k * inner; j++) {
            int64_t to = a->index[o * k * inner + j];
            if (to < 0 || to >= n) return DT_ERR_ARG;
            const DT__REAL *x = DT__K(get)(a->dtype, a->in, o * k * inner + j, 1, &one);
            DT__K(give)(a->dtype, a->out, (o * n + to) * inner + j % inner, 1, x, 1);
        }
    }
    return DT_OK;
}

/* Insertion into a sorted list of k: k is small. A later column moves ahead of equal ones never. */
DT__FN dt_status DT__K(topk)(const dt_topk_args *a) {
    int64_t cols = (int64_t)a->cols, k = (int64_t)a->k;
    DT__REAL value, other;
    if (k > cols) return DT_ERR_ARG;
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        int32_t *index = a->index + r * k;
        for (int64_t c = 0; c < cols; c++) {
            const DT__REAL *x = DT__K(get)(a->dtype, a->in, r * cols + c, 1, &value);
            int64_t at = c < k ? c : k; /* how many are in the list */
            while (
                at > 0 && *x > *DT__K(get)(a->dtype, a->in, r * cols + index[at - 1], 1, &other)) {
                if (at < k) index[at] = index[at - 1];
                at--;
            }
            if (at < k) index[at] = (int32_t)c;
        }
        for (int64_t j = 0; j < k; j++) {
            const DT__REAL *x = DT__K(get)(a->dtype, a->in, r * cols + index[j], 1, &value);
            DT__K(give)(a->dtype, a->values, r * k + j, 1, x, 0);
        }
    }
    return DT_OK;
}

/* Layer normalisation, arXiv:1607.06450: two passes over the row, because E[x^2] - E[x]^2 cancels.
   RMSNorm, arXiv:1910.07467, is the same with a mean of zero. */
DT__FN dt_status DT__K(norm)(const dt_norm_args *a) {
    int64_t cols = (int64_t)a->cols;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype)) return DT_ERR_ARG;
    DT__REAL *buf = (DT__REAL *)dt__align64(a->work), *out = buf + cols, *gain_buf = out + cols;
    const DT__REAL *gain = DT__K(get)(a->dtype, a->gain, 0, cols, gain_buf);
    const DT__REAL *bias = a->rms ? NULL : DT__K(get)(a->dtype, a->bias, 0, cols, gain_buf + cols);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        const DT__REAL *x = DT__K(get)(a->dtype, a->in, r * cols, cols, buf);
        DT__REAL variance, mean = a->rms ? 0 : DT__K(total)(x, cols) / (DT__REAL)cols;
        DT__SUM(DT__REAL, variance, cols, (x[j] - mean) * (x[j] - mean));
        DT__REAL rstd = (DT__REAL)(1 / sqrt((double)variance / (double)cols + a->eps));
        if (a->rms)
            for (int64_t c = 0; c < cols; c++) out[c] = x[c] * rstd * gain[c];
        else
            for (int64_t c = 0; c < cols; c++) out[c] = (x[c] - mean) * rstd * gain[c] + bias[c];
        DT__K(give)(a->dtype, a->out, r * cols, cols, out, 0);
        if (!a->rms) ((DT__REAL *)a->mean)[r] = mean;
        ((DT__REAL *)a->rstd)[r] = rstd;
    }
    return DT_OK;
}

/* With y = (x - mean) rstd and g = dout gain: dx = rstd (g - mean(g) - y mean(g y)), dgain = sum
   over rows of dout y, dbias = sum over rows of dout; mean(g) is the mean's doing, so RMSNorm has
   none. work: y, g, the two sums over rows, which are complete before they leave, and widened
   rows. */
DT__FN dt_status DT__K(norm_back)(const dt_norm_back_args *a) {
    int64_t cols = (int64_t)a->cols;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype)) return DT_ERR_ARG;
    DT__REAL *y = (DT__REAL *)dt__align64(a->work), *g = y + cols, *dgain = g + cols,
             *dbias = dgain + cols;
    DT__REAL *buf = dbias + cols, *gain_buf = buf + cols;
    const DT__REAL *gain = DT__K(get)(a->dtype, a->gain, 0, cols, gain_buf);
    memset(dgain, 0, 2 * (size_t)cols * sizeof *dgain);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        DT__REAL mean = a->rms ? 0 : ((const DT__REAL *)a->mean)[r],
                 rstd = ((const DT__REAL *)a->rstd)[r];
        const DT__REAL *x = DT__K(get)(a->dtype, a->in, r * cols, cols, buf);
        for (int64_t c = 0; c < cols; c++) y[c] = (x[c] - mean) * rstd;
        const DT__REAL *dout = DT__K(get)(a->dtype, a->dout, r * cols, cols, buf);
        for (int64_t c = 0; c < cols; c++) g[c] = dout[c] * gain[c];
        for (int64_t c = 0; c < cols; c++) {
            dgain[c] += dout[c] * y[c];
            dbias[c] += dout[c];
        }
        if (!a->dx) continue;
        DT__REAL mean_g = a->rms ? 0 : DT__K(total)(g, cols) / (DT__REAL)cols;
        DT__REAL mean_gy = DT__K(dot)(g, y, cols) / (DT__REAL)cols;
        for (int64_t c = 0; c < cols; c++) g[c] = rstd * (g[c] - mean_g - y[c] * mean_gy);
        DT__K(give)(a->dtype, a->dx, r * cols, cols, g, a->accumulate_x);
    }
    DT__K(give)(dt__wide(a->dtype, a->wide_gain), a->dgain, 0, cols, dgain, a->accumulate_gain);
    DT__K(give)(dt__wide(a->dtype, a->wide_bias), a->dbias, 0, cols, dbias, a->accumulate_bias);
    return DT_OK;
}

DT__FN dt_status DT__K(softmax)(const dt_softmax_args *a) {
    int64_t cols = (int64_t)a->cols;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype)) return DT_ERR_ARG;
    DT__REAL *out = (DT__REAL *)dt__align64(a->work), *buf = out + cols;
    for (int64_t r = 0; r < (int64_t)a->rows && cols > 0; r++) {
        const DT__REAL *x = DT__K(get)(a->dtype, a->in, r * cols, cols, buf);
        DT__REAL max = DT__K(largest)(x, cols);
        for (int64_t c = 0; c < cols; c++) out[c] = DT__EXP(x[c] - max);
        DT__REAL inverse = 1 / DT__K(total)(out, cols);
        for (int64_t c = 0; c < cols; c++) out[c] *= inverse;
        DT__K(give)(a->dtype, a->out, r * cols, cols, out, 0);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(softmax_back)(const dt_softmax_back_args *a) {
    int64_t cols = (int64_t)a->cols;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype)) return DT_ERR_ARG;
    DT__REAL *dx = (DT__REAL *)dt__align64(a->work), *buf_y = dx + cols, *buf_d = buf_y + cols;
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        const DT__REAL *y = DT__K(get)(a->dtype, a->out, r * cols, cols, buf_y);
        const DT__REAL *dout = DT__K(get)(a->dtype, a->dout, r * cols, cols, buf_d);
        DT__REAL mean = DT__K(dot)(y, dout, cols);
        for (int64_t c = 0; c < cols; c++) dx[c] = y[c] * (dout[c] - mean);
        DT__K(give)(a->dtype, a->dx, r * cols, cols, dx, a->accumulate);
    }
    return DT_OK;
}

/* Rotary position embedding, arXiv:2104.09864. The angles of a token serve all its heads; they are
   taken in double, because a float's cosine of a position in the thousands has lost its last
   digits. */
DT__FN dt_status DT__K(rope)(const dt_rope_args *a) {
    enum { MOST = 256 };
    int64_t dim = (int64_t)a->dim, rotary = (int64_t)a->rotary, half = rotary / 2,
            heads = (int64_t)a->heads;
    DT__REAL cosine[MOST], sine[MOST], buf[2 * MOST], out[2 * MOST];
    double rate[MOST];
    if (rotary % 2 || rotary > dim || dim > 2 * MOST) return DT_ERR_ARG;
    for (int64_t i = 0; i < half; i++) rate[i] = pow(a->theta, -2.0 * (double)i / (double)rotary);
    /* pair i: i step, i step + apart */
    int64_t step = a->interleaved ? 2 : 1, apart = a->interleaved ? 1 : half;
    for (int64_t t = 0; t < (int64_t)a->tokens; t++) {
        for (int64_t i = 0; i < half; i++) {
            double angle = a->positions[t] * rate[i];
            cosine[i] = (DT__REAL)cos(angle);
            sine[i] = (DT__REAL)(a->inverse ? -sin(angle) : sin(angle));
        }
        for (int64_t h = t * heads; h < (t + 1) * heads; h++) {
            const DT__REAL *x = DT__K(get)(a->dtype, a->in, h * dim, dim, buf);
            for (int64_t i = 0; i < half; i++) {
                DT__REAL x0 = x[i * step], x1 = x[i * step + apart];
                out[i * step] = x0 * cosine[i] - x1 * sine[i];
                out[i * step + apart] = x1 * cosine[i] + x0 * sine[i];
            }
            for (int64_t i = rotary; i < dim; i++) out[i] = x[i];
            DT__K(give)(a->dtype, a->out, h * dim, dim, out, a->accumulate);
        }
    }
    return DT_OK;
}

/* Four columns share the four words of counter (token, column / 4): what is dropped depends on key,
   token and column alone, whatever rank holds them and however often it is asked. */
DT__FN dt_status DT__K(dropout)(const dt_dropout_args *a) {
    DT__REAL out[DT__TILE], buf[DT__TILE], scale = (DT__REAL)(1 / (1 - a->p));
    int64_t cols = (int64_t)a->cols;
    uint64_t least = (uint64_t)(a->p * 4294967296.0);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        uint64_t token = (uint64_t)(uint32_t)(a->tokens ? a->tokens[r] : (int32_t)r) << 32;
        for (int64_t c = 0; c < cols; c += DT__TILE) {
            int64_t n = cols - c < DT__TILE ? cols - c : DT__TILE;
            const DT__REAL *x = DT__K(get)(a->dtype, a->in, r * cols + c, n, buf);
            uint32_t word[4];
            for (int64_t i = 0; i < n; i++) {
                uint64_t column = (uint64_t)(a->first + c + i);
                if (i == 0 || column % 4 == 0) dt__philox(a->key, token | column / 4, word);
                out[i] = word[column % 4] < least ? 0 : x[i] * scale;
            }
            DT__K(give)(a->dtype, a->out, r * cols + c, n, out, a->accumulate);
        }
    }
    return DT_OK;
}

DT__FN dt_status DT__K(embedding)(const dt_embedding_args *a) {
    size_t bytes = a->cols * dt_dtype_size(a->dtype);
    for (size_t r = 0; r < a->rows; r++) {
        int64_t id = a->ids[r], row = id - a->first;
        char *out = (char *)a->out + r * bytes;
        int hole = a->holes && id == -1;
        if (!hole && (id < 0 || id >= a->vocab)) return DT_ERR_ARG;
        if (hole || row < 0 || row >= a->held)
            memset(out, 0, bytes);
        else
            memcpy(out, (const char *)a->table + (size_t)row * bytes, bytes);
    }
    return DT_OK;
}

/* Rows are added where they belong, in order; only a bf16 or f16 table needs room for its sums. */
DT__FN dt_status DT__K(embedding_back)(const dt_embedding_back_args *a) {
    dt_dtype type = dt__wide(a->dtype, a->wide);
    int64_t cols = (int64_t)a->cols, all = a->held * cols;
    int apart = dt__narrow(type), accumulate = a->accumulate && !apart;
    DT__REAL buf[DT__TILE], *sum = (DT__REAL *)(apart ? a->work : a->dtable);
    if (apart && (!sum || a->work_bytes < (size_t)all * sizeof *sum)) return DT_ERR_ARG;
    if (!accumulate) memset(sum, 0, (size_t)all * sizeof *sum);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        int64_t row = a->ids[r] - a->first;
        if ((row < 0 || row >= a->held) && a->strict && a->ids[r] != -1) return DT_ERR_ARG;
        if (row < 0 || row >= a->held) continue;
        for (int64_t c = 0; c < cols; c += DT__TILE) {
            int64_t n = cols - c < DT__TILE ? cols - c : DT__TILE;
            const DT__REAL *dout = DT__K(get)(a->dtype, a->dout, r * cols + c, n, buf);
            DT__REAL *to = sum + row * cols + c;
            for (int64_t i = 0; i < n; i++) to[i] += dout[i];
        }
    }
    if (apart) DT__K(give)(type, a->dtable, 0, all, sum, a->accumulate);
    return DT_OK;
}

/* ---- attention: softmax(scale q k^T) v without a TQ x TK matrix, arXiv:2205.14135 ----

   Everything is done on blocks of NR queries, which are the lanes of the vectors: scores^T (keys x
   queries), so that maxima and sums over keys go down the lanes, and out^T (dim x queries). All
   products are tiles of MA x NR:

       scores^T (keys,queries)  = k q^T            panel a: k by rows of MA keys      panel b: q^T
       out^T    (dim,queries)  += v^T p^T          panel a: v^T by rows of MA dims    panel b: the scores themselves
       dp^T     (keys,queries)  = v dout^T         panel a: v by rows of MA keys      panel b: dout^T
       dq^T     (dim,queries)  += k^T ds^T         panel a: k^T by rows of MA dims    panel b: ds^T itself
       dv, dk   (keys,dim)     += p^T dout, ds^T q panel a: p, ds turned              panel b: dout, q in rows of NR

   Every sum is one chain over its terms in ascending order. Keys that no query of a block sees are
   left out; those that some do not see have p = 0 for them: a value that is not finite reaches
   those queries all the same. */

/* What is kept for one key/value head, and for one block of queries. keys are rounded up to 16,
   dims to MA, wide to NR. */
typedef struct DT__K(heads) {
    int64_t keys, dims, wide;
    /* k in panels of MA keys: (keys/MA,D,MA); of MA dims: (dims/MA,tk,MA) */
    DT__REAL *k_rows, *k_dims;
    DT__REAL *v_rows, *v_dims;
    DT__REAL *dk, *dv;            /* (wide/NR,keys,NR) */
    DT__REAL *q_lanes, *d_lanes;  /* (D,NR): q^T, dout^T */
    DT__REAL *q_rows, *d_rows;    /* (wide/NR,NR,NR): q, dout */
    DT__REAL *out;                /* (dims,NR): out^T, dq^T */
    DT__REAL *p, *ds;             /* (keys,NR) */
    DT__REAL *turned;             /* (NR,keys): p or ds the other way round */
    int32_t *position, *document; /* (tk) of the keys of a sequence; document NULL: one */
} DT__K(heads);

DT__FN DT__K(heads) DT__K(heads_in)(void *work, int64_t tk, int64_t dim) {
    DT__K(heads) w;
    w.keys = (tk + 15) / 16 * 16; /* whole tiles and whole turns */
    w.dims = (dim + DT__MA - 1) / DT__MA * DT__MA;
    w.wide = (dim + DT__NR - 1) / DT__NR * DT__NR;
    w.k_rows = (DT__REAL *)dt__align64(work);
    w.k_dims = w.k_rows + w.keys * dim;
    w.v_rows = w.k_dims + tk * w.dims;
    w.v_dims = w.v_rows + w.keys * dim;
    w.dk = w.v_dims + tk * w.dims;
    w.dv = w.dk + w.keys * w.wide;
    w.p = w.dv + w.keys * w.wide;
    w.ds = w.p + w.keys * DT__NR;
    w.q_lanes = w.ds + w.keys * DT__NR;
    w.d_lanes = w.q_lanes + dim * DT__NR;
    w.q_rows = w.d_lanes + dim * DT__NR;
    w.d_rows = w.q_rows + w.wide * DT__NR;
    w.out = w.d_rows + w.wide * DT__NR;
    w.turned = w.out + w.dims * DT__NR;
    w.position = (int32_t *)(w.turned + w.keys * DT__NR);
    w.document = w.position + tk;
    return w;
}

/* Panels of `width` rows, (ceil(n/width),dim,width), from n rows of dim numbers ld apart; missing
   rows are zero. */
DT__FN void DT__K(panels_of_rows)(DT__REAL *panels, int64_t width, dt_dtype dtype, const void *from,
    int64_t at, int64_t ld, int64_t n, int64_t dim) {
    for (int64_t i = 0; i < n; i += width) {
        int64_t have = n - i < width ? n - i : width;
        DT__K(pack_columns)(dtype, 0, panels + i * dim, width, from, at + i * ld, ld, have, dim);
    }
}

/* Panels of `width` columns, (ceil(dim/width),n,width), from the same; panels are `apart` numbers
   apart. */
DT__FN void DT__K(panels_of_columns)(DT__REAL *panels, int64_t apart, int64_t width, dt_dtype dtype,
    const void *from, int64_t at, int64_t ld, int64_t n, int64_t dim) {
    for (int64_t c = 0; c < dim; c += width, panels += apart) DT__K(pack_rows)
    (dtype, 0, panels, width, from, at + c, ld, dim - c < width ? dim - c : width, n);
}

/* A block of at most NR queries of one head, and which keys they see. */
typedef struct DT__K(block) {
    /* how many; element of the first in q and out, rows heads * dim apart */
    int64_t queries, q;
    int64_t lse;  /* of the first in lse */
    int64_t end;  /* keys from here on are seen by none; a multiple of MA */
    int64_t sure; /* keys before this one are seen by all */
    /* lanes without a query repeat the last one */
    int32_t position[DT__LANES], document[DT__LANES];
} DT__K(block);

DT__FN void DT__K(block_make)(DT__K(block) * b, const dt_attention_mask *s, const DT__K(heads) * w,
    int64_t sequence, int64_t i, int64_t tq, int64_t tk) {
    int32_t latest = INT32_MIN, first = INT32_MAX;
    b->queries = tq - i < DT__NR ? tq - i : DT__NR;
    for (int64_t l = 0; l < DT__NR; l++) {
        int64_t at = i + (l < b->queries ? l : b->queries - 1);
        b->position[l] =
            s->q_position ? s->q_position[sequence * tq + at] : (int32_t)(at + tk - tq);
        b->document[l] = s->q_document ? s->q_document[sequence * tq + at] : 0;
        if (b->position[l] > latest) latest = b->position[l];
        if (b->position[l] < first) first = b->position[l];
    }
    b->end = tk;
    b->sure = 0;
    while (!w->document && b->sure < tk && (!s->causal || w->position[b->sure] <= first)) b->sure++;
    while (s->causal && b->end > 0 && w->position[b->end - 1] > latest) b->end--;
    b->end = (b->end + DT__MA - 1) / DT__MA * DT__MA;
}

/* row[l] = -infinity for the queries that do not see key j. */
DT__FN void DT__K(hide)(DT__REAL *row, const DT__K(block) * b, const DT__K(heads) * w, int causal,
    int64_t j, int64_t tk) {
    int32_t position = causal ? (j < tk ? w->position[j] : INT32_MAX) : INT32_MIN;
    if (j >= tk)
        for (int l = 0; l < DT__NR; l++) row[l] = (DT__REAL)-INFINITY;
    for (int l = 0; l < DT__NR; l++)
        row[l] = position > b->position[l] ? (DT__REAL)-INFINITY : row[l];
    if (!w->document || j >= tk) return;
    for (int l = 0; l < DT__NR; l++)
        row[l] = w->document[j] != b->document[l] ? (DT__REAL)-INFINITY : row[l];
}

/* to(keys,NR) = rows of keys times lanes of queries, keys 0 .. b->end. */
DT__FN void DT__K(scores)(
    DT__REAL *to, const DT__REAL *rows, const DT__REAL *lanes, int64_t end, int64_t dim) {
    for (int64_t j = 0; j < end; j += DT__MA) DT__K(attention_tile)
    (dim, rows + j * dim, DT__MA, lanes, to + j * DT__NR, DT__NR, 1, NULL, 0);
}

/* to(dims,NR) = dims of keys times rows of a block's scores. */
DT__FN void DT__K(mix)(DT__REAL *to, const DT__K(heads) * w, const DT__REAL *dims,
    const DT__REAL *scores, int64_t end, int64_t tk) {
    int64_t keys = end < tk ? end : tk;
    for (int64_t d = 0; d < w->dims; d += DT__MA) DT__K(attention_tile)
    (keys, dims + d * tk, DT__MA, scores, to + d * DT__NR, DT__NR, 1, NULL, 0);
}

/* The result of a block, (dims,NR), the other way round: rows of queries, `wide` apart, in place of
   w->q_rows. */
DT__FN void DT__K(rows_of_out)(const DT__K(heads) * w) {
    for (int64_t d = 0; d < w->wide; d += DT__TURN) {
        const DT__REAL *row[DT__TURN];
        for (int64_t i = 0; i < DT__TURN; i++)
            row[i] = w->out + (d + i < w->dims ? d + i : 0) * DT__NR;
        DT__K(turn)(w->q_rows + d, w->wide, row, DT__NR);
    }
}

/* The softmax of a block goes into w->p, not yet divided by its sums. */
DT__FN void DT__K(softmax_block)(const dt_attention_args *a, const DT__K(block) * b,
    const DT__K(heads) * w, DT__REAL *max, DT__REAL *sum) {
    for (int l = 0; l < DT__NR; l++) max[l] = (DT__REAL)-INFINITY;
    for (int64_t j = 0; j < b->end; j++) {
        DT__REAL *row = w->p + j * DT__NR;
        if (j >= b->sure) DT__K(hide)(row, b, w, a->sight.causal, j, a->tk);
        for (int l = 0; l < DT__NR; l++) max[l] = row[l] > max[l] ? row[l] : max[l];
    }
    for (int l = 0; l < DT__NR; l++) {
        sum[l] = 0;
        /* sees nothing: e^(-infinity - 0) = 0 */
        max[l] = max[l] == (DT__REAL)-INFINITY ? 0 : max[l];
    }
    for (int64_t j = 0; j < b->end; j++) {
        DT__REAL *row = w->p + j * DT__NR;
        for (int l = 0; l < DT__NR; l++) row[l] = DT__EXP(row[l] - max[l]);
        for (int l = 0; l < DT__NR; l++) sum[l] += row[l];
    }
}

DT__FN void DT__K(attention_block)(
    const dt_attention_args *a, const DT__K(block) * b, const DT__K(heads) * w) {
    DT__REAL max[DT__LANES], sum[DT__LANES], old[DT__TILE], *lse = (DT__REAL *)a->lse + b->lse;
    dt_dtype to = dt__wide(a->dtype, a->wide);
    DT__K(panels_of_rows)
    (w->q_lanes, DT__NR, a->dtype, a->q, b->q, a->heads * a->dim, b->queries, a->dim);
    for (int64_t i = 0; i < a->dim * DT__NR; i++) w->q_lanes[i] *= (DT__REAL)a->scale;
    DT__K(scores)(w->p, w->k_rows, w->q_lanes, b->end, a->dim);
    DT__K(softmax_block)(a, b, w, max, sum);
    DT__K(mix)(w->out, w, w->v_dims, w->p, b->end, a->tk);
    DT__K(rows_of_out)(w);
    for (int64_t r = 0; r < b->queries; r++) {
        DT__REAL mine = sum[r] > 0 ? max[r] + DT__LOG(sum[r]) : (DT__REAL)-INFINITY, keep = 0,
                 factor = 0, both = mine;
        if (a->merge && lse[r] > mine)
            both = lse[r] + DT__LOG(1 + DT__EXP(mine - lse[r]));
        else if (a->merge && mine > (DT__REAL)-INFINITY)
            both = mine + DT__LOG(1 + DT__EXP(lse[r] - mine));
        if (sum[r] > 0) factor = DT__EXP(mine - both) / sum[r];
        if (a->merge && lse[r] > (DT__REAL)-INFINITY) keep = DT__EXP(lse[r] - both);
        lse[r] = both;
        for (int64_t d = 0; d < a->dim; d += DT__TILE) {
            int64_t n = a->dim - d < DT__TILE ? a->dim - d : DT__TILE,
                    at = b->q + r * a->heads * a->dim + d;
            DT__REAL *row = w->q_rows + r * w->wide + d;
            for (int64_t i = 0; i < n; i++) row[i] *= factor;
            if (a->merge) {
                const DT__REAL *before = DT__K(get)(to, a->out, at, n, old);
                for (int64_t i = 0; i < n; i++) row[i] += keep * before[i];
            }
            DT__K(give)(to, a->out, at, n, row, 0);
        }
    }
}

/* Positions and documents of the keys of a sequence. */
DT__FN void DT__K(sight_of_keys)(
    DT__K(heads) * w, const dt_attention_mask *s, int64_t sequence, int64_t tk) {
    for (int64_t j = 0; j < tk; j++) {
        w->position[j] = s->k_position ? s->k_position[sequence * tk + j] : (int32_t)j;
        if (s->k_document) w->document[j] = s->k_document[sequence * tk + j];
    }
    if (!s->k_document) w->document = NULL;
}

/* Key/value head g % K of sequence g / K: query heads h with h K / H = g % K read it, and share its
   panels. */
DT__FN void DT__K(attention_group)(const dt_attention_args *a, void *work, int64_t g) {
    int64_t H = a->heads, K = a->kv_heads, D = a->dim, s = g / K, kv = (s * a->tk * K + g % K) * D;
    DT__K(heads) w = DT__K(heads_in)(work, a->tk, D);
    DT__K(sight_of_keys)(&w, &a->sight, s, a->tk);
    DT__K(panels_of_rows)(w.k_rows, DT__MA, a->dtype, a->k, kv, K * D, a->tk, D);
    DT__K(panels_of_columns)(w.v_dims, a->tk * DT__MA, DT__MA, a->dtype, a->v, kv, K * D, a->tk, D);
    for (int64_t h = g % K * (H / K); h < (g % K + 1) * (H / K); h++) {
        for (int64_t i = 0; i < a->tq; i += DT__NR) {
            DT__K(block) b;
            b.q = ((s * a->tq + i) * H + h) * D;
            b.lse = (s * H + h) * a->tq + i;
            DT__K(block_make)(&b, &a->sight, &w, s, i, a->tq, a->tk);
            DT__K(attention_block)(a, &b, &w);
        }
    }
}

DT__FN dt_status DT__K(attention)(const dt_attention_args *a) {
    int64_t K = a->kv_heads, stride = (int64_t)(a->work_bytes / (size_t)dt__omp_threads());
    if (K < 1 || a->heads % K || !a->work ||
        a->work_bytes < dt_attention_work(a->tk, a->dim, a->dtype))
        return DT_ERR_ARG;
    DT__PARALLEL
    for (int64_t g = 0; g < a->batch * K; g++)
        DT__K(attention_group)(a, (char *)a->work + dt__omp_thread() * stride, g);
    return DT_OK;
}

/* With p = e^(scale q k - lse) and dp = dout v: ds = p (dp - sum over keys of p dp) scale, and that
   sum is dot(dout, out). p and ds replace the scores and dp. */
DT__FN void DT__K(softmax_back_block)(
    const dt_attention_back_args *a, const DT__K(block) * b, const DT__K(heads) * w) {
    DT__REAL scale = (DT__REAL)a->scale, lse[DT__LANES], mean[DT__LANES], buf_o[DT__TILE],
             buf_d[DT__TILE], part;
    for (int64_t l = 0; l < DT__NR; l++) {
        lse[l] = (DT__REAL)INFINITY; /* no query, or one that sees nothing: p = 0 */
        mean[l] = 0;
        if (l >= b->queries) continue;
        DT__REAL mine = ((const DT__REAL *)a->lse)[b->lse + l];
        if (mine > (DT__REAL)-INFINITY) lse[l] = mine;
        for (int64_t d = 0; d < a->dim; d += DT__TILE) {
            int64_t n = a->dim - d < DT__TILE ? a->dim - d : DT__TILE,
                    at = b->q + l * a->heads * a->dim + d;
            const DT__REAL *out = DT__K(get)(dt__wide(a->dtype, a->wide), a->out, at, n, buf_o);
            const DT__REAL *dout = DT__K(get)(a->dtype, a->dout, at, n, buf_d);
            DT__SUM(DT__REAL, part, n, dout[j] * out[j]);
            mean[l] += part;
        }
    }
    for (int64_t j = 0; j < b->end; j++) {
        DT__REAL *p = w->p + j * DT__NR, *ds = w->ds + j * DT__NR;
        for (int l = 0; l < DT__NR; l++) p[l] -= lse[l];
        if (j >= b->sure) DT__K(hide)(p, b, w, a->sight.causal, j, a->tk);
        for (int l = 0; l < DT__NR; l++) p[l] = DT__EXP(p[l]);
        for (int l = 0; l < DT__NR; l++) ds[l] = p[l] * (ds[l] - mean[l]) * scale;
    }
}

/* sum(keys,dim) += scores^T (keys,queries) x (queries,dim): the scores are turned, then MA keys are
   taken at a time. */
DT__FN void DT__K(collect)(DT__REAL *sum, const DT__K(heads) * w, const DT__REAL *scores,
    const DT__REAL *rows, int64_t end) {
    for (int64_t j = 0; j < end; j += DT__TURN) {
        const DT__REAL *row[DT__TURN];
        for (int64_t i = 0; i < DT__TURN; i++)
            row[i] = scores + (j + i < end ? j + i : end - 1) * DT__NR;
        DT__K(turn)(w->turned + j, w->keys, row, DT__NR);
    }
    for (int64_t d = 0; d < w->wide; d += DT__NR)
        for (int64_t j = 0; j < end; j += DT__MA) DT__K(attention_tile)
    (DT__NR, w->turned + j, w->keys, rows + d * DT__NR, sum + d * w->keys + j * DT__NR, DT__NR, 0,
        NULL, 0);
}

DT__FN void DT__K(attention_back_block)(
    const dt_attention_back_args *a, const DT__K(block) * b, const DT__K(heads) * w) {
    int64_t ld = a->heads * a->dim, D = a->dim;
    DT__K(panels_of_rows)(w->q_lanes, DT__NR, a->dtype, a->q, b->q, ld, b->queries, D);
    DT__K(panels_of_rows)(w->d_lanes, DT__NR, a->dtype, a->dout, b->q, ld, b->queries, D);
    for (int64_t i = 0; i < D * DT__NR; i++) w->q_lanes[i] *= (DT__REAL)a->scale;
    DT__K(scores)(w->p, w->k_rows, w->q_lanes, b->end, D);
    DT__K(scores)(w->ds, w->v_rows, w->d_lanes, b->end, D);
    DT__K(softmax_back_block)(a, b, w);
    /* q_rows and d_rows: rows of no query */
    memset(w->q_rows, 0, (size_t)(2 * w->wide * DT__NR) * sizeof *w->q_rows);
    DT__K(panels_of_columns)
    (w->q_rows, DT__NR * DT__NR, DT__NR, a->dtype, a->q, b->q, ld, b->queries, D);
    DT__K(panels_of_columns)
    (w->d_rows, DT__NR * DT__NR, DT__NR, a->dtype, a->dout, b->q, ld, b->queries, D);
    if (a->dk) DT__K(collect)(w->dk, w, w->ds, w->q_rows, b->end);
    if (a->dv) DT__K(collect)(w->dv, w, w->p, w->d_rows, b->end);
    if (!a->dq) return;
    DT__K(mix)(w->out, w, w->k_dims, w->ds, b->end, a->tk);
    DT__K(rows_of_out)(w); /* q_rows has been read */
    for (int64_t r = 0; r < b->queries; r++) DT__K(give)
    (dt__wide(a->dtype, a->wide), a->dq, b->q + r * ld, D, w->q_rows + r * w->wide,
        a->accumulate_q);
}

/* Gradient of the keys or values of one head, from (wide/NR,keys,NR) to rows. */
DT__FN void DT__K(keys_back)(const dt_attention_back_args *a, const DT__K(heads) * w, void *to,
    int64_t kv, const DT__REAL *sum, int accumulate) {
    for (int64_t d = 0; d < a->dim && to; d += DT__NR) {
        int64_t n = a->dim - d < DT__NR ? a->dim - d : DT__NR;
        for (int64_t j = 0; j < a->tk; j++) DT__K(give)
        (dt__wide(a->dtype, a->wide), to, kv + j * a->kv_heads * a->dim + d, n,
            sum + d * w->keys + j * DT__NR, accumulate);
    }
}

/* The heads of a group share a key/value head: its gradient sums over them in ascending order, then
   over queries. */
DT__FN void DT__K(attention_back_group)(const dt_attention_back_args *a, void *work, int64_t g) {
    int64_t H = a->heads, K = a->kv_heads, D = a->dim, tk = a->tk, s = g / K,
            kv = (s * tk * K + g % K) * D;
    DT__K(heads) w = DT__K(heads_in)(work, tk, D);
    DT__K(sight_of_keys)(&w, &a->sight, s, tk);
    DT__K(panels_of_rows)(w.k_rows, DT__MA, a->dtype, a->k, kv, K * D, tk, D);
    DT__K(panels_of_columns)(w.k_dims, tk * DT__MA, DT__MA, a->dtype, a->k, kv, K * D, tk, D);
    DT__K(panels_of_rows)(w.v_rows, DT__MA, a->dtype, a->v, kv, K * D, tk, D);
    memset(w.dk, 0, (size_t)(2 * w.keys * w.wide) * sizeof *w.dk); /* dk and dv */
    for (int64_t h = g % K * (H / K); h < (g % K + 1) * (H / K); h++) {
        for (int64_t i = 0; i < a->tq; i += DT__NR) {
            DT__K(block) b;
            b.q = ((s * a->tq + i) * H + h) * D;
            b.lse = (s * H + h) * a->tq + i;
            DT__K(block_make)(&b, &a->sight, &w, s, i, a->tq, tk);
            DT__K(attention_back_block)(a, &b, &w);
        }
    }
    DT__K(keys_back)(a, &w, a->dk, kv, w.dk, a->accumulate_k);
    DT__K(keys_back)(a, &w, a->dv, kv, w.dv, a->accumulate_v);
}

DT__FN dt_status DT__K(attention_back)(const dt_attention_back_args *a) {
    int64_t K = a->kv_heads, stride = (int64_t)(a->work_bytes / (size_t)dt__omp_threads());
    if (K < 1 || a->heads % K || !a->work ||
        a->work_bytes < dt_attention_work(a->tk, a->dim, a->dtype))
        return DT_ERR_ARG;
    DT__PARALLEL
    for (int64_t g = 0; g < a->batch * K; g++)
        DT__K(attention_back_group)(a, (char *)a->work + dt__omp_thread() * stride, g);
    return DT_OK;
}

/* lse = max + log(sum of e^(x - max)): the largest term is 1, so nothing overflows. Exponentials
   are taken in the type computed in, summed and turned into the loss in double. */
DT__FN double DT__K(log_sum_exp)(const DT__REAL *x, int64_t n) {
    DT__REAL term[DT__TILE], max = DT__K(largest)(x, n);
    double sum = 0;
    for (int64_t c = 0; c < n; c += DT__TILE) {
        int64_t have = n - c < DT__TILE ? n - c : DT__TILE;
        double part;
        for (int64_t i = 0; i < have; i++) term[i] = DT__EXP(x[c + i] - max);
        DT__SUM(double, part, have, (double)term[j]);
        sum += part;
    }
    return (double)max + log(sum);
}

DT__FN double DT__K(mean_of)(const DT__REAL *x, int64_t n) {
    double total;
    DT__SUM(double, total, n, (double)x[j]);
    return total / (double)n;
}

/* cross_entropy of some of the columns, up to where the parts must meet. */
DT__FN dt_status DT__K(cross_entropy_part)(const dt_cross_entropy_args *a) {
    int64_t cols = (int64_t)a->cols, vocab = (int64_t)a->vocab;
    for (size_t r = 0; r < a->rows; r++) {
        const DT__REAL *x = DT__K(get)(
            a->dtype, a->logits, (int64_t)r * cols, cols, (DT__REAL *)dt__align64(a->work));
        int64_t label = a->labels[r], here = label - a->first;
        double target = 0;
        if (label >= a->all) return DT_ERR_ARG;
        if (label >= 0 && here >= 0 && here < vocab) target = (1 - a->smoothing) * (double)x[here];
        if (label >= 0 && a->smoothing > 0 && vocab > 0)
            target += a->smoothing * (DT__K(mean_of)(x, vocab) * ((double)vocab / (double)a->all));
        a->part[2 * r] = label < 0 ? 0 : vocab > 0 ? DT__K(log_sum_exp)(x, vocab) : -INFINITY;
        a->part[2 * r + 1] = target;
    }
    return DT_OK;
}

DT__FN dt_status DT__K(cross_entropy_join)(const dt_cross_entropy_join_args *a) {
    double total = 0, squares = 0;
    for (size_t r = 0; r < a->rows; r++) {
        double lse = 0, target = 0, max = -INFINITY, sum = 0;
        for (size_t i = 0; i < a->n; i++)
            max = a->parts[2 * (i * a->rows + r)] > max ? a->parts[2 * (i * a->rows + r)] : max;
        for (size_t i = 0; i < a->n && a->labels[r] >= 0; i++) {
            sum += (double)DT__EXP((DT__REAL)(a->parts[2 * (i * a->rows + r)] - max));
            target += a->parts[2 * (i * a->rows + r) + 1];
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

DT__FN dt_status DT__K(cross_entropy)(const dt_cross_entropy_args *a) {
    double total = 0, squares = 0, s = a->smoothing;
    int64_t cols = (int64_t)a->cols, vocab = a->vocab ? (int64_t)a->vocab : cols;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype) || vocab > cols) return DT_ERR_ARG;
    if (a->part) return DT__K(cross_entropy_part)(a);
    for (size_t r = 0; r < a->rows; r++) {
        const DT__REAL *x = DT__K(get)(
            a->dtype, a->logits, (int64_t)r * cols, cols, (DT__REAL *)dt__align64(a->work));
        int64_t label = a->labels[r];
        double lse = 0, loss = 0;
        if (label >= vocab) return DT_ERR_ARG;
        if (label >= 0) {
            lse = DT__K(log_sum_exp)(x, vocab);
            loss = s > 0 ? lse - (1 - s) * (double)x[label] - s * DT__K(mean_of)(x, vocab)
                         : lse - (double)x[label];
        }
        ((DT__REAL *)a->lse)[r] = (DT__REAL)lse;
        a->row_loss[r] = loss;
        total += loss;
        squares += lse * lse;
    }
    *a->loss = (a->add ? *a->loss : 0) + total / a->denominator;
    if (a->z_loss) *a->z_loss = (a->add ? *a->z_loss : 0) + squares / a->denominator;
    return DT_OK;
}

DT__FN dt_status DT__K(cross_entropy_back)(const dt_cross_entropy_back_args *a) {
    DT__REAL factor = (DT__REAL)(*a->upstream * a->scale);
    int64_t cols = (int64_t)a->cols, vocab = a->vocab || a->all ? (int64_t)a->vocab : cols;
    int64_t all = a->all ? a->all : vocab;
    if (!a->work || a->work_bytes < dt_row_work(cols, a->dtype) || vocab > cols) return DT_ERR_ARG;
    DT__REAL *d = (DT__REAL *)dt__align64(a->work), *buf = d + cols;
    DT__REAL off = factor * (DT__REAL)(a->smoothing / (double)all),
             on = factor * (DT__REAL)(1 - a->smoothing);
    for (int64_t r = 0; r < (int64_t)a->rows; r++) {
        const DT__REAL *x = DT__K(get)(a->dtype, a->logits, r * cols, cols, buf);
        DT__REAL lse = ((const DT__REAL *)a->lse)[r],
                 scale = factor * (1 + (DT__REAL)(2 * a->z) * lse);
        int64_t label = a->labels[r], here = label - a->first;
        if (label >= all) return DT_ERR_ARG;
        memset(d, 0, (size_t)cols * sizeof *d);
        for (int64_t c = 0; c < vocab && label >= 0; c++) d[c] = scale * DT__EXP(x[c] - lse) - off;
        if (label >= 0 && here >= 0 && here < vocab) d[here] -= on;
        DT__K(give)(a->dtype, a->dlogits, r * cols, cols, d, a->accumulate);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(mse)(const dt_mse_args *a) {
    double total = 0;
    DT__REAL buf_x[DT_PIECE], buf_y[DT_PIECE];
    for (size_t at_run = 0; at_run < a->count; at_run += DT_PIECE) {
        int64_t n = a->count - at_run < DT_PIECE ? (int64_t)(a->count - at_run) : DT_PIECE;
        const DT__REAL *x = DT__K(get)(a->dtype, a->a, (int64_t)at_run, n, buf_x);
        const DT__REAL *y = DT__K(get)(a->dtype, a->b, (int64_t)at_run, n, buf_y);
        double run;
        DT__SUM(double, run, n, ((double)x[j] - (double)y[j]) * ((double)x[j] - (double)y[j]));
        total += run;
    }
    *a->loss = total / a->denominator;
    return DT_OK;
}

DT__FN dt_status DT__K(mse_back)(const dt_mse_back_args *a) {
    DT__REAL d[DT__TILE], buf_x[DT__TILE], buf_y[DT__TILE],
        factor = (DT__REAL)(*a->upstream * a->scale);
    for (int64_t at = 0, count = (int64_t)a->count; at < count; at += DT__TILE) {
        int64_t n = count - at < DT__TILE ? count - at : DT__TILE;
        const DT__REAL *x = DT__K(get)(a->dtype, a->a, at, n, buf_x),
                       *y = DT__K(get)(a->dtype, a->b, at, n, buf_y);
        for (int64_t i = 0; i < n; i++) d[i] = factor * (x[i] - y[i]);
        DT__K(give)(a->dtype, a->da, at, n, d, a->accumulate);
    }
    return DT_OK;
}

DT__FN dt_status DT__K(square_sums)(const dt_square_sums_args *a) {
    DT__REAL buf[DT_PIECE];
    for (size_t run = 0; run * DT_PIECE < a->count; run++) {
        size_t left = a->count - run * DT_PIECE;
        int64_t n = left < DT_PIECE ? (int64_t)left : DT_PIECE;
        const DT__REAL *x = DT__K(get)(a->dtype, a->in, (int64_t)(run * DT_PIECE), n, buf);
        DT__SUM(double, a->out[run], n, (double)x[j] * (double)x[j]);
    }
    return DT_OK;
}

/* A tile of square roots, with the vectors of the product. */
DT__FN void DT__K(square_roots)(DT__REAL *tile) {
    for (int64_t i = 0; i < DT__TILE; i += DT__NV)
        DT__STORE(tile + i, DT__ROOT(DT__LOAD(tile + i)));
}

/* m and v are running means of g and g^2; both begin at zero, and 1 - beta^step undoes that bias.
   Decay on its own (AdamW) shrinks the parameter; coupled (Adam) it is a part of the gradient. */
DT__FN void DT__K(adamw_run)(const dt_adamw_args *a) {
    DT__REAL *__restrict__ param = (DT__REAL *)a->param;
    DT__REAL *__restrict__ m = (DT__REAL *)a->m, *__restrict__ v = (DT__REAL *)a->v;
    const DT__REAL *grad = (const DT__REAL *)a->grad;
    DT__REAL beta1 = (DT__REAL)a->beta1, beta2 = (DT__REAL)a->beta2, eps = (DT__REAL)a->eps;
    DT__REAL rest1 = (DT__REAL)(1 - a->beta1), rest2 = (DT__REAL)(1 - a->beta2),
             grad_scale = (DT__REAL)a->grad_scale;
    DT__REAL rate = (DT__REAL)(a->lr / (1 - pow(a->beta1, (double)a->step)));
    DT__REAL unbias = (DT__REAL)(1 / sqrt(1 - pow(a->beta2, (double)a->step)));
    DT__REAL keep = (DT__REAL)(a->coupled ? 1 : 1 - a->lr * a->weight_decay);
    DT__REAL decay = (DT__REAL)(a->coupled ? a->weight_decay : 0);
    DT__PARALLEL
    for (size_t at = 0; at < a->count; at += DT__TILE) {
        DT__REAL root[DT__TILE] = { 0 };
        size_t end = a->count - at < DT__TILE ? a->count : at + DT__TILE;
        for (size_t i = at; i < end; i++) {
            DT__REAL g = grad[i] * grad_scale + decay * param[i];
            m[i] = beta1 * m[i] + rest1 * g;
            v[i] = beta2 * v[i] + rest2 * g * g;
            root[i - at] = v[i];
        }
        DT__K(square_roots)(root);
        for (size_t i = at; i < end; i++)
            param[i] = keep * param[i] - rate * m[i] / (root[i - at] * unbias + eps);
        DT__K(give)(a->narrow_dtype, a->narrow, (int64_t)at, (int64_t)(end - at), param + at, 0);
    }
}

DT__FN dt_status DT__K(adamw)(const dt_adamw_args *a) {
    for (const dt_adamw_args *n = a; n; n = n->next) /* before anything is changed */
        if (n->step < 1 || n->dtype != a->dtype || n->narrow_dtype != a->narrow_dtype)
            return DT_ERR_ARG;
    for (; a; a = a->next) DT__K(adamw_run)(a);
    return DT_OK;
}

DT__FN dt_status DT__K(sgd)(const dt_sgd_args *a) {
    DT__REAL *param = (DT__REAL *)a->param, *buffer = (DT__REAL *)a->momentum_buffer;
    const DT__REAL *grad = (const DT__REAL *)a->grad;
    DT__REAL lr = (DT__REAL)a->lr, decay = (DT__REAL)a->weight_decay,
             grad_scale = (DT__REAL)a->grad_scale;
    DT__REAL momentum = (DT__REAL)(a->step > 1 ? a->momentum : 0);
    if (a->momentum != 0 && !buffer) return DT_ERR_ARG;
    /* the first step sets b = g */
    if (a->momentum != 0 && a->step <= 1) memset(buffer, 0, a->count * sizeof *buffer);
    for (size_t i = 0; i < a->count && a->momentum == 0; i++)
        param[i] -= lr * (grad[i] * grad_scale + decay * param[i]);
    for (size_t i = 0; i < a->count && a->momentum != 0; i++) {
        buffer[i] = momentum * buffer[i] + (grad[i] * grad_scale + decay * param[i]);
        param[i] -= lr * buffer[i];
    }
    DT__K(give)(a->narrow_dtype, a->narrow, 0, (int64_t)a->count, param, 0);
    return DT_OK;
}
DT__FN dt_status DT__K(momentum)(const dt_momentum_args *a) {
    DT__REAL *m = (DT__REAL *)a->m, beta1 = (DT__REAL)a->beta1,
             rest = (DT__REAL)((1 - a->beta1) * a->grad_scale);
    const DT__REAL *grad = (const DT__REAL *)a->grad;
    for (size_t i = 0; i < a->count; i++) m[i] = beta1 * m[i] + rest * grad[i];
    return DT_OK;
}

DT__FN dt_status DT__K(frozen_adam)(const dt_frozen_adam_args *a) {
    DT__REAL *param = (DT__REAL *)a->param, lr = (DT__REAL)a->lr, eps = (DT__REAL)a->eps;
    DT__REAL keep = (DT__REAL)(1 - a->lr * a->weight_decay);
    const DT__REAL *m = (const DT__REAL *)a->m, *v = (const DT__REAL *)a->v;
    for (size_t at = 0; at < a->count; at += DT__TILE) {
        DT__REAL root[DT__TILE] = { 0 };
        size_t n = a->count - at < DT__TILE ? a->count - at : DT__TILE;
        memcpy(root, v + at, n * sizeof *root);
        DT__K(square_roots)(root);
        for (size_t i = 0; i < n; i++)
            param[at + i] = keep * param[at + i] - lr * m[at + i] / (root[i] + eps);
        DT__K(give)(a->narrow_dtype, a->narrow, (int64_t)at, (int64_t)n, param + at, 0);
    }
    return DT_OK;
}

/* The first pass leaves x + error in error, from which the second takes what is sent. */
DT__FN dt_status DT__K(sign_pack)(const dt_sign_pack_args *a) {
    DT__REAL *error = (DT__REAL *)a->error;
    const DT__REAL *x = (const DT__REAL *)a->x, *v = (const DT__REAL *)a->v;
    double squares = 0, numbers = 0;
    if (a->parts < 1 || a->count % (8 * a->parts) != 0) return DT_ERR_ARG;
    for (size_t run = 0; run < a->count; run += DT_PIECE) {
        int64_t n = a->count - run < DT_PIECE ? (int64_t)(a->count - run) : DT_PIECE;
        double sum;
        for (int64_t i = 0; i < n; i++)
            error[i + run] = v[i + run] != 0 ? x[i + run] + error[i + run] : 0;
        DT__SUM(double, sum, n, (double)error[j + run] * (double)error[j + run]);
        squares += sum;
        for (int64_t i = 0; i < n; i++) numbers += v[i + run] != 0;
    }
    DT__REAL scale = (DT__REAL)(numbers > 0 ? sqrt(squares / numbers) : 0);
    double sent = (double)scale;
    size_t part = a->count / a->parts / 8; /* bytes of a message's signs */
    for (size_t byte = 0; byte < a->count / 8; byte++) {
        unsigned bits = 0;
        for (size_t i = 8 * byte; i < 8 * byte + 8; i++) {
            bits |= (unsigned)(error[i] >= 0) << (i - 8 * byte);
            if (v[i] != 0) error[i] -= error[i] >= 0 ? scale : -scale;
        }
        ((unsigned char *)a->out)[byte + byte / part * sizeof sent] = (unsigned char)bits;
    }
    for (size_t p = 0; p < a->parts; p++)
        memcpy((char *)a->out + p * (part + sizeof sent) + part, &sent, sizeof sent);
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
#undef DT__SUM
#endif /* floating types */

/* This type and instruction set as a table: what section 23 chooses from. */
#if DT__BITS == 1
#define DT__VARIANT_ENTRY(k) NULL,
#else
#define DT__VARIANT_ENTRY(k) DT__K(k),
#endif
static const dt__variant DT__K(
    variant) = { DT__K(fill), DT__K(reduce), DT__K(permute), DT__FLOAT_KERNELS(DT__VARIANT_ENTRY) };
#undef DT__VARIANT_ENTRY
#undef DT__JOIN2
#undef DT__JOIN
#undef DT__K
#undef DT__REAL
#undef DT__WIDE
#undef DT__EXP
#undef DT__LOG
#undef DT__FN
#undef DT__SUFFIX
#undef DT__NV
#undef DT__NR
#undef DT__MORE
#undef DT__V
#undef DT__ZERO
#undef DT__LOAD
#undef DT__STORE
#undef DT__FMADD
#undef DT__ROOT
#undef DT__TURN
#undef DT__MR
#undef DT__MA
#undef DT__ROWS
#undef DT__ROWS_A
#undef DT__TANH
#undef DT__PHI
#undef DT__GEMM
#undef DT__LOGISTIC
#undef DT__BITS
#undef DT__ISA
#endif /* DT__BITS */

#if defined(DT_IMPLEMENTATION) && !defined(DT__TENSOR_TABLE) && !defined(DT__BITS)
#define DT__TENSOR_TABLE

#ifdef __cplusplus
extern "C" {
#endif

// ==== 23. The CPU kernel table ==================================================================

/* Sections 20 to 22 for each type and set: float and double by every set that this processor family
   has. */
#define DT__BITS 1
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
#define DT__BITS 64
#define DT__ISA 1
#include "dt_tensor.h"
#endif
#if defined(__x86_64__)
#define DT__BITS 32
#define DT__ISA 2
#include "dt_tensor.h"
#define DT__BITS 64
#define DT__ISA 2
#include "dt_tensor.h"
#endif

/* The best instruction set of this machine. */
static int dt__isa_best(void) {
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

/* NULL where there are no kernels for the type, or for the set in this build. Tests force each set
   up to the best. */
static const dt__variant *dt__variant_of(dt_dtype dtype, int isa) {
#if defined(__x86_64__)
    static const dt__variant *const f32[DT__ISAS] = { &dt__variant_f32_plain, &dt__variant_f32_avx2,
        &dt__variant_f32_avx512 };
    static const dt__variant *const f64[DT__ISAS] = { &dt__variant_f64_plain, &dt__variant_f64_avx2,
        &dt__variant_f64_avx512 };
#elif defined(__aarch64__)
    static const dt__variant *const f32[DT__ISAS] = { &dt__variant_f32_plain, &dt__variant_f32_neon,
        NULL };
    static const dt__variant *const f64[DT__ISAS] = { &dt__variant_f64_plain, &dt__variant_f64_neon,
        NULL };
#else
    static const dt__variant *const f32[DT__ISAS] = { &dt__variant_f32_plain, NULL, NULL };
    static const dt__variant *const f64[DT__ISAS] = { &dt__variant_f64_plain, NULL, NULL };
#endif
    /* 16-bit types are computed in float */
    if (dtype == DT_F32 || dt__narrow(dtype)) return f32[isa];
    if (dtype == DT_F64) return f64[isa];
    if (dtype == DT_I32) return &dt__variant_i32;
    return NULL;
}

#define DT__DISPATCH(k) \
    static dt_status dt__cpu_##k(const dt_##k##_args *a, void *stream) { \
        (void)stream; \
        const dt__variant *variant = dt__variant_of(a->dtype, dt__isa_best()); \
        return variant && variant->k ? variant->k(a) : DT_ERR_UNSUPPORTED; \
    }
DT__VARIANT_KERNELS(DT__DISPATCH)
#undef DT__DISPATCH
#undef DT__VARIANT_KERNELS
#undef DT__FLOAT_KERNELS

/* By way of double, which holds every number of the other types. */
static dt_status dt__cpu_cast(const dt_cast_args *a, void *stream) {
    double x[DT__TILE];
    (void)stream;
    if (dt_dtype_size(a->dtype) == 0 || dt_dtype_size(a->from) == 0 ||
        (a->accumulate && a->dtype == DT_I32))
        return DT_ERR_UNSUPPORTED;
    for (size_t at = 0; at < a->count; at += DT__TILE) {
        size_t n = a->count - at < DT__TILE ? a->count - at : DT__TILE;
        for (size_t i = 0; i < n; i++) x[i] = dt__number(a->from, a->in, at + i);
        if (a->accumulate)
            for (size_t i = 0; i < n; i++) x[i] += dt__number(a->dtype, a->out, at + i);
        for (size_t i = 0; i < n; i++) dt__set_number(a->dtype, a->out, at + i, x[i]);
    }
    return DT_OK;
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

static dt_status dt__cpu_move(void *dst, const void *src, size_t bytes, void *stream) {
    (void)stream;
    if (bytes != 0) memcpy(dst, src, bytes);
    return DT_OK;
}

const dt_kernels *dt_kernels_cpu(void) {
#define DT__TABLE_ENTRY(k) dt__cpu_##k,
    static const dt_kernels table = { "cpu", NULL, NULL, dt__cpu_move, NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, DT_KERNELS(DT__TABLE_ENTRY) };
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
#endif /* DT__TENSOR_TABLE */

/* HISTORY
     0.2.0   dt_io: open takes a dt_io_mode in place of 0, 1 and DT_IO_NEW; remove_folder;
             dt_printable
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
