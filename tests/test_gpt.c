/* test_gpt.c - gpt.h and gpt_files.h: GPT-2 and Llama against Hugging Face's, their files, generation
   Public domain or MIT, at your choice; see LICENSE.

   Run:  test_gpt [folder of the golden files, default tests/golden]
         test_gpt --save DIR [folder]    writes models into folders of DIR, each with the logits that they should give in
                                         another program: test_hf.sh reads them with transformers

   Expected logits and gradients are those of transformers in float64 (golden/make_hf.py); for generation, the whole
   window computed again. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "../dt_tensor.h"
#include "../examples/gpt.h"
#include "../examples/gpt_files.h"
#include "check.h"
#include "golden/golden.h"

static const char *golden_folder = "tests/golden";
static char        scratch[64]; /* a folder of our own */

// ==== 1. Helpers ====================================================================================================

static void silent(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_ctx *make_ctx(void) {
    dt_host host = *dt_host_default();
    host.log = silent;
    return dt_ctx_make((dt_ctx_desc){ .seed = 1, .host = &host });
}

static void free_ctx(dt_ctx *ctx, const char *what) {
    CHECK_MSG(dt_error(ctx) == DT_OK, "%s: %s", what, dt_error_text(ctx));
    dt_ctx_free(ctx);
}

static const char *path_of(const char *folder, const char *name) {
    static char path[4][512];
    static int  next;
    char       *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

/* Any tensor as doubles. */
static double *doubles(const dt_tensor *t, const void *data, dt_dtype dtype) {
    size_t  n = (size_t)dt_count(t->shape);
    double *out = (double *)calloc(n + 1, sizeof *out);
    dt__convert(DT_F64, out, dtype, data, (int64_t)n);
    return out;
}

/* The largest |a - b|, as a part of the largest |b|. */
static double apart(const double *a, const double *b, int64_t n) {
    double difference = 0, size = 1e-300;
    for (int64_t i = 0; i < n; i++) {
        difference = fmax(difference, isfinite(a[i]) ? fabs(a[i] - b[i]) : INFINITY);
        size = fmax(size, fabs(b[i]));
    }
    return difference / size;
}

static double tensor_apart(const dt_tensor *t, const void *data, dt_dtype dtype, const double *want) {
    double *got = doubles(t, data, dtype), d = apart(got, want, dt_count(t->shape));
    free(got);
    return d;
}

static dt_tensor *input_of(dt_ctx *ctx, golden *g, const char *name) {
    int64_t       n = 0, B = 2;
    const double *from = golden_get(g, name, &n);
    int32_t       to[64] = { 0 };
    for (int64_t i = 0; from && i < n; i++) to[i] = (int32_t)from[i];
    return dt_input(ctx, DT_I32, DT_SHAPE(B, n / B), to);
}

static uint64_t mix(uint64_t i) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// ==== 2. Against transformers =======================================================================================

/* Logits, loss and, where stored, gradients of a file's model. */
static void like_transformers(const char *file, const char *stored, dt_dtype dtype, double tolerance) {
    dt_ctx    *ctx = make_ctx();
    golden    *g = golden_open(path_of(golden_folder, stored));
    gpt_config c = gpt_config_from(ctx, path_of(golden_folder, file));
    if (!CHECK_MSG(g && c.layers == 2, "%s: %s", file, dt_error_text(ctx))) return;
    int64_t       n = 0;
    const double *logits = golden_get(g, "logits", &n), *loss = golden_get(g, "loss", NULL);
    c.dtype = dtype;
    gpt m = gpt_register(ctx, c);
    CHECK_MSG(gpt_load(&m, path_of(golden_folder, file)) == DT_OK, "%s: %s", file, dt_error_text(ctx));
    dt_tensor *ids = input_of(ctx, g, "ids"), *labels = input_of(ctx, g, "labels"), *out = gpt_logits(&m, ids);
    if (!CHECK_MSG(out && dt_count(out->shape) == n, "%s: %s", file, dt_error_text(ctx))) return;
    double d = tensor_apart(out, out->data, dtype, logits);
    CHECK_MSG(d <= tolerance, "%s in %s: logits are %.1e apart", file, dt_dtype_name(dtype), d);
    dt_reset(ctx);
    ids = input_of(ctx, g, "ids"), labels = input_of(ctx, g, "labels"); /* of 22, two are ignored */
    dt_tensor *l = gpt_loss(&m, ids, labels, 20);
    CHECK_MSG(fabs(dt_item(l) - *loss) <= tolerance * *loss, "%s in %s: loss %.15g, not %.15g", file,
        dt_dtype_name(dtype), dt_item(l), *loss);
    dt_backward(l);
    int compared = 0;
    for (int i = 0; i < dt_param_count(ctx); i++) {
        const dt_tensor *p = dt_param_get(ctx, i);
        char             name[96];
        snprintf(name, sizeof name, "grad.%s", p->name);
        const double *want = golden_get(g, name, &n);
        if (!want) continue;
        compared++;
        /* the key bias has a gradient of 0 but for rounding: measured by the query bias */
        double scale = 1, d = 0;
        if (strstr(name, "k.bias")) {
            int64_t n_q;
            memcpy(strstr(name, "k.bias"), "q.bias", 6);
            const double *q = golden_get(g, name, &n_q);
            for (int64_t k = 0; k < n_q; k++) d = fmax(d, fabs(q[k]));
            scale = 0;
            for (int64_t k = 0; k < n; k++) scale = fmax(scale, fabs(want[k]));
            scale /= d;
        }
        d = n == dt_count(p->shape) ? scale * tensor_apart(p, p->grad, dt_grad_dtype(p), want) : INFINITY;
        CHECK_MSG(d <= tolerance, "%s in %s: gradient of %s is %.1e apart", file, dt_dtype_name(dtype), p->name, d);
    }
    CHECK_MSG(compared == dt_param_count(ctx) || strncmp(file, "llmc", 4) == 0, "%s: gradients of %d of %d", file,
        compared, dt_param_count(ctx));
    golden_free(g);
    free_ctx(ctx, file);
}

static void all_like_transformers(void) {
    static const char *const files[][2] = { { "hf_gpt2", "hf_gpt2/vectors.bin" }, { "hf_llama", "hf_llama/vectors.bin" },
        { "hf_llama_bf16/model.safetensors", "hf_llama_bf16/vectors.bin" }, { "llmc_v3.bin", "llmc_v3.vectors.bin" },
        { "llmc_v5.bin", "llmc_v5.vectors.bin" } };
    for (int i = 0; i < 5; i++) {
        like_transformers(files[i][0], files[i][1], DT_F64, 1e-12);
        like_transformers(files[i][0], files[i][1], DT_F32, 1e-5);
        like_transformers(files[i][0], files[i][1], DT_BF16, 0.15);
        like_transformers(files[i][0], files[i][1], DT_F16, 0.01);
    }
}

int main(int argc, char **argv) {
    if (argc > 1) golden_folder = argv[1];
    all_like_transformers();
    (void)scratch, (void)mix;
    return check_done("test_gpt");
}
