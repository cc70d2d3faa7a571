/* bench_attention.c - dt's flash attention on the CPU compared with PyTorch
   Public domain or MIT, at your choice; see LICENSE.

       make build/bench_attention && build/bench_attention [--quick] [--seconds X] [--python PATH]

   Causal self-attention of one sequence of T tokens in f32 on one thread: 4 heads of dimension 64.
   The forward counts two products, q k^T and p v, and the backward five, each over the T (T + 1) / 2
   pairs of a query and a key that it sees.

   The results of flash attention are first compared with naive attention. Then dt and PyTorch run
   in turns, in short bursts, and the best burst of each counts, in processor time.

   PyTorch: peers/torch_attention.py by --python, $DT_BENCH_PYTHON or python3. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_tensor.h"

#include "tests/bench/bench.h"

#include <signal.h>

enum { HEADS = 4, DIM = 64, CHECKED_T = 256, CASES = 3 };
static const int lengths[CASES] = { 256, 1024, 4096 };
static const char *const direction[] = { "forward", "backward" };

typedef struct settings {
    double seconds; /* minimum time of each side of a case */
    int quick;
    const char *python;
} settings;

/* The arrays of one attention: q, k, v, dout, out, dq, dk, dv, and lse. */
typedef struct attention {
    int64_t T;
    float *q, *k, *v, *dout, *out, *dq, *dk, *dv, *lse;
    void *work;
    size_t work_bytes;
} attention;

static size_t elements(const attention *a) { return (size_t)a->T * HEADS * DIM; }

static void attention_free(attention *a) {
    float *all[] = { a->q, a->k, a->v, a->dout, a->out, a->dq, a->dk, a->dv, a->lse };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(a->work);
}

/* Allocates and fills the arrays; 0 if out of memory. */
static int attention_make(attention *a, int64_t T) {
    float **const all[] = { &a->q, &a->k, &a->v, &a->dout, &a->out, &a->dq, &a->dk, &a->dv,
        &a->lse };
    int made = 1;
    memset(a, 0, sizeof *a);
    a->T = T;
    a->work_bytes = dt_attention_work(T, DIM, DT_F32);
    a->work = aligned_alloc(64, (a->work_bytes + 63) / 64 * 64);
    for (uint32_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i] = (float *)bench_operand(DT_F32, elements(a), i + 1);
        made = made && *all[i];
    }
    if (made && a->work) return 1;
    attention_free(a);
    return 0;
}

/* What the arguments of forward and backward have in common. */
#define CALL(a, naive) \
    .dtype = DT_F32, .lse = (a)->lse, .q = (a)->q, .k = (a)->k, .v = (a)->v, .batch = 1, \
    .tq = (a)->T, .tk = (a)->T, .heads = HEADS, .kv_heads = HEADS, .dim = DIM, .scale = 0.125, \
    .mask = { .causal = 1 }, .work = (naive) ? NULL : (a)->work, .work_bytes = (a)->work_bytes

/* One call of dt's forward or backward; naive attention if `naive` is 1. */
static dt_status attention_dt(const attention *a, int backward, int naive) {
    dt_attention_args forward = { CALL(a, naive), .out = a->out };
    dt_attention_back_args back = { CALL(a, naive), .out = a->out, .dq = a->dq, .dk = a->dk,
        .dv = a->dv, .dout = a->dout };
    return backward ? dt_kernels_cpu()->attention_back(&back, NULL)
                    : dt_kernels_cpu()->attention(&forward, NULL);
}

static double gflop(const attention *a, int backward) {
    return (backward ? 5 : 2) * 2e-9 * HEADS * DIM * (double)(a->T * (a->T + 1) / 2);
}

/* 0 if flash attention and naive attention agree to 1e-4. */
static int differs(void) {
    attention flash, naive;
    double apart = INFINITY;
    if (attention_make(&flash, CHECKED_T) && attention_make(&naive, CHECKED_T)) {
        const float *x[] = { flash.out, flash.dq, flash.dk, flash.dv },
                    *y[] = { naive.out, naive.dq, naive.dk, naive.dv };
        int failed = 0;
        for (int backward = 0; backward < 2; backward++)
            failed = failed || attention_dt(&flash, backward, 0) != DT_OK ||
                     attention_dt(&naive, backward, 1) != DT_OK;
        if (!failed) apart = 0;
        for (int r = 0; r < 4; r++)
            for (size_t i = 0; i < elements(&flash); i++)
                apart = isnan(x[r][i]) ? INFINITY : fmax(apart, fabs(x[r][i] - y[r][i]));
        attention_free(&naive);
        attention_free(&flash);
    }
    if (apart <= 1e-4) return 0;
    fprintf(stderr, "error: flash attention and naive attention differ by %g\n", apart);
    return 1;
}

// ==== PyTorch ===================================================================================

/* Processor seconds of `calls` calls; infinity if the peer does not answer. */
static double torch_burst(const bench_peer *p, const attention *a, int backward, int calls) {
    double seconds;
    fprintf(p->ask, "%d %d %d %d %d\n", (int)a->T, HEADS, DIM, backward, calls);
    fflush(p->ask);
    return fscanf(p->answer, "%lf", &seconds) == 1 ? seconds : INFINITY;
}

// ==== main ======================================================================================

static double dt_burst(const attention *a, int backward, int calls) {
    double start = bench_thread_seconds();
    for (int i = 0; i < calls; i++) attention_dt(a, backward, 0);
    return bench_thread_seconds() - start;
}

/* Measures and prints one case. Returns the ratio of the rates, NaN without a peer. */
static double run_case(
    const attention *a, int backward, const bench_peer *peer, const settings *s) {
    double best = INFINITY, theirs = INFINITY, end;
    char rate[32], ratio[32];
    int calls = (int)(0.01 / dt_burst(a, backward, 1)), rounds = 0; /* a burst takes 10 ms */
    calls = calls < 1 ? 1 : calls;
    end = bench_now() + s->seconds * (peer->pid ? 2 : 1);
    while (rounds++ < (s->quick ? 1 : 5) || bench_now() < end) {
        best = fmin(best, dt_burst(a, backward, calls));
        if (peer->pid) theirs = fmin(theirs, torch_burst(peer, a, backward, calls));
    }
    double work = calls * gflop(a, backward), no_peer = peer->pid ? 0 : NAN;
    printf("%d,%s,%.2f,%s,%s,%s\n", (int)a->T, direction[backward], work / best, peer->name,
        bench_number(rate, sizeof rate, work / theirs + no_peer, "%.2f"),
        bench_number(ratio, sizeof ratio, theirs / best + no_peer, "%.3f"));
    fflush(stdout);
    return theirs / best + no_peer;
}

static settings parse(int argc, char **argv) {
    settings s = { 1, 0, getenv("DT_BENCH_PYTHON") };
    const char *v;
    for (int i = 1; i < argc; i++) {
        int good = 1;
        if (strcmp(argv[i], "--quick") == 0)
            s.quick = 1, s.seconds = 0.02;
        else if ((v = bench_option(argc, argv, &i, "--seconds")))
            good = (s.seconds = atof(v)) > 0;
        else if ((v = bench_option(argc, argv, &i, "--python")))
            s.python = v;
        else
            good = 0;
        if (!good) bench_refuse(argc, argv, i, "--quick --seconds X --python PATH");
    }
    if (!s.python) s.python = "python3";
    return s;
}

int main(int argc, char **argv) {
    settings s = parse(argc, argv);
    double least[2] = { INFINITY, INFINITY };
    char text[32];
    int failed = differs();
    bench_print_machine();
    signal(SIGPIPE, SIG_IGN);
    bench_peer peer = bench_peer_start(
        s.python, "tests/bench/peers/torch_attention.py", 120 + 10 * CASES * s.seconds);
    printf("t,direction,dt_gflops,peer,peer_gflops,ratio\n");
    for (int i = 0; i < (s.quick ? 1 : CASES) && !failed; i++) {
        attention a;
        if (!attention_make(&a, lengths[i])) {
            fprintf(stderr, "error: %d tokens: out of memory\n", lengths[i]);
            failed = 1;
            break;
        }
        for (int backward = 0; backward < 2; backward++) {
            double ratio = run_case(&a, backward, &peer, &s);
            least[backward] = isnan(ratio) ? NAN : fmin(least[backward], ratio);
        }
        attention_free(&a);
    }
    bench_peer_end(&peer);
    for (int backward = 0; backward < 2; backward++)
        printf("summary,min_%s,%s\n", direction[backward],
            bench_number(text, sizeof text, least[backward], "%.3f"));
    return failed;
}
