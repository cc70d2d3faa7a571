/* dt_zero.h - v0.2.0 - training state: optimizers, ZeRO 0 to 3, mixed precision, offload,
   checkpoints - public domain or MIT, see the end of the file

   The topmost of dt's four single-header libraries: it includes the other three. It contains what a
   training step needs besides the model: the reduction of gradients over every axis of the mesh
   that divides the data; optimizer state, gradients and parameters, replicated or sharded over the
   ranks (ZeRO, FSDP, HSDP); the optimizer update, with f32 master weights for 16-bit parameters;
   loss scaling; the learning rate; CPU and NVMe offload; checkpoints that can be loaded in any
   layout.

   DOES NOT: know the model, divide the loss (dt_count_labels returns the denominator), or reset the
   tape (dt_reset does).

   QUICK EXAMPLE (data parallel over 4 ranks; ZeRO-2 shards optimizer state and gradients)

       #define DT_IMPLEMENTATION
       #include "dt_zero.h"
       #include <stdio.h>

       enum { B = 8, IN = 4, STEPS = 50 };

       static dt_status train(dt_ctx *ctx, void *user) { // every rank runs this
           dt_comm *world = dt_world(ctx);
           dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(1, IN), DT_NORMAL(0.1));
           dt_tensor *b = dt_param(ctx, "b", DT_SHAPE(1), DT_ZEROS);
           dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .stage = 2 });
           for (int step = 1; step <= STEPS; step++) {
               float x[B * IN], y[B];
               int seed = step * 31 + dt_comm_rank(world) * 13;
               for (int i = 0; i < B * IN; i++) x[i] = (float)((seed + i * 7) % 17) / 17;
               for (int i = 0; i < B; i++) y[i] = x[i * IN] - 2 * x[i * IN + 1];
               dt_tensor *out = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(B, IN), x), w, b);
               dt_tensor *label = dt_input(ctx, DT_F32, DT_SHAPE(B, 1), y);
               dt_tensor *loss = dt_mse(out, label, B * dt_comm_size(world));
               dt_backward(loss);
               double sum = dt_item(loss);
               dt_sum_doubles(world, &sum, 1);
               dt_zero_step(opt, 0.05);
               dt_reset(ctx);
               if (dt_comm_rank(world) == 0 && step % 10 == 0)
                   printf("step %d loss %.4f\n", step, sum);
           }
           (void)user;
           return dt_error(ctx);
       }

       int main(void) { return dt_run((dt_run_desc){ .ranks = 4 }, train, NULL); }

   BUILD
       cc -O3 train.c -lm -lpthread                 C11 or C++17; gcc, clang
       nvcc -O3 train.c dt_kernels.cu -lcublasLt -lnccl     CUDA

   OPTIONS (define before including)
       DT_IMPLEMENTATION   in exactly one file: compile the code, not only the declarations
       DT_STATIC           in every file: make all functions static

   CONTENTS
     1. Learning rate (warmup, cosine, linear, WSD schedules)
     2. Training state (ZeRO-1, ZeRO-2, ZeRO-3, FSDP, HSDP, optimizers, AdamW, gradient clipping)
     3. Checkpoints (save, load, resharding, export of weights)
     4. Memory account (formulas of ZeRO for memory and traffic)
     5. Implementation: learning rate
     6. Buckets, groups and shards (HSDP shard groups and replicas, tied embeddings)
     7. Comparing ranks (replicas start with equal values)
     8. Gradient reduction (gradient bucket, gradient accumulation, overlap of communication and
        computation, binary tree over micro-batches)
     9. ZeRO-3 (FSDP): gather and release of parameters
    10. Gradient norm (gradient clipping, first bad gradient)
    11. Loss scaling (mixed precision, dynamic loss scale)
    12. Optimizer update (mixed precision, master weights)
    13. I/O thread (background I/O, a disk that does not answer)
    14. Offload (CPU offload, NVMe offload)
    15. 1-bit Adam (error feedback, gradient compression)
    16. Making, stepping, freeing
    17. Memory account: code
    18. Checkpoints: files (atomic commit: write, fsync, rename, fsync)
    19. Checkpoints: contents (digests, list of tensors)
    20. Checkpoints: saving (background save)
    21. Checkpoints: opening, closing, export
    22. Checkpoints: loading (resharding)

   CONTRACT
     Memory     The context owns the training state and frees it. dt_zero_make allocates parameters
                and optimizer state; the first backward allocates gradients. Every bucket is padded
                to a multiple of n * 1,024 elements, where n is the number of ranks in a shard
                group. Bytes per element of parameters + gradients + Adam state: 4 + 4 + 8 for f32,
                2 + 4 + 12 for bf16 and f16. Section 4 shows which of these each ZeRO stage divides
                by n. DT_MEM_COMM counts gathered parameters and gradients that are being reduced:
                at stage 2 the gradients of three buckets, at stage 3 also the parameters of the
                current block and of the next block. 1-bit Adam on N ranks adds error arrays:
                4 + 4/N bytes per element. At stage 3 a parameter's `data` is NULL outside of the
                block that uses the parameter: read the values with dt_read or dt_data.
     Types      f32, f64, bf16 and f16. Mixed precision: bf16 and f16 parameters have f32 gradients,
                and an f32 master weight in the optimizer state. The update changes the master
                weight and rounds it to the parameter. The first step copies the master weight from
                the parameter. If the program writes a bf16 or f16 parameter after the first step,
                the next step overwrites the written value. Losses are scaled if any parameter is
                f16, because f16 holds only values from 6e-8 to 65,504; bf16 has the range of f32.
     Errors     Errors are sticky, as in dt_tensor.h. A step whose gradient norm is not finite
                changes nothing: with a loss scale every rank skips the step, without a loss scale
                every rank fails (DT_ERR_NUMERIC). Ranks that hold replicas must register the same
                parameters in the same order with the same flags and the same optimizer
                (dt_zero_make compares them) and start from the same values (the first dt_zero_step
                compares digests; dt_comm_bytes does not count this traffic). Otherwise every rank
                fails (DT_ERR_COMM).
     Threads    As in dt_comm.h. Offload to a folder and saving in the background start one I/O
                thread on each rank, which both share.
     Order      Gradients are summed over ranks in rank order. The squares of the gradient norm are
                summed for each piece of 1,024 elements, then over the pieces in ascending order.
                Stages 0 and 1 give the same bits, and stages 2 and 3 give the same bits. All four
                stages give the same bits with one micro-batch or with dt_zero_desc.tree. Offload,
                overlap and keep_gathered change no bit. With HSDP, gradients are summed within each
                shard group first, then over the groups.
     Tags       [local], [collective: group]. */

#ifndef DT_ZERO_H
#define DT_ZERO_H

#include "dt_parallel.h"

#if DT_VERSION != 200
#error \
    "dt_zero.h 0.2.0 needs the other dt headers of version 0.2.0: copy all headers from one release"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ==== 1. Learning rate ==========================================================================

enum { DT_LR_COSINE = 0, DT_LR_LINEAR, DT_LR_CONSTANT, DT_LR_WSD };
typedef struct dt_lr_desc {
    double peak;
    int kind;       /* schedule after the warmup: DT_LR_* */
    int64_t warmup; /* number of warmup steps; step n <= warmup has lr peak * n / warmup */
    int64_t steps;  /* from step `steps` on, the lr is min_ratio * peak (not DT_LR_CONSTANT) */
    double min_ratio;
    /* DT_LR_WSD: number of steps of the final decay; 0 means 20% of `steps`, rounded up */
    int64_t decay;
} dt_lr_desc;

/* [local] Returns the learning rate (lr) of a step. Steps are counted from 1; the result is 0 if
   step < 1. DT_LR_COSINE: arXiv:1608.03983. DT_LR_WSD (warmup, stable, decay) stays at the peak and
   then falls as 1 - sqrt(x), where x goes from 0 to 1 during the decay (arXiv:2404.06395;
   arXiv:2405.18392 for the square root). */
DT_API double dt_lr(dt_lr_desc desc, int64_t step);

// ==== 2. Training state =========================================================================

/* Arguments of a custom optimizer's update: consecutive elements of one parameter with their
   gradient and state. */
typedef struct dt_update_args {
    dt_ctx *ctx;
    const dt_tensor *tensor; /* the parameter */
    size_t offset, count;    /* range of elements of the tensor's local slice, row-major */
    /* param, grad and the state arrays: (count) elements of type dt_grad_dtype(tensor). For a bf16
       or f16 parameter, param is the f32 master weight */
    void *param;
    const void *grad;
    /* dt_zero_desc.states arrays, which are zero before the first step; the other pointers are
       NULL */
    void *state[2];
    double lr;           /* includes the parameter's lr_scale */
    double grad_scale;   /* use grad * grad_scale as the gradient (gradient clipping) */
    double weight_decay; /* 0 for parameters without decay */
    int64_t step;        /* counted from 1 */
} dt_update_args;

/* The update of a custom optimizer. It is called for each range of consecutive elements that this
   rank updates. The update of element i may read only element i of each array. On a device the
   arrays are device memory: launch your kernels on the context's stream. If the optimizer state is
   offloaded, the arrays are host memory, and the update must be complete when the function
   returns. */
typedef dt_status (*dt_update_fn)(const dt_update_args *args, void *user);

/* Loss scaling: a dynamic loss scale (P. Micikevicius et al., "Mixed Precision Training",
   arXiv:1710.03740). If a gradient is not finite, the step is skipped and only the scale
   changes. */
typedef struct dt_scale_desc {
    double init; /* the first scale; 0 means 65,536 */
    /* The scale is multiplied by `growth` after `interval` steps in a row that were not skipped,
       and by `backoff` after a skipped step. growth: 0 means 2; backoff: 0 means 0.5 */
    double growth, backoff;
    int interval; /* 0 means 2,000 */
    /* after each growth of the scale, the first (hysteresis - 1) skipped steps do not lower the
       scale; 0 means 1 */
    int hysteresis;
    double min_scale; /* the scale never falls below this value; 0 means 1 */
} dt_scale_desc;
#define DT_SCALE_DYNAMIC (-1.0)
enum { DT_MAX_SKIPS = 20 }; /* skipped steps in a row after which dt_zero_step fails */

enum { DT_ADAMW = 0, DT_ADAM, DT_SGD, DT_ONEBIT_ADAM, DT_OPTIMIZER_CUSTOM };
typedef struct dt_zero_desc {
    /* ZeRO stage. Stage 0 shards nothing, stage 1 the optimizer state, stage 2 also the gradients,
       stage 3 also the parameters (FSDP) */
    int stage;
    /* HSDP: number of ranks in a shard group; 0 means all ranks of the data group. A shard group
       consists of consecutive ranks of the data group. Different shard groups hold replicas */
    int shard_group;
    /* 1: stage 3 keeps gathered parameters until the update (section 9) */
    int keep_gathered;
    const dt_mesh *mesh; /* dt_zero_make copies the mesh. NULL: all ranks are data parallel */
    /* DT_ADAMW (arXiv:1711.05101), DT_ADAM (L2 added to the gradient), DT_SGD, DT_ONEBIT_ADAM
       (arXiv:2102.02888; section 15), DT_OPTIMIZER_CUSTOM */
    int optimizer;
    double beta1, beta2; /* beta1: 0 means 0.9; beta2: 0 means 0.999 */
    double eps;          /* 0 means 1e-8 */
    double momentum;     /* DT_SGD: momentum; 0: no momentum and no optimizer state */
    /* 1-bit Adam: number of steps of plain Adam before the second moment is frozen. Choose at least
       the number of warmup steps of the learning rate, and about 1/(1 - beta2) or more. 1-bit Adam
       works only at stage 0, without `tree` and without offload */
    int freeze_steps;
    /* applies to every parameter that has 2 or more dimensions and is not marked no_decay */
    double weight_decay;
    /* gradient clipping: scales gradients by min(1, clip / (norm + 1e-6)); 0: no clipping */
    double clip;
    /* Placement of the optimizer state (section 14). NULL or "none": in the same memory as the
       parameters. "cpu" (CPU offload): in host memory, and the update runs on the CPU. Any other
       text names a folder (NVMe offload): the state is in a file in this folder */
    const char *offload_optim;
    /* Placement of this rank's shard of the parameters at stage 3, with the same values as
       offload_optim. If both fields name the same folder, this rank's shard of the gradients is in
       that folder too, unless `tree` is set */
    const char *offload_params;
    /* number of elements that offload reads, updates and writes at a time; 0 means 131,072 */
    size_t offload_chunk;
    /* 0: a dynamic loss scale if any rank has an f16 parameter, else no loss scale.
       DT_SCALE_DYNAMIC: a dynamic loss scale. Other values: a fixed loss scale */
    double loss_scale;
    dt_scale_desc scale; /* parameters of a dynamic loss scale */
    /* maximum size of a bucket in bytes, unless one parameter is larger; 0 means 25 MiB */
    size_t bucket_bytes;
    /* 1: gradients are summed in a binary tree over micro-batches (section 8) */
    int tree;
    /* 1: no overlap of communication and computation: the backward waits for each bucket's
       reduction, and parameters are gathered when needed, not prefetched */
    int no_overlap;
    /* 1: stage 3 fills gathered parameters with NaN before it frees them, to expose later reads */
    int poison;
    dt_update_fn update; /* DT_OPTIMIZER_CUSTOM: the update */
    void *user;          /* passed to `update` */
    int states;          /* DT_OPTIMIZER_CUSTOM: number of state arrays, 0 to 2 */
} dt_zero_desc;

typedef struct dt_zero dt_zero;

typedef struct dt_step_info {
    int64_t step; /* the last completed step, counted from 1 */
    /* Gradient norm: the 2-norm of the gradients, divided by the loss scale, before clipping. An
       element that several ranks hold counts once. NaN after a failure. After 1-bit Adam has frozen
       the second moment, gradients are not summed, and grad_norm is an upper bound: the square root
       of the mean over the N data-parallel ranks of |N g|^2, where g is a rank's own gradient */
    double grad_norm;
    double clip_scale; /* gradient clipping: the factor applied to the gradients */
    /* 1 if a gradient was not finite and loss scaling is in use: the step has changed no parameter,
       no state and no step count on any rank. Repeat the same micro-batches, or continue with new
       micro-batches */
    int skipped;
    double loss_scale; /* loss scale of the gradients in this step; 1 without loss scaling */
    /* after a skipped or failed step: the world rank that holds the first element of the gradients
       that is not finite; -1 if all gradients are finite */
    int bad_rank;
    /* bad_param: the parameter of this element; NULL on ranks of other pipeline stages.
       bad_element: the element's index in the local slice of rank bad_rank */
    const dt_tensor *bad_param;
    size_t bad_element;
} dt_step_info;

/* [collective: world] Makes the training state for desc.stage: ZeRO-1, ZeRO-2 or ZeRO-3 (FSDP);
   with desc.shard_group, HSDP. Call it after the last dt_param: dt_zero_make allocates and
   initializes the parameters and the optimizer state. Returns NULL on failure. */
DT_API dt_zero *dt_zero_make(dt_ctx *ctx, dt_zero_desc desc);
/* [collective: world] Takes one optimizer step with learning rate lr. Call dt_zero_step after the
   backward of the step's last micro-batch. It computes the gradient norm, clips the gradients,
   updates the parameters, and makes the new parameters available on every rank. The next backward
   starts new gradient sums. */
DT_API dt_step_info dt_zero_step(dt_zero *zero, double lr);
enum { DT_STATE_MASTER = 2 };
/* [collective: the parameter's data group] Copies a state array of a parameter's full local slice
   to host memory, as elements of type dt_grad_dtype(param). `which` is the array's index, 0 or 1.
   After the first step it may also be DT_STATE_MASTER: the f32 master weights of a 16-bit
   parameter. Returns DT_ERR_ARG if the parameter is frozen or has no such array. */
DT_API dt_status dt_zero_state(dt_zero *zero, int which, const dt_tensor *param, void *host);
/* [collective: the parameter's data group; in the first call of a step also the groups of tied
   parameters over pipeline stages] Copies the step's gradient of a parameter's full local slice to
   host memory, as elements of type dt_grad_dtype(param). The gradient is summed over all ranks and
   divided by the loss scale. Call dt_zero_grad between the last backward of a step and
   dt_zero_step. Returns DT_ERR_UNSUPPORTED after 1-bit Adam has frozen its second moment, because
   gradients are then not summed. */
DT_API dt_status dt_zero_grad(dt_zero *zero, const dt_tensor *param, void *host);
/* [local] Returns the number of completed steps, including the steps before the loaded
   checkpoint. */
DT_API int64_t dt_zero_steps(const dt_zero *zero);
/* [local] Returns the bytes of optimizer state on this rank, computed from the sizes of the shards.
   The allocator's count for DT_MEM_OPTIM must be the same. Returns 0 if the optimizer state is
   offloaded: host memory counts as DT_MEM_HOST, and a file does not count. */
DT_API size_t dt_zero_state_bytes(const dt_zero *zero);
/* [local], at stage 3 [collective: world]. Frees the training state, which otherwise lives as long
   as the context. At stage 3 the parameters cannot be read after this call. NULL is allowed. */
DT_API void dt_zero_free(dt_zero *zero);

// ==== 3. Checkpoints ============================================================================

/* Checkpoint: a folder from which training resumes in any layout, at any ZeRO stage, on any number
   of ranks (resharding). Its files hold full logical tensors, whichever ranks wrote the parts. DIR
   is dt_checkpoint_desc.dir:

       DIR/lock                    locked by the process that saves to DIR; says which process it is
       DIR/step-200/               a checkpoint, which is complete or absent
           model.safetensors       each parameter, under its name or where
                                   dt_checkpoint_desc.map_weight puts it
           optim.safetensors       m.NAME, v.NAME, master.NAME: state of each trained parameter
           config.json             the program's own text (dt_checkpoint_desc.config_json)
           manifest.json           format number, step, loss scale, the program's numbers; the size
                                   of each file, a digest of each file's header and of each tensor;
                                   last, the manifest's own digest
       DIR/step-400.1a2b3c.tmp/    a checkpoint that is being written or that a killed job has left;
                                   the next job removes it. Each save has a new number (1a2b3c), so
                                   a rank that does not share the folder DIR cannot find it

   Removing a checkpoint removes its four files, then the folder if it is empty. If the folder or a
   file is a symbolic link, the link is removed, not its target. No file is written through a
   symbolic link.

   All ranks write the two safetensors files in parallel. Each rank writes its own shards, and its
   fraction of the data that several ranks hold. Then rank 0 commits the checkpoint:

       write files -> fsync files -> write + fsync manifest.json -> fsync folder
                   -> rename step-200.1a2b3c.tmp to step-200     <- the instant of the commit
                   -> fsync DIR

   At any instant the folder holds the previous checkpoint or the new checkpoint. After
   dt_checkpoint_save has returned DT_OK the new checkpoint is durable. A save never replaces a
   checkpoint: if step-200 exists, the new checkpoint is step-200-2. Loading takes the newest intact
   checkpoint. */
enum { DT_CHECKPOINT_FORMAT = 1 };

/* An array of the program's own numbers to store in checkpoints, for example how many samples the
   model has seen. Names are unique; the numbers are finite, and the same on all ranks.
   dt_checkpoint_save stores the current values, and dt_checkpoint_load overwrites them with the
   stored values. */
typedef struct dt_extra_state {
    const char *name;
    double *values;
    int count;
} dt_extra_state;

/* Position of a parameter in model.safetensors: n parts, each of consecutive rows of the parameter,
   as in dt_weights_load. */
typedef struct dt_weight_map {
    char name[2][96];
    dt_weight_part part[2]; /* part[i] is in the tensor name[i]; part[i].name is not used */
    int n;                  /* 1 or 2 */
    int64_t columns;        /* 0 means the parameter's last dimension */
    dt_shape shape;         /* full shape of each of the file's tensors */
} dt_weight_map;

typedef struct dt_checkpoint_desc {
    /* folder for checkpoints, created if missing. NULL: this job only loads */
    const char *dir;
    int keep; /* number of newest checkpoints to keep; 0 keeps all */
    /* 1: dt_checkpoint_save copies this rank's fraction of the state to host memory and returns;
       the rank's I/O thread writes the copy. Each rank then holds its fraction of the state
       twice */
    int background;
    const dt_extra_state *extra_state; /* (n_extra_state) */
    int n_extra_state;
    const char *config;      /* text to save, any bytes, at most 16 MiB; may be NULL */
    const char *config_json; /* content of config.json, at most 100,000,000 bytes; may be NULL */
    /* sets a parameter's name and position in model.safetensors; NULL: each parameter is stored
       whole under its own name */
    void (*map_weight)(const dt_tensor *param, dt_weight_map *map, void *user);
    /* rank 0 calls this function during a save; `done` is the fraction that is written, 0 to 1. May
       be NULL */
    void (*progress)(double done, void *user);
    void *user;
} dt_checkpoint_desc;

typedef struct dt_checkpoint dt_checkpoint;
/* [collective: world] Opens a checkpoint folder, after dt_zero_make. desc's pointers must stay
   valid until dt_checkpoint_close. Returns NULL after a failure. DT_ERR_IO: another process saves
   in this folder; the error text names the process. DT_ERR_ARG: a checkpoint could be saved but not
   loaded, because two arrays of extra_state have the same name, or because extra_state and `config`
   have more values (4 million) or more text than a manifest can hold. DT_ERR_UNSUPPORTED: the
   context's io table has no functions for folders. */
DT_API dt_checkpoint *dt_checkpoint_open(dt_zero *zero, dt_checkpoint_desc desc);
/* [collective: world] Saves the state after a step; call it between dt_zero_step and the next
   forward. On failure every rank fails, with DT_ERR_IO if a file operation failed, and earlier
   checkpoints are untouched. The save also fails if the ranks do not see the same folder, or if the
   folder has a newer checkpoint than this job has loaded or saved. A background save waits only for
   the previous save; if it fails, the next dt_checkpoint_poll, dt_checkpoint_save or
   dt_checkpoint_close returns the failure. Without desc.background the ranks wait for the slowest
   rank's disk, at most dt_run_desc.timeout_s. */
DT_API dt_status dt_checkpoint_save(dt_checkpoint *checkpoint);
/* [collective: world] Advances a background save. Call it once a step. Returns 1 if no save is in
   progress, else 0. */
DT_API int dt_checkpoint_poll(dt_checkpoint *checkpoint);
/* [collective: world] Loads a checkpoint before the first step. `from` is a checkpoint, or a folder
   of checkpoints, whose newest intact checkpoint is loaded; NULL means desc.dir. The function reads
   the whole checkpoint and compares every digest before it changes any state. If a checkpoint is
   damaged, the function logs a notice that names it, and tries the next older checkpoint. If
   a checkpoint cannot be read (permissions, descriptors, memory, the disk), the load fails, because
   the checkpoint may be intact. Returns the step. Returns 0 if the loaded checkpoint is of step 0
   (dt_checkpoint_path then returns the checkpoint's folder), or if there is no checkpoint. Returns
   -1 on failure, if no checkpoint is intact, if the checkpoint has a newer format, or if it was
   saved with another model, optimizer, type or seed. The error arrays of 1-bit Adam can be loaded
   only in the layout that saved them; in another layout they start at zero, with a notice. */
DT_API int64_t dt_checkpoint_load(dt_checkpoint *checkpoint, const char *from);
/* [local] Writes the name of the newest checkpoint in the folder `dir`, for example "step-200", to
   `name`, or "" if the folder has no checkpoint. `bytes` is the size of `name`. Only
   dt_checkpoint_load finds out whether the checkpoint is intact. Returns the checkpoint's step; -1
   if there is no checkpoint or no folder; -2 if the folder cannot be listed, with the reason in
   errno. */
DT_API int64_t dt_checkpoint_newest(const dt_io *io, const char *dir, char *name, size_t bytes);
/* [local] dt_checkpoint_path returns the folder of the checkpoint that was loaded or saved last, or
   "" if none was. dt_checkpoint_config returns the dt_checkpoint_desc.config that was saved in the
   checkpoint that was loaded last, or "" if none was loaded. */
DT_API const char *dt_checkpoint_path(const dt_checkpoint *checkpoint);
DT_API const char *dt_checkpoint_config(const dt_checkpoint *checkpoint);
/* [collective: world] Waits for a background save and unlocks the folder. NULL is allowed. */
DT_API dt_status dt_checkpoint_close(dt_checkpoint *checkpoint);

typedef struct dt_export_desc {
    /* as in dt_checkpoint_desc */
    void (*map_weight)(const dt_tensor *param, dt_weight_map *map, void *user);
    void *user;
    /* llmc.version 0: a safetensors file. 3 or 5: an llm.c model file; map_weight must then set the
       name and position of each parameter in the tensors of llm.c */
    dt_llmc llmc;
} dt_export_desc;
/* [collective: world] Exports only the parameters, as one file for other programs. The ranks may
   have any layout. All ranks write the file PATH.tmp in parallel and call fsync; then rank 0
   renames PATH.tmp to `path`. Returns DT_ERR_IO if a file operation fails. */
DT_API dt_status dt_zero_export(dt_zero *zero, const char *path, dt_export_desc desc);

// ==== 4. Memory account =========================================================================

/* Memory and traffic of the ZeRO stages, computed without running a program, by the formulas of S.
   Rajbhandari et al., "ZeRO", arXiv:1910.02054, sections 5 and 7. E is the number of elements, N
   the number of data-parallel ranks, `a` the number of micro-batches in a step. P, G and O are the
   bytes per element of parameters, gradients and optimizer state. The bytes that a rank sends in a
   step are the column "sends" times (N-1)/N:

               rank 0   rank 1   rank 2   rank 3       holds                     sends
       ZeRO-0  P G O    P G O    P G O    P G O        (P + G + O) E             2 G E
       ZeRO-1  P G o    P G  o   P G   o  P G    o     (P + G + O/N) E           (G + P) E
       ZeRO-2  P g o    P  g  o  P   g   o P   g  o    (P + (G + O)/N) E         (a G + P) E
       ZeRO-3  p g o     p g o    p g o    p g o       (P + G + O)/N E           (a G + 2 a P) E
         with keep_gathered                            the same                  (a G + P) E

   In the picture a capital letter is a full copy and a small letter is a shard. ZeRO-0 (plain data
   parallelism) all-reduces gradients. ZeRO-1 reduce-scatters gradients and all-gathers parameters
   after the update. ZeRO-2 does the same, but reduce-scatters in each micro-batch. ZeRO-3 (FSDP)
   also gathers parameters in each forward and in each backward; with keep_gathered, only once a
   step.

   The formulas leave out: the memory and traffic of dt_zero_desc.tree; HSDP's sums over replicas;
   the second gather if the backward is split into an input half and a weight half (zero bubble);
   offload; buffers of parameters that are being gathered and of gradients that are being reduced;
   activations; frozen parameters; the padding of buckets to a multiple of N * 1,024 elements (if E
   is the sum of dt_bucket.padded, the bytes are exact). A dry run (dt_parallel.h) counts all of
   these. */
typedef struct dt_zero_formula_desc {
    double elements;   /* E; one rank's share, if other axes (such as tp) shard parameters */
    int stage;         /* 0 to 3 */
    int ranks;         /* N; 0 means 1 */
    int micros;        /* `a`; 0 means 1 */
    int keep_gathered; /* 1: stage 3 gathers parameters once a step */
    /* P, G and O. With Adam they are 4, 4, 8 for f32, 8, 8, 16 for f64, and 2, 4, 12 for bf16 and
       f16 with f32 master weights (2, 2, 12 in the paper, which has 16-bit gradients). If all three
       are 0, they mean 4, 4, 8 */
    double values, grads, state;
} dt_zero_formula_desc;
/* Bytes in the memory of one rank; `sent` is the bytes that the rank sends in one step. */
typedef struct dt_zero_bytes {
    double params, grads, optim, total, sent;
} dt_zero_bytes;
/* [local] Returns the bytes by the formulas above. All are NaN if the stage is unknown or an
   argument is negative. */
DT_API dt_zero_bytes dt_zero_formula(dt_zero_formula_desc desc);

#ifdef __cplusplus
}
#endif
#endif /* DT_ZERO_H */

#if defined(DT_IMPLEMENTATION) && !defined(DT_ZERO_IMPL)
#define DT_ZERO_IMPL

#include "dt_parallel.h"

DT__CPP_WARNINGS_OFF

#include <sys/resource.h>

#ifdef __cplusplus
extern "C" {
#endif

// ==== 5. Implementation: learning rate ==========================================================

/* Returns the last step at the peak learning rate. */
static int64_t dt__lr_decay_start(dt_lr_desc d) { /* requires 0 <= warmup < steps */
    int64_t last = d.steps - (d.decay > 0 ? d.decay : d.steps / 5 + (d.steps % 5 != 0));
    return last > d.warmup ? last : d.warmup;
}

double dt_lr(dt_lr_desc d, int64_t step) {
    if (d.warmup < 0) d.warmup = 0;
    if (step <= d.warmup) return step > 0 ? d.peak * (double)step / (double)d.warmup : 0;
    if (d.kind == DT_LR_CONSTANT) return d.peak;
    double lowest = d.min_ratio * d.peak;
    if (step >= d.steps) return lowest;
    int64_t from = d.kind == DT_LR_WSD ? dt__lr_decay_start(d) : d.warmup;
    if (step <= from) return d.peak;
    double done = (double)(step - from) / (double)(d.steps - from);
    double left =
        d.kind == DT_LR_LINEAR ? 1 - done : 0.5 * (1 + cos(3.14159265358979323846 * done));
    if (d.kind == DT_LR_WSD) left = 1 - sqrt(done);
    return lowest + left * (d.peak - lowest);
}

// ==== 6. Buckets, groups and shards =============================================================

/* Files and the I/O thread (section 13). One operation on a file: `file` and `to` are indices of
   dt__files. */
typedef struct dt__file_op {
    int kind, file, to; /* kind: DT__OP_READ to DT__OP_KEEP */
    void *data;         /* DT__OP_READ, DT__OP_WRITE: (bytes) */
    int64_t bytes, offset;
} dt__file_op;
typedef struct dt__files dt__files;

/* A request: operations that the I/O thread does in order. While `busy` is set, only the thread may
   use this record. */
typedef struct dt__io_request {
    dt__files *files;
    const dt__file_op *ops; /* (n_ops) */
    int n_ops, at;          /* `at` is the next operation */
    int64_t done;           /* bytes of this operation that are transferred */
    int background;         /* 1: requests of offload go first */
    int busy, failed;
    struct dt__io_request *next;
    /* offload: the only operation; the name of the array, NULL if there is no request; device
       memory, if op.data is a host copy of device memory, else NULL */
    dt__file_op op;
    const char *what;
    void *device;
} dt__io_request;

enum {
    DT__STATE_0 = 0,
    DT__STATE_1,
    DT__MASTER,
    DT__PARAMS,
    DT__GRAD,
    DT__ARRAYS,
    DT__OFFLOAD_CHUNKS = 3
};

/* Buffers and transfers of one chunk of the offloaded update. */
typedef struct dt__offload_chunk {
    int bucket;
    size_t offset, count; /* range of elements of the bucket */
    void *buf[DT__ARRAYS];
    dt__io_request job[DT__ARRAYS];
} dt__offload_chunk;

typedef struct dt__disk dt__disk;
typedef struct dt__io_thread dt__io_thread;

/* HSDP (hybrid sharded data parallelism): shard groups with replicas. The ranks of the group `data`
   train the same parameters on different samples. Each shard group of n ranks divides the padded
   bucket into n equal shards; the ranks of a replica group hold the same shard:

                      shard 0   shard 1
       shard group    rank 0    rank 1      data group: ranks 0 to 5, shard_group = 2
       shard group    rank 2    rank 3      reduce-scatter along a row,
       shard group    rank 4    rank 5      then all-reduce along a column
                      replicas  replicas

   At stage 0 every rank works on the whole bucket. There are two kinds of buckets. Dense parameters
   are replicated on all ranks of ep: their data group is dp x ep x cp. Experts are sharded over ep:
   their data group is dp x cp. */
typedef struct dt__zero_groups {
    dt_comm *data, *shard, *replicas;
} dt__zero_groups;
enum { DT__DENSE = 0, DT__EXPERTS, DT__KINDS };
enum { DT__COMPARE_TP = DT__KINDS, DT__COMPARE_PP }; /* further kinds for dt__compare_ranks */

/* Training state of one bucket. The gradient of a bucket goes through these states in each step:

           EMPTY  <----------------------------- dt__zero_step_end -----------------------------+
             | first micro-batch                                                                |
             v                   stages 2, 3 and tree: after each but the last micro-batch      |
           ACCUMULATING  <---------------------------------------------------+                  |
             | last micro-batch; stages 2, 3 and tree: each micro-batch      |                  |
             v                                                               |                  |
           READY  ---- its turn: buckets are reduced from last to first ->  REDUCING -> REDUCED -+

       EMPTY         accumulated = 0
       ACCUMULATING  accumulated = 1: dt_bucket.grad or grad_shard holds the gradient of at least
                     one micro-batch; the backward writes the next micro-batch's gradient to
                     dt_bucket.micro_grad (dt_tensor.h)
       READY         ready = 1: the gradient is complete (dt__zero_on_grad_ready)
       REDUCING      `work` is set: the reduction runs while the backward continues
                     (dt__zero_reduce_start). With `tree` a bucket skips this state, because
                     dt__grad_tree_reduce completes the reduction before it returns
       REDUCED       reduced = 1: the gradient is summed over all ranks (dt__zero_reduce_finish) */
typedef struct dt__zero_bucket {
    dt_bucket *bucket;
    dt_comm *data_group, *shard_group, *replica_group;
    size_t offset, count; /* the shard that this rank reduces and updates */
    void *state[2];       /* optimizer state: (count) each, of the gradient's type */
    /* Master weights: (count) f32 copy of bf16 or f16 parameters; NULL for other types */
    void *master;
    /* stages 2, 3: (count) this rank's shard of the step's gradient; the first backward allocates
       it */
    void *grad_shard;
    size_t grad_bytes; /* bytes of grad_shard; 0 if grad_shard is only a buffer for the disk */
    /* ready: 1 if this micro-batch's gradient is complete. accumulated: 1 if grad_shard holds the
       sum of earlier micro-batches */
    int ready, accumulated;
    int reduced;      /* 1 if this step's gradient is summed over all ranks */
    void *micro_grad; /* stages 2, 3: this micro-batch's gradient, which is being reduced */
    dt_work *work;    /* pending collective: a reduction, or an all-gather after the update */
    /* stage 3: (padded) the gathered parameters; gather_work writes them */
    void *gathered;
    dt_work *gather_work; /* pending all-gather */
    void *host_shard;     /* (count) this rank's shard of the parameters in host memory, or NULL */
    dt__io_request disk_job; /* transfers this rank's shard of the parameters or of the state */
    /* transfers this rank's shard of the gradient, if the shard is on disk */
    dt__io_request grad_job;
    int holder_block; /* stage 3: the block that gathered the bucket; 0 outside blocks */
    void *levels;     /* tree: (n_levels, piece) partial sums of this rank's shard */
    size_t levels_bytes;
    size_t sums_at; /* index of the bucket's sums of squares in zero->sums */
    /* index that this bucket would have if a single rank held all pipeline stages */
    size_t pipeline_index;
    /* 1-bit Adam: [0] compression error of this rank as a worker, [1] its compression error as the
       server of its shard */
    void *errors[2];
    size_t error_bytes[2];
} dt__zero_bucket;

/* One all-gather of the previous micro-batch: which bucket was gathered, and in which block. The
   next micro-batch prefetches in the same order. */
typedef struct dt__gather_entry {
    int bucket, block;
} dt__gather_entry;
typedef struct dt__gather_plan {
    dt__gather_entry *items;
    int n, capacity, position;
} dt__gather_plan;

struct dt_zero {
    dt_ctx *ctx;
    dt_zero_desc desc;
    dt_mesh mesh;
    dt__zero_groups groups[DT__KINDS];
    dt_listener listener;
    dt__zero_bucket *buckets; /* (n_buckets) */
    int n_buckets;
    /* the pipeline stage whose micro-batch is being reduced; -1 if none */
    int reducing_stage;
    /* the bucket to reduce next, from the highest index down; -1 when no bucket is left */
    int next_bucket;
    int oldest_bucket; /* the bucket whose reduction has been pending longest */
    int states;
    const dt_kernels *update_kernels; /* kernels of the update */
    void *update_stream;
    /* 1: the step's gradients have been summed over pipeline stages too */
    int tied_summed;
    /* (n_stages,3) plans of each pipeline stage: for the forward, for the backward, and for the
       weight half of a split backward */
    dt__gather_plan *gather_plans;
    int n_stages;     /* this rank's last pipeline stage + 1 */
    int current_plan; /* the plan in use: 0, 1 or 2 (see gather_plans) */
    void *leaves;     /* tree: (ranks, piece) each rank's gradient of this rank's piece */
    size_t leaves_bytes;
    /* (n_sums) sums of squares, one for each DT_PIECE elements; sums of experts come last */
    double *sums;
    size_t n_sums, n_dense;
    double *bucket_sums;       /* (n_pipeline_buckets) each bucket's sum of squares */
    size_t n_pipeline_buckets; /* buckets of all pipeline stages */
    /* 1-bit Adam: the signs to send, then the received signs */
    void *messages;
    size_t messages_bytes;
    int64_t step;
    dt__disk *disk;            /* NVMe offload */
    dt__io_thread *io_thread;  /* NULL until offload or a background save needs it */
    int storing_bucket;        /* bucket whose gradient is being written to disk; -1 if none */
    dt__offload_chunk *chunks; /* (DT__OFFLOAD_CHUNKS) buffers of the offloaded update */
    size_t chunk_elements, chunk_bytes;
    double loss_scale; /* the current scale; 1 without loss scaling */
    /* good_steps: steps in a row that were not skipped, since the last change of the scale;
       hysteresis_left: number of further skipped steps until the scale falls, 1 if the scale falls
       in the next skipped step */
    int good_steps, hysteresis_left;
    int consecutive_skips;               /* skipped steps in a row */
    double skipped_scales[DT_MAX_SKIPS]; /* loss scales of the skipped steps */
};

/* 1-bit Adam (section 15). */
static int dt__onebit_frozen(const dt_zero *zero);
static dt_status dt__onebit_check(dt_ctx *ctx, const dt_zero_desc *d);
static dt_status dt__onebit_make(dt_zero *zero);
static void dt__onebit_free(dt_zero *zero);
static size_t dt__onebit_error_bytes(const dt_zero *zero, const dt_bucket *bucket);
static dt_status dt__onebit_square_sums(dt_zero *zero);
static int dt__onebit_at_fault(dt_zero *zero, const dt_bucket *bucket, size_t piece_index);
static dt_status dt__onebit_momentum(dt_zero *zero, dt__zero_bucket *z, double grad_scale);

/* Returns the size in bytes of one element of the gradients and of the optimizer state. */
static size_t dt__zero_element_size(const dt__zero_bucket *z) {
    return dt_dtype_size(z->bucket->grad_dtype);
}

/* Returns the address of an element of a gradient or of a state array. */
static void *dt__zero_element(const dt__zero_bucket *z, void *array, size_t element) {
    return (char *)array + element * dt__zero_element_size(z);
}

/* dt__zero_param_shard and dt__zero_grad_shard return the address of this rank's shard of the
   parameters and of the gradient. The parameters must not be on disk. */
static void *dt__zero_param_shard(const dt__zero_bucket *z) {
    if (z->host_shard) return z->host_shard;
    return (char *)z->bucket->shard +
           (z->offset - z->bucket->shard_offset) * dt_dtype_size(z->bucket->dtype);
}
static void *dt__zero_grad_shard(const dt__zero_bucket *z) {
    return z->grad_shard ? z->grad_shard : dt__zero_element(z, z->bucket->grad, z->offset);
}

static int dt__zero_has_master(const dt_bucket *bucket) {
    return bucket->dtype != bucket->grad_dtype && !bucket->frozen;
}

/* Returns the coordinate of a world rank along pp. */
static int dt__zero_pp_rank(const dt_zero *zero, int rank) {
    const dt_mesh_desc *n = &zero->mesh.sizes;
    return rank / (n->tp * n->cp * n->ep * n->dp);
}

/* Returns 1 if a group joins ranks that hold replicas of this rank's parameters, that is, ranks
   that differ only in dp, ep or cp. The function compares coordinates, because the group need not
   come from dt_mesh_make. */
static int dt__zero_has_replicas(const dt_zero *zero, const dt_comm *comm) {
    const dt_mesh *m = &zero->mesh;
    int found = 0;
    for (int i = 0; comm && i < dt_comm_size(comm); i++) {
        int rank = dt_comm_world_rank(comm, i);
        int copy = rank % m->sizes.tp == m->coord.tp && dt__zero_pp_rank(zero, rank) == m->coord.pp;
        found |= copy && rank != dt_comm_world_rank(comm, dt_comm_rank(comm));
    }
    return found;
}

static const dt_param_desc *dt__bucket_desc(const dt_zero *zero, const dt_bucket *bucket) {
    /* all parameters of a bucket have the same shards */
    return &dt_param_get(zero->ctx, bucket->first_param)->param->desc;
}

static int dt__is_expert(const dt_zero *zero, const dt_param_desc *d) {
    for (int c = 0; c < 3; c++)
        if (dt__zero_has_replicas(zero, d->shards[c].comm)) return 1;
    return 0;
}

static const dt__zero_groups *dt__bucket_groups(const dt_zero *zero, const dt_bucket *bucket) {
    return &zero->groups[dt__is_expert(zero, dt__bucket_desc(zero, bucket)) ? DT__EXPERTS
                                                                            : DT__DENSE];
}

/* Returns the number of shards of a bucket's optimizer state; 1 at stage 0. */
static int dt__zero_shards(const dt_zero *zero, const dt_bucket *bucket) {
    return zero->desc.stage >= 1 ? dt_comm_size(dt__bucket_groups(zero, bucket)->shard) : 1;
}

/* Tied embeddings. Returns the group of pipeline stages that share this bucket's parameters, for
   example an embedding that is also the output head; NULL if the bucket is not tied. The stages'
   gradients are partial sums, which dt__reduce_tied adds. */
static dt_comm *dt__tied_group(const dt_zero *zero, const dt_bucket *bucket) {
    const dt_grad_placement *grad_placements = dt__bucket_desc(zero, bucket)->grad_placements;
    for (int k = 0; k < 2; k++)
        for (int i = 0; grad_placements[k].comm && grad_placements[k].kind == DT_GRAD_PARTIAL &&
                        i < dt_comm_size(grad_placements[k].comm);
             i++)
            if (dt__zero_pp_rank(zero, dt_comm_world_rank(grad_placements[k].comm, i)) !=
                zero->mesh.coord.pp)
                return grad_placements[k].comm;
    return NULL;
}

/* Makes shard groups of desc.shard_group ranks, and replica groups. If shard_group does not divide
   the size of the experts' data group, the size of the experts' shard groups is the largest divisor
   of this size that is less than shard_group. */
static dt_status dt__zero_groups_make(dt_zero *zero) {
    dt_comm *data[DT__KINDS] = { zero->mesh.data, zero->mesh.expert_data };
    int ranks = dt_comm_size(data[0]),
        wanted = zero->desc.shard_group ? zero->desc.shard_group : ranks;
    if (wanted < 1 || ranks % wanted != 0)
        return dt_fail(zero->ctx, DT_ERR_ARG,
            "dt_zero_make: shard groups of %d ranks in a data group of %d: the size "
            "must divide it",
            wanted, ranks);
    for (int k = 0; k < DT__KINDS; k++) {
        dt__zero_groups *g = &zero->groups[k];
        int n = dt_comm_size(data[k]), rank = dt_comm_rank(data[k]);
        if (k > 0 && data[k] == data[0]) { /* without ep both kinds have the same groups */
            *g = zero->groups[0];
            continue;
        }
        g->data = g->shard = data[k];
        while (n % wanted != 0 || wanted > n) wanted--;
        if (zero->desc.stage == 0 || wanted == n || !zero->desc.shard_group) continue;
        g->shard = wanted == 1 ? NULL : dt_comm_split(data[k], rank / wanted, rank, "shard");
        g->replicas = dt_comm_split(data[k], rank % wanted, rank, "replicas");
        dt_comm_set_axis(g->shard, DT_AXIS_DP);
        dt_comm_set_axis(g->replicas, DT_AXIS_DP);
    }
    return dt_error(zero->ctx);
}

/* Dry runs and offload (section 14). */
static int dt__is_dry_run(const dt_zero *zero) { return zero->ctx->kernels.alloc == dt__dry_alloc; }
static int dt__on_disk(const char *target);
static int dt__in_host(const char *target);
static int dt__zero_offloads(const dt_zero *zero);
static dt_status dt__disk_open(dt_zero *zero);
static dt_status dt__disk_wait(dt_zero *zero, dt__io_request *job);
static dt_status dt__chunks_make(dt_zero *zero);
static dt_status dt__params_store(
    dt_zero *zero, dt__zero_bucket *z, dt_bucket *bucket, void *shard);
static dt_status dt__params_read_start(dt_zero *zero, dt__zero_bucket *z);
static dt_status dt__params_copy_out(
    dt_zero *zero, const dt_bucket *bucket, size_t at, void *host, size_t bytes);
static int dt__grads_on_disk(const dt_zero *zero);
static int dt__grad_on_disk(const dt_zero *zero, const dt_bucket *bucket);
static dt_status dt__grads_read_start(dt_zero *zero, dt__zero_bucket *z);
static dt_status dt__grads_write_start(dt_zero *zero, dt__zero_bucket *z);
static dt_status dt__grads_write_end(dt_zero *zero);
static dt_status dt__grads_copy_out(
    dt_zero *zero, dt__zero_bucket *z, size_t element, void *host, size_t count);

static dt_status dt__zero_bucket_make(dt_zero *zero, int u) {
    dt_ctx *ctx = zero->ctx;
    dt__zero_bucket *z = &zero->buckets[u];
    z->bucket = dt_bucket_get(ctx, u);
    const dt__zero_groups *groups = dt__bucket_groups(zero, z->bucket);
    z->data_group = groups->data;
    z->shard_group = groups->shard;
    z->replica_group = groups->replicas;
    size_t parts = (size_t)dt__zero_shards(zero, z->bucket);
    z->count = z->bucket->padded / parts;
    z->offset = parts > 1 ? (size_t)dt_comm_rank(z->shard_group) * z->count : 0;
    dt_mem mem = dt__in_host(zero->desc.offload_optim) ? DT_MEM_HOST : DT_MEM_OPTIM;
    size_t bytes = dt__on_disk(zero->desc.offload_optim) ? 0 : z->count * dt__zero_element_size(z);
    for (int s = 0; s < zero->states && !z->bucket->frozen && bytes; s++) {
        z->state[s] = dt_alloc(ctx, mem, bytes, "optimizer state");
        if (!z->state[s]) return dt_error(ctx);
        if (mem == DT_MEM_HOST)
            memset(z->state[s], 0, bytes);
        else if (dt__fill(ctx, z->bucket->grad_dtype, z->state[s], z->count, 0) != DT_OK)
            return dt_error(ctx);
    }
    if (dt__zero_has_master(z->bucket) && bytes)
        z->master = dt_alloc(ctx, mem, bytes, "master parameters");
    return dt_error(ctx);
}

/* Allocates zero->buckets, filled with zeros, unless it exists. Called when the number of buckets
   is known. */
static dt_status dt__zero_buckets_alloc(dt_zero *zero) {
    if (zero->buckets) return DT_OK;
    zero->n_buckets = dt_bucket_count(zero->ctx);
    size_t bytes = (size_t)zero->n_buckets * sizeof *zero->buckets;
    zero->buckets = (dt__zero_bucket *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "dt_zero_make");
    if (zero->buckets) memset(zero->buckets, 0, bytes);
    return dt_error(zero->ctx);
}

static dt_status dt__gather_doubles(dt_comm *comm, double *all, double mine);

/* Sets each bucket's pipeline_index: numbers the buckets of all pipeline stages, by stage, then by
   order of registration. */
static dt_status dt__pipeline_indices(dt_zero *zero) {
    dt_comm *pp = zero->mesh.pp;
    size_t ranks = (size_t)dt_comm_size(pp), stages = 1;
    double *all = (double *)dt_alloc(zero->ctx, DT_MEM_HOST, ranks * sizeof *all, "stages");
    if (all && dt__gather_doubles(pp, all, zero->n_stages) == DT_OK)
        for (size_t r = 0; r < ranks; r++)
            stages = (size_t)all[r] > stages ? (size_t)all[r] : stages;
    dt_free(zero->ctx, DT_MEM_HOST, all, ranks * sizeof *all);
    double *buckets = (double *)dt_alloc(
        zero->ctx, DT_MEM_HOST, stages * sizeof *buckets, "buckets of each stage");
    if (!buckets) return dt_error(zero->ctx);
    memset(buckets, 0, stages * sizeof *buckets);
    for (int u = 0; u < zero->n_buckets; u++)
        zero->buckets[u].pipeline_index = (size_t)buckets[zero->buckets[u].bucket->stage]++;
    dt_sum_doubles(pp, buckets, stages);
    for (size_t s = 0, first = 0; s < stages && dt_error(zero->ctx) == DT_OK; s++) {
        for (int u = 0; u < zero->n_buckets; u++)
            if ((size_t)zero->buckets[u].bucket->stage == s)
                zero->buckets[u].pipeline_index += first;
        first += (size_t)buckets[s];
        zero->n_pipeline_buckets = first;
    }
    dt_free(zero->ctx, DT_MEM_HOST, buckets, stages * sizeof *buckets);
    return dt_error(zero->ctx);
}

/* Allocates the sums of squares for the gradient norm, and sets each bucket's sums_at. */
static dt_status dt__norm_sums_make(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    for (int kind = 0; kind < DT__KINDS; kind++) {
        for (int u = 0; u < zero->n_buckets; u++) {
            dt__zero_bucket *z = &zero->buckets[u];
            if (dt__is_expert(zero, dt__bucket_desc(zero, z->bucket)) != kind) continue;
            z->sums_at = zero->n_sums;
            zero->n_sums += z->bucket->padded / DT_PIECE;
        }
        if (kind == DT__DENSE) zero->n_dense = zero->n_sums;
    }
    if (dt__pipeline_indices(zero) != DT_OK) return dt_error(ctx);
    zero->sums = (double *)dt_pin(ctx, zero->n_sums * sizeof *zero->sums, "sums of the norm");
    zero->bucket_sums = (double *)dt_alloc(
        ctx, DT_MEM_HOST, zero->n_pipeline_buckets * sizeof *zero->bucket_sums, "sums of the norm");
    return dt_error(ctx);
}

/* Adds up zero->sums over ranks: the sums of dense buckets over the group `dense`, the sums of
   experts over the group `experts`. */
static dt_status dt__norm_sum_kinds(dt_zero *zero, dt_comm *dense, dt_comm *experts) {
    if (dt_sum_doubles(dense, zero->sums, zero->n_dense) != DT_OK) return dt_error(zero->ctx);
    if (zero->n_sums == zero->n_dense) return DT_OK;
    return dt_sum_doubles(experts, zero->sums + zero->n_dense, zero->n_sums - zero->n_dense);
}

static dt_status dt__zero_buckets_make(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    if (dt__zero_buckets_alloc(zero) != DT_OK || (!zero->disk && dt__disk_open(zero) != DT_OK))
        return dt_error(ctx);
    for (int u = 0; u < zero->n_buckets; u++)
        if (dt__zero_bucket_make(zero, u) != DT_OK) return dt_error(ctx);
    return dt__norm_sums_make(zero) == DT_OK ? dt__chunks_make(zero) : dt_error(ctx);
}

/* Fails if a parameter is sharded over data-parallel ranks along an axis other than ep, or if it
   has a gradient placement over data-parallel ranks, which would sum the gradient twice. */
static dt_status dt__zero_check_params(dt_zero *zero) {
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        const dt_param_desc *d = &t->param->desc;
        for (int c = 0; c < 3; c++)
            if (d->shards[c].comm != zero->mesh.ep &&
                dt__zero_has_replicas(zero, d->shards[c].comm))
                return dt_fail(zero->ctx, DT_ERR_UNSUPPORTED,
                    "dt_zero_make: %s is sharded over '%s', whose ranks are data "
                    "parallel: only ep of the mesh can shard there; is .mesh the mesh that made "
                    "the "
                    "group?",
                    t->name, dt_comm_name(d->shards[c].comm));
        for (int k = 0; k < 2; k++)
            if (dt__zero_has_replicas(zero, d->grad_placements[k].comm))
                return dt_fail(zero->ctx, DT_ERR_UNSUPPORTED,
                    "dt_zero_make: %s has a gradient placement over '%s', along which "
                    "gradients are summed already",
                    t->name, dt_comm_name(d->grad_placements[k].comm));
    }
    return DT_OK;
}

// ==== 7. Comparing ranks ========================================================================

/* Describes an item, that is, something that ranks must have in common: item 0 is the optimizer,
   item i is parameter i - 1. If with_rank is set, the text also says which shard this rank
   holds. */
static dt__text dt__item_describe(const dt_zero *zero, int item, int with_rank) {
    static const char *const inits[] = { "zeros", "ones", "normal", "uniform" };
    const dt_zero_desc *z = &zero->desc;
    const dt_tensor *t = dt_param_get(zero->ctx, item - 1);
    const dt_scale_desc *c = &z->scale;
    double more[] = { c->init, c->growth, c->backoff, (double)c->interval, (double)c->hysteresis,
        c->min_scale, (double)z->keep_gathered, (double)z->no_overlap, (double)z->states,
        (double)dt__zero_offloads(zero),
        (double)(dt__on_disk(z->offload_params) || dt__in_host(z->offload_params)) };
    uint64_t others = dt__digest(1, more, sizeof more) & 0xffffff; /* digest of `more` */
    if (item == 0)
        return dt__format(
            "optimizer %d of stage %d/%d%s, scale %g, betas %g %g, eps %g, momentum %g, "
            "decay %g, clip %g, freeze %d, others #%06x",
            z->optimizer, z->stage, z->shard_group, z->tree ? ", tree" : "", z->loss_scale,
            z->beta1, z->beta2, z->eps, z->momentum, z->weight_decay, z->clip, z->freeze_steps,
            (unsigned)others);
    if (!t) return dt__format("nothing");
    const dt_param_info *p = t->param;
    const dt_param_desc *d = &p->desc;
    dt__text text = dt__format("%.40s %s %.40s %s %.9g in bucket %d%s%s", t->name,
        dt_dtype_name(t->dtype), dt__shape_text(p->full).s,
        p->init.kind >= 0 && p->init.kind < 4 ? inits[p->init.kind] : "?", p->init.scale,
        p->bucket->index, d->frozen ? ", frozen" : "", d->no_decay ? ", no_decay" : "");
    if (d->lr_scale != 0) dt__put(&text, ", lr_scale %g", d->lr_scale);
    for (int i = 0; i < 3; i++)
        if (d->shards[i].comm)
            dt__put(&text, ", shard %d:%d/%d", d->shards[i].dim,
                with_rank ? dt_comm_rank(d->shards[i].comm) : 0, dt_comm_size(d->shards[i].comm));
    for (int m = 0; m < 2; m++)
        if (d->grad_placements[m].comm)
            dt__put(&text, ", grad placement %d/%d", d->grad_placements[m].kind,
                dt_comm_size(d->grad_placements[m].comm));
    return text;
}

/* Returns the digest of an item: of its description if `values` is 0, of the parameter's values if
   `values` is 1. Returns the constant 1 if the ranks need not have the item in common. `kind` says
   over which group the ranks are compared, and which items:

       DT__DENSE, DT__EXPERTS   over the data group of this kind: the parameters of this kind
                                (DT__DENSE: also the optimizer)
       DT__COMPARE_TP           over tp: all items, but not the values of sharded parameters
       DT__COMPARE_PP           over pp: only the optimizer */
static uint64_t dt__item_digest(dt_zero *zero, int item, int values, int kind) {
    const dt_tensor *t = dt_param_get(zero->ctx, item - 1);
    char buffer[4096];
    uint64_t h = 1;
    if (kind < DT__KINDS && (t ? dt__is_expert(zero, &t->param->desc) : DT__DENSE) != kind)
        return h;
    if (kind == DT__COMPARE_PP && item > 0) return h;
    if (!values) {
        dt__text text = dt__item_describe(zero, item, kind < DT__KINDS);
        h = dt__digest(h, text.s, strlen(text.s));
        return t ? dt__digest(h, t->name, strlen(t->name)) : h;
    }
    if (!t) return h;
    const dt_param_info *p = t->param;
    const dt_bucket *bucket = p->bucket;
    size_t size = dt_dtype_size(t->dtype),
           begin = p->offset > bucket->shard_offset ? p->offset : bucket->shard_offset;
    size_t end = p->offset + p->count < bucket->shard_offset + bucket->shard_count
                     ? p->offset + p->count
                     : bucket->shard_offset + bucket->shard_count;
    size_t bytes = begin < end ? (end - begin) * size : 0;
    size_t first = (begin - bucket->shard_offset) * size; /* offset in the shard, in bytes */
    for (int c = 0; c < 3; c++)
        if (p->desc.shards[c].comm && kind == DT__COMPARE_TP) bytes = 0;
    if (zero->ctx->kernels.alloc == dt__dry_alloc) bytes = 0; /* dry run: all values are 0 */
    for (size_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < sizeof buffer ? bytes - at : sizeof buffer;
        if (dt__params_copy_out(zero, bucket, first + at, buffer, n) != DT_OK) break;
        h = dt__digest(h, buffer, n);
    }
    return h;
}

/* Gathers one number of each rank: sets all[r] to the value that rank r of the group passes as
   `mine`. */
static dt_status dt__gather_doubles(dt_comm *comm, double *all, double mine) {
    memset(all, 0, (size_t)dt_comm_size(comm) * sizeof *all);
    all[dt_comm_rank(comm)] = mine;
    return dt_sum_doubles(comm, all, (size_t)dt_comm_size(comm));
}

/* Compares all items with the items of the group's rank 0. Returns 1 if all are equal. Returns 0 if
   any item differs: *item is then the first item that differs, *rank the first rank on which this
   item differs. Rank 0 sends its digests as a sum of doubles (dt_sum_doubles) to which the other
   ranks add 0, because dt_comm_bytes does not count such a sum. A digest is sent as two halves of
   32 bits, which doubles hold exactly. */
static int dt__ranks_agree(
    dt_zero *zero, dt_comm *comm, int values, int kind, int *item, int *rank) {
    dt_ctx *ctx = zero->ctx;
    size_t ranks = (size_t)dt_comm_size(comm), max_count = 0, first = 0;
    if (ranks == 1) return 1;
    double *all = (double *)dt_alloc(ctx, DT_MEM_HOST, ranks * sizeof *all, "comparing ranks"),
           *theirs = NULL;
    if (all && dt__gather_doubles(comm, all, dt_param_count(ctx) + 1) == DT_OK)
        for (size_t r = 0; r < ranks; r++)
            max_count = (size_t)all[r] > max_count ? (size_t)all[r] : max_count;
    if (max_count)
        theirs =
            (double *)dt_alloc(ctx, DT_MEM_HOST, 4 * max_count * sizeof *theirs, "comparing ranks");
    double *mine = theirs ? theirs + 2 * max_count : NULL;
    for (size_t i = 0; theirs && i < max_count; i++) {
        uint64_t h = dt__item_digest(zero, (int)i, values, kind);
        mine[2 * i] = (double)(h >> 32);
        mine[2 * i + 1] = (double)(h & 0xffffffff);
        for (int k = 0; k < 2; k++)
            theirs[2 * i + k] = dt_comm_rank(comm) == 0 ? mine[2 * i + k] : 0;
    }
    *item = (int)max_count;
    if (theirs && dt_sum_doubles(comm, theirs, 2 * max_count) == DT_OK) {
        while (first < 2 * max_count && theirs[first] == mine[first]) first++;
        if (dt__gather_doubles(comm, all, (double)(first / 2)) == DT_OK)
            for (size_t r = 0; r < ranks; r++)
                if (all[r] < *item) *item = (int)all[r], *rank = (int)r;
    }
    dt_free(ctx, DT_MEM_HOST, theirs, 4 * max_count * sizeof *theirs);
    dt_free(ctx, DT_MEM_HOST, all, ranks * sizeof *all);
    return *item == (int)max_count;
}

/* Digests of a tied bucket. `group` is the digest of the ranks that share the bucket, `digest` the
   digest of the bucket's description and, on request, of its values. */
typedef struct dt__tied_bucket {
    double group, digest;
} dt__tied_bucket;

static dt__tied_bucket dt__tied_bucket_of(dt_zero *zero, const dt_bucket *bucket, int values) {
    const dt_comm *tied = dt__tied_group(zero, bucket);
    uint64_t group = 1, h = 1;
    for (int i = 0; i < dt_comm_size(tied); i++) {
        int rank = dt_comm_world_rank(tied, i);
        group = dt__digest(group, &rank, sizeof rank);
    }
    for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        double more[] = { (double)t->dtype, (double)t->param->count, t->param->desc.lr_scale,
            (double)(t->param->desc.no_decay != 0), (double)bucket->padded };
        h = dt__digest(dt__digest(h, t->name, strlen(t->name)), more, sizeof more);
        if (values) h ^= dt__item_digest(zero, i + 1, 1, DT__DENSE) * 3;
    }
    /* a double holds 52 bits exactly; `group` is made odd, because group 0 means no bucket */
    dt__tied_bucket u = { (double)(group >> 12 | 1), (double)(h >> 12) };
    return u;
}

/* Returns the k-th bucket (from 0) that a group shares, or NULL if there is none. `group` is the
   digest of the group's ranks. */
static const dt__tied_bucket *dt__tied_find(
    const dt__tied_bucket *buckets, size_t n, double group, int k) {
    for (size_t i = 0; i < n; i++)
        if (buckets[i].group == group && k-- == 0) return &buckets[i];
    return NULL;
}

/* Compares this rank with rank r of pp: fails unless the tied buckets that the two ranks share are
   equal and in the same order. */
static dt_status dt__tied_agree(
    dt_zero *zero, const dt__tied_bucket *mine, const dt__tied_bucket *theirs, size_t n, int r) {
    int world_rank = dt_comm_world_rank(zero->mesh.pp, r);
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt_bucket *bucket = zero->buckets[u].bucket;
        const dt_comm *tied = dt__tied_group(zero, bucket);
        int k = 0, shares = 0;
        if (bucket->frozen || !tied) continue;
        for (int i = 0; i < u; i++) k += mine[i].group == mine[u].group;
        for (int i = 0; i < dt_comm_size(tied); i++)
            shares |= dt_comm_world_rank(tied, i) == world_rank;
        const dt__tied_bucket *other =
            shares ? dt__tied_find(theirs, n, mine[u].group, k) : &mine[u];
        if (other && other->digest == mine[u].digest) continue;
        return dt_fail(zero->ctx, DT_ERR_COMM,
            "dt_zero: %s is tied over '%s', where rank %d has %s: stages that share "
            "parameters register them under the same names, in the same order, with the same "
            "values",
            dt_param_get(zero->ctx, bucket->first_param)->name, dt_comm_name(tied), world_rank,
            other ? "another one, or other values" : "none");
    }
    return DT_OK;
}

/* Compares tied buckets between pipeline stages. The order of the buckets must be the same on all
   stages, because each stage calls the sums of tied gradients in its own order of buckets. */
static dt_status dt__compare_tied(dt_zero *zero, int values) {
    dt_comm *pp = zero->mesh.pp;
    size_t ranks = (size_t)dt_comm_size(pp), me = (size_t)dt_comm_rank(pp),
           n = (size_t)zero->n_buckets;
    double max_count = 0;
    if (ranks == 1) return DT_OK;
    double *counts =
        (double *)dt_alloc(zero->ctx, DT_MEM_HOST, ranks * sizeof *counts, "comparing stages");
    if (counts && dt__gather_doubles(pp, counts, (double)n) == DT_OK)
        for (size_t r = 0; r < ranks; r++)
            max_count = counts[r] > max_count ? counts[r] : max_count;
    dt_free(zero->ctx, DT_MEM_HOST, counts, ranks * sizeof *counts);
    size_t bytes = ranks * (size_t)max_count * sizeof(dt__tied_bucket);
    dt__tied_bucket *all =
        (dt__tied_bucket *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "comparing stages");
    if (!all) return dt_error(zero->ctx);
    memset(all, 0, bytes);
    dt__tied_bucket *mine = all + me * (size_t)max_count;
    for (size_t u = 0; u < n; u++) {
        const dt_bucket *bucket = zero->buckets[u].bucket;
        if (!bucket->frozen && dt__tied_group(zero, bucket))
            mine[u] = dt__tied_bucket_of(zero, bucket, values);
    }
    dt_sum_doubles(pp, (double *)all, bytes / sizeof(double));
    for (size_t r = 0; r < ranks && dt_error(zero->ctx) == DT_OK; r++)
        dt__tied_agree(zero, mine, all + r * (size_t)max_count, (size_t)max_count, (int)r);
    dt_free(zero->ctx, DT_MEM_HOST, all, bytes);
    return dt_error(zero->ctx);
}

/* Returns the group of ranks that hold the same parameters of a kind; at stage 3, the ranks that
   hold the same shard of these parameters. */
static dt_comm *dt__replica_group(const dt_zero *zero, int kind) {
    const dt__zero_groups *g = &zero->groups[kind];
    return zero->desc.stage == 3 && dt_comm_size(g->shard) > 1 ? g->replicas : g->data;
}

/* Fails unless the ranks agree. dt_zero_make compares descriptions (`values` is 0); values are
   compared before the first step and after a checkpoint is loaded. Without this check, ranks with
   different parameters or different initial values would train, and nobody would notice. These must
   be equal: replicas over the data groups, unsharded parameters over tp, tied parameters over pp,
   and the optimizer on all ranks. */
static dt_status dt__compare_ranks(dt_zero *zero, int values) {
    enum { TEXT_BYTES = sizeof(((dt__text *)NULL)->s) };
    dt_ctx *ctx = zero->ctx;
    for (int kind = 0; kind <= DT__COMPARE_PP; kind++) {
        int data = kind < DT__KINDS;
        dt_comm *comm = kind == DT__COMPARE_TP   ? zero->mesh.tp
                        : kind == DT__COMPARE_PP ? zero->mesh.pp
                        : values                 ? dt__replica_group(zero, kind)
                                                 : zero->groups[kind].data;
        double both[2 * TEXT_BYTES];
        char text[2 * TEXT_BYTES];
        int item = 0, rank = 0;
        int alike = dt__ranks_agree(zero, comm, values, kind, &item, &rank);
        if (dt_error(ctx) != DT_OK) return dt_error(ctx);
        if (alike) continue;
        int first_rank = dt_comm_world_rank(comm, 0), other = dt_comm_world_rank(comm, rank);
        if (values)
            return dt_fail(ctx, DT_ERR_COMM,
                "dt_zero_step: rank %d starts from other values of %s than rank %d: load "
                "the same weights on every rank",
                other, dt_param_get(ctx, item - 1)->name, first_rank);
        dt__text mine = dt__item_describe(zero, item, data);
        int me = dt_comm_rank(comm);
        for (int i = 0; i < 2 * TEXT_BYTES; i++)
            both[i] = me == (i < TEXT_BYTES ? 0 : rank) && (size_t)i % TEXT_BYTES <= mine.used
                          ? mine.s[i % TEXT_BYTES]
                          : 0;
        if (dt_sum_doubles(comm, both, 2 * TEXT_BYTES) != DT_OK) return dt_error(ctx);
        for (int i = 0; i < 2 * TEXT_BYTES; i++) text[i] = (char)both[i];
        return dt_fail(ctx, DT_ERR_COMM,
            "dt_zero_make: rank %d has %s, where rank %d has %s: every rank registers the "
            "same parameters in the same order",
            other, text + TEXT_BYTES, first_rank, text);
    }
    return dt__compare_tied(zero, values);
}

// ==== 8. Gradient reduction =====================================================================

/* Starts the sum of a bucket's gradient over `comm`, the group of a gradient placement. The traffic
   counts for the axis `counted`: dp, whatever axis the group belongs to, or pp for tied
   parameters. */
static void dt__reduce_partial_start(dt__zero_bucket *z, dt_comm *comm, dt_axis counted) {
    dt_axis axis = comm->axis;
    void *shard = dt__zero_grad_shard(z);
    dt_comm_set_axis(comm, counted);
    z->work = dt_all_reduce_start(comm, shard, shard, z->count, z->bucket->grad_dtype, DT_SUM);
    dt_comm_set_axis(comm, axis);
}

/* Stages 2 and 3, and all stages with `tree`, reduce the gradient of every micro-batch. Stages 0
   and 1 without `tree` reduce the sum over micro-batches once a step. */
static int dt__zero_shards_grads(const dt_zero *zero) { return zero->desc.stage >= 2; }
static int dt__zero_reduces_each_micro(const dt_zero *zero) {
    return dt__zero_shards_grads(zero) || zero->desc.tree;
}

/* Gradient bucket: one reduction for many parameters (DDP; ZeRO, arXiv:1910.02054), because one
   large message costs less than many small ones. A bucket's gradient is summed over its data group,
   which consists of a shard group and the replicas, and over the groups of its gradient placements:

       over its shard group   stage 0        all-reduce       every rank keeps the sum
                              stage 1        reduce-scatter   once a step; rank r then uses shard r
                              stages 2, 3    reduce-scatter   each micro-batch; rank r keeps shard r
       over its replicas      all-reduce of the shard, once a step
       over the groups of its gradient placements, once a step

   All sums are in rank order. Stages 0 and 1 add the micro-batches first and then the ranks, stages
   2 and 3 add the ranks in each micro-batch; so 0 and 1 give the same bits, and so do 2 and 3.
   Section 4 says how many bytes each stage sends. Overlap of communication and computation: a
   reduction starts when the bucket's gradient is complete and runs while the backward computes the
   gradients of the other buckets (S. Li et al., "PyTorch Distributed", VLDB 2020). Stages 0 and 1
   wait for all reductions at the end of the backward. Stages 2 and 3 allow only two pending
   reductions, because each pending reduction holds the gradient of a full bucket. */
static dt_status dt__zero_reduce_start(dt_zero *zero, dt__zero_bucket *z) {
    dt_bucket *u = z->bucket;
    dt_dtype type = u->grad_dtype;
    void *full = z->micro_grad ? z->micro_grad : u->grad;
    /* once 1-bit Adam has frozen its second moment, ranks exchange the momentum, not gradients */
    if (dt__onebit_frozen(zero)) return dt_error(zero->ctx);
    z->work = zero->desc.stage == 0
                  ? dt_all_reduce_start(z->data_group, full, full, u->padded, type, DT_SUM)
                  : dt_reduce_scatter_start(z->shard_group, full,
                        dt__zero_element(z, full, z->offset), z->count, type, DT_SUM);
    return dt__grad_on_disk(zero, u) ? dt__grads_read_start(zero, z) : dt_error(zero->ctx);
}

/* Stages 2 and 3: allocates this rank's shard of a bucket's gradient. */
static dt_status dt__zero_grad_shard_alloc(dt_zero *zero, dt__zero_bucket *z) {
    if (z->grad_shard) return dt_error(zero->ctx);
    /* stored for dt_free, because the groups may be freed before grad_shard */
    z->grad_bytes = z->count * dt__zero_element_size(z);
    z->grad_shard = dt_alloc(zero->ctx, DT_MEM_GRADS, z->grad_bytes, "gradients");
    return dt_error(zero->ctx);
}

static dt_status dt__zero_work_wait(dt_zero *zero, dt__zero_bucket *z) {
    dt_status status = dt_wait(zero->ctx, z->work);
    z->work = NULL;
    return status;
}

static dt_status dt__zero_reduce_end(dt_zero *zero, dt__zero_bucket *z) {
    dt_status status = dt__zero_work_wait(zero, z);
    if (status != DT_OK || !z->micro_grad) return status;
    int on_disk = dt__grad_on_disk(zero, z->bucket);
    if ((on_disk ? dt__disk_wait(zero, &z->grad_job) : dt__zero_grad_shard_alloc(zero, z)) != DT_OK)
        return dt_error(zero->ctx);
    const void *shard = dt__zero_element(z, z->micro_grad, z->offset);
    status = dt__accumulate(
        zero->ctx, z->bucket->grad_dtype, z->grad_shard, shard, z->count, z->accumulated);
    dt__buffer_release(zero->ctx, z->micro_grad);
    z->micro_grad = NULL;
    z->accumulated = 1;
    return status == DT_OK && on_disk ? dt__grads_write_start(zero, z) : status;
}

/* Returns 1 if bucket u has a gradient in the micro-batch that is being reduced. */
static int dt__zero_is_reducing(const dt_zero *zero, int u) {
    const dt_bucket *bucket = zero->buckets[u].bucket;
    return !bucket->frozen && bucket->stage == zero->reducing_stage;
}

/* Completes the oldest reductions until at most `limit` are pending. */
static dt_status dt__zero_reduce_drain(dt_zero *zero, int limit) {
    int pending = 0;
    for (int u = zero->oldest_bucket; u > zero->next_bucket; u--)
        pending += dt__zero_is_reducing(zero, u);
    for (; zero->oldest_bucket > zero->next_bucket && pending > limit; zero->oldest_bucket--) {
        dt__zero_bucket *z = &zero->buckets[zero->oldest_bucket];
        if (!dt__zero_is_reducing(zero, zero->oldest_bucket)) continue;
        if (dt__zero_reduce_end(zero, z) != DT_OK) return dt_error(zero->ctx);
        pending--;
    }
    return dt_error(zero->ctx);
}

static dt_status dt__norm_local_sums(dt_zero *zero, int first, int end, int on_disk);

/* After the sum over its shard group, a shard is summed over the replicas (started here) and then
   over the groups of its gradient placements (in dt__reduce_replicas_end). */
static void dt__reduce_replicas_start(dt__zero_bucket *z) {
    void *shard = dt__zero_grad_shard(z);
    if (z->replica_group)
        z->work = dt_all_reduce_start(
            z->replica_group, shard, shard, z->count, z->bucket->grad_dtype, DT_SUM);
}

static dt_status dt__reduce_replicas_end(dt_zero *zero, dt__zero_bucket *z) {
    const dt_grad_placement *grad_placements = dt__bucket_desc(zero, z->bucket)->grad_placements;
    const dt_comm *tied = dt__tied_group(zero, z->bucket);
    if (dt__zero_work_wait(zero, z) != DT_OK) return dt_error(zero->ctx);
    for (int i = 0; i < 2; i++) {
        if (!grad_placements[i].comm || grad_placements[i].comm == tied ||
            grad_placements[i].kind != DT_GRAD_PARTIAL)
            continue;
        dt__reduce_partial_start(z, grad_placements[i].comm, DT_AXIS_DP);
        if (dt__zero_work_wait(zero, z) != DT_OK) return dt_error(zero->ctx);
    }
    return DT_OK;
}

/* Tied embeddings: adds the gradients of tied parameters over pipeline stages. Called after the
   last micro-batch, because a sum in the middle of the step could deadlock two stages that wait for
   each other. The sums of all tied buckets are started before the first wait, because stages may
   have the buckets in different orders. */
static dt_status dt__reduce_tied(dt_zero *zero) {
    for (int u = 0; u < zero->n_buckets && !zero->tied_summed; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        dt_comm *tied = z->bucket->frozen ? NULL : dt__tied_group(zero, z->bucket);
        if (tied) dt__reduce_partial_start(z, tied, DT_AXIS_PP);
    }
    for (int u = 0; u < zero->n_buckets && !zero->tied_summed; u++)
        dt__zero_work_wait(zero, &zero->buckets[u]);
    zero->tied_summed = 1;
    return dt_error(zero->ctx);
}

/* Sums gradients over replicas and over the groups of gradient placements, after the step's last
   micro-batch. Gradients on disk are skipped, because they were summed before they were written. */
static dt_status dt__zero_reduce_finish(dt_zero *zero) {
    /* with `tree`, the gradients are already summed over replicas */
    for (int u = zero->n_buckets - 1; u >= 0 && !zero->desc.tree; u--)
        if (dt__zero_is_reducing(zero, u) && !dt__grad_on_disk(zero, zero->buckets[u].bucket))
            dt__reduce_replicas_start(&zero->buckets[u]);
    for (int u = zero->n_buckets - 1; u >= 0; u--) {
        dt__zero_bucket *z = &zero->buckets[u];
        if (!dt__zero_is_reducing(zero, u)) continue;
        if (!dt__grad_on_disk(zero, z->bucket) && dt__reduce_replicas_end(zero, z) != DT_OK)
            return dt_error(zero->ctx);
        z->reduced = 1;
    }
    return dt_error(zero->ctx);
}

/* Binary tree over micro-batches (dt_zero_desc.tree). Leaf m is the gradient of micro-batch m of
   the step, counted over all ranks: leaf j * N + r is the gradient of the j-th micro-batch of rank
   r, where N is the number of ranks in the data group. Leaves are added in the way in which a
   binary counter counts: level k holds the sum of 2^k leaves, and when a second sum of 2^k leaves
   is complete, the two are added and move to level k + 1.

       leaf       0   1   2   3   4   5
       level 0     \ /     \ /     \ /
       level 1     0+1     2+3     4+5     after leaf 5: level 1 holds 4+5
       level 2        \   /         |
                     0+1+2+3        |      after leaf 5: level 2 holds 0+1+2+3
                            \      /
       total sum          level 1 + level 2

   The order of additions depends only on the index m of each leaf, so the bits are the same however
   the batch is split over ranks and micro-batches. For this, one rank must receive all
   leaves of an element before it adds them: a bucket is divided into N pieces, one for each rank,
   and each micro-batch's gradient goes through an all-to-all. For M leaves a rank has
   floor(log2 M) + 1 buffers, each the size of one piece. The pieces of a shard belong to the ranks
   that hold replicas of this shard.

   dt__grad_tree_segment returns the index of the piece that belongs to a rank of the data group. */
static size_t dt__grad_tree_segment(const dt__zero_bucket *z, int rank) {
    int n = dt_comm_size(z->shard_group), replicas = dt_comm_size(z->replica_group);
    return replicas > 1 ? (size_t)(rank % n * replicas + rank / n) : (size_t)rank;
}

static void *dt__grad_tree_level(const dt__zero_bucket *z, size_t segment, int level) {
    return dt__zero_element(z, z->levels, (size_t)level * segment);
}

static dt_status dt__grad_tree_add(
    dt_zero *zero, dt__zero_bucket *z, size_t segment, const void *leaf, size_t before) {
    const void *sum = leaf;
    int level = 0;
    for (; before >> level & 1; level++) {
        /* write to level + 1 if that level is free, else to `level`, whose old sum is an input of
           this addition and is not needed afterwards */
        void *out = dt__grad_tree_level(z, segment, before >> (level + 1) & 1 ? level : level + 1);
        const void *terms[2] = { dt__grad_tree_level(z, segment, level), sum };
        dt_reduce_args a = { .dtype = z->bucket->grad_dtype,
            .out = out,
            .in = terms,
            .n = 2,
            .count = segment,
            .op = DT_SUM };
        if (DT__KERNEL(zero->ctx, "the tree of gradients", reduce, &a) != DT_OK)
            return dt_error(zero->ctx);
        sum = out;
    }
    return level > 0 ? DT_OK
                     : dt__move(zero->ctx, dt__grad_tree_level(z, segment, 0), leaf,
                           segment * dt__zero_element_size(z));
}

/* Completes the tree of a bucket: adds the sums that are left in the levels of this rank's piece,
   lowest level first, then all-gathers the pieces of each shard. */
static dt_status dt__grad_tree_sum(
    dt_zero *zero, dt__zero_bucket *z, size_t segment, size_t leaves) {
    if (dt__zero_shards_grads(zero) && dt__zero_grad_shard_alloc(zero, z) != DT_OK)
        return dt_error(zero->ctx);
    char *shard = (char *)dt__zero_grad_shard(z), *sum = NULL;
    void *mine =
        shard + (dt__grad_tree_segment(z, dt_comm_rank(z->data_group)) * segment - z->offset) *
                    dt__zero_element_size(z);
    for (int level = 0; leaves >> level; level++) {
        void *more = dt__grad_tree_level(z, segment, level);
        if (!(leaves >> level & 1)) continue;
        const void *terms[2] = { more, sum };
        dt_reduce_args a = { .dtype = z->bucket->grad_dtype,
            .out = more,
            .in = terms,
            .n = 2,
            .count = segment,
            .op = DT_SUM };
        if (sum && DT__KERNEL(zero->ctx, "the tree of gradients", reduce, &a) != DT_OK)
            return dt_error(zero->ctx);
        sum = (char *)more;
    }
    z->accumulated = 1;
    if (dt__move(zero->ctx, mine, sum, segment * dt__zero_element_size(z)) != DT_OK)
        return dt_error(zero->ctx);
    if (zero->desc.stage > 0 && !z->replica_group) return DT_OK;
    return dt_all_gather(zero->desc.stage == 0 ? z->data_group : z->replica_group, mine, shard,
        segment, z->bucket->grad_dtype);
}

/* Allocates the levels of this bucket, and zero->leaves with the size of the largest bucket, unless
   they exist. `leaves` is the number of leaves in a step. */
static dt_status dt__grad_tree_alloc(
    dt_zero *zero, dt__zero_bucket *z, size_t segment, size_t leaves) {
    size_t n_levels = 0, max_bytes = 0;
    while (leaves >> n_levels) n_levels++;
    for (int u = 0; u < zero->n_buckets; u++) {
        size_t bytes = zero->buckets[u].bucket->padded * dt__zero_element_size(&zero->buckets[u]);
        max_bytes = bytes > max_bytes ? bytes : max_bytes;
    }
    if (dt_comm_size(z->data_group) > 1 && !zero->leaves) {
        zero->leaves = dt_alloc(zero->ctx, DT_MEM_COMM, max_bytes, "the tree's leaves");
        zero->leaves_bytes = max_bytes;
    }
    size_t bytes = n_levels * segment * dt__zero_element_size(z);
    if (z->levels_bytes == bytes) return dt_error(zero->ctx);
    dt_free(zero->ctx, DT_MEM_GRADS, z->levels, z->levels_bytes);
    z->levels = dt_alloc(zero->ctx, DT_MEM_GRADS, bytes, "the tree's levels");
    z->levels_bytes = z->levels ? bytes : 0;
    return dt_error(zero->ctx);
}

/* All-to-all: sends each rank its piece of `full`, this rank's gradient of the bucket. Fills
   zero->leaves with every rank's gradient of this rank's piece. */
static dt_status dt__grad_tree_exchange(
    dt_zero *zero, dt__zero_bucket *z, const char *full, size_t segment) {
    size_t bytes = segment * dt__zero_element_size(z);
    int ranks = dt_comm_size(z->data_group);
    char *sorted = z->replica_group
                       ? (char *)dt__buffer_acquire(zero->ctx, DT_MEM_COMM, (size_t)ranks * bytes)
                       : NULL;
    for (int r = 0; sorted && r < ranks; r++)
        dt__move(zero->ctx, sorted + (size_t)r * bytes, full + dt__grad_tree_segment(z, r) * bytes,
            bytes);
    if (dt_error(zero->ctx) == DT_OK)
        dt_all_to_all(
            z->data_group, sorted ? sorted : full, zero->leaves, segment, z->bucket->grad_dtype);
    if (sorted) dt__buffer_release(zero->ctx, sorted);
    return dt_error(zero->ctx);
}

/* Adds all ranks' gradients of a bucket in one micro-batch to the tree. last: 1 if this is the last
   micro-batch of the step; the tree is then completed. Otherwise the bucket's gradient starts from
   zero in the next micro-batch. */
static dt_status dt__grad_tree_reduce(dt_zero *zero, dt__zero_bucket *z, int last) {
    char *full = (char *)(z->micro_grad ? z->micro_grad : z->bucket->grad);
    size_t ranks = (size_t)dt_comm_size(z->data_group), segment = z->bucket->padded / ranks,
           micro = (size_t)zero->ctx->micro;
    if (dt__grad_tree_alloc(zero, z, segment, ranks * (size_t)zero->ctx->micro_count) != DT_OK)
        return dt_error(zero->ctx);
    const char *leaves = ranks > 1 ? (const char *)zero->leaves : full;
    if (ranks > 1 && dt__grad_tree_exchange(zero, z, full, segment) != DT_OK)
        return dt_error(zero->ctx);
    for (size_t r = 0; r < ranks; r++) {
        const char *leaf = leaves + r * segment * dt__zero_element_size(z);
        if (dt__grad_tree_add(zero, z, segment, leaf, micro * ranks + r) != DT_OK)
            return dt_error(zero->ctx);
    }
    if (z->micro_grad) dt__buffer_release(zero->ctx, z->micro_grad);
    z->micro_grad = NULL;
    if (last) return dt__grad_tree_sum(zero, z, segment, ranks * (micro + 1));
    z->bucket->accumulated = 0;
    return DT_OK;
}

/* Prepares the reductions of a pipeline stage's gradients of one micro-batch. */
static void dt__zero_reduce_begin(dt_zero *zero, int stage) {
    zero->reducing_stage = stage;
    zero->next_bucket = zero->n_buckets - 1;
    while (zero->next_bucket >= 0 && !dt__zero_is_reducing(zero, zero->next_bucket))
        zero->next_bucket--;
    zero->oldest_bucket = zero->next_bucket;
    for (int u = 0; u < zero->n_buckets; u++)
        if (dt__zero_is_reducing(zero, u)) zero->buckets[u].ready = 0;
}

static void dt__zero_free_gathered(dt_zero *zero, dt__zero_bucket *z);

/* Gradient accumulation and overlap: called when a bucket's gradient of a micro-batch is complete.
   last: 1 in the step's last micro-batch. Reduces buckets in descending order, because a backward
   usually completes them in this order. The order is fixed, so that all ranks start the same
   reductions in the same order, whatever their data. */
static void dt__zero_on_grad_ready(dt_ctx *ctx, dt_bucket *bucket, int last, void *user) {
    enum { MAX_PENDING = 2 };
    dt_zero *zero = (dt_zero *)user;
    dt__zero_bucket *ready = &zero->buckets[bucket->index];
    int tree = zero->desc.tree,
        max_pending = dt__zero_shards_grads(zero) ? MAX_PENDING : zero->n_buckets;
    if (ready->reduced || (ready->ready && zero->reducing_stage == bucket->stage)) {
        dt_fail(ctx, DT_ERR_ARG,
            "a gradient came after the step's last micro-batch: call dt_zero_step after it, and "
            "dt_micro(ctx, i, n) before each of n micro-batches");
        return;
    }
    /* the backward has read these parameters for the last time */
    if (!zero->desc.keep_gathered && ready->holder_block == 0) dt__zero_free_gathered(zero, ready);
    if (!last && !dt__zero_reduces_each_micro(zero)) return;
    if (zero->reducing_stage != bucket->stage) dt__zero_reduce_begin(zero, bucket->stage);
    ready->ready = 1;
    if (dt__zero_shards_grads(zero)) {
        ready->micro_grad = bucket->micro_grad;
        bucket->micro_grad = NULL;
    }
    while (zero->next_bucket >= 0 && (zero->buckets[zero->next_bucket].ready ||
                                         !dt__zero_is_reducing(zero, zero->next_bucket))) {
        dt__zero_bucket *z = &zero->buckets[zero->next_bucket];
        if (!dt__zero_is_reducing(zero, zero->next_bucket--)) continue;
        dt_status status =
            tree ? dt__grad_tree_reduce(zero, z, last) : dt__zero_reduce_start(zero, z);
        if (status == DT_OK && !tree)
            status = dt__zero_reduce_drain(zero, zero->desc.no_overlap ? 0 : max_pending);
        if (status != DT_OK) return;
    }
    if (zero->next_bucket >= 0 || (!tree && dt__zero_reduce_drain(zero, 0) != DT_OK)) return;
    if (dt__grads_write_end(zero) != DT_OK) return;
    if (last) dt__zero_reduce_finish(zero);
    zero->reducing_stage = -1;
}

// ==== 9. ZeRO-3 (FSDP): gather and release of parameters ========================================

/* ZeRO-3, Fully Sharded Data Parallel (FSDP, Y. Zhao et al., arXiv:2304.11277). Each rank keeps one
   shard of each bucket. The first op of a block that reads a parameter gathers the parameter's
   bucket. The end of the block frees the gathered copy:

       block 1           block 2                             block 3
       first read        first read: wait for the gather     ...
       |  compute        |  compute            |
       |  gather 2 ....> |  gather 3 .............> ...      prefetch: overlaps the compute
                  end of 1: free       end of 2: free

   A micro-batch gathers each bucket once in the forward and once in the backward. The recomputation
   of a block and its backward share one gather. With S bytes of parameters on N ranks, the gathers
   of a step of m micro-batches send 2 m S (N-1)/N bytes per rank. A backward that is split into an
   input half and a weight half gathers in each half. Parameters that are read outside of blocks
   stay gathered until the end of the forward, and in the backward until their gradient is complete.
   keep_gathered keeps every bucket gathered until the update: the gathers of a step then send
   S (N-1)/N bytes per rank, and gathered parameters take S bytes of memory.

   Prefetch: each micro-batch records the order of its gathers, and the next micro-batch prefetches
   in this order. Gathers of dt_read and other calls outside of ops are not recorded. Ranks that run
   the same ops start the same gathers in the same order. A rank that runs other ops is detected,
   because dt_comm.h compares the ranks' collective calls. */
static dt_status dt__zero_gather_start(dt_zero *zero, dt__zero_bucket *z) {
    const dt_bucket *u = z->bucket;
    if ((!z->gathered && dt__params_read_start(zero, z) != DT_OK) ||
        dt__disk_wait(zero, &z->disk_job) != DT_OK)
        return dt_error(zero->ctx);
    const void *mine =
        u->shard ? u->shard : (char *)z->gathered + u->shard_offset * dt_dtype_size(u->dtype);
    z->gather_work =
        dt_all_gather_start(z->shard_group, mine, z->gathered, u->shard_count, u->dtype);
    return dt_error(zero->ctx);
}

/* Frees the gathered parameters of a bucket, after waiting for a pending gather. */
static void dt__zero_free_gathered(dt_zero *zero, dt__zero_bucket *z) {
    const dt_bucket *u = z->bucket;
    if (!z->gathered || dt__disk_wait(zero, &z->disk_job) != DT_OK ||
        dt_wait(zero->ctx, z->gather_work) != DT_OK)
        return;
    z->gather_work = NULL;
    if (zero->desc.poison) dt__fill(zero->ctx, u->dtype, z->gathered, u->padded, NAN);
    dt__bucket_set_data(zero->ctx, z->bucket, NULL);
    dt__buffer_release(zero->ctx, z->gathered);
    z->gathered = NULL;
}

/* Frees the buckets that a block has gathered. If `block` is -1, frees all gathered buckets. */
static void dt__zero_free_held(dt_zero *zero, int block) {
    for (int u = 0; u < zero->n_buckets; u++)
        if (block < 0 || (zero->buckets[u].holder_block == block && zero->buckets[u].bucket->data))
            dt__zero_free_gathered(zero, &zero->buckets[u]);
}

/* Sets every gather plan back to its first entry, and frees prefetched buckets that no op has
   read. */
static void dt__gather_plans_rewind(dt_zero *zero) {
    for (int i = 0; i < 3 * zero->n_stages; i++) zero->gather_plans[i].position = 0;
    for (int u = 0; u < zero->n_buckets; u++)
        if (zero->buckets[u].gathered && !zero->buckets[u].bucket->data)
            dt__zero_free_gathered(zero, &zero->buckets[u]);
}

/* Records in the plan that a block reads a bucket, and advances the plan by one entry. Returns 1;
   0 if out of memory. */
static int dt__gather_plan_record(dt_zero *zero, dt__gather_plan *plan, int bucket, int block) {
    /* if the order differs from the order of the previous micro-batch, drop the rest of the plan */
    if (plan->position < plan->n && plan->items[plan->position].bucket != bucket)
        plan->n = plan->position;
    if (plan->position == plan->n) {
        dt__gather_entry *grown = (dt__gather_entry *)dt__grow(zero->ctx, plan->items, plan->n,
            &plan->capacity, sizeof *grown, "the order of gathers");
        if (!grown) return 0;
        plan->items = grown;
        plan->n++;
    }
    plan->items[plan->position].bucket = bucket;
    plan->items[plan->position++].block = block;
    return 1;
}

/* Prefetch: starts the remaining gathers of `block` and the gathers of the next block. If shards
   are on disk, also starts to read the shards of the block after the next. */
static dt_status dt__zero_prefetch(dt_zero *zero, const dt__gather_plan *plan, int block) {
    int others = 0;
    for (int i = plan->position; i < plan->n; i++) {
        dt__zero_bucket *z = &zero->buckets[plan->items[i].bucket];
        others += plan->items[i].block != block;
        block = plan->items[i].block;
        if (others > 2 || (others == 2 && !zero->disk)) break;
        if (others == 2 && !z->gathered && !z->bucket->shard) dt__params_read_start(zero, z);
        if (others < 2 && !z->gather_work && !z->bucket->data) dt__zero_gather_start(zero, z);
        if (dt_error(zero->ctx) != DT_OK) break;
    }
    return dt_error(zero->ctx);
}

static void dt__zero_on_gather(dt_ctx *ctx, dt_bucket *bucket, void *user) {
    dt_zero *zero = (dt_zero *)user;
    dt__zero_bucket *z = &zero->buckets[bucket->index];
    dt__gather_plan *plan = &zero->gather_plans[3 * bucket->stage + zero->current_plan];
    z->holder_block = ctx->entered_block ? ctx->entered_block->index : 0;
    if (!ctx->outside_op && !dt__gather_plan_record(zero, plan, bucket->index, z->holder_block))
        return;
    if (!z->gather_work && dt__zero_gather_start(zero, z) != DT_OK) return;
    if (dt_wait(ctx, z->gather_work) != DT_OK) return;
    z->gather_work = NULL;
    dt__bucket_set_data(ctx, bucket, z->gathered);
    if (!zero->desc.no_overlap && !ctx->outside_op) dt__zero_prefetch(zero, plan, z->holder_block);
}

static void dt__zero_on_release(
    dt_ctx *ctx, dt_bucket *bucket, int written, int unused, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (dt_error(ctx) != DT_OK || bucket->data == bucket->shard ||
        dt__zero_buckets_alloc(zero) != DT_OK)
        return;
    dt__zero_bucket *z = &zero->buckets[bucket->index];
    void *shard = z->gathered
                      ? (char *)z->gathered + bucket->shard_offset * dt_dtype_size(bucket->dtype)
                      : bucket->shard;
    if (written) dt__params_store(zero, z, bucket, shard);
    if (unused && z->gathered) dt__zero_free_gathered(zero, z);
}

static void dt__zero_on_enter(dt_ctx *ctx, const dt_event *event, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (event->phase == DT_FORWARD || event->block != 0 || dt_error(ctx) != DT_OK) return;
    dt__gather_plans_rewind(zero); /* the forward has ended */
    if (!zero->desc.keep_gathered) dt__zero_free_held(zero, 0);
    zero->current_plan = event->phase == DT_BACKWARD_WEIGHT ? 2 : 1;
}

static void dt__zero_on_leave(dt_ctx *ctx, const dt_event *event, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (dt_error(ctx) != DT_OK) return;
    /* after the recomputation of a block keep its buckets, because its backward reads them next */
    int goes_back = event->phase == DT_FORWARD && dt_recomputing(ctx);
    if (!zero->desc.keep_gathered && !goes_back) dt__zero_free_held(zero, event->block);
    if (event->phase == DT_FORWARD || event->block != 0) return;
    dt__gather_plans_rewind(zero);
    zero->current_plan = 0;
}

static void dt__zero_on_reset(dt_ctx *ctx, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (dt_error(ctx) != DT_OK) return;
    dt__gather_plans_rewind(zero);
    if (!zero->desc.keep_gathered) dt__zero_free_held(zero, 0);
}

// ==== 10. Gradient norm =========================================================================

/* Returns 1 if a call of dt__norm_local_sums with this value of on_disk includes the bucket: calls
   with 0 sum the squares of gradients in memory, calls with 1 those of gradients on disk. */
static int dt__norm_includes(const dt_zero *zero, const dt__zero_bucket *z, int on_disk) {
    return !z->bucket->frozen && dt__grad_on_disk(zero, z->bucket) == on_disk;
}

/* Sets zero->sums of the buckets [first, end): one sum of squares for each 1,024 elements of this
   rank's shards, and 0 for elements outside of these shards. The kernels write the sums to device
   memory. Sums whose places in zero->sums are adjacent are copied to the host together. */
static dt_status dt__norm_local_sums(dt_zero *zero, int first, int end, int on_disk) {
    dt_ctx *ctx = zero->ctx;
    size_t runs = 0, n = 0;
    for (int u = first; u < end; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        size_t all = z->bucket->padded / DT_PIECE;
        if (dt__norm_includes(zero, z, on_disk)) runs += z->count / DT_PIECE;
        if (z->bucket->frozen ||
            (dt__norm_includes(zero, z, on_disk) && z->count < z->bucket->padded))
            memset(zero->sums + z->sums_at, 0, all * sizeof *zero->sums);
    }
    double *from = (double *)dt_scratch(ctx, runs * sizeof *from), *at = from, *to = zero->sums;
    for (int u = first; u < end && runs > 0; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        if (!dt__norm_includes(zero, z, on_disk)) continue;
        dt_square_sums_args a = { z->bucket->grad_dtype, at, dt__zero_grad_shard(z), z->count };
        if (!from || DT__KERNEL(ctx, "the gradient norm", square_sums, &a) != DT_OK)
            return dt_error(ctx);
        at += z->count / DT_PIECE;
    }
    for (int u = first; u < end && runs > 0; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        double *dest = zero->sums + z->sums_at + z->offset / DT_PIECE;
        if (!dt__norm_includes(zero, z, on_disk)) continue;
        if (dest != to + n) { /* not adjacent to the previous sums: start a new copy */
            dt__move(ctx, to, from, n * sizeof *from);
            from += n;
            to = dest;
            n = 0;
        }
        n += z->count / DT_PIECE;
    }
    if (runs > 0) dt__move(ctx, to, from, n * sizeof *from);
    /* sync after a failure too, so that no pending copy writes to zero->sums later */
    dt_status status = runs > 0 ? dt__sync(ctx) : DT_OK;
    return status == DT_OK ? dt_error(ctx) : status;
}

/* Sets zero->sums of all buckets to the same values on all ranks of the shard group. At stage 0
   every rank computes all sums. At other stages one rank computes each sum and the other ranks add
   0, which changes no bit, so the bits are the same at every stage. For gradients on disk,
   zero->sums was set before the gradients were written. */
static dt_status dt__norm_square_sums(dt_zero *zero) {
    if (dt__norm_local_sums(zero, 0, zero->n_buckets, 0) != DT_OK) return dt_error(zero->ctx);
    if (dt__onebit_frozen(zero)) return dt__onebit_square_sums(zero);
    if (zero->desc.stage == 0) return DT_OK;
    return dt__norm_sum_kinds(zero, zero->groups[DT__DENSE].shard, zero->groups[DT__EXPERTS].shard);
}

/* Sums each entry of zero->bucket_sums over the groups that shard the bucket's parameters, for
   example tp. Each element of the full model must count once. Therefore replicas are not summed,
   and of several tied copies only the first counts. There is one collective for each bucket and
   group, in the same order on every rank. */
static dt_status dt__norm_sum_shards(dt_zero *zero) {
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        double *total = &zero->bucket_sums[z->pipeline_index];
        for (int c = 0; c < 3; c++) {
            dt_comm *comm = dt__bucket_desc(zero, z->bucket)->shards[c].comm;
            if (comm && dt_sum_doubles(comm, total, 1) != DT_OK) return dt_error(zero->ctx);
        }
        if (dt_comm_rank(dt__tied_group(zero, z->bucket)) > 0) *total = 0;
    }
    return DT_OK;
}

/* Sets zero->bucket_sums: adds the entries of zero->sums of each bucket in ascending order. Each
   addition needs the result of the previous addition for the same bucket. To hide the latency, four
   buckets are added at once, each in one lane. A lane without a bucket repeats another lane's
   additions and discards the result. */
static void dt__norm_bucket_sums(dt_zero *zero) {
    enum { LANES = 4 };
    const double *next_sum[LANES];
    double sum[LANES] = { 0 }, *total[LANES] = { NULL };
    size_t left[LANES] = { 0 };
    for (int u = 0, busy = 0; busy >= 0;) {
        busy = -1;
        for (int t = 0; t < LANES; t++) {
            if (total[t] && left[t] == 0) {
                *total[t] = sum[t];
                total[t] = NULL;
            }
            if (!total[t] && u < zero->n_buckets) {
                const dt__zero_bucket *z = &zero->buckets[u++];
                total[t] = &zero->bucket_sums[z->pipeline_index];
                next_sum[t] = zero->sums + z->sums_at;
                left[t] = z->bucket->padded / DT_PIECE;
                sum[t] = 0;
            }
            if (total[t] && (busy < 0 || left[t] < left[busy])) busy = t;
        }
        size_t n = busy < 0 ? 0 : left[busy];
        for (int t = 0; t < LANES && busy >= 0; t++)
            if (!total[t]) next_sum[t] = next_sum[busy];
        for (size_t i = 0; i < n; i++)
            for (int t = 0; t < LANES; t++) sum[t] += *next_sum[t]++;
        for (int t = 0; t < LANES; t++) left[t] -= total[t] ? n : 0;
    }
}

/* Gradient norm. Sets *norm to the 2-norm of the gradients, which still contain the loss scale. The
   norm is infinite or NaN if an element is infinite or NaN. Each bucket's sum comes from the
   pipeline stage that holds the bucket. The sums are added in the order of pipeline_index, so the
   bits do not depend on the number of pipeline stages. */
static dt_status dt__grad_norm(dt_zero *zero, double *norm) {
    double total = 0;
    if (dt__norm_square_sums(zero) != DT_OK) return dt_error(zero->ctx);
    memset(zero->bucket_sums, 0, zero->n_pipeline_buckets * sizeof *zero->bucket_sums);
    dt__norm_bucket_sums(zero);
    if (dt__norm_sum_shards(zero) != DT_OK) return dt_error(zero->ctx);
    if (dt_sum_doubles(zero->mesh.pp, zero->bucket_sums, zero->n_pipeline_buckets) != DT_OK)
        return dt_error(zero->ctx);
    for (size_t i = 0; i < zero->n_pipeline_buckets; i++) total += zero->bucket_sums[i];
    *norm = sqrt(total);
    return DT_OK;
}

/* The first element of the gradients that is not finite, or whose square is not finite. */
typedef struct dt__bad_grad {
    int rank;              /* world rank; -1 if only the sum of all squares overflows */
    int param;             /* index of the parameter */
    double element, value; /* element: its index in the parameter's local slice on rank `rank` */
} dt__bad_grad;

/* Sets *fault to the first bad element of a piece, in this rank's shard. A piece has 1,024
   elements; `piece` counts pieces from the start of the bucket. */
static dt_status dt__bad_grad_locate(
    dt_zero *zero, dt__zero_bucket *z, size_t piece, dt__bad_grad *fault) {
    double copy[DT_PIECE]; /* f32 or f64 */
    size_t bad = 0, at = piece * DT_PIECE;
    if (dt__grads_copy_out(zero, z, at - z->offset, copy, DT_PIECE) != DT_OK)
        return dt_error(zero->ctx);
    while (bad < DT_PIECE && isfinite(dt__number(z->bucket->grad_dtype, copy, bad))) bad++;
    for (size_t i = 0, largest = 0; bad == DT_PIECE && i <= DT_PIECE;
         i++) { /* if all are finite, find the largest: its square is not finite */
        if (i == DT_PIECE)
            bad = largest;
        else if (fabs(dt__number(z->bucket->grad_dtype, copy, i)) >
                 fabs(dt__number(z->bucket->grad_dtype, copy, largest)))
            largest = i;
    }
    const dt_tensor *t = dt_param_get(zero->ctx, z->bucket->first_param);
    for (int p = 1; p < z->bucket->n_params; p++) {
        const dt_tensor *later = dt_param_get(zero->ctx, z->bucket->first_param + p);
        if (later->param->offset <= at + bad) t = later;
    }
    fault->rank = dt_ctx_rank(zero->ctx);
    fault->param = t->param->index;
    fault->element = (double)(at + bad - t->param->offset);
    fault->value = dt__number(z->bucket->grad_dtype, copy, bad);
    return DT_OK;
}

/* Sets *fault on every rank to the bad element of the first rank that has a bad element. Sets
   fault->rank to -1 if no rank has a bad element. */
static dt_status dt__bad_grad_find(dt_zero *zero, dt__bad_grad *fault) {
    enum { EACH = 4 };
    dt_comm *world = zero->mesh.world;
    size_t ranks = (size_t)dt_comm_size(world), rank = (size_t)dt_comm_rank(world),
           bytes = EACH * ranks * 8;
    memset(fault, 0, sizeof *fault);
    fault->rank = -1;
    for (int u = 0; u < zero->n_buckets && fault->rank < 0; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        size_t i = z->offset / DT_PIECE, end = (z->offset + z->count) / DT_PIECE;
        while (
            i < end && (isfinite(zero->sums[z->sums_at + i]) ||
                           (dt__onebit_frozen(zero) && !dt__onebit_at_fault(zero, z->bucket, i))))
            i++;
        if (i < end && !z->bucket->frozen && dt__bad_grad_locate(zero, z, i, fault) != DT_OK)
            return dt_error(zero->ctx);
    }
    double *all = (double *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "the first bad gradient");
    if (!all) return dt_error(zero->ctx);
    memset(all, 0, bytes);
    /* send a code, not the value: the ranks' arrays are summed, and a NaN would spoil the sum */
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

static dt__text dt__bad_grad_text(const dt_zero *zero, const dt__bad_grad *fault) {
    if (fault->rank < 0) return dt__format("the sum of all squares is too large");
    return dt__format("the first gradient %s is element %.0f of %.80s on rank %d",
        isnan(fault->value) ? "that is not finite, a NaN,"
        : isinf(fault->value)
            ? fault->value > 0 ? "that is not finite, an Inf," : "that is not finite, a -Inf,"
            : "whose square is too large",
        fault->element, dt_param_get(zero->ctx, fault->param)->name, fault->rank);
}

/* Fails the run, because the gradient norm is not finite and there is no loss scale. The rank that
   holds the bad element fails; the other ranks wait in a barrier until they learn of that rank's
   failure. */
static dt_status dt__bad_grad_fail(dt_zero *zero, const dt__bad_grad *fault, double norm) {
    if (fault->rank >= 0 && fault->rank != dt_ctx_rank(zero->ctx))
        return dt_barrier(zero->mesh.world);
    return dt_fail(zero->ctx, DT_ERR_NUMERIC, "step %lld: the gradient norm is %g; %s",
        (long long)zero->step + 1, norm, dt__bad_grad_text(zero, fault).s);
}

// ==== 11. Loss scaling ==========================================================================

static void dt__scale_set(dt_zero *zero, double scale) {
    zero->loss_scale = scale;
    zero->good_steps = 0;
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
    /* summed over all ranks, because the last pipeline stage must scale the loss even if only other
       stages have f16 parameters */
    dt_sum_doubles(zero->mesh.world, &f16, 1);
    if (zero->desc.loss_scale == 0 && f16 > 0) zero->desc.loss_scale = DT_SCALE_DYNAMIC;
    if (d->init == 0) d->init = 65536;
    if (d->growth == 0) d->growth = 2;
    if (d->backoff == 0) d->backoff = 0.5;
    if (d->interval == 0) d->interval = 2000;
    if (d->hysteresis == 0) d->hysteresis = 1;
    if (d->min_scale == 0) d->min_scale = 1;
    zero->hysteresis_left = d->hysteresis;
    dt__scale_set(zero, dt__scale_is_dynamic(zero)  ? d->init
                        : zero->desc.loss_scale > 0 ? zero->desc.loss_scale
                                                    : 1);
}

static void dt__scale_good(dt_zero *zero) {
    const dt_scale_desc *d = &zero->desc.scale;
    zero->consecutive_skips = 0;
    if (++zero->good_steps < d->interval || !dt__scale_is_dynamic(zero)) return;
    zero->hysteresis_left = d->hysteresis;
    dt__scale_set(zero, zero->loss_scale * d->growth);
}

/* Loss scaling: skips a step whose gradients are not finite, and lowers the scale. Every rank calls
   dt__scale_skip and dt__scale_good with the same values, so the scales of all ranks stay equal:

       dt__scale_skip   if hysteresis_left > 1, decrements hysteresis_left;
                        else scale = max(scale * backoff, min_scale)
       dt__scale_good   after `interval` steps in a row that were not skipped: scale *= growth,
                        hysteresis_left = hysteresis */
static dt_status dt__scale_skip(dt_zero *zero, const dt__bad_grad *fault) {
    const dt_scale_desc *d = &zero->desc.scale;
    double before = zero->loss_scale, lower = zero->loss_scale * d->backoff;
    zero->skipped_scales[zero->consecutive_skips++] = before;
    zero->good_steps = 0;
    if (zero->hysteresis_left > 1)
        zero->hysteresis_left--;
    else if (dt__scale_is_dynamic(zero))
        dt__scale_set(zero, lower > d->min_scale ? lower : d->min_scale);
    int reports =
        fault->rank < 0 ? dt_ctx_rank(zero->ctx) == 0 : dt_ctx_rank(zero->ctx) == fault->rank;
    if (reports)
        dt_log(zero->ctx, DT_LOG_NOTICE, "step %lld skipped: %s; loss scale %g -> %g",
            (long long)zero->step + 1, dt__bad_grad_text(zero, fault).s, before, zero->loss_scale);
    if (zero->consecutive_skips < DT_MAX_SKIPS) return DT_OK;
    if (!reports) return dt_barrier(zero->mesh.world);
    dt__text history = dt__format("with loss scales");
    for (int i = 0; i < DT_MAX_SKIPS; i++) dt__put(&history, " %.6g", zero->skipped_scales[i]);
    return dt_fail(zero->ctx, DT_ERR_NUMERIC,
        "step %lld was skipped %d times in a row, %s: no scale helps; %s",
        (long long)zero->step + 1, (int)DT_MAX_SKIPS, history.s, dt__bad_grad_text(zero, fault).s);
}

// ==== 12. Optimizer update ======================================================================

/* Consecutive elements of this rank's shard of a bucket. Each array begins at the first of these
   elements. */
typedef struct dt__update_span {
    size_t offset, count; /* range of elements of the bucket */
    void *grad, *state[2];
    void *master; /* NULL without master weights: the update then changes `values` directly */
    void *values;
} dt__update_span;

/* Runs an update kernel on the device, or on the CPU if the optimizer state is offloaded. `what` is
   a text for messages, `k` the name of the kernel in dt_kernels. */
#define DT__UPDATE(zero, what, k, args) \
    dt__kernel_done((zero)->ctx, (what), NULL, #k, \
        (zero)->update_kernels->k ? (zero)->update_kernels->k((args), (zero)->update_stream) \
                                  : DT_ERR_UNSUPPORTED)

/* Batch of updates: adamw updates of a bucket's parameters that are launched together. */
enum { DT__UPDATE_BATCH = 32 };
typedef struct dt__update_batch {
    int n;
    const char *name; /* name of the first parameter, for messages */
    dt_adamw_args adamw[DT__UPDATE_BATCH];
} dt__update_batch;

static dt_status dt__update_batch_flush(dt_zero *zero, dt__update_batch *updates) {
    for (int i = 1; i < updates->n; i++) updates->adamw[i - 1].next = &updates->adamw[i];
    int waited = updates->n > 0;
    updates->n = 0;
    return waited ? DT__UPDATE(zero, updates->name, adamw, updates->adamw) : dt_error(zero->ctx);
}

/* Updates one parameter. An update by AdamW or Adam is only added to the batch, which
   dt__update_batch_flush launches. `narrow` receives the result rounded to the parameter's type;
   NULL if f->param already has the parameter's type. */
static dt_status dt__zero_update_param(
    dt_zero *zero, dt__update_batch *batch, const dt_update_args *f, void *narrow) {
    const dt_zero_desc *d = &zero->desc;
    dt_dtype type = dt_grad_dtype(f->tensor);
    if (d->optimizer == DT_OPTIMIZER_CUSTOM) {
        dt_cast_args a = { .dtype = f->tensor->dtype,
            .from = type,
            .out = narrow,
            .in = f->param,
            .count = f->count };
        if (dt__is_dry_run(zero)) return DT_OK;
        dt_status status = d->update(f, d->user);
        if (status != DT_OK) return dt_fail(zero->ctx, status, "the update of %s", f->tensor->name);
        return narrow ? DT__UPDATE(zero, f->tensor->name, cast, &a) : DT_OK;
    }
    if (d->optimizer == DT_SGD) {
        dt_sgd_args a = { .dtype = type,
            .param = f->param,
            .grad = f->grad,
            .momentum_buffer = f->state[0],
            .count = f->count,
            .lr = f->lr,
            .momentum = d->momentum,
            .weight_decay = f->weight_decay,
            .grad_scale = f->grad_scale,
            .step = f->step,
            .model_dtype = f->tensor->dtype,
            .model_param = narrow };
        return DT__UPDATE(zero, f->tensor->name, sgd, &a);
    }
    if (dt__onebit_frozen(zero)) {
        dt_frozen_adam_args a = { .dtype = type,
            .param = f->param,
            .m = f->state[0],
            .v = f->state[1],
            .count = f->count,
            .lr = f->lr,
            .eps = d->eps,
            .weight_decay = f->weight_decay,
            .model_dtype = f->tensor->dtype,
            .model_param = narrow };
        return DT__UPDATE(zero, f->tensor->name, frozen_adam, &a);
    }
    /* INT64_MAX turns the bias correction off, because 1-bit Adam has none */
    int64_t step = d->optimizer == DT_ONEBIT_ADAM ? INT64_MAX : f->step;
    dt_adamw_args a = { .dtype = type,
        .param = f->param,
        .grad = f->grad,
        .m = f->state[0],
        .v = f->state[1],
        .count = f->count,
        .lr = f->lr,
        .beta1 = d->beta1,
        .beta2 = d->beta2,
        .eps = d->eps,
        .weight_decay = f->weight_decay,
        .grad_scale = f->grad_scale,
        .step = step,
        .coupled = d->optimizer == DT_ADAM,
        .model_dtype = f->tensor->dtype,
        .model_param = narrow };
    if (batch->n == 0) batch->name = f->tensor->name;
    batch->adamw[batch->n++] = a;
    return batch->n == DT__UPDATE_BATCH ? dt__update_batch_flush(zero, batch) : dt_error(zero->ctx);
}

/* Updates the elements of the span, parameter by parameter. */
static dt_status dt__zero_update_span(
    dt_zero *zero, dt__zero_bucket *z, const dt__update_span *s, double lr, double grad_scale) {
    const dt_bucket *u = z->bucket;
    dt__update_batch batch;
    size_t size = dt__zero_element_size(z), narrow_size = dt_dtype_size(u->dtype),
           end = s->offset + s->count;
    batch.n = 0;
    for (int i = u->first_param; i < u->first_param + u->n_params; i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        const dt_param_info *p = t->param;
        size_t from = p->offset > s->offset ? p->offset : s->offset;
        size_t to = p->offset + p->count < end ? p->offset + p->count : end, at = from - s->offset;
        if (from >= to) continue;
        int decays = p->full.nd >= 2 && !p->desc.no_decay;
        /* NULL if only the master weights are updated */
        char *value = s->values ? (char *)s->values + at * narrow_size : NULL;
        void *updated = s->master ? (char *)s->master + at * size : value;
        dt_update_args f = { .ctx = zero->ctx,
            .tensor = t,
            .offset = from - p->offset,
            .count = to - from,
            .param = updated,
            .grad = (char *)s->grad + at * size,
            .state = { NULL, NULL },
            .lr = lr * (p->desc.lr_scale != 0 ? p->desc.lr_scale : 1),
            .grad_scale = grad_scale,
            .weight_decay = decays ? zero->desc.weight_decay : 0,
            .step = zero->step + 1 };
        for (int k = 0; k < zero->states; k++) f.state[k] = (char *)s->state[k] + at * size;
        if (dt__zero_update_param(zero, &batch, &f, s->master ? value : NULL) != DT_OK)
            return dt_error(zero->ctx);
    }
    return dt__update_batch_flush(zero, &batch);
}

/* Mixed precision with master weights (arXiv:1710.03740): updates this rank's shard of a bucket.
   The update changes the f32 master weight, and rounds the result to the 16-bit parameter. In 16
   bits, updates much smaller than the weight would be lost:

       grad f32 --> master f32, m, v --> round --> parameter bf16 or f16 */
static dt_status dt__zero_update_bucket(
    dt_zero *zero, dt__zero_bucket *z, double lr, double grad_scale) {
    const dt_bucket *u = z->bucket;
    dt__update_span shard = { .offset = z->offset,
        .count = z->count,
        .grad = dt__zero_grad_shard(z),
        .state = { z->state[0], z->state[1] },
        .master = z->master,
        .values = dt__zero_param_shard(z) };
    dt_cast_args widen = { .dtype = u->grad_dtype,
        .from = u->dtype,
        .out = z->master,
        .in = shard.values,
        .count = z->count };
    /* the first step copies the parameters to the master weights, so the program can load
       parameters before the first step */
    if (z->master && zero->step == 0 &&
        DT__KERNEL(zero->ctx, "master parameters", cast, &widen) != DT_OK)
        return dt_error(zero->ctx);
    return dt__zero_update_span(zero, z, &shard, lr, grad_scale);
}

static dt_status dt__offload_update(dt_zero *zero, double lr, double grad_scale);

/* Updates all buckets. ZeRO-1 and ZeRO-2 all-gather each bucket's parameters while the next bucket
   is updated. */
static dt_status dt__zero_update_all(dt_zero *zero, double lr, double grad_scale) {
    int streams = dt__zero_offloads(zero);
    if (streams && dt__offload_update(zero, lr, grad_scale) != DT_OK) return dt_error(zero->ctx);
    for (int u = 0; u <= zero->n_buckets; u++) {
        dt__zero_bucket *z = u < zero->n_buckets ? &zero->buckets[u] : NULL,
                        *before = u > 0 ? &zero->buckets[u - 1] : NULL;
        int signs = z && !z->bucket->frozen && dt__onebit_frozen(zero);
        if (signs && dt__onebit_momentum(zero, z, grad_scale) != DT_OK) return dt_error(zero->ctx);
        if (z && !z->bucket->frozen && !streams &&
            dt__zero_update_bucket(zero, z, lr, grad_scale) != DT_OK)
            return dt_error(zero->ctx);
        if (before && dt_wait(zero->ctx, before->work) != DT_OK) return dt_error(zero->ctx);
        if (before) before->work = NULL;
        if (!z || z->bucket->frozen || (zero->desc.stage != 1 && zero->desc.stage != 2)) continue;
        z->work = dt_all_gather_start(
            z->shard_group, dt__zero_param_shard(z), z->bucket->data, z->count, z->bucket->dtype);
    }
    return dt_error(zero->ctx);
}

// ==== 13. I/O thread ============================================================================

/* I/O thread. A rank has at most one. Offload to a folder and background saves start it, and share
   it. Requests wait in one queue; those of offload go first, because a step waits for them:

       offload          read, read, write --+
                                            +--> queue --> one piece at a time --> io table
       background save  write, ..., fsync --+

   A piece is a transfer of at most DT__IO_BUFFER bytes, or one fsync, rename or other operation.
   After each piece the thread takes the first request of the queue again, so a request of offload
   waits for at most one piece of a save. A save writes DT__SYNC_BYTES to the disk before it goes
   on; otherwise its fsync at the end would write everything at once and would delay offload for
   seconds.

   If a disk access hangs, the rank abandons the thread. The thread has copied to its own memory all
   that the access needs, so the rank can free the rest. When the access returns, the thread closes
   the descriptors that the rank has left to it, and ends; the thread's own memory is not freed. All
   waits have the same timeout: the thread has completed no operation for timeout_s seconds.

   A thread that only saves checkpoints gets priority 19. A thread that also serves offload keeps
   its priority: on Linux a thread may lower its priority but needs a privilege to raise it again,
   and a busy machine would then delay the steps. */

enum { DT__IO_BUFFER = 1 << 18, DT__SYNC_BYTES = 1 << 20, DT__ORPHANS = 32 };
enum {
    DT__OP_READ = 0,
    DT__OP_WRITE,
    DT__OP_CREATE,      /* creates a file of `bytes` bytes */
    DT__OP_CLOSE,       /* fsync, then close */
    DT__OP_SYNC_FOLDER, /* fsync of a folder */
    DT__OP_RENAME,      /* renames `file` to `to`, then fsync of the folder */
    DT__OP_KEEP         /* keeps `bytes` checkpoints, see dt__ckpt_remove_old */
};
/* Indices in dt__files: the only file of offload, or the files and folders of a checkpoint. */
enum {
    DT__OFFLOADED = 0,
    DT__MODEL = 0,
    DT__OPTIM,
    DT__CKPT_FILES, /* number of safetensors files */
    DT__CONFIG = DT__CKPT_FILES,
    DT__MANIFEST,
    DT__LOCK,
    DT__DIR,
    DT__TEMP,
    DT__FINAL,
    DT__PATHS
};

/* The files of one client of the I/O thread. */
struct dt__files {
    dt__writer writer;     /* with the first failure */
    dt__io_thread *thread; /* NULL: operations run on the calling thread */
    int fd[DT__PATHS];     /* -1 if not open */
    char path[DT__PATHS][DT__PATH_BYTES];
    int64_t unsynced[DT__PATHS]; /* bytes of a background save that may be in the page cache only */
};

struct dt__io_thread {
    pthread_t thread;
    int users; /* the training state, and clients; the last user frees the thread */
    int has_thread, low_priority;
    double timeout_s;
    int64_t progress;      /* atomic; number of requests and of completed pieces */
    int64_t progress_seen; /* the last value of progress that the rank has seen */
    dt__stopwatch watch;   /* measures the time since `progress` last changed */
    pthread_mutex_t lock;  /* guards all that follows */
    pthread_cond_t wake;
    int stop, abandoned, ended;
    dt__io_request *first;
    int orphan[DT__ORPHANS], n_orphans; /* descriptors left to an abandoned thread */
    /* the thread's copies of all that the present piece needs */
    dt__writer writer;
    dt__file_op op;
    int fd;
    int64_t base;                  /* messages count bytes from here */
    int64_t sync_from, sync_bytes; /* range to sync after the transfer; 0 bytes: none */
    char path[2][DT__PATH_BYTES], doing[64], buffer[DT__IO_BUFFER];
};

static void dt__ckpt_remove_old(const dt_io *io, const char *newest, int64_t keep);

/* Does an operation on the calling thread. */
static void dt__file_op_run(
    dt__writer *w, const dt__file_op *op, int *fd, const char *path, const char *to) {
    switch (op->kind) {
    case DT__OP_WRITE: dt__writer_write(w, path, *fd, op->data, op->bytes, op->offset); break;
    case DT__OP_CREATE: *fd = dt__writer_create(w, path, op->bytes); break;
    case DT__OP_CLOSE:
        if (*fd >= 0) dt__writer_sync_close(w, path, *fd);
        *fd = -1;
        break;
    case DT__OP_SYNC_FOLDER: dt__writer_sync_folder(w, path, 0); break;
    case DT__OP_RENAME: dt__writer_rename(w, path, to, 0); break;
    case DT__OP_KEEP:
        if (!w->why[0]) dt__ckpt_remove_old(&w->io, path, op->bytes);
        break;
    }
}

/* Transfers a piece between t->buffer and the file. */
static void dt__io_transfer_piece(dt__io_thread *t) {
    const dt_io *io = &t->writer.io;
    const dt__file_op *op = &t->op;
    char what[100];
    int writes = op->kind == DT__OP_WRITE, end = 0;
    if (t->writer.why[0]) return;
    int64_t n = dt__io_transfer(io, t->fd, writes, t->buffer, op->bytes, op->offset, &end);
    if (n == op->bytes) {
        errno = 0;
        if (!t->sync_bytes || !io->sync_and_evict ||
            io->sync_and_evict(io->user, t->fd, t->sync_bytes, t->sync_from) == 0)
            return;
        n = 0;
    }
    if (end) errno = writes ? ENOSPC : DT__SHORTER;
    snprintf(what, sizeof what, "%s byte %lld", t->doing, (long long)(op->offset + n - t->base));
    dt__writer_fail(&t->writer, t->path[0], what);
}

/* Does one piece of the first request. The caller holds the lock, and the function releases it
   during the piece. If the thread is abandoned meanwhile, the function touches neither the request
   nor its files and data. */
static void dt__io_run_piece(dt__io_thread *t) {
    static const char *const names[] = { "reading", "writing", "open", "fsync", "fsync", "rename",
        "removing old checkpoints" };
    dt__io_request *r = t->first, **at = &t->first;
    dt__files *f = r->files;
    const dt__file_op *op = &r->ops[r->at];
    int moves = op->kind == DT__OP_READ || op->kind == DT__OP_WRITE;
    char *data = moves ? (char *)op->data + r->done : NULL;
    t->writer = f->writer;
    t->op = *op;
    t->fd = f->fd[op->file];
    memcpy(t->path[0], f->path[op->file], sizeof t->path[0]);
    memcpy(t->path[1], f->path[op->to], sizeof t->path[1]);
    snprintf(t->doing, sizeof t->doing, r->what ? "%s %s," : "%s", names[op->kind], r->what);
    if (moves) {
        int64_t left = op->bytes - r->done, *unsynced = &f->unsynced[op->file];
        t->op.offset += r->done;
        t->op.bytes = left < DT__IO_BUFFER ? left : (int64_t)DT__IO_BUFFER;
        t->base = r->background ? 0 : op->offset;
        t->sync_from = t->base;
        t->sync_bytes = left == t->op.bytes ? op->bytes : 0;
        if (r->background) {
            *unsynced += t->op.bytes;
            t->sync_bytes = *unsynced >= DT__SYNC_BYTES ? t->op.offset + t->op.bytes : 0;
            if (t->sync_bytes) *unsynced = 0;
        }
        if (op->kind == DT__OP_WRITE) memcpy(t->buffer, data, (size_t)t->op.bytes);
    }
    pthread_mutex_unlock(&t->lock);
    if (moves)
        dt__io_transfer_piece(t);
    else
        dt__file_op_run(&t->writer, &t->op, &t->fd, t->path[0], t->path[1]);
    pthread_mutex_lock(&t->lock);
    __atomic_fetch_add(&t->progress, 1, __ATOMIC_RELAXED);
    if (t->abandoned) return;
    int failed = t->writer.why[0] != 0;
    if (failed) memcpy(f->writer.why, t->writer.why, sizeof f->writer.why);
    f->fd[op->file] = t->fd;
    if (op->kind == DT__OP_READ && !failed) memcpy(data, t->buffer, (size_t)t->op.bytes);
    r->done += t->op.bytes;
    if (!moves || failed || r->done == op->bytes) r->at++, r->done = 0;
    if (r->at < r->n_ops) return;
    while (*at != r) at = &(*at)->next; /* a newer request may be the first one */
    *at = r->next;
    r->failed = failed;
    __atomic_store_n(&r->busy, 0, __ATOMIC_RELEASE);
}

static void *dt__io_main(void *arg) {
    dt__io_thread *t = (dt__io_thread *)arg;
#ifdef __linux__
    /* on Linux setpriority lowers the priority of the calling thread only */
    if (t->low_priority) setpriority(PRIO_PROCESS, 0, 19);
#endif
    pthread_mutex_lock(&t->lock);
    while (!t->stop && !t->abandoned) {
        if (t->first)
            dt__io_run_piece(t);
        else
            pthread_cond_wait(&t->wake, &t->lock);
    }
    t->ended = 1; /* from here on the rank leaves no more descriptors */
    pthread_mutex_unlock(&t->lock);
    for (int i = t->n_orphans; i-- > 0;) t->writer.io.close(t->writer.io.user, t->orphan[i]);
    return NULL;
}

/* If the thread has completed no operation for timeout_s, abandons it, fails the context and
   returns 1. Else returns 0. */
static int dt__io_stalled(dt_ctx *ctx, dt__io_thread *t) {
    int64_t progress = __atomic_load_n(&t->progress, __ATOMIC_RELAXED);
    if (progress != t->progress_seen) {
        t->watch = dt__stopwatch_start(dt_ctx_host(ctx), t->timeout_s);
        /* polls of a background save may be further apart than DT__MAX_CLOCK_GAP_S */
        t->watch.max_gap = t->timeout_s / 8;
    }
    t->progress_seen = progress;
    if (dt__waited(&t->watch) <= t->timeout_s) return 0;
    pthread_mutex_lock(&t->lock);
    t->abandoned = 1;
    pthread_mutex_unlock(&t->lock);
    /* an abandoned thread begins no further operation, so it does not change these texts */
    dt_fail(ctx, DT_ERR_TIMEOUT, "%s: %s: no answer from the disk within %g s", t->path[0],
        t->doing, t->timeout_s);
    return 1;
}

/* Returns 1 while the thread works on the request. Fails the context if the thread stalls. */
static int dt__io_pending(dt_ctx *ctx, dt__io_request *r) {
    dt__io_thread *t = r->files ? r->files->thread : NULL;
    if (!t || t->abandoned || !__atomic_load_n(&r->busy, __ATOMIC_ACQUIRE)) return 0;
    return !dt__io_stalled(ctx, t);
}

static void dt__io_nap(const dt_ctx *ctx, double *nap) {
    const dt_host *host = dt_ctx_host(ctx);
    host->sleep(host->user, *nap);
    *nap = *nap < 1e-3 ? 2 * *nap : *nap;
}

/* Starts a request; without a thread does it at once. */
static void dt__io_start(dt__io_request *r) {
    dt__files *f = r->files;
    dt__io_thread *t = f->thread;
    for (int i = 0; i < r->n_ops && !t; i++) {
        const dt__file_op *op = &r->ops[i];
        dt__file_op_run(&f->writer, op, &f->fd[op->file], f->path[op->file], f->path[op->to]);
    }
    if (!t) return;
    pthread_mutex_lock(&t->lock);
    dt__io_request **p = &t->first;
    while (*p && (r->background || !(*p)->background)) p = &(*p)->next;
    r->busy = 1;
    r->next = *p;
    *p = r;
    __atomic_fetch_add(&t->progress, 1, __ATOMIC_RELAXED);
    pthread_cond_signal(&t->wake);
    pthread_mutex_unlock(&t->lock);
}

/* Fails the context if an operation on these files has failed. */
static dt_status dt__files_check(dt_ctx *ctx, const dt__files *f, const char *func) {
    if (f->thread) pthread_mutex_lock(&f->thread->lock);
    dt_status status = dt__writer_check(ctx, &f->writer, func);
    if (f->thread) pthread_mutex_unlock(&f->thread->lock);
    return status;
}

static void dt__files_init(dt_ctx *ctx, dt__files *f) {
    memset(f, 0, sizeof *f);
    f->writer.io = *dt_ctx_io(ctx);
    for (int i = 0; i < DT__PATHS; i++) f->fd[i] = -1;
}

/* Cancels the requests for these files, waits for the piece in progress, and closes the files 0 to
   end - 1. If the thread is abandoned, it may be using a file, and close may hang too: then the
   thread closes the files. */
static void dt__files_close(dt_ctx *ctx, dt__files *f, int end) {
    dt__io_thread *t = f->thread;
    double nap = 1e-5;
    while (t && !t->abandoned) {
        int busy = 0;
        pthread_mutex_lock(&t->lock);
        for (dt__io_request *r = t->first; r; r = r->next) busy |= r->files == f;
        if (busy) snprintf(f->writer.why, sizeof f->writer.why, "cancelled");
        pthread_mutex_unlock(&t->lock);
        if (!busy || dt__io_stalled(ctx, t)) break;
        dt__io_nap(ctx, &nap);
    }
    if (t) pthread_mutex_lock(&t->lock);
    for (int i = 0; i < end; i++) {
        if (f->fd[i] >= 0 && t && t->abandoned && !t->ended && t->n_orphans < DT__ORPHANS)
            t->orphan[t->n_orphans++] = f->fd[i];
        else if (f->fd[i] >= 0)
            f->writer.io.close(f->writer.io.user, f->fd[i]);
        f->fd[i] = -1;
    }
    if (t) pthread_mutex_unlock(&t->lock);
}

/* Returns the memory of the rank's I/O thread, which need not run yet; NULL on failure. */
static dt__io_thread *dt__io_thread_make(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    if (zero->io_thread) return zero->io_thread;
    dt__io_thread *t = (dt__io_thread *)dt_alloc(ctx, DT_MEM_HOST, sizeof *t, "an I/O thread");
    if (!t) return NULL;
    memset(t, 0, sizeof *t - sizeof t->buffer);
    t->users = 1;
    /* less than the ranks' timeout, because otherwise the other ranks would end the run before this
       rank can name the disk */
    t->timeout_s = 0.8 * (dt__world_of(ctx) ? dt__world_of(ctx)->shared->timeout_s : 120);
    t->progress_seen = -1;
    t->writer.io = *dt_ctx_io(ctx);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->wake, NULL);
    return zero->io_thread = t;
}

/* Makes `f` a client of the rank's I/O thread, and starts this thread if it does not run. Returns
   0 if no thread can be started. */
static int dt__io_join(dt_zero *zero, dt__files *f, int low_priority) {
    dt__io_thread *t = dt__io_thread_make(zero);
    if (t && !t->has_thread) {
        t->low_priority = low_priority;
        t->has_thread = pthread_create(&t->thread, NULL, dt__io_main, t) == 0;
    }
    if (!t || !t->has_thread) return 0;
    f->thread = t;
    t->users++;
    return 1;
}

/* Ends the use of the thread by the training state or a client; the last one ends the thread. */
static void dt__io_leave(dt_ctx *ctx, dt__io_thread **at) {
    dt__io_thread *t = *at;
    double nap = 1e-5;
    *at = NULL;
    if (!t || --t->users > 0) return;
    for (int ended = !t->has_thread || t->abandoned; !ended;) {
        pthread_mutex_lock(&t->lock);
        t->stop = 1;
        ended = t->ended;
        pthread_cond_signal(&t->wake);
        pthread_mutex_unlock(&t->lock);
        if (ended || dt__io_stalled(ctx, t)) break;
        dt__io_nap(ctx, &nap);
    }
    if (t->abandoned) {
        pthread_detach(t->thread);
        return;
    }
    if (t->has_thread) pthread_join(t->thread, NULL);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->wake);
    dt_free(ctx, DT_MEM_HOST, t, sizeof *t);
}

// ==== 14. Offload ===============================================================================

/* CPU offload and NVMe offload ("ZeRO-Infinity", S. Rajbhandari et al., arXiv:2104.07857):
   optimizer state, and at stage 3 the parameters, are in host memory or in a file. The update runs
   on the CPU, one chunk of a rank's shard at a time. Three sets of buffers let one chunk be read,
   one be updated and one be written at the same time:

       time ->
       read      chunk 0   chunk 1   chunk 2   chunk 3
       update              chunk 0   chunk 1   chunk 2   chunk 3
       write                         chunk 0   chunk 1   chunk 2   chunk 3

   The rank's I/O thread (section 13) reads and writes the file.

   The file has two slots, each for all arrays of this rank that are on disk, except gradients. A
   step reads one slot and writes the other slot. The slots swap only after every rank has written
   all of its chunks, so a step that fails on one rank changes no rank's data. For the same reason
   parameters in memory change last: the updated parameters of a chunk overwrite the chunk's
   gradient, which is no longer needed; after every rank has succeeded, the gradient's memory is
   copied to the parameters. Optimizer state in host memory is updated in place: after a failed step
   such state is lost, although parameters on disk are unchanged.

   If both the optimizer state and the parameters are in the file, the gradients are in the file
   too, after the two slots. This rank's shard of a bucket's gradient is written when the gradient
   of a micro-batch has been reduced. It is read to add the next micro-batch's gradient, and read
   chunk by chunk in the update.

   Written data is dropped from the page cache. The file is unlinked directly after it is opened, so
   it disappears when the process ends, even if the process is killed. */

enum { DT__DISK_NAMES = 1000 };

struct dt__disk {
    dt__files files;
    int slot;
    int64_t slot_bytes;
};

static void dt__disk_start(dt__disk *d, dt__io_request *job, int write, void *at, size_t bytes,
    int64_t offset, const char *what) {
    if (!d->files.thread) return; /* in a dry run */
    void *device = job->device;
    memset(job, 0, sizeof *job);
    job->files = &d->files;
    job->op = (dt__file_op){ .kind = write ? DT__OP_WRITE : DT__OP_READ,
        .file = DT__OFFLOADED,
        .to = DT__OFFLOADED,
        .data = at,
        .bytes = (int64_t)bytes,
        .offset = offset };
    job->ops = &job->op;
    job->n_ops = 1;
    job->what = what;
    job->device = device;
    dt__io_start(job);
}

/* Starts a transfer to or from a bucket's memory. Device memory is transferred through a copy in
   host memory, which dt__disk_end frees. */
static dt_status dt__disk_begin(dt_zero *zero, dt__io_request *job, int write, void *at,
    size_t bytes, int64_t offset, const char *what) {
    dt_ctx *ctx = zero->ctx;
    if (zero->update_kernels != &ctx->kernels) {
        void *host = dt_alloc(ctx, DT_MEM_HOST, bytes, "a copy for the disk");
        if (!host) return dt_error(ctx);
        if (write && dt__move(ctx, host, at, bytes) == DT_OK) dt__sync(ctx);
        job->device = at;
        at = host;
    }
    dt__disk_start(zero->disk, job, write, at, bytes, offset, what);
    return dt_error(ctx);
}

static void dt__disk_end(dt_zero *zero, dt__io_request *job, int arrived) {
    void *host = job->op.data;
    size_t bytes = (size_t)job->op.bytes;
    if (!job->device) return;
    if (arrived && job->op.kind == DT__OP_READ &&
        dt__move(zero->ctx, job->device, host, bytes) == DT_OK)
        dt__sync(zero->ctx);
    dt_free(zero->ctx, DT_MEM_HOST, host, bytes);
    job->device = NULL;
}

/* Waits for the job's transfer, if one was started. */
static dt_status dt__disk_wait(dt_zero *zero, dt__io_request *job) {
    dt_ctx *ctx = zero->ctx;
    double nap = 1e-5;
    if (!job->what) return dt_error(ctx);
    while (dt__io_pending(ctx, job)) dt__io_nap(ctx, &nap);
    if (zero->disk->files.thread->abandoned) return dt_error(ctx);
    job->what = NULL;
    dt__disk_end(zero, job, !job->failed);
    return job->failed ? dt__files_check(ctx, &zero->disk->files, NULL) : dt_error(ctx);
}

/* Waits for the job's previous transfer, then starts a new transfer and waits for its end. */
static dt_status dt__disk_transfer_now(dt_zero *zero, dt__io_request *job, int write, void *at,
    size_t bytes, int64_t offset, const char *what) {
    if (dt__disk_wait(zero, job) != DT_OK) return dt_error(zero->ctx);
    dt__disk_start(zero->disk, job, write, at, bytes, offset, what);
    return dt__disk_wait(zero, job);
}

static int dt__on_disk(const char *target) {
    return target && strcmp(target, "none") != 0 && strcmp(target, "cpu") != 0;
}
static int dt__in_host(const char *target) { return target && strcmp(target, "cpu") == 0; }
static int dt__zero_offloads(const dt_zero *zero) {
    const char *o = zero->desc.offload_optim, *p = zero->desc.offload_params;
    return dt__on_disk(o) || dt__on_disk(p) || dt__in_host(o) || dt__in_host(p);
}
static int dt__grads_on_disk(const dt_zero *zero) {
    return dt__on_disk(zero->desc.offload_optim) && dt__on_disk(zero->desc.offload_params) &&
           !zero->desc.tree;
}
/* Returns 1 if a bucket's gradient is on disk. Tied gradients stay in memory, because another
   pipeline stage adds to them at the end of the step. */
static int dt__grad_on_disk(const dt_zero *zero, const dt_bucket *bucket) {
    return dt__grads_on_disk(zero) && !bucket->frozen && !dt__tied_group(zero, bucket);
}

/* Returns the bytes of one array of a bucket in the file; 0 if the array is not in the file.
   `array` is an index from DT__STATE_0 to DT__GRAD. */
static size_t dt__disk_array_bytes(const dt_zero *zero, const dt_bucket *bucket, int array) {
    size_t count = bucket->padded / (size_t)dt__zero_shards(zero, bucket);
    int state = dt__on_disk(zero->desc.offload_optim) && !bucket->frozen;
    if (array == DT__GRAD)
        return dt__grad_on_disk(zero, bucket) ? count * dt_dtype_size(bucket->grad_dtype) : 0;
    if (array == DT__PARAMS)
        return dt__on_disk(zero->desc.offload_params) ? count * dt_dtype_size(bucket->dtype) : 0;
    if (array == DT__MASTER)
        return state && dt__zero_has_master(bucket) ? count * dt_dtype_size(bucket->grad_dtype) : 0;
    return state && array < zero->states ? count * dt_dtype_size(bucket->grad_dtype) : 0;
}

/* Returns the offset of an array of bucket u from the start of a slot. With u = n_buckets and
   array = 0, the result is the size of a slot. */
static int64_t dt__disk_slot_offset(const dt_zero *zero, int u, int array) {
    size_t at = 0;
    for (int i = 0; i <= u && i < dt_bucket_count(zero->ctx); i++)
        for (int a = 0; a < (i < u ? (int)DT__GRAD : array); a++)
            at += dt__disk_array_bytes(zero, dt_bucket_get(zero->ctx, i), a);
    return (int64_t)at;
}

/* Returns the offset in the file of an array of bucket u, in the given slot. Frozen parameters are
   always in slot 0; gradients are after both slots. */
static int64_t dt__disk_offset(const dt_zero *zero, int u, int array, int slot) {
    const dt_bucket *bucket = dt_bucket_get(zero->ctx, u);
    int64_t at = 2 * zero->disk->slot_bytes;
    if (array != DT__GRAD)
        return (bucket && bucket->frozen ? 0 : slot) * (at / 2) +
               dt__disk_slot_offset(zero, u, array);
    for (int i = 0; i < u; i++)
        at += (int64_t)dt__disk_array_bytes(zero, dt_bucket_get(zero->ctx, i), DT__GRAD);
    return at;
}

static dt_status dt__disk_open(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    const char *o = zero->desc.offload_optim, *p = zero->desc.offload_params,
               *folder = dt__on_disk(o) ? o : p;
    if (!dt__on_disk(folder)) return DT_OK;
    dt__disk *d = (dt__disk *)dt__host_zeroed(ctx, sizeof *d, "offload");
    if (!d) return dt_error(ctx);
    dt__files_init(ctx, &d->files);
    zero->disk = d;
    d->slot_bytes = dt__disk_slot_offset(zero, dt_bucket_count(ctx), 0);
    const dt_io *io = &d->files.writer.io;
    char *path = d->files.path[DT__OFFLOADED];
    int64_t bytes = dt__disk_offset(zero, dt_bucket_count(ctx), DT__GRAD, 0);
    int fd = -1;
    /* create the file under a name that is not in use; the file is unlinked below */
    for (int other = 0; fd < 0 && other < DT__DISK_NAMES; other++) {
        char number[16] = "";
        if (other) snprintf(number, sizeof number, ".%d", other);
        if (snprintf(path, DT__PATH_BYTES, "%s/dt-rank-%d%s.offload", folder, dt_ctx_rank(ctx),
                number) >= DT__PATH_BYTES)
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_zero_make: offload to %.60s...: a path of at most %d bytes is needed", folder,
                DT__PATH_BYTES - 1);
        /* a dry run needs the memory, but no file */
        if (dt__is_dry_run(zero)) return dt__io_thread_make(zero) ? DT_OK : dt_error(ctx);
        errno = 0;
        fd = io->open(io->user, path, DT_IO_PRIVATE);
        if (fd < 0 && errno != EEXIST) break;
    }
    d->files.fd[DT__OFFLOADED] = fd;
    const char *failed = fd < 0 ? "open" : NULL;
    errno = failed ? errno : 0;
    if (!failed && io->remove(io->user, path) != 0) failed = "remove";
    if (failed)
        return dt_fail(
            ctx, DT_ERR_IO, "dt_zero_make: offload to %s: %s: %s", path, failed, dt__io_reason());
    errno = 0; /* resize fills the file with zeros: optimizer state starts at zero */
    if (io->resize(io->user, fd, bytes) != 0)
        return dt_fail(ctx, DT_ERR_IO, "%s: making room for %lld bytes: %s", path, (long long)bytes,
            dt__io_reason());
    return dt__io_join(zero, &d->files, 0)
               ? DT_OK
               : dt_fail(ctx, DT_ERR_MEM, "%s: no thread to read and write it", path);
}

static void dt__disk_close(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    dt__disk *d = zero->disk;
    if (d) dt__files_close(ctx, &d->files, DT__PATHS);
    if (d) dt__io_leave(ctx, &d->files.thread);
    dt__io_leave(ctx, &zero->io_thread);
    for (int i = 0; zero->chunks && i < DT__OFFLOAD_CHUNKS * DT__ARRAYS; i++)
        dt_unpin(ctx, zero->chunks[i / DT__ARRAYS].buf[i % DT__ARRAYS], zero->chunk_bytes);
    dt_free(ctx, DT_MEM_HOST, zero->chunks, DT__OFFLOAD_CHUNKS * sizeof *zero->chunks);
    dt_free(ctx, DT_MEM_HOST, d, sizeof *d);
    zero->chunks = NULL;
    zero->disk = NULL;
}

/* Allocates the buffers of the offloaded update. */
static dt_status dt__chunks_make(dt_zero *zero) {
    size_t element = 4, longest = 1;
    int masters = 0, on_disk = dt__on_disk(zero->desc.offload_optim);
    if (!dt__zero_offloads(zero)) return DT_OK;
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        if (dt__zero_element_size(z) > element) element = dt__zero_element_size(z);
        if (z->count > longest) longest = z->count;
        masters |= dt__zero_has_master(z->bucket);
    }
    zero->chunk_elements = zero->desc.offload_chunk ? zero->desc.offload_chunk : (size_t)1 << 17;
    if (zero->chunk_elements > longest) zero->chunk_elements = longest;
    zero->chunk_bytes = zero->chunk_elements * element;
    zero->chunks = (dt__offload_chunk *)dt_alloc(
        zero->ctx, DT_MEM_HOST, DT__OFFLOAD_CHUNKS * sizeof *zero->chunks, "offload");
    if (!zero->chunks) return dt_error(zero->ctx);
    memset(zero->chunks, 0, DT__OFFLOAD_CHUNKS * sizeof *zero->chunks);
    for (int i = 0; i < DT__OFFLOAD_CHUNKS * DT__ARRAYS; i++) {
        int a = i % DT__ARRAYS, on_device = zero->update_kernels != &zero->ctx->kernels;
        int needed = a == DT__PARAMS || (a == DT__GRAD && (on_device || dt__grads_on_disk(zero))) ||
                     (a == DT__MASTER && on_disk && masters) || (a < zero->states && on_disk);
        void **buf = &zero->chunks[i / DT__ARRAYS].buf[i % DT__ARRAYS];
        if (needed) *buf = dt_pin(zero->ctx, zero->chunk_bytes, "chunks of offloaded state");
        if (needed && !*buf) return dt_error(zero->ctx);
    }
    return DT_OK;
}

/* ---- offloaded parameters ---- */

/* Stores the values at `shard` as this rank's shard of the bucket's parameters: on disk, in host
   memory or on the device. */
static dt_status dt__params_store(
    dt_zero *zero, dt__zero_bucket *z, dt_bucket *bucket, void *shard) {
    size_t bytes = bucket->shard_count * dt_dtype_size(bucket->dtype);
    if (dt__on_disk(zero->desc.offload_params)) {
        if (!zero->disk && dt__disk_open(zero) != DT_OK) return dt_error(zero->ctx);
        if (dt__disk_wait(zero, &z->disk_job) != DT_OK ||
            dt__disk_begin(zero, &z->disk_job, 1, shard, bytes,
                dt__disk_offset(zero, bucket->index, DT__PARAMS, zero->disk->slot),
                "values") != DT_OK)
            return dt_error(zero->ctx);
        return dt__disk_wait(zero, &z->disk_job);
    }
    if (!dt__in_host(zero->desc.offload_params))
        return dt__move(zero->ctx, bucket->shard, shard, bytes);
    if (!z->host_shard) z->host_shard = dt_pin(zero->ctx, bytes, "parameters in host memory");
    return z->host_shard ? dt__move(zero->ctx, z->host_shard, shard, bytes) : dt_error(zero->ctx);
}

/* Acquires a buffer for a bucket's gathered parameters. If the parameters are offloaded, also
   starts to read this rank's shard into the buffer. */
static dt_status dt__params_read_start(dt_zero *zero, dt__zero_bucket *z) {
    const dt_bucket *u = z->bucket;
    size_t size = dt_dtype_size(u->dtype);
    z->gathered = dt__buffer_acquire(zero->ctx, DT_MEM_COMM, u->padded * size);
    char *mine = z->gathered ? (char *)z->gathered + u->shard_offset * size : NULL;
    if (mine && z->host_shard)
        return dt__move(zero->ctx, mine, z->host_shard, u->shard_count * size);
    if (mine && zero->disk && !u->shard)
        dt__disk_begin(zero, &z->disk_job, 0, mine, u->shard_count * size,
            dt__disk_offset(zero, u->index, DT__PARAMS, zero->disk->slot), "values");
    return dt_error(zero->ctx);
}

/* Copies `bytes` bytes of this rank's shard of the parameters, from byte `at` on, to host
   memory. */
static dt_status dt__params_copy_out(
    dt_zero *zero, const dt_bucket *bucket, size_t at, void *host, size_t bytes) {
    dt__zero_bucket *z = &zero->buckets[bucket->index];
    const char *from = z->host_shard ? (const char *)z->host_shard : (const char *)bucket->shard;
    if (from)
        return dt__move(zero->ctx, host, from + at, bytes) == DT_OK ? dt__sync(zero->ctx)
                                                                    : dt_error(zero->ctx);
    return dt__disk_transfer_now(zero, &z->disk_job, 0, host, bytes,
        dt__disk_offset(zero, bucket->index, DT__PARAMS, zero->disk->slot) + (int64_t)at, "values");
}

/* ---- gradients on disk ---- */

/* Acquires a buffer for this rank's shard of a bucket's gradient. If there were earlier
   micro-batches, also starts to read their sum into the buffer. */
static dt_status dt__grads_read_start(dt_zero *zero, dt__zero_bucket *z) {
    size_t bytes = z->count * dt__zero_element_size(z);
    z->grad_shard = dt__buffer_acquire(zero->ctx, DT_MEM_COMM, bytes);
    if (z->grad_shard && z->accumulated)
        dt__disk_begin(zero, &z->grad_job, 0, z->grad_shard, bytes,
            dt__disk_offset(zero, z->bucket->index, DT__GRAD, 0), "gradients");
    return dt_error(zero->ctx);
}

/* If a gradient is being written to disk, waits for this write and releases the gradient's
   buffer. */
static dt_status dt__grads_write_end(dt_zero *zero) {
    if (!dt__grads_on_disk(zero) || zero->storing_bucket < 0) return dt_error(zero->ctx);
    dt__zero_bucket *z = &zero->buckets[zero->storing_bucket];
    if (dt__disk_wait(zero, &z->grad_job) != DT_OK) return dt_error(zero->ctx);
    dt__buffer_release(zero->ctx, z->grad_shard);
    z->grad_shard = NULL;
    zero->storing_bucket = -1;
    return DT_OK;
}

/* Starts to write this rank's shard of a bucket's gradient, after a micro-batch was added to the
   shard. The write overlaps the reduction of the next bucket. After the last micro-batch the shard
   is first summed over replicas and over the groups of gradient placements, and the sums of squares
   for the gradient norm are computed. */
static dt_status dt__grads_write_start(dt_zero *zero, dt__zero_bucket *z) {
    int last = zero->ctx->micro == zero->ctx->micro_count - 1, u = z->bucket->index;
    if (last) dt__reduce_replicas_start(z);
    if (last && (dt__reduce_replicas_end(zero, z) != DT_OK ||
                    dt__norm_local_sums(zero, u, u + 1, 1) != DT_OK))
        return dt_error(zero->ctx);
    if (dt__grads_write_end(zero) != DT_OK) return dt_error(zero->ctx);
    dt__disk_begin(zero, &z->grad_job, 1, z->grad_shard, z->count * dt__zero_element_size(z),
        dt__disk_offset(zero, z->bucket->index, DT__GRAD, 0), "gradients");
    zero->storing_bucket = z->bucket->index;
    return dt_error(zero->ctx);
}

/* Copies `count` elements of this rank's shard of the step's gradient, from `element` on, to host
   memory. */
static dt_status dt__grads_copy_out(
    dt_zero *zero, dt__zero_bucket *z, size_t element, void *host, size_t count) {
    size_t bytes = count * dt__zero_element_size(z), at = element * dt__zero_element_size(z);
    if (dt__grad_on_disk(zero, z->bucket))
        return dt__disk_transfer_now(zero, &z->grad_job, 0, host, bytes,
            dt__disk_offset(zero, z->bucket->index, DT__GRAD, 0) + (int64_t)at, "gradients");
    if (dt__move(zero->ctx, host, (char *)dt__zero_grad_shard(z) + at, bytes) != DT_OK)
        return dt_error(zero->ctx);
    return dt__sync(zero->ctx);
}

/* ---- the offloaded update ---- */

/* Sets s to the chunk after `before`, or to the first chunk if `before` is NULL. Returns 1; 0 if
   there is no further chunk. */
static int dt__chunk_next(
    const dt_zero *zero, dt__offload_chunk *s, const dt__offload_chunk *before) {
    if (zero->n_buckets == 0) return 0; /* a pipeline stage without parameters */
    int u = before ? before->bucket : 0;
    size_t first = before ? before->offset + before->count : zero->buckets[0].offset;
    while (zero->buckets[u].bucket->frozen ||
           first == zero->buckets[u].offset + zero->buckets[u].count) {
        if (++u == zero->n_buckets) return 0;
        first = zero->buckets[u].offset;
    }
    size_t left = zero->buckets[u].offset + zero->buckets[u].count - first;
    s->bucket = u;
    s->offset = first;
    s->count = left < zero->chunk_elements ? left : zero->chunk_elements;
    return 1;
}

static dt_status dt__chunk_wait(dt_zero *zero, dt__offload_chunk *s) {
    for (int a = 0; a < DT__ARRAYS; a++)
        if (dt__disk_wait(zero, &s->job[a]) != DT_OK) return dt_error(zero->ctx);
    return DT_OK;
}

/* Starts to read or to write those arrays of a chunk that are on disk. If the bucket has master
   weights, the first step makes them from the parameters, so it does not read the master weights;
   later steps do not read the parameters. */
static void dt__chunk_transfer(dt_zero *zero, dt__offload_chunk *s, int write) {
    static const char *const names[] = { "optimizer state", "optimizer state", "master parameters",
        "values", "gradients" };
    const dt__zero_bucket *z = &zero->buckets[s->bucket];
    int master = dt__zero_has_master(z->bucket);
    for (int a = 0; a < DT__ARRAYS && zero->disk; a++) {
        size_t size = a == DT__PARAMS ? dt_dtype_size(z->bucket->dtype) : dt__zero_element_size(z);
        int unread =
            (a == DT__MASTER && zero->step == 0) || (a == DT__PARAMS && master && zero->step > 0);
        if (dt__disk_array_bytes(zero, z->bucket, a) == 0 || (write ? a == DT__GRAD : unread))
            continue;
        int64_t offset = dt__disk_offset(zero, s->bucket, a, zero->disk->slot ^ write);
        offset += (int64_t)((s->offset - z->offset) * size);
        dt__disk_start(zero->disk, &s->job[a], write, s->buf[a], s->count * size, offset, names[a]);
    }
}

/* Updates one chunk on the CPU. */
static dt_status dt__chunk_update(
    dt_zero *zero, dt__offload_chunk *s, double lr, double grad_scale) {
    dt_ctx *ctx = zero->ctx;
    dt__zero_bucket *z = &zero->buckets[s->bucket];
    const dt_bucket *u = z->bucket;
    size_t size = dt__zero_element_size(z), narrow = dt_dtype_size(u->dtype),
           at = s->offset - z->offset, bytes = s->count * size;
    int master = dt__zero_has_master(u), on_disk = dt__disk_array_bytes(zero, u, DT__PARAMS) > 0;
    char *grad =
        (char *)(dt__grad_on_disk(zero, u) ? s->buf[DT__GRAD]
                                           : dt__zero_element(z, dt__zero_grad_shard(z), at));
    dt__update_span span = {
        .offset = s->offset, .count = s->count, .grad = grad, .state = { NULL, NULL }
    };
    for (int a = 0; a <= DT__MASTER; a++) {
        char *full = (char *)(a == DT__MASTER ? z->master : z->state[a]);
        void *here = full ? full + at * size : dt__disk_array_bytes(zero, u, a) ? s->buf[a] : NULL;
        if (a == DT__MASTER)
            span.master = here;
        else
            span.state[a] = here;
    }
    if (!on_disk && (!master || zero->step == 0))
        dt__move(ctx, s->buf[DT__PARAMS], (char *)dt__zero_param_shard(z) + at * narrow,
            s->count * narrow);
    if (s->buf[DT__GRAD] && grad != s->buf[DT__GRAD])
        dt__move(ctx, span.grad = s->buf[DT__GRAD], grad, bytes);
    if (dt__sync(ctx) != DT_OK) return dt_error(ctx);
    dt_cast_args widen = { .dtype = u->grad_dtype,
        .from = u->dtype,
        .out = span.master,
        .in = s->buf[DT__PARAMS],
        .count = s->count };
    if (master && zero->step == 0 && DT__UPDATE(zero, "master parameters", cast, &widen) != DT_OK)
        return dt_error(ctx);
    span.values = on_disk || !master ? s->buf[DT__PARAMS] : NULL;
    if (dt__zero_update_span(zero, z, &span, lr, grad_scale) != DT_OK || on_disk)
        return dt_error(ctx);
    if (dt__move(ctx, grad, master ? span.master : s->buf[DT__PARAMS], bytes) != DT_OK)
        return dt_error(ctx);
    return dt__sync(ctx); /* because the buffers may next be used for another chunk */
}

/* Copies the updated parameters from the gradient's memory, where dt__chunk_update has put them, to
   the parameters. */
static dt_status dt__offload_commit(dt_zero *zero, dt__zero_bucket *z) {
    dt_ctx *ctx = zero->ctx;
    const dt_bucket *u = z->bucket;
    size_t size = dt__zero_element_size(z), narrow = dt_dtype_size(u->dtype);
    if (u->frozen || dt__disk_array_bytes(zero, u, DT__PARAMS) > 0) return dt_error(ctx);
    for (size_t at = 0, n; at < z->count; at += n) {
        char *from = (char *)dt__zero_grad_shard(z) + at * size,
             *to = (char *)dt__zero_param_shard(z) + at * narrow;
        /* if the shard is in host memory and a cast is needed, the CPU casts from a host copy */
        void *host = z->host_shard && size != narrow ? zero->chunks[0].buf[DT__GRAD] : NULL;
        n = z->count - at < zero->chunk_elements ? z->count - at : zero->chunk_elements;
        if (host && (dt__move(ctx, host, from, n * size) != DT_OK || dt__sync(ctx) != DT_OK))
            return dt_error(ctx);
        dt_cast_args a = { .dtype = u->dtype,
            .from = u->grad_dtype,
            .out = to,
            .in = host ? host : from,
            .count = n };
        dt_status status = size == narrow ? dt__move(ctx, to, from, n * size)
                           : host         ? DT__UPDATE(zero, "values", cast, &a)
                                          : DT__KERNEL(ctx, "values", cast, &a);
        if (status != DT_OK) return dt_error(ctx);
    }
    return DT_OK;
}

static dt_status dt__offload_update(dt_zero *zero, double lr, double grad_scale) {
    if (dt__is_dry_run(zero)) return DT_OK;
    dt__offload_chunk *now = &zero->chunks[0];
    int more = dt__chunk_next(zero, now, NULL);
    if (more) dt__chunk_transfer(zero, now, 0);
    for (int k = 1; more; k++) {
        dt__offload_chunk *next = &zero->chunks[k % DT__OFFLOAD_CHUNKS];
        /* wait until the chunk that used these buffers before is in the file */
        if (dt__chunk_wait(zero, next) != DT_OK) return dt_error(zero->ctx);
        more = dt__chunk_next(zero, next, now);
        if (more) dt__chunk_transfer(zero, next, 0);
        if (dt__chunk_wait(zero, now) != DT_OK ||
            dt__chunk_update(zero, now, lr, grad_scale) != DT_OK)
            return dt_error(zero->ctx);
        dt__chunk_transfer(zero, now, 1);
        now = next;
    }
    for (int s = 0; s < DT__OFFLOAD_CHUNKS; s++)
        if (dt__chunk_wait(zero, &zero->chunks[s]) != DT_OK) return dt_error(zero->ctx);
    /* after this barrier, all ranks have written all of their chunks */
    if (dt_barrier(zero->mesh.world) != DT_OK) return dt_error(zero->ctx);
    for (int u = 0; u < zero->n_buckets; u++)
        if (dt__offload_commit(zero, &zero->buckets[u]) != DT_OK) return dt_error(zero->ctx);
    if (zero->disk) zero->disk->slot ^= 1;
    return DT_OK;
}

// ==== 15. 1-bit Adam ============================================================================

/* 1-bit Adam (H. Tang et al., arXiv:2102.02888). The first freeze_steps steps are Adam without bias
   correction. After these steps the second moment v is frozen, and the N ranks exchange the signs
   of a bucket's first moment m instead of the bucket's gradient. For a bucket of n elements, a step
   is:

       momentum        rank r: m = beta1 m + (1 - beta1) N g, where g is the rank's own gradient.
                       The paper averages gradients and dt sums them, hence the factor N
       worker          rank r: x = m + worker error. Rank r sends the sign of each element of x, and
                       one scale |x| / sqrt(n). The quantization error of x becomes the worker error
                       of the next step (error feedback)
       all-to-all      rank r receives shard r from all ranks: (N-1)/N of n bits
       server          rank r: x = mean of the received shards + server error. Rank r sends the
                       signs and one scale of x. The quantization error of x becomes the server
                       error of the next step
       all-gather      every rank receives all shards: (N-1)/N of n bits. The result is the new m,
                       with equal bits on all ranks
       update          p -= lr (m / (sqrt(v) + eps) + weight_decay p)

   A rank sends 2 (N-1)/N n/8 bytes of signs in a step, and 8 bytes for each scale. An all-reduce of
   f32 gradients sends 32 times the bytes of the signs. An element with v = 0 never had a gradient,
   for example padding. Adam would never have moved this element, but here an update by scale / eps
   would move it far. So an element with v = 0 is not updated, and does not count in the scale. */
static int dt__onebit_frozen(const dt_zero *zero) {
    return zero->desc.optimizer == DT_ONEBIT_ADAM && zero->step >= zero->desc.freeze_steps;
}

static dt_status dt__onebit_check(dt_ctx *ctx, const dt_zero_desc *d) {
    const dt_kernels *k = dt_ctx_kernels(ctx);
    if (d->stage != 0)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: DT_ONEBIT_ADAM at stage %d: each rank needs its full "
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
    /* check the kernels now, because they are first used after freeze_steps steps */
    if (!k->momentum || !k->frozen_adam || !k->sign_pack || !k->sign_unpack)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: DT_ONEBIT_ADAM needs kernels that %s does not have", k->name);
    return DT_OK;
}

/* Returns the bytes of the message with one shard of a bucket: signs and one scale. */
static size_t dt__onebit_message_bytes(const dt_zero *zero, const dt_bucket *bucket) {
    return bucket->padded / (size_t)dt_comm_size(dt__bucket_groups(zero, bucket)->data) / 8 +
           sizeof(double);
}

static size_t dt__onebit_error_bytes(const dt_zero *zero, const dt_bucket *bucket) {
    size_t n_shard = bucket->padded / (size_t)dt_comm_size(dt__bucket_groups(zero, bucket)->data);
    return bucket->frozen ? 0 : (bucket->padded + n_shard) * dt_dtype_size(bucket->grad_dtype);
}

static dt_status dt__onebit_make(dt_zero *zero) {
    for (int u = 0; u < zero->n_buckets; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        size_t N = (size_t)dt_comm_size(z->data_group),
               bytes = 2 * N * dt__onebit_message_bytes(zero, z->bucket);
        zero->messages_bytes = bytes > zero->messages_bytes ? bytes : zero->messages_bytes;
        for (int e = 0; e < 2 && !z->bucket->frozen; e++) {
            size_t count = e ? z->bucket->padded / N : z->bucket->padded;
            /* stored for dt_free, because the groups may be freed before the errors */
            z->error_bytes[e] = count * dt__zero_element_size(z);
            z->errors[e] =
                dt_alloc(zero->ctx, DT_MEM_OPTIM, z->error_bytes[e], "errors of 1-bit Adam");
            if (!z->errors[e]) return dt_error(zero->ctx);
            if (dt__fill(zero->ctx, z->bucket->grad_dtype, z->errors[e], count, 0) != DT_OK)
                return dt_error(zero->ctx);
        }
    }
    zero->messages =
        dt_alloc(zero->ctx, DT_MEM_COMM, zero->messages_bytes, "messages of 1-bit Adam");
    return dt_error(zero->ctx);
}

static void dt__onebit_free(dt_zero *zero) {
    for (int u = 0; zero->buckets && u < zero->n_buckets; u++)
        for (int e = 0; e < 2; e++)
            dt_free(zero->ctx, DT_MEM_OPTIM, zero->buckets[u].errors[e],
                zero->buckets[u].error_bytes[e]);
    dt_free(zero->ctx, DT_MEM_COMM, zero->messages, zero->messages_bytes);
}

/* Sets zero->sums to the sums of squares of N g, averaged over the N ranks of the data group, where
   g is a rank's own gradient. By Cauchy-Schwarz the result is an upper bound of the sums of squares
   of the summed gradient. */
static dt_status dt__onebit_square_sums(dt_zero *zero) {
    if (dt__norm_sum_kinds(zero, zero->mesh.data, zero->mesh.expert_data) != DT_OK)
        return dt_error(zero->ctx);
    for (size_t i = 0; i < zero->n_sums; i++)
        zero->sums[i] *= dt_comm_size(i < zero->n_dense ? zero->mesh.data : zero->mesh.expert_data);
    return DT_OK;
}

/* Returns 1 if, over one piece of a bucket, the sum of squares of this rank's own gradient is not
   finite. */
static int dt__onebit_at_fault(dt_zero *zero, const dt_bucket *bucket, size_t piece_index) {
    double copy[DT_PIECE], squares = 0; /* f32 or f64 */
    size_t bytes = DT_PIECE * dt_dtype_size(bucket->grad_dtype);
    if (dt__move(zero->ctx, copy, (char *)bucket->grad + piece_index * bytes, bytes) != DT_OK ||
        dt__sync(zero->ctx) != DT_OK)
        return 0;
    for (size_t i = 0; i < DT_PIECE; i++) {
        double x = dt__number(bucket->grad_dtype, copy, i);
        squares += x * x;
    }
    return !isfinite(squares);
}

/* All-to-all of the ranks' messages. If there is no group, because the rank is alone, the message
   is only copied. */
static dt_status dt__onebit_exchange(
    dt_zero *zero, const dt__zero_bucket *z, const char *out, char *in, size_t bytes) {
    if (!z->data_group) return dt__move(zero->ctx, in, out, bytes);
    return dt_all_to_all(z->data_group, out, in, bytes / sizeof(int32_t), DT_I32);
}

/* Adds this rank's gradient to a bucket's momentum, and exchanges the momentum. The mean of the
   received shards overwrites the gradient, which is no longer needed. */
static dt_status dt__onebit_momentum(dt_zero *zero, dt__zero_bucket *z, double grad_scale) {
    dt_ctx *ctx = zero->ctx;
    dt_bucket *u = z->bucket;
    dt_dtype type = u->grad_dtype;
    size_t N = (size_t)dt_comm_size(z->data_group), r = (size_t)dt_comm_rank(z->data_group),
           n_shard = u->padded / N;
    size_t bytes = dt__onebit_message_bytes(zero, u), words = bytes / sizeof(int32_t);
    char *out = (char *)zero->messages, *in = out + N * bytes;
    void *m = z->state[0], *v = z->state[1], *mean = dt__zero_element(z, u->grad, r * n_shard);
    size_t work_bytes =
        ctx->kernels.work_bytes
            ? dt__scratch_bytes(ctx, (2 * (u->padded / DT_PIECE + 1) + 1) * sizeof(double))
            : 0;
    void *work = dt_scratch(ctx, work_bytes);
    dt_momentum_args local = { .dtype = type,
        .m = m,
        .grad = u->grad,
        .count = u->padded,
        .beta1 = zero->desc.beta1,
        .grad_scale = (double)N * grad_scale };
    dt_sign_pack_args worker = { .dtype = type,
        .out = out,
        .x = m,
        .error = z->errors[0],
        .v = v,
        .count = u->padded,
        .parts = N,
        .work = work,
        .work_bytes = work_bytes };
    dt_sign_unpack_args served = { .dtype = type,
        .out = mean,
        .in = in,
        .v = dt__zero_element(z, v, r * n_shard),
        .count = n_shard,
        .n = N };
    dt_sign_pack_args server = { .dtype = type,
        .out = out + r * bytes,
        .x = mean,
        .error = z->errors[1],
        .v = dt__zero_element(z, v, r * n_shard),
        .count = n_shard,
        .parts = 1,
        .work = work,
        .work_bytes = work_bytes };
    if (DT__KERNEL(ctx, "1-bit Adam", momentum, &local) != DT_OK ||
        DT__KERNEL(ctx, "1-bit Adam", sign_pack, &worker) != DT_OK ||
        dt__onebit_exchange(zero, z, out, in, bytes) != DT_OK ||
        DT__KERNEL(ctx, "1-bit Adam", sign_unpack, &served) != DT_OK ||
        DT__KERNEL(ctx, "1-bit Adam", sign_pack, &server) != DT_OK ||
        dt_all_gather(z->data_group, out + r * bytes, out, words, DT_I32) != DT_OK)
        return dt_error(ctx);
    for (size_t k = 0; k < N; k++) {
        dt_sign_unpack_args all = { .dtype = type,
            .out = dt__zero_element(z, m, k * n_shard),
            .in = out + k * bytes,
            .v = dt__zero_element(z, v, k * n_shard),
            .count = n_shard,
            .n = 1 };
        if (DT__KERNEL(ctx, "1-bit Adam", sign_unpack, &all) != DT_OK) return dt_error(ctx);
    }
    return DT_OK;
}

// ==== 16. Making, stepping, freeing =============================================================

static void dt__zero_on_closing(dt_ctx *ctx, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (zero->chunks) dt__sync(ctx); /* completes copies from and to pinned memory */
    for (int u = 0; zero->buckets && u < zero->n_buckets; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        const dt_bucket *bucket = dt_bucket_get(ctx, u);
        dt_unpin(ctx, z->host_shard, bucket->shard_count * dt_dtype_size(bucket->dtype));
        if (!z->bucket) continue;
        size_t bytes = z->count * dt__zero_element_size(z);
        dt_mem mem = dt__in_host(zero->desc.offload_optim) ? DT_MEM_HOST : DT_MEM_OPTIM;
        if (dt_error(ctx) == DT_OK) dt__zero_free_gathered(zero, z);
        for (int s = 0; s < 2; s++) dt_free(ctx, mem, z->state[s], bytes);
        dt_free(ctx, mem, z->master, bytes);
        if (z->grad_bytes) dt_free(ctx, DT_MEM_GRADS, z->grad_shard, z->grad_bytes);
        dt_free(ctx, DT_MEM_GRADS, z->levels, z->levels_bytes);
    }
    dt__disk_close(zero);
    /* free the host copies of transfers that a failure has left unfinished */
    for (int u = 0; zero->buckets && u < zero->n_buckets; u++) {
        dt__disk_end(zero, &zero->buckets[u].disk_job, 0);
        dt__disk_end(zero, &zero->buckets[u].grad_job, 0);
    }
    dt__onebit_free(zero);
    for (int i = 0; zero->gather_plans && i < 3 * zero->n_stages; i++)
        dt_free(ctx, DT_MEM_HOST, zero->gather_plans[i].items,
            (size_t)zero->gather_plans[i].capacity * sizeof *zero->gather_plans[i].items);
    dt_free(ctx, DT_MEM_HOST, zero->gather_plans,
        3 * (size_t)zero->n_stages * sizeof *zero->gather_plans);
    dt_free(ctx, DT_MEM_COMM, zero->leaves, zero->leaves_bytes);
    dt_unpin(ctx, zero->sums, zero->n_sums * sizeof *zero->sums);
    dt_free(
        ctx, DT_MEM_HOST, zero->bucket_sums, zero->n_pipeline_buckets * sizeof *zero->bucket_sums);
    dt_free(ctx, DT_MEM_HOST, zero->buckets, (size_t)zero->n_buckets * sizeof *zero->buckets);
    dt_free(ctx, DT_MEM_HOST, zero, sizeof *zero);
}

static dt_status dt__zero_check(dt_ctx *ctx, const dt_zero_desc *d) {
    const dt_scale_desc *s = &d->scale;
    if (d->stage < 0 || d->stage > 3)
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: stage %d; use 0 to 3", d->stage);
    if (d->optimizer < DT_ADAMW || d->optimizer > DT_OPTIMIZER_CUSTOM)
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: optimizer %d", d->optimizer);
    if (d->optimizer == DT_OPTIMIZER_CUSTOM && (!d->update || d->states < 0 || d->states > 2))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_make: DT_OPTIMIZER_CUSTOM needs an update function and 0 to 2 states, got %d",
            d->states);
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
            s->min_scale >= 0))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_make: a dynamic loss scale from %g, growing by %g after %d steps, "
            "falling by %g after %d, at least %g",
            s->init, s->growth, s->interval, s->backoff, s->hysteresis, s->min_scale);
    return DT_OK;
}

static int dt__zero_state_arrays(const dt_zero_desc *d) {
    if (d->optimizer == DT_OPTIMIZER_CUSTOM) return d->states;
    return d->optimizer == DT_SGD ? d->momentum > 0 : 2;
}

/* Sets *pad, the number of elements of which a bucket's padded size is a multiple: DT_PIECE times
   the number of ranks in the bucket's shard group, or with `tree` in its data group. At stage 3
   also sets the number of shards, *parts, and the index of this rank's shard, *part. */
static void dt__zero_shard_bucket(
    const dt_bucket *bucket, size_t *pad, int *parts, int *part, void *user) {
    const dt_zero *zero = (const dt_zero *)user;
    const dt__zero_groups *g = dt__bucket_groups(zero, bucket);
    *pad = (size_t)DT_PIECE * (size_t)dt_comm_size(zero->desc.tree ? g->data : g->shard);
    if (zero->desc.stage < 3) return;
    *parts = dt_comm_size(g->shard);
    *part = dt_comm_rank(g->shard);
}

static dt_buckets_desc dt__zero_buckets_desc(dt_zero *zero) {
    const char *values = zero->desc.offload_params;
    dt_buckets_desc d = { .bucket_bytes = zero->desc.bucket_bytes,
        .offloaded = dt__on_disk(values) || dt__in_host(values),
        .reduce_each_micro = dt__zero_shards_grads(zero),
        .shard = dt__zero_shard_bucket,
        .user = zero };
    return d;
}

/* Makes the gather plans of all pipeline stages up to the last stage of this rank. */
static dt_status dt__gather_plans_make(dt_zero *zero) {
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        int stage = dt_param_get(zero->ctx, i)->param->stage;
        zero->n_stages = stage >= zero->n_stages ? stage + 1 : zero->n_stages;
    }
    size_t bytes = 3 * (size_t)zero->n_stages * sizeof *zero->gather_plans;
    zero->gather_plans =
        (dt__gather_plan *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "the order of gathers");
    if (zero->gather_plans) memset(zero->gather_plans, 0, bytes);
    return dt_error(zero->ctx);
}

static void dt__zero_listen(dt_zero *zero) {
    dt_listener *l = &zero->listener;
    l->grad_ready = dt__zero_on_grad_ready;
    l->closing = dt__zero_on_closing;
    l->user = zero;
    if (zero->desc.stage == 3) {
        l->enter = dt__zero_on_enter;
        l->leave = dt__zero_on_leave;
        l->gather = dt__zero_on_gather;
        l->release = dt__zero_on_release;
        l->reset = dt__zero_on_reset;
    }
    dt_listen(zero->ctx, l);
}

dt_zero *dt_zero_make(dt_ctx *ctx, dt_zero_desc desc) {
    dt_mesh_desc all = { 0 };
    if (dt_error(ctx) != DT_OK || dt__zero_check(ctx, &desc) != DT_OK) return NULL;
    dt_zero *zero = (dt_zero *)dt_alloc(ctx, DT_MEM_HOST, sizeof *zero, "dt_zero_make");
    if (!zero) return NULL;
    memset(zero, 0, sizeof *zero);
    zero->ctx = ctx;
    if (desc.beta1 == 0) desc.beta1 = 0.9;
    if (desc.beta2 == 0) desc.beta2 = 0.999;
    if (desc.eps == 0) desc.eps = 1e-8;
    zero->desc = desc;
    zero->states = dt__zero_state_arrays(&desc);
    zero->update_kernels = &ctx->kernels;
    zero->update_stream = ctx->stream;
    zero->storing_bucket = -1;
    if (dt__zero_offloads(zero) && ctx->kernels.alloc && !dt__is_dry_run(zero)) {
        zero->update_kernels = dt_kernels_cpu();
        zero->update_stream = NULL;
    }
    dt__zero_listen(zero);
    zero->mesh = desc.mesh ? *desc.mesh : dt_mesh_make(ctx, all);
    zero->desc.mesh = NULL; /* zero->mesh is the copy */
    zero->reducing_stage = zero->next_bucket = -1;
    if (dt_error(ctx) == DT_OK && dt__zero_groups_make(zero) == DT_OK &&
        dt__zero_check_params(zero) == DT_OK && dt__gather_plans_make(zero) == DT_OK &&
        dt_buckets_make(ctx, dt__zero_buckets_desc(zero)) == DT_OK)
        dt__zero_buckets_make(zero);
    if (dt_error(ctx) == DT_OK && desc.optimizer == DT_ONEBIT_ADAM) dt__onebit_make(zero);
    if (dt_error(ctx) == DT_OK) dt__scale_begin(zero);
    if (dt_error(ctx) == DT_OK) dt__compare_ranks(zero, 0);
    /* if any rank has failed to make its state, this barrier fails on every rank */
    if (dt_error(ctx) == DT_OK) dt_barrier(zero->mesh.world);
    if (dt_error(ctx) == DT_OK) return zero;
    dt_zero_free(zero);
    return NULL;
}

void dt_zero_free(dt_zero *zero) {
    if (!zero) return;
    dt_loss_scale(zero->ctx, 1);
    zero->ctx->reduce_each_micro = 0;
    dt_unlisten(zero->ctx, &zero->listener);
    dt__zero_on_closing(zero->ctx, zero);
}

/* Clears the gradients and their flags for the next step. */
static void dt__zero_step_end(dt_zero *zero) {
    for (int u = 0; u < zero->n_buckets; u++)
        zero->buckets[u].reduced = zero->buckets[u].accumulated = 0;
    zero->reducing_stage = -1;
    zero->tied_summed = 0;
    dt_clear_grads(zero->ctx);
}

/* Returns 1 if all gradients of the step have been reduced. */
static int dt__zero_grads_reduced(const dt_zero *zero) {
    for (int u = 0; u < zero->n_buckets; u++)
        if (!zero->buckets[u].bucket->frozen && !zero->buckets[u].reduced) return 0;
    return 1;
}

/* Gradient clipping by the global norm. Returns the factor min(1, clip / (norm + 1e-6)). The update
   applies the factor to every gradient as it reads the gradient, so the gradients in memory are not
   scaled. */
static double dt__clip_scale(const dt_zero *zero, double norm) {
    double scale = zero->desc.clip / (norm + 1e-6);
    return zero->desc.clip > 0 && scale < 1 ? scale : 1;
}

dt_step_info dt_zero_step(dt_zero *zero, double lr) {
    dt_step_info info = { .grad_norm = NAN, .clip_scale = 1, .loss_scale = 1, .bad_rank = -1 };
    dt__bad_grad fault;
    double norm = 0;
    if (!zero || dt_error(zero->ctx) != DT_OK) return info;
    info.step = zero->step;
    info.loss_scale = zero->loss_scale;
    if (!(lr >= 0 && lr < HUGE_VAL)) {
        dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_step: step %lld: learning rate %g",
            (long long)zero->step + 1, lr);
        return info;
    }
    if (!dt__zero_grads_reduced(zero)) {
        dt_fail(zero->ctx, DT_ERR_ARG,
            "dt_zero_step: step %lld has no complete gradient: dt_backward of its last "
            "micro-batch has not run",
            (long long)zero->step + 1);
        return info;
    }
    if (zero->step == 0 && zero->consecutive_skips == 0 && dt__compare_ranks(zero, 1) != DT_OK)
        return info;
    if (dt__reduce_tied(zero) != DT_OK || dt__grad_norm(zero, &norm) != DT_OK) return info;
    double bad = !isfinite(norm); /* if the norm is bad on any rank, no rank updates */
    if (dt_sum_doubles(zero->mesh.world, &bad, 1) != DT_OK) return info;
    if (bad > 0) {
        if (dt__bad_grad_find(zero, &fault) != DT_OK) return info;
        info.skipped = zero->desc.loss_scale != 0 && dt__scale_skip(zero, &fault) == DT_OK;
        if (zero->desc.loss_scale == 0) dt__bad_grad_fail(zero, &fault, norm);
        info.bad_rank = fault.rank;
        /* each pipeline stage knows only its own parameters */
        int here = fault.rank >= 0 && dt__zero_pp_rank(zero, fault.rank) == zero->mesh.coord.pp;
        info.bad_param = here ? dt_param_get(zero->ctx, fault.param) : NULL;
        info.bad_element = (size_t)fault.element;
        if (info.skipped) dt__zero_step_end(zero);
        return info;
    }
    norm /= zero->loss_scale;
    dt__zero_free_held(zero, -1); /* because the update makes the gathered copies stale */
    info.clip_scale = dt__clip_scale(zero, norm);
    if (dt__zero_update_all(zero, lr, info.clip_scale / zero->loss_scale) != DT_OK) return info;
    dt__scale_good(zero);
    dt__zero_step_end(zero);
    info.step = ++zero->step;
    info.grad_norm = norm;
    return info;
}

/* Returns the bucket of a parameter. Returns NULL and fails if `param` is frozen or is not a
   parameter of this context. */
static dt__zero_bucket *dt__zero_bucket_of(
    dt_zero *zero, const char *what, const dt_tensor *param) {
    dt_bucket *bucket =
        param && param->param && param->ctx == zero->ctx ? param->param->bucket : NULL;
    if (bucket && !bucket->frozen) return &zero->buckets[bucket->index];
    dt_fail(zero->ctx, DT_ERR_ARG, "%s: %s is %s", what,
        param && param->name ? param->name : "NULL",
        bucket ? "frozen" : "no parameter of this context");
    return NULL;
}

/* All-gathers an array of a bucket (a gradient or a state), of which this rank has `shard`, and
   copies the elements of `param` to host memory. */
static dt_status dt__zero_all_gather_param(dt_zero *zero, const dt__zero_bucket *z,
    const void *shard, const dt_tensor *param, void *host) {
    size_t size = dt__zero_element_size(z), bytes = z->bucket->padded * size;
    void *full = dt_alloc(zero->ctx, DT_MEM_TEMP, bytes, "collecting a parameter's state");
    if (!full) return dt_error(zero->ctx);
    dt__move(zero->ctx, dt__zero_element(z, full, z->offset), shard, z->count * size);
    if (zero->desc.stage >= 1)
        dt_all_gather(z->shard_group, dt__zero_element(z, full, z->offset), full, z->count,
            z->bucket->grad_dtype);
    if (dt_error(zero->ctx) == DT_OK)
        dt__move(zero->ctx, host, dt__zero_element(z, full, param->param->offset),
            param->param->count * size);
    dt__sync(zero->ctx);
    dt_free(zero->ctx, DT_MEM_TEMP, full, bytes);
    return dt_error(zero->ctx);
}

dt_status dt_zero_state(dt_zero *zero, int which, const dt_tensor *param, void *host) {
    if (!zero || dt_error(zero->ctx) != DT_OK) return zero ? dt_error(zero->ctx) : DT_ERR_ARG;
    int master =
        which == DT_STATE_MASTER && param && dt_grad_dtype(param) != param->dtype && zero->step > 0;
    if (which < 0 || (which >= zero->states && !master) || !host)
        return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_state: state %d of %d%s", which,
            zero->states, host ? "" : ", to host memory that is NULL");
    dt__zero_bucket *z = dt__zero_bucket_of(zero, "dt_zero_state", param);
    size_t bytes = z ? dt__disk_array_bytes(zero, z->bucket, DT__STATE_0 + which) : 0;
    if (!z || !bytes)
        return z ? dt__zero_all_gather_param(
                       zero, z, master ? z->master : z->state[which], param, host)
                 : dt_error(zero->ctx);
    void *shard = dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "collecting a parameter's state");
    if (!shard) return dt_error(zero->ctx);
    if (dt__disk_transfer_now(zero, &z->disk_job, 0, shard, bytes,
            dt__disk_offset(zero, z->bucket->index, DT__STATE_0 + which, zero->disk->slot),
            "optimizer state") == DT_OK)
        dt__zero_all_gather_param(zero, z, shard, param, host);
    dt_free(zero->ctx, DT_MEM_HOST, shard, bytes);
    return dt_error(zero->ctx);
}

dt_status dt_zero_grad(dt_zero *zero, const dt_tensor *param, void *host) {
    if (!zero || dt_error(zero->ctx) != DT_OK) return zero ? dt_error(zero->ctx) : DT_ERR_ARG;
    if (!host) return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_grad: host memory is NULL");
    if (!dt__zero_grads_reduced(zero))
        return dt_fail(zero->ctx, DT_ERR_ARG,
            "dt_zero_grad: step %lld has no complete "
            "gradient",
            (long long)zero->step + 1);
    if (dt__onebit_frozen(zero))
        return dt_fail(
            zero->ctx, DT_ERR_UNSUPPORTED, "dt_zero_grad: 1-bit Adam no longer sums gradients");
    if (dt__reduce_tied(zero) != DT_OK) return dt_error(zero->ctx);
    dt__zero_bucket *z = dt__zero_bucket_of(zero, "dt_zero_grad", param);
    size_t bytes = z ? dt__disk_array_bytes(zero, z->bucket, DT__GRAD) : 0;
    void *shard =
        bytes ? dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "collecting a parameter's gradient") : NULL;
    if (z && shard && dt__grads_copy_out(zero, z, 0, shard, z->count) == DT_OK)
        dt__zero_all_gather_param(zero, z, shard, param, host);
    if (z && !bytes) dt__zero_all_gather_param(zero, z, dt__zero_grad_shard(z), param, host);
    dt_free(zero->ctx, DT_MEM_HOST, shard, bytes);
    if (dt_error(zero->ctx) != DT_OK) return dt_error(zero->ctx);
    for (size_t i = 0; i < param->param->count && zero->loss_scale != 1; i++) {
        if (z->bucket->grad_dtype == DT_F64)
            ((double *)host)[i] /= zero->loss_scale;
        else
            ((float *)host)[i] = (float)(((float *)host)[i] / zero->loss_scale);
    }
    return DT_OK;
}

int64_t dt_zero_steps(const dt_zero *zero) { return zero ? zero->step : 0; }

size_t dt_zero_state_bytes(const dt_zero *zero) {
    if (!zero || dt__on_disk(zero->desc.offload_optim) || dt__in_host(zero->desc.offload_optim))
        return 0;
    size_t bytes = 0;
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt_bucket *bucket = zero->buckets[u].bucket;
        size_t arrays = (size_t)(zero->states + dt__zero_has_master(bucket));
        if (!bucket->frozen)
            bytes += zero->buckets[u].count * arrays * dt_dtype_size(bucket->grad_dtype);
        if (zero->desc.optimizer == DT_ONEBIT_ADAM) bytes += dt__onebit_error_bytes(zero, bucket);
    }
    return bytes;
}

// ==== 17. Memory account: code ==================================================================

dt_zero_bytes dt_zero_formula(dt_zero_formula_desc d) {
    dt_zero_bytes none = { .params = NAN, .grads = NAN, .optim = NAN, .total = NAN, .sent = NAN },
                  b;
    if (d.stage < 0 || d.stage > 3 || d.ranks < 0 || d.micros < 0 ||
        !(d.elements >= 0 && d.values >= 0 && d.grads >= 0 && d.state >= 0))
        return none;
    if (d.values == 0 && d.grads == 0 && d.state == 0) d.values = d.grads = 4, d.state = 8;
    double n = d.ranks ? d.ranks : 1, a = d.micros ? d.micros : 1;
    double reduced = d.stage >= 2 ? a : 1; /* number of reductions of a gradient */
    /* number of gathers of a parameter */
    double gathered = d.stage == 3 && !d.keep_gathered ? 2 * a : 1;
    b.params = d.values * d.elements / (d.stage >= 3 ? n : 1);
    b.grads = d.grads * d.elements / (d.stage >= 2 ? n : 1);
    b.optim = d.state * d.elements / (d.stage >= 1 ? n : 1);
    b.total = b.params + b.grads + b.optim;
    b.sent = (d.stage == 0 ? 2 * d.grads : reduced * d.grads + gathered * d.values) * d.elements *
             (n - 1) / n;
    return b;
}

// ==== 18. Checkpoints: files ====================================================================

/* The operations of a save (dt__file_op), done by the I/O thread of section 13, or by the calling
   thread if the save is not in the background. Atomic commit of a checkpoint:

       all ranks   dt__save_start    write their bytes; fsync each file; close
       (wait until every rank has done this)
       rank 0      dt__save_commit   write config.json and manifest.json, fsync, close
                                     fsync DIR/step-200.1a2b3c.tmp     the file names are durable
                                     rename it to DIR/step-200         <- commit
                                     fsync DIR                         the rename is durable
                                     remove old checkpoints

   A crash before the rename leaves a .tmp folder, which the next job removes. A crash after the
   rename leaves a complete checkpoint. */

enum { DT__CKPT_COPY = 4 << 20, DT__CKPT_CHUNK = 1 << 20 };
enum { DT__SAVE_IDLE = 0, DT__SAVE_WRITING, DT__SAVE_COMMITTING };
static const char *const dt__ckpt_names[DT__CKPT_FILES] = { "model.safetensors",
    "optim.safetensors" };

/* Sets the path of a file to dir/name. If the path is too long, records the failure. */
static void dt__files_path(dt__files *f, int file, const char *dir, const char *name) {
    dt__writer *w = &f->writer;
    if (snprintf(f->path[file], DT__PATH_BYTES, "%s/%s", dir, name) < DT__PATH_BYTES) return;
    f->path[file][0] = 0;
    if (!w->why[0]) snprintf(w->why, sizeof w->why, "%.80s...: the path is too long", dir);
}

/* Identifies a checkpoint: its step, and its number among the checkpoints of this step. The folder
   step-200 is the first checkpoint of step 200 (repeat = 1), step-200-2 is the second
   (repeat = 2). */
typedef struct dt__ckpt_id {
    int64_t step;
    int repeat;
} dt__ckpt_id;
static const dt__ckpt_id dt__ckpt_none = { -1, 0 };
static const dt__ckpt_id dt__ckpt_last = { INT64_MAX, 0x7fffffff };
static int dt__ckpt_before(dt__ckpt_id a, dt__ckpt_id b) {
    return a.step != b.step ? a.step < b.step : a.repeat < b.repeat;
}

static void dt__ckpt_name(dt__ckpt_id id, char *name, size_t bytes) {
    snprintf(
        name, bytes, id.repeat > 1 ? "step-%lld-%d" : "step-%lld", (long long)id.step, id.repeat);
}

/* Parses the first n bytes of `name`. Returns dt__ckpt_none unless they have exactly the form that
   dt__ckpt_name writes. */
static dt__ckpt_id dt__ckpt_parse_name(const char *name, size_t n) {
    long long step = -1;
    dt__ckpt_id id = { -1, 1 };
    char text[64], same[64];
    snprintf(text, sizeof text, "%.*s", n < sizeof text ? (int)n : 0, name);
    if (sscanf(text, "step-%15lld-%9d", &step, &id.repeat) < 1) return dt__ckpt_none;
    if (step < 0 || id.repeat < 1) return dt__ckpt_none;
    id.step = step; /* at most 15 digits, so that a double holds the step exactly */
    dt__ckpt_name(id, same, sizeof same);
    return strcmp(same, text) == 0 ? id : dt__ckpt_none;
}

typedef struct dt__newest_scan {
    dt__ckpt_id below, found;
} dt__newest_scan;
static void dt__newest_add(void *arg, const char *name) {
    dt__newest_scan *n = (dt__newest_scan *)arg;
    dt__ckpt_id id = dt__ckpt_parse_name(name, strlen(name));
    if (dt__ckpt_before(n->found, id) && dt__ckpt_before(id, n->below)) n->found = id;
}

/* Sets *found to a folder's newest checkpoint that is older than `below`, or to dt__ckpt_none if
   there is none. Returns 0, or -1 if the folder cannot be listed. */
static int dt__newest_below(
    const dt_io *io, const char *dir, dt__ckpt_id below, dt__ckpt_id *found) {
    dt__newest_scan n = { below, dt__ckpt_none };
    errno = 0;
    int answer = io->list_folder(io->user, dir, dt__newest_add, &n);
    *found = n.found;
    return answer;
}

int64_t dt_checkpoint_newest(const dt_io *io, const char *dir, char *name, size_t bytes) {
    dt__ckpt_id id = dt__ckpt_none;
    if (name && bytes) name[0] = 0;
    if (!io || !io->list_folder || !dir) return errno = EINVAL, -2;
    if (dt__newest_below(io, dir, dt__ckpt_last, &id) != 0) return errno == ENOENT ? -1 : -2;
    if (id.step >= 0 && name && bytes) dt__ckpt_name(id, name, bytes);
    return id.step;
}

/* Removes a checkpoint. The manifest is removed first, so that a partly removed checkpoint never
   looks complete. Other files in the checkpoint's folder stay. */
static int dt__ckpt_remove(const dt_io *io, const char *folder) {
    static const char *const names[] = { "manifest.json", "config.json", "model.safetensors",
        "optim.safetensors" };
    return io->remove_folder(io->user, folder, names, 4);
}

/* dt__tmp_sweep_one removes a folder of DIR if its name has exactly the form step-200.1a2b3c.tmp: a
   killed job has left this folder. */
typedef struct dt__tmp_sweep {
    const dt_io *io;
    const char *dir;
} dt__tmp_sweep;
static void dt__tmp_sweep_one(void *arg, const char *name) {
    const dt__tmp_sweep *sweep = (const dt__tmp_sweep *)arg;
    const char *dot = strchr(name, '.');
    char path[DT__PATH_BYTES + 80];
    if (!dot || strspn(dot + 1, "0123456789abcdef") != 6 || strcmp(dot + 7, ".tmp") != 0) return;
    if (dt__ckpt_parse_name(name, (size_t)(dot - name)).step < 0) return;
    snprintf(path, sizeof path, "%s/%s", sweep->dir, name);
    dt__ckpt_remove(sweep->io, path);
}

/* Keeps the checkpoint `newest` and the (keep - 1) checkpoints before it, and removes older
   checkpoints; keep = 0 keeps all. Checkpoints of later steps are neither counted nor removed:
   dt_checkpoint_load has skipped them as damaged. A checkpoint that cannot be removed stays, which
   is harmless. */
static void dt__ckpt_remove_old(const dt_io *io, const char *newest, int64_t keep) {
    const char *slash = strrchr(newest, '/');
    dt__ckpt_id at = dt__ckpt_parse_name(slash + 1, strlen(slash + 1));
    char name[64], dir[DT__PATH_BYTES], path[DT__PATH_BYTES + 64];
    snprintf(dir, sizeof dir, "%.*s", (int)(slash - newest), newest);
    for (int64_t i = 1; i < keep && at.step >= 0; i++)
        if (dt__newest_below(io, dir, at, &at) != 0) return;
    while (keep > 0 && at.step >= 0 && dt__newest_below(io, dir, at, &at) == 0 && at.step >= 0) {
        dt__ckpt_name(at, name, sizeof name);
        snprintf(path, sizeof path, "%s/%s", dir, name);
        dt__ckpt_remove(io, path);
    }
}

// ==== 19. Checkpoints: contents =================================================================

/* Which elements this rank has written to one of the two safetensors files. A digest is a sum over
   elements, so the sum of all ranks' digests does not depend on the sharding. */
typedef struct dt__ckpt_file {
    struct dt_checkpoint *owner;
    int file;
    /* (n) for each tensor, the digest of the elements that this rank has written; later the digest
       of all elements */
    uint64_t *digest;
    int64_t *count; /* (n) for each tensor, the number of elements that this rank has written */
    int n;
} dt__ckpt_file;

/* Background save: a buffer of bytes that the I/O thread writes later. */
typedef struct dt__staging_buffer {
    struct dt__staging_buffer *next;
    size_t capacity, used; /* size and used bytes of the data, which follow this struct */
} dt__staging_buffer;

struct dt_checkpoint {
    dt_zero *zero;
    dt_ctx *ctx;
    dt_checkpoint_desc desc;
    dt_listener listener;
    const char *what; /* name of the public call, for messages */
    /* content of the lock file: the process that holds the lock, and the time at which this process
       took the lock, by its own clock */
    char lock_text[300];
    dt__files files;
    dt_weights *w[DT__CKPT_FILES]; /* the safetensors files: names and offsets of all tensors */
    dt__ckpt_file file[DT__CKPT_FILES];
    int n_files;                       /* DT__CKPT_FILES, or 1 for an export (no optimizer) */
    const dt_export_desc *export_desc; /* NULL for a checkpoint */
    int saving;                        /* phase of a save: DT__SAVE_* */
    /* newest checkpoint of desc.dir that this job has loaded, skipped as damaged, or saved */
    dt__ckpt_id newest_known;
    double done, total; /* elements written, and elements to write, for desc.progress */
    char *config;       /* config text of the loaded checkpoint */
    char path[DT__PATH_BYTES];
    /* the save's operations on this rank: writes if the save is staged, and those of
       dt__save_start; then those of dt__save_commit */
    dt__io_request request;
    dt__file_op *ops;
    int n_ops, ops_capacity;
    /* 1: the save is staged. buffers: all buffers of this rank; buffer: the buffer that is being
       filled */
    int staged;
    dt__staging_buffer *buffers, *buffer;
    char *manifest; /* on rank 0 only */
    size_t manifest_bytes, manifest_capacity;
    char *config_json; /* a copy of desc.config_json */
    /* 1 if this rank has created the folder DT__TEMP or the file of an export. After a failure this
       rank removes the folder or the file */
    int created;
};

/* Returns the weight of a word's index in the digest. The weight is never 0, and 2^32 consecutive
   indices have distinct weights. k is (index + 1) times an odd number, modulo 2^32. */
static uint32_t dt__words_weight(uint32_t k) {
    k ^= k >> 15;
    k *= 2246822507u;
    return k ^ k >> 13;
}

/* Returns a digest of words: the sum of word times weight over all words, modulo 2^64, where the
   weight depends on the word's index. If one word changes, the digest changes by the word's
   difference times its weight, which is not 0 and is less than 2^64. If two different words are
   swapped, the digest changes, because their weights differ. Other damage leaves the digest
   unchanged only if the changes cancel by chance. `i` is the index of the first word, `size` the
   bytes of a word. Each size has a loop of its own, so that compilers vectorize the loops. */
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

/* dt__digest_split splits a digest into 4 doubles of 16 bits each, so that their sums over ranks
   are exact. dt__digest_join makes a digest from the four sums. */
static void dt__digest_split(double *to, uint64_t digest) {
    for (int k = 0; k < 4; k++) to[k] = (double)(digest >> (16 * k) & 0xffff);
}
static uint64_t dt__digest_join(const double *from) {
    uint64_t digest = 0;
    for (int k = 0; k < 4; k++) digest += (uint64_t)from[k] << (16 * k);
    return digest;
}

/* Returns the digest of the elements [first, first + count) of a tensor; `data` holds these
   elements. */
static uint64_t dt__elements_digest(
    dt_dtype dtype, int64_t first, const void *data, int64_t count) {
    size_t size = dt_dtype_size(dtype), word = size < 4 ? size : 4;
    uint64_t per = size / word, sum = 0;
    for (int64_t at = 0, n; at < count; at += n) { /* dt__words_digest counts in 32 bits */
        n = count - at < 1 << 28 ? count - at : 1 << 28;
        sum += dt__words_digest((uint64_t)(first + at) * per,
            (const char *)data + (size_t)at * size, (size_t)n * (size_t)per, word);
    }
    return sum;
}

/* All-gather of texts. Returns the texts of all ranks in rank order, each padded with blanks to a
   multiple of 4 bytes; NULL on failure. *bytes is the length of the result; free the result with
   dt_free(.., *bytes + 1). The texts are sent by dt_sum_doubles, with 4 bytes of text in each
   double, because dt_sum_doubles works in host memory on every device. */
static char *dt__all_gather_texts(dt_ctx *ctx, const char *mine, size_t n, size_t *bytes) {
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

/* Sets *p to a parameter's position in model.safetensors. p->n = 0 means that the parameter is
   stored under its own name. */
static dt_status dt__ckpt_map_weight(const dt_checkpoint *c, const dt_tensor *t, dt_weight_map *p) {
    memset(p, 0, sizeof *p);
    if (c->desc.map_weight) c->desc.map_weight(t, p, c->desc.user);
    if (p->n < 0 || p->n > 2)
        return dt_fail(
            c->ctx, DT_ERR_ARG, "%s: map_weight gives %s %d parts; 1 or 2", c->what, t->name, p->n);
    for (int i = 0; i < 2; i++) p->part[i].name = p->n ? p->name[i] : t->name;
    return DT_OK;
}

/* Returns 1 if this rank takes part in writing a bucket. Of the replicas along tp, and for tied
   parameters along pp, only the first replica writes. If a parameter is sharded over some of the tp
   ranks, the shard group that contains the first rank of tp writes the parameter. */
static int dt__ckpt_is_writer(const dt_zero *zero, const dt_bucket *bucket) {
    const dt_param_desc *d = dt__bucket_desc(zero, bucket);
    int tp = zero->mesh.sizes.tp, lowest = zero->mesh.coord.tp;
    for (int c = 0; c < 3; c++)
        for (int i = 0; d->shards[c].comm && i < dt_comm_size(d->shards[c].comm); i++) {
            int at = dt_comm_world_rank(d->shards[c].comm, i) % tp;
            lowest = at < lowest ? at : lowest;
        }
    dt_comm *tied = dt__tied_group(zero, bucket);
    return lowest == 0 && (!tied || dt_comm_rank(tied) == 0);
}

static const char *const dt__state_names[] = { "m.", "v.", "master." };
static int dt__ckpt_has_array(const dt_zero *zero, const dt_bucket *bucket, int array) {
    if (bucket->frozen) return 0;
    return array == DT__MASTER ? zero->step > 0 && dt__zero_has_master(bucket)
                               : array < zero->states;
}

static char *dt__state_name(dt_ctx *ctx, int array, const char *name) {
    return dt__concat_text(ctx, dt__state_names[array], strlen(dt__state_names[array]), name);
}

/* Adds one tensor to the list of tensors, in JSON: [file,name,type,d0,d1,...] with the dimensions
   d0, d1, ... */
static void dt__list_add(
    dt_json_out *o, int file, const char *name, dt_dtype dtype, dt_shape shape) {
    dt_json_open(o, NULL, '[');
    dt_json_put_int(o, NULL, file);
    dt_json_put_string(o, NULL, name);
    dt_json_put_int(o, NULL, dtype);
    for (int i = 0; i < shape.nd; i++) dt_json_put_int(o, NULL, shape.d[i]);
    dt_json_close(o, ']');
}

static dt_status dt__list_param(const dt_checkpoint *c, dt_json_out *o, const dt_tensor *t) {
    const dt_bucket *bucket = t->param->bucket;
    dt_weight_map p;
    if (dt__ckpt_map_weight(c, t, &p) != DT_OK) return dt_error(c->ctx);
    if (p.n == 0) dt__list_add(o, DT__MODEL, t->name, t->dtype, t->param->full);
    for (int i = 0; i < p.n; i++) dt__list_add(o, DT__MODEL, p.name[i], t->dtype, p.shape);
    for (int a = 0; a <= DT__MASTER && !c->export_desc; a++) {
        char *name =
            dt__ckpt_has_array(c->zero, bucket, a) ? dt__state_name(c->ctx, a, t->name) : NULL;
        if (name) dt__list_add(o, DT__OPTIM, name, bucket->grad_dtype, t->param->full);
        dt__string_free(c->ctx, name);
    }
    return dt_error(c->ctx);
}

/* 1-bit Adam: writes the name of the tensor that stores an error array of this rank to `name`. e: 0
   for the worker error, 1 for the server error. Every rank stores its own errors. */
static void dt__onebit_error_name(
    const dt_checkpoint *c, int bucket, int e, char *name, size_t bytes) {
    snprintf(name, bytes, "error%d.%d.%d", e, dt_ctx_rank(c->ctx), bucket);
}
static dt_shape dt__onebit_error_shape(const dt__zero_bucket *z, int e) {
    return DT_SHAPE((int64_t)(z->error_bytes[e] / dt__zero_element_size(z)));
}

/* Lists this rank's tensors: the first rank of each pipeline stage lists all tensors of its stage,
   and every rank lists its own 1-bit Adam errors. */
static dt_status dt__list_local(const dt_checkpoint *c, dt_json_out *o) {
    const dt_zero *zero = c->zero;
    const dt_mesh_desc *at = &zero->mesh.coord;
    int first = at->dp == 0 && at->cp == 0 && at->ep == 0 && at->tp == 0;
    for (int i = 0; i < dt_param_count(c->ctx) && first; i++) {
        const dt_tensor *t = dt_param_get(c->ctx, i);
        if (dt__ckpt_is_writer(zero, t->param->bucket) && dt__list_param(c, o, t) != DT_OK) break;
    }
    for (int u = 0; u < zero->n_buckets && !c->export_desc; u++)
        for (int e = 0; e < 2 && zero->buckets[u].errors[e]; e++) {
            char name[64];
            dt__onebit_error_name(c, u, e, name, sizeof name);
            dt__list_add(o, DT__OPTIM, name, zero->buckets[u].bucket->grad_dtype,
                dt__onebit_error_shape(&zero->buckets[u], e));
        }
    return dt_error(c->ctx);
}

static dt_status dt__list_declare(dt_checkpoint *c, const dt_json *j, int node) {
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
    /* the llm.c format has a fixed list of tensors; dt_weights_save compares their shapes */
    if (t && w->desc.llmc.version) return DT_OK;
    if (!t)
        return dt_weights_declare(w, name, (dt_dtype)dtype, shape) < 0 ? dt_error(c->ctx) : DT_OK;
    int same = t->dtype == (dt_dtype)dtype && t->shape.nd == shape.nd;
    for (int i = 0; i < shape.nd; i++) same &= t->shape.d[i] == shape.d[i];
    return same ? DT_OK
                : dt_fail(c->ctx, DT_ERR_ARG, "dt_checkpoint: '%s' is %s and %s", name,
                      dt__shape_text(t->shape).s, dt__shape_text(shape).s);
}

static void dt__list_free(dt_checkpoint *c) {
    for (int f = 0; f < DT__CKPT_FILES; f++) {
        dt__ckpt_file *file = &c->file[f];
        if (c->w[f]) dt__weights_destroy(c->w[f]);
        c->w[f] = NULL;
        dt_free(c->ctx, DT_MEM_HOST, file->digest, (size_t)(file->n + 1) * sizeof *file->digest);
        dt_free(c->ctx, DT_MEM_HOST, file->count, (size_t)(file->n + 1) * sizeof *file->count);
        memset(file, 0, sizeof *file);
    }
}

static void dt__ckpt_sink(
    void *user, int index, int64_t first, int64_t count, const void *data, int64_t offset);

/* Returns the size in bytes of a file's header. */
static int64_t dt__header_bytes(const dt_weights *w) {
    uint64_t n;
    memcpy(&n, w->file[0].header, sizeof n);
    return w->desc.llmc.version ? (int64_t)DT__LLMC_HEADER_BYTES : (int64_t)n + 8;
}

/* [collective: world] Sets c->w: the tensors of all pipeline stages, with their offsets in the
   files DT__MODEL and DT__OPTIM. */
static dt_status dt__list_make(dt_checkpoint *c) {
    dt_ctx *ctx = c->ctx;
    dt_json_out mine = { ctx, NULL, 0, 0 }, all = { ctx, NULL, 0, 0 };
    size_t bytes = 0;
    dt__list_free(c);
    for (int f = 0; f < c->n_files && dt_error(ctx) == DT_OK; f++) {
        dt_weights_desc desc;
        memset(&desc, 0, sizeof desc);
        if (c->export_desc) desc.llmc = c->export_desc->llmc;
        c->w[f] = dt_weights_create(ctx, c->files.path[f], desc);
        c->file[f].owner = c;
        c->file[f].file = f;
        if (c->w[f]) c->w[f]->sink = (dt__sink){ dt__ckpt_sink, &c->file[f] };
    }
    /* a text that starts with a blank has a comma before each tensor, so the texts can be joined */
    dt__json_write(&mine, " ", 1);
    dt__list_local(c, &mine);
    char *text = dt__all_gather_texts(ctx, mine.text, mine.used, &bytes);
    dt__json_write(&all, "[0", 2);
    if (text) dt__json_write(&all, text, bytes);
    dt__json_write(&all, "]", 1);
    dt_json *j = dt_error(ctx) == DT_OK
                     ? dt_json_parse(ctx, "the list of tensors", all.text, all.used)
                     : NULL;
    for (int i = 1; i < dt_json_count(j, 0) && dt_error(ctx) == DT_OK; i++)
        dt__list_declare(c, j, dt_json_at(j, 0, i));
    dt_json_free(j);
    if (text) dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
    dt_json_out_free(&mine);
    dt_json_out_free(&all);
    for (int f = 0; f < c->n_files && dt_error(ctx) == DT_OK; f++) {
        dt__ckpt_file *file = &c->file[f];
        dt__weights_layout(c->w[f]);
        size_t n = (size_t)dt_weights_count(c->w[f]) + 1;
        file->digest = (uint64_t *)dt__host_zeroed(ctx, n * sizeof *file->digest, "digests");
        file->count = (int64_t *)dt__host_zeroed(ctx, n * sizeof *file->count, "digests");
        file->n = (int)n - 1;
    }
    return dt_error(ctx);
}

// ==== 20. Checkpoints: saving ===================================================================

static void dt__save_add_op(dt_checkpoint *c, dt__file_op op) {
    dt__file_op *grown = (dt__file_op *)dt__grow(
        c->ctx, c->ops, c->n_ops, &c->ops_capacity, sizeof *grown, "operations of a save");
    if (!grown) return;
    c->ops = grown;
    c->ops[c->n_ops++] = op;
}

/* Copies bytes to a buffer, for the I/O thread to write later. If the bytes continue the previous
   write, they become part of the previous write. */
static void dt__staging_add(
    dt_checkpoint *c, int file, const void *data, int64_t bytes, int64_t offset) {
    dt__staging_buffer *copy = c->buffer, *last_copy = NULL;
    for (; copy && copy->capacity - copy->used < (size_t)bytes; copy = copy->next) last_copy = copy;
    if (!copy) {
        size_t capacity = bytes > DT__CKPT_COPY ? (size_t)bytes : (size_t)DT__CKPT_COPY;
        copy = (dt__staging_buffer *)dt_alloc(
            c->ctx, DT_MEM_HOST, sizeof *copy + capacity, "a copy to be saved in the background");
        if (!copy) return;
        copy->next = NULL;
        copy->capacity = capacity;
        copy->used = 0;
        if (last_copy)
            last_copy->next = copy;
        else
            c->buffers = copy;
    }
    c->buffer = copy;
    char *to = (char *)(copy + 1) + copy->used;
    dt__file_op *last = c->n_ops ? &c->ops[c->n_ops - 1] : NULL;
    memcpy(to, data, (size_t)bytes);
    copy->used += (size_t)bytes;
    if (last && last->file == file && last->offset + last->bytes == offset &&
        (char *)last->data + last->bytes == to)
        last->bytes += bytes;
    else
        dt__save_add_op(c, (dt__file_op){ .kind = DT__OP_WRITE,
                               .file = file,
                               .to = file,
                               .data = to,
                               .bytes = bytes,
                               .offset = offset });
}

/* Marks the buffers as empty but does not free them, because allocating memory for the next save
   takes longer than copying to it. */
static void dt__staging_reuse(dt_checkpoint *c) {
    for (dt__staging_buffer *copy = c->buffers; copy; copy = copy->next) copy->used = 0;
    c->buffer = c->buffers;
    c->n_ops = 0;
}

static void dt__staging_free(dt_checkpoint *c) {
    for (dt__staging_buffer *next; c->buffers; c->buffers = next) {
        next = c->buffers->next;
        dt_free(c->ctx, DT_MEM_HOST, c->buffers, sizeof *c->buffers + c->buffers->capacity);
    }
    dt_free(c->ctx, DT_MEM_HOST, c->ops, (size_t)c->ops_capacity * sizeof *c->ops);
}

/* dt_weights_write calls this function with the bytes to write (dt__sink). Adds the elements'
   digest to the tensor's digest, and writes the bytes, or stages them for a background save. */
static void dt__ckpt_sink(
    void *user, int index, int64_t first, int64_t count, const void *data, int64_t offset) {
    dt__ckpt_file *file = (dt__ckpt_file *)user;
    dt_checkpoint *c = file->owner;
    const dt_weight *t = dt_weights_get(c->w[file->file], index);
    int64_t bytes = count * (int64_t)dt_dtype_size(t->dtype);
    file->digest[index] += dt__elements_digest(t->dtype, first, data, count);
    file->count[index] += count;
    dt__files *f = &c->files;
    if (c->staged)
        dt__staging_add(c, file->file, data, bytes, offset);
    else
        dt__writer_write(&f->writer, f->path[file->file], f->fd[file->file], data, bytes, offset);
}

static void dt__ckpt_progress(dt_checkpoint *c, double elements) {
    c->done += elements;
    if (c->desc.progress && dt_ctx_rank(c->ctx) == 0 && c->total > 0)
        c->desc.progress(c->done < c->total ? c->done / c->total : 1, c->desc.user);
}

/* Saves the parameters of a bucket. All ranks of the bucket's data group hold these parameters (at
   stage 3 after a gather), and each rank writes a fraction. */
static dt_status dt__save_params(dt_checkpoint *c, dt__zero_bucket *z) {
    dt_ctx *ctx = c->ctx;
    dt_bucket *bucket = z->bucket;
    dt_weights *w = c->w[DT__MODEL];
    int gathered = !bucket->data;
    if (dt__gather_outside_op(dt_param_get(ctx, bucket->first_param)) != DT_OK)
        return dt_error(ctx);
    w->share = dt_comm_rank(z->data_group);
    w->shares = dt_comm_size(z->data_group);
    for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        dt_weight_map p;
        if (dt__ckpt_map_weight(c, t, &p) != DT_OK) return dt_error(ctx);
        if (dt_weights_save(w, t, p.columns, p.part, p.n ? p.n : 1) != DT_OK) return dt_error(ctx);
    }
    dt__bucket_release(ctx, bucket, 0, gathered);
    return dt_error(ctx);
}

/* Returns the address, in host memory, of elements [from, from + n) of the bucket's state array;
   this rank's shard contains these elements. Elements that are on a device or on disk are first
   copied to `host`. Returns NULL on failure. */
static const void *dt__state_get(
    dt_zero *zero, dt__zero_bucket *z, int array, size_t from, size_t n, void *host) {
    size_t size = dt__zero_element_size(z), at = (from - z->offset) * size;
    char *here = (char *)(array == DT__MASTER ? z->master : z->state[array]);
    if (here && (!zero->ctx->kernels.alloc || dt__in_host(zero->desc.offload_optim)))
        return here + at;
    if (here &&
        (dt__move(zero->ctx, host, here + at, n * size) != DT_OK || dt__sync(zero->ctx) != DT_OK))
        return NULL;
    if (here) return host;
    int64_t offset = dt__disk_offset(zero, z->bucket->index, array, zero->disk->slot) + (int64_t)at;
    return dt__disk_transfer_now(
               zero, &z->disk_job, 0, host, n * size, offset, "optimizer state") == DT_OK
               ? host
               : NULL;
}

/* The inverse of dt__state_get: stores the elements at `host` in the state array. */
static dt_status dt__state_set(
    dt_zero *zero, dt__zero_bucket *z, int array, size_t from, size_t n, void *host) {
    size_t size = dt__zero_element_size(z), at = (from - z->offset) * size;
    char *here = (char *)(array == DT__MASTER ? z->master : z->state[array]);
    if (here && dt__move(zero->ctx, here + at, host, n * size) == DT_OK) dt__sync(zero->ctx);
    if (here) return dt_error(zero->ctx);
    int64_t offset = dt__disk_offset(zero, z->bucket->index, array, zero->disk->slot) + (int64_t)at;
    return dt__disk_transfer_now(zero, &z->disk_job, 1, host, n * size, offset, "optimizer state");
}

/* Resharding. Transfers elements [from, to) of a bucket's state array between `host` and the file
   w: writes if w is open for writing, else reads. Each contiguous range of a parameter's local
   slice is transferred to or from its position in the full tensor, so the file does not depend on
   the layout. Padding, that is, elements of a slice beyond the end of the full tensor, is
   skipped. */
static dt_status dt__state_transfer(dt_checkpoint *c, dt_weights *w, const dt_bucket *bucket,
    int array, size_t from, size_t to, char *host) {
    size_t size = dt_dtype_size(bucket->grad_dtype);
    for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++) {
        const dt_tensor *t = dt_param_get(c->ctx, i);
        const dt_param_info *p = t->param;
        size_t lo = p->offset > from ? p->offset : from,
               hi = p->offset + p->count < to ? p->offset + p->count : to;
        if (lo >= hi) continue;
        char *name = dt__state_name(c->ctx, array, t->name);
        int index = dt_weights_find(w, name);
        dt__slice_walk walk = dt__slice_begin(p->full, p->slice);
        dt__string_free(c->ctx, name);
        while (dt__slice_next(&walk)) {
            size_t at = p->offset + (size_t)walk.local, begin = at > lo ? at : lo;
            size_t end = at + (size_t)walk.count < hi ? at + (size_t)walk.count : hi;
            if (begin >= end) continue;
            int64_t first = walk.global + (int64_t)(begin - at), n = (int64_t)(end - begin);
            char *here = host + (begin - from) * size;
            if (w->writing)
                dt_weights_write(w, index, first, n, bucket->grad_dtype, here);
            else
                dt_weights_read(w, index, first, n, bucket->grad_dtype, here);
            if (dt_error(c->ctx) != DT_OK) return dt_error(c->ctx);
        }
    }
    return dt_error(c->ctx);
}

/* Saves this rank's shard of a bucket's optimizer state. If several ranks hold this shard, each of
   them writes a fraction. `host` is scratch memory. */
static dt_status dt__save_state(dt_checkpoint *c, dt__zero_bucket *z, char *host) {
    dt_zero *zero = c->zero;
    dt_comm *replicas = zero->desc.stage == 0 ? z->data_group : z->replica_group;
    size_t n = (size_t)dt_comm_size(replicas), k = (size_t)dt_comm_rank(replicas),
           size = dt__zero_element_size(z);
    size_t from = z->offset + z->count / n * k,
           to = k + 1 == n ? z->offset + z->count : from + z->count / n;
    for (int a = 0; a <= DT__MASTER; a++)
        for (size_t at = from, n_chunk; at < to && dt__ckpt_has_array(zero, z->bucket, a);
             at += n_chunk) {
            n_chunk = to - at < DT__CKPT_CHUNK / size ? to - at : DT__CKPT_CHUNK / size;
            const void *here = dt__state_get(zero, z, a, at, n_chunk, host);
            if (!here || dt__state_transfer(c, c->w[DT__OPTIM], z->bucket, a, at, at + n_chunk,
                             (char *)here) != DT_OK)
                return dt_error(c->ctx);
            dt__ckpt_progress(c, (double)n_chunk);
        }
    return dt_error(c->ctx);
}

/* Writes this rank's 1-bit Adam errors of bucket u to the file w, or reads them if w is open for
   reading. `host` is scratch memory. */
static dt_status dt__errors_transfer(dt_checkpoint *c, dt_weights *w, int u, char *host) {
    dt__zero_bucket *z = &c->zero->buckets[u];
    size_t size = dt__zero_element_size(z), max_count = DT__CKPT_CHUNK / size;
    for (int e = 0; e < 2 && z->errors[e]; e++) {
        char name[64];
        dt__onebit_error_name(c, u, e, name, sizeof name);
        int index = dt_weights_find(w, name);
        size_t count = z->error_bytes[e] / size;
        for (size_t at = 0, n; at < count && dt_error(c->ctx) == DT_OK; at += n) {
            char *here = (char *)z->errors[e] + at * size;
            n = count - at < max_count ? count - at : max_count;
            if (!w->writing)
                dt_weights_read(w, index, (int64_t)at, (int64_t)n, z->bucket->grad_dtype, host);
            dt__move(c->ctx, w->writing ? host : here, w->writing ? here : host, n * size);
            if (dt__sync(c->ctx) != DT_OK || !w->writing) continue;
            dt_weights_write(w, index, (int64_t)at, (int64_t)n, z->bucket->grad_dtype, host);
        }
    }
    return dt_error(c->ctx);
}

/* Writes all data of the checkpoint that this rank has to write. */
static dt_status dt__save_write(dt_checkpoint *c) {
    dt_zero *zero = c->zero;
    char *host = (char *)dt_alloc(c->ctx, DT_MEM_HOST, DT__CKPT_CHUNK, "saving");
    c->done = c->total = 0;
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        double n = (double)dt_comm_size(zero->desc.stage == 0 ? z->data_group : z->replica_group);
        c->total += (double)z->bucket->count / dt_comm_size(z->data_group);
        for (int a = 0; a <= DT__MASTER && !c->export_desc; a++)
            c->total += dt__ckpt_has_array(zero, z->bucket, a) * (double)z->count / n;
    }
    for (int u = 0; u < zero->n_buckets && host && dt_error(c->ctx) == DT_OK; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        int writes = dt__ckpt_is_writer(zero, z->bucket);
        if (writes) dt__save_params(c, z);
        dt__ckpt_progress(c, (double)z->bucket->count / dt_comm_size(z->data_group));
        if (writes && !c->export_desc && dt_error(c->ctx) == DT_OK) dt__save_state(c, z, host);
        if (!c->export_desc && dt_error(c->ctx) == DT_OK)
            dt__errors_transfer(c, c->w[DT__OPTIM], u, host);
    }
    dt_free(c->ctx, DT_MEM_HOST, host, DT__CKPT_CHUNK);
    return dt_error(c->ctx);
}

/* Sums the ranks' digests. Fails unless the ranks have written every element once. */
static dt_status dt__save_digests(dt_checkpoint *c) {
    for (int f = 0; f < c->n_files; f++) {
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
            if (sums[5 * i + 4] != (double)c->w[f]->weight[i].expected)
                dt_fail(c->ctx, DT_ERR_ARG,
                    "%s: %.0f of the %lld elements of '%s' would be written: is "
                    "dt_zero_desc.mesh the mesh that sharded it, and is its map_weight right?",
                    c->what, sums[5 * i + 4], (long long)c->w[f]->weight[i].expected, t->name);
        }
        dt_free(c->ctx, DT_MEM_HOST, sums, (n + 1) * sizeof *sums);
    }
    return dt_error(c->ctx);
}

/* ---- the manifest ---- */

static dt__text dt__ckpt_layout(const dt_zero *zero) {
    const dt_mesh_desc *n = &zero->mesh.sizes;
    return dt__format("dp %d tp %d cp %d pp %d ep %d", n->dp, n->tp, n->cp, n->pp, n->ep);
}

static void dt__put_hex(dt_json_out *o, const char *key, uint64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)value);
    dt_json_put_string(o, key, text);
}

static uint64_t dt__bytes_digest(const void *data, size_t bytes) {
    return dt__words_digest(0, data, bytes, 1);
}

/* Adds one file to the manifest: its size, the size and digest of its header, and the digests of
   its tensors. */
static void dt__manifest_file(const dt_checkpoint *c, dt_json_out *o, int f) {
    const dt__weight_file *file = &c->w[f]->file[0];
    int64_t head = dt__header_bytes(c->w[f]);
    dt_json_open(o, dt__ckpt_names[f], '{');
    dt_json_put_int(o, "bytes", file->bytes);
    dt_json_put_int(o, "header", head);
    dt__put_hex(o, "digest", dt__bytes_digest(file->header, (size_t)head));
    dt_json_open(o, "tensors", '{');
    for (int i = 0; i < c->file[f].n; i++)
        dt__put_hex(o, dt_weights_get(c->w[f], i)->name, c->file[f].digest[i]);
    dt_json_close(o, '}');
    dt_json_close(o, '}');
}

/* Names of the optimizers (DT_ADAMW to DT_OPTIMIZER_CUSTOM) in manifest.json. */
static const char *const dt__optimizers[] = { "adamw", "adam", "sgd", "onebit-adam", "own" };

static void dt__manifest_config_json(dt_json_out *o, const char *text) {
    if (!text) return;
    dt_json_open(o, "config.json", '{');
    dt_json_put_int(o, "bytes", (int64_t)strlen(text));
    dt_json_put_int(o, "header", (int64_t)strlen(text));
    dt__put_hex(o, "digest", dt__bytes_digest(text, strlen(text)));
    dt_json_open(o, "tensors", '{');
    dt_json_close(o, '}');
    dt_json_close(o, '}');
}

/* The last DT__MANIFEST_END bytes of the manifest contain the digest of all preceding bytes.
   dt__manifest_end writes these last bytes, for the preceding bytes `data`, to `text`. */
enum { DT__MANIFEST_END = 30 };
static void dt__manifest_end(char *text, const char *data, size_t bytes) {
    uint64_t h = dt__digest(bytes, data, bytes);
    snprintf(text, DT__MANIFEST_END + 1, ",\"digest\":\"%016llx\"}\n", (unsigned long long)h);
}

static dt_status dt__manifest_check(dt_checkpoint *c);
static dt_status dt__manifest_make(dt_checkpoint *c) {
    dt_zero *zero = c->zero;
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
    dt_json_put_number(&o, "loss_scale", zero->loss_scale);
    dt_json_put_int(&o, "good_steps", zero->good_steps);
    dt_json_put_int(&o, "patience", zero->hysteresis_left);
    dt_json_open(&o, "saved", '{');
    for (int i = 0; i < c->desc.n_extra_state; i++) {
        const dt_extra_state *s = &c->desc.extra_state[i];
        dt_json_open(&o, s->name, '[');
        for (int k = 0; k < s->count && dt_error(c->ctx) == DT_OK; k++) {
            if (!isfinite(s->values[k]))
                dt_fail(c->ctx, DT_ERR_ARG,
                    "dt_checkpoint_save: number %d of '%s' is %g: only finite "
                    "ones can be saved",
                    k, dt__printable_name(s->name).s, s->values[k]);
            else
                dt_json_put_number(&o, NULL, s->values[k]);
        }
        dt_json_close(&o, ']');
    }
    dt_json_close(&o, '}');
    dt_json_put_string(&o, "config", c->desc.config);
    dt_json_open(&o, "files", '{');
    for (int f = 0; f < DT__CKPT_FILES; f++) dt__manifest_file(c, &o, f);
    dt__manifest_config_json(&o, c->config_json);
    dt_json_close(&o, '}');
    if (dt_error(c->ctx) == DT_OK) {
        dt__manifest_end(text, o.text, o.used);
        dt__json_write(&o, text, DT__MANIFEST_END);
    }
    c->manifest = o.text;
    c->manifest_bytes = o.used;
    c->manifest_capacity = o.capacity;
    return dt_error(c->ctx) == DT_OK ? dt__manifest_check(c) : dt_error(c->ctx);
}

/* ---- the steps of a save ---- */

/* Sets the paths of the new checkpoint on every rank. Rank 0 chooses an unused name and broadcasts
   its numbers. */
static dt_status dt__save_name(dt_checkpoint *c) {
    dt_zero *zero = c->zero;
    dt__files *f = &c->files;
    const dt_io *io = &f->writer.io;
    const char *dir = f->path[DT__DIR];
    /* [0]: dt__ckpt_id.repeat of the checkpoint; [1]: number in the name of the .tmp folder */
    double broadcast[2] = { 0, 0 };
    dt__ckpt_id newest = { -1, 0 }, id = { zero->step, 1 };
    char name[64];
    if (dt_ctx_rank(c->ctx) == 0) {
        const dt_host *host = dt_ctx_host(c->ctx);
        uint64_t now = (uint64_t)(host->now(host->user) * 1e6) * 2654435761u,
                 pid = (uint64_t)getpid() * 40503u;
        if (dt__newest_below(io, dir, dt__ckpt_last, &newest) != 0)
            dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_save: %s: %s", dir, dt__io_reason());
        dt__ckpt_name(newest, name, sizeof name);
        if (dt__ckpt_before(c->newest_known, newest))
            dt_fail(c->ctx, DT_ERR_IO,
                "dt_checkpoint_save: %s has %s already, which this job has not loaded: go on "
                "from it, or save to another folder",
                dir, name);
        if (newest.step >= id.step) {
            dt__ckpt_id next = { id.step + 1, 0 };
            if (dt__newest_below(io, dir, next, &newest) != 0)
                dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_save: %s: %s", dir, dt__io_reason());
        }
        broadcast[0] = newest.step == id.step ? newest.repeat + 1 : 1;
        broadcast[1] = (double)((now ^ pid) >> 4 & 0xffffff);
    }
    if (dt_sum_doubles(zero->mesh.world, broadcast, 2) != DT_OK) return dt_error(c->ctx);
    id.repeat = (int)broadcast[0];
    if (dt__ckpt_before(c->newest_known, id)) c->newest_known = id;
    dt__ckpt_name(id, name, sizeof name);
    dt__files_path(f, DT__FINAL, dir, name);
    snprintf(name + strlen(name), sizeof name - strlen(name), ".%06x.tmp", (unsigned)broadcast[1]);
    dt__files_path(f, DT__TEMP, dir, name);
    for (int i = 0; i < DT__CKPT_FILES; i++)
        dt__files_path(f, i, f->path[DT__TEMP], dt__ckpt_names[i]);
    dt__files_path(f, DT__CONFIG, f->path[DT__TEMP], "config.json");
    dt__files_path(f, DT__MANIFEST, f->path[DT__TEMP], "manifest.json");
    return dt_error(c->ctx);
}

/* [collective: world] Rank 0 creates the files and writes their headers. The other ranks then open
   these files. If a rank does not find a file, the ranks do not share the folder, and the rank
   fails. */
static dt_status dt__save_create_files(dt_checkpoint *c) {
    dt__files *f = &c->files;
    dt__writer *w = &f->writer;
    const char *temp = f->path[DT__TEMP];
    int first = dt_ctx_rank(c->ctx) == 0;
    errno = 0;
    c->created = first && !c->export_desc && !w->why[0] && w->io.make_folder(w->io.user, temp) == 0;
    if (first && !c->export_desc && !c->created) dt__writer_fail(w, temp, "making the folder");
    for (int i = 0; i < c->n_files && first; i++) {
        f->fd[i] = dt__writer_create(w, f->path[i], c->w[i]->file[0].bytes);
        c->created |= f->fd[i] >= 0;
        dt__writer_write(
            w, f->path[i], f->fd[i], c->w[i]->file[0].header, dt__header_bytes(c->w[i]), 0);
    }
    if (dt__files_check(c->ctx, f, c->what) != DT_OK || dt_barrier(c->zero->mesh.world) != DT_OK)
        return dt_error(c->ctx);
    for (int i = 0; i < c->n_files && !first; i++) {
        errno = 0;
        int fd = f->fd[i] = w->io.open(w->io.user, f->path[i], DT_IO_WRITE);
        int64_t size = fd >= 0 ? w->io.size(w->io.user, fd) : -1;
        if (fd >= 0 && size < 0) dt__writer_fail(w, f->path[i], "size");
        int missing = fd < 0 ? dt__io_absent() : size >= 0 && size != c->w[i]->file[0].bytes;
        if (missing)
            return dt_fail(c->ctx, DT_ERR_IO,
                "%s: this rank does not see the %s that rank 0 has made: all "
                "ranks must share the folder",
                c->what, f->path[i]);
        if (fd < 0) dt__writer_fail(w, f->path[i], "open");
    }
    return dt__files_check(c->ctx, f, c->what);
}

/* Cleans up after a save, successful or not. */
static void dt__save_end(dt_checkpoint *c) {
    dt__files *f = &c->files;
    dt__files_close(c->ctx, f, DT__LOCK);
    dt__list_free(c);
    c->saving = DT__SAVE_IDLE;
    dt__staging_reuse(c);
    dt_free(c->ctx, DT_MEM_HOST, c->manifest, c->manifest_capacity);
    c->manifest = NULL;
    if (c->export_desc) return;
    /* not after the thread was abandoned, because removing may hang too */
    if (dt_error(c->ctx) != DT_OK && c->created && !(f->thread && f->thread->abandoned))
        dt__ckpt_remove(&f->writer.io, f->path[DT__TEMP]);
    c->created = 0;
}

/* Starts c->ops. `background`: on the I/O thread, if there is one; else on this thread. */
static void dt__save_request(dt_checkpoint *c, int saving) {
    memset(&c->request, 0, sizeof c->request);
    c->request.files = &c->files;
    c->request.ops = c->ops;
    c->request.n_ops = c->n_ops;
    c->request.background = 1;
    c->saving = saving;
    dt__io_start(&c->request);
}

/* Writes the staged bytes, if the save is in the background; then syncs and closes the files. If no
   thread can be started, the function writes everything before it returns, and logs a notice. */
static void dt__save_start(dt_checkpoint *c) {
    for (int i = 0; i < c->n_files; i++)
        dt__save_add_op(c, (dt__file_op){ DT__OP_CLOSE, i, i, NULL, 0, 0 });
    if (dt_error(c->ctx) != DT_OK) return;
    if (c->staged && !c->files.thread && !dt__io_join(c->zero, &c->files, 1))
        dt_log(c->ctx, DT_LOG_NOTICE,
            "%s: no thread to write it in the background: it was written at once",
            c->files.path[DT__FINAL]);
    dt__save_request(c, DT__SAVE_WRITING);
}

static void dt__save_add_file(dt_checkpoint *c, int file, char *text, size_t bytes) {
    int64_t n = (int64_t)bytes;
    dt__save_add_op(c, (dt__file_op){ DT__OP_CREATE, file, file, NULL, n, 0 });
    dt__save_add_op(c, (dt__file_op){ DT__OP_WRITE, file, file, text, n, 0 });
    dt__save_add_op(c, (dt__file_op){ DT__OP_CLOSE, file, file, NULL, 0, 0 });
}

/* Rank 0 commits the checkpoint, after all ranks' bytes are on the disk. The rename is the instant
   of the commit. */
static void dt__save_commit(dt_checkpoint *c) {
    c->n_ops = 0;
    if (c->config_json) dt__save_add_file(c, DT__CONFIG, c->config_json, strlen(c->config_json));
    dt__save_add_file(c, DT__MANIFEST, c->manifest, c->manifest_bytes);
    dt__save_add_op(c, (dt__file_op){ DT__OP_SYNC_FOLDER, DT__TEMP, DT__TEMP, NULL, 0, 0 });
    dt__save_add_op(c, (dt__file_op){ DT__OP_RENAME, DT__TEMP, DT__FINAL, NULL, 0, 0 });
    dt__save_add_op(c, (dt__file_op){ DT__OP_KEEP, DT__FINAL, DT__FINAL, NULL, c->desc.keep, 0 });
    if (dt_error(c->ctx) == DT_OK) dt__save_request(c, DT__SAVE_COMMITTING);
}

static dt_status dt__save_wait(dt_checkpoint *c);
dt_status dt_checkpoint_save(dt_checkpoint *c) {
    if (!c || dt_error(c->ctx) != DT_OK) return c ? dt_error(c->ctx) : DT_ERR_ARG;
    dt_zero *zero = c->zero;
    if (!c->desc.dir)
        return dt_fail(c->ctx, DT_ERR_ARG, "dt_checkpoint_save: dt_checkpoint_desc.dir is NULL");
    for (int u = 0; u < zero->n_buckets; u++)
        if (zero->buckets[u].reduced || zero->buckets[u].accumulated ||
            zero->buckets[u].bucket->accumulated)
            return dt_fail(c->ctx, DT_ERR_ARG,
                "dt_checkpoint_save: after dt_zero_step and before the next backward, "
                "for gradients are not saved");
    if (dt__save_wait(c) != DT_OK) return dt_error(c->ctx);
    c->staged = c->desc.background;
    if (dt__save_name(c) == DT_OK && dt__list_make(c) == DT_OK &&
        dt__save_create_files(c) == DT_OK && dt__save_write(c) == DT_OK &&
        dt__save_digests(c) == DT_OK &&
        (dt_ctx_rank(c->ctx) != 0 || dt__manifest_make(c) == DT_OK)) {
        dt__save_start(c);
        if (!c->desc.background) dt__save_wait(c);
    }
    if (dt_error(c->ctx) != DT_OK) dt__save_end(c);
    return dt_error(c->ctx);
}

int dt_checkpoint_poll(dt_checkpoint *c) {
    if (!c || dt_error(c->ctx) != DT_OK || c->saving == DT__SAVE_IDLE) return 1;
    dt_comm *world = dt_world(c->ctx); /* not zero->mesh.world, because zero may be freed */
    int finished = !dt__io_pending(c->ctx, &c->request);
    double all[2] = { (double)finished, finished && c->files.writer.why[0] ? 1.0 : 0.0 };
    if (dt_sum_doubles(world, all, 2) == DT_OK && all[0] < dt_comm_size(world)) return 0;
    if (dt_error(c->ctx) == DT_OK && all[1] > 0 &&
        dt__files_check(c->ctx, &c->files, c->what) == DT_OK)
        dt_barrier(world); /* fails, because another rank has failed */
    if (dt_error(c->ctx) == DT_OK && c->saving == DT__SAVE_WRITING) {
        c->saving = DT__SAVE_COMMITTING;
        if (dt_ctx_rank(c->ctx) == 0) dt__save_commit(c);
        return 0;
    }
    if (dt_error(c->ctx) == DT_OK) memcpy(c->path, c->files.path[DT__FINAL], sizeof c->path);
    dt__save_end(c);
    return 1;
}

/* [collective: world] Polls until no save is in progress. */
static dt_status dt__save_wait(dt_checkpoint *c) {
    const dt_host *host = dt_ctx_host(c->ctx);
    while (!dt_checkpoint_poll(c))
        if (c->desc.background) host->sleep(host->user, 1e-4);
    return dt_error(c->ctx);
}

// ==== 21. Checkpoints: opening, closing, export =================================================

/* On rank 0: creates the folder DIR if it is missing, locks it, and removes .tmp folders that
   killed jobs have left in it. */
static void dt__dir_lock(dt_checkpoint *c) {
    dt__writer *w = &c->files.writer;
    const char *dir = c->files.path[DT__DIR], *path = c->files.path[DT__LOCK];
    char text[400] = "", host[200] = "";
    dt__files_path(&c->files, DT__LOCK, dir, "lock");
    errno = 0;
    int fd = w->why[0] ? -1 : w->io.open(w->io.user, path, DT_IO_LOCK);
    if (fd < 0 && errno == ENOENT && !w->why[0]) {
        errno = 0;
        if (w->io.make_folder(w->io.user, dir) != 0) dt__writer_fail(w, dir, "making the folder");
        errno = 0;
        fd = w->why[0] ? -1 : w->io.open(w->io.user, path, DT_IO_LOCK);
    }
    if (fd < 0) dt__writer_fail(w, path, "open");
    c->files.fd[DT__LOCK] = fd;
    if (fd < 0) return;
    errno = 0;
    int taken = w->io.lock(w->io.user, fd);
    if (taken != 0 && (errno == EWOULDBLOCK || errno == EAGAIN || errno == EACCES)) {
        int64_t n = w->io.pread(w->io.user, fd, text, sizeof text - 1, 0);
        text[n > 0 ? strcspn(text, "\n") : 0] = 0;
        snprintf(w->why, sizeof w->why,
            "%s: %.100s saves there already: two jobs cannot share a folder", dir,
            text[0] ? text : "another process");
        return;
    }
    if (taken != 0)
        dt_log(c->ctx, DT_LOG_NOTICE, "%s: no locks there (%s): a second job would not be noticed",
            dir, dt__io_reason());
    dt__read_text(&w->io, "/proc/sys/kernel/hostname", host, sizeof host);
    host[strcspn(host, "\n")] = 0;
    snprintf(c->lock_text, sizeof c->lock_text, "process %ld on %.200s\n%.6f\n", (long)getpid(),
        host[0] ? host : "a host without a name",
        dt_ctx_host(c->ctx)->now(dt_ctx_host(c->ctx)->user));
    w->io.resize(w->io.user, fd, 0);
    dt__writer_write(w, path, fd, c->lock_text, (int64_t)strlen(c->lock_text), 0);
    /* Makes the name DIR durable. Every job does so, because the job that created DIR may have been
       killed before its fsync. EACCES: this job may have no permission to read the parent. */
    dt__writer_sync_parent(w, dir, EACCES);
    dt__tmp_sweep sweep = { &w->io, dir };
    w->io.list_folder(w->io.user, dir, dt__tmp_sweep_one, &sweep);
}

static int dt__by_extra_state_name(const void *user, uint32_t a, uint32_t b) {
    const dt_extra_state *saved = (const dt_extra_state *)user;
    return strcmp(saved[a].name, saved[b].name) < 0;
}

static dt_status dt__extra_state_check_names(dt_ctx *ctx, const dt_extra_state *saved, size_t n) {
    uint32_t *order = (uint32_t *)dt_alloc(ctx, DT_MEM_HOST, 2 * n * sizeof *order, "names");
    for (size_t i = 0; i < n && order; i++) order[i] = (uint32_t)i;
    if (order && n > 1) dt__sort(order, order + n, n, dt__by_extra_state_name, saved);
    for (size_t i = 1; i < n && order; i++)
        if (!dt__by_extra_state_name(saved, order[i - 1], order[i]))
            dt_fail(ctx, DT_ERR_ARG,
                "dt_checkpoint_open: extra_state[%u] and extra_state[%u] are both '%s'",
                (unsigned)order[i - 1], (unsigned)order[i],
                dt__printable_name(saved[order[i]].name).s);
    dt_free(ctx, DT_MEM_HOST, order, 2 * n * sizeof *order);
    return dt_error(ctx);
}

/* Fails if the description's data could be saved in a manifest but not loaded again. The limits are
   those of dt_json_parse. */
static dt_status dt__checkpoint_desc_check(dt_ctx *ctx, const dt_checkpoint_desc *d) {
    dt_json_out config = { ctx, NULL, 0, 0 };
    double numbers = 0, bytes = 0;
    if (d->n_extra_state < 0 || (d->n_extra_state > 0 && !d->extra_state))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_checkpoint_open: n_extra_state is %d, and extra_state %s", d->n_extra_state,
            d->extra_state ? "an array" : "NULL");
    for (int i = 0; i < d->n_extra_state; i++) {
        const dt_extra_state *s = &d->extra_state[i];
        size_t length = s->name ? strlen(s->name) : 0;
        if (length < 1 || length > DT__JSON_STRING)
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_checkpoint_open: the name of extra_state[%d] has %zu bytes; "
                "1 to %d",
                i, length, DT__JSON_STRING);
        if (s->count < 0 || (s->count > 0 && !s->values))
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_checkpoint_open: extra_state[%d], '%s', has %d numbers at %s", i,
                dt__printable_name(s->name).s, s->count, s->values ? "values" : "NULL");
        numbers += s->count;
        bytes += 6.0 * (double)length; /* in the worst case each byte becomes \u00xx */
    }
    if (dt__extra_state_check_names(ctx, d->extra_state, (size_t)d->n_extra_state) != DT_OK)
        return dt_error(ctx);
    size_t text = d->config ? strlen(d->config) : 0,
           beside = d->config_json ? strlen(d->config_json) : 0;
    if (text > DT__JSON_STRING || beside > DT__JSON_BYTES)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_checkpoint_open: config has %zu bytes and config_json %zu; at "
            "most %d and %d",
            text, beside, DT__JSON_STRING, DT__JSON_BYTES);
    dt_json_put_string(&config, NULL, d->config);
    bytes += (double)config.used + 25 * numbers; /* 25 bytes: "-1.2345678901234567e-300," */
    dt_json_out_free(&config);
    if (bytes > (double)DT__JSON_BYTES)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_checkpoint_open: %.0f saved numbers, their names and config "
            "may take %.0f bytes of manifest.json, which has at most %d",
            numbers, bytes, DT__JSON_BYTES);
    return dt_error(ctx);
}

/* Frees the checkpoint. Called by dt_checkpoint_close, or when the context is freed. */
static void dt__ckpt_free(dt_ctx *ctx, void *user) {
    dt_checkpoint *c = (dt_checkpoint *)user;
    dt__save_end(c);
    dt__files_close(ctx, &c->files, DT__PATHS);
    dt__io_leave(ctx, &c->files.thread);
    dt__staging_free(c);
    dt__string_free(ctx, c->config_json);
    dt__string_free(ctx, c->config);
    dt_free(ctx, DT_MEM_HOST, c, sizeof *c);
}

dt_checkpoint *dt_checkpoint_open(dt_zero *zero, dt_checkpoint_desc desc) {
    dt_ctx *ctx = zero ? zero->ctx : NULL;
    if (!ctx || dt_error(ctx) != DT_OK) return NULL;
    const dt_io *io = dt_ctx_io(ctx);
    if (!io->make_folder || !io->list_folder || !io->lock || !io->remove_folder)
        dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_checkpoint_open: the io table has no folders: make, list, "
            "lock and remove_folder");
    if (dt__checkpoint_desc_check(ctx, &desc) != DT_OK) return NULL;
    dt_checkpoint *c = (dt_checkpoint *)dt__host_zeroed(ctx, sizeof *c, "a checkpoint");
    if (!c) return NULL;
    c->ctx = ctx;
    c->zero = zero;
    c->desc = desc;
    c->n_files = DT__CKPT_FILES;
    c->newest_known = dt__ckpt_none;
    dt__files_init(ctx, &c->files);
    if (desc.config_json)
        c->config_json = dt__concat_text(ctx, desc.config_json, strlen(desc.config_json), "");
    char *dir = c->files.path[DT__DIR];
    if (desc.dir && !*desc.dir)
        dt_fail(ctx, DT_ERR_ARG, "dt_checkpoint_open: a folder without a name");
    if (desc.dir && snprintf(dir, DT__PATH_BYTES, "%s", desc.dir) >= DT__PATH_BYTES)
        dt_fail(ctx, DT_ERR_ARG, "dt_checkpoint_open: %.80s...: the path is too long", desc.dir);
    for (size_t n = strlen(dir); n > 1 && dir[n - 1] == '/'; n--) dir[n - 1] = 0;
    if (desc.dir && dt_ctx_rank(ctx) == 0 && dt_error(ctx) == DT_OK) dt__dir_lock(c);
    dt__files_check(ctx, &c->files, "dt_checkpoint_open");
    c->what = "dt_checkpoint_save";
    for (int i = 0; i < dt_param_count(ctx) && dt_error(ctx) == DT_OK; i++) {
        dt_weight_map p; /* check the names now, because the first save may be hours later */
        dt__ckpt_map_weight(c, dt_param_get(ctx, i), &p);
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

/* Exports the parameters to the file `path`. `c` is a checkpoint that has one file and no
   folder. */
static dt_status dt__export(dt_checkpoint *c, const char *path) {
    dt__files *f = &c->files;
    dt_comm *world = c->zero->mesh.world;
    if (snprintf(f->path[DT__MODEL], DT__PATH_BYTES, "%s.tmp", path) >= DT__PATH_BYTES)
        return dt_fail(c->ctx, DT_ERR_ARG, "dt_zero_export: %.80s...: the path is too long", path);
    if (dt__list_make(c) != DT_OK || dt__save_create_files(c) != DT_OK ||
        dt__save_write(c) != DT_OK || dt__save_digests(c) != DT_OK)
        return dt_error(c->ctx);
    dt__save_start(c);
    if (dt__files_check(c->ctx, f, c->what) != DT_OK || dt_barrier(world) != DT_OK)
        return dt_error(c->ctx);
    if (dt_ctx_rank(c->ctx) == 0) dt__writer_rename(&f->writer, f->path[DT__MODEL], path, 0);
    return dt__files_check(c->ctx, f, c->what) == DT_OK ? dt_barrier(world) : dt_error(c->ctx);
}

dt_status dt_zero_export(dt_zero *zero, const char *path, dt_export_desc desc) {
    dt_checkpoint c;
    if (!zero || dt_error(zero->ctx) != DT_OK) return zero ? dt_error(zero->ctx) : DT_ERR_ARG;
    if (!path || !*path) return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_export: a path is needed");
    memset(&c, 0, sizeof c);
    c.zero = zero;
    c.ctx = zero->ctx;
    c.what = "dt_zero_export";
    c.n_files = 1;
    c.export_desc = &desc;
    c.desc.map_weight = desc.map_weight;
    c.desc.user = desc.user;
    dt__files_init(c.ctx, &c.files);
    dt__export(&c, path);
    dt__save_end(&c);
    dt__staging_free(&c);
    if (dt_error(c.ctx) != DT_OK && c.created)
        c.files.writer.io.remove(c.files.writer.io.user, c.files.path[DT__MODEL]);
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

// ==== 22. Checkpoints: loading ==================================================================

/* A checkpoint that is being examined. The checks run in a separate context, `probe`, so that a
   damaged checkpoint does not fail the rank's own context. */
typedef struct dt__candidate {
    dt_ctx *probe;
    char *text; /* the manifest */
    size_t bytes;
    dt_json *json;
    dt_weights *w[DT__CKPT_FILES];
    char path[DT__PATH_BYTES];
    char name[DT__PATH_BYTES + 32]; /* the manifest's path; `json` keeps a pointer to this text */
    int state;                      /* DT__INTACT to DT__UNREADABLE */
    char why[700];                  /* error text, unless `state` is DT__INTACT */
} dt__candidate;

/* States of a checkpoint, from best to worst. If a checkpoint is DT__DAMAGED, an older checkpoint
   is loaded instead. If a checkpoint is DT__UNREADABLE (permissions, descriptors, memory, the
   disk), the load fails, because the checkpoint may be intact. */
enum { DT__INTACT = 0, DT__DAMAGED, DT__NEWER /* intact, but of a newer format */, DT__UNREADABLE };

static void dt__candidate_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static void dt__candidate_close(dt__candidate *f) {
    dt_json_free(f->json);
    if (f->text) dt_free(f->probe, DT_MEM_HOST, f->text, f->bytes + 1);
    dt_ctx_free(f->probe); /* closes the open files */
    f->probe = NULL;
    f->text = NULL;
    f->json = NULL;
}

static int dt__candidate_open(const dt_checkpoint *c, dt__candidate *f) {
    dt_ctx_desc d;
    dt_host host = *dt_ctx_host(c->ctx);
    host.log = dt__candidate_log;
    memset(&d, 0, sizeof d);
    memset(f->w, 0, sizeof f->w);
    d.host = &host;
    d.io = dt_ctx_io(c->ctx);
    d.kernels = dt_kernels_cpu(); /* the checks need host memory only, not the device */
    f->why[0] = 0;
    f->state = DT__INTACT;
    f->probe = dt_ctx_make(d);
    return f->probe ? 1
                    : (dt_fail(c->ctx, DT_ERR_MEM, "dt_checkpoint_load: no memory to look at %s",
                           f->path),
                          0);
}

/* If the context `probe` has failed, sets `state` and `why` from this failure, unless `why`
   is already set. */
static void dt__candidate_note_error(dt__candidate *f) {
    const char *text = dt_error_text(f->probe);
    if (f->why[0] || dt_error(f->probe) == DT_OK) return;
    if (f->probe->read_failed || dt_error(f->probe) == DT_ERR_MEM) f->state = DT__UNREADABLE;
    if (f->state == DT__INTACT) f->state = DT__DAMAGED;
    snprintf(f->why, sizeof f->why, "%s", strncmp(text, "rank 0: ", 8) == 0 ? text + 8 : text);
}

/* Parses the manifest. Fails unless the manifest is complete, undamaged and not of a newer
   format. */
static void dt__candidate_parse(dt__candidate *f) {
    char end[DT__MANIFEST_END + 1];
    int64_t version = 0;
    size_t last = f->bytes < DT__MANIFEST_END ? 0 : f->bytes - DT__MANIFEST_END;
    dt__manifest_end(end, f->text, last);
    int intact = last > 0 && memcmp(f->text + last, end, DT__MANIFEST_END) == 0;
    f->json = dt_json_parse(f->probe, f->name, f->text, f->bytes);
    if (!f->json) return;
    const char *format = dt_json_string(f->json, dt_json_find(f->json, 0, "format"), NULL);
    if (!format || strcmp(format, "dt checkpoint") != 0 ||
        !dt_json_int(f->json, dt_json_find(f->json, 0, "version"), &version) || version < 1) {
        dt_json_fail(f->json, 0, "it is no manifest of a dt checkpoint");
    } else if (version > DT_CHECKPOINT_FORMAT) {
        if (intact) f->state = DT__NEWER;
        dt_fail(f->probe, DT_ERR_UNSUPPORTED,
            "%s: a checkpoint of format %lld; this program knows formats up to %d: a "
            "newer dt wrote it",
            f->name, (long long)version, DT_CHECKPOINT_FORMAT);
    } else if (!intact) {
        dt_fail(f->probe, DT_ERR_IO, "%s: it is damaged: its digest is another", f->name);
    }
}

static void dt__candidate_manifest(dt__candidate *f) {
    snprintf(f->name, sizeof f->name, "%s/manifest.json", f->path);
    f->text = dt_file_read(f->probe, f->name, DT__JSON_BYTES, &f->bytes);
    if (f->text) {
        dt__candidate_parse(f);
        return;
    }
    const dt_io *io = dt_ctx_io(f->probe);
    errno = 0;
    int fd = io->open(io->user, f->path, DT_IO_READ);
    if (fd >= 0) io->close(io->user, fd);
    if (fd >= 0 || dt__io_absent() || f->probe->read_failed) return;
    f->state = DT__UNREADABLE; /* not DT__DAMAGED, because the folder's files may be intact */
    snprintf(f->why, sizeof f->why, "%.*s: %s", DT__PATH_BYTES / 2, f->path, dt__io_reason());
}

/* Returns the digest that a JSON node contains. Returns 0 and fails if the node contains no
   digest. */
static uint64_t dt__candidate_hex(dt__candidate *f, int node) {
    const char *text = dt_json_string(f->json, node, NULL);
    char *end = NULL, again[24];
    uint64_t value = text ? strtoull(text, &end, 16) : 0;
    snprintf(again, sizeof again, "%016llx", (unsigned long long)value);
    if (!text || strcmp(text, again) != 0)
        dt_json_fail(f->json, node, "a digest of 16 hexadecimal digits is needed");
    return value;
}

/* Compares a file's size and digest with the manifest. The digest is of the header if the file is a
   safetensors file, else of the full content. `node` is the file's entry in the manifest. */
static void dt__candidate_file(dt__candidate *f, int node, const char *name) {
    char path[DT__PATH_BYTES + 264], *text = NULL;
    int64_t bytes = -1, header = -1;
    size_t read = 0;
    int ours = DT__CKPT_FILES;
    dt_weights *w = NULL;
    for (int i = 0; i < DT__CKPT_FILES; i++)
        if (strcmp(name, dt__ckpt_names[i]) == 0) ours = i;
    uint64_t digest = dt__candidate_hex(f, dt_json_find(f->json, node, "digest"));
    if (!dt_json_int(f->json, dt_json_find(f->json, node, "bytes"), &bytes) ||
        !dt_json_int(f->json, dt_json_find(f->json, node, "header"), &header) || header < 0 ||
        bytes < header || strchr(name, '/') || strlen(name) > 200)
        dt_json_fail(f->json, node, "a file's name, bytes and header are needed");
    if (dt_error(f->probe) != DT_OK) return;
    snprintf(path, sizeof path, "%s/%s", f->path, name);
    if (ours < DT__CKPT_FILES)
        w = f->w[ours] = dt_weights_open(f->probe, path);
    else
        text = dt_file_read(f->probe, path, DT__JSON_BYTES, &read);
    const char *head = w ? w->file[0].header : text;
    int64_t have = w ? w->file[0].bytes : (int64_t)read,
            header_bytes = w ? (int64_t)w->file[0].header_bytes : have;
    if (!head)
        dt_fail(f->probe, DT_ERR_IO, "%s: it is no safetensors file", path);
    else if (have != bytes)
        dt_fail(f->probe, DT_ERR_IO, "%s: it has %lld bytes, and its checkpoint's has %lld", path,
            (long long)have, (long long)bytes);
    else if (header_bytes != header || dt__bytes_digest(head, (size_t)header) != digest)
        dt_fail(f->probe, DT_ERR_IO, "%s: %s is damaged: its digest is another", path,
            w ? "its header" : "it");
    if (text) dt_free(f->probe, DT_MEM_HOST, text, read + 1);
}

static void dt__candidate_files(dt__candidate *f) {
    int files = dt_json_find(f->json, 0, "files");
    for (int i = 0; i < dt_json_count(f->json, files) && dt_error(f->probe) == DT_OK; i++) {
        int node = dt_json_at(f->json, files, i);
        dt__candidate_file(f, node, dt_json_key(f->json, node, NULL));
    }
    for (int i = 0; i < DT__CKPT_FILES && dt_error(f->probe) == DT_OK; i++)
        if (!f->w[i]) dt_json_fail(f->json, 0, "%s is not among its files", dt__ckpt_names[i]);
}

/* [collective: world] Sets `state` on all ranks to the worst state that any rank has found, and
   `why` to the error text of that rank. */
static dt_status dt__candidate_agree(dt_checkpoint *c, dt__candidate *f) {
    size_t n = 0;
    char line[sizeof f->why + 4] = "";
    if (f->probe) dt__candidate_note_error(f);
    if (f->state != DT__INTACT) snprintf(line, sizeof line, "%d%s\n", f->state, f->why);
    char *text = dt__all_gather_texts(c->ctx, line, strlen(line), &n);
    f->state = DT__INTACT;
    for (const char *s = text; s && *(s += strspn(s, " ")); s += strcspn(s, "\n") + 1) {
        if (*s - '0' <= f->state) continue;
        f->state = *s - '0';
        snprintf(f->why, sizeof f->why, "%.*s", (int)strcspn(s + 1, "\n"), s + 1);
    }
    if (text) dt_free(c->ctx, DT_MEM_HOST, text, n + 1);
    return dt_error(c->ctx);
}

/* Reads this rank's fraction of file k. Each small tensor is read by one rank (round-robin); of
   each large tensor every rank reads a fraction. For each tensor, stores the digest of the elements
   that this rank has read in `sums`, as 4 doubles (dt__digest_split). */
static void dt__candidate_read(
    dt_checkpoint *c, dt__candidate *f, int k, double *sums, char *buffer) {
    dt_comm *world = c->zero->mesh.world;
    int64_t n = dt_comm_size(world), rank = dt_comm_rank(world);
    for (int i = 0; i < dt_weights_count(f->w[k]) && dt_error(f->probe) == DT_OK; i++) {
        const dt_weight *t = dt_weights_get(f->w[k], i);
        int64_t size = (int64_t)dt_dtype_size(t->dtype), max_count = DT__CKPT_CHUNK / size;
        int small = t->count * size < DT__CKPT_CHUNK;
        int64_t from = small ? 0 : t->count / n * rank,
                to = small || rank == n - 1 ? t->count : from + t->count / n;
        uint64_t digest = 0;
        for (int64_t at = from, n_chunk; at < to && (!small || i % n == rank); at += n_chunk) {
            n_chunk = to - at < max_count ? to - at : max_count;
            if (dt_weights_read(f->w[k], i, at, n_chunk, t->dtype, buffer) != DT_OK) break;
            digest += dt__elements_digest(t->dtype, at, buffer, n_chunk);
        }
        dt__digest_split(sums + 4 * i, digest);
    }
}

/* [collective: world] Compares the digest of every tensor of file k with the manifest. */
static dt_status dt__candidate_digests(dt_checkpoint *c, dt__candidate *f, int k) {
    size_t n = 4 * (size_t)dt_weights_count(f->w[k]);
    double *sums = (double *)dt__host_zeroed(c->ctx, (n + 1) * sizeof *sums, "digests");
    char *buffer =
        (char *)dt_alloc(c->ctx, DT_MEM_HOST, DT__CKPT_CHUNK, "a window into a checkpoint");
    int file = dt_json_find(f->json, dt_json_find(f->json, 0, "files"), dt__ckpt_names[k]);
    int digests = dt_json_find(f->json, file, "tensors");
    if (sums && buffer) dt__candidate_read(c, f, k, sums, buffer);
    /* sums[n]: number of ranks that could not read their fraction; if not 0, nothing is compared */
    if (sums) sums[n] = dt_error(f->probe) != DT_OK;
    dt_sum_doubles(c->zero->mesh.world, sums, sums ? n + 1 : 0);
    int readable = dt_error(c->ctx) == DT_OK && sums[n] == 0;
    for (int i = 0; i < dt_weights_count(f->w[k]) && readable && dt_error(f->probe) == DT_OK; i++) {
        const char *name = dt_weights_get(f->w[k], i)->name;
        uint64_t want = dt__candidate_hex(f, dt_json_find(f->json, digests, name));
        if (dt__digest_join(sums + 4 * i) == want) continue;
        dt_fail(f->probe, DT_ERR_IO, "%s/%s: tensor '%s' is damaged: its digest is another",
            f->path, dt__ckpt_names[k], dt__printable_name(name).s);
    }
    dt_free(c->ctx, DT_MEM_HOST, sums, (n + 1) * sizeof *sums);
    dt_free(c->ctx, DT_MEM_HOST, buffer, DT__CKPT_CHUNK);
    return dt__candidate_agree(c, f);
}

/* [collective: world] Checks the checkpoint f->path and sets f->state, equal on every rank. */
static dt_status dt__candidate_check(dt_checkpoint *c, dt__candidate *f) {
    if (dt__candidate_open(c, f)) dt__candidate_manifest(f);
    if (f->probe && dt_error(f->probe) == DT_OK) dt__candidate_files(f);
    if (dt__candidate_agree(c, f) != DT_OK) return dt_error(c->ctx);
    for (int k = 0; k < DT__CKPT_FILES && f->state == DT__INTACT; k++)
        if (dt__candidate_digests(c, f, k) != DT_OK) return dt_error(c->ctx);
    return DT_OK;
}

/* [collective: world] Sets *at to the newest checkpoint that is older than *at, and f->path to this
   checkpoint's folder. If there is none, sets f->path to "". Only rank 0 lists the folder `dir`. */
static dt_status dt__candidate_next(
    dt_checkpoint *c, const char *dir, dt__ckpt_id *at, dt__candidate *f) {
    double broadcast[2] = { 0, 0 };
    dt__ckpt_id found = { -1, 0 };
    char name[64];
    if (dt_ctx_rank(c->ctx) == 0) {
        if (dt__newest_below(&c->files.writer.io, dir, *at, &found) != 0 && errno != ENOENT)
            dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_load: %s: %s", dir, dt__io_reason());
        broadcast[0] = (double)found.step;
        broadcast[1] = found.repeat;
    }
    if (dt_sum_doubles(c->zero->mesh.world, broadcast, 2) != DT_OK) return dt_error(c->ctx);
    at->step = (int64_t)broadcast[0];
    at->repeat = (int)broadcast[1];
    dt__ckpt_name(*at, name, sizeof name);
    f->path[0] = 0;
    if (at->step >= 0 &&
        snprintf(f->path, sizeof f->path, "%s/%s", dir, name) >= (int)sizeof f->path)
        return dt_fail(
            c->ctx, DT_ERR_ARG, "dt_checkpoint_load: %.80s...: the path is too long", dir);
    return DT_OK;
}

/* Returns 1 if this job saves to `folder`. The same folder may have two different paths, so the
   function also returns 1 if the lock file in `folder` contains this job's lock_text. */
static int dt__is_own_dir(const dt_checkpoint *c, const char *folder) {
    const dt_io *io = &c->files.writer.io;
    char path[DT__PATH_BYTES + 8], text[sizeof c->lock_text] = "";
    int64_t length = (int64_t)strlen(c->lock_text);
    int end;
    if (length == 0 || strcmp(folder, c->files.path[DT__DIR]) == 0) return length > 0;
    snprintf(path, sizeof path, "%s/lock", folder);
    int fd = io->open(io->user, path, DT_IO_READ);
    if (fd >= 0) dt__io_transfer(io, fd, 0, text, length, 0, &end);
    if (fd >= 0) io->close(io->user, fd);
    return strcmp(text, c->lock_text) == 0;
}

/* Marks a checkpoint as damaged if the step in its manifest differs from `name`, the step in its
   folder's name. Otherwise a copy of an old checkpoint under the name of a later step would be
   loaded as the newest checkpoint. */
static void dt__candidate_check_step(dt__candidate *f, int64_t name) {
    int64_t step = -1;
    if (dt_json_int(f->json, dt_json_find(f->json, 0, "step"), &step) && step == name) return;
    f->state = DT__DAMAGED;
    snprintf(f->why, sizeof f->why, "%.600s: it is of step %lld: the folder has another's name",
        f->name, (long long)step);
}

/* On rank 0: if f is a checkpoint of desc.dir, records in newest_known that this job has seen f.
   dt__save_name fails if the folder has a newer checkpoint than newest_known. */
static void dt__candidate_note_newest(dt_checkpoint *c, const dt__candidate *f) {
    const char *slash = strrchr(f->path, '/'), *name = slash ? slash + 1 : f->path;
    dt__newest_scan n = { dt__ckpt_last, dt__ckpt_none };
    char above[DT__PATH_BYTES];
    int bytes = slash > f->path ? (int)(slash - f->path) : 1; /* the folder of "/step-2" is "/" */
    snprintf(above, sizeof above, "%.*s", bytes, slash ? f->path : ".");
    if (dt_ctx_rank(c->ctx) != 0 || !dt__is_own_dir(c, above)) return;
    dt__newest_add(&n, name);
    if (dt__ckpt_before(c->newest_known, n.found)) c->newest_known = n.found;
}

/* Returns 1 if the folder `from` is a checkpoint: if it contains manifest.json or
   optim.safetensors. */
static int dt__is_checkpoint(dt_checkpoint *c, const char *from) {
    const dt_io *io = &c->files.writer.io;
    char path[DT__PATH_BYTES + 32];
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

/* [collective: world] Sets f to the checkpoint `from` or, if `from` is a folder of checkpoints, to
   the newest intact checkpoint in this folder. Sets f->path to "" if there is no checkpoint. */
static dt_status dt__candidate_newest(dt_checkpoint *c, const char *from, dt__candidate *f) {
    dt__ckpt_id at = dt__ckpt_last;
    char first[sizeof f->why] = "";
    double itself = dt_ctx_rank(c->ctx) == 0 && dt__is_checkpoint(c, from);
    if (dt_sum_doubles(c->zero->mesh.world, &itself, 1) != DT_OK) return dt_error(c->ctx);
    for (;;) {
        snprintf(f->path, sizeof f->path, "%s", from);
        if (itself == 0 && dt__candidate_next(c, from, &at, f) != DT_OK) return dt_error(c->ctx);
        if (!f->path[0]) break;
        dt__candidate_note_newest(c, f);
        if (dt__candidate_check(c, f) != DT_OK) return dt_error(c->ctx);
        if (itself == 0 && f->state == DT__INTACT) dt__candidate_check_step(f, at.step);
        if (f->state == DT__INTACT) return DT_OK;
        if (f->state == DT__UNREADABLE)
            return dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_load: %s%s", f->why,
                itself > 0 ? "" : ": no older checkpoint is taken, as this one may be whole");
        if (itself > 0 || f->state == DT__NEWER)
            return dt_fail(c->ctx, DT_ERR_IO, "dt_checkpoint_load: %s", f->why);
        if (dt_ctx_rank(c->ctx) == 0)
            dt_log(c->ctx, DT_LOG_NOTICE, "%s: the checkpoint before it counts", f->why);
        if (!first[0]) memcpy(first, f->why, sizeof first);
        dt__candidate_close(f);
    }
    if (first[0])
        return dt_fail(c->ctx, DT_ERR_IO,
            "dt_checkpoint_load: %s: no checkpoint there is whole: %s", from, first);
    return DT_OK;
}

/* ---- loading a checkpoint ---- */

/* Fails unless a checkpoint has this program's optimizer, seed and extra_state. */
static dt_status dt__load_fits(dt_checkpoint *c, dt__candidate *f) {
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
            optimizer ? dt__printable_name(optimizer).s : "not broadcast", mine);
    if (!was || strcmp(was, seed) != 0)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_checkpoint_load: %s: its seed is %s, and this program's is %s: the random "
            "numbers would be others",
            f->path, was ? dt__printable_name(was).s : "not broadcast", seed);
    for (int i = 0; i < c->desc.n_extra_state; i++) {
        const dt_extra_state *s = &c->desc.extra_state[i];
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

/* Fails unless dt_checkpoint_load will accept the new manifest. Called on rank 0 before the
   manifest is written. */
static dt_status dt__manifest_check(dt_checkpoint *c) {
    dt__candidate f;
    memset(&f, 0, sizeof f);
    snprintf(f.path, sizeof f.path, "%s", c->files.path[DT__FINAL]);
    snprintf(f.name, sizeof f.name, "%s/manifest.json", f.path);
    if (!dt__candidate_open(c, &f)) return dt_error(c->ctx);
    f.text = c->manifest;
    f.bytes = c->manifest_bytes;
    dt__candidate_parse(&f);
    for (int k = 0; k < DT__CKPT_FILES; k++)
        dt_json_free(dt_json_parse(f.probe, dt__ckpt_names[k], c->w[k]->file[0].header + 8,
            (size_t)dt__header_bytes(c->w[k]) - 8));
    dt__candidate_note_error(&f);
    if (f.state == DT__UNREADABLE)
        dt_fail(c->ctx, DT_ERR_MEM, "dt_checkpoint_save: %s", f.why);
    else if (f.state != DT__INTACT)
        dt_fail(c->ctx, DT_ERR_ARG, "dt_checkpoint_save: it could not be loaded: %s", f.why);
    if (dt_error(c->ctx) == DT_OK) dt__load_fits(c, &f);
    f.text = NULL; /* the writer frees the manifest */
    dt__candidate_close(&f);
    return dt_error(c->ctx);
}

/* Returns 1 if the tensor `name` of a file is an error array of 1-bit Adam. Such tensors may be
   missing, because another layout has other error arrays. */
static int dt__is_onebit_error(int file, const char *name) {
    return file == DT__OPTIM && strncmp(name, "error", 5) == 0 &&
           (name[5] == '0' || name[5] == '1') && name[6] == '.';
}

static dt_status dt__load_tensors_fit(dt_checkpoint *c, dt__candidate *f) {
    for (int k = 0; k < DT__CKPT_FILES; k++) {
        const char *file = dt__ckpt_names[k];
        for (int i = 0; i < dt_weights_count(c->w[k]); i++) {
            const dt_weight *t = dt_weights_get(c->w[k], i);
            const dt_weight *there = dt_weights_get(f->w[k], dt_weights_find(f->w[k], t->name));
            int same = there && there->dtype == t->dtype && there->shape.nd == t->shape.nd;
            for (int d = 0; d < t->shape.nd && same; d++) same = there->shape.d[d] == t->shape.d[d];
            if (same || dt__is_onebit_error(k, t->name)) continue;
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
            if (dt_weights_find(c->w[k], name) < 0 && !dt__is_onebit_error(k, name))
                return dt_fail(c->ctx, DT_ERR_ARG,
                    "dt_checkpoint_load: %s/%s has '%s', which this program has not", f->path, file,
                    dt__printable_name(name).s);
        }
    }
    return DT_OK;
}

/* Resharding: loads the parameters and the optimizer state of a bucket. Each rank reads its own
   local slices from the full tensors in the files w. `host` is scratch memory. */
static dt_status dt__load_bucket(
    dt_checkpoint *c, dt_weights *const *w, dt__zero_bucket *z, char *host) {
    dt_ctx *ctx = c->ctx;
    dt_bucket *bucket = z->bucket;
    size_t size = dt__zero_element_size(z);
    int gathered = !bucket->data;
    if (dt__gather_outside_op(dt_param_get(ctx, bucket->first_param)) != DT_OK)
        return dt_error(ctx);
    for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        dt_weight_map p;
        if (dt__ckpt_map_weight(c, t, &p) != DT_OK) return dt_error(ctx);
        if (dt_weights_load(w[DT__MODEL], t, p.columns, p.part, p.n ? p.n : 1) != DT_OK)
            return dt_error(ctx);
    }
    dt__bucket_release(ctx, bucket, 0, gathered);
    for (int a = 0; a <= DT__MASTER; a++)
        for (size_t at = z->offset, n;
             at < z->offset + z->count && dt__ckpt_has_array(c->zero, bucket, a); at += n) {
            n = z->offset + z->count - at < DT__CKPT_CHUNK / size ? z->offset + z->count - at
                                                                  : DT__CKPT_CHUNK / size;
            memset(host, 0, n * size); /* padding is 0, and is not in the file */
            if (dt__state_transfer(c, w[DT__OPTIM], bucket, a, at, at + n, host) != DT_OK ||
                dt__state_set(c->zero, z, a, at, n, host) != DT_OK)
                return dt_error(ctx);
        }
    return dt_error(ctx);
}

/* [collective: world] Loads the error arrays of 1-bit Adam if this job's layout is the layout of
   the job that saved them. Otherwise leaves them as they are, and logs a notice. */
static dt_status dt__load_errors(dt_checkpoint *c, dt__candidate *f, dt_weights *w, char *host) {
    dt_zero *zero = c->zero;
    const char *layout = dt_json_string(f->json, dt_json_find(f->json, 0, "layout"), NULL);
    double other = !layout || strcmp(layout, dt__ckpt_layout(zero).s) != 0;
    for (int u = 0; u < zero->n_buckets; u++)
        for (int e = 0; e < 2 && zero->buckets[u].errors[e]; e++) {
            char name[64];
            dt__onebit_error_name(c, u, e, name, sizeof name);
            const dt_weight *t = dt_weights_get(w, dt_weights_find(w, name));
            if (!t || t->count != dt__onebit_error_shape(&zero->buckets[u], e).d[0]) other = 1;
        }
    if (dt_sum_doubles(zero->mesh.world, &other, 1) != DT_OK) return dt_error(c->ctx);
    if (other > 0 && dt__onebit_frozen(zero) && dt_ctx_rank(c->ctx) == 0)
        dt_log(c->ctx, DT_LOG_NOTICE,
            "%s: the errors of 1-bit Adam belong to layout %s, and begin again at zero", f->path,
            layout ? layout : "?");
    for (int u = 0; u < zero->n_buckets && other == 0; u++)
        if (dt__errors_transfer(c, w, u, host) != DT_OK) break;
    return dt_error(c->ctx);
}

/* Loads the loss scale, extra_state and config from the manifest. Called after all tensors are
   loaded. */
static void dt__load_numbers(dt_checkpoint *c, dt__candidate *f) {
    dt_zero *zero = c->zero;
    dt_json *j = f->json;
    const char *config = dt_json_string(j, dt_json_find(j, 0, "config"), NULL);
    double scale = zero->loss_scale;
    int64_t good = 0, hysteresis_left = zero->hysteresis_left;
    dt_json_number(j, dt_json_find(j, 0, "loss_scale"), &scale);
    dt_json_int(j, dt_json_find(j, 0, "good_steps"), &good);
    dt_json_int(j, dt_json_find(j, 0, "patience"), &hysteresis_left);
    if (dt__scale_is_dynamic(zero)) {
        dt__scale_set(zero, scale);
        zero->good_steps = (int)good;
        zero->hysteresis_left = (int)hysteresis_left;
    }
    for (int i = 0; i < c->desc.n_extra_state; i++) {
        const dt_extra_state *s = &c->desc.extra_state[i];
        int node = dt_json_find(j, dt_json_find(j, 0, "saved"), s->name);
        for (int k = 0; k < s->count; k++) dt_json_number(j, dt_json_at(j, node, k), &s->values[k]);
    }
    dt__string_free(c->ctx, c->config);
    c->config = config ? dt__concat_text(c->ctx, config, strlen(config), "") : NULL;
    memcpy(c->path, f->path, sizeof c->path);
}

static dt_status dt__load_apply(dt_checkpoint *c, dt__candidate *f) {
    dt_ctx *ctx = c->ctx;
    dt_zero *zero = c->zero;
    dt_weights *w[DT__CKPT_FILES] = { NULL, NULL };
    char path[DT__PATH_BYTES + 32];
    if (!dt_json_int(f->json, dt_json_find(f->json, 0, "step"), &zero->step) || zero->step < 0)
        return dt_fail(ctx, DT_ERR_IO, "dt_checkpoint_load: %s: its step is no number", f->path);
    for (int k = 0; k < DT__CKPT_FILES; k++)
        dt__files_path(&c->files, k, f->path, dt__ckpt_names[k]);
    if (dt__load_fits(c, f) != DT_OK || dt__list_make(c) != DT_OK ||
        dt__load_tensors_fit(c, f) != DT_OK)
        return dt_error(ctx);
    dt__list_free(c);
    for (int k = 0; k < DT__CKPT_FILES && dt_error(ctx) == DT_OK; k++) {
        snprintf(path, sizeof path, "%s/%s", f->path, dt__ckpt_names[k]);
        w[k] = dt_weights_open(ctx, path);
    }
    char *host = (char *)dt_alloc(ctx, DT_MEM_HOST, DT__CKPT_CHUNK, "loading");
    for (int u = 0; u < zero->n_buckets && dt_error(ctx) == DT_OK; u++)
        dt__load_bucket(c, w, &zero->buckets[u], host);
    if (dt_error(ctx) == DT_OK && zero->desc.optimizer == DT_ONEBIT_ADAM)
        dt__load_errors(c, f, w[DT__OPTIM], host);
    dt_free(ctx, DT_MEM_HOST, host, DT__CKPT_CHUNK);
    for (int k = 0; k < DT__CKPT_FILES; k++) dt_weights_close(w[k]);
    if (dt_error(ctx) == DT_OK) dt__load_numbers(c, f);
    /* fail unless all replicas are equal after the load */
    return dt_error(ctx) == DT_OK ? dt__compare_ranks(zero, 1) : dt_error(ctx);
}

int64_t dt_checkpoint_load(dt_checkpoint *c, const char *from) {
    dt__candidate f;
    char dir[DT__PATH_BYTES];
    memset(&f, 0, sizeof f);
    if (!c || dt_error(c->ctx) != DT_OK) return -1;
    if (!from) from = c->files.path[DT__DIR];
    if (!*from || snprintf(dir, sizeof dir, "%s", from) >= (int)sizeof dir) {
        dt_fail(c->ctx, DT_ERR_ARG, "dt_checkpoint_load: from where? '%.80s'", from);
        return -1;
    }
    for (size_t n = strlen(dir); n > 1 && dir[n - 1] == '/'; n--) dir[n - 1] = 0;
    if (dt__save_wait(c) == DT_OK && dt__candidate_newest(c, dir, &f) == DT_OK && f.path[0])
        dt__load_apply(c, &f);
    if (f.probe) dt__candidate_close(&f);
    /* if any rank could not load, this barrier fails on every rank */
    if (dt_error(c->ctx) == DT_OK) dt_barrier(c->zero->mesh.world);
    if (dt_error(c->ctx) == DT_OK) return f.path[0] ? c->zero->step : 0;
    dt__list_free(c);
    return -1;
}

#ifdef __cplusplus
}
#endif

DT__CPP_WARNINGS_ON
#endif /* DT_ZERO_IMPL */

/* HISTORY
     0.2.0   The field's names. Old name -> new name:
                 DT_OWN                               DT_OPTIMIZER_CUSTOM
                 dt_flat, its first                   dt_update_args, offset
                 dt_scale_desc.least                  min_scale
                 dt_saved                             dt_extra_state
                 dt_checkpoint_desc.saved, n_saved    extra_state, n_extra_state
                 dt_checkpoint_desc.beside            config_json
                 dt_file_place                        dt_weight_map
                 dt_checkpoint_desc.place             map_weight
                 dt_export_desc.place                 map_weight
                 dt_zero_formula_desc.kept            keep_gathered
     0.1.0   AdamW, Adam, SGD, 1-bit Adam, a custom optimizer; ZeRO 0 to 3; offload; loss scaling;
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
