/* 11_zero3.c - ZeRO-3 for a model of your own: 8 residual layers in bf16, whose parameters are
   sharded over 4 ranks and gathered when a layer runs

   What you learn: ZeRO-3 (FSDP). At ZeRO-2 each of 4 ranks holds all parameter values, a quarter of
       the gradients and a quarter of the optimizer state. At ZeRO-3 a rank also holds only a
       quarter of the values. Each layer is a dt_block. When a block begins, an all-gather collects
       its parameter values, and a second all-gather prefetches the values of the next block. When
       the block ends, its values are freed. This happens in the forward pass and again in the
       backward pass, so the values are sent twice per step. With keep_gathered the values are sent
       once, but the complete model stays in memory until the update. Losses are bit-identical at
       all stages, because a step has one micro-batch.
   Run: cc -O3 examples/11_zero3.c -o 11_zero3 -lm -lpthread && ./11_zero3
   What you see: for stages 0, 2 and 3 the bytes that a rank holds and sends, beside the formulas of
       the ZeRO paper (arXiv:1910.02054), and the same last loss at every stage.
   Think about: before you run, which columns of the table would not be ten times as large with 80
       layers instead of 8? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <stdio.h>
#include <string.h>

/* steps; ranks; samples per rank and step; width of a sample; layers */
enum { STEPS = 12, RANKS = 4, B = 8, W = 64, L = 8 };

typedef struct layer {
    dt_tensor *up, *down;
} layer;
typedef struct job {
    const char *name;
    int stage, keep_gathered;
    double loss[STEPS]; /* this field and the next ones are results, filled in by rank 0 */
    /* memory after the last step, with the peaks of that step. Memory class comm contains gathered
       values, and gradients that are being reduced. */
    dt_memory memory;
    double elements, sent;  /* padded elements of all buckets; bytes sent in the last step */
    uint16_t values[W * W]; /* the first parameter after training, bf16 */
    float moment[W * W];    /* first Adam moment of that parameter */
    int is_released;        /* 1 if that parameter's ->data is NULL */
} job;

/* Returns the k-th number of a fixed pseudo-random sequence in [-1, 1). */
static float random_number(uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* Fills in a rank's samples: x (B,W) is random, y (B,W) is x shifted by one column and halved. */
static void samples(int step, int rank, float *x, float *y) {
    for (int i = 0; i < B * W; i++)
        x[i] = random_number((uint32_t)((step * RANKS + rank) * B * W + i));
    for (int i = 0; i < B * W; i++) y[i] = x[i / W * W + (i + 1) % W] / 2;
}

/* One layer, (B,W) -> (B,W). At ZeRO-3 `up` and `down` are gathered for the ops that read them and
   released when the block ends. */
static dt_tensor *layer_forward(dt_tensor *x, void *user) {
    const layer *l = (const layer *)user;
    return dt_add(x, dt_linear(dt_gelu(dt_linear(x, l->up, NULL)), l->down, NULL));
}

/* Returns the loss for x and y (B,W) in f32. All inputs of an op must have the same dtype, so both
   x and y are cast to the dtype of the parameters. */
static dt_tensor *model_loss(dt_ctx *ctx, layer *layers, const float *x, const float *y) {
    dt_tensor *out = dt_cast(dt_input(ctx, DT_F32, DT_SHAPE(B, W), x), DT_BF16);
    dt_tensor *want = dt_cast(dt_input(ctx, DT_F32, DT_SHAPE(B, W), y), DT_BF16);
    for (int i = 0; i < L; i++) out = dt_block(ctx, layer_forward, out, &layers[i]);
    return dt_mse(out, want, B * W * RANKS);
}

/* Reads a parameter and its first moment. Every rank calls dt_read and dt_zero_state, because every
   rank holds a shard. At stage 3 the parameter's ->data is NULL outside the block that uses it. */
static void read_param(dt_ctx *ctx, dt_zero *opt, const dt_tensor *p, job *j) {
    uint16_t values[W * W];
    float moment[W * W];
    int is_released = p->data == NULL;
    if (dt_read(p, values) != DT_OK || dt_zero_state(opt, 0, p, moment) != DT_OK ||
        dt_ctx_rank(ctx) > 0)
        return;
    memcpy(j->values, values, sizeof values);
    memcpy(j->moment, moment, sizeof moment);
    j->is_released = is_released;
}

static dt_status train(dt_ctx *ctx, void *user) { /* runs on every rank */
    job *j = (job *)user;
    layer layers[L];
    dt_param_desc narrow = { .dtype = DT_BF16 };
    for (int i = 0; i < L; i++) {
        /* A new scope also begins a new bucket. One all-gather gathers all values of a bucket. */
        dt_scope(ctx, (const char[]){ 'h', (char)('0' + i), '.', 0 });
        layers[i].up = dt_param_at(ctx, "up", DT_SHAPE(W, W), DT_NORMAL(0.1), narrow);
        layers[i].down = dt_param_at(ctx, "down", DT_SHAPE(W, W), DT_NORMAL(0.1), narrow);
    }
    dt_scope(ctx, NULL);
    dt_zero *opt =
        dt_zero_make(ctx, (dt_zero_desc){ .stage = j->stage, .keep_gathered = j->keep_gathered });
    for (int step = 0; step < STEPS; step++) {
        float x[B * W], y[B * W];
        samples(step, dt_ctx_rank(ctx), x, y);
        size_t before = dt_comm_bytes(ctx, DT_AXIS_DP);
        dt_memory_reset_peak(ctx);
        dt_tensor *loss = model_loss(ctx, layers, x, y);
        dt_backward(loss);
        double value = dt_item(loss);
        dt_sum_doubles(dt_world(ctx), &value, 1);
        dt_zero_step(opt, 2e-3);
        dt_reset(ctx);
        if (dt_ctx_rank(ctx) > 0) continue;
        j->loss[step] = value, j->memory = dt_memory_used(ctx);
        j->sent = (double)(dt_comm_bytes(ctx, DT_AXIS_DP) - before);
    }
    for (int i = 0; i < dt_bucket_count(ctx) && dt_ctx_rank(ctx) == 0; i++)
        j->elements += (double)dt_bucket_get(ctx, i)->padded;
    if (dt_error(ctx) == DT_OK) read_param(ctx, opt, layers[0].up, j);
    return dt_error(ctx);
}

/* Prints the bytes that a rank holds and sends, beside the bytes by the formulas. Returns 1 if they
   agree. The 12 bytes of optimizer state per element are an f32 master weight and two f32
   moments. */
static int formula_matches(const job *j) {
    dt_zero_bytes f = dt_zero_formula((dt_zero_formula_desc){ .elements = j->elements,
        .stage = j->stage,
        .ranks = RANKS,
        .keep_gathered = j->keep_gathered,
        .values = 2,
        .grads = 4,
        .state = 12 });
    double holds[3] = { (double)j->memory.live[DT_MEM_PARAMS], (double)j->memory.live[DT_MEM_GRADS],
        (double)j->memory.live[DT_MEM_OPTIM] };
    printf("%-13s %7.0f (%6.0f) %7.0f (%6.0f) %7.0f (%6.0f) %8zu %8.0f (%6.0f)  %.9f\n", j->name,
        holds[0], f.params, holds[1], f.grads, holds[2], f.optim, j->memory.peak[DT_MEM_COMM],
        j->sent, f.sent, j->loss[STEPS - 1]);
    return holds[0] == f.params && holds[1] == f.grads && holds[2] == f.optim && j->sent == f.sent;
}

int main(void) {
    enum { JOBS = 4, RELEASED = 2, KEPT = 3 };
    static job jobs[JOBS] = { { .name = "stage 0" }, { .name = "stage 2", .stage = 2 },
        { .name = "stage 3", .stage = 3 },
        { .name = "stage 3, kept", .stage = 3, .keep_gathered = 1 } };
    int ok = 1;
    printf("%-12s%18s%17s%17s%9s%18s  last loss\n", "bytes", "params (formula)", "grads (formula)",
        "optim (formula)", "in comm", "sent (formula)");
    for (int i = 0; i < JOBS; i++) {
        job *j = &jobs[i];
        ok &= dt_run((dt_run_desc){ .ranks = RANKS }, train, j) == DT_OK && formula_matches(j);
        ok &= !memcmp(j->loss, jobs[0].loss, sizeof j->loss) &&
              !memcmp(j->values, jobs[0].values, sizeof j->values) &&
              !memcmp(j->moment, jobs[0].moment, sizeof j->moment) &&
              j->is_released == (j->stage == 3);
    }
    ok &= jobs[RELEASED].memory.peak[DT_MEM_COMM] < jobs[KEPT].memory.peak[DT_MEM_COMM];
    ok &= jobs[0].loss[STEPS - 1] < 0.8 * jobs[0].loss[0] && jobs[0].moment[0] != 0;
    printf("%s: the bytes equal the formula; losses, values and optimizer state have equal bits\n",
        ok ? "ok" : "WRONG");
    return ok ? 0 : 1;
}
