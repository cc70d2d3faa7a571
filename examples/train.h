/* train.h - the training loop that train_gpt.c and demo.c share - public domain or MIT, at your
   choice

   Include train.h after dt_zero.h and gpt.h. All functions are static. Every rank runs train():

       train_config config = { ... };
       dt_run((dt_run_desc){ .ranks = 8 }, train, &config);

   train() opens the data and runs all steps; after each step rank 0 passes the step's metrics to
   config.on_step. train_step runs one step: it reads the batch, runs forward and backward of all
   micro-batches in the order of the pipeline schedule (gradient accumulation), updates the
   parameters and measures the metrics. */
#ifndef TRAIN_H
#define TRAIN_H

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "gpt_files.h"
#include "lora_files.h"

/* Indices of train_row.mem, whose values are in bytes. PARAMS, GRADS and OPTIM are live bytes at
   the end of the step; ACTS, COMM and PEAK (the peak of all memory) are peaks of the step. Each
   value is the largest over the ranks. */
enum { TRAIN_PARAMS = 0, TRAIN_GRADS, TRAIN_OPTIM, TRAIN_ACTS, TRAIN_COMM, TRAIN_PEAK, TRAIN_MEMS };

/* The metrics of one step, which are the same in every layout, except times and bytes. */
typedef struct train_row {
    int64_t step;     /* step number, from 1 */
    double loss;      /* in nats, mean over all labels of the step, before the update */
    double grad_norm; /* gradient norm before clipping */
    double lr;
    double ms, tokens_per_s; /* of the step, by rank 0's clock */
    double comm;             /* fraction of `ms` in communication on rank 0, waits included */
    double bubble;           /* fraction of the pipeline schedule's time in which ranks were idle */
    double balance, z;       /* weighted MoE side losses, which are not part of `loss` */
    double mtp;              /* mean loss of the modules of multi-token prediction, not in `loss` */
    double dropped;          /* fraction of the router's choices dropped at the expert capacity */
    double val_loss;         /* NaN if no validation followed this step */
    double val_bits; /* bits per byte of the validation text; NaN if its bytes are not known */
    double epochs[DATA_SOURCES]; /* epochs of each source after this step */
    int skipped; /* 1: gradients overflowed under the loss scale; no parameter changed */
    int outlier; /* DT_OUTLIER_*: the step's loss or norm was an outlier; no parameter changed */
    double outlier_z; /* its z-score */
    double mem[TRAIN_MEMS];
    double bytes[DT_AXES]; /* bytes that a rank sent over each axis, the largest over the ranks */
    int64_t batch;         /* sequences of this step */
} train_row;

/* The memory footprint of one rank: as counted in the run, and by the formula of the ZeRO paper
   (arXiv:1910.02054). For Psi parameters and N ranks, a memory class with b bytes per parameter
   takes Psi b bytes if it is replicated, and Psi b / N bytes if it is sharded. */
typedef struct train_footprint {
    /* live bytes at the end of the run, or at its first failure if the run fails, and peaks until
       then */
    dt_memory memory;
    /* as in train_row, of this rank alone; the largest over the steps */
    double mem[TRAIN_MEMS], sent[DT_AXES];
    /* [0] is for dense parameters, [1] for those of experts, sharded over ep. shard_ranks is N.
       params is the number of elements on this rank. padded is the number of elements on this rank
       after each bucket is padded to a multiple of N * DT_PIECE. */
    struct {
        int64_t params, padded;
        int shard_ranks;
    } kind[2];
    int bytes[3];       /* bytes per parameter of the classes params, grads, optim */
    int sharded[3];     /* for each class: 1 if each rank holds 1/N of it, else 0 */
    double formula[3];  /* for each class: padded * bytes, divided by N if sharded */
    double tree_levels; /* bytes that zero.tree (--reduce tree) adds to class grads */
    double one_state;   /* bytes that class optim lacks, because Muon has one state for a matrix */
} train_footprint;

/* Where a resumed run continues in the data. */
typedef struct train_position {
    int64_t consumed;  /* sequences that the run has used so far, of its present length */
    int64_t sequences; /* sequences of the data */
    int64_t tokens;    /* tokens of the data, and of the data at the time of the checkpoint */
    int64_t tokens_then;
    int seq_then; /* tokens per sequence at the time of the checkpoint */
} train_position;

typedef struct train_config {
    gpt_config model; /* train() fills in the groups and the stages */
    dt_mesh_desc mesh;
    /* with mesh.pp: `schedule` is a DT_SCHEDULE_*; `chunks` is the number of stages per rank, where
       0 means 1 */
    int schedule, chunks;
    const char *schedule_file; /* NULL, or a file of dt_schedule_read, instead of `schedule` */
    int stage_begin[GPT_MAX_STAGES + 1]; /* as in gpt_config, for pp * chunks stages */
    /* 1: before the first step, measure the time of each kind of item (embedding, attention, MLP,
       head; see gpt_config.stage_begin) and compute stage_begin from these times */
    int partition_by_cost;
    dt_zero_desc zero; /* train() fills in the mesh */
    dt_lr_desc lr;
    double adamw_lr_scale; /* zero.optimizer DT_MUON: factor of lr of AdamW's parameters; 0: 1 */
    dt_batch_ramp ramp;    /* no ramp if ramp.samples is 0; train() fills in ramp.batch */
    const char *weights;   /* path of initial weights for gpt_load; NULL: random weights */
    train_files data, val; /* val.count 0: no validation */
    int seq;               /* tokens per sequence; 0 means model.seq */
    /* Each step reads micro_batch * accum sequences per replica, or fewer during the ramp. */
    int micro_batch, accum;
    /* 1: shuffle the sequences in each epoch, with the context's seed */
    int shuffle;
    /* 1: while a step runs, the kernel reads the sequences of the next one (data_will_need) */
    int read_ahead;
    /* if n > 0, each sequence is split into documents, and attention and positions stay inside a
       document */
    data_end documents;
    /* (model.vocab) bytes of text that each token stands for, for bits per byte; NULL: not known
       if the data is token shards, else 1 */
    const int32_t *token_bytes;
    int64_t stop_at;       /* number of the last step; 0: only validate, export and call at_end */
    int64_t eval_every;    /* number of steps between validations; 0: only after the last step */
    const char *export_to; /* path for gpt_export at the end; NULL: none */
    /* LoRA: export_to is a folder for the adapters alone, unless `merge` is 1 */
    const char *adapter;  /* folder of the initial adapters for gpt_lora_load; NULL: none */
    int merge;            /* 1: add the adapters to the weights before the export */
    const char *save;     /* folder for checkpoints; NULL: none */
    int64_t save_every;   /* number of steps between checkpoints; 0: only after the last step */
    int keep, background; /* as in dt_checkpoint_desc */
    const char *settings; /* text that is saved with each checkpoint; NULL: none */
    /* A checkpoint, or a folder of checkpoints, from which to resume; NULL: start from step 1. The
       folder may be empty only if it is the same folder as `save`. */
    const char *resume;
    /* A flag, or NULL. A signal handler may set the flag to 1 on any rank. At the end of the step
       in which this happens, every rank's flag becomes 1, and the run saves a checkpoint and
       ends. */
    int restarted;
    /* A flag, or NULL. A signal handler may set the flag to 1 on any rank. At the end of that step
       every rank's flag becomes 1, the run saves a checkpoint and ends. */
    int *stop;
    const char *trace; /* path for dt_trace_write at the end; NULL: no trace */
    const char *svg;   /* path for a drawing of the last step's pipeline; NULL: none */
    /* For a dry run, which counts memory and bytes sent but computes nothing: an array with one
       zeroed element per rank. NULL means a normal run. */
    dt_dry *dry;
    /* NULL, or an array with one zeroed element per rank, which train() fills in. If the ranks are
       forked processes, the caller's array is not filled in. */
    train_footprint *footprint;
    void (*on_step)(dt_ctx *ctx, const train_row *row, void *user); /* on rank 0, each step */
    /* called on rank 0 after a validation without steps (stop_at 0), with row->step 0; may be NULL */
    void (*on_eval)(dt_ctx *ctx, const train_row *row, void *user);
    /* Called on all ranks before the first step. `step` is the checkpoint's step, or 0 if there was
       no checkpoint. May be NULL. */
    void (*on_resume)(dt_ctx *ctx, int64_t step, const char *path, const char *settings,
        const train_position *at, void *user);
    void (*on_save)(dt_ctx *ctx, const char *path, void *user); /* called on rank 0; may be NULL */
    /* called on rank 0 during a save, with the fraction that is done; may be NULL */
    void (*on_progress)(double done, void *user);
    /* Called at the end on the ranks with dp and cp coordinate 0, which together hold one complete
       model, and at ZeRO-3 and with expert folding on all ranks. May be NULL. */
    void (*at_end)(dt_ctx *ctx, gpt *model, void *user);
    void *user;
} train_config;

enum { TRAIN_EVAL_SEQUENCES = 64 }; /* largest number of validation sequences */

// ==== One step ===================================================================================

/* The batch of one step on one rank: this rank's tokens of each of the a * b sequences that its
   replica reads, where b is the micro-batch size and a the number of micro-batches. */
typedef struct train_batch {
    dt_data_order order; /* of positions in the run: its number of sequences is infinite */
    const data_end *documents;
    data_set *ahead;         /* with read_ahead: the data again, for the next step; else NULL */
    int accum;               /* micro-batches of this step; buffers are for the largest step */
    int64_t T, local_tokens; /* tokens per sequence; T / cp of them are on this rank */
    int32_t *ids, *labels;   /* (a,b,local_tokens) */
    int32_t *index;          /* (a,b,local_tokens): index of each token among the step's tokens */
    int32_t *positions;      /* with documents: (a,b,local_tokens), in its document; else NULL */
    int32_t *document;       /* the same: number of each token's document */
    int32_t *all_positions, *all_documents; /* with cp, of all its ranks: (a,b,T), as dt_cp_desc */
    /* (7,T) of one sequence: ids, labels, token indices, positions, documents, next and ahead */
    int32_t *sequence;
    /* (2,mtp,a,b,local_tokens): gpt_tokens.next and .ahead of each module; NULL without modules */
    int32_t *mtp_ids;
    size_t mtp_bytes;
    double *losses;        /* (a,replicas): loss of each micro-batch of the step */
    double *expert_tokens; /* (layers,E): tokens per expert, for the router bias, or NULL */
    size_t experts_bytes;
    dt_schedule *schedule; /* for `accum` micro-batches */
    dt_span *spans;        /* times of this rank's actions, then of all ranks' actions */
    size_t spans_bytes;
} train_batch;

/* Stores the positions and documents of a sequence of the batch, whose number in the batch is
   `row`. */
static inline void train_documents_store(train_batch *b, const gpt *model, int64_t row) {
    int c = dt_comm_size(model->config.cp);
    const int32_t *from[2] = { b->sequence + 3 * b->T, b->sequence + 4 * b->T };
    int32_t *local[2] = { b->positions, b->document },
            *all[2] = { b->all_positions, b->all_documents };
    for (int i = 0; i < 2; i++) {
        dt_cp_shard(model->config.cp_kind, 1, b->T, model->config.cp, from[i],
            local[i] + row * b->local_tokens);
        for (int64_t t = 0; all[i] && t < b->T; t++)
            all[i][row * b->T + t] = from[i][dt_cp_token(
                model->config.cp_kind, b->T, c, (int)(t / b->local_tokens), t % b->local_tokens)];
    }
}

/* Returns the tokens `next` (which 0) or `ahead` (which 1) of module k for all micro-batches. */
static inline int32_t *train_mtp_ids(const train_batch *b, const gpt *model, int k, int which) {
    size_t each = b->mtp_bytes / sizeof(int32_t) / 2;
    return b->mtp_ids + (size_t)which * each + (size_t)k * (each / (size_t)model->config.mtp);
}

/* Reads the sequence at a position of a data set and stores this rank's tokens of it as sequence
   number `row` of the batch. k is the number of the sequence within the step, for b->index. The
   labels are shifted before the sequence is sharded over cp, so that the last token of a shard also
   has the right label. */
static inline dt_status train_sequence_read(
    train_batch *b, data_set *text, const gpt *model, int64_t position, int64_t k, int64_t row) {
    int64_t T = b->T, at = row * b->local_tokens;
    int32_t *from[5];
    int32_t *to[3] = { b->ids + at, b->labels + at, b->index + at };
    const data_end whole = { .n = 0 };
    int is_example = 0;
    for (int i = 0; i < 5; i++) from[i] = b->sequence + i * T;
    dt_status status = data_read(text, position, from[0], from[1], &is_example);
    if (status != DT_OK) return status;
    for (int64_t t = 0; t < T; t++) from[2][t] = (int32_t)(k * T + t);
    if (b->documents->n) {
        const data_end *end = is_example ? &whole : b->documents;
        data_split_documents(end, T, from[0], from[1], from[3], from[4]);
        train_documents_store(b, model, row);
    }
    for (int i = 0; i < 3; i++)
        dt_cp_shard(model->config.cp_kind, 1, T, model->config.cp, from[i], to[i]);
    for (int d = 0; d < model->config.mtp; d++) {
        int32_t *both = b->sequence + 5 * T;
        gpt_ahead(from[0], from[1], b->documents->n ? from[4] : NULL, 1, T, d, both, both + T);
        for (int i = 0; i < 2; i++)
            dt_cp_shard(model->config.cp_kind, 1, T, model->config.cp, both + i * T,
                train_mtp_ids(b, model, d, i) + at);
    }
    return DT_OK;
}

static inline dt_status train_batch_read(
    train_batch *b, data_set *text, const gpt *model, int replica) {
    for (int j = 0; j < b->accum; j++)
        for (int i = 0; i < b->order.micro_batch; i++) {
            int64_t position = dt_data_order_sequence(b->order, 1, j, replica, i);
            int64_t k = position - b->order.consumed; /* index of the sequence in the step */
            int64_t row = (int64_t)j * b->order.micro_batch + i;
            dt_status status = train_sequence_read(b, text, model, position, k, row);
            if (status != DT_OK) return status;
        }
    return DT_OK;
}

/* Lets the kernel read the sequences of the next step, if it is as large as this one. */
static inline void train_batch_will_need(train_batch *b, int replica) {
    dt_data_order order = b->order;
    order.consumed += order.batch;
    for (int j = 0; b->ahead && j < b->accum; j++)
        for (int i = 0; i < order.micro_batch; i++)
            data_will_need(b->ahead, dt_data_order_sequence(order, 1, j, replica, i));
}

/* Returns the tokens of B sequences of the batch from number `row` on, for a forward pass. */
static inline gpt_tokens train_tokens(
    const train_batch *b, const gpt *model, int64_t B, int64_t row) {
    dt_ctx *ctx = model->ctx;
    dt_shape shape = DT_SHAPE(B, b->local_tokens);
    int64_t at = row * b->local_tokens;
    gpt_tokens t = { .ids = dt_input(ctx, DT_I32, shape, b->ids + at) };
    if (!b->documents->n) return t;
    t.positions = dt_input(ctx, DT_I32, shape, b->positions + at);
    t.documents = dt_input(ctx, DT_I32, shape, b->document + at);
    if (b->all_documents)
        t.context = dt_cp_make(ctx, model->config.cp,
            (dt_cp_desc){ .kind = model->config.cp_kind,
                .batch = B,
                .tokens = b->T,
                .positions = b->all_positions + row * b->T,
                .documents = b->all_documents + row * b->T });
    return t;
}

/* The arguments of a run of the pipeline, which every stage receives as `user`. */
typedef struct train_pass {
    gpt *model;
    const dt_mesh *mesh;
    train_batch *b;
    int64_t step;
    double denominator;
    /* The fields from `text` on are for validation, where a micro-batch has one sequence. `text` is
       NULL in a training step. */
    data_set *text;
    int64_t sequences;
    const train_config *config;
    double sums[3]; /* of the validation: loss, labels, bytes of their text */
} train_pass;

static inline dt_tensor *train_stage(dt_tensor *x, int stage, int micro, void *user) {
    train_pass *p = (train_pass *)user;
    train_batch *b = p->b;
    dt_ctx *ctx = p->model->ctx;
    dt_shape shape = DT_SHAPE(b->order.micro_batch, b->local_tokens);
    int64_t at = micro * dt_count(shape);
    dt_trace_begin(ctx, "forward");
    gpt_tokens t = train_tokens(b, p->model, shape.d[0], micro * shape.d[0]);
    t.sequences = b->order.batch;
    t.step = (uint64_t)p->step;
    if (p->model->config.dropout > 0 || p->model->config.lora.dropout > 0)
        t.index = dt_input(ctx, DT_I32, shape, b->index + at);
    int last = stage + 1 == gpt_stages(p->model->config);
    for (int k = 0; last && k < p->model->config.mtp; k++) {
        t.next[k] = dt_input(ctx, DT_I32, shape, train_mtp_ids(b, p->model, k, 0) + at);
        t.ahead[k] = dt_input(ctx, DT_I32, shape, train_mtp_ids(b, p->model, k, 1) + at);
    }
    x = gpt_stage_at(
        p->model, stage, x, t, dt_input(ctx, DT_I32, shape, b->labels + at), p->denominator);
    if (stage + 1 == gpt_stages(p->model->config))
        b->losses[micro * b->order.replicas + p->mesh->replica] = dt_item(x);
    dt_trace_end(ctx);
    return x;
}

/* Runs forward and backward of all micro-batches in the order of the schedule (gradient
   accumulation). Fills in b->losses (accum,replicas) on every rank. Returns the bubble fraction:
   the fraction of the time in which the ranks of this pipeline were idle; 0 without a pipeline. */
static inline double train_forward_backward(
    gpt *model, const dt_mesh *mesh, train_batch *b, int64_t step) {
    size_t micros = (size_t)(b->accum * b->order.replicas);
    dt_span *all = b->spans + dt_schedule_count(b->schedule, mesh->coord.pp);
    train_pass pass = { .model = model, .mesh = mesh, .b = b, .step = step };
    pass.denominator = dt_count_labels(
        mesh->data, b->labels, (size_t)(b->accum * b->order.micro_batch * b->local_tokens));
    if (dt_error(model->ctx) == DT_OK && pass.denominator == 0) {
        dt_fail(model->ctx, DT_ERR_ARG, "step %lld: no token of its sequences has a label",
            (long long)step);
        return 0;
    }
    memset(b->losses, 0, micros * sizeof *b->losses);
    dt_pipe_run(model->ctx, (dt_pipe_desc){ .schedule = b->schedule,
                                .comm = mesh->pp,
                                .run = train_stage,
                                .user = &pass,
                                .spans = b->spans });
    dt_sum_doubles(mesh->data, b->losses, micros);
    dt_sum_doubles(mesh->pp, b->losses, micros);
    if (mesh->sizes.pp == 1 || dt_pipe_gather_spans(mesh->pp, b->schedule, b->spans, all) != DT_OK)
        return 0;
    return dt_schedule_bubble_of(b->schedule, all, -1).idle_per_makespan;
}

/* Counts the labels of the validation sequence that the batch holds, and the bytes of their
   text. */
static inline void train_eval_count(train_pass *p) {
    const int32_t *labels = p->b->labels, *bytes = p->config->token_bytes;
    for (int64_t t = 0; t < p->b->local_tokens; t++) {
        if (labels[t] < 0) continue;
        p->sums[1] += 1;
        p->sums[2] += bytes && labels[t] < p->config->model.vocab ? bytes[labels[t]] : !bytes;
    }
}

static inline dt_tensor *train_eval_stage(dt_tensor *x, int stage, int micro, void *user) {
    train_pass *p = (train_pass *)user;
    dt_ctx *ctx = p->model->ctx;
    dt_shape shape = DT_SHAPE(1, p->b->local_tokens);
    int64_t s = (int64_t)micro * p->mesh->replicas + p->mesh->replica;
    if (train_sequence_read(p->b, p->text, p->model, s < p->sequences ? s : 0, 0, 0) != DT_OK)
        return NULL;
    gpt_tokens t = train_tokens(p->b, p->model, 1, 0);
    x = gpt_stage_at(
        p->model, stage, x, t, dt_input(ctx, DT_I32, shape, p->b->labels), p->denominator);
    if (stage + 1 < gpt_stages(p->model->config) || s >= p->sequences) return x;
    p->sums[0] += dt_item(x);
    train_eval_count(p);
    return x;
}

/* Sets row->val_loss, the mean loss over the labels of the first sequences of a text, and
   row->val_bits, its bits per byte: the loss of all labels in bits, divided by the bytes of text
   that the labels stand for. Sequence s runs on replica s mod R, where R is the number of replicas.
   ZeRO-3 gathers parameters collectively, so all replicas must run the same number of forwards: a
   replica that has no sequence left runs a sequence whose loss is not counted. */
static inline void train_eval(const train_config *c, gpt *model, const dt_mesh *mesh,
    data_set *text, train_batch *b, train_row *row) {
    dt_ctx *ctx = model->ctx;
    int64_t n = data_sequences(text);
    train_pass pass = { .model = model, .mesh = mesh, .b = b, .text = text, .config = c };
    pass.sequences = n < TRAIN_EVAL_SEQUENCES ? n : TRAIN_EVAL_SEQUENCES;
    /* the number of labels is known only after the forwards */
    pass.denominator = (double)(pass.sequences * b->T);
    dt_trace_begin(ctx, "validation");
    dt_pipe_run(
        ctx, (dt_pipe_desc){ .schedule = b->schedule,
                 .comm = mesh->pp,
                 .run = train_eval_stage,
                 .user = &pass,
                 .forward_micros = (int)((pass.sequences + mesh->replicas - 1) / mesh->replicas) });
    dt_sum_doubles(mesh->data, pass.sums, 3);
    dt_sum_doubles(mesh->pp, pass.sums, 3);
    dt_trace_end(ctx);
    double labels = pass.sums[1], bytes = pass.sums[2];
    int known = 1;
    for (const train_files *f = &c->val; f; f = f->next)
        known &= c->token_bytes || !f->shards || *f->encoded;
    row->val_loss = pass.sums[0] * (pass.denominator / labels);
    if (known && bytes > 0) row->val_bits = row->val_loss * labels / (log(2) * bytes);
}

/* Returns tp if its ranks route different tokens: under sp and with expert folding. Else NULL: all
   ranks of tp route the same tokens. */
static inline dt_comm *train_routing_tp(const gpt *model, const dt_mesh *mesh) {
    return model->config.sp || model->config.expert_tp ? mesh->tp : NULL;
}

/* Sums the router counts of the step over all ranks, sets the metrics of the router in *row, and
   clears the counts. In each MoE layer a token is routed by one rank of the data group (dp, ep and
   cp) and of train_routing_tp. Each layer is on one rank of pp. So the sum counts every token once
   per layer. */
static inline void train_router_metrics(gpt *model, const dt_mesh *mesh, train_row *row) {
    const gpt_config *c = &model->config;
    dt_comm *const groups[3] = { mesh->data, train_routing_tp(model, mesh), mesh->pp };
    double sums[4] = { 0 };
    for (int i = 0; i < gpt_all_layers(*c); i++) {
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

/* Sets row->mtp from the sums of the modules' losses on all ranks of the last stage, and clears the
   sums. */
static inline void train_mtp_metric(gpt *model, const dt_mesh *mesh, train_row *row) {
    row->mtp = model->mtp_loss;
    dt_sum_doubles(mesh->data, &row->mtp, 1);
    dt_sum_doubles(mesh->pp, &row->mtp, 1);
    model->mtp_loss = 0;
}

/* Updates the router biases by the step's token counts, and clears the counts. After a step that
   changes no parameter (an overflow or an outlier), only clears the counts. */
static inline void train_update_router_bias(
    gpt *model, const dt_mesh *mesh, train_batch *b, int skipped) {
    dt_comm *const groups[2] = { mesh->data, train_routing_tp(model, mesh) };
    if (!b->expert_tokens) return;
    if (skipped)
        memset(b->expert_tokens, 0, b->experts_bytes);
    else
        gpt_balance(model, groups, 2);
}

/* Sets row->mem and row->bytes, the step's memory and traffic; each value is the largest over all
   ranks. Sets this rank's own values in `own`, unless it is NULL. */
static inline void train_measure_bytes(
    dt_ctx *ctx, const size_t *sent_before, train_row *row, train_footprint *own) {
    dt_memory m = dt_memory_used(ctx);
    double all[TRAIN_MEMS + DT_AXES] = { (double)m.live[DT_MEM_PARAMS],
        (double)m.live[DT_MEM_GRADS], (double)m.live[DT_MEM_OPTIM], (double)m.peak[DT_MEM_ACTS],
        (double)m.peak[DT_MEM_COMM], (double)m.peak_total };
    for (int a = 0; a < DT_AXES; a++)
        all[TRAIN_MEMS + a] = (double)(dt_comm_bytes(ctx, (dt_axis)a) - sent_before[a]);
    for (int i = 0; own && i < TRAIN_MEMS; i++) own->mem[i] = fmax(own->mem[i], all[i]);
    for (int a = 0; own && a < DT_AXES; a++) own->sent[a] = fmax(own->sent[a], all[TRAIN_MEMS + a]);
    dt_all_reduce(dt_world(ctx), all, all, TRAIN_MEMS + DT_AXES, DT_F64, DT_MAX);
    memcpy(row->mem, all, sizeof row->mem);
    memcpy(row->bytes, all + TRAIN_MEMS, sizeof row->bytes);
}

/* Records this rank's live bytes and its largest peaks so far in c->footprint. Must be called
   before each reset of the peaks, and at the end of the run. */
static inline void train_record_peaks(dt_ctx *ctx, const train_config *c) {
    if (!c->footprint) return;
    dt_memory now = dt_memory_used(ctx), *record = &c->footprint[dt_ctx_rank(ctx)].memory;
    for (int i = 0; i < DT_MEM_CLASSES; i++) {
        record->live[i] = now.live[i];
        if (now.peak[i] > record->peak[i]) record->peak[i] = now.peak[i];
    }
    record->live_total = now.live_total;
    if (now.peak_total > record->peak_total) record->peak_total = now.peak_total;
}

/* The listener function for a failure of the context. Records the memory use before the cleanup
   frees memory. */
static inline int train_on_failure(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    (void)status, (void)text;
    train_record_peaks(ctx, (const train_config *)user);
    return 0;
}

/* Returns 1 if the group shards the experts of the mesh, but not its dense parameters. */
static inline int train_shards_experts(const dt_mesh *mesh, const dt_comm *comm) {
    return comm && (comm == mesh->ep || (mesh->sizes.expert_tp && comm == mesh->expert_tp));
}

/* Computes this rank's train_footprint except `memory`. */
static inline void train_footprint_formula(
    dt_ctx *ctx, const train_config *c, const dt_mesh *mesh) {
    train_footprint *n = &c->footprint[dt_ctx_rank(ctx)];
    dt_dtype dtype = c->model.dtype;
    int is_adam = c->zero.optimizer != DT_SGD,
        grad_dtype = dtype == DT_BF16 || dtype == DT_F16 ? DT_F32 : dtype;
    int states = is_adam ? 2 : c->zero.momentum > 0, master = (dt_dtype)grad_dtype != dtype;
    int wanted_group = c->zero.shard_group;
    int all[2] = { dt_comm_size(mesh->data), dt_comm_size(mesh->expert_data) };
    for (int k = 0; k < 2; k++) { /* find the largest group size that divides the data group */
        n->kind[k].shard_ranks = wanted_group && wanted_group < all[k] ? wanted_group : all[k];
        while (all[k] % n->kind[k].shard_ranks != 0) n->kind[k].shard_ranks--;
    }
    n->bytes[0] = (int)dt_dtype_size(dtype);
    n->bytes[1] =
        (int)dt_dtype_size(c->zero.grad_dtype ? c->zero.grad_dtype : (dt_dtype)grad_dtype);
    n->bytes[2] = (int)dt_dtype_size((dt_dtype)grad_dtype) * (states + master);
    const char *optim = c->zero.offload_optim, *params = c->zero.offload_params;
    if (optim) n->bytes[2] = 0; /* offloaded tensors are not counted in params, grads or optim */
    if (params) n->bytes[0] = 0;
    if (optim && params && strcmp(optim, "cpu") != 0 && strcmp(params, "cpu") != 0 && !c->zero.tree)
        n->bytes[1] = 0;
    /* optim is sharded from ZeRO stage 1 on, grads from stage 2 on, params from stage 3 on */
    for (int i = 0; i < 3; i++) n->sharded[i] = c->zero.stage >= 3 - i;
    for (int u = 0; u < dt_bucket_count(ctx); u++) {
        const dt_bucket *bucket = dt_bucket_get(ctx, u);
        const dt_param_desc *desc = &dt_param_get(ctx, bucket->first_param)->param->desc;
        const dt_shard_spec *shards = desc->shards;
        const dt_grad_placement *placed = desc->grad_placements;
        int k = 0;
        for (int i = 0; i < 3; i++) k |= train_shards_experts(mesh, shards[i].comm);
        for (int i = 0; i < 2; i++) k |= train_shards_experts(mesh, placed[i].comm);
        if (bucket->frozen) { /* router biases; with LoRA all weights, maybe as blocks of bytes */
            int N = n->sharded[0] ? n->kind[k].shard_ranks : 1;
            if (!params)
                n->formula[0] += (double)bucket->padded * (double)dt_dtype_size(bucket->dtype) / N;
            continue;
        }
        n->kind[k].params += (int64_t)bucket->count;
        n->kind[k].padded += (int64_t)bucket->padded;
        if (dt_param_get(ctx, bucket->first_param)->param->by_matrix)
            n->one_state +=
                (double)bucket->padded * n->bytes[1] / (n->sharded[2] ? n->kind[k].shard_ranks : 1);
    }
    for (int k = 0; k < 2; k++) {
        int leaves = c->zero.tree ? c->accum * all[k] : 0;
        for (int i = 0; i < 3; i++)
            n->formula[i] += (double)n->kind[k].padded * n->bytes[i] /
                             (n->sharded[i] ? n->kind[k].shard_ranks : 1);
        for (; leaves; leaves >>= 1)
            n->tree_levels += (double)n->kind[k].padded * n->bytes[1] / all[k];
    }
    n->formula[1] += n->tree_levels;
    n->formula[2] -= n->one_state;
}

static inline double train_now(dt_ctx *ctx) {
    return dt_ctx_host(ctx)->now(dt_ctx_host(ctx)->user);
}

/* Fails, because the loss of a step is not finite. First runs the step again and tests every op, so
   that the rank that makes the first NaN fails and names the op. */
static inline void train_find_nan(const train_config *c, gpt *model, const dt_mesh *mesh,
    train_batch *b, int64_t step, double loss) {
    dt_ctx *ctx = model->ctx;
    char text[200];
    snprintf(text, sizeof text, "step %lld: the loss is %s%s", (long long)step,
        isnan(loss) ? "NaN" : "infinite",
        step > 1     ? "; a smaller learning rate may help"
        : c->weights ? " before any update: are all weights of the file finite?"
                     : " before any update");
    if (dt_ctx_rank(ctx) == 0)
        dt_log(ctx, DT_LOG_NOTICE, "%s; it runs again to find the op that makes it", text);
    dt_clear_grads(ctx);
    dt_check_finite(ctx, 1);
    train_forward_backward(model, mesh, b, step);
    dt_fail(ctx, DT_ERR_NUMERIC, "%s", text); /* if no op has failed */
}

/* Runs one training step on every rank: reads the batch, runs forward and backward, updates the
   parameters and measures. A step whose gradients overflow is skipped: it changes only the loss
   scale, and row.skipped is 1. The caller repeats a skipped step with the same step number and the
   same sequences, so that the result is the same as in a run that starts with the smaller scale. */
static inline train_row train_step(const train_config *c, gpt *model, dt_zero *optimizer,
    const dt_mesh *mesh, data_set *text, train_batch *b, int64_t step) {
    dt_ctx *ctx = model->ctx;
    double start = train_now(ctx), in_comm = dt_comm_seconds(ctx);
    train_row row = { .step = step,
        .lr = dt_lr(c->lr, step),
        .val_loss = NAN,
        .val_bits = NAN,
        .batch = b->order.batch };
    size_t sent[DT_AXES], micros = (size_t)(b->accum * b->order.replicas);
    for (int a = 0; a < DT_AXES; a++) sent[a] = dt_comm_bytes(ctx, (dt_axis)a);
    train_record_peaks(ctx, c);
    dt_memory_reset_peak(ctx);
    char mark[32];
    snprintf(mark, sizeof mark, "step %lld", (long long)step);
    dt_trace_begin(ctx, mark);
    dt_trace_begin(ctx, "read data");
    train_batch_read(b, text, model, mesh->replica);
    train_batch_will_need(b, mesh->replica);
    dt_trace_end(ctx);
    row.bubble = train_forward_backward(model, mesh, b, step);
    /* the order of this sum does not depend on the layout */
    for (size_t m = 0; m < micros; m++) row.loss += b->losses[m];
    if (dt_error(ctx) == DT_OK && !isfinite(row.loss))
        train_find_nan(c, model, mesh, b, step, row.loss);
    dt_trace_begin(ctx, "optimizer");
    dt_zero_loss(optimizer, row.loss);
    dt_step_info info = dt_zero_step(optimizer, row.lr);
    if (model->config.experts) train_router_metrics(model, mesh, &row);
    if (model->config.mtp) train_mtp_metric(model, mesh, &row);
    train_update_router_bias(model, mesh, b, info.skipped || info.outlier != DT_OUTLIER_NONE);
    row.grad_norm = info.grad_norm;
    row.skipped = info.skipped;
    row.outlier = info.outlier;
    row.outlier_z = info.outlier == DT_OUTLIER_LOSS ? info.loss_z : info.norm_z;
    dt_trace_end(ctx);
    train_measure_bytes(ctx, sent, &row, c->footprint ? &c->footprint[dt_ctx_rank(ctx)] : NULL);
    dt_trace_end(ctx);
    double seconds = train_now(ctx) - start;
    row.ms = 1000 * seconds;
    row.comm = seconds > 0 ? (dt_comm_seconds(ctx) - in_comm) / seconds : 0;
    row.tokens_per_s = (double)b->order.batch * (double)b->T / (row.ms / 1000);
    return row;
}

// ==== Stages by cost =============================================================================

/* Divides the model into pipeline stages by measured time, so that the slowest stage takes as
   little time as possible. Rank 0 measures embedding, attention, MLP and head, each as one stage of
   a model with one layer, and sends the times to the other ranks. */
enum { TRAIN_ITEMS = 4, TRAIN_TIMINGS = 3 };
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

static inline dt_status train_time_items(
    dt_ctx *ctx, gpt_config sizes, dt_shape tokens, double *seconds) {
    static const int stage_begin[TRAIN_ITEMS + 1] = { 0, 1, 2, 3, 4 };
    dt_span spans[2 * TRAIN_ITEMS];
    sizes.layers = 1;
    sizes.tied = 0; /* with a tied head this rank would have two copies of wte of the same name */
    sizes.tp = sizes.cp = sizes.pp = sizes.ep = NULL;
    sizes.expert_tp = 0;
    sizes.router_bias = 0;
    sizes.mtp = sizes.first_dense = 0;
    sizes.stages = TRAIN_ITEMS;
    sizes.stage_begin = stage_begin;
    gpt model = gpt_register(ctx, sizes);
    size_t bytes = (size_t)dt_count(tokens) * sizeof(int32_t);
    train_timing timing = { &model, tokens,
        (int32_t *)dt_alloc(ctx, DT_MEM_HOST, bytes, "timing") };
    if (timing.ids) memset(timing.ids, 0, bytes);
    dt_schedule *s = dt_schedule_make(
        ctx, (dt_schedule_desc){
                 .kind = DT_SCHEDULE_INTERLEAVED, .ranks = 1, .micros = 1, .chunks = TRAIN_ITEMS });
    for (int i = 0; i < TRAIN_TIMINGS && dt_error(ctx) == DT_OK; i++) {
        dt_pipe_run(
            ctx, (dt_pipe_desc){
                     .schedule = s, .run = train_timing_stage, .user = &timing, .spans = spans });
        const dt_action *a = dt_schedule_actions(s, 0);
        double now[TRAIN_ITEMS] = { 0 };
        for (int k = 0; k < dt_schedule_count(s, 0); k++)
            now[a[k].stage] += spans[k].end - spans[k].begin;
        for (int k = 0; k < TRAIN_ITEMS; k++)
            seconds[k] = i == 0 || now[k] < seconds[k] ? now[k] : seconds[k];
    }
    dt_free(ctx, DT_MEM_HOST, timing.ids, bytes);
    return dt_error(ctx);
}

/* [collective: world] Fills in stage_begin, an array of sizes.stages + 1 elements. */
static inline void train_partition_by_cost(
    dt_ctx *ctx, gpt_config sizes, dt_shape tokens, int *stage_begin) {
    double seconds[TRAIN_ITEMS] = { 0 }, costs[2 * GPT_MAX_LAYERS + 2];
    char why[300];
    int items = gpt_items(sizes);
    if (dt_ctx_rank(ctx) == 0) {
        dt_ctx *alone = dt_ctx_make((dt_ctx_desc){ .kernels = dt_ctx_kernels(ctx),
            .stream = dt_ctx_stream(ctx),
            .host = dt_ctx_host(ctx) });
        if (!alone || train_time_items(alone, sizes, tokens, seconds) != DT_OK)
            dt_fail(ctx, DT_ERR_MEM, "timing the parts of the model: %s",
                alone ? dt_error_text(alone) : "no memory");
        dt_ctx_free(alone);
    }
    dt_sum_doubles(dt_world(ctx), seconds, TRAIN_ITEMS);
    for (int i = 0; i < items; i++) costs[i] = seconds[i == 0 ? 0 : i == items - 1 ? 3 : 2 - i % 2];
    if (dt_error(ctx) == DT_OK &&
        dt_partition_stages(costs, items, sizes.stages, stage_begin, why, sizeof why) != DT_OK)
        dt_fail(ctx, DT_ERR_ARG, "%s", why);
}

// ==== A drawing of a step ========================================================================

/* Sets costs (stages,3), for the simulator, to the mean times of each stage's forward,
   input-gradient and weight-gradient actions. A backward that is not split counts as an
   input-gradient action. */
static inline void train_stage_costs(const dt_schedule *s, const dt_span *spans, double *costs) {
    int micros = dt_schedule_micros(s);
    memset(costs, 0, 3 * (size_t)dt_schedule_stages(s) * sizeof *costs);
    for (int r = 0; r < dt_schedule_ranks(s); r++)
        for (int i = 0; i < dt_schedule_count(s, r); i++) {
            const dt_action *a = &dt_schedule_actions(s, r)[i];
            const dt_span *t = &spans[dt_schedule_offset(s, r) + i];
            int k = a->phase == DT_FORWARD ? 0 : a->phase == DT_BACKWARD_WEIGHT ? 2 : 1;
            costs[3 * a->stage + k] += (t->end - t->begin) / micros;
        }
}

/* Draws two timelines of rank 0's pipeline: its last step as measured, and a simulation of that
   step with each stage's mean times. */
static inline void train_draw_schedule(
    dt_ctx *ctx, const dt_mesh *mesh, const train_batch *b, const char *path) {
    int n = dt_schedule_offset(b->schedule, mesh->sizes.pp),
        stages = dt_schedule_stages(b->schedule);
    size_t bytes = (size_t)n * sizeof(dt_span) + 3 * (size_t)stages * sizeof(double);
    dt_span *spans = (dt_span *)dt_alloc(ctx, DT_MEM_HOST, bytes, "a drawing");
    dt_timeline lines[2] = { { "measured", b->schedule,
                                 b->spans + dt_schedule_count(b->schedule, mesh->coord.pp) },
        { "simulated with the mean costs of its stages", b->schedule, spans } };
    if (!spans) return;
    double *costs = (double *)(void *)(spans + n);
    dt_schedule_costs c = { .stages = costs };
    train_stage_costs(b->schedule, lines[0].spans, costs);
    if (dt_schedule_simulate(b->schedule, c, spans) == DT_OK) dt_schedule_svg(ctx, path, lines, 2);
    dt_free(ctx, DT_MEM_HOST, spans, bytes);
}

// ==== The loop ===================================================================================

/* Allocates the buffers of a batch for the largest step. */
static inline void train_batch_make(
    const train_config *c, gpt *model, const dt_mesh *mesh, train_batch *b) {
    dt_ctx *ctx = model->ctx;
    size_t tokens =
        (size_t)(c->accum * (int64_t)c->micro_batch * b->local_tokens) * sizeof(int32_t);
    b->ids = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, tokens, "ids");
    b->labels = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, tokens, "labels");
    b->index = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, tokens, "index");
    b->sequence =
        (int32_t *)dt_alloc(ctx, DT_MEM_HOST, 7 * (size_t)b->T * sizeof(int32_t), "a sequence");
    b->documents = &c->documents;
    if (c->documents.n) {
        b->positions = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, 2 * tokens, "documents");
        b->document = b->positions ? b->positions + tokens / sizeof(int32_t) : NULL;
    }
    if (c->documents.n && mesh->sizes.cp > 1) {
        size_t all = tokens * (size_t)mesh->sizes.cp;
        b->all_positions = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, 2 * all, "documents over cp");
        b->all_documents = b->all_positions ? b->all_positions + all / sizeof(int32_t) : NULL;
    }
    b->mtp_bytes = 2 * (size_t)model->config.mtp * tokens;
    if (b->mtp_bytes) b->mtp_ids = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, b->mtp_bytes, "MTP");
    size_t losses = (size_t)(c->accum * mesh->replicas) * sizeof(double);
    b->losses = (double *)dt_alloc(ctx, DT_MEM_HOST, losses, "losses");
    if (model->config.router_bias > 0)
        b->experts_bytes =
            (size_t)(gpt_all_layers(model->config) * model->config.experts) * sizeof(double);
    b->expert_tokens =
        (double *)dt_alloc(ctx, DT_MEM_HOST, b->experts_bytes, "tokens of each expert");
    if (dt_error(ctx) != DT_OK) return;
    if (b->expert_tokens) memset(b->expert_tokens, 0, b->experts_bytes);
    for (int i = 0; i < gpt_all_layers(model->config) && b->expert_tokens; i++)
        model->layer[i].route.experts = b->expert_tokens + i * model->config.experts;
    b->order = (dt_data_order){
        .sequences = INT64_MAX, .micro_batch = c->micro_batch, .replicas = mesh->replicas
    };
}

static inline void train_batch_free(
    dt_ctx *ctx, const train_config *c, const dt_mesh *mesh, train_batch *b) {
    size_t tokens =
        (size_t)(c->accum * (int64_t)c->micro_batch * b->local_tokens) * sizeof(int32_t);
    dt_schedule_free(b->schedule);
    dt_free(ctx, DT_MEM_HOST, b->positions, 2 * tokens);
    dt_free(ctx, DT_MEM_HOST, b->all_positions, 2 * tokens * (size_t)mesh->sizes.cp);
    dt_free(ctx, DT_MEM_HOST, b->spans, b->spans_bytes);
    dt_free(ctx, DT_MEM_HOST, b->expert_tokens, b->experts_bytes);
    dt_free(ctx, DT_MEM_HOST, b->ids, tokens);
    dt_free(ctx, DT_MEM_HOST, b->labels, tokens);
    dt_free(ctx, DT_MEM_HOST, b->index, tokens);
    dt_free(ctx, DT_MEM_HOST, b->sequence, 7 * (size_t)b->T * sizeof(int32_t));
    dt_free(ctx, DT_MEM_HOST, b->mtp_ids, b->mtp_bytes);
    dt_free(ctx, DT_MEM_HOST, b->losses, (size_t)(c->accum * mesh->replicas) * sizeof(double));
}

/* Makes the pipeline's schedule for a number of micro-batches. */
static inline dt_schedule *train_schedule(
    dt_ctx *ctx, const train_config *c, int ranks, int micros) {
    dt_schedule_desc d = {
        .kind = c->schedule, .ranks = ranks, .micros = micros, .chunks = c->chunks
    };
    return c->schedule_file ? dt_schedule_read(ctx, c->schedule_file, d) : dt_schedule_make(ctx, d);
}

/* Sets stage_rank, an array of c->pp * c->chunks elements, to the rank of each stage. */
static inline void train_place_stages(
    dt_ctx *ctx, const train_config *c, int ranks, int *stage_rank) {
    dt_schedule *s = train_schedule(ctx, c, ranks, c->accum);
    for (int i = 0; i < dt_schedule_stages(s); i++) stage_rank[i] = dt_schedule_rank_of(s, i);
    dt_schedule_free(s);
}

/* Makes the schedule for b->accum micro-batches, unless b->schedule already is for that number. */
static inline void train_batch_schedule(
    dt_ctx *ctx, const train_config *c, const dt_mesh *mesh, train_batch *b) {
    if (dt_schedule_micros(b->schedule) == b->accum) return;
    dt_schedule_free(b->schedule);
    dt_free(ctx, DT_MEM_HOST, b->spans, b->spans_bytes);
    b->schedule = train_schedule(ctx, c, mesh->sizes.pp, b->accum);
    int actions = dt_schedule_count(b->schedule, mesh->coord.pp) +
                  dt_schedule_offset(b->schedule, mesh->sizes.pp);
    b->spans_bytes = (size_t)actions * sizeof *b->spans;
    b->spans = (dt_span *)dt_alloc(ctx, DT_MEM_HOST, b->spans_bytes, "times of a schedule");
}

/* Advances the batch to the next step: sets the step's first sequence, its number of sequences and
   its schedule. */
static inline void train_batch_next(
    dt_ctx *ctx, const train_config *c, const dt_mesh *mesh, train_batch *b, dt_batch_ramp ramp) {
    b->order.consumed += b->order.batch; /* add the sequences of the previous step */
    b->order.batch = dt_batch_ramp_size(ramp, b->order.consumed);
    b->accum = (int)(b->order.batch / ((int64_t)b->order.micro_batch * b->order.replicas));
    train_batch_schedule(ctx, c, mesh, b);
}

// ==== Checkpoints ================================================================================

/* The checkpoints of a run. Besides tensors, a checkpoint contains `samples`, the position in the
   data, and `tokens`, the size of the data. */
typedef struct train_checkpoint {
    dt_checkpoint *checkpoint; /* NULL if the run has no checkpoints */
    double samples;            /* number of sequences used by all steps so far */
    double tokens;             /* number of tokens in the data */
    dt_extra_state list[2];
    char *model_config;   /* text of config.json, for transformers */
    int loaded_from_save; /* 1: the loaded checkpoint is in the folder train_config.save */
    int stopped;          /* 1: all ranks have agreed to end the run early */
    char announced[1024]; /* path of the newest checkpoint that was loaded or announced */
    const train_config *train;
    gpt *model;
} train_checkpoint;

static inline void train_file_location(const dt_tensor *param, dt_weight_map *place, void *user) {
    gpt_file_location(((train_checkpoint *)user)->model, param, place);
}

static inline void train_progress(double done, void *user) {
    const train_config *c = ((train_checkpoint *)user)->train;
    if (c->on_progress) c->on_progress(done, c->user);
}

/* Returns "seq" of the settings of a checkpoint: its number of tokens per sequence. */
static inline int train_seq_of(dt_ctx *ctx, const char *settings, int fallback) {
    dt_json *then =
        *settings ? dt_json_parse(ctx, "its settings", settings, strlen(settings)) : NULL;
    double seq = fallback;
    if (then) dt_json_number(then, dt_json_find(then, 0, "seq"), &seq);
    dt_json_free(then);
    return seq >= 1 ? (int)seq : fallback;
}

/* Continues in the data where the checkpoint's run stopped. The data may have grown. With another
   number of tokens per sequence, text continues at the sequence that contains the next token.
   Instruction data continues at the next example, because an example is one sequence at every
   length. */
static inline train_position train_continue(
    dt_ctx *ctx, train_checkpoint *s, data_set *text, int64_t T, const char *path) {
    train_position at = { .consumed = (int64_t)s->samples,
        .sequences = 1,
        .tokens = (int64_t)s->tokens,
        .tokens_then = (int64_t)s->tokens,
        .seq_then = train_seq_of(ctx, dt_checkpoint_config(s->checkpoint), (int)T) };
    if (!text) return at;
    int n = text->sources, examples = 0;
    at.sequences = data_sequences(text);
    at.tokens = data_tokens(text);
    for (int i = 0; i < n; i++) examples += text->source[i].files->examples;
    if (at.seq_then != T && examples && examples < n)
        dt_fail(ctx, DT_ERR_ARG,
            "%s: --seq was %d, and is %lld now: this mixture has text, which would be cut into "
            "other sequences, and instruction data, which would not; use --seq %d",
            path, at.seq_then, (long long)T, at.seq_then);
    /* a source of instruction data has 2 T tokens for each example, and one more */
    if (examples) at.tokens_then = (at.tokens_then - n) / at.seq_then * T + n;
    if (dt_error(ctx) == DT_OK && at.tokens < at.tokens_then)
        dt_fail(ctx, DT_ERR_ARG, "%s: trained on data of %lld tokens, but this data has %lld", path,
            (long long)at.tokens_then, (long long)at.tokens);
    if (!examples) s->samples = floor(s->samples * at.seq_then / (double)T);
    s->tokens = (double)at.tokens;
    at.consumed = (int64_t)s->samples;
    return at;
}

static inline void train_checkpoint_open(
    const train_config *c, gpt *model, dt_zero *optimizer, data_set *text, train_checkpoint *s) {
    dt_ctx *ctx = model->ctx;
    s->train = c;
    s->model = model;
    s->tokens = text ? (double)data_tokens(text) : 0;
    s->list[0] = (dt_extra_state){ "samples", &s->samples, 1 };
    s->list[1] = (dt_extra_state){ "tokens", &s->tokens, 1 };
    if (c->dry || (!c->save && !c->resume)) return;
    if (gpt_checkpoint_is_model(&model->config)) s->model_config = gpt_config_text(model);
    s->checkpoint = dt_checkpoint_open(optimizer, (dt_checkpoint_desc){ .dir = c->save,
                                                      .keep = c->keep,
                                                      .background = c->background,
                                                      .extra_state = s->list,
                                                      .n_extra_state = 2,
                                                      .config = c->settings,
                                                      .config_json = s->model_config,
                                                      .map_weight = train_file_location,
                                                      .convert_dtype = 1,
                                                      .grows = "wpe.weight",
                                                      .progress = train_progress,
                                                      .user = s });
    if (dt_error(ctx) != DT_OK) return;
    int64_t step = c->restarted ? dt_checkpoint_load(s->checkpoint, NULL) : 0;
    s->loaded_from_save = step > 0;
    if (step == 0 && c->resume) step = dt_checkpoint_load(s->checkpoint, c->resume);
    /* At the first start the folder of --save is empty. So if --resume names the same folder, the
       folder need not contain a checkpoint. */
    int same = c->save && c->resume && strcmp(c->save, c->resume) == 0;
    if (step == 0 && c->resume && !same)
        dt_fail(ctx, DT_ERR_IO, "--resume %s: there is no checkpoint", c->resume);
    const char *path = dt_checkpoint_path(s->checkpoint);
    size_t n = c->save ? strlen(c->save) : 0;
    while (n > 1 && c->save[n - 1] == '/') n--;
    s->loaded_from_save |= n > 0 && strncmp(path, c->save, n) == 0 && path[n] == '/';
    train_position at = train_continue(ctx, s, text, c->seq ? c->seq : c->model.seq, path);
    snprintf(s->announced, sizeof s->announced, "%s", path);
    if (dt_error(ctx) == DT_OK && c->on_resume)
        c->on_resume(ctx, step, path, dt_checkpoint_config(s->checkpoint), &at, c->user);
}

/* Calls on_save on rank 0 if a checkpoint has been committed since the last call. A background save
   commits some steps after it began. */
static inline void train_checkpoint_announce(
    const train_config *c, dt_ctx *ctx, train_checkpoint *s) {
    const char *path = dt_checkpoint_path(s->checkpoint);
    if (dt_error(ctx) != DT_OK || strncmp(s->announced, path, sizeof s->announced) == 0) return;
    snprintf(s->announced, sizeof s->announced, "%s", path);
    if (dt_ctx_rank(ctx) == 0 && c->on_save) c->on_save(ctx, path, c->user);
}

static inline void train_checkpoint_close(const train_config *c, dt_ctx *ctx, train_checkpoint *s) {
    while (!dt_checkpoint_poll(s->checkpoint))
        dt_ctx_host(ctx)->sleep(dt_ctx_host(ctx)->user, 1e-3);
    train_checkpoint_announce(c, ctx, s);
    dt_checkpoint_close(s->checkpoint);
    if (s->model_config) dt_free(ctx, DT_MEM_HOST, s->model_config, strlen(s->model_config) + 1);
}

/* Saves a checkpoint after a step, if one is due. Returns 1 if the run must end because a rank
   received a stop signal, else 0. */
static inline int train_checkpoint_save(
    const train_config *c, dt_ctx *ctx, train_checkpoint *s, const train_batch *b, int64_t step) {
    double stop = c->stop && __atomic_load_n(c->stop, __ATOMIC_RELAXED);
    if (!s->checkpoint) return 0;
    if (c->stop) dt_sum_doubles(dt_world(ctx), &stop, 1);
    if (stop > 0) __atomic_store_n(c->stop, 1, __ATOMIC_RELAXED);
    s->samples = (double)(b->order.consumed + b->order.batch);
    dt_checkpoint_poll(s->checkpoint);
    int due = step == c->stop_at || stop > 0 || (c->save_every && step % c->save_every == 0);
    train_checkpoint_announce(c, ctx, s);
    if (c->save && due) dt_checkpoint_save(s->checkpoint);
    train_checkpoint_announce(c, ctx, s);
    s->stopped = stop > 0;
    return s->stopped;
}

/* Exchanges the weights with their EMA, if the run has one. */
static inline void train_swap_ema(const train_config *c, dt_zero *optimizer) {
    if (c->zero.ema_decay > 0) dt_zero_swap_ema(optimizer);
}

/* Validates with the weights of a run without steps. */
static inline void train_only_eval(const train_config *c, gpt *model, dt_zero *optimizer,
    const dt_mesh *mesh, data_set *val, train_batch *b) {
    dt_ctx *ctx = model->ctx;
    train_row row = { .val_loss = NAN, .val_bits = NAN };
    b->accum = c->accum;
    train_batch_schedule(ctx, c, mesh, b);
    if (dt_error(ctx) != DT_OK) return;
    train_swap_ema(c, optimizer);
    train_eval(c, model, mesh, val, b, &row);
    train_swap_ema(c, optimizer);
    if (dt_error(ctx) == DT_OK && dt_ctx_rank(ctx) == 0 && c->on_eval)
        c->on_eval(ctx, &row, c->user);
}

/* Runs all remaining steps of the run. */
static inline void train_steps(const train_config *c, gpt *model, dt_zero *optimizer,
    const dt_mesh *mesh, data_set *text, data_set *val, train_batch *b, train_checkpoint *saved) {
    dt_ctx *ctx = model->ctx;
    dt_batch_ramp ramp = c->ramp;
    ramp.batch = (int64_t)c->micro_batch * c->accum * mesh->replicas;
    b->order.consumed = (int64_t)saved->samples;
    int64_t first = dt_zero_steps(optimizer) + 1;
    /* if no step is left, only save the loaded checkpoint into the folder `save` */
    if (first > c->stop_at && c->save && !saved->loaded_from_save)
        dt_checkpoint_save(saved->checkpoint);
    for (int64_t step = first, finished = 0;
         step <= c->stop_at && !finished && dt_error(ctx) == DT_OK; step++) {
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
        if (val && (step == c->stop_at || (c->eval_every && step % c->eval_every == 0))) {
            train_swap_ema(c, optimizer);
            train_eval(c, model, mesh, val, b, &row);
            train_swap_ema(c, optimizer);
        }
        for (int i = 0; i < text->sources; i++)
            row.epochs[i] = data_epochs(text, i, b->order.consumed + b->order.batch);
        dt_comm_step(dt_world(ctx));
        if (dt_error(ctx) == DT_OK && dt_ctx_rank(ctx) == 0) c->on_step(ctx, &row, c->user);
        if (dt_error(ctx) == DT_OK) finished = train_checkpoint_save(c, ctx, saved, b, step);
    }
}

/* Muon (dt_zero_desc.optimizer) is for the matrices of hidden layers. Returns the parameter group
   of the others, which AdamW updates: embeddings, output head, biases. */
static inline dt_param_group train_adamw_group(
    gpt_config c, const dt_zero_desc *muon, double lr_scale) {
    const char *const names[2][2] = { { "wte.weight,wpe.weight,*.bias,lm_head.weight",
                                          "wte.weight,wpe.weight,*.bias" },
        { "wte.weight,lm_head.weight", "wte.weight" } };
    dt_param_group g = { .params = names[c.arch == GPT_LLAMA][c.tied != 0],
        .optimizer = DT_ADAMW,
        .beta1 = muon->beta1,
        .beta2 = muon->beta2,
        .eps = muon->eps,
        .weight_decay = muon->weight_decay,
        .lr_scale = lr_scale };
    return g;
}

/* Writes the model, or the adapters alone, to export_to. */
static inline void train_export(const train_config *c, gpt *model, dt_zero *optimizer) {
    if (c->model.lora.rank && !c->merge) {
        gpt_lora_export(model, optimizer, c->export_to, c->weights);
        return;
    }
    if (c->model.lora.rank) gpt_lora_merge(model);
    if (dt_error(model->ctx) == DT_OK) gpt_export(model, optimizer, c->export_to);
}

/* [collective: world] Runs a whole training run. `user` points to a train_config. */
static inline dt_status train(dt_ctx *ctx, void *user) {
    const train_config *c = (const train_config *)user;
    dt_listener listener = { .failed = train_on_failure, .user = user };
    int stage_begin[GPT_MAX_STAGES + 1], stage_rank[GPT_MAX_STAGES + 1];
    int64_t T = c->seq ? c->seq : c->model.seq;
    dt_listen(ctx, &listener);
    if (c->dry) dt_dry_begin(ctx, &c->dry[dt_ctx_rank(ctx)]);
    dt_mesh mesh = dt_mesh_make(ctx, c->mesh);
    gpt_config sizes = c->model;
    sizes.tp = mesh.tp;
    sizes.cp = mesh.cp;
    sizes.pp = mesh.pp;
    sizes.ep = mesh.ep;
    sizes.expert_tp = mesh.sizes.expert_tp;
    sizes.expert_tp_group = mesh.expert_tp;
    sizes.dispatch = mesh.dispatch;
    sizes.stages = mesh.sizes.pp * (c->chunks ? c->chunks : 1);
    memcpy(stage_begin, c->stage_begin, sizeof stage_begin);
    if (c->partition_by_cost && !c->dry)
        train_partition_by_cost(
            ctx, sizes, DT_SHAPE(c->micro_batch, T / mesh.sizes.cp), stage_begin);
    sizes.stage_begin = sizes.stages > 1 ? stage_begin : NULL;
    if (sizes.stages > 1) train_place_stages(ctx, c, mesh.sizes.pp, stage_rank);
    sizes.stage_rank = sizes.stages > 1 ? stage_rank : NULL;
    gpt model = gpt_register(ctx, sizes);
    if (dt_error(ctx) != DT_OK) {
        dt_unlisten(ctx, &listener);
        return dt_error(ctx);
    }
    if (c->trace) dt_trace_start(ctx, 0);
    dt_zero_desc desc = c->zero;
    desc.mesh = &mesh;
    dt_param_group adamw = train_adamw_group(sizes, &desc, c->adamw_lr_scale);
    if (desc.optimizer == DT_MUON) desc.groups = &adamw, desc.group_count = 1;
    dt_zero *optimizer = dt_zero_make(ctx, desc);
    train_batch b = { .T = T, .local_tokens = T / mesh.sizes.cp };
    train_checkpoint saved = { .checkpoint = NULL };
    if (c->weights) gpt_load(&model, c->weights);
    if (c->adapter && dt_error(ctx) == DT_OK) gpt_lora_load(&model, c->adapter);
    data_set *text = data_open(ctx, &c->data, T, c->shuffle);
    data_set *val = data_open(ctx, &c->val, T, 0);
    if (!text && c->stop_at > 0) dt_fail(ctx, DT_ERR_ARG, "there is no data");
    if (c->read_ahead && text) b.ahead = data_open(ctx, &c->data, T, c->shuffle);
    if (b.ahead) data_read_ahead(b.ahead);
    train_batch_make(c, &model, &mesh, &b);
    if (dt_error(ctx) == DT_OK) train_checkpoint_open(c, &model, optimizer, text, &saved);
    if (dt_error(ctx) == DT_OK) train_steps(c, &model, optimizer, &mesh, text, val, &b, &saved);
    if (c->stop_at == 0 && val && dt_error(ctx) == DT_OK)
        train_only_eval(c, &model, optimizer, &mesh, val, &b);
    train_checkpoint_close(c, ctx, &saved);
    if (c->trace) dt_trace_write(dt_world(ctx), c->trace);
    if (c->svg && !c->dry && dt_error(ctx) == DT_OK && dt_ctx_rank(ctx) == 0)
        train_draw_schedule(ctx, &mesh, &b, c->svg);
    /* the groups of ZeRO-3, and those of expert folding, may span dp and cp */
    int takes_part = (mesh.coord.dp == 0 && mesh.coord.cp == 0) || c->zero.stage == 3 ||
                     mesh.sizes.expert_tp > 0;
    /* A stopped run does not export, because it will continue from its checkpoint. */
    int completed = !c->dry && !saved.stopped;
    if (completed && dt_error(ctx) == DT_OK) train_swap_ema(c, optimizer);
    if (c->export_to && completed && dt_error(ctx) == DT_OK) train_export(c, &model, optimizer);
    if (c->at_end && !saved.stopped && dt_error(ctx) == DT_OK && takes_part)
        c->at_end(ctx, &model, c->user);
    if (c->footprint && dt_error(ctx) == DT_OK) {
        train_record_peaks(ctx, c);
        train_footprint_formula(ctx, c, &mesh);
    }
    data_close(text);
    data_close(val);
    data_close(b.ahead);
    train_batch_free(ctx, c, &mesh, &b);
    dt_unlisten(ctx, &listener);
    return dt_error(ctx);
}

#endif /* TRAIN_H */
