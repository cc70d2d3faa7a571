/* test_layers.c - layers for tensor, sequence and context parallelism: values, gradients, bytes
   sent, bytes kept

   Each layer runs on several ranks and must equal the plain op on one rank with the full tensors.
   The ranks' shards of a logical tensor are assembled into the full tensor for the comparison.
   Values are functions of the index in the full tensor, so they are equal in every layout.
   test_matrix.c tests complete models. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "tests/comm/ranks.h"

// ==== Helpers ===================================================================================

/* A value in [-1, 1) from a tensor's number and an index in the tensor. */
static double noise(int tensor, int64_t i) {
    uint64_t h = mix((uint64_t)(tensor + 1) * 1000003u + mix((uint64_t)i + 77));
    return (double)(h >> 11) / 4503599627370496.0 - 1;
}

static void *zeros(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) exit(1);
    return p;
}

/* Stores x as element i of an array of dtype. */
static void put_value(void *buf, dt_dtype dtype, size_t i, double x) {
    put(buf, dtype, i, narrow(dtype) ? rounded(dtype, (float)x) : x);
}

/* Index in the full tensor of element i of shard `part` of `parts` along dim. dim below 0: not
   sharded. */
static int64_t global_of(dt_shape whole, int dim, int parts, int part, int64_t i) {
    int64_t inner = 1, rows;
    if (dim < 0 || parts == 1) return i;
    for (int d = dim + 1; d < whole.nd; d++) inner *= whole.d[d];
    rows = whole.d[dim] / parts * inner;
    return i / rows * whole.d[dim] * inner + part * rows + i % rows;
}

static dt_shape shard_shape(dt_shape whole, int dim, int parts) {
    if (dim >= 0) whole.d[dim] /= parts;
    return whole;
}

/* This rank's shard of a tensor of noise. */
static dt_tensor *noise_part(
    dt_ctx *ctx, dt_dtype dtype, dt_shape whole, int dim, dt_comm *comm, int tensor) {
    int n = dim < 0 ? 1 : dt_comm_size(comm);
    dt_shape shape = shard_shape(whole, dim, n);
    char *host = (char *)zeros((size_t)dt_count(shape) * dt_dtype_size(dtype));
    for (int64_t i = 0; i < dt_count(shape); i++)
        put_value(
            host, dtype, (size_t)i, noise(tensor, global_of(whole, dim, n, dt_comm_rank(comm), i)));
    dt_tensor *t = dt_input(ctx, dtype, shape, host);
    free(host);
    return t;
}

/* A user's op: the sum of x[i] * noise(tensor, place[i]); a NULL place means place[i] = i. */
typedef struct weigh_saved {
    int tensor;
    const int64_t *place;
} weigh_saved;

static double weight_of(const weigh_saved *s, int64_t i) {
    return noise(s->tensor, s->place ? s->place[i] : i);
}

static dt_status weigh_back(dt_node *n) {
    const weigh_saved *s = (const weigh_saved *)n->saved;
    dt_tensor *x = n->in[0];
    double up = *(const double *)n->out->grad;
    void *dx = dt_wants(n, 0) ? dt_grad(n, 0) : NULL;
    for (int64_t i = 0; dx && i < dt_count(x->shape); i++)
        put_value(dx, x->dtype, (size_t)i, get(dx, x->dtype, (size_t)i) + up * weight_of(s, i));
    return DT_OK;
}

/* place must live until dt_reset. */
static dt_tensor *weigh(dt_tensor *x, int tensor, const int64_t *place) {
    weigh_saved s = { tensor, place };
    dt_tensor *out = x ? dt_new(x->ctx, DT_F64, DT_SCALAR) : NULL;
    double sum = 0;
    if (!out) return NULL;
    for (int64_t i = 0; i < dt_count(x->shape); i++)
        sum += get(x->data, x->dtype, (size_t)i) * weight_of(&s, i);
    *(double *)out->data = sum;
    weigh_saved *saved = (weigh_saved *)dt_record_saved(
        out, (dt_record_desc){
                 .name = "weigh", .in = { x }, .backward = weigh_back, .saved_bytes = sizeof s });
    if (saved) *saved = s;
    return out;
}

/* Returns NULL if |a - b| <= tol * max(1, max |b|) for every element, else says what differs. */
static const char *unequal(
    const double *a, const double *b, size_t n, double tol, char *text, size_t bytes) {
    double most = 1;
    for (size_t i = 0; i < n; i++) most = fmax(most, fabs(b[i]));
    for (size_t i = 0; i < n; i++)
        if (!(fabs(a[i] - b[i]) <= tol * most)) {
            snprintf(text, bytes, "[%zu] %.17g, one rank %.17g", i, a[i], b[i]);
            return text;
        }
    return NULL;
}

static dt_mesh mesh_of_one_axis(dt_ctx *ctx, char axis) {
    int n = dt_comm_size(dt_world(ctx));
    return dt_mesh_make(
        ctx, (dt_mesh_desc){ .tp = axis == 't' ? n : 1, .cp = axis == 'c' ? n : 1 });
}

// ==== 1. Column- and row-parallel layers ========================================================

/* y = act(x w1^T + b1) w2^T + b2 + r. F is divisible by 7 only, so the last ranks' shards reach
   past the end. */

enum { LB = 12, LS = 12, LC = 3, LF = 7, LO = 5, L_MOST = LB * LS * LO };
enum { L_Y = 0, L_DX, L_DR, L_DW1, L_DB1, L_DW2, L_DB2, L_ALL };
static const int layer_count[L_ALL] = { LB * LS * LO, LB *LS *LC, LB *LS *LO, LF *LC, LF, LO *LF,
    LO };
static const char *const layer_names[L_ALL] = { "y", "dx", "dr", "dw1", "db1", "dw2", "db2" };

enum { ROOT = 0, BLOCK, RECOMPUTED, WRAPS };
typedef struct layer_case {
    int bias, residual, activation, x_grad, outside, wrap, halves;
} layer_case;
enum { ONES = 16, LAYER_CASES = ONES * 3 * WRAPS * 2 };

static layer_case layer_case_of(int i) {
    int one = i % ONES, rest = i / ONES;
    return (layer_case){ one & 1, one >> 1 & 1, one >> 2 & 1 ? DT_ACT_GELU : DT_ACT_NONE, one >> 3,
        rest % 3 - 1, rest / 3 % WRAPS, rest / 3 / WRAPS };
}

typedef struct layer_values {
    double v[L_ALL][L_MOST];
} layer_values;
typedef struct layer_world {
    layer_values one[ONES], got[4];
} layer_world;
typedef struct layer_rank {
    layer_case c;
    dt_comm *tp;
    dt_placement outside;
    dt_tensor *p[4]; /* w1, b1, w2, b2 */
    dt_tensor *r, *entered;
    int plain; /* 1: use the plain ops */
} layer_rank;

static dt_tensor *layer_forward(dt_tensor *x, void *user) {
    layer_rank *k = (layer_rank *)user;
    dt_linear_desc act = { .activation = k->c.activation }, add = { .residual = k->r };
    dt_tensor *b1 = k->c.bias ? k->p[1] : NULL, *b2 = k->c.bias ? k->p[3] : NULL;
    if (k->plain) return dt_linear_at(dt_linear_at(x, k->p[0], b1, act), k->p[2], b2, add);
    dt_tensor *h = dt_column_linear(x, k->p[0], b1, act, k->tp, k->outside);
    k->entered = h && h->producer ? h->producer->in[0] : NULL;
    return dt_row_linear(h, k->p[2], b2, k->r, k->tp, k->outside);
}

/* Copies a gradient into the full array: a shard at its global indices, a replicated gradient
   unchanged. */
static void store_param_grad(const dt_tensor *t, double *full) {
    dt__slice_walk walk = dt__slice_begin(t->param->full, t->param->slice);
    while (dt__slice_next(&walk))
        for (int64_t i = 0; t->grad && i < walk.count; i++)
            full[walk.global + i] = get(t->grad, dt_grad_dtype(t), (size_t)(walk.local + i));
}

static void store_shard(
    const dt_tensor *t, const void *from, dt_shape whole, int dim, dt_comm *comm, double *full) {
    int n = dim < 0 ? 1 : dt_comm_size(comm);
    for (int64_t i = 0; from && i < dt_count(t->shape); i++)
        full[global_of(whole, dim, n, dt_comm_rank(comm), i)] = get(from, t->dtype, (size_t)i);
}

/* Bytes that one rank sends in forward and backward. X, Y: bytes sent to gather the full input and
   result. A gathered tensor that a block has freed is gathered again in the backward; if the
   backward runs in halves, in the weight half, which alone reads it: the input half frees the
   gathered tensor of a root or of a second run. A recomputed block repeats the communication of its
   forward. The root frees nothing before its backward begins. */
static void layer_bytes(layer_case c, size_t n, size_t *forward, size_t *backward) {
    size_t X = (size_t)LB * LS * LC * 8 / n * (n - 1), Y = (size_t)LB * LS * LO * 8 / n * (n - 1);
    int again = c.wrap == BLOCK || c.halves;
    *forward = c.outside < 0 ? 2 * Y : X + Y;
    *backward = c.outside < 0 ? c.x_grad * 2 * X : Y + (size_t)(c.x_grad * (1 + again)) * X;
    if (c.wrap == RECOMPUTED) *backward += *forward;
}

static void layer_run(dt_ctx *ctx, layer_rank *k, layer_values *got) {
    dt_shape x_shape = DT_SHAPE(LB, LS, LC), y_shape = DT_SHAPE(LB, LS, LO);
    int dim = k->plain ? -1 : k->c.outside, n = dim < 0 ? 1 : dt_comm_size(k->tp);
    int64_t place[L_MOST];
    size_t before = dt_comm_bytes(ctx, DT_AXIS_TP), forward = 0, backward = 0;
    dt_tensor *x = noise_part(ctx, DT_F64, x_shape, dim, k->tp, 1);
    if (k->c.x_grad) dt_require_grad(x);
    k->r = k->c.residual ? dt_require_grad(noise_part(ctx, DT_F64, y_shape, dim, k->tp, 2)) : NULL;
    k->entered = NULL;
    dt_tensor *y = k->c.wrap == ROOT || k->plain
                       ? layer_forward(x, k)
                       : dt_block_at(ctx, layer_forward, x, k,
                             (dt_block_desc){ .recompute = k->c.wrap == RECOMPUTED });
    if (!y) return;
    size_t between = dt_comm_bytes(ctx, DT_AXIS_TP);
    int drops = k->c.wrap != ROOT && dim >= 0 && k->c.x_grad && dt_comm_size(k->tp) > 1;
    if (drops) CHECK_MSG(k->entered && !k->entered->data, "the gathered tensor was not dropped");
    for (int64_t i = 0; i < dt_count(y->shape); i++)
        place[i] = global_of(y_shape, dim, n, dt_comm_rank(k->tp), i);
    store_shard(y, y->data, y_shape, dim, k->tp, got->v[L_Y]);
    dt_tensor *loss = weigh(y, 3, place);
    if (k->c.halves)
        dt_backward_input(loss), dt_backward_weight(loss);
    else
        dt_backward(loss);
    layer_bytes(k->c, (size_t)dt_comm_size(k->tp), &forward, &backward);
    if (!k->plain)
        CHECK_MSG(
            between - before == forward && dt_comm_bytes(ctx, DT_AXIS_TP) - between == backward,
            "outside %d, wrap %d, halves %d over %d: %zu and %zu bytes, formula %zu and %zu",
            k->c.outside, k->c.wrap, k->c.halves, dt_comm_size(k->tp), between - before,
            dt_comm_bytes(ctx, DT_AXIS_TP) - between, forward, backward);
    if (k->c.x_grad) store_shard(x, x->grad, x_shape, dim, k->tp, got->v[L_DX]);
    if (k->r) store_shard(k->r, k->r->grad, y_shape, dim, k->tp, got->v[L_DR]);
    for (int p = 0; p < 4; p++)
        if (k->c.bias || p % 2 == 0) store_param_grad(k->p[p], got->v[L_DW1 + p]);
}

/* Rank 0 compares after all ranks have stored their results. A tensor is sharded, replicated, or
   partial on each rank. */
static void layer_compare(layer_case c, int one, int ranks, layer_world *w) {
    char text[200];
    static double sum[L_MOST];
    for (int t = 0; t < L_ALL; t++) {
        int cut = (t >= L_DW1 && t <= L_DW2) || c.outside >= 0;
        for (int r = 0; r < (cut ? 1 : ranks); r++) {
            memcpy(sum, w->got[r].v[t], sizeof sum);
            for (int q = 1; q < ranks && cut; q++)
                for (int i = 0; i < layer_count[t]; i++) sum[i] += w->got[q].v[t][i];
            const char *bad =
                unequal(sum, w->one[one].v[t], (size_t)layer_count[t], 1e-12, text, sizeof text);
            CHECK_MSG(!bad,
                "%d ranks, bias %d, residual %d, act %d, x_grad %d, outside %d, wrap %d, halves "
                "%d: %s %s",
                ranks, c.bias, c.residual, c.activation, c.x_grad, c.outside, c.wrap, c.halves,
                layer_names[t], bad);
        }
    }
}

/* Under dt_no_grad: equal values, and nothing is recorded. */
static void layer_no_grad(dt_ctx *ctx, layer_rank *k, const double *y_one) {
    dt_shape x_shape = DT_SHAPE(LB, LS, LC), y_shape = DT_SHAPE(LB, LS, LO);
    double *whole = (double *)zeros(sizeof(double) * L_MOST);
    int n = k->c.outside < 0 ? 1 : dt_comm_size(k->tp), wrong = 0;
    dt_no_grad(ctx, 1);
    dt_tensor *x = dt_require_grad(noise_part(ctx, DT_F64, x_shape, k->c.outside, k->tp, 1));
    k->r = k->c.residual ? noise_part(ctx, DT_F64, y_shape, k->c.outside, k->tp, 2) : NULL;
    dt_tensor *y = dt_block(ctx, layer_forward, x, k);
    dt_no_grad(ctx, 0);
    if (!CHECK(y && !y->needs_grad && !y->producer)) return;
    store_shard(y, y->data, y_shape, k->c.outside, k->tp, whole);
    for (int64_t i = 0; i < dt_count(y->shape); i++) {
        int64_t at = global_of(y_shape, k->c.outside, n, dt_comm_rank(k->tp), i);
        wrong += !(fabs(whole[at] - y_one[at]) <= 1e-12 * 10);
    }
    CHECK_MSG(wrong == 0, "dt_no_grad, outside %d: %d values differ", k->c.outside, wrong);
    free(whole);
    dt_reset(ctx);
}

static dt_status layers_main(dt_ctx *ctx, void *user) {
    layer_world *w = (layer_world *)user;
    dt_mesh mesh = mesh_of_one_axis(ctx, 't');
    int ranks = dt_comm_size(dt_world(ctx)), me = dt_comm_rank(dt_world(ctx));
    layer_rank k = { .tp = mesh.tp };
    dt_param_desc plain = { .dtype = DT_F64 }, rows = plain, columns = plain;
    rows.shards[0] = (dt_shard_spec){ mesh.tp, 0 };
    columns.shards[0] = (dt_shard_spec){ mesh.tp, 1 };
    k.p[0] = dt_param_at(ctx, "w1", DT_SHAPE(LF, LC), DT_NORMAL(1), rows);
    k.p[1] = dt_param_at(ctx, "b1", DT_SHAPE(LF), DT_NORMAL(1), rows);
    k.p[2] = dt_param_at(ctx, "w2", DT_SHAPE(LO, LF), DT_NORMAL(1), columns);
    k.p[3] = dt_param_at(ctx, "b2", DT_SHAPE(LO), DT_NORMAL(1), plain);
    for (int i = 0; i < (ranks == 1 ? ONES + LAYER_CASES : LAYER_CASES) && dt_error(ctx) == DT_OK;
         i++) {
        int number = ranks == 1 && i >= ONES ? i - ONES : i, alone = ranks == 1 && i < ONES;
        k.c = layer_case_of(number);
        if (k.c.outside >= 0)
            k.outside = DT_SHARD(k.c.outside);
        else
            k.outside = DT_REPLICATE;
        k.plain = alone;
        memset(&w->got[me], 0, sizeof w->got[me]);
        dt_clear_grads(ctx);
        layer_run(ctx, &k, alone ? &w->one[number] : &w->got[me]);
        dt_reset(ctx);
        dt_barrier(dt_world(ctx));
        if (me == 0 && !alone) layer_compare(k.c, number % ONES, ranks, w);
        dt_barrier(dt_world(ctx));
        if (number % ONES == 7 && k.c.wrap == BLOCK && !k.c.halves)
            layer_no_grad(ctx, &k, w->one[7].v[L_Y]);
    }
    return dt_error(ctx);
}

static void test_layers(void) {
    layer_world *w = (layer_world *)zeros(sizeof *w);
    for (int ranks = 1; ranks <= 4; ranks++) run_well(ranks, layers_main, w);
    free(w);
}

// ==== 2. Gathered tensors that a block frees ====================================================

/* A tensor that was gathered inside a block is freed when the block's forward ends. Using it later
   is an error. Tensors made from it inside the block (gathered over a second group, renamed,
   viewed) must still have their data when the backward reads them. */

enum { BRIEF_USED = 0, BRIEF_VIEW, BRIEF_READ, BRIEF_RETURNED, BRIEF_RETURNED_AGAIN, BRIEF_CASES };
typedef struct brief_case {
    int kind, seen;
    dt_comm *comm[2];
    dt_tensor *kept, *w;
    int parts;
} brief_case;

static dt_tensor *gather_block(dt_tensor *x, void *user) {
    brief_case *b = (brief_case *)user;
    b->kept = dt_tp_enter(x, b->comm[0], DT_SHARD(1));
    if (b->kind == BRIEF_VIEW && b->kept)
        b->kept = dt_reshape(b->kept, DT_SHAPE(dt_count(b->kept->shape)));
    return b->kind == BRIEF_RETURNED || b->kind == BRIEF_RETURNED_AGAIN ? b->kept
                                                                        : dt_gelu(b->kept);
}

static dt_status freed_gather_main(dt_ctx *ctx, void *user) {
    brief_case b = { .kind = ((brief_case *)user)->kind };
    double host[16];
    b.comm[0] = dt_world(ctx);
    dt_tensor *x = dt_require_grad(noise_part(ctx, DT_F64, DT_SHAPE(2, 4, 2), 1, dt_world(ctx), 1));
    dt_block_desc how = { .recompute = b.kind == BRIEF_RETURNED_AGAIN };
    dt_tensor *y = dt_block_at(ctx, gather_block, x, &b, how);
    if (b.kind == BRIEF_RETURNED) b.kept = y;
    CHECK(b.kept && (b.kind != BRIEF_RETURNED_AGAIN || y == NULL));
    if (b.kind == BRIEF_READ)
        CHECK(dt_read(b.kept, host) != DT_OK);
    else
        CHECK(dt_gelu(b.kept) == NULL);
    return dt_error(ctx);
}

/* Gathers rows of a matrix over one group and then over a second one; the block frees both
   results. */
static dt_tensor *gather_twice(dt_tensor *x, void *user) {
    brief_case *b = (brief_case *)user;
    dt_tensor *n = dt_tp_enter(dt_tp_enter(x, b->comm[0], DT_SHARD(0)), b->comm[1], DT_SHARD(0));
    return dt_linear(n, b->w, NULL);
}

/* The gathered tensor under a second name: entering a further group is a copy. */
static dt_tensor *gather_renamed(dt_tensor *x, void *user) {
    brief_case *b = (brief_case *)user;
    dt_tensor *n = dt_tp_enter(x, b->comm[0], DT_SHARD(0));
    return dt_linear(dt_redistribute(n, b->comm[1], DT_REPLICATE, DT_COPY), b->w, NULL);
}

static dt_tensor *gather_viewed(dt_tensor *x, void *user) {
    brief_case *b = (brief_case *)user;
    dt_tensor *n = dt_tp_enter(x, b->comm[0], DT_SHARD(0));
    return n ? dt_linear(
                   dt_reshape(dt_reshape(n, DT_SHAPE(n->shape.d[0] * 2)), n->shape), b->w, NULL)
             : NULL;
}

/* The input needs no gradient, so the gather is not recorded. */
static dt_tensor *gather_frozen(dt_tensor *x, void *user) {
    brief_case *b = (brief_case *)user;
    dt_no_grad(x->ctx, 1);
    dt_tensor *n = dt_tp_enter(x, b->comm[0], DT_SHARD(0));
    dt_no_grad(x->ctx, 0);
    return dt_linear(n, b->w, NULL);
}

static dt_tensor *recomputed_inner(dt_tensor *n, void *user) {
    return dt_linear(n, ((brief_case *)user)->w, NULL);
}

/* A recomputed block uses the gathered tensor. */
static dt_tensor *gather_recomputed(dt_tensor *x, void *user) {
    brief_case *b = (brief_case *)user;
    dt_tensor *n = dt_tp_enter(x, b->comm[0], DT_SHARD(0));
    return n ? dt_block_at(n->ctx, recomputed_inner, n, b, (dt_block_desc){ .recompute = 1 })
             : NULL;
}

/* dw of w (3,2) with loss weigh(x w^T) must not depend on whether gathered tensors are freed;
   without a block they are not. Later blocks reuse the freed memory, so a stale pointer would read
   wrong values. */
static dt_status freed_gather_values_main(dt_ctx *ctx, void *user) {
    static const dt_block_fn fns[] = { gather_twice, gather_renamed, gather_viewed, gather_frozen,
        gather_recomputed };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2, .cp = 2 });
    brief_case b = { .comm = { mesh.tp, mesh.cp } };
    double dw[3][6];
    (void)user;
    b.w = dt_param_at(ctx, "w", DT_SHAPE(3, 2), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F64 });
    for (int f = 0; f < (int)(sizeof fns / sizeof *fns) && dt_error(ctx) == DT_OK; f++) {
        for (int how = 0; how < 3; how++) {
            dt_tensor *x = dt_require_grad(
                noise_part(ctx, DT_F64, DT_SHAPE(4, 2), -1, NULL, dt_ctx_rank(ctx)));
            dt_tensor *y = how ? dt_block(ctx, fns[f], x, &b) : fns[f](x, &b);
            dt_tensor *other =
                dt_require_grad(noise_part(ctx, DT_F64, DT_SHAPE(4, 2), -1, NULL, 9));
            for (int i = 0; i < 3 && how; i++) dt_block(ctx, fns[f], other, &b);
            dt_tensor *loss = weigh(y, 5, NULL);
            if (how == 2)
                dt_backward_input(loss), dt_backward_weight(loss);
            else
                dt_backward(loss);
            if (dt_error(ctx) != DT_OK) return dt_error(ctx);
            for (int i = 0; i < 6; i++) dw[how][i] = ((double *)b.w->grad)[i];
            dt_reset(ctx);
            dt_clear_grads(ctx);
        }
        CHECK_MSG(memcmp(dw[0], dw[1], sizeof dw[0]) == 0,
            "freed gathers, function %d: different gradients", f);
        CHECK_MSG(memcmp(dw[0], dw[2], sizeof dw[0]) == 0,
            "freed gathers, function %d: different gradients in halves", f);
    }
    return dt_error(ctx);
}

static void test_freed_gathers(void) {
    for (int kind = 0; kind < BRIEF_CASES; kind++) {
        brief_case b = { .kind = kind };
        outcome o;
        run(&o, 2, freed_gather_main, &b);
        CHECK_MSG(o.status == DT_ERR_ARG && strstr(o.report.text, "use it inside the block"),
            "kind %d: %s", kind, o.report.text);
    }
    run_well(4, freed_gather_values_main, NULL);
}

// ==== 3. Vocabularies ===========================================================================

/* Logits are given, or computed as x w^T. Padding columns after the vocabulary hold 1e4: those that
   make it divisible by T and those that desc.vocab excludes. */

enum { V_ROWS = 12, V_C = 3, V_MOST = 16 };
enum { V_LOGITS = 0, V_LINEAR, V_LINEAR_SHARD, V_KINDS };
enum { V_PLAIN = 0, V_HUGE, V_IGNORED, V_ALL_IGNORED, V_DATA };
typedef struct vocab_case {
    int vocab, padding, kind, data, smooth, z;
    dt_dtype dtype;
} vocab_case;
typedef struct vocab_values {
    double loss, z_loss, dx[V_ROWS * V_C], dw[V_MOST * V_C], dlogits[V_ROWS * V_MOST];
} vocab_values;
typedef struct vocab_world {
    vocab_case c;
    vocab_values one, got[4];
} vocab_world;

static dt_tensor *vocab_labels(dt_ctx *ctx, vocab_case c) {
    int32_t labels[V_ROWS];
    for (int r = 0; r < V_ROWS; r++) {
        labels[r] = (int32_t)((noise(4, r) + 1) / 2 * c.vocab);
        if (c.data == V_ALL_IGNORED || (c.data == V_IGNORED && r % 3 == 1))
            labels[r] = r % 2 ? -1 : -100;
    }
    return dt_input(ctx, DT_I32, DT_SHAPE(1, V_ROWS), labels);
}

/* Element (r, v) of a table; columns from c.vocab on are padding. */
static double vocab_number(vocab_case c, int tensor, int64_t r, int64_t v) {
    double x = noise(tensor, r * V_MOST + v);
    if (v >= c.vocab) return 1e4;
    return c.data == V_HUGE && (r + v) % 3 == 0 ? (v % 2 ? 1e4 : -1e4) : x;
}

/* This rank's columns [first, first + mine) of a (rows, columns) table. by_row: columns are the
   last dimension. */
static dt_tensor *vocab_input(
    dt_ctx *ctx, vocab_case c, int64_t rows, int64_t mine, int64_t first, int by_row) {
    char *host = (char *)zeros((size_t)(rows * mine) * 8);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < mine; v++)
            put_value(host, c.dtype, (size_t)(by_row ? r * mine + v : v * rows + r),
                vocab_number(c, 6, r, first + v));
    dt_tensor *t =
        dt_input(ctx, c.dtype, by_row ? DT_SHAPE(1, rows, mine) : DT_SHAPE(mine, rows), host);
    free(host);
    return dt_require_grad(t);
}

/* Runs a case on one rank (comm NULL) or on several. V: columns over all ranks. */
static void vocab_run(dt_ctx *ctx, vocab_case c, dt_comm *comm, vocab_values *got) {
    int n = dt_comm_size(comm), me = dt_comm_rank(comm);
    int64_t all = c.vocab + c.padding, mine = (all + n - 1) / n, first = me * mine;
    dt_tensor *labels = vocab_labels(ctx, c), *z = NULL, *x = NULL, *w, *loss;
    dt_loss_desc d = { .vocab = mine * n == c.vocab ? 0 : c.vocab,
        .smoothing = c.smooth ? 0.2 : 0,
        .z_weight = c.z ? 0.01 : 0,
        .z_loss = c.z ? &z : NULL };
    size_t row_bytes = 16 * (size_t)(n - 1) * V_ROWS, before = dt_comm_bytes(ctx, DT_AXIS_TP);
    int dim = c.kind == V_LINEAR_SHARD && n > 1 ? 1 : -1;
    dt_placement outside = DT_REPLICATE;
    dt_shape x_shape = DT_SHAPE(1, V_ROWS, V_C);
    if (dim == 1) outside = DT_SHARD(1);
    if (c.kind == V_LOGITS) {
        w = vocab_input(ctx, c, V_ROWS, mine, first, 1);
        loss = comm ? dt_vocab_cross_entropy(w, labels, 7, d, comm)
                    : dt_cross_entropy_at(w, labels, 7, d);
    } else {
        x = dt_require_grad(noise_part(ctx, c.dtype, x_shape, dim, comm, 8));
        w = vocab_input(ctx, c, V_C, mine, first, 0);
        loss = comm ? dt_vocab_linear_cross_entropy(x, w, labels, 7, d, comm, outside)
                    : dt_linear_cross_entropy(x, w, labels, 7, d);
        if (dim == 1)
            row_bytes += (size_t)(n - 1) * V_ROWS / (size_t)n * V_C * dt_dtype_size(c.dtype);
    }
    CHECK_MSG(dt_comm_bytes(ctx, DT_AXIS_TP) - before == row_bytes, "%zu bytes, not %zu",
        dt_comm_bytes(ctx, DT_AXIS_TP) - before, row_bytes);
    before = dt_comm_bytes(ctx, DT_AXIS_TP);
    got->loss = dt_item(loss);
    got->z_loss = c.z ? dt_item(z) : 0;
    dt_backward(loss);
    if (c.kind == V_LOGITS) CHECK(dt_comm_bytes(ctx, DT_AXIS_TP) == before);
    if (x) store_shard(x, x->grad, x_shape, dim, comm, got->dx);
    for (int64_t v = 0; w && w->grad && v < mine; v++)
        for (int64_t r = 0; r < (x ? V_C : V_ROWS); r++) {
            double g = get(w->grad, c.dtype, (size_t)(x ? v * V_C + r : r * mine + v));
            if (first + v >= c.vocab)
                CHECK_MSG(g == 0, "padded column %d has gradient %g", (int)(first + v), g);
            else if (x)
                got->dw[(first + v) * V_C + r] = g;
            else
                got->dlogits[r * V_MOST + first + v] = g;
        }
    dt_reset(ctx);
}

static void vocab_compare(const vocab_world *w, int ranks) {
    vocab_case c = w->c;
    vocab_values sum = w->got[0];
    char text[200];
    const double *one[4] = { &w->one.loss, w->one.dx, w->one.dw, w->one.dlogits };
    double *all[4] = { &sum.loss, sum.dx, sum.dw, sum.dlogits };
    const size_t count[4] = { 2, V_ROWS * V_C, V_MOST * V_C, V_ROWS * V_MOST };
    for (int r = 1; r < ranks; r++) {
        CHECK(w->got[r].loss == w->got[0].loss && w->got[r].z_loss == w->got[0].z_loss);
        if (c.kind == V_LINEAR) CHECK(memcmp(w->got[r].dx, w->got[0].dx, sizeof sum.dx) == 0);
        for (int i = 0; i < V_ROWS * V_C && c.kind == V_LINEAR_SHARD; i++)
            sum.dx[i] += w->got[r].dx[i];
        for (int i = 0; i < V_MOST * V_C; i++) sum.dw[i] += w->got[r].dw[i];
        for (int i = 0; i < V_ROWS * V_MOST; i++) sum.dlogits[i] += w->got[r].dlogits[i];
    }
    for (int t = 0; t < 4; t++) {
        const char *bad =
            unequal(all[t], one[t], count[t], c.dtype == DT_F64 ? 1e-12 : 1e-5, text, sizeof text);
        CHECK_MSG(!bad,
            "%d ranks, vocabulary %d + %d, kind %d, data %d, smooth %d, z %d, %s: %s of %d", ranks,
            c.vocab, c.padding, c.kind, c.data, c.smooth, c.z, dt_dtype_name(c.dtype), bad, t);
    }
    if (c.data == V_ALL_IGNORED) CHECK(sum.loss == 0 && sum.z_loss == 0);
}

static dt_status vocab_main(dt_ctx *ctx, void *user) {
    static const int sizes[][2] = { { 7, 0 }, { 2, 0 }, { 1, 0 }, { 12, 0 }, { 9, 4 } };
    vocab_world *w = (vocab_world *)user;
    dt_mesh mesh = mesh_of_one_axis(ctx, 't');
    int ranks = dt_comm_size(mesh.tp), me = dt_comm_rank(mesh.tp);
    for (int i = 0; i < 5 * V_KINDS * V_DATA * 8 && dt_error(ctx) == DT_OK; i++) {
        const int *size = sizes[i % 5];
        int rest = i / 5, data = rest / V_KINDS % V_DATA, bits = rest / V_KINDS / V_DATA;
        vocab_case c = { size[0], size[1], rest % V_KINDS, data, bits & 1, bits >> 1 & 1,
            bits >> 2 ? DT_F32 : DT_F64 };
        memset(&w->got[me], 0, sizeof w->got[me]);
        if (me == 0) memset(&w->one, 0, sizeof w->one);
        if (me == 0) w->c = c;
        if (me == 0) vocab_run(ctx, c, NULL, &w->one);
        vocab_run(ctx, c, mesh.tp, &w->got[me]);
        dt_barrier(mesh.tp);
        if (me == 0) vocab_compare(w, ranks);
        dt_barrier(mesh.tp);
    }
    return dt_error(ctx);
}

/* A parameter (V,C), sharded along V, that is both embedding and head; padding rows after V hold
   1e4. */
enum { E_V = 9, E_N = 12 };
typedef struct tied_values {
    double y[E_N * E_N * V_C], dw[E_V * V_C], loss;
} tied_values;
typedef struct tied_world {
    tied_values one, got[4];
} tied_world;

static void tied_run(dt_ctx *ctx, dt_tensor *w, dt_comm *tp, int dim, tied_values *got) {
    int32_t ids[E_N * E_N], labels[E_N * E_N];
    dt_shape shape = DT_SHAPE(E_N, E_N), whole = DT_SHAPE(E_N, E_N, V_C);
    dt_placement outside = DT_REPLICATE;
    size_t before = dt_comm_bytes(ctx, DT_AXIS_TP), n = (size_t)dt_comm_size(tp);
    size_t Y = E_N * E_N * V_C * 8 / n * (n - 1);
    if (dim >= 0) outside = DT_SHARD(dim);
    for (int i = 0; i < E_N * E_N; i++) {
        ids[i] = (int32_t)((noise(11, i) + 1) / 2 * E_V);
        labels[i] = i % 5 ? (int32_t)((noise(12, i) + 1) / 2 * E_V) : -1;
    }
    dt_tensor *id = dt_input(ctx, DT_I32, shape, ids),
              *label = dt_input(ctx, DT_I32, shape, labels);
    dt_tensor *y = tp ? dt_vocab_embedding(w, id, tp, outside) : dt_embedding(w, id);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_TP) - before == (dim < 0 ? 2 * Y : Y));
    if (!y) return;
    store_shard(y, y->data, whole, dim, tp, got->y);
    dt_loss_desc d = { .smoothing = 0.1 };
    dt_tensor *loss = tp ? dt_vocab_linear_cross_entropy(y, w, label, 100, d, tp, outside)
                         : dt_linear_cross_entropy(y, w, label, 100, d);
    got->loss = dt_item(loss);
    dt_backward(loss);
    store_param_grad(w, got->dw);
}

static dt_status tied_main(dt_ctx *ctx, void *user) {
    tied_world *all = (tied_world *)user;
    dt_mesh mesh = mesh_of_one_axis(ctx, 't');
    int n = dt_comm_size(mesh.tp), me = dt_comm_rank(mesh.tp);
    char text[200];
    dt_tensor *w = dt_param_at(ctx, "w", DT_SHAPE(E_V, V_C), DT_NORMAL(1),
        (dt_param_desc){ .dtype = DT_F64, .shards = { { mesh.tp, 0 } } });
    dt_buckets_make(ctx, (dt_buckets_desc){ 0 });
    for (int64_t i = w->param->slice.inside[0] * V_C; i < dt_count(w->shape); i++)
        ((double *)w->data)[i] = 1e4;
    for (int dim = -1; dim < (n > 1 ? 2 : 0); dim++) {
        tied_values *got = n > 1 ? &all->got[me] : &all->one;
        memset(got, 0, sizeof *got);
        tied_run(ctx, w, mesh.tp, dim, got);
        for (int64_t i = w->param->slice.inside[0] * V_C; w->grad && i < dt_count(w->shape); i++)
            CHECK(((double *)w->grad)[i] == 0);
        dt_barrier(mesh.tp);
        tied_values sum = all->got[0];
        for (int r = 1; r < n; r++) {
            for (int i = 0; i < E_N * E_N * V_C && dim >= 0; i++) sum.y[i] += all->got[r].y[i];
            for (int i = 0; i < E_V * V_C; i++) sum.dw[i] += all->got[r].dw[i];
        }
        const char *bad =
            n == 1 ? NULL : unequal(sum.y, all->one.y, E_N * E_N * V_C, 1e-12, text, sizeof text);
        if (!bad && n > 1)
            bad = unequal(sum.dw, all->one.dw, E_V * V_C + 1, 1e-12, text, sizeof text);
        CHECK_MSG(!bad, "embedding and head over %d, outside %d: %s", n, dim, bad);
        dt_barrier(mesh.tp);
        dt_reset(ctx);
        dt_clear_grads(ctx);
    }
    return dt_error(ctx);
}

typedef struct bad_label {
    int linear, label;
    const char *words;
} bad_label;

static dt_status bad_label_main(dt_ctx *ctx, void *user) {
    const bad_label *b = (const bad_label *)user;
    int32_t labels[4] = { 0, 1, -1, b->label };
    dt_loss_desc d = { .vocab = 7 };
    dt_tensor *x = noise_part(ctx, DT_F64, DT_SHAPE(4, 4), -1, NULL, 1);
    dt_tensor *w = noise_part(ctx, DT_F64, DT_SHAPE(4, 4), -1, NULL, 2);
    dt_tensor *at = dt_input(ctx, DT_I32, DT_SHAPE(4), labels);
    if (b->linear)
        CHECK(!dt_vocab_linear_cross_entropy(x, w, at, 3, d, dt_world(ctx), DT_REPLICATE));
    else
        CHECK(!dt_vocab_cross_entropy(x, at, 3, d, dt_world(ctx)));
    return dt_error(ctx);
}

/* A view of a sharded parameter keeps the padding. */
static dt_status vocab_view_main(dt_ctx *ctx, void *user) {
    static const int32_t labels[2] = { 2, 0 };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2 });
    dt_param_desc cut = { .shards = { { mesh.tp, 0 } }, .dtype = DT_F64 };
    dt_tensor *w = dt_param_at(ctx, "w", DT_SHAPE(3, 4), DT_NORMAL(1), cut);
    dt_tensor *x = noise_part(ctx, DT_F64, DT_SHAPE(2, 4), -1, NULL, 1);
    double loss[2];
    (void)user;
    for (int view = 0; view < 2; view++) {
        dt_tensor *head = view ? dt_reshape(w, w->shape) : w;
        loss[view] = dt_item(
            dt_vocab_linear_cross_entropy(x, head, dt_input(ctx, DT_I32, DT_SHAPE(2), labels), 1,
                (dt_loss_desc){ 0 }, mesh.tp, DT_REPLICATE));
    }
    CHECK_MSG(loss[0] == loss[1], "a view of w: %.17g, w %.17g", loss[1], loss[0]);
    return dt_error(ctx);
}

static dt_status bad_part_main(dt_ctx *ctx, void *user) {
    static const int32_t labels[2] = { 1, 0 };
    dt_loss_desc d = { .shard = { .count = 2, .full_vocab = 4 } };
    (void)user;
    dt_tensor *x = noise_part(ctx, DT_F64, DT_SHAPE(2, 2), -1, NULL, 1);
    CHECK(dt_cross_entropy_at(x, dt_input(ctx, DT_I32, DT_SHAPE(2), labels), 1, d) == NULL);
    return dt_error(ctx);
}

static void test_vocab(void) {
    outcome bad;
    run(&bad, 1, bad_part_main, NULL);
    CHECK_MSG(
        bad.status == DT_ERR_ARG && strstr(bad.report.text, "no gather"), "%s", bad.report.text);
    run_well(2, vocab_view_main, NULL);
    vocab_world *w = (vocab_world *)zeros(sizeof *w);
    tied_world *t = (tied_world *)zeros(sizeof *t);
    for (int ranks = 2; ranks <= 4; ranks++) run_well(ranks, vocab_main, w);
    for (int ranks = 1; ranks <= 4; ranks++) run_well(ranks, tied_main, t);
    for (int i = 0; i < 4; i++) {
        bad_label b = { i % 2, 7, "label 7 at place 3; the vocabulary has 7" };
        if (i > 1) b = (bad_label){ i % 2, 1 << 30, "label 1073741824" };
        outcome o;
        run(&o, 2, bad_label_main, &b);
        CHECK_MSG(o.status == DT_ERR_ARG && strstr(o.report.text, b.words), "label %d: %s", b.label,
            o.report.text);
    }
    free(w);
    free(t);
}

// ==== 4. Key and value heads ====================================================================

/* Tests every legal K by counting: rank r holds heads from r K/n on, and ranks with the same head
   are consecutive. */
static dt_status kv_main(dt_ctx *ctx, void *user) {
    dt_comm *tp = dt_world(ctx);
    int n = dt_comm_size(tp), me = dt_comm_rank(tp);
    (void)user;
    for (int K = 1; K <= 16; K++) {
        if (K % n != 0 && n % K != 0) continue;
        dt_kv_groups g = dt_kv_split(ctx, tp, K);
        int cuts = K < n ? K : n, copies = n / cuts, right = 1;
        CHECK_MSG(g.heads == K / cuts, "%d heads over %d ranks: %d on this rank", K, n, g.heads);
        CHECK(dt_comm_size(g.shard_group) == cuts && dt_comm_size(g.replica_group) == copies);
        CHECK((g.shard_group == NULL || n == 1) == (cuts == 1) &&
              (g.replica_group == NULL) == (copies == 1));
        for (int i = 0; i < cuts && cuts > 1; i++)
            right &= dt_comm_world_rank(g.shard_group, i) == i * copies + me % copies;
        for (int i = 0; i < copies && copies > 1; i++)
            right &= dt_comm_world_rank(g.replica_group, i) == me / copies * copies + i;
        CHECK_MSG(right && dt_comm_rank(g.shard_group) == (cuts > 1 ? me / copies : 0),
            "%d heads over %d ranks: wrong groups", K, n);
    }
    return dt_error(ctx);
}

static dt_status bad_kv_main(dt_ctx *ctx, void *user) {
    dt_kv_groups g = dt_kv_split(ctx, dt_world(ctx), *(int *)user);
    CHECK(!g.replica_group && dt_error(ctx) != DT_OK);
    return dt_error(ctx);
}

static void test_kv(void) {
    for (int ranks = 1; ranks <= 8; ranks++) run_well(ranks, kv_main, NULL);
    static const int bad[][2] = { { 2, 3 }, { 4, 3 }, { 4, 6 }, { 3, 2 }, { 2, 0 }, { 2, -2 } };
    for (int i = 0; i < 6; i++) {
        int K = bad[i][1];
        char words[80];
        outcome o;
        snprintf(words, sizeof words, "%d heads of keys and values over %d ranks: one must divide",
            K, bad[i][0]);
        run(&o, bad[i][0], bad_kv_main, &K);
        CHECK_MSG(
            o.status == DT_ERR_ARG && strstr(o.report.text, words), "%s: %s", words, o.report.text);
    }
}

// ==== 5. dt_distribute: from one rank to all ====================================================

/* The placements of a tensor (12,6,8) over 2 x 3 x 2 ranks; applied axis after axis, as defined. */
typedef struct spread_case {
    int n, at[3];
    dt_dtype dtype;
} spread_case;
static const dt_placement spread_places[] = { { DT_PLACEMENT_SHARD, 0 }, { DT_PLACEMENT_SHARD, 1 },
    { DT_PLACEMENT_SHARD, 2 }, { DT_PLACEMENT_REPLICATE, 0 }, { DT_PLACEMENT_PARTIAL, 0 },
    { DT_PLACEMENT_COPY, 0 } };

static void spread_run(dt_ctx *ctx, const dt_mesh *mesh, spread_case c) {
    dt_comm *comms[3] = { mesh->dp, mesh->cp, mesh->tp };
    dt_axis_placement axes[3];
    dt_shape full = DT_SHAPE(12, 6, 8);
    int64_t lo[3] = { 0, 0, 0 }, n[3] = { 12, 6, 8 };
    int first = 1, zero = 0, wrong = 0, fits = 1;
    for (int i = 0; i < c.n; i++) {
        int size = dt_comm_size(comms[i]), me = dt_comm_rank(comms[i]),
            dim = spread_places[c.at[i]].dim;
        axes[i].comm = comms[i];
        axes[i].placement = spread_places[c.at[i]];
        first &= me == 0;
        zero |= axes[i].placement.kind == DT_PLACEMENT_PARTIAL && me != 0;
        if (axes[i].placement.kind != DT_PLACEMENT_SHARD) continue;
        fits &= n[dim] % size == 0;
        n[dim] /= size;
        lo[dim] += me * n[dim];
    }
    if (!fits) return;
    char *host = (char *)zeros(12 * 6 * 8 * 8);
    for (size_t i = 0; i < 12 * 6 * 8; i++) put(host, c.dtype, i, (double)i + 1);
    dt_tensor *t = dt_distribute(ctx, c.dtype, full, first ? host : NULL, axes, c.n);
    free(host);
    if (!CHECK(t && t->dtype == c.dtype && t->shape.nd == 3)) return;
    for (int d = 0; d < 3; d++) wrong += t->shape.d[d] != n[d];
    for (int64_t i = 0; i < dt_count(t->shape) && !wrong; i++) {
        int64_t at =
            (lo[0] + i / (n[1] * n[2])) * 48 + (lo[1] + i / n[2] % n[1]) * 8 + lo[2] + i % n[2];
        wrong += get(t->data, c.dtype, (size_t)i) != (zero ? 0 : (double)at + 1);
    }
    CHECK_MSG(!wrong, "%d axes, %d %d %d: %d values differ", c.n, c.at[0], c.at[1], c.at[2], wrong);
    dt_reset(ctx);
}

static dt_status spread_main(dt_ctx *ctx, void *user) {
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = 2, .cp = 3, .tp = 2 });
    (void)user;
    for (int i = 0; i < 216 && dt_error(ctx) == DT_OK; i++)
        for (int n = i < 6 ? 1 : i < 36 ? 2 : 3; n <= 3; n++)
            spread_run(ctx, &mesh,
                (spread_case){ n, { i % 6, i / 6 % 6, i / 36 }, i % 2 ? DT_I32 : DT_F64 });
    /* without groups: one rank */
    dt_tensor *own = dt_distribute(ctx, DT_I32, DT_SHAPE(2), (int32_t[]){ 3, 4 }, NULL, 0);
    CHECK(own && ((int32_t *)own->data)[1] == 4);
    dt_axis_placement axis = { mesh.tp, DT_SHARD(0) };
    dt_tensor *none = dt_distribute(ctx, DT_F32, DT_SHAPE(0, 4), NULL, &axis, 1);
    CHECK(none && none->shape.d[0] == 0);
    return dt_error(ctx);
}

typedef struct bad_spread {
    dt_placement place;
    int none;
    dt_status status;
    const char *words;
} bad_spread;

static dt_status bad_spread_main(dt_ctx *ctx, void *user) {
    const bad_spread *b = (const bad_spread *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = 2, .tp = 2 });
    float host[15] = { 0 };
    dt_axis_placement axes[] = { { mesh.dp, DT_REPLICATE }, { mesh.tp, b->place } };
    CHECK(!dt_distribute(
        ctx, DT_F32, DT_SHAPE(5, 3), dt_ctx_rank(ctx) || b->none ? NULL : host, axes, 2));
    CHECK(dt_error(ctx) != DT_OK);
    CHECK(!dt_distribute(ctx, DT_F32, DT_SHAPE(5, 3), host, axes, 2)); /* sticky */
    return dt_error(ctx);
}

static void test_distribute(void) {
    const bad_spread list[] = {
        { DT_SHARD(0), 0, DT_ERR_SHAPE,
            "(5,3) cannot be sharded along dimension 0 over the 2 ranks of 'tp'" },
        { DT_SHARD(1), 0, DT_ERR_SHAPE, "dimension 1" },
        { DT_SHARD(2), 0, DT_ERR_SHAPE, "dimension 2" },
        { DT_SHARD(-1), 0, DT_ERR_SHAPE, "dimension -1" },
        { DT_REPLICATE, 1, DT_ERR_ARG, "the first rank gives no data" },
        { DT_COPY, 1, DT_ERR_ARG, "the first rank gives no data" },
    };
    run_well(12, spread_main, NULL);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        outcome o;
        run(&o, 4, bad_spread_main, (void *)(uintptr_t)&list[i]);
        CHECK_MSG(o.status == list[i].status && strstr(o.report.text, list[i].words) &&
                      in_time(o.took, 20),
            "%s: %s", list[i].words, o.report.text);
        for (int r = 0; r < 4; r++) CHECK(o.error[r] != DT_OK);
    }
}

// ==== 6. The tokens of a cp rank ================================================================

static dt_status cp_shard_main(dt_ctx *ctx, void *user) {
    int c = dt_comm_size(dt_world(ctx)), me = dt_comm_rank(dt_world(ctx)), wrong = 0;
    int32_t whole[3 * 48], local[3 * 48];
    (void)user;
    for (int i = 0; i < 3 * 48; i++) whole[i] = i;
    for (int kind = DT_CP_RING; kind <= DT_CP_ULYSSES; kind++) {
        dt_cp_shard(kind, 3, 48, dt_world(ctx), whole, local);
        for (int b = 0; b < 3; b++)
            for (int i = 0; i < 48 / c; i++) {
                int piece = 48 / (2 * c), at = me * (48 / c) + i;
                if (kind == DT_CP_ZIGZAG)
                    at = i < piece ? me * piece + i : (2 * c - 1 - me) * piece + i - piece;
                wrong += local[b * (48 / c) + i] != b * 48 + at;
            }
    }
    CHECK_MSG(wrong == 0, "dt_cp_shard over %d: %d tokens differ", c, wrong);
    return dt_error(ctx);
}

/* The sizes that an error text proposes must be accepted. */
static void check_choices(int kind, int64_t T, int c, int64_t heads, int64_t kv_heads) {
    char text[300] = "", small[8], ignored[300];
    long long choice[2];
    dt_status status = dt_cp_check(kind, T, c, heads, kv_heads, text, sizeof text);
    int64_t pieces = kind == DT_CP_ZIGZAG ? 2 * c : c;
    int whole = c < 2 || (T >= pieces && T % pieces == 0);
    int shared = kind != DT_CP_ULYSSES || c < 2 ||
                 (heads % c == 0 && (kv_heads % c == 0 || c % kv_heads == 0));
    CHECK_MSG(status == (whole && shared ? DT_OK : DT_ERR_ARG),
        "kind %d, %d tokens over %d, heads %d, %d: %s", kind, (int)T, c, (int)heads, (int)kv_heads,
        text);
    if (status == DT_OK) return;
    dt_cp_check(kind, T, c, heads, kv_heads, small, sizeof small);
    CHECK(strlen(small) < sizeof small);
    const char *use = strstr(text, "use ");
    if (whole) {
        CHECK(use && strstr(text, "ring") && strstr(text, "zigzag") && strstr(text, "allgather"));
    } else if (CHECK_MSG(use && sscanf(use, "use %lld or %lld", &choice[0], &choice[1]) == 2,
                   "no proposal: %s", text)) {
        for (int i = 0; i < 2; i++)
            CHECK_MSG(choice[i] > 0 &&
                          dt_cp_check(kind, choice[i], c, c, c, ignored, sizeof ignored) == DT_OK,
                "%s: the proposed %lld is refused, too", text, choice[i]);
    }
}

static void test_tokens(void) {
    char text[300];
    for (int kind = DT_CP_RING; kind <= DT_CP_ULYSSES; kind++)
        for (int c = 1; c <= 8; c++) {
            for (int T = 2 * c; T <= 8 * c; T += 2 * c) {
                int seen[64] = { 0 }, once = 1;
                for (int r = 0; r < c; r++)
                    for (int i = 0; i < T / c; i++) {
                        int64_t t = dt_cp_token(kind, T, c, r, i);
                        if (t >= 0 && t < T) seen[t]++;
                        /* a rank's tokens are in ascending order */
                        once &= i == 0 || t > dt_cp_token(kind, T, c, r, i - 1);
                    }
                for (int t = 0; t < T; t++) once &= seen[t] == 1;
                CHECK_MSG(
                    once, "kind %d: %d tokens over %d ranks are not a permutation", kind, T, c);
            }
            for (int T = -9; T <= 20; T++)
                for (int h = 1; h <= 8; h++) check_choices(kind, T, c, h, h > 4 ? 2 : h % 3 + 1);
        }
    CHECK(dt_cp_check(-1, 8, 2, 2, 2, text, sizeof text) == DT_ERR_ARG && strstr(text, "kind -1"));
    CHECK(dt_cp_check(4, 8, 2, 2, 2, text, sizeof text) == DT_ERR_ARG && strstr(text, "kind 4"));
    CHECK(dt_cp_check(DT_CP_ULYSSES, 8, 2, 2, 0, text, sizeof text) == DT_OK ||
          strstr(text, "heads"));
    for (int c = 1; c <= 8; c += c > 2 ? 5 : 1) run_well(c, cp_shard_main, NULL);
}

// ==== 7. Attention over the tokens of all ranks =================================================

enum { C_KINDS = 4, C_MOST = 3 * 48 * 8 * 4 };
static const char *const kind_names[C_KINDS] = { "ring", "zigzag", "allgather", "ulysses" };

/* How documents are packed into a sequence: no packing; documents of a few tokens whose positions
   restart; the same with continuing positions; one document per rank's tokens, so that no rank
   attends to another's; two interleaved documents, so that ranks attend to each other but
   neighbouring tokens do not; one document whose positions differ from the token indices. */
enum {
    PACKED_NOT = 0,
    PACKED,
    PACKED_GO_ON,
    PACKED_APART,
    PACKED_MIXED,
    PACKED_STRETCHED,
    PACKINGS
};
typedef struct context_case {
    int kind, B, T, H, K, D, full, packing, wrap, same, dtype, window;
    double cap;
} context_case;
typedef struct context_values {
    double v[4][C_MOST];
} context_values; /* out, dq, dk, dv */
typedef struct context_world {
    context_case c;
    int runs;
    context_values one, got;
} context_world;
typedef struct context_rank {
    dt_tensor *k, *v;
    dt_cp *context;
    dt_attn_desc alone, options; /* of dt_attention, and of dt_cp_attention_at */
    int plain;
} context_rank;

static dt_dtype context_type(const context_case *c) {
    return c->dtype == 0 ? DT_F64 : c->dtype == 1 ? DT_F32 : DT_BF16;
}

/* Position and document of token t of sequence b. ranks: number of ranks, for one document per
   rank. */
static void place_of(
    context_case c, int ranks, int b, int t, int32_t *position, int32_t *document) {
    int start = 0, number = 0;
    for (int i = 1; i <= t && c.packing != PACKED_STRETCHED; i++)
        if (c.packing == PACKED_APART ? i % (c.T / ranks) == 0 : noise(40 + b, i) < -0.6)
            start = i, number++;
    if (c.packing == PACKED_MIXED) start = 0, number = t % 2;
    *position = c.packing == PACKED_STRETCHED ? 3 * t : c.packing == PACKED_GO_ON ? t : t - start;
    *document = number * 5 - 3;
}

static dt_tensor *context_block(dt_tensor *q, void *user) {
    context_rank *r = (context_rank *)user;
    if (r->plain) return dt_attention(q, r->k, r->v, r->alone);
    return r->options.window ? dt_cp_attention_at(q, r->k, r->v, r->context, r->options)
                             : dt_cp_attention(q, r->k, r->v, r->context);
}

/* This rank's tokens of noise (B,T,heads,D). */
static dt_tensor *context_input(dt_ctx *ctx, context_case c, dt_comm *comm, int heads, int tensor) {
    int n = dt_comm_size(comm), own = c.T / n, row = heads * c.D;
    dt_dtype dtype = context_type(&c);
    char *host = (char *)zeros((size_t)(c.B * own * row) * dt_dtype_size(dtype));
    for (int i = 0; i < c.B * own * row; i++) {
        int64_t t = dt_cp_token(c.kind, c.T, n, dt_comm_rank(comm), i / row % own);
        put_value(host, dtype, (size_t)i, noise(tensor, (i / row / own * c.T + t) * row + i % row));
    }
    dt_tensor *x = dt_input(ctx, dtype, DT_SHAPE(c.B, own, heads, c.D), host);
    free(host);
    return dt_require_grad(x);
}

static void store_context(
    context_case c, dt_comm *comm, const dt_tensor *t, const void *from, double *full) {
    int n = dt_comm_size(comm), own = c.T / n, row = (int)(t->shape.d[2] * t->shape.d[3]);
    for (int i = 0; from && i < c.B * own * row; i++) {
        int64_t at = dt_cp_token(c.kind, c.T, n, dt_comm_rank(comm), i / row % own);
        full[(i / row / own * c.T + at) * row + i % row] = get(from, t->dtype, (size_t)i);
    }
}

/* Sets the positions, documents and options for dt_cp_make and dt_attention. */
static void context_mask(dt_ctx *ctx, context_case c, dt_comm *comm, context_rank *r, int ranks) {
    int32_t at[2][3 * 48], whole[2][3 * 48];
    int n = dt_comm_size(comm), own = c.T / n;
    for (int i = 0; i < c.B * c.T; i++)
        place_of(c, ranks, i / c.T, i % c.T, &whole[0][i], &whole[1][i]);
    for (int i = 0; i < c.B * c.T; i++)
        for (int k = 0; k < 2; k++)
            at[k][i] =
                whole[k][i / c.T * c.T + dt_cp_token(c.kind, c.T, n, i % c.T / own, i % own)];
    r->options =
        (dt_attn_desc){ .window = c.window, .soft_cap = c.cap, .scale = c.window ? 0.8 : 0 };
    int positions = c.packing != PACKED_NOT, documents = positions && c.packing != PACKED_STRETCHED;
    if (!r->plain) {
        r->context = dt_cp_make(ctx, comm,
            (dt_cp_desc){ .kind = c.kind,
                .batch = c.B,
                .tokens = c.T,
                .positions = positions ? at[0] : NULL,
                .documents = documents ? at[1] : NULL,
                .full = c.full });
        memset(at, 0x55, sizeof at); /* dt_cp_make has copied the array */
        return;
    }
    r->alone = r->options;
    r->alone.full = c.full;
    if (positions) r->alone.positions = dt_input(ctx, DT_I32, DT_SHAPE(c.B, c.T), whole[0]);
    if (documents) r->alone.documents = dt_input(ctx, DT_I32, DT_SHAPE(c.B, c.T), whole[1]);
}

/* Bytes sent, by the table of dt_parallel.h, section 4. */
static void context_bytes(context_case c, size_t ranks, size_t *forward, size_t *backward) {
    size_t size = dt_dtype_size(context_type(&c)), wide = size < 4 ? 4 : size;
    size_t own = (size_t)(c.B * c.D * c.T) / ranks, n = 2 * own * (size_t)c.K;
    size_t K = (size_t)c.K < ranks ? ranks : (size_t)c.K;
    *forward = (ranks - 1) * n * size;
    *backward = *forward + (ranks - 1) * n * wide;
    if (c.kind == DT_CP_ALLGATHER) *backward = *forward;
    if (c.kind == DT_CP_ULYSSES)
        *forward = *backward = (ranks - 1) * own * (2 * (size_t)c.H + 2 * K) / ranks * size;
    if (c.wrap == RECOMPUTED) *backward += *forward;
}

static void context_run(
    dt_ctx *ctx, context_case c, dt_comm *comm, context_values *got, int ranks, int plain) {
    context_rank r = { .plain = plain };
    int own = c.T / dt_comm_size(comm);
    int64_t place[C_MOST];
    size_t before, between, forward, backward;
    context_mask(ctx, c, comm, &r, ranks);
    dt_tensor *q = context_input(ctx, c, comm, c.H, 1);
    r.k = c.same ? q : context_input(ctx, c, comm, c.K, 2);
    r.v = c.same ? q : context_input(ctx, c, comm, c.K, 3);
    before = dt_comm_bytes(ctx, DT_AXIS_CP);
    dt_tensor *y = c.wrap == ROOT || r.plain
                       ? context_block(q, &r)
                       : dt_block_at(ctx, context_block, q, &r,
                             (dt_block_desc){ .recompute = c.wrap == RECOMPUTED });
    if (!y) return;
    between = dt_comm_bytes(ctx, DT_AXIS_CP);
    for (int i = 0; i < c.B * own * c.H * c.D; i++) {
        int row = c.H * c.D;
        int64_t t = dt_cp_token(c.kind, c.T, dt_comm_size(comm), dt_comm_rank(comm), i / row % own);
        place[i] = (i / row / own * c.T + t) * row + i % row;
    }
    dt_tensor *loss = weigh(y, 4, place);
    if (ranks % 2)
        dt_backward(loss);
    else
        dt_backward_input(loss), dt_backward_weight(loss);
    if (comm && dt_error(ctx) == DT_OK) {
        context_bytes(c, (size_t)ranks, &forward, &backward);
        CHECK_MSG(
            between - before == forward && dt_comm_bytes(ctx, DT_AXIS_CP) - between == backward,
            "%s over %d, %s, wrap %d: %zu and %zu bytes, table %zu and %zu", kind_names[c.kind],
            ranks, dt_dtype_name(q->dtype), c.wrap, between - before,
            dt_comm_bytes(ctx, DT_AXIS_CP) - between, forward, backward);
    }
    store_context(c, comm, y, y->data, got->v[0]);
    store_context(c, comm, q, q->grad, got->v[1]);
    store_context(c, comm, r.k, r.k->grad, got->v[2]);
    store_context(c, comm, r.v, r.v->grad, got->v[3]);
    dt_reset(ctx);
}

/* Tolerances. f32: 1e-5, because the summation order differs. bf16: each result is rounded once
   (2^-9), and gradients of gathered and repeated heads once more per rank; 2^-6 of the largest
   value covers both. */
static void context_compare(const context_world *w, int ranks) {
    static const double tol[] = { 1e-12, 1e-5, 1.0 / 64 };
    static const char *const names[] = { "out", "dq", "dk", "dv" };
    context_case c = w->c;
    char text[200];
    for (int t = 0; t < 4; t++) {
        size_t n = (size_t)(c.B * c.T * (t < 2 ? c.H : c.K) * c.D);
        const char *bad = unequal(w->got.v[t], w->one.v[t], n, tol[c.dtype], text, sizeof text);
        CHECK_MSG(!bad,
            "%s over %d, (%d,%d,%d/%d,%d) %s, full %d, packing %d, wrap %d, same %d, window %d: %s "
            "%s",
            kind_names[c.kind], ranks, c.B, c.T, c.H, c.K, c.D, dt_dtype_name(context_type(&c)),
            c.full, c.packing, c.wrap, c.same, c.window, names[t], bad);
    }
}

/* Stores the i-th case for this number of ranks. Returns 0 if there is none. */
static int context_case_of(int i, int ranks, context_case *c) {
    c->kind = i % 4;
    c->packing = i / 4 % PACKINGS;
    c->full = i / 24 % 2;
    c->dtype = i / 48 % 8 < 6 ? 0 : i / 48 % 8 - 5;
    c->B = i / 48 % 3 == 2 ? 3 : 1;
    c->wrap = i / 48 % 5 < 3 ? i / 48 % 5 : ROOT;
    c->same = i / 48 % 7 == 6;
    c->H = c->kind != DT_CP_ULYSSES || ranks == 1 ? 2 + i / 48 / 3 % 2 * 2
           : ranks < 4                            ? 2 * ranks
                                                  : ranks;
    c->K = i / 48 % 4 == 0 ? 1 : i / 48 % 4 == 1 ? c->H : c->H / 2;
    c->D = 1 + i / 96 % 4;
    c->T = 2 * (ranks < 3 ? 4 : ranks) * (1 + (i / 48 % 8 == 1));
    if (c->same) c->K = c->H;
    c->window = !c->full && i / 48 % 2 ? 1 + i / 48 % 4 : 0;
    c->cap = c->window && i / 48 % 4 == 1 ? 0.3 : 0;
    /* many threads on few cores are slow, so 8 ranks run only some cases */
    if (ranks == 8 && 0x7a >> i / 48 & 1) return 0;
    if (c->full && i / 48 % 2) return 0;
    return c->kind != DT_CP_ULYSSES || c->K % ranks == 0 || ranks % c->K == 0;
}

static dt_status context_main(dt_ctx *ctx, void *user) {
    context_world *w = (context_world *)user;
    dt_mesh mesh = mesh_of_one_axis(ctx, 'c');
    int ranks = dt_comm_size(dt_world(ctx)), me = dt_comm_rank(dt_world(ctx));
    for (int i = 0; i < 48 * 8 && dt_error(ctx) == DT_OK; i++) {
        context_case c;
        if (!context_case_of(i, ranks, &c)) continue;
        if (me == 0) {
            w->c = c;
            w->runs++;
            memset(&w->one, 0, sizeof w->one);
            memset(&w->got, 0, sizeof w->got);
            context_run(ctx, c, NULL, &w->one, ranks, 1);
        }
        dt_barrier(mesh.cp);
        context_run(ctx, c, mesh.cp, &w->got, ranks, 0);
        dt_barrier(mesh.cp);
        if (me == 0) context_compare(w, ranks);
        dt_barrier(mesh.cp);
    }
    return dt_error(ctx);
}

static void test_context(void) {
    context_world *w = (context_world *)zeros(sizeof *w);
    static const int ranks[] = { 1, 2, 3, 4, 8 };
    for (int i = 0; i < 5; i++) run_well(ranks[i], context_main, w);
    free(w);
}

/* Bytes that one layer keeps for the backward: one more layer must cost exactly that. The sizes
   make arenas grow past their minimum. Under the address sanitizer every tensor is a separate
   allocation. */
enum { KEEP_T = 16, KEEP_H = 8, KEEP_D = 64 };
typedef struct keep_case {
    int kind, K, layers;
    dt_dtype dtype;
    size_t live, comm;
} keep_case;

static dt_status kept_bytes_main(dt_ctx *ctx, void *user) {
    keep_case *c = (keep_case *)user;
    dt_mesh mesh = mesh_of_one_axis(ctx, 'c');
    int D = c->dtype == DT_BF16 ? 4 * KEEP_D : KEEP_D;
    dt_shape keys = DT_SHAPE(1, KEEP_T, c->K, D);
    context_rank r = { .plain = 0 };
    size_t before = 0;
    /* arenas grow in the first step and become one chunk in the second */
    for (int step = 0; step < 3 && dt_error(ctx) == DT_OK; step++) {
        before = dt_memory_used(ctx).live_total;
        r.context = dt_cp_make(ctx, mesh.cp,
            (dt_cp_desc){ .kind = c->kind, .batch = 1, .tokens = KEEP_T * dt_comm_size(mesh.cp) });
        dt_tensor *x =
            dt_require_grad(noise_part(ctx, c->dtype, DT_SHAPE(1, KEEP_T, KEEP_H, D), -1, NULL, 1));
        r.k = dt_require_grad(noise_part(ctx, c->dtype, keys, -1, NULL, 2));
        r.v = dt_require_grad(noise_part(ctx, c->dtype, keys, -1, NULL, 3));
        for (int i = 0; i < c->layers; i++) x = dt_block(ctx, context_block, x, &r);
        dt_backward(weigh(x, 4, NULL));
        dt_reset(ctx);
    }
    dt_memory used = dt_memory_used(ctx);
    CHECK_MSG(used.live_total == before, "%s, %d layers: a later step keeps %zu more bytes",
        kind_names[c->kind], c->layers, used.live_total - before);
    if (dt_comm_rank(mesh.cp) == 0)
        c->live = used.live[DT_MEM_ACTS], c->comm = used.live[DT_MEM_COMM];
    return dt_error(ctx);
}

static void test_kept_bytes(void) {
    for (int i = 0; i < 4 * 3 && !UNDER_ASAN; i++) {
        keep_case less = {
            .kind = i % 4, .K = i < 4 ? KEEP_H : 2, .layers = 2, .dtype = i < 8 ? DT_F64 : DT_BF16
        };
        keep_case more = less;
        size_t c = i < 4 ? 2 : 4, K = (size_t)less.K < c ? c : (size_t)less.K,
               size = dt_dtype_size(less.dtype);
        size_t D = less.dtype == DT_BF16 ? 4 * KEEP_D : KEEP_D, own = KEEP_T * D, keeps = 0,
               integers = 0;
        more.layers++;
        if (less.kind == DT_CP_ALLGATHER) keeps = c * 2 * own * (size_t)less.K;
        if (less.kind == DT_CP_ULYSSES) keeps = 2 * own * (KEEP_H + K);
        if (less.kind == DT_CP_ULYSSES && (size_t)less.K < c)
            keeps += 2 * own * c, integers = 2 * KEEP_T * c;
        size_t want =
            (own * KEEP_H + keeps) * size + KEEP_H * KEEP_T * (size == 8 ? 8 : 4) + integers * 4;
        run_well((int)c, kept_bytes_main, &less);
        run_well((int)c, kept_bytes_main, &more);
        CHECK_MSG(more.live - less.live == want,
            "%s over %zu, %d key heads, %s: %zu bytes for one more layer, not %zu",
            kind_names[less.kind], c, less.K, dt_dtype_name(less.dtype), more.live - less.live,
            want);
        CHECK_MSG(more.comm == less.comm, /* each layer returns its buffers to the pool */
            "%s over %zu: %zu bytes of comm for %d layers, %zu for %d", kind_names[less.kind], c,
            less.comm, less.layers, more.comm, more.layers);
    }
}

/* Pairs of token blocks that the kernels are called for: forward, backward. Thread-local, because a
   rank is a thread. */
static __thread long pairs[2];

static dt_status counted_attention(const dt_attention_args *a, void *stream) {
    pairs[0]++;
    return dt_kernels_cpu()->attention(a, stream);
}

static dt_status counted_attention_back(const dt_attention_back_args *a, void *stream) {
    pairs[1]++;
    return dt_kernels_cpu()->attention_back(a, stream);
}

typedef struct balance_case {
    int kind, packing;
    long pairs[8][2];
} balance_case;

static dt_status balance_main(dt_ctx *ctx, void *user) {
    balance_case *b = (balance_case *)user;
    dt_mesh mesh = mesh_of_one_axis(ctx, 'c');
    context_case c = {
        .kind = b->kind, .B = 1, .T = 32, .H = 1, .K = 1, .D = 1, .packing = b->packing
    };
    context_values *ignored = (context_values *)zeros(sizeof *ignored);
    pairs[0] = pairs[1] = 0;
    context_run(ctx, c, mesh.cp, ignored, dt_comm_size(mesh.cp), 0);
    memcpy(b->pairs[dt_ctx_rank(ctx)], pairs, sizeof pairs);
    free(ignored);
    return dt_error(ctx);
}

static void test_balance(void) {
    dt_kernels counted = *dt_kernels_cpu();
    counted.attention = counted_attention;
    counted.attention_back = counted_attention_back;
    for (int c = 2; c <= 8; c *= 2)
        for (int i = 0; i < 4; i++) {
            balance_case b = { .kind = i % 2 ? DT_CP_ZIGZAG : DT_CP_RING,
                .packing = i < 2 ? PACKED_NOT : PACKED_APART };
            outcome o;
            prepare(&o, c, balance_main, &b);
            o.desc.kernels = &counted;
            CHECK_MSG(start(&o) == DT_OK, "%s", o.report.text);
            for (int r = 0; r < c; r++) {
                /* separate documents: only a rank's own tokens; with zigzag one chunk is the first
                   half of a document, the other chunk its second half */
                long want = i == 0 ? r + 1 : i == 1 ? 2 * c + 1 : i == 2 ? 1 : 3;
                CHECK_MSG(b.pairs[r][0] == want && b.pairs[r][1] == want,
                    "%s over %d: rank %d has %ld and %ld pairs, "
                    "not %ld",
                    kind_names[b.kind], c, r, b.pairs[r][0], b.pairs[r][1], want);
            }
        }
}

// ==== 8. gpt.h ==================================================================================

typedef struct gpt_case {
    gpt_config c;
    int tp, cp, B, recompute, zero;
    size_t live, forward[DT_AXES], backward[DT_AXES], step[DT_AXES];
    size_t sums; /* bytes of gradient all-reduces by the formula */
    double loss;
    int32_t text[40];
} gpt_case;

/* F and V are not divisible by 2; C and the number of tokens are divisible by every group size. */
static gpt_config gpt_of(int arch, int layers, int heads, int kv_heads) {
    return (gpt_config){ .layers = layers,
        .width = 24,
        .heads = heads,
        .kv_heads = kv_heads,
        .ffn = 40,
        .seq = 16,
        .vocab = 37,
        .tied = arch == GPT_GPT2,
        .dtype = DT_F64,
        .arch = arch };
}

static gpt gpt_make(dt_ctx *ctx, gpt_case *g, dt_mesh *mesh) {
    *mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = g->tp, .cp = g->cp });
    gpt_config c = g->c;
    c.tp = mesh->tp;
    c.cp = mesh->cp;
    return gpt_register(ctx, c);
}

/* Token ids (B,seq) of this cp rank, shifted by `shift`. */
static dt_tensor *gpt_ids(dt_ctx *ctx, const gpt_case *g, dt_comm *cp, int shift) {
    int32_t whole[8 * 16], local[8 * 16];
    for (int i = 0; i < g->B * g->c.seq; i++)
        whole[i] = (int32_t)((noise(20, i + shift) + 1) / 2 * g->c.vocab);
    dt_cp_shard(g->c.cp_kind, g->B, g->c.seq, cp, whole, local);
    return dt_input(ctx, DT_I32, DT_SHAPE(g->B, g->c.seq / dt_comm_size(cp)), local);
}

static void axis_bytes(dt_ctx *ctx, size_t bytes[DT_AXES]) {
    for (int a = 0; a < DT_AXES; a++) bytes[a] = dt_comm_bytes(ctx, (dt_axis)a);
}

/* Measures activation bytes after two steps, and the bytes that the last step sent. */
static dt_status gpt_step_main(dt_ctx *ctx, void *user) {
    gpt_case *g = (gpt_case *)user, mine = *g;
    dt_mesh mesh;
    gpt m = gpt_make(ctx, &mine, &mesh);
    size_t at[4][DT_AXES];
    dt_zero *zero =
        g->zero ? dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh, .optimizer = DT_SGD }) : NULL;
    /* arenas grow in the first step */
    for (int step = 1; step <= 2 && dt_error(ctx) == DT_OK; step++) {
        axis_bytes(ctx, at[0]);
        dt_tensor *loss =
            gpt_loss(&m, gpt_ids(ctx, g, mesh.cp, 0), gpt_ids(ctx, g, mesh.cp, 1), g->B * g->c.seq);
        axis_bytes(ctx, at[1]);
        dt_backward(loss);
        axis_bytes(ctx, at[2]);
        mine.loss = dt_item(loss);
        dt_reset(ctx);
        if (zero) dt_zero_step(zero, 0.01);
        axis_bytes(ctx, at[3]);
    }
    mine.live = dt_memory_used(ctx).live[DT_MEM_ACTS];
    for (int a = 0; a < DT_AXES; a++) {
        mine.forward[a] = at[1][a] - at[0][a];
        mine.backward[a] = at[2][a] - at[1][a];
        mine.step[a] = at[3][a] - at[2][a];
    }
    mine.sums = 0;
    for (int u = 0; u < dt_bucket_count(ctx); u++) {
        const dt_bucket *unit = dt_bucket_get(ctx, u);
        const dt_grad_placement *marks =
            dt_param_get(ctx, unit->first_param)->param->desc.grad_placements;
        dt_comm *over[3] = { mesh.data, marks[0].comm, marks[1].comm };
        for (int k = 0; k < 3; k++)
            mine.sums += 2 * unit->padded * 8 * (size_t)(dt_comm_size(over[k]) - 1) /
                         (size_t)dt_comm_size(over[k]);
    }
    if (dt_ctx_rank(ctx) == 0) *g = mine;
    return dt_error(ctx);
}

/* One more layer must cost exactly the bytes that gpt.h states. B makes arenas grow past their
   minimum. */
static void test_gpt_kept_bytes(void) {
    for (int i = 0; i < 2 * 2 * 3 && !UNDER_ASAN; i++) {
        int arch = i % 2, sp = i / 2 % 2, few = i / 4; /* K: 4, 2, 1 over 2 ranks */
        gpt_config c = gpt_of(arch, 2, 4, few ? few == 1 ? 2 : 1 : 4);
        c.sp = sp;
        gpt_case less = { .c = c, .tp = 2, .cp = 1, .B = 8 }, more;
        more = less;
        more.c.layers++;
        run_well(2, gpt_step_main, &less);
        run_well(2, gpt_step_main, &more);
        int C = c.width, D = C / c.heads, KD = (c.kv_heads < 2 ? 2 : c.kv_heads) * D, F = c.ffn,
            H = c.heads, t = 2;
        int whole = arch ? 2 * C + 2 : 2 * C + 4, cut = 2 * C + 2 * KD + (arch ? 2 * F : F) + H;
        size_t want =
            (size_t)(less.B * c.seq) * (size_t)(whole * t / (sp ? t : 1) + cut) / (size_t)t * 8;
        CHECK_MSG(more.live - less.live == want,
            "model %d, sp %d, %d key heads: a layer keeps %zu bytes, formula %zu", arch, sp,
            c.kv_heads, more.live - less.live, want);
    }
}

/* Bytes of a full step. S: bytes to move a tensor (B,T/cp,C) over tp once. Besides the layers, the
   embedding sums tokens; the loss enters a tp region and gathers two numbers per row. Under sp it
   keeps the gathered tensor. */
static void test_gpt_bytes(void) {
    for (int i = 0; i < 2 * 4 * 4; i++) {
        gpt_config c = gpt_of(i % 2, 3, 4, i / 8 % 2 ? 2 : 4);
        int how = i / 2 % 4, kind = i / 8,
            tp = how == 3   ? 1
                 : how == 2 ? 4
                            : 2,
            cp = how == 3 ? 2 : 1;
        c.sp = how > 0 && how < 3;
        c.cp_kind = kind;
        gpt_case g = { .c = c, .tp = tp, .cp = cp, .B = 2, .zero = 1 };
        run_well(tp * cp, gpt_step_main, &g);
        size_t t = (size_t)tp, rows = (size_t)(g.B * c.seq / cp),
               S = rows * (size_t)c.width * 8 / t * (t - 1), L = 3;
        size_t losses = 16 * (t - 1) * rows;
        size_t forward = (4 * L + 2) * S + losses,
               backward = c.sp ? (6 * L + 2) * S : (4 * L + 2) * S;
        size_t around[2] = { 0, 0 }, gradients;
        if (cp > 1) {
            context_case attention = { .kind = kind,
                .B = g.B,
                .T = c.seq,
                .H = c.heads,
                .K = c.kv_heads,
                .D = c.width / c.heads };
            context_bytes(attention, (size_t)cp, &around[0], &around[1]);
        }
        CHECK_MSG(g.forward[DT_AXIS_TP] == forward && g.backward[DT_AXIS_TP] == backward,
            "model %d, tp %d, sp %d: %zu "
            "and %zu bytes over tp, formula %zu and %zu",
            c.arch, tp, c.sp, g.forward[DT_AXIS_TP], g.backward[DT_AXIS_TP], forward, backward);
        CHECK_MSG(g.forward[DT_AXIS_CP] == L * around[0] && g.backward[DT_AXIS_CP] == L * around[1],
            "model %d, %s "
            "over %d: %zu and %zu bytes, formula %zu and %zu",
            c.arch, kind_names[kind], cp, g.forward[DT_AXIS_CP], g.backward[DT_AXIS_CP],
            L * around[0], L * around[1]);
        gradients = g.backward[DT_AXIS_DP] + g.step[DT_AXIS_DP];
        CHECK_MSG(g.forward[DT_AXIS_DP] == 0 && gradients == g.sums,
            "model %d, tp %d, sp %d, cp %d: %zu bytes of "
            "gradients, formula %zu",
            c.arch, tp, c.sp, cp, gradients, g.sums);
        CHECK(g.step[DT_AXIS_TP] == 0 && g.step[DT_AXIS_CP] == 0);
    }
}

/* Generates text beyond the context length, and evaluates the loss. */
static dt_status gpt_text_main(dt_ctx *ctx, void *user) {
    gpt_case *g = (gpt_case *)user, mine = *g;
    dt_mesh mesh;
    gpt m = gpt_make(ctx, &mine, &mesh);
    for (int i = 0; i < 5; i++) mine.text[i] = 3 * i + 1;
    gpt_generate(&m, mine.text, 5, 24, (gpt_sampling){ .temperature = 0, .seed = 3 });
    memcpy(mine.text + 24, mine.text, 5 * sizeof *mine.text);
    gpt_generate(
        &m, mine.text + 24, 5, 16, (gpt_sampling){ .temperature = 0.8, .top_k = 20, .seed = 5 });
    dt_no_grad(ctx, 1);
    mine.loss = dt_item(
        gpt_loss(&m, gpt_ids(ctx, g, mesh.cp, 0), gpt_ids(ctx, g, mesh.cp, 1), g->B * g->c.seq));
    dt_sum_doubles(mesh.data, &mine.loss, 1);
    dt_no_grad(ctx, 0);
    dt_reset(ctx);
    for (int r = 0; r < dt_comm_size(mesh.world); r++) { /* all ranks must have the same text */
        if (r == dt_ctx_rank(ctx) && r > 0)
            CHECK(memcmp(mine.text, g->text, sizeof mine.text) == 0 && mine.loss == g->loss);
        if (r == dt_ctx_rank(ctx) && r == 0) *g = mine;
        dt_barrier(mesh.world);
    }
    return dt_error(ctx);
}

static void test_gpt_text(void) {
    static const struct {
        int tp, sp, cp, kind, kv;
    } hows[] = { { 2, 0, 1, 0, 4 }, { 4, 0, 1, 0, 2 }, { 2, 1, 1, 0, 1 }, { 4, 1, 1, 0, 4 },
        { 1, 0, 2, DT_CP_RING, 2 }, { 1, 0, 4, DT_CP_ZIGZAG, 4 }, { 2, 1, 2, DT_CP_ULYSSES, 2 },
        { 2, 0, 2, DT_CP_ALLGATHER, 1 } };
    for (int i = 0; i < 2 * 8; i++) {
        gpt_config c = gpt_of(i % 2, 2, 4, hows[i / 2].kv);
        c.cp_kind = hows[i / 2].kind;
        gpt_case one = { .c = c, .tp = 1, .cp = 1, .B = 2 }, g = one;
        g.c.sp = hows[i / 2].sp;
        g.tp = hows[i / 2].tp;
        g.cp = hows[i / 2].cp;
        run_well(1, gpt_text_main, &one);
        run_well(g.tp * g.cp, gpt_text_main, &g);
        CHECK_MSG(memcmp(g.text, one.text, sizeof g.text) == 0,
            "model %d, layout %d: the text differs", i % 2, i / 2);
        CHECK_MSG(fabs(g.loss - one.loss) <= 1e-12 * one.loss,
            "model %d, layout %d: evaluation %.17g, one rank %.17g", i % 2, i / 2, g.loss,
            one.loss);
    }
}

// ==== 9. Errors =================================================================================

typedef struct bad_call {
    const char *words;
    dt_status status;
} bad_call;
static const bad_call bad_calls[] = {
    { "another input is NULL", DT_ERR_ARG },        /* 0: column, x */
    { "another input is NULL", DT_ERR_ARG },        /* 1: column, w */
    { "another input is NULL", DT_ERR_ARG },        /* 2: row, x */
    { "another input is NULL", DT_ERR_ARG },        /* 3: row, w */
    { "the bias has one number", DT_ERR_SHAPE },    /* 4: row, bias */
    { "the residual lies outside", DT_ERR_SHAPE },  /* 5: row, residual */
    { "last dimensions must agree", DT_ERR_SHAPE }, /* 6: column, w */
    { "last dimensions must agree", DT_ERR_SHAPE }, /* 7: row, w */
    { "not divisible", DT_ERR_SHAPE },              /* 8: row, tokens over sp */
    { "another input is NULL", DT_ERR_ARG },        /* 9: embedding, table */
    { "another input is NULL", DT_ERR_ARG },        /* 10: embedding, ids */
    { "another input is NULL", DT_ERR_ARG },        /* 11: cross-entropy, labels */
    { "another input is NULL", DT_ERR_ARG },        /* 12: cross-entropy, logits */
    /* 13: linear cross-entropy, x */
    { "another input is NULL", DT_ERR_ARG },
    /* 14: linear cross-entropy, w */
    { "another input is NULL", DT_ERR_ARG },
    { "vocab 9 of 8 columns", DT_ERR_ARG },                      /* 15: cross-entropy */
    { "vocab -1 of 8 columns", DT_ERR_ARG },                     /* 16: linear cross-entropy */
    { "one i32 label a row", DT_ERR_SHAPE },                     /* 17: cross-entropy, labels */
    { "cp is NULL", DT_ERR_ARG },                                /* 18: attention, context */
    { "another input is NULL", DT_ERR_ARG },                     /* 19: attention, v */
    { "cp was made for 1 sequences of 8 tokens", DT_ERR_SHAPE }, /* 20: attention, tokens */
    { "cp was made for 2 sequences", DT_ERR_SHAPE },             /* 21: attention, batch */
    { "k and v must have one type and shape", DT_ERR_SHAPE },    /* 22: attention, v */
    { "H a multiple of K", DT_ERR_SHAPE },                       /* 23: attention, heads */
    { "exchanges tokens for heads", DT_ERR_SHAPE },              /* 24: attention, ulysses */
    { "2 sequences of 0 tokens", DT_ERR_ARG },                   /* 25: context */
    { "use 4 or 8", DT_ERR_SHAPE },                              /* 26: context, zigzag */
    { "kind 7", DT_ERR_SHAPE },                                  /* 27: context */
    { "-1 sequences", DT_ERR_ARG },                              /* 28: context */
    { "not for integers", DT_ERR_SHAPE },                        /* 29: attention */
    { "5 heads over 2 ranks of tp", DT_ERR_ARG },                /* 30: gpt */
    /* 31: gpt, positions under cp */
    { "of all ranks' tokens", DT_ERR_ARG },
    { "only window, soft_cap and scale", DT_ERR_ARG }, /* 32: attention, options */
};

static dt_tensor *bad_attention(dt_ctx *ctx, int which, dt_comm *comm) {
    dt_shape s = DT_SHAPE(1, 4, 2, 2), v = s, k = s;
    dt_cp_desc d = { .batch = 1, .tokens = 8 };
    dt_dtype type = which == 29 ? DT_I32 : DT_F64;
    if (which == 20) s.d[1] = k.d[1] = v.d[1] = 3;
    if (which == 21 || which == 25) d.batch = 2;
    if (which == 22) v.d[2] = 1;
    if (which == 23) s.d[2] = 3;
    if (which == 24) d.kind = DT_CP_ULYSSES, s.d[2] = k.d[2] = v.d[2] = 3;
    if (which == 25) d.tokens = 0;
    if (which == 26) d.kind = DT_CP_ZIGZAG, d.tokens = 6;
    if (which == 27) d.kind = 7;
    if (which == 28) d.batch = -1;
    dt_cp *c = dt_cp_make(ctx, comm, d);
    dt_tensor *q = dt_input(ctx, type, s, NULL),
              *vs = which == 19 ? NULL : dt_input(ctx, type, v, NULL);
    if (which == 32) /* the mask is that of dt_cp_make */
        return dt_cp_attention_at(q, q, q, c, (dt_attn_desc){ .full = 1 });
    return dt_cp_attention(q, dt_input(ctx, type, k, NULL), vs, which == 18 ? NULL : c);
}

static dt_tensor *bad_gpt(dt_ctx *ctx, int which, dt_comm *comm) {
    gpt_config c = gpt_of(0, 1, which == 30 ? 5 : 4, which == 30 ? 5 : 4);
    int32_t ids[4] = { 0, 1, 2, 3 };
    if (which == 30)
        c.width = 25, c.tp = comm;
    else
        c.cp = comm;
    gpt m = gpt_register(ctx, c);
    dt_tensor *id = dt_input(ctx, DT_I32, DT_SHAPE(1, 4), ids);
    return gpt_loss_at(&m, (gpt_tokens){ .ids = id, .positions = id }, id, 4);
}

static dt_status bad_call_main(dt_ctx *ctx, void *user) {
    int i = *(int *)user;
    dt_comm *comm = dt_world(ctx);
    dt_placement all = DT_REPLICATE, sp = DT_SHARD(1);
    dt_linear_desc plain = { .activation = DT_ACT_NONE };
    dt_loss_desc none = { .vocab = i == 15 ? 9 : i == 16 ? -1 : 0 };
    int32_t numbers[4] = { 0, 1, 2, 3 };
    dt_tensor *x = noise_part(ctx, DT_F64, DT_SHAPE(1, 3, 4), -1, NULL, 1);
    dt_tensor *w = noise_part(ctx, DT_F64, DT_SHAPE(4, 4), -1, NULL, 2);
    dt_tensor *odd = noise_part(ctx, DT_F64, DT_SHAPE(4, 3), -1, NULL, 3);
    dt_tensor *ids = dt_input(ctx, DT_I32, DT_SHAPE(3), numbers),
              *four = dt_input(ctx, DT_I32, DT_SHAPE(4), numbers);
    dt_tensor *y = NULL;
    if (i == 0 || i == 1 || i == 6)
        y = dt_column_linear(i ? x : NULL, i == 6 ? odd : i ? NULL : w, NULL, plain, comm, all);
    else if (i < 9)
        y = dt_row_linear(i == 2 ? NULL : x,
            i == 3   ? NULL
            : i == 7 ? odd
                     : w,
            i == 4 ? odd : NULL, i == 5 ? odd : NULL, comm, i == 8 ? sp : all);
    else if (i < 11)
        y = dt_vocab_embedding(i == 9 ? NULL : w, i == 10 ? NULL : ids, comm, all);
    else if (i < 13 || i == 15 || i == 17)
        y = dt_vocab_cross_entropy(i == 12 ? NULL : x,
            i == 11   ? NULL
            : i == 17 ? four
                      : ids,
            3, none, comm);
    else if (i < 18)
        y = dt_vocab_linear_cross_entropy(
            i == 13 ? NULL : x, i == 14 ? NULL : w, ids, 3, none, comm, all);
    else
        y = i < 30 || i == 32 ? bad_attention(ctx, i, comm) : bad_gpt(ctx, i, comm);
    CHECK_MSG(!y && dt_error(ctx) != DT_OK, "bad call %d is accepted", i);
    /* sticky */
    CHECK(!dt_column_linear(x, w, NULL, plain, comm, all) &&
          !dt_row_linear(x, w, NULL, NULL, comm, all));
    return dt_error(ctx);
}

/* Zero sequences and zero rows are valid. */
static dt_status empty_batch_main(dt_ctx *ctx, void *user) {
    dt_mesh mesh = mesh_of_one_axis(ctx, 'c');
    (void)user;
    for (int kind = 0; kind < C_KINDS; kind++) {
        context_rank r = { .context = dt_cp_make(
                               ctx, mesh.cp, (dt_cp_desc){ .kind = kind, .tokens = 8 }) };
        dt_tensor *q = dt_require_grad(dt_input(ctx, DT_F32, DT_SHAPE(0, 4, 2, 2), NULL));
        dt_tensor *y = dt_cp_attention(q, q, q, r.context);
        CHECK_MSG(y && dt_count(y->shape) == 0, "%s with zero sequences", kind_names[kind]);
        dt_backward(weigh(y, 1, NULL));
        dt_reset(ctx);
    }
    return dt_error(ctx);
}

/* Refuses each allocation in turn: the run must fail and free all memory. */
static dt_status refused_main(dt_ctx *ctx, void *user) {
    dt_mesh mesh = mesh_of_one_axis(ctx, 'c');
    context_case c = { .B = 1, .T = 8, .H = 2, .K = 1, .D = 2 };
    layer_rank k = { .c = { .bias = 1, .x_grad = 1, .outside = 1, .wrap = BLOCK }, .tp = mesh.cp };
    context_values *ignored = (context_values *)zeros(sizeof *ignored);
    (void)user;
    k.outside = DT_SHARD(1);
    for (int i = 0; i < 2 * C_KINDS && dt_error(ctx) == DT_OK; i++) {
        c.kind = i % C_KINDS;
        c.dtype = i / C_KINDS ? 2 : 0;
        context_run(ctx, c, mesh.cp, ignored, 2, 0);
    }
    for (int p = 0; p < 4; p++)
        k.p[p] = noise_part(ctx, DT_F64,
            p == 0   ? DT_SHAPE(4, LC)
            : p == 1 ? DT_SHAPE(4)
            : p == 2 ? DT_SHAPE(LO, 4)
                     : DT_SHAPE(LO),
            -1, NULL, p);
    dt_tensor *x = dt_require_grad(noise_part(ctx, DT_F64, DT_SHAPE(1, 2, LC), -1, NULL, 9));
    dt_backward(weigh(dt_block(ctx, layer_forward, x, &k), 3, NULL));
    free(ignored);
    return dt_error(ctx);
}

static void test_refused(void) {
    for (int i = 0; i < (int)(sizeof bad_calls / sizeof *bad_calls); i++) {
        outcome o;
        run(&o, 2, bad_call_main, &i);
        CHECK_MSG(o.status == bad_calls[i].status && strstr(o.report.text, bad_calls[i].words),
            "bad call %d: %s", i, o.report.text);
    }
    run_well(2, empty_batch_main, NULL);
    long calls = 1;
    for (long at = 0; at <= calls; at += at < 20 ? 1 : 3) {
        outcome o;
        prepare(&o, 2, refused_main, NULL);
        o.host.refuse_at = at;
        start(&o); /* checks that all memory is freed */
        if (at == 0) calls = o.host.calls;
        CHECK_MSG(o.status == (at ? DT_ERR_MEM : DT_OK), "allocation %ld of %ld refused: %s %s", at,
            calls, dt_status_name(o.status), o.report.text);
    }
}

int main(void) {
    test_layers();
    test_freed_gathers();
    test_vocab();
    test_kv();
    test_distribute();
    test_tokens();
    test_context();
    test_kept_bytes();
    test_balance();
    test_gpt_kept_bytes();
    test_gpt_bytes();
    test_gpt_text();
    test_refused();
    return check_done("test_layers");
}
