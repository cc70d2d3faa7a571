/* test_placements.c - placements of tensors: every op on inputs of every placement equals one rank
   or is refused; the mistakes of the field, and the sentences that name them

   Part 1 runs N ranks one after the other in this thread, each with a context of its own and no
   communicator, because the ops are local. An input's placement says which values a rank gets. The
   test puts the ranks' results and gradients together by the placements of the result and of the
   inputs, and compares them with one rank that has the full inputs. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/comm/ranks.h"

// ==== 1. Every op, every placement ==============================================================

/* Ranks form a grid of two axes; over an axis of one rank nothing is placed. */
enum { AXES = 2, MOST_RANKS = 4, INPUTS = 4, MOST = 6 * 6 * 6 * 6, KINDS = 3 + DT_MAX_DIMS };
enum { SAMPLES = 400 }; /* of an op's combinations over two axes */

/* The arguments of one rank of one case. */
typedef struct rank_case {
    dt_tensor *in[INPUTS];
    dt_placement at[INPUTS][AXES];
    int size[AXES], rank[AXES];
} rank_case;

typedef struct op_case {
    const char *name;
    dt_tensor *(*run)(const rank_case *c);
    dt_shape in[INPUTS]; /* full shapes; nd 0 ends the list */
    /* bit i: input i holds integers; input i may be a parameter */
    unsigned integers, params;
    /* over 2 ranks: number of combinations that are accepted; of these, of those whose result is
       unplaced; the same if the inputs of `params` are parameters */
    int accepted, lost, params_accepted, params_lost;
} op_case;

static double noise(int tensor, int64_t i) {
    uint64_t h = mix((uint64_t)(tensor + 1) * 1000003u + mix((uint64_t)i + 77));
    return (double)(h >> 11) / 4503599627370496.0 - 1;
}

#define RUN(name, expr) \
    static dt_tensor *run_##name(const rank_case *c) { \
        dt_tensor *x = c->in[0], *y = c->in[1], *z = c->in[2], *u = c->in[3]; \
        (void)y, (void)z, (void)u; \
        return expr; \
    }
RUN(gelu, dt_gelu(x))
RUN(gelu_erf, dt_gelu_erf(x))
RUN(silu, dt_silu(x))
RUN(relu, dt_relu(x))
RUN(tanh, dt_tanh(x))
RUN(exp, dt_exp(x))
RUN(ln, dt_ln(dt_exp(x)))
RUN(sigmoid, dt_sigmoid(x))
RUN(softplus, dt_softplus(x))
RUN(sqrt, dt_sqrt(dt_exp(x)))
RUN(abs, dt_abs(x))
RUN(pow, dt_pow(x, 2))
RUN(clamp, dt_clamp(x, -0.5, 0.5))
RUN(shift, dt_affine(x, 2, 1))
RUN(scale, dt_affine(x, 2, 0))
RUN(cast, dt_cast(x, DT_F64))
RUN(swiglu, dt_swiglu(x))
RUN(add, dt_add(x, y))
RUN(sub, dt_sub(x, y))
RUN(mul, dt_mul(x, y))
RUN(div, dt_div(x, dt_exp(y)))
RUN(div_by, dt_div(x, y))
RUN(minimum, dt_minimum(x, y))
RUN(maximum, dt_maximum(x, y))
RUN(less, dt_less(x, y))
RUN(less_equal, dt_less_equal(x, y))
RUN(equal, dt_equal(x, y))
RUN(where, dt_where(dt_less(x, dt_affine(x, 0, 0)), y, z))
RUN(masked_fill, dt_masked_fill(x, dt_less(y, dt_affine(y, 0, 0)), 3))
RUN(sum_0, dt_sum_over(x, 0))
RUN(sum_1, dt_sum_over(x, 1))
RUN(sum_all, dt_sum_over(x, DT_ALL))
RUN(mean_1, dt_mean_over(x, 1))
RUN(mean_all, dt_mean_over(x, DT_ALL))
RUN(max_1, dt_max_over(x, 1))
RUN(max_all, dt_max_over(x, DT_ALL))
RUN(argmax, dt_cast(dt_argmax(x, 1), DT_F64))
RUN(one_hot, dt_one_hot(x, 3, DT_F64))
RUN(sum_12, dt_sum_dims(x, (dt_reduce_desc){ { 1, 2 }, 2, 0 }))
RUN(sum_kept, dt_sum_dims(x, (dt_reduce_desc){ { -1 }, 1, 1 }))
RUN(sum_apart, dt_sum_dims(x, (dt_reduce_desc){ { 2, 0 }, 2, 0 }))
RUN(sum_apart_kept, dt_sum_dims(x, (dt_reduce_desc){ { 2, 0 }, 2, 1 }))
RUN(mean_12, dt_mean_dims(x, (dt_reduce_desc){ { 1, 2 }, 2, 0 }))
RUN(mean_kept, dt_mean_dims(x, (dt_reduce_desc){ { 1 }, 1, 1 }))
RUN(mean_apart_kept, dt_mean_dims(x, (dt_reduce_desc){ { 2, 0 }, 2, 1 }))
RUN(max_12, dt_max_dims(x, (dt_reduce_desc){ { 1, 2 }, 2, 0 }))
RUN(max_kept, dt_max_dims(x, (dt_reduce_desc){ { 0 }, 1, 1 }))
RUN(cumsum_1, dt_cumsum(x, 1))
RUN(select_1, dt_select(x, 1, -1))
RUN(select_0, dt_select(x, 0, 1))
RUN(permute_201, dt_permute(x, (const int[3]){ 2, 0, 1 }))
RUN(permute_021, dt_permute(x, (const int[3]){ 0, 2, -2 }))
RUN(broadcast, dt_broadcast_to(x, DT_SHAPE(2, x->shape.d[0], 3, x->shape.d[2])))
RUN(broadcast_row, dt_broadcast_to(x, DT_SHAPE(3, x->shape.d[0])))
RUN(matmul_nn, dt_matmul(x, y, (dt_matmul_desc){ 0, 0 }))
RUN(matmul_nt, dt_matmul(x, y, (dt_matmul_desc){ 0, 1 }))
RUN(matmul_tn, dt_matmul(x, y, (dt_matmul_desc){ 1, 0 }))
RUN(matmul_tt, dt_matmul(x, y, (dt_matmul_desc){ 1, 1 }))
#define WINDOW \
    (dt_window_desc) { \
        { 3, 3 }, { 1, 1 }, { 1, 1 }, { 1, 1 } \
    }
RUN(patches, dt_patches(x, WINDOW, 0))
RUN(patches_padded, dt_patches(x, WINDOW, 1))
RUN(conv, dt_conv2d(x, y, z, WINDOW))
RUN(conv_row, dt_conv1d(x, y, NULL, WINDOW))
RUN(max_pool, dt_max_pool2d(x, WINDOW))
RUN(avg_pool, dt_avg_pool2d(x, WINDOW))
RUN(group_norm, dt_group_norm(x, 6, y, z, 0))
RUN(softmax, dt_softmax(x))
RUN(log_softmax, dt_log_softmax(x))
RUN(detach, dt_add(x, dt_detach(x)))
RUN(topk, dt_topk(x, 2, NULL))
RUN(slice_0, dt_slice(x, 0, 1, 2))
RUN(slice_2, dt_slice(x, 2, 1, 2))
RUN(slice_whole, dt_slice(x, 1, 0, x->shape.d[1]))
RUN(transpose_01, dt_transpose(x, 0, 1))
RUN(transpose_02, dt_transpose(x, 2, 0))
RUN(transpose_same, dt_transpose(x, 1, 1))
RUN(merge_01, dt_reshape(x, DT_SHAPE(x->shape.d[0] * x->shape.d[1], x->shape.d[2])))
RUN(merge_12, dt_reshape(x, DT_SHAPE(x->shape.d[0], x->shape.d[1] * x->shape.d[2])))
RUN(split, dt_reshape(x, DT_SHAPE(x->shape.d[0], x->shape.d[1], x->shape.d[2] / 2, 2)))
RUN(unit_first, dt_reshape(x, DT_SHAPE(1, x->shape.d[0], x->shape.d[1], x->shape.d[2])))
RUN(rows,
    dt_reshape(dt_gelu(dt_reshape(x, DT_SHAPE(dt_count(x->shape) / x->shape.d[2], x->shape.d[2]))),
        x->shape))
RUN(gather, dt_gather_rows(x, y))
RUN(embedding, dt_embedding(x, y))
RUN(scatter, dt_scatter_rows(x, y, 6))
RUN(bag, dt_embedding_bag(x, y, z))
RUN(layernorm, dt_layernorm(x, y, z, 0))
RUN(rmsnorm, dt_rmsnorm(x, y, 0))
RUN(linear, dt_linear_at(x, y, z, (dt_linear_desc){ .residual = u }))
RUN(linear_gelu,
    dt_linear_at(x, y, z, (dt_linear_desc){ .activation = DT_ACT_GELU, .residual = u }))
RUN(product, dt_linear(x, y, NULL))
RUN(wide, dt_linear(x, y, z))
RUN(rope, dt_rope(x, y, (dt_rope_desc){ 0 }))
RUN(dropout, dt_dropout(x, 0.5, 7, y))
RUN(dropout_rows, dt_dropout(x, 0.5, 7, NULL))
RUN(attention, dt_attention(x, y, z, (dt_attn_desc){ 0 }))
RUN(loss, dt_cross_entropy(x, y, 36))
RUN(linear_loss, dt_linear_cross_entropy(x, z, y, 36, (dt_loss_desc){ 0 }))
RUN(mse, dt_mse(x, y, 36))
RUN(bce, dt_bce_with_logits(x, y, 36))

static dt_tensor *run_concat_0(const rank_case *c) { return dt_concat(c->in, 2, 0); }
static dt_tensor *run_concat_1(const rank_case *c) { return dt_concat(c->in, 2, 1); }

/* 12 rows, 2 in each of 6 groups. A rank that has a part of the rows passes its counts; so does one
   that has the rows of a part of the groups. */
static dt_tensor *run_grouped(const rank_case *c) {
    int64_t rows[6] = { 0 }, first = 0, of = 0, n = c->in[0]->shape.d[0],
            groups = c->in[1]->shape.d[0];
    for (int a = 0; a < AXES; a++) {
        int nested = c->size[a];
        if (c->at[0][a].kind == DT_PLACEMENT_SHARD && c->at[0][a].dim == 0)
            first = first * nested + c->rank[a] * n;
        if (c->at[1][a].kind == DT_PLACEMENT_SHARD && c->at[1][a].dim == 0)
            of = of * nested + c->rank[a] * groups;
    }
    for (int64_t i = first; i < first + n; i++)
        if (i / 2 >= of && i / 2 < of + groups) rows[i / 2 - of]++;
    return dt_grouped_linear(c->in[0], c->in[1], c->in[2], rows, (dt_linear_desc){ 0 });
}

#define S1 \
    { \
        1, { 6 } \
    }
#define S2 \
    { \
        2, { 6, 6 } \
    }
#define S3 \
    { \
        3, { 6, 6, 6 } \
    }
#define S4 \
    { \
        4, { 6, 6, 6, 6 } \
    }
#define OP(op) .name = #op, .run = run_##op
static const op_case ops[] = {
    { OP(gelu), { S2 }, .accepted = 4 },
    { OP(gelu_erf), { S2 }, .accepted = 4 },
    { OP(silu), { S2 }, .accepted = 4 },
    { OP(relu), { S2 }, .accepted = 4 },
    { OP(tanh), { S2 }, .accepted = 4 },
    { OP(exp), { S2 }, .accepted = 4 },
    { OP(ln), { S2 }, .accepted = 4 },
    { OP(sigmoid), { S2 }, .accepted = 4 },
    { OP(softplus), { S2 }, .accepted = 4 },
    { OP(sqrt), { S2 }, .accepted = 4 },
    { OP(abs), { S2 }, .accepted = 4 },
    { OP(pow), { S2 }, .accepted = 4 },
    { OP(clamp), { S2 }, .accepted = 4 },
    { OP(shift), { S2 }, .accepted = 4 },
    { OP(scale), { S2 }, .accepted = 5 },
    { OP(cast), { S2 }, .params = 1, .accepted = 5, .params_accepted = 4, .params_lost = 1 },
    { OP(swiglu), { { 3, { 6, 2, 6 } } }, .accepted = 4 },
    { OP(add), { S2, S2 }, .params = 2, .accepted = 5, .params_accepted = 4 },
    { OP(add), { S3, S1 }, .params = 2, .accepted = 6, .params_accepted = 5 },
    { OP(add), { S2, { 2, { 6, 1 } } }, .params = 2, .accepted = 5, .params_accepted = 4 },
    { OP(add), { { 2, { 1, 6 } }, S2 }, .accepted = 5 },
    { OP(sub), { S2, S2 }, .accepted = 5 },
    { OP(mul), { S2, S2 }, .params = 2, .accepted = 6, .params_accepted = 5 },
    { OP(mul), { S3, S1 }, .params = 2, .accepted = 7, .params_accepted = 6 },
    { OP(mul), { S1, S3 }, .accepted = 7 },
    { OP(div), { S2, S2 }, .accepted = 5 },
    { OP(div_by), { S3, S1 }, .params = 2, .accepted = 6, .params_accepted = 6 },
    { OP(minimum), { S2, S2 }, .accepted = 4 },
    { OP(maximum), { S3, S1 }, .params = 2, .accepted = 5, .params_accepted = 5 },
    { OP(less), { S2, S2 }, .accepted = 6 },
    { OP(less_equal), { S3, S1 }, .params = 2, .accepted = 9, .params_accepted = 9 },
    { OP(equal), { S2, { 2, { 6, 1 } } }, .accepted = 7 },
    { OP(where), { S2, S2, S2 }, .accepted = 6 },
    { OP(where), { S1, S3, { 3, { 6, 1, 6 } } }, .params = 2, .accepted = 9, .params_accepted = 9 },
    { OP(masked_fill), { S3, S2 }, .accepted = 8 },
    { OP(sum_0), { S3 }, .accepted = 6 },
    { OP(sum_1), { S3 }, .accepted = 6 },
    { OP(sum_all), { S3 }, .accepted = 6 },
    { OP(mean_1), { S3 }, .accepted = 5 },
    { OP(mean_all), { S3 }, .accepted = 3 },
    { OP(max_1), { S3 }, .accepted = 4 },
    { OP(max_all), { S3 }, .accepted = 2 },
    { OP(argmax), { S3 }, .accepted = 4 },
    { OP(one_hot), { S2 }, .integers = 1, .accepted = 3 },
    { OP(sum_12), { S3 }, .accepted = 6 },
    { OP(sum_kept), { S3 }, .accepted = 6 },
    { OP(sum_apart), { S3 }, .accepted = 6 },
    { OP(sum_apart_kept), { S3 }, .accepted = 6 },
    { OP(mean_12), { S3 }, .accepted = 4 },
    { OP(mean_kept), { S3 }, .accepted = 5 },
    { OP(mean_apart_kept), { S3 }, .accepted = 4 },
    { OP(max_12), { S3 }, .accepted = 3 },
    { OP(max_kept), { S3 }, .accepted = 4 },
    { OP(cumsum_1), { S3 }, .accepted = 5 },
    { OP(select_1), { S3 }, .accepted = 5 },
    { OP(select_0), { S3 }, .accepted = 5 },
    { OP(permute_201), { S3 }, .params = 1, .accepted = 6, .params_accepted = 5, .params_lost = 1 },
    { OP(permute_021), { S3 }, .accepted = 6 },
    { OP(broadcast), { { 3, { 6, 1, 6 } } }, .params = 1, .accepted = 5, .params_accepted = 4,
        .params_lost = 1 },
    { OP(broadcast_row), { S1 }, .accepted = 4 },
    { OP(matmul_nn), { S3, S3 }, .accepted = 8 },
    { OP(matmul_nt), { S3, S3 }, .accepted = 8 },
    { OP(matmul_tn), { S3, S3 }, .accepted = 8 },
    { OP(matmul_tt), { S3, S3 }, .accepted = 8 },
    { OP(matmul_nn), { S3, S2 }, .params = 2, .accepted = 8, .params_accepted = 7 },
    { OP(matmul_nt), { S2, S3 }, .params = 1, .accepted = 8, .params_accepted = 7 },
    { OP(matmul_tn), { S3, S2 }, .params = 2, .accepted = 8, .params_accepted = 7 },
    { OP(matmul_tt), { S2, S3 }, .accepted = 8 },
    { OP(patches), { { 4, { 6, 2, 2, 6 } } }, .accepted = 5 },
    { OP(patches_padded), { { 4, { 6, 2, 2, 6 } } }, .accepted = 4 },
    { OP(conv), { { 4, { 6, 2, 2, 6 } }, { 4, { 6, 3, 3, 6 } }, S1 }, .params = 6, .accepted = 7,
        .params_accepted = 4 },
    { OP(conv_row), { S3, { 3, { 6, 3, 6 } } }, .params = 2, .accepted = 7, .params_accepted = 6 },
    { OP(max_pool), { S4 }, .accepted = 4 },
    { OP(avg_pool), { S4 }, .accepted = 5 },
    { OP(group_norm), { { 3, { 6, 6, 12 } }, { 1, { 12 } }, { 1, { 12 } } }, .params = 6,
        .accepted = 4, .params_accepted = 4 },
    { OP(softmax), { S3 }, .accepted = 4 },
    { OP(log_softmax), { S3 }, .accepted = 4 },
    { OP(detach), { S3 }, .accepted = 6 },
    { OP(topk), { S3 }, .accepted = 4 },
    { OP(slice_0), { S3 }, .accepted = 5 },
    { OP(slice_2), { S3 }, .accepted = 5 },
    { OP(slice_whole), { S3 }, .accepted = 6 },
    { OP(concat_0), { S3, S3 }, .accepted = 5 },
    { OP(concat_1), { S3, S3 }, .accepted = 5 },
    { OP(transpose_01), { S3 }, .accepted = 6 },
    { OP(transpose_02), { S3 }, .accepted = 6 },
    { OP(transpose_same), { S3 }, .accepted = 6 },
    { OP(merge_01), { S3 }, .accepted = 6, .lost = 1 },
    { OP(merge_12), { S3 }, .accepted = 6, .lost = 1 },
    { OP(split), { { 3, { 6, 6, 12 } } }, .accepted = 6 },
    { OP(unit_first), { S3 }, .accepted = 6, .lost = 1 },
    { OP(rows), { S3 }, .accepted = 5 },
    { OP(gather), { S2, S2 }, .integers = 2, .accepted = 7, .lost = 1 },
    { OP(embedding), { S2, S2 }, .integers = 2, .params = 1, .accepted = 7, .lost = 1,
        .params_accepted = 6 },
    { OP(scatter), { S3, S2 }, .integers = 2, .accepted = 6, .lost = 2 },
    { OP(bag), { S2, S2, S2 }, .integers = 2, .accepted = 9, .lost = 2 },
    { OP(layernorm), { S3, S1, S1 }, .params = 6, .accepted = 4, .params_accepted = 4 },
    { OP(rmsnorm), { S3, S1 }, .params = 2, .accepted = 4, .params_accepted = 4 },
    { OP(linear), { S3, S2, S1, S3 }, .params = 6, .accepted = 8, .params_accepted = 5 },
    { OP(linear_gelu), { S3, S2, S1, S3 }, .params = 6, .accepted = 5, .params_accepted = 5 },
    { OP(product), { S3, S2 }, .params = 2, .accepted = 8, .params_accepted = 7 },
    { OP(wide), { S2, S3, S2 }, .params = 6, .accepted = 8, .params_accepted = 5 },
    { OP(grouped), { { 2, { 12, 6 } }, S3, S2 }, .params = 6, .accepted = 7, .params_accepted = 4 },
    { OP(rope), { S4, S2 }, .integers = 2, .accepted = 6 },
    { OP(dropout), { S3, S2 }, .integers = 2, .accepted = 6 },
    { OP(dropout_rows), { S3 }, .accepted = 4 },
    { OP(attention), { S4, S4, S4 }, .accepted = 4 },
    { OP(loss), { S3, S2 }, .integers = 2, .accepted = 4 },
    { OP(linear_loss), { S3, S2, S2 }, .integers = 2, .params = 4, .accepted = 4,
        .params_accepted = 4 },
    { OP(mse), { S3, S3 }, .accepted = 5 },
    { OP(bce), { S3, S3 }, .accepted = 5 },
};
enum { OPS = sizeof ops / sizeof *ops };

static int ops_inputs(const op_case *op) {
    int n = 0;
    while (n < INPUTS && op->in[n].nd) n++;
    return n;
}

/* Placement number k of a tensor: REPLICATE, COPY, PARTIAL, then SHARD(0), .. */
static dt_placement placement_of(int k) {
    return k == 0 ? DT_REPLICATE : k == 1 ? DT_COPY : k == 2 ? DT_PARTIAL : DT_SHARD(k - 3);
}

static int is_shard(dt_placement p, int dim) {
    return p.kind == DT_PLACEMENT_SHARD && p.dim == dim;
}

/* Returns 1 if input i of the op can have these placements: the ranks divide the dimension, which
   one axis shards; a parameter is no partial sum; integers have no gradient. */
static int is_possible(
    const op_case *op, int i, const dt_placement *at, const int *size, unsigned params) {
    int integers = op->integers >> i & 1;
    for (int a = 0; a < AXES; a++) {
        int n = op->in[i].nd, kind = at[a].kind;
        if (size[a] == 1 && kind != DT_PLACEMENT_REPLICATE) return 0;
        if (kind == DT_PLACEMENT_SHARD && at[a].dim >= n) return 0;
        if (kind == DT_PLACEMENT_SHARD && op->in[i].d[at[a].dim] % size[a]) return 0;
        if (kind == DT_PLACEMENT_PARTIAL && (integers || params >> i & 1)) return 0;
        if (kind == DT_PLACEMENT_COPY && integers) return 0;
    }
    return at[0].kind != DT_PLACEMENT_SHARD || !is_shard(at[1], at[0].dim);
}

static dt_shape local_shape(dt_shape full, const dt_placement *at, const int *size) {
    for (int a = 0; a < AXES; a++)
        if (at[a].kind == DT_PLACEMENT_SHARD) full.d[at[a].dim] /= size[a];
    return full;
}

/* Index in the full tensor of element i of the tensor of the rank at these coordinates. */
static int64_t full_index(
    dt_shape full, const dt_placement *at, const int *size, const int *rank, int64_t i) {
    dt_shape local = local_shape(full, at, size);
    int64_t index = 0, step = 1;
    for (int d = full.nd - 1; d >= 0; d--, i /= local.d[d + 1]) {
        int64_t along = i % local.d[d];
        for (int a = 0; a < AXES; a++)
            if (is_shard(at[a], d)) along += rank[a] * local.d[d];
        index += along * step;
        step *= full.d[d];
    }
    return index;
}

/* A rank's element of a tensor with this full value: over a partial axis it is one of the terms. */
static double local_value(
    double full, const dt_placement *at, const int *size, const int *rank, int64_t i) {
    for (int a = 0; a < AXES; a++) {
        double sum = 0;
        if (at[a].kind != DT_PLACEMENT_PARTIAL) continue;
        for (int q = 0; q < size[a] - 1; q++) sum += noise(50 + 10 * a + q, i);
        full = rank[a] < size[a] - 1 ? noise(50 + 10 * a + rank[a], i) : full - sum;
    }
    return full;
}

static dt_placement dual(dt_placement p) {
    return p.kind == DT_PLACEMENT_COPY ? DT_PARTIAL : p.kind == DT_PLACEMENT_PARTIAL ? DT_COPY : p;
}

/* The results of one rank: values of y, and the gradient of each input. */
typedef struct result {
    dt_status status;
    char text[512];
    dt_placement y[AXES];
    dt_shape shape;
    double value[MOST], grad[INPUTS][MOST];
} result;

static void quiet(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* This rank's groups along the axes. */
typedef struct grid {
    dt_group group[AXES];
    int ranks[AXES][MOST_RANKS];
    dt_comm *comm[AXES]; /* NULL along an axis of one rank */
} grid;

static void grid_make(grid *g, const int *size, const int *rank) {
    static const char *const names[AXES] = { "tp", "cp" };
    for (int a = 0; a < AXES; a++) {
        for (int i = 0; i < size[a]; i++)
            g->ranks[a][i] = a == 0 ? rank[1] * size[0] + i : i * size[0] + rank[0];
        g->group[a] = (dt_group){ rank[a], size[a], g->ranks[a], names[a], 0 };
        g->comm[a] = size[a] > 1 ? (dt_comm *)&g->group[a] : NULL;
    }
}

static dt_tensor *make_input(
    dt_ctx *ctx, const op_case *op, int i, const rank_case *c, const grid *g, int param) {
    static const char *const names[] = { "a", "b", "c", "d" };
    double host[MOST];
    int32_t ints[MOST];
    dt_shape shape = local_shape(op->in[i], c->at[i], c->size);
    for (int64_t j = 0; j < dt_count(shape); j++) {
        int64_t at = full_index(op->in[i], c->at[i], c->size, c->rank, j);
        host[j] = local_value(noise(i, at), c->at[i], c->size, c->rank, at);
        ints[j] = (int32_t)(mix((uint64_t)at) % 2); /* below the number of any shard's rows */
    }
    dt_param_desc d = { .dtype = DT_F64 };
    for (int a = 0; a < AXES && param; a++) {
        if (c->at[i][a].kind == DT_PLACEMENT_SHARD)
            d.shards[a] = (dt_shard_spec){ g->comm[a], c->at[i][a].dim };
        if (c->at[i][a].kind == DT_PLACEMENT_COPY)
            d.grad_placements[a] = (dt_grad_placement){ g->comm[a], DT_GRAD_PARTIAL };
    }
    if (param) return dt_param_at(ctx, names[i], op->in[i], DT_ZEROS, d);
    dt_tensor *t = op->integers >> i & 1 ? dt_input(ctx, DT_I32, shape, ints)
                                         : dt_require_grad(dt_input(ctx, DT_F64, shape, host));
    for (int a = 0; a < AXES; a++) dt_place(t, g->comm[a], c->at[i][a]);
    return t;
}

/* Writes the values of a parameter, which has storage only after all are registered. */
static void write_param(const op_case *op, int i, const rank_case *c) {
    double host[MOST];
    for (int64_t j = 0; j < dt_count(c->in[i]->shape); j++)
        host[j] = noise(i, full_index(op->in[i], c->at[i], c->size, c->rank, j));
    dt_write(c->in[i], host);
}

/* Reads the values of y and runs the backward from a gradient of y. */
static void run_backward(
    const op_case *op, const rank_case *c, const grid *g, dt_tensor *y, result *out) {
    double dy[MOST];
    dt_placement p[AXES];
    dt_shape full = y->shape;
    out->shape = y->shape;
    dt_read(y, out->value);
    for (int a = 0; a < AXES; a++) {
        out->y[a] = g->comm[a] ? dt_placement_of(y, g->comm[a]) : DT_REPLICATE;
        p[a] = dual(out->y[a]);
        if (p[a].kind == DT_PLACEMENT_SHARD) full.d[p[a].dim] *= c->size[a];
    }
    for (int64_t j = 0; j < dt_count(y->shape); j++) {
        int64_t k = full_index(full, p, c->size, c->rank, j);
        dy[j] = local_value(noise(9, k), p, c->size, c->rank, k);
    }
    dt_backward_at(y, dt_input(y->ctx, DT_F64, y->shape, dy), DT_BACKWARD);
    for (int i = 0; i < ops_inputs(op); i++)
        for (int64_t j = 0; j < dt_count(c->in[i]->shape); j++)
            out->grad[i][j] =
                c->in[i]->grad && !(op->integers >> i & 1) ? ((double *)c->in[i]->grad)[j] : 0;
}

static void run_case(const op_case *op, rank_case c, unsigned params, result *out) {
    grid g;
    dt_host host = *dt_host_default();
    host.log = quiet;
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &host, .kernels = dt_kernels_cpu() });
    grid_make(&g, c.size, c.rank);
    ctx->has_training_state = 1; /* of one data-parallel rank */
    for (int i = 0; i < ops_inputs(op); i++)
        c.in[i] = make_input(ctx, op, i, &c, &g, params >> i & 1);
    for (int i = 0; i < ops_inputs(op); i++)
        if (params >> i & 1) write_param(op, i, &c);
    dt_tensor *y = op->run(&c);
    if (y) run_backward(op, &c, &g, y, out);
    out->status = dt_error(ctx);
    snprintf(out->text, sizeof out->text, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
}

static void rank_at(const int *size, int r, int *rank) {
    rank[0] = r % size[0];
    rank[1] = r / size[0];
}

/* Returns 1 if the ranks' arrays (ranks,MOST) are `one` in these placements. */
static int means(dt_shape full, const dt_placement *at, const int *size, const double *const *local,
    const double *one) {
    int64_t n = dt_count(local_shape(full, at, size));
    int ranks = size[0] * size[1], rank[AXES], other[AXES];
    for (int r = 0; r < ranks; r++)
        for (int64_t i = 0; i < n; i++) {
            double sum = 0;
            rank_at(size, r, rank);
            for (int q = 0; q < ranks; q++) { /* over partial axes all ranks, else this rank */
                int counts = 1;
                rank_at(size, q, other);
                for (int a = 0; a < AXES; a++)
                    counts &= at[a].kind == DT_PLACEMENT_PARTIAL || other[a] == rank[a];
                if (counts) sum += local[q][i];
            }
            double want = one[full_index(full, at, size, rank, i)];
            if (!(fabs(sum - want) <= 1e-12 * fmax(1, fabs(want)))) return 0;
        }
    return 1;
}

static const char *case_text(const op_case *op, const rank_case *c, unsigned params) {
    static char text[500];
    int at = snprintf(text, sizeof text, "%s(", op->name);
    for (int i = 0; i < ops_inputs(op); i++)
        for (int a = 0; a < AXES; a++)
            if (c->size[a] > 1)
                at += snprintf(text + at, sizeof text - (size_t)at, "%s%.20s",
                    a && c->size[0] > 1 ? "/"
                    : i                 ? ", "
                                        : "",
                    dt__placement_text(c->at[i][a]).s);
    snprintf(text + at, sizeof text - (size_t)at, ") over %d x %d, params %u", c->size[0],
        c->size[1], params);
    return text;
}

/* Compares the ranks' results with one rank's. */
static void compare_case(const op_case *op, const rank_case *c, unsigned params, const result *got,
    const result *one, int *accepted, int *lost) {
    const double *local[MOST_RANKS];
    int ranks = c->size[0] * c->size[1], unplaced = 0;
    for (int r = 1; r < ranks; r++)
        CHECK_MSG((got[r].status == DT_OK) == (got[0].status == DT_OK), "%s: ranks differ: %s",
            case_text(op, c, params), got[r].text);
    if (got[0].status != DT_OK) {
        /* local shapes that do not fit are the op's own error */
        int said = got[0].status == DT_ERR_ARG &&
                   (strstr(got[0].text, "'tp'") || strstr(got[0].text, "'cp'")) &&
                   (strstr(got[0].text, "dt_redistribute") || strstr(got[0].text, "DT_GRAD") ||
                       strstr(got[0].text, "tokens"));
        CHECK_MSG(
            said || got[0].status == DT_ERR_SHAPE, "%s: %s", case_text(op, c, params), got[0].text);
        return;
    }
    for (int a = 0; a < AXES; a++) unplaced |= got[0].y[a].kind == DT_PLACEMENT_NONE;
    ++*accepted;
    *lost += unplaced;
    if (unplaced) return;
    for (int r = 0; r < ranks; r++) local[r] = got[r].value;
    CHECK_MSG(means(one->shape, got[0].y, c->size, local, one->value),
        "%s, is %s: the value is not that of one rank", case_text(op, c, params),
        dt__placement_text(got[0].y[0]).s);
    for (int i = 0; i < ops_inputs(op); i++) {
        dt_placement p[AXES] = { dual(c->at[i][0]), dual(c->at[i][1]) };
        for (int r = 0; r < ranks; r++) local[r] = got[r].grad[i];
        CHECK_MSG(means(op->in[i], p, c->size, local, one->grad[i]),
            "%s: the gradient of input %d is not that of one rank", case_text(op, c, params), i);
    }
}

/* Every combination of placements over one axis; random ones over two. */
static void test_op(const op_case *op, int n0, int n1, unsigned params, int *accepted, int *lost) {
    static result got[MOST_RANKS], one;
    rank_case c = { .size = { 1, 1 } };
    int n = ops_inputs(op), count = 1, two = n0 > 1 && n1 > 1;
    for (int i = 0; i < n; i++) count *= KINDS;
    run_case(op, c, params, &one);
    if (!CHECK_MSG(one.status == DT_OK, "%s: %s", op->name, one.text)) return;
    c.size[0] = n0;
    c.size[1] = n1;
    for (int number = 0; number < (two ? 100 * SAMPLES : count); number++) {
        int possible = 1, left = number;
        uint64_t random = mix((uint64_t)number);
        for (int i = 0; i < n; i++, left /= KINDS, random = mix(random)) {
            c.at[i][0] = placement_of(two ? (int)(random % KINDS) : left % KINDS);
            c.at[i][1] = two ? placement_of((int)(random / KINDS % KINDS)) : DT_REPLICATE;
            possible &= is_possible(op, i, c.at[i], c.size, params);
        }
        if (!possible) continue;
        for (int r = 0; r < n0 * n1; r++) {
            rank_at(c.size, r, c.rank);
            run_case(op, c, params, &got[r]);
            if (got[0].status != DT_OK && two) break; /* most are refused */
        }
        for (int r = 1; r < n0 * n1 && got[0].status != DT_OK && two; r++) got[r] = got[0];
        compare_case(op, &c, params, got, &one, accepted, lost);
        if (two && *accepted >= SAMPLES / 10) break;
    }
}

static void test_ops(void) {
    for (int i = 0; i < OPS; i++) {
        const op_case *op = &ops[i];
        int n[6] = { 0 };
        test_op(op, 2, 1, 0, &n[0], &n[1]);
        if (op->params) test_op(op, 2, 1, op->params, &n[2], &n[3]);
        CHECK_MSG(n[0] == op->accepted && n[1] == op->lost && n[2] == op->params_accepted &&
                      n[3] == op->params_lost,
            "%s: accepted %d, %d, %d, %d", op->name, n[0], n[1], n[2], n[3]);
        test_op(op, 3, 1, 0, &n[4], &n[5]);
        if (op->params) test_op(op, 3, 1, op->params, &n[4], &n[5]);
        n[4] = 0;
        test_op(op, 2, 2, 0, &n[4], &n[5]);
        if (op->params) test_op(op, 2, 2, op->params, &n[4], &n[5]);
    }
}

// ==== 2. Mistakes, and the sentences that name them =============================================

/* One rank of a small model over tp, or over cp. */
typedef struct small {
    dt_ctx *ctx;
    dt_mesh mesh;
    dt_comm *tp;
    dt_tensor *x, *ids, *labels;                 /* (2,4,4), (2,4), (2,4) */
    dt_tensor *up, *up_bias, *down, *down_bias;  /* (8,4), (8), (4,8), (4) */
    dt_tensor *marked, *gain, *positions, *head; /* (4), (4), (4,4), (6,4) */
    dt_tensor *router, *fc, *proj, *proj_bias;   /* (2,4), (2,8,4), (2,4,8), (2,4) */
    dt_tensor *odd;                              /* (5), and one element of padding */
} small;

static void small_make_inputs(small *m) {
    double x[32];
    int32_t ids[8];
    for (int i = 0; i < 32; i++) x[i] = noise(1, i), ids[i % 8] = i % 4;
    m->x = dt_require_grad(dt_input(m->ctx, DT_F64, DT_SHAPE(2, 4, 4), x));
    m->ids = dt_input(m->ctx, DT_I32, DT_SHAPE(2, 4), ids);
    m->labels = dt_input(m->ctx, DT_I32, DT_SHAPE(2, 4), ids);
}

static void small_make(small *m, dt_ctx *ctx, int cp) {
    m->ctx = ctx;
    m->mesh = dt_mesh_make(ctx, cp ? (dt_mesh_desc){ .cp = 2 } : (dt_mesh_desc){ .tp = 2 });
    dt_comm *tp = m->tp = cp ? m->mesh.cp : m->mesh.tp;
    dt_param_desc rows = { .dtype = DT_F64 }, columns = rows, plain = rows, marked = rows,
                  fc = rows, proj = rows;
    if (!cp) {
        rows.shards[0] = (dt_shard_spec){ tp, 0 };
        columns.shards[0] = fc.shards[0] = (dt_shard_spec){ tp, 1 };
        proj.shards[0] = (dt_shard_spec){ tp, 2 };
        marked.grad_placements[0] = (dt_grad_placement){ tp, DT_GRAD_PARTIAL };
    }
    m->up = dt_param_at(ctx, "up", DT_SHAPE(8, 4), DT_NORMAL(1), rows);
    m->up_bias = dt_param_at(ctx, "up_bias", DT_SHAPE(8), DT_NORMAL(1), rows);
    m->down = dt_param_at(ctx, "down", DT_SHAPE(4, 8), DT_NORMAL(1), columns);
    m->down_bias = dt_param_at(ctx, "down_bias", DT_SHAPE(4), DT_NORMAL(1), plain);
    m->marked = dt_param_at(ctx, "marked", DT_SHAPE(4), DT_ONES, marked);
    m->gain = dt_param_at(ctx, "gain", DT_SHAPE(4), DT_ONES, plain);
    m->positions = dt_param_at(ctx, "positions", DT_SHAPE(4, 4), DT_ONES, plain);
    m->head = dt_param_at(ctx, "head", DT_SHAPE(6, 4), DT_NORMAL(1), rows);
    m->router = dt_param_at(ctx, "router", DT_SHAPE(2, 4), DT_NORMAL(1), plain);
    m->fc = dt_param_at(ctx, "fc", DT_SHAPE(2, 8, 4), DT_NORMAL(1), fc);
    m->proj = dt_param_at(ctx, "proj", DT_SHAPE(2, 4, 8), DT_NORMAL(1), proj);
    m->proj_bias = dt_param_at(ctx, "proj_bias", DT_SHAPE(2, 4), DT_NORMAL(1), plain);
    m->odd = dt_param_at(ctx, "odd", DT_SHAPE(5), DT_ONES, rows);
    small_make_inputs(m);
}

static dt_tensor *hidden(small *m) {
    dt_linear_desc none = { 0 };
    return dt_column_linear(m->x, m->up, m->up_bias, none, m->tp, DT_REPLICATE);
}
static dt_tensor *partial(small *m) { return dt_linear(hidden(m), m->down, NULL); }
static dt_tensor *tokens(small *m) {
    return dt_redistribute(m->x, m->tp, DT_REPLICATE, DT_SHARD(1));
}
static dt_tensor *logits(small *m) {
    return dt_linear(dt_tp_enter(m->x, m->tp, DT_REPLICATE), m->head, NULL);
}

#define MISTAKE(name, expr) \
    static dt_tensor *mistake_##name(small *m) { return expr; }
MISTAKE(softmax, dt_softmax(hidden(m)))
MISTAKE(enter, dt_linear(dt_place(m->x, m->tp, DT_REPLICATE), m->up, NULL))
MISTAKE(enter_unplaced, dt_linear(dt_rmsnorm(m->x, m->gain, 0), m->up, NULL))
MISTAKE(mark, dt_rmsnorm(tokens(m), m->gain, 0))
MISTAKE(mark_bias, dt_linear(tokens(m), m->positions, m->gain))
MISTAKE(mark_positions,
    dt_embedding(m->positions, dt_redistribute(m->ids, m->tp, DT_REPLICATE, DT_SHARD(1))))
MISTAKE(mark_needless, dt_row_linear(hidden(m), m->down, m->marked, NULL, m->tp, DT_REPLICATE))
MISTAKE(residual, dt_add(m->x, partial(m)))
MISTAKE(
    residual_fused, dt_linear_at(hidden(m), m->down, NULL, (dt_linear_desc){ .residual = m->x }))
MISTAKE(bias, dt_linear(hidden(m), m->down, m->down_bias))
MISTAKE(gelu, dt_gelu(partial(m)))
MISTAKE(gelu_fused,
    dt_linear_at(hidden(m), m->down, NULL, (dt_linear_desc){ .activation = DT_ACT_GELU }))
MISTAKE(from, dt_redistribute(hidden(m), m->tp, DT_SHARD(1), DT_REPLICATE))
MISTAKE(from_equal, dt_redistribute(partial(m), m->tp, DT_REPLICATE, DT_REPLICATE))
MISTAKE(outside, dt_tp_enter(dt_place(m->x, m->tp, DT_REPLICATE), m->tp, DT_SHARD(1)))
MISTAKE(enter_twice, dt_tp_enter(dt_tp_enter(m->x, m->tp, DT_REPLICATE), m->tp, DT_REPLICATE))
MISTAKE(loss, dt_cross_entropy(logits(m), m->labels, 8))
MISTAKE(loss_linear, dt_linear_cross_entropy(dt_tp_enter(m->x, m->tp, DT_REPLICATE), m->head,
                         m->labels, 8, (dt_loss_desc){ 0 }))
MISTAKE(loss_gathered,
    dt_vocab_cross_entropy(dt_redistribute(logits(m), m->tp, DT_SHARD(2), DT_REPLICATE), m->labels,
        8, (dt_loss_desc){ 0 }, m->tp))
MISTAKE(row_whole, dt_row_linear(dt_place(m->x, m->tp, DT_REPLICATE), m->positions, NULL, NULL,
                       m->tp, DT_REPLICATE))
MISTAKE(scalar_inside, dt_mul(dt_tp_enter(m->x, m->tp, DT_REPLICATE), m->gain))
MISTAKE(scalar_outside, dt_mul(dt_place(m->x, m->tp, DT_REPLICATE), m->marked))
MISTAKE(mean, dt_mean_over(hidden(m), 2))
MISTAKE(maximum, dt_max_over(hidden(m), DT_ALL))
MISTAKE(slice, dt_slice(tokens(m), 1, 1, 1))
MISTAKE(concat, dt_concat((dt_tensor *[]){ tokens(m), tokens(m) }, 2, 1))
MISTAKE(dropout, dt_dropout(tokens(m), 0.5, 1, NULL))
MISTAKE(norm, dt_layernorm(hidden(m), m->gain, m->gain, 0))
MISTAKE(groups, dt_group_norm(hidden(m), 3, m->up_bias, m->up_bias, 0))
MISTAKE(groups_padded,
    dt_group_norm(dt_place(dt_slice(m->x, 2, 0, 3), m->tp, DT_SHARD(2)), 2, m->odd, m->odd, 0))
MISTAKE(placed, dt_place(hidden(m), m->tp, DT_REPLICATE))
MISTAKE(placed_param, dt_place(m->gain, m->tp, DT_REPLICATE))
MISTAKE(repeated,
    dt_broadcast_to(dt_place(dt_slice(m->x, 2, 0, 1), m->tp, DT_SHARD(2)), DT_SHAPE(2, 4, 3)))
MISTAKE(scores, dt_matmul(tokens(m), dt_place(m->x, m->tp, DT_REPLICATE), (dt_matmul_desc){ 0, 1 }))
MISTAKE(placed_nowhere, dt_place(m->x, m->tp, DT_SHARD(3)))

static dt_tensor *mistake_backward(small *m) {
    dt_backward(dt_mse(dt_tp_enter(m->x, m->tp, DT_REPLICATE), m->x, 32));
    return NULL;
}

/* Only rank 0 adds the bias of row-parallel experts. */
static dt_tensor *mistake_expert_bias(small *m) {
    dt_routing *r = dt_route(m->x, m->router, (dt_route_desc){ .tp = m->tp });
    dt_tensor *h = dt_dispatch(dt_tp_enter(m->x, m->tp, DT_REPLICATE), r, NULL);
    h = dt_expert_linear(h, r, m->fc, NULL, (dt_expert_desc){ 0 });
    return dt_expert_linear(h, r, m->proj, m->proj_bias, (dt_expert_desc){ .row_parallel = m->tp });
}

/* Each rank of cp attends to its own tokens only. */
static dt_tensor *mistake_attention(small *m) {
    dt_tensor *x = dt_reshape(dt_place(m->x, m->tp, DT_SHARD(1)), DT_SHAPE(2, 4, 2, 2));
    return dt_attention(x, x, x, (dt_attn_desc){ 0 });
}
static dt_tensor *mistake_cp(small *m) {
    dt_tensor *x = dt_reshape(dt_place(m->x, m->tp, DT_REPLICATE), DT_SHAPE(2, 4, 2, 2));
    dt_cp *cp = dt_cp_make(m->ctx, m->tp, (dt_cp_desc){ .batch = 2, .tokens = 8 });
    return dt_cp_attention(x, x, x, cp);
}

typedef struct mistake {
    int cp;
    dt_status status;
    const char *name;
    dt_tensor *(*run)(small *m);
    const char *words[4];
} mistake;
#define WRONG(name) 0, DT_ERR_ARG, #name, mistake_##name
#define WRONG_SHAPE(name) 0, DT_ERR_SHAPE, #name, mistake_##name
#define WRONG_CP(name) 1, DT_ERR_ARG, #name, mistake_##name
static const mistake mistakes[] = {
    { WRONG(softmax),
        { "dt_softmax(dt_linear): dimension 2 of dt_linear (2,4,4) is sharded over 'tp'",
            "dt_redistribute(x, tp, DT_SHARD(2), DT_REPLICATE)" } },
    { WRONG_SHAPE(groups), { "dt_group_norm(dt_linear)", "whole groups in each shard" } },
    { WRONG_SHAPE(groups_padded), { "dt_group_norm(dt_slice)", "whole groups in each shard" } },
    { WRONG(enter), { "dt_linear(dt_input, up)", "the gradient of dt_input",
                        "dt_tp_enter(x, tp, DT_REPLICATE)" } },
    { WRONG(enter_unplaced), { "dt_linear(dt_rmsnorm, up)", "dt_tp_enter(x, tp, DT_REPLICATE)" } },
    { WRONG(mark), { "dt_rmsnorm(dt_redistribute, gain)", "SHARD(1) over 'tp'",
                       "the parameter gain", "{ tp, DT_GRAD_PARTIAL }" } },
    { WRONG(mark_bias), { "the parameter positions", "{ tp, DT_GRAD_PARTIAL }" } },
    { WRONG(mark_positions), { "dt_embedding(positions", "{ tp, DT_GRAD_PARTIAL }" } },
    { WRONG(mark_needless), { "dt_row_linear", "marked", "would be added 2 times" } },
    { WRONG(residual), { "dt_add(dt_input, dt_linear)", "is a partial sum over 'tp'",
                           "each of the 2 ranks would add dt_input", "dt_row_linear" } },
    { WRONG(residual_fused), { "dt_linear(", "would add dt_input", "dt_row_linear" } },
    { WRONG(bias), { "dt_linear(", "would add down_bias", "dt_row_linear" } },
    { WRONG(gelu), { "dt_gelu(dt_linear): dt_linear (2,4,4) is a partial sum over 'tp'",
                       "dt_redistribute(x, tp, DT_PARTIAL, DT_REPLICATE)" } },
    { WRONG(gelu_fused), { "the product is a partial sum over 'tp'" } },
    { WRONG(repeated), { "dt_broadcast_to(dt_slice): dimension 2 of (2,4,1) is sharded over 'tp'",
                           "dt_redistribute(x, tp, DT_SHARD(2), DT_REPLICATE)" } },
    { WRONG(scores), { "dt_matmul(dt_redistribute, dt_input)", "the gradient of dt_input",
                         "dt_tp_enter(x, tp, DT_REPLICATE)" } },
    { WRONG(from), { "dt_redistribute(dt_linear): dt_linear (2,4,4) is SHARD(2) over 'tp', not "
                     "SHARD(1)" } },
    { WRONG(from_equal), { "is PARTIAL over 'tp', not REPLICATE" } },
    { WRONG(outside), { "is REPLICATE over 'tp', not SHARD(1)", "`outside`" } },
    { WRONG(enter_twice), { "is COPY over 'tp', not REPLICATE" } },
    { WRONG(loss), { "dimension 2", "dt_vocab_cross_entropy" } },
    { WRONG(loss_linear), { "dimension 0 of head", "dt_vocab_linear_cross_entropy" } },
    { WRONG(loss_gathered), { "dt_vocab_cross_entropy", "is REPLICATE over 'tp', not SHARD(2)" } },
    { WRONG(row_whole), { "dt_row_linear(dt_linear)", "is REPLICATE over 'tp', not PARTIAL",
                            "shard x along its last dimension and w along dimension 1" } },
    { WRONG(scalar_inside), { "{ tp, DT_GRAD_PARTIAL }", "dt_tp_enter(gain, tp, DT_REPLICATE)" } },
    { WRONG(scalar_outside),
        { "would be added 2 times", "dt_tp_enter(marked, tp, DT_REPLICATE)" } },
    { WRONG(mean), { "dimension 2", "dt_sum_over gives partial sums" } },
    { WRONG(maximum), { "dt_max_over(dt_linear)", "dimension 2" } },
    { WRONG(slice), { "dt_slice(dt_redistribute): dimension 1" } },
    { WRONG(concat), { "dt_concat(dt_redistribute, dt_redistribute): dimension 1" } },
    { WRONG(dropout), { "dimension 1", "pass the numbers of this rank's tokens" } },
    { WRONG(norm), { "dt_layernorm(dt_linear, gain): dimension 2" } },
    { WRONG(placed), { "dt_place(dt_linear)", "is SHARD(2) over 'tp', not REPLICATE" } },
    { WRONG(placed_param), { "dt_place(gain)", "dt_param_desc" } },
    { WRONG(placed_nowhere), { "dt_place(dt_input): (2,4,4) SHARD(3)" } },
    { WRONG(backward), { "dt_backward(dt_mse)", "is COPY over 'tp', not REPLICATE",
                           "dt_place(loss, tp, DT_UNPLACED)" } },
    { WRONG(expert_bias), { "dt_grouped_linear(proj_bias)", "DT_GRAD_PARTIAL" } },
    { WRONG_CP(attention), { "dimension 1", "over 'cp'", "dt_cp_attention" } },
    { WRONG_CP(cp), { "dt_cp_attention", "is REPLICATE over 'cp', not SHARD(1)" } },
};

static dt_status mistake_main(dt_ctx *ctx, void *user) {
    const mistake *w = (const mistake *)user;
    small m;
    small_make(&m, ctx, w->cp);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &m.mesh });
    dt_tensor *y = dt_error(ctx) == DT_OK ? w->run(&m) : NULL;
    CHECK_MSG(!y && dt_error(ctx) != DT_OK, "mistake %s is not noticed", w->name);
    dt_zero_free(zero);
    return dt_error(ctx);
}

static void test_mistakes(void) {
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        outcome o;
        run(&o, 2, mistake_main, (void *)&mistakes[i]);
        CHECK_MSG(o.status == mistakes[i].status, "%s: %s", mistakes[i].name, o.report.text);
        for (int k = 0; k < 4 && mistakes[i].words[k]; k++)
            CHECK_MSG(strstr(o.report.text, mistakes[i].words[k]), "%s: '%s' is not in '%s'",
                mistakes[i].name, mistakes[i].words[k], o.report.text);
    }
}

// ==== 3. Programs without a mistake =============================================================

static dt_status own_back(dt_node *n) {
    if (dt_wants(n, 0)) memcpy(dt_grad(n, 0), n->out->grad, dt__bytes(n->out));
    return DT_OK;
}

/* An op of the user, the identity. */
static dt_tensor *own(dt_tensor *x) {
    dt_tensor *y = dt_new(x->ctx, x->dtype, x->shape);
    memcpy(y->data, x->data, dt__bytes(x));
    return dt_record(y, (dt_record_desc){ .name = "own", .in = { x }, .backward = own_back });
}

static int placed_as(const dt_tensor *x, const dt_comm *comm, dt_placement want) {
    dt_placement p = dt_placement_of(x, comm);
    return p.kind == want.kind && p.dim == want.dim;
}

static dt_tensor *region(dt_tensor *x, void *user) {
    small *m = (small *)user;
    dt_tensor *h = dt_column_linear(
        x, m->up, m->up_bias, (dt_linear_desc){ .activation = DT_ACT_GELU }, m->tp, DT_SHARD(1));
    CHECK(placed_as(h, m->tp, DT_SHARD(2)));
    return dt_row_linear(h, m->down, m->marked, x, m->tp, DT_SHARD(1));
}

/* Sequence parallelism with recompute, an op of the user, and evaluation without gradients. */
static dt_status good_main(dt_ctx *ctx, void *user) {
    small m;
    (void)user;
    small_make(&m, ctx, 0);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &m.mesh });
    CHECK(placed_as(m.x, m.tp, DT_UNPLACED) && placed_as(m.x, NULL, DT_UNPLACED));
    CHECK(placed_as(m.up, m.tp, DT_SHARD(0)) && placed_as(m.marked, m.tp, DT_COPY));
    CHECK(placed_as(m.gain, m.tp, DT_REPLICATE));
    dt_tensor *x = dt_rmsnorm(tokens(&m), m.marked, 0);
    dt_tensor *y = dt_block_at(ctx, region, x, &m, (dt_block_desc){ .recompute = 1 });
    CHECK(placed_as(y, m.tp, DT_SHARD(1)));
    dt_tensor *rows = dt_reshape(y, DT_SHAPE(4, 4));
    CHECK(placed_as(rows, m.tp, DT_UNPLACED)); /* not a contiguous shard of the 8 rows */
    CHECK(placed_as(dt_reshape(rows, y->shape), m.tp, DT_SHARD(1)));
    dt_tensor *sum = dt_sum_over(dt_mul(y, y), DT_ALL);
    CHECK(placed_as(sum, m.tp, DT_PARTIAL) && dt_backward(sum) == DT_OK);
    dt_reset(ctx);

    small_make_inputs(&m);
    y = own(dt_tp_enter(m.x, m.tp, DT_REPLICATE));
    CHECK(placed_as(y, m.tp, DT_UNPLACED));
    CHECK(placed_as(dt_linear(y, m.up, NULL), m.tp, DT_SHARD(2)));
    CHECK(dt_place(y, m.tp, DT_COPY) == y && placed_as(y, m.tp, DT_COPY));
    CHECK(dt_place(y, m.tp, DT_UNPLACED) == y && placed_as(y, m.tp, DT_UNPLACED));
    dt_reset(ctx);

    small_make_inputs(&m);
    dt_no_grad(ctx, 1); /* without gradients f is not needed */
    y = dt_linear(dt_place(m.x, m.tp, DT_REPLICATE), m.up, NULL);
    CHECK(placed_as(y, m.tp, DT_SHARD(2)));
    dt_add(dt_place(own(m.x), m.tp, DT_PARTIAL), own(m.x)); /* as in training, nothing is known */
    dt_no_grad(ctx, 0);
    dt_zero_free(zero);
    return dt_error(ctx);
}

/* One parameter inside of the region and outside of it: its gradient is the sum of both. */
static dt_status shared_main(dt_ctx *ctx, void *user) {
    small m;
    double one = 0;
    (void)user;
    small_make(&m, ctx, 0);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &m.mesh });
    dt_tensor *x = dt_place(m.x, m.tp, DT_REPLICATE);
    dt_tensor *h = dt_mul(dt_tp_enter(x, m.tp, DT_REPLICATE),
        dt_tp_enter(
            m.gain, m.tp, DT_REPLICATE)); /* COPY, so each rank sums a part of its columns */
    dt_tensor *mine = dt_redistribute(dt_mul(x, m.gain), m.tp, DT_REPLICATE, DT_REPLICATE);
    double keep[4] = { 1 - m.mesh.coord.tp, 1 - m.mesh.coord.tp, m.mesh.coord.tp, m.mesh.coord.tp };
    h = dt_mul(h, dt_place(dt_input(ctx, DT_F64, DT_SHAPE(4), keep), m.tp, DT_UNPLACED));
    h = dt_place(dt_sum_over(h, DT_ALL), m.tp, DT_PARTIAL);
    h = dt_redistribute(h, m.tp, DT_PARTIAL, DT_REPLICATE);
    CHECK(dt_backward(dt_add(h, dt_sum_over(mine, DT_ALL))) == DT_OK);
    for (int i = 0; i < 4; i++, one = 0) { /* both parts are the sum of x over its rows */
        for (int r = 0; r < 8; r++) one += noise(1, 4 * r + i);
        CHECK(fabs(((double *)m.gain->grad)[i] - 2 * one) < 1e-12);
    }
    dt_zero_free(zero);
    return dt_error(ctx);
}

/* Every rank computes the loss of the gathered batch, over the data group. */
static dt_status gathered_main(dt_ctx *ctx, void *user) {
    dt_tensor *w =
        dt_param_at(ctx, "w", DT_SHAPE(4, 4), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F64 });
    (void)user;
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ 0 });
    dt_tensor *h = dt_linear(dt_input(ctx, DT_F64, DT_SHAPE(2, 4), NULL), w, NULL);
    dt_tensor *all = dt_redistribute(h, dt_world(ctx), DT_SHARD(0), DT_COPY);
    CHECK(dt_backward(dt_mse(all, dt_input(ctx, DT_F64, DT_SHAPE(4, 4), NULL), 32)) == DT_OK);
    dt_zero_free(zero);
    return dt_error(ctx);
}

/* One head a rank: a dimension of size 1 may be the sharded one. */
static dt_status one_head_main(dt_ctx *ctx, void *user) {
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2 });
    (void)user;
    dt_tensor *x = dt_input(ctx, DT_F64, DT_SHAPE(2, 3, 3, 4), NULL);
    dt_tensor *q = dt_slice(dt_place(x, mesh.tp, DT_SHARD(3)), 2, 0, 1);
    CHECK(placed_as(q, mesh.tp, DT_SHARD(3)));
    q = dt_reshape(q, DT_SHAPE(2, 3, 1, 4));
    CHECK(placed_as(q, mesh.tp, DT_UNPLACED));
    CHECK(dt_attention(q, q, q, (dt_attn_desc){ 0 }) != NULL);
    CHECK(placed_as(dt_reshape(q, DT_SHAPE(2, 3, 4)), mesh.tp, DT_UNPLACED));
    dt_place(q, mesh.tp, DT_SHARD(2));
    CHECK(placed_as(dt_reshape(q, DT_SHAPE(2, 3, 4)), mesh.tp, DT_SHARD(2)));
    CHECK(placed_as(dt_reshape(q, DT_SHAPE(6, 4)), mesh.tp, DT_UNPLACED)); /* rows of heads */
    x = dt_place(dt_input(ctx, DT_F64, DT_SHAPE(1, 3, 4), NULL), mesh.tp, DT_SHARD(1));
    CHECK(placed_as(dt_reshape(x, DT_SHAPE(1, 3, 2, 2)), mesh.tp, DT_SHARD(1)));
    x = dt_place(dt_input(ctx, DT_F64, DT_SHAPE(2, 1, 4), NULL), mesh.tp, DT_SHARD(1));
    CHECK(placed_as(dt_reshape(x, DT_SHAPE(2, 4)), mesh.tp, DT_UNPLACED)); /* rows, or columns */
    return dt_error(ctx);
}

/* Dropout of columns that two groups shard is that of one rank. */
static dt_status columns_main(dt_ctx *ctx, void *user) {
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2, .cp = 2 });
    double ones[3 * 16], full[3 * 16], mine[3 * 4];
    dt_comm *first = mesh.cp, *second = mesh.tp;
    (void)user;
    for (int i = 0; i < 3 * 16; i++) ones[i] = 1;
    dt_read(dt_dropout(dt_input(ctx, DT_F64, DT_SHAPE(3, 16), ones), 0.5, 7, NULL), full);
    for (int order = 0; order < 2; order++, first = mesh.tp, second = mesh.cp) {
        dt_tensor *x = dt_input(ctx, DT_F64, DT_SHAPE(3, 16), ones);
        x = dt_redistribute(x, first, DT_REPLICATE, DT_SHARD(1));
        x = dt_redistribute(x, second, DT_REPLICATE, DT_SHARD(1));
        x = dt_place(x, first, DT_SHARD(1));
        dt_read(dt_dropout(x, 0.5, 7, NULL), mine);
        int at = 4 * (2 * dt_comm_rank(first) + dt_comm_rank(second));
        for (int i = 0; i < 12; i++) CHECK(mine[i] == full[i / 4 * 16 + at + i % 4]);
    }
    return dt_error(ctx);
}

/* The groups of tied parameters and of stages are no axes of placements, whoever made them. */
static dt_status tied_main(dt_ctx *ctx, void *user) {
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .pp = 2 });
    dt_comm *both = dt_comm_split(dt_world(ctx), 0, dt_ctx_rank(ctx), "both");
    dt_param_desc d = { .grad_placements = { { both, DT_GRAD_PARTIAL } } };
    (void)user;
    dt_stage(ctx, mesh.coord.pp);
    dt_tape(ctx, 0, mesh.coord.pp);
    dt_tensor *tied = dt_param_at(ctx, "tied", DT_SHAPE(4, 4), DT_NORMAL(1), d);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh });
    CHECK(((dt_group *)both)->pipeline && ((dt_group *)mesh.pp)->pipeline);
    dt_tensor *x = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(2, 4), NULL), tied, NULL);
    CHECK(placed_as(x, both, DT_UNPLACED));
    CHECK(dt_backward(dt_mse(x, dt_input(ctx, DT_F32, DT_SHAPE(2, 4), NULL), 8)) == DT_OK);
    dt_zero_step(zero, 0.1);
    CHECK(((dt_group *)both)->pipeline);
    dt_zero_free(zero);
    return dt_error(ctx);
}

/* The training state sums gradients over cp, so parameters need no mark there. */
static dt_status context_main(dt_ctx *ctx, void *user) {
    small m;
    (void)user;
    small_make(&m, ctx, 1);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &m.mesh });
    dt_tensor *x = dt_rmsnorm(dt_place(m.x, m.tp, DT_SHARD(1)), m.gain, 0);
    CHECK(placed_as(x, m.tp, DT_SHARD(1)) && placed_as(m.gain, m.tp, DT_COPY));
    CHECK(placed_as(dt_linear(x, m.positions, m.gain), m.tp, DT_SHARD(1)));
    dt_zero_free(zero);
    return dt_error(ctx);
}

static dt_tensor *good_stage(dt_tensor *x, int stage, int micro, void *user) {
    dt_tensor **w = (dt_tensor **)user;
    double in[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    (void)micro;
    if (stage == 0) return dt_linear(dt_input(w[0]->ctx, DT_F64, DT_SHAPE(2, 4), in), w[0], NULL);
    CHECK(placed_as(dt_linear(x, w[1], NULL), w[1]->param->desc.shards[0].comm, DT_SHARD(1)));
    return dt_mse(x, x, 1);
}

/* Nothing is known about a tensor from another stage, so nothing is refused. */
static dt_status stages_main(dt_ctx *ctx, void *user) {
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2, .pp = 2 });
    dt_param_desc d = { .dtype = DT_F64 };
    dt_tensor *w[2] = { NULL, NULL };
    (void)user;
    dt_stage(ctx, mesh.coord.pp);
    if (mesh.coord.pp == 0) w[0] = dt_param_at(ctx, "w0", DT_SHAPE(4, 4), DT_NORMAL(1), d);
    d.shards[0] = (dt_shard_spec){ mesh.tp, 0 };
    if (mesh.coord.pp == 1) w[1] = dt_param_at(ctx, "w1", DT_SHAPE(4, 4), DT_NORMAL(1), d);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh });
    dt_schedule *s = dt_schedule_make(ctx, (dt_schedule_desc){ .ranks = 2, .micros = 1 });
    dt_pipe_run(
        ctx, (dt_pipe_desc){ .schedule = s, .comm = mesh.pp, .run = good_stage, .user = w });
    dt_schedule_free(s);
    dt_zero_free(zero);
    return dt_error(ctx);
}

/* A group contains another one whatever the order of their ranks: dt_comm_split's key changes it. */
static void test_contained_groups(void) {
    static const int up[] = { 0, 2, 4, 6 }, down[] = { 6, 4, 2, 0 }, some[] = { 4, 0 },
                     other[] = { 6, 1 };
    const dt_group a = { .size = 4, .ranks = up }, b = { .size = 4, .ranks = down },
                   c = { .size = 2, .ranks = some }, d = { .size = 2, .ranks = other };
    CHECK(dt__group_contains(&a, &b) && dt__group_contains(&b, &a) && dt__group_contains(&a, &c) &&
          dt__group_contains(&b, &c));
    CHECK(
        !dt__group_contains(&a, &d) && !dt__group_contains(&b, &d) && !dt__group_contains(&c, &a));
}

/* Two heads of keys over four ranks: a placement over tp counts over its subgroups. */
static dt_status heads_main(dt_ctx *ctx, void *user) {
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 4 });
    dt_kv_groups kv = dt_kv_split(ctx, mesh.tp, 2);
    dt_param_desc d = { .dtype = DT_F64, .shards = { { mesh.tp, 0 } } }, k = d;
    (void)user;
    k.shards[0].comm = kv.shard_group;
    k.grad_placements[0] = (dt_grad_placement){ kv.replica_group, DT_GRAD_PARTIAL };
    dt_tensor *wq = dt_param_at(ctx, "q", DT_SHAPE(4, 2, 6), DT_NORMAL(1), d),
              *wk = dt_param_at(ctx, "k", DT_SHAPE(2, 2, 6), DT_NORMAL(1), k);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh });
    dt_tensor *x = dt_require_grad(dt_input(ctx, DT_F64, DT_SHAPE(2, 3, 6), NULL));
    dt_tensor *in = dt_tp_enter(x, mesh.tp, DT_REPLICATE), *q = dt_linear(in, wq, NULL),
              *keys = dt_linear(in, wk, NULL);
    CHECK(placed_as(q, mesh.tp, DT_SHARD(2)) && placed_as(keys, kv.shard_group, DT_SHARD(2)));
    CHECK(placed_as(keys, kv.replica_group, DT_COPY) && placed_as(keys, mesh.tp, DT_UNPLACED));
    dt_tensor *y = dt_attention(q, keys, keys, (dt_attn_desc){ 0 });
    CHECK(placed_as(y, mesh.tp, DT_SHARD(2)));
    dt_zero_free(zero);
    return dt_error(ctx);
}

int main(void) {
    test_ops();
    test_mistakes();
    run_well(2, good_main, NULL);
    run_well(2, shared_main, NULL);
    run_well(2, gathered_main, NULL);
    run_well(2, one_head_main, NULL);
    run_well(4, columns_main, NULL);
    run_well(2, tied_main, NULL);
    run_well(2, context_main, NULL);
    run_well(4, stages_main, NULL);
    run_well(4, heads_main, NULL);
    test_contained_groups();
    return check_done("test_placements");
}
