/* test_parallel.c - dt_parallel.h: the mesh, every row of the table of placements, the order of
   data, samplers, texts

   Ranks are threads. Placements are checked by their definition: the test reconstructs the full
   tensor from the ranks' local tensors before and after a redistribution, and both must be equal.
   Gradients are checked the same way with the dual placements. Values are small multiples of 1/4,
   so sums are exact in f32 and checks use ==. The sampler's orders are compared with PyTorch's
   (golden/make_sampler.py).

   test_parallel [FOLDER]     the stored orders, tests/golden */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_parallel.h"
#include "tests/support/check.h"
#include "tests/golden/golden.h"
#include <errno.h>
#include <math.h>
#include <sys/stat.h>
#include <sys/wait.h>

// ==== Helpers ===================================================================================

/* A host table that logs nothing, because most failures here are expected. Set by main. */
static dt_host quiet;

static void silent(void *user, int level, int rank, const char *text) {
    (void)user;
    (void)level;
    (void)rank;
    (void)text;
}

static dt_report run(int ranks, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    dt_report report;
    dt_run((dt_run_desc){ .ranks = ranks, .timeout_s = 60, .host = &quiet, .report = &report },
        rank_main, user);
    return report;
}

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t h = a * 2654435761u + b * 2246822519u + c * 3266489917u + 374761393u;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    return h ^ (h >> 16);
}

static double quarter(uint32_t a, uint32_t b, uint32_t c) {
    return ((double)(mix(a, b, c) % 33) - 16) / 4;
}

/* Runs fn in a child process and returns 1 unless it crashes. */
static int survives(void (*fn)(void)) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(3);
        fn();
        _exit(0);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}

// ==== 1. Mesh ===================================================================================

enum { AXIS_PP = 0, AXIS_DP, AXIS_EP, AXIS_CP, AXIS_TP, AXES }; /* slowest first */

static void sizes_of(dt_mesh_desc s, int out[AXES]) {
    out[AXIS_PP] = s.pp;
    out[AXIS_DP] = s.dp;
    out[AXIS_EP] = s.ep;
    out[AXIS_CP] = s.cp;
    out[AXIS_TP] = s.tp;
}

/* Computes coordinates by counting ranks as an odometer does, so that no formula is shared with the
   library. */
static void coordinates(const int sizes[AXES], int rank, int at[AXES]) {
    memset(at, 0, AXES * sizeof *at);
    while (rank-- > 0) {
        int i = AXES - 1;
        while (i > 0 && ++at[i] == sizes[i]) at[i--] = 0;
        if (i == 0) at[0]++;
    }
}

/* The group must hold exactly the ranks whose coordinates on all other axes equal mine, in
   ascending order. A group of one rank is NULL. */
static void check_group(
    dt_comm *comm, const int sizes[AXES], int world, int me, unsigned axes, const char *name) {
    int mine[AXES], other[AXES], n = 0, right = 1;
    coordinates(sizes, me, mine);
    for (int q = 0; q < world; q++) {
        int member = 1;
        coordinates(sizes, q, other);
        for (int i = 0; i < AXES; i++) member &= (axes >> i & 1) || other[i] == mine[i];
        if (!member) continue;
        if (q == me)
            CHECK_MSG(dt_comm_rank(comm) == n, "%s: rank %d of %d is %d", name, me, world,
                dt_comm_rank(comm));
        right &= dt_comm_world_rank(comm, n++) == q || n == 1;
    }
    CHECK_MSG(right && dt_comm_size(comm) == n, "%s: wrong members in the group of rank %d of %d",
        name, me, world);
    CHECK_MSG(
        (n == 1) == (comm == NULL), "%s: %d ranks, group %s", name, n, comm ? "made" : "NULL");
}

/* A group's traffic must count under its axis only. */
static void check_axis(dt_ctx *ctx, dt_comm *comm, dt_axis axis) {
    size_t before[DT_AXES], n = (size_t)dt_comm_size(comm);
    float buffer[64];
    if (!comm) return;
    memset(buffer, 0, sizeof buffer);
    for (int a = 0; a < DT_AXES; a++) before[a] = dt_comm_bytes(ctx, (dt_axis)a);
    dt_all_reduce(comm, buffer, buffer, n, DT_F32, DT_SUM);
    for (int a = 0; a < DT_AXES; a++)
        CHECK(dt_comm_bytes(ctx, (dt_axis)a) - before[a] == (a == (int)axis ? 2 * (n - 1) * 4 : 0));
}

typedef struct mesh_case {
    dt_mesh_desc asked, sizes;
} mesh_case;

/* The groups of experts. With expert folding they are those of another mesh over the same ranks,
   whose axes are pp, expert_data (here dp), ep and expert_tp (here tp). */
static void check_experts(dt_ctx *ctx, const dt_mesh *m, int world) {
    int s[AXES], at[AXES], me = dt_ctx_rank(ctx), folded = m->sizes.expert_tp > 0;
    sizes_of(m->sizes, s);
    if (folded) {
        s[AXIS_CP] = 1;
        s[AXIS_TP] = m->sizes.expert_tp;
        s[AXIS_DP] = world / (s[AXIS_PP] * s[AXIS_EP] * s[AXIS_TP]);
    }
    coordinates(s, me, at);
    CHECK(m->coord.ep == at[AXIS_EP] && (!folded || m->coord.expert_tp == at[AXIS_TP]));
    check_group(m->ep, s, world, me, 1u << AXIS_EP, "ep");
    check_group(m->expert_tp, s, world, me, 1u << AXIS_TP, "expert_tp");
    check_group(m->expert_data, s, world, me, 1u << AXIS_DP | 1u << AXIS_CP, "expert_data");
    check_group(
        m->dispatch, s, world, me, 1u << AXIS_EP | (folded ? 1u << AXIS_TP : 0), "dispatch");
    check_axis(ctx, m->ep, DT_AXIS_EP);
    check_axis(ctx, m->expert_tp, DT_AXIS_TP);
    check_axis(ctx, m->expert_data, DT_AXIS_DP);
    check_axis(ctx, m->dispatch, DT_AXIS_EP);
    /* dt_zero tells experts from dense parameters by their groups */
    CHECK(folded ? !m->expert_tp || m->expert_tp != m->tp : m->expert_tp == m->tp);
}

static dt_status mesh_main(dt_ctx *ctx, void *user) {
    const mesh_case *c = (const mesh_case *)user;
    dt_mesh m = dt_mesh_make(ctx, c->asked);
    int s[AXES], at[AXES], me = dt_ctx_rank(ctx), world = dt_comm_size(dt_world(ctx));
    dt_mesh_desc dense = c->sizes;
    if (dense.expert_tp) dense.ep = 1; /* no axis of the dense layers */
    sizes_of(dense, s);
    coordinates(s, me, at);
    CHECK(memcmp(&m.sizes, &c->sizes, sizeof m.sizes) == 0);
    CHECK(m.world == dt_world(ctx));
    CHECK(s[AXIS_DP] * s[AXIS_TP] * s[AXIS_CP] * s[AXIS_PP] * s[AXIS_EP] == world);
    CHECK(m.coord.pp == at[AXIS_PP] && m.coord.dp == at[AXIS_DP] && m.coord.cp == at[AXIS_CP] &&
          m.coord.tp == at[AXIS_TP]);
    int dp_row = m.coord.pp * s[AXIS_DP] + m.coord.dp, ep_row = dp_row * s[AXIS_EP] + at[AXIS_EP];
    CHECK(me == (ep_row * s[AXIS_CP] + m.coord.cp) * s[AXIS_TP] + m.coord.tp);
    CHECK(m.replicas == s[AXIS_DP] * s[AXIS_EP] &&
          m.replica == m.coord.dp * s[AXIS_EP] + at[AXIS_EP]);
    check_group(m.pp, s, world, me, 1u << AXIS_PP, "pp");
    check_group(m.dp, s, world, me, 1u << AXIS_DP, "dp");
    check_group(m.cp, s, world, me, 1u << AXIS_CP, "cp");
    check_group(m.tp, s, world, me, 1u << AXIS_TP, "tp");
    check_group(m.data, s, world, me, 1u << AXIS_DP | 1u << AXIS_EP | 1u << AXIS_CP, "data");
    check_axis(ctx, m.pp, DT_AXIS_PP);
    check_axis(ctx, m.dp, DT_AXIS_DP);
    check_experts(ctx, &m, world);
    check_axis(ctx, m.cp, DT_AXIS_CP);
    check_axis(ctx, m.tp, DT_AXIS_TP);
    check_axis(ctx, m.data, DT_AXIS_DP); /* gradients count as dp, whichever axes the group spans */
    CHECK(!m.tp || strcmp(dt_comm_name(m.tp), "tp") == 0);
    CHECK(!m.dp || strcmp(dt_comm_name(m.dp), "dp") == 0);
    return dt_error(ctx);
}

static void test_mesh(void) {
    for (int code = 0; code < 3 * 2 * 3 * 3 * 2; code++) {
        dt_mesh_desc s = { .dp = 1 + code % 3,
            .ep = 1 + code / 3 % 2,
            .cp = 1 + code / 6 % 3,
            .tp = 1 + code / 18 % 3,
            .pp = 1 + code / 54 };
        int world = s.dp * s.ep * s.cp * s.tp * s.pp;
        mesh_case c = { s, s };
        if (world > 12) continue;
        if (code % 2) c.asked.dp = 0;  /* derived */
        if (s.cp == 1) c.asked.cp = 0; /* 0 means 1 */
        if (s.ep == 1) c.asked.ep = 0;
        if (s.tp == 1) c.asked.tp = 0;
        if (s.pp == 1) c.asked.pp = 0;
        CHECK(run(world, mesh_main, &c).status == DT_OK);
    }
    /* expert folding: ep over tp, cp, dp and several of them; expert_tp less or more than tp */
    static const dt_mesh_desc folded[] = { { 1, 2, 1, 1, 2, 1, 0 }, { 1, 1, 2, 2, 2, 1, 0 },
        { 1, 2, 2, 1, 4, 1, 0 }, { 2, 2, 1, 1, 2, 2, 0 }, { 2, 2, 1, 2, 4, 1, 0 },
        { 2, 1, 1, 1, 1, 2, 0 }, { 2, 2, 1, 1, 1, 4, 0 }, { 2, 2, 1, 1, 1, 1, 0 },
        { 2, 3, 2, 1, 3, 2, 0 }, { 3, 2, 1, 2, 2, 1, 0 }, { 1, 1, 1, 2, 1, 1, 0 } };
    for (size_t i = 0; i < sizeof folded / sizeof *folded; i++) {
        const dt_mesh_desc *s = &folded[i];
        mesh_case c = { *s, *s };
        if (i % 2) c.asked.dp = 0;
        CHECK(run(s->dp * s->tp * s->cp * s->pp, mesh_main, &c).status == DT_OK);
    }
}

static dt_status bad_mesh_main(dt_ctx *ctx, void *user) {
    dt_mesh m = dt_mesh_make(ctx, *(const dt_mesh_desc *)user);
    CHECK(!m.dp && !m.tp && !m.cp && !m.pp && !m.ep && !m.data);
    CHECK(dt_error(ctx) == DT_ERR_ARG || dt_error(ctx) == DT_ERR_PEER);
    CHECK(strstr(dt_error_text(ctx), "dt_mesh_make") != NULL);
    m = dt_mesh_make(ctx, (dt_mesh_desc){ 0 }); /* sticky */
    CHECK(!m.dp && !m.data);
    return dt_error(ctx);
}

/* Returns NULL if an error text names the number of ranks and proposes legal sizes, else says what
   is wrong. */
static const char *wrong_choice(dt_mesh_desc asked, int ranks, const char *text) {
    char number[24], ignored[300];
    int dp = 0, ep = 0, expert_tp = 0;
    long long other = 0;
    snprintf(number, sizeof number, "%d ranks", ranks);
    const char *use = strstr(text, "use ");
    if (use && sscanf(use, "use ep %d and expert_tp %d", &ep, &expert_tp) == 2) {
        if (!(ep > 0 && ep <= (asked.ep ? asked.ep : 1)) ||
            !(expert_tp > 0 && expert_tp <= asked.expert_tp))
            return "the proposal is larger than what was asked";
        asked.ep = ep;
        asked.expert_tp = expert_tp;
        return dt_mesh_resolve(&asked, ranks, ignored, sizeof ignored) == DT_OK
                   ? NULL
                   : "the proposal is refused, too";
    }
    if (!strstr(text, number)) return "the number of ranks is missing";
    if (ranks < 1) return NULL;
    if (!use) return "the text proposes nothing";
    if (sscanf(use, "use dp %d", &dp) == 1)
        asked.dp = dp;
    else if (sscanf(use, "use %lld ranks", &other) == 1)
        ranks = (int)other;
    else
        return "the text proposes nothing";
    if (asked.expert_tp) asked.ep = asked.expert_tp = 1; /* that is another rule */
    return dt_mesh_resolve(&asked, ranks, ignored, sizeof ignored) == DT_OK
               ? NULL
               : "the proposal is refused, too";
}

/* Returns NULL if dt_mesh_resolve is correct for these sizes, else says what is wrong. text: 300
   bytes. */
static const char *wrong_sizes(dt_mesh_desc asked, int ranks, char *text) {
    dt_mesh_desc s = asked;
    int tp = s.tp ? s.tp : 1, cp = s.cp ? s.cp : 1, pp = s.pp ? s.pp : 1, ep = s.ep ? s.ep : 1;
    int others = tp * cp * pp * (s.expert_tp ? 1 : ep), dp = s.dp ? s.dp : ranks / others;
    int legal = ranks >= 1 && dp >= 1 && dp * others == ranks;
    if (legal && s.expert_tp) legal = dp * tp * cp % (ep * s.expert_tp) == 0;
    dt_status status = dt_mesh_resolve(&s, ranks, text, 300);
    if (legal && status != DT_OK) return "refused";
    if (legal)
        return s.dp == dp && s.tp == tp && s.cp == cp && s.pp == pp && s.ep == ep &&
                       s.expert_tp == asked.expert_tp
                   ? NULL
                   : "resolved wrong";
    return status == DT_ERR_ARG ? wrong_choice(asked, ranks, text) : "accepted";
}

/* Tests all sizes up to 4 on up to 12 ranks; prints the first failure. */
static void test_all_sizes(void) {
    char text[300] = "", first[500] = "";
    int wrong = 0, all = 0;
    for (int ranks = 0; ranks <= 12; ranks++)
        for (int code = 0; code < 5 * 5 * 3 * 3 * 3 * 4; code++, all++) {
            dt_mesh_desc s = { .dp = code % 5,
                .tp = code / 5 % 5,
                .cp = code / 25 % 3,
                .pp = code / 75 % 3,
                .ep = code / 225 % 3,
                .expert_tp = code / 675 };
            const char *why = wrong_sizes(s, ranks, text);
            if (why && !wrong++)
                snprintf(first, sizeof first,
                    "%s: dp %d tp %d cp %d pp %d ep %d expert_tp %d on %d: %s", why, s.dp, s.tp,
                    s.cp, s.pp, s.ep, s.expert_tp, ranks, text);
        }
    CHECK_MSG(wrong == 0, "%d of %d mesh sizes fail; the first: %s", wrong, all, first);
}

static void test_mesh_sizes(void) {
    char text[300] = "";
    test_all_sizes();
    dt_mesh_desc s = { .tp = -2 };
    CHECK(dt_mesh_resolve(&s, 4, text, sizeof text) == DT_ERR_ARG && strstr(text, "-2"));
    s = (dt_mesh_desc){ .tp = 3 };
    CHECK(dt_mesh_resolve(&s, 4, text, sizeof text) == DT_ERR_ARG && strstr(text, "tp 3") &&
          strstr(text, "4 ranks"));
    s = (dt_mesh_desc){ .dp = 3, .tp = 2 };
    CHECK(dt_mesh_resolve(&s, 4, text, sizeof text) == DT_ERR_ARG && strstr(text, "dp 3") &&
          strstr(text, "use dp 2"));
    s = (dt_mesh_desc){ .tp = 2, .cp = 2, .ep = 3, .expert_tp = 2 };
    CHECK(dt_mesh_resolve(&s, 4, text, sizeof text) == DT_ERR_ARG &&
          strstr(text, "ep 3 x expert_tp 2 does not divide dp 1 x cp 2 x tp 2 = 4; use ep 2 and "
                       "expert_tp 2"));
    /* no overflow */
    s = (dt_mesh_desc){ .dp = 1 << 30, .tp = 1 << 30, .cp = 1 << 30, .pp = 1 << 30, .ep = 1 << 30 };
    CHECK(dt_mesh_resolve(&s, 4, text, sizeof text) == DT_ERR_ARG);
    s = (dt_mesh_desc){ .tp = 3 };
    /* a small buffer is not overrun */
    CHECK(dt_mesh_resolve(&s, 4, text, 5) == DT_ERR_ARG && strlen(text) < 5);
    dt_mesh_desc bad = { .tp = 3 };
    dt_report report = run(4, bad_mesh_main, &bad);
    CHECK(report.status == DT_ERR_ARG && strstr(report.text, "tp 3"));
}

// ==== 2. Placements: every row of the table against its definition ==============================

enum { MAX_N = 4, MAX_COUNT = 512 };
enum { NOTHING = 0, ALL_REDUCE, SHARES, ALL_TO_ALL }; /* the collective that a row uses */

typedef struct row {
    int from, to, forward, backward;
} row;
static const row rows[] = {
    { DT_PLACEMENT_PARTIAL, DT_PLACEMENT_REPLICATE, ALL_REDUCE, NOTHING },
    { DT_PLACEMENT_REPLICATE, DT_PLACEMENT_COPY, NOTHING, ALL_REDUCE },
    { DT_PLACEMENT_SHARD, DT_PLACEMENT_COPY, SHARES, SHARES },
    { DT_PLACEMENT_PARTIAL, DT_PLACEMENT_SHARD, SHARES, SHARES },
    { DT_PLACEMENT_SHARD, DT_PLACEMENT_REPLICATE, SHARES, NOTHING },
    { DT_PLACEMENT_REPLICATE, DT_PLACEMENT_SHARD, NOTHING, SHARES },
    { DT_PLACEMENT_SHARD, DT_PLACEMENT_SHARD, ALL_TO_ALL, ALL_TO_ALL },
    { DT_PLACEMENT_REPLICATE, DT_PLACEMENT_PARTIAL, NOTHING, NOTHING },
    { DT_PLACEMENT_COPY, DT_PLACEMENT_REPLICATE, NOTHING, NOTHING },
};
enum { ROWS = sizeof rows / sizeof *rows };

/* Bytes that one of n ranks sends to move a tensor whose full size is `full`. */
static size_t bytes_moved(int kind, size_t full, size_t n) {
    if (kind == ALL_REDUCE) return 2 * full * (n - 1) / n;
    if (kind == SHARES) return full / n * (n - 1);
    return kind == ALL_TO_ALL ? full / n / n * (n - 1) : 0;
}

/* The ranks' local values as doubles, [rank][element]. y is used twice with different weights w, so
   that the gradients of two uses must add up. */
typedef struct held {
    double x[MAX_N][MAX_COUNT], y[MAX_N][MAX_COUNT], dx[MAX_N][MAX_COUNT], w[2][MAX_N][MAX_COUNT];
} held;

typedef struct move_case {
    dt_shape full;
    dt_placement from, to;
    dt_dtype dtype;
    int number;
} move_case;

static dt_placement dual(dt_placement p) {
    if (p.kind == DT_PLACEMENT_COPY) return DT_PARTIAL;
    return p.kind == DT_PLACEMENT_PARTIAL ? DT_COPY : p;
}

/* Finds which of n shards along dim holds element e of the full tensor, and the element's local
   index. */
static void locate(dt_shape full, int dim, int n, int e, int *part, int *local) {
    int coordinate[DT_MAX_DIMS] = { 0 }, rest = e, extent;
    for (int i = full.nd - 1; i >= 0; i--) {
        coordinate[i] = rest % (int)full.d[i];
        rest /= (int)full.d[i];
    }
    extent = (int)full.d[dim] / n;
    *part = coordinate[dim] / extent;
    *local = 0;
    for (int i = 0; i < full.nd; i++)
        *local = *local * (i == dim ? extent : (int)full.d[i]) +
                 (i == dim ? coordinate[i] % extent : coordinate[i]);
}

/* Element e of the full tensor that the local tensors `at` of n ranks represent in a placement. */
static double meaning(dt_shape full, dt_placement place, int n, double at[][MAX_COUNT], int e) {
    int part, local;
    double sum = 0;
    if (place.kind == DT_PLACEMENT_REPLICATE || place.kind == DT_PLACEMENT_COPY) return at[0][e];
    if (place.kind == DT_PLACEMENT_SHARD) {
        locate(full, place.dim, n, e, &part, &local);
        return at[part][local];
    }
    for (int r = 0; r < n; r++) sum += at[r][e];
    return sum;
}

/* 1 unless a replicated value differs between ranks. */
static int consistent(dt_shape full, dt_placement place, int n, double at[][MAX_COUNT]) {
    if (place.kind != DT_PLACEMENT_REPLICATE && place.kind != DT_PLACEMENT_COPY) return 1;
    for (int r = 1; r < n; r++)
        if (memcmp(at[r], at[0], (size_t)dt_count(full) * sizeof(double)) != 0) return 0;
    return 1;
}

static void check_move(const move_case *c, int n, held *h) {
    static const char *const names[] = { "REPLICATE", "COPY", "SHARD", "PARTIAL" };
    int forward = consistent(c->full, c->to, n, h->y),
        backward = consistent(c->full, dual(c->from), n, h->dx);
    int first = 1; /* if the placement allows one nonzero partial value, rank 0 must hold it */
    for (int e = 0; e < (int)dt_count(c->full); e++) {
        double value = meaning(c->full, c->from, n, h->x, e);
        double up = meaning(c->full, dual(c->to), n, h->w[0], e) +
                    meaning(c->full, dual(c->to), n, h->w[1], e);
        forward &= meaning(c->full, c->to, n, h->y, e) == value;
        backward &= meaning(c->full, dual(c->from), n, h->dx, e) == up;
        if (c->to.kind == DT_PLACEMENT_PARTIAL) first &= h->y[0][e] == value;
        if (c->from.kind == DT_PLACEMENT_COPY) first &= h->dx[0][e] == up;
    }
    CHECK_MSG(forward && backward && first,
        "%s %d -> %s %d, %s %s over %d: ok: forward %d, backward %d, value on rank 0 %d",
        names[c->from.kind], c->from.dim, names[c->to.kind], c->to.dim, dt_dtype_name(c->dtype),
        dt__shape_text(c->full).s, n, forward, backward, first);
}

/* A user's op: the sum of x[i] w[i]; its gradient is w. */
typedef struct dot_saved {
    const double *w;
} dot_saved;

static double element(const void *array, dt_dtype dtype, int64_t i) {
    return dtype == DT_F64 ? ((const double *)array)[i] : (double)((const float *)array)[i];
}

static dt_status dot_back(dt_node *n) {
    const double *w = ((const dot_saved *)n->saved)->w, up = *(const double *)n->out->grad;
    void *dx = dt_wants(n, 0) ? dt_grad(n, 0) : NULL;
    for (int64_t i = 0; dx && i < dt_count(n->in[0]->shape); i++) {
        if (n->in[0]->dtype == DT_F64)
            ((double *)dx)[i] += up * w[i];
        else
            ((float *)dx)[i] += (float)(up * w[i]);
    }
    return DT_OK;
}

static dt_tensor *dot(dt_tensor *x, const double *w) {
    dt_tensor *out = x ? dt_new(x->ctx, DT_F64, DT_SCALAR) : NULL;
    if (!out) return NULL;
    double sum = 0;
    for (int64_t i = 0; i < dt_count(x->shape); i++) sum += element(x->data, x->dtype, i) * w[i];
    *(double *)out->data = sum;
    dot_saved *saved = (dot_saved *)dt_record_saved(out,
        (dt_record_desc){
            .name = "dot", .in = { x }, .backward = dot_back, .saved_bytes = sizeof(dot_saved) });
    if (saved) saved->w = w;
    return out;
}

static dt_shape local_shape(dt_shape full, dt_placement place, int n) {
    if (place.kind == DT_PLACEMENT_SHARD) full.d[place.dim] /= n;
    return full;
}

static dt_tensor *input_of(dt_ctx *ctx, dt_dtype dtype, dt_shape shape, const double *values) {
    float narrow[MAX_COUNT];
    for (int64_t i = 0; i < dt_count(shape); i++) narrow[i] = (float)values[i];
    return dt_input(
        ctx, dtype, shape, dtype == DT_F64 ? (const void *)values : (const void *)narrow);
}

static void keep(const dt_tensor *t, const void *from, double *to) {
    for (int64_t i = 0; from && i < dt_count(t->shape); i++) to[i] = element(from, t->dtype, i);
}

static int is_replicated(dt_placement p) {
    return p.kind == DT_PLACEMENT_REPLICATE || p.kind == DT_PLACEMENT_COPY;
}

static void one_move(dt_ctx *ctx, dt_comm *comm, const move_case *c, const row *r, held *h) {
    int n = dt_comm_size(comm), me = dt_comm_rank(comm);
    dt_shape in = local_shape(c->full, c->from, n), out = local_shape(c->full, c->to, n);
    uint32_t salt = (uint32_t)c->number * 8;
    for (int e = 0; e < (int)dt_count(in); e++)
        h->x[me][e] = quarter(salt, is_replicated(c->from) ? 0 : (uint32_t)me, e);
    for (int k = 0; k < 2; k++) /* the gradient of y has the dual placement of y */
        for (int e = 0; e < (int)dt_count(out); e++)
            h->w[k][me][e] =
                quarter(salt + 1 + (uint32_t)k, is_replicated(dual(c->to)) ? 0 : (uint32_t)me, e);
    dt_tensor *x = dt_require_grad(input_of(ctx, c->dtype, in, h->x[me]));
    size_t full = (size_t)dt_count(c->full) * dt_dtype_size(c->dtype), size = (size_t)n;
    size_t before = dt_comm_bytes(ctx, DT_AXIS_TP);
    dt_tensor *y = dt_redistribute(x, comm, c->from, c->to);
    size_t between = dt_comm_bytes(ctx, DT_AXIS_TP);
    dt_tensor *again = dt_redistribute(x, comm, c->from, c->to);
    if (!y || !again) return;
    CHECK(dt__same_shape(y->shape, out) && y->dtype == c->dtype && y->needs_grad);
    CHECK_MSG(between - before == bytes_moved(r->forward, full, size), "row %d forward sent %zu",
        (int)(r - rows), between - before);
    keep(y, y->data, h->y[me]);
    keep(x, x->data, h->dx[me]); /* x is unchanged */
    CHECK(memcmp(h->dx[me], h->x[me], (size_t)dt_count(in) * sizeof(double)) == 0);
    between = dt_comm_bytes(ctx, DT_AXIS_TP);
    dt_backward(dt_add(dot(y, h->w[0][me]), dot(again, h->w[1][me])));
    CHECK_MSG(dt_comm_bytes(ctx, DT_AXIS_TP) - between == 2 * bytes_moved(r->backward, full, size),
        "row %d: 2 backwards sent %zu", (int)(r - rows), dt_comm_bytes(ctx, DT_AXIS_TP) - between);
    if (n == 1) CHECK(y == x);
    keep(x, x->grad, h->dx[me]);
    dt_barrier(comm);
    if (me == 0) check_move(c, n, h);
    dt_barrier(comm);
    dt_reset(ctx);
}

static int can_shard(dt_shape full, int kind, int dim, int n) {
    if (kind != DT_PLACEMENT_SHARD) return dim == 0;
    return full.d[dim] % n == 0;
}

static dt_status moves_main(dt_ctx *ctx, void *user) {
    static const int shapes[][4] = { { 1, 12 }, { 2, 12, 3 }, { 2, 5, 12 }, { 3, 12, 12, 2 },
        { 3, 12, 1, 24 }, { 3, 3, 12, 4 }, { 4, 2, 3, 4 } };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = dt_comm_size(dt_world(ctx)) });
    int n = dt_comm_size(mesh.tp);
    move_case c = { .number = 0 };
    for (int i = 0; i < ROWS * 2 * (int)(sizeof shapes / sizeof *shapes) && dt_error(ctx) == DT_OK;
         i++) {
        const row *r = &rows[i % ROWS];
        const int *s = shapes[i / ROWS / 2];
        c.dtype = i / ROWS % 2 ? DT_F32 : DT_F64;
        c.full = (dt_shape){ s[0], { s[1], s[2], s[3], 2 } };
        for (int a = 0; a < c.full.nd; a++)
            for (int b = 0; b < c.full.nd; b++) {
                if (!can_shard(c.full, r->from, a, n) || !can_shard(c.full, r->to, b, n)) continue;
                if (r->from == r->to && a == b) continue;
                c.from = (dt_placement){ r->from, a };
                c.to = (dt_placement){ r->to, b };
                c.number++;
                one_move(ctx, mesh.tp, &c, r, (held *)user);
            }
    }
    return dt_error(ctx);
}

/* Identities allocate, record and send nothing, also in a real group of one rank. */
static dt_status free_main(dt_ctx *ctx, void *user) {
    static const dt_placement all[] = { { DT_PLACEMENT_REPLICATE, 0 }, { DT_PLACEMENT_COPY, 0 },
        { DT_PLACEMENT_SHARD, 1 }, { DT_PLACEMENT_PARTIAL, 0 } };
    double values[6] = { 1, 2, 3, 4, 5, 6 };
    int32_t ids[2] = { 10 * dt_ctx_rank(ctx), 10 * dt_ctx_rank(ctx) + 1 }, got[8];
    dt_comm *world = dt_world(ctx), *alone = dt_comm_split(world, dt_ctx_rank(ctx), 0, "alone");
    dt_tensor *x = dt_require_grad(dt_input(ctx, DT_F64, DT_SHAPE(2, 3), values));
    size_t allocations = dt_memory_used(ctx).allocations;
    (void)user;
    for (int i = 0; i < 4; i++) {
        CHECK(dt_redistribute(x, world, all[i], all[i]) == x);
        for (int j = 0; j < 4; j++) {
            CHECK(dt_redistribute(x, NULL, all[i], all[j]) == x);
            CHECK(dt_redistribute(x, alone, all[i], all[j]) == x);
        }
    }
    CHECK(dt_memory_used(ctx).allocations == allocations);
    CHECK(dt_redistribute(NULL, world, DT_REPLICATE, DT_COPY) == NULL && dt_error(ctx) == DT_OK);
    /* REPLICATE -> COPY does not copy in the forward */
    dt_tensor *copy = dt_redistribute(x, world, DT_REPLICATE, DT_COPY);
    CHECK(copy && copy->data == x->data && (copy == x) == (dt_comm_size(world) == 1));
    CHECK(dt_memory_used(ctx).peak[DT_MEM_TEMP] == 0); /* and uses no scratch memory */
    dt_tensor *all_ids =
        dt_redistribute(dt_input(ctx, DT_I32, DT_SHAPE(2), ids), world, DT_SHARD(0), DT_REPLICATE);
    CHECK(all_ids && dt_count(all_ids->shape) == 2 * dt_comm_size(world) && !all_ids->needs_grad);
    if (all_ids && dt_read(all_ids, got) == DT_OK)
        for (int i = 0; i < 2 * dt_comm_size(world); i++) CHECK(got[i] == i / 2 * 10 + i % 2);
    dt_tensor *none =
        dt_redistribute(dt_input(ctx, DT_F32, DT_SHAPE(2, 0), NULL), world, DT_SHARD(0), DT_COPY);
    CHECK(none && none->shape.d[0] == 2 * dt_comm_size(world) && none->shape.d[1] == 0);
    return dt_error(ctx);
}

typedef struct bad_move {
    dt_placement from, to;
    dt_status status;
    const char *words[3];
} bad_move;

static dt_status bad_move_main(dt_ctx *ctx, void *user) {
    const bad_move *b = (const bad_move *)user;
    float values[15] = { 0 };
    dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(5, 3), values);
    CHECK(dt_redistribute(x, dt_world(ctx), b->from, b->to) == NULL);
    CHECK(dt_error(ctx) == b->status || dt_error(ctx) == DT_ERR_PEER);
    CHECK(dt_redistribute(x, dt_world(ctx), DT_REPLICATE, DT_COPY) == NULL); /* sticky */
    return dt_error(ctx);
}

static void test_bad_moves(void) {
    const bad_move list[] = {
        { DT_PARTIAL, DT_COPY, DT_ERR_UNSUPPORTED, { "PARTIAL", "COPY", "REPLICATE" } },
        { DT_COPY, DT_SHARD(0), DT_ERR_UNSUPPORTED, { "COPY", "SHARD", "REPLICATE" } },
        { DT_COPY, DT_PARTIAL, DT_ERR_UNSUPPORTED, { "COPY", "PARTIAL", "REPLICATE" } },
        { DT_SHARD(0), DT_PARTIAL, DT_ERR_UNSUPPORTED, { "SHARD", "PARTIAL", "REPLICATE" } },
        { { 9, 0 }, DT_COPY, DT_ERR_UNSUPPORTED, { "no placement", "COPY", "" } },
        { { -1, 0 }, DT_COPY, DT_ERR_UNSUPPORTED, { "no placement", "COPY", "" } },
        { DT_REPLICATE, DT_SHARD(0), DT_ERR_SHAPE, { "(5,3)", "SHARD(0)", "2 ranks" } },
        { DT_PARTIAL, DT_SHARD(1), DT_ERR_SHAPE, { "(5,3)", "SHARD(1)", "2 ranks" } },
        { DT_SHARD(0), DT_SHARD(1), DT_ERR_SHAPE, { "(5,3)", "SHARD(0)", "SHARD(1)" } },
        { DT_SHARD(2), DT_COPY, DT_ERR_SHAPE, { "(5,3)", "SHARD(2)", "2 ranks" } },
        { DT_SHARD(-1), DT_COPY, DT_ERR_SHAPE, { "(5,3)", "SHARD(-1)", "2 ranks" } },
        { DT_REPLICATE, DT_SHARD(2), DT_ERR_SHAPE, { "(5,3)", "SHARD(2)", "2 ranks" } },
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        dt_report report = run(2, bad_move_main, (void *)(uintptr_t)&list[i]);
        CHECK_MSG(report.status == list[i].status, "bad move %zu: %s", i, report.text);
        CHECK(strstr(report.text, "dt_redistribute") != NULL);
        for (int w = 0; w < 3; w++)
            CHECK_MSG(strstr(report.text, list[i].words[w]), "'%s' is not in '%s'",
                list[i].words[w], report.text);
    }
}

/* ---- all-to-all of rows ---- */

/* Number of rows that rank `from` of n sends to rank `to`; some counts are 0, the last rank
   receives none, and rank 1 sends none. */
static int64_t rows_sent(int from, int to, int n) {
    return from == 1 || (n > 1 && to == n - 1) ? 0 : (from * 3 + to * 5 + from * to) % 4;
}

/* Element e of the i-th row that rank `from` sends to rank `to`. */
static double row_element(uint32_t salt, int from, int to, int64_t i, int64_t e) {
    return quarter(salt + (uint32_t)from * 16 + (uint32_t)to, (uint32_t)i, (uint32_t)e);
}

/* The rows of rank me, as the sender lays them out, or as the receiver does if `received` is 1.
   Returns their number. */
static int64_t rows_layout(uint32_t salt, int me, int n, int64_t width, int received, double *out) {
    int64_t all = 0;
    for (int r = 0; r < n; r++) {
        int from = received ? r : me, to = received ? me : r;
        for (int64_t i = 0; i < rows_sent(from, to, n); i++, all++)
            for (int64_t e = 0; e < width; e++)
                out[all * width + e] = row_element(salt, from, to, i, e);
    }
    return all;
}

static void one_exchange(dt_ctx *ctx, dt_comm *comm, dt_dtype dtype, int flat) {
    int n = dt_comm_size(comm), me = dt_comm_rank(comm);
    int64_t width = flat ? 1 : 6, send[MAX_N], recv[MAX_N], away = 0, back = 0;
    double x[MAX_COUNT] = { 0 }, y[MAX_COUNT] = { 0 }, dy[MAX_COUNT] = { 0 }, dx[MAX_COUNT] = { 0 };
    for (int r = 0; r < n; r++) {
        send[r] = rows_sent(me, r, n);
        recv[r] = rows_sent(r, me, n);
        away += r == me ? 0 : send[r];
        back += r == me ? 0 : recv[r];
    }
    int64_t S = rows_layout(100, me, n, width, 0, x), R = rows_layout(100, me, n, width, 1, y);
    rows_layout(500, me, n, width, 0, dx);
    rows_layout(500, me, n, width, 1, dy);
    dt_shape in = flat ? DT_SHAPE(S) : DT_SHAPE(S, 2, 3),
             out = flat ? DT_SHAPE(R) : DT_SHAPE(R, 2, 3);
    dt_tensor *t = dt_require_grad(input_of(ctx, dtype, in, x));
    size_t row = (size_t)width * dt_dtype_size(dtype), before = dt_comm_bytes(ctx, DT_AXIS_TP);
    dt_tensor *got = dt_all_to_all_rows(t, comm, send, recv);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_TP) - before == (size_t)away * row);
    dt_tensor *again = dt_all_to_all_rows(t, comm, send, NULL); /* the exchange is not counted */
    CHECK(dt_comm_bytes(ctx, DT_AXIS_TP) - before == 2 * (size_t)away * row);
    if (!got || !again) return;
    CHECK(dt__same_shape(got->shape, out) && dt__same_shape(again->shape, out));
    for (int64_t i = 0; i < R * width; i++)
        CHECK(element(got->data, dtype, i) == y[i] && element(again->data, dtype, i) == y[i]);
    for (int r = 0; r < n; r++) send[r] = recv[r] = -1; /* the op has copied the counts */
    before = dt_comm_bytes(ctx, DT_AXIS_TP);
    dt_backward(dt_add(dot(got, dy), dot(again, dy)));
    CHECK(dt_comm_bytes(ctx, DT_AXIS_TP) - before == 2 * (size_t)back * row);
    for (int64_t i = 0; i < S * width; i++)
        CHECK(t->grad && element(t->grad, dtype, i) == 2 * dx[i]);
    dt_reset(ctx);
}

static dt_status exchange_main(dt_ctx *ctx, void *user) {
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = dt_comm_size(dt_world(ctx)) });
    int64_t one[2] = { 1, 0 };
    int32_t id = dt_ctx_rank(ctx);
    (void)user;
    for (int i = 0; i < 4; i++) one_exchange(ctx, mesh.tp, i % 2 ? DT_F32 : DT_F64, i / 2);
    dt_tensor *x = dt_input(ctx, DT_I32, DT_SHAPE(1), &id);
    CHECK(dt_all_to_all_rows(x, NULL, NULL, NULL) == x);
    CHECK(dt_all_to_all_rows(NULL, mesh.tp, one, NULL) == NULL && dt_error(ctx) == DT_OK);
    if (dt_comm_size(mesh.tp) != 2) return dt_error(ctx);
    /* integers: both ranks send their only row to rank 0 */
    dt_tensor *y = dt_all_to_all_rows(x, mesh.tp, one, NULL);
    CHECK(y && !y->needs_grad && y->shape.d[0] == (id ? 0 : 2));
    if (y && id == 0) CHECK(((int32_t *)y->data)[0] == 0 && ((int32_t *)y->data)[1] == 1);
    return dt_error(ctx);
}

static dt_status bad_exchange_main(dt_ctx *ctx, void *user) {
    float values[15] = { 0 };
    int n = *(int *)user;
    int64_t send[2] = { n == 2 ? 6 : 2, n == 2 ? -1 : n == 0 ? 2 : 3 }, recv[2] = { -1, 0 };
    dt_tensor *x = dt_input(ctx, DT_F32, n == 3 ? DT_SCALAR : DT_SHAPE(5, 3), values);
    CHECK(!dt_all_to_all_rows(x, dt_world(ctx), n == 1 ? NULL : send, n == 4 ? recv : NULL));
    return dt_error(ctx);
}

static void test_exchange(void) {
    static const char *const text[] = { "do not sum to x's rows", "are needed", "0 or more",
        "rows, and counts", "0 or more" };
    for (int n = 1; n <= MAX_N; n++) CHECK(run(n, exchange_main, NULL).status == DT_OK);
    for (int i = 0; i < 5; i++) {
        dt_report report = run(2, bad_exchange_main, &i);
        CHECK_MSG(report.status == DT_ERR_SHAPE && strstr(report.text, "dt_all_to_all_rows") &&
                      strstr(report.text, text[i]),
            "exchange %d: %s", i, report.text);
    }
}

static void test_moves(void) {
    held *h = (held *)calloc(1, sizeof *h);
    if (!CHECK(h != NULL)) return;
    for (int n = 1; n <= MAX_N; n++) CHECK(run(n, moves_main, h).status == DT_OK);
    for (int n = 1; n <= MAX_N; n++) CHECK(run(n, free_main, NULL).status == DT_OK);
    test_bad_moves();
    free(h);
}

// ==== Finite differences ========================================================================

enum { FD_PARAMS = 7, FD_COUNT = 32, TOKENS = 6, WIDTH = 3 };

/* A two-layer net over tp, tensor parallel or sequence parallel. Its input is a parameter, too. */
typedef struct net {
    int sequence, hidden; /* sequence 1: tokens are sharded outside the two matrix products */
    double grad[MAX_N][FD_PARAMS][FD_COUNT], slope[FD_PARAMS][FD_COUNT];
} net;

typedef struct net_rank {
    const net *n;
    dt_ctx *ctx;
    dt_mesh mesh;
    dt_tensor *p[FD_PARAMS];
} net_rank;
enum { P_X = 0, P_GAIN, P_BIAS, P_UP, P_UP_BIAS, P_DOWN, P_DOWN_BIAS };

static void net_make(net_rank *r) {
    dt_param_desc whole = { .dtype = DT_F64 }, rows_cut = whole, columns_cut = whole;
    rows_cut.shards[0] = (dt_shard_spec){ r->mesh.tp, 0 };
    columns_cut.shards[0] = (dt_shard_spec){ r->mesh.tp, 1 };
    int F = r->n->hidden;
    r->p[P_X] = dt_param_at(
        r->ctx, "x", DT_SHAPE(TOKENS, WIDTH), DT_NORMAL(1), r->n->sequence ? rows_cut : whole);
    r->p[P_GAIN] = dt_param_at(r->ctx, "gain", DT_SHAPE(WIDTH), DT_UNIFORM(1), whole);
    r->p[P_BIAS] = dt_param_at(r->ctx, "bias", DT_SHAPE(WIDTH), DT_UNIFORM(1), whole);
    r->p[P_UP] = dt_param_at(r->ctx, "up", DT_SHAPE(F, WIDTH), DT_NORMAL(0.7), rows_cut);
    r->p[P_UP_BIAS] = dt_param_at(r->ctx, "up_bias", DT_SHAPE(F), DT_UNIFORM(0.5), rows_cut);
    r->p[P_DOWN] = dt_param_at(r->ctx, "down", DT_SHAPE(WIDTH, F), DT_NORMAL(0.7), columns_cut);
    r->p[P_DOWN_BIAS] = dt_param_at(r->ctx, "down_bias", DT_SHAPE(WIDTH), DT_UNIFORM(0.5), whole);
}

/* Returns the loss of the net over all ranks; *local is this rank's loss tensor. */
static double net_loss(net_rank *r, dt_tensor **local) {
    dt_comm *tp = r->mesh.tp;
    int sp = r->n->sequence, mine = sp ? TOKENS / dt_comm_size(tp) : TOKENS;
    double goal[TOKENS * WIDTH];
    dt_tensor *n = dt_layernorm(r->p[P_X], r->p[P_GAIN], r->p[P_BIAS], 0);
    dt_tensor *h = dt_redistribute(n, tp, sp ? DT_SHARD(0) : DT_REPLICATE, DT_COPY);
    h = dt_gelu(dt_linear(h, r->p[P_UP], r->p[P_UP_BIAS]));
    dt_tensor *y = dt_redistribute(
        dt_linear(h, r->p[P_DOWN], NULL), tp, DT_PARTIAL, sp ? DT_SHARD(0) : DT_REPLICATE);
    y = dt_add(dt_add(y, r->p[P_DOWN_BIAS]), r->p[P_X]);
    int first = (sp ? r->mesh.coord.tp : 0) * mine * WIDTH;
    for (int i = 0; i < mine * WIDTH; i++) goal[i] = quarter(3, 1, (uint32_t)(first + i));
    *local = dt_mse(y, dt_input(r->ctx, DT_F64, DT_SHAPE(mine, WIDTH), goal), TOKENS * WIDTH);
    double loss = dt_item(*local);
    if (sp) dt_sum_doubles(tp, &loss, 1);
    return loss;
}

/* Local index of element e of a full parameter, or -1 if this rank does not hold it. */
static int64_t holds(const dt_tensor *t, int64_t e) {
    dt__slice_walk walk = dt__slice_begin(t->param->full, t->param->slice);
    while (dt__slice_next(&walk))
        if (e >= walk.global && e < walk.global + walk.count) return walk.local + e - walk.global;
    return -1;
}

static dt_status net_main(dt_ctx *ctx, void *user) {
    net *n = (net *)user;
    int me = dt_ctx_rank(ctx);
    net_rank r = { n, ctx, dt_mesh_make(ctx, (dt_mesh_desc){ .tp = dt_comm_size(dt_world(ctx)) }),
        { NULL } };
    dt_tensor *local;
    net_make(&r);
    net_loss(&r, &local);
    dt_backward(local);
    for (int p = 0; p < FD_PARAMS && dt_error(ctx) == DT_OK; p++)
        for (int64_t e = 0; e < dt_count(r.p[p]->param->full); e++) {
            int64_t at = holds(r.p[p], e);
            n->grad[me][p][e] = at >= 0 ? ((double *)r.p[p]->grad)[at] : 0;
        }
    dt_no_grad(ctx, 1);
    for (int p = 0; p < FD_PARAMS && dt_error(ctx) == DT_OK; p++)
        for (int64_t e = 0; e < dt_count(r.p[p]->param->full); e++) {
            int64_t at = holds(r.p[p], e);
            double zero = 0, h = 1e-5, loss[2],
                   *value = at >= 0 ? (double *)r.p[p]->data + at : &zero, old = *value;
            for (int k = 0; k < 2; k++) {
                *value = old + (k ? -h : h);
                loss[k] = net_loss(&r, &local);
                dt_reset(ctx);
            }
            *value = old;
            if (me == 0) n->slope[p][e] = (loss[0] - loss[1]) / (2 * h);
        }
    return dt_error(ctx);
}

/* A sharded parameter has its gradient on the rank that holds the element; a replicated one on
   every rank. With sequence parallelism the gradient of a replicated parameter is partial on each
   rank, and dt_zero.h sums it. */
static void test_net(int ranks, int sequence, int hidden) {
    static const int whole[FD_PARAMS] = { 1, 1, 1, 0, 0, 0, 1 };
    net *n = (net *)calloc(1, sizeof *n);
    if (!CHECK(n != NULL)) return;
    n->sequence = sequence;
    n->hidden = hidden;
    dt_report report = run(ranks, net_main, n);
    CHECK_MSG(report.status == DT_OK, "net: %s", report.text);
    for (int p = 0; p < FD_PARAMS; p++)
        for (int e = 0; e < FD_COUNT; e++) {
            double sum = 0;
            for (int r = 0; r < ranks; r++) sum += n->grad[r][p][e];
            double g = whole[p] && !sequence ? n->grad[0][p][e] : sum;
            CHECK_MSG(fabs(g - n->slope[p][e]) <= 1e-8,
                "%d ranks, %s parallel, hidden %d: d loss/d p%d[%d] %.10g, difference quotient "
                "%.10g",
                ranks, sequence ? "sequence" : "tensor", hidden, p, e, g, n->slope[p][e]);
            for (int r = 1; r < ranks && whole[p] && !sequence; r++)
                CHECK(n->grad[r][p][e] == n->grad[0][p][e]);
        }
    free(n);
}

// ==== 3. Order of data ==========================================================================

static void test_order(void) {
    for (int code = 0; code < 3 * 3 * 3 * 9; code++) {
        int b = 1 + code % 3, a = 1 + code / 3 % 3, R = 1 + code / 9 % 3, right = 1;
        dt_data_order o = { .sequences = 1 + code / 27 * 3,
            .batch = (int64_t)b * a * R,
            .micro_batch = b,
            .replicas = R,
            .consumed = code % 5 * 7 };
        /* in the sequence 0, 1, .. S-1, 0, 1, .. */
        int64_t next = o.consumed % o.sequences, epoch = o.consumed / o.sequences;
        for (int step = 1; step <= 7; step++)
            for (int j = 0; j < a; j++) /* k = (jR + r)b + i, in ascending order */
                for (int r = 0; r < R; r++)
                    for (int i = 0; i < b; i++) {
                        right &= dt_data_order_sequence(o, step, j, r, i) == next;
                        right &= dt_data_order_epoch(o, step, j, r, i) == epoch;
                        next = next + 1 == o.sequences ? 0 : next + 1;
                        epoch += next == 0;
                    }
        CHECK_MSG(right, "order of S %d, B %d, b %d, R %d", (int)o.sequences, (int)o.batch, b, R);
    }
    dt_data_order far = {
        .sequences = 4000000007, .batch = 1000003, .micro_batch = 1, .replicas = 1000003
    };
    CHECK(dt_data_order_sequence(far, (int64_t)1 << 40, 0, 1000002, 0) ==
          (int64_t)((__extension__(unsigned __int128)((((int64_t)1 << 40) - 1)) * 1000003u +
                        1000002u) %
                    4000000007u));
    CHECK(dt_data_order_epoch(far, (int64_t)1 << 40, 0, 1000002, 0) ==
          (int64_t)((__extension__(unsigned __int128)((((int64_t)1 << 40) - 1)) * 1000003u +
                        1000002u) /
                    4000000007u));
    far.sequences = 3; /* step * B overflows 64 bits here, but the epoch fits */
    far.batch = (int64_t)1 << 31;
    CHECK(dt_data_order_epoch(far, ((int64_t)1 << 32) + 1, 0, 0, 0) == 3074457345618258602);
    far.consumed = (int64_t)1 << 62;
    CHECK(dt_data_order_sequence(far, 1, 0, 1, 0) == 2 &&
          dt_data_order_epoch(far, 1, 0, 1, 0) == 1537228672809129301);
}

/* A random number with a uniformly drawn bit length; often the largest. */
static int64_t random_count(uint64_t *state, int bits) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    int shift = 64 - bits + (int)(*state >> 40) % bits;
    return (*state >> 33) % 8 == 0 ? INT64_MAX >> (63 - bits) : (int64_t)(*state >> shift);
}

/* Compares with 128-bit arithmetic: no product may overflow for any arguments. Counts of 0 or below
   are refused. */
static void test_order_overflow(void) {
    uint64_t state = 1;
    int wrong = 0;
    for (int n = 0; n < 100000; n++) {
        dt_data_order o = { 1 + random_count(&state, 62), random_count(&state, 63),
            (int)random_count(&state, 31), (int)random_count(&state, 31),
            random_count(&state, 63) };
        int64_t step = 1 + random_count(&state, 62);
        int j = (int)random_count(&state, 31), r = (int)random_count(&state, 31),
            i = (int)random_count(&state, 31);
        __extension__ unsigned __int128 k =
            (unsigned __int128)(step - 1) * (uint64_t)o.batch + (uint64_t)o.consumed;
        k += ((unsigned __int128)j * (unsigned)o.replicas + (unsigned)r) * (unsigned)o.micro_batch +
             (unsigned)i;
        __extension__ unsigned __int128 epoch = k / (uint64_t)o.sequences;
        if (epoch > INT64_MAX) epoch = INT64_MAX;
        wrong += dt_data_order_sequence(o, step, j, r, i) != (int64_t)(k % (uint64_t)o.sequences);
        wrong += dt_data_order_epoch(o, step, j, r, i) != (int64_t)epoch;
    }
    CHECK_MSG(wrong == 0, "%d of 200000 large positions of a data order are wrong", wrong);
    dt_data_order one = { 1, 1, 1, 1, 0 };
    CHECK(dt_data_order_sequence(one, 0, 0, 0, 0) == -1 &&
          dt_data_order_epoch(one, INT64_MIN, 0, 0, 0) == 0);
    CHECK(dt_data_order_sequence(one, 1, -1, 0, 0) == -1 &&
          dt_data_order_sequence(one, 1, 0, 0, INT32_MIN) == -1);
}

/* Megatron-LM's rule, in floating point as in Megatron-LM. */
static int64_t plain_ramp(dt_batch_ramp r, int64_t consumed) {
    double share = (double)r.samples / ((double)(r.batch - r.start) / (double)r.incr);
    return consumed >= r.samples ? r.batch : r.start + (int64_t)((double)consumed / share) * r.incr;
}

/* BLOOM's ramp: from 192 to 2048 in steps of 16 over 9,765,625 samples, 84,186.42 samples per
   size. */
static void test_ramp_bloom(void) {
    dt_batch_ramp r = { 192, 16, 9765625, 2048 };
    char why[400];
    int64_t consumed = 0, step = 1, wrong = 0;
    CHECK(dt_batch_ramp_check(r, 16, why, sizeof why) == DT_OK &&
          dt_batch_ramp_check(r, 32, why, sizeof why) != DT_OK);
    CHECK(dt_batch_ramp_size(r, 0) == 192 && dt_batch_ramp_size(r, 84186) == 192);
    CHECK(dt_batch_ramp_size(r, 84187) == 208 && dt_batch_ramp_size(r, 168372) == 208);
    CHECK(dt_batch_ramp_size(r, 168373) == 224 && dt_batch_ramp_size(r, 9765624) == 2032);
    CHECK(
        dt_batch_ramp_size(r, 9765625) == 2048 && dt_batch_ramp_size(r, (int64_t)1 << 60) == 2048);
    for (; dt_batch_ramp_size(r, consumed) < 2048; step++) {
        wrong += dt_batch_ramp_size(r, consumed) != plain_ramp(r, consumed);
        if (step % 1000 == 1) wrong += dt_batch_ramp_consumed(r, step) != consumed;
        consumed += dt_batch_ramp_size(r, consumed);
    }
    CHECK_MSG(wrong == 0 && step == 12659 && consumed == 9765808,
        "BLOOM's ramp ends after %lld steps "
        "and %lld samples; %lld sizes are wrong",
        (long long)step - 1, (long long)consumed, (long long)wrong);
    CHECK(dt_batch_ramp_consumed(r, step + 10) == consumed + 10 * 2048);
}

/* All small ramps: a ramp is accepted if every batch size is divisible; otherwise the error must
   propose a ramp that is. */
static void test_ramp_small(void) {
    int accepted = 0, proposed = 0;
    for (int code = 0; code < 8 * 5 * 12 * 4; code++) {
        dt_batch_ramp r = { 1 + code % 8, 1 + code / 8 % 5, 7, 1 + code / 40 % 12 };
        int64_t unit = 1 + code / 480, size = r.start, good = r.batch >= r.start;
        char why[400] = "";
        for (; good && size < r.batch; size += r.incr) good = size % unit == 0;
        good = good && size == r.batch && size % unit == 0;
        CHECK_MSG((dt_batch_ramp_check(r, unit, why, sizeof why) == DT_OK) == good,
            "a ramp %d:%d:7 to %d in units of "
            "%d: %s",
            (int)r.start, (int)r.incr, (int)r.batch, (int)unit, why);
        accepted += (int)good;
        for (int64_t c = 0; good && c < 10; c++) {
            /* increments already made: the largest k with k / times * samples <= c */
            int64_t times = (r.batch - r.start) / r.incr;
            while (times > 0 && times * 7 > c * ((r.batch - r.start) / r.incr)) times--;
            if (c >= 7) times = (r.batch - r.start) / r.incr;
            CHECK(dt_batch_ramp_size(r, c) == r.start + times * r.incr);
        }
        long long start, incr, samples;
        const char *use = strstr(why, "; use ");
        if (good || r.batch % unit != 0 || !CHECK(use != NULL)) continue;
        if (!CHECK(sscanf(use, "; use %lld:%lld:%lld", &start, &incr, &samples) == 3)) continue;
        dt_batch_ramp other = { start, incr, samples, r.batch };
        proposed++;
        CHECK_MSG(samples == 7 && dt_batch_ramp_check(other, unit, why, sizeof why) == DT_OK,
            "proposed: %s", why);
    }
    CHECK_MSG(
        accepted > 100 && proposed > 100, "%d ramps accepted, %d proposed", accepted, proposed);
}

/* Random ramps: an accepted ramp grows from each size to the next; for a refused one the error
   proposes a ramp that is accepted. */
static void test_ramp_random(void) {
    uint64_t state = 7;
    int accepted = 0, wrong = 0;
    char why[400], guard[3] = { 'a', 'b', 'c' };
    for (int n = 0; n < 3000; n++) {
        int64_t unit = 1 + random_count(&state, n % 2 ? 3 : 40),
                units = 1 + random_count(&state, 1 + n % 62);
        dt_batch_ramp r = { random_count(&state, 63), random_count(&state, 63),
            random_count(&state, 63), 0 };
        r.batch = units > INT64_MAX / unit ? unit : unit * units;
        if (n % 5 == 0) r.start = unit, r.incr = unit;
        if (n % 7 == 0) r.samples = -r.samples;
        long long start, incr, samples;
        if (dt_batch_ramp_check(r, unit, why, sizeof why) == DT_OK)
            accepted++;
        else if (sscanf(strstr(why, "; use ") ? strstr(why, "; use ") : "", "; use %lld:%lld:%lld",
                     &start, &incr, &samples) == 3) {
            dt_batch_ramp other = { start, incr, samples, r.batch };
            wrong += dt_batch_ramp_check(other, unit, why, sizeof why) != DT_OK;
            r = other;
        } else
            wrong++;
        int64_t step = 1 + random_count(&state, 62), read = dt_batch_ramp_consumed(r, step);
        int64_t size = dt_batch_ramp_size(r, read), next = dt_batch_ramp_consumed(r, step + 1);
        wrong += size < 1 || size > r.batch || read < 0 ||
                 next != (read > INT64_MAX - size ? INT64_MAX : read + size);
    }
    CHECK_MSG(wrong == 0 && accepted > 300, "%d of 3000 random ramps are wrong, %d are accepted",
        wrong, accepted);
    dt_batch_ramp r = { 4, 1000000000000, 100, 64 };
    CHECK(dt_batch_ramp_check(r, 1, guard + 1, 0) == DT_ERR_ARG && guard[0] == 'a' &&
          guard[1] == 'b');
    CHECK(dt_batch_ramp_check(r, 1, guard + 1, 1) == DT_ERR_ARG && guard[0] == 'a' && !guard[1] &&
          guard[2] == 'c');
    CHECK(dt_batch_ramp_check(r, 1, NULL, 0) == DT_ERR_ARG &&
          dt_batch_ramp_check(r, 1, NULL, 9) == DT_ERR_ARG);
}

static void test_ramp(void) {
    static const struct {
        dt_batch_ramp r;
        const char *text;
    } rows[] = { { { 0, 4, 9, 16 }, "0:4:9 to 16.*use 4:4:9" }, { { 4, 0, 9, 16 }, "4:0:9" },
        { { 4, -4, 9, 16 }, "4:-4:9" }, { { 4, 4, -9, 16 }, "4:4:-9.*use 4:4:16" },
        { { 20, 4, 9, 16 }, "20:4:9" }, { { 4, 4, 9, 18 }, "to 18" },
        { { 4, 8, 9, 16 }, "steps of 8 do not lead from 4 to 16; use 4:4:9" },
        { { 6, 2, 9, 16 }, "a batch of 6 is not a multiple of 4, .*use 8:4:9" },
        { { 4, 6, 9, 16 }, "a batch of 10 is not a multiple of 4, .*use 4:4:9" },
        { { 4, 4, INT64_MAX, 16 }, "use 4:4:2305843009213693951" } };
    char why[400];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *text = rows[i].text, *star = strstr(text, ".*");
        char head[64];
        snprintf(head, sizeof head, "%.*s", star ? (int)(star - text) : 63, text);
        CHECK(dt_batch_ramp_check(rows[i].r, 4, why, sizeof why) == DT_ERR_ARG);
        CHECK_MSG(
            strstr(why, head) && (!star || strstr(why, star + 2)), "ramp %d: %s", (int)i, why);
    }
    dt_batch_ramp none = { 0, 0, 0, 12 };
    CHECK(dt_batch_ramp_check(none, 5, why, sizeof why) == DT_OK);
    CHECK(dt_batch_ramp_size(none, 0) == 12);
    /* two sizes and 7.5e17 steps: must not loop over the steps */
    dt_batch_ramp long_one = { 4, 4, (int64_t)4e18, 8 };
    CHECK(dt_batch_ramp_consumed(long_one, (int64_t)1e12 + 1) == (int64_t)4e12);
    CHECK(dt_batch_ramp_consumed(none, 1) == 0 && dt_batch_ramp_consumed(none, 9) == 96);
    test_ramp_bloom();
    test_ramp_small();
    test_ramp_random();
}

/* Three ranks with a memory limit of 1 MiB each. */
static dt_status limited_main(dt_ctx *ctx, void *user) {
    size_t more = dt_ctx_rank(ctx) == *(int *)user;
    dt_barrier(dt_world(ctx));
    size_t bytes = ((size_t)1 << 20) - dt_memory_used(ctx).live_total;
    void *p = dt_alloc(ctx, DT_MEM_TEMP, bytes + more, "a trial");
    CHECK((p == NULL) == more);
    dt_free(ctx, DT_MEM_TEMP, p, bytes + more);
    dt_barrier(dt_world(ctx));
    return dt_error(ctx);
}

static void test_limit(void) {
    for (int culprit = -1; culprit < 3; culprit++) {
        dt_report report;
        dt_run((dt_run_desc){ .ranks = 3,
                   .timeout_s = 60,
                   .host = &quiet,
                   .report = &report,
                   .mem_limit = 1 << 20 },
            limited_main, &culprit);
        CHECK_MSG(report.status == (culprit < 0 ? DT_OK : DT_ERR_MEM) &&
                      (culprit < 0 || (report.rank == culprit &&
                                          strstr(report.text, "of class temp were refused") &&
                                          strstr(report.text, "of a limit of 1048576"))),
            "a limit that rank %d exceeds: %s", culprit, report.text);
    }
}

static void order_without_sequences(void) { /* dt_data_order of a text that could not be opened */
    volatile int64_t zero = 0;              /* volatile: the compiler must not fold the division */
    dt_data_order none = { .sequences = zero, .batch = 4, .micro_batch = 1, .replicas = 1 };
    zero = dt_data_order_sequence(none, 2, 0, 0, 1) + dt_data_order_epoch(none, 2, 0, 0, 1);
}

static dt_status tokens_main(dt_ctx *ctx, void *user) {
    int32_t labels[5] = { -1, 0, 7, -100, 255 };
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ 0 });
    (void)user;
    size_t n = (size_t)dt_ctx_rank(ctx) + 1; /* ranks count 0, 1 and 2 labels */
    CHECK(dt_count_labels(mesh.dp, labels, n) == 3);
    CHECK(dt_count_labels(NULL, labels, 5) == 3 && dt_count_labels(NULL, labels, 0) == 0 &&
          dt_count_labels(NULL, NULL, 0) == 0);
    CHECK(dt_count_labels(mesh.dp, NULL, 0) == 0);
    CHECK(dt_comm_bytes(ctx, DT_AXIS_DP) == 0); /* scalars do not count as traffic */
    return dt_error(ctx);
}

// ==== 4. Sampler ================================================================================

enum { MOST_READ = 2048 };

/* Stores the samples that rank d.rank reads in an epoch, and returns their number. */
static int read_epoch(dt_ctx *ctx, dt_sampler_desc d, int64_t epoch, int64_t *out) {
    dt_sampler *s = dt_sampler_make(ctx, d);
    int64_t sample;
    int n = 0;
    CHECK(dt_sampler_set_epoch(s, epoch) == DT_OK);
    while (n < MOST_READ && (sample = dt_sampler_next(s)) >= 0) out[n++] = sample;
    CHECK(n == dt_sampler_count(s) && dt_sampler_next(s) == -1);
    dt_sampler_state at = dt_sampler_tell(s);
    /* the call past the end did not move the sampler */
    CHECK(at.epoch == epoch && at.position == n);
    dt_sampler_free(s);
    return n;
}

static void test_sampler_torch(const char *stored) {
    char file[512], name[24];
    int64_t numbers = 0, out[MOST_READ];
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet });
    snprintf(file, sizeof file, "%s/sampler.bin", stored);
    golden *g = golden_open(file);
    const double *c = golden_get(g, "cases", &numbers), *order = golden_get(g, "long", NULL);
    if (!CHECK_MSG(c && order && numbers >= 6 * 20, "%s cannot be used", file)) return;
    for (int i = 0; i < numbers / 6; i++, c += 6) {
        snprintf(name, sizeof name, "case.%d", i);
        const golden_array *want = golden_find(g, name);
        if (!CHECK(want && want->nd == 2 && want->shape[0] == c[1])) continue;
        for (int r = 0; r < (int)c[1]; r++) {
            dt_sampler_desc d = { (int64_t)c[0], (int)c[1], r, (uint64_t)c[2], (int)c[4],
                (int)c[5] };
            int n = read_epoch(ctx, d, (int64_t)c[3], out), right = n == want->shape[1];
            for (int k = 0; k < n && right; k++) right = out[k] == want->data[r * n + k];
            CHECK_MSG(right,
                "%g samples, rank %d of %g, seed %.0f, epoch %g, shuffle %g, drop_last %g: not "
                "torch's",
                c[0], r, c[1], c[2], c[3], c[4], c[5]);
        }
    }
    dt_sampler *s = dt_sampler_make(ctx, (dt_sampler_desc){ .samples = (int64_t)order[0],
                                             .replicas = 1,
                                             .seed = (uint64_t)order[1],
                                             .shuffle = 1 });
    double sum = 0, last = -1; /* below 2^53, so exact */
    for (int64_t k = 0, sample; (sample = dt_sampler_next(s)) >= 0; k++)
        sum += (double)k * (last = (double)sample);
    CHECK(sum == order[2] && last == order[3]);
    golden_free(g);
    dt_ctx_free(ctx); /* frees the last sampler, too */
}

/* Interleaving the ranks' samples must give a list of all samples, each once, followed by samples
   from its beginning until the length is a multiple of the number of ranks. With drop_last the list
   holds different samples only, as many as the largest multiple of the ranks. */
static void check_dealt(dt_ctx *ctx, dt_sampler_desc d) {
    int64_t list[MOST_READ], mine[MOST_READ];
    int n = (int)d.samples, R = d.replicas, count = d.drop_last ? n / R : (n + R - 1) / R,
        seen[64] = { 0 };
    int right = 1;
    for (d.rank = 0; d.rank < R; d.rank++) {
        right &= read_epoch(ctx, d, 3, mine) == count;
        for (int k = 0; k < count; k++) list[k * R + d.rank] = mine[k];
    }
    for (int k = 0; k < count * R; k++) {
        right &= list[k] >= 0 && list[k] < n && (d.shuffle || list[k] == k % n);
        right &= k < n ? right && seen[list[k]]++ == 0 : list[k] == list[k - n];
    }
    CHECK_MSG(
        right, "%d samples over %d ranks, shuffle %d, drop_last %d", n, R, d.shuffle, d.drop_last);
}

/* A sampler that seeks to any position reads the same samples as an uninterrupted one, into the
   next epoch, too. */
static void test_sampler_resume(dt_ctx *ctx) {
    dt_sampler_desc d = { .samples = 17, .replicas = 3, .rank = 1, .seed = 4, .shuffle = 1 };
    int64_t whole[2][MOST_READ], first[MOST_READ];
    int n = read_epoch(ctx, d, 6, whole[0]), same = 0;
    CHECK(n == 6 && read_epoch(ctx, d, 7, whole[1]) == n && read_epoch(ctx, d, 0, first) == n);
    for (int k = 0; k < n; k++) same += whole[0][k] == whole[1][k];
    CHECK(same < n);
    for (int stop = 0; stop <= n; stop++) {
        dt_sampler *a = dt_sampler_make(ctx, d), *b = dt_sampler_make(ctx, d);
        /* b has computed an order already, and is at another position */
        CHECK(dt_sampler_next(b) == first[0]);
        dt_sampler_set_epoch(a, 6);
        for (int k = 0; k < stop; k++) dt_sampler_next(a);
        dt_sampler_state at = dt_sampler_tell(a);
        CHECK(at.epoch == 6 && at.position == stop && dt_sampler_seek(b, at) == DT_OK);
        int right = 1;
        for (int k = stop; k < n; k++) right &= dt_sampler_next(b) == whole[0][k];
        right &= dt_sampler_next(b) == -1;
        dt_sampler_set_epoch(b, 7);
        for (int k = 0; k < n; k++) right &= dt_sampler_next(b) == whole[1][k];
        dt_sampler_set_epoch(b, 6); /* back from a later epoch */
        for (int k = 0; k < n; k++) right &= dt_sampler_next(b) == whole[0][k];
        CHECK_MSG(right, "stopped after %d of %d samples", stop, n);
        dt_sampler_free(a);
        dt_sampler_free(b);
    }
}

static void check_sampler_refused(dt_sampler_desc d, const char *word) {
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet });
    CHECK(dt_sampler_make(ctx, d) == NULL && dt_error(ctx) == DT_ERR_ARG);
    CHECK_MSG(strstr(dt_error_text(ctx), word), "'%s' is not in '%s'", word, dt_error_text(ctx));
    d = (dt_sampler_desc){ .samples = 4, .replicas = 1 };
    CHECK(dt_sampler_make(ctx, d) == NULL); /* sticky */
    dt_ctx_free(ctx);
}

static void check_seek_refused(dt_sampler_state to, const char *word) {
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet });
    dt_sampler *s = dt_sampler_make(ctx, (dt_sampler_desc){ .samples = 7, .replicas = 2 });
    CHECK(dt_sampler_next(s) == 0 && dt_sampler_seek(s, to) == DT_ERR_ARG &&
          dt_error(ctx) == DT_ERR_ARG);
    CHECK_MSG(strstr(dt_error_text(ctx), word), "'%s' is not in '%s'", word, dt_error_text(ctx));
    CHECK(dt_sampler_tell(s).epoch == 0 && dt_sampler_tell(s).position == 1);
    CHECK(dt_sampler_next(s) == -1 && dt_sampler_set_epoch(s, 1) == DT_ERR_ARG);
    dt_ctx_free(ctx);
}

static void test_sampler_refused(void) {
    check_sampler_refused(
        (dt_sampler_desc){ .samples = 0, .replicas = 1 }, "0 samples for rank 0 of 1");
    check_sampler_refused((dt_sampler_desc){ .samples = -5, .replicas = 1 }, "-5 samples");
    check_sampler_refused((dt_sampler_desc){ .samples = 5 }, "rank 0 of 0");
    check_sampler_refused(
        (dt_sampler_desc){ .samples = 5, .replicas = -2, .rank = -3 }, "rank -3 of -2");
    check_sampler_refused(
        (dt_sampler_desc){ .samples = 5, .replicas = 2, .rank = 2 }, "rank 2 of 2");
    check_sampler_refused(
        (dt_sampler_desc){ .samples = 5, .replicas = 2, .rank = -1 }, "rank -1 of 2");
    check_sampler_refused(
        (dt_sampler_desc){ .samples = DT_SAMPLER_MAX_SHUFFLED + 1, .replicas = 1, .shuffle = 1 },
        "214748364 samples; at most 214748363");
    check_seek_refused((dt_sampler_state){ 0, 5 }, "position 5 of 4 in epoch 0");
    check_seek_refused((dt_sampler_state){ 2, -1 }, "position -1 of 4 in epoch 2");
    check_seek_refused((dt_sampler_state){ -1, 0 }, "epoch -1");
}

/* INT64_MAX samples in order: needs no memory, and nothing overflows. */
static void test_sampler_int64_max(dt_ctx *ctx) {
    for (int r = 0; r < 10; r++) {
        size_t before = dt_memory_used(ctx).live[DT_MEM_HOST];
        dt_sampler *s = dt_sampler_make(
            ctx, (dt_sampler_desc){ .samples = INT64_MAX, .replicas = 10, .rank = r });
        int64_t count = dt_sampler_count(s), tens = INT64_MAX - 7; /* INT64_MAX ends in 7 */
        CHECK(count == INT64_MAX / 10 + 1 && dt_memory_used(ctx).live[DT_MEM_HOST] < before + 1000);
        CHECK(dt_sampler_seek(s, (dt_sampler_state){ 1, count - 1 }) == DT_OK);
        CHECK(dt_sampler_next(s) == (r < 7 ? tens + r : r - 7) && dt_sampler_next(s) == -1);
        dt_sampler_free(s);
        CHECK(dt_memory_used(ctx).live[DT_MEM_HOST] == before);
    }
}

static void null_sampler(void) {
    dt_sampler_state start = { 0, 0 };
    dt_sampler_free(NULL);
    if (dt_sampler_count(NULL) != 0 || dt_sampler_next(NULL) != -1 ||
        dt_sampler_tell(NULL).position != 0)
        _exit(1);
    if (dt_sampler_seek(NULL, start) == DT_OK || dt_sampler_set_epoch(NULL, 0) == DT_OK) _exit(1);
}

static void test_sampler(const char *stored) {
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &quiet });
    test_sampler_torch(stored);
    for (int code = 0; code < 14 * 9 * 4; code++)
        check_dealt(ctx, (dt_sampler_desc){ .samples = 1 + code % 14,
                             .replicas = 1 + code / 14 % 9,
                             .seed = 2,
                             .shuffle = code / 126 % 2,
                             .drop_last = code / 252 });
    check_dealt(ctx, (dt_sampler_desc){ .samples = 3, .replicas = 50, .shuffle = 1 });
    test_sampler_resume(ctx);
    test_sampler_int64_max(ctx);
    CHECK(dt_error(ctx) == DT_OK);
    dt_ctx_free(ctx);
    test_sampler_refused();
}

// ==== 5. Text ===================================================================================

static char folder[] = "/tmp/dt_test_parallel_XXXXXX";

/* An I/O table over the default one that counts open files, shortens reads, interrupts them and
   makes them fail. */
typedef struct faulty_io {
    dt_io io;
    int open, opened, most, interrupt, reads, fail;
    int64_t more;
} faulty_io;

static int faulty_open(void *user, const char *path, int mode) {
    faulty_io *l = (faulty_io *)user;
    int fd = dt_io_default()->open(NULL, path, mode);
    l->open += fd >= 0;
    l->opened += fd >= 0;
    return fd;
}

static int faulty_close(void *user, int fd) {
    ((faulty_io *)user)->open--;
    return dt_io_default()->close(NULL, fd);
}

static int64_t faulty_size(void *user, int fd) {
    int64_t size = dt_io_default()->size(NULL, fd);
    return size < 0 ? size : size + ((faulty_io *)user)->more;
}

static int64_t faulty_pread(void *user, int fd, void *buf, size_t bytes, int64_t offset) {
    faulty_io *l = (faulty_io *)user;
    l->reads++;
    if (l->fail) {
        errno = EIO;
        return -1;
    }
    if (l->interrupt && l->reads % l->interrupt == 0) {
        errno = EINTR;
        return -1;
    }
    if (l->most && bytes > (size_t)l->most) bytes = (size_t)l->most;
    return dt_io_default()->pread(NULL, fd, buf, bytes, offset);
}

static dt_ctx *faulty_ctx(faulty_io *l, const dt_host *host) {
    memset(l, 0, sizeof *l);
    l->io = *dt_io_default();
    l->io.user = l;
    l->io.open = faulty_open;
    l->io.close = faulty_close;
    l->io.size = faulty_size;
    l->io.pread = faulty_pread;
    return dt_ctx_make((dt_ctx_desc){ .host = host, .io = &l->io });
}

typedef struct path {
    char s[96];
} path;

static path path_in_folder(const char *name) {
    path p;
    snprintf(p.s, sizeof p.s, "%s/%s", folder, name);
    return p;
}

static path put(const char *name, const unsigned char *bytes, size_t count) {
    path p = path_in_folder(name);
    FILE *f = fopen(p.s, "wb");
    CHECK(f && fwrite(bytes, 1, count, f) == count);
    if (f) fclose(f);
    return p;
}

enum { TEXT_BYTES = 61 };

static void check_sequences(dt_text *t, const unsigned char *whole, int seq) {
    int32_t ids[TEXT_BYTES], labels[TEXT_BYTES];
    int right = 1;
    CHECK(dt_text_tokens(t) == TEXT_BYTES && dt_text_sequences(t) == (TEXT_BYTES - 1) / seq);
    for (int64_t i = dt_text_sequences(t) - 1; i >= 0; i--) {
        memset(labels, 0x55, sizeof labels);
        CHECK(dt_text_read(t, i, ids, labels) == DT_OK);
        for (int k = 0; k < seq; k++)
            right &= ids[k] == whole[i * seq + k] && labels[k] == whole[i * seq + k + 1];
        if (seq < TEXT_BYTES) right &= labels[seq] == 0x55555555; /* no write past the end */
    }
    CHECK_MSG(right, "sequences of %d tokens", seq);
}

/* 61 bytes in six files, one of them empty and one with a single byte, so that sequences cross file
   boundaries. */
static void test_text_files(void) {
    static const int sizes[6] = { 20, 0, 1, 7, 0, 33 };
    unsigned char whole[TEXT_BYTES];
    path paths[6];
    const char *names[6];
    int at = 0;
    for (int i = 0; i < TEXT_BYTES; i++) whole[i] = (unsigned char)mix(5, 5, (uint32_t)i);
    whole[3] = 255;
    for (int i = 0; i < 6; i++) {
        char name[8] = { 'p', (char)('0' + i), 0 };
        paths[i] = put(name, whole + at, (size_t)sizes[i]);
        names[i] = paths[i].s;
        at += sizes[i];
    }
    for (int seq = 1; seq < TEXT_BYTES; seq++)
        /* full reads; short reads; short and interrupted reads */
        for (int way = 0; way < 3; way++) {
            faulty_io l;
            dt_ctx *ctx = faulty_ctx(&l, &quiet);
            l.most = way ? 1 + seq % 3 : 0;
            l.interrupt = way == 2 ? 2 : 0;
            dt_text *t = dt_text_open(ctx, names, 6, seq);
            if (CHECK(t != NULL)) check_sequences(t, whole, seq);
            CHECK(l.open <= 6 && l.opened >= 4); /* an empty file need not be kept */
            if (way == 1) dt_text_close(t);      /* otherwise the context closes it */
            CHECK(way != 1 || l.open == 0);
            dt_ctx_free(ctx);
            CHECK(l.open == 0);
        }
}

/* Opens, expects a failure whose text holds `word`. */
static void check_refused(
    const char *const *names, int files, int seq, dt_status status, const char *word) {
    faulty_io l;
    dt_ctx *ctx = faulty_ctx(&l, &quiet);
    CHECK(dt_text_open(ctx, names, files, seq) == NULL);
    CHECK_MSG(dt_error(ctx) == status && strstr(dt_error_text(ctx), word), "'%s' is not in '%s'",
        word, dt_error_text(ctx));
    CHECK(l.open == 0);
    CHECK(dt_text_open(ctx, names, files, seq) == NULL); /* sticky */
    dt_ctx_free(ctx);
    CHECK(l.open == 0);
}

static void test_text_refused(void) {
    path good = put("good", (const unsigned char *)"0123456789", 10);
    path empty = put("empty", (const unsigned char *)"", 0);
    path one = put("one", (const unsigned char *)"x", 1), missing = path_in_folder("missing"),
         where = path_in_folder("");
    const char *a[] = { good.s, missing.s }, *b[] = { empty.s }, *c[] = { good.s },
               *d[] = { good.s, where.s };
    const char *e[] = { one.s, empty.s };
    check_refused(a, 2, 4, DT_ERR_IO, missing.s);
    check_refused(a, 2, 4, DT_ERR_IO, "No such file");
    check_refused(b, 1, 4, DT_ERR_IO, "0 bytes");
    check_refused(c, 1, 10, DT_ERR_IO, "10 bytes");
    check_refused(c, 1, 10, DT_ERR_IO, good.s);
    check_refused(d, 2, 4, DT_ERR_IO, "directory");
    check_refused(e, 2, 1, DT_ERR_IO, "1 bytes");
    check_refused(c, 0, 4, DT_ERR_ARG, "0 files");
    check_refused(c, 1, 0, DT_ERR_ARG, "0 tokens");
    faulty_io l;
    dt_ctx *ctx = faulty_ctx(&l, &quiet);
    /* ten bytes hold one sequence of nine tokens and its last label */
    dt_text *t = dt_text_open(ctx, c, 1, 9);
    CHECK(t && dt_text_sequences(t) == 1);
    dt_text_close(t);
    dt_text_close(NULL);
    CHECK(dt_text_read(NULL, 0, NULL, NULL) != DT_OK);
    dt_ctx_free(ctx);
}

/* kind 0: the reported size is wrong; 1: the file is truncated; 2: reads fail; 3, 4: no such
   sequence */
static void check_read_fails(int kind, dt_status status, const char *word) {
    path p = put("shrinks", (const unsigned char *)"0123456789abcd", 14);
    const char *names[] = { p.s };
    faulty_io l;
    dt_ctx *ctx = faulty_ctx(&l, &quiet);
    int32_t ids[4], labels[4];
    l.more = kind == 0 ? 5 : 0;
    dt_text *t = dt_text_open(ctx, names, 1, 4);
    if (CHECK(t != NULL)) {
        CHECK(dt_text_read(t, 0, ids, labels) == DT_OK && ids[0] == '0' && labels[3] == '4');
        if (kind == 1) CHECK(truncate(p.s, 6) == 0);
        l.fail = kind == 2;
        int64_t which = kind == 3 ? -1 : kind == 0 || kind == 4 ? 3 : 1;
        CHECK(dt_text_read(t, which, ids, labels) == status);
        CHECK_MSG(
            strstr(dt_error_text(ctx), word), "'%s' is not in '%s'", word, dt_error_text(ctx));
        CHECK(dt_text_read(t, 0, ids, labels) == status); /* sticky */
    }
    dt_ctx_free(ctx);
    CHECK(l.open == 0);
}

/* A host table that refuses the k-th allocation and counts blocks that are not freed. */
typedef struct refusing_host {
    dt_host host;
    int left, live;
} refusing_host;

static void *refusing_alloc(void *user, size_t bytes, dt_mem mem) {
    refusing_host *m = (refusing_host *)user;
    if (m->left-- == 0) return NULL;
    m->live++;
    return dt_host_default()->alloc(NULL, bytes, mem);
}

static void refusing_free(void *user, void *p, size_t bytes, dt_mem mem) {
    ((refusing_host *)user)->live--;
    dt_host_default()->free(NULL, p, bytes, mem);
}

static void test_text_memory(void) {
    path p = put("memory", (const unsigned char *)"0123456789", 10);
    const char *names[] = { p.s, p.s };
    int refused = 0;
    for (int k = 1, done = 0; !done && k < 50; k++) {
        refusing_host m = { quiet, k, 0 };
        faulty_io l;
        m.host.user = &m;
        m.host.alloc = refusing_alloc;
        m.host.free = refusing_free;
        dt_ctx *ctx = faulty_ctx(&l, &m.host);
        dt_text *t = dt_text_open(ctx, names, 2, 3);
        done = t != NULL;
        refused += !done;
        CHECK(done || dt_error(ctx) == DT_ERR_MEM);
        CHECK(done || l.open == 0);
        dt_ctx_free(ctx);
        CHECK(l.open == 0 && m.live == 0);
    }
    CHECK(refused >= 3); /* the text, its files, its read window */
}

/* Whichever allocation is refused, no block remains after the context is freed. */
static void test_sampler_memory(void) {
    int refused = 0;
    for (int k = 1, done = 0; !done && k < 50; k++) {
        refusing_host m = { quiet, k, 0 };
        m.host.user = &m;
        m.host.alloc = refusing_alloc;
        m.host.free = refusing_free;
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &m.host });
        dt_sampler *s =
            dt_sampler_make(ctx, (dt_sampler_desc){ .samples = 1000, .replicas = 2, .shuffle = 1 });
        size_t bytes = dt_memory_used(ctx).live[DT_MEM_HOST];
        done = s != NULL;
        refused += !done;
        CHECK(done ? bytes > 4000 : dt_error(ctx) == DT_ERR_MEM && dt_sampler_next(s) == -1);
        dt_ctx_free(ctx);
        CHECK(m.live == 0);
    }
    CHECK(refused == 4); /* the sampler and its order, each in a chunk with a header */
}

static void null_text(void) { /* queries a text that could not be opened */
    if (dt_text_tokens(NULL) != 0 || dt_text_sequences(NULL) != 0) _exit(1);
}

static void test_text(void) {
    if (!CHECK(mkdtemp(folder) != NULL)) return;
    test_text_files();
    test_text_refused();
    check_read_fails(0, DT_ERR_IO, "shorter");
    check_read_fails(1, DT_ERR_IO, "shorter");
    check_read_fails(2, DT_ERR_IO, "Input/output error");
    check_read_fails(3, DT_ERR_ARG, "-1 of 3");
    check_read_fails(4, DT_ERR_ARG, "3 of 3");
    test_text_memory();
    static const char *const names[] = { "p0", "p1", "p2", "p3", "p4", "p5", "good", "empty", "one",
        "shrinks", "memory" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        CHECK(unlink(path_in_folder(names[i]).s) == 0);
    CHECK(rmdir(folder) == 0);
}

int main(int argc, char **argv) {
    quiet = *dt_host_default();
    quiet.log = silent;
    CHECK_MSG(survives(null_text), "dt_text_tokens or dt_text_sequences crashes on NULL");
    CHECK_MSG(
        survives(order_without_sequences), "dt_data_order_sequence crashes without sequences");
    test_mesh();
    test_mesh_sizes();
    test_moves();
    test_exchange();
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int sequence = 0; sequence < 2; sequence++) /* 5 does not divide */
            for (int hidden = 5; hidden <= 6; hidden++) test_net(ranks, sequence, hidden);
    test_order();
    test_order_overflow();
    test_ramp();
    test_limit();
    CHECK(run(3, tokens_main, NULL).status == DT_OK);
    CHECK_MSG(survives(null_sampler), "a call crashes on a sampler that could not be made");
    test_sampler(argc > 1 ? argv[1] : "tests/golden");
    test_sampler_memory();
    test_text();
    return check_done("test_parallel");
}
