/* bench_train.c - training a GPT and a Llama, compared with PyTorch and llm.c
   Public domain or MIT, at your choice; see LICENSE.

       make build/bench_train && build/bench_train [--config gpt|llama] [--dtype f32|bf16] [--quick]
           [--rounds N] [--steps N] [--python PATH] [--variants LIST] [--openblas PATH]
           [--llmc PATH] [--profile [--zero1]]

   The models, with AdamW and clip 1:

       gpt-6x384    2 ranks, data parallel, each 8 sequences of 256 tokens. 6 layers, width 384, 6
                    heads, bytes as vocabulary
       llama-6x512  1 rank on one thread, 2 sequences of 1,024 tokens. 6 layers, width 512, 8 heads,
                    RMSNorm, rotary embedding, SwiGLU, no biases. The vocabulary of 2,048 gives the
                    head the share that it has in Llama 3 8B: about 6 % of the products

   dt, PyTorch and llm.c each train a model in their own processes, in turns (see turns.h). The
   median step counts, without the first two steps and without steps in which a process was stopped.

   PyTorch: peers/torch_ddp.py by --python, $DT_BENCH_PYTHON or python3, in each of --variants; the
   fastest is the peer. It starts from dt's initial weights and reads the same data in the same
   order. The losses of its first steps are compared with dt's, to show that both compute the same
   function.

   The rows f32-zero1 of gpt-6x384 train with ZeRO-1: both ranks hold all parameters and gradients,
   and each holds the optimizer state of one half. dt's losses have the bits of stage 0 (dt_zero.h,
   Order; not checked here). The peer is PyTorch with ZeroRedundancyOptimizer. zero1_over_f32 is
   dt's rate with ZeRO-1 divided by its rate without. rss_ratio_zero1 divides dt's memory with
   ZeRO-1 by that of PyTorch's fastest variant in f32 without it, as rss_ratio_f32 does for stage 0:
   ZeRO-1 sends as much as data parallelism, so it is what a user of dt who lacks memory turns on.

   llm.c, for gpt-6x384 only: --llmc PATH, a train_gpt2 built as peers/llmc_files.py describes.

   CONTENTS
     1. Settings
     2. dt's side: the worker
     3. Profile
     4. PyTorch
     5. Matrix product rate
     6. main */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_zero.h"

#include "examples/gpt.h"
#include "examples/train.h"

#include "tests/bench/bench.h"
#include "tests/bench/turns.h"

// ==== 1. Settings ===============================================================================

enum { MOST_RANKS = 2, CONFIGS = 2 };

/* A model and how it is trained; --config takes the part of `name` before the '-'. */
typedef struct workload {
    const char *name;
    int ranks, sequences; /* sequences a rank and step */
    gpt_config model;
    const char *variants; /* PyTorch's, as --variants */
} workload;

static const char *const variants_of_2 =
    "eager-fused-2x1,compile-fused-2x1,compile-fused-2x1-arena,eager-fused-1x2,compile-fused-1x2,"
    "compile-fused-1x2-arena,eager-fused-2x1-bf16,compile-fused-2x1-bf16,eager-fused-1x2-bf16,"
    "compile-fused-1x2-bf16,compile-fused-1x2-bf16-arena,compile-fused-2x1-bf16-pure,"
    "eager-fused-1x2-bf16-pure,compile-fused-1x2-bf16-pure";
static const char *const variants_of_1 =
    "eager-fused-1x1,compile-fused-1x1,compile-fused-1x1-arena,eager-fused-1x1-bf16,"
    "compile-fused-1x1-bf16,compile-fused-1x1-bf16-arena,eager-fused-1x1-bf16-pure,"
    "compile-fused-1x1-bf16-pure";

static const char *const variants_of_zero1 = "eager-fused-2x1-zero1,compile-fused-2x1-zero1";

static gpt_config gpt_of(int layers, int width, int heads, int seq) {
    return (gpt_config){ .layers = layers,
        .width = width,
        .heads = heads,
        .kv_heads = heads,
        .ffn = 4 * width,
        .seq = seq,
        .vocab = 256,
        .tied = 1 };
}

static gpt_config llama_of(int layers, int width, int heads, int ffn, int seq, int vocab) {
    return (gpt_config){ .layers = layers,
        .width = width,
        .heads = heads,
        .kv_heads = heads,
        .ffn = ffn,
        .seq = seq,
        .vocab = vocab,
        .arch = GPT_LLAMA };
}

static workload workload_of(int config, int quick) {
    if (config == 0 && quick)
        return (workload){ "gpt-1x64", 2, 8, gpt_of(1, 64, 2, 64), variants_of_2 };
    if (config == 0) return (workload){ "gpt-6x384", 2, 8, gpt_of(6, 384, 6, 256), variants_of_2 };
    if (quick)
        return (workload){ "llama-1x64", 1, 2, llama_of(1, 64, 2, 176, 64, 256), variants_of_1 };
    return (workload){ "llama-6x512", 1, 2, llama_of(6, 512, 8, 1408, 1024, 2048), variants_of_1 };
}

/* Returns which --config has this name, or -1. */
static int config_number(const char *name) {
    for (int i = 0; i < CONFIGS; i++) {
        const char *full = workload_of(i, 0).name;
        if (strlen(name) == strcspn(full, "-") && strncmp(name, full, strlen(name)) == 0) return i;
    }
    return -1;
}

typedef struct settings {
    int quick, profile, rounds, steps;
    int zero1;      /* 1: this process is a worker or --profile with ZeRO-1 */
    int config;     /* for a worker and --profile; else the only one to measure, or -1: all */
    dt_dtype dtype; /* for --worker and --profile */
    /* this process is dt's worker: "train", or the file into which it writes its weights */
    const char *worker;
    const char *only; /* the only dtype to measure; NULL: all */
    const char *python, *variants, *openblas, *llmc;
} settings;

static workload workload_of_worker(const settings *s) {
    workload w = workload_of(s->config > 0 ? s->config : 0, s->quick);
    w.model.dtype = s->dtype;
    return w;
}

static double tokens_of_step(const workload *w) {
    return (double)w->ranks * w->sequences * w->model.seq;
}

static settings parse(int argc, char **argv) {
    settings s = { .rounds = 5, .steps = 4, .config = -1, .python = getenv("DT_BENCH_PYTHON") };
    const char *v;
    for (int i = 1; i < argc; i++) {
        int good = 1;
        if (strcmp(argv[i], "--quick") == 0)
            s.quick = 1, s.rounds = 1, s.steps = 3;
        else if (strcmp(argv[i], "--profile") == 0)
            s.profile = 1;
        else if (strcmp(argv[i], "--zero1") == 0)
            s.zero1 = 1;
        else if ((v = bench_option(argc, argv, &i, "--rounds")))
            good = (s.rounds = atoi(v)) > 0 && s.rounds <= 100;
        else if ((v = bench_option(argc, argv, &i, "--steps")))
            good = (s.steps = atoi(v)) > 0 && s.steps <= 100;
        else if ((v = bench_option(argc, argv, &i, "--python")))
            s.python = v;
        else if ((v = bench_option(argc, argv, &i, "--variants")))
            s.variants = v;
        else if ((v = bench_option(argc, argv, &i, "--openblas")))
            s.openblas = v;
        else if ((v = bench_option(argc, argv, &i, "--llmc")))
            s.llmc = v;
        else if ((v = bench_option(argc, argv, &i, "--worker")))
            s.worker = v;
        else if ((v = bench_option(argc, argv, &i, "--config")))
            good = (s.config = config_number(v)) >= 0;
        else if ((v = bench_option(argc, argv, &i, "--dtype"))) {
            s.only = v;
            s.dtype = strcmp(v, "bf16") == 0 ? DT_BF16 : DT_F32;
            good = strcmp(v, dt_dtype_name(s.dtype)) == 0;
        } else
            good = 0;
        if (!good)
            bench_refuse(argc, argv, i,
                "--config gpt|llama --dtype f32|bf16 --quick --rounds N --steps N --python PATH "
                "--variants LIST --openblas PATH --llmc PATH --profile --zero1");
    }
    if (s.zero1 && !s.profile && !s.worker) {
        fprintf(stderr, "error: --zero1 needs --profile; all other runs measure ZeRO-1 too\n");
        exit(2);
    }
    return s;
}

// ==== 2. dt's side: the worker ==================================================================

static void print_step(dt_ctx *ctx, const train_row *row, void *user) {
    (void)ctx;
    (void)user;
    printf("step,%lld,%.9g,%.3f\n", (long long)row->step, row->loss, row->ms);
    fflush(stdout);
}

/* Writes all parameters as floats, in order of registration, into the file `user`. */
static void write_weights(dt_ctx *ctx, gpt *model, void *user) {
    FILE *f = fopen((const char *)user, "wb");
    (void)model;
    for (int i = 0; f && i < dt_param_count(ctx); i++) {
        const dt_tensor *t = dt_param_get(ctx, i);
        size_t n = (size_t)dt_count(t->shape);
        float *values = (float *)malloc(n * sizeof *values);
        if (!values || dt_read(t, values) != DT_OK || fwrite(values, sizeof *values, n, f) != n)
            dt_fail(ctx, DT_ERR_IO, "the weights cannot be written to %s", (const char *)user);
        free(values);
    }
    if (!f || fclose(f) != 0)
        dt_fail(ctx, DT_ERR_IO, "the weights cannot be written to %s", (const char *)user);
}

static void quiet(void *user, int level, int rank, const char *text) {
    (void)user;
    (void)level;
    (void)rank;
    (void)text;
}

/* Trains `steps` steps. Prints a failure as one line "error,TEXT". */
static int worker(
    const settings *s, train_config config, const dt_kernels *kernels, int64_t steps) {
    dt_report report = { DT_OK, 0, "", 0 };
    dt_host host = *dt_host_default();
    host.log = quiet;
    workload w = workload_of_worker(s);
    config.model = w.model;
    config.mesh.dp = w.ranks;
    config.zero = (dt_zero_desc){ .stage = s->zero1,
        .optimizer = DT_ADAMW,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .weight_decay = 0.1,
        .clip = 1 };
    config.lr = (dt_lr_desc){ 3e-4, DT_LR_CONSTANT, 0, 1, 1, 0 };
    config.micro_batch = w.sequences;
    config.accum = 1;
    config.stop_at = steps;
    /* a large timeout, because this process may be stopped for long */
    if (dt_run((dt_run_desc){ .ranks = w.ranks,
                   .timeout_s = 1e8,
                   .host = &host,
                   .kernels = kernels,
                   .report = &report },
            train, &config) == DT_OK)
        return 0;
    printf("error,%s\n", report.text);
    return 1;
}

static int run_worker(const settings *s, train_config config) {
    int trains = strcmp(s->worker, "train") == 0;
    config.on_step = print_step;
    config.at_end = trains ? NULL : write_weights;
    config.user = (void *)(uintptr_t)s->worker;
    return worker(s, config, NULL, trains ? INT64_MAX : 0);
}

// ==== 3. Profile ================================================================================

/* A table of wrapped kernels measures the processor time of each kernel, on which other load has
   little influence. Each thread has its own figures; rank 0 prints those of its thread. */
enum {
#define PROFILE_ID(k) P_##k,
    DT_KERNELS(PROFILE_ID)
#undef PROFILE_ID
        P_matmul_nn,
    P_matmul_tn,
    PROFILE_ROWS /* P_matmul itself: forward, NT */
};
static const char *const profile_names[PROFILE_ROWS] = {
#define PROFILE_NAME(k) #k,
    DT_KERNELS(PROFILE_NAME)
#undef PROFILE_NAME
        "matmul (NN)",
    "matmul (TN)"
};

typedef struct profile_row {
    double seconds, gflop;
    int64_t calls;
} profile_row;
static _Thread_local profile_row profile[PROFILE_ROWS];

static void profile_add(int id, double seconds, double gflop) {
    profile[id].seconds += seconds;
    profile[id].gflop += gflop;
    profile[id].calls++;
}

/* The products of one form, size and set of fused operations. */
typedef struct product_row {
    char name[96];
    profile_row sum;
} product_row;
enum { MOST_PRODUCTS = 64 };
static _Thread_local product_row product_rows[MOST_PRODUCTS];

static void profile_product(const dt_matmul_args *a, double seconds, double gflop) {
    char name[96];
    int64_t batch = a->batch ? a->batch : 1;
    snprintf(name, sizeof name, "%c%c %lldx%lldx%lldx%lld%s%s%s%s%s", a->trans_a ? 'T' : 'N',
        a->trans_b ? 'T' : 'N', (long long)batch, (long long)a->m, (long long)a->n, (long long)a->k,
        a->bias ? " bias" : "", a->activation ? " activation" : "",
        a->activation_backward ? " backward" : "", a->residual ? " residual" : "",
        a->accumulate ? " accumulate" : "");
    for (product_row *r = product_rows; r < product_rows + MOST_PRODUCTS; r++) {
        if (r->name[0] && strcmp(r->name, name) != 0) continue;
        memcpy(r->name, name, sizeof name);
        r->sum.seconds += seconds, r->sum.gflop += gflop, r->sum.calls++;
        return;
    }
}

static int profile_kind(const dt_matmul_args *a) {
    return a->trans_a ? P_matmul_tn : a->trans_b ? P_matmul : P_matmul_nn;
}

static double profile_gflop(const dt_matmul_args *a) {
    return 2e-9 * (double)a->m * (double)a->n * (double)a->k * (double)(a->batch ? a->batch : 1);
}

#define PROFILE_WRAPPER(k) \
    static dt_status timed_##k(const dt_##k##_args *args, void *stream) { \
        double start = bench_thread_seconds(); \
        dt_status status = dt_kernels_cpu()->k(args, stream); \
        double seconds = bench_thread_seconds() - start; \
        const dt_matmul_args *a = (const dt_matmul_args *)(const void *)args; \
        int product = P_##k == P_matmul; \
        if (product) profile_product(a, seconds, profile_gflop(a)); \
        profile_add(product ? profile_kind(a) : P_##k, seconds, product ? profile_gflop(a) : 0); \
        return status; \
    }
DT_KERNELS(PROFILE_WRAPPER)

typedef struct profile_sum {
    double wall, begin, processor;
    int64_t steps;
} profile_sum;

/* Counts the steps after the warm-up. Rank 0 makes all its calls from one thread. */
static void profile_step(dt_ctx *ctx, const train_row *row, void *user) {
    profile_sum *sum = (profile_sum *)user;
    (void)ctx;
    if (row->step == WARM_UP) {
        memset(profile, 0, sizeof profile);
        memset(product_rows, 0, sizeof product_rows);
        sum->begin = bench_thread_seconds();
    } else if (row->step > WARM_UP) {
        sum->wall += row->ms / 1000;
        sum->processor = bench_thread_seconds() - sum->begin;
        sum->steps++;
    }
}

static void profile_line(
    const char *name, double calls, double seconds, double gflop, const profile_sum *sum) {
    double steps = (double)sum->steps;
    char text[32];
    printf("%s,%.1f,%.2f,%.4f,%s\n", name, calls / steps, 1000 * seconds / steps,
        seconds / sum->wall,
        bench_number(text, sizeof text, gflop > 0 ? gflop / seconds : NAN, "%.1f"));
}

/* Prints rank 0's milliseconds of a step by product (form, batch x M x N x K) and by kernel. "other"
   is autograd and copies between ranks, "idle" is waiting for the other rank or for the processor. */
static void profile_print(dt_ctx *ctx, gpt *model, void *user) {
    const profile_sum *sum = (const profile_sum *)user;
    double left = sum->processor;
    (void)ctx;
    (void)model;
    for (const product_row *r = product_rows; r < product_rows + MOST_PRODUCTS; r++)
        if (r->name[0])
            printf("# product %s: %.1f calls, %.2f ms, %.1f GFLOP/s\n", r->name,
                (double)r->sum.calls / (double)sum->steps,
                1000 * r->sum.seconds / (double)sum->steps, r->sum.gflop / r->sum.seconds);
    printf("kernel,calls,ms,share,gflops\n");
    for (int i = 0; i < PROFILE_ROWS; i++) {
        const profile_row *r = &profile[i];
        if (!r->calls) continue;
        left -= r->seconds;
        profile_line(i == P_matmul ? "matmul (NT)" : profile_names[i], (double)r->calls, r->seconds,
            r->gflop, sum);
    }
    profile_line("other", (double)sum->steps, left, 0, sum);
    profile_line("idle", (double)sum->steps, fmax(0, sum->wall - sum->processor), 0, sum);
    printf("summary,step_ms,%.2f\n", 1000 * sum->wall / (double)sum->steps);
}

static int run_profile(const settings *s, train_config config) {
    profile_sum sum = { 0, 0, 0, 0 };
    dt_kernels timed = *dt_kernels_cpu();
#define PROFILE_ENTRY(k) timed.k = timed_##k;
    DT_KERNELS(PROFILE_ENTRY)
#undef PROFILE_ENTRY
    config.on_step = profile_step;
    config.at_end = profile_print;
    config.user = &sum;
    bench_print_machine();
    return worker(s, config, &timed, WARM_UP + s->rounds * s->steps);
}

// ==== 4. PyTorch ================================================================================

/* What torch_start needs besides the variant. */
typedef struct torch_job {
    const torch *torch;
    const char *weights; /* the file with dt's initial weights */
    const train_files *data;
    const workload *work;
} torch_job;

static int torch_start(contestant *c, const char *variant, const void *user) {
    const torch_job *j = (const torch_job *)user;
    const gpt_config m = j->work->model;
    const int sizes[] = { m.layers, m.width, m.heads, m.ffn, m.seq, m.vocab,
        j->work->ranks * j->work->sequences };
    const char *const options[] = { "--layers", "--width", "--heads", "--ffn", "--seq", "--vocab",
        "--batch" };
    enum { SIZES = sizeof sizes / sizeof *sizes };
    const char *words[MOST_WORDS] = { j->torch->python, j->torch->script, "--variant", variant,
        "--arch", m.arch == GPT_LLAMA ? "llama" : "gpt2", "--weights", j->weights };
    char text[SIZES][16], name[96];
    int n = 8;
    for (int i = 0; i < SIZES; i++) {
        snprintf(text[i], sizeof text[i], "%d", sizes[i]);
        words[n++] = options[i];
        words[n++] = text[i];
    }
    words[n++] = "--data";
    for (int i = 0; i < j->data->count && n + 1 < MOST_WORDS; i++) words[n++] = j->data->path[i];
    snprintf(name, sizeof name, "pytorch-%.30s-%.50s", j->torch->version, variant);
    return contestant_start(c, name, words, NULL);
}

// ==== 5. Matrix product rate ===================================================================

/* The matrix products of the model's feed-forward layer, one set for each rank: the forward and
   both gradients. */
typedef struct product_rate {
    bench_product products[3][MOST_RANKS];
    double rate[2][MOST_STEPS]; /* of dt and of OpenBLAS, round by round */
    int rounds, who;            /* who: 1 without OpenBLAS */
    int ranks;
} product_rate;

static int product_rate_make(product_rate *p, const workload *w, const bench_blas *blas) {
    int M = w->sequences * w->model.seq, C = w->model.width, F = w->model.ffn, made = 1;
    memset(p, 0, sizeof *p);
    p->who = blas->library ? 2 : 1;
    p->ranks = w->ranks;
    for (int r = 0; r < p->ranks; r++) {
        p->products[0][r] =
            (bench_product){ .dtype = DT_F32, .m = M, .n = F, .k = C, .trans_b = 1, .blas = blas };
        p->products[1][r] =
            (bench_product){ .dtype = DT_F32, .m = M, .n = C, .k = F, .blas = blas };
        p->products[2][r] =
            (bench_product){ .dtype = DT_F32, .m = F, .n = C, .k = M, .trans_a = 1, .blas = blas };
        for (int i = 0; i < 3; i++)
            made = bench_product_make(&p->products[i][r], (uint32_t)(10 * i + r)) && made;
    }
    return made;
}

/* Some bursts of dt and OpenBLAS: GFLOP/s over all three products, one after another. */
static void product_rate_turn(product_rate *p, int bursts) {
    for (int i = 0; i < bursts && p->rounds < MOST_STEPS; i++, p->rounds++)
        for (int who = 0; who < p->who; who++) {
            double inverse = 0;
            for (int kind = 0; kind < 3; kind++)
                inverse += 1 / bench_burst_run(p->products[kind], p->ranks, who,
                                   2 * bench_calls(p->products[kind], who))
                                   .wall;
            p->rate[who][p->rounds] = 3 / inverse;
        }
}

static void product_rate_free(product_rate *p) {
    for (int kind = 0; kind < 3; kind++)
        for (int r = 0; r < p->ranks; r++) bench_product_free(&p->products[kind][r]);
}

// ==== 6. main ===================================================================================

enum {
    DT_IN_F32 = 0,
    DT_IN_BF16,
    TORCH_IN_F32,
    TORCH_IN_BF16,
    DT_ZERO1,
    TORCH_ZERO1,
    LLMC,
    CONTESTANTS
};

typedef struct match {
    settings s;
    workload work;
    contestant c[CONTESTANTS];
    int there[CONTESTANTS];
    product_rate products;
} match;

static int is_measured(const match *m, const char *dtype) {
    return !m->s.only || strcmp(m->s.only, dtype) == 0;
}

/* Starts a worker of this program for the match's workload. */
static int worker_start(
    contestant *c, const match *m, const char *does, const char *dtype, int zero1) {
    char config[16];
    const char *words[10] = { "/proc/self/exe", "--worker", does, "--dtype", dtype, "--config",
        config };
    int n = 7;
    if (m->s.quick) words[n++] = "--quick";
    if (zero1) words[n++] = "--zero1";
    snprintf(config, sizeof config, "%.*s", (int)strcspn(m->work.name, "-"), m->work.name);
    return contestant_start(c, zero1 ? "dt with ZeRO-1" : "dt", words, NULL);
}

static void start_dt(match *m, int who, const char *dtype) {
    contestant *c = &m->c[who];
    if (!is_measured(m, dtype)) return;
    m->there[who] =
        worker_start(c, m, "train", dtype, who == DT_ZERO1) && contestant_turn(c, WARM_UP);
    c->n_ms = 0;
    c->processor = 0;
    if (m->there[who]) return;
    printf("# dt in %s: %s\n", dtype, c->error);
    contestant_end(c);
}

static void start_torch(match *m, const torch *t, const train_files *data, const char *weights) {
    const torch_job job = { t, weights, data, &m->work };
    for (int bf16 = 0; bf16 < 2; bf16++) {
        int who = bf16 ? TORCH_IN_BF16 : TORCH_IN_F32;
        if (m->there[bf16 ? DT_IN_BF16 : DT_IN_F32])
            m->there[who] = contestant_best(&m->c[who],
                m->s.variants ? m->s.variants : m->work.variants, bf16, torch_start, &job);
    }
    if (m->there[DT_ZERO1])
        m->there[TORCH_ZERO1] =
            contestant_best(&m->c[TORCH_ZERO1], variants_of_zero1, 0, torch_start, &job);
}

static void start_llmc(match *m) {
    char folder[4096];
    const char *words[] = { "stdbuf", "-oL", m->s.llmc, NULL };
    contestant *c = &m->c[LLMC];
    if (!m->s.llmc || !realpath(m->s.llmc, folder)) {
        printf("# peer: llm.c is not %s; tests/bench/peers/llmc_files.py describes how to build it "
               "for --llmc PATH\n",
            m->s.llmc ? "there" : "asked for");
        return;
    }
    char *program = strdup(folder);
    words[2] = program;
    *strrchr(folder, '/') = 0;
    m->there[LLMC] = contestant_start(c, "llm.c", words, folder) && contestant_turn(c, 1);
    c->n_ms = 0;
    c->processor = 0;
    if (!m->there[LLMC]) printf("# llm.c does not work: %s\n", c->error);
    free(program);
}

static double rate_of(const match *m, int who) {
    return m->there[who] ? tokens_of_step(&m->work) / (median(m->c[who].ms, m->c[who].n_ms) / 1000)
                         : NAN;
}

/* FLOPs per token of the products with parameters, forward and backward, without attention's. */
static double matrix_flop(const match *m) {
    gpt_config c = m->work.model;
    c.seq = 0;
    return gpt_flops_per_token(c);
}

static void print_row(const match *m, int who, const char *dtype, int peer) {
    double ours = rate_of(m, who), theirs = rate_of(m, peer), MiB = 1048576;
    char text[3][32];
    if (!m->there[who]) return;
    printf("%s,%d,%s,%.1f,%.2f,%s,%s,%s,%.1f,%s\n", m->work.name, m->work.ranks, dtype, ours,
        1e-9 * matrix_flop(m) * ours, m->there[peer] ? m->c[peer].name : "none",
        bench_number(text[0], sizeof text[0], theirs, "%.1f"),
        bench_number(text[1], sizeof text[1], ours / theirs, "%.3f"), m->c[who].rss / MiB,
        bench_number(text[2], sizeof text[2], m->there[peer] ? m->c[peer].rss / MiB : NAN, "%.1f"));
}

/* The largest relative difference between dt's and PyTorch's first losses in f32. */
static double loss_difference(const match *m) {
    double most = 0;
    for (int i = 0; i < CHECKED && m->there[TORCH_IN_F32]; i++) {
        double a = m->c[DT_IN_F32].check[i], b = m->c[TORCH_IN_F32].check[i];
        if (isfinite(a) && isfinite(b)) most = fmax(most, fabs(a - b) / fabs(b));
    }
    return m->there[TORCH_IN_F32] ? most : NAN;
}

static double rss_ratio(const match *m, int who, int peer) {
    return m->there[who] && m->there[peer] ? m->c[who].rss / m->c[peer].rss : NAN;
}

/* Names of gpt-6x384's figures have no prefix, those of llama-6x512 begin with llama_. */
static void print_summary(const match *m) {
    double ours = median(m->products.rate[0], m->products.rounds);
    double theirs = m->products.who == 2 ? median(m->products.rate[1], m->products.rounds) : NAN;
    double f32 = rate_of(m, DT_IN_F32), bf16 = rate_of(m, DT_IN_BF16);
    const struct {
        const char *name;
        double value;
    } figures[] = { { "ratio_pytorch_f32", f32 / rate_of(m, TORCH_IN_F32) },
        { "ratio_llmc_f32", f32 / rate_of(m, LLMC) }, { "product_rate_dt_gflops", ours },
        { "product_rate_openblas_gflops", theirs },
        { "product_rate_share_f32", 1e-9 * matrix_flop(m) * f32 / fmax(ours, theirs) },
        { "rss_ratio_f32", rss_ratio(m, DT_IN_F32, TORCH_IN_F32) },
        { "rss_ratio_zero1", rss_ratio(m, DT_ZERO1, TORCH_IN_F32) },
        { "zero1_over_f32", rate_of(m, DT_ZERO1) / f32 }, { "bf16_over_f32", bf16 / f32 },
        { "ratio_pytorch_bf16", bf16 / rate_of(m, TORCH_IN_BF16) },
        { "rss_ratio_bf16", rss_ratio(m, DT_IN_BF16, TORCH_IN_BF16) },
        { "loss_difference_f32", loss_difference(m) } };
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++) {
        char text[32];
        printf("summary,%s%s,%s\n", m->work.model.arch == GPT_LLAMA ? "llama_" : "",
            figures[i].name, bench_number(text, sizeof text, figures[i].value, "%.4g"));
    }
}

static void print_contestants(const match *m) {
    double MiB = 1048576;
    for (int i = 0; i < CONTESTANTS; i++)
        if (m->there[i])
            printf(
                "# %s: %d steps, median %.1f ms, best %.1f ms, processor %.1f ms; memory peak %.1f "
                "MiB, at the end %.1f MiB with shared pages counted once\n",
                m->c[i].name, m->c[i].n_ms, median(m->c[i].ms, m->c[i].n_ms),
                least(m->c[i].ms, m->c[i].n_ms), 1000 * m->c[i].processor / fmax(m->c[i].n_ms, 1),
                m->c[i].rss / MiB, m->c[i].pss / MiB);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const contestant *dt = &m->c[DT_IN_F32 + bf16], *peer = &m->c[TORCH_IN_F32 + bf16];
        if (!m->there[TORCH_IN_F32 + bf16]) continue;
        printf("# losses of the first steps in %s, dt and PyTorch:", bf16 ? "bf16" : "f32");
        for (int i = 0; i < CHECKED; i++)
            printf(" %.6f %.6f%s", dt->check[i], peer->check[i], i + 1 < CHECKED ? "," : "\n");
    }
}

/* Runs all contestants in turns. llm.c, whose steps take ten seconds, has shorter turns. */
static void play(match *m) {
    for (int round = 0; round < m->s.rounds; round++) {
        product_rate_turn(&m->products, m->s.quick ? 1 : 5);
        for (int i = 0; i < CONTESTANTS; i++)
            if (m->there[i] && !contestant_turn(&m->c[i], i == LLMC ? 1 : m->s.steps)) {
                printf("# %s ended early: %s\n", m->c[i].name, m->c[i].error);
                m->there[i] = 0;
            }
    }
    for (int i = 0; i < CONTESTANTS; i++) {
        if (m->there[i]) contestant_memory(&m->c[i]);
        contestant_end(&m->c[i]);
    }
}

/* Lets a worker write dt's initial weights, so that this process stays small. */
static int make_weights(const match *m, const char *path) {
    contestant *c = (contestant *)malloc(sizeof *c);
    int made = c && worker_start(c, m, path, "f32", 0);
    if (made) contestant_step(c); /* returns when the worker ends, which makes no step */
    if (made && strcmp(c->error, "it ended without an error message") != 0)
        printf("# dt: %s\n", c->error);
    if (made) contestant_end(c);
    free(c);
    return made;
}

/* Measures one workload; 0 if dt does not work in any dtype. */
static int run_match(match *m, const torch *t, const bench_blas *blas, const train_files *data,
    const char *weights) {
    if (!product_rate_make(&m->products, &m->work, blas) || !make_weights(m, weights)) return 0;
    printf("# %s\n", m->work.name);
    start_dt(m, DT_IN_F32, "f32");
    start_dt(m, DT_IN_BF16, "bf16");
    if (m->work.ranks > 1) start_dt(m, DT_ZERO1, "f32");
    if (t->version[0]) start_torch(m, t, data, weights);
    if (!m->s.quick && m->work.model.arch == GPT_GPT2) start_llmc(m);
    play(m);
    product_rate_free(&m->products);
    print_contestants(m);
    return m->there[DT_IN_F32] || m->there[DT_IN_BF16];
}

static void print_result(const match *matches) {
    printf("config,ranks,dtype,tokens_per_s,gflops,peer,peer_tokens_per_s,ratio,peak_rss_mib,peer_"
           "peak_rss_mib\n");
    for (const match *m = matches; m < matches + CONFIGS; m++) {
        print_row(m, DT_IN_F32, "f32", TORCH_IN_F32);
        if (m->there[LLMC]) print_row(m, DT_IN_F32, "f32", LLMC);
        print_row(m, DT_IN_BF16, "bf16", TORCH_IN_BF16);
        print_row(m, DT_ZERO1, "f32-zero1", TORCH_ZERO1);
    }
    for (int i = 0; i < CONFIGS; i++)
        if (matches[i].work.name) print_summary(&matches[i]);
}

int main(int argc, char **argv) {
    train_config config = { .stop_at = 0 };
    settings s = parse(argc, argv);
    char weights[] = "/tmp/bench_train.XXXXXX";
    if (!train_files_find_sources(&config.data)) {
        fputs("error: the project's sources are neither in . nor beside the program\n", stderr);
        return 2;
    }
    if (s.worker) return run_worker(&s, config);
    if (s.profile) return run_profile(&s, config);
    match *matches = (match *)calloc(CONFIGS, sizeof *matches);
    int fd = mkstemp(weights), failed = !matches || fd < 0;
    bench_print_machine();
    bench_blas blas = bench_blas_find(s.openblas);
    torch t = { .version = "" };
    if (!s.quick) t = torch_find(s.python, "torch_ddp.py");
    for (int i = 0; !failed && i < CONFIGS; i++) {
        if (s.config >= 0 && s.config != i) continue;
        matches[i].s = s;
        matches[i].work = workload_of(i, s.quick);
        failed = !run_match(&matches[i], &t, &blas, &config.data, weights);
    }
    if (!failed) print_result(matches);
    if (fd >= 0) {
        close(fd);
        unlink(weights);
    }
    free(matches);
    train_files_free(&config.data);
    return failed;
}
