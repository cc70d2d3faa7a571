/* bench_gpu.c - each of dt's CUDA kernels; memory-bound kernels relative to the device's copy rate
   Public domain or MIT, at your choice; see LICENSE.

       make CUDA=1 NCCL=1 build/bench_gpu && build/bench_gpu [--small]

   Memory-bound kernels are measured in the least bytes that they must read and write, as a share of
   the rate of a copy in device memory; matrix products and attention in operations. Each kernel is
   called until the device was busy for a tenth of a second, five times; the best time counts.
   --small: sizes for an emulated device. */
#define DT_IMPLEMENTATION
#include "dt_tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUFFERS = 8 };
typedef struct bench {
    dt_ctx *ctx;
    const dt_kernels *k;
    void *stream;
    char *buf[BUFFERS]; /* (most) bytes each */
    int32_t *ids;       /* (rows) */
    double *losses;     /* (rows + 1) */
    void *work;
    /* held: rows of an f32 embedding that fits into `most` bytes */
    size_t most, rows, cols, vocab, held, params;
    dt_dtype dtype;
    double copy; /* the copy rate, bytes per second */
    int64_t batch, heads, seq, dim, mm;
    int small;
} bench;

typedef dt_status (*run_fn)(bench *b);

/* Seconds of one call. */
static double seconds_of(bench *b, run_fn run, dt_status *status) {
    const dt_host *host = dt_host_default();
    double best = 1e9, enough = b->small ? 0 : 0.1;
    for (int warm = 0; warm < 3; warm++)
        if ((*status = run(b)) != DT_OK) return 0;
    b->k->sync(b->stream);
    int calls = b->small ? 1 : 4;
    for (int round = 0; round < (b->small ? 1 : 5);) {
        double begin = host->now(NULL);
        for (int i = 0; i < calls; i++) run(b);
        *status = b->k->sync(b->stream);
        double took = host->now(NULL) - begin;
        if (took < enough && calls < 1 << 20) {
            calls *= 2;
            continue;
        }
        if (took / calls < best) best = took / calls;
        round++;
    }
    return best;
}

/* Measures and prints one row. bytes: the least that must move. flops: 0 if memory-bound. */
static void measure(
    bench *b, const char *name, const char *shape, run_fn run, double bytes, double flops) {
    dt_status status = DT_OK;
    double s = seconds_of(b, run, &status);
    if (status != DT_OK) {
        printf("# %s %s %s: %s\n", name, shape, dt_dtype_name(b->dtype), dt_status_name(status));
        return;
    }
    printf("%s,%s,%s,%.2f,", name, shape, dt_dtype_name(b->dtype), 1e6 * s);
    if (flops > 0)
        printf(",%.1f,\n", flops / s / 1e12);
    else
        printf("%.0f,,%.3f\n", bytes / s / 1e9, b->copy > 0 ? bytes / s / b->copy : 1);
    if (flops > 0)
        printf("summary,%s_%s_tflops,%.1f\n", name, dt_dtype_name(b->dtype), flops / s / 1e12);
    else if (b->copy > 0)
        printf("summary,%s_%s_share,%.3f\n", name, dt_dtype_name(b->dtype), bytes / s / b->copy);
    fflush(stdout);
}

// ==== The calls =================================================================================

static size_t elements(const bench *b) { return b->rows * b->cols; }

static dt_status run_move(bench *b) { return b->k->move(b->buf[0], b->buf[1], b->most, b->stream); }
static dt_status run_fill(bench *b) {
    dt_fill_args a = { b->dtype, b->buf[0], elements(b), 1 };
    return b->k->fill(&a, b->stream);
}
static dt_status run_cast(bench *b) {
    dt_cast_args a = { DT_F32, b->dtype, b->buf[0], b->buf[1], elements(b), 0 };
    return b->k->cast(&a, b->stream);
}
static dt_status run_add(bench *b) {
    dt_binary_args a = { .dtype = b->dtype,
        .op = DT_ADD,
        .out = b->buf[0],
        .a = b->buf[1],
        .b = b->buf[2],
        .shape = DT_SHAPE((int64_t)elements(b)),
        .stride_a = { 1 },
        .stride_b = { 1 } };
    return b->k->binary(&a, b->stream);
}
static dt_status run_gelu(bench *b) {
    dt_unary_args a = { b->dtype, DT_ACT_GELU, b->buf[0], b->buf[1], elements(b), 0, 0 };
    return b->k->unary(&a, b->stream);
}
static dt_status run_gelu_back(bench *b) {
    dt_unary_back_args a = { b->dtype, DT_ACT_GELU, b->buf[0], b->buf[1], b->buf[2], elements(b), 0,
        0, 0 };
    return b->k->unary_back(&a, b->stream);
}
static dt_status run_glu(bench *b) {
    dt_glu_args a = { b->dtype, DT_ACT_SILU, b->buf[0], b->buf[1], b->rows, b->cols / 2 };
    return b->k->glu(&a, b->stream);
}
static dt_status run_glu_back(bench *b) {
    dt_glu_back_args a = { b->dtype, DT_ACT_SILU, b->buf[0], b->buf[1], b->buf[2], b->rows,
        b->cols / 2, 0 };
    return b->k->glu_back(&a, b->stream);
}
static dt_status run_norm(bench *b) {
    dt_norm_args a = { b->dtype, b->buf[0], b->buf[3], b->buf[4], b->buf[1], b->buf[5], b->buf[6],
        b->rows, b->cols, 1e-5, 0, b->work, b->k->work_bytes };
    return b->k->norm(&a, b->stream);
}
static dt_status run_norm_back(bench *b) {
    dt_norm_back_args a = { .dtype = b->dtype,
        .dx = b->buf[0],
        .dgain = b->buf[6],
        .dbias = b->buf[7],
        .dout = b->buf[1],
        .in = b->buf[2],
        .gain = b->buf[5],
        .mean = b->buf[3],
        .rstd = b->buf[4],
        .rows = b->rows,
        .cols = b->cols,
        .wide_gain = 1,
        .wide_bias = 1,
        .work = b->work,
        .work_bytes = b->k->work_bytes };
    return b->k->norm_back(&a, b->stream);
}
static dt_status run_rope(bench *b) {
    dt_rope_args a = { b->dtype, b->buf[0], b->buf[1], b->ids, b->rows, b->cols / 64, 64, 64, 10000,
        0, 0, 0 };
    return b->k->rope(&a, b->stream);
}
static dt_status run_dropout(bench *b) {
    dt_dropout_args a = { b->dtype, b->buf[0], b->buf[1], b->ids, b->rows, b->cols, 0, 0.1, 77, 0 };
    return b->k->dropout(&a, b->stream);
}
static dt_status run_embedding(bench *b) {
    dt_embedding_args a = { b->dtype, b->buf[0], b->buf[1], b->ids, b->rows, b->cols, 0,
        (int64_t)b->held, (int64_t)b->held, 0 };
    return b->k->embedding(&a, b->stream);
}
static dt_status run_embedding_back(bench *b) {
    dt_embedding_back_args a = { b->dtype, b->buf[0], b->buf[1], b->ids, b->rows, b->cols, 0,
        (int64_t)b->held, 1, 1, b->work, b->k->work_bytes, 0 };
    return b->k->embedding_back(&a, b->stream);
}
/* As the ops do it: as many rows at a time as have logits that fit. */
static size_t loss_rows(const bench *b) {
    size_t fit = b->most / (b->vocab * 4);
    return fit < b->rows ? fit : b->rows;
}
static dt_status run_loss(bench *b) {
    dt_cross_entropy_args a = { .dtype = b->dtype,
        .loss = b->losses,
        .row_loss = b->losses + 1,
        .lse = b->buf[3],
        .logits = b->buf[1],
        .labels = b->ids,
        .rows = loss_rows(b),
        .cols = b->vocab,
        .vocab = b->vocab,
        .denominator = 1,
        .work = b->work,
        .work_bytes = b->k->work_bytes };
    return b->k->cross_entropy(&a, b->stream);
}
static dt_status run_loss_back(bench *b) {
    dt_cross_entropy_back_args a = { .dtype = b->dtype,
        .dlogits = b->buf[0],
        .logits = b->buf[1],
        .lse = b->buf[3],
        .labels = b->ids,
        .rows = loss_rows(b),
        .cols = b->vocab,
        .vocab = b->vocab,
        .upstream = b->losses,
        .scale = 1,
        .work = b->work,
        .work_bytes = b->k->work_bytes };
    return b->k->cross_entropy_back(&a, b->stream);
}
static dt_status run_reduce(bench *b) {
    const void *in[4] = { b->buf[0], b->buf[1], b->buf[2], b->buf[3] };
    dt_reduce_args a = { b->dtype, b->buf[4], in, 4, elements(b), DT_SUM, NULL, 0, 0 };
    return b->k->reduce(&a, b->stream);
}
static dt_status run_transpose(bench *b) { /* (B,T,H,D) -> (B,H,T,D) */
    int64_t H = (int64_t)b->cols / 64, T = b->seq, B = (int64_t)b->rows / T;
    dt_permute_args a = { .dtype = b->dtype,
        .out = b->buf[0],
        .in = b->buf[1],
        .shape = DT_SHAPE(B, T, H, 64),
        .out_stride = { H * T * 64, 64, T * 64, 1 },
        .in_stride = { T * H * 64, H * 64, 64, 1 } };
    return b->k->permute(&a, b->stream);
}
static dt_status run_squares(bench *b) {
    dt_square_sums_args a = { DT_F32, (double *)(void *)b->buf[7], b->buf[0], b->params };
    return b->k->square_sums(&a, b->stream);
}
static dt_status run_adamw(bench *b) {
    dt_adamw_args a = { .dtype = DT_F32,
        .param = b->buf[0],
        .grad = b->buf[1],
        .m = b->buf[2],
        .v = b->buf[3],
        .count = b->params,
        .lr = 1e-4,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .weight_decay = 0.1,
        .grad_scale = 1,
        .step = 10,
        .model_dtype = DT_BF16,
        .model_param = b->dtype == DT_BF16 ? b->buf[4] : NULL };
    return b->k->adamw(&a, b->stream);
}
static dt_status run_matmul(bench *b) {
    dt_matmul_args a = { .dtype = b->dtype,
        .c = b->buf[0],
        .a = b->buf[1],
        .b = b->buf[2],
        .m = b->mm,
        .n = b->mm,
        .k = b->mm,
        .trans_b = 1,
        .work = b->work,
        .work_bytes = b->k->work_bytes };
    return b->k->matmul(&a, b->stream);
}
/* The arguments that attention and its backward share. */
#define ATTENTION_ARGS \
    .dtype = b->dtype, .out = b->buf[0], .lse = b->buf[4], .q = b->buf[1], .k = b->buf[2], \
    .v = b->buf[3], .batch = b->batch, .tq = b->seq, .tk = b->seq, .heads = b->heads, \
    .kv_heads = b->heads, .dim = b->dim, .scale = 0.125, .mask = { .causal = 1 }, .work = b->work, \
    .work_bytes = b->k->work_bytes
static dt_status run_attention(bench *b) {
    dt_attention_args a = { ATTENTION_ARGS };
    return b->k->attention(&a, b->stream);
}
static dt_status run_attention_back(bench *b) {
    dt_attention_back_args a = { ATTENTION_ARGS, .dq = b->buf[5], .dk = b->buf[6], .dv = b->buf[7],
        .dout = b->buf[0] };
    return b->k->attention_back(&a, b->stream);
}

// ==== Rows ======================================================================================

/* Fills every buffer with random values of a type. With zeros a device uses less power and runs
   faster. */
static int randomize(bench *b, dt_dtype dtype) {
    for (int i = 0; i < BUFFERS; i++) {
        dt_init_args random = { dtype, b->buf[i], b->most / dt_dtype_size(dtype), 1, 1, (uint64_t)i,
            0 };
        if (b->k->init(&random, b->stream) != DT_OK) return 0;
    }
    return 1;
}

/* AdamW's second moments must be positive. */
static int positive(bench *b) {
    dt_fill_args a = { DT_F32, b->buf[3], b->params, 0.01 };
    return b->k->fill(&a, b->stream) == DT_OK;
}

static void memory_bound(bench *b) {
    double e = (double)dt_dtype_size(b->dtype), n = (double)elements(b), rows = (double)b->rows,
           c = (double)b->cols;
    double logits = (double)loss_rows(b) * (double)b->vocab;
    char shape[48], loss[48], flat[48];
    snprintf(shape, sizeof shape, "%zux%zu", b->rows, b->cols);
    snprintf(loss, sizeof loss, "%zux%zu", loss_rows(b), b->vocab);
    snprintf(flat, sizeof flat, "%zu", b->params);
    measure(b, "fill", shape, run_fill, n * e, 0);
    measure(b, "cast", shape, run_cast, n * (e + 4), 0);
    measure(b, "add", shape, run_add, 3 * n * e, 0);
    measure(b, "gelu", shape, run_gelu, 2 * n * e, 0);
    measure(b, "gelu_back", shape, run_gelu_back, 3 * n * e, 0);
    measure(b, "swiglu", shape, run_glu, 1.5 * n * e, 0);
    measure(b, "swiglu_back", shape, run_glu_back, 2.5 * n * e, 0);
    measure(b, "norm", shape, run_norm, 2 * n * e + 8 * rows, 0);
    measure(b, "norm_back", shape, run_norm_back, 3 * n * e + 8 * rows + 8 * c, 0);
    measure(b, "rope", shape, run_rope, 2 * n * e, 0);
    measure(b, "dropout", shape, run_dropout, 2 * n * e, 0);
    measure(b, "embedding", shape, run_embedding, 2 * n * e, 0);
    measure(b, "embedding_back", shape, run_embedding_back, n * e + 8 * n, 0);
    measure(b, "transpose", shape, run_transpose, 2 * n * e, 0);
    measure(b, "reduce_4", shape, run_reduce, 5 * n * e, 0);
    measure(b, "cross_entropy", loss, run_loss, logits * e, 0);
    measure(b, "cross_entropy_back", loss, run_loss_back, 2 * logits * e, 0);
    measure(b, "square_sums", flat, run_squares, 4.0 * (double)b->params, 0);
    if (!randomize(b, DT_F32) || !positive(b))
        printf("# adamw: the buffers could not be filled\n");
    else
        measure(b, "adamw", flat, run_adamw,
            (28.0 + (b->dtype == DT_BF16 ? 2 : 0)) * (double)b->params, 0);
}

static void compute_bound(bench *b) {
    static const int64_t dims[2] = { 64, 128 };
    char shape[64];
    double m = (double)b->mm;
    snprintf(shape, sizeof shape, "%lldx%lldx%lld", (long long)b->mm, (long long)b->mm,
        (long long)b->mm);
    measure(b, "matmul", shape, run_matmul, 0, 2 * m * m * m);
    for (int i = 0; i < 2; i++) {
        b->dim = dims[i];
        /* causal: half of the scores */
        double flops =
            2.0 * (double)(b->batch * b->heads * b->dim) * (double)b->seq * (double)b->seq;
        char name[40];
        snprintf(shape, sizeof shape, "%lldx%lldx%lldx%lld", (long long)b->batch,
            (long long)b->heads, (long long)b->seq, (long long)b->dim);
        snprintf(name, sizeof name, "attention_d%lld", (long long)b->dim);
        measure(b, name, shape, run_attention, 0, flops);
        /* reads the results of the forward above */
        snprintf(name, sizeof name, "attention_back_d%lld", (long long)b->dim);
        measure(b, name, shape, run_attention_back, 0, 2.5 * flops);
    }
}

/* Allocates the buffers and fills the token ids. */
static int prepare(bench *b) {
    for (int i = 0; i < BUFFERS; i++) {
        b->buf[i] = (char *)dt_alloc(b->ctx, DT_MEM_ACTS, b->most, "numbers");
        if (!b->buf[i]) return 0;
    }
    b->ids = (int32_t *)dt_alloc(b->ctx, DT_MEM_ACTS, b->rows * sizeof(int32_t), "ids");
    b->losses = (double *)dt_alloc(b->ctx, DT_MEM_ACTS, (b->rows + 1) * sizeof(double), "losses");
    b->work = dt_alloc(b->ctx, DT_MEM_TEMP, b->k->work_bytes, "scratch");
    int32_t *ids = (int32_t *)malloc(b->rows * sizeof *ids);
    for (size_t i = 0; i < b->rows && ids; i++) ids[i] = (int32_t)(i * 2654435761u % b->held);
    int ready = ids && b->ids && b->losses && b->work &&
                b->k->move(b->ids, ids, b->rows * sizeof *ids, b->stream) == DT_OK;
    dt_fill_args one = { DT_F64, b->losses, b->rows + 1, 1 };
    ready = ready && b->k->fill(&one, b->stream) == DT_OK && b->k->sync(b->stream) == DT_OK;
    free(ids);
    return ready;
}

int main(int argc, char **argv) {
    bench b;
    char why[160] = "";
    dt_dtype types[2] = { DT_BF16, DT_F32 };
    dt_status status = DT_OK;
    memset(&b, 0, sizeof b);
    b.small = argc > 1 && strcmp(argv[1], "--small") == 0;
    if (!dt_cuda_ready) {
        printf("# bench_gpu: this build has no CUDA: make "
               "CUDA=1\nkernel,shape,dtype,us,gbs,tflops,share\n");
        return 0;
    }
    if (dt_cuda_ready(why, sizeof why) != DT_OK) {
        printf("# bench_gpu: no CUDA device (%s)\n", why);
        return 1;
    }
    b.ctx = dt_ctx_make((dt_ctx_desc){ .kernels = dt_kernels_cuda() });
    if (!b.ctx || dt_error(b.ctx) != DT_OK) return 1;
    b.k = dt_ctx_kernels(b.ctx);
    b.stream = dt_ctx_stream(b.ctx);
    b.rows = b.small ? 32 : 16384, b.cols = b.small ? 128 : 3072, b.vocab = b.small ? 304 : 50304;
    b.params = b.small ? 5000 : 124u << 20, b.mm = b.small ? 32 : 8192;
    b.batch = b.small ? 1 : 8, b.heads = b.small ? 2 : 16, b.seq = b.small ? 16 : 4096;
    b.most = b.small ? 1u << 20 : (size_t)512 << 20;
    b.held =
        b.most / (b.cols * sizeof(float)) < b.vocab ? b.most / (b.cols * sizeof(float)) : b.vocab;
    if (!prepare(&b)) {
        printf("# bench_gpu: %s\n", dt_error_text(b.ctx));
        return 1;
    }
    if (why[0]) printf("# %s\n", why);
    printf("kernel,shape,dtype,us,gbs,tflops,share\n");
    double s = seconds_of(&b, run_move, &status);
    printf("copy,%zu,bytes,%.2f,%.0f,,1.000\n", b.most, 1e6 * s, 2 * (double)b.most / s / 1e9);
    printf("summary,copy_gbs,%.0f\n", 2 * (double)b.most / s / 1e9);
    b.copy = 2 * (double)b.most / s;
    for (int t = 0; t < 2; t++) {
        b.dtype = types[t];
        if (!randomize(&b, b.dtype)) return 1;
        if (t == 0 || b.small) compute_bound(&b);
        memory_bound(&b);
    }
    dt_ctx_free(b.ctx);
    return 0;
}
