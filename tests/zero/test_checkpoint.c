/* test_checkpoint.c - a checkpoint of any layout loads in any other layout, and a resumed training
   equals an uninterrupted one. Public domain or MIT, at your choice; see LICENSE.

   Run:  test_checkpoint                   a sample of the pairs and of the trainings
         test_checkpoint full              all of them: about 3 minutes
         test_checkpoint golden FOLDER     writes what tests/golden/checkpoint holds, and prints
                                           checkpoint.h; there is one such folder for each format
                                           number, and it never changes

   pairs    Every layout of a list saves after two steps. Each checkpoint is loaded in every other
             layout and saved again: the two files, which hold weights and moments, must be equal
             to the byte, and the next step must equal the saver's. One model is a tied mixture of
             experts, sharded along every axis; two are dense, with the tensor names of
             transformers.
   same     Two steps, a save, and two more steps in the same layout give the bits of four
             uninterrupted steps: with dropout, shuffled data, a growing batch, clipping, f32, bf16
             and f16 with its loss scale, 1-bit Adam.
   elastic  8 ranks, then 6, 4 and 8, with the tree: the bits of 8 ranks without a stop.
   forms    The contents of a checkpoint: tensors as transformers names them, numbers; and which
             checkpoints are refused, with which text.
   converts Checkpoints loaded as another type, and with more positions: every value is the nearest
             one, of the master weights where the checkpoint has them.
   golden   The first checkpoint of this format, which every later version must load. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "examples/train.h"
#include "tests/support/check.h"
#include "tests/golden/checkpoint.h"

static char scratch[] = "/tmp/test_checkpoint.XXXXXX";

static const char *in_scratch(char *out, const char *name) {
    snprintf(out, 300, "%s/%s", scratch, name);
    return out;
}

static void clear(const char *folder) {
    char command[400];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) abort();
}

// ==== Layouts ===================================================================================

typedef struct layout {
    int dp, tp, cp, pp, ep, stage, shard, sched, chunks, sp, kind;
    const char *offload_optim, *offload_params;
    int background, procs, fold;
} layout;
#define L(d, t, c, p, e, z, ...) \
    { .dp = d, .tp = t, .cp = c, .pp = p, .ep = e, .stage = z, .shard = __VA_ARGS__ }

static const layout layouts[] = {
    L(1, 1, 1, 1, 1, 0, 0),
    L(2, 1, 1, 1, 1, 0, 0),
    L(2, 1, 1, 1, 1, 1, 0),
    L(2, 1, 1, 1, 1, 2, 0),
    L(2, 1, 1, 1, 1, 3, 0),
    L(4, 1, 1, 1, 1, 1, 2),
    L(4, 1, 1, 1, 1, 3, 2),
    L(8, 1, 1, 1, 1, 2, 0),
    L(3, 1, 1, 1, 1, 3, 0),
    L(6, 1, 1, 1, 1, 1, 3),
    L(4, 1, 1, 1, 1, 3, 1),
    L(1, 2, 1, 1, 1, 0, 0),
    L(1, 4, 1, 1, 1, 0, 0, .sp = 1),
    L(2, 2, 1, 1, 1, 1, 0, .sp = 1),
    L(2, 2, 1, 1, 1, 3, 0),
    L(3, 2, 1, 1, 1, 2, 0, .background = 1),
    L(1, 1, 2, 1, 1, 0, 0),
    L(1, 1, 2, 1, 1, 3, 0, .kind = DT_CP_ZIGZAG),
    L(1, 1, 4, 1, 1, 1, 0, .kind = DT_CP_ALLGATHER),
    L(2, 1, 2, 1, 1, 2, 0, .kind = DT_CP_ULYSSES),
    L(1, 1, 1, 2, 1, 0, 0, .sched = DT_SCHEDULE_1F1B),
    L(1, 1, 1, 2, 1, 3, 0, .sched = DT_SCHEDULE_1F1B),
    L(1, 1, 1, 4, 1, 1, 0, .sched = DT_SCHEDULE_AFAB),
    L(1, 1, 1, 2, 1, 0, 0, .sched = DT_SCHEDULE_INTERLEAVED, .chunks = 2),
    L(2, 1, 1, 2, 1, 3, 0, .sched = DT_SCHEDULE_1F1B, .background = 1),
    L(2, 1, 1, 2, 1, 2, 0, .sched = DT_SCHEDULE_ZB),
    L(2, 1, 1, 2, 1, 3, 0, .sched = DT_SCHEDULE_ZBV, .chunks = 2),
    L(1, 2, 2, 2, 1, 1, 0, .sched = DT_SCHEDULE_1F1B),
    L(2, 1, 1, 1, 1, 3, 0, .offload_optim = scratch, .offload_params = scratch),
    L(2, 1, 1, 1, 1, 1, 0, .offload_optim = "cpu"),
    L(2, 1, 1, 1, 1, 3, 0, .offload_optim = "cpu", .offload_params = "cpu"),
    L(2, 2, 1, 1, 1, 1, 0, .procs = 1),
    /* from here on: only for models with experts */
    L(1, 1, 1, 1, 2, 0, 0),
    L(1, 1, 1, 1, 2, 3, 0),
    L(1, 1, 1, 1, 4, 1, 0),
    L(2, 1, 1, 1, 2, 3, 2),
    L(1, 1, 1, 2, 2, 3, 0, .sched = DT_SCHEDULE_1F1B),
    L(1, 2, 1, 1, 2, 3, 0),
    L(2, 1, 1, 2, 2, 1, 0, .sched = DT_SCHEDULE_1F1B),
    L(1, 1, 2, 1, 2, 3, 0, .background = 1),
    /* fold: expert_tp of expert folding, with which ep is no factor of the ranks */
    L(1, 2, 1, 1, 2, 0, 0, .fold = 1),
    L(1, 2, 2, 1, 4, 3, 0, .fold = 1),
    L(2, 2, 1, 1, 2, 1, 0, .fold = 2, .sp = 1),
    L(2, 2, 1, 1, 1, 3, 0, .fold = 4),
    L(2, 1, 1, 2, 1, 2, 0, .fold = 2, .sched = DT_SCHEDULE_1F1B),
    L(2, 2, 1, 1, 4, 3, 2, .fold = 1),
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts, BATCH = 24 };

static void name_of(layout l, char *text, size_t bytes) {
    snprintf(text, bytes, "dp%d tp%d cp%d pp%d ep%d fold%d zero%d/%d%s%s%s", l.dp, l.tp, l.cp, l.pp,
        l.ep, l.fold, l.stage, l.shard, l.sp ? " sp" : "", l.offload_optim ? " offload" : "",
        l.background ? " background" : "");
}

static int replicas_of(layout l) { return l.dp * (l.fold ? 1 : l.ep); }

// ==== One run ===================================================================================

typedef struct run {
    layout l;
    gpt_config model;
    train_config config; /* fields that a test changes */
    const char *save, *resume;
    int64_t stop_at;
} run;

/* In shared memory, because forked ranks write it. */
typedef struct result {
    dt_status status;
    char text[512];
    int64_t first, last; /* steps made */
    double loss[16], norm[16];
} result;

static result *told;

static void on_step(dt_ctx *ctx, const train_row *row, void *user) {
    (void)ctx, (void)user;
    if (!told->first) told->first = row->step;
    told->last = row->step;
    if (row->step < 16) told->loss[row->step] = row->loss, told->norm[row->step] = row->grad_norm;
}

static char text_path[300];
static train_files text_files;

static gpt_config mixture(dt_dtype dtype) {
    return (gpt_config){ .layers = 2,
        .width = 16,
        .heads = 4,
        .kv_heads = 4,
        .ffn = 24,
        .seq = 16,
        .vocab = 256,
        .tied = 1,
        .experts = 4,
        .top_k = 2,
        .moe_every = 2,
        .shared_experts = 1,
        .balance = 0.01,
        .router_bias = 0.001,
        .dtype = dtype };
}

static gpt_config dense(dt_dtype dtype, int arch) {
    return (gpt_config){ .arch = arch,
        .layers = 2,
        .width = 16,
        .heads = 4,
        .kv_heads = arch == GPT_LLAMA ? 2 : 4,
        .ffn = 24,
        .seq = 16,
        .vocab = 256,
        .tied = arch == GPT_GPT2,
        .dtype = dtype };
}

static result run_training(run r) {
    layout l = r.l;
    train_config c = r.config;
    dt_report report = { DT_OK, 0, "", 0 };
    int replicas = replicas_of(l), stages = l.pp * (l.chunks ? l.chunks : 1),
        items = 2 * r.model.layers + 2;
    double same[64];
    for (int i = 0; i < items; i++) same[i] = 1;
    c.model = r.model;
    c.model.sp = l.sp;
    c.model.cp_kind = l.kind;
    c.mesh = (dt_mesh_desc){ l.dp, l.tp, l.cp, l.pp, l.ep, l.fold };
    c.schedule = l.sched;
    c.chunks = l.chunks ? l.chunks : 1;
    if (dt_partition_stages(same, items, stages, c.stage_begin, report.text, sizeof report.text) !=
        DT_OK)
        abort();
    if (!c.accum) c.accum = l.pp > 1 ? BATCH / replicas : 1;
    if (!c.micro_batch) c.micro_batch = BATCH / replicas / c.accum;
    c.zero.stage = l.stage;
    c.zero.shard_group = l.shard;
    c.zero.offload_optim = l.offload_optim;
    c.zero.offload_params = l.offload_params;
    if (c.zero.clip == 0) c.zero.clip = 1;
    if (c.lr.peak == 0) c.lr = (dt_lr_desc){ .peak = 0.01, .steps = 8 };
    c.data = text_files;
    c.seq = 16;
    c.stop_at = r.stop_at;
    c.save = r.save;
    c.resume = r.resume;
    c.background = l.background;
    c.settings = "{\"settings\": 1}";
    c.on_step = on_step;
    memset(told, 0, sizeof *told);
    told->status = dt_run((dt_run_desc){ .ranks = replicas * l.tp * l.cp * l.pp,
                              .timeout_s = 60,
                              .report = &report,
                              .backend = l.procs ? DT_BACKEND_PROCS : DT_BACKEND_THREADS },
        train, &c);
    memcpy(told->text, report.text, sizeof told->text);
    return *told;
}

static char *read_all(const char *path, size_t *bytes) {
    FILE *f = fopen(path, "rb");
    char *data = NULL;
    *bytes = 0;
    if (!f) return NULL;
    fseek(f, 0, SEEK_END);
    *bytes = (size_t)ftell(f);
    rewind(f);
    data = (char *)malloc(*bytes + 1);
    if (!data || fread(data, 1, *bytes, f) != *bytes) abort();
    fclose(f);
    return data;
}

static int same_file(const char *a, const char *b, const char *name) {
    char path[700];
    size_t n, m;
    snprintf(path, sizeof path, "%s/%s", a, name);
    char *x = read_all(path, &n);
    snprintf(path, sizeof path, "%s/%s", b, name);
    char *y = read_all(path, &m);
    int same = x && y && n == m && memcmp(x, y, n) == 0;
    free(x);
    free(y);
    return same;
}

static int same_checkpoint(const char *a, const char *b) {
    return same_file(a, b, "model.safetensors") && same_file(a, b, "optim.safetensors");
}

static int close_to(double a, double b, double tolerance) {
    return fabs(a - b) <= tolerance * fmax(fabs(b), 1e-3);
}

// ==== pairs =====================================================================================

/* In f64, because then a layout changes the next step only by its order of summation. */
static void pairs(const char *what, gpt_config model, int count, int every) {
    static result from[LAYOUTS];
    int pairs = 0;
    char dir[300], at[320], other[300], copy[320], a[100], b[100];
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "from-%d", i);
        in_scratch(dir, name);
        clear(dir);
        name_of(layouts[i], a, sizeof a);
        result r =
            run_training((run){ .l = layouts[i], .model = model, .save = dir, .stop_at = 2 });
        CHECK_MSG(r.status == DT_OK && r.last == 2, "%s, %s: %s", what, a, r.text);
        snprintf(at, sizeof at, "%s/step-2", dir);
        from[i] =
            run_training((run){ .l = layouts[i], .model = model, .resume = at, .stop_at = 3 });
        CHECK_MSG(
            from[i].status == DT_OK && from[i].first == 3, "%s, %s: %s", what, a, from[i].text);
    }
    in_scratch(other, "to");
    snprintf(copy, sizeof copy, "%s/step-2", other);
    for (int i = 0; i < count; i++)
        for (int k = 0; k < count; k++) {
            if ((i * 5 + k * 3) % every != 0) continue;
            pairs++;
            snprintf(at, sizeof at, "%s/from-%d/step-2", scratch, i);
            clear(other);
            name_of(layouts[i], a, sizeof a);
            name_of(layouts[k], b, sizeof b);
            result r = run_training((run){
                .l = layouts[k], .model = model, .resume = at, .save = other, .stop_at = 2 });
            CHECK_MSG(r.status == DT_OK && r.first == 0, "%s: %s -> %s: %s", what, a, b, r.text);
            CHECK_MSG(same_checkpoint(at, copy), "%s: %s -> %s: files differ", what, a, b);
            r = run_training((run){ .l = layouts[k], .model = model, .resume = at, .stop_at = 3 });
            CHECK_MSG(r.status == DT_OK && r.first == 3 &&
                          close_to(r.loss[3], from[i].loss[3], 1e-11) &&
                          close_to(r.norm[3], from[i].norm[3], 1e-9),
                "%s: %s -> %s: next step: loss %.17g and %.17g, norm %.17g "
                "and %.17g: %s",
                what, a, b, r.loss[3], from[i].loss[3], r.norm[3], from[i].norm[3], r.text);
        }
    printf("%s: %d of %d ordered pairs of %d layouts\n", what, pairs, count * count, count);
}

// ==== same ======================================================================================

typedef struct kind {
    const char *name;
    dt_dtype dtype;
    int ramp, shuffle, tree, sgd, own_scale, onebit;
    double dropout;
} kind;

static void same(const kind *k, int i) {
    run r = { .l = layouts[i], .model = mixture(k->dtype) };
    char whole[300], half[300], at[320], end[320], name[100];
    int replicas = replicas_of(r.l);
    r.model.dropout = k->dropout;
    r.config.shuffle = k->shuffle;
    r.config.zero.tree = k->tree;
    if (k->onebit)
        r.config.zero.optimizer = DT_ONEBIT_ADAM, r.config.zero.freeze_steps = 1,
        r.model.experts = 0;
    if (k->sgd) r.config.zero.optimizer = DT_SGD, r.config.zero.momentum = 0.9;
    if (k->own_scale)
        r.config.zero.scale = (dt_scale_desc){ .init = 1 << 22, .interval = 3, .hysteresis = 1 };
    if (k->ramp) {
        r.config.micro_batch = 1;
        r.config.accum = BATCH / replicas;
        r.config.ramp =
            (dt_batch_ramp){ .start = BATCH / 2, .incr = BATCH / 2, .samples = 2 * BATCH };
    }
    name_of(r.l, name, sizeof name);
    in_scratch(whole, "whole");
    in_scratch(half, "half");
    clear(whole);
    clear(half);
    r.save = whole;
    r.stop_at = 5;
    result once = run_training(r);
    r.save = half;
    r.stop_at = 2;
    result first = run_training(r);
    r.resume = half;
    r.stop_at = 5;
    result second = run_training(r);
    CHECK_MSG(once.status == DT_OK && first.status == DT_OK && second.status == DT_OK,
        "%s, %s: %s%s%s", k->name, name, once.text, first.text, second.text);
    CHECK_MSG(second.first == 3 && second.last == 5, "%s, %s: steps %lld to %lld", k->name, name,
        (long long)second.first, (long long)second.last);
    for (int s = 3; s <= 5; s++)
        CHECK_MSG(second.loss[s] == once.loss[s] && second.norm[s] == once.norm[s],
            "%s, %s: step %d: %.17g and %.17g", k->name, name, s, second.loss[s], once.loss[s]);
    snprintf(at, sizeof at, "%s/step-5", whole);
    snprintf(end, sizeof end, "%s/step-5", half);
    CHECK_MSG(same_checkpoint(at, end), "%s, %s: files differ after the last step", k->name, name);
}

static void all_same(int full) {
    static const kind kinds[] = { { .name = "f32", .dtype = DT_F32 },
        { .name = "bf16", .dtype = DT_BF16 },
        { .name = "f32, dropout, shuffled", .dtype = DT_F32, .dropout = 0.2, .shuffle = 1 },
        { .name = "f16, its scale moves", .dtype = DT_F16, .own_scale = 1 },
        { .name = "f32, growing batch", .dtype = DT_F32, .ramp = 1, .shuffle = 1 },
        { .name = "bf16, SGD, tree", .dtype = DT_BF16, .sgd = 1, .tree = 1 } };
    int runs = 0;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int i = 0; i < LAYOUTS; i++) {
            int offload = layouts[i].offload_optim != NULL,
                ramps = BATCH / 2 % replicas_of(layouts[i]) == 0;
            if (kinds[k].ramp && (!ramps || layouts[i].pp > 2)) continue;
            if ((k >= 2 && i % 3 != (int)k % 3 && !offload) || (!full && (i + (int)k) % 3 != 0))
                continue;
            same(&kinds[k], i);
            runs++;
        }
    static const kind onebit = { .name = "1-bit Adam", .dtype = DT_F32, .onebit = 1 };
    for (int i = 0; i < LAYOUTS; i++)
        if (layouts[i].stage == 0 && layouts[i].ep == 1 && !layouts[i].fold)
            same(&onebit, i), runs++;
    printf("same: %d interrupted trainings\n", runs);
}

// ==== elastic ===================================================================================

static void elastic(void) {
    static const int ranks[] = { 8, 6, 4, 8 };
    char one[300], many[300], a[320], b[320];
    for (int stage = 0; stage <= 3; stage++)
        for (int type = 0; type < 2; type++) {
            run r = { .model = dense(type ? DT_BF16 : DT_F32, stage % 2 ? GPT_LLAMA : GPT_GPT2),
                .config = { .micro_batch = 1, .zero = { .tree = 1 } } };
            clear(in_scratch(one, "one"));
            clear(in_scratch(many, "many"));
            r.l = (layout)L(8, 1, 1, 1, 1, stage, 0);
            r.config.accum = BATCH / 8;
            r.save = one;
            r.stop_at = 8;
            result once = run_training(r);
            CHECK_MSG(once.status == DT_OK, "%s", once.text);
            for (int i = 0; i < 4; i++) {
                r.l.dp = ranks[i];
                r.config.accum = BATCH / ranks[i];
                r.save = many;
                r.resume = i ? many : NULL;
                r.stop_at = 2 * (i + 1);
                result part = run_training(r);
                CHECK_MSG(part.status == DT_OK && part.first == 2 * i + 1, "elastic, %d ranks: %s",
                    ranks[i], part.text);
                for (int64_t s = part.first; s <= part.last; s++)
                    CHECK_MSG(part.loss[s] == once.loss[s],
                        "elastic, zero%d, %d ranks, step %lld: %.17g and %.17g", stage, ranks[i],
                        (long long)s, part.loss[s], once.loss[s]);
            }
            snprintf(a, sizeof a, "%s/step-8", one);
            snprintf(b, sizeof b, "%s/step-8", many);
            CHECK_MSG(same_checkpoint(a, b), "elastic, zero%d: files differ at the end", stage);
        }
}

// ==== forms =====================================================================================

/* A run of one rank that loads `from` and saves it again. */
typedef struct again {
    gpt_config model;
    const char *from, *to;
} again;
static dt_status save_again(dt_ctx *ctx, void *user) {
    const again *a = (const again *)user;
    gpt m = gpt_register(ctx, a->model);
    dt_zero_make(ctx, (dt_zero_desc){ .stage = 0 });
    gpt_load(&m, a->from);
    clear(a->to);
    if (mkdir(a->to, 0777) != 0) abort();
    gpt_save(&m, a->to, 0);
    return dt_error(ctx);
}

/* For a model with transformers' tensor names, a checkpoint's model file equals the file that
   gpt_save writes and the one that gpt_export writes from any layout. An llm.c model holds the same
   values. */
static void names(void) {
    char dir[300], at[320], out[300], exported[300], bin[300];
    in_scratch(out, "again");
    in_scratch(exported, "exported");
    in_scratch(bin, "exported.bin");
    for (int kind = 0; kind < 4; kind++)
        for (int i = kind % 2; i < LAYOUTS; i += 2) {
            gpt_config model =
                dense(kind == 3 ? DT_BF16 : DT_F32, kind == 1 ? GPT_LLAMA : GPT_GPT2);
            if (layouts[i].ep > 1 || layouts[i].fold) continue;
            /* as llm.c requires: its vocabulary is padded to 384 rows */
            if (kind >= 2) model.ffn = 4 * model.width, model.vocab = 300;
            clear(in_scratch(dir, "forms"));
            clear(exported);
            if (mkdir(exported, 0777) != 0) abort();
            snprintf(at, sizeof at, "%s/step-2", dir);
            result r = run_training((run){ .l = layouts[i],
                .model = model,
                .save = dir,
                .stop_at = 2,
                .config = { .export_to = kind >= 2 ? bin : exported } });
            CHECK_MSG(r.status == DT_OK, "%s", r.text);
            again a = { model, at, out };
            CHECK(dt_run((dt_run_desc){ .ranks = 1 }, save_again, &a) == DT_OK);
            CHECK_MSG(same_file(at, out, "model.safetensors"), "kind %d, layout %d: other files",
                kind, i);
            CHECK(same_file(at, out, "config.json"));
            if (kind >= 2) {
                a = (again){ model, bin, exported };
                CHECK(dt_run((dt_run_desc){ .ranks = 1 }, save_again, &a) == DT_OK);
            }
            CHECK_MSG(same_file(at, exported, "model.safetensors"),
                "kind %d, layout %d: the export differs", kind, i);
            CHECK(same_file(at, exported, "config.json"));
        }
}

static void expect_load_refused(const char *what, run r, const char *text) {
    result got = run_training(r);
    CHECK_MSG(got.status != DT_OK && strstr(got.text, text), "%s: status %d, '%s' should say '%s'",
        what, (int)got.status, got.text, text);
}

/* Rewrites the checksum at the end of a manifest after its text was changed. */
static void write_checksum(const char *path) {
    size_t n;
    char *text = read_all(path, &n), end[DT__MANIFEST_END + 1];
    dt__manifest_end(end, text, n - DT__MANIFEST_END);
    memcpy(text + n - DT__MANIFEST_END, end, DT__MANIFEST_END);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(text, 1, n, f) != n || fclose(f) != 0) abort();
    free(text);
}

static void replace_text(const char *path, const char *from, const char *to) {
    size_t n;
    char *text = read_all(path, &n), *at;
    text[n] = 0;
    at = strstr(text, from);
    if (!at || strlen(from) != strlen(to)) abort();
    memcpy(at, to, strlen(to));
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(text, 1, n, f) != n || fclose(f) != 0) abort();
    free(text);
}

/* Saves a checkpoint of step 2 in `dir` at path `at`, and returns the run that resumes from it. */
static run saved_run(char *dir, char *at) {
    run r = {
        .l = L(2, 1, 1, 1, 1, 1, 0), .model = dense(DT_F32, GPT_GPT2), .save = dir, .stop_at = 2
    };
    clear(in_scratch(dir, "forms"));
    CHECK(run_training(r).status == DT_OK);
    snprintf(at, 320, "%s/step-2", dir);
    r.save = NULL;
    r.stop_at = 3;
    r.resume = at;
    CHECK(run_training(r).status == DT_OK);
    return r;
}

static void other_programs(void) {
    char dir[300], other[300], at[320];
    run r = saved_run(dir, at), bad = r;
    bad.model.width = 32;
    expect_load_refused("another width", bad, "in this program");
    bad = r;
    bad.model.layers = 3;
    expect_load_refused("another depth", bad, "which this program has");
    bad.model.layers = 1;
    expect_load_refused("another depth", bad, "which this program has not");
    bad = r;
    bad.config.zero.optimizer = DT_ADAM;
    expect_load_refused(
        "another optimizer", bad, "its optimizer is adamw, and this program's is adam");
    run signs = { .l = L(2, 1, 1, 1, 1, 0, 0),
        .model = dense(DT_F32, GPT_GPT2),
        .save = in_scratch(other, "signs"),
        .stop_at = 3,
        .config = { .zero = { .optimizer = DT_ONEBIT_ADAM, .freeze_steps = 1 } } };
    clear(other);
    CHECK(run_training(signs).status == DT_OK);
    signs.l.dp = 4; /* the errors of 1-bit Adam restart at zero */
    signs.resume = other;
    signs.stop_at = 4;
    CHECK(run_training(signs).status == DT_OK);
}

static void folders(void) {
    char dir[300], other[300], at[320], name[64], copy[1600];
    run r = saved_run(dir, at), bad = r;
    CHECK(dt_checkpoint_newest(dt_io_default(), dir, name, sizeof name) == 2 &&
          strcmp(name, "step-2") == 0);
    bad.resume = in_scratch(other, "nothing");
    expect_load_refused("no folder", bad, "there is no checkpoint");
    CHECK(dt_checkpoint_newest(dt_io_default(), other, name, sizeof name) == -1 && !name[0]);
    if (mkdir(other, 0777) != 0) abort();
    expect_load_refused("no checkpoint", bad, "there is no checkpoint");
    bad.save = dir;
    bad.resume = NULL;
    expect_load_refused("a folder of another training", bad, "which this job has not loaded");
    bad.save = "/proc/nothing/here";
    expect_load_refused("a folder that cannot be made", bad, "/proc/nothing/here");
    r.resume = r.save = dir;
    CHECK(run_training(r).status == DT_OK);
    snprintf(copy, sizeof copy, "cp -r '%s' '%s/step-9'; mkdir '%s/step-0010' '%s/step-8.x'", at,
        dir, dir, dir);
    /* step-9 holds step 2 in spite of its name; the two folders are not named like checkpoints */
    if (system(copy) != 0) abort();
    CHECK(dt_checkpoint_newest(dt_io_default(), dir, name, sizeof name) == 9);
    r.save = NULL;
    r.stop_at = 4;
    result newest = run_training(r);
    CHECK_MSG(newest.status == DT_OK && newest.first == 4,
        "step 3 is the newest, but the run resumes with %lld: %s", (long long)newest.first,
        newest.text);
    /* another spelling of the same folder */
    snprintf(other, sizeof other, "%s/./forms", scratch);
    r.resume = other;
    r.save = dir;
    newest = run_training(r);
    CHECK_MSG(newest.status == DT_OK, "%s", newest.text);
}

/* Newer formats are refused by number; files that only look like a manifest are refused. */
static void manifests(void) {
    char dir[300], at[320], path[360];
    run r = saved_run(dir, at);
    snprintf(path, sizeof path, "%s/manifest.json", at);
    replace_text(path, "\"version\":1", "\"version\":2");
    expect_load_refused(
        "a newer format, damaged", r, "checkpoint of format 2; this program knows formats up to 1");
    write_checksum(path);
    expect_load_refused(
        "a newer format", r, "checkpoint of format 2; this program knows formats up to 1");
    r.resume = dir;
    expect_load_refused("a newer format in a folder", r, "checkpoint of format 2");
    replace_text(path, "\"version\":2", "\"version\":0");
    write_checksum(path);
    expect_load_refused("format 0", r, "no manifest of a dt checkpoint");
    replace_text(path, "\"version\":0", "\"version\":1");
    write_checksum(path);
    CHECK(run_training(r).status == DT_OK);
    replace_text(path, "\"seed\":\"1\"", "\"seed\":\"2\"");
    write_checksum(path);
    expect_load_refused("another seed", r, "its seed is 2");
    replace_text(path, "\"seed\":\"2\"", "\"seed\":\"1\"");
    replace_text(path, "\"samples\"", "\"sampled\"");
    write_checksum(path);
    expect_load_refused(
        "a number is missing", r, "it has 0 numbers 'samples', and this program has 1");
}

static void forms(void) {
    names();
    other_programs();
    folders();
    manifests();
}

// ==== other types, more positions ==============================================================

static dt_weights *open_weights(dt_ctx *ctx, const char *folder, const char *name) {
    char path[400];
    snprintf(path, sizeof path, "%s/step-2/%s", folder, name);
    return dt_weights_open(ctx, path);
}

/* Expects the first elements of tensor `name` of a to be those of `from` of b, rounded to `type`;
   returns the number of elements that b has not. */
static int64_t expect_rounded(dt_weights *a, const char *name, dt_weights *b, const char *from,
    dt_dtype type, const char *what) {
    const dt_weight *x = dt_weights_get(a, dt_weights_find(a, name)),
                    *y = dt_weights_get(b, dt_weights_find(b, from));
    if (!CHECK_MSG(x && y && x->count >= y->count, "%s: %s and %s", what, name, from)) return 0;
    size_t bytes = (size_t)y->count * dt_dtype_size(type);
    void *p = malloc(bytes), *q = malloc(bytes);
    dt_weights_read(a, dt_weights_find(a, name), 0, y->count, type, p);
    dt_weights_read(b, dt_weights_find(b, from), 0, y->count, type, q);
    CHECK_MSG(x->dtype == type && memcmp(p, q, bytes) == 0, "%s: %s is not %s of %s", what, name,
        dt_dtype_name(type), from);
    free(p);
    free(q);
    return x->count - y->count;
}

/* Expects the elements [from, count) of a tensor to be all 0, or none. */
static void expect_zeros(dt_weights *w, const char *name, int64_t from, int zeros) {
    const dt_weight *t = dt_weights_get(w, dt_weights_find(w, name));
    for (int64_t i = from; t && i < t->count; i++) {
        double x = 0;
        dt_weights_read(w, dt_weights_find(w, name), i, 1, DT_F64, &x);
        if (!CHECK_MSG((x == 0) == zeros, "%s: element %d is %g", name, (int)i, x)) return;
    }
}

/* Compares a checkpoint with the one from which it was loaded, for the parameter `name`, which the
   model files call `file`. */
static void expect_converted(dt_ctx *ctx, const char *was, const char *is, const char *name,
    const char *file, dt_dtype type, int grows) {
    static const char *const models = "model.safetensors", *const optims = "optim.safetensors";
    char what[300], master[100], m[100];
    snprintf(what, sizeof what, "%s from %s", is, was);
    snprintf(master, sizeof master, "master.%s", name);
    snprintf(m, sizeof m, "m.%s", name);
    dt_weights *a = open_weights(ctx, is, models), *oa = open_weights(ctx, is, optims),
               *b = open_weights(ctx, was, models), *ob = open_weights(ctx, was, optims);
    dt_dtype state = type == DT_F64 ? DT_F64 : DT_F32;
    int had = dt_weights_find(ob, master) >= 0, has = type == DT_BF16 || type == DT_F16;
    int64_t more = expect_rounded(a, file, had ? ob : b, had ? master : file, type, what);
    CHECK_MSG((more > 0) == grows, "%s: %d more elements", what, (int)more);
    expect_rounded(oa, m, ob, m, state, what);
    if (has) expect_rounded(oa, master, had ? ob : a, had ? master : file, DT_F32, what);
    if (grows) {
        const dt_weight *t = dt_weights_get(a, dt_weights_find(a, file));
        expect_zeros(a, file, t->count - more, 0);
        expect_zeros(oa, m, t->count - more, 1);
        if (has) expect_zeros(oa, master, t->count - more, 0);
    }
    for (int i = 0; i < 4; i++) dt_weights_close((dt_weights *[]){ a, oa, b, ob }[i]);
}

/* Loads checkpoints of each type as each other type, and positions that the checkpoint lacks. */
static void converts(void) {
    static const dt_dtype types[] = { DT_F32, DT_BF16, DT_F16, DT_F64 };
    static const layout at[] = { L(1, 1, 1, 1, 1, 0, 0), L(2, 1, 1, 1, 1, 3, 0),
        L(2, 2, 1, 1, 1, 1, 0),
        L(2, 1, 1, 1, 1, 3, 0, .offload_optim = scratch, .offload_params = scratch),
        L(2, 1, 1, 1, 1, 2, 0, .offload_optim = "cpu") };
    char was[300], is[300];
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1 });
    for (int i = 0; i < 24; i++) {
        int grows = i >= 16;
        run r = { .l = at[i % 3], .stop_at = 2, .save = in_scratch(was, "was") };
        r.model = grows ? dense(types[i / 4 % 4], GPT_GPT2) : mixture(types[i / 4 % 4]);
        clear(was);
        result got = run_training(r);
        CHECK_MSG(got.status == DT_OK, "%s", got.text);
        r.l = at[i % 5];
        r.model.dtype = types[i % 4];
        r.model.seq += 8 * grows;
        r.resume = was;
        r.save = in_scratch(is, "is");
        clear(is);
        got = run_training(r); /* no step is left, so only saves what it has loaded */
        if (!CHECK_MSG(got.status == DT_OK && got.last == 0, "%d: %s", i, got.text)) continue;
        if (grows)
            expect_converted(ctx, was, is, "wpe.weight", "transformer.wpe.weight", types[i % 4], 1);
        else
            expect_converted(
                ctx, was, is, "h.1.moe.fc.weight", "h.1.moe.fc.weight", types[i % 4], 0);
        r.resume = is;
        r.save = NULL;
        r.stop_at = 3;
        got = run_training(r);
        CHECK_MSG(got.status == DT_OK && got.loss[3] > 1 && got.loss[3] < 6, "%d: loss %g, %s", i,
            got.loss[3], got.text);
    }
    dt_ctx_free(ctx);
}

// ==== golden ====================================================================================

/* A small model with every kind of tensor: a tied mixture of experts in bf16 with masters. */
static run golden_run(void) {
    run r = { .l = L(2, 1, 1, 1, 1, 1, 0), .model = mixture(DT_BF16), .stop_at = 2 };
    r.model.width = 4;
    r.model.ffn = 4;
    r.model.heads = r.model.kv_heads = 2;
    r.model.layers = 2;
    r.model.experts = 2;
    return r;
}

/* The sum over all numbers of a file, to compare with the sum at the time of writing. */
static double sum_of(const char *folder, const char *name) {
    char path[400];
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1 });
    double sum = 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    dt_weights *w = dt_weights_open(ctx, path);
    for (int i = 0; i < dt_weights_count(w); i++) {
        const dt_weight *t = dt_weights_get(w, i);
        double *x = (double *)malloc((size_t)t->count * sizeof *x);
        dt_weights_read(w, i, 0, t->count, DT_F64, x);
        for (int64_t k = 0; k < t->count; k++) sum += x[k] * (double)(1 + k % 17 + i);
        free(x);
    }
    dt_ctx_free(ctx);
    return sum;
}

static void golden(void) {
    char dir[300], copy[320];
    run r = golden_run();
    r.resume = "tests/golden/checkpoint/step-2";
    r.save = in_scratch(dir, "golden");
    result got = run_training(r);
    CHECK_MSG(got.status == DT_OK, "the golden checkpoint: %s", got.text);
    snprintf(copy, sizeof copy, "%s/step-2", dir);
    CHECK_MSG(
        same_checkpoint(copy, r.resume), "the golden checkpoint changes when it is saved again");
    double model = sum_of(copy, "model.safetensors"), optim = sum_of(copy, "optim.safetensors");
    CHECK_MSG(close_to(model, GOLDEN_MODEL, 1e-12) && close_to(optim, GOLDEN_OPTIM, 1e-12),
        "golden sums: %.17g and %.17g", model, optim);
    r.save = NULL;
    r.stop_at = 3;
    got = run_training(r);
    CHECK_MSG(got.status == DT_OK && close_to(got.loss[3], GOLDEN_LOSS, 1e-6),
        "the golden checkpoint's next loss is %.17g", got.loss[3]);
}

static void small_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* Saves or loads one parameter with some rows, with or without an EMA. */
typedef struct small {
    int rows, loads;
    double ema;
    float first, last;
    char text[512];
} small;

static dt_status small_main(dt_ctx *ctx, void *user) {
    small *s = (small *)user;
    char dir[300];
    float h[20];
    dt_tensor *w = dt_param(ctx, "deep.pos.weight", DT_SHAPE(s->rows, 2), DT_ZEROS);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .ema_decay = s->ema });
    dt_checkpoint *c = dt_checkpoint_open(
        zero, (dt_checkpoint_desc){ .dir = in_scratch(dir, "small"), .grows = "pos.weight" });
    if (s->loads) {
        if (dt_checkpoint_load(c, NULL) == 1 && dt_read(w, h) == DT_OK)
            s->first = h[0], s->last = h[2 * s->rows - 1];
    } else {
        dt_backward(dt_sum_over(w, DT_ALL));
        dt_zero_step(zero, 0.5);
        dt_reset(ctx);
        dt_checkpoint_save(c);
    }
    dt_checkpoint_close(c);
    snprintf(s->text, sizeof s->text, "%s", dt_error_text(ctx));
    return DT_OK;
}

/* desc.grows also means a parameter whose name ends in it; a program with an EMA and a checkpoint
   without one do not fit, and the error says so. */
static void grows_and_ema(void) {
    static const struct {
        small save, load;
        const char *why;
    } cases[] = { { { 4, 0, 0, 0, 0, "" }, { 6, 1, 0, 0, 0, "" }, "" },
        { { 4, 0, 0, 0, 0, "" }, { 4, 1, 0.9, 0, 0, "" }, "saved without dt_zero_desc.ema_decay" },
        { { 4, 0, 0.9, 0, 0, "" }, { 4, 1, 0, 0, 0, "" }, "saved with dt_zero_desc.ema_decay" } };
    static dt_host quiet;
    quiet = *dt_host_default();
    quiet.log = small_log;
    char dir[300];
    for (int i = 0; i < 3; i++) {
        small save = cases[i].save, load = cases[i].load;
        clear(in_scratch(dir, "small"));
        dt_run((dt_run_desc){ .ranks = 1, .host = &quiet }, small_main, &save);
        dt_run((dt_run_desc){ .ranks = 1, .host = &quiet }, small_main, &load);
        CHECK_MSG(!*save.text && strstr(load.text, cases[i].why) && !*load.text == !*cases[i].why,
            "%d: %s; %s", i, save.text, load.text);
        CHECK(i > 0 || (fabsf(load.first + 0.5f) < 1e-5f && load.last == 0));
    }
    clear(dir);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (!mkdtemp(scratch)) return 1;
    told = (result *)mmap(
        NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    FILE *f = fopen(in_scratch(text_path, "text"), "w");
    for (int i = 0; i < 4000; i++)
        fputc("the quick brown fox jumps over a lazy dog; "[(i * 7 + i / 43 * 3) % 43], f);
    fclose(f);
    train_files_add(&text_files, text_path, 4000);
    text_files.tokens = 4000;
    if (strcmp(what, "golden") == 0 && argc > 2) {
        run r = golden_run();
        r.save = argv[2];
        result got = run_training(r);
        r.resume = argv[2];
        r.save = NULL;
        r.stop_at = 3;
        if (got.status == DT_OK) got = run_training(r);
        char at[400];
        snprintf(at, sizeof at, "%s/step-2", argv[2]);
        printf(
            "#define GOLDEN_MODEL %.17g\n#define GOLDEN_OPTIM %.17g\n#define GOLDEN_LOSS %.17g\n",
            sum_of(at, "model.safetensors"), sum_of(at, "optim.safetensors"), got.loss[3]);
        clear(scratch);
        return got.status != DT_OK;
    }
    int experts = 0;
    while (experts < LAYOUTS && layouts[experts].ep == 1) experts++;
    int full = strcmp(what, "full") == 0;
    pairs("tied mixture", mixture(DT_F64), LAYOUTS, full ? 1 : 7);
    pairs("GPT-2", dense(DT_F64, GPT_GPT2), experts, full ? 1 : 11);
    pairs("Llama", dense(DT_F64, GPT_LLAMA), experts, full ? 1 : 11);
    all_same(full);
    elastic();
    forms();
    converts();
    grows_and_ema();
    golden();
    clear(scratch);
    train_files_free(&text_files);
    return check_done("test_checkpoint");
}
