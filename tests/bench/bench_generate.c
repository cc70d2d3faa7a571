/* bench_generate.c - generating text with a KV cache, compared with PyTorch and llama.cpp
   Public domain or MIT, at your choice; see LICENSE.

       make build/bench_generate && build/bench_generate [--dtype f32|bf16] [--quick] [--rounds N]
           [--tokens N] [--python PATH] [--variants LIST] [--llama-python PATH] [--profile]

   The model is gpt2-124M with random weights: 12 layers, width 768, 12 heads, 1,024 positions,
   50,257 tokens. One rank on one thread continues one prompt of 64 tokens by --tokens tokens, each
   time the most likely one. The clock starts after the prompt and its first token.

   The limit of one sequence is memory: every token reads all weights once, those of the layers and
   of the head, and computes two FLOPs for each. `share_of_triad` is tokens_per_s divided by this
   limit, the rate of the triad (bench.h) divided by the weights' bytes.

   dt and its peers run in their own processes, in turns (see turns.h), and the median run counts.
   Each also computes the mean cross-entropy of 8 given tokens after the prompt, one at a time with
   its cache; the summary has the largest difference from dt's, to show that all compute the same
   function.

   PyTorch: peers/torch_generate.py by --python, $DT_BENCH_PYTHON or python3, in each of --variants;
   the fastest is the peer. llama.cpp: peers/llama_cpp_generate.py by --llama-python or
   $DT_BENCH_LLAMA_PYTHON, a python with the packages llama-cpp-python and gguf. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_zero.h"

#include "examples/gpt.h"

#include "tests/bench/bench.h"
#include "tests/bench/turns.h"

enum { PROMPT = 64, GIVEN = 8, TRIAD = 1 << 24 };

typedef struct settings {
    int quick, profile, rounds, tokens;
    dt_dtype dtype;     /* for --worker and --profile */
    const char *worker; /* this process is dt's worker: the file for its weights, or "generate" */
    const char *only;   /* the only dtype to measure; NULL: all */
    const char *python, *variants, *llama_python;
} settings;

static gpt_config model_of(const settings *s) {
    int C = s->quick ? 64 : 768;
    return (gpt_config){ .layers = s->quick ? 2 : 12,
        .width = C,
        .heads = C / 64,
        .kv_heads = C / 64,
        .ffn = 4 * C,
        .seq = s->quick ? 256 : 1024,
        .vocab = s->quick ? 512 : 50257,
        .tied = 1,
        .dtype = s->dtype };
}

static const char *config_name(const settings *s) { return s->quick ? "gpt2-quick" : "gpt2-124M"; }

/* The bytes of the weights that one token reads. */
static double weight_bytes(const settings *s, dt_dtype dtype) {
    gpt_config c = model_of(s);
    c.seq = 0; /* gpt_flops_per_token without attention: 6 per weight */
    return gpt_flops_per_token(c) / 6 * (double)dt_dtype_size(dtype);
}

static settings parse(int argc, char **argv) {
    settings s = { .rounds = 5,
        .tokens = 64,
        .python = getenv("DT_BENCH_PYTHON"),
        .llama_python = getenv("DT_BENCH_LLAMA_PYTHON") };
    const char *v;
    for (int i = 1; i < argc; i++) {
        int good = 1;
        if (strcmp(argv[i], "--quick") == 0)
            s.quick = 1, s.rounds = 1, s.tokens = 16;
        else if (strcmp(argv[i], "--profile") == 0)
            s.profile = 1;
        else if ((v = bench_option(argc, argv, &i, "--rounds")))
            good = (s.rounds = atoi(v)) > 0 && s.rounds <= 100;
        else if ((v = bench_option(argc, argv, &i, "--tokens")))
            good = (s.tokens = atoi(v)) > 0 && s.tokens <= 128;
        else if ((v = bench_option(argc, argv, &i, "--python")))
            s.python = v;
        else if ((v = bench_option(argc, argv, &i, "--variants")))
            s.variants = v;
        else if ((v = bench_option(argc, argv, &i, "--llama-python")))
            s.llama_python = v;
        else if ((v = bench_option(argc, argv, &i, "--worker")))
            s.worker = v;
        else if ((v = bench_option(argc, argv, &i, "--dtype"))) {
            s.only = v;
            s.dtype = strcmp(v, "bf16") == 0 ? DT_BF16 : DT_F32;
            good = strcmp(v, dt_dtype_name(s.dtype)) == 0;
        } else
            good = 0;
        if (!good)
            bench_refuse(argc, argv, i,
                "--dtype f32|bf16 --quick --rounds N --tokens N --python PATH --variants LIST "
                "--llama-python PATH --profile");
    }
    return s;
}

// ==== dt's side: the worker =====================================================================

/* The ids of the prompt and of the tokens after it, which the peers compute, too. */
static int32_t id_at(int i, int vocab) { return (int32_t)((int64_t)i * 7919 % vocab); }

/* The mean cross-entropy of GIVEN tokens after the prompt, one at a time. */
static double given_cross_entropy(gpt *m) {
    int V = m->config.vocab;
    int32_t ids[PROMPT + GIVEN];
    double sum = 0;
    gpt_cache *c = (gpt_cache *)malloc(sizeof *c);
    float *logits = (float *)malloc((size_t)V * sizeof *logits);
    for (int i = 0; i < PROMPT + GIVEN; i++) ids[i] = id_at(i, V);
    if (c && logits && gpt_cache_open(c, m) == DT_OK) {
        for (int i = 0; i < GIVEN; i++) {
            int first = i ? PROMPT + i - 1 : 0;
            dt_tensor *x = gpt_cache_logits(c, ids + first, PROMPT + i - first);
            double all = 0;
            x = dt_cast(x, DT_F32);
            if (!x || dt_read(x, logits) != DT_OK) break;
            for (int j = 0; j < V; j++) all += exp((double)logits[j]);
            sum += log(all) - (double)logits[ids[PROMPT + i]];
            dt_reset(m->ctx);
        }
        gpt_cache_close(c);
    }
    free(logits);
    free(c);
    return sum / GIVEN;
}

typedef struct run {
    double start, end; /* when the first and the newest token after the prompt were there */
} run;

static int on_token(const int32_t *ids, int n, void *user) {
    run *r = (run *)user;
    (void)ids;
    r->end = bench_now();
    if (n == PROMPT + 1) r->start = r->end;
    return 0;
}

/* Generates once. Returns the milliseconds of `tokens` tokens. */
static double generate_once(gpt *m, int tokens) {
    int32_t ids[PROMPT + 1 + 128];
    run r = { 0, 0 };
    for (int i = 0; i < PROMPT; i++) ids[i] = id_at(i, m->config.vocab);
    gpt_generate(m, ids, PROMPT, PROMPT + 1 + tokens,
        (gpt_sampling){ .temperature = 0, .stop = on_token, .user = &r });
    return 1000 * (r.end - r.start);
}

/* Writes all parameters as floats, in order of registration. */
static int write_weights(const dt_ctx *ctx, const char *path) {
    FILE *f = fopen(path, "wb");
    int good = f != NULL;
    for (int i = 0; good && i < dt_param_count(ctx); i++) {
        const dt_tensor *t = dt_param_get(ctx, i);
        size_t n = (size_t)dt_count(t->shape);
        float *values = (float *)malloc(n * sizeof *values);
        good = values && dt_read(t, values) == DT_OK && fwrite(values, sizeof *values, n, f) == n;
        free(values);
    }
    return f && fclose(f) == 0 && good;
}

static int run_worker(const settings *s) {
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1 });
    gpt *m = (gpt *)malloc(sizeof *m);
    if (!ctx || !m) return 1;
    *m = gpt_register(ctx, model_of(s));
    if (strcmp(s->worker, "generate") != 0) {
        if (!write_weights(ctx, s->worker)) printf("error,the weights cannot be written\n");
        return 0;
    }
    double check = given_cross_entropy(m);
    for (long step = 1; dt_error(ctx) == DT_OK; step++) {
        double ms = generate_once(m, s->tokens);
        printf("step,%ld,%.9g,%.3f\n", step, check, ms);
        fflush(stdout);
    }
    printf("error,%s\n", dt_error_text(ctx));
    return 1;
}

// ==== Profile ===================================================================================

enum {
#define PROFILE_ID(k) P_##k,
    DT_KERNELS(PROFILE_ID)
#undef PROFILE_ID
        PROFILE_ROWS
};
static const char *const profile_names[PROFILE_ROWS] = {
#define PROFILE_NAME(k) #k,
    DT_KERNELS(PROFILE_NAME)
#undef PROFILE_NAME
};
static struct {
    double seconds;
    int64_t calls;
} profile[PROFILE_ROWS];

#define PROFILE_WRAPPER(k) \
    static dt_status timed_##k(const dt_##k##_args *args, void *stream) { \
        double start = bench_thread_seconds(); \
        dt_status status = dt_kernels_cpu()->k(args, stream); \
        profile[P_##k].seconds += bench_thread_seconds() - start; \
        profile[P_##k].calls++; \
        return status; \
    }
DT_KERNELS(PROFILE_WRAPPER)

/* Clears the profile when the clock starts. */
static int on_profiled_token(const int32_t *ids, int n, void *user) {
    double *start = (double *)user;
    (void)ids;
    if (n == PROMPT + 1) {
        memset(profile, 0, sizeof profile);
        *start = bench_thread_seconds();
    }
    return 0;
}

/* The processor time of one call of bench_thread_seconds. */
static double clock_seconds(void) {
    enum { CALLS = 1000 };
    double start = bench_thread_seconds();
    for (int i = 0; i < CALLS; i++) bench_thread_seconds();
    return (bench_thread_seconds() - start) / CALLS;
}

/* Prints the microseconds of processor time a token by kernel, without the time that the clock
   takes. "other" is the tape, memory and sampling. */
static int run_profile(const settings *s) {
    int32_t ids[PROMPT + 1 + 128];
    dt_kernels timed = *dt_kernels_cpu();
#define PROFILE_ENTRY(k) timed.k = timed_##k;
    DT_KERNELS(PROFILE_ENTRY)
#undef PROFILE_ENTRY
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = &timed });
    gpt *m = (gpt *)malloc(sizeof *m);
    double start = 0;
    if (!ctx || !m) return 1;
    *m = gpt_register(ctx, model_of(s));
    for (int i = 0; i < PROMPT; i++) ids[i] = id_at(i, m->config.vocab);
    gpt_generate(m, ids, PROMPT, PROMPT + 1 + s->tokens,
        (gpt_sampling){ .temperature = 0, .stop = on_profiled_token, .user = &start });
    double all = bench_thread_seconds() - start, clock = clock_seconds(), n = s->tokens;
    for (int i = 0; i < PROFILE_ROWS; i++) {
        profile[i].seconds -= clock * (double)profile[i].calls;
        all -= 2 * clock * (double)profile[i].calls;
    }
    double left = all;
    bench_print_machine();
    printf("kernel,calls,us,share\n");
    for (int i = 0; i < PROFILE_ROWS; i++) {
        left -= profile[i].seconds;
        if (profile[i].calls)
            printf("%s,%.1f,%.2f,%.4f\n", profile_names[i], (double)profile[i].calls / n,
                1e6 * profile[i].seconds / n, profile[i].seconds / all);
    }
    printf("other,1.0,%.2f,%.4f\n", 1e6 * left / n, left / all);
    printf("summary,token_us,%.2f\n", 1e6 * all / n);
    int failed = dt_error(ctx) != DT_OK;
    free(m);
    dt_ctx_free(ctx);
    return failed;
}

// ==== Peers =====================================================================================

enum { DT_IN_F32 = 0, TORCH_IN_F32, LLAMA_IN_F32, DT_IN_BF16, TORCH_IN_BF16, LLAMA_IN_BF16, ALL };
enum { PEERS = 3 }; /* of a dtype, dt included */

typedef struct match {
    settings s;
    contestant c[ALL];
    int there[ALL];
    double triad[MOST_STEPS]; /* GB/s */
    int n_triad;
} match;

/* What peer_start needs besides the variant. */
typedef struct peer_job {
    const torch *torch; /* the python and the script */
    const char *name, *weights;
    const settings *s;
} peer_job;

static int peer_start(contestant *c, const char *variant, const void *user) {
    const peer_job *j = (const peer_job *)user;
    gpt_config m = model_of(j->s);
    char text[6][16], name[96];
    const int sizes[6] = { m.layers, m.width, m.heads, m.seq, m.vocab, j->s->tokens };
    for (int i = 0; i < 6; i++) snprintf(text[i], sizeof text[i], "%d", sizes[i]);
    const char *words[] = { j->torch->python, j->torch->script, "--variant", variant, "--weights",
        j->weights, "--layers", text[0], "--width", text[1], "--heads", text[2], "--seq", text[3],
        "--vocab", text[4], "--tokens", text[5], NULL };
    snprintf(name, sizeof name, "%.40s-%.50s", j->name, variant);
    return contestant_start(c, name, words, NULL);
}

static int is_measured(const match *m, int bf16) {
    return !m->s.only || strcmp(m->s.only, bf16 ? "bf16" : "f32") == 0;
}

static int worker_start(contestant *c, const match *m, const char *does, const char *dtype) {
    char tokens[16];
    const char *words[] = { "/proc/self/exe", "--worker", does, "--dtype", dtype, NULL, NULL, NULL,
        NULL };
    int n = 5;
    if (m->s.quick) words[n++] = "--quick";
    words[n++] = "--tokens";
    words[n++] = tokens;
    snprintf(tokens, sizeof tokens, "%d", m->s.tokens);
    return contestant_start(c, "dt", words, NULL);
}

static void start_dt(match *m, int bf16) {
    contestant *c = &m->c[bf16 ? DT_IN_BF16 : DT_IN_F32];
    int works =
        worker_start(c, m, "generate", bf16 ? "bf16" : "f32") && contestant_turn(c, WARM_UP);
    m->there[bf16 ? DT_IN_BF16 : DT_IN_F32] = works;
    c->n_ms = 0;
    if (works) return;
    printf("# dt in %s: %s\n", bf16 ? "bf16" : "f32", c->error);
    contestant_end(c);
}

/* Lets a worker write dt's initial weights, so that this process stays small. */
static int make_weights(const match *m, const char *path) {
    contestant *c = (contestant *)malloc(sizeof *c);
    int made = c && worker_start(c, m, path, "f32");
    if (made) contestant_step(c); /* returns when the worker ends, which makes no step */
    if (made) contestant_end(c);
    free(c);
    return made;
}

static void start_peers(match *m, const char *weights) {
    const char *variants = m->s.variants ? m->s.variants
                                         : "eager,compile,compile-freeze,eager-bf16,compile-bf16,"
                                           "compile-freeze-bf16";
    torch t = torch_find(m->s.python, "torch_generate.py"), l = t;
    char name[80];
    snprintf(name, sizeof name, "pytorch-%.60s", t.version);
    peer_job job = { &t, name, weights, &m->s };
    for (int bf16 = 0; bf16 < 2 && t.version[0]; bf16++)
        if (is_measured(m, bf16))
            m->there[TORCH_IN_F32 + PEERS * bf16] = contestant_best(
                &m->c[TORCH_IN_F32 + PEERS * bf16], variants, bf16, peer_start, &job);
    if (!m->s.llama_python) {
        printf("# peer: llama.cpp is not asked for; python3 -m venv DIR && DIR/bin/pip install "
               "llama-cpp-python gguf, then --llama-python DIR/bin/python\n");
        return;
    }
    l.python = m->s.llama_python;
    char *end = strstr(l.script, "torch_generate.py");
    snprintf(end, sizeof l.script - (size_t)(end - l.script), "llama_cpp_generate.py");
    job = (peer_job){ &l, "llama.cpp", weights, &m->s };
    for (int bf16 = 0; bf16 < 2; bf16++)
        if (is_measured(m, bf16))
            m->there[LLAMA_IN_F32 + PEERS * bf16] = contestant_best(
                &m->c[LLAMA_IN_F32 + PEERS * bf16], "f32,bf16", bf16, peer_start, &job);
}

// ==== main ======================================================================================

static void play(match *m, const bench_triad *t) {
    for (int round = 0; round < m->s.rounds; round++) {
        for (int i = 0; i < 5; i++)
            m->triad[m->n_triad++] = 12e-9 * (double)t->n / bench_triad_seconds(t);
        for (int i = 0; i < ALL; i++)
            if (m->there[i] && !contestant_turn(&m->c[i], 2)) {
                printf("# %s ended early: %s\n", m->c[i].name, m->c[i].error);
                m->there[i] = 0;
            }
    }
    for (int i = 0; i < ALL; i++) contestant_end(&m->c[i]);
}

static double rate_of(const match *m, int who) {
    return m->there[who] ? m->s.tokens / (median(m->c[who].ms, m->c[who].n_ms) / 1000) : NAN;
}

/* tokens_per_s of dt as a share of the limit. */
static double triad_share(const match *m, int bf16) {
    double limit =
        1e9 * median(m->triad, m->n_triad) / weight_bytes(&m->s, bf16 ? DT_BF16 : DT_F32);
    return rate_of(m, bf16 ? DT_IN_BF16 : DT_IN_F32) / limit;
}

static void print_row(const match *m, int bf16, int peer) {
    int dt = bf16 ? DT_IN_BF16 : DT_IN_F32;
    double ours = rate_of(m, dt), theirs = peer ? rate_of(m, dt + peer) : NAN;
    char text[2][32];
    printf("%s,%s,%.1f,%.3f,%s,%s,%s\n", config_name(&m->s), bf16 ? "bf16" : "f32", ours,
        triad_share(m, bf16), peer ? m->c[dt + peer].name : "none",
        bench_number(text[0], sizeof text[0], theirs, "%.1f"),
        bench_number(text[1], sizeof text[1], ours / theirs, "%.3f"));
}

static void print_result(const match *m) {
    printf("config,dtype,tokens_per_s,share_of_triad,peer,peer_tokens_per_s,ratio\n");
    for (int bf16 = 0; bf16 < 2; bf16++) {
        int dt = PEERS * bf16, rows = 0;
        if (!m->there[dt]) continue;
        for (int peer = 1; peer < PEERS; peer++)
            if (m->there[dt + peer]) rows++, print_row(m, bf16, peer);
        if (!rows) print_row(m, bf16, 0);
    }
    double apart[2] = { NAN, NAN };
    for (int i = 0; i < ALL; i++)
        if (i % PEERS && m->there[i] && m->there[i / PEERS * PEERS])
            apart[i / PEERS] =
                fmax(apart[i / PEERS], fabs(m->c[i].check[0] - m->c[i / PEERS * PEERS].check[0]));
    const struct {
        const char *name;
        double value;
    } figures[] = { { "triad_gbs", median(m->triad, m->n_triad) },
        { "share_of_triad_f32", triad_share(m, 0) }, { "share_of_triad_bf16", triad_share(m, 1) },
        { "ratio_pytorch_f32", rate_of(m, DT_IN_F32) / rate_of(m, TORCH_IN_F32) },
        { "ratio_pytorch_bf16", rate_of(m, DT_IN_BF16) / rate_of(m, TORCH_IN_BF16) },
        { "ratio_llama_cpp_f32", rate_of(m, DT_IN_F32) / rate_of(m, LLAMA_IN_F32) },
        { "ratio_llama_cpp_bf16", rate_of(m, DT_IN_BF16) / rate_of(m, LLAMA_IN_BF16) },
        { "check_difference_f32", apart[0] }, { "check_difference_bf16", apart[1] } };
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++) {
        char text[32];
        printf("summary,%s,%s\n", figures[i].name,
            bench_number(text, sizeof text, figures[i].value, "%.4g"));
    }
}

int main(int argc, char **argv) {
    settings s = parse(argc, argv);
    char weights[] = "/tmp/bench_generate.XXXXXX";
    if (s.worker) return run_worker(&s);
    if (s.profile) return run_profile(&s);
    match *m = (match *)calloc(1, sizeof *m);
    bench_triad t;
    int fd = mkstemp(weights), failed = 1;
    bench_print_machine();
    if (m && fd >= 0 && bench_triad_make(&t, TRIAD)) {
        m->s = s;
        for (int bf16 = 0; bf16 < 2; bf16++)
            if (is_measured(m, bf16)) start_dt(m, bf16);
        if (!s.quick && make_weights(m, weights)) start_peers(m, weights);
        play(m, &t);
        for (int i = 0; i < ALL; i++)
            if (m->there[i])
                printf("# %s: %d runs, median %.1f ms, best %.1f ms; cross-entropy of given tokens "
                       "%.6f\n",
                    m->c[i].name, m->c[i].n_ms, median(m->c[i].ms, m->c[i].n_ms),
                    least(m->c[i].ms, m->c[i].n_ms), m->c[i].check[0]);
        print_result(m);
        failed = !m->there[DT_IN_F32] && !m->there[DT_IN_BF16];
        bench_triad_free(&t);
    }
    if (fd >= 0) {
        close(fd);
        unlink(weights);
    }
    free(m);
    return failed;
}
