/* test_moe.c - expert parallelism: router, dispatch, expert matrix product, combine

   Run:  test_moe [folder of the golden files, default tests/golden]

   One rank is compared with transformers (golden/make_moe.py) and with finite differences. Every
   layout is compared with one rank, in f64: outputs and gradients to 1e-12; choices, drops and
   counts exactly. Ranks are threads and write their values into one result, at the indices of the
   full tensors. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include "tests/golden/golden.h"
#include <math.h>
#include <sys/mman.h>

static const char *golden_folder = "tests/golden";

// ==== Helpers ===================================================================================

static dt_host quiet; /* logs nothing, because failures here are expected */

static void silent(void *user, int level, int rank, const char *text) {
    (void)user;
    (void)level;
    (void)rank;
    (void)text;
}

/* Fills new memory with bytes that are NaNs, because callers must not rely on zeroed memory. */
static void *alloc_nan_filled(void *user, size_t bytes, dt_mem mem) {
    void *p = dt_host_default()->alloc(user, bytes, mem);
    return p ? memset(p, 0xff, bytes) : NULL;
}

static dt_report run(int ranks, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    dt_report report;
    dt_run((dt_run_desc){ .ranks = ranks, .timeout_s = 60, .host = &quiet, .report = &report },
        rank_main, user);
    return report;
}

/* A pseudo-random multiple of 1/64 in [-1, 1), which bf16 and f16 represent exactly. */
static double number(uint32_t a, uint32_t b) {
    uint32_t h = a * 2654435761u + b * 2246822519u + 374761393u;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    return (double)((h ^ (h >> 16)) >> 25) / 64 - 1;
}

/* Makes a tensor of any dtype from doubles. */
static dt_tensor *tensor_of(dt_ctx *ctx, dt_dtype dtype, dt_shape shape, const double *values) {
    size_t n = (size_t)dt_count(shape);
    char *host = (char *)malloc(n * 8 + 1);
    for (size_t i = 0; i < n; i++) dt__set_number(dtype, host, i, values[i]);
    dt_tensor *t = dt_input(ctx, dtype, shape, host);
    free(host);
    return t;
}

static void values_of(dt_dtype dtype, const void *data, int64_t n, double *out) {
    for (int64_t i = 0; i < n; i++) out[i] = dt__number(dtype, data, (size_t)i);
}

/* The largest |a - b| / max(|b|, mean size of b). */
static double distance(const double *a, const double *b, int64_t n) {
    double size = 0, most = 0;
    for (int64_t i = 0; i < n; i++) size += fabs(b[i]) / (double)n;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs(a[i] - b[i]) / fmax(fabs(b[i]), size > 0 ? size : 1);
        if (!(d <= most)) most = d; /* true for a NaN, too */
    }
    return most;
}

/* A user's op: the sum of x[i] w[i]; its gradient is w. */
typedef struct dot_saved {
    const double *w;
} dot_saved;

static dt_status dot_back(dt_node *n) {
    const double *w = ((const dot_saved *)n->saved)->w;
    dt_tensor *x = n->in[0];
    void *dx = dt_wants(n, 0) ? dt_grad(n, 0) : NULL;
    if (dt__is_dry(dx)) return DT_OK;
    double up = *(const double *)n->out->grad;
    for (int64_t i = 0; dx && i < dt_count(x->shape); i++)
        dt__set_number(x->dtype, dx, (size_t)i, dt__number(x->dtype, dx, (size_t)i) + up * w[i]);
    return DT_OK;
}

static dt_tensor *dot(dt_tensor *x, const double *w) {
    dt_tensor *out = x ? dt_new(x->ctx, DT_F64, DT_SCALAR) : NULL;
    if (!out) return NULL;
    double sum = 0;
    for (int64_t i = 0; !dt__is_dry(x->data) && i < dt_count(x->shape); i++)
        sum += dt__number(x->dtype, x->data, (size_t)i) * w[i];
    if (!dt__is_dry(out->data)) *(double *)out->data = sum;
    dot_saved *saved = (dot_saved *)dt_record_saved(out,
        (dt_record_desc){
            .name = "dot", .in = { x }, .backward = dot_back, .saved_bytes = sizeof(dot_saved) });
    if (saved) saved->w = w;
    return out;
}

// ==== A layer in any layout =====================================================================

enum {
    S = 4,
    T = 16,
    C = 8,
    F = 6,
    E = 4,
    MOST_K = 4,
    N_X = S * T * C,
    N_W = E * C,
    N_W1 = E * F * C
};

/* All results of a layer, as full tensors. */
typedef struct result {
    double y[N_X], dx[N_X], dw[N_W], dw1[N_W1], db1[E * F], dw2[N_W1], db2[E * C], bias[E],
        counts[E];
    double choices, dropped, balance, z, loss;
    int32_t chosen[S * T * MOST_K];
} result;

typedef struct job {
    int ep, tp, sp, cp, kind, k, places, biased, recompute, halves, plain, uneven, steps, dry,
        fixed, procs;
    int sigmoid, groups, top_groups, raw;
    double capacity, balance, z, scale;
    dt_dtype dtype;
    dt_algorithm algorithm;
    result *out;
    dt_dry dries[16];
} job;

typedef struct layer {
    const job *j;
    dt_mesh mesh;
    dt_tensor *w, *w1, *b1, *w2, *b2, *bias;
    int32_t *places;
    dt_route_counts *counts;
    dt_placement outside;
    int again;           /* runs of layer_forward */
    dt_routing *routing; /* of the last run */
    size_t ep_bytes;
} layer;

static dt_tensor *layer_forward(dt_tensor *x, void *user) {
    layer *l = (layer *)user;
    const job *j = l->j;
    dt_route_desc d = { .k = j->k,
        .capacity = j->capacity,
        .balance = j->balance,
        .z = j->z,
        .sequences = S,
        .bias = l->bias,
        .tp = l->mesh.tp,
        .outside = l->outside,
        .cp = l->mesh.cp,
        .kind = j->kind,
        .positions = l->places,
        .counts = l->counts,
        .scores = j->sigmoid,
        .groups = j->groups,
        .top_groups = j->top_groups,
        .raw_gates = j->raw,
        .scale = j->scale };
    l->again++;
    dt_routing *r = dt_route(x, l->w, d);
    dt_tensor *h = dt_dispatch(dt_tp_enter(x, l->mesh.tp, l->outside), r, l->mesh.ep);
    h = dt_expert_linear(h, r, l->w1, l->b1, (dt_expert_desc){ .activation = DT_ACT_GELU });
    h = dt_expert_linear(h, r, l->w2, l->b2, (dt_expert_desc){ .row_parallel = l->mesh.tp });
    h = dt_combine(h, r);
    l->routing = r;
    return dt_redistribute(h, l->mesh.tp, DT_PARTIAL, l->outside);
}

static dt_tensor *param(dt_ctx *ctx, const job *j, const char *name, dt_shape full, dt_shard_spec a,
    dt_shard_spec b, int frozen) {
    dt_dtype dtype = frozen && dt__narrow(j->dtype) ? DT_F32 : j->dtype;
    return dt_param_at(ctx, name, full, frozen ? DT_ZEROS : DT_NORMAL(0.7),
        (dt_param_desc){ .shards = { a, b }, .frozen = frozen, .dtype = dtype });
}

/* Index in the full parameter of element i of a shard. */
static int64_t global_of(const dt_param_info *p, int64_t i) {
    int64_t at[DT_MAX_DIMS], to = 0;
    for (int d = p->full.nd - 1; d >= 0; d--) {
        at[d] = i % p->slice.n[d] + p->slice.lo[d];
        i /= p->slice.n[d];
    }
    for (int d = 0; d < p->full.nd; d++) to = to * p->full.d[d] + at[d];
    return to;
}

/* Equal values in every dtype and layout; all dtypes represent them exactly. */
static void fill_param(dt_tensor *t, uint32_t salt) {
    int64_t n = dt_count(t->shape);
    char *host = (char *)malloc((size_t)n * 8);
    for (int64_t i = 0; i < n; i++)
        dt__set_number(t->dtype, host, (size_t)i, number(salt, (uint32_t)global_of(t->param, i)));
    dt_write(t, host);
    free(host);
}

static layer layer_make(dt_ctx *ctx, const job *j) {
    layer l = { .j = j,
        .mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .ep = j->ep, .tp = j->tp, .cp = j->cp }) };
    dt_shard_spec none = { NULL, 0 }, ep = { l.mesh.ep, 0 };
    dt_comm *groups[3] = { l.mesh.ep, l.mesh.tp, l.mesh.cp };
    for (int i = 0; i < 3; i++)
        if (groups[i]) dt_comm_set_algorithm(groups[i], j->algorithm);
    l.outside = j->sp ? DT_SHARD(1) : DT_REPLICATE;
    l.w = param(ctx, j, "w", DT_SHAPE(E, C), none, none, 0);
    l.w1 = param(ctx, j, "w1", DT_SHAPE(E, F, C), ep, (dt_shard_spec){ l.mesh.tp, 1 }, 0);
    l.b1 = param(ctx, j, "b1", DT_SHAPE(E, F), ep, (dt_shard_spec){ l.mesh.tp, 1 }, 0);
    l.w2 = param(ctx, j, "w2", DT_SHAPE(E, C, F), ep, (dt_shard_spec){ l.mesh.tp, 2 }, 0);
    l.b2 = param(ctx, j, "b2", DT_SHAPE(E, C), ep, none, 0);
    if (j->biased) l.bias = param(ctx, j, "bias", DT_SHAPE(E), none, none, 1);
    if (!j->dry) {
        dt_tensor *all[5] = { l.w, l.w1, l.b1, l.w2, l.b2 };
        for (int i = 0; i < 5; i++) fill_param(all[i], 100 + (uint32_t)i);
        double bias[E] = { 0.5, -0.25, 0, 0 };
        float narrow[E] = { 0.5f, -0.25f, 0, 0 };
        if (l.bias) dt_write(l.bias, l.bias->dtype == DT_F64 ? (void *)bias : (void *)narrow);
    }
    return l;
}

/* A token of this rank: its sequence and its index in the sequence. */
typedef struct token {
    int s, t;
} token;

static int tokens_of(const job *j, const dt_mesh *m, token *out, int *B, int *own) {
    int first = m->coord.ep * S / j->ep, end = (m->coord.ep + 1) * S / j->ep, n = 0;
    if (j->uneven) { /* the last ep rank has all tokens, the others have none */
        first = m->coord.ep == j->ep - 1 ? 0 : S;
        end = S;
    }
    int inside = T / j->cp, step = j->sp ? inside / j->tp : inside,
        from = j->sp ? m->coord.tp * step : 0;
    for (int s = first; s < end; s++)
        for (int i = from; i < from + step; i++) /* a permutation: 5 and 16 are coprime */
            out[n++] =
                (token){ s, j->places ? (i * j->cp + m->coord.cp) * 5 % T
                                      : (int)dt_cp_token(j->kind, T, j->cp, m->coord.cp, i) };
    *B = end - first;
    *own = step;
    return n;
}

/* Sums a gradient over the groups whose ranks have different tokens. The first of these ranks
   stores it in the full gradient, unless `copy` says that another rank stores an equal one. */
static void keep_grad(
    dt_ctx *ctx, dt_tensor *p, dt_comm *a, dt_comm *b, dt_comm *c, int copy, double *out) {
    int64_t n = dt_count(p->shape);
    dt_comm *groups[3] = { a, b, c };
    int first = dt_comm_rank(a) + dt_comm_rank(b) + dt_comm_rank(c) + copy == 0;
    double *sum = (double *)calloc((size_t)n, sizeof *sum);
    if (p->grad) values_of(dt_grad_dtype(p), p->grad, n, sum);
    for (int i = 0; i < 3; i++) dt_all_reduce(groups[i], sum, sum, (size_t)n, DT_F64, DT_SUM);
    for (int64_t i = 0; i < n && first && dt_error(ctx) == DT_OK; i++)
        out[global_of(p->param, i)] = sum[i];
    free(sum);
}

static void keep_counts(layer *l, dt_route_counts c, double loss, double *experts) {
    const job *j = l->j;
    double v[5 + E] = { c.choices, c.dropped, c.balance, c.z, loss };
    dt_comm *sp = j->sp ? l->mesh.tp : NULL;
    memcpy(v + 5, experts, E * sizeof *v);
    dt_sum_doubles(l->mesh.ep, v, 5 + E);
    dt_sum_doubles(l->mesh.cp, v, 5 + E);
    dt_sum_doubles(sp, v, 5 + E);
    if (dt_ctx_rank(l->w->ctx) > 0) return;
    j->out->choices = v[0];
    j->out->dropped = v[1];
    j->out->balance = v[2];
    j->out->z = v[3];
    j->out->loss = v[4];
    memcpy(j->out->counts, v + 5, sizeof j->out->counts);
}

/* The ep traffic must match the counts: rows forward and rows back, each with C elements. */
static void check_bytes(dt_ctx *ctx, const layer *l, size_t bytes, int passes) {
    const dt_routing *r = l->routing;
    int64_t away = 0, at_home = 0, held = E / l->j->ep, me = dt_comm_rank(l->mesh.ep);
    for (int64_t i = 0; r && i < r->batch * r->tokens * r->k; i++) {
        away += r->choices[i] >= 0 && r->choices[i] / held != me;
        at_home += r->choices[i] >= 0 && r->choices[i] / held == me;
    }
    size_t want =
        r ? (size_t)(away + r->rows - at_home) * C * dt_dtype_size(l->j->dtype) * (size_t)passes
          : 0;
    CHECK_MSG(dt_comm_bytes(ctx, DT_AXIS_EP) - bytes == want, "ep sent %zu, not %zu",
        dt_comm_bytes(ctx, DT_AXIS_EP) - bytes, want);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_CP) == 0);
}

/* tp traffic of forward and backward: tokens are gathered once; the gradients of tokens and gates
   are reduce-scattered. */
static void check_tp_bytes(dt_ctx *ctx, const layer *l, int B, size_t before) {
    const job *j = l->j;
    if (j->recompute || dt__narrow(j->dtype)) return;
    size_t size = dt_dtype_size(j->dtype), x = (size_t)(B * T / j->cp * C) * size,
           n = (size_t)j->tp;
    size_t gates = (size_t)(B * T / j->cp * (j->k ? j->k : 1)) * size;
    size_t want = j->sp ? (4 * x + 2 * gates) / n * (n - 1) : (4 * x + 2 * gates) * (n - 1) / n;
    if (n > 1)
        CHECK_MSG(dt_comm_bytes(ctx, DT_AXIS_TP) - before == want, "tp sent %zu, not %zu",
            dt_comm_bytes(ctx, DT_AXIS_TP) - before, want);
}

static void run_step(dt_ctx *ctx, layer *l, double *dy, dt_tensor *x, double *experts) {
    const job *j = l->j;
    dt_route_counts counts = { .experts = experts };
    size_t ep = dt_comm_bytes(ctx, DT_AXIS_EP), tp = dt_comm_bytes(ctx, DT_AXIS_TP);
    l->counts = &counts;
    l->again = 0;
    dt_tensor *y = j->plain ? layer_forward(x, l)
                            : dt_block_at(ctx, layer_forward, x, l,
                                  (dt_block_desc){ .recompute = j->recompute });
    if (!j->recompute) check_bytes(ctx, l, ep, 1);
    dt_tensor *loss = dot(y, dy);
    double value = dt_item(loss);
    if (j->halves) {
        dt_backward_input(loss);
        dt_backward_weight(loss);
    } else {
        dt_backward(loss);
    }
    if (dt_error(ctx) != DT_OK) return;
    CHECK(l->again == 1 + j->recompute);
    check_bytes(ctx, l, ep, j->recompute ? 3 : 2);
    check_tp_bytes(ctx, l, (int)x->shape.d[0], tp);
    if (j->dry) return;
    /* without sequence parallelism the tp ranks have the same loss */
    keep_counts(l, counts, value, experts);
}

static dt_status layer_main(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    static const double zero[E];
    token at[S * T];
    int B = 0, own = 0;
    if (j->dry) dt_dry_begin(ctx, &j->dries[dt_ctx_rank(ctx)]);
    layer l = layer_make(ctx, j);
    /* copy: another rank has equal values */
    int n = tokens_of(j, &l.mesh, at, &B, &own), copy = !j->sp && l.mesh.coord.tp > 0;
    double *x = (double *)calloc(3 * N_X, sizeof *x), *dy = x + N_X, *got = dy + N_X, experts[E];
    int32_t *places = (int32_t *)calloc(S * T, sizeof *places);
    for (int i = 0; i < n; i++) {
        places[i] = at[i].t;
        for (int c = 0; c < C; c++) {
            uint32_t e = (uint32_t)((at[i].s * T + at[i].t) * C + c);
            x[i * C + c] = number(1, e) + (j->fixed && c == 0 ? 40 : 0);
            dy[i * C + c] = number(2, e);
        }
    }
    l.places = j->places ? places : NULL;
    for (int step = 0; step < (j->steps ? j->steps : 1) && dt_error(ctx) == DT_OK; step++) {
        memcpy(experts, zero, sizeof experts);
        dt_tensor *in = dt_require_grad(tensor_of(ctx, j->dtype, DT_SHAPE(B, own, C), x));
        run_step(ctx, &l, dy, in, experts);
        if (dt_error(ctx) != DT_OK || j->dry) break;
        if (j->steps) {
            dt_comm *groups[3] = { l.mesh.ep, l.mesh.cp, j->sp ? l.mesh.tp : NULL };
            dt_route_update_bias(l.bias, experts, 0.01, groups, 3);
        }
        if (step + 1 < j->steps) {
            dt_clear_grads(ctx);
            dt_reset(ctx);
            continue;
        }
        values_of(j->dtype, in->grad, n * C, got);
        for (int i = 0; i < n * C && !copy; i++)
            j->out->dx[(at[i / C].s * T + at[i / C].t) * C + i % C] = got[i];
    }
    const dt_routing *r = dt_error(ctx) == DT_OK && !j->dry ? l.routing : NULL;
    /* choices of this rank's tokens, from the routing of all tokens inside the tp region */
    for (int i = 0; r && !copy && i < n * (int)r->k; i++) {
        int t = i / (int)r->k, from = j->sp ? l.mesh.coord.tp * own : 0;
        int inside = t / own * (int)r->tokens + from + t % own;
        j->out->chosen[(at[t].s * T + at[t].t) * MOST_K + i % r->k] =
            r->choices[inside * r->k + i % r->k];
    }
    dt_comm *cp = l.mesh.cp, *sp = j->sp ? l.mesh.tp : NULL;
    if (r) {
        keep_grad(ctx, l.w, l.mesh.ep, cp, sp, copy, j->out->dw);
        keep_grad(ctx, l.w1, cp, NULL, NULL, 0, j->out->dw1);
        keep_grad(ctx, l.b1, cp, NULL, NULL, 0, j->out->db1);
        keep_grad(ctx, l.w2, cp, NULL, NULL, 0, j->out->dw2);
        keep_grad(ctx, l.b2, cp, l.mesh.tp, NULL, 0, j->out->db2);
    }
    if (r && l.bias && dt_ctx_rank(ctx) == 0) {
        char host[E * 8];
        dt_read(l.bias, host);
        values_of(l.bias->dtype, host, E, j->out->bias);
    }
    if (r && !j->steps) { /* compute y again under dt_no_grad */
        dt_reset(ctx);
        dt_no_grad(ctx, 1);
        l.counts = NULL;
        dt_tensor *y = layer_forward(tensor_of(ctx, j->dtype, DT_SHAPE(B, own, C), x), &l);
        if (y) values_of(j->dtype, y->data, n * C, got);
        for (int i = 0; y && !copy && i < n * C; i++)
            j->out->y[(at[i / C].s * T + at[i / C].t) * C + i % C] = got[i];
        dt_no_grad(ctx, 0);
    }
    free(x);
    free(places);
    return dt_error(ctx);
}

/* Only for the main thread: returns a static buffer. */
static const char *job_text(const job *j) {
    static char text[200];
    snprintf(text, sizeof text, "ep %d tp %d%s cp %d kind %d, k %d, capacity %g%s%s%s%s%s, %s",
        j->ep, j->tp, j->sp ? " sp" : "", j->cp, j->kind, j->k, j->capacity,
        j->sigmoid ? ", sigmoid" : "", j->places ? ", places" : "", j->biased ? ", bias" : "",
        j->recompute ? ", recompute" : "", j->halves ? ", halves" : "", dt_dtype_name(j->dtype));
    return text;
}

static int run_job(job *j, result *out) {
    memset(out, 0, sizeof *out);
    j->out = out;
    dt_report report = { .status = DT_OK };
    dt_run_desc forks = { .ranks = j->ep * j->tp * j->cp,
        .backend = DT_BACKEND_PROCS,
        .timeout_s = 60,
        .report = &report };
    if (j->procs)
        dt_run(forks, layer_main, j);
    else
        report = run(forks.ranks, layer_main, j);
    return CHECK_MSG(report.status == DT_OK, "%s: %s", job_text(j), report.text);
}

static int same_counts(const result *a, const result *b) {
    return memcmp(a->chosen, b->chosen, sizeof a->chosen) == 0 &&
           memcmp(a->counts, b->counts, sizeof a->counts) == 0 && a->dropped == b->dropped &&
           a->choices == b->choices;
}

/* Names the first array that differs by more than tol; NULL if none. */
static const char *differs(const result *a, const result *b, double tol) {
    if (!(distance(a->y, b->y, N_X) <= tol)) return "y";
    if (!(distance(a->dx, b->dx, N_X) <= tol)) return "dx";
    if (!(distance(a->dw, b->dw, N_W) <= tol)) return "the router's gradient";
    if (!(distance(a->dw1, b->dw1, N_W1) <= tol)) return "w1's gradient";
    if (!(distance(a->db1, b->db1, E * F) <= tol)) return "b1's gradient";
    if (!(distance(a->dw2, b->dw2, N_W1) <= tol)) return "w2's gradient";
    if (!(distance(a->db2, b->db2, E * C) <= tol)) return "b2's gradient";
    if (!(distance(&a->loss, &b->loss, 1) <= tol)) return "the loss";
    if (!(distance(&a->balance, &b->balance, 1) <= tol)) return "the balance loss";
    if (!(distance(&a->z, &b->z, 1) <= tol)) return "the z-loss";
    return NULL;
}

static void check_layout(job j, const result *one, double tol) {
    static result out;
    if (!run_job(&j, &out)) return;
    const char *why = differs(&out, one, tol);
    CHECK_MSG(!why, "%s: %s", job_text(&j), why);
    CHECK_MSG(same_counts(&out, one), "%s: choices, counts or drops differ", job_text(&j));
}

/* ep x tp x cp, every cp kind with a different token order, dropless and two capacities, k 1 to 3,
   and sigmoid routing with and without groups. */
static void test_layouts(void) {
    static result one;
    static const double capacity[3] = { 0, 1, 0.55 };
    static const int tps[3][2] = { { 1, 0 }, { 2, 0 }, { 2, 1 } },
                     cps[3][2] = { { 1, 0 }, { 2, DT_CP_RING }, { 2, DT_CP_ZIGZAG } };
    for (int c = 0; c < 11; c++) {
        job j = { .ep = 1,
            .tp = 1,
            .cp = 1,
            .k = 1 + c % 3,
            .capacity = capacity[c / 3 % 3],
            .balance = 0.3,
            .z = 0.1,
            .dtype = DT_F64,
            .biased = c % 3 == 1,
            .sigmoid = c > 8 };
        if (c > 8) j.k = 2, j.biased = 1, j.scale = 2.5, j.raw = c == 9;
        if (c == 10) j.groups = 2, j.top_groups = 1, j.capacity = 1;
        if (!run_job(&j, &one)) continue;
        CHECK(one.choices == S * T * j.k);
        CHECK_MSG(
            (one.dropped > 0) == (j.capacity > 0), "%s: %g dropped", job_text(&j), one.dropped);
        for (int i = 1; i < 27; i++) {
            job other = j;
            other.ep = 1 << i % 3;
            other.tp = tps[i / 3 % 3][0];
            other.sp = tps[i / 3 % 3][1];
            other.cp = cps[i / 9][0];
            other.kind = cps[i / 9][1];
            check_layout(other, &one, 1e-12);
        }
    }
}

/* Given positions, and ranks without tokens; and the same with recomputation, in halves and outside
   a block. */
static void test_variants(void) {
    static result one, out;
    job j = { .ep = 1,
        .tp = 1,
        .cp = 1,
        .k = 2,
        .capacity = 0.7,
        .balance = 0.3,
        .z = 0.1,
        .dtype = DT_F64 };
    if (!run_job(&j, &one)) return;
    job given = j;
    given.cp = 2;
    given.tp = 2;
    given.sp = 1;
    given.places = 1;
    check_layout(given, &one, 1e-12);
    job uneven = j;
    uneven.ep = 4;
    uneven.uneven = 1;
    check_layout(uneven, &one, 1e-12);
    for (int layout = 0; layout < 2; layout++) {
        job plain = j;
        if (layout) {
            plain.ep = plain.tp = plain.cp = 2;
            plain.sp = 1;
            plain.kind = DT_CP_ZIGZAG;
        }
        run_job(&plain, &one);
        for (int way = 0; way < 4; way++) { /* must give equal bits */
            job other = plain;
            other.recompute = way == 0 || way == 3;
            other.halves = way == 1 || way == 3;
            /* the root frees no gathered tensor, so its traffic is equal only without sp */
            other.plain = way == 2 && !layout;
            if (!run_job(&other, &out)) continue;
            CHECK_MSG(!differs(&out, &one, 0) && same_counts(&out, &one), "%s: bits differ",
                job_text(&other));
        }
    }
}

/* The same over messages, and over processes that write to shared memory. */
static void test_ranks(void) {
    static result one;
    result *shared =
        (result *)mmap(NULL, sizeof one, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    job j = { .ep = 2,
        .tp = 2,
        .cp = 2,
        .sp = 1,
        .kind = DT_CP_ZIGZAG,
        .k = 2,
        .capacity = 0.7,
        .balance = 0.3,
        .z = 0.1,
        .dtype = DT_F64 };
    if (!run_job(&j, &one)) return;
    for (int way = 0; way < 3; way++) {
        job other = j;
        other.algorithm = way == 1 ? DT_DOUBLING : way == 2 ? DT_DIRECT : DT_ALGORITHM_AUTO;
        other.procs = way == 0;
        if (!run_job(&other, shared)) continue;
        CHECK_MSG(!differs(shared, &one, 1e-12) && same_counts(shared, &one),
            "way %d: results differ", way);
    }
    munmap(shared, sizeof one);
}

/* bf16, f16 and f32 from equal inputs, with tolerances for outputs that are sums of about 10
   products, rounded a few times. */
static void test_types(void) {
    static result wide, out;
    static const struct {
        dt_dtype dtype;
        double tol;
    } types[] = { { DT_F32, 2e-5 }, { DT_F16, 3e-2 }, { DT_BF16, 0.2 } };
    for (int i = 0; i < 18; i++) {
        job j = { .ep = 1,
            .tp = 1,
            .cp = 1,
            .k = 1 + i / 6 % 2,
            .sigmoid = i / 12,
            .groups = i / 12 * 2,
            .top_groups = 1,
            .balance = 0.3,
            .z = 0.1,
            .dtype = DT_F64,
            .biased = 1 };
        if (!run_job(&j, &wide)) continue;
        j.dtype = types[i % 3].dtype;
        j.ep = 1 + i / 3 % 2;
        j.tp = j.ep;
        j.sp = j.tp > 1;
        if (!run_job(&j, &out)) continue;
        const char *why = differs(&out, &wide, types[i % 3].tol);
        CHECK_MSG(!why, "%s: %s", job_text(&j), why);
        CHECK_MSG(same_counts(&out, &wide), "%s: choices differ", job_text(&j));
    }
}

/* Balancing without an auxiliary loss: the bias after three steps follows from the counts of all
   ranks and is equal in every layout. */
static void test_balance(void) {
    static result one, out;
    job j = { .ep = 1, .tp = 1, .cp = 1, .k = 2, .dtype = DT_F64, .biased = 1, .steps = 3 };
    if (!run_job(&j, &one)) return;
    CHECK(one.bias[0] != 0.5 || one.bias[1] != -0.25);
    for (int i = 1; i < 8; i++) {
        job other = j;
        other.ep = 1 + i % 2;
        other.tp = other.sp = i / 2 % 2;
        other.tp += 1;
        other.cp = 1 + i / 4;
        other.kind = other.cp > 1 ? DT_CP_ZIGZAG : 0;
        if (!run_job(&other, &out)) continue;
        CHECK_MSG(memcmp(out.bias, one.bias, sizeof one.bias) == 0, "%s: biases differ",
            job_text(&other));
    }
    j.dtype = DT_BF16;
    run_job(&j, &out);
    CHECK(fabs(out.bias[0] - one.bias[0]) < 1e-6); /* the bias is f32, not bf16 */
}

static dt_status signs_main(dt_ctx *ctx, void *user) {
    (void)user;
    float start[4] = { 0, 0, 0, 1 }, got[4];
    double counts[4] = { 5, 3, 0, 4 }; /* their mean is 3 */
    dt_tensor *bias = dt_input(ctx, DT_F32, DT_SHAPE(4), start);
    CHECK(dt_route_update_bias(bias, counts, 0.5, NULL, 0) == DT_OK && dt_read(bias, got) == DT_OK);
    CHECK(got[0] == -0.5f && got[1] == 0 && got[2] == 0.5f && got[3] == 0.5f);
    return dt_error(ctx);
}

// ==== transformers ==============================================================================

typedef struct stored {
    golden *g;
    int i;
} stored;

static const double *array_of(stored s, const char *name, dt_shape *shape) {
    char key[64];
    snprintf(key, sizeof key, "%d.%s", s.i, name);
    for (int i = 0; s.g && i < s.g->n_arrays; i++) {
        const golden_array *a = &s.g->array[i];
        if (strcmp(a->name, key) != 0) continue;
        if (shape) shape->nd = a->nd;
        for (int d = 0; shape && d < a->nd; d++) shape->d[d] = a->shape[d];
        return a->data;
    }
    CHECK_MSG(0, "%s is missing", key);
    return NULL;
}

/* A setting that only some cases have; 0 in the others. */
static double option_of(stored s, const char *name) {
    char key[64];
    snprintf(key, sizeof key, "%d.%s", s.i, name);
    const double *value = golden_get(s.g, key, NULL);
    return value ? *value : 0;
}

static dt_tensor *stored_input(dt_ctx *ctx, stored s, const char *name) {
    dt_shape shape = DT_SCALAR;
    const double *values = array_of(s, name, &shape);
    return values ? dt_require_grad(dt_input(ctx, DT_F64, shape, values)) : NULL;
}

static void check_stored(stored s, const char *name, const void *got) {
    dt_shape shape = DT_SCALAR;
    const double *want = array_of(s, name, &shape);
    double d = want && got ? distance((const double *)got, want, dt_count(shape)) : NAN;
    CHECK_MSG(d <= 1e-12, "case %d: %s differs by %g", s.i, name, d);
}

static dt_status stored_main(dt_ctx *ctx, void *user) {
    stored s = *(stored *)user;
    dt_tensor *x = stored_input(ctx, s, "x"), *w = stored_input(ctx, s, "w"),
              *w1 = stored_input(ctx, s, "w1");
    double sigmoid = option_of(s, "sigmoid");
    dt_tensor *w2 = stored_input(ctx, s, "w2");
    if (!x || !w || !w1 || !w2) return DT_ERR_IO;
    int k = (int)*array_of(s, "k", NULL);
    double B = (double)x->shape.d[0], mean = 0;
    dt_route_counts counts = { .experts = NULL };
    dt_route_desc d = { .k = k,
        .balance = *array_of(s, "balance_weight", NULL),
        .z = *array_of(s, "z_weight", NULL),
        .sequences = (int64_t)B,
        .counts = &counts,
        .scores = (int)sigmoid,
        .groups = (int)option_of(s, "groups"),
        .top_groups = (int)option_of(s, "top_groups"),
        .raw_gates = (int)option_of(s, "raw"),
        .scale = option_of(s, "scale") };
    if (sigmoid > 0)
        d.bias = dt_input(ctx, DT_F64, DT_SHAPE(w->shape.d[0]), array_of(s, "bias", NULL));
    dt_routing *r = dt_route(x, w, d);
    dt_tensor *h =
        dt_expert_linear(dt_dispatch(x, r, NULL), r, w1, NULL, (dt_expert_desc){ .activation = 0 });
    dt_tensor *y = dt_combine(
        dt_expert_linear(dt_swiglu(h), r, w2, NULL, (dt_expert_desc){ .activation = 0 }), r);
    if (dt_backward(dot(y, array_of(s, "dy", NULL))) != DT_OK) return dt_error(ctx);
    const double *choices = array_of(s, "choices", NULL), *balance = array_of(s, "balance", NULL);
    int same = 1;
    for (int64_t i = 0; i < r->batch * r->tokens * r->k; i++)
        same &= r->choices[i] == (int32_t)choices[i];
    CHECK_MSG(same, "case %d: choices differ", s.i);
    check_stored(s, "gates", r->gates->data);
    check_stored(s, "y", y->data);
    check_stored(s, "dx", x->grad);
    check_stored(s, "dw", w->grad);
    check_stored(s, "dw1", w1->grad);
    check_stored(s, "dw2", w2->grad);
    check_stored(s, "z", &counts.z);
    for (int b = 0; b < (int)B; b++) mean += balance[b] / B / k;
    CHECK(fabs(counts.balance - mean) < 1e-12);
    return dt_error(ctx);
}

/* All tokens as one sequence: then the loss equals transformers' balance loss, which is computed in
   f32. */
static dt_status balance_main(dt_ctx *ctx, void *user) {
    stored s = *(stored *)user;
    dt_tensor *x = stored_input(ctx, s, "x"), *w = stored_input(ctx, s, "w");
    if (!x || !w) return DT_ERR_IO;
    int k = (int)*array_of(s, "k", NULL);
    dt_route_counts counts = { .experts = NULL };
    dt_tensor *all = dt_reshape(x, DT_SHAPE(1, x->shape.d[0] * x->shape.d[1], x->shape.d[2]));
    CHECK(dt_route(all, w,
              (dt_route_desc){ .k = k, .balance = 1, .sequences = 1, .counts = &counts }) != NULL);
    double theirs = *array_of(s, "balance_all", NULL);
    CHECK_MSG(fabs(counts.balance * k - theirs) < 1e-6, "case %d: %g times %d, not %g", s.i,
        counts.balance, k, theirs);
    return dt_error(ctx);
}

static void test_stored(void) {
    char path[600];
    snprintf(path, sizeof path, "%s/moe.bin", golden_folder);
    stored s = { golden_open(path), 0 };
    int64_t n = 0;
    const double *cases = s.g ? golden_get(s.g, "cases", &n) : NULL;
    if (!CHECK_MSG(cases != NULL, "%s is missing", path)) return;
    for (; s.i < (int)*cases; s.i++) {
        CHECK(run(1, stored_main, &s).status == DT_OK);
        if (option_of(s, "sigmoid") == 0) CHECK(run(1, balance_main, &s).status == DT_OK);
    }
    CHECK(s.i == 6);
    golden_free(s.g);
}

// ==== Finite differences ========================================================================

enum { FD_B = 2, FD_T = 5, FD_C = 3, FD_E = 4, FD_F = 2, FD_IN = 4, FD_MOST = 96 };
enum { FD_ROUTER, FD_SIGMOID, FD_SIGMOID_RAW, FD_ROUTER_ONE, FD_EXPERT, FD_COMBINE, FD_PARTS };

typedef struct fd {
    int part;
    double in[FD_IN][FD_MOST], weight[FD_MOST];
    dt_route_counts counts;
} fd;

static dt_shape fd_shape(int part, int i) {
    if (part <= FD_ROUTER_ONE) return i == 0 ? DT_SHAPE(FD_B, FD_T, FD_C) : DT_SHAPE(FD_E, FD_C);
    if (part == FD_EXPERT) /* rows, w1 with two output dimensions, b1 */
        return i == 0   ? DT_SHAPE(2 * FD_B * FD_T, FD_C)
               : i == 1 ? DT_SHAPE(FD_E, 2, FD_F, FD_C)
                        : DT_SHAPE(FD_E, 2, FD_F);
    return i == 0 ? DT_SHAPE(2 * FD_B * FD_T, FD_C) : DT_SHAPE(FD_B, FD_T, 2); /* rows, gates */
}

static int fd_inputs(int part) { return part == FD_EXPERT ? 3 : 2; }

/* The loss of one part of the layer; the inputs of the part are fixed. */
static dt_tensor *fd_loss(dt_ctx *ctx, fd *f, dt_tensor **in) {
    double x[FD_B * FD_T * FD_C], w[FD_E * FD_C];
    for (int i = 0; i < FD_B * FD_T * FD_C; i++) x[i] = number(50, (uint32_t)i);
    for (int i = 0; i < FD_E * FD_C; i++) w[i] = number(51, (uint32_t)i);
    int sigmoid = f->part == FD_SIGMOID || f->part == FD_SIGMOID_RAW;
    dt_route_desc d = { .k = f->part == FD_ROUTER_ONE ? 1 : 2,
        .scores = sigmoid ? DT_ROUTE_SIGMOID : DT_ROUTE_SOFTMAX,
        .groups = sigmoid ? 2 : 0,
        .top_groups = f->part == FD_SIGMOID ? 1 : 2,
        .raw_gates = f->part == FD_SIGMOID_RAW,
        .scale = sigmoid ? 2.5 : 0 };
    if (f->part <= FD_ROUTER_ONE) {
        d.balance = 0.7;
        d.z = 0.4;
        d.sequences = 3;
        d.counts = &f->counts;
        memset(&f->counts, 0, sizeof f->counts);
        dt_routing *r = dt_route(in[0], in[1], d);
        return r ? dot(r->gates, f->weight) : NULL;
    }
    dt_tensor *tokens = dt_input(ctx, DT_F64, DT_SHAPE(FD_B, FD_T, FD_C), x);
    dt_routing *r = dt_route(tokens, dt_input(ctx, DT_F64, DT_SHAPE(FD_E, FD_C), w), d);
    if (!r || !dt_dispatch(tokens, r, NULL)) return NULL;
    if (f->part == FD_EXPERT)
        return dot(
            dt_expert_linear(in[0], r, in[1], in[2], (dt_expert_desc){ .activation = DT_ACT_SILU }),
            f->weight);
    r->gates = in[1];
    return dot(dt_combine(in[0], r), f->weight);
}

/* Returns the loss. If grad is not NULL, it receives the gradients. */
static double fd_value(dt_ctx *ctx, fd *f, double grad[FD_IN][FD_MOST]) {
    dt_tensor *in[FD_IN] = { NULL };
    for (int i = 0; i < fd_inputs(f->part); i++)
        in[i] = dt_require_grad(dt_input(ctx, DT_F64, fd_shape(f->part, i), f->in[i]));
    dt_tensor *loss = fd_loss(ctx, f, in);
    double value = dt_item(loss) +
                   (f->part <= FD_ROUTER_ONE ? 0.7 * f->counts.balance + 0.4 * f->counts.z : 0);
    if (grad && dt_backward(loss) == DT_OK)
        for (int i = 0; i < fd_inputs(f->part); i++)
            values_of(DT_F64, in[i]->grad, dt_count(in[i]->shape), grad[i]);
    dt_reset(ctx);
    return value;
}

static dt_status fd_main(dt_ctx *ctx, void *user) {
    static fd f;
    static double grad[FD_IN][FD_MOST];
    (void)user;
    for (f.part = 0; f.part < FD_PARTS; f.part++) {
        for (int i = 0; i < FD_IN * FD_MOST; i++)
            f.in[i / FD_MOST][i % FD_MOST] = 1.3 * number(60, (uint32_t)i);
        for (int i = 0; i < FD_MOST; i++) f.weight[i] = number(61, (uint32_t)i);
        fd_value(ctx, &f, grad);
        for (int i = 0; i < fd_inputs(f.part); i++) {
            double worst = 0;
            for (int e = 0; e < (int)dt_count(fd_shape(f.part, i)); e++) {
                double at = f.in[i][e], h = 1e-5;
                f.in[i][e] = at + h;
                double up = fd_value(ctx, &f, NULL);
                f.in[i][e] = at - h;
                double slope = (up - fd_value(ctx, &f, NULL)) / (2 * h);
                f.in[i][e] = at;
                worst = fmax(worst, fabs(slope - grad[i][e]) / (1 + fabs(slope)));
            }
            CHECK_MSG(worst < 1e-8, "part %d, input %d: differs from finite differences by %g",
                f.part, i, worst);
        }
    }
    return dt_error(ctx);
}

// ==== Extremes ==================================================================================

/* All tokens choose one expert: ranks with other experts receive no rows, and their gradients are
   zero. */
static void test_one_expert(void) {
    static result one, out;
    job j = { .ep = 1, .tp = 1, .cp = 1, .k = 1, .dtype = DT_F64, .fixed = 1 };
    if (!run_job(&j, &one)) return;
    int full = -1, others = 0;
    for (int e = 0; e < E; e++) {
        if (one.counts[e] == S * T) full = e;
        for (int i = 0; i < F * C; i++) others += one.counts[e] == 0 && one.dw1[e * F * C + i] != 0;
    }
    CHECK_MSG(full >= 0 && others == 0, "counts %g %g %g %g", one.counts[0], one.counts[1],
        one.counts[2], one.counts[3]);
    for (int ep = 2; ep <= 4; ep *= 2) {
        job other = j;
        other.ep = ep;
        other.recompute = ep == 4;
        check_layout(other, &one, 1e-12);
    }
    j.capacity = 1e-6; /* capacity for one choice per sequence */
    if (!run_job(&j, &one)) return;
    CHECK(one.dropped == S * (T - 1) && one.counts[full] == S * T);
    for (int s = 0; s < S; s++)
        CHECK(one.chosen[s * T * MOST_K] == full && one.chosen[(s * T + 1) * MOST_K] == -1);
    for (int i = 0; i < N_X; i++) others += i / C % T > 0 && one.y[i] != 0;
    CHECK(others == 0);
    j.ep = j.cp = 2;
    j.kind = DT_CP_ZIGZAG;
    if (run_job(&j, &out)) CHECK(same_counts(&out, &one) && !differs(&out, &one, 1e-12));
}

/* First choices have priority over second choices: if the capacity suffices for all first choices,
   none of them is dropped. */
static void test_order(void) {
    static result free_of_drops, out;
    job j = { .ep = 1, .tp = 1, .cp = 1, .k = 3, .dtype = DT_F64 };
    run_job(&j, &free_of_drops);
    for (double capacity = 0.2; capacity < 1.5; capacity += 0.15) {
        int wrong = 0, left[E];
        j.capacity = capacity;
        run_job(&j, &out);
        for (int s = 0; s < S; s++) {
            for (int e = 0; e < E; e++) left[e] = (int)ceil(capacity * 3 * T / E - 1e-9);
            for (int c = 0; c < 3; c++)
                for (int t = 0; t < T; t++) {
                    int at = (s * T + t) * MOST_K + c, e = free_of_drops.chosen[at];
                    wrong += out.chosen[at] != (left[e]-- > 0 ? e : -1);
                }
        }
        CHECK_MSG(wrong == 0, "capacity %g: %d first choices were dropped", capacity, wrong);
    }
}

/* k = E: every expert is chosen, and the gates are the probabilities. E = 1: the gate is 1. Ties:
   the lowest experts. */
static dt_status extremes_main(dt_ctx *ctx, void *user) {
    (void)user;
    double x[6] = { 1, 2, 3, -1, 0, 2 }, w[9] = { 0.3, -0.2, 0.5, 0.1, 0.2, -0.4, 0, 0.7, 0.1 },
           zero[9] = { 0 };
    dt_tensor *in = dt_input(ctx, DT_F64, DT_SHAPE(1, 2, 3), x);
    dt_routing *all =
        dt_route(in, dt_input(ctx, DT_F64, DT_SHAPE(3, 3), w), (dt_route_desc){ .k = 3 });
    dt_routing *one = dt_route(
        in, dt_input(ctx, DT_F64, DT_SHAPE(1, 3), w), (dt_route_desc){ .k = 1, .capacity = 1 });
    dt_routing *tie =
        dt_route(in, dt_input(ctx, DT_F64, DT_SHAPE(3, 3), zero), (dt_route_desc){ .k = 2 });
    if (!all || !one || !tie) return dt_error(ctx);
    for (int t = 0; t < 2; t++) {
        double p[3], sum = 0;
        for (int e = 0; e < 3; e++)
            sum += p[e] = exp(
                x[3 * t] * w[3 * e] + x[3 * t + 1] * w[3 * e + 1] + x[3 * t + 2] * w[3 * e + 2]);
        for (int c = 0; c < 3; c++)
            CHECK(fabs(((double *)all->gates->data)[3 * t + c] - p[all->choices[3 * t + c]] / sum) <
                  1e-14);
        CHECK(one->choices[t] == 0 && ((double *)one->gates->data)[t] == 1);
        CHECK(tie->choices[2 * t] == 0 && tie->choices[2 * t + 1] == 1);
    }
    /* groups of equal scores: the lowest of both; a group of one expert has this expert's score */
    dt_tensor *four = dt_input(ctx, DT_F64, DT_SHAPE(4, 3), NULL);
    memset(four->data, 0, 12 * sizeof(double));
    dt_route_desc limited = {
        .k = 2, .scores = DT_ROUTE_SIGMOID, .groups = 2, .top_groups = 1, .scale = 3
    };
    dt_routing *tie_of_groups = dt_route(in, four, limited);
    limited.groups = 3;
    limited.top_groups = 2;
    dt_routing *ones = dt_route(in, dt_input(ctx, DT_F64, DT_SHAPE(3, 3), w), limited);
    if (!tie_of_groups || !ones) return dt_error(ctx);
    for (int t = 0; t < 2; t++) {
        CHECK(tie_of_groups->choices[2 * t] == 0 && tie_of_groups->choices[2 * t + 1] == 1);
        CHECK(fabs(((double *)tie_of_groups->gates->data)[2 * t] - 1.5) < 1e-15);
        CHECK(ones->choices[2 * t] == all->choices[3 * t] &&
              ones->choices[2 * t + 1] == all->choices[3 * t + 1]);
    }
    /* a bias changes the choice, not the gates */
    double push[3] = { -9, 0, 9 };
    dt_tensor *bias = dt_input(ctx, DT_F64, DT_SHAPE(3), push);
    dt_routing *pushed = dt_route(
        in, dt_input(ctx, DT_F64, DT_SHAPE(3, 3), zero), (dt_route_desc){ .k = 1, .bias = bias });
    CHECK(pushed && pushed->choices[0] == 2 &&
          fabs(((double *)pushed->gates->data)[0] - 1.0 / 3) < 1e-15);
    CHECK(dt_dispatch(in, pushed, NULL) != NULL && pushed->rows == 2 &&
          pushed->expert_rows[2] == 2 && pushed->local_experts == 3);
    return dt_error(ctx);
}

/* No tokens on any rank: tensors with 0 rows work, and gradients exist. */
static dt_status no_tokens_main(dt_ctx *ctx, void *user) {
    (void)user;
    dt_mesh m = dt_mesh_make(ctx, (dt_mesh_desc){ .ep = 2 });
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(2, 3), DT_NORMAL(1));
    dt_tensor *w1 = dt_param_at(
        ctx, "w1", DT_SHAPE(2, 4, 3), DT_NORMAL(1), (dt_param_desc){ .shards = { { m.ep, 0 } } });
    dt_tensor *x = dt_require_grad(dt_input(ctx, DT_F32, DT_SHAPE(0, 5, 3), NULL));
    dt_route_desc d = { .k = 2, .capacity = 1, .balance = 1, .z = 1, .sequences = 1 };
    dt_routing *r = dt_route(x, w, d);
    dt_tensor *y = dt_combine(dt_expert_linear(dt_dispatch(x, r, m.ep), r, w1, NULL,
                                  (dt_expert_desc){ .activation = DT_ACT_RELU }),
        r);
    if (!y) return dt_error(ctx);
    CHECK(y->shape.d[0] == 0 && y->shape.d[2] == 4 && r->rows == 0);
    CHECK(dt_backward(dt_sum_over(y, DT_ALL)) == DT_OK);
    for (int i = 0; i < 12; i++) CHECK(w1->grad && ((float *)w1->grad)[i] == 0);
    for (int i = 0; i < 6; i++) CHECK(w->grad && ((float *)w->grad)[i] == 0);
    return dt_error(ctx);
}

/* No gradient of the previous step remains, also for an expert without rows. */
static dt_status stale_main(dt_ctx *ctx, void *user) {
    (void)user;
    double x[2] = { 1, 2 }, away[2] = { -1, -2 }, ones[2] = { 1, 1 };
    float router[2] = { 1, -1 };
    dt_tensor *w1 = dt_param(ctx, "w1", DT_SHAPE(2, 1, 1), DT_ONES),
              *b1 = dt_param(ctx, "b1", DT_SHAPE(2, 1), DT_ONES);
    for (int step = 0; step < 4; step++) {
        dt_tensor *in = tensor_of(ctx, DT_F32, DT_SHAPE(1, 2, 1), step % 2 ? away : x);
        dt_tensor *w = dt_input(ctx, DT_F32, DT_SHAPE(2, 1), router);
        dt_routing *r = dt_route(in, w, (dt_route_desc){ .k = 1 });
        dt_tensor *h = dt_expert_linear(
            dt_dispatch(in, r, NULL), r, w1, b1, (dt_expert_desc){ .activation = 0 });
        if (dt_backward(dot(h, ones)) != DT_OK) return dt_error(ctx);
        const float *dw = (const float *)w1->grad, *db = (const float *)b1->grad;
        int used = step % 2;
        CHECK_MSG(
            dw[used] == (used ? -3 : 3) && dw[1 - used] == 0 && db[used] == 2 && db[1 - used] == 0,
            "step %d: %g %g, %g %g", step, (double)dw[0], (double)dw[1], (double)db[0],
            (double)db[1]);
        dt_clear_grads(ctx);
        dt_reset(ctx);
    }
    return dt_error(ctx);
}

// ==== Memory for rows that vary =================================================================

/* The rows of two dispatches, one of which ends inside the other, vary from step to step. They keep
   memory for their largest numbers, and no other tensor gets it that happens to have as many rows.
   So from the third step on nothing is allocated, whatever the routing. Without a capacity rows have
   no bound: they stay in the arena, also under a split backward. Values are those of a plain
   backward. */
enum { VARY_TOKENS = 16, VARY_EXPERTS = 4, VARY_WIDTH = 512 };
enum { VARY_PLAIN, VARY_SPLIT, VARY_RECOMPUTE, VARY_NO_GRAD, VARY_MODES };
typedef struct vary {
    int mode;
    double capacity;
    dt_comm *ep;
    dt_tensor *router[2];
} vary;

static dt_status doubled_back(dt_node *n) {
    float *dx = dt_wants(n, 0) ? (float *)dt_grad(n, 0) : NULL;
    for (int64_t i = 0; dx && i < dt_count(n->out->shape); i++)
        dx[i] += 2 * ((const float *)n->out->grad)[i];
    return dt_error(n->out->ctx);
}

/* A user's op: 2 x. */
static dt_tensor *doubled(dt_tensor *x) {
    dt_tensor *y = dt_new_rows(x, DT_F32, x ? x->shape : DT_SCALAR);
    for (int64_t i = 0; y && i < dt_count(y->shape); i++)
        ((float *)y->data)[i] = 2 * ((const float *)x->data)[i];
    if (!y) return NULL;
    return dt_record(
        y, (dt_record_desc){ .name = "doubled", .in = { x }, .backward = doubled_back });
}

/* Returns h, which keeps the rows of x. */
static dt_tensor *keeps_rows(dt_tensor *h, const dt_tensor *x) {
    if (!h || !x) return h;
    int no_bound = x->max_rows == DT__NO_BOUND, split = x->ctx->root->split;
    CHECK(h->max_rows == x->max_rows && h->max_rows != 0);
    CHECK(dt__owner(h)->storage != DT__SPLIT_BACKWARD || (split && !no_bound));
    return h;
}

/* Ops that keep the rows of x (R,C), and a sum over them. */
static dt_tensor *row_ops(dt_tensor *x) {
    int64_t rows = x ? x->shape.d[0] : 0;
    dt_tensor *h = keeps_rows(dt_alias(keeps_rows(doubled(dt_gelu(x)), x)), x);
    h = keeps_rows(dt_reshape(h, DT_SHAPE(rows, 2, VARY_WIDTH / 2)), x);
    h = keeps_rows(dt_swiglu(dt_transpose(dt_transpose(h, 1, 2), 1, 2)), x);
    dt_tensor *both[2] = { h, dt_cast(dt_cast(h, DT_F64), DT_F32) };
    h = keeps_rows(dt_softmax(dt_add(keeps_rows(dt_concat(both, 2, 1), x), x)), x);
    dt_tensor *sum = dt_sum_over(dt_reshape(h, DT_SHAPE(rows, 8, VARY_WIDTH / 8)), 0);
    h = dt_mul(h, dt_reshape(dt_exp(sum), DT_SHAPE(VARY_WIDTH)));
    return keeps_rows(dt_slice(keeps_rows(h, x), 1, 0, VARY_WIDTH), x);
}

static dt_tensor *vary_forward(dt_tensor *x, void *user) {
    const vary *v = (const vary *)user;
    dt_route_desc d = { .k = 1, .capacity = v->capacity };
    dt_routing *outer = dt_route(x, v->router[0], d), *inner = dt_route(x, v->router[1], d);
    dt_tensor *a = dt_dispatch(x, outer, v->ep), *b = dt_dispatch(x, inner, v->ep);
    if (!a || !b) return NULL;
    dt_tensor *y = dt_combine(row_ops(b), inner);
    /* a tensor that in some steps has as many rows as a or b */
    dt_tensor *other = dt_gelu(dt_input(x->ctx, DT_F32, DT_SHAPE(8, VARY_WIDTH), NULL));
    return other ? dt_add(y, dt_combine(row_ops(a), outer)) : NULL;
}

/* Token t of step `step` goes to expert t % spread. */
static dt_tensor *vary_input(dt_ctx *ctx, int step) {
    static const int spread[6][2] = { { 1, 1 }, { 1, 1 }, { 2, 1 }, { 4, 2 }, { 1, 4 }, { 2, 2 } };
    float x[VARY_TOKENS * VARY_WIDTH];
    memset(x, 0, sizeof x);
    for (int t = 0; t < VARY_TOKENS; t++)
        for (int i = 0; i < 2; i++) x[t * VARY_WIDTH + i * VARY_EXPERTS + t % spread[step][i]] = 1;
    return dt_input(ctx, DT_F32, DT_SHAPE(1, VARY_TOKENS, VARY_WIDTH), x);
}

/* Compares the output and the gradient of the input with those of mode VARY_PLAIN, which runs
   first. */
static void vary_compare(
    const vary *v, int step, const dt_tensor *t, const void *data, int is_grad) {
    static float plain[2][6][2][VARY_TOKENS * VARY_WIDTH];
    float *want = plain[dt_ctx_rank(t->ctx)][step][is_grad];
    if (v->mode == VARY_PLAIN && CHECK(data != NULL)) memcpy(want, data, sizeof *plain[0][0]);
    CHECK_MSG(data && memcmp(want, data, sizeof *plain[0][0]) == 0, "mode %d, step %d: %s differs",
        v->mode, step, is_grad ? "the gradient" : "the output");
}

static dt_status vary_main(dt_ctx *ctx, void *user) {
    vary v = *(const vary *)user;
    v.ep = dt_mesh_make(ctx, (dt_mesh_desc){ .ep = dt_comm_size(dt_world(ctx)) }).ep;
    size_t allocations = 0;
    for (int step = 0; step < 6 && dt_error(ctx) == DT_OK; step++) {
        float w[2][VARY_EXPERTS * VARY_WIDTH];
        memset(w, 0, sizeof w);
        for (int i = 0; i < 2; i++)
            for (int e = 0; e < VARY_EXPERTS; e++) w[i][e * VARY_WIDTH + i * VARY_EXPERTS + e] = 1;
        for (int i = 0; i < 2; i++)
            v.router[i] = dt_input(ctx, DT_F32, DT_SHAPE(VARY_EXPERTS, VARY_WIDTH), w[i]);
        dt_no_grad(ctx, v.mode == VARY_NO_GRAD);
        ctx->root->split = v.mode == VARY_SPLIT;
        dt_tensor *x = dt_require_grad(vary_input(ctx, step));
        dt_block_desc block = { .recompute = v.mode == VARY_RECOMPUTE };
        dt_tensor *y = dt_block_at(ctx, vary_forward, x, &v, block);
        /* a gradient that is not the same everywhere */
        dt_tensor *loss = y ? dt_sum_over(dt_mul(y, y), DT_ALL) : NULL;
        if (y) vary_compare(&v, step, x, dt_data(y), 0);
        if (v.mode == VARY_SPLIT) {
            dt_backward_input(loss);
            dt_backward_weight(loss);
        } else if (v.mode != VARY_NO_GRAD) {
            dt_backward(loss);
        }
        if (v.mode != VARY_NO_GRAD) vary_compare(&v, step, x, x ? x->grad : NULL, 1);
        dt_reset(ctx);
        size_t now = dt_memory_used(ctx).allocations;
        CHECK_MSG(UNDER_ASAN || step < 2 || v.capacity == 0 || now == allocations,
            "mode %d, %d ranks: %zu allocations in step %d", v.mode, dt_comm_size(dt_world(ctx)),
            now - allocations, step);
        allocations = now;
    }
    return dt_error(ctx);
}

static void test_vary(void) {
    for (int code = 0; code < 4 * VARY_MODES; code++) {
        vary v = { .mode = code % VARY_MODES, .capacity = code / VARY_MODES % 2 };
        dt_report report = run(1 + code / VARY_MODES / 2, vary_main, &v);
        CHECK_MSG(
            report.status == DT_OK, "mode %d, capacity %g: %s", v.mode, v.capacity, report.text);
    }
}

// ==== Dry runs ==================================================================================

/* A dry run assumes an even load, and reports the bytes of an even load. */
static void test_dry(void) {
    static result out;
    for (int i = 0; i < 4; i++) {
        job j = { .ep = 2,
            .tp = 1 + i % 2,
            .sp = i % 2,
            .cp = 1 + i / 2,
            .kind = i / 2 ? DT_CP_ZIGZAG : 0,
            .k = 2,
            .capacity = 1,
            .balance = 1,
            .z = 1,
            .dtype = DT_F32,
            .dry = 1 };
        run_job(&j, &out);
    }
}

typedef struct dry_one {
    dt_dry dry;
    int recompute;
} dry_one;

static dt_status dry_main(dt_ctx *ctx, void *user) {
    dry_one *one = (dry_one *)user;
    double counts[8] = { 0 };
    dt_dry_begin(ctx, &one->dry);
    dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(2, 8, 4), NULL);
    dt_route_counts count = { .experts = counts };
    dt_routing *r = dt_route(x, dt_input(ctx, DT_F32, DT_SHAPE(8, 4), NULL),
        (dt_route_desc){ .k = 3, .capacity = 1, .counts = &count });
    CHECK(r && dt_dispatch(x, r, NULL) && r->rows == 48 && count.dropped == 0);
    for (int e = 0; e < 8; e++) CHECK(counts[e] == 6 && r && r->expert_rows[e] == 6);
    for (int i = 0; r && i < 48; i++) CHECK(r->choices[i] == i % 24 % 8);
    return dt_error(ctx);
}

// ==== ZeRO 3 ====================================================================================

typedef struct zero_job {
    int stage;
    dt_dtype dtype;
    double w[24], w1[48], w2[48], bias[6];
} zero_job;
typedef struct zero_layer {
    dt_tensor *w, *w1, *w2, *bias;
    dt_route_counts counts;
} zero_layer;

static dt_tensor *zero_forward(dt_tensor *x, void *user) {
    zero_layer *l = (zero_layer *)user;
    dt_routing *r = dt_route(x, l->w,
        (dt_route_desc){
            .k = 2, .balance = 0.1, .sequences = 4, .bias = l->bias, .counts = &l->counts });
    dt_tensor *h = dt_expert_linear(
        dt_dispatch(x, r, NULL), r, l->w1, NULL, (dt_expert_desc){ DT_ACT_GELU, NULL });
    return dt_combine(dt_expert_linear(h, r, l->w2, NULL, (dt_expert_desc){ .activation = 0 }), r);
}

static dt_status zero_main(dt_ctx *ctx, void *user) {
    zero_job *j = (zero_job *)user;
    dt_param_desc d = { .dtype = j->dtype };
    zero_layer l = { dt_param_at(ctx, "w", DT_SHAPE(6, 4), DT_NORMAL(1), d),
        dt_param_at(ctx, "w1", DT_SHAPE(6, 2, 4), DT_NORMAL(0.5), d),
        dt_param_at(ctx, "w2", DT_SHAPE(6, 4, 2), DT_NORMAL(0.5), d),
        dt_param_at(ctx, "bias", DT_SHAPE(6), DT_ZEROS, (dt_param_desc){ .frozen = 1 }),
        { .experts = NULL } };
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = j->stage, .optimizer = DT_SGD });
    double values[2 * 8 * 4], want[2 * 8 * 4], counts[6];
    dt_comm *world = dt_world(ctx);
    l.counts.experts = counts;
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 64; i++) {
            values[i] = number((uint32_t)(70 + step), (uint32_t)(i + 64 * dt_ctx_rank(ctx)));
            want[i] = number(80, (uint32_t)i);
        }
        memset(counts, 0, sizeof counts);
        dt_tensor *x = tensor_of(ctx, j->dtype, DT_SHAPE(2, 8, 4), values);
        dt_tensor *y =
            dt_block_at(ctx, zero_forward, x, &l, (dt_block_desc){ .recompute = step == 1 });
        dt_backward(dt_mse(y, tensor_of(ctx, j->dtype, DT_SHAPE(2, 8, 4), want), 16));
        dt_zero_step(opt, 0.5);
        dt_route_update_bias(l.bias, counts, 0.01, &world, 1);
        dt_reset(ctx);
    }
    char host[48 * 8];
    dt_tensor *all[4] = { l.w, l.w1, l.w2, l.bias };
    double *out[4] = { j->w, j->w1, j->w2, j->bias };
    for (int i = 0; i < 4 && dt_error(ctx) == DT_OK; i++) {
        dt_read(all[i], host);
        if (dt_ctx_rank(ctx) == 0) values_of(all[i]->dtype, host, dt_count(all[i]->shape), out[i]);
    }
    return dt_error(ctx);
}

static void test_zero(void) {
    for (int i = 0; i < 2; i++) {
        zero_job a = { .stage = 2, .dtype = i ? DT_BF16 : DT_F32 },
                 b = { .stage = 3, .dtype = a.dtype };
        dt_report one = run(2, zero_main, &a), other = run(2, zero_main, &b);
        CHECK_MSG(one.status == DT_OK && other.status == DT_OK, "%s%s", one.text, other.text);
        CHECK(!memcmp(a.bias, b.bias, sizeof a.bias) && a.bias[0] != 0 && fabs(a.bias[0]) < 0.031);
        CHECK(!memcmp(a.w, b.w, sizeof a.w) && !memcmp(a.w1, b.w1, sizeof a.w1) &&
              !memcmp(a.w2, b.w2, sizeof a.w2));
    }
}

// ==== Refusals ==================================================================================

typedef struct refusal {
    int number;
    dt_status status;
    const char *text;
} refusal;

static const refusal refusals[] = {
    { 0, DT_ERR_ARG, "another input is NULL" },
    { 1, DT_ERR_SHAPE, "x (B,T,C) and w (E,C) are needed" },
    { 2, DT_ERR_SHAPE, "x (B,T,C) and w (E,C) are needed" },
    { 3, DT_ERR_SHAPE, "the dtypes do not match" },
    { 4, DT_ERR_SHAPE, "k must be 1 to E" },
    { 5, DT_ERR_SHAPE, "k must be 1 to E" },
    { 6, DT_ERR_SHAPE, "the capacity must be 0 or more" },
    { 7, DT_ERR_SHAPE, "weights must be 0 or more" },
    { 8, DT_ERR_SHAPE, "side losses need the step's number of sequences" },
    { 9, DT_ERR_SHAPE, "the bias must be (E), f32 (f64 of f64), and frozen" },
    { 10, DT_ERR_SHAPE, "the bias must be (E), f32 (f64 of f64), and frozen" },
    { 11, DT_ERR_SHAPE, "outside must be DT_REPLICATE or DT_SHARD(1)" },
    { 12, DT_ERR_ARG, "position 9 of token 1 in sequence 0; each of 0 to 3 is of one token" },
    { 13, DT_ERR_ARG, "position 0 of token 1 in sequence 0; each of 0 to 3 is of one token" },
    { 14, DT_ERR_ARG, "dt_dispatch(dt_input): the routing is NULL" },
    { 15, DT_ERR_SHAPE, "(2,3,3), but 2 sequences of 4 tokens were routed" },
    { 16, DT_ERR_SHAPE, "dt_dispatch comes first" },
    { 17, DT_ERR_SHAPE, "w has another number of experts than this rank" },
    { 18, DT_ERR_SHAPE, "x has another number of rows than were dispatched" },
    { 19, DT_ERR_SHAPE, "the last dimensions must agree, and w needs three" },
    { 20, DT_ERR_SHAPE, "the bias must have w's shape less its last dimension" },
    { 21, DT_ERR_ARG, "activation 99" },
    { 22, DT_ERR_SHAPE, "0 rows (R,O) for gates in f32 were dispatched" },
    { 23, DT_ERR_SHAPE, "f64 (8,3), but 8 rows (R,O) for gates in f32 were dispatched" },
    { 24, DT_ERR_ARG, "no counts" },
    { 25, DT_ERR_ARG, "rate -1" },
    { 26, DT_ERR_ARG, "bf16 bias" },
    { 27, DT_ERR_SHAPE, "types differ" },
    { 28, DT_ERR_SHAPE, "not for integers" },
    { 29, DT_ERR_SHAPE, "1 of 3 groups, scale 0: groups must divide E" },
    { 30, DT_ERR_SHAPE, "3 of 2 groups, scale 0: top_groups must be 1 to groups" },
    { 31, DT_ERR_SHAPE, "k 3, capacity 1, balance 0, z 0, 0 sequences, 1 of 2 groups, scale 0" },
    { 32, DT_ERR_SHAPE, "the scale must be 0 or more" },
    { 33, DT_ERR_SHAPE, "scores: DT_ROUTE_*" },
};

static dt_tensor *shaped(dt_ctx *ctx, dt_dtype dtype, dt_shape shape) {
    dt_tensor *t = dt_new(ctx, dtype, shape);
    if (t) memset(t->data, 0, (size_t)dt_count(shape) * dt_dtype_size(dtype));
    return t;
}

static void refuse_route(dt_ctx *ctx, int n, dt_tensor *x, dt_tensor *w) {
    static const int32_t far[8] = { 0, 9, 1, 2, 0, 1, 2, 3 }, twice[8] = { 0, 0, 1, 2, 0, 1, 2, 3 };
    dt_route_desc d = { .k = 1, .capacity = 1 };
    if (n == 1) x = dt_reshape(x, DT_SHAPE(8, 3));
    if (n == 2) w = shaped(ctx, DT_F32, DT_SHAPE(4, 2));
    if (n == 3) w = shaped(ctx, DT_F64, DT_SHAPE(4, 3));
    if (n == 4) d.k = 5;
    if (n == 5) d.k = -1;
    if (n == 6) d.capacity = NAN;
    if (n == 7) d.z = -1;
    if (n == 8) d.balance = 1;
    if (n == 9) d.bias = shaped(ctx, DT_F32, DT_SHAPE(3));
    if (n == 10) d.bias = dt_require_grad(shaped(ctx, DT_F32, DT_SHAPE(4)));
    if (n == 11) d.outside = DT_SHARD(2);
    if (n == 12) d.positions = far;
    if (n == 13) d.positions = twice;
    if (n == 28) x = shaped(ctx, DT_I32, DT_SHAPE(2, 4, 3));
    if (n >= 29) d.groups = n == 29 ? 3 : 2, d.top_groups = n == 30 ? 3 : 1;
    if (n == 31) d.k = 3;
    if (n == 32) d.scale = -1;
    if (n == 33) d.scores = 2;
    CHECK(dt_route(x, n ? w : NULL, d) == NULL);
}

static void refuse_product(dt_ctx *ctx, int n, dt_routing *r, dt_tensor *rows) {
    dt_expert_desc d = { .activation = n == 21 ? 99 : 0 };
    dt_tensor *w = shaped(ctx, n == 27 ? DT_F64 : DT_F32,
        n == 17   ? DT_SHAPE(3, 2, 3)
        : n == 19 ? DT_SHAPE(4, 3)
                  : DT_SHAPE(4, 2, 3));
    dt_tensor *b = n == 20 ? shaped(ctx, DT_F32, DT_SHAPE(4, 3)) : NULL;
    if (n == 18) rows = shaped(ctx, DT_F32, DT_SHAPE(7, 3));
    CHECK(dt_expert_linear(rows, r, w, b, d) == NULL);
}

static dt_status refusal_main(dt_ctx *ctx, void *user) {
    int n = ((const refusal *)user)->number;
    double counts[4] = { 0 };
    dt_tensor *x = shaped(ctx, DT_F32, DT_SHAPE(2, 4, 3)), *w = shaped(ctx, DT_F32, DT_SHAPE(4, 3));
    if (n <= 13 || n >= 28) refuse_route(ctx, n, x, w);
    if (n == 14)
        CHECK(dt_dispatch(dt_input(ctx, DT_F32, DT_SHAPE(2, 4, 3), NULL), NULL, NULL) == NULL);
    if (n <= 14 || n >= 28) return dt_error(ctx);
    dt_routing *r = dt_route(x, w, (dt_route_desc){ .k = 1 });
    if (n == 15) CHECK(dt_dispatch(shaped(ctx, DT_F32, DT_SHAPE(2, 3, 3)), r, NULL) == NULL);
    if (n == 22) CHECK(dt_combine(shaped(ctx, DT_F32, DT_SHAPE(8, 3)), r) == NULL);
    if (n == 16) refuse_product(ctx, n, r, shaped(ctx, DT_F32, DT_SHAPE(8, 3)));
    dt_tensor *rows = dt_dispatch(x, r, NULL);
    if ((n >= 17 && n <= 21) || n == 27) refuse_product(ctx, n, r, rows);
    if (n == 23) CHECK(dt_combine(shaped(ctx, DT_F64, DT_SHAPE(8, 3)), r) == NULL);
    dt_tensor *bias = shaped(ctx, n == 26 ? DT_BF16 : DT_F32, DT_SHAPE(4));
    if (n >= 24 && n <= 26)
        CHECK(dt_route_update_bias(bias, n == 24 ? NULL : counts, n == 25 ? -1 : 1, NULL, 0) ==
              DT_ERR_ARG);
    return dt_error(ctx);
}

static dt_status indivisible_main(dt_ctx *ctx, void *user) {
    (void)user;
    dt_mesh m = dt_mesh_make(ctx, (dt_mesh_desc){ .ep = 2 });
    dt_tensor *x = shaped(ctx, DT_F32, DT_SHAPE(2, 4, 3));
    dt_routing *r = dt_route(x, shaped(ctx, DT_F32, DT_SHAPE(3, 3)), (dt_route_desc){ .k = 1 });
    CHECK(r != NULL && dt_dispatch(x, r, m.ep) == NULL);
    return dt_error(ctx);
}

static dt_status unsharded_experts_main(dt_ctx *ctx, void *user) {
    (void)user;
    dt_mesh m = dt_mesh_make(ctx, (dt_mesh_desc){ .cp = 2 });
    dt_tensor *x = shaped(ctx, DT_F32, DT_SHAPE(2, 3, 3));
    dt_route_desc d = { .k = 1, .cp = m.cp, .kind = DT_CP_ZIGZAG };
    CHECK(dt_route(x, shaped(ctx, DT_F32, DT_SHAPE(4, 3)), d) == NULL);
    return dt_error(ctx);
}

static void test_refusals(void) {
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        refusal r = refusals[i];
        dt_report report = run(1, refusal_main, &r);
        CHECK_MSG(report.status == r.status && strstr(report.text, r.text), "refusal %d: %s: %s",
            r.number, dt_status_name(report.status), report.text);
    }
    dt_report report = run(2, indivisible_main, NULL);
    CHECK_MSG(report.status == DT_ERR_SHAPE &&
                  strstr(report.text, "3 experts over ep 2; use a multiple of 2"),
        "%s", report.text);
    report = run(2, unsharded_experts_main, NULL);
    CHECK_MSG(report.status == DT_ERR_SHAPE && strstr(report.text, "zigzag over cp 2"), "%s",
        report.text);
    CHECK(dt_route_update_bias(NULL, NULL, 1, NULL, 0) == DT_ERR_ARG &&
          !dt_dispatch(NULL, NULL, NULL));
    CHECK(!dt_route(NULL, NULL, (dt_route_desc){ .k = 1 }) && !dt_combine(NULL, NULL));
}

int main(int argc, char **argv) {
    if (argc > 1) golden_folder = argv[1];
    quiet = *dt_host_default();
    quiet.log = silent;
    quiet.alloc = alloc_nan_filled;
    test_stored();
    CHECK(run(1, fd_main, NULL).status == DT_OK);
    CHECK(run(1, extremes_main, NULL).status == DT_OK);
    CHECK(run(2, no_tokens_main, NULL).status == DT_OK);
    CHECK(run(1, signs_main, NULL).status == DT_OK);
    CHECK(run(1, stale_main, NULL).status == DT_OK);
    dry_one dry = { .recompute = 0 };
    CHECK(run(1, dry_main, &dry).status == DT_OK);
    test_one_expert();
    test_order();
    test_variants();
    test_layouts();
    test_ranks();
    test_types();
    test_balance();
    test_vary();
    test_dry();
    test_zero();
    test_refusals();
    return check_done("test_moe");
}
