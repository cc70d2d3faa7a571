/* 13_experts.c - a mixture of experts over 4 ranks: 8 small networks, of which each token uses two

   What you learn: the four steps of such a layer. dt_route chooses two experts for each token,
   dt_dispatch sends the token's row to the ranks that hold them, dt_expert_linear is each expert's
   product with its rows, dt_combine sends the results back and adds them up by their weights. Here
   each rank of ep has sequences of its own and 8 / ep experts; the hidden numbers of an expert may
   be cut over tp as well. What an expert learns it learns from the tokens of all ranks, so its
   gradient is complete; the router's is a part on each, and is summed. An expert has room for 1.25
   times its share of a sequence; what comes beyond is dropped. Some kinds of tokens are frequent,
   so some experts are in demand. After each step the last two runs move a number of each expert,
   which is added when experts are chosen and not when they are weighed: down where more tokens came
   than the mean (without a loss: arXiv:2408.15664). No layout may change any of this: losses are
   those of one rank, drops are the same ones. Predict before you run: which bytes grow with ep,
   which with tp? What does balance do to the loss? Run: cc -O3 examples/13_experts.c -o 13_experts
   -lm -lpthread && ./13_experts */
#define DT_IMPLEMENTATION
#include "../dt_parallel.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* steps; sequences of a step over all ranks, tokens of each; numbers of a token, in an expert;
   experts, those of one token; kinds of tokens; the last steps, which are shown */
enum { STEPS = 60, B = 8, T = 32, C = 16, F = 32, E = 8, K = 2, KINDS = 8, TAIL = 10 };

typedef struct model {
    dt_tensor *router, *up, *down, *bias;
    dt_mesh mesh;
} model;
typedef struct job {
    const char *name;
    int ep, tp, balance;
    /* results: of TAIL last steps, what came to each expert */
    double loss[STEPS], tokens[E], dropped;
    size_t ep_bytes, tp_bytes; /* that rank 0 sent in the last step */
} job;
typedef struct pass {
    const model *m;
    dt_route_counts *counts;
} pass;

/* The k-th of a sequence of numbers that look random, in [-1, 1). */
static float number(uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

/* Sequences first .. first+n-1 of a step. A token is of a kind, the low ones more often; each kind
   has a center and a rule of its own for y. */
static void samples(int step, int first, int n, float *x, float *y) {
    for (int i = 0; i < n * T; i++) {
        uint32_t at = (uint32_t)((step * B + first) * T + i) * (C + 1);
        float u = (number(at) + 1) / 2;
        int kind = (int)(u * u * KINDS);
        for (uint32_t c = 0; c < C; c++)
            x[i * C + (int)c] = number((uint32_t)kind * C + c + 7) + number(at + 1 + c) / 4;
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
    /* (R,C) */
    dt_tensor *h = dt_dispatch(dt_tp_enter(x, m->mesh.tp, DT_REPLICATE), r, m->mesh.ep);
    /* (R,F/tp) */
    h = dt_expert_linear(h, r, m->up, NULL, (dt_expert_desc){ .activation = DT_ACT_GELU });
    /* (R,C) */
    h = dt_expert_linear(h, r, m->down, NULL, (dt_expert_desc){ .partial = m->mesh.tp });
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

/* One step down the gradient, summed over the ranks of the group: those that saw other tokens. */
static void descend(dt_tensor *p, dt_comm *comm, float lr) {
    float *grad = (float *)p->grad;
    if (!grad ||
        dt_all_reduce(comm, grad, grad, (size_t)dt_count(p->shape), DT_F32, DT_SUM) != DT_OK)
        return;
    for (int64_t i = 0; i < dt_count(p->shape); i++) ((float *)p->data)[i] -= lr * grad[i];
}

static dt_status train(dt_ctx *ctx, void *user) { /* every rank runs this */
    job *j = (job *)user;
    model m = model_make(ctx, j);
    int b = B / j->ep;
    float x[B * T * C], y[B * T * C];
    for (int step = 0; step < STEPS; step++) {
        double tokens[E] = { 0 };
        dt_route_counts counts = { .experts = tokens };
        pass p = { &m, &counts };
        size_t ep = dt_comm_bytes(ctx, DT_AXIS_EP), tp = dt_comm_bytes(ctx, DT_AXIS_TP);
        samples(step, m.mesh.at.ep * b, b, x, y);
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
        descend(m.up, NULL, 0.3f); /* an expert's rows came from all ranks already */
        descend(m.down, NULL, 0.3f);
        /* and tokens are of all ranks now */
        dt_route_balance(m.bias, tokens, j->balance ? 0.01 : 0, &m.mesh.ep, 1);
        dt_clear_grads(ctx);
        dt_reset(ctx);
        if (dt_ctx_rank(ctx) > 0) continue;
        j->loss[step] = sums[0], j->ep_bytes = ep_sent, j->tp_bytes = tp_sent;
        for (int e = 0; e < E && step >= STEPS - TAIL; e++) j->tokens[e] += tokens[e];
        if (step >= STEPS - TAIL) j->dropped += sums[1];
    }
    return dt_error(ctx);
}

/* Whether a layout trained as one rank did: losses to rounding, counts and drops exactly. */
static int like_one(const job *j, const job *one) {
    double most = 0;
    for (int i = 0; i < STEPS; i++)
        most = fmax(most, fabs(j->loss[i] - one->loss[i]) / one->loss[i]);
    return most < 1e-4 && j->dropped == one->dropped &&
           memcmp(j->tokens, one->tokens, sizeof j->tokens) == 0;
}

static double busiest(const job *j) {
    double most = 0;
    for (int e = 0; e < E; e++) most = fmax(most, j->tokens[e]);
    return most / (TAIL * B * T * K / E);
}

int main(void) {
    enum { JOBS = 5, BALANCED = 3 };
    static job jobs[JOBS] = { { .name = "1 rank", .ep = 1, .tp = 1 },
        { .name = "ep 4", .ep = 4, .tp = 1 }, { .name = "ep 2 x tp 2", .ep = 2, .tp = 2 },
        { .name = "1 rank, balanced", .ep = 1, .tp = 1, .balance = 1 },
        { .name = "ep 4, balanced", .ep = 4, .tp = 1, .balance = 1 } };
    int ok = 1;
    printf("%-17s loss of step 1  %d         tokens of each expert in the last %d steps, dropped   "
           "   sent on ep, tp\n",
        "", STEPS, TAIL);
    for (int i = 0; i < JOBS; i++) {
        job *j = &jobs[i];
        /* The CPU, in a build for GPUs too: we look at data. */
        ok &= dt_run((dt_run_desc){ .ranks = j->ep * j->tp, .kernels = dt_kernels_cpu() }, train,
                  j) == DT_OK;
        ok &= like_one(j, &jobs[i < BALANCED ? 0 : BALANCED]);
        printf("%-17s %.6f  %.6f ", j->name, j->loss[0], j->loss[STEPS - 1]);
        for (int e = 0; e < E; e++) printf(" %4.0f", j->tokens[e]);
        printf("  %4.1f%%  %8zu %8zu\n", 100 * j->dropped / (TAIL * B * T * K), j->ep_bytes,
            j->tp_bytes);
    }
    printf("the busiest expert has %.2f times its share, balanced %.2f\n", busiest(&jobs[0]),
        busiest(&jobs[BALANCED]));
    ok &= busiest(&jobs[BALANCED]) < 0.8 * busiest(&jobs[0]) &&
          jobs[BALANCED].dropped < jobs[0].dropped;
    ok &= jobs[0].loss[STEPS - 1] < 0.7 * jobs[0].loss[0];
    printf("%s: losses of one rank in every layout, and the same tokens dropped\n",
        ok ? "ok" : "WRONG");
    return ok ? 0 : 1;
}
