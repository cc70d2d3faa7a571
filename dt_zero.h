/* dt_zero.h - v0.1.0 - training state: optimizers, ZeRO 0 to 3, precision, offload - public domain
   or MIT, see the end of the file

   The top of four single-header libraries; include this one and you have all. It owns what a
   training step needs beside the model: gradients summed over every axis that saw a part of the
   data; optimizer state, gradients and values whole or cut over the ranks (ZeRO); the update, in
   f32 masters for 16-bit parameters; the loss scale; the learning rate; state and values in host
   memory or on disk.

   DOES NOT: know the model, divide the loss (dt_tokens gives the denominator), reset the tape.

   QUICK EXAMPLE (data parallel over 4 ranks, optimizer state and gradients cut over them: ZeRO-2)

       #define DT_IMPLEMENTATION
       #include "dt_zero.h"
       #include <stdio.h>

       enum { B = 8, IN = 4, STEPS = 50 };

       static dt_status train(dt_ctx *ctx, void *user) {                       // every rank runs
                                                                               this
           dt_comm   *world = dt_world(ctx);
           dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(1, IN), DT_NORMAL(0.1));
           dt_tensor *b = dt_param(ctx, "b", DT_SHAPE(1), DT_ZEROS);
           dt_zero   *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = 2 });
           for (int step = 1; step <= STEPS; step++) {
               float x[B * IN], y[B]; int seed = step * 31 + dt_comm_rank(world) * 13; for (int i =
               0; i < B * IN; i++) x[i] = (float)((seed + i * 7) % 17) / 17; for (int i = 0; i < B;
               i++) y[i] = x[i * IN] - 2 * x[i * IN + 1]; dt_tensor *out = dt_linear(dt_input(ctx,
               DT_F32, DT_SHAPE(B, IN), x), w, b); dt_tensor *loss = dt_mse(out, dt_input(ctx,
               DT_F32, DT_SHAPE(B, 1), y), B * dt_comm_size(world)); dt_backward(loss); double sum =
               dt_item(loss); dt_sum_doubles(world, &sum, 1); dt_zero_step(opt, 0.05);
               dt_reset(ctx); if (dt_comm_rank(world) == 0 && step % 10 == 0) printf("step %d loss
               %.4f\n", step, sum);
           }
           (void)user;
           return dt_error(ctx);
       }

       int main(void) { return dt_run((dt_run_desc){ .ranks = 4 }, train, NULL); }

   BUILD
       cc -O3 train.c -lm -lpthread                 C11 or C++17; gcc, clang
       nvcc -O3 train.c dt_kernels.cu -lcublasLt -lnccl     CUDA

   OPTIONS (define before including)
       DT_IMPLEMENTATION   in exactly one file: the code, not only the declarations
       DT_STATIC           everything static                                                    (everywhere)

   CONTENTS
     1. Learning rate
     2. Training state
     3. Checkpoints
     4. Account
     5. Implementation: learning rate
     6. Units, groups and runs
     7. The reducer
     8. Values on demand
     9. The norm
    10. The loss scale
    11. The update
    12. Offload
    13. 1-bit Adam
    14. Making, stepping, freeing
    15. Account: code
    16. Checkpoints: the writer
    17. Checkpoints: what is in them
    18. Checkpoints: saving
    19. Checkpoints: loading

   CONTRACT
     Memory     The state belongs to the context and ends with it. Gradients (class grads) are made
                by the first backward, parameters and optimizer state by dt_zero_make. Every unit is
                padded to n * 1,024 elements, n the ranks of a shard group. Bytes an element, values
                + gradients + state of Adam:
                                    stage 0       stage 1         stage 2           stage 3
                    f32             4 + 4 + 8     4 + 4 + 8/n     4 + (4 + 8)/n     (4 + 4 + 8)/n
                    bf16, f16       2 + 4 + 12    2 + 4 + 12/n    2 + (4 + 12)/n    (2 + 4 + 12)/n
                and beside them, in class comm, what is gathered or on its way: at stage 2 the
                gradients of three units, at stage 3 also the values of a block and of the next one.
                1-bit Adam has errors: 4 + 4/N more. At stage 3 a parameter's `data` is NULL but in
                the block that uses it: read it with dt_read or dt_data.
     Types      f32, f64, bf16 and f16. bf16 and f16 have gradients in f32, and an f32 master in the
                state, which is what the update changes. It is taken from what the first step finds;
                a value written later lasts until the next step, which rounds the master over it.
                Losses are scaled where a parameter is f16, whose range ends at 65,504 and 6e-8;
                bf16 has that of f32.
     Errors     As in dt_tensor.h: sticky. A gradient norm that is not finite skips the step on
                every rank under a loss scale, else it fails every rank (DT_ERR_NUMERIC); it changes
                nothing. Ranks that hold copies must register the same parameters in the same order
                with the same flags and the same optimizer (compared by dt_zero_make) and start from
                the same values (compared by the first dt_zero_step, by digests that count as no
                traffic): else every rank fails (DT_ERR_COMM).
     Threads    As in dt_comm.h. Offload to a folder starts one thread, which reads and writes; a
                checkpoint that is saved in the background another, which writes.
     Order      Gradients are summed over ranks in rank order, the norm over runs of 1,024 elements
                in ascending order: stages 0 and 1 give the same bits, stages 2 and 3 do, and all
                four with one micro-batch or with `tree`. Offload, overlap and keep_gathered change
                no bit. Shard groups are summed group by group.
     Tags       [local], [collective: group]. */

#ifndef DT_ZERO_H
#define DT_ZERO_H

#include "dt_parallel.h"

#if DT_VERSION != 100
#error \
    "dt_zero.h 0.1.0 needs the other dt headers of version 0.1.0: copy all headers from one release"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ==== 1. Learning rate ==========================================================================

enum { DT_LR_COSINE = 0, DT_LR_LINEAR, DT_LR_CONSTANT, DT_LR_WSD };
typedef struct dt_lr_desc {
    double peak;
    int kind;       /* DT_LR_* after the warmup */
    int64_t warmup; /* steps; step n <= warmup has peak * n / warmup */
    int64_t steps;  /* the step at which min_ratio * peak is reached; stays there */
    double min_ratio;
    /* DT_LR_WSD: the last steps, in which it falls; 0 -> 20% of steps, rounded up */
    int64_t decay;
} dt_lr_desc;

/* [local] The learning rate of step n, from 1; 0 for n < 1. arXiv:1608.03983 for the cosine;
   DT_LR_WSD stays at the peak and then falls as 1 - sqrt(done), done going from 0 to 1
   (arXiv:2404.06395; arXiv:2405.18392 for the root). */
DT_API double dt_lr(dt_lr_desc desc, int64_t step);

// ==== 2. Training state =========================================================================

/* A run of consecutive elements of one parameter with its gradient and state: what an update works
   on. */
typedef struct dt_flat {
    dt_ctx *ctx;
    const dt_tensor *tensor; /* the parameter */
    size_t first, count;     /* elements of the tensor's local part, row-major */
    /* (count) of dt_grad_dtype(tensor), as all below: of bf16 and f16 the master */
    void *param;
    const void *grad;
    /* zero before the first step; NULL beyond dt_zero_desc.states */
    void *state[2];
    double lr;           /* with the parameter's lr_scale */
    double grad_scale;   /* the gradient to use is grad * grad_scale: clipping */
    double weight_decay; /* 0 for parameters that do not decay */
    int64_t step;        /* from 1 */
} dt_flat;

/* Your own update, called for each run that this rank owns. Element i may depend on element i only.
   On a device the arrays are its memory, and your kernels' queue is the context's; where state is
   offloaded they are host memory, and hold what you have made of them when you return. */
typedef dt_status (*dt_update_fn)(const dt_flat *run, void *user);

/* A loss scale that finds its own size (P. Micikevicius et al., arXiv:1710.03740). A step whose
   gradients are not finite is skipped: nothing changes but the scale. */
typedef struct dt_scale_desc {
    double init; /* 0 -> 65,536 */
    /* 0 -> 2, 0.5: factors after `interval` good steps in a row, and after a skipped one */
    double growth, backoff;
    int interval;   /* 0 -> 2,000 */
    int hysteresis; /* so many skipped steps since it last grew make it smaller; 0 -> 1 */
    double least;   /* 0 -> 1 */
} dt_scale_desc;
#define DT_SCALE_DYNAMIC (-1.0)
enum { DT_MAX_SKIPS = 20 }; /* so many skipped steps in a row are a failure */

enum { DT_ADAMW = 0, DT_ADAM, DT_SGD, DT_ONEBIT_ADAM, DT_OWN };
typedef struct dt_zero_desc {
    /* ZeRO: 0: all whole; 1: optimizer state cut; 2: gradients too; 3: values too */
    int stage;
    /* so many consecutive ranks of the data group cut, groups hold copies; 0: all */
    int shard_group;
    /* stage 3: 1: what a step has gathered stays until its update: section 8 */
    int keep_gathered;
    const dt_mesh *mesh; /* NULL -> all ranks of the world are data parallel. Copied. */
    /* DT_ADAMW (arXiv:1711.05101), DT_ADAM (L2 in the gradient), DT_SGD, DT_ONEBIT_ADAM
       (arXiv:2102.02888; section 13), DT_OWN */
    int optimizer;
    double beta1, beta2; /* 0 -> 0.9, 0.999 */
    double eps;          /* 0 -> 1e-8 */
    double momentum;     /* SGD; 0: none, and no state */
    /* 1-bit Adam, which is for stage 0 without tree and offload: steps of Adam before its second
       moment is frozen: beyond the warmup, and some 1/(1 - beta2) or more */
    int freeze_steps;
    /* of parameters with 2 dimensions and more that are not marked no_decay */
    double weight_decay;
    /* 0: none; else gradients are scaled by clip/(norm + 1e-6) where that is below 1 */
    double clip;
    /* optimizer state: NULL or "none": beside the parameters; "cpu": in host memory, where the
       update then runs; else a folder: in a file there: section 12 */
    const char *offload_optim;
    /* stage 3: this rank's run of the values, likewise. Both in one folder: and this rank's run of
       the gradients, unless they are summed over a tree */
    const char *offload_params;
    /* elements that are read, updated and written at a time; 0 -> 131,072 */
    size_t offload_chunk;
    /* 0: dynamic if a parameter is f16 on any rank, else none; X: fixed; DT_SCALE_DYNAMIC */
    double loss_scale;
    dt_scale_desc scale; /* how a dynamic one moves */
    /* 0 -> 25 MiB: the largest unit, unless one parameter is larger */
    size_t bucket_bytes;
    /* 1: gradients are summed over a binary tree of micro-batches: section 7 */
    int tree;
    /* 1: a unit is reduced before the backward goes on, not while it does, and gathered when it is
       needed, not before */
    int no_overlap;
    /* 1: stage 3 fills what it frees with NaN, so that a late reader shows */
    int poison;
    dt_update_fn update; /* DT_OWN */
    void *user;          /* handed to update */
    int states;          /* DT_OWN: arrays of state an element has, 0 to 2 */
} dt_zero_desc;

typedef struct dt_zero dt_zero;

typedef struct dt_step_info {
    int64_t step; /* the last one done, from 1 */
    /* 2-norm before clipping, every logical element once, unscaled; NaN after a failure. 1-bit Adam
       does not sum gradients once v is frozen: then an upper bound, the root of the mean over the N
       data ranks of |N g|^2, g being a rank's own gradient */
    double grad_norm;
    double clip_scale; /* what the gradients were multiplied with */
    /* 1: gradients were not finite, under a loss scale: no parameter, no state and no step count
       changed, on any rank. Run the same micro-batches again, or go on to others */
    int skipped;
    double loss_scale; /* of the gradients just used; 1: none */
    /* of a step that was not made: world rank with the first gradient at fault, -1: none */
    int bad_rank;
    /* whose, NULL on other stages of a pipeline, and which element of its part */
    const dt_tensor *bad_param;
    size_t bad_element;
} dt_step_info;

/* [collective: world] After the last dt_param: gives parameters their storage and values, and makes
   the optimizer state. NULL after a failure. */
DT_API dt_zero *dt_zero_make(dt_ctx *ctx, dt_zero_desc desc);
/* [collective: world] After the backward of the step's last micro-batch: the norm, clipping, the
   update, and whole parameters on every rank again. The gradients' sums begin anew. */
DT_API dt_step_info dt_zero_step(dt_zero *zero, double lr);
enum { DT_STATE_MASTER = 2 };
/* [collective: the parameter's data group] State array `which` (0, 1, or after the first step
   DT_STATE_MASTER, the f32 master of a 16-bit parameter) of a whole local parameter: host receives
   as many elements of dt_grad_dtype(param) as its local shape has. DT_ERR_ARG for a frozen
   parameter or a missing state. */
DT_API dt_status dt_zero_state(dt_zero *zero, int which, const dt_tensor *param, void *host);
/* [collective: the parameter's data group, the first one of a step also the groups of tied
   parameters over pipeline stages] The step's gradient of a whole local parameter, summed over all
   ranks and unscaled: between the last backward of a step and dt_zero_step. host as above.
   DT_ERR_UNSUPPORTED once 1-bit Adam has frozen its second moment: it sums no more gradients. */
DT_API dt_status dt_zero_grad(dt_zero *zero, const dt_tensor *param, void *host);
/* [local] Steps that have been made, or were when what was loaded was saved. */
DT_API int64_t dt_zero_steps(const dt_zero *zero);
/* [local] Bytes of optimizer state that this rank holds by the formula: what DT_MEM_OPTIM must
   show. 0 where it is offloaded: host memory counts as DT_MEM_HOST, a file as nothing. */
DT_API size_t dt_zero_state_bytes(const dt_zero *zero);
/* [local], at stage 3 [collective: world]. Gives the state back before the context ends; after
   stage 3 parameters cannot be read any more. NULL is allowed. */
DT_API void dt_zero_free(dt_zero *zero);

// ==== 3. Checkpoints ============================================================================

/* A checkpoint is a folder that training goes on from, in any layout, at any ZeRO stage, on any
   number of ranks: its tensors are whole and logical, whoever wrote which part.

       DIR/lock                    names the process that saves here, and is held by it
       DIR/step-200/               complete, or not there at all
           model.safetensors       every parameter, under its name or where dt_checkpoint_desc.place
                                   says
           optim.safetensors       m.NAME, v.NAME, master.NAME: state of every parameter that is
                                   trained
           config.json             what the program puts beside them
           manifest.json           format number, step, loss scale, the program's numbers; the size
                                   of each file, a digest of its header and of each tensor; its own
                                   digest at the end
       DIR/step-400.1a2b3c.tmp/    being written, or left by a job that was killed: the next one
                                   removes it. The number is another each time: ranks that do not
                                   share the folder cannot find it

   Removing a checkpoint removes its four files, then the folder if it is empty. A symbolic link in
   place of the folder or of a file is removed itself, not its target; nor is anything written
   through a link.

   All ranks write the two files at once, each the parts that it alone has and its share of what
   many have. Then every file is synced, the manifest is written and synced, the folder is synced
   and renamed, and the one above is synced: at any instant there is the checkpoint before or the
   new one, and once dt_checkpoint_save has returned DT_OK the new one stays. A checkpoint replaces
   none: where step-200 is taken it becomes step-200-2. The newest that is whole counts. */
enum { DT_CHECKPOINT_FORMAT = 1 };

/* Numbers of the program that belong to a checkpoint: how many samples it has seen, say. Names are
   unique; the numbers are finite, and the same on all ranks. dt_checkpoint_save stores their values
   at that time, and dt_checkpoint_load fills them in. */
typedef struct dt_saved {
    const char *name;
    double *values;
    int count;
} dt_saved;

/* Where a parameter lies in model.safetensors: n parts that follow each other, as in
   dt_weights_load. */
typedef struct dt_file_place {
    char name[2][96];
    dt_weight_part part[2]; /* .name is not used */
    int n;                  /* 1 or 2 */
    int64_t columns;        /* 0 -> the parameter's last dimension */
    dt_shape shape;         /* of each of these tensors, whole */
} dt_file_place;

typedef struct dt_checkpoint_desc {
    /* checkpoints are written there; it is made. NULL: this job only loads */
    const char *dir;
    int keep; /* so many of the newest are kept; 0: all */
    /* 1: dt_checkpoint_save copies what this rank writes to host memory and returns; a thread for
       each rank writes it. A rank holds its share of the state twice then */
    int background;
    const dt_saved *saved; /* (n_saved) */
    int n_saved;
    const char *config; /* a text to be saved, any bytes, at most 16 MiB; may be NULL */
    const char *beside; /* becomes config.json, at most 100,000,000 bytes, or NULL */
    /* NULL: under its own name */
    void (*place)(const dt_tensor *param, dt_file_place *place, void *user);
    /* on rank 0, from 0 to 1, while it saves; may be NULL */
    void (*progress)(double done, void *user);
    void *user;
} dt_checkpoint_desc;

typedef struct dt_checkpoint dt_checkpoint;
/* [collective: world] After dt_zero_make. What desc points to is read until dt_checkpoint_close.
   NULL after a failure: DT_ERR_IO, when another process saves there, it names that; DT_ERR_ARG for
   data that could be saved but not loaded: two arrays in `saved` of one name, more numbers (4
   million) or text than a manifest holds; DT_ERR_UNSUPPORTED for an io table without folders. */
DT_API dt_checkpoint *dt_checkpoint_open(dt_zero *zero, dt_checkpoint_desc desc);
/* [collective: world] Between dt_zero_step and the next forward. Saves the state after that step.
   On failure every rank fails, with DT_ERR_IO where a file is the reason, and what was there before
   is as it was. That also holds where the ranks do not see the same folder, and where the folder
   has a newer checkpoint than this job has loaded or saved. In the background it waits for the save
   before it only, and a failure is told by the next call of dt_checkpoint_poll, _save or _close.
   Else the ranks wait for the slowest one's disk, as in a collective: no longer than the run's
   timeout_s. */
DT_API dt_status dt_checkpoint_save(dt_checkpoint *checkpoint);
/* [collective: world] Moves a save in the background on: call it once a step. 1 when none is under
   way any more. */
DT_API int dt_checkpoint_poll(dt_checkpoint *checkpoint);
/* [collective: world] Before the first step. from: a checkpoint, or a folder of them: the newest
   that is whole; NULL: desc.dir. Reads all of it and compares every digest before anything changes;
   a notice names a damaged one, and the one before it is used. One that cannot be read
   (permissions, descriptors, memory, the disk) may be intact: that is a failure. Returns its step;
   0: there is no checkpoint (or it is of step 0, and dt_checkpoint_path names it); -1 after a
   failure: also if none is whole, or it is of a newer format, of another model, optimizer, type or
   seed. Errors of 1-bit Adam, which belong to a layout, are zero in another, with a notice. */
DT_API int64_t dt_checkpoint_load(dt_checkpoint *checkpoint, const char *from);
/* [local] The name of the newest checkpoint in a folder, "step-200", in `name`, "" if there is
   none. Whether it is whole only dt_checkpoint_load finds. Returns its step; -1: there is none, or
   no such folder; -2: the folder cannot be listed, with the reason in errno. */
DT_API int64_t dt_checkpoint_newest(const dt_io *io, const char *dir, char *name, size_t bytes);
/* [local] Of what was loaded or saved last: its folder, and the text of desc.config that was saved
   with it. "" if nothing was. */
DT_API const char *dt_checkpoint_path(const dt_checkpoint *checkpoint);
DT_API const char *dt_checkpoint_config(const dt_checkpoint *checkpoint);
/* [collective: world] Waits for a save in the background, and gives the folder free. NULL is
   allowed. */
DT_API dt_status dt_checkpoint_close(dt_checkpoint *checkpoint);

typedef struct dt_export_desc {
    /* as in dt_checkpoint_desc */
    void (*place)(const dt_tensor *param, dt_file_place *place, void *user);
    void *user;
    /* version 3 or 5: an llm.c model, of whose tensors place says the parts; 0: safetensors */
    dt_llmc llmc;
} dt_export_desc;
/* [collective: world] The parameters alone, as one file for others to read, in any layout: written
   by all ranks at once to path.tmp, synced, and renamed by rank 0. DT_ERR_IO where a file is the
   reason. */
DT_API dt_status dt_zero_export(dt_zero *zero, const char *path, dt_export_desc desc);

// ==== 4. Account ================================================================================

/* What a rank holds and sends for its parameters, before there is a program: the formulas of S.
   Rajbhandari et al., "ZeRO", arXiv:1910.02054, sections 5 and 7. E elements, N ranks that share
   the data, a micro-batches in a step; values, grads and state: bytes of an element. A step sends,
   each times (N-1)/N:

       stage   holds                          sends
       0       (values + grads + state) E     2 grads E                all-reduce
       1       (values + grads + state/N) E   (grads + values) E       reduce-scatter, and all-gather after the update
       2       (values + (grads + state)/N) E (a grads + values) E     the same, but gradients in
                                                                       each micro-batch
       3       (values + grads + state)/N E   a (grads + 2 values) E   gathered in each forward and each backward
       3 kept  the same                       (a grads + values) E     gathered once a step

   Not in it: the tree's levels and its traffic, sums over copies of shard groups, a second gather
   of a backward in two halves, offload; what is gathered or summed at the moment, activations,
   frozen parameters, the padding of units to a multiple of N * 1,024 elements (with E as the sum of
   dt_bucket.padded the bytes are exact). A dry run (dt_parallel.h) counts all of it. */
typedef struct dt_zero_formula_desc {
    double elements; /* E: of one rank's cut, if other axes cut parameters */
    int stage;       /* 0 to 3 */
    int ranks;       /* N; 0 -> 1 */
    int micros;      /* a; 0 -> 1 */
    int kept;        /* stage 3: 1: gathered once a step */
    /* Adam: f32 4, 4, 8; f64 8, 8, 16; bf16 and f16 with an f32 master 2, 4, 12; the paper's 16-bit
       gradients 2, 2, 12. All 0 -> 4, 4, 8 */
    double values, grads, state;
} dt_zero_formula_desc;
/* a rank's; sent in a step */
typedef struct dt_zero_bytes {
    double params, grads, optim, total, sent;
} dt_zero_bytes;
/* [local] Bytes by these formulas; all NaN for a stage that is none or a negative number. */
DT_API dt_zero_bytes dt_zero_formula(dt_zero_formula_desc desc);

#ifdef __cplusplus
}
#endif
#endif /* DT_ZERO_H */

#if defined(DT_IMPLEMENTATION) && !defined(DT_ZERO_IMPL)
#define DT_ZERO_IMPL

#include "dt_parallel.h"

#include <sys/resource.h>

#ifdef __cplusplus
extern "C" {
#endif

// ==== 5. Implementation: learning rate ==========================================================

/* The last step at the peak of a warmup that is followed by a stable phase and a decay. */
static int64_t dt__lr_stable(dt_lr_desc d) { /* needs 0 <= warmup < steps */
    int64_t last = d.steps - (d.decay > 0 ? d.decay : d.steps / 5 + (d.steps % 5 != 0));
    return last > d.warmup ? last : d.warmup;
}

double dt_lr(dt_lr_desc d, int64_t step) {
    if (d.warmup < 0) d.warmup = 0;
    if (step <= d.warmup) return step > 0 ? d.peak * (double)step / (double)d.warmup : 0;
    if (d.kind == DT_LR_CONSTANT) return d.peak;
    double lowest = d.min_ratio * d.peak;
    if (step >= d.steps) return lowest;
    int64_t from = d.kind == DT_LR_WSD ? dt__lr_stable(d) : d.warmup;
    if (step <= from) return d.peak;
    double done = (double)(step - from) / (double)(d.steps - from);
    double left =
        d.kind == DT_LR_LINEAR ? 1 - done : 0.5 * (1 + cos(3.14159265358979323846 * done));
    if (d.kind == DT_LR_WSD) left = 1 - sqrt(done);
    return lowest + left * (d.peak - lowest);
}

// ==== 6. Units, groups and runs =================================================================

/* Offload, section 12: one transfer to or from the disk. The thread that makes it owns it while it
   is busy. */
typedef struct dt__disk_job {
    int write, busy;
    void *at;
    size_t bytes;
    int64_t offset;
    const char *what;
    int64_t done; /* bytes that went, fewer than `bytes` after a failure */
    int error;    /* errno of it */
    struct dt__disk_job *next;
    void *device; /* not NULL: what `at`, in the host's memory, is a copy of */
} dt__disk_job;

enum { DT__STATE_0 = 0, DT__STATE_1, DT__MASTER, DT__VALUES, DT__GRAD, DT__ARRAYS, DT__SETS = 3 };

/* Buffers of one chunk, and the transfers from and to them. */
typedef struct dt__disk_set {
    int unit;
    size_t first, count; /* elements of the unit */
    void *buf[DT__ARRAYS];
    dt__disk_job job[DT__ARRAYS];
} dt__disk_set;

typedef struct dt__disk dt__disk;

/* The groups of a unit. `data` is that whose ranks saw different samples of the same parameters. It
   falls into shard groups, whose n ranks cut the padded unit into n equal runs; ranks at the same
   place of each hold copies of the same run:

       data group 0 1 2 3 4 5, shard groups of 2:   {0 1} {2 3} {4 5}   copies of run 0: {0 2 4}, of run 1: {1 3 5}

   At stage 0 every rank works on the whole unit, else on its run. There are two kinds: units whose
   parameters are whole on every rank of ep, dense ones, and those which ep cuts, experts. Their
   data groups are dp x ep x cp and dp x cp. */
typedef struct dt__zero_groups {
    dt_comm *data, *shard, *copies;
} dt__zero_groups;
enum { DT__DENSE = 0, DT__EXPERTS, DT__KINDS };
enum { DT__OVER_TP = DT__KINDS, DT__OVER_PP }; /* what else is compared: dt__zero_compare */

/* What this layer knows of a unit. */
typedef struct dt__zero_unit {
    dt_bucket *unit;
    dt_comm *data, *shard, *copies;
    size_t first, count; /* the elements this rank sums and updates */
    void *state[2];      /* (count) each, of the gradient's type */
    /* (count) the parameter in f32 where it is bf16 or f16, else NULL */
    void *master;
    /* stages 2, 3: (count) of the step's gradient, made by the first backward */
    void *grad;
    size_t grad_bytes; /* of it; 0 where it only passes, on its way to a disk */
    int ready, filled; /* in this micro-batch; grad holds earlier ones */
    int over;          /* in this step */
    void *passing;     /* stages 2, 3: a micro-batch's gradient on its way */
    dt_work *work;     /* its reduction, under way */
    void *whole;       /* stage 3: where its values are, or will be */
    dt_work *gather;   /* under way */
    void *host_values; /* (count) this rank's run, where it lies in host memory */
    dt__disk_job read; /* of its run from the disk */
    /* of its gradient, where that lies on disk and `grad` only passes */
    dt__disk_job grad_job;
    int holder;   /* stage 3: the block that has it gathered, 0 outside of blocks */
    void *levels; /* of the tree: partial sums of this rank's run, (n_levels, run) */
    size_t levels_bytes;
    size_t sums; /* place of its runs' sums of squares in zero->sums */
    /* its own among the units of all pipeline stages, in the order of one rank */
    size_t place;
    /* 1-bit Adam: this rank's as a worker, and as the server of run r */
    void *errors[2];
    size_t error_bytes[2];
} dt__zero_unit;

/* The order in which a micro-batch gathers units, as the last one did it. */
typedef struct dt__zero_gathered {
    int unit, block;
} dt__zero_gathered;
typedef struct dt__zero_plan {
    dt__zero_gathered *items;
    int n, room, at;
} dt__zero_plan;

struct dt_zero {
    dt_ctx *ctx;
    dt_zero_desc desc;
    dt_mesh mesh;
    dt__zero_groups groups[DT__KINDS];
    dt_listener listener;
    dt__zero_unit *units; /* (n_units) */
    int n_units;
    /* the pipeline stage whose micro-batch is being reduced, -1: none */
    int turn;
    /* its unit to reduce next: they go in descending order; -1: none is left */
    int next;
    int oldest; /* the first whose reduction is under way */
    int states;
    const dt_kernels *table; /* of the update */
    void *stream;
    /* 1: the step's gradients have been summed over pipeline stages too */
    int tied_summed;
    /* (n_stages,3): of the forward, of the backward, of the weight half of one in two */
    dt__zero_plan *plans;
    int n_stages; /* of this rank's last stage, and one more */
    int backward; /* which of the three is followed */
    void *leaves; /* of the tree: this rank's run of a unit from all ranks */
    size_t leaves_bytes;
    /* (n_sums) of squares, one for each run of DT_PIECE elements; those of experts last */
    double *sums;
    size_t n_sums, n_dense;
    double *totals;  /* (n_places) the same of each unit */
    size_t n_places; /* units of all pipeline stages */
    /* 1-bit Adam: signs that leave this rank, then signs that reach it */
    void *messages;
    size_t messages_bytes;
    int64_t step;
    dt__disk *disk;     /* of offload to a folder */
    int storing;        /* the unit whose gradient is being written, -1: none */
    dt__disk_set *sets; /* (DT__SETS) chunks of the update of what is offloaded */
    size_t chunk, chunk_bytes;
    double scale;                 /* of the loss */
    int good, patience;           /* steps since the scale changed; skips until it falls */
    int skips;                    /* in a row */
    double history[DT_MAX_SKIPS]; /* the scales of those */
};

/* Section 13. */
static int dt__onebit_frozen(const dt_zero *zero);
static dt_status dt__onebit_check(dt_ctx *ctx, const dt_zero_desc *d);
static dt_status dt__onebit_make(dt_zero *zero);
static void dt__onebit_free(dt_zero *zero);
static size_t dt__onebit_bytes(const dt_zero *zero, const dt_bucket *unit);
static dt_status dt__onebit_sums(dt_zero *zero);
static int dt__onebit_at_fault(dt_zero *zero, const dt_bucket *unit, size_t run);
static dt_status dt__onebit_momentum(dt_zero *zero, dt__zero_unit *z, double grad_scale);

/* Bytes of an element of gradients and state. */
static size_t dt__zero_size(const dt__zero_unit *z) { return dt_dtype_size(z->unit->grad_dtype); }

/* An element of gradients or state. */
static void *dt__zero_at(const dt__zero_unit *z, void *array, size_t element) {
    return (char *)array + element * dt__zero_size(z);
}

/* The values of this rank's run, if they are in memory, and its gradient. */
static void *dt__zero_values(const dt__zero_unit *z) {
    if (z->host_values) return z->host_values;
    return (char *)z->unit->kept + (z->first - z->unit->first) * dt_dtype_size(z->unit->dtype);
}
static void *dt__zero_run_grad(const dt__zero_unit *z) {
    return z->grad ? z->grad : dt__zero_at(z, z->unit->grad, z->first);
}

static int dt__zero_has_master(const dt_bucket *unit) {
    return unit->dtype != unit->grad_dtype && !unit->frozen;
}

/* The coordinate along pp of a world rank. */
static int dt__zero_pp_of(const dt_zero *zero, int rank) {
    const dt_mesh_desc *n = &zero->mesh.sizes;
    return rank / (n->tp * n->cp * n->ep * n->dp);
}

/* Whether a group joins ranks that hold copies of what this rank holds: ranks that differ in dp, ep
   or cp only. Told by coordinates, because the caller may have made the group in another way than
   dt_mesh_make did. */
static int dt__zero_has_copies(const dt_zero *zero, const dt_comm *comm) {
    const dt_mesh *m = &zero->mesh;
    int found = 0;
    for (int i = 0; comm && i < dt_comm_size(comm); i++) {
        int rank = dt_comm_world_rank(comm, i);
        int copy = rank % m->sizes.tp == m->at.tp && dt__zero_pp_of(zero, rank) == m->at.pp;
        found |= copy && rank != dt_comm_world_rank(comm, dt_comm_rank(comm));
    }
    return found;
}

static const dt_param_desc *dt__unit_desc(const dt_zero *zero, const dt_bucket *unit) {
    /* all parameters of a unit are cut alike */
    return &dt_param_get(zero->ctx, unit->first_param)->param->desc;
}

static int dt__is_expert(const dt_zero *zero, const dt_param_desc *d) {
    for (int c = 0; c < 3; c++)
        if (dt__zero_has_copies(zero, d->shards[c].comm)) return 1;
    return 0;
}

static const dt__zero_groups *dt__groups_of(const dt_zero *zero, const dt_bucket *unit) {
    return &zero->groups[dt__is_expert(zero, dt__unit_desc(zero, unit)) ? DT__EXPERTS : DT__DENSE];
}

/* How many ranks cut a unit. */
static int dt__zero_parts(const dt_zero *zero, const dt_bucket *unit) {
    return zero->desc.stage >= 1 ? dt_comm_size(dt__groups_of(zero, unit)->shard) : 1;
}

/* The group along which stages of a pipeline hold copies of a unit, as of an embedding that is the
   head too. */
static dt_comm *dt__zero_tied(const dt_zero *zero, const dt_bucket *unit) {
    const dt_grad_placement *grad_placements = dt__unit_desc(zero, unit)->grad_placements;
    for (int k = 0; k < 2; k++)
        for (int i = 0; grad_placements[k].comm && grad_placements[k].kind == DT_GRAD_PARTIAL &&
                        i < dt_comm_size(grad_placements[k].comm);
             i++)
            if (dt__zero_pp_of(zero, dt_comm_world_rank(grad_placements[k].comm, i)) !=
                zero->mesh.at.pp)
                return grad_placements[k].comm;
    return NULL;
}

/* The groups in which units are cut, and in which runs have copies: shard groups of as many ranks
   as wished, or where that does not divide the experts' group, of the largest smaller number that
   does. */
static dt_status dt__zero_groups_make(dt_zero *zero) {
    dt_comm *data[DT__KINDS] = { zero->mesh.data, zero->mesh.experts };
    int ranks = dt_comm_size(data[0]),
        wish = zero->desc.shard_group ? zero->desc.shard_group : ranks;
    if (wish < 1 || ranks % wish != 0)
        return dt_fail(zero->ctx, DT_ERR_ARG,
            "dt_zero_make: shard groups of %d ranks in a data group of %d: the size "
            "must divide it",
            wish, ranks);
    for (int k = 0; k < DT__KINDS; k++) {
        dt__zero_groups *g = &zero->groups[k];
        int n = dt_comm_size(data[k]), rank = dt_comm_rank(data[k]);
        if (k > 0 && data[k] == data[0]) { /* without ep there is one kind */
            *g = zero->groups[0];
            continue;
        }
        g->data = g->shard = data[k];
        while (n % wish != 0 || wish > n) wish--;
        if (zero->desc.stage == 0 || wish == n || !zero->desc.shard_group) continue;
        g->shard = wish == 1 ? NULL : dt_comm_split(data[k], rank / wish, rank, "shard");
        g->copies = dt_comm_split(data[k], rank % wish, rank, "copies");
        dt_comm_set_axis(g->shard, DT_AXIS_DP);
        dt_comm_set_axis(g->copies, DT_AXIS_DP);
    }
    return dt_error(zero->ctx);
}

/* Of offload, section 12, and of dry runs. */
static int dt__is_dry_run(const dt_zero *zero) { return zero->ctx->kernels.alloc == dt__dry_alloc; }
static int dt__on_disk(const char *place);
static int dt__in_host(const char *place);
static int dt__streams(const dt_zero *zero);
static dt_status dt__disk_open(dt_zero *zero);
static dt_status dt__disk_wait(dt_zero *zero, dt__disk_job *job);
static dt_status dt__chunks_make(dt_zero *zero);
static dt_status dt__values_store(dt_zero *zero, dt__zero_unit *z, dt_bucket *unit, void *run);
static dt_status dt__values_read_start(dt_zero *zero, dt__zero_unit *z);
static dt_status dt__values_peek(
    dt_zero *zero, const dt_bucket *unit, size_t at, void *host, size_t bytes);
static int dt__grads_on_disk(const dt_zero *zero);
static int dt__grad_on_disk(const dt_zero *zero, const dt_bucket *unit);
static dt_status dt__grads_begin(dt_zero *zero, dt__zero_unit *z);
static dt_status dt__grads_end(dt_zero *zero, dt__zero_unit *z);
static dt_status dt__grads_settle(dt_zero *zero);
static dt_status dt__grads_peek(
    dt_zero *zero, dt__zero_unit *z, size_t element, void *host, size_t count);

static dt_status dt__zero_unit_make(dt_zero *zero, int u) {
    dt_ctx *ctx = zero->ctx;
    dt__zero_unit *z = &zero->units[u];
    z->unit = dt_bucket_get(ctx, u);
    const dt__zero_groups *groups = dt__groups_of(zero, z->unit);
    z->data = groups->data;
    z->shard = groups->shard;
    z->copies = groups->copies;
    size_t parts = (size_t)dt__zero_parts(zero, z->unit);
    z->count = z->unit->padded / parts;
    z->first = parts > 1 ? (size_t)dt_comm_rank(z->shard) * z->count : 0;
    dt_mem mem = dt__in_host(zero->desc.offload_optim) ? DT_MEM_HOST : DT_MEM_OPTIM;
    size_t bytes = dt__on_disk(zero->desc.offload_optim) ? 0 : z->count * dt__zero_size(z);
    for (int s = 0; s < zero->states && !z->unit->frozen && bytes; s++) {
        z->state[s] = dt_alloc(ctx, mem, bytes, "optimizer state");
        if (!z->state[s]) return dt_error(ctx);
        if (mem == DT_MEM_HOST)
            memset(z->state[s], 0, bytes);
        else if (dt__fill(ctx, z->unit->grad_dtype, z->state[s], z->count, 0) != DT_OK)
            return dt_error(ctx);
    }
    if (dt__zero_has_master(z->unit) && bytes)
        z->master = dt_alloc(ctx, mem, bytes, "master parameters");
    return dt_error(ctx);
}

/* What is known of units, all zero; made once their number is known. */
static dt_status dt__zero_units_alloc(dt_zero *zero) {
    if (zero->units) return DT_OK;
    zero->n_units = dt_bucket_count(zero->ctx);
    size_t bytes = (size_t)zero->n_units * sizeof *zero->units;
    zero->units = (dt__zero_unit *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "dt_zero_make");
    if (zero->units) memset(zero->units, 0, bytes);
    return dt_error(zero->ctx);
}

static dt_status dt__zero_share(dt_comm *comm, double *all, double mine);

/* Places of units among those of all stages of the pipeline: first by stage, then as they were
   registered. */
static dt_status dt__zero_places(dt_zero *zero) {
    dt_comm *pp = zero->mesh.pp;
    size_t ranks = (size_t)dt_comm_size(pp), stages = 1;
    double *all = (double *)dt_alloc(zero->ctx, DT_MEM_HOST, ranks * sizeof *all, "stages");
    if (all && dt__zero_share(pp, all, zero->n_stages) == DT_OK)
        for (size_t r = 0; r < ranks; r++)
            stages = (size_t)all[r] > stages ? (size_t)all[r] : stages;
    dt_free(zero->ctx, DT_MEM_HOST, all, ranks * sizeof *all);
    double *units =
        (double *)dt_alloc(zero->ctx, DT_MEM_HOST, stages * sizeof *units, "units of each stage");
    if (!units) return dt_error(zero->ctx);
    memset(units, 0, stages * sizeof *units);
    for (int u = 0; u < zero->n_units; u++)
        zero->units[u].place = (size_t)units[zero->units[u].unit->stage]++;
    dt_sum_doubles(pp, units, stages);
    for (size_t s = 0, first = 0; s < stages && dt_error(zero->ctx) == DT_OK; s++) {
        for (int u = 0; u < zero->n_units; u++)
            if ((size_t)zero->units[u].unit->stage == s) zero->units[u].place += first;
        first += (size_t)units[s];
        zero->n_places = first;
    }
    dt_free(zero->ctx, DT_MEM_HOST, units, stages * sizeof *units);
    return dt_error(zero->ctx);
}

/* Room for the sums of the norm, and the places in it. */
static dt_status dt__zero_sums_make(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    for (int kind = 0; kind < DT__KINDS; kind++) {
        for (int u = 0; u < zero->n_units; u++) {
            dt__zero_unit *z = &zero->units[u];
            if (dt__is_expert(zero, dt__unit_desc(zero, z->unit)) != kind) continue;
            z->sums = zero->n_sums;
            zero->n_sums += z->unit->padded / DT_PIECE;
        }
        if (kind == DT__DENSE) zero->n_dense = zero->n_sums;
    }
    if (dt__zero_places(zero) != DT_OK) return dt_error(ctx);
    zero->sums = (double *)dt_pin(ctx, zero->n_sums * sizeof *zero->sums, "sums of the norm");
    zero->totals = (double *)dt_alloc(
        ctx, DT_MEM_HOST, zero->n_places * sizeof *zero->totals, "sums of the norm");
    return dt_error(ctx);
}

/* Sums zero->sums over ranks: those of dense units over one group, those of experts over the
   other. */
static dt_status dt__zero_sum_kinds(dt_zero *zero, dt_comm *dense, dt_comm *experts) {
    if (dt_sum_doubles(dense, zero->sums, zero->n_dense) != DT_OK) return dt_error(zero->ctx);
    if (zero->n_sums == zero->n_dense) return DT_OK;
    return dt_sum_doubles(experts, zero->sums + zero->n_dense, zero->n_sums - zero->n_dense);
}

static dt_status dt__zero_units_make(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    if (dt__zero_units_alloc(zero) != DT_OK || (!zero->disk && dt__disk_open(zero) != DT_OK))
        return dt_error(ctx);
    for (int u = 0; u < zero->n_units; u++)
        if (dt__zero_unit_make(zero, u) != DT_OK) return dt_error(ctx);
    return dt__zero_sums_make(zero) == DT_OK ? dt__chunks_make(zero) : dt_error(ctx);
}

/* Only ep may cut among ranks that hold copies; a mark along such an axis would sum twice. */
static dt_status dt__zero_check_params(dt_zero *zero) {
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        const dt_param_desc *d = &t->param->desc;
        for (int c = 0; c < 3; c++)
            if (d->shards[c].comm != zero->mesh.ep && dt__zero_has_copies(zero, d->shards[c].comm))
                return dt_fail(zero->ctx, DT_ERR_UNSUPPORTED,
                    "dt_zero_make: %s is cut over '%s', whose ranks are data "
                    "parallel: only ep of the mesh can cut there; is .mesh the mesh that made the "
                    "group?",
                    t->name, dt_comm_name(d->shards[c].comm));
        for (int k = 0; k < 2; k++)
            if (dt__zero_has_copies(zero, d->grad_placements[k].comm))
                return dt_fail(zero->ctx, DT_ERR_UNSUPPORTED,
                    "dt_zero_make: %s has a mark over '%s', along which "
                    "gradients are summed already",
                    t->name, dt_comm_name(d->grad_placements[k].comm));
    }
    return DT_OK;
}

/* What must be alike on every rank. Item 0 is the optimizer, item i parameter i - 1. cut: which
   part of it this rank has belongs to it. */
typedef struct dt__zero_text {
    char s[208];
} dt__zero_text;

static uint64_t dt__zero_digest(uint64_t h, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)data + i, bytes - i < 8 ? bytes - i : 8);
        h = (h ^ word) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    return h;
}

static dt__zero_text dt__zero_describe(const dt_zero *zero, int item, int cut) {
    static const char *const inits[] = { "zeros", "ones", "normal", "uniform" };
    const dt_zero_desc *z = &zero->desc;
    const dt_tensor *t = dt_param_get(zero->ctx, item - 1);
    dt__zero_text text = { "nothing" };
    size_t at = 0, room = sizeof text.s;
    const dt_scale_desc *c = &z->scale;
    double more[] = { c->init, c->growth, c->backoff, (double)c->interval, (double)c->hysteresis,
        c->least, (double)z->keep_gathered, (double)z->no_overlap, (double)z->states,
        (double)dt__streams(zero),
        (double)(dt__on_disk(z->offload_params) || dt__in_host(z->offload_params)) };
    uint64_t others = dt__zero_digest(1, more, sizeof more) & 0xffffff; /* too many to be named */
    if (item == 0)
        snprintf(text.s, room,
            "optimizer %d of stage %d/%d%s, scale %g, betas %g %g, eps %g, momentum %g, "
            "decay %g, clip %g, freeze %d, others #%06x",
            z->optimizer, z->stage, z->shard_group, z->tree ? ", tree" : "", z->loss_scale,
            z->beta1, z->beta2, z->eps, z->momentum, z->weight_decay, z->clip, z->freeze_steps,
            (unsigned)others);
    if (!t) return text;
    const dt_param_info *p = t->param;
    const dt_param_desc *d = &p->desc;
    at += (size_t)snprintf(text.s, room, "%.40s %s %.40s %s %.9g in unit %d%s%s", t->name,
        dt_dtype_name(t->dtype), dt__shape_text(p->full).s,
        p->init.kind >= 0 && p->init.kind < 4 ? inits[p->init.kind] : "?", p->init.scale,
        p->unit->index, d->frozen ? ", frozen" : "", d->no_decay ? ", no_decay" : "");
    if (d->lr_scale != 0 && at < room)
        at += (size_t)snprintf(text.s + at, room - at, ", lr_scale %g", d->lr_scale);
    for (int c = 0; c < 3 && at < room; c++)
        if (d->shards[c].comm)
            at += (size_t)snprintf(text.s + at, room - at, ", cut %d:%d/%d", d->shards[c].dim,
                cut ? dt_comm_rank(d->shards[c].comm) : 0, dt_comm_size(d->shards[c].comm));
    for (int m = 0; m < 2 && at < room; m++)
        if (d->grad_placements[m].comm)
            at += (size_t)snprintf(text.s + at, room - at, ", mark %d/%d",
                d->grad_placements[m].kind, dt_comm_size(d->grad_placements[m].comm));
    return text;
}

/* Of what an item is, or of the values a parameter holds. kind: the group is the data group of
   dense units or of experts, and looks at these; or it is tp, where values are compared of what
   nothing cuts, or pp, whose ranks have the optimizer in common. */
static uint64_t dt__zero_item(dt_zero *zero, int item, int values, int kind) {
    const dt_tensor *t = dt_param_get(zero->ctx, item - 1);
    char piece[4096];
    uint64_t h = 1;
    if (kind < DT__KINDS && (t ? dt__is_expert(zero, &t->param->desc) : DT__DENSE) != kind)
        return h;
    if (kind == DT__OVER_PP && item > 0) return h;
    if (!values) {
        dt__zero_text text = dt__zero_describe(zero, item, kind < DT__KINDS);
        h = dt__zero_digest(h, text.s, strlen(text.s));
        return t ? dt__zero_digest(h, t->name, strlen(t->name)) : h;
    }
    if (!t) return h;
    const dt_param_info *p = t->param;
    const dt_bucket *unit = p->unit;
    size_t size = dt_dtype_size(t->dtype),
           begin = p->offset > unit->first ? p->offset : unit->first;
    size_t end = p->offset + p->count < unit->first + unit->run ? p->offset + p->count
                                                                : unit->first + unit->run;
    size_t bytes = begin < end ? (end - begin) * size : 0;
    size_t first = (begin - unit->first) * size; /* what is kept of it */
    for (int c = 0; c < 3; c++)
        if (p->desc.shards[c].comm && kind == DT__OVER_TP) bytes = 0;
    if (zero->ctx->kernels.alloc == dt__dry_alloc) bytes = 0; /* all zeros, and too many to read */
    for (size_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < sizeof piece ? bytes - at : sizeof piece;
        if (dt__values_peek(zero, unit, first + at, piece, n) != DT_OK) break;
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

/* Compares all items with those of the group's rank 0, by digests that are summed as halves, which
   is exact and counts as no traffic. 0: they differ, *item is the first that does and *rank the
   first rank it does on. */
static int dt__zero_alike(
    dt_zero *zero, dt_comm *comm, int values, int kind, int *item, int *rank) {
    dt_ctx *ctx = zero->ctx;
    size_t ranks = (size_t)dt_comm_size(comm), most = 0, first = 0;
    if (ranks == 1) return 1;
    double *all = (double *)dt_alloc(ctx, DT_MEM_HOST, ranks * sizeof *all, "comparing ranks"),
           *theirs = NULL;
    if (all && dt__zero_share(comm, all, dt_param_count(ctx) + 1) == DT_OK)
        for (size_t r = 0; r < ranks; r++) most = (size_t)all[r] > most ? (size_t)all[r] : most;
    if (most)
        theirs = (double *)dt_alloc(ctx, DT_MEM_HOST, 4 * most * sizeof *theirs, "comparing ranks");
    double *mine = theirs ? theirs + 2 * most : NULL;
    for (size_t i = 0; theirs && i < most; i++) {
        uint64_t h = dt__zero_item(zero, (int)i, values, kind);
        mine[2 * i] = (double)(h >> 32);
        mine[2 * i + 1] = (double)(h & 0xffffffff);
        for (int k = 0; k < 2; k++)
            theirs[2 * i + k] = dt_comm_rank(comm) == 0 ? mine[2 * i + k] : 0;
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

/* A tied unit: who shares it, and what it is. */
typedef struct dt__tied_unit {
    double group, digest;
} dt__tied_unit;

static dt__tied_unit dt__zero_tied_unit(dt_zero *zero, const dt_bucket *unit, int values) {
    const dt_comm *tied = dt__zero_tied(zero, unit);
    uint64_t group = 1, h = 1;
    for (int i = 0; i < dt_comm_size(tied); i++) {
        int rank = dt_comm_world_rank(tied, i);
        group = dt__zero_digest(group, &rank, sizeof rank);
    }
    for (int i = unit->first_param; i < unit->first_param + unit->params; i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        double more[] = { (double)t->dtype, (double)t->param->count, t->param->desc.lr_scale,
            (double)(t->param->desc.no_decay != 0), (double)unit->padded };
        h = dt__zero_digest(dt__zero_digest(h, t->name, strlen(t->name)), more, sizeof more);
        if (values) h ^= dt__zero_item(zero, i + 1, 1, DT__DENSE) * 3;
    }
    /* exact as doubles; group 0 is no unit */
    dt__tied_unit u = { (double)(group >> 12 | 1), (double)(h >> 12) };
    return u;
}

/* The k-th of some units that a group shares; NULL: there are fewer. */
static const dt__tied_unit *dt__tied_find(
    const dt__tied_unit *units, size_t n, double group, int k) {
    for (size_t i = 0; i < n; i++)
        if (units[i].group == group && k-- == 0) return &units[i];
    return NULL;
}

/* Whether rank r of pp, if it shares units with this one, has the same in the same order. */
static dt_status dt__zero_tied_alike(
    dt_zero *zero, const dt__tied_unit *mine, const dt__tied_unit *theirs, size_t n, int r) {
    int world_rank = dt_comm_world_rank(zero->mesh.pp, r);
    for (int u = 0; u < zero->n_units; u++) {
        const dt_bucket *unit = zero->units[u].unit;
        const dt_comm *tied = dt__zero_tied(zero, unit);
        int k = 0, shares = 0;
        if (unit->frozen || !tied) continue;
        for (int i = 0; i < u; i++) k += mine[i].group == mine[u].group;
        for (int i = 0; i < dt_comm_size(tied); i++)
            shares |= dt_comm_world_rank(tied, i) == world_rank;
        const dt__tied_unit *other = shares ? dt__tied_find(theirs, n, mine[u].group, k) : &mine[u];
        if (other && other->digest == mine[u].digest) continue;
        return dt_fail(zero->ctx, DT_ERR_COMM,
            "dt_zero: %s is tied over '%s', where rank %d has %s: stages that share "
            "parameters register them under the same names, in the same order, with the same "
            "values",
            dt_param_get(zero->ctx, unit->first_param)->name, dt_comm_name(tied), world_rank,
            other ? "another one, or other values" : "none");
    }
    return DT_OK;
}

/* Gradients of tied units are added up in the order in which each of their ranks has them. */
static dt_status dt__zero_compare_tied(dt_zero *zero, int values) {
    dt_comm *pp = zero->mesh.pp;
    size_t ranks = (size_t)dt_comm_size(pp), me = (size_t)dt_comm_rank(pp),
           n = (size_t)zero->n_units;
    double most = 0;
    if (ranks == 1) return DT_OK;
    double *counts =
        (double *)dt_alloc(zero->ctx, DT_MEM_HOST, ranks * sizeof *counts, "comparing stages");
    if (counts && dt__zero_share(pp, counts, (double)n) == DT_OK)
        for (size_t r = 0; r < ranks; r++) most = counts[r] > most ? counts[r] : most;
    dt_free(zero->ctx, DT_MEM_HOST, counts, ranks * sizeof *counts);
    size_t bytes = ranks * (size_t)most * sizeof(dt__tied_unit);
    dt__tied_unit *all =
        (dt__tied_unit *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "comparing stages");
    if (!all) return dt_error(zero->ctx);
    memset(all, 0, bytes);
    dt__tied_unit *mine = all + me * (size_t)most;
    for (size_t u = 0; u < n; u++) {
        const dt_bucket *unit = zero->units[u].unit;
        if (!unit->frozen && dt__zero_tied(zero, unit))
            mine[u] = dt__zero_tied_unit(zero, unit, values);
    }
    dt_sum_doubles(pp, (double *)all, bytes / sizeof(double));
    for (size_t r = 0; r < ranks && dt_error(zero->ctx) == DT_OK; r++)
        dt__zero_tied_alike(zero, mine, all + r * (size_t)most, (size_t)most, (int)r);
    dt_free(zero->ctx, DT_MEM_HOST, all, bytes);
    return dt_error(zero->ctx);
}

/* The ranks that hold copies of the values of a kind of units: at stage 3 of this rank's run of
   them. */
static dt_comm *dt__zero_copy_group(const dt_zero *zero, int kind) {
    const dt__zero_groups *g = &zero->groups[kind];
    return zero->desc.stage == 3 && dt_comm_size(g->shard) > 1 ? g->copies : g->data;
}

/* Ranks that registered other parameters, or start from other values, would train on without a
   sign: copies over the data groups must be alike, what is not cut over tp, tied copies, and
   everywhere the optimizer. Once each, before the first step. */
static dt_status dt__zero_compare(dt_zero *zero, int values) {
    enum { ROOM = sizeof(dt__zero_text) };
    dt_ctx *ctx = zero->ctx;
    for (int kind = 0; kind <= DT__OVER_PP; kind++) {
        int data = kind < DT__KINDS;
        dt_comm *comm = kind == DT__OVER_TP   ? zero->mesh.tp
                        : kind == DT__OVER_PP ? zero->mesh.pp
                        : values              ? dt__zero_copy_group(zero, kind)
                                              : zero->groups[kind].data;
        double both[2 * ROOM];
        char text[2 * ROOM];
        int item = 0, rank = 0;
        int alike = dt__zero_alike(zero, comm, values, kind, &item, &rank);
        if (dt_error(ctx) != DT_OK) return dt_error(ctx);
        if (alike) continue;
        int zeroth = dt_comm_world_rank(comm, 0), other = dt_comm_world_rank(comm, rank);
        if (values)
            return dt_fail(ctx, DT_ERR_COMM,
                "dt_zero_step: rank %d starts from other values of %s than rank %d: load "
                "the same weights on every rank",
                other, dt_param_get(ctx, item - 1)->name, zeroth);
        dt__zero_text mine = dt__zero_describe(zero, item, data);
        int me = dt_comm_rank(comm);
        for (int i = 0; i < 2 * ROOM; i++)
            both[i] = me == (i < ROOM ? 0 : rank) ? mine.s[i % ROOM] : 0;
        if (dt_sum_doubles(comm, both, 2 * ROOM) != DT_OK) return dt_error(ctx);
        for (int i = 0; i < 2 * ROOM; i++) text[i] = (char)both[i];
        return dt_fail(ctx, DT_ERR_COMM,
            "dt_zero_make: rank %d has %s, where rank %d has %s: every rank registers the "
            "same parameters in the same order",
            other, text + ROOM, zeroth, text);
    }
    return dt__zero_compare_tied(zero, values);
}

// ==== 7. The reducer ============================================================================

/* Begins the sum over a group that a mark names. Gradients count as dp, whatever axis the group
   belongs to, but for those of tied parameters, which count as pp. */
static void dt__zero_mark_start(dt__zero_unit *z, dt_comm *comm, dt_axis counted) {
    dt_axis axis = comm->axis;
    void *run = dt__zero_run_grad(z);
    dt_comm_set_axis(comm, counted);
    z->work = dt_all_reduce_start(comm, run, run, z->count, z->unit->grad_dtype, DT_SUM);
    dt_comm_set_axis(comm, axis);
}

/* Stages 2 and 3 reduce the gradient of every micro-batch, and so does the tree; else their sum is
   reduced, once. */
static int dt__zero_keeps_run(const dt_zero *zero) { return zero->desc.stage >= 2; }
static int dt__zero_reduces_each(const dt_zero *zero) {
    return dt__zero_keeps_run(zero) || zero->desc.tree;
}

/* Sums a unit's gradient over the data group (arXiv:1910.02054), with N ranks in a shard group, S
   bytes of gradients and a micro-batches in a step:

                                                          a step sends, times (N-1)/N
       stage 0      all-reduce      the whole sum         2 S                              all of it stays
       stage 1      reduce-scatter  run r on rank r       S, and S for the new parameters  the rest is used up
       stages 2, 3  the same for each micro-batch         a S, and the parameters          only run r stays

   Then over the ranks that hold copies of the run, and over the groups that marks name: once a
   step. All sums are in rank order, so the bits of stages 0 and 1 agree, and those of 2 and 3. A
   reduction is started when the unit's gradient is complete and goes on while the backward computes
   the others (S. Li et al., "PyTorch Distributed", VLDB 2020). Stages 0 and 1 wait for all at the
   backward's end. Stages 2 and 3 let few be under way, for each holds a whole unit's gradient. */
static dt_status dt__zero_reduce_start(dt_zero *zero, dt__zero_unit *z) {
    dt_bucket *u = z->unit;
    dt_dtype type = u->grad_dtype;
    void *whole = z->passing ? z->passing : u->grad;
    /* ranks exchange the momentum instead */
    if (dt__onebit_frozen(zero)) return dt_error(zero->ctx);
    z->work = zero->desc.stage == 0
                  ? dt_all_reduce_start(z->data, whole, whole, u->padded, type, DT_SUM)
                  : dt_reduce_scatter_start(
                        z->shard, whole, dt__zero_at(z, whole, z->first), z->count, type, DT_SUM);
    return dt__grad_on_disk(zero, u) ? dt__grads_begin(zero, z) : dt_error(zero->ctx);
}

/* Stages 2 and 3: room for what a rank keeps of a unit's gradient. */
static dt_status dt__zero_grad_room(dt_zero *zero, dt__zero_unit *z) {
    if (z->grad) return dt_error(zero->ctx);
    z->grad_bytes = z->count * dt__zero_size(z); /* groups may be gone when it is given back */
    z->grad = dt_alloc(zero->ctx, DT_MEM_GRADS, z->grad_bytes, "gradients");
    return dt_error(zero->ctx);
}

static dt_status dt__zero_work_end(dt_zero *zero, dt__zero_unit *z) {
    dt_status status = dt_wait(zero->ctx, z->work);
    z->work = NULL;
    return status;
}

static dt_status dt__zero_reduce_end(dt_zero *zero, dt__zero_unit *z) {
    dt_status status = dt__zero_work_end(zero, z);
    if (status != DT_OK || !z->passing) return status;
    int on_disk = dt__grad_on_disk(zero, z->unit);
    if ((on_disk ? dt__disk_wait(zero, &z->grad_job) : dt__zero_grad_room(zero, z)) != DT_OK)
        return dt_error(zero->ctx);
    const void *run = dt__zero_at(z, z->passing, z->first);
    status = dt__accumulate(zero->ctx, z->unit->grad_dtype, z->grad, run, z->count, z->filled);
    dt__spare_give(zero->ctx, z->passing);
    z->passing = NULL;
    z->filled = 1;
    return status == DT_OK && on_disk ? dt__grads_end(zero, z) : status;
}

/* Whether unit u has a gradient in the micro-batch that is being reduced. */
static int dt__zero_has_turn(const dt_zero *zero, int u) {
    const dt_bucket *unit = zero->units[u].unit;
    return !unit->frozen && unit->stage == zero->turn;
}

/* Ends the oldest reductions until at most `most` are under way. */
static dt_status dt__zero_reduce_until(dt_zero *zero, int most) {
    int under_way = 0;
    for (int u = zero->oldest; u > zero->next; u--) under_way += dt__zero_has_turn(zero, u);
    for (; zero->oldest > zero->next && under_way > most; zero->oldest--) {
        dt__zero_unit *z = &zero->units[zero->oldest];
        if (!dt__zero_has_turn(zero, zero->oldest)) continue;
        if (dt__zero_reduce_end(zero, z) != DT_OK) return dt_error(zero->ctx);
        under_way--;
    }
    return dt_error(zero->ctx);
}

static dt_status dt__zero_sums(dt_zero *zero, int first, int end, int on_disk);

/* The sums of a unit's run beyond its shard group: over the copies, and over the groups that marks
   name. */
static void dt__zero_copies_start(dt__zero_unit *z) {
    void *run = dt__zero_run_grad(z);
    if (z->copies)
        z->work = dt_all_reduce_start(z->copies, run, run, z->count, z->unit->grad_dtype, DT_SUM);
}

static dt_status dt__zero_copies_end(dt_zero *zero, dt__zero_unit *z) {
    const dt_grad_placement *grad_placements = dt__unit_desc(zero, z->unit)->grad_placements;
    const dt_comm *tied = dt__zero_tied(zero, z->unit);
    if (dt__zero_work_end(zero, z) != DT_OK) return dt_error(zero->ctx);
    for (int i = 0; i < 2; i++) {
        if (!grad_placements[i].comm || grad_placements[i].comm == tied ||
            grad_placements[i].kind != DT_GRAD_PARTIAL)
            continue;
        dt__zero_mark_start(z, grad_placements[i].comm, DT_AXIS_DP);
        if (dt__zero_work_end(zero, z) != DT_OK) return dt_error(zero->ctx);
    }
    return DT_OK;
}

/* Once all stages of a pipeline have the sums of their own micro-batches, those of tied parameters
   are added up. Not before: a stage that waited for another in the midst of the step might keep it
   waiting. And all at once: stages may have them in different orders. */
static dt_status dt__zero_sum_tied(dt_zero *zero) {
    for (int u = 0; u < zero->n_units && !zero->tied_summed; u++) {
        dt__zero_unit *z = &zero->units[u];
        dt_comm *tied = z->unit->frozen ? NULL : dt__zero_tied(zero, z->unit);
        if (tied) dt__zero_mark_start(z, tied, DT_AXIS_PP);
    }
    for (int u = 0; u < zero->n_units && !zero->tied_summed; u++)
        dt__zero_work_end(zero, &zero->units[u]);
    zero->tied_summed = 1;
    return dt_error(zero->ctx);
}

/* Those of the step's last micro-batch; on disk, each run had them before it was written. */
static dt_status dt__zero_reduce_rest(dt_zero *zero) {
    /* the tree has added the copies */
    for (int u = zero->n_units - 1; u >= 0 && !zero->desc.tree; u--)
        if (dt__zero_has_turn(zero, u) && !dt__grad_on_disk(zero, zero->units[u].unit))
            dt__zero_copies_start(&zero->units[u]);
    for (int u = zero->n_units - 1; u >= 0; u--) {
        dt__zero_unit *z = &zero->units[u];
        if (!dt__zero_has_turn(zero, u)) continue;
        if (!dt__grad_on_disk(zero, z->unit) && dt__zero_copies_end(zero, z) != DT_OK)
            return dt_error(zero->ctx);
        z->over = 1;
    }
    return dt_error(zero->ctx);
}

/* The tree. Leaf m is the gradient of micro-batch m of the step; leaf j * N + r is rank r's j-th.
   Leaves are added as a binary counter counts: two sums of as many leaves become one, so level k
   holds a sum of 2^k.

       leaves  0 1 2 3 4 5      after leaf 5:  level 2: (0+1)+(2+3)   level 1: 4+5      the sum: level 2 + level 1

   Which leaves meet when depends on m alone, so the bits are the same however the batch is split
   over ranks and accumulation. For that the leaves of a piece must meet unsummed, at one rank: a
   unit is cut into N pieces, N the ranks of the data group, and each micro-batch's gradient goes
   through an all-to-all. For M micro-batches a rank has floor(log2 M) + 1 buffers of a piece. The
   pieces of a run belong to the ranks that will hold copies of it. */
static size_t dt__zero_piece(const dt__zero_unit *z, int rank) {
    int n = dt_comm_size(z->shard), copies = dt_comm_size(z->copies);
    return copies > 1 ? (size_t)(rank % n * copies + rank / n) : (size_t)rank;
}

static void *dt__zero_level(const dt__zero_unit *z, size_t piece, int level) {
    return dt__zero_at(z, z->levels, (size_t)level * piece);
}

static dt_status dt__zero_tree_add(
    dt_zero *zero, dt__zero_unit *z, size_t piece, const void *leaf, size_t before) {
    const void *sum = leaf;
    int level = 0;
    for (; before >> level & 1; level++) {
        /* a level that is free */
        void *out = dt__zero_level(z, piece, before >> (level + 1) & 1 ? level : level + 1);
        const void *terms[2] = { dt__zero_level(z, piece, level), sum };
        dt_reduce_args a = { z->unit->grad_dtype, out, terms, 2, piece, DT_SUM, NULL, 0, 0 };
        if (DT__KERNEL(zero->ctx, "the tree of gradients", reduce, &a) != DT_OK)
            return dt_error(zero->ctx);
        sum = out;
    }
    return level > 0
               ? DT_OK
               : dt__move(zero->ctx, dt__zero_level(z, piece, 0), leaf, piece * dt__zero_size(z));
}

/* What is left in the levels, the smallest first, becomes the sum: each rank's piece, then the
   whole run of it. */
static dt_status dt__zero_tree_sum(dt_zero *zero, dt__zero_unit *z, size_t piece, size_t leaves) {
    if (dt__zero_keeps_run(zero) && dt__zero_grad_room(zero, z) != DT_OK)
        return dt_error(zero->ctx);
    char *run = (char *)dt__zero_run_grad(z), *sum = NULL;
    void *mine =
        run + (dt__zero_piece(z, dt_comm_rank(z->data)) * piece - z->first) * dt__zero_size(z);
    for (int level = 0; leaves >> level; level++) {
        void *more = dt__zero_level(z, piece, level);
        if (!(leaves >> level & 1)) continue;
        const void *terms[2] = { more, sum };
        dt_reduce_args a = { z->unit->grad_dtype, more, terms, 2, piece, DT_SUM, NULL, 0, 0 };
        if (sum && DT__KERNEL(zero->ctx, "the tree of gradients", reduce, &a) != DT_OK)
            return dt_error(zero->ctx);
        sum = (char *)more;
    }
    z->filled = 1;
    if (dt__move(zero->ctx, mine, sum, piece * dt__zero_size(z)) != DT_OK)
        return dt_error(zero->ctx);
    if (zero->desc.stage > 0 && !z->copies) return DT_OK;
    return dt_all_gather(
        zero->desc.stage == 0 ? z->data : z->copies, mine, run, piece, z->unit->grad_dtype);
}

/* The levels of a unit and the leaves of the largest, made in the first step. */
static dt_status dt__zero_tree_room(dt_zero *zero, dt__zero_unit *z, size_t piece, size_t leaves) {
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
    size_t bytes = n_levels * piece * dt__zero_size(z);
    if (z->levels_bytes == bytes) return dt_error(zero->ctx);
    dt_free(zero->ctx, DT_MEM_GRADS, z->levels, z->levels_bytes);
    z->levels = dt_alloc(zero->ctx, DT_MEM_GRADS, bytes, "the tree's levels");
    z->levels_bytes = z->levels ? bytes : 0;
    return dt_error(zero->ctx);
}

/* zero->leaves = each rank's piece of mine, from all ranks. */
static dt_status dt__zero_tree_exchange(
    dt_zero *zero, dt__zero_unit *z, const char *whole, size_t piece) {
    size_t bytes = piece * dt__zero_size(z);
    int ranks = dt_comm_size(z->data);
    char *sorted = z->copies ? (char *)dt__spare_take(zero->ctx, (size_t)ranks * bytes) : NULL;
    for (int r = 0; sorted && r < ranks; r++)
        dt__move(
            zero->ctx, sorted + (size_t)r * bytes, whole + dt__zero_piece(z, r) * bytes, bytes);
    if (dt_error(zero->ctx) == DT_OK)
        dt_all_to_all(z->data, sorted ? sorted : whole, zero->leaves, piece, z->unit->grad_dtype);
    if (sorted) dt__spare_give(zero->ctx, sorted);
    return dt_error(zero->ctx);
}

/* A micro-batch's gradient of a unit, on all ranks: its leaves go into the tree, and the next
   begins from zero. */
static dt_status dt__zero_reduce_tree(dt_zero *zero, dt__zero_unit *z, int last) {
    char *whole = (char *)(z->passing ? z->passing : z->unit->grad);
    size_t ranks = (size_t)dt_comm_size(z->data), piece = z->unit->padded / ranks,
           micro = (size_t)zero->ctx->micro;
    if (dt__zero_tree_room(zero, z, piece, ranks * (size_t)zero->ctx->micro_count) != DT_OK)
        return dt_error(zero->ctx);
    const char *leaves = ranks > 1 ? (const char *)zero->leaves : whole;
    if (ranks > 1 && dt__zero_tree_exchange(zero, z, whole, piece) != DT_OK)
        return dt_error(zero->ctx);
    for (size_t r = 0; r < ranks; r++) {
        const char *leaf = leaves + r * piece * dt__zero_size(z);
        if (dt__zero_tree_add(zero, z, piece, leaf, micro * ranks + r) != DT_OK)
            return dt_error(zero->ctx);
    }
    if (z->passing) dt__spare_give(zero->ctx, z->passing);
    z->passing = NULL;
    if (last) return dt__zero_tree_sum(zero, z, piece, ranks * (micro + 1));
    z->unit->filled = 0;
    return DT_OK;
}

/* A micro-batch of a stage begins to be reduced. */
static void dt__zero_reduce_begin(dt_zero *zero, int stage) {
    zero->turn = stage;
    zero->next = zero->n_units - 1;
    while (zero->next >= 0 && !dt__zero_has_turn(zero, zero->next)) zero->next--;
    zero->oldest = zero->next;
    for (int u = 0; u < zero->n_units; u++)
        if (dt__zero_has_turn(zero, u)) zero->units[u].ready = 0;
}

static void dt__zero_drop(dt_zero *zero, dt__zero_unit *z);

/* A unit's gradient of a micro-batch is complete. Units are reduced in descending order, the order
   in which a backward usually completes them, so that every rank starts the same ones in the same
   order whatever its data did. */
static void dt__zero_grad_ready(dt_ctx *ctx, dt_bucket *unit, int last, void *user) {
    enum { UNDER_WAY = 2 };
    dt_zero *zero = (dt_zero *)user;
    dt__zero_unit *ready = &zero->units[unit->index];
    int tree = zero->desc.tree, most = dt__zero_keeps_run(zero) ? UNDER_WAY : zero->n_units;
    if (ready->over || (ready->ready && zero->turn == unit->stage)) {
        dt_fail(ctx, DT_ERR_ARG,
            "a gradient came after the step's last micro-batch: call dt_zero_step after it, and "
            "dt_micro(ctx, i, n) before each of n micro-batches");
        return;
    }
    /* nobody reads its values again */
    if (!zero->desc.keep_gathered && ready->holder == 0) dt__zero_drop(zero, ready);
    if (!last && !dt__zero_reduces_each(zero)) return;
    if (zero->turn != unit->stage) dt__zero_reduce_begin(zero, unit->stage);
    ready->ready = 1;
    if (dt__zero_keeps_run(zero)) {
        ready->passing = unit->passing;
        unit->passing = NULL;
    }
    while (zero->next >= 0 &&
           (zero->units[zero->next].ready || !dt__zero_has_turn(zero, zero->next))) {
        dt__zero_unit *z = &zero->units[zero->next];
        if (!dt__zero_has_turn(zero, zero->next--)) continue;
        dt_status status =
            tree ? dt__zero_reduce_tree(zero, z, last) : dt__zero_reduce_start(zero, z);
        if (status == DT_OK && !tree)
            status = dt__zero_reduce_until(zero, zero->desc.no_overlap ? 0 : most);
        if (status != DT_OK) return;
    }
    if (zero->next >= 0 || (!tree && dt__zero_reduce_until(zero, 0) != DT_OK)) return;
    if (dt__grads_settle(zero) != DT_OK) return;
    if (last) dt__zero_reduce_rest(zero);
    zero->turn = -1;
}

// ==== 8. Values on demand =======================================================================

/* Stage 3. A rank keeps its run of each unit. The first op that reads a parameter has its unit
   gathered, for the block in which it runs; when the block ends the unit is freed. So a micro-batch
   gathers each unit once in the forward and once in the backward, which a recomputed block's second
   run shares: with S bytes of values, a micro-batches send 2 a S (N-1)/N; a backward in two halves
   gathers in each of them. What is read outside of blocks is held to the end of the forward, and in
   the backward until its gradient is complete. keep_gathered holds every unit until the update: S
   (N-1)/N a step, and S bytes of memory.

       first read in block 2   gather the unit, or wait for it     start to gather the others, and those of block 3
       leave block 2           free them

   The order in which units are gathered is remembered from the micro-batch before: that is how a
   block's units are under way before it begins; what dt_read and the like gather aside is no part
   of it. Ranks that run the same ops start the same gathers in the same order; a rank that ran
   others would be found by dt_comm.h's comparison of calls. (FSDP, Y. Zhao et al.,
   arXiv:2304.11277.) */
static dt_status dt__zero_gather_start(dt_zero *zero, dt__zero_unit *z) {
    const dt_bucket *u = z->unit;
    if ((!z->whole && dt__values_read_start(zero, z) != DT_OK) ||
        dt__disk_wait(zero, &z->read) != DT_OK)
        return dt_error(zero->ctx);
    const void *mine = u->kept ? u->kept : (char *)z->whole + u->first * dt_dtype_size(u->dtype);
    z->gather = dt_all_gather_start(z->shard, mine, z->whole, u->run, u->dtype);
    return dt_error(zero->ctx);
}

/* Frees the whole values of a unit, or waits for those under way and frees them. */
static void dt__zero_drop(dt_zero *zero, dt__zero_unit *z) {
    const dt_bucket *u = z->unit;
    if (!z->whole || dt__disk_wait(zero, &z->read) != DT_OK ||
        dt_wait(zero->ctx, z->gather) != DT_OK)
        return;
    z->gather = NULL;
    if (zero->desc.poison) dt__fill(zero->ctx, u->dtype, z->whole, u->padded, NAN);
    dt__unit_place(zero->ctx, z->unit, NULL);
    dt__spare_give(zero->ctx, z->whole);
    z->whole = NULL;
}

/* Frees what a block holds; block -1: everything. */
static void dt__zero_drop_held(dt_zero *zero, int block) {
    for (int u = 0; u < zero->n_units; u++)
        if (block < 0 || (zero->units[u].holder == block && zero->units[u].unit->data))
            dt__zero_drop(zero, &zero->units[u]);
}

/* What is still under way was not needed after all. */
static void dt__zero_plan_end(dt_zero *zero) {
    for (int i = 0; i < 3 * zero->n_stages; i++) zero->plans[i].at = 0;
    for (int u = 0; u < zero->n_units; u++)
        if (zero->units[u].whole && !zero->units[u].unit->data)
            dt__zero_drop(zero, &zero->units[u]);
}

/* Notes that a block needs a unit, which is where the plan goes on. 0: out of memory. */
static int dt__zero_plan_note(dt_zero *zero, dt__zero_plan *plan, int unit, int block) {
    /* this time it is another one */
    if (plan->at < plan->n && plan->items[plan->at].unit != unit) plan->n = plan->at;
    if (plan->at == plan->n) {
        dt__zero_gathered *grown = (dt__zero_gathered *)dt__grow(
            zero->ctx, plan->items, plan->n, &plan->room, sizeof *grown, "the order of gathers");
        if (!grown) return 0;
        plan->items = grown;
        plan->n++;
    }
    plan->items[plan->at].unit = unit;
    plan->items[plan->at++].block = block;
    return 1;
}

/* Starts the rest of this block's gathers and those of the next one; what lies on disk is read one
   block earlier. */
static dt_status dt__zero_prefetch(dt_zero *zero, const dt__zero_plan *plan, int block) {
    int others = 0;
    for (int i = plan->at; i < plan->n; i++) {
        dt__zero_unit *z = &zero->units[plan->items[i].unit];
        others += plan->items[i].block != block;
        block = plan->items[i].block;
        if (others > 2 || (others == 2 && !zero->disk)) break;
        if (others == 2 && !z->whole && !z->unit->kept) dt__values_read_start(zero, z);
        if (others < 2 && !z->gather && !z->unit->data) dt__zero_gather_start(zero, z);
        if (dt_error(zero->ctx) != DT_OK) break;
    }
    return dt_error(zero->ctx);
}

static void dt__zero_gather(dt_ctx *ctx, dt_bucket *unit, void *user) {
    dt_zero *zero = (dt_zero *)user;
    dt__zero_unit *z = &zero->units[unit->index];
    dt__zero_plan *plan = &zero->plans[3 * unit->stage + zero->backward];
    z->holder = ctx->inside ? ctx->inside->index : 0;
    if (!ctx->aside && !dt__zero_plan_note(zero, plan, unit->index, z->holder)) return;
    if (!z->gather && dt__zero_gather_start(zero, z) != DT_OK) return;
    if (dt_wait(ctx, z->gather) != DT_OK) return;
    z->gather = NULL;
    dt__unit_place(ctx, unit, z->whole);
    if (!zero->desc.no_overlap && !ctx->aside) dt__zero_prefetch(zero, plan, z->holder);
}

static void dt__zero_release_unit(
    dt_ctx *ctx, dt_bucket *unit, int written, int unused, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (dt_error(ctx) != DT_OK || unit->data == unit->kept || dt__zero_units_alloc(zero) != DT_OK)
        return;
    dt__zero_unit *z = &zero->units[unit->index];
    void *run = z->whole ? (char *)z->whole + unit->first * dt_dtype_size(unit->dtype) : unit->kept;
    if (written) dt__values_store(zero, z, unit, run);
    if (unused && z->whole) dt__zero_drop(zero, z);
}

static void dt__zero_enter(dt_ctx *ctx, const dt_event *event, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (event->phase == DT_FORWARD || event->block != 0 || dt_error(ctx) != DT_OK) return;
    dt__zero_plan_end(zero); /* the forward has ended */
    if (!zero->desc.keep_gathered) dt__zero_drop_held(zero, 0);
    zero->backward = event->phase == DT_BACKWARD_WEIGHT ? 2 : 1;
}

static void dt__zero_leave(dt_ctx *ctx, const dt_event *event, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (dt_error(ctx) != DT_OK) return;
    /* at once, through the same block */
    int goes_back = event->phase == DT_FORWARD && dt_recomputing(ctx);
    if (!zero->desc.keep_gathered && !goes_back) dt__zero_drop_held(zero, event->block);
    if (event->phase == DT_FORWARD || event->block != 0) return;
    dt__zero_plan_end(zero);
    zero->backward = 0;
}

static void dt__zero_reset(dt_ctx *ctx, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (dt_error(ctx) != DT_OK) return;
    dt__zero_plan_end(zero);
    if (!zero->desc.keep_gathered) dt__zero_drop_held(zero, 0);
}

// ==== 9. The norm ===============================================================================

/* Whether this step's sums of a unit are made with those whose gradients are on disk, or with the
   others. */
static int dt__zero_has_sums(const dt_zero *zero, const dt__zero_unit *z, int on_disk) {
    return !z->unit->frozen && dt__grad_on_disk(zero, z->unit) == on_disk;
}

/* Sums of squares of each run of 1,024 elements of units first .. end-1: those this rank owns, zero
   elsewhere. The kernels write to the device, the sums live with us: all go there together, and
   what is one piece here and there is copied as one. */
static dt_status dt__zero_sums(dt_zero *zero, int first, int end, int on_disk) {
    dt_ctx *ctx = zero->ctx;
    size_t runs = 0, n = 0;
    for (int u = first; u < end; u++) {
        const dt__zero_unit *z = &zero->units[u];
        size_t all = z->unit->padded / DT_PIECE;
        if (dt__zero_has_sums(zero, z, on_disk)) runs += z->count / DT_PIECE;
        if (z->unit->frozen || (dt__zero_has_sums(zero, z, on_disk) && z->count < z->unit->padded))
            memset(zero->sums + z->sums, 0, all * sizeof *zero->sums);
    }
    double *from = (double *)dt_scratch(ctx, runs * sizeof *from), *at = from, *to = zero->sums;
    for (int u = first; u < end && runs > 0; u++) {
        const dt__zero_unit *z = &zero->units[u];
        if (!dt__zero_has_sums(zero, z, on_disk)) continue;
        dt_square_sums_args a = { z->unit->grad_dtype, at, dt__zero_run_grad(z), z->count };
        if (!from || DT__KERNEL(ctx, "the gradient norm", square_sums, &a) != DT_OK)
            return dt_error(ctx);
        at += z->count / DT_PIECE;
    }
    for (int u = first; u < end && runs > 0; u++) {
        const dt__zero_unit *z = &zero->units[u];
        double *place = zero->sums + z->sums + z->first / DT_PIECE;
        if (!dt__zero_has_sums(zero, z, on_disk)) continue;
        if (place != to + n) { /* another piece begins */
            dt__move(ctx, to, from, n * sizeof *from);
            from += n;
            to = place;
            n = 0;
        }
        n += z->count / DT_PIECE;
    }
    if (runs > 0) dt__move(ctx, to, from, n * sizeof *from);
    /* after a failure, too: nothing is under way to the sums */
    dt_status status = runs > 0 ? dt__sync(ctx) : DT_OK;
    return status == DT_OK ? dt_error(ctx) : status;
}

/* Those of all units, summed over the shard group. A run's sum is computed by exactly one rank of
   it (at stage 0 by each for itself), and x + 0 is x: every stage gets the same bits. Of gradients
   on disk they were made before these were written. */
static dt_status dt__zero_square_sums(dt_zero *zero) {
    if (dt__zero_sums(zero, 0, zero->n_units, 0) != DT_OK) return dt_error(zero->ctx);
    if (dt__onebit_frozen(zero)) return dt__onebit_sums(zero);
    if (zero->desc.stage == 0) return DT_OK;
    return dt__zero_sum_kinds(zero, zero->groups[DT__DENSE].shard, zero->groups[DT__EXPERTS].shard);
}

/* Adds up the units' values over the groups that cut them, so that each logical element counts
   once: whole copies are not summed over tp, boxes are, and of tied copies one counts. One call for
   each unit and cut, in the same order on every rank. */
static dt_status dt__zero_sum_cuts(dt_zero *zero) {
    for (int u = 0; u < zero->n_units; u++) {
        const dt__zero_unit *z = &zero->units[u];
        double *total = &zero->totals[z->place];
        for (int c = 0; c < 3; c++) {
            dt_comm *comm = dt__unit_desc(zero, z->unit)->shards[c].comm;
            if (comm && dt_sum_doubles(comm, total, 1) != DT_OK) return dt_error(zero->ctx);
        }
        if (dt_comm_rank(dt__zero_tied(zero, z->unit)) > 0) *total = 0;
    }
    return DT_OK;
}

/* zero->totals of the units, each the sum of its runs in their order. An addition waits for the one
   before it, so four units take turns; a turn without one does what another does, for nothing. */
static void dt__zero_add_up(dt_zero *zero) {
    enum { TURNS = 4 };
    const double *run[TURNS];
    double sum[TURNS] = { 0 }, *total[TURNS] = { NULL };
    size_t left[TURNS] = { 0 };
    for (int u = 0, busy = 0; busy >= 0;) {
        busy = -1;
        for (int t = 0; t < TURNS; t++) {
            if (total[t] && left[t] == 0) {
                *total[t] = sum[t];
                total[t] = NULL;
            }
            if (!total[t] && u < zero->n_units) {
                const dt__zero_unit *z = &zero->units[u++];
                total[t] = &zero->totals[z->place];
                run[t] = zero->sums + z->sums;
                left[t] = z->unit->padded / DT_PIECE;
                sum[t] = 0;
            }
            if (total[t] && (busy < 0 || left[t] < left[busy])) busy = t;
        }
        size_t n = busy < 0 ? 0 : left[busy];
        for (int t = 0; t < TURNS && busy >= 0; t++)
            if (!total[t]) run[t] = run[busy];
        for (size_t i = 0; i < n; i++)
            for (int t = 0; t < TURNS; t++) sum[t] += *run[t]++;
        for (int t = 0; t < TURNS; t++) left[t] -= total[t] ? n : 0;
    }
}

/* The 2-norm of the gradients as they are, scaled; infinite or NaN if some element is. Every unit's
   part comes from the one stage that has it, and is added in its place: as many stages as there
   are, the bits are those of one. */
static dt_status dt__zero_norm(dt_zero *zero, double *norm) {
    double total = 0;
    if (dt__zero_square_sums(zero) != DT_OK) return dt_error(zero->ctx);
    memset(zero->totals, 0, zero->n_places * sizeof *zero->totals);
    dt__zero_add_up(zero);
    if (dt__zero_sum_cuts(zero) != DT_OK) return dt_error(zero->ctx);
    if (dt_sum_doubles(zero->mesh.pp, zero->totals, zero->n_places) != DT_OK)
        return dt_error(zero->ctx);
    for (size_t i = 0; i < zero->n_places; i++) total += zero->totals[i];
    *norm = sqrt(total);
    return DT_OK;
}

/* The first gradient that is not finite, or of which only the square is not. */
typedef struct dt__zero_fault {
    int rank;              /* world rank, -1: none, only the sum of all squares is too large */
    int param;             /* index */
    double element, value; /* of its local part */
} dt__zero_fault;

/* In run `run` of a unit, which this rank owns. */
static dt_status dt__zero_look(dt_zero *zero, dt__zero_unit *z, size_t run, dt__zero_fault *fault) {
    double copy[DT_PIECE]; /* of either type */
    size_t bad = 0, at = run * DT_PIECE;
    if (dt__grads_peek(zero, z, at - z->first, copy, DT_PIECE) != DT_OK) return dt_error(zero->ctx);
    while (bad < DT_PIECE && isfinite(dt__number(z->unit->grad_dtype, copy, bad))) bad++;
    for (size_t i = 0, most = 0; bad == DT_PIECE && i <= DT_PIECE;
         i++) { /* all finite: the largest */
        if (i == DT_PIECE)
            bad = most;
        else if (fabs(dt__number(z->unit->grad_dtype, copy, i)) >
                 fabs(dt__number(z->unit->grad_dtype, copy, most)))
            most = i;
    }
    const dt_tensor *t = dt_param_get(zero->ctx, z->unit->first_param);
    for (int p = 1; p < z->unit->params; p++) {
        const dt_tensor *later = dt_param_get(zero->ctx, z->unit->first_param + p);
        if (later->param->offset <= at + bad) t = later;
    }
    fault->rank = dt_ctx_rank(zero->ctx);
    fault->param = t->param->index;
    fault->element = (double)(at + bad - t->param->offset);
    fault->value = dt__number(z->unit->grad_dtype, copy, bad);
    return DT_OK;
}

/* What the first rank that has one found, on every rank. */
static dt_status dt__zero_find(dt_zero *zero, dt__zero_fault *fault) {
    enum { EACH = 4 };
    dt_comm *world = zero->mesh.world;
    size_t ranks = (size_t)dt_comm_size(world), rank = (size_t)dt_comm_rank(world),
           bytes = EACH * ranks * 8;
    memset(fault, 0, sizeof *fault);
    fault->rank = -1;
    for (int u = 0; u < zero->n_units && fault->rank < 0; u++) {
        dt__zero_unit *z = &zero->units[u];
        size_t i = z->first / DT_PIECE, end = (z->first + z->count) / DT_PIECE;
        while (i < end && (isfinite(zero->sums[z->sums + i]) ||
                              (dt__onebit_frozen(zero) && !dt__onebit_at_fault(zero, z->unit, i))))
            i++;
        if (i < end && !z->unit->frozen && dt__zero_look(zero, z, i, fault) != DT_OK)
            return dt_error(zero->ctx);
    }
    double *all = (double *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "the first bad gradient");
    if (!all) return dt_error(zero->ctx);
    memset(all, 0, bytes);
    /* sums of them */
    double code = isnan(fault->value) ? 1 : isfinite(fault->value) ? 4 : fault->value > 0 ? 2 : 3;
    double mine[EACH] = { fault->rank + 1.0, (double)fault->param, fault->element, code };
    memcpy(all + EACH * rank, mine, sizeof mine);
    dt_sum_doubles(world, all, EACH * ranks);
    size_t first = 0;
    while (first < ranks && all[EACH * first] == 0) first++;
    const double *found = all + EACH * first;
    if (first < ranks) {
        fault->rank = (int)found[0] - 1;
        fault->param = (int)found[1];
        fault->element = found[2];
        fault->value = found[3] == 1   ? NAN
                       : found[3] == 4 ? 0
                       : found[3] == 2 ? HUGE_VAL
                                       : -HUGE_VAL;
    }
    dt_free(zero->ctx, DT_MEM_HOST, all, bytes);
    return dt_error(zero->ctx);
}

typedef struct dt__zero_line {
    char s[200];
} dt__zero_line;

static dt__zero_line dt__zero_fault_text(const dt_zero *zero, const dt__zero_fault *fault) {
    dt__zero_line line;
    if (fault->rank < 0)
        snprintf(line.s, sizeof line.s, "the sum of all squares is too large");
    else
        snprintf(line.s, sizeof line.s, "the first gradient %s is element %.0f of %.80s on rank %d",
            isnan(fault->value) ? "that is not finite, a NaN,"
            : isinf(fault->value)
                ? fault->value > 0 ? "that is not finite, an Inf," : "that is not finite, a -Inf,"
                : "whose square is too large",
            fault->element, dt_param_get(zero->ctx, fault->param)->name, fault->rank);
    return line;
}

/* The norm is not finite, and no loss scale could be at fault. The rank that has the element says
   so; the others learn it from that rank. */
static dt_status dt__zero_not_finite(dt_zero *zero, const dt__zero_fault *fault, double norm) {
    if (fault->rank >= 0 && fault->rank != dt_ctx_rank(zero->ctx))
        return dt_barrier(zero->mesh.world);
    return dt_fail(zero->ctx, DT_ERR_NUMERIC, "step %lld: the gradient norm is %g; %s",
        (long long)zero->step + 1, norm, dt__zero_fault_text(zero, fault).s);
}

// ==== 10. The loss scale ========================================================================

static void dt__scale_set(dt_zero *zero, double scale) {
    zero->scale = scale;
    zero->good = 0;
    dt_loss_scale(zero->ctx, scale);
}

static int dt__scale_is_dynamic(const dt_zero *zero) {
    return zero->desc.loss_scale == DT_SCALE_DYNAMIC;
}

static void dt__scale_begin(dt_zero *zero) {
    dt_scale_desc *d = &zero->desc.scale;
    double f16 = 0;
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        f16 += t->dtype == DT_F16 && t->needs_grad;
    }
    /* the last stage scales the loss, whatever parameters it has itself */
    dt_sum_doubles(zero->mesh.world, &f16, 1);
    if (zero->desc.loss_scale == 0 && f16 > 0) zero->desc.loss_scale = DT_SCALE_DYNAMIC;
    if (d->init == 0) d->init = 65536;
    if (d->growth == 0) d->growth = 2;
    if (d->backoff == 0) d->backoff = 0.5;
    if (d->interval == 0) d->interval = 2000;
    if (d->hysteresis == 0) d->hysteresis = 1;
    if (d->least == 0) d->least = 1;
    zero->patience = d->hysteresis;
    dt__scale_set(zero, dt__scale_is_dynamic(zero)  ? d->init
                        : zero->desc.loss_scale > 0 ? zero->desc.loss_scale
                                                    : 1);
}

static void dt__scale_good(dt_zero *zero) {
    const dt_scale_desc *d = &zero->desc.scale;
    zero->skips = 0;
    if (++zero->good < d->interval || !dt__scale_is_dynamic(zero)) return;
    zero->patience = d->hysteresis;
    dt__scale_set(zero, zero->scale * d->growth);
}

/* A step whose gradients are not finite: every rank comes here with the same numbers, so all scales
   stay alike. */
static dt_status dt__scale_skip(dt_zero *zero, const dt__zero_fault *fault) {
    const dt_scale_desc *d = &zero->desc.scale;
    double before = zero->scale, lower = zero->scale * d->backoff;
    char history[16 * DT_MAX_SKIPS + 1] = "";
    zero->history[zero->skips++] = before;
    zero->good = 0;
    if (zero->patience > 1)
        zero->patience--;
    else if (dt__scale_is_dynamic(zero))
        dt__scale_set(zero, lower > d->least ? lower : d->least);
    int speaks =
        fault->rank < 0 ? dt_ctx_rank(zero->ctx) == 0 : dt_ctx_rank(zero->ctx) == fault->rank;
    if (speaks)
        dt_log(zero->ctx, DT_LOG_NOTICE, "step %lld skipped: %s; loss scale %g -> %g",
            (long long)zero->step + 1, dt__zero_fault_text(zero, fault).s, before, zero->scale);
    if (zero->skips < DT_MAX_SKIPS) return DT_OK;
    for (int i = 0, at = 0; i < DT_MAX_SKIPS; i++)
        at += snprintf(history + at, sizeof history - (size_t)at, " %.6g", zero->history[i]);
    if (!speaks) return dt_barrier(zero->mesh.world);
    return dt_fail(zero->ctx, DT_ERR_NUMERIC,
        "step %lld was skipped %d times in a row, with loss scales%s: no scale "
        "helps; %s",
        (long long)zero->step + 1, (int)DT_MAX_SKIPS, history, dt__zero_fault_text(zero, fault).s);
}

// ==== 11. The update ============================================================================

/* Consecutive elements of this rank's run, and where they are. */
typedef struct dt__zero_span {
    size_t first, count; /* elements of the unit */
    void *grad, *state[2];
    void *master; /* NULL: the values are what is updated */
    void *values;
} dt__zero_span;

/* The update runs where the state is: on the device, or on the CPU where it is offloaded from
   one. */
#define DT__UPDATE(zero, what, k, args) \
    dt__kernel_done((zero)->ctx, (what), NULL, #k, \
        (zero)->table->k ? (zero)->table->k((args), (zero)->stream) : DT_ERR_UNSUPPORTED)

/* Updates that wait for others of their unit, to be made in one call. */
enum { DT__UPDATES = 32 };
typedef struct dt__zero_updates {
    int n;
    const char *name; /* of the first one's parameter */
    dt_adamw_args adamw[DT__UPDATES];
} dt__zero_updates;

static dt_status dt__zero_updates_end(dt_zero *zero, dt__zero_updates *updates) {
    for (int i = 1; i < updates->n; i++) updates->adamw[i - 1].next = &updates->adamw[i];
    int waited = updates->n > 0;
    updates->n = 0;
    return waited ? DT__UPDATE(zero, updates->name, adamw, updates->adamw) : dt_error(zero->ctx);
}

/* At once, or later with others. narrow: receives the run rounded to the parameter's own type, or
   NULL where that is the type of the update. */
static dt_status dt__zero_update_run(
    dt_zero *zero, dt__zero_updates *later, const dt_flat *f, void *narrow) {
    const dt_zero_desc *d = &zero->desc;
    dt_dtype type = dt_grad_dtype(f->tensor);
    if (d->optimizer == DT_OWN) {
        dt_cast_args a = { f->tensor->dtype, type, narrow, f->param, f->count, 0 };
        if (dt__is_dry_run(zero)) return DT_OK;
        dt_status status = d->update(f, d->user);
        if (status != DT_OK) return dt_fail(zero->ctx, status, "the update of %s", f->tensor->name);
        return narrow ? DT__UPDATE(zero, f->tensor->name, cast, &a) : DT_OK;
    }
    if (d->optimizer == DT_SGD) {
        dt_sgd_args a = { type, f->param, f->grad, f->state[0], f->count, f->lr, d->momentum,
            f->weight_decay, f->grad_scale, f->step, f->tensor->dtype, narrow };
        return DT__UPDATE(zero, f->tensor->name, sgd, &a);
    }
    if (dt__onebit_frozen(zero)) {
        dt_frozen_adam_args a = { type, f->param, f->state[0], f->state[1], f->count, f->lr, d->eps,
            f->weight_decay, f->tensor->dtype, narrow };
        return DT__UPDATE(zero, f->tensor->name, frozen_adam, &a);
    }
    /* no bias correction */
    int64_t step = d->optimizer == DT_ONEBIT_ADAM ? INT64_MAX : f->step;
    dt_adamw_args a = { type, f->param, f->grad, f->state[0], f->state[1], f->count, f->lr,
        d->beta1, d->beta2, d->eps, f->weight_decay, f->grad_scale, step, d->optimizer == DT_ADAM,
        f->tensor->dtype, narrow, NULL };
    if (later->n == 0) later->name = f->tensor->name;
    later->adamw[later->n++] = a;
    return later->n == DT__UPDATES ? dt__zero_updates_end(zero, later) : dt_error(zero->ctx);
}

/* Updates the part of each parameter that lies in the span. */
static dt_status dt__zero_update_span(
    dt_zero *zero, dt__zero_unit *z, const dt__zero_span *s, double lr, double grad_scale) {
    const dt_bucket *u = z->unit;
    dt__zero_updates later;
    size_t size = dt__zero_size(z), narrow_size = dt_dtype_size(u->dtype),
           end = s->first + s->count;
    later.n = 0;
    for (int i = u->first_param; i < u->first_param + u->params; i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        const dt_param_info *p = t->param;
        size_t from = p->offset > s->first ? p->offset : s->first;
        size_t to = p->offset + p->count < end ? p->offset + p->count : end, at = from - s->first;
        if (from >= to) continue;
        int decays = p->full.nd >= 2 && !p->desc.no_decay;
        /* NULL: only the master is updated */
        char *value = s->values ? (char *)s->values + at * narrow_size : NULL;
        void *updated = s->master ? (char *)s->master + at * size : value;
        dt_flat f = { zero->ctx, t, from - p->offset, to - from, updated,
            (char *)s->grad + at * size, { NULL, NULL },
            lr * (p->desc.lr_scale != 0 ? p->desc.lr_scale : 1), grad_scale,
            decays ? zero->desc.weight_decay : 0, zero->step + 1 };
        for (int k = 0; k < zero->states; k++) f.state[k] = (char *)s->state[k] + at * size;
        if (dt__zero_update_run(zero, &later, &f, s->master ? value : NULL) != DT_OK)
            return dt_error(zero->ctx);
    }
    return dt__zero_updates_end(zero, &later);
}

/* Updates this rank's run of a unit. */
static dt_status dt__zero_update(dt_zero *zero, dt__zero_unit *z, double lr, double grad_scale) {
    const dt_bucket *u = z->unit;
    dt__zero_span run = { z->first, z->count, dt__zero_run_grad(z), { z->state[0], z->state[1] },
        z->master, dt__zero_values(z) };
    dt_cast_args widen = { u->grad_dtype, u->dtype, z->master, run.values, z->count, 0 };
    /* masters begin at the first step, so that values that were loaded or set before it count */
    if (z->master && zero->step == 0 &&
        DT__KERNEL(zero->ctx, "master parameters", cast, &widen) != DT_OK)
        return dt_error(zero->ctx);
    return dt__zero_update_span(zero, z, &run, lr, grad_scale);
}

static dt_status dt__offload_update(dt_zero *zero, double lr, double grad_scale);

/* All units; then every rank's run to every rank, one unit while the next is updated. */
static dt_status dt__zero_update_all(dt_zero *zero, double lr, double grad_scale) {
    int streams = dt__streams(zero);
    if (streams && dt__offload_update(zero, lr, grad_scale) != DT_OK) return dt_error(zero->ctx);
    for (int u = 0; u <= zero->n_units; u++) {
        dt__zero_unit *z = u < zero->n_units ? &zero->units[u] : NULL,
                      *before = u > 0 ? &zero->units[u - 1] : NULL;
        int signs = z && !z->unit->frozen && dt__onebit_frozen(zero);
        if (signs && dt__onebit_momentum(zero, z, grad_scale) != DT_OK) return dt_error(zero->ctx);
        if (z && !z->unit->frozen && !streams && dt__zero_update(zero, z, lr, grad_scale) != DT_OK)
            return dt_error(zero->ctx);
        if (before && dt_wait(zero->ctx, before->work) != DT_OK) return dt_error(zero->ctx);
        if (before) before->work = NULL;
        if (!z || z->unit->frozen || (zero->desc.stage != 1 && zero->desc.stage != 2)) continue;
        z->work = dt_all_gather_start(
            z->shard, dt__zero_values(z), z->unit->data, z->count, z->unit->dtype);
    }
    return dt_error(zero->ctx);
}

// ==== 12. Offload ===============================================================================

/* Optimizer state, and at stage 3 the values, in host memory or in a file (S. Rajbhandari et al.,
   "ZeRO-Infinity", arXiv:2104.07857). The update then goes on in host memory, a chunk of a rank's
   run at a time, with three sets of buffers:

       reading chunk k + 1        updating chunk k        writing chunk k - 1

   A file is read and written by a thread of its own, which is what asks for offload to disk asks
   for; it calls the io table and nothing else, and copies by a buffer of its own, so that one that
   the disk never lets go touches nobody's memory. The file has two slots. A step reads one and
   writes the other; only when every rank has written all of its chunks do the slots change places,
   so a step that fails on one rank leaves what the files of all hold as it was. For the same reason
   values in memory are not touched before: what a chunk becomes goes where its gradient was, which
   nobody needs any more, and is copied from there when all is well.

   With both state and values in the file, gradients need not wait in memory to be replaced: a
   unit's run is written behind the two slots when its micro-batch has been reduced, read again to
   add the next one's, and read with its chunk.

   State in host memory is updated at once: beside values on disk, a failed step leaves the values
   as they were, and the state is of no more use.

   What was written leaves the page cache. The file loses its name as soon as it is open: whatever
   ends the program, it is gone with it. */

enum { DT__DISK_PIECE = 1 << 18, DT__DISK_PATH = 1024, DT__DISK_NAMES = 1000 };

struct dt__disk {
    dt_io io;
    int fd, slot;
    int64_t slot_bytes;
    /* for a transfer; a little less than ranks wait for each other */
    double limit_s;
    pthread_t thread;
    /* the last two by the lock: who sees the other first decides */
    int runs, stop, lost, ended;
    pthread_mutex_t lock;
    pthread_cond_t more;
    dt__disk_job *first, *last;
    char path[DT__DISK_PATH];
    char piece[DT__DISK_PIECE];
};

/* One piece at most, from or to d->piece: bytes that went, or -1 and *error, 0 where the table gave
   no reason. */
static int64_t dt__disk_piece(dt__disk *d, int write, size_t bytes, int64_t offset, int *error) {
    const dt_io *io = &d->io;
    for (;;) {
        errno = 0;
        int64_t n = write ? io->pwrite(io->user, d->fd, d->piece, bytes, offset)
                          : io->pread(io->user, d->fd, d->piece, bytes, offset);
        if (n < 0 && errno == EINTR) continue;
        *error = n < 0 ? errno : 0;
        return n > 0 && n <= (int64_t)bytes ? n : -1;
    }
}

/* Called and left with the lock. Once the disk is lost, the job and what it is about are
   nobody's. */
static void dt__disk_do(dt__disk *d, dt__disk_job *job) {
    const dt__disk_job mine = *job;
    int64_t done = 0, n = 0, total = (int64_t)mine.bytes;
    int error = 0;
    while (!d->lost && n >= 0 && done < total) {
        size_t left = mine.bytes - (size_t)done,
               bytes = left < DT__DISK_PIECE ? left : (size_t)DT__DISK_PIECE;
        if (mine.write) memcpy(d->piece, (char *)mine.at + done, bytes);
        pthread_mutex_unlock(&d->lock);
        n = dt__disk_piece(d, mine.write, bytes, mine.offset + done, &error);
        pthread_mutex_lock(&d->lock);
        if (d->lost || n < 0) break;
        if (!mine.write) memcpy((char *)mine.at + done, d->piece, (size_t)n);
        done += n;
    }
    if (done == total && d->io.forget && !d->lost) {
        pthread_mutex_unlock(&d->lock);
        errno = 0;
        n = d->io.forget(d->io.user, d->fd, total, mine.offset);
        error = n == 0 ? 0 : errno;
        pthread_mutex_lock(&d->lock);
        if (n != 0) done = 0;
    }
    if (d->lost) return;
    job->done = done;
    job->error = error;
}

static void *dt__disk_thread(void *arg) {
    dt__disk *d = (dt__disk *)arg;
    pthread_mutex_lock(&d->lock);
    while (!d->stop) {
        dt__disk_job *job = d->first;
        if (!job) {
            pthread_cond_wait(&d->more, &d->lock);
            continue;
        }
        dt__disk_do(d, job);
        if (d->lost) break;
        d->first = job->next;
        if (!d->first) d->last = NULL;
        __atomic_store_n(&job->busy, 0, __ATOMIC_RELEASE);
    }
    int lost = d->lost;
    d->ended = 1;
    pthread_mutex_unlock(&d->lock);
    if (lost) d->io.close(d->io.user, d->fd);
    return NULL;
}

static void dt__disk_start(dt__disk *d, dt__disk_job *job, int write, void *at, size_t bytes,
    int64_t offset, const char *what) {
    dt__disk_job fresh = { write, 1, at, bytes, offset, what, 0, 0, NULL, job->device };
    if (!d->runs) return; /* a dry run */
    *job = fresh;
    pthread_mutex_lock(&d->lock);
    if (d->last)
        d->last->next = job;
    else
        d->first = job;
    d->last = job;
    pthread_cond_signal(&d->more);
    pthread_mutex_unlock(&d->lock);
}

/* A transfer to or from a unit's memory: a device's is copied through the host's, which goes when
   the job is over. */
static dt_status dt__disk_begin(dt_zero *zero, dt__disk_job *job, int write, void *at, size_t bytes,
    int64_t offset, const char *what) {
    dt_ctx *ctx = zero->ctx;
    if (zero->table != &ctx->kernels) {
        void *host = dt_alloc(ctx, DT_MEM_HOST, bytes, "a copy for the disk");
        if (!host) return dt_error(ctx);
        if (write && dt__move(ctx, host, at, bytes) == DT_OK) dt__sync(ctx);
        job->device = at;
        at = host;
    }
    dt__disk_start(zero->disk, job, write, at, bytes, offset, what);
    return dt_error(ctx);
}

static void dt__disk_end(dt_zero *zero, dt__disk_job *job, int arrived) {
    if (!job->device) return;
    if (arrived && !job->write && dt__move(zero->ctx, job->device, job->at, job->bytes) == DT_OK)
        dt__sync(zero->ctx);
    dt_free(zero->ctx, DT_MEM_HOST, job->at, job->bytes);
    job->device = NULL;
}

/* From here on a thread that has not ended is on its own. */
static void dt__disk_lose(dt__disk *d) {
    pthread_mutex_lock(&d->lock);
    d->lost = !d->ended;
    pthread_mutex_unlock(&d->lock);
}

/* Until a transfer is over, if one was started. A disk that gives no answer fails, a little before
   the ranks that wait for this one give it up: the text is to name the disk. */
static dt_status dt__disk_wait(dt_zero *zero, dt__disk_job *job) {
    dt__disk *d = zero->disk;
    const dt_host *host = dt_ctx_host(zero->ctx);
    if (!job->what || d->lost) return dt_error(zero->ctx);
    dt__stopwatch watch = dt__stopwatch_start(host, d->limit_s);
    double nap = 1e-5;
    while (__atomic_load_n(&job->busy, __ATOMIC_ACQUIRE)) {
        if (dt__waited(&watch) > d->limit_s) {
            dt__disk_lose(d);
            return dt_fail(zero->ctx, DT_ERR_TIMEOUT,
                "%s: %s %s: no answer from the disk within %g s", d->path,
                job->write ? "writing" : "reading", job->what, d->limit_s);
        }
        host->sleep(host->user, nap);
        nap = nap < 1e-3 ? 2 * nap : nap;
    }
    const char *what = job->what;
    job->what = NULL;
    dt__disk_end(zero, job, job->done == (int64_t)job->bytes);
    if (job->done == (int64_t)job->bytes) return dt_error(zero->ctx);
    return dt_fail(zero->ctx, DT_ERR_IO, "%s: %s %s, byte %lld of %zu: %s", d->path,
        job->write ? "writing" : "reading", what, (long long)job->done, job->bytes,
        job->error   ? dt__io_why(job->error)
        : job->write ? "the device took no more"
                     : "the file has become shorter");
}

/* A transfer at once, after the one that the job was used for. */
static dt_status dt__disk_now(dt_zero *zero, dt__disk_job *job, int write, void *at, size_t bytes,
    int64_t offset, const char *what) {
    if (dt__disk_wait(zero, job) != DT_OK) return dt_error(zero->ctx);
    dt__disk_start(zero->disk, job, write, at, bytes, offset, what);
    return dt__disk_wait(zero, job);
}

/* Seconds that a disk may take for an answer: a little less than ranks wait for each other, or the
   world may end before. */
static double dt__disk_limit(const dt_ctx *ctx) {
    return 0.8 * (dt__world_of(ctx) ? dt__world_of(ctx)->shared->timeout_s : 120);
}

static int dt__on_disk(const char *place) {
    return place && strcmp(place, "none") != 0 && strcmp(place, "cpu") != 0;
}
static int dt__in_host(const char *place) { return place && strcmp(place, "cpu") == 0; }
static int dt__streams(const dt_zero *zero) {
    const char *o = zero->desc.offload_optim, *p = zero->desc.offload_params;
    return dt__on_disk(o) || dt__on_disk(p) || dt__in_host(o) || dt__in_host(p);
}
static int dt__grads_on_disk(const dt_zero *zero) {
    return dt__on_disk(zero->desc.offload_optim) && dt__on_disk(zero->desc.offload_params) &&
           !zero->desc.tree;
}
/* One that another pipeline stage adds to at the step's end stays in memory until then. */
static int dt__grad_on_disk(const dt_zero *zero, const dt_bucket *unit) {
    return dt__grads_on_disk(zero) && !unit->frozen && !dt__zero_tied(zero, unit);
}

/* Bytes of an array of a unit in the file; 0: it is not there. */
static size_t dt__disk_bytes(const dt_zero *zero, const dt_bucket *unit, int array) {
    size_t count = unit->padded / (size_t)dt__zero_parts(zero, unit);
    int state = dt__on_disk(zero->desc.offload_optim) && !unit->frozen;
    if (array == DT__GRAD)
        return dt__grad_on_disk(zero, unit) ? count * dt_dtype_size(unit->grad_dtype) : 0;
    if (array == DT__VALUES)
        return dt__on_disk(zero->desc.offload_params) ? count * dt_dtype_size(unit->dtype) : 0;
    if (array == DT__MASTER)
        return state && dt__zero_has_master(unit) ? count * dt_dtype_size(unit->grad_dtype) : 0;
    return state && array < zero->states ? count * dt_dtype_size(unit->grad_dtype) : 0;
}

/* Where an array of unit u begins in its slot; of unit n_units: how long a slot is. */
static int64_t dt__disk_at(const dt_zero *zero, int u, int array) {
    size_t at = 0;
    for (int i = 0; i <= u && i < dt_bucket_count(zero->ctx); i++)
        for (int a = 0; a < (i < u ? (int)DT__GRAD : array); a++)
            at += dt__disk_bytes(zero, dt_bucket_get(zero->ctx, i), a);
    return (int64_t)at;
}

/* The same in the file. What no step writes stays in the first slot; gradients lie behind both. */
static int64_t dt__disk_offset(const dt_zero *zero, int u, int array, int slot) {
    const dt_bucket *unit = dt_bucket_get(zero->ctx, u);
    int64_t at = 2 * zero->disk->slot_bytes;
    if (array != DT__GRAD)
        return (unit && unit->frozen ? 0 : slot) * (at / 2) + dt__disk_at(zero, u, array);
    for (int i = 0; i < u; i++)
        at += (int64_t)dt__disk_bytes(zero, dt_bucket_get(zero->ctx, i), DT__GRAD);
    return at;
}

static dt_status dt__disk_open(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    const char *o = zero->desc.offload_optim, *p = zero->desc.offload_params,
               *folder = dt__on_disk(o) ? o : p;
    if (!dt__on_disk(folder)) return DT_OK;
    dt__disk *d = (dt__disk *)dt_alloc(ctx, DT_MEM_HOST, sizeof *d, "offload");
    if (!d) return dt_error(ctx);
    memset(d, 0, sizeof *d - sizeof d->piece);
    d->io = *dt_ctx_io(ctx);
    d->fd = -1;
    zero->disk = d;
    d->slot_bytes = dt__disk_at(zero, dt_bucket_count(ctx), 0);
    d->limit_s = dt__disk_limit(ctx);
    int64_t bytes = dt__disk_offset(zero, dt_bucket_count(ctx), DT__GRAD, 0);
    /* a name that nobody has, and not for long */
    for (int other = 0; d->fd < 0 && other < DT__DISK_NAMES; other++) {
        int n = other ? snprintf(d->path, sizeof d->path, "%s/dt-rank-%d.%d.offload", folder,
                            dt_ctx_rank(ctx), other)
                      : snprintf(d->path, sizeof d->path, "%s/dt-rank-%d.offload", folder,
                            dt_ctx_rank(ctx));
        if (n >= (int)sizeof d->path)
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_zero_make: offload to %.60s...: a path of at "
                "most %zu bytes is needed",
                folder, sizeof d->path - 1);
        if (dt__is_dry_run(zero)) return DT_OK; /* the same memory, and no file */
        errno = 0;
        d->fd = d->io.open(d->io.user, d->path, DT_IO_PRIVATE);
        if (d->fd < 0 && errno != EEXIST) break;
    }
    if (d->fd < 0)
        return dt_fail(
            ctx, DT_ERR_IO, "dt_zero_make: offload to %s: open: %s", d->path, dt__io_reason());
    errno = 0;
    if (d->io.remove(d->io.user, d->path) != 0)
        return dt_fail(
            ctx, DT_ERR_IO, "dt_zero_make: offload to %s: remove: %s", d->path, dt__io_reason());
    errno = 0; /* zeros are what state begins with */
    if (d->io.resize(d->io.user, d->fd, bytes) != 0)
        return dt_fail(ctx, DT_ERR_IO, "%s: making room for %lld bytes: %s", d->path,
            (long long)bytes, dt__io_reason());
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->more, NULL);
    d->runs = pthread_create(&d->thread, NULL, dt__disk_thread, d) == 0;
    return d->runs ? DT_OK
                   : dt_fail(ctx, DT_ERR_MEM, "%s: no thread to read and write it", d->path);
}

/* Asks the thread to end, and waits for it as long as for a transfer: 1 if it has ended. */
static int dt__disk_stop(dt_zero *zero) {
    dt__disk *d = zero->disk;
    const dt_host *host = dt_ctx_host(zero->ctx);
    dt__stopwatch watch = dt__stopwatch_start(host, d->limit_s);
    double nap = 1e-5;
    for (int ended = 0; !ended && !d->lost;) {
        pthread_mutex_lock(&d->lock);
        d->stop = 1;
        ended = d->ended;
        pthread_cond_signal(&d->more);
        pthread_mutex_unlock(&d->lock);
        if (ended) break;
        if (dt__waited(&watch) > d->limit_s) dt__disk_lose(d);
        host->sleep(host->user, nap);
        nap = nap < 1e-3 ? 2 * nap : nap;
    }
    if (d->lost)
        pthread_detach(d->thread);
    else
        pthread_join(d->thread, NULL);
    return !d->lost;
}

/* A thread that the disk does not let go is left behind with what it uses: *d, and the file, which
   it closes. */
static void dt__disk_close(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    dt__disk *d = zero->disk;
    int lost = d && d->runs && !dt__disk_stop(zero);
    if (d && d->runs && !lost) {
        pthread_mutex_destroy(&d->lock);
        pthread_cond_destroy(&d->more);
    }
    for (int i = 0; zero->sets && i < DT__SETS * DT__ARRAYS; i++)
        dt_unpin(ctx, zero->sets[i / DT__ARRAYS].buf[i % DT__ARRAYS], zero->chunk_bytes);
    dt_free(ctx, DT_MEM_HOST, zero->sets, DT__SETS * sizeof *zero->sets);
    if (d && !lost && d->fd >= 0) d->io.close(d->io.user, d->fd);
    if (!lost) dt_free(ctx, DT_MEM_HOST, d, sizeof *d);
    zero->sets = NULL;
    zero->disk = NULL;
}

/* Buffers for the chunks of the update. */
static dt_status dt__chunks_make(dt_zero *zero) {
    size_t element = 4, longest = 1;
    int masters = 0, on_disk = dt__on_disk(zero->desc.offload_optim);
    if (!dt__streams(zero)) return DT_OK;
    for (int u = 0; u < zero->n_units; u++) {
        const dt__zero_unit *z = &zero->units[u];
        if (dt__zero_size(z) > element) element = dt__zero_size(z);
        if (z->count > longest) longest = z->count;
        masters |= dt__zero_has_master(z->unit);
    }
    zero->chunk = zero->desc.offload_chunk ? zero->desc.offload_chunk : (size_t)1 << 17;
    if (zero->chunk > longest) zero->chunk = longest;
    zero->chunk_bytes = zero->chunk * element;
    zero->sets =
        (dt__disk_set *)dt_alloc(zero->ctx, DT_MEM_HOST, DT__SETS * sizeof *zero->sets, "offload");
    if (!zero->sets) return dt_error(zero->ctx);
    memset(zero->sets, 0, DT__SETS * sizeof *zero->sets);
    for (int i = 0; i < DT__SETS * DT__ARRAYS; i++) {
        int a = i % DT__ARRAYS, on_device = zero->table != &zero->ctx->kernels;
        int needed = a == DT__VALUES || (a == DT__GRAD && (on_device || dt__grads_on_disk(zero))) ||
                     (a == DT__MASTER && on_disk && masters) || (a < zero->states && on_disk);
        void **buf = &zero->sets[i / DT__ARRAYS].buf[i % DT__ARRAYS];
        if (needed) *buf = dt_pin(zero->ctx, zero->chunk_bytes, "chunks of offloaded state");
        if (needed && !*buf) return dt_error(zero->ctx);
    }
    return DT_OK;
}

/* ---- values that are elsewhere ---- */

/* From here on this rank's run of the values is what lies at `run`. */
static dt_status dt__values_store(dt_zero *zero, dt__zero_unit *z, dt_bucket *unit, void *run) {
    size_t bytes = unit->run * dt_dtype_size(unit->dtype);
    if (dt__on_disk(zero->desc.offload_params)) {
        if (!zero->disk && dt__disk_open(zero) != DT_OK) return dt_error(zero->ctx);
        if (dt__disk_wait(zero, &z->read) != DT_OK ||
            dt__disk_begin(zero, &z->read, 1, run, bytes,
                dt__disk_offset(zero, unit->index, DT__VALUES, zero->disk->slot),
                "values") != DT_OK)
            return dt_error(zero->ctx);
        return dt__disk_wait(zero, &z->read);
    }
    if (!dt__in_host(zero->desc.offload_params)) return dt__move(zero->ctx, unit->kept, run, bytes);
    if (!z->host_values) z->host_values = dt_pin(zero->ctx, bytes, "parameters in host memory");
    return z->host_values ? dt__move(zero->ctx, z->host_values, run, bytes) : dt_error(zero->ctx);
}

/* Room for the whole values of a unit, and this rank's run begins to be read into its place. */
static dt_status dt__values_read_start(dt_zero *zero, dt__zero_unit *z) {
    const dt_bucket *u = z->unit;
    size_t size = dt_dtype_size(u->dtype);
    z->whole = dt__spare_take(zero->ctx, u->padded * size);
    char *mine = z->whole ? (char *)z->whole + u->first * size : NULL;
    if (mine && z->host_values) return dt__move(zero->ctx, mine, z->host_values, u->run * size);
    if (mine && zero->disk && !u->kept)
        dt__disk_begin(zero, &z->read, 0, mine, u->run * size,
            dt__disk_offset(zero, u->index, DT__VALUES, zero->disk->slot), "values");
    return dt_error(zero->ctx);
}

/* Some bytes of this rank's run, to host memory. */
static dt_status dt__values_peek(
    dt_zero *zero, const dt_bucket *unit, size_t at, void *host, size_t bytes) {
    dt__zero_unit *z = &zero->units[unit->index];
    const char *from = z->host_values ? (const char *)z->host_values : (const char *)unit->kept;
    if (from)
        return dt__move(zero->ctx, host, from + at, bytes) == DT_OK ? dt__sync(zero->ctx)
                                                                    : dt_error(zero->ctx);
    return dt__disk_now(zero, &z->read, 0, host, bytes,
        dt__disk_offset(zero, unit->index, DT__VALUES, zero->disk->slot) + (int64_t)at, "values");
}

/* ---- gradients on disk ---- */

/* Room for a unit's run, into which what earlier micro-batches left begins to be read. */
static dt_status dt__grads_begin(dt_zero *zero, dt__zero_unit *z) {
    size_t bytes = z->count * dt__zero_size(z);
    z->grad = dt__spare_take(zero->ctx, bytes);
    if (z->grad && z->filled)
        dt__disk_begin(zero, &z->grad_job, 0, z->grad, bytes,
            dt__disk_offset(zero, z->unit->index, DT__GRAD, 0), "gradients");
    return dt_error(zero->ctx);
}

/* The unit being written, if there is one, gives its room back. */
static dt_status dt__grads_settle(dt_zero *zero) {
    if (!dt__grads_on_disk(zero) || zero->storing < 0) return dt_error(zero->ctx);
    dt__zero_unit *z = &zero->units[zero->storing];
    if (dt__disk_wait(zero, &z->grad_job) != DT_OK) return dt_error(zero->ctx);
    dt__spare_give(zero->ctx, z->grad);
    z->grad = NULL;
    zero->storing = -1;
    return DT_OK;
}

/* A micro-batch has been added: the run is written while the next unit is reduced. After the last
   one it is first summed over its copies, and over marks, and its squares go into the norm. */
static dt_status dt__grads_end(dt_zero *zero, dt__zero_unit *z) {
    int last = zero->ctx->micro == zero->ctx->micro_count - 1, u = z->unit->index;
    if (last) dt__zero_copies_start(z);
    if (last &&
        (dt__zero_copies_end(zero, z) != DT_OK || dt__zero_sums(zero, u, u + 1, 1) != DT_OK))
        return dt_error(zero->ctx);
    if (dt__grads_settle(zero) != DT_OK) return dt_error(zero->ctx);
    dt__disk_begin(zero, &z->grad_job, 1, z->grad, z->count * dt__zero_size(z),
        dt__disk_offset(zero, z->unit->index, DT__GRAD, 0), "gradients");
    zero->storing = z->unit->index;
    return dt_error(zero->ctx);
}

/* Elements of this rank's run of the step's gradient, to host memory. */
static dt_status dt__grads_peek(
    dt_zero *zero, dt__zero_unit *z, size_t element, void *host, size_t count) {
    size_t bytes = count * dt__zero_size(z), at = element * dt__zero_size(z);
    if (dt__grad_on_disk(zero, z->unit))
        return dt__disk_now(zero, &z->grad_job, 0, host, bytes,
            dt__disk_offset(zero, z->unit->index, DT__GRAD, 0) + (int64_t)at, "gradients");
    if (dt__move(zero->ctx, host, (char *)dt__zero_run_grad(z) + at, bytes) != DT_OK)
        return dt_error(zero->ctx);
    return dt__sync(zero->ctx);
}

/* ---- the update ---- */

/* s becomes the chunk after `before`; 0: that was the last. */
static int dt__chunk_after(const dt_zero *zero, dt__disk_set *s, const dt__disk_set *before) {
    if (zero->n_units == 0) return 0; /* a stage of a pipeline without parameters */
    int u = before ? before->unit : 0;
    size_t first = before ? before->first + before->count : zero->units[0].first;
    while (zero->units[u].unit->frozen || first == zero->units[u].first + zero->units[u].count) {
        if (++u == zero->n_units) return 0;
        first = zero->units[u].first;
    }
    size_t left = zero->units[u].first + zero->units[u].count - first;
    s->unit = u;
    s->first = first;
    s->count = left < zero->chunk ? left : zero->chunk;
    return 1;
}

static dt_status dt__chunk_wait(dt_zero *zero, dt__disk_set *s) {
    for (int a = 0; a < DT__ARRAYS; a++)
        if (dt__disk_wait(zero, &s->job[a]) != DT_OK) return dt_error(zero->ctx);
    return DT_OK;
}

/* Starts what a chunk has in the file, in one direction. A master is made from the values by the
   first step, and is what counts from then on. */
static void dt__chunk_move(dt_zero *zero, dt__disk_set *s, int write) {
    static const char *const names[] = { "optimizer state", "optimizer state", "master parameters",
        "values", "gradients" };
    const dt__zero_unit *z = &zero->units[s->unit];
    int master = dt__zero_has_master(z->unit);
    for (int a = 0; a < DT__ARRAYS && zero->disk; a++) {
        size_t size = a == DT__VALUES ? dt_dtype_size(z->unit->dtype) : dt__zero_size(z);
        int unread =
            (a == DT__MASTER && zero->step == 0) || (a == DT__VALUES && master && zero->step > 0);
        if (dt__disk_bytes(zero, z->unit, a) == 0 || (write ? a == DT__GRAD : unread)) continue;
        int64_t offset = dt__disk_offset(zero, s->unit, a, zero->disk->slot ^ write);
        offset += (int64_t)((s->first - z->first) * size);
        dt__disk_start(zero->disk, &s->job[a], write, s->buf[a], s->count * size, offset, names[a]);
    }
}

/* One chunk, in host memory. */
static dt_status dt__chunk_update(dt_zero *zero, dt__disk_set *s, double lr, double grad_scale) {
    dt_ctx *ctx = zero->ctx;
    dt__zero_unit *z = &zero->units[s->unit];
    const dt_bucket *u = z->unit;
    size_t size = dt__zero_size(z), narrow = dt_dtype_size(u->dtype), at = s->first - z->first,
           bytes = s->count * size;
    int master = dt__zero_has_master(u), on_disk = dt__disk_bytes(zero, u, DT__VALUES) > 0;
    char *grad = (char *)(dt__grad_on_disk(zero, u) ? s->buf[DT__GRAD]
                                                    : dt__zero_at(z, dt__zero_run_grad(z), at));
    dt__zero_span span = { s->first, s->count, grad, { NULL, NULL }, NULL, NULL };
    for (int a = 0; a <= DT__MASTER; a++) {
        char *whole = (char *)(a == DT__MASTER ? z->master : z->state[a]);
        void *here = whole ? whole + at * size : dt__disk_bytes(zero, u, a) ? s->buf[a] : NULL;
        if (a == DT__MASTER)
            span.master = here;
        else
            span.state[a] = here;
    }
    if (!on_disk && (!master || zero->step == 0))
        dt__move(
            ctx, s->buf[DT__VALUES], (char *)dt__zero_values(z) + at * narrow, s->count * narrow);
    if (s->buf[DT__GRAD] && grad != s->buf[DT__GRAD])
        dt__move(ctx, span.grad = s->buf[DT__GRAD], grad, bytes);
    if (dt__sync(ctx) != DT_OK) return dt_error(ctx);
    dt_cast_args widen = { u->grad_dtype, u->dtype, span.master, s->buf[DT__VALUES], s->count, 0 };
    if (master && zero->step == 0 && DT__UPDATE(zero, "master parameters", cast, &widen) != DT_OK)
        return dt_error(ctx);
    span.values = on_disk || !master ? s->buf[DT__VALUES] : NULL;
    if (dt__zero_update_span(zero, z, &span, lr, grad_scale) != DT_OK || on_disk)
        return dt_error(ctx);
    if (dt__move(ctx, grad, master ? span.master : s->buf[DT__VALUES], bytes) != DT_OK)
        return dt_error(ctx);
    return dt__sync(ctx); /* the buffer is used again */
}

/* The new values, which lie where the gradient was, become the values. */
static dt_status dt__offload_commit(dt_zero *zero, dt__zero_unit *z) {
    dt_ctx *ctx = zero->ctx;
    const dt_bucket *u = z->unit;
    size_t size = dt__zero_size(z), narrow = dt_dtype_size(u->dtype);
    if (u->frozen || dt__disk_bytes(zero, u, DT__VALUES) > 0) return dt_error(ctx);
    for (size_t at = 0, n; at < z->count; at += n) {
        char *from = (char *)dt__zero_run_grad(z) + at * size,
             *to = (char *)dt__zero_values(z) + at * narrow;
        /* gradients are not */
        void *host = z->host_values && size != narrow ? zero->sets[0].buf[DT__GRAD] : NULL;
        n = z->count - at < zero->chunk ? z->count - at : zero->chunk;
        if (host && (dt__move(ctx, host, from, n * size) != DT_OK || dt__sync(ctx) != DT_OK))
            return dt_error(ctx);
        dt_cast_args a = { u->dtype, u->grad_dtype, to, host ? host : from, n, 0 };
        dt_status status = size == narrow ? dt__move(ctx, to, from, n * size)
                           : host         ? DT__UPDATE(zero, "values", cast, &a)
                                          : DT__KERNEL(ctx, "values", cast, &a);
        if (status != DT_OK) return dt_error(ctx);
    }
    return DT_OK;
}

static dt_status dt__offload_update(dt_zero *zero, double lr, double grad_scale) {
    if (dt__is_dry_run(zero)) return DT_OK;
    dt__disk_set *now = &zero->sets[0];
    int more = dt__chunk_after(zero, now, NULL);
    if (more) dt__chunk_move(zero, now, 0);
    for (int k = 1; more; k++) {
        dt__disk_set *next = &zero->sets[k % DT__SETS];
        /* what it wrote is in the file */
        if (dt__chunk_wait(zero, next) != DT_OK) return dt_error(zero->ctx);
        more = dt__chunk_after(zero, next, now);
        if (more) dt__chunk_move(zero, next, 0);
        if (dt__chunk_wait(zero, now) != DT_OK ||
            dt__chunk_update(zero, now, lr, grad_scale) != DT_OK)
            return dt_error(zero->ctx);
        dt__chunk_move(zero, now, 1);
        now = next;
    }
    for (int s = 0; s < DT__SETS; s++)
        if (dt__chunk_wait(zero, &zero->sets[s]) != DT_OK) return dt_error(zero->ctx);
    /* all ranks have written all */
    if (dt_barrier(zero->mesh.world) != DT_OK) return dt_error(zero->ctx);
    for (int u = 0; u < zero->n_units; u++)
        if (dt__offload_commit(zero, &zero->units[u]) != DT_OK) return dt_error(zero->ctx);
    if (zero->disk) zero->disk->slot ^= 1;
    return DT_OK;
}

// ==== 13. 1-bit Adam ============================================================================

/* H. Tang et al., arXiv:2102.02888. Steps up to freeze_steps are Adam's, but without bias
   correction. Then the second moment v stays as it is, and what N ranks exchange of a unit is not
   its gradient but its first moment, as signs:

       rank r              m = beta1 m + (1 - beta1) N g, with its own gradient g. dt's gradients
                           are parts of a sum, the paper's are averaged: hence N
       worker              x = m + its error; a sign for each element and one scale |x| / sqrt(n)
                           are sent, and what they leave of x is the error of its next step
       all-to-all          rank r receives run r of all: (N-1)/N of n bits
       server              rank r: x = their mean + its error; signs and one scale of run r, and
                           what they leave
       all-gather          everybody receives all runs: (N-1)/N of n bits; that is m from now on,
                           with equal bits
       update              p -= lr (m / (sqrt(v) + eps) + weight_decay p)

   So a step sends 2 (N-1)/N of n/8 bytes and 8 for each scale, where the sum of f32 gradients takes
   32 times the first. An element whose v is 0 never had a gradient; no step of Adam would have
   moved it, but any scale divided by eps would: it stays, and counts nowhere. Padding is of that
   kind. */
static int dt__onebit_frozen(const dt_zero *zero) {
    return zero->desc.optimizer == DT_ONEBIT_ADAM && zero->step >= zero->desc.freeze_steps;
}

static dt_status dt__onebit_check(dt_ctx *ctx, const dt_zero_desc *d) {
    const dt_kernels *k = dt_ctx_kernels(ctx);
    if (d->stage != 0)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: DT_ONEBIT_ADAM at stage %d: each rank needs its whole "
            "momentum, so it is for stage 0",
            d->stage);
    if (dt__on_disk(d->offload_optim) || dt__in_host(d->offload_optim))
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: DT_ONEBIT_ADAM exchanges its momentum, which therefore "
            "is not offloaded");
    if (d->tree)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: DT_ONEBIT_ADAM does not sum gradients once its second "
            "moment is frozen, so there is no tree of them: .tree must be 0");
    if (d->freeze_steps < 1)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_make: DT_ONEBIT_ADAM with %d freeze_steps; its second moment needs 1 "
            "or more",
            d->freeze_steps);
    /* better now than after the freeze */
    if (!k->momentum || !k->frozen_adam || !k->sign_pack || !k->sign_unpack)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: DT_ONEBIT_ADAM needs kernels that %s does not have", k->name);
    return DT_OK;
}

/* Bytes of a message about one run of a unit, and of both errors. */
static size_t dt__onebit_message(const dt_zero *zero, const dt_bucket *unit) {
    return unit->padded / (size_t)dt_comm_size(dt__groups_of(zero, unit)->data) / 8 +
           sizeof(double);
}

static size_t dt__onebit_bytes(const dt_zero *zero, const dt_bucket *unit) {
    size_t run = unit->padded / (size_t)dt_comm_size(dt__groups_of(zero, unit)->data);
    return unit->frozen ? 0 : (unit->padded + run) * dt_dtype_size(unit->grad_dtype);
}

static dt_status dt__onebit_make(dt_zero *zero) {
    for (int u = 0; u < zero->n_units; u++) {
        dt__zero_unit *z = &zero->units[u];
        size_t N = (size_t)dt_comm_size(z->data), bytes = 2 * N * dt__onebit_message(zero, z->unit);
        zero->messages_bytes = bytes > zero->messages_bytes ? bytes : zero->messages_bytes;
        for (int e = 0; e < 2 && !z->unit->frozen; e++) {
            size_t count = e ? z->unit->padded / N : z->unit->padded;
            /* groups may be gone when it is given back */
            z->error_bytes[e] = count * dt__zero_size(z);
            z->errors[e] =
                dt_alloc(zero->ctx, DT_MEM_OPTIM, z->error_bytes[e], "errors of 1-bit Adam");
            if (!z->errors[e]) return dt_error(zero->ctx);
            if (dt__fill(zero->ctx, z->unit->grad_dtype, z->errors[e], count, 0) != DT_OK)
                return dt_error(zero->ctx);
        }
    }
    zero->messages =
        dt_alloc(zero->ctx, DT_MEM_COMM, zero->messages_bytes, "messages of 1-bit Adam");
    return dt_error(zero->ctx);
}

static void dt__onebit_free(dt_zero *zero) {
    for (int u = 0; zero->units && u < zero->n_units; u++)
        for (int e = 0; e < 2; e++)
            dt_free(
                zero->ctx, DT_MEM_OPTIM, zero->units[u].errors[e], zero->units[u].error_bytes[e]);
    dt_free(zero->ctx, DT_MEM_COMM, zero->messages, zero->messages_bytes);
}

/* The sums of squares of |N g|^2, their mean over the N data ranks; by Cauchy-Schwarz that of the
   sum is not above. */
static dt_status dt__onebit_sums(dt_zero *zero) {
    if (dt__zero_sum_kinds(zero, zero->mesh.data, zero->mesh.experts) != DT_OK)
        return dt_error(zero->ctx);
    for (size_t i = 0; i < zero->n_sums; i++)
        zero->sums[i] *= dt_comm_size(i < zero->n_dense ? zero->mesh.data : zero->mesh.experts);
    return DT_OK;
}

/* Whether it is this rank's own gradient that makes the sum of squares of a run not finite. */
static int dt__onebit_at_fault(dt_zero *zero, const dt_bucket *unit, size_t run) {
    double copy[DT_PIECE], squares = 0; /* of either type */
    size_t bytes = DT_PIECE * dt_dtype_size(unit->grad_dtype);
    if (dt__move(zero->ctx, copy, (char *)unit->grad + run * bytes, bytes) != DT_OK ||
        dt__sync(zero->ctx) != DT_OK)
        return 0;
    for (size_t i = 0; i < DT_PIECE; i++) {
        double x = dt__number(unit->grad_dtype, copy, i);
        squares += x * x;
    }
    return !isfinite(squares);
}

/* The ranks' messages to each other; of one rank alone, which may have no group, in the memory of
   its device. */
static dt_status dt__onebit_exchange(
    dt_zero *zero, const dt__zero_unit *z, const char *out, char *in, size_t bytes) {
    if (!z->data) return dt__move(zero->ctx, in, out, bytes);
    return dt_all_to_all(z->data, out, in, bytes / sizeof(int32_t), DT_I32);
}

/* A unit's momentum after this rank's gradient, exchanged. The server's mean takes the place of the
   gradient, which has been used up. */
static dt_status dt__onebit_momentum(dt_zero *zero, dt__zero_unit *z, double grad_scale) {
    dt_ctx *ctx = zero->ctx;
    dt_bucket *u = z->unit;
    dt_dtype type = u->grad_dtype;
    size_t N = (size_t)dt_comm_size(z->data), r = (size_t)dt_comm_rank(z->data),
           run = u->padded / N;
    size_t bytes = dt__onebit_message(zero, u), words = bytes / sizeof(int32_t);
    char *out = (char *)zero->messages, *in = out + N * bytes;
    void *m = z->state[0], *v = z->state[1], *mean = dt__zero_at(z, u->grad, r * run);
    size_t room = ctx->kernels.work_bytes
                      ? dt__lent(ctx, (2 * (u->padded / DT_PIECE + 1) + 1) * sizeof(double))
                      : 0;
    void *work = dt_scratch(ctx, room);
    dt_momentum_args local = { type, m, u->grad, u->padded, zero->desc.beta1,
        (double)N * grad_scale };
    dt_sign_pack_args worker = { type, out, m, z->errors[0], v, u->padded, N, work, room };
    dt_sign_unpack_args served = { type, mean, in, dt__zero_at(z, v, r * run), run, N };
    dt_sign_pack_args server = { type, out + r * bytes, mean, z->errors[1],
        dt__zero_at(z, v, r * run), run, 1, work, room };
    if (DT__KERNEL(ctx, "1-bit Adam", momentum, &local) != DT_OK ||
        DT__KERNEL(ctx, "1-bit Adam", sign_pack, &worker) != DT_OK ||
        dt__onebit_exchange(zero, z, out, in, bytes) != DT_OK ||
        DT__KERNEL(ctx, "1-bit Adam", sign_unpack, &served) != DT_OK ||
        DT__KERNEL(ctx, "1-bit Adam", sign_pack, &server) != DT_OK ||
        dt_all_gather(z->data, out + r * bytes, out, words, DT_I32) != DT_OK)
        return dt_error(ctx);
    for (size_t k = 0; k < N; k++) {
        dt_sign_unpack_args all = { type, dt__zero_at(z, m, k * run), out + k * bytes,
            dt__zero_at(z, v, k * run), run, 1 };
        if (DT__KERNEL(ctx, "1-bit Adam", sign_unpack, &all) != DT_OK) return dt_error(ctx);
    }
    return DT_OK;
}

// ==== 14. Making, stepping, freeing =============================================================

static void dt__zero_release(dt_ctx *ctx, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (zero->sets) dt__sync(ctx); /* copies from and to pinned memory */
    for (int u = 0; zero->units && u < zero->n_units; u++) {
        dt__zero_unit *z = &zero->units[u];
        const dt_bucket *unit = dt_bucket_get(ctx, u);
        dt_unpin(ctx, z->host_values, unit->run * dt_dtype_size(unit->dtype));
        if (!z->unit) continue;
        size_t bytes = z->count * dt__zero_size(z);
        dt_mem mem = dt__in_host(zero->desc.offload_optim) ? DT_MEM_HOST : DT_MEM_OPTIM;
        if (dt_error(ctx) == DT_OK) dt__zero_drop(zero, z);
        for (int s = 0; s < 2; s++) dt_free(ctx, mem, z->state[s], bytes);
        dt_free(ctx, mem, z->master, bytes);
        if (z->grad_bytes) dt_free(ctx, DT_MEM_GRADS, z->grad, z->grad_bytes);
        dt_free(ctx, DT_MEM_GRADS, z->levels, z->levels_bytes);
    }
    dt__disk_close(zero);
    /* what nobody waited for, after a failure */
    for (int u = 0; zero->units && u < zero->n_units; u++) {
        dt__disk_end(zero, &zero->units[u].read, 0);
        dt__disk_end(zero, &zero->units[u].grad_job, 0);
    }
    dt__onebit_free(zero);
    for (int i = 0; zero->plans && i < 3 * zero->n_stages; i++)
        dt_free(ctx, DT_MEM_HOST, zero->plans[i].items,
            (size_t)zero->plans[i].room * sizeof *zero->plans[i].items);
    dt_free(ctx, DT_MEM_HOST, zero->plans, 3 * (size_t)zero->n_stages * sizeof *zero->plans);
    dt_free(ctx, DT_MEM_COMM, zero->leaves, zero->leaves_bytes);
    dt_unpin(ctx, zero->sums, zero->n_sums * sizeof *zero->sums);
    dt_free(ctx, DT_MEM_HOST, zero->totals, zero->n_places * sizeof *zero->totals);
    dt_free(ctx, DT_MEM_HOST, zero->units, (size_t)zero->n_units * sizeof *zero->units);
    dt_free(ctx, DT_MEM_HOST, zero, sizeof *zero);
}

static dt_status dt__zero_check(dt_ctx *ctx, const dt_zero_desc *d) {
    const dt_scale_desc *s = &d->scale;
    if (d->stage < 0 || d->stage > 3)
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: stage %d; use 0 to 3", d->stage);
    if (d->optimizer < DT_ADAMW || d->optimizer > DT_OWN)
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: optimizer %d", d->optimizer);
    if (d->optimizer == DT_OWN && (!d->update || d->states < 0 || d->states > 2))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_make: DT_OWN needs an update function and 0 to 2 states, got %d", d->states);
    if (d->optimizer == DT_ONEBIT_ADAM && dt__onebit_check(ctx, d) != DT_OK) return dt_error(ctx);
    if (!(d->beta1 < 1 && d->beta1 >= 0 && d->beta2 < 1 && d->beta2 >= 0 && d->eps >= 0 &&
            d->clip >= 0 && d->momentum >= 0 && d->weight_decay >= 0))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_make: beta1 %g, beta2 %g, eps %g, clip %g, momentum %g, weight_decay "
            "%g: betas lie in [0,1), the others are not negative",
            d->beta1, d->beta2, d->eps, d->clip, d->momentum, d->weight_decay);
    int on_device = ctx->kernels.alloc && ctx->kernels.alloc != dt__dry_alloc;
    int state = dt__in_host(d->offload_optim) || dt__on_disk(d->offload_optim);
    int values = dt__in_host(d->offload_params) || dt__on_disk(d->offload_params);
    if ((d->offload_optim && !*d->offload_optim) || (d->offload_params && !*d->offload_params))
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: offload to a folder without a name");
    if (values && d->stage != 3)
        return dt_fail(
            ctx, DT_ERR_ARG, "dt_zero_make: offload_params needs stage 3, got stage %d", d->stage);
    if (on_device && values && !state)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: values of a device are offloaded together with the optimizer state");
    if (dt__on_disk(d->offload_optim) && dt__on_disk(d->offload_params) &&
        strcmp(d->offload_optim, d->offload_params) != 0)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_make: offload to %s "
            "and to %s: one folder is needed",
            d->offload_optim, d->offload_params);
    if (!((d->loss_scale >= 0 && d->loss_scale < HUGE_VAL) || d->loss_scale == DT_SCALE_DYNAMIC))
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: loss scale %g", d->loss_scale);
    if (!(s->init >= 0 && s->init < HUGE_VAL && (s->growth == 0 || s->growth >= 1) &&
            s->backoff >= 0 && s->backoff <= 1 && s->interval >= 0 && s->hysteresis >= 0 &&
            s->least >= 0))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_make: a dynamic loss scale from %g, growing by %g after %d steps, "
            "falling by %g after %d, at least %g",
            s->init, s->growth, s->interval, s->backoff, s->hysteresis, s->least);
    return DT_OK;
}

static int dt__zero_states(const dt_zero_desc *d) {
    if (d->optimizer == DT_OWN) return d->states;
    return d->optimizer == DT_SGD ? d->momentum > 0 : 2;
}

/* A unit is padded to whole runs of DT_PIECE elements on every rank of its shard group, or in the
   tree of its data group. */
static void dt__zero_cut(const dt_bucket *unit, size_t *pad, int *parts, int *part, void *user) {
    const dt_zero *zero = (const dt_zero *)user;
    const dt__zero_groups *g = dt__groups_of(zero, unit);
    *pad = (size_t)DT_PIECE * (size_t)dt_comm_size(zero->desc.tree ? g->data : g->shard);
    if (zero->desc.stage < 3) return;
    *parts = dt_comm_size(g->shard);
    *part = dt_comm_rank(g->shard);
}

static dt_buckets_desc dt__zero_units_desc(dt_zero *zero) {
    const char *values = zero->desc.offload_params;
    dt_buckets_desc d = { zero->desc.bucket_bytes, 0, dt__on_disk(values) || dt__in_host(values),
        dt__zero_keeps_run(zero), dt__zero_cut, zero };
    return d;
}

/* Plans for the gathers of each stage that this rank has parameters of. */
static dt_status dt__zero_plans_make(dt_zero *zero) {
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        int stage = dt_param_get(zero->ctx, i)->param->stage;
        zero->n_stages = stage >= zero->n_stages ? stage + 1 : zero->n_stages;
    }
    size_t bytes = 3 * (size_t)zero->n_stages * sizeof *zero->plans;
    zero->plans = (dt__zero_plan *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "the order of gathers");
    if (zero->plans) memset(zero->plans, 0, bytes);
    return dt_error(zero->ctx);
}

static void dt__zero_listen(dt_zero *zero) {
    dt_listener *l = &zero->listener;
    l->grad_ready = dt__zero_grad_ready;
    l->closing = dt__zero_release;
    l->user = zero;
    if (zero->desc.stage == 3) {
        l->enter = dt__zero_enter;
        l->leave = dt__zero_leave;
        l->gather = dt__zero_gather;
        l->release = dt__zero_release_unit;
        l->reset = dt__zero_reset;
    }
    dt_listen(zero->ctx, l);
}

dt_zero *dt_zero_make(dt_ctx *ctx, dt_zero_desc desc) {
    dt_mesh_desc all = { 0, 0, 0, 0, 0 };
    if (dt_error(ctx) != DT_OK || dt__zero_check(ctx, &desc) != DT_OK) return NULL;
    dt_zero *zero = (dt_zero *)dt_alloc(ctx, DT_MEM_HOST, sizeof *zero, "dt_zero_make");
    if (!zero) return NULL;
    memset(zero, 0, sizeof *zero);
    zero->ctx = ctx;
    if (desc.beta1 == 0) desc.beta1 = 0.9;
    if (desc.beta2 == 0) desc.beta2 = 0.999;
    if (desc.eps == 0) desc.eps = 1e-8;
    zero->desc = desc;
    zero->states = dt__zero_states(&desc);
    zero->table = &ctx->kernels;
    zero->stream = ctx->stream;
    zero->storing = -1;
    if (dt__streams(zero) && ctx->kernels.alloc && !dt__is_dry_run(zero)) {
        zero->table = dt_kernels_cpu();
        zero->stream = NULL;
    }
    dt__zero_listen(zero);
    zero->mesh = desc.mesh ? *desc.mesh : dt_mesh_make(ctx, all);
    zero->desc.mesh = NULL; /* the copy is what counts */
    zero->turn = zero->next = -1;
    if (dt_error(ctx) == DT_OK && dt__zero_groups_make(zero) == DT_OK &&
        dt__zero_check_params(zero) == DT_OK && dt__zero_plans_make(zero) == DT_OK &&
        dt_buckets_make(ctx, dt__zero_units_desc(zero)) == DT_OK)
        dt__zero_units_make(zero);
    if (dt_error(ctx) == DT_OK && desc.optimizer == DT_ONEBIT_ADAM) dt__onebit_make(zero);
    if (dt_error(ctx) == DT_OK) dt__scale_begin(zero);
    if (dt_error(ctx) == DT_OK) dt__zero_compare(zero, 0);
    /* all ranks have their state, or none goes on */
    if (dt_error(ctx) == DT_OK) dt_barrier(zero->mesh.world);
    if (dt_error(ctx) == DT_OK) return zero;
    dt_zero_free(zero);
    return NULL;
}

void dt_zero_free(dt_zero *zero) {
    if (!zero) return;
    dt_loss_scale(zero->ctx, 1);
    zero->ctx->hand_over = 0;
    dt_unlisten(zero->ctx, &zero->listener);
    dt__zero_release(zero->ctx, zero);
}

/* The gradients' sums begin anew. */
static void dt__zero_step_end(dt_zero *zero) {
    for (int u = 0; u < zero->n_units; u++) zero->units[u].over = zero->units[u].filled = 0;
    zero->turn = -1;
    zero->tied_summed = 0;
    dt_clear_grads(zero->ctx);
}

/* Whether all gradients of the step are there. */
static int dt__zero_is_over(const dt_zero *zero) {
    for (int u = 0; u < zero->n_units; u++)
        if (!zero->units[u].unit->frozen && !zero->units[u].over) return 0;
    return 1;
}

dt_step_info dt_zero_step(dt_zero *zero, double lr) {
    dt_step_info info = { 0, NAN, 1, 0, 1, -1, NULL, 0 };
    dt__zero_fault fault;
    double norm = 0;
    if (!zero || dt_error(zero->ctx) != DT_OK) return info;
    info.step = zero->step;
    info.loss_scale = zero->scale;
    if (!(lr >= 0 && lr < HUGE_VAL)) {
        dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_step: step %lld: learning rate %g",
            (long long)zero->step + 1, lr);
        return info;
    }
    if (!dt__zero_is_over(zero)) {
        dt_fail(zero->ctx, DT_ERR_ARG,
            "dt_zero_step: step %lld has no complete gradient: dt_backward of its last "
            "micro-batch has not run",
            (long long)zero->step + 1);
        return info;
    }
    if (zero->step == 0 && zero->skips == 0 && dt__zero_compare(zero, 1) != DT_OK) return info;
    if (dt__zero_sum_tied(zero) != DT_OK || dt__zero_norm(zero, &norm) != DT_OK) return info;
    double bad = !isfinite(norm); /* whatever one rank noticed, no rank updates */
    if (dt_sum_doubles(zero->mesh.world, &bad, 1) != DT_OK) return info;
    if (bad > 0) {
        if (dt__zero_find(zero, &fault) != DT_OK) return info;
        info.skipped = zero->desc.loss_scale != 0 && dt__scale_skip(zero, &fault) == DT_OK;
        if (zero->desc.loss_scale == 0) dt__zero_not_finite(zero, &fault, norm);
        info.bad_rank = fault.rank;
        /* others have others */
        int here = fault.rank >= 0 && dt__zero_pp_of(zero, fault.rank) == zero->mesh.at.pp;
        info.bad_param = here ? dt_param_get(zero->ctx, fault.param) : NULL;
        info.bad_element = (size_t)fault.element;
        if (info.skipped) dt__zero_step_end(zero);
        return info;
    }
    norm /= zero->scale;
    dt__zero_drop_held(zero, -1); /* what is gathered is about to be the values of before */
    if (zero->desc.clip > 0 && zero->desc.clip / (norm + 1e-6) < 1)
        info.clip_scale = zero->desc.clip / (norm + 1e-6);
    if (dt__zero_update_all(zero, lr, info.clip_scale / zero->scale) != DT_OK) return info;
    dt__scale_good(zero);
    dt__zero_step_end(zero);
    info.step = ++zero->step;
    info.grad_norm = norm;
    return info;
}

/* The unit of a parameter whose state or gradient is asked for. */
static dt__zero_unit *dt__zero_unit_of(dt_zero *zero, const char *what, const dt_tensor *param) {
    dt_bucket *unit = param && param->param && param->ctx == zero->ctx ? param->param->unit : NULL;
    if (unit && !unit->frozen) return &zero->units[unit->index];
    dt_fail(zero->ctx, DT_ERR_ARG, "%s: %s is %s", what,
        param && param->name ? param->name : "NULL",
        unit ? "frozen" : "no parameter of this context");
    return NULL;
}

/* A parameter's part of an array of which this rank has its run, from all ranks, to host memory. */
static dt_status dt__zero_collect(
    dt_zero *zero, const dt__zero_unit *z, const void *run, const dt_tensor *param, void *host) {
    size_t size = dt__zero_size(z), bytes = z->unit->padded * size;
    void *whole = dt_alloc(zero->ctx, DT_MEM_TEMP, bytes, "collecting a parameter's state");
    if (!whole) return dt_error(zero->ctx);
    dt__move(zero->ctx, dt__zero_at(z, whole, z->first), run, z->count * size);
    if (zero->desc.stage >= 1)
        dt_all_gather(
            z->shard, dt__zero_at(z, whole, z->first), whole, z->count, z->unit->grad_dtype);
    if (dt_error(zero->ctx) == DT_OK)
        dt__move(zero->ctx, host, dt__zero_at(z, whole, param->param->offset),
            param->param->count * size);
    dt__sync(zero->ctx);
    dt_free(zero->ctx, DT_MEM_TEMP, whole, bytes);
    return dt_error(zero->ctx);
}

dt_status dt_zero_state(dt_zero *zero, int which, const dt_tensor *param, void *host) {
    if (!zero || dt_error(zero->ctx) != DT_OK) return zero ? dt_error(zero->ctx) : DT_ERR_ARG;
    int master =
        which == DT_STATE_MASTER && param && dt_grad_dtype(param) != param->dtype && zero->step > 0;
    if (which < 0 || (which >= zero->states && !master) || !host)
        return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_state: state %d of %d%s", which,
            zero->states, host ? "" : ", to host memory that is NULL");
    dt__zero_unit *z = dt__zero_unit_of(zero, "dt_zero_state", param);
    size_t bytes = z ? dt__disk_bytes(zero, z->unit, DT__STATE_0 + which) : 0;
    if (!z || !bytes)
        return z ? dt__zero_collect(zero, z, master ? z->master : z->state[which], param, host)
                 : dt_error(zero->ctx);
    void *run = dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "collecting a parameter's state");
    if (!run) return dt_error(zero->ctx);
    if (dt__disk_now(zero, &z->read, 0, run, bytes,
            dt__disk_offset(zero, z->unit->index, DT__STATE_0 + which, zero->disk->slot),
            "optimizer state") == DT_OK)
        dt__zero_collect(zero, z, run, param, host);
    dt_free(zero->ctx, DT_MEM_HOST, run, bytes);
    return dt_error(zero->ctx);
}

dt_status dt_zero_grad(dt_zero *zero, const dt_tensor *param, void *host) {
    if (!zero || dt_error(zero->ctx) != DT_OK) return zero ? dt_error(zero->ctx) : DT_ERR_ARG;
    if (!host) return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_grad: host memory is NULL");
    if (!dt__zero_is_over(zero))
        return dt_fail(zero->ctx, DT_ERR_ARG,
            "dt_zero_grad: step %lld has no complete "
            "gradient",
            (long long)zero->step + 1);
    if (dt__onebit_frozen(zero))
        return dt_fail(
            zero->ctx, DT_ERR_UNSUPPORTED, "dt_zero_grad: 1-bit Adam no longer sums gradients");
    if (dt__zero_sum_tied(zero) != DT_OK) return dt_error(zero->ctx);
    dt__zero_unit *z = dt__zero_unit_of(zero, "dt_zero_grad", param);
    size_t bytes = z ? dt__disk_bytes(zero, z->unit, DT__GRAD) : 0;
    void *run =
        bytes ? dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "collecting a parameter's gradient") : NULL;
    if (z && run && dt__grads_peek(zero, z, 0, run, z->count) == DT_OK)
        dt__zero_collect(zero, z, run, param, host);
    if (z && !bytes) dt__zero_collect(zero, z, dt__zero_run_grad(z), param, host);
    dt_free(zero->ctx, DT_MEM_HOST, run, bytes);
    if (dt_error(zero->ctx) != DT_OK) return dt_error(zero->ctx);
    for (size_t i = 0; i < param->param->count && zero->scale != 1; i++) {
        if (z->unit->grad_dtype == DT_F64)
            ((double *)host)[i] /= zero->scale;
        else
            ((float *)host)[i] = (float)(((float *)host)[i] / zero->scale);
    }
    return DT_OK;
}

int64_t dt_zero_steps(const dt_zero *zero) { return zero ? zero->step : 0; }

size_t dt_zero_state_bytes(const dt_zero *zero) {
    if (!zero || dt__on_disk(zero->desc.offload_optim) || dt__in_host(zero->desc.offload_optim))
        return 0;
    size_t bytes = 0;
    for (int u = 0; u < zero->n_units; u++) {
        const dt_bucket *unit = zero->units[u].unit;
        size_t arrays = (size_t)(zero->states + dt__zero_has_master(unit));
        if (!unit->frozen) bytes += zero->units[u].count * arrays * dt_dtype_size(unit->grad_dtype);
        if (zero->desc.optimizer == DT_ONEBIT_ADAM) bytes += dt__onebit_bytes(zero, unit);
    }
    return bytes;
}

// ==== 15. Account: code =========================================================================

dt_zero_bytes dt_zero_formula(dt_zero_formula_desc d) {
    dt_zero_bytes none = { NAN, NAN, NAN, NAN, NAN }, b;
    if (d.stage < 0 || d.stage > 3 || d.ranks < 0 || d.micros < 0 ||
        !(d.elements >= 0 && d.values >= 0 && d.grads >= 0 && d.state >= 0))
        return none;
    if (d.values == 0 && d.grads == 0 && d.state == 0) d.values = d.grads = 4, d.state = 8;
    double n = d.ranks ? d.ranks : 1, a = d.micros ? d.micros : 1;
    double reduced = d.stage >= 2 ? a : 1;                 /* times a gradient is scattered */
    double gathered = d.stage == 3 && !d.kept ? 2 * a : 1; /* times a value is gathered */
    b.params = d.values * d.elements / (d.stage >= 3 ? n : 1);
    b.grads = d.grads * d.elements / (d.stage >= 2 ? n : 1);
    b.optim = d.state * d.elements / (d.stage >= 1 ? n : 1);
    b.total = b.params + b.grads + b.optim;
    b.sent = (d.stage == 0 ? 2 * d.grads : reduced * d.grads + gathered * d.values) * d.elements *
             (n - 1) / n;
    return b;
}

// ==== 16. Checkpoints: the writer ===============================================================

/* What writes a checkpoint's bytes, in the rank's own thread or in one beside it. So it calls the
   io table and touches nothing of the context: its first failure is a text, which the rank makes a
   failure of the context later. */

enum { DT__CKPT_PATH = 1024, DT__CKPT_COPY = 4 << 20, DT__CKPT_CHUNK = 1 << 20 };
enum { DT__MODEL = 0, DT__OPTIM, DT__CKPT_FILES };
static const char *const dt__ckpt_names[DT__CKPT_FILES] = { "model.safetensors",
    "optim.safetensors" };

/* Bytes copied to be written later, and where to. */
typedef struct dt__copy {
    struct dt__copy *next;
    size_t room, used; /* of the bytes behind this head */
} dt__copy;
typedef struct dt__piece {
    int file;
    const char *data;
    int64_t bytes, offset;
} dt__piece;

typedef struct dt__writer {
    dt_io io;
    int fd[DT__CKPT_FILES];
    char path[DT__CKPT_FILES][DT__CKPT_PATH];
    char why[DT__CKPT_PATH + 200]; /* the first failure; "": none */
    /* in the background: what this rank has to write; the one being filled */
    dt__copy *copies, *copy;
    dt__piece *pieces;
    int n_pieces, piece_room;
    char dir[DT__CKPT_PATH], temp[DT__CKPT_PATH], final[DT__CKPT_PATH];
    char *manifest; /* rank 0 */
    size_t manifest_bytes, manifest_room;
    /* a copy: a thread that is left behind may outlive the caller's */
    char *beside;
    int keep, publishing; /* publishing: what the thread does */
    /* this job made temp, or an export: remove it after a failure */
    int made;
    int64_t step; /* of what is being written, and which one of that step it is */
    int again;
    int background, runs, lost;
    pthread_t thread;
    int done;      /* atomic; as the next one */
    int64_t moved; /* grows while the disk answers */
} dt__writer;

static void dt__writer_fail(dt__writer *w, const char *path, const char *what) {
    if (!w->why[0]) snprintf(w->why, sizeof w->why, "%s: %s: %s", path, what, dt__io_reason());
}

/* dir/name; too long a path is a failure. */
static const char *dt__writer_path(dt__writer *w, char *out, const char *dir, const char *name) {
    if (snprintf(out, DT__CKPT_PATH, "%s/%s", dir, name) < DT__CKPT_PATH) return out;
    if (!w->why[0]) snprintf(w->why, sizeof w->why, "%.80s...: the path is too long", dir);
    return "";
}

/* In pieces, each of which shows that the disk still answers. */
static void dt__writer_put(
    dt__writer *w, const char *path, int fd, const void *data, int64_t bytes, int64_t offset) {
    for (int64_t done = 0; done < bytes && !w->why[0];) {
        int64_t n = bytes - done < DT__CKPT_COPY ? bytes - done : (int64_t)DT__CKPT_COPY;
        int end = 0;
        int64_t went =
            dt__io_move(&w->io, fd, 1, (char *)(uintptr_t)data + done, n, offset + done, &end);
        done += went;
        __atomic_fetch_add(&w->moved, 1, __ATOMIC_RELAXED);
        if (went == n) continue;
        char what[48];
        snprintf(what, sizeof what, "writing byte %lld", (long long)(offset + done));
        if (end) errno = ENOSPC;
        dt__writer_fail(w, path, what);
    }
}

/* Once synced, the disk has it; an error of the disk may show no earlier, and is told once. */
static void dt__writer_shut(dt__writer *w, const char *path, int fd) {
    errno = 0;
    if (!w->why[0] && w->io.fsync(w->io.user, fd) != 0) dt__writer_fail(w, path, "fsync");
    __atomic_fetch_add(&w->moved, 1, __ATOMIC_RELAXED);
    errno = 0;
    if (w->io.close(w->io.user, fd) != 0) dt__writer_fail(w, path, "close");
}

/* A new file of so many bytes; -1 after a failure. */
static int dt__writer_create(dt__writer *w, const char *path, int64_t bytes) {
    errno = 0;
    int fd = w->why[0] ? -1 : dt__io_create(&w->io, path);
    if (fd < 0) {
        dt__writer_fail(w, path, "open");
        return -1;
    }
    errno = 0;
    if (w->io.resize(w->io.user, fd, bytes) != 0) dt__writer_fail(w, path, "making room");
    return fd;
}

static void dt__writer_file(dt__writer *w, const char *name, const char *text, size_t bytes) {
    char room[DT__CKPT_PATH];
    const char *path = dt__writer_path(w, room, w->temp, name);
    int fd = dt__writer_create(w, path, (int64_t)bytes);
    if (fd < 0) return;
    dt__writer_put(w, path, fd, text, (int64_t)bytes, 0);
    dt__writer_shut(w, path, fd);
}

/* Makes the names in a folder last. There are file systems whose folders cannot be synced, and need
   not be. but: an errno with which one may not open, 0: none. */
static void dt__writer_sync(dt__writer *w, const char *folder, int but) {
    errno = 0;
    int fd = w->why[0] ? -1 : w->io.open(w->io.user, folder, DT_IO_READ);
    if (fd < 0) {
        if (errno == 0 || errno != but) dt__writer_fail(w, folder, "open");
        return;
    }
    errno = 0;
    if (w->io.fsync(w->io.user, fd) != 0 && errno != EINVAL) dt__writer_fail(w, folder, "fsync");
    w->io.close(w->io.user, fd);
}

/* Which checkpoint a folder's name says: step-200 is the first of step 200, step-200-2 the
   second. */
typedef struct dt__ckpt_id {
    int64_t step;
    int again;
} dt__ckpt_id;
static const dt__ckpt_id dt__ckpt_none = { -1, 0 };
static const dt__ckpt_id dt__ckpt_last = { INT64_MAX, 0x7fffffff };
static int dt__ckpt_before(dt__ckpt_id a, dt__ckpt_id b) {
    return a.step != b.step ? a.step < b.step : a.again < b.again;
}

static void dt__ckpt_name(dt__ckpt_id id, char *name, size_t bytes) {
    snprintf(
        name, bytes, id.again > 1 ? "step-%lld-%d" : "step-%lld", (long long)id.step, id.again);
}

/* Parses the first n bytes of a name, exactly as dt__ckpt_name spells it; else dt__ckpt_none. */
static dt__ckpt_id dt__ckpt_named(const char *name, size_t n) {
    long long step = -1;
    dt__ckpt_id id = { -1, 1 };
    char text[64], same[64];
    snprintf(text, sizeof text, "%.*s", n < sizeof text ? (int)n : 0, name);
    if (sscanf(text, "step-%15lld-%9d", &step, &id.again) < 1) return dt__ckpt_none;
    if (step < 0 || id.again < 1) return dt__ckpt_none;
    id.step = step; /* exact as double */
    dt__ckpt_name(id, same, sizeof same);
    return strcmp(same, text) == 0 ? id : dt__ckpt_none;
}

typedef struct dt__newest {
    dt__ckpt_id below, found;
} dt__newest;
static void dt__newest_add(void *arg, const char *name) {
    dt__newest *n = (dt__newest *)arg;
    dt__ckpt_id id = dt__ckpt_named(name, strlen(name));
    if (dt__ckpt_before(n->found, id) && dt__ckpt_before(id, n->below)) n->found = id;
}

/* The newest checkpoint of a folder before `below`, or dt__ckpt_none. -1: the folder cannot be
   listed. */
static int dt__newest_below(
    const dt_io *io, const char *dir, dt__ckpt_id below, dt__ckpt_id *found) {
    dt__newest n = { below, dt__ckpt_none };
    errno = 0;
    int answer = io->list(io->user, dir, dt__newest_add, &n);
    *found = n.found;
    return answer;
}

int64_t dt_checkpoint_newest(const dt_io *io, const char *dir, char *name, size_t bytes) {
    dt__ckpt_id id = dt__ckpt_none;
    if (name && bytes) name[0] = 0;
    if (!io || !io->list || !dir) return errno = EINVAL, -2;
    if (dt__newest_below(io, dir, dt__ckpt_last, &id) != 0) return errno == ENOENT ? -1 : -2;
    if (id.step >= 0 && name && bytes) dt__ckpt_name(id, name, bytes);
    return id.step;
}

/* Removes a checkpoint, the manifest first, so that a part of one never counts. Other files in its
   folder stay. */
static int dt__ckpt_remove(const dt_io *io, const char *folder) {
    static const char *const names[] = { "manifest.json", "config.json", "model.safetensors",
        "optim.safetensors" };
    return io->remove_folder(io->user, folder, names, 4);
}

/* Removes a folder that a killed job left, if its name is exactly like step-200.1a2b3c.tmp. */
typedef struct dt__sweep {
    const dt_io *io;
    const char *dir;
} dt__sweep;
static void dt__sweep_one(void *arg, const char *name) {
    const dt__sweep *sweep = (const dt__sweep *)arg;
    const char *dot = strchr(name, '.');
    char path[DT__CKPT_PATH + 80];
    if (!dot || strspn(dot + 1, "0123456789abcdef") != 6 || strcmp(dot + 7, ".tmp") != 0) return;
    if (dt__ckpt_named(name, (size_t)(dot - name)).step < 0) return;
    snprintf(path, sizeof path, "%s/%s", sweep->dir, name);
    dt__ckpt_remove(sweep->io, path);
}

/* The new one and the keep - 1 before it stay, those before go. Of a later step there are only
   damaged ones, which do not count. What cannot be removed stays, and is in nobody's way. */
static void dt__writer_remove_old(const dt__writer *w) {
    dt__ckpt_id at = { w->step, w->again };
    char name[64], path[DT__CKPT_PATH + 64];
    for (int i = 1; i < w->keep && at.step >= 0; i++)
        if (dt__newest_below(&w->io, w->dir, at, &at) != 0) return;
    while (w->keep > 0 && at.step >= 0 && dt__newest_below(&w->io, w->dir, at, &at) == 0 &&
           at.step >= 0) {
        dt__ckpt_name(at, name, sizeof name);
        snprintf(path, sizeof path, "%s/%s", w->dir, name);
        dt__ckpt_remove(&w->io, path);
    }
}

/* This rank's bytes are on the disk after this. */
static void dt__writer_finish(dt__writer *w) {
    for (int i = 0; i < w->n_pieces; i++) {
        const dt__piece *p = &w->pieces[i];
        dt__writer_put(w, w->path[p->file], w->fd[p->file], p->data, p->bytes, p->offset);
    }
    for (int f = 0; f < DT__CKPT_FILES; f++) {
        if (w->fd[f] >= 0) dt__writer_shut(w, w->path[f], w->fd[f]);
        w->fd[f] = -1;
    }
}

/* Rank 0, when all ranks' bytes are: the rename is the instant at which the checkpoint is there. */
static void dt__writer_publish(dt__writer *w) {
    if (w->beside) dt__writer_file(w, "config.json", w->beside, strlen(w->beside));
    dt__writer_file(w, "manifest.json", w->manifest, w->manifest_bytes);
    dt__writer_sync(w, w->temp, 0);
    errno = 0;
    if (!w->why[0] && w->io.rename(w->io.user, w->temp, w->final) != 0)
        dt__writer_fail(w, w->final, "rename");
    dt__writer_sync(w, w->dir, 0);
    if (!w->why[0]) dt__writer_remove_old(w);
}

static void *dt__writer_main(void *arg) {
    dt__writer *w = (dt__writer *)arg;
#ifdef __linux__
    /* this thread's alone, there: training goes first */
    if (w->background) setpriority(PRIO_PROCESS, 0, 19);
#endif
    if (w->publishing)
        dt__writer_publish(w);
    else
        dt__writer_finish(w);
    __atomic_store_n(&w->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* At once, or beside the training. */
static void dt__writer_go(dt__writer *w, int publishing) {
    w->publishing = publishing;
    w->done = 0;
    w->runs = w->background && pthread_create(&w->thread, NULL, dt__writer_main, w) == 0;
    if (w->runs) return;
    w->background = 0; /* without a thread */
    dt__writer_main(w);
}

// ==== 17. Checkpoints: what is in them ==========================================================

/* One of the two files as a rank sees it. Digests are sums over elements, so any cut over ranks
   gives the same. */
typedef struct dt__ckpt_file {
    struct dt_checkpoint *owner;
    int file;
    /* (n) of what this rank has written of each tensor; then of all ranks */
    uint64_t *digest;
    int64_t *count; /* (n) elements */
    int n;
} dt__ckpt_file;

struct dt_checkpoint {
    dt_zero *zero;
    dt_ctx *ctx;
    dt_checkpoint_desc desc;
    dt_listener listener;
    const char *what; /* the call, for messages */
    int lock;         /* descriptor, -1: none */
    /* what the lock says: who holds it, and since when by its clock */
    char mark[300];
    dt__writer *writer;
    dt_weights *w[DT__CKPT_FILES]; /* names and places of all tensors */
    dt__ckpt_file file[DT__CKPT_FILES];
    int files;                     /* DT__CKPT_FILES; of an export the first only */
    const dt_export_desc *exports; /* NULL: a checkpoint */
    /* 0: no save under way; 1: bytes are being written; 2: rank 0 publishes */
    int saving;
    /* of desc.dir: the newest that was loaded, passed over, or saved by this job */
    dt__ckpt_id known;
    int64_t moved;       /* the writer's `moved` at the last look, */
    dt__stopwatch watch; /* and the time since that changed */
    double done, total;  /* elements, for progress */
    char *config;        /* of what was loaded */
    char path[DT__CKPT_PATH];
};

/* A number for each place, another for each of 2^32, and none is 0: k a place times an odd
   number. */
static uint32_t dt__words_weight(uint32_t k) {
    k ^= k >> 15;
    k *= 2246822507u;
    return k ^ k >> 13;
}

/* The sum of words times the weights of their places. A word that changed always shows, as the
   product of its difference and a weight is not 0 and below 2^64; two that changed places do too.
   Other damage escapes where such products add up to 0, and as the weights are mixed they do by
   chance only. i: place of the first word, of `size` bytes. A loop for each size: so compilers make
   vectors of them. */
static uint64_t dt__words_digest(uint64_t i, const void *data, size_t words, size_t size) {
    const char *p = (const char *)data;
    uint64_t sum = 0;
    uint32_t first = ((uint32_t)i + 1) * 2654435761u;
    for (uint32_t k = 0; k < words && size == 4; k++) {
        uint32_t x;
        memcpy(&x, p + 4 * (size_t)k, 4);
        sum += (uint64_t)x * dt__words_weight(first + k * 2654435761u);
    }
    for (uint32_t k = 0; k < words && size == 2; k++) {
        uint16_t x;
        memcpy(&x, p + 2 * (size_t)k, 2);
        sum += (uint64_t)x * dt__words_weight(first + k * 2654435761u);
    }
    for (uint32_t k = 0; k < words && size == 1; k++)
        sum += (uint64_t)(unsigned char)p[k] * dt__words_weight(first + k * 2654435761u);
    return sum;
}

/* A digest as 4 doubles that stay exact when ranks sum them, and back. */
static void dt__digest_split(double *to, uint64_t digest) {
    for (int k = 0; k < 4; k++) to[k] = (double)(digest >> (16 * k) & 0xffff);
}
static uint64_t dt__digest_join(const double *from) {
    uint64_t digest = 0;
    for (int k = 0; k < 4; k++) digest += (uint64_t)from[k] << (16 * k);
    return digest;
}

/* Of elements first .. first+count-1 of a tensor. */
static uint64_t dt__elements_digest(
    dt_dtype dtype, int64_t first, const void *data, int64_t count) {
    size_t size = dt_dtype_size(dtype), word = size < 4 ? size : 4;
    uint64_t per = size / word, sum = 0;
    for (int64_t at = 0, n; at < count; at += n) { /* places within a call are 32-bit numbers */
        n = count - at < 1 << 28 ? count - at : 1 << 28;
        sum += dt__words_digest((uint64_t)(first + at) * per,
            (const char *)data + (size_t)at * size, (size_t)n * (size_t)per, word);
    }
    return sum;
}

/* A rank's text to all: those of all ranks, in their order, with blanks between. Sums of doubles
   carry it, as these are in host memory whatever the device; 4 bytes each. Free it with dt_free(..,
   *bytes + 1). NULL after a failure. */
static char *dt__share_texts(dt_ctx *ctx, const char *mine, size_t n, size_t *bytes) {
    dt_comm *world = dt_world(ctx);
    size_t ranks = (size_t)dt_comm_size(world), total = 0, before = 0;
    double *words = (double *)dt__host_zeroed(ctx, ranks * sizeof *words, "texts of all ranks");
    if (words) words[dt_comm_rank(world)] = (double)((n + 3) / 4);
    dt_sum_doubles(world, words, words ? ranks : 0);
    for (size_t r = 0; words && r < ranks; r++) {
        if (r == (size_t)dt_comm_rank(world)) before = total;
        total += (size_t)words[r];
    }
    dt_free(ctx, DT_MEM_HOST, words, ranks * sizeof *words);
    if (dt_error(ctx) != DT_OK) return NULL;
    double *all = (double *)dt__host_zeroed(ctx, (total + 1) * sizeof *all, "texts of all ranks");
    char *text = (char *)dt__host_zeroed(ctx, 4 * total + 1, "texts of all ranks");
    for (size_t i = 0; all && i < (n + 3) / 4; i++) {
        uint32_t word = 0x20202020u;
        memcpy(&word, mine + 4 * i, n - 4 * i < 4 ? n - 4 * i : 4);
        all[before + i] = word;
    }
    dt_sum_doubles(world, all, all ? total : 0);
    for (size_t i = 0; all && text && i < total; i++) {
        uint32_t word = (uint32_t)all[i];
        memcpy(text + 4 * i, &word, 4);
    }
    dt_free(ctx, DT_MEM_HOST, all, (total + 1) * sizeof *all);
    *bytes = 4 * total;
    if (dt_error(ctx) == DT_OK) return text;
    if (text) dt_free(ctx, DT_MEM_HOST, text, 4 * total + 1);
    return NULL;
}

/* Where a parameter lies in model.safetensors: n is 0 under its own name. */
static dt_status dt__ckpt_place(const dt_checkpoint *c, const dt_tensor *t, dt_file_place *p) {
    memset(p, 0, sizeof *p);
    if (c->desc.place) c->desc.place(t, p, c->desc.user);
    if (p->n < 0 || p->n > 2)
        return dt_fail(
            c->ctx, DT_ERR_ARG, "%s: place gives %s %d parts; 1 or 2", c->what, t->name, p->n);
    for (int i = 0; i < 2; i++) p->part[i].name = p->n ? p->name[i] : t->name;
    return DT_OK;
}

/* Whether this rank is the one, of those that hold copies along tp and of a tied parameter along
   pp, that writes a unit: the first. Along tp a cut may go over some of its ranks, whose first then
   has to be tp's. */
static int dt__ckpt_writes(const dt_zero *zero, const dt_bucket *unit) {
    const dt_param_desc *d = dt__unit_desc(zero, unit);
    int tp = zero->mesh.sizes.tp, lowest = zero->mesh.at.tp;
    for (int c = 0; c < 3; c++)
        for (int i = 0; d->shards[c].comm && i < dt_comm_size(d->shards[c].comm); i++) {
            int at = dt_comm_world_rank(d->shards[c].comm, i) % tp;
            lowest = at < lowest ? at : lowest;
        }
    dt_comm *tied = dt__zero_tied(zero, unit);
    return lowest == 0 && (!tied || dt_comm_rank(tied) == 0);
}

static const char *const dt__state_names[] = { "m.", "v.", "master." };
static int dt__ckpt_has(const dt_zero *zero, const dt_bucket *unit, int array) {
    if (unit->frozen) return 0;
    return array == DT__MASTER ? zero->step > 0 && dt__zero_has_master(unit) : array < zero->states;
}

static char *dt__state_name(dt_ctx *ctx, int array, const char *name) {
    return dt__join(ctx, dt__state_names[array], strlen(dt__state_names[array]), name);
}

/* One tensor of the list: [file,name,type,d0,d1,...] */
static void dt__list_put(
    dt_json_out *o, int file, const char *name, dt_dtype dtype, dt_shape shape) {
    dt_json_open(o, NULL, '[');
    dt_json_put_int(o, NULL, file);
    dt_json_put_string(o, NULL, name);
    dt_json_put_int(o, NULL, dtype);
    for (int i = 0; i < shape.nd; i++) dt_json_put_int(o, NULL, shape.d[i]);
    dt_json_shut(o, ']');
}

static dt_status dt__list_param(const dt_checkpoint *c, dt_json_out *o, const dt_tensor *t) {
    const dt_bucket *unit = t->param->unit;
    dt_file_place p;
    if (dt__ckpt_place(c, t, &p) != DT_OK) return dt_error(c->ctx);
    if (p.n == 0) dt__list_put(o, DT__MODEL, t->name, t->dtype, t->param->full);
    for (int i = 0; i < p.n; i++) dt__list_put(o, DT__MODEL, p.name[i], t->dtype, p.shape);
    for (int a = 0; a <= DT__MASTER && !c->exports; a++) {
        char *name = dt__ckpt_has(c->zero, unit, a) ? dt__state_name(c->ctx, a, t->name) : NULL;
        if (name) dt__list_put(o, DT__OPTIM, name, unit->grad_dtype, t->param->full);
        dt__text_drop(c->ctx, name);
    }
    return dt_error(c->ctx);
}

/* 1-bit Adam: what signs left of each rank's momentum. */
static void dt__error_name(const dt_checkpoint *c, int unit, int e, char *name, size_t bytes) {
    snprintf(name, bytes, "error%d.%d.%d", e, dt_ctx_rank(c->ctx), unit);
}
static dt_shape dt__error_shape(const dt__zero_unit *z, int e) {
    return DT_SHAPE((int64_t)(z->error_bytes[e] / dt__zero_size(z)));
}

/* What this rank tells of: the first rank of each stage of the pipeline tells all that its stage
   has. */
static dt_status dt__list_mine(const dt_checkpoint *c, dt_json_out *o) {
    const dt_zero *zero = c->zero;
    const dt_mesh_desc *at = &zero->mesh.at;
    int first = at->dp == 0 && at->cp == 0 && at->ep == 0 && at->tp == 0;
    for (int i = 0; i < dt_param_count(c->ctx) && first; i++) {
        const dt_tensor *t = dt_param_get(c->ctx, i);
        if (dt__ckpt_writes(zero, t->param->unit) && dt__list_param(c, o, t) != DT_OK) break;
    }
    for (int u = 0; u < zero->n_units && !c->exports; u++)
        for (int e = 0; e < 2 && zero->units[u].errors[e]; e++) {
            char name[64];
            dt__error_name(c, u, e, name, sizeof name);
            dt__list_put(o, DT__OPTIM, name, zero->units[u].unit->grad_dtype,
                dt__error_shape(&zero->units[u], e));
        }
    return dt_error(c->ctx);
}

static dt_status dt__list_take(dt_checkpoint *c, const dt_json *j, int node) {
    int64_t file = 0, dtype = 0;
    const char *name = dt_json_string(j, dt_json_at(j, node, 1), NULL);
    dt_shape shape;
    memset(&shape, 0, sizeof shape);
    dt_json_int(j, dt_json_at(j, node, 0), &file);
    dt_json_int(j, dt_json_at(j, node, 2), &dtype);
    for (int i = 3; i < dt_json_count(j, node) && shape.nd < DT_MAX_DIMS; i++)
        dt_json_int(j, dt_json_at(j, node, i), &shape.d[shape.nd++]);
    dt_weights *w = c->w[file];
    const dt_weight *t = dt_weights_get(w, dt_weights_find(w, name));
    if (t && w->desc.llmc.version) return DT_OK; /* these are given, and dt_weights_save compares */
    if (!t)
        return dt_weights_declare(w, name, (dt_dtype)dtype, shape) < 0 ? dt_error(c->ctx) : DT_OK;
    int same = t->dtype == (dt_dtype)dtype && t->shape.nd == shape.nd;
    for (int i = 0; i < shape.nd; i++) same &= t->shape.d[i] == shape.d[i];
    return same ? DT_OK
                : dt_fail(c->ctx, DT_ERR_ARG, "dt_checkpoint: '%s' is %s and %s", name,
                      dt__shape_text(t->shape).s, dt__shape_text(shape).s);
}

static void dt__list_drop(dt_checkpoint *c) {
    for (int f = 0; f < DT__CKPT_FILES; f++) {
        dt__ckpt_file *file = &c->file[f];
        if (c->w[f]) dt__weights_end(c->w[f]);
        c->w[f] = NULL;
        dt_free(c->ctx, DT_MEM_HOST, file->digest, (size_t)(file->n + 1) * sizeof *file->digest);
        dt_free(c->ctx, DT_MEM_HOST, file->count, (size_t)(file->n + 1) * sizeof *file->count);
        memset(file, 0, sizeof *file);
    }
}

static void dt__ckpt_put(
    void *user, int index, int64_t first, int64_t count, const void *data, int64_t offset);

/* The size of a file's header. */
static int64_t dt__head_bytes(const dt_weights *w) {
    uint64_t n;
    memcpy(&n, w->file[0].head, sizeof n);
    return w->desc.llmc.version ? (int64_t)DT__LLMC_HEAD : (int64_t)n + 8;
}

/* [collective: world] c->w: all tensors of the program, over all stages, with their places in the
   files of `folder`, or in the file to be exported. */
static dt_status dt__list_make(dt_checkpoint *c, const char *folder) {
    dt_ctx *ctx = c->ctx;
    dt_json_out mine = { ctx, NULL, 0, 0 }, all = { ctx, NULL, 0, 0 };
    size_t bytes = 0;
    dt__list_drop(c);
    for (int f = 0; f < c->files && dt_error(ctx) == DT_OK; f++) {
        char path[DT__CKPT_PATH];
        dt_weights_desc desc;
        memset(&desc, 0, sizeof desc);
        if (c->exports) desc.llmc = c->exports->llmc;
        c->w[f] = dt_weights_create(ctx,
            c->exports ? folder : dt__writer_path(c->writer, path, folder, dt__ckpt_names[f]),
            desc);
        c->file[f].owner = c;
        c->file[f].file = f;
        if (c->w[f]) c->w[f]->sink = (dt__sink){ dt__ckpt_put, &c->file[f] };
    }
    /* so that a comma comes before each tensor, and texts of ranks can be joined */
    dt__json_write(&mine, " ", 1);
    dt__list_mine(c, &mine);
    char *text = dt__share_texts(ctx, mine.text, mine.used, &bytes);
    dt__json_write(&all, "[0", 2);
    if (text) dt__json_write(&all, text, bytes);
    dt__json_write(&all, "]", 1);
    dt_json *j = dt_error(ctx) == DT_OK
                     ? dt_json_parse(ctx, "the list of tensors", all.text, all.used)
                     : NULL;
    for (int i = 1; i < dt_json_count(j, 0) && dt_error(ctx) == DT_OK; i++)
        dt__list_take(c, j, dt_json_at(j, 0, i));
    dt_json_free(j);
    if (text) dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
    dt_json_drop(&mine);
    dt_json_drop(&all);
    for (int f = 0; f < c->files && dt_error(ctx) == DT_OK; f++) {
        dt__ckpt_file *file = &c->file[f];
        dt__weights_lay(c->w[f]);
        size_t n = (size_t)dt_weights_count(c->w[f]) + 1;
        file->digest = (uint64_t *)dt__host_zeroed(ctx, n * sizeof *file->digest, "digests");
        file->count = (int64_t *)dt__host_zeroed(ctx, n * sizeof *file->count, "digests");
        file->n = (int)n - 1;
    }
    return dt_error(ctx);
}

// ==== 18. Checkpoints: saving ===================================================================

/* Bytes that stay until the thread has written them. A piece that goes on where the last one ends
   is one with it. */
static void dt__copy_add(
    dt_checkpoint *c, int file, const void *data, int64_t bytes, int64_t offset) {
    dt__writer *w = c->writer;
    dt__copy *copy = w->copy, *last_copy = NULL;
    for (; copy && copy->room - copy->used < (size_t)bytes; copy = copy->next) last_copy = copy;
    if (!copy) {
        size_t room = bytes > DT__CKPT_COPY ? (size_t)bytes : (size_t)DT__CKPT_COPY;
        copy = (dt__copy *)dt_alloc(
            c->ctx, DT_MEM_HOST, sizeof *copy + room, "a copy to be saved in the background");
        if (!copy) return;
        copy->next = NULL;
        copy->room = room;
        copy->used = 0;
        if (last_copy)
            last_copy->next = copy;
        else
            w->copies = copy;
    }
    w->copy = copy;
    char *to = (char *)(copy + 1) + copy->used;
    dt__piece *last = w->n_pieces ? &w->pieces[w->n_pieces - 1] : NULL;
    memcpy(to, data, (size_t)bytes);
    copy->used += (size_t)bytes;
    if (last && last->file == file && last->offset + last->bytes == offset &&
        last->data + last->bytes == to) {
        last->bytes += bytes;
        return;
    }
    dt__piece *grown = (dt__piece *)dt__grow(
        c->ctx, w->pieces, w->n_pieces, &w->piece_room, sizeof *grown, "pieces");
    if (!grown) return;
    dt__piece piece = { file, to, bytes, offset };
    w->pieces = grown;
    w->pieces[w->n_pieces++] = piece;
}

/* The memory stays for the next save: new memory is slower than the copying. */
static void dt__copies_reuse(dt__writer *w) {
    for (dt__copy *copy = w->copies; copy; copy = copy->next) copy->used = 0;
    w->copy = w->copies;
    w->n_pieces = 0;
}

static void dt__copies_free(dt_checkpoint *c) {
    dt__writer *w = c->writer;
    for (dt__copy *next; w->copies; w->copies = next) {
        next = w->copies->next;
        dt_free(c->ctx, DT_MEM_HOST, w->copies, sizeof *w->copies + w->copies->room);
    }
    dt_free(c->ctx, DT_MEM_HOST, w->pieces, (size_t)w->piece_room * sizeof *w->pieces);
}

/* Elements of a tensor that this rank writes. */
static void dt__ckpt_put(
    void *user, int index, int64_t first, int64_t count, const void *data, int64_t offset) {
    dt__ckpt_file *file = (dt__ckpt_file *)user;
    dt_checkpoint *c = file->owner;
    const dt_weight *t = dt_weights_get(c->w[file->file], index);
    int64_t bytes = count * (int64_t)dt_dtype_size(t->dtype);
    file->digest[index] += dt__elements_digest(t->dtype, first, data, count);
    file->count[index] += count;
    if (c->writer->background)
        dt__copy_add(c, file->file, data, bytes, offset);
    else
        dt__writer_put(
            c->writer, c->writer->path[file->file], c->writer->fd[file->file], data, bytes, offset);
}

static void dt__ckpt_progress(dt_checkpoint *c, double elements) {
    c->done += elements;
    if (c->desc.progress && dt_ctx_rank(c->ctx) == 0 && c->total > 0)
        c->desc.progress(c->done < c->total ? c->done / c->total : 1, c->desc.user);
}

/* The values of a unit. All ranks of its data group have them, at stage 3 for the moment, and share
   out the writing. */
static dt_status dt__save_values(dt_checkpoint *c, dt__zero_unit *z) {
    dt_ctx *ctx = c->ctx;
    dt_bucket *unit = z->unit;
    dt_weights *w = c->w[DT__MODEL];
    int gathered = !unit->data;
    if (dt__present_aside(dt_param_get(ctx, unit->first_param)) != DT_OK) return dt_error(ctx);
    w->part = dt_comm_rank(z->data);
    w->parts = dt_comm_size(z->data);
    for (int i = unit->first_param; i < unit->first_param + unit->params; i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        dt_file_place p;
        if (dt__ckpt_place(c, t, &p) != DT_OK) return dt_error(ctx);
        if (dt_weights_save(w, t, p.columns, p.part, p.n ? p.n : 1) != DT_OK) return dt_error(ctx);
    }
    dt__unit_release(ctx, unit, 0, gathered);
    return dt_error(ctx);
}

/* Elements of this rank's run of a state array, from the unit's element `from` on: where they are
   if that is host memory, else copied to `host`. */
static const void *dt__state_get(
    dt_zero *zero, dt__zero_unit *z, int array, size_t from, size_t n, void *host) {
    size_t size = dt__zero_size(z), at = (from - z->first) * size;
    char *here = (char *)(array == DT__MASTER ? z->master : z->state[array]);
    if (here && (!zero->ctx->kernels.alloc || dt__in_host(zero->desc.offload_optim)))
        return here + at;
    if (here &&
        (dt__move(zero->ctx, host, here + at, n * size) != DT_OK || dt__sync(zero->ctx) != DT_OK))
        return NULL;
    if (here) return host;
    int64_t offset = dt__disk_offset(zero, z->unit->index, array, zero->disk->slot) + (int64_t)at;
    return dt__disk_now(zero, &z->read, 0, host, n * size, offset, "optimizer state") == DT_OK
               ? host
               : NULL;
}

/* The other way. */
static dt_status dt__state_set(
    dt_zero *zero, dt__zero_unit *z, int array, size_t from, size_t n, void *host) {
    size_t size = dt__zero_size(z), at = (from - z->first) * size;
    char *here = (char *)(array == DT__MASTER ? z->master : z->state[array]);
    if (here && dt__move(zero->ctx, here + at, host, n * size) == DT_OK) dt__sync(zero->ctx);
    if (here) return dt_error(zero->ctx);
    int64_t offset = dt__disk_offset(zero, z->unit->index, array, zero->disk->slot) + (int64_t)at;
    return dt__disk_now(zero, &z->read, 1, host, n * size, offset, "optimizer state");
}

/* Elements from .. to - 1 of a unit, which lie at `host`, into the file or out of it: parameter by
   parameter, and of each what lies inside the full tensor. */
static dt_status dt__state_move(dt_checkpoint *c, dt_weights *w, const dt_bucket *unit, int array,
    size_t from, size_t to, char *host) {
    size_t size = dt_dtype_size(unit->grad_dtype);
    for (int i = unit->first_param; i < unit->first_param + unit->params; i++) {
        const dt_tensor *t = dt_param_get(c->ctx, i);
        const dt_param_info *p = t->param;
        size_t lo = p->offset > from ? p->offset : from,
               hi = p->offset + p->count < to ? p->offset + p->count : to;
        if (lo >= hi) continue;
        char *name = dt__state_name(c->ctx, array, t->name);
        int index = dt_weights_find(w, name);
        dt__box_walk walk = dt__box_begin(p->full, p->box);
        dt__text_drop(c->ctx, name);
        while (dt__box_next(&walk)) {
            size_t at = p->offset + (size_t)walk.local, begin = at > lo ? at : lo;
            size_t end = at + (size_t)walk.run < hi ? at + (size_t)walk.run : hi;
            if (begin >= end) continue;
            int64_t first = walk.global + (int64_t)(begin - at), n = (int64_t)(end - begin);
            char *here = host + (begin - from) * size;
            if (w->writing)
                dt_weights_write(w, index, first, n, unit->grad_dtype, here);
            else
                dt_weights_read(w, index, first, n, unit->grad_dtype, here);
            if (dt_error(c->ctx) != DT_OK) return dt_error(c->ctx);
        }
    }
    return dt_error(c->ctx);
}

/* The state of a unit: this rank's run, shared out among those that hold copies of it. */
static dt_status dt__save_state(dt_checkpoint *c, dt__zero_unit *z, char *host) {
    dt_zero *zero = c->zero;
    dt_comm *copies = zero->desc.stage == 0 ? z->data : z->copies;
    size_t n = (size_t)dt_comm_size(copies), k = (size_t)dt_comm_rank(copies),
           size = dt__zero_size(z);
    size_t from = z->first + z->count / n * k,
           to = k + 1 == n ? z->first + z->count : from + z->count / n;
    for (int a = 0; a <= DT__MASTER; a++)
        for (size_t at = from, some; at < to && dt__ckpt_has(zero, z->unit, a); at += some) {
            some = to - at < DT__CKPT_CHUNK / size ? to - at : DT__CKPT_CHUNK / size;
            const void *here = dt__state_get(zero, z, a, at, some, host);
            if (!here || dt__state_move(
                             c, c->w[DT__OPTIM], z->unit, a, at, at + some, (char *)here) != DT_OK)
                return dt_error(c->ctx);
            dt__ckpt_progress(c, (double)some);
        }
    return dt_error(c->ctx);
}

/* What 1-bit Adam's signs left over of a unit, into the file or out of it. */
static dt_status dt__errors_move(dt_checkpoint *c, dt_weights *w, int u, char *host) {
    dt__zero_unit *z = &c->zero->units[u];
    size_t size = dt__zero_size(z), most = DT__CKPT_CHUNK / size;
    for (int e = 0; e < 2 && z->errors[e]; e++) {
        char name[64];
        dt__error_name(c, u, e, name, sizeof name);
        int index = dt_weights_find(w, name);
        size_t count = z->error_bytes[e] / size;
        for (size_t at = 0, n; at < count && dt_error(c->ctx) == DT_OK; at += n) {
            char *here = (char *)z->errors[e] + at * size;
            n = count - at < most ? count - at : most;
            if (!w->writing)
                dt_weights_read(w, index, (int64_t)at, (int64_t)n, z->unit->grad_dtype, host);
            dt__move(c->ctx, w->writing ? host : here, w->writing ? here : host, n * size);
            if (dt__sync(c->ctx) != DT_OK || !w->writing) continue;
            dt_weights_write(w, index, (int64_t)at, (int64_t)n, z->unit->grad_dtype, host);
        }
    }
    return dt_error(c->ctx);
}

/* All that this rank has to write. */
static dt_status dt__save_write(dt_checkpoint *c) {
    dt_zero *zero = c->zero;
    char *host = (char *)dt_alloc(c->ctx, DT_MEM_HOST, DT__CKPT_CHUNK, "saving");
    c->done = c->total = 0;
    for (int u = 0; u < zero->n_units; u++) {
        const dt__zero_unit *z = &zero->units[u];
        double n = (double)dt_comm_size(zero->desc.stage == 0 ? z->data : z->copies);
        c->total += (double)z->unit->count / dt_comm_size(z->data);
        for (int a = 0; a <= DT__MASTER && !c->exports; a++)
            c->total += dt__ckpt_has(zero, z->unit, a) * (double)z->count / n;
    }
    for (int u = 0; u < zero->n_units && host && dt_error(c->ctx) == DT_OK; u++) {
        dt__zero_unit *z = &zero->units[u];
        int writes = dt__ckpt_writes(zero, z->unit);
        if (writes) dt__save_values(c, z);
        dt__ckpt_progress(c, (double)z->unit->count / dt_comm_size(z->data));
        if (writes && !c->exports && dt_error(c->ctx) == DT_OK) dt__save_state(c, z, host);
        if (!c->exports && dt_error(c->ctx) == DT_OK) dt__errors_move(c, c->w[DT__OPTIM], u, host);
    }
    dt_free(c->ctx, DT_MEM_HOST, host, DT__CKPT_CHUNK);
    return dt_error(c->ctx);
}

/* The digests of all ranks' parts, and that every element was written once. */
static dt_status dt__save_sums(dt_checkpoint *c) {
    for (int f = 0; f < c->files; f++) {
        dt__ckpt_file *file = &c->file[f];
        size_t n = 5 * (size_t)file->n;
        double *sums = (double *)dt_alloc(c->ctx, DT_MEM_HOST, (n + 1) * sizeof *sums, "digests");
        for (int i = 0; i < file->n && sums; i++) {
            dt__digest_split(sums + 5 * i, file->digest[i]);
            sums[5 * i + 4] = (double)file->count[i];
        }
        dt_sum_doubles(c->zero->mesh.world, sums, sums ? n : 0);
        for (int i = 0; i < file->n && dt_error(c->ctx) == DT_OK; i++) {
            const dt_weight *t = dt_weights_get(c->w[f], i);
            file->digest[i] = dt__digest_join(sums + 5 * i);
            if (sums[5 * i + 4] != (double)c->w[f]->weight[i].due)
                dt_fail(c->ctx, DT_ERR_ARG,
                    "%s: %.0f of the %lld elements of '%s' would be written: is "
                    "dt_zero_desc.mesh the mesh that cut it, and are its places right?",
                    c->what, sums[5 * i + 4], (long long)c->w[f]->weight[i].due, t->name);
        }
        dt_free(c->ctx, DT_MEM_HOST, sums, (n + 1) * sizeof *sums);
    }
    return dt_error(c->ctx);
}

/* ---- the manifest ---- */

static dt__zero_text dt__ckpt_layout(const dt_zero *zero) {
    const dt_mesh_desc *n = &zero->mesh.sizes;
    dt__zero_text t;
    snprintf(t.s, sizeof t.s, "dp %d tp %d cp %d pp %d ep %d", n->dp, n->tp, n->cp, n->pp, n->ep);
    return t;
}

static void dt__put_hex(dt_json_out *o, const char *key, uint64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)value);
    dt_json_put_string(o, key, text);
}

static uint64_t dt__bytes_digest(const void *data, size_t bytes) {
    return dt__words_digest(0, data, bytes, 1);
}

/* A file: its size, how many bytes are header, their digest, and those of its tensors. */
static void dt__manifest_file(const dt_checkpoint *c, dt_json_out *o, int f) {
    const dt__weight_file *file = &c->w[f]->file[0];
    int64_t head = dt__head_bytes(c->w[f]);
    dt_json_open(o, dt__ckpt_names[f], '{');
    dt_json_put_int(o, "bytes", file->bytes);
    dt_json_put_int(o, "header", head);
    dt__put_hex(o, "digest", dt__bytes_digest(file->head, (size_t)head));
    dt_json_open(o, "tensors", '{');
    for (int i = 0; i < c->file[f].n; i++)
        dt__put_hex(o, dt_weights_get(c->w[f], i)->name, c->file[f].digest[i]);
    dt_json_shut(o, '}');
    dt_json_shut(o, '}');
}

static const char *const dt__optimizers[] = { "adamw", "adam", "sgd", "onebit-adam", "own" };

static void dt__manifest_beside(dt_json_out *o, const char *text) {
    if (!text) return;
    dt_json_open(o, "config.json", '{');
    dt_json_put_int(o, "bytes", (int64_t)strlen(text));
    dt_json_put_int(o, "header", (int64_t)strlen(text));
    dt__put_hex(o, "digest", dt__bytes_digest(text, strlen(text)));
    dt_json_open(o, "tensors", '{');
    dt_json_shut(o, '}');
    dt_json_shut(o, '}');
}

/* Its own digest goes last, over all before it: DT__MANIFEST_END bytes. */
enum { DT__MANIFEST_END = 30 };
static void dt__manifest_end(char *text, const char *data, size_t bytes) {
    uint64_t h = dt__zero_digest(bytes, data, bytes);
    snprintf(text, DT__MANIFEST_END + 1, ",\"digest\":\"%016llx\"}\n", (unsigned long long)h);
}

static dt_status dt__manifest_check(dt_checkpoint *c);
static dt_status dt__manifest_make(dt_checkpoint *c) {
    dt_zero *zero = c->zero;
    dt__writer *w = c->writer;
    dt_json_out o = { c->ctx, NULL, 0, 0 };
    char text[DT__MANIFEST_END + 8];
    dt_json_open(&o, NULL, '{');
    dt_json_put_string(&o, "format", "dt checkpoint");
    dt_json_put_int(&o, "version", DT_CHECKPOINT_FORMAT);
    dt_json_put_int(&o, "step", zero->step);
    snprintf(text, sizeof text, "%llu", (unsigned long long)dt_ctx_seed(c->ctx));
    dt_json_put_string(&o, "seed", text);
    dt_json_put_string(&o, "layout", dt__ckpt_layout(zero).s);
    dt_json_put_string(&o, "optimizer", dt__optimizers[zero->desc.optimizer]);
    dt_json_put_number(&o, "loss_scale", zero->scale);
    dt_json_put_int(&o, "good_steps", zero->good);
    dt_json_put_int(&o, "patience", zero->patience);
    dt_json_open(&o, "saved", '{');
    for (int i = 0; i < c->desc.n_saved; i++) {
        const dt_saved *s = &c->desc.saved[i];
        dt_json_open(&o, s->name, '[');
        for (int k = 0; k < s->count && dt_error(c->ctx) == DT_OK; k++) {
            if (!isfinite(s->values[k]))
                dt_fail(c->ctx, DT_ERR_ARG,
                    "dt_checkpoint_save: number %d of '%s' is %g: only finite "
                    "ones can be saved",
                    k, dt__name_text(s->name).s, s->values[k]);
            else
                dt_json_put_number(&o, NULL, s->values[k]);
        }
        dt_json_shut(&o, ']');
    }
    dt_json_shut(&o, '}');
    dt_json_put_string(&o, "config", c->desc.config);
    dt_json_open(&o, "files", '{');
    for (int f = 0; f < DT__CKPT_FILES; f++) dt__manifest_file(c, &o, f);
    dt__manifest_beside(&o, w->beside);
    dt_json_shut(&o, '}');
    if (dt_error(c->ctx) == DT_OK) {
        dt__manifest_end(text, o.text, o.used);
        dt__json_write(&o, text, DT__MANIFEST_END);
    }
    w->manifest = o.text;
    w->manifest_bytes = o.used;
    w->manifest_room = o.room;
    return dt_error(c->ctx) == DT_OK ? dt__manifest_check(c) : dt_error(c->ctx);
}

/* ---- the steps of a save ---- */

/* Rank 0 finds a name that is free, and tells it. */
static dt_status dt__save_name(dt_checkpoint *c) {
    dt_zero *zero = c->zero;
    dt__writer *w = c->writer;
    /* which one of the step, and the number of its folder while it is written */
    double told[2] = { 0, 0 };
    dt__ckpt_id newest = { -1, 0 }, id = { zero->step, 1 };
    char name[64];
    if (dt_ctx_rank(c->ctx) == 0) {
        const dt_host *host = dt_ctx_host(c->ctx);
        uint64_t now = (uint64_t)(host->now(host->user) * 1e6) * 2654435761u,
                 pid = (uint64_t)getpid() * 40503u;
        if (dt__newest_below(&w->io, w->dir, dt__ckpt_last, &newest) != 0)
            dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_save: %s: %s", w->dir, dt__io_reason());
        dt__ckpt_name(newest, name, sizeof name);
        if (dt__ckpt_before(c->known, newest))
            dt_fail(c->ctx, DT_ERR_IO,
                "dt_checkpoint_save: %s has %s already, which this job has not loaded: go on "
                "from it, or save to another folder",
                w->dir, name);
        if (newest.step >= id.step) {
            dt__ckpt_id next = { id.step + 1, 0 };
            if (dt__newest_below(&w->io, w->dir, next, &newest) != 0)
                dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_save: %s: %s", w->dir, dt__io_reason());
        }
        told[0] = newest.step == id.step ? newest.again + 1 : 1;
        told[1] = (double)((now ^ pid) >> 4 & 0xffffff);
    }
    if (dt_sum_doubles(zero->mesh.world, told, 2) != DT_OK) return dt_error(c->ctx);
    id.again = (int)told[0];
    w->step = id.step;
    w->again = id.again;
    if (dt__ckpt_before(c->known, id)) c->known = id;
    dt__ckpt_name(id, name, sizeof name);
    dt__writer_path(w, w->final, w->dir, name);
    snprintf(name + strlen(name), sizeof name - strlen(name), ".%06x.tmp", (unsigned)told[1]);
    dt__writer_path(w, w->temp, w->dir, name);
    for (int f = 0; f < DT__CKPT_FILES; f++)
        dt__writer_path(w, w->path[f], w->temp, dt__ckpt_names[f]);
    return dt_error(c->ctx);
}

/* What the writer could not do becomes the rank's failure. */
static dt_status dt__writer_check(dt_checkpoint *c) {
    if (!c->writer->why[0] || dt_error(c->ctx) != DT_OK) return dt_error(c->ctx);
    return dt_fail(c->ctx, DT_ERR_IO, "%s: %s", c->what, c->writer->why);
}

/* [collective: world] Rank 0 makes the files with their headers; the others then find them, or see
   another folder. */
static dt_status dt__save_make(dt_checkpoint *c) {
    dt__writer *w = c->writer;
    int first = dt_ctx_rank(c->ctx) == 0;
    errno = 0;
    w->made = first && !c->exports && !w->why[0] && w->io.make(w->io.user, w->temp) == 0;
    if (first && !c->exports && !w->made) dt__writer_fail(w, w->temp, "making the folder");
    for (int f = 0; f < c->files && first; f++) {
        w->fd[f] = dt__writer_create(w, w->path[f], c->w[f]->file[0].bytes);
        w->made |= w->fd[f] >= 0;
        if (w->fd[f] >= 0)
            dt__writer_put(
                w, w->path[f], w->fd[f], c->w[f]->file[0].head, dt__head_bytes(c->w[f]), 0);
    }
    if (dt__writer_check(c) != DT_OK || dt_barrier(c->zero->mesh.world) != DT_OK)
        return dt_error(c->ctx);
    for (int f = 0; f < c->files && !first; f++) {
        errno = 0;
        w->fd[f] = w->io.open(w->io.user, w->path[f], DT_IO_WRITE);
        int64_t size = w->fd[f] >= 0 ? w->io.size(w->io.user, w->fd[f]) : -1;
        if (w->fd[f] >= 0 && size < 0) dt__writer_fail(w, w->path[f], "size");
        int missing = w->fd[f] < 0 ? dt__io_absent() : size >= 0 && size != c->w[f]->file[0].bytes;
        if (missing)
            return dt_fail(c->ctx, DT_ERR_IO,
                "%s: this rank does not see the %s that rank 0 has made: all "
                "ranks must share the folder",
                c->what, w->path[f]);
        if (w->fd[f] < 0) dt__writer_fail(w, w->path[f], "open");
    }
    return dt__writer_check(c);
}

/* The end of a save, good or bad. A thread that was left behind keeps what is the writer's. */
static void dt__save_end(dt_checkpoint *c) {
    dt__writer *w = c->writer;
    dt__list_drop(c);
    c->saving = 0;
    if (w->lost) return;
    for (int f = 0; f < DT__CKPT_FILES; f++) {
        if (w->fd[f] >= 0) w->io.close(w->io.user, w->fd[f]);
        w->fd[f] = -1;
    }
    dt__copies_reuse(w);
    dt_free(c->ctx, DT_MEM_HOST, w->manifest, w->manifest_room);
    w->manifest = NULL;
    if (c->exports) return;
    if (dt_error(c->ctx) != DT_OK && w->made) dt__ckpt_remove(&w->io, w->temp);
    w->made = 0;
}

/* The writer begins, at once or in its thread. That there is none is told: steps wait for the disk
   then. */
static void dt__save_go(dt_checkpoint *c, int publishing) {
    dt__writer *w = c->writer;
    c->moved = -1;
    dt__writer_go(w, publishing);
    if (c->desc.background && !w->runs && !publishing)
        dt_log(c->ctx, DT_LOG_NOTICE,
            "%s: no thread to write it in the background: it was written at once", w->final);
}

static dt_status dt__save_wait(dt_checkpoint *c);
dt_status dt_checkpoint_save(dt_checkpoint *c) {
    if (!c || dt_error(c->ctx) != DT_OK) return c ? dt_error(c->ctx) : DT_ERR_ARG;
    dt_zero *zero = c->zero;
    dt__writer *w = c->writer;
    if (!c->desc.dir)
        return dt_fail(c->ctx, DT_ERR_ARG, "dt_checkpoint_save: dt_checkpoint_desc.dir is NULL");
    for (int u = 0; u < zero->n_units; u++)
        if (zero->units[u].over || zero->units[u].filled || zero->units[u].unit->filled)
            return dt_fail(c->ctx, DT_ERR_ARG,
                "dt_checkpoint_save: after dt_zero_step and before the next backward, "
                "for gradients are not saved");
    if (dt__save_wait(c) != DT_OK) return dt_error(c->ctx);
    w->background = c->desc.background;
    if (dt__save_name(c) == DT_OK && dt__list_make(c, w->temp) == DT_OK &&
        dt__save_make(c) == DT_OK && dt__save_write(c) == DT_OK && dt__save_sums(c) == DT_OK &&
        (dt_ctx_rank(c->ctx) != 0 || dt__manifest_make(c) == DT_OK)) {
        c->saving = 1;
        dt__save_go(c, 0);
        if (!c->desc.background) dt__save_wait(c); /* not w->background: all ranks, or none */
    }
    if (dt_error(c->ctx) != DT_OK) dt__save_end(c);
    return dt_error(c->ctx);
}

/* A thread that the disk does not let go is left behind with what it uses. */
static void dt__writer_join(dt_checkpoint *c) {
    dt__writer *w = c->writer;
    const dt_host *host = dt_ctx_host(c->ctx);
    double limit = dt__disk_limit(c->ctx);
    dt__stopwatch watch = dt__stopwatch_start(host, limit);
    while (w->runs && !__atomic_load_n(&w->done, __ATOMIC_ACQUIRE) && !w->lost) {
        if (dt__waited(&watch) > limit) w->lost = 1;
        host->sleep(host->user, 1e-4);
    }
    if (w->runs && w->lost)
        pthread_detach(w->thread);
    else if (w->runs)
        pthread_join(w->thread, NULL);
    w->runs = 0;
}

/* A disk that has not answered this rank's thread for as long as ranks wait for each other fails:
   who polls would wait for ever. The thread is on its own from then on. */
static void dt__writer_watch(dt_checkpoint *c) {
    dt__writer *w = c->writer;
    const dt_host *host = dt_ctx_host(c->ctx);
    double limit = dt__disk_limit(c->ctx);
    int64_t moved = __atomic_load_n(&w->moved, __ATOMIC_RELAXED);
    if (moved != c->moved) {
        c->watch = dt__stopwatch_start(host, limit);
        c->watch.most = limit / 8; /* no cap of 1 s: two looks may be a step apart */
    }
    c->moved = moved;
    if (dt__waited(&c->watch) <= limit) return;
    w->lost = 1;
    dt_fail(c->ctx, DT_ERR_TIMEOUT, "%s: %s: no answer from the disk within %g s", c->what,
        w->final, limit);
}

int dt_checkpoint_poll(dt_checkpoint *c) {
    if (!c || dt_error(c->ctx) != DT_OK || !c->saving) return 1;
    dt__writer *w = c->writer;
    dt_comm *world = dt_world(c->ctx); /* c->zero may be gone */
    double over = __atomic_load_n(&w->done, __ATOMIC_ACQUIRE), all[2] = { over, 0 };
    if (over > 0 && w->why[0]) all[1] = 1;
    if (over == 0) dt__writer_watch(c);
    if (dt_sum_doubles(world, all, 2) == DT_OK && all[0] < dt_comm_size(world)) return 0;
    dt__writer_join(c);
    if (dt_error(c->ctx) == DT_OK && all[1] > 0 && dt__writer_check(c) == DT_OK)
        dt_barrier(world); /* another rank's failure reaches this one here */
    if (dt_error(c->ctx) == DT_OK && c->saving == 1) {
        c->saving = 2;
        if (dt_ctx_rank(c->ctx) == 0) dt__save_go(c, 1);
        return 0;
    }
    if (dt_error(c->ctx) == DT_OK) memcpy(c->path, w->final, sizeof c->path);
    dt__save_end(c);
    return 1;
}

/* [collective: world] Until no save is under way. */
static dt_status dt__save_wait(dt_checkpoint *c) {
    const dt_host *host = dt_ctx_host(c->ctx);
    while (!dt_checkpoint_poll(c))
        if (c->desc.background) host->sleep(host->user, 1e-4);
    return dt_error(c->ctx);
}

/* ---- opening and closing ---- */

/* The folder's own name lasts after this. Whoever made it may have been killed before, so every job
   does it. Who may not read the folder above it cannot; that one others have made. */
static void dt__dir_sync(dt__writer *w) {
    char above[DT__CKPT_PATH];
    const char *slash = strrchr(w->dir, '/');
    snprintf(
        above, sizeof above, "%.*s", slash ? (int)(slash - w->dir) + 1 : 1, slash ? w->dir : ".");
    dt__writer_sync(w, above, EACCES);
}

/* The folder, which is made, and its lock. Rank 0. */
static void dt__dir_take(dt_checkpoint *c) {
    dt__writer *w = c->writer;
    char path[DT__CKPT_PATH], text[400] = "", host[200] = "";
    dt__writer_path(w, path, w->dir, "lock");
    errno = 0;
    int fd = w->why[0] ? -1 : w->io.open(w->io.user, path, DT_IO_LOCK);
    if (fd < 0 && errno == ENOENT && !w->why[0]) {
        errno = 0;
        if (w->io.make(w->io.user, w->dir) != 0) dt__writer_fail(w, w->dir, "making the folder");
        errno = 0;
        fd = w->why[0] ? -1 : w->io.open(w->io.user, path, DT_IO_LOCK);
    }
    if (fd < 0) dt__writer_fail(w, path, "open");
    c->lock = fd;
    if (fd < 0) return;
    errno = 0;
    int taken = w->io.lock(w->io.user, fd);
    if (taken != 0 && (errno == EWOULDBLOCK || errno == EAGAIN || errno == EACCES)) {
        int64_t n = w->io.pread(w->io.user, fd, text, sizeof text - 1, 0);
        text[n > 0 ? strcspn(text, "\n") : 0] = 0;
        snprintf(w->why, sizeof w->why,
            "%s: %.100s saves there already: two jobs cannot share a folder", w->dir,
            text[0] ? text : "another process");
        return;
    }
    if (taken != 0)
        dt_log(c->ctx, DT_LOG_NOTICE, "%s: no locks there (%s): a second job would not be noticed",
            w->dir, dt__io_reason());
    dt__read_text(&w->io, "/proc/sys/kernel/hostname", host, sizeof host);
    host[strcspn(host, "\n")] = 0;
    snprintf(c->mark, sizeof c->mark, "process %ld on %.200s\n%.6f\n", (long)getpid(),
        host[0] ? host : "a host without a name",
        dt_ctx_host(c->ctx)->now(dt_ctx_host(c->ctx)->user));
    w->io.resize(w->io.user, fd, 0);
    dt__writer_put(w, path, fd, c->mark, (int64_t)strlen(c->mark), 0);
    dt__dir_sync(w);
    dt__sweep sweep = { &w->io, w->dir };
    w->io.list(w->io.user, w->dir, dt__sweep_one, &sweep);
}

static int dt__by_saved_name(const void *user, uint32_t a, uint32_t b) {
    const dt_saved *saved = (const dt_saved *)user;
    return strcmp(saved[a].name, saved[b].name) < 0;
}

static dt_status dt__saved_names(dt_ctx *ctx, const dt_saved *saved, size_t n) {
    uint32_t *order = (uint32_t *)dt_alloc(ctx, DT_MEM_HOST, 2 * n * sizeof *order, "names");
    for (size_t i = 0; i < n && order; i++) order[i] = (uint32_t)i;
    if (order && n > 1) dt__sort(order, order + n, n, dt__by_saved_name, saved);
    for (size_t i = 1; i < n && order; i++)
        if (!dt__by_saved_name(saved, order[i - 1], order[i]))
            dt_fail(ctx, DT_ERR_ARG, "dt_checkpoint_open: saved[%u] and saved[%u] are both '%s'",
                (unsigned)order[i - 1], (unsigned)order[i], dt__name_text(saved[order[i]].name).s);
    dt_free(ctx, DT_MEM_HOST, order, 2 * n * sizeof *order);
    return dt_error(ctx);
}

/* Refuses data that no manifest can hold and load again; the limits are dt_json_parse's. */
static dt_status dt__desc_check(dt_ctx *ctx, const dt_checkpoint_desc *d) {
    dt_json_out config = { ctx, NULL, 0, 0 };
    double numbers = 0, bytes = 0;
    if (d->n_saved < 0 || (d->n_saved > 0 && !d->saved))
        return dt_fail(ctx, DT_ERR_ARG, "dt_checkpoint_open: n_saved is %d, and saved %s",
            d->n_saved, d->saved ? "an array" : "NULL");
    for (int i = 0; i < d->n_saved; i++) {
        const dt_saved *s = &d->saved[i];
        size_t length = s->name ? strlen(s->name) : 0;
        if (length < 1 || length > DT__JSON_STRING)
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_checkpoint_open: the name of saved[%d] has %zu bytes; "
                "1 to %d",
                i, length, DT__JSON_STRING);
        if (s->count < 0 || (s->count > 0 && !s->values))
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_checkpoint_open: saved[%d], '%s', has %d numbers at %s", i,
                dt__name_text(s->name).s, s->count, s->values ? "values" : "NULL");
        numbers += s->count;
        bytes += 6.0 * (double)length; /* every byte as \u00xx */
    }
    if (dt__saved_names(ctx, d->saved, (size_t)d->n_saved) != DT_OK) return dt_error(ctx);
    size_t text = d->config ? strlen(d->config) : 0, beside = d->beside ? strlen(d->beside) : 0;
    if (text > DT__JSON_STRING || beside > DT__JSON_BYTES)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_checkpoint_open: config has %zu bytes and beside %zu; at "
            "most %d and %d",
            text, beside, DT__JSON_STRING, DT__JSON_BYTES);
    dt_json_put_string(&config, NULL, d->config);
    bytes += (double)config.used + 25 * numbers; /* -1.2345678901234567e-300, */
    dt_json_drop(&config);
    if (bytes > DT__JSON_BYTES)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_checkpoint_open: %.0f saved numbers, their names and config "
            "may take %.0f bytes of manifest.json, which has at most %d",
            numbers, bytes, DT__JSON_BYTES);
    return dt_error(ctx);
}

/* Whatever is left when the context ends, or at dt_checkpoint_close. */
static void dt__ckpt_free(dt_ctx *ctx, void *user) {
    dt_checkpoint *c = (dt_checkpoint *)user;
    dt__writer *w = c->writer;
    if (w) dt__writer_join(c);
    if (w) dt__save_end(c);
    /* who is left behind still writes there */
    if (w && c->lock >= 0 && !w->lost) w->io.close(w->io.user, c->lock);
    if (w && !w->lost) {
        dt__copies_free(c);
        dt__text_drop(ctx, w->beside);
        dt_free(ctx, DT_MEM_HOST, w, sizeof *w);
    }
    dt__text_drop(ctx, c->config);
    dt_free(ctx, DT_MEM_HOST, c, sizeof *c);
}

dt_checkpoint *dt_checkpoint_open(dt_zero *zero, dt_checkpoint_desc desc) {
    dt_ctx *ctx = zero ? zero->ctx : NULL;
    if (!ctx || dt_error(ctx) != DT_OK) return NULL;
    const dt_io *io = dt_ctx_io(ctx);
    if (!io->make || !io->list || !io->lock || !io->remove_folder)
        dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_checkpoint_open: the io table has no folders: make, list, "
            "lock and remove_folder");
    if (dt__desc_check(ctx, &desc) != DT_OK) return NULL;
    dt_checkpoint *c = (dt_checkpoint *)dt__host_zeroed(ctx, sizeof *c, "a checkpoint");
    if (!c) return NULL;
    c->ctx = ctx;
    c->zero = zero;
    c->desc = desc;
    c->files = DT__CKPT_FILES;
    c->lock = -1;
    c->known = dt__ckpt_none;
    c->writer = (dt__writer *)dt__host_zeroed(ctx, sizeof *c->writer, "a checkpoint");
    if (c->writer) {
        dt__writer *w = c->writer;
        w->io = *io;
        w->fd[DT__MODEL] = w->fd[DT__OPTIM] = -1;
        w->keep = desc.keep;
        w->beside = desc.beside ? dt__join(ctx, desc.beside, strlen(desc.beside), "") : NULL;
        if (desc.dir && !*desc.dir)
            dt_fail(ctx, DT_ERR_ARG, "dt_checkpoint_open: a folder without a name");
        if (desc.dir && snprintf(w->dir, sizeof w->dir, "%s", desc.dir) >= (int)sizeof w->dir)
            dt_fail(
                ctx, DT_ERR_ARG, "dt_checkpoint_open: %.80s...: the path is too long", desc.dir);
        for (size_t n = strlen(w->dir); n > 1 && w->dir[n - 1] == '/'; n--) w->dir[n - 1] = 0;
        if (desc.dir && dt_ctx_rank(ctx) == 0 && dt_error(ctx) == DT_OK) dt__dir_take(c);
        c->what = "dt_checkpoint_open";
        dt__writer_check(c);
        c->what = "dt_checkpoint_save";
    }
    for (int i = 0; i < dt_param_count(ctx) && dt_error(ctx) == DT_OK; i++) {
        dt_file_place p; /* report a bad name now, not at a save hours later */
        dt__ckpt_place(c, dt_param_get(ctx, i), &p);
        for (int k = 0; k < p.n && dt_error(ctx) == DT_OK; k++)
            dt__name_check(ctx, c->what, p.name[k]);
    }
    c->listener.closing = dt__ckpt_free;
    c->listener.user = c;
    dt_listen(ctx, &c->listener);
    if (dt_error(ctx) == DT_OK) dt_barrier(zero->mesh.world);
    if (dt_error(ctx) == DT_OK) return c;
    dt_checkpoint_close(c);
    return NULL;
}

/* What dt_zero_export needs of a checkpoint: one file, its list of tensors and a writer. */
static dt_status dt__export(dt_checkpoint *c, const char *path) {
    dt__writer *w = c->writer;
    const char *slash = strrchr(path, '/');
    if (snprintf(w->final, sizeof w->final, "%s", path) >= (int)sizeof w->final - 4)
        return dt_fail(c->ctx, DT_ERR_ARG, "dt_zero_export: %.80s...: the path is too long", path);
    snprintf(w->path[DT__MODEL], sizeof w->path[DT__MODEL], "%.1019s.tmp", w->final);
    snprintf(
        w->dir, sizeof w->dir, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
    if (dt__list_make(c, w->path[DT__MODEL]) != DT_OK || dt__save_make(c) != DT_OK ||
        dt__save_write(c) != DT_OK || dt__save_sums(c) != DT_OK)
        return dt_error(c->ctx);
    dt__writer_finish(w);
    if (dt__writer_check(c) != DT_OK || dt_barrier(c->zero->mesh.world) != DT_OK)
        return dt_error(c->ctx);
    errno = 0;
    if (dt_ctx_rank(c->ctx) == 0 && w->io.rename(w->io.user, w->path[DT__MODEL], w->final) != 0)
        dt__writer_fail(w, w->final, "rename");
    if (dt_ctx_rank(c->ctx) == 0) dt__writer_sync(w, w->dir, 0);
    return dt__writer_check(c) == DT_OK ? dt_barrier(c->zero->mesh.world) : dt_error(c->ctx);
}

dt_status dt_zero_export(dt_zero *zero, const char *path, dt_export_desc desc) {
    dt_checkpoint c;
    if (!zero || dt_error(zero->ctx) != DT_OK) return zero ? dt_error(zero->ctx) : DT_ERR_ARG;
    if (!path || !*path) return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_export: a path is needed");
    memset(&c, 0, sizeof c);
    c.zero = zero;
    c.ctx = zero->ctx;
    c.what = "dt_zero_export";
    c.files = 1;
    c.exports = &desc;
    c.desc.place = desc.place;
    c.desc.user = desc.user;
    c.writer = (dt__writer *)dt__host_zeroed(c.ctx, sizeof *c.writer, c.what);
    if (!c.writer) return dt_error(c.ctx);
    c.writer->io = *dt_ctx_io(c.ctx);
    c.writer->fd[DT__MODEL] = c.writer->fd[DT__OPTIM] = -1;
    dt__export(&c, path);
    dt__save_end(&c);
    if (dt_error(c.ctx) != DT_OK && c.writer->made)
        c.writer->io.remove(c.writer->io.user, c.writer->path[DT__MODEL]);
    dt_free(c.ctx, DT_MEM_HOST, c.writer, sizeof *c.writer);
    return dt_error(c.ctx);
}

const char *dt_checkpoint_path(const dt_checkpoint *c) { return c ? c->path : ""; }
const char *dt_checkpoint_config(const dt_checkpoint *c) { return c && c->config ? c->config : ""; }

dt_status dt_checkpoint_close(dt_checkpoint *c) {
    if (!c) return DT_OK;
    dt_ctx *ctx = c->ctx;
    if (dt_error(ctx) == DT_OK) dt__save_wait(c);
    dt_unlisten(ctx, &c->listener);
    dt__ckpt_free(ctx, c);
    return dt_error(ctx);
}

// ==== 19. Checkpoints: loading ==================================================================

/* A checkpoint that is looked at, in a context of its own: that it is damaged is no failure of the
   rank's. */
typedef struct dt__found {
    dt_ctx *aside;
    char *text; /* the manifest */
    size_t bytes;
    dt_json *json;
    dt_weights *w[DT__CKPT_FILES];
    char path[DT__CKPT_PATH];
    char name[DT__CKPT_PATH + 32]; /* of the manifest: json keeps pointing to it */
    int state;
    char why[700]; /* what is wrong with it */
} dt__found;

/* The states of a checkpoint, the worst last. Only a damaged one is skipped for the one before: one
   that could not be read (permissions, descriptors, memory, the disk) may be intact. */
enum { DT__WHOLE = 0, DT__DAMAGED, DT__NEWER /* whole, but of a newer format */, DT__UNREAD };

static void dt__found_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static void dt__found_close(dt__found *f) {
    dt_json_free(f->json);
    if (f->text) dt_free(f->aside, DT_MEM_HOST, f->text, f->bytes + 1);
    dt_ctx_free(f->aside); /* and the open files with it */
    f->aside = NULL;
    f->text = NULL;
    f->json = NULL;
}

static int dt__found_open(const dt_checkpoint *c, dt__found *f) {
    dt_ctx_desc d;
    dt_host host = *dt_ctx_host(c->ctx);
    host.log = dt__found_log;
    memset(&d, 0, sizeof d);
    memset(f->w, 0, sizeof f->w);
    d.host = &host;
    d.io = dt_ctx_io(c->ctx);
    d.kernels = dt_kernels_cpu(); /* a queue of its own would be another device's */
    f->why[0] = 0;
    f->state = DT__WHOLE;
    f->aside = dt_ctx_make(d);
    return f->aside ? 1
                    : (dt_fail(c->ctx, DT_ERR_MEM, "dt_checkpoint_load: no memory to look at %s",
                           f->path),
                          0);
}

/* Takes what failed in the context aside. */
static void dt__found_why(dt__found *f) {
    const char *text = dt_error_text(f->aside);
    if (f->why[0] || dt_error(f->aside) == DT_OK) return;
    if (f->aside->unread || dt_error(f->aside) == DT_ERR_MEM) f->state = DT__UNREAD;
    if (f->state == DT__WHOLE) f->state = DT__DAMAGED;
    snprintf(f->why, sizeof f->why, "%s", strncmp(text, "rank 0: ", 8) == 0 ? text + 8 : text);
}

/* Checks that the manifest's text is complete and of this format. */
static void dt__found_parse(dt__found *f) {
    char end[DT__MANIFEST_END + 1];
    int64_t version = 0;
    size_t last = f->bytes < DT__MANIFEST_END ? 0 : f->bytes - DT__MANIFEST_END;
    dt__manifest_end(end, f->text, last);
    int whole = last > 0 && memcmp(f->text + last, end, DT__MANIFEST_END) == 0;
    f->json = dt_json_parse(f->aside, f->name, f->text, f->bytes);
    if (!f->json) return;
    const char *format = dt_json_string(f->json, dt_json_find(f->json, 0, "format"), NULL);
    if (!format || strcmp(format, "dt checkpoint") != 0 ||
        !dt_json_int(f->json, dt_json_find(f->json, 0, "version"), &version) || version < 1) {
        dt_json_fail(f->json, 0, "it is no manifest of a dt checkpoint");
    } else if (version > DT_CHECKPOINT_FORMAT) {
        if (whole) f->state = DT__NEWER;
        dt_fail(f->aside, DT_ERR_UNSUPPORTED,
            "%s: a checkpoint of format %lld; this program knows formats up to %d: a "
            "newer dt wrote it",
            f->name, (long long)version, DT_CHECKPOINT_FORMAT);
    } else if (!whole) {
        dt_fail(f->aside, DT_ERR_IO, "%s: it is damaged: its digest is another", f->name);
    }
}

static void dt__found_manifest(dt__found *f) {
    snprintf(f->name, sizeof f->name, "%s/manifest.json", f->path);
    f->text = dt_file_read(f->aside, f->name, DT__JSON_BYTES, &f->bytes);
    if (f->text) {
        dt__found_parse(f);
        return;
    }
    const dt_io *io = dt_ctx_io(f->aside);
    errno = 0;
    int fd = io->open(io->user, f->path, DT_IO_READ);
    if (fd >= 0) io->close(io->user, fd);
    if (fd >= 0 || dt__io_absent() || f->aside->unread) return;
    f->state = DT__UNREAD; /* the folder is unreachable: its files may be intact */
    snprintf(f->why, sizeof f->why, "%.*s: %s", DT__CKPT_PATH / 2, f->path, dt__io_reason());
}

/* The digest that a member says; 0 and a failure if it says none. */
static uint64_t dt__found_hex(dt__found *f, int node) {
    const char *text = dt_json_string(f->json, node, NULL);
    char *end = NULL, again[24];
    uint64_t value = text ? strtoull(text, &end, 16) : 0;
    snprintf(again, sizeof again, "%016llx", (unsigned long long)value);
    if (!text || strcmp(text, again) != 0)
        dt_json_fail(f->json, node, "a digest of 16 hexadecimal digits is needed");
    return value;
}

/* One file against its size and the digest of its header; of other files than ours that is all of
   it. */
static void dt__found_file(dt__found *f, int node, const char *name) {
    char path[DT__CKPT_PATH + 264], *text = NULL;
    int64_t bytes = -1, header = -1;
    size_t read = 0;
    int ours = DT__CKPT_FILES;
    dt_weights *w = NULL;
    for (int i = 0; i < DT__CKPT_FILES; i++)
        if (strcmp(name, dt__ckpt_names[i]) == 0) ours = i;
    uint64_t digest = dt__found_hex(f, dt_json_find(f->json, node, "digest"));
    if (!dt_json_int(f->json, dt_json_find(f->json, node, "bytes"), &bytes) ||
        !dt_json_int(f->json, dt_json_find(f->json, node, "header"), &header) || header < 0 ||
        bytes < header || strchr(name, '/') || strlen(name) > 200)
        dt_json_fail(f->json, node, "a file's name, bytes and header are needed");
    if (dt_error(f->aside) != DT_OK) return;
    snprintf(path, sizeof path, "%s/%s", f->path, name);
    if (ours < DT__CKPT_FILES)
        w = f->w[ours] = dt_weights_open(f->aside, path);
    else
        text = dt_file_read(f->aside, path, DT__JSON_BYTES, &read);
    const char *head = w ? w->file[0].head : text;
    int64_t have = w ? w->file[0].bytes : (int64_t)read,
            long_is = w ? (int64_t)w->file[0].head_bytes : have;
    if (!head)
        dt_fail(f->aside, DT_ERR_IO, "%s: it is no safetensors file", path);
    else if (have != bytes)
        dt_fail(f->aside, DT_ERR_IO, "%s: it has %lld bytes, and its checkpoint's has %lld", path,
            (long long)have, (long long)bytes);
    else if (long_is != header || dt__bytes_digest(head, (size_t)header) != digest)
        dt_fail(f->aside, DT_ERR_IO, "%s: %s is damaged: its digest is another", path,
            w ? "its header" : "it");
    if (text) dt_free(f->aside, DT_MEM_HOST, text, read + 1);
}

static void dt__found_files(dt__found *f) {
    int files = dt_json_find(f->json, 0, "files");
    for (int i = 0; i < dt_json_count(f->json, files) && dt_error(f->aside) == DT_OK; i++) {
        int node = dt_json_at(f->json, files, i);
        dt__found_file(f, node, dt_json_key(f->json, node, NULL));
    }
    for (int i = 0; i < DT__CKPT_FILES && dt_error(f->aside) == DT_OK; i++)
        if (!f->w[i]) dt_json_fail(f->json, 0, "%s is not among its files", dt__ckpt_names[i]);
}

/* [collective: world] All ranks take over the worst state that any rank found. */
static dt_status dt__found_agree(dt_checkpoint *c, dt__found *f) {
    size_t n = 0;
    char line[sizeof f->why + 4] = "";
    if (f->aside) dt__found_why(f);
    if (f->state != DT__WHOLE) snprintf(line, sizeof line, "%d%s\n", f->state, f->why);
    char *text = dt__share_texts(c->ctx, line, strlen(line), &n);
    f->state = DT__WHOLE;
    for (const char *s = text; s && *(s += strspn(s, " ")); s += strcspn(s, "\n") + 1) {
        if (*s - '0' <= f->state) continue;
        f->state = *s - '0';
        snprintf(f->why, sizeof f->why, "%.*s", (int)strcspn(s + 1, "\n"), s + 1);
    }
    if (text) dt_free(c->ctx, DT_MEM_HOST, text, n + 1);
    return dt_error(c->ctx);
}

/* Adds to `sums` (4 for each tensor) the digests of what this rank reads of file k: small tensors
   in turn, of large ones its part. */
static void dt__found_read(dt_checkpoint *c, dt__found *f, int k, double *sums, char *buffer) {
    dt_comm *world = c->zero->mesh.world;
    int64_t n = dt_comm_size(world), rank = dt_comm_rank(world);
    for (int i = 0; i < dt_weights_count(f->w[k]) && dt_error(f->aside) == DT_OK; i++) {
        const dt_weight *t = dt_weights_get(f->w[k], i);
        int64_t size = (int64_t)dt_dtype_size(t->dtype), most = DT__CKPT_CHUNK / size;
        int small = t->count * size < DT__CKPT_CHUNK;
        int64_t from = small ? 0 : t->count / n * rank,
                to = small || rank == n - 1 ? t->count : from + t->count / n;
        uint64_t digest = 0;
        for (int64_t at = from, some; at < to && (!small || i % n == rank); at += some) {
            some = to - at < most ? to - at : most;
            if (dt_weights_read(f->w[k], i, at, some, t->dtype, buffer) != DT_OK) break;
            digest += dt__elements_digest(t->dtype, at, buffer, some);
        }
        dt__digest_split(sums + 4 * i, digest);
    }
}

/* [collective: world] Every tensor of file k against its digest. */
static dt_status dt__found_digests(dt_checkpoint *c, dt__found *f, int k) {
    size_t n = 4 * (size_t)dt_weights_count(f->w[k]);
    double *sums = (double *)dt__host_zeroed(c->ctx, (n + 1) * sizeof *sums, "digests");
    char *buffer =
        (char *)dt_alloc(c->ctx, DT_MEM_HOST, DT__CKPT_CHUNK, "a window into a checkpoint");
    int file = dt_json_find(f->json, dt_json_find(f->json, 0, "files"), dt__ckpt_names[k]);
    int digests = dt_json_find(f->json, file, "tensors");
    if (sums && buffer) dt__found_read(c, f, k, sums, buffer);
    /* without what that rank has not read no digest is right */
    if (sums) sums[n] = dt_error(f->aside) != DT_OK;
    dt_sum_doubles(c->zero->mesh.world, sums, sums ? n + 1 : 0);
    int readable = dt_error(c->ctx) == DT_OK && sums[n] == 0;
    for (int i = 0; i < dt_weights_count(f->w[k]) && readable && dt_error(f->aside) == DT_OK; i++) {
        const char *name = dt_weights_get(f->w[k], i)->name;
        uint64_t want = dt__found_hex(f, dt_json_find(f->json, digests, name));
        if (dt__digest_join(sums + 4 * i) == want) continue;
        dt_fail(f->aside, DT_ERR_IO, "%s/%s: tensor '%s' is damaged: its digest is another",
            f->path, dt__ckpt_names[k], dt__name_text(name).s);
    }
    dt_free(c->ctx, DT_MEM_HOST, sums, (n + 1) * sizeof *sums);
    dt_free(c->ctx, DT_MEM_HOST, buffer, DT__CKPT_CHUNK);
    return dt__found_agree(c, f);
}

/* [collective: world] Finds the state of f->path, on every rank. */
static dt_status dt__found_check(dt_checkpoint *c, dt__found *f) {
    if (dt__found_open(c, f)) dt__found_manifest(f);
    if (f->aside && dt_error(f->aside) == DT_OK) dt__found_files(f);
    if (dt__found_agree(c, f) != DT_OK) return dt_error(c->ctx);
    for (int k = 0; k < DT__CKPT_FILES && f->state == DT__WHOLE; k++)
        if (dt__found_digests(c, f, k) != DT_OK) return dt_error(c->ctx);
    return DT_OK;
}

/* [collective: world] Rank 0 looks for the newest before *at; its folder in f->path, or "" for
   none. */
static dt_status dt__found_next(dt_checkpoint *c, const char *dir, dt__ckpt_id *at, dt__found *f) {
    double told[2] = { 0, 0 };
    dt__ckpt_id found = { -1, 0 };
    char name[64];
    if (dt_ctx_rank(c->ctx) == 0) {
        if (dt__newest_below(&c->writer->io, dir, *at, &found) != 0 && errno != ENOENT)
            dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_load: %s: %s", dir, dt__io_reason());
        told[0] = (double)found.step;
        told[1] = found.again;
    }
    if (dt_sum_doubles(c->zero->mesh.world, told, 2) != DT_OK) return dt_error(c->ctx);
    at->step = (int64_t)told[0];
    at->again = (int)told[1];
    dt__ckpt_name(*at, name, sizeof name);
    f->path[0] = 0;
    if (at->step >= 0 &&
        snprintf(f->path, sizeof f->path, "%s/%s", dir, name) >= (int)sizeof f->path)
        return dt_fail(
            c->ctx, DT_ERR_ARG, "dt_checkpoint_load: %.80s...: the path is too long", dir);
    return DT_OK;
}

/* Whether a path says the folder that this job saves to, however it is spelled: its lock's text is
   there. */
static int dt__is_own_dir(const dt_checkpoint *c, const char *folder) {
    const dt_io *io = &c->writer->io;
    char path[DT__CKPT_PATH + 8], text[sizeof c->mark] = "";
    int64_t length = (int64_t)strlen(c->mark);
    int end;
    if (length == 0 || strcmp(folder, c->writer->dir) == 0) return length > 0;
    snprintf(path, sizeof path, "%s/lock", folder);
    int fd = io->open(io->user, path, DT_IO_READ);
    if (fd >= 0) dt__io_move(io, fd, 0, text, length, 0, &end);
    if (fd >= 0) io->close(io->user, fd);
    return strcmp(text, c->mark) == 0;
}

/* A folder that was copied under another step's name would be taken for the newest. */
static void dt__found_named(dt__found *f, int64_t name) {
    int64_t step = -1;
    if (dt_json_int(f->json, dt_json_find(f->json, 0, "step"), &step) && step == name) return;
    f->state = DT__DAMAGED;
    snprintf(f->why, sizeof f->why, "%.600s: it is of step %lld: the folder has another's name",
        f->name, (long long)step);
}

/* What of desc.dir is looked at may be followed by a checkpoint of this job. Rank 0 is the one that
   asks. */
static void dt__found_known(dt_checkpoint *c, const dt__found *f) {
    const char *slash = strrchr(f->path, '/'), *name = slash ? slash + 1 : f->path;
    dt__newest n = { dt__ckpt_last, dt__ckpt_none };
    char above[DT__CKPT_PATH];
    int bytes = slash > f->path ? (int)(slash - f->path) : 1; /* "/step-2" is in "/" */
    snprintf(above, sizeof above, "%.*s", bytes, slash ? f->path : ".");
    if (dt_ctx_rank(c->ctx) != 0 || !dt__is_own_dir(c, above)) return;
    dt__newest_add(&n, name);
    if (dt__ckpt_before(c->known, n.found)) c->known = n.found;
}

/* Whether `from` is itself a checkpoint; its manifest may be missing. */
static int dt__found_itself(dt_checkpoint *c, const char *from) {
    const dt_io *io = &c->writer->io;
    char path[DT__CKPT_PATH + 32];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", from, i ? dt__ckpt_names[DT__OPTIM] : "manifest.json");
        errno = 0;
        int fd = io->open(io->user, path, DT_IO_READ);
        if (fd >= 0) io->close(io->user, fd);
        if (fd >= 0 || errno == ESPIPE) return 1;
        if (!dt__io_absent())
            dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_load: %s: %s", path, dt__io_reason());
    }
    return 0;
}

/* [collective: world] f: the newest checkpoint of `from` that is whole, or `from` itself. f->path
   "": there is none. */
static dt_status dt__found_newest(dt_checkpoint *c, const char *from, dt__found *f) {
    dt__ckpt_id at = dt__ckpt_last;
    char first[sizeof f->why] = "";
    double itself = dt_ctx_rank(c->ctx) == 0 && dt__found_itself(c, from);
    if (dt_sum_doubles(c->zero->mesh.world, &itself, 1) != DT_OK) return dt_error(c->ctx);
    for (;;) {
        snprintf(f->path, sizeof f->path, "%s", from);
        if (itself == 0 && dt__found_next(c, from, &at, f) != DT_OK) return dt_error(c->ctx);
        if (!f->path[0]) break;
        dt__found_known(c, f);
        if (dt__found_check(c, f) != DT_OK) return dt_error(c->ctx);
        if (itself == 0 && f->state == DT__WHOLE) dt__found_named(f, at.step);
        if (f->state == DT__WHOLE) return DT_OK;
        if (f->state == DT__UNREAD)
            return dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_load: %s%s", f->why,
                itself > 0 ? "" : ": no older checkpoint is taken, as this one may be whole");
        if (itself > 0 || f->state == DT__NEWER)
            return dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_load: %s", f->why);
        if (dt_ctx_rank(c->ctx) == 0)
            dt_log(c->ctx, DT_LOG_NOTICE, "%s: the checkpoint before it counts", f->why);
        if (!first[0]) memcpy(first, f->why, sizeof first);
        dt__found_close(f);
    }
    if (first[0])
        return dt_fail(c->ctx, DT_ERR_IO,
            "dt_checkpoint_load: %s: no checkpoint there is whole: %s", from, first);
    return DT_OK;
}

/* ---- taking it ---- */

/* Whether what was found is a checkpoint of this program: the same tensors, optimizer, seed and
   numbers. */
static dt_status dt__load_fits(dt_checkpoint *c, dt__found *f) {
    dt_ctx *ctx = c->ctx;
    dt_json *j = f->json;
    char seed[24];
    const char *optimizer = dt_json_string(j, dt_json_find(j, 0, "optimizer"), NULL);
    const char *was = dt_json_string(j, dt_json_find(j, 0, "seed"), NULL);
    const char *mine = dt__optimizers[c->zero->desc.optimizer];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)dt_ctx_seed(ctx));
    if (!optimizer || strcmp(optimizer, mine) != 0)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_checkpoint_load: %s: its optimizer is %s, and this program's is %s", f->path,
            optimizer ? dt__name_text(optimizer).s : "not told", mine);
    if (!was || strcmp(was, seed) != 0)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_checkpoint_load: %s: its seed is %s, and this program's is %s: the random "
            "numbers would be others",
            f->path, was ? dt__name_text(was).s : "not told", seed);
    for (int i = 0; i < c->desc.n_saved; i++) {
        const dt_saved *s = &c->desc.saved[i];
        int node = dt_json_find(j, dt_json_find(j, 0, "saved"), s->name);
        double number;
        if (dt_json_count(j, node) != s->count)
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_checkpoint_load: %s: it has %d numbers '%s', and this program has %d", f->path,
                dt_json_count(j, node), s->name, s->count);
        for (int k = 0; k < s->count; k++)
            if (!dt_json_number(j, dt_json_at(j, node, k), &number))
                return dt_fail(ctx, DT_ERR_IO,
                    "dt_checkpoint_load: %s: '%s' holds something else than numbers", f->path,
                    s->name);
    }
    return DT_OK;
}

/* Rank 0, before the manifest is written: checks that a load will accept it. */
static dt_status dt__manifest_check(dt_checkpoint *c) {
    dt__found f;
    memset(&f, 0, sizeof f);
    snprintf(f.path, sizeof f.path, "%s", c->writer->final);
    snprintf(f.name, sizeof f.name, "%s/manifest.json", f.path);
    if (!dt__found_open(c, &f)) return dt_error(c->ctx);
    f.text = c->writer->manifest;
    f.bytes = c->writer->manifest_bytes;
    dt__found_parse(&f);
    for (int k = 0; k < DT__CKPT_FILES; k++)
        dt_json_free(dt_json_parse(f.aside, dt__ckpt_names[k], c->w[k]->file[0].head + 8,
            (size_t)dt__head_bytes(c->w[k]) - 8));
    dt__found_why(&f);
    if (f.state == DT__UNREAD)
        dt_fail(c->ctx, DT_ERR_MEM, "dt_checkpoint_save: %s", f.why);
    else if (f.state != DT__WHOLE)
        dt_fail(c->ctx, DT_ERR_ARG, "dt_checkpoint_save: it could not be loaded: %s", f.why);
    if (dt_error(c->ctx) == DT_OK) dt__load_fits(c, &f);
    f.text = NULL; /* the writer frees it */
    dt__found_close(&f);
    return dt_error(c->ctx);
}

/* Of 1-bit Adam, and of one layout only. */
static int dt__is_error(int file, const char *name) {
    return file == DT__OPTIM && strncmp(name, "error", 5) == 0 &&
           (name[5] == '0' || name[5] == '1') && name[6] == '.';
}

static dt_status dt__load_tensors_fit(dt_checkpoint *c, dt__found *f) {
    for (int k = 0; k < DT__CKPT_FILES; k++) {
        const char *file = dt__ckpt_names[k];
        for (int i = 0; i < dt_weights_count(c->w[k]); i++) {
            const dt_weight *t = dt_weights_get(c->w[k], i);
            const dt_weight *there = dt_weights_get(f->w[k], dt_weights_find(f->w[k], t->name));
            int same = there && there->dtype == t->dtype && there->shape.nd == t->shape.nd;
            for (int d = 0; d < t->shape.nd && same; d++) same = there->shape.d[d] == t->shape.d[d];
            if (same || dt__is_error(k, t->name)) continue;
            if (!there)
                return dt_fail(c->ctx, DT_ERR_ARG,
                    "dt_checkpoint_load: %s/%s has no '%s', which this program "
                    "has",
                    f->path, file, t->name);
            return dt_fail(c->ctx, DT_ERR_ARG,
                "dt_checkpoint_load: %s/%s: '%s' is %s of %s there, and %s of %s in "
                "this program",
                f->path, file, t->name, there->type, dt__shape_text(there->shape).s, t->type,
                dt__shape_text(t->shape).s);
        }
        for (int i = 0; i < dt_weights_count(f->w[k]); i++) {
            const char *name = dt_weights_get(f->w[k], i)->name;
            if (dt_weights_find(c->w[k], name) < 0 && !dt__is_error(k, name))
                return dt_fail(c->ctx, DT_ERR_ARG,
                    "dt_checkpoint_load: %s/%s has '%s', which this program has not", f->path, file,
                    dt__name_text(name).s);
        }
    }
    return DT_OK;
}

/* The values and state of a unit, on each rank its own. */
static dt_status dt__load_unit(
    dt_checkpoint *c, dt_weights *const *w, dt__zero_unit *z, char *host) {
    dt_ctx *ctx = c->ctx;
    dt_bucket *unit = z->unit;
    size_t size = dt__zero_size(z);
    int gathered = !unit->data;
    if (dt__present_aside(dt_param_get(ctx, unit->first_param)) != DT_OK) return dt_error(ctx);
    for (int i = unit->first_param; i < unit->first_param + unit->params; i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        dt_file_place p;
        if (dt__ckpt_place(c, t, &p) != DT_OK) return dt_error(ctx);
        if (dt_weights_load(w[DT__MODEL], t, p.columns, p.part, p.n ? p.n : 1) != DT_OK)
            return dt_error(ctx);
    }
    dt__unit_release(ctx, unit, 0, gathered);
    for (int a = 0; a <= DT__MASTER; a++)
        for (size_t at = z->first, n; at < z->first + z->count && dt__ckpt_has(c->zero, unit, a);
             at += n) {
            n = z->first + z->count - at < DT__CKPT_CHUNK / size ? z->first + z->count - at
                                                                 : DT__CKPT_CHUNK / size;
            memset(host, 0, n * size); /* what lies outside of the full tensors */
            if (dt__state_move(c, w[DT__OPTIM], unit, a, at, at + n, host) != DT_OK ||
                dt__state_set(c->zero, z, a, at, n, host) != DT_OK)
                return dt_error(ctx);
        }
    return dt_error(ctx);
}

/* [collective: world] What 1-bit Adam's signs left over: if the layout is the one that saved. */
static dt_status dt__load_errors(dt_checkpoint *c, dt__found *f, dt_weights *w, char *host) {
    dt_zero *zero = c->zero;
    const char *layout = dt_json_string(f->json, dt_json_find(f->json, 0, "layout"), NULL);
    double other = !layout || strcmp(layout, dt__ckpt_layout(zero).s) != 0;
    for (int u = 0; u < zero->n_units; u++)
        for (int e = 0; e < 2 && zero->units[u].errors[e]; e++) {
            char name[64];
            dt__error_name(c, u, e, name, sizeof name);
            const dt_weight *t = dt_weights_get(w, dt_weights_find(w, name));
            if (!t || t->count != dt__error_shape(&zero->units[u], e).d[0]) other = 1;
        }
    if (dt_sum_doubles(zero->mesh.world, &other, 1) != DT_OK) return dt_error(c->ctx);
    if (other > 0 && dt__onebit_frozen(zero) && dt_ctx_rank(c->ctx) == 0)
        dt_log(c->ctx, DT_LOG_NOTICE,
            "%s: the errors of 1-bit Adam belong to layout %s, and begin again at zero", f->path,
            layout ? layout : "?");
    for (int u = 0; u < zero->n_units && other == 0; u++)
        if (dt__errors_move(c, w, u, host) != DT_OK) break;
    return dt_error(c->ctx);
}

/* The numbers, once all tensors are there. */
static void dt__load_numbers(dt_checkpoint *c, dt__found *f) {
    dt_zero *zero = c->zero;
    dt_json *j = f->json;
    const char *config = dt_json_string(j, dt_json_find(j, 0, "config"), NULL);
    double scale = zero->scale;
    int64_t good = 0, patience = zero->patience;
    dt_json_number(j, dt_json_find(j, 0, "loss_scale"), &scale);
    dt_json_int(j, dt_json_find(j, 0, "good_steps"), &good);
    dt_json_int(j, dt_json_find(j, 0, "patience"), &patience);
    if (dt__scale_is_dynamic(zero)) {
        dt__scale_set(zero, scale);
        zero->good = (int)good;
        zero->patience = (int)patience;
    }
    for (int i = 0; i < c->desc.n_saved; i++) {
        const dt_saved *s = &c->desc.saved[i];
        int node = dt_json_find(j, dt_json_find(j, 0, "saved"), s->name);
        for (int k = 0; k < s->count; k++) dt_json_number(j, dt_json_at(j, node, k), &s->values[k]);
    }
    dt__text_drop(c->ctx, c->config);
    c->config = config ? dt__join(c->ctx, config, strlen(config), "") : NULL;
    memcpy(c->path, f->path, sizeof c->path);
}

static dt_status dt__load_take(dt_checkpoint *c, dt__found *f) {
    dt_ctx *ctx = c->ctx;
    dt_zero *zero = c->zero;
    dt_weights *w[DT__CKPT_FILES] = { NULL, NULL };
    char path[DT__CKPT_PATH + 32];
    if (!dt_json_int(f->json, dt_json_find(f->json, 0, "step"), &zero->step) || zero->step < 0)
        return dt_fail(ctx, DT_ERR_IO, "dt_checkpoint_load: %s: its step is no number", f->path);
    if (dt__load_fits(c, f) != DT_OK || dt__list_make(c, f->path) != DT_OK ||
        dt__load_tensors_fit(c, f) != DT_OK)
        return dt_error(ctx);
    dt__list_drop(c);
    for (int k = 0; k < DT__CKPT_FILES && dt_error(ctx) == DT_OK; k++) {
        snprintf(path, sizeof path, "%s/%s", f->path, dt__ckpt_names[k]);
        w[k] = dt_weights_open(ctx, path);
    }
    char *host = (char *)dt_alloc(ctx, DT_MEM_HOST, DT__CKPT_CHUNK, "loading");
    for (int u = 0; u < zero->n_units && dt_error(ctx) == DT_OK; u++)
        dt__load_unit(c, w, &zero->units[u], host);
    if (dt_error(ctx) == DT_OK && zero->desc.optimizer == DT_ONEBIT_ADAM)
        dt__load_errors(c, f, w[DT__OPTIM], host);
    dt_free(ctx, DT_MEM_HOST, host, DT__CKPT_CHUNK);
    for (int k = 0; k < DT__CKPT_FILES; k++) dt_weights_close(w[k]);
    if (dt_error(ctx) == DT_OK) dt__load_numbers(c, f);
    /* copies are equal again */
    return dt_error(ctx) == DT_OK ? dt__zero_compare(zero, 1) : dt_error(ctx);
}

int64_t dt_checkpoint_load(dt_checkpoint *c, const char *from) {
    dt__found f;
    char dir[DT__CKPT_PATH];
    memset(&f, 0, sizeof f);
    if (!c || dt_error(c->ctx) != DT_OK) return -1;
    if (!from) from = c->writer->dir;
    if (!*from || snprintf(dir, sizeof dir, "%s", from) >= (int)sizeof dir) {
        dt_fail(c->ctx, DT_ERR_ARG, "dt_checkpoint_load: from where? '%.80s'", from);
        return -1;
    }
    for (size_t n = strlen(dir); n > 1 && dir[n - 1] == '/'; n--) dir[n - 1] = 0;
    if (dt__save_wait(c) == DT_OK && dt__found_newest(c, dir, &f) == DT_OK && f.path[0])
        dt__load_take(c, &f);
    if (f.aside) dt__found_close(&f);
    /* all ranks have it, or none goes on */
    if (dt_error(c->ctx) == DT_OK) dt_barrier(c->zero->mesh.world);
    if (dt_error(c->ctx) == DT_OK) return f.path[0] ? c->zero->step : 0;
    dt__list_drop(c);
    return -1;
}

#ifdef __cplusplus
}
#endif
#endif /* DT_ZERO_IMPL */

/* HISTORY
     0.1.0   AdamW, Adam, SGD, 1-bit Adam, an own update; ZeRO 0 to 3; offload; loss scaling;
             clipping; learning rates; formulas; checkpoints; export of weights

   LICENCE: your choice of A or B.

   A. Public domain (www.unlicense.org). This is free and unencumbered software released into the
   public domain. Anyone is free to copy, modify, publish, use, compile, sell, or distribute this
   software, either in source code form or as a compiled binary, for any purpose, commercial or
   non-commercial, and by any means. In jurisdictions that recognize copyright laws, the author or
   authors of this software dedicate any and all copyright interest in the software to the public
   domain. We make this dedication for the benefit of the public at large and to the detriment of
   our heirs and successors. We intend this dedication to be an overt act of relinquishment in
   perpetuity of all present and future rights to this software under copyright law. THE SOFTWARE IS
   PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO
   THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO
   EVENT SHALL THE AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION
   OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE
   USE OR OTHER DEALINGS IN THE SOFTWARE.

   B. MIT. Copyright (c) the dt authors. Permission is hereby granted, free of charge, to any person
   obtaining a copy of this software and associated documentation files (the "Software"), to deal in
   the Software without restriction, including without limitation the rights to use, copy, modify,
   merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons
   to whom the Software is furnished to do so, subject to the following conditions: the above
   copyright notice and this permission notice shall be included in all copies or substantial
   portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS
   OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A
   PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE
   LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
   OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS
   IN THE SOFTWARE. */
