/* test_plan.c - the planner's closed form (dt_plan_estimate)

       parts        seconds and bytes are the sums of their parts
       better       a faster link or GPU is never slower, over random layouts; more memory is never
                    worse
       formulas     bubbles, ZeRO stages and collectives against their formulas
       dry run      parameters and activations of the GPT against gpt_param_count and a dry run
       published    Megatron-LM's 18 rows (tests/plan/megatron_a100.csv), Figure 1 of
                    arXiv:2205.05198, GPU-hours of LLaMA and Llama 2
       stored       predictions of nanotron's rows, so that no change goes unseen
       search       dt_plan_search against a search over all numbers, its callbacks, changes that
                    make a layout fit, monotonicity
       refused      impossible sizes

   test_plan [FOLDER]     the folder of the published rows, tests/plan */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "tests/support/check.h"

static const char *folder = "tests/plan";
static const double GIB = 1073741824;

// ==== Helpers ===================================================================================

static dt_plan_cost cost_of(dt_plan_model m, dt_layout l, dt_plan_profile q) {
    dt_plan_cost c;
    CHECK(dt_plan_estimate(&m, &l, &q, &c) == DT_OK);
    return c;
}

static void near(const char *what, double got, double want, double share) {
    CHECK_MSG(fabs(got - want) <= share * fabs(want), "%s: %.9g, want %.9g", what, got, want);
}

static uint32_t random_state = 20261129;
static int below(int n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (uint32_t)n);
}

static const dt_plan_model models[] = {
    { 16, 2048, 32, 32, 8192, 1, 131072, 4096, 1, 0, 0, 0 },
    { 32, 4096, 32, 8, 14336, 1, 131072, 4096, 0, 0, 0, 0 },
    { 96, 12288, 96, 96, 49152, 0, 51200, 2048, 1, 0, 0, 0 },
    { 32, 4096, 32, 8, 14336, 1, 32000, 4096, 0, 8, 2, 1 },
    { 24, 2048, 16, 16, 1408, 1, 102400, 4096, 0, 64, 6, 2 },
};
enum { MODELS = sizeof models / sizeof *models };

static dt_plan_model a_model(void) { return models[below(MODELS)]; }
static dt_layout a_layout(void) {
    dt_layout l = { .mesh = { .dp = 1 << below(6),
                        .tp = 1 << below(6),
                        .cp = 1 << below(3),
                        .pp = 1 << below(5),
                        .ep = 1 << below(3) },
        .zero = below(4),
        .recompute = below(3),
        .schedule = below(DT_SCHEDULES),
        .chunks = below(4),
        .micro_batch = 1 << below(4),
        .accum = 1 << below(6),
        .sp = below(2) };
    return l;
}

// ==== Parts =====================================================================================

static void test_parts(void) {
    int n;
    const dt_plan_profile *q = dt_plan_profiles(&n);
    CHECK(n >= 2 && dt_plan_profiles(NULL) == q);
    CHECK(dt_plan_profile_of("h100-nanotron") == q && !dt_plan_profile_of("h100"));
    CHECK(!dt_plan_profile_of(NULL) &&
          !strcmp(dt_plan_profile_of("a100-megatron")->name, "a100-megatron"));
    for (int i = 0; i < 4000; i++) {
        dt_layout l = a_layout();
        dt_plan_cost c = cost_of(a_model(), l, q[i % n]);
        double s = c.compute + c.bubble + c.tp + c.cp + c.ep + c.pp + c.dp + c.optimizer;
        near("seconds", s, c.seconds, 1e-12);
        near("bytes", c.params + c.grads + c.optim + c.acts + c.logits + c.base, c.bytes, 1e-12);
        const double parts[] = { c.compute, c.bubble, c.tp, c.cp, c.ep, c.pp, c.dp, c.optimizer,
            c.params, c.grads, c.optim, c.acts, c.logits, c.base };
        for (size_t k = 0; k < sizeof parts / sizeof *parts; k++)
            CHECK_MSG(parts[k] >= 0 && parts[k] < 1e18, "part %zu: %g", k, parts[k]);
        CHECK(c.compute > 0 && c.mfu > 0 && c.mfu < 1 && c.tokens_per_s_gpu > 0);
        CHECK((c.tp > 0) == (l.mesh.tp > 1) && (l.mesh.cp > 1 || c.cp == 0));
        CHECK((c.pp > 0) == (l.mesh.pp > 1) || q[i % n].partition > 0);
    }
}

// ==== Better is never worse =====================================================================

static void test_better(void) {
    /* more of a rate, less of a latency */
    static const struct {
        const char *name;
        size_t at;
        double factor;
    } better[] = {
#define FIELD(f, factor) { #f, offsetof(dt_plan_profile, f), factor }
        FIELD(peak, 2), FIELD(hbm, 2), FIELD(product, 1.3), FIELD(attention, 2), FIELD(tp_near, 2),
        FIELD(tp_far, 2), FIELD(dp_near, 2), FIELD(dp_far, 2), FIELD(dp_one_way, 1.3),
        FIELD(dp_overlap, 1.5), FIELD(pp_link, 2), FIELD(dp_far_decay, .5),
        FIELD(tp_far_latency, .5), FIELD(pp_latency, .5), FIELD(gather_latency, .5),
        FIELD(host_layer, .5), FIELD(host_tp, .5), FIELD(host_head_tp, .5), FIELD(host_pp_tp, .5),
        FIELD(host_step, .5), FIELD(jitter, .5), FIELD(product_tokens, .5),
        FIELD(product_width, .5), FIELD(optimizer_layer, .5), FIELD(optimizer_traffic, .5),
        FIELD(layer_traffic, .5), FIELD(logit_traffic, .5)
#undef FIELD
    };
    enum { FIELDS = sizeof better / sizeof *better };
    int n, faster[FIELDS] = { 0 };
    const dt_plan_profile *profiles = dt_plan_profiles(&n);
    for (int i = 0; i < 3000; i++) {
        dt_plan_model m = a_model();
        dt_layout l = a_layout();
        dt_plan_profile q = profiles[i % n];
        dt_plan_cost before = cost_of(m, l, q);
        for (int k = 0; k < FIELDS; k++) {
            dt_plan_profile r = q;
            *(double *)((char *)&r + better[k].at) *= better[k].factor;
            double after = cost_of(m, l, r).seconds;
            CHECK_MSG(after <= before.seconds * (1 + 1e-12), "%s x %g: %.12g s after %.12g s",
                better[k].name, better[k].factor, after, before.seconds);
            faster[k] += after < before.seconds * (1 - 1e-6);
        }
        /* more memory: the same need, or a little more that is given up if memory is short */
        dt_plan_profile r = q;
        r.memory *= 2;
        dt_plan_cost after = cost_of(m, l, r);
        CHECK(after.seconds == before.seconds);
        CHECK(before.bytes > q.memory || after.bytes <= r.memory);
    }
    for (int k = 0; k < FIELDS; k++) CHECK_MSG(faster[k] > 0, "%s never matters", better[k].name);
}

// ==== Formulas ==================================================================================

/* A profile in which only products take time, at 1 TFLOP/s. */
static dt_plan_profile ideal(void) {
    return (dt_plan_profile){ .peak = 1e12,
        .hbm = 1e30,
        .memory = 1e15,
        .node = 8,
        .product = 1,
        .attention = 1e9,
        .tp_near = 1e30,
        .tp_far = 1e30,
        .dp_near = 1e30,
        .dp_far = 1e30,
        .dp_one_way = 1,
        .pp_link = 1e30 };
}

static void test_formulas(void) {
    /* no head to speak of, so that all stages are alike */
    dt_plan_model m = { 32, 1024, 16, 16, 4096, 0, 1, 1024, 0, 0, 0, 0 };
    dt_plan_profile q = ideal();
    dt_layout l = { .mesh = { .pp = 4 }, .schedule = DT_SCHEDULE_1F1B, .accum = 8, .chunks = 2 };
    dt_plan_cost c = cost_of(m, l, q);
    near("12 h^2 a layer, 6 FLOPs a parameter and token", c.compute,
        8 * 1024 * 6.0 * 8 * 12 * 1024 * 1024 / 1e12, 1e-3);
    static const struct {
        int kind;
        double bubble;
    } kinds[] = { { DT_SCHEDULE_NAIVE, 3 }, { DT_SCHEDULE_AFAB, 3. / 8 },
        { DT_SCHEDULE_1F1B, 3. / 8 }, { DT_SCHEDULE_INTERLEAVED, 3. / 16 },
        { DT_SCHEDULE_ZB, 3. / 24 }, { DT_SCHEDULE_ZBV, 3. / 48 },
        { DT_SCHEDULE_DUALPIPE_V, 3. / 48 } };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        l.schedule = kinds[i].kind;
        c = cost_of(m, l, q);
        near("bubble / work", c.bubble / c.compute, kinds[i].bubble, 2e-3);
        /* the schedule itself, with backwards of two forwards */
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ 0 });
        dt_schedule *s = dt_schedule_make(
            ctx, (dt_schedule_desc){ .kind = l.schedule, .ranks = 4, .micros = 8 });
        dt_span *spans = (dt_span *)calloc((size_t)dt_schedule_offset(s, 4), sizeof *spans);
        dt_schedule_costs costs = { .forward = 1, .input = 1, .weight = 1 };
        CHECK(spans && dt_schedule_simulate(s, costs, spans) == DT_OK);
        double idle =
            dt_schedule_bubble_of(s, spans, l.schedule < DT_SCHEDULE_ZBV ? -1 : 0).idle_per_work;
        if (l.schedule < DT_SCHEDULE_ZBV)
            near("simulated bubble", c.bubble / c.compute, idle, 2e-3);
        free(spans);
        dt_ctx_free(ctx);
    }
    /* messages of a stage: forward and backward, for each chunk; 3 more of either fill the pipeline */
    q.pp_link = 1e9;
    static const struct {
        int kind, chunks;
    } sends[] = { { DT_SCHEDULE_1F1B, 1 }, { DT_SCHEDULE_INTERLEAVED, 2 }, { DT_SCHEDULE_ZB, 1 },
        { DT_SCHEDULE_ZBV, 2 } };
    for (size_t i = 0; i < sizeof sends / sizeof *sends; i++) {
        l.schedule = sends[i].kind;
        near("messages", cost_of(m, l, q).pp, 2 * (7 * sends[i].chunks + 3) * 2097152 / 1e9, 1e-9);
    }
    q = ideal();
    /* recompute: one forward more of three */
    dt_layout one = { .accum = 1 };
    double plain = cost_of(m, one, q).compute;
    one.recompute = DT_RECOMPUTE_FULL;
    near("full recompute", cost_of(m, one, q).compute, plain * 4 / 3, 1e-3);
    /* tp: 4 collectives forward, 4 backward, and 2 more under sp, of 2 bytes a column, cut in t */
    q.tp_near = 1e9, q.tp_far = 1e8;
    dt_layout tp = { .mesh = { .tp = 8 }, .accum = 1 };
    double collective = 2.0 * 1024 * 1024 * 7 / 8 / 1e9;
    near("tp", cost_of(m, tp, q).tp, (32 * 8 + 3) * collective, 1e-9);
    tp.sp = 1;
    near("tp with sp", cost_of(m, tp, q).tp, (32 * 10 + 3) * collective, 1e-9);
    tp.mesh.tp = 16;
    collective = 2.0 * 1024 * 1024 * 15 / 16 / 1e8;
    near("tp over two nodes", cost_of(m, tp, q).tp, (32 * 10 + 3) * collective, 1e-9);
    /* dp: ZeRO-0 sums gradients, ZeRO-1 halves it and gathers parameters */
    q = ideal();
    q.dp_near = 1e9, q.reduce_bytes = 4, q.param_bytes = 2;
    dt_layout dp = { .mesh = { .dp = 8 }, .accum = 4 };
    double part = (32 * (12.0 * 1024 * 1024 + 13 * 1024) + 2 * 1024) * 7 / 8;
    near("all-reduce", cost_of(m, dp, q).dp, 8 * part / 1e9, 1e-3);
    dp.zero = 1;
    near("reduce-scatter and all-gather", cost_of(m, dp, q).dp, 6 * part / 1e9, 1e-3);
    dp.zero = 2;
    near("... of each micro-batch", cost_of(m, dp, q).dp, (4 * 4 + 2) * part / 1e9, 1e-3);
    dp.zero = 3;
    near("... and gathered twice in each", cost_of(m, dp, q).dp, 4 * (4 + 4) * part / 1e9, 1e-3);
}

/* 2 bytes of parameters, 4 of gradients and 12 of state, over 8 ranks: each stage shares one more. */
static void test_zero(void) {
    dt_plan_profile q = ideal();
    q.param_bytes = 2, q.grad_bytes = 4, q.optim_bytes = 12;
    dt_plan_model m = models[1];
    dt_layout l = { .mesh = { .dp = 8 } };
    double n = cost_of(m, l, q).parameters;
    for (l.zero = 0; l.zero < 4; l.zero++) {
        dt_plan_cost c = cost_of(m, l, q);
        near("params", c.params, 2 * n / (l.zero >= 3 ? 8 : 1), 1e-3);
        near("grads", c.grads, 4 * n / (l.zero >= 2 ? 8 : 1), 1e-3);
        near("optim", c.optim, 12 * n / (l.zero >= 1 ? 8 : 1), 1e-3);
    }
    l.zero = 1, l.shard_group = 4;
    near("optim in groups of 4", cost_of(m, l, q).optim, 12 * n / 4, 1e-3);
    /* experts are divided by ep, and their state by dp; the rest by both */
    m = models[3];
    l = (dt_layout){ .mesh = { .dp = 2, .ep = 8 }, .zero = 1 };
    double experts = 32 * 8.0 * 3 * 4096 * 14336;
    dt_plan_cost c = cost_of(m, l, q);
    near("params with ep", c.params, 2 * (c.parameters - experts + experts / 8), 1e-3);
    near("optim with ep", c.optim, 12 * ((c.parameters - experts) / 16 + experts / 16), 1e-3);
}

// ==== A dry run =================================================================================

static gpt_config gpt_of(dt_plan_model m) {
    return (gpt_config){ .layers = m.layers,
        .width = m.width,
        .heads = m.heads,
        .kv_heads = m.kv_heads,
        .ffn = m.ffn,
        .seq = m.seq,
        .vocab = m.vocab,
        .tied = m.tied,
        .dtype = DT_BF16,
        .arch = m.gated ? GPT_LLAMA : GPT_GPT2,
        .experts = m.experts,
        .top_k = m.top_k,
        .moe_every = m.moe_every };
}

typedef struct dry_case {
    gpt_config c;
    int tp, batch;
    dt_dry *dry;
    double acts; /* bytes kept for the backward by rank 0 */
} dry_case;

static dt_status dry_main(dt_ctx *ctx, void *user) {
    dry_case *k = (dry_case *)user;
    int me = dt_ctx_rank(ctx);
    dt_dry_begin(ctx, &k->dry[me]);
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = k->tp });
    gpt_config c = k->c;
    c.tp = mesh.tp, c.sp = k->tp > 1;
    gpt m = gpt_register(ctx, c);
    for (int pass = 0; pass < 2 && dt_error(ctx) == DT_OK; pass++) {
        dt_shape shape = DT_SHAPE(k->batch, c.seq);
        dt_tensor *ids = dt_input(ctx, DT_I32, shape, NULL);
        gpt_loss(&m, ids, dt_input(ctx, DT_I32, shape, NULL), 1);
        if (me == 0) k->acts = (double)dt_memory_used(ctx).live[DT_MEM_ACTS];
        dt_reset(ctx);
    }
    return dt_error(ctx);
}

static double dry_acts(dt_plan_model m, int tp, int batch) {
    dt_dry dry[8] = { { 0 } };
    dry_case k = { .c = gpt_of(m), .tp = tp, .batch = batch, .dry = dry };
    CHECK(dt_run((dt_run_desc){ .ranks = tp }, dry_main, &k) == DT_OK);
    return k.acts;
}

/* Parameters are those of the GPT, exactly. One more layer keeps, of dt's GPT-2 in two bytes, 12
   bytes per token and column of the width, 4 per column of the MLP, and a few for softmax and norms,
   within 2 %. */
static void test_dry_run(void) {
    dt_plan_profile q = ideal();
    q.act_width = 12, q.act_ffn = 4;
    for (int i = 0; i < MODELS; i++) {
        dt_plan_model m = models[i];
        double n = (double)gpt_param_count(gpt_of(m));
        CHECK_MSG(cost_of(m, (dt_layout){ 0 }, q).parameters == n,
            "model %d: %.0f, the GPT has %.0f", i, cost_of(m, (dt_layout){ 0 }, q).parameters, n);
    }
    for (int tp = 1; tp <= 4; tp *= 4) {
        dt_plan_model m = { 2, 2048, 16, 16, 8192, 0, 50304, 1024, 1, 0, 0, 0 }, more = m;
        more.layers++;
        dt_layout l = { .mesh = { .tp = tp }, .micro_batch = 2, .sp = 1 };
        double want = dry_acts(more, tp, 2) - dry_acts(m, tp, 2);
        near("activations of a layer", cost_of(more, l, q).acts - cost_of(m, l, q).acts, want, .02);
    }
}

// ==== Published rows ============================================================================

typedef struct published {
    char source[40], model[16], recompute[16];
    int layers, width, heads, dp, tp, pp, chunks, micro_batch, batch, sp;
    double seconds;
} published;

/* The seconds of a row; where it gives no micro-batch or chunks, of the fastest that fits. */
static double published_seconds(const published *r, dt_plan_profile q) {
    dt_plan_model m = { r->layers, r->width, r->heads, 0, 4 * r->width, 0, 51200, 2048, 1, 0, 0,
        0 };
    double best = 1e9;
    for (int b = r->micro_batch ? r->micro_batch : 1; b <= (r->micro_batch ? r->micro_batch : 16);
         b *= 2) {
        int micros = r->batch / (r->dp * b);
        if (micros * r->dp * b != r->batch) continue;
        for (int v = r->chunks ? r->chunks : 1; v <= (r->chunks ? r->chunks : 6); v++) {
            if (v > 1 && !r->chunks && (r->pp == 1 || r->layers / r->pp % v || micros % r->pp))
                continue;
            dt_layout l = { .mesh = { .dp = r->dp, .tp = r->tp, .pp = r->pp },
                .recompute = r->recompute[0] == 'f' ? DT_RECOMPUTE_FULL : DT_RECOMPUTE_SELECTIVE,
                .schedule = v > 1 ? DT_SCHEDULE_INTERLEAVED : DT_SCHEDULE_1F1B,
                .chunks = v,
                .micro_batch = b,
                .accum = micros,
                .sp = r->sp };
            dt_plan_cost c = cost_of(m, l, q);
            if (c.bytes <= q.memory) best = fmin(best, c.seconds);
        }
    }
    return best;
}

static void test_published(void) {
    char path[600], line[400];
    double sum[2] = { 0 };
    int rows[2] = { 0 };
    snprintf(path, sizeof path, "%s/megatron_a100.csv", folder);
    FILE *f = fopen(path, "r");
    if (!CHECK_MSG(f && fgets(line, sizeof line, f), "no file %s", path)) return;
    while (fgets(line, sizeof line, f)) {
        published r;
        if (!CHECK_MSG(
                sscanf(line, "%39[^,],%15[^,],%d,%d,%d,%d,%d,%d,%d,%d,%d,%15[^,],%d,%lf", r.source,
                    r.model, &r.layers, &r.width, &r.heads, &r.dp, &r.tp, &r.pp, &r.chunks,
                    &r.micro_batch, &r.batch, r.recompute, &r.sp, &r.seconds) == 14,
                "row %s", line))
            break;
        double error = published_seconds(&r, *dt_plan_profile_of("a100-megatron")) / r.seconds - 1;
        int i = strstr(r.source, "2104.04473") != NULL;
        CHECK_MSG(
            fabs(error) < .08, "%s %s %s: %+.1f %%", r.source, r.model, r.recompute, 100 * error);
        sum[i] += fabs(error), rows[i]++;
    }
    fclose(f);
    CHECK(rows[0] == 8 && rows[1] == 10);
    CHECK_MSG(sum[0] / 8 <= .04, "2205.05198: %.2f %%", 100 * sum[0] / 8);
    CHECK_MSG(sum[1] / 10 <= .08, "2104.04473: %.2f %%", 100 * sum[1] / 10);
    printf("published: 2205.05198 mean error %.2f %%, 2104.04473 %.2f %%\n", 100 * sum[0] / 8,
        100 * sum[1] / 10);
}

/* Figure 1 of arXiv:2205.05198: GiB of activations of the first stage without recompute, and with
   selective recompute and sequence parallelism, as the authors computed them; dt counts the input
   of the stage and the scores of one layer, too. */
static void test_published_memory(void) {
    static const struct {
        int layers, width, heads, pp, chunks, micro_batch, accum;
        double none, selective, state;
    } rows[] = { { 48, 6144, 64, 1, 1, 4, 1, 59.25, 9.5625, 45.5625 },
        { 96, 12288, 96, 8, 3, 1, 64, 66.84375, 12.3515625, 45.5625 },
        { 105, 20480, 128, 35, 3, 1, 280, 114.0234375, 23.076171875, 31.640625 },
        { 128, 25600, 160, 64, 1, 1, 512, 131.25, 26.5625, 32.958984375 } };
    dt_plan_profile q = *dt_plan_profile_of("a100-megatron");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        dt_plan_model m = { rows[i].layers, rows[i].width, rows[i].heads, 0, 4 * rows[i].width, 0,
            51200, 2048, 1, 0, 0, 0 };
        dt_layout l = { .mesh = { .tp = 8, .pp = rows[i].pp },
            .schedule = rows[i].chunks > 1 ? DT_SCHEDULE_INTERLEAVED : DT_SCHEDULE_1F1B,
            .chunks = rows[i].chunks,
            .micro_batch = rows[i].micro_batch,
            .accum = rows[i].accum };
        dt_plan_cost c = cost_of(m, l, q);
        near("activations without recompute", c.acts / GIB, rows[i].none, .08);
        near("parameters and state", (c.params + c.grads + c.optim) / GIB, rows[i].state, .09);
        l.recompute = DT_RECOMPUTE_SELECTIVE, l.sp = 1;
        near(
            "with selective recompute and sp", cost_of(m, l, q).acts / GIB, rows[i].selective, .08);
    }
}

/* GPU-hours of LLaMA (arXiv:2302.13971, table 15) and Llama 2 (arXiv:2307.09288, table 2) on A100
   with 80 GB: the fastest layout of 1,024 or 2,048 GPUs with batches of 4 M tokens. These runs had
   memory-efficient attention and overlapped gradients, unlike the rows of a100-megatron. Llama 2 70B
   on 1,024 GPUs would take 70 days. The small model ran further from the best layout. */
static void test_hours(void) {
    static const struct {
        const char *name;
        dt_plan_model m;
        int gpus;
        double tokens, hours, bound;
    } runs[] = {
        { "7B", { 32, 4096, 32, 32, 11008, 1, 32000, 2048, 0, 0, 0, 0 }, 1024, 1e12, 82432, .25 },
        { "13B", { 40, 5120, 40, 40, 13824, 1, 32000, 2048, 0, 0, 0, 0 }, 1024, 1e12, 135168, .15 },
        { "33B", { 60, 6656, 52, 52, 17920, 1, 32000, 2048, 0, 0, 0, 0 }, 2048, 1.4e12, 530432,
            .15 },
        { "65B", { 80, 8192, 64, 64, 22016, 1, 32000, 2048, 0, 0, 0, 0 }, 2048, 1.4e12, 1022362,
            .15 },
        { "2-70B", { 80, 8192, 64, 8, 28672, 1, 32000, 4096, 0, 0, 0, 0 }, 1024, 2e12, 1.72e6,
            .15 },
    };
    dt_plan_profile q = *dt_plan_profile_of("a100-megatron");
    q.act_scores = 0, q.attention = .4, q.dp_overlap = .5;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        double best = 0;
        for (int tp = 1; tp <= 8; tp *= 2)
            for (int pp = 1; pp <= 16; pp *= 2)
                for (int b = 1; b <= 8; b *= 2)
                    for (int zero = 0; zero < 2; zero++) {
                        int dp = runs[i].gpus / (tp * pp), batch = 4194304 / runs[i].m.seq;
                        if (runs[i].m.layers % pp || batch % (dp * b) || runs[i].m.heads % tp)
                            continue;
                        dt_layout l = { .mesh = { .dp = dp, .tp = tp, .pp = pp },
                            .zero = zero,
                            .schedule = DT_SCHEDULE_1F1B,
                            .micro_batch = b,
                            .accum = batch / (dp * b),
                            .sp = 1 };
                        dt_plan_cost c = cost_of(runs[i].m, l, q);
                        if (c.bytes <= q.memory) best = fmax(best, c.tokens_per_s_gpu);
                    }
        double hours = runs[i].tokens / best / 3600;
        CHECK_MSG(fabs(hours / runs[i].hours - 1) <= runs[i].bound,
            "%s: %.0f hours, published %.0f", runs[i].name, hours, runs[i].hours);
        printf("LLaMA %s: %.0f GPU-hours, published %.0f (%+.1f %%)\n", runs[i].name, hours,
            runs[i].hours, 100 * (hours / runs[i].hours - 1));
    }
}

// ==== Stored predictions ========================================================================

static void test_stored(void) {
    static const struct {
        int model, dp, tp, pp, zero, micro_batch, accum;
        double tokens, gib;
        int empty;
    } rows[] = {
        { 0, 8, 1, 1, 1, 1, 32, 42401.8, 22.59, 0 },
        { 1, 1, 8, 2, 0, 1, 256, 738.698, 7.589, 0 },
        { 2, 1, 16, 1, 0, 32, 8, 3644.17, 72, 0 },
        { 3, 1, 8, 16, 0, 1, 256, 221.183, 36.51, 0 },
        { 0, 1, 1, 16, 0, 8, 32, 11990.9, 102.3, 4 },
        { 2, 1, 2, 32, 0, 8, 32, 2689.02, 213.9, 3 },
        { 1, 1, 32, 1, 0, 64, 4, 3312.62, 72, 0 },
        { 2, 64, 4, 2, 1, 2, 2, 2362.03, 24.69, 0 },
    };
    static const dt_plan_model shapes[] = {
        { 16, 2048, 32, 0, 8192, 1, 131072, 4096, 1, 0, 0, 0 },
        { 28, 3072, 32, 0, 8192, 1, 131072, 4096, 1, 0, 0, 0 },
        { 32, 4096, 32, 0, 14336, 1, 131072, 4096, 0, 0, 0, 0 },
        { 80, 8192, 64, 0, 28672, 1, 131072, 4096, 0, 0, 0, 0 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        dt_layout l = { .mesh = { .dp = rows[i].dp, .tp = rows[i].tp, .pp = rows[i].pp },
            .zero = rows[i].zero,
            .schedule = DT_SCHEDULE_1F1B,
            .micro_batch = rows[i].micro_batch,
            .accum = rows[i].accum,
            .sp = 1 };
        dt_plan_cost c = cost_of(shapes[rows[i].model], l, *dt_plan_profiles(NULL));
        near("tokens per second and GPU", c.tokens_per_s_gpu, rows[i].tokens, 1e-5);
        near("GiB", c.bytes / GIB, rows[i].gib, 1e-3);
        CHECK(c.stages_without_layers == rows[i].empty);
    }
}

// ==== Refused ===================================================================================

static void test_refused(void) {
    const dt_plan_profile *q = dt_plan_profiles(NULL);
    dt_plan_model m = models[0];
    dt_layout l = { 0 };
    dt_plan_cost c;
    CHECK(dt_plan_estimate(&m, &l, q, &c) == DT_OK && c.seconds > 0);
    CHECK(dt_plan_estimate(&m, &l, q, NULL) == DT_ERR_ARG);
    CHECK(dt_plan_estimate(NULL, &l, q, &c) == DT_ERR_ARG && c.seconds == 0);
    CHECK(dt_plan_estimate(&m, NULL, q, &c) == DT_ERR_ARG);
    CHECK(dt_plan_estimate(&m, &l, NULL, &c) == DT_ERR_ARG);
#define REFUSES(set) \
    do { \
        m = models[0], l = (dt_layout){ 0 }; \
        set; \
        CHECK(dt_plan_estimate(&m, &l, q, &c) == DT_ERR_ARG && c.seconds == 0); \
    } while (0)
    REFUSES(m.layers = 0);
    REFUSES(m.width = -1);
    REFUSES(m.heads = 0);
    REFUSES(m.vocab = 0);
    REFUSES(m.experts = -1);
    REFUSES(l.mesh.tp = -2);
    REFUSES(l.mesh.pp = 1025);
    REFUSES(l.zero = 4);
    REFUSES(l.schedule = DT_SCHEDULES);
    REFUSES(l.recompute = 3);
    REFUSES(l.accum = -1);
    REFUSES(l.shard_group = -1);
}

// ==== Search ====================================================================================

/* The fastest layout that fits, by trying every number for every size. */
static double brute_force(const dt_plan_desc *d, int *fits, int64_t *tried) {
    const dt_plan_model *m = d->model;
    static const int kinds[][2] = { { DT_SCHEDULE_1F1B, 1 }, { DT_SCHEDULE_INTERLEAVED, 2 },
        { DT_SCHEDULE_INTERLEAVED, 4 }, { DT_SCHEDULE_ZB, 1 }, { DT_SCHEDULE_ZBV, 2 } };
    double best = HUGE_VAL;
    int G = d->gpus, kv = m->kv_heads ? m->kv_heads : m->heads;
    *fits = 0;
    *tried = 0;
    for (int i = 0; i < G * G * G * G; i++) {
        dt_layout l = { .mesh = { .tp = i % G + 1,
                            .cp = i / G % G + 1,
                            .pp = i / G / G % G + 1,
                            .ep = i / G / G / G + 1 } };
        int others = l.mesh.tp * l.mesh.cp * l.mesh.pp * l.mesh.ep;
        if (G % others || m->heads % l.mesh.tp || (kv % l.mesh.tp && l.mesh.tp % kv)) continue;
        if (m->seq % (l.mesh.tp * (l.mesh.cp > 1 ? 2 * l.mesh.cp : 1))) continue;
        if ((m->experts ? m->experts : 1) % l.mesh.ep || l.mesh.pp > m->layers) continue;
        l.mesh.dp = G / others;
        l.sp = l.mesh.tp > 1;
        for (int j = 0; j < d->batch * 5 * 4 * 3; j++) {
            const int *kind = kinds[j % 5];
            l.schedule = kind[0], l.chunks = kind[1];
            l.zero = j / 5 % 4, l.recompute = j / 20 % 3, l.micro_batch = j / 60 + 1;
            int one = l.mesh.dp * l.mesh.ep * l.micro_batch, v = l.chunks;
            l.accum = d->batch / one;
            if (d->batch % one || (l.mesh.cp > 1 && l.micro_batch > 1)) continue;
            if (l.mesh.pp == 1 && j % 5 > 0) continue;
            if (v > 1 && m->layers < l.mesh.pp * v) continue;
            if (kind[0] == DT_SCHEDULE_INTERLEAVED && l.accum % l.mesh.pp) continue;
            if (kind[0] > DT_SCHEDULE_INTERLEAVED && l.accum < l.mesh.pp) continue;
            if (l.zero && l.mesh.dp * l.mesh.cp * l.mesh.ep == 1) continue;
            dt_plan_cost c = cost_of(*m, l, *d->profile);
            if (c.stages_without_layers) continue;
            ++*tried;
            if (c.bytes > d->memory) continue;
            best = fmin(best, c.seconds);
            ++*fits;
        }
    }
    return best;
}

static int refuse_tp(const dt_layout *l, void *user) {
    (void)user;
    return l->mesh.tp > 1;
}

/* Needs twice what is estimated; refuses micro-batches of several sequences. */
static double twice(const dt_layout *l, void *user) {
    const dt_plan_desc *d = (const dt_plan_desc *)user;
    dt_plan_cost c = cost_of(*d->model, *l, *d->profile);
    return l->micro_batch > 1 ? -1 : 2 * c.bytes;
}

static void test_search(void) {
    enum { ROWS = 12, BIG = 4 };
    dt_plan_row rows[ROWS], big[BIG], fits;
    dt_plan_found found;
    dt_plan_model small = { 8, 2048, 16, 4, 8192, 1, 32000, 2048, 0, 0, 0, 0 }, mixture = small;
    mixture.experts = 4, mixture.top_k = 2;
    for (int gpus = 1; gpus <= 12; gpus++)
        for (int moe = 0; moe < 2; moe++)
            for (int tight = 0; tight < 3; tight++) {
                dt_plan_desc d = { .model = moe ? &mixture : &small,
                    .profile = dt_plan_profiles(NULL),
                    .gpus = gpus,
                    .batch = 24,
                    .memory = (tight == 0      ? 72
                                  : tight == 1 ? 16
                                               : 1) *
                              GIB };
                int n_fit;
                int64_t tried;
                double best = brute_force(&d, &n_fit, &tried);
                CHECK(dt_plan_search(d, rows, ROWS, big, BIG, &found) == DT_OK);
                CHECK_MSG(found.tried == tried, "%d GPUs: %lld layouts, all numbers %lld", gpus,
                    (long long)found.tried, (long long)tried);
                CHECK_MSG(found.rows == (n_fit < ROWS ? n_fit : ROWS), "%d GPUs: %d rows of %d",
                    gpus, found.rows, n_fit);
                if (found.tried == 0) continue; /* no layout divides the sizes */
                if (found.rows == 0) {
                    CHECK(found.too_big > 0 && big[0].bytes > d.memory);
                    for (int i = 1; i < found.too_big; i++) CHECK(big[0].bytes <= big[i].bytes);
                    continue;
                }
                /* ties to a thousandth for each axis go to the simpler layout */
                CHECK_MSG(rows[0].cost.seconds >= best && rows[0].cost.seconds <= 1.006 * best,
                    "%d GPUs, moe %d: %.9g s, all numbers %.9g", gpus, moe, rows[0].cost.seconds,
                    best);
                for (int i = 0; i < found.rows; i++) {
                    const dt_mesh_desc *m = &rows[i].layout.mesh;
                    CHECK(m->dp * m->tp * m->cp * m->pp * m->ep == gpus);
                    CHECK(rows[i].layout.accum * rows[i].layout.micro_batch * m->dp * m->ep == 24);
                    CHECK(rows[i].bytes <= d.memory);
                    CHECK(i == 0 || rows[i].cost.seconds >= 0.99 * rows[i - 1].cost.seconds);
                }
                for (int i = 0; i < found.too_big; i++) {
                    CHECK(big[i].bytes > d.memory && big[i].cost.seconds < rows[0].cost.seconds);
                    if (dt_plan_would_fit(d, &big[i].layout, &fits))
                        CHECK(fits.bytes <= d.memory &&
                              fits.layout.mesh.tp == big[i].layout.mesh.tp &&
                              fits.layout.zero >= big[i].layout.zero);
                }
                /* a faster link is never slower, more memory never worse */
                dt_plan_profile faster = *d.profile;
                faster.tp_near *= 2, faster.dp_near *= 2, faster.pp_link *= 2;
                dt_plan_desc more = d;
                more.profile = &faster;
                more.memory *= 2;
                dt_plan_row better;
                CHECK(
                    dt_plan_search(more, &better, 1, NULL, 0, &found) == DT_OK && found.rows == 1);
                CHECK(better.cost.seconds <= 1.006 * rows[0].cost.seconds);
            }
    dt_plan_desc d = { .model = &small,
        .profile = dt_plan_profiles(NULL),
        .gpus = 8,
        .batch = 16,
        .refuses = refuse_tp,
        .bytes = twice };
    d.user = &d;
    CHECK(dt_plan_search(d, rows, ROWS, NULL, 0, &found) == DT_OK && found.rows > 0);
    for (int i = 0; i < found.rows; i++) {
        CHECK(rows[i].layout.mesh.tp == 1 && rows[i].layout.micro_batch == 1);
        CHECK(rows[i].bytes == 2 * rows[i].cost.bytes && rows[i].bytes <= d.profile->memory);
    }
    CHECK(dt_plan_search(d, rows, ROWS, NULL, 0, NULL) == DT_ERR_ARG);
    d.gpus = 0;
    CHECK(dt_plan_search(d, rows, ROWS, NULL, 0, &found) == DT_ERR_ARG);
    d.gpus = 8, d.batch = 0;
    CHECK(dt_plan_search(d, rows, ROWS, NULL, 0, &found) == DT_ERR_ARG);
}

int main(int argc, char **argv) {
    if (argc > 1) folder = argv[1];
    test_parts();
    test_better();
    test_formulas();
    test_zero();
    test_dry_run();
    test_published();
    test_published_memory();
    test_hours();
    test_stored();
    test_search();
    test_refused();
    return check_done("test_plan");
}
