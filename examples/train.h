/* train.h - the training loop that train_gpt.c and demo.c share - public domain or MIT, at your
   choice

   Include it after dt_zero.h and gpt.h. train() is what every rank runs:

       train_config config = { ... };
       dt_run((dt_run_desc){ .ranks = 8 }, train, &config);

   It reads text, trains, and hands the figures of each step to config.on_step on rank 0. Everything
   is static. */
#ifndef TRAIN_H
#define TRAIN_H

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpt_files.h"

/* Bytes, largest over the ranks: params, grads and optim live at the step's end, the others peaks
   of the step. */
enum { TRAIN_PARAMS = 0, TRAIN_GRADS, TRAIN_OPTIM, TRAIN_ACTS, TRAIN_COMM, TRAIN_PEAK, TRAIN_MEMS };

/* The figures of one step, the same in every layout but for time and bytes. */
typedef struct train_row {
    int64_t step;     /* from 1 */
    double loss;      /* nats, mean over all labels of the step, before its update */
    double grad_norm; /* before clipping */
    double lr;
    double ms, tokens_per_s; /* by rank 0's clock */
    /* the share of that time which rank 0 spent between ranks, waiting included */
    double comm;
    /* of a pipeline: the share of the micro-batches' time in which its ranks were idle */
    double bubble;
    double balance, z; /* side losses of mixtures, with their weights: not in the loss */
    double dropped;    /* the share of the choices for which experts had no room */
    double val_loss;   /* NaN in a step after which none was taken */
    /* 1: gradients were not finite under a loss scale, and nothing changed */
    int skipped;
    double mem[TRAIN_MEMS];
    /* sent by one rank along each axis in this step, largest over the ranks */
    double bytes[DT_AXES];
    int64_t batch; /* sequences of this step */
} train_row;

/* What one rank needs, counted, and what a formula says of it (S. Rajbhandari et al.,
   arXiv:1910.02054: with Psi parameters and N ranks that share them, each class whole is Psi x its
   bytes, and cut Psi x bytes / N). */
typedef struct train_need {
    /* live: at the run's end, or at its first failure; peaks: of all the run until then */
    dt_memory memory;
    /* of dense parameters, and of those that ep cuts: how many this rank has; with each unit padded
       to a multiple of N * DT_PIECE; N */
    struct {
        int64_t psi, padded;
        int shared;
    } kind[2];
    int bytes[3];      /* of one parameter in params, grads, optim */
    int cut[3];        /* 1: each rank has a part, of N */
    double formula[3]; /* padded x bytes, / N where cut; */
    double levels;     /* and of the tree in grads */
} train_need;

/* Files read as one text, in this order. */
typedef struct train_files {
    char **path;
    int count, room;
    int64_t bytes;
    int64_t tokens; /* bytes, or what token shards hold */
    int shards;     /* 1: llm.c's token shards */
} train_files;

typedef struct train_config {
    gpt_config model; /* tp, cp, pp and the stages are filled in by train */
    dt_mesh_desc mesh;
    int schedule, chunks;        /* with mesh.pp: DT_SCHEDULE_*; stages of each rank, 0 -> 1 */
    int cut[GPT_MAX_STAGES + 1]; /* gpt_config.cut of pp x chunks stages */
    /* 1: cut is found by timing the parts of the model, before the first step */
    int by_cost;
    dt_zero_desc zero; /* the mesh is filled in by train */
    dt_lr_desc lr;
    dt_batch_ramp ramp;    /* samples 0: none; its batch is filled in by train */
    const char *weights;   /* a file of initial values for gpt_load; NULL: random ones */
    train_files data, val; /* val.count 0: no validation */
    int seq;               /* T; 0 -> the model's longest */
    /* b and a: a step takes b * a sequences on each replica, or fewer at first */
    int micro_batch, accum;
    /* 1: the data's sequences in another order each time through, by the context's seed */
    int shuffle;
    int64_t stop_at;       /* steps to do */
    int64_t eval_every;    /* 0: only after the last step */
    const char *export_to; /* at the end: a path for gpt_export; NULL: none */
    const char *save;      /* a folder for checkpoints; NULL: none */
    int64_t save_every;    /* steps; 0: after the last one only */
    int keep, background;  /* of dt_checkpoint_desc */
    const char *settings;  /* saved with a checkpoint; NULL: nothing */
    /* a checkpoint, or a folder of them, to go on from; NULL: begin. One that is `save` may be
       empty */
    const char *resume;
    /* 1: what is in `save` goes before `resume`, if there is a checkpoint */
    int again;
    /* not NULL: once a signal handler has set it to 1, the run saves after the step and ends; it is
       1 then on all ranks */
    int *stop;
    const char *trace; /* a file for dt_trace_write at the end; NULL: no trace */
    const char *svg;   /* a file for a drawing of the last step's pipeline; NULL: none */
    /* (ranks), zeroed: nothing is computed, only counted; NULL: a true run */
    dt_dry *dry;
    /* (ranks), zeroed: filled in, but by forked ranks; NULL: not wanted */
    train_need *need;
    void (*on_step)(dt_ctx *ctx, const train_row *row, void *user); /* on rank 0 */
    /* on all ranks, step 0: there was no checkpoint. May be NULL */
    void (*on_resume)(
        dt_ctx *ctx, int64_t step, const char *path, const char *settings, void *user);
    void (*on_save)(dt_ctx *ctx, const char *path, void *user); /* on rank 0; may be NULL */
    /* on rank 0, of a save; may be NULL */
    void (*on_progress)(double done, void *user);
    /* on rank 0 and those it shares the model with by tp, pp and ep, at ZeRO-3 on all ranks; may be
       NULL */
    void (*at_end)(dt_ctx *ctx, gpt *model, void *user);
    void *user;
} train_config;

enum { TRAIN_EVAL_SEQUENCES = 64 }; /* a validation loss is taken on the first so many sequences */

/* ==== Files
   ======================================================================================================= */

static inline int train_files_add(train_files *f, const char *path, int64_t bytes) {
    if (f->count == f->room) {
        int room = f->room ? 2 * f->room : 16;
        char **more = (char **)realloc(f->path, (size_t)room * sizeof *more);
        if (!more) return -1;
        f->path = more;
        f->room = room;
    }
    char *copy = strdup(path);
    if (!copy) return -1;
    f->path[f->count++] = copy;
    f->bytes += bytes;
    return 0;
}

static inline int train_by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Adds a directory's files, sorted by name, that end in one of `endings` (NULL: all but hidden
   ones). -1: see errno. */
static inline int train_files_add_dir(train_files *f, const char *dir, const char *const *endings) {
    DIR *d = opendir(dir);
    struct dirent *e;
    struct stat st;
    char path[4096];
    int first = f->count, failed = 0;
    if (!d) return -1;
    while (!failed && (errno = 0, e = readdir(d))) {
        int fits = endings == NULL;
        for (int i = 0; endings && endings[i]; i++) {
            size_t length = strlen(e->d_name), end = strlen(endings[i]);
            fits |= length > end && strcmp(e->d_name + length - end, endings[i]) == 0;
        }
        if (!fits || e->d_name[0] == '.') continue;
        if (snprintf(path, sizeof path, "%s/%s", dir, e->d_name) >= (int)sizeof path)
            errno = ENAMETOOLONG, failed = -1;
        else if (stat(path, &st) != 0)
            failed = -1;
        else if (S_ISREG(st.st_mode))
            failed = train_files_add(f, path, (int64_t)st.st_size);
    }
    if (!e && errno != 0) failed = -1;
    int reason = errno; /* closedir may change it */
    closedir(d);
    errno = reason;
    if (f->count > first)
        qsort(f->path + first, (size_t)(f->count - first), sizeof *f->path, train_by_name);
    return failed;
}

/* The project's own sources: the headers of `root`, then its examples. 0 if they are not there. */
static inline int train_files_add_sources(train_files *f, const char *root) {
    static const char *const endings[] = { ".h", ".c", ".cu", NULL };
    char path[4096 + 16];
    snprintf(path, sizeof path, "%s/dt_tensor.h", root);
    if (access(path, R_OK) != 0) return 0;
    if (train_files_add_dir(f, root, endings) != 0) return 0;
    snprintf(path, sizeof path, "%s/examples", root);
    return train_files_add_dir(f, path, endings) == 0 ? f->count : 0;
}

/* Looks for the sources in the current directory, then in the one above the program's. */
static inline int train_files_find_sources(train_files *f) {
    char self[4096];
    if (train_files_add_sources(f, ".")) return f->count;
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 8);
    if (length <= 0) return 0;
    self[length] = 0;
    char *slash = strrchr(self, '/');
    strcpy(slash ? slash : self, "/..");
    return train_files_add_sources(f, self);
}

static inline dt_text *train_open(dt_ctx *ctx, const train_files *f, int seq) {
    return f->count ? dt_text_open(ctx, (const char *const *)f->path, f->count, seq) : NULL;
}

static inline void train_files_free(train_files *f) {
    for (int i = 0; i < f->count; i++) free(f->path[i]);
    free(f->path);
    memset(f, 0, sizeof *f);
}

/* ==== One step
   ==================================================================================================== */

/* The tokens of one step on one rank: its own of T, in each of a * b sequences. */
typedef struct train_batch {
    dt_order order;
    /* of all S sequences, the same on every rank; NULL: in their own order */
    dt_sampler *shuffled;
    /* of this step; what lies at the pointers has room for the largest */
    int accum;
    int64_t T, own;        /* tokens of a sequence; this rank's of them: T / cp */
    int32_t *ids, *labels; /* (a,b,own) */
    /* (a,b,own): place of each token among those of the step, over all replicas */
    int32_t *index;
    int32_t *whole;  /* (3,T): ids, labels and places of one sequence */
    double *losses;  /* (a,replicas) of the step's micro-batches */
    double *experts; /* (layers,E) what routers count, if their biases follow it; NULL */
    size_t experts_bytes;
    dt_schedule *schedule; /* of `accum` micro-batches */
    dt_span *spans;        /* when this rank's actions ran, then when all ranks' did */
    size_t spans_bytes;
} train_batch;

/* The i-th sequence of a micro-step. The order of data is an endless row, cut into epochs of all
   sequences; b->order tells where in it the step begins. */
static inline int64_t train_sequence(const train_batch *b, int micro, int replica, int i) {
    int64_t sequence = dt_order_sequence(b->order, 1, micro, replica, i);
    if (!b->shuffled) return sequence;
    dt_sampler_seek(b->shuffled,
        (dt_sampler_state){ dt_order_epoch(b->order, 1, micro, replica, i), sequence });
    return dt_sampler_next(b->shuffled);
}

/* Sequence `sequence` of a text, which is the k-th of the step: this rank's tokens, to place `at`.
   Labels are those of the whole sequence, shifted before it is cut. */
static inline dt_status train_sequence_read(
    train_batch *b, dt_text *text, const gpt *model, int64_t sequence, int64_t k, int64_t at) {
    int32_t *from[3] = { b->whole, b->whole + b->T, b->whole + 2 * b->T };
    int32_t *to[3] = { b->ids + at, b->labels + at, b->index + at };
    dt_status status = dt_text_read(text, sequence, from[0], from[1]);
    for (int64_t t = 0; t < b->T; t++) from[2][t] = (int32_t)(k * b->T + t);
    for (int i = 0; i < 3 && status == DT_OK; i++)
        dt_context_shard(model->config.cp_kind, 1, b->T, model->config.cp, from[i], to[i]);
    return status;
}

static inline dt_status train_batch_read(
    train_batch *b, dt_text *text, const gpt *model, int replica) {
    for (int j = 0; j < b->accum; j++)
        for (int i = 0; i < b->order.micro_batch; i++) {
            /* of the step's */
            int64_t k = ((int64_t)j * b->order.replicas + replica) * b->order.micro_batch + i;
            int64_t at = ((int64_t)j * b->order.micro_batch + i) * b->own;
            int64_t sequence = train_sequence(b, j, replica, i);
            dt_status status = train_sequence_read(b, text, model, sequence, k, at);
            if (status != DT_OK) return status;
        }
    return DT_OK;
}

/* What the stages of one pass are told. */
typedef struct train_pass {
    gpt *model;
    const dt_mesh *mesh;
    train_batch *b;
    int64_t step;
    double denominator;
    /* of a validation, whose micro-batch is one sequence; NULL: a step of training */
    dt_text *text;
    int64_t sequences;
    double loss; /* of the validation */
} train_pass;

static inline dt_tensor *train_stage(dt_tensor *x, int stage, int micro, void *user) {
    train_pass *p = (train_pass *)user;
    train_batch *b = p->b;
    dt_ctx *ctx = p->model->ctx;
    dt_shape shape = DT_SHAPE(b->order.micro_batch, b->own);
    int64_t at = micro * dt_count(shape);
    dt_trace_begin(ctx, "forward");
    gpt_tokens t = { .ids = dt_input(ctx, DT_I32, shape, b->ids + at),
        .sequences = b->order.batch,
        .step = (uint64_t)p->step };
    if (p->model->config.dropout > 0) t.index = dt_input(ctx, DT_I32, shape, b->index + at);
    x = gpt_stage_at(
        p->model, stage, x, t, dt_input(ctx, DT_I32, shape, b->labels + at), p->denominator);
    if (stage + 1 == gpt_stages(p->model->config))
        b->losses[micro * b->order.replicas + p->mesh->replica] = dt_item(x);
    dt_trace_end(ctx);
    return x;
}

/* Forward and backward of all micro-batches. b->losses: (accum, replicas), each micro-batch's at
   its place in the step, on every rank. The share of the time in which the ranks of this pipeline
   were idle. */
static inline double train_forward_backward(
    gpt *model, const dt_mesh *mesh, train_batch *b, int64_t step) {
    size_t micros = (size_t)(b->accum * b->order.replicas);
    dt_span *all = b->spans + dt_schedule_count(b->schedule, mesh->at.pp);
    train_pass pass = { .model = model, .mesh = mesh, .b = b, .step = step };
    pass.denominator =
        dt_tokens(mesh->data, b->labels, (size_t)(b->accum * b->order.micro_batch * b->own));
    memset(b->losses, 0, micros * sizeof *b->losses);
    dt_pipe_run(model->ctx, (dt_pipe_desc){ .schedule = b->schedule,
                                .comm = mesh->pp,
                                .run = train_stage,
                                .user = &pass,
                                .spans = b->spans });
    dt_sum_doubles(mesh->data, b->losses, micros);
    dt_sum_doubles(mesh->pp, b->losses, micros);
    if (mesh->sizes.pp == 1 || dt_pipe_spans(mesh->pp, b->schedule, b->spans, all) != DT_OK)
        return 0;
    return dt_schedule_idle(b->schedule, all, -1).of_total;
}

static inline dt_tensor *train_eval_stage(dt_tensor *x, int stage, int micro, void *user) {
    train_pass *p = (train_pass *)user;
    dt_ctx *ctx = p->model->ctx;
    dt_shape shape = DT_SHAPE(1, p->b->own);
    int64_t s = (int64_t)micro * p->mesh->replicas + p->mesh->replica;
    if (train_sequence_read(p->b, p->text, p->model, s < p->sequences ? s : 0, 0, 0) != DT_OK)
        return NULL;
    gpt_tokens t = { .ids = dt_input(ctx, DT_I32, shape, p->b->ids) };
    x = gpt_stage_at(
        p->model, stage, x, t, dt_input(ctx, DT_I32, shape, p->b->labels), p->denominator);
    if (stage + 1 == gpt_stages(p->model->config) && s < p->sequences) p->loss += dt_item(x);
    return x;
}

/* Mean loss over the first sequences of a text, which the replicas share out one by one. All of
   them run as many forwards, for at ZeRO-3 they gather values together: where one has no sequence
   left, its last one is not counted. */
static inline double train_eval(gpt *model, const dt_mesh *mesh, dt_text *text, train_batch *b) {
    dt_ctx *ctx = model->ctx;
    int64_t n = dt_text_sequences(text);
    train_pass pass = { .model = model, .mesh = mesh, .b = b, .text = text };
    pass.sequences = n < TRAIN_EVAL_SEQUENCES ? n : TRAIN_EVAL_SEQUENCES;
    pass.denominator = (double)(pass.sequences * b->T);
    dt_trace_begin(ctx, "validation");
    dt_pipe_run(
        ctx, (dt_pipe_desc){ .schedule = b->schedule,
                 .comm = mesh->pp,
                 .run = train_eval_stage,
                 .user = &pass,
                 .forward_micros = (int)((pass.sequences + mesh->replicas - 1) / mesh->replicas) });
    dt_sum_doubles(mesh->data, &pass.loss, 1);
    dt_sum_doubles(mesh->pp, &pass.loss, 1);
    dt_trace_end(ctx);
    return pass.loss;
}

/* What the routers of the model have counted in the step, on every rank, and the counts begin anew.
   A token's router is on one rank of dp, ep and cp, and under sp of tp; its layer is on one of
   pp. */
static inline void train_routes(gpt *model, const dt_mesh *mesh, train_row *row) {
    const gpt_config *c = &model->config;
    dt_comm *const groups[3] = { mesh->data, c->sp ? mesh->tp : NULL, mesh->pp };
    double sums[4] = { 0 };
    for (int i = 0; i < c->layers; i++) {
        dt_route_counts *r = &model->layer[i].route;
        const double more[4] = { c->balance * r->balance, c->z * r->z, r->choices, r->dropped };
        for (int k = 0; k < 4; k++) sums[k] += more[k];
        r->balance = r->z = r->choices = r->dropped = 0;
    }
    for (int g = 0; g < 3; g++) dt_sum_doubles(groups[g], sums, 4);
    row->balance = sums[0];
    row->z = sums[1];
    row->dropped = sums[2] > 0 ? sums[3] / sums[2] : 0;
}

/* The routers' biases follow the counts of a step that was made. */
static inline void train_balance(gpt *model, const dt_mesh *mesh, train_batch *b, int skipped) {
    dt_comm *const groups[2] = { mesh->data, model->config.sp ? mesh->tp : NULL };
    if (!b->experts) return;
    if (skipped)
        memset(b->experts, 0, b->experts_bytes);
    else
        gpt_balance(model, groups, 2);
}

/* Memory and traffic of the step, the largest over all ranks. */
static inline void train_account(dt_ctx *ctx, const size_t *sent_before, train_row *row) {
    dt_memory m = dt_memory_used(ctx);
    double all[TRAIN_MEMS + DT_AXES] = { (double)m.live[DT_MEM_PARAMS],
        (double)m.live[DT_MEM_GRADS], (double)m.live[DT_MEM_OPTIM], (double)m.peak[DT_MEM_ACTS],
        (double)m.peak[DT_MEM_COMM], (double)m.peak_total };
    for (int a = 0; a < DT_AXES; a++)
        all[TRAIN_MEMS + a] = (double)(dt_comm_bytes(ctx, (dt_axis)a) - sent_before[a]);
    dt_all_reduce(dt_world(ctx), all, all, TRAIN_MEMS + DT_AXES, DT_F64, DT_MAX);
    memcpy(row->mem, all, sizeof row->mem);
    memcpy(row->bytes, all + TRAIN_MEMS, sizeof row->bytes);
}

/* Before peaks begin again, and at the end: the largest so far are kept. */
static inline void train_peaks(dt_ctx *ctx, const train_config *c) {
    if (!c->need) return;
    dt_memory now = dt_memory_used(ctx), *kept = &c->need[dt_ctx_rank(ctx)].memory;
    for (int i = 0; i < DT_MEM_CLASSES; i++) {
        kept->live[i] = now.live[i];
        if (now.peak[i] > kept->peak[i]) kept->peak[i] = now.peak[i];
    }
    kept->live_total = now.live_total;
    if (now.peak_total > kept->peak_total) kept->peak_total = now.peak_total;
}

/* The first failure: what is live then is what matters, not what is left at the run's end. */
static inline int train_failed(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    (void)status, (void)text;
    train_peaks(ctx, (const train_config *)user);
    return 0;
}

/* The formula's side of a train_need. */
static inline void train_formula(dt_ctx *ctx, const train_config *c, const dt_mesh *mesh) {
    train_need *n = &c->need[dt_ctx_rank(ctx)];
    dt_dtype dtype = c->model.dtype;
    int is_adam = c->zero.optimizer != DT_SGD,
        kept = dtype == DT_BF16 || dtype == DT_F16 ? DT_F32 : dtype;
    int states = is_adam ? 2 : c->zero.momentum > 0, master = (dt_dtype)kept != dtype;
    int wish = c->zero.shard_group ? c->zero.shard_group : dt_comm_size(mesh->data);
    int all[2] = { dt_comm_size(mesh->data), dt_comm_size(mesh->experts) };
    for (int k = 0; k < 2; k++) { /* the largest that divides the group */
        n->kind[k].shared = wish < all[k] ? wish : all[k];
        while (all[k] % n->kind[k].shared != 0) n->kind[k].shared--;
    }
    n->bytes[0] = (int)dt_dtype_size(dtype);
    n->bytes[1] = (int)dt_dtype_size((dt_dtype)kept);
    n->bytes[2] = n->bytes[1] * (states + master);
    const char *optim = c->zero.offload_optim, *params = c->zero.offload_params;
    if (optim) n->bytes[2] = 0; /* what is offloaded is in none of the three classes */
    if (params) n->bytes[0] = 0;
    if (optim && params && strcmp(optim, "cpu") != 0 && strcmp(params, "cpu") != 0 && !c->zero.tree)
        n->bytes[1] = 0;
    /* optim from 1, params from 3 */
    for (int i = 0; i < 3; i++) n->cut[i] = c->zero.stage >= 3 - i;
    for (int u = 0; u < dt_bucket_count(ctx); u++) {
        const dt_bucket *unit = dt_bucket_get(ctx, u);
        const dt_shard_spec *shards = dt_param_get(ctx, unit->first_param)->param->desc.shards;
        int k = 0;
        for (int c = 0; c < 3; c++) k |= mesh->ep && shards[c].comm == mesh->ep;
        if (unit->frozen) { /* biases of routers */
            int N = n->cut[0] ? n->kind[k].shared : 1;
            n->formula[0] += (double)unit->padded * (double)dt_dtype_size(unit->dtype) / N;
            continue;
        }
        n->kind[k].psi += (int64_t)unit->count;
        n->kind[k].padded += (int64_t)unit->padded;
    }
    for (int k = 0; k < 2; k++) {
        int leaves = c->zero.tree ? c->accum * all[k] : 0;
        for (int i = 0; i < 3; i++)
            n->formula[i] +=
                (double)n->kind[k].padded * n->bytes[i] / (n->cut[i] ? n->kind[k].shared : 1);
        for (; leaves; leaves >>= 1) n->levels += (double)n->kind[k].padded * n->bytes[1] / all[k];
    }
    n->formula[1] += n->levels;
}

static inline double train_now(dt_ctx *ctx) {
    return dt_ctx_host(ctx)->now(dt_ctx_host(ctx)->user);
}

/* One whole step on every rank: read, forward and backward, update, measure. A skipped one changed
   nothing but the loss scale: it is to be run again, with the same number and sequences, and a run
   that skips ends as one that began with the smaller scale. */
static inline train_row train_step(const train_config *c, gpt *model, dt_zero *optimizer,
    const dt_mesh *mesh, dt_text *text, train_batch *b, int64_t step) {
    dt_ctx *ctx = model->ctx;
    double start = train_now(ctx), in_comm = dt_comm_seconds(ctx);
    train_row row = {
        .step = step, .lr = dt_lr(c->lr, step), .val_loss = NAN, .batch = b->order.batch
    };
    size_t sent[DT_AXES], micros = (size_t)(b->accum * b->order.replicas);
    for (int a = 0; a < DT_AXES; a++) sent[a] = dt_comm_bytes(ctx, (dt_axis)a);
    train_peaks(ctx, c);
    dt_memory_reset_peak(ctx);
    char mark[32];
    snprintf(mark, sizeof mark, "step %lld", (long long)step);
    dt_trace_begin(ctx, mark);
    dt_trace_begin(ctx, "read data");
    train_batch_read(b, text, model, mesh->replica);
    dt_trace_end(ctx);
    row.bubble = train_forward_backward(model, mesh, b, step);
    /* in one order, however the batch is split */
    for (size_t m = 0; m < micros; m++) row.loss += b->losses[m];
    if (dt_error(ctx) == DT_OK && !isfinite(row.loss))
        dt_fail(ctx, DT_ERR_NUMERIC, "step %lld: the loss is %s%s", (long long)step,
            isnan(row.loss) ? "NaN" : "infinite",
            step > 1     ? "; a smaller learning rate may help"
            : c->weights ? " before any update: are all weights of the file finite?"
                         : " before any update");
    dt_trace_begin(ctx, "optimizer");
    dt_step_info info = dt_zero_step(optimizer, row.lr);
    if (model->config.experts) train_routes(model, mesh, &row);
    train_balance(model, mesh, b, info.skipped);
    row.grad_norm = info.grad_norm;
    row.skipped = info.skipped;
    dt_trace_end(ctx);
    train_account(ctx, sent, &row);
    dt_trace_end(ctx);
    double seconds = train_now(ctx) - start;
    row.ms = 1000 * seconds;
    row.comm = seconds > 0 ? (dt_comm_seconds(ctx) - in_comm) / seconds : 0;
    row.tokens_per_s = (double)b->order.batch * (double)b->T / (row.ms / 1000);
    return row;
}

/* ==== Stages by cost
   ============================================================================================== */

/* Cuts the model so that the slowest stage is as fast as can be: rank 0 times embedding, attention,
   MLP and head, each a stage of a model of one layer, and tells the others. */
enum { TRAIN_PARTS = 4, TRAIN_TIMINGS = 3 };
typedef struct train_timing {
    gpt *model;
    dt_shape shape;
    int32_t *ids;
} train_timing;

static inline dt_tensor *train_timing_stage(dt_tensor *x, int stage, int micro, void *user) {
    train_timing *t = (train_timing *)user;
    dt_ctx *ctx = t->model->ctx;
    dt_tensor *ids = dt_input(ctx, DT_I32, t->shape, t->ids);
    (void)micro;
    return gpt_stage_at(
        t->model, stage, x, (gpt_tokens){ .ids = ids }, ids, (double)dt_count(t->shape));
}

static inline dt_status train_time_parts(
    dt_ctx *ctx, gpt_config sizes, dt_shape tokens, double *seconds) {
    static const int cut[TRAIN_PARTS + 1] = { 0, 1, 2, 3, 4 };
    dt_span spans[2 * TRAIN_PARTS];
    sizes.layers = 1;
    sizes.tied = 0; /* on one rank the copies would have one name */
    sizes.tp = sizes.cp = sizes.pp = sizes.ep = NULL;
    sizes.router_bias = 0;
    sizes.stages = TRAIN_PARTS;
    sizes.cut = cut;
    gpt model = gpt_register(ctx, sizes);
    size_t bytes = (size_t)dt_count(tokens) * sizeof(int32_t);
    train_timing timing = { &model, tokens,
        (int32_t *)dt_alloc(ctx, DT_MEM_HOST, bytes, "timing") };
    if (timing.ids) memset(timing.ids, 0, bytes);
    dt_schedule *s = dt_schedule_make(
        ctx, (dt_schedule_desc){
                 .kind = DT_SCHEDULE_INTERLEAVED, .ranks = 1, .micros = 1, .chunks = TRAIN_PARTS });
    for (int i = 0; i < TRAIN_TIMINGS && dt_error(ctx) == DT_OK; i++) {
        dt_pipe_run(
            ctx, (dt_pipe_desc){
                     .schedule = s, .run = train_timing_stage, .user = &timing, .spans = spans });
        const dt_action *a = dt_schedule_actions(s, 0);
        double now[TRAIN_PARTS] = { 0 };
        for (int k = 0; k < dt_schedule_count(s, 0); k++)
            now[a[k].stage] += spans[k].end - spans[k].begin;
        for (int k = 0; k < TRAIN_PARTS; k++)
            seconds[k] = i == 0 || now[k] < seconds[k] ? now[k] : seconds[k];
    }
    dt_free(ctx, DT_MEM_HOST, timing.ids, bytes);
    return dt_error(ctx);
}

/* [collective: world] cut: (stages + 1) */
static inline void train_cut_by_cost(dt_ctx *ctx, gpt_config sizes, dt_shape tokens, int *cut) {
    double seconds[TRAIN_PARTS] = { 0 }, costs[2 * GPT_MAX_LAYERS + 2];
    char why[300];
    int items = gpt_items(sizes);
    if (dt_ctx_rank(ctx) == 0) {
        dt_ctx *alone = dt_ctx_make((dt_ctx_desc){ .kernels = dt_ctx_kernels(ctx),
            .stream = dt_ctx_stream(ctx),
            .host = dt_ctx_host(ctx) });
        if (!alone || train_time_parts(alone, sizes, tokens, seconds) != DT_OK)
            dt_fail(ctx, DT_ERR_MEM, "timing the parts of the model: %s",
                alone ? dt_error_text(alone) : "no memory");
        dt_ctx_free(alone);
    }
    dt_sum_doubles(dt_world(ctx), seconds, TRAIN_PARTS);
    for (int i = 0; i < items; i++) costs[i] = seconds[i == 0 ? 0 : i == items - 1 ? 3 : 2 - i % 2];
    if (dt_error(ctx) == DT_OK &&
        dt_stage_cut(costs, items, sizes.stages, cut, why, sizeof why) != DT_OK)
        dt_fail(ctx, DT_ERR_ARG, "%s", why);
}

/* ==== A drawing of a step
   ========================================================================================= */

/* What each stage took on average, as the simulator wants it: forward, input, weight. A whole
   backward is input. */
static inline void train_stage_costs(const dt_schedule *s, const dt_span *spans, double *costs) {
    int micros = dt_schedule_micros(s);
    memset(costs, 0, 3 * (size_t)dt_schedule_stages(s) * sizeof *costs);
    for (int r = 0; r < dt_schedule_ranks(s); r++)
        for (int i = 0; i < dt_schedule_count(s, r); i++) {
            const dt_action *a = &dt_schedule_actions(s, r)[i];
            const dt_span *t = &spans[dt_schedule_first(s, r) + i];
            int k = a->phase == DT_FORWARD ? 0 : a->phase == DT_BACKWARD_WEIGHT ? 2 : 1;
            costs[3 * a->stage + k] += (t->end - t->begin) / micros;
        }
}

/* The step that was measured last, on rank 0's pipeline, above what its own mean costs would
   give. */
static inline void train_draw(
    dt_ctx *ctx, const dt_mesh *mesh, const train_batch *b, const char *path) {
    int n = dt_schedule_first(b->schedule, mesh->sizes.pp),
        stages = dt_schedule_stages(b->schedule);
    size_t bytes = (size_t)n * sizeof(dt_span) + 3 * (size_t)stages * sizeof(double);
    dt_span *spans = (dt_span *)dt_alloc(ctx, DT_MEM_HOST, bytes, "a drawing");
    dt_timeline lines[2] = { { "measured", b->schedule,
                                 b->spans + dt_schedule_count(b->schedule, mesh->at.pp) },
        { "simulated with the mean costs of its stages", b->schedule, spans } };
    if (!spans) return;
    double *costs = (double *)(void *)(spans + n);
    dt_schedule_costs c = { .stages = costs };
    train_stage_costs(b->schedule, lines[0].spans, costs);
    if (dt_schedule_simulate(b->schedule, c, spans) == DT_OK) dt_schedule_svg(ctx, path, lines, 2);
    dt_free(ctx, DT_MEM_HOST, spans, bytes);
}

/* ==== The loop
   ==================================================================================================== */

/* Room for the largest step. */
static inline void train_batch_make(
    const train_config *c, gpt *model, const dt_mesh *mesh, dt_text *text, train_batch *b) {
    dt_ctx *ctx = model->ctx;
    size_t tokens = (size_t)(c->accum * (int64_t)c->micro_batch * b->own) * sizeof(int32_t);
    b->ids = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, tokens, "ids");
    b->labels = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, tokens, "labels");
    b->index = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, tokens, "index");
    b->whole =
        (int32_t *)dt_alloc(ctx, DT_MEM_HOST, 3 * (size_t)b->T * sizeof(int32_t), "a sequence");
    size_t losses = (size_t)(c->accum * mesh->replicas) * sizeof(double);
    b->losses = (double *)dt_alloc(ctx, DT_MEM_HOST, losses, "losses");
    if (model->config.router_bias > 0)
        b->experts_bytes = (size_t)(model->config.layers * model->config.experts) * sizeof(double);
    b->experts = (double *)dt_alloc(ctx, DT_MEM_HOST, b->experts_bytes, "tokens of each expert");
    if (dt_error(ctx) != DT_OK) return;
    if (b->experts) memset(b->experts, 0, b->experts_bytes);
    for (int i = 0; i < model->config.layers && b->experts; i++)
        model->layer[i].route.experts = b->experts + i * model->config.experts;
    b->order = (dt_order){ .sequences = dt_text_sequences(text),
        .micro_batch = c->micro_batch,
        .replicas = mesh->replicas };
    if (c->shuffle)
        b->shuffled = dt_sampler_make(ctx, (dt_sampler_desc){ .samples = b->order.sequences,
                                               .replicas = 1,
                                               .seed = dt_ctx_seed(ctx),
                                               .shuffle = 1 });
}

static inline void train_batch_free(
    dt_ctx *ctx, const train_config *c, const dt_mesh *mesh, train_batch *b) {
    size_t tokens = (size_t)(c->accum * (int64_t)c->micro_batch * b->own) * sizeof(int32_t);
    dt_sampler_free(b->shuffled);
    dt_schedule_free(b->schedule);
    dt_free(ctx, DT_MEM_HOST, b->spans, b->spans_bytes);
    dt_free(ctx, DT_MEM_HOST, b->experts, b->experts_bytes);
    dt_free(ctx, DT_MEM_HOST, b->ids, tokens);
    dt_free(ctx, DT_MEM_HOST, b->labels, tokens);
    dt_free(ctx, DT_MEM_HOST, b->index, tokens);
    dt_free(ctx, DT_MEM_HOST, b->whole, 3 * (size_t)b->T * sizeof(int32_t));
    dt_free(ctx, DT_MEM_HOST, b->losses, (size_t)(c->accum * mesh->replicas) * sizeof(double));
}

/* A schedule for so many micro-batches, if the one that is there is for others. */
static inline void train_batch_schedule(
    dt_ctx *ctx, const train_config *c, const dt_mesh *mesh, train_batch *b) {
    if (dt_schedule_micros(b->schedule) == b->accum) return;
    dt_schedule_free(b->schedule);
    dt_free(ctx, DT_MEM_HOST, b->spans, b->spans_bytes);
    b->schedule = dt_schedule_make(ctx, (dt_schedule_desc){ .kind = c->schedule,
                                            .ranks = mesh->sizes.pp,
                                            .micros = b->accum,
                                            .chunks = c->chunks });
    int actions = dt_schedule_count(b->schedule, mesh->at.pp) +
                  dt_schedule_first(b->schedule, mesh->sizes.pp);
    b->spans_bytes = (size_t)actions * sizeof *b->spans;
    b->spans = (dt_span *)dt_alloc(ctx, DT_MEM_HOST, b->spans_bytes, "times of a schedule");
}

/* How many sequences the next step takes, and after which. */
static inline void train_batch_next(
    dt_ctx *ctx, const train_config *c, const dt_mesh *mesh, train_batch *b, dt_batch_ramp ramp) {
    b->order.before += b->order.batch; /* of the step before */
    b->order.batch = dt_batch_ramp_size(ramp, b->order.before);
    b->accum = (int)(b->order.batch / ((int64_t)b->order.micro_batch * b->order.replicas));
    train_batch_schedule(ctx, c, mesh, b);
}

/* ==== Checkpoints
   ================================================================================================= */

/* What a run saves beside its tensors: where it is in the data, and which data. */
typedef struct train_saved {
    dt_checkpoint *checkpoint; /* NULL: none is wanted */
    double samples;            /* sequences that all steps have taken */
    double tokens;             /* of the data */
    dt_saved list[2];
    char *config;    /* what transformers read beside the weights */
    int there;       /* what was loaded lies in train_config.save */
    int stopped;     /* all ranks have agreed to end early */
    char told[1024]; /* the checkpoint that was told of last */
    const train_config *run;
    gpt *model;
} train_saved;

static inline void train_place(const dt_tensor *param, dt_file_place *place, void *user) {
    gpt_file_place(((train_saved *)user)->model, param, place);
}

static inline void train_progress(double done, void *user) {
    const train_config *c = ((train_saved *)user)->run;
    if (c->on_progress) c->on_progress(done, c->user);
}

static inline void train_saved_open(
    const train_config *c, gpt *model, dt_zero *optimizer, dt_text *text, train_saved *s) {
    dt_ctx *ctx = model->ctx;
    s->run = c;
    s->model = model;
    s->tokens = (double)dt_text_tokens(text);
    s->list[0] = (dt_saved){ "samples", &s->samples, 1 };
    s->list[1] = (dt_saved){ "tokens", &s->tokens, 1 };
    if (c->dry || (!c->save && !c->resume)) return;
    if (!model->config.experts) s->config = gpt_config_text(model);
    s->checkpoint = dt_checkpoint_open(optimizer, (dt_checkpoint_desc){ .dir = c->save,
                                                      .keep = c->keep,
                                                      .background = c->background,
                                                      .saved = s->list,
                                                      .n_saved = 2,
                                                      .config = c->settings,
                                                      .beside = s->config,
                                                      .place = train_place,
                                                      .progress = train_progress,
                                                      .user = s });
    if (dt_error(ctx) != DT_OK) return;
    int64_t step = c->again ? dt_checkpoint_load(s->checkpoint, NULL) : 0;
    s->there = step > 0;
    if (step == 0 && c->resume) step = dt_checkpoint_load(s->checkpoint, c->resume);
    /* one command for the first start too */
    int same = c->save && c->resume && strcmp(c->save, c->resume) == 0;
    if (step == 0 && c->resume && !same)
        dt_fail(ctx, DT_ERR_IO, "--resume %s: there is no checkpoint", c->resume);
    const char *path = dt_checkpoint_path(s->checkpoint);
    size_t n = c->save ? strlen(c->save) : 0;
    while (n > 1 && c->save[n - 1] == '/') n--;
    s->there |= n > 0 && strncmp(path, c->save, n) == 0 && path[n] == '/';
    if (dt_error(ctx) == DT_OK && s->tokens != (double)dt_text_tokens(text))
        dt_fail(ctx, DT_ERR_ARG, "%s: it has seen data of %.0f tokens, and these have %lld", path,
            s->tokens, (long long)dt_text_tokens(text));
    snprintf(s->told, sizeof s->told, "%s", path);
    if (dt_error(ctx) == DT_OK && c->on_resume)
        c->on_resume(ctx, step, path, dt_checkpoint_config(s->checkpoint), c->user);
}

/* Tells of a checkpoint once it is there, which in the background is some steps later. */
static inline void train_saved_tell(const train_config *c, dt_ctx *ctx, train_saved *s) {
    const char *path = dt_checkpoint_path(s->checkpoint);
    if (dt_error(ctx) != DT_OK || strncmp(s->told, path, sizeof s->told) == 0) return;
    snprintf(s->told, sizeof s->told, "%s", path);
    if (dt_ctx_rank(ctx) == 0 && c->on_save) c->on_save(ctx, path, c->user);
}

static inline void train_saved_close(const train_config *c, dt_ctx *ctx, train_saved *s) {
    while (!dt_checkpoint_poll(s->checkpoint))
        dt_ctx_host(ctx)->sleep(dt_ctx_host(ctx)->user, 1e-3);
    train_saved_tell(c, ctx, s);
    dt_checkpoint_close(s->checkpoint);
    if (s->config) dt_free(ctx, DT_MEM_HOST, s->config, strlen(s->config) + 1);
}

/* After a step: 1 if the run is to end here. What a signal told one rank, all ranks do. */
static inline int train_save(
    const train_config *c, dt_ctx *ctx, train_saved *s, const train_batch *b, int64_t step) {
    double stop = c->stop && __atomic_load_n(c->stop, __ATOMIC_RELAXED);
    if (!s->checkpoint) return 0;
    if (c->stop) dt_sum_doubles(dt_world(ctx), &stop, 1);
    if (stop > 0) __atomic_store_n(c->stop, 1, __ATOMIC_RELAXED);
    s->samples = (double)(b->order.before + b->order.batch);
    dt_checkpoint_poll(s->checkpoint);
    int due = step == c->stop_at || stop > 0 || (c->save_every && step % c->save_every == 0);
    train_saved_tell(c, ctx, s);
    if (c->save && due) dt_checkpoint_save(s->checkpoint);
    train_saved_tell(c, ctx, s);
    s->stopped = stop > 0;
    return s->stopped;
}

/* The steps of a run, after everything has been made. */
static inline void train_steps(const train_config *c, gpt *model, dt_zero *optimizer,
    const dt_mesh *mesh, dt_text *text, dt_text *val, train_batch *b, train_saved *saved) {
    dt_ctx *ctx = model->ctx;
    dt_batch_ramp ramp = c->ramp;
    ramp.batch = (int64_t)c->micro_batch * c->accum * mesh->replicas;
    b->order.before = (int64_t)saved->samples;
    int64_t first = dt_zero_steps(optimizer) + 1;
    /* a copy of it */
    if (first > c->stop_at && c->save && !saved->there) dt_checkpoint_save(saved->checkpoint);
    for (int64_t step = first, over = 0; step <= c->stop_at && !over && dt_error(ctx) == DT_OK;
         step++) {
        train_batch_next(ctx, c, mesh, b, ramp);
        if (dt_error(ctx) != DT_OK) break;
        train_row row = train_step(c, model, optimizer, mesh, text, b, step);
        while (row.skipped && dt_error(ctx) == DT_OK) {
            if (c->zero.loss_scale > 0)
                dt_fail(ctx, DT_ERR_NUMERIC,
                    "step %lld: gradients are not finite under a loss scale of %g, which is "
                    "fixed: use a smaller one, or a dynamic one",
                    (long long)step, c->zero.loss_scale);
            row = train_step(c, model, optimizer, mesh, text, b, step);
        }
        if (val && (step == c->stop_at || (c->eval_every && step % c->eval_every == 0)))
            row.val_loss = train_eval(model, mesh, val, b);
        dt_comm_step(dt_world(ctx));
        if (dt_error(ctx) == DT_OK && dt_ctx_rank(ctx) == 0) c->on_step(ctx, &row, c->user);
        if (dt_error(ctx) == DT_OK) over = train_save(c, ctx, saved, b, step);
    }
}

/* What every rank runs. user: a train_config. */
static inline dt_status train(dt_ctx *ctx, void *user) {
    const train_config *c = (const train_config *)user;
    dt_listener listener = { .failed = train_failed, .user = user };
    int cut[GPT_MAX_STAGES + 1];
    int64_t T = c->seq ? c->seq : c->model.seq;
    dt_listen(ctx, &listener);
    if (c->dry) dt_dry_begin(ctx, &c->dry[dt_ctx_rank(ctx)]);
    dt_mesh mesh = dt_mesh_make(ctx, c->mesh);
    gpt_config sizes = c->model;
    sizes.tp = mesh.tp;
    sizes.cp = mesh.cp;
    sizes.pp = mesh.pp;
    sizes.ep = mesh.ep;
    sizes.stages = mesh.sizes.pp * (c->chunks ? c->chunks : 1);
    memcpy(cut, c->cut, sizeof cut);
    if (c->by_cost && !c->dry)
        train_cut_by_cost(ctx, sizes, DT_SHAPE(c->micro_batch, T / mesh.sizes.cp), cut);
    sizes.cut = sizes.stages > 1 ? cut : NULL;
    gpt model = gpt_register(ctx, sizes);
    if (dt_error(ctx) != DT_OK) {
        dt_unlisten(ctx, &listener);
        return dt_error(ctx);
    }
    if (c->trace) dt_trace_start(ctx, 0);
    dt_zero_desc desc = c->zero;
    desc.mesh = &mesh;
    dt_zero *optimizer = dt_zero_make(ctx, desc);
    train_batch b = { .T = T, .own = T / mesh.sizes.cp };
    train_saved saved = { .checkpoint = NULL };
    if (c->weights) gpt_load(&model, c->weights);
    dt_text *text = train_open(ctx, &c->data, (int)T), *val = train_open(ctx, &c->val, (int)T);
    train_batch_make(c, &model, &mesh, text, &b);
    if (dt_error(ctx) == DT_OK) train_saved_open(c, &model, optimizer, text, &saved);
    if (dt_error(ctx) == DT_OK) train_steps(c, &model, optimizer, &mesh, text, val, &b, &saved);
    train_saved_close(c, ctx, &saved);
    if (c->trace) dt_trace_write(dt_world(ctx), c->trace);
    if (c->svg && !c->dry && dt_error(ctx) == DT_OK && dt_ctx_rank(ctx) == 0)
        train_draw(ctx, &mesh, &b, c->svg);
    int first = mesh.at.dp == 0 && mesh.at.cp == 0;
    /* a model that is half trained is in the checkpoint, and nowhere else */
    int whole = !c->dry && !saved.stopped;
    if (c->export_to && whole && dt_error(ctx) == DT_OK)
        gpt_export(&model, optimizer, c->export_to);
    if (c->at_end && !saved.stopped && dt_error(ctx) == DT_OK && (first || c->zero.stage == 3))
        c->at_end(ctx, &model, c->user);
    if (c->need && dt_error(ctx) == DT_OK) {
        train_peaks(ctx, c);
        train_formula(ctx, c, &mesh);
    }
    train_batch_free(ctx, c, &mesh, &b);
    dt_unlisten(ctx, &listener);
    return dt_error(ctx);
}

#endif /* TRAIN_H */
