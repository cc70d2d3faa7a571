/* dt_zero.h - v0.1.0 - training state: optimizers, gradient reduction, ZeRO, clipping - public domain or MIT, see the
   end of the file

   The top of four single-header libraries; include this one and you have all. It owns what a training step needs beside
   the model: gradients summed over every axis that saw a part of the data, optimizer state whole or cut over the ranks
   (ZeRO stage 1), the update, the learning rate.

   DOES NOT: know the model, scale the loss (dt_tokens gives the denominator), reset the tape. Not in this version, and
   refused with DT_ERR_UNSUPPORTED: ZeRO stages 2 and 3, offload, loss scaling, checkpoints.

   QUICK EXAMPLE (data parallel over 4 ranks, optimizer state cut over them)

       #define DT_IMPLEMENTATION
       #include "dt_zero.h"
       #include <stdio.h>

       enum { B = 8, IN = 4, STEPS = 50 };

       static dt_status train(dt_ctx *ctx, void *user) {                       // every rank runs this
           dt_comm   *world = dt_world(ctx);
           dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(1, IN), DT_NORMAL(0.1));
           dt_tensor *b = dt_param(ctx, "b", DT_SHAPE(1), DT_ZEROS);
           dt_zero   *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = 1 });
           for (int step = 1; step <= STEPS; step++) {
               float x[B * IN], y[B];
               int seed = step * 31 + dt_comm_rank(world) * 13;
               for (int i = 0; i < B * IN; i++) x[i] = (float)((seed + i * 7) % 17) / 17;
               for (int i = 0; i < B; i++) y[i] = x[i * IN] - 2 * x[i * IN + 1];
               dt_tensor *out = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(B, IN), x), w, b);
               dt_tensor *loss = dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(B, 1), y), B * dt_comm_size(world));
               dt_backward(loss);
               double sum = dt_item(loss);
               dt_sum_doubles(world, &sum, 1);
               dt_zero_step(opt, 0.05);
               dt_reset(ctx);
               if (dt_comm_rank(world) == 0 && step % 10 == 0) printf("step %d loss %.4f\n", step, sum);
           }
           (void)user;
           return dt_error(ctx);
       }

       int main(void) { return dt_run((dt_run_desc){ .ranks = 4 }, train, NULL); }

   BUILD
       cc -O3 train.c -lm -lpthread                 C11 or C++17; gcc, clang
       nvcc -O3 train.c dt_kernels.cu -lpthread     CUDA

   OPTIONS (define before including)
       DT_IMPLEMENTATION   in exactly one file: the code, not only the declarations
       DT_STATIC           everything static                                                    (everywhere)

   CONTENTS
     1. Learning rate
     2. Training state
     3. Implementation: learning rate
     4. Units, groups and runs
     5. The reducer
     6. The norm
     7. The update
     8. Making, stepping, freeing
     9. 1-bit Adam

   CONTRACT
     Memory     The state belongs to the context and ends with it. Gradients (class grads) are made by the first
                backward, parameters and optimizer state by dt_zero_make. Every unit is padded to N * 1,024 elements, N
                the number of ranks that share its data: f32 with Adam is 4 + 4 + 8 bytes an element at stage 0
                and 4 + 4 + 8/N at stage 1. bf16 and f16 have f32 gradients, and state with an f32 master of the
                parameter in it, which is what the update changes: 2 + 4 + 12 and 2 + 4 + 12/N. 1-bit Adam has errors
                beside, 4 + 4/N.
     Types      f32, f64, bf16 and f16. The f32 masters of bf16 and f16 are taken from the values that the first step
                finds; a value written later lasts until the next step, which rounds the master over it. Nothing is
                scaled in this version: what leaves f16's range on the way back (above 65,504) fails the step as not
                finite, and what is below 6e-8 is lost. bf16 has the range of f32.
     Errors     As in dt_tensor.h: sticky. A gradient norm that is not finite fails every rank (DT_ERR_NUMERIC) and
                changes no parameter. Ranks that hold copies must register the same parameters in the same order with
                the same flags and the same optimizer (compared by dt_zero_make) and start from the same values
                (compared by the first dt_zero_step, by digests that count as no traffic): else every rank fails
                (DT_ERR_COMM).
     Threads    As in dt_comm.h.
     Order      Gradients are summed over ranks in rank order, the norm over runs of 1,024 elements in ascending order:
                stages 0 and 1 give the same bits.
     Tags       [local], [collective: group]. */

#ifndef DT_ZERO_H
#define DT_ZERO_H

#include "dt_parallel.h"

#if DT_VERSION != 100
#error "dt_zero.h 0.1.0 needs the other dt headers of version 0.1.0: copy all headers from one release"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ==== 1. Learning rate ==============================================================================================

enum { DT_LR_COSINE = 0, DT_LR_LINEAR, DT_LR_CONSTANT };
typedef struct dt_lr_desc {
    double  peak;
    int     kind;       /* DT_LR_* after the warmup */
    int64_t warmup;     /* steps; step n <= warmup has peak * n / warmup */
    int64_t steps;      /* the step at which min_ratio * peak is reached; stays there */
    double  min_ratio;
} dt_lr_desc;

/* [local] The learning rate of step n, from 1. arXiv:1608.03983 for the cosine. */
DT_API double dt_lr(dt_lr_desc desc, int64_t step);

// ==== 2. Training state =============================================================================================

/* A run of consecutive elements of one parameter with its gradient and state: what an update works on. */
typedef struct dt_flat {
    dt_ctx          *ctx;
    const dt_tensor *tensor;        /* the parameter */
    size_t           first, count;  /* elements of the tensor's local part, row-major */
    void            *param;         /* (count) of dt_grad_dtype(tensor), as all below: of bf16 and f16 the master */
    const void      *grad;
    void            *state[2];      /* zero before the first step; NULL beyond dt_zero_desc.states */
    double           lr;            /* with the parameter's lr_scale */
    double           grad_scale;    /* the gradient to use is grad * grad_scale: clipping */
    double           weight_decay;  /* 0 for parameters that do not decay */
    int64_t          step;          /* from 1 */
} dt_flat;

/* Your own update, called for each run that this rank owns. Element i may depend on element i only. */
typedef dt_status (*dt_update_fn)(const dt_flat *run, void *user);

enum { DT_ADAMW = 0, DT_ADAM, DT_SGD, DT_ONEBIT_ADAM, DT_OWN };
typedef struct dt_zero_desc {
    int            stage;           /* 0: everything whole; 1: optimizer state cut over the data group */
    const dt_mesh *mesh;            /* NULL -> all ranks of the world are data parallel. Copied. */
    int            optimizer;       /* DT_ADAMW (arXiv:1711.05101), DT_ADAM (L2 in the gradient), DT_SGD,
                                       DT_ONEBIT_ADAM (arXiv:2102.02888; section 9), DT_OWN */
    double         beta1, beta2;    /* 0 -> 0.9, 0.999 */
    double         eps;             /* 0 -> 1e-8 */
    double         momentum;        /* SGD; 0: none, and no state */
    int            freeze_steps;    /* 1-bit Adam: steps of Adam before its second moment is frozen, 1 or more */
    double         weight_decay;    /* of parameters with 2 dimensions and more that are not marked no_decay */
    double         clip;            /* 0: none; else gradients are scaled by clip/(norm + 1e-6) where that is below 1 */
    size_t         bucket_bytes;    /* 0 -> 25 MiB: the largest unit, unless one parameter is larger */
    int            tree;            /* 1: gradients are summed over a binary tree of micro-batches: section 5 */
    int            no_overlap;      /* 1: a unit is reduced before the backward goes on, not while it does */
    dt_update_fn   update;          /* DT_OWN */
    void          *user;            /* handed to update */
    int            states;          /* DT_OWN: arrays of state an element has, 0 to 2 */
} dt_zero_desc;

typedef struct dt_zero dt_zero;

typedef struct dt_step_info {
    int64_t step;           /* the one just done, from 1 */
    double  grad_norm;      /* 2-norm before clipping, every logical element once; NaN after a failure. 1-bit Adam does
                               not sum gradients once v is frozen: then an upper bound, the root of the mean over the N
                               data ranks of |N g|^2, g being a rank's own gradient */
    double  clip_scale;     /* what the gradients were multiplied with */
} dt_step_info;

/* [collective: world] After the last dt_param: gives parameters their storage and values, and makes the optimizer
   state. NULL after a failure. */
DT_API dt_zero *dt_zero_make(dt_ctx *ctx, dt_zero_desc desc);
/* [collective: world] After the backward of the step's last micro-batch: the norm, clipping, the update, and whole
   parameters on every rank again. The gradients' sums begin anew. */
DT_API dt_step_info dt_zero_step(dt_zero *zero, double lr);
/* [collective: the parameter's data group] State array `which` (0, 1) of a whole local parameter: host receives as many
   elements of dt_grad_dtype(param) as its local shape has. DT_ERR_ARG for a frozen parameter or a missing state. */
DT_API dt_status dt_zero_state(dt_zero *zero, int which, const dt_tensor *param, void *host);
/* [local] Bytes of optimizer state that this rank holds by the formula: what DT_MEM_OPTIM must show. */
DT_API size_t dt_zero_state_bytes(const dt_zero *zero);
/* [local] Gives the state back before the context ends. NULL is allowed. */
DT_API void dt_zero_free(dt_zero *zero);

#ifdef __cplusplus
}
#endif
#endif /* DT_ZERO_H */

#if defined(DT_IMPLEMENTATION) && !defined(DT_ZERO_IMPL)
#define DT_ZERO_IMPL

#include "dt_parallel.h"

#ifdef __cplusplus
extern "C" {
#endif

// ==== 3. Implementation: learning rate ==============================================================================

double dt_lr(dt_lr_desc d, int64_t step) {
    if (step <= d.warmup) return d.peak * (double)step / (double)d.warmup;
    if (d.kind == DT_LR_CONSTANT) return d.peak;
    double lowest = d.min_ratio * d.peak;
    if (step >= d.steps) return lowest;
    double done = (double)(step - d.warmup) / (double)(d.steps - d.warmup);
    double left = d.kind == DT_LR_LINEAR ? 1 - done : 0.5 * (1 + cos(3.14159265358979323846 * done));
    return lowest + left * (d.peak - lowest);
}

// ==== 4. Units, groups and runs =====================================================================================

/* What this layer knows of a unit. `data` is the group whose ranks hold copies and saw different samples. Its N ranks
   cut the padded unit into N equal runs; rank r owns run r at stage 1, and all of it at stage 0. */
typedef struct dt__zero_unit {
    dt_unit *unit;
    dt_comm *data;
    size_t   first, count;      /* the elements this rank updates */
    void    *state[2];          /* (count) each, of the gradient's type */
    void    *master;            /* (count) the parameter in f32 where it is bf16 or f16, else NULL */
    int      ready, reduced;    /* in this step */
    dt_work *work;              /* its reduction, under way */
    void    *levels;            /* of the tree: partial sums of this rank's run, (n_levels, run) */
    size_t   levels_bytes;
    size_t   sums;              /* place of its runs' sums of squares in zero->sums */
    void    *errors[2];         /* 1-bit Adam: this rank's as a worker, and as the server of run r */
    size_t   error_bytes[2];
} dt__zero_unit;

struct dt_zero {
    dt_ctx        *ctx;
    dt_zero_desc   desc;
    dt_mesh        mesh;
    dt_listener    listener;
    dt__zero_unit *units;       /* (n_units) */
    int            n_units;
    int            next;        /* the unit to reduce next: they go in descending order */
    int            states;
    void          *leaves;      /* of the tree: this rank's run of a unit from all ranks */
    size_t         leaves_bytes;
    double        *sums;        /* (n_sums) of squares, one for each run of DT_RUN elements */
    size_t         n_sums;
    double        *totals;      /* (n_units) the same of each unit */
    void          *messages;    /* 1-bit Adam: signs that leave this rank, then signs that reach it */
    size_t         messages_bytes;
    int64_t        step;
};

/* Section 9. */
static int       dt__onebit_frozen(const dt_zero *zero);
static dt_status dt__onebit_check(dt_ctx *ctx, const dt_zero_desc *d);
static dt_status dt__onebit_make(dt_zero *zero);
static void      dt__onebit_free(dt_zero *zero);
static size_t    dt__onebit_bytes(const dt_zero *zero, const dt_unit *unit);
static dt_status dt__onebit_sums(dt_zero *zero);
static int       dt__onebit_at_fault(dt_zero *zero, const dt_unit *unit, size_t run);
static dt_status dt__onebit_momentum(dt_zero *zero, dt__zero_unit *z, double grad_scale);

/* Bytes of an element of gradients and state. */
static size_t dt__zero_size(const dt__zero_unit *z) { return dt_dtype_size(z->unit->grad_dtype); }

/* An element of gradients or state, and one of the values. */
static void *dt__zero_at(const dt__zero_unit *z, void *array, size_t element) {
    return (char *)array + element * dt__zero_size(z);
}

static void *dt__zero_value(const dt__zero_unit *z, size_t element) {
    return (char *)z->unit->data + element * dt_dtype_size(z->unit->dtype);
}

static int dt__zero_has_master(const dt_unit *unit) { return unit->dtype != unit->grad_dtype && !unit->frozen; }

static dt_status dt__zero_units_make(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    zero->n_units = dt_unit_count(ctx);
    size_t bytes = (size_t)zero->n_units * sizeof *zero->units;
    zero->units = (dt__zero_unit *)dt_alloc(ctx, DT_MEM_HOST, bytes, "dt_zero_make");
    if (!zero->units) return dt_error(ctx);
    memset(zero->units, 0, bytes);
    for (int u = 0; u < zero->n_units; u++) {
        dt__zero_unit *z = &zero->units[u];
        z->unit = dt_unit_get(ctx, u);
        z->data = zero->mesh.data;
        size_t parts = zero->desc.stage >= 1 ? (size_t)dt_comm_size(z->data) : 1;
        z->count = z->unit->padded / parts;
        z->first = parts > 1 ? (size_t)dt_comm_rank(z->data) * z->count : 0;
        z->sums = zero->n_sums;
        zero->n_sums += z->unit->padded / DT_RUN;
        for (int s = 0; s < zero->states && !z->unit->frozen; s++) {
            z->state[s] = dt_alloc(ctx, DT_MEM_OPTIM, z->count * dt__zero_size(z), "optimizer state");
            if (!z->state[s]) return dt_error(ctx);
            if (dt__fill(ctx, z->unit->grad_dtype, z->state[s], z->count, 0) != DT_OK) return dt_error(ctx);
        }
        if (!dt__zero_has_master(z->unit)) continue;
        z->master = dt_alloc(ctx, DT_MEM_OPTIM, z->count * dt__zero_size(z), "master parameters");
        if (!z->master) return dt_error(ctx);
    }
    zero->sums = (double *)dt_alloc(ctx, DT_MEM_HOST, zero->n_sums * sizeof *zero->sums, "sums of the norm");
    size_t totals = (size_t)zero->n_units * sizeof *zero->totals;
    zero->totals = (double *)dt_alloc(ctx, DT_MEM_HOST, totals, "sums of the norm");
    return dt_error(ctx);
}

/* Whether a group joins ranks that hold copies of what this rank holds: ranks that differ in dp, ep or cp only. Told by
   coordinates, because the caller may have made the group in another way than dt_mesh_make did. */
static int dt__zero_has_copies(const dt_zero *zero, const dt_comm *comm) {
    const dt_mesh *m = &zero->mesh;
    int stage = m->sizes.tp * m->sizes.cp * m->sizes.ep * m->sizes.dp, found = 0;
    for (int i = 0; comm && i < dt_comm_size(comm); i++) {
        int rank = dt_comm_world_rank(comm, i);
        int copy = rank % m->sizes.tp == m->at.tp && rank / stage == m->at.pp;
        found |= copy && rank != dt_comm_world_rank(comm, dt_comm_rank(comm));
    }
    return found;
}

/* A cut along an axis that holds copies needs a smaller data group (experts, in a later version); a mark along one
   would sum twice. */
static dt_status dt__zero_check_params(dt_zero *zero) {
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        const dt_tensor     *t = dt_param_get(zero->ctx, i);
        const dt_param_desc *d = &t->param->desc;
        for (int c = 0; c < 3; c++)
            if (dt__zero_has_copies(zero, d->cuts[c].comm))
                return dt_fail(zero->ctx, DT_ERR_UNSUPPORTED, "dt_zero_make: %s is cut over '%s', whose ranks are data "
                    "parallel: not in this version; is .mesh the mesh that made the group?", t->name,
                    dt_comm_name(d->cuts[c].comm));
        for (int k = 0; k < 2; k++)
            if (dt__zero_has_copies(zero, d->marks[k].comm))
                return dt_fail(zero->ctx, DT_ERR_UNSUPPORTED, "dt_zero_make: %s has a mark over '%s', along which "
                    "gradients are summed already", t->name, dt_comm_name(d->marks[k].comm));
    }
    return DT_OK;
}

/* What must be alike on every rank. Item 0 is the optimizer, item i parameter i - 1. cut: which part of it this rank
   has belongs to it. */
typedef struct dt__zero_text { char s[176]; } dt__zero_text;

static dt__zero_text dt__zero_describe(const dt_zero *zero, int item, int cut) {
    static const char *const inits[] = { "zeros", "ones", "normal", "uniform" };
    const dt_zero_desc *z = &zero->desc;
    const dt_tensor    *t = dt_param_get(zero->ctx, item - 1);
    dt__zero_text       text = { "nothing" };
    size_t              at = 0, room = sizeof text.s;
    if (item == 0) snprintf(text.s, room, "optimizer %d of stage %d%s, betas %g %g, eps %g, momentum %g, weight decay "
        "%g, clip %g, freeze %d", z->optimizer, z->stage, z->tree ? ", tree" : "", z->beta1, z->beta2, z->eps,
        z->momentum, z->weight_decay, z->clip, z->freeze_steps);
    if (!t) return text;
    const dt_param_info *p = t->param;
    const dt_param_desc *d = &p->desc;
    at += (size_t)snprintf(text.s, room, "%.40s %s %.40s %s %.9g in unit %d%s%s", t->name, dt_dtype_name(t->dtype),
        dt__shape_text(p->full).s, p->init.kind >= 0 && p->init.kind < 4 ? inits[p->init.kind] : "?", p->init.scale,
        p->unit->index, d->frozen ? ", frozen" : "", d->no_decay ? ", no_decay" : "");
    if (d->lr_scale != 0 && at < room) at += (size_t)snprintf(text.s + at, room - at, ", lr_scale %g", d->lr_scale);
    for (int c = 0; c < 3 && at < room; c++)
        if (d->cuts[c].comm) at += (size_t)snprintf(text.s + at, room - at, ", cut %d:%d/%d", d->cuts[c].dim,
            cut ? dt_comm_rank(d->cuts[c].comm) : 0, dt_comm_size(d->cuts[c].comm));
    for (int m = 0; m < 2 && at < room; m++)
        if (d->marks[m].comm) at += (size_t)snprintf(text.s + at, room - at, ", mark %d/%d", d->marks[m].kind,
            dt_comm_size(d->marks[m].comm));
    return text;
}

static uint64_t dt__zero_digest(uint64_t h, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)data + i, bytes - i < 8 ? bytes - i : 8);
        h = (h ^ word) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    return h;
}

/* Of what an item is, or of the values a parameter holds; of a cut one's only where the group holds copies of it. */
static uint64_t dt__zero_item(const dt_zero *zero, int item, int values, int cut) {
    const dt_tensor *t = dt_param_get(zero->ctx, item - 1);
    char             piece[4096];
    uint64_t         h = 1;
    if (!values) {
        dt__zero_text text = dt__zero_describe(zero, item, cut);
        h = dt__zero_digest(h, text.s, strlen(text.s));
        return t ? dt__zero_digest(h, t->name, strlen(t->name)) : h;
    }
    size_t bytes = t ? t->param->count * dt_dtype_size(t->dtype) : 0;
    for (int c = 0; t && c < 3; c++)
        if (t->param->desc.cuts[c].comm && !cut) bytes = 0;
    if (t && dt__is_dry(t->data)) bytes = 0; /* all zeros, of models that no machine could read through */
    for (size_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < sizeof piece ? bytes - at : sizeof piece;
        if (dt__move(zero->ctx, piece, (char *)t->data + at, n) != DT_OK || dt__sync(zero->ctx) != DT_OK) break;
        h = dt__zero_digest(h, piece, n);
    }
    return h;
}

/* all[r] = the number that rank r of the group gives. */
static dt_status dt__zero_share(dt_comm *comm, double *all, double mine) {
    memset(all, 0, (size_t)dt_comm_size(comm) * sizeof *all);
    all[dt_comm_rank(comm)] = mine;
    return dt_sum_doubles(comm, all, (size_t)dt_comm_size(comm));
}

/* Compares all items with those of the group's rank 0, by digests that are summed as halves, which is exact and counts
   as no traffic. 0: they differ, *item is the first that does and *rank the first rank it does on. */
static int dt__zero_alike(dt_zero *zero, dt_comm *comm, int values, int cut, int *item, int *rank) {
    dt_ctx *ctx = zero->ctx;
    size_t  ranks = (size_t)dt_comm_size(comm), most = 0, first = 0;
    if (ranks == 1) return 1;
    double *all = (double *)dt_alloc(ctx, DT_MEM_HOST, ranks * sizeof *all, "comparing ranks"), *theirs = NULL;
    if (all && dt__zero_share(comm, all, dt_param_count(ctx) + 1) == DT_OK)
        for (size_t r = 0; r < ranks; r++) most = (size_t)all[r] > most ? (size_t)all[r] : most;
    if (most) theirs = (double *)dt_alloc(ctx, DT_MEM_HOST, 4 * most * sizeof *theirs, "comparing ranks");
    double *mine = theirs ? theirs + 2 * most : NULL;
    for (size_t i = 0; theirs && i < most; i++) {
        uint64_t h = dt__zero_item(zero, (int)i, values, cut);
        mine[2 * i] = (double)(h >> 32);
        mine[2 * i + 1] = (double)(h & 0xffffffff);
        for (int k = 0; k < 2; k++) theirs[2 * i + k] = dt_comm_rank(comm) == 0 ? mine[2 * i + k] : 0;
    }
    *item = (int)most;
    if (theirs && dt_sum_doubles(comm, theirs, 2 * most) == DT_OK) {
        while (first < 2 * most && theirs[first] == mine[first]) first++;
        if (dt__zero_share(comm, all, (double)(first / 2)) == DT_OK)
            for (size_t r = 0; r < ranks; r++)
                if (all[r] < *item) *item = (int)all[r], *rank = (int)r;
    }
    dt_free(ctx, DT_MEM_HOST, theirs, 4 * most * sizeof *theirs);
    dt_free(ctx, DT_MEM_HOST, all, ranks * sizeof *all);
    return *item == (int)most;
}

/* Ranks that registered other parameters, or start from other values, would train on without a sign: copies over the
   data group must be alike, and what is not cut over tp. Once each, before the first step. */
static dt_status dt__zero_compare(dt_zero *zero, int values) {
    enum { ROOM = sizeof(dt__zero_text) };
    dt_ctx *ctx = zero->ctx;
    for (int tp = 0; tp < 2; tp++) {
        dt_comm *comm = tp ? zero->mesh.tp : zero->mesh.data;
        double   both[2 * ROOM];
        char     text[2 * ROOM];
        int      item = 0, rank = 0;
        int      alike = dt__zero_alike(zero, comm, values, !tp, &item, &rank);
        if (dt_error(ctx) != DT_OK) return dt_error(ctx);
        if (alike) continue;
        int zeroth = dt_comm_world_rank(comm, 0), other = dt_comm_world_rank(comm, rank);
        if (values)
            return dt_fail(ctx, DT_ERR_COMM, "dt_zero_step: rank %d starts from other values of %s than rank %d: load "
                "the same weights on every rank", other, dt_param_get(ctx, item - 1)->name, zeroth);
        dt__zero_text mine = dt__zero_describe(zero, item, !tp);
        int           me = dt_comm_rank(comm);
        for (int i = 0; i < 2 * ROOM; i++) both[i] = me == (i < ROOM ? 0 : rank) ? mine.s[i % ROOM] : 0;
        if (dt_sum_doubles(comm, both, 2 * ROOM) != DT_OK) return dt_error(ctx);
        for (int i = 0; i < 2 * ROOM; i++) text[i] = (char)both[i];
        return dt_fail(ctx, DT_ERR_COMM, "dt_zero_make: rank %d has %s, where rank %d has %s: every rank registers the "
            "same parameters in the same order", other, text + ROOM, zeroth, text);
    }
    return DT_OK;
}

// ==== 5. The reducer ================================================================================================

/* Gradients count as dp, whatever axis a group belongs to. */
static dt_status dt__zero_sum_mark(const dt__zero_unit *z, dt_comm *comm, void *run) {
    dt_axis axis = comm->axis;
    dt_comm_set_axis(comm, DT_AXIS_DP);
    dt_status status = dt_all_reduce(comm, run, run, z->count, z->unit->grad_dtype, DT_SUM);
    dt_comm_set_axis(comm, axis);
    return status;
}

/* Sums a unit's gradient over every group along which it is a part:

       stage 0   all-reduce      every rank then has the whole sum
       stage 1   reduce-scatter  rank r then has run r of the sum; the rest of its gradient is used up

   (arXiv:1910.02054), then over the groups that marks name. Both sum in rank order, so the bits agree. It is started
   when the unit's gradient is complete, goes on while the backward computes the others, and is waited for when all have
   been started, at the backward's end (S. Li et al., "PyTorch Distributed", VLDB 2020). */
static dt_status dt__zero_reduce_start(dt_zero *zero, dt__zero_unit *z) {
    dt_unit *u = z->unit;
    dt_dtype type = u->grad_dtype;
    z->reduced = 1;
    if (dt__onebit_frozen(zero)) return dt_error(zero->ctx); /* ranks exchange the momentum instead */
    z->work = zero->desc.stage == 0 ? dt_all_reduce_start(z->data, u->grad, u->grad, u->padded, type, DT_SUM)
        : dt_reduce_scatter_start(z->data, u->grad, dt__zero_at(z, u->grad, z->first), z->count, type, DT_SUM);
    return dt_error(zero->ctx);
}

static dt_status dt__zero_reduce_end(dt_zero *zero, dt__zero_unit *z) {
    const dt_mark *marks = dt_param_get(zero->ctx, z->unit->first_param)->param->desc.marks;
    dt_status status = dt_wait(zero->ctx, z->work);
    z->work = NULL;
    for (int i = 0; status == DT_OK && i < 2; i++)
        if (marks[i].comm && marks[i].kind == DT_PART)
            status = dt__zero_sum_mark(z, marks[i].comm, dt__zero_at(z, z->unit->grad, z->first));
    return status;
}

/* The tree. Leaf m is the gradient of micro-batch m of the step; leaf j * N + r is rank r's j-th. Leaves are added as
   a binary counter counts: two sums of as many leaves become one, so level k holds a sum of 2^k.

       leaves  0 1 2 3 4 5      after leaf 5:  level 2: (0+1)+(2+3)   level 1: 4+5      the sum: level 2 + level 1

   Which leaves meet when depends on m alone, so the bits are the same however the batch is split over ranks and
   accumulation. For that the leaves of a run must meet unsummed, at the rank that owns it: an all-to-all of the
   gradient for each micro-batch, and floor(log2 M) + 1 buffers of a run for M micro-batches. */
static void *dt__zero_level(const dt__zero_unit *z, size_t run, int level) {
    return dt__zero_at(z, z->levels, (size_t)level * run);
}

static dt_status dt__zero_tree_add(dt_zero *zero, dt__zero_unit *z, size_t run, const void *leaf, size_t before) {
    const void *sum = leaf;
    int level = 0;
    for (; before >> level & 1; level++) {
        void *out = dt__zero_level(z, run, before >> (level + 1) & 1 ? level : level + 1); /* a level that is free */
        const void *terms[2] = { dt__zero_level(z, run, level), sum };
        dt_reduce_args a = { z->unit->grad_dtype, out, terms, 2, run, DT_SUM, NULL, 0, 0 };
        if (DT__KERNEL(zero->ctx, "the tree of gradients", reduce, &a) != DT_OK) return dt_error(zero->ctx);
        sum = out;
    }
    return level > 0 ? DT_OK : dt__move(zero->ctx, dt__zero_level(z, run, 0), leaf, run * dt__zero_size(z));
}

/* What is left in the levels, the smallest first, becomes the sum, in this rank's run of the gradient. */
static dt_status dt__zero_tree_sum(dt_zero *zero, dt__zero_unit *z, size_t run, size_t leaves) {
    void *mine = dt__zero_at(z, z->unit->grad, (size_t)dt_comm_rank(z->data) * run), *sum = NULL;
    for (int level = 0; leaves >> level; level++) {
        void *more = dt__zero_level(z, run, level);
        if (!(leaves >> level & 1)) continue;
        const void *terms[2] = { more, sum };
        dt_reduce_args a = { z->unit->grad_dtype, more, terms, 2, run, DT_SUM, NULL, 0, 0 };
        if (sum && DT__KERNEL(zero->ctx, "the tree of gradients", reduce, &a) != DT_OK) return dt_error(zero->ctx);
        sum = more;
    }
    if (dt__move(zero->ctx, mine, sum, run * dt__zero_size(z)) != DT_OK) return dt_error(zero->ctx);
    return zero->desc.stage > 0 ? DT_OK : dt_all_gather(z->data, mine, z->unit->grad, run, z->unit->grad_dtype);
}

/* The levels of a unit and the leaves of the largest, made in the first step. */
static dt_status dt__zero_tree_room(dt_zero *zero, dt__zero_unit *z, size_t run, size_t leaves) {
    size_t n_levels = 0, most = 0;
    while (leaves >> n_levels) n_levels++;
    for (int u = 0; u < zero->n_units; u++) {
        size_t bytes = zero->units[u].unit->padded * dt__zero_size(&zero->units[u]);
        most = bytes > most ? bytes : most;
    }
    if (dt_comm_size(z->data) > 1 && !zero->leaves) {
        zero->leaves = dt_alloc(zero->ctx, DT_MEM_COMM, most, "the tree's leaves");
        zero->leaves_bytes = most;
    }
    size_t bytes = n_levels * run * dt__zero_size(z);
    if (z->levels_bytes == bytes) return dt_error(zero->ctx);
    dt_free(zero->ctx, DT_MEM_GRADS, z->levels, z->levels_bytes);
    z->levels = dt_alloc(zero->ctx, DT_MEM_GRADS, bytes, "the tree's levels");
    z->levels_bytes = z->levels ? bytes : 0;
    return dt_error(zero->ctx);
}

/* A micro-batch's gradient of a unit, on all ranks: its leaves go into the tree, and the next begins from zero. */
static dt_status dt__zero_reduce_tree(dt_zero *zero, dt__zero_unit *z, int last) {
    dt_unit *u = z->unit;
    size_t ranks = (size_t)dt_comm_size(z->data), run = u->padded / ranks, micro = (size_t)zero->ctx->micro;
    if (dt__zero_tree_room(zero, z, run, ranks * (size_t)zero->ctx->micro_count) != DT_OK) return dt_error(zero->ctx);
    const void *leaves = ranks > 1 ? zero->leaves : u->grad;
    if (ranks > 1 && dt_all_to_all(z->data, u->grad, zero->leaves, run, u->grad_dtype) != DT_OK)
        return dt_error(zero->ctx);
    for (size_t r = 0; r < ranks; r++) {
        const void *leaf = (const char *)leaves + r * run * dt__zero_size(z);
        if (dt__zero_tree_add(zero, z, run, leaf, micro * ranks + r) != DT_OK) return dt_error(zero->ctx);
    }
    z->ready = 0;
    z->reduced = last;
    if (last) return dt__zero_tree_sum(zero, z, run, ranks * (micro + 1));
    u->filled = 0;
    return DT_OK;
}

/* All reductions have been started: when the backward returns, they are over. */
static dt_status dt__zero_reduce_all(dt_zero *zero) {
    for (int u = zero->n_units - 1; u >= 0; u--) {
        dt__zero_unit *z = &zero->units[u];
        int over = zero->desc.no_overlap && !zero->desc.tree;
        if (!z->unit->frozen && !over && dt__zero_reduce_end(zero, z) != DT_OK) return dt_error(zero->ctx);
    }
    return dt_error(zero->ctx);
}

/* A unit's gradient of the last micro-batch, or for the tree of any, is complete. Units are reduced in descending
   order, the order in which a backward usually completes them, so that every rank starts the same ones in the same
   order whatever its data did. */
static void dt__zero_grad_ready(dt_ctx *ctx, dt_unit *unit, int last, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (zero->units[unit->index].reduced) {
        dt_fail(ctx, DT_ERR_ARG, "a gradient came after the step's last micro-batch: call dt_zero_step after it, and "
            "dt_micro(ctx, i, n) before each of n micro-batches");
        return;
    }
    if (!last && !zero->desc.tree) return;
    zero->units[unit->index].ready = 1;
    while (zero->next >= 0 && (zero->units[zero->next].ready || zero->units[zero->next].unit->frozen)) {
        dt__zero_unit *z = &zero->units[zero->next--];
        if (z->unit->frozen) continue;
        dt_status status = zero->desc.tree ? dt__zero_reduce_tree(zero, z, last) : dt__zero_reduce_start(zero, z);
        if (status == DT_OK && zero->desc.no_overlap && !zero->desc.tree) status = dt__zero_reduce_end(zero, z);
        if (status != DT_OK) return;
    }
    if (zero->next < 0 && last) dt__zero_reduce_all(zero);
    else if (zero->next < 0) zero->next = zero->n_units - 1;
}

// ==== 6. The norm ===================================================================================================

/* Sums of squares of each run of 1,024 elements: those this rank owns, zero elsewhere, then summed over the data group.
   A run's sum is computed by exactly one rank (at stage 0 by each for itself), and x + 0 is x: every stage gets the
   same bits. */
static dt_status dt__zero_square_sums(dt_zero *zero) {
    memset(zero->sums, 0, zero->n_sums * sizeof *zero->sums);
    for (int u = 0; u < zero->n_units; u++) {
        dt__zero_unit *z = &zero->units[u];
        if (z->unit->frozen) continue;
        size_t  bytes = z->count / DT_RUN * sizeof(double); /* the kernel writes to the device, the sums live with us */
        double *work = (double *)dt_scratch(zero->ctx, bytes);
        if (!work) return dt_error(zero->ctx);
        dt_square_sums_args a = { z->unit->grad_dtype, work, dt__zero_at(z, z->unit->grad, z->first), z->count };
        if (DT__KERNEL(zero->ctx, "the gradient norm", square_sums, &a) != DT_OK) return dt_error(zero->ctx);
        if (dt__move(zero->ctx, zero->sums + z->sums + z->first / DT_RUN, work, bytes) != DT_OK ||
            dt__sync(zero->ctx) != DT_OK) return dt_error(zero->ctx);
    }
    if (dt__onebit_frozen(zero)) return dt__onebit_sums(zero);
    if (zero->desc.stage == 0) return DT_OK;
    return dt_sum_doubles(zero->mesh.data, zero->sums, zero->n_sums);
}

/* Adds up the units' values over the groups that cut them, so that each logical element counts once: whole copies are
   not summed over tp, boxes are. One call for each unit and cut, in the same order on every rank. */
static dt_status dt__zero_sum_cuts(dt_zero *zero) {
    for (int u = 0; u < zero->n_units; u++) { /* all parameters of a unit are cut alike */
        const dt_tensor *t = dt_param_get(zero->ctx, zero->units[u].unit->first_param);
        for (int c = 0; c < 3; c++) {
            dt_comm *comm = t->param->desc.cuts[c].comm;
            if (comm && dt_sum_doubles(comm, &zero->totals[u], 1) != DT_OK) return dt_error(zero->ctx);
        }
    }
    return DT_OK;
}

/* Fails naming the first element of run `run` of a unit that is not finite, or the run's first if only the sum of their
   squares is not. */
static dt_status dt__zero_blame(dt_zero *zero, const dt_unit *unit, size_t run, double norm) {
    double copy[DT_RUN]; /* of either type */
    size_t size = dt_dtype_size(unit->grad_dtype), bad = 0;
    if (dt__move(zero->ctx, copy, (char *)unit->grad + run * DT_RUN * size, DT_RUN * size) != DT_OK ||
        dt__sync(zero->ctx) != DT_OK) return dt_error(zero->ctx);
    while (bad < DT_RUN && isfinite(unit->dtype == DT_F64 ? copy[bad] : (double)((const float *)(void *)copy)[bad]))
        bad++;
    int overflow = bad == DT_RUN;
    if (overflow) bad = 0;
    const dt_tensor *t = dt_param_get(zero->ctx, unit->first_param);
    for (int p = 1; p < unit->params; p++) {
        const dt_tensor *later = dt_param_get(zero->ctx, unit->first_param + p);
        if (later->param->offset <= run * DT_RUN + bad) t = later;
    }
    return dt_fail(zero->ctx, DT_ERR_NUMERIC, "step %lld: the gradient norm is %g; the first gradient %s is element "
        "%zu of %s", (long long)zero->step + 1, norm, overflow ? "whose square is too large" : "that is not finite",
        run * DT_RUN + bad - t->param->offset, t->name);
}

/* The norm is not finite. A rank that holds the first run at fault says where; the others learn it from that rank. */
static dt_status dt__zero_not_finite(dt_zero *zero, double norm) {
    for (int u = 0; u < zero->n_units; u++)
        for (size_t i = 0; i < zero->units[u].unit->padded / DT_RUN; i++) {
            const dt__zero_unit *z = &zero->units[u];
            if (isfinite(zero->sums[z->sums + i])) continue;
            if (dt__onebit_frozen(zero) && !dt__onebit_at_fault(zero, z->unit, i)) continue;
            if (i >= z->first / DT_RUN && i < (z->first + z->count) / DT_RUN)
                return dt__zero_blame(zero, z->unit, i, norm);
            return dt_barrier(zero->mesh.data);
        }
    if (dt_barrier(zero->mesh.world) != DT_OK) return dt_error(zero->ctx);
    return dt_fail(zero->ctx, DT_ERR_NUMERIC, "step %lld: the gradient norm is %g: the sum of all squares is too large",
        (long long)zero->step + 1, norm);
}

static dt_status dt__zero_norm(dt_zero *zero, double *norm) {
    double total = 0;
    if (dt__zero_square_sums(zero) != DT_OK) return dt_error(zero->ctx);
    for (int u = 0; u < zero->n_units; u++) {
        const double *sums = zero->sums + zero->units[u].sums;
        zero->totals[u] = 0;
        for (size_t i = 0; i < zero->units[u].unit->padded / DT_RUN; i++) zero->totals[u] += sums[i];
    }
    if (dt__zero_sum_cuts(zero) != DT_OK) return dt_error(zero->ctx);
    for (int u = 0; u < zero->n_units; u++) total += zero->totals[u];
    if (dt_sum_doubles(zero->mesh.pp, &total, 1) != DT_OK) return dt_error(zero->ctx);
    *norm = sqrt(total);
    return isfinite(*norm) ? DT_OK : dt__zero_not_finite(zero, *norm);
}

// ==== 7. The update =================================================================================================

/* narrow: receives the run rounded to the parameter's own type, or NULL where that is the type of the update. */
static dt_status dt__zero_update_run(dt_zero *zero, const dt_flat *f, void *narrow) {
    const dt_zero_desc *d = &zero->desc;
    dt_dtype            type = dt_grad_dtype(f->tensor);
    if (d->optimizer == DT_OWN) {
        dt_cast_args a = { f->tensor->dtype, type, narrow, f->param, f->count, 0 };
        dt_status    status = d->update(f, d->user);
        if (status != DT_OK) return dt_fail(zero->ctx, status, "the update of %s", f->tensor->name);
        return narrow ? DT__KERNEL(zero->ctx, f->tensor->name, cast, &a) : DT_OK;
    }
    if (d->optimizer == DT_SGD) {
        dt_sgd_args a = { type, f->param, f->grad, f->state[0], f->count, f->lr, d->momentum, f->weight_decay,
            f->grad_scale, f->step, f->tensor->dtype, narrow };
        return DT__KERNEL(zero->ctx, f->tensor->name, sgd, &a);
    }
    if (dt__onebit_frozen(zero)) {
        dt_frozen_adam_args a = { type, f->param, f->state[0], f->state[1], f->count, f->lr, d->eps, f->weight_decay,
            f->tensor->dtype, narrow };
        return DT__KERNEL(zero->ctx, f->tensor->name, frozen_adam, &a);
    }
    int64_t       step = d->optimizer == DT_ONEBIT_ADAM ? INT64_MAX : f->step; /* no bias correction */
    dt_adamw_args a = { type, f->param, f->grad, f->state[0], f->state[1], f->count, f->lr, d->beta1, d->beta2, d->eps,
        f->weight_decay, f->grad_scale, step, d->optimizer == DT_ADAM, f->tensor->dtype, narrow };
    return DT__KERNEL(zero->ctx, f->tensor->name, adamw, &a);
}

/* Updates the part of each parameter that lies in this rank's run of the unit. */
static dt_status dt__zero_update(dt_zero *zero, dt__zero_unit *z, double lr, double grad_scale) {
    const dt_unit *u = z->unit;
    dt_cast_args widen = { u->grad_dtype, u->dtype, z->master, dt__zero_value(z, z->first), z->count, 0 };
    /* masters begin at the first step, so that values that were loaded or set before it count */
    if (z->master && zero->step == 0 && DT__KERNEL(zero->ctx, "master parameters", cast, &widen) != DT_OK)
        return dt_error(zero->ctx);
    for (int i = u->first_param; i < u->first_param + u->params; i++) {
        const dt_tensor     *t = dt_param_get(zero->ctx, i);
        const dt_param_info *p = t->param;
        size_t begin = p->offset > z->first ? p->offset : z->first;
        size_t end = p->offset + p->count < z->first + z->count ? p->offset + p->count : z->first + z->count;
        if (begin >= end) continue;
        int     decays = p->full.nd >= 2 && !p->desc.no_decay;
        void   *value = dt__zero_value(z, begin);
        void   *updated = z->master ? dt__zero_at(z, z->master, begin - z->first) : value;
        dt_flat f = { zero->ctx, t, begin - p->offset, end - begin, updated, dt__zero_at(z, u->grad, begin),
            { NULL, NULL }, lr * (p->desc.lr_scale != 0 ? p->desc.lr_scale : 1), grad_scale,
            decays ? zero->desc.weight_decay : 0, zero->step + 1 };
        for (int s = 0; s < zero->states; s++) f.state[s] = dt__zero_at(z, z->state[s], begin - z->first);
        if (dt__zero_update_run(zero, &f, z->master ? value : NULL) != DT_OK) return dt_error(zero->ctx);
    }
    if (zero->desc.stage == 0) return DT_OK;
    return dt_all_gather(z->data, dt__zero_value(z, z->first), u->data, z->count, u->dtype);
}

// ==== 8. Making, stepping, freeing ==================================================================================

static void dt__zero_release(dt_ctx *ctx, void *user) {
    dt_zero *zero = (dt_zero *)user;
    for (int u = 0; zero->units && u < zero->n_units; u++) {
        dt__zero_unit *z = &zero->units[u];
        for (int s = 0; s < 2 && z->unit; s++) dt_free(ctx, DT_MEM_OPTIM, z->state[s], z->count * dt__zero_size(z));
        if (z->unit) dt_free(ctx, DT_MEM_OPTIM, z->master, z->count * dt__zero_size(z));
        dt_free(ctx, DT_MEM_GRADS, z->levels, z->levels_bytes);
    }
    dt__onebit_free(zero);
    dt_free(ctx, DT_MEM_COMM, zero->leaves, zero->leaves_bytes);
    dt_free(ctx, DT_MEM_HOST, zero->sums, zero->n_sums * sizeof *zero->sums);
    dt_free(ctx, DT_MEM_HOST, zero->totals, (size_t)zero->n_units * sizeof *zero->totals);
    dt_free(ctx, DT_MEM_HOST, zero->units, (size_t)zero->n_units * sizeof *zero->units);
    dt_free(ctx, DT_MEM_HOST, zero, sizeof *zero);
}

static dt_status dt__zero_check(dt_ctx *ctx, const dt_zero_desc *d) {
    if (d->stage < 0 || d->stage > 3) return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: stage %d; use 0 or 1", d->stage);
    if (d->stage > 1) return dt_fail(ctx, DT_ERR_UNSUPPORTED, "dt_zero_make: stage %d is not available in this "
        "version; use 0 or 1", d->stage);
    if (d->optimizer < DT_ADAMW || d->optimizer > DT_OWN)
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: optimizer %d", d->optimizer);
    if (d->optimizer == DT_OWN && (!d->update || d->states < 0 || d->states > 2))
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: DT_OWN needs an update function and 0 to 2 states, got %d",
            d->states);
    if (d->optimizer == DT_ONEBIT_ADAM && dt__onebit_check(ctx, d) != DT_OK) return dt_error(ctx);
    if (!(d->beta1 < 1 && d->beta1 >= 0 && d->beta2 < 1 && d->beta2 >= 0 && d->eps >= 0 && d->clip >= 0 &&
            d->momentum >= 0 && d->weight_decay >= 0))
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: beta1 %g, beta2 %g, eps %g, clip %g, momentum %g, weight_decay "
            "%g: betas lie in [0,1), the others are not negative", d->beta1, d->beta2, d->eps, d->clip, d->momentum,
            d->weight_decay);
    return DT_OK;
}

static int dt__zero_states(const dt_zero_desc *d) {
    if (d->optimizer == DT_OWN) return d->states;
    return d->optimizer == DT_SGD ? d->momentum > 0 : 2;
}

dt_zero *dt_zero_make(dt_ctx *ctx, dt_zero_desc desc) {
    dt_mesh_desc all = { 0, 0, 0, 0, 0 };
    if (dt_error(ctx) != DT_OK || dt__zero_check(ctx, &desc) != DT_OK) return NULL;
    dt_zero *zero = (dt_zero *)dt_alloc(ctx, DT_MEM_HOST, sizeof *zero, "dt_zero_make");
    if (!zero) return NULL;
    memset(zero, 0, sizeof *zero);
    zero->ctx = ctx;
    zero->listener.grad_ready = dt__zero_grad_ready;
    zero->listener.closing = dt__zero_release;
    zero->listener.user = zero;
    dt_listen(ctx, &zero->listener);
    if (desc.beta1 == 0) desc.beta1 = 0.9;
    if (desc.beta2 == 0) desc.beta2 = 0.999;
    if (desc.eps == 0) desc.eps = 1e-8;
    zero->desc = desc;
    zero->states = dt__zero_states(&desc);
    zero->mesh = desc.mesh ? *desc.mesh : dt_mesh_make(ctx, all);
    zero->desc.mesh = NULL; /* the copy is what counts */
    dt_units_desc units = { desc.bucket_bytes, (size_t)DT_RUN * (size_t)dt_comm_size(zero->mesh.data) };
    if (dt_error(ctx) == DT_OK && dt__zero_check_params(zero) == DT_OK && dt_units_make(ctx, units) == DT_OK)
        dt__zero_units_make(zero);
    if (dt_error(ctx) == DT_OK && desc.optimizer == DT_ONEBIT_ADAM) dt__onebit_make(zero);
    zero->next = zero->n_units - 1;
    if (dt_error(ctx) == DT_OK) dt__zero_compare(zero, 0);
    if (dt_error(ctx) == DT_OK) dt_barrier(zero->mesh.world); /* all ranks have their state, or none goes on */
    if (dt_error(ctx) == DT_OK) return zero;
    dt_zero_free(zero);
    return NULL;
}

void dt_zero_free(dt_zero *zero) {
    if (!zero) return;
    dt_unlisten(zero->ctx, &zero->listener);
    dt__zero_release(zero->ctx, zero);
}

dt_step_info dt_zero_step(dt_zero *zero, double lr) {
    dt_step_info info = { 0, NAN, 1 };
    double       norm = 0;
    if (!zero || dt_error(zero->ctx) != DT_OK) return info;
    info.step = zero->step;
    if (!(lr >= 0 && lr < HUGE_VAL)) {
        dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_step: step %lld: learning rate %g", (long long)zero->step + 1, lr);
        return info;
    }
    if (zero->next >= 0) {
        dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_step: step %lld has no complete gradient: dt_backward of its last "
            "micro-batch has not run", (long long)zero->step + 1);
        return info;
    }
    if (zero->step == 0 && dt__zero_compare(zero, 1) != DT_OK) return info;
    /* whatever one rank noticed, no rank updates */
    if (dt__zero_norm(zero, &norm) != DT_OK || dt_barrier(zero->mesh.world) != DT_OK) return info;
    if (zero->desc.clip > 0 && zero->desc.clip / (norm + 1e-6) < 1) info.clip_scale = zero->desc.clip / (norm + 1e-6);
    for (int u = 0; u < zero->n_units; u++) {
        dt__zero_unit *z = &zero->units[u];
        int            signs = dt__onebit_frozen(zero) && !z->unit->frozen;
        if (signs && dt__onebit_momentum(zero, z, info.clip_scale) != DT_OK) return info;
        if (!z->unit->frozen && dt__zero_update(zero, z, lr, info.clip_scale) != DT_OK) return info;
        z->ready = z->reduced = 0;
    }
    zero->next = zero->n_units - 1;
    dt_clear_grads(zero->ctx);
    info.step = ++zero->step;
    info.grad_norm = norm;
    return info;
}

dt_status dt_zero_state(dt_zero *zero, int which, const dt_tensor *param, void *host) {
    if (!zero || dt_error(zero->ctx) != DT_OK) return zero ? dt_error(zero->ctx) : DT_ERR_ARG;
    if (which < 0 || which >= zero->states || !param || !param->param || !param->param->unit || param->ctx != zero->ctx)
        return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_state: state %d of %d", which, zero->states);
    const dt__zero_unit *z = &zero->units[param->param->unit->index];
    if (z->unit->frozen) return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_state: %s is frozen", param->name);
    size_t size = dt__zero_size(z), bytes = z->unit->padded * size;
    void  *whole = dt_alloc(zero->ctx, DT_MEM_TEMP, bytes, "dt_zero_state");
    if (!whole) return dt_error(zero->ctx);
    dt__move(zero->ctx, dt__zero_at(z, whole, z->first), z->state[which], z->count * size);
    if (zero->desc.stage >= 1)
        dt_all_gather(z->data, dt__zero_at(z, whole, z->first), whole, z->count, z->unit->grad_dtype);
    if (dt_error(zero->ctx) == DT_OK)
        dt__move(zero->ctx, host, dt__zero_at(z, whole, param->param->offset), param->param->count * size);
    dt__sync(zero->ctx);
    dt_free(zero->ctx, DT_MEM_TEMP, whole, bytes);
    return dt_error(zero->ctx);
}

size_t dt_zero_state_bytes(const dt_zero *zero) {
    if (!zero) return 0;
    size_t parts = zero->desc.stage >= 1 ? (size_t)dt_comm_size(zero->mesh.data) : 1, bytes = 0;
    for (int u = 0; u < zero->n_units; u++) {
        const dt_unit *unit = zero->units[u].unit;
        size_t         arrays = (size_t)(zero->states + dt__zero_has_master(unit));
        if (!unit->frozen) bytes += unit->padded / parts * arrays * dt_dtype_size(unit->grad_dtype);
        if (zero->desc.optimizer == DT_ONEBIT_ADAM) bytes += dt__onebit_bytes(zero, unit);
    }
    return bytes;
}

// ==== 9. 1-bit Adam =================================================================================================

/* H. Tang et al., arXiv:2102.02888. Steps up to freeze_steps are Adam's, but without bias correction. Then the second
   moment v stays as it is, and what N ranks exchange of a unit is not its gradient but its first moment, as signs:

       rank r              m = beta1 m + (1 - beta1) N g, with its own gradient g. dt's gradients are parts of a sum,
                           the paper's are averaged: hence N
       worker              x = m + its error; a sign for each element and one scale |x| / sqrt(n) are sent, and what
                           they leave of x is the error of its next step
       all-to-all          rank r receives run r of all: (N-1)/N of n bits
       server              rank r: x = their mean + its error; signs and one scale of run r, and what they leave
       all-gather          everybody receives all runs: (N-1)/N of n bits; that is m from now on, with equal bits
       update              p -= lr (m / (sqrt(v) + eps) + weight_decay p)

   So a step sends 2 (N-1)/N of n/8 bytes and 8 for each scale, where the sum of f32 gradients takes 32 times the first.
   An element whose v is 0 never had a gradient; no step of Adam would have moved it, but any scale divided by eps
   would: it stays, and counts nowhere. Padding is of that kind. */
static int dt__onebit_frozen(const dt_zero *zero) {
    return zero->desc.optimizer == DT_ONEBIT_ADAM && zero->step >= zero->desc.freeze_steps;
}

static dt_status dt__onebit_check(dt_ctx *ctx, const dt_zero_desc *d) {
    const dt_kernels *k = dt_ctx_kernels(ctx);
    if (d->stage != 0)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED, "dt_zero_make: DT_ONEBIT_ADAM at stage %d: each rank needs its whole "
            "momentum, so it is for stage 0", d->stage);
    if (d->tree)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED, "dt_zero_make: DT_ONEBIT_ADAM does not sum gradients once its second "
            "moment is frozen, so there is no tree of them: .tree must be 0");
    if (d->freeze_steps < 1)
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: DT_ONEBIT_ADAM with %d freeze_steps; its second moment needs 1 "
            "or more", d->freeze_steps);
    if (!k->momentum || !k->frozen_adam || !k->sign_pack || !k->sign_unpack) /* better now than after the freeze */
        return dt_fail(ctx, DT_ERR_UNSUPPORTED, "dt_zero_make: DT_ONEBIT_ADAM needs kernels that %s does not have",
            k->name);
    return DT_OK;
}

/* Bytes of a message about one run of a unit, and of both errors. */
static size_t dt__onebit_message(const dt_zero *zero, const dt_unit *unit) {
    return unit->padded / (size_t)dt_comm_size(zero->mesh.data) / 8 + sizeof(double);
}

static size_t dt__onebit_bytes(const dt_zero *zero, const dt_unit *unit) {
    size_t run = unit->padded / (size_t)dt_comm_size(zero->mesh.data);
    return unit->frozen ? 0 : (unit->padded + run) * dt_dtype_size(unit->grad_dtype);
}

static dt_status dt__onebit_make(dt_zero *zero) {
    size_t N = (size_t)dt_comm_size(zero->mesh.data);
    for (int u = 0; u < zero->n_units; u++) {
        dt__zero_unit *z = &zero->units[u];
        size_t         bytes = 2 * N * dt__onebit_message(zero, z->unit);
        zero->messages_bytes = bytes > zero->messages_bytes ? bytes : zero->messages_bytes;
        for (int e = 0; e < 2 && !z->unit->frozen; e++) {
            size_t count = e ? z->unit->padded / N : z->unit->padded;
            z->error_bytes[e] = count * dt__zero_size(z); /* groups may be gone when it is given back */
            z->errors[e] = dt_alloc(zero->ctx, DT_MEM_OPTIM, z->error_bytes[e], "errors of 1-bit Adam");
            if (!z->errors[e]) return dt_error(zero->ctx);
            if (dt__fill(zero->ctx, z->unit->grad_dtype, z->errors[e], count, 0) != DT_OK) return dt_error(zero->ctx);
        }
    }
    zero->messages = dt_alloc(zero->ctx, DT_MEM_COMM, zero->messages_bytes, "messages of 1-bit Adam");
    return dt_error(zero->ctx);
}

static void dt__onebit_free(dt_zero *zero) {
    for (int u = 0; zero->units && u < zero->n_units; u++)
        for (int e = 0; e < 2; e++)
            dt_free(zero->ctx, DT_MEM_OPTIM, zero->units[u].errors[e], zero->units[u].error_bytes[e]);
    dt_free(zero->ctx, DT_MEM_COMM, zero->messages, zero->messages_bytes);
}

/* The sums of squares of |N g|^2, their mean over the N data ranks; by Cauchy-Schwarz that of the sum is not above. */
static dt_status dt__onebit_sums(dt_zero *zero) {
    if (dt_sum_doubles(zero->mesh.data, zero->sums, zero->n_sums) != DT_OK) return dt_error(zero->ctx);
    for (size_t i = 0; i < zero->n_sums; i++) zero->sums[i] *= dt_comm_size(zero->mesh.data);
    return DT_OK;
}

/* Whether it is this rank's own gradient that makes the sum of squares of a run not finite. */
static int dt__onebit_at_fault(dt_zero *zero, const dt_unit *unit, size_t run) {
    double copy[DT_RUN], squares = 0; /* of either type */
    size_t bytes = DT_RUN * dt_dtype_size(unit->grad_dtype);
    if (dt__move(zero->ctx, copy, (char *)unit->grad + run * bytes, bytes) != DT_OK || dt__sync(zero->ctx) != DT_OK)
        return 0;
    for (size_t i = 0; i < DT_RUN; i++) {
        double x = dt__number(unit->grad_dtype, copy, i);
        squares += x * x;
    }
    return !isfinite(squares);
}

/* A unit's momentum after this rank's gradient, exchanged. The server's mean takes the place of the gradient, which has
   been used up. */
static dt_status dt__onebit_momentum(dt_zero *zero, dt__zero_unit *z, double grad_scale) {
    dt_ctx  *ctx = zero->ctx;
    dt_unit *u = z->unit;
    dt_dtype type = u->grad_dtype;
    size_t   N = (size_t)dt_comm_size(z->data), r = (size_t)dt_comm_rank(z->data), run = u->padded / N;
    size_t   bytes = dt__onebit_message(zero, u), words = bytes / sizeof(int32_t);
    char    *out = (char *)zero->messages, *in = out + N * bytes;
    void    *m = z->state[0], *v = z->state[1], *mean = dt__zero_at(z, u->grad, r * run);
    dt_momentum_args    local = { type, m, u->grad, u->padded, zero->desc.beta1, (double)N * grad_scale };
    dt_sign_pack_args   worker = { type, out, m, z->errors[0], v, u->padded, N };
    dt_sign_unpack_args served = { type, mean, in, dt__zero_at(z, v, r * run), run, N };
    dt_sign_pack_args   server = { type, out + r * bytes, mean, z->errors[1], dt__zero_at(z, v, r * run), run, 1 };
    if (DT__KERNEL(ctx, "1-bit Adam", momentum, &local) != DT_OK ||
        DT__KERNEL(ctx, "1-bit Adam", sign_pack, &worker) != DT_OK ||
        dt_all_to_all(z->data, out, in, words, DT_I32) != DT_OK ||
        DT__KERNEL(ctx, "1-bit Adam", sign_unpack, &served) != DT_OK ||
        DT__KERNEL(ctx, "1-bit Adam", sign_pack, &server) != DT_OK ||
        dt_all_gather(z->data, out + r * bytes, out, words, DT_I32) != DT_OK) return dt_error(ctx);
    for (size_t k = 0; k < N; k++) {
        dt_sign_unpack_args all = { type, dt__zero_at(z, m, k * run), out + k * bytes, dt__zero_at(z, v, k * run), run,
            1 };
        if (DT__KERNEL(ctx, "1-bit Adam", sign_unpack, &all) != DT_OK) return dt_error(ctx);
    }
    return DT_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* DT_ZERO_IMPL */

/* HISTORY
     0.1.0   AdamW, Adam, SGD, 1-bit Adam, an own update; ZeRO 0 and 1; clipping; learning rates

   LICENCE: your choice of A or B.

   A. Public domain (www.unlicense.org). This is free and unencumbered software released into the public domain.
   Anyone is free to copy, modify, publish, use, compile, sell, or distribute this software, either in source code
   form or as a compiled binary, for any purpose, commercial or non-commercial, and by any means. In jurisdictions
   that recognize copyright laws, the author or authors of this software dedicate any and all copyright interest in
   the software to the public domain. We make this dedication for the benefit of the public at large and to the
   detriment of our heirs and successors. We intend this dedication to be an overt act of relinquishment in perpetuity
   of all present and future rights to this software under copyright law. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT
   WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS
   FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR
   OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH
   THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

   B. MIT. Copyright (c) the dt authors. Permission is hereby granted, free of charge, to any person obtaining a copy
   of this software and associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
   copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to the following
   conditions: the above copyright notice and this permission notice shall be included in all copies or substantial
   portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED,
   INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
   LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE
   SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */
