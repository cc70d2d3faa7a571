/* test_matrix.c - every layout against one rank: random models and layouts, a comparison, a shrinker

   Each case draws a model, a batch and a layout from the table of fields below, trains it for a few steps on the ranks
   of the layout and on one rank with the whole batch, and compares losses, gradient norms, gradients and optimizer
   state of the first step and parameters after the last by the rule of DESIGN.md: |a-b| <= tol * max(|b|, s), 2-norms
   of a tensor. What a stage frees is filled with NaN. These must agree bit for bit: ZeRO 0 and 1, 2 and 3; all stages
   with one micro-batch or the tree; units reduced and gathered ahead of time or not, kept gathered or not; the two
   halves of the backward and the whole; recomputing and not. A failing case is shrunk: every field is moved to its
   simplest value while the case still fails, and one command that repeats it is printed.

   In f64 every factoring of 1 to 12 ranks into dp x tp x cp is a case, and dp 2 x tp 2 x cp 4 with sp; any two values
   of two fields meet in one, or no draw with both can be (counted by its rule: arithmetic only). Other types follow.

       test_matrix [--cases N] [--seed S]       at least N cases in f64, and N/4 in other types
       test_matrix --case 'model=1,dp=2,...'    one case; fields not named have their simplest value */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include "../examples/gpt.h"
#include "check.h"
#include <time.h>

// ==== Cases =========================================================================================================

typedef struct spec {
    int dp, tp, cp;
    int model, llama, layers, heads, dim, gqa, ffn, seq, vocab, tied, dropout, smoothing, ignore, docs, type;
    int ep, sp, kind, accum, micro, stage, shard, keep, no_overlap, tree, offload;
    int optimizer, clip, bucket, freeze, split, recompute, steps;
} spec;

enum { MODEL_GPT = 0, MODEL_OWN };
enum { TYPE_F64 = 0, TYPE_F32, TYPE_BF16, TYPE_F16 };
enum { OFF_NONE = 0, OFF_STATE, OFF_STATE_DISK, OFF_ALL, OFF_ALL_DISK };
enum { REC_NONE = 0, REC_SELECTIVE, REC_FULL, REC_FULL_2, REC_FULL_3 };
enum { OPT_ADAMW = 0, OPT_ADAM, OPT_SGD, OPT_MOMENTUM, OPT_OWN };

/* Parser, printer, generator and shrinker all read this table. The first value is the simplest. heads: of one rank of
   tp; gqa: query heads that share a key head; seq: tokens of one rank, of cp and, with sp, of tp; shard: ranks of a
   shard group, 0: all. */
typedef struct field { const char *name; size_t at; int n; int values[8]; } field;
#define COUNT(...) (int)(sizeof((int[]){ __VA_ARGS__ }) / sizeof(int))
#define F(name, ...) { #name, offsetof(spec, name), COUNT(__VA_ARGS__), { __VA_ARGS__ } }
static const field fields[] = {
    F(dp, 1, 2, 3, 4, 5, 8), F(tp, 1, 2, 3, 4), F(cp, 1, 2, 3, 4), /* the generator draws these three together */
    F(model, MODEL_GPT, MODEL_OWN), F(llama, 0, 1), F(layers, 1, 2, 3), F(heads, 1, 2, 3, 4),
    F(dim, 1, 2, 3, 4), F(gqa, 1, 2, 3, 4), F(ffn, 1, 4, 7, 16), F(seq, 1, 2, 3, 8), F(vocab, 2, 5, 17, 31),
    F(tied, 0, 1), F(dropout, 0, 1), F(smoothing, 0, 1), F(ignore, 0, 1), F(docs, 0, 1),
    F(type, TYPE_F64, TYPE_F32, TYPE_BF16, TYPE_F16),
    F(ep, 1, 2, 3), F(sp, 0, 1), F(kind, DT_CP_RING, DT_CP_ZIGZAG, DT_CP_ALLGATHER, DT_CP_ULYSSES), F(accum, 1, 2, 3),
    F(micro, 1, 2), F(stage, 0, 1, 2, 3), F(shard, 0, 1, 2, 3), F(keep, 0, 1), F(no_overlap, 0, 1), F(tree, 0, 1),
    F(offload, OFF_NONE, OFF_STATE, OFF_STATE_DISK, OFF_ALL, OFF_ALL_DISK),
    F(optimizer, OPT_ADAMW, OPT_ADAM, OPT_SGD, OPT_MOMENTUM, OPT_OWN), F(clip, 0, 1),
    F(bucket, 0, 64, 4096), F(freeze, 0, 1), F(split, 0, 1),
    F(recompute, REC_NONE, REC_SELECTIVE, REC_FULL, REC_FULL_2, REC_FULL_3), F(steps, 1, 3),
};
enum { FIELDS = sizeof fields / sizeof *fields };

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
            used += (size_t)snprintf(text + used, bytes - used, "%s%s=%d", used ? "," : "", fields[i].name,
                *value_of(&s, &fields[i]));
}

static int parse_spec(const char *text, spec *s) {
    *s = simplest();
    while (*text) {
        size_t n = strcspn(text, "=");
        int    i = 0;
        while (i < FIELDS && (strlen(fields[i].name) != n || strncmp(fields[i].name, text, n) != 0)) i++;
        if (i == FIELDS || text[n] != '=') return 0;
        char *end;
        *value_of(s, &fields[i]) = (int)strtol(text + n + 1, &end, 10);
        text = *end == ',' ? end + 1 : end;
        if (*end && *end != ',') return 0;
    }
    return 1;
}

static int ranks_of(spec s) { return s.dp * s.ep * s.tp * s.cp; }
static int heads_of(spec s) { return s.heads * s.tp; }
static int tokens_of(spec s) { return s.seq * s.cp * (s.sp ? s.tp : 1); }

/* The same case on one rank: the sizes of its model stay. */
static spec alone_of(spec s) {
    spec a = s;
    a.micro = s.dp * s.ep * s.accum * s.micro;
    a.heads = heads_of(s);
    a.seq = tokens_of(s);
    a.dp = a.ep = a.tp = a.cp = a.accum = 1;
    a.stage = a.shard = a.keep = a.no_overlap = a.tree = a.split = a.bucket = a.recompute = a.sp = a.kind = 0;
    a.offload = OFF_NONE;
    return a;
}

/* Why a draw is no case, by number; 0: it is one. Arithmetic only. */
enum { RULES = 10 };
static const char *const rules[RULES] = { "none", "more than 16 ranks", "keys over tp", "heads shared by keys",
    "odd width of a head that is turned", "tokens over cp by zigzag", "heads over cp by ulysses",
    "data group by shard groups", "kept gathered below stage 3",
    "values offloaded below stage 3" };

static int refusal(spec s) {
    char why[300];
    int  kv = heads_of(s) / s.gqa, gpt = s.model == MODEL_GPT;
    if (ranks_of(s) > 16) return 1;
    if (heads_of(s) % s.gqa != 0) return 3;
    if (gpt && kv % s.tp != 0 && s.tp % kv != 0) return 2;
    if (gpt && s.llama && s.dim % 2 != 0) return 4;
    int keys = (kv + s.tp - 1) / s.tp, ulysses = s.kind == DT_CP_ULYSSES;
    if (!ulysses && dt_context_check(s.kind, tokens_of(s), s.cp, 1, 1, why, sizeof why) != DT_OK) return 5;
    if (ulysses && gpt && dt_context_check(s.kind, tokens_of(s), s.cp, s.heads, keys, why, sizeof why) != DT_OK)
        return 6;
    if (s.shard > 0 && (s.stage == 0 || s.dp * s.ep * s.cp % s.shard != 0)) return 7;
    if (s.keep && s.stage < 3) return 8;
    if (s.offload >= OFF_ALL && s.stage < 3) return 9;
    return 0;
}

// ==== Models ========================================================================================================

typedef struct own_model { /* no GPT: squares and linear layers over real numbers, mean squared error */
    dt_ctx    *ctx;
    int        layers, width, hidden;
    dt_comm   *tp;
    dt_place   outside;
    dt_tensor *up[3], *up_bias[3], *down[3], *down_bias[3];
} own_model;

enum { OUT = 3 };

static dt_dtype type_of(spec s) {
    static const dt_dtype types[] = { DT_F64, DT_F32, DT_BF16, DT_F16 };
    return types[s.type];
}

static int narrow(spec s) { return s.type >= TYPE_BF16; }

/* y = x + x^2 / 10, written as a user writes an op: for numbers of any type. */
static dt_status square_back(dt_node *n) {
    dt_tensor  *x = n->in[0];
    size_t      count = (size_t)dt_count(x->shape);
    void       *dx = dt_wants(n, 0) ? dt_grad(n, 0) : NULL;
    const void *dy = n->out->grad;
    for (size_t i = 0; dx && i < count; i++) {
        double slope = 1 + 0.2 * dt__number(x->dtype, x->data, i);
        dt__set_number(x->dtype, dx, i, dt__number(x->dtype, dx, i) + dt__number(x->dtype, dy, i) * slope);
    }
    return DT_OK;
}

static dt_tensor *square(dt_tensor *x) {
    dt_tensor *y = x ? dt_new(x->ctx, x->dtype, x->shape) : NULL;
    for (size_t i = 0; y && i < (size_t)dt_count(x->shape); i++) {
        double v = dt__number(x->dtype, x->data, i);
        dt__set_number(x->dtype, y->data, i, v + 0.1 * v * v);
    }
    return y ? dt_record(y, (dt_record_desc){ .name = "square", .in = { x }, .backward = square_back }) : NULL;
}

static own_model own_register(dt_ctx *ctx, spec s, dt_comm *tp) {
    own_model m = { .ctx = ctx, .layers = s.layers, .width = heads_of(s) * s.dim, .hidden = s.ffn, .tp = tp,
        .outside = s.sp ? DT_SHARD(1) : DT_REPLICATE };
    dt_param_desc plain = { .dtype = type_of(s) };
    for (int l = 0; l < m.layers; l++) {
        char scope[16];
        int  out = l + 1 < m.layers ? m.width : OUT;
        snprintf(scope, sizeof scope, "l.%d.", l);
        dt_scope(ctx, scope);
        dt_param_desc row = plain, column = plain, bias = plain;
        row.cuts[0].comm = column.cuts[0].comm = tp;
        column.cuts[0].dim = 1;
        if (s.sp) bias.marks[0] = (dt_mark){ tp, DT_PART };
        m.up[l] = dt_param_at(ctx, "up", DT_SHAPE(m.hidden, m.width), DT_NORMAL(0.8 / sqrt(m.width)), row);
        m.up_bias[l] = dt_param_at(ctx, "up_bias", DT_SHAPE(m.hidden), DT_UNIFORM(0.5), row);
        m.down[l] = dt_param_at(ctx, "down", DT_SHAPE(out, m.hidden), DT_NORMAL(0.8 / sqrt(m.hidden)), column);
        m.down_bias[l] = dt_param_at(ctx, "down_bias", DT_SHAPE(out), DT_UNIFORM(0.5), bias);
    }
    dt_scope(ctx, NULL);
    return m;
}

typedef struct own_layer { own_model *model; int l, recompute; } own_layer;

/* Column then row parallel. Overhang of a hidden size that tp does not divide is zero weights in and out. */
static dt_tensor *own_layer_forward(dt_tensor *x, void *user) {
    own_model *m = ((own_layer *)user)->model;
    int        l = ((own_layer *)user)->l;
    dt_tensor *h = square(dt_column_linear(x, m->up[l], m->up_bias[l], (dt_linear_desc){ 0 }, m->tp, m->outside));
    return dt_row_linear(h, m->down[l], m->down_bias[l], NULL, m->tp, m->outside);
}

/* The layer's user is a local variable, which is gone when a block runs again. */
static dt_tensor *own_layer_block(dt_tensor *x, own_layer layer, int recompute) {
    return dt_block_at(layer.model->ctx, own_layer_forward, x, &layer, (dt_block_desc){ recompute, sizeof layer });
}

/* All layers from l on, as one block. */
static dt_tensor *own_group_forward(dt_tensor *x, void *user) {
    own_layer at = *(own_layer *)user;
    for (; at.l < at.model->layers; at.l++) x = own_layer_block(x, at, at.recompute == REC_FULL_3);
    return x;
}

/* SELECTIVE: every other layer; FULL: each one; FULL_2: those after the first together; FULL_3: the same with each of
   them recomputed inside, too. */
static dt_tensor *own_forward(dt_tensor *x, own_model *own, int recompute) {
    for (int l = 0; l < own->layers; l++) {
        own_layer layer = { own, l, recompute };
        if (l == 1 && recompute >= REC_FULL_2)
            return dt_block_at(own->ctx, own_group_forward, x, &layer, (dt_block_desc){ 1, sizeof layer });
        x = own_layer_block(x, layer, recompute >= REC_FULL || (recompute == REC_SELECTIVE && l % 2 == 0));
    }
    return x;
}

/* A number in [-1, 1) as a function of a place: the data set. */
static double noise(int64_t a, int64_t b) {
    uint32_t out[4];
    dt__philox(77, (uint64_t)(a * 1000003 + b), out);
    return (double)out[0] / 2147483648.0 - 1;
}

// ==== One training run ==============================================================================================

enum { MAX_STEPS = 3, MAX_VALUES = 600000 };

/* Where the ranks of one run leave what is compared: full logical tensors, filled box by box. */
typedef struct result {
    spec    s;
    double  loss[MAX_STEPS], norm[MAX_STEPS];
    int     params;
    size_t  first[128], count[128];     /* places of the parameters in the arrays */
    double *value, *grad, *state[2];    /* (MAX_VALUES) parameters at the end; of step 1 gradients, optimizer state */
    int     states;
    size_t  optim_bytes, optim_formula; /* of rank 0 */
} result;

/* Copies this rank's box of a parameter into the full tensor. Of equal copies one rank leaves its own. */
static void leave(const dt_tensor *t, const void *local, dt_dtype dtype, double *full, const dt_mesh *mesh) {
    const dt_param_desc *d = &t->param->desc;
    int copy = d->cuts[0].comm ? d->marks[0].comm ? dt_comm_rank(d->marks[0].comm) : 0 : mesh->at.tp;
    if (mesh->replica != 0 || mesh->at.cp != 0 || copy != 0) return;
    dt__box_walk walk = dt__box_begin(t->param->full, t->param->box);
    while (dt__box_next(&walk))
        for (int64_t i = 0; i < walk.run; i++)
            full[walk.global + i] = dt__number(dtype, local, (size_t)(walk.local + i));
}

/* Gradients of a step whose backward is over, before its update. */
static void leave_grads(dt_ctx *ctx, dt_zero *zero, result *r, const dt_mesh *mesh) {
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        if (t->param->desc.frozen) continue;
        void *host = malloc(t->param->count * sizeof(double));
        if (dt_zero_grad(zero, t, host) == DT_OK) leave(t, host, dt_grad_dtype(t), r->grad + r->first[i], mesh);
        free(host);
    }
}

/* Parameters; at stage 3 all ranks of the data group read them together. */
static void leave_values(dt_ctx *ctx, result *r, const dt_mesh *mesh) {
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        void      *host = malloc(t->param->count * sizeof(double));
        if (dt_read(t, host) == DT_OK) leave(t, host, t->dtype, r->value + r->first[i], mesh);
        free(host);
    }
}

static void leave_states(dt_ctx *ctx, dt_zero *zero, result *r, const dt_mesh *mesh) {
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        if (t->param->desc.frozen) continue;
        for (int s = 0; s < r->states; s++) {
            void *host = malloc(t->param->count * sizeof(double));
            if (dt_zero_state(zero, s, t, host) == DT_OK)
                leave(t, host, dt_grad_dtype(t), r->state[s] + r->first[i], mesh);
            free(host);
        }
    }
}

/* A user's update that is none of dt's: AdaGrad. */
static dt_status adagrad(const dt_flat *f, void *user) {
    (void)user;
    for (size_t i = 0; i < f->count; i++) {
        if (f->tensor->dtype == DT_F64) {
            double g = ((const double *)f->grad)[i] * f->grad_scale, *h = (double *)f->state[0] + i;
            *h += g * g;
            ((double *)f->param)[i] -= f->lr * (g / (sqrt(*h) + 1e-3) + f->weight_decay * ((double *)f->param)[i]);
        } else {
            float g = ((const float *)f->grad)[i] * (float)f->grad_scale, *h = (float *)f->state[0] + i;
            *h += g * g;
            ((float *)f->param)[i] -= (float)f->lr * (g / (sqrtf(*h) + 1e-3f) +
                (float)f->weight_decay * ((float *)f->param)[i]);
        }
    }
    return DT_OK;
}

static char folder[64]; /* of offload */

/* AdamW's eps is 1e-5: the gradient of a key bias is zero but for rounding, and eps 1e-8 would blow 1e-18 up to 1e-10
   of a step, which says nothing of a layout. */
static dt_zero_desc optimizer_of(spec s, const dt_mesh *mesh) {
    static const int kinds[] = { DT_ADAMW, DT_ADAM, DT_SGD, DT_SGD, DT_OWN };
    const char *place = s.offload == OFF_NONE ? NULL : s.offload == OFF_STATE || s.offload == OFF_ALL ? "cpu" : folder;
    return (dt_zero_desc){ .stage = s.stage, .shard_group = s.shard, .keep_gathered = s.keep,
        .offload_optim = place, .offload_params = s.offload >= OFF_ALL ? place : NULL, .offload_chunk = 777,
        .no_overlap = s.no_overlap, .tree = s.tree, .poison = 1, .loss_scale = s.type == TYPE_F16 ? 1 : 0,
        .mesh = mesh, .optimizer = kinds[s.optimizer], .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-5,
        .momentum = s.optimizer == OPT_MOMENTUM ? 0.9 : 0, .weight_decay = 0.1, .clip = s.clip ? 0.3 : 0,
        .bucket_bytes = (size_t)s.bucket, .update = adagrad, .states = 1 };
}

typedef struct batch { /* of one replica and step: all micro-batches; (accum, micro, seq) of whole sequences */
    int32_t *ids, *labels;
    int32_t *index;             /* each token's place among those of the step over all ranks */
    int32_t *position, *document;
    int32_t *cut;               /* (micro, seq) for one of these as this rank of cp has it */
    double  *x, *y;             /* (accum, micro, seq, width), (accum, micro, seq, OUT) */
    double   labels_in_step;
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
    if (s.ignore && q == 0) b->labels[at * tokens_of(s)] = 0; /* not every label of a step is ignored */
}

static void fill_batch(batch *b, spec s, const dt_mesh *mesh, int step) {
    dt_order order = { 7, (int64_t)s.dp * s.ep * s.accum * s.micro, s.micro, mesh->replicas, 0 };
    for (int j = 0; j < s.accum; j++)
        for (int i = 0; i < s.micro; i++)
            fill_sequence(b, s, (int64_t)j * s.micro + i, dt_order_sequence(order, step, j, mesh->replica, i),
                ((int64_t)j * mesh->replicas + mesh->replica) * s.micro + i);
    double here = 0; /* this rank's part of the labels, as a program that cuts its data by cp has them */
    for (int64_t i = 0; i < s.accum * s.micro * tokens_of(s); i++) here += b->labels[i] >= 0;
    if (mesh->at.cp != 0) here = 0;
    dt_sum_doubles(mesh->data, &here, 1);
    b->labels_in_step = here < 1 ? 1 : here; /* a step without a label: the loss is zero */
}

static dt_tensor *real_input(dt_ctx *ctx, spec s, dt_shape shape, const double *host) {
    dt_tensor *t = dt_input(ctx, type_of(s), shape, NULL);
    for (size_t i = 0; t && i < (size_t)dt_count(shape); i++) dt__set_number(t->dtype, t->data, i, host[i]);
    return t;
}

/* One number a token of a micro-batch, as this rank of cp has them. */
static dt_tensor *cut_input(dt_ctx *ctx, spec s, const batch *b, dt_comm *cp, const int32_t *whole) {
    dt_context_cut(s.kind, s.micro, tokens_of(s), cp, whole, b->cut);
    return dt_input(ctx, DT_I32, DT_SHAPE(s.micro, tokens_of(s) / dt_comm_size(cp)), b->cut);
}

/* The same of all ranks, one after the other. */
static void cut_all(spec s, const int32_t *whole, int32_t *out) {
    int64_t T = tokens_of(s), own = T / s.cp;
    for (int64_t i = 0; i < s.micro * T; i++)
        out[i] = whole[i / T * T + dt_context_token(s.kind, T, s.cp, (int)(i % T / own), i % T % own)];
}

static dt_tensor *own_loss(dt_ctx *ctx, spec s, own_model *own, const batch *b, int64_t first, const dt_mesh *mesh) {
    int64_t    T = tokens_of(s) / s.cp;
    double    *x = (double *)malloc((size_t)(s.micro * T * (own->width + OUT)) * sizeof *x);
    double    *y = x + s.micro * T * own->width;
    for (int64_t i = 0; i < s.micro * T; i++) {
        int64_t token = dt_context_token(s.kind, tokens_of(s), s.cp, mesh->at.cp, i % T);
        int64_t from = (first + i / T) * tokens_of(s) + token;
        memcpy(x + i * own->width, b->x + from * own->width, (size_t)own->width * sizeof *x);
        memcpy(y + i * OUT, b->y + from * OUT, OUT * sizeof *y);
    }
    dt_tensor *in = real_input(ctx, s, DT_SHAPE(s.micro, T, own->width), x);
    dt_tensor *out = own_forward(dt_redistribute(in, own->tp, DT_REPLICATE, own->outside), own, s.recompute);
    out = dt_redistribute(out, own->tp, own->outside, DT_REPLICATE);
    dt_tensor *loss = dt_mse(out, real_input(ctx, s, DT_SHAPE(s.micro, T, OUT), y),
        (double)s.dp * s.ep * s.accum * s.micro * tokens_of(s) * OUT);
    free(x);
    return loss;
}

static dt_tensor *forward(dt_ctx *ctx, spec s, gpt *g, own_model *own, const batch *b, int step, int j,
    const dt_mesh *mesh) {
    int64_t first = (int64_t)j * s.micro, at = first * tokens_of(s);
    if (s.model == MODEL_OWN) return own_loss(ctx, s, own, b, first, mesh);
    gpt_tokens t = { .ids = cut_input(ctx, s, b, mesh->cp, b->ids + at), .step = (uint64_t)step };
    t.index = cut_input(ctx, s, b, mesh->cp, b->index + at);
    if (s.docs) {
        t.positions = cut_input(ctx, s, b, mesh->cp, b->position + at);
        t.documents = cut_input(ctx, s, b, mesh->cp, b->document + at);
        int32_t *all = (int32_t *)malloc((size_t)(2 * s.micro * tokens_of(s)) * sizeof *all);
        cut_all(s, b->position + at, all);
        cut_all(s, b->document + at, all + s.micro * tokens_of(s));
        t.context = dt_context_make(ctx, mesh->cp, (dt_context_desc){ .kind = s.kind, .batch = s.micro,
            .tokens = tokens_of(s), .positions = all, .documents = all + s.micro * tokens_of(s) });
        free(all);
    }
    return gpt_loss_at(g, t, cut_input(ctx, s, b, mesh->cp, b->labels + at), b->labels_in_step);
}

static void train_step(dt_ctx *ctx, result *r, gpt *g, own_model *own, const dt_mesh *mesh, dt_zero *zero, batch *b,
    int step) {
    spec   s = r->s;
    double loss = 0;
    fill_batch(b, s, mesh, step);
    for (int j = 0; j < s.accum; j++) {
        dt_micro(ctx, j, s.accum);
        dt_tensor *l = forward(ctx, s, g, own, b, step, j, mesh);
        if (s.split) {
            dt_backward_input(l);
            dt_backward_weight(l);
        } else {
            dt_backward(l);
        }
        loss += dt_item(l);
        dt_reset(ctx);
    }
    dt_sum_doubles(mesh->data, &loss, 1);
    if (step == 1) leave_grads(ctx, zero, r, mesh);
    dt_step_info info = dt_zero_step(zero, 0.01);
    if (dt_ctx_rank(ctx) != 0) return;
    r->loss[step - 1] = loss;
    r->norm[step - 1] = info.grad_norm;
}

static dt_status rank_main(dt_ctx *ctx, void *user) {
    result   *r = (result *)user;
    spec      s = r->s;
    dt_mesh   mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = s.dp, .tp = s.tp, .cp = s.cp, .ep = s.ep });
    gpt       g = { 0 };
    own_model own = { 0 };
    int        kv_heads = heads_of(s) / s.gqa;
    gpt_config config = { .layers = s.layers, .width = heads_of(s) * s.dim, .heads = heads_of(s), .kv_heads = kv_heads,
        .ffn = s.ffn, .seq = tokens_of(s), .vocab = s.vocab, .tied = s.tied, .dtype = type_of(s),
        .recompute = s.recompute < REC_FULL ? s.recompute : GPT_RECOMPUTE_FULL,
        .recompute_every = s.recompute < REC_FULL ? 0 : s.recompute - 1, .arch = s.llama ? GPT_LLAMA : GPT_GPT2,
        .dropout = s.dropout ? 0.3 : 0, .smoothing = s.smoothing ? 0.2 : 0, .tp = mesh.tp, .sp = s.sp, .cp = mesh.cp,
        .cp_kind = s.kind };
    if (s.model == MODEL_GPT) g = gpt_register(ctx, config);
    else own = own_register(ctx, s, mesh.tp);
    if (s.freeze && dt_param_count(ctx) > 2) { /* as dt_param_at(.frozen = 1), on a model that has no such option */
        dt_tensor *t = dt_param_get(ctx, 2);
        t->param->desc.frozen = 1;
        t->needs_grad = 0;
    }
    dt_zero *zero = dt_zero_make(ctx, optimizer_of(s, &mesh));
    if (!zero) return dt_error(ctx);
    if (dt_ctx_rank(ctx) == 0) {
        r->states = zero->states;
        r->params = dt_param_count(ctx);
        r->optim_bytes = dt_memory_used(ctx).live[DT_MEM_OPTIM];
        r->optim_formula = dt_zero_state_bytes(zero);
        for (int i = 0; i < r->params; i++) {
            r->count[i] = (size_t)dt_count(dt_param_get(ctx, i)->param->full);
            r->first[i] = i ? r->first[i - 1] + r->count[i - 1] : 0;
        }
    }
    dt_barrier(dt_world(ctx));
    size_t   n = (size_t)(s.accum * s.micro * tokens_of(s)), width = (size_t)(heads_of(s) * s.dim);
    int32_t *numbers = (int32_t *)calloc(6 * n, sizeof *numbers);
    batch    b = { numbers, numbers + n, numbers + 2 * n, numbers + 3 * n, numbers + 4 * n, numbers + 5 * n,
        (double *)calloc(n * width, 8), (double *)calloc(n * OUT, 8), 0 };
    for (int step = 1; step <= s.steps && dt_error(ctx) == DT_OK; step++) {
        train_step(ctx, r, &g, &own, &mesh, zero, &b, step);
        if (step == 1 && dt_error(ctx) == DT_OK) leave_states(ctx, zero, r, &mesh);
    }
    leave_values(ctx, r, &mesh);
    free(numbers);
    free(b.x);
    free(b.y);
    return dt_error(ctx);
}

static result result_make(spec s) {
    result r;
    memset(&r, 0, sizeof r);
    r.s = s;
    r.value = (double *)calloc(MAX_VALUES, 8);
    r.grad = (double *)calloc(MAX_VALUES, 8);
    for (int i = 0; i < 2; i++) r.state[i] = (double *)calloc(MAX_VALUES, 8);
    return r;
}

static void result_free(result *r) {
    free(r->value);
    free(r->grad);
    free(r->state[0]);
    free(r->state[1]);
}

// ==== Comparison ====================================================================================================

typedef struct verdict { int failed; char why[400]; } verdict;

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

/* 2-norms of a - b and of b, of one parameter. */
static void compare_array(verdict *v, const char *what, const result *a, const double *x, const double *y,
    const double *tol, const double *scale) {
    for (int i = 0; i < a->params; i++) {
        double difference = 0, size = 0;
        for (size_t k = a->first[i]; k < a->first[i] + a->count[i]; k++) {
            difference += (x[k] - y[k]) * (x[k] - y[k]);
            size += y[k] * y[k];
        }
        if (!(sqrt(difference) <= tol[i] * fmax(sqrt(size), scale[i])))
            blame(v, "%s of parameter %d: difference %.3e, size %.3e, scale %.3e", what, i, sqrt(difference),
                sqrt(size), scale[i]);
    }
}

/* The share of each tensor in a whole of that norm. */
static void shares(const result *r, double norm, double *scale) {
    size_t all = r->first[r->params - 1] + r->count[r->params - 1];
    for (int i = 0; i < r->params; i++) scale[i] = norm * sqrt((double)r->count[i] / (double)all);
}

/* What a layout may change, as a part of the value: 1e-12 in f64, 1e-5 in f32; in later steps of f32 ten times that,
   because differences grow. With bf16 and f16, gradients of parameters, their sums over micro-batches and ranks, and
   the state are f32, and a row's activations have the same bits in any batch: what comes from them is held to 1e-5 as
   well. Three things are rounded to 16 bits elsewhere than on one rank, each by at most u = 2^-8 or 2^-11: partial sums
   over tp or cp; the gradient of the positions, an activation that repeats over the batch, which is rounded once a
   micro-batch; and a parameter whose master lies so near the middle of two numbers that the last digit of f32 decides.
   Cancellation makes a bound from u alone useless, so these are held to 8 u, of a norm below 0.2 to 8 u of 0.2: such a
   gradient is what is left of terms that cancel. Random cases differed by 4.3 u at most, with tp 9. */
static double loose(spec s) { return s.type == TYPE_BF16 ? 8 / 256.0 : 8 / 2048.0; }

static int has_positions(spec s, int param) { return s.model == MODEL_GPT && param == 1; }

static void compare(verdict *v, const result *a, const result *b) {
    spec   s = a->s;
    double tol = s.type ? 1e-5 : 1e-12, scale[128], part[128] = { 0 }, clip = 0;
    int    sums_round = narrow(s) && s.tp * s.cp > 1;
    double least = narrow(s) ? 0.2 : s.type ? 1e-3 : 0; /* of a norm that is measured by itself */
    int    norm_rounds = narrow(s) && (s.tp * s.cp > 1 || s.model == MODEL_GPT);
    for (int i = 0; i < s.steps; i++) {
        double later = narrow(s) ? loose(s) : s.type ? 10 * tol : tol;
        if (!near_value(a->loss[i], b->loss[i], i > 0 ? later : sums_round ? loose(s) : tol, 0))
            blame(v, "loss of step %d: %.17g, one rank %.17g", i + 1, a->loss[i], b->loss[i]);
        if (!near_value(a->norm[i], b->norm[i], i > 0 ? later : norm_rounds ? loose(s) : tol, least))
            blame(v, "norm of step %d: %.17g, one rank %.17g", i + 1, a->norm[i], b->norm[i]);
    }
    if (narrow(s) && s.clip && b->norm[0] > 0) /* the norm scales every gradient */
        clip = fabs(a->norm[0] - b->norm[0]) / b->norm[0];
    for (int i = 0; i < a->params; i++)
        part[i] = 2 * clip + (sums_round || (narrow(s) && has_positions(s, i)) ? loose(s) : tol);
    shares(a, fmax(b->norm[0], least), scale);
    compare_array(v, "gradient of step 1", a, a->grad, b->grad, part, scale);
    double norm = fmax(b->norm[0], narrow(s) ? least : 0); /* as the optimizer sees it */
    if (s.clip && norm > 0.3) norm = 0.3;
    for (int k = 0; k < a->states; k++) {
        double order = k == 1 || s.optimizer == OPT_OWN ? norm * norm : norm; /* second moments are squares */
        shares(a, s.type ? fmax(order, 1e-4) : order, scale);
        compare_array(v, k ? "second state after step 1" : "first state after step 1", a, a->state[k], b->state[k],
            part, scale);
    }
    if (s.type) return; /* DESIGN.md holds only f64 parameters after steps to something: Adam turns noise into steps */
    for (int i = 0; i < a->params; i++) scale[i] = 0.01 * s.steps * sqrt((double)a->count[i]);
    compare_array(v, "values", a, a->value, b->value, part, scale);
}

static void compare_bits(verdict *v, const char *what, const result *a, const result *b) {
    size_t all = MAX_VALUES * sizeof(double);
    if (memcmp(a->loss, b->loss, sizeof a->loss) || memcmp(a->norm, b->norm, sizeof a->norm) ||
        memcmp(a->value, b->value, all) || memcmp(a->grad, b->grad, all) ||
        memcmp(a->state[0], b->state[0], all) || memcmp(a->state[1], b->state[1], all))
        blame(v, "%s: bits differ", what);
}

static void compare_stages(verdict *v, const result *a, const result *b) {
    char what[80];
    snprintf(what, sizeof what, "stages %d and %d", a->s.stage, b->s.stage);
    compare_bits(v, what, a, b);
}

/* Failures are reported by the case, once. */
static void silent(void *user, int level, int rank, const char *text) {
    (void)user;
    (void)level;
    (void)rank;
    (void)text;
}

static void run_ranks(verdict *v, const char *what, result *r) {
    dt_report report;
    dt_host   host = *dt_host_default();
    host.log = silent;
    dt_run_desc desc = { .ranks = ranks_of(r->s), .timeout_s = 60, .host = &host, .report = &report };
    dt_status   status = dt_run(desc, rank_main, r);
    if (status != DT_OK) blame(v, "%s: %s", what, report.text);
    if (r->optim_bytes != r->optim_formula)
        blame(v, "%s: %zu bytes of optimizer state, formula %zu", what, r->optim_bytes, r->optim_formula);
}

/* Another stage that owes the same bits, and the other way of overlapping and of keeping. With one micro-batch all
   stages sum alike, and in shard groups those that have these; with the tree any sum is the same. */
static spec partner_of(spec s) {
    spec p = s;
    int  turn = (s.seq + s.heads + s.layers + s.vocab + s.dp) % 3; /* to reach every pair of stages */
    if (s.tree || (s.accum == 1 && !s.shard)) p.stage = (s.stage + 1 + turn) % 4;
    else if (s.accum == 1) p.stage = 1 + (s.stage + turn % 2) % 3;
    else if (!s.shard || s.stage > 1) p.stage = s.stage ^ 1;
    if (p.stage == 0 || (s.tree && turn)) p.shard = 0;
    p.no_overlap = !s.no_overlap;
    p.keep = p.stage == 3 && !s.keep;
    p.offload = s.offload ? OFF_NONE : 1 + turn + (turn == 2 && p.stage == 3);
    if (p.offload >= OFF_ALL && p.stage < 3) p.offload = OFF_STATE_DISK;
    return p;
}

static verdict run_case(spec s) {
    verdict v = { 0 };
    spec    alone = alone_of(s), other = partner_of(s);
    result a = result_make(s), b = result_make(alone), c = result_make(other);
    run_ranks(&v, "layout", &a);
    run_ranks(&v, "one rank", &b);
    if (!v.failed) compare(&v, &a, &b);
    if (!v.failed) run_ranks(&v, "another stage", &c);
    if (!v.failed) compare_stages(&v, &a, &c);
    if (!v.failed && narrow(s)) { /* masters and rounding have no order of their own */
        result_free(&c);
        c = result_make(s);
        run_ranks(&v, "the same layout again", &c);
        if (!v.failed) compare_bits(&v, "the same layout again", &a, &c);
    }
    if (!v.failed && s.split) { /* the same again, and the two halves of the backward against the whole */
        result_free(&c);
        other = s;
        other.split = 0;
        c = result_make(other);
        run_ranks(&v, "whole backward", &c);
        if (!v.failed) compare_bits(&v, "input and weight gradients apart", &a, &c);
    }
    if (!v.failed && s.recompute) {
        result_free(&c);
        other = s;
        other.recompute = REC_NONE;
        c = result_make(other);
        run_ranks(&v, "without recompute", &c);
        if (!v.failed) compare_bits(&v, "with and without recompute", &a, &c);
    }
    result_free(&a);
    result_free(&b);
    result_free(&c);
    return v;
}

// ==== Generator and shrinker ========================================================================================

static uint32_t draw(uint64_t seed, uint64_t index) {
    uint32_t out[4];
    dt__philox(seed, index, out);
    return out[0];
}

/* The factorings of 1 to 12 ranks into dp x tp x cp, and the one of 16 that is to be there. */
typedef struct factoring { int dp, tp, cp; } factoring;
static factoring factorings[100];
static int       n_factorings;

static void list_factorings(void) {
    for (int n = 1; n <= 12; n++)
        for (int dp = 1; dp <= n; dp++)
            for (int tp = 1; tp <= n / dp; tp++)
                if (n % (dp * tp) == 0) factorings[n_factorings++] = (factoring){ dp, tp, n / (dp * tp) };
    factorings[n_factorings++] = (factoring){ 2, 2, 4 };
}

/* Scores of attention in one run, which take most of the time. */
static double work_of(spec s) {
    double tokens = tokens_of(s), sequences = s.dp * s.ep * s.accum * s.micro;
    return s.model == MODEL_GPT ? tokens * tokens * sequences * heads_of(s) * s.layers * s.steps : 0;
}

enum { FIRST = 3, MOST_WORK = 100000 }; /* the fields behind dp, tp, cp */

/* Random values on the number-th factoring. */
static spec random_spec(uint64_t seed, int number, int attempt) {
    spec      s;
    factoring f = factorings[number % n_factorings];
    for (int i = FIRST; i < FIELDS; i++) {
        uint32_t d = draw(seed + (uint64_t)attempt * 0x9E3779B97F4A7C15u, (uint64_t)number * FIELDS + (uint64_t)i);
        *value_of(&s, &fields[i]) = fields[i].values[d % (uint32_t)fields[i].n];
    }
    s.dp = f.dp;
    s.tp = f.tp;
    s.cp = f.cp;
    if (s.dp * s.tp * s.cp * s.ep > 16 || draw(seed, (uint64_t)(attempt + number * 7919)) % 2) s.ep = 1;
    if (number % n_factorings == n_factorings - 1) s.sp = 1;
    if (work_of(s) > MOST_WORK) s.steps = 1;
    if (work_of(s) > MOST_WORK) s.layers = 1;
    if (work_of(s) > MOST_WORK) s.accum = s.micro = 1;
    return s;
}

/* Of two fields behind dp, tp, cp the values that have met: seen[field][value][field][value]. sp, kind count only where
   there are ranks for them. */
static unsigned char seen[FIELDS][8][FIELDS][8];

static int index_of(spec s, int i) {
    int v = *value_of(&s, &fields[i]), k = 0;
    if (strcmp(fields[i].name, "sp") == 0 && s.tp == 1) return -1;
    if (strcmp(fields[i].name, "kind") == 0 && s.cp == 1) return -1;
    while (k < fields[i].n && fields[i].values[k] != v) k++;
    return k < fields[i].n ? k : -1;
}

/* How many pairs the case would be the first with; or marks them. */
static int new_pairs(spec s, int mark) {
    int count = 0;
    for (int i = FIRST; i < FIELDS; i++)
        for (int k = i + 1; k < FIELDS; k++) {
            int a = index_of(s, i), b = index_of(s, k);
            if (a < 0 || b < 0 || seen[i][a][k][b]) continue;
            count++;
            if (mark) seen[i][a][k][b] = 1;
        }
    return count;
}

/* Simplifies field by field as long as the case still fails. */
static spec shrink(spec s) {
    for (int changed = 1; changed;) {
        changed = 0;
        for (int i = 0; i < FIELDS; i++)
            for (int k = 0; k < fields[i].n && fields[i].values[k] != *value_of(&s, &fields[i]); k++) {
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

static int refused[RULES], done;

static int run_and_report(const char *program, uint64_t seed, int number, spec s) {
    verdict v = run_case(s);
    CHECK_MSG(!v.failed, "case %d of seed %llu: %s", number, (unsigned long long)seed, v.why);
    if (v.failed) report_failure(program, s, v);
    done++;
    return !v.failed;
}

/* Of `tries` draws on that factoring the one that brings most new pairs. 0: none can be. */
static int choose(uint64_t seed, int number, int type, int tries, spec *best) {
    int most = -1;
    for (int attempt = 0; attempt < 4000 && (tries > 0 || most < 0); attempt++) {
        spec s = random_spec(seed, number, attempt);
        s.type = type >= 0 ? type : 1 + (int)(draw(seed, (uint64_t)number + 99991) % 3);
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

/* Two values that have not met: a draw that has both, on any factoring. */
static int find_pair(uint64_t seed, int i, int a, int k, int b, spec *s) {
    for (int attempt = 0; attempt < 20000; attempt++) {
        *s = random_spec(seed + 17, attempt, attempt);
        s->type = TYPE_F64;
        *value_of(s, &fields[i]) = fields[i].values[a];
        *value_of(s, &fields[k]) = fields[k].values[b];
        if (!refusal(*s) && index_of(*s, i) == a && index_of(*s, k) == b) return 1;
    }
    return 0;
}

static int type_field(int i) { return strcmp(fields[i].name, "type") == 0; }

/* The pairs that are left. */
static void close_pairs(const char *program, uint64_t seed) {
    int pairs = 0, never = 0;
    for (int i = FIRST; i < FIELDS; i++)
        for (int k = i + 1; k < FIELDS; k++)
            for (int v = 0; v < fields[i].n * fields[k].n && !type_field(i) && !type_field(k); v++) {
                spec s;
                int  a = v / fields[k].n, b = v % fields[k].n;
                pairs++;
                if (seen[i][a][k][b]) continue;
                if (find_pair(seed, i, a, k, b, &s)) {
                    new_pairs(s, 1);
                    if (!run_and_report(program, seed, done, s)) return;
                } else {
                    never++;
                    printf("  no case can have %s=%d and %s=%d\n", fields[i].name, fields[i].values[a], fields[k].name,
                        fields[k].values[b]);
                }
            }
    printf("test_matrix: %d pairs of values, %d of them impossible\n", pairs, never);
}

static int one_case(const char *text) {
    spec s;
    if (!parse_spec(text, &s) || refusal(s)) {
        printf("no such case: %s\n", text);
        return 2;
    }
    verdict v = run_case(s);
    printf("%s\n", v.failed ? v.why : "agrees with one rank");
    return v.failed != 0;
}

int main(int argc, char **argv) {
    int      cases = 160, ok = 1;
    uint64_t seed = 1;
    list_factorings();
    snprintf(folder, sizeof folder, "/tmp/dt_test_matrix.XXXXXX");
    if (!CHECK(mkdtemp(folder) != NULL)) return check_done("test_matrix");
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--cases") == 0) cases = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--seed") == 0) seed = strtoull(argv[i + 1], NULL, 10);
        if (strcmp(argv[i], "--case") == 0) return one_case(argv[i + 1]);
    }
    for (int number = 0; number < cases && ok; number++) {
        spec s;
        int  found = choose(seed, number, TYPE_F64, 20, &s);
        CHECK_MSG(found, "no case on factoring %d", number % n_factorings);
        if (!found) continue;
        new_pairs(s, 1);
        ok = run_and_report(argv[0], seed, number, s);
    }
    if (ok && cases >= n_factorings) close_pairs(argv[0], seed);
    int in_f64 = done;
    for (int number = cases; number < cases + cases / 4 && ok; number++) {
        spec s;
        if (choose(seed, number, -1, 1, &s)) ok = run_and_report(argv[0], seed, number, s);
    }
    printf("test_matrix: %d cases in f64, %d in other types, %d factorings, seed %llu; draws refused:", in_f64,
        done - in_f64, n_factorings, (unsigned long long)seed);
    for (int r = 1; r < RULES; r++)
        if (refused[r]) printf(" %d %s%s", refused[r], rules[r], r + 1 < RULES ? "," : "");
    printf("\n");
    CHECK(rmdir(folder) == 0); /* nothing was left in it */
    return check_done("test_matrix");
}
