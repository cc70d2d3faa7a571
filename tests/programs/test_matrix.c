/* test_matrix.c - every layout compared with one rank: random models and layouts, a shrinker

   Each case draws a model, a batch and a layout from the table of fields below. It trains the model
   for a few steps on the ranks of the layout and on one rank with the full batch. It compares the
   losses, gradient norms, gradients and optimizer state of the first step, the parameters after the
   last step, and the side losses of mixtures, by the rule of DESIGN.md: ||a-b|| <= tol * max(||b||,
   s), with 2-norms of a tensor. The counts of choices per expert and of dropped choices must be
   equal. All copies of a value must have the same bits. Memory that a ZeRO stage frees is filled
   with NaN.

   Then the same layout is trained again with every setting changed that must not change a bit: the
   ZeRO stage (0 and 1, 2 and 3; any two with one micro-batch or the tree all-reduce), overlap of
   reductions and gathers, keep_gathered, offload, recompute, the backward in halves, the schedule,
   chunks and stage boundaries of a pipeline, overlap of tensor-parallel traffic. Without tied weights the pipeline itself may go; some
   cases take processes in place of threads. A failing case is shrunk: every field is set to its
   simplest value with which the case still fails, and a command that repeats the case is printed.

   In f64 every factoring of 1 to 12 ranks into dp x tp x cp x pp x ep is a case, and so is every
   entry of `named`. Every pair of values of two fields occurs in a case (axes count as 1 or more),
   unless no valid case can have both; then the pair is printed with the rule that forbids it. Cases
   in other types follow.

       test_matrix [--cases N] [--seed S]       at least N cases in f64 (default 222, with CASES=all
                                                348), and N/6 in other types;
                                                --from I: starts with case I
       test_matrix --case 'model=1,dp=2,...'    one case; other fields have their simplest value */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#ifndef ON_DEVICES
#define ON_DEVICES 0
#endif
#define DT__MIN_PIECE_ROWS 1 /* so that few tokens travel in pieces too */
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "tests/support/check.h"
#if ON_DEVICES
#include "tests/cuda/fake_cuda.h"
#endif
#include <sys/mman.h>
#include <time.h>

// ==== Cases =====================================================================================

typedef struct spec {
    int dp, tp, cp, pp, ep;
    int model, llama, layers, heads, dim, gqa, ffn, seq, vocab, tied, dropout, smoothing, ignore,
        docs, type, grads;
    int experts, top_k, capacity, every, shared, balance, z, bias, deep;
    int sched, chunks, cut, sp, kind, accum, micro, stage, shard, keep, no_overlap, tree, offload;
    int optimizer, clip, bucket, freeze, split, recompute, steps, procs, devices, late, net, lora;
    int fold, pieces;
} spec;

enum { SAMPLE = 16, MOST_DEVICES = 8 };
enum { MODEL_GPT = 0, MODEL_OWN };
enum { NET_NONE = 0, NET_TCP, NET_NCCL };
enum { TYPE_F64 = 0, TYPE_F32, TYPE_BF16, TYPE_F16 };
enum { OFF_NONE = 0, OFF_STATE, OFF_STATE_DISK, OFF_ALL, OFF_ALL_DISK };
enum { REC_NONE = 0, REC_SELECTIVE, REC_FULL, REC_FULL_2, REC_FULL_3 };
enum { OPT_ADAMW = 0, OPT_ADAM, OPT_SGD, OPT_MOMENTUM, OPT_OWN };
enum { DEEP_NONE = 0, DEEP_LATENT, DEEP_LATENT_MTP, DEEP_MTP };
enum { LORA_NONE = 0, LORA_QV, LORA_ALL, LORA_BF16, LORA_NF4, LORA_INT8, LORAS };
enum { CUT_EVEN = 0, CUT_ENDS, CUT_LIST, CUT_LIST_2 };

/* Parser, printer, generator and shrinker all read this table. The first value is the simplest.
   heads: per tp rank. gqa: query heads per key head. seq: tokens per cp rank and, with sp, per tp
   rank. experts: per ep rank. capacity: capacity factor * 2. every: a mixture in every layer or in
   every second. deep: parts of DeepSeek-V3 in a Llama: sigmoid routing with any value but 0; latent
   attention with a latent of queries, or without it and a module of multi-token prediction, or two
   modules and ordinary attention. chunks: stages per rank. cut: stages of equal length, or embedding and head as
   stages of their own, or random stages. accum: micro-batches. shard: ranks of a ZeRO shard group,
   0: all. devices: 0: the CPU. late: the seed of the order in which streams run. net: ranks share
   memory, connect by TCP, or have one device each and NCCL. lora: adapters of a frozen GPT, whose
   weights may be quantised. fold: expert_tp of expert folding; ep is then no factor of the
   ranks. grads: gradients of 16-bit parameters are stored and summed in 16 bits. pieces: overlap of
   tensor-parallel traffic and products. */
typedef struct field {
    const char *name;
    size_t at;
    int n;
    int values[8];
} field;
#define COUNT(...) (int)(sizeof((int[]){ __VA_ARGS__ }) / sizeof(int))
#define F(name, ...) \
    { \
#name, offsetof(spec, name), COUNT(__VA_ARGS__), { __VA_ARGS__ } \
    }
static const field fields[] = {
    F(dp, 1, 2, 3, 4, 6),
    F(tp, 1, 2, 3, 4, 6),
    F(cp, 1, 2, 3, 4, 6),
    F(pp, 1, 2, 3, 4, 6),
    F(ep, 1, 2, 3, 4, 6),
    F(procs, 0, 1),
    F(devices, 0, 1, 2, 3, 4, 5, 6, 8),
    F(late, 0),
    F(net, NET_NONE, NET_TCP, NET_NCCL),
    F(lora, LORA_NONE, LORA_QV, LORA_ALL, LORA_BF16, LORA_NF4, LORA_INT8),
    F(fold, 0, 1, 2, 3, 4, 6),
    F(grads, 0, 1),
    /* the generator does not draw the fields above one by one */
    F(model, MODEL_GPT, MODEL_OWN),
    F(llama, 0, 1),
    F(layers, 1, 2, 3, 6),
    F(heads, 1, 2, 3),
    F(dim, 1, 2, 3, 4),
    F(gqa, 1, 2, 3),
    F(ffn, 1, 4, 7, 16),
    F(seq, 1, 2, 3, 8),
    F(vocab, 2, 5, 17, 31),
    F(tied, 0, 1),
    F(dropout, 0, 1),
    F(smoothing, 0, 1),
    F(ignore, 0, 1),
    F(docs, 0, 1),
    F(type, TYPE_F64, TYPE_F32, TYPE_BF16, TYPE_F16),
    F(experts, 0, 1, 2, 3),
    F(top_k, 1, 2),
    F(capacity, 0, 1, 2, 3),
    F(every, 1, 2),
    F(shared, 0, 1, 2),
    F(balance, 0, 1),
    F(z, 0, 1),
    F(bias, 0, 1),
    F(deep, DEEP_NONE, DEEP_LATENT, DEEP_LATENT_MTP, DEEP_MTP),
    F(sched, DT_SCHEDULE_NAIVE, DT_SCHEDULE_AFAB, DT_SCHEDULE_1F1B, DT_SCHEDULE_INTERLEAVED,
        DT_SCHEDULE_ZB, DT_SCHEDULE_ZBV, DT_SCHEDULE_DUALPIPE_V),
    F(chunks, 1, 2, 3),
    F(cut, CUT_EVEN, CUT_ENDS, CUT_LIST, CUT_LIST_2),
    F(sp, 0, 1),
    F(kind, DT_CP_RING, DT_CP_ZIGZAG, DT_CP_ALLGATHER, DT_CP_ULYSSES),
    F(accum, 1, 2, 3, 4, 8),
    F(micro, 1, 2),
    F(stage, 0, 1, 2, 3),
    F(shard, 0, 1, 2, 3),
    F(keep, 0, 1),
    F(no_overlap, 0, 1),
    F(pieces, 0, 2, 3),
    F(tree, 0, 1),
    F(offload, OFF_NONE, OFF_STATE, OFF_STATE_DISK, OFF_ALL, OFF_ALL_DISK),
    F(optimizer, OPT_ADAMW, OPT_ADAM, OPT_SGD, OPT_MOMENTUM, OPT_OWN),
    F(clip, 0, 1),
    F(bucket, 0, 64, 4096),
    F(freeze, 0, 1),
    F(split, 0, 1),
    F(recompute, REC_NONE, REC_SELECTIVE, REC_FULL, REC_FULL_2, REC_FULL_3),
    F(steps, 1, 2),
};
enum { FIELDS = sizeof fields / sizeof *fields, AXES = 5, FIRST = 12, DRAWN = FIELDS - FIRST + 6 };

static int *value_of(spec *s, const field *f) { return (int *)((char *)s + f->at); }

static spec simplest(void) {
    spec s;
    for (int i = 0; i < FIELDS; i++) *value_of(&s, &fields[i]) = fields[i].values[0];
    return s;
}

static void print_spec(spec s, char *text, size_t bytes) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < FIELDS && used < bytes; i++)
        if (*value_of(&s, &fields[i]) != fields[i].values[0])
            used += (size_t)snprintf(text + used, bytes - used, "%s%s=%d", used ? "," : "",
                fields[i].name, *value_of(&s, &fields[i]));
}

static int parse_spec(const char *text, spec *s) {
    *s = simplest();
    while (*text) {
        size_t n = strcspn(text, "=");
        int i = 0;
        while (i < FIELDS && (strlen(fields[i].name) != n || strncmp(fields[i].name, text, n) != 0))
            i++;
        if (i == FIELDS || text[n] != '=') return 0;
        char *end;
        *value_of(s, &fields[i]) = (int)strtol(text + n + 1, &end, 10);
        text = *end == ',' ? end + 1 : end;
        if (*end && *end != ',') return 0;
    }
    return 1;
}

static int replicas_of(spec s) { return s.dp * (s.fold ? 1 : s.ep); }
static int ranks_of(spec s) { return replicas_of(s) * s.tp * s.cp * s.pp; }
static int heads_of(spec s) { return s.heads * s.tp; }
static int tokens_of(spec s) { return s.seq * s.cp * (s.sp || s.fold ? s.tp : 1); }
static int experts_of(spec s) { return s.experts * s.ep; }
static int sequences_of(spec s) { return replicas_of(s) * s.accum * s.micro; }
static int stages_of(spec s) { return s.pp * s.chunks; }
static int items_of(spec s) { return 2 * s.layers + (s.model == MODEL_GPT ? 2 : 0); }
static int is_mixture(spec s, int layer) { return s.experts > 0 && (layer + 1) % s.every == 0; }
static int is_latent(spec s) {
    return s.model == MODEL_GPT && s.llama && s.deep && s.deep < DEEP_MTP;
}
static int modules_of(spec s) {
    return s.model == MODEL_GPT && s.llama && s.deep > DEEP_LATENT ? s.deep - DEEP_LATENT : 0;
}
static int kv_heads_of(spec s) { return is_latent(s) ? heads_of(s) : heads_of(s) / s.gqa; }
static int mixtures_of(spec s) { return s.experts > 0 ? s.layers / s.every : 0; }

/* The same case on one rank, with the same sizes of the model. */
static spec alone_of(spec s) {
    spec a = s;
    a.micro = sequences_of(s);
    a.heads = heads_of(s);
    a.seq = tokens_of(s);
    a.experts = experts_of(s);
    a.dp = a.ep = a.tp = a.cp = a.pp = a.accum = a.chunks = 1;
    a.stage = a.shard = a.keep = a.no_overlap = a.tree = a.split = a.bucket = a.recompute = a.sp =
        a.kind = 0;
    a.sched = a.cut = a.procs = a.devices = a.late = a.net = a.fold = a.grads = a.pieces = 0;
    a.offload = OFF_NONE;
    return a;
}

/* The rules that make a draw invalid, by number; 0: the draw is valid. They only do arithmetic. */
enum { RULES = 17 };
static const char *const rules[RULES] = { "one value has no effect with the other",
    "more stages than items of the model", "key heads over tp", "query heads over key heads",
    "rotary embedding of heads of odd width", "tokens over cp by zigzag",
    "heads over cp by ulysses", "data group by shard groups", "kept gathered below stage 3",
    "parameters offloaded below stage 3", "top_k above the number of experts",
    "several chunks without the interleaved schedule, or a V without two",
    "zero-bubble with fewer micro-batches than ranks", "f64 on a device",
    "forked processes on a device", "NCCL without devices",
    "ranks of a stage by ep and expert_tp" };

/* 1: a pipeline in a V, whose rank r has stages r and 2 pp - 1 - r. */
static int is_v(spec s) { return s.sched == DT_SCHEDULE_ZBV || s.sched == DT_SCHEDULE_DUALPIPE_V; }
static int rank_of_stage(spec s, int stage) {
    return is_v(s) && stage >= s.pp ? 2 * s.pp - 1 - stage : stage % s.pp;
}

static int refusal(spec s) {
    char why[300];
    int kv = kv_heads_of(s), gpt = s.model == MODEL_GPT;
    if (stages_of(s) > items_of(s)) return 1;
    if (heads_of(s) % s.gqa != 0) return 3;
    if (gpt && kv % s.tp != 0 && s.tp % kv != 0) return 2;
    if (gpt && s.llama && s.dim % 2 != 0) return 4;
    int keys = (kv + s.tp - 1) / s.tp, ulysses = s.kind == DT_CP_ULYSSES;
    if (!ulysses && dt_cp_check(s.kind, tokens_of(s), s.cp, 1, 1, why, sizeof why) != DT_OK)
        return 5;
    if (ulysses && gpt &&
        dt_cp_check(s.kind, tokens_of(s), s.cp, s.heads, keys, why, sizeof why) != DT_OK)
        return 6;
    if (s.shard > 0 && (s.stage == 0 || replicas_of(s) * s.cp % s.shard != 0)) return 7;
    if (s.keep && s.stage < 3) return 8;
    if (s.offload >= OFF_ALL && s.stage < 3) return 9;
    if (s.experts > 0 && s.top_k > experts_of(s)) return 10;
    if (s.sched != DT_SCHEDULE_INTERLEAVED && stages_of(s) > 1 && s.chunks != (is_v(s) ? 2 : 1))
        return 11;
    if (s.pp > 1 && s.sched == DT_SCHEDULE_ZB && s.accum < s.pp) return 12;
    if (s.devices && s.type == TYPE_F64) return 13;
    if (s.devices && s.procs) return 14;
    if (s.net == NET_NCCL && !s.devices) return 15;
    if (s.fold && s.dp * s.cp * s.tp % (s.ep * s.fold) != 0) return 16;
    return 0;
}

/* The data set: a value in [-1, 1) for each pair of indices. */
static double noise(int64_t a, int64_t b) {
    uint32_t out[4];
    dt__philox(77, (uint64_t)(a * 1000003 + b), out);
    return (double)out[0] / 2147483648.0 - 1;
}

/* The first item of each stage. */
enum { MOST_ITEMS = 32 };
static void stage_begins(spec s, int *first) {
    double costs[MOST_ITEMS];
    char why[300];
    int items = items_of(s), stages = stages_of(s), at = 1;
    for (int i = 0; i < items; i++)
        costs[i] = s.cut == CUT_ENDS && (i == 0 || i == items - 1) ? 1000 : 1;
    if (s.cut <= CUT_ENDS &&
        dt_partition_stages(costs, items, stages, first, why, sizeof why) == DT_OK)
        return;
    first[0] = 0;
    for (int i = 1; i < items; i++) /* stages - 1 random boundaries between items */
        if ((noise(900 + s.cut, i) + 1) / 2 * (items - i) < stages - at) first[at++] = i;
    first[stages] = items;
}

// ==== Models ====================================================================================

enum { MOST_LAYERS = 8 };

/* A dense layer has up and down. A mixture has before, router, bias and experts, and up and down if
   it has a shared expert. */
typedef struct own_layer {
    dt_tensor *up, *up_bias, *down, *down_bias, *before, *router, *bias, *expert_up, *expert_down;
    dt_route_counts route;
} own_layer;

/* A model that is no GPT: squares and linear layers, mean squared error. */
typedef struct own_model {
    dt_ctx *ctx;
    spec s;
    int width;
    dt_comm *tp, *cp, *ep, *expert_tp, *dispatch;
    dt_placement outside;
    own_layer layer[MOST_LAYERS];
    double exchanged; /* elements that this rank has to send over ep */
} own_model;

enum { OUT = 3 };

static dt_dtype type_of(spec s) {
    static const dt_dtype types[] = { DT_F64, DT_F32, DT_BF16, DT_F16 };
    return types[s.type];
}

static int narrow(spec s) { return s.type >= TYPE_BF16; }

/* The user-defined op y = x + x^2 / 10 = (0.1 x + 1) x. It calls kernels of the context's table,
   which work on any type and any device. */
static dt_status times_slope(
    const dt_tensor *x, double scale, const void *a, void *out, int accumulate) {
    dt_ctx *ctx = x->ctx;
    const dt_kernels *kernels = dt_ctx_kernels(ctx);
    size_t count = (size_t)dt_count(x->shape);
    void *slope = dt_scratch(ctx, count * dt_dtype_size(x->dtype));
    dt_unary_args line = { x->dtype, DT_ACT_AFFINE, slope, x->data, count, scale, 1 };
    dt_binary_args product = { x->dtype, DT_MUL, out, a, slope, DT_SHAPE(count), { 1 }, { 1 },
        accumulate, NULL, 0 };
    dt_status status = slope ? kernels->unary(&line, dt_ctx_stream(ctx)) : dt_error(ctx);
    return status ? status : kernels->binary(&product, dt_ctx_stream(ctx));
}

static dt_status square_back(dt_node *n) {
    int accumulate = 0;
    void *dx = dt_wants(n, 0) ? dt_grad_raw(n, 0, &accumulate) : NULL;
    return dx ? times_slope(n->in[0], 0.2, n->out->grad, dx, accumulate) : dt_error(n->out->ctx);
}

static dt_tensor *square(dt_tensor *x) {
    dt_tensor *y = x ? dt_new(x->ctx, x->dtype, x->shape) : NULL;
    if (!y || times_slope(x, 0.1, x->data, y->data, 0) != DT_OK) return NULL;
    return dt_record(y, (dt_record_desc){ .name = "square", .in = { x }, .backward = square_back });
}

/* Even items are the first half of a layer: up, or `before` of a mixture. Odd items are the second
   half: down, or the router and the experts. */
static void own_register_item(own_model *m, int item) {
    spec s = m->s;
    own_layer *l = &m->layer[item / 2];
    dt_param_desc plain = { .dtype = type_of(s) }, row = plain, column = plain, same = plain,
                  up = plain, down = plain, router;
    dt_param_desc bias = { .dtype = s.type == TYPE_F64 ? DT_F64 : DT_F32, .frozen = 1 };
    int E = experts_of(s), mixture = is_mixture(s, item / 2),
        out = item / 2 + 1 < s.layers ? m->width : OUT;
    int hidden = s.ffn * (mixture && s.shared ? s.shared : 1);
    row.shards[0].comm = column.shards[0].comm = m->tp;
    column.shards[0].dim = 1;
    if (s.sp) same.grad_placements[0] = (dt_grad_placement){ m->tp, DT_GRAD_PARTIAL };
    up.shards[0] = (dt_shard_spec){ m->expert_tp, 1 };
    down.shards[0] = (dt_shard_spec){ m->expert_tp, 2 };
    up.shards[1] = down.shards[1] = (dt_shard_spec){ m->ep, 0 };
    router = same;
    if (s.fold) router.grad_placements[0] = (dt_grad_placement){ m->tp, DT_GRAD_PARTIAL };
    if (s.fold == 1 && s.ep == 1) /* nothing shards the experts */
        up.grad_placements[0] = down.grad_placements[0] = router.grad_placements[0];
    char scope[16];
    snprintf(scope, sizeof scope, "l.%d.", item / 2);
    dt_scope(m->ctx, scope);
    if (item % 2 == 0 && mixture)
        l->before = dt_param_at(m->ctx, "before", DT_SHAPE(m->width), DT_UNIFORM(0.5), same);
    if (item % 2 == 1 && mixture) {
        l->router = dt_param_at(
            m->ctx, "router", DT_SHAPE(E, m->width), DT_NORMAL(0.8 / sqrt(m->width)), router);
        if (s.bias) l->bias = dt_param_at(m->ctx, "bias", DT_SHAPE(E), DT_ZEROS, bias);
        l->expert_up = dt_param_at(
            m->ctx, "expert_up", DT_SHAPE(E, s.ffn, m->width), DT_NORMAL(0.8 / sqrt(m->width)), up);
        l->expert_down = dt_param_at(
            m->ctx, "expert_down", DT_SHAPE(E, out, s.ffn), DT_NORMAL(0.8 / sqrt(s.ffn)), down);
    }
    if (item % 2 == mixture && (!mixture || s.shared)) {
        l->up = dt_param_at(
            m->ctx, "up", DT_SHAPE(hidden, m->width), DT_NORMAL(0.8 / sqrt(m->width)), row);
        l->up_bias = dt_param_at(m->ctx, "up_bias", DT_SHAPE(hidden), DT_UNIFORM(0.5), row);
    }
    if (item % 2 == 1 && (!mixture || s.shared)) {
        l->down = dt_param_at(
            m->ctx, "down", DT_SHAPE(out, hidden), DT_NORMAL(0.8 / sqrt(hidden)), column);
        l->down_bias = dt_param_at(m->ctx, "down_bias", DT_SHAPE(out), DT_UNIFORM(0.5), same);
    }
    dt_scope(m->ctx, NULL);
}

static own_model own_register(dt_ctx *ctx, spec s, const dt_mesh *mesh, const int *first) {
    own_model m = { .ctx = ctx,
        .s = s,
        .width = heads_of(s) * s.dim,
        .tp = mesh->tp,
        .cp = mesh->cp,
        .ep = mesh->ep,
        .expert_tp = mesh->expert_tp,
        .dispatch = mesh->dispatch,
        .outside = s.sp ? DT_SHARD(1) : DT_REPLICATE };
    for (int stage = 0; stage < stages_of(s); stage++) {
        if (rank_of_stage(s, stage) != mesh->coord.pp) continue;
        dt_stage(ctx, stage);
        for (int i = first[stage]; i < first[stage + 1]; i++) own_register_item(&m, i);
    }
    dt_stage(ctx, 0);
    return m;
}

/* An expert is two linear layers with a square between them. */
static dt_tensor *own_mixture(own_model *m, own_layer *l, dt_tensor *x) {
    spec s = m->s;
    dt_placement routed = s.fold ? DT_SHARD(1) : m->outside;
    dt_route_desc d = { .k = s.top_k,
        .capacity = 0.5 * s.capacity,
        .balance = 0.3 * s.balance,
        .z = 0.1 * s.z,
        .sequences = sequences_of(s),
        .bias = l->bias,
        .tp = m->tp,
        .outside = routed,
        .cp = m->cp,
        .kind = s.kind,
        .counts = &l->route,
        .expert_tp = s.fold };
    x = dt_redistribute(x, m->tp, m->outside, routed);
    dt_routing *to = dt_route(x, l->router, d);
    dt_tensor *h = dt_dispatch(s.fold ? x : dt_tp_enter(x, m->tp, routed), to, m->dispatch);
    h = square(dt_expert_linear(h, to, l->expert_up, NULL, (dt_expert_desc){ 0 }));
    h = dt_expert_linear(h, to, l->expert_down, NULL, (dt_expert_desc){ 0 });
    /* bytes sent: rows to other ranks' experts, other ranks' rows back, and the gradients of
       both */
    for (int r = 0; h && r < dt_comm_size(m->dispatch); r++) {
        if (r == dt_comm_rank(m->dispatch)) continue;
        double there = (double)to->exchange->rows_to[r], out = (double)h->shape.d[1],
               here = (double)to->exchange->rows_from[r];
        m->exchanged += there * m->width + here * out;
        if (!dt_recomputing(m->ctx)) m->exchanged += there * out + here * m->width;
    }
    return dt_redistribute(dt_combine(h, to), m->tp, s.fold ? routed : DT_PARTIAL, m->outside);
}

/* A column-parallel, then a row-parallel layer. If tp does not divide the hidden size, the padding
   has weights of 0 in both. */
static dt_tensor *own_item(own_model *m, int item, dt_tensor *x) {
    own_layer *l = &m->layer[item / 2];
    dt_tensor *y = NULL;
    if (is_mixture(m->s, item / 2)) {
        if (item % 2 == 0) return dt_add(x, l->before);
        y = own_mixture(m, l, x);
        if (!l->up) return y;
    }
    if (item % 2 == 0 || y)
        x = square(
            dt_column_linear(x, l->up, l->up_bias, (dt_linear_desc){ 0 }, m->tp, m->outside));
    return item % 2 == 0 ? x : dt_row_linear(x, l->down, l->down_bias, y, m->tp, m->outside);
}

/* A range of items. Its variable is local and no longer exists when the block is recomputed. */
typedef struct own_part {
    own_model *model;
    int item, end, recompute;
} own_part;

static dt_tensor *own_part_forward(dt_tensor *x, void *user) {
    own_part *p = (own_part *)user;
    for (int i = p->item; x && i < p->end; i++) x = own_item(p->model, i, x);
    return x;
}

static dt_tensor *own_block(
    dt_tensor *x, own_part p, int recompute, dt_tensor *(*run)(dt_tensor *x, void *user)) {
    return dt_block_at(p.model->ctx, run, x, &p,
        (dt_block_desc){ .recompute = recompute, .user_bytes = sizeof p });
}

/* Each layer, or each half of one, is a block. */
static dt_tensor *own_group_forward(dt_tensor *x, void *user) {
    own_part p = *(own_part *)user;
    int end = p.end;
    for (; x && p.item < end; p.item = p.end) {
        p.end = p.item / 2 * 2 + 2 < end ? p.item / 2 * 2 + 2 : end;
        x = own_block(x, p, p.recompute == REC_FULL_3, own_part_forward);
    }
    return x;
}

/* Recomputed blocks: every second layer (SELECTIVE), every layer (FULL), all layers after the first
   together (FULL_2), the same with a nested block for each layer (FULL_3). */
static dt_tensor *own_forward(dt_tensor *x, own_model *own, int item, int end) {
    int how = own->s.recompute;
    while (x && item < end) {
        own_part p = { own, item, item / 2 * 2 + 2 < end ? item / 2 * 2 + 2 : end, how };
        if (item >= 2 && how >= REC_FULL_2) p.end = end;
        if (item >= 2 && how >= REC_FULL_2)
            x = own_block(x, p, 1, own_group_forward);
        else
            x = own_block(x, p, how >= REC_FULL || (how == REC_SELECTIVE && item / 2 % 2 == 0),
                own_part_forward);
        item = p.end;
    }
    return x;
}

// ==== One training run ==========================================================================

enum { MAX_STEPS = 3, MAX_VALUES = 300000, MAX_PARAMS = 240, MAX_EXPERTS = 40, NAME = 40 };
enum { MOST_RANKS = 32, MOST_MICROS = 16 };
enum {
    BALANCE,
    Z,
    CHOICES,
    DROPPED,
    FELL,
    COUNTS = FELL + MAX_EXPERTS
}; /* figures of a layer's router */

static char folder[64]; /* for offload and checkpoints */
enum { CHECKPOINT_NONE, CHECKPOINT_SAVE, CHECKPOINT_LOAD };

/* The results of one run: full tensors, into which each rank writes its slices. In shared memory,
   because ranks may be processes. */
typedef struct result {
    spec s;
    int fails, fails_at; /* 1 + the rank that fails, in its forward number fails_at (from 0) */
    int checkpoint;      /* CHECKPOINT_*: save after the first step, or load instead of it */
    double loss[MAX_STEPS], norm[MAX_STEPS];
    double route[MAX_STEPS][MOST_LAYERS][COUNTS];
    int params;
    char name[MAX_PARAMS][NAME];                 /* in the order of registration on one rank */
    size_t first[MAX_PARAMS], count[MAX_PARAMS]; /* of each parameter in the arrays */
    int states;
    /* parameters that are unknown, or that have a copy with other bits */
    int differ;
    char which[2 * NAME];              /* the first such parameter */
    size_t optim_bytes, optim_formula; /* of rank 0 */
    /* bytes that each rank sent along pp and ep, and by formula; for a GPT over ep the formula is
       an upper bound */
    double sent[MOST_RANKS][2], formula[MOST_RANKS][2];
    /* parameters after the last step; gradients and optimizer state of step 1 */
    double value[MAX_VALUES], grad[MAX_VALUES], state[2][MAX_VALUES];
} result;

/* 1 if this rank writes the slice; other ranks with a copy of the slice compare theirs. */
static int writes_slice(const dt_tensor *t, const dt_mesh *mesh) {
    const dt_param_desc *d = &t->param->desc;
    int tp_sharded = 0, ep_sharded = 0, other = 0, folded = mesh->sizes.expert_tp > 0;
    for (int c = 0; c < 5 && folded; c++) { /* a slice of folded experts has other copies */
        const dt_comm *comm = c < 3 ? d->shards[c].comm : d->grad_placements[c - 3].comm;
        if (!comm || (comm != mesh->ep && comm != mesh->expert_tp)) continue;
        int whole = d->shards[0].comm != mesh->expert_tp && mesh->coord.expert_tp > 0;
        return dt_comm_rank(mesh->expert_data) == 0 && !whole;
    }
    for (int c = 0; c < 3; c++) {
        ep_sharded |= d->shards[c].comm && d->shards[c].comm == mesh->ep;
        tp_sharded |= d->shards[c].comm && d->shards[c].comm != mesh->ep;
    }
    for (int k = 0; k < 2; k++)
        if (d->grad_placements[k].comm && (k == 1 || tp_sharded))
            other |= dt_comm_rank(d->grad_placements[k].comm);
    other |= (!ep_sharded && !folded && mesh->coord.ep > 0) || (!tp_sharded && mesh->coord.tp > 0);
    return mesh->coord.dp == 0 && mesh->coord.cp == 0 && !other;
}

/* Copies this rank's slice of a parameter into the full tensor; compare = 1: compares the slice
   with the full tensor. */
static void store_slice(
    result *r, const dt_tensor *t, const void *local, dt_dtype dtype, double *array, int compare) {
    int i = 0;
    while (i < r->params && strcmp(r->name[i], t->name) != 0) i++;
    int bad = i == r->params || (size_t)dt_count(t->param->full) != r->count[i];
    dt__slice_walk walk = dt__slice_begin(t->param->full, t->param->slice);
    while (!bad && dt__slice_next(&walk))
        for (int64_t k = 0; k < walk.count; k++) {
            double *to = array + r->first[i] + walk.global + k,
                   v = dt__number(dtype, local, (size_t)(walk.local + k));
            if (!compare)
                *to = v;
            else
                bad |= memcmp(to, &v, sizeof v) != 0;
        }
    if (bad && __atomic_fetch_add(&r->differ, 1, __ATOMIC_RELAXED) == 0)
        snprintf(r->which, sizeof r->which, "%s", t->name);
}

enum { GRADS, VALUES, STATES };

/* Gradient, values or optimizer state k of parameter t, in the stored type, in memory that the
   caller frees. NULL: t has none. All ranks of a data group must call this, because they may have
   shards. */
static void *numbers_of(dt_zero *zero, dt_tensor *t, int what, int k) {
    if (what != VALUES && t->param->desc.frozen) return NULL;
    void *host = malloc(t->param->count * sizeof(double) + 1);
    dt_status status = what == GRADS    ? dt_zero_grad(zero, t, host)
                       : what == VALUES ? dt_read(t, host)
                                        : dt_zero_state(zero, k, t, host);
    if (status == DT_OK) return host;
    free(host);
    return NULL;
}

/* Stores the gradients, values or states of all parameters. Gradients: call this between backward
   and update. One rank writes each slice, then the ranks with copies compare. */
static void store_all(dt_ctx *ctx, dt_zero *zero, result *r, const dt_mesh *mesh, int what) {
    int arrays = what == STATES ? r->states : 1, n = dt_param_count(ctx) * arrays;
    void *copies[2 * MAX_PARAMS] = { NULL };
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < n && i < 2 * MAX_PARAMS; i++) {
            dt_tensor *t = dt_param_get(ctx, i / arrays);
            double *to = what == GRADS ? r->grad : what == VALUES ? r->value : r->state[i % arrays];
            if (pass == 0) copies[i] = numbers_of(zero, t, what, i % arrays);
            if (copies[i] && writes_slice(t, mesh) != pass)
                store_slice(
                    r, t, copies[i], what == VALUES ? t->dtype : dt_grad_dtype(t), to, pass);
            if (pass == 1) free(copies[i]);
        }
        if (pass == 0) dt_barrier(dt_world(ctx));
    }
}

/* A user-defined optimizer, AdaGrad. It computes in host memory, wherever the parameters are. */
static dt_status adagrad(const dt_update_args *f, void *user) {
    dt_dtype type = f->tensor->dtype == DT_F64 ? DT_F64 : DT_F32;
    size_t bytes = f->count * dt_dtype_size(type);
    char *p = (char *)malloc(3 * bytes), *grad = p + bytes, *state = grad + bytes;
    (void)user;
    dt__move(f->ctx, p, f->param, bytes);
    dt__move(f->ctx, grad, f->grad, bytes);
    dt__move(f->ctx, state, f->state[0], bytes);
    dt_status status = dt__sync(f->ctx);
    for (size_t i = 0; i < f->count && status == DT_OK; i++) {
        double g = dt__number(type, grad, i) * f->grad_scale,
               h = dt__number(type, state, i) + g * g;
        double v = dt__number(type, p, i);
        dt__set_number(type, state, i, h);
        dt__set_number(type, p, i, v - f->lr * (g / (sqrt(h) + 1e-3) + f->weight_decay * v));
    }
    dt__move(f->ctx, f->param, p, bytes);
    dt__move(f->ctx, f->state[0], state, bytes);
    free(p);
    return status ? status : dt__sync(f->ctx); /* the host reads offloaded state next */
}

/* AdamW's eps is 1e-5. The gradient of a key bias is 0 up to rounding, and eps 1e-8 would turn a
   rounding error of 1e-18 into 1e-10 of a step, which is no error of the layout. */
static dt_zero_desc optimizer_of(spec s, const dt_mesh *mesh) {
    static const int kinds[] = { DT_ADAMW, DT_ADAM, DT_SGD, DT_SGD, DT_OPTIMIZER_CUSTOM };
    const char *place = s.offload == OFF_NONE                            ? NULL
                        : s.offload == OFF_STATE || s.offload == OFF_ALL ? "cpu"
                                                                         : folder;
    return (dt_zero_desc){ .stage = s.stage,
        .shard_group = s.shard,
        .keep_gathered = s.keep,
        .offload_optim = place,
        .offload_params = s.offload >= OFF_ALL ? place : NULL,
        .offload_chunk = 777,
        .no_overlap = s.no_overlap,
        .tree = s.tree,
        .poison = 1,
        .loss_scale = s.type == TYPE_F16 ? 1 : 0,
        .grad_dtype = s.grads && narrow(s) ? type_of(s) : DT_F32,
        .mesh = mesh,
        .optimizer = kinds[s.optimizer],
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-5,
        .momentum = s.optimizer == OPT_MOMENTUM ? 0.9 : 0,
        .weight_decay = 0.1,
        .clip = s.clip ? 0.3 : 0,
        .bucket_bytes = (size_t)s.bucket,
        .update = adagrad,
        .states = 1 };
}

/* All micro-batches of a replica's step, with full sequences: (accum, micro, seq). */
typedef struct batch {
    int32_t *ids, *labels;
    int32_t *index; /* of each token among all tokens of the step */
    int32_t *position, *document;
    int32_t *cut;  /* buffer (micro, seq) for this cp rank's shard of an array */
    double *x, *y; /* (accum, micro, seq, width), (accum, micro, seq, OUT) */
    double labels_in_step;
} batch;

static void fill_sequence(batch *b, spec s, int64_t at, int64_t q, int64_t k) {
    int width = heads_of(s) * s.dim, start = 0, document = 0;
    for (int t = 0; t < tokens_of(s); t++) {
        int64_t i = at * tokens_of(s) + t;
        if (s.docs && t > 0 && noise(q, 7000 + t) < -0.5) start = t, document++;
        b->position[i] = t - start;
        b->document[i] = document;
        b->index[i] = (int32_t)(k * tokens_of(s) + t);
        b->ids[i] = (int32_t)((noise(q, t) + 1) / 2 * s.vocab);
        b->labels[i] = (int32_t)((noise(q, t + 1) + 1) / 2 * s.vocab);
        if (s.ignore && noise(q, 5000 + t) < -0.3 + 0.2 * (double)(q % 3)) b->labels[i] = -1;
        for (int c = 0; c < width; c++) b->x[i * width + c] = noise(q, 10000 + t * 100 + c);
        for (int c = 0; c < OUT; c++) b->y[i * OUT + c] = noise(q, 20000 + t * 100 + c);
    }
    /* at least one label of a step counts */
    if (s.ignore && q == 0) b->labels[at * tokens_of(s)] = 0;
}

static void fill_batch(batch *b, spec s, const dt_mesh *mesh, int step) {
    dt_data_order order = { 7, sequences_of(s), s.micro, mesh->replicas, 0 };
    for (int j = 0; j < s.accum; j++)
        for (int i = 0; i < s.micro; i++)
            fill_sequence(b, s, (int64_t)j * s.micro + i,
                dt_data_order_sequence(order, step, j, mesh->replica, i),
                ((int64_t)j * mesh->replicas + mesh->replica) * s.micro + i);
    /* the number of labels in the step; the ranks of cp share sequences, so only cp rank 0
       counts */
    double here = 0;
    for (int64_t i = 0; i < s.accum * s.micro * tokens_of(s); i++) here += b->labels[i] >= 0;
    if (mesh->coord.cp != 0) here = 0;
    dt_sum_doubles(mesh->data, &here, 1);
    b->labels_in_step = here < 1 ? 1 : here; /* a step without a label: the loss is zero */
}

static dt_tensor *real_input(dt_ctx *ctx, spec s, dt_shape shape, const double *host) {
    size_t count = (size_t)dt_count(shape);
    void *numbers = malloc(count * sizeof *host + 1);
    for (size_t i = 0; i < count; i++) dt__set_number(type_of(s), numbers, i, host[i]);
    dt_tensor *t = dt_input(ctx, type_of(s), shape, numbers);
    free(numbers);
    return t;
}

/* An array (micro, seq) of a micro-batch, sharded for this cp rank. */
static dt_tensor *shard_input(
    dt_ctx *ctx, spec s, const batch *b, dt_comm *cp, const int32_t *whole) {
    dt_cp_shard(s.kind, s.micro, tokens_of(s), cp, whole, b->cut);
    return dt_input(ctx, DT_I32, DT_SHAPE(s.micro, tokens_of(s) / dt_comm_size(cp)), b->cut);
}

/* The shards of all cp ranks, one after another. */
static void shard_all(spec s, const int32_t *whole, int32_t *out) {
    int64_t T = tokens_of(s), own = T / s.cp;
    for (int64_t i = 0; i < s.micro * T; i++)
        out[i] = whole[i / T * T + dt_cp_token(s.kind, T, s.cp, (int)(i % T / own), i % T % own)];
}

/* The state of one rank in a run. */
typedef struct job {
    result *r;
    spec s;
    dt_ctx *ctx;
    dt_mesh mesh;
    gpt g;
    own_model own;
    int first[MOST_ITEMS + 1]; /* items of the stages */
    int rank[MOST_ITEMS];      /* ranks of the stages */
    dt_zero *zero;
    dt_schedule *schedule; /* NULL: no pipeline */
    batch b;
    int step;
    double loss[MOST_MICROS]; /* of each micro-batch */
    int forwards;
    double fell[MOST_LAYERS * MAX_EXPERTS];
} job;

static dt_tensor *own_stage(job *j, int stage, dt_tensor *in, int64_t micro) {
    spec s = j->s;
    own_model *own = &j->own;
    int last = stage == stages_of(s) - 1;
    int64_t T = tokens_of(s) / s.cp;
    double *x = (double *)malloc((size_t)(s.micro * T * (own->width + OUT)) * sizeof *x);
    double *y = x + s.micro * T * own->width;
    for (int64_t i = 0; i < s.micro * T; i++) {
        int64_t token = dt_cp_token(s.kind, tokens_of(s), s.cp, j->mesh.coord.cp, i % T);
        int64_t from = (micro * s.micro + i / T) * tokens_of(s) + token;
        memcpy(x + i * own->width, j->b.x + from * own->width, (size_t)own->width * sizeof *x);
        memcpy(y + i * OUT, j->b.y + from * OUT, OUT * sizeof *y);
    }
    if (stage == 0)
        in = dt_redistribute(real_input(j->ctx, s, DT_SHAPE(s.micro, T, own->width), x), own->tp,
            DT_REPLICATE, own->outside);
    dt_tensor *out = own_forward(in, own, j->first[stage], j->first[stage + 1]);
    if (last)
        out = dt_mse(dt_redistribute(out, own->tp, own->outside, DT_REPLICATE),
            real_input(j->ctx, s, DT_SHAPE(s.micro, T, OUT), y),
            (double)sequences_of(s) * tokens_of(s) * OUT);
    free(x);
    return out;
}

static dt_tensor *gpt_stage(job *j, int stage, dt_tensor *x, int64_t micro) {
    spec s = j->s;
    const batch *b = &j->b;
    dt_comm *cp = j->mesh.cp;
    int64_t at = micro * s.micro * tokens_of(s);
    gpt_tokens t = { .ids = shard_input(j->ctx, s, b, cp, b->ids + at),
        .sequences = sequences_of(s),
        .step = (uint64_t)j->step };
    t.index = shard_input(j->ctx, s, b, cp, b->index + at);
    if (s.docs) {
        t.positions = shard_input(j->ctx, s, b, cp, b->position + at);
        t.documents = shard_input(j->ctx, s, b, cp, b->document + at);
        int32_t *all = (int32_t *)malloc((size_t)(2 * s.micro * tokens_of(s)) * sizeof *all);
        shard_all(s, b->position + at, all);
        shard_all(s, b->document + at, all + s.micro * tokens_of(s));
        t.context = dt_cp_make(j->ctx, cp,
            (dt_cp_desc){ .kind = s.kind,
                .batch = s.micro,
                .tokens = tokens_of(s),
                .positions = all,
                .documents = all + s.micro * tokens_of(s) });
        free(all);
    }
    for (int k = 0; k < modules_of(s); k++) {
        int64_t n = s.micro * tokens_of(s);
        int32_t *both = (int32_t *)malloc((size_t)(2 * n) * sizeof *both);
        gpt_ahead(b->ids + at, b->labels + at, NULL, s.micro, tokens_of(s), k, both, both + n);
        t.next[k] = shard_input(j->ctx, s, b, cp, both);
        t.ahead[k] = shard_input(j->ctx, s, b, cp, both + n);
        free(both);
    }
    return gpt_stage_at(
        &j->g, stage, x, t, shard_input(j->ctx, s, b, cp, b->labels + at), b->labels_in_step);
}

static dt_tensor *run_stage(dt_tensor *x, int stage, int micro, void *user) {
    job *j = (job *)user;
    if (j->r->fails == 1 + dt_ctx_rank(j->ctx) && j->forwards++ == j->r->fails_at)
        dt_fail(j->ctx, DT_ERR_ARG, "a planted failure");
    x = j->s.model == MODEL_OWN ? own_stage(j, stage, x, micro) : gpt_stage(j, stage, x, micro);
    if (stage == stages_of(j->s) - 1) j->loss[micro] = dt_item(x);
    return x;
}

static dt_route_counts *route_of(job *j, int layer) {
    return j->s.model == MODEL_OWN ? &j->own.layer[layer].route : &j->g.layer[layer].route;
}

/* Sums the routers' counts over all ranks, then updates the router biases. */
static void end_routes(job *j) {
    spec s = j->s;
    dt_comm *const groups[3] = { j->mesh.data, s.sp || s.fold ? j->mesh.tp : NULL, j->mesh.pp };
    int E = experts_of(s);
    for (int i = 0; i < s.layers + modules_of(s) && s.experts > 0; i++) {
        dt_route_counts *c = route_of(j, i);
        double sum[COUNTS] = { c->balance, c->z, c->choices, c->dropped };
        dt_tensor *bias = s.model == MODEL_OWN ? j->own.layer[i].bias : NULL;
        memcpy(sum + FELL, c->experts, (size_t)E * sizeof *sum);
        for (int g = 0; g < 3; g++) dt_sum_doubles(groups[g], sum, COUNTS);
        if (dt_ctx_rank(j->ctx) == 0) memcpy(j->r->route[j->step - 1][i], sum, sizeof sum);
        c->balance = c->z = c->choices = c->dropped = 0;
        if (bias) dt_route_update_bias(bias, c->experts, 0.05, groups, 2);
        if (s.model == MODEL_OWN || !s.bias) memset(c->experts, 0, (size_t)E * sizeof *c->experts);
    }
    if (s.model == MODEL_GPT && s.experts > 0 && s.bias) gpt_balance(&j->g, groups, 2);
}

static void train_step(job *j) {
    spec s = j->s;
    double loss = 0;
    fill_batch(&j->b, s, &j->mesh, j->step);
    memset(j->loss, 0, sizeof j->loss);
    if (j->schedule)
        dt_pipe_run(
            j->ctx, (dt_pipe_desc){
                        .schedule = j->schedule, .comm = j->mesh.pp, .run = run_stage, .user = j });
    for (int i = 0; i < s.accum && !j->schedule; i++) {
        dt_micro(j->ctx, i, s.accum);
        dt_tensor *l = run_stage(NULL, 0, i, j);
        if (s.split) {
            dt_backward_input(l);
            dt_backward_weight(l);
        } else {
            dt_backward(l);
        }
        dt_reset(j->ctx);
    }
    for (int i = 0; i < s.accum; i++) loss += j->loss[i];
    dt_sum_doubles(j->mesh.data, &loss, 1);
    dt_sum_doubles(j->mesh.pp, &loss, 1);
    if (j->step == 1) store_all(j->ctx, j->zero, j->r, &j->mesh, GRADS);
    dt_step_info info = dt_zero_step(j->zero, 0.01);
    end_routes(j);
    if (dt_ctx_rank(j->ctx) != 0) return;
    j->r->loss[j->step - 1] = loss;
    j->r->norm[j->step - 1] = info.grad_norm;
}

/* Adds the parts of DeepSeek-V3. The groups of experts are two if half of the experts suffice. */
static void make_deep(spec s, gpt_config *c) {
    if (!s.deep || !s.llama) return;
    if (is_latent(s))
        c->mla = (gpt_mla){ .kv_rank = 3,
            .q_rank = s.deep == DEEP_LATENT ? 5 : 0,
            .nope_dim = 3,
            .rope_dim = 2,
            .value_dim = 4 };
    c->mtp = modules_of(s);
    c->mtp_weight = 0.4;
    c->moe_ffn = s.ffn + 1;
    c->route = DT_ROUTE_SIGMOID;
    c->raw_gates = s.deep == DEEP_LATENT_MTP;
    c->gate_scale = 1.5;
    if (c->experts % 2 == 0 && c->experts / 2 >= s.top_k) c->expert_groups = 2, c->top_groups = 1;
}

/* Ranks 1 to 3, some or all modules, with and without dropout, each kind of storage. */
static void fit_lora(spec s, gpt_config *c) {
    static const dt_quant bases[LORAS] = { DT_QUANT_NONE, DT_QUANT_NONE, DT_QUANT_NONE,
        DT_QUANT_BF16, DT_QUANT_NF4, DT_QUANT_INT8 };
    if (s.lora == LORA_NONE) return;
    c->base = bases[s.lora];
    c->lora.rank = s.lora == LORA_QV ? 1 : s.lora == LORA_BF16 ? 3 : 2;
    c->lora.alpha = 1.5;
    c->lora.dropout = s.lora == LORA_QV || s.lora == LORA_INT8 ? 0 : 0.2;
    c->lora.modules = gpt_lora_modules(*c);
    if (s.lora == LORA_QV) c->lora.modules = 1 << GPT_LORA_Q | 1 << GPT_LORA_V;
    if (s.lora == LORA_BF16)
        c->lora.modules =
            1 << GPT_LORA_K | 1 << GPT_LORA_O | (s.llama ? 1 << GPT_LORA_UP : 1 << GPT_LORA_FC);
}

static void register_model(job *j) {
    spec s = j->s;
    gpt_config config = { .layers = s.layers,
        .width = heads_of(s) * s.dim,
        .heads = heads_of(s),
        .kv_heads = kv_heads_of(s),
        .ffn = s.ffn,
        .seq = tokens_of(s),
        .vocab = s.vocab,
        .tied = s.tied,
        .dtype = type_of(s),
        .recompute = s.recompute < REC_FULL ? s.recompute : GPT_RECOMPUTE_FULL,
        .recompute_every = s.recompute < REC_FULL ? 0 : s.recompute - 1,
        .arch = s.llama ? GPT_LLAMA : GPT_GPT2,
        .dropout = s.dropout ? 0.3 : 0,
        .smoothing = s.smoothing ? 0.2 : 0,
        .tp = j->mesh.tp,
        .sp = s.sp,
        .cp = j->mesh.cp,
        .cp_kind = s.kind,
        .experts = experts_of(s),
        .top_k = s.top_k,
        .moe_every = s.every,
        .shared_experts = s.shared,
        .capacity = 0.5 * s.capacity,
        .balance = 0.3 * s.balance,
        .z = 0.1 * s.z,
        .router_bias = 0.05 * s.bias,
        .ep = j->mesh.ep,
        .expert_tp = j->mesh.sizes.expert_tp,
        .expert_tp_group = j->mesh.expert_tp,
        .dispatch = j->mesh.dispatch,
        .pp = j->mesh.pp,
        .stages = stages_of(s),
        .stage_begin = j->first,
        .stage_rank = is_v(s) ? j->rank : NULL };
    stage_begins(s, j->first);
    make_deep(s, &config);
    fit_lora(s, &config);
    for (int stage = 0; stage < stages_of(s); stage++) j->rank[stage] = rank_of_stage(s, stage);
    if (s.model == MODEL_GPT)
        j->g = gpt_register(j->ctx, config);
    else
        j->own = own_register(j->ctx, s, &j->mesh, j->first);
    for (int i = 0; i < s.layers + modules_of(s); i++)
        route_of(j, i)->experts = j->fell + i * experts_of(s);
    /* with b = 0 the first gradient of a would be 0 */
    for (int i = 0; i < dt_param_count(j->ctx); i++)
        if (strstr(dt_param_get(j->ctx, i)->name, "lora_b"))
            dt_param_get(j->ctx, i)->param->init = DT_UNIFORM(0.3);
    /* like dt_param_at(.frozen = 1): the models have no option for it */
    dt_tensor *t = dt_param_find(j->ctx, s.model == MODEL_OWN ? "l.0.down"
                                         : s.llama            ? "h.0.attn.q.weight"
                                                              : "h.0.ln_1.weight");
    if (!s.freeze || !t) return;
    t->param->desc.frozen = 1;
    t->needs_grad = 0;
}

static void describe_params(dt_ctx *ctx, result *r) {
    r->params = dt_param_count(ctx);
    for (int i = 0; i < r->params && i < MAX_PARAMS; i++) {
        r->count[i] = (size_t)dt_count(dt_param_get(ctx, i)->param->full);
        r->first[i] = i ? r->first[i - 1] + r->count[i - 1] : 0;
        snprintf(r->name[i], NAME, "%s", dt_param_get(ctx, i)->name);
    }
    if (r->params > MAX_PARAMS || r->first[r->params - 1] + r->count[r->params - 1] > MAX_VALUES)
        dt_fail(ctx, DT_ERR_MEM, "the model of a case is too large for the test");
}

/* Bytes that a stage sends to the next stage for one micro-batch. The gradient has as many. */
static double edge_bytes(const job *j, int stage) {
    spec s = j->s;
    int item = j->first[stage + 1],
        inside = s.model == MODEL_OWN && item % 2 == 1 && !is_mixture(s, item / 2);
    double tokens = (double)s.micro * tokens_of(s) / s.cp / (s.sp && !inside ? s.tp : 1);
    return tokens * (inside ? (s.ffn + s.tp - 1) / s.tp : heads_of(s) * s.dim) *
           (double)dt_dtype_size(type_of(s));
}

/* Bytes that this rank sends along pp: outputs of stages and their gradients in each micro-batch,
   and the all-reduce of a tied weight's gradient between two ranks. */
static double pipeline_bytes(const job *j) {
    spec s = j->s;
    double bytes = 0;
    for (int stage = 0; stage + 1 < stages_of(s); stage++)
        for (int end = 0; end < 2; end++)
            if (rank_of_stage(s, stage + end) == j->mesh.coord.pp &&
                rank_of_stage(s, stage + 1 - end) != j->mesh.coord.pp)
                bytes += s.accum * edge_bytes(j, stage);
    for (int u = 0; u < j->zero->n_buckets; u++) {
        const dt__zero_bucket *z = &j->zero->buckets[u];
        if (!z->bucket.frozen && dt__tied_group(j->zero, &z->bucket))
            bytes += (double)(z->count * dt_dtype_size(dt__array_dtype(&z->bucket, DT__GRAD)));
    }
    return bytes * s.steps;
}

/* An upper bound of the elements sent along ep, if all choices are experts of other ranks: dispatch
   and combine, forward and backward, and forward again in recomputed layers. */
static double most_exchanged(const job *j) {
    spec s = j->s;
    int tp = s.fold ? s.tp : 1, copies = s.fold ? s.fold : 1, ranks = s.ep * copies;
    double rows = (double)s.micro * tokens_of(s) / (s.cp * tp) * s.top_k * s.accum * s.steps * 2 *
                  (ranks + copies - 1),
           mixtures = 0;
    for (int stage = 0; stage < stages_of(s); stage++)
        for (int i = j->first[stage]; i < j->first[stage + 1]; i++)
            mixtures += rank_of_stage(s, stage) == j->mesh.coord.pp && i > 0 && i % 2 == 0 &&
                        is_mixture(s, i / 2 - 1);
    for (int k = 0; k < modules_of(s) && rank_of_stage(s, stages_of(s) - 1) == j->mesh.coord.pp;
         k++)
        mixtures += is_mixture(s, s.layers + k);
    return ranks == 1 ? 0
                      : rows * mixtures * heads_of(s) * s.dim * (s.recompute >= REC_FULL ? 1.5 : 1);
}

static void store_bytes(job *j) {
    int rank = dt_ctx_rank(j->ctx);
    double numbers = j->s.model == MODEL_OWN ? j->own.exchanged : most_exchanged(j);
    j->r->formula[rank][0] = pipeline_bytes(j);
    j->r->formula[rank][1] = numbers * (double)dt_dtype_size(type_of(j->s));
    j->r->sent[rank][0] = (double)dt_comm_bytes(j->ctx, DT_AXIS_PP);
    j->r->sent[rank][1] = (double)dt_comm_bytes(j->ctx, DT_AXIS_EP);
}

/* Saves a checkpoint, or loads the checkpoint that another layout has saved. */
static void checkpoint(job *j, int saves) {
    dt_checkpoint *c =
        dt_checkpoint_open(j->zero, (dt_checkpoint_desc){ .dir = folder, .background = 1 });
    if (saves)
        dt_checkpoint_save(c);
    else if (dt_checkpoint_load(c, NULL) != 1)
        dt_fail(j->ctx, DT_ERR_IO, "there is no checkpoint of step 1");
    dt_checkpoint_close(c);
}

static void run_job(job *j) {
    spec s = j->s;
    size_t n = (size_t)(s.accum * s.micro * tokens_of(s)), width = (size_t)(heads_of(s) * s.dim);
    int32_t *numbers = (int32_t *)calloc(6 * n, sizeof *numbers);
    j->b = (batch){ numbers, numbers + n, numbers + 2 * n, numbers + 3 * n, numbers + 4 * n,
        numbers + 5 * n, (double *)calloc(n * width, 8), (double *)calloc(n * OUT, 8), 0 };
    for (j->step = 1; j->step <= s.steps && dt_error(j->ctx) == DT_OK; j->step++) {
        if (j->step == 1 && j->r->checkpoint == CHECKPOINT_LOAD)
            checkpoint(j, 0);
        else
            train_step(j);
        if (j->step == 1) store_all(j->ctx, j->zero, j->r, &j->mesh, STATES);
        if (j->step == 1 && j->r->checkpoint == CHECKPOINT_SAVE) checkpoint(j, 1);
    }
    store_all(j->ctx, j->zero, j->r, &j->mesh, VALUES);
    store_bytes(j);
    free(numbers);
    free(j->b.x);
    free(j->b.y);
}

/* The run on one rank describes all parameters; a rank of a layout may have only some of them. */
static dt_status rank_main(dt_ctx *ctx, void *user) {
    result *r = (result *)user;
    job *j = (job *)calloc(1, sizeof *j);
    spec s = r->s;
    j->r = r;
    j->s = s;
    j->ctx = ctx;
    j->mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = s.dp,
                                    .tp = s.tp,
                                    .cp = s.cp,
                                    .pp = s.pp,
                                    .ep = s.ep,
                                    .expert_tp = s.fold,
                                    .tp_overlap = s.pieces });
    register_model(j);
    j->zero = dt_zero_make(ctx, optimizer_of(s, &j->mesh));
    if (stages_of(s) > 1)
        j->schedule = dt_schedule_make(
            ctx, (dt_schedule_desc){
                     .kind = s.sched, .ranks = s.pp, .micros = s.accum, .chunks = s.chunks });
    if (j->zero && dt_ctx_rank(ctx) == 0) {
        r->states = j->zero->param_groups[0].states;
        r->optim_bytes = dt_memory_used(ctx).live[DT_MEM_OPTIM];
        r->optim_formula = dt_zero_state_bytes(j->zero);
        if (r->params == 0) describe_params(ctx, r);
    }
    dt_barrier(dt_world(ctx));
    if (dt_error(ctx) == DT_OK) run_job(j);
    dt_schedule_free(j->schedule);
    free(j);
    return dt_error(ctx);
}

/* like: the result of one rank, whose list of parameters is copied; NULL if s is one rank. */
static result *result_make(spec s, const result *like) {
    result *r =
        (result *)mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (r == MAP_FAILED) return NULL;
    r->s = s;
    for (int i = 0; like && i < like->params; i++) {
        r->first[i] = like->first[i];
        r->count[i] = like->count[i];
        memcpy(r->name[i], like->name[i], NAME);
    }
    if (like) r->params = like->params;
    return r;
}

static void result_free(result *r) {
    if (r) munmap(r, sizeof *r);
}

// ==== Comparison ================================================================================

typedef struct verdict {
    int failed;
    char why[400];
} verdict;

static void blame(verdict *v, const char *fmt, ...) {
    va_list args;
    if (v->failed++) return;
    va_start(args, fmt);
    vsnprintf(v->why, sizeof v->why, fmt, args);
    va_end(args);
}

static int near_value(double a, double b, double tol, double scale) {
    return isfinite(a) && isfinite(b) && fabs(a - b) <= tol * fmax(fabs(b), scale);
}

/* Compares each parameter: ||x - y|| <= tol * max(||y||, scale). */
static void compare_array(verdict *v, const char *what, const result *a, const double *x,
    const double *y, const double *tol, const double *scale) {
    for (int i = 0; i < a->params; i++) {
        double difference = 0, size = 0;
        for (size_t k = a->first[i]; k < a->first[i] + a->count[i]; k++) {
            difference += (x[k] - y[k]) * (x[k] - y[k]);
            size += y[k] * y[k];
        }
        if (!(sqrt(difference) <= tol[i] * fmax(sqrt(size), scale[i])))
            blame(v, "%s of %s: difference %.3e, size %.3e, scale %.3e", what, a->name[i],
                sqrt(difference), sqrt(size), scale[i]);
    }
}

/* scale[i]: the norm of parameter i if `norm` were spread evenly over all elements. */
static void shares(const result *r, double norm, double *scale) {
    size_t all = r->first[r->params - 1] + r->count[r->params - 1];
    for (int i = 0; i < r->params; i++) scale[i] = norm * sqrt((double)r->count[i] / (double)all);
}

/* Tolerances, relative to the value. f64: 1e-12. f32: 1e-5, and ten times that in later steps,
   because differences grow.
   bf16 and f16: gradients of parameters, their sums over micro-batches and ranks, and the optimizer
   state are f32, and a row's activations have the same bits in any batch. Results that depend only
   on these are held to 1e-5 too. Three things are rounded to 16 bits at other points than on one
   rank, each by at most u = 2^-8 or 2^-11: partial sums over tp or cp; the gradient of the position
   embedding, which is broadcast over the batch and rounded once per micro-batch; a parameter whose
   master weight is so near the midpoint of two 16-bit values that the last digit of f32 decides.
   Cancellation makes a bound from u alone useless, so results that depend on these are held to 8 u,
   and with a norm below 0.2, where terms cancel, to 8 u of 0.2. Random cases differed by at most
   4.3 u, with tp 9. 16-bit gradients are rounded in each micro-batch and in each sum, and one rank
   sums in f32: all results are held to 8 u, and u / 2 more for each micro-batch.
   A device's kernels add in another order than the CPU's, so any 16-bit value may be rounded
   differently: one rank on a device is held to 8 u of one rank on the CPU, and a layout on devices
   is compared with one rank on a device by the rules above. */
static double loose(spec s) {
    double u = s.type == TYPE_BF16 ? 1 / 256.0 : 1 / 2048.0;
    return (8 + (s.grads ? 0.5 * s.accum : 0)) * u;
}

static int has_positions(const result *r, int param) {
    return strcmp(r->name[param], "wpe.weight") == 0;
}

/* Side losses are compared by tolerance; counts of choices must be equal. */
static void compare_routes(verdict *v, const result *a, const result *b, double tol, double later) {
    for (int i = 0; i < a->s.steps; i++)
        for (int l = 0; l < a->s.layers + modules_of(a->s); l++)
            for (int k = 0; k < COUNTS; k++) {
                double x = a->route[i][l][k], y = b->route[i][l][k];
                if (k < CHOICES ? !near_value(x, y, i > 0 ? later : tol, 0) : x != y)
                    blame(v, "%s %d of layer %d in step %d: %.17g, one rank %.17g",
                        k >= FELL      ? "choices of expert"
                        : k >= CHOICES ? "choices, dropped"
                                       : "side loss",
                        k >= FELL ? k - FELL : k % CHOICES, l, i + 1, x, y);
            }
}

static void compare(verdict *v, const result *a, const result *b) {
    spec s = a->s;
    double tol = s.type ? 1e-5 : 1e-12, scale[MAX_PARAMS], part[MAX_PARAMS] = { 0 }, clip = 0;
    /* with fewer rows in a product cuBLASLt takes another algorithm, which rounds differently */
    int fewer_rows = replicas_of(s) * s.accum > 1;
    int sums_round =
        narrow(s) && (s.grads || s.tp * s.cp > 1 || (s.devices && (!b->s.devices || fewer_rows)));
    double least = narrow(s) ? 0.2
                   : s.type  ? 1e-3
                             : 0; /* norms below this are compared on this scale */
    int norm_rounds = sums_round || (narrow(s) && s.model == MODEL_GPT);
    for (int i = 0; i < s.steps; i++) {
        double later = narrow(s) ? loose(s) : s.type ? 10 * tol : tol;
        if (!near_value(a->loss[i], b->loss[i], i > 0 ? later : sums_round ? loose(s) : tol, 0))
            blame(v, "loss of step %d: %.17g, one rank %.17g", i + 1, a->loss[i], b->loss[i]);
        if (!near_value(a->norm[i], b->norm[i],
                i > 0         ? later
                : norm_rounds ? loose(s)
                              : tol,
                least))
            blame(v, "norm of step %d: %.17g, one rank %.17g", i + 1, a->norm[i], b->norm[i]);
    }
    compare_routes(v, a, b, sums_round ? loose(s) : tol,
        narrow(s) ? loose(s)
        : s.type  ? 10 * tol
                  : tol);
    if (narrow(s) && s.clip && b->norm[0] > 0) /* the norm scales every gradient */
        clip = fabs(a->norm[0] - b->norm[0]) / b->norm[0];
    for (int i = 0; i < a->params; i++)
        part[i] = 2 * clip + (sums_round || (narrow(s) && has_positions(a, i)) ? loose(s) : tol);
    shares(a, fmax(b->norm[0], least), scale);
    compare_array(v, "gradient of step 1", a, a->grad, b->grad, part, scale);
    double norm =
        fmax(b->norm[0], narrow(s) ? least : 0); /* after clipping, as the optimizer gets it */
    if (s.clip && norm > 0.3) norm = 0.3;
    for (int k = 0; k < a->states; k++) {
        /* second moments are squares */
        double order = k == 1 || s.optimizer == OPT_OWN ? norm * norm : norm;
        shares(a, s.type ? fmax(order, 1e-4) : order, scale);
        compare_array(v, k ? "second state after step 1" : "first state after step 1", a,
            a->state[k], b->state[k], part, scale);
    }
    /* DESIGN.md bounds parameters after steps only in f64, because Adam turns noise into steps */
    if (s.type) return;
    for (int i = 0; i < a->params; i++) scale[i] = 0.01 * s.steps * sqrt((double)a->count[i]);
    compare_array(v, "values", a, a->value, b->value, part, scale);
}

static void compare_bits(verdict *v, const char *what, const result *a, const result *b) {
    size_t all = (a->first[a->params - 1] + a->count[a->params - 1]) * sizeof(double);
    if (memcmp(a->loss, b->loss, sizeof a->loss) || memcmp(a->norm, b->norm, sizeof a->norm))
        blame(v, "%s: bits of the loss or the norm differ: %.17g %.17g, %.17g %.17g", what,
            a->loss[0], b->loss[0], a->norm[0], b->norm[0]);
    if (memcmp(a->route, b->route, sizeof a->route))
        blame(v, "%s: counts of the routers differ", what);
    for (int i = 0; i < a->params; i++)
        if (memcmp(a->grad + a->first[i], b->grad + a->first[i], a->count[i] * sizeof(double)))
            blame(v, "%s: bits of the gradient of %s differ", what, a->name[i]);
    if (memcmp(a->value, b->value, all)) blame(v, "%s: bits of values differ", what);
    if (memcmp(a->state[0], b->state[0], all) || memcmp(a->state[1], b->state[1], all))
        blame(v, "%s: bits of the optimizer's state differ", what);
}

/* Logs nothing: the case reports each failure once. */
static void silent(void *user, int level, int rank, const char *text) {
    (void)user;
    (void)level;
    (void)rank;
    (void)text;
}

/* The ranks share s.devices emulated devices, whose streams run late, in an order drawn from the
   seed s.late. Errors that the devices detect, such as a kernel that accesses memory out of bounds
   or a misused stream, fail the case, and so do leaks. */
static const dt_kernels *devices_begin(spec s) {
    if (!s.devices) return dt_kernels_cpu();
#if ON_DEVICES
    fake_cuda_devices(s.net == NET_NCCL ? ranks_of(s) : s.devices);
    fake_cuda_seed((unsigned long long)s.late);
    fake_cuda_order(s.late % 4 == 3 ? FAKE_CUDA_LAZY : FAKE_CUDA_RANDOM);
    fake_cuda_forbid_default_stream(1);
    if (s.late % 10 == 0) fake_cuda_guard(1);
    static dt_kernels table;
    table = *dt_kernels_cuda();
    table.work_bytes = 1 << 16; /* filling a larger workspace with 0xFF would dominate the time */
    return &table;
#else
    return NULL;
#endif
}

static void devices_end(verdict *v, const char *what, spec s) {
    if (!s.devices) return;
#if ON_DEVICES
    const char *mistake = fake_cuda_error();
    if (mistake) blame(v, "%s: %s", what, mistake);
    if (fake_cuda_leaks(0)) blame(v, "%s: %d leaks on the devices", what, fake_cuda_leaks(1));
    fake_cuda_reset();
#endif
    (void)v, (void)what;
}

/* A rank of a TCP or NCCL job, run as a thread that joins the rendezvous like a process. */
typedef struct remote_rank {
    dt_run_desc desc;
    result *r;
    pthread_t thread;
    dt_report report;
} remote_rank;

static void *remote_rank_main(void *arg) {
    remote_rank *one = (remote_rank *)arg;
    dt_run(one->desc, rank_main, one->r);
    return NULL;
}

static void run_remote_ranks(dt_run_desc desc, result *r) {
    remote_rank *remote = (remote_rank *)calloc((size_t)desc.ranks, sizeof *remote);
    char place[32];
    dt__tcp_address any = { htonl(INADDR_LOOPBACK), 0 };
    int fd = dt__tcp_listen(any, 1);
    snprintf(place, sizeof place, "127.0.0.1:%d", (int)dt__tcp_own_address(fd).port);
    close(fd);
    desc.rendezvous = place;
    desc.backend = r->s.net == NET_TCP ? DT_BACKEND_TCP : DT_BACKEND_NCCL;
    for (int i = 0; i < desc.ranks; i++) {
        remote[i] = (remote_rank){ .desc = desc, .r = r };
        remote[i].desc.rank = i;
        remote[i].desc.report = &remote[i].report;
        pthread_create(&remote[i].thread, NULL, remote_rank_main, &remote[i]);
    }
    for (int i = 0; i < desc.ranks; i++) pthread_join(remote[i].thread, NULL);
    for (int i = 0; i < desc.ranks && desc.report->status == DT_OK; i++)
        *desc.report = remote[i].report;
    free(remote);
}

static dt_report run_silently(result *r) {
    dt_report report = { DT_OK, 0, "", 0 };
    dt_host host = *dt_host_default();
    host.log = silent;
    dt_run_desc desc = { .ranks = ranks_of(r->s),
        .timeout_s = 60,
        .host = &host,
        .report = &report,
        .backend = r->s.procs ? DT_BACKEND_PROCS : DT_BACKEND_THREADS,
        .kernels = devices_begin(r->s) };
    if (r->s.net)
        run_remote_ranks(desc, r);
    else
        dt_run(desc, rank_main, r);
    return report;
}

static void run_ranks(verdict *v, const char *what, result *r) {
    dt_report report = run_silently(r);
    if (report.status != DT_OK) blame(v, "%s: %s", what, report.text);
    devices_end(v, what, r->s);
    if (r->optim_bytes != r->optim_formula)
        blame(v, "%s: %zu bytes of optimizer state, formula %zu", what, r->optim_bytes,
            r->optim_formula);
    for (int i = 0; i < ranks_of(r->s) && !v->failed; i++)
        for (int axis = 0; axis < 2; axis++) {
            int most = axis == 1 && r->s.model == MODEL_GPT;
            if (most ? r->sent[i][1] > r->formula[i][1] : r->sent[i][axis] != r->formula[i][axis])
                blame(v, "%s: rank %d sent %.0f bytes along %s, formula %s%.0f", what, i,
                    r->sent[i][axis], axis ? "ep" : "pp", most ? "at most " : "",
                    r->formula[i][axis]);
        }
    if (r->differ) blame(v, "%s: copies of %s differ, or the parameter is unknown", what, r->which);
}

/* Selects one of several variants for a case. */
static int variant_of(spec s) {
    return s.seq + s.heads + s.layers + s.vocab + s.dp + s.accum + s.ffn + s.dim;
}

/* Another schedule, or no pipeline if no weight is tied across stages. */
static void other_pipeline(spec *p) {
    static const int kinds[] = { DT_SCHEDULE_AFAB, DT_SCHEDULE_1F1B, DT_SCHEDULE_INTERLEAVED,
        DT_SCHEDULE_ZBV, DT_SCHEDULE_ZB, DT_SCHEDULE_DUALPIPE_V, DT_SCHEDULE_NAIVE };
    int turn = variant_of(*p) / 3, was = p->sched;
    int tied = (p->tied || modules_of(*p)) && p->model == MODEL_GPT;
    spec no = *p;
    no.pp = no.chunks = 1;
    /* in a V, tied weights sum their micro-batches in another order than elsewhere */
    if (stages_of(*p) == 1 || (tied && is_v(*p))) return;
    p->cut = (p->cut + 1 + turn % 3) % 4;
    for (int i = 0; i < 7; i++) {
        p->sched = kinds[(turn + i) % 7];
        p->chunks = is_v(*p) ? 2 : 1;
        if (p->sched == was || refusal(*p) || (tied && is_v(*p))) continue;
        spec more = *p;
        more.chunks = 2 + turn % 2;
        if (p->sched == DT_SCHEDULE_INTERLEAVED && refusal(more)) more.chunks = 2;
        if (p->sched == DT_SCHEDULE_INTERLEAVED && !refusal(more)) *p = more;
        break;
    }
    if (!tied && turn % 2) *p = no;
}

/* Another ZeRO stage with the same bits, and the opposite of no_overlap and keep. With one
   micro-batch all stages sum in the same order, or, with shard groups, stages 1 to 3; with the tree
   all-reduce every stage does. */
static void other_stage(spec *p) {
    spec s = *p;
    int turn = variant_of(s) % 3; /* reaches every pair of stages */
    if (s.tree || (s.accum == 1 && !s.shard))
        p->stage = (s.stage + 1 + turn) % 4;
    else if (s.accum == 1)
        p->stage = 1 + (s.stage + turn % 2) % 3;
    else if (!s.shard || s.stage > 1)
        p->stage = s.stage ^ 1;
    if (p->stage == 0 || (s.tree && turn)) p->shard = 0;
    p->no_overlap = !s.no_overlap;
    p->keep = p->stage == 3 && !s.keep;
    p->offload = s.offload ? OFF_NONE : 1 + turn + (turn == 2 && p->stage == 3);
    if (p->offload >= OFF_ALL && p->stage < 3) p->offload = OFF_STATE_DISK;
}

/* The kinds of change that must not change a bit. */
enum {
    CHANGE_STAGE = 0,
    CHANGE_PIPELINE,
    CHANGE_RECOMPUTE,
    CHANGE_SPLIT,
    CHANGE_PROCS,
    CHANGE_PIECES,
    CHANGE_NOTHING,
    CHANGES
};
static const char *const changes[] = { "another stage, offload and overlap",
    "another schedule or no pipeline", "with and without recompute",
    "full backward and backward in halves", "processes and threads",
    "with and without overlap of tensor-parallel traffic", "a second run", "all changes together" };

/* The case with one kind of change; CHANGES: with all of them. */
static spec partner_of(spec s, int change) {
    spec p = s;
    int all = change == CHANGES;
    if (all || change == CHANGE_STAGE) other_stage(&p);
    if (all || change == CHANGE_RECOMPUTE)
        p.recompute = s.recompute ? REC_NONE : 1 + variant_of(s) % 4;
    if (all || change == CHANGE_SPLIT) p.split = !s.split;
    /* on a device a product with fewer rows may take another algorithm */
    if ((all || change == CHANGE_PIECES) && !s.devices)
        p.pieces = s.pieces ? 0 : 2 + variant_of(s) % 2;
    if ((all && variant_of(s) % 16 == 7 && ranks_of(s) <= 8) || change == CHANGE_PROCS)
        p.procs = !s.procs;
    if (all || change == CHANGE_PIPELINE) other_pipeline(&p);
    /* forked processes have no devices; take another number of devices and order of streams */
    if (p.devices) p.procs = 0;
    if (p.devices && p.net != NET_NCCL) p.devices = 1 + (p.devices + variant_of(s)) % MOST_DEVICES;
    if (p.devices) p.late += change + 1;
    return p;
}

static void compare_partner(verdict *v, const result *a, const result *b, int change) {
    result *c = result_make(partner_of(a->s, change), a);
    run_ranks(v, changes[change], c);
    /* NCCL sums in an order of its own */
    if (!v->failed && a->s.net == NET_NCCL)
        compare(v, c, b);
    else if (!v->failed)
        compare_bits(v, changes[change], a, c);
    result_free(c);
}

/* Replaces the run of one rank on the CPU by one on a device. The two must agree, unless rounding
   may change a choice of experts. */
static result *alone_on_device(verdict *v, spec s, result *on_cpu) {
    spec alone = alone_of(s);
    int choices = experts_of(s) > s.top_k || (s.experts > 0 && s.capacity > 0);
    alone.devices = 1;
    alone.late = s.late;
    result *r = result_make(alone, on_cpu);
    run_ranks(v, "one rank on a device", r);
    if (!v->failed && !choices) compare(v, r, on_cpu);
    result_free(on_cpu);
    return r;
}

static verdict run_case(spec s) {
    verdict v = { 0 };
    result *b = result_make(alone_of(s), NULL);
    run_ranks(&v, "one rank", b);
    if (s.devices && narrow(s) && !v.failed) b = alone_on_device(&v, s, b);
    result *a = result_make(s, b);
    if (!v.failed) run_ranks(&v, "layout", a);
    if (!v.failed) compare(&v, a, b);
    if (!v.failed) compare_partner(&v, a, b, CHANGES);
    if (v.failed && *v.why == *changes[CHANGES])
        for (int change = 0; change < CHANGES; change++) { /* find the change that fails */
            verdict one = { 0 };
            compare_partner(&one, a, b, change);
            if (!one.failed) continue;
            v = one;
            break;
        }
    result_free(a);
    result_free(b);
    return v;
}

// ==== Generator and shrinker ====================================================================

static uint32_t draw(uint64_t seed, uint64_t index) {
    uint32_t out[4];
    dt__philox(seed, index, out);
    return out[0];
}

/* The factorings of 1 to 12 ranks into dp x tp x cp x pp x ep. */
typedef struct factoring {
    int dp, tp, cp, pp, ep;
} factoring;
static factoring factorings[300];
static int n_factorings;

static void list_factorings(void) {
    for (int n = 1; n <= 12; n++)
        for (int dp = 1; dp <= n; dp++)
            for (int tp = 1; tp <= n / dp; tp++)
                for (int cp = 1; cp <= n / (dp * tp); cp++)
                    for (int pp = 1; pp <= n / (dp * tp * cp); pp++)
                        if (n % (dp * tp * cp * pp) == 0)
                            factorings[n_factorings++] =
                                (factoring){ dp, tp, cp, pp, n / (dp * tp * cp * pp) };
}

/* Cases with all axes at once. */
static const char *const named[] = {
    "tp=2,sp=1,cp=2,ep=2,pp=2,kind=1,experts=2,top_k=2,balance=1,z=1,dropout=1,accum=4,sched=3,"
    "chunks=2,layers=2,"
    "heads=2,dim=2,ffn=7,seq=2,vocab=17,stage=2,clip=1,steps=3",
    "dp=2,tp=2,sp=1,cp=2,ep=2,pp=2,experts=1,top_k=2,capacity=2,shared=1,bias=1,accum=2,sched=4,"
    "layers=2,heads=2,"
    "dim=2,ffn=4,seq=2,vocab=17,tied=1,stage=1,clip=1,steps=3",
    "dp=2,tp=2,sp=1,cp=2,ep=2,pp=2,kind=1,llama=1,deep=2,experts=2,top_k=2,balance=1,bias=1,shared="
    "1,"
    "accum=2,sched=4,layers=2,heads=2,dim=2,ffn=4,seq=2,vocab=17,stage=3,recompute=2,steps=2",
    "dp=2,tp=4,pp=4,accum=4,sched=2,layers=3,heads=1,dim=4,ffn=16,seq=2,vocab=31,tied=1,stage=3,"
    "clip=1,steps=3",
    /* quantised weights: rows of whole blocks of 64 on each rank */
    "lora=4,tp=2,llama=1,heads=2,gqa=2,dim=32,ffn=128,seq=3,vocab=17,steps=2,clip=1",
    "lora=4,dp=2,tp=2,sp=1,pp=2,sched=2,accum=2,layers=2,heads=1,dim=64,ffn=128,seq=2,vocab=17,"
    "steps=2,stage=1",
    "lora=4,dp=3,llama=1,heads=1,dim=64,ffn=64,seq=3,vocab=17,accum=2,stage=3,steps=2,bucket=4096",
    "lora=4,dp=2,cp=2,llama=1,heads=2,dim=32,ffn=192,seq=2,vocab=5,stage=2,steps=2,recompute=2",
    "lora=4,dp=2,heads=1,dim=64,ffn=64,seq=3,vocab=17,stage=3,offload=3,steps=2,recompute=2",
    "lora=5,tp=2,sp=1,dp=2,llama=1,heads=1,dim=64,ffn=128,seq=2,vocab=17,stage=3,steps=2",
    "lora=5,pp=2,sched=4,accum=3,llama=1,layers=2,heads=2,dim=32,ffn=64,seq=2,vocab=17,steps=2,"
    "offload=1",
    "dp=2,tp=2,cp=2,pp=2,accum=4,sched=5,chunks=2,layers=2,heads=1,dim=4,ffn=16,seq=4,vocab=17,"
    "tied=1,stage=3,recompute=1,clip=1,steps=3",
    "tp=2,sp=1,ep=2,pp=4,accum=8,sched=6,chunks=2,layers=3,heads=1,dim=4,ffn=7,seq=2,vocab=17,"
    "experts=2,top_k=2,tied=1,stage=2,clip=1,steps=2",
    /* expert folding: ep over tp, over cp, over both; expert_tp over dp, over tp and dp */
    "tp=2,ep=2,fold=1,experts=2,top_k=2,capacity=2,balance=1,z=1,bias=1,shared=1,accum=2,layers=2,"
    "heads=2,dim=2,ffn=7,seq=2,vocab=17,stage=1,clip=1,steps=2",
    "cp=2,kind=1,ep=2,fold=1,llama=1,experts=2,top_k=2,capacity=1,balance=1,layers=2,heads=2,dim=2,"
    "ffn=4,seq=2,vocab=17,stage=3,clip=1,steps=3",
    "tp=2,sp=1,cp=2,pp=2,ep=4,fold=1,experts=1,top_k=2,capacity=2,balance=1,z=1,accum=2,sched=2,"
    "layers=2,heads=1,dim=4,ffn=4,seq=2,vocab=17,tied=1,stage=2,clip=1,steps=2",
    "dp=2,tp=2,ep=1,fold=4,experts=3,top_k=2,capacity=2,bias=1,layers=2,heads=1,dim=4,ffn=7,seq=2,"
    "vocab=17,stage=3,recompute=2,clip=1,steps=2",
    "dp=2,ep=1,fold=2,llama=1,deep=1,experts=4,top_k=2,shared=1,balance=1,bias=1,layers=2,heads=2,"
    "dim=2,ffn=7,seq=3,vocab=17,stage=2,clip=1,steps=3",
    "dp=2,tp=2,pp=2,ep=2,fold=2,experts=2,top_k=2,balance=1,shared=1,accum=4,sched=4,layers=2,"
    "heads=1,dim=4,ffn=7,seq=2,vocab=17,stage=1,clip=1,steps=2",
    "tp=4,cp=2,ep=1,fold=2,experts=3,top_k=2,capacity=3,shared=2,layers=1,heads=1,dim=2,ffn=4,seq="
    "4,"
    "vocab=5,stage=2,accum=2,steps=2",
    "dp=2,tp=3,ep=3,fold=2,experts=1,top_k=2,capacity=3,balance=1,z=1,layers=1,heads=1,dim=2,ffn=7,"
    "seq=2,vocab=17,optimizer=2,steps=3",
};
enum { NAMED = sizeof named / sizeof *named };

/* A rough count of the operations of a run. */
static double work_of(spec s) {
    double tokens = tokens_of(s),
           each = heads_of(s) * s.dim * (double)(s.ffn + heads_of(s) * s.dim) * (1 + s.top_k);
    return tokens * (tokens * heads_of(s) + each / 8) * sequences_of(s) * s.layers * s.steps;
}

enum { MOST_WORK = 60000, WIDEST = 32, LONGEST = 40 };

static int larger(int a, int b) { return a > b ? a : b; }

/* A random case on factoring `number`. */
static spec random_spec(uint64_t seed, int number, int attempt) {
    spec s;
    factoring f = factorings[number % n_factorings];
    if (number >= n_factorings &&
        f.pp == 1) { /* cases after the list of factorings have a pipeline */
        f.pp = f.tp;
        f.tp = 1;
    }
    for (int i = FIRST; i < FIELDS; i++) {
        uint32_t d = draw(seed + (uint64_t)attempt * 0x9E3779B97F4A7C15u,
            (uint64_t)(number * DRAWN + i - FIRST + 6));
        *value_of(&s, &fields[i]) = fields[i].values[d % (uint32_t)fields[i].n];
    }
    s.dp = f.dp;
    s.tp = f.tp;
    s.cp = f.cp;
    s.pp = f.pp;
    s.ep = f.ep;
    s.procs = s.devices = s.late = s.net = s.lora = s.fold = 0;
    /* a number of micro-batches that the pipeline's ranks do not divide */
    if (number >= n_factorings && number % 4 == 0 && s.pp > 1 && s.pp < 6) {
        s.sched = DT_SCHEDULE_INTERLEAVED;
        s.chunks = 2 + (s.pp < 4 && number / 4 % 2);
        s.accum = s.pp + 1;
    }
    if (s.sched != DT_SCHEDULE_INTERLEAVED) s.chunks = is_v(s) && s.pp > 1 ? 2 : 1;
    /* most cases have several micro-batches */
    if (s.accum == 1 && draw(seed, (uint64_t)(attempt + number * 7919)) % 8) s.accum = 2;
    if (heads_of(s) * s.dim > WIDEST) s.heads = 1;
    if (heads_of(s) * s.dim > WIDEST) s.dim = 2;
    if (tokens_of(s) > LONGEST) s.seq = 2;
    for (int i = 1; i < 4 && stages_of(s) > items_of(s); i++)
        s.layers = (const int[]){ 1, 2, 3, 6 }[i];
    if (work_of(s) > MOST_WORK) s.steps = 1;
    if (work_of(s) > MOST_WORK && stages_of(s) <= 2) s.layers = 1;
    if (work_of(s) > MOST_WORK) s.micro = 1;
    if (work_of(s) > MOST_WORK && s.accum > 3) s.accum = larger(s.accum / 2, 1);
    if (work_of(s) > MOST_WORK && s.accum > 3) s.accum = larger(s.accum / 2, 1);
    return s;
}

/* Pairs of values that have occurred in a case: seen[field][value][field][value]. An axis has two
   values, 1 and more. Values without effect in a case do not count: sp without tp, kind without cp,
   pipeline fields without a pipeline. */
static unsigned char seen[FIELDS][8][FIELDS][8];
static unsigned char needs[FIELDS]; /* what a field needs to have an effect, NEEDS_* */
enum { NEEDS_TP = 1, NEEDS_CP, NEEDS_PP, NEEDS_NO_PP, NEEDS_EXPERTS, NEEDS_LLAMA };

static void list_needs(void) {
    static const struct {
        const char *name;
        int needs;
    } list[] = { { "sp", NEEDS_TP }, { "kind", NEEDS_CP }, { "sched", NEEDS_PP },
        { "chunks", NEEDS_PP }, { "cut", NEEDS_PP }, { "split", NEEDS_NO_PP },
        { "top_k", NEEDS_EXPERTS }, { "capacity", NEEDS_EXPERTS }, { "every", NEEDS_EXPERTS },
        { "shared", NEEDS_EXPERTS }, { "balance", NEEDS_EXPERTS }, { "z", NEEDS_EXPERTS },
        { "bias", NEEDS_EXPERTS }, { "deep", NEEDS_LLAMA } };
    for (int i = 0; i < FIELDS; i++)
        for (size_t k = 0; k < sizeof list / sizeof *list; k++)
            if (strcmp(fields[i].name, list[k].name) == 0) needs[i] = (unsigned char)list[k].needs;
}

static int index_of(spec s, int i) {
    int v = *value_of(&s, &fields[i]), k = 0;
    if (i < FIRST) return i < AXES ? v > 1 : -1;
    if ((needs[i] == NEEDS_TP && s.tp == 1) || (needs[i] == NEEDS_CP && s.cp == 1)) return -1;
    if ((needs[i] == NEEDS_PP || needs[i] == NEEDS_NO_PP) &&
        (needs[i] == NEEDS_PP) != (stages_of(s) > 1))
        return -1;
    if (needs[i] == NEEDS_EXPERTS && mixtures_of(s) == 0) return -1;
    if (needs[i] == NEEDS_LLAMA && !(s.llama && s.model == MODEL_GPT)) return -1;
    while (k < fields[i].n && fields[i].values[k] != v) k++;
    return k < fields[i].n ? k : -1;
}

/* The number of pairs that occur first in this case. mark: marks them as seen. */
static int new_pairs(spec s, int mark) {
    int count = 0, at[FIELDS];
    for (int i = 0; i < FIELDS; i++) at[i] = index_of(s, i);
    for (int i = 0; i < FIELDS; i++)
        for (int k = i + 1; k < FIELDS; k++) {
            int a = at[i], b = at[k];
            if (a < 0 || b < 0 || seen[i][a][k][b]) continue;
            count++;
            if (mark) seen[i][a][k][b] = 1;
        }
    return count;
}

/* Simplifies field by field while the case still fails. */
static spec shrink(spec s) {
    for (int changed = 1; changed;) {
        changed = 0;
        for (int i = 0; i < FIELDS; i++)
            for (int k = 0; k < fields[i].n && fields[i].values[k] != *value_of(&s, &fields[i]);
                 k++) {
                spec simpler = s;
                *value_of(&simpler, &fields[i]) = fields[i].values[k];
                if (refusal(simpler) || !run_case(simpler).failed) continue;
                s = simpler;
                changed = 1;
                break;
            }
    }
    return s;
}

static void report_failure(const char *program, spec s, verdict v) {
    char text[400];
    print_spec(s, text, sizeof text);
    printf("  case '%s': %s\n", text, v.why);
    spec small = shrink(s);
    v = run_case(small);
    print_spec(small, text, sizeof text);
    printf("  smallest: %s\n  repeat it: %s --case '%s'\n", v.why, program, text);
}

/* Statistics of the run. */
static int refused[RULES], done;
enum { SEVERAL, PIPELINES, UNEVEN_2, UNEVEN_3, ENDS, FORKED, WITHOUT, FOLDS, TALLIES };
static int tally[TALLIES];
static const char *const tallies[TALLIES] = { "with several micro-batches", "in a pipeline",
    "interleaved in 2 chunks with micro-batches that its ranks do not divide",
    "interleaved in 3 chunks with micro-batches that its ranks do not divide",
    "with stages of only the embedding and only the head", "repeated in processes",
    "repeated without a pipeline", "with expert folding" };

static void count_case(spec s) {
    spec p = partner_of(s, CHANGES);
    int uneven = s.pp > 1 && s.accum > s.pp && s.accum % s.pp != 0;
    done++;
    tally[SEVERAL] += s.accum > 1;
    tally[PIPELINES] += stages_of(s) > 1;
    tally[UNEVEN_2] += uneven && s.chunks == 2;
    tally[UNEVEN_3] += uneven && s.chunks == 3;
    tally[ENDS] += stages_of(s) > 2 && s.cut == CUT_ENDS && s.model == MODEL_GPT;
    tally[FORKED] += p.procs;
    tally[WITHOUT] += s.pp > 1 && p.pp == 1;
    tally[FOLDS] += s.fold > 0 && s.ep * s.fold > 1;
}

/* The cases of a run, in order. */
static spec *listed;
static int n_listed, in_f64;

static void list_case(spec s) {
    if (n_listed % 64 == 0) listed = (spec *)realloc(listed, (size_t)(n_listed + 64) * sizeof s);
    listed[n_listed++] = s;
}

static int net_cases[3];

/* The same case on some devices, or over NCCL on one for each rank. */
static spec on_devices(uint64_t seed, int number, spec s) {
    s.net = number % 5 == 2 ? NET_NCCL : number % 5 == 4 ? NET_TCP : NET_NONE;
    if (s.net == NET_NCCL && ranks_of(s) > MOST_DEVICES + 4) s.net = NET_NONE;
    s.devices = s.net == NET_NCCL ? ranks_of(s)
                                  : 1 + (int)(draw(seed + 3, (uint64_t)number) % MOST_DEVICES);
    s.late = (int)(draw(seed + 4, (uint64_t)number) % 100000);
    if (s.type == TYPE_F64) s.type = TYPE_F32;
    net_cases[s.net]++;
    return s;
}

static int run_and_report(const char *program, uint64_t seed, int number) {
    spec s = ON_DEVICES ? on_devices(seed, number, listed[number]) : listed[number];
    verdict v = run_case(s);
    CHECK_MSG(!v.failed, "case %d of seed %llu: %s", number, (unsigned long long)seed, v.why);
    if (v.failed) report_failure(program, s, v);
    count_case(s);
    return !v.failed;
}

/* Sets the type. In 16 bits, sums over tp or cp are rounded differently than on one rank, which may
   change a choice of experts. Then every token chooses all experts. */
static void fit_type(spec *s, int type) {
    s->type = type;
    if (!narrow(*s) || s->tp * s->cp == 1) return;
    if (experts_of(*s) > 2) s->experts = 0;
    if (s->experts > 0) s->top_k = experts_of(*s);
    s->capacity = 0;
}

/* The best of `tries` valid draws: the one with the most new pairs. 0 if no draw is valid. */
static int choose(uint64_t seed, int number, int type, int tries, spec *best) {
    int most = -1;
    for (int attempt = 0; attempt < 4000 && (tries > 0 || most < 0); attempt++) {
        spec s = random_spec(seed, number, attempt);
        fit_type(&s, type >= 0 ? type : 1 + (int)(draw(seed, (uint64_t)number + 99991) % 3));
        s.grads = narrow(s) && draw(seed + 9, (uint64_t)number) % 2;
        int rule = refusal(s);
        if (rule) {
            refused[rule]++;
            continue;
        }
        int pairs = new_pairs(s, 0);
        if (pairs > most) most = pairs, *best = s;
        tries--;
    }
    return most >= 0;
}

/* The rule that forbids the simplest case in which both values have an effect; 0: no rule. */
static int pair_refusal(int i, int a, int k, int b) {
    spec s = simplest();
    int both[2] = { i, k };
    for (int f = 0; f < 2; f++) {
        int need = needs[both[f]];
        if (need == NEEDS_TP) s.tp = 2;
        if (need == NEEDS_CP) s.cp = 2;
        if (need == NEEDS_PP) s.pp = 2;
        if (need == NEEDS_EXPERTS) s.experts = 2;
        if (need == NEEDS_LLAMA) s.llama = 1, s.dim = 2;
        if (strcmp(fields[both[f]].name, "chunks") == 0) s.sched = DT_SCHEDULE_INTERLEAVED;
    }
    *value_of(&s, &fields[i]) = fields[i].values[a];
    *value_of(&s, &fields[k]) = fields[k].values[b];
    if (is_v(s) && strcmp(fields[i].name, "chunks") != 0 && strcmp(fields[k].name, "chunks") != 0)
        s.chunks = 2;
    if ((needs[i] == NEEDS_PP || needs[k] == NEEDS_PP) && stages_of(s) == 1) s.chunks = 2;
    return index_of(s, i) == a && index_of(s, k) == b ? refusal(s) : 0;
}

/* Finds a case with both values, on any factoring. 0 if there is none. */
static int find_pair(uint64_t seed, int i, int a, int k, int b, spec *s) {
    for (int attempt = 0; attempt < 4000; attempt++) {
        *s = random_spec(seed + 17, (int)(draw(seed + 18, (uint64_t)attempt) % 216), attempt);
        s->type = TYPE_F64;
        if (i >= FIRST) *value_of(s, &fields[i]) = fields[i].values[a];
        if (k >= FIRST) *value_of(s, &fields[k]) = fields[k].values[b];
        if (is_v(*s) && s->pp > 1) s->chunks = 2;
        if (index_of(*s, i) == a && index_of(*s, k) == b && refusal(*s) == 0) return 1;
    }
    return 0;
}

/* 1 if two values cannot both have an effect: `split` and a schedule, which splits backwards
   itself; fields of a mixture, an axis or a pipeline in a case without it. */
static int exclusive(int i, int a, int k, int b) {
    const char *x = fields[i].name, *y = fields[k].name;
    int v = fields[i].values[a], w = fields[k].values[b];
    if (needs[i] + needs[k] == NEEDS_PP + NEEDS_NO_PP &&
        (needs[i] == NEEDS_PP || needs[k] == NEEDS_PP))
        return 1;
    if (strcmp(x, "experts") == 0 && v == 0 && needs[k] == NEEDS_EXPERTS) return 1;
    if (strcmp(x, "model") == 0 && v == MODEL_OWN && needs[k] == NEEDS_LLAMA) return 1;
    if (strcmp(x, "llama") == 0 && v == 0 && needs[k] == NEEDS_LLAMA) return 1;
    if (strcmp(x, "tp") == 0 && v == 1 && needs[k] == NEEDS_TP) return 1;
    if (strcmp(x, "cp") == 0 && v == 1 && needs[k] == NEEDS_CP) return 1;
    if (strcmp(x, "pp") == 0 && v > 1 && needs[k] == NEEDS_NO_PP) return 1;
    if (strcmp(x, "pp") == 0 && v == 1 && strcmp(y, "chunks") == 0 && w == 1) return 1;
    return strcmp(x, "layers") == 0 && v == 1 && strcmp(y, "every") == 0 && w == 2;
}

/* The number of a field's values that are paired. */
static int values_of(int i) {
    if (i < FIRST) return i < AXES ? 2 : 0;
    return strcmp(fields[i].name, "type") == 0 ? 0 : fields[i].n;
}

/* Adds cases for the pairs that have not occurred yet. */
static void list_pairs(uint64_t seed) {
    int pairs = 0, never[RULES] = { 0 };
    for (int i = 0; i < FIELDS; i++)
        for (int k = i + 1; k < FIELDS; k++)
            for (int v = 0; v < values_of(i) * values_of(k); v++) {
                spec s;
                int a = v / values_of(k), b = v % values_of(k);
                pairs++;
                if (seen[i][a][k][b]) continue;
                if (find_pair(seed, i, a, k, b, &s)) {
                    new_pairs(s, 1);
                    list_case(s);
                    continue;
                }
                int rule = pair_refusal(i, a, k, b);
                CHECK_MSG(rule > 0 || exclusive(i, a, k, b),
                    "no case was found with %s=%d and %s=%d", fields[i].name, fields[i].values[a],
                    fields[k].name, fields[k].values[b]);
                never[rule]++;
                if (rule > 0 && !ON_DEVICES)
                    printf("  no case can have %s=%d and %s=%d: %s\n", fields[i].name,
                        fields[i].values[a], fields[k].name, fields[k].values[b], rules[rule]);
            }
    if (ON_DEVICES) return;
    printf("test_matrix: %d pairs of values; impossible:", pairs);
    for (int r = 0; r < RULES; r++)
        if (never[r]) printf(" %d %s;", never[r], rules[r]);
    printf("\n");
}

static int one_case(const char *text) {
    spec s;
    if (!parse_spec(text, &s) || refusal(s)) {
        printf("no such case: %s\n", text);
        rmdir(folder);
        return 2;
    }
    verdict v = run_case(s);
    rmdir(folder);
    printf("%s\n", v.failed ? v.why : "agrees with one rank");
    return v.failed != 0;
}

enum { CASES = 348, FEW_CASES = 222, ADAPTED = 30, FOLDED = 40 };

/* Adds cases with adapters: every few cases of a GPT that are listed. */
static void list_adapters(int cases) {
    int gpts = 0, added = 0, every = cases / (2 * ADAPTED) + 1, n = n_listed;
    for (int i = NAMED; i < n && added < ADAPTED; i++) {
        spec s = listed[i];
        if (s.model != MODEL_GPT || is_latent(s) || gpts++ % every) continue;
        s.lora = LORA_QV + added++ % 3;
        /* stored bytes have no padding */
        if (s.lora == LORA_BF16 && s.ffn % s.tp) s.lora = LORA_ALL;
        s.freeze = 0;
        s.steps = larger(s.steps, 2);
        list_case(s);
    }
}

/* Adds cases with expert folding: cases with a mixture that are listed, in which ep and expert_tp
   divide the ranks of a stage anew. */
static void list_folded(uint64_t seed) {
    int added = 0, n = n_listed;
    for (int i = NAMED; i < n && added < FOLDED; i++) {
        spec s = listed[i];
        s.dp *= s.ep;
        int ranks = s.dp * s.cp * s.tp, most = MAX_EXPERTS / larger(s.experts, 1);
        if (mixtures_of(s) == 0 || ranks == 1) continue;
        int ep = 1 + (int)(draw(seed + 5, (uint64_t)i) % (uint32_t)(ranks < most ? ranks : most));
        while (ranks % ep) ep--;
        int fold = 1 + (int)(draw(seed + 6, (uint64_t)i) % (uint32_t)(ranks / ep));
        while (ranks / ep % fold) fold--;
        s.ep = ep;
        s.fold = fold;
        if (tokens_of(s) > LONGEST) s.seq = 2;
        if (work_of(s) > MOST_WORK || refusal(s)) continue;
        added++;
        list_case(s);
    }
}

/* All cases of a run; cases in f64 come first. */
static void list_cases(uint64_t seed, int cases) {
    spec s;
    list_factorings();
    list_needs();
    CHECK(n_factorings == 216);
    for (int i = 0; i < NAMED; i++)
        if (CHECK_MSG(parse_spec(named[i], &s) && refusal(s) == 0, "%s", named[i])) list_case(s);
    for (int number = 0; number < cases; number++) {
        int found = choose(seed, number, TYPE_F64, 20, &s);
        CHECK_MSG(found, "no case on factoring %d", number % n_factorings);
        if (!found) continue;
        new_pairs(s, 1);
        list_case(s);
    }
    if (cases >= n_factorings) list_pairs(seed);
    list_adapters(cases);
    list_folded(seed);
    in_f64 = n_listed;
    for (int number = cases; number < cases + cases / 6; number++)
        if (choose(seed, number, -1, 1, &s)) list_case(s);
}

static void print_statistics(uint64_t seed, int all) {
    for (int t = 0; t < TALLIES; t++) {
        if (t == FORKED && ON_DEVICES) continue; /* forked processes have no devices */
        if (!ON_DEVICES) printf("test_matrix: %d cases %s\n", tally[t], tallies[t]);
        CHECK_MSG(
            !all || tally[t] >= (t == SEVERAL ? 200 : 3), "%d cases %s", tally[t], tallies[t]);
    }
    if (ON_DEVICES) {
        printf("test_matrix_gpu: %d cases of %d of the CPU's run through the emulated GPU, f32 in "
               "place of f64, on 1 to %d "
               "devices; %d of them through NCCL, %d over sockets\n",
            done, n_listed, MOST_DEVICES, net_cases[NET_NCCL], net_cases[NET_TCP]);
        return;
    }
    printf(
        "test_matrix: %d cases in f64, %d in other types, %d factorings, seed %llu; draws refused:",
        in_f64, n_listed - in_f64, n_factorings, (unsigned long long)seed);
    for (int r = 1; r < RULES; r++)
        if (refused[r]) printf(" %d %s%s", refused[r], rules[r], r + 1 < RULES ? "," : "");
    printf("\n");
}

#if ON_DEVICES
static dt_status never(dt_ctx *ctx, void *user) {
    (void)user;
    return dt_fail(ctx, DT_ERR_ARG, "this rank must not run");
}

/* A checkpoint saved by ranks on 3 devices is loaded by another layout on 2, with the same bits. */
static void check_checkpoint(void) {
    static const char *const layouts[] = {
        "dp=2,tp=2,devices=3,late=11,type=1,layers=2,dim=4,stage=3,steps=2,clip=1",
        "dp=2,tp=2,devices=2,late=12,type=1,layers=2,dim=4,stage=2,steps=2,clip=1,offload=1"
    };
    verdict v = { 0 };
    spec s[2];
    CHECK(parse_spec(layouts[0], &s[0]) && parse_spec(layouts[1], &s[1]));
    result *b = result_make(alone_of(s[0]), NULL);
    run_ranks(&v, "one rank", b);
    result *saved = result_make(s[0], b), *loaded = result_make(s[1], b);
    saved->checkpoint = CHECKPOINT_SAVE;
    loaded->checkpoint = CHECKPOINT_LOAD;
    run_ranks(&v, "saved", saved);
    loaded->loss[0] = saved->loss[0];
    loaded->norm[0] = saved->norm[0];
    memcpy(loaded->grad, saved->grad, sizeof saved->grad);
    run_ranks(&v, "loaded", loaded);
    if (!v.failed) compare_bits(&v, "a checkpoint", loaded, saved);
    CHECK_MSG(!v.failed, "%s", v.why);
    result_free(b);
    result_free(saved);
    result_free(loaded);
    char line[100];
    snprintf(line, sizeof line, "rm -r %s/*", folder);
    CHECK(system(line) == 0);
}

/* When a rank fails, nothing leaks on the devices, whatever the other ranks wait for. */
static void check_failures(void) {
    static const char *const layouts[] = {
        "dp=2,tp=2,devices=3,type=1,layers=2,stage=3,offload=3,accum=4,sp=1",
        "pp=2,dp=2,devices=2,net=1,type=1,layers=2,stage=3,accum=4,sched=2,offload=4",
        "pp=2,ep=2,devices=4,net=2,type=1,layers=2,experts=2,stage=3,accum=4,sched=2"
    };
    for (int i = 0; i < 3 * 4; i += check_all_cases() ? 1 : 2) {
        spec s;
        verdict v = { 0 };
        CHECK(parse_spec(layouts[i % 3], &s) && !refusal(s));
        s.late = 100 + i;
        result *b = result_make(alone_of(s), NULL);
        run_ranks(&v, "one rank", b);
        result *r = result_make(s, b);
        r->fails = 1 + (i + i / 4) % 4;
        r->fails_at = i / 3;
        dt_report report = run_silently(r);
        CHECK_MSG(
            report.status != DT_OK && strstr(report.text, "planted"), "%d: %s", i, report.text);
        devices_end(&v, "after a failure", s);
        CHECK_MSG(!v.failed, "%s: %s", layouts[i % 3], v.why);
        result_free(b);
        result_free(r);
    }
}

/* 1-bit Adam on one rank, before and after the freeze, and Muon on two ranks. The messages are in
   device memory, where an access by the host ends the process. */
typedef struct alone {
    int optimizer;
    float *values;
} alone;

static dt_status train_alone(dt_ctx *ctx, void *user) {
    const alone *a = (const alone *)user;
    enum { ROWS = 8, IN = 96, OUT = 32 };
    float x[ROWS * IN], y[ROWS * OUT];
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(OUT, IN), DT_NORMAL(0.1));
    dt_zero *zero = dt_zero_make(
        ctx, (dt_zero_desc){
                 .stage = a->optimizer == DT_MUON, .optimizer = a->optimizer, .freeze_steps = 2 });
    for (int i = 0; i < ROWS * IN; i++) x[i] = (float)sin(i);
    for (int i = 0; i < ROWS * OUT; i++) y[i] = (float)cos(3 * i);
    for (int step = 1; step <= 5 && dt_error(ctx) == DT_OK; step++) {
        dt_tensor *out = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(ROWS, IN), x), w, NULL);
        dt_backward(dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(ROWS, OUT), y), ROWS));
        dt_zero_step(zero, 0.01);
        dt_reset(ctx);
    }
    if (dt_ctx_rank(ctx) == 0) dt_read(w, a->values);
    return dt_error(ctx);
}

static void check_alone(const char *name, int optimizer, int ranks) {
    enum { N = 32 * 96 };
    static float cpu[N], gpu[N];
    verdict v = { 0 };
    spec s = { .devices = ranks, .late = 10 };
    double worst = 0, moved = 0;
    alone on_cpu = { optimizer, cpu }, on_gpu = { optimizer, gpu };
    CHECK(dt_run((dt_run_desc){ .ranks = ranks, .kernels = dt_kernels_cpu() }, train_alone,
              &on_cpu) == DT_OK);
    CHECK(dt_run((dt_run_desc){ .ranks = ranks, .kernels = devices_begin(s) }, train_alone,
              &on_gpu) == DT_OK);
    devices_end(&v, name, s);
    for (int i = 0; i < N; i++)
        worst = fmax(worst, fabs(cpu[i] - gpu[i])), moved = fmax(moved, fabs(cpu[i]));
    CHECK_MSG(!v.failed && worst < 1e-5 && moved > 0.1, "%s: %s, %g", name, v.why, worst);
}
static void check_optimizers(void) {
    check_alone("1-bit Adam of one rank", DT_ONEBIT_ADAM, 1);
    check_alone("Muon of two ranks", DT_MUON, 2);
}

/* Ranks as threads refuse to start, with the reason, on devices without peer access or without any
   device. */
static void check_refusals(void) {
    dt_report report;
    dt_host host = *dt_host_default();
    dt_run_desc desc = { .ranks = 3,
        .timeout_s = 20,
        .host = &host,
        .report = &report,
        .kernels = devices_begin((spec){ .devices = 3 }) };
    host.log = silent;
    fake_cuda_no_peers(1);
    CHECK(dt_run(desc, never, NULL) == DT_ERR_DEVICE);
    CHECK_MSG(strstr(report.text, "peer access") && strstr(report.text, "nccl"), "%s", report.text);
    fake_cuda_devices(0);
    CHECK(dt_run(desc, never, NULL) == DT_ERR_DEVICE);
    CHECK_MSG(strstr(report.text, "cudaErrorNoDevice"), "%s", report.text);
    CHECK(fake_cuda_leaks(1) == 0);
    fake_cuda_reset();
}
#else
static void check_checkpoint(void) {}
static void check_failures(void) {}
static void check_optimizers(void) {}
static void check_refusals(void) {}
#endif

int main(int argc, char **argv) {
    int all = check_all_cases(), from = 0, ok = 1;
    int cases = ON_DEVICES ? SAMPLE / (all ? 1 : 2) : all ? CASES : FEW_CASES;
    uint64_t seed = 1;
    snprintf(folder, sizeof folder, "/tmp/dt_test_matrix.XXXXXX");
    if (!CHECK(mkdtemp(folder) != NULL)) return check_done("test_matrix");
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--cases") == 0) cases = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--from") == 0) from = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--seed") == 0) seed = strtoull(argv[i + 1], NULL, 10);
        if (strcmp(argv[i], "--case") == 0) return one_case(argv[i + 1]);
    }
    list_cases(seed, ON_DEVICES ? CASES : cases);
    int n = ON_DEVICES && cases < n_listed ? cases : n_listed;
    for (int i = from; i < n && ok; i++)
        ok = run_and_report(argv[0], seed, (int)((int64_t)i * n_listed / n));
    check_checkpoint();
    check_failures();
    check_optimizers();
    check_refusals();
    print_statistics(seed, ok && n == n_listed && cases >= FEW_CASES && from == 0);
    free(listed);
    CHECK(rmdir(folder) == 0); /* fails if a file was left in it */
    return check_done(ON_DEVICES ? "test_matrix_gpu" : "test_matrix");
}
