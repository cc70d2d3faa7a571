/* test_tensor.c - dt_tensor.h on one rank: buckets, local slices, memory, errors, recomputation, a
   GPT; ops are in test_ops.c
   Public domain or MIT, at your choice; see LICENSE.

   Run:  test_tensor [folder of the golden files, default tests/golden]

   Gradients of the GPT, as of every layout, are compared tensor by tensor: ||a - b|| / max(||b||,
   sqrt(n/N) * norm), where n is the tensor's number of elements, N the model's, and norm the norm
   of the full gradient. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_parallel.h"
#include "tests/support/check.h"
#include "tests/golden/golden.h"
#include "tests/support/meter.h"
#include "tests/programs/serial_gpt.h"
#include "examples/gpt.h"
#include <sys/wait.h>

// ==== 1. Counter RNG and initial values =========================================================

/* A second implementation of Philox4x32-10. It takes all four counter words, so that it can be
   checked with the published test vectors. */
static void philox_reference(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4]) {
    uint32_t k[2] = { key[0], key[1] }, c[4];
    memcpy(c, counter, sizeof c);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = { (uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b,
            (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a };
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    memcpy(out, c, sizeof c);
}

static void rng_known_answers(void) {
    static const uint32_t known[3][10] = { /* key, counter, answer: Random123's kat_vectors */
        { 0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 },
        { 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d,
            0x41c83b0e, 0xa20bc7c6, 0x6d5451fd },
        { 0xa4093822, 0x299f31d0, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xd16cfe09,
            0x94fdcceb, 0x5001e420, 0x24126ea1 }
    };
    uint32_t out[4], again[4];
    for (int i = 0; i < 3; i++) {
        philox_reference(known[i], known[i] + 2, again);
        CHECK_MSG(
            memcmp(again, known[i] + 6, sizeof again) == 0, "the test's own Philox, vector %d", i);
    }
    dt__philox(0, 0, out);
    CHECK(memcmp(out, known[0] + 6, sizeof out) == 0);
    /* dt__philox has a 64-bit counter; the other two words are 0 */
    for (int i = 0; i < 200; i++) {
        uint64_t key = (uint64_t)(noise(1, (uint64_t)i) * 9e18),
                 counter = (uint64_t)(noise(2, (uint64_t)i) * 9e18);
        if (i < 2) key = counter = (uint64_t)0 - (uint64_t)i;
        uint32_t k[2] = { (uint32_t)key, (uint32_t)(key >> 32) };
        uint32_t c[4] = { (uint32_t)counter, (uint32_t)(counter >> 32), 0, 0 };
        dt__philox(key, counter, out);
        philox_reference(k, c, again);
        CHECK_MSG(memcmp(out, again, sizeof out) == 0, "Philox, case %d", i);
    }
}

enum { DRAWS = 40000 };

/* The DRAWS initial values of a parameter, as doubles. */
static double *drawn(uint64_t seed, const char *name, dt_init init, dt_dtype dtype) {
    meter m = METER;
    dt_ctx *ctx = open_with(&m, NULL, seed);
    dt_tensor *w = dt_param_at(ctx, name, DT_SHAPE(DRAWS), init, (dt_param_desc){ .dtype = dtype });
    void *raw = room(DRAWS * 8);
    double *x = (double *)room(DRAWS * sizeof(double));
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

/* Every bound is five standard deviations of the estimate. */
static void rng_distributions(void) {
    double root = sqrt((double)DRAWS), *u = drawn(1, "w", DT_UNIFORM(2), DT_F64), sum = 0,
           squares = 0;
    double *z = drawn(1, "w", DT_NORMAL(3), DT_F64), least = 9, most = -9, fourth = 0, inside = 0;
    for (int i = 0; i < DRAWS; i++) {
        sum += u[i];
        squares += u[i] * u[i];
        least = fmin(least, u[i]);
        most = fmax(most, u[i]);
    }
    CHECK_MSG(least >= -2 && least < -1.99 && most < 2 && most > 1.99, "uniform from %g to %g",
        least, most);
    CHECK_MSG(fabs(sum / DRAWS) < 5 * 2 / sqrt(3.0) / root, "uniform: mean %g", sum / DRAWS);
    CHECK_MSG(
        fabs(squares / DRAWS - 4 / 3.0) < 5 * 1.2 / root, "uniform: variance %g", squares / DRAWS);
    sum = squares = 0;
    for (int i = 0; i < DRAWS; i++) {
        sum += z[i] / 3;
        squares += z[i] * z[i] / 9;
        fourth += pow(z[i] / 3, 4);
        inside += fabs(z[i]) < 3;
    }
    CHECK_MSG(fabs(sum / DRAWS) < 5 / root, "normal: mean %g", sum / DRAWS);
    CHECK_MSG(
        fabs(squares / DRAWS - 1) < 5 * sqrt(2.0) / root, "normal: variance %g", squares / DRAWS);
    CHECK_MSG(fabs(fourth / DRAWS - 3) < 5 * sqrt(96.0) / root, "normal: fourth moment %g",
        fourth / DRAWS);
    CHECK_MSG(fabs(inside / DRAWS - 0.682689) < 5 * 0.47 / root, "normal: %g within one deviation",
        inside / DRAWS);
    double *other[4] = { drawn(2, "w", DT_NORMAL(3), DT_F64), drawn(1, "v", DT_NORMAL(3), DT_F64),
        drawn(1, "ww", DT_NORMAL(3), DT_F64), drawn(1, "w", DT_NORMAL(3), DT_F32) };
    for (int i = 0; i < 3; i++)
        for (int shift = 0; shift < 3; shift++)
            CHECK_MSG(fabs(correlation(z, other[i], shift)) < 5 / root,
                "stream %d correlates with the first", i);
    for (int shift = 1; shift < 4; shift++) CHECK(fabs(correlation(z, z, shift)) < 5 / root);
    int same = 0;
    for (int i = 0; i < DRAWS; i++) same += other[3][i] == (double)(float)z[i];
    CHECK_MSG(same == DRAWS, "%d f32 values are not the f64 values rounded", DRAWS - same);
    for (int i = 0; i < 4; i++) free(other[i]);
    free(u);
    free(z);
}

// ==== 2. Local slices ===========================================================================

static dt_shard_spec shard_over(dt_group *g, int dim) {
    return (dt_shard_spec){ (dt_comm *)g, dim };
}

/* The local index of global index i in a dimension of size `full`, sharded by each group in turn.
   -1 if another rank has it. */
static int64_t local_index(int64_t i, int64_t full, int dim, const dt_shard_spec shards[3]) {
    int64_t extent = full, at = i;
    for (int c = 0; c < 3; c++) {
        const dt_group *g = (const dt_group *)shards[c].comm;
        if (!g || shards[c].dim != dim) continue;
        extent = (extent + g->size - 1) / g->size;
        if (at / extent != g->rank) return -1;
        at %= extent;
    }
    return at;
}

/* Compares a sharded parameter with the full one: its values, and zeros in the padding. Returns the
   number of elements that it owns. */
static int64_t slice_case(
    dt_shape full, const dt_shard_spec shards[3], dt_init init, const double *whole) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_param_desc desc = { .shards = { shards[0], shards[1], shards[2] }, .dtype = DT_F64 };
    dt_tensor *w = dt_param_at(ctx, "w", full, init, desc);
    dt_local_slice slice = dt_local_slice_of(full, shards);
    int64_t n = dt_count(w->shape), owned = 0, wrong = 0, inside = 1;
    int fits = 1;
    double *want = (double *)room((size_t)n * 8), *have = (double *)room((size_t)n * 8);
    CHECK(memcmp(&slice, &w->param->slice, sizeof slice) == 0);
    for (int64_t g = 0; g < dt_count(full); g++) {
        int64_t left = g, at[DT_MAX_DIMS], local = 0;
        for (int d = full.nd - 1; d >= 0; d--) {
            at[d] = local_index(left % full.d[d], full.d[d], d, shards);
            left /= full.d[d];
        }
        for (int d = 0; d < full.nd; d++)
            local = at[d] < 0 || local < 0 ? -1 : local * w->shape.d[d] + at[d];
        if (local < 0) continue;
        want[local] = whole[g];
        owned++;
    }
    for (int d = 0; d < full.nd; d++) {
        int64_t held = 0, first = -1;
        for (int64_t i = full.d[d] - 1; i >= 0; i--)
            if (local_index(i, full.d[d], d, shards) >= 0) held++, first = i;
        int right = slice.inside[d] == held && (held == 0 || slice.lo[d] == first);
        fits &= CHECK_MSG(right, "dimension %d: lo %lld, inside %lld", d, (long long)slice.lo[d],
            (long long)slice.inside[d]);
        inside *= held;
    }
    if (fits) dt_read(w, have); /* a wrong slice would write out of bounds */
    for (int64_t i = 0; i < n; i++) wrong += !(have[i] == want[i]);
    CHECK_MSG(wrong == 0, "%lld of %lld values of a sharded parameter are wrong", (long long)wrong,
        (long long)n);
    CHECK(inside == owned && (size_t)n == w->param->count);
    free(want);
    free(have);
    close_good(ctx, &m, "a sharded parameter");
    return owned;
}

static double *full_values(dt_shape full, dt_init init) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *w = dt_param_at(ctx, "w", full, init, (dt_param_desc){ .dtype = DT_F64 });
    double *x = (double *)room((size_t)dt_count(full) * 8);
    dt_read(w, x);
    close_good(ctx, &m, "a full parameter");
    return x;
}

/* Every rank of two groups that shard every pair of dimensions, also one dimension twice. */
static void slice_all_ranks(
    dt_shape full, int size_a, int size_b, dt_init init, const double *whole) {
    for (int da = 0; da < full.nd; da++)
        for (int db = 0; db < full.nd; db++) {
            int64_t owned = 0;
            for (int a = 0; a < size_a; a++)
                for (int b = 0; b < size_b; b++) {
                    dt_group ga = { .rank = a, .size = size_a }, gb = { .rank = b, .size = size_b };
                    dt_shard_spec shards[3] = { shard_over(&ga, da), { NULL, 0 },
                        shard_over(&gb, db) };
                    owned += slice_case(full, shards, init, whole);
                }
            CHECK_MSG(owned == dt_count(full), "the local slices hold %lld elements of %lld",
                (long long)owned, (long long)dt_count(full));
        }
}

static void slice_values(void) {
    static const dt_shape shape[4] = { { 1, { 17 } }, { 2, { 7, 5 } }, { 3, { 5, 3, 4 } },
        { 4, { 2, 3, 1, 5 } } };
    for (int s = 0; s < 4; s++) {
        dt_init init = s == 1 ? DT_UNIFORM(1) : s == 3 ? DT_ONES : DT_NORMAL(1);
        double *whole = full_values(shape[s], init);
        for (int a = 1; a < 5; a++)
            for (int b = 1; b < 4; b++) slice_all_ranks(shape[s], a, b, init, whole);
        free(whole);
    }
    dt_shape vocab = DT_SHAPE(257, 3);
    double *whole = full_values(vocab, DT_NORMAL(0.02));
    slice_all_ranks(vocab, 4, 1, DT_NORMAL(0.02), whole);
    free(whole);
}

/* A vocabulary of 257 over 4 ranks: the partial embeddings sum to those of the full table, and the
   padding gets no gradient. */
static void slice_gradients(void) {
    double sum[6 * 3] = { 0 };
    for (int rank = 0; rank < 4; rank++) {
        static const int32_t ids[6] = { 0, 64, 65, 194, 195, 256 };
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        dt_group g = { .rank = rank, .size = 4 };
        dt_param_desc desc = { .shards = { shard_over(&g, 0) }, .dtype = DT_F64 };
        dt_tensor *w = dt_param_at(ctx, "w", DT_SHAPE(257, 3), DT_NORMAL(1), desc);
        CHECK(w && w->shape.d[0] == 65 && w->shape.d[1] == 3);
        for (int micro = 0; micro < 2;
             micro++) { /* the first gradient, then one that is accumulated */
            dt_tensor *rows = dt_embedding(w, dt_input(ctx, DT_I32, DT_SHAPE(6), ids));
            for (int i = 0; rows && micro == 0 && i < 18; i++) sum[i] += ((double *)rows->data)[i];
            /* a product with w, so that every row has a gradient; of partial sums, so unchecked */
            rows = dt_place(rows, (dt_comm *)&g, DT_UNPLACED);
            dt_backward(weigh(dt_linear(rows, w, NULL), NULL));
            dt_reset(ctx);
        }
        const double *grad = w ? (const double *)w->grad : NULL;
        int zeros = 0, last = rank == 3 ? 62 : 65;
        for (int i = 0; grad && i < 65 * 3; i++) {
            if (i >= last * 3)
                CHECK_MSG(grad[i] == 0, "rank %d: the padding has gradient %g", rank, grad[i]);
            else
                zeros += grad[i] == 0 || !isfinite(grad[i]);
        }
        CHECK_MSG(grad && zeros == 0, "rank %d: %d gradients are 0 or not finite", rank, zeros);
        close_good(ctx, &m, "a sharded vocabulary");
    }
    double *whole = full_values(DT_SHAPE(257, 3), DT_NORMAL(1));
    static const int id[6] = { 0, 64, 65, 194, 195, 256 };
    for (int i = 0; i < 18; i++) CHECK(sum[i] == whole[id[i / 3] * 3 + i % 3]);
    free(whole);
}

/* 13 columns over 2 ranks: the last of rank 1's 7 columns is padding, in every row. */
static void slice_columns(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_group g = { .rank = 1, .size = 2 };
    dt_tensor *w = dt_param_at(
        ctx, "w", DT_SHAPE(5, 13), DT_ONES, (dt_param_desc){ .shards = { shard_over(&g, 1) } });
    dt_tensor *b = dt_param_at(ctx, "b", DT_SHAPE(3), DT_ONES,
        (dt_param_desc){ .shards = { { NULL, 0 }, shard_over(&g, 0) } });
    dt_backward(weigh(dt_linear(noise_input(ctx, DT_F32, DT_SHAPE(4, 7), 3, 1), w, NULL), NULL));
    for (int i = 0; w && i < 35; i++) {
        CHECK(((float *)w->data)[i] == (i % 7 < 6 ? 1.0f : 0.0f));
        CHECK((((float *)w->grad)[i] != 0) == (i % 7 < 6));
    }
    CHECK(b && ((float *)b->data)[0] == 1 && ((float *)b->data)[1] == 0);
    close_good(ctx, &m, "sharded columns");
}

static void test_slices(void) {
    rng_known_answers();
    rng_distributions();
    slice_values();
    slice_gradients();
    slice_columns();
}

// ==== 3. Buckets, gradients of micro-batches, listeners =========================================

typedef struct bucket_row {
    int first, params, frozen;
    size_t count, padded;
} bucket_row;

static void buckets_plan(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_group g = { .rank = 0, .size = 1 };
    dt_shard_spec whole = shard_over(&g, 0);
    static const bucket_row want[] = { { 0, 2, 0, 30, 32 }, { 2, 1, 0, 30, 32 },
        { 3, 1, 0, 50, 64 }, { 4, 1, 0, 1, 16 }, { 5, 1, 0, 2, 16 }, { 6, 1, 1, 2, 16 },
        { 7, 1, 0, 2, 16 }, { 8, 1, 0, 1, 16 }, { 9, 1, 0, 4, 16 }, { 10, 2, 0, 6, 16 } };
    dt_param(ctx, "a", DT_SHAPE(10), DT_ONES);
    dt_param(ctx, "b", DT_SHAPE(4, 5), DT_ONES);
    dt_param(ctx, "c", DT_SHAPE(30), DT_ONES); /* would exceed the 160 bytes of a and b's bucket */
    dt_param(ctx, "d", DT_SHAPE(50), DT_ONES); /* larger than a bucket, so alone in one */
    dt_param(ctx, "e", DT_SCALAR, DT_ONES);
    dt_scope(ctx, "s.");
    dt_tensor *f = dt_param(ctx, "f", DT_SHAPE(2), DT_ONES);
    dt_param_at(ctx, "g", DT_SHAPE(2), DT_ONES, (dt_param_desc){ .frozen = 1 });
    dt_param_at(ctx, "h", DT_SHAPE(2), DT_ONES, (dt_param_desc){ .dtype = DT_F64 });
    dt_scope(ctx, NULL);
    dt_param(ctx, "f", DT_SHAPE(1), DT_ONES); /* no duplicate: the other f is s.f */
    dt_param_at(ctx, "j", DT_SHAPE(4), DT_ONES, (dt_param_desc){ .shards = { whole } });
    dt_param_at(ctx, "k", DT_SHAPE(3), DT_ONES,
        (dt_param_desc){ .grad_placements = { { whole.comm, DT_GRAD_PARTIAL } } });
    dt_param_at(ctx, "l", DT_SHAPE(3), DT_ONES,
        (dt_param_desc){ .grad_placements = { { whole.comm, DT_GRAD_PARTIAL } }, .no_decay = 1 });
    CHECK(dt_bucket_count(ctx) == 0 && dt_param_count(ctx) == 12 && f && !f->data &&
          !strcmp(f->name, "s.f"));
    CHECK(dt_param_find(ctx, "s.f") == f && dt_param_get(ctx, 5) == f && !dt_param_get(ctx, 12));
    CHECK(dt_buckets_make(ctx, (dt_buckets_desc){ .bucket_bytes = 160, .pad = 16 }) == DT_OK);
    CHECK(dt_bucket_count(ctx) == 10 && !dt_bucket_get(ctx, 10) && !dt_bucket_get(ctx, -1));
    size_t bytes = 0;
    for (int u = 0; u < dt_bucket_count(ctx) && u < 10; u++) {
        const dt_bucket *bucket = dt_bucket_get(ctx, u);
        const bucket_row *row = &want[u];
        CHECK_MSG(bucket->index == u && bucket->first_param == row->first &&
                      bucket->n_params == row->params && bucket->count == row->count &&
                      bucket->padded == row->padded && bucket->frozen == row->frozen &&
                      bucket->dtype == (u == 6 ? DT_F64 : DT_F32),
            "bucket %d: from parameter %d, %d parameters, %zu elements, padded to %zu", u,
            bucket->first_param, bucket->n_params, bucket->count, bucket->padded);
        size_t at = 0, size = dt_dtype_size(bucket->dtype);
        for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++) {
            const dt_tensor *t = dt_param_get(ctx, i);
            CHECK(t->param->bucket == bucket && t->param->offset == at &&
                  t->data == (char *)bucket->data + at * size);
            at += t->param->count;
        }
        for (size_t i = 0; i < bucket->padded; i++)
            CHECK(get(bucket->data, bucket->dtype, (int64_t)i) == (i < bucket->count));
        bytes += bucket->padded * size;
    }
    CHECK(dt_memory_used(ctx).live[DT_MEM_PARAMS] == bytes &&
          dt_memory_used(ctx).live[DT_MEM_GRADS] == 0);
    close_good(ctx, &m, "buckets");
}

/* The events that a listener got, as text. "F1 f1": enter and leave the forward of block 1; B, I,
   W: a backward, its input half, its weight half. "r2": the gradient of bucket 2 is ready; "R2":
   ready in the last micro-batch. */
typedef struct events {
    char text[512];
    int micros, failed, closed, already_logged;
} events;

static void add_event(events *h, const char *what, int number) {
    size_t n = strlen(h->text);
    snprintf(h->text + n, sizeof h->text - n, "%s%s%d", n ? " " : "", what, number);
}

static void on_enter(dt_ctx *ctx, const dt_event *e, void *user) {
    static const char *const name[] = { "?", "F", "B", "I", "W" };
    CHECK(ctx && e->last == (e->micro == ((events *)user)->micros - 1));
    add_event((events *)user, name[e->phase], e->block);
}

static void on_leave(dt_ctx *ctx, const dt_event *e, void *user) {
    static const char *const name[] = { "?", "f", "b", "i", "w" };
    CHECK(ctx && e->last == (e->micro == ((events *)user)->micros - 1));
    add_event((events *)user, name[e->phase], e->block);
}

static void on_ready(dt_ctx *ctx, dt_bucket *bucket, int last, void *user) {
    CHECK(ctx && bucket->grad && bucket->micros > 0);
    add_event((events *)user, last ? "R" : "r", bucket->index);
}

static int on_failed(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    CHECK(ctx && status != DT_OK && text && *text);
    ((events *)user)->failed++;
    return ((events *)user)->already_logged;
}

static void on_closing(dt_ctx *ctx, void *user) {
    CHECK(ctx != NULL);
    ((events *)user)->closed++;
}

#define LISTENER(h) \
    { \
        .enter = on_enter, .leave = on_leave, .grad_ready = on_ready, .failed = on_failed, \
        .closing = on_closing, .user = (h) \
    }

/* Buckets: 0 table, 1 and 2 the weights of the blocks, 3 head, 4 a and b, 5 unused, 6 frozen. */
typedef struct toy {
    dt_tensor *table, *w[2], *head, *a, *b, *unused, *frozen;
} toy;

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

static dt_tensor *toy_block(dt_tensor *x, void *user) {
    return dt_gelu(dt_linear(x, (dt_tensor *)user, NULL));
}

/* Bits: the parameters that a forward uses. */
enum { USE_B = 1, USE_UNUSED = 2, USE_W1 = 4, USE_TIED = 8 };

static dt_tensor *toy_loss(dt_ctx *ctx, const toy *t, int micro, int use) {
    int32_t ids[6];
    for (int i = 0; i < 6; i++) ids[i] = below(31 + (uint64_t)micro, (uint64_t)i, 17);
    dt_tensor *id = dt_input(ctx, DT_I32, DT_SHAPE(6), ids),
              *x = dt_add(dt_embedding(t->table, id), t->a);
    x = dt_block(ctx, toy_block, x, t->w[0]);
    if (use & USE_W1) x = dt_block(ctx, toy_block, x, t->w[1]);
    x = dt_linear(x, t->frozen, NULL);
    if (use & USE_B) x = dt_add(x, t->b);
    dt_tensor *loss =
        dt_cross_entropy(dt_linear(x, use & USE_TIED ? t->table : t->head, NULL), id, 6);
    if (use & USE_UNUSED) loss = dt_loss(loss, weigh(t->unused, NULL), 0.5);
    return loss;
}

static void grad_ready_order(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    events h = { .micros = 2 };
    dt_listener l = LISTENER(&h);
    toy t = toy_make(ctx, DT_F32);
    dt_listen(ctx, &l);
    dt_micro(ctx, 0, 2);
    dt_backward(toy_loss(ctx, &t, 0, USE_W1 | USE_B));
    CHECK_MSG(
        !strcmp(h.text, "F1 f1 F2 f2 B0 r3 B2 r2 b2 B1 r1 b1 r4 r0 b0 r5"), "events: %s", h.text);
    CHECK(
        t.frozen->grad == NULL && t.frozen->param->bucket->grad == NULL && t.unused->grad != NULL);
    dt_reset(ctx);
    dt_micro(ctx, 1, 2);
    h.text[0] = 0; /* block 2 is not used: its bucket becomes ready at the end, like bucket 5 */
    dt_tensor *loss = toy_loss(ctx, &t, 1, 0);
    dt_backward_input(loss);
    dt_backward_weight(loss);
    CHECK_MSG(
        !strcmp(h.text, "F1 f1 I0 I1 i1 i0 W0 R3 W1 R1 w1 R4 R0 w0 R5 R2"), "events: %s", h.text);
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

/* Copies the gradients of all buckets, with padding, to compare two runs. Returns their bytes. */
static size_t all_grads(const dt_ctx *ctx, char *to) {
    size_t at = 0;
    for (int u = 0; u < dt_bucket_count(ctx); u++) {
        const dt_bucket *bucket = dt_bucket_get(ctx, u);
        size_t bytes = bucket->padded * dt_dtype_size(bucket->dtype);
        if (bucket->frozen) continue;
        if (bucket->grad)
            memcpy(to + at, bucket->grad, bytes);
        else
            memset(to + at, 0xee, bytes);
        at += bytes;
    }
    return at;
}

/* Accumulates three micro-batches and compares with the f32 sum of their single gradients, whose
   bits depend on the order of addition. */
static void accumulation(void) {
    enum { MICROS = 3, ROOM = 4096 };
    static const int use[MICROS] = { USE_W1 | USE_B | USE_TIED, USE_W1 | USE_TIED | USE_UNUSED,
        USE_B | USE_W1 };
    float alone[MICROS][ROOM], together[ROOM], halves[ROOM];
    size_t bytes = 0;
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    toy t = toy_make(ctx, DT_F32);
    dt_buckets_make(ctx, (dt_buckets_desc){ .pad = 8 });
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
            if (way == 0)
                dt_backward(loss);
            else
                dt_backward_input(loss), dt_backward_weight(loss);
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
    CHECK_MSG(wrong == 0 && used > 200,
        "%d of %zu accumulated gradients differ from the sum over micro-batches", wrong, bytes / 4);
    CHECK_MSG(memcmp(together, halves, bytes) == 0,
        "the bits of the two halves differ from a full backward");
    close_good(ctx, &m, "accumulation");
}

/* dt_clear_grads leaves old values in the buffers. Gradients that the next micro-batch does not
   reach must be 0 all the same. */
static void unreached_gradients(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    toy t = toy_make(ctx, DT_F64);
    dt_backward(toy_loss(ctx, &t, 0, USE_W1 | USE_B | USE_UNUSED));
    CHECK(((double *)t.b->grad)[0] != 0 && ((double *)t.unused->grad)[6] != 0 &&
          ((double *)t.w[1]->grad)[0] != 0);
    double before = ((double *)t.a->grad)[0];
    dt_reset(ctx);
    dt_clear_grads(ctx);
    dt_backward(toy_loss(ctx, &t, 0, 0));
    for (int i = 0; i < 25; i++)
        CHECK_MSG(((double *)t.w[1]->grad)[i] == 0, "an old gradient of an unused bucket is left");
    for (int i = 0; i < 7; i++) CHECK(((double *)t.unused->grad)[i] == 0);
    for (int i = 0; i < 5; i++)
        CHECK_MSG(((double *)t.b->grad)[i] == 0, "an old gradient in a used bucket is left");
    CHECK(((double *)t.a->grad)[0] != 0 && ((double *)t.a->grad)[0] != before);
    double kept[5];
    memcpy(kept, t.a->grad, sizeof kept);
    dt_reset(ctx);
    dt_backward(weigh(dt_gelu(t.b), NULL)); /* shares a's bucket; a's gradient keeps its bits */
    CHECK(memcmp(kept, t.a->grad, sizeof kept) == 0 && ((double *)t.b->grad)[0] != 0);
    close_good(ctx, &m, "unreached");
}

static void test_buckets(void) {
    buckets_plan();
    grad_ready_order();
    accumulation();
    unreached_gradients();
}

// ==== 4. Memory =================================================================================

/* A program that uses every op: a small GPT, two micro-batches a step, a side loss, a user-defined
   op, a frozen parameter. */
enum { P_STEPS = 2, P_MICROS = 2, P_B = 2, P_T = 5 };
static const gpt_config small_gpt = {
    .layers = 2, .width = 12, .heads = 3, .kv_heads = 1, .ffn = 20, .seq = 8, .vocab = 17, .tied = 1
};

typedef struct program {
    gpt model;
    dt_tensor *extra, *still;
} program;

static program program_make(dt_ctx *ctx, gpt_config config) {
    program p = { .model = gpt_register(ctx, config) };
    p.extra = dt_param(ctx, "extra", DT_SHAPE(3, 12), DT_UNIFORM(0.5));
    p.still =
        dt_param_at(ctx, "still", DT_SHAPE(12), DT_NORMAL(0.5), (dt_param_desc){ .frozen = 1 });
    return p;
}

/* A scalar made of the parameter x (3,12) by the ops that the GPT does not use. */
static dt_tensor *program_extras(dt_tensor *x, dt_tensor *gain) {
    dt_ctx *ctx = x ? x->ctx : NULL;
    int32_t at[3] = { 2, -1, 0 };
    dt_tensor *rows = dt_input(ctx, DT_I32, DT_SHAPE(3), at), *index = NULL;
    dt_tensor *y = dt_softmax(dt_rmsnorm(dt_gather_rows(x, rows), gain, 0));
    y = dt_mul(dt_dropout(dt_scatter_rows(y, rows, 3), 0.3, 5, rows), dt_affine(x, 0.5, 1));
    y = dt_rope(dt_reshape(y, DT_SHAPE(1, 3, 2, 6)), rows, (dt_rope_desc){ 0 });
    y = dt_swiglu(dt_transpose(dt_reshape(y, DT_SHAPE(3, 6, 2)), 1, 2)); /* (3,6) */
    y = dt_patches(
        dt_reshape(dt_cumsum(dt_matmul(y, y, (dt_matmul_desc){ 1, 0 }), 0), DT_SHAPE(1, 6, 6, 1)),
        (dt_window_desc){ .kernel = { 4, 1 } }, 0); /* (1,3,6,4,1) */
    y = dt_reshape(dt_mean_over(y, 3), DT_SHAPE(3, 6));
    y = dt_masked_fill(y, dt_less(y, dt_affine(y, 0, -1)), -1);
    dt_tensor *both[2] = { y, dt_slice(y, 1, 2, 3) };
    y = dt_max_over(dt_topk(dt_concat(both, 2, 1), 4, &index), 0); /* (4) */
    return dt_sum_over(dt_cast(dt_cast(y, DT_BF16), DT_F32), DT_ALL);
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
        dt_tensor *side =
            dt_mse(dt_add(p->extra, p->still), noise_input(ctx, DT_F32, DT_SHAPE(3, 12), 4, 1), 4);
        dt_tensor *logits = dt_loss(gpt_logits(&p->model, id), weigh(dt_gelu(p->extra), NULL), 0.1);
        logits = dt_loss(logits, program_extras(p->extra, p->still), 0.2);
        dt_tensor *loss = dt_cross_entropy(dt_loss(logits, side, 0.1), label, 14);
        if (step % 2)
            dt_backward(loss);
        else
            dt_backward_input(loss), dt_backward_weight(loss);
        total += dt_item(loss) + 0.1 * dt_item(side);
        dt_reset(ctx);
    }
    return total;
}

static void same_account(const dt_ctx *ctx, const meter *m, const char *when) {
    dt_memory used = dt_memory_used(ctx);
    size_t sum = 0;
    for (int i = 0; i < DT_MEM_CLASSES; i++) {
        CHECK_MSG(used.live[i] == m->live[i], "%s: class %d: %zu bytes, but the meter has %zu",
            when, i, used.live[i], m->live[i]);
        CHECK_MSG(used.peak[i] == m->peak[i], "%s: class %d: peak %zu, but the meter has %zu", when,
            i, used.peak[i], m->peak[i]);
        sum += used.live[i];
    }
    CHECK_MSG(used.live_total == sum && sum == m->live_total,
        "%s: %zu bytes in total, but the meter has %zu", when, used.live_total, sum);
    CHECK_MSG(used.peak_total == m->peak_total, "%s: total peak %zu, but the meter has %zu", when,
        used.peak_total, m->peak_total);
    CHECK_MSG(used.allocations == m->calls, "%s: %zu allocations, but the meter has %zu", when,
        used.allocations, m->calls);
}

static void memory_account(gpt_config config) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    printf("an idle context: %zu bytes\n", m.live_total);
    CHECK(m.live_total == m.live[DT_MEM_HOST] && m.calls == 1);
    same_account(ctx, &m, "idle");
    program p = program_make(ctx, config);
    same_account(ctx, &m, "registered");
    CHECK(m.live[DT_MEM_PARAMS] == 0);
    CHECK(dt_buckets_make(ctx, (dt_buckets_desc){ .bucket_bytes = 2048, .pad = 64 }) == DT_OK);
    same_account(ctx, &m, "with storage");
    size_t params = 0, grads = 0, micro_grads = 0;
    for (int u = 0; u < dt_bucket_count(ctx); u++) {
        const dt_bucket *bucket = dt_bucket_get(ctx, u);
        params += bucket->padded * 4;
        grads += bucket->frozen ? 0 : bucket->padded * 4;
    }
    CHECK(m.live[DT_MEM_PARAMS] == params && m.live[DT_MEM_GRADS] == 0);
    for (int step = 0; step < 5; step++) {
        size_t calls = m.calls;
        program_step(ctx, &p, step);
        same_account(ctx, &m, "after a step");
        CHECK(m.live[DT_MEM_GRADS] == grads && m.live[DT_MEM_PARAMS] == params);
        if (step == 1) micro_grads = m.live[DT_MEM_COMM];
        if (step >= 2 && !UNDER_ASAN)
            CHECK_MSG(m.calls == calls, "step %d allocates %zu times", step, m.calls - calls);
        if (step >= 2) CHECK(m.live[DT_MEM_COMM] == micro_grads);
    }
    printf("a program's bytes: params %zu grads %zu acts %zu comm %zu host %zu temp %zu, %zu "
           "allocations\n",
        m.live[DT_MEM_PARAMS], m.live[DT_MEM_GRADS], m.live[DT_MEM_ACTS], m.live[DT_MEM_COMM],
        m.live[DT_MEM_HOST], m.live[DT_MEM_TEMP], m.calls);
    dt_memory_reset_peak(ctx);
    CHECK(dt_memory_used(ctx).peak_total == m.live_total);
    void *mine = dt_alloc(ctx, DT_MEM_OPTIM, 1000, "optimizer");
    CHECK(mine && m.live[DT_MEM_OPTIM] == 1000 && dt_memory_used(ctx).live[DT_MEM_OPTIM] == 1000);
    dt_free(ctx, DT_MEM_OPTIM, mine, 1000);
    CHECK(dt_memory_used(ctx).live[DT_MEM_OPTIM] == 0 &&
          dt_memory_used(ctx).peak[DT_MEM_OPTIM] == 1000);
    CHECK(dt_alloc(ctx, DT_MEM_TEMP, 0, "nothing") == NULL && dt_error(ctx) == DT_OK);
    close_good(ctx, &m, "the account");
}

static dt_tensor *thin_block(dt_tensor *x, void *user) {
    const int64_t *width = (const int64_t *)user;
    dt_tensor *h =
        dt_gelu(dt_linear(x, noise_input(x->ctx, DT_F32, DT_SHAPE(width[0], 64), 5, 0.1), NULL));
    return dt_linear(h, noise_input(x->ctx, DT_F32, DT_SHAPE(64, width[0]), 6, 0.1), NULL);
}

/* 1 to 7 blocks of very unequal sizes: after 7 steps no step allocates any more. */
static void steady_state(void) {
    static const int64_t width[7] = { 3000, 7, 500, 2000, 1, 4000, 64 };
    for (int blocks = 1; blocks <= 7; blocks++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(64, 64), DT_NORMAL(0.1));
        size_t last = 0;
        int settled = 0;
        for (int step = 0; step < 8; step++) {
            size_t calls = m.calls;
            dt_tensor *x = dt_linear(noise_input(ctx, DT_F32, DT_SHAPE(5, 64), 7, 1), w, NULL);
            for (int b = 0; b < blocks; b++)
                x = dt_block(ctx, thin_block, x, (void *)(uintptr_t)&width[b]);
            dt_backward(weigh(x, NULL));
            dt_reset(ctx);
            dt_clear_grads(ctx);
            if (m.calls != calls) settled = step + 1;
            last = m.calls - calls;
        }
        CHECK_MSG(
            UNDER_ASAN || last == 0, "%d unequal blocks: the eighth step still allocates", blocks);
        if (blocks == 7) printf("7 unequal blocks: steady after %d steps\n", settled);
        close_good(ctx, &m, "unequal blocks");
    }
}

/* Refuses each allocation of the program in turn: only that one, or also all later ones. */
static void memory_refused(gpt_config config) {
    int cases = 0;
    for (int sticky = 0; sticky < 2; sticky++)
        for (int at = 0;; at++) {
            meter m = { .refuse_in = at, .sticky = sticky };
            dt_ctx *ctx = open_ctx(&m);
            if (at == 0) {
                CHECK(ctx == NULL && dt_error(ctx) == DT_ERR_MEM &&
                      strstr(dt_error_text(ctx), "memory"));
                dt_ctx_free(ctx);
                continue;
            }
            double value = 0;
            program p = program_make(ctx, config);
            for (int step = 0; step < P_STEPS; step++) value += program_step(ctx, &p, step);
            int refused = m.refused;
            if (refused) {
                CHECK_MSG(dt_error(ctx) == DT_ERR_MEM, "allocation %d refused: %s", at,
                    dt_error_text(ctx));
                CHECK_MSG(strstr(dt_error_text(ctx), "bytes of class") &&
                              strstr(dt_error_text(ctx), "rank 3"),
                    "allocation %d refused: %s", at, dt_error_text(ctx));
                CHECK_MSG(m.errors == 1, "allocation %d refused: %d lines of error", at, m.errors);
                CHECK_MSG(isnan(value), "allocation %d refused: the losses sum to %g", at, value);
                CHECK(
                    dt_input(ctx, DT_F32, DT_SHAPE(2), NULL) == NULL && dt_scratch(ctx, 8) == NULL);
                CHECK(dt_gelu(p.extra) == NULL &&
                      dt_param(ctx, "late", DT_SHAPE(1), DT_ONES) == NULL);
                cases++;
            } else {
                CHECK_MSG(dt_error(ctx) == DT_OK && isfinite(value), "nothing was refused: %s",
                    dt_error_text(ctx));
            }
            close_ctx(ctx, &m, "refused memory");
            if (!refused) break;
        }
    printf("memory refused in %d places\n", cases);
    CHECK(cases > 40);
}

/* The messages of a context with a memory limit, and the meter's live bytes when it refused. */
typedef struct limit_log {
    meter m;
    size_t live[DT_MEM_CLASSES];
    char table[700];
} limit_log;

static void limit_hook(void *user, int level, int rank, const char *text) {
    limit_log *l = (limit_log *)user;
    meter_log(user, level, rank, text);
    if (level != DT_LOG_NOTICE) return;
    snprintf(l->table, sizeof l->table, "%s", text);
    memcpy(l->live, l->m.live, sizeof l->live);
}

static dt_ctx *limited_ctx(limit_log *l, size_t limit) {
    dt_host host = *dt_host_default();
    memset(l, 0, sizeof *l);
    l->m = METER;
    host.user = l;
    host.alloc = meter_alloc;
    host.free = meter_free;
    host.log = limit_hook;
    return dt_ctx_make((dt_ctx_desc){ .seed = 7, .rank = 3, .host = &host, .mem_limit = limit });
}

/* Compares the refusal's error text and table of bytes with the meter. */
static void check_refusal(dt_ctx *ctx, const limit_log *l, size_t limit) {
    size_t bytes = 0, used = 0, of = 0, live[7] = { 0 }, peak[7] = { 0 }, sum = 0;
    char name[16] = "";
    const char *at = strstr(l->m.text, " bytes of class ");
    CHECK_MSG(dt_error(ctx) == DT_ERR_MEM && l->m.errors == 1 && at, "a limit of %zu: %s", limit,
        l->m.text);
    while (at && at > l->m.text && at[-1] >= '0' && at[-1] <= '9') at--;
    CHECK_MSG(
        at &&
            sscanf(at,
                "%zu bytes of class %15s were refused; %zu bytes are in use of a limit of %zu",
                &bytes, name, &used, &of) == 4 &&
            of == limit && used + bytes > limit,
        "a limit of %zu: %s", limit, l->m.text);
    int read = sscanf(l->table,
        "rank 3: live bytes (and peak): params %zu (%zu) grads %zu (%zu) optim %zu (%zu) acts "
        "%zu (%zu) comm %zu (%zu) host %zu (%zu) temp %zu (%zu)",
        &live[0], &peak[0], &live[1], &peak[1], &live[2], &peak[2], &live[3], &peak[3], &live[4],
        &peak[4], &live[5], &peak[5], &live[6], &peak[6]);
    CHECK_MSG(read == 14, "a limit of %zu: %s", limit, l->table);
    for (int i = 0; i < 7; i++) {
        CHECK(live[i] == l->live[i] && peak[i] == l->m.peak[i]);
        sum += live[i];
    }
    CHECK(sum == used);
}

/* An allocation is refused exactly if it would exceed the limit. */
static void memory_limit(gpt_config config) {
    limit_log l;
    size_t most = 0, idle = 0;
    /* limits: none, multiples of 1/16 of the need, and one byte more and less than the need */
    for (int k = -1; k <= 18; k++) {
        size_t limit = k < 0     ? 0
                       : k <= 16 ? most * (size_t)k / 16 + (k == 0)
                                 : most + (k == 17 ? 1 : -(size_t)1);
        double value = 0;
        dt_ctx *ctx = limited_ctx(&l, limit);
        if (k < 0) idle = l.m.live_total;
        program p = program_make(ctx, config);
        for (int step = 0; step < P_STEPS; step++) value += program_step(ctx, &p, step);
        if (k < 0) most = l.m.peak_total;
        CHECK_MSG((dt_error(ctx) == DT_OK) == (limit == 0 || limit >= most),
            "a limit of %zu where %zu bytes are needed: %s", limit, most, dt_error_text(ctx));
        if (dt_error(ctx) == DT_OK) {
            CHECK(isfinite(value) && l.m.peak_total == most && !l.table[0]);
        } else {
            CHECK(isnan(value) && l.m.peak_total <= (limit > idle ? limit : idle));
            check_refusal(ctx, &l, limit);
        }
        close_ctx(ctx, &l.m, "a limit");
    }
    /* the limit is exact, freed bytes no longer count, and large sizes do not overflow */
    for (int way = 0; way < 3; way++) {
        dt_ctx *ctx = limited_ctx(&l, idle + 1000);
        void *p = NULL;
        for (int i = 0; i < 3; i++) {
            p = dt_alloc(ctx, (dt_mem)i, 1000, "a trial");
            CHECK(p != NULL);
            if (i < 2) dt_free(ctx, (dt_mem)i, p, 1000);
        }
        CHECK(dt_alloc(ctx, DT_MEM_TEMP,
                  way == 0   ? 1
                  : way == 1 ? SIZE_MAX
                             : SIZE_MAX - 1000,
                  "too much") == NULL);
        CHECK(dt_error(ctx) == DT_ERR_MEM && strstr(dt_error_text(ctx), "too much") != NULL);
        dt_free(ctx, DT_MEM_OPTIM, p, 1000);
        close_ctx(ctx, &l.m, "a small limit");
    }
}

static void test_memory(void) {
    for (int recompute = GPT_RECOMPUTE_NONE; recompute <= GPT_RECOMPUTE_FULL; recompute++) {
        gpt_config config = small_gpt;
        config.recompute = recompute;
        memory_account(config);
        memory_refused(config);
        memory_limit(config);
    }
    steady_state();
}

// ==== 5. Errors =================================================================================

/* Tensors for the calls below. */
typedef struct scene {
    dt_ctx *ctx;
    dt_tensor *w, *b, *gain, *table, *w64, *cube; /* (4,3) (7) (3) (5,3) f64 (4,3) (2,2,3) */
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
    s.w64 = dt_param_at(
        ctx, "the_w64", DT_SHAPE(4, 3), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F64 });
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
    return dt_mse(
        dt_linear(s->x, s->w, NULL), noise_input(s->ctx, DT_F32, DT_SHAPE(2, 4), 2, 1), 1);
}

static void e_linear(scene *s) {
    dt_linear(noise_input(s->ctx, DT_F32, DT_SHAPE(2, 5), 1, 1), s->w, NULL);
}
static void e_linear_bias(scene *s) { dt_linear(s->x, s->w, s->b); }
static void e_linear_type(scene *s) {
    dt_linear(noise_input(s->ctx, DT_F64, DT_SHAPE(2, 3), 1, 1), s->w, NULL);
}
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
static void e_add_longer(scene *s) { dt_add(s->w, s->cube); }
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
static void e_attention_types(scene *s) {
    dt_attention(
        heads(s, 3, 2), dt_cast(heads(s, 3, 2), DT_F64), heads(s, 3, 2), (dt_attn_desc){ 0 });
}
static void e_attention_v_type(scene *s) {
    dt_attention(
        heads(s, 3, 2), heads(s, 3, 2), dt_cast(heads(s, 3, 2), DT_F64), (dt_attn_desc){ 0 });
}
static void e_attention_ints(scene *s) {
    dt_tensor *x = dt_cast(heads(s, 3, 2), DT_I32);
    dt_attention(x, x, x, (dt_attn_desc){ 0 });
}
static void e_attention_desc(scene *s) {
    dt_attention(heads(s, 3, 2), heads(s, 4, 2), heads(s, 4, 2), (dt_attn_desc){ .kv_heads = 1 });
}
static void e_attention_flat(scene *s) {
    dt_attention(s->x, heads(s, 4, 2), heads(s, 4, 2), (dt_attn_desc){ 0 });
}
static void e_attention_positions(scene *s) {
    dt_attention(
        heads(s, 3, 2), heads(s, 3, 2), heads(s, 3, 2), (dt_attn_desc){ .positions = s->ids });
}
static void e_attention_documents(scene *s) {
    dt_attention(
        heads(s, 3, 2), heads(s, 3, 2), heads(s, 3, 2), (dt_attn_desc){ .documents = s->ids });
}

static void e_label_high(scene *s) { dt_cross_entropy(s->x, ints(s->ctx, 0, 3), 2); }
static void e_label_count(scene *s) {
    dt_cross_entropy(s->x, dt_input(s->ctx, DT_I32, DT_SHAPE(3), NULL), 2);
}
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

static void e_input_type(scene *s) { dt_input(s->ctx, (dt_dtype)9, DT_SHAPE(2), NULL); }
static void e_input_below(scene *s) { dt_input(s->ctx, DT_F32, DT_SHAPE(2, -3), NULL); }
static void e_input_deep(scene *s) {
    dt_input(s->ctx, DT_F32, (dt_shape){ 7, { 1, 1, 1, 1, 1, 1 } }, NULL);
}
static void e_input_large(scene *s) {
    dt_input(s->ctx, DT_F32, DT_SHAPE((int64_t)1 << 32, (int64_t)1 << 32), NULL);
}
static void e_reshape_below(scene *s) { dt_reshape(s->x, DT_SHAPE(-2)); }
static void e_read_null(scene *s) { dt_read(s->x, NULL); }
static void e_write_null(scene *s) { dt_write(s->w, NULL); }
static dt_tensor *into_nothing(dt_tensor *x, void *user) {
    dt_gelu(x);
    (void)user;
    return NULL;
}
static void e_block_no_fn(scene *s) { dt_block(s->ctx, NULL, s->x, NULL); }
static void e_block_null(scene *s) {
    dt_block(s->ctx, toy_block, s->x, s->w);
    dt_block(s->ctx, into_nothing, s->x, NULL);
}
static void e_block_null_again(scene *s) {
    dt_block_at(s->ctx, into_nothing, s->x, NULL, (dt_block_desc){ .recompute = 1 });
}
static void e_tape_below(scene *s) { dt_tape(s->ctx, -1, 0); }
static void e_tape_stage_below(scene *s) { dt_tape(s->ctx, 1, -2); }
static void e_stage_below(scene *s) { dt_stage(s->ctx, -3); }
static void e_stage_beyond(scene *s) { dt_stage(s->ctx, INT32_MAX); }
static dt_tensor *tape_inside(dt_tensor *x, void *user) {
    (void)user;
    dt_tape(x->ctx, 1, 0);
    return x;
}
static void e_tape_inside(scene *s) { dt_block(s->ctx, tape_inside, s->x, NULL); }
static void e_tape_other_stage(scene *s) {
    dt_tape(s->ctx, 0, 0);
    dt_linear(s->x, s->w, NULL);
    dt_tape(s->ctx, 1, 4);
    dt_tape(s->ctx, 0, 1);
}
static void e_param_other_stage(scene *s) {
    dt_tape(s->ctx, 1, 2);
    dt_linear(noise_input(s->ctx, DT_F32, DT_SHAPE(2, 3), 1, 1), s->w, NULL);
}
static void e_at_shape(scene *s) { dt_backward_at(dt_linear(s->x, s->w, NULL), s->x, DT_BACKWARD); }
static void e_at_type(scene *s) {
    dt_backward_at(
        dt_linear(s->x, s->w, NULL), dt_input(s->ctx, DT_F64, DT_SHAPE(2, 4), NULL), DT_BACKWARD);
}
static dt_tensor *leaked;
static dt_tensor *leaks_inner(dt_tensor *x, void *user) {
    scene *s = (scene *)user;
    leaked = dt_linear(x, s->w, NULL);
    return dt_linear(x, s->w, NULL);
}
static void e_at_dropped(scene *s) {
    dt_tensor *y = dt_block_at(s->ctx, leaks_inner, s->x, s, (dt_block_desc){ .recompute = 1 });
    dt_backward_at(y, leaked, DT_BACKWARD);
}
static void e_at_stranger(scene *s) {
    dt_backward_at(dt_linear(s->x, s->w, NULL), s->stranger, DT_BACKWARD);
}
static void e_at_phase(scene *s) {
    dt_backward_at(
        dt_linear(s->x, s->w, NULL), dt_input(s->ctx, DT_F32, DT_SHAPE(2, 4), NULL), DT_FORWARD);
}
static void e_at_phase_high(scene *s) { dt_backward_at(a_loss(s), NULL, (dt_phase)5); }
static void e_at_no_scalar(scene *s) {
    dt_backward_at(dt_linear(s->x, s->w, NULL), NULL, DT_BACKWARD);
}
/* The bucket has 8 elements. */
static void shard_short(dt_bucket *bucket, void *user) {
    (void)user;
    bucket->padded = 6;
}
static void shard_outside(dt_bucket *bucket, void *user) {
    (void)user;
    bucket->shard_offset = bucket->padded;
}
static void shard_grads_outside(dt_bucket *bucket, void *user) {
    (void)user;
    bucket->grad_offset = SIZE_MAX;
}
static void e_shard_short(scene *s) {
    dt_buckets_make(s->ctx, (dt_buckets_desc){ .shard = shard_short });
}
static void e_shard_outside(scene *s) {
    dt_buckets_make(s->ctx, (dt_buckets_desc){ .shard = shard_outside });
}
static void e_shard_grads_outside(scene *s) {
    dt_buckets_make(s->ctx, (dt_buckets_desc){ .shard = shard_grads_outside });
}
static void e_struct_small(scene *s) {
    dt_buckets_make(s->ctx, (dt_buckets_desc){ .struct_bytes = sizeof(dt_bucket) - 1 });
}
static void e_late_grad(scene *s) {
    dt_no_grad(s->ctx, 1);
    dt_gelu(s->scalar);
    dt_no_grad(s->ctx, 0);
    if (!dt_require_grad(s->scalar)) return; /* a use that recorded nothing is allowed */
    dt_gelu(s->x);
    dt_require_grad(s->x);
}
static void e_init_below(scene *s) { dt_param(s->ctx, "the_init", DT_SHAPE(2), DT_NORMAL(-0.5)); }
static void e_init_nan(scene *s) { dt_param(s->ctx, "the_init", DT_SHAPE(2), DT_UNIFORM(-NAN)); }
static void e_init_kind(scene *s) { dt_param(s->ctx, "the_init", DT_SHAPE(2), (dt_init){ 4, 1 }); }
static void e_lr_below(scene *s) {
    dt_param_at(s->ctx, "the_lr", DT_SHAPE(2), DT_ZEROS, (dt_param_desc){ .lr_scale = -1 });
}
static void e_lr_nan(scene *s) {
    dt_param_at(s->ctx, "the_lr", DT_SHAPE(2), DT_ZEROS, (dt_param_desc){ .lr_scale = -NAN });
}
static void e_name_control(scene *s) { dt_param(s->ctx, "the\nname", DT_SHAPE(2), DT_ZEROS); }
static void e_name_bytes(scene *s) { dt_param(s->ctx, "the_\xff", DT_SHAPE(2), DT_ZEROS); }
static void e_scope_control(scene *s) { dt_scope(s->ctx, "h\x7f"); }
static void e_cut_twice(scene *s) {
    dt_group g = { .rank = 0, .size = 2 };
    dt_param_at(s->ctx, "the_cut", DT_SHAPE(4, 2), DT_ZEROS,
        (dt_param_desc){ .shards = { shard_over(&g, 0), shard_over(&g, 0) } });
}
static void e_micro(scene *s) { dt_micro(s->ctx, 2, 2); }
static void e_micro_zero(scene *s) { dt_micro(s->ctx, 0, 0); }

static void e_late(scene *s) {
    dt_linear(s->x, s->w, NULL);
    dt_param(s->ctx, "the_late", DT_SHAPE(2), DT_ZEROS);
}
static void e_units_twice(scene *s) {
    dt_buckets_make(s->ctx, (dt_buckets_desc){ 0 });
    dt_buckets_make(s->ctx, (dt_buckets_desc){ 0 });
}
static void e_taken(scene *s) { dt_param(s->ctx, "the_w", DT_SHAPE(2), DT_ZEROS); }
static void e_taken_scope(scene *s) {
    dt_scope(s->ctx, "the_");
    dt_param(s->ctx, "w", DT_SHAPE(2), DT_ZEROS);
}
static void e_param_ints(scene *s) {
    dt_param_at(s->ctx, "the_int", DT_SHAPE(2), DT_ZEROS, (dt_param_desc){ .dtype = DT_I32 });
}
static void e_param_empty(scene *s) { dt_param(s->ctx, "the_empty", DT_SHAPE(2, 0), DT_ZEROS); }
static void e_param_deep(scene *s) {
    dt_param(s->ctx, "the_deep", (dt_shape){ 7, { 1, 1, 1, 1, 1, 1 } }, DT_ZEROS);
}
static void e_param_nameless(scene *s) { dt_param(s->ctx, "", DT_SHAPE(2), DT_ZEROS); }
static void e_param_null(scene *s) {
    /* volatile: the compiler would warn, not knowing that dt_param looks */
    const char *volatile name = NULL;
    dt_param(s->ctx, name, DT_SHAPE(2), DT_ZEROS);
}
static void e_param_cut(scene *s) {
    dt_group g = { .rank = 0, .size = 2 };
    dt_param_at(s->ctx, "the_cut", DT_SHAPE(4, 2), DT_ZEROS,
        (dt_param_desc){ .shards = { shard_over(&g, 2) } });
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
    dt_backward(
        dt_record(out, (dt_record_desc){ .name = "my_op", .in = { h }, .backward = failing_back }));
}
static void e_fail_twice(scene *s) {
    dt_fail(s->ctx, DT_ERR_NUMERIC, "first %d", 1);
    dt_fail(s->ctx, DT_ERR_IO, "second %d", 2);
}

typedef struct error_row {
    void (*run)(scene *s);
    dt_status status;
    const char *text[3]; /* parts of the text */
} error_row;

static const error_row error_rows[] = {
    { e_linear, DT_ERR_SHAPE, { "the_w", "(2,5)", "(4,3)" } },
    { e_linear_bias, DT_ERR_SHAPE, { "the_b", "(7)", "(4,3)" } },
    { e_linear_type, DT_ERR_SHAPE, { "the_w", "f64", "f32" } },
    { e_linear_flat, DT_ERR_SHAPE, { "the_gain", "(2,3)", "(3)" } },
    { e_linear_deep, DT_ERR_SHAPE, { "the_cube", "(1,1,1,1,2,3)", "(2,2,3)" } },
    { e_linear_ints, DT_ERR_SHAPE, { "dt_linear", "i32", "not for integers" } },
    { e_stranger, DT_ERR_ARG, { "the_stranger", "dt_linear", "another context" } },
    { e_embedding_table, DT_ERR_SHAPE, { "the_cube", "(2,2,3)", "(2)" } },
    { e_embedding_ids, DT_ERR_SHAPE, { "the_table", "(5,3)", "(2,3)" } },
    { e_embedding_high, DT_ERR_ARG,
        { "dt_embedding(the_table)", "id 5 at place 1", "the table has 5 rows" } },
    { e_embedding_low, DT_ERR_ARG, { "dt_embedding(the_table)", "id -1 at place 0", "5 rows" } },
    { e_layernorm_gain, DT_ERR_SHAPE, { "the_b", "(2,3)", "(7)" } },
    { e_layernorm_bias, DT_ERR_SHAPE, { "the_b", "(2,3)", "(7)" } },
    { e_add, DT_ERR_SHAPE, { "the_b", "(2,3)", "(7)" } },
    { e_add_longer, DT_ERR_SHAPE, { "the_cube", "(4,3)", "(2,2,3)" } },
    { e_add_type, DT_ERR_SHAPE, { "the_w64", "f32", "f64" } },
    { e_add_ints, DT_ERR_SHAPE, { "dt_add", "i32 (2)", "not for integers" } },
    { e_reshape, DT_ERR_SHAPE, { "the_w", "(4,3)", "(5,3)" } },
    { e_gelu_ints, DT_ERR_SHAPE, { "dt_gelu", "i32", "not for integers" } },
    { e_attention_heads, DT_ERR_SHAPE, { "dt_attention", "(1,3,5,2)", "(1,4,2,2)" } },
    { e_attention_kv, DT_ERR_SHAPE, { "dt_attention", "(1,5,2,2)", "k and v must have one" } },
    { e_attention_types, DT_ERR_SHAPE,
        { "dt_attention", "f32 (1,3,2,2) and f64 (1,3,2,2)", "q and k" } },
    { e_attention_v_type, DT_ERR_SHAPE,
        { "dt_attention", "f32 (1,3,2,2) and f64 (1,3,2,2)", "k and v" } },
    { e_attention_ints, DT_ERR_SHAPE, { "dt_attention", "i32", "not for integers" } },
    { e_attention_desc, DT_ERR_SHAPE, { "dt_attention", "kv_heads 1", "(1,4,2,2) has 2" } },
    { e_attention_flat, DT_ERR_SHAPE, { "dt_attention", "(2,3)", "(1,4,2,2)" } },
    { e_attention_positions, DT_ERR_SHAPE, { "dt_attention", "positions", "(2)" } },
    { e_attention_documents, DT_ERR_SHAPE, { "dt_attention", "documents", "(2)" } },
    { e_label_high, DT_ERR_ARG, { "dt_cross_entropy", "label 3 at place 1", "has 3 entries" } },
    { e_label_count, DT_ERR_SHAPE, { "dt_cross_entropy", "(2,3)", "(3)" } },
    { e_label_type, DT_ERR_SHAPE, { "dt_cross_entropy", "(2,3)", "the_gain" } },
    { e_denominator_zero, DT_ERR_ARG, { "dt_cross_entropy", "denominator 0", NULL } },
    { e_denominator_below, DT_ERR_ARG, { "dt_cross_entropy", "denominator -2", NULL } },
    { e_denominator_nan, DT_ERR_ARG, { "dt_mse", "denominator", "nan" } },
    { e_denominator_infinite, DT_ERR_ARG, { "dt_mse", "denominator inf", NULL } },
    { e_mse_shape, DT_ERR_SHAPE, { "the_w", "(2,3)", "(4,3)" } },
    { e_mse_type, DT_ERR_SHAPE, { "the_w64", "f32", "f64" } },
    { e_mse_ints, DT_ERR_SHAPE, { "dt_mse", "i32", "not for integers" } },
    { e_loss_shape, DT_ERR_SHAPE, { "dt_loss", "the_gain", "(3)" } },
    { e_loss_ints, DT_ERR_SHAPE, { "dt_loss", "i32", NULL } },
    { e_input_type, DT_ERR_ARG, { "dt_input", "element type 9", NULL } },
    { e_input_below, DT_ERR_SHAPE, { "dt_input", "(2,-3)", "a dimension is negative" } },
    { e_input_deep, DT_ERR_SHAPE, { "dt_input", "(1,1,1,1,1,1,..)", "more than 6 dimensions" } },
    { e_input_large, DT_ERR_SHAPE,
        { "dt_input", "(4294967296,4294967296)", "more elements than can be counted" } },
    { e_reshape_below, DT_ERR_SHAPE, { "dt_reshape", "(-2)", "a dimension is negative" } },
    { e_read_null, DT_ERR_ARG, { "dt_read(dt_input)", "NULL", NULL } },
    { e_write_null, DT_ERR_ARG, { "dt_write(the_w)", "NULL", NULL } },
    { e_block_no_fn, DT_ERR_ARG, { "dt_block", "no function", NULL } },
    { e_block_null, DT_ERR_ARG, { "dt_block 2: its function returned NULL", NULL, NULL } },
    { e_block_null_again, DT_ERR_ARG, { "dt_block 1: its function returned NULL", NULL, NULL } },
    { e_tape_below, DT_ERR_ARG, { "dt_tape", "tape -1", NULL } },
    { e_tape_stage_below, DT_ERR_ARG, { "dt_tape", "stage -2", NULL } },
    { e_stage_below, DT_ERR_ARG, { "dt_stage", "-3", NULL } },
    { e_stage_beyond, DT_ERR_ARG, { "dt_stage", "2147483647", NULL } },
    { e_tape_inside, DT_ERR_ARG, { "dt_tape", "inside a dt_block", NULL } },
    { e_tape_other_stage, DT_ERR_ARG, { "tape 0 holds ops of stage 0", "stage 1", NULL } },
    { e_param_other_stage, DT_ERR_ARG, { "the_w", "belongs to stage 0", "stage 2" } },
    { e_at_shape, DT_ERR_SHAPE, { "dt_backward_at(dt_linear)", "(2,4)", "(2,3)" } },
    { e_at_type, DT_ERR_SHAPE, { "dt_backward_at(dt_linear)", "f32", "f64" } },
    { e_at_dropped, DT_ERR_ARG, { "dt_backward(dt_linear)", "recomputed dt_block", "gone" } },
    { e_at_stranger, DT_ERR_ARG, { "dt_backward_at(dt_linear)", "another context", NULL } },
    { e_at_phase, DT_ERR_ARG, { "dt_backward_at(dt_linear)", "phase 1", NULL } },
    { e_at_phase_high, DT_ERR_ARG, { "dt_backward_at(dt_mse)", "phase 5", NULL } },
    { e_at_no_scalar, DT_ERR_SHAPE, { "dt_linear", "(2,4)", "no scalar" } },
    { e_shard_short, DT_ERR_ARG, { "dt_buckets_make", "bucket 0 of", "padded to 6" } },
    { e_shard_outside, DT_ERR_ARG, { "dt_buckets_make", "cannot keep", NULL } },
    { e_shard_grads_outside, DT_ERR_ARG, { "dt_buckets_make", "cannot keep", "gradients" } },
    { e_struct_small, DT_ERR_ARG, { "dt_buckets_make", "struct_bytes", NULL } },
    { e_late_grad, DT_ERR_ARG, { "dt_require_grad(dt_input)", "used it already", NULL } },
    { e_init_below, DT_ERR_ARG, { "dt_param(the_init)", "scale -0.5", NULL } },
    { e_init_nan, DT_ERR_ARG, { "dt_param(the_init)", "scale nan", NULL } },
    { e_init_kind, DT_ERR_ARG, { "dt_param(the_init)", "kind 4", NULL } },
    { e_lr_below, DT_ERR_ARG, { "dt_param(the_lr)", "lr_scale -1", NULL } },
    { e_lr_nan, DT_ERR_ARG, { "dt_param(the_lr)", "lr_scale nan", NULL } },
    { e_name_control, DT_ERR_ARG, { "dt_param(the\\x0aname)", "control characters", NULL } },
    { e_name_bytes, DT_ERR_ARG, { "dt_param(the_\\xff)", "UTF-8", NULL } },
    { e_scope_control, DT_ERR_ARG, { "dt_scope(h\\x7f)", "control characters", NULL } },
    { e_cut_twice, DT_ERR_ARG, { "dt_param(the_cut)", "dimension 0 of (4,2)", "sharded twice" } },
    { e_micro, DT_ERR_ARG, { "dt_micro", "2 of 2", NULL } },
    { e_micro_zero, DT_ERR_ARG, { "dt_micro", "0 of 0", NULL } },
    { e_late, DT_ERR_ARG, { "the_late", "storage", NULL } },
    { e_units_twice, DT_ERR_ARG, { "dt_buckets_make", "storage", NULL } },
    { e_taken, DT_ERR_ARG, { "the_w", "taken", NULL } },
    { e_taken_scope, DT_ERR_ARG, { "the_w", "taken", NULL } },
    { e_param_ints, DT_ERR_ARG, { "the_int", "i32", NULL } },
    { e_param_empty, DT_ERR_SHAPE, { "the_empty", "(2,0)", "must be 1 or more" } },
    { e_param_deep, DT_ERR_SHAPE, { "the_deep", "(1,1,1,1,1,1,..)", "more than 6 dimensions" } },
    { e_param_nameless, DT_ERR_ARG, { "dt_param", "name", NULL } },
    { e_param_null, DT_ERR_ARG, { "dt_param", "name", NULL } },
    { e_param_cut, DT_ERR_ARG, { "the_cut", "(4,2)", "dimension 2" } },
    { e_backward_twice, DT_ERR_ARG, { "dt_backward", "dt_mse", "dt_reset" } },
    { e_backward_shape, DT_ERR_SHAPE, { "dt_backward", "(2,4)", "scalar" } },
    { e_backward_leaf, DT_ERR_ARG, { "dt_backward", "dt_mse", "no parameter" } },
    { e_backward_no_grad, DT_ERR_ARG, { "dt_backward", "no parameter", "(dt_no_grad is on)" } },
    { e_forward_after, DT_ERR_ARG, { "dt_linear", "dt_reset", NULL } },
    { e_own_backward, DT_ERR_NUMERIC, { "my_op", NULL, NULL } },
    { e_fail_twice, DT_ERR_NUMERIC, { "first 1", NULL, NULL } },
};

/* After a failure: the log and each listener got one message, and every further call fails without
   another message. */
static void check_after_error(scene *s, const meter *m, const events *h, const events *h2) {
    char before[512];
    snprintf(before, sizeof before, "%s", dt_error_text(s->ctx));
    CHECK_MSG(
        m->errors == 1 && !strcmp(m->text, before), "%d lines of error: %s", m->errors, m->text);
    CHECK_MSG(h->failed == 1 && h2->failed == 1, "the listeners got %d and %d failures", h->failed,
        h2->failed);
    CHECK_MSG(!strncmp(before, "rank 3: ", 8), "no rank in %s", before);
    CHECK(dt_gelu(s->x) == NULL && dt_linear(s->x, s->w, NULL) == NULL &&
          dt_embedding(s->table, s->ids) == NULL);
    CHECK(dt_reshape(s->x, DT_SHAPE(6)) == NULL && dt_add(s->x, s->x) == NULL &&
          dt_mse(s->x, s->x, 1) == NULL);
    CHECK(dt_input(s->ctx, DT_F32, DT_SHAPE(1), NULL) == NULL &&
          dt_new(s->ctx, DT_F32, DT_SHAPE(1)) == NULL);
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
        meter m = METER, m_other = METER;
        dt_ctx *ctx = open_ctx(&m), *other = open_ctx(&m_other);
        events h = { .micros = 1 }, h2 = { .micros = 1 };
        dt_listener l = LISTENER(&h), l2 = LISTENER(&h2);
        scene s = scene_make(ctx, other);
        dt_listen(ctx, &l);
        dt_listen(ctx, &l2);
        CHECK_MSG(dt_error(ctx) == DT_OK && dt_error_text(ctx)[0] == 0, "row %zu: %s", i,
            dt_error_text(ctx));
        row->run(&s);
        CHECK_MSG(dt_error(ctx) == row->status, "row %zu: %s, not %s: %s", i,
            dt_status_name(dt_error(ctx)), dt_status_name(row->status), dt_error_text(ctx));
        for (int t = 0; t < 3; t++) {
            const char *part = row->text[t] ? row->text[t] : "";
            CHECK_MSG(strstr(dt_error_text(ctx), part), "row %zu: no \"%s\" in: %s", i, part,
                dt_error_text(ctx));
        }
        if (dt_error(ctx) != DT_OK) check_after_error(&s, &m, &h, &h2);
        close_ctx(ctx, &m, "a failed context");
        CHECK(h.closed == 1 && h2.closed == 1);
        close_good(other, &m_other, "the other context");
    }
    CHECK(!strcmp(dt_status_name(DT_ERR_SHAPE), "DT_ERR_SHAPE") &&
          !strcmp(dt_dtype_name(DT_F16), "f16"));
    CHECK(dt_dtype_size(DT_F64) == 8 && dt_dtype_size(DT_BF16) == 2 &&
          dt_dtype_size((dt_dtype)77) == 0);
    CHECK(
        dt_error(NULL) == DT_ERR_MEM && dt_backward(NULL) != DT_OK && dt_read(NULL, NULL) != DT_OK);
}

/* A failure of another rank (DT_ERR_PEER) is not logged, nor one that a listener reports as logged
   already. */
static void quiet_failures(void) {
    for (int how = 0; how < 3; how++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        events h = { .already_logged = how == 1 }, h2 = { .micros = 1 };
        dt_listener l = LISTENER(&h), l2 = LISTENER(&h2);
        dt_listen(ctx, &l);
        dt_listen(ctx, &l2);
        CHECK(dt_fail(ctx, how == 2 ? DT_ERR_PEER : DT_ERR_IO, "disk %d", 5) == dt_error(ctx));
        CHECK(!strcmp(dt_error_text(ctx), "rank 3: disk 5") && h.failed == 1 && h2.failed == 1);
        CHECK_MSG(m.errors == (how == 0), "case %d: %d lines of error", how, m.errors);
        close_ctx(ctx, &m, "a quiet failure");
    }
}

/* Messages are one line of printable text, in the log and in the error text, whatever bytes a path
   or a name in them has. */
static void messages_are_printable(void) {
    static const struct {
        const char *part, *shown;
    } rows[] = {
        { "models/gpt 2", "models/gpt 2" },
        /* UTF-8 is not changed */
        { "gr\xc3\xb6\xc3\x9f"
          "er/\xe6\xa8\xa1\xe5\x9e\x8b/\xf0\x9f\x99\x82",
            NULL },
        { "\033]0;x\007", "\\x1b]0;x\\x07" },
        { "a\tb\r\nc\x7f", "a\\x09b\\x0d\\x0ac\\x7f" },
        { "\x9b"
          "31m",
            "\\x9b31m" }, /* a C1 control character as one byte, below as UTF-8 */
        { "\xc2\x9b"
          "31m\xc2\x80\xc2\x9f\xc2\xa0",
            "\\xc2\\x9b31m\\xc2\\x80\\xc2\\x9f\xc2\xa0" },
        { "\xff\xe2\x82 \xc0\xaf \xed\xa0\x80", "\\xff\\xe2\\x82 \\xc0\\xaf \\xed\\xa0\\x80" },
        { "\xe2\x82", "\\xe2\\x82" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        char want[200];
        dt_log(ctx, DT_LOG_ERROR, "%s: no", rows[i].part);
        snprintf(want, sizeof want, "%s: no", rows[i].shown ? rows[i].shown : rows[i].part);
        CHECK_MSG(strcmp(m.text, want) == 0, "row %zu: logged as '%s'", i, m.text);
        dt_fail(ctx, DT_ERR_IO, "%s: no", rows[i].part);
        CHECK_MSG(strcmp(dt_error_text(ctx) + 8, want) == 0, "row %zu: failed as '%s'", i,
            dt_error_text(ctx));
        close_ctx(ctx, &m, "a plain message");
    }
    /* a message that is cut to fit the buffer does not end within a character or an escape */
    char text[32], odd[40];
    for (int room = 1; room < (int)sizeof text; room++) {
        memset(text, '\033', sizeof text);
        text[room - 1] = 0;
        dt__escape(text, (size_t)room);
        CHECK_MSG(
            strlen(text) == (size_t)(room - 1) / 4 * 4 && strspn(text, "\\x1b") == strlen(text),
            "%d: %s", room, text);
    }
    for (int n = 0; n < 30; n++) {
        snprintf(odd, sizeof odd, "%.*s\xf0\x9f\x99\x82", n, "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx");
        snprintf(text, sizeof text, "%.31s", odd);
        dt__escape(text, sizeof text);
        CHECK_MSG(
            strncmp(text, odd, strlen(text)) == 0 && strlen(text) == (size_t)(n < 28 ? n + 4 : n),
            "%d: %s", n, text);
    }
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

/* Misuse that could crash or compute wrong values. Each function runs in a child process and
   returns 1 if the context failed with the expected status. */
static meter child_meter;
static dt_ctx *child_ctx(void) {
    child_meter = METER;
    return open_ctx(&child_meter);
}

static int refused(dt_ctx *ctx, dt_status status) {
    if (dt_error(ctx) != status)
        printf("   %s, not %s: %s\n", dt_status_name(dt_error(ctx)), dt_status_name(status),
            dt_error_text(ctx));
    int ok = dt_error(ctx) == status;
    dt_ctx_free(ctx);
    return ok && child_meter.live_total == 0;
}

static int misuse_backward_param(void) { /* nothing was recorded, so there is no tape yet */
    dt_ctx *ctx = child_ctx();
    dt_backward(dt_param(ctx, "s", DT_SCALAR, DT_ONES));
    return refused(ctx, DT_ERR_ARG);
}

static int misuse_weight_param(void) {
    dt_ctx *ctx = child_ctx();
    dt_backward_weight(dt_param(ctx, "s", DT_SCALAR, DT_ONES));
    return refused(ctx, DT_ERR_ARG);
}

static int misuse_weight_first(void) { /* would compute gradients of 0 */
    dt_ctx *ctx = child_ctx();
    toy t = toy_make(ctx, DT_F32);
    dt_backward_weight(toy_loss(ctx, &t, 0, USE_W1));
    return refused(ctx, DT_ERR_ARG);
}

static int misuse_weight_after(void) { /* would add every gradient a second time */
    dt_ctx *ctx = child_ctx();
    toy t = toy_make(ctx, DT_F32);
    dt_tensor *loss = toy_loss(ctx, &t, 0, USE_W1);
    dt_backward(loss);
    dt_backward_weight(loss);
    return refused(ctx, DT_ERR_ARG);
}

static int misuse_weight_twice(void) {
    dt_ctx *ctx = child_ctx();
    toy t = toy_make(ctx, DT_F32);
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

/* a backward inside a block, which is not on the tape yet: its weight would get no gradient */
static int misuse_backward_inside(void) {
    dt_ctx *ctx = child_ctx();
    toy t = toy_make(ctx, DT_F32);
    dt_block(ctx, backward_inside, noise_input(ctx, DT_F32, DT_SHAPE(2, 5), 1, 1), t.w[0]);
    return refused(ctx, DT_ERR_ARG);
}

static dt_tensor *reset_inside(dt_tensor *x, void *user) {
    dt_reset(x->ctx);
    return toy_block(noise_input(x->ctx, DT_F32, DT_SHAPE(2, 5), 1, 1), user);
}

static int misuse_reset_inside(void) {
    dt_ctx *ctx = child_ctx();
    toy t = toy_make(ctx, DT_F32);
    dt_block(ctx, reset_inside, noise_input(ctx, DT_F32, DT_SHAPE(2, 5), 1, 1), t.w[0]);
    return refused(ctx, DT_ERR_ARG);
}

static int misuse_reshape_deep(void) {
    dt_ctx *ctx = child_ctx();
    dt_shape shape = { 1000, { 1, 1, 1, 1, 1, 1 } };
    dt_reshape(noise_input(ctx, DT_F32, DT_SHAPE(1), 1, 1), shape);
    return refused(ctx, DT_ERR_SHAPE);
}

static int misuse_reshape_below(void) {
    dt_ctx *ctx = child_ctx();
    dt_reshape(noise_input(ctx, DT_F32, DT_SHAPE(2, 3), 1, 1), DT_SHAPE(-2, -3));
    return refused(ctx, DT_ERR_SHAPE);
}

static int misuse_count_wraps(void) { /* 2^66 elements, which is 0 in 64 bits */
    dt_ctx *ctx = child_ctx();
    dt_input(ctx, DT_F32, DT_SHAPE((int64_t)1 << 33, (int64_t)1 << 33), NULL);
    return refused(ctx, DT_ERR_SHAPE);
}

static int misuse_bytes_wrap(void) { /* 2^62 doubles are 2^65 bytes */
    dt_ctx *ctx = child_ctx();
    dt_new(ctx, DT_F64, DT_SHAPE((int64_t)1 << 62));
    return refused(ctx, DT_ERR_SHAPE);
}

static int misuse_param_wraps(void) {
    dt_ctx *ctx = child_ctx();
    dt_param(ctx, "w", DT_SHAPE((int64_t)1 << 33, (int64_t)1 << 33), DT_ZEROS);
    return refused(ctx, DT_ERR_SHAPE);
}

static int misuse_too_many_inputs(void) {
    dt_ctx *ctx = child_ctx();
    dt_tensor *x = dt_require_grad(noise_input(ctx, DT_F32, DT_SHAPE(1), 1, 1));
    dt_record(dt_new(ctx, DT_F64, DT_SCALAR),
        (dt_record_desc){ .name = "many", .in = { x }, .n_in = 9, .backward = weigh_back });
    return refused(ctx, DT_ERR_ARG);
}

static int misuse_no_backward(void) {
    dt_ctx *ctx = child_ctx();
    dt_tensor *x = dt_require_grad(noise_input(ctx, DT_F32, DT_SHAPE(1), 1, 1));
    dt_backward(
        dt_record(dt_new(ctx, DT_F64, DT_SCALAR), (dt_record_desc){ .name = "none", .in = { x } }));
    return refused(ctx, DT_ERR_ARG);
}

static int misuse_record_stranger(void) {
    meter m = METER;
    dt_ctx *ctx = child_ctx(), *other = open_ctx(&m);
    dt_tensor *x = dt_require_grad(noise_input(other, DT_F32, DT_SHAPE(1), 1, 1));
    dt_record(dt_new(ctx, DT_F64, DT_SCALAR),
        (dt_record_desc){ .name = "far", .in = { x }, .backward = weigh_back });
    dt_ctx_free(other);
    return refused(ctx, DT_ERR_ARG);
}

static dt_status ones_back(dt_node *n) {
    double *d = (double *)dt_grad(n, 0);
    for (int64_t i = 0; d && i < dt_count(n->in[0]->shape); i++) d[i] += *(double *)n->out->grad;
    return d ? DT_OK : dt_error(n->out->ctx);
}

/* no misuse: a parameter whose first use is a user-defined op gets storage */
static int misuse_own_op_first(void) {
    dt_ctx *ctx = child_ctx();
    dt_tensor *w = dt_param_at(ctx, "w", DT_SHAPE(3), DT_ONES, (dt_param_desc){ .dtype = DT_F64 });
    dt_tensor *out = dt_new(ctx, DT_F64, DT_SCALAR);
    dt_record(out, (dt_record_desc){ .name = "ones", .in = { w }, .backward = ones_back });
    int ok = dt_backward(out) == DT_OK && w->grad && ((double *)w->grad)[2] == 1;
    dt_param(ctx, "late", DT_SHAPE(2), DT_ZEROS);
    return refused(ctx, DT_ERR_ARG) && ok;
}

/* dt_ctx_make returned NULL: a training loop without checks must not crash */
static int misuse_no_context(void) {
    dt_param(NULL, "w", DT_SHAPE(1), DT_ZEROS);
    dt_scope(NULL, "s");
    dt_buckets_make(NULL, (dt_buckets_desc){ 0 });
    dt_micro(NULL, 0, 1);
    dt_backward(dt_input(NULL, DT_F32, DT_SHAPE(1), NULL));
    dt_block(NULL, toy_block, NULL, NULL);
    dt_no_grad(NULL, 1);
    dt_clear_grads(NULL);
    dt_reset(NULL);
    dt_ctx_free(NULL);
    return dt_param_count(NULL) == 0 && dt_bucket_count(NULL) == 0 && !dt_param_find(NULL, "w") &&
           !dt_param_get(NULL, 0);
}

static dt_tensor *leaf_inside(dt_tensor *x, void *user) {
    dt_tensor **leaf = (dt_tensor **)user;
    *leaf = dt_require_grad(noise_input(x->ctx, DT_F64, DT_SHAPE(2, 5), 2, 1));
    return dt_gelu(times(x, *leaf));
}

/* no misuse: t->grad is valid after the backward until dt_reset, for a leaf inside a block too */
static int misuse_leaf_inside(void) {
    dt_ctx *ctx = child_ctx();
    dt_tensor *leaf[3], *x = dt_require_grad(noise_input(ctx, DT_F64, DT_SHAPE(2, 5), 1, 1)),
                        *y = x;
    double g[3];
    for (int i = 0; i < 3; i++) y = dt_block(ctx, leaf_inside, y, &leaf[i]);
    dt_backward(weigh(y, NULL));
    for (int i = 0; i < 3; i++) g[i] = ((double *)leaf[i]->grad)[0];
    int ok = leaf[0]->grad != leaf[1]->grad && leaf[0]->grad != leaf[2]->grad && g[0] != g[2];
    return refused(ctx, DT_OK) && ok && isfinite(g[0]) && isfinite(g[1]) && isfinite(g[2]);
}

static int misuse_grad_of_ints(void) {
    dt_ctx *ctx = child_ctx();
    dt_require_grad(ints(ctx, 1, 2));
    return refused(ctx, DT_ERR_ARG);
}

static void test_misuse(void) {
#define MISUSE(f) CHECK_MSG(survives(f), "misuse: %s", #f)
    MISUSE(misuse_backward_param);
    MISUSE(misuse_weight_param);
    MISUSE(misuse_weight_first);
    MISUSE(misuse_weight_after);
    MISUSE(misuse_weight_twice);
    MISUSE(misuse_backward_inside);
    MISUSE(misuse_reset_inside);
    MISUSE(misuse_reshape_deep);
    MISUSE(misuse_reshape_below);
    MISUSE(misuse_count_wraps);
    MISUSE(misuse_bytes_wrap);
    MISUSE(misuse_param_wraps);
    MISUSE(misuse_too_many_inputs);
    MISUSE(misuse_no_backward);
    MISUSE(misuse_record_stranger);
    MISUSE(misuse_own_op_first);
    MISUSE(misuse_no_context);
    MISUSE(misuse_leaf_inside);
    MISUSE(misuse_grad_of_ints);
#undef MISUSE
}

/* Removes each kernel from a copy of the table in turn: the program fails and names the kernel. */
static void missing_kernels(void) {
    static const char *const unused[] = { "copy", "digest", "quantize", "adamw", "sgd",
        "cross_entropy_merge", "momentum", "frozen_adam", "sign_pack", "sign_unpack" };
#define TAKE_OUT(k) \
    do { \
        dt_kernels table = *dt_kernels_cpu(); \
        meter m = METER; \
        char name[64]; \
        int used = 1; \
        table.name = "holed"; \
        table.k = NULL; \
        snprintf(name, sizeof name, "kernel %s on holed", #k); \
        for (size_t i = 0; i < sizeof unused / sizeof *unused; i++) \
            used &= strcmp(unused[i], #k) != 0; \
        dt_ctx *ctx = open_with(&m, &table, 7); \
        program p = program_make(ctx, small_gpt); \
        for (int step = 0; step < P_STEPS; step++) program_step(ctx, &p, step); \
        CHECK_MSG(dt_error(ctx) == (used ? DT_ERR_UNSUPPORTED : DT_OK), "without %s: %s", name, \
            dt_error_text(ctx)); \
        CHECK_MSG(!used || strstr(dt_error_text(ctx), name), "without %s: %s", name, \
            dt_error_text(ctx)); \
        close_ctx(ctx, &m, name); \
    } while (0);
    DT_KERNELS(TAKE_OUT)
#undef TAKE_OUT
}

static int gelu_calls;
static dt_status my_unary(const dt_unary_args *a, void *stream) {
    gelu_calls += stream == &gelu_calls && a->act == DT_ACT_GELU;
    for (size_t i = 0; i < a->count; i++)
        put(a->out, a->dtype, (int64_t)i, 2 * get(a->in, a->dtype, (int64_t)i));
    return DT_OK;
}

static void replaced_kernel(void) {
    dt_kernels table = *dt_kernels_cpu();
    table.unary = my_unary;
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .kernels = &table, .stream = &gelu_calls });
    table.unary = NULL; /* the context has its own copy */
    float two = 2;
    CHECK(dt_item(dt_gelu(dt_input(ctx, DT_F32, DT_SCALAR, &two))) == 4 && gelu_calls == 1);
    CHECK(dt_ctx_kernels(ctx)->unary == my_unary && dt_ctx_stream(ctx) == &gelu_calls &&
          dt_ctx_seed(ctx) == 1);
    dt_ctx_attach(ctx, &two);
    CHECK(dt_ctx_attached(ctx) == &two && dt_ctx_rank(ctx) == 0 && dt_error(ctx) == DT_OK);
    dt_ctx_free(ctx);
}

/* The reduction that accumulates a gradient fails: no listener may get the event that the gradient
   is ready. */
static int reduce_calls;
static dt_status failing_reduce(const dt_reduce_args *a, void *stream) {
    (void)a, (void)stream;
    reduce_calls++;
    return DT_ERR_DEVICE;
}

static void failing_kernel(void) {
    dt_kernels table = *dt_kernels_cpu();
    meter m = METER;
    events h = { .micros = 1 };
    dt_listener l = { .grad_ready = on_ready, .user = &h };
    table.reduce = failing_reduce;
    dt_ctx *ctx = open_with(&m, &table, 7);
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(4, 3), DT_NORMAL(1));
    for (int micro = 0; micro < 2; micro++) {
        if (micro) dt_listen(ctx, &l);
        dt_backward(
            weigh(dt_linear(noise_input(ctx, DT_F32, DT_SHAPE(2, 3), 1, 1), w, NULL), NULL));
        dt_reset(ctx);
    }
    CHECK(dt_error(ctx) == DT_ERR_DEVICE && reduce_calls == 1 &&
          strstr(dt_error_text(ctx), "reduce"));
    CHECK_MSG(h.text[0] == 0, "after the failure a listener got events: %s", h.text);
    close_ctx(ctx, &m, "a failing kernel");
}

// ==== 6. The one-rank GPT =======================================================================

/* Compares the gradient of one parameter of n elements. share: the least norm to compare with. */
static void tensor_compare(const char *what, const char *name, const void *ours, dt_dtype dtype,
    const double *theirs, int64_t n, double share, double tolerance, double *worst) {
    double difference = 0, size = 0;
    if (!CHECK_MSG(ours && theirs, "%s: %s: a gradient is missing", what, name)) return;
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
        if (!CHECK_MSG(t && dt_count(t->shape) == s->p[i].count, "parameter %s", s->p[i].name))
            continue;
        void *x = room((size_t)s->p[i].count * 8);
        for (int64_t e = 0; e < s->p[i].count; e++) put(x, dtype, e, s->p[i].value[e]);
        dt_write(t, x);
        free(x);
    }
}

typedef struct gpt_test {
    golden *g;
    char what[64];
    int micros, B, T;
    dt_dtype dtype;
    double tolerance, worst_loss, worst_grad;
} gpt_test;

static const double *step_array(const gpt_test *t, int step, const char *array) {
    char name[64];
    snprintf(name, sizeof name, "step.%d.%s", step, array);
    const double *x = golden_get(t->g, name, NULL);
    CHECK_MSG(x, "%s: no %s", t->what, name);
    return x;
}

/* Compares a step of dt with one of the serial model, then updates the serial model. */
static void gpt_step(gpt_test *t, dt_ctx *ctx, gpt *model, sg_model *serial, int step) {
    const double *ids = step_array(t, step, "ids"), *labels = step_array(t, step, "labels");
    const double *denom = step_array(t, step, "denom"), *golden_loss = step_array(t, step, "loss");
    if (!ids || !labels || !denom || !golden_loss) return;
    int n = t->B * t->T;
    int32_t *id = (int32_t *)room((size_t)n * 4), *label = (int32_t *)room((size_t)n * 4);
    double ours = 0, theirs = 0;
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
    double error = fmax(fabs(ours - theirs), fabs(ours - *golden_loss)) / fabs(theirs),
           norm = sg_grad_norm(serial);
    t->worst_loss = fmax(t->worst_loss, error);
    CHECK_MSG(error <= t->tolerance, "%s: step %d: loss %.17g, serial %.17g, stored %.17g", t->what,
        step, ours, theirs, *golden_loss);
    for (int i = 0; i < serial->n_params; i++) {
        const sg_param *p = &serial->p[i];
        const dt_tensor *w = dt_param_find(ctx, p->name);
        double share = norm * sqrt((double)p->count / (double)model_count(serial));
        char name[64];
        tensor_compare(t->what, p->name, w ? w->grad : NULL, t->dtype, p->grad, p->count, share,
            t->tolerance, &t->worst_grad);
        snprintf(name, sizeof name, "grad.%s", p->name);
        if (step > 1) continue;
        tensor_compare(t->what, name, w ? w->grad : NULL, t->dtype, golden_get(t->g, name, NULL),
            p->count, share, t->tolerance, &t->worst_grad);
    }
    const double *lr = step_array(t, step, "lr"), *opt = golden_get(t->g, "optimizer", NULL);
    if (lr && opt) sg_adamw(serial, *lr, opt[0], opt[1], opt[2], opt[3], opt[4], step);
}

static void gpt_run(const char *file, dt_dtype dtype) {
    char path[512];
    gpt_test t = { .dtype = dtype, .tolerance = dtype == DT_F64 ? 1e-12 : 1e-5 };
    snprintf(path, sizeof path, "%s/%s", golden_folder, file);
    snprintf(t.what, sizeof t.what, "%s %s", file, dt_dtype_name(dtype));
    t.g = golden_open(path);
    const double *z = golden_get(t.g, "sizes", NULL), *batch = golden_get(t.g, "batch", NULL);
    if (!CHECK_MSG(z && batch, "%s: %s", path, strerror(errno))) return;
    sg_sizes sizes = { (int)z[0], (int)z[1], (int)z[2], (int)z[3], (int)z[4], (int)z[5],
        (int)z[6] };
    sg_model *serial = sg_make(sizes);
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    gpt model = gpt_register(ctx, (gpt_config){ .layers = sizes.L,
                                      .width = sizes.C,
                                      .heads = sizes.H,
                                      .kv_heads = sizes.H,
                                      .ffn = sizes.F,
                                      .seq = sizes.T,
                                      .vocab = sizes.V,
                                      .tied = sizes.tied,
                                      .dtype = dtype });
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
    printf("%s: %d steps, largest error of a loss %.2g, of a gradient %.2g\n", t.what,
        (int)batch[0], t.worst_loss, t.worst_grad);
    close_good(ctx, &m, t.what);
    sg_free(serial);
    golden_free(t.g);
}

/* Two runs of the same program give the same bits. */
static void run_to_run_bits(void) {
    double value[2] = { 0, 0 };
    float sum[2] = { 0, 0 };
    for (int i = 0; i < 2; i++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        program p = program_make(ctx, small_gpt);
        for (int step = 0; step < 3; step++) value[i] += program_step(ctx, &p, step);
        for (int k = 0; k < 17 * 12; k++) sum[i] = 3 * sum[i] / 4 + ((float *)p.model.wte->grad)[k];
        close_good(ctx, &m, "two runs");
    }
    CHECK(memcmp(&value[0], &value[1], 8) == 0 && memcmp(&sum[0], &sum[1], 4) == 0);
}

static void test_gpt(void) {
    gpt_run("gpt2_tied.bin", DT_F64);
    gpt_run("gpt2_untied.bin", DT_F64);
    gpt_run("gpt2_tied.bin", DT_F32);
    gpt_run("gpt2_untied.bin", DT_F32);
    run_to_run_bits();
}

// ==== 7. Recomputation ==========================================================================

/* One graph with every kind of block. Bits of `mask` choose the blocks that are recomputed. The
   choice must not change a bit of the results. */
enum {
    RC_LINEAR = 1,
    RC_VIEW = 2,
    RC_SAME = 4,
    RC_OUTSIDE = 8,
    RC_BARE = 16,
    RC_LEAF = 32,
    RC_OUTER = 64,
    RC_INNER = 128,
    RC_ALL = 255
};
typedef struct rc_graph {
    dt_tensor *w, *v, *outside, *leaf, *start;
    int mask, runs, first_runs, seed;
} rc_graph;

static dt_tensor *rc_block(rc_graph *g, int bit, dt_block_fn fn, dt_tensor *x) {
    return dt_block_at(g->w->ctx, fn, x, g, (dt_block_desc){ .recompute = (g->mask & bit) != 0 });
}

/* Uses a parameter and a tensor from outside the block, and adds a side loss. */
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

/* Returns its input. Nothing is copied, and only the side loss is recomputed. */
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

/* Two nested blocks whose user data is a local variable. The second block uses x and the result of
   the first. */
typedef struct rc_pair {
    rc_graph *g;
    dt_tensor *w, *also;
} rc_pair;
static dt_tensor *rc_inner(dt_tensor *x, void *user) {
    const rc_pair *p = (const rc_pair *)user;
    return rc_block(p->g, RC_LINEAR, rc_linear, dt_add(dt_linear(dt_gelu(x), p->w, NULL), p->also));
}

static dt_tensor *rc_outer(dt_tensor *x, void *user) {
    rc_graph *g = (rc_graph *)user;
    dt_block_desc d = { .recompute = (g->mask & RC_INNER) != 0, .user_bytes = sizeof(rc_pair) };
    rc_pair p = { g, g->w, x };
    dt_tensor *y = dt_block_at(x->ctx, rc_inner, x, &p, d);
    p = (rc_pair){ g, g->v, y };
    y = dt_block_at(x->ctx, rc_inner, dt_gelu(y), &p, d);
    memset((void *)&p, 0xff, sizeof p);
    return dt_add(rc_block(g, RC_BARE, rc_bare, y), x);
}

/* The loss of a micro-batch. */
static dt_tensor *rc_forward(dt_ctx *ctx, rc_graph *g) {
    dt_tensor *x =
        dt_require_grad(noise_input(ctx, DT_F32, DT_SHAPE(4, 6), 9 + (uint64_t)g->seed, 1));
    g->start = x;
    g->outside = dt_gelu(dt_linear(x, g->v, NULL));
    x = rc_block(g, RC_LINEAR, rc_linear, x);
    x = dt_reshape(rc_block(g, RC_VIEW, rc_view, x), DT_SHAPE(4, 6));
    x = rc_block(g, RC_SAME, rc_same, x);
    x = dt_add(x, rc_block(g, RC_OUTSIDE, rc_outside, x));
    x = rc_block(g, RC_LEAF, rc_leaf, rc_block(g, RC_BARE, rc_bare, x));
    x = rc_block(g, RC_OUTER, rc_outer, x);
    /* uses w outside of all blocks */
    return weigh(dt_linear(dt_add(x, g->start), g->w, NULL), NULL);
}

/* Gradients of the input and of the leaf. */
static void rc_leaves(const rc_graph *g, char *to) {
    if (!g->start || !g->start->grad || !g->leaf || !g->leaf->grad) return;
    memcpy(to, g->start->grad, 96);
    memcpy(to + 96, g->leaf->grad, 96);
}

/* Runs a step and writes the loss and the gradients of the parameters, the input and the leaf to
   `to`. Returns the number of bytes. */
static size_t rc_step(dt_ctx *ctx, rc_graph *g, int halves, char *to) {
    dt_tensor *loss = rc_forward(ctx, g);
    if (!halves)
        dt_backward(loss);
    else
        dt_backward_input(loss), dt_backward_weight(loss);
    double value = dt_item(loss);
    memcpy(to, &value, 8);
    size_t at = 8 + all_grads(ctx, to + 8);
    rc_leaves(g, to + at);
    dt_reset(ctx);
    return at + 192;
}

static rc_graph rc_make(dt_ctx *ctx, int mask) {
    rc_graph g = { .mask = mask };
    g.w = dt_param(ctx, "w", DT_SHAPE(6, 6), DT_NORMAL(0.5));
    g.v = dt_param(ctx, "v", DT_SHAPE(6, 6), DT_NORMAL(0.5));
    return g;
}

/* Recomputes each kind of block alone and all together, by a full backward and by halves, over two
   micro-batches and three steps. */
static void rc_same_bits(void) {
    static const int masks[] = { 0, 1, 2, 4, 8, 16, 32, 64, 128, 64 | 128, RC_ALL & ~RC_LINEAR,
        RC_ALL };
    char first[2048], got[2048];
    size_t bytes = 0;
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++)
        for (int halves = 0; halves < 2; halves++) {
            meter m = METER;
            dt_ctx *ctx = open_ctx(&m);
            rc_graph g = rc_make(ctx, masks[i]);
            memset(got, 0, sizeof got);
            for (int micro = 0; micro < 6; micro++) {
                size_t calls = m.calls;
                dt_micro(ctx, micro % 2, 2);
                if (micro % 2 == 0) dt_clear_grads(ctx);
                bytes = rc_step(ctx, &g, halves, got);
                CHECK_MSG(UNDER_ASAN || micro < 4 || m.calls == calls,
                    "blocks %d: micro-batch %d allocates %zu times", masks[i], micro,
                    m.calls - calls);
            }
            if (i == 0 && halves == 0) memcpy(first, got, sizeof got);
            CHECK_MSG(bytes < sizeof got && memcmp(first, got, sizeof got) == 0,
                "blocks %d recomputed, halves %d: bits differ", masks[i], halves);
            CHECK_MSG(g.first_runs == 6 * 3, "blocks %d: %d first runs in 6 micro-batches",
                masks[i], g.first_runs);
            if (masks[i] == RC_LINEAR) CHECK_MSG(g.runs == 6 * 6, "rc_linear ran %d times", g.runs);
            if (masks[i] == (RC_OUTER | RC_INNER))
                CHECK_MSG(g.runs == 6 * 7, "rc_linear ran %d times", g.runs);
            close_good(ctx, &m, "recomputed blocks");
        }
}

static dt_tensor *rc_nested(dt_tensor *x, void *user) {
    return dt_gelu(dt_block(x->ctx, toy_block, x, user));
}

/* A listener sees a recomputation as a forward of the same block, right before the block's
   backward. */
static void rc_events(void) {
    for (int halves = 0; halves < 2; halves++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        events h = { .micros = 1 };
        dt_listener l = LISTENER(&h);
        dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(5, 5), DT_NORMAL(1)), *x;
        dt_listen(ctx, &l);
        x = dt_block_at(ctx, rc_nested, noise_input(ctx, DT_F32, DT_SHAPE(2, 5), 1, 1), w,
            (dt_block_desc){ .recompute = 1 });
        x = weigh(dt_block_at(ctx, toy_block, x, w, (dt_block_desc){ .recompute = 1 }), NULL);
        if (!halves)
            dt_backward(x);
        else
            dt_backward_input(x), dt_backward_weight(x);
        CHECK_MSG(!strcmp(h.text,
                      halves ? "F1 F2 f2 f1 F3 f3 I0 F3 f3 I3 i3 F1 F2 f2 f1 I1 I2 i2 i1 i0 "
                               "W0 W3 w3 W1 W2 R0 w2 w1 w0"
                             : "F1 F2 f2 f1 F3 f3 B0 F3 f3 B3 b3 F1 F2 f2 f1 B1 B2 R0 b2 b1 b0"),
            "events: %s", h.text);
        close_good(ctx, &m, "events");
    }
}

/* Under dt_no_grad `layers` blocks of linear + gelu on (B,C) hold x, the product and y at a time,
   recomputed or not. Returns the peak in bytes. With `residual` the block is added to its x. */
static dt_tensor *ng_layer(dt_tensor *x, void *user) {
    return dt_gelu(dt_linear(x, (dt_tensor *)user, NULL));
}

static size_t ng_peak(int layers, int recompute, int residual) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(32, 32), DT_NORMAL(0.1));
    size_t calls = 0;
    dt_no_grad(ctx, 1);
    for (int step = 0; step < 4; step++) {
        calls = m.calls;
        dt_tensor *x = noise_input(ctx, DT_F32, DT_SHAPE(4096, 32), 3, 1);
        for (int i = 0; i < layers; i++) {
            dt_tensor *y =
                dt_block_at(ctx, ng_layer, x, w, (dt_block_desc){ .recompute = recompute });
            x = residual ? dt_add(x, y) : y;
        }
        CHECK(x && x->data && !x->needs_grad);
        dt_reset(ctx);
    }
    CHECK_MSG(UNDER_ASAN || m.calls == calls, "no_grad: %zu allocations in the last step",
        m.calls - calls);
    size_t peak = m.peak[DT_MEM_ACTS];
    close_good(ctx, &m, "no_grad");
    return peak;
}

static void rc_no_grad(void) {
    size_t one = 4096 * 32 * sizeof(float);
    for (int i = 0; i < 4; i++) {
        size_t few = ng_peak(24, i & 1, i >> 1), more = ng_peak(48, i & 1, i >> 1);
        CHECK_MSG(few <= 3 * one + 65536 && few == more,
            "no_grad %d: a peak of %zu bytes for 24 layers, %zu for 48; an activation has %zu", i,
            few, more, one);
    }
}

// ---- the model

/* A GPT has the same gradients with every choice. Of 5 layers the last group of full:2 has one. */
static void rc_gpt_bits(void) {
    enum { ROOM = 1 << 17 };
    static const int choice[][2] = { { GPT_RECOMPUTE_NONE, 0 }, { GPT_RECOMPUTE_SELECTIVE, 0 },
        { GPT_RECOMPUTE_FULL, 0 }, { GPT_RECOMPUTE_FULL, 2 }, { GPT_RECOMPUTE_FULL, 5 },
        { GPT_RECOMPUTE_FULL, 9 } };
    char *bits[2] = { (char *)room(ROOM), (char *)room(ROOM) };
    double value[2] = { 0, 0 };
    for (size_t i = 0; i < sizeof choice / sizeof *choice; i++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        gpt_config c = small_gpt;
        int k = i > 0;
        c.layers = 5;
        c.recompute = choice[i][0];
        c.recompute_every = choice[i][1];
        program p = program_make(ctx, c);
        value[k] = 0;
        for (int step = 0; step < 4; step++) value[k] += program_step(ctx, &p, step);
        size_t bytes = all_grads(ctx, bits[k]);
        CHECK_MSG(bytes <= ROOM && value[k] == value[0] && memcmp(bits[0], bits[k], bytes) == 0,
            "recompute %d every %d: bits differ", c.recompute, c.recompute_every);
        close_good(ctx, &m, "a recomputed GPT");
    }
    free(bits[0]);
    free(bits[1]);
}

/* The bytes of activation memory after the first steps, as counted by the allocator. */
static size_t rc_acts(gpt_config c, int64_t B, int recompute, int every) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    c.recompute = recompute;
    c.recompute_every = every;
    gpt model = gpt_register(ctx, c);
    int32_t *ids = (int32_t *)room((size_t)(B * c.seq) * 4);
    size_t calls = 0;
    for (int step = 0; step < 4; step++) {
        if (step == 3) m.peak[DT_MEM_ACTS] = 0, calls = m.calls;
        dt_tensor *id = dt_input(ctx, DT_I32, DT_SHAPE(B, c.seq), ids);
        dt_backward(gpt_loss(&model, id, id, 10));
        dt_reset(ctx);
        dt_clear_grads(ctx);
    }
    size_t live = m.live[DT_MEM_ACTS];
    CHECK_MSG(UNDER_ASAN || (m.calls == calls && m.peak[DT_MEM_ACTS] == 0),
        "recompute %d every %d: %zu allocations in the last step", recompute, every,
        m.calls - calls);
    free(ids);
    close_good(ctx, &m, "activation bytes");
    return live;
}

/* n tensors of `count` elements, each rounded up to 64 bytes. */
static size_t rc_bytes(int n, int64_t count, dt_dtype dtype) {
    return (size_t)n * (((size_t)count * dt_dtype_size(dtype) + 63) / 64 * 64);
}

/* The activation bytes of a layer, as gpt.h states them. */
static size_t rc_kept(gpt_config c, int64_t B, int recompute) {
    int64_t M = B * c.seq, C = c.width, KD = C / c.heads * c.kv_heads;
    if (recompute == GPT_RECOMPUTE_FULL) return rc_bytes(1, M * C, c.dtype);
    size_t mlp =
        rc_bytes(3, M * C, c.dtype) + rc_bytes(1, M * c.ffn, c.dtype) + rc_bytes(2, M, c.dtype);
    if (recompute == GPT_RECOMPUTE_SELECTIVE) return mlp;
    return mlp + rc_bytes(1, M * C, c.dtype) + rc_bytes(2, M * KD, c.dtype) +
           rc_bytes(2, M, c.dtype) + rc_bytes(1, M * c.heads, c.dtype);
}

/* More layers take exactly the bytes of the formula. All arenas are larger than 64 KiB: then their
   chunks are no larger than their contents. */
static void rc_formula(void) {
    static const struct {
        gpt_config c;
        int64_t B;
    } sizes[] = {
        { { .layers = 4,
              .width = 48,
              .heads = 4,
              .kv_heads = 2,
              .ffn = 96,
              .seq = 32,
              .vocab = 200,
              .dtype = DT_F64 },
            2 },
        { { .layers = 4,
              .width = 40,
              .heads = 5,
              .kv_heads = 1,
              .ffn = 70,
              .seq = 61,
              .vocab = 301,
              .tied = 1 },
            3 },
        { { .layers = 4,
              .width = 42,
              .heads = 3,
              .kv_heads = 3,
              .ffn = 168,
              .seq = 23,
              .vocab = 257 },
            6 },
    };
    for (size_t i = 0; i < 3 && !UNDER_ASAN; i++)
        for (int recompute = 0; recompute < 3; recompute++)
            for (int every = 1; every <= (recompute == GPT_RECOMPUTE_FULL ? 2 : 1); every++) {
                gpt_config more = sizes[i].c;
                more.layers += 2 * every;
                size_t kept = rc_kept(more, sizes[i].B, recompute);
                size_t got = rc_acts(more, sizes[i].B, recompute, every) -
                             rc_acts(sizes[i].c, sizes[i].B, recompute, every);
                CHECK_MSG(got == 2 * kept,
                    "sizes %zu, recompute %d every %d: %zu bytes for two more groups, formula %zu",
                    i, recompute, every, got, 2 * kept);
            }
}

/* Full recomputation in groups of K = sqrt(L) layers keeps L/K outputs and the activations of K
   layers. 4 times the layers take twice the memory. */
static void rc_square_root(void) {
    gpt_config c = { .width = 48, .heads = 4, .kv_heads = 4, .ffn = 192, .seq = 32, .vocab = 64 };
    size_t acts[2][3], B = 4; /* makes four outputs larger than 64 KiB */
    for (int i = 0; i < 2; i++) {
        c.layers = i ? 64 : 16;
        acts[i][0] = rc_acts(c, (int64_t)B, GPT_RECOMPUTE_NONE, 0);
        acts[i][1] = rc_acts(c, (int64_t)B, GPT_RECOMPUTE_FULL, 1);
        acts[i][2] = rc_acts(c, (int64_t)B, GPT_RECOMPUTE_FULL, i ? 8 : 4);
        printf("peak acts of %d layers: none %zu, full %zu, full:%d %zu\n", c.layers, acts[i][0],
            acts[i][1], i ? 8 : 4, acts[i][2]);
    }
    if (UNDER_ASAN) return; /* there every tensor is its own allocation */
    size_t layer = rc_kept(c, (int64_t)B, GPT_RECOMPUTE_NONE),
           out = rc_kept(c, (int64_t)B, GPT_RECOMPUTE_FULL);
    CHECK(acts[1][0] - acts[0][0] == 48 * layer && acts[1][1] - acts[0][1] == 48 * out);
    CHECK_MSG(acts[1][2] - acts[0][2] == 4 * layer + 4 * out,
        "from (16,4) to (64,8): %zu bytes more, not %zu for 4 layers and 4 outputs",
        acts[1][2] - acts[0][2], 4 * layer + 4 * out);
    size_t fixed = acts[0][2] - 4 * layer - 4 * out; /* embedding, head, gradients of two layers */
    double none = (double)acts[1][0] / (double)acts[0][0],
           root = (double)acts[1][2] / (double)acts[0][2];
    printf("4 times the layers: none x %.2f, full x %.2f, full:sqrt(L) x %.2f (without %zu fixed "
           "bytes x %.2f)\n",
        none, (double)acts[1][1] / (double)acts[0][1], root, fixed,
        (double)(acts[1][2] - fixed) / (double)(acts[0][2] - fixed));
    CHECK(none > 2.9 && root < 2.05 && acts[1][2] < acts[1][0] / 4);
}

/* Evaluation and generation hold as many activations for 8 layers as for 2, besides the KV cache. */
static void ng_gpt(void) {
    size_t peak[2][2];
    for (int i = 0; i < 4; i++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        gpt_config c = { .layers = i & 1 ? 8 : 2,
            .width = 48,
            .heads = 4,
            .kv_heads = 4,
            .ffn = 192,
            .seq = 32,
            .vocab = 64 };
        gpt model = gpt_register(ctx, c);
        int32_t ids[128] = { 1 };
        if (i < 2) {
            dt_no_grad(ctx, 1);
            dt_tensor *id = dt_input(ctx, DT_I32, DT_SHAPE(4, 32), ids);
            CHECK(dt_item(gpt_loss(&model, id, id, 10)) > 0);
        } else {
            CHECK(gpt_generate(&model, ids, 3, 20, (gpt_sampling){ .temperature = 0 }) == DT_OK);
        }
        size_t cache = i < 2 ? 0 : (size_t)(2 * c.layers * c.seq * c.width) * sizeof(float);
        peak[i >> 1][i & 1] = m.peak[DT_MEM_ACTS] - cache;
        close_good(ctx, &m, "evaluation and generation");
    }
    for (int i = 0; i < 2; i++)
        CHECK_MSG(peak[i][0] == peak[i][1], "%s: a peak of %zu bytes with 2 layers, %zu with 8",
            i ? "generation" : "evaluation", peak[i][0], peak[i][1]);
    printf("activations under dt_no_grad: evaluation %zu bytes, generation %zu\n", peak[0][1],
        peak[1][1]);
}

// ---- errors

typedef struct rc_fault {
    rc_graph g;
    int kind, runs;
    dt_tensor *kept;
} rc_fault;
enum { RC_SHAPE, RC_TYPE, RC_PARAM, RC_OPS, RC_NULL, RC_X, RC_FAILS, RC_FAULTS };

static dt_tensor *rc_faulty(dt_tensor *x, void *user) {
    rc_fault *f = (rc_fault *)user;
    int second = f->runs++;
    dt_tensor *y = dt_linear(x, second && f->kind == RC_PARAM ? f->g.v : f->g.w, NULL);
    if (second && f->kind == RC_OPS) y = dt_gelu(y);
    if (second && f->kind == RC_SHAPE) y = dt_reshape(y, DT_SHAPE(6, 4));
    if (second && f->kind == RC_TYPE) y = dt_new(x->ctx, DT_F64, DT_SHAPE(4, 6));
    if (second && f->kind == RC_NULL) return NULL;
    if (second && f->kind == RC_X) return x;
    if (second && f->kind == RC_FAILS) dt_fail(x->ctx, DT_ERR_NUMERIC, "the second run");
    return y;
}

static void rc_not_repeatable(void) {
    static const char *const text[RC_FAULTS] = { "(6,4)", "f64", "other ops", "other ops",
        "nothing", "dt_input", "the second run" };
    for (int kind = 0; kind < RC_FAULTS; kind++)
        for (int halves = 0; halves < 2; halves++) {
            meter m = METER;
            dt_ctx *ctx = open_ctx(&m);
            rc_fault f = { .g = rc_make(ctx, 0), .kind = kind };
            dt_tensor *x = noise_input(ctx, DT_F32, DT_SHAPE(4, 6), 2, 1);
            x = weigh(dt_block_at(ctx, rc_faulty, x, &f, (dt_block_desc){ .recompute = 1 }), NULL);
            if (!halves)
                dt_backward(x);
            else
                dt_backward_input(x), dt_backward_weight(x);
            CHECK_MSG(dt_error(ctx) == (kind == RC_FAILS ? DT_ERR_NUMERIC : DT_ERR_ARG) &&
                          m.errors == 1 && f.runs == 2 && strstr(dt_error_text(ctx), text[kind]),
                "fault %d: %s", kind, dt_error_text(ctx));
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

/* A tensor inside a recomputed block is freed with the block. It cannot be used by an op, a user-
   defined op, dt_read, dt_backward, as input or output of a block, or by dt_write. */
static void rc_freed_tensor(void) {
    for (int kind = 0; kind < 7; kind++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        rc_fault f = { .g = rc_make(ctx, 0), .kind = kind };
        float host[24];
        dt_tensor *x = noise_input(ctx, DT_F32, DT_SHAPE(4, 6), 2, 1);
        dt_tensor *y = dt_block_at(ctx, rc_keeper, x, &f, (dt_block_desc){ .recompute = 1 });
        CHECK(y && dt_read(y, host) == DT_OK && dt_gelu(y));
        if (kind == 0) CHECK(dt_gelu(f.kept) == NULL);
        if (kind == 1)
            dt_record(dt_new(ctx, DT_F32, DT_SCALAR),
                (dt_record_desc){ .name = "own", .in = { f.kept }, .backward = weigh_back });
        if (kind == 2) CHECK(dt_read(f.kept, host) != DT_OK);
        if (kind == 3) CHECK(dt_backward(f.kept) != DT_OK);
        if (kind == 4)
            CHECK(
                dt_block_at(ctx, rc_bare, f.kept, NULL, (dt_block_desc){ .recompute = 1 }) == NULL);
        if (kind == 5)
            CHECK(dt_block_at(ctx, rc_giver, x, f.kept, (dt_block_desc){ .recompute = 1 }) == NULL);
        if (kind == 6) { /* a tensor of the first run, used after the backward */
            dt_backward(weigh(y, NULL));
            CHECK(dt_write(f.kept, host) != DT_OK);
        }
        CHECK_MSG(dt_error(ctx) == DT_ERR_ARG &&
                      strstr(dt_error_text(ctx), "recomputed dt_block and is gone"),
            "use %d: %s", kind, dt_error_text(ctx));
        close_ctx(ctx, &m, "a freed tensor");
    }
}

/* Under dt_no_grad a dropped tensor cannot be used: one made inside a block, and x and y of a block
   once a later block runs on newer values. `keep` prevents the second. Two blocks may read one x. */
static void ng_dropped(void) {
    for (int kind = 0; kind < 5; kind++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        rc_fault f = { .g = rc_make(ctx, 0) };
        dt_no_grad(ctx, 1);
        dt_tensor *x = noise_input(ctx, DT_F32, DT_SHAPE(4, 6), 2, 1);
        dt_tensor *y = dt_block_at(ctx, rc_keeper, x, &f, (dt_block_desc){ .keep = kind == 3 });
        dt_tensor *z = dt_block(ctx, rc_bare, kind == 4 ? x : y, NULL);
        CHECK(dt_add(y, z) && dt_error(ctx) == DT_OK);
        CHECK(kind != 4 || dt_add(x, y));
        dt_block(ctx, rc_bare, z, NULL);
        if (kind >= 3) CHECK(dt_gelu(kind == 3 ? x : z) && (kind == 4 || dt_gelu(y)));
        dt_tensor *gone[3] = { f.kept, x, y };
        if (kind < 3) CHECK(dt_gelu(gone[kind]) == NULL);
        CHECK_MSG(kind >= 3 ? dt_error(ctx) == DT_OK
                            : dt_error(ctx) == DT_ERR_ARG &&
                                  strstr(dt_error_text(ctx), "dropped under dt_no_grad") != NULL,
            "dropped %d: %s", kind, dt_error_text(ctx));
        close_ctx(ctx, &m, "dropped under no_grad");
    }
}

static dt_tensor *ng_transient(dt_tensor *x, void *user) {
    dt_tensor **kept = (dt_tensor **)user;
    *kept = dt_new_transient(x->ctx, DT_F32, x->shape);
    return dt_gelu(x);
}

/* A transient tensor is dropped when its block ends, and a later use says so. */
static void ng_transient_dropped(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *kept = NULL, *x = noise_input(ctx, DT_F32, DT_SHAPE(4, 6), 2, 1);
    CHECK(dt_block(ctx, ng_transient, x, &kept) && kept && !kept->data);
    CHECK(dt_gelu(kept) == NULL && dt_error(ctx) == DT_ERR_ARG);
    CHECK_MSG(
        strstr(dt_error_text(ctx), "use it inside the block") != NULL, "%s", dt_error_text(ctx));
    close_ctx(ctx, &m, "a transient tensor");
}

/* Transient tensors of more rows in each step take the memory of the largest, not of all sizes. */
static void growing_transients(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    for (int64_t rows = 1; rows <= 30; rows++) {
        dt_tensor *kept = NULL, *x = noise_input(ctx, DT_F32, DT_SHAPE(rows, 16), 2, 1);
        dt_block(ctx, ng_transient, x, &kept);
        /* with AddressSanitizer the pool keeps no free buffer */
        size_t bytes = UNDER_ASAN ? 0 : (size_t)rows * 16 * sizeof(float);
        CHECK_MSG(dt_memory_used(ctx).live[DT_MEM_COMM] == bytes, "%zu bytes for %lld rows",
            dt_memory_used(ctx).live[DT_MEM_COMM], (long long)rows);
        dt_reset(ctx);
    }
    close_ctx(ctx, &m, "growing transient tensors");
}

typedef struct tg_graph {
    dt_tensor *w, *rows, *made[3];
} tg_graph;

static dt_tensor *tg_block(dt_tensor *x, void *user) {
    tg_graph *g = (tg_graph *)user;
    dt_linear_desc plain = { .activation = 0 };
    g->made[0] = dt__linear(x, g->w, NULL, plain, NULL, DT__LINEAR_TRANSIENT, NULL);
    g->made[1] = dt__lookup_rows("dt_gather_rows", g->made[0], g->rows, 1, 1);
    g->made[2] = dt_require_grad(dt__lookup_rows("dt_gather_rows", x, g->rows, 1, 1));
    return dt_add(dt_scatter_rows(g->made[1], g->rows, 4), dt_scatter_rows(g->made[2], g->rows, 4));
}

/* The residual may not take over the gradient of a transient output: its buffer is released, and the
   next transient gradients, those of the gathered rows, get it. */
static void transient_gradient_stays(void) {
    static const int32_t at[4] = { 2, 0, 3, 1 };
    double seen[2][24];
    for (int transient = 0; transient < 2; transient++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        dt_tensor *w =
            dt_param_at(ctx, "w", DT_SHAPE(6, 6), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F64 });
        dt_tensor *rows = dt_input(ctx, DT_I32, DT_SHAPE(4), at);
        dt_tensor *x = dt_require_grad(noise_input(ctx, DT_F64, DT_SHAPE(4, 6), 2, 1));
        dt_linear_desc desc = { .residual = dt_gelu(x) };
        dt_tensor *gathered = dt__lookup_rows("dt_gather_rows", x, rows, 1, transient);
        gathered = dt__lookup_rows("dt_gather_rows", gathered, rows, 1, transient);
        dt_tensor *sum = dt__linear(dt_scatter_rows(gathered, rows, 4), w, NULL, desc, NULL,
            transient ? DT__LINEAR_TRANSIENT : 0, NULL);
        CHECK(dt_backward(weigh(dt_scatter_rows(sum, rows, 4), NULL)) == DT_OK && x->grad);
        memcpy(seen[transient], x->grad, sizeof seen[transient]);
        close_good(ctx, &m, "residual of a transient output");
    }
    CHECK(memcmp(seen[0], seen[1], sizeof seen[0]) == 0);
}

typedef struct sr_graph {
    dt_tensor *w, *p; /* p: NULL, or a parameter that the linear op multiplies by a frozen w */
} sr_graph;

static dt_tensor *sr_block(dt_tensor *x, void *user) {
    const sr_graph *g = (const sr_graph *)user;
    dt_linear_desc desc = { .residual = dt_gelu(x) };
    return dt_gelu(dt_linear_at(g->p ? g->p : dt_gelu(x), g->w, NULL, desc));
}

/* The residual of an op takes over the gradient of the op's output, which has a buffer of its own,
   only if no weight half follows. */
static void split_residual_gradient(int by_parameter) {
    double seen[2][2 * 32 * 8] = { { 0 } };
    for (int split = 0; split < 2; split++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        sr_graph g = { .w = dt_param_at(ctx, "w", DT_SHAPE(8, 8), DT_NORMAL(1),
                           (dt_param_desc){ .dtype = DT_F64, .frozen = by_parameter }) };
        if (by_parameter)
            g.p = dt_param_at(
                ctx, "p", DT_SHAPE(32, 8), DT_NORMAL(1), (dt_param_desc){ .dtype = DT_F64 });
        dt_tensor *x = dt_require_grad(noise_input(ctx, DT_F64, DT_SHAPE(32, 8), 2, 1));
        dt_tensor *loss = weigh(dt_block(ctx, sr_block, x, &g), NULL);
        const dt_tensor *trained = by_parameter ? g.p : g.w;
        if (split)
            CHECK(dt_backward_input(loss) == DT_OK && dt_backward_weight(loss) == DT_OK);
        else
            CHECK(dt_backward(loss) == DT_OK);
        if (x->grad) memcpy(seen[split], x->grad, 32 * 8 * sizeof(double));
        if (trained->grad)
            memcpy(seen[split] + 32 * 8, trained->grad,
                (size_t)dt_count(trained->shape) * sizeof(double));
        CHECK(x->grad && trained->grad && seen[split][32 * 8 + 5] != 0);
        close_good(ctx, &m, "residual of a split backward");
    }
    CHECK(memcmp(seen[0], seen[1], sizeof seen[0]) == 0);
}

/* The gradient of a transient tensor is dropped after the backward of its op, and one buffer serves
   all. A weight's op reads it in the second half of a split backward; dt_require_grad keeps it. */
static void transient_gradients(void) {
    static const int32_t at[4] = { 2, 0, 3, 1 };
    double seen[2][24];
    for (int split = 0; split < 2; split++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        tg_graph g = { .w = dt_param_at(ctx, "w", DT_SHAPE(6, 6), DT_NORMAL(1),
                           (dt_param_desc){ .dtype = DT_F64 }) };
        g.rows = dt_input(ctx, DT_I32, DT_SHAPE(4), at);
        dt_tensor *x = dt_require_grad(noise_input(ctx, DT_F64, DT_SHAPE(4, 6), 2, 1));
        dt_tensor *loss = weigh(dt_block(ctx, tg_block, x, &g), NULL);
        size_t one = dt__bytes(x), three = dt_memory_used(ctx).live[DT_MEM_COMM];
        CHECK(three == (UNDER_ASAN ? 0 : 3 * one) && !g.made[0]->data && !g.made[1]->data &&
              !g.made[2]->data);
        if (split) {
            CHECK(dt_backward_input(loss) == DT_OK && g.made[0]->grad && !g.made[1]->grad);
            CHECK(dt_backward_weight(loss) == DT_OK);
        } else {
            CHECK(dt_backward(loss) == DT_OK);
        }
        CHECK(!g.made[0]->grad && !g.made[1]->grad && g.made[2]->grad);
        CHECK(dt_memory_used(ctx).live[DT_MEM_COMM] == three);
        int busy = 0;
        for (int i = 0; i < ctx->n_buffers; i++)
            busy += ctx->buffers[i].busy && ctx->buffers[i].mem == DT_MEM_COMM;
        CHECK_MSG(busy == 0, "%d buffers are in use", busy);
        for (int i = 0; i < 24; i++) {
            double grad = ((double *)x->grad)[i];
            seen[split][i] = grad;
            CHECK(grad != 0 && fabs(((double *)g.made[2]->grad)[i]) < 10);
        }
        close_good(ctx, &m, "transient gradients");
    }
    CHECK(memcmp(seen[0], seen[1], sizeof seen[0]) == 0);
}

/* A frozen backbone under dt_no_grad and a recorded head: later blocks under dt_no_grad do not drop
   the features, which the backward of the head reads. */
static void ng_features(void) {
    char bits[2][512];
    for (int later = 0; later < 2; later++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        rc_graph g = rc_make(ctx, 0);
        dt_tensor *x = noise_input(ctx, DT_F32, DT_SHAPE(4, 6), 2, 1);
        dt_no_grad(ctx, 1);
        dt_tensor *h = dt_block(ctx, rc_bare, x, NULL);
        dt_no_grad(ctx, 0);
        dt_tensor *loss = weigh(dt_linear(h, g.w, NULL), NULL);
        dt_no_grad(ctx, 1);
        for (int i = 0; later && i < 3; i++) h = dt_block(ctx, rc_bare, h, NULL);
        dt_no_grad(ctx, 0);
        dt_backward(loss);
        memset(bits[later], 0, sizeof bits[later]);
        all_grads(ctx, bits[later]);
        close_good(ctx, &m, "features");
    }
    CHECK(memcmp(bits[0], bits[1], sizeof bits[0]) == 0);
}

static dt_tensor *rc_from_nothing(dt_tensor *x, void *user) {
    rc_graph *g = (rc_graph *)user;
    CHECK(x == NULL);
    g->runs++;
    return dt_linear(noise_input(g->w->ctx, DT_F32, DT_SHAPE(4, 6), 5, 1), g->w, NULL);
}

static dt_tensor *rc_side_loss(dt_tensor *x, void *user) {
    rc_graph *g = (rc_graph *)user;
    return dt_loss(x, weigh(dt_linear(x, g->v, NULL), NULL), 1);
}

/* A block may have no input, or make only a side loss. In a failed context its function is not
   called. */
static void rc_no_input(void) {
    char bits[2][512];
    for (int again = 0; again < 2; again++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        rc_graph g = rc_make(ctx, 0);
        dt_block_desc d = { .recompute = again };
        dt_tensor *x = dt_block_at(ctx, rc_from_nothing, NULL, &g, d);
        CHECK(x && dt_block_at(ctx, rc_side_loss, x, &g, d) == x && dt_error(ctx) == DT_OK);
        dt_backward(weigh(dt_gelu(x), NULL));
        memset(bits[again], 0, sizeof bits[again]);
        all_grads(ctx, bits[again]);
        CHECK(g.runs == 1 + again && dt_recomputing(ctx) == 0 && dt_recomputing(NULL) == 0);
        dt_reset(ctx);
        CHECK_MSG(
            dt_error(ctx) == DT_OK && m.errors == 0, "no input, no output: %s", dt_error_text(ctx));
        dt_fail(ctx, DT_ERR_IO, "before the block");
        CHECK(dt_block_at(ctx, rc_from_nothing, NULL, &g, d) == NULL && g.runs == 1 + again);
        close_ctx(ctx, &m, "no input, no output");
    }
    CHECK(memcmp(bits[0], bits[1], sizeof bits[0]) == 0);
}

// ---- recomputed outputs of ops, and dt_last_use

/* The parameters of a layer, and the tensors that it makes. */
typedef struct ro_layer {
    dt_tensor *w, *v, *gain, *bias, *norm, *gelu, *unit, *softmax;
    int last_use; /* 1: passes dt_last_use tensors that an op must not overwrite */
    int over;     /* number of tensors that were overwritten */
} ro_layer;

static dt_tensor *ro_last(const ro_layer *l, dt_tensor *x) {
    return l->last_use ? dt_last_use(x) : x;
}

/* Dropout of x, over x if the tape allows it. */
static dt_tensor *ro_dropout(ro_layer *l, dt_tensor *x) {
    const void *before = x ? x->data : NULL;
    dt_tensor *y = dt_dropout(ro_last(l, x), 0.25, 5, NULL);
    l->over += y && y->data == before;
    return y;
}

static dt_tensor *ro_forward(dt_tensor *x, void *user) {
    ro_layer *l = (ro_layer *)user;
    dt_linear_desc gelu = { .activation = DT_ACT_GELU };
    l->norm = dt_layernorm(x, l->gain, l->bias, 0);
    l->gelu = dt_linear_at(l->norm, l->w, NULL, gelu);
    dt_tensor *y = dt_linear(l->gelu, l->v, NULL); /* (64,32) */
    l->unit = dt_swiglu(dt_reshape(y, DT_SHAPE(64, 2, 16)));
    l->softmax = dt_softmax(dt_silu(y));
    dt_tensor *read = dt_linear(l->softmax, l->v, NULL), *square = dt_mul(read, read);
    /* the tape refuses these: a backward reads a softmax, a factor and an input, the user a leaf */
    dt_tensor *sum = dt_add(ro_dropout(l, l->softmax), ro_dropout(l, read));
    sum = dt_add(dt_add(sum, square), ro_dropout(l, x));
    sum = dt_add(sum, ro_dropout(l, dt_require_grad(dt_linear(l->gelu, l->v, NULL))));
    sum = dt_add(sum, ro_dropout(l, dt_softmax(y)));
    sum = dt_add(sum, dt_linear(l->norm, dt_affine(l->v, 0.5, 0), NULL)); /* no parameter */
    dt_tensor *z = dt_linear(l->norm, l->v, NULL), *alias = dt_detach(z);
    sum = dt_add(dt_add(sum, ro_dropout(l, z)), alias);
    CHECK(l->over == 0);
    /* and allows this one: nothing reads the output of a linear layer */
    sum = dt_add(sum, ro_dropout(l, dt_linear(l->norm, l->v, NULL)));
    CHECK(l->over == l->last_use);
    l->over = 0;
    return dt_concat((dt_tensor *[]){ sum, l->unit }, 2, 1);
}

/* The layer's gradients and those of its input in a block, recomputed or not, equal those in the
   root, where nothing is dropped, bit for bit; also with dt_last_use, and with a backward in two
   halves. In 16 bits the product computes GELU from sums that are not rounded yet. */
static void ro_same_bits(void) {
    static const dt_dtype types[] = { DT_F32, DT_F64, DT_BF16, DT_F16 };
    static char bits[2][1 << 16];
    for (int i = 0; i < 4 * 12; i++) {
        int kind = i % 3, last_use = i / 3 % 2, halves = i / 6 % 2, k = i % 12 > 0;
        dt_dtype type = types[i / 12];
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        dt_param_desc d = { .dtype = type };
        ro_layer l = { .last_use = last_use };
        l.w = dt_param_at(ctx, "w", DT_SHAPE(32, 32), DT_NORMAL(0.5), d);
        l.v = dt_param_at(ctx, "v", DT_SHAPE(32, 32), DT_NORMAL(0.5), d);
        l.gain = dt_param_at(ctx, "gain", DT_SHAPE(32), DT_NORMAL(1), d);
        l.bias = dt_param_at(ctx, "bias", DT_SHAPE(32), DT_NORMAL(1), d);
        dt_tensor *x = dt_require_grad(noise_input(ctx, type, DT_SHAPE(64, 32), 3, 1));
        dt_tensor *y = kind == 0 ? ro_forward(x, &l)
                                 : dt_block_at(ctx, ro_forward, x, &l,
                                       (dt_block_desc){ .recompute = kind == 2 });
        dt_tensor *loss = weigh(y, NULL);
        if (halves)
            dt_backward_input(loss), dt_backward_weight(loss);
        else
            dt_backward(loss);
        size_t bytes = all_grads(ctx, bits[k]), more = x && x->grad ? dt__bytes(x) : 0;
        CHECK(more > 0 && bytes + more <= sizeof bits[k]);
        memcpy(bits[k] + bytes, x->grad, more);
        CHECK_MSG(memcmp(bits[0], bits[k], bytes + more) == 0,
            "%s, kind %d, last use %d, halves %d: other gradients than in the root",
            dt_dtype_name(type), kind, last_use, halves);
        close_good(ctx, &m, "recomputed outputs");
    }
}

/* At the end of a block the outputs of norm, GELU (not in 16 bits), gated unit are dropped. A read
   before the backward computes them again, a read after it fails, and so does a read of a tensor
   that a recomputed block has freed or an op has overwritten. */
static void ro_reads(void) {
    for (int kind = 0; kind < 8; kind++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        dt_param_desc d = { .dtype = kind == 4 ? DT_BF16 : DT_F32 };
        ro_layer l = { 0 }, root;
        double host[2][64 * 32];
        l.w = dt_param_at(ctx, "w", DT_SHAPE(32, 32), DT_NORMAL(0.5), d);
        l.v = dt_param_at(ctx, "v", DT_SHAPE(32, 32), DT_NORMAL(0.5), d);
        l.gain = dt_param_at(ctx, "gain", DT_SHAPE(32), DT_NORMAL(1), d);
        l.bias = dt_param_at(ctx, "bias", DT_SHAPE(32), DT_NORMAL(1), d);
        root = l;
        dt_tensor *x = noise_input(ctx, d.dtype, DT_SHAPE(64, 32), 3, 1);
        ro_forward(x, &root);
        dt_tensor *y =
            dt_block_at(ctx, ro_forward, x, &l, (dt_block_desc){ .recompute = kind == 6 });
        dt_tensor *of[3] = { l.norm, l.gelu, l.unit }, *at[3] = { root.norm, root.gelu, root.unit };
        CHECK(at[0]->data && at[1]->data && at[2]->data);
        for (int i = 0; i < 3; i++)
            CHECK_MSG(!of[i]->data == (kind == 6 || kind != 4 || i != 1), "kind %d: %s", kind,
                of[i]->name);
        if (kind < 3) { /* reads one of them, and compares with the root's */
            CHECK(dt_read(of[kind], host[0]) == DT_OK && dt_read(at[kind], host[1]) == DT_OK);
            CHECK(memcmp(host[0], host[1], dt__bytes(of[kind])) == 0);
            CHECK(dt_backward(weigh(y, NULL)) == DT_OK && !of[kind]->data);
        }
        if (kind == 3) CHECK(dt_gelu(l.unit) && dt_backward(weigh(y, NULL)) == DT_OK);
        if (kind < 5) {
            close_good(ctx, &m, "recomputed outputs");
            continue;
        }
        if (kind == 5) dt_backward(weigh(y, NULL));
        if (kind == 7) {
            dt_tensor *old = dt_linear(x, l.v, NULL);
            CHECK(dt_dropout(dt_last_use(old), 0.5, 1, NULL) && !old->data);
            l.norm = dt_reshape(old, DT_SHAPE(32, 64));
        }
        CHECK(kind == 7 ? !l.norm : dt_read(l.norm, host[0]) != DT_OK);
        CHECK_MSG(dt_error(ctx) == DT_ERR_ARG &&
                      strstr(dt_error_text(ctx), kind == 5   ? "dropped by the backward"
                                                 : kind == 6 ? "recomputed dt_block and is gone"
                                                             : "was overwritten"),
            "kind %d: %s", kind, dt_error_text(ctx));
        close_ctx(ctx, &m, "a dropped output");
    }
}

/* A residual layer of three linear ops. */
static dt_tensor *ro_residual(dt_tensor *x, void *user) {
    dt_tensor *w = (dt_tensor *)user, *h = x;
    for (int i = 0; i < 2; i++) h = dt_linear(h, w, NULL);
    return dt_linear_at(h, w, NULL, (dt_linear_desc){ .residual = x });
}

static dt_tensor *ro_stack(dt_tensor *x, void *user) {
    dt_tensor **w = (dt_tensor **)user;
    for (; *w; w++) x = ro_residual(x, *w);
    return x;
}

/* Peak of the activations of a block with `layers` residual layers. */
static size_t ro_peak(int layers) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_tensor *w[9] = { NULL };
    for (int i = 0; i < layers; i++) {
        char name[] = { 'w', (char)('0' + i), 0 };
        w[i] = dt_param(ctx, name, DT_SHAPE(32, 32), DT_NORMAL(0.1));
    }
    for (int step = 0; step < 3; step++) {
        dt_memory_reset_peak(ctx);
        dt_backward(weigh(
            dt_block(ctx, ro_stack, noise_input(ctx, DT_F32, DT_SHAPE(1024, 32), 3, 1), w), NULL));
        dt_reset(ctx);
    }
    size_t peak = dt_memory_used(ctx).peak[DT_MEM_ACTS];
    close_good(ctx, &m, "gradients");
    return peak;
}

/* A block's gradients live for the time of two ops: one more layer adds the bytes of its three
   outputs, and none for gradients. */
static void ro_gradients(void) {
    size_t one = 1024 * 32 * sizeof(float), few = ro_peak(4), more = ro_peak(8);
    CHECK_MSG(UNDER_ASAN || (more - few == 4 * 3 * one && few < (4 * 3 + 6) * one),
        "%zu bytes with 4 layers, %zu with 8; an activation has %zu", few, more, one);
}

/* A feed-forward layer, (N,C) -> (N,C), gated or with GELU. */
typedef struct ro_mlp {
    dt_tensor *up, *down;
    int gated, twice; /* twice 1: two ops read the hidden layer, or what the gated unit reads */
    dt_tensor *in;    /* what the gated unit reads, (N,2,F) */
} ro_mlp;

static dt_tensor *ro_mlp_forward(dt_tensor *x, void *user) {
    ro_mlp *l = (ro_mlp *)user;
    dt_linear_desc d = { .activation = l->gated ? DT_ACT_NONE : DT_ACT_GELU };
    l->in = dt_linear_at(x, l->up, NULL, d);
    dt_tensor *h = l->gated ? dt_swiglu(l->in) : l->in, *y = dt_linear(h, l->down, NULL);
    return l->twice ? dt_add(y, dt_linear(l->gated ? dt_geglu(l->in) : h, l->down, NULL)) : y;
}

/* Trains the layer for three steps in the root (kind 0), in a block (1) or in a recomputed block
   (2). Stores the gradients. Returns the peak of the activations. */
static size_t ro_mlp_train(ro_mlp l, dt_dtype type, int kind, char *bits, size_t *bytes) {
    enum { N = 256, C = 4, F = 128 };
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_param_desc d = { .dtype = type };
    l.up = dt_param_at(ctx, "up", l.gated ? DT_SHAPE(2, F, C) : DT_SHAPE(F, C), DT_NORMAL(0.5), d);
    l.down = dt_param_at(ctx, "down", DT_SHAPE(C, F), DT_NORMAL(0.5), d);
    for (int step = 0; step < 3; step++) {
        dt_clear_grads(ctx);
        dt_memory_reset_peak(ctx);
        dt_tensor *x = dt_require_grad(noise_input(ctx, type, DT_SHAPE(N, C), 3, 1));
        dt_tensor *y = kind == 0 ? ro_mlp_forward(x, &l)
                                 : dt_block_at(ctx, ro_mlp_forward, x, &l,
                                       (dt_block_desc){ .recompute = kind == 2 });
        CHECK(dt_backward(weigh(y, NULL)) == DT_OK);
        *bytes = all_grads(ctx, bits);
        memcpy(bits + *bytes, x->grad, dt__bytes(x));
        *bytes += dt__bytes(x);
        if (l.gated) CHECK(!l.in->data == (kind == 2 || (kind == 1 && !l.twice)));
        dt_reset(ctx);
    }
    size_t peak = dt_memory_used(ctx).peak[DT_MEM_ACTS];
    close_good(ctx, &m, "a feed-forward layer");
    return peak / (N * F * dt_dtype_size(type));
}

/* In a block, GELU's output comes back over the pre-activation, and the gradient of gate and up is
   written over gate and up, unless another op reads these: the gradients have the same bits as in
   the root, and the backward holds no third array (N,F), or no fifth one. */
static void ro_in_place(void) {
    static const dt_dtype types[] = { DT_F32, DT_F64, DT_BF16 };
    static char bits[2][1 << 16];
    for (int i = 0; i < 3 * 12; i++) {
        int kind = i % 3, twice = i / 3 % 2, gated = i / 6 % 2;
        dt_dtype type = types[i / 12];
        size_t bytes, arrays = ro_mlp_train((ro_mlp){ .gated = gated, .twice = twice }, type, kind,
                          bits[kind > 0], &bytes);
        CHECK(bytes <= sizeof bits[0]);
        CHECK_MSG(memcmp(bits[0], bits[kind > 0], bytes) == 0,
            "%s, kind %d, gated %d, twice %d: other gradients than in the root",
            dt_dtype_name(type), kind, gated, twice);
        if (UNDER_ASAN || kind != 1 || twice || type == DT_BF16) continue;
        CHECK_MSG(arrays == (gated ? 4 : 2), "%s, gated %d: the memory of %zu hidden layers",
            dt_dtype_name(type), gated, arrays);
    }
}

static void test_recompute(void) {
    ro_same_bits();
    ro_reads();
    ro_gradients();
    ro_in_place();
    rc_same_bits();
    rc_events();
    rc_no_grad();
    ng_gpt();
    rc_gpt_bits();
    rc_formula();
    rc_square_root();
    rc_not_repeatable();
    rc_freed_tensor();
    ng_dropped();
    ng_transient_dropped();
    growing_transients();
    transient_gradients();
    split_residual_gradient(0);
    split_residual_gradient(1);
    transient_gradient_stays();
    ng_features();
    rc_no_input();
}

// ==== 8. Tapes and stages =======================================================================

enum { TAPE_MICROS = 4, TAPE_BYTES = 1024 };

/* Results of a step: the losses, the gradients of the leaves, and the parameters' gradients after
   the last micro-batch. */
typedef struct tape_bits {
    double loss[TAPE_MICROS];
    char leaves[TAPE_MICROS][192], grads[TAPE_BYTES];
} tape_bits;

/* Runs the phases in `steps`, such as "F0 I1 W1 B2". Micro-batch i is on tape first + i % tapes. */
static void tape_steps(
    dt_ctx *ctx, rc_graph *base, const char *steps, int first, int tapes, tape_bits *bits) {
    rc_graph g[TAPE_MICROS];
    dt_tensor *loss[TAPE_MICROS];
    dt_clear_grads(ctx);
    for (const char *s = steps; *s; s += s[2] ? 3 : 2) {
        int i = s[1] - '0';
        dt_tape(ctx, first + i % tapes, 0);
        dt_micro(ctx, i, TAPE_MICROS);
        if (*s == 'F') {
            g[i] = *base;
            g[i].seed = i;
            loss[i] = rc_forward(ctx, &g[i]);
            bits->loss[i] = dt_item(loss[i]);
        }
        if (*s == 'B') dt_backward(loss[i]);
        if (*s == 'I') dt_backward_input(loss[i]);
        if (*s == 'I' || *s == 'B') rc_leaves(&g[i], bits->leaves[i]);
        if (*s == 'W') dt_backward_weight(loss[i]);
        if (*s == 'W' || *s == 'B') dt_reset(ctx);
    }
    all_grads(ctx, bits->grads);
}

static void tapes_same_bits(void) {
    static const struct {
        const char *steps;
        int first, tapes;
    } rows[] = { { "F0 B0 F1 B1 F2 B2 F3 B3", 0, 1 }, { "F0 F1 B0 B1 F2 F3 B2 B3", 0, 2 },
        { "F0 F1 B0 F2 B1 F3 B2 B3", 3, 2 }, { "F0 F1 F2 F3 B0 B1 B2 B3", 1, 4 },
        { "F0 F1 I0 F2 I1 W0 I2 F3 W1 I3 W2 W3", 0, 3 },
        { "F0 F1 F2 F3 I3 I2 I1 I0 W0 W1 W2 W3", 1, 4 } };
    static const int masks[] = { 0, RC_LINEAR, RC_OUTER | RC_INNER, RC_ALL };
    static tape_bits want, got;
    for (size_t k = 0; k < sizeof masks / sizeof *masks; k++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            meter m = METER;
            dt_ctx *ctx = open_ctx(&m);
            rc_graph g = rc_make(ctx, masks[k]);
            size_t calls = 0;
            for (int step = 0; step < 5; step++) {
                if (step == 4) calls = m.calls;
                memset(&got, 0, sizeof got);
                tape_steps(ctx, &g, rows[i].steps, rows[i].first, rows[i].tapes, &got);
            }
            CHECK_MSG(
                UNDER_ASAN || m.calls == calls, "'%s': the fifth step allocates", rows[i].steps);
            if (i == 0 && k == 0) want = got;
            CHECK_MSG(memcmp(&want, &got, sizeof got) == 0 && got.loss[0] != got.loss[1] &&
                          got.leaves[3][0] != 0,
                "'%s', blocks %d recomputed: bits differ", rows[i].steps, masks[k]);
            close_good(ctx, &m, "tapes");
        }
}

static void event_stage(dt_ctx *ctx, const dt_event *e, void *user) {
    (void)ctx;
    add_event((events *)user, "s", e->stage);
}

static void event_ready(dt_ctx *ctx, dt_bucket *bucket, int last, void *user) {
    (void)ctx, (void)last;
    add_event((events *)user, "r", bucket->index);
}

/* A bucket has parameters of one stage only, and a backward makes the buckets of its own stage
   ready, used or not. */
static void stages_of_buckets(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    events h = { .micros = 1 };
    dt_listener l = { .enter = event_stage, .grad_ready = event_ready, .user = &h };
    dt_tensor *w[5];
    for (int i = 0; i < 5; i++) {
        char name[2] = { (char)('a' + i), 0 };
        if (i % 2 == 0) dt_stage(ctx, i ? i + 1 : 0); /* stages 0 0 3 3 5 */
        w[i] = dt_param(ctx, name, DT_SHAPE(3, 3), DT_NORMAL(1));
    }
    dt_listen(ctx, &l);
    for (int i = 0; i < 2; i++) {
        dt_tape(ctx, i, i ? 3 : 0);
        h.text[0] = 0;
        dt_backward(weigh(
            dt_linear(noise_input(ctx, DT_F32, DT_SHAPE(2, 3), 1, 1), w[2 * i + 1], NULL), NULL));
        CHECK_MSG(!strcmp(h.text, i ? "s3 r1" : "s0 r0"), "stage %d: events: %s", i, h.text);
        CHECK(w[2 * i + 1]->grad && !w[4]->grad && (i || !w[2]->grad));
    }
    for (int i = 0; i < 5; i++) {
        CHECK(dt_bucket_count(ctx) == 3 && w[i]->param->bucket->index == i / 2 &&
              w[i]->param->bucket->stage == (i / 2 ? i / 2 * 2 + 1 : 0) &&
              w[i]->param->stage == w[i]->param->bucket->stage);
        if (i < 4) CHECK((get(w[i]->grad, DT_F32, 0) != 0) == i % 2);
    }
    dt_unlisten(ctx, &l);
    close_good(ctx, &m, "stages");
}

/* A chain of ops on two tapes: dt_backward_at takes the gradient of the second tape's input to the
   first tape. It has the bits of the chain on one tape. */
static void backward_of_two_tapes(void) {
    for (int k = 0; k < 6; k++) {
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        char grads[2][512];
        toy t = toy_make(ctx, k % 2 ? DT_F64 : DT_F32);
        dt_dtype type = k % 2 ? DT_F64 : DT_F32;
        dt_shape shape = DT_SHAPE(2, 5), flat = DT_SHAPE(10);
        dt_loss_scale(ctx, 8);
        memset(grads, 0, sizeof grads);
        for (int shard_over = 0; shard_over < 2; shard_over++) {
            dt_clear_grads(ctx);
            dt_tape(ctx, 0, 0);
            dt_tensor *y = toy_block(dt_add(noise_input(ctx, type, shape, 1, 1), t.a), t.w[0]),
                      *x = y, *up = NULL;
            if (k >= 4) y = x = dt_reshape(y, flat);
            if (shard_over)
                dt_tape(ctx, 1, 0), x = dt_require_grad(dt_input(ctx, type, y->shape, y->data));
            dt_tensor *loss =
                weigh(dt_add(dt_linear(k >= 4 ? dt_reshape(x, shape) : x, t.w[1], NULL),
                          k >= 4 ? dt_reshape(x, shape) : x),
                    NULL);
            dt_backward(loss);
            if (shard_over && CHECK(x->grad != NULL)) {
                const void *grad = x->grad;
                dt_tape(ctx, 0, 0);
                up = dt_input(ctx, type, y->shape, grad);
                if (k % 3 == 0)
                    CHECK(dt_backward_at(y, up, DT_BACKWARD) == DT_OK);
                else
                    CHECK(dt_backward_at(y, up, DT_BACKWARD_INPUT) == DT_OK &&
                          dt_backward_at(y, up, DT_BACKWARD_WEIGHT) == DT_OK);
                dt_reset(ctx);
                dt_tape(ctx, 1, 0);
            }
            size_t at = 0;
            for (int i = 0; i < 3; i++) {
                const dt_tensor *p = i == 2 ? t.a : t.w[i];
                size_t bytes = (size_t)dt_count(p->shape) * dt_dtype_size(type);
                if (!CHECK(p->grad != NULL)) continue;
                memcpy(grads[shard_over] + at, p->grad, bytes);
                at += bytes;
            }
            dt_reset(ctx);
        }
        CHECK_MSG(memcmp(grads[0], grads[1], sizeof grads[0]) == 0 && get(grads[0], type, 0) != 0,
            "chain %d on two tapes: bits differ", k);
        close_good(ctx, &m, "backward of two tapes");
    }
}

/* A backward from an output that needs no gradient sets all gradients to 0, and listeners get the
   events. */
static void backward_without_grad(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    events h = { .micros = 1 };
    dt_listener l = { .grad_ready = event_ready, .user = &h };
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(2), DT_ONES),
              *x = noise_input(ctx, DT_F32, DT_SHAPE(3), 1, 1);
    dt_listen(ctx, &l);
    dt_tensor *y = dt_gelu(x), *up = noise_input(ctx, DT_F32, DT_SHAPE(3), 2, 1);
    CHECK(dt_backward_at(y, up, DT_BACKWARD) == DT_OK && !y->needs_grad);
    dt_data(w);
    CHECK(dt_backward_at(NULL, up, DT_BACKWARD) == DT_ERR_ARG);
    dt_reset(ctx);
    up = noise_input(ctx, DT_F32, DT_SHAPE(3), 2, 1);
    CHECK(dt_backward_at(dt_gelu(noise_input(ctx, DT_F32, DT_SHAPE(3), 1, 1)), up, DT_BACKWARD) ==
          DT_OK);
    CHECK_MSG(!strcmp(h.text, "r0") && w->grad && get(w->grad, DT_F32, 0) == 0 &&
                  get(w->grad, DT_F32, 1) == 0,
        "events: '%s'", h.text);
    dt_unlisten(ctx, &l);
    close_good(ctx, &m, "backward without gradients");
}

typedef struct own_bucket {
    dt_bucket bucket;
    int asked;
} own_bucket;

static void shard_each(dt_bucket *bucket, void *user) {
    own_bucket *own = (own_bucket *)bucket;
    int n = bucket->index ? 3 : 2, k = bucket->index ? 2 : 0;
    CHECK(bucket->padded == (bucket->index ? 8u : 12u) && bucket->shard_offset == 0 &&
          bucket->shard_count == bucket->padded && bucket->grad_count == bucket->padded &&
          bucket->count == (bucket->index ? 5u : 9u) && own->asked == 0);
    own->asked = ++*(int *)user;
    if (bucket->index == 2) return;
    bucket->padded = bucket->index ? 12 : 16;
    bucket->shard_count = bucket->padded / (size_t)n;
    bucket->shard_offset = (size_t)k * bucket->shard_count;
}

/* Every bucket is sharded in its own way: 9 elements padded to 16, shard 0 of 2; 5 padded to 12,
   shard 2 of 3; 5 padded to 8, not sharded. */
static void shards_of_buckets(void) {
    static const size_t want[3][3] = { { 16, 0, 8 }, { 12, 8, 4 }, { 8, 0, 8 } };
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    int asked = 0;
    for (int i = 0; i < 3; i++) {
        char name[2] = { (char)('a' + i), 0 };
        dt_stage(ctx, i);
        dt_param(ctx, name, DT_SHAPE(i ? 5 : 9), DT_ONES);
    }
    dt_buckets_desc desc = {
        .pad = 4, .shard = shard_each, .user = &asked, .struct_bytes = sizeof(own_bucket)
    };
    CHECK(dt_buckets_make(ctx, desc) == DT_OK && asked == 3);
    for (int u = 0; u < 3; u++) {
        const dt_bucket *bucket = dt_bucket_get(ctx, u);
        if (!CHECK(bucket && bucket->shard)) continue;
        CHECK(((const own_bucket *)bucket)->asked == u + 1);
        CHECK_MSG(bucket->padded == want[u][0] && bucket->shard_offset == want[u][1] &&
                      bucket->shard_count == want[u][2],
            "bucket %d: %zu elements of %zu from %zu", u, bucket->shard_count, bucket->padded,
            bucket->shard_offset);
        CHECK((bucket->data == NULL) == (u < 2));
        for (size_t i = 0; i < bucket->shard_count; i++)
            CHECK(get(bucket->shard, DT_F32, (int64_t)i) ==
                  (bucket->shard_offset + i < bucket->count));
    }
    CHECK(dt_memory_used(ctx).live[DT_MEM_PARAMS] == (8 + 4 + 8) * 4);
    close_good(ctx, &m, "shards of buckets");
}

static void test_tapes(void) {
    tapes_same_bits();
    stages_of_buckets();
    backward_of_two_tapes();
    backward_without_grad();
    shards_of_buckets();
}

/* ---- dt_keep ---- */

enum { KEEP_STEPS = 5, KEEP_WIDTH = 6 };

/* A recurrent network, h' = tanh(x + U h), whose hidden state goes from step to step: by dt_keep, or
   through host memory, or twice by dt_keep in a step (the second time after the backward). Stores
   the loss and the gradient of U of each step. */
enum { KEEP, BY_HOST, KEEP_TWICE };
static void recurrent(int way, double *out) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    float state[KEEP_WIDTH] = { 0 }, x[KEEP_WIDTH];
    dt_tensor *u = dt_param(ctx, "u", DT_SHAPE(KEEP_WIDTH, KEEP_WIDTH), DT_NORMAL(0.5)),
              *kept = NULL;
    size_t live = 0;
    for (int step = 0; step < KEEP_STEPS; step++) {
        for (int i = 0; i < KEEP_WIDTH; i++) x[i] = (float)(i + step) / 7;
        dt_tensor *h = kept ? kept : dt_input(ctx, DT_F32, DT_SHAPE(1, KEEP_WIDTH), state);
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(1, KEEP_WIDTH), x), *older = kept;
        h = dt_tanh(dt_add(in, dt_linear(h, u, NULL)));
        if (way == KEEP_TWICE) dt_keep(in, "hidden");
        if (way != BY_HOST) kept = dt_keep(h, "hidden");
        CHECK(way == BY_HOST || (kept && kept != older && !kept->needs_grad));
        dt_tensor *loss = dt_mse(h, in, 1);
        out[0] = dt_item(loss);
        CHECK(dt_backward(loss) == DT_OK);
        for (int i = 0; i < KEEP_WIDTH * KEEP_WIDTH; i++) out[1 + i] = get(u->grad, DT_F32, i);
        out += 1 + KEEP_WIDTH * KEEP_WIDTH;
        if (way == BY_HOST) dt_read(h, state);
        dt_clear_grads(ctx);
        dt_reset(ctx);
        if (way != BY_HOST)
            CHECK(dt_memory_used(ctx).live[DT_MEM_ACTS] >= KEEP_WIDTH * sizeof(float));
        if (step == 2) live = dt_memory_used(ctx).live_total;
        if (step > 2) CHECK_MSG(dt_memory_used(ctx).live_total == live, "memory grows");
    }
    close_good(ctx, &m, "a recurrent network");
}

static dt_tensor *keep_in_block(dt_tensor *x, void *user) {
    dt_tensor *y = dt_gelu(x);
    *(dt_tensor **)user = dt_keep(y, "inside");
    return y;
}

static void keep_refused(void) {
    for (int k = 0; k < 7; k++) {
        static const char *const why[] = { "dt_keep(dt_gelu): a name is needed",
            "dt_keep(dt_gelu): inside a recomputed dt_block, which runs twice",
            "dt_require_grad(a): a tensor of dt_keep has no gradient",
            "dt_forget: dt_keep has no tensor 'b'",
            "dt_gelu(a): this tensor f32 (2) is gone: a later dt_keep or dt_forget of 'a'",
            "dt_gelu(a): this tensor f32 (2) is gone: a later dt_keep or dt_forget of 'a'",
            "dt_keep: " };
        meter m = METER;
        dt_ctx *ctx = open_ctx(&m);
        float x[2] = { 1, 2 };
        dt_tensor *in = dt_gelu(dt_input(ctx, DT_F32, DT_SHAPE(2), x)), *inside = NULL;
        dt_tensor *a = dt_keep(in, "a");
        if (k == 0) dt_keep(in, "");
        if (k == 1) dt_block_at(ctx, keep_in_block, in, &inside, (dt_block_desc){ .recompute = 1 });
        if (k == 2) dt_require_grad(a);
        if (k == 3) dt_forget(ctx, "b");
        if (k == 4) dt_keep(in, "a");
        if (k == 5) CHECK(dt_forget(ctx, "a") == DT_OK);
        if (k == 4 || k == 5) {
            CHECK(dt_gelu(a) != NULL); /* valid until the reset */
            dt_reset(ctx);
            if (k == 4) { /* the struct of `a` is not used again before the next reset */
                in = dt_input(ctx, DT_F32, DT_SHAPE(2), x);
                CHECK(dt_keep(in, "a") != a);
            }
            CHECK(!dt_gelu(a));
        }
        if (k == 6) dt_keep(NULL, "a"), dt_add(in, NULL);
        CHECK_MSG(dt_error(ctx) == DT_ERR_ARG && (k == 6 || strstr(dt_error_text(ctx), why[k])),
            "%d: %s", k, dt_error_text(ctx));
        close_ctx(ctx, &m, "keep refused");
    }
}

/* A kept tensor keeps type, shape and placement, and may be made in a plain block. */
static void keep_properties(void) {
    meter m = METER;
    dt_ctx *ctx = open_ctx(&m);
    dt_group group;
    memset(&group, 0, sizeof group);
    group.size = 2, group.name = "tp";
    static const int group_ranks[2] = { 0, 1 };
    group.ranks = group_ranks;
    dt_comm *comm = (dt_comm *)&group;
    float x[6] = { 1, 2, 3, 4, 5, 6 }, y[6];
    dt_tensor *kept = NULL;
    for (int step = 0; step < 4; step++) {
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(3 + step % 2 * -1, 2), x), *inside = NULL;
        dt_place(in, comm, DT_SHARD(1));
        dt_tensor *half = dt_cast(in, DT_BF16);
        if (kept) {
            CHECK(dt_placement_of(kept, comm).kind == DT_PLACEMENT_SHARD &&
                  dt_placement_of(kept, comm).dim == 1);
            CHECK(kept->dtype == DT_BF16 && kept->shape.d[0] == (step % 2 ? 3 : 2));
            dt_read(dt_cast(kept, DT_F32), y);
            CHECK(y[0] == 1 && y[3] == 4);
        }
        kept = dt_keep(half, "state");
        dt_block(ctx, keep_in_block, in, &inside);
        CHECK_MSG(dt_error(ctx) == DT_OK && inside, "%s", dt_error_text(ctx));
        dt_reset(ctx);
        CHECK(inside && dt_read(inside, y) == DT_OK && y[0] > 0.8f && y[0] < 0.9f);
    }
    close_good(ctx, &m, "properties of kept tensors");
}

static void test_keep(void) {
    enum { VALUES = KEEP_STEPS * (1 + KEEP_WIDTH * KEEP_WIDTH) };
    static double values[3][VALUES];
    for (int way = 0; way < 3; way++) recurrent(way, values[way]);
    for (int way = 1; way < 3; way++)
        for (int i = 0; i < VALUES; i++)
            CHECK_MSG(values[way][i] == values[0][i], "way %d, value %d: %g, not %g", way, i,
                values[way][i], values[0][i]);
    CHECK(values[0][2] == 0 && values[0][3 + KEEP_WIDTH * KEEP_WIDTH] != 0);
    keep_refused();
    keep_properties();
}

int main(int argc, char **argv) {
    if (argc > 1) golden_folder = argv[1];
    test_slices();
    test_buckets();
    test_memory();
    test_errors();
    quiet_failures();
    messages_are_printable();
    missing_kernels();
    replaced_kernel();
    failing_kernel();
    test_gpt();
    test_recompute();
    test_tapes();
    test_keep();
    test_misuse();
    return check_done("test_tensor");
}
