/* meter.h - shared by the test programs of dt_tensor.h: a metering allocator, random values,
   conversions, two user-defined ops
   Public domain or MIT, at your choice; see LICENSE.

   Include it after dt_tensor.h (with DT_IMPLEMENTATION) and check.h.

   Every context of the tests allocates through a meter: a host table that fills new and freed
   memory with NaN bits, checks the size and class of every free, counts bytes by class, and can
   refuse allocations. */
#ifndef METER_H
#define METER_H

#define MAYBE __attribute__((unused)) /* not every program uses all of this */

MAYBE static const char *golden_folder = "tests/golden";

// ==== The meter =================================================================================

typedef struct meter {
    size_t live[DT_MEM_CLASSES], peak[DT_MEM_CLASSES], live_total, peak_total, calls;
    long refuse_in; /* allocations before the first refusal; below 0: never */
    int sticky;     /* 1: all later allocations are refused too */
    int refused, wrong_frees;
    int errors;     /* log lines of level error */
    char text[700]; /* the last of these lines */
} meter;
#define METER ((meter){ .refuse_in = -1 })

/* Precedes every block, in 64 bytes, so that the block stays aligned. */
typedef struct tag {
    size_t bytes;
    int mem, magic;
} tag;
enum { TAG_ROOM = 64, MAGIC = 0x64746d65 };

static void *meter_alloc(void *user, size_t bytes, dt_mem mem) {
    meter *m = (meter *)user;
    void *p = NULL;
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
    tag t;
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

MAYBE static dt_ctx *open_ctx(meter *m) { return open_with(m, NULL, 7); }

/* Frees the context. No memory may be left, and every free must have had the right size and
   class. */
static void close_ctx(dt_ctx *ctx, const meter *m, const char *what) {
    dt_ctx_free(ctx);
    CHECK_MSG(m->live_total == 0, "%s: %zu bytes were not freed", what, m->live_total);
    CHECK_MSG(
        m->wrong_frees == 0, "%s: %d frees with the wrong size or class", what, m->wrong_frees);
}

/* close_ctx for a context that must not have failed. */
MAYBE static void close_good(dt_ctx *ctx, const meter *m, const char *what) {
    CHECK_MSG(dt_error(ctx) == DT_OK, "%s: %s", what, dt_error_text(ctx));
    CHECK_MSG(m->errors == 0, "%s: logged %s", what, m->text);
    close_ctx(ctx, m, what);
}

/* Element `index` of a pseudo-random sequence in [-1, 1). */
static double noise(uint64_t seed, uint64_t index) {
    uint64_t z = seed * 0xD1342543DE82EF95u + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) / 4503599627370496.0 - 1.0;
}

static int below(uint64_t seed, uint64_t index, int n) {
    return (int)((noise(seed, index) + 1) / 2 * n);
}

/* The value of a 16-bit float by its definition, independent of dt's conversions. bits: of the
   fraction. */
static double from16_slowly(dt_dtype dtype, uint16_t h) {
    int bits = dtype == DT_BF16 ? 7 : 10, bias = dtype == DT_BF16 ? 127 : 15, most = 2 * bias + 1;
    int e = (h & 0x7fff) >> bits, fraction = h & ((1 << bits) - 1);
    double x = e == most ? (fraction ? NAN : INFINITY)
               : e == 0  ? ldexp(fraction, 1 - bias - bits)
                         : ldexp(fraction + (1 << bits), e - bias - bits);
    return h & 0x8000 ? -x : x;
}

static double from16(dt_dtype dtype, uint16_t h) {
    static double known[2][65536];
    static int made;
    for (int i = 0; i < 65536 && !made; i++)
        for (int t = 0; t < 2; t++) known[t][i] = from16_slowly(t ? DT_F16 : DT_BF16, (uint16_t)i);
    made = 1;
    return known[dtype == DT_F16][h];
}

/* Rounds to nearest, ties to even, by rint. */
static uint16_t to16(dt_dtype dtype, double x) {
    int bits = dtype == DT_BF16 ? 7 : 10, bias = dtype == DT_BF16 ? 127 : 15, e = 0;
    uint16_t sign = signbit(x) ? 0x8000 : 0, infinite = (uint16_t)((2 * bias + 1) << bits);
    if (isnan(x)) return (uint16_t)(sign | infinite | 1 << (bits - 1));
    if (isinf(x) || x == 0) return (uint16_t)(sign | (x == 0 ? 0 : infinite));
    frexp(x, &e); /* |x| in [2^(e-1), 2^e) */
    if (e - 1 < 1 - bias) e = 2 - bias;
    /* at most 2^(bits+1), which is the first value of the next exponent */
    double steps = rint(ldexp(fabs(x), bits - (e - 1)));
    int h = (int)steps + ((e - 1 + bias - 1) << bits);
    return (uint16_t)(sign | (h > infinite ? infinite : h));
}

static double get(const void *array, dt_dtype dtype, int64_t i) {
    return dtype == DT_F64   ? ((const double *)array)[i]
           : dtype == DT_F32 ? (double)((const float *)array)[i]
           : dtype == DT_I32 ? (double)((const int32_t *)array)[i]
           : dtype == DT_U8  ? (double)((const uint8_t *)array)[i]
           : dtype == DT_I64 ? (double)((const int64_t *)array)[i]
                             : from16(dtype, ((const uint16_t *)array)[i]);
}

static void put(void *array, dt_dtype dtype, int64_t i, double value) {
    if (dtype == DT_F64)
        ((double *)array)[i] = value;
    else if (dtype == DT_F32)
        ((float *)array)[i] = (float)value;
    else if (dtype == DT_I32)
        ((int32_t *)array)[i] = (int32_t)value;
    else if (dtype == DT_U8)
        ((uint8_t *)array)[i] = (uint8_t)(int)value;
    else if (dtype == DT_I64)
        ((int64_t *)array)[i] = value < 0x1p63 ? (int64_t)value : INT64_MAX;
    else
        ((uint16_t *)array)[i] = to16(dtype, value);
}

/* calloc for tests. Ends the program if there is no memory. */
static void *room(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) {
        puts("FAIL no memory for the test itself");
        exit(1);
    }
    return p;
}

MAYBE static dt_tensor *noise_input(
    dt_ctx *ctx, dt_dtype dtype, dt_shape shape, uint64_t seed, double scale) {
    int64_t n = dt_count(shape);
    void *x = room((size_t)n * dt_dtype_size(dtype));
    for (int64_t i = 0; i < n; i++) put(x, dtype, i, scale * noise(seed, (uint64_t)i));
    dt_tensor *t = dt_input(ctx, dtype, shape, x);
    free(x);
    return t;
}

// ==== User-defined ops ==========================================================================

/* A user-defined op: the f64 scalar sum of x[i] * c[i], which makes a loss of a tensor. */
typedef struct weigh_saved {
    const double *c;
} weigh_saved;

static double weigh_factor(const double *c, int64_t i) { return c ? c[i] : noise(99, (uint64_t)i); }

static dt_status weigh_back(dt_node *n) {
    const double *c = ((const weigh_saved *)n->saved)->c;
    dt_tensor *x = n->in[0];
    double up = *(const double *)n->out->grad;
    if (!dt_wants(n, 0)) return DT_OK;
    void *dx = dt_grad(n, 0);
    if (!dx) return dt_error(x->ctx);
    for (int64_t i = 0; i < dt_count(x->shape); i++)
        put(dx, x->dtype, i, get(dx, x->dtype, i) + up * weigh_factor(c, i));
    return DT_OK;
}

/* c must live until dt_reset; NULL: c[i] is noise(99, i) */
MAYBE static dt_tensor *weigh(dt_tensor *x, const double *c) {
    dt_tensor *out = x ? dt_new(x->ctx, DT_F64, DT_SCALAR) : NULL;
    if (!out) return NULL;
    double sum = 0;
    for (int64_t i = 0; i < dt_count(x->shape); i++)
        sum += get(x->data, x->dtype, i) * weigh_factor(c, i);
    *(double *)out->data = sum;
    weigh_saved *saved = (weigh_saved *)dt_record_saved(out,
        (dt_record_desc){
            .name = "weigh", .in = { x }, .backward = weigh_back, .saved_bytes = sizeof *saved });
    if (saved) saved->c = c;
    return dt_error(x->ctx) == DT_OK ? out : NULL;
}

/* A user-defined op: a * b, element by element, in f64, without saved memory. */
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

MAYBE static dt_tensor *times(dt_tensor *a, dt_tensor *b) {
    dt_tensor *out = a && b ? dt_new(a->ctx, DT_F64, a->shape) : NULL;
    if (!out) return NULL;
    for (int64_t i = 0; i < dt_count(a->shape); i++)
        ((double *)out->data)[i] = ((double *)a->data)[i] * ((double *)b->data)[i];
    return dt_record(
        out, (dt_record_desc){ .name = "times", .in = { a, b }, .backward = times_back });
}

#endif
