/* test_gpt.c - gpt.h and gpt_files.h: GPT-2, Llama and DeepSeek-V3 compared with transformers,
   files, generation
   Public domain or MIT, at your choice; see LICENSE.

   Run:  test_gpt [folder of the golden files, default tests/golden]
         test_gpt --save DIR        saves each model in a folder of DIR, with its expected logits:
                                    test_hf.sh loads the models with transformers

   Expected logits and gradients come from transformers in float64 (golden/make_hf.py). Generation
   with a cache is compared with a forward over the full window. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "examples/gpt_files.h"
#include "tests/support/check.h"
#include "tests/golden/golden.h"

static const char *golden_folder = "tests/golden";
static char scratch[64]; /* a temporary folder */

// ==== 1. Helpers ================================================================================

static void log_nothing(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_ctx *make_ctx(void) {
    dt_host host = *dt_host_default();
    host.log = log_nothing;
    return dt_ctx_make((dt_ctx_desc){ .seed = 1, .host = &host });
}

static void free_ctx(dt_ctx *ctx, const char *what) {
    CHECK_MSG(dt_error(ctx) == DT_OK, "%s: %s", what, dt_error_text(ctx));
    dt_ctx_free(ctx);
}

static const char *path_of(const char *folder, const char *name) {
    static char path[4][512];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

/* `data` of t's shape, converted to doubles, in memory that the caller frees. */
static double *to_doubles(const dt_tensor *t, const void *data, dt_dtype dtype) {
    size_t n = (size_t)dt_count(t->shape);
    double *out = (double *)calloc(n + 1, sizeof *out);
    dt__convert(DT_F64, out, dtype, data, (int64_t)n);
    return out;
}

/* max |a - b| / max |b| */
static double relative_difference(const double *a, const double *b, int64_t n) {
    double difference = 0, size = 1e-300;
    for (int64_t i = 0; i < n; i++) {
        difference = fmax(difference, isfinite(a[i]) ? fabs(a[i] - b[i]) : INFINITY);
        size = fmax(size, fabs(b[i]));
    }
    return difference / size;
}

static double tensor_difference(
    const dt_tensor *t, const void *data, dt_dtype dtype, const double *want) {
    double *got = to_doubles(t, data, dtype),
           d = relative_difference(got, want, dt_count(t->shape));
    free(got);
    return d;
}

static dt_tensor *input_of(dt_ctx *ctx, golden *g, const char *name) {
    int64_t n = 0, B = 2;
    const double *from = golden_get(g, name, &n);
    int32_t to[64] = { 0 };
    for (int64_t i = 0; from && i < n; i++) to[i] = (int32_t)from[i];
    return dt_input(ctx, DT_I32, DT_SHAPE(B, n / B), to);
}

static uint64_t mix(uint64_t i) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// ==== 2. Compared with transformers =============================================================

/* Compares the logits, the loss and the stored gradients of a file's model. */
static void compare_with_transformers(
    const char *file, const char *stored, dt_dtype dtype, double tolerance) {
    dt_ctx *ctx = make_ctx();
    golden *g = golden_open(path_of(golden_folder, stored));
    gpt_config c = gpt_config_from(ctx, path_of(golden_folder, file));
    if (!CHECK_MSG(g && c.layers >= 2, "%s: %s", file, dt_error_text(ctx))) return;
    int64_t n = 0;
    const double *logits = golden_get(g, "logits", &n), *loss = golden_get(g, "loss", NULL);
    c.dtype = dtype;
    c.balance = 0; /* the stored gradients are those of the cross-entropy */
    gpt m = gpt_register(ctx, c);
    CHECK_MSG(
        gpt_load(&m, path_of(golden_folder, file)) == DT_OK, "%s: %s", file, dt_error_text(ctx));
    dt_tensor *ids = input_of(ctx, g, "ids"), *labels = input_of(ctx, g, "labels"),
              *out = gpt_logits(&m, ids);
    if (!CHECK_MSG(out && dt_count(out->shape) == n, "%s: %s", file, dt_error_text(ctx))) return;
    double d = tensor_difference(out, out->data, dtype, logits);
    CHECK_MSG(d <= tolerance, "%s in %s: logits differ by %.1e", file, dt_dtype_name(dtype), d);
    dt_reset(ctx);
    ids = input_of(ctx, g, "ids");
    labels = input_of(ctx, g, "labels"); /* 2 labels are ignored */
    dt_tensor *l = gpt_loss(&m, ids, labels, (double)dt_count(labels->shape) - 2);
    CHECK_MSG(fabs(dt_item(l) - *loss) <= tolerance * *loss, "%s in %s: loss %.15g, not %.15g",
        file, dt_dtype_name(dtype), dt_item(l), *loss);
    dt_backward(l);
    int compared = 0;
    for (int i = 0; i < dt_param_count(ctx); i++) {
        const dt_tensor *p = dt_param_get(ctx, i);
        char name[96];
        snprintf(name, sizeof name, "grad.%s", p->name);
        const double *want = golden_get(g, name, &n);
        if (!want) continue;
        compared++;
        /* the key bias has gradient 0 up to rounding: compare on the query bias's scale */
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
        d = n == dt_count(p->shape) ? scale * tensor_difference(p, p->grad, dt_grad_dtype(p), want)
                                    : INFINITY;
        CHECK_MSG(d <= tolerance, "%s in %s: gradient of %s differs by %.1e", file,
            dt_dtype_name(dtype), p->name, d);
    }
    CHECK_MSG(compared == dt_param_count(ctx) || strncmp(file, "llmc", 4) == 0,
        "%s: gradients of %d of %d parameters are stored", file, compared, dt_param_count(ctx));
    golden_free(g);
    free_ctx(ctx, file);
}

static const char *const part_models[] = { "parts/llama3", "parts/yarn", "parts/yarn_mscale",
    "parts/linear", "parts/qwen3", "parts/gemma3", "parts/gemma2" };
enum { PART_MODELS = sizeof part_models / sizeof *part_models };

static void compare_all_with_transformers(void) {
    static const char *const files[][2] = { { "hf_gpt2", "hf_gpt2/vectors.bin" },
        { "hf_llama", "hf_llama/vectors.bin" }, { "hf_mixtral", "hf_mixtral/vectors.bin" },
        { "hf_llama_bf16/model.safetensors", "hf_llama_bf16/vectors.bin" },
        { "llmc_v3.bin", "llmc_v3.vectors.bin" }, { "llmc_v5.bin", "llmc_v5.vectors.bin" } };
    for (int i = 0; i < 6; i++) {
        compare_with_transformers(files[i][0], files[i][1], DT_F64, 1e-12);
        compare_with_transformers(files[i][0], files[i][1], DT_F32, 1e-5);
        if (i == 2) continue; /* in 16 bits some tokens choose other experts */
        compare_with_transformers(files[i][0], files[i][1], DT_BF16, 0.15);
        compare_with_transformers(files[i][0], files[i][1], DT_F16, 0.01);
    }
    for (int i = 0; i < PART_MODELS; i++) {
        char stored[64];
        snprintf(stored, sizeof stored, "%s/vectors.bin", part_models[i]);
        compare_with_transformers(part_models[i], stored, DT_F64, 1e-12);
        compare_with_transformers(part_models[i], stored, DT_F32, 1e-5);
        /* the gradients of transformers' own bf16 differ by up to 0.18 */
        compare_with_transformers(part_models[i], stored, DT_BF16, 0.2);
    }
}

/* ---- models with parts (gpt_parts), in layouts ---- */

typedef struct layout {
    const char *file; /* in the golden folder */
    int tp, cp, pp, sp, cp_kind, recompute, zero;
    const golden *g;
    gpt model;
    double loss, labels; /* labels: how many are not ignored */
} layout;

/* This rank's tokens of a stored array (B,T). */
static dt_tensor *tokens_of(dt_ctx *ctx, const layout *l, const char *name) {
    const golden_array *a = golden_find(l->g, name);
    dt_comm *cp = l->model.config.cp;
    int32_t all[64] = { 0 }, mine[64] = { 0 };
    int64_t B = a->shape[0], T = a->shape[1];
    for (int64_t i = 0; i < a->count; i++) all[i] = (int32_t)a->data[i];
    dt_cp_shard(l->cp_kind, B, T, cp, all, mine);
    return dt_input(ctx, DT_I32, DT_SHAPE(B, T / dt_comm_size(cp)), mine);
}

static dt_tensor *layout_stage(dt_tensor *x, int stage, int micro, void *user) {
    layout *l = (layout *)user;
    dt_ctx *ctx = l->model.ctx;
    (void)micro;
    x = gpt_stage_at(&l->model, stage, x, (gpt_tokens){ .ids = tokens_of(ctx, l, "ids") },
        tokens_of(ctx, l, "labels"), l->labels);
    if (stage == l->pp - 1) l->loss += dt_item(x);
    return x;
}

/* Compares this rank's slice of a gradient with the stored one. */
static void compare_slice(const layout *l, dt_tensor *t, const double *grad) {
    char name[96];
    snprintf(name, sizeof name, "grad.%s", t->name);
    const golden_array *want = golden_find(l->g, name);
    const dt_local_slice *slice = &t->param->slice;
    double difference = 0, size = 0;
    if (!want || want->count != dt_count(t->param->full)) {
        dt_fail(t->ctx, DT_ERR_SHAPE, "no stored gradient of %s", t->name);
        return;
    }
    for (int64_t i = 0; i < want->count; i++) size += want->data[i] * want->data[i];
    for (int64_t i = 0; i < dt_count(t->shape); i++) {
        int64_t at = 0, rest = i, stride = 1;
        for (int k = t->shape.nd - 1; k >= 0; k--) {
            if (rest % slice->n[k] >= slice->inside[k]) at = INT64_MIN / 2; /* padding */
            at += (slice->lo[k] + rest % slice->n[k]) * stride;
            stride *= t->param->full.d[k];
            rest /= slice->n[k];
        }
        double d = grad[i] - (at < 0 ? 0 : want->data[at]);
        difference += d * d;
    }
    if (!(difference <= 1e-24 * fmax(size, 1e-4)))
        dt_fail(t->ctx, DT_ERR_NUMERIC, "gradient of %s: difference %.2e of %.2e", t->name,
            sqrt(difference), sqrt(size));
}

static dt_status run_layout(dt_ctx *ctx, void *user) {
    layout here = *(const layout *)user, *l = &here; /* of this rank */
    char path[512];
    static const int halves[2][3] = { { 0, 3, 6 }, { 0, 4, 8 } };
    snprintf(path, sizeof path, "%s/%s", golden_folder, l->file);
    dt_mesh mesh =
        dt_mesh_make(ctx, (dt_mesh_desc){ .dp = 1, .tp = l->tp, .cp = l->cp, .pp = l->pp });
    gpt_config c = gpt_config_from(ctx, path);
    c.dtype = DT_F64, c.tp = mesh.tp, c.cp = mesh.cp, c.pp = mesh.pp;
    c.sp = l->sp, c.cp_kind = l->cp_kind, c.recompute = l->recompute;
    if (l->pp > 1) c.stages = l->pp, c.stage_begin = halves[c.layers - 2];
    l->model = gpt_register(ctx, c);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = l->zero, .mesh = &mesh });
    gpt_load(&l->model, path);
    dt_schedule *schedule = dt_schedule_make(
        ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_ZB, .ranks = l->pp, .micros = 1 });
    const golden_array *labels = golden_find(l->g, "labels");
    for (int64_t i = 0; i < labels->count; i++) l->labels += labels->data[i] >= 0;
    dt_pipe_run(ctx,
        (dt_pipe_desc){ .schedule = schedule, .comm = mesh.pp, .run = layout_stage, .user = l });
    dt_sum_doubles(mesh.cp, &l->loss, 1);
    dt_sum_doubles(mesh.pp, &l->loss, 1);
    double want = golden_find(l->g, "loss")->data[0];
    if (!(fabs(l->loss - want) <= 1e-12 * want))
        dt_fail(ctx, DT_ERR_NUMERIC, "loss %.17g, not %.17g", l->loss, want);
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        double grad[4096];
        if (dt_count(t->shape) <= 4096 && dt_zero_grad(zero, t, grad) == DT_OK)
            compare_slice(l, t, grad);
    }
    dt_schedule_free(schedule);
    return dt_error(ctx);
}

/* One rank, and tp 2 x cp 2 x pp 2 with each kind of cp: loss and gradients are transformers'. */
static void parts_in_layouts(void) {
    static const layout layouts[] = { { .tp = 1, .cp = 1, .pp = 1 }, { .tp = 2, .cp = 2, .pp = 2 },
        { .tp = 2, .cp = 2, .pp = 2, .sp = 1, .cp_kind = DT_CP_ZIGZAG, .recompute = 2, .zero = 3 },
        { .tp = 2, .cp = 2, .pp = 2, .cp_kind = DT_CP_ALLGATHER, .recompute = 1, .zero = 1 },
        { .tp = 2, .cp = 2, .pp = 2, .sp = 1, .cp_kind = DT_CP_ULYSSES, .zero = 2 },
        { .tp = 4, .cp = 1, .pp = 2, .sp = 1 } };
    dt_host host = *dt_host_default();
    host.log = log_nothing;
    for (int i = 0; i < PART_MODELS * (int)(sizeof layouts / sizeof *layouts); i++) {
        layout l = layouts[i / PART_MODELS];
        char stored[64];
        dt_report report;
        l.file = part_models[i % PART_MODELS];
        snprintf(stored, sizeof stored, "%s/vectors.bin", l.file);
        golden *g = golden_open(path_of(golden_folder, stored));
        if (!CHECK_MSG(g && golden_find(g, "labels"), "%s", stored)) return;
        l.g = g;
        dt_run(
            (dt_run_desc){
                .ranks = l.tp * l.cp * l.pp, .timeout_s = 60, .host = &host, .report = &report },
            run_layout, &l);
        CHECK_MSG(report.status == DT_OK, "%s, tp %d cp %d pp %d sp %d, kind %d: %s", l.file, l.tp,
            l.cp, l.pp, l.sp, l.cp_kind, report.text);
        golden_free(g);
    }
}

/* DeepSeek-V3 in any layout: loss, loss of the modules of multi-token prediction, and gradients. The
   two sequences are one micro-batch each, or one is on each rank of ep. */
typedef struct deep {
    const char *file;
    dt_mesh_desc sizes;
    int sp, kind, stage, recompute;
    golden *g;
} deep;

typedef struct deep_rank {
    const deep *d;
    dt_mesh mesh;
    gpt m;
    double loss;
} deep_rank;

enum { DEEP_T = 12, DEEP_LABELS = 22 };

/* Row `row` of a stored array (2,T), sharded for this rank of cp. */
static dt_tensor *deep_input(deep_rank *r, const int32_t *row) {
    int32_t own[DEEP_T];
    dt_cp_shard(r->d->kind, 1, DEEP_T, r->mesh.cp, row, own);
    return dt_input(r->m.ctx, DT_I32, DT_SHAPE(1, DEEP_T / dt_comm_size(r->mesh.cp)), own);
}

static dt_tensor *deep_stage(dt_tensor *x, int stage, int micro, void *user) {
    deep_rank *r = (deep_rank *)user;
    const double *ids = golden_get(r->d->g, "ids", NULL),
                 *labels = golden_get(r->d->g, "labels", NULL);
    int32_t row[2][DEEP_T], next[DEEP_T], ahead[DEEP_T];
    int from = (r->mesh.replica * 2 / r->mesh.replicas + micro) * DEEP_T;
    for (int i = 0; i < DEEP_T; i++) {
        row[0][i] = (int32_t)ids[from + i];
        row[1][i] = (int32_t)labels[from + i];
    }
    gpt_tokens t = { .ids = deep_input(r, row[0]) };
    for (int k = 0; k < r->m.config.mtp; k++) {
        gpt_ahead(row[0], row[1], NULL, 1, DEEP_T, k, next, ahead);
        t.next[k] = deep_input(r, next);
        t.ahead[k] = deep_input(r, ahead);
    }
    x = gpt_stage_at(&r->m, stage, x, t, deep_input(r, row[1]), DEEP_LABELS);
    if (stage + 1 == gpt_stages(r->m.config)) r->loss += dt_item(x);
    return x;
}

/* Compares this rank's slice of a gradient with the stored gradient. */
static double deep_difference(dt_zero *zero, const dt_tensor *p, const double *want) {
    const dt_local_slice *slice = &p->param->slice;
    int64_t n = dt_count(p->shape);
    double *got = (double *)calloc((size_t)n + 1, sizeof *got),
           *own = (double *)calloc((size_t)n + 1, sizeof *own);
    dt_zero_grad(zero, p, got);
    for (int64_t k = 0; k < n; k++) {
        int64_t left = k, at = 0, stride = 1, inside = 1;
        for (int j = p->shape.nd - 1; j >= 0; j--) {
            int64_t index = left % slice->n[j];
            left /= slice->n[j];
            inside &= index < slice->inside[j];
            at += (slice->lo[j] + index) * stride;
            stride *= p->param->full.d[j];
        }
        own[k] = inside ? want[at] : 0;
    }
    double d = relative_difference(got, own, n);
    free(got);
    free(own);
    return d;
}

static void deep_compare(deep_rank *r, dt_zero *zero) {
    golden *g = r->d->g;
    const double *loss = golden_get(g, "loss", NULL), *mtp = golden_get(g, "mtp_loss", NULL);
    double sums[2] = { r->loss, r->m.mtp_loss };
    dt_sum_doubles(r->mesh.data, sums, 2);
    dt_sum_doubles(r->mesh.pp, sums, 2);
    CHECK_MSG(fabs(sums[0] - *loss) <= 1e-12 * *loss, "%s: loss %.15g, not %.15g", r->d->file,
        sums[0], *loss);
    CHECK_MSG(!mtp || fabs(sums[1] - *mtp) <= 1e-12 * *mtp, "%s: loss ahead %.15g, not %.15g",
        r->d->file, sums[1], mtp ? *mtp : 0);
    for (int i = 0; i < dt_param_count(r->m.ctx); i++) {
        const dt_tensor *p = dt_param_get(r->m.ctx, i);
        char name[96];
        int64_t n = 0;
        snprintf(name, sizeof name, "grad.%s", p->name);
        if (p->param->desc.frozen) continue;
        const double *want = golden_get(g, name, &n);
        double d =
            want && n == dt_count(p->param->full) ? deep_difference(zero, p, want) : INFINITY;
        CHECK_MSG(d <= 1e-12,
            "%s, tp %d%s cp %d (kind %d) pp %d ep %d, stage %d, recompute %d: "
            "gradient of %s differs by %.1e",
            r->d->file, r->d->sizes.tp, r->d->sp ? " sp" : "", r->d->sizes.cp, r->d->kind,
            r->d->sizes.pp, r->d->sizes.ep, r->d->stage, r->d->recompute, p->name, d);
    }
}

static dt_status deep_main(dt_ctx *ctx, void *user) {
    deep_rank *r = (deep_rank *)calloc(1, sizeof *r);
    const deep *d = r->d = (const deep *)user;
    int begin[3];
    r->mesh = dt_mesh_make(ctx, d->sizes);
    gpt_config c = gpt_config_from(ctx, path_of(golden_folder, d->file));
    const double *weight = golden_get(d->g, "mtp_weight", NULL);
    c.dtype = DT_F64;
    c.tp = r->mesh.tp, c.cp = r->mesh.cp, c.pp = r->mesh.pp, c.ep = r->mesh.ep;
    c.sp = d->sp, c.cp_kind = d->kind, c.recompute = d->recompute;
    c.mtp_weight = weight ? *weight : 0;
    begin[0] = 0, begin[1] = gpt_items(c) / 2, begin[2] = gpt_items(c);
    if (d->sizes.pp > 1) c.stages = 2, c.stage_begin = begin;
    r->m = gpt_register(ctx, c);
    dt_zero *zero = dt_zero_make(ctx,
        (dt_zero_desc){ .stage = d->stage, .optimizer = DT_SGD, .mesh = &r->mesh, .poison = 1 });
    gpt_load(&r->m, path_of(golden_folder, d->file));
    dt_schedule *s = dt_schedule_make(ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_1F1B,
                                               .ranks = dt_comm_size(c.pp),
                                               .micros = 2 / r->mesh.replicas });
    dt_pipe_run(ctx, (dt_pipe_desc){ .schedule = s, .comm = c.pp, .run = deep_stage, .user = r });
    if (dt_error(ctx) == DT_OK) deep_compare(r, zero);
    dt_schedule_free(s);
    dt_zero_free(zero);
    free(r);
    return dt_error(ctx);
}

static void deepseek_layouts(void) {
    static const deep layouts[] = { { .sizes = { .tp = 1 } },
        { .sizes = { .tp = 1 }, .recompute = GPT_RECOMPUTE_SELECTIVE },
        { .sizes = { .tp = 2 }, .recompute = GPT_RECOMPUTE_FULL },
        { .sizes = { .tp = 4 }, .sp = 1, .stage = 3 }, { .sizes = { .cp = 2 }, .kind = DT_CP_RING },
        { .sizes = { .cp = 2 }, .kind = DT_CP_ALLGATHER, .stage = 2 },
        { .sizes = { .cp = 2 },
            .kind = DT_CP_ULYSSES,
            .stage = 3,
            .recompute = GPT_RECOMPUTE_FULL },
        { .sizes = { .pp = 2 } }, { .sizes = { .ep = 2 }, .stage = 1 },
        { .sizes = { .tp = 2, .cp = 2, .pp = 2 }, .kind = DT_CP_ZIGZAG },
        { .sizes = { .tp = 2, .cp = 2, .pp = 2, .ep = 2 },
            .sp = 1,
            .kind = DT_CP_ZIGZAG,
            .stage = 3,
            .recompute = GPT_RECOMPUTE_FULL } };
    static const char *const files[] = { "hf_deepseek", "hf_deepseek_mtp" };
    for (int f = 0; f < 2; f++) {
        char stored[64];
        snprintf(stored, sizeof stored, "%s/vectors.bin", files[f]);
        golden *g = golden_open(path_of(golden_folder, stored));
        if (!CHECK_MSG(g != NULL, "%s is missing", stored)) continue;
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            deep d = layouts[i];
            int *axes[4] = { &d.sizes.tp, &d.sizes.cp, &d.sizes.pp, &d.sizes.ep }, ranks = 1;
            for (int k = 0; k < 4; k++) ranks *= *axes[k] = *axes[k] > 0 ? *axes[k] : 1;
            dt_host host = *dt_host_default();
            dt_report report;
            host.log = log_nothing;
            d.file = files[f];
            d.g = g;
            d.sizes.dp = 1;
            dt_run(
                (dt_run_desc){ .ranks = ranks, .timeout_s = 60, .host = &host, .report = &report },
                deep_main, &d);
            CHECK_MSG(report.status == DT_OK, "%s, layout %d: %s", d.file, (int)i, report.text);
        }
        golden_free(g);
    }
}

/* The logits of a DeepSeek-V3 file on one rank. */
static void deepseek_logits(const char *file, dt_dtype dtype, double tolerance) {
    char stored[64];
    snprintf(stored, sizeof stored, "%s/vectors.bin", file);
    golden *g = golden_open(path_of(golden_folder, stored));
    dt_ctx *ctx = make_ctx();
    gpt_config c = gpt_config_from(ctx, path_of(golden_folder, file));
    c.dtype = dtype;
    gpt m = gpt_register(ctx, c);
    gpt_load(&m, path_of(golden_folder, file));
    dt_tensor *out = g ? gpt_logits(&m, input_of(ctx, g, "ids")) : NULL;
    double d = out ? tensor_difference(out, out->data, dtype, golden_get(g, "logits", NULL)) : NAN;
    CHECK_MSG(d <= tolerance, "%s in %s: logits differ by %.1e", file, dt_dtype_name(dtype), d);
    golden_free(g);
    free_ctx(ctx, file);
}

// ==== 3. Files saved and loaded =================================================================

/* Makes a Llama one of the models with parts: 4 Llama 3, 5 Qwen 3, 6 Mistral, 7 Gemma 2, 8 Qwen 2, 9
   Gemma 3. */
static void give_parts(gpt_config *c, int which) {
    gpt_parts *p = &c->parts;
    int gemma = which == 7 || which == 9;
    c->tied = which % 2;
    if (which == 4 || which == 6)
        p->rope = (dt_rope_scaling){
            .kind = which == 4 ? DT_ROPE_LLAMA3 : DT_ROPE_YARN, .factor = 4, .original = 8
        };
    if (which == 9) p->rope = (dt_rope_scaling){ .kind = DT_ROPE_LINEAR, .factor = 2.5 };
    if (which == 6) p->rope.low = 0.5, p->rope.high = 2, p->rope.attention = 1.25;
    if (which == 5 || which == 9) p->qk_norm = 1, p->head_dim = 10;
    if (which == 6 || gemma) p->window = 5;
    p->qkv_bias = which == 8;
    p->gemma = gemma;
    if (gemma) p->global_every = which == 9 ? 3 : 2, p->query_scalar = 7;
    if (which == 7) p->attn_soft_cap = 2, p->logit_soft_cap = 3;
    if (which == 9) p->local_theta = 55;
}

/* Makes a Llama one of the models with latent attention: 10 has experts, 11 a module of multi-token
   prediction. */
static void give_latent(gpt_config *c, int which) {
    c->kv_heads = 4;
    c->mla = (gpt_mla){
        .kv_rank = 6, .q_rank = which == 10 ? 5 : 0, .nope_dim = 5, .rope_dim = 2, .value_dim = 4
    };
    c->mtp = which == 11;
    c->mtp_weight = 0.3;
    if (which == 11) return;
    c->experts = 4, c->top_k = 2, c->shared_experts = 2, c->moe_ffn = 9, c->first_dense = 1;
    c->route = DT_ROUTE_SIGMOID, c->expert_groups = 2, c->top_groups = 1, c->gate_scale = 2.5;
    c->parts.rope = (dt_rope_scaling){
        .kind = DT_ROPE_YARN, .factor = 4, .original = 8, .low = 1, .high = 4, .attention = 1.25
    };
    c->parts.query_scalar = 7 / pow(0.1 * log(4) + 1, 4); /* mscale_all_dim is 1 */
}
enum { MTP_MODEL = 11, MIXTRAL = 12, MODELS };

/* One of the models: GPT-2 or Llama, untied or tied, one with parts or latent attention, Mixtral. */
static gpt_config random_config(int which) {
    gpt_config c = { .layers = 3,
        .width = 24,
        .heads = 4,
        .kv_heads = 4,
        .ffn = 96,
        .seq = 16,
        .vocab = 37,
        .tied = which % 2,
        .dtype = DT_F64,
        .arch = which / 2 ? GPT_LLAMA : GPT_GPT2,
        .norm_eps = 2e-5 };
    if (c.arch == GPT_LLAMA) c.kv_heads = 2, c.ffn = 40, c.theta = 777;
    if (which > 3 && which < 10) give_parts(&c, which);
    if (which == 10 || which == MTP_MODEL) give_latent(&c, which);
    if (which == MIXTRAL) c.experts = 3, c.top_k = 2, c.moe_every = 1, c.balance = 0.5;
    return c;
}

/* Random values for every parameter, also for gains and biases, which start as ones and zeros. */
static void fill(dt_ctx *ctx) {
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *p = dt_param_get(ctx, i);
        int64_t n = dt_count(p->shape);
        double *value = (double *)malloc((size_t)n * 8);
        char *own = (char *)malloc((size_t)n * 8);
        for (int64_t k = 0; k < n; k++)
            value[k] = (double)(mix((uint64_t)i * 100000 + (uint64_t)k) >> 40) / (1 << 24) - 0.5 +
                       (p->shape.nd == 1 && strstr(p->name, "weight") ? 1 : 0);
        dt__convert(p->dtype, own, DT_F64, value, n);
        dt_write(p, own);
        free(value);
        free(own);
    }
}

static void fill_ids(int32_t *ids, int n, int vocab, int seed) {
    for (int i = 0; i < n; i++)
        ids[i] = (int32_t)(mix((uint64_t)(seed * 1000 + i)) % (uint64_t)vocab);
}

static int same_params(dt_ctx *a, dt_ctx *b) {
    int same = dt_param_count(a) == dt_param_count(b);
    for (int i = 0; same && i < dt_param_count(a); i++) {
        const dt_tensor *x = dt_param_get(a, i), *y = dt_param_get(b, i);
        same = strcmp(x->name, y->name) == 0 && dt_count(x->shape) == dt_count(y->shape) &&
               memcmp(x->data, y->data, (size_t)dt_count(x->shape) * dt_dtype_size(x->dtype)) == 0;
    }
    return same;
}

/* Zeros that mean a default become the default in the file. */
static int same_parts(const gpt_parts *a, const gpt_parts *b) {
    const dt_rope_scaling *x = &a->rope, *y = &b->rope;
    double low = x->kind > DT_ROPE_LINEAR && x->low == 0 ? 1 : x->low,
           high = x->kind == DT_ROPE_LLAMA3 && x->high == 0 ? 4 : x->high;
    return a->head_dim == b->head_dim && a->qkv_bias == b->qkv_bias && a->qk_norm == b->qk_norm &&
           a->window == b->window && a->global_every == b->global_every &&
           a->local_theta == b->local_theta &&
           fabs(a->query_scalar - b->query_scalar) <= 1e-14 * a->query_scalar &&
           a->attn_soft_cap == b->attn_soft_cap && a->logit_soft_cap == b->logit_soft_cap &&
           a->gemma == b->gemma && x->kind == y->kind && x->factor == y->factor &&
           x->original == y->original && low == y->low && high == y->high &&
           x->attention == y->attention && x->exact_bounds == y->exact_bounds;
}

static int same_config(gpt_config a, gpt_config b) {
    return a.arch == b.arch && a.layers == b.layers && a.width == b.width && a.heads == b.heads &&
           a.ffn == b.ffn && a.kv_heads == b.kv_heads && a.seq == b.seq && a.vocab == b.vocab &&
           a.tied == b.tied && a.norm_eps == b.norm_eps && a.mtp == b.mtp &&
           (a.mla.kv_rank || a.balance == b.balance) && memcmp(&a.mla, &b.mla, sizeof a.mla) == 0 &&
           a.experts == b.experts &&
           (!a.experts ||
               (a.top_k == b.top_k && a.shared_experts == b.shared_experts &&
                   a.moe_ffn == b.moe_ffn && a.first_dense == b.first_dense && a.route == b.route &&
                   a.expert_groups == b.expert_groups && a.top_groups == b.top_groups &&
                   a.raw_gates == b.raw_gates && a.gate_scale == b.gate_scale)) &&
           (a.arch == GPT_GPT2 || a.theta == b.theta) && same_parts(&a.parts, &b.parts);
}

static int same_file(const char *a, const char *b) {
    size_t n = 0, m = 0;
    unsigned char *x = golden_read_file(a, &n), *y = golden_read_file(b, &m);
    int same = x && y && n == m && memcmp(x, y, n) == 0;
    free(x);
    free(y);
    return same;
}

static char *new_folder(const char *top, const char *name) {
    static char folder[512];
    snprintf(folder, sizeof folder, "%s/%s", top, name);
    mkdir(folder, 0777);
    return folder;
}

/* Saves a model, loads it and saves it again: the same configuration, values and files. */
static void round_trip(int which, dt_dtype dtype, int64_t shard) {
    dt_ctx *a = make_ctx(), *b = make_ctx();
    gpt_config c = random_config(which);
    char one[512], two[512];
    snprintf(one, sizeof one, "%s", new_folder(scratch, "one"));
    snprintf(two, sizeof two, "%s", new_folder(scratch, "two"));
    c.dtype = dtype;
    gpt m = gpt_register(a, c);
    fill(a);
    CHECK_MSG(gpt_save(&m, one, shard) == DT_OK, "%s", dt_error_text(a));
    gpt_config d = gpt_config_from(b, one);
    CHECK_MSG(same_config(c, d), "model %d: the config differs: %s", which, dt_error_text(b));
    d.dtype = dtype;
    gpt n = gpt_register(b, d);
    CHECK_MSG(gpt_load(&n, one) == DT_OK, "%s", dt_error_text(b));
    CHECK_MSG(same_params(a, b), "model %d in %s: values differ", which, dt_dtype_name(dtype));
    CHECK_MSG(gpt_save(&n, two, shard) == DT_OK, "%s", dt_error_text(b));
    free_ctx(a, "saved");
    free_ctx(b, "read");
    static const char *const files[] = { "config.json", "model.safetensors",
        "model.safetensors.index.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors" };
    for (int i = 0; i < 5; i++) {
        int there = access(path_of(one, files[i]), R_OK) == 0;
        CHECK_MSG(there == (i == 0 || (shard ? i > 1 : i == 1)),
            "model %d: %s exists, or is missing", which, files[i]);
        CHECK_MSG(!there || same_file(path_of(one, files[i]), path_of(two, files[i])),
            "model %d: the bytes of %s differ", which, files[i]);
        remove(path_of(one, files[i]));
        remove(path_of(two, files[i]));
    }
}

/* Saves each model in its own folder of `top`, with its logits. */
static int save_models(const char *top) {
    for (int which = 0; which < MODELS; which++) {
        if (which == MTP_MODEL) continue; /* transformers has no such model */
        char name[64], line[256];
        int32_t ids[2 * 16];
        dt_ctx *ctx = make_ctx();
        gpt_config c = random_config(which);
        snprintf(name, sizeof name, "%s_%s",
            which == 10        ? "deepseek"
            : which == MIXTRAL ? "mixtral"
            : c.arch           ? gpt_model_types[gpt_file_model(&c)]
                               : "gpt2",
            c.tied ? "tied" : "untied");
        if (which == 4) strcat(name, "_3");
        const char *folder = new_folder(top, name);
        gpt m = gpt_register(ctx, c);
        fill(ctx);
        fill_ids(ids, 32, c.vocab, which);
        dt_tensor *out = gpt_logits(&m, dt_input(ctx, DT_I32, DT_SHAPE(2, 16), ids));
        FILE *f = fopen(path_of(folder, "logits.bin"), "wb");
        if (!f || !out) return 1;
        fprintf(f, "golden 1\nids 2 16\n");
        for (int i = 0; i < 32; i++) {
            double x = ids[i];
            fwrite(&x, 8, 1, f);
        }
        snprintf(line, sizeof line, "logits 2 16 %d\n", c.vocab);
        fwrite(line, 1, strlen(line), f);
        fwrite(out->data, 8, (size_t)dt_count(out->shape), f);
        fclose(f);
        gpt_save(&m, folder, which == 2 ? 100000 : 0);
        if (dt_error(ctx) != DT_OK) puts(dt_error_text(ctx));
        dt_ctx_free(ctx);
    }
    return 0;
}

// ==== 4. Files that do not fit ==================================================================

enum { AS_IS, PUBLISHED, MISSING, SHAPE, LONGER, STRANGE, UNTIED, CHANGES };

/* Copies hf_gpt2's tensors into another file, with one change. */
static void rewrite(const char *path, int change) {
    dt_ctx *ctx = make_ctx();
    dt_weights *from = dt_weights_open(ctx, path_of(golden_folder, "hf_gpt2"));
    dt_weights *to = dt_weights_create(ctx, path, (dt_weights_desc){ 0 });
    static float data[1 << 14];
    for (int pass = 0; pass < 2; pass++) {
        int at = 0;
        for (int i = 0; i < dt_weights_count(from); i++) {
            const dt_weight *t = dt_weights_get(from, i);
            const char *name = t->name;
            dt_shape shape = t->shape;
            if (change == PUBLISHED) name += strlen("transformer.");
            if (change == MISSING && strcmp(name, "transformer.h.1.ln_2.bias") == 0) continue;
            if (change == SHAPE && strcmp(name, "transformer.h.0.mlp.c_fc.weight") == 0)
                shape = DT_SHAPE(64, 16);
            if (pass == 0) dt_weights_declare(to, name, DT_F32, shape);
            if (pass == 0) continue;
            dt_weights_read(from, i, 0, t->count, DT_F32, data);
            dt_weights_write(to, at++, 0, t->count, DT_F32, data);
        }
        const char *more = change == PUBLISHED ? "h.0.attn.bias"
                           : change == LONGER  ? "transformer.h.2.ln_1.bias"
                           : change == STRANGE ? "value_head.weight"
                           : change == UNTIED  ? "lm_head.weight"
                                               : NULL;
        if (more && pass == 0) dt_weights_declare(to, more, DT_F32, DT_SHAPE(16));
        if (more && pass == 1) dt_weights_write(to, at, 0, 16, DT_F32, data);
    }
    dt_weights_close(to);
    dt_weights_close(from);
    free_ctx(ctx, "rewrite");
}

/* Each change that does not fit the model is one error, which names the tensor. */
static void files_that_do_not_fit(void) {
    static const char *const says[CHANGES] = { NULL, NULL, "h.1.ln_2.bias", "h.0.mlp.c_fc.weight",
        "h.2.ln_1.bias", "value_head.weight", NULL };
    for (int change = 0; change < CHANGES; change++) {
        dt_ctx *ctx = make_ctx();
        gpt_config c = gpt_config_from(ctx, path_of(golden_folder, "hf_gpt2"));
        gpt m = gpt_register(ctx, c);
        const char *path = path_of(scratch, "changed.safetensors");
        rewrite(path, change);
        dt_status status = gpt_load(&m, path);
        const char *text = dt_error_text(ctx);
        if (says[change])
            CHECK_MSG(status != DT_OK && strstr(text, says[change]) &&
                          strstr(text, "changed.safetensors"),
                "change %d: %s", change, text);
        else
            CHECK_MSG(status == DT_OK, "change %d: %s", change, text);
        dt_ctx_free(ctx);
    }
    remove(path_of(scratch, "changed.safetensors"));
}

/* Loading a file into a model with other sizes is one error, which names a tensor or a size. */
static void models_that_do_not_fit(void) {
    const gpt_config gpt2 = { .layers = 2,
        .width = 16,
        .heads = 4,
        .kv_heads = 4,
        .ffn = 64,
        .seq = 24,
        .vocab = 61,
        .tied = 1 };
    const gpt_config llama = { .layers = 2,
        .width = 24,
        .heads = 6,
        .kv_heads = 2,
        .ffn = 40,
        .seq = 24,
        .vocab = 67,
        .arch = GPT_LLAMA };
    const gpt_config tiny = {
        .layers = 1, .width = 4, .heads = 1, .kv_heads = 1, .ffn = 4, .seq = 4, .vocab = 4
    };
    struct {
        const char *file, *says;
        gpt_config c;
    } cases[] = {
        { "hf_gpt2", "h.2.ln_1.weight", gpt2 },
        { "hf_gpt2", "h.1.", gpt2 },
        { "hf_gpt2", "wte.weight", gpt2 },
        { "hf_gpt2", "one key head per query", gpt2 },
        { "hf_gpt2", "lm_head.weight", gpt2 },
        { "hf_llama", "k_proj", llama },
        { "hf_llama", "gate_proj", llama },
        { "llmc_v3.bin", "4 heads", gpt2 },
        { "llmc_v3.bin", "vocab 61", gpt2 },
        { "llmc_v5.bin", "tied GPT-2", gpt2 },
        { "no_such_file", "no_such_file", tiny },
    };
    cases[0].c.layers = 3;
    cases[1].c.layers = 1;
    cases[2].c.vocab = 60;
    cases[3].c.kv_heads = 2;
    cases[4].c.tied = 0;
    cases[5].c.kv_heads = 3;
    cases[6].c.ffn = 80;
    cases[7].c.heads = cases[7].c.kv_heads = 2;
    cases[8].c.vocab = 64;
    cases[9].c.tied = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dt_ctx *ctx = make_ctx();
        gpt m = gpt_register(ctx, cases[i].c);
        CHECK_MSG(gpt_load(&m, path_of(golden_folder, cases[i].file)) != DT_OK &&
                      strstr(dt_error_text(ctx), cases[i].says),
            "model %d of %s: %s", (int)i, cases[i].file, dt_error_text(ctx));
        dt_ctx_free(ctx);
    }
}

/* config.json: required keys, and settings that gpt.h does not support. An empty expected error
   means that the file is accepted. */
static void configs(void) {
    static const char *const gpt2 =
        "{\"model_type\":\"gpt2\",\"vocab_size\":61,\"n_positions\":24,\"n_embd\":16,"
        "\"n_layer\":2,\n\"n_head\":4%s}";
    static const char *const llama =
        "{\"model_type\":\"llama\",\"vocab_size\":67,\"max_position_embeddings\":24,"
        "\"hidden_size\":24,\"intermediate_size\":40,\"num_hidden_layers\":2,\n\"num_attention_"
        "heads\":6%s}";
    static const char *const gemma =
        "{\"model_type\":\"gemma3_text\",\"vocab_size\":67,\"max_position_embeddings\":24,"
        "\"hidden_size\":24,\"intermediate_size\":40,\"num_hidden_layers\":2,\n\"num_attention_"
        "heads\":6%s}";
    static const struct {
        int llama; /* 0 GPT-2, 1 Llama, 2 Gemma 3 */
        const char *more, *says;
    } cases[] = {
        { 0, "", "" },
        { 1, "", "" },
        { 0, ",\"unknown\":[1,{}],\"n_inner\":null", "" },
        { 1, ",\"rope_scaling\":null,\"rope_theta\":5e5,\"head_dim\":4", "" },
        { 0, ",\"activation_function\":\"gelu_pytorch_tanh\"", "" },
        { 0, ",\"activation_function\":\"relu\"",
            "config.json:2:34: activation_function relu is not supported" },
        { 0, ",\"activation_function\":\"gelu\"", "activation_function gelu is not" },
        { 0, ",\"scale_attn_by_inverse_layer_idx\":true", "scale_attn_by_inverse_layer_idx true" },
        { 0, ",\"scale_attn_weights\":false", "scale_attn_weights false" },
        { 0, ",\"tie_word_embeddings\":3", "config.json:2:34: tie_word_embeddings: true or false" },
        { 0, ",\"n_inner\":-4", "n_inner: a whole number" },
        { 0, ",\"n_inner\":6.5", "n_inner: a whole number" },
        { 0, ",\"layer_norm_epsilon\":\"x\"", "layer_norm_epsilon: a number" },
        { 0, ",\"quantization_config\":{}", "quantization_config is not" },
        { 0, ",", "config.json:2:" },
        { 1, ",\"rope_scaling\":{\"factor\":2}", "config.json:2:40: rope_type is missing" },
        { 1, ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}", "" },
        { 1, ",\"rope_parameters\":{\"rope_type\":\"llama3\"}", "factor is missing" },
        { 1, ",\"rope_parameters\":{\"rope_type\":\"longrope\"}", "rope_type longrope is not" },
        { 1, ",\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":\"x\"}", "factor: a number" },
        { 1, ",\"rope_parameters\":{\"partial_rotary_factor\":0.5}", "partial_rotary_factor is" },
        { 1, ",\"attention_bias\":true", "attention_bias true is not" },
        { 1, ",\"mlp_bias\":true", "mlp_bias true" },
        { 1, ",\"hidden_act\":\"gelu\"", "hidden_act gelu is not" },
        { 1, ",\"head_dim\":8", "" },
        { 1, ",\"head_dim\":7", "head_dim of 7 is odd" },
        { 2, ",\"sliding_window\":0", "sliding_window: a whole number from 1" },
        { 2, ",\"attn_logit_softcapping\":50", "attn_logit_softcapping is not" },
        { 2, ",\"layer_types\":[\"full_attention\"]", "one for each of 2 layers" },
        { 2, ",\"layer_types\":[\"full_attention\",\"sliding_attention\"]", "breaks the pattern" },
        { 2, ",\"layer_types\":[\"full_attention\",\"chunked_attention\"]",
            "chunked_attention is" },
        { 2, ",\"hidden_activation\":\"silu\"", "hidden_activation silu is not" },
        { 2,
            ",\"sliding_window\":9,\"sliding_window_pattern\":2,\"rope_local_base_freq\":77,"
            "\"rope_theta\":88,\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8}",
            "" },
        { 1, ",\"num_key_value_heads\":4", "6 heads and 4" },
    };
    char path[512], text[1024];
    snprintf(path, sizeof path, "%s", new_folder(scratch, "config"));
    rewrite(path_of(path, "model.safetensors"), AS_IS);
    for (size_t i = 0; i < sizeof cases / sizeof *cases + 3; i++) {
        size_t n = sizeof cases / sizeof *cases;
        const char *says = i < n ? cases[i].says : "is missing";
        int is_llama = i < n ? cases[i].llama : 0;
        if (i < n)
            snprintf(text, sizeof text,
                is_llama > 1 ? gemma
                : is_llama   ? llama
                             : gpt2,
                cases[i].more);
        else { /* without one of the keys */
            static const char *const keys[] = { "model_type", "n_embd", "n_head" };
            snprintf(text, sizeof text, gpt2, "");
            strstr(text, keys[i - n])[0] = 'x';
        }
        FILE *f = fopen(path_of(path, "config.json"), "w");
        fputs(text, f);
        fclose(f);
        dt_ctx *ctx = make_ctx();
        gpt_config c = gpt_config_from(ctx, path);
        CHECK_MSG(*says ? c.layers == 0 && strstr(dt_error_text(ctx), says) != NULL
                        : c.layers == 2 && c.arch == (is_llama > 0) && c.tied == 1 &&
                              c.ffn == (is_llama ? 40 : 64),
            "%s: %s", text, dt_error_text(ctx));
        if (i == 3) CHECK(c.theta == 5e5 && c.norm_eps == 1e-6 && c.kv_heads == 6);
        if (strstr(text, "77")) /* the keys of Gemma 3 before transformers 5 */
            CHECK(c.theta == 88 && c.parts.local_theta == 77 && c.parts.window == 9 &&
                  c.parts.global_every == 2 && c.parts.rope.kind == DT_ROPE_LINEAR &&
                  c.parts.rope.factor == 8 && c.parts.head_dim == 256);
        dt_ctx_free(ctx);
    }
    remove(path_of(path, "config.json"));
    remove(path_of(path, "model.safetensors"));
    rmdir(path);
}

// ==== 5. Sharded parameters =====================================================================

/* Loads a model as tensor-parallel rank `rank` of 2. Each value equals the full model's value at
   the same global index. */
static void load_sharded(const char *file, int rank) {
    dt_ctx *a = make_ctx(), *b = make_ctx();
    dt_group two = { rank, 2, NULL, NULL, 0 };
    gpt_config c = gpt_config_from(a, path_of(golden_folder, file));
    gpt full = gpt_register(a, c);
    int sharded = 0, wrong = 0;
    c.tp = (dt_comm *)&two;
    gpt local = gpt_register(b, c);
    gpt_load(&full, path_of(golden_folder, file));
    gpt_load(&local, path_of(golden_folder, file));
    for (int p = 0; p < dt_param_count(b); p++) {
        const dt_tensor *x = dt_param_get(a, p), *y = dt_param_find(b, x->name);
        const dt_local_slice *slice = &y->param->slice;
        sharded += dt_count(y->shape) < dt_count(x->shape);
        for (int64_t k = 0; k < dt_count(y->shape); k++) {
            int64_t left = k, at = 0, stride = 1, inside = 1;
            for (int j = y->shape.nd - 1; j >= 0; j--) {
                int64_t index = left % slice->n[j];
                left /= slice->n[j];
                inside &= index < slice->inside[j];
                at += (slice->lo[j] + index) * stride;
                stride *= x->shape.d[j];
            }
            wrong += ((float *)y->data)[k] != (inside ? ((float *)x->data)[at] : 0);
        }
    }
    CHECK_MSG(wrong == 0 && sharded >= (c.arch ? 13 : 21),
        "%s, rank %d: %d wrong values, %d parameters are sharded", file, rank, wrong, sharded);
    free_ctx(a, "full");
    free_ctx(b, "sharded");
}

// ==== 6. Generation =============================================================================

/* Generates one token at a time after a prompt, past the end of the context. The logits from the
   cache equal those of a forward over the full window. */
static void cache_equals_window(int which, dt_dtype dtype, int prompt, double tolerance) {
    enum { N = 40 };
    int32_t ids[N];
    dt_ctx *a = make_ctx(), *b = make_ctx();
    gpt_config c = random_config(which);
    c.dtype = dtype;
    gpt m = gpt_register(a, c), w = gpt_register(b, c);
    gpt_cache cache;
    double most = 0;
    size_t before = 0, calls = 0;
    fill(a);
    fill(b);
    fill_ids(ids, N, c.vocab, which);
    dt_no_grad(b, 1);
    gpt_cache_open(&cache, &m);
    for (int at = prompt, fresh = prompt; at < N; at++, fresh = 1) {
        if (cache.length + fresh > c.seq) fresh = gpt_cache_restart(&cache);
        dt_tensor *x = gpt_cache_logits(&cache, ids + at - fresh, fresh);
        int T = cache.length;
        dt_tensor *y = gpt_logits(&w, dt_input(b, DT_I32, DT_SHAPE(1, T), ids + at - T));
        if (!CHECK_MSG(x && y, "%s%s", dt_error_text(a), dt_error_text(b))) break;
        y = dt_slice(dt_reshape(y, DT_SHAPE(T, c.vocab)), 0, T - 1, 1);
        double *want = to_doubles(y, y->data, dtype);
        most = fmax(most, tensor_difference(x, x->data, dtype, want));
        free(want);
        dt_reset(a);
        dt_reset(b);
        if (at > prompt + 1) calls += dt_memory_used(a).allocations - before;
        before = dt_memory_used(a).allocations;
    }
    CHECK_MSG(most <= tolerance, "model %d in %s after %d tokens: logits differ by %.1e", which,
        dt_dtype_name(dtype), prompt, most);
    /* latent attention computes the keys of all cached tokens, so its memory grows with them */
    CHECK_MSG(calls == 0 || prompt < c.seq / 2 || c.mla.kv_rank || UNDER_ASAN,
        "%d allocations after the first tokens", (int)calls);
    gpt_cache_close(&cache);
    free_ctx(a, "cache");
    free_ctx(b, "window");
}

/* Sampled frequencies equal the distribution by its definition: of all subsets of a vocabulary of
   six that top_k and top_p may leave, the smallest one is chosen by enumeration. Logits 1 and 3 are
   equal. */
static void top_k_and_top_p(void) {
    enum { V = 6, DRAWS = 20000 };
    static const float logits[V] = { 0.5f, 2, -0.25f, 2, 2.75f, 1 };
    static const double temperatures[] = { 0.5, 1, 3 }, ps[] = { 1, 0.95, 0.8, 0.6, 0.3, 1e-6 };
    float room[V];
    for (int k = 0; k <= V + 1; k++)
        for (int x = 0; x < 18; x++) {
            double T = temperatures[x % 3], p = ps[x / 3], w[V], all = 0, of_k = 0;
            int keep = 0, best = V + 1, seen[V] = { 0 };
            for (int i = 0; i < V; i++) all += w[i] = exp((double)logits[i] / T);
            /* a set is closed if it has every token that is as likely as one of its tokens */
            for (int pass = 0; pass < 2; pass++) {
                int within = pass ? keep : (1 << V) - 1;
                best = V + 1;
                for (int set = 1; set < 1 << V; set++) {
                    int size = 0, closed = (set & ~within) == 0;
                    double sum = 0;
                    for (int i = 0; i < V; i++) {
                        if (!(set >> i & 1)) continue;
                        size++, sum += w[i];
                        for (int j = 0; j < V; j++)
                            closed &= set >> j & 1 || !(within >> j & 1) || w[j] < w[i];
                    }
                    int enough = pass ? sum >= p * of_k - 1e-12 : size >= (k && k < V ? k : V);
                    if (closed && enough && size < best) best = size, keep = set;
                }
                of_k = 0;
                for (int i = 0; i < V; i++) of_k += keep >> i & 1 ? w[i] : 0;
            }
            gpt_sampling s = { .temperature = T, .top_k = k, .top_p = p };
            for (int i = 0; i < DRAWS; i++)
                seen[gpt_sample(logits, V, s, (i + 0.5) / DRAWS, room)]++;
            for (int i = 0; i < V; i++)
                CHECK_MSG(fabs(seen[i] - (keep >> i & 1 ? DRAWS * w[i] / of_k : 0)) <= 1,
                    "top_k %d top_p %g temperature %g: id %d is sampled %d times of %d", k, p, T, i,
                    seen[i], DRAWS);
        }
}

static int stop_at_nine(const int32_t *ids, int n, void *user) {
    *(int *)user = n;
    return n == 9 && ids[0] == 3;
}

static void sampling(void) {
    static const float logits[5] = { 0.5f, 2, 1.5f, -1, 2.5f };
    float room[5];
    int seen[5] = { 0 };
    double sum = 0, p[5];
    for (int i = 0; i < 5; i++) sum += p[i] = exp((double)logits[i] / 0.7);
    CHECK(gpt_sample(logits, 5, (gpt_sampling){ 0 }, 0.99, room) == 4);
    CHECK(gpt_sample(logits, 4, (gpt_sampling){ 0 }, 0.99, room) == 1);
    for (int i = 0; i < 10000; i++)
        seen[gpt_sample(
            logits, 5, (gpt_sampling){ .temperature = 0.7 }, (i + 0.5) / 10000, room)]++;
    for (int i = 0; i < 5; i++)
        CHECK_MSG(fabs(seen[i] - 10000 * p[i] / sum) <= 1, "id %d is sampled %d times", i, seen[i]);
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < 10000; i++)
        seen[gpt_sample(logits, 5, (gpt_sampling){ .temperature = 0.7, .top_k = 2 },
            (i + 0.5) / 10000, room)]++;
    CHECK(seen[0] + seen[2] + seen[3] == 0 &&
          abs(seen[1] - (int)(10000 * p[1] / (p[1] + p[4]))) <= 1);
    top_k_and_top_p();
    /* sampling past the end of the context is reproducible; then one greedy token */
    for (int which = 0; which < 4; which += 3) {
        int32_t one[64] = { 3, 1, 4 }, two[64] = { 3, 1, 4 };
        dt_ctx *ctx = make_ctx();
        gpt m = gpt_register(ctx, random_config(which));
        fill(ctx);
        gpt_generate(&m, one, 3, 64, (gpt_sampling){ .temperature = 0.9, .limit = 20, .seed = 5 });
        gpt_generate(&m, two, 3, 64, (gpt_sampling){ .temperature = 0.9, .limit = 20, .seed = 5 });
        int same = 1, least = 99, most = 0;
        for (int i = 3; i < 64; i++) {
            same &= one[i] == two[i];
            least = one[i] < least ? one[i] : least;
            most = one[i] > most ? one[i] : most;
        }
        CHECK_MSG(same && least >= 0 && most < 20 && most > least, "generated ids from %d to %d",
            least, most);
        gpt_generate(&m, two, 3, 4, (gpt_sampling){ .temperature = 0 });
        dt_tensor *y = gpt_logits(&m, dt_input(ctx, DT_I32, DT_SHAPE(1, 3), two));
        const double *last = y ? (double *)y->data + 2 * 37 : NULL;
        for (int i = 0; last && i < 37; i++) CHECK(last[i] <= last[two[3]]);
        int calls = 0; /* stop ends the text after 9 tokens, which are those without it */
        memset(two + 3, 0, 61 * sizeof *two);
        gpt_generate(&m, two, 3, 64,
            (gpt_sampling){
                .temperature = 0.9, .limit = 20, .seed = 5, .stop = stop_at_nine, .user = &calls });
        CHECK(calls == 9 && memcmp(one, two, 9 * sizeof *one) == 0);
        for (int i = 9; i < 64; i++) CHECK(two[i] == 0);
        CHECK(gpt_generate(&m, two, 0, 4, (gpt_sampling){ 0 }) == DT_ERR_ARG);
        dt_ctx_free(ctx);
    }
}

// ==== 7. Tokens: positions, documents, dropout ==================================================

enum { TOKENS = 12 };

static dt_tensor *line(dt_ctx *ctx, const int32_t *x) {
    return dt_input(ctx, DT_I32, DT_SHAPE(1, TOKENS), x);
}

/* Permuted tokens with their positions give the same logits, permuted. Two documents in one
   sequence give the logits that each gives alone. */
static void permutation_and_documents(int which) {
    static const int order[TOKENS] = { 7, 0, 3, 11, 1, 2, 10, 4, 6, 5, 9, 8 };
    int32_t ids[TOKENS], permuted[TOKENS], place[TOKENS], document[TOKENS], within[TOKENS];
    dt_ctx *ctx = make_ctx();
    gpt_config c = random_config(which);
    c.dropout = 0.3;
    gpt m = gpt_register(ctx, c);
    fill(ctx);
    fill_ids(ids, TOKENS, c.vocab, 9);
    for (int i = 0; i < TOKENS; i++) {
        permuted[i] = ids[order[i]];
        place[i] = order[i];
        document[i] = i >= 5;
        within[i] = i < 5 ? i : i - 5;
    }
    for (uint64_t step = 0; step < 2; step++) { /* step 1 drops values, by their token index */
        gpt_tokens plain = { .ids = line(ctx, ids), .step = step },
                   t = { .ids = line(ctx, permuted), .step = step };
        t.positions = t.index = line(ctx, place);
        dt_tensor *x = gpt_logits_at(&m, plain), *y = gpt_logits_at(&m, t);
        double most = 0;
        for (int i = 0; x && y && i < TOKENS; i++)
            most = fmax(most, relative_difference((double *)y->data + i * c.vocab,
                                  (double *)x->data + order[i] * c.vocab, c.vocab));
        CHECK_MSG(x && y && most < 1e-12,
            "model %d, step %d: logits of the permuted tokens differ by %.1e", which, (int)step,
            most);
        dt_reset(ctx);
    }
    gpt_tokens t = {
        .ids = line(ctx, ids), .positions = line(ctx, within), .documents = line(ctx, document)
    };
    dt_tensor *both = gpt_logits_at(&m, t),
              *first = gpt_logits(&m, dt_input(ctx, DT_I32, DT_SHAPE(1, 5), ids));
    dt_tensor *second = gpt_logits(&m, dt_input(ctx, DT_I32, DT_SHAPE(1, 7), ids + 5));
    CHECK_MSG(
        both && first && second &&
            relative_difference((double *)both->data, (double *)first->data, 5 * c.vocab) < 1e-12 &&
            relative_difference(
                (double *)both->data + 5 * c.vocab, (double *)second->data, 7 * c.vocab) < 1e-12,
        "model %d: a document attends to the other one", which);
    free_ctx(ctx, "order");
}

static uint64_t dropout_key[32];
static int dropouts;

static dt_status record_dropout(const dt_dropout_args *a, void *stream) {
    if (dropouts < 32) dropout_key[dropouts++] = a->key;
    return dt_kernels_cpu()->dropout(a, stream);
}

/* Each dropout of each step has a key of its own. A context with the same seed has the same keys,
   one with another seed has none of them. */
static void dropout_keys(int which) {
    uint64_t first[14] = { 0 };
    int32_t ids[TOKENS] = { 0 };
    gpt_config c = random_config(which);
    c.dropout = 0.1;
    for (int run = 0; run < 3; run++) {
        dt_kernels table = *dt_kernels_cpu();
        table.dropout = record_dropout;
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = run < 2 ? 1u : 2u, .kernels = &table });
        gpt m = gpt_register(ctx, c);
        dropouts = 0;
        for (uint64_t step = 1; step <= 2; step++)
            gpt_logits_at(&m, (gpt_tokens){ .ids = line(ctx, ids), .step = step });
        CHECK_MSG(dropouts == 14, "%d dropouts of 3 layers in 2 steps, not 14", dropouts);
        int other = 0;
        for (int i = 0; i < 14; i++) {
            for (int j = 0; j < i; j++)
                CHECK_MSG(
                    dropout_key[i] != dropout_key[j], "dropouts %d and %d have the same key", i, j);
            other += run > 0 && dropout_key[i] != first[i];
            if (run == 0) first[i] = dropout_key[i];
        }
        CHECK(other == (run < 2 ? 0 : 14));
        free_ctx(ctx, "dropout");
    }
}

/* The loss of one step, and its n gradients. */
static double step_grads(gpt_config c, uint64_t step, double *grads, int64_t *n) {
    int32_t ids[TOKENS];
    dt_ctx *ctx = make_ctx();
    gpt m = gpt_register(ctx, c);
    fill(ctx);
    fill_ids(ids, TOKENS, c.vocab, 3);
    int32_t next[TOKENS], ahead[TOKENS];
    gpt_ahead(ids, ids, NULL, 1, TOKENS, 0, next, ahead);
    gpt_tokens t = { .ids = line(ctx, ids), .step = step };
    t.next[0] = line(ctx, next), t.ahead[0] = line(ctx, ahead);
    dt_tensor *l = gpt_loss_at(&m, t, line(ctx, ids), TOKENS);
    double loss = dt_item(l);
    dt_backward(l);
    *n = 0;
    for (int i = 0; i < dt_param_count(ctx); i++) {
        const dt_tensor *p = dt_param_get(ctx, i);
        memset(grads + *n, 0, (size_t)dt_count(p->shape) * 8);
        if (p->grad) /* a router bias has none */
            memcpy(grads + *n, p->grad, (size_t)dt_count(p->shape) * 8);
        *n += dt_count(p->shape);
    }
    CHECK_MSG(*n == gpt_param_count(c), "%d gradients, but gpt_param_count is %d", (int)*n,
        (int)gpt_param_count(c));
    free_ctx(ctx, "a step");
    return loss;
}

static void dropout_and_recompute(int which) {
    gpt_config c = random_config(which);
    double *a = (double *)malloc(1 << 20), *b = (double *)malloc(1 << 20);
    int64_t n, n_b;
    double plain = step_grads(c, 0, a, &n);
    /* without dropout the step changes nothing */
    CHECK(step_grads(c, 3, b, &n_b) == plain && memcmp(a, b, (size_t)n * 8) == 0);
    c.dropout = 0.25;
    /* step 0 is evaluation, which drops nothing */
    CHECK(step_grads(c, 0, b, &n_b) == plain && memcmp(a, b, (size_t)n * 8) == 0);
    c.smoothing = 0.1;
    double dropped = step_grads(c, 3, a, &n);
    CHECK(dropped != plain && step_grads(c, 4, b, &n_b) != dropped);
    for (int recompute = 1; recompute <= 3; recompute++) {
        c.recompute = recompute > 2 ? GPT_RECOMPUTE_FULL : recompute;
        c.recompute_every = recompute > 2 ? 2 : 0;
        CHECK_MSG(step_grads(c, 3, b, &n_b) == dropped && memcmp(a, b, (size_t)n * 8) == 0,
            "model %d, recompute %d: bits differ", which, recompute);
    }
    free(a);
    free(b);
}

/* Bytes of activation memory that a context holds after three steps. */
static size_t activation_bytes(gpt_config c, int64_t B) {
    dt_ctx *ctx = make_ctx();
    gpt m = gpt_register(ctx, c);
    int32_t *ids = (int32_t *)calloc((size_t)(B * c.seq), 4);
    for (int step = 1; step < 4; step++) {
        dt_tensor *id = dt_input(ctx, DT_I32, DT_SHAPE(B, c.seq), ids);
        dt_backward(gpt_loss_at(&m, (gpt_tokens){ .ids = id, .step = (uint64_t)step }, id, 10));
        dt_reset(ctx);
    }
    size_t live = dt_memory_used(ctx).live[DT_MEM_ACTS];
    free(ids);
    free_ctx(ctx, "kept");
    return live;
}

/* Two more layers take exactly the activation bytes that gpt.h states. With 128 tokens no size is
   rounded up. Not checked under the address sanitizer, where every tensor is its own allocation. */
static void activation_formula(void) {
    for (int which = 0; which < 4 && !UNDER_ASAN; which++)
        for (int recompute = 0; recompute < 3; recompute++)
            for (int drop = 0; drop < 2; drop++) {
                gpt_config c = random_config(which);
                int64_t B = 8, C = c.width, KD = C / c.heads * c.kv_heads, F = c.ffn, H = c.heads;
                c.recompute = recompute;
                c.dropout = drop ? 0.5 : 0;
                int64_t none = c.arch ? 4 * C + 2 * KD + 2 * F + H + 2 : 4 * C + 2 * KD + F + H + 4;
                int64_t selective = c.arch ? 3 * C + 2 * F + 1 : 3 * C + F + 2;
                int64_t want = recompute == 0 ? none : recompute == 1 ? selective : C;
                size_t less = activation_bytes(c, B);
                c.layers += 2;
                size_t got = activation_bytes(c, B) - less;
                CHECK_MSG(got == 2 * (size_t)(want * B * c.seq) * 8,
                    "model %d, recompute %d, dropout %d: %d bytes for "
                    "two more layers, formula %d",
                    which, recompute, drop, (int)got, (int)(2 * want * B * c.seq * 8));
            }
}

/* The FLOPs of GPT-2 small and of Llama 3 8B and changes of it, counted by hand: elements of the
   matrices, then attention. */
static void flops(gpt_config small, gpt_config llama) {
    double layer = 2.0 * 4096 * 4096 + 2.0 * 1024 * 4096, mlp = 3.0 * 14336 * 4096,
           head = 128256.0 * 4096, attention = 12.0 * 4096 * 4096;
    CHECK(gpt_flops_per_token(small) ==
          6.0 * (12 * 12 * 768 * 768 + 50257 * 768) + 12.0 * 12 * 768 * 1024);
    CHECK(gpt_flops_per_token(llama) == 6 * (32 * (layer + mlp) + head) + 32 * attention);
    gpt_config c = llama;
    c.parts.window = 1024, c.parts.global_every = 4; /* 24 local layers, 8 global ones */
    CHECK(gpt_flops_per_token(c) ==
          6 * (32 * (layer + mlp) + head) + 24 * attention / 4 + 8 * attention);
    c.parts.window = 8192; /* longer than the sequence */
    CHECK(gpt_flops_per_token(c) == gpt_flops_per_token(llama));
    c = llama;
    c.lora = (gpt_lora){ .rank = 16, .modules = 1 << GPT_LORA_Q | 1 << GPT_LORA_V };
    CHECK(gpt_flops_per_token(c) == 4 * (32 * (layer + mlp) + head) +
                                        6 * 32.0 * 16 * (2 * 4096 + 4096 + 1024) + 32 * attention);
    c = llama;
    c.experts = 8, c.mtp = 1; /* a module has a layer, eh_proj, and the head again */
    CHECK(
        gpt_flops_per_token(c) ==
        6 * (33 * (layer + 2 * mlp + 8.0 * 4096) + 2 * head + 2.0 * 4096 * 4096) + 33 * attention);
    c = llama;
    c.tied = 1;
    CHECK(gpt_flops_per_token(c) == gpt_flops_per_token(llama));
}

static void counts(void) {
    gpt_config small = { .layers = 12,
        .width = 768,
        .heads = 12,
        .kv_heads = 12,
        .ffn = 3072,
        .seq = 1024,
        .vocab = 50257,
        .tied = 1 };
    gpt_config llama = { .layers = 32,
        .width = 4096,
        .heads = 32,
        .kv_heads = 32,
        .ffn = 11008,
        .seq = 4096,
        .vocab = 32000,
        .arch = GPT_LLAMA };
    CHECK(gpt_param_count(small) == 124439808);  /* GPT-2 small */
    CHECK(gpt_param_count(llama) == 6738415616); /* Llama 2 7B */
    llama.kv_heads = 8, llama.ffn = 14336, llama.vocab = 128256;
    CHECK(gpt_param_count(llama) == 8030261248); /* Llama 3 8B */
    flops(small, llama);
    /* the last config has no sizes */
    gpt_config bad[] = { small, small, small, llama, llama, { .arch = GPT_GPT2 } };
    bad[0].dropout = 1;
    bad[1].smoothing = -0.1;
    bad[2].arch = 2;
    /* rotary embedding needs pairs, but these heads have width 1 */
    bad[3].heads = bad[3].kv_heads = 4096;
    bad[4].norm_eps = (double)NAN;
    for (int i = 0; i < 6; i++) {
        dt_ctx *ctx = make_ctx();
        gpt m = gpt_register(ctx, bad[i]);
        CHECK_MSG(dt_error(ctx) == DT_ERR_ARG, "config %d is accepted", i);
        CHECK(gpt_save(&m, scratch, 0) == DT_ERR_ARG &&
              access(path_of(scratch, "config.json"), R_OK) != 0);
        dt_ctx_free(ctx);
    }
}

/* Invalid stages and experts are refused before any parameter is registered. */
static void registrations_refused(void) {
    static const int once[] = { 0, 6 }, halves[] = { 0, 3, 6 }, back[] = { 0, 4, 3, 6 },
                     late[] = { 1, 6 };
    const gpt_config good = {
        .layers = 2, .width = 8, .heads = 2, .kv_heads = 2, .ffn = 8, .seq = 4, .vocab = 9
    };
    struct {
        const char *says;
        gpt_config c;
    } cases[] = { { NULL, good }, { NULL, good }, { NULL, good },
        { "stage_rank must give each rank equally many", good },
        { "stage_begin must rise from 0 to 6", good },
        { "stage_begin must rise from 0 to 6", good }, { "3 per token", good },
        { "capacity -1", good }, { "head_dim must be even", good }, { "window and", good },
        { "need a window", good }, { "only GPT_LLAMA", good }, { "rope.kind is no", good },
        { "gemma has no experts", good }, { "latent attention has no", good } };
    cases[1].c.stages = 1, cases[1].c.stage_begin = once;
    cases[2].c.stages = cases[3].c.stages = 2,
    cases[2].c.stage_begin = cases[3].c.stage_begin = halves;
    cases[3].c.stage_rank = halves; /* rank 0 has one stage, and there is no rank 3 */
    cases[4].c.stages = 3, cases[4].c.stage_begin = back;
    cases[5].c.stages = 1, cases[5].c.stage_begin = late;
    cases[6].c.experts = 2, cases[6].c.top_k = 3;
    cases[7].c.experts = 2, cases[7].c.capacity = -1;
    for (int i = 8; i < 15; i++) cases[i].c.arch = i == 11 ? GPT_GPT2 : GPT_LLAMA;
    cases[8].c.parts.head_dim = 7;
    cases[9].c.parts.window = -1;
    cases[10].c.parts.global_every = 2;
    cases[11].c.parts.qk_norm = 1;
    cases[12].c.parts.rope.kind = 4;
    cases[13].c.parts.gemma = cases[13].c.experts = 1;
    cases[14].c.mla = (gpt_mla){ .kv_rank = 2, .nope_dim = 2, .rope_dim = 2, .value_dim = 2 };
    cases[14].c.parts.qk_norm = 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dt_ctx *ctx = make_ctx();
        gpt_register(ctx, cases[i].c);
        const char *says = cases[i].says;
        int refused = dt_error(ctx) == DT_ERR_ARG && dt_param_count(ctx) == 0;
        CHECK_MSG(says ? refused && strstr(dt_error_text(ctx), says) : dt_error(ctx) == DT_OK,
            "case %d: %s", (int)i, dt_error_text(ctx));
        dt_ctx_free(ctx);
    }
}

/* Which leading dimensions of a parameter count matrices, for Muon. */
static dt_status matrices_of(dt_ctx *ctx, void *user) {
    static const struct {
        const char *name;
        int matrices;
    } right[] = { { "wte.weight", 0 }, { "h.0.attn.q.weight", 0 }, { "h.0.attn.proj.weight", 0 },
        { "h.0.mlp.gate_up.weight", 1 }, { "h.1.moe.router.weight", 0 },
        { "h.1.moe.gate_up.weight", 2 }, { "h.1.moe.proj.weight", 1 }, { "ln_f.weight", 0 } };
    (void)user;
    gpt_register(ctx, (gpt_config){ .layers = 2,
                          .width = 8,
                          .heads = 2,
                          .kv_heads = 2,
                          .ffn = 6,
                          .seq = 4,
                          .vocab = 10,
                          .tied = 1,
                          .arch = GPT_LLAMA,
                          .experts = 3,
                          .moe_every = 2 });
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        const dt_tensor *t = dt_param_find(ctx, right[i].name);
        if (CHECK_MSG(t, "no %s", right[i].name))
            CHECK_MSG(t->param->desc.matrices == right[i].matrices, "%s: %d dimensions count",
                right[i].name, t->param->desc.matrices);
    }
    return dt_error(ctx);
}

/* Multi-token prediction reads and predicts no token of another document or beyond the sequence. */
static void ahead_within_documents(void) {
    enum { T = 6, ALL = 2 * T };
    static const int32_t ids[ALL] = { 1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16 },
                         labels[ALL] = { 2, 3, -1, 5, 6, -1, 12, 13, 14, 15, 16, 17 },
                         documents[ALL] = { 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0 };
    static const int32_t want[2][2][ALL] = { { { 2, 3, 0, 5, 6, 0, 12, 13, 14, 15, 16, 0 },
                                                 { 3, -1, -1, 6, -1, -1, 13, 14, 15, 16, 17, -1 } },
        { { 3, 0, 0, 6, 0, 0, 13, 14, 15, 16, 0, 0 },
            { -1, -1, -1, -1, -1, -1, 14, 15, 16, 17, -1, -1 } } };
    for (int k = 0; k < 2; k++) {
        int32_t next[ALL], ahead[ALL];
        gpt_ahead(ids, labels, documents, 2, T, k, next, ahead);
        CHECK(memcmp(next, want[k][0], sizeof next) == 0);
        CHECK(memcmp(ahead, want[k][1], sizeof ahead) == 0);
    }
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "--save") == 0) return save_models(argv[2]);
    if (argc > 1) golden_folder = argv[1];
    snprintf(scratch, sizeof scratch, "/tmp/test_gpt.XXXXXX");
    if (!mkdtemp(scratch)) return 1;
    compare_all_with_transformers();
    parts_in_layouts();
    for (int which = 0; which < MODELS; which++) {
        round_trip(which, DT_F64, 0);
        round_trip(which, DT_F32, which < 2 ? 60000 : which < 4 ? 40000 : 0);
        round_trip(which, DT_BF16, 0);
        for (int prompt = 1; prompt < 16; prompt += 7) {
            cache_equals_window(which, DT_F64, prompt, 1e-12);
            cache_equals_window(which, DT_F32, prompt, 1e-5);
        }
        cache_equals_window(which, DT_BF16, 8, 0.05);
        cache_equals_window(which, DT_F16, 8, 0.01);
        permutation_and_documents(which);
        dropout_and_recompute(which);
        if (which < 10) dropout_keys(which); /* it counts the sites of dense models */
    }
    deepseek_logits("hf_deepseek", DT_F64, 1e-12);
    deepseek_logits("hf_deepseek", DT_F32, 1e-5);
    deepseek_logits("hf_deepseek_mtp", DT_F64, 1e-12);
    deepseek_layouts();
    ahead_within_documents();
    files_that_do_not_fit();
    models_that_do_not_fit();
    configs();
    registrations_refused();
    for (int rank = 0; rank < 2; rank++) {
        load_sharded("hf_gpt2", rank);
        load_sharded("hf_llama", rank);
        load_sharded("hf_mixtral", rank);
        load_sharded("llmc_v3.bin", rank);
    }
    sampling();
    activation_formula();
    counts();
    CHECK(dt_run((dt_run_desc){ .ranks = 1 }, matrices_of, NULL) == DT_OK);
    rmdir(path_of(scratch, "one"));
    rmdir(path_of(scratch, "two"));
    CHECK_MSG(rmdir(scratch) == 0, "files are left in %s", scratch);
    return check_done("test_gpt");
}
