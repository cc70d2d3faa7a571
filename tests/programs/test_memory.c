/* test_memory.c - the memory promises of train_gpt: for random configurations of model, layout,
   schedule, ZeRO, recompute, offload and backend, each of 6 steps,

       a dry run's peak >= the run's peak, on every rank, and at most 1 % more
       steps 3 to 6 allocate nothing
       --mem-limit with the dry run's peak trains; 1 % less is refused before any rank starts

       test_memory                known cases, a sample of 20, and the activations of schedules
       test_memory N [SEED]       N configurations, drawn from SEED
       test_memory -- OPTIONS     one configuration

   Also, arenas lend memory to gradients (test_lent_memory).

   Experts have a capacity here: without one, their memory depends on the routing.
   Each configuration runs in a process of its own, because train_gpt exits if it refuses one. */
#define main train_main
#include "examples/train_gpt.c"
#undef main

#include "tests/support/check.h"

#include <sys/wait.h>

enum { MAX_ARGS = 80, STEPS = 6, MOST_RANKS = 8 };

/* What a configuration's process reports, in shared memory. */
typedef struct figures {
    train_footprint dry[MOST_RANKS], real[MOST_RANKS];
    double row_peak[2], step_peak; /* "all at once" of the dry run's rows; the largest of the run */
    long calls, calls_at[STEPS + 1];  /* allocations of all ranks; when step k had ended */
    size_t allocations_at[STEPS + 1]; /* of rank 0 */
    int ranks, stage;                 /* stage: 1 dry run done, 2 limit accepted, 3 all done */
    char text[400];
} figures;

/* A configuration: the arguments of train_gpt. */
typedef struct setup {
    char *argv[MAX_ARGS], text[2000];
    int argc;
    size_t used;
} setup;

static __attribute__((format(printf, 2, 3))) void add(setup *c, const char *format, ...) {
    char words[300];
    va_list args;
    va_start(args, format);
    vsnprintf(words, sizeof words, format, args);
    va_end(args);
    for (char *at = words, *word; (word = strtok(at, " ")); at = NULL) {
        c->argv[c->argc++] = strcpy(c->text + c->used, word);
        c->used += strlen(word) + 1;
    }
}

static void begin(setup *c, const char *options) {
    memset(c, 0, sizeof *c);
    add(c, "train_gpt --data README.md --steps %d --quiet --timeout 60", STEPS);
    add(c, "%s", options);
}

static const char *line_of(const setup *c) {
    static char line[2000];
    line[0] = 0;
    for (int i = 1; i < c->argc; i++) {
        strcat(line, i > 1 ? " " : "");
        strcat(line, c->argv[i]);
    }
    return line;
}

// ---- drawing ------------------------------------------------------------------------------------

static uint64_t drawn;
static int draw(int n) { /* 0 .. n-1 */
    drawn = drawn * 6364136223846793005u + 1442695040888963407u;
    return (int)((drawn >> 33) % (uint64_t)n);
}
static int one_of(const int *list, int n) { return list[draw(n)]; }
#define PICK(...) one_of((const int[]){ __VA_ARGS__ }, sizeof(int[]){ __VA_ARGS__ } / sizeof(int))

static void draw_model(setup *c, int tp, int cp, int ep) {
    int llama = draw(2), heads = tp * cp * (1 + draw(2)), width = heads * PICK(8, 16, 24, 32);
    add(c, "--arch %s --layers %d", llama ? "llama" : "gpt2", 1 + draw(6));
    add(c, "--width %d --heads %d", width, heads);
    if (heads % 2 == 0 && tp * cp < heads && draw(2)) add(c, "--kv-heads %d", heads / 2);
    add(c, "--seq %d --vocab %d", PICK(16, 32, 64, 96), PICK(256, 257, 300, 1000));
    if (draw(3) == 0) add(c, "--tie off");
    if (draw(4) == 0) add(c, "--dropout 0.1");
    if (ep > 1 || draw(5) == 0)
        add(c, "--experts %d --top-k %d --capacity %s --moe-every %d",
            ep * (1 + draw(2)) + (ep == 1), 1 + draw(2), draw(2) ? "1" : "1.5", 1 + draw(2));
    /* a step whose gradients overflow allocates, to find the first bad one: let none overflow */
    static const char *const types[] = { "f32", "f32", "bf16", "f16 --loss-scale 16", "f64" };
    add(c, "--dtype %s", types[draw(5)]);
    switch (draw(5)) {
    case 0: add(c, "--recompute full"); break;
    case 1: add(c, "--recompute selective"); break;
    case 2: add(c, "--recompute full:%d", 2 + draw(2)); break;
    }
}

static void draw_state(setup *c) {
    int zero = draw(4);
    static const char *const where[] = { "none", "none", "cpu", "build" };
    add(c, "--zero %d", zero);
    if (draw(4) == 0) add(c, "--optimizer sgd --momentum %s", draw(2) ? "0" : "0.9");
    if (zero == 3 && draw(3) == 0) add(c, "--zero3-keep on");
    if (draw(4) == 0) add(c, "--offload-optim %s", where[draw(4)]);
    if (zero == 3 && draw(3) == 0) add(c, "--offload-params %s", where[draw(4)]);
    if (draw(6) == 0) add(c, "--reduce tree");
    if (draw(5) == 0) add(c, "--overlap off");
}

/* Draws a configuration; train_gpt may refuse it. */
static void draw_config(setup *c) {
    static const char *const kinds[] = { "ring", "zigzag", "allgather", "ulysses" };
    static const char *const schedules[] = { "naive", "afab", "1f1b", "interleaved", "zb", "zbv",
        "dualpipe-v" };
    int axis[5] = { 1, 1, 1, 1, 1 }, dp, tp, cp, pp, ep;
    for (int twos = draw(4); twos > 0; twos--) axis[draw(5)] *= 2;
    dp = axis[0], tp = axis[1], cp = axis[2], pp = axis[3], ep = axis[4];
    begin(c, draw(2) ? "--backend procs" : "");
    int folded = ep > 1 && dp * tp * cp % ep == 0 && draw(2);
    add(c, "--dp %d --tp %d --cp %d --pp %d --ep %d", dp, tp, cp, pp, ep);
    if (folded) add(c, "--expert-tp %d", dp * tp * cp % (2 * ep) == 0 && draw(2) ? 2 : 1);
    if (tp > 1 && draw(2)) add(c, "--sp on");
    if (tp > 1 && draw(2)) add(c, "--tp-overlap %d", PICK(2, 3, 8));
    if (cp > 1) add(c, "--cp-kind %s", kinds[draw(4)]);
    if (pp > 1) {
        int kind = draw(7);
        add(c, "--schedule %s", schedules[kind]);
        if (kind == 3) add(c, "--chunks %d", 1 + draw(3));
    }
    draw_model(c, tp, cp, ep);
    draw_state(c);
    int micro = 1 + draw(3), accum = pp > 1 ? pp * (1 + draw(3)) : 1 + draw(4);
    add(c, "--micro-batch %d --accum %d --batch %d", micro, accum,
        micro * accum * dp * (folded ? 1 : ep));
}

// ---- one configuration --------------------------------------------------------------------------

static figures *seen; /* shared with the processes */

static void *count_alloc(void *user, size_t bytes, dt_mem mem) {
    __atomic_fetch_add(&seen->calls, 1, __ATOMIC_RELAXED);
    return dt_host_default()->alloc(user, bytes, mem);
}

/* Rank 0 has passed the all-reduce at the end of the step, so all ranks have ended it. */
static void after_step(dt_ctx *ctx, const train_row *row, void *user) {
    (void)user;
    if (row->step > STEPS) return;
    seen->calls_at[row->step] = __atomic_load_n(&seen->calls, __ATOMIC_RELAXED);
    seen->allocations_at[row->step] = dt_memory_used(ctx).allocations;
    seen->step_peak = fmax(seen->step_peak, row->mem[TRAIN_PEAK]);
}

enum { DRY_AND_REAL = -1, DRY_ONLY = -2 };

/* The process of a configuration: a dry run, and unless limit is DRY_ONLY a run with its peak as the
   limit. limit >= 0: train_gpt with this --mem-limit. */
static void run_config(setup *c, double limit) {
    value v[N_OPTIONS];
    char size[32];
    job j = { .v = v, .csv = -1 };
    if (limit >= 0) {
        add(c, "--mem-limit %.0f", limit);
        c->argv[c->argc] = NULL;
        exit(train_main(c->argc, c->argv));
    }
    memset(v, 0, sizeof v);
    make_flags();
    parse(v, c->argc, c->argv);
    find_launch(v);
    j.config = resolve(v);
    find_text(v, O_DATA, &j.config.data, j.config.stop_at + 1);
    seen->ranks = int_of(v, O_RANKS);
    dry_figures dry = run_dry(&j, j.config, 0, seen->dry);
    if (dry.report.status != DT_OK) {
        snprintf(seen->text, sizeof seen->text, "dry run: %.300s", dry.report.text);
        exit(1);
    }
    seen->row_peak[0] = dry.mem[TRAIN_PEAK];
    seen->stage = 1;
    if (limit == DRY_ONLY) exit(0);
    snprintf(size, sizeof size, "%zu", dry.footprint.memory.peak_total);
    set(v, O_MEM_LIMIT, size, GIVEN);
    check_mem_limit(&j);
    seen->stage = 2;
    dt_host host = *dt_host_default();
    dt_report report = { .status = DT_OK };
    host.alloc = count_alloc;
    host.log = log_without_errors;
    j.config.footprint = seen->real;
    j.config.on_step = after_step;
    dt_status status =
        dt_run((dt_run_desc){ .ranks = seen->ranks,
                   .backend = int_of(v, O_BACKEND) ? DT_BACKEND_PROCS : DT_BACKEND_THREADS,
                   .timeout_s = 60,
                   .seed = 1,
                   .host = &host,
                   .report = &report,
                   .mem_limit = (size_t)v[O_MEM_LIMIT].number },
            train, &j.config);
    snprintf(seen->text, sizeof seen->text, "%.300s", report.text);
    if (status == DT_OK) seen->stage = 3;
    exit(status == DT_OK ? 0 : 1);
}

/* Runs a configuration in a process. Returns its exit status; `text` is what it wrote to standard
   error. */
static int run_process(const setup *c, double limit, char *text, size_t bytes) {
    setup copy = *c;
    size_t used = 0;
    int to[2], status = 0;
    for (int i = 0; i < c->argc; i++) copy.argv[i] = copy.text + (c->argv[i] - c->text);
    if (pipe(to) != 0) return -1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(to[1], 2);
        if (limit >= 0) dup2(to[1], 1);
        close(to[0]);
        run_config(&copy, limit);
    }
    close(to[1]);
    char rest[512];
    for (ssize_t n = 1; n > 0;) {
        size_t left = bytes - 1 - used;
        n = read(to[0], left > 0 ? text + used : rest, left > 0 ? left : sizeof rest);
        if (n > 0 && left > 0) used += (size_t)n;
    }
    text[used] = 0;
    close(to[0]);
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Checks one configuration. Returns 0 if train_gpt refuses it for another reason than memory. */
static int check_config(const setup *c) {
    static char text[4000];
    const char *line = line_of(c);
    memset(seen, 0, sizeof *seen);
    int status = run_process(c, DRY_AND_REAL, text, sizeof text);
    if (status == 2 && seen->stage == 0) return 0;
    text[strcspn(text, "\n")] = 0;
    size_t most = 0;
    for (int r = 0; r < seen->ranks; r++)
        if (seen->dry[r].memory.peak_total > most) most = seen->dry[r].memory.peak_total;
    if (!CHECK_MSG(status == 0 && seen->stage == 3, "%s: status %d at %d: %.150s %.200s", line,
            status, seen->stage, text, seen->text))
        return 1;
    /* with AddressSanitizer a tensor has as many rows as experts receive in this run, without the
       reserve for any other routing */
    const int is_bounded = !UNDER_ASAN || !strstr(line, "--experts");
    for (int r = 0; r < seen->ranks && is_bounded; r++) {
        double dry = (double)seen->dry[r].memory.peak_total,
               real = (double)seen->real[r].memory.peak_total;
        CHECK_MSG(real <= dry && dry <= 1.01 * real, "%s: rank %d: dry run %.0f, run %.0f bytes",
            line, r, dry, real);
    }
    CHECK_MSG(!is_bounded || seen->row_peak[0] >= seen->step_peak,
        "%s: a step of the dry run %.0f, of the run %.0f", line, seen->row_peak[0],
        seen->step_peak);
    if (!UNDER_ASAN)
        CHECK_MSG(seen->calls_at[STEPS] == seen->calls_at[2] &&
                      seen->allocations_at[STEPS] == seen->allocations_at[2],
            "%s: %ld allocations in steps 3 to 6, %zu of them on rank 0 (%zu %zu %zu %zu)", line,
            seen->calls_at[STEPS] - seen->calls_at[2],
            seen->allocations_at[STEPS] - seen->allocations_at[2],
            seen->allocations_at[3] - seen->allocations_at[2],
            seen->allocations_at[4] - seen->allocations_at[3],
            seen->allocations_at[5] - seen->allocations_at[4],
            seen->allocations_at[6] - seen->allocations_at[5]);
    status = run_process(c, 0.99 * (double)most, text, sizeof text);
    int legal = status == 2 && strncmp(text, "error: --mem-limit ", 19) == 0 &&
                strstr(text, " were refused") && strstr(text, "These settings need ");
    text[strcspn(text, "\n")] = 0;
    CHECK_MSG(legal, "%s: with 1 %% less, status %d: %.200s", line, status, text);
    return 1;
}

/* Configurations whose runs once needed more memory than their dry runs had counted. */
static void test_known(void) {
    static const char *const known[] = {
        /* the slots of a pipeline and the arenas of gradients changed places from step to step */
        "--cp 2 --pp 2 --cp-kind allgather --schedule interleaved --chunks 3 --arch llama "
        "--layers 4 --width 32 --heads 2 --seq 64 --recompute full --micro-batch 2 --accum 6",
        "--arch llama --layers 6 --width 32 --heads 2 --seq 64 --recompute full:2 --batch 3 "
        "--accum 3",
        /* forked ranks sum the norm of gradients in windows of shared memory */
        "--backend procs --cp 2 --pp 2 --cp-kind ulysses --schedule zb --arch llama --layers 2 "
        "--width 64 --heads 4 --seq 96 --micro-batch 3 --accum 6",
        "--backend procs --cp 2 --cp-kind allgather --layers 6 --width 96 --heads 4 --zero 1",
        /* the first step needed more memory than the second, which was shown */
        "--dp 2 --cp 4 --cp-kind ring --layers 6 --width 96 --heads 4 --seq 32 --dtype f16 "
        "--recompute selective --zero 1 --micro-batch 1 --accum 2",
        /* experts got as many rows as the routing of the step sent to them */
        "--backend procs --dp 2 --ep 4 --layers 5 --width 24 --heads 1 --seq 96 --experts 8 "
        "--top-k 2 --capacity 1.5 --moe-every 2 --dtype f64 --zero 3 --zero3-keep on",
        /* replicas on disk were compared through a buffer */
        "--dp 2 --tp 2 --sp on --layers 3 --width 48 --heads 2 --seq 32 --vocab 1000 --tie off "
        "--dtype f64 --zero 1 --offload-optim build --micro-batch 1 --accum 2",
        /* expert folding: bounded rows of experts, which have more replicas than dense parameters */
        "--tp 4 --cp 2 --ep 1 --expert-tp 2 --layers 2 --width 32 --heads 4 --seq 32 --experts 4 "
        "--top-k 2 --capacity 1.5 --zero 2 --micro-batch 1 --accum 2 --batch 2",
        "--dp 2 --tp 2 --sp on --ep 4 --expert-tp 1 --layers 2 --width 32 --heads 2 --seq 32 "
        "--experts 4 --top-k 2 --capacity 1 --zero 3 --recompute full --dtype bf16 --batch 8"
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        setup c;
        begin(&c, known[i]);
        CHECK(check_config(&c));
    }
}

/* Returns the most bytes of activations that a rank of the schedule holds. */
static double activations(const char *schedule) {
    static char text[400];
    double most = 0;
    setup c;
    begin(&c, "--layers 32 --width 64 --heads 4 --seq 256 --pp 4 --micro-batch 1 --accum 16");
    add(&c, "--batch 16 --schedule %s", schedule);
    memset(seen, 0, sizeof *seen);
    CHECK_MSG(run_process(&c, DRY_ONLY, text, sizeof text) == 0, "%s: %s", schedule, text);
    for (int r = 0; r < seen->ranks; r++)
        most = fmax(most, (double)seen->dry[r].memory.peak[DT_MEM_ACTS]);
    return most;
}

/* The activations of a schedule, relative to those of 1F1B, are near the number of micro-batches
   that a rank holds: (2 (p - 1) + (v - 1) p + 1) / (v p) for interleaved 1F1B. ZB-H1 and ZB-V hold
   as many as 1F1B, and DualPipe-V half a micro-batch more. Between I and W a micro-batch has the
   inputs and the output gradients of all weights, 16C instead of 10C (gpt.h): the last rank of ZB-H1
   holds all its micro-batches so. */
static void test_schedules(void) {
    static const struct {
        const char *name;
        double ideal, most;
    } kinds[] = { { "interleaved --chunks 2", 1.375, 1.40 },
        { "interleaved --chunks 4", 1.1875, 1.25 }, { "zb", 1.6, 1.80 }, { "zbv", 1.6, 1.6 },
        { "dualpipe-v", 1.125, 1.25 } };
    double base = activations("1f1b");
    for (int i = 0; i < 5 && !UNDER_ASAN; i++) {
        double ratio = activations(kinds[i].name) / base;
        printf("activations at p 4, m 16, %s: %.3f x 1F1B\n", kinds[i].name, ratio);
        CHECK_MSG(ratio <= kinds[i].most, "%s holds %.3f x the activations of 1F1B, not %.3f",
            kinds[i].name, ratio, kinds[i].ideal);
    }
}

/* Four steps of a small GPT, of `micros` micro-batches; with `evaluates` a forward without gradients
   comes between each backward and its update. */
typedef struct lent_run {
    int micros, evaluates;
    double loss; /* of the last step */
    dt_memory memory;
} lent_run;

static dt_status lent_main(dt_ctx *ctx, void *user) {
    lent_run *run = (lent_run *)user;
    gpt_config c = {
        .layers = 4, .width = 32, .heads = 2, .kv_heads = 2, .ffn = 128, .seq = 64, .vocab = 64
    };
    int32_t ids[4 * 64];
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = 1 });
    gpt m = gpt_register(ctx, c);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh, .optimizer = DT_ADAMW });
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < run->micros + run->evaluates; i++) {
            int evaluates = i == run->micros;
            for (int k = 0; k < 4 * 64; k++) ids[k] = (k * k + 7 * i + step) % 64;
            dt_no_grad(ctx, evaluates);
            if (!evaluates) dt_micro(ctx, i, run->micros);
            dt_tensor *id = dt_input(ctx, DT_I32, DT_SHAPE(4, 64), ids);
            dt_tensor *loss = gpt_loss(&m, id, id, 4 * 64);
            run->loss = evaluates ? run->loss : dt_item(loss);
            if (!evaluates) dt_backward(loss);
            dt_reset(ctx);
        }
        dt_no_grad(ctx, 0);
        dt_zero_step(zero, 0.01);
    }
    run->memory = dt_memory_used(ctx);
    dt_zero_free(zero);
    return dt_error(ctx);
}

/* With one micro-batch a step, most gradients lie in memory of the blocks' arenas. The classes count
   them as gradients, and a forward before the update leaves them alone. */
static void test_lent_memory(void) {
    lent_run plain = { .micros = 1 }, evaluated = { .micros = 1, .evaluates = 1 },
             several = { .micros = 2 };
    lent_run *const runs[] = { &plain, &evaluated, &several };
    for (int i = 0; i < 3; i++)
        CHECK(dt_run((dt_run_desc){ .ranks = 1 }, lent_main, runs[i]) == DT_OK);
    CHECK(plain.loss == evaluated.loss);
    /* with several micro-batches the arenas lend nothing, and are as large as with one */
    const dt_memory *m = &plain.memory, *kept = &several.memory;
    size_t lent = kept->live[DT_MEM_ACTS] - m->live[DT_MEM_ACTS], grads = m->live[DT_MEM_GRADS];
    CHECK(kept->live[DT_MEM_GRADS] == grads);
    CHECK_MSG(UNDER_ASAN || (lent <= grads && lent * 10 >= grads * 6),
        "arenas lend %zu of %zu bytes of gradients", lent, grads);
    CHECK(UNDER_ASAN || m->peak_total + lent <= m->peak[DT_MEM_ACTS] + m->peak[DT_MEM_GRADS] +
                                                    m->peak[DT_MEM_OPTIM] + m->peak[DT_MEM_PARAMS] +
                                                    m->peak[DT_MEM_HOST] + m->peak[DT_MEM_TEMP]);
}

int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 20, verbose = getenv("VERBOSE") != NULL;
    setup c;
    drawn = argc > 2 ? (uint64_t)atoll(argv[2]) : 1;
    seen = (figures *)mmap(
        NULL, sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!CHECK(seen != MAP_FAILED)) return check_done("test_memory");
    if (argc > 2 && strcmp(argv[1], "--") == 0) {
        begin(&c, "");
        for (int i = 2; i < argc; i++) add(&c, "%s", argv[i]);
        CHECK(check_config(&c));
        return check_done("test_memory");
    }
    if (argc == 1) test_known();
    if (argc == 1) test_schedules();
    test_lent_memory();
    for (int done = 0; done < n;) {
        draw_config(&c);
        done += check_config(&c);
        if (verbose) fprintf(stderr, "%d %s\n", done, line_of(&c));
    }
    printf("memory: %d configurations\n", n);
    return check_done("test_memory");
}
