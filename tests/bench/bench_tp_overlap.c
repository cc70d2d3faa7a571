/* bench_tp_overlap.c - how much tensor-parallel traffic --tp-overlap hides behind products
   Public domain or MIT, at your choice; see LICENSE.

       make build/bench_tp_overlap && build/bench_tp_overlap [--quick] [--rate GFLOPS]

   A GPT trains with tp 4 over a simulated link (dt_run_desc.link). For each row the program first
   measures a step without a limit of the link: that is the time of the products. It then sets the
   bandwidth so that the traffic of a step takes exactly as long: without overlap the step takes
   twice as long as either of them, and with perfect overlap as long as one.

       ratio = step over the link / longer of (products, traffic)

   Four ranks on fewer cores take turns, so one rank's products would run in the time in which
   another rank waits for its link, and overlap could not be told from turns. Therefore time is
   simulated (tests/support/virtual_clock.h): a product of each rank takes 2 m n k / rate seconds, as
   on an accelerator with --rate GFLOP/s (default 10), and everything else takes none. The order
   of all operations is that of a real run. --rate 0 computes the products and measures the machine,
   with its number of cores. tests/parallel/test_tp_overlap.c proves that the bits are equal. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_zero.h"

#include "examples/gpt.h"
#include "examples/train.h"

#include "tests/bench/bench.h"
#include "tests/support/virtual_clock.h"

enum { TP = 4, STEPS = 2 };

typedef struct settings {
    int quick;
    double rate; /* GFLOP/s of simulated products; 0: the products are computed */
} settings;

/* One run, in memory that all ranks share. */
typedef struct result {
    train_config config;
    double ms, bytes;
} result;

static settings parse(int argc, char **argv) {
    settings s = { 0, 10 };
    const char *v;
    for (int i = 1; i < argc; i++) {
        int good = 1;
        if (strcmp(argv[i], "--quick") == 0)
            s.quick = 1;
        else if ((v = bench_option(argc, argv, &i, "--rate")))
            good = (s.rate = atof(v)) >= 0;
        else
            good = 0;
        if (!good) bench_refuse(argc, argv, i, "--quick --rate GFLOPS");
    }
    return s;
}

static gpt_config model_of(const settings *s, int sp) {
    return (gpt_config){ .layers = s->quick ? 1 : 16,
        .width = s->quick ? 64 : 256,
        .heads = 8,
        .kv_heads = 8,
        .ffn = s->quick ? 256 : 1024,
        .seq = 64,
        .vocab = 256,
        .tied = 1,
        .sp = sp,
        .dtype = DT_F32 };
}

static void on_step(dt_ctx *ctx, const train_row *row, void *user) {
    result *r = (result *)user;
    (void)ctx;
    if (row->step > 1) r->ms = fmin(r->ms, row->ms);
    r->bytes = row->bytes[DT_AXIS_TP];
}

static dt_status run_rank(dt_ctx *ctx, void *user) {
    train_config config = ((result *)user)->config;
    config.user = user;
    clock_enter(TP);
    dt_status status = train(ctx, &config);
    clock_leave();
    return status;
}

/* Trains once. Returns the milliseconds of a step and stores the bytes of the traffic. */
static double step_ms(
    const settings *s, int sp, int pieces, double bandwidth, train_files data, double *bytes) {
    result r = { .ms = INFINITY };
    dt_kernels kernels = *dt_kernels_cpu();
    dt_host host = s->rate > 0 ? clock_host() : *dt_host_default();
    if (s->rate > 0) kernels.matmul = clock_matmul;
    clock_flops_per_s = s->rate * 1e9;
    r.config.data = data;
    r.config.model = model_of(s, sp);
    r.config.mesh = (dt_mesh_desc){ .tp = TP, .tp_overlap = pieces };
    r.config.zero = (dt_zero_desc){ .beta1 = 0.9, .beta2 = 0.95 };
    r.config.lr = (dt_lr_desc){ .peak = 1e-9, .kind = DT_LR_CONSTANT, .steps = 1, .min_ratio = 1 };
    r.config.micro_batch = 16;
    r.config.accum = 1;
    r.config.stop_at = STEPS;
    r.config.on_step = on_step;
    dt_run_desc run = { .ranks = TP, .host = &host, .kernels = &kernels, .link = { 0, bandwidth } };
    dt_status status = dt_run(run, run_rank, &r);
    if (status != DT_OK) exit(1);
    *bytes = r.bytes;
    return r.ms;
}

/* Prints a row. Returns its ratio. */
static double bench_row(const settings *s, int sp, int pieces, train_files data) {
    double bytes, products = step_ms(s, sp, 0, 0, data, &bytes);
    double bandwidth = bytes / (products / 1000);
    double step = step_ms(s, sp, pieces, bandwidth, data, &bytes);
    double traffic = bytes / bandwidth * 1000, ratio = step / fmax(products, traffic);
    printf("%d,%s,%d,%.3f,%.3f,%.3f,%.3f\n", TP, sp ? "on" : "off", pieces, products, traffic, step,
        ratio);
    fflush(stdout);
    return ratio;
}

int main(int argc, char **argv) {
    settings s = parse(argc, argv);
    train_files data = { .count = 0 };
    if (!train_files_find_sources(&data)) {
        fputs("error: the project's sources are neither in . nor beside the program\n", stderr);
        return 2;
    }
    bench_print_machine();
    if (s.rate > 0)
        printf("# simulated time: products at %g GFLOP/s a rank\n", s.rate);
    else
        printf("# products are computed\n");
    printf("tp,sp,pieces,products_ms,traffic_ms,step_ms,ratio\n");
    static const int pieces[2] = { 0, 16 };
    double ratios[2][2];
    for (int sp = 1; sp >= 0; sp--)
        for (int i = 0; i < 2; i++) ratios[sp][i] = bench_row(&s, sp, pieces[i], data);
    for (int sp = 1; sp >= 0; sp--)
        for (int i = 0; i < 2; i++)
            printf("summary,ratio_sp_%s_pieces_%d,%.3f\n", sp ? "on" : "off", pieces[i],
                ratios[sp][i]);
    train_files_free(&data);
    return 0;
}
