/* 19_parameter_server.c - a dense model in two partitions, each on a parameter server of its own

   What you learn: the parameter server (Li et al., OSDI 2014). Two servers hold the model, two
       workers train it. A worker pulls all parameters, computes the gradient of its samples, and
       pushes to each server the gradient of the partition that this server holds.

           server 0: runs of W        server 1: the other runs of W      (1,024 elements a run)
                 |  \________________________/  |
                 |  /                        \  |       pull W, push gradients
              worker 0                     worker 1

       Synchronous: a server waits for the gradients of both workers, adds them, updates once, and
       only then answers the next pulls. Asynchronous: it applies each gradient when it arrives, so a
       worker may compute with parameters that lack steps of the other worker. The staleness of a
       pull is the number of steps by which the slowest worker is behind.
   Run: cc -O3 examples/19_parameter_server.c -o 19_parameter_server -lm -lpthread
        ./19_parameter_server
   What you see: which runs each server holds; sync has the losses of one worker with the whole
       batch, and no answer is stale (a pull has one answer from each server). With async, worker 1 is slow, and worker 0 does not wait for it:
       worker 0's pulls become stale, and its steps are done much earlier.
   Think about: what does each worker send in a step? With 8 workers, what would each of the two
       servers receive? Which of the two figures does an all-reduce bound? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* steps; samples of a step over all workers; inputs and outputs; W (OUT,IN) has 8 runs */
enum { STEPS = 60, B = 32, IN = 256, OUT = 32, RUNS = IN * OUT / DT_PS_RUN, MAX_WORKERS = 2 };

typedef struct job {
    int workers, servers, mode;
    double delay;                    /* seconds that worker 1 is slower in each step */
    double loss[MAX_WORKERS][STEPS]; /* of a worker's part of the batch */
    double seconds;                  /* of worker 0 */
    dt_ps_stats worker[MAX_WORKERS];
    int server_of[RUNS];
} job;

static float random_number(uint32_t k) { /* the k-th of a fixed sequence in [-1,1) */
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* n samples from number `first` on: y = V x, and V is what the model has to find. */
static void samples(int first, int n, float *x, float *y) {
    for (int i = 0; i < n * IN; i++) x[i] = random_number((uint32_t)(first * IN + i) + 100000);
    for (int i = 0; i < n * OUT; i++) {
        y[i] = 0;
        for (int k = 0; k < IN; k++)
            y[i] += random_number((uint32_t)(i % OUT * IN + k)) * x[i / OUT * IN + k];
    }
}

static void work(dt_ctx *ctx, dt_ps *ps, int w, job *j) {
    const dt_host *host = dt_ctx_host(ctx);
    int rank = dt_ctx_rank(ctx), n = B / j->workers;
    double begin = host->now(host->user);
    for (int step = 0; step < STEPS && dt_error(ctx) == DT_OK; step++) {
        float x[B * IN], y[B * OUT];
        samples(step * B + rank * n, n, x, y);
        dt_tensor *W = dt_ps_dense_read(ps, w); /* pull */
        dt_tensor *out = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(n, IN), x), W, NULL);
        dt_tensor *loss = dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(n, OUT), y), B * OUT);
        dt_backward(loss);                   /* adds up the gradient of W */
        j->loss[rank][step] = dt_item(loss); /* divided by the whole batch: the parts add up */
        dt_reset(ctx);
        if (rank == 1 && j->delay > 0) host->sleep(host->user, j->delay);
        dt_ps_step(ps, 2.0); /* push */
    }
    dt_ps_end(ps);
    if (rank == 0) j->seconds = host->now(host->user) - begin;
    j->worker[rank] = dt_ps_info(ps);
}

static dt_status rank_main(dt_ctx *ctx, void *user) { /* runs on every rank */
    job *j = (job *)user;
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = j->servers, .mode = j->mode });
    int w = dt_ps_dense(
        ps, (dt_table_desc){ .name = "W", .init = DT_ZEROS }, DT_SHAPE(OUT, IN)); /* SGD */
    if (!dt_ps_is_server(ps)) {
        work(ctx, ps, w, j);
        return dt_error(ctx);
    }
    dt_ps_serve(ps); /* until both workers have called dt_ps_end */
    uint64_t runs[RUNS];
    int64_t held = dt_table_changed(dt_ps_owned(ps, w), INT64_MIN, runs, RUNS);
    for (int i = 0; i < held; i++) j->server_of[runs[i]] = dt_ctx_rank(ctx) - j->workers;
    return dt_error(ctx);
}

/* The loss of the whole batch of a step. */
static double loss_of(const job *j, int step) {
    double sum = 0;
    for (int r = 0; r < j->workers; r++) sum += j->loss[r][step];
    return sum;
}

static void print_stale(const char *name, const job *j) {
    printf("%s:", name);
    for (int r = 0; r < j->workers; r++) {
        printf("  worker %d's answers, by staleness:", r);
        for (int i = 0; i < DT_PS_HISTOGRAM; i++)
            if (j->worker[r].staleness[i])
                printf(" %d%s: %lld", i, i == DT_PS_HISTOGRAM - 1 ? "+" : "",
                    (long long)j->worker[r].staleness[i]);
    }
    printf("\n");
}

int main(void) {
    static job one = { 1, 1, .mode = DT_PS_SYNC },
               sync = { 2, 2, .mode = DT_PS_SYNC, .delay = 1e-3 },
               async = { 2, 2, .mode = DT_PS_ASYNC, .delay = 1e-3 };
    job *all[] = { &one, &sync, &async };
    double apart = 0;
    int64_t stale = 0;
    for (int i = 0; i < 3; i++)
        if (dt_run((dt_run_desc){ .ranks = all[i]->workers + all[i]->servers }, rank_main,
                all[i]) != DT_OK)
            return 1;
    for (int s = 0; s < 2; s++) {
        printf("server %d holds runs", s);
        for (int i = 0; i < RUNS; i++)
            if (sync.server_of[i] == s) printf(" %d", i);
        printf("\n");
    }
    printf(" step  one worker        sync       async    (loss of the batch)\n");
    for (int i = 0; i < STEPS; i += 10)
        printf("%5d  %10.5f  %10.5f  %10.5f\n", i + 1, loss_of(&one, i), loss_of(&sync, i),
            loss_of(&async, i));
    print_stale("sync ", &sync);
    print_stale("async", &async);
    printf("worker 0 took %.0f ms with sync, %.0f ms with async\n", 1e3 * sync.seconds,
        1e3 * async.seconds);
    for (int i = 1; i < DT_PS_HISTOGRAM; i++) stale += sync.worker[0].staleness[i];
    for (int i = 0; i < STEPS; i++)
        apart = fmax(apart, fabs(loss_of(&sync, i) / loss_of(&one, i) - 1));
    int ok = stale == 0 && apart < 1e-4 && loss_of(&one, STEPS - 1) < loss_of(&one, 0) / 20 &&
             loss_of(&async, STEPS - 1) < loss_of(&async, 0) / 2;
    printf("%s\n", ok ? "ok" : "WRONG");
    return !ok;
}
