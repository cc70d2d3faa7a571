/* bench_ops.c - ops that are limited by memory, as a share of the machine's memory rate
   Public domain or MIT, at your choice; see LICENSE.

       make build/bench_ops && build/bench_ops [--only NAME] [--seconds X] [--rows N]

   Each case runs one op on tensors of ROWS x 1,024 elements, on one thread, and counts the processor
   time of its kernels: forward, and the backward without the sum that the backward starts from. All
   run in f32, and those that most models use in bf16, too (NAME_bf16). `bytes` is what the op has to
   move: each operand is read once and each result is written once; the indices of max pooling
   count. `share` is the rate of these bytes divided by that of the triad a[i] = b[i] + s c[i] (J.
   McCalpin's STREAM) over f32 arrays of as many elements, three times 4 bytes per element. Neither
   counts the lines that an ordinary store, as the triad's, reads before it overwrites them.
   Non-temporal stores avoid this read, so a share can exceed 1.

   Batched products (dt_matmul) are compared with the kernel of one product of the same size and
   form, called as often: `share` is the ratio of their rates.

   The triad and the case run in turns, and the best run of each counts. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_tensor.h"

#include "tests/bench/bench.h"

enum { COLS = 1024, MOST_CALLS = 64 };

typedef struct settings {
    double seconds; /* minimum time of a case */
    int64_t rows;
    const char *only; /* only cases whose name contains this, and no products */
} settings;

// ==== Processor time of kernels =================================================================

/* The kernels that have run since `calls` was last set to 0, in order. */
static struct {
    int calls;
    double seconds[MOST_CALLS];
} timed;

#define TIMED_KERNEL(k) \
    static dt_status timed_##k(const dt_##k##_args *args, void *stream) { \
        double start = bench_thread_seconds(); \
        dt_status status = dt_kernels_cpu()->k(args, stream); \
        if (timed.calls < MOST_CALLS) timed.seconds[timed.calls] = bench_thread_seconds() - start; \
        timed.calls++; \
        return status; \
    }
DT_KERNELS(TIMED_KERNEL)

/* Sum of the kernels' times from call number `first` on; NaN if there were too many calls. */
static double seconds_from(int first) {
    double sum = timed.calls <= MOST_CALLS ? 0 : NAN;
    for (int i = first; i < timed.calls && i < MOST_CALLS; i++) sum += timed.seconds[i];
    return sum;
}

// ==== Cases =====================================================================================

/* The tensors of one run, made before the clock starts. x and y (ROWS x COLS) are results of ops,
   so that the backward computes the gradients of those that the case uses, and of no others, as it
   would for parameters. */
typedef struct inputs {
    dt_ctx *ctx;
    dt_dtype dtype;
    dt_tensor *values[2]; /* frozen parameters, of which x and y are copies */
    dt_tensor *x, *y;
    dt_tensor *gain, *bias; /* parameters (COLS) */
    dt_tensor *mask;        /* 0 and 1, no gradient */
    dt_tensor *ids, *images;
    float *state[4]; /* of AdamW: parameters, gradients, m, v */
    void *model;     /* of AdamW: the parameters in bf16 */
    int64_t rows;
} inputs;

typedef struct op_case {
    const char *name;
    dt_tensor *(*run)(const inputs *in);
    /* elements of the dtype's size that the op reads and writes, per element of x; backward 0: the
       op has none */
    double forward, backward;
    int dtypes; /* IN_F32, IN_BF16 or both */
} op_case;
enum { IN_F32 = 1, IN_BF16 = 2 };

#define CASE(id, expression) \
    static dt_tensor *run_##id(const inputs *in) { return expression; }

static dt_reduce_desc over_middle(int keepdim) {
    return (dt_reduce_desc){ .dims = { 1 }, .n = 1, .keepdim = keepdim };
}
static const dt_window_desc pool = { .kernel = { 2, 2 } };

CASE(affine, dt_affine(in->x, 2, 1))
CASE(relu, dt_relu(in->x))
CASE(abs, dt_abs(in->x))
CASE(clamp, dt_clamp(in->x, -1, 1))
CASE(square, dt_pow(in->x, 2))
CASE(sqrt, dt_sqrt(in->x))
CASE(exp, dt_exp(in->x))
CASE(ln, dt_ln(in->x))
CASE(sigmoid, dt_sigmoid(in->x))
CASE(softplus, dt_softplus(in->x))
CASE(tanh, dt_tanh(in->x))
CASE(silu, dt_silu(in->x))
CASE(gelu, dt_gelu(in->x))
CASE(gelu_erf, dt_gelu_erf(in->x))
CASE(swiglu, dt_swiglu(dt_reshape(in->x, DT_SHAPE(in->rows / 2, 2, COLS))))
CASE(add, dt_add(in->x, in->y))
CASE(add_row, dt_add(in->x, in->bias))
CASE(mul, dt_mul(in->x, in->y))
CASE(div, dt_div(in->x, in->y))
CASE(minimum, dt_minimum(in->x, in->y))
CASE(less, dt_less(in->x, in->y))
CASE(where, dt_where(in->mask, in->x, in->y))
CASE(masked_fill, dt_masked_fill(in->x, in->mask, -1))
CASE(sum_rows, dt_sum_over(in->x, 0))
CASE(sum_cols, dt_sum_over(in->x, 1))
CASE(
    mean_middle, dt_mean_dims(dt_reshape(in->x, DT_SHAPE(in->rows / 64, 64, COLS)), over_middle(1)))
CASE(max_cols, dt_max_over(in->x, 1))
CASE(argmax, dt_argmax(in->x, 1))
CASE(cumsum_rows, dt_cumsum(in->x, 0))
CASE(cumsum_cols, dt_cumsum(in->x, 1))
CASE(transpose, dt_transpose(in->x, 0, 1))
CASE(slice, dt_slice(in->x, 1, 0, COLS / 2))
CASE(select, dt_select(dt_reshape(in->x, DT_SHAPE(in->rows, 2, COLS / 2)), 1, 1))
CASE(concat, dt_concat((dt_tensor *[]){ in->x, in->y }, 2, 1))
CASE(broadcast_to, dt_broadcast_to(in->gain, in->x->shape))
CASE(softmax, dt_softmax(in->x))
CASE(layernorm, dt_layernorm(in->x, in->gain, in->bias, 0))
CASE(rmsnorm, dt_rmsnorm(in->x, in->gain, 0))
CASE(rope, dt_rope(dt_reshape(in->x, DT_SHAPE(1, in->rows, 16, COLS / 16)),
               dt_reshape(in->ids, DT_SHAPE(1, in->rows)), (dt_rope_desc){ 0 }))
CASE(embedding, dt_embedding(in->x, in->ids))
CASE(one_hot, dt_one_hot(in->ids, COLS, DT_F32))
CASE(cast_bf16, dt_cast(in->x, DT_BF16))
CASE(mse, dt_mse(in->x, in->y, 1))
CASE(bce, dt_bce_with_logits(in->x, in->mask, 1))
CASE(max_pool2d, dt_max_pool2d(in->images, pool))
CASE(avg_pool2d, dt_avg_pool2d(in->images, pool))
CASE(cross_entropy, dt_cross_entropy(in->x, in->ids, 1))

/* AdamW updates f32 parameters. In bf16 it also writes the model's copy. */
static dt_tensor *run_adamw(const inputs *in) {
    dt_adamw_args a = { .dtype = DT_F32,
        .param = in->state[0],
        .grad = in->state[1],
        .m = in->state[2],
        .v = in->state[3],
        .count = (size_t)in->rows * COLS,
        .lr = 1e-3,
        .beta1 = 0.9,
        .beta2 = 0.999,
        .eps = 1e-8,
        .weight_decay = 0.1,
        .grad_scale = 1,
        .step = 1,
        .model_dtype = DT_BF16,
        .model_param = in->dtype == DT_BF16 ? in->model : NULL };
    timed_adamw(&a, NULL);
    return in->x;
}

/* Backward: the gradient of the result is read, the inputs that the derivative needs are read, the
   inputs' gradients are written. */
#define ROW(id, forward, backward) \
    { #id, run_##id, forward, backward, IN_F32 }
#define BOTH(id, forward, backward) \
    { #id, run_##id, forward, backward, IN_F32 | IN_BF16 }
static const op_case cases[] = { ROW(affine, 2, 2), ROW(relu, 2, 3), ROW(abs, 2, 3),
    ROW(clamp, 2, 3), ROW(square, 2, 3), ROW(sqrt, 2, 3), ROW(exp, 2, 3), ROW(ln, 2, 3),
    ROW(sigmoid, 2, 3), ROW(softplus, 2, 3), ROW(tanh, 2, 3), BOTH(silu, 2, 3), BOTH(gelu, 2, 3),
    BOTH(gelu_erf, 2, 3), BOTH(swiglu, 1.5, 2.5), BOTH(add, 3, 0), BOTH(add_row, 2, 1),
    ROW(mul, 3, 5), ROW(div, 3, 5), ROW(minimum, 3, 5), ROW(less, 3, 0), ROW(where, 4, 4),
    ROW(masked_fill, 3, 3), ROW(sum_rows, 1, 1), ROW(sum_cols, 1, 1), ROW(mean_middle, 1, 1),
    ROW(max_cols, 1, 1), ROW(argmax, 1, 0), ROW(cumsum_rows, 2, 2), ROW(cumsum_cols, 2, 2),
    ROW(transpose, 2, 2), ROW(slice, 1, 1.5), ROW(select, 1, 1.5), ROW(concat, 4, 4),
    ROW(broadcast_to, 1, 1), BOTH(softmax, 2, 3), BOTH(layernorm, 2, 3), BOTH(rmsnorm, 2, 3),
    BOTH(rope, 2, 2), ROW(embedding, 2, 2), ROW(one_hot, 1, 0), ROW(cast_bf16, 1.5, 1.5),
    ROW(mse, 2, 4), ROW(bce, 2, 3), ROW(max_pool2d, 1.5, 1.5), ROW(avg_pool2d, 1.25, 1.25),
    BOTH(cross_entropy, 1, 2), { "adamw", run_adamw, 7, 0, IN_F32 },
    { "adamw", run_adamw, 15, 0, IN_BF16 } };

// ==== Measurements ==============================================================================

static inputs make_inputs(dt_ctx *ctx, dt_dtype dtype, int64_t rows) {
    static const char *const names[2][4] = { { "x", "y", "gain", "bias" },
        { "x16", "y16", "gain16", "bias16" } };
    const char *const *name = names[dtype == DT_BF16];
    inputs in = { .ctx = ctx, .dtype = dtype, .rows = rows };
    size_t n = (size_t)rows * COLS;
    for (int i = 0; i < 2; i++)
        in.values[i] = dt_param_at(ctx, name[i], DT_SHAPE(rows, COLS), DT_UNIFORM(2),
            (dt_param_desc){ .frozen = 1, .dtype = dtype });
    in.gain = dt_param_at(ctx, name[2], DT_SHAPE(COLS), DT_ONES, (dt_param_desc){ .dtype = dtype });
    in.bias =
        dt_param_at(ctx, name[3], DT_SHAPE(COLS), DT_ZEROS, (dt_param_desc){ .dtype = dtype });
    for (int i = 0; i < 4; i++) in.state[i] = (float *)bench_operand(DT_F32, n, (uint32_t)i + 1);
    for (size_t i = 0; in.state[3] && i < n; i++) in.state[3][i] = fabsf(in.state[3][i]);
    in.model = bench_operand(DT_BF16, n, 1);
    return in;
}

static void set_inputs(inputs *in) {
    int32_t *ids = (int32_t *)malloc((size_t)in->rows * sizeof *ids);
    int64_t most = in->rows < COLS ? in->rows : COLS;
    for (int64_t i = 0; ids && i < in->rows; i++) ids[i] = (int32_t)(i * 7919 % most);
    in->x = dt_require_grad(dt_affine(in->values[0], 1, 0));
    in->y = dt_require_grad(dt_affine(in->values[1], 1, 0));
    in->mask = dt_less(in->values[0], in->values[1]);
    in->ids = dt_input(in->ctx, DT_I32, DT_SHAPE(in->rows), ids);
    in->images = dt_reshape(in->x, DT_SHAPE(in->rows / 64, 8, 8, COLS));
    free(ids);
}

/* Runs the case once: sets the seconds of forward and backward. */
static void run_case(const op_case *c, inputs *in, double *forward, double *backward) {
    set_inputs(in);
    timed.calls = 0;
    dt_tensor *out = c->run(in);
    *forward = fmin(*forward, seconds_from(0));
    if (c->backward > 0) {
        dt_tensor *sum = dt_count(out->shape) == 1 ? out : dt_sum_over(out, DT_ALL);
        timed.calls = 0;
        dt_backward(sum); /* first: a check of the sum, its gradient 1, and its backward */
        *backward = fmin(*backward, seconds_from(sum == out ? 2 : 3));
        dt_clear_grads(in->ctx);
    }
    dt_reset(in->ctx);
}

static void print_case(const char *name, dt_dtype dtype, const char *pass, double bytes,
    double seconds, double rate, double *worst, const char **worst_name) {
    double share = bytes / seconds / rate;
    printf("%s%s,%s,%.0f,%.1f,%.2f,%.3f\n", name, dtype == DT_BF16 ? "_bf16" : "", pass, bytes,
        1e6 * seconds, 1e-9 * bytes / seconds, share);
    if (share < *worst) *worst = share, *worst_name = name;
}

/* Measures one case and prints its rows. Returns 1 on failure. */
static int measure_case(const settings *s, const op_case *c, inputs *in, bench_triad *t,
    double *worst, const char **worst_name) {
    double forward = INFINITY, backward = INFINITY, best = INFINITY, start = bench_now();
    for (int n = 0; n < 4 || bench_now() - start < s->seconds; n++) {
        run_case(c, in, &forward, &backward);
        best = fmin(best, bench_triad_seconds(t));
    }
    if (dt_error(in->ctx) != DT_OK) {
        fprintf(stderr, "error: %s: %s\n", c->name, dt_error_text(in->ctx));
        return 1;
    }
    double bytes = (double)t->n * (double)dt_dtype_size(in->dtype),
           rate = 12.0 * (double)t->n / best;
    print_case(c->name, in->dtype, "forward", c->forward * bytes, forward, rate, worst, worst_name);
    if (c->backward > 0)
        print_case(
            c->name, in->dtype, "backward", c->backward * bytes, backward, rate, worst, worst_name);
    return 0;
}

static int run_cases(const settings *s, inputs *in, bench_triad *t) {
    double worst = INFINITY;
    const char *worst_name = "none";
    printf("# bytes: operands once, results once; no read of lines that a store overwrites\n"
           "op,pass,bytes,us,gbs,share\n");
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            const op_case *c = &cases[i];
            if (s->only && !strstr(c->name, s->only)) continue;
            if (!(c->dtypes & (bf16 ? IN_BF16 : IN_F32))) continue;
            if (measure_case(s, c, &in[bf16], t, &worst, &worst_name)) return 1;
        }
    printf("summary,smallest_share,%.3f\n# smallest share: %s\n", worst, worst_name);
    return 0;
}

// ==== Batched products ==========================================================================

typedef struct product_case {
    int64_t batch, m, k, n;
} product_case;
static const product_case products[] = { { 8, 512, 512, 512 }, { 96, 128, 64, 128 },
    { 96, 128, 128, 64 }, { 64, 65, 33, 17 }, { 1024, 16, 16, 16 } };

static int run_products(const settings *s, dt_ctx *ctx) {
    double worst = INFINITY;
    printf("batched product,trans,gflops,one_gflops,share\n");
    for (size_t i = 0; i < sizeof products / sizeof *products; i++)
        for (int form = 0; form < 4; form++) {
            product_case p = products[i];
            dt_matmul_desc d = { form & 1, form >> 1 };
            float *a = (float *)bench_operand(DT_F32, (size_t)(p.batch * p.m * p.k), 1);
            float *b = (float *)bench_operand(DT_F32, (size_t)(p.batch * p.k * p.n), 2);
            float *c = (float *)bench_operand(DT_F32, (size_t)(p.batch * p.m * p.n), 3);
            size_t room = dt_matmul_work(p.n, p.k, DT_F32);
            void *work = aligned_alloc(64, (room + 63) / 64 * 64);
            dt_shape left = d.trans_a ? DT_SHAPE(p.batch, p.k, p.m) : DT_SHAPE(p.batch, p.m, p.k);
            dt_shape right = d.trans_b ? DT_SHAPE(p.batch, p.n, p.k) : DT_SHAPE(p.batch, p.k, p.n);
            dt_matmul_args one = { .dtype = DT_F32,
                .c = c,
                .m = p.m,
                .n = p.n,
                .k = p.k,
                .trans_a = d.trans_a,
                .trans_b = d.trans_b,
                .work = work,
                .work_bytes = room };
            double batched = INFINITY, single = INFINITY, start = bench_now();
            for (int n = 0; n < 4 || bench_now() - start < s->seconds; n++) {
                dt_tensor *x = dt_input(ctx, DT_F32, left, a), *y = dt_input(ctx, DT_F32, right, b);
                timed.calls = 0;
                dt_matmul(x, y, d);
                batched = fmin(batched, seconds_from(0));
                dt_reset(ctx);
                double begin = bench_thread_seconds();
                for (int64_t j = 0; j < p.batch; j++) {
                    one.a = a + j * p.m * p.k, one.b = b + j * p.k * p.n, one.c = c + j * p.m * p.n;
                    dt_kernels_cpu()->matmul(&one, NULL);
                }
                single = fmin(single, bench_thread_seconds() - begin);
            }
            double gflop = 2e-9 * (double)(p.batch * p.m * p.n * p.k);
            worst = fmin(worst, single / batched);
            printf("%dx%dx%dx%d,%s,%.1f,%.1f,%.3f\n", (int)p.batch, (int)p.m, (int)p.k, (int)p.n,
                (const char *[]){ "NN", "TN", "NT", "TT" }[form], gflop / batched, gflop / single,
                single / batched);
            free(a), free(b), free(c), free(work);
        }
    printf("summary,smallest_product_share,%.3f\n", worst);
    return dt_error(ctx) != DT_OK;
}

static settings parse(int argc, char **argv) {
    settings s = { 0.5, 8192, NULL };
    for (int i = 1; i < argc; i++) {
        const char *v;
        if ((v = bench_option(argc, argv, &i, "--seconds")) != NULL)
            s.seconds = atof(v);
        else if ((v = bench_option(argc, argv, &i, "--rows")) != NULL)
            s.rows = atoll(v);
        else if ((v = bench_option(argc, argv, &i, "--only")) != NULL)
            s.only = v;
        else
            bench_refuse(argc, argv, i, "--seconds X, --rows N (a multiple of 64), --only NAME");
    }
    if (s.rows < 64 || s.rows % 64 != 0)
        bench_refuse(argc, argv, argc, "--seconds X, --rows N (a multiple of 64), --only NAME");
    return s;
}

int main(int argc, char **argv) {
    settings s = parse(argc, argv);
    size_t n = (size_t)s.rows * COLS;
    dt_kernels table = *dt_kernels_cpu();
#define TIMED_ENTRY(k) table.k = timed_##k;
    DT_KERNELS(TIMED_ENTRY)
#undef TIMED_ENTRY
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = &table });
    inputs in[2] = { make_inputs(ctx, DT_F32, s.rows), make_inputs(ctx, DT_BF16, s.rows) };
    bench_triad t;
    if (!bench_triad_make(&t, n)) return 1;
    bench_print_machine();
    int failed = run_cases(&s, in, &t) || (!s.only && run_products(&s, ctx));
    bench_triad_free(&t);
    dt_ctx_free(ctx);
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 4; i++) free(in[k].state[i]);
        free(in[k].model);
    }
    return failed;
}
