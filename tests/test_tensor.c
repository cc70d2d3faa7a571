/* test_tensor.c - dt_tensor.h on one rank: every op, the tape, units, boxes, memory, errors
   Public domain or MIT, at your choice; see LICENSE.

   Run:  test_tensor [folder of the golden files, default tests/golden]

   HOW NUMBERS ARE COMPARED. |a - b| <= tolerance * max(|b|, s), element by element, where s is the root mean square of
   all numbers that the case compares as one (all gradients of a case; an output alone), so that a true zero does not
   divide by nothing. For the GPT, as for every layout, the rule is on tensors: the norm of a - b against the norm of b
   or, where larger, this tensor's share sqrt(n/N) of the whole gradient's norm.

   HOW MEMORY IS WATCHED. Every context here allocates through a meter: a host table that fills new and freed memory
   with NaN bits, checks the size and class of every free, counts by class, and can refuse. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "../dt_tensor.h"
#include "check.h"
#include "golden/golden.h"
#include "serial_gpt.h"
#include "../examples/gpt.h"
#include <sys/wait.h>

static const char *golden_folder = "tests/golden";

// ==== 1. The meter, numbers =========================================================================================

typedef struct meter {
    size_t live[DT_MEM_CLASSES], peak[DT_MEM_CLASSES], live_total, peak_total, calls;
    long   refuse_in;       /* allocations before the first refusal; below 0: never */
    int    sticky;          /* 1: those after it are refused too */
    int    refused, wrong_frees;
    int    errors;          /* log lines of level error */
    char   text[700];       /* the last of them */
} meter;
#define METER ((meter){ .refuse_in = -1 })

/* In front of every block, 64 bytes so that what follows keeps its alignment. */
typedef struct tag { size_t bytes; int mem, magic; } tag;
enum { TAG_ROOM = 64, MAGIC = 0x64746d65 };

static void *meter_alloc(void *user, size_t bytes, dt_mem mem) {
    meter *m = (meter *)user;
    void  *p = NULL;
    m->calls++;
    if (m->refuse_in == 0) {
        m->refused++;
        if (!m->sticky) m->refuse_in = -1;
        return NULL;
    }
    if (m->refuse_in > 0) m->refuse_in--;
    if (bytes > (size_t)1 << 40 || posix_memalign(&p, 64, bytes + TAG_ROOM) != 0) return NULL;
    tag t = { bytes, (int)mem, MAGIC };
    memcpy(p, &t, sizeof t);
    memset((char *)p + TAG_ROOM, 0xff, bytes);
    m->live[mem] += bytes;
    m->live_total += bytes;
    if (m->live[mem] > m->peak[mem]) m->peak[mem] = m->live[mem];
    if (m->live_total > m->peak_total) m->peak_total = m->live_total;
    return (char *)p + TAG_ROOM;
}

static void meter_free(void *user, void *p, size_t bytes, dt_mem mem) {
    meter *m = (meter *)user;
    tag    t;
    memcpy(&t, (char *)p - TAG_ROOM, sizeof t);
    if (t.magic != MAGIC || t.bytes != bytes || t.mem != (int)mem) m->wrong_frees++;
    m->live[mem] -= bytes;
    m->live_total -= bytes;
    memset(p, 0xff, t.bytes);
    free((char *)p - TAG_ROOM);
}

static void meter_log(void *user, int level, int rank, const char *text) {
    meter *m = (meter *)user;
    (void)rank;
    if (level != DT_LOG_ERROR) return;
    m->errors++;
    snprintf(m->text, sizeof m->text, "%s", text);
}

static dt_ctx *open_with(meter *m, const dt_kernels *kernels, uint64_t seed) {
    dt_host host = *dt_host_default();
    host.user = m;
    host.alloc = meter_alloc;
    host.free = meter_free;
    host.log = meter_log;
    return dt_ctx_make((dt_ctx_desc){ .seed = seed, .rank = 3, .kernels = kernels, .host = &host });
}

static dt_ctx *open_ctx(meter *m) { return open_with(m, NULL, 7); }

/* Frees the context; nothing may be left, and nothing may have been freed as what it was not. */
static void close_ctx(dt_ctx *ctx, const meter *m, const char *what) {
    dt_ctx_free(ctx);
    CHECK_MSG(m->live_total == 0, "%s: %zu bytes are left", what, m->live_total);
    CHECK_MSG(m->wrong_frees == 0, "%s: %d frees with the wrong size or class", what, m->wrong_frees);
}

/* The same, of a context that must not have failed. */
static void close_good(dt_ctx *ctx, const meter *m, const char *what) {
    CHECK_MSG(dt_error(ctx) == DT_OK, "%s: %s", what, dt_error_text(ctx));
    CHECK_MSG(m->errors == 0, "%s: logged %s", what, m->text);
    close_ctx(ctx, m, what);
}

/* A number in [-1, 1) from a place in a sequence. */
static double noise(uint64_t seed, uint64_t index) {
    uint64_t z = seed * 0xD1342543DE82EF95u + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) / 4503599627370496.0 - 1.0;
}

static int below(uint64_t seed, uint64_t index, int n) { return (int)((noise(seed, index) + 1) / 2 * n); }

static double get(const void *array, dt_dtype dtype, int64_t i) {
    return dtype == DT_F64   ? ((const double *)array)[i]
           : dtype == DT_F32 ? (double)((const float *)array)[i]
                             : (double)((const int32_t *)array)[i];
}

static void put(void *array, dt_dtype dtype, int64_t i, double value) {
    if (dtype == DT_F64) ((double *)array)[i] = value;
    else if (dtype == DT_F32) ((float *)array)[i] = (float)value;
    else ((int32_t *)array)[i] = (int32_t)value;
}

/* malloc for tests: they may end when there is none. */
static void *room(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) {
        puts("FAIL no memory for the test itself");
        exit(1);
    }
    return p;
}

static dt_tensor *noise_input(dt_ctx *ctx, dt_dtype dtype, dt_shape shape, uint64_t seed, double scale) {
    int64_t n = dt_count(shape);
    void   *x = room((size_t)n * dt_dtype_size(dtype));
    for (int64_t i = 0; i < n; i++) put(x, dtype, i, scale * noise(seed, (uint64_t)i));
    dt_tensor *t = dt_input(ctx, dtype, shape, x);
    free(x);
    return t;
}

/* Runs fn in a child, so that a crash there is a failed check and not the end of the tests. */
static int survives(int (*fn)(void)) {
    int status = -1;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) _exit(fn() ? 0 : 1);
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return 0;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// ==== 2. Own ops ====================================================================================================

/* sum of x[i] * c[i] as an f64 scalar: what turns a tensor into a loss here, and an op as a user writes one. */
typedef struct weigh_saved { const double *c; } weigh_saved;

static double weigh_factor(const double *c, int64_t i) { return c ? c[i] : noise(99, (uint64_t)i); }

static dt_status weigh_back(dt_node *n) {
    const double *c = ((const weigh_saved *)n->saved)->c;
    dt_tensor    *x = n->in[0];
    double        up = *(const double *)n->out->grad;
    if (!dt_wants(n, 0)) return DT_OK;
    void *dx = dt_grad(n, 0);
    if (!dx) return dt_error(x->ctx);
    for (int64_t i = 0; i < dt_count(x->shape); i++)
        put(dx, x->dtype, i, get(dx, x->dtype, i) + up * weigh_factor(c, i));
    return DT_OK;
}

/* c must live until dt_reset; NULL: noise */
static dt_tensor *weigh(dt_tensor *x, const double *c) {
    dt_tensor *out = x ? dt_new(x->ctx, DT_F64, DT_SCALAR) : NULL;
    if (!out) return NULL;
    double sum = 0;
    for (int64_t i = 0; i < dt_count(x->shape); i++) sum += get(x->data, x->dtype, i) * weigh_factor(c, i);
    *(double *)out->data = sum;
    weigh_saved *saved = (weigh_saved *)dt_record_saved(out, (dt_record_desc){ .name = "weigh", .in = { x },
        .backward = weigh_back, .saved_bytes = sizeof *saved });
    if (saved) saved->c = c;
    return dt_error(x->ctx) == DT_OK ? out : NULL;
}

/* a * b, element by element, f64, without saved memory. */
static dt_status times_back(dt_node *n) {
    const double *dy = (const double *)n->out->grad;
    for (int side = 0; side < 2; side++) {
        if (!dt_wants(n, side)) continue;
        double *d = (double *)dt_grad(n, side), *other = (double *)n->in[1 - side]->data;
        if (!d) return dt_error(n->out->ctx);
        for (int64_t i = 0; i < dt_count(n->out->shape); i++) d[i] += dy[i] * other[i];
    }
    return DT_OK;
}

static dt_tensor *times(dt_tensor *a, dt_tensor *b) {
    dt_tensor *out = a && b ? dt_new(a->ctx, DT_F64, a->shape) : NULL;
    if (!out) return NULL;
    for (int64_t i = 0; i < dt_count(a->shape); i++)
        ((double *)out->data)[i] = ((double *)a->data)[i] * ((double *)b->data)[i];
    return dt_record(out, (dt_record_desc){ .name = "times", .in = { a, b }, .backward = times_back });
}

// ==== 3. Finite differences =========================================================================================

/* A scalar function of up to four tensors. build may set side: then the function is build's value + weight * side. */
enum { FD_INPUTS = 4, FD_SAMPLES = 6 };
typedef struct fd_case {
    const char    *name;
    dt_tensor   *(*build)(dt_tensor **in, struct fd_case *c);
    int            n;
    dt_shape       shape[FD_INPUTS];
    int            full;            /* attention */
    const int32_t *ids;             /* embedding: ids; cross entropy: labels */
    dt_shape       ids_shape;
    double         weight;
    dt_tensor     *side;
} fd_case;

static double fd_value(dt_ctx *ctx, fd_case *c, double **x) {
    dt_tensor *in[FD_INPUTS] = { NULL };
    for (int i = 0; i < c->n; i++) in[i] = dt_input(ctx, DT_F64, c->shape[i], x[i]);
    c->side = NULL;
    dt_tensor *loss = c->build(in, c);
    double     value = dt_item(loss) + (c->side ? c->weight * dt_item(c->side) : 0);
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

/* The tape's gradients into g: of inputs, of parameters, of parameters by the two halves, and of inputs to which
   something else has given a gradient already: side losses, whose slopes are noise(99, element). */
enum { AS_INPUTS, AS_PARAMS, AS_HALVES, AS_SHARED, AS_WAYS };
static void fd_gradient(fd_case *c, double **x, double **g, int way) {
    meter      m = METER;
    dt_ctx    *ctx = open_ctx(&m);
    dt_tensor *in[FD_INPUTS] = { NULL };
    for (int i = 0; i < c->n; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        if (way == AS_INPUTS || way == AS_SHARED) in[i] = dt_require_grad(dt_input(ctx, DT_F64, c->shape[i], x[i]));
        else in[i] = dt_param_at(ctx, name, c->shape[i], DT_ZEROS, (dt_param_desc){ .dtype = DT_F64 });
    }
    for (int i = 0; i < c->n; i++) dt_write(in[i], x[i]);
    dt_tensor *loss = c->build(in, c);
    if (way == AS_SHARED) for (int i = 0; i < c->n; i++) loss = dt_loss(loss, weigh(in[i], NULL), 1);
    if (way != AS_HALVES) dt_backward(loss);
    else dt_backward_input(loss), dt_backward_weight(loss);
    CHECK_MSG(dt_error(ctx) == DT_OK, "%s: %s", c->name, dt_error_text(ctx));
    for (int i = 0; i < c->n; i++) {
        int64_t n = dt_count(c->shape[i]);
        if (!CHECK_MSG(in[i] && in[i]->grad, "%s: no gradient of input %d", c->name, i)) memset(g[i], 0, 8 * (size_t)n);
        else memcpy(g[i], in[i]->grad, 8 * (size_t)n);
    }
    close_good(ctx, &m, c->name);
}

static void fd_compare(fd_case *c, double **x, double **g) {
    meter   m = METER;
    dt_ctx *ctx = open_ctx(&m);
    double  squares = 0, count = 0;
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
            double slope = fd_slope(ctx, c, x, i, v, 1e-3), floor = fabs(slope) > rms ? fabs(slope) : rms;
            CHECK_MSG(fabs(g[i][e] - slope) <= 1e-6 * floor + 1e-11, "%s: input %d, element %lld: %.12g, not %.12g",
                c->name, i, (long long)e, g[i][e], slope);
            v[e] = 0;
        }
        for (int64_t j = 0; j < n; j++) { /* and all of them at once */
            v[j] = noise(66, (uint64_t)j) < 0 ? -1 : 1;
            dot += v[j] * g[i][j];
            size += g[i][j] * g[i][j];
        }
        double slope = fd_slope(ctx, c, x, i, v, 1e-3 / sqrt((double)n)), floor = fmax(sqrt(size), rms);
        CHECK_MSG(fabs(dot - slope) <= 1e-6 * fmax(fabs(slope), floor) + 1e-11, "%s: input %d, all: %.12g, not %.12g",
            c->name, i, dot, slope);
        free(v);
    }
    close_good(ctx, &m, c->name);
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
    for (int i = 0; i < c.n; i++) {
        size_t bytes = (size_t)dt_count(c.shape[i]) * 8;
        CHECK_MSG(memcmp(g[AS_INPUTS][i], g[AS_PARAMS][i], bytes) == 0, "%s: input %d: as a parameter", c.name, i);
        CHECK_MSG(memcmp(g[AS_PARAMS][i], g[AS_HALVES][i], bytes) == 0, "%s: input %d: by two halves", c.name, i);
        double most = 0;
        for (size_t j = 0; j < bytes / 8; j++) {
            double error = fabs(g[AS_SHARED][i][j] - (g[AS_INPUTS][i][j] + noise(99, j)));
            most = fmax(most, error / fmax(1, fabs(g[AS_INPUTS][i][j])));
        }
        CHECK_MSG(most < 1e-13, "%s: input %d: added to another gradient: error %.2g", c.name, i, most);
    }
    fd_compare(&c, x, g[AS_INPUTS]);
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
                fd_check((fd_case){ .name = bias ? "linear with bias" : "linear", .build = build_linear, .n = 2 + bias,
                    .shape = { DT_SHAPE(odd[m], odd[i]), DT_SHAPE(odd[o], odd[i]), DT_SHAPE(odd[o]) } });
            }
    fd_check((fd_case){ .name = "linear (2,3,5) (3,17,5)", .build = build_linear, .n = 3,
        .shape = { DT_SHAPE(2, 3, 5), DT_SHAPE(3, 17, 5), DT_SHAPE(3, 17) } });
    fd_check((fd_case){ .name = "linear (5) (2,1,3,5)", .build = build_linear, .n = 2,
        .shape = { DT_SHAPE(5), DT_SHAPE(2, 1, 3, 5) } });
}

static dt_tensor *build_embedding(dt_tensor **in, fd_case *c) {
    return weigh(dt_embedding(in[0], dt_input(in[0]->ctx, DT_I32, c->ids_shape, c->ids)), NULL);
}

static void fd_embedding(void) {
    int32_t ids[127];
    for (int v = 0; v < 3; v++)
        for (int w = 0; w < 4; w++) {
            for (int i = 0; i < 127; i++) ids[i] = below(77, (uint64_t)i, (int)odd[v]); /* rows many times, or never */
            fd_check((fd_case){ .name = "embedding", .build = build_embedding, .n = 1,
                .shape = { DT_SHAPE(odd[v], odd[w]) }, .ids = ids,
                .ids_shape = w == 3 ? DT_SHAPE(127) : w == 2 ? DT_SHAPE(3, 1, 7) : DT_SHAPE(2, 3) });
        }
}

static dt_tensor *build_layernorm(dt_tensor **in, fd_case *c) {
    return weigh(dt_layernorm(in[0], in[1], in[2], c->weight), NULL);
}

static void fd_layernorm(void) {
    for (int r = 0; r < 4; r++)
        for (int w = 0; w < 4; w++)
            fd_check((fd_case){ .name = "layernorm", .build = build_layernorm, .n = 3,
                .weight = w == 1 ? 0.1 : 0.001 * r, /* eps; 0 is the default. Three close numbers curve too much. */
                .shape = { DT_SHAPE(odd[r], odd[w]), DT_SHAPE(odd[w]), DT_SHAPE(odd[w]) } });
    fd_check((fd_case){ .name = "layernorm (2,3,5)", .build = build_layernorm, .n = 3, .weight = 0.01,
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
    return weigh(dt_attention(in[0], in[0], in[0], (dt_attn_desc){ .full = c->full, .kv_heads = 3 }), NULL);
}

static void fd_attention(void) {
    static const int64_t size[][6] = { /* B TQ TK H K D */
        { 1, 1, 1, 1, 1, 1 }, { 2, 3, 3, 3, 3, 3 }, { 1, 17, 17, 3, 1, 3 }, { 1, 17, 17, 6, 2, 5 },
        { 2, 3, 17, 2, 2, 1 }, { 1, 17, 3, 2, 1, 3 }, { 3, 1, 17, 1, 1, 17 }, { 1, 37, 37, 2, 1, 3 },
        { 1, 19, 140, 2, 1, 3 }, { 1, 127, 127, 1, 1, 17 } };
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        for (int full = 0; full < 2; full++) {
            const int64_t *s = size[i];
            fd_check((fd_case){ .name = full ? "attention full" : "attention causal", .build = build_attention, .n = 3,
                .full = full, .shape = { DT_SHAPE(s[0], s[1], s[3], s[5]), DT_SHAPE(s[0], s[2], s[4], s[5]),
                DT_SHAPE(s[0], s[2], s[4], s[5]) } });
        }
    fd_check((fd_case){ .name = "attention of one tensor", .build = build_self_attention, .n = 1,
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
    static const dt_shape a[6] = { { 1, { 1 } }, { 2, { 3, 17 } }, { 2, { 3, 17 } }, { 3, { 17, 3, 127 } },
        { 3, { 3, 17, 1 } }, { 2, { 5, 3 } } };
    static const dt_shape b[6] = { { 1, { 1 } }, { 2, { 3, 17 } }, { 1, { 17 } }, { 2, { 3, 127 } }, { 1, { 1 } },
        { 0, { 0 } } };
    for (int i = 0; i < 6; i++)
        fd_check((fd_case){ .name = "add", .build = build_add, .n = 2, .shape = { a[i], b[i] } });
    fd_check((fd_case){ .name = "add to itself", .build = build_add_self, .n = 1, .shape = { DT_SHAPE(3, 17) } });
    for (int i = 0; i < 4; i++)
        fd_check((fd_case){ .name = "gelu", .build = build_gelu, .n = 1, .shape = { DT_SHAPE(odd[i], 3) } });
}

/* x itself, a view of it and a view of the view: one gradient. */
static dt_tensor *build_views(dt_tensor **in, fd_case *c) {
    dt_tensor *flat = dt_reshape(in[0], DT_SHAPE(51)), *tall = dt_reshape(flat, DT_SHAPE(17, 3));
    (void)c;
    return weigh(dt_add(dt_gelu(tall), dt_reshape(dt_add(dt_gelu(in[0]), dt_reshape(flat, DT_SHAPE(3, 17))),
        DT_SHAPE(17, 3))), NULL);
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
                fd_check((fd_case){ .name = "cross entropy", .build = build_cross_entropy, .n = 1, .ids = labels,
                    .shape = { DT_SHAPE(odd[r], odd[v]) }, .ids_shape = DT_SHAPE(odd[r]) });
            }
    for (int i = 0; i < 6; i++) labels[i] = i == 4 ? -100 : i;
    fd_check((fd_case){ .name = "cross entropy (2,3,17)", .build = build_cross_entropy, .n = 1, .ids = labels,
        .shape = { DT_SHAPE(2, 3, 17) }, .ids_shape = DT_SHAPE(2, 3) });
}

static dt_tensor *build_mse(dt_tensor **in, fd_case *c) {
    (void)c;
    return dt_mse(in[0], in[1], 5);
}

static dt_tensor *build_loss(dt_tensor **in, fd_case *c) { /* a side loss on the way to the true one */
    dt_tensor *h = dt_gelu(in[0]);
    c->side = dt_mse(h, in[1], 3);
    return weigh(dt_gelu(dt_loss(h, c->side, c->weight)), NULL);
}

/* The scalar is a leaf, and the true loss sees it too. */
static dt_tensor *build_loss_param(dt_tensor **in, fd_case *c) {
    c->side = in[1];
    return weigh(dt_add(dt_loss(dt_gelu(in[0]), in[1], c->weight), in[1]), NULL);
}

static dt_tensor *build_times(dt_tensor **in, fd_case *c) { /* two own ops, one tensor on both sides of one of them */
    (void)c;
    return weigh(times(times(in[0], in[1]), times(in[1], in[1])), NULL);
}

typedef struct inner { dt_tensor *w, *outside; } inner;
static dt_tensor *block_inner(dt_tensor *x, void *user) {
    inner *u = (inner *)user;
    return dt_gelu(dt_linear(dt_add(x, u->outside), u->w, NULL));
}

static dt_tensor *block_outer(dt_tensor *x, void *user) {
    dt_tensor **in = (dt_tensor **)user;
    inner       u = { in[1], x };
    dt_tensor  *y = dt_block(x->ctx, block_inner, dt_gelu(x), &u);
    u.w = in[2];
    return dt_add(dt_block(x->ctx, block_inner, y, &u), x);
}

static dt_tensor *build_blocks(dt_tensor **in, fd_case *c) { /* blocks in blocks, with tensors of outer ones */
    (void)c;
    dt_ctx    *ctx = in[0]->ctx;
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
        dt_shape m = DT_SHAPE(3, odd[i]), big = DT_SHAPE(17, odd[i]); /* 17 x 127 is more than one run of 1,024 */
        fd_check((fd_case){ .name = "mse", .build = build_mse, .n = 2, .shape = { m, m } });
        fd_check((fd_case){ .name = "mse", .build = build_mse, .n = 2, .shape = { big, big } });
    }
    fd_check((fd_case){ .name = "side loss", .build = build_loss, .n = 2, .shape = { s, s }, .weight = 0.3 });
    fd_check((fd_case){ .name = "side loss of a leaf", .build = build_loss_param, .n = 2,
        .shape = { s, DT_SCALAR }, .weight = -0.7 });
    fd_check((fd_case){ .name = "own ops", .build = build_times, .n = 2, .shape = { s, s } });
    fd_check((fd_case){ .name = "blocks", .build = build_blocks, .n = 3,
        .shape = { DT_SHAPE(5, 3), DT_SHAPE(3, 3), DT_SHAPE(3, 3) } });
    fd_check((fd_case){ .name = "tied", .build = build_tied, .n = 2, .shape = { DT_SHAPE(17, 3), DT_SHAPE(3) },
        .ids = ids, .ids_shape = DT_SHAPE(5) });
}

/* No input features: nothing but the bias. No rows: nothing at all, and gradients of zero. */
static void empty_shapes(void) {
    meter      m = METER;
    dt_ctx    *ctx = open_ctx(&m);
    dt_tensor *w = dt_param_at(ctx, "w", DT_SHAPE(3, 2), DT_ONES, (dt_param_desc){ .dtype = DT_F64 });
    dt_tensor *b = dt_param_at(ctx, "b", DT_SHAPE(3), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F64 });
    dt_tensor *none = dt_input(ctx, DT_F64, DT_SHAPE(2, 0), NULL), *flat = dt_input(ctx, DT_F64, DT_SHAPE(3, 0), NULL);
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

static void test_finite_differences(void) {
    fd_linear();
    fd_embedding();
    fd_layernorm();
    fd_attention();
    fd_add();
    fd_cross_entropy();
    fd_others();
    empty_shapes();
}

// ==== 4. Golden vectors of single ops ===============================================================================

/* What an op takes beside tensors; those that a case lacks are 0. */
typedef struct golden_scalars { double eps, full, denom; } golden_scalars;

typedef struct golden_op {
    const char *op, *in[3], *grad[3]; /* gradients are compared where the name is not NULL */
    dt_tensor *(*run)(dt_tensor **in, golden_scalars s, dt_tensor **lse);
} golden_op;

static dt_tensor *golden_linear(dt_tensor **in, golden_scalars s, dt_tensor **lse) {
    (void)s, (void)lse;
    return dt_linear(in[0], in[1], in[2]);
}
static dt_tensor *golden_layernorm(dt_tensor **in, golden_scalars s, dt_tensor **lse) {
    (void)lse;
    return dt_layernorm(in[0], in[1], in[2], s.eps);
}
static dt_tensor *golden_gelu(dt_tensor **in, golden_scalars s, dt_tensor **lse) {
    (void)s, (void)lse;
    return dt_gelu(in[0]);
}
static dt_tensor *golden_embedding(dt_tensor **in, golden_scalars s, dt_tensor **lse) {
    (void)s, (void)lse;
    return dt_embedding(in[0], in[1]);
}
static dt_tensor *golden_add(dt_tensor **in, golden_scalars s, dt_tensor **lse) {
    (void)s, (void)lse;
    return dt_add(in[0], in[1]);
}
static dt_tensor *golden_attention(dt_tensor **in, golden_scalars s, dt_tensor **lse) {
    return dt_attention(in[0], in[1], in[2], (dt_attn_desc){ .full = s.full != 0, .lse = lse });
}
static dt_tensor *golden_cross_entropy(dt_tensor **in, golden_scalars s, dt_tensor **lse) {
    (void)lse;
    return dt_cross_entropy(in[0], in[1], s.denom);
}
static dt_tensor *golden_mse(dt_tensor **in, golden_scalars s, dt_tensor **lse) {
    (void)lse;
    return dt_mse(in[0], in[1], s.denom);
}

static const golden_op golden_ops[] = {
    { "linear", { "x", "w", "b" }, { "dx", "dw", "db" }, golden_linear },
    { "layernorm", { "x", "gain", "bias" }, { "dx", "dgain", "dbias" }, golden_layernorm },
    { "gelu", { "x", NULL, NULL }, { "dx", NULL, NULL }, golden_gelu },
    { "embedding", { "table", "ids", NULL }, { "dtable", NULL, NULL }, golden_embedding },
    { "add", { "a", "b", NULL }, { "da", "db", NULL }, golden_add },
    { "attention", { "q", "k", "v" }, { "dq", "dk", "dv" }, golden_attention },
    { "cross_entropy", { "logits", "labels", NULL }, { "dlogits", NULL, NULL }, golden_cross_entropy },
    { "mse", { "a", "b", NULL }, { "da", "db", NULL }, golden_mse },
};

static const golden_array *golden_of(const golden *g, const char *op, int n, const char *array) {
    char name[96];
    snprintf(name, sizeof name, "%s.%d.%s", op, n, array);
    return golden_find(g, name);
}

static double golden_scalar(const golden *g, const char *op, int n, const char *array) {
    const golden_array *a = golden_of(g, op, n, array);
    return a ? a->data[0] : 0;
}

static dt_tensor *golden_input(dt_ctx *ctx, const golden_array *a, dt_dtype dtype) {
    if (!a) return NULL;
    dt_shape shape = { a->nd, { 0 } };
    for (int i = 0; i < a->nd; i++) shape.d[i] = a->shape[i];
    void *x = room((size_t)a->count * dt_dtype_size(dtype));
    for (int64_t i = 0; i < a->count; i++) put(x, dtype, i, a->data[i]);
    dt_tensor *t = dt_input(ctx, dtype, shape, x);
    free(x);
    return dtype == DT_I32 ? t : dt_require_grad(t);
}

static void golden_compare(const char *what, const void *ours, dt_dtype dtype, const golden_array *a, double tolerance,
    double rms) {
    if (!CHECK_MSG(a && ours, "%s: nothing to compare", what)) return;
    int64_t worst = 0;
    double  most = -1;
    for (int64_t i = 0; i < a->count; i++) {
        double x = get(ours, dtype, i), y = a->data[i], error = fabs(x - y) / (fmax(fabs(y), rms) + 1e-30);
        if (x == y) error = 0; /* infinities too */
        if (!(error <= most)) most = error, worst = i;
    }
    CHECK_MSG(most <= tolerance, "%s %s: element %lld is %.17g, not %.17g (error %.2g)", what, dt_dtype_name(dtype),
        (long long)worst, get(ours, dtype, worst), a->data[worst], most);
}

/* Root mean square of the finite elements of up to three arrays. */
static double golden_rms(const golden_array *a, const golden_array *b, const golden_array *c) {
    const golden_array *all[3] = { a, b, c };
    double sum = 0, n = 0;
    for (int i = 0; i < 3; i++)
        for (int64_t j = 0; all[i] && j < all[i]->count; j++)
            if (isfinite(all[i]->data[j])) sum += all[i]->data[j] * all[i]->data[j], n++;
    return n ? sqrt(sum / n) : 0;
}

static void golden_case(const golden *g, const golden_op *op, int n, dt_dtype dtype) {
    meter      m = METER;
    dt_ctx    *ctx = open_ctx(&m);
    char       what[64];
    double     tolerance = dtype == DT_F64 ? 1e-12 : 1e-5, largest = 0;
    dt_tensor *in[3] = { NULL }, *lse = NULL;
    const golden_array *grad[3] = { NULL }, *y = golden_of(g, op->op, n, "y"), *dy = golden_of(g, op->op, n, "dy");
    const golden_array *loss = golden_of(g, op->op, n, "loss"), *want_lse = golden_of(g, op->op, n, "lse");
    golden_scalars s = { golden_scalar(g, op->op, n, "eps"), golden_scalar(g, op->op, n, "full"),
        golden_scalar(g, op->op, n, "denom") };
    snprintf(what, sizeof what, "golden %s %d", op->op, n);
    for (int i = 0; i < 3; i++) {
        if (!op->in[i]) continue;
        int integer = !strcmp(op->in[i], "ids") || !strcmp(op->in[i], "labels");
        in[i] = golden_input(ctx, golden_of(g, op->op, n, op->in[i]), integer ? DT_I32 : dtype);
        if (in[i] && op->grad[i]) grad[i] = golden_of(g, op->op, n, op->grad[i]);
        for (int64_t j = 0; in[i] && !integer && j < dt_count(in[i]->shape); j++)
            largest = fmax(largest, fabs(get(in[i]->data, dtype, j)));
    }
    /* differences of large numbers (a mean of 1000, scores near 1000) lose digits in f32: inputs beyond 4 get more */
    if (dtype == DT_F32 && largest > 4 && strcmp(op->op, "gelu") != 0) tolerance *= largest / 4;
    dt_tensor *out = op->run(in, s, &lse);
    if (CHECK_MSG(out, "%s: %s", what, dt_error_text(ctx))) {
        golden_compare(what, out->data, out->dtype, y ? y : loss, tolerance, golden_rms(y ? y : loss, NULL, NULL));
        if (lse) golden_compare(what, lse->data, dtype, want_lse, tolerance, golden_rms(want_lse, NULL, NULL));
        dt_backward(dy ? weigh(out, dy->data) : out);
        double rms = golden_rms(grad[0], grad[1], grad[2]);
        for (int i = 0; i < 3; i++)
            if (in[i] && op->grad[i]) golden_compare(what, in[i]->grad, dtype, grad[i], tolerance, rms);
    }
    close_good(ctx, &m, what);
}

static void test_golden_ops(void) {
    char path[512];
    snprintf(path, sizeof path, "%s/ops.bin", golden_folder);
    golden *g = golden_open(path);
    if (!CHECK_MSG(g, "%s: %s", path, strerror(errno))) return;
    for (size_t i = 0; i < sizeof golden_ops / sizeof *golden_ops; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.cases", golden_ops[i].op);
        const double *cases = golden_get(g, name, NULL);
        if (!CHECK_MSG(cases && *cases >= 3, "no golden cases of %s", golden_ops[i].op)) continue;
        for (int n = 0; n < (int)*cases; n++) {
            golden_case(g, &golden_ops[i], n, DT_F64);
            golden_case(g, &golden_ops[i], n, DT_F32);
        }
    }
    golden_free(g);
}

// ==== 5. Counter RNG and initial values =============================================================================

/* Philox4x32-10 once more, with all four counter words, so that the published vectors can be asked of it. */
static void philox_again(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4]) {
    uint32_t k[2] = { key[0], key[1] }, c[4];
    memcpy(c, counter, sizeof c);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = { (uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1],
            (uint32_t)a };
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    memcpy(out, c, sizeof c);
}

static void rng_known_answers(void) {
    static const uint32_t known[3][10] = { /* key, counter, answer: Random123's kat_vectors */
        { 0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 },
        { 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e, 0xa20bc7c6,
          0x6d5451fd },
        { 0xa4093822, 0x299f31d0, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
          0x24126ea1 } };
    uint32_t out[4], again[4];
    for (int i = 0; i < 3; i++) {
        philox_again(known[i], known[i] + 2, again);
        CHECK_MSG(memcmp(again, known[i] + 6, sizeof again) == 0, "the test's own Philox, vector %d", i);
    }
    dt__philox(0, 0, out);
    CHECK(memcmp(out, known[0] + 6, sizeof out) == 0);
    for (int i = 0; i < 200; i++) { /* the library's has 64 bits of counter; the other words are zero */
        uint64_t key = (uint64_t)(noise(1, (uint64_t)i) * 9e18), counter = (uint64_t)(noise(2, (uint64_t)i) * 9e18);
        if (i < 2) key = counter = (uint64_t)0 - (uint64_t)i;
        uint32_t k[2] = { (uint32_t)key, (uint32_t)(key >> 32) };
        uint32_t c[4] = { (uint32_t)counter, (uint32_t)(counter >> 32), 0, 0 };
        dt__philox(key, counter, out);
        philox_again(k, c, again);
        CHECK_MSG(memcmp(out, again, sizeof out) == 0, "Philox, case %d", i);
    }
}

enum { DRAWS = 40000 };

/* DRAWS values of a parameter, as doubles. */
static double *drawn(uint64_t seed, const char *name, dt_init init, dt_dtype dtype) {
    meter      m = METER;
    dt_ctx    *ctx = open_with(&m, NULL, seed);
    dt_tensor *w = dt_param_at(ctx, name, DT_SHAPE(DRAWS), init, (dt_param_desc){ .dtype = dtype });
    void      *raw = room(DRAWS * 8);
    double    *x = (double *)room(DRAWS * sizeof(double));
    dt_read(w, raw);
    for (int i = 0; i < DRAWS; i++) x[i] = get(raw, dtype, i);
    free(raw);
    close_good(ctx, &m, name);
    return x;
}

static double correlation(const double *x, const double *y, int shift) {
    double xy = 0, xx = 0, yy = 0;
    for (int i = 0; i + shift < DRAWS; i++) {
        xy += x[i] * y[i + shift];
        xx += x[i] * x[i];
        yy += y[i + shift] * y[i + shift];
    }
    return xy / sqrt(xx * yy);
}

/* Bounds are five standard deviations of what is estimated. */
static void rng_distributions(void) {
    double root = sqrt((double)DRAWS), *u = drawn(1, "w", DT_UNIFORM(2), DT_F64), sum = 0, squares = 0;
    double *z = drawn(1, "w", DT_NORMAL(3), DT_F64), least = 9, most = -9, fourth = 0, inside = 0;
    for (int i = 0; i < DRAWS; i++) {
        sum += u[i];
        squares += u[i] * u[i];
        least = fmin(least, u[i]);
        most = fmax(most, u[i]);
    }
    CHECK_MSG(least >= -2 && least < -1.99 && most < 2 && most > 1.99, "uniform from %g to %g", least, most);
    CHECK_MSG(fabs(sum / DRAWS) < 5 * 2 / sqrt(3.0) / root, "uniform: mean %g", sum / DRAWS);
    CHECK_MSG(fabs(squares / DRAWS - 4 / 3.0) < 5 * 1.2 / root, "uniform: variance %g", squares / DRAWS);
    sum = squares = 0;
    for (int i = 0; i < DRAWS; i++) {
        sum += z[i] / 3;
        squares += z[i] * z[i] / 9;
        fourth += pow(z[i] / 3, 4);
        inside += fabs(z[i]) < 3;
    }
    CHECK_MSG(fabs(sum / DRAWS) < 5 / root, "normal: mean %g", sum / DRAWS);
    CHECK_MSG(fabs(squares / DRAWS - 1) < 5 * sqrt(2.0) / root, "normal: variance %g", squares / DRAWS);
    CHECK_MSG(fabs(fourth / DRAWS - 3) < 5 * sqrt(96.0) / root, "normal: fourth moment %g", fourth / DRAWS);
    CHECK_MSG(fabs(inside / DRAWS - 0.682689) < 5 * 0.47 / root, "normal: %g within one deviation", inside / DRAWS);
    double *other[4] = { drawn(2, "w", DT_NORMAL(3), DT_F64), drawn(1, "v", DT_NORMAL(3), DT_F64),
        drawn(1, "ww", DT_NORMAL(3), DT_F64), drawn(1, "w", DT_NORMAL(3), DT_F32) };
    for (int i = 0; i < 3; i++)
        for (int shift = 0; shift < 3; shift++)
            CHECK_MSG(fabs(correlation(z, other[i], shift)) < 5 / root, "stream %d is like the first", i);
    for (int shift = 1; shift < 4; shift++) CHECK(fabs(correlation(z, z, shift)) < 5 / root);
    int same = 0;
    for (int i = 0; i < DRAWS; i++) same += other[3][i] == (double)(float)z[i];
    CHECK_MSG(same == DRAWS, "f32 values are f64 values rounded, but for %d", DRAWS - same);
    for (int i = 0; i < 4; i++) free(other[i]);
    free(u);
    free(z);
}

// ==== 6. Boxes ======================================================================================================

static dt_cut cut(dt_group *g, int dim) { return (dt_cut){ (dt_comm *)g, dim }; }

/* Which part of index i of a dimension of `full` the groups of the cuts along it own, cut after cut; -1: another's. */
static int64_t place_of(int64_t i, int64_t full, int dim, const dt_cut cuts[3]) {
    int64_t extent = full, at = i;
    for (int c = 0; c < 3; c++) {
        const dt_group *g = (const dt_group *)cuts[c].comm;
        if (!g || cuts[c].dim != dim) continue;
        extent = (extent + g->size - 1) / g->size;
        if (at / extent != g->rank) return -1;
        at %= extent;
    }
    return at;
}

/* A parameter under `cuts` against the whole one: its values, its zeros outside, and how many elements it owns. */
static int64_t box_case(dt_shape full, const dt_cut cuts[3], dt_init init, const double *whole) {
    meter         m = METER;
    dt_ctx       *ctx = open_ctx(&m);
    dt_param_desc desc = { .cuts = { cuts[0], cuts[1], cuts[2] }, .dtype = DT_F64 };
    dt_tensor    *w = dt_param_at(ctx, "w", full, init, desc);
    dt_box        box = dt_box_of(full, cuts);
    int64_t       n = dt_count(w->shape), owned = 0, wrong = 0, inside = 1;
    int           fits = 1;
    double       *want = (double *)room((size_t)n * 8), *have = (double *)room((size_t)n * 8);
    CHECK(memcmp(&box, &w->param->box, sizeof box) == 0);
    for (int64_t g = 0; g < dt_count(full); g++) {
        int64_t left = g, at[DT_MAX_DIMS], local = 0;
        for (int d = full.nd - 1; d >= 0; d--) {
            at[d] = place_of(left % full.d[d], full.d[d], d, cuts);
            left /= full.d[d];
        }
        for (int d = 0; d < full.nd; d++) local = at[d] < 0 || local < 0 ? -1 : local * w->shape.d[d] + at[d];
        if (local < 0) continue;
        want[local] = whole[g];
        owned++;
    }
    for (int d = 0; d < full.nd; d++) {
        int64_t held = 0, first = -1;
        for (int64_t i = full.d[d] - 1; i >= 0; i--)
            if (place_of(i, full.d[d], d, cuts) >= 0) held++, first = i;
        int right = box.inside[d] == held && (held == 0 || box.lo[d] == first);
        fits &= CHECK_MSG(right, "dimension %d: lo %lld, inside %lld", d, (long long)box.lo[d],
            (long long)box.inside[d]);
        inside *= held;
    }
    if (fits) dt_read(w, have); /* a wrong box would write anywhere */
    for (int64_t i = 0; i < n; i++) wrong += !(have[i] == want[i]);
    CHECK_MSG(wrong == 0, "%lld of %lld values of a cut parameter", (long long)wrong, (long long)n);
    CHECK(inside == owned && (size_t)n == w->param->count);
    free(want);
    free(have);
    close_good(ctx, &m, "a cut parameter");
    return owned;
}

static double *whole_values(dt_shape full, dt_init init) {
    meter      m = METER;
    dt_ctx    *ctx = open_ctx(&m);
    dt_tensor *w = dt_param_at(ctx, "w", full, init, (dt_param_desc){ .dtype = DT_F64 });
    double    *x = (double *)room((size_t)dt_count(full) * 8);
    dt_read(w, x);
    close_good(ctx, &m, "a whole parameter");
    return x;
}

/* Every rank of two groups, over every pair of dimensions, the same one included. */
static void box_all(dt_shape full, int size_a, int size_b, dt_init init, const double *whole) {
    for (int da = 0; da < full.nd; da++)
        for (int db = 0; db < full.nd; db++) {
            int64_t owned = 0;
            for (int a = 0; a < size_a; a++)
                for (int b = 0; b < size_b; b++) {
                    dt_group ga = { a, size_a }, gb = { b, size_b };
                    dt_cut   cuts[3] = { cut(&ga, da), { NULL, 0 }, cut(&gb, db) };
                    owned += box_case(full, cuts, init, whole);
                }
            CHECK_MSG(owned == dt_count(full), "the boxes hold %lld elements of %lld", (long long)owned,
                (long long)dt_count(full));
        }
}

static void box_values(void) {
    static const dt_shape shape[4] = { { 1, { 17 } }, { 2, { 7, 5 } }, { 3, { 5, 3, 4 } }, { 4, { 2, 3, 1, 5 } } };
    for (int s = 0; s < 4; s++) {
        dt_init init = s == 1 ? DT_UNIFORM(1) : s == 3 ? DT_ONES : DT_NORMAL(1);
        double *whole = whole_values(shape[s], init);
        for (int a = 1; a < 5; a++)
            for (int b = 1; b < 4; b++) box_all(shape[s], a, b, init, whole);
        free(whole);
    }
    dt_shape vocab = DT_SHAPE(257, 3);
    double  *whole = whole_values(vocab, DT_NORMAL(0.02));
    box_all(vocab, 4, 1, DT_NORMAL(0.02), whole);
    free(whole);
}

/* Vocabulary 257 over 4: embedding rows add up to the whole table's, and no gradient appears past the end. */
static void box_gradients(void) {
    double sum[6 * 3] = { 0 };
    for (int rank = 0; rank < 4; rank++) {
        static const int32_t ids[6] = { 0, 64, 65, 194, 195, 256 };
        meter     m = METER;
        dt_ctx   *ctx = open_ctx(&m);
        dt_group  g = { rank, 4 };
        dt_param_desc desc = { .cuts = { cut(&g, 0) }, .dtype = DT_F64 };
        dt_tensor *w = dt_param_at(ctx, "w", DT_SHAPE(257, 3), DT_NORMAL(1), desc);
        CHECK(w && w->shape.d[0] == 65 && w->shape.d[1] == 3);
        for (int micro = 0; micro < 2; micro++) { /* the sum, then a passing gradient */
            dt_tensor *rows = dt_embedding(w, dt_input(ctx, DT_I32, DT_SHAPE(6), ids));
            for (int i = 0; rows && micro == 0 && i < 18; i++) sum[i] += ((double *)rows->data)[i];
            dt_backward(weigh(dt_linear(rows, w, NULL), NULL)); /* every row of w is multiplied by something */
            dt_reset(ctx);
        }
        const double *grad = w ? (const double *)w->grad : NULL;
        int zeros = 0, last = rank == 3 ? 62 : 65;
        for (int i = 0; grad && i < 65 * 3; i++) {
            if (i >= last * 3) CHECK_MSG(grad[i] == 0, "rank %d: a gradient %g past the end", rank, grad[i]);
            else zeros += grad[i] == 0 || !isfinite(grad[i]);
        }
        CHECK_MSG(grad && zeros == 0, "rank %d: %d gradients inside are missing", rank, zeros);
        close_good(ctx, &m, "a cut vocabulary");
    }
    double *whole = whole_values(DT_SHAPE(257, 3), DT_NORMAL(1));
    static const int id[6] = { 0, 64, 65, 194, 195, 256 };
    for (int i = 0; i < 18; i++) CHECK(sum[i] == whole[id[i / 3] * 3 + i % 3]);
    free(whole);
}

/* A column cut with an overhang: three columns of the last rank's eight are outside, in every row. */
static void box_columns(void) {
    meter     m = METER;
    dt_ctx   *ctx = open_ctx(&m);
    dt_group  g = { 1, 2 };
    dt_tensor *w = dt_param_at(ctx, "w", DT_SHAPE(5, 13), DT_ONES, (dt_param_desc){ .cuts = { cut(&g, 1) } });
    dt_tensor *b = dt_param_at(ctx, "b", DT_SHAPE(3), DT_ONES, (dt_param_desc){ .cuts = { { NULL, 0 }, cut(&g, 0) } });
    dt_backward(weigh(dt_linear(noise_input(ctx, DT_F32, DT_SHAPE(4, 7), 3, 1), w, NULL), NULL));
    for (int i = 0; w && i < 35; i++) {
        CHECK(((float *)w->data)[i] == (i % 7 < 6 ? 1.0f : 0.0f));
        CHECK((((float *)w->grad)[i] != 0) == (i % 7 < 6));
    }
    CHECK(b && ((float *)b->data)[0] == 1 && ((float *)b->data)[1] == 0);
    close_good(ctx, &m, "columns cut");
}

static void test_boxes(void) {
    rng_known_answers();
    rng_distributions();
    box_values();
    box_gradients();
    box_columns();
}

// ==== 7. Units, gradients of micro-batches, listeners ===============================================================

typedef struct unit_row { int first, params, frozen; size_t count, padded; } unit_row;

static void units_plan(void) {
    meter    m = METER;
    dt_ctx  *ctx = open_ctx(&m);
    dt_group g = { 0, 1 };
    dt_cut   whole = cut(&g, 0);
    static const unit_row want[] = { { 0, 2, 0, 30, 32 }, { 2, 1, 0, 30, 32 }, { 3, 1, 0, 50, 64 }, { 4, 1, 0, 1, 16 },
        { 5, 1, 0, 2, 16 }, { 6, 1, 1, 2, 16 }, { 7, 1, 0, 2, 16 }, { 8, 1, 0, 1, 16 }, { 9, 1, 0, 4, 16 },
        { 10, 2, 0, 6, 16 } };
    dt_param(ctx, "a", DT_SHAPE(10), DT_ONES);
    dt_param(ctx, "b", DT_SHAPE(4, 5), DT_ONES);
    dt_param(ctx, "c", DT_SHAPE(30), DT_ONES);  /* a and b leave no room for it in 160 bytes */
    dt_param(ctx, "d", DT_SHAPE(50), DT_ONES);  /* more than a bucket, whole */
    dt_param(ctx, "e", DT_SCALAR, DT_ONES);
    dt_scope(ctx, "s.");
    dt_tensor *f = dt_param(ctx, "f", DT_SHAPE(2), DT_ONES);
    dt_param_at(ctx, "g", DT_SHAPE(2), DT_ONES, (dt_param_desc){ .frozen = 1 });
    dt_param_at(ctx, "h", DT_SHAPE(2), DT_ONES, (dt_param_desc){ .dtype = DT_F64 });
    dt_scope(ctx, NULL);
    dt_param(ctx, "f", DT_SHAPE(1), DT_ONES);   /* its full name is another */
    dt_param_at(ctx, "j", DT_SHAPE(4), DT_ONES, (dt_param_desc){ .cuts = { whole } });
    dt_param_at(ctx, "k", DT_SHAPE(3), DT_ONES, (dt_param_desc){ .marks = { { whole.comm, DT_PART } } });
    dt_param_at(ctx, "l", DT_SHAPE(3), DT_ONES, (dt_param_desc){ .marks = { { whole.comm, DT_PART } }, .no_decay = 1 });
    CHECK(dt_unit_count(ctx) == 0 && dt_param_count(ctx) == 12 && f && !f->data && !strcmp(f->name, "s.f"));
    CHECK(dt_param_find(ctx, "s.f") == f && dt_param_get(ctx, 5) == f && !dt_param_get(ctx, 12));
    CHECK(dt_units_make(ctx, (dt_units_desc){ .bucket_bytes = 160, .pad = 16 }) == DT_OK);
    CHECK(dt_unit_count(ctx) == 10 && !dt_unit_get(ctx, 10) && !dt_unit_get(ctx, -1));
    size_t bytes = 0;
    for (int u = 0; u < dt_unit_count(ctx) && u < 10; u++) {
        const dt_unit  *unit = dt_unit_get(ctx, u);
        const unit_row *row = &want[u];
        CHECK_MSG(unit->index == u && unit->first_param == row->first && unit->params == row->params &&
            unit->count == row->count && unit->padded == row->padded && unit->frozen == row->frozen &&
            unit->dtype == (u == 6 ? DT_F64 : DT_F32), "unit %d: from %d, %d params, %zu of %zu", u, unit->first_param,
            unit->params, unit->count, unit->padded);
        size_t at = 0, size = dt_dtype_size(unit->dtype);
        for (int i = unit->first_param; i < unit->first_param + unit->params; i++) {
            const dt_tensor *t = dt_param_get(ctx, i);
            CHECK(t->param->unit == unit && t->param->offset == at && t->data == (char *)unit->data + at * size);
            at += t->param->count;
        }
        for (size_t i = 0; i < unit->padded; i++)
            CHECK(get(unit->data, unit->dtype, (int64_t)i) == (i < unit->count));
        bytes += unit->padded * size;
    }
    CHECK(dt_memory_used(ctx).live[DT_MEM_PARAMS] == bytes && dt_memory_used(ctx).live[DT_MEM_GRADS] == 0);
    close_good(ctx, &m, "units");
}

/* What a listener heard, as text: "F1 f1" enter and leave, "r2" unit 2 is ready, "R2" for the last micro-batch. */
typedef struct heard { char text[512]; int micros, failed, closed, told; } heard;

static void hear(heard *h, const char *what, int number) {
    size_t n = strlen(h->text);
    snprintf(h->text + n, sizeof h->text - n, "%s%s%d", n ? " " : "", what, number);
}

static void on_enter(dt_ctx *ctx, const dt_event *e, void *user) {
    static const char *const name[] = { "?", "F", "B", "I", "W" };
    CHECK(ctx && e->last == (e->micro == ((heard *)user)->micros - 1));
    hear((heard *)user, name[e->phase], e->block);
}

static void on_leave(dt_ctx *ctx, const dt_event *e, void *user) {
    static const char *const name[] = { "?", "f", "b", "i", "w" };
    CHECK(ctx && e->last == (e->micro == ((heard *)user)->micros - 1));
    hear((heard *)user, name[e->phase], e->block);
}

static void on_ready(dt_ctx *ctx, dt_unit *unit, int last, void *user) {
    CHECK(ctx && unit->grad && unit->filled);
    hear((heard *)user, last ? "R" : "r", unit->index);
}

static int on_failed(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    CHECK(ctx && status != DT_OK && text && *text);
    ((heard *)user)->failed++;
    return ((heard *)user)->told;
}

static void on_closing(dt_ctx *ctx, void *user) {
    CHECK(ctx != NULL);
    ((heard *)user)->closed++;
}

#define LISTENER(h) { on_enter, on_leave, on_ready, on_failed, on_closing, (h), NULL }

/* units: 0 table, 1 and 2 the blocks' weights, 3 head, 4 a and b together, 5 never used, 6 frozen */
typedef struct toy { dt_tensor *table, *w[2], *head, *a, *b, *unused, *frozen; } toy;

static toy toy_make(dt_ctx *ctx, dt_dtype dtype) {
    toy t;
    dt_param_desc d = { .dtype = dtype }, still = { .dtype = dtype, .frozen = 1 };
    t.table = dt_param_at(ctx, "table", DT_SHAPE(17, 5), DT_NORMAL(1), d);
    for (int i = 0; i < 2; i++) {
        dt_scope(ctx, i ? "1." : "0.");
        t.w[i] = dt_param_at(ctx, "w", DT_SHAPE(5, 5), DT_NORMAL(1), d);
    }
    dt_scope(ctx, NULL);
    t.head = dt_param_at(ctx, "head", DT_SHAPE(17, 5), DT_NORMAL(1), d);
    dt_scope(ctx, NULL);
    t.a = dt_param_at(ctx, "a", DT_SHAPE(5), DT_NORMAL(1), d);
    t.b = dt_param_at(ctx, "b", DT_SHAPE(5), DT_NORMAL(1), d);
    dt_scope(ctx, NULL);
    t.unused = dt_param_at(ctx, "unused", DT_SHAPE(7), DT_NORMAL(1), d);
    t.frozen = dt_param_at(ctx, "frozen", DT_SHAPE(5, 5), DT_NORMAL(1), still);
    return t;
}

static dt_tensor *toy_block(dt_tensor *x, void *user) { return dt_gelu(dt_linear(x, (dt_tensor *)user, NULL)); }

/* What a toy's forward uses: bits. */
enum { USE_B = 1, USE_UNUSED = 2, USE_W1 = 4, USE_TIED = 8 };

static dt_tensor *toy_loss(dt_ctx *ctx, const toy *t, int micro, int use) {
    int32_t ids[6];
    for (int i = 0; i < 6; i++) ids[i] = below(31 + (uint64_t)micro, (uint64_t)i, 17);
    dt_tensor *id = dt_input(ctx, DT_I32, DT_SHAPE(6), ids), *x = dt_add(dt_embedding(t->table, id), t->a);
    x = dt_block(ctx, toy_block, x, t->w[0]);
    if (use & USE_W1) x = dt_block(ctx, toy_block, x, t->w[1]);
    x = dt_linear(x, t->frozen, NULL);
    if (use & USE_B) x = dt_add(x, t->b);
    dt_tensor *loss = dt_cross_entropy(dt_linear(x, use & USE_TIED ? t->table : t->head, NULL), id, 6);
    if (use & USE_UNUSED) loss = dt_loss(loss, weigh(t->unused, NULL), 0.5);
    return loss;
}

static void grad_ready_order(void) {
    meter       m = METER;
    dt_ctx     *ctx = open_ctx(&m);
    heard       h = { .micros = 2 };
    dt_listener l = LISTENER(&h);
    toy         t = toy_make(ctx, DT_F32);
    dt_listen(ctx, &l);
    dt_micro(ctx, 0, 2);
    dt_backward(toy_loss(ctx, &t, 0, USE_W1 | USE_B));
    CHECK_MSG(!strcmp(h.text, "F1 f1 F2 f2 B0 r3 B2 r2 b2 B1 r1 b1 r4 r0 b0 r5"), "heard %s", h.text);
    CHECK(t.frozen->grad == NULL && t.frozen->param->unit->grad == NULL && t.unused->grad != NULL);
    dt_reset(ctx);
    dt_micro(ctx, 1, 2);
    h.text[0] = 0; /* block 2 is left out: its unit comes with the unused one, at the end */
    dt_tensor *loss = toy_loss(ctx, &t, 1, 0);
    dt_backward_input(loss);
    dt_backward_weight(loss);
    CHECK_MSG(!strcmp(h.text, "F1 f1 I0 I1 i1 i0 W0 R3 W1 R1 w1 R4 R0 w0 R5 R2"), "heard %s", h.text);
    dt_reset(ctx);
    dt_unlisten(ctx, &l);
    dt_micro(ctx, 0, 2);
    h.text[0] = 0;
    dt_backward(toy_loss(ctx, &t, 0, 0));
    CHECK(h.text[0] == 0 && h.closed == 0);
    dt_listen(ctx, &l);
    close_good(ctx, &m, "listeners");
    CHECK(h.closed == 1 && h.failed == 0);
}

/* Copies all gradients, unit after unit as padded: what two runs are compared by. */
static size_t all_grads(const dt_ctx *ctx, char *to) {
    size_t at = 0;
    for (int u = 0; u < dt_unit_count(ctx); u++) {
        const dt_unit *unit = dt_unit_get(ctx, u);
        size_t         bytes = unit->padded * dt_dtype_size(unit->dtype);
        if (unit->frozen) continue;
        if (unit->grad) memcpy(to + at, unit->grad, bytes);
        else memset(to + at, 0xee, bytes);
        at += bytes;
    }
    return at;
}

/* Three micro-batches against their gradients taken alone and added by hand, in f32, where another order shows. */
static void accumulation(void) {
    enum { MICROS = 3, ROOM = 4096 };
    static const int use[MICROS] = { USE_W1 | USE_B | USE_TIED, USE_W1 | USE_TIED | USE_UNUSED, USE_B | USE_W1 };
    float  alone[MICROS][ROOM], together[ROOM], halves[ROOM];
    size_t bytes = 0;
    meter  m = METER;
    dt_ctx *ctx = open_ctx(&m);
    toy     t = toy_make(ctx, DT_F32);
    dt_units_make(ctx, (dt_units_desc){ .pad = 8 });
    for (int i = 0; i < MICROS; i++) {
        dt_clear_grads(ctx);
        dt_backward(toy_loss(ctx, &t, i, use[i]));
        bytes = all_grads(ctx, (char *)alone[i]);
        dt_reset(ctx);
    }
    CHECK(bytes > 0 && bytes <= sizeof together);
    for (int way = 0; way < 2; way++) {
        dt_clear_grads(ctx);
        for (int i = 0; i < MICROS; i++) {
            dt_tensor *loss = toy_loss(ctx, &t, i, use[i]);
            if (way == 0) dt_backward(loss);
            else dt_backward_input(loss), dt_backward_weight(loss);
            dt_reset(ctx);
        }
        all_grads(ctx, (char *)(way ? halves : together));
    }
    int wrong = 0, used = 0;
    for (size_t i = 0; i < bytes / 4; i++) {
        float sum = alone[0][i];
        for (int k = 1; k < MICROS; k++) sum = sum + alone[k][i];
        wrong += memcmp(&sum, &together[i], 4) != 0 && !(sum == 0 && together[i] == 0);
        used += sum != 0;
    }
    CHECK_MSG(wrong == 0 && used > 200, "%d of %zu sums over micro-batches are not those by hand", wrong, bytes / 4);
    CHECK_MSG(memcmp(together, halves, bytes) == 0, "input half and weight half give other bits");
    close_good(ctx, &m, "accumulation");
}

/* After dt_clear_grads old numbers lie in the sums; what this micro-batch does not reach must be zero all the same. */
static void unreached(void) {
    meter   m = METER;
    dt_ctx *ctx = open_ctx(&m);
    toy     t = toy_make(ctx, DT_F64);
    dt_backward(toy_loss(ctx, &t, 0, USE_W1 | USE_B | USE_UNUSED));
    CHECK(((double *)t.b->grad)[0] != 0 && ((double *)t.unused->grad)[6] != 0 && ((double *)t.w[1]->grad)[0] != 0);
    double before = ((double *)t.a->grad)[0];
    dt_reset(ctx);
    dt_clear_grads(ctx);
    dt_backward(toy_loss(ctx, &t, 0, 0));
    for (int i = 0; i < 25; i++) CHECK_MSG(((double *)t.w[1]->grad)[i] == 0, "an old gradient of a unit is left");
    for (int i = 0; i < 7; i++) CHECK(((double *)t.unused->grad)[i] == 0);
    for (int i = 0; i < 5; i++) CHECK_MSG(((double *)t.b->grad)[i] == 0, "an old gradient beside a new one is left");
    CHECK(((double *)t.a->grad)[0] != 0 && ((double *)t.a->grad)[0] != before);
    double kept[5];
    memcpy(kept, t.a->grad, sizeof kept);
    dt_reset(ctx);
    dt_backward(weigh(dt_gelu(t.b), NULL)); /* shares a's unit: a's sum stays, bit for bit */
    CHECK(memcmp(kept, t.a->grad, sizeof kept) == 0 && ((double *)t.b->grad)[0] != 0);
    close_good(ctx, &m, "unreached");
}

static void test_units(void) {
    units_plan();
    grad_ready_order();
    accumulation();
    unreached();
}

// ==== 8. Kernels: every instruction set =============================================================================

static const char *const isa_name[DT__ISAS] = { "plain", "simd", "avx512" };

typedef struct product {
    dt_matmul_args a;
    double        *want, *before, *bound; /* (batch,m,n); bound: sum of magnitudes, for the rounding */
} product;

static double naive_gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

/* The product in f64 (long double where the kernel is f64). */
static void product_naive(product *p, const void *c0) {
    const dt_matmul_args *a = &p->a;
    dt_dtype type = a->dtype;
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t i = 0; i < a->m; i++)
            for (int64_t j = 0; j < a->n; j++) {
                long double sum = 0, size = 0;
                int64_t to = (b * a->m + i) * a->n + j, at = b * a->stride_c + i * a->ldc + j;
                for (int64_t q = 0; q < a->k; q++) {
                    int64_t ia = b * a->stride_a + (a->trans_a ? q * a->lda + i : i * a->lda + q);
                    int64_t ib = b * a->stride_b + (a->trans_b ? j * a->ldb + q : q * a->ldb + j);
                    long double term = (long double)get(a->a, type, ia) * get(a->b, type, ib);
                    sum += term;
                    size += fabsl(term);
                }
                if (a->bias) sum += get(a->bias, type, j);
                p->before[to] = (double)sum;
                if (a->activation == DT_ACT_GELU) sum = naive_gelu((double)sum);
                if (a->residual) sum += get(a->residual, type, at);
                if (a->accumulate) sum += get(c0, type, at);
                p->want[to] = (double)sum;
                p->bound[to] = (double)size + 4;
            }
}

/* Compares c and before with the naive ones; what lies between the rows of c must be as it was. */
static void product_compare(const product *p, const char *set, const void *c0, size_t room_c) {
    const dt_matmul_args *a = &p->a;
    double eps = a->dtype == DT_F64 ? 2.3e-16 : 1.2e-7, worst = 0, worst_before = 0;
    char  *seen = (char *)room(room_c);
    int    touched = 0;
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t i = 0; i < a->m; i++)
            for (int64_t j = 0; j < a->n; j++) {
                int64_t to = (b * a->m + i) * a->n + j, at = b * a->stride_c + i * a->ldc + j;
                double unit = eps * p->bound[to] * (4 + sqrt((double)a->k)), error = 0;
                if (a->before) error = fabs(get(a->before, a->dtype, at) - p->before[to]) / unit;
                worst_before = fmax(worst_before, error);
                worst = fmax(worst, fabs(get(a->c, a->dtype, at) - p->want[to]) / unit);
                seen[at] = 1;
            }
    for (size_t i = 0; i < room_c; i++)
        touched += !seen[i] && get(a->c, a->dtype, (int64_t)i) != get(c0, a->dtype, (int64_t)i);
    free(seen);
    CHECK_MSG(worst <= 1 && worst_before <= 1 && touched == 0, "matmul %s %s (%lld,%lld,%lld) trans %d %d: error %.2g "
        "of the bound, before %.2g, %d others touched", set, dt_dtype_name(a->dtype), (long long)a->m, (long long)a->n,
        (long long)a->k, a->trans_a, a->trans_b, worst, worst_before, touched);
}

static void *noise_array(dt_dtype dtype, size_t n, uint64_t seed) {
    void *x = room(n * 8 + 64);
    for (size_t i = 0; i < n; i++) put(x, dtype, (int64_t)i, noise(seed, i));
    return x;
}

/* One product with everything at once or nothing, by `isa`, packed (work 0: the naive kernel; else its bytes). */
static void product_case(dt_dtype type, int isa, int64_t m, int64_t n, int64_t k, int kind, size_t work_bytes) {
    int ta = kind & 1, tb = kind >> 1 & 1, fused = kind >> 2 & 1, pad = kind >> 3 & 1 ? 3 : 0;
    product p = { .a = { .dtype = type, .m = m, .n = n, .k = k, .batch = pad ? 3 : 1, .trans_a = ta, .trans_b = tb } };
    dt_matmul_args *a = &p.a;
    a->lda = (ta ? m : k) + pad;
    a->ldb = (tb ? k : n) + pad;
    a->ldc = n + pad;
    a->stride_a = a->lda * (ta ? k : m) + pad;
    a->stride_b = a->ldb * (tb ? n : k) + 2 * pad;
    a->stride_c = a->ldc * m + pad;
    size_t room_c = (size_t)(a->stride_c * a->batch), count = (size_t)(m * n * a->batch);
    void  *mem[7] = { noise_array(type, (size_t)(a->stride_a * a->batch), 1),
        noise_array(type, (size_t)(a->stride_b * a->batch), 2), noise_array(type, room_c, 3),
        noise_array(type, room_c, 3), noise_array(type, (size_t)n, 4), noise_array(type, room_c, 5),
        noise_array(type, room_c, 6) };
    a->a = mem[0];
    a->b = mem[1];
    a->c = mem[2];
    if (fused) {
        a->bias = mem[4];
        a->residual = mem[5];
        a->before = mem[6];
        a->activation = DT_ACT_GELU;
    }
    a->accumulate = fused && ta == tb;
    a->work = work_bytes ? room(work_bytes) : NULL;
    a->work_bytes = work_bytes;
    p.want = (double *)room(count * 8);
    p.before = (double *)room(count * 8);
    p.bound = (double *)room(count * 8);
    product_naive(&p, mem[3]);
    dt_matmul_args args = p.a;
    if (!pad) { /* what 0 stands for */
        args.batch = args.lda = args.ldb = args.ldc = 0;
    }
    CHECK(dt__variant_of(type, isa)->matmul(&args) == DT_OK);
    product_compare(&p, isa_name[isa], mem[3], room_c);
    for (int i = 0; i < 7; i++) free(mem[i]);
    free(a->work);
    free(p.want);
    free(p.before);
    free(p.bound);
}

static void products(dt_dtype type, int isa) {
    static const int64_t size[][3] = { { 1, 1, 1 }, { 3, 17, 127 }, { 17, 127, 3 }, { 127, 3, 17 }, { 15, 33, 65 },
        { 1, 127, 17 }, { 29, 1, 5 }, { 14, 32, 64 }, { 5, 7, 0 }, { 17, 33, 1100 }, { 461, 3, 517 }, { 3, 530, 520 } };
    for (size_t s = 0; s < sizeof size / sizeof *size; s++)
        for (int kind = 0; kind < 16; kind += s < 9 ? 1 : 5) { /* the last three: K, M and N beyond one block */
            int64_t m = size[s][0], n = size[s][1], k = size[s][2];
            product_case(type, isa, m, n, k, kind, dt_matmul_work(n, k, type));
            if (s < 5) product_case(type, isa, m, n, k, kind, 0);
        }
    char work[64];
    float one[4] = { 0 };
    dt_matmul_args small = { .dtype = type, .a = one, .b = one, .c = one, .m = 1, .n = 1, .k = 1, .work = work,
        .work_bytes = sizeof work };
    CHECK(dt__variant_of(type, isa)->matmul(&small) == DT_ERR_ARG);
    small.m = -1;
    CHECK(dt__variant_of(type, isa)->matmul(&small) == DT_ERR_ARG);
}

/* Bits of an element: the same in the whole product and in any corner of it. */
static void product_bits(dt_dtype type, int isa, int64_t M, int64_t N, int64_t K) {
    size_t size = dt_dtype_size(type), work_bytes = dt_matmul_work(N, K, type);
    void  *a = noise_array(type, (size_t)(M * K), 1), *b = noise_array(type, (size_t)(N * K), 2);
    void  *whole = room((size_t)(M * N) * size), *part = room((size_t)(M * N) * size), *work = room(work_bytes);
    void  *bias = noise_array(type, (size_t)N, 3);
    dt_matmul_args all = { .dtype = type, .c = whole, .a = a, .b = b, .m = M, .n = N, .k = K, .trans_b = 1,
        .bias = bias, .activation = DT_ACT_GELU, .work = work, .work_bytes = work_bytes };
    CHECK(dt__variant_of(type, isa)->matmul(&all) == DT_OK);
    int wrong = 0;
    for (int t = 0; t < 25; t++) {
        int i0 = below(5, (uint64_t)t, (int)M), j0 = below(6, (uint64_t)t, (int)N);
        int m = 1 + below(7, (uint64_t)t, (int)M - i0), n = 1 + below(8, (uint64_t)t, (int)N - j0);
        dt_matmul_args some = all;
        some.c = part;
        some.m = m;
        some.n = n;
        some.a = (char *)a + (size_t)(i0 * K) * size;
        some.b = (char *)b + (size_t)(j0 * K) * size;
        some.bias = (char *)bias + (size_t)j0 * size;
        some.work_bytes = dt_matmul_work(n, K, type);
        CHECK(dt__variant_of(type, isa)->matmul(&some) == DT_OK);
        for (int i = 0; i < m; i++)
            wrong += memcmp((char *)part + (size_t)(i * n) * size, (char *)whole + (size_t)((i0 + i) * N + j0) * size,
                (size_t)n * size) != 0;
    }
    CHECK_MSG(wrong == 0, "matmul %s %s (%lld,%lld,%lld): %d rows have other bits in a part of the product",
        isa_name[isa], dt_dtype_name(type), (long long)M, (long long)N, (long long)K, wrong);
    free(a);
    free(b);
    free(whole);
    free(part);
    free(work);
    free(bias);
}

/* What a set of kernels makes of the same inputs, one after the other into `out`: all sets must make the same bits.
   (Matrix products excepted: the plain set has no fused multiply-add.) */
enum { K_ROWS = 19, K_COLS = 37, K_N = K_ROWS * K_COLS, K_OUT = 12 * K_N };

static void *next(char **at, size_t bytes) {
    *at += bytes;
    return *at - bytes;
}

static void *copied(char **at, const void *from, size_t bytes) { return memcpy(next(at, bytes), from, bytes); }

static void elementwise_kernels(const dt__variant *v, dt_dtype type, char *out) {
    size_t n = K_N, bytes = n * dt_dtype_size(type);
    void  *x = noise_array(type, n, 1), *y = noise_array(type, n, 2), *z = noise_array(type, n, 3);
    const void *in[3] = { x, y, z };
    for (size_t i = 0; i < n; i++) put(x, type, (int64_t)i, 8 * get(x, type, (int64_t)i)); /* gelu's far ends too */
    char *at = out;
    dt_gelu_args gelu = { type, next(&at, bytes), x, n };
    dt_gelu_back_args gelu_back = { type, copied(&at, z, bytes), y, x, n, 1 };
    dt_add_args add = { type, next(&at, bytes), x, y, K_ROWS, K_COLS };
    dt_init_args init = { type, next(&at, bytes), n, 1, 0.5, 12345, 77 };
    dt_column_sum_args column = { type, copied(&at, z, bytes), x, K_ROWS, K_COLS, 1 };
    dt_reduce_args reduce = { type, next(&at, bytes), in, 3, n, DT_AVG };
    dt_fill_args fill = { type, next(&at, bytes), n, 0.1 };
    CHECK(v->gelu(&gelu) == DT_OK && v->gelu_back(&gelu_back) == DT_OK && v->add(&add) == DT_OK);
    CHECK(v->init(&init) == DT_OK && v->column_sum(&column) == DT_OK && v->reduce(&reduce) == DT_OK);
    CHECK(v->fill(&fill) == DT_OK);
    void *m = next(&at, bytes), *second = memset(next(&at, bytes), 0, bytes);
    dt_sgd_args   sgd = { type, x, y, memcpy(m, z, bytes), n, 0.1, 0.9, 0.01, 0.5, 2 };
    dt_adamw_args adamw = { type, z, y, m, second, n, 0.01, 0.9, 0.99, 1e-8, 0.1, 0.5, 3, 0 };
    CHECK(v->sgd(&sgd) == DT_OK && v->adamw(&adamw) == DT_OK);
    memcpy(next(&at, bytes), x, bytes);
    copied(&at, z, bytes);
    for (int i = 0; i < 3; i++) free((void *)(uintptr_t)in[i]);
}

static void row_kernels(const dt__variant *v, dt_dtype type, char *out) {
    size_t  n = K_N, bytes = n * dt_dtype_size(type);
    void   *x = noise_array(type, n, 1), *y = noise_array(type, n, 2), *z = noise_array(type, n, 3);
    char   *at = out, *work = (char *)room(4 * bytes);
    double  row_loss[K_ROWS], sums[K_N / DT_RUN + 1], up = 0.7, *loss = (double *)(void *)out;
    int32_t labels[K_ROWS];
    for (int i = 0; i < K_ROWS; i++) labels[i] = i % 5 ? i % K_COLS : -1;
    at += bytes;
    dt_layernorm_args ln = { type, next(&at, bytes), next(&at, bytes), next(&at, bytes), x, y, z, K_ROWS, K_COLS,
        1e-5 };
    CHECK(v->layernorm(&ln) == DT_OK);
    dt_layernorm_back_args back = { type, copied(&at, z, bytes), next(&at, bytes), copied(&at, z, bytes), y, x, z,
        ln.mean, ln.rstd, K_ROWS, K_COLS, 1, 0, 1, work, dt_layernorm_work(K_COLS, type) };
    CHECK(v->layernorm_back(&back) == DT_OK);
    dt_cross_entropy_args ce = { type, loss, row_loss, next(&at, bytes), x, labels, K_ROWS, K_COLS, 3 };
    dt_cross_entropy_back_args ce_back = { type, copied(&at, z, bytes), x, ce.lse, labels, K_ROWS, K_COLS, &up, 0.3,
        1 };
    CHECK(v->cross_entropy(&ce) == DT_OK && v->cross_entropy_back(&ce_back) == DT_OK);
    dt_mse_args mse = { type, loss + 1, x, y, n, 3 };
    dt_mse_back_args mse_back = { type, copied(&at, z, bytes), x, y, n, &up, 0.3, 1 };
    dt_square_sums_args squares = { type, sums, x, n };
    CHECK(v->mse(&mse) == DT_OK && v->mse_back(&mse_back) == DT_OK && v->square_sums(&squares) == DT_OK);
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) loss[2 + i] = sums[i];
    free(x);
    free(y);
    free(z);
    free(work);
}

static void lookup_kernels(const dt__variant *v, dt_dtype type, char *out) {
    enum { B = 2, TQ = 19, TK = 23, H = 4, K = 2, D = 3 }; /* all smaller than K_N together */
    size_t  n = K_N, bytes = n * dt_dtype_size(type), work_bytes = dt_attention_work(TK, D, type);
    void   *x = noise_array(type, n, 1), *y = noise_array(type, n, 2), *z = noise_array(type, n, 3);
    char   *at = out, *work = (char *)room(work_bytes);
    int32_t ids[K_ROWS];
    for (int i = 0; i < K_ROWS; i++) ids[i] = i * 7 % 17;
    dt_embedding_args table = { type, next(&at, bytes), x, ids, K_ROWS, K_COLS, 3, 11, 17 };
    dt_embedding_back_args table_back = { type, copied(&at, z, bytes), y, ids, K_ROWS, K_COLS, 3, 11, 1 };
    CHECK(v->embedding(&table) == DT_OK && v->embedding_back(&table_back) == DT_OK);
    dt_attention_args a = { type, next(&at, bytes), next(&at, bytes), x, y, z, B, TQ, TK, H, K, D, 0.6, 1, work,
        work_bytes };
    dt_attention_back_args back = { type, next(&at, bytes), copied(&at, z, bytes), next(&at, bytes), x, a.out,
        a.lse, x, y, z, B, TQ, TK, H, K, D, 0.6, 1, 0, 1, 0, work, work_bytes };
    CHECK(v->attention(&a) == DT_OK && v->attention_back(&back) == DT_OK);
    a.work_bytes--;
    back.work_bytes--;
    CHECK(v->attention(&a) == DT_ERR_ARG && v->attention_back(&back) == DT_ERR_ARG);
    free(x);
    free(y);
    free(z);
    free(work);
}

static void same_bits(dt_dtype type) {
    static void (*const group[3])(const dt__variant *, dt_dtype, char *) = { elementwise_kernels, row_kernels,
        lookup_kernels };
    static const char *const name[3] = { "elementwise", "row", "lookup" };
    for (int g = 0; g < 3; g++) {
        char *plain = (char *)room(K_OUT * 8), *other = (char *)room(K_OUT * 8);
        group[g](dt__variant_of(type, DT__PLAIN), type, plain);
        for (int isa = 1; isa <= dt__isa_best(); isa++) {
            memset(other, 0, K_OUT * 8);
            group[g](dt__variant_of(type, isa), type, other);
            CHECK_MSG(memcmp(plain, other, K_OUT * 8) == 0, "%s kernels: other bits with %s, %s", name[g],
                isa_name[isa], dt_dtype_name(type));
        }
        free(plain);
        free(other);
    }
}

/* Every op of reduce on every type; the output is one of the inputs. */
static void reductions(void) {
    static const dt_dtype type[3] = { DT_F32, DT_F64, DT_I32 };
    for (int t = 0; t < 3; t++)
        for (int op = DT_SUM; op <= DT_PROD; op++) {
            enum { N = 1100, INPUTS = 3 };
            double  want[N];
            char    data[INPUTS][N * 8];
            void   *in[INPUTS];
            for (int r = 0; r < INPUTS; r++) {
                in[r] = data[r];
                for (int i = 0; i < N; i++) {
                    double x = 1 + below(40 + (uint64_t)r, (uint64_t)i, 9);
                    put(data[r], type[t], i, x);
                    if (r == 0) want[i] = x;
                    else if (op == DT_MAX) want[i] = fmax(want[i], x);
                    else if (op == DT_MIN) want[i] = fmin(want[i], x);
                    else want[i] = op == DT_PROD ? want[i] * x : want[i] + x;
                    if (op != DT_AVG || r < INPUTS - 1) continue;
                    want[i] = type[t] == DT_I32 ? floor(want[i] / 3) : want[i] / 3;
                    if (type[t] == DT_F32) want[i] = (double)(float)want[i];
                }
            }
            dt_reduce_args a = { type[t], data[1], (const void *const *)in, INPUTS, N, (dt_op)op };
            CHECK(dt_kernels_cpu()->reduce(&a, NULL) == DT_OK);
            int wrong = 0;
            for (int i = 0; i < N; i++) wrong += get(data[1], type[t], i) != want[i];
            CHECK_MSG(wrong == 0, "reduce %d of %s: %d wrong", op, dt_dtype_name(type[t]), wrong);
        }
    int32_t big = INT32_MAX, one = 1, sum = 0;
    const void *two[2] = { &big, &one };
    dt_reduce_args wrap = { DT_I32, &sum, two, 2, 1, DT_SUM };
    CHECK(dt_kernels_cpu()->reduce(&wrap, NULL) == DT_OK && sum == INT32_MIN);
    wrap.dtype = DT_BF16;
    CHECK(dt_kernels_cpu()->reduce(&wrap, NULL) == DT_ERR_UNSUPPORTED);
    char from[24] = "abcdefghijklmnopqrstuvw", to[24] = "-----------------------";
    dt_copy_args copy = { to, from, 3, 2, 5, 7 };
    CHECK(dt_kernels_cpu()->copy(&copy, NULL) == DT_OK && !strcmp(to, "ab---hi---op-----------"));
}

/* Our exp, log and gelu at the ends of their ranges. */
static void far_values(void) {
    double worst_exp = 0, worst_log = 0;
    for (int i = 0; i <= 200000; i++) {
        float x = -87.0f + 175.0f * (float)i / 200000.0f, y = (float)exp((double)x);
        worst_exp = fmax(worst_exp, fabs((double)dt__expf(x) - exp((double)x)) / ((double)y * 5.96e-8));
        if (y >= 3e38f) continue;
        double exact = log((double)y);
        worst_log = fmax(worst_log, fabs((double)dt__logf(y) - exact) / fmax(fabs(exact), 0.1));
    }
    CHECK_MSG(worst_exp <= 2.2 && worst_log < 1.3e-7, "exp: %.2f half units, log: %.2g", worst_exp, worst_log);
    CHECK(dt__expf(0) == 1 && dt__expf(-INFINITY) == 0 && isinf(dt__expf(INFINITY)) && isnan(dt__expf(NAN)));
    CHECK(dt__expf(-103.0f) > 0 && isinf(dt__expf(89.0f)));
    CHECK(dt__logf(1) == 0 && isinf(dt__logf(0)) && isnan(dt__logf(-1)) && isinf(dt__logf(INFINITY)));
    CHECK(isnan(dt__logf(NAN)) && fabs((double)dt__logf(1e-44f) - log((double)1e-44f)) < 2e-5);
    static const double x[6] = { 1e4, -1e4, 1e30, -1e30, 0, NAN }, y[6] = { 1e4, 0, 1e30, 0, 0, NAN };
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < 6; i++) {
            dt_dtype type = t ? DT_F64 : DT_F32;
            double   in = 0, out = 7, dx = 7, dy = 0;
            put(&in, type, 0, x[i]);
            put(&dy, type, 0, 1);
            dt_gelu_args f = { type, &out, &in, 1 };
            dt_gelu_back_args b = { type, &dx, &dy, &in, 1, 0 };
            CHECK(dt_kernels_cpu()->gelu(&f, NULL) == DT_OK && dt_kernels_cpu()->gelu_back(&b, NULL) == DT_OK);
            CHECK(isnan(x[i]) ? isnan(get(&out, type, 0)) : get(&out, type, 0) == (t ? y[i] : (double)(float)y[i]));
            CHECK(isnan(x[i]) ? isnan(get(&dx, type, 0)) : get(&dx, type, 0) == (x[i] > 0 ? 1 : x[i] < 0 ? 0 : 0.5));
        }
}

static void test_kernels(void) {
    for (int isa = 0; isa < DT__ISAS; isa++) {
        if (isa > dt__isa_best() || !dt__variant_of(DT_F32, isa)) {
            char text[64];
            snprintf(text, sizeof text, "kernels with %s: not on this machine", isa_name[isa]);
            check_skip(text);
            continue;
        }
        for (int t = 0; t < 2; t++) {
            products(t ? DT_F64 : DT_F32, isa);
            product_bits(t ? DT_F64 : DT_F32, isa, 45, 71, 129);
            product_bits(t ? DT_F64 : DT_F32, isa, 461, 37, 600);
            product_bits(t ? DT_F64 : DT_F32, isa, 15, 541, 520);
        }
    }
    same_bits(DT_F32);
    same_bits(DT_F64);
    reductions();
    far_values();
}

// ==== 9. Memory =====================================================================================================

/* A program that uses every op: a small GPT, two micro-batches a step, a side loss, an own op, a frozen parameter. */
enum { P_STEPS = 2, P_MICROS = 2, P_B = 2, P_T = 5 };
static const gpt_config small_gpt = { .layers = 2, .width = 12, .heads = 3, .kv_heads = 1, .ffn = 20, .seq = 8,
    .vocab = 17, .tied = 1 };

typedef struct program { gpt model; dt_tensor *extra, *still; } program;

static program program_make(dt_ctx *ctx, gpt_config config) {
    program p = { .model = gpt_register(ctx, config) };
    p.extra = dt_param(ctx, "extra", DT_SHAPE(3, 12), DT_UNIFORM(0.5));
    p.still = dt_param_at(ctx, "still", DT_SHAPE(12), DT_NORMAL(0.5), (dt_param_desc){ .frozen = 1 });
    return p;
}

static double program_step(dt_ctx *ctx, program *p, int step) {
    double total = 0;
    dt_clear_grads(ctx);
    for (int micro = 0; micro < P_MICROS; micro++) {
        int32_t ids[P_B * P_T], labels[P_B * P_T];
        for (int i = 0; i < P_B * P_T; i++) {
            ids[i] = below(90 + (uint64_t)step, (uint64_t)(micro * 100 + i), 17);
            labels[i] = i % 4 == 3 ? -1 : ids[i];
        }
        dt_micro(ctx, micro, P_MICROS);
        dt_tensor *id = dt_input(ctx, DT_I32, DT_SHAPE(P_B, P_T), ids);
        dt_tensor *label = dt_input(ctx, DT_I32, DT_SHAPE(P_B, P_T), labels);
        dt_tensor *side = dt_mse(dt_add(p->extra, p->still), noise_input(ctx, DT_F32, DT_SHAPE(3, 12), 4, 1), 4);
        dt_tensor *logits = dt_loss(gpt_logits(&p->model, id), weigh(dt_gelu(p->extra), NULL), 0.1);
        dt_tensor *loss = dt_cross_entropy(dt_loss(logits, side, 0.1), label, 14);
        if (step % 2) dt_backward(loss);
        else dt_backward_input(loss), dt_backward_weight(loss);
        total += dt_item(loss) + 0.1 * dt_item(side);
        dt_reset(ctx);
    }
    return total;
}

static void same_account(const dt_ctx *ctx, const meter *m, const char *when) {
    dt_memory used = dt_memory_used(ctx);
    size_t    sum = 0;
    for (int i = 0; i < DT_MEM_CLASSES; i++) {
        CHECK_MSG(used.live[i] == m->live[i], "%s: class %d: %zu bytes, and the table says %zu", when, i, used.live[i],
            m->live[i]);
        CHECK_MSG(used.peak[i] == m->peak[i], "%s: class %d: peak %zu, and the table says %zu", when, i, used.peak[i],
            m->peak[i]);
        sum += used.live[i];
    }
    CHECK_MSG(used.live_total == sum && sum == m->live_total, "%s: %zu bytes in all, %zu", when, used.live_total, sum);
    CHECK_MSG(used.peak_total == m->peak_total, "%s: peak %zu, %zu", when, used.peak_total, m->peak_total);
    CHECK_MSG(used.allocations == m->calls, "%s: %zu allocations, %zu", when, used.allocations, m->calls);
}

static void memory_account(gpt_config config) {
    meter   m = METER;
    dt_ctx *ctx = open_ctx(&m);
    printf("an idle context: %zu bytes\n", m.live_total);
    CHECK(m.live_total == m.live[DT_MEM_HOST] && m.calls == 1);
    same_account(ctx, &m, "idle");
    program p = program_make(ctx, config);
    same_account(ctx, &m, "registered");
    CHECK(m.live[DT_MEM_PARAMS] == 0);
    CHECK(dt_units_make(ctx, (dt_units_desc){ .bucket_bytes = 2048, .pad = 64 }) == DT_OK);
    same_account(ctx, &m, "with storage");
    size_t params = 0, grads = 0, passing = 0;
    for (int u = 0; u < dt_unit_count(ctx); u++) {
        const dt_unit *unit = dt_unit_get(ctx, u);
        params += unit->padded * 4;
        grads += unit->frozen ? 0 : unit->padded * 4;
    }
    CHECK(m.live[DT_MEM_PARAMS] == params && m.live[DT_MEM_GRADS] == 0);
    for (int step = 0; step < 5; step++) {
        size_t calls = m.calls;
        program_step(ctx, &p, step);
        same_account(ctx, &m, "after a step");
        CHECK(m.live[DT_MEM_GRADS] == grads && m.live[DT_MEM_PARAMS] == params);
        if (step == 1) passing = m.live[DT_MEM_COMM];
        if (step >= 2 && !DT__ASAN) CHECK_MSG(m.calls == calls, "step %d allocates %zu times", step, m.calls - calls);
        if (step >= 2) CHECK(m.live[DT_MEM_COMM] == passing);
    }
    printf("a program's bytes: params %zu grads %zu acts %zu comm %zu host %zu temp %zu, %zu allocations\n",
        m.live[DT_MEM_PARAMS], m.live[DT_MEM_GRADS], m.live[DT_MEM_ACTS], m.live[DT_MEM_COMM], m.live[DT_MEM_HOST],
        m.live[DT_MEM_TEMP], m.calls);
    dt_memory_reset_peak(ctx);
    CHECK(dt_memory_used(ctx).peak_total == m.live_total);
    void *mine = dt_alloc(ctx, DT_MEM_OPTIM, 1000, "optimizer");
    CHECK(mine && m.live[DT_MEM_OPTIM] == 1000 && dt_memory_used(ctx).live[DT_MEM_OPTIM] == 1000);
    dt_free(ctx, DT_MEM_OPTIM, mine, 1000);
    CHECK(dt_memory_used(ctx).live[DT_MEM_OPTIM] == 0 && dt_memory_used(ctx).peak[DT_MEM_OPTIM] == 1000);
    CHECK(dt_alloc(ctx, DT_MEM_TEMP, 0, "nothing") == NULL && dt_error(ctx) == DT_OK);
    close_good(ctx, &m, "the account");
}

/* Blocks of very unequal size, odd and even numbers of them: how many steps until nothing is allocated. */
static dt_tensor *thin_block(dt_tensor *x, void *user) {
    const int64_t *width = (const int64_t *)user;
    dt_tensor *h = dt_gelu(dt_linear(x, noise_input(x->ctx, DT_F32, DT_SHAPE(width[0], 64), 5, 0.1), NULL));
    return dt_linear(h, noise_input(x->ctx, DT_F32, DT_SHAPE(64, width[0]), 6, 0.1), NULL);
}

static void steady_state(void) {
    static const int64_t width[7] = { 3000, 7, 500, 2000, 1, 4000, 64 };
    for (int blocks = 1; blocks <= 7; blocks++) {
        meter      m = METER;
        dt_ctx    *ctx = open_ctx(&m);
        dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(64, 64), DT_NORMAL(0.1));
        size_t     last = 0;
        int        settled = 0;
        for (int step = 0; step < 8; step++) {
            size_t     calls = m.calls;
            dt_tensor *x = dt_linear(noise_input(ctx, DT_F32, DT_SHAPE(5, 64), 7, 1), w, NULL);
            for (int b = 0; b < blocks; b++) x = dt_block(ctx, thin_block, x, (void *)(uintptr_t)&width[b]);
            dt_backward(weigh(x, NULL));
            dt_reset(ctx);
            dt_clear_grads(ctx);
            if (m.calls != calls) settled = step + 1;
            last = m.calls - calls;
        }
        CHECK_MSG(DT__ASAN || last == 0, "%d unequal blocks: the eighth step still allocates", blocks);
        if (blocks == 7) printf("7 unequal blocks: steady after %d steps\n", settled);
        close_good(ctx, &m, "unequal blocks");
    }
}

/* Refuses each allocation of the program in turn, once or from there on. */
static void memory_refused(gpt_config config) {
    int cases = 0;
    for (int sticky = 0; sticky < 2; sticky++)
        for (int at = 0;; at++) {
            meter m = { .refuse_in = at, .sticky = sticky };
            dt_ctx *ctx = open_ctx(&m);
            if (at == 0) {
                CHECK(ctx == NULL && dt_error(ctx) == DT_ERR_MEM && strstr(dt_error_text(ctx), "memory"));
                dt_ctx_free(ctx);
                continue;
            }
            double  value = 0;
            program p = program_make(ctx, config);
            for (int step = 0; step < P_STEPS; step++) value += program_step(ctx, &p, step);
            int refused = m.refused;
            if (refused) {
                CHECK_MSG(dt_error(ctx) == DT_ERR_MEM, "allocation %d refused: %s", at, dt_error_text(ctx));
                CHECK_MSG(strstr(dt_error_text(ctx), "bytes of class") && strstr(dt_error_text(ctx), "rank 3"),
                    "allocation %d refused: %s", at, dt_error_text(ctx));
                CHECK_MSG(m.errors == 1, "allocation %d refused: %d lines of error", at, m.errors);
                CHECK_MSG(isnan(value), "allocation %d refused: the losses sum to %g", at, value);
                CHECK(dt_input(ctx, DT_F32, DT_SHAPE(2), NULL) == NULL && dt_work(ctx, 8) == NULL);
                CHECK(dt_gelu(p.extra) == NULL && dt_param(ctx, "late", DT_SHAPE(1), DT_ONES) == NULL);
                cases++;
            } else {
                CHECK_MSG(dt_error(ctx) == DT_OK && isfinite(value), "nothing was refused: %s", dt_error_text(ctx));
            }
            close_ctx(ctx, &m, "refused memory");
            if (!refused) break;
        }
    printf("memory refused in %d places\n", cases);
    CHECK(cases > 40);
}

static void test_memory(void) {
    for (int recompute = GPT_RECOMPUTE_NONE; recompute <= GPT_RECOMPUTE_FULL; recompute++) {
        gpt_config config = small_gpt;
        config.recompute = recompute;
        memory_account(config);
        memory_refused(config);
    }
    steady_state();
}

// ==== 10. Errors ====================================================================================================

/* Everything an error row may need, made before it runs. */
typedef struct scene {
    dt_ctx    *ctx;
    dt_tensor *w, *b, *gain, *table, *w64, *cube;   /* (4,3) (4) (3) (5,3) f64 (4,3) (2,2,2) */
    dt_tensor *x, *x64, *deep, *ids, *scalar, *stranger;
} scene;

static dt_tensor *ints(dt_ctx *ctx, int32_t a, int32_t b) {
    int32_t both[2] = { a, b };
    return dt_input(ctx, DT_I32, DT_SHAPE(2), both);
}

static scene scene_make(dt_ctx *ctx, dt_ctx *other) {
    scene s = { .ctx = ctx };
    s.w = dt_param(ctx, "the_w", DT_SHAPE(4, 3), DT_NORMAL(1));
    s.b = dt_param(ctx, "the_b", DT_SHAPE(7), DT_ZEROS);
    s.gain = dt_param(ctx, "the_gain", DT_SHAPE(3), DT_ONES);
    s.table = dt_param(ctx, "the_table", DT_SHAPE(5, 3), DT_NORMAL(1));
    s.w64 = dt_param_at(ctx, "the_w64", DT_SHAPE(4, 3), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F64 });
    s.cube = dt_param(ctx, "the_cube", DT_SHAPE(2, 2, 3), DT_NORMAL(1));
    s.x = noise_input(ctx, DT_F32, DT_SHAPE(2, 3), 1, 1);
    s.x64 = noise_input(ctx, DT_F64, DT_SHAPE(2, 5), 1, 1);
    s.deep = noise_input(ctx, DT_F32, DT_SHAPE(1, 1, 1, 1, 2, 3), 1, 1);
    s.ids = ints(ctx, 1, 2);
    s.scalar = noise_input(ctx, DT_F32, DT_SCALAR, 1, 1);
    s.stranger = dt_param(other, "the_stranger", DT_SHAPE(4, 3), DT_NORMAL(1));
    return s;
}

static dt_tensor *a_loss(scene *s) {
    return dt_mse(dt_linear(s->x, s->w, NULL), noise_input(s->ctx, DT_F32, DT_SHAPE(2, 4), 2, 1), 1);
}

static void e_linear(scene *s) { dt_linear(noise_input(s->ctx, DT_F32, DT_SHAPE(2, 5), 1, 1), s->w, NULL); }
static void e_linear_bias(scene *s) { dt_linear(s->x, s->w, s->b); }
static void e_linear_type(scene *s) { dt_linear(noise_input(s->ctx, DT_F64, DT_SHAPE(2, 3), 1, 1), s->w, NULL); }
static void e_linear_flat(scene *s) { dt_linear(s->x, s->gain, NULL); }
static void e_linear_deep(scene *s) { dt_linear(s->deep, s->cube, NULL); }
static void e_linear_ints(scene *s) { dt_linear(s->ids, s->w, NULL); }
static void e_stranger(scene *s) { dt_linear(s->x, s->stranger, NULL); }
static void e_embedding_table(scene *s) { dt_embedding(s->cube, s->ids); }
static void e_embedding_ids(scene *s) { dt_embedding(s->table, s->x); }
static void e_embedding_high(scene *s) { dt_embedding(s->table, ints(s->ctx, 0, 5)); }
static void e_embedding_low(scene *s) { dt_embedding(s->table, ints(s->ctx, -1, 0)); }
static void e_layernorm_gain(scene *s) { dt_layernorm(s->x, s->b, s->gain, 0); }
static void e_layernorm_bias(scene *s) { dt_layernorm(s->x, s->gain, s->b, 0); }
static void e_add(scene *s) { dt_add(s->x, s->b); }
static void e_add_longer(scene *s) { dt_add(s->x, s->cube); }
static void e_add_type(scene *s) { dt_add(s->x, s->w64); }
static void e_add_ints(scene *s) { dt_add(s->ids, s->ids); }
static void e_reshape(scene *s) { dt_reshape(s->w, DT_SHAPE(5, 3)); }
static void e_gelu_ints(scene *s) { dt_gelu(s->ids); }

static dt_tensor *heads(scene *s, int64_t t, int64_t h) {
    return noise_input(s->ctx, DT_F32, DT_SHAPE(1, t, h, 2), 1, 1);
}
static void e_attention_heads(scene *s) {
    dt_attention(heads(s, 3, 5), heads(s, 4, 2), heads(s, 4, 2), (dt_attn_desc){ 0 });
}
static void e_attention_kv(scene *s) {
    dt_attention(heads(s, 3, 2), heads(s, 4, 2), heads(s, 5, 2), (dt_attn_desc){ 0 });
}
static void e_attention_desc(scene *s) {
    dt_attention(heads(s, 3, 2), heads(s, 4, 2), heads(s, 4, 2), (dt_attn_desc){ .kv_heads = 1 });
}
static void e_attention_flat(scene *s) { dt_attention(s->x, heads(s, 4, 2), heads(s, 4, 2), (dt_attn_desc){ 0 }); }
static void e_attention_positions(scene *s) {
    dt_attention(heads(s, 3, 2), heads(s, 3, 2), heads(s, 3, 2), (dt_attn_desc){ .positions = s->ids });
}
static void e_attention_documents(scene *s) {
    dt_attention(heads(s, 3, 2), heads(s, 3, 2), heads(s, 3, 2), (dt_attn_desc){ .documents = s->ids });
}

static void e_label_high(scene *s) { dt_cross_entropy(s->x, ints(s->ctx, 0, 3), 2); }
static void e_label_count(scene *s) { dt_cross_entropy(s->x, dt_input(s->ctx, DT_I32, DT_SHAPE(3), NULL), 2); }
static void e_label_type(scene *s) { dt_cross_entropy(s->x, s->gain, 2); }
static void e_denominator_zero(scene *s) { dt_cross_entropy(s->x, s->ids, 0); }
static void e_denominator_below(scene *s) { dt_cross_entropy(s->x, s->ids, -2); }
static void e_denominator_nan(scene *s) { dt_mse(s->x, s->x, NAN); }
static void e_denominator_infinite(scene *s) { dt_mse(s->x, s->x, INFINITY); }
static void e_mse_shape(scene *s) { dt_mse(s->x, s->w, 1); }
static void e_mse_type(scene *s) { dt_mse(s->w, s->w64, 1); }
static void e_mse_ints(scene *s) { dt_mse(s->ids, s->ids, 1); }
static void e_loss_shape(scene *s) { dt_loss(s->x, s->gain, 1); }
static void e_loss_ints(scene *s) { dt_loss(s->x, dt_input(s->ctx, DT_I32, DT_SCALAR, NULL), 1); }

static void e_input_type(scene *s) { dt_input(s->ctx, DT_BF16, DT_SHAPE(2), NULL); }
static void e_input_below(scene *s) { dt_input(s->ctx, DT_F32, DT_SHAPE(2, -3), NULL); }
static void e_input_deep(scene *s) { dt_input(s->ctx, DT_F32, (dt_shape){ 7, { 1, 1, 1, 1, 1, 1 } }, NULL); }
static void e_micro(scene *s) { dt_micro(s->ctx, 2, 2); }
static void e_micro_zero(scene *s) { dt_micro(s->ctx, 0, 0); }

static void e_late(scene *s) {
    dt_linear(s->x, s->w, NULL);
    dt_param(s->ctx, "the_late", DT_SHAPE(2), DT_ZEROS);
}
static void e_units_twice(scene *s) {
    dt_units_make(s->ctx, (dt_units_desc){ 0, 0 });
    dt_units_make(s->ctx, (dt_units_desc){ 0, 0 });
}
static void e_taken(scene *s) { dt_param(s->ctx, "the_w", DT_SHAPE(2), DT_ZEROS); }
static void e_taken_scope(scene *s) {
    dt_scope(s->ctx, "the_");
    dt_param(s->ctx, "w", DT_SHAPE(2), DT_ZEROS);
}
static void e_param_bf16(scene *s) {
    dt_param_at(s->ctx, "the_half", DT_SHAPE(2), DT_ZEROS, (dt_param_desc){ .dtype = DT_BF16 });
}
static void e_param_ints(scene *s) {
    dt_param_at(s->ctx, "the_int", DT_SHAPE(2), DT_ZEROS, (dt_param_desc){ .dtype = DT_I32 });
}
static void e_param_empty(scene *s) { dt_param(s->ctx, "the_empty", DT_SHAPE(2, 0), DT_ZEROS); }
static void e_param_deep(scene *s) { dt_param(s->ctx, "the_deep", (dt_shape){ 7, { 1, 1, 1, 1, 1, 1 } }, DT_ZEROS); }
static void e_param_nameless(scene *s) { dt_param(s->ctx, "", DT_SHAPE(2), DT_ZEROS); }
static void e_param_null(scene *s) {
    const char *volatile name = NULL; /* volatile: the compiler would warn, not knowing that dt_param looks */
    dt_param(s->ctx, name, DT_SHAPE(2), DT_ZEROS);
}
static void e_param_cut(scene *s) {
    dt_group g = { 0, 2 };
    dt_param_at(s->ctx, "the_cut", DT_SHAPE(4, 2), DT_ZEROS, (dt_param_desc){ .cuts = { cut(&g, 2) } });
}

static void e_backward_twice(scene *s) {
    dt_tensor *loss = a_loss(s);
    dt_backward(loss);
    dt_backward(loss);
}
static void e_backward_shape(scene *s) { dt_backward(dt_linear(s->x, s->w, NULL)); }
static void e_backward_leaf(scene *s) { dt_backward(dt_mse(s->x, s->x, 1)); }
static void e_backward_no_grad(scene *s) {
    dt_no_grad(s->ctx, 1);
    dt_backward(a_loss(s));
}
static void e_forward_after(scene *s) {
    dt_backward(a_loss(s));
    dt_linear(s->x, s->w, NULL);
}
static dt_status failing_back(dt_node *n) {
    (void)n;
    return DT_ERR_NUMERIC;
}
static void e_own_backward(scene *s) {
    dt_tensor *out = dt_new(s->ctx, DT_F64, DT_SCALAR), *h = dt_linear(s->x, s->w, NULL);
    dt_backward(dt_record(out, (dt_record_desc){ .name = "my_op", .in = { h }, .backward = failing_back }));
}
static void e_fail_twice(scene *s) {
    dt_fail(s->ctx, DT_ERR_NUMERIC, "first %d", 1);
    dt_fail(s->ctx, DT_ERR_IO, "second %d", 2);
}

typedef struct error_row {
    void      (*run)(scene *s);
    dt_status   status;
    const char *text[3];    /* parts of the text */
} error_row;

static const error_row error_rows[] = {
    { e_linear, DT_ERR_SHAPE, { "the_w", "(2,5)", "(4,3)" } },
    { e_linear_bias, DT_ERR_SHAPE, { "the_b", "(7)", "(4,3)" } },
    { e_linear_type, DT_ERR_SHAPE, { "the_w", "f64", "f32" } },
    { e_linear_flat, DT_ERR_SHAPE, { "the_gain", "(2,3)", "(3)" } },
    { e_linear_deep, DT_ERR_SHAPE, { "the_cube", "(1,1,1,1,2,3)", "(2,2,3)" } },
    { e_linear_ints, DT_ERR_SHAPE, { "the_w", "i32", "f32" } },
    { e_stranger, DT_ERR_ARG, { "the_stranger", "dt_linear", "another context" } },
    { e_embedding_table, DT_ERR_SHAPE, { "the_cube", "(2,2,3)", "(2)" } },
    { e_embedding_ids, DT_ERR_SHAPE, { "the_table", "(5,3)", "(2,3)" } },
    { e_embedding_high, DT_ERR_ARG, { "the_table", "embedding", "out of range" } },
    { e_embedding_low, DT_ERR_ARG, { "the_table", "embedding", "out of range" } },
    { e_layernorm_gain, DT_ERR_SHAPE, { "the_b", "(2,3)", "(7)" } },
    { e_layernorm_bias, DT_ERR_SHAPE, { "the_b", "(2,3)", "(7)" } },
    { e_add, DT_ERR_SHAPE, { "the_b", "(2,3)", "(7)" } },
    { e_add_longer, DT_ERR_SHAPE, { "the_cube", "(2,3)", "(2,2,3)" } },
    { e_add_type, DT_ERR_SHAPE, { "the_w64", "f32", "f64" } },
    { e_add_ints, DT_ERR_SHAPE, { "dt_add", "i32", "(2)" } },
    { e_reshape, DT_ERR_SHAPE, { "the_w", "(4,3)", "(5,3)" } },
    { e_gelu_ints, DT_ERR_UNSUPPORTED, { "gelu", NULL, NULL } },
    { e_attention_heads, DT_ERR_SHAPE, { "dt_attention", "(1,3,5,2)", "(1,4,2,2)" } },
    { e_attention_kv, DT_ERR_SHAPE, { "dt_attention", NULL, NULL } },
    { e_attention_desc, DT_ERR_SHAPE, { "dt_attention", "(1,3,2,2)", "(1,4,2,2)" } },
    { e_attention_flat, DT_ERR_SHAPE, { "dt_attention", "(2,3)", "(1,4,2,2)" } },
    { e_attention_positions, DT_ERR_UNSUPPORTED, { "dt_attention", "positions", NULL } },
    { e_attention_documents, DT_ERR_UNSUPPORTED, { "dt_attention", "documents", NULL } },
    { e_label_high, DT_ERR_ARG, { "cross_entropy", "out of range", NULL } },
    { e_label_count, DT_ERR_SHAPE, { "dt_cross_entropy", "(2,3)", "(3)" } },
    { e_label_type, DT_ERR_SHAPE, { "dt_cross_entropy", "(2,3)", "the_gain" } },
    { e_denominator_zero, DT_ERR_ARG, { "dt_cross_entropy", "denominator 0", NULL } },
    { e_denominator_below, DT_ERR_ARG, { "dt_cross_entropy", "denominator -2", NULL } },
    { e_denominator_nan, DT_ERR_ARG, { "dt_mse", "denominator", "nan" } },
    { e_denominator_infinite, DT_ERR_ARG, { "dt_mse", "denominator inf", NULL } },
    { e_mse_shape, DT_ERR_SHAPE, { "the_w", "(2,3)", "(4,3)" } },
    { e_mse_type, DT_ERR_SHAPE, { "the_w64", "f32", "f64" } },
    { e_mse_ints, DT_ERR_UNSUPPORTED, { "mse", NULL, NULL } },
    { e_loss_shape, DT_ERR_SHAPE, { "dt_loss", "the_gain", "(3)" } },
    { e_loss_ints, DT_ERR_SHAPE, { "dt_loss", "i32", NULL } },
    { e_input_type, DT_ERR_UNSUPPORTED, { "dt_input", "bf16", NULL } },
    { e_input_below, DT_ERR_SHAPE, { "dt_input", "(2,-3)", NULL } },
    { e_input_deep, DT_ERR_SHAPE, { "dt_input", "(1,1,1,1,1,1", NULL } },
    { e_micro, DT_ERR_ARG, { "dt_micro", "2 of 2", NULL } },
    { e_micro_zero, DT_ERR_ARG, { "dt_micro", "0 of 0", NULL } },
    { e_late, DT_ERR_ARG, { "the_late", "storage", NULL } },
    { e_units_twice, DT_ERR_ARG, { "dt_units_make", "storage", NULL } },
    { e_taken, DT_ERR_ARG, { "the_w", "taken", NULL } },
    { e_taken_scope, DT_ERR_ARG, { "the_w", "taken", NULL } },
    { e_param_bf16, DT_ERR_UNSUPPORTED, { "the_half", "bf16", NULL } },
    { e_param_ints, DT_ERR_UNSUPPORTED, { "the_int", "i32", NULL } },
    { e_param_empty, DT_ERR_SHAPE, { "the_empty", "(2,0)", NULL } },
    { e_param_deep, DT_ERR_SHAPE, { "the_deep", "7 dimensions", NULL } },
    { e_param_nameless, DT_ERR_ARG, { "dt_param", "name", NULL } },
    { e_param_null, DT_ERR_ARG, { "dt_param", "name", NULL } },
    { e_param_cut, DT_ERR_ARG, { "the_cut", "(4,2)", "dimension 2" } },
    { e_backward_twice, DT_ERR_ARG, { "dt_backward", "dt_mse", "dt_reset" } },
    { e_backward_shape, DT_ERR_SHAPE, { "dt_backward", "(2,4)", "scalar" } },
    { e_backward_leaf, DT_ERR_ARG, { "dt_backward", "dt_mse", "no parameter" } },
    { e_backward_no_grad, DT_ERR_ARG, { "dt_backward", "dt_mse", "no parameter" } },
    { e_forward_after, DT_ERR_ARG, { "dt_linear", "dt_reset", NULL } },
    { e_own_backward, DT_ERR_NUMERIC, { "my_op", NULL, NULL } },
    { e_fail_twice, DT_ERR_NUMERIC, { "first 1", NULL, NULL } },
};

/* After the failure: said once, to the log and to each listener, and nothing works any more, quietly. */
static void error_after(scene *s, const meter *m, const heard *h, const heard *h2) {
    char before[512];
    snprintf(before, sizeof before, "%s", dt_error_text(s->ctx));
    CHECK_MSG(m->errors == 1 && !strcmp(m->text, before), "%d lines of error: %s", m->errors, m->text);
    CHECK_MSG(h->failed == 1 && h2->failed == 1, "listeners heard %d and %d failures", h->failed, h2->failed);
    CHECK_MSG(!strncmp(before, "rank 3: ", 8), "no rank in %s", before);
    CHECK(dt_gelu(s->x) == NULL && dt_linear(s->x, s->w, NULL) == NULL && dt_embedding(s->table, s->ids) == NULL);
    CHECK(dt_reshape(s->x, DT_SHAPE(6)) == NULL && dt_add(s->x, s->x) == NULL && dt_mse(s->x, s->x, 1) == NULL);
    CHECK(dt_input(s->ctx, DT_F32, DT_SHAPE(1), NULL) == NULL && dt_new(s->ctx, DT_F32, DT_SHAPE(1)) == NULL);
    CHECK(dt_loss(s->x, s->scalar, 1) == NULL && dt_block(s->ctx, toy_block, s->x, s->w) == NULL);
    CHECK(dt_param(s->ctx, "another", DT_SHAPE(1), DT_ONES) == NULL && isnan(dt_item(s->scalar)));
    CHECK(dt_backward(s->scalar) == dt_error(s->ctx) && dt_read(s->x, NULL) == dt_error(s->ctx));
    CHECK(dt_gelu(NULL) == NULL && isnan(dt_item(NULL)));
    dt_clear_grads(s->ctx);
    dt_reset(s->ctx);
    dt_fail(s->ctx, DT_ERR_IO, "a second failure");
    CHECK(!strcmp(dt_error_text(s->ctx), before) && m->errors == 1 && h->failed == 1);
}

static void test_errors(void) {
    for (size_t i = 0; i < sizeof error_rows / sizeof *error_rows; i++) {
        const error_row *row = &error_rows[i];
        meter       m = METER, m_other = METER;
        dt_ctx     *ctx = open_ctx(&m), *other = open_ctx(&m_other);
        heard       h = { .micros = 1 }, h2 = { .micros = 1 };
        dt_listener l = LISTENER(&h), l2 = LISTENER(&h2);
        scene       s = scene_make(ctx, other);
        dt_listen(ctx, &l);
        dt_listen(ctx, &l2);
        CHECK_MSG(dt_error(ctx) == DT_OK && dt_error_text(ctx)[0] == 0, "row %zu: %s", i, dt_error_text(ctx));
        row->run(&s);
        CHECK_MSG(dt_error(ctx) == row->status, "row %zu: %s, not %s: %s", i, dt_status_name(dt_error(ctx)),
            dt_status_name(row->status), dt_error_text(ctx));
        for (int t = 0; t < 3; t++) {
            const char *part = row->text[t] ? row->text[t] : "";
            CHECK_MSG(strstr(dt_error_text(ctx), part), "row %zu: no \"%s\" in: %s", i, part, dt_error_text(ctx));
        }
        if (dt_error(ctx) != DT_OK) error_after(&s, &m, &h, &h2);
        close_ctx(ctx, &m, "a failed context");
        CHECK(h.closed == 1 && h2.closed == 1);
        close_good(other, &m_other, "the other context");
    }
    CHECK(!strcmp(dt_status_name(DT_ERR_SHAPE), "DT_ERR_SHAPE") && !strcmp(dt_dtype_name(DT_F16), "f16"));
    CHECK(dt_dtype_size(DT_F64) == 8 && dt_dtype_size(DT_BF16) == 2 && dt_dtype_size((dt_dtype)77) == 0);
    CHECK(dt_error(NULL) == DT_ERR_MEM && dt_backward(NULL) != DT_OK && dt_read(NULL, NULL) != DT_OK);
}

/* Who heard of another's failure keeps quiet; a listener that says the log was told already silences ours. */
static void quiet_failures(void) {
    for (int how = 0; how < 3; how++) {
        meter       m = METER;
        dt_ctx     *ctx = open_ctx(&m);
        heard       h = { .told = how == 1 }, h2 = { .micros = 1 };
        dt_listener l = LISTENER(&h), l2 = LISTENER(&h2);
        dt_listen(ctx, &l);
        dt_listen(ctx, &l2);
        CHECK(dt_fail(ctx, how == 2 ? DT_ERR_PEER : DT_ERR_IO, "disk %d", 5) == dt_error(ctx));
        CHECK(!strcmp(dt_error_text(ctx), "rank 3: disk 5") && h.failed == 1 && h2.failed == 1);
        CHECK_MSG(m.errors == (how == 0), "case %d: %d lines of error", how, m.errors);
        close_ctx(ctx, &m, "a quiet failure");
    }
}

/* Misuse that could crash or go on with wrong numbers. Each runs in a child and answers 1 when it was refused in time:
   by the context's first error, of that status. */
static meter   child_meter;
static dt_ctx *child_ctx(void) {
    child_meter = METER;
    return open_ctx(&child_meter);
}

static int refused(dt_ctx *ctx, dt_status status) {
    if (dt_error(ctx) != status) printf("   %s, not %s: %s\n", dt_status_name(dt_error(ctx)), dt_status_name(status),
        dt_error_text(ctx));
    int ok = dt_error(ctx) == status;
    dt_ctx_free(ctx);
    return ok && child_meter.live_total == 0;
}

static int h_backward_param(void) { /* nothing was recorded: there is no tape yet */
    dt_ctx *ctx = child_ctx();
    dt_backward(dt_param(ctx, "s", DT_SCALAR, DT_ONES));
    return refused(ctx, DT_ERR_ARG);
}

static int h_weight_param(void) {
    dt_ctx *ctx = child_ctx();
    dt_backward_weight(dt_param(ctx, "s", DT_SCALAR, DT_ONES));
    return refused(ctx, DT_ERR_ARG);
}

static int h_weight_first(void) { /* would leave gradients of zero */
    dt_ctx *ctx = child_ctx();
    toy     t = toy_make(ctx, DT_F32);
    dt_backward_weight(toy_loss(ctx, &t, 0, USE_W1));
    return refused(ctx, DT_ERR_ARG);
}

static int h_weight_after(void) { /* would add every gradient twice */
    dt_ctx    *ctx = child_ctx();
    toy        t = toy_make(ctx, DT_F32);
    dt_tensor *loss = toy_loss(ctx, &t, 0, USE_W1);
    dt_backward(loss);
    dt_backward_weight(loss);
    return refused(ctx, DT_ERR_ARG);
}

static int h_weight_twice(void) {
    dt_ctx    *ctx = child_ctx();
    toy        t = toy_make(ctx, DT_F32);
    dt_tensor *loss = toy_loss(ctx, &t, 0, USE_W1);
    dt_backward_input(loss);
    dt_backward_weight(loss);
    dt_backward_weight(loss);
    return refused(ctx, DT_ERR_ARG);
}

static dt_tensor *backward_inside(dt_tensor *x, void *user) {
    dt_tensor *y = toy_block(x, user);
    dt_backward(weigh(y, NULL));
    return y;
}

static int h_backward_inside(void) { /* the block is not on the tape yet: its weight would get nothing */
    dt_ctx *ctx = child_ctx();
    toy     t = toy_make(ctx, DT_F32);
    dt_block(ctx, backward_inside, noise_input(ctx, DT_F32, DT_SHAPE(2, 5), 1, 1), t.w[0]);
    return refused(ctx, DT_ERR_ARG);
}

static dt_tensor *reset_inside(dt_tensor *x, void *user) {
    dt_reset(x->ctx);
    return toy_block(noise_input(x->ctx, DT_F32, DT_SHAPE(2, 5), 1, 1), user);
}

static int h_reset_inside(void) {
    dt_ctx *ctx = child_ctx();
    toy     t = toy_make(ctx, DT_F32);
    dt_block(ctx, reset_inside, noise_input(ctx, DT_F32, DT_SHAPE(2, 5), 1, 1), t.w[0]);
    return refused(ctx, DT_ERR_ARG);
}

static int h_reshape_deep(void) {
    dt_ctx *ctx = child_ctx();
    dt_shape shape = { 1000, { 1, 1, 1, 1, 1, 1 } };
    dt_reshape(noise_input(ctx, DT_F32, DT_SHAPE(1), 1, 1), shape);
    return refused(ctx, DT_ERR_SHAPE);
}

static int h_reshape_below(void) {
    dt_ctx *ctx = child_ctx();
    dt_reshape(noise_input(ctx, DT_F32, DT_SHAPE(2, 3), 1, 1), DT_SHAPE(-2, -3));
    return refused(ctx, DT_ERR_SHAPE);
}

static int h_count_wraps(void) { /* 2^66 elements, which is 0 in 64 bits */
    dt_ctx *ctx = child_ctx();
    dt_input(ctx, DT_F32, DT_SHAPE((int64_t)1 << 33, (int64_t)1 << 33), NULL);
    return refused(ctx, DT_ERR_SHAPE);
}

static int h_bytes_wrap(void) { /* 2^62 doubles are 2^65 bytes */
    dt_ctx *ctx = child_ctx();
    dt_new(ctx, DT_F64, DT_SHAPE((int64_t)1 << 62));
    return refused(ctx, DT_ERR_SHAPE);
}

static int h_param_wraps(void) {
    dt_ctx *ctx = child_ctx();
    dt_param(ctx, "w", DT_SHAPE((int64_t)1 << 33, (int64_t)1 << 33), DT_ZEROS);
    return refused(ctx, DT_ERR_SHAPE);
}

static int h_too_many_inputs(void) {
    dt_ctx    *ctx = child_ctx();
    dt_tensor *x = dt_require_grad(noise_input(ctx, DT_F32, DT_SHAPE(1), 1, 1));
    dt_record(dt_new(ctx, DT_F64, DT_SCALAR), (dt_record_desc){ .name = "many", .in = { x }, .n_in = 9,
        .backward = weigh_back });
    return refused(ctx, DT_ERR_ARG);
}

static int h_no_backward(void) {
    dt_ctx    *ctx = child_ctx();
    dt_tensor *x = dt_require_grad(noise_input(ctx, DT_F32, DT_SHAPE(1), 1, 1));
    dt_backward(dt_record(dt_new(ctx, DT_F64, DT_SCALAR), (dt_record_desc){ .name = "none", .in = { x } }));
    return refused(ctx, DT_ERR_ARG);
}

static int h_record_stranger(void) {
    meter      m = METER;
    dt_ctx    *ctx = child_ctx(), *other = open_ctx(&m);
    dt_tensor *x = dt_require_grad(noise_input(other, DT_F32, DT_SHAPE(1), 1, 1));
    dt_record(dt_new(ctx, DT_F64, DT_SCALAR), (dt_record_desc){ .name = "far", .in = { x }, .backward = weigh_back });
    dt_ctx_free(other);
    return refused(ctx, DT_ERR_ARG);
}

static dt_status ones_back(dt_node *n) {
    double *d = (double *)dt_grad(n, 0);
    for (int64_t i = 0; d && i < dt_count(n->in[0]->shape); i++) d[i] += *(double *)n->out->grad;
    return d ? DT_OK : dt_error(n->out->ctx);
}

static int h_own_op_first(void) { /* an own op is the first use of a parameter: it gets storage then */
    dt_ctx    *ctx = child_ctx();
    dt_tensor *w = dt_param_at(ctx, "w", DT_SHAPE(3), DT_ONES, (dt_param_desc){ .dtype = DT_F64 });
    dt_tensor *out = dt_new(ctx, DT_F64, DT_SCALAR);
    dt_record(out, (dt_record_desc){ .name = "ones", .in = { w }, .backward = ones_back });
    int ok = dt_backward(out) == DT_OK && w->grad && ((double *)w->grad)[2] == 1;
    dt_param(ctx, "late", DT_SHAPE(2), DT_ZEROS);
    return refused(ctx, DT_ERR_ARG) && ok;
}

static int h_no_context(void) { /* dt_ctx_make answered NULL: a loop without checks must come to its end */
    dt_param(NULL, "w", DT_SHAPE(1), DT_ZEROS);
    dt_scope(NULL, "s");
    dt_units_make(NULL, (dt_units_desc){ 0, 0 });
    dt_micro(NULL, 0, 1);
    dt_backward(dt_input(NULL, DT_F32, DT_SHAPE(1), NULL));
    dt_block(NULL, toy_block, NULL, NULL);
    dt_no_grad(NULL, 1);
    dt_clear_grads(NULL);
    dt_reset(NULL);
    dt_ctx_free(NULL);
    return dt_param_count(NULL) == 0 && dt_unit_count(NULL) == 0 && !dt_param_find(NULL, "w") && !dt_param_get(NULL, 0);
}

static dt_tensor *leaf_inside(dt_tensor *x, void *user) {
    dt_tensor **leaf = (dt_tensor **)user;
    *leaf = dt_require_grad(noise_input(x->ctx, DT_F64, DT_SHAPE(2, 5), 2, 1));
    return dt_gelu(times(x, *leaf));
}

static int h_leaf_inside(void) { /* "t->grad after the backward, until dt_reset", in a block too */
    dt_ctx    *ctx = child_ctx();
    dt_tensor *leaf[3], *x = dt_require_grad(noise_input(ctx, DT_F64, DT_SHAPE(2, 5), 1, 1)), *y = x;
    double     g[3];
    for (int i = 0; i < 3; i++) y = dt_block(ctx, leaf_inside, y, &leaf[i]);
    dt_backward(weigh(y, NULL));
    for (int i = 0; i < 3; i++) g[i] = ((double *)leaf[i]->grad)[0];
    int ok = leaf[0]->grad != leaf[1]->grad && leaf[0]->grad != leaf[2]->grad && g[0] != g[2];
    return refused(ctx, DT_OK) && ok && isfinite(g[0]) && isfinite(g[1]) && isfinite(g[2]);
}

static int h_grad_of_ints(void) {
    dt_ctx *ctx = child_ctx();
    dt_require_grad(ints(ctx, 1, 2));
    return refused(ctx, DT_ERR_ARG);
}

static void test_misuse(void) {
#define MISUSE(f) CHECK_MSG(survives(f), "misuse: %s", #f)
    MISUSE(h_backward_param);
    MISUSE(h_weight_param);
    MISUSE(h_weight_first);
    MISUSE(h_weight_after);
    MISUSE(h_weight_twice);
    MISUSE(h_backward_inside);
    MISUSE(h_reset_inside);
    MISUSE(h_reshape_deep);
    MISUSE(h_reshape_below);
    MISUSE(h_count_wraps);
    MISUSE(h_bytes_wrap);
    MISUSE(h_param_wraps);
    MISUSE(h_too_many_inputs);
    MISUSE(h_no_backward);
    MISUSE(h_record_stranger);
    MISUSE(h_own_op_first);
    MISUSE(h_no_context);
    MISUSE(h_leaf_inside);
    MISUSE(h_grad_of_ints);
#undef MISUSE
}

/* Each kernel taken out of a copied table in turn: the program stops at it, naming it. */
static void missing_kernels(void) {
    static const char *const unused[] = { "copy", "square_sums", "adamw", "sgd" };
#define TAKE_OUT(k) \
    do { \
        dt_kernels table = *dt_kernels_cpu(); \
        meter      m = METER; \
        char       name[64]; \
        int        used = 1; \
        table.name = "holed"; \
        table.k = NULL; \
        snprintf(name, sizeof name, "kernel %s on holed", #k); \
        for (int i = 0; i < 4; i++) used &= strcmp(unused[i], #k) != 0; \
        dt_ctx *ctx = open_with(&m, &table, 7); \
        program p = program_make(ctx, small_gpt); \
        for (int step = 0; step < P_STEPS; step++) program_step(ctx, &p, step); \
        CHECK_MSG(dt_error(ctx) == (used ? DT_ERR_UNSUPPORTED : DT_OK), "without %s: %s", name, dt_error_text(ctx)); \
        CHECK_MSG(!used || strstr(dt_error_text(ctx), name), "without %s: %s", name, dt_error_text(ctx)); \
        close_ctx(ctx, &m, name); \
    } while (0);
    DT_KERNELS(TAKE_OUT)
#undef TAKE_OUT
}

static int gelu_calls;
static dt_status my_gelu(const dt_gelu_args *a, void *stream) {
    gelu_calls += stream == &gelu_calls;
    for (size_t i = 0; i < a->count; i++) put(a->out, a->dtype, (int64_t)i, 2 * get(a->in, a->dtype, (int64_t)i));
    return DT_OK;
}

static void replaced_kernel(void) {
    dt_kernels table = *dt_kernels_cpu();
    table.gelu = my_gelu;
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .kernels = &table, .stream = &gelu_calls });
    table.gelu = NULL; /* the context has its own copy */
    float two = 2;
    CHECK(dt_item(dt_gelu(dt_input(ctx, DT_F32, DT_SCALAR, &two))) == 4 && gelu_calls == 1);
    CHECK(dt_ctx_kernels(ctx)->gelu == my_gelu && dt_ctx_stream(ctx) == &gelu_calls && dt_ctx_seed(ctx) == 1);
    dt_ctx_attach(ctx, &two);
    CHECK(dt_ctx_attached(ctx) == &two && dt_ctx_rank(ctx) == 0 && dt_error(ctx) == DT_OK);
    dt_ctx_free(ctx);
}

/* A reduction that fails while a gradient is added: nobody may be told that the gradient is ready. */
static int reduce_calls;
static dt_status failing_reduce(const dt_reduce_args *a, void *stream) {
    (void)a, (void)stream;
    reduce_calls++;
    return DT_ERR_DEVICE;
}

static void failing_kernel(void) {
    dt_kernels  table = *dt_kernels_cpu();
    meter       m = METER;
    heard       h = { .micros = 1 };
    dt_listener l = { .grad_ready = on_ready, .user = &h };
    table.reduce = failing_reduce;
    dt_ctx *ctx = open_with(&m, &table, 7);
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4, 3), DT_NORMAL(1));
    for (int micro = 0; micro < 2; micro++) {
        if (micro) dt_listen(ctx, &l);
        dt_backward(weigh(dt_linear(noise_input(ctx, DT_F32, DT_SHAPE(2, 3), 1, 1), w, NULL), NULL));
        dt_reset(ctx);
    }
    CHECK(dt_error(ctx) == DT_ERR_DEVICE && reduce_calls == 1 && strstr(dt_error_text(ctx), "reduce"));
    CHECK_MSG(h.text[0] == 0, "after the failure a listener heard %s", h.text);
    close_ctx(ctx, &m, "a failing kernel");
}

// ==== 11. The one-rank GPT ==========================================================================================

/* One parameter's gradient: n elements of the model's N, whose gradients' norm is `whole`. */
static void tensor_compare(const char *what, const char *name, const void *ours, dt_dtype dtype, const double *theirs,
    int64_t n, double share, double tolerance, double *worst) {
    double difference = 0, size = 0;
    if (!CHECK_MSG(ours && theirs, "%s: %s: nothing to compare", what, name)) return;
    for (int64_t i = 0; i < n; i++) {
        double d = get(ours, dtype, i) - theirs[i];
        difference += d * d;
        size += theirs[i] * theirs[i];
    }
    double error = sqrt(difference) / fmax(sqrt(size), share);
    if (!(error <= *worst)) *worst = error;
    CHECK_MSG(error <= tolerance, "%s: gradient of %s: error %.2g", what, name, error);
}

static int64_t model_count(const sg_model *s) {
    int64_t n = 0;
    for (int i = 0; i < s->n_params; i++) n += s->p[i].count;
    return n;
}

static void give_values(dt_ctx *ctx, sg_model *s, dt_dtype dtype) {
    for (int i = 0; i < s->n_params; i++) {
        dt_tensor *t = dt_param_find(ctx, s->p[i].name);
        if (!CHECK_MSG(t && dt_count(t->shape) == s->p[i].count, "parameter %s", s->p[i].name)) continue;
        void *x = room((size_t)s->p[i].count * 8);
        for (int64_t e = 0; e < s->p[i].count; e++) put(x, dtype, e, s->p[i].value[e]);
        dt_write(t, x);
        free(x);
    }
}

typedef struct gpt_test {
    golden    *g;
    char       what[64];
    int        micros, B, T;
    dt_dtype   dtype;
    double     tolerance, worst_loss, worst_grad;
} gpt_test;

static const double *step_array(const gpt_test *t, int step, const char *array) {
    char name[64];
    snprintf(name, sizeof name, "step.%d.%s", step, array);
    const double *x = golden_get(t->g, name, NULL);
    CHECK_MSG(x, "%s: no %s", t->what, name);
    return x;
}

/* One step of dt and of the serial model on the same data; then the serial model moves on. */
static void gpt_step(gpt_test *t, dt_ctx *ctx, gpt *model, sg_model *serial, int step) {
    const double *ids = step_array(t, step, "ids"), *labels = step_array(t, step, "labels");
    const double *denom = step_array(t, step, "denom"), *golden_loss = step_array(t, step, "loss");
    if (!ids || !labels || !denom || !golden_loss) return;
    int      n = t->B * t->T;
    int32_t *id = (int32_t *)room((size_t)n * 4), *label = (int32_t *)room((size_t)n * 4);
    double   ours = 0, theirs = 0;
    give_values(ctx, serial, t->dtype);
    sg_zero_grad(serial);
    dt_clear_grads(ctx);
    for (int micro = 0; micro < t->micros; micro++) {
        for (int i = 0; i < n; i++) {
            id[i] = (int32_t)ids[micro * n + i];
            label[i] = (int32_t)labels[micro * n + i];
        }
        theirs += sg_forward_backward(serial, id, label, t->B, t->T, *denom);
        dt_micro(ctx, micro, t->micros);
        dt_tensor *loss = gpt_loss(model, dt_input(ctx, DT_I32, DT_SHAPE(t->B, t->T), id),
            dt_input(ctx, DT_I32, DT_SHAPE(t->B, t->T), label), *denom);
        dt_backward(loss);
        ours += dt_item(loss);
        dt_reset(ctx);
    }
    free(id);
    free(label);
    double error = fmax(fabs(ours - theirs), fabs(ours - *golden_loss)) / fabs(theirs), norm = sg_grad_norm(serial);
    t->worst_loss = fmax(t->worst_loss, error);
    CHECK_MSG(error <= t->tolerance, "%s: step %d: loss %.17g, serial %.17g, stored %.17g", t->what, step, ours, theirs,
        *golden_loss);
    for (int i = 0; i < serial->n_params; i++) {
        const sg_param *p = &serial->p[i];
        const dt_tensor *w = dt_param_find(ctx, p->name);
        double share = norm * sqrt((double)p->count / (double)model_count(serial));
        char   name[64];
        tensor_compare(t->what, p->name, w ? w->grad : NULL, t->dtype, p->grad, p->count, share, t->tolerance,
            &t->worst_grad);
        snprintf(name, sizeof name, "grad.%s", p->name);
        if (step > 1) continue;
        tensor_compare(t->what, name, w ? w->grad : NULL, t->dtype, golden_get(t->g, name, NULL), p->count, share,
            t->tolerance, &t->worst_grad);
    }
    const double *lr = step_array(t, step, "lr"), *opt = golden_get(t->g, "optimizer", NULL);
    if (lr && opt) sg_adamw(serial, *lr, opt[0], opt[1], opt[2], opt[3], opt[4], step);
}

static void gpt_run(const char *file, dt_dtype dtype) {
    char     path[512];
    gpt_test t = { .dtype = dtype, .tolerance = dtype == DT_F64 ? 1e-12 : 1e-5 };
    snprintf(path, sizeof path, "%s/%s", golden_folder, file);
    snprintf(t.what, sizeof t.what, "%s %s", file, dt_dtype_name(dtype));
    t.g = golden_open(path);
    const double *z = golden_get(t.g, "sizes", NULL), *batch = golden_get(t.g, "batch", NULL);
    if (!CHECK_MSG(z && batch, "%s: %s", path, strerror(errno))) return;
    sg_sizes  sizes = { (int)z[0], (int)z[1], (int)z[2], (int)z[3], (int)z[4], (int)z[5], (int)z[6] };
    sg_model *serial = sg_make(sizes);
    meter     m = METER;
    dt_ctx   *ctx = open_ctx(&m);
    gpt       model = gpt_register(ctx, (gpt_config){ .layers = sizes.L, .width = sizes.C, .heads = sizes.H,
        .kv_heads = sizes.H, .ffn = sizes.F, .seq = sizes.T, .vocab = sizes.V, .tied = sizes.tied, .dtype = dtype });
    if (!serial) {
        puts("FAIL no memory for the test itself");
        exit(1);
    }
    sg_init(serial);
    CHECK(dt_param_count(ctx) == serial->n_params);
    t.micros = (int)batch[1];
    t.B = (int)batch[2];
    t.T = (int)batch[3];
    for (int step = 1; step <= (int)batch[0]; step++) gpt_step(&t, ctx, &model, serial, step);
    printf("%s: %d steps, worst error of a loss %.2g, of a gradient %.2g\n", t.what, (int)batch[0], t.worst_loss,
        t.worst_grad);
    close_good(ctx, &m, t.what);
    sg_free(serial);
    golden_free(t.g);
}

/* The same program twice: the same bits. */
static void same_again(void) {
    double value[2] = { 0, 0 };
    float  sum[2] = { 0, 0 };
    for (int i = 0; i < 2; i++) {
        meter   m = METER;
        dt_ctx *ctx = open_ctx(&m);
        program p = program_make(ctx, small_gpt);
        for (int step = 0; step < 3; step++) value[i] += program_step(ctx, &p, step);
        for (int k = 0; k < 17 * 12; k++) sum[i] = 3 * sum[i] / 4 + ((float *)p.model.wte->grad)[k];
        close_good(ctx, &m, "the same again");
    }
    CHECK(memcmp(&value[0], &value[1], 8) == 0 && memcmp(&sum[0], &sum[1], 4) == 0);
}

static void test_gpt(void) {
    gpt_run("gpt2_tied.bin", DT_F64);
    gpt_run("gpt2_untied.bin", DT_F64);
    gpt_run("gpt2_tied.bin", DT_F32);
    gpt_run("gpt2_untied.bin", DT_F32);
    same_again();
}

// ==== 12. Recomputation =============================================================================================

/* One graph with every kind of block, each plain or recomputed by a bit of `mask`; the numbers must not show which. */
enum { RC_LINEAR = 1, RC_VIEW = 2, RC_SAME = 4, RC_OUTSIDE = 8, RC_BARE = 16, RC_LEAF = 32, RC_OUTER = 64,
    RC_INNER = 128, RC_ALL = 255 };
typedef struct rc_graph {
    dt_tensor *w, *v, *outside, *leaf;
    int        mask, runs, first_runs;
} rc_graph;

static dt_tensor *rc_block(rc_graph *g, int bit, dt_block_fn fn, dt_tensor *x) {
    return dt_block_at(g->w->ctx, fn, x, g, (dt_block_desc){ .recompute = (g->mask & bit) != 0 });
}

/* A parameter, a tensor made outside, a side loss of its own. */
static dt_tensor *rc_linear(dt_tensor *x, void *user) {
    rc_graph *g = (rc_graph *)user;
    g->runs++;
    g->first_runs += !dt_recomputing(g->w->ctx);
    dt_tensor *y = dt_gelu(dt_linear(dt_add(x, g->outside), g->w, NULL));
    return dt_loss(y, dt_mse(y, g->outside, 3), 0.7);
}

static dt_tensor *rc_view(dt_tensor *x, void *user) {
    return dt_reshape(dt_linear(x, ((rc_graph *)user)->v, NULL), DT_SHAPE(6, 4));
}

/* The output is the input: nothing is copied, and the side loss is all there is to run again. */
static dt_tensor *rc_same(dt_tensor *x, void *user) {
    return dt_loss(x, weigh(dt_linear(x, ((rc_graph *)user)->v, NULL), NULL), 0.2);
}

static dt_tensor *rc_outside(dt_tensor *x, void *user) {
    rc_graph *g = (rc_graph *)user;
    return dt_loss(dt_reshape(g->outside, DT_SHAPE(4, 6)), weigh(dt_gelu(x), NULL), 0.1);
}

static dt_tensor *rc_bare(dt_tensor *x, void *user) {
    (void)user;
    return dt_gelu(dt_gelu(x));
}

static dt_tensor *rc_leaf(dt_tensor *x, void *user) {
    rc_graph *g = (rc_graph *)user;
    g->leaf = dt_require_grad(noise_input(x->ctx, DT_F32, DT_SHAPE(4, 6), 8, 1));
    return dt_add(dt_add(x, dt_gelu(g->leaf)), x);
}

/* Blocks inside, whose user is a local variable; the second uses what the first returned, and x once more. */
typedef struct rc_pair { rc_graph *g; dt_tensor *w, *also; } rc_pair;
static dt_tensor *rc_inner(dt_tensor *x, void *user) {
    const rc_pair *p = (const rc_pair *)user;
    return rc_block(p->g, RC_LINEAR, rc_linear, dt_add(dt_linear(dt_gelu(x), p->w, NULL), p->also));
}

static dt_tensor *rc_outer(dt_tensor *x, void *user) {
    rc_graph     *g = (rc_graph *)user;
    dt_block_desc d = { .recompute = (g->mask & RC_INNER) != 0, .user_bytes = sizeof(rc_pair) };
    rc_pair       p = { g, g->w, x };
    dt_tensor    *y = dt_block_at(x->ctx, rc_inner, x, &p, d);
    p = (rc_pair){ g, g->v, y };
    y = dt_block_at(x->ctx, rc_inner, dt_gelu(y), &p, d);
    memset((void *)&p, 0xff, sizeof p);
    return dt_add(rc_block(g, RC_BARE, rc_bare, y), x);
}

/* Loss, gradients of the parameters, of the input and of the leaf: written to `to`, their bytes returned. */
static size_t rc_step(dt_ctx *ctx, rc_graph *g, int halves, char *to) {
    dt_tensor *start = dt_require_grad(noise_input(ctx, DT_F32, DT_SHAPE(4, 6), 9, 1)), *x = start;
    g->outside = dt_gelu(dt_linear(x, g->v, NULL));
    x = rc_block(g, RC_LINEAR, rc_linear, x);
    x = dt_reshape(rc_block(g, RC_VIEW, rc_view, x), DT_SHAPE(4, 6));
    x = rc_block(g, RC_SAME, rc_same, x);
    x = dt_add(x, rc_block(g, RC_OUTSIDE, rc_outside, x));
    x = rc_block(g, RC_LEAF, rc_leaf, rc_block(g, RC_BARE, rc_bare, x));
    x = rc_block(g, RC_OUTER, rc_outer, x);
    dt_tensor *loss = weigh(dt_linear(dt_add(x, start), g->w, NULL), NULL); /* a use of w outside all blocks */
    if (!halves) dt_backward(loss);
    else dt_backward_input(loss), dt_backward_weight(loss);
    double value = dt_item(loss);
    memcpy(to, &value, 8);
    size_t at = 8 + all_grads(ctx, to + 8);
    if (start && start->grad && g->leaf && g->leaf->grad) {
        memcpy(to + at, start->grad, 96);
        memcpy(to + at + 96, g->leaf->grad, 96);
    }
    dt_reset(ctx);
    return at + 192;
}

static rc_graph rc_make(dt_ctx *ctx, int mask) {
    rc_graph g = { .mask = mask };
    g.w = dt_param(ctx, "w", DT_SHAPE(6, 6), DT_NORMAL(0.5));
    g.v = dt_param(ctx, "v", DT_SHAPE(6, 6), DT_NORMAL(0.5));
    return g;
}

/* Every kind of block alone and all together, whole and in halves, over two micro-batches and three steps. */
static void rc_same_bits(void) {
    static const int masks[] = { 0, 1, 2, 4, 8, 16, 32, 64, 128, 64 | 128, RC_ALL & ~RC_LINEAR, RC_ALL };
    char   first[2048], got[2048];
    size_t bytes = 0;
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++)
        for (int halves = 0; halves < 2; halves++) {
            meter    m = METER;
            dt_ctx  *ctx = open_ctx(&m);
            rc_graph g = rc_make(ctx, masks[i]);
            memset(got, 0, sizeof got);
            for (int micro = 0; micro < 6; micro++) {
                size_t calls = m.calls;
                dt_micro(ctx, micro % 2, 2);
                if (micro % 2 == 0) dt_clear_grads(ctx);
                bytes = rc_step(ctx, &g, halves, got);
                CHECK_MSG(DT__ASAN || micro < 4 || m.calls == calls, "blocks %d: micro-batch %d allocates %zu times",
                    masks[i], micro, m.calls - calls);
            }
            if (i == 0 && halves == 0) memcpy(first, got, sizeof got);
            CHECK_MSG(bytes < sizeof got && memcmp(first, got, sizeof got) == 0,
                "blocks %d recomputed, halves %d: other bits", masks[i], halves);
            CHECK_MSG(g.first_runs == 6 * 3, "blocks %d: %d first runs in 6 micro-batches", masks[i], g.first_runs);
            if (masks[i] == RC_LINEAR) CHECK_MSG(g.runs == 6 * 6, "rc_linear ran %d times", g.runs);
            if (masks[i] == (RC_OUTER | RC_INNER)) CHECK_MSG(g.runs == 6 * 7, "rc_linear ran %d times", g.runs);
            close_good(ctx, &m, "recomputed blocks");
        }
}

static dt_tensor *rc_nested(dt_tensor *x, void *user) { return dt_gelu(dt_block(x->ctx, toy_block, x, user)); }

/* A listener sees the second run as a forward, right before the backward it is for, with the same numbers. */
static void rc_events(void) {
    for (int halves = 0; halves < 2; halves++) {
        meter       m = METER;
        dt_ctx     *ctx = open_ctx(&m);
        heard       h = { .micros = 1 };
        dt_listener l = LISTENER(&h);
        dt_tensor  *w = dt_param(ctx, "w", DT_SHAPE(5, 5), DT_NORMAL(1)), *x;
        dt_listen(ctx, &l);
        x = dt_block_at(ctx, rc_nested, noise_input(ctx, DT_F32, DT_SHAPE(2, 5), 1, 1), w, (dt_block_desc){ 1, 0 });
        x = weigh(dt_block_at(ctx, toy_block, x, w, (dt_block_desc){ 1, 0 }), NULL);
        if (!halves) dt_backward(x);
        else dt_backward_input(x), dt_backward_weight(x);
        CHECK_MSG(!strcmp(h.text, halves ? "F1 F2 f2 f1 F3 f3 I0 F3 f3 I3 i3 F1 F2 f2 f1 I1 I2 i2 i1 i0 "
            "W0 W3 w3 W1 W2 R0 w2 w1 w0" : "F1 F2 f2 f1 F3 f3 B0 F3 f3 B3 b3 F1 F2 f2 f1 B1 B2 R0 b2 b1 b0"),
            "heard %s", h.text);
        close_good(ctx, &m, "events");
    }
}

/* Evaluation keeps nothing of a recomputed block either, and gives the same numbers. */
static void rc_no_grad(void) {
    char   bits[2][96];
    size_t peak[2];
    for (int again = 0; again < 2; again++) {
        meter    m = METER;
        dt_ctx  *ctx = open_ctx(&m);
        int64_t  width = 9000;
        dt_param(ctx, "w", DT_SHAPE(1), DT_ONES);
        dt_no_grad(ctx, 1);
        dt_tensor *x = noise_input(ctx, DT_F32, DT_SHAPE(1, 64), 3, 1);
        for (int i = 0; i < 6; i++) x = dt_block_at(ctx, thin_block, x, &width, (dt_block_desc){ again, 0 });
        CHECK(x && x->data && !x->needs_grad);
        if (x) memcpy(bits[again], x->data, 96);
        peak[again] = m.peak[DT_MEM_ACTS];
        close_good(ctx, &m, "no_grad");
    }
    CHECK(memcmp(bits[0], bits[1], 96) == 0);
    CHECK_MSG(peak[0] > 5 * peak[1], "without gradients: %zu bytes plain, %zu recomputed", peak[0], peak[1]);
}

// ---- the model

/* A GPT's gradients under each choice: 5 layers, so that full:2 ends with a group of one. */
static void rc_gpt_bits(void) {
    enum { ROOM = 1 << 17 };
    static const int choice[][2] = { { GPT_RECOMPUTE_NONE, 0 }, { GPT_RECOMPUTE_SELECTIVE, 0 },
        { GPT_RECOMPUTE_FULL, 0 }, { GPT_RECOMPUTE_FULL, 2 }, { GPT_RECOMPUTE_FULL, 5 }, { GPT_RECOMPUTE_FULL, 9 } };
    char  *bits[2] = { (char *)room(ROOM), (char *)room(ROOM) };
    double value[2] = { 0, 0 };
    for (size_t i = 0; i < sizeof choice / sizeof *choice; i++) {
        meter      m = METER;
        dt_ctx    *ctx = open_ctx(&m);
        gpt_config c = small_gpt;
        int        k = i > 0;
        c.layers = 5;
        c.recompute = choice[i][0];
        c.recompute_every = choice[i][1];
        program p = program_make(ctx, c);
        value[k] = 0;
        for (int step = 0; step < 4; step++) value[k] += program_step(ctx, &p, step);
        size_t bytes = all_grads(ctx, bits[k]);
        CHECK_MSG(bytes <= ROOM && value[k] == value[0] && memcmp(bits[0], bits[k], bytes) == 0,
            "recompute %d every %d: other bits", c.recompute, c.recompute_every);
        close_good(ctx, &m, "a recomputed GPT");
    }
    free(bits[0]);
    free(bits[1]);
}

/* Peak of activations in a steady step, as the allocator sees it from outside. */
static size_t rc_acts(gpt_config c, int64_t B, int recompute, int every) {
    meter   m = METER;
    dt_ctx *ctx = open_ctx(&m);
    c.recompute = recompute;
    c.recompute_every = every;
    gpt      model = gpt_register(ctx, c);
    int32_t *ids = (int32_t *)room((size_t)(B * c.seq) * 4);
    size_t   calls = 0;
    for (int step = 0; step < 4; step++) {
        if (step == 3) m.peak[DT_MEM_ACTS] = 0, calls = m.calls;
        dt_tensor *id = dt_input(ctx, DT_I32, DT_SHAPE(B, c.seq), ids);
        dt_backward(gpt_loss(&model, id, id, 10));
        dt_reset(ctx);
        dt_clear_grads(ctx);
    }
    size_t live = m.live[DT_MEM_ACTS];
    CHECK_MSG(DT__ASAN || (m.calls == calls && m.peak[DT_MEM_ACTS] == 0), "recompute %d every %d: %zu allocations in a "
        "steady step", recompute, every, m.calls - calls);
    free(ids);
    close_good(ctx, &m, "activation bytes");
    return live;
}

/* n tensors of `count` elements, each rounded up to 64 bytes. */
static size_t rc_bytes(int n, int64_t count, dt_dtype dtype) {
    return (size_t)n * (((size_t)count * dt_dtype_size(dtype) + 63) / 64 * 64);
}

/* What gpt.h says is kept of a layer. */
static size_t rc_kept(gpt_config c, int64_t B, int recompute) {
    int64_t M = B * c.seq, C = c.width, KD = C / c.heads * c.kv_heads;
    if (recompute == GPT_RECOMPUTE_FULL) return rc_bytes(1, M * C, c.dtype);
    size_t mlp = rc_bytes(4, M * C, c.dtype) + rc_bytes(2, M * c.ffn, c.dtype) + rc_bytes(2, M, c.dtype);
    if (recompute == GPT_RECOMPUTE_SELECTIVE) return mlp;
    return mlp + rc_bytes(2, M * C, c.dtype) + rc_bytes(2, M * KD, c.dtype) + rc_bytes(2, M, c.dtype) +
           rc_bytes(1, M * c.heads, c.dtype);
}

/* More layers cost what the formula says, to the byte. Sizes are such that each arena is over 64 KiB, where an arena's
   chunk is as large as what it holds. */
static void rc_formula(void) {
    static const struct { gpt_config c; int64_t B; } sizes[] = {
        { { .layers = 4, .width = 48, .heads = 4, .kv_heads = 2, .ffn = 96, .seq = 32, .vocab = 200,
            .dtype = DT_F64 }, 2 },
        { { .layers = 4, .width = 40, .heads = 5, .kv_heads = 1, .ffn = 70, .seq = 61, .vocab = 301, .tied = 1 }, 1 },
        { { .layers = 4, .width = 42, .heads = 3, .kv_heads = 3, .ffn = 168, .seq = 23, .vocab = 257 }, 3 },
    };
    for (size_t i = 0; i < 3 && !DT__ASAN; i++)
        for (int recompute = 0; recompute < 3; recompute++)
            for (int every = 1; every <= (recompute == GPT_RECOMPUTE_FULL ? 2 : 1); every++) {
                gpt_config more = sizes[i].c;
                more.layers += 2 * every;
                size_t kept = rc_kept(more, sizes[i].B, recompute);
                size_t got = rc_acts(more, sizes[i].B, recompute, every) -
                    rc_acts(sizes[i].c, sizes[i].B, recompute, every);
                CHECK_MSG(got == 2 * kept, "sizes %zu, recompute %d every %d: %zu bytes for two more, formula %zu", i,
                    recompute, every, got, 2 * kept);
            }
}

/* The square root: K layers in a block, L = K^2. L/K outputs and K layers' activations, so 4 times the layers take
   twice the memory. */
static void rc_square_root(void) {
    gpt_config c = { .width = 48, .heads = 4, .kv_heads = 4, .ffn = 192, .seq = 32, .vocab = 64 };
    size_t     acts[2][3], B = 2;
    for (int i = 0; i < 2; i++) {
        c.layers = i ? 64 : 16;
        acts[i][0] = rc_acts(c, (int64_t)B, GPT_RECOMPUTE_NONE, 0);
        acts[i][1] = rc_acts(c, (int64_t)B, GPT_RECOMPUTE_FULL, 1);
        acts[i][2] = rc_acts(c, (int64_t)B, GPT_RECOMPUTE_FULL, i ? 8 : 4);
        printf("peak acts of %d layers: none %zu, full %zu, full:%d %zu\n", c.layers, acts[i][0], acts[i][1],
            i ? 8 : 4, acts[i][2]);
    }
    if (DT__ASAN) return; /* there every tensor is its own allocation */
    size_t layer = rc_kept(c, (int64_t)B, GPT_RECOMPUTE_NONE), out = rc_kept(c, (int64_t)B, GPT_RECOMPUTE_FULL);
    CHECK(acts[1][0] - acts[0][0] == 48 * layer && acts[1][1] - acts[0][1] == 48 * out);
    CHECK_MSG(acts[1][2] - acts[0][2] == 4 * layer + 4 * out, "from (16,4) to (64,8): %zu bytes more, not 4 layers "
        "and 4 outputs, %zu", acts[1][2] - acts[0][2], 4 * layer + 4 * out);
    size_t fixed = acts[0][2] - 4 * layer - 4 * out; /* embedding, head, gradients of two layers */
    double none = (double)acts[1][0] / (double)acts[0][0], root = (double)acts[1][2] / (double)acts[0][2];
    printf("4 times the layers: none x %.2f, full x %.2f, full:sqrt(L) x %.2f (without %zu fixed bytes x %.2f)\n", none,
        (double)acts[1][1] / (double)acts[0][1], root, fixed,
        (double)(acts[1][2] - fixed) / (double)(acts[0][2] - fixed));
    CHECK(none > 2.9 && root < 2.05 && acts[1][2] < acts[1][0] / 4);
}

// ---- what is refused

typedef struct rc_fault { rc_graph g; int kind, runs; dt_tensor *kept; } rc_fault;
enum { RC_SHAPE, RC_TYPE, RC_PARAM, RC_OPS, RC_NULL, RC_X, RC_FAILS, RC_FAULTS };

static dt_tensor *rc_faulty(dt_tensor *x, void *user) {
    rc_fault *f = (rc_fault *)user;
    int       second = f->runs++;
    dt_tensor *y = dt_linear(x, second && f->kind == RC_PARAM ? f->g.v : f->g.w, NULL);
    if (second && f->kind == RC_OPS) y = dt_gelu(y);
    if (second && f->kind == RC_SHAPE) y = dt_reshape(y, DT_SHAPE(6, 4));
    if (second && f->kind == RC_TYPE) y = dt_new(x->ctx, DT_F64, DT_SHAPE(4, 6));
    if (second && f->kind == RC_NULL) return NULL;
    if (second && f->kind == RC_X) return x;
    if (second && f->kind == RC_FAILS) dt_fail(x->ctx, DT_ERR_NUMERIC, "the second run");
    return y;
}

static void rc_unlike(void) {
    static const char *const text[RC_FAULTS] = { "(6,4)", "f64", "other ops", "other ops", "nothing", "dt_input",
        "the second run" };
    for (int kind = 0; kind < RC_FAULTS; kind++)
        for (int halves = 0; halves < 2; halves++) {
            meter     m = METER;
            dt_ctx   *ctx = open_ctx(&m);
            rc_fault  f = { .g = rc_make(ctx, 0), .kind = kind };
            dt_tensor *x = noise_input(ctx, DT_F32, DT_SHAPE(4, 6), 2, 1);
            x = weigh(dt_block_at(ctx, rc_faulty, x, &f, (dt_block_desc){ 1, 0 }), NULL);
            if (!halves) dt_backward(x);
            else dt_backward_input(x), dt_backward_weight(x);
            CHECK_MSG(dt_error(ctx) == (kind == RC_FAILS ? DT_ERR_NUMERIC : DT_ERR_ARG) && m.errors == 1 &&
                f.runs == 2 && strstr(dt_error_text(ctx), text[kind]), "fault %d: %s", kind, dt_error_text(ctx));
            CHECK(kind == RC_FAILS || strstr(dt_error_text(ctx), "repeat itself"));
            close_ctx(ctx, &m, "a block that does not repeat itself");
        }
}

static dt_tensor *rc_keeper(dt_tensor *x, void *user) {
    rc_fault *f = (rc_fault *)user;
    dt_tensor *y = dt_linear(x, f->g.w, NULL);
    if (!f->kept) f->kept = f->kind == 3 ? weigh(y, NULL) : y;
    return dt_gelu(y);
}

static dt_tensor *rc_giver(dt_tensor *x, void *user) {
    (void)x;
    return (dt_tensor *)user;
}

/* A tensor that went with its block: an op, an own op, reading, a loss, an input and an output of blocks. */
static void rc_gone(void) {
    for (int kind = 0; kind < 7; kind++) {
        meter     m = METER;
        dt_ctx   *ctx = open_ctx(&m);
        rc_fault  f = { .g = rc_make(ctx, 0), .kind = kind };
        float     host[24];
        dt_tensor *x = noise_input(ctx, DT_F32, DT_SHAPE(4, 6), 2, 1);
        dt_tensor *y = dt_block_at(ctx, rc_keeper, x, &f, (dt_block_desc){ 1, 0 });
        CHECK(y && dt_read(y, host) == DT_OK && dt_gelu(y));
        if (kind == 0) CHECK(dt_gelu(f.kept) == NULL);
        if (kind == 1) dt_record(dt_new(ctx, DT_F32, DT_SCALAR), (dt_record_desc){ .name = "own", .in = { f.kept },
            .backward = weigh_back });
        if (kind == 2) CHECK(dt_read(f.kept, host) != DT_OK);
        if (kind == 3) CHECK(dt_backward(f.kept) != DT_OK);
        if (kind == 4) CHECK(dt_block_at(ctx, rc_bare, f.kept, NULL, (dt_block_desc){ 1, 0 }) == NULL);
        if (kind == 5) CHECK(dt_block_at(ctx, rc_giver, x, f.kept, (dt_block_desc){ 1, 0 }) == NULL);
        if (kind == 6) { /* a tensor of the first run, kept for the second and after it */
            dt_backward(weigh(y, NULL));
            CHECK(dt_write(f.kept, host) != DT_OK);
        }
        CHECK_MSG(dt_error(ctx) == DT_ERR_ARG && strstr(dt_error_text(ctx), "recomputed dt_block and is gone"),
            "gone %d: %s", kind, dt_error_text(ctx));
        close_ctx(ctx, &m, "a tensor that is gone");
    }
}

static dt_tensor *rc_from_nothing(dt_tensor *x, void *user) {
    rc_graph *g = (rc_graph *)user;
    CHECK(x == NULL);
    g->runs++;
    return dt_linear(noise_input(g->w->ctx, DT_F32, DT_SHAPE(4, 6), 5, 1), g->w, NULL);
}

static dt_tensor *rc_into_nothing(dt_tensor *x, void *user) {
    rc_graph *g = (rc_graph *)user;
    dt_loss(x, weigh(dt_linear(x, g->v, NULL), NULL), 1);
    return NULL;
}

/* No input, no output, neither wrong; and no call of fn in a context that has failed. */
static void rc_nothing(void) {
    char bits[2][512];
    for (int again = 0; again < 2; again++) {
        meter         m = METER;
        dt_ctx       *ctx = open_ctx(&m);
        rc_graph      g = rc_make(ctx, 0);
        dt_block_desc d = { again, 0 };
        dt_tensor    *x = dt_block_at(ctx, rc_from_nothing, NULL, &g, d);
        CHECK(x && dt_block_at(ctx, rc_into_nothing, x, &g, d) == NULL && dt_error(ctx) == DT_OK);
        dt_backward(weigh(dt_gelu(x), NULL));
        memset(bits[again], 0, sizeof bits[again]);
        all_grads(ctx, bits[again]);
        CHECK(g.runs == 1 + again && dt_recomputing(ctx) == 0 && dt_recomputing(NULL) == 0);
        dt_reset(ctx);
        CHECK_MSG(dt_error(ctx) == DT_OK && m.errors == 0, "no input, no output: %s", dt_error_text(ctx));
        dt_fail(ctx, DT_ERR_IO, "before the block");
        CHECK(dt_block_at(ctx, rc_from_nothing, NULL, &g, d) == NULL && g.runs == 1 + again);
        close_ctx(ctx, &m, "no input, no output");
    }
    CHECK(memcmp(bits[0], bits[1], sizeof bits[0]) == 0);
}

static void test_recompute(void) {
    rc_same_bits();
    rc_events();
    rc_no_grad();
    rc_gpt_bits();
    rc_formula();
    rc_square_root();
    rc_unlike();
    rc_gone();
    rc_nothing();
}

int main(int argc, char **argv) {
    if (argc > 1) golden_folder = argv[1];
    test_finite_differences();
    test_golden_ops();
    test_boxes();
    test_units();
    test_kernels();
    test_memory();
    test_errors();
    quiet_failures();
    missing_kernels();
    replaced_kernel();
    failing_kernel();
    test_gpt();
    test_recompute();
    test_misuse();
    return check_done("test_tensor");
}
