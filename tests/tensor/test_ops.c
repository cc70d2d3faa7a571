/* test_ops.c - every op of dt_tensor.h: finite differences, PyTorch's results, 16-bit types, errors
   Public domain or MIT, at your choice; see LICENSE.

   Run:  test_ops [folder of the golden files, default tests/golden]

   Values are compared element by element: |a - b| <= tolerance * max(|b|, s). s is the root mean
   square of the group that an element belongs to, so that an expected value of 0 is no division by
   zero. All gradients of a case are one group; an output is a group of its own. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_tensor.h"
#include "tests/support/check.h"
#include "tests/golden/golden.h"
#include "tests/support/meter.h"

// ==== 1. Finite differences =====================================================================

/* A function of up to four tensors. The loss is a weighted sum of its output, plus weight * side if
   build sets `side`. Each build function defines the meaning of kind, dim, p and ids. */
enum { FD_INPUTS = 4, FD_SAMPLES = 6 };
typedef struct fd_case {
    const char *name;
    dt_tensor *(*build)(dt_tensor **in, struct fd_case *c);
    int n;
    dt_shape shape[FD_INPUTS];
    int full;           /* attention: not causal */
    const int32_t *ids; /* embedding: ids; cross entropy: labels */
    dt_shape ids_shape;
    double weight, p;
    int kind, dim;
    dt_tensor *side;
} fd_case;

static double fd_value(dt_ctx *ctx, fd_case *c, double **x) {
    dt_tensor *in[FD_INPUTS] = { NULL };
    for (int i = 0; i < c->n; i++) in[i] = dt_input(ctx, DT_F64, c->shape[i], x[i]);
    c->side = NULL;
    dt_tensor *loss = weigh(c->build(in, c), NULL);
    double value = dt_item(loss) + (c->side ? c->weight * dt_item(c->side) : 0);
    dt_reset(ctx);
    return value;
}

/* Fourth-order central difference along direction v; the error is of order h^4 and rounding / h. */
static double fd_slope(dt_ctx *ctx, fd_case *c, double **x, int input, const double *v, double h) {
    static const double at[4] = { -2, -1, 1, 2 }, factor[4] = { 1, -8, 8, -1 };
    int64_t n = dt_count(c->shape[input]);
    double *saved = x[input], sum = 0;
    x[input] = (double *)room((size_t)n * sizeof(double));
    for (int p = 0; p < 4; p++) {
        for (int64_t i = 0; i < n; i++) x[input][i] = saved[i] + at[p] * h * v[i];
        sum += factor[p] * fd_value(ctx, c, x);
    }
    free(x[input]);
    x[input] = saved;
    return sum / (12 * h);
}

/* Ways to compute the same gradient. The first eight must agree in every bit. The last two add
   another gradient. Halves: dt_backward_input, then dt_backward_weight. */
enum {
    AS_INPUTS,
    AS_PARAMS,
    AS_HALVES,       /* of parameters */
    AS_EVEN,         /* halves; only inputs 0, 2, .. are parameters */
    AS_ODD,          /* halves; only inputs 1, 3, .. are parameters */
    AS_KEPT,         /* the user keeps the gradient of the output */
    AS_BLOCK,        /* the function runs in a dt_block */
    AS_BLOCK_HALVES, /* in a dt_block, by halves */
    AS_SHARED,       /* side losses add the gradient noise(99, element) to each input */
    AS_TWICE,        /* the output is used again through a view, with weight 0.5 */
    AS_WAYS
};
static const char *const way_name[AS_WAYS] = { "inputs", "parameters", "two halves",
    "even ones parameters", "odd ones parameters", "output kept", "block", "block by halves",
    "shared", "used twice" };

static int way_param(int way, int i) {
    return way == AS_PARAMS || way == AS_HALVES || way == AS_BLOCK_HALVES ||
           (way == AS_EVEN && i % 2 == 0) || (way == AS_ODD && i % 2);
}
static int way_halves(int way) {
    return way == AS_HALVES || way == AS_EVEN || way == AS_ODD || way == AS_BLOCK_HALVES;
}

typedef struct fd_inside {
    dt_tensor **in;
    fd_case *c;
} fd_inside;
static dt_tensor *fd_block(dt_tensor *x, void *user) {
    fd_inside *u = (fd_inside *)user;
    (void)x;
    return u->c->build(u->in, u->c);
}

/* The loss, with the function's output in *out. */
static dt_tensor *fd_loss(dt_ctx *ctx, dt_tensor **in, fd_case *c, int way, dt_tensor **out) {
    fd_inside u = { in, c };
    *out = way == AS_BLOCK || way == AS_BLOCK_HALVES ? dt_block(ctx, fd_block, in[0], &u)
                                                     : c->build(in, c);
    if (way == AS_KEPT) dt_require_grad(*out);
    dt_tensor *loss = weigh(*out, NULL);
    if (way == AS_SHARED)
        for (int i = 0; i < c->n; i++) loss = dt_loss(loss, weigh(in[i], NULL), 1);
    if (way == AS_TWICE && *out)
        loss = dt_loss(loss, weigh(dt_reshape(*out, DT_SHAPE(dt_count((*out)->shape))), NULL), 0.5);
    return loss;
}

static void fd_gradient(fd_case *c, double **x, double **g, int way) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *in[FD_INPUTS] = { NULL }, *out = NULL;
    for (int i = 0; i < c->n; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        if (way_param(way, i))
            in[i] =
                dt_param_at(ctx, name, c->shape[i], DT_ZEROS, (dt_param_desc){ .dtype = DT_F64 });
    }
    for (int i = 0; i < c->n; i++) {
        if (!in[i])
            in[i] = dt_require_grad(dt_input(ctx, DT_F64, c->shape[i], x[i]));
        else
            dt_write(in[i], x[i]);
    }
    dt_tensor *loss = fd_loss(ctx, in, c, way, &out);
    if (way_halves(way))
        dt_backward_input(loss), dt_backward_weight(loss);
    else
        dt_backward(loss);
    CHECK_MSG(dt_error(ctx) == DT_OK, "%s: %s", c->name, dt_error_text(ctx));
    int wrong = 0;
    for (int64_t i = 0; way == AS_KEPT && out && !out->base && i < dt_count(out->shape); i++)
        wrong += !out->grad || get(out->grad, out->dtype, i) != noise(99, (uint64_t)i);
    CHECK_MSG(
        wrong == 0, "%s: %d values of the kept gradient of the output are wrong", c->name, wrong);
    for (int i = 0; i < c->n; i++) {
        int64_t n = dt_count(c->shape[i]);
        if (!CHECK_MSG(in[i] && in[i]->grad, "%s: no gradient of input %d", c->name, i))
            memset(g[i], 0, 8 * (size_t)n);
        else
            memcpy(g[i], in[i]->grad, 8 * (size_t)n);
    }
    close_good(ctx, &m, c->name);
}

static double fd_worst; /* the largest error of all elements compared */

static void fd_compare(fd_case *c, double **x, double **g) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    double squares = 0, count = 0;
    dt_no_grad(ctx, 1);
    for (int i = 0; i < c->n; i++)
        for (int64_t j = 0; j < dt_count(c->shape[i]); j++, count++) squares += g[i][j] * g[i][j];
    double rms = sqrt(squares / count);
    for (int i = 0; i < c->n; i++) {
        int64_t n = dt_count(c->shape[i]);
        double *v = (double *)room((size_t)n * 8), dot = 0, size = 0;
        for (int s = 0; s < FD_SAMPLES && s < n; s++) { /* single elements */
            int64_t e = n <= FD_SAMPLES ? s : below(55 + (uint64_t)i, (uint64_t)(n + s), (int)n);
            v[e] = 1;
            double slope = fd_slope(ctx, c, x, i, v, 1e-3),
                   floor = fabs(slope) > rms ? fabs(slope) : rms;
            fd_worst = fmax(fd_worst, (fabs(g[i][e] - slope) - 1e-11) / (floor + 1e-30));
            CHECK_MSG(fabs(g[i][e] - slope) <= 1e-6 * floor + 1e-11,
                "%s: input %d, element %lld: %.12g, not %.12g", c->name, i, (long long)e, g[i][e],
                slope);
            v[e] = 0;
        }
        for (int64_t j = 0; j < n; j++) { /* one direction that changes all elements */
            v[j] = noise(66, (uint64_t)j) < 0 ? -1 : 1;
            dot += v[j] * g[i][j];
            size += g[i][j] * g[i][j];
        }
        double slope = fd_slope(ctx, c, x, i, v, 1e-3 / sqrt((double)n)),
               floor = fmax(sqrt(size), rms);
        CHECK_MSG(fabs(dot - slope) <= 1e-6 * fmax(fabs(slope), floor) + 1e-11,
            "%s: input %d, directional derivative: %.12g, not %.12g", c->name, i, dot, slope);
        free(v);
    }
    close_good(ctx, &m, c->name);
}

/* Compares the gradients of one input between the ways. */
static void fd_ways(const fd_case *c, double *g[AS_WAYS][FD_INPUTS], int i) {
    size_t n = (size_t)dt_count(c->shape[i]);
    double shared = 0, twice = 0, rms = 1e-30;
    for (int w = AS_PARAMS; w < AS_SHARED; w++)
        CHECK_MSG(memcmp(g[AS_INPUTS][i], g[w][i], n * 8) == 0, "%s: input %d: bits differ: %s",
            c->name, i, way_name[w]);
    for (size_t j = 0; j < n; j++) rms += g[AS_INPUTS][i][j] * g[AS_INPUTS][i][j] / (double)n;
    rms = sqrt(rms);
    for (size_t j = 0; j < n; j++) {
        double x = g[AS_INPUTS][i][j];
        shared = fmax(shared, fabs(g[AS_SHARED][i][j] - (x + noise(99, j))) / fmax(1, fabs(x)));
        twice = fmax(twice, fabs(g[AS_TWICE][i][j] - 1.5 * x) / fmax(rms, fabs(x)));
    }
    CHECK_MSG(shared < 1e-13, "%s: input %d: accumulated on another gradient: error %.2g", c->name,
        i, shared);
    CHECK_MSG(
        c->side || twice < 1e-11, "%s: input %d: output used twice: error %.2g", c->name, i, twice);
}

/* Refuses memory to an op at each place where it asks for some: the op must return NULL, or its
   backward an error, and must not read what it did not get. Round k of way 0 leaves 64 k bytes in
   the arena of the results and refuses every other allocation of the forward. Way 1 includes the
   backward and refuses all allocations after the first k; so does way 0 with AddressSanitizer,
   under which an arena never has room. The rounds end when nothing was refused. */
static void fd_refused(fd_case *c, double **x) {
    enum { MOST = 100 };
    for (int way = 0; way < 2; way++)
        for (int k = 0, refused = 1; refused && k < MOST; k++) {
            meter m = METER;
            dt_ctx *ctx = open_ctx(&m);
            dt_tensor *in[FD_INPUTS] = { NULL }, *out = NULL;
            for (int i = 0; i < c->n; i++)
                in[i] = dt_require_grad(dt_input(ctx, DT_F64, c->shape[i], x[i]));
            if (way == 0) { /* a full chunk, then one that is full but for the room */
                dt_input(ctx, DT_U8, DT_SHAPE(1 << 20), NULL);
                dt_input(ctx, DT_U8, DT_SHAPE(1), NULL);
                dt_input(ctx, DT_U8, DT_SHAPE(DT__MAX_GROWTH - 64 * (k + 1)), NULL);
            }
            m.refuse_in = way || UNDER_ASAN ? k : 0;
            m.sticky = 1;
            out = c->build(in, c);
            dt_status status = way && out ? dt_backward_at(out, out, DT_BACKWARD) : DT_OK;
            refused = m.refused;
            CHECK_MSG((out && status == DT_OK) == !refused &&
                          dt_error(ctx) == (refused ? DT_ERR_MEM : DT_OK),
                "%s: way %d, round %d: %s", c->name, way, k, dt_error_text(ctx));
            close_ctx(ctx, &m, c->name);
        }
}

static void fd_check(fd_case c) {
    double *x[FD_INPUTS] = { NULL }, *g[AS_WAYS][FD_INPUTS] = { { NULL } };
    for (int i = 0; i < c.n; i++) {
        size_t n = (size_t)dt_count(c.shape[i]);
        x[i] = (double *)room(n * 8);
        for (size_t j = 0; j < n; j++) x[i][j] = 1.5 * noise(10 + (uint64_t)i, j);
        for (int w = 0; w < AS_WAYS; w++) g[w][i] = (double *)room(n * 8);
    }
    for (int w = 0; w < AS_WAYS; w++) fd_gradient(&c, x, g[w], w);
    for (int i = 0; i < c.n; i++) fd_ways(&c, g, i);
    fd_compare(&c, x, g[AS_INPUTS]);
    fd_refused(&c, x);
    for (int i = 0; i < c.n; i++) {
        free(x[i]);
        for (int w = 0; w < AS_WAYS; w++) free(g[w][i]);
    }
}

static const int64_t odd[4] = { 1, 3, 17, 127 };

static dt_tensor *build_linear(dt_tensor **in, fd_case *c) {
    (void)c;
    return weigh(dt_linear(in[0], in[1], in[2]), NULL);
}

static void fd_linear(void) {
    for (int m = 0; m < 4; m++)
        for (int i = 0; i < 4; i++)
            for (int o = 0; o < 4; o++) {
                int bias = (m + i + o) % 2;
                fd_check((fd_case){ .name = bias ? "linear with bias" : "linear",
                    .build = build_linear,
                    .n = 2 + bias,
                    .shape = {
                        DT_SHAPE(odd[m], odd[i]), DT_SHAPE(odd[o], odd[i]), DT_SHAPE(odd[o]) } });
            }
    fd_check((fd_case){ .name = "linear (2,3,5) (3,17,5)",
        .build = build_linear,
        .n = 3,
        .shape = { DT_SHAPE(2, 3, 5), DT_SHAPE(3, 17, 5), DT_SHAPE(3, 17) } });
    fd_check((fd_case){ .name = "linear (5) (2,1,3,5)",
        .build = build_linear,
        .n = 2,
        .shape = { DT_SHAPE(5), DT_SHAPE(2, 1, 3, 5) } });
}

static dt_tensor *build_embedding(dt_tensor **in, fd_case *c) {
    return weigh(dt_embedding(in[0], dt_input(in[0]->ctx, DT_I32, c->ids_shape, c->ids)), NULL);
}

static void fd_embedding(void) {
    int32_t ids[127];
    for (int v = 0; v < 3; v++)
        for (int w = 0; w < 4; w++) {
            /* some rows are used many times, others never */
            for (int i = 0; i < 127; i++) ids[i] = below(77, (uint64_t)i, (int)odd[v]);
            fd_check((fd_case){ .name = "embedding",
                .build = build_embedding,
                .n = 1,
                .shape = { DT_SHAPE(odd[v], odd[w]) },
                .ids = ids,
                .ids_shape = w == 3   ? DT_SHAPE(127)
                             : w == 2 ? DT_SHAPE(3, 1, 7)
                                      : DT_SHAPE(2, 3) });
        }
}

static dt_tensor *build_layernorm(dt_tensor **in, fd_case *c) {
    return weigh(dt_layernorm(in[0], in[1], in[2], c->weight), NULL);
}

static void fd_layernorm(void) {
    for (int r = 0; r < 4; r++)
        for (int w = 0; w < 4; w++)
            fd_check((fd_case){ .name = "layernorm",
                .build = build_layernorm,
                .n = 3,
                /* eps, 0: the default; rows of 3 close values curve too much without it */
                .weight = w == 1 ? 0.1 : 0.001 * r,
                .shape = { DT_SHAPE(odd[r], odd[w]), DT_SHAPE(odd[w]), DT_SHAPE(odd[w]) } });
    fd_check((fd_case){ .name = "layernorm (2,3,5)",
        .build = build_layernorm,
        .n = 3,
        .weight = 0.01,
        .shape = { DT_SHAPE(2, 3, 5), DT_SHAPE(5), DT_SHAPE(5) } });
}

static dt_tensor *build_gelu(dt_tensor **in, fd_case *c) {
    (void)c;
    return weigh(dt_gelu(in[0]), NULL);
}

static dt_tensor *build_attention(dt_tensor **in, fd_case *c) {
    return weigh(dt_attention(in[0], in[1], in[2], (dt_attn_desc){ .full = c->full }), NULL);
}

static dt_tensor *build_self_attention(dt_tensor **in, fd_case *c) {
    return weigh(
        dt_attention(in[0], in[0], in[0], (dt_attn_desc){ .full = c->full, .kv_heads = 3 }), NULL);
}

static void fd_attention(void) {
    static const int64_t size[][6] = { /* B TQ TK H K D */
        { 1, 1, 1, 1, 1, 1 }, { 2, 3, 3, 3, 3, 3 }, { 1, 17, 17, 3, 1, 3 }, { 1, 17, 17, 6, 2, 5 },
        { 2, 3, 17, 2, 2, 1 }, { 1, 17, 3, 2, 1, 3 }, { 3, 1, 17, 1, 1, 17 },
        { 1, 37, 37, 2, 1, 3 }, { 1, 19, 140, 2, 1, 3 }, { 1, 127, 127, 1, 1, 17 }
    };
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        for (int full = 0; full < 2; full++) {
            const int64_t *s = size[i];
            fd_check((fd_case){ .name = full ? "attention full" : "attention causal",
                .build = build_attention,
                .n = 3,
                .full = full,
                .shape = { DT_SHAPE(s[0], s[1], s[3], s[5]), DT_SHAPE(s[0], s[2], s[4], s[5]),
                    DT_SHAPE(s[0], s[2], s[4], s[5]) } });
        }
    fd_check((fd_case){ .name = "self-attention of one tensor",
        .build = build_self_attention,
        .n = 1,
        .shape = { DT_SHAPE(2, 5, 3, 3) } });
}

static dt_tensor *build_add(dt_tensor **in, fd_case *c) {
    (void)c;
    return weigh(dt_add(in[0], in[1]), NULL);
}

static dt_tensor *build_add_self(dt_tensor **in, fd_case *c) {
    (void)c;
    return weigh(dt_gelu(dt_add(in[0], in[0])), NULL);
}

static void fd_add(void) {
    static const dt_shape a[6] = { { 1, { 1 } }, { 2, { 3, 17 } }, { 2, { 3, 17 } },
        { 3, { 17, 3, 127 } }, { 3, { 3, 17, 1 } }, { 2, { 5, 3 } } };
    static const dt_shape b[6] = { { 1, { 1 } }, { 2, { 3, 17 } }, { 1, { 17 } }, { 2, { 3, 127 } },
        { 1, { 1 } }, { 0, { 0 } } };
    for (int i = 0; i < 6; i++)
        fd_check((fd_case){ .name = "add", .build = build_add, .n = 2, .shape = { a[i], b[i] } });
    fd_check((fd_case){
        .name = "add to itself", .build = build_add_self, .n = 1, .shape = { DT_SHAPE(3, 17) } });
    for (int i = 0; i < 4; i++)
        fd_check((fd_case){
            .name = "gelu", .build = build_gelu, .n = 1, .shape = { DT_SHAPE(odd[i], 3) } });
}

/* x, a view of x and a view of the view share one gradient. */
static dt_tensor *build_views(dt_tensor **in, fd_case *c) {
    dt_tensor *flat = dt_reshape(in[0], DT_SHAPE(51)), *tall = dt_reshape(flat, DT_SHAPE(17, 3));
    (void)c;
    return weigh(
        dt_add(dt_gelu(tall),
            dt_reshape(dt_add(dt_gelu(in[0]), dt_reshape(flat, DT_SHAPE(3, 17))), DT_SHAPE(17, 3))),
        NULL);
}

static dt_tensor *build_cross_entropy(dt_tensor **in, fd_case *c) {
    return dt_cross_entropy(in[0], dt_input(in[0]->ctx, DT_I32, c->ids_shape, c->ids), 7);
}

static void fd_cross_entropy(void) {
    int32_t labels[127];
    for (int r = 0; r < 4; r++)
        for (int v = 0; v < 4; v++)
            for (int ignored = 0; ignored < 3; ignored++) { /* none, some, all */
                for (int i = 0; i < 127; i++) {
                    labels[i] = below(78, (uint64_t)i, (int)odd[v]);
                    if (ignored == 2 || (ignored == 1 && i % 3 == 1)) labels[i] = -1 - i;
                }
                fd_check((fd_case){ .name = "cross entropy",
                    .build = build_cross_entropy,
                    .n = 1,
                    .ids = labels,
                    .shape = { DT_SHAPE(odd[r], odd[v]) },
                    .ids_shape = DT_SHAPE(odd[r]) });
            }
    for (int i = 0; i < 6; i++) labels[i] = i == 4 ? -100 : i;
    fd_check((fd_case){ .name = "cross entropy (2,3,17)",
        .build = build_cross_entropy,
        .n = 1,
        .ids = labels,
        .shape = { DT_SHAPE(2, 3, 17) },
        .ids_shape = DT_SHAPE(2, 3) });
}

static dt_tensor *build_mse(dt_tensor **in, fd_case *c) {
    return c->kind ? dt_bce_with_logits(in[0], in[1], 5) : dt_mse(in[0], in[1], 5);
}

/* a side loss attached before the end of the function */
static dt_tensor *build_loss(dt_tensor **in, fd_case *c) {
    dt_tensor *h = dt_gelu(in[0]);
    c->side = dt_mse(h, in[1], 3);
    return weigh(dt_gelu(dt_loss(h, c->side, c->weight)), NULL);
}

/* The side loss is a leaf, which the main loss uses too. */
static dt_tensor *build_loss_param(dt_tensor **in, fd_case *c) {
    c->side = in[1];
    return weigh(dt_add(dt_loss(dt_gelu(in[0]), in[1], c->weight), in[1]), NULL);
}

/* user-defined ops; one op has the same tensor as both inputs */
static dt_tensor *build_times(dt_tensor **in, fd_case *c) {
    (void)c;
    return weigh(times(times(in[0], in[1]), times(in[1], in[1])), NULL);
}

typedef struct inner {
    dt_tensor *w, *outside;
} inner;
static dt_tensor *block_inner(dt_tensor *x, void *user) {
    inner *u = (inner *)user;
    return dt_gelu(dt_linear(dt_add(x, u->outside), u->w, NULL));
}

static dt_tensor *block_outer(dt_tensor *x, void *user) {
    dt_tensor **in = (dt_tensor **)user;
    inner u = { in[1], x };
    dt_tensor *y = dt_block(x->ctx, block_inner, dt_gelu(x), &u);
    u.w = in[2];
    return dt_add(dt_block(x->ctx, block_inner, y, &u), x);
}

/* nested blocks that use tensors of the outer blocks */
static dt_tensor *build_blocks(dt_tensor **in, fd_case *c) {
    (void)c;
    dt_ctx *ctx = in[0]->ctx;
    dt_tensor *y = dt_block(ctx, block_outer, in[0], in);
    return weigh(dt_add(dt_block(ctx, block_outer, y, in), dt_gelu(y)), NULL);
}

static dt_tensor *build_tied(dt_tensor **in, fd_case *c) { /* one table as embedding and as head */
    dt_tensor *ids = dt_input(in[0]->ctx, DT_I32, c->ids_shape, c->ids);
    dt_tensor *logits = dt_linear(dt_gelu(dt_add(dt_embedding(in[0], ids), in[1])), in[0], NULL);
    return dt_cross_entropy(logits, ids, 4);
}

static void fd_others(void) {
    static const int32_t ids[5] = { 3, 0, 3, 16, 3 };
    dt_shape s = DT_SHAPE(3, 17);
    fd_check((fd_case){ .name = "views", .build = build_views, .n = 1, .shape = { s } });
    for (int i = 0; i < 4; i++) {
        /* 17 x 127 elements are more than one piece of 1,024 */
        dt_shape m = DT_SHAPE(3, odd[i]), big = DT_SHAPE(17, odd[i]);
        fd_check((fd_case){ .name = "mse", .build = build_mse, .n = 2, .shape = { m, m } });
        fd_check((fd_case){ .name = "mse", .build = build_mse, .n = 2, .shape = { big, big } });
        fd_check((fd_case){
            .name = "bce", .build = build_mse, .n = 2, .kind = 1, .shape = { big, big } });
    }
    fd_check((fd_case){
        .name = "side loss", .build = build_loss, .n = 2, .shape = { s, s }, .weight = 0.3 });
    fd_check((fd_case){ .name = "side loss of a leaf",
        .build = build_loss_param,
        .n = 2,
        .shape = { s, DT_SCALAR },
        .weight = -0.7 });
    fd_check((fd_case){ .name = "own ops", .build = build_times, .n = 2, .shape = { s, s } });
    fd_check((fd_case){ .name = "blocks",
        .build = build_blocks,
        .n = 3,
        .shape = { DT_SHAPE(5, 3), DT_SHAPE(3, 3), DT_SHAPE(3, 3) } });
    fd_check((fd_case){ .name = "tied",
        .build = build_tied,
        .n = 2,
        .shape = { DT_SHAPE(17, 3), DT_SHAPE(3) },
        .ids = ids,
        .ids_shape = DT_SHAPE(5) });
}

// ==== 2. Finite differences of every op and option ==============================================

/* kind: the activation. dim: flags for bias and residual, and for what the residual and w are. */
enum { L_BIAS = 1, L_RESIDUAL = 2, L_SELF = 4, L_VIEW = 8, L_CONSTANT = 16, L_WEIGHT = 32 };
static dt_tensor *build_linear_at(dt_tensor **in, fd_case *c) {
    int at = 1, square = c->dim & (L_SELF | L_VIEW | L_WEIGHT);
    dt_tensor *x = in[0], *w, *b, *residual;
    if (c->dim & L_CONSTANT)
        w = noise_input(x->ctx, DT_F64, square ? DT_SHAPE(5, 5) : DT_SHAPE(7, 5), 3, 1);
    else
        w = in[at++];
    b = c->dim & L_BIAS ? in[at++] : NULL;
    residual = c->dim & L_RESIDUAL ? in[at] : c->dim & L_SELF ? x : c->dim & L_WEIGHT ? w : NULL;
    if (c->dim & L_VIEW)
        residual = dt_reshape(dt_reshape(x, DT_SHAPE(dt_count(x->shape))), x->shape);
    return dt_linear_at(x, w, b, (dt_linear_desc){ .activation = c->kind, .residual = residual });
}

/* x w^T with a constant w and a residual, and several uses of the result: cases in which a
   gradient's buffer is passed on to the residual without a copy. */
static dt_tensor *build_passed_on(dt_tensor **in, fd_case *c) {
    dt_tensor *w = noise_input(in[0]->ctx, DT_F64, DT_SHAPE(5, 5), 3, 1), *h = dt_tanh(in[0]);
    dt_tensor *y = dt_linear_at(in[1], w, NULL, (dt_linear_desc){ .residual = h });
    if (c->kind == 0) return y;
    if (c->kind == 4) dt_require_grad(y);
    /* uses h again, before y's backward passes its gradient on */
    dt_tensor *z =
        dt_linear_at(h, w, NULL, (dt_linear_desc){ .activation = DT_ACT_GELU, .residual = y });
    if (c->kind == 1) return z;
    if (c->kind == 2)
        return dt_linear_at(z, w, NULL,
            (dt_linear_desc){
                .activation = DT_ACT_SILU, .residual = dt_reshape(y, DT_SHAPE(5, 5)) });
    c->side = weigh(y, NULL);
    z = dt_loss(z, c->side, c->weight);
    if (c->kind == 3) return dt_linear_at(y, w, NULL, (dt_linear_desc){ .residual = z });
    return dt_add(dt_linear_at(y, in[1], NULL, (dt_linear_desc){ .activation = DT_ACT_TANH }),
        dt_reshape(z, DT_SHAPE(1, 5, 5)));
}

static dt_tensor *stream_layer(dt_tensor *x, void *user) {
    dt_tensor **in = (dt_tensor **)user;
    dt_tensor *h = dt_linear_at(
        dt_rmsnorm(x, in[2], 0.1), in[1], in[2], (dt_linear_desc){ .activation = DT_ACT_GELU_ERF });
    return dt_linear_at(h, in[3], NULL, (dt_linear_desc){ .residual = x });
}

static dt_tensor *stream_inside(dt_tensor *x, void *user) {
    return stream_layer(dt_block(x->ctx, stream_layer, x, user), user);
}

/* A residual stream of three layers with a side loss and a view. kind 0: no blocks, 1: a block for
   each layer, 2: nested blocks. */
static dt_tensor *build_stream(dt_tensor **in, fd_case *c) {
    dt_tensor *x = in[0];
    dt_ctx *ctx = x->ctx;
    /* under dt_no_grad too, x is read two blocks later */
    x = c->kind ? dt_block_at(ctx, stream_layer, x, in, (dt_block_desc){ .keep = 1 })
                : stream_layer(x, in);
    c->side = weigh(x, NULL);
    dt_tensor *y = dt_loss(dt_reshape(x, DT_SHAPE(1, 3, 5)), c->side, c->weight);
    if (c->kind == 2)
        y = dt_block(ctx, stream_inside, y, in);
    else
        for (int i = 0; i < 2; i++)
            y = c->kind ? dt_block(ctx, stream_layer, y, in) : stream_layer(y, in);
    return dt_add(y, x); /* x has three uses: a residual, the input of a norm, and here */
}

static void fd_linear_at(void) {
    static const int which[8] = { 0, L_RESIDUAL, L_SELF, L_VIEW, L_CONSTANT,
        L_CONSTANT | L_RESIDUAL, L_CONSTANT | L_SELF, L_WEIGHT };
    for (int act = 0; act <= DT_ACT_SOFTPLUS; act++)
        for (int flags = 0; flags < 16 && act != DT_ACT_LN; flags++) {
            int dim = which[flags / 2] | (flags % 2 ? L_BIAS : 0),
                square = dim & (L_SELF | L_VIEW | L_WEIGHT);
            char name[64];
            snprintf(name, sizeof name, "linear_at activation %d, flags %d", act, dim);
            dt_shape w = square ? DT_SHAPE(5, 5) : DT_SHAPE(7, 5);
            fd_case c = { .name = name,
                .build = build_linear_at,
                .n = 1,
                .kind = act,
                .dim = dim,
                .shape = { square ? w : DT_SHAPE(2, 3, 5) } };
            if (!(dim & L_CONSTANT)) c.shape[c.n++] = w;
            if (dim & L_BIAS) c.shape[c.n++] = DT_SHAPE(w.d[0]);
            if (dim & L_RESIDUAL) c.shape[c.n++] = DT_SHAPE(2, 3, 7);
            fd_check(c);
        }
    fd_check((fd_case){ .name = "linear_at (2,3,5) (3,17,5)",
        .build = build_linear_at,
        .n = 4,
        .kind = DT_ACT_SILU,
        .dim = L_BIAS | L_RESIDUAL,
        .shape = {
            DT_SHAPE(2, 3, 5), DT_SHAPE(3, 17, 5), DT_SHAPE(3, 17), DT_SHAPE(2, 3, 3, 17) } });
    for (int kind = 0; kind < 5; kind++)
        fd_check((fd_case){ .name = "a gradient buffer passed on",
            .build = build_passed_on,
            .n = 2,
            .kind = kind,
            .weight = 0.3,
            .shape = { DT_SHAPE(5, 5), DT_SHAPE(5, 5) } });
    for (int kind = 0; kind < 3; kind++)
        fd_check((fd_case){ .name = "a residual stream",
            .build = build_stream,
            .n = 4,
            .kind = kind,
            .weight = 0.3,
            .shape = { DT_SHAPE(3, 5), DT_SHAPE(5, 5), DT_SHAPE(5), DT_SHAPE(5, 5) } });
}

static dt_tensor *above_zero(dt_tensor *x) { return dt_affine(x, 0.2, 1); }

static dt_tensor *build_unary(dt_tensor **in, fd_case *c) {
    static dt_tensor *(*const f[])(
        dt_tensor *) = { dt_gelu, dt_gelu_erf, dt_silu, dt_relu, dt_tanh, dt_exp };
    if (c->kind == 6) return dt_ln(above_zero(in[0]));
    if (c->kind == 7) return dt_affine(in[0], -1.75, 0.5);
    if (c->kind == 8) return dt_softmax(in[0]);
    if (c->kind == 9) return c->dim ? dt_geglu(in[0]) : dt_swiglu(in[0]);
    if (c->kind == 10)
        return dt_rmsnorm_at(in[0], in[1], (dt_rmsnorm_desc){ c->weight, c->dim ? 1 : 0 });
    if (c->kind == 11) return dt_layernorm(in[0], in[1], in[1], c->weight);
    if (c->kind == 12) return dt_swiglu(dt_swiglu(in[0]));
    if (c->kind == 13) return dt_softmax(dt_affine(in[0], 30, 0)); /* nearly one-hot */
    if (c->kind == 14) return dt_sigmoid(in[0]);
    if (c->kind == 15) return dt_softplus(in[0]);
    if (c->kind == 16) return dt_sqrt(above_zero(in[0]));
    if (c->kind == 17) return dt_abs(in[0]);
    if (c->kind == 18) return dt_clamp(in[0], -0.5, 0.7);
    if (c->kind == 19) return dt_pow(above_zero(in[0]), c->weight);
    if (c->kind == 20) return dt_pow(in[0], c->weight);
    if (c->kind == 21) return dt_log_softmax(dt_affine(in[0], 30, 0));
    return f[c->kind](in[0]);
}

static void fd_unary(void) {
    for (int kind = 0; kind < 9; kind++)
        for (int i = 0; i < 4; i++)
            fd_check((fd_case){ .name = "an elementwise function",
                .build = build_unary,
                .n = 1,
                .kind = kind,
                .shape = { i == 0 ? DT_SHAPE(1) : DT_SHAPE(3, odd[i]) } });
    for (int kind = 14; kind < 21; kind++)
        for (int i = 0; i < 4; i++)
            fd_check((fd_case){ .name = "an elementwise function",
                .build = build_unary,
                .n = 1,
                .kind = kind,
                .weight = kind == 19 ? i - 1.5 : i,
                .shape = { DT_SHAPE(3, odd[i]) } });
    fd_check((fd_case){ .name = "log-softmax",
        .build = build_unary,
        .n = 1,
        .kind = 21,
        .shape = { DT_SHAPE(3, 17) } });
    fd_check((fd_case){ .name = "softmax of large values",
        .build = build_unary,
        .n = 1,
        .kind = 13,
        .shape = { DT_SHAPE(3, 17) } });
    fd_check((fd_case){ .name = "exp, more than a tile",
        .build = build_unary,
        .n = 1,
        .kind = 5,
        .shape = { DT_SHAPE(3, 521) } });
    for (int i = 0; i < 4; i++) {
        fd_check((fd_case){ .name = "swiglu",
            .build = build_unary,
            .n = 1,
            .kind = 9,
            .dim = i % 2,
            .shape = { DT_SHAPE(3, 2, odd[i]) } });
        fd_check((fd_case){ .name = "rmsnorm",
            .build = build_unary,
            .n = 2,
            .kind = 10,
            .dim = i % 2,
            .weight = i == 0 ? 0.1 : 0,
            .shape = { DT_SHAPE(2, 3, odd[i]), DT_SHAPE(odd[i]) } });
        fd_check((fd_case){ .name = "layernorm, one tensor as gain and bias",
            .build = build_unary,
            .n = 2,
            .kind = 11,
            .weight = 0.1,
            .shape = { DT_SHAPE(5, odd[i]), DT_SHAPE(odd[i]) } });
    }
    fd_check((fd_case){ .name = "swiglu twice",
        .build = build_unary,
        .n = 1,
        .kind = 12,
        .shape = { DT_SHAPE(2, 2, 2, 3) } });
    fd_check((fd_case){ .name = "swiglu, more than a tile",
        .build = build_unary,
        .n = 1,
        .kind = 9,
        .shape = { DT_SHAPE(2, 2, 521) } });
    fd_check((fd_case){ .name = "rmsnorm, more than a tile",
        .build = build_unary,
        .n = 2,
        .kind = 10,
        .shape = { DT_SHAPE(3, 521), DT_SHAPE(521) } });
}

static dt_tensor *build_binary(dt_tensor **in, fd_case *c) {
    static dt_tensor *(*const f[DT_LESS])(
        dt_tensor *, dt_tensor *) = { dt_add, dt_sub, dt_mul, dt_div, dt_minimum, dt_maximum };
    dt_tensor *b = c->kind == DT_DIV ? above_zero(in[1]) : in[1];
    /* few elements so close to each other that a step of a finite difference exchanges them */
    if (c->kind > DT_DIV && in[0] != in[1]) b = dt_affine(b, 3, 0.1);
    return f[c->kind](in[0], b);
}

static dt_tensor *build_binary_self(dt_tensor **in, fd_case *c) {
    dt_tensor *x = above_zero(in[0]), *pair[2] = { x, x };
    if (c->dim == 0) return dt_mul(build_binary(pair, c), in[0]);
    pair[1] = dt_slice(x, 1, 2, 1); /* (3,1), a broadcast slice of the other input */
    return build_binary(pair, c);
}

/* The mask is that of a < b, or an input with zeros in every third element. */
static dt_tensor *build_where(dt_tensor **in, fd_case *c) {
    dt_tensor *a = in[0], *b = in[1];
    if (c->kind == 0) return dt_where(dt_less(a, dt_affine(b, 3, 0.1)), a, b);
    dt_tensor *mask = noise_input(a->ctx, DT_F64, c->ids_shape, 9, 1);
    for (int64_t i = 0; mask && i < dt_count(mask->shape); i += 3) put(mask->data, DT_F64, i, 0);
    if (c->kind == 1) return dt_where(mask, a, b);
    if (c->kind == 2) return dt_where(mask, a, dt_mul(a, b)); /* reads a twice */
    return dt_mul(dt_masked_fill(a, mask, -7), b);
}

static void fd_where(void) {
    static const dt_shape s[][3] = { { { 1, { 1 } }, { 1, { 1 } }, { 1, { 1 } } },
        { { 2, { 3, 17 } }, { 2, { 3, 17 } }, { 2, { 3, 17 } } },
        { { 2, { 3, 17 } }, { 1, { 17 } }, { 2, { 3, 1 } } },
        { { 0, { 0 } }, { 3, { 2, 1, 5 } }, { 3, { 2, 3, 1 } } },
        { { 3, { 2, 1, 5 } }, { 0, { 0 } }, { 2, { 3, 1 } } },
        { { 2, { 3, 521 } }, { 1, { 521 } }, { 1, { 521 } } } };
    for (int kind = 0; kind < 4; kind++)
        for (size_t i = 0; i < sizeof s / sizeof *s; i++)
            fd_check((fd_case){ .name = "where",
                .build = build_where,
                .n = 2,
                .kind = kind,
                .ids_shape = s[i][2],
                .shape = { s[i][0], kind == 2 ? s[i][0] : s[i][1] } });
}

static void fd_binary(void) {
    static const dt_shape a[] = { { 1, { 1 } }, { 2, { 3, 17 } }, { 2, { 3, 17 } }, { 1, { 17 } },
        { 3, { 3, 1, 5 } }, { 3, { 2, 3, 5 } }, { 3, { 2, 1, 5 } }, { 0, { 0 } },
        { 6, { 2, 1, 3, 1, 2, 1 } }, { 4, { 2, 3, 4, 5 } }, { 2, { 3, 521 } }, { 3, { 1, 1, 5 } } };
    static const dt_shape b[] = { { 1, { 1 } }, { 2, { 3, 17 } }, { 1, { 17 } }, { 2, { 3, 17 } },
        { 2, { 4, 1 } }, { 3, { 2, 1, 5 } }, { 3, { 2, 3, 5 } }, { 2, { 3, 5 } },
        { 4, { 1, 2, 2, 3 } }, { 4, { 2, 1, 4, 1 } }, { 2, { 3, 1 } }, { 1, { 5 } } };
    for (int op = 0; op < DT_LESS; op++) {
        for (size_t i = 0; i < sizeof a / sizeof *a; i++) {
            char name[64];
            snprintf(name, sizeof name, "binary %d of shapes %zu", op, i);
            fd_check((fd_case){
                .name = name, .build = build_binary, .n = 2, .kind = op, .shape = { a[i], b[i] } });
        }
        for (int dim = 0; dim < 2; dim++)
            fd_check((fd_case){ .name = "binary, one tensor as both inputs",
                .build = build_binary_self,
                .n = 1,
                .kind = op,
                .dim = dim,
                .shape = { DT_SHAPE(3, 17) } });
    }
}

static dt_tensor *build_over(dt_tensor **in, fd_case *c) {
    static dt_tensor *(*const f[3])(dt_tensor *, int) = { dt_sum_over, dt_mean_over, dt_max_over };
    if (c->kind < 3) return f[c->kind](in[0], c->dim);
    return dt_topk(in[0], c->dim, NULL);
}

static void fd_over(void) {
    static const dt_shape shape[] = { { 1, { 7 } }, { 2, { 3, 17 } }, { 3, { 2, 3, 5 } },
        { 2, { 3, 521 } }, { 2, { 521, 3 } }, { 0, { 0 } } };
    for (int kind = 0; kind < 3; kind++)
        for (size_t s = 0; s < sizeof shape / sizeof *shape; s++)
            for (int d = -1; d < shape[s].nd; d++) {
                int dim = d < 0 ? (int)DT_ALL : d;
                char name[64];
                snprintf(name, sizeof name, "%s over %d of shape %zu",
                    kind == 2 ? "max"
                    : kind    ? "mean"
                              : "sum",
                    dim, s);
                fd_check((fd_case){ .name = name,
                    .build = build_over,
                    .n = 1,
                    .kind = kind,
                    .dim = dim,
                    .shape = { shape[s] } });
            }
    for (int k = 1; k <= 5; k += 2)
        fd_check((fd_case){ .name = "topk",
            .build = build_over,
            .n = 1,
            .kind = 3,
            .dim = k,
            .shape = { DT_SHAPE(2, 3, 5) } });
}

/* Bits of kind: 1 keepdim; kind / 2: sum, mean, max, cumsum. p: the dimensions, a bit each. */
static dt_tensor *build_dims(dt_tensor **in, fd_case *c) {
    static dt_tensor *(*const f[3])(
        dt_tensor *, dt_reduce_desc) = { dt_sum_dims, dt_mean_dims, dt_max_dims };
    dt_reduce_desc d = { { 0 }, 0, c->kind & 1 };
    for (int i = in[0]->shape.nd - 1; i >= 0; i--)
        if ((int)c->p >> i & 1) d.dims[d.n++] = i % 2 ? i : i - in[0]->shape.nd;
    return c->kind < 6 ? f[c->kind / 2](in[0], d) : dt_cumsum(in[0], c->dim);
}

static void fd_dims(void) {
    for (int kind = 0; kind < 6; kind++)
        for (int dims = 0; dims < 16; dims++)
            fd_check((fd_case){ .name = "reduction over dimensions",
                .build = build_dims,
                .n = 1,
                .kind = kind,
                .p = dims,
                .shape = { DT_SHAPE(2, 3, 4, 5) } });
    for (int dim = -3; dim < 3; dim++)
        fd_check((fd_case){ .name = "cumsum",
            .build = build_dims,
            .n = 1,
            .kind = 6,
            .dim = dim,
            .shape = { DT_SHAPE(2, 7, dim < 0 ? 3 : 1) } });
}

/* Bits of kind: 1 a is transposed, 2 b is transposed, 4 one tensor is a and b. */
static dt_tensor *build_matmul(dt_tensor **in, fd_case *c) {
    dt_matmul_desc d = { c->kind & 1, c->kind >> 1 & 1 };
    return dt_matmul(in[0], c->kind & 4 ? in[0] : in[1], d);
}

static void fd_matmul(void) {
    for (int kind = 0; kind < 4; kind++)
        for (int shared = 0; shared < 5; shared++) { /* none, b, a, both; one product of a batch */
            dt_shape a = { 4, { 2, 3, kind & 1 ? 5 : 4, kind & 1 ? 4 : 5 } },
                     b = { 4, { 2, 3, kind & 2 ? 7 : 5, kind & 2 ? 5 : 7 } };
            if (shared == 4) a.d[0] = a.d[1] = 1;
            if (shared == 1 || shared > 2) b = DT_SHAPE(b.d[2], b.d[3]);
            if (shared == 2 || shared == 3) a = DT_SHAPE(a.d[2], a.d[3]);
            fd_check((fd_case){
                .name = "matmul", .build = build_matmul, .n = 2, .kind = kind, .shape = { a, b } });
        }
    for (int kind = 4; kind < 8; kind++)
        fd_check((fd_case){ .name = "matmul, one tensor as both operands",
            .build = build_matmul,
            .n = 1,
            .kind = kind,
            .shape = { DT_SHAPE(2, 3, 3) } });
}

/* kind 0: every order of four dimensions, number dim; 1: select; 2: broadcast_to; 3: reshape. */
static dt_tensor *build_shape(dt_tensor **in, fd_case *c) {
    static const dt_shape to[] = { { 3, { 2, 3, 4 } }, { 4, { 5, 2, 3, 4 } }, { 3, { 2, 3, 6 } },
        { 5, { 2, 1, 2, 3, 4 } } };
    int order[4], left[4] = { 0, 1, 2, 3 }, number = c->kind == 0 ? c->dim : 0;
    for (int i = 0; i < 4; i++) {
        int at = number % (4 - i);
        number /= 4 - i;
        order[i] = left[at] - (i % 2 ? 4 : 0);
        memmove(&left[at], &left[at + 1], (size_t)(3 - at) * sizeof *left);
    }
    switch (c->kind) {
    case 0: return dt_permute(in[0], order);
    case 1: return dt_select(in[0], c->dim, c->dim % 2 ? -2 : 1);
    case 2: return dt_broadcast_to(in[0], to[c->dim]);
    default: return dt_mul(in[0], dt_reshape(dt_reshape(in[0], DT_SHAPE(3, -1)), in[0]->shape));
    }
}

static void fd_shape(void) {
    for (int dim = 0; dim < 24; dim++)
        fd_check((fd_case){ .name = "permute",
            .build = build_shape,
            .n = 1,
            .dim = dim,
            .shape = { DT_SHAPE(2, 3, 4, 5) } });
    for (int dim = -3; dim < 3; dim++)
        fd_check((fd_case){ .name = "select",
            .build = build_shape,
            .n = 1,
            .kind = 1,
            .dim = dim,
            .shape = { DT_SHAPE(2, 3, 4) } });
    static const dt_shape from[] = { { 3, { 2, 3, 4 } }, { 2, { 3, 1 } }, { 3, { 1, 3, 1 } },
        { 3, { 2, 1, 4 } } };
    for (int dim = 0; dim < 4; dim++)
        fd_check((fd_case){ .name = "broadcast",
            .build = build_shape,
            .n = 1,
            .kind = 2,
            .dim = dim,
            .shape = { from[dim] } });
    fd_check((fd_case){ .name = "broadcast of a scalar",
        .build = build_shape,
        .n = 1,
        .kind = 2,
        .dim = 1,
        .shape = { DT_SCALAR } });
    fd_check((fd_case){ .name = "reshape with -1",
        .build = build_shape,
        .n = 1,
        .kind = 3,
        .shape = { DT_SHAPE(2, 3, 5) } });
}

static const dt_window_desc fd_windows[] = { { { 3, 3 }, { 0, 0 }, { 1, 1 }, { 0, 0 } },
    { { 2, 3 }, { 2, 1 }, { 1, 0 }, { 1, 2 } }, { { 1, 2 }, { 3, 0 }, { 0, 1 }, { 1, 3 } } };

/* kind: patches, conv2d, conv1d, max and avg pooling, group norm; dim: the window, or the groups */
static dt_tensor *build_conv(dt_tensor **in, fd_case *c) {
    const dt_window_desc *w = &fd_windows[c->dim];
    switch (c->kind) {
    case 0: return dt_patches(in[0], *w, 0.5);
    case 1: return dt_conv2d(in[0], in[1], in[2], *w);
    case 2: return dt_conv1d(in[0], in[1], in[2], *w);
    case 3: return dt_max_pool2d(in[0], *w);
    case 4: return dt_avg_pool2d(in[0], *w);
    default: return dt_group_norm(in[0], c->dim, in[1], in[2], 0);
    }
}

static void fd_conv(void) {
    for (int kind = 0; kind < 5; kind++)
        for (int dim = 0; dim < 3; dim++) {
            const int *k = fd_windows[dim].kernel;
            int flat = kind == 2;
            fd_check((fd_case){ .name = "a window",
                .build = build_conv,
                .n = kind == 1 ? 3 - dim % 2
                     : flat    ? 3
                               : 1,
                .kind = kind,
                .dim = dim,
                .shape = { flat ? DT_SHAPE(2, 7, 3) : DT_SHAPE(2, 5, 7, 3),
                    flat ? DT_SHAPE(4, 2, 3) : DT_SHAPE(4, k[0], k[1], 3), DT_SHAPE(4) } });
        }
    for (int groups = 1; groups <= 6; groups += groups)
        for (int nd = 2; nd < 5 && groups != 4; nd++)
            fd_check((fd_case){ .name = "group norm",
                .build = build_conv,
                .n = 3,
                .kind = 5,
                .dim = groups,
                .shape = { nd == 2   ? DT_SHAPE(3, 6)
                           : nd == 3 ? DT_SHAPE(2, 5, 6)
                                     : DT_SHAPE(2, 3, 2, 6),
                    DT_SHAPE(6), DT_SHAPE(6) } });
}

static dt_tensor *build_move(dt_tensor **in, fd_case *c) {
    dt_tensor *x = in[0], *all[4] = { in[0], in[1], in[0], in[0] };
    switch (c->kind) {
    case 0: return dt_slice(x, c->dim, 1, x->shape.d[c->dim] - 2);
    case 1: return dt_slice(x, c->dim, 0, x->shape.d[c->dim]);
    case 2: return dt_concat(all, 4, c->dim); /* in[0] three times */
    case 3: return dt_concat(all, 1, c->dim);
    case 4: return dt_transpose(x, c->dim, (c->dim + 1) % x->shape.nd);
    case 5: return dt_transpose(x, 0, 0);
    case 6:
        return dt_add(
            dt_slice(x, c->dim, 0, 2), dt_slice(x, c->dim, 1, 2)); /* overlapping slices */
    case 7: return dt_gather_rows(x, dt_input(x->ctx, DT_I32, c->ids_shape, c->ids));
    case 8: return dt_scatter_rows(x, dt_input(x->ctx, DT_I32, c->ids_shape, c->ids), 7);
    case 9:
        return dt_mul(
            dt_gather_rows(dt_scatter_rows(x, dt_input(x->ctx, DT_I32, c->ids_shape, c->ids), 7),
                dt_input(x->ctx, DT_I32, c->ids_shape, c->ids)),
            x);
    case 10: return dt_cast(dt_cast(x, DT_F64), DT_F64);
    case 11: return dt_slice(x, c->dim, 1, 0);
    default:
        return dt_dropout(
            x, c->p, 77, c->ids ? dt_input(x->ctx, DT_I32, c->ids_shape, c->ids) : NULL);
    }
}

static void fd_move(void) {
    static const int32_t rows[6] = { 3, -1, 0, 3, 1, 3 };
    for (int kind = 0; kind < 7; kind++)
        for (int dim = 0; dim < 3; dim++)
            fd_check((fd_case){ .name = kind < 2   ? "slice"
                                        : kind < 4 ? "concat"
                                        : kind < 6 ? "transpose"
                                                   : "slices",
                .build = build_move,
                .n = 1 + (kind == 2),
                .kind = kind,
                .dim = dim,
                .shape = { DT_SHAPE(3, 4, 5),
                    DT_SHAPE(dim == 0 ? 1 : 3, dim == 1 ? 7 : 4, dim == 2 ? 2 : 5) } });
    fd_check((fd_case){ .name = "gather rows",
        .build = build_move,
        .n = 1,
        .kind = 7,
        .ids = rows,
        .ids_shape = DT_SHAPE(2, 3),
        .shape = { DT_SHAPE(5, 3) } });
    fd_check((fd_case){ .name = "scatter rows",
        .build = build_move,
        .n = 1,
        .kind = 8,
        .ids = rows,
        .ids_shape = DT_SHAPE(6),
        .shape = { DT_SHAPE(2, 3, 521) } });
    fd_check((fd_case){ .name = "scatter, then gather rows",
        .build = build_move,
        .n = 1,
        .kind = 9,
        .ids = rows,
        .ids_shape = DT_SHAPE(6),
        .shape = { DT_SHAPE(6, 3) } });
    fd_check((fd_case){ .name = "cast to itself",
        .build = build_move,
        .n = 1,
        .kind = 10,
        .shape = { DT_SHAPE(3, 5) } });
    fd_check((fd_case){ .name = "an empty slice",
        .build = build_move,
        .n = 1,
        .kind = 11,
        .shape = { DT_SHAPE(3, 5) } });
    for (int i = 0; i < 3; i++) {
        static const double p[3] = { 0.1, 0.5, 0.9 };
        fd_check((fd_case){ .name = "dropout",
            .build = build_move,
            .n = 1,
            .kind = 12,
            .p = p[i],
            .shape = { DT_SHAPE(2, 3, 17) } });
        fd_check((fd_case){ .name = "dropout by token",
            .build = build_move,
            .n = 1,
            .kind = 12,
            .p = p[i],
            .ids = rows,
            .ids_shape = DT_SHAPE(2, 3),
            .shape = { DT_SHAPE(2, 3, 521) } });
    }
}

/* Bits of kind: 1 an activation, 2 a residual, 4 a second grouped op, whose backward then computes
   the gradient of the first op's activation. in: x, w, b, residual. */
static dt_tensor *build_grouped(dt_tensor **in, fd_case *c) {
    int64_t rows[4] = { c->ids[0], c->ids[1], c->ids[2], c->ids[3] };
    dt_linear_desc d = { .activation = c->kind & 1 ? DT_ACT_GELU : 0,
        .residual = c->kind & 2 ? in[3] : NULL },
                   plain = { .activation = 0 };
    dt_tensor *y = dt_grouped_linear(in[0], in[1], in[2], rows, d);
    if (c->kind & 4) y = dt_grouped_linear(y, dt_transpose(in[1], 1, 2), NULL, rows, plain);
    memset(rows, 0xff, sizeof rows); /* the ops have copied them */
    return y;
}

static void fd_grouped(void) {
    static const int32_t rows[3][4] = { { 3, 0, 1, 2 }, { 0, 0, 6, 0 }, { 1, 2, 3, 0 } };
    for (int kind = 0; kind < 8; kind++)
        for (int i = 0; i < 3; i++)
            fd_check((fd_case){ .name = "grouped linear",
                .build = build_grouped,
                .n = kind & 2 ? 4 : 3,
                .kind = kind,
                .ids = rows[i],
                .shape = { i == 1 ? DT_SHAPE(2, 3, 5) : DT_SHAPE(6, 5), DT_SHAPE(4, 3, 5),
                    DT_SHAPE(4, 3), DT_SHAPE(6, 3) } });
}

/* Kind 1: both weights and x are read twice. */
static dt_tensor *build_bag(dt_tensor **in, fd_case *c) {
    dt_tensor *rows = dt_input(in[0]->ctx, DT_I32, c->ids_shape, c->ids),
              *y = dt_embedding_bag(in[0], rows, in[1]);
    return c->kind ? dt_add(dt_embedding_bag(in[0], rows, dt_mul(in[1], in[1])), y) : y;
}

static void fd_bag(void) {
    /* a row that a bag has twice, a row of several bags, -1, and a bag of -1 alone */
    static const int32_t rows[12] = { 3, -1, 3, 0, 4, 1, -1, -1, -1, 2, 3, -1 };
    static const dt_shape shape[] = { { 2, { 4, 3 } }, { 3, { 2, 1, 6 } }, { 2, { 7, 1 } },
        { 1, { 3 } } };
    for (int kind = 0; kind < 2; kind++)
        for (size_t s = 0; s < sizeof shape / sizeof *shape; s++)
            for (int64_t C = 1; C < 600; C += 520)
                fd_check((fd_case){ .name = "embedding bag",
                    .build = build_bag,
                    .n = 2,
                    .kind = kind,
                    .ids = rows,
                    .ids_shape = shape[s],
                    .shape = { DT_SHAPE(5, C), shape[s] } });
}

static dt_tensor *build_rope(dt_tensor **in, fd_case *c) {
    dt_tensor *at = dt_input(in[0]->ctx, DT_I32, c->ids_shape, c->ids);
    return dt_rope(
        in[0], at, (dt_rope_desc){ .theta = c->weight, .rotary = c->dim, .interleaved = c->kind });
}

static void fd_rope(void) {
    static const int32_t at[6] = { 0, 5, -3, 100000, 2, 1 };
    for (int interleaved = 0; interleaved < 2; interleaved++)
        for (int rotary = 0; rotary <= 6; rotary += 2)
            fd_check((fd_case){ .name = "rope",
                .build = build_rope,
                .n = 1,
                .kind = interleaved,
                .dim = rotary,
                .ids = at,
                .weight = rotary == 4 ? 500000 : 0,
                .ids_shape = DT_SHAPE(2, 3),
                .shape = { DT_SHAPE(2, 3, 3, 6) } });
    fd_check((fd_case){ .name = "rope of 512",
        .build = build_rope,
        .n = 1,
        .ids = at,
        .ids_shape = DT_SHAPE(1, 2),
        .shape = { DT_SHAPE(1, 2, 1, 512) } });
}

/* Attention with a mask. Bits of kind: 1 positions, 2 documents, 4 some queries attend to no key,
   8 separate positions and documents of the keys, 16 one tensor is q, k and v, 32 a window, 64 a
   soft cap, 128 a scale. */
static dt_tensor *build_mask(dt_tensor **in, fd_case *c) {
    dt_ctx *ctx = in[0]->ctx;
    int64_t B = in[0]->shape.d[0], TQ = in[0]->shape.d[1];
    int64_t TK = c->kind & 16 ? TQ : in[1]->shape.d[1];
    int32_t p[512], d[512], kp[512], kd[512];
    for (int64_t i = 0; i < B * TQ; i++) {
        int64_t t = i % TQ;
        p[i] = (int32_t)(t % 2 ? TQ - 1 - t / 2 : t / 2); /* zig-zag: 0, T-1, 1, T-2, ... */
        d[i] = (int32_t)(t * 3 / TQ) + (int32_t)(i / TQ);
        /* a document of its own, in which no other token is */
        if (c->kind & 4 && t % 5 == 2) d[i] = 99;
        if (c->kind & 4 && t % 5 == 3) p[i] = -7; /* a position before every key */
    }
    for (int64_t i = 0; i < B * TK; i++) {
        kp[i] = (int32_t)((i % TK * 7 + 3) % TK);
        kd[i] = (int32_t)(i % TK * 3 / TK) + (int32_t)(i / TK);
    }
    dt_shape q = DT_SHAPE(B, TQ), k = DT_SHAPE(B, TK);
    dt_attn_desc a = { .full = c->full,
        .window = c->kind & 32 && !c->full ? 3 : 0,
        .soft_cap = c->kind & 64 ? 0.7 : 0,
        .scale = c->kind & 128 ? 0.9 : 0 };
    if (c->kind & 1) a.positions = dt_input(ctx, DT_I32, q, p);
    if (c->kind & 2) a.documents = dt_input(ctx, DT_I32, q, d);
    if (c->kind & 1 && c->kind & 8) a.key_positions = dt_input(ctx, DT_I32, k, kp);
    if (c->kind & 2 && c->kind & 8) a.key_documents = dt_input(ctx, DT_I32, k, kd);
    return c->kind & 16 ? dt_attention(in[0], in[0], in[0], a)
                        : dt_attention(in[0], in[1], in[2], a);
}

static void fd_attention_mask(void) {
    static const int64_t size[][6] = { { 2, 7, 7, 4, 2, 3 }, { 1, 37, 37, 2, 1, 5 },
        { 2, 5, 41, 3, 3, 2 }, { 1, 35, 9, 2, 1, 3 } };
    for (int s = 0; s < 4; s++)
        for (int i = 0; i < 16 + 8; i++)
            for (int full = 0; full < 2; full++) {
                static const int more[] = { 32, 64, 96, 33, 46, 107, 128, 235 };
                const int64_t *z = size[s];
                int kind = i < 16 ? i : more[i - 16];
                if ((z[1] != z[2] && !(kind & 8)) || (kind & 12 && !(kind & 3))) continue;
                char name[80];
                snprintf(
                    name, sizeof name, "attention with mask %d, full %d, size %d", kind, full, s);
                fd_check((fd_case){ .name = name,
                    .build = build_mask,
                    .n = 3,
                    .full = full,
                    .kind = kind,
                    .shape = { DT_SHAPE(z[0], z[1], z[3], z[5]), DT_SHAPE(z[0], z[2], z[4], z[5]),
                        DT_SHAPE(z[0], z[2], z[4], z[5]) } });
            }
    fd_check((fd_case){ .name = "self-attention of one tensor, zig-zag",
        .build = build_mask,
        .n = 1,
        .kind = 19,
        .shape = { DT_SHAPE(2, 19, 3, 3) } });
}

/* Bits of kind: 1 padded vocabulary, 2 label smoothing, 4 z-loss, 8 fused with the linear layer in
   chunks of rows, 16 x is w. weight: of the z-loss. */
static dt_tensor *build_loss_at(dt_tensor **in, fd_case *c) {
    dt_ctx *ctx = in[0]->ctx;
    dt_tensor *labels = dt_input(ctx, DT_I32, c->ids_shape, c->ids),
              *w = c->kind & 16 ? in[0] : in[1];
    int64_t columns = c->kind & 8 ? w->shape.d[0] : in[0]->shape.d[in[0]->shape.nd - 1];
    dt_loss_desc d = { .vocab = c->kind & 1 ? columns - 2 : 0, .smoothing = c->kind & 2 ? 0.1 : 0 };
    if (c->kind & 4) {
        d.z_weight = 0.01;
        d.z_loss = &c->side;
        c->weight = 0.01 * noise(99, 0); /* the z-loss is scaled like the loss */
    }
    return c->kind & 8 ? dt_linear_cross_entropy(in[0], w, labels, 5, d)
                       : dt_cross_entropy_at(in[0], labels, 5, d);
}

static int64_t chunk_of(int64_t vocab) {
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .kernels = dt_kernels_cpu() });
    int64_t rows = dt__loss_chunk_rows(ctx, vocab);
    dt_ctx_free(ctx);
    return rows;
}

static void fd_losses(void) {
    enum { MANY = 9001 };
    int32_t *labels = (int32_t *)room(MANY * sizeof *labels);
    for (int kind = 0; kind < 16; kind++)
        for (int r = 0; r < 4; r++) {
            for (int i = 0; i < 127; i++)
                labels[i] = i % 4 == 1 ? -1 - i : below(78, (uint64_t)i, 15);
            int64_t rows = odd[r];
            fd_check((fd_case){ .name = kind & 8 ? "linear cross entropy" : "cross entropy at",
                .build = build_loss_at,
                .n = kind & 8 ? 2 : 1,
                .kind = kind,
                .ids = labels,
                .ids_shape = DT_SHAPE(rows),
                .shape = { DT_SHAPE(rows, kind & 8 ? 5 : 17), DT_SHAPE(17, 5) } });
        }
    fd_check((fd_case){ .name = "cross entropy of more columns than a tile",
        .build = build_loss_at,
        .n = 1,
        .kind = 7,
        .ids = labels,
        .ids_shape = DT_SHAPE(3),
        .shape = { DT_SHAPE(3, 1031) } });
    fd_check((fd_case){ .name = "linear cross entropy, one tensor as x and w",
        .build = build_loss_at,
        .n = 1,
        .kind = 31,
        .ids = labels,
        .ids_shape = DT_SHAPE(17),
        .shape = { DT_SHAPE(17, 3) } });
    for (int i = 0; i < MANY; i++) labels[i] = i % 7 == 3 ? -1 : below(79, (uint64_t)i, 3);
    CHECK(2 * chunk_of(5) < MANY); /* three chunks of rows */
    fd_check((fd_case){ .name = "linear cross entropy by chunks",
        .build = build_loss_at,
        .n = 2,
        .kind = 15,
        .ids = labels,
        .ids_shape = DT_SHAPE(MANY),
        .shape = { DT_SHAPE(MANY, 2), DT_SHAPE(5, 2) } });
    free(labels);
}

static void test_finite_differences(void) {
    fd_linear();
    fd_embedding();
    fd_layernorm();
    fd_attention();
    fd_add();
    fd_cross_entropy();
    fd_others();
    printf("basic ops: largest error of a slope %.2g\n", fd_worst);
#define CLASS(f) fd_worst = 0, f(), printf("%s: largest error of a slope %.2g\n", #f, fd_worst)
    CLASS(fd_linear_at);
    CLASS(fd_unary);
    CLASS(fd_binary);
    CLASS(fd_where);
    CLASS(fd_over);
    CLASS(fd_dims);
    CLASS(fd_matmul);
    CLASS(fd_shape);
    CLASS(fd_conv);
    CLASS(fd_move);
    CLASS(fd_grouped);
    CLASS(fd_bag);
    CLASS(fd_rope);
    CLASS(fd_attention_mask);
    CLASS(fd_losses);
#undef CLASS
}

// ==== 3. PyTorch's results for single ops =======================================================

/* One case of an op: its number n in the golden file, its context, its inputs, and its second
   output if it has one. */
enum { GOLDEN_INPUTS = 7 };
typedef struct golden_run {
    const golden *g;
    const char *op;
    int n;
    dt_ctx *ctx;
    dt_tensor *in[GOLDEN_INPUTS], *extra;
} golden_run;

typedef struct golden_op {
    /* names of the inputs; gradients, "d" + name, are compared unless the input is integers */
    const char *op, *in[GOLDEN_INPUTS], *extra;
    dt_tensor *(*run)(golden_run *r);
} golden_op;

static const golden_array *golden_of(const golden *g, const char *op, int n, const char *array) {
    char name[96];
    snprintf(name, sizeof name, "%s.%d.%s", op, n, array);
    return golden_find(g, name);
}

/* A scalar argument of an op; 0 if the case has none of that name. */
static double scalar(const golden_run *r, const char *array) {
    const golden_array *a = golden_of(r->g, r->op, r->n, array);
    return a ? a->data[0] : 0;
}

static int is_integer(const char *name) {
    static const char *const integers[] = { "ids", "labels", "rows", "positions", "key_positions",
        "documents", "key_documents", "index", "mask" };
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++)
        if (!strcmp(name, integers[i])) return 1;
    return 0;
}

#define GOLDEN(name, call) \
    static dt_tensor *golden_##name(golden_run *r) { \
        dt_tensor **in = r->in; \
        return call; \
    }
GOLDEN(linear, dt_linear(in[0], in[1], in[2]))
GOLDEN(linear_at,
    dt_linear_at(in[0], in[1], in[2],
        (dt_linear_desc){ .activation = (int)scalar(r, "activation"), .residual = in[3] }))
GOLDEN(layernorm, dt_layernorm(in[0], in[1], in[2], scalar(r, "eps")))
GOLDEN(rmsnorm, dt_rmsnorm(in[0], in[1], scalar(r, "eps")))
GOLDEN(gelu, dt_gelu(in[0]))
GOLDEN(gelu_erf, dt_gelu_erf(in[0]))
GOLDEN(silu, dt_silu(in[0]))
GOLDEN(relu, dt_relu(in[0]))
GOLDEN(tanh, dt_tanh(in[0]))
GOLDEN(exp, dt_exp(in[0]))
GOLDEN(ln, dt_ln(in[0]))
GOLDEN(sigmoid, dt_sigmoid(in[0]))
GOLDEN(softplus, dt_softplus(in[0]))
GOLDEN(sqrt, dt_sqrt(in[0]))
GOLDEN(abs, dt_abs(in[0]))
GOLDEN(pow, dt_pow(in[0], scalar(r, "scale")))
GOLDEN(clamp, dt_clamp(in[0], scalar(r, "scale"), scalar(r, "shift")))
GOLDEN(softmax, dt_softmax(in[0]))
GOLDEN(affine, dt_affine(in[0], scalar(r, "scale"), scalar(r, "shift")))
GOLDEN(swiglu, dt_swiglu(in[0]))
GOLDEN(embedding, dt_embedding(in[0], in[1]))
GOLDEN(add, dt_add(in[0], in[1]))
GOLDEN(sub, dt_sub(in[0], in[1]))
GOLDEN(mul, dt_mul(in[0], in[1]))
GOLDEN(div, dt_div(in[0], in[1]))
GOLDEN(minimum, dt_minimum(in[0], in[1]))
GOLDEN(maximum, dt_maximum(in[0], in[1]))
GOLDEN(where, dt_where(dt_cast(in[0], in[1]->dtype), in[1], in[2]))
GOLDEN(masked_fill, dt_masked_fill(in[0], dt_cast(in[1], in[0]->dtype), scalar(r, "value")))
static dt_reduce_desc golden_dims(golden_run *r) {
    const golden_array *a = golden_of(r->g, r->op, r->n, "dims");
    dt_reduce_desc d = { { 0 }, a ? (int)a->count : 0, (int)scalar(r, "keepdim") };
    for (int i = 0; i < d.n; i++) d.dims[i] = (int)a->data[i];
    return d;
}
GOLDEN(sum_dims, dt_sum_dims(in[0], golden_dims(r)))
GOLDEN(mean_dims, dt_mean_dims(in[0], golden_dims(r)))
GOLDEN(max_dims, dt_max_dims(in[0], golden_dims(r)))
GOLDEN(cumsum, dt_cumsum(in[0], (int)scalar(r, "dim")))
GOLDEN(permute, dt_permute(in[0], golden_dims(r).dims))
GOLDEN(select, dt_select(in[0], (int)scalar(r, "dim"), (int64_t)scalar(r, "index_at")))
static dt_shape golden_shape(golden_run *r) {
    const golden_array *a = golden_of(r->g, r->op, r->n, "shape");
    dt_shape s = { a ? (int)a->count : 0, { 0 } };
    for (int i = 0; i < s.nd; i++) s.d[i] = (int64_t)a->data[i];
    return s;
}
GOLDEN(broadcast, dt_broadcast_to(in[0], golden_shape(r)))
GOLDEN(reshape, dt_mul(dt_reshape(in[0], golden_shape(r)), dt_reshape(in[0], golden_shape(r))))
static dt_window_desc golden_window(golden_run *r) {
    const golden_array *a = golden_of(r->g, r->op, r->n, "window");
    dt_window_desc d = { { 0 }, { 0 }, { 0 }, { 0 } };
    int *all[4] = { d.kernel, d.stride, d.padding, d.dilation };
    for (int i = 0; a && i < 8 && i < a->count; i++) all[i / 2][i % 2] = (int)a->data[i];
    return d;
}
GOLDEN(patches, dt_patches(in[0], golden_window(r), 0))
GOLDEN(conv2d, dt_conv2d(in[0], in[1], in[2], golden_window(r)))
GOLDEN(conv1d, dt_conv1d(in[0], in[1], in[2], golden_window(r)))
GOLDEN(max_pool, dt_max_pool2d(in[0], golden_window(r)))
GOLDEN(avg_pool, dt_avg_pool2d(in[0], golden_window(r)))
GOLDEN(group_norm, dt_group_norm(in[0], (int)scalar(r, "groups"), in[1], in[2], scalar(r, "eps")))
GOLDEN(matmul, dt_matmul(in[0], in[1],
                   (dt_matmul_desc){ (int)scalar(r, "trans_a"), (int)scalar(r, "trans_b") }))
#define DIM (scalar(r, "dim") < 0 ? DT_ALL : (int)scalar(r, "dim"))
GOLDEN(sum, dt_sum_over(in[0], DIM))
GOLDEN(mean, dt_mean_over(in[0], DIM))
GOLDEN(max, dt_max_over(in[0], DIM))
#undef DIM
GOLDEN(topk, dt_topk(in[0], (int)scalar(r, "k"), &r->extra))
GOLDEN(slice, dt_slice(in[0], (int)scalar(r, "dim"), (int64_t)scalar(r, "first"),
                  (int64_t)scalar(r, "count")))
GOLDEN(concat, dt_concat(in, 2, (int)scalar(r, "dim")))
GOLDEN(transpose, dt_transpose(in[0], (int)scalar(r, "dim_a"), (int)scalar(r, "dim_b")))
GOLDEN(gather_rows, dt_gather_rows(in[0], in[1]))
GOLDEN(scatter_rows, dt_scatter_rows(in[0], in[1], (int64_t)scalar(r, "count")))
GOLDEN(rope, dt_rope(in[0], in[1],
                 (dt_rope_desc){ .theta = scalar(r, "theta"),
                     .rotary = (int)scalar(r, "rotary"),
                     .interleaved = (int)scalar(r, "interleaved") }))
GOLDEN(attention, dt_attention(in[0], in[1], in[2],
                      (dt_attn_desc){ .full = scalar(r, "full") != 0,
                          .positions = in[3],
                          .key_positions = in[4],
                          .documents = in[5],
                          .key_documents = in[6],
                          .lse = &r->extra }))
GOLDEN(cross_entropy, dt_cross_entropy(in[0], in[1], scalar(r, "denom")))
GOLDEN(mse, dt_mse(in[0], in[1], scalar(r, "denom")))
GOLDEN(bce, dt_bce_with_logits(in[0], in[1], scalar(r, "denom")))
static dt_loss_desc golden_loss(golden_run *r) {
    return (dt_loss_desc){ .vocab = (int64_t)scalar(r, "vocab"),
        .smoothing = scalar(r, "smoothing"),
        .z_weight = scalar(r, "z_weight"),
        .z_loss = &r->extra };
}
GOLDEN(smoothed, dt_cross_entropy_at(in[0], in[1], scalar(r, "denom"), golden_loss(r)))
GOLDEN(
    linear_loss, dt_linear_cross_entropy(in[0], in[1], in[2], scalar(r, "denom"), golden_loss(r)))
#undef GOLDEN
#undef GOLDEN_LOSS

#define ONE(op) \
    { #op, { "x" }, NULL, golden_##op }
static const golden_op golden_ops[] = {
    { "linear", { "x", "w", "b" }, NULL, golden_linear },
    { "linear_at", { "x", "w", "b", "residual" }, NULL, golden_linear_at },
    { "layernorm", { "x", "gain", "bias" }, NULL, golden_layernorm },
    { "rmsnorm", { "x", "gain" }, NULL, golden_rmsnorm },
    ONE(gelu),
    ONE(gelu_erf),
    ONE(silu),
    ONE(relu),
    ONE(tanh),
    ONE(exp),
    ONE(ln),
    ONE(sigmoid),
    ONE(softplus),
    ONE(sqrt),
    ONE(abs),
    ONE(pow),
    ONE(clamp),
    ONE(softmax),
    ONE(affine),
    ONE(swiglu),
    { "embedding", { "table", "ids" }, NULL, golden_embedding },
    { "add", { "a", "b" }, NULL, golden_add },
    { "sub", { "a", "b" }, NULL, golden_sub },
    { "mul", { "a", "b" }, NULL, golden_mul },
    { "div", { "a", "b" }, NULL, golden_div },
    { "minimum", { "a", "b" }, NULL, golden_minimum },
    { "maximum", { "a", "b" }, NULL, golden_maximum },
    { "where", { "mask", "a", "b" }, NULL, golden_where },
    { "masked_fill", { "x", "mask" }, NULL, golden_masked_fill },
    ONE(sum),
    ONE(mean),
    ONE(max),
    { "topk", { "x" }, "index", golden_topk },
    ONE(slice),
    ONE(transpose),
    { "concat", { "a", "b" }, NULL, golden_concat },
    { "gather_rows", { "x", "rows" }, NULL, golden_gather_rows },
    { "scatter_rows", { "x", "rows" }, NULL, golden_scatter_rows },
    { "rope", { "x", "positions" }, NULL, golden_rope },
    { "attention", { "q", "k", "v" }, "lse", golden_attention },
    { "sight", { "q", "k", "v", "positions", "key_positions", "documents", "key_documents" }, "lse",
        golden_attention },
    { "cross_entropy", { "logits", "labels" }, NULL, golden_cross_entropy },
    { "smoothed", { "logits", "labels" }, "z", golden_smoothed },
    { "linear_loss", { "x", "w", "labels" }, "z", golden_linear_loss },
    { "mse", { "a", "b" }, NULL, golden_mse },
    { "bce", { "logits", "targets" }, NULL, golden_bce },
}, golden_shape_ops[] = {
    ONE(sum_dims),
    ONE(mean_dims),
    ONE(max_dims),
    ONE(cumsum),
    ONE(permute),
    ONE(select),
    ONE(broadcast),
    ONE(reshape),
    ONE(patches),
    ONE(max_pool),
    ONE(avg_pool),
    { "conv2d", { "x", "w", "b" }, NULL, golden_conv2d },
    { "conv1d", { "x", "w", "b" }, NULL, golden_conv1d },
    { "group_norm", { "x", "gain", "bias" }, NULL, golden_group_norm },
    { "matmul", { "a", "b" }, NULL, golden_matmul },
};
#undef ONE

/* Results of a case: the output, the second output, the gradient of each input. x NULL: none. */
enum { V_OUT, V_EXTRA, V_GRADS, V_COUNT = V_GRADS + GOLDEN_INPUTS };
typedef struct values {
    int64_t n;
    double *x;
} values;

static values values_of(const void *array, dt_dtype dtype, int64_t n) {
    values v = { n, array ? (double *)room((size_t)n * 8) : NULL };
    for (int64_t i = 0; v.x && i < n; i++) v.x[i] = get(array, dtype, i);
    return v;
}

static values golden_values(const golden_run *r, const char *array) {
    const golden_array *a = golden_of(r->g, r->op, r->n, array);
    return values_of(a ? a->data : NULL, DT_F64, a ? a->count : 0);
}

/* An array of the file, rounded to type `round` and stored as `dtype`. */
static void *rounded(const golden_array *a, dt_dtype round, dt_dtype dtype) {
    void *x = room((size_t)a->count * 8), *one = room(8);
    for (int64_t i = 0; i < a->count; i++) {
        put(one, round, 0, a->data[i]);
        put(x, dtype, i, get(one, round, 0));
    }
    free(one);
    return x;
}

/* Makes the case's inputs, rounded to `round`, as tensors or parameters of type `dtype`. */
static void golden_make(
    golden_run *r, const golden_op *op, dt_dtype dtype, dt_dtype round, int as_params) {
    const golden_array *a[GOLDEN_INPUTS] = { NULL };
    dt_shape shape[GOLDEN_INPUTS];
    for (int i = 0; i < GOLDEN_INPUTS; i++) {
        r->in[i] = NULL;
        a[i] = op->in[i] ? golden_of(r->g, r->op, r->n, op->in[i]) : NULL;
        if (!a[i]) continue;
        shape[i] = (dt_shape){ a[i]->nd, { 0 } };
        for (int d = 0; d < a[i]->nd; d++) shape[i].d[d] = a[i]->shape[d];
        if (as_params && !is_integer(op->in[i]))
            r->in[i] = dt_param_at(
                r->ctx, op->in[i], shape[i], DT_ZEROS, (dt_param_desc){ .dtype = dtype });
    }
    for (int i = 0; i < GOLDEN_INPUTS; i++) {
        if (!a[i]) continue;
        int zero_ids = is_integer(op->in[i]);
        void *x = rounded(a[i], zero_ids ? DT_I32 : round, zero_ids ? DT_I32 : dtype);
        if (r->in[i])
            dt_write(r->in[i], x);
        else
            r->in[i] = dt_input(r->ctx, zero_ids ? DT_I32 : dtype, shape[i], x);
        if (!zero_ids) dt_require_grad(r->in[i]);
        free(x);
    }
}

/* Forward and backward. The output's gradient comes from the file and is rounded to `round` too. */
static void golden_execute(const golden *g, const golden_op *op, int n, dt_dtype dtype,
    dt_dtype round, int as_params, values v[V_COUNT]) {
    meter m = METER;
    golden_run r = { .g = g, .op = op->op, .n = n, .ctx = open_ctx(&m) };
    const golden_array *dy = golden_of(g, op->op, n, "dy");
    char what[80];
    void *up = dy ? rounded(dy, round, DT_F64) : NULL;
    memset(v, 0, V_COUNT * sizeof *v);
    snprintf(what, sizeof what, "golden %s %d %s", op->op, n, dt_dtype_name(dtype));
    golden_make(&r, op, dtype, round, as_params);
    dt_tensor *out = op->run(&r);
    if (CHECK_MSG(out, "%s: %s", what, dt_error_text(r.ctx))) {
        v[V_OUT] = values_of(out->data, out->dtype, dt_count(out->shape));
        if (r.extra)
            v[V_EXTRA] = values_of(r.extra->data, r.extra->dtype, dt_count(r.extra->shape));
        dt_backward(dy ? weigh(out, (double *)up) : out);
        for (int i = 0; i < GOLDEN_INPUTS; i++)
            if (r.in[i] && r.in[i]->grad)
                v[V_GRADS + i] =
                    values_of(r.in[i]->grad, dt_grad_dtype(r.in[i]), dt_count(r.in[i]->shape));
    }
    free(up);
    close_good(r.ctx, &m, what);
}

static double golden_worst[2][5]; /* largest error: of outputs, of gradients; by type */

static void values_compare(const char *what, values ours, values theirs, dt_dtype dtype,
    double tolerance, double rms, double *worst) {
    int64_t at = 0;
    double most = -1;
    if (!CHECK_MSG(ours.x && theirs.x && ours.n == theirs.n,
            "%s: a result is missing, or its size is wrong", what))
        return;
    for (int64_t i = 0; i < ours.n; i++) {
        double x = ours.x[i], y = theirs.x[i] <= -1e300 ? -INFINITY : theirs.x[i];
        /* also 0 for two equal infinities */
        double error = x == y ? 0 : fabs(x - y) / (fmax(fabs(y), rms) + 1e-30);
        if (!(error <= most)) most = error, at = i;
    }
    CHECK_MSG(most <= tolerance, "%s %s: element %lld is %.17g, not %.17g (error %.2g)", what,
        dt_dtype_name(dtype), (long long)at, ours.n ? ours.x[at] : 0, theirs.n ? theirs.x[at] : 0,
        most);
    *worst = fmax(*worst, most);
}

/* Root mean square of the finite elements of n arrays. */
static double values_rms(const values *v, int n) {
    double sum = 0, count = 0;
    for (int k = 0; k < n; k++)
        for (int64_t i = 0; v[k].x && i < v[k].n; i++)
            if (isfinite(v[k].x[i]) && v[k].x[i] > -1e300) sum += v[k].x[i] * v[k].x[i], count++;
    return count ? sqrt(sum / count) : 0;
}

static void values_free(values v[V_COUNT]) {
    for (int i = 0; i < V_COUNT; i++) free(v[i].x);
}

/* A few roundings of the 16-bit types; for f32 and f64 the tolerances of all tests. */
static double golden_tolerance(dt_dtype dtype) {
    return dtype == DT_F64    ? 1e-12
           : dtype == DT_F32  ? 1e-5
           : dtype == DT_BF16 ? 1.0 / 128
                              : 1.5 / 1024;
}

/* Compares f64 and f32 with the file, and 16-bit types with f64 on the same rounded inputs. */
static void golden_case(
    const golden *g, const golden_op *op, int n, dt_dtype dtype, int as_params) {
    values ours[V_COUNT], theirs[V_COUNT] = { { 0, NULL } };
    golden_run r = { .g = g, .op = op->op, .n = n };
    char what[64], name[64];
    int narrow = dtype == DT_BF16 || dtype == DT_F16;
    double tolerance = golden_tolerance(dtype), largest = 0;
    snprintf(what, sizeof what, "golden %s %d%s", op->op, n, as_params ? " of parameters" : "");
    golden_execute(g, op, n, dtype, narrow ? dtype : DT_F64, as_params, ours);
    if (narrow) golden_execute(g, op, n, DT_F64, dtype, 0, theirs);
    for (int i = 0; i < GOLDEN_INPUTS; i++) {
        const golden_array *a =
            op->in[i] && !is_integer(op->in[i]) ? golden_of(g, op->op, n, op->in[i]) : NULL;
        for (int64_t j = 0; a && j < a->count; j++) largest = fmax(largest, fabs(a->data[j]));
        snprintf(name, sizeof name, "d%s", op->in[i] ? op->in[i] : "");
        if (!narrow && a) theirs[V_GRADS + i] = golden_values(&r, name);
    }
    if (!narrow) {
        theirs[V_OUT] = golden_values(&r, golden_of(g, op->op, n, "y") ? "y" : "loss");
        if (op->extra) theirs[V_EXTRA] = golden_values(&r, op->extra);
    }
    /* f32 loses digits in differences of large values (a mean of 1000, scores near 1000), so inputs
       beyond 4 get a larger tolerance */
    if (dtype != DT_F64 && largest > 4 && strcmp(op->op, "gelu") != 0) tolerance *= largest / 4;
    /* the backward of attention reads the stored output, which is rounded */
    if (narrow && (!strcmp(op->op, "attention") || !strcmp(op->op, "sight"))) tolerance *= 2;
    values_compare(what, ours[V_OUT], theirs[V_OUT], dtype, tolerance,
        values_rms(&theirs[V_OUT], 1), &golden_worst[0][dtype]);
    if (op->extra)
        values_compare(what, ours[V_EXTRA], theirs[V_EXTRA], dtype, tolerance,
            values_rms(&theirs[V_EXTRA], 1), &golden_worst[0][dtype]);
    double rms = values_rms(theirs + V_GRADS, GOLDEN_INPUTS);
    /* the gradient of a saturated softmax is a small difference of values of the output's size */
    if (!strcmp(op->op, "softmax")) rms = fmax(rms, values_rms(&theirs[V_OUT], 1) / 2);
    for (int i = 0; i < GOLDEN_INPUTS; i++)
        if (theirs[V_GRADS + i].x || ours[V_GRADS + i].x)
            values_compare(what, ours[V_GRADS + i], theirs[V_GRADS + i], dtype, tolerance, rms,
                &golden_worst[1][dtype]);
    values_free(ours);
    values_free(theirs);
}

static const dt_dtype golden_types[4] = { DT_F64, DT_F32, DT_BF16, DT_F16 };

/* Compares the ops of one golden file. */
static void golden_file(const char *file, const golden_op *ops, size_t count) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", golden_folder, file);
    golden *g = golden_open(path);
    if (!CHECK_MSG(g, "%s: %s", path, strerror(errno))) return;
    for (size_t i = 0; i < count; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.cases", ops[i].op);
        const double *cases = golden_get(g, name, NULL);
        if (!CHECK_MSG(cases && *cases >= 3, "no golden cases of %s", ops[i].op)) continue;
        for (int n = 0; n < (int)*cases; n++)
            for (int t = 0; t < 4; t++)
                for (int as_params = 0; as_params < 2; as_params++)
                    golden_case(g, &ops[i], n, golden_types[t], as_params);
    }
    golden_free(g);
}

static void test_golden_ops(void) {
    const dt_dtype *types = golden_types;
    golden_file("ops.bin", golden_ops, sizeof golden_ops / sizeof *golden_ops);
    golden_file(
        "ops_shapes.bin", golden_shape_ops, sizeof golden_shape_ops / sizeof *golden_shape_ops);
    for (int t = 0; t < 4; t++)
        printf("PyTorch's results, %s: largest error of an output %.2g, of a gradient %.2g\n",
            dt_dtype_name(types[t]), golden_worst[0][types[t]], golden_worst[1][types[t]]);
}

// ==== 4. 16-bit types in autograd ===============================================================

/* A small model in one type. bf16 and f16 parameters have f32 gradients. */
typedef struct narrow_model {
    dt_tensor *w, *table, *gain, *own, *plain;
} narrow_model;

static narrow_model narrow_make(dt_ctx *ctx, dt_dtype dtype) {
    narrow_model m;
    dt_param_desc d = { .dtype = dtype };
    m.w = dt_param_at(ctx, "w", DT_SHAPE(7, 5), DT_NORMAL(1), d);
    m.table = dt_param_at(ctx, "table", DT_SHAPE(11, 5), DT_NORMAL(1), d);
    m.gain = dt_param_at(ctx, "gain", DT_SHAPE(5), DT_ONES, d);
    m.own = dt_param_at(ctx, "own", DT_SHAPE(3, 7), DT_NORMAL(1), d);
    m.plain =
        dt_param_at(ctx, "plain", DT_SHAPE(3), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F32 });
    return m;
}

/* x + p as a user-defined op, which writes its gradients in the type of its inputs. */
static dt_status plus_back(dt_node *n) {
    dt_tensor *out = n->out;
    for (int i = 0; i < 2; i++) {
        if (!dt_wants(n, i)) continue;
        void *d = dt_grad(n, i);
        if (!d) return dt_error(out->ctx);
        for (int64_t k = 0; k < dt_count(out->shape); k++)
            put(d, out->dtype, k, get(d, out->dtype, k) + get(out->grad, out->dtype, k));
    }
    return DT_OK;
}

static dt_tensor *plus(dt_tensor *x, dt_tensor *p) {
    dt_tensor *out = x && p ? dt_new(x->ctx, x->dtype, x->shape) : NULL;
    for (int64_t k = 0; out && k < dt_count(x->shape); k++)
        put(out->data, x->dtype, k, get(x->data, x->dtype, k) + get(p->data, p->dtype, k));
    return dt_record(
        out, (dt_record_desc){ .name = "plus", .in = { x, p }, .backward = plus_back });
}

static dt_tensor *narrow_loss(dt_ctx *ctx, narrow_model *m, int micro) {
    int32_t ids[3] = { micro, 4, micro + 2 }, labels[3] = { 2, -1, micro };
    dt_tensor *id = dt_input(ctx, DT_I32, DT_SHAPE(3), ids),
              *label = dt_input(ctx, DT_I32, DT_SHAPE(3), labels);
    dt_tensor *x = dt_rmsnorm(dt_embedding(m->table, id), m->gain, 0);
    dt_tensor *y = dt_linear_at(
        x, m->w, NULL, (dt_linear_desc){ .activation = DT_ACT_SILU, .residual = m->own });
    y = plus(plus(y, m->own), m->own);
    dt_tensor *side = weigh(dt_cast(dt_slice(m->own, 1, 2, 3), DT_F32), NULL);
    return dt_cross_entropy(dt_loss(y, dt_loss(side, weigh(m->plain, NULL), 1), 0.5), label, 2);
}

/* The gradients of all parameters, accumulated over micro-batches first .. end - 1. */
static void narrow_grads(
    dt_dtype dtype, const double *const values[5], int first, int end, int halves, double *out) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    narrow_model model = narrow_make(ctx, dtype);
    for (int i = 0; values && i < 5; i++) { /* the same values in another type */
        dt_tensor *t = dt_param_get(ctx, i);
        void *x = room((size_t)dt_count(t->shape) * 8);
        for (int64_t k = 0; k < dt_count(t->shape); k++) put(x, t->dtype, k, values[i][k]);
        dt_write(t, x);
        free(x);
    }
    for (int micro = first; micro < end; micro++) {
        dt_tensor *loss = narrow_loss(ctx, &model, micro);
        if (halves)
            dt_backward_input(loss), dt_backward_weight(loss);
        else
            dt_backward(loss);
        CHECK(isfinite(dt_item(loss)));
        dt_reset(ctx);
    }
    for (int i = 0; i < 5; i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        dt_dtype type = dt_grad_dtype(t);
        CHECK(type == (dtype == DT_F64 && i < 4 ? DT_F64 : DT_F32) &&
              t->param->bucket->grad_dtype == type);
        for (int64_t k = 0; k < dt_count(t->shape) && t->grad; k++) *out++ = get(t->grad, type, k);
    }
    close_good(ctx, &m, "16-bit parameters");
}

/* Accumulated gradients are the f32 sums of the gradients of single micro-batches, to the bit, and
   near those in f64. */
static void narrow_accumulation(dt_dtype dtype) {
    enum { MICROS = 3, N = 35 + 55 + 5 + 21 + 3 };
    double alone[MICROS][N], together[N], halves[N], exact[N];
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    narrow_make(ctx, dtype);
    double *values[5];
    for (int i = 0; i < 5; i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        void *raw = room((size_t)dt_count(t->shape) * 8);
        dt_read(t, raw);
        values[i] = values_of(raw, t->dtype, dt_count(t->shape)).x;
        free(raw);
    }
    CHECK(dt_memory_used(ctx).live[DT_MEM_PARAMS] == (35 + 55 + 5 + 21) * 2 + 3 * 4 &&
          dt_bucket_count(ctx) == 2);
    close_good(ctx, &m, "16-bit values");
    for (int i = 0; i < MICROS; i++) narrow_grads(dtype, NULL, i, i + 1, 0, alone[i]);
    narrow_grads(dtype, NULL, 0, MICROS, 0, together);
    narrow_grads(dtype, NULL, 0, MICROS, 1, halves);
    narrow_grads(DT_F64, (const double *const *)values, 0, MICROS, 0, exact);
    int wrong = 0, fine = 0;
    double difference = 0, size = 0;
    for (int i = 0; i < N; i++) {
        float sum = (float)alone[0][i];
        for (int k = 1; k < MICROS; k++) sum += (float)alone[k][i];
        wrong += (double)sum != together[i] || together[i] != halves[i];
        void *one = &sum;
        /* the f32 sum is not a value of the 16-bit type */
        fine += get(one, DT_F32, 0) != from16(dtype, to16(dtype, (double)sum));
        difference += (together[i] - exact[i]) * (together[i] - exact[i]);
        size += exact[i] * exact[i];
    }
    CHECK_MSG(wrong == 0, "%s: %d accumulated gradients differ from the sum over micro-batches",
        dt_dtype_name(dtype), wrong);
    CHECK_MSG(fine > N / 2, "%s: only %d of %d gradients have more digits than the type",
        dt_dtype_name(dtype), fine, N);
    double error = sqrt(difference / size);
    printf("a model of %s parameters: error of all gradients %.2g\n", dt_dtype_name(dtype), error);
    CHECK_MSG(error < golden_tolerance(dtype), "%s: error of the gradients %.2g",
        dt_dtype_name(dtype), error);
    for (int i = 0; i < 5; i++) free(values[i]);
}

/* A user-defined op gets a zeroed gradient buffer in the parameter's type, separate from the f32
   gradient that other ops have accumulated. */
static void *seen_grad[2];
static dt_status user_op_back(dt_node *n) {
    seen_grad[0] = dt_grad(n, 0);
    seen_grad[1] = n->in[0]->grad;
    for (int i = 0; i < 3; i++) {
        CHECK(get(seen_grad[0], DT_BF16, i) == 0);
        put(seen_grad[0], DT_BF16, i, 1.0 / 128);
    }
    int accumulate = 0;
    CHECK(dt_grad_raw(n, 0, &accumulate) == seen_grad[0] && accumulate == 1);
    return DT_OK;
}

static void user_op_narrow(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *p = dt_param_at(ctx, "p", DT_SHAPE(3), DT_ONES, (dt_param_desc){ .dtype = DT_BF16 });
    dt_tensor *out = dt_record(dt_new(ctx, DT_F64, DT_SCALAR),
        (dt_record_desc){ .name = "look", .in = { p }, .backward = user_op_back });
    double c[3] = { 1, 2, 4 };
    /* bf16 could not hold 4 + 1/128, f32 can */
    CHECK(dt_backward(dt_loss(out, weigh(dt_cast(p, DT_F64), c), 1)) == DT_OK &&
          dt_grad_dtype(p) == DT_F32);
    for (int i = 0; i < 3 && p->grad; i++)
        CHECK(((float *)p->grad)[i] == (float)(c[i] + 1.0 / 128));
    CHECK(seen_grad[0] && seen_grad[0] != seen_grad[1]);
    close_good(ctx, &m, "a user-defined op of a bf16 parameter");
}

/* dt_input and dt_read preserve every type, and the account counts its bytes. */
static void types_in_and_out(void) {
    static const dt_dtype types[] = { DT_F32, DT_BF16, DT_F16, DT_F64, DT_I32, DT_U8, DT_I64 };
    for (int t = 0; t < 7; t++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        int64_t n = 100003;
        void *x = room((size_t)n * 8), *y = room((size_t)n * 8);
        for (int64_t i = 0; i < n; i++) put(x, types[t], i, (double)(i % 251) - 100);
        dt_tensor *in = dt_input(ctx, types[t], DT_SHAPE(n), x);
        CHECK(dt_read(in, y) == DT_OK && memcmp(x, y, (size_t)n * dt_dtype_size(types[t])) == 0);
        size_t bytes = (size_t)n * dt_dtype_size(types[t]),
               acts = dt_memory_used(ctx).live[DT_MEM_ACTS];
        CHECK_MSG(acts >= bytes && acts < bytes + 128, "%s: %zu bytes of activations",
            dt_dtype_name(types[t]), acts);
        CHECK(dt_item(dt_input(ctx, types[t], DT_SCALAR,
                  (char *)x + 7 * dt_dtype_size(types[t]))) == (types[t] == DT_U8 ? 163 : -93));
        if (!dt__integer(types[t])) {
            double three = 0;
            dt_tensor *a;
            put(&three, types[t], 0, 3);
            a = dt_require_grad(dt_input(ctx, types[t], DT_SHAPE(1, 1), &three));
            /* the loss has the tensor's type */
            dt_backward(dt_reshape(dt_mul(a, dt_affine(a, 2, 1)), DT_SCALAR));
            CHECK(a && a->grad && get(a->grad, types[t], 0) == 13 && dt_grad_dtype(a) == types[t]);
        }
        free(x);
        free(y);
        close_good(ctx, &m, dt_dtype_name(types[t]));
    }
}

/* Functions that move elements take bytes and 64-bit integers, and keep all their bits. */
static void integers_move(void) {
    static const uint8_t bytes[6] = { 0, 1, 127, 128, 254, 255 };
    static const int64_t wide[6] = { INT64_MIN, -1, (1ll << 53) + 1, 7, INT64_MAX - 1, INT64_MAX };
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *b = dt_input(ctx, DT_U8, DT_SHAPE(2, 3), bytes),
              *w = dt_input(ctx, DT_I64, DT_SHAPE(2, 3), wide), *pair[2];
    uint8_t eight[12];
    int64_t long_ones[12];
    pair[0] = dt_slice(b, 1, 1, 2), pair[1] = dt_slice(b, 1, 0, 1);
    dt_tensor *turned = dt_transpose(dt_reshape(b, DT_SHAPE(3, 2)), 0, 1);
    CHECK(dt_read(dt_concat(pair, 2, 1), eight) == DT_OK && eight[0] == 1 && eight[2] == 0 &&
          eight[3] == 254 && eight[5] == 128);
    CHECK(dt_read(turned, eight) == DT_OK && eight[0] == 0 && eight[1] == 127 && eight[3] == 1);
    pair[0] = dt_slice(w, 1, 1, 2), pair[1] = dt_slice(w, 1, 0, 1);
    CHECK(dt_read(dt_concat(pair, 2, 1), long_ones) == DT_OK && long_ones[1] == wide[2] &&
          long_ones[2] == INT64_MIN && long_ones[4] == INT64_MAX);
    CHECK(dt_read(dt_transpose(w, 0, 1), long_ones) == DT_OK && long_ones[4] == wide[2] &&
          long_ones[5] == INT64_MAX);
    CHECK(dt_read(dt_cast(w, DT_I64), long_ones) == DT_OK &&
          memcmp(long_ones, wide, sizeof wide) == 0);
    CHECK(dt_read(dt_cast(w, DT_U8), eight) == DT_OK && eight[0] == 0 && eight[3] == 7 &&
          eight[5] == 255);
    CHECK(dt_cast(b, DT_F32) && !dt_cast(b, DT_F32)->needs_grad);
    close_good(ctx, &m, "bytes and 64-bit integers");
}

/* The result of an op in a 16-bit type is the f32 result, rounded once. */
static void rounded_once(void) {
    for (int t = 0; t < 2; t++) {
        dt_dtype type = t ? DT_F16 : DT_BF16;
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        dt_tensor *x = noise_input(ctx, type, DT_SHAPE(19, 37), 1, 2),
                  *y = noise_input(ctx, type, DT_SHAPE(19, 37), 2, 2);
        dt_tensor *x32 = dt_cast(x, DT_F32), *y32 = dt_cast(y, DT_F32);
        dt_tensor *pair[][2] = { { dt_gelu(x), dt_gelu(x32) }, { dt_mul(x, y), dt_mul(x32, y32) },
            { dt_softmax(x), dt_softmax(x32) }, { dt_sum_over(x, 0), dt_sum_over(x32, 0) },
            { dt_mean_over(x, 1), dt_mean_over(x32, 1) }, { dt_tanh(x), dt_tanh(x32) },
            { dt_dropout(x, 0.3, 5, NULL), dt_dropout(x32, 0.3, 5, NULL) },
            { dt_div(x, y), dt_div(x32, y32) }, { dt_log_softmax(x), dt_log_softmax(x32) } };
        for (size_t i = 0; i < sizeof pair / sizeof *pair; i++) {
            int wrong = 0;
            for (int64_t k = 0; pair[i][0] && k < dt_count(pair[i][0]->shape); k++)
                wrong +=
                    ((uint16_t *)pair[i][0]->data)[k] != to16(type, ((float *)pair[i][1]->data)[k]);
            CHECK_MSG(pair[i][0] && wrong == 0,
                "%s op %zu: %d results are not the f32 result rounded once", dt_dtype_name(type), i,
                wrong);
        }
        close_good(ctx, &m, "rounded once");
    }
}

/* The gradients of the loss of x w^T over three chunks of rows, x and w bf16 parameters or f64. */
static void narrow_chunk_grads(dt_dtype dtype, int64_t rows, double *out) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *x =
        dt_param_at(ctx, "x", DT_SHAPE(rows, 2), DT_ZEROS, (dt_param_desc){ .dtype = dtype });
    dt_tensor *w = dt_param_at(
                  ctx, "w", DT_SHAPE(5, 2), DT_ZEROS, (dt_param_desc){ .dtype = dtype }),
              *all[2] = { x, w };
    int32_t *labels = (int32_t *)room((size_t)rows * sizeof *labels);
    for (int64_t i = 0; i < rows; i++) labels[i] = below(5, (uint64_t)i, 5);
    for (int k = 0; k < 2; k++) {
        int64_t n = dt_count(all[k]->shape);
        void *values = room((size_t)n * 8);
        for (int64_t i = 0; i < n; i++)
            put(values, dtype, i, from16(DT_BF16, to16(DT_BF16, noise(1, (uint64_t)i))));
        dt_write(all[k], values);
        free(values);
    }
    dt_backward(dt_linear_cross_entropy(
        x, w, dt_input(ctx, DT_I32, DT_SHAPE(rows), labels), 9, (dt_loss_desc){ 0 }));
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; i < dt_count(all[k]->shape); i++)
            *out++ = get(all[k]->grad, dt_grad_dtype(all[k]), i);
    free(labels);
    close_good(ctx, &m, "chunks of rows");
}

static void narrow_chunks(void) {
    int64_t rows = 2 * chunk_of(5) + 9, n = 2 * rows + 10;
    double *ours = (double *)room((size_t)n * 8), *exact = (double *)room((size_t)n * 8), worst = 0,
           last = 0;
    narrow_chunk_grads(DT_BF16, rows, ours);
    narrow_chunk_grads(DT_F64, rows, exact);
    for (int64_t i = 0; i < n; i++) {
        double error = fabs(ours[i] - exact[i]) / fmax(fabs(exact[i]), i < 2 * rows ? 0.1 : 10);
        if (i < 2 * rows)
            worst = fmax(worst, error);
        else
            last = fmax(last, error);
    }
    CHECK_MSG(
        worst < 0.02 && last < 0.02, "chunks in bf16: errors %.2g of dx, %.2g of dw", worst, last);
    free(ours);
    free(exact);
}

/* The loss and the gradients of `rows` rows with kernels that save up to `kept` logits, by a full
   backward or by halves. */
static void kept_grads(size_t kept, int64_t rows, int halves, double *out) {
    meter m = METER;
    dt_kernels table = *dt_kernels_cpu();
    table.max_saved_logits = kept;
    dt_ctx *ctx = open_with(&m, &table, 7);
    dt_tensor *x = dt_param(ctx, "x", DT_SHAPE(rows, 16), DT_NORMAL(1)), *all[2];
    all[0] = x, all[1] = dt_param(ctx, "w", DT_SHAPE(30, 16), DT_NORMAL(1));
    int32_t *labels = (int32_t *)room((size_t)rows * sizeof *labels);
    for (int64_t i = 0; i < rows; i++) labels[i] = below(30, (uint64_t)i, 5);
    dt_tensor *loss = dt_linear_cross_entropy(x, all[1],
        dt_input(ctx, DT_I32, DT_SHAPE(rows), labels), 9, (dt_loss_desc){ .smoothing = 0.1 });
    size_t acts = dt_memory_used(ctx).live[DT_MEM_ACTS], all_logits = (size_t)rows * 30;
    CHECK(rows < 1000 || (acts > all_logits * sizeof(float)) == (kept >= all_logits));
    if (halves)
        dt_backward_input(loss), dt_backward_weight(loss);
    else
        dt_backward(loss);
    dt_read(loss, out++);
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; i < dt_count(all[k]->shape); i++) *out++ = get(all[k]->grad, DT_F32, i);
    free(labels);
    close_good(ctx, &m, "kept logits");
}

/* A full backward and one by halves give the same bits. Saved and recomputed logits do so too if
   one chunk holds all rows; else they agree within rounding. */
static void kept_logits(void) {
    const int64_t few = 300, many = 9001, n = 1 + (many + 30) * 16;
    double *a = (double *)room((size_t)n * 8), *b = (double *)room((size_t)n * 8);
    for (int i = 0; i < 2; i++) {
        int64_t rows = i ? many : few, count = 1 + (rows + 30) * 16, wrong = 0;
        kept_grads(1 << 20, rows, 0, a);
        kept_grads(1 << 20, rows, 1, b);
        CHECK(memcmp(a, b, (size_t)count * 8) == 0);
        kept_grads(0, rows, 0, b);
        for (int64_t k = 0; k < count; k++)
            wrong += fabs(a[k] - b[k]) > (i ? 1e-5 : 0) * (1 + fabs(b[k]));
        CHECK_MSG(wrong == 0, "saved and recomputed logits: %lld values of %lld rows differ",
            (long long)wrong, (long long)rows);
    }
    free(a);
    free(b);
}

static void test_narrow(void) {
    narrow_chunks();
    kept_logits();
    narrow_accumulation(DT_BF16);
    narrow_accumulation(DT_F16);
    user_op_narrow();
    types_in_and_out();
    integers_move();
    rounded_once();
}

// ==== 5. Errors, empty tensors and special cases ================================================

/* Tensors for the calls below: x (3,4), wide (3,5), cube (2,3,4), ints i32 (3), w a parameter
   (5,4); stranger and stranger_ids belong to another context. */
typedef struct tensors {
    dt_ctx *ctx;
    dt_tensor *x, *wide, *cube, *ints, *w, *stranger, *stranger_ids;
} tensors;

static dt_tensor *zero_ids(dt_ctx *ctx, dt_shape shape) {
    int32_t zero[64] = { 0 };
    return dt_input(ctx, DT_I32, shape, zero);
}
static dt_tensor *heads_of(tensors *p, int64_t b, int64_t t, int64_t h, int64_t d) {
    return noise_input(p->ctx, DT_F32, DT_SHAPE(b, t, h, d), 1, 1);
}

#define ROW(name, ...) \
    static void r_##name(tensors *p) { __VA_ARGS__; }
ROW(activation, dt_linear_at(p->x, p->w, NULL, (dt_linear_desc){ .activation = DT_ACT_AFFINE }))
ROW(activation_below, dt_linear_at(p->x, p->w, NULL, (dt_linear_desc){ .activation = -1 }))
ROW(residual, dt_linear_at(p->x, p->w, NULL, (dt_linear_desc){ .residual = p->x }))
ROW(residual_type,
    dt_linear_at(p->x, p->w, NULL, (dt_linear_desc){ .residual = dt_cast(p->wide, DT_BF16) }))
ROW(residual_stranger, dt_linear_at(p->x, p->w, NULL, (dt_linear_desc){ .residual = p->stranger }))
static const dt_adapter no_adapter;
ROW(linear_parts,
    dt_linear_at(p->x, p->w, NULL, (dt_linear_desc){ .adapters = &no_adapter, .parts = -3 }))
ROW(linear_null, dt_linear(p->x, NULL, NULL))
ROW(dim, CHECK(dt_dim(p->x, 0) == 3 && dt_dim(p->x, -1) == 4 && dt_dim(NULL, 0) == 0);
    CHECK(dt_dim(p->x, 2) == 0))
ROW(item, CHECK(isnan(dt_item(p->x))))
static dt_tensor *grouped(tensors *p, int64_t a, int64_t b, dt_linear_desc d) {
    int64_t rows[2] = { a, b };
    return dt_grouped_linear(
        p->x, noise_input(p->ctx, DT_F32, DT_SHAPE(2, 5, 4), 1, 1), NULL, rows, d);
}
ROW(grouped_sum, grouped(p, 2, 2, (dt_linear_desc){ 0 }))
ROW(grouped_below, grouped(p, -1, 4, (dt_linear_desc){ 0 }))
ROW(grouped_activation, grouped(p, 1, 2, (dt_linear_desc){ .activation = 99 }))
ROW(grouped_null, dt_grouped_linear(p->x, p->w, NULL, NULL, (dt_linear_desc){ 0 }))
ROW(grouped_dims, int64_t rows[5] = { 3 };
    dt_grouped_linear(p->x, p->w, NULL, rows, (dt_linear_desc){ 0 }))
ROW(grouped_none, int64_t rows[1] = { 3 }; dt_grouped_linear(
    p->x, dt_input(p->ctx, DT_F32, DT_SHAPE(0, 5, 4), NULL), NULL, rows, (dt_linear_desc){ 0 }))
ROW(rmsnorm, dt_rmsnorm(p->x, p->w, 0))
ROW(rmsnorm_null, dt_rmsnorm(p->x, NULL, 0))
ROW(layernorm_null, dt_layernorm(p->x, NULL, p->w, 0))
ROW(softmax, dt_softmax(p->ints))
ROW(log_softmax, dt_log_softmax(p->ints))
ROW(log_softmax_scalar, dt_log_softmax(dt_sum_over(p->x, DT_ALL)))
ROW(softmax_bytes, dt_softmax(dt_cast(p->ints, DT_U8)))
ROW(add_long, dt_add(dt_cast(p->ints, DT_I64), dt_cast(p->ints, DT_I64)))
ROW(param_long,
    dt_param_at(p->ctx, "long", DT_SHAPE(3), DT_ZEROS, (dt_param_desc){ .dtype = DT_I64 }))
ROW(grad_bytes, dt_require_grad(dt_cast(p->ints, DT_U8)))
ROW(affine, dt_affine(p->ints, 1, 1))
ROW(sigmoid, dt_sigmoid(p->ints))
ROW(clamp, dt_clamp(p->x, 2, 1))
ROW(clamp_nan, dt_clamp(p->x, NAN, 1))
ROW(clamp_ints, dt_clamp(p->ints, 0, 1))
ROW(swiglu, dt_swiglu(p->x))
ROW(swiglu_ints, dt_swiglu(zero_ids(p->ctx, DT_SHAPE(2, 3))))
ROW(swiglu_flat, dt_swiglu(dt_reshape(p->x, DT_SHAPE(12))))
ROW(mul, dt_mul(p->x, p->wide))
ROW(mul_types, dt_mul(p->x, dt_cast(p->x, DT_F16)))
ROW(div_ints, dt_div(p->ints, p->ints))
ROW(maximum, dt_maximum(p->x, p->wide))
ROW(less_ints, dt_less(p->ints, p->ints))
ROW(less_types, dt_less(p->x, dt_cast(p->x, DT_F16)))
ROW(equal, dt_equal(p->x, p->wide))
ROW(equal_null, dt_equal(p->x, NULL))
ROW(where, dt_where(p->x, p->x, p->wide))
ROW(where_mask, dt_where(p->wide, p->x, p->x))
ROW(where_mask_type, dt_where(dt_cast(p->x, DT_BF16), p->x, p->x))
ROW(where_types, dt_where(p->x, p->x, dt_cast(p->x, DT_F16)))
ROW(where_ints, dt_where(p->ints, p->ints, p->ints))
ROW(where_null, dt_where(p->x, p->x, NULL))
ROW(where_stranger, dt_where(p->x, p->stranger, p->x))
ROW(masked_fill, dt_masked_fill(p->x, p->wide, 0))
ROW(masked_fill_null, dt_masked_fill(p->x, NULL, 0))
ROW(sub_stranger, dt_sub(p->x, p->stranger))
ROW(sub_null, dt_sub(NULL, p->x))
ROW(sum, dt_sum_over(p->x, 2))
ROW(sum_below, dt_sum_over(p->x, -3))
ROW(dims, dt_sum_dims(p->x, (dt_reduce_desc){ { 0, 2 }, 2, 0 }))
ROW(dims_twice, dt_mean_dims(p->cube, (dt_reduce_desc){ { 1, -2 }, 2, 0 }))
ROW(dims_many, dt_max_dims(p->x, (dt_reduce_desc){ { 0 }, 7, 0 }))
ROW(dims_below, dt_max_dims(p->x, (dt_reduce_desc){ { 0 }, -1, 0 }))
ROW(dims_ints, dt_sum_dims(p->ints, (dt_reduce_desc){ { 0 }, 0, 0 }))
ROW(dims_empty, dt_max_dims(dt_input(p->ctx, DT_F32, DT_SHAPE(3, 0, 2), NULL),
                    (dt_reduce_desc){ { 0, 1 }, 2, 1 }))
ROW(cumsum, dt_cumsum(p->x, DT_ALL))
ROW(cumsum_ints, dt_cumsum(p->ints, 0))
ROW(cumsum_scalar, dt_cumsum(dt_sum_over(p->x, DT_ALL), 0))
ROW(reshape_open, dt_reshape(p->x, DT_SHAPE(-1, 5)))
ROW(reshape_two, dt_reshape(p->x, DT_SHAPE(-1, 2, -1)))
ROW(reshape_none, dt_reshape(p->x, DT_SHAPE(0, -1)))
ROW(reshape_wraps, dt_reshape(p->x, DT_SHAPE(-1, INT64_MAX, INT64_MAX)))
ROW(reshape_below, dt_reshape(p->x, DT_SHAPE(-3, -4)))
ROW(permute, int order[3] = { 0, 1, 0 }; dt_permute(p->cube, order))
ROW(permute_dim, int order[3] = { 0, 3, 1 }; dt_permute(p->cube, order))
ROW(permute_null, dt_permute(p->cube, NULL))
ROW(select, dt_select(p->x, 1, 4))
ROW(select_below, dt_select(p->x, 1, -5))
ROW(select_dim, dt_select(p->x, 2, 0))
ROW(broadcast, dt_broadcast_to(p->x, DT_SHAPE(2, 3, 5)))
ROW(broadcast_less, dt_broadcast_to(p->cube, DT_SHAPE(3, 4)))
ROW(broadcast_one, dt_broadcast_to(p->x, DT_SHAPE(1, 4)))
ROW(broadcast_below, dt_broadcast_to(p->x, DT_SHAPE(-1, 3, 4)))
static dt_window_desc window(int k0, int k1, int s0, int s1, int p0, int p1, int d0, int d1) {
    return (dt_window_desc){ { k0, k1 }, { s0, s1 }, { p0, p1 }, { d0, d1 } };
}
ROW(patches, dt_patches(p->cube, window(1, 1, 0, 0, 0, 0, 0, 0), 0))
ROW(patches_ints,
    dt_patches(zero_ids(p->ctx, DT_SHAPE(1, 2, 2, 1)), window(1, 1, 0, 0, 0, 0, 0, 0), 0))
ROW(patches_kernel, dt_patches(heads_of(p, 1, 4, 4, 2), window(1, 0, 0, 0, 0, 0, 0, 0), 0))
ROW(patches_stride, dt_patches(heads_of(p, 1, 4, 4, 2), window(1, 1, -1, 1, 0, 0, 0, 0), 0))
ROW(patches_padding, dt_patches(heads_of(p, 1, 4, 4, 2), window(1, 1, 0, 0, -1, 0, 0, 0), 0))
ROW(patches_dilation,
    dt_patches(heads_of(p, 1, 4, 4, 2), window(2, 1, 0, 0, 0, 0, INT32_MIN, 0), 0))
ROW(patches_wide, dt_patches(heads_of(p, 1, 4, 4, 2), window(3, 3, 0, 0, 0, 0, 2, 1), 0))
ROW(patches_many, dt_patches(heads_of(p, 1, 4, 4, 2),
                      window(INT32_MAX, INT32_MAX, 1, 1, INT32_MAX, INT32_MAX, 0, 0), 0))
ROW(conv2d, dt_conv2d(heads_of(p, 1, 4, 4, 2), heads_of(p, 3, 1, 1, 4), NULL,
                window(0, 0, 0, 0, 0, 0, 0, 0)))
ROW(conv2d_null, dt_conv2d(heads_of(p, 1, 4, 4, 2), NULL, NULL, window(0, 0, 0, 0, 0, 0, 0, 0)))
ROW(conv2d_bias, dt_conv2d(heads_of(p, 1, 4, 4, 2), heads_of(p, 3, 1, 1, 2), p->x,
                     window(0, 0, 0, 0, 0, 0, 0, 0)))
ROW(conv1d, dt_conv1d(p->x, p->cube, NULL, window(0, 0, 0, 0, 0, 0, 0, 0)))
ROW(conv1d_wide, dt_conv1d(p->cube, noise_input(p->ctx, DT_F32, DT_SHAPE(1, 4, 4), 1, 1), NULL,
                     window(0, 0, 0, 0, 0, 0, 0, 0)))
ROW(pool_padding, dt_max_pool2d(heads_of(p, 1, 4, 4, 2), window(3, 3, 0, 0, 0, 2, 0, 0)))
ROW(pool_kernel, dt_avg_pool2d(heads_of(p, 1, 4, 4, 2), window(0, 0, 0, 0, 0, 0, 0, 0)))
ROW(group_norm, dt_group_norm(p->cube, 3, p->x, p->x, 0))
ROW(group_norm_none, dt_group_norm(p->cube, 0, p->x, p->x, 0))
ROW(group_norm_flat, dt_group_norm(p->ints, 1, p->x, p->x, 0))
ROW(group_norm_gain, dt_group_norm(p->cube, 2, p->x, p->x, 0))
#define MATMUL(a, b, ta, tb) dt_matmul(a, b, (dt_matmul_desc){ ta, tb })
ROW(matmul, MATMUL(p->x, p->x, 0, 0))
ROW(matmul_type, MATMUL(p->x, dt_cast(p->x, DT_BF16), 0, 1))
ROW(matmul_ints, MATMUL(p->ints, p->x, 0, 0))
ROW(matmul_row, MATMUL(dt_select(p->x, 0, 0), p->x, 0, 1))
ROW(matmul_null, MATMUL(p->x, NULL, 0, 0))
ROW(matmul_lead, MATMUL(p->cube, heads_of(p, 1, 2, 4, 3), 0, 0))
ROW(matmul_batch, MATMUL(p->cube, noise_input(p->ctx, DT_F32, DT_SHAPE(3, 4, 3), 1, 1), 0, 0))
ROW(matmul_stranger, MATMUL(p->x, p->stranger, 1, 0))
#undef MATMUL
ROW(mean_ints, dt_mean_over(p->ints, 0))
ROW(max_ints, dt_max_over(p->ints, DT_ALL))
ROW(argmax, dt_argmax(p->x, 2))
ROW(argmax_ints, dt_argmax(p->ints, 0))
ROW(argmax_empty, dt_argmax(dt_input(p->ctx, DT_F32, DT_SHAPE(3, 0), NULL), 1))
ROW(one_hot, int32_t at[2] = { 0, 3 };
    dt_one_hot(dt_input(p->ctx, DT_I32, DT_SHAPE(2), at), 3, DT_F32))
ROW(one_hot_below, int32_t at[2] = { 1, -1 };
    dt_one_hot(dt_input(p->ctx, DT_I32, DT_SHAPE(2), at), 3, DT_BF16))
ROW(one_hot_floats, dt_one_hot(p->x, 3, DT_F32))
ROW(one_hot_none, dt_one_hot(p->ints, 0, DT_F32))
ROW(one_hot_ints, dt_one_hot(p->ints, 3, DT_I32))
ROW(one_hot_type, dt_one_hot(p->ints, 3, (dt_dtype)17))
ROW(one_hot_dims, dt_one_hot(zero_ids(p->ctx, DT_SHAPE(1, 1, 1, 1, 1, 1)), 3, DT_F32))
ROW(max_empty, dt_max_over(dt_input(p->ctx, DT_F32, DT_SHAPE(3, 0), NULL), 1))
ROW(max_empty_all, dt_max_over(dt_input(p->ctx, DT_F32, DT_SHAPE(3, 0), NULL), DT_ALL))
ROW(slice, dt_slice(p->x, 1, 2, 3))
ROW(slice_dim, dt_slice(p->x, 2, 0, 1))
ROW(slice_below, dt_slice(p->x, 0, -1, 1))
ROW(slice_count, dt_slice(p->x, 0, 1, -1))
ROW(slice_wraps, dt_slice(p->x, 0, INT64_MAX, INT64_MAX))
ROW(concat, dt_tensor *two[2] = { p->x, p->wide }; dt_concat(two, 2, 0))
ROW(concat_types, dt_tensor *two[2] = { p->x, dt_cast(p->x, DT_F64) }; dt_concat(two, 2, 0))
ROW(concat_dim, dt_concat(&p->x, 1, 2))
ROW(concat_many, dt_tensor *nine[9] = { p->x }; dt_concat(nine, 9, 0))
ROW(concat_null, dt_tensor *two[2] = { p->x, NULL }; dt_concat(two, 2, 0))
ROW(concat_first, dt_tensor *two[2] = { NULL, p->x }; dt_concat(two, 2, 0))
ROW(concat_stranger, dt_tensor *two[2] = { p->x, p->stranger }; dt_concat(two, 2, 0))
ROW(transpose, dt_transpose(p->x, 0, 2))
ROW(transpose_below, dt_transpose(p->x, -3, 0))
ROW(cast, dt_cast(p->x, (dt_dtype)17))
ROW(gather, dt_gather_rows(p->cube, p->ints))
ROW(gather_ids, dt_gather_rows(p->x, p->wide))
ROW(gather_high, int32_t at[1] = { 3 };
    dt_gather_rows(p->x, dt_input(p->ctx, DT_I32, DT_SHAPE(1), at)))
ROW(gather_low, int32_t at[1] = { -2 };
    dt_gather_rows(p->x, dt_input(p->ctx, DT_I32, DT_SHAPE(1), at)))
ROW(gather_null, dt_gather_rows(p->x, NULL))
ROW(scatter, dt_scatter_rows(p->cube, p->ints, 4))
ROW(scatter_count, dt_scatter_rows(p->x, p->ints, -1))
ROW(scatter_ints, dt_scatter_rows(dt_cast(p->x, DT_I32), p->ints, 4))
ROW(scatter_high, int32_t at[3] = { 3, -1, 4 };
    dt_scatter_rows(p->x, dt_input(p->ctx, DT_I32, DT_SHAPE(3), at), 4))
ROW(scatter_low, int32_t at[3] = { 0, -2, 9 };
    dt_scatter_rows(dt_cast(p->x, DT_BF16), dt_input(p->ctx, DT_I32, DT_SHAPE(3), at), 4))
ROW(scatter_none, int32_t at[3] = { -1, -1, 0 };
    dt_scatter_rows(p->x, dt_input(p->ctx, DT_I32, DT_SHAPE(3), at), 0))
ROW(scatter_type, dt_scatter_rows(p->x, p->x, 4))
ROW(bag, dt_embedding_bag(p->cube, p->ints, dt_cast(p->ints, DT_F32)))
ROW(bag_ids, dt_embedding_bag(p->x, p->wide, p->wide))
ROW(bag_scalar, int32_t at[1] = { 0 };
    dt_embedding_bag(p->x, dt_input(p->ctx, DT_I32, DT_SCALAR, at), p->wide))
ROW(bag_none, dt_embedding_bag(p->x, dt_input(p->ctx, DT_I32, DT_SHAPE(2, 0), NULL),
                  dt_input(p->ctx, DT_F32, DT_SHAPE(2, 0), NULL)))
ROW(bag_weights, dt_embedding_bag(p->x, p->ints, p->x))
ROW(bag_types, dt_embedding_bag(p->x, p->ints, dt_cast(p->ints, DT_F64)))
ROW(bag_narrow,
    dt_embedding_bag(dt_cast(p->x, DT_BF16), p->ints, dt_cast(dt_cast(p->ints, DT_F32), DT_BF16)))
ROW(bag_high, int32_t at[4] = { 0, -1, 2, 3 };
    dt_embedding_bag(p->x, dt_input(p->ctx, DT_I32, DT_SHAPE(2, 2), at),
        noise_input(p->ctx, DT_F32, DT_SHAPE(2, 2), 1, 1)))
ROW(bag_null, dt_embedding_bag(p->x, p->ints, NULL))
ROW(topk, dt_topk(p->x, 5, NULL))
ROW(topk_none, dt_topk(p->x, 0, NULL))
ROW(topk_ints, dt_topk(p->ints, 1, NULL))
ROW(rope, dt_rope(p->cube, p->ints, (dt_rope_desc){ 0 }))
ROW(rope_count, dt_rope(heads_of(p, 1, 2, 1, 4), p->ints, (dt_rope_desc){ 0 }))
ROW(rope_odd, dt_rope(heads_of(p, 1, 3, 1, 5), p->ints, (dt_rope_desc){ 0 }))
ROW(rope_rotary, dt_rope(heads_of(p, 1, 3, 1, 4), p->ints, (dt_rope_desc){ .rotary = 6 }))
ROW(rope_below, dt_rope(heads_of(p, 1, 3, 1, 4), p->ints, (dt_rope_desc){ .rotary = -2 }))
ROW(rope_wide, dt_rope(heads_of(p, 1, 3, 1, 514), p->ints, (dt_rope_desc){ 0 }))
#define ROPE(...) \
    dt_rope(heads_of(p, 1, 3, 1, 4), p->ints, (dt_rope_desc){ .scaling = { __VA_ARGS__ } })
ROW(rope_kind, ROPE(.kind = 4, .factor = 2))
ROW(rope_factor, ROPE(.kind = DT_ROPE_LINEAR, .factor = 0.5))
ROW(rope_bounds, ROPE(.kind = DT_ROPE_LLAMA3, .factor = 2, .original = 8, .low = 4, .high = 4))
ROW(rope_original, ROPE(.kind = DT_ROPE_YARN, .factor = 2))
#undef ROPE
#define ROPE(base) dt_rope(heads_of(p, 1, 3, 1, 4), p->ints, (dt_rope_desc){ .theta = base })
ROW(rope_theta, ROPE(0.5))
ROW(rope_theta_nan, ROPE(NAN))
#undef ROPE
ROW(rope_null, dt_rope(heads_of(p, 1, 3, 1, 4), NULL, (dt_rope_desc){ 0 }))
ROW(dropout, dt_dropout(p->x, 1, 1, NULL))
ROW(dropout_below, dt_dropout(p->x, -0.1, 1, NULL))
ROW(dropout_nan, dt_dropout(p->x, NAN, 1, NULL))
ROW(dropout_tokens, dt_dropout(p->cube, 0.5, 1, p->ints))
ROW(dropout_ints, dt_dropout(p->ints, 0.5, 1, NULL))
ROW(dropout_stranger, dt_dropout(p->x, 0.5, 1, p->stranger_ids))
#define QKV heads_of(p, 1, 3, 2, 4), heads_of(p, 1, 4, 2, 4), heads_of(p, 1, 4, 2, 4)
ROW(attention_one, dt_attention(QKV, (dt_attn_desc){ .documents = p->ints }))
ROW(attention_window, dt_attention(QKV, (dt_attn_desc){ .window = -1 }))
ROW(attention_full, dt_attention(QKV, (dt_attn_desc){ .window = 2, .full = 1 }))
ROW(attention_cap, dt_attention(QKV, (dt_attn_desc){ .soft_cap = -1 }))
ROW(attention_keys,
    dt_attention(QKV, (dt_attn_desc){ .key_documents = zero_ids(p->ctx, DT_SHAPE(4)) }))
ROW(attention_type, dt_attention(QKV, (dt_attn_desc){ .positions = p->x }))
ROW(attention_stranger, dt_attention(QKV, (dt_attn_desc){ .positions = p->stranger_ids }))
ROW(attention_null, dt_attention(p->cube, NULL, p->cube, (dt_attn_desc){ 0 }))
ROW(loss_vocab, dt_cross_entropy_at(p->x, p->ints, 1, (dt_loss_desc){ .vocab = 5 }))
ROW(loss_label, int32_t at[3] = { 0, 3, 1 }; dt_cross_entropy_at(
    p->x, dt_input(p->ctx, DT_I32, DT_SHAPE(3), at), 1, (dt_loss_desc){ .vocab = 3 }))
ROW(linear_loss_label, int32_t at[3] = { 0, -3, 5 }; dt_linear_cross_entropy(
    p->x, p->w, dt_input(p->ctx, DT_I32, DT_SHAPE(3), at), 1, (dt_loss_desc){ 0 }))
ROW(loss_smoothing, dt_cross_entropy_at(p->x, p->ints, 1, (dt_loss_desc){ .smoothing = 1 }))
ROW(loss_z, dt_cross_entropy_at(p->x, p->ints, 1, (dt_loss_desc){ .z_weight = -1 }))
ROW(bce, dt_bce_with_logits(p->x, p->wide, 1))
ROW(bce_ints, dt_bce_with_logits(p->ints, p->ints, 1))
ROW(bce_types, dt_bce_with_logits(p->x, dt_cast(p->x, DT_F64), 1))
ROW(bce_denominator, dt_bce_with_logits(p->x, p->x, 0))
ROW(bce_null, dt_bce_with_logits(p->x, NULL, 1))
ROW(linear_loss, dt_linear_cross_entropy(p->wide, p->w, p->ints, 1, (dt_loss_desc){ 0 }))
ROW(linear_loss_labels, dt_linear_cross_entropy(p->cube, p->w, p->ints, 1, (dt_loss_desc){ 0 }))
ROW(linear_loss_vocab,
    dt_linear_cross_entropy(p->x, p->w, p->ints, 1, (dt_loss_desc){ .vocab = 6 }))
ROW(linear_loss_null, dt_linear_cross_entropy(p->x, p->w, NULL, 1, (dt_loss_desc){ 0 }))
#undef QKV
#undef ROW

static const struct row {
    void (*run)(tensors *p);
    dt_status status;
    const char *text[2];
} rows[] = {
    { r_activation, DT_ERR_ARG, { "dt_linear(the_w)", "activation 12" } },
    { r_activation_below, DT_ERR_ARG, { "dt_linear(the_w)", "activation -1" } },
    { r_residual, DT_ERR_SHAPE, { "residual", "(3,4)" } },
    { r_residual_type, DT_ERR_SHAPE, { "residual", "bf16" } },
    { r_residual_stranger, DT_ERR_ARG, { "dt_linear", "another context" } },
    { r_linear_null, DT_ERR_ARG, { "dt_linear", "NULL" } },
    { r_rmsnorm, DT_ERR_SHAPE, { "dt_rmsnorm", "the_w" } },
    { r_rmsnorm_null, DT_ERR_ARG, { "dt_rmsnorm", "NULL" } },
    { r_layernorm_null, DT_ERR_ARG, { "dt_layernorm", "NULL" } },
    { r_softmax, DT_ERR_SHAPE, { "dt_softmax", "not for integers" } },
    { r_affine, DT_ERR_SHAPE, { "dt_affine", "not for integers" } },
    { r_sigmoid, DT_ERR_SHAPE, { "dt_sigmoid", "not for integers" } },
    { r_clamp, DT_ERR_ARG, { "dt_clamp(dt_input)", "low 2 must be at most high 1" } },
    { r_clamp_nan, DT_ERR_ARG, { "dt_clamp", "low nan" } },
    { r_clamp_ints, DT_ERR_SHAPE, { "dt_clamp", "not for integers" } },
    { r_swiglu, DT_ERR_SHAPE, { "dt_swiglu", "(3,4)" } },
    { r_log_softmax, DT_ERR_SHAPE, { "dt_log_softmax", "not for integers" } },
    { r_log_softmax_scalar, DT_ERR_SHAPE, { "dt_log_softmax", "at least one column" } },
    { r_softmax_bytes, DT_ERR_SHAPE, { "dt_softmax", "u8 (3): not for integers" } },
    { r_add_long, DT_ERR_SHAPE, { "dt_add", "i64" } },
    { r_param_long, DT_ERR_ARG, { "dt_param(long): type i64; use f32" } },
    { r_grad_bytes, DT_ERR_ARG, { "integers have no gradient" } },
    { r_swiglu_ints, DT_ERR_SHAPE, { "dt_swiglu(dt_input)", "not for integers" } },
    { r_swiglu_flat, DT_ERR_SHAPE, { "dt_swiglu", "(12)" } },
    { r_mul, DT_ERR_SHAPE, { "(3,4)", "(3,5)" } },
    { r_mul_types, DT_ERR_SHAPE, { "dt_mul", "f16" } },
    { r_div_ints, DT_ERR_SHAPE, { "dt_div", "i32" } },
    { r_maximum, DT_ERR_SHAPE, { "dt_maximum", "(3,5)" } },
    { r_less_ints, DT_ERR_SHAPE, { "dt_less", "not for integers" } },
    { r_less_types, DT_ERR_SHAPE, { "dt_less", "f16" } },
    { r_equal, DT_ERR_SHAPE, { "dt_equal", "(3,5)" } },
    { r_equal_null, DT_ERR_ARG, { "dt_equal", "NULL" } },
    { r_where, DT_ERR_SHAPE, { "dt_where", "(3,4) and f32 (3,5)" } },
    { r_where_mask, DT_ERR_SHAPE, { "dt_where", "(3,5) and f32 (3,4)" } },
    { r_where_mask_type, DT_ERR_SHAPE, { "dt_where", "bf16 (3,4) and f32 (3,4)" } },
    { r_where_types, DT_ERR_SHAPE, { "dt_where", "f16" } },
    { r_where_ints, DT_ERR_SHAPE, { "dt_where", "not for integers" } },
    { r_where_null, DT_ERR_ARG, { "dt_where", "NULL" } },
    { r_where_stranger, DT_ERR_ARG, { "dt_where", "another context" } },
    { r_masked_fill, DT_ERR_SHAPE, { "dt_masked_fill", "(3,5)" } },
    { r_masked_fill_null, DT_ERR_ARG, { "dt_masked_fill", "NULL" } },
    { r_sub_stranger, DT_ERR_ARG, { "dt_sub", "another context" } },
    { r_sub_null, DT_ERR_ARG, { "dt_sub", "NULL" } },
    { r_sum, DT_ERR_ARG, { "dt_sum_over", "dimension 2" } },
    { r_sum_below, DT_ERR_ARG,
        { "dt_sum_over", "f32 (3,4) has no dimension -3; use 0 to 1, or -2 to -1 from the end" } },
    { r_mean_ints, DT_ERR_SHAPE, { "dt_mean_over", "i32 (3): not for integers" } },
    { r_max_ints, DT_ERR_SHAPE, { "dt_max_over", "i32 (3): not for integers" } },
    { r_argmax, DT_ERR_ARG, { "dt_argmax", "dimension 2" } },
    { r_argmax_ints, DT_ERR_SHAPE, { "dt_argmax", "not for integers" } },
    { r_argmax_empty, DT_ERR_SHAPE, { "dt_argmax", "(3,0)" } },
    { r_one_hot, DT_ERR_ARG, { "dt_one_hot", "id 3 at place 1; the result has 3 classes" } },
    { r_one_hot_below, DT_ERR_ARG, { "dt_one_hot", "id -1 at place 1" } },
    { r_one_hot_floats, DT_ERR_SHAPE, { "dt_one_hot", "i32 ids" } },
    { r_one_hot_none, DT_ERR_SHAPE, { "dt_one_hot", "1 class or more" } },
    { r_one_hot_ints, DT_ERR_SHAPE, { "dt_one_hot", "floating-point" } },
    { r_one_hot_type, DT_ERR_SHAPE, { "dt_one_hot", "floating-point" } },
    { r_one_hot_dims, DT_ERR_SHAPE, { "dt_one_hot", "at most 5 dimensions" } },
    { r_max_empty, DT_ERR_SHAPE, { "dt_max_over", "(3,0)" } },
    { r_max_empty_all, DT_ERR_SHAPE, { "dt_max_over", "an empty dimension has no maximum" } },
    { r_slice, DT_ERR_SHAPE, { "dt_slice", "3 from 2 of dimension 1 of (3,4)" } },
    { r_slice_dim, DT_ERR_ARG, { "dt_slice", "no dimension 2" } },
    { r_slice_below, DT_ERR_SHAPE, { "dt_slice", "1 from -1" } },
    { r_slice_count, DT_ERR_SHAPE, { "dt_slice", "-1 from 1" } },
    { r_slice_wraps, DT_ERR_SHAPE, { "dt_slice", "dimension 0" } },
    { r_concat, DT_ERR_SHAPE, { "dt_concat", "(3,5)" } },
    { r_concat_types, DT_ERR_SHAPE, { "dt_concat", "f64" } },
    { r_concat_dim, DT_ERR_ARG, { "dt_concat", "dimension 2" } },
    { r_concat_many, DT_ERR_ARG, { "dt_concat", "9 tensors, at most 8" } },
    { r_concat_null, DT_ERR_ARG, { "dt_concat", "NULL" } },
    { r_concat_first, DT_ERR_ARG, { "dt_concat(dt_input)", "NULL" } },
    { r_concat_stranger, DT_ERR_ARG, { "dt_concat", "another context" } },
    { r_dim, DT_ERR_ARG, { "dt_dim(dt_input)", "(3,4) has no dimension 2; use 0 to 1" } },
    { r_item, DT_ERR_ARG, { "dt_item(dt_input)", "f32 (3,4) has 12 elements, not 1" } },
    { r_linear_parts, DT_ERR_SHAPE, { "dt_linear", "adapters for -3 parts" } },
    { r_transpose, DT_ERR_ARG, { "dt_transpose", "(3,4) has no dimension 2" } },
    { r_transpose_below, DT_ERR_ARG, { "dt_transpose", "no dimension -3; use 0 to 1, or -2" } },
    { r_dims, DT_ERR_ARG, { "dt_sum_dims", "no dimension 2" } },
    { r_dims_twice, DT_ERR_ARG, { "dt_mean_dims", "dimension 1 of (2,3,4) is named twice" } },
    { r_dims_many, DT_ERR_ARG, { "dt_max_dims", "7 dimensions of (3,4)" } },
    { r_dims_below, DT_ERR_ARG, { "dt_max_dims", "-1 dimensions of (3,4)" } },
    { r_dims_ints, DT_ERR_SHAPE, { "dt_sum_dims", "not for integers" } },
    { r_dims_empty, DT_ERR_SHAPE, { "dt_max_dims", "no maximum" } },
    { r_cumsum, DT_ERR_ARG, { "dt_cumsum", "no dimension -100" } },
    { r_cumsum_ints, DT_ERR_SHAPE, { "dt_cumsum", "not for integers" } },
    { r_cumsum_scalar, DT_ERR_ARG, { "dt_cumsum", "() has no dimension 0" } },
    { r_reshape_open, DT_ERR_SHAPE, { "(3,4) and (-1,5)", "in place of -1" } },
    { r_reshape_two, DT_ERR_SHAPE, { "(-1,2,-1)", "only one size can be -1" } },
    { r_reshape_none, DT_ERR_SHAPE, { "(0,-1)", "in place of -1" } },
    { r_reshape_wraps, DT_ERR_SHAPE, { "dt_reshape", "in place of -1" } },
    { r_reshape_below, DT_ERR_SHAPE, { "dt_reshape", "(-3,-4)" } },
    { r_permute, DT_ERR_ARG, { "dt_permute", "dimension 0 of (2,3,4) is named twice" } },
    { r_permute_dim, DT_ERR_ARG, { "dt_permute", "no dimension 3" } },
    { r_permute_null, DT_ERR_SHAPE, { "dt_permute", "the order is NULL" } },
    { r_select, DT_ERR_SHAPE, { "dt_select", "index 4 of dimension 1 of (3,4)" } },
    { r_select_below, DT_ERR_SHAPE, { "dt_select", "index -5" } },
    { r_select_dim, DT_ERR_ARG, { "dt_select", "no dimension 2" } },
    { r_broadcast, DT_ERR_SHAPE, { "(3,4)", "(2,3,5)" } },
    { r_broadcast_less, DT_ERR_SHAPE, { "(2,3,4)", "equal, 1 or missing" } },
    { r_broadcast_one, DT_ERR_SHAPE, { "(3,4)", "(1,4)" } },
    { r_broadcast_below, DT_ERR_SHAPE, { "dt_broadcast_to", "(-1,3,4)" } },
    { r_patches, DT_ERR_SHAPE, { "dt_patches", "images (B,H,W,C) are needed" } },
    { r_patches_ints, DT_ERR_SHAPE, { "dt_patches", "not for integers" } },
    { r_patches_kernel, DT_ERR_ARG, { "kernel 0, stride 0, padding 0", "along the width" } },
    { r_patches_stride, DT_ERR_ARG, { "stride -1", "along the height of (1,4,4,2)" } },
    { r_patches_padding, DT_ERR_ARG, { "dt_patches", "padding -1" } },
    { r_patches_dilation, DT_ERR_ARG, { "dt_patches", "dilation -2147483648" } },
    { r_patches_wide, DT_ERR_SHAPE, { "dilation 2", "the window is larger than the image" } },
    { r_patches_many, DT_ERR_SHAPE, { "dt_patches", "4611686014132420609" } },
    { r_conv2d, DT_ERR_SHAPE, { "dt_conv2d", "w (O,KH,KW,C)" } },
    { r_conv2d_null, DT_ERR_ARG, { "dt_conv2d", "NULL" } },
    { r_conv2d_bias, DT_ERR_SHAPE, { "dt_linear", "the bias" } },
    { r_conv1d, DT_ERR_SHAPE, { "dt_conv1d", "w (O,K,C)" } },
    { r_conv1d_wide, DT_ERR_SHAPE, { "dt_conv2d", "kernel 4" } },
    { r_pool_padding, DT_ERR_ARG, { "dt_max_pool2d", "padding 0 and 2 is more than half" } },
    { r_pool_kernel, DT_ERR_ARG, { "dt_avg_pool2d", "kernel 0" } },
    { r_group_norm, DT_ERR_SHAPE, { "dt_group_norm", "a multiple of the groups" } },
    { r_group_norm_none, DT_ERR_SHAPE, { "dt_group_norm", "a multiple of the groups" } },
    { r_group_norm_flat, DT_ERR_SHAPE, { "dt_group_norm", "not for integers" } },
    { r_group_norm_gain, DT_ERR_SHAPE, { "dt_group_norm", "gain and bias need shape (C)" } },
    { r_matmul, DT_ERR_SHAPE, { "dt_matmul", "that are summed must be equal" } },
    { r_matmul_type, DT_ERR_SHAPE, { "dt_matmul", "types must be equal" } },
    { r_matmul_ints, DT_ERR_SHAPE, { "dt_matmul", "not for integers" } },
    { r_matmul_row, DT_ERR_SHAPE, { "dt_matmul", "two dimensions or more" } },
    { r_matmul_null, DT_ERR_ARG, { "dt_matmul", "NULL" } },
    { r_matmul_lead, DT_ERR_SHAPE, { "dt_matmul", "the leading dimensions" } },
    { r_matmul_batch, DT_ERR_SHAPE, { "dt_matmul", "the leading dimensions" } },
    { r_matmul_stranger, DT_ERR_ARG, { "dt_matmul", "another context" } },
    { r_cast, DT_ERR_ARG, { "dt_cast", "element type 17" } },
    { r_gather, DT_ERR_SHAPE, { "dt_gather_rows", "(2,3,4)" } },
    { r_gather_ids, DT_ERR_SHAPE, { "dt_gather_rows", "i32 ids" } },
    { r_gather_high, DT_ERR_ARG, { "dt_gather_rows", "row 3 at place 0; the table has 3 rows" } },
    { r_gather_low, DT_ERR_ARG, { "dt_gather_rows", "row -2 at place 0" } },
    { r_gather_null, DT_ERR_ARG, { "dt_gather_rows", "NULL" } },
    { r_scatter, DT_ERR_SHAPE, { "dt_scatter_rows", "(2,3,4)" } },
    { r_scatter_count, DT_ERR_SHAPE, { "dt_scatter_rows", NULL } },
    { r_scatter_ints, DT_ERR_SHAPE, { "dt_scatter_rows", "not for integers" } },
    { r_scatter_high, DT_ERR_ARG,
        { "dt_scatter_rows(dt_input)", "row 4 at place 2; the result has 4 rows" } },
    { r_scatter_low, DT_ERR_ARG, { "dt_scatter_rows(dt_cast)", "row -2 at place 1" } },
    { r_scatter_none, DT_ERR_ARG,
        { "dt_scatter_rows", "row 0 at place 2; the result has 0 rows" } },
    { r_scatter_type, DT_ERR_SHAPE, { "dt_scatter_rows", "i32 row" } },
    { r_grouped_sum, DT_ERR_SHAPE, { "dt_grouped_linear", "all of x's rows together" } },
    { r_grouped_below, DT_ERR_SHAPE, { "dt_grouped_linear", "0 rows or more" } },
    { r_grouped_activation, DT_ERR_ARG, { "dt_grouped_linear", "activation 99" } },
    { r_grouped_null, DT_ERR_ARG, { "dt_grouped_linear", "rows is NULL" } },
    { r_grouped_dims, DT_ERR_SHAPE, { "dt_grouped_linear", "w needs three" } },
    { r_grouped_none, DT_ERR_SHAPE, { "dt_grouped_linear", "(0,5,4)" } },
    { r_bag, DT_ERR_SHAPE, { "dt_embedding_bag", "(2,3,4)" } },
    { r_bag_ids, DT_ERR_SHAPE, { "dt_embedding_bag", "i32 rows" } },
    { r_bag_scalar, DT_ERR_SHAPE, { "dt_embedding_bag", "i32 rows (..,k)" } },
    { r_bag_none, DT_ERR_SHAPE, { "dt_embedding_bag", "(2,0)" } },
    { r_bag_weights, DT_ERR_SHAPE, { "dt_embedding_bag", "each row needs a weight" } },
    { r_bag_types, DT_ERR_SHAPE, { "dt_embedding_bag", "f64 if x is f64" } },
    { r_bag_narrow, DT_ERR_SHAPE, { "dt_embedding_bag", "in f32" } },
    { r_bag_high, DT_ERR_ARG, { "dt_embedding_bag", "row 3 at place 3; the table has 3 rows" } },
    { r_bag_null, DT_ERR_ARG, { "dt_embedding_bag", "NULL" } },
    { r_topk, DT_ERR_SHAPE, { "dt_topk", "(3,4)" } },
    { r_topk_none, DT_ERR_SHAPE, { "dt_topk", "k must be" } },
    { r_topk_ints, DT_ERR_SHAPE, { "dt_topk", "i32 (3): not for integers" } },
    { r_rope, DT_ERR_SHAPE, { "dt_rope", "(2,3,4)" } },
    { r_rope_count, DT_ERR_SHAPE, { "dt_rope", "positions" } },
    { r_rope_odd, DT_ERR_SHAPE, { "dt_rope", "5 of 5 dimensions are rotary: an even number" } },
    { r_rope_rotary, DT_ERR_SHAPE, { "dt_rope", "6 of 4" } },
    { r_rope_below, DT_ERR_SHAPE, { "dt_rope", "-2 of 4" } },
    { r_rope_wide, DT_ERR_SHAPE, { "dt_rope", "at most 512" } },
    { r_rope_theta, DT_ERR_ARG, { "dt_rope", "theta 0.5; it must be finite and at least 1" } },
    { r_rope_theta_nan, DT_ERR_ARG, { "dt_rope", "theta nan" } },
    { r_rope_kind, DT_ERR_ARG, { "dt_rope", "of kind 4" } },
    { r_rope_factor, DT_ERR_ARG, { "dt_rope", "factor of 0.5" } },
    { r_rope_bounds, DT_ERR_ARG, { "dt_rope", "bounds 4 and 4" } },
    { r_rope_original, DT_ERR_ARG, { "dt_rope", "from 0 tokens" } },
    { r_rope_null, DT_ERR_ARG, { "dt_rope", "NULL" } },
    { r_dropout, DT_ERR_ARG, { "dt_dropout", "probability 1" } },
    { r_dropout_below, DT_ERR_ARG, { "dt_dropout", "probability -0.1" } },
    { r_dropout_nan, DT_ERR_ARG, { "dt_dropout", "nan" } },
    { r_dropout_tokens, DT_ERR_SHAPE, { "dt_dropout", "i32 (3): one i32 token for each row" } },
    { r_dropout_ints, DT_ERR_SHAPE, { "dt_dropout", "i32 (3): not for integers" } },
    { r_dropout_stranger, DT_ERR_ARG, { "dt_dropout", "another context" } },
    { r_attention_one, DT_ERR_ARG, { "dt_attention", "both or none" } },
    { r_attention_window, DT_ERR_ARG, { "dt_attention", "window of -1 keys" } },
    { r_attention_full, DT_ERR_ARG, { "dt_attention", "2 keys without a causal mask" } },
    { r_attention_cap, DT_ERR_ARG, { "dt_attention", "soft_cap -1" } },
    { r_attention_keys, DT_ERR_ARG, { "dt_attention", "both or none" } },
    { r_attention_type, DT_ERR_SHAPE, { "dt_attention", "i32" } },
    { r_attention_stranger, DT_ERR_ARG, { "dt_attention", "another context" } },
    { r_attention_null, DT_ERR_ARG, { "dt_attention", "NULL" } },
    { r_loss_vocab, DT_ERR_ARG, { "dt_cross_entropy", "vocab 5 of 4" } },
    { r_loss_label, DT_ERR_ARG,
        { "dt_cross_entropy", "label 3 at place 1; the vocabulary has 3 entries" } },
    { r_linear_loss_label, DT_ERR_ARG,
        { "dt_linear_cross_entropy", "label 5 at place 2; the vocabulary has 5" } },
    { r_loss_smoothing, DT_ERR_ARG, { "dt_cross_entropy", "smoothing 1" } },
    { r_loss_z, DT_ERR_ARG, { "dt_cross_entropy", "z_weight -1" } },
    { r_bce, DT_ERR_SHAPE, { "dt_bce_with_logits", "(3,5)" } },
    { r_bce_ints, DT_ERR_SHAPE, { "dt_bce_with_logits", "not for integers" } },
    { r_bce_types, DT_ERR_SHAPE, { "dt_bce_with_logits", "f64" } },
    { r_bce_denominator, DT_ERR_ARG, { "dt_bce_with_logits", "denominator" } },
    { r_bce_null, DT_ERR_ARG, { "dt_bce_with_logits", "NULL" } },
    { r_linear_loss, DT_ERR_SHAPE, { "dt_linear_cross_entropy", "(3,5)" } },
    { r_linear_loss_labels, DT_ERR_SHAPE, { "dt_linear_cross_entropy", "label" } },
    { r_linear_loss_vocab, DT_ERR_ARG, { "dt_linear_cross_entropy", "vocab 6 of 5" } },
    { r_linear_loss_null, DT_ERR_ARG, { "dt_linear_cross_entropy", "NULL" } },
};

static void test_refusals(void) {
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        meter m = METER, m_other = METER;
        dt_ctx *ctx = open_ctx(&m), *other = open_ctx(&m_other);
        tensors p = { .ctx = ctx, .x = noise_input(ctx, DT_F32, DT_SHAPE(3, 4), 1, 1) };
        p.wide = noise_input(ctx, DT_F32, DT_SHAPE(3, 5), 1, 1);
        p.cube = noise_input(ctx, DT_F32, DT_SHAPE(2, 3, 4), 1, 1);
        p.ints = zero_ids(ctx, DT_SHAPE(3));
        p.w = dt_param(ctx, "the_w", DT_SHAPE(5, 4), DT_NORMAL(1));
        p.stranger = noise_input(other, DT_F32, DT_SHAPE(3, 4), 1, 1);
        p.stranger_ids = zero_ids(other, DT_SHAPE(3));
        dt_require_grad(p.x);
        rows[i].run(&p);
        CHECK_MSG(dt_error(ctx) == rows[i].status, "refusal %zu: %s, not %s: %s", i,
            dt_status_name(dt_error(ctx)), dt_status_name(rows[i].status), dt_error_text(ctx));
        for (int t = 0; t < 2; t++)
            CHECK_MSG(!rows[i].text[t] || strstr(dt_error_text(ctx), rows[i].text[t]),
                "refusal %zu: no \"%s\" in: %s", i, rows[i].text[t], dt_error_text(ctx));
        CHECK_MSG(m.errors == 1 && !strncmp(dt_error_text(ctx), "rank 3: ", 8),
            "refusal %zu: %d lines", i, m.errors);
        CHECK(!dt_softmax(p.x) && !dt_slice(p.x, 0, 0, 1) && !dt_mul(p.x, p.x) &&
              !dt_sum_over(p.x, 0) && !dt_silu(p.x));
        close_ctx(ctx, &m, "a refusal");
        close_good(other, &m_other, "the other context");
    }
    CHECK(!dt_gelu_erf(NULL) && !dt_swiglu(NULL) && !dt_mul(NULL, NULL) && !dt_max_over(NULL, 0) &&
          !dt_slice(NULL, 0, 0, 0));
    CHECK(!dt_concat(NULL, 1, 0) && !dt_transpose(NULL, 0, 0) && !dt_cast(NULL, DT_F32) &&
          !dt_topk(NULL, 1, NULL));
    CHECK(!dt_rope(NULL, NULL, (dt_rope_desc){ 0 }) && !dt_dropout(NULL, 0.5, 1, NULL) &&
          !dt_softmax(NULL));
    CHECK(!dt_attention(NULL, NULL, NULL, (dt_attn_desc){ 0 }) && !dt_scatter_rows(NULL, NULL, 1));
    CHECK(!dt_linear_cross_entropy(NULL, NULL, NULL, 1, (dt_loss_desc){ 0 }));
}

/* Inputs without rows give empty results, losses of 0, and add 0 to the gradients of parameters. */
static void no_rows(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_param_desc d = { .dtype = DT_F64 };
    dt_tensor *w = dt_param_at(ctx, "w", DT_SHAPE(3, 4), DT_ONES, d),
              *gain = dt_param_at(ctx, "g", DT_SHAPE(4), DT_ONES, d);
    dt_tensor *none = NULL, *z = NULL;
    double seen[12] = { 0 };
    /* 2 rows, then none, which must not change the gradients */
    for (int64_t rows = 2; rows >= 0; rows -= 2) {
        none = dt_require_grad(noise_input(ctx, DT_F64, DT_SHAPE(rows, 4), 1, 1));
        dt_tensor *x = dt_rmsnorm(none, gain, 0);
        dt_tensor *loss = dt_linear_cross_entropy(
            x, w, zero_ids(ctx, DT_SHAPE(rows)), 1, (dt_loss_desc){ .z_loss = &z });
        CHECK(dt_backward(loss) == DT_OK && w->grad && gain->grad);
        CHECK(rows > 0 || (dt_item(loss) == 0 && dt_item(z) == 0));
        for (int i = 0; rows == 0 && i < 12; i++)
            CHECK_MSG(((double *)w->grad)[i] == seen[i],
                "an input without rows adds %g to a gradient", ((double *)w->grad)[i] - seen[i]);
        for (int i = 0; i < 4; i++) CHECK(isfinite(((double *)gain->grad)[i]));
        memcpy(seen, w->grad, sizeof seen);
        dt_reset(ctx);
    }
    none = dt_require_grad(dt_input(ctx, DT_F64, DT_SHAPE(0, 4), NULL));
    CHECK(dt_item(dt_sum_over(none, DT_ALL)) == 0 && dt_softmax(none) &&
          dt_swiglu(dt_reshape(none, DT_SHAPE(0, 2, 2))));
    dt_matmul_desc flat = { 0, 0 }, turned = { 1, 0 };
    dt_tensor *batch = dt_require_grad(dt_input(ctx, DT_F64, DT_SHAPE(0, 4, 3), NULL)),
              *shared = dt_require_grad(noise_input(ctx, DT_F64, DT_SHAPE(4, 2), 1, 1));
    dt_tensor *product = dt_matmul(batch, shared, turned);
    CHECK(product && product->shape.d[1] == 3 && product->shape.d[2] == 2 &&
          dt_backward_at(product, product, DT_BACKWARD) == DT_OK);
    for (int i = 0; i < 8; i++) CHECK(shared->grad && ((double *)shared->grad)[i] == 0);
    dt_reset(ctx);
    none = dt_require_grad(dt_input(ctx, DT_F64, DT_SHAPE(0, 4), NULL));
    dt_tensor *no_k = dt_matmul(dt_input(ctx, DT_F64, DT_SHAPE(2, 0), NULL), none, flat);
    for (int i = 0; i < 8; i++) CHECK(no_k && ((double *)no_k->data)[i] == 0);
    CHECK(dt_cumsum(none, 0) && dt_cumsum(none, 1) && dt_permute(none, (int[2]){ 1, 0 }) &&
          dt_reshape(none, DT_SHAPE(-1, 2)) && dt_select(none, 1, 3) &&
          dt_broadcast_to(none, DT_SHAPE(2, 0, 4)) &&
          dt_mean_dims(none, (dt_reduce_desc){ { 1 }, 1, 1 }));
    CHECK(dt_max_over(none, 1) && dt_topk(none, 2, NULL) && dt_transpose(none, 0, 1) &&
          dt_dropout(none, 0.5, 1, NULL));
    dt_tensor *two[2] = { none, none }, *empty = dt_input(ctx, DT_F64, DT_SHAPE(1, 0, 2, 2), NULL);
    CHECK(dt_concat(two, 2, 0) && dt_mul(none, gain) &&
          dt_rope(empty, dt_input(ctx, DT_I32, DT_SHAPE(1, 0), NULL), (dt_rope_desc){ 0 }) &&
          dt_attention(empty, empty, empty, (dt_attn_desc){ 0 }));
    dt_tensor *sum = dt_sum_over(none, 0),
              *alone = noise_input(ctx, DT_F64, DT_SHAPE(1, 3, 2, 2), 1, 1);
    for (int i = 0; i < 4; i++) CHECK(sum && ((double *)sum->data)[i] == 0);
    dt_tensor *no_keys =
        dt_attention(alone, empty, empty, (dt_attn_desc){ 0 }); /* no keys at all */
    for (int i = 0; i < 12; i++) CHECK(no_keys && ((double *)no_keys->data)[i] == 0);
    close_good(ctx, &m, "no rows");
}

/* A weighted sum of rows in every type: the values have few digits, so all types have the same
   results. x is a tensor or a parameter, whose gradient is f32. Row 4 of x is in no bag. */
static void bag_types(void) {
    enum { N = 3, K = 3, R = 5, W = 4 };
    static const int32_t at[N * K] = { 3, -1, 0, 2, 3, 1, -1, -1, -1 };
    static const dt_dtype types[] = { DT_F64, DT_F32, DT_BF16, DT_F16 };
    for (int i = 0; i < 8; i++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        dt_dtype type = types[i / 2], wide = dt__wide(type, 1);
        double x[R * W], w[N * K], dy[N * W], y[N * W] = { 0 }, dx[R * W] = { 0 },
                                                    dw[N * K] = { 0 };
        double raw[R * W], got[R * W];
        for (int e = 0; e < R * W; e++) x[e] = floor(4 * noise(1, (uint64_t)e)) / 4;
        for (int e = 0; e < N * K; e++) w[e] = floor(2 * noise(2, (uint64_t)e)) / 2;
        for (int e = 0; e < N * W; e++) dy[e] = floor(2 * noise(3, (uint64_t)e)) / 2;
        for (int e = 0; e < N * K * W; e++) {
            int j = e / W, c = e % W, to = j / K * W + c;
            if (at[j] < 0) continue;
            y[to] += w[j] * x[at[j] * W + c];
            dx[at[j] * W + c] += 2 * w[j] * dy[to];
            dw[j] += 2 * x[at[j] * W + c] * dy[to];
        }
        for (int e = 0; e < R * W; e++) put(raw, type, e, x[e]);
        dt_tensor *tx = i % 2 ? dt_param_at(ctx, "x", DT_SHAPE(R, W), DT_ZEROS,
                                    (dt_param_desc){ .dtype = type })
                              : dt_require_grad(dt_input(ctx, type, DT_SHAPE(R, W), raw));
        if (i % 2) dt_write(tx, raw);
        for (int e = 0; e < N * K; e++) put(raw, wide, e, w[e]);
        dt_tensor *tw = dt_require_grad(dt_input(ctx, wide, DT_SHAPE(N, K), raw)),
                  *rows = dt_input(ctx, DT_I32, DT_SHAPE(N, K), at);
        for (int e = 0; e < N * W; e++) put(raw, type, e, dy[e]);
        dt_tensor *ty = dt_embedding_bag(tx, rows, tw), *again = dt_embedding_bag(tx, rows, tw);
        dt_tensor *up = dt_input(ctx, type, DT_SHAPE(N, W), raw);
        CHECK(dt_read(ty, got) == DT_OK);
        for (int e = 0; e < N * W; e++)
            CHECK_MSG(get(got, type, e) == y[e], "case %d, y %d: %g", i, e, get(got, type, e));
        CHECK(dt_backward_at(dt_add(ty, again), up, DT_BACKWARD) == DT_OK);
        for (int e = 0; e < R * W && tx->grad; e++)
            CHECK_MSG(get(tx->grad, dt_grad_dtype(tx), e) == dx[e], "case %d, dx %d", i, e);
        for (int e = 0; e < N * K && tw->grad; e++)
            CHECK_MSG(get(tw->grad, wide, e) == dw[e], "case %d, dw %d", i, e);
        close_good(ctx, &m, "a bag");
    }
}

/* Ops on rows of an empty table, in every type: the experts of a rank may receive no rows. */
static void empty_tables(void) {
    static const dt_dtype types[] = { DT_F64, DT_F32, DT_BF16, DT_F16 };
    for (int i = 0; i < 4; i++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        int32_t none[6] = { -1, -1, -1, -1, -1, -1 };
        dt_tensor *x = dt_require_grad(dt_input(ctx, types[i], DT_SHAPE(0, 3), NULL)),
                  *at = dt_input(ctx, DT_I32, DT_SHAPE(2, 3), none),
                  *w = dt_require_grad(
                      dt_cast(dt_input(ctx, DT_I32, DT_SHAPE(2, 3), none), dt__wide(types[i], 1)));
        dt_tensor *y = dt_add(dt_embedding_bag(x, at, w), dt_sum_over(dt_gather_rows(x, at), 1));
        dt_tensor *scattered = dt_scatter_rows(dt_gather_rows(x, at), at, 0);
        CHECK(scattered && dt_count(scattered->shape) == 0);
        CHECK(dt_backward_at(dt_concat((dt_tensor *[2]){ y, scattered }, 2, 0),
                  noise_input(ctx, types[i], DT_SHAPE(2, 3), 1, 1), DT_BACKWARD) == DT_OK);
        for (int e = 0; y && w->grad && e < 6; e++)
            CHECK(get(y->data, types[i], e) == 0 && get(w->grad, w->dtype, e) == 0);
        CHECK(x->grad && w->grad);
        close_good(ctx, &m, "an empty table");
    }
}

/* The loss takes scratch memory only for its 3 rows: a chunk of 4,096 rows of 256 logits would take
   8 MB. (With OpenMP each thread has scratch memory for its matrix products.) */
static void few_rows(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *w =
        dt_param_at(ctx, "w", DT_SHAPE(256, 4), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F64 });
    dt_tensor *x = noise_input(ctx, DT_F64, DT_SHAPE(3, 4), 1, 1);
    dt_backward(dt_linear_cross_entropy(x, w, zero_ids(ctx, DT_SHAPE(3)), 1, (dt_loss_desc){ 0 }));
    CHECK_MSG(m.peak[DT_MEM_TEMP] < (size_t)dt__omp_threads() << 20,
        "%zu bytes of scratch for 3 rows", m.peak[DT_MEM_TEMP]);
    close_good(ctx, &m, "few rows");
}

/* max and topk take the first of equal values, which gets the gradient. */
static void ties(void) {
    static const double x[8] = { 1, 3, 3, 2, 0, 0, 0, 0 };
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *in = dt_require_grad(dt_input(ctx, DT_F64, DT_SHAPE(2, 4), x)), *index = NULL;
    dt_tensor *top = dt_topk(in, 3, &index), *max = dt_max_over(in, 1);
    static const int32_t indices[6] = { 1, 2, 3, 0, 1, 2 };
    for (int i = 0; index && i < 6; i++) CHECK(((int32_t *)index->data)[i] == indices[i]);
    CHECK(top && max && ((double *)max->data)[0] == 3 && ((double *)max->data)[1] == 0);
    dt_backward(dt_sum_over(dt_add(max, dt_sum_over(dt_slice(top, 1, 0, 1), 1)), DT_ALL));
    static const double want[8] = { 0, 2, 0, 0, 2, 0, 0, 0 };
    for (int i = 0; i < 8; i++) CHECK(in->grad && ((double *)in->grad)[i] == want[i]);
    close_good(ctx, &m, "ties");
}

/* The kept gradient of a loss inside a block still exists after the backward. */
static dt_tensor *kept_loss(dt_tensor *x, void *user) {
    (void)user;
    return dt_require_grad(dt_sum_over(dt_gelu(x), DT_ALL));
}

/* Elements of a result; the context's data are those of the CPU. */
static int holds(const dt_tensor *t, int n, const double *want) {
    int same = t && dt_count(t->shape) == n;
    for (int i = 0; same && i < n; i++) {
        double x = get(t->data, t->dtype, i);
        same = x == want[i] || (isnan(x) && isnan(want[i]));
    }
    return same;
}
static int grad_is(const dt_tensor *t, int n, const double *want) {
    dt_tensor grad = *t;
    grad.data = t->grad;
    return t->grad && holds(&grad, n, want);
}
#define HOLDS(t, ...) \
    CHECK(holds(t, (int)(sizeof((double[]){ __VA_ARGS__ }) / sizeof(double)), \
        (const double[]){ __VA_ARGS__ }))
#define GRAD_IS(t, ...) \
    CHECK(grad_is(t, (int)(sizeof((double[]){ __VA_ARGS__ }) / sizeof(double)), \
        (const double[]){ __VA_ARGS__ }))

/* Masks and selections with NaN and ties, in every floating-point type. Values and gradients are
   those of PyTorch. */
static void masks(dt_dtype dtype) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    const double n = NAN, in[2][4] = { { 1, n, 3, 2 }, { 1, 5, n, -1 } };
    dt_tensor *t[2];
    for (int k = 0; k < 2; k++) {
        double x[4];
        for (int i = 0; i < 4; i++) put(x, dtype, i, in[k][i]);
        t[k] = dt_require_grad(dt_input(ctx, dtype, DT_SHAPE(4), x));
    }
    dt_tensor *a = t[0], *b = t[1], *less = dt_less(a, b), *no_nan = dt_equal(a, a);
    HOLDS(less, 0, 0, 0, 0);
    HOLDS(dt_less(b, a), 0, 0, 0, 1);
    HOLDS(dt_less_equal(a, b), 1, 0, 0, 0);
    HOLDS(dt_equal(a, b), 1, 0, 0, 0);
    HOLDS(no_nan, 1, 0, 1, 1);
    CHECK(less && !less->needs_grad && no_nan && !no_nan->needs_grad);
    dt_tensor *most = dt_maximum(a, b), *least = dt_minimum(a, b);
    HOLDS(most, 1, n, n, 2);
    HOLDS(least, 1, n, n, -1);
    /* b where a is NaN: the NaN of a passes neither forward nor backward */
    dt_tensor *chosen = dt_where(no_nan, a, b),
              *filled = dt_masked_fill(b, dt_less(b, dt_affine(a, 0, 0)), -INFINITY);
    HOLDS(chosen, 1, 5, 3, 2);
    HOLDS(filled, 1, 5, n, -INFINITY);
    int32_t ids[3] = { 2, 0, 1 };
    HOLDS(dt_one_hot(dt_input(ctx, DT_I32, DT_SHAPE(3), ids), 3, dtype), 0, 0, 1, 1, 0, 0, 0, 1, 0);
    HOLDS(dt_argmax(a, 0), 1);
    HOLDS(dt_argmax(dt_slice(b, 0, 0, 2), DT_ALL), 1);
    HOLDS(dt_argmax(dt_reshape(chosen, DT_SHAPE(2, 2)), 0), 1, 0);
    HOLDS(dt_argmax(dt_reshape(dt_slice(chosen, 0, 0, 2), DT_SHAPE(2, 1)), 1), 0, 0);
    dt_tensor *sum = dt_sum_over(dt_add(dt_affine(most, 1, 0), dt_affine(least, 2, 0)), DT_ALL);
    dt_backward(dt_add(sum, dt_affine(dt_sum_over(chosen, DT_ALL), 4, 0)));
    GRAD_IS(a, 0.5 + 1 + 4, 1 + 2, 1 + 2 + 4, 1 + 4);
    GRAD_IS(b, 0.5 + 1, 1 + 2 + 4, 1 + 2, 2);
    close_good(ctx, &m, "masks");
}

static void kept_in_block(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *x = dt_require_grad(noise_input(ctx, DT_F64, DT_SHAPE(3, 4), 1, 1));
    dt_tensor *loss = dt_block(ctx, kept_loss, x, NULL);
    dt_backward(loss);
    dt_tensor *later = dt_sum_over(noise_input(ctx, DT_F64, DT_SHAPE(300), 2, 1), DT_ALL);
    CHECK(later && loss && loss->grad && *(double *)loss->grad == 1);
    const void *at = loss ? loss->grad : NULL;
    for (const dt__arena *a = ctx->grad_pool; a; a = a->next)
        for (const dt__chunk *c = a->chunks; c; c = c->next)
            CHECK_MSG((const char *)at < c->data || (const char *)at >= c->data + c->size,
                "the memory of a kept gradient was given back to the pool");
    close_good(ctx, &m, "a kept loss in a block");
}

/* Without input features the output is the bias. Without rows it is empty, and gradients are 0. */
static void empty_shapes(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *w =
        dt_param_at(ctx, "w", DT_SHAPE(3, 2), DT_ONES, (dt_param_desc){ .dtype = DT_F64 });
    dt_tensor *b =
        dt_param_at(ctx, "b", DT_SHAPE(3), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F64 });
    dt_tensor *none = dt_input(ctx, DT_F64, DT_SHAPE(2, 0), NULL),
              *flat = dt_input(ctx, DT_F64, DT_SHAPE(3, 0), NULL);
    dt_tensor *y = dt_linear(none, flat, b);
    for (int i = 0; y && i < 6; i++) CHECK(((double *)y->data)[i] == ((double *)b->data)[i % 3]);
    dt_tensor *rows = dt_gelu(dt_linear(dt_input(ctx, DT_F64, DT_SHAPE(0, 2), NULL), w, b));
    CHECK(y && rows && dt_count(rows->shape) == 0);
    dt_tensor *loss = weigh(dt_loss(rows, weigh(y, NULL), 1), NULL);
    CHECK(dt_item(loss) == 0 && dt_backward(loss) == DT_OK);
    for (int i = 0; i < 6; i++) CHECK(w && w->grad && ((double *)w->grad)[i] == 0);
    for (int i = 0; i < 3; i++) {
        double want = noise(99, (uint64_t)i) + noise(99, (uint64_t)i + 3);
        CHECK(b && b->grad && fabs(((double *)b->grad)[i] - want) < 1e-15);
    }
    close_good(ctx, &m, "empty shapes");
}

/* Scratch memory for the largest chunk suffices for every smaller one, also for the last. */
static void chunk_scratch(void) {
    static const int64_t size[][3] = { { 300, 64, 1024 }, { 300, 64, 595 }, { 260, 40, 1107 },
        { 768, 256, 1024 }, { 1760, 32, 512 }, { 1760, 32, 1107 } };
    for (int64_t k = 1; k < 2100; k += 7)
        for (int64_t n = 1; n < 2100; n += 131)
            CHECK(dt_matmul_work(n, k, DT_F32) <= dt_matmul_work(n, k + 7, DT_F32) &&
                  dt_matmul_work(n, k, DT_F32) <= dt_matmul_work(n + 131, k, DT_F32));
    for (size_t i = 0; i < sizeof size / sizeof *size; i++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        int64_t V = size[i][0], C = size[i][1], rows = size[i][2];
        int32_t *label = (int32_t *)room((size_t)rows * sizeof *label);
        dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(V, C), DT_NORMAL(0.1)), *x;
        for (int64_t r = 0; r < rows; r++) label[r] = (int32_t)(r % V);
        x = dt_require_grad(noise_input(ctx, DT_F32, DT_SHAPE(rows, C), 3, 1));
        dt_tensor *labels = dt_input(ctx, DT_I32, DT_SHAPE(rows), label);
        dt_tensor *loss = dt_linear_cross_entropy(x, w, labels, (double)rows, (dt_loss_desc){ 0 });
        dt_tensor *same = dt_cross_entropy(dt_linear(x, w, NULL), labels, (double)rows);
        CHECK(fabs(dt_item(loss) - dt_item(same)) < 1e-6 && dt_backward(loss) == DT_OK);
        free(label);
        close_good(ctx, &m, "a chunk's scratch");
    }
}

typedef struct recomputed {
    dt_tensor *p, *w;
    int nested;
} recomputed;

static dt_tensor *activated(dt_tensor *x, void *user) {
    recomputed *r = (recomputed *)user;
    return dt_linear_at(x, r->w, NULL, (dt_linear_desc){ .activation = DT_ACT_GELU });
}

static dt_tensor *around_activated(dt_tensor *x, void *user) {
    recomputed *r = (recomputed *)user;
    dt_tensor *h = activated(x, user);
    dt_tensor *y =
        dt_block_at(x->ctx, activated, h, user, (dt_block_desc){ .recompute = r->nested > 1 });
    return dt_linear(y, r->w, NULL);
}

/* Gradients of a small model with 0, 1 or 2 levels of recomputed blocks, by a full backward or by
   halves. kept: the user keeps the gradient of a block's output. */
static void recompute_grads(dt_dtype type, int nested, int halves, int kept, float *grads) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    recomputed r = { NULL, NULL, nested };
    dt_param_desc frozen = { .frozen = 1, .dtype = type };
    r.p = dt_param_at(ctx, "p", DT_SHAPE(8, 8), DT_NORMAL(1), (dt_param_desc){ .dtype = type });
    r.w = dt_param_at(ctx, "w", DT_SHAPE(8, 8), DT_NORMAL(0.7), (dt_param_desc){ .dtype = type });
    dt_tensor *f = dt_param_at(ctx, "f", DT_SHAPE(8, 8), DT_NORMAL(1), frozen);
    dt_tensor *x = dt_block_at(ctx, around_activated, noise_input(ctx, type, DT_SHAPE(8, 8), 5, 1),
        &r, (dt_block_desc){ .recompute = nested > 0 });
    dt_tensor *t = dt_block_at(ctx, activated, x, &r, (dt_block_desc){ .recompute = nested > 0 });
    if (kept) dt_require_grad(t);
    /* the first reader of v, so the last to add to v's gradient */
    dt_tensor *v = dt_gelu(t), *square = dt_mul(v, v);
    dt_tensor *u =
        dt_linear_at(r.p, f, NULL, (dt_linear_desc){ .residual = v }); /* a parameter as x */
    dt_tensor *loss = dt_mse(dt_add(u, square), noise_input(ctx, type, DT_SHAPE(8, 8), 6, 1), 64);
    if (halves)
        CHECK(dt_backward_input(loss) == DT_OK && dt_backward_weight(loss) == DT_OK);
    else
        CHECK(dt_backward(loss) == DT_OK);
    memset(grads, 0, 192 * sizeof *grads);
    if (r.p->grad) memcpy(grads, r.p->grad, 64 * sizeof *grads);
    if (r.w->grad) memcpy(grads + 64, r.w->grad, 64 * sizeof *grads);
    for (int i = 0; kept && t->grad && i < 64; i++) grads[128 + i] = (float)get(t->grad, type, i);
    close_good(ctx, &m, "recompute");
}

/* Recomputation changes no bit, in f32 and in bf16, where one rounding too many would show. */
static void recompute_bits(void) {
    float want[192], got[192];
    for (int type = 0; type < 2; type++)
        for (int kept = 0; kept < 2; kept++) {
            recompute_grads(type ? DT_BF16 : DT_F32, 0, 0, kept, want);
            for (int way = 1; way < 6; way++) {
                recompute_grads(type ? DT_BF16 : DT_F32, way / 2, way % 2, kept, got);
                CHECK_MSG(memcmp(want, got, sizeof got) == 0,
                    "type %d, kept %d, recompute %d, halves %d: bits differ", type, kept, way / 2,
                    way % 2);
            }
        }
}

/* The gradient of a broadcast bf16 parameter is summed in f32. */
static void broadcast_narrow(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *b = dt_param_at(ctx, "b", DT_SHAPE(2), DT_ONES, (dt_param_desc){ .dtype = DT_BF16 });
    dt_tensor *c =
        dt_param_at(ctx, "c", DT_SHAPE(3, 1, 2), DT_ONES, (dt_param_desc){ .dtype = DT_BF16 });
    dt_tensor *d =
        dt_param_at(ctx, "d", DT_SHAPE(1, 515, 1), DT_ONES, (dt_param_desc){ .dtype = DT_BF16 });
    dt_tensor *e =
        dt_param_at(ctx, "e", DT_SHAPE(1, 3, 1), DT_ONES, (dt_param_desc){ .dtype = DT_BF16 });
    dt_tensor *x = noise_input(ctx, DT_BF16, DT_SHAPE(3, 515, 2), 9, 1),
              *y = dt_reshape(x, DT_SHAPE(2, 3, 515));
    dt_tensor *sum = dt_add(dt_sum_over(dt_add(x, b), DT_ALL), dt_sum_over(dt_add(x, c), DT_ALL));
    sum = dt_add(sum, dt_add(dt_sum_over(dt_add(x, d), DT_ALL), dt_sum_over(dt_add(y, e), DT_ALL)));
    CHECK(dt_backward(sum) == DT_OK);
    for (int i = 0; i < 2; i++) CHECK(b->grad && ((float *)b->grad)[i] == 1545);
    for (int i = 0; i < 6; i++) CHECK(c->grad && ((float *)c->grad)[i] == 515);
    for (int i = 0; i < 515; i++) CHECK(d->grad && ((float *)d->grad)[i] == 6);
    /* bf16 would round 515 to 516 */
    for (int i = 0; i < 3; i++) CHECK(e->grad && ((float *)e->grad)[i] == 1030);
    close_good(ctx, &m, "a 16-bit parameter that is broadcast");
}

/* ---- scalars of other types, dt_grad_check, dt_print ---- */

/* An f64 loss and f32 terms: the result has the wider type of two scalars, the type of the tensor
   with dimensions otherwise. The gradients are those of casts by hand. */
static void mixed_scalars(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    float x[3] = { 1, -2, 4 }, g[3];
    double y[3] = { 0.5, 1, 2 };
    dt_tensor *a = dt_require_grad(dt_input(ctx, DT_F32, DT_SHAPE(3), x));
    dt_tensor *b = dt_input(ctx, DT_F32, DT_SHAPE(3), (float[]){ 0, 0, 0 });
    dt_tensor *c = dt_input(ctx, DT_F64, DT_SHAPE(3), y);
    dt_tensor *loss = dt_mse(a, b, 3), *term = dt_affine(dt_mean_over(a, DT_ALL), 0.5, 1);
    dt_tensor *sum = dt_add(loss, term), *product = dt_mul(term, loss);
    CHECK(sum->dtype == DT_F64 && dt_item(sum) == 8.5 && product->dtype == DT_F64 &&
          dt_item(product) == 10.5);
    CHECK(dt_sub(term, loss)->dtype == DT_F64 && dt_div(loss, term)->dtype == DT_F64 &&
          dt_maximum(term, loss)->dtype == DT_F64 && dt_item(dt_less(term, loss)) == 1);
    dt_tensor *scaled = dt_mul(a, loss), *wide = dt_add(term, c);
    CHECK(scaled->dtype == DT_F32 && dt_add(loss, a)->dtype == DT_F32 && wide->dtype == DT_F64);
    dt_read(scaled, g);
    CHECK(g[0] == 7 && g[1] == -14 && g[2] == 28);
    dt_tensor *half = dt_cast(term, DT_BF16);
    CHECK(dt_add(half, term)->dtype == DT_F32 && dt_add(half, a)->dtype == DT_F32);
    dt_backward(dt_add(sum, product)); /* d loss + d term + loss d term + term d loss */
    dt__move_now(ctx, g, a->grad, sizeof g);
    for (int i = 0; i < 3; i++)
        CHECK_MSG(
            fabs(g[i] - (x[i] * 2 / 3 * 2.5 + 0.5 / 3 * 8)) < 1e-6, "gradient %d: %.9g", i, g[i]);
    close_good(ctx, &m, "mixed scalars");
    m = METER;
    ctx = open_ctx(&m);
    a = dt_input(ctx, DT_F32, DT_SHAPE(3), x);
    CHECK(dt_add(a, dt_input(ctx, DT_F64, DT_SHAPE(3), y)) == NULL &&
          strstr(dt_error_text(ctx), "types must be equal"));
    close_ctx(ctx, &m, "mixed tensors");
    static const int32_t two[4] = { 2, 2, 2, 2 };
    for (int i = 0; i < 6; i++) { /* a float and integers, one or both of them scalars */
        m = METER;
        ctx = open_ctx(&m);
        a = dt_input(ctx, DT_F32, i < 4 ? DT_SCALAR : DT_SHAPE(3), x);
        dt_tensor *b =
            dt_input(ctx, DT_I32, i < 2 || i > 3 ? DT_SHAPE(i < 2 ? 4 : 3) : DT_SCALAR, two);
        CHECK((i % 2 ? dt_equal(a, b) : dt_add(a, b)) == NULL);
        CHECK_MSG(strstr(dt_error_text(ctx), i % 2 ? "dt_equal(dt_input, dt_input): f32"
                                                   : "dt_add(dt_input, dt_input): f32") &&
                      strstr(dt_error_text(ctx), "and i32") &&
                      strstr(dt_error_text(ctx), "not for integers"),
            "%s", dt_error_text(ctx));
        close_ctx(ctx, &m, "a float and integers");
    }
    m = METER;
    ctx = open_ctx(&m);
    half = dt_input(ctx, DT_F16, DT_SCALAR, x);
    CHECK(dt_add(half, dt_input(ctx, DT_BF16, DT_SCALAR, x)) == NULL);
    close_ctx(ctx, &m, "f16 and bf16");
}

/* y = x^3 by an op of the user; `wrong`: the element whose gradient is off by `error`. */
typedef struct cube_case {
    dt_tensor *x, *w;
    int64_t wrong;
    double error;
    int calls;
} cube_case;

static dt_status cube_back(dt_node *n) {
    const cube_case *c = *(cube_case *const *)n->saved;
    const double *x = (const double *)n->in[0]->data, *dy = (const double *)n->out->grad;
    for (int64_t i = 0; dt_wants(n, 0) && i < dt_count(n->in[0]->shape); i++)
        ((double *)dt_grad(n, 0))[i] += (3 * x[i] * x[i] + (i == c->wrong ? c->error : 0)) * dy[i];
    return DT_OK;
}

static dt_tensor *cube_loss(void *user) {
    cube_case *c = (cube_case *)user;
    dt_tensor *y = dt_new(c->x->ctx, DT_F64, c->x->shape);
    c->calls++;
    for (int64_t i = 0; y && i < dt_count(y->shape); i++)
        ((double *)y->data)[i] = pow(((double *)c->x->data)[i], 3);
    cube_case **saved = (cube_case **)dt_record_saved(
        y, (dt_record_desc){
               .name = "cube", .in = { c->x }, .backward = cube_back, .saved_bytes = sizeof c });
    if (saved) *saved = c;
    return dt_sum_over(dt_mul(y, c->w), DT_ALL);
}

static void grad_check(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    double x[6] = { 0.5, -1, 2, 0.25, 3, -0.75 }, w[6] = { 1, 2, -1, 3, 0.5, 1 }, after[6];
    dt_tensor *param =
        dt_param_at(ctx, "w", DT_SHAPE(2, 3), DT_ZEROS, (dt_param_desc){ .dtype = DT_F64 });
    dt_write(param, w);
    for (int wrong = -1; wrong < 6; wrong++) {
        cube_case c = { .x = dt_require_grad(dt_input(ctx, DT_F64, DT_SHAPE(2, 3), x)),
            .w = param,
            .wrong = wrong,
            .error = 0.01 };
        dt_tensor *inputs[2] = { param, c.x };
        dt_grad_difference d = dt_grad_check(ctx, cube_loss, &c, inputs, 2, 0);
        CHECK(c.calls == 1 + 4 * 6);
        if (wrong < 0) CHECK_MSG(d.difference < 1e-8, "dt_grad_check: %.2e", d.difference);
        double right = wrong < 0 ? 0 : 3 * x[wrong] * x[wrong] * w[wrong];
        if (wrong >= 0)
            CHECK_MSG(d.tensor == c.x && d.element == wrong && fabs(d.numeric - right) < 1e-6 &&
                          fabs(d.gradient - right - 0.01 * w[wrong]) < 1e-9 &&
                          fabs(d.difference - fabs(0.01 * w[wrong]) / fmax(1, fabs(right))) < 1e-7,
                "dt_grad_check: element %d of %s: %.3g and %.3g, %.3g", (int)d.element,
                d.tensor ? d.tensor->name : "none", d.gradient, d.numeric, d.difference);
        dt_read(c.x, after);
        CHECK(memcmp(after, x, sizeof x) == 0);
        dt_read(param, after);
        CHECK(memcmp(after, w, sizeof w) == 0);
        dt_reset(ctx);
    }
    close_good(ctx, &m, "dt_grad_check");
    for (int kind = 0; kind < 3; kind++) {
        m = METER;
        ctx = open_ctx(&m);
        cube_case c = { .x = dt_input(ctx, kind == 1 ? DT_F32 : DT_F64, DT_SHAPE(2), x) };
        if (kind == 1) dt_require_grad(c.x);
        dt_grad_difference d = dt_grad_check(ctx, kind == 2 ? NULL : cube_loss, &c, &c.x, 1, 0);
        CHECK(d.difference == HUGE_VAL && !d.tensor && dt_error(ctx) == DT_ERR_ARG);
        close_ctx(ctx, &m, "dt_grad_check, refused");
    }
    CHECK(dt_grad_check(NULL, cube_loss, NULL, NULL, 0, 0).difference == HUGE_VAL);
}

typedef struct printed {
    char text[4000];
    size_t used;
} printed;
static void print_log(void *user, int level, int rank, const char *text) {
    printed *p = (printed *)user;
    (void)rank;
    if (level == DT_LOG_NOTICE)
        p->used += (size_t)snprintf(p->text + p->used, sizeof p->text - p->used, "%s\n", text);
}

static void check_print(dt_ctx *ctx, printed *p, dt_tensor *t, const char *expected) {
    p->used = 0;
    p->text[0] = 0;
    dt_print(t);
    CHECK_MSG(strcmp(p->text, expected) == 0, "dt_print:\n%s", p->text);
    CHECK(dt_error(ctx) == DT_OK);
}

static void print(void) {
    printed p = { .used = 0 };
    dt_host host = *dt_host_default();
    static float many[60 * 20];
    host.user = &p;
    host.log = print_log;
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &host });
    float x[6] = { 1, -2.5f, NAN, 1e-7f, 123456, INFINITY };
    int64_t ids[3] = { 7, -1, (int64_t)1 << 60 };
    for (int i = 0; i < 1200; i++) many[i] = (float)i;
    check_print(ctx, &p, dt_input(ctx, DT_F32, DT_SHAPE(2, 3), x),
        "dt_input f32 (2,3)\n[[1, -2.5, nan],\n [1e-07, 1.2346e+05, inf]]\n");
    check_print(ctx, &p, dt_input(ctx, DT_F32, DT_SCALAR, x), "dt_input f32 (): 1\n");
    check_print(ctx, &p, dt_input(ctx, DT_I64, DT_SHAPE(1, 1, 3), ids),
        "dt_input i64 (1,1,3)\n[[[7, -1, 1152921504606846976]]]\n");
    check_print(ctx, &p, dt_input(ctx, DT_F32, DT_SHAPE(0, 3), x), "dt_input f32 (0,3)\n[]\n");
    check_print(ctx, &p, dt_input(ctx, DT_F32, DT_SHAPE(60, 20), many),
        "dt_input f32 (60,20)\n[[0, 1, 2, ..., 17, 18, 19],\n [20, 21, 22, ..., 37, 38, 39],\n"
        " [40, 41, 42, ..., 57, 58, 59],\n ...,\n [1140, 1141, 1142, ..., 1157, 1158, 1159],\n"
        " [1160, 1161, 1162, ..., 1177, 1178, 1179],\n"
        " [1180, 1181, 1182, ..., 1197, 1198, 1199]]\n");
    dt_print(NULL);
    dt_ctx_free(ctx);
}

/* ln of softmax is exact for probabilities that round to 0, and for logits whose e^x overflows. */
static void log_softmax_range(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    const float logits[6] = { 0, -2000, 3, 3000, 3000, -INFINITY };
    float y[6];
    dt_tensor *x = dt_require_grad(dt_input(ctx, DT_F32, DT_SHAPE(2, 3), logits));
    dt_tensor *out = dt_log_softmax(x);
    CHECK(dt_read(out, y) == DT_OK &&
          dt_backward(dt_sum_over(dt_select(out, 1, 0), DT_ALL)) == DT_OK);
    CHECK(fabsf(y[1] + 2003.0486f) < 1e-3f && fabsf(y[2] + 0.0486f) < 1e-4f);
    CHECK(fabsf(y[3] + 0.6931472f) < 1e-6f && y[4] == y[3] && y[5] == -INFINITY);
    for (int i = 0; i < 6; i++) {
        float want = (i % 3 == 0) - expf(y[i]);
        CHECK_MSG(x->grad && fabsf(((float *)x->grad)[i] - want) < 1e-6f, "gradient %d", i);
    }
    close_good(ctx, &m, "log-softmax");
}

/* The gradient of x times detached x is x, not 2 x; a detached tensor has no history to go back
   through, also not that of a parameter or of a recomputed block. */
static dt_tensor *detach_block(dt_tensor *x, void *user) {
    (void)user;
    dt_tensor *y = dt_exp(x);
    return dt_mul(y, dt_detach(y));
}

static void detached(void) {
    for (int recompute = 0; recompute < 2; recompute++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4), DT_NORMAL(1)), *stopped = dt_detach(w);
        CHECK(stopped && !stopped->needs_grad && dt_detach(NULL) == NULL);
        dt_tensor *x = dt_mul(w, stopped);
        x = dt_block_at(ctx, detach_block, x, NULL, (dt_block_desc){ .recompute = recompute });
        CHECK(dt_backward(dt_sum_over(x, DT_ALL)) == DT_OK);
        for (int i = 0; i < 4; i++) { /* of e^(w c) d with c = w and d = e^(w c) */
            float at = ((float *)w->data)[i], want = at * expf(2 * at * at);
            CHECK_MSG(fabsf(((float *)w->grad)[i] - want) < 1e-5f * (1 + fabsf(want)),
                "recompute %d: gradient %d is %g, not %g", recompute, i, ((float *)w->grad)[i],
                want);
        }
        CHECK(memcmp(stopped->data, w->data, 16) == 0);
        close_good(ctx, &m, "detach");
    }
}

/* A layer normalization without a bias is one with a bias of zeros. */
static void layernorm_without_bias(void) {
    double zeros[6] = { 0 }, out[2][30], dx[2][30], dgain[2][6];
    for (int i = 0; i < 2; i++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        dt_tensor *x = dt_require_grad(noise_input(ctx, DT_F64, DT_SHAPE(5, 6), 1, 1)),
                  *gain = dt_require_grad(noise_input(ctx, DT_F64, DT_SHAPE(6), 2, 1)),
                  *bias = i ? NULL : dt_input(ctx, DT_F64, DT_SHAPE(6), zeros),
                  *y = dt_layernorm(x, gain, bias, 0);
        dt_read(y, out[i]);
        dt_backward(dt_sum_over(dt_mul(y, dt_mul(y, y)), DT_ALL));
        dt__move_now(ctx, dx[i], x->grad, sizeof dx[i]);
        dt__move_now(ctx, dgain[i], gain->grad, sizeof dgain[i]);
        close_good(ctx, &m, "a layer normalization without a bias");
    }
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0 && memcmp(dx[0], dx[1], sizeof dx[0]) == 0 &&
          memcmp(dgain[0], dgain[1], sizeof dgain[0]) == 0 && out[0][3] != 0 && dx[0][3] != 0);
}

/* The result of an op that is composed of others has its name. */
static void composed_names(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *x = noise_input(ctx, DT_F32, DT_SHAPE(1, 4, 4, 2), 1, 1),
              *w = noise_input(ctx, DT_F32, DT_SHAPE(3, 2, 2, 2), 2, 1),
              *row = noise_input(ctx, DT_F32, DT_SHAPE(1, 4, 2), 3, 1),
              *kernel = noise_input(ctx, DT_F32, DT_SHAPE(3, 2, 2), 4, 1),
              *two = noise_input(ctx, DT_F32, DT_SHAPE(2), 5, 1);
    CHECK(!strcmp(dt_log_softmax(x)->name, "dt_log_softmax"));
    CHECK(!strcmp(dt_conv2d(x, w, NULL, (dt_window_desc){ 0 })->name, "dt_conv2d"));
    CHECK(!strcmp(dt_conv1d(row, kernel, NULL, (dt_window_desc){ 0 })->name, "dt_conv1d"));
    CHECK(!strcmp(dt_group_norm(x, 1, two, two, 0)->name, "dt_group_norm"));
    close_good(ctx, &m, "composed ops");
}

/* A part without an adapter gets zeros, also if another part's adapter overflows. */
static void adapter_overflow(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    float big[4] = { 3e38f, 3e38f, 3e38f, 3e38f }, ones[4] = { 1, 1, 1, 1 }, h[4];
    dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(1, 2), ones),
              *w = dt_input(ctx, DT_F32, DT_SHAPE(2, 1, 2), ones);
    dt_adapter parts[2] = { { .a = dt_input(ctx, DT_F32, DT_SHAPE(1, 2), big),
                                .b = dt_input(ctx, DT_F32, DT_SHAPE(1, 1), ones),
                                .scale = 1 },
        { .a = NULL } };
    dt_tensor *y = dt_linear_at(x, w, NULL, (dt_linear_desc){ .adapters = parts, .parts = 2 });
    CHECK(y && dt_read(y, h) == DT_OK && isinf(h[0]) && h[1] == 2);
    close_good(ctx, &m, "an adapter that overflows");
}

int main(int argc, char **argv) {
    if (argc > 1) golden_folder = argv[1];
    test_finite_differences();
    test_golden_ops();
    test_narrow();
    test_refusals();
    no_rows();
    bag_types();
    empty_tables();
    few_rows();
    empty_shapes();
    ties();
    for (int dtype = DT_F32; dtype <= DT_F64; dtype++) masks((dt_dtype)dtype);
    kept_in_block();
    chunk_scratch();
    recompute_bits();
    broadcast_narrow();
    mixed_scalars();
    grad_check();
    print();
    log_softmax_range();
    detached();
    layernorm_without_bias();
    composed_names();
    adapter_overflow();
    return check_done("test_ops");
}
