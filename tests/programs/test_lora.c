/* test_lora.c - LoRA and QLoRA: blocks, products of blocks, PEFT's losses, adapter files, refusals

   NF4's codes, scales and values have the bits of bitsandbytes (tests/golden/lora/vectors.bin). A
   product that reads blocks has the bits of the product of their values. Training the adapter in
   tests/golden/lora gives PEFT's losses on one rank and in layouts. test_matrix.c compares layouts
   with one rank. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#define DT__QUANT_BAND 5000 /* a quantised matrix is read in several bands */
#include "dt_zero.h"
#include "examples/gpt.h"
#include "examples/gpt_files.h"
#include "examples/lora_files.h"
#include "tests/golden/golden.h"
#include "tests/support/check.h"
#include <sys/stat.h>
#include <unistd.h>

static const char *const base_folder = "tests/golden/lora/base", *const adapter_folder =
                                                                     "tests/golden/lora/adapter";
static golden *vectors;
static char scratch[] = "/tmp/dt_lora_XXXXXX";

static const double *vector(const char *name, int64_t *n) {
    const double *x = golden_get(vectors, name, n);
    if (!x) *n = 0;
    CHECK_MSG(x != NULL, "tests/golden/lora/vectors.bin has no %s", name);
    return x;
}

static float random_float(uint64_t at) {
    uint32_t out[4];
    dt__philox(11, at, out);
    return (float)((double)out[0] / 2147483648.0 - 1);
}

// ==== Blocks ====================================================================================

static void nf4_is_bitsandbytes(void) {
    int64_t n, blocks, pairs;
    const double *in = vector("nf4.in", &n), *absmax = vector("nf4.absmax", &blocks),
                 *codes = vector("nf4.codes", &pairs), *out = vector("nf4.out", &n);
    float *x = (float *)malloc((size_t)n * sizeof *x), *y = (float *)malloc((size_t)n * sizeof *y);
    unsigned char *stored = (unsigned char *)malloc((size_t)blocks * 36);
    int wrong_codes = 0, wrong_scales = 0, wrong_values = 0;
    for (int64_t i = 0; i < n; i++) x[i] = (float)in[i];
    CHECK(n == 64 * blocks && n == 2 * pairs && blocks == 24);
    CHECK(dt_quantize(DT_QUANT_NF4, x, n, stored) == DT_OK);
    CHECK(dt_dequantize(DT_QUANT_NF4, stored, n, y) == DT_OK);
    for (int64_t b = 0; b < blocks; b++) {
        float scale;
        memcpy(&scale, stored + 36 * b, 4);
        wrong_scales += scale != (float)absmax[b];
        for (int i = 0; i < 32; i++) wrong_codes += stored[36 * b + 4 + i] != codes[32 * b + i];
    }
    for (int64_t i = 0; i < n; i++) wrong_values += y[i] != (float)out[i];
    CHECK_MSG(!wrong_codes && !wrong_scales && !wrong_values,
        "of %lld values %d bytes of codes, %d scales and %d values are not bitsandbytes'",
        (long long)n, wrong_codes, wrong_scales, wrong_values);
    free(x);
    free(y);
    free(stored);
}

/* INT8 rounds to the nearest multiple of the scale, and the largest value keeps its place. */
static void int8_rounds(void) {
    float x[128], y[128], scale;
    unsigned char stored[136];
    for (int i = 0; i < 128; i++) x[i] = random_float((uint64_t)i) * (i < 64 ? 1e-3f : 1e4f);
    CHECK(dt_quantize(DT_QUANT_INT8, x, 128, stored) == DT_OK);
    CHECK(dt_dequantize(DT_QUANT_INT8, stored, 128, y) == DT_OK);
    for (int b = 0; b < 2; b++) {
        float most = 0, got = 0, error = 0;
        memcpy(&scale, stored + 68 * b, 4);
        for (int i = 64 * b; i < 64 * b + 64; i++) {
            most = fmaxf(most, fabsf(x[i]));
            got = fmaxf(got, fabsf(y[i]));
            error = fmaxf(error, fabsf(x[i] - y[i]));
        }
        CHECK_MSG(scale == most / 127 && error <= 0.501f * scale && got == 127 * scale,
            "block %d: scale %g of %g, largest error %g, largest value %g", b, scale, most, error,
            got);
    }
}

static void sizes(void) {
    CHECK(dt_quant_bytes(DT_QUANT_NF4, 640) == 360 && dt_quant_bytes(DT_QUANT_INT8, 640) == 680);
    CHECK(dt_quant_bytes(DT_QUANT_BF16, 3) == 6 && dt_quant_bytes(DT_QUANT_NF4, 65) == 0);
    CHECK(dt_quant_bytes(DT_QUANT_NONE, 64) == 0 && dt_quant_bytes((dt_quant)9, 64) == 0);
    CHECK(strcmp(dt_quant_name(DT_QUANT_NF4), "nf4") == 0);
    CHECK(dt_quantize(DT_QUANT_NF4, NULL, 63, NULL) == DT_ERR_ARG);
    CHECK(dt_dequantize((dt_quant)9, NULL, 64, NULL) == DT_ERR_ARG);
}

static void quiet(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* INT8 and NF4 have no NaN and no infinity: such weights are refused, and a file's tensor is named. */
static void not_finite(void) {
    const float bad[] = { NAN, INFINITY, -INFINITY };
    dt_host host = *dt_host_default();
    host.log = quiet;
    for (int i = 0; i < 3; i++) {
        float x[128] = { 0 };
        unsigned char stored[256];
        char path[128];
        x[77] = bad[i];
        CHECK(dt_quantize(DT_QUANT_INT8, x, 128, stored) == DT_ERR_NUMERIC);
        CHECK(dt_quantize(DT_QUANT_NF4, x, 128, stored) == DT_ERR_NUMERIC);
        CHECK(dt_quantize(DT_QUANT_BF16, x, 128, stored) == DT_OK);
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &host });
        dt_tensor *w = dt_param_at(ctx, "w", DT_SHAPE(2, 64), DT_ONES,
            (dt_param_desc){ .frozen = 1, .quant = DT_QUANT_NF4 });
        snprintf(path, sizeof path, "%s/not_finite", scratch);
        dt_weights *file = dt_weights_create(ctx, path, (dt_weights_desc){ 0 });
        dt_weights_write(
            file, dt_weights_declare(file, "w", DT_F32, DT_SHAPE(2, 64)), 0, 128, DT_F32, x);
        CHECK(dt_weights_close(file) == DT_OK);
        file = dt_weights_open(ctx, path);
        dt_weight_part part = { .name = "w", .rows = 2 };
        CHECK(dt_weights_load(file, w, 64, &part, 1) == DT_ERR_NUMERIC);
        CHECK_MSG(
            strstr(dt_error_text(ctx), "dt_weights_load(w): a value is not finite, which nf4"),
            "%s", dt_error_text(ctx));
        dt_ctx_free(ctx);
    }
}

// ==== Products ==================================================================================

/* c of a product that reads blocks, and of the same product of their values in the type of a. */
static void product_of_blocks(
    dt_dtype dtype, int quant, int64_t m, int64_t n, int64_t k, int trans_b, int naive) {
    size_t size = dt_dtype_size(dtype), work = dt_matmul_work(n, k, dtype);
    float *values = (float *)malloc((size_t)(n * k) * sizeof *values);
    char *memory = (char *)calloc(1, (size_t)(m * k + 2 * m * n + n * k) * 8 + work);
    char *a = memory, *c = a + m * k * 8, *d = c + m * n * 8, *b = d + m * n * 8;
    void *stored = malloc((size_t)(n * k) * 4);
    for (int64_t i = 0; i < n * k; i++) values[i] = random_float((uint64_t)i);
    dt_quantize((dt_quant)quant, values, n * k, stored);
    dt_dequantize((dt_quant)quant, stored, n * k, values);
    for (int64_t i = 0; i < n * k; i++) dt__set_number(dtype, b, (size_t)i, values[i]);
    for (int64_t i = 0; i < m * k; i++)
        dt__set_number(dtype, a, (size_t)i, random_float((uint64_t)(900000 + i)));
    dt_matmul_args args = { .dtype = dtype, .c = c, .a = a, .m = m, .n = n, .k = k };
    args.trans_b = trans_b;
    args.work = naive ? NULL : b + n * k * 8;
    args.work_bytes = naive ? 0 : work;
    args.b = stored;
    args.b_quant = quant;
    CHECK(dt_kernels_cpu()->matmul(&args, NULL) == DT_OK);
    args.b = b;
    args.b_quant = 0;
    args.c = d;
    CHECK(dt_kernels_cpu()->matmul(&args, NULL) == DT_OK);
    CHECK_MSG(memcmp(c, d, (size_t)(m * n) * size) == 0,
        "%s x %s, %lld x %lld x %lld, trans_b %d, %s: not the product of the values",
        dt_dtype_name(dtype), dt_quant_name((dt_quant)quant), (long long)m, (long long)n,
        (long long)k, trans_b, naive ? "naive" : "fast");
    free(values);
    free(memory);
    free(stored);
}

static void products(void) {
    static const int64_t shapes[][3] = { { 1, 64, 64 }, { 7, 192, 128 }, { 33, 64, 640 } };
    for (int quant = DT_QUANT_BF16; quant <= DT_QUANT_NF4; quant++)
        for (int i = 0; i < 12; i++) {
            const int64_t *s = shapes[i % 3];
            dt_dtype dtype = i % 2 ? DT_F64 : DT_F32;
            product_of_blocks(dtype, quant, s[0], s[1], s[2], i / 6, i % 4 == 0);
        }
    dt_matmul_args args = { .dtype = DT_F32, .m = 1, .n = 3, .k = 65, .trans_b = 1 };
    args.b_quant = DT_QUANT_NF4;
    CHECK(dt_kernels_cpu()->matmul(&args, NULL) == DT_ERR_ARG);
}

// ==== PEFT ======================================================================================

enum { MAX_STEPS = 20, EXPORT_NONE = 0, EXPORT_ADAPTER, EXPORT_MERGED };

typedef struct run {
    int dp, tp, sp, pp, stage, steps, export_as;
    dt_dtype dtype;
    dt_quant base;
    const char *model, *adapter;  /* adapter NULL: a model without adapters */
    const char *folder;           /* of the export */
    double loss[MAX_STEPS], last; /* last: the first step's loss after the last update */
    size_t bytes[3];              /* live params, grads, optim of rank 0 */
} run;

/* The loss of the sequences of one step; ranks of dp take a part. */
static dt_tensor *step_loss(gpt *m, const dt_mesh *mesh, int step, const double *ids, int64_t T) {
    enum { B = 4 };
    int here = B / mesh->sizes.dp, first = step * B + mesh->coord.dp * here;
    int32_t *tokens = (int32_t *)malloc(2 * (size_t)(here * T) * sizeof *tokens);
    for (int64_t i = 0; i < here * T; i++) {
        const double *row = ids + (first + i / T) * (T + 1) + i % T;
        tokens[i] = (int32_t)row[0];
        tokens[here * T + i] = (int32_t)row[1];
    }
    dt_shape shape = DT_SHAPE(here, T);
    dt_tensor *loss = gpt_loss(m, dt_input(m->ctx, DT_I32, shape, tokens),
        dt_input(m->ctx, DT_I32, shape, tokens + here * T), (double)(B * T));
    free(tokens);
    return loss;
}

static dt_status run_rank(dt_ctx *ctx, void *user) {
    run *r = (run *)user;
    int64_t n, T = 16;
    const double *ids = vector("ids", &n);
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = r->dp, .tp = r->tp });
    gpt_config c = gpt_config_from(ctx, r->model);
    c.dtype = r->dtype;
    c.tp = mesh.tp;
    c.sp = r->sp;
    c.base = r->base;
    if (r->adapter) c.lora = gpt_lora_from(ctx, r->adapter, c.arch);
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    gpt m = gpt_register(ctx, c);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = r->stage,
                                          .mesh = &mesh,
                                          .optimizer = DT_ADAMW,
                                          .beta1 = 0.9,
                                          .beta2 = 0.95,
                                          .eps = 1e-8 });
    gpt_load(&m, r->model);
    if (r->adapter) gpt_lora_load(&m, r->adapter);
    for (int step = 0; step < r->steps && dt_error(ctx) == DT_OK; step++) {
        dt_tensor *loss = step_loss(&m, &mesh, step, ids, T);
        double sum = dt_item(loss);
        dt_backward(loss);
        dt_reset(ctx);
        dt_sum_doubles(mesh.data, &sum, 1);
        if (dt_ctx_rank(ctx) == 0) r->loss[step] = sum;
        dt_zero_step(zero, 1e-2);
    }
    /* before the next forward, which returns gradients that lie in memory of activations */
    if (dt_ctx_rank(ctx) == 0)
        for (int i = 0; i < 3; i++) r->bytes[i] = dt_memory_used(ctx).live[DT_MEM_PARAMS + i];
    double last = dt_item(step_loss(&m, &mesh, 0, ids, T));
    dt_sum_doubles(mesh.data, &last, 1);
    dt_reset(ctx);
    if (dt_ctx_rank(ctx) == 0) r->last = last;
    if (r->export_as == EXPORT_ADAPTER) gpt_lora_export(&m, zero, r->folder, base_folder);
    if (r->export_as == EXPORT_MERGED && gpt_lora_merge(&m) == DT_OK)
        gpt_export(&m, zero, r->folder);
    return dt_error(ctx);
}

/* Runs the ranks; returns the status, and the error text in `text`. */
static dt_status run_ranks(run *r, dt_report *report) {
    dt_host host = *dt_host_default();
    host.log = quiet;
    if (!r->dp) r->dp = 1;
    if (!r->tp) r->tp = 1;
    return dt_run(
        (dt_run_desc){ .ranks = r->dp * r->tp, .timeout_s = 60, .host = &host, .report = report },
        run_rank, r);
}

static int runs(run *r) {
    dt_report report;
    memset(&report, 0, sizeof report);
    return CHECK_MSG(run_ranks(r, &report) == DT_OK, "dp %d, tp %d, stage %d: %s", r->dp, r->tp,
        r->stage, report.text);
}

static void compare_losses(const run *r, const double *losses, double tol, const char *what) {
    double worst = 0;
    for (int i = 0; i < r->steps; i++)
        worst = fmax(worst, fabs(r->loss[i] - losses[i]) / fabs(losses[i]));
    CHECK_MSG(worst < tol, "dp %d, tp %d, sp %d, stage %d: the losses differ from %s by %.2e",
        r->dp, r->tp, r->sp, r->stage, what, worst);
}

static char *folder_of(const char *name) {
    static char path[2][256];
    static int turn;
    char *to = path[turn++ % 2];
    snprintf(to, sizeof path[0], "%s/%s", scratch, name);
    mkdir(to, 0777);
    return to;
}

/* The losses of 20 steps, and files: what one layout exports another loads. */
static void peft(void) {
    int64_t n;
    const double *losses = vector("losses", &n);
    static const run layouts[] = { { .dp = 1, .tp = 1 }, { .dp = 2, .tp = 2, .sp = 1, .stage = 1 },
        { .dp = 4, .stage = 3 } };
    if (!losses || n != MAX_STEPS) return;
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        char name[16];
        snprintf(name, sizeof name, "adapter%d", (int)i);
        run r = layouts[i], next = { .steps = 2, .adapter = folder_of(name), .model = base_folder };
        r.steps = MAX_STEPS;
        r.model = base_folder;
        r.adapter = adapter_folder;
        r.export_as = EXPORT_ADAPTER;
        r.folder = next.adapter;
        if (!runs(&r)) continue;
        compare_losses(&r, losses, 1e-5, "PEFT's");
        /* the exported adapter, and the model that it is merged into by another layout, go on with
           the same loss */
        run merged = layouts[(i + 1) % 3];
        merged.steps = 0;
        merged.model = base_folder;
        merged.adapter = next.adapter;
        merged.export_as = EXPORT_MERGED;
        merged.folder = folder_of("merged");
        run plain = { .steps = 1, .model = merged.folder };
        next.dtype = plain.dtype = DT_F64;
        if (!runs(&next) || !runs(&merged) || !runs(&plain)) continue;
        next.steps = 1;
        CHECK_MSG(fabs(next.loss[0] - r.last) < 1e-5 * r.last,
            "the exported adapter has the loss %.9g, the trained one %.9g", next.loss[0], r.last);
        compare_losses(&next, plain.loss, 1e-6, "the merged model's");
        CHECK_MSG(fabs(next.loss[0] - losses[0]) > 1e-2, "the exported adapter is not trained");
    }
}

// ==== Quantised bases ===========================================================================

/* A base that is quantised from the file gives the losses of its values, and takes the bytes of its
   blocks: embedding and norms in f32, the layers' matrices in blocks. The file's rows are shorter
   than a block, so this model is written first. */
static dt_status write_base(dt_ctx *ctx, void *user) {
    gpt_config c = { .layers = 2,
        .width = 128,
        .heads = 4,
        .kv_heads = 2,
        .ffn = 192,
        .seq = 16,
        .vocab = 67,
        .tied = 1,
        .arch = GPT_LLAMA };
    gpt m = gpt_register(ctx, c);
    (void)user;
    for (int pass = 0; pass < 2; pass++) { /* "plain", and "values": what the blocks hold */
        for (int i = 0; i < dt_param_count(ctx) && pass; i++) {
            dt_tensor *t = dt_param_get(ctx, i);
            int64_t count = dt_count(t->shape);
            float *x = (float *)malloc((size_t)count * 8);
            if (t->shape.nd > 1 && strstr(t->name, "h.")) {
                dt_read(t, x);
                dt_quantize(DT_QUANT_NF4, x, count, x + count);
                dt_dequantize(DT_QUANT_NF4, x + count, count, x);
                dt_write(t, x);
            }
            free(x);
        }
        gpt_save(&m, folder_of(pass ? "values" : "plain"), 0);
    }
    return dt_error(ctx);
}

static dt_status write_adapter(dt_ctx *ctx, void *user) {
    gpt_config c = gpt_config_from(ctx, folder_of("plain"));
    c.lora = (gpt_lora){ .rank = 3, .alpha = 6, .modules = gpt_lora_modules(c) };
    gpt m = gpt_register(ctx, c);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .optimizer = DT_SGD });
    (void)user;
    return gpt_lora_export(&m, zero, folder_of("small"), NULL);
}

static void quantised_bases(void) {
    dt_report report;
    static const run layouts[] = { { .dp = 1 }, { .dp = 2, .stage = 3 } };
    CHECK(dt_run((dt_run_desc){ .ranks = 1, .report = &report }, write_base, NULL) == DT_OK);
    CHECK(dt_run((dt_run_desc){ .ranks = 1, .report = &report }, write_adapter, NULL) == DT_OK);
    run values = { .steps = 3, .model = folder_of("values"), .adapter = folder_of("small") };
    values.dtype = DT_F64;
    if (!runs(&values)) return;
    for (int i = 0; i < 2; i++) {
        run r = layouts[i];
        char plain[256], small[256];
        snprintf(plain, sizeof plain, "%s", folder_of("plain"));
        snprintf(small, sizeof small, "%s", folder_of("small"));
        r.steps = 3;
        r.model = plain;
        r.adapter = small;
        r.base = DT_QUANT_NF4;
        r.dtype = DT_F64;
        if (!runs(&r)) return;
        compare_losses(&r, values.loss, 1e-12, "those of the blocks' values");
        if (i) continue;
        /* one bucket of matrices for each layer, one of its two norms, one of its adapters */
        size_t matrices = (2 * 128 * 128 + 2 * 64 * 128 + 3 * 192 * 128) / 64 * 36,
               adapters = 3 * (128 + 128 + 2 * (128 + 64) + 128 + 128 + 3 * (128 + 192));
        size_t pad = DT_PIECE, up = (matrices + pad - 1) / pad * pad,
               own = (adapters + pad - 1) / pad * pad;
        CHECK_MSG(r.bytes[1] == 2 * own * 8 && r.bytes[2] == 2 * own * 16,
            "%zu and %zu bytes of gradients and state", r.bytes[1], r.bytes[2]);
        CHECK_MSG(r.bytes[0] > 2 * (up + own * 8) &&
                      r.bytes[0] <= 2 * (up + own * 8) + (67 * 128 + 8 * pad) * 8,
            "%zu bytes of parameters", r.bytes[0]);
    }
}

// ==== Refusals ==================================================================================

typedef struct refusal {
    const char *file, *text, *want;
} refusal;

/* Copies the adapter with one change of its configuration, and returns the folder. */
static const char *changed(const char *from, const char *to) {
    char path[300], *at;
    size_t size = 0;
    snprintf(path, sizeof path, "%s/adapter_config.json", adapter_folder);
    char *text = (char *)golden_read_file(path, &size), *folder = folder_of("changed");
    if (!CHECK(text && (at = strstr(text, from)) != NULL)) return folder;
    snprintf(path, sizeof path, "%s/adapter_config.json", folder);
    FILE *f = fopen(path, "w");
    fprintf(f, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    fclose(f);
    free(text);
    char source[300];
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", folder);
    snprintf(source, sizeof source, "%s/adapter_model.safetensors", adapter_folder);
    unsigned char *bytes = golden_read_file(source, &size);
    f = fopen(path, "w");
    fwrite(bytes, 1, size, f);
    fclose(f);
    free(bytes);
    return folder;
}

static void says(const char *what, run r, const char *want) {
    dt_report report;
    memset(&report, 0, sizeof report);
    CHECK_MSG(run_ranks(&r, &report) != DT_OK && strstr(report.text, want), "%s: '%s', not '%s'",
        what, report.text, want);
}

static void refused(const char *what, const char *from, const char *to, const char *want) {
    says(what, (run){ .model = base_folder, .adapter = changed(from, to) }, want);
}

/* The scale of the adapter, alpha / rank, is alpha / sqrt(rank) with use_rslora. */
static dt_status rslora_rank(dt_ctx *ctx, void *user) {
    gpt_lora l = gpt_lora_from(ctx, (const char *)user, GPT_LLAMA);
    CHECK(l.rank == 4 && l.alpha / l.rank == 6 / sqrt(4));
    return dt_error(ctx);
}

/* The modules of multi-token prediction are frozen and have no adapters. */
static dt_status mtp_rank(dt_ctx *ctx, void *user) {
    gpt_config c = { .layers = 2,
        .width = 16,
        .heads = 2,
        .kv_heads = 2,
        .ffn = 24,
        .seq = 8,
        .vocab = 19,
        .arch = GPT_LLAMA,
        .mtp = 1,
        .mtp_weight = 0.3 };
    int adapters = 0, own = 0;
    (void)user;
    c.lora = (gpt_lora){ .rank = 3, .modules = gpt_lora_modules(c) };
    gpt_register(ctx, c);
    for (int i = 0; i < dt_param_count(ctx); i++) {
        const dt_tensor *t = dt_param_get(ctx, i);
        int is_adapter = strstr(t->name, ".lora_") != NULL,
            in_module = strncmp(t->name, "h.2.", 4) == 0;
        CHECK_MSG(t->param->desc.frozen == !is_adapter, "%s", t->name);
        CHECK_MSG(!is_adapter || !in_module, "%s", t->name);
        adapters += is_adapter;
        own += in_module;
    }
    CHECK(adapters == 2 * 7 * 2 && own > 7);
    return dt_error(ctx);
}

typedef struct bad_param {
    dt_shape shape;
    dt_param_desc desc;
    int by_tp;
    const char *want;
} bad_param;

static dt_status bad_rank(dt_ctx *ctx, void *user) {
    bad_param *p = (bad_param *)user;
    if (p->by_tp) p->desc.shards[0] = (dt_shard_spec){ dt_world(ctx), p->shape.nd - 1 };
    dt_param_at(ctx, "w", p->shape, DT_ZEROS, p->desc);
    return dt_error(ctx);
}

static void refusals(void) {
    dt_host host = *dt_host_default();
    host.log = quiet;
    bad_param bad[] = { { DT_SHAPE(4, 96), { .frozen = 1, .quant = DT_QUANT_NF4 }, 0,
                            "the last dimension of (4,96) is not a multiple of 64: 64 elements of "
                            "a nf4 block x 1 ranks" },
        { DT_SHAPE(4, 64), { .frozen = 1, .quant = DT_QUANT_INT8 }, 1,
            "not a multiple of 128: 64 elements of a int8 block x 2 ranks" },
        { DT_SHAPE(4, 64), { .quant = DT_QUANT_NF4 }, 0, "which is not frozen" },
        { DT_SHAPE(64), { .frozen = 1, .quant = DT_QUANT_NF4 }, 0, "two dimensions or more" },
        { DT_SHAPE(4, 64), { .frozen = 1, .quant = (dt_quant)7 }, 0, "unknown format" } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dt_report report;
        memset(&report, 0, sizeof report);
        dt_run(
            (dt_run_desc){
                .ranks = 1 + bad[i].by_tp, .timeout_s = 60, .host = &host, .report = &report },
            bad_rank, &bad[i]);
        CHECK_MSG(strstr(report.text, bad[i].want), "'%s', not '%s'", report.text, bad[i].want);
    }
    refused("another rank", "\"r\": 4", "\"r\": 8",
        "'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' has the shape (4,32); "
        "the model needs (8,32)");
    says("another base", (run){ .model = folder_of("plain"), .adapter = folder_of("adapter0") },
        "lora_A.weight' has the shape (4,32); the model needs (4,128); this adapter was made for "
        "'tests/golden/lora/base'");
    refused("fewer modules", "\"k_proj\",", "", "it has another base");
    refused("an unknown module", "\"k_proj\"", "\"lm_head\"", "adapter_config.json:");
    refused("an unknown module", "\"k_proj\"", "\"lm_head\"", "'lm_head' is no module");
    refused("DoRA", "\"use_dora\": false", "\"use_dora\": true", "use_dora is not supported");
    refused("another method", "\"LORA\"", "\"IA3\"", "peft_type IA3 is not supported");
    refused("ranks by pattern", "\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": 2}",
        "rank_pattern is not supported");
    refused("biases", "\"bias\": \"none\"", "\"bias\": \"all\"", "bias all is not supported");
    refused("other modules", "\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]",
        "modules_to_save is not supported");
    says("an adapter as a model", (run){ .model = adapter_folder }, "an adapter of PEFT");
}

static void parts(void) {
    dt_report report;
    char *rslora = (char *)(intptr_t)changed("\"use_rslora\": false", "\"use_rslora\": true");
    CHECK(dt_run((dt_run_desc){ .ranks = 1, .report = &report }, rslora_rank, rslora) == DT_OK);
    CHECK(dt_run((dt_run_desc){ .ranks = 1, .report = &report }, mtp_rank, NULL) == DT_OK);
}

int main(void) {
    char remove[64];
    vectors = golden_open("tests/golden/lora/vectors.bin");
    if (!CHECK(vectors && mkdtemp(scratch))) return check_done("test_lora");
    nf4_is_bitsandbytes();
    int8_rounds();
    sizes();
    products();
    peft();
    quantised_bases();
    not_finite();
    refusals();
    parts();
    golden_free(vectors);
    snprintf(remove, sizeof remove, "rm -rf '%s'", scratch);
    CHECK(system(remove) == 0);
    return check_done("test_lora");
}
