/* 13_experts.c - mixture of experts on 4 ranks: a layer of 8 experts, where each token uses two

   What you learn: mixture of experts (MoE) and expert parallelism. An expert is a small MLP. The
       layer has 8 experts, and each token passes through two of them. The layer has four steps:

           router   ->  token dispatch  ->  experts           ->  token combine
           dt_route     dt_dispatch         dt_expert_linear      dt_combine
                                            (up and down)

       1. The router chooses two experts for each token and computes a weight for each of the two.
       2. Dispatch is an all-to-all. It sends each token's row to the ranks that hold its experts.
       3. Every expert multiplies the rows that it received by its own matrices.
       4. Combine sends the results back, multiplies them by the weights and adds the two results of
          each token.

       Each rank of the ep group holds 8/ep experts and trains on different sequences. tp may also
       shard the hidden units of each expert. An expert processes tokens of all ranks, so its
       gradient is complete. Every rank has a copy of the router and applies the copy to its own
       tokens only, so the router's gradient is summed over ep.
       The expert capacity limits how many tokens of a sequence each expert accepts: here at most
       1.25 times the mean over all experts. Tokens beyond the capacity are dropped. In this program
       some kinds of tokens are more frequent than others, so some experts are overloaded. The last
       two runs balance the load without a balancing loss (arXiv:2408.15664): after each step they
       lower the router bias of every expert that got more tokens than the mean, and raise it for
       the others. The bias changes which experts are chosen, but not the weights of their results.
   Run: cc -O3 examples/13_experts.c -o 13_experts -lm -lpthread && ./13_experts
   What you see: every layout has the losses of one rank and drops the same tokens. The balanced
       runs drop fewer tokens.
   Think about: before you run, which of the sent bytes grow with ep, and which with tp? Does
       balancing raise or lower the loss? */
#define DT_IMPLEMENTATION
#include "../dt_parallel.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* steps; sequences per step over all ranks; tokens per sequence; width; hidden width of an expert;
   experts; experts per token; kinds of tokens; number of last steps whose token counts are shown */
enum { STEPS = 60, B = 8, T = 32, C = 16, F = 32, E = 8, K = 2, KINDS = 8, TAIL = 10 };

typedef struct model {
    dt_tensor *router, *up, *down, *bias;
    dt_mesh mesh;
} model;
typedef struct job {
    const char *name;
    int ep, tp, balance;
    /* results: the losses, and for the last TAIL steps the number of choices of each expert
       (`tokens`) and of dropped choices; a token makes K choices */
    double loss[STEPS], tokens[E], dropped;
    size_t ep_bytes, tp_bytes; /* bytes that rank 0 sent in the last step */
} job;
typedef struct pass {
    const model *m;
    dt_route_counts *counts;
} pass;

/* Returns the k-th number of a fixed pseudo-random sequence in [-1, 1). */
static float random_number(uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* Fills in sequences [first, first + n) of a step, x and y (n,T,C). Each token has a kind; low
   kinds are more frequent. Each kind has its own center for x and its own rule that computes y from
   x. */
static void samples(int step, int first, int n, float *x, float *y) {
    for (int i = 0; i < n * T; i++) {
        uint32_t at = (uint32_t)((step * B + first) * T + i) * (C + 1);
        float u = (random_number(at) + 1) / 2;
        int kind = (int)(u * u * KINDS);
        for (uint32_t c = 0; c < C; c++)
            x[i * C + (int)c] =
                random_number((uint32_t)kind * C + c + 7) + random_number(at + 1 + c) / 4;
        for (int c = 0; c < C; c++) y[i * C + c] = x[i * C + (c + kind) % C] * (kind % 2 ? 1 : -1);
    }
}

static dt_tensor *layer_forward(dt_tensor *x, void *user) {
    const pass *p = (const pass *)user;
    const model *m = p->m;
    dt_route_desc d = {
        .k = K, .capacity = 1.25, .bias = m->bias, .tp = m->mesh.tp, .counts = p->counts
    };
    dt_routing *r = dt_route(x, m->router, d);
    /* (R,C): R rows for this rank's experts */
    dt_tensor *h = dt_dispatch(dt_tp_enter(x, m->mesh.tp, DT_REPLICATE), r, m->mesh.ep);
    /* (R,F/tp) */
    h = dt_expert_linear(h, r, m->up, NULL, (dt_expert_desc){ .activation = DT_ACT_GELU });
    /* (R,C) */
    h = dt_expert_linear(h, r, m->down, NULL, (dt_expert_desc){ .row_parallel = m->mesh.tp });
    /* (b,T,C) */
    return dt_redistribute(dt_combine(h, r), m->mesh.tp, DT_PARTIAL, DT_REPLICATE);
}

static model model_make(dt_ctx *ctx, const job *j) {
    model m = { .mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .ep = j->ep, .tp = j->tp }) };
    dt_shard_spec ep = { m.mesh.ep, 0 };
    m.router = dt_param(ctx, "router", DT_SHAPE(E, C), DT_NORMAL(0.1));
    m.up = dt_param_at(ctx, "up", DT_SHAPE(E, F, C), DT_NORMAL(0.2),
        (dt_param_desc){ .shards = { ep, { m.mesh.tp, 1 } } });
    m.down = dt_param_at(ctx, "down", DT_SHAPE(E, C, F), DT_NORMAL(0.2),
        (dt_param_desc){ .shards = { ep, { m.mesh.tp, 2 } } });
    m.bias = dt_param_at(ctx, "bias", DT_SHAPE(E), DT_ZEROS, (dt_param_desc){ .frozen = 1 });
    return m;
}

/* One step of gradient descent. `comm` is the group whose ranks hold partial gradients of p, or
   NULL if the gradient is complete. */
static void descend(dt_tensor *p, dt_comm *comm, float lr) {
    float *grad = (float *)p->grad;
    if (!grad ||
        dt_all_reduce(comm, grad, grad, (size_t)dt_count(p->shape), DT_F32, DT_SUM) != DT_OK)
        return;
    for (int64_t i = 0; i < dt_count(p->shape); i++) ((float *)p->data)[i] -= lr * grad[i];
}

static dt_status train(dt_ctx *ctx, void *user) { /* runs on every rank */
    job *j = (job *)user;
    model m = model_make(ctx, j);
    int b = B / j->ep;
    float x[B * T * C], y[B * T * C];
    for (int step = 0; step < STEPS; step++) {
        double tokens[E] = { 0 };
        dt_route_counts counts = { .experts = tokens };
        pass p = { &m, &counts };
        size_t ep = dt_comm_bytes(ctx, DT_AXIS_EP), tp = dt_comm_bytes(ctx, DT_AXIS_TP);
        samples(step, m.mesh.coord.ep * b, b, x, y);
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(b, T, C), x);
        dt_tensor *out =
            dt_block_at(ctx, layer_forward, in, &p, (dt_block_desc){ .user_bytes = sizeof p });
        dt_tensor *loss = dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(b, T, C), y), B * T);
        if (dt_backward(loss) != DT_OK) break;
        double sums[2] = { dt_item(loss), counts.dropped };
        dt_sum_doubles(m.mesh.ep, sums, 2);
        size_t ep_sent = dt_comm_bytes(ctx, DT_AXIS_EP) - ep,
               tp_sent = dt_comm_bytes(ctx, DT_AXIS_TP) - tp;
        descend(m.router, m.mesh.ep, 0.3f);
        descend(m.up, NULL, 0.3f); /* NULL: the experts' gradients are complete */
        descend(m.down, NULL, 0.3f);
        /* This call also sums `tokens` over ep. */
        dt_route_update_bias(m.bias, tokens, j->balance ? 0.01 : 0, &m.mesh.ep, 1);
        dt_clear_grads(ctx);
        dt_reset(ctx);
        if (dt_ctx_rank(ctx) > 0) continue;
        j->loss[step] = sums[0], j->ep_bytes = ep_sent, j->tp_bytes = tp_sent;
        for (int e = 0; e < E && step >= STEPS - TAIL; e++) j->tokens[e] += tokens[e];
        if (step >= STEPS - TAIL) j->dropped += sums[1];
    }
    return dt_error(ctx);
}

/* Returns 1 if the losses of a layout equal those of one rank up to rounding, and its token counts
   equal those of one rank exactly. */
static int matches_one_rank(const job *j, const job *one) {
    double max = 0;
    for (int i = 0; i < STEPS; i++) max = fmax(max, fabs(j->loss[i] - one->loss[i]) / one->loss[i]);
    return max < 1e-4 && j->dropped == one->dropped &&
           memcmp(j->tokens, one->tokens, sizeof j->tokens) == 0;
}

/* Returns the number of tokens of the busiest expert, divided by the mean over all experts. */
static double busiest(const job *j) {
    double max = 0;
    for (int e = 0; e < E; e++) max = fmax(max, j->tokens[e]);
    return max / (TAIL * B * T * K / E);
}

int main(void) {
    enum { JOBS = 5, BALANCED = 3 };
    static job jobs[JOBS] = { { .name = "1 rank", .ep = 1, .tp = 1 },
        { .name = "ep 4", .ep = 4, .tp = 1 }, { .name = "ep 2 x tp 2", .ep = 2, .tp = 2 },
        { .name = "1 rank, balanced", .ep = 1, .tp = 1, .balance = 1 },
        { .name = "ep 4, balanced", .ep = 4, .tp = 1, .balance = 1 } };
    int ok = 1;
    printf("%-17s loss of step 1  %d         tokens of each expert in the last %d steps, dropped   "
           "sent over ep, tp\n",
        "", STEPS, TAIL);
    for (int i = 0; i < JOBS; i++) {
        job *j = &jobs[i];
        /* Use the CPU kernels even in a CUDA build, because the program reads tensor data. */
        ok &= dt_run((dt_run_desc){ .ranks = j->ep * j->tp, .kernels = dt_kernels_cpu() }, train,
                  j) == DT_OK;
        ok &= matches_one_rank(j, &jobs[i < BALANCED ? 0 : BALANCED]);
        printf("%-17s %.6f  %.6f ", j->name, j->loss[0], j->loss[STEPS - 1]);
        for (int e = 0; e < E; e++) printf(" %4.0f", j->tokens[e]);
        printf("  %4.1f%%  %8zu %8zu\n", 100 * j->dropped / (TAIL * B * T * K), j->ep_bytes,
            j->tp_bytes);
    }
    printf(
        "the busiest expert gets %.2f times the mean number of tokens, %.2f times with balancing\n",
        busiest(&jobs[0]), busiest(&jobs[BALANCED]));
    ok &= busiest(&jobs[BALANCED]) < 0.8 * busiest(&jobs[0]) &&
          jobs[BALANCED].dropped < jobs[0].dropped;
    ok &= jobs[0].loss[STEPS - 1] < 0.7 * jobs[0].loss[0];
    printf("%s: every layout has the losses of one rank and drops the same tokens\n",
        ok ? "ok" : "WRONG");
    return ok ? 0 : 1;
}
