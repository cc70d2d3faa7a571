/* models_groups.h - models whose two networks have an optimizer each, beside those of models.h

       gan        generative adversarial network: a step trains discriminator, then generator
       agent      actor-critic on a grid world: the actor chooses moves, the critic predicts rewards

   A step has one or two parts (batch.part), each with its own backward and its own call of
   dt_zero_step_groups. The second network is parameter group 1.

   dp divides the sequences, tp the hidden units; pp gives each network of gan a stage.

   golden/make_models.py has the same models in PyTorch. */
#ifndef MODELS_GROUPS_H
#define MODELS_GROUPS_H

#include "tests/programs/models.h"

/* One network; a recomputed block reads it. */
typedef struct player {
    const setup *s;
    mlp mlp;
} player;

static void player_make(player *p, const setup *s, const char *part, int in, int hidden, int out) {
    p->s = s;
    p->mlp = mlp_make(s, -1, part, in, hidden, out);
}

static dt_tensor *player_block(dt_tensor *x, void *user) {
    player *p = (player *)user;
    return mlp_run(p->s, p->mlp, DT_ACT_TANH, x, NULL, DT_REPLICATE);
}

static dt_tensor *player_run(player *p, dt_tensor *x) {
    dt_block_desc block = { .recompute = p->s->recompute };
    return dt_block_at(p->s->ctx, player_block, x, p, block);
}

/* Columns [first, first + count) of the stored rows: (n,count) */
static dt_tensor *columns(const setup *s, batch b, int width, int first, int count) {
    dt_tensor *x = numbers(s, s->dtype, DT_SHAPE(b.n, width), b.x);
    return dt_slice(x, 1, first, count);
}

// ==== Generative adversarial network ============================================================

enum { N_NOISE = 3, N_WIDTH = 4, N_HIDDEN = 9, N_ROW = 2 * N_NOISE + N_WIDTH };

/* I. Goodfellow et al., arXiv:1406.2661, with the loss that does not saturate. A stored row is the
   noise of the discriminator's part, the noise of the generator's part, and a real sample.

       part 0   steps the discriminator   -ln D(real) - ln (1 - D(G(noise))), G without gradient
       part 1   steps the generator       -ln D(G(noise)); D's gradients are discarded */
typedef struct gan {
    player disc, gen;
} gan;

static void gan_make(void *model, const setup *s, int stage) {
    gan *m = (gan *)model;
    if (stage == 0) player_make(&m->gen, s, "gen.", N_NOISE, N_HIDDEN, N_WIDTH);
    if (stage == s->mesh.sizes.pp - 1) player_make(&m->disc, s, "disc.", N_WIDTH, N_HIDDEN, 1);
}

/* The loss of a discriminator that should call all samples x real (1) or false (0). */
static dt_tensor *judge(gan *m, const setup *s, dt_tensor *x, int real) {
    dt_tensor *logits = player_run(&m->disc, x);
    return dt_bce_with_logits(logits, dt_affine(dt_detach(logits), 0, real), s->rows);
}

static dt_tensor *gan_run(void *model, const setup *s, dt_tensor *x, int stage, batch b) {
    gan *m = (gan *)model;
    if (stage == 0) x = player_run(&m->gen, columns(s, b, N_ROW, b.part * N_NOISE, N_NOISE));
    if (stage < s->mesh.sizes.pp - 1) return x;
    if (b.part == 1) return judge(m, s, x, 1);
    dt_tensor *real = columns(s, b, N_ROW, 2 * N_NOISE, N_WIDTH);
    return dt_add(judge(m, s, real, 1), judge(m, s, dt_detach(x), 0));
}

// ==== Actor-critic ==============================================================================

enum { A_SIDE = 4, A_MOVES = 6, A_IN = 2, A_HIDDEN = 7, A_ACTIONS = 4, A_ROW = 1 + A_MOVES };
static const double a_discount = 0.9, a_entropy = 0.01;

/* Advantage actor-critic (V. Mnih et al., arXiv:1602.01783) on a grid of 4 x 4 cells. A walk makes
   6 moves: up, down, left or right; the last cell is worth 1 and sends the walker back to its first
   cell, each other move costs 0.1. A stored row is the first cell and a random number in [0, 1) for
   each move. With R the discounted rewards of the rest of the walk, at whose end the critic V
   predicts the remaining ones:

       actor   - sum of (R - V) ln p(move) - entropy bonus, V without gradient
       critic  sum of (R - V)^2 / 2

   agent: one loss and one step of both groups. agent_apart (setup.apart): part 0 is the actor's,
   part 1 the critic's, on the same walks. */
typedef struct walks { /* of a micro-batch, n walks */
    double cells[MOST_ROWS * A_MOVES][A_IN], returns[MOST_ROWS * A_MOVES];
    int32_t moves[MOST_ROWS * A_MOVES];
} walks;

typedef struct agent {
    player actor, critic;
    walks walks[MOST_MICROS];
} agent;

static void agent_make(void *model, const setup *s, int stage) {
    agent *m = (agent *)model;
    (void)stage; /* an agent has no pipeline: the actor's moves decide what it sees next */
    player_make(&m->actor, s, "actor.", A_IN, A_HIDDEN, A_ACTIONS);
    player_make(&m->critic, s, "critic.", A_IN, A_HIDDEN, 1);
}

/* Reads any floating-point tensor as doubles. */
static void read_doubles(dt_tensor *x, double *out) { dt_read(dt_cast(x, DT_F64), out); }

static void look(int cell, double *out) {
    out[0] = (double)(cell / A_SIDE) / (A_SIDE - 1);
    out[1] = (double)(cell % A_SIDE) / (A_SIDE - 1);
}

/* Makes move number `move` from *cell. Returns the reward. */
static double walk_on(int *cell, int move, int first) {
    static const int step[A_ACTIONS][2] = { { -1, 0 }, { 1, 0 }, { 0, -1 }, { 0, 1 } };
    int row = *cell / A_SIDE + step[move][0], column = *cell % A_SIDE + step[move][1];
    if (row >= 0 && row < A_SIDE && column >= 0 && column < A_SIDE) *cell = row * A_SIDE + column;
    if (*cell < A_SIDE * A_SIDE - 1) return -0.1;
    *cell = first;
    return 1;
}

/* Walks with the present policy, on the host; the networks run without a tape. */
static void agent_walk(agent *m, const setup *s, batch b, walks *w) {
    double at[MOST_ROWS][A_IN], p[MOST_ROWS * A_ACTIONS] = { 0 }, rewards[MOST_ROWS * A_MOVES];
    int cell[MOST_ROWS];
    dt_no_grad(s->ctx, 1);
    for (int i = 0; i < b.n; i++) look(cell[i] = (int)b.x[i * A_ROW], at[i]);
    for (int t = 0; t < A_MOVES; t++) {
        dt_tensor *x = numbers(s, s->dtype, DT_SHAPE(b.n, A_IN), at[0]);
        read_doubles(dt_softmax(player_run(&m->actor, x)), p);
        for (int i = 0; i < b.n; i++) {
            int k = i * A_MOVES + t, move = 0;
            double sum = p[i * A_ACTIONS];
            while (move < A_ACTIONS - 1 && sum <= b.x[i * A_ROW + 1 + t])
                sum += p[i * A_ACTIONS + ++move];
            memcpy(w->cells[k], at[i], sizeof at[i]);
            w->moves[k] = move;
            rewards[k] = walk_on(&cell[i], move, (int)b.x[i * A_ROW]);
            look(cell[i], at[i]);
        }
    }
    dt_tensor *end = numbers(s, s->dtype, DT_SHAPE(b.n, A_IN), at[0]);
    read_doubles(player_run(&m->critic, end), p);
    for (int i = 0; i < b.n; i++) {
        double rest = p[i];
        for (int k = (i + 1) * A_MOVES - 1; k >= i * A_MOVES; k--)
            w->returns[k] = rest = rewards[k] + a_discount * rest;
    }
    dt_no_grad(s->ctx, 0);
}

static dt_tensor *agent_run(void *model, const setup *s, dt_tensor *x, int stage, batch b) {
    agent *m = (agent *)model;
    walks *w = &m->walks[b.micro];
    int rows = b.n * A_MOVES;
    double denominator = (double)s->rows * A_MOVES;
    (void)stage;
    if (b.part == 0) agent_walk(m, s, b, w);
    x = numbers(s, s->dtype, DT_SHAPE(rows, A_IN), w->cells[0]);
    dt_tensor *returns = numbers(s, s->dtype, DT_SHAPE(rows), w->returns);
    dt_tensor *values = dt_reshape(player_run(&m->critic, x), DT_SHAPE(-1));
    dt_tensor *critic = dt_mse(values, returns, 2 * denominator);
    if (b.part == 1) return critic;
    dt_tensor *moves = dt_input(s->ctx, DT_I32, DT_SHAPE(rows), w->moves);
    dt_tensor *ln_p = dt_log_softmax(player_run(&m->actor, x));
    dt_tensor *chosen = dt_sum_over(dt_mul(ln_p, dt_one_hot(moves, A_ACTIONS, s->dtype)), -1);
    dt_tensor *gain = dt_sum_over(dt_mul(chosen, dt_sub(returns, dt_detach(values))), DT_ALL);
    dt_tensor *minus_entropy = dt_sum_over(dt_mul(dt_exp(ln_p), ln_p), DT_ALL);
    dt_tensor *bonus = dt_affine(minus_entropy, a_entropy, 0);
    dt_tensor *actor = dt_affine(dt_sub(bonus, gain), 1 / denominator, 0);
    actor = dt_cast(actor, DT_F64); /* the type of dt_mse */
    return s->apart ? actor : dt_add(actor, critic);
}

#endif /* MODELS_GROUPS_H */
