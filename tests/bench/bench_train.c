/* bench_train.c - training a GPT on two ranks, compared with PyTorch and llm.c
   Public domain or MIT, at your choice; see LICENSE.

       make build/bench_train && build/bench_train [--quick] [--rounds N] [--steps N] [--python
       PATH] [--variants LIST]
                                                   [--openblas PATH] [--llmc PATH] [--profile]
                                                   [--dtype f32|bf16]

   The model is gpt-6x384: 6 layers, width 384, 6 heads, 256 tokens, bytes as vocabulary, 8
   sequences a rank, AdamW, clip 1. dt, PyTorch and llm.c each train it in their own processes. They
   run in turns of a few steps while the others are stopped (SIGSTOP), so other load on the machine
   affects all of them. The median step counts, without the first two steps and without steps in
   which a process was stopped.

   PyTorch: peers/torch_ddp.py by --python, $DT_BENCH_PYTHON or python3, in each of --variants; the
   fastest is the peer. It starts from dt's initial weights and reads the same data in the same
   order. The losses of its first steps are compared with dt's, to show that both compute the same
   function.

   llm.c: --llmc PATH, a train_gpt2 built as peers/llmc_files.py describes.

   CONTENTS
     1. Settings
     2. dt's side: the worker
     3. Profile
     4. Processes that take turns
     5. PyTorch
     6. Two-core product rate
     7. main */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_zero.h"

#include "examples/gpt.h"
#include "examples/train.h"

#include "tests/bench/bench.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>

// ==== 1. Settings ===============================================================================

enum { RANKS = 2, SEQUENCES = 8, CHECKED = 5, WARM_UP = 2 };

typedef struct settings {
    int quick, profile, rounds, steps;
    dt_dtype dtype; /* for --worker and --profile */
    /* this process is dt's worker: "train", or the file into which it writes its weights */
    const char *worker;
    const char *only; /* the only dtype to measure; NULL: all */
    const char *python, *variants, *openblas, *llmc;
} settings;

static gpt_config model_of(const settings *s, dt_dtype dtype) {
    if (s->quick)
        return (gpt_config){ .layers = 1,
            .width = 64,
            .heads = 2,
            .kv_heads = 2,
            .ffn = 256,
            .seq = 64,
            .vocab = 256,
            .tied = 1,
            .dtype = dtype };
    return (gpt_config){ .layers = 6,
        .width = 384,
        .heads = 6,
        .kv_heads = 6,
        .ffn = 1536,
        .seq = 256,
        .vocab = 256,
        .tied = 1,
        .dtype = dtype };
}

static const char *config_name(const settings *s) { return s->quick ? "gpt-1x64" : "gpt-6x384"; }

static double tokens_of_step(const settings *s) {
    return (double)RANKS * SEQUENCES * model_of(s, DT_F32).seq;
}

static settings parse(int argc, char **argv) {
    settings s = { 0, 0, 4, 4, DT_F32, NULL, NULL, getenv("DT_BENCH_PYTHON"), NULL, NULL, NULL };
    const char *v;
    for (int i = 1; i < argc; i++) {
        int good = 1;
        if (strcmp(argv[i], "--quick") == 0)
            s.quick = 1, s.rounds = 1, s.steps = 3;
        else if (strcmp(argv[i], "--profile") == 0)
            s.profile = 1;
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
        else if ((v = bench_option(argc, argv, &i, "--dtype"))) {
            s.only = v;
            s.dtype = strcmp(v, "bf16") == 0 ? DT_BF16 : DT_F32;
            good = strcmp(v, dt_dtype_name(s.dtype)) == 0;
        } else
            good = 0;
        if (!good)
            bench_refuse(argc, argv, i,
                "--quick --rounds N --steps N --python PATH --variants LIST --openblas PATH --llmc "
                "PATH --profile --dtype f32|bf16");
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
    config.model = model_of(s, s->dtype);
    config.mesh.dp = RANKS;
    config.zero = (dt_zero_desc){ .optimizer = DT_ADAMW,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .weight_decay = 0.1,
        .clip = 1 };
    config.lr = (dt_lr_desc){ 3e-4, DT_LR_CONSTANT, 0, 1, 1 };
    config.micro_batch = SEQUENCES;
    config.accum = 1;
    config.stop_at = steps;
    /* a large timeout, because this process may be stopped for long */
    if (dt_run((dt_run_desc){ .ranks = RANKS,
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
        int product = P_##k == P_matmul; \
        profile_add(product ? profile_kind((const dt_matmul_args *)(const void *)args) : P_##k, \
            bench_thread_seconds() - start, \
            product ? profile_gflop((const dt_matmul_args *)(const void *)args) : 0); \
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

/* Prints rank 0's milliseconds of a step by kernel. "other" is autograd and copies between ranks,
   "idle" is waiting for the other rank or for the processor. */
static void profile_print(dt_ctx *ctx, gpt *model, void *user) {
    const profile_sum *sum = (const profile_sum *)user;
    double left = sum->processor;
    (void)ctx;
    (void)model;
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

// ==== 4. Processes that run in turns ============================================================

enum { MOST_STEPS = 10000, MOST_PIDS = 64, MOST_WORDS = 600 };

typedef struct contestant {
    char name[96];
    pid_t pid;                     /* leader of its process group; 0: none */
    int out;                       /* its standard output */
    int ranks[MOST_PIDS], n_ranks; /* the processes of its ranks, if it prints them */
    int stopped;
    double ms[MOST_STEPS];
    int n_ms;
    double loss[CHECKED]; /* of the first steps */
    char error[256];
    double rss, pss; /* bytes: peak, and now with each shared page counted once */
    /* processor time of the steps that count, of all ranks and threads */
    double processor;
} contestant;

/* Starts a command, a NULL-terminated list of words, in `folder` if that is not NULL. */
static int contestant_start(
    contestant *c, const char *name, const char *const *words, const char *folder) {
    int pipe_of[2];
    memset(c, 0, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", name);
    for (int i = 0; i < CHECKED; i++) c->loss[i] = NAN;
    fflush(stdout);
    if (pipe(pipe_of) != 0) return 0;
    c->pid = fork();
    if (c->pid == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(pipe_of[1], 1);
        close(pipe_of[0]);
        close(pipe_of[1]);
        if (!freopen("/dev/null", "w", stderr)) _exit(127);
        if (folder && chdir(folder) != 0) _exit(127);
        execvp(words[0], (char *const *)(uintptr_t)words);
        _exit(127);
    }
    close(pipe_of[1]);
    c->out = pipe_of[0];
    if (c->pid > 0) return setpgid(c->pid, c->pid), 1;
    close(c->out);
    return 0;
}

static void contestant_end(contestant *c) {
    if (c->pid <= 0) return;
    kill(-c->pid, SIGKILL);
    waitpid(c->pid, NULL, 0);
    close(c->out);
    c->pid = 0;
}

/* Reads a line of its output within 10 minutes; 0 at the end of the output. */
static int contestant_line(contestant *c, char *line, size_t room) {
    struct pollfd ready = { c->out, POLLIN, 0 };
    size_t n = 0;
    while (poll(&ready, 1, 600000) == 1 && read(c->out, line + n, 1) == 1) {
        if (line[n] == '\n') return line[n] = 0, 1;
        if (n + 2 < room) n++;
    }
    return 0;
}

/* The milliseconds of its next step; NAN if it has ended. */
static double contestant_step(contestant *c) {
    char line[512];
    long long step;
    double loss, ms;
    int pid;
    while (contestant_line(c, line, sizeof line)) {
        if (sscanf(line, "pid,%d", &pid) == 1 && c->n_ranks < MOST_PIDS)
            c->ranks[c->n_ranks++] = pid;
        if (strncmp(line, "error,", 6) == 0)
            snprintf(c->error, sizeof c->error, "%.250s", line + 6);
        int n = sscanf(line, "step,%lld,%lf,%lf", &step, &loss, &ms);
        /* llm.c counts steps from 0 */
        if (n != 3) n = sscanf(line, "step %lld: train loss %lf (took %lf ms)", &step, &loss, &ms);
        if (n != 3) continue;
        if (step >= 1 && step <= CHECKED) c->loss[step - 1] = loss;
        return ms;
    }
    if (!c->error[0]) snprintf(c->error, sizeof c->error, "it ended without an error message");
    return NAN;
}

/* Processor time of a process so far. */
static double proc_seconds(int pid) {
    char path[64], line[1024] = "";
    double user = 0, system = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    if (f && fgets(line, sizeof line, f) && strrchr(line, ')'))
        sscanf(strrchr(line, ')') + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lf %lf",
            &user, &system);
    if (f) fclose(f);
    return (user + system) / (double)sysconf(_SC_CLK_TCK);
}

static double contestant_processor(const contestant *c) {
    double seconds = c->n_ranks ? 0 : proc_seconds(c->pid);
    for (int i = 0; i < c->n_ranks; i++) seconds += proc_seconds(c->ranks[i]);
    return seconds;
}

/* Lets it run for `steps` steps that count, then stops it. A step in which it was stopped does not
   count. 0 if it has ended. */
static int contestant_turn(contestant *c, int steps) {
    struct pollfd ready = { c->out, POLLIN, 0 };
    /* steps that ended before the stop */
    while (c->stopped && poll(&ready, 1, 0) == 1 && isfinite(contestant_step(c))) continue;
    kill(-c->pid, SIGCONT);
    if (c->stopped) contestant_step(c);
    c->stopped = 0;
    double before = contestant_processor(c);
    for (int i = 0; i < steps; i++) {
        double ms = contestant_step(c);
        if (!isfinite(ms)) return 0;
        if (c->n_ms < MOST_STEPS) c->ms[c->n_ms++] = ms;
    }
    kill(-c->pid, SIGSTOP);
    c->processor += contestant_processor(c) - before;
    c->stopped = 1;
    return 1;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, int n) {
    double sorted[MOST_STEPS];
    if (n == 0) return NAN;
    memcpy(sorted, values, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    return (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
}

static double least(const double *values, int n) {
    double x = NAN;
    for (int i = 0; i < n; i++) x = fmin(x, values[i]);
    return x;
}

/* The value in bytes of a field of /proc/PID/FILE, which is in kB; 0 if there is none. */
static double proc_field(int pid, const char *file, const char *field) {
    char path[64], line[256];
    double kilobytes = 0;
    size_t length = strlen(field);
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, field, length) == 0) kilobytes = atof(line + length);
    if (f) fclose(f);
    return 1024 * kilobytes;
}

static int group_of(int pid) {
    char path[64], line[1024] = "";
    int group = -1;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    if (f && fgets(line, sizeof line, f) && strrchr(line, ')'))
        sscanf(strrchr(line, ')') + 1, " %*c %*d %d", &group);
    if (f) fclose(f);
    return group;
}

/* Peak memory: the sum over its ranks, or over its process group if it does not print its ranks. */
static void contestant_memory(contestant *c) {
    DIR *d = c->n_ranks == 0 ? opendir("/proc") : NULL;
    struct dirent *e;
    while (d && (e = readdir(d)) && c->n_ranks < MOST_PIDS)
        if (atoi(e->d_name) > 0 && group_of(atoi(e->d_name)) == c->pid)
            c->ranks[c->n_ranks++] = atoi(e->d_name);
    if (d) closedir(d);
    c->rss = c->pss = 0;
    for (int i = 0; i < c->n_ranks; i++) {
        c->rss += proc_field(c->ranks[i], "status", "VmHWM:");
        c->pss += proc_field(c->ranks[i], "smaps_rollup", "Pss:");
    }
}

// ==== 5. PyTorch ================================================================================

typedef struct torch {
    char version[64]; /* "": not installed */
    const char *python;
    char script[4096];
    const char *weights; /* the file with dt's initial weights */
    const train_files *data;
} torch;

static torch torch_find(const settings *s, const train_files *data, const char *weights) {
    torch t = { .python = s->python ? s->python : "python3", .weights = weights, .data = data };
    char command[4096], self[2048];
    snprintf(t.script, sizeof t.script, "tests/bench/peers/torch_ddp.py");
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (access(t.script, R_OK) != 0 && length > 0) {
        self[length] = 0;
        if (strrchr(self, '/')) *strrchr(self, '/') = 0;
        snprintf(t.script, sizeof t.script, "%s/../tests/bench/peers/torch_ddp.py", self);
    }
    snprintf(command, sizeof command,
        "'%s' -c 'import torch; print(torch.__version__)' 2>/dev/null", t.python);
    FILE *f = popen(command, "r");
    if (f && fscanf(f, "%63s", t.version) != 1) t.version[0] = 0;
    if (f) pclose(f);
    if (t.version[0])
        printf("# peer: PyTorch %s by %s\n", t.version, t.python);
    else
        printf("# peer: PyTorch is not installed for %s; python3 -m venv DIR && DIR/bin/pip "
               "install torch numpy, then "
               "--python DIR/bin/python\n",
            t.python);
    return t;
}

static int torch_start(contestant *c, const torch *t, const char *variant) {
    const char *words[MOST_WORDS] = { t->python, t->script, "--variant", variant, "--weights",
        t->weights, "--data" };
    char name[96];
    int n = 7;
    for (int i = 0; i < t->data->count && n + 1 < MOST_WORDS; i++) words[n++] = t->data->path[i];
    snprintf(name, sizeof name, "pytorch-%.30s-%.50s", t->version, variant);
    return contestant_start(c, name, words, NULL);
}

/* Runs some steps of each variant of `list` in bf16, or in f32 if bf16 is 0. *best is the variant
   with the fastest step, left stopped. 0 if no variant works. */
static int torch_best(contestant *best, const torch *t, const char *list, int bf16) {
    char variant[96];
    contestant *c = (contestant *)malloc(sizeof *c);
    int found = 0;
    for (const char *at = list; c && *at; at += *at == ',') {
        int length = (int)strcspn(at, ",");
        snprintf(variant, sizeof variant, "%.*s", length, at);
        at += length;
        if ((strstr(variant, "bf16") != NULL) != bf16) continue;
        int works = torch_start(c, t, variant) && contestant_turn(c, WARM_UP + 3);
        c->n_ms = c->n_ms > WARM_UP ? c->n_ms - WARM_UP : 0;
        memmove(c->ms, c->ms + WARM_UP, (size_t)c->n_ms * sizeof *c->ms);
        if (works)
            printf("# %s: best step %.0f ms\n", c->name, least(c->ms, c->n_ms));
        else
            printf("# pytorch-%s does not work: %s\n", variant, c->error);
        if (works && (!found || least(c->ms, c->n_ms) < least(best->ms, best->n_ms))) {
            if (found) contestant_end(best);
            *best = *c;
            found = 1;
        } else
            contestant_end(c);
    }
    free(c);
    if (found) best->n_ms = 0, best->processor = 0;
    return found;
}

// ==== 6. Matrix product rate on two cores =======================================================

/* The matrix products of the model's feed-forward layer, one set for each rank: the forward and
   both gradients. */
typedef struct product_rate {
    bench_product products[3][RANKS];
    double rate[2][MOST_STEPS]; /* of dt and of OpenBLAS, round by round */
    int rounds, who;            /* who: 1 without OpenBLAS */
} product_rate;

static int product_rate_make(product_rate *p, gpt_config c, const bench_blas *blas) {
    int M = SEQUENCES * c.seq, C = c.width, F = c.ffn, made = 1;
    memset(p, 0, sizeof *p);
    p->who = blas->library ? 2 : 1;
    for (int r = 0; r < RANKS; r++) {
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
                inverse += 1 / bench_burst_run(p->products[kind], RANKS, who,
                                   2 * bench_calls(p->products[kind], who))
                                   .wall;
            p->rate[who][p->rounds] = 3 / inverse;
        }
}

static void product_rate_free(product_rate *p) {
    for (int kind = 0; kind < 3; kind++)
        for (int r = 0; r < RANKS; r++) bench_product_free(&p->products[kind][r]);
}

// ==== 7. main ===================================================================================

static const char *const default_variants =
    "eager-fused-2x1,compile-fused-2x1,compile-fused-2x1-arena,eager-fused-1x2,compile-fused-1x2,"
    "compile-fused-1x2-arena,eager-fused-2x1-bf16,compile-fused-2x1-bf16,compile-fused-1x2-bf16";

enum { DT_IN_F32 = 0, DT_IN_BF16, TORCH_IN_F32, TORCH_IN_BF16, LLMC, CONTESTANTS };

typedef struct match {
    settings s;
    contestant c[CONTESTANTS];
    int there[CONTESTANTS];
    product_rate products;
} match;

static void start_dt(match *m, int who, dt_dtype dtype) {
    const char *words[] = { "/proc/self/exe", "--worker", "train", "--dtype", dt_dtype_name(dtype),
        m->s.quick ? "--quick" : NULL, NULL };
    contestant *c = &m->c[who];
    if (m->s.only && strcmp(m->s.only, dt_dtype_name(dtype)) != 0) return;
    m->there[who] = contestant_start(c, "dt", words, NULL) && contestant_turn(c, WARM_UP);
    c->n_ms = 0;
    c->processor = 0;
    if (m->there[who]) return;
    printf("# dt in %s: %s\n", dt_dtype_name(dtype), c->error);
    contestant_end(c);
}

static void start_torch(match *m, const torch *t, int who, const char *dtype) {
    if (m->s.only && strcmp(m->s.only, dtype) != 0) return;
    m->there[who] = torch_best(
        &m->c[who], t, m->s.variants ? m->s.variants : default_variants, who == TORCH_IN_BF16);
}

static void start_llmc(match *m) {
    char folder[4096];
    const char *words[] = { "stdbuf", "-oL", m->s.llmc, NULL };
    contestant *c = &m->c[LLMC];
    if (!m->s.llmc || !realpath(m->s.llmc, folder)) {
        printf("# peer: llm.c is not %s; tests/bench/peers/llmc_files.py describes how to build it "
               "for "
               "--llmc PATH\n",
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
    return m->there[who] ? tokens_of_step(&m->s) / (median(m->c[who].ms, m->c[who].n_ms) / 1000)
                         : NAN;
}

static void print_row(const match *m, int who, const char *dtype, int peer) {
    double ours = rate_of(m, who), theirs = rate_of(m, peer), MiB = 1048576;
    double flop = 6 * (double)gpt_param_count(model_of(&m->s, DT_F32));
    char text[3][32];
    printf("%s,%d,%s,%.1f,%.2f,%s,%s,%s,%.1f,%s\n", config_name(&m->s), RANKS, dtype, ours,
        1e-9 * flop * ours, m->there[peer] ? m->c[peer].name : "none",
        bench_number(text[0], sizeof text[0], theirs, "%.1f"),
        bench_number(text[1], sizeof text[1], ours / theirs, "%.3f"), m->c[who].rss / MiB,
        bench_number(text[2], sizeof text[2], m->there[peer] ? m->c[peer].rss / MiB : NAN, "%.1f"));
}

static void print_summary_line(const char *name, double value) {
    char text[32];
    printf("summary,%s,%s\n", name, bench_number(text, sizeof text, value, "%.4g"));
}

/* The largest relative difference between dt's and PyTorch's first losses. */
static double loss_difference(const match *m) {
    double most = 0;
    if (!m->there[DT_IN_F32] || !m->there[TORCH_IN_F32]) return NAN;
    printf("# losses of the first steps, dt and PyTorch:");
    for (int i = 0; i < CHECKED; i++) {
        double a = m->c[DT_IN_F32].loss[i], b = m->c[TORCH_IN_F32].loss[i];
        printf(" %.6f %.6f%s", a, b, i + 1 < CHECKED ? "," : "\n");
        if (isfinite(a) && isfinite(b)) most = fmax(most, fabs(a - b) / fabs(b));
    }
    return most;
}

static void print_result(match *m) {
    double flop = 6e-9 * (double)gpt_param_count(model_of(&m->s, DT_F32)), MiB = 1048576;
    double ours = median(m->products.rate[0], m->products.rounds);
    double theirs = m->products.who == 2 ? median(m->products.rate[1], m->products.rounds) : NAN;
    double best = fmax(ours, theirs), apart = loss_difference(m);
    for (int i = 0; i < CONTESTANTS; i++)
        if (m->there[i])
            printf(
                "# %s: %d steps, median %.1f ms, best %.1f ms, processor %.1f ms; memory peak %.1f "
                "MiB, at the end %.1f MiB with shared pages counted once\n",
                m->c[i].name, m->c[i].n_ms, median(m->c[i].ms, m->c[i].n_ms),
                least(m->c[i].ms, m->c[i].n_ms), 1000 * m->c[i].processor / fmax(m->c[i].n_ms, 1),
                m->c[i].rss / MiB, m->c[i].pss / MiB);
    printf("config,ranks,dtype,tokens_per_s,gflops,peer,peer_tokens_per_s,ratio,peak_rss_mib,peer_"
           "peak_rss_mib\n");
    if (m->there[DT_IN_F32]) print_row(m, DT_IN_F32, "f32", TORCH_IN_F32);
    if (m->there[DT_IN_F32] && m->there[LLMC]) print_row(m, DT_IN_F32, "f32", LLMC);
    if (m->there[DT_IN_BF16]) print_row(m, DT_IN_BF16, "bf16", TORCH_IN_BF16);
    print_summary_line("ratio_pytorch_f32", rate_of(m, DT_IN_F32) / rate_of(m, TORCH_IN_F32));
    print_summary_line("ratio_llmc_f32", rate_of(m, DT_IN_F32) / rate_of(m, LLMC));
    print_summary_line("product_rate_dt_gflops", ours);
    print_summary_line("product_rate_openblas_gflops", theirs);
    print_summary_line("product_rate_share_f32", flop * rate_of(m, DT_IN_F32) / best);
    print_summary_line("rss_ratio_f32",
        m->there[TORCH_IN_F32] ? m->c[DT_IN_F32].rss / m->c[TORCH_IN_F32].rss : NAN);
    print_summary_line("bf16_over_f32", rate_of(m, DT_IN_BF16) / rate_of(m, DT_IN_F32));
    print_summary_line("ratio_pytorch_bf16", rate_of(m, DT_IN_BF16) / rate_of(m, TORCH_IN_BF16));
    print_summary_line("loss_difference_f32", apart);
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
static int make_weights(const char *path) {
    const char *words[] = { "/proc/self/exe", "--worker", path, NULL };
    contestant *c = (contestant *)malloc(sizeof *c);
    int made = c && contestant_start(c, "weights", words, NULL);
    if (made) contestant_step(c); /* returns when the worker ends, which makes no step */
    if (made && strcmp(c->error, "it ended without an error message") != 0)
        printf("# dt: %s\n", c->error);
    if (made) contestant_end(c);
    free(c);
    return made;
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
    match *m = (match *)calloc(1, sizeof *m);
    int fd = mkstemp(weights), failed = 1;
    bench_print_machine();
    bench_blas blas = bench_blas_find(s.openblas);
    if (m && fd >= 0 && product_rate_make(&m->products, model_of(&s, DT_F32), &blas) &&
        make_weights(weights)) {
        m->s = s;
        start_dt(m, DT_IN_F32, DT_F32);
        start_dt(m, DT_IN_BF16, DT_BF16);
        torch t = { .version = "" };
        if (!s.quick) t = torch_find(&s, &config.data, weights);
        if (t.version[0]) start_torch(m, &t, TORCH_IN_F32, "f32");
        if (t.version[0] && m->there[DT_IN_BF16]) start_torch(m, &t, TORCH_IN_BF16, "bf16");
        if (!s.quick) start_llmc(m);
        play(m);
        print_result(m);
        failed = !m->there[DT_IN_F32] && !m->there[DT_IN_BF16];
    }
    if (fd >= 0) {
        close(fd);
        unlink(weights);
    }
    if (m) product_rate_free(&m->products);
    free(m);
    train_files_free(&config.data);
    return failed;
}
