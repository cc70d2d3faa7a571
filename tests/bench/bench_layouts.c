/* bench_layouts.c - tokens per second and memory of one GPT under many layouts
   Public domain or MIT, at your choice; see LICENSE.

       make build/bench_layouts && build/bench_layouts [--quick] [--rounds N] [--backend
       threads|procs]

   The model is gpt-4x256: 4 layers, width 256, 8 heads, 256 tokens, bytes as vocabulary, AdamW,
   clip 1, in f32. Every layout trains the same 8 sequences a step, so ratio_to_1 is the gain or
   cost of a layout for the same work. With more ranks than cores it shows only the cost of
   sharding.

   All layouts run in this process, one after another, in rounds of three steps each. The first step
   of a round allocates and does not count; the best step of all rounds counts. So other load on the
   machine affects all layouts alike, and each layout needs only one step without other load.

   Memory is the largest of any rank, as train.h reports it: params, grads and optim at the end of a
   step, acts, comm and peak at their maximum, in the third step, when arenas have their final
   sizes. bytes_* is sent by one rank along an axis in a step. These figures do not depend on the
   machine.

       build/bench_layouts --pairs N [--quick] [--backend threads|procs] [--stage K]

   The cost of a ZeRO stage: gpt-6x384 on 2 ranks, 8 sequences each, at stage 0 and directly after
   it at stage K (1, 2, 3, and 3 with keep_gathered; --stage: only K), in N pairs. Every second pair
   begins with K. A run is three steps; the best after the first counts. The summary is the lower
   quartile of the pairs' ratios. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_zero.h"

#include "examples/gpt.h"
#include "examples/train.h"

#include "tests/bench/bench.h"

typedef struct layout {
    const char *name; /* without spaces and commas */
    int dp, tp, cp;
    int kind; /* DT_CP_*, where cp is not 1 */
    int sp, zero;
    int pp, schedule; /* pp 0: no pipeline; DT_SCHEDULE_* */
} layout;

static const layout layouts[] = {
    { "one", 1, 1, 1, 0, 0, 0, 0, 0 },
    { "dp2", 2, 1, 1, 0, 0, 0, 0, 0 },
    { "dp2-zero1", 2, 1, 1, 0, 0, 1, 0, 0 },
    { "dp2-zero2", 2, 1, 1, 0, 0, 2, 0, 0 },
    { "dp2-zero3", 2, 1, 1, 0, 0, 3, 0, 0 },
    { "tp2", 1, 2, 1, 0, 0, 0, 0, 0 },
    { "tp2-sp", 1, 2, 1, 0, 1, 0, 0, 0 },
    { "cp2-ring", 1, 1, 2, DT_CP_RING, 0, 0, 0, 0 },
    { "cp2-zigzag", 1, 1, 2, DT_CP_ZIGZAG, 0, 0, 0, 0 },
    { "cp2-allgather", 1, 1, 2, DT_CP_ALLGATHER, 0, 0, 0, 0 },
    { "cp2-ulysses", 1, 1, 2, DT_CP_ULYSSES, 0, 0, 0, 0 },
    { "dp4", 4, 1, 1, 0, 0, 0, 0, 0 },
    { "dp4-zero1", 4, 1, 1, 0, 0, 1, 0, 0 },
    { "tp4", 1, 4, 1, 0, 0, 0, 0, 0 },
    { "tp4-sp", 1, 4, 1, 0, 1, 0, 0, 0 },
    { "cp4-ring", 1, 1, 4, DT_CP_RING, 0, 0, 0, 0 },
    { "cp4-zigzag", 1, 1, 4, DT_CP_ZIGZAG, 0, 0, 0, 0 },
    { "cp4-allgather", 1, 1, 4, DT_CP_ALLGATHER, 0, 0, 0, 0 },
    { "cp4-ulysses", 1, 1, 4, DT_CP_ULYSSES, 0, 0, 0, 0 },
    { "dp2-tp2", 2, 2, 1, 0, 0, 1, 0, 0 },
    { "dp8", 8, 1, 1, 0, 0, 0, 0, 0 },
    { "dp8-zero1", 8, 1, 1, 0, 0, 1, 0, 0 },
    { "tp8", 1, 8, 1, 0, 0, 0, 0, 0 },
    { "tp8-sp", 1, 8, 1, 0, 1, 0, 0, 0 },
    { "cp8-ring", 1, 1, 8, DT_CP_RING, 0, 0, 0, 0 },
    { "cp8-zigzag", 1, 1, 8, DT_CP_ZIGZAG, 0, 0, 0, 0 },
    { "cp8-allgather", 1, 1, 8, DT_CP_ALLGATHER, 0, 0, 0, 0 },
    { "cp8-ulysses", 1, 1, 8, DT_CP_ULYSSES, 0, 0, 0, 0 },
    { "dp2-tp2-cp2", 2, 2, 2, DT_CP_ZIGZAG, 1, 1, 0, 0 },
    { "pp2-afab", 1, 1, 1, 0, 0, 0, 2, DT_SCHEDULE_AFAB },
    { "pp2-1f1b", 1, 1, 1, 0, 0, 0, 2, DT_SCHEDULE_1F1B },
    { "pp2-interleaved", 1, 1, 1, 0, 0, 0, 2, DT_SCHEDULE_INTERLEAVED },
    { "pp2-zb", 1, 1, 1, 0, 0, 0, 2, DT_SCHEDULE_ZB },
    { "pp4-1f1b", 1, 1, 1, 0, 0, 0, 4, DT_SCHEDULE_1F1B },
    { "dp2-tp2-pp2", 2, 2, 1, 0, 0, 1, 2, DT_SCHEDULE_1F1B },
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts, BATCH = 8, STEPS = 3 };

typedef struct settings {
    int quick, rounds;
    int pairs, stage; /* pairs 0: the table of layouts; stage -1: all */
    dt_backend backend;
} settings;

/* The results of one layout so far, in memory that all ranks of a run share. */
typedef struct result {
    train_config config;
    double ms;                                    /* the best step; INFINITY before the first */
    double mem[TRAIN_MEMS], bytes[DT_AXES], loss; /* of the last step */
} result;

static settings parse(int argc, char **argv) {
    settings s = { 0, 3, 0, -1, DT_BACKEND_THREADS };
    const char *v;
    for (int i = 1; i < argc; i++) {
        int good = 1;
        if (strcmp(argv[i], "--quick") == 0)
            s.quick = 1, s.rounds = 1;
        else if ((v = bench_option(argc, argv, &i, "--rounds")))
            good = (s.rounds = atoi(v)) > 0 && s.rounds <= 1000;
        else if ((v = bench_option(argc, argv, &i, "--pairs")))
            good = (s.pairs = atoi(v)) > 0 && s.pairs <= 1000;
        else if ((v = bench_option(argc, argv, &i, "--stage")))
            good = (s.stage = atoi(v)) >= 1 && s.stage <= 3;
        else if ((v = bench_option(argc, argv, &i, "--backend"))) {
            s.backend = strcmp(v, "procs") == 0 ? DT_BACKEND_PROCS : DT_BACKEND_THREADS;
            good = strcmp(v, "procs") == 0 || strcmp(v, "threads") == 0;
        } else
            good = 0;
        if (!good)
            bench_refuse(argc, argv, i,
                "--quick --rounds N --backend threads|procs --pairs N --stage 1|2|3");
    }
    return s;
}

static gpt_config model_of(const settings *s) {
    if (s->quick)
        return (gpt_config){ .layers = 1,
            .width = 64,
            .heads = 8,
            .kv_heads = 8,
            .ffn = 256,
            .seq = 64,
            .vocab = 256,
            .tied = 1,
            .dtype = DT_F32 };
    return (gpt_config){ .layers = 4,
        .width = 256,
        .heads = 8,
        .kv_heads = 8,
        .ffn = 1024,
        .seq = 256,
        .vocab = 256,
        .tied = 1,
        .dtype = DT_F32 };
}

static int ranks_of(const layout *l) { return l->dp * l->tp * l->cp * (l->pp ? l->pp : 1); }

static void on_step(dt_ctx *ctx, const train_row *row, void *user) {
    result *r = (result *)user;
    (void)ctx;
    if (row->step > 1) r->ms = fmin(r->ms, row->ms);
    r->loss = row->loss;
    memcpy(r->mem, row->mem, sizeof r->mem);
    memcpy(r->bytes, row->bytes, sizeof r->bytes);
}

/* The program of every rank. `user` points to the shared result. */
static dt_status run_rank(dt_ctx *ctx, void *user) {
    train_config config = ((result *)user)->config;
    config.user = user;
    return train(ctx, &config);
}

static result result_make(const settings *s, const layout *l, train_files data) {
    result r = { .ms = INFINITY };
    r.config.data = data;
    r.config.model = model_of(s);
    r.config.model.sp = l->sp;
    r.config.model.cp_kind = l->kind;
    r.config.mesh = (dt_mesh_desc){ .dp = l->dp, .tp = l->tp, .cp = l->cp, .pp = l->pp };
    r.config.zero = (dt_zero_desc){
        .stage = l->zero, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1, .clip = 1
    };
    r.config.lr = (dt_lr_desc){ .peak = 3e-4, .kind = DT_LR_CONSTANT, .steps = 1, .min_ratio = 1 };
    r.config.micro_batch = BATCH / l->dp;
    r.config.accum = 1;
    if (l->pp) { /* one sequence per micro-batch; stages of equal length */
        double same[2 * GPT_MAX_LAYERS + 2];
        char why[200];
        int items = gpt_items(r.config.model),
            chunks = l->schedule == DT_SCHEDULE_INTERLEAVED ? 2 : 1;
        for (int i = 0; i < items; i++) same[i] = 1;
        if (dt_partition_stages(
                same, items, l->pp * chunks, r.config.stage_begin, why, sizeof why) != DT_OK)
            exit(2);
        r.config.schedule = l->schedule;
        r.config.chunks = chunks;
        r.config.micro_batch = 1;
        r.config.accum = BATCH / l->dp;
    }
    r.config.stop_at = STEPS;
    r.config.on_step = on_step;
    return r;
}

static double rate(const settings *s, const result *r) {
    return BATCH * model_of(s).seq / (r->ms / 1000);
}

static void print_row(const settings *s, const layout *l, const result *r, const result *one) {
    static const char *const kinds[] = { "ring", "zigzag", "allgather", "ulysses" };
    static const char *const schedules[] = { "naive", "afab", "1f1b", "interleaved", "zb" };
    printf("%s,%d,%d,%d,%d,%s,%s,%d,%.1f,%.3f", l->name, ranks_of(l), l->dp, l->tp, l->cp,
        l->cp > 1 ? kinds[l->kind] : "none", l->sp ? "on" : "off", l->zero, rate(s, r),
        rate(s, r) / rate(s, one));
    for (int m = 0; m < TRAIN_MEMS; m++) printf(",%.0f", r->mem[m]);
    printf(",%.0f,%.0f,%.0f,%d,%s,%.0f\n", r->bytes[DT_AXIS_DP], r->bytes[DT_AXIS_TP],
        r->bytes[DT_AXIS_CP], l->pp ? l->pp : 1, l->pp ? schedules[l->schedule] : "none",
        r->bytes[DT_AXIS_PP]);
}

/* The largest relative difference between the last loss of a layout and that of one rank. */
static double loss_difference(const result *results) {
    double most = 0;
    for (int i = 1; i < LAYOUTS; i++)
        most = fmax(most, fabs(results[i].loss / results[0].loss - 1));
    return most;
}

static void print_summary(const settings *s, const result *results) {
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
        double fastest = 0, smallest = INFINITY;
        for (int i = 0; i < LAYOUTS; i++) {
            if (ranks_of(&layouts[i]) != ranks) continue;
            fastest = fmax(fastest, rate(s, &results[i]));
            smallest = fmin(smallest, results[i].mem[TRAIN_PEAK]);
        }
        printf("summary,best_tokens_per_s_%d,%.4g\n", ranks, fastest);
        printf("summary,best_ratio_%d,%.4g\n", ranks, fastest / rate(s, &results[0]));
        printf("summary,least_peak_share_%d,%.4g\n", ranks, smallest / results[0].mem[TRAIN_PEAK]);
    }
    printf("summary,loss_difference,%.4g\n", loss_difference(results));
}

// ==== Pairs of stages ===========================================================================

static const layout stage_layouts[] = { { "zero0", 2, 1, 1, 0, 0, 0, 0, 0 },
    { "zero1", 2, 1, 1, 0, 0, 1, 0, 0 }, { "zero2", 2, 1, 1, 0, 0, 2, 0, 0 },
    { "zero3", 2, 1, 1, 0, 0, 3, 0, 0 }, { "zero3-kept", 2, 1, 1, 0, 0, 3, 0, 0 } };
enum { STAGES = sizeof stage_layouts / sizeof *stage_layouts };

/* Milliseconds of the best step; 0 after a failure. */
static double stage_run(const settings *s, int which, train_files data) {
    result r = result_make(s, &stage_layouts[which], data);
    if (!s->quick)
        r.config.model = (gpt_config){ .layers = 6,
            .width = 384,
            .heads = 6,
            .kv_heads = 6,
            .ffn = 1536,
            .seq = 256,
            .vocab = 256,
            .tied = 1,
            .dtype = DT_F32 };
    r.config.micro_batch = 8;
    r.config.zero.keep_gathered = which == STAGES - 1;
    dt_status status = dt_run(
        (dt_run_desc){ .ranks = 2, .backend = s->backend, .user_bytes = sizeof r }, run_rank, &r);
    return status == DT_OK ? r.ms : 0;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static int bench_pairs(const settings *s, train_files data) {
    static double ratios[STAGES][1000];
    printf("layout,pair,ms_zero0,ms,ratio\n");
    fflush(stdout);
    for (int pair = 0; pair < s->pairs; pair++)
        for (int k = 1; k < STAGES; k++) {
            if (s->stage > 0 && stage_layouts[k].zero != s->stage) continue;
            double first = stage_run(s, pair % 2 ? k : 0, data),
                   second = stage_run(s, pair % 2 ? 0 : k, data);
            double zero = pair % 2 ? second : first, ms = pair % 2 ? first : second;
            if (first <= 0 || second <= 0) return 1;
            ratios[k][pair] = ms / zero;
            printf("%s,%d,%.2f,%.2f,%.4f\n", stage_layouts[k].name, pair + 1, zero, ms, ms / zero);
            fflush(stdout);
        }
    for (int k = 1; k < STAGES; k++) {
        if (s->stage > 0 && stage_layouts[k].zero != s->stage) continue;
        qsort(ratios[k], (size_t)s->pairs, sizeof **ratios, ascending);
        printf("summary,%s_lower_quartile,%.4f\n", stage_layouts[k].name, ratios[k][s->pairs / 4]);
    }
    return 0;
}

int main(int argc, char **argv) {
    static result results[LAYOUTS];
    settings s = parse(argc, argv);
    train_files data = { .count = 0 };
    int failed = 0;
    if (!train_files_find_sources(&data)) {
        fputs("error: the project's sources are neither in . nor beside the program\n", stderr);
        return 2;
    }
    gpt_config model = model_of(&s);
    bench_print_machine();
    if (s.pairs) {
        fflush(stdout);
        failed = bench_pairs(&s, data);
        train_files_free(&data);
        return failed;
    }
    printf("# gpt-%dx%d of %lld parameters, %d sequences of %d tokens a step, ranks are %s, best "
           "step of %d rounds\n",
        model.layers, model.width, (long long)gpt_param_count(model), BATCH, model.seq,
        s.backend == DT_BACKEND_PROCS ? "procs" : "threads", s.rounds);
    fflush(stdout); /* otherwise forked ranks would print the buffer again */
    for (int i = 0; i < LAYOUTS; i++) results[i] = result_make(&s, &layouts[i], data);
    for (int round = 0; round < s.rounds && !failed; round++)
        for (int i = 0; i < LAYOUTS && !failed; i++)
            failed = dt_run((dt_run_desc){ .ranks = ranks_of(&layouts[i]),
                                .backend = s.backend,
                                .user_bytes = sizeof results[i] },
                         run_rank, &results[i]) != DT_OK;
    if (!failed) {
        printf("layout,ranks,dp,tp,cp,kind,sp,zero,tokens_per_s,ratio_to_1,mem_params,mem_grads,"
               "mem_optim,mem_acts,"
               "mem_comm,mem_peak,bytes_dp,bytes_tp,bytes_cp,pp,schedule,bytes_pp\n");
        for (int i = 0; i < LAYOUTS; i++) print_row(&s, &layouts[i], &results[i], &results[0]);
        print_summary(&s, results);
    }
    train_files_free(&data);
    return failed;
}
