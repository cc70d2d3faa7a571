/* test_seeds.c - the worked figures of five tutorials, reproduced by dt's accounts or its formulas

   The tutorials, as the checks name them:

       000   "Distributed training frameworks": memory of GPT-3, DP and DDP, DeepSpeed's ZeRO stages
       001   a course's notebook on distributed training: DP, PP, TP, BLOOM, ZeRO, collectives,
             DeepSpeed
       002   "Parallel strategies": five dimensions of parallelism after the Ultra-Scale Playbook
       003   "An overview of distributed training of language models": sizes, layouts, clusters,
             hyperparameters
       004   "A short introduction to distributed training": collectives and parameter servers; it
             has no figures

   Most figures are measured: a program with the tutorial's sizes runs dry (dt_dry_begin). The
   values of dt_memory_used, dt_comm_bytes and dt_dry are compared with the tutorial's figure in the
   tutorial's precision, and with a formula to the byte. Where a tutorial is wrong the test has the
   right figure and the comment quotes the tutorial. GB and TB are powers of ten, as in 001 ("1 GB =
   10^9 bytes"); only 003's 1250 MB are of 2^20 bytes. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "tests/support/check.h"

/* The highest stage that dt_zero_make supports. Cases of higher stages are skipped. */
enum { HIGHEST_STAGE = 3 };

// ==== Helpers ===================================================================================

static const double GB = 1e9, MIB = 1048576;

/* Compares with a tutorial's figure. digits: half a unit of its last digit. */
static void says(const char *what, double got, double said, double digits) {
    CHECK_MSG(fabs(got - said) <= digits, "%s: %.6g, the tutorial says %.6g", what, got, said);
}

static void equals(const char *what, double got, double want) {
    CHECK_MSG(got == want, "%s: %.17g, want %.17g", what, got, want);
}

typedef dt_status (*rank_fn)(dt_ctx *ctx, void *user);
typedef struct program {
    rank_fn fn;
    void *user;
    dt_dry *dry;
} program;

static dt_status program_main(dt_ctx *ctx, void *user) {
    program *p = (program *)user;
    if (p->dry) dt_dry_begin(ctx, &p->dry[dt_ctx_rank(ctx)]);
    return p->fn(ctx, p->user);
}

static void no_log(void *user, int level, int rank, const char *text) {
    (void)user;
    (void)level;
    (void)rank;
    (void)text;
}

static dt_status run(int ranks, int dry, rank_fn fn, void *user, dt_report *report) {
    program p = { fn, user, dry ? (dt_dry *)calloc((size_t)ranks, sizeof *p.dry) : NULL };
    dt_host host = *dt_host_default();
    host.log = no_log;
    dt_status status =
        dt_run((dt_run_desc){ .ranks = ranks, .host = &host, .report = report }, program_main, &p);
    free(p.dry);
    return status;
}

static void run_well(int ranks, int dry, rank_fn fn, void *user) {
    dt_report report = { DT_OK, 0, "", 0 };
    CHECK_MSG(run(ranks, dry, fn, user, &report) == DT_OK, "%d ranks: %s", ranks, report.text);
}

static void dry_run(int ranks, rank_fn fn, void *user) { run_well(ranks, 1, fn, user); }

static double dry_flops(dt_ctx *ctx) { return ((const dt_dry *)dt_ctx_stream(ctx))->flops; }

static dt_tensor *nothing(dt_ctx *ctx, dt_dtype dtype, dt_shape shape) {
    return dt_input(ctx, dtype, shape, NULL);
}

// ==== 1. Training state: measured, and by the formula ===========================================

/* `layers` square linear layers, each a block, trained with data parallelism. */
typedef struct state_case {
    int64_t width;
    /* steps 0: one forward and backward without an update */
    int layers, bias, stage, micros, steps;
    dt_dtype dtype;
    double held[3];  /* params, grads, optim of rank 0 after the backward */
    double elements; /* of all buckets, with padding */
    double sent;     /* by rank 0 in the last step */
} state_case;

static dt_tensor *state_layer(dt_tensor *x, void *user) {
    dt_tensor **p = (dt_tensor **)user;
    return dt_linear(x, p[0], p[1]);
}

static void state_backward(dt_ctx *ctx, const state_case *c) {
    dt_tensor *x = nothing(ctx, c->dtype, DT_SHAPE(1, c->width)), *y = x;
    for (int i = 0; i < c->layers; i++) {
        dt_tensor *p[2] = { dt_param_get(ctx, i * (1 + c->bias)),
            c->bias ? dt_param_get(ctx, 2 * i + 1) : NULL };
        y = dt_block_at(ctx, state_layer, y, p, (dt_block_desc){ .user_bytes = sizeof p });
    }
    dt_backward(dt_mse(y, x, 1));
}

static dt_status state_main(dt_ctx *ctx, void *user) {
    state_case *out = (state_case *)user, c = *out;
    for (int i = 0; i < c.layers; i++) {
        char scope[32];
        dt_param_desc d = { .dtype = c.dtype };
        snprintf(scope, sizeof scope, "h.%d.", i);
        dt_scope(ctx, scope);
        dt_param_at(ctx, "weight", DT_SHAPE(c.width, c.width), DT_ZEROS, d);
        if (c.bias) dt_param_at(ctx, "bias", DT_SHAPE(c.width), DT_ZEROS, d);
    }
    dt_scope(ctx, NULL);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = c.stage });
    for (int step = 0; step <= c.steps && dt_error(ctx) == DT_OK; step++) {
        size_t before = dt_comm_bytes(ctx, DT_AXIS_DP);
        for (int m = 0; m < c.micros; m++) {
            dt_micro(ctx, m, c.micros);
            state_backward(ctx, &c);
            dt_memory used = dt_memory_used(ctx);
            c.held[0] = (double)used.live[DT_MEM_PARAMS];
            c.held[1] = (double)used.live[DT_MEM_GRADS];
            c.held[2] = (double)used.live[DT_MEM_OPTIM];
            dt_reset(ctx);
        }
        if (c.steps) dt_zero_step(zero, 0.1);
        c.sent = (double)(dt_comm_bytes(ctx, DT_AXIS_DP) - before);
    }
    c.elements = 0;
    for (int u = 0; u < dt_bucket_count(ctx); u++)
        c.elements += (double)dt_bucket_get(ctx, u)->padded;
    if (dt_ctx_rank(ctx) == 0) *out = c;
    return dt_error(ctx);
}

/* Skips stages above HIGHEST_STAGE. Fails if dt_zero_make supports one, which would be untested. */
static void test_highest_stage(void) {
    for (int stage = HIGHEST_STAGE + 1; stage <= 3; stage++) {
        state_case c = { .width = 4, .layers = 1, .stage = stage, .micros = 1, .dtype = DT_F32 };
        dt_report report = { DT_OK, 0, "", 0 };
        char why[64];
        snprintf(why, sizeof why, "stage %d: dt_zero_make does not support it", stage);
        if (run(1, 1, state_main, &c, &report) == DT_ERR_UNSUPPORTED)
            check_skip(why);
        else
            CHECK_MSG(0, "dt_zero_make supports stage %d: raise HIGHEST_STAGE", stage);
    }
}

static dt_zero_formula_desc formula_of(const state_case *c, int ranks) {
    dt_zero_formula_desc d = {
        .elements = c->elements, .stage = c->stage, .ranks = ranks, .micros = c->micros
    };
    if (c->dtype == DT_BF16 || c->dtype == DT_F16) d.values = 2, d.grads = 4, d.state = 12;
    if (c->dtype == DT_F64) d.values = d.grads = 8, d.state = 16;
    return d; /* the defaults are those of f32 */
}

/* Runs a case and compares its memory with the formula, to the byte, and after steps its traffic
   too. Returns the bytes held. */
static double count_state(state_case *c, int ranks) {
    dry_run(ranks, state_main, c);
    dt_zero_bytes want = dt_zero_formula(formula_of(c, ranks));
    double held = c->held[0] + c->held[1] + c->held[2],
           real = (double)c->layers * (double)(c->width * c->width);
    if (c->bias) real += (double)c->layers * (double)c->width;
    CHECK_MSG(c->held[0] == want.params && c->held[1] == want.grads && c->held[2] == want.optim &&
                  held == want.total,
        "stage %d over %d ranks: %.0f + %.0f + %.0f bytes held, formula %.0f + %.0f + %.0f",
        c->stage, ranks, c->held[0], c->held[1], c->held[2], want.params, want.grads, want.optim);
    CHECK_MSG(c->elements >= real && c->elements - real < (double)c->layers * 1024 * ranks,
        "%.0f elements for %.0f", c->elements, real);
    if (c->steps)
        CHECK_MSG(c->sent == want.sent,
            "stage %d over %d ranks, %d micro-batches: %.0f bytes sent, formula "
            "%.0f",
            c->stage, ranks, c->micros, c->sent, want.sent);
    return held;
}

/* 000 and 001, the figure of the ZeRO paper: 7.5e9 parameters over 64 ranks. Each parameter has 2
   bytes of value, 2 of gradient and 12 of state: 120 GB, then 31.4, 16.6 and 1.9 GB at stages 1, 2
   and 3. dt accumulates gradients in f32, so with bf16 a gradient takes 4 bytes: 135, 46.4, 16.9
   and 2.1 GB. f32 without a master copy takes 16 bytes a parameter too: 120 GB. */
static void test_zero_figure(void) {
    static const double paper[4] = { 120, 31.4, 16.6, 1.9 }, digits[4] = { 0.5, 0.05, 0.05, 0.05 };
    static const double paper_exact[4] = { 120, 31.40625, 16.640625, 1.875 };
    static const double bf16[4] = { 135, 46.40625, 16.875, 2.109375 },
                        f32[4] = { 120, 60.9375, 31.40625, 1.875 };
    enum { N = 64 };
    for (int stage = 0; stage <= 3; stage++) {
        dt_zero_formula_desc d = {
            .elements = 7.5e9, .stage = stage, .ranks = N, .values = 2, .grads = 2, .state = 12
        };
        says("000, 001: 7.5B over 64, GB", dt_zero_formula(d).total / GB, paper[stage],
            digits[stage]);
        equals("7.5B over 64 to the byte", dt_zero_formula(d).total, paper_exact[stage] * GB);
        for (int narrow = 0; narrow < 2 && stage <= HIGHEST_STAGE; narrow++) {
            state_case c = { .width = 10000,
                .layers = 75,
                .stage = stage,
                .micros = 1,
                .dtype = narrow ? DT_BF16 : DT_F32 };
            double want = narrow ? bf16[stage] : f32[stage], held = count_state(&c, N);
            /* the padding adds 8e-5 */
            says(narrow ? "bf16, GB" : "f32, GB", held / GB, want, want * 1e-4);
        }
    }
}

/* 000: "ZeRO-1 is 4 times less memory, ZeRO-2 8 times, ZeRO-3 linear in the ranks; the traffic of 1
   and 2 is that of data parallelism". 4 and 8 are the limits for many ranks; over 64 ranks the
   factors are 3.8 and 7.2. Stage 3 sends 1.5 times as much. */
static void test_zero_factors(void) {
    static const double over_64[4] = { 1, 120 / 31.40625, 120 / 16.640625, 64 };
    static const double traffic[4] = { 1, 1, 1, 1.5 };
    double base[2] = { 0, 0 }, sent = 0;
    for (int stage = 0; stage <= 3; stage++) {
        static const int ranks[2] = { 64, 1 << 24 };
        for (int i = 0; i < 2; i++) {
            dt_zero_formula_desc d = { .elements = 7.5e9,
                .stage = stage,
                .ranks = ranks[i],
                .values = 2,
                .grads = 2,
                .state = 12 };
            dt_zero_bytes b = dt_zero_formula(d);
            if (stage == 0) base[i] = b.total;
            if (stage == 0 && i == 0) sent = b.sent;
            double factor = base[i] / b.total, limit = stage == 0   ? 1
                                                       : stage == 1 ? 4
                                                       : stage == 2 ? 8
                                                                    : ranks[i];
            if (i == 0)
                says("memory of stage 0 over this stage's, 64 ranks", factor, over_64[stage], 1e-9);
            else
                says("000: the factor for many ranks", factor, limit, limit * 1e-5);
            if (i == 0)
                equals("000: traffic over that of data parallelism", b.sent / sent, traffic[stage]);
        }
    }
}

/* The measured traffic of a full step, with the norm, the update and the gathers. 8 x 1,024^2
   elements, without padding. */
static void test_zero_traffic(void) {
    for (int stage = 0; stage <= HIGHEST_STAGE; stage++)
        for (int i = 0; i < 2 * 2 * 4; i++) {
            static const dt_dtype types[4] = { DT_F32, DT_F64, DT_BF16, DT_F16 };
            int ranks = i % 2 ? 8 : 2, micros = i / 2 % 2 ? 3 : 1;
            state_case c = { .width = 1024,
                .layers = 8,
                .stage = stage,
                .micros = micros,
                .steps = 1,
                .dtype = types[i / 4] };
            count_state(&c, ranks);
            equals("no padding", c.elements, 8 * 1048576.0);
        }
}

/* dt_zero_formula compared with results computed by hand: 1,000 elements, 4 ranks, 3 micro-batches,
   2 + 4 + 12 bytes. */
static void test_formula(void) {
    static const double sent[5] = { 6000, 4500, 10500, 18000, 10500 };
    static const double total[5] = { 18000, 9000, 6000, 4500, 4500 };
    for (int i = 0; i < 5; i++) {
        dt_zero_formula_desc d = { .elements = 1000,
            .stage = i < 4 ? i : 3,
            .ranks = 4,
            .micros = 3,
            .keep_gathered = i == 4,
            .values = 2,
            .grads = 4,
            .state = 12 };
        equals("bytes sent", dt_zero_formula(d).sent, sent[i]);
        equals("bytes held", dt_zero_formula(d).total, total[i]);
        d.ranks = 0;
        equals("one rank sends", dt_zero_formula(d).sent, 0);
        equals("one rank holds", dt_zero_formula(d).total, 18000);
    }
    dt_zero_formula_desc plain = { .elements = 10, .ranks = 2 };
    equals("the default type is f32", dt_zero_formula(plain).total, 160);
    equals("the default is one micro-batch", dt_zero_formula(plain).sent, 40);
    for (int i = 0; i < 5; i++) {
        dt_zero_formula_desc bad = plain;
        if (i < 2) bad.stage = i ? 4 : -1;
        if (i == 2) bad.elements = -1;
        if (i == 3) bad.ranks = -1;
        if (i == 4) bad.state = -8;
        CHECK(isnan(dt_zero_formula(bad).total) && isnan(dt_zero_formula(bad).sent));
    }
}

/* 001's listing of ZeroRedundancyOptimizer: 20 linear layers of 2000 x 2000 with biases, Adam, two
   ranks; 001 prints no peaks. 80.04 million parameters take 320.16 MB of values, as much of
   gradients, and 640.32 MB of state, which stage 1 halves. */
static void test_redundancy(void) {
    for (int stage = 0; stage <= 1; stage++) {
        state_case c = { .width = 2000,
            .layers = 20,
            .bias = 1,
            .stage = stage,
            .micros = 1,
            .steps = 1,
            .dtype = DT_F32 };
        double pad = 20 * 4 * 2048.0; /* an upper bound: 20 buckets of two shards */
        count_state(&c, 2);
        says("001: values", c.held[0], 320.16e6, pad);
        says("001: gradients", c.held[1], 320.16e6, pad);
        says("001: state", c.held[2], stage ? 320.16e6 : 640.32e6, 2 * pad);
    }
}

/* 000: "training needs 3 to 4 times the memory of inference". Even without activations the factor
   is 8 with 16-bit gradients (16 bytes to 2), and 9 in dt, with f32 gradients: 13e9 parameters take
   26 GB for inference, and 208 or 234 GB for training. */
static void test_training_to_inference(void) {
    dt_zero_formula_desc d = { .elements = 13e9, .values = 2, .grads = 2, .state = 12 };
    state_case c = { .width = 10000, .layers = 130, .micros = 1, .dtype = DT_BF16 };
    dt_zero_bytes b = dt_zero_formula(d);
    equals("not 3 to 4 times", b.total / b.params, 8);
    equals("measured, not 3 to 4 times", count_state(&c, 1) / c.held[0], 9);
    says("13B as bf16, GB", c.held[0] / GB, 26, 0.01);
}

// ==== 2. Parameters =============================================================================

typedef struct count_case {
    int64_t rows, columns;
    int n, sharded;
    dt_dtype dtype;
    double bytes;
} count_case;

/* n parameters (rows, columns). sharded: along the rows over all ranks. */
static dt_status count_main(dt_ctx *ctx, void *user) {
    count_case *c = (count_case *)user;
    for (int i = 0; i < c->n; i++) {
        char name[16];
        dt_param_desc d = { .dtype = c->dtype };
        if (c->sharded) d.shards[0] = (dt_shard_spec){ dt_world(ctx), 0 };
        snprintf(name, sizeof name, "w%d", i);
        dt_param_at(ctx, name, DT_SHAPE(c->rows, c->columns), DT_ZEROS, d);
    }
    dt_buckets_make(ctx, (dt_buckets_desc){ 0 });
    if (dt_ctx_rank(ctx) == 0) c->bytes = (double)dt_memory_used(ctx).live[DT_MEM_PARAMS];
    return dt_error(ctx);
}

/* 001 and 003: 175e9 parameters take 700 GB at 32 bits; 000 and 003: 350 GB at 16 bits. In 001's
   "175*4%10^9" the % means a product. 003: "an H100 of 80 GB cannot hold it". With tensor
   parallelism eight H100 can, and four cannot. */
static void test_175_billion(void) {
    count_case f32 = { 1000000, 1000, 175, 0, DT_F32, 0 }, f16 = f32, four, eight;
    f16.dtype = DT_F16;
    four = eight = f16;
    four.sharded = eight.sharded = 1;
    dry_run(1, count_main, &f32);
    dry_run(1, count_main, &f16);
    dry_run(4, count_main, &four);
    dry_run(8, count_main, &eight);
    equals("001, 003: 175B in f32", f32.bytes, 700 * GB);
    equals("000, 003: 175B in f16", f16.bytes, 350 * GB);
    equals("over 4", four.bytes, 87.5 * GB);
    equals("over 8", eight.bytes, 43.75 * GB);
    CHECK(f16.bytes > 80 * GB && four.bytes > 80 * GB && eight.bytes < 80 * GB);
}

static const gpt_config gpt_3 = { .layers = 96,
    .width = 12288,
    .heads = 96,
    .kv_heads = 96,
    .ffn = 4 * 12288,
    .seq = 2048,
    .vocab = 50257,
    .tied = 1,
    .dtype = DT_F16,
    .arch = GPT_GPT2 };
static const gpt_config llama_13b = { .layers = 40,
    .width = 5120,
    .heads = 40,
    .kv_heads = 40,
    .ffn = 13824,
    .seq = 4096,
    .vocab = 32000,
    .dtype = DT_F16,
    .arch = GPT_LLAMA };
static const gpt_config llama_65b = { .layers = 80,
    .width = 8192,
    .heads = 64,
    .kv_heads = 64,
    .ffn = 22016,
    .seq = 2048,
    .vocab = 32000,
    .dtype = DT_F16,
    .arch = GPT_LLAMA };
static const gpt_config bloom = { .layers = 70,
    .width = 14336,
    .heads = 112,
    .kv_heads = 112,
    .ffn = 4 * 14336,
    .seq = 2048,
    .vocab = 250880,
    .tied = 1,
    .dtype = DT_BF16,
    .arch = GPT_GPT2 };

typedef struct model_case {
    gpt_config c;
    int tp;
    double bytes, elements;
} model_case;

static dt_status model_main(dt_ctx *ctx, void *user) {
    model_case *k = (model_case *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = k->tp });
    gpt_config c = k->c;
    c.tp = mesh.tp;
    gpt_register(ctx, c);
    dt_buckets_make(ctx, (dt_buckets_desc){ 0 });
    double elements = 0;
    for (int u = 0; u < dt_bucket_count(ctx); u++) elements += (double)dt_bucket_get(ctx, u)->count;
    if (dt_ctx_rank(ctx) != 0) return dt_error(ctx);
    k->elements = elements;
    k->bytes = (double)dt_memory_used(ctx).live[DT_MEM_PARAMS];
    return dt_error(ctx);
}

static double model_bytes(gpt_config c, int tp) {
    model_case k = { c, tp, 0, 0 };
    dry_run(tp, model_main, &k);
    equals("a model's bytes", k.bytes, 2 * k.elements);
    if (tp == 1) equals("a model's parameters", k.elements, (double)gpt_param_count(c));
    return k.bytes;
}

/* 000: GPT-3 with 96 layers, width 12288 and 96 heads has 175B parameters in 350 GB; exactly
   174.6e9 in 349.2 GB. 000: "the file of LLaMA2-13b is about 27 GB, 2 GB a billion and a little
   more": 13.016e9 parameters, 26.03 GB. 000: "four V100 find it hard to run a model of 65b, and
   cannot train it": 130.6 GB are 32.6 GB on each of 4 cards with 32 GiB = 34.4 GB; training takes
   1,175 GB. 001: BLOOM has 176B. Unlike gpt.h's model it has no position embedding, but a norm
   after the embedding: 176,247,271,424 parameters. */
static void test_models(void) {
    says("000: GPT-3, GB", model_bytes(gpt_3, 1) / GB, 350, 1);
    says("GPT-3, 1e9 parameters", (double)gpt_param_count(gpt_3) / 1e9, 174.6, 0.05);
    says("LLaMA2-13b, GB, where 000 says 27", model_bytes(llama_13b, 1) / GB, 26.03, 0.005);
    double positions = 2048 * 14336, norm = 2 * 14336,
           elements = model_bytes(bloom, 1) / 2 - positions + norm;
    says("001: BLOOM, 1e9 parameters", elements / 1e9, 176, 0.5);
    equals("BLOOM's parameters", elements, 176247271424.0);
    double card = model_bytes(llama_65b, 4), train = 18 * (double)gpt_param_count(llama_65b);
    says("LLaMA-65b over 4 cards, GB", card / GB, 32.64, 0.005);
    CHECK(
        card < 32 * 1024 * MIB && card > 0.94 * 32 * 1024 * MIB && train > 8 * 4 * 32 * 1024 * MIB);
}

typedef struct embedding_case {
    int tp;
    double params, grads;
} embedding_case;

static dt_status embedding_main(dt_ctx *ctx, void *user) {
    embedding_case *k = (embedding_case *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = k->tp });
    dt_param_desc d = { .shards = { { mesh.tp, 0 } } };
    dt_tensor *table = dt_param_at(ctx, "wte.weight", DT_SHAPE(64000, 5120), DT_ZEROS, d);
    dt_tensor *ids = nothing(ctx, DT_I32, DT_SHAPE(1, 8));
    dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh });
    dt_tensor *y = dt_vocab_embedding(table, ids, mesh.tp, DT_REPLICATE);
    dt_backward(dt_mse(y, nothing(ctx, DT_F32, DT_SHAPE(1, 8, 5120)), 1));
    if (dt_ctx_rank(ctx) == 0) {
        k->params = (double)dt_memory_used(ctx).live[DT_MEM_PARAMS];
        k->grads = (double)dt_memory_used(ctx).live[DT_MEM_GRADS];
    }
    return dt_error(ctx);
}

/* 003: an f32 embedding of 64000 words and width 5120 takes 64000 x 5120 x 4 / 1024 / 1024 = 1250
   MB, its gradient 1250 MB more, nearly 2.5 GB in all; sharded along the words, each device stores
   a part. These MB are of 2^20 bytes: 2,500 of them are 2.44 GiB, or 2.62 GB. */
static void test_embedding(void) {
    for (int tp = 1; tp <= 8; tp *= 2) {
        embedding_case k = { tp, 0, 0 };
        dry_run(tp, embedding_main, &k);
        equals("003: the table, MiB", k.params / MIB, 1250.0 / tp);
        equals("003: its gradient, MiB", k.grads / MIB, 1250.0 / tp);
        if (tp == 1) says("003: both, GiB", (k.params + k.grads) / MIB / 1024, 2.5, 0.06);
    }
}

// ==== 3. Activations ============================================================================

/* A layer that keeps the activations that 000 counts, after V. Korthikanti et al.,
   arXiv:2205.05198, table 2: the softmax of the scores, the masks of three dropouts at a byte an
   element, and the scores after dropout. dt's layer keeps neither scores nor masks, so the test has
   its own ops. The layer is no dt_block, which would not keep the outputs of norms. */
typedef struct full_case {
    int64_t B, T, C, H;
    int layers;
    double acts;
    dt_tensor *p[8]; /* q, k, v, proj, fc, proj of the second half, gain, bias */
} full_case;

static dt_status no_back(dt_node *n) {
    (void)n;
    return DT_OK;
}

/* dt has no type of one byte, so a mask has half as many elements of two bytes. */
static dt_tensor *full_mask(dt_ctx *ctx, dt_shape shape) {
    shape.d[shape.nd - 1] /= 2;
    return dt_new(ctx, DT_F16, shape);
}

static dt_tensor *full_attention(const full_case *c, dt_tensor *q, dt_tensor *k, dt_tensor *v) {
    dt_shape scores = DT_SHAPE(c->B, c->H, c->T, c->T);
    dt_tensor *softmax, *mask, *dropped, *out;
    if (!q || !k || !v) return NULL;
    softmax = dt_new(q->ctx, DT_F16, scores);
    mask = full_mask(q->ctx, scores);
    dropped = dt_new(q->ctx, DT_F16, scores);
    out = dt_new(q->ctx, DT_F16, DT_SHAPE(c->B, c->T, c->C));
    if (!softmax || !mask || !dropped) return NULL;
    return dt_record(
        out, (dt_record_desc){ .name = "full attention", .in = { q, k, v }, .backward = no_back });
}

static dt_tensor *full_branch(dt_tensor *x, dt_tensor *h, dt_tensor *w) {
    return x && full_mask(x->ctx, x->shape)
               ? dt_linear_at(h, w, NULL, (dt_linear_desc){ .residual = x })
               : NULL;
}

static dt_tensor *full_layer(dt_tensor *x, void *user) {
    const full_case *c = (const full_case *)user;
    dt_tensor *n = dt_layernorm(x, c->p[6], c->p[7], 0);
    dt_tensor *q = dt_linear(n, c->p[0], NULL), *k = dt_linear(n, c->p[1], NULL),
              *v = dt_linear(n, c->p[2], NULL);
    x = full_branch(x, full_attention(c, q, k, v), c->p[3]);
    n = dt_layernorm(x, c->p[6], c->p[7], 0);
    dt_linear_desc gelu = { .activation = DT_ACT_GELU };
    return full_branch(x, dt_linear_at(n, c->p[4], NULL, gelu), c->p[5]);
}

static dt_status full_main(dt_ctx *ctx, void *user) {
    full_case *out = (full_case *)user, c = *out;
    dt_param_desc d = { .dtype = DT_F16 };
    int64_t C = c.C, F = 4 * C;
    for (int i = 0; i < 8; i++) {
        char name[8];
        dt_shape shape = i < 4    ? DT_SHAPE(C, C)
                         : i == 4 ? DT_SHAPE(F, C)
                         : i == 5 ? DT_SHAPE(C, F)
                                  : DT_SHAPE(C);
        snprintf(name, sizeof name, "p%d", i);
        c.p[i] = dt_param_at(ctx, name, shape, DT_ZEROS, d);
    }
    for (int pass = 0; pass < 2; pass++) { /* arenas have their final size after the first pass */
        dt_reset(ctx);
        dt_tensor *x = nothing(ctx, DT_F16, DT_SHAPE(c.B, c.T, c.C));
        for (int i = 0; i < c.layers; i++) x = full_layer(x, &c);
    }
    out->acts = (double)dt_memory_used(ctx).live[DT_MEM_ACTS];
    return dt_error(ctx);
}

/* 000: the activations of GPT-3 take 96 (34 s b h + 5 a s^2 b) bytes: 275 GB with b = 1, 0.79 times
   its parameters; 17.6 TB with b = 64, 50 times; 35.3 TB with b = 128, 101 times. A layer has
   exactly these bytes plus 16 bytes a token for mean and 1 / deviation of two norms. The model has
   the input in addition. */
static void test_activations(void) {
    static const struct {
        double b, bytes, digits, times, times_digits;
    } said[3] = { { 1, 275, 0.5, 0.79, 0.005 }, { 64, 17600, 50, 50, 0.5 },
        { 128, 35300, 50, 101, 0.5 } };
    const double s = 2048, h = 12288, a = 96;
    for (int i = 0; i < 3 && !UNDER_ASAN; i++) {
        full_case c = { .B = (int64_t)said[i].b, .T = 2048, .C = 12288, .H = 96, .layers = 96 },
                  less = c;
        double b = said[i].b, layer = 34 * s * b * h + 5 * a * s * s * b, model = 2 * 175e9;
        less.layers = 95;
        dry_run(1, full_main, &c);
        dry_run(1, full_main, &less);
        equals("a layer of GPT-3 as 000 counts it", c.acts - less.acts, layer + 16 * s * b);
        says("000: activations of GPT-3, GB", c.acts / GB, said[i].bytes, said[i].digits);
        says("000: activations over parameters", c.acts / model, said[i].times,
            said[i].times_digits);
    }
}

typedef struct layer_case {
    gpt_config c;
    int tp, B;
    double acts, peak, forward, backward; /* bytes after the forward and peak bytes; flops */
    double sent[2];                       /* along tp, in forward and backward */
} layer_case;

static dt_status layer_main(dt_ctx *ctx, void *user) {
    layer_case *out = (layer_case *)user, k = *out;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = k.tp });
    gpt_config c = k.c;
    c.tp = mesh.tp;
    gpt m = gpt_register(ctx, c);
    /* arenas have their final size after the first pass */
    for (int pass = 0; pass < 3 && dt_error(ctx) == DT_OK; pass++) {
        dt_memory_reset_peak(ctx);
        dt_shape shape = DT_SHAPE(k.B, c.seq);
        dt_tensor *ids = nothing(ctx, DT_I32, shape), *labels = nothing(ctx, DT_I32, shape);
        double flops = dry_flops(ctx), sent = (double)dt_comm_bytes(ctx, DT_AXIS_TP);
        dt_tensor *loss = gpt_loss(&m, ids, labels, 1);
        if (pass == 1) k.acts = (double)dt_memory_used(ctx).live[DT_MEM_ACTS];
        k.forward = dry_flops(ctx) - flops;
        k.sent[0] = (double)dt_comm_bytes(ctx, DT_AXIS_TP) - sent;
        if (pass == 2) dt_backward(loss); /* not before pass 2: acts must not count its arenas */
        k.backward = dry_flops(ctx) - flops - k.forward;
        k.sent[1] = (double)dt_comm_bytes(ctx, DT_AXIS_TP) - sent - k.sent[0];
        k.peak = (double)dt_memory_used(ctx).peak[DT_MEM_ACTS];
        dt_reset(ctx);
    }
    if (dt_ctx_rank(ctx) == 0) *out = k;
    return dt_error(ctx);
}

/* The difference that one more layer makes. */
static layer_case one_layer(gpt_config c, int tp, int B, int layers) {
    layer_case less = { .c = c, .tp = tp, .B = B }, more;
    less.c.layers = layers;
    more = less;
    more.c.layers++;
    dry_run(tp, layer_main, &less);
    dry_run(tp, layer_main, &more);
    more.acts -= less.acts;
    more.peak -= less.peak;
    more.forward -= less.forward;
    more.backward -= less.backward;
    for (int i = 0; i < 2; i++) more.sent[i] -= less.sent[i];
    return more;
}

/* 000: "the activations far exceed the parameters" is true if scores are kept. dt's layer keeps
   28 s b h bytes, without masks, scores and outputs of norms, plus per token 4 bytes of log-sum-exp
   for each head and 16 of norms: 68 GB instead of 275. 002 on TP alone and TP with SP: TP alone keeps full (b, s, h)
   tensors at several points; with SP every tensor is sharded. Both send the same bytes forward: 2
   all-reduces a layer, or 2 all-gathers and 2 reduce-scatters. 002's "and backward" is true if
   gathered tensors are kept; dt gathers them again, as Megatron does, with 2 more all-gathers, and
   keeps 1/t. */
static void test_layer(void) {
    const double s = 2048, h = 12288, a = 96, S = 2 * s * h;
    for (int i = 0; i < 5 && !UNDER_ASAN; i++) {
        gpt_config c = gpt_3;
        int tp = i == 0 ? 1 : i < 3 ? 4 : 8;
        double t = tp, all_reduce = 2 * S * (t - 1) / t;
        c.sp = i > 0 && i % 2 == 0;
        layer_case k = one_layer(c, tp, 1, 2);
        double full = (4 * h + 16) * s, sharded = (24 * h + 4 * a) * s;
        equals("a layer of GPT-3 keeps", k.acts, (c.sp ? full / t : full) + sharded / t);
        if (tp == 1) says("all layers, GB", 96 * k.acts / GB, 67.7, 0.05);
        equals("002: forward, 2 all-reduces' bytes", k.sent[0], tp > 1 ? 2 * all_reduce : 0);
        equals("backward, bytes", k.sent[1], tp == 1 ? 0 : c.sp ? 3 * all_reduce : 2 * all_reduce);
    }
}

/* 002: "a simple assumption: the backward takes twice the forward". That is true of matrix
   products. Attention's backward recomputes the scores, 5 products to 2, so for GPT-3 the factor is
   2.01. 000: recomputation "costs one more forward". */
static void test_work(void) {
    const double s = 2048, h = 12288;
    gpt_config c = gpt_3;
    layer_case plain = one_layer(c, 1, 1, 2);
    c.recompute = GPT_RECOMPUTE_FULL;
    layer_case again = one_layer(c, 1, 1, 2);
    equals("a layer's forward, 24 s h^2 (1 + s/6h)", plain.forward, 24 * s * h * h + 4 * s * s * h);
    equals("a layer's backward", plain.backward, 48 * s * h * h + 10 * s * s * h);
    says("002: the backward over the forward", plain.backward / plain.forward, 2, 0.02);
    equals("000: one more forward", again.backward, plain.backward + plain.forward);
    equals("the forward of recomputation", again.forward, plain.forward);
}

/* 000: recomputation takes activations "from O(n) to O(n)", where the second should be O(sqrt(n)).
   With blocks of k layers, n/k outputs and the activations of k layers are kept. With k = sqrt(n)
   the peak is linear in sqrt(n); without recomputation, and with blocks of one layer, in n. */
static void test_root(void) {
    static const int layers[3] = { 16, 64, 144 }, roots[3] = { 4, 8, 12 };
    double peak[3][3]; /* without, blocks of one, blocks of sqrt(n) */
    for (int i = 0; i < 3 * 3 && !UNDER_ASAN; i++) {
        gpt_config c = gpt_3;
        c.width = c.ffn = 1024;
        c.heads = c.kv_heads = 8;
        c.vocab = 64;
        c.layers = layers[i % 3];
        c.recompute = i < 3 ? GPT_RECOMPUTE_NONE : GPT_RECOMPUTE_FULL;
        c.recompute_every = i < 6 ? 1 : roots[i % 3];
        layer_case k = { .c = c, .tp = 1, .B = 1 };
        dry_run(1, layer_main, &k);
        peak[i / 3][i % 3] = k.peak;
    }
    for (int i = 0; i < 3 && !UNDER_ASAN; i++) {
        double first = peak[i][1] - peak[i][0], second = peak[i][2] - peak[i][1],
               line = i < 2 ? 80.0 / 48 : 1;
        CHECK_MSG(fabs(second / first - line) < 0.01,
            "way %d, layers 16, 64, 144: %.0f, %.0f, %.0f bytes", i, peak[i][0], peak[i][1],
            peak[i][2]);
    }
    if (!UNDER_ASAN) CHECK(peak[2][2] < peak[0][2] / 4 && peak[2][2] < peak[1][2]);
}

// ==== 4. Layouts ================================================================================

typedef struct mesh_case {
    dt_mesh_desc want;
    int node;
    int wrong, ranks_of_replica[64];
} mesh_case;

static dt_status mesh_main(dt_ctx *ctx, void *user) {
    mesh_case *k = (mesh_case *)user;
    dt_mesh m = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = k->want.tp, .pp = k->want.pp });
    int wrong = m.sizes.dp != k->want.dp || m.replicas != k->want.dp ||
                dt_comm_size(m.tp) != k->want.tp || dt_comm_size(m.pp) != k->want.pp ||
                dt_comm_size(m.data) != k->want.dp;
    for (int i = 0; i < dt_comm_size(m.tp); i++) /* tensor parallelism stays in a server */
        wrong |= dt_comm_world_rank(m.tp, i) / k->node != dt_ctx_rank(ctx) / k->node;
    __atomic_fetch_add(&k->wrong, wrong, __ATOMIC_SEQ_CST);
    if (m.replica < 64) __atomic_fetch_add(&k->ranks_of_replica[m.replica], 1, __ATOMIC_SEQ_CST);
    return dt_error(ctx);
}

/* 001 and 003: BLOOM on 48 servers of 8: 384 devices; 12 stages, each sharded over 4 devices of a
   server. "The cluster is divided into groups of 48 for data parallelism" means 8 replicas of 48
   devices, not 48 replicas. 001: 32 devices are 4 stages x tensor parallelism 4 x 2 replicas. */
static void test_meshes(void) {
    static const dt_mesh_desc want[2] = { { .dp = 8, .tp = 4, .pp = 12 },
        { .dp = 2, .tp = 4, .pp = 4 } };
    for (int i = 0; i < 2; i++) {
        int ranks = i ? 32 : 48 * 8;
        mesh_case k = { .want = want[i], .node = 8 };
        char why[200];
        dt_mesh_desc sizes = { .tp = want[i].tp, .pp = want[i].pp };
        CHECK(dt_mesh_resolve(&sizes, ranks, why, sizeof why) == DT_OK && sizes.dp == want[i].dp &&
              sizes.ep == 1);
        run_well(ranks, 0, mesh_main, &k);
        CHECK_MSG(k.wrong == 0, "%d of %d ranks have another mesh", k.wrong, ranks);
        for (int r = 0; r < 64; r++)
            CHECK(k.ranks_of_replica[r] == (r < want[i].dp ? ranks / want[i].dp : 0));
    }
    dt_mesh_desc wrong = { .dp = 48, .tp = 4, .pp = 12 };
    char why[200];
    CHECK(dt_mesh_resolve(&wrong, 384, why, sizeof why) == DT_ERR_ARG);
}

static dt_status kv_main(dt_ctx *ctx, void *user) {
    dt_comm *tp = dt_world(ctx);
    int n = dt_comm_size(tp), copies = n > 8 ? n / 8 : 1;
    dt_kv_groups kv = dt_kv_split(ctx, tp, 8);
    (void)user;
    CHECK(kv.heads == (n < 8 ? 8 / n : 1) && dt_comm_size(kv.replica_group) == copies &&
          dt_comm_size(kv.shard_group) == n / copies);
    return dt_error(ctx);
}

/* 002: Llama-3 8B has 8 key-value heads. Up to tp 8 no head is replicated; at 16 two ranks share
   each head. */
static void test_kv(void) {
    for (int tp = 4; tp <= 16; tp *= 2) run_well(tp, 0, kv_main, NULL);
}

static dt_status slice_main(dt_ctx *ctx, void *user) {
    (void)user;
    for (int dim = 0; dim < 2; dim++) {
        dt_shard_spec shards[3] = { { dt_world(ctx), dim }, { NULL, 0 }, { NULL, 0 } };
        dt_local_slice slice = dt_local_slice_of(DT_SHAPE(888, 12), shards);
        int r = dt_ctx_rank(ctx);
        CHECK(slice.n[0] == (dim ? 888 : 222) && slice.n[1] == (dim ? 3 : 12) &&
              slice.lo[dim] == r * (dim ? 3 : 222));
    }
    return dt_error(ctx);
}

/* 001: a tensor of 888 x 12 on 4 devices, sharded along its rows or its columns. (As the weight of
   y = x w^T the first is column-parallel; 001 names the dimension of the tensor.) */
static void test_slices(void) { run_well(4, 0, slice_main, NULL); }

/* Sums over the ranks by all-reduce, by reduce-scatter + all-gather, and by reduce + broadcast. */
static dt_status sums_main(dt_ctx *ctx, void *user) {
    enum { N = 8, PER = 6, ALL = N * PER };
    dt_mesh m = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = N });
    double in[ALL], a[ALL], b[ALL], c[ALL];
    size_t at[4];
    (void)user;
    for (int i = 0; i < ALL; i++) in[i] = (double)(dt_ctx_rank(ctx) * 7 + i * i);
    at[0] = dt_comm_bytes(ctx, DT_AXIS_DP);
    dt_all_reduce(m.dp, in, a, ALL, DT_F64, DT_SUM);
    at[1] = dt_comm_bytes(ctx, DT_AXIS_DP);
    dt_reduce_scatter(m.dp, in, c, PER, DT_F64, DT_SUM);
    dt_all_gather(m.dp, c, b, PER, DT_F64);
    at[2] = dt_comm_bytes(ctx, DT_AXIS_DP);
    dt_reduce(m.dp, in, c, ALL, DT_F64, DT_SUM, 0);
    dt_broadcast(m.dp, c, ALL, DT_F64, 0);
    at[3] = dt_comm_bytes(ctx, DT_AXIS_DP);
    CHECK(memcmp(a, b, sizeof a) == 0 && memcmp(a, c, sizeof a) == 0 && a[1] == 7 * 28 + 8);
    CHECK(at[1] - at[0] == at[2] - at[1] && at[1] - at[0] == 2 * sizeof in / N * (N - 1));
    CHECK(at[3] - at[2] == sizeof in);
    return dt_error(ctx);
}

/* 001: an all-reduce is a reduce and a broadcast; 002: it is a reduce-scatter and an all-gather,
   and sends the same bytes. (001's "local gradients are broadcast" means this all-reduce.) */
static void test_sums(void) { run_well(8, 0, sums_main, NULL); }

// ==== 5. Batches and learning rate ==============================================================

/* The tokens of a step, counted over the sequences of all replicas; each must occur once. */
static double tokens_of(int64_t batch, int micro, int replicas, int64_t T) {
    dt_data_order order = { 4 * batch, batch, micro, replicas, 0 };
    char *seen = (char *)calloc((size_t)(4 * batch), 1);
    double n = 0;
    for (int j = 0; j < batch / micro / replicas; j++)
        for (int r = 0; r < replicas; r++)
            for (int i = 0; i < micro; i++) {
                int64_t s = dt_data_order_sequence(order, 2, j, r, i);
                n += s >= batch && s < 2 * batch && !seen[s];
                seen[s] = 1;
            }
    free(seen);
    return n * (double)T;
}

/* 002: with sequences of 4096 tokens a global batch of 1M tokens has 256 sequences, whatever the
   number of replicas, micro-batches and their size. 003: LLaMA-2's batch of 4M tokens has 1,024
   sequences of 4096. */
static void test_batches(void) {
    static const int how[4][2] = { { 1, 1 }, { 2, 8 }, { 4, 64 }, { 1, 256 } };
    for (int i = 0; i < 4; i++) {
        equals("002: 1M tokens", tokens_of(256, how[i][0], how[i][1], 4096), 1048576);
        equals("003: 4M tokens", tokens_of(1024, how[i][0], how[i][1], 4096), 4194304);
    }
}

/* 003: warm-up over 0.1% to 0.5% of the training to a peak rate of 5e-5 to 1e-4, then a cosine
   decay to 10% of the peak. */
static void test_rates(void) {
    dt_lr_desc d = { 1e-4, DT_LR_COSINE, 500, 100000, 0.1, 0 };
    says("003: halfway through the warm-up", dt_lr(d, 250), 5e-5, 1e-18);
    says("003: the peak rate, after 0.5%", dt_lr(d, 500), 1e-4, 1e-18);
    says("halfway through the cosine", dt_lr(d, (500 + 100000) / 2), 5.5e-5, 1e-18);
    says("003: the end", dt_lr(d, 100000), 1e-5, 1e-18);
}

int main(void) {
    test_highest_stage();
    test_formula();
    test_zero_figure();
    test_zero_factors();
    test_zero_traffic();
    test_redundancy();
    test_training_to_inference();
    test_175_billion();
    test_models();
    test_embedding();
    test_activations();
    test_layer();
    test_work();
    test_root();
    test_meshes();
    test_kv();
    test_slices();
    test_sums();
    test_batches();
    test_rates();
    return check_done("test_seeds");
}
