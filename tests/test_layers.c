/* test_layers.c - layers for tensor, sequence and context parallelism: values, gradients, bytes sent, bytes kept

   Each layer runs on some ranks and must equal the plain op on one rank with the whole tensors. What ranks hold of a
   logical tensor is put together in `whole`s. Values are functions of a place in the whole tensor, so every layout
   sees the same. Whole models in whole layouts are test_matrix.c's. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include "../examples/gpt.h"
#include "ranks.h"

// ==== Helpers =======================================================================================================

/* A number in [-1, 1) from a tensor's number and a place in it. */
static double noise(int tensor, int64_t i) {
    uint64_t h = mix((uint64_t)(tensor + 1) * 1000003u + mix((uint64_t)i + 77));
    return (double)(h >> 11) / 4503599627370496.0 - 1;
}

static void *zeros(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) exit(1);
    return p;
}

/* Values as the type holds them. */
static void put_value(void *buf, dt_dtype dtype, size_t i, double x) {
    put(buf, dtype, i, narrow(dtype) ? rounded(dtype, (float)x) : x);
}

/* Element i of part `part` of `parts` along dim, in the whole tensor; dim below 0: not cut. */
static int64_t global_of(dt_shape whole, int dim, int parts, int part, int64_t i) {
    int64_t inner = 1, rows;
    if (dim < 0 || parts == 1) return i;
    for (int d = dim + 1; d < whole.nd; d++) inner *= whole.d[d];
    rows = whole.d[dim] / parts * inner;
    return i / rows * whole.d[dim] * inner + part * rows + i % rows;
}

static dt_shape part_of(dt_shape whole, int dim, int parts) {
    if (dim >= 0) whole.d[dim] /= parts;
    return whole;
}

/* This rank's part of a tensor of noise. */
static dt_tensor *noise_part(dt_ctx *ctx, dt_dtype dtype, dt_shape whole, int dim, dt_comm *comm, int tensor) {
    int        n = dim < 0 ? 1 : dt_comm_size(comm);
    dt_shape   shape = part_of(whole, dim, n);
    char      *host = (char *)zeros((size_t)dt_count(shape) * dt_dtype_size(dtype));
    for (int64_t i = 0; i < dt_count(shape); i++)
        put_value(host, dtype, (size_t)i, noise(tensor, global_of(whole, dim, n, dt_comm_rank(comm), i)));
    dt_tensor *t = dt_input(ctx, dtype, shape, host);
    free(host);
    return t;
}

/* sum of x[i] * noise(tensor, place[i]), as a user writes an op; place NULL: i itself. */
typedef struct weigh_saved { int tensor; const int64_t *place; } weigh_saved;

static double weight_of(const weigh_saved *s, int64_t i) { return noise(s->tensor, s->place ? s->place[i] : i); }

static dt_status weigh_back(dt_node *n) {
    const weigh_saved *s = (const weigh_saved *)n->saved;
    dt_tensor         *x = n->in[0];
    double             up = *(const double *)n->out->grad;
    void              *dx = dt_wants(n, 0) ? dt_grad(n, 0) : NULL;
    for (int64_t i = 0; dx && i < dt_count(x->shape); i++)
        put_value(dx, x->dtype, (size_t)i, get(dx, x->dtype, (size_t)i) + up * weight_of(s, i));
    return DT_OK;
}

/* place must live until dt_reset. */
static dt_tensor *weigh(dt_tensor *x, int tensor, const int64_t *place) {
    weigh_saved s = { tensor, place };
    dt_tensor  *out = x ? dt_new(x->ctx, DT_F64, DT_SCALAR) : NULL;
    double      sum = 0;
    if (!out) return NULL;
    for (int64_t i = 0; i < dt_count(x->shape); i++) sum += get(x->data, x->dtype, (size_t)i) * weight_of(&s, i);
    *(double *)out->data = sum;
    weigh_saved *saved = (weigh_saved *)dt_record_saved(out, (dt_record_desc){ .name = "weigh", .in = { x },
        .backward = weigh_back, .saved_bytes = sizeof s });
    if (saved) *saved = s;
    return out;
}

/* NULL if a equals b to tol times the largest of b (or 1), else what differs. */
static const char *unequal(const double *a, const double *b, size_t n, double tol, char *text, size_t bytes) {
    double most = 1;
    for (size_t i = 0; i < n; i++) most = fmax(most, fabs(b[i]));
    for (size_t i = 0; i < n; i++)
        if (!(fabs(a[i] - b[i]) <= tol * most)) {
            snprintf(text, bytes, "[%zu] %.17g, one rank %.17g", i, a[i], b[i]);
            return text;
        }
    return NULL;
}

static dt_mesh all_over(dt_ctx *ctx, char axis) {
    int n = dt_comm_size(dt_world(ctx));
    return dt_mesh_make(ctx, (dt_mesh_desc){ .tp = axis == 't' ? n : 1, .cp = axis == 'c' ? n : 1 });
}

/* ==== 1. Column- and row-parallel layers ============================================================================

   y = act(x w1^T + b1) w2^T + b2 + r. F is divisible by 7 only, so the last ranks' boxes overhang. */

enum { LB = 12, LS = 12, LC = 3, LF = 7, LO = 5, L_MOST = LB * LS * LO };
enum { L_Y = 0, L_DX, L_DR, L_DW1, L_DB1, L_DW2, L_DB2, L_ALL };
static const int layer_count[L_ALL] = { LB * LS * LO, LB * LS * LC, LB * LS * LO, LF * LC, LF, LO *LF, LO };
static const char *const layer_names[L_ALL] = { "y", "dx", "dr", "dw1", "db1", "dw2", "db2" };

enum { ROOT = 0, BLOCK, RECOMPUTED, WRAPS };
typedef struct layer_case { int bias, residual, activation, x_grad, outside, wrap, halves; } layer_case;
enum { ONES = 16, LAYER_CASES = ONES * 3 * WRAPS * 2 };

static layer_case layer_case_of(int i) {
    int one = i % ONES, rest = i / ONES;
    return (layer_case){ one & 1, one >> 1 & 1, one >> 2 & 1 ? DT_ACT_GELU : DT_ACT_NONE, one >> 3, rest % 3 - 1,
        rest / 3 % WRAPS, rest / 3 / WRAPS };
}

typedef struct layer_values { double v[L_ALL][L_MOST]; } layer_values;
typedef struct layer_world { layer_values one[ONES], got[4]; } layer_world;
typedef struct layer_rank {
    layer_case c;
    dt_comm   *tp;
    dt_place   outside;
    dt_tensor *p[4];            /* w1, b1, w2, b2 */
    dt_tensor *r, *entered;
    int        plain;           /* the ops of one rank */
} layer_rank;

static dt_tensor *layer_forward(dt_tensor *x, void *user) {
    layer_rank    *k = (layer_rank *)user;
    dt_linear_desc act = { .activation = k->c.activation }, add = { .residual = k->r };
    dt_tensor     *b1 = k->c.bias ? k->p[1] : NULL, *b2 = k->c.bias ? k->p[3] : NULL;
    if (k->plain) return dt_linear_at(dt_linear_at(x, k->p[0], b1, act), k->p[2], b2, add);
    dt_tensor *h = dt_column_linear(x, k->p[0], b1, act, k->tp, k->outside);
    k->entered = h && h->maker ? h->maker->in[0] : NULL;
    return dt_row_linear(h, k->p[2], b2, k->r, k->tp, k->outside);
}

/* Places a gradient of the whole size: cut ones where they belong, others as they are. */
static void leave_param(const dt_tensor *t, double *full) {
    dt__box_walk walk = dt__box_begin(t->param->full, t->param->box);
    while (dt__box_next(&walk))
        for (int64_t i = 0; t->grad && i < walk.run; i++)
            full[walk.global + i] = get(t->grad, dt_grad_dtype(t), (size_t)(walk.local + i));
}

static void leave_part(const dt_tensor *t, const void *from, dt_shape whole, int dim, dt_comm *comm, double *full) {
    int n = dim < 0 ? 1 : dt_comm_size(comm);
    for (int64_t i = 0; from && i < dt_count(t->shape); i++)
        full[global_of(whole, dim, n, dt_comm_rank(comm), i)] = get(from, t->dtype, (size_t)i);
}

/* Bytes of forward and backward on one rank. X, Y: those of the whole input and result. A whole that a block has
   dropped is gathered again where the backward meets it: in both halves of one that runs in halves; a recomputed block
   gathers and sums as its forward does; the root drops nothing before its backward has begun. */
static void layer_bytes(layer_case c, size_t n, size_t *forward, size_t *backward) {
    size_t X = (size_t)LB * LS * LC * 8 / n * (n - 1), Y = (size_t)LB * LS * LO * 8 / n * (n - 1);
    int    again = (c.wrap == BLOCK) + c.halves;
    *forward = c.outside < 0 ? 2 * Y : X + Y;
    *backward = c.outside < 0 ? c.x_grad * 2 * X : Y + (size_t)(c.x_grad * (1 + again)) * X;
    if (c.wrap == RECOMPUTED) *backward += *forward;
}

static void layer_run(dt_ctx *ctx, layer_rank *k, layer_values *got) {
    dt_shape   x_shape = DT_SHAPE(LB, LS, LC), y_shape = DT_SHAPE(LB, LS, LO);
    int        dim = k->plain ? -1 : k->c.outside, n = dim < 0 ? 1 : dt_comm_size(k->tp);
    int64_t    place[L_MOST];
    size_t     before = dt_comm_bytes(ctx, DT_AXIS_TP), forward = 0, backward = 0;
    dt_tensor *x = noise_part(ctx, DT_F64, x_shape, dim, k->tp, 1);
    if (k->c.x_grad) dt_require_grad(x);
    k->r = k->c.residual ? dt_require_grad(noise_part(ctx, DT_F64, y_shape, dim, k->tp, 2)) : NULL;
    k->entered = NULL;
    dt_tensor *y = k->c.wrap == ROOT || k->plain ? layer_forward(x, k)
        : dt_block_at(ctx, layer_forward, x, k, (dt_block_desc){ .recompute = k->c.wrap == RECOMPUTED });
    if (!y) return;
    size_t between = dt_comm_bytes(ctx, DT_AXIS_TP);
    int    drops = k->c.wrap != ROOT && dim >= 0 && k->c.x_grad && dt_comm_size(k->tp) > 1;
    if (drops) CHECK_MSG(k->entered && !k->entered->data && !k->entered->room, "what was gathered is kept");
    for (int64_t i = 0; i < dt_count(y->shape); i++) place[i] = global_of(y_shape, dim, n, dt_comm_rank(k->tp), i);
    leave_part(y, y->data, y_shape, dim, k->tp, got->v[L_Y]);
    dt_tensor *loss = weigh(y, 3, place);
    if (k->c.halves) dt_backward_input(loss), dt_backward_weight(loss);
    else dt_backward(loss);
    layer_bytes(k->c, (size_t)dt_comm_size(k->tp), &forward, &backward);
    if (!k->plain) CHECK_MSG(between - before == forward && dt_comm_bytes(ctx, DT_AXIS_TP) - between == backward,
        "outside %d, wrap %d, halves %d over %d: %zu and %zu bytes, formula %zu and %zu", k->c.outside, k->c.wrap,
        k->c.halves, dt_comm_size(k->tp), between - before, dt_comm_bytes(ctx, DT_AXIS_TP) - between, forward, backward);
    if (k->c.x_grad) leave_part(x, x->grad, x_shape, dim, k->tp, got->v[L_DX]);
    if (k->r) leave_part(k->r, k->r->grad, y_shape, dim, k->tp, got->v[L_DR]);
    for (int p = 0; p < 4; p++)
        if (k->c.bias || p % 2 == 0) leave_param(k->p[p], got->v[L_DW1 + p]);
}

/* By rank 0, when all have left theirs. A tensor is cut, whole on all ranks, or a part of a sum on each. */
static void layer_compare(layer_case c, int one, int ranks, layer_world *w) {
    char           text[200];
    static double sum[L_MOST];
    for (int t = 0; t < L_ALL; t++) {
        int cut = (t >= L_DW1 && t <= L_DW2) || c.outside >= 0;
        for (int r = 0; r < (cut ? 1 : ranks); r++) {
            memcpy(sum, w->got[r].v[t], sizeof sum);
            for (int q = 1; q < ranks && cut; q++)
                for (int i = 0; i < layer_count[t]; i++) sum[i] += w->got[q].v[t][i];
            const char *bad = unequal(sum, w->one[one].v[t], (size_t)layer_count[t], 1e-12, text, sizeof text);
            CHECK_MSG(!bad, "%d ranks, bias %d, residual %d, act %d, x_grad %d, outside %d, wrap %d, halves %d: %s %s",
                ranks, c.bias, c.residual, c.activation, c.x_grad, c.outside, c.wrap, c.halves, layer_names[t], bad);
        }
    }
}

/* Without gradients: the same values, nothing recorded. */
static void layer_no_grad(dt_ctx *ctx, layer_rank *k, const double *y_one) {
    dt_shape x_shape = DT_SHAPE(LB, LS, LC), y_shape = DT_SHAPE(LB, LS, LO);
    double  *whole = (double *)zeros(sizeof(double) * L_MOST);
    int      n = k->c.outside < 0 ? 1 : dt_comm_size(k->tp), wrong = 0;
    dt_no_grad(ctx, 1);
    dt_tensor *x = dt_require_grad(noise_part(ctx, DT_F64, x_shape, k->c.outside, k->tp, 1));
    k->r = k->c.residual ? noise_part(ctx, DT_F64, y_shape, k->c.outside, k->tp, 2) : NULL;
    dt_tensor *y = dt_block(ctx, layer_forward, x, k);
    dt_no_grad(ctx, 0);
    if (!CHECK(y && !y->needs_grad && !y->maker)) return;
    leave_part(y, y->data, y_shape, k->c.outside, k->tp, whole);
    for (int64_t i = 0; i < dt_count(y->shape); i++) {
        int64_t at = global_of(y_shape, k->c.outside, n, dt_comm_rank(k->tp), i);
        wrong += !(fabs(whole[at] - y_one[at]) <= 1e-12 * 10);
    }
    CHECK_MSG(wrong == 0, "dt_no_grad, outside %d: %d values differ", k->c.outside, wrong);
    free(whole);
    dt_reset(ctx);
}

static dt_status layers_main(dt_ctx *ctx, void *user) {
    layer_world  *w = (layer_world *)user;
    dt_mesh       mesh = all_over(ctx, 't');
    int           ranks = dt_comm_size(dt_world(ctx)), me = dt_comm_rank(dt_world(ctx));
    layer_rank    k = { .tp = mesh.tp };
    dt_param_desc plain = { .dtype = DT_F64 }, rows = plain, columns = plain;
    rows.cuts[0] = (dt_cut){ mesh.tp, 0 };
    columns.cuts[0] = (dt_cut){ mesh.tp, 1 };
    k.p[0] = dt_param_at(ctx, "w1", DT_SHAPE(LF, LC), DT_NORMAL(1), rows);
    k.p[1] = dt_param_at(ctx, "b1", DT_SHAPE(LF), DT_NORMAL(1), rows);
    k.p[2] = dt_param_at(ctx, "w2", DT_SHAPE(LO, LF), DT_NORMAL(1), columns);
    k.p[3] = dt_param_at(ctx, "b2", DT_SHAPE(LO), DT_NORMAL(1), plain);
    for (int i = 0; i < (ranks == 1 ? ONES + LAYER_CASES : LAYER_CASES) && dt_error(ctx) == DT_OK; i++) {
        int number = ranks == 1 && i >= ONES ? i - ONES : i, alone = ranks == 1 && i < ONES;
        k.c = layer_case_of(number);
        if (k.c.outside >= 0) k.outside = DT_SHARD(k.c.outside);
        else k.outside = DT_REPLICATE;
        k.plain = alone;
        memset(&w->got[me], 0, sizeof w->got[me]);
        dt_clear_grads(ctx);
        layer_run(ctx, &k, alone ? &w->one[number] : &w->got[me]);
        dt_reset(ctx);
        dt_barrier(dt_world(ctx));
        if (me == 0 && !alone) layer_compare(k.c, number % ONES, ranks, w);
        dt_barrier(dt_world(ctx));
        if (number % ONES == 7 && k.c.wrap == BLOCK && !k.c.halves) layer_no_grad(ctx, &k, w->one[number % ONES].v[L_Y]);
    }
    return dt_error(ctx);
}

static void test_layers(void) {
    layer_world *w = (layer_world *)zeros(sizeof *w);
    for (int ranks = 1; ranks <= 4; ranks++) run_well(ranks, layers_main, w);
    free(w);
}

/* ==== 2. Brief tensors ==============================================================================================

   A whole that a block has gathered is gone when the block's forward has ended. Who uses it later hears of it; what is
   made of it inside, over one group more or under another name, has its data where the backward reads them. */

enum { BRIEF_USED = 0, BRIEF_VIEW, BRIEF_READ, BRIEF_RETURNED, BRIEF_RETURNED_AGAIN, BRIEF_NO_GRAD, BRIEF_CASES };
typedef struct brief_case { int kind, seen; dt_comm *comm[2]; dt_tensor *kept, *w; int parts; } brief_case;

static dt_tensor *brief_block(dt_tensor *x, void *user) {
    brief_case *b = (brief_case *)user;
    b->kept = dt_tp_enter(x, b->comm[0], DT_SHARD(1));
    if (b->kind == BRIEF_VIEW && b->kept) b->kept = dt_reshape(b->kept, DT_SHAPE(dt_count(b->kept->shape)));
    return b->kind == BRIEF_RETURNED || b->kind == BRIEF_RETURNED_AGAIN ? b->kept : dt_gelu(b->kept);
}

static dt_status brief_main(dt_ctx *ctx, void *user) {
    brief_case b = { .kind = ((brief_case *)user)->kind };
    double     host[16];
    b.comm[0] = dt_world(ctx);
    if (b.kind == BRIEF_NO_GRAD) dt_no_grad(ctx, 1);
    dt_tensor *x = dt_require_grad(noise_part(ctx, DT_F64, DT_SHAPE(2, 4, 2), 1, dt_world(ctx), 1));
    dt_block_desc how = { .recompute = b.kind == BRIEF_RETURNED_AGAIN };
    dt_tensor    *y = dt_block_at(ctx, brief_block, x, &b, how);
    if (b.kind == BRIEF_RETURNED) b.kept = y;
    CHECK(b.kept && (b.kind != BRIEF_RETURNED_AGAIN || y == NULL));
    if (b.kind == BRIEF_READ) CHECK(dt_read(b.kept, host) != DT_OK);
    else CHECK(dt_gelu(b.kept) == NULL);
    return dt_error(ctx);
}

/* Rows of a matrix gathered over one group and then over another; each whole is brief. */
static dt_tensor *brief_twice(dt_tensor *x, void *user) {
    brief_case *b = (brief_case *)user;
    dt_tensor  *n = dt_tp_enter(dt_tp_enter(x, b->comm[0], DT_SHARD(0)), b->comm[1], DT_SHARD(0));
    return dt_linear(n, b->w, NULL);
}

/* The whole of one group is a copy of another: another name for the same values. */
static dt_tensor *brief_renamed(dt_tensor *x, void *user) {
    brief_case *b = (brief_case *)user;
    dt_tensor  *n = dt_tp_enter(x, b->comm[0], DT_SHARD(0));
    return dt_linear(dt_redistribute(n, b->comm[1], DT_REPLICATE, DT_COPY), b->w, NULL);
}

static dt_tensor *brief_viewed(dt_tensor *x, void *user) {
    brief_case *b = (brief_case *)user;
    dt_tensor  *n = dt_tp_enter(x, b->comm[0], DT_SHARD(0));
    return n ? dt_linear(dt_reshape(dt_reshape(n, DT_SHAPE(n->shape.d[0] * 2)), n->shape), b->w, NULL) : NULL;
}

/* dw of w (3,2) with loss weigh(x w^T) is the same whether or not wholes are dropped: without a block none are. The
   blocks behind take what was given back, so a pointer to it would read theirs. */
static dt_status brief_values_main(dt_ctx *ctx, void *user) {
    static const dt_block_fn fns[] = { brief_twice, brief_renamed, brief_viewed };
    dt_mesh    mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2, .cp = 2 });
    brief_case b = { .comm = { mesh.tp, mesh.cp } };
    double     dw[3][6];
    (void)user;
    b.w = dt_param_at(ctx, "w", DT_SHAPE(3, 2), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F64 });
    for (int f = 0; f < 3 && dt_error(ctx) == DT_OK; f++) {
        for (int how = 0; how < 3; how++) {
            dt_tensor *x = dt_require_grad(noise_part(ctx, DT_F64, DT_SHAPE(4, 2), -1, NULL, dt_ctx_rank(ctx)));
            dt_tensor *y = how ? dt_block(ctx, fns[f], x, &b) : fns[f](x, &b);
            dt_tensor *other = dt_require_grad(noise_part(ctx, DT_F64, DT_SHAPE(4, 2), -1, NULL, 9));
            for (int i = 0; i < 3 && how; i++) dt_block(ctx, fns[f], other, &b);
            dt_tensor *loss = weigh(y, 5, NULL);
            if (how == 2) dt_backward_input(loss), dt_backward_weight(loss);
            else dt_backward(loss);
            if (dt_error(ctx) != DT_OK) return dt_error(ctx);
            for (int i = 0; i < 6; i++) dw[how][i] = ((double *)b.w->grad)[i];
            dt_reset(ctx);
            dt_clear_grads(ctx);
        }
        CHECK_MSG(memcmp(dw[0], dw[1], sizeof dw[0]) == 0, "brief tensors, function %d: other gradients", f);
        CHECK_MSG(memcmp(dw[0], dw[2], sizeof dw[0]) == 0, "brief tensors, function %d: other ones in halves", f);
    }
    return dt_error(ctx);
}

static void test_brief(void) {
    for (int kind = 0; kind < BRIEF_CASES; kind++) {
        brief_case b = { .kind = kind };
        outcome    o;
        run(&o, 2, brief_main, &b);
        CHECK_MSG(o.status == DT_ERR_ARG && strstr(o.report.text, "whole only inside its dt_block"), "kind %d: %s", kind,
            o.report.text);
    }
    run_well(4, brief_values_main, NULL);
}

int main(void) {
    test_layers();
    test_brief();
    return check_done("test_layers");
}
