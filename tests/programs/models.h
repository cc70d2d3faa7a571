/* models.h - models that are not GPTs, as a reader of dt would write them

   They use only dt's public functions. Each model is a struct, a function that registers the
   parameters of this rank's pipeline stage, and a function that runs this stage:

       mixer      MLP-Mixer: MLPs over the tokens and over the channels of patches
       gru        recurrent network: the same weights at each time step; its hidden state may carry
                  on from step to step
       towers     two-tower retrieval: two embeddings and the similarity of each pair in the batch
       vit        transformer over patches: every token attends to every token
       bert       encoder that classifies texts of unequal length
       cnn        convolutions, group norm and pooling on images of digits

   What each axis divides:

       dp         sequences. The loss is divided by the number of the whole step
       tp         hidden units, heads, channels, rows of tables, classes. mlp_run is the pattern
       cp         tokens of mixer, vit and bert, up to the sum of the tokens. The sum has one row per
                  sequence. If every rank of cp computed the head for all rows, the head's gradient
                  would count once per rank, because dt adds gradients over cp. So sum_of_tokens
                  gives each rank of cp a part of the rows
       pp         layers, in equal ranges; a stage passes one tensor on

   golden/make_models.py has the same models in PyTorch. */
#ifndef MODELS_H
#define MODELS_H

#include "dt_zero.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What all models need to know of a run. */
typedef struct setup {
    dt_ctx *ctx;
    dt_mesh mesh;
    dt_dtype dtype;
    int sp;        /* vit, bert: 1: sequence parallelism over tp */
    int cp_kind;   /* DT_CP_* */
    int recompute; /* 1: each layer, tower or time step is recomputed in the backward */
    int rows;      /* sequences, or pairs, of a step over all ranks */
    int global;    /* towers: 1: the pairs of all ranks of dp are negatives */
    int mean;      /* bert: 1: classifies the mean of the real tokens; 0: the first token */
    int carry;     /* gru: 1: a step begins with the hidden state of the step before */
    int apart;     /* agent: 1: the losses of actor and critic have a backward each */
} setup;

/* Micro-batch number `micro` of one replica, from the stored arrays: n sequences or pairs. */
typedef struct batch {
    int n, micro, part; /* part: of the step, if the model's networks train one after the other */
    const double *x, *y;
} batch;

/* at most MOST_ROWS sequences or pairs in a micro-batch, MOST_TOKENS tokens in a sequence, and
   MOST_MICROS micro-batches */
enum { LAYERS = 2, MOST_ROWS = 64, MOST_TOKENS = 8, MOST_MICROS = 4 };

// ==== Pieces that several models use ============================================================

static dt_tensor *weight_at(const setup *s, const char *name, dt_shape full, dt_param_desc desc) {
    desc.dtype = s->dtype;
    return dt_param_at(s->ctx, name, full, DT_UNIFORM(0.5), desc);
}

static dt_tensor *weight(const setup *s, const char *name, dt_shape full) {
    return weight_at(s, name, full, (dt_param_desc){ 0 });
}

/* A parameter that is sharded over tp along `dim`. */
static dt_tensor *sharded(const setup *s, const char *name, dt_shape full, int dim) {
    return weight_at(s, name, full, (dt_param_desc){ .shards = { { s->mesh.tp, dim } } });
}

/* A parameter that every rank of tp has. Under sequence parallelism each rank uses it for its own
   tokens, so the gradients are partial sums. */
static dt_param_desc replicated(const setup *s) {
    dt_grad_placement partial = { s->sp ? s->mesh.tp : NULL, DT_GRAD_PARTIAL };
    return (dt_param_desc){ .dtype = s->dtype, .grad_placements = { partial } };
}

/* Parameters registered from here on are named "0.tokens.up", "norm.gain" and so on; layer -1: they
   belong to no layer. */
static void scope(const setup *s, int layer, const char *part) {
    char text[32];
    snprintf(text, sizeof text, "%d.%s", layer, part);
    dt_scope(s->ctx, layer < 0 ? part : text);
}

typedef struct norm {
    dt_tensor *gain, *bias;
} norm;

static norm norm_make(const setup *s, int layer, const char *part, int width) {
    norm p;
    scope(s, layer, part);
    p.gain = dt_param_at(s->ctx, "gain", DT_SHAPE(width), DT_ONES, replicated(s));
    p.bias = weight_at(s, "bias", DT_SHAPE(width), replicated(s));
    return p;
}

static dt_tensor *norm_run(norm p, dt_tensor *x) { return dt_layernorm(x, p.gain, p.bias, 0); }

/* Two linear layers whose hidden units are sharded over tp. */
typedef struct mlp {
    dt_tensor *up, *up_bias, *down, *down_bias;
} mlp;

static mlp mlp_make(const setup *s, int layer, const char *part, int width, int hidden, int out) {
    mlp p;
    scope(s, layer, part);
    p.up = sharded(s, "up", DT_SHAPE(hidden, width), 0);
    p.up_bias = sharded(s, "up_bias", DT_SHAPE(hidden), 0);
    p.down = sharded(s, "down", DT_SHAPE(out, hidden), 1);
    p.down_bias = weight_at(s, "down_bias", DT_SHAPE(out), replicated(s));
    return p;
}

static dt_tensor *mlp_run(const setup *s, mlp p, int activation, dt_tensor *x, dt_tensor *residual,
    dt_placement outside) {
    dt_linear_desc up = { .activation = activation };
    x = dt_column_linear(x, p.up, p.up_bias, up, s->mesh.tp, outside);
    return dt_row_linear(x, p.down, p.down_bias, residual, s->mesh.tp, outside);
}

static dt_tensor *numbers(const setup *s, dt_dtype dtype, dt_shape shape, const double *values) {
    return dt_cast(dt_input(s->ctx, DT_F64, shape, values), dtype);
}

/* This rank's tokens of x (n,tokens,width), as cp divides them: (n,tokens/c,width). */
static dt_tensor *token_input(const setup *s, batch b, int tokens, int width) {
    int c = dt_comm_size(s->mesh.cp), me = dt_comm_rank(s->mesh.cp), own = tokens / c;
    size_t row = (size_t)width * sizeof(double);
    double *mine = (double *)malloc((size_t)(b.n * own) * row);
    for (int i = 0; i < b.n * own; i++) {
        int64_t token = i / own * tokens + dt_cp_token(s->cp_kind, tokens, c, me, i % own);
        memcpy(mine + i * width, b.x + token * width, row);
    }
    dt_tensor *x = numbers(s, s->dtype, DT_SHAPE(b.n, own, width), mine);
    free(mine);
    return x;
}

/* Sum over all tokens of x (n,t,C), whose tokens may be divided over cp and, under sequence
   parallelism, over tp: (n/c,C), this rank of cp's share of the sequences. */
static dt_tensor *sum_of_tokens(const setup *s, dt_tensor *x) {
    x = dt_sum_over(x, 1);
    if (s->sp) x = dt_redistribute(x, s->mesh.tp, DT_PARTIAL, DT_REPLICATE);
    return dt_redistribute(x, s->mesh.cp, DT_PARTIAL, DT_SHARD(0));
}

static dt_tensor *mean_of_tokens(const setup *s, dt_tensor *x, int tokens) {
    return dt_affine(sum_of_tokens(s, x), 1.0 / tokens, 0);
}

/* The labels of the sequences that sum_of_tokens gives to this rank. */
static dt_tensor *label_input(const setup *s, batch b) {
    dt_tensor *all = numbers(s, DT_I32, DT_SHAPE(b.n), b.y);
    return dt_redistribute(all, s->mesh.cp, DT_REPLICATE, DT_SHARD(0));
}

/* The rows of `table` (T,C) at this rank's token positions, in their order: (n,T/c,C) */
static dt_tensor *positions(const setup *s, dt_tensor *table, int n, int tokens) {
    int c = dt_comm_size(s->mesh.cp), me = dt_comm_rank(s->mesh.cp), own = tokens / c;
    int32_t ids[MOST_ROWS * MOST_TOKENS];
    for (int i = 0; i < n * own; i++)
        ids[i] = (int32_t)dt_cp_token(s->cp_kind, tokens, c, me, i % own);
    return dt_embedding(table, dt_input(s->ctx, DT_I32, DT_SHAPE(n, own), ids));
}

/* The pipeline stage that has layer l. */
static int stage_of(const setup *s, int l) { return l * s->mesh.sizes.pp / LAYERS; }

// ==== MLP-Mixer =================================================================================

enum { M_PATCHES = 6, M_IN = 5, M_WIDTH = 8, M_TOKENS = 5, M_CHANNELS = 11, M_CLASSES = 5 };

/* I. Tolstikhin et al., "MLP-Mixer", arXiv:2105.01601. A layer mixes tokens, then channels:

       x (n,P,C) -> norm -> transpose (n,C,P) -> MLP over P -> transpose (n,P,C) -> + x
                 -> norm                      -> MLP over C                      -> + x

   Under cp a rank has P/c patches, but the MLP over P needs all of them. It treats each channel
   alone, so an all-to-all gives each rank all patches of C/c channels (as Ulysses does with heads),
   and a second one gives them back. */
typedef struct mixer_layer {
    const setup *s;
    norm norm_1, norm_2;
    mlp tokens, channels;
} mixer_layer;

typedef struct mixer {
    dt_tensor *patch, *patch_bias, *head, *head_bias;
    mixer_layer layer[LAYERS];
    norm norm;
} mixer;

static void mixer_make(void *model, const setup *s, int stage) {
    mixer *m = (mixer *)model;
    if (stage == 0) {
        m->patch = weight(s, "patch", DT_SHAPE(M_WIDTH, M_IN));
        m->patch_bias = weight(s, "patch_bias", DT_SHAPE(M_WIDTH));
    }
    for (int l = 0; l < LAYERS; l++) {
        mixer_layer *p = &m->layer[l];
        if (stage_of(s, l) != stage) continue;
        p->s = s;
        p->norm_1 = norm_make(s, l, "norm_1.", M_WIDTH);
        p->tokens = mlp_make(s, l, "tokens.", M_PATCHES, M_TOKENS, M_PATCHES);
        p->norm_2 = norm_make(s, l, "norm_2.", M_WIDTH);
        p->channels = mlp_make(s, l, "channels.", M_WIDTH, M_CHANNELS, M_WIDTH);
    }
    if (stage == s->mesh.sizes.pp - 1) {
        m->norm = norm_make(s, -1, "norm.", M_WIDTH);
        scope(s, -1, "");
        m->head = sharded(s, "head", DT_SHAPE(M_CLASSES, M_WIDTH), 0);
        m->head_bias = sharded(s, "head_bias", DT_SHAPE(M_CLASSES), 0);
    }
}

static dt_tensor *mixer_layer_run(dt_tensor *x, void *user) {
    mixer_layer *l = (mixer_layer *)user;
    dt_comm *cp = l->s->mesh.cp;
    dt_tensor *y = dt_redistribute(norm_run(l->norm_1, x), cp, DT_SHARD(1), DT_SHARD(2));
    y = dt_transpose(y, 1, 2);
    y = mlp_run(l->s, l->tokens, DT_ACT_GELU_ERF, y, NULL, DT_REPLICATE);
    y = dt_redistribute(dt_transpose(y, 1, 2), cp, DT_SHARD(2), DT_SHARD(1));
    x = dt_add(x, y);
    y = norm_run(l->norm_2, x);
    return mlp_run(l->s, l->channels, DT_ACT_GELU_ERF, y, x, DT_REPLICATE);
}

static dt_tensor *mixer_run(void *model, const setup *s, dt_tensor *x, int stage, batch b) {
    mixer *m = (mixer *)model;
    if (stage == 0) x = dt_linear(token_input(s, b, M_PATCHES, M_IN), m->patch, m->patch_bias);
    for (int l = 0; l < LAYERS; l++)
        if (stage_of(s, l) == stage)
            x = dt_block_at(s->ctx, mixer_layer_run, x, &m->layer[l],
                (dt_block_desc){ .recompute = s->recompute });
    if (stage < s->mesh.sizes.pp - 1) return x;
    x = mean_of_tokens(s, norm_run(m->norm, x), M_PATCHES);
    x = dt_column_linear(x, m->head, m->head_bias, (dt_linear_desc){ 0 }, s->mesh.tp, DT_REPLICATE);
    return dt_vocab_cross_entropy(
        x, label_input(s, b), s->rows, (dt_loss_desc){ .vocab = M_CLASSES }, s->mesh.tp);
}

// ==== Gated recurrent unit ======================================================================

enum { G_TIME = 5, G_IN = 3, G_HIDDEN = 6, G_OUT = 2 };

/* K. Cho et al., arXiv:1406.1078, in the form of cuDNN and PyTorch:

       r, z = sigmoid(x W_rz + h U_rz)     n = tanh(x W_n + r (h U_n))     h' = n + z (h - n)

   The products of all x with W are one product; the products with U are one per time step, because
   h is the result of the step before. tp divides the hidden units: each step computes this rank's
   units of h' from all units of h. The gradient of U is the sum over all time steps.

   Truncated backpropagation through time (setup.carry): a step's sequences go on where those of the
   step before ended. dt_keep carries the last h of each layer and micro-batch over dt_reset, without
   its history: the backward stops there. Each rank keeps the units of its shard, of the sequences of
   its replica, in the layers of its stage. */
typedef struct gru_layer {
    const setup *s;
    dt_tensor *x, *x_bias, *h, *h_bias; /* (3,H,..): r, z, n */
    dt_tensor *state[MOST_MICROS];      /* h (n,1,H/N) after the step before; NULL: zeros */
    int number;
} gru_layer;

typedef struct gru {
    gru_layer layer[LAYERS];
    dt_tensor *head, *head_bias;
} gru;

/* One time step; it is copied for a recomputed block. */
typedef struct gru_step {
    const gru_layer *layer;
    dt_tensor *x; /* (n,T,3,H): x W + bias */
    int t;
} gru_step;

static void gru_make(void *model, const setup *s, int stage) {
    gru *m = (gru *)model;
    /* a bias (3,H) has two dimensions, but must not decay */
    dt_param_desc bias = { .shards = { { s->mesh.tp, 1 } }, .no_decay = 1 };
    for (int l = 0; l < LAYERS; l++) {
        gru_layer *p = &m->layer[l];
        if (stage_of(s, l) != stage) continue;
        scope(s, l, "");
        p->s = s;
        p->number = l;
        p->x = sharded(s, "x", DT_SHAPE(3, G_HIDDEN, l ? G_HIDDEN : G_IN), 1);
        p->x_bias = weight_at(s, "x_bias", DT_SHAPE(3, G_HIDDEN), bias);
        p->h = sharded(s, "h", DT_SHAPE(3, G_HIDDEN, G_HIDDEN), 1);
        p->h_bias = weight_at(s, "h_bias", DT_SHAPE(3, G_HIDDEN), bias);
    }
    scope(s, -1, "");
    if (stage < s->mesh.sizes.pp - 1) return;
    m->head = sharded(s, "head", DT_SHAPE(G_OUT, G_HIDDEN), 1);
    m->head_bias = weight(s, "head_bias", DT_SHAPE(G_OUT));
}

/* h (n,1,H/N) -> h' */
static dt_tensor *gru_step_run(dt_tensor *h, void *user) {
    gru_step *p = (gru_step *)user;
    const gru_layer *l = p->layer;
    dt_tensor *x = dt_slice(p->x, 1, p->t, 1);
    dt_tensor *u = dt_linear(dt_tp_enter(h, l->s->mesh.tp, DT_SHARD(2)), l->h, l->h_bias);
    dt_tensor *rz = dt_sigmoid(dt_add(dt_slice(x, 2, 0, 2), dt_slice(u, 2, 0, 2)));
    dt_tensor *r = dt_slice(rz, 2, 0, 1), *z = dt_slice(rz, 2, 1, 1);
    dt_tensor *n = dt_tanh(dt_add(dt_slice(x, 2, 2, 1), dt_mul(r, dt_slice(u, 2, 2, 1))));
    if (!n) return NULL;
    dt_shape all = { 4, { n->shape.d[0], 1, 1, n->shape.d[3] } };
    h = dt_add(n, dt_mul(z, dt_sub(dt_reshape(h, all), n)));
    return dt_reshape(h, DT_SHAPE(all.d[0], 1, all.d[3]));
}

static dt_tensor *gru_layer_run(gru_layer *l, dt_tensor *x, dt_placement outside, batch b) {
    const double zeros[MOST_ROWS * G_HIDDEN] = { 0 };
    dt_tensor *h[G_TIME + 1], *w = l->x, **state = &l->state[b.micro];
    x = dt_column_linear(x, w, l->x_bias, (dt_linear_desc){ 0 }, l->s->mesh.tp, outside);
    h[0] = *state ? *state : numbers(l->s, l->s->dtype, DT_SHAPE(b.n, 1, w->shape.d[1]), zeros);
    for (int t = 0; t < G_TIME; t++) {
        gru_step step = { l, x, t };
        h[t + 1] = dt_block_at(l->s->ctx, gru_step_run, h[t], &step,
            (dt_block_desc){ .recompute = l->s->recompute, .user_bytes = sizeof step });
    }
    if (l->s->carry) {
        char name[32];
        snprintf(name, sizeof name, "%d.hidden.%d", l->number, b.micro);
        *state = dt_keep(h[G_TIME], name);
    }
    return dt_concat(h + 1, G_TIME, 1);
}

static dt_tensor *gru_run(void *model, const setup *s, dt_tensor *x, int stage, batch b) {
    gru *m = (gru *)model;
    if (stage == 0) x = numbers(s, s->dtype, DT_SHAPE(b.n, G_TIME, G_IN), b.x);
    for (int l = 0; l < LAYERS; l++)
        if (stage_of(s, l) == stage)
            x = gru_layer_run(&m->layer[l], x, l ? DT_SHARD(2) : DT_REPLICATE, b);
    if (stage < s->mesh.sizes.pp - 1) return x;
    x = dt_row_linear(x, m->head, m->head_bias, NULL, s->mesh.tp, DT_REPLICATE);
    dt_tensor *y = numbers(s, s->dtype, DT_SHAPE(b.n, G_TIME, G_OUT), b.y);
    return dt_mse(x, y, (double)s->rows * G_TIME * G_OUT);
}

// ==== Two-tower retrieval =======================================================================

enum {
    T_USERS = 11,
    T_WORDS = 13,
    T_BAG = 3,
    T_WIDTH = 6,
    T_HIDDEN = 9,
    T_OUT = 4,
    T_NEGATIVES = 4
};

/* A user and an item each become a vector of length 1. Pair i is (user i, item i); the softmax of
   user i's products with all items must choose item i, and the reverse (A. Radford et al., "CLIP",
   arXiv:2103.00020):

       scores = e^temperature user item^T     loss = mean of both directions' cross-entropy

   Negatives: by default a pair is compared with the T_NEGATIVES pairs of its own group, which are
   on one rank in one micro-batch, so that every layout trains the same. With setup.global the
   negatives are the pairs of all ranks of dp: each rank gathers the others' vectors, whose
   gradients are partial sums that the backward of the gather adds (SHARD -> COPY). That loss depends
   on the number of micro-batches, because a pair is not compared with those of another one. */
typedef struct tower {
    const setup *s;
    dt_tensor *table;
    mlp mlp;
} tower;

typedef struct towers {
    tower user, item;
    dt_tensor *temperature;
} towers;

static void towers_make(void *model, const setup *s, int stage) {
    towers *m = (towers *)model;
    m->user.s = m->item.s = s;
    if (stage == 0) {
        m->user.table = sharded(s, "user.table", DT_SHAPE(T_USERS, T_WIDTH), 0);
        m->item.table = sharded(s, "item.table", DT_SHAPE(T_WORDS, T_WIDTH), 0);
    }
    if (stage < s->mesh.sizes.pp - 1) return;
    m->user.mlp = mlp_make(s, -1, "user.", T_WIDTH, T_HIDDEN, T_OUT);
    m->item.mlp = mlp_make(s, -1, "item.", T_WIDTH, T_HIDDEN, T_OUT);
    scope(s, -1, "");
    m->temperature = weight(s, "temperature", DT_SHAPE(1));
}

/* The mean of the embeddings of `count` ids of each pair, from column `first` of x: (n,1,C) */
static dt_tensor *embed(const tower *t, batch b, int first, int count) {
    dt_tensor *ids = numbers(t->s, DT_I32, DT_SHAPE(b.n, 1 + T_BAG), b.x);
    ids = dt_slice(ids, 1, first, count);
    dt_tensor *x = dt_vocab_embedding(t->table, ids, t->s->mesh.tp, DT_REPLICATE);
    return dt_reshape(dt_mean_over(x, 1), DT_SHAPE(b.n, 1, T_WIDTH));
}

/* x (n,1,C) -> (n,D), rows of length 1: RMSNorm with the gain 1/sqrt(D) */
static dt_tensor *tower_run(dt_tensor *x, void *user) {
    tower *t = (tower *)user;
    const double gain[T_OUT] = { 0.5, 0.5, 0.5, 0.5 };
    x = mlp_run(t->s, t->mlp, DT_ACT_GELU_ERF, x, NULL, DT_REPLICATE);
    x = dt_rmsnorm(x, numbers(t->s, t->s->dtype, DT_SHAPE(T_OUT), gain), 0);
    return x ? dt_reshape(x, DT_SHAPE(x->shape.d[0], T_OUT)) : NULL;
}

/* The loss of choosing the right key for each query. `keys` are in groups of equal size, one for
   each group of queries; grouped linear is a product for each group. */
static dt_tensor *choose(towers *m, dt_tensor *queries, dt_tensor *keys) {
    const setup *s = m->user.s;
    int64_t n = queries ? queries->shape.d[0] : 0, rows[MOST_ROWS];
    if (s->global) keys = dt_redistribute(keys, s->mesh.dp, DT_SHARD(0), DT_COPY);
    int64_t size = s->global ? s->rows : T_NEGATIVES, groups = s->global ? 1 : n / T_NEGATIVES;
    for (int i = 0; i < groups; i++) rows[i] = n / groups;
    dt_tensor *w = dt_reshape(keys, DT_SHAPE(groups, size, T_OUT));
    dt_tensor *scores = dt_grouped_linear(queries, w, NULL, rows, (dt_linear_desc){ 0 });
    int32_t labels[MOST_ROWS];
    int first = s->global ? s->mesh.replica * (int)n : 0;
    for (int i = 0; i < n; i++) labels[i] = (first + i) % (int)size;
    return dt_cross_entropy(dt_mul(scores, dt_exp(dt_affine(m->temperature, 1, 2))),
        dt_input(s->ctx, DT_I32, DT_SHAPE(n), labels), 2.0 * s->rows);
}

static dt_tensor *towers_run(void *model, const setup *s, dt_tensor *x, int stage, batch b) {
    towers *m = (towers *)model;
    if (stage == 0) {
        dt_tensor *both[2] = { embed(&m->user, b, 0, 1), embed(&m->item, b, 1, T_BAG) };
        x = dt_concat(both, 2, 1);
    }
    if (stage < s->mesh.sizes.pp - 1) return x;
    dt_block_desc block = { .recompute = s->recompute };
    dt_tensor *user = dt_block_at(s->ctx, tower_run, dt_slice(x, 1, 0, 1), &m->user, block);
    dt_tensor *item = dt_block_at(s->ctx, tower_run, dt_slice(x, 1, 1, 1), &m->item, block);
    return dt_add(choose(m, user, item), choose(m, item, user));
}

// ==== Transformer over patches ==================================================================

enum {
    V_PATCHES = 8,
    V_IN = 5,
    V_WIDTH = 8,
    V_HEADS = 4,
    V_HEAD = 2,
    V_HIDDEN = 11,
    V_CLASSES = 3
};

/* A. Dosovitskiy et al., "ViT", arXiv:2010.11929, with the mean of the tokens in place of a class
   token, so that the number of tokens is that of the patches and cp divides it. Between the first
   layer and the mean of the tokens, sp divides this rank's tokens over tp once more. */
typedef struct vit_layer {
    norm norm_1, norm_2;
    dt_tensor *q, *k, *v, *out, *out_bias;
    mlp mlp;
} vit_layer;

typedef struct vit {
    dt_tensor *patch, *patch_bias, *position, *head, *head_bias;
    vit_layer layer[LAYERS];
    norm norm;
} vit;

/* One layer in one micro-batch; it is copied for a recomputed block. */
typedef struct vit_call {
    const setup *s;
    const vit_layer *layer;
    dt_cp *cp;
} vit_call;

static void vit_make(void *model, const setup *s, int stage) {
    vit *m = (vit *)model;
    if (stage == 0) {
        m->patch = weight(s, "patch", DT_SHAPE(V_WIDTH, V_IN));
        m->patch_bias = weight(s, "patch_bias", DT_SHAPE(V_WIDTH));
        m->position = weight(s, "position", DT_SHAPE(V_PATCHES, V_WIDTH));
    }
    for (int l = 0; l < LAYERS; l++) {
        vit_layer *p = &m->layer[l];
        if (stage_of(s, l) != stage) continue;
        p->norm_1 = norm_make(s, l, "norm_1.", V_WIDTH);
        scope(s, l, "");
        p->q = sharded(s, "q", DT_SHAPE(V_HEADS, V_HEAD, V_WIDTH), 0);
        p->k = sharded(s, "k", DT_SHAPE(V_HEADS, V_HEAD, V_WIDTH), 0);
        p->v = sharded(s, "v", DT_SHAPE(V_HEADS, V_HEAD, V_WIDTH), 0);
        p->out = sharded(s, "out", DT_SHAPE(V_WIDTH, V_HEADS * V_HEAD), 1);
        p->out_bias = weight_at(s, "out_bias", DT_SHAPE(V_WIDTH), replicated(s));
        p->norm_2 = norm_make(s, l, "norm_2.", V_WIDTH);
        p->mlp = mlp_make(s, l, "mlp.", V_WIDTH, V_HIDDEN, V_WIDTH);
    }
    if (stage < s->mesh.sizes.pp - 1) return;
    m->norm = norm_make(s, -1, "norm.", V_WIDTH);
    scope(s, -1, "");
    m->head = weight(s, "head", DT_SHAPE(V_CLASSES, V_WIDTH));
    m->head_bias = weight(s, "head_bias", DT_SHAPE(V_CLASSES));
}

static dt_tensor *vit_layer_run(dt_tensor *x, void *user) {
    vit_call *c = (vit_call *)user;
    const vit_layer *l = c->layer;
    dt_comm *tp = c->s->mesh.tp;
    dt_placement outside = c->s->sp ? DT_SHARD(1) : DT_REPLICATE;
    dt_tensor *y = dt_tp_enter(norm_run(l->norm_1, x), tp, outside);
    y = dt_cp_attention(
        dt_linear(y, l->q, NULL), dt_linear(y, l->k, NULL), dt_linear(y, l->v, NULL), c->cp);
    if (!y) return NULL;
    y = dt_reshape(y, DT_SHAPE(y->shape.d[0], y->shape.d[1], y->shape.d[2] * V_HEAD));
    x = dt_row_linear(y, l->out, l->out_bias, x, tp, outside);
    return mlp_run(c->s, l->mlp, DT_ACT_GELU, norm_run(l->norm_2, x), x, outside);
}

static dt_tensor *vit_run(void *model, const setup *s, dt_tensor *x, int stage, batch b) {
    vit *m = (vit *)model;
    dt_cp_desc full = { .kind = s->cp_kind, .batch = b.n, .tokens = V_PATCHES, .full = 1 };
    dt_cp *cp = dt_cp_make(s->ctx, s->mesh.cp, full);
    if (stage == 0) {
        x = dt_linear_at(token_input(s, b, V_PATCHES, V_IN), m->patch, m->patch_bias,
            (dt_linear_desc){ .residual = positions(s, m->position, b.n, V_PATCHES) });
        if (s->sp) x = dt_redistribute(x, s->mesh.tp, DT_REPLICATE, DT_SHARD(1));
    }
    for (int l = 0; l < LAYERS; l++) {
        vit_call call = { s, &m->layer[l], cp };
        if (stage_of(s, l) == stage)
            x = dt_block_at(s->ctx, vit_layer_run, x, &call,
                (dt_block_desc){ .recompute = s->recompute, .user_bytes = sizeof call });
    }
    if (stage < s->mesh.sizes.pp - 1) return x;
    x = mean_of_tokens(s, norm_run(m->norm, x), V_PATCHES);
    return dt_cross_entropy(dt_linear(x, m->head, m->head_bias), label_input(s, b), s->rows);
}

// ==== Encoder that classifies texts ===============================================================

enum {
    B_VOCAB = 13,
    B_TOKENS = 8,
    B_WIDTH = 8,
    B_HEADS = 4,
    B_HEAD = 2,
    B_HIDDEN = 11,
    B_CLASSES = 3,
    B_PAD = 0 /* the id that fills a short text up to B_TOKENS */
};

/* J. Devlin et al., "BERT", arXiv:1810.04805. Norms come after the residual sums:

       x = norm(word + position)      x = norm(x + attention(x))      x = norm(x + MLP(x))

   Texts have unequal lengths, and a query must not attend to padding. So the padding of a text is
   another document than its tokens. What padding computes does not matter, because the classifier
   reads a weighted sum of the tokens in which padding has the weight 0: the first token, whose id
   says "classify", or the mean of the real tokens. Under cp and sp each rank adds its own tokens. */
typedef struct bert_layer {
    dt_tensor *qkv[3], *qkv_bias[3], *out, *out_bias;
    norm norm_1, norm_2;
    mlp mlp;
} bert_layer;

typedef struct bert {
    dt_tensor *word, *position, *pooler, *pooler_bias, *head, *head_bias;
    norm norm;
    bert_layer layer[LAYERS];
} bert;

typedef struct bert_call {
    const setup *s;
    const bert_layer *layer;
    dt_cp *cp;
} bert_call;

static void bert_layer_make(bert_layer *p, const setup *s, int l) {
    static const char *const names[3][2] = { { "q", "q_bias" }, { "k", "k_bias" },
        { "v", "v_bias" } };
    /* a bias (H,D) has two dimensions, but must not decay */
    dt_param_desc bias = { .shards = { { s->mesh.tp, 0 } }, .no_decay = 1 };
    scope(s, l, "");
    for (int i = 0; i < 3; i++) {
        p->qkv[i] = sharded(s, names[i][0], DT_SHAPE(B_HEADS, B_HEAD, B_WIDTH), 0);
        p->qkv_bias[i] = weight_at(s, names[i][1], DT_SHAPE(B_HEADS, B_HEAD), bias);
    }
    p->out = sharded(s, "out", DT_SHAPE(B_WIDTH, B_HEADS * B_HEAD), 1);
    p->out_bias = weight_at(s, "out_bias", DT_SHAPE(B_WIDTH), replicated(s));
    p->norm_1 = norm_make(s, l, "norm_1.", B_WIDTH);
    p->mlp = mlp_make(s, l, "mlp.", B_WIDTH, B_HIDDEN, B_WIDTH);
    p->norm_2 = norm_make(s, l, "norm_2.", B_WIDTH);
}

static void bert_make(void *model, const setup *s, int stage) {
    bert *m = (bert *)model;
    if (stage == 0) {
        m->word = sharded(s, "word", DT_SHAPE(B_VOCAB, B_WIDTH), 0);
        m->position = weight(s, "position", DT_SHAPE(B_TOKENS, B_WIDTH));
        m->norm = norm_make(s, -1, "norm.", B_WIDTH);
    }
    for (int l = 0; l < LAYERS; l++)
        if (stage_of(s, l) == stage) bert_layer_make(&m->layer[l], s, l);
    if (stage < s->mesh.sizes.pp - 1) return;
    scope(s, -1, "");
    m->pooler = sharded(s, "pooler", DT_SHAPE(B_WIDTH, B_WIDTH), 0);
    m->pooler_bias = sharded(s, "pooler_bias", DT_SHAPE(B_WIDTH), 0);
    m->head = sharded(s, "head", DT_SHAPE(B_CLASSES, B_WIDTH), 1);
    m->head_bias = weight(s, "head_bias", DT_SHAPE(B_CLASSES));
}

/* Attention in which the padding of a text is document 1 and its tokens are document 0. dt_cp_make
   wants the documents of the tokens of all ranks of cp, in the order of the ranks. */
static dt_cp *bert_mask(const setup *s, batch b) {
    int c = dt_comm_size(s->mesh.cp), own = B_TOKENS / c;
    int32_t documents[MOST_ROWS * B_TOKENS];
    for (int i = 0; i < b.n * B_TOKENS; i++) {
        int at = i % B_TOKENS;
        int64_t token = dt_cp_token(s->cp_kind, B_TOKENS, c, at / own, at % own);
        documents[i] = b.x[i - at + token] == B_PAD;
    }
    dt_cp_desc desc = { .kind = s->cp_kind, .batch = b.n, .tokens = B_TOKENS, .full = 1 };
    desc.documents = documents;
    return dt_cp_make(s->ctx, s->mesh.cp, desc);
}

/* The weight of each of this rank's tokens in the sum that is classified: (n,t,1) */
static dt_tensor *bert_weights(const setup *s, batch b) {
    double all[MOST_ROWS * B_TOKENS];
    batch of_tokens = { b.n, b.micro, 0, all, NULL };
    for (int i = 0; i < b.n; i++) {
        int real = 0;
        for (int t = 0; t < B_TOKENS; t++) real += b.x[i * B_TOKENS + t] != B_PAD;
        for (int t = 0; t < B_TOKENS; t++)
            all[i * B_TOKENS + t] = s->mean ? (t < real ? 1.0 / real : 0) : t == 0;
    }
    dt_tensor *w = token_input(s, of_tokens, B_TOKENS, 1);
    return s->sp ? dt_redistribute(w, s->mesh.tp, DT_REPLICATE, DT_SHARD(1)) : w;
}

static dt_tensor *bert_layer_run(dt_tensor *x, void *user) {
    bert_call *c = (bert_call *)user;
    const bert_layer *l = c->layer;
    dt_comm *tp = c->s->mesh.tp;
    dt_placement outside = c->s->sp ? DT_SHARD(1) : DT_REPLICATE;
    dt_tensor *y = dt_tp_enter(x, tp, outside), *qkv[3];
    for (int i = 0; i < 3; i++) qkv[i] = dt_linear(y, l->qkv[i], l->qkv_bias[i]);
    y = dt_cp_attention(qkv[0], qkv[1], qkv[2], c->cp);
    if (!y) return NULL;
    y = dt_reshape(y, DT_SHAPE(y->shape.d[0], -1, y->shape.d[2] * B_HEAD));
    x = norm_run(l->norm_1, dt_row_linear(y, l->out, l->out_bias, x, tp, outside));
    return norm_run(l->norm_2, mlp_run(c->s, l->mlp, DT_ACT_GELU_ERF, x, x, outside));
}

static dt_tensor *bert_run(void *model, const setup *s, dt_tensor *x, int stage, batch b) {
    bert *m = (bert *)model;
    dt_cp *cp = bert_mask(s, b);
    if (stage == 0) {
        dt_tensor *ids = dt_cast(token_input(s, b, B_TOKENS, 1), DT_I32);
        ids = dt_reshape(ids, DT_SHAPE(b.n, -1));
        x = dt_vocab_embedding(m->word, ids, s->mesh.tp, DT_REPLICATE);
        x = dt_add(x, positions(s, m->position, b.n, B_TOKENS));
        if (s->sp) x = dt_redistribute(x, s->mesh.tp, DT_REPLICATE, DT_SHARD(1));
        x = norm_run(m->norm, x);
    }
    for (int l = 0; l < LAYERS; l++) {
        bert_call call = { s, &m->layer[l], cp };
        if (stage_of(s, l) == stage)
            x = dt_block_at(s->ctx, bert_layer_run, x, &call,
                (dt_block_desc){ .recompute = s->recompute, .user_bytes = sizeof call });
    }
    if (stage < s->mesh.sizes.pp - 1) return x;
    x = sum_of_tokens(s, dt_mul(x, bert_weights(s, b)));
    dt_linear_desc tanh = { .activation = DT_ACT_TANH };
    x = dt_column_linear(x, m->pooler, m->pooler_bias, tanh, s->mesh.tp, DT_REPLICATE);
    x = dt_row_linear(x, m->head, m->head_bias, NULL, s->mesh.tp, DT_REPLICATE);
    return dt_cross_entropy(x, label_input(s, b), s->rows);
}

// ==== Convolutions ==============================================================================

enum { C_SIZE = 8, C_GROUPS = 2, C_CLASSES = 10 };
static const int c_channels[LAYERS + 1] = { 1, 4, 8 };

/* A layer: convolution 3 x 3 -> group norm (arXiv:1803.08494) -> ReLU -> maximum of 2 x 2 pixels.

   tp divides the channels as it divides the hidden units of an MLP. The first convolution is
   column-parallel: a rank computes its output channels, and norm, ReLU and maximum treat channels or
   groups of them alone, so a rank must have whole groups. The second is row-parallel: it sums over
   this rank's input channels, and one all-reduce adds the sums of the ranks, before the bias. */
typedef struct cnn_layer {
    const setup *s;
    int number;
    dt_tensor *conv, *bias, *gain, *shift;
} cnn_layer;

typedef struct cnn {
    cnn_layer layer[LAYERS];
    dt_tensor *head, *head_bias;
} cnn;

static void cnn_make(void *model, const setup *s, int stage) {
    cnn *m = (cnn *)model;
    for (int l = 0; l < LAYERS; l++) {
        cnn_layer *p = &m->layer[l];
        if (stage_of(s, l) != stage) continue;
        int in = c_channels[l], out = c_channels[l + 1];
        dt_param_desc each = { .dtype = s->dtype };
        if (l == 0) each.shards[0] = (dt_shard_spec){ s->mesh.tp, 0 };
        p->s = s;
        p->number = l;
        scope(s, l, "");
        p->conv = sharded(s, "conv", DT_SHAPE(out, 3, 3, in), l ? 3 : 0);
        p->bias = weight_at(s, "conv_bias", DT_SHAPE(out), each);
        p->gain = dt_param_at(s->ctx, "norm.gain", DT_SHAPE(out), DT_ONES, each);
        p->shift = weight_at(s, "norm.bias", DT_SHAPE(out), each);
    }
    if (stage < s->mesh.sizes.pp - 1) return;
    scope(s, -1, "");
    m->head = sharded(s, "head", DT_SHAPE(C_CLASSES, c_channels[LAYERS] * C_SIZE * C_SIZE / 16), 0);
    m->head_bias = sharded(s, "head_bias", DT_SHAPE(C_CLASSES), 0);
}

/* x (n,S,S,C) -> (n,S/2,S/2,C') */
static dt_tensor *cnn_layer_run(dt_tensor *x, void *user) {
    cnn_layer *l = (cnn_layer *)user;
    dt_window_desc window = { .padding = { 1, 1 } }, two = { .kernel = { 2, 2 } };
    x = dt_conv2d(x, l->conv, l->number ? NULL : l->bias, window);
    if (l->number > 0)
        x = dt_add(dt_redistribute(x, l->s->mesh.tp, DT_PARTIAL, DT_REPLICATE), l->bias);
    return dt_max_pool2d(dt_relu(dt_group_norm(x, C_GROUPS, l->gain, l->shift, 0)), two);
}

static dt_tensor *cnn_run(void *model, const setup *s, dt_tensor *x, int stage, batch b) {
    cnn *m = (cnn *)model;
    if (stage == 0) x = numbers(s, s->dtype, DT_SHAPE(b.n, C_SIZE, C_SIZE, 1), b.x);
    for (int l = 0; l < LAYERS; l++)
        if (stage_of(s, l) == stage)
            x = dt_block_at(s->ctx, cnn_layer_run, x, &m->layer[l],
                (dt_block_desc){ .recompute = s->recompute });
    if (stage < s->mesh.sizes.pp - 1) return x;
    x = dt_reshape(x, DT_SHAPE(b.n, -1));
    x = dt_column_linear(x, m->head, m->head_bias, (dt_linear_desc){ 0 }, s->mesh.tp, DT_REPLICATE);
    return dt_vocab_cross_entropy(
        x, label_input(s, b), s->rows, (dt_loss_desc){ .vocab = C_CLASSES }, s->mesh.tp);
}

#endif /* MODELS_H */
