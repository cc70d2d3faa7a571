/* test_replicas.c - dt_zero.h, section 7: ranks that hold the same parameters drift apart

   A small model trains in several layouts, with dt_zero_desc.compare_every = 2. On one rank one
   thing goes wrong in step 3. The error must name the parameter, two ranks of which one is the bad
   one, and the step after which they differ; or, where the mistake cannot make copies differ, they
   must be equal at the end. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include <unistd.h>

enum { C = 8, ROWS = 4, STEPS = 6, PLANTED = 3 };

/* What goes wrong on rank `bad`. */
enum {
    NOTHING = 0,
    NO_MARK,    /* the norm's gain under sequence parallelism has no DT_GRAD_PARTIAL */
    LR,         /* another learning rate */
    LR_SCALE,   /* another lr_scale */
    WRITE,      /* dt_write of "w" */
    WRITE_ALL,  /* all ranks write the same other values */
    WRITE_BACK, /* one rank writes the values that it has read */
    WRITE_ICE,  /* dt_write of a frozen parameter */
    WRITE_SKIP, /* dt_write of "w" before a step that loss scaling skips */
    LOAD_ONE,   /* dt_weights_load of "w" on one rank */
    SEED,       /* the context has another seed */
    KEY,        /* another dropout key */
    DATA,       /* reads another rank's samples */
    DECAY,      /* another weight decay */
    OPTIMIZER,  /* another optimizer */
    STATES,     /* a custom optimizer with another number of states */
    TYPE,       /* a parameter of another type */
    FROZEN,     /* a parameter is frozen */
    EVERY,      /* another compare_every */
    UPDATE,     /* the custom update depends on the rank */
    FLIP_VALUE, /* a bit of "w" flips */
    FLIP_MASTER,
    FLIP_M,
    FLIP_V,
    FLIP_ICE,    /* a bit of a frozen parameter flips */
    FLIP_KV,     /* a bit of a head that two ranks of tp hold */
    FLIP_EXPERT, /* a bit of an expert */
    STEP,        /* a rank has counted a step more: it skipped a forward */
    SCALE        /* another loss scale */
};

typedef struct drift {
    const char *name;
    int kind, bad;
    dt_mesh_desc mesh;
    int stage, shard_group;
    dt_dtype dtype; /* 0 means DT_F32 */
    int sp;         /* ranks of tp have different rows, and gradients are partial over tp */
    /* parts of the text, separated by '|'; NULL: the copies stay equal */
    const char *words;
    int every; /* compare_every; 0: 2 */
} drift;

static void log_nothing(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_report run(int ranks, dt_status (*rank_main)(dt_ctx *ctx, void *user), const void *user) {
    dt_report report;
    dt_host host = *dt_host_default();
    host.log = log_nothing;
    dt_run((dt_run_desc){ .ranks = ranks, .timeout_s = 30, .host = &host, .report = &report },
        rank_main, (void *)(uintptr_t)user);
    return report;
}

/* p -= lr * g; on the bad rank of UPDATE twice that */
static dt_status own_update(const dt_update_args *a, void *user) {
    const drift *d = (const drift *)user;
    double lr = a->lr * a->grad_scale;
    if (d->kind == UPDATE && d->bad == dt_ctx_rank(a->ctx) && a->step == PLANTED) lr *= 2;
    for (size_t i = 0; i < a->count; i++)
        ((float *)a->param)[i] -= (float)lr * ((const float *)a->grad)[i];
    return DT_OK;
}

static dt_zero_desc zero_desc(const drift *d, int bad, const dt_mesh *mesh) {
    dt_zero_desc z = { .stage = d->stage,
        .shard_group = d->shard_group,
        .mesh = mesh,
        .weight_decay = d->kind == DECAY && bad ? 0.2 : 0.1,
        .compare_every = d->every ? d->every : 2 };
    if (d->kind == EVERY && bad) z.compare_every = 3;
    if (d->kind == OPTIMIZER && bad) z.optimizer = DT_ADAM;
    if (d->kind == SCALE || d->kind == WRITE_SKIP) z.loss_scale = 2;
    if (d->kind == UPDATE || d->kind == STATES) {
        z.optimizer = DT_OPTIMIZER_CUSTOM;
        z.update = own_update;
        z.user = (void *)(uintptr_t)d;
        z.states = d->kind == STATES && bad;
    }
    return z;
}

/* Registers the parameters: a norm's gain, a matrix, a frozen bias; over tp a copied head, over ep
   an expert, over pp a tied matrix. */
static void register_all(dt_ctx *ctx, const drift *d, int bad, const dt_mesh *m) {
    dt_dtype dtype = d->dtype ? d->dtype : DT_F32;
    dt_param_desc plain = { .dtype = dtype }, gain, w, ice = { .frozen = 1, .dtype = dtype };
    if (d->sp) plain.grad_placements[0] = (dt_grad_placement){ m->tp, DT_GRAD_PARTIAL };
    gain = w = plain;
    if (d->kind == NO_MARK) gain.grad_placements[0].comm = NULL;
    if (d->kind == LR_SCALE && bad) w.lr_scale = 2;
    if (d->kind == TYPE && bad) w.dtype = DT_F64;
    if (d->kind == FROZEN && bad) w.frozen = 1;
    if (m->coord.pp) dt_scope(ctx, "next."); /* parameters of the second pipeline stage */
    dt_param_at(ctx, "w", DT_SHAPE(C, C), DT_NORMAL(0.3), w);
    dt_param_at(ctx, "gain", DT_SHAPE(C), DT_ONES, gain);
    dt_param_at(ctx, "ice", DT_SHAPE(C, C), DT_NORMAL(0.3), ice);
    if (m->sizes.tp == 4) {
        dt_kv_groups kv = dt_kv_split(ctx, m->tp, 2);
        dt_param_desc head = { .shards = { { kv.shard_group, 0 } },
            .grad_placements = { { kv.replica_group, DT_GRAD_PARTIAL } } };
        dt_param_at(ctx, "head", DT_SHAPE(2 * C, C), DT_NORMAL(0.3), head);
    }
    if (m->sizes.ep > 1 || m->sizes.expert_tp) {
        dt_param_desc expert = { .shards = { { m->ep, 0 } } };
        if (m->sizes.expert_tp > 1) /* like an expert's last bias */
            expert.grad_placements[0] = (dt_grad_placement){ m->expert_tp, DT_GRAD_PARTIAL };
        dt_param_at(ctx, "expert", DT_SHAPE(m->sizes.ep * C, C), DT_NORMAL(0.3), expert);
    }
    if (m->sizes.pp > 1) {
        dt_param_desc tied = { .grad_placements = { { m->pp, DT_GRAD_PARTIAL } } };
        dt_scope(ctx, NULL);
        dt_param_at(ctx, "tied", DT_SHAPE(C, C), DT_NORMAL(0.3), tied);
    }
}

static dt_tensor *own_param(dt_ctx *ctx, const dt_mesh *m, const char *name) {
    char full[32];
    snprintf(full, sizeof full, "%s%s", m->coord.pp ? "next." : "", name);
    return dt_param_find(ctx, full);
}

/* The loss of this rank's rows. Ranks of tp have the same rows, or with sp different ones. */
static dt_tensor *loss_of(dt_ctx *ctx, const drift *d, const dt_mesh *m, int step, int bad) {
    float x[ROWS * C], y[ROWS * C];
    int32_t index[ROWS];
    int data = m->replica * m->sizes.cp + m->coord.cp;
    int seed = data * 5 + step * 11 + (d->sp ? m->coord.tp : 0);
    if (d->kind == DATA && bad && step == PLANTED) seed += 100;
    for (int i = 0; i < ROWS * C; i++) {
        x[i] = (float)((seed + i * 7) % 17 - 8) / 9;
        y[i] = (float)((seed + i * 3) % 5 - 2) / 3;
    }
    if (d->kind == WRITE_SKIP && step == PLANTED) x[0] = INFINITY;
    for (int i = 0; i < ROWS; i++) index[i] = i;
    uint64_t key = 77 + (uint64_t)step + (d->kind == KEY && bad && step == PLANTED);
    dt_dtype dtype = d->dtype ? d->dtype : DT_F32;
    dt_tensor *h = dt_cast(dt_input(ctx, DT_F32, DT_SHAPE(ROWS, C), x), dtype);
    h = dt_rmsnorm(h, own_param(ctx, m, "gain"), 1e-5);
    h = dt_dropout(h, 0.3, key, dt_input(ctx, DT_I32, DT_SHAPE(ROWS), index));
    h = dt_linear(h, own_param(ctx, m, "w"), NULL);
    h = dt_linear(h, own_param(ctx, m, "ice"), NULL);
    static const char *const more[] = { "head", "expert", "tied" };
    for (int i = 0; i < 3; i++)
        if (dt_param_find(ctx, more[i])) h = dt_linear(h, dt_param_find(ctx, more[i]), NULL);
    return dt_mse(h, dt_cast(dt_input(ctx, DT_F32, DT_SHAPE(ROWS, C), y), dtype), 100);
}

/* Flips bit `bit` of an element of `size` bytes. */
static void flip(void *array, size_t element, size_t size, int bit) {
    if (CHECK(array != NULL))
        ((unsigned char *)array)[element * size + (size_t)bit / 8] ^= (unsigned char)(1 << bit % 8);
}

/* At stage 3 dt_read and dt_write are collective. */
static void write_other(dt_tensor *t, int bad) {
    unsigned char host[C * C * sizeof(float)];
    dt_read(t, host);
    if (bad) flip(host, 5, dt_dtype_size(t->dtype), 3);
    dt_write(t, host);
}

/* Loads other values of a matrix from a file. */
static void load_other(dt_ctx *ctx, dt_tensor *t) {
    char path[] = "/tmp/dt_test_replicas.XXXXXX";
    float host[C * C] = { 0 };
    dt_weight_part part = { .name = "other" };
    int fd = mkstemp(path);
    if (!CHECK(fd >= 0)) return;
    close(fd);
    dt_weights *w = dt_weights_create(ctx, path, (dt_weights_desc){ 0 });
    dt_weights_write(
        w, dt_weights_declare(w, "other", DT_F32, DT_SHAPE(C, C)), 0, C * C, DT_F32, host);
    dt_weights_close(w);
    w = dt_weights_open(ctx, path);
    CHECK(dt_weights_load(w, t, 0, &part, 1) == DT_OK);
    dt_weights_close(w);
    unlink(path);
}

/* Before the forward of step PLANTED. */
static void plant(dt_ctx *ctx, const drift *d, dt_zero *zero, int bad) {
    const char *name = d->kind == FLIP_ICE || d->kind == WRITE_ICE ? "ice"
                       : d->kind == FLIP_KV                        ? "head"
                       : d->kind == FLIP_EXPERT                    ? "expert"
                       : zero->mesh.sizes.pp > 1                   ? "tied"
                                                                   : "w";
    dt_tensor *t = dt_param_find(ctx, name);
    const dt_param_info *p = t->param;
    dt__zero_bucket *z = &zero->buckets[p->bucket->index];
    if ((d->kind == WRITE || d->kind == WRITE_BACK) && (bad || d->stage == 3))
        write_other(t, bad && d->kind == WRITE);
    if (d->kind == WRITE_ALL) write_other(t, 1);
    if (!bad) return;
    if (d->kind == WRITE_ICE || d->kind == WRITE_SKIP) write_other(t, 1);
    if (d->kind == LOAD_ONE) load_other(ctx, t);
    /* an element that is in the rank's shard, which may hold padding only */
    size_t at = p->offset + 3 > z->offset ? p->offset + 3 : z->offset;
    size_t value_at = d->stage == 3 ? at - z->offset : p->offset + 3;
    if (d->kind == FLIP_VALUE || (d->kind >= FLIP_ICE && d->kind <= FLIP_EXPERT))
        flip(z->bucket.shard, value_at, dt_dtype_size(t->dtype), 3);
    if (d->kind == FLIP_MASTER) flip(z->master, at - z->offset, 4, 0);
    /* rounding removes the lowest bit of m, which shrinks by beta1, but not that of v */
    if (d->kind == FLIP_M) flip(z->state[0], at - z->offset, 4, 21);
    if (d->kind == FLIP_V) flip(z->state[1], at - z->offset, 4, 0);
    if (d->kind == STEP) zero->step++;
    if (d->kind == SCALE) zero->loss_scale *= 2;
}

static dt_status drift_main(dt_ctx *ctx, void *user) {
    const drift *d = (const drift *)user;
    int bad = dt_ctx_rank(ctx) == d->bad;
    dt_mesh mesh = dt_mesh_make(ctx, d->mesh);
    if (d->kind == SEED && bad) ctx->seed++;
    dt_stage(ctx, mesh.coord.pp);
    register_all(ctx, d, bad, &mesh);
    dt_zero *zero = dt_zero_make(ctx, zero_desc(d, bad, &mesh));
    for (int step = 1; step <= STEPS && dt_error(ctx) == DT_OK; step++) {
        if (step == PLANTED) plant(ctx, d, zero, bad);
        dt_tape(ctx, 0, mesh.coord.pp);
        dt_backward(loss_of(ctx, d, &mesh, step, bad));
        dt_zero_step(zero, d->kind == LR && bad && step == PLANTED ? 0.02 : 0.01);
        dt_reset(ctx);
    }
    dt_barrier(dt_world(ctx));
    if (dt_error(ctx) == DT_OK) CHECK(zero->agreed_step == (d->every < 0 ? 0 : STEPS));
    return dt_error(ctx);
}

#define TP2 \
    { .tp = 2 }
#define DP4 \
    { .dp = 4 }
#define MAKE "dt_zero_make: rank "
#define WRITTEN_AT "after step 2 and a later write (|agreed after step 2.|Call dt_write with|"
static const drift drifts[] = {
    /* no false alarm */
    { "nothing, dp 4", NOTHING, -1, DP4, 0, 0, DT_F32, 0, NULL, 0 },
    { "nothing, HSDP", NOTHING, -1, DP4, 3, 2, DT_BF16, 0, NULL, 0 },
    { "nothing, sp", NOTHING, -1, { .dp = 2, .tp = 2 }, 1, 0, DT_BF16, 1, NULL, 0 },
    { "nothing, kv", NOTHING, -1, { .tp = 4 }, 0, 0, DT_F32, 1, NULL, 0 },
    { "nothing, experts", NOTHING, -1, { .dp = 2, .ep = 2 }, 2, 0, DT_F32, 0, NULL, 0 },
    { "nothing, folded", NOTHING, -1, { .dp = 2, .tp = 2, .ep = 2, .expert_tp = 2 }, 1, 0, DT_F32,
        0, NULL, 0 },
    { "nothing, tied", NOTHING, -1, { .dp = 2, .pp = 2 }, 1, 0, DT_F32, 0, NULL, 0 },
    /* Adam's first step is about lr * sign(g), so that values may be equal and moments are not */
    { "no mark", NO_MARK, 1, TP2, 0, 0, DT_F32, 1,
        "gain: ranks 0 and 1 of 'tp' hold different|after step 1 |agreed after step 0|PARTIAL", 0 },
    { "no mark, ZeRO-3", NO_MARK, 1, { .dp = 2, .tp = 2 }, 3, 0, DT_F32, 1,
        "gain: ranks |of 'tp' hold different|after step 1 |agreed after step 0", 0 },
    { "lr", LR, 2, DP4, 0, 0, DT_F32, 0,
        "step 3: rank 2 passes learning rate 0.02, rank 0 passes 0.01; pass", 0 },
    { "lr, ZeRO-3", LR, 1, DP4, 3, 0, DT_F32, 0, "step 3: rank 1 passes learning rate 0.02", 0 },
    { "lr, pp", LR, 1, { .pp = 2 }, 0, 0, DT_F32, 0, "step 3: rank 1 passes learning rate", 0 },
    { "lr of rank 0", LR, 0, TP2, 0, 0, DT_F32, 0,
        "step 3: rank 1 passes learning rate 0.01, rank 0 passes 0.02", 0 },
    { "lr_scale", LR_SCALE, 1, DP4, 0, 0, DT_F32, 0, MAKE "1 has w|lr_scale 2", 0 },
    { "write", WRITE, 3, DP4, 0, 0, DT_F32, 0,
        WRITTEN_AT "w: ranks 0 and 3 of 'dp' hold different values|(1 of 4", 0 },
    { "write, rank 0", WRITE, 0, DP4, 0, 0, DT_F32, 0,
        WRITTEN_AT "w: ranks 0 and 1 of 'dp' hold different values|(3 of 4", 0 },
    /* both replicas of tp differ, and either reports first */
    { "write, tp", WRITE, 1, { .dp = 2, .tp = 2 }, 2, 0, DT_F32, 0, WRITTEN_AT "w: ranks ", 0 },
    { "write, HSDP", WRITE, 2, DP4, 3, 2, DT_F32, 0, WRITTEN_AT "w: ranks 0 and 2 of 'replicas'",
        0 },
    { "write, tied", WRITE, 1, { .pp = 2 }, 0, 0, DT_F32, 0,
        WRITTEN_AT "tied: ranks 0 and 1 of 'pp' hold different values", 0 },
    /* the update is followed by an all-gather, after which no comparison finds the write */
    { "write, ZeRO-1", WRITE, 1, DP4, 1, 0, DT_F32, 0, WRITTEN_AT "w: ranks 0 and 1 of 'dp'", 0 },
    { "write, ZeRO-2", WRITE, 3, DP4, 2, 0, DT_F32, 0, WRITTEN_AT "w: ranks 0 and 3 of 'dp'", 0 },
    { "write, ZeRO-2, rare", WRITE, 3, DP4, 2, 0, DT_F32, 0,
        "w: ranks 0 and 3 of 'dp'|after step 2 and a later write|agreed after step 1", 100 },
    /* no other rank holds this shard */
    { "write, ZeRO-3", WRITE, 0, DP4, 3, 0, DT_F32, 0, NULL, 0 },
    /* the update overwrites the parameter with the rounded master weight */
    { "write, bf16", WRITE, 1, DP4, 0, 0, DT_BF16, 0, WRITTEN_AT "w: ranks 0 and 1 of 'dp'", 0 },
    { "write on all", WRITE_ALL, -1, DP4, 0, 0, DT_F32, 0, NULL, 0 },
    { "write on all, ZeRO-1", WRITE_ALL, -1, DP4, 1, 0, DT_F32, 0, NULL, 0 },
    { "write on all, ZeRO-2", WRITE_ALL, -1, { .dp = 2, .tp = 2 }, 2, 0, DT_BF16, 0, NULL, 0 },
    { "write on all, HSDP", WRITE_ALL, -1, DP4, 3, 2, DT_F32, 0, NULL, 0 },
    { "write on all, tied", WRITE_ALL, -1, { .dp = 2, .pp = 2 }, 1, 0, DT_F32, 0, NULL, 0 },
    { "load on one, ZeRO-1", LOAD_ONE, 1, DP4, 1, 0, DT_F32, 0,
        WRITTEN_AT "w: ranks 0 and 1 of 'dp'", 0 },
    { "write, skipped step", WRITE_SKIP, 2, DP4, 1, 0, DT_F32, 0,
        "w: ranks 0 and 2 of 'dp'|after step 2 and a later write|agreed after step 1.", 100 },
    /* not compared before the update of step 3, which does not overwrite it */
    { "write, frozen", WRITE_ICE, 1, DP4, 1, 0, DT_F32, 0,
        "ice: ranks 0 and 1 of 'dp'|after step 4 (|agreed after step 2.", 0 },
    { "write back, ZeRO-1", WRITE_BACK, 1, DP4, 1, 0, DT_F32, 0, NULL, 0 },
    { "seed", SEED, 2, DP4, 0, 0, DT_F32, 0,
        "rank 2 starts from values of w that differ from rank 0's: pass", 0 },
    { "seed, tp", SEED, 1, TP2, 0, 0, DT_F32, 0,
        "rank 1 starts from values of w that differ from rank 0's", 0 },
    { "dropout key, tp", KEY, 1, TP2, 0, 0, DT_F32, 0,
        "w: ranks 0 and 1 of 'tp'|after step 4|agreed after step 2|dropout keys", 0 },
    /* ranks of dp have other keys in any case: their gradients are summed */
    { "dropout key, dp", KEY, 1, DP4, 0, 0, DT_F32, 0, NULL, 0 },
    { "data, tp", DATA, 1, TP2, 0, 0, DT_F32, 0,
        "w: ranks 0 and 1 of 'tp'|after step 4|agreed after step 2|other data", 0 },
    /* the sum of the gradients is wrong, but is the same on all ranks */
    { "data, cp", DATA, 1, { .cp = 2 }, 0, 0, DT_F32, 0, NULL, 0 },
    { "weight decay", DECAY, 1, DP4, 0, 0, DT_F32, 0, MAKE "1 has optimizer|decay 0.2", 0 },
    { "optimizer", OPTIMIZER, 1, DP4, 1, 0, DT_F32, 0, MAKE "1 has optimizer 1 |optimizer 0 ", 0 },
    { "states", STATES, 1, DP4, 1, 0, DT_F32, 0, MAKE "1 has optimizer 4", 0 },
    { "type", TYPE, 1, DP4, 1, 0, DT_F32, 0, MAKE "1 has w f64|has w f32", 0 },
    { "frozen", FROZEN, 1, TP2, 1, 0, DT_F32, 0, MAKE "1 has w|frozen", 0 },
    { "compare_every", EVERY, 1, DP4, 1, 0, DT_F32, 0, MAKE "1 has optimizer|others #", 0 },
    { "update", UPDATE, 3, DP4, 0, 0, DT_F32, 0,
        "w: ranks 0 and 3 of 'dp'|values after step 4|agreed after step 2|compare_every = 1", 0 },
    { "update, ZeRO-1", UPDATE, 0, DP4, 1, 0, DT_F32, 0, NULL, 0 }, /* one rank updates a shard */
    { "flip, values", FLIP_VALUE, 1, DP4, 0, 0, DT_F32, 0,
        "w: ranks 0 and 1 of 'dp'|different values after step 4|memory error", 0 },
    /* every rank receives all values from the rank that updates them */
    { "flip, values, ZeRO-1", FLIP_VALUE, 1, DP4, 1, 0, DT_F32, 0, NULL, 0 },
    { "flip, values, ZeRO-2", FLIP_VALUE, 1, DP4, 2, 0, DT_F32, 0, NULL, 0 },
    { "flip, values, ZeRO-3", FLIP_VALUE, 0, DP4, 3, 0, DT_F32, 0, NULL, 0 },
    { "flip, values, HSDP", FLIP_VALUE, 2, DP4, 3, 2, DT_F32, 0,
        "w: ranks 0 and 2 of 'replicas'|different values after step 4", 0 },
    { "flip, frozen", FLIP_ICE, 1, DP4, 1, 0, DT_F32, 0,
        "ice: ranks 0 and 1 of 'dp'|different values after step 4", 0 },
    { "flip, master", FLIP_MASTER, 1, DP4, 0, 0, DT_BF16, 0,
        "w: ranks 0 and 1 of 'dp'|master weights after step 4", 0 },
    { "flip, master, HSDP", FLIP_MASTER, 2, DP4, 2, 2, DT_BF16, 0,
        "w: ranks 0 and 2 of 'replicas'|master weights after step 4", 0 },
    { "flip, master, ZeRO-1", FLIP_MASTER, 0, DP4, 1, 0, DT_BF16, 0, NULL, 0 },
    { "flip, m", FLIP_M, 2, DP4, 0, 0, DT_BF16, 0,
        "w: ranks 0 and 2 of 'dp'|after step 4|agreed after step 2", 0 },
    { "flip, m, HSDP", FLIP_M, 2, DP4, 1, 2, DT_BF16, 0,
        "w: ranks 0 and 2 of |after step 4|agreed after step 2", 0 },
    /* one rank has this moment and sends the values that it computes to all others */
    { "flip, m, ZeRO-1", FLIP_M, 0, DP4, 1, 0, DT_F32, 0, NULL, 0 },
    { "flip, m, ZeRO-3", FLIP_M, 0, DP4, 3, 0, DT_F32, 0, NULL, 0 },
    { "flip, m, ZeRO-1, tp", FLIP_M, 1, { .dp = 2, .tp = 2 }, 1, 0, DT_F32, 0,
        "w: ranks |of 'tp'|after step 4|agreed after step 2", 0 },
    { "flip, m, tied", FLIP_M, 1, { .pp = 2 }, 1, 0, DT_F32, 0,
        "tied: ranks 0 and 1 of 'pp'|after step 4|agreed after step 2", 0 },
    { "flip, v", FLIP_V, 3, DP4, 0, 0, DT_BF16, 0,
        "w: ranks 0 and 3 of 'dp'|second moments after step 4|agreed after step 2", 0 },
    { "flip, v, HSDP", FLIP_V, 2, DP4, 3, 2, DT_BF16, 0,
        "w: ranks 0 and 2 of 'replicas'|second moments after step 4", 0 },
    { "flip, copied head", FLIP_KV, 1, { .tp = 4 }, 0, 0, DT_F32, 1,
        "head: ranks 0 and 1 of|different values after step 4|agreed after step 2", 0 },
    { "flip, expert", FLIP_EXPERT, 2, { .dp = 2, .ep = 2 }, 0, 0, DT_F32, 0,
        "expert: ranks 0 and 2 of|different values after step 4|agreed after step 2", 0 },
    { "flip, folded expert", FLIP_EXPERT, 2, { .dp = 4, .ep = 2, .expert_tp = 1 }, 0, 0, DT_F32, 0,
        "expert: ranks 0 and 2 of 'experts'|different values after step 4", 0 },
    { "flip, copy of a folded expert", FLIP_EXPERT, 1, { .dp = 2, .expert_tp = 2 }, 0, 0, DT_F32, 0,
        "expert: ranks 0 and 1 of 'expert-tp'|different values after step 4", 0 },
    { "step", STEP, 1, DP4, 1, 0, DT_F32, 0, "rank 1 takes step 4, rank 0 takes step 3; check", 0 },
    { "loss scale", SCALE, 1, DP4, 1, 0, DT_F32, 0,
        "step 3: rank 1 has loss scale 4, rank 0 has 2; check", 0 },
    { "off", WRITE, 3, DP4, 0, 0, DT_F32, 0, NULL, -1 },
    { "off, ZeRO-1", WRITE, 3, DP4, 1, 0, DT_F32, 0, NULL, -1 },
};

static void test_drift(void) {
    for (size_t i = 0; i < sizeof drifts / sizeof *drifts; i++) {
        drift d = drifts[i];
        int ranks = (d.mesh.dp ? d.mesh.dp : 1) * (d.mesh.tp ? d.mesh.tp : 1) *
                    (d.mesh.cp ? d.mesh.cp : 1) * (d.mesh.pp ? d.mesh.pp : 1) *
                    (d.mesh.ep && !d.mesh.expert_tp ? d.mesh.ep : 1);
        dt_report report = run(ranks, drift_main, &d);
        CHECK_MSG(report.status == (d.words ? DT_ERR_COMM : DT_OK), "%s: %s %s", d.name,
            dt_status_name(report.status), report.text);
        char words[300];
        snprintf(words, sizeof words, "%s", d.words ? d.words : "");
        for (char *w = strtok(words, "|"); w; w = strtok(NULL, "|"))
            CHECK_MSG(strstr(report.text, w), "%s: '%s' is not in '%s'", d.name, w, report.text);
    }
}

// ==== Checkpoints and exports ===================================================================

/* A checkpoint or an export of copies that differ is refused before any file is written; with
   compare_every < 0 it is not. */
typedef struct saved {
    const char *folder;
    int background, every, stage, tp;
    int exports, bad;
} saved;

static dt_status save_main(dt_ctx *ctx, void *user) {
    const saved *s = (const saved *)user;
    drift d = { .kind = WRITE, .mesh = { .tp = s->tp }, .stage = s->stage, .every = s->every };
    int bad = dt_ctx_rank(ctx) == s->bad;
    char path[200];
    dt_mesh mesh = dt_mesh_make(ctx, d.mesh);
    register_all(ctx, &d, bad, &mesh);
    dt_zero *zero = dt_zero_make(ctx, zero_desc(&d, bad, &mesh));
    dt_checkpoint *c = dt_checkpoint_open(
        zero, (dt_checkpoint_desc){ .dir = s->folder, .background = s->background });
    for (int step = 1; step <= 2; step++) {
        dt_backward(loss_of(ctx, &d, &mesh, step, bad));
        dt_zero_step(zero, 0.01);
        dt_reset(ctx);
    }
    CHECK(s->every < 0 || zero->agreed_step == 1); /* compared after the first step, not after 2 */
    plant(ctx, &d, zero, bad);
    snprintf(path, sizeof path, "%s/export", s->folder);
    if (s->exports)
        dt_zero_export(zero, path, (dt_export_desc){ 0 });
    else
        dt_checkpoint_save(c);
    /* both ranks say so */
    if (dt_error(ctx) == DT_ERR_COMM) CHECK(strstr(dt_error_text(ctx), " and a later write ("));
    dt_checkpoint_close(c);
    return dt_error(ctx);
}

static void test_saved(void) {
    for (int code = 0; code < 24; code++) {
        char folder[] = "/tmp/dt_test_replicas.XXXXXX", path[3][100], command[100];
        saved s = { .folder = folder,
            .tp = 1 + code % 2,
            .background = code / 2 % 2,
            .exports = code / 4 % 2,
            .stage = code / 8 % 3,
            .bad = code / 2 % 2,
            .every = code % 3 ? 50 : -1 };
        if (!CHECK(mkdtemp(folder) != NULL)) return;
        dt_report report = run(2, save_main, &s);
        int refused = s.every > 0, written = 0;
        CHECK_MSG(
            report.status == (refused ? DT_ERR_COMM : DT_OK), "save %d: %s", code, report.text);
        const char *words[] = { s.exports ? "dt_zero_export: w: " : "dt_checkpoint_save: w: ",
            "ranks 0 and 1 of", s.tp == 2 ? "'tp'" : "'dp'", "after step 2 and a later write (",
            "agreed after step 1" };
        for (int i = 0; i < 5 && refused; i++)
            CHECK_MSG(strstr(report.text, words[i]), "save %d: '%s' is not in '%s'", code, words[i],
                report.text);
        snprintf(path[0], sizeof path[0], "%s/step-2", folder);
        snprintf(path[1], sizeof path[1], "%s/export", folder);
        snprintf(path[2], sizeof path[2], "%s/export.tmp", folder);
        for (int i = 0; i < 3; i++) written += access(path[i], F_OK) == 0;
        CHECK_MSG(written == !refused, "save %d: %d files", code, written);
        snprintf(command, sizeof command, "rm -rf %s", folder);
        CHECK(system(command) == 0);
    }
}

/* After a load the first step is compared, also if the job has taken a later step before. */
static dt_status loaded_main(dt_ctx *ctx, void *user) {
    drift d = { .mesh = { .dp = 2 }, .every = 50 };
    dt_mesh mesh = dt_mesh_make(ctx, d.mesh);
    register_all(ctx, &d, 0, &mesh);
    dt_zero *zero = dt_zero_make(ctx, zero_desc(&d, 0, &mesh));
    dt_checkpoint *c = dt_checkpoint_open(zero, (dt_checkpoint_desc){ .dir = (const char *)user });
    for (int step = 1; step <= 3; step++) {
        if (step == 3) CHECK(dt_checkpoint_load(c, NULL) == 2);
        dt_backward(loss_of(ctx, &d, &mesh, step, 0));
        dt_zero_step(zero, 0.01);
        dt_reset(ctx);
        if (step == 2) dt_checkpoint_save(c);
    }
    CHECK(zero->agreed_step == 3);
    dt_checkpoint_close(c);
    return dt_error(ctx);
}

static void test_loaded(void) {
    char folder[] = "/tmp/dt_test_replicas.XXXXXX", command[100];
    if (!CHECK(mkdtemp(folder) != NULL)) return;
    dt_report report = run(2, loaded_main, folder);
    CHECK_MSG(report.status == DT_OK, "%s", report.text);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK(system(command) == 0);
}

/* One rank loads w transposed. What the ranks held before the load is not the reason. */
static void transposed_map(const dt_tensor *t, dt_weight_map *map, void *user) {
    if (!*(int *)user || strcmp(t->name, "w") != 0) return;
    map->n = 1;
    map->part[0].transposed = 1;
    map->shape = t->shape;
    snprintf(map->name[0], sizeof map->name[0], "w");
}

static dt_status other_load_main(dt_ctx *ctx, void *user) {
    drift d = { .mesh = { .dp = 2 }, .every = 50 };
    int transposed = 0;
    dt_mesh mesh = dt_mesh_make(ctx, d.mesh);
    register_all(ctx, &d, 0, &mesh);
    dt_zero *zero = dt_zero_make(ctx, zero_desc(&d, 0, &mesh));
    dt_checkpoint *c = dt_checkpoint_open(
        zero, (dt_checkpoint_desc){
                  .dir = (const char *)user, .map_weight = transposed_map, .user = &transposed });
    dt_backward(loss_of(ctx, &d, &mesh, 1, 0));
    dt_zero_step(zero, 0.01);
    dt_reset(ctx);
    dt_checkpoint_save(c);
    transposed = dt_ctx_rank(ctx) == 1;
    if (transposed) write_other(dt_param_find(ctx, "w"), 1);
    dt_checkpoint_load(c, NULL);
    dt_checkpoint_close(c);
    return dt_error(ctx);
}

static void test_other_load(void) {
    char folder[] = "/tmp/dt_test_replicas.XXXXXX", command[100];
    if (!CHECK(mkdtemp(folder) != NULL)) return;
    dt_report report = run(2, other_load_main, folder);
    CHECK_MSG(report.status == DT_ERR_COMM &&
                  strstr(report.text, "dt_checkpoint_load: rank 1 starts from values of w") &&
                  !strstr(report.text, "later write") && !strstr(report.text, "agreed"),
        "%s", report.text);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK(system(command) == 0);
}

/* By default ranks are compared after the first step and then every 100 steps. */
static dt_status default_main(dt_ctx *ctx, void *user) {
    drift d = { .kind = FLIP_VALUE, .mesh = { .dp = 2 } };
    int bad = dt_ctx_rank(ctx) == 1;
    dt_mesh mesh = dt_mesh_make(ctx, d.mesh);
    register_all(ctx, &d, bad, &mesh);
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh });
    for (int step = 1; step <= 300 && dt_error(ctx) == DT_OK; step++) {
        if (step == 150) plant(ctx, &d, zero, bad);
        dt_backward(loss_of(ctx, &d, &mesh, step, bad));
        dt_zero_step(zero, 1e-3);
        dt_reset(ctx);
        int64_t agreed = step < 100 ? 1 : step < 200 ? 100 : 200;
        if (dt_error(ctx) == DT_OK) CHECK(zero->agreed_step == agreed);
    }
    (void)user;
    return dt_error(ctx);
}

static void test_default(void) {
    dt_report report = run(2, default_main, NULL);
    CHECK_MSG(report.status == DT_ERR_COMM && strstr(report.text, "after step 200 ") &&
                  strstr(report.text, "agreed after step 100."),
        "%s", report.text);
}

/* The context's kernels compute the digests, so that a device copies only DT_DIGEST_PARTS numbers
   for each array to the host, not the array. */
static size_t digested, moved;

static dt_status counted_digest(const dt_digest_args *a, void *stream) {
    __atomic_fetch_add(&digested, a->count * dt_dtype_size(a->dtype), __ATOMIC_RELAXED);
    return dt_kernels_cpu()->digest(a, stream);
}

static dt_status counted_move(void *to, const void *from, size_t bytes, void *stream) {
    __atomic_fetch_add(&moved, bytes, __ATOMIC_RELAXED);
    return dt_kernels_cpu()->move(to, from, bytes, stream);
}

static dt_status device_main(dt_ctx *ctx, void *user) {
    enum { N = 1100003 }; /* enough for all parts */
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .dp = 2 });
    dt_param_at(ctx, "w", DT_SHAPE(N), DT_NORMAL(0.3), (dt_param_desc){ .dtype = DT_F32 });
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .mesh = &mesh });
    dt_barrier(mesh.world);
    if (dt_ctx_rank(ctx) == 0) digested = moved = 0;
    dt_barrier(mesh.world);
    dt__compare_replicas(zero, "test");
    dt_barrier(mesh.world);
    size_t arrays = 2 * 3; /* of 2 ranks: values and two moments */
    CHECK(digested == arrays * N * 4 && moved == arrays * DT_DIGEST_PARTS * 8);
    (void)user;
    return dt_error(ctx);
}

static void test_device(void) {
    dt_kernels kernels = *dt_kernels_cpu();
    dt_report report;
    kernels.digest = counted_digest;
    kernels.move = counted_move;
    dt_run((dt_run_desc){ .ranks = 2, .timeout_s = 30, .kernels = &kernels, .report = &report },
        device_main, NULL);
    CHECK_MSG(report.status == DT_OK, "%s", report.text);
}

int main(void) {
    test_device();
    test_drift();
    test_saved();
    test_loaded();
    test_other_load();
    test_default();
    return check_done("test_replicas");
}
