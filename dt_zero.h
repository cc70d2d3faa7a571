/* dt_zero.h - v0.2.0 - training state: optimizers, ZeRO 0 to 3, mixed precision, offload,
   checkpoints - public domain or MIT, see the end of the file

   The topmost of dt's four single-header libraries: it includes the other three. It contains what a
   training step needs besides the model: the reduction of gradients over every axis of the mesh
   that divides the data; optimizer state, gradients and parameters, replicated or sharded over the
   ranks (ZeRO, FSDP, HSDP); the optimizer update, with f32 master weights for 16-bit parameters;
   loss scaling; the learning rate; CPU and NVMe offload; checkpoints that can be loaded in any
   layout. Sparse tables hold embeddings whose keys are too many for a tensor.

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
       cc -O2 train.c -lm -lpthread                 C11 or C++17; gcc, clang
       echo '#include "dt_zero.h"' | cc -O2 -DDT_IMPLEMENTATION -x c -c -o dt.o -
       cc -O2 train.c dt.o -lm -lpthread            the same in two commands, with a train.c that
                                                    does not define DT_IMPLEMENTATION; after an edit
                                                    of train.c only the second one is needed
       nvcc -O3 train.c dt_kernels.cu -lcublasLt -lnccl     CUDA

   OPTIONS (define before including)
       DT_IMPLEMENTATION   in exactly one file: compile the code, not only the declarations
       DT_STATIC           in every file: make all functions static

   CONTENTS
     1. Learning rate (warmup, cosine, linear, WSD schedules)
     2. Training state (ZeRO-1, ZeRO-2, ZeRO-3, FSDP, HSDP, optimizers, AdamW, SGD, Muon, parameter
        groups, gradient clipping, freezing, EMA of weights, outlier steps by z-score)
     3. Checkpoints (save, load, resharding, export of weights)
     4. Memory account (formulas of ZeRO for memory and traffic)
     5. Sparse tables, parameter server (embedding table, Adagrad, FTRL, lazy Adam, admission,
        snapshot, parameter server, bounded staleness)
     6. Implementation: learning rate
     7. Buckets, groups and shards (HSDP shard groups and replicas, tied embeddings)
     8. Comparing ranks (replicas that drift apart, learning rate of all ranks)
     9. Gradient reduction (gradient bucket, gradient accumulation, 16-bit gradients, overlap of
        communication and computation, binary tree over micro-batches)
    10. ZeRO-3 (FSDP): gather and release of parameters
    11. Gradient norm (gradient clipping, the rank that made a NaN)
    12. Loss scaling (mixed precision, dynamic loss scale)
    13. Optimizer update (mixed precision, master weights)
    14. I/O thread (background I/O, a disk that does not answer)
    15. Offload (CPU offload, NVMe offload)
    16. 1-bit Adam (error feedback, gradient compression)
    17. Muon (Newton-Schulz iteration, orthogonalized momentum)
    18. Making, stepping, freeing (parameter groups, outlier steps, freezing, EMA of weights: code)
    19. Memory account: code
    20. Checkpoints: files (atomic commit: write, fsync, rename, fsync)
    21. Checkpoints: contents (digests, list of tensors)
    22. Checkpoints: saving (background save)
    23. Checkpoints: opening, closing, export
    24. Checkpoints: loading (resharding)
    25. Sparse tables: rows and updates (hash table, pull, push, row-wise Adagrad, time to live)
    26. Sparse tables: snapshots (base, delta)
    27. Parameter server: keys, sums, pulls (embedding lookup, owners of keys)
    28. Parameter server: steps, servers (synchronous, asynchronous, stale synchronous parallel)
    29. Parameter server: snapshots (one commit for all owners), call sites

   CONTRACT
     Memory     The context owns the training state and frees it. dt_zero_make allocates parameters
                and optimizer state; the first backward allocates gradients. Every bucket is padded
                to a multiple of n * 1,024 elements, where n is the number of ranks in a shard
                group. Bytes per element of parameters + gradients + Adam state: 4 + 4 + 8 for f32,
                2 + 4 + 12 for bf16 and f16, 2 + 2 + 12 with 16-bit gradients
                (dt_zero_desc.grad_dtype); an EMA of the weights adds 4. Section 4 shows which of
                these each ZeRO stage divides by n. DT_MEM_COMM counts gathered parameters and
                gradients that are being reduced: at stage 2 the gradients of three buckets, at
                stage 3 also the parameters of the current block and of the next block. 1-bit Adam
                on N ranks adds error arrays: 4 + 4/N bytes per element. Muon has one state array
                for matrices, 4 bytes per element instead of Adam's 8, and buffers during the update
                (section 17). At stage 3 a parameter's `data` is NULL outside of the block that uses
                the parameter: read the values with dt_read or dt_data.
                A sparse table allocates rows as they are made and keeps them until dt_table_free
                or dt_ctx_free; section 5 has its bytes per row, dt_table_info the exact ones.
     Types      f32, f64, bf16 and f16. Mixed precision: bf16 and f16 parameters have f32 gradients,
                or 16-bit sums of them (dt_zero_desc.grad_dtype), and an f32 master weight in the
                optimizer state. The update changes the master weight and rounds it to the
                parameter. The first step copies the master weight from the parameter. If the
                program writes a bf16 or f16 parameter after the first step, the next step
                overwrites the written value. Losses are scaled if any parameter is f16, because f16
                holds only values from 6e-8 to 65,504; bf16 has the range of f32.
     Errors     Errors are sticky, as in dt_tensor.h.
                Gradients: a step whose gradient norm is not finite changes nothing. With a loss
                scale every rank skips the step; without one every rank fails (DT_ERR_NUMERIC). The
                text names the rank that made the NaN, which tests its gradients before they are
                summed.
                Replicas (section 8): the following make every rank fail with DT_ERR_COMM. The
                traffic of the comparisons does not count in dt_comm_bytes.
                - Registration: ranks that hold replicas register other parameters, another order,
                  other flags or another optimizer. dt_zero_make compares them.
                - Values: replicas do not start from the same values, or do not stay equal.
                  dt_zero_step, dt_checkpoint_save, dt_checkpoint_load and dt_zero_export compare
                  digests of parameters and optimizer state (dt_zero_desc.compare_every). The text
                  names the parameter, two ranks and the last step after which they agreed.
                  Replicas on CPUs need the same instruction set: the bits of matrix products and
                  exponentials depend on it. On machines with unlike ones, for example AVX2 and
                  AVX-512, parameters that each rank updates itself drift apart in their last bits,
                  and the first comparison after a step fails.
                - Learning rate: the ranks pass different values in a step.
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

enum { DT_ADAMW = 0, DT_ADAM, DT_SGD, DT_ONEBIT_ADAM, DT_OPTIMIZER_CUSTOM, DT_MUON };
/* Muon: the factor of the orthogonalized momentum of a (rows,columns) matrix. MATCH_RMS is 0.2
   sqrt(max(rows, columns)), with which Muon works at AdamW's learning rates and weight decay
   (arXiv:2502.16982); ORIGINAL is sqrt(max(1, rows / columns)) (K. Jordan's Muon, section 17) */
enum { DT_MUON_MATCH_RMS = 0, DT_MUON_ORIGINAL };

/* Parameter group (param_groups of PyTorch): an optimizer for some of the parameters, with its own
   settings and step count. A parameter belongs to the first group that has a pattern for its name;
   all others belong to group 0, whose settings are those of dt_zero_desc. */
enum { DT_MAX_GROUPS = 16 }; /* parameter groups besides group 0 */
typedef struct dt_param_group {
    /* Patterns of names, separated by commas, for example "disc.*,*.bias"; '*' matches any text.
       dt_zero_make copies them. It fails with DT_ERR_ARG if one of the patterns matches no
       parameter of this group on any rank */
    const char *params;
    /* as in dt_zero_desc, with the same defaults; not DT_ONEBIT_ADAM */
    int optimizer;
    double beta1, beta2, eps, momentum, weight_decay;
    int muon_scale, no_nesterov;
    double lr_scale; /* multiplies the learning rate of the step; 0 means 1 */
    /* DT_OPTIMIZER_CUSTOM, as in dt_zero_desc */
    dt_update_fn update;
    void *user;
    int states;
} dt_param_group;

/* Outliers: the last values of a loss or a gradient norm. */
enum { DT_OUTLIER_WINDOW = 128 };
typedef struct dt_outlier {
    double values[DT_OUTLIER_WINDOW]; /* value number n, from 0, at n % DT_OUTLIER_WINDOW */
    int64_t count;                    /* values so far; zero-initialized */
} dt_outlier;

/* [local] Adds a value to the window and returns its z-score, (value - mean) / standard deviation.
   Mean and deviation are over the last DT_OUTLIER_WINDOW values, with this one, as in llm.c.
   Returns NaN for the first DT_OUTLIER_WINDOW values, and for a value that is not finite, which is
   not added; 0 if all values of the window are equal. */
DT_API double dt_outlier_z(dt_outlier *window, double value);

typedef struct dt_zero_desc {
    /* ZeRO stage. Stage 0 shards nothing, stage 1 the optimizer state, stage 2 also the gradients,
       stage 3 also the parameters (FSDP) */
    int stage;
    /* HSDP: number of ranks in a shard group; 0 means all ranks of the data group. A shard group
       consists of consecutive ranks of the data group. Different shard groups hold replicas */
    int shard_group;
    /* 1: stage 3 keeps gathered parameters until the update (section 10) */
    int keep_gathered;
    const dt_mesh *mesh; /* dt_zero_make copies the mesh. NULL: all ranks are data parallel */
    /* DT_ADAMW (arXiv:1711.05101), DT_ADAM (L2 added to the gradient), DT_SGD, DT_ONEBIT_ADAM
       (arXiv:2102.02888; section 16), DT_OPTIMIZER_CUSTOM, DT_MUON (section 17): parameters that
       have 2 or more dimensions and are not marked no_decay by Muon, the others by AdamW. Muon is
       for the matrices of hidden layers: put embeddings and the output head into a group of
       DT_ADAMW, and mark biases of 2 dimensions no_decay. Not with offload */
    int optimizer;
    double beta1, beta2; /* beta1: 0 means 0.9; beta2: 0 means 0.999 */
    double eps;          /* 0 means 1e-8 */
    /* DT_SGD: momentum; 0: no momentum and no optimizer state. DT_MUON: 0 means 0.95 */
    double momentum;
    int muon_scale;  /* DT_MUON_* */
    int no_nesterov; /* 1: Muon orthogonalizes the momentum itself, without Nesterov's look-ahead */
    /* 1-bit Adam: number of steps of plain Adam before the second moment is frozen. Choose at least
       the number of warmup steps of the learning rate, and about 1/(1 - beta2) or more. 1-bit Adam
       works only at stage 0, without `tree` and without offload */
    int freeze_steps;
    /* applies to every parameter that has 2 or more dimensions and is not marked no_decay */
    double weight_decay;
    /* gradient clipping: scales gradients by min(1, clip / (norm + 1e-6)); 0: no clipping */
    double clip;
    /* Placement of the optimizer state (section 15). NULL or "none": in the same memory as the
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
    /* 16-bit gradients. DT_BF16 or DT_F16: the gradients of parameters of this type are stored and
       summed in it, over micro-batches and over ranks: half the traffic, and 2 bytes per element
       instead of 4 (16 bytes with parameters and Adam state). A micro-batch's gradient is computed
       in f32 and rounded; a sum over ranks is computed in f32 and rounded once; each addition of a
       micro-batch rounds, so many micro-batches lose small terms. t->grad is then NULL: use
       dt_zero_grad. DT_F32 (0): all gradients are summed in the type of dt_grad_dtype. Not with
       DT_MUON or DT_ONEBIT_ADAM; DT_ERR_ARG if no trained parameter on any rank has this type */
    dt_dtype grad_dtype;
    /* maximum size of a bucket in bytes, unless one parameter is larger; 0 means 25 MiB */
    size_t bucket_bytes;
    /* Comparisons of replicas (section 8): copies of parameters and of optimizer state that several
       ranks hold must be equal. n > 0 (0 means 100): before and after the first step, after each
       multiple of n, before checkpoints and exports, and before the update of the first step after
       a dt_write or dt_weights_load of a trained parameter on any rank. n < 0: before the first
       step only; for ranks with unlike instruction sets, whose replicas drift. A load always
       compares. Stage 3: while a parameter is gathered (keep_gathered, or read outside of blocks in
       this forward), a dt_write on one rank is not detected: each rank stores only its own shard.
       A comparison reads once what this rank replicates, at about 10 GB/s per CPU core, and
       sums 16 bytes for each array of a parameter over the ranks. Measured at dp 2, f32, Adam:
       0.04 % of the time of 100 steps with 1,024 tokens per rank, 0.1 % with 256. On a GPU the
       digest kernel runs on the device and copies at most 2 KiB to the host for each array */
    int compare_every;
    /* 1: gradients are summed in a binary tree over micro-batches (section 9) */
    int tree;
    /* 1: no overlap of communication and computation: the backward waits for each bucket's
       reduction, and parameters are gathered when needed, not prefetched */
    int no_overlap;
    /* 1: stage 3 fills gathered parameters with NaN before it frees them, to expose later reads */
    int poison;
    dt_update_fn update; /* DT_OPTIMIZER_CUSTOM: the update */
    void *user;          /* passed to `update` */
    int states;          /* DT_OPTIMIZER_CUSTOM: number of state arrays, 0 to 2 */
    /* (group_count) parameter groups 1, 2, ..., at most DT_MAX_GROUPS. A new bucket, with its
       padding, begins wherever the group changes in the order of registration. So for single
       parameters with another learning rate or without decay use dt_param_desc instead */
    const dt_param_group *groups;
    int group_count;
    /* EMA of the weights (Polyak averaging): ema = ema_decay * ema + (1 - ema_decay) * weight after
       each step of a parameter; 0: none. It begins with the weight before the first step. It is one
       more state array, of the gradient's type, and sharded like the others. dt_zero_swap_ema
       exchanges it with the weights */
    double ema_decay;
    /* Outlier steps: a step changes nothing if the z-score of its gradient norm, or of the loss
       that the program passed to dt_zero_loss, exceeds this threshold; 0: no threshold */
    double skip_norm_z, skip_loss_z;
} dt_zero_desc;

typedef struct dt_zero dt_zero;

enum { DT_OUTLIER_NONE = 0, DT_OUTLIER_NORM, DT_OUTLIER_LOSS };
typedef struct dt_step_info {
    /* the last completed step, counted from 1. A step is complete when the comparison of replicas
       (dt_zero_desc.compare_every) fails after it */
    int64_t step;
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
    double norm_z, loss_z; /* z-scores of the gradient norm and of the loss; NaN if unknown */
    /* DT_OUTLIER_*. Not DT_OUTLIER_NONE: the step has changed no parameter, no state and no step
       count of a parameter group, but counts as completed: continue with the next micro-batches */
    int outlier;
    double loss_scale; /* loss scale of the gradients in this step; 1 without loss scaling */
    /* after a skipped or failed step: the world rank whose own gradient, before any sum over ranks,
       has an element that is not finite. If no rank knows of one (GPUs test their own gradients
       only under dt_check_finite), the first rank that holds such an element of the sum. -1 if all
       gradients are finite */
    int bad_rank;
    /* bad_param: the parameter of this element; NULL on ranks of other pipeline stages.
       bad_element: the element's index in the local slice of rank bad_rank */
    const dt_tensor *bad_param;
    size_t bad_element;
} dt_step_info;

/* [collective: world] Makes the training state for desc.stage: ZeRO-1, ZeRO-2 or ZeRO-3 (FSDP);
   with desc.shard_group, HSDP. Call it after the last dt_param: dt_zero_make allocates and
   initializes the parameters and the optimizer state. A context has one training state: a second
   call fails with DT_ERR_ARG, also after dt_zero_free. Returns NULL on failure. */
DT_API dt_zero *dt_zero_make(dt_ctx *ctx, dt_zero_desc desc);
/* [collective: world] Takes one optimizer step with learning rate lr. Call dt_zero_step after the
   backward of the step's last micro-batch. It computes the gradient norm, clips the gradients,
   updates the parameters, and makes the new parameters available on every rank. The next backward
   starts new gradient sums. */
DT_API dt_step_info dt_zero_step(dt_zero *zero, double lr);
/* [collective: world] Takes one optimizer step of some parameter groups, as a GAN or actor-critic
   needs. lr[g] is the learning rate of group g = 0 .. group_count. A group with a negative learning
   rate does not step: its parameters, state and step count stay, and its gradients are discarded,
   as by PyTorch's zero_grad. Gradient norm, clipping and the test for NaN cover only the groups
   that step. DT_ERR_ARG: no group steps. dt_zero_step(zero, lr) steps all groups. */
DT_API dt_step_info dt_zero_step_groups(dt_zero *zero, const double *lr);
/* [local] Tells the next dt_zero_step the step's loss, for skip_loss_z. Pass the same loss, summed
   over the ranks, on every rank; otherwise dt_zero_step fails with DT_ERR_COMM. */
DT_API void dt_zero_loss(dt_zero *zero, double loss);
/* [collective: world] Freezes (on = 1) or unfreezes (0) the parameters whose names match one of the
   patterns, as in dt_param_group.params, between two steps. A frozen parameter gets no gradient,
   does not count in the gradient norm, and keeps its values, its state and its EMA; checkpoints
   hold them, but not which parameters are frozen. A bucket of frozen parameters needs no memory for
   gradients and no traffic for them. A group whose parameters are all frozen does not step. Adam's
   bias correction counts the steps of the group, which go on while some of its parameters are
   frozen. Parameters that were frozen at registration (dt_param_desc.frozen) have no gradients and
   no state, and stay frozen. DT_ERR_ARG: a pattern matches no other parameter, or a step has begun.
   DT_ERR_COMM: the ranks pass different arguments. DT_ERR_UNSUPPORTED: 1-bit Adam. */
DT_API dt_status dt_zero_freeze(dt_zero *zero, const char *params, int on);
/* [collective: world] Exchanges the weights with their EMA (dt_zero_desc.ema_decay), between two
   steps, to evaluate or export with it. A second call exchanges them back, with the same bits.
   Between the two calls dt_zero_step and dt_checkpoint_save fail with DT_ERR_ARG. A group that has
   not stepped has no EMA, and keeps its weights. The data pass through host memory. DT_ERR_ARG:
   ema_decay is 0, or a step has begun. */
DT_API dt_status dt_zero_swap_ema(dt_zero *zero);
enum { DT_STATE_MASTER = 2, DT_STATE_EMA };
/* [collective: the parameter's data group] Copies a state array of a parameter's full local slice
   to host memory, as elements of type dt_grad_dtype(param). `which` is 0 for Adam's first moment or
   the momentum of SGD and Muon, 1 for Adam's second moment; of a custom optimizer, the index of the
   array. After the first step it may also be DT_STATE_MASTER, the f32 master weights of a 16-bit
   parameter, or DT_STATE_EMA. Returns DT_ERR_ARG if the parameter was frozen at registration or has
   no such array. */
DT_API dt_status dt_zero_state(dt_zero *zero, int which, const dt_tensor *param, void *host);
/* [collective: the parameter's data group; in the first call of a step also the groups of tied
   parameters over pipeline stages] Copies the step's gradient of a parameter's full local slice to
   host memory, as elements of type dt_grad_dtype(param). The gradient is summed over all ranks and
   divided by the loss scale. Call dt_zero_grad between the last backward of a step and
   dt_zero_step. Returns DT_ERR_ARG for a parameter that dt_zero_freeze has frozen, and
   DT_ERR_UNSUPPORTED after 1-bit Adam has frozen its second moment, because gradients are then not
   summed. */
DT_API dt_status dt_zero_grad(dt_zero *zero, const dt_tensor *param, void *host);
/* [collective: as dt_zero_grad, and the groups that shard the parameter] dt_zero_grad of the full
   logical tensor: gathers the slices of all ranks. `host` has dt_count(param->param->full)
   elements. */
DT_API dt_status dt_zero_grad_full(dt_zero *zero, const dt_tensor *param, void *host);
/* [local] Returns the number of completed steps, including the steps before the loaded
   checkpoint. */
DT_API int64_t dt_zero_steps(const dt_zero *zero);
/* [local] Returns the number of steps that a parameter group has taken, which its bias correction
   (Adam) uses; -1 if there is no such group. */
DT_API int64_t dt_zero_group_steps(const dt_zero *zero, int group);
/* [local] Returns the bytes of optimizer state on this rank, computed from the sizes of the shards.
   The allocator's count for DT_MEM_OPTIM must be the same. Returns 0 if the optimizer state is
   offloaded: host memory counts as DT_MEM_HOST, and a file does not count. */
DT_API size_t dt_zero_state_bytes(const dt_zero *zero);
/* [local], at stage 3 [collective: world]. Frees the training state, which otherwise lives as long
   as the context. At stage 3 the parameters cannot be read after this call. A later use of `zero`
   fails with DT_ERR_ARG, so the struct itself stays until dt_ctx_free. NULL is allowed. */
DT_API void dt_zero_free(dt_zero *zero);

// ==== 3. Checkpoints ============================================================================

/* Checkpoint: a folder from which training resumes in any layout, at any ZeRO stage, on any number
   of ranks (resharding). Its files hold full logical tensors, whichever ranks wrote the parts. DIR
   is dt_checkpoint_desc.dir:

       DIR/lock                    locked by the process that saves to DIR; says which process it is
       DIR/step-200/               a checkpoint, which is complete or absent
           model.safetensors       each parameter, under its name or where
                                   dt_checkpoint_desc.map_weight puts it
           optim.safetensors       m.NAME, v.NAME, master.NAME, ema.NAME: state of each trained
                                   parameter
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
    int n;           /* 1 or 2; in dt_zero_export also -1: leaves the parameter out of the file */
    int64_t columns; /* 0 means the parameter's last dimension */
    dt_shape shape;  /* full shape of each of the file's tensors */
    /* 0, or g > 1: the n parts repeat g times, for example for g experts; in their names '*' stands
       for the number of the repetition, from 0 */
    int groups;
} dt_weight_map;
/* [local] Returns the number of parts of a map: n, or n * groups. If 0 <= i < this number, sets
   *part to part i and writes the name of its tensor to `name` (128 bytes). */
DT_API int dt_weight_map_part(const dt_weight_map *map, int i, char *name, dt_weight_part *part);

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
    /* 1: dt_checkpoint_load also accepts a checkpoint of another dtype. Parameters are rounded to
       the nearest value of their type, from the checkpoint's master weights if it has them; master
       weights that it lacks begin from the rounded parameters; optimizer state is rounded, too */
    int convert_dtype;
    /* NULL, or the name of a parameter that may have more rows (dimension 0) than in the
       checkpoint, for example a table of positions: the other rows keep their initial values, and
       their optimizer state begins at 0. It also means tensors whose names end in a dot and it */
    const char *grows;
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
   forward. On failure every rank fails, with DT_ERR_IO if a file operation failed, with DT_ERR_COMM
   if replicas differ (dt_zero_desc.compare_every), and earlier checkpoints are untouched. The save
   also fails if the ranks do not see the same folder, or if the folder has a newer checkpoint than
   this job has loaded or saved. A background save waits only for the previous save; if it fails,
   the next dt_checkpoint_poll, dt_checkpoint_save or dt_checkpoint_close returns the failure.
   Without desc.background the ranks wait for the slowest rank's disk, at most
   dt_run_desc.timeout_s. */
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
   saved with another model, optimizer, type (see convert_dtype) or seed. The error arrays of 1-bit
   Adam can be loaded only in the layout that saved them; in another layout they start at zero, with
   a notice. */
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
   renames PATH.tmp to `path`. Returns DT_ERR_IO if a file operation fails, DT_ERR_COMM if replicas
   differ (dt_zero_desc.compare_every; then no file is written). */
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
    /* P, G and O. With Adam they are 4, 4, 8 for f32, 8, 8, 16 for f64, 2, 4, 12 for bf16 and f16
       with f32 master weights, and 2, 2, 12 with 16-bit gradients (dt_zero_desc.grad_dtype), as in
       the paper. O is 4 less for SGD with momentum, 8 less without; an EMA adds 4 (f64: twice as
       much). If all three are 0, they mean 4, 4, 8 */
    double values, grads, state;
} dt_zero_formula_desc;
/* Bytes in the memory of one rank; `sent` is the bytes that the rank sends in one step. */
typedef struct dt_zero_bytes {
    double params, grads, optim, total, sent;
} dt_zero_bytes;
/* [local] Returns the bytes by the formulas above. All are NaN if the stage is unknown or an
   argument is negative. */
DT_API dt_zero_bytes dt_zero_formula(dt_zero_formula_desc desc);

// ==== 5. Sparse tables, parameter server ========================================================

/* A sparse table (an embedding table of unbounded vocabulary) maps 64-bit keys to rows of `width`
   numbers and their optimizer state. Every value is a valid key. Use it for categories that are too
   many for a dense dt_embedding: a step touches only the rows of its own keys.

       key --hash--> shard --> bucket of 5 keys --> row number --> values     (DT_MEM_PARAMS)
                     (64 index shards,                             state      (DT_MEM_OPTIM)
                      DT_MEM_HOST)                                 last push  (DT_MEM_HOST)

   A row exists from the push that admits it. Before that it reads as its initial value, which is a
   function of the context's seed, the table's name, the key and the column, computed by the
   counter-based RNG: the model does not depend on which rank holds a key, and it starts from the
   values of an embedding parameter (rows,width) with the table's name. A pull changes nothing.

   Time is the program's own clock, for example its step number. It never runs backwards: a push or
   a shrink with a smaller clock than the last one fails with DT_ERR_ARG. It begins at 0.

   Rows lie in segments and the index in shards, each of which grows alone, so growth never needs
   the memory of two tables. A row of w f32 numbers and s numbers of state takes 4 (w + s) + 8 bytes
   (8 more if desc.threshold is set), and 16 to 20 bytes of index. With a CUDA kernel table the rows
   stay in host memory, and all bytes count as DT_MEM_HOST.

   Arithmetic: values, gradients and state have the table's type, bf16 tables f32 gradients and
   state. All operations are in that type, in the order of the formulas below. */

/* Optimizers of a table: SGD, Adagrad, row-wise Adagrad, lazy Adam, FTRL, custom. g is the sum of a
   key's gradients in one push, w the row, t the number of pushes that have updated the row.

       SGD                w -= lr g
       ADAGRAD            a += g^2;  w -= lr (g / (sqrt(a) + eps))        (JMLR 12, 2011)
       ROWWISE_ADAGRAD    a += mean of g^2, one number for a row;  w -= (lr / (sqrt(a) + eps)) g
                          The mean adds columns c = 0, 4, 8, .. and likewise 1, 5, .. and 2, 6, ..
                          and 3, 7, ..; then (s0 + s1) + (s2 + s3), divided by the width
       ADAM (lazy)        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
                          w -= lr ((m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps))
       FTRL               s = (sqrt(n + g^2) - sqrt(n)) / lr;  z += g - s w;  n += g^2;
                          w = |z| <= l1 ? 0 : -(z - sign(z) l1) / ((ftrl_beta + sqrt(n)) / lr + l2)
                          (FTRL-Proximal, McMahan et al., KDD 2013); lr must be positive */
enum {
    DT_TABLE_SGD = 0,
    DT_TABLE_ADAGRAD,
    DT_TABLE_ROWWISE_ADAGRAD,
    DT_TABLE_ADAM,
    DT_TABLE_FTRL,
    DT_TABLE_CUSTOM
};

/* One update of a custom optimizer. */
typedef struct dt_table_update_args {
    dt_ctx *ctx;
    const char *table; /* its name */
    uint64_t key;
    int width;
    void *row;        /* (width) f32 or f64; the f32 master row of a bf16 table */
    const void *grad; /* (width) of row's type: the sum of the key's gradients */
    void *state;      /* (dt_table_desc.states) of row's type, zero at first */
    double lr;
    int64_t clock;
} dt_table_update_args;
typedef dt_status (*dt_table_update_fn)(const dt_table_update_args *args, void *user);

typedef struct dt_table_desc {
    const char *name; /* names the table in errors and snapshots; part of the initial values */
    int width;        /* numbers of a row, at most 65,536 */
    dt_dtype dtype;   /* DT_F32, DT_F64, or DT_BF16: f32 master rows in the optimizer state */
    dt_init init;     /* initial values. FTRL: DT_ZEROS, because its w is a function of z and n */
    int optimizer;    /* DT_TABLE_* */
    double beta1, beta2; /* Adam; 0 means 0.9 and 0.999 */
    double eps;          /* Adagrad and Adam; 0 means 1e-8 */
    /* first value of Adagrad's a and of FTRL's n */
    double initial_accumulator;
    double l1, l2, ftrl_beta; /* FTRL */
    /* Admission (feature filter). admit_count n: a key gets a row at its n-th push; 0 means 1.
       Until then only a count is kept. admit_probability p in (0,1): a key without a row gets it
       with probability p at each push, decided by the counter-based RNG from (seed, name, key,
       clock); nothing is kept before; 0: not used. Gradients of other keys are dropped */
    int admit_count;
    double admit_probability;
    /* Show/click statistics. threshold > 0: rows count shows and clicks (f32). dt_table_shrink
       multiplies both by `decay` (0 means 1), then removes rows with
       show_weight (shows - clicks) + click_weight clicks < threshold. Weights that are both 0 mean
       1 and 1: shows alone */
    double threshold, decay, show_weight, click_weight;
    /* time to live: dt_table_shrink removes rows not pushed for more than ttl clocks; 0: none */
    int64_t ttl;
    /* DT_TABLE_CUSTOM. The table's other rows and the table itself must not be used in it */
    dt_table_update_fn update;
    void *user;
    int states; /* numbers of state of a row */
    /* Spilling. memory_limit: bytes of rows in memory, with state and clocks; 0: no limit. When it
       is reached, a push moves the rows whose last push is longest ago to a file without a name in
       the folder `spill`: of each 256 rows that it passes, the oldest quarter. A push of such a row
       brings it back; a pull reads it where it is. The index stays in memory. The file has at most
       4/3 of the space of its rows at their peak. Results have the same bits with any limit */
    size_t memory_limit;
    const char *spill;
} dt_table_desc;

typedef struct dt_table dt_table;
/* [local] Makes an empty table. The context owns it. Returns NULL on failure: DT_ERR_ARG for a
   setting that is out of range, DT_ERR_MEM. */
DT_API dt_table *dt_table_make(dt_ctx *ctx, dt_table_desc desc);
/* [local] Frees the table, which otherwise lives as long as the context. NULL is allowed. */
DT_API void dt_table_free(dt_table *table);
/* [local] Pull (embedding lookup): rows[i] = the row of keys[i], (n,width) of the table's type.
   Keys may repeat. Makes no rows. */
DT_API dt_status dt_table_pull(dt_table *table, const uint64_t *keys, size_t n, void *rows);

typedef struct dt_table_push_desc {
    double lr;
    int64_t clock;
    const float *shows;  /* (n), not negative; NULL: 1 for each entry of `keys` */
    const float *clicks; /* (n), not negative; NULL: 0 */
    int unique;          /* 1: no key repeats, so the search for repetitions is left out */
} dt_table_push_desc;
/* [local] Push: applies gradients (n,width), f32 or for an f64 table f64. Gradients of keys that
   repeat are summed in the order of `keys`; then each key is updated once. A gradient sum, show or
   click that is not finite fails with DT_ERR_NUMERIC before anything changes; the text names table,
   key and column. n is at most 2^30. */
DT_API dt_status dt_table_push(
    dt_table *table, const uint64_t *keys, size_t n, const void *grads, dt_table_push_desc desc);
/* [local] Removes old and rarely shown rows, as ttl and threshold say. With either, also forgets
   the count of a key that is not admitted and was not pushed since the last dt_table_shrink.
   Returns the number of removed rows; -1 on failure. */
DT_API int64_t dt_table_shrink(dt_table *table, int64_t clock);
/* [local] Writes the keys whose last push is at clock `since` or later, in no order, to `keys`
   (capacity); INT64_MIN: all keys that have rows. Returns their number, which may be larger than
   `capacity`; -1 on failure. Reads the clock of every row. */
DT_API int64_t dt_table_changed(dt_table *table, int64_t since, uint64_t *keys, size_t capacity);

typedef struct dt_table_stats {
    int64_t rows;    /* rows that exist */
    int64_t spilled; /* those of them that are in the spill file */
    int64_t pending; /* keys that are counted but not admitted */
    int64_t clock;   /* of the last push or shrink */
    /* since dt_table_make: keys pulled, those of them that had rows; keys pushed, without
       repetitions; those of them whose gradient was dropped; rows made and removed; spilled rows
       that a push has brought back */
    int64_t pulled, hits, pushed, rejected, created, removed, fetched;
    size_t row_bytes, state_bytes, index_bytes, total_bytes; /* memory; total_bytes: with buffers */
} dt_table_stats;
/* [local] Returns the table's counts; zeros for NULL. */
DT_API dt_table_stats dt_table_info(const dt_table *table);

/* Snapshots of a table. DIR/step-CLOCK holds one file, table.bin, under the commit protocol of
   checkpoints (section 3): complete or absent. A base has all rows with every bit of their state; a
   delta has the rows pushed since the snapshot before it, and the keys removed since then. Loading
   takes the newest intact chain base + delta + ... + delta: if a delta is damaged, the base and the
   deltas before it. Numbers are in the machine's byte order. */
typedef struct dt_table_save_desc {
    int delta; /* 0: saves a base; 1: a delta to this table's last snapshot in the folder */
    int keep;  /* number of newest bases to keep, with their deltas, when a base is saved; 0: all */
} dt_table_save_desc;
/* [local] Saves a snapshot to the folder `dir`, which is made if missing. Each table and each rank
   needs a folder of its own. DT_ERR_ARG: a delta, but this table has neither saved a snapshot to
   `dir` nor loaded one from it. DT_ERR_IO: a file operation failed, and earlier snapshots are
   untouched; or the folder has a newer snapshot than this table knows. */
DT_API dt_status dt_table_save(dt_table *table, const char *dir, dt_table_save_desc desc);

/* Says which keys a load keeps: 1 for a key that belongs to this rank. */
typedef int (*dt_table_owns_fn)(uint64_t key, void *user);
typedef struct dt_table_load_desc {
    int64_t before; /* only snapshots with a clock less than this; 0: any */
    int merge;      /* 1: adds to the rows that the table has, else replaces them */
    /* NULL, or the keys to load: a job with another number of servers loads the folder of every old
       server with merge = 1. The next snapshot must then be a base */
    dt_table_owns_fn owns;
    void *user;
} dt_table_load_desc;
/* [local] Loads the newest intact snapshot and the chain that it needs. Returns its clock. Returns
   -1 if there is no intact snapshot, or on failure: DT_ERR_ARG if the snapshot is of another table,
   width, type, optimizer or seed; DT_ERR_IO. */
DT_API int64_t dt_table_load(dt_table *table, const char *dir, dt_table_load_desc desc);

/* Parameter server (Li et al., OSDI 2014): tables that many ranks share. Each row is stored on one
   rank, its owner, which the key alone determines; workers train. There are two modes:

       owned mode (servers = 0)          served mode (servers = S)
       each rank is worker and owner     the last S ranks are the owners, the others workers
       rank 0 <--> rank 1 <--> rank 2    worker 0   worker 1   worker 2
          all-to-all of keys, rows,           \  \  / |  \  / /       pull: keys, then rows
          and gradients                        server 0    server 1    step: keys, gradients

   A step of a worker:

       x = dt_ps_embedding(ps, table, keys, shape)      pulls each distinct key once
       dt_backward(loss)                                adds up each key's gradients locally
       dt_ps_step(ps, lr)                               pushes these sums, one gradient for a key;
                                                        the worker's clock + 1

   Worker clocks say when a row may be read and a push is applied:

       DT_PS_SYNC    An owner adds what all workers push for a key in a step, in worker order, then
                     updates each key once, and only then answers pulls of the next step. For
                     optimizers in which a zero gradient changes nothing (SGD, Adagrad, FTRL),
                     training has the bits of data parallelism with dt_embedding at ZeRO-0, in both
                     modes, whatever the number of servers.
       DT_PS_SSP     Stale synchronous parallel (Ho et al., NIPS 2013). A step is applied when it
                     arrives. A pull of a worker that has done c steps waits until the slowest
                     worker has done c - staleness. For example with staleness 2: a worker that has
                     done 5 steps waits until all others have done 3, so its rows lack at most 2
                     steps of each. Staleness 0 is DT_PS_SYNC.
       DT_PS_ASYNC   Like SSP without a bound.
       DT_PS_GEO     Local SGD with asynchronous averaging (geo-SGD of Paddle). Each worker has a
                     replica of all rows, reads it and applies its own steps to it, with optimizer
                     state of its own. After every geo_steps steps it sends, for each row that it
                     has changed, the base, which is the row after the last exchange, and the target
                     base + geo_scale (row - base). The owner sets its row to (row - base) + target:
                     with no other change since the base the target, bit for bit. The worker then
                     receives these rows and those that others have changed. So one worker with
                     geo_scale 1 has the bits of local SGD, and workers without a common key those
                     of DT_PS_SYNC. geo_scale 1 / workers averages the workers' changes.

   Except with DT_PS_GEO the sum over workers is not divided by their number: divide the loss by the
   whole batch. */
enum { DT_PS_SYNC = 0, DT_PS_ASYNC, DT_PS_SSP, DT_PS_GEO };
enum { DT_PS_CREDITS = 4, DT_PS_HISTOGRAM = 16, DT_PS_RUN = 1024 };

typedef struct dt_ps_desc {
    /* NULL means the world, also in place of a mesh's group of one rank. In a pipeline all stages'
       ranks are workers in served mode; in owned mode comm has the ranks of the stage that reads */
    dt_comm *comm;
    int servers;   /* 0: owned mode, DT_PS_SYNC only; else fewer than the ranks of comm */
    int mode;      /* DT_PS_* */
    int staleness; /* DT_PS_SSP: the bound, in clocks */
    /* DT_PS_GEO: steps between exchanges; the scale of a worker's changes, 0 means 1 / workers.
       DT_PS_GEO needs servers. Its tables have no FTRL, admission, ttl, threshold or memory_limit.
       Servers keep values alone: their tables count as DT_TABLE_SGD */
    int geo_steps;
    double geo_scale;
    /* most pulls that a worker has under way, and as many prefetches; 0 means DT_PS_CREDITS */
    int credits;
    /* Record and replay, NULL: off. Server i (from 0) writes the order in which requests came to
       the new file `record`.i, or takes requests in the order of the file `replay`.i. A replay of
       the same program has the bits of the recorded run in every mode. DT_ERR_IO. If the
       workers send other requests than those recorded: DT_ERR_ARG, or the error of a deadlock */
    const char *record, *replay;
} dt_ps_desc;

typedef struct dt_ps dt_ps;
typedef struct dt_ps_pull dt_ps_pull;
/* [collective: comm] Makes a parameter server without tables. The context owns it. All ranks pass
   equal values, else DT_ERR_ARG. Returns NULL on failure. */
DT_API dt_ps *dt_ps_make(dt_ctx *ctx, dt_ps_desc desc);
/* [collective: comm] Adds a table and returns its number, from 0; -1 on failure. Call it before
   dt_ps_serve, dt_ps_load and the first step. DT_ERR_ARG: later, or the ranks' descriptions differ.
   With desc.memory_limit each owner has this limit. */
DT_API int dt_ps_table(dt_ps *ps, dt_table_desc desc);
/* [collective: comm] Adds a dense parameter of this shape and returns its table's number, from 0;
   -1 on failure. The parameter is cut into runs: pieces of DT_PS_RUN consecutive elements, the last
   one padded; run k is the row of key k (desc.width is ignored). All runs are pulled and pushed
   together, without their keys. Initial values are those of dt_param(ctx, desc.name, shape,
   desc.init). DT_ERR_ARG: the ranks' shapes differ; desc has admission, ttl or threshold. */
DT_API int dt_ps_dense(dt_ps *ps, dt_table_desc desc, dt_shape shape);
/* [local] Returns 1 if this rank is a server, which must call dt_ps_serve; else 0. */
DT_API int dt_ps_is_server(const dt_ps *ps);
/* [server] Serves until all workers have called dt_ps_end. */
DT_API dt_status dt_ps_serve(dt_ps *ps);
/* [worker; owned mode: collective: comm] Starts a pull: rows (n,width) of the table's type receives
   the rows of `keys`, which may repeat. Keys are read before the function returns; rows are valid
   after dt_ps_wait. At most desc.credits pulls may be under way (DT_ERR_ARG). In owned mode the
   pull is complete when the function returns. NULL on failure. */
DT_API dt_ps_pull *dt_ps_pull_start(
    dt_ps *ps, int table, const uint64_t *keys, size_t n, void *rows);
/* [worker] Waits until the pull is complete and frees the handle; NULL is allowed. Call it exactly
   once for each pull. Returns dt_error(ctx). */
DT_API dt_status dt_ps_wait(dt_ps *ps, dt_ps_pull *pull);
/* [worker] Prefetch: starts to pull the rows of n keys for the step after the next dt_ps_step,
   while this step computes. For a dense table keys is NULL and n 0. The pull of that step with the
   same keys in the same order takes them without a round trip, and with the same bits. Does nothing
   without servers, with DT_PS_GEO, or if desc.credits prefetches are under way. */
DT_API dt_status dt_ps_prefetch(dt_ps *ps, int table, const uint64_t *keys, size_t n);
/* [worker; owned mode: collective: comm] Embedding lookup, an op on the tape: keys of shape (..)
   give a tensor (..,width) of the table's type. The backward adds the gradient of each key, row by
   row, to the sum that the next dt_ps_step pushes. Like a parameter's, a micro-batch's gradient is
   complete before it is added to that of the micro-batches before it (dt_micro). CPU tensors only:
   DT_ERR_UNSUPPORTED with a CUDA kernel table. */
DT_API dt_tensor *dt_ps_embedding(dt_ps *ps, int table, const uint64_t *keys, dt_shape shape);
/* [worker; owned mode: collective: comm] Reads a dense parameter, an op on the tape: a tensor of
   the shape of dt_ps_dense and of the table's type. The backward adds its gradient to the sum that
   the next dt_ps_step pushes. The first call in a step pulls the parameter; later ones, for example
   in other micro-batches, read the same values. CPU tensors only, as dt_ps_embedding. */
DT_API dt_tensor *dt_ps_dense_read(dt_ps *ps, int table);
/* [worker; owned mode: collective: comm] Adds gradients (n,width), f32 or for an f64 table f64, to
   the sums of the next dt_ps_step, as the backward of dt_ps_embedding does. */
DT_API dt_status dt_ps_add(dt_ps *ps, int table, const uint64_t *keys, size_t n, const void *grads);
/* [worker; owned mode: collective: comm] Ends the worker's step: pushes the sums of all tables and
   advances the worker's clock. In served mode it returns before the servers have applied the step,
   but after they have applied the one before. lr must be the same on all workers with DT_PS_SYNC.
   A sum that is not finite fails before anything is sent: DT_ERR_NUMERIC names worker and key. */
DT_API dt_status dt_ps_step(dt_ps *ps, double lr);
/* [worker] Ends this worker's part in the run. The other workers no longer wait for its clock. */
DT_API dt_status dt_ps_end(dt_ps *ps);

typedef struct dt_ps_stats {
    int64_t clock; /* a worker's number of steps */
    /* a worker's distinct keys, summed over pulls and steps; payload bytes of requests and answers,
       and in owned mode those that this rank exchanges with itself */
    int64_t pulled, pushed, bytes;
    /* staleness[i]: answers that were i clocks stale when sent: the clock of the pull minus the
       slowest worker's number of steps, which it includes. The last entry counts larger values */
    int64_t staleness[DT_PS_HISTOGRAM];
    int64_t held; /* a server's pulls that had to wait for the slowest worker */
} dt_ps_stats;
/* [local] Returns the counts of this rank; zeros for NULL. */
DT_API dt_ps_stats dt_ps_info(const dt_ps *ps);
/* [local] Returns this rank's part of a table, for dt_table_info and dt_table_shrink, or NULL. */
DT_API dt_table *dt_ps_owned(const dt_ps *ps, int table);

/* Density rule: a dense parameter with all-reduce, or a sparse table on a parameter server? A step
   of N workers, each of which reads u of the R rows of w numbers, moves for each worker

       all-reduce          2 G w R (N-1)/N                 ZeRO-0: what the worker sends
       parameter server    u (8 + P w) + u (8 + G w)       pull: keys, rows; push: keys, sums

   with P and G bytes for each number of a row and of its gradient, without headers, counts and
   padding. Both count each byte on the network once, with servers on machines of their own. In f32
   the server moves less if u/R < (N-1)/N w/(w+2). Sources: Thakur, Rabenseifner and Gropp, IJHPCA
   19 (2005), for all-reduce; Kim et al., "Parallax", EuroSys 2019, for the choice by density. */
typedef struct dt_ps_formula_desc {
    double rows;          /* R */
    double keys;          /* u: distinct keys of one worker in a step */
    int width;            /* w */
    int workers;          /* N; 0 means 1 */
    double values, grads; /* P and G; f32: 4, 4; bf16: 2, 4; f64: 8, 8. Both 0 mean 4 and 4 */
} dt_ps_formula_desc;
typedef struct dt_ps_bytes {
    double all_reduce, server;
    int use_server; /* 1 if the server moves fewer bytes */
} dt_ps_bytes;
/* [local] Returns the bytes by the formulas above. If an argument is negative, they are NaN and
   use_server is 0. */
DT_API dt_ps_bytes dt_ps_formula(dt_ps_formula_desc desc);

/* Snapshots of a parameter server: DIR/step-CLOCK holds a file for each table of each owner, under
   the commit protocol of checkpoints: the parts of all owners are there, or none. CLOCK is the
   workers' number of steps. A base has all rows; a delta has what changed since the snapshot before
   it. All ranks must see the folder `dir`, which is locked as in section 3. */
typedef struct dt_ps_save_desc {
    int delta; /* 0: saves a base; 1: a delta to the last snapshot saved to or loaded from `dir` */
    int keep;  /* number of newest bases to keep, with their deltas, when a base is saved; 0: all */
} dt_ps_save_desc;
/* [collective: the workers that have not called dt_ps_end] Saves a snapshot between dt_ps_step and
   the next gradients, at the same clock on all workers, with equal arguments. Returns when the
   snapshot is durable. Servers take part in dt_ps_serve. On failure every rank fails: DT_ERR_IO if
   a file operation failed, if another process saves to `dir` or if `dir` has a newer snapshot than
   this job has saved or loaded; earlier snapshots are untouched. DT_ERR_ARG: a delta without a
   snapshot before it; gradients that are not pushed; other arguments on another worker; or another
   worker steps on instead. With DT_PS_GEO the workers first send what they have changed. Only rows
   are saved then: after a load the replicas' optimizers begin anew, so the bits differ. */
DT_API dt_status dt_ps_save(dt_ps *ps, const char *dir, dt_ps_save_desc desc);
/* [collective: comm] Loads the newest intact snapshot and the chain that it needs, after the calls
   of dt_ps_table and before the first step; servers call it before dt_ps_serve. The numbers of
   servers and workers may differ from those that saved: then each owner reads the files of all
   owners. Workers go on from the returned clock, and a synchronous run has the bits of one that was
   not interrupted. Returns 0 if `dir` has no snapshot. Returns -1 if no snapshot is intact, or on
   failure: DT_ERR_ARG for other tables, DT_ERR_IO. */
DT_API int64_t dt_ps_load(dt_ps *ps, const char *dir);

/* [local] Set the call site of the next operation and return the argument. Call sites: section 4 of
   dt_tensor.h. */
DT_API dt_zero *dt_zero_here(dt_zero *zero, const char *file, int line);
DT_API dt_checkpoint *dt_checkpoint_here(dt_checkpoint *checkpoint, const char *file, int line);
DT_API dt_ps *dt_ps_here(dt_ps *ps, const char *file, int line);
#define dt_zero_make(ctx, ...) dt_zero_make(dt_ctx_here(ctx, DT_SITE), __VA_ARGS__)
#define dt_zero_step(zero, ...) dt_zero_step(dt_zero_here(zero, DT_SITE), __VA_ARGS__)
#define dt_zero_step_groups(zero, ...) dt_zero_step_groups(dt_zero_here(zero, DT_SITE), __VA_ARGS__)
#define dt_zero_state(zero, ...) dt_zero_state(dt_zero_here(zero, DT_SITE), __VA_ARGS__)
#define dt_zero_grad(zero, ...) dt_zero_grad(dt_zero_here(zero, DT_SITE), __VA_ARGS__)
#define dt_zero_grad_full(zero, ...) dt_zero_grad_full(dt_zero_here(zero, DT_SITE), __VA_ARGS__)
#define dt_zero_freeze(zero, ...) dt_zero_freeze(dt_zero_here(zero, DT_SITE), __VA_ARGS__)
#define dt_zero_swap_ema(zero) dt_zero_swap_ema(dt_zero_here(zero, DT_SITE))
#define dt_zero_export(zero, ...) dt_zero_export(dt_zero_here(zero, DT_SITE), __VA_ARGS__)
#define dt_checkpoint_open(zero, ...) dt_checkpoint_open(dt_zero_here(zero, DT_SITE), __VA_ARGS__)
#define dt_checkpoint_poll(c) dt_checkpoint_poll(dt_checkpoint_here(c, DT_SITE))
#define dt_checkpoint_close(c) dt_checkpoint_close(dt_checkpoint_here(c, DT_SITE))
#define dt_checkpoint_save(c) dt_checkpoint_save(dt_checkpoint_here(c, DT_SITE))
#define dt_checkpoint_load(c, ...) dt_checkpoint_load(dt_checkpoint_here(c, DT_SITE), __VA_ARGS__)
#define dt_ps_make(ctx, ...) dt_ps_make(dt_ctx_here(ctx, DT_SITE), __VA_ARGS__)
#define dt_ps_table(ps, ...) dt_ps_table(dt_ps_here(ps, DT_SITE), __VA_ARGS__)
#define dt_ps_dense(ps, ...) dt_ps_dense(dt_ps_here(ps, DT_SITE), __VA_ARGS__)
#define dt_ps_dense_read(ps, ...) dt_ps_dense_read(dt_ps_here(ps, DT_SITE), __VA_ARGS__)
#define dt_ps_serve(ps) dt_ps_serve(dt_ps_here(ps, DT_SITE))
#define dt_ps_pull_start(ps, ...) dt_ps_pull_start(dt_ps_here(ps, DT_SITE), __VA_ARGS__)
#define dt_ps_wait(ps, ...) dt_ps_wait(dt_ps_here(ps, DT_SITE), __VA_ARGS__)
#define dt_ps_embedding(ps, ...) dt_ps_embedding(dt_ps_here(ps, DT_SITE), __VA_ARGS__)
#define dt_ps_prefetch(ps, ...) dt_ps_prefetch(dt_ps_here(ps, DT_SITE), __VA_ARGS__)
#define dt_ps_add(ps, ...) dt_ps_add(dt_ps_here(ps, DT_SITE), __VA_ARGS__)
#define dt_ps_step(ps, ...) dt_ps_step(dt_ps_here(ps, DT_SITE), __VA_ARGS__)
#define dt_ps_end(ps) dt_ps_end(dt_ps_here(ps, DT_SITE))
#define dt_ps_save(ps, ...) dt_ps_save(dt_ps_here(ps, DT_SITE), __VA_ARGS__)
#define dt_ps_load(ps, ...) dt_ps_load(dt_ps_here(ps, DT_SITE), __VA_ARGS__)

#ifdef __cplusplus
}
#endif
#endif /* DT_ZERO_H */

#if defined(DT_IMPLEMENTATION) && !defined(DT_ZERO_IMPL)
#define DT_ZERO_IMPL

#include "dt_parallel.h"

DT__CPP_WARNINGS_OFF

#include <float.h>
#include <limits.h>
#include <sys/resource.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

DT__COLD_BEGIN

#ifdef __cplusplus
extern "C" {
#endif

// ==== 6. Implementation: learning rate ==========================================================

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

// ==== 7. Buckets, groups and shards =============================================================

/* Files and the I/O thread (section 14). One operation on a file: `file` and `to` are indices of
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
    DT__EMA,
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
   their data group is dp x cp. With expert folding (dt_mesh_desc.expert_tp) the data group of dense
   parameters is dp x cp, and that of experts is dt_mesh.expert_data, which may have ranks of tp. */
typedef struct dt__zero_groups {
    dt_comm *data, *shard, *replicas;
} dt__zero_groups;
enum { DT__DENSE = 0, DT__EXPERTS, DT__KINDS };
enum {
    DT__COMPARE_TP = DT__KINDS,
    DT__COMPARE_PP,
    DT__COMPARE_COPIES,
    DT__COMPARE_TIED
}; /* for section 8 */

/* A parameter group. */
typedef struct dt__param_group {
    dt_param_group desc; /* with defaults filled in; desc.params is a copy, or NULL of group 0 */
    int states;          /* number of state arrays, except of parameters that Muon updates */
    int64_t step;        /* steps that the group has taken */
    int trained;         /* parameters of all ranks that are not frozen (dt_zero_freeze) */
    double lr;           /* of the current step, with desc.lr_scale */
    int steps_now;       /* 1 if the group takes part in the current step */
} dt__param_group;

/* A bucket with its training state. */
typedef struct dt__zero_bucket {
    dt_bucket bucket; /* the first member, so a listener may cast a dt_bucket to this struct */
    dt_comm *data_group, *shard_group, *replica_group;
    /* tied embeddings: pipeline stages that share the parameters, or NULL */
    dt_comm *tied_group;
    dt__param_group *group; /* the parameter group of all its parameters */
    int states;             /* number of state arrays */
    int disk_slot;          /* NVMe offload: the slot of the file that holds its arrays */
    size_t offset, count;   /* the shard that this rank reduces and updates */
    void *state[2];         /* optimizer state: (count) each, of the gradient's type */
    /* Master weights: (count) f32 copy of bf16 or f16 parameters; NULL for other types */
    void *master;
    void *ema;     /* EMA of the weights: (count), of the gradient's type, or NULL */
    dt_work *work; /* pending collective: a reduction, or an all-gather after the update */
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

/* How and when ranks sum a gradient (section 9). */
typedef struct dt__grad_sum {
    /* starts to sum a bucket's gradient, (padded) elements, over ranks */
    dt_status (*reduce)(dt_zero *zero, dt__zero_bucket *z, void *full);
    /* adds the reduced gradient of a micro-batch to the step's sum */
    dt_status (*add)(dt_zero *zero, dt__zero_bucket *z);
    int each_micro;  /* 1: reduces each micro-batch's gradient; 0: their sum, once a step */
    int replicas;    /* 1: the sum over replicas is a second reduction, once a step */
    int max_pending; /* reductions that may be pending at the same time */
} dt__grad_sum;

/* A row of the ZeRO table. 1: each rank of a shard group keeps one shard; 0: each rank keeps all */
typedef struct dt__zero_stage {
    const dt__grad_sum *sum;
    int shard_optim, shard_grads, shard_params;
} dt__zero_stage;

/* One all-gather of the previous micro-batch: which bucket was gathered, and in which block. The
   next micro-batch prefetches in the same order. */
typedef struct dt__gather_entry {
    int bucket, block;
} dt__gather_entry;
typedef struct dt__gather_plan {
    dt__gather_entry *items;
    int n, capacity, position;
} dt__gather_plan;

/* A first element of the gradients that is not finite, or whose square is not finite. */
typedef struct dt__bad_grad {
    int rank;              /* world rank; -1 if only the sum of all squares overflows */
    int param;             /* index of the parameter */
    double element, value; /* element: its index in the parameter's local slice on rank `rank` */
    /* own: 1 if it is in the rank's own gradient, before any sum over ranks; n_ranks: number of
       ranks of which this is known */
    int own, n_ranks;
    int micro;      /* own: the micro-batch, -1 if the gradient is a sum over micro-batches */
    int loss_micro; /* the first micro-batch whose loss is not finite on the rank; else -1 */
} dt__bad_grad;

typedef struct dt__muon dt__muon;

struct dt_zero {
    dt_ctx *ctx;
    dt_zero_desc desc;
    dt_mesh mesh;
    dt__zero_groups groups[DT__KINDS];
    dt_listener listener;
    const dt__zero_stage *stage; /* row of dt__zero_stages */
    const dt__grad_sum *sum;     /* from the row, or the tree */
    dt__zero_bucket *buckets;    /* (n_buckets) the context's buckets */
    int n_buckets;
    int next_bucket; /* the bucket whose reduction starts next; -1 between two backwards */
    dt__param_group param_groups[1 + DT_MAX_GROUPS];
    int n_param_groups;
    const dt_kernels *update_kernels; /* kernels of the update */
    void *update_stream;
    dt__gather_plan *gather_plans;  /* (n_stages, DT__GATHER_PLANS) of each pipeline stage */
    int n_stages;                   /* this rank's last pipeline stage + 1 */
    dt__gather_phase current_phase; /* says which plan is in use */
    /* 16-bit gradients: (wide_count) f32 values of a piece of them, for the update */
    void *wide_grads;
    size_t wide_count;
    void *leaves; /* tree: (ranks, piece) each rank's gradient of this rank's piece */
    size_t leaves_bytes;
    /* (n_sums) sums of squares, one for each DT_PIECE elements; sums of experts come last */
    double *sums;
    size_t n_sums, n_dense;
    double *bucket_sums;       /* (n_pipeline_buckets) each bucket's sum of squares */
    size_t n_pipeline_buckets; /* buckets of all pipeline stages */
    /* 1-bit Adam: the signs to send, then the received signs */
    void *messages;
    size_t messages_bytes;
    dt__muon *muon; /* NULL if no parameter group uses Muon */
    int64_t step;
    dt_outlier norms, losses; /* windows of the last gradient norms and losses */
    double loss;              /* of the next step, from dt_zero_loss; else NaN */
    int ema_swapped;          /* 1: the weights are in the EMA's arrays, and the EMA in theirs */
    int is_freed;             /* 1 after dt_zero_free: only this struct is left */
    /* the last step after which all replicas were equal, -1 before the first comparison; the next
       step after which they are compared */
    int64_t agreed_step, next_compare;
    /* 1: a trained parameter was written since the last comparison: on this rank, or, after the
       ranks have exchanged it for a comparison, on any rank */
    int written;
    /* the first element of this rank's own gradients in this step that is NaN or Inf; rank is -1 if
       all are finite, or if none was tested */
    dt__bad_grad own_bad;
    dt__disk *disk;            /* NVMe offload */
    dt__io_thread *io_thread;  /* NULL until offload or a background save needs it */
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

/* 1-bit Adam (section 16). */
static int dt__onebit_frozen(const dt_zero *zero);
static dt_status dt__onebit_check(dt_ctx *ctx, const dt_zero_desc *d);
static dt_status dt__onebit_make(dt_zero *zero);
static void dt__onebit_free(dt_zero *zero);
static dt_status dt__onebit_square_sums(dt_zero *zero);
static int dt__onebit_at_fault(dt_zero *zero, const dt_bucket *bucket, size_t piece_index);
static dt_status dt__onebit_momentum(dt_zero *zero, dt__zero_bucket *z, double grad_scale);

/* Muon (section 17). */
static dt_status dt__muon_check(dt_ctx *ctx, const dt_zero_desc *d, const dt_param_group *g);
static dt_status dt__muon_make(dt_zero *zero);
static void dt__muon_free(dt_zero *zero);
static dt_status dt__muon_update(dt_zero *zero, double grad_scale);
static double dt__muon_scale(const dt_param_group *d, const dt_tensor *t);

/* Returns the type of the elements of an array (DT__STATE_0 to DT__GRAD) of a bucket. */
static dt_dtype dt__array_dtype(const dt_bucket *bucket, int array) {
    return array == DT__PARAMS ? bucket->dtype
           : array == DT__GRAD ? bucket->sum_dtype
                               : bucket->grad_dtype;
}

/* Returns the size in bytes of one element of the optimizer state. */
static size_t dt__zero_element_size(const dt__zero_bucket *z) {
    return dt_dtype_size(z->bucket.grad_dtype);
}

/* Return the address of an element of a state array, and of an array of gradients. */
static void *dt__zero_element(const dt__zero_bucket *z, void *array, size_t element) {
    return (char *)array + element * dt__zero_element_size(z);
}
static void *dt__grad_element(const dt__zero_bucket *z, void *array, size_t element) {
    return (char *)array + element * dt_dtype_size(z->bucket.sum_dtype);
}

/* dt__zero_param_shard and dt__zero_grad_shard return the address of this rank's shard of the
   parameters and of the gradient. The parameters must not be on disk. */
static void *dt__zero_param_shard(const dt__zero_bucket *z) {
    if (z->host_shard) return z->host_shard;
    return (char *)z->bucket.shard +
           (z->offset - z->bucket.shard_offset) * dt_dtype_size(z->bucket.dtype);
}
static void *dt__zero_grad_shard(const dt__zero_bucket *z) {
    return dt__grad_element(z, z->bucket.grad, z->offset - z->bucket.grad_offset);
}

static int dt__zero_has_master(const dt_bucket *bucket) {
    return bucket->dtype != bucket->grad_dtype && !bucket->frozen;
}

/* Returns 1 for a weight matrix, to which weight decay and Muon apply; 0 for a bias or a gain. */
static int dt__param_is_matrix(const dt_param_info *p) {
    return p->full.nd >= 2 && !p->desc.no_decay;
}

/* Returns 1 if a bucket takes part in the current step. */
static int dt__zero_steps_now(const dt__zero_bucket *z) {
    return !z->bucket.frozen && !z->bucket.paused && z->group->steps_now;
}

/* Returns 1 if a bucket has an array (DT__STATE_0 to DT__PARAMS) with values. */
static int dt__zero_has_array(const dt_zero *zero, const dt_bucket *bucket, int array) {
    const dt__zero_bucket *z = (const dt__zero_bucket *)bucket;
    if (array == DT__PARAMS || bucket->frozen) return array == DT__PARAMS;
    if (array == DT__EMA) return z->group->step > 0 && zero->desc.ema_decay > 0;
    return array == DT__MASTER ? z->group->step > 0 && dt__zero_has_master(bucket)
                               : array < z->states;
}

/* Returns the coordinate of a world rank along pp. */
static int dt__zero_pp_rank(const dt_zero *zero, int rank) {
    return rank / (dt_comm_size(zero->mesh.world) / zero->mesh.sizes.pp);
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

/* Returns 1 if the experts of the mesh are sharded over a group. Without expert folding, expert_tp
   is tp, which shards dense parameters too. */
static int dt__shards_experts(const dt_zero *zero, const dt_comm *comm) {
    const dt_mesh *m = &zero->mesh;
    return comm && (comm == m->ep || (m->sizes.expert_tp && comm == m->expert_tp));
}

/* Returns 1 if a parameter's data group is that of experts. With expert folding, a group that
   shards experts may have no two ranks with replicas of a dense parameter; and an expert's last
   bias has only a gradient placement over expert_tp if ep is 1. */
static int dt__is_expert(const dt_zero *zero, const dt_param_desc *d) {
    for (int c = 0; c < 3; c++)
        if (dt__shards_experts(zero, d->shards[c].comm) ||
            dt__zero_has_replicas(zero, d->shards[c].comm))
            return 1;
    for (int k = 0; k < 2; k++)
        if (dt__shards_experts(zero, d->grad_placements[k].comm)) return 1;
    return 0;
}

static const dt__zero_groups *dt__bucket_groups(const dt_zero *zero, const dt_bucket *bucket) {
    return &zero->groups[dt__is_expert(zero, dt__bucket_desc(zero, bucket)) ? DT__EXPERTS
                                                                            : DT__DENSE];
}

/* Tied embeddings. Returns the group of pipeline stages that share this bucket's parameters, for
   example an embedding that is also the output head; NULL if the bucket is not tied. The stages'
   gradients are partial sums, which dt__grads_sum_tied adds. */
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
        int n = dt_comm_size(data[k]);
        if (k > 0 && data[k] == data[0]) { /* without ep both kinds have the same groups */
            *g = zero->groups[0];
            continue;
        }
        g->data = g->shard = data[k];
        while (n % wanted != 0 || wanted > n) wanted--;
        if (!zero->stage->shard_optim || wanted == n || !zero->desc.shard_group) continue;
        g->shard = wanted == 1 ? NULL : dt_comm_split_by(data[k], dt_color_block, &wanted, "shard");
        g->replicas = dt_comm_split_by(data[k], dt_color_cyclic, &wanted, "replicas");
        dt_comm_set_axis(g->shard, DT_AXIS_DP);
        dt_comm_set_axis(g->replicas, DT_AXIS_DP);
    }
    /* from now on ops know over which groups the gradient of a parameter is summed */
    for (int k = 0; k < DT__KINDS; k++)
        zero->ctx->data_groups[k] = (const dt_group *)zero->groups[k].data;
    zero->ctx->expert_groups[0] = (const dt_group *)zero->mesh.ep;
    zero->ctx->expert_groups[1] =
        zero->mesh.sizes.expert_tp ? (const dt_group *)zero->mesh.expert_tp : NULL;
    zero->ctx->has_training_state = 1;
    return dt_error(zero->ctx);
}

/* Dry runs and offload (section 15). */
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
static char *dt__array_memory(const dt__zero_bucket *z, int array);
static dt_status dt__array_access(
    dt_zero *zero, dt__zero_bucket *z, int array, int write, size_t at, void *host, size_t bytes);
static int dt__grads_on_disk(const dt_zero *zero);
static dt_status dt__grads_read_start(dt_zero *zero, dt__zero_bucket *z);
static dt_status dt__grads_write_start(dt_zero *zero, dt__zero_bucket *z);
static dt_status dt__grads_write_end(dt_zero *zero);
static dt_status dt__grads_copy_out(
    dt_zero *zero, dt__zero_bucket *z, size_t element, void *host, size_t count);

/* Sets which parts of a bucket this rank keeps. The padded size is a multiple of DT_PIECE times the
   number of ranks in the bucket's shard group, or with `tree` in its data group. */
static void dt__zero_on_shard(dt_bucket *bucket, void *user) {
    dt_zero *zero = (dt_zero *)user;
    const dt__zero_stage *stage = zero->stage;
    const dt__zero_groups *groups = dt__bucket_groups(zero, bucket);
    dt__zero_bucket *z = (dt__zero_bucket *)bucket;
    if (bucket->index == 0) zero->buckets = z;
    zero->n_buckets = dt_bucket_count(zero->ctx);
    z->data_group = groups->data;
    z->shard_group = groups->shard;
    z->replica_group = groups->replicas;
    const dt_param_info *first = dt_param_get(zero->ctx, bucket->first_param)->param;
    z->group = &zero->param_groups[first->group];
    z->states = first->by_matrix ? 1 : z->group->states; /* Muon: only the momentum */
    z->tied_group = bucket->frozen ? NULL : dt__tied_group(zero, bucket);
    if (z->tied_group) ((dt_group *)z->tied_group)->pipeline = 1; /* no axis of placements */
    size_t pad =
        (size_t)DT_PIECE * (size_t)dt_comm_size(zero->desc.tree ? groups->data : groups->shard);
    bucket->padded = (bucket->count + pad - 1) / pad * pad;
    z->count = bucket->padded / (size_t)(stage->shard_optim ? dt_comm_size(groups->shard) : 1);
    z->offset = stage->shard_optim ? (size_t)dt_comm_rank(groups->shard) * z->count : 0;
    bucket->shard_count = stage->shard_params ? z->count : bucket->padded;
    bucket->shard_offset = stage->shard_params ? z->offset : 0;
    bucket->grad_count = stage->shard_grads ? z->count : bucket->padded;
    bucket->grad_offset = stage->shard_grads ? z->offset : 0;
    bucket->reduce_each_micro = zero->sum->each_micro;
    if (dt__narrow(bucket->dtype) && bucket->dtype == zero->desc.grad_dtype)
        bucket->sum_dtype = bucket->dtype;
    /* tied gradients stay in memory, because another pipeline stage adds to them later */
    bucket->grad_offloaded = dt__grads_on_disk(zero) && !bucket->frozen && !z->tied_group;
    bucket->grad_borrows = !stage->shard_params && !z->tied_group; /* ends in dt__zero_on_forward */
}

/* Allocates the optimizer state of a bucket. */
static dt_status dt__zero_bucket_make(dt_zero *zero, dt__zero_bucket *z) {
    dt_ctx *ctx = zero->ctx;
    dt_mem mem = dt__in_host(zero->desc.offload_optim) ? DT_MEM_HOST : DT_MEM_OPTIM;
    size_t bytes = dt__on_disk(zero->desc.offload_optim) ? 0 : z->count * dt__zero_element_size(z);
    for (int s = 0; s < z->states && !z->bucket.frozen && bytes; s++) {
        z->state[s] = dt_alloc(ctx, mem, bytes, "optimizer state");
        if (!z->state[s]) return dt_error(ctx);
        if (mem == DT_MEM_HOST)
            memset(z->state[s], 0, bytes);
        else if (dt__fill(ctx, z->bucket.grad_dtype, z->state[s], z->count, 0) != DT_OK)
            return dt_error(ctx);
    }
    if (dt__zero_has_master(&z->bucket) && bytes)
        z->master = dt_alloc(ctx, mem, bytes, "master parameters");
    if (zero->desc.ema_decay > 0 && !z->bucket.frozen && bytes)
        z->ema = dt_alloc(ctx, mem, bytes, "EMA of the weights");
    return dt_error(ctx);
}

static size_t dt__max_over_ranks(dt_zero *zero, dt_comm *comm, size_t mine);

/* Sets each bucket's pipeline_index: numbers the buckets of all pipeline stages, by stage, then by
   order of registration. */
static dt_status dt__pipeline_indices(dt_zero *zero) {
    dt_comm *pp = zero->mesh.pp;
    size_t stages = dt__max_over_ranks(zero, pp, (size_t)zero->n_stages);
    if (stages == 0) return dt_error(zero->ctx);
    double *buckets = (double *)dt_alloc(
        zero->ctx, DT_MEM_HOST, stages * sizeof *buckets, "buckets of each stage");
    if (!buckets) return dt_error(zero->ctx);
    memset(buckets, 0, stages * sizeof *buckets);
    for (int u = 0; u < zero->n_buckets; u++)
        zero->buckets[u].pipeline_index = (size_t)buckets[zero->buckets[u].bucket.stage]++;
    dt_sum_doubles(pp, buckets, stages);
    for (size_t s = 0, first = 0; s < stages && dt_error(zero->ctx) == DT_OK; s++) {
        for (int u = 0; u < zero->n_buckets; u++)
            if ((size_t)zero->buckets[u].bucket.stage == s)
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
            if (dt__is_expert(zero, dt__bucket_desc(zero, &z->bucket)) != kind) continue;
            z->sums_at = zero->n_sums;
            zero->n_sums += z->bucket.padded / DT_PIECE;
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

/* Allocates zero->wide_grads where the update runs, if a bucket has 16-bit gradients. */
static dt_status dt__wide_grads_make(dt_zero *zero) {
    size_t longest = 0, most = zero->chunks ? zero->chunk_elements : (size_t)1 << 22;
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        if (z->bucket.sum_dtype != z->bucket.grad_dtype && !z->bucket.frozen && z->count > longest)
            longest = z->count;
    }
    if (zero->desc.grad_dtype != DT_F32 &&
        dt__max_over_ranks(zero, zero->mesh.world, longest) == 0 && dt_error(zero->ctx) == DT_OK)
        return dt_fail(zero->ctx, DT_ERR_ARG,
            "dt_zero_make: .grad_dtype %s, but no trained parameter has this type: use 0",
            dt_dtype_name(zero->desc.grad_dtype));
    zero->wide_count = longest < most ? longest : most;
    if (zero->wide_count > 0)
        zero->wide_grads = dt_alloc(zero->ctx, zero->chunks ? DT_MEM_HOST : DT_MEM_TEMP,
            zero->wide_count * sizeof(float), "16-bit gradients");
    return dt_error(zero->ctx);
}

static dt_status dt__zero_buckets_make(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    if (!zero->disk && dt__disk_open(zero) != DT_OK) return dt_error(ctx);
    for (int u = 0; u < zero->n_buckets; u++)
        if (dt__zero_bucket_make(zero, &zero->buckets[u]) != DT_OK) return dt_error(ctx);
    return dt__norm_sums_make(zero) == DT_OK && dt__chunks_make(zero) == DT_OK
               ? dt__wide_grads_make(zero)
               : dt_error(ctx);
}

/* Fails if a parameter is sharded over data-parallel ranks along an axis other than ep (and with
   expert folding expert_tp), or if it has a gradient placement over data-parallel ranks, which
   would sum the gradient twice. */
static dt_status dt__zero_check_params(dt_zero *zero) {
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        const dt_param_desc *d = &t->param->desc;
        for (int c = 0; c < 3; c++)
            if (!dt__shards_experts(zero, d->shards[c].comm) &&
                dt__zero_has_replicas(zero, d->shards[c].comm))
                return dt_fail(zero->ctx, DT_ERR_UNSUPPORTED,
                    "dt_zero_make: %s is sharded over '%s', whose ranks are data "
                    "parallel: only ep of the mesh can shard there; is .mesh the mesh that made "
                    "the "
                    "group?",
                    t->name, dt_comm_name(d->shards[c].comm));
        for (int k = 0; k < 2; k++)
            if (!dt__shards_experts(zero, d->grad_placements[k].comm) &&
                dt__zero_has_replicas(zero, d->grad_placements[k].comm))
                return dt_fail(zero->ctx, DT_ERR_UNSUPPORTED,
                    "dt_zero_make: %s has a gradient placement over '%s', along which "
                    "gradients are summed already",
                    t->name, dt_comm_name(d->grad_placements[k].comm));
    }
    return DT_OK;
}

// ==== 8. Comparing ranks ========================================================================

/* Ranks compare:

       (1) at dt_zero_make        the optimizer and the parameters' descriptions
       (2) before the first step, after steps, before saving, after loading
                                  digests of values and optimizer state
       (3) in each step           learning rate, step number, loss scale. If any rank wrote a
                                  parameter, also (2), before the update overwrites the
                                  difference: the all-gather does so at ZeRO-1 and ZeRO-2, a master
                                  weight at stage 0

   A digest is 8 bytes; on a difference the error names the tensor, two ranks and the last step at
   which they agreed. (2) is about replicas, which several ranks hold and each updates itself:

       parameters         over the data group; at stage 3 over the replicas of the shard (HSDP)
       optimizer state    over the data group at stage 0; else over the replicas of the shard
       both               over tp, if the parameter is not sharded there; over the ranks that hold
                          copies of a shard (key and value heads); over the pipeline stages that
                          share the parameter (tied embeddings)

   All copies have equal bits, because every rank applies the same update to the same gradient. If
   this breaks, the ranks go on to train different models, and checkpoints hold the copy of one
   rank. dt__drift_causes lists the causes. */

static dt__text dt__optimizer_describe(const dt_zero *zero) {
    const dt_zero_desc *z = &zero->desc;
    const dt_scale_desc *c = &z->scale;
    double more[] = { c->init, c->growth, c->backoff, (double)c->interval, (double)c->hysteresis,
        c->min_scale, (double)z->keep_gathered, (double)z->no_overlap, (double)z->states,
        (double)z->compare_every, (double)dt__zero_offloads(zero),
        (double)(dt__on_disk(z->offload_params) || dt__in_host(z->offload_params)), z->ema_decay,
        z->skip_norm_z, z->skip_loss_z, (double)z->grad_dtype };
    uint64_t others = dt__digest(1, more, sizeof more) & 0xffffff; /* digest of `more` */
    dt__text text = dt__format(
        "optimizer %d of stage %d/%d%s, scale %g, betas %g %g, eps %g, momentum %g, "
        "decay %g, clip %g, freeze %d, others #%06x",
        z->optimizer, z->stage, z->shard_group, z->tree ? ", tree" : "", z->loss_scale, z->beta1,
        z->beta2, z->eps, z->momentum, z->weight_decay, z->clip, z->freeze_steps, (unsigned)others);
    if (z->optimizer == DT_MUON)
        dt__put(&text, ", Muon's scale %d%s", z->muon_scale, z->no_nesterov ? ", no Nesterov" : "");
    if (z->group_count > 0) dt__put(&text, ", %d parameter groups", z->group_count);
    return text;
}

static dt__text dt__group_describe(const dt__param_group *group) {
    const dt_param_group *g = &group->desc;
    dt__text text =
        dt__format("the parameter group '%.200s': optimizer %d, betas %g %g, eps %g, momentum "
                   "%g, decay %g, lr_scale %g, %d states",
            g->params, g->optimizer, g->beta1, g->beta2, g->eps, g->momentum, g->weight_decay,
            g->lr_scale, group->states);
    if (g->optimizer == DT_MUON)
        dt__put(&text, ", Muon's scale %d%s", g->muon_scale, g->no_nesterov ? ", no Nesterov" : "");
    return text;
}

/* Describes an item, that is, something that ranks must have in common: item 0 is the optimizer,
   the next items are the parameter groups 1, 2, .., then come the parameters. If with_rank is set,
   the text also says which shard this rank holds. */
static dt__text dt__item_describe(const dt_zero *zero, int item, int with_rank) {
    static const char *const inits[] = { "zeros", "ones", "normal", "uniform" };
    const dt_tensor *t = dt_param_get(zero->ctx, item - zero->n_param_groups);
    if (item == 0) return dt__optimizer_describe(zero);
    if (item < zero->n_param_groups) return dt__group_describe(&zero->param_groups[item]);
    if (!t) return dt__format("nothing");
    const dt_param_info *p = t->param;
    const dt_param_desc *d = &p->desc;
    dt__text text = dt__format("%.40s %s %.40s %s %.9g in bucket %d%s%s", t->name,
        dt_dtype_name(t->dtype), dt__shape_text(p->full).s,
        p->init.kind >= 0 && p->init.kind < 4 ? inits[p->init.kind] : "?", p->init.scale,
        p->bucket->index, d->frozen ? ", frozen" : "", d->no_decay ? ", no_decay" : "");
    if (d->lr_scale != 0) dt__put(&text, ", lr_scale %g", d->lr_scale);
    if (d->matrices) dt__put(&text, ", matrices %d", d->matrices);
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

/* Returns the digest of an item's description. Returns the constant 1 if the ranks need not have
   the item in common. `kind` says over which group the ranks are compared, and which items:

       DT__DENSE, DT__EXPERTS   over the data group of this kind: the parameters of this kind
                                (DT__DENSE: also the optimizer and the parameter groups)
       DT__COMPARE_TP           over tp: all items
       DT__COMPARE_PP           over pp: only the optimizer and the parameter groups */
static uint64_t dt__item_digest(const dt_zero *zero, int item, int kind) {
    const dt_tensor *t = dt_param_get(zero->ctx, item - zero->n_param_groups);
    if (kind < DT__KINDS && (t ? dt__is_expert(zero, &t->param->desc) : DT__DENSE) != kind)
        return 1;
    if (kind == DT__COMPARE_PP && item >= zero->n_param_groups) return 1;
    dt__text text = dt__item_describe(zero, item, kind < DT__KINDS);
    uint64_t h = dt__digest(1, text.s, strlen(text.s));
    return t ? dt__digest(h, t->name, strlen(t->name)) : h;
}

/* Returns the largest value of `mine` on the ranks of a group; 0 after a failure. */
static size_t dt__max_over_ranks(dt_zero *zero, dt_comm *comm, size_t mine) {
    size_t ranks = (size_t)dt_comm_size(comm), max = 0, bytes = ranks * sizeof(double);
    double own = (double)mine;
    double *all = (double *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "comparing ranks");
    if (all && dt__gather_numbers(comm, &own, all, 1, DT_F64) == DT_OK)
        for (size_t r = 0; r < ranks; r++) max = (size_t)all[r] > max ? (size_t)all[r] : max;
    dt_free(zero->ctx, DT_MEM_HOST, all, bytes);
    return max;
}

/* The first digest that differs between the ranks of a group: its index, the first rank of the
   group on which it is not that of rank 0, and the number of these ranks. */
typedef struct dt__difference {
    size_t index;
    int rank, n_ranks;
} dt__difference;

/* Compares n digests with those of the group's rank 0. Returns 1 if all are equal on all ranks;
   else sets *found. Rank 0 sends its digests as a sum of doubles (dt_sum_doubles) to which the
   other ranks add 0, because dt_comm_bytes does not count such a sum. A digest is sent as two
   halves of 32 bits, which doubles hold exactly. */
static int dt__ranks_agree(
    dt_zero *zero, dt_comm *comm, const uint64_t *digests, size_t n, dt__difference *found) {
    size_t ranks = (size_t)dt_comm_size(comm), bytes = (2 * n + ranks) * sizeof(double), first = 0;
    double *theirs = (double *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "comparing ranks");
    if (!theirs) return 0;
    double *all = theirs + 2 * n;
    memset(theirs, 0, bytes);
    for (size_t i = 0; i < n && dt_comm_rank(comm) == 0; i++) {
        theirs[2 * i] = (double)(digests[i] >> 32);
        theirs[2 * i + 1] = (double)(digests[i] & 0xffffffff);
    }
    *found = (dt__difference){ n, 0, 0 };
    if (dt_sum_doubles(comm, theirs, 2 * n) == DT_OK) {
        if (dt_comm_has_phantoms(comm)) first = n; /* phantom ranks differ in nothing */
        while (first < n && theirs[2 * first] == (double)(digests[first] >> 32) &&
               theirs[2 * first + 1] == (double)(digests[first] & 0xffffffff))
            first++;
        double own = (double)first;
        dt__gather_numbers(comm, &own, all, 1, DT_F64);
        for (size_t r = ranks; r > 0 && dt_error(zero->ctx) == DT_OK; r--) {
            size_t index = (size_t)all[r - 1];
            if (index < found->index) *found = (dt__difference){ index, 0, 0 };
            if (index < n && index == found->index)
                *found = (dt__difference){ index, (int)r - 1, found->n_ranks + 1 };
        }
    }
    dt_free(zero->ctx, DT_MEM_HOST, theirs, bytes);
    return dt_error(zero->ctx) == DT_OK && found->index == n;
}

/* Fails, because a rank of the group `comm` has another item than the group's rank 0. The two ranks
   send their descriptions to the others. */
static dt_status dt__items_fail(
    dt_zero *zero, dt_comm *comm, int with_rank, const dt__difference *found) {
    enum { TEXT_BYTES = sizeof(((dt__text *)NULL)->s) };
    double both[2 * TEXT_BYTES];
    char text[2 * TEXT_BYTES];
    dt__text mine = dt__item_describe(zero, (int)found->index, with_rank);
    int me = dt_comm_rank(comm);
    for (int i = 0; i < 2 * TEXT_BYTES; i++)
        both[i] = me == (i < TEXT_BYTES ? 0 : found->rank) && (size_t)i % TEXT_BYTES <= mine.used
                      ? mine.s[i % TEXT_BYTES]
                      : 0;
    if (dt_sum_doubles(comm, both, 2 * TEXT_BYTES) != DT_OK) return dt_error(zero->ctx);
    for (int i = 0; i < 2 * TEXT_BYTES; i++) text[i] = (char)both[i];
    return dt_fail(zero->ctx, DT_ERR_COMM,
        "dt_zero_make: rank %d has %s, where rank %d has %s: every rank registers the "
        "same parameters in the same order",
        dt_comm_world_rank(comm, found->rank), text + TEXT_BYTES, dt_comm_world_rank(comm, 0),
        text);
}

/* Compares the optimizer and the parameters' descriptions over a group. */
static dt_status dt__compare_items(dt_zero *zero, dt_comm *comm, int kind) {
    dt_ctx *ctx = zero->ctx;
    dt__difference found;
    if (dt_comm_size(comm) == 1) return DT_OK;
    size_t items = (size_t)(zero->n_param_groups + dt_param_count(ctx)),
           n = dt__max_over_ranks(zero, comm, items);
    uint64_t *digests =
        n ? (uint64_t *)dt_alloc(ctx, DT_MEM_HOST, n * sizeof *digests, "comparing ranks") : NULL;
    for (size_t i = 0; i < n && digests; i++) digests[i] = dt__item_digest(zero, (int)i, kind);
    if (digests && !dt__ranks_agree(zero, comm, digests, n, &found) && dt_error(ctx) == DT_OK)
        dt__items_fail(zero, comm, kind < DT__KINDS, &found);
    dt_free(ctx, DT_MEM_HOST, digests, n * sizeof *digests);
    return dt_error(ctx);
}

/* ---- replicas: values and optimizer state ---- */

/* Returns the digest of the elements [first, first + count) of a tensor; `data` holds these
   elements, in memory of the context's kernels, or of the host if `ctx` is NULL. Returns 0 after a
   failure. */
static uint64_t dt__elements_digest(
    dt_ctx *ctx, dt_dtype dtype, int64_t first, const void *data, int64_t count) {
    uint64_t parts[DT_DIGEST_PARTS] = { 0 }, sum = 0;
    dt_digest_args a = { dtype, parts, data, (size_t)count, (uint64_t)first,
        1 + (size_t)count / 4096 };
    if (a.parts > DT_DIGEST_PARTS) a.parts = DT_DIGEST_PARTS;
    if (!ctx)
        dt_kernels_cpu()->digest(&a, NULL);
    else if ((a.out = (uint64_t *)dt_scratch(ctx, a.parts * sizeof sum)) != NULL &&
             DT__KERNEL(ctx, "comparing ranks", digest, &a) == DT_OK)
        dt__move_now(ctx, parts, a.out, a.parts * sizeof sum);
    for (int p = 0; p < DT_DIGEST_PARTS; p++) sum += parts[p];
    return sum;
}

/* One comparison of all replicas. */
typedef struct dt__replica_check {
    dt_zero *zero;
    const char *what; /* the public call, for messages */
    /* (n) for each parameter its values, master weights, state 1 and state 0: digests of this
       rank's elements, 0 if not computed yet; `compared` are those of one group, with `indices` */
    uint64_t *digests, *compared, *indices;
    size_t n;
} dt__replica_check;
enum { DT__COPIED = DT__PARAMS + 1 }; /* arrays of a parameter that can have replicas */

static int dt__copied_array(size_t index) { return DT__PARAMS - (int)(index % DT__COPIED); }

static const char *dt__copied_name(const dt__param_group *group, int by_matrix, int array) {
    int optimizer = group->desc.optimizer,
        adam = optimizer != DT_SGD && optimizer != DT_OPTIMIZER_CUSTOM;
    if (array == DT__PARAMS) return "values";
    if (array == DT__MASTER) return "master weights";
    if (array == DT__EMA) return "EMA";
    if (optimizer == DT_SGD || by_matrix) return "momentum";
    if (array == DT__STATE_0) return adam ? "first moments" : "state 0";
    return adam ? "second moments" : "state 1";
}

/* Returns the digest of an array of a parameter, of the elements that this rank holds; 1 if there
   are none. A dry run only requests the same memory: its arrays have no values, and its kernels do
   nothing. */
static uint64_t dt__array_digest(dt_zero *zero, const dt_tensor *t, int array) {
    enum { CHUNK = 1 << 18 };
    const dt_param_info *p = t->param;
    const dt_bucket *bucket = p->bucket;
    dt__zero_bucket *z = &zero->buckets[bucket->index];
    int params = array == DT__PARAMS;
    dt_dtype dtype = dt__array_dtype(bucket, array);
    size_t size = dt_dtype_size(dtype), shard = params ? bucket->shard_offset : z->offset,
           shard_end = shard + (params ? bucket->shard_count : z->count),
           begin = p->offset > shard ? p->offset : shard,
           end = p->offset + p->count < shard_end ? p->offset + p->count : shard_end;
    int dry = dt__is_dry_run(zero);
    if (!dt__zero_has_array(zero, bucket, array) || begin >= end) return 1;
    const char *here = dt__array_memory(z, array);
    dt_ctx *kernels =
        dry || (here && !dt__beyond_kernels(zero->mesh.world, here)) ? zero->ctx : NULL;
    char *copy = here ? NULL : (char *)dt_alloc(zero->ctx, DT_MEM_HOST, CHUNK, "comparing ranks");
    uint64_t h = 0;
    for (size_t at = begin, n; at < end && (here || copy); at += n) {
        size_t max = here ? end - at : CHUNK / size;
        n = end - at < max ? end - at : max;
        const char *data = here ? here + (at - shard) * size : copy;
        if (copy && !dry &&
            dt__array_access(zero, z, array, 0, (at - shard) * size, copy, n * size) != DT_OK)
            break;
        h += dt__elements_digest(kernels, dtype, (int64_t)(at - p->offset), data, (int64_t)n);
    }
    dt_free(zero->ctx, DT_MEM_HOST, copy, CHUNK);
    return h ? h : 1;
}

/* Returns the digest with an index of dt__replica_check.digests. */
static uint64_t dt__replica_digest(dt__replica_check *c, size_t index) {
    const dt_tensor *t = dt_param_get(c->zero->ctx, (int)(index / DT__COPIED));
    if (!c->digests[index])
        c->digests[index] = dt__array_digest(c->zero, t, dt__copied_array(index));
    return c->digests[index];
}

static int dt__is_along_tp(const dt_zero *zero, const dt_comm *comm) {
    int found = 0;
    for (int i = 0; comm && i < dt_comm_size(comm); i++)
        found |= dt_comm_world_rank(comm, i) % zero->mesh.sizes.tp != zero->mesh.coord.tp;
    return found;
}

static int dt__is_sharded_over_tp(const dt_zero *zero, const dt_param_desc *d) {
    int found = 0;
    for (int c = 0; c < 3; c++) found |= dt__is_along_tp(zero, d->shards[c].comm);
    return found;
}

/* Returns the group of ranks that hold copies of the same shard, as several ranks of tp hold the
   same key and value heads, and with expert folding all ranks of expert_tp hold the last bias of
   the same experts; NULL if every rank has a shard of its own. */
static dt_comm *dt__shard_copies(const dt_zero *zero, const dt_param_desc *d) {
    for (int k = 0; k < 2; k++) {
        dt_comm *comm = d->grad_placements[k].comm;
        if (dt__shards_experts(zero, comm) ||
            (dt__is_sharded_over_tp(zero, d) && dt__is_along_tp(zero, comm)))
            return comm;
    }
    return NULL;
}

/* Fails, because two world ranks hold different copies. n_ranks of the group's ranks differ from
   its rank 0. */
static dt_status dt__replicas_fail(dt__replica_check *c, size_t index, const dt_comm *comm,
    int first, int other, int n_ranks, const char *cause) {
    const dt_zero *zero = c->zero;
    const dt_tensor *t = dt_param_get(zero->ctx, (int)(index / DT__COPIED));
    const dt__param_group *group = &zero->param_groups[t->param->group];
    const char *name = t->name,
               *copied = dt__copied_name(group, t->param->by_matrix, dt__copied_array(index));
    if (zero->agreed_step < 0)
        return dt_fail(zero->ctx, DT_ERR_COMM,
            "%s: rank %d starts from %s of %s that differ from rank %d's: pass the same values to "
            "dt_write, or load the same weights, on every rank",
            c->what, other, copied, name, first);
    return dt_fail(zero->ctx, DT_ERR_COMM,
        "%s: %.80s: ranks %d and %d of '%s' hold different %s after step %lld%s (%d of %d ranks "
        "differ from the first); they agreed after step %lld. Possible causes: %s. %s",
        c->what, name, first, other, dt_comm_name(comm), copied, (long long)zero->step,
        zero->written ? " and a later write" : "", n_ranks, dt_comm_size(comm),
        (long long)zero->agreed_step, cause,
        zero->written ? "Call dt_write with the same values on every rank"
                      : "dt_zero_desc.compare_every = 1 finds the step");
}

/* Returns why replicas of a kind may differ. */
static const char *dt__drift_causes(int kind) {
    if (kind == DT__COMPARE_TIED)
        return "a gradient placement that is not DT_GRAD_PARTIAL over all stages that share it; a "
               "dt_write on one stage; unlike instruction sets";
    if (kind < DT__KINDS)
        return "a dt_write, setting or update of one rank only; unlike instruction sets or "
               "hardware; a memory error";
    return "a gradient that is partial over tp without DT_GRAD_PARTIAL; a parameter registered "
           "with its local shape instead of the full shape and .shards; other data, dropout keys "
           "or dt_write on one rank of tp; unlike instruction sets";
}

static dt_comm *dt__param_tied_group(const dt_zero *zero, int param) {
    const dt_tensor *t = dt_param_get(zero->ctx, param);
    return t->param->bucket->frozen ? NULL : dt__tied_group(zero, t->param->bucket);
}

/* Returns 1 if the ranks of a group hold replicas of a parameter. `kind` is as in dt__item_digest;
   DT__COMPARE_COPIES: copies of shards; DT__COMPARE_TIED: tied parameters. Folded experts are
   compared over their data group and expert_tp: ranks of tp may hold different shards of their
   state. */
static int dt__is_replica(const dt_zero *zero, int param, const dt_comm *comm, int kind) {
    const dt_param_desc *d = &dt_param_get(zero->ctx, param)->param->desc;
    int folded = zero->mesh.sizes.expert_tp && dt__is_expert(zero, d);
    if (kind == DT__COMPARE_TP) return !folded && !dt__is_sharded_over_tp(zero, d);
    if (kind == DT__COMPARE_COPIES) return dt__shard_copies(zero, d) == comm;
    if (kind == DT__COMPARE_TIED) return dt__param_tied_group(zero, param) == comm;
    return dt__is_expert(zero, d) == kind;
}

/* Compares over a group the arrays of the bit mask `arrays`, of the parameters that the group's
   ranks replicate. dt_zero_make has found these in the same order on all ranks of the group; tied
   parameters have other indices on each stage. */
static dt_status dt__compare_group(dt__replica_check *c, dt_comm *comm, int kind, int arrays) {
    dt_zero *zero = c->zero;
    dt__difference found;
    size_t n = 0;
    if (dt_comm_size(comm) == 1 || dt_error(zero->ctx) != DT_OK) return dt_error(zero->ctx);
    for (size_t i = 0; i < c->n; i++)
        if (arrays >> dt__copied_array(i) & 1 &&
            dt__is_replica(zero, (int)(i / DT__COPIED), comm, kind)) {
            c->indices[n] = i;
            c->compared[n++] = dt__replica_digest(c, i);
        }
    if (n == 0 || dt__ranks_agree(zero, comm, c->compared, n, &found) ||
        dt_error(zero->ctx) != DT_OK)
        return dt_error(zero->ctx);
    return dt__replicas_fail(c, (size_t)c->indices[found.index], comm, dt_comm_world_rank(comm, 0),
        dt_comm_world_rank(comm, found.rank), found.n_ranks, dt__drift_causes(kind));
}

/* Returns the group of ranks that hold the same array of the parameters of a kind; if the stage
   shards the array, the ranks that hold the same shard. */
static dt_comm *dt__replica_group(const dt_zero *zero, int kind, int sharded) {
    const dt__zero_groups *g = &zero->groups[kind];
    return sharded && dt_comm_size(g->shard) > 1 ? g->replicas : g->data;
}

/* ---- tied embeddings ---- */

/* Digests of a tied parameter, as doubles: of the ranks that share it, and of its description. */
typedef struct dt__tied_param {
    double group, description;
} dt__tied_param;

/* Returns the digest of a group's ranks as an odd number that a double holds exactly; 0 if there is
   no group. */
static double dt__group_digest(const dt_comm *comm) {
    uint64_t h = 1;
    for (int i = 0; comm && i < dt_comm_size(comm); i++) {
        int rank = dt_comm_world_rank(comm, i);
        h = dt__digest(h, &rank, sizeof rank);
    }
    return comm ? (double)(h >> 12 | 1) : 0;
}

static dt__tied_param dt__tied_param_of(const dt_zero *zero, int param) {
    const dt_tensor *t = dt_param_get(zero->ctx, param);
    const dt_param_info *p = t->param;
    double more[] = { (double)t->dtype, (double)p->count, p->desc.lr_scale,
        (double)(p->desc.no_decay != 0), (double)p->offset, (double)p->bucket->padded };
    uint64_t h = dt__digest(dt__digest(1, t->name, strlen(t->name)), more, sizeof more);
    return (
        dt__tied_param){ dt__group_digest(dt__param_tied_group(zero, param)), (double)(h >> 12) };
}

/* Tied parameters: iterates over the groups of stages that share parameters with this rank, in the
   order of the groups' digests, because stages may register two groups in opposite orders and would
   deadlock. Returns the group after the one with digest *digest, and sets *digest; NULL after the
   last group. Start with *digest = 0. */
static dt_comm *dt__next_tied_group(const dt_zero *zero, double *digest) {
    dt_comm *next = NULL;
    double smallest = 0;
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        dt_comm *tied = dt__param_tied_group(zero, i);
        double its = dt__group_digest(tied);
        if (its > *digest && (!next || its < smallest)) next = tied, smallest = its;
    }
    *digest = smallest;
    return next;
}

/* Fails unless this rank and rank r of pp have the same parameters of a group, in the same order.
   mine and theirs have an entry for each parameter of the rank; max_count is the most of a rank. */
static dt_status dt__tied_agree(dt_zero *zero, const dt_comm *tied, const dt__tied_param *mine,
    const dt__tied_param *theirs, size_t max_count, int r) {
    size_t n = (size_t)dt_param_count(zero->ctx), other = 0;
    double group = dt__group_digest(tied);
    for (size_t i = 0; i < n; i++) {
        if (mine[i].group != group) continue;
        while (other < max_count && theirs[other].group != group) other++;
        int found = other < max_count;
        if (!found || theirs[other].description != mine[i].description)
            return dt_fail(zero->ctx, DT_ERR_COMM,
                "dt_zero: %s is tied over '%s', where rank %d has %s: stages that share "
                "parameters register them under the same names, in the same order",
                dt_param_get(zero->ctx, (int)i)->name, dt_comm_name(tied),
                dt_comm_world_rank(zero->mesh.pp, r), found ? "another one" : "none");
        other++;
    }
    return DT_OK;
}

/* Compares the descriptions of tied parameters between pipeline stages. Their order must be the
   same on all stages, because each stage calls the sums of tied gradients in its own order of
   buckets. All ranks of pp exchange their descriptions, because a rank that lacks a parameter does
   not know its group. */
static dt_status dt__compare_tied(dt_zero *zero) {
    dt_comm *pp = zero->mesh.pp, *tied;
    size_t ranks = (size_t)dt_comm_size(pp), n = (size_t)dt_param_count(zero->ctx);
    if (ranks == 1) return DT_OK;
    size_t max_count = dt__max_over_ranks(zero, pp, n),
           bytes = ranks * max_count * sizeof(dt__tied_param);
    dt__tied_param *all =
        (dt__tied_param *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "comparing stages");
    if (!all) return dt_error(zero->ctx);
    memset(all, 0, bytes);
    dt__tied_param *mine = all + (size_t)dt_comm_rank(pp) * max_count;
    for (size_t i = 0; i < n; i++)
        if (dt__param_tied_group(zero, (int)i)) mine[i] = dt__tied_param_of(zero, (int)i);
    dt_sum_doubles(pp, (double *)all, bytes / sizeof(double));
    for (double digest = 0; (tied = dt__next_tied_group(zero, &digest)) != NULL;)
        for (size_t r = 0; r < ranks && dt_error(zero->ctx) == DT_OK; r++)
            if (dt__rank_in(tied->group, dt_comm_world_rank(pp, (int)r)) >= 0)
                dt__tied_agree(zero, tied, mine, all + r * max_count, max_count, (int)r);
    dt_free(zero->ctx, DT_MEM_HOST, all, bytes);
    return dt_error(zero->ctx);
}

/* Compares the values and the state of tied parameters over each group of stages that shares
   some. */
static void dt__compare_tied_replicas(dt__replica_check *c, int arrays) {
    dt_comm *tied;
    for (double digest = 0; (tied = dt__next_tied_group(c->zero, &digest)) != NULL;)
        dt__compare_group(c, tied, DT__COMPARE_TIED, arrays);
}

/* Returns a digest of the name of parameter i that a double holds; 0 if another pipeline stage may
   have the parameter too, because it is frozen, or tied over the stages. */
static double dt__stage_param_digest(const dt_zero *zero, int i) {
    const dt_tensor *t = dt_param_get(zero->ctx, i);
    if (!t || t->param->desc.frozen || dt__tied_group(zero, t->param->bucket)) return 0;
    return (double)(dt__digest(1, t->name, strlen(t->name)) >> 12 | 1);
}

/* Fails if two pipeline stages have registered the same parameter, which would then be trained
   apart in each of them. */
static dt_status dt__compare_stages(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    dt_comm *pp = zero->mesh.pp;
    int n = dt_param_count(ctx), me = dt_comm_rank(pp);
    size_t ranks = (size_t)dt_comm_size(pp);
    if (ranks == 1) return DT_OK;
    size_t max_count = dt__max_over_ranks(zero, pp, (size_t)n),
           bytes = ranks * max_count * sizeof(double);
    double *all = bytes ? (double *)dt__host_zeroed(ctx, bytes, "the stages") : NULL;
    if (!all) return dt_error(ctx);
    for (int i = 0; i < n; i++)
        all[(size_t)me * max_count + (size_t)i] = dt__stage_param_digest(zero, i);
    dt_sum_doubles(pp, all, ranks * max_count);
    for (size_t k = 0; k < ranks * max_count; k++)
        for (int i = 0; i < n && all[k] != 0 && k / max_count != (size_t)me; i++)
            if (all[k] == all[(size_t)me * max_count + (size_t)i])
                dt_fail(ctx, DT_ERR_COMM,
                    "dt_zero_make: pipeline ranks %d and %d both register %s: each stage registers "
                    "only its own parameters; one that several stages share needs the gradient "
                    "placement { group of these stages, DT_GRAD_PARTIAL }",
                    me, (int)(k / max_count), dt_param_get(ctx, i)->name);
    dt_free(ctx, DT_MEM_HOST, all, bytes);
    return dt_error(ctx);
}

/* Fails unless the ranks have the same optimizer, and replicas have the same description.
   dt_zero_make calls this function. */
static dt_status dt__compare_ranks(dt_zero *zero) {
    for (int kind = 0; kind <= DT__COMPARE_PP; kind++) {
        dt_comm *comm = kind == DT__COMPARE_TP   ? zero->mesh.tp
                        : kind == DT__COMPARE_PP ? zero->mesh.pp
                                                 : zero->groups[kind].data;
        if (dt__compare_items(zero, comm, kind) != DT_OK) return dt_error(zero->ctx);
    }
    return dt__compare_tied(zero);
}

/* Fails unless all replicas have equal values and equal optimizer state. */
static dt_status dt__compare_replicas(dt_zero *zero, const char *what) {
    enum { VALUES = 1 << DT__PARAMS, STATE = VALUES - 1 };
    dt_ctx *ctx = zero->ctx;
    if (dt_comm_size(zero->mesh.world) == 1) return dt_error(ctx);
    dt__sync(ctx); /* copies from the device to offloaded arrays may be in flight */
    dt__replica_check c = {
        .zero = zero, .what = what, .n = (size_t)dt_param_count(ctx) * DT__COPIED
    };
    size_t bytes = (3 * c.n + 1) * sizeof *c.digests; /* a stage may have no parameters */
    c.digests = (uint64_t *)dt_alloc(ctx, DT_MEM_HOST, bytes, "comparing ranks");
    if (!c.digests) return dt_error(ctx);
    memset(c.digests, 0, bytes);
    c.compared = c.digests + c.n;
    c.indices = c.compared + c.n;
    for (int kind = 0; kind < DT__KINDS; kind++) {
        dt_comm *values = dt__replica_group(zero, kind, zero->stage->shard_params),
                *state = dt__replica_group(zero, kind, zero->stage->shard_optim);
        if (kind > 0 && zero->groups[kind].data == zero->groups[0].data) continue;
        dt__compare_group(&c, values, kind, values == state ? VALUES | STATE : VALUES);
        if (values != state) dt__compare_group(&c, state, kind, STATE);
    }
    dt__compare_group(&c, zero->mesh.tp, DT__COMPARE_TP, VALUES | STATE);
    for (int i = 0; i < dt_param_count(ctx); i++) { /* each group of copies once */
        dt_comm *copies = dt__shard_copies(zero, &dt_param_get(ctx, i)->param->desc);
        int earlier = 0;
        for (int k = 0; k < i && copies; k++)
            earlier |= dt__shard_copies(zero, &dt_param_get(ctx, k)->param->desc) == copies;
        if (!earlier) dt__compare_group(&c, copies, DT__COMPARE_COPIES, VALUES | STATE);
    }
    dt__compare_tied_replicas(&c, VALUES | STATE);
    dt_free(ctx, DT_MEM_HOST, c.digests, bytes);
    if (dt_error(ctx) == DT_OK) zero->agreed_step = zero->step;
    zero->written = 0;
    return dt_error(ctx);
}

/* Compares replicas before a checkpoint or an export, because its file holds only one of the
   copies. All ranks learn of a write on any rank, so that their error texts agree. */
static dt_status dt__compare_before_save(dt_zero *zero, const char *what) {
    double written = zero->written;
    if (zero->desc.compare_every < 0 || dt_sum_doubles(zero->mesh.world, &written, 1) != DT_OK)
        return dt_error(zero->ctx);
    zero->written = written > 0;
    return dt__compare_replicas(zero, what);
}

/* Values that must be equal on all ranks in a step. */
typedef struct dt__step_common {
    double lr[1 + DT_MAX_GROUPS], group_step[1 + DT_MAX_GROUPS]; /* of each parameter group */
    double step, loss_scale, loss;                               /* loss: from dt_zero_loss */
} dt__step_common;

/* Returns the fields in which rank r differs from rank 0. */
static dt__text dt__step_common_text(
    const dt__step_common *its, const dt__step_common *first, int r) {
    int is_same_step = memcmp(&its->step, &first->step, sizeof its->step) == 0,
        is_same_lr = memcmp(its->lr, first->lr, sizeof its->lr) == 0, g = 0;
    dt__text text = is_same_step ? dt__format("step %.0f", its->step)
                                 : dt__format("rank %d takes step %.0f, rank 0 takes step %.0f", r,
                                       its->step, first->step);
    const char *separator = is_same_step ? ": " : "; ";
    if (!is_same_lr) {
        while (memcmp(&its->lr[g], &first->lr[g], sizeof *its->lr) == 0) g++;
        dt__put(&text, "%srank %d passes learning rate %.9g, rank 0 passes %.9g", separator, r,
            its->lr[g], first->lr[g]);
        if (g > 0) dt__put(&text, " for parameter group %d", g);
        separator = "; ";
    }
    for (g = 0; g <= DT_MAX_GROUPS && is_same_step; g++) {
        if (memcmp(&its->group_step[g], &first->group_step[g], sizeof *its->group_step) == 0)
            continue;
        dt__put(&text, "%sparameter group %d has taken %.0f steps on rank %d and %.0f on rank 0",
            separator, g, its->group_step[g], r, first->group_step[g]);
        separator = "; ";
    }
    if (memcmp(&its->loss_scale, &first->loss_scale, sizeof its->loss_scale) != 0)
        dt__put(&text, "%srank %d has loss scale %g, rank 0 has %g", separator, r, its->loss_scale,
            first->loss_scale);
    if (memcmp(&its->loss, &first->loss, sizeof its->loss) != 0)
        dt__put(&text, "%srank %d passes loss %.17g to dt_zero_loss, rank 0 passes %.17g",
            separator, r, its->loss, first->loss);
    dt__put(&text, is_same_lr ? "; check that all ranks run the same steps"
                              : "; pass the same learning rate on every rank");
    return text;
}

/* Fails, because the ranks do not agree on `mine`. */
static dt_status dt__step_common_fail(dt_zero *zero, const dt__step_common *mine) {
    enum { EACH = sizeof *mine / sizeof(double) };
    dt_comm *world = zero->mesh.world;
    int ranks = dt_comm_size(world), r = 1;
    size_t bytes = (size_t)ranks * sizeof *mine;
    dt__step_common *all =
        (dt__step_common *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "comparing ranks");
    if (!all) return dt_error(zero->ctx);
    memset(all, 0, bytes);
    all[dt_comm_rank(world)] = *mine;
    if (dt_sum_doubles(world, (double *)all, (size_t)ranks * EACH) == DT_OK) {
        while (r + 1 < ranks && memcmp(&all[r], &all[0], sizeof *all) == 0) r++;
        dt_fail(zero->ctx, DT_ERR_COMM, "dt_zero_step: %s",
            dt__step_common_text(&all[r], &all[0], r).s);
    }
    dt_free(zero->ctx, DT_MEM_HOST, all, bytes);
    return dt_error(zero->ctx);
}

/* Adds up *bad over all ranks, sets zero->written on all ranks if it is set on one, and fails
   unless all ranks take the same step with the same learning rates. One sum of doubles does all
   three. Let h be a digest of `bits` bits on this rank. All digests are equal to h if and only if
   the sum of (h_r - h)^2 over the ranks r is 0, which is sum h_r^2 - 2 h sum h_r + ranks * h^2. All
   terms are integers that doubles hold exactly. */
static dt_status dt__step_agree(dt_zero *zero, double *bad) {
    enum { DIGESTS = 2, WRITTEN = 1 + 2 * DIGESTS };
    dt_comm *world = zero->mesh.world;
    dt__step_common mine = { { 0 }, { 0 }, (double)(zero->step + 1), zero->loss_scale, zero->loss };
    for (int g = 0; g < zero->n_param_groups; g++) {
        mine.lr[g] = zero->param_groups[g].lr + 0.0;
        mine.group_step[g] = (double)zero->param_groups[g].step;
    }
    uint64_t digest = dt__digest(1, &mine, sizeof mine);
    int64_t ranks = dt_comm_size(world), h[DIGESTS];
    int bits = 20, equal = 1;
    double sums[WRITTEN + 1] = { *bad };
    sums[WRITTEN] = zero->written;
    while (ranks >> (52 - 2 * bits)) bits--;
    for (int i = 0; i < DIGESTS; i++) {
        h[i] = (int64_t)(digest >> (32 * i) & 0xffffffff) & (((int64_t)1 << bits) - 1);
        sums[1 + 2 * i] = (double)h[i];
        sums[2 + 2 * i] = (double)(h[i] * h[i]);
    }
    if (dt_sum_doubles(world, sums, WRITTEN + 1) != DT_OK) return dt_error(zero->ctx);
    for (int i = 0; i < DIGESTS; i++)
        equal &=
            (int64_t)sums[2 + 2 * i] - 2 * h[i] * (int64_t)sums[1 + 2 * i] + ranks * h[i] * h[i] ==
            0;
    *bad = sums[0];
    zero->written = sums[WRITTEN] > 0;
    return equal ? DT_OK : dt__step_common_fail(zero, &mine);
}

// ==== 9. Gradient reduction =====================================================================

/* A gradient's path through a step. A bucket's gradient is in one state at any time; the functions
   on the arrows are here or in dt_tensor.h, and dt__grad_enter checks every change:

                EMPTY
                  | dt__grad_begin         the first op of a backward asks where to write
       +-----> WRITING                     ops write to micro_grad, f32 for 16-bit parameters
       |          | dt__grad_complete      the last op has written; dt__grad_round: to bf16 or f16,
       |          |                        if dt_zero_desc.grad_dtype asks for it
       |   +------+--------------+
       |   | stages 0, 1         | stages 2, 3 and tree: reduce each micro-batch
       |   | dt__grad_add        |
       |   v                     v
       +- ACCUMULATED          READY       waits until all buckets with a higher index have started
       |   | last micro-batch:   | dt__grad_reduce_start
       |   | dt__zero_on_grad_ready
       |   +-----> READY -----> REDUCING   a collective runs while the backward continues
       |                         | dt__grad_reduce_end, and dt__grad_add or dt__tree_add
       +--------------------- ACCUMULATED
                                 | dt__grads_finish          last micro-batch: replicas, placements
                               REDUCED
                                 | dt__grads_sum_tied        pipeline stages that share it
                               FINAL       norm (section 11), update (section 13), parameters
                                 | dt_clear_grads            gathered; then EMPTY again

   It has three places: the ops write to micro_grad, a buffer or `grad` itself; `grad` holds the
   sum, all of it or this rank's shard; with gradients on disk the file holds the sum, and `grad` is
   a buffer. The tree holds its partial sums in `levels`.

   Gradient bucket: one reduction for many parameters (DDP), because one large message costs less
   than many small ones. ZeRO (S. Rajbhandari et al., arXiv:1910.02054) is a table with one row for
   each stage; each stage shards one thing more:

               optimizer  gradients  parameters  gradients are reduced             after the update
     0  DDP    whole      whole      whole       once a step, all-reduce           -
     1         shard      whole      whole       once a step, reduce-scatter       all-gather
     2         shard      shard      whole       each micro-batch, reduce-scatter  all-gather
     3  FSDP   shard      shard      shard       each micro-batch, reduce-scatter  blocks gather

   16-bit gradients (dt_zero_desc.grad_dtype): a micro-batch's gradient is rounded when it is
   complete, so what is stored and sent has 2 bytes per element. The update widens it again, piece
   by piece (dt__grad_widen).

   All sums are in rank order. Stages 0 and 1 add the micro-batches first and then the ranks, stages
   2 and 3 add the ranks in each micro-batch; so 0 and 1 give the same bits, and so do 2 and 3.
   Section 4 says how many bytes each stage sends. Overlap of communication and computation: a
   reduction starts when the bucket's gradient is complete and runs while the backward computes the
   gradients of the other buckets (S. Li et al., "PyTorch Distributed", VLDB 2020). At stages 2 and
   3 only two may be pending, because each pending reduction holds the gradient of a full bucket. */
static dt_status dt__reduce_all(dt_zero *zero, dt__zero_bucket *z, void *full) {
    z->work = dt_all_reduce_start(
        z->data_group, full, full, z->bucket.padded, z->bucket.sum_dtype, DT_SUM);
    return dt_error(zero->ctx);
}
static dt_status dt__reduce_to_shard(dt_zero *zero, dt__zero_bucket *z, void *full) {
    z->work = dt_reduce_scatter_start(z->shard_group, full, dt__grad_element(z, full, z->offset),
        z->count, z->bucket.sum_dtype, DT_SUM);
    return dt_error(zero->ctx);
}
static dt_status dt__add_micro(dt_zero *zero, dt__zero_bucket *z) {
    return dt__grad_add(zero->ctx, &z->bucket);
}
static dt_status dt__tree_exchange(dt_zero *zero, dt__zero_bucket *z, void *full);
static dt_status dt__tree_add(dt_zero *zero, dt__zero_bucket *z);

static const dt__grad_sum dt__all_reduce_once = {
    .reduce = dt__reduce_all, .add = dt__add_micro, .max_pending = INT_MAX
};
static const dt__grad_sum dt__reduce_scatter_once = {
    .reduce = dt__reduce_to_shard, .add = dt__add_micro, .replicas = 1, .max_pending = INT_MAX
};
static const dt__grad_sum dt__reduce_scatter_each_micro = { .reduce = dt__reduce_to_shard,
    .add = dt__add_micro,
    .each_micro = 1,
    .replicas = 1,
    .max_pending = 2 };
static const dt__grad_sum dt__tree_each_micro = {
    .reduce = dt__tree_exchange, .add = dt__tree_add, .each_micro = 1
}; /* at every stage, if dt_zero_desc.tree is set */

static const dt__zero_stage dt__zero_stages[] = {
    { .sum = &dt__all_reduce_once }, { .sum = &dt__reduce_scatter_once, .shard_optim = 1 },
    { .sum = &dt__reduce_scatter_each_micro, .shard_optim = 1, .shard_grads = 1 },
    { .sum = &dt__reduce_scatter_each_micro, .shard_optim = 1, .shard_grads = 1, .shard_params = 1 }
};

static int dt__is_last_micro(const dt_zero *zero) {
    return zero->ctx->micro == zero->ctx->micro_count - 1;
}

static dt_status dt__zero_work_wait(dt_zero *zero, dt__zero_bucket *z) {
    dt_status status = dt_wait(zero->ctx, z->work);
    z->work = NULL;
    return status;
}

/* Starts the sum of this rank's shard of a gradient over `comm`. Traffic over the group of a
   gradient placement counts for the axis `counted`: dp, or pp for tied parameters. */
static void dt__reduce_shard_start(dt__zero_bucket *z, dt_comm *comm, dt_axis counted) {
    void *shard = dt__zero_grad_shard(z);
    dt_axis axis = comm ? comm->axis : counted;
    dt_comm_set_axis(comm, counted);
    z->work = dt_all_reduce_start(comm, shard, shard, z->count, z->bucket.sum_dtype, DT_SUM);
    dt_comm_set_axis(comm, axis);
}

static int dt__grad_is_accumulated(const dt__zero_bucket *z, int stage) {
    return z->bucket.stage == stage && z->bucket.grad_state == DT_GRAD_ACCUMULATED;
}

/* Completes the sums of the buckets [first, end) of a pipeline stage, after the step's last
   micro-batch: sums over the replicas, and over the groups of the gradient placements. */
static dt_status dt__grads_finish(dt_zero *zero, int first, int end, int stage) {
    for (int u = end - 1; u >= first && zero->sum->replicas; u--)
        if (dt__grad_is_accumulated(&zero->buckets[u], stage))
            dt__reduce_shard_start(&zero->buckets[u], zero->buckets[u].replica_group, DT_AXIS_DP);
    for (int u = end - 1; u >= first; u--) {
        dt__zero_bucket *z = &zero->buckets[u];
        const dt_grad_placement *placed = dt__bucket_desc(zero, &z->bucket)->grad_placements;
        if (!dt__grad_is_accumulated(z, stage)) continue;
        if (dt__zero_work_wait(zero, z) != DT_OK) return dt_error(zero->ctx);
        for (int i = 0; i < 2; i++) {
            if (!placed[i].comm || placed[i].comm == z->tied_group ||
                placed[i].kind != DT_GRAD_PARTIAL)
                continue;
            dt__reduce_shard_start(z, placed[i].comm, DT_AXIS_DP);
            if (dt__zero_work_wait(zero, z) != DT_OK) return dt_error(zero->ctx);
        }
        dt__grad_enter(zero->ctx, &z->bucket, DT_GRAD_REDUCED);
    }
    return dt_error(zero->ctx);
}

/* Tied embeddings: adds the gradients of tied parameters over pipeline stages. Called after the
   last micro-batch, because a sum in the middle of the step could deadlock two stages that wait for
   each other. The sums of all tied buckets are started before the first wait, because stages may
   have the buckets in different orders. */
static dt_status dt__grads_sum_tied(dt_zero *zero) {
    for (int u = 0; u < zero->n_buckets; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        if (z->tied_group && z->bucket.grad_state == DT_GRAD_REDUCED)
            dt__reduce_shard_start(z, z->tied_group, DT_AXIS_PP);
    }
    for (int u = 0; u < zero->n_buckets; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        if (z->bucket.grad_state != DT_GRAD_REDUCED) continue;
        if (dt__zero_work_wait(zero, z) != DT_OK) return dt_error(zero->ctx);
        dt__grad_enter(zero->ctx, &z->bucket, DT_GRAD_FINAL);
    }
    return dt_error(zero->ctx);
}

static dt_status dt__norm_local_sums(dt_zero *zero, int first, int end, int on_disk);

static dt_status dt__own_grad_check(dt_zero *zero, const dt__zero_bucket *z, const void *full);

static dt_status dt__grad_reduce_start(dt_zero *zero, dt__zero_bucket *z) {
    void *full = z->bucket.micro_grad ? z->bucket.micro_grad : z->bucket.grad;
    if (dt__own_grad_check(zero, z, full) != DT_OK) return dt_error(zero->ctx);
    if (dt__grad_enter(zero->ctx, &z->bucket, DT_GRAD_REDUCING) != DT_OK ||
        (z->bucket.grad_offloaded && dt__grads_read_start(zero, z) != DT_OK))
        return dt_error(zero->ctx);
    /* once 1-bit Adam has frozen its second moment, ranks exchange the momentum, not gradients */
    return dt__onebit_frozen(zero) ? DT_OK : zero->sum->reduce(zero, z, full);
}

/* A gradient on disk is written back, while the next bucket is reduced. After the last micro-batch
   it is first summed over replicas, and its squares are summed for the norm. */
static dt_status dt__grad_reduce_end(dt_zero *zero, dt__zero_bucket *z) {
    int u = z->bucket.index;
    if (dt__zero_work_wait(zero, z) != DT_OK || dt__grads_write_end(zero) != DT_OK ||
        dt__disk_wait(zero, &z->grad_job) != DT_OK || zero->sum->add(zero, z) != DT_OK ||
        !z->bucket.grad_offloaded)
        return dt_error(zero->ctx);
    if (dt__is_last_micro(zero) && (dt__grads_finish(zero, u, u + 1, z->bucket.stage) != DT_OK ||
                                       dt__norm_local_sums(zero, u, u + 1, 1) != DT_OK))
        return dt_error(zero->ctx);
    return dt__grads_write_start(zero, z);
}

/* Completes the oldest reductions until at most `limit` are pending. */
static dt_status dt__grad_reduce_drain(dt_zero *zero, int limit) {
    int pending = 0;
    for (int u = 0; u < zero->n_buckets; u++)
        pending += zero->buckets[u].bucket.grad_state == DT_GRAD_REDUCING;
    for (int u = zero->n_buckets - 1; u >= 0 && pending > limit; u--) {
        if (zero->buckets[u].bucket.grad_state != DT_GRAD_REDUCING) continue;
        if (dt__grad_reduce_end(zero, &zero->buckets[u]) != DT_OK) return dt_error(zero->ctx);
        pending--;
    }
    return dt_error(zero->ctx);
}

/* Returns the last bucket before bucket u that a backward of this pipeline stage completes; -1 if
   there is none. */
static int dt__bucket_before(const dt_zero *zero, int u, int stage) {
    while (--u >= 0)
        if (zero->buckets[u].bucket.stage == stage && !zero->buckets[u].bucket.frozen &&
            !zero->buckets[u].bucket.paused)
            break;
    return u;
}

static void dt__zero_free_gathered(dt_zero *zero, dt__zero_bucket *z);

/* Gradient accumulation and overlap: called when a bucket's gradient of a micro-batch is complete.
   last: 1 in the step's last micro-batch. Reduces buckets in descending order, because a backward
   usually completes them in this order. The order is fixed, so that all ranks start the same
   reductions in the same order, whatever their data. */
static void dt__zero_on_grad_ready(dt_ctx *ctx, dt_bucket *bucket, int last, void *user) {
    dt_zero *zero = (dt_zero *)user;
    dt__zero_bucket *z = (dt__zero_bucket *)bucket;
    int *next = &zero->next_bucket;
    /* the backward has read these parameters for the last time */
    if (!zero->desc.keep_gathered && z->holder_block == 0) dt__zero_free_gathered(zero, z);
    if (!zero->sum->each_micro && (!last || dt__grad_enter(ctx, bucket, DT_GRAD_READY))) return;
    if (*next < 0) *next = dt__bucket_before(zero, zero->n_buckets, bucket->stage);
    while (*next >= 0 && zero->buckets[*next].bucket.grad_state == DT_GRAD_READY) {
        z = &zero->buckets[*next];
        *next = dt__bucket_before(zero, *next, bucket->stage);
        if (dt__grad_reduce_start(zero, z) != DT_OK ||
            dt__grad_reduce_drain(zero, zero->desc.no_overlap ? 0 : zero->sum->max_pending) !=
                DT_OK)
            return;
    }
    if (*next >= 0 || dt__grad_reduce_drain(zero, 0) != DT_OK || dt__grads_write_end(zero) != DT_OK)
        return;
    if (last) dt__grads_finish(zero, 0, zero->n_buckets, bucket->stage);
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
    return dt__grad_element(z, z->levels, (size_t)level * segment);
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
        dt_reduce_args a = { .dtype = z->bucket.sum_dtype,
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
                           segment * dt_dtype_size(z->bucket.sum_dtype));
}

/* Completes the tree of a bucket: adds the sums that are left in the levels of this rank's piece,
   lowest level first, then all-gathers the pieces of each shard. */
static dt_status dt__grad_tree_sum(
    dt_zero *zero, dt__zero_bucket *z, size_t segment, size_t leaves) {
    char *shard = (char *)dt__zero_grad_shard(z), *sum = NULL;
    void *mine =
        shard + (dt__grad_tree_segment(z, dt_comm_rank(z->data_group)) * segment - z->offset) *
                    dt_dtype_size(z->bucket.sum_dtype);
    for (int level = 0; leaves >> level; level++) {
        void *more = dt__grad_tree_level(z, segment, level);
        if (!(leaves >> level & 1)) continue;
        const void *terms[2] = { more, sum };
        dt_reduce_args a = { .dtype = z->bucket.sum_dtype,
            .out = more,
            .in = terms,
            .n = 2,
            .count = segment,
            .op = DT_SUM };
        if (sum && DT__KERNEL(zero->ctx, "the tree of gradients", reduce, &a) != DT_OK)
            return dt_error(zero->ctx);
        sum = (char *)more;
    }
    if (dt__move(zero->ctx, mine, sum, segment * dt_dtype_size(z->bucket.sum_dtype)) != DT_OK)
        return dt_error(zero->ctx);
    dt_comm *others = zero->stage->shard_optim ? z->replica_group : z->data_group;
    return dt_all_gather(others, mine, shard, segment, z->bucket.sum_dtype);
}

/* Allocates the levels of this bucket, and zero->leaves with the size of the largest bucket, unless
   they exist. `leaves` is the number of leaves in a step. */
static dt_status dt__grad_tree_alloc(
    dt_zero *zero, dt__zero_bucket *z, size_t segment, size_t leaves) {
    size_t n_levels = 0, max_bytes = 0;
    while (leaves >> n_levels) n_levels++;
    for (int u = 0; u < zero->n_buckets; u++) {
        size_t bytes =
            zero->buckets[u].bucket.padded * dt_dtype_size(zero->buckets[u].bucket.sum_dtype);
        max_bytes = bytes > max_bytes ? bytes : max_bytes;
    }
    if (dt_comm_size(z->data_group) > 1 && !zero->leaves) {
        zero->leaves = dt_alloc(zero->ctx, DT_MEM_COMM, max_bytes, "the tree's leaves");
        zero->leaves_bytes = max_bytes;
    }
    size_t bytes = n_levels * segment * dt_dtype_size(z->bucket.sum_dtype);
    if (z->levels_bytes == bytes) return dt_error(zero->ctx);
    dt_free(zero->ctx, DT_MEM_GRADS, z->levels, z->levels_bytes);
    z->levels = dt_alloc(zero->ctx, DT_MEM_GRADS, bytes, "the tree's levels");
    z->levels_bytes = z->levels ? bytes : 0;
    return dt_error(zero->ctx);
}

/* The reduction of a micro-batch: an all-to-all sends each rank its piece of `full`, this rank's
   gradient of the bucket. Fills zero->leaves with every rank's gradient of this rank's piece. */
static dt_status dt__tree_exchange(dt_zero *zero, dt__zero_bucket *z, void *full) {
    size_t ranks = (size_t)dt_comm_size(z->data_group), segment = z->bucket.padded / ranks,
           bytes = segment * dt_dtype_size(z->bucket.sum_dtype);
    if (dt__grad_tree_alloc(zero, z, segment, ranks * (size_t)zero->ctx->micro_count) != DT_OK ||
        ranks == 1)
        return dt_error(zero->ctx);
    char *sorted =
        z->replica_group ? (char *)dt__buffer_acquire(zero->ctx, DT_MEM_COMM, ranks * bytes) : NULL;
    for (size_t r = 0; sorted && r < ranks; r++)
        dt__move(zero->ctx, sorted + r * bytes,
            (char *)full + dt__grad_tree_segment(z, (int)r) * bytes, bytes);
    if (dt_error(zero->ctx) == DT_OK)
        dt_all_to_all(
            z->data_group, sorted ? sorted : full, zero->leaves, segment, z->bucket.sum_dtype);
    if (sorted) dt__buffer_release(zero->ctx, sorted);
    return dt_error(zero->ctx);
}

/* Adds all ranks' gradients of a bucket in one micro-batch to the tree. The last micro-batch of the
   step completes the tree and stores its sum in `grad`; before, `levels` hold the sum and `micros`
   is 0. */
static dt_status dt__tree_add(dt_zero *zero, dt__zero_bucket *z) {
    dt_bucket *bucket = &z->bucket;
    size_t ranks = (size_t)dt_comm_size(z->data_group), segment = bucket->padded / ranks,
           micro = (size_t)zero->ctx->micro;
    const char *leaves = (const char *)(ranks > 1 ? zero->leaves : bucket->micro_grad);
    for (size_t r = 0; r < ranks; r++) {
        const char *leaf = leaves + r * segment * dt_dtype_size(z->bucket.sum_dtype);
        if (dt__grad_tree_add(zero, z, segment, leaf, micro * ranks + r) != DT_OK)
            return dt_error(zero->ctx);
    }
    dt__grad_buffer_release(zero->ctx, bucket);
    bucket->micros = dt__is_last_micro(zero);
    if (bucket->micros) dt__grad_tree_sum(zero, z, segment, ranks * (micro + 1));
    return dt__grad_enter(zero->ctx, bucket, DT_GRAD_ACCUMULATED);
}

// ==== 10. ZeRO-3 (FSDP): gather and release of parameters =======================================

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
   because dt_comm.h compares the ranks' collective calls, with the bucket and the phase of each
   gather. */
static dt_status dt__zero_gather_start(dt_zero *zero, dt__zero_bucket *z) {
    const dt_bucket *u = &z->bucket;
    if ((!z->gathered && dt__params_read_start(zero, z) != DT_OK) ||
        dt__disk_wait(zero, &z->disk_job) != DT_OK)
        return dt_error(zero->ctx);
    const void *mine =
        u->shard ? u->shard : (char *)z->gathered + u->shard_offset * dt_dtype_size(u->dtype);
    dt__call call = dt__call_make(DT__ALL_GATHER, mine, z->gathered, u->shard_count, u->dtype);
    dt__gather_phase phase = zero->ctx->outside_op ? DT__OUTSIDE_OPS : zero->current_phase;
    call.gather_id = 1 + 4 * (uint32_t)u->index + (uint32_t)phase;
    z->gather_work = dt__op_start(z->shard_group, call);
    return dt_error(zero->ctx);
}

/* Frees the gathered parameters of a bucket, after waiting for a pending gather. */
static void dt__zero_free_gathered(dt_zero *zero, dt__zero_bucket *z) {
    const dt_bucket *u = &z->bucket;
    if (!z->gathered || dt__disk_wait(zero, &z->disk_job) != DT_OK ||
        dt_wait(zero->ctx, z->gather_work) != DT_OK)
        return;
    z->gather_work = NULL;
    if (zero->desc.poison) dt__fill(zero->ctx, u->dtype, z->gathered, u->padded, NAN);
    dt__bucket_set_data(zero->ctx, &z->bucket, NULL);
    dt__buffer_release(zero->ctx, z->gathered);
    z->gathered = NULL;
}

/* Frees the buckets that a block has gathered. If `block` is -1, frees all gathered buckets. */
static void dt__zero_free_held(dt_zero *zero, int block) {
    for (int u = 0; u < zero->n_buckets; u++)
        if (block < 0 || (zero->buckets[u].holder_block == block && zero->buckets[u].bucket.data))
            dt__zero_free_gathered(zero, &zero->buckets[u]);
}

/* Sets every gather plan back to its first entry, and frees prefetched buckets that no op has
   read. */
static void dt__gather_plans_rewind(dt_zero *zero) {
    for (int i = 0; i < DT__GATHER_PLANS * zero->n_stages; i++) zero->gather_plans[i].position = 0;
    for (int u = 0; u < zero->n_buckets; u++)
        if (zero->buckets[u].gathered && !zero->buckets[u].bucket.data)
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
        if (others == 2 && !z->gathered && !z->bucket.shard) dt__params_read_start(zero, z);
        if (others < 2 && !z->gather_work && !z->bucket.data) dt__zero_gather_start(zero, z);
        if (dt_error(zero->ctx) != DT_OK) break;
    }
    return dt_error(zero->ctx);
}

static void dt__zero_on_gather(dt_ctx *ctx, dt_bucket *bucket, void *user) {
    dt_zero *zero = (dt_zero *)user;
    dt__zero_bucket *z = (dt__zero_bucket *)bucket;
    /* the stage of the tape, which differs from the bucket's for a parameter of several stages */
    int stage = bucket->stage;
    if (ctx->root && ctx->root->stage < zero->n_stages) stage = ctx->root->stage;
    dt__gather_plan *plan =
        &zero->gather_plans[DT__GATHER_PLANS * stage + (int)zero->current_phase];
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
    dt__zero_bucket *z = (dt__zero_bucket *)bucket;
    zero->written |= written && !bucket->frozen;
    if (dt_error(ctx) != DT_OK || bucket->data == bucket->shard) return;
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
    zero->current_phase = event->phase == DT_BACKWARD_WEIGHT ? DT__IN_WEIGHT_HALF : DT__IN_BACKWARD;
}

/* Before a block's forward takes memory for activations, the gradients of the last step give back
   the memory that they have borrowed from the arenas. */
static void dt__zero_on_forward(dt_ctx *ctx, const dt_event *event, void *user) {
    dt_zero *zero = (dt_zero *)user;
    for (int u = 0; u < zero->n_buckets && event->phase == DT_FORWARD; u++) {
        dt_bucket *bucket = &zero->buckets[u].bucket;
        if (bucket->grad_borrowed && bucket->grad_state == DT_GRAD_EMPTY)
            dt__grad_sum_free(ctx, bucket);
    }
}

static void dt__zero_on_leave(dt_ctx *ctx, const dt_event *event, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (dt_error(ctx) != DT_OK) return;
    /* after the recomputation of a block keep its buckets, because its backward reads them next */
    int goes_back = event->phase == DT_FORWARD && dt_recomputing(ctx);
    if (!zero->desc.keep_gathered && !goes_back) dt__zero_free_held(zero, event->block);
    if (event->phase == DT_FORWARD || event->block != 0) return;
    dt__gather_plans_rewind(zero);
    zero->current_phase = DT__IN_FORWARD;
}

static void dt__zero_on_reset(dt_ctx *ctx, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (dt_error(ctx) != DT_OK) return;
    dt__gather_plans_rewind(zero);
    if (!zero->desc.keep_gathered) dt__zero_free_held(zero, 0);
}

// ==== 11. Gradient norm =========================================================================

/* Returns 1 if a call of dt__norm_local_sums with this value of on_disk includes the bucket: calls
   with 0 sum the squares of gradients in memory, in the step; calls with 1 sum those of gradients
   on disk, in the backward, which does not know yet which parameter groups will step. */
static int dt__norm_includes(const dt__zero_bucket *z, int on_disk) {
    return !z->bucket.frozen && z->bucket.grad_offloaded == on_disk &&
           (on_disk || dt__zero_steps_now(z));
}

/* Sets zero->sums of the buckets [first, end): one sum of squares for each 1,024 elements of this
   rank's shards, and 0 for elements outside of these shards. In the step the sums of parameter
   groups that do not step are 0, so that the norm and the test for NaN leave them out. The kernels
   write the sums to device memory. Sums whose places in zero->sums are adjacent are copied to the
   host together. */
static dt_status dt__norm_local_sums(dt_zero *zero, int first, int end, int on_disk) {
    dt_ctx *ctx = zero->ctx;
    size_t runs = 0, n = 0;
    for (int u = first; u < end; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        size_t all = z->bucket.padded / DT_PIECE;
        if (dt__norm_includes(z, on_disk)) runs += z->count / DT_PIECE;
        int left_out = z->bucket.frozen || (!on_disk && !dt__zero_steps_now(z));
        if (left_out || (dt__norm_includes(z, on_disk) && z->count < z->bucket.padded))
            memset(zero->sums + z->sums_at, 0, all * sizeof *zero->sums);
    }
    double *from = (double *)dt_scratch(ctx, runs * sizeof *from), *at = from, *to = zero->sums;
    for (int u = first; u < end && runs > 0; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        if (!dt__norm_includes(z, on_disk)) continue;
        dt_square_sums_args a = { z->bucket.sum_dtype, at, dt__zero_grad_shard(z), z->count };
        if (!from || DT__KERNEL(ctx, "the gradient norm", square_sums, &a) != DT_OK)
            return dt_error(ctx);
        at += z->count / DT_PIECE;
    }
    for (int u = first; u < end && runs > 0; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        double *dest = zero->sums + z->sums_at + z->offset / DT_PIECE;
        if (!dt__norm_includes(z, on_disk)) continue;
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
    if (!zero->stage->shard_optim) return DT_OK;
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
            dt_comm *comm = dt__bucket_desc(zero, &z->bucket)->shards[c].comm;
            if (comm && dt_sum_doubles(comm, total, 1) != DT_OK) return dt_error(zero->ctx);
        }
        if (dt_comm_rank(z->tied_group) > 0) *total = 0;
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
                left[t] = z->bucket.padded / DT_PIECE;
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

/* Sets *bad to element `at` of a bucket. */
static void dt__bad_grad_set(
    dt_zero *zero, const dt__zero_bucket *z, size_t at, double value, dt__bad_grad *bad) {
    const dt_tensor *t = dt_param_get(zero->ctx, z->bucket.first_param);
    for (int p = 1; p < z->bucket.n_params; p++) {
        const dt_tensor *later = dt_param_get(zero->ctx, z->bucket.first_param + p);
        if (later->param->offset <= at) t = later;
    }
    bad->rank = dt_ctx_rank(zero->ctx);
    bad->param = t->param->index;
    bad->element = (double)(at - t->param->offset);
    bad->value = value;
}

/* Sets *bad to the first bad element of a piece of a bucket. A piece has 1,024 elements, which
   are in `piece`; `at` is the index of its first element in the bucket. */
static void dt__bad_grad_locate(
    dt_zero *zero, const dt__zero_bucket *z, size_t at, const void *piece, dt__bad_grad *bad) {
    size_t k = 0;
    while (k < DT_PIECE && isfinite(dt__number(z->bucket.sum_dtype, piece, k))) k++;
    for (size_t i = 0, largest = 0; k == DT_PIECE && i <= DT_PIECE;
         i++) { /* if all are finite, find the largest: its square is not finite */
        if (i == DT_PIECE)
            k = largest;
        else if (fabs(dt__number(z->bucket.sum_dtype, piece, i)) >
                 fabs(dt__number(z->bucket.sum_dtype, piece, largest)))
            largest = i;
    }
    dt__bad_grad_set(zero, z, at + k, dt__number(z->bucket.sum_dtype, piece, k), bad);
}

/* Returns 1 if a bucket's gradient is summed over ranks. */
static int dt__is_summed(const dt_zero *zero, const dt__zero_bucket *z) {
    const dt_grad_placement *placed = dt__bucket_desc(zero, &z->bucket)->grad_placements;
    int summed = dt_comm_size(z->data_group) > 1;
    for (int i = 0; i < 2; i++)
        summed |= placed[i].kind == DT_GRAD_PARTIAL && dt_comm_size(placed[i].comm) > 1;
    return summed;
}

/* After a sum over ranks no rank knows which rank made a NaN. So each rank tests its own gradient
   of a bucket before the sum, in which `full` has (padded) elements, and keeps the first bad
   element. The test reads the gradient once: 0.4 % of a step with 256 tokens per rank, 0.1 % with
   1,024. A GPU would have to wait for the result: there this happens only under
   dt_check_finite. */
static dt_status dt__own_grad_check(dt_zero *zero, const dt__zero_bucket *z, const void *full) {
    dt_ctx *ctx = zero->ctx;
    dt__bad_grad *bad = &zero->own_bad;
    double copy[1]; /* room for any type */
    size_t size = dt_dtype_size(z->bucket.sum_dtype);
    int first_micro = ctx->micro == 0 || !zero->sum->each_micro;
    if (dt__is_dry_run(zero) || !dt__is_summed(zero, z) ||
        (ctx->kernels.sync && !ctx->check_finite))
        return DT_OK;
    /* a bad element from a step that the user ended with dt_clear_grads */
    if (first_micro && bad->rank >= 0 && dt_param_get(ctx, bad->param)->param->bucket == &z->bucket)
        bad->rank = -1;
    if (bad->rank >= 0) return DT_OK;
    int64_t at = dt__find_bad(ctx, z->bucket.sum_dtype, full, (int64_t)z->bucket.padded, 1);
    if (at < 0 || dt__move_now(ctx, copy, (const char *)full + (size_t)at * size, size) != DT_OK)
        return dt_error(ctx);
    dt__bad_grad_set(zero, z, (size_t)at, dt__number(z->bucket.sum_dtype, copy, 0), bad);
    bad->own = 1;
    bad->micro = zero->sum->each_micro || ctx->micro_count == 1 ? ctx->micro : -1;
    return DT_OK;
}

/* Sets *bad to the first bad element in this rank's shard of the summed gradients, or in this
   rank's own gradients if they are not summed (section 16). */
static dt_status dt__bad_grad_find_local(dt_zero *zero, dt__bad_grad *bad) {
    double copy[DT_PIECE];
    for (int u = 0; u < zero->n_buckets && bad->rank < 0; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        size_t i = z->offset / DT_PIECE, end = (z->offset + z->count) / DT_PIECE;
        while (
            i < end && (isfinite(zero->sums[z->sums_at + i]) ||
                           (dt__onebit_frozen(zero) && !dt__onebit_at_fault(zero, &z->bucket, i))))
            i++;
        if (i == end || z->bucket.frozen) continue;
        if (dt__grads_copy_out(zero, z, i * DT_PIECE - z->offset, copy, DT_PIECE) != DT_OK)
            return dt_error(zero->ctx);
        dt__bad_grad_locate(zero, z, i * DT_PIECE, copy, bad);
        bad->own = dt__onebit_frozen(zero) || !dt__is_summed(zero, z);
        bad->micro = zero->ctx->micro_count == 1 ? 0 : -1;
    }
    return DT_OK;
}

/* Sets *bad on every rank to the bad element of one rank. Sets bad->rank to -1 if no rank has a bad
   element. A rank with a bad element in its own gradient comes before ranks that have only seen it
   in a sum; of the former the last pipeline stage, because a backward carries a NaN to earlier
   stages; then the first rank. */
static dt_status dt__bad_grad_find(dt_zero *zero, dt__bad_grad *bad) {
    enum { RANK = 0, PARAM, ELEMENT, CODE, OWN, MICRO, LOSS, EACH };
    dt_comm *world = zero->mesh.world;
    int ranks = dt_comm_size(world), best = -1, n_own = 0;
    size_t bytes = EACH * (size_t)ranks * 8;
    *bad = zero->own_bad;
    if (bad->rank < 0 && dt__bad_grad_find_local(zero, bad) != DT_OK) return dt_error(zero->ctx);
    double *all = (double *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "the first bad gradient");
    if (!all) return dt_error(zero->ctx);
    memset(all, 0, bytes);
    /* send a code, not the value: the ranks' arrays are summed, and a NaN would spoil the sum */
    double code = isnan(bad->value) ? 1 : isfinite(bad->value) ? 4 : bad->value > 0 ? 2 : 3;
    double mine[EACH] = { bad->rank + 1.0, (double)bad->param, bad->element, code, (double)bad->own,
        bad->micro + 1.0, zero->ctx->bad_loss_micro + 1.0 };
    memcpy(all + EACH * dt_comm_rank(world), mine, sizeof mine);
    dt_sum_doubles(world, all, EACH * (size_t)ranks);
    for (int r = 0; r < ranks; r++) {
        const double *x = all + EACH * r, *y = best < 0 ? x : all + EACH * best;
        int later = best >= 0 && dt__zero_pp_rank(zero, r) > dt__zero_pp_rank(zero, best);
        if (x[RANK] == 0) continue;
        n_own += x[OWN] > 0;
        if (best < 0 || x[OWN] > y[OWN] || (x[OWN] > 0 && y[OWN] > 0 && later)) best = r;
    }
    const double *found = best < 0 ? all : all + EACH * best;
    bad->rank = -1;
    if (best >= 0)
        *bad = (dt__bad_grad){ .rank = (int)found[RANK] - 1,
            .param = (int)found[PARAM],
            .element = found[ELEMENT],
            .value = found[CODE] == 1   ? NAN
                     : found[CODE] == 4 ? 0
                     : found[CODE] == 2 ? HUGE_VAL
                                        : -HUGE_VAL,
            .own = found[OWN] > 0,
            .n_ranks = n_own,
            .micro = (int)found[MICRO] - 1,
            .loss_micro = (int)found[LOSS] - 1 };
    dt_free(zero->ctx, DT_MEM_HOST, all, bytes);
    return dt_error(zero->ctx);
}

/* The name of the parameter is known only to the rank that holds it. */
static dt__text dt__bad_grad_text(const dt_zero *zero, const dt__bad_grad *bad) {
    const char *value = isnan(bad->value)   ? "that is not finite, a NaN,"
                        : isinf(bad->value) ? bad->value > 0 ? "that is not finite, an Inf,"
                                                             : "that is not finite, a -Inf,"
                                            : "whose square is too large";
    if (bad->rank < 0) return dt__format("the sum of all squares is too large");
    dt__text text = dt__format("the first gradient %s is element %.0f of %.80s on rank %d", value,
        bad->element, dt_param_get(zero->ctx, bad->param)->name, bad->rank);
    if (!bad->own) {
        dt__put(&text, ", seen after the sum over ranks: any of them may have made it");
        return text;
    }
    dt__put(&text, ", in the rank's own gradient");
    if (bad->micro >= 0) dt__put(&text, " of micro-batch %d", bad->micro + 1);
    if (bad->n_ranks > 1) dt__put(&text, " (as on %d other ranks)", bad->n_ranks - 1);
    if (bad->loss_micro >= 0)
        dt__put(&text, "; the loss of micro-batch %d is not finite either", bad->loss_micro + 1);
    return text;
}

/* Fails the run, because the gradient norm is not finite and there is no loss scale. The rank of
   the bad element fails; the other ranks wait in a barrier until they learn of that rank's
   failure. */
static dt_status dt__bad_grad_fail(dt_zero *zero, const dt__bad_grad *bad, double norm) {
    if (bad->rank >= 0 && bad->rank != dt_ctx_rank(zero->ctx)) return dt_barrier(zero->mesh.world);
    return dt_fail(zero->ctx, DT_ERR_NUMERIC,
        "step %lld: the gradient norm is %g; %s. Call dt_check_finite(ctx, 1) before the forward: "
        "the error then names the op that made the NaN",
        (long long)zero->step + 1, norm, dt__bad_grad_text(zero, bad).s);
}

// ==== 12. Loss scaling ==========================================================================

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
static dt_status dt__scale_skip(dt_zero *zero, const dt__bad_grad *bad) {
    const dt_scale_desc *d = &zero->desc.scale;
    double before = zero->loss_scale, lower = zero->loss_scale * d->backoff;
    zero->skipped_scales[zero->consecutive_skips++] = before;
    zero->good_steps = 0;
    if (zero->hysteresis_left > 1)
        zero->hysteresis_left--;
    else if (dt__scale_is_dynamic(zero))
        dt__scale_set(zero, lower > d->min_scale ? lower : d->min_scale);
    int reports = bad->rank < 0 ? dt_ctx_rank(zero->ctx) == 0 : dt_ctx_rank(zero->ctx) == bad->rank;
    if (reports)
        dt_log(zero->ctx, DT_LOG_NOTICE, "step %lld skipped: %s; loss scale %g -> %g",
            (long long)zero->step + 1, dt__bad_grad_text(zero, bad).s, before, zero->loss_scale);
    if (zero->consecutive_skips < DT_MAX_SKIPS) return DT_OK;
    if (!reports) return dt_barrier(zero->mesh.world);
    dt__text history = dt__format("with loss scales");
    for (int i = 0; i < DT_MAX_SKIPS; i++) dt__put(&history, " %.6g", zero->skipped_scales[i]);
    return dt_fail(zero->ctx, DT_ERR_NUMERIC,
        "step %lld was skipped %d times in a row, %s: no scale helps; %s",
        (long long)zero->step + 1, (int)DT_MAX_SKIPS, history.s, dt__bad_grad_text(zero, bad).s);
}

// ==== 13. Optimizer update ======================================================================

/* Consecutive elements of this rank's shard of a bucket. Each array begins at the first of these
   elements. */
typedef struct dt__update_span {
    size_t offset, count; /* range of elements of the bucket */
    void *grad, *state[2];
    void *master; /* NULL without master weights: the update then changes `values` directly */
    void *ema;    /* or NULL */
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

/* Calls the program's own update, and rounds its result to `narrow`. */
static dt_status dt__custom_update(
    dt_zero *zero, const dt_param_group *d, const dt_update_args *f, void *narrow) {
    dt_cast_args a = { .dtype = f->tensor->dtype,
        .from = dt_grad_dtype(f->tensor),
        .out = narrow,
        .in = f->param,
        .count = f->count };
    if (dt__is_dry_run(zero)) return DT_OK;
    dt_status status = d->update(f, d->user);
    if (status != DT_OK) return dt_fail(zero->ctx, status, "the update of %s", f->tensor->name);
    return narrow ? DT__UPDATE(zero, f->tensor->name, cast, &a) : DT_OK;
}

/* Updates one parameter. An update by AdamW or Adam is only added to the batch, which
   dt__update_batch_flush launches. `narrow` receives the result rounded to the parameter's type;
   NULL if f->param already has the parameter's type. */
static dt_status dt__zero_update_param(dt_zero *zero, dt__update_batch *batch,
    const dt_param_group *d, const dt_update_args *f, void *narrow) {
    dt_dtype type = dt_grad_dtype(f->tensor);
    if (d->optimizer == DT_OPTIMIZER_CUSTOM) return dt__custom_update(zero, d, f, narrow);
    /* the gradient of a matrix is now its orthogonalized momentum: subtract it, with the decay */
    int by_matrix = f->tensor->param->by_matrix;
    if (d->optimizer == DT_SGD || by_matrix) {
        dt_sgd_args a = { .dtype = type,
            .param = f->param,
            .grad = f->grad,
            .momentum_buffer = f->state[0],
            .count = f->count,
            .lr = f->lr,
            .momentum = by_matrix ? 0 : d->momentum,
            .weight_decay = f->weight_decay,
            .grad_scale = by_matrix ? dt__muon_scale(d, f->tensor) : f->grad_scale,
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

/* EMA of the weights: updates the EMA of the span's parameters, after the weights; skips frozen
   parameters. */
static dt_status dt__ema_update_span(
    dt_zero *zero, const dt__zero_bucket *z, const dt__update_span *s) {
    size_t size = dt__zero_element_size(z), end = s->offset + s->count;
    const char *updated = (const char *)(s->master ? s->master : s->values);
    for (int i = z->bucket.first_param; i < z->bucket.first_param + z->bucket.n_params; i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        const dt_param_info *p = t->param;
        size_t from = p->offset > s->offset ? p->offset : s->offset,
               to = p->offset + p->count < end ? p->offset + p->count : end;
        if (from >= to || !t->needs_grad) continue;
        dt_momentum_args a = { .dtype = z->bucket.grad_dtype,
            .m = (char *)s->ema + (from - s->offset) * size,
            .grad = updated + (from - s->offset) * size,
            .count = to - from,
            .beta1 = zero->desc.ema_decay,
            .grad_scale = 1 };
        if (DT__UPDATE(zero, t->name, momentum, &a) != DT_OK) return dt_error(zero->ctx);
    }
    return DT_OK;
}

/* Updates the elements of the span, parameter by parameter. */
static dt_status dt__zero_update_span(
    dt_zero *zero, dt__zero_bucket *z, const dt__update_span *s, double grad_scale) {
    const dt_bucket *u = &z->bucket;
    const dt__param_group *group = z->group;
    dt__update_batch batch;
    size_t size = dt__zero_element_size(z), narrow_size = dt_dtype_size(u->dtype),
           end = s->offset + s->count;
    batch.n = 0;
    for (int i = u->first_param; i < u->first_param + u->n_params; i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        const dt_param_info *p = t->param;
        size_t from = p->offset > s->offset ? p->offset : s->offset;
        size_t to = p->offset + p->count < end ? p->offset + p->count : end, at = from - s->offset;
        if (from >= to || !t->needs_grad) continue; /* elsewhere, or frozen by dt_zero_freeze */
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
            .lr = group->lr * (p->desc.lr_scale != 0 ? p->desc.lr_scale : 1),
            .grad_scale = grad_scale,
            .weight_decay = dt__param_is_matrix(p) ? group->desc.weight_decay : 0,
            .step = group->step + 1 };
        void *narrow = s->master ? value : NULL;
        for (int k = 0; k < z->states; k++) f.state[k] = (char *)s->state[k] + at * size;
        if (dt__zero_update_param(zero, &batch, &group->desc, &f, narrow) != DT_OK)
            return dt_error(zero->ctx);
    }
    if (dt__update_batch_flush(zero, &batch) != DT_OK || !s->ema || dt__is_dry_run(zero))
        return dt_error(zero->ctx);
    return dt__ema_update_span(zero, z, s);
}

/* Copies the weights at `values` to a span's master weights and EMA, in the first step of the
   parameter group, so that the program can load parameters before that step. */
static dt_status dt__masters_init(
    dt_zero *zero, const dt__zero_bucket *z, const dt__update_span *s, const void *values) {
    void *copies[2] = { s->master, s->ema };
    for (int i = 0; i < 2 && z->group->step == 0; i++) {
        dt_cast_args widen = { .dtype = z->bucket.grad_dtype,
            .from = z->bucket.dtype,
            .out = copies[i],
            .in = values,
            .count = s->count };
        if (copies[i] && DT__UPDATE(zero, "master parameters", cast, &widen) != DT_OK) break;
    }
    return dt_error(zero->ctx);
}

enum { DT__STATE_COPY = 1 << 16 }; /* elements of a host buffer for copies of state */

/* Does what dt__masters_init does, for a bucket that is frozen for now (dt_zero_freeze) in the
   first step of its group, wherever the arrays are. */
static dt_status dt__paused_masters_init(dt_zero *zero, dt__zero_bucket *z) {
    dt_ctx *ctx = zero->ctx;
    size_t size = dt__zero_element_size(z), narrow = dt_dtype_size(z->bucket.dtype),
           shard = z->offset - z->bucket.shard_offset, elements = DT__STATE_COPY / 2,
           bytes = DT__STATE_COPY * sizeof(double);
    int has[] = { dt__zero_has_master(&z->bucket), zero->desc.ema_decay > 0 };
    if (!has[0] && !has[1]) return dt_error(ctx);
    double *host = (double *)dt_alloc(ctx, DT_MEM_HOST, bytes, "master parameters");
    for (size_t at = 0, n; at < z->count && host; at += n) {
        n = z->count - at < elements ? z->count - at : elements;
        dt_cast_args widen = { .dtype = z->bucket.grad_dtype,
            .from = z->bucket.dtype,
            .out = host + elements,
            .in = host,
            .count = n };
        if (dt__array_access(zero, z, DT__PARAMS, 0, (shard + at) * narrow, host, n * narrow) !=
            DT_OK)
            break;
        dt_kernels_cpu()->cast(&widen, NULL);
        for (int i = 0; i < 2; i++)
            if (has[i])
                dt__array_access(zero, z, DT__MASTER + i, 1, at * size, host + elements, n * size);
    }
    dt_free(ctx, DT_MEM_HOST, host, bytes);
    return dt_error(ctx);
}

static dt_status dt__offload_update(dt_zero *zero, double grad_scale);

/* Returns `count` elements of a bucket's gradient in the type that the update reads: `grad` itself,
   or the f32 values of 16-bit gradients, in zero->wide_grads. */
static void *dt__grad_widen(dt_zero *zero, const dt__zero_bucket *z, void *grad, size_t count) {
    dt_cast_args a = { .dtype = z->bucket.grad_dtype,
        .from = z->bucket.sum_dtype,
        .out = zero->wide_grads,
        .in = grad,
        .count = count };
    if (a.dtype == a.from) return grad;
    DT__UPDATE(zero, "16-bit gradients", cast, &a);
    return zero->wide_grads;
}

/* Updates this rank's shard of a bucket, in pieces if its gradients are widened. */
static dt_status dt__zero_update_bucket(dt_zero *zero, dt__zero_bucket *z, double grad_scale) {
    size_t size = dt__zero_element_size(z), narrow = dt_dtype_size(z->bucket.dtype),
           most = z->bucket.sum_dtype == z->bucket.grad_dtype ? z->count : zero->wide_count;
    for (size_t at = 0, n; at < z->count; at += n) {
        n = z->count - at < most ? z->count - at : most;
        dt__update_span piece = { .offset = z->offset + at,
            .count = n,
            .grad = dt__grad_widen(zero, z, dt__grad_element(z, dt__zero_grad_shard(z), at), n),
            .state = { NULL, NULL },
            .master = z->master ? (char *)z->master + at * size : NULL,
            .ema = z->ema ? (char *)z->ema + at * size : NULL,
            .values = (char *)dt__zero_param_shard(z) + at * narrow };
        for (int k = 0; k < z->states; k++) piece.state[k] = dt__zero_element(z, z->state[k], at);
        if (dt__masters_init(zero, z, &piece, piece.values) != DT_OK ||
            dt__zero_update_span(zero, z, &piece, grad_scale) != DT_OK)
            break;
    }
    return dt_error(zero->ctx);
}

/* Mixed precision with master weights (arXiv:1710.03740). The update changes the f32 master weight,
   and rounds the result to the 16-bit parameter. In 16 bits, updates much smaller than the weight
   would be lost:

       grad f32 --> master f32, m, v --> round --> parameter bf16 or f16

   Updates this rank's shard of all buckets whose parameter group steps. ZeRO-1 and ZeRO-2
   all-gather each bucket's parameters while the next bucket is updated. */
static dt_status dt__zero_update_all(dt_zero *zero, double grad_scale) {
    int offloaded = dt__zero_offloads(zero),
        gathers = zero->stage->shard_optim && !zero->stage->shard_params;
    for (int u = 0; u < zero->n_buckets; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        int first = z->bucket.paused && z->group->steps_now && z->group->step == 0;
        if (first && !dt__is_dry_run(zero) && dt__paused_masters_init(zero, z) != DT_OK)
            return dt_error(zero->ctx);
    }
    if (offloaded && dt__offload_update(zero, grad_scale) != DT_OK) return dt_error(zero->ctx);
    if (zero->muon && dt__muon_update(zero, grad_scale) != DT_OK) return dt_error(zero->ctx);
    for (int u = 0; u <= zero->n_buckets; u++) {
        dt__zero_bucket *z = u < zero->n_buckets ? &zero->buckets[u] : NULL;
        if (z && !dt__zero_steps_now(z)) z = NULL;
        if (z && dt__onebit_frozen(zero) && dt__onebit_momentum(zero, z, grad_scale) != DT_OK)
            return dt_error(zero->ctx);
        if (z && !offloaded && dt__zero_update_bucket(zero, z, grad_scale) != DT_OK)
            return dt_error(zero->ctx);
        if (u > 0 && dt__zero_work_wait(zero, &zero->buckets[u - 1]) != DT_OK)
            return dt_error(zero->ctx);
        if (z && gathers)
            z->work = dt_all_gather_start(
                z->shard_group, dt__zero_param_shard(z), z->bucket.data, z->count, z->bucket.dtype);
    }
    return dt_error(zero->ctx);
}

// ==== 14. I/O thread ============================================================================

/* I/O thread. A rank has at most one, which offload to a folder and background saves share.
   Requests wait in one queue; those of offload go first, because a step waits for them:

       offload          read, read, write --+
                                            +--> queue --> one piece at a time --> io table
       background save  write, ..., fsync --+

   A piece is a transfer of at most DT__IO_BUFFER bytes, or one fsync, rename or other operation. A
   request of offload waits for at most one piece of a save. A save syncs every DT__SYNC_BYTES;
   otherwise its fsync at the end would delay offload for seconds.

   If the thread completes no piece for timeout_s seconds, the rank abandons it. The thread has
   copied to its own memory all that its disk access needs, so the rank can free the rest. When the
   access returns, the thread closes the descriptors that the rank has left to it, and ends; the
   thread's own memory is not freed.

   A thread that only saves checkpoints gets priority 19. A thread that serves offload keeps its
   priority, because a busy machine would delay the steps, and raising it again needs privilege. */

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
    dt__writer_transfer(&t->writer, t->path[0], t->fd, t->op.kind == DT__OP_WRITE, t->doing,
        t->buffer, t->op.bytes, t->op.offset, t->base);
    if (t->writer.why[0] || !t->sync_bytes || !io->sync_and_evict) return;
    errno = 0;
    if (io->sync_and_evict(io->user, t->fd, t->sync_bytes, t->sync_from) != 0)
        dt__writer_fail(&t->writer, t->path[0], t->doing);
}

/* Does one piece of the first request. Releases the caller's lock during the piece; if the thread
   is abandoned meanwhile, touches neither the request nor its files and data. */
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
    snprintf(t->doing, sizeof t->doing, r->what ? "%s %s" : "%s", names[op->kind], r->what);
    if (moves) {
        int64_t left = op->bytes - r->done, *unsynced = &f->unsynced[op->file];
        t->op.offset += r->done;
        t->op.bytes = left < DT__IO_BUFFER ? left : (int64_t)DT__IO_BUFFER;
        t->base = t->sync_from = r->background ? 0 : op->offset;
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

/* If the thread has completed no piece for timeout_s, abandons it, fails the context, returns 1. */
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

/* Fails the context if snprintf has written a path of `length` bytes, more than fit. */
static dt_status dt__path_check(dt_ctx *ctx, const char *func, const char *path, int length) {
    if (length < DT__PATH_BYTES) return dt_error(ctx);
    return dt_fail(ctx, DT_ERR_ARG, "%s: %.80s...: a path of at most %d bytes is needed", func,
        path, DT__PATH_BYTES - 1);
}

static void dt__files_init(dt_ctx *ctx, dt__files *f) {
    memset(f, 0, sizeof *f);
    f->writer.io = *dt_ctx_io(ctx);
    for (int i = 0; i < DT__PATHS; i++) f->fd[i] = -1;
}

/* Cancels the requests for these files, waits for the piece in progress, and closes the files 0 to
   end - 1. If the thread is abandoned, it closes them, because close may hang too. */
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

// ==== 15. Offload ===============================================================================

/* CPU offload and NVMe offload ("ZeRO-Infinity", S. Rajbhandari et al., arXiv:2104.07857):
   optimizer state, and at stage 3 the parameters, are in host memory or in a file. The update runs
   on the CPU, one chunk of a rank's shard at a time. Three sets of buffers let one chunk be read,
   one be updated and one be written at the same time:

       time ->
       read      chunk 0   chunk 1   chunk 2   chunk 3
       update              chunk 0   chunk 1   chunk 2   chunk 3
       write                         chunk 0   chunk 1   chunk 2   chunk 3

   The rank's I/O thread (section 14) reads and writes the file.

   The file has two slots, each for all arrays of this rank that are on disk, except gradients. A
   step reads a bucket's arrays from one slot and writes them to the other slot. The slots of the
   updated buckets swap only after every rank has written all of its chunks, so a step that fails on
   one rank changes no rank's data. For the same reason parameters in memory change last: the
   updated parameters of a chunk overwrite the chunk's gradient, and are copied to the parameters
   after every rank has succeeded. Optimizer state in host memory is updated in place: a failed step
   loses it.

   If both the optimizer state and the parameters are in the file, the gradients are too, after the
   two slots. This rank's shard is written when the gradient of a micro-batch has been reduced, read
   to add the next micro-batch's gradient, and read chunk by chunk in the update.

   Written data is dropped from the page cache. The file is unlinked directly after it is opened, so
   it disappears when the process ends, even if the process is killed. */

enum { DT__DISK_NAMES = 1000 };
/* Names of the arrays of a bucket, for messages. */
static const char *const dt__array_names[DT__ARRAYS] = { "optimizer state", "optimizer state",
    "master parameters", "EMA of the weights", "values", "gradients" };

struct dt__disk {
    dt__files files;
    int64_t slot_bytes;
};

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
/* Returns the bytes of an array (DT__STATE_0 to DT__GRAD) of a bucket in the file, 0 if none. */
static size_t dt__disk_array_bytes(const dt_zero *zero, const dt_bucket *bucket, int array) {
    size_t count = ((const dt__zero_bucket *)bucket)->count;
    int states = ((const dt__zero_bucket *)bucket)->states,
        present = array == DT__MASTER ? dt__zero_has_master(bucket) : array < states;
    if (array == DT__EMA) present = zero->desc.ema_decay > 0;
    present &= dt__on_disk(zero->desc.offload_optim) && !bucket->frozen;
    if (array == DT__GRAD) present = bucket->grad_offloaded;
    if (array == DT__PARAMS) present = dt__on_disk(zero->desc.offload_params);
    if (!present) return 0;
    return count * dt_dtype_size(dt__array_dtype(bucket, array));
}

/* Returns the offset in the file of an array of bucket u, in the given slot. Gradients are after
   both slots. With u = n_buckets, the result is the end of
   the slot's arrays or, if array is DT__GRAD, of the file. */
static int64_t dt__disk_offset(const dt_zero *zero, int u, int array, int slot) {
    int grad = array == DT__GRAD;
    int64_t at = (grad ? 2 : slot) * zero->disk->slot_bytes;
    for (int i = 0; i <= u && i < dt_bucket_count(zero->ctx); i++)
        for (int a = 0; a < DT__ARRAYS; a++)
            if ((a == DT__GRAD) == grad && (i < u || a < array))
                at += (int64_t)dt__disk_array_bytes(zero, dt_bucket_get(zero->ctx, i), a);
    return at;
}

/* Starts to transfer bytes [at, at + bytes) of an array of bucket u, in the given slot. */
static void dt__disk_start(dt_zero *zero, dt__io_request *job, int write, int u, int array,
    int slot, size_t at, void *memory, size_t bytes) {
    if (!zero->disk->files.thread) return; /* in a dry run */
    dt__file_op op = { write ? DT__OP_WRITE : DT__OP_READ, DT__OFFLOADED, DT__OFFLOADED, memory,
        (int64_t)bytes, dt__disk_offset(zero, u, array, slot) + (int64_t)at };
    *job = (dt__io_request){
        .files = &zero->disk->files, .op = op, .what = dt__array_names[array], .device = job->device
    };
    job->ops = &job->op;
    job->n_ops = 1;
    dt__io_start(job);
}

/* Starts to transfer this rank's shard of an array of bucket u to or from `memory`. Device memory
   is transferred through a copy in host memory, which dt__disk_end frees. */
static dt_status dt__disk_begin(
    dt_zero *zero, dt__io_request *job, int write, int u, int array, void *memory, size_t bytes) {
    dt_ctx *ctx = zero->ctx;
    if (zero->update_kernels != &ctx->kernels) {
        void *host = dt_alloc(ctx, DT_MEM_HOST, bytes, "a copy for the disk");
        if (!host) return dt_error(ctx);
        if (write) dt__move_now(ctx, host, memory, bytes);
        job->device = memory;
        memory = host;
    }
    dt__disk_start(zero, job, write, u, array, zero->buckets[u].disk_slot, 0, memory, bytes);
    return dt_error(ctx);
}

static void dt__disk_end(dt_zero *zero, dt__io_request *job, int arrived) {
    void *host = job->op.data;
    size_t bytes = (size_t)job->op.bytes;
    if (!job->device) return;
    if (arrived && job->op.kind == DT__OP_READ) dt__move_now(zero->ctx, job->device, host, bytes);
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

static dt_status dt__disk_open(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    const char *o = zero->desc.offload_optim, *p = zero->desc.offload_params,
               *folder = dt__on_disk(o) ? o : p;
    if (!dt__on_disk(folder)) return DT_OK;
    dt__disk *d = (dt__disk *)dt__host_zeroed(ctx, sizeof *d, "offload");
    if (!d) return dt_error(ctx);
    dt__files_init(ctx, &d->files);
    zero->disk = d;
    d->slot_bytes = dt__disk_offset(zero, dt_bucket_count(ctx), 0, 0);
    dt__writer *w = &d->files.writer;
    char *path = d->files.path[DT__OFFLOADED];
    int fd = -1;
    /* create the file under a name that is not in use; the file is unlinked below */
    for (int other = 0; fd < 0 && other < DT__DISK_NAMES; other++) {
        char number[16] = "";
        if (other) snprintf(number, sizeof number, ".%d", other);
        int length = snprintf(
            path, DT__PATH_BYTES, "%s/dt-rank-%d%s.offload", folder, dt_ctx_rank(ctx), number);
        if (dt__path_check(ctx, "dt_zero_make: offload", folder, length) != DT_OK)
            return dt_error(ctx);
        /* a dry run needs the memory, but no file */
        if (dt__is_dry_run(zero)) return dt__io_thread_make(zero) ? DT_OK : dt_error(ctx);
        fd = dt__open(&w->io, path, DT_IO_PRIVATE);
        if (fd < 0 && errno != EEXIST) break;
    }
    d->files.fd[DT__OFFLOADED] = fd;
    if (fd < 0) dt__writer_fail(w, path, "open");
    errno = 0;
    if (fd >= 0 && w->io.remove(w->io.user, path) != 0) dt__writer_fail(w, path, "remove");
    if (!w->why[0]) /* the file's zeros are the first optimizer state */
        dt__writer_resize(w, path, fd, dt__disk_offset(zero, dt_bucket_count(ctx), DT__GRAD, 0));
    if (dt__files_check(ctx, &d->files, "dt_zero_make: offload") != DT_OK) return dt_error(ctx);
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
    int masters = 0, states = 0, on_disk = dt__on_disk(zero->desc.offload_optim);
    if (!dt__zero_offloads(zero)) return DT_OK;
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        if (dt__zero_element_size(z) > element) element = dt__zero_element_size(z);
        if (z->count > longest) longest = z->count;
        masters |= dt__zero_has_master(&z->bucket);
        if (z->states > states) states = z->states;
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
                     (a == DT__MASTER && on_disk && masters) || (a < states && on_disk) ||
                     (a == DT__EMA && on_disk && zero->desc.ema_decay > 0);
        void **buf = &zero->chunks[i / DT__ARRAYS].buf[i % DT__ARRAYS];
        if (needed) *buf = dt_pin(zero->ctx, zero->chunk_bytes, "chunks of offloaded state");
        if (needed && !*buf) return dt_error(zero->ctx);
    }
    return DT_OK;
}

/* ---- offloaded parameters ---- */

/* Stores the values at `shard` as this rank's shard of the bucket's parameters. */
static dt_status dt__params_store(
    dt_zero *zero, dt__zero_bucket *z, dt_bucket *bucket, void *shard) {
    size_t bytes = bucket->shard_count * dt_dtype_size(bucket->dtype);
    if (dt__on_disk(zero->desc.offload_params)) {
        if ((!zero->disk && dt__disk_open(zero) != DT_OK) ||
            dt__disk_wait(zero, &z->disk_job) != DT_OK ||
            dt__disk_begin(zero, &z->disk_job, 1, bucket->index, DT__PARAMS, shard, bytes) != DT_OK)
            return dt_error(zero->ctx);
        return dt__disk_wait(zero, &z->disk_job);
    }
    if (!dt__in_host(zero->desc.offload_params))
        return dt__move(zero->ctx, bucket->shard, shard, bytes);
    if (!z->host_shard) z->host_shard = dt_pin(zero->ctx, bytes, "parameters in host memory");
    return z->host_shard ? dt__move(zero->ctx, z->host_shard, shard, bytes) : dt_error(zero->ctx);
}

/* Acquires a buffer for a bucket's gathered parameters, and starts to read this rank's shard into
   it if the parameters are offloaded. */
static dt_status dt__params_read_start(dt_zero *zero, dt__zero_bucket *z) {
    const dt_bucket *u = &z->bucket;
    size_t size = dt_dtype_size(u->dtype);
    z->gathered = dt__buffer_acquire(zero->ctx, DT_MEM_COMM, u->padded * size);
    char *mine = z->gathered ? (char *)z->gathered + u->shard_offset * size : NULL;
    if (mine && z->host_shard)
        return dt__move(zero->ctx, mine, z->host_shard, u->shard_count * size);
    if (mine && zero->disk && !u->shard)
        dt__disk_begin(zero, &z->disk_job, 0, u->index, DT__PARAMS, mine, u->shard_count * size);
    return dt_error(zero->ctx);
}

/* Returns the memory of this rank's shard of an array, NULL if it is on disk. */
static char *dt__array_memory(const dt__zero_bucket *z, int array) {
    return (char *)(array == DT__PARAMS        ? z->host_shard ? z->host_shard : z->bucket.shard
                    : array == DT__MASTER      ? z->master
                    : array == DT__EMA         ? z->ema
                    : array < DT__MASTER       ? z->state[array]
                    : z->bucket.grad_offloaded ? NULL
                                               : dt__zero_grad_shard(z));
}

/* Copies bytes [at, at + bytes) of this rank's shard of an array, wherever it is, to `host`, or
   with write = 1 from `host`. */
static dt_status dt__array_access(
    dt_zero *zero, dt__zero_bucket *z, int array, int write, size_t at, void *host, size_t bytes) {
    char *here = dt__array_memory(z, array);
    if (here)
        return dt__move_now(zero->ctx, write ? here + at : host, write ? host : here + at, bytes);
    dt__io_request *job = array == DT__GRAD ? &z->grad_job : &z->disk_job;
    if (dt__disk_wait(zero, job) != DT_OK) return dt_error(zero->ctx);
    dt__disk_start(zero, job, write, z->bucket.index, array, z->disk_slot, at, host, bytes);
    return dt__disk_wait(zero, job);
}

/* Copies `count` elements of this rank's shard of the step's gradient. */
static dt_status dt__grads_copy_out(
    dt_zero *zero, dt__zero_bucket *z, size_t element, void *host, size_t count) {
    size_t size = dt_dtype_size(z->bucket.sum_dtype);
    return dt__array_access(zero, z, DT__GRAD, 0, element * size, host, count * size);
}

/* ---- gradients on disk ---- */

/* Acquires a buffer for this rank's shard of a bucket's gradient, and starts to read the sum of
   earlier micro-batches into it. */
static dt_status dt__grads_read_start(dt_zero *zero, dt__zero_bucket *z) {
    size_t bytes = z->count * dt_dtype_size(z->bucket.sum_dtype);
    z->bucket.grad = dt__buffer_acquire(zero->ctx, DT_MEM_COMM, bytes);
    if (z->bucket.grad && z->bucket.micros > 0)
        dt__disk_begin(zero, &z->grad_job, 0, z->bucket.index, DT__GRAD, z->bucket.grad, bytes);
    return dt_error(zero->ctx);
}

static dt_status dt__grads_write_start(dt_zero *zero, dt__zero_bucket *z) {
    return dt__disk_begin(zero, &z->grad_job, 1, z->bucket.index, DT__GRAD, z->bucket.grad,
        z->count * dt_dtype_size(z->bucket.sum_dtype));
}

/* Waits until gradients that are being written are on disk, and releases their buffers. */
static dt_status dt__grads_write_end(dt_zero *zero) {
    for (int u = 0; u < zero->n_buckets; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        if (!z->bucket.grad_offloaded || !z->bucket.grad ||
            z->bucket.grad_state == DT_GRAD_REDUCING)
            continue;
        if (dt__disk_wait(zero, &z->grad_job) != DT_OK) return dt_error(zero->ctx);
        dt__buffer_release(zero->ctx, z->bucket.grad);
        z->bucket.grad = NULL;
    }
    return dt_error(zero->ctx);
}

/* ---- the offloaded update ---- */

/* Sets *s to the chunk after `before`, or to the first chunk if `before` is NULL. Returns 1; 0
   after the last chunk. */
static int dt__chunk_next(
    const dt_zero *zero, dt__offload_chunk *s, const dt__offload_chunk *before) {
    if (zero->n_buckets == 0) return 0; /* a pipeline stage without parameters */
    int u = before ? before->bucket : 0;
    size_t first = before ? before->offset + before->count : zero->buckets[0].offset;
    while (!dt__zero_steps_now(&zero->buckets[u]) ||
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

/* Returns 1 if the update of a chunk needs the parameters' values. Without master weights it
   changes them, and in the group's first step it makes the master weights from them. Later steps
   write the values of all trained parameters, but keep those of frozen parameters and padding. */
static int dt__chunk_needs_values(const dt_zero *zero, const dt__offload_chunk *s) {
    const dt__zero_bucket *z = &zero->buckets[s->bucket];
    const dt_bucket *u = &z->bucket;
    size_t end = s->offset + s->count, written = 0;
    if (!dt__zero_has_master(u) || z->group->step == 0) return 1;
    for (int i = u->first_param; i < u->first_param + u->n_params; i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        size_t from = t->param->offset, to = from + t->param->count;
        if (from < s->offset) from = s->offset;
        if (to > end) to = end;
        if (t->needs_grad && from < to) written += to - from;
    }
    return written < s->count;
}

/* Starts to read or to write those arrays of a chunk that are on disk. Master weights and EMA are
   made from the parameters in the group's first step. */
static void dt__chunk_transfer(dt_zero *zero, dt__offload_chunk *s, int write) {
    const dt__zero_bucket *z = &zero->buckets[s->bucket];
    for (int a = 0; a < DT__ARRAYS && zero->disk; a++) {
        size_t size = dt_dtype_size(dt__array_dtype(&z->bucket, a));
        int unread = ((a == DT__MASTER || a == DT__EMA) && z->group->step == 0) ||
                     (a == DT__PARAMS && !dt__chunk_needs_values(zero, s));
        if (dt__disk_array_bytes(zero, &z->bucket, a) == 0 || (write ? a == DT__GRAD : unread))
            continue;
        dt__disk_start(zero, &s->job[a], write, s->bucket, a, z->disk_slot ^ write,
            (s->offset - z->offset) * size, s->buf[a], s->count * size);
    }
}

/* Updates one chunk on the CPU. */
static dt_status dt__chunk_update(dt_zero *zero, dt__offload_chunk *s, double grad_scale) {
    dt_ctx *ctx = zero->ctx;
    dt__zero_bucket *z = &zero->buckets[s->bucket];
    const dt_bucket *u = &z->bucket;
    size_t size = dt__zero_element_size(z), narrow = dt_dtype_size(u->dtype),
           at = s->offset - z->offset, bytes = s->count * dt_dtype_size(u->sum_dtype);
    int on_disk = dt__disk_array_bytes(zero, u, DT__PARAMS) > 0,
        same_size = bytes == s->count * narrow;
    char *grad = (char *)(u->grad_offloaded ? s->buf[DT__GRAD]
                                            : dt__grad_element(z, dt__zero_grad_shard(z), at));
    dt__update_span span = {
        .offset = s->offset, .count = s->count, .grad = grad, .state = { NULL, NULL }
    };
    for (int a = 0; a <= DT__EMA; a++) {
        char *full = dt__array_memory(z, a);
        void *here = full ? full + at * size : dt__disk_array_bytes(zero, u, a) ? s->buf[a] : NULL;
        void **to = a == DT__MASTER ? &span.master : a == DT__EMA ? &span.ema : &span.state[a];
        *to = here;
    }
    if (!on_disk && dt__chunk_needs_values(zero, s))
        dt__move(ctx, s->buf[DT__PARAMS], (char *)dt__zero_param_shard(z) + at * narrow,
            s->count * narrow);
    if (s->buf[DT__GRAD] && grad != s->buf[DT__GRAD])
        dt__move(ctx, span.grad = s->buf[DT__GRAD], grad, bytes);
    if (dt__sync(ctx) != DT_OK) return dt_error(ctx);
    span.grad = dt__grad_widen(zero, z, span.grad, s->count);
    if (dt__masters_init(zero, z, &span, s->buf[DT__PARAMS]) != DT_OK) return dt_error(ctx);
    /* what dt__offload_commit copies: the values or, for f32 gradients of 16-bit parameters, the
       master weights, which it rounds; they fit into the gradient's memory */
    span.values = on_disk || same_size ? s->buf[DT__PARAMS] : NULL;
    if (dt__zero_update_span(zero, z, &span, grad_scale) != DT_OK || on_disk) return dt_error(ctx);
    /* waits, because the buffers may next be used for another chunk */
    return dt__move_now(ctx, grad, same_size ? s->buf[DT__PARAMS] : span.master, bytes);
}

/* Copies the updated parameters from the gradient's memory, where dt__chunk_update put them. */
static dt_status dt__offload_commit(dt_zero *zero, dt__zero_bucket *z) {
    dt_ctx *ctx = zero->ctx;
    const dt_bucket *u = &z->bucket;
    size_t size = dt_dtype_size(u->sum_dtype), narrow = dt_dtype_size(u->dtype);
    if (!dt__zero_steps_now(z) || dt__disk_array_bytes(zero, u, DT__PARAMS) > 0)
        return dt_error(ctx);
    for (size_t at = 0, n; at < z->count; at += n) {
        char *from = (char *)dt__zero_grad_shard(z) + at * size,
             *to = (char *)dt__zero_param_shard(z) + at * narrow;
        /* if the shard is in host memory and a cast is needed, the CPU casts from a host copy */
        void *host = z->host_shard && size != narrow ? zero->chunks[0].buf[DT__GRAD] : NULL;
        n = z->count - at < zero->chunk_elements ? z->count - at : zero->chunk_elements;
        if (host && dt__move_now(ctx, host, from, n * size) != DT_OK) return dt_error(ctx);
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

static dt_status dt__offload_update(dt_zero *zero, double grad_scale) {
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
        if (dt__chunk_wait(zero, now) != DT_OK || dt__chunk_update(zero, now, grad_scale) != DT_OK)
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
    for (int u = 0; u < zero->n_buckets; u++)
        zero->buckets[u].disk_slot ^= dt__zero_steps_now(&zero->buckets[u]);
    return DT_OK;
}

// ==== 16. 1-bit Adam ============================================================================

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
    if (d->group_count > 0)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: DT_ONEBIT_ADAM is for all parameters: .group_count must be 0, not %d",
            d->group_count);
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
static size_t dt__onebit_message_bytes(const dt__zero_bucket *z) {
    return z->bucket.padded / (size_t)dt_comm_size(z->data_group) / 8 + sizeof(double);
}

static dt_status dt__onebit_make(dt_zero *zero) {
    for (int u = 0; u < zero->n_buckets; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        size_t N = (size_t)dt_comm_size(z->data_group), bytes = 2 * N * dt__onebit_message_bytes(z);
        zero->messages_bytes = bytes > zero->messages_bytes ? bytes : zero->messages_bytes;
        for (int e = 0; e < 2 && !z->bucket.frozen; e++) {
            size_t count = e ? z->bucket.padded / N : z->bucket.padded;
            /* stored for dt_free, because the groups may be freed before the errors */
            z->error_bytes[e] = count * dt__zero_element_size(z);
            z->errors[e] =
                dt_alloc(zero->ctx, DT_MEM_OPTIM, z->error_bytes[e], "errors of 1-bit Adam");
            if (!z->errors[e]) return dt_error(zero->ctx);
            if (dt__fill(zero->ctx, z->bucket.grad_dtype, z->errors[e], count, 0) != DT_OK)
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
    dt_bucket *u = &z->bucket;
    dt_dtype type = u->grad_dtype;
    size_t N = (size_t)dt_comm_size(z->data_group), r = (size_t)dt_comm_rank(z->data_group),
           n_shard = u->padded / N;
    size_t bytes = dt__onebit_message_bytes(z), words = bytes / sizeof(int32_t);
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

// ==== 17. Muon ==================================================================================

/* Muon (K. Jordan et al., https://kellerjordan.github.io/posts/muon/; distributed as in J. Liu et
   al., "Muon is Scalable for LLM Training", arXiv:2502.16982). The update of a matrix is its
   momentum, orthogonalized: all singular values become about 1. With the gradient g:

       momentum         m = mu m + (1 - mu) g;  u = mu m + (1 - mu) g (Nesterov), or u = m
       Newton-Schulz    x = u / |u|_F, then 5 times  x = 3.4445 x + (-4.7750 a + 2.0315 a a) x,
                        where a = x x^T; if x has more rows than columns, the same on x^T
       update           p -= lr (scale x + weight_decay p), scale = 0.2 sqrt(max(rows, columns))

   The iteration needs the whole matrix, but each rank has only pieces of it: tp and ep shard the
   parameter, ZeRO shards the momentum. So each matrix has an owner, one of the ranks that hold a
   piece. The owner gathers the pieces, runs Newton-Schulz once, and sends each rank its piece of
   the result, which overwrites the gradient there. The ranks of a pipeline stage share the work:

       rank 0   [a][b][c]    \          / owner of matrix 0:  gather a0 b0 c0 -> x -> pieces \
       rank 1   [a][b][c]     > pieces <  owner of matrix 1:  gather a1 b1 c1 -> x -> pieces  > ...
       rank 2   [a][b][c]    /          \ owner of matrix 2:  gather a2 b2 c2 -> x -> pieces /

   A piece that several ranks hold is sent by one of them, and each gets the result. The owners are
   chosen by the cost rows * columns * min(rows, columns), the most expensive matrix first, each for
   the rank with the least work so far. The arithmetic of a matrix does not depend on its owner, so
   layouts whose gradients have the same bits make the same update, bit for bit.

   Rounds bound the memory: in a round an owner gathers matrices of at most bucket_bytes, or one
   matrix. Pieces travel as an all-to-all of pairs: in step d rank r exchanges with r + d and
   r - d. Memory of a rank from the first update on, where M is the larger of bucket_bytes and the
   bytes of the largest matrix (but no more than all matrices that one rank owns), and S is the
   largest min(rows, columns) of a matrix:

       DT_MEM_COMM   2 M bytes: a message to send and one received; 0 if the stage has one rank
       DT_MEM_TEMP   2 M bytes and 2 S^2 elements: the gathered matrices; next x, a, a a of one
       DT_MEM_HOST   160 bytes for each parameter and rank of the stage: which rank holds what

   If N ranks of a stage hold equal parts, they send (N-1)/N of all elements to the owners, and as
   much back. Ranks that hold copies of the momentum (ZeRO-0) send only results, N-1 times. */

/* Which elements of a parameter's momentum a rank holds: elements [from, to) of its local slice.
   first_copy: the lowest rank that holds exactly the same ones. */
typedef struct dt__muon_shard {
    dt_local_slice slice;
    int64_t from, to;
    int first_copy;
} dt__muon_shard;

typedef struct dt__muon_matrix {
    int slot;                  /* of the parameter, in dt__muon.params */
    int64_t index, rows, cols; /* index: among the matrices of the parameter */
    int owner, round, steps;   /* steps: 1 if the matrix is updated in the current step */
    size_t at, bytes;          /* its place in the owner's `gathered` */
} dt__muon_matrix;

struct dt__muon {
    dt_comm *group; /* the ranks of this pipeline stage */
    int ranks, me;
    const dt_tensor **params;  /* (n_params) the parameters that Muon updates */
    dt__muon_shard *shards;    /* (n_params, ranks) */
    dt__muon_matrix *matrices; /* (n_matrices) of all ranks, in the order of rounds */
    int n_params, n_matrices, n_rounds;
    int *round_end; /* (n_rounds) index of the first matrix after the round */
    double *sums;   /* (n_sums) sums of squares of a matrix, one for each DT_PIECE elements */
    size_t n_sums, gathered_bytes, work_bytes, message_bytes;
    char *gathered, *work, *message[2]; /* during an update; message: [0] to send, [1] received */
};

static dt__muon_shard *dt__muon_shard_of(const dt__muon *m, int slot, int rank) {
    return &m->shards[slot * m->ranks + rank];
}

/* Returns the bucket of a parameter in m->params. */
static const dt__zero_bucket *dt__muon_bucket(const dt_zero *zero, int slot) {
    return &zero->buckets[zero->muon->params[slot]->param->bucket->index];
}

/* Returns 1 if a parameter is updated in this step: its group steps, and it is not frozen. */
static int dt__muon_steps(const dt_zero *zero, int slot) {
    return dt__zero_steps_now(dt__muon_bucket(zero, slot)) && zero->muon->params[slot]->needs_grad;
}

/* ---- pieces of a matrix ---- */

/* Iterates over the elements of a matrix that a rank holds, as blocks: `rows` runs of `count`
   elements, which begin at `local` in the local slice and at `at` in the matrix. The strides are
   those from one run to the next. */
typedef struct dt__muon_block {
    int64_t local, at, count, rows, local_stride, stride;
} dt__muon_block;
typedef struct dt__muon_walk {
    dt__slice_walk runs;
    const dt__muon_shard *shard;
    int64_t base;        /* index of the matrix's first element in the local slice */
    dt__muon_block next; /* a run that is not part of the last block; count 0: none */
} dt__muon_walk;

static dt__muon_walk dt__muon_begin(const dt__muon *m, const dt__muon_matrix *x, int rank) {
    dt__muon_walk w;
    memset(&w, 0, sizeof w);
    w.shard = dt__muon_shard_of(m, x->slot, rank);
    const dt_param_info *p = m->params[x->slot]->param;
    dt_local_slice inner; /* the matrix's part of the slice: its trailing dimensions */
    dt_shape shape = { .nd = p->full.nd - p->desc.matrices };
    memset(&inner, 0, sizeof inner);
    int64_t size = 1, index = x->index, outside = 0;
    for (int i = p->full.nd - 1; i >= 0; i--) {
        const dt_local_slice *s = &w.shard->slice;
        int at = i - p->desc.matrices;
        if (at >= 0) {
            shape.d[at] = p->full.d[i];
            inner.lo[at] = s->lo[i], inner.n[at] = s->n[i], inner.inside[at] = s->inside[i];
        } else {
            int64_t of_dim = index % p->full.d[i] - s->lo[i];
            index /= p->full.d[i];
            outside |= of_dim < 0 || of_dim >= s->inside[i];
            w.base += of_dim * size;
        }
        size *= s->n[i];
    }
    w.runs = dt__slice_begin(shape, inner);
    w.runs.done |= outside != 0;
    return w;
}

/* Sets w->next to the next run of elements of the rank's momentum; its count is 0 at the end. */
static void dt__muon_run(dt__muon_walk *w) {
    w->next.count = 0;
    while (w->next.count == 0 && dt__slice_next(&w->runs)) {
        int64_t begin = w->base + w->runs.local, end = begin + w->runs.count;
        int64_t from = begin > w->shard->from ? begin : w->shard->from;
        int64_t to = end < w->shard->to ? end : w->shard->to;
        if (from < to)
            w->next = (dt__muon_block){
                .local = from, .at = w->runs.global + from - begin, .count = to - from, .rows = 1
            };
    }
}

static int dt__muon_next(dt__muon_walk *w, dt__muon_block *block) {
    if (w->next.count == 0) dt__muon_run(w);
    *block = w->next;
    if (block->count == 0) return 0;
    for (dt__muon_run(w); w->next.count == block->count; dt__muon_run(w)) {
        int64_t local_stride =
                    w->next.local - block->local - (block->rows - 1) * block->local_stride,
                stride = w->next.at - block->at - (block->rows - 1) * block->stride;
        if (block->rows > 1 && (local_stride != block->local_stride || stride != block->stride))
            break;
        block->local_stride = local_stride;
        block->stride = stride;
        block->rows++;
    }
    return 1;
}

/* Returns the number of elements of a matrix whose momentum a rank holds. */
static int64_t dt__muon_count(const dt__muon *m, const dt__muon_matrix *x, int rank) {
    int64_t count = 0;
    dt__muon_block b;
    dt__muon_walk w = dt__muon_begin(m, x, rank);
    while (dt__muon_next(&w, &b)) count += b.rows * b.count;
    return count;
}

/* Returns 1 if a rank sends its piece to the owner: of several copies the owner's own, else that of
   the lowest rank. */
static int dt__muon_sends(const dt__muon *m, const dt__muon_matrix *x, int rank) {
    int copy = dt__muon_shard_of(m, x->slot, rank)->first_copy;
    return dt__muon_shard_of(m, x->slot, x->owner)->first_copy == copy ? rank == x->owner
                                                                       : rank == copy;
}

/* ---- one round: gather, orthogonalize, send back ---- */

/* Moves a piece of a matrix between this rank's two arrays, or between an array and a message.
   owner: where the piece is in the gathered matrix, holder: in the holder's gradient; each is NULL
   on another rank, where `message` takes its place. back: 1 from the owner to the holder. */
static dt_status dt__muon_copy(dt_zero *zero, const dt__muon_block *b, size_t size, char *owner,
    char *holder, char *message, int back) {
    size_t dense = (size_t)b->count * size;
    size_t owner_stride = owner ? (size_t)b->stride * size : dense;
    size_t holder_stride = holder ? (size_t)b->local_stride * size : dense;
    if (!owner) owner = message;
    if (!holder) holder = message;
    dt_copy_args a = { .out = back ? holder : owner,
        .in = back ? owner : holder,
        .rows = (size_t)b->rows,
        .row_bytes = dense,
        .out_stride = back ? holder_stride : owner_stride,
        .in_stride = back ? owner_stride : holder_stride };
    if (b->rows == 1) a.out_stride = a.in_stride = dense;
    return DT__KERNEL(zero->ctx, "Muon", copy, &a);
}

/* Moves all pieces of the round's matrices of `owner` that `holder` has, to or from a message. One
   of the two is this rank. Returns the message's bytes. If `message` is NULL, only counts. */
static size_t dt__muon_pieces(
    dt_zero *zero, int round, int owner, int holder, int back, char *message) {
    dt__muon *m = zero->muon;
    size_t done = 0;
    for (int i = round ? m->round_end[round - 1] : 0; i < m->round_end[round]; i++) {
        const dt__muon_matrix *x = &m->matrices[i];
        const dt__zero_bucket *z = dt__muon_bucket(zero, x->slot);
        size_t size = dt__zero_element_size(z), first = m->params[x->slot]->param->offset;
        if (!x->steps || x->owner != owner || (!back && !dt__muon_sends(m, x, holder))) continue;
        dt__muon_block b;
        dt__muon_walk w = dt__muon_begin(m, x, holder);
        while (dt__muon_next(&w, &b)) {
            char *at = NULL, *grad = NULL;
            if (message && m->me == owner) at = m->gathered + x->at + (size_t)b.at * size;
            if (message && m->me == holder)
                grad = (char *)dt__zero_element(
                    z, dt__zero_grad_shard(z), first + (size_t)b.local - z->offset);
            if (message && dt__muon_copy(zero, &b, size, at, grad, message + done, back) != DT_OK)
                return 0;
            done += (size_t)(b.rows * b.count) * size;
        }
    }
    return done;
}

/* All-to-all by pairs. Gathers the pieces of the round's matrices at their owners; back: sends each
   rank its pieces of the results. */
static dt_status dt__muon_exchange(dt_zero *zero, int round, int back) {
    dt__muon *m = zero->muon;
    int n = m->ranks, me = m->me;
    dt__muon_pieces(zero, round, me, me, back, m->gathered);
    for (int d = 1; d < n && dt_error(zero->ctx) == DT_OK; d++) {
        int to = (me + d) % n, from = (me + n - d) % n, transfers = 0;
        size_t sent = dt__muon_pieces(
                   zero, round, back ? me : to, back ? to : me, back, m->message[0]),
               received =
                   dt__muon_pieces(zero, round, back ? from : me, back ? me : from, back, NULL);
        dt_transfer t[2];
        memset(t, 0, sizeof t);
        if (sent)
            t[transfers++] =
                (dt_transfer){ .send = m->message[0], .count = sent, .dtype = DT_U8, .peer = to };
        if (received)
            t[transfers++] = (dt_transfer){
                .recv = m->message[1], .count = received, .dtype = DT_U8, .peer = from
            };
        if (transfers && dt_exchange(m->group, t, transfers) != DT_OK) return dt_error(zero->ctx);
        dt__muon_pieces(zero, round, back ? from : me, back ? me : from, back, m->message[1]);
    }
    return dt_error(zero->ctx);
}

/* out = scale in */
static dt_status dt__muon_scaled(
    dt_ctx *ctx, dt_dtype type, void *out, const void *in, double scale, size_t count) {
    dt_unary_args a = {
        .dtype = type, .act = DT_ACT_AFFINE, .out = out, .in = in, .count = count, .scale = scale
    };
    return DT__KERNEL(ctx, "Muon", unary, &a);
}

/* y = p y + q x */
static dt_status dt__muon_combine(
    dt_ctx *ctx, dt_dtype type, void *y, double p, const void *x, double q, size_t count) {
    dt_sum_args a = { .dtype = type, .out = y, .in = x, .outer = 1, .n = 1 };
    a.inner = count;
    a.scale = q;
    a.accumulate = 1;
    if (dt__muon_scaled(ctx, type, y, y, p, count) != DT_OK) return dt_error(ctx);
    return DT__KERNEL(ctx, "Muon", sum, &a);
}

/* Sets *norm to the Frobenius norm of a matrix. */
static dt_status dt__muon_norm(
    dt_zero *zero, dt_dtype type, const void *x, size_t count, double *norm) {
    dt_ctx *ctx = zero->ctx;
    double *sums = zero->muon->sums, sum = 0;
    size_t pieces = (count + DT_PIECE - 1) / DT_PIECE;
    double *out = (double *)dt_scratch(ctx, pieces * sizeof *out);
    dt_square_sums_args a = { type, out, x, count };
    if (!out || DT__KERNEL(ctx, "Muon", square_sums, &a) != DT_OK ||
        dt__move(ctx, sums, out, pieces * sizeof *out) != DT_OK || dt__sync(ctx) != DT_OK)
        return dt_error(ctx);
    for (size_t i = 0; i < pieces; i++) sum += dt__is_dry_run(zero) ? 1 : sums[i];
    *norm = sqrt(sum);
    return DT_OK;
}

/* Newton-Schulz iteration: orthogonalizes a gathered matrix in place. x is not transposed: if it
   has more rows than columns, a = x^T x multiplies x from the right: x a = (a x^T)^T, because a is
   symmetric.
   m->work holds the next x, a and a a. */
static dt_status dt__muon_orthogonalize(dt_zero *zero, const dt__muon_matrix *x) {
    static const double A = 3.4445, B = -4.7750, C = 2.0315, EPS = 1e-7;
    enum { ITERATIONS = 5 };
    dt_ctx *ctx = zero->ctx;
    dt_dtype type = dt_grad_dtype(zero->muon->params[x->slot]);
    size_t size = dt_dtype_size(type), count = (size_t)(x->rows * x->cols);
    int tall = x->rows > x->cols;
    int64_t side = tall ? x->cols : x->rows, other = tall ? x->rows : x->cols;
    char *now = zero->muon->gathered + x->at, *next = zero->muon->work;
    char *gram = next + count * size, *square = gram + (size_t)(side * side) * size;
    double norm = 0;
    if (dt__muon_norm(zero, type, now, count, &norm) != DT_OK ||
        dt__muon_scaled(ctx, type, now, now, 1 / (norm > EPS ? norm : EPS), count) != DT_OK)
        return dt_error(ctx);
    for (int i = 0; i < ITERATIONS && dt_error(ctx) == DT_OK; i++) {
        dt_matmul_args g = { .dtype = type, .c = gram, .a = now, .b = now };
        g.m = g.n = side;
        g.k = other;
        g.trans_a = tall;
        g.trans_b = !tall;
        dt_matmul_args s = { .dtype = type, .c = square, .a = gram, .b = gram };
        s.m = s.n = s.k = side;
        dt_matmul_args p = { .dtype = type, .c = next, .a = tall ? now : square };
        p.b = tall ? square : now;
        p.m = x->rows;
        p.n = x->cols;
        p.k = side;
        p.accumulate = 1;
        dt__matmul(ctx, "Muon", NULL, g);
        dt__matmul(ctx, "Muon", NULL, s);
        dt__muon_combine(ctx, type, square, C, gram, B, (size_t)(side * side));
        dt__muon_scaled(ctx, type, next, now, A, count);
        dt__matmul(ctx, "Muon", NULL, p);
        char *swap = now;
        now = next;
        next = swap;
    }
    /* after an odd number of iterations the result is in m->work */
    return ITERATIONS % 2 ? dt__move(ctx, next, now, count * size) : dt_error(ctx);
}

/* ---- the update ---- */

/* Adds this rank's shard of the gradients to the momentum, and overwrites the gradients with the
   matrices to orthogonalize. */
static dt_status dt__muon_momentum(dt_zero *zero, int slot, double grad_scale) {
    dt__muon *m = zero->muon;
    const dt__zero_bucket *z = dt__muon_bucket(zero, slot);
    const dt_param_group *d = &z->group->desc;
    const dt__muon_shard *s = dt__muon_shard_of(m, slot, m->me);
    dt_dtype type = z->bucket.grad_dtype;
    if (s->from >= s->to || !dt__muon_steps(zero, slot)) return DT_OK;
    size_t count = (size_t)(s->to - s->from),
           at = m->params[slot]->param->offset + (size_t)s->from - z->offset;
    void *momentum = dt__zero_element(z, z->state[0], at),
         *grad = dt__zero_element(z, dt__zero_grad_shard(z), at);
    double mu = d->momentum, share = (1 - mu) * grad_scale;
    if (dt__muon_combine(zero->ctx, type, momentum, mu, grad, share, count) != DT_OK)
        return dt_error(zero->ctx);
    if (d->no_nesterov) return dt__move(zero->ctx, grad, momentum, count * dt_dtype_size(type));
    return dt__muon_combine(zero->ctx, type, grad, share, momentum, mu, count);
}

/* Sets the gradients of the matrices to their orthogonalized momentum. */
static dt_status dt__muon_update(dt_zero *zero, double grad_scale) {
    dt__muon *m = zero->muon;
    dt_ctx *ctx = zero->ctx;
    for (int i = 0; i < m->n_params; i++)
        if (dt__muon_momentum(zero, i, grad_scale) != DT_OK) return dt_error(ctx);
    for (int i = 0; i < m->n_matrices; i++)
        m->matrices[i].steps = dt__muon_steps(zero, m->matrices[i].slot);
    m->gathered = (char *)dt__buffer_acquire(ctx, DT_MEM_TEMP, m->gathered_bytes);
    m->work = (char *)dt__buffer_acquire(ctx, DT_MEM_TEMP, m->work_bytes);
    for (int i = 0; i < 2 && m->message_bytes; i++)
        m->message[i] = (char *)dt__buffer_acquire(ctx, DT_MEM_COMM, m->message_bytes);
    for (int round = 0, i = 0; round < m->n_rounds && dt_error(ctx) == DT_OK; round++) {
        if (dt__muon_exchange(zero, round, 0) != DT_OK) break;
        for (; i < m->round_end[round] && dt_error(ctx) == DT_OK; i++)
            if (m->matrices[i].owner == m->me && m->matrices[i].steps)
                dt__muon_orthogonalize(zero, &m->matrices[i]);
        if (dt_error(ctx) == DT_OK) dt__muon_exchange(zero, round, 1);
    }
    for (int i = 0; i < 2; i++) dt__buffer_release(ctx, m->message[i]);
    dt__buffer_release(ctx, m->work);
    dt__buffer_release(ctx, m->gathered);
    m->gathered = m->work = m->message[0] = m->message[1] = NULL;
    return dt_error(ctx);
}

/* Returns the factor of a matrix's orthogonalized momentum. */
static double dt__muon_scale(const dt_param_group *d, const dt_tensor *t) {
    double rows = 1, cols = (double)t->param->full.d[t->param->full.nd - 1];
    for (int i = t->param->desc.matrices; i < t->param->full.nd - 1; i++)
        rows *= (double)t->param->full.d[i];
    if (d->muon_scale == DT_MUON_ORIGINAL) return sqrt(rows > cols ? rows / cols : 1);
    return 0.2 * sqrt(rows > cols ? rows : cols);
}

/* ---- owners and rounds ---- */

/* Exchanges the shards of all ranks: a sum over the group, to which each rank adds its own row. */
static dt_status dt__muon_shards_make(dt_zero *zero, dt__muon *m) {
    enum { FIELDS = 3 * DT_MAX_DIMS + 2 };
    dt_ctx *ctx = zero->ctx;
    int ranks = m->ranks;
    size_t n = (size_t)m->n_params * (size_t)ranks, bytes = n * FIELDS * sizeof(double);
    m->shards = (dt__muon_shard *)dt_alloc(ctx, DT_MEM_HOST, n * sizeof *m->shards, "Muon");
    double *all = m->shards ? (double *)dt_alloc(ctx, DT_MEM_HOST, bytes, "Muon") : NULL;
    if (!all) return dt_error(ctx);
    memset(all, 0, bytes);
    for (int i = 0; i < m->n_params; i++) {
        const dt_param_info *p = m->params[i]->param;
        const dt__zero_bucket *z = &zero->buckets[p->bucket->index];
        double *row = all + (size_t)(i * ranks + m->me) * FIELDS;
        size_t end = z->offset + z->count;
        for (int k = 0; k < DT_MAX_DIMS; k++) {
            row[k] = (double)p->slice.lo[k];
            row[DT_MAX_DIMS + k] = (double)p->slice.n[k];
            row[2 * DT_MAX_DIMS + k] = (double)p->slice.inside[k];
        }
        row[FIELDS - 2] = z->offset > p->offset ? (double)(z->offset - p->offset) : 0;
        row[FIELDS - 1] = end <= p->offset             ? 0
                          : end < p->offset + p->count ? (double)(end - p->offset)
                                                       : (double)p->count;
    }
    dt_sum_doubles(m->group, all, n * FIELDS);
    for (size_t i = 0; i < n; i++) {
        const double *row = all + i * FIELDS;
        dt__muon_shard *s = &m->shards[i];
        for (int k = 0; k < DT_MAX_DIMS; k++) {
            s->slice.lo[k] = (int64_t)row[k];
            s->slice.n[k] = (int64_t)row[DT_MAX_DIMS + k];
            s->slice.inside[k] = (int64_t)row[2 * DT_MAX_DIMS + k];
        }
        s->from = (int64_t)row[FIELDS - 2];
        s->to = (int64_t)row[FIELDS - 1];
        s->first_copy = 0;
        const double *first = all + (i - i % (size_t)ranks) * FIELDS;
        while (memcmp(first + s->first_copy * FIELDS, row, FIELDS * sizeof *row)) s->first_copy++;
    }
    dt_free(ctx, DT_MEM_HOST, all, bytes);
    return dt_error(ctx);
}

static int64_t dt__muon_cost(const dt__muon_matrix *x) {
    return x->rows * x->cols * (x->rows < x->cols ? x->rows : x->cols);
}

static int dt__muon_by_index(const dt__muon_matrix *a, const dt__muon_matrix *b) {
    return a->slot != b->slot ? (a->slot > b->slot) - (a->slot < b->slot)
                              : (a->index > b->index) - (a->index < b->index);
}
static int dt__muon_by_cost(const void *a, const void *b) {
    const dt__muon_matrix *x = (const dt__muon_matrix *)a, *y = (const dt__muon_matrix *)b;
    int64_t p = dt__muon_cost(x), q = dt__muon_cost(y);
    return p != q ? (p < q) - (p > q) : dt__muon_by_index(x, y);
}
static int dt__muon_by_round(const void *a, const void *b) {
    const dt__muon_matrix *x = (const dt__muon_matrix *)a, *y = (const dt__muon_matrix *)b;
    return x->round != y->round ? x->round - y->round : dt__muon_by_index(x, y);
}

/* Chooses the owner of each matrix: the most expensive matrix first, each for the rank that has the
   least work so far among those that hold a piece. */
static dt_status dt__muon_owners(dt_zero *zero, dt__muon *m) {
    dt_ctx *ctx = zero->ctx;
    int ranks = m->ranks;
    size_t bytes = (size_t)ranks * sizeof(double);
    double *work = (double *)dt_alloc(ctx, DT_MEM_HOST, bytes, "Muon");
    if (!work) return dt_error(ctx);
    for (int r = 0; r < ranks; r++) work[r] = 0;
    qsort(m->matrices, (size_t)m->n_matrices, sizeof *m->matrices, dt__muon_by_cost);
    for (int i = 0; i < m->n_matrices && dt_error(ctx) == DT_OK; i++) {
        dt__muon_matrix *x = &m->matrices[i];
        int64_t held = 0;
        x->owner = -1;
        for (int r = 0; r < ranks; r++) {
            int64_t count = dt__muon_count(m, x, r);
            if (dt__muon_shard_of(m, x->slot, r)->first_copy == r) held += count;
            if (count && (x->owner < 0 || work[r] < work[x->owner])) x->owner = r;
        }
        if (held != x->rows * x->cols)
            dt_fail(ctx, DT_ERR_UNSUPPORTED,
                "dt_zero_make: DT_MUON: the ranks of this pipeline stage hold %lld elements of a "
                "matrix (%lld,%lld) of %s; each must be held once, or as equal copies",
                (long long)held, (long long)x->rows, (long long)x->cols, m->params[x->slot]->name);
        else
            work[x->owner] += (double)dt__muon_cost(x);
    }
    dt_free(ctx, DT_MEM_HOST, work, bytes);
    return dt_error(ctx);
}

/* Divides the matrices of each owner into rounds. */
static dt_status dt__muon_rounds(dt_zero *zero, dt__muon *m) {
    size_t limit = zero->desc.bucket_bytes ? zero->desc.bucket_bytes : (size_t)25 << 20, most = 0;
    for (int r = 0; r < m->ranks; r++) {
        size_t used = 0;
        int round = 0;
        for (int i = 0; i < m->n_matrices; i++) {
            dt__muon_matrix *x = &m->matrices[i];
            if (x->owner != r) continue;
            if (used > 0 && used + x->bytes > limit) round++, used = 0;
            x->round = round;
            x->at = used;
            used += x->bytes;
            if (r == m->me && used > most) most = used;
            if (round >= m->n_rounds) m->n_rounds = round + 1;
        }
    }
    m->gathered_bytes = most;
    qsort(m->matrices, (size_t)m->n_matrices, sizeof *m->matrices, dt__muon_by_round);
    m->round_end =
        (int *)dt_alloc(zero->ctx, DT_MEM_HOST, (size_t)m->n_rounds * sizeof *m->round_end, "Muon");
    for (int i = 0; i < m->n_matrices && m->round_end; i++)
        m->round_end[m->matrices[i].round] = i + 1;
    return dt_error(zero->ctx);
}

/* Sets the sizes of the buffers of an update. */
static dt_status dt__muon_sizes(dt_zero *zero, dt__muon *m) {
    int me = m->me;
    for (int i = 0; i < m->n_matrices; i++) {
        const dt__muon_matrix *x = &m->matrices[i];
        size_t size = dt_dtype_size(dt_grad_dtype(m->params[x->slot])), side,
               count = (size_t)(x->rows * x->cols);
        if (x->owner != me) continue;
        side = (size_t)(x->rows < x->cols ? x->rows : x->cols);
        size_t bytes = (count + 2 * side * side) * size;
        size_t pieces = (count + DT_PIECE - 1) / DT_PIECE;
        m->work_bytes = bytes > m->work_bytes ? bytes : m->work_bytes;
        m->n_sums = pieces > m->n_sums ? pieces : m->n_sums;
    }
    for (int k = 0; k < m->n_rounds; k++)
        for (int r = 0; r < m->ranks; r++)
            for (int back = 0; back < 2 && r != me; back++) {
                size_t mine = dt__muon_pieces(zero, k, me, r, back, NULL),
                       theirs = dt__muon_pieces(zero, k, r, me, back, NULL);
                m->message_bytes = mine > m->message_bytes ? mine : m->message_bytes;
                m->message_bytes = theirs > m->message_bytes ? theirs : m->message_bytes;
            }
    m->sums = (double *)dt_pin(zero->ctx, m->n_sums * sizeof *m->sums, "Muon");
    return dt_error(zero->ctx);
}

/* Fills m->params and m->matrices, or only counts them if m->params is NULL. */
static void dt__muon_list(dt_zero *zero, dt__muon *m) {
    m->n_params = m->n_matrices = 0;
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        const dt_param_info *p = t->param;
        if (!p->by_matrix || p->desc.frozen) continue;
        int64_t n = 1, rows = 1, cols = p->full.d[p->full.nd - 1];
        for (int k = 0; k < p->full.nd - 1; k++)
            *(k < p->desc.matrices ? &n : &rows) *= p->full.d[k];
        for (int64_t k = 0; k < n && m->params; k++) {
            dt__muon_matrix *x = &m->matrices[m->n_matrices + k];
            memset(x, 0, sizeof *x);
            x->slot = m->n_params;
            x->index = k;
            x->steps = 1;
            x->rows = rows;
            x->cols = cols;
            x->bytes = (size_t)(rows * cols) * dt_dtype_size(dt_grad_dtype(t));
            x->bytes = (x->bytes + 63) / 64 * 64;
        }
        if (m->params) m->params[m->n_params] = t;
        m->n_params++;
        m->n_matrices += (int)n;
    }
}

static dt_status dt__muon_check(dt_ctx *ctx, const dt_zero_desc *d, const dt_param_group *g) {
    const char *optim = d->offload_optim, *params = d->offload_params;
    if (dt__on_disk(optim) || dt__in_host(optim) || dt__on_disk(params) || dt__in_host(params))
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: DT_MUON orthogonalizes whole matrices where the parameters are: "
            ".offload_optim and .offload_params must be \"none\"");
    if (!(g->momentum < 1) || g->muon_scale < 0 || g->muon_scale > DT_MUON_ORIGINAL)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_make: DT_MUON with momentum %g and muon_scale %d; the momentum is less than "
            "1, the scale DT_MUON_MATCH_RMS or DT_MUON_ORIGINAL",
            g->momentum, g->muon_scale);
    return DT_OK;
}

/* [collective: world] Chooses owners and rounds. */
static dt_status dt__muon_make(dt_zero *zero) {
    dt_ctx *ctx = zero->ctx;
    dt__muon *m = (dt__muon *)dt__host_zeroed(ctx, sizeof *m, "Muon");
    if (!m) return dt_error(ctx);
    zero->muon = m;
    dt_comm *world = zero->mesh.world;
    if (dt_comm_has_phantoms(world))
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: DT_MUON with phantom ranks: which rank owns which part of a matrix is "
            "known only if all ranks run");
    int stage_ranks = dt_comm_size(world) / zero->mesh.sizes.pp;
    m->group = dt_comm_split_by(world, dt_color_block, &stage_ranks, "muon");
    dt_comm_set_axis(m->group, DT_AXIS_DP);
    m->ranks = dt_comm_size(m->group);
    m->me = dt_comm_rank(m->group);
    dt__muon_list(zero, m);
    m->params = (const dt_tensor **)dt_alloc(
        ctx, DT_MEM_HOST, (size_t)m->n_params * sizeof *m->params, "Muon");
    m->matrices = (dt__muon_matrix *)dt_alloc(
        ctx, DT_MEM_HOST, (size_t)m->n_matrices * sizeof *m->matrices, "Muon");
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    dt__muon_list(zero, m);
    if (dt__muon_shards_make(zero, m) != DT_OK || dt__muon_owners(zero, m) != DT_OK)
        return dt_error(ctx);
    return dt__muon_rounds(zero, m) == DT_OK ? dt__muon_sizes(zero, m) : dt_error(ctx);
}

static void dt__muon_free(dt_zero *zero) {
    dt__muon *m = zero->muon;
    dt_ctx *ctx = zero->ctx;
    if (!m) return;
    size_t shards = (size_t)m->n_params * (size_t)m->ranks;
    dt_free(ctx, DT_MEM_HOST, m->params, (size_t)m->n_params * sizeof *m->params);
    dt_free(ctx, DT_MEM_HOST, m->matrices, (size_t)m->n_matrices * sizeof *m->matrices);
    dt_free(ctx, DT_MEM_HOST, m->shards, shards * sizeof *m->shards);
    dt_free(ctx, DT_MEM_HOST, m->round_end, (size_t)m->n_rounds * sizeof *m->round_end);
    dt_unpin(ctx, m->sums, m->n_sums * sizeof *m->sums);
    dt_free(ctx, DT_MEM_HOST, m, sizeof *m);
    zero->muon = NULL;
}

// ==== 18. Making, stepping, freeing =============================================================

/* ---- parameter groups ---- */

/* Returns the settings of group k: of desc itself, or of desc.groups[k - 1]. */
static dt_param_group dt__group_settings(const dt_zero_desc *d, int k) {
    return k > 0 ? d->groups[k - 1]
                 : (dt_param_group){ .optimizer = d->optimizer,
                       .beta1 = d->beta1,
                       .beta2 = d->beta2,
                       .eps = d->eps,
                       .momentum = d->momentum,
                       .weight_decay = d->weight_decay,
                       .muon_scale = d->muon_scale,
                       .no_nesterov = d->no_nesterov,
                       .update = d->update,
                       .user = d->user,
                       .states = d->states };
}

static dt_status dt__groups_check(dt_ctx *ctx, const dt_zero_desc *d) {
    if (d->group_count < 0 || d->group_count > DT_MAX_GROUPS || (d->group_count > 0 && !d->groups))
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: %d parameter groups at %s; at most %d",
            d->group_count, d->groups ? "groups" : "NULL", DT_MAX_GROUPS);
    for (int k = 0; k <= d->group_count; k++) {
        dt_param_group g = dt__group_settings(d, k);
        dt__text where =
            k ? dt__format("dt_zero_make: parameter group %d", k) : dt__format("dt_zero_make");
        if (k > 0 && (!g.params || !g.params[strspn(g.params, ", ")]))
            return dt_fail(ctx, DT_ERR_ARG, "%s: it has no patterns of names", where.s);
        if (g.optimizer < DT_ADAMW || g.optimizer > DT_MUON)
            return dt_fail(ctx, DT_ERR_ARG, "%s: optimizer %d", where.s, g.optimizer);
        if (k > 0 && g.optimizer == DT_ONEBIT_ADAM)
            return dt_fail(
                ctx, DT_ERR_UNSUPPORTED, "%s: DT_ONEBIT_ADAM is for all parameters", where.s);
        if (g.optimizer == DT_MUON && dt__muon_check(ctx, d, &g) != DT_OK) return dt_error(ctx);
        if (g.optimizer == DT_OPTIMIZER_CUSTOM && (!g.update || g.states < 0 || g.states > 2))
            return dt_fail(ctx, DT_ERR_ARG,
                "%s: DT_OPTIMIZER_CUSTOM needs an update function and 0 to 2 states, got %d",
                where.s, g.states);
        if (!(g.beta1 < 1 && g.beta1 >= 0 && g.beta2 < 1 && g.beta2 >= 0 && g.eps >= 0 &&
                g.momentum >= 0 && g.weight_decay >= 0 && g.lr_scale >= 0 && g.lr_scale < HUGE_VAL))
            return dt_fail(ctx, DT_ERR_ARG,
                "%s: beta1 %g, beta2 %g, eps %g, momentum %g, weight_decay %g, lr_scale %g: betas "
                "lie in [0,1), the others are not negative",
                where.s, g.beta1, g.beta2, g.eps, g.momentum, g.weight_decay, g.lr_scale);
    }
    return DT_OK;
}

/* Returns the next pattern of a list, and sets *bytes to its length and *list to what follows; NULL
   after the last. */
static const char *dt__pattern_next(const char **list, size_t *bytes) {
    const char *pattern = *list + strspn(*list, ", ");
    *bytes = strcspn(pattern, ", ");
    *list = pattern + *bytes;
    return *bytes ? pattern : NULL;
}

/* Returns 1 if a pattern matches a name; '*' matches any text. */
static int dt__pattern_matches(const char *pattern, size_t bytes, const char *name) {
    const char *end = pattern + bytes, *star = NULL, *from = NULL; /* after '*'; its text's end */
    while (*name) {
        if (pattern < end && *pattern == '*') {
            star = ++pattern;
            from = name;
        } else if (pattern < end && *pattern == *name) {
            pattern++;
            name++;
        } else if (star) {
            pattern = star;
            name = ++from;
        } else {
            return 0;
        }
    }
    while (pattern < end && *pattern == '*') pattern++;
    return pattern == end;
}

/* Returns 1 if a pattern of a list matches a name. */
static int dt__patterns_match(const char *list, const char *name) {
    const char *pattern;
    size_t bytes;
    while ((pattern = dt__pattern_next(&list, &bytes)) != NULL)
        if (dt__pattern_matches(pattern, bytes, name)) return 1;
    return 0;
}

static int dt__group_states(const dt_param_group *g) {
    if (g->optimizer == DT_OPTIMIZER_CUSTOM) return g->states;
    return g->optimizer == DT_SGD ? g->momentum > 0 : 2;
}

/* Makes the parameter groups, and assigns each parameter to one, before the buckets are made. */
static dt_status dt__param_groups_make(dt_zero *zero) {
    zero->n_param_groups = 1 + zero->desc.group_count;
    for (int k = 0; k < zero->n_param_groups; k++) {
        dt__param_group *group = &zero->param_groups[k];
        dt_param_group *g = &group->desc;
        *g = dt__group_settings(&zero->desc, k);
        if (g->beta1 == 0) g->beta1 = 0.9;
        if (g->beta2 == 0) g->beta2 = 0.999;
        if (g->eps == 0) g->eps = 1e-8;
        if (g->lr_scale == 0) g->lr_scale = 1;
        if (g->optimizer == DT_MUON && g->momentum == 0) g->momentum = 0.95;
        group->states = dt__group_states(g);
        group->trained = 1;
        g->params = k ? dt__concat_text(zero->ctx, g->params, strlen(g->params), "") : NULL;
        if (k > 0 && !g->params) return dt_error(zero->ctx);
    }
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        const dt_tensor *t = dt_param_get(zero->ctx, i);
        int k = 1;
        while (k < zero->n_param_groups &&
               !dt__patterns_match(zero->param_groups[k].desc.params, t->name))
            k++;
        t->param->group = k < zero->n_param_groups ? k : 0;
        t->param->by_matrix = dt__param_is_matrix(t->param) &&
                              zero->param_groups[t->param->group].desc.optimizer == DT_MUON;
    }
    zero->desc.groups = NULL; /* param_groups is the copy */
    return dt_error(zero->ctx);
}

static void dt__param_groups_free(dt_zero *zero) {
    for (int k = 1; k < zero->n_param_groups; k++)
        dt__string_free(zero->ctx, (char *)zero->param_groups[k].desc.params);
    zero->n_param_groups = 0;
}

/* Fails if a pattern of `list` matches no parameter of parameter group k on any rank; k < 0: no
   parameter of any group that has not been frozen at registration. */
static dt_status dt__patterns_check(dt_zero *zero, const char *what, const char *list, int k) {
    const char *pattern;
    size_t bytes;
    while ((pattern = dt__pattern_next(&list, &bytes)) != NULL) {
        double found = 0;
        for (int i = 0; i < dt_param_count(zero->ctx); i++) {
            const dt_tensor *t = dt_param_get(zero->ctx, i);
            int counts = k < 0 ? !t->param->desc.frozen : t->param->group == k;
            found += counts && dt__pattern_matches(pattern, bytes, t->name);
        }
        if (dt_sum_doubles(zero->mesh.world, &found, 1) != DT_OK) break;
        if (found == 0)
            return dt_fail(zero->ctx, DT_ERR_ARG, "%s: no parameter on any rank matches '%.*s'%s",
                what, (int)bytes, pattern,
                k > 1   ? ", or they all belong to earlier parameter groups"
                : k < 0 ? " that was not frozen at registration"
                        : "");
    }
    return dt_error(zero->ctx);
}

/* Fails if a pattern of a parameter group has no parameters. */
static dt_status dt__param_groups_check(dt_zero *zero) {
    for (int k = 1; k < zero->n_param_groups; k++) {
        dt__text where = dt__format("dt_zero_make: parameter group %d", k);
        if (dt__patterns_check(zero, where.s, zero->param_groups[k].desc.params, k) != DT_OK) break;
    }
    return dt_error(zero->ctx);
}

/* ---- making and freeing ---- */

/* Frees what the training state owns. */
static void dt__zero_release(dt_ctx *ctx, dt_zero *zero) {
    if (zero->chunks) dt__sync(ctx); /* completes copies from and to pinned memory */
    dt_free(ctx, zero->chunks ? DT_MEM_HOST : DT_MEM_TEMP, zero->wide_grads,
        zero->wide_count * sizeof(float));
    for (int u = 0; zero->buckets && u < zero->n_buckets; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        dt_unpin(ctx, z->host_shard, z->bucket.shard_count * dt_dtype_size(z->bucket.dtype));
        size_t bytes = z->count * dt__zero_element_size(z);
        dt_mem mem = dt__in_host(zero->desc.offload_optim) ? DT_MEM_HOST : DT_MEM_OPTIM;
        if (dt_error(ctx) == DT_OK) dt__zero_free_gathered(zero, z);
        for (int s = 0; s < 2; s++) dt_free(ctx, mem, z->state[s], bytes);
        dt_free(ctx, mem, z->master, bytes);
        dt_free(ctx, mem, z->ema, bytes);
        dt_free(ctx, DT_MEM_GRADS, z->levels, z->levels_bytes);
    }
    dt__disk_close(zero);
    /* free the gradients and the host copies of transfers that a failure has left unfinished; the
       I/O thread no longer uses them */
    for (int u = 0; zero->buckets && u < zero->n_buckets; u++) {
        dt__disk_end(zero, &zero->buckets[u].disk_job, 0);
        dt__disk_end(zero, &zero->buckets[u].grad_job, 0);
        dt__grad_free(ctx, &zero->buckets[u].bucket);
    }
    dt__onebit_free(zero);
    dt__muon_free(zero);
    dt__param_groups_free(zero);
    for (int i = 0; zero->gather_plans && i < DT__GATHER_PLANS * zero->n_stages; i++)
        dt_free(ctx, DT_MEM_HOST, zero->gather_plans[i].items,
            (size_t)zero->gather_plans[i].capacity * sizeof *zero->gather_plans[i].items);
    dt_free(ctx, DT_MEM_HOST, zero->gather_plans,
        (size_t)(DT__GATHER_PLANS * zero->n_stages) * sizeof *zero->gather_plans);
    dt_free(ctx, DT_MEM_COMM, zero->leaves, zero->leaves_bytes);
    dt_unpin(ctx, zero->sums, zero->n_sums * sizeof *zero->sums);
    dt_free(
        ctx, DT_MEM_HOST, zero->bucket_sums, zero->n_pipeline_buckets * sizeof *zero->bucket_sums);
}

static void dt__zero_on_closing(dt_ctx *ctx, void *user) {
    dt_zero *zero = (dt_zero *)user;
    if (!zero->is_freed) dt__zero_release(ctx, zero);
    dt_free(ctx, DT_MEM_HOST, zero, sizeof *zero);
}

/* Returns DT_OK if the public function `what` may use the training state. */
static dt_status dt__zero_usable(const dt_zero *zero, const char *what) {
    if (!zero) return DT_ERR_ARG;
    if (zero->is_freed)
        return dt_fail(
            zero->ctx, DT_ERR_ARG, "%s: dt_zero_free has freed the training state", what);
    return dt_error(zero->ctx);
}

static dt_status dt__grad_dtype_check(dt_ctx *ctx, const dt_zero_desc *d) {
    static const char *const names[] = { "DT_MUON", "DT_ONEBIT_ADAM" };
    int muon = d->optimizer == DT_MUON;
    if (d->grad_dtype == DT_F32) return DT_OK;
    if (!dt__narrow(d->grad_dtype))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_make: .grad_dtype %d (%.8s); use DT_BF16 or DT_F16, or 0 for sums in the type "
            "of dt_grad_dtype",
            (int)d->grad_dtype, dt_dtype_name(d->grad_dtype));
    for (int k = 0; k < d->group_count; k++) muon |= d->groups[k].optimizer == DT_MUON;
    if (!muon && d->optimizer != DT_ONEBIT_ADAM) return DT_OK;
    return dt_fail(ctx, DT_ERR_UNSUPPORTED, "dt_zero_make: .grad_dtype %s with %s, which %s: use 0",
        dt_dtype_name(d->grad_dtype), names[!muon],
        muon ? "puts orthogonalized matrices in the gradients' place"
             : "compresses what it sends itself");
}

static dt_status dt__zero_check(dt_ctx *ctx, const dt_zero_desc *d) {
    const dt_scale_desc *s = &d->scale;
    if (d->stage < 0 || d->stage > 3)
        return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: stage %d; use 0 to 3", d->stage);
    if (dt__groups_check(ctx, d) != DT_OK || dt__grad_dtype_check(ctx, d) != DT_OK)
        return dt_error(ctx);
    if (d->optimizer == DT_ONEBIT_ADAM && dt__onebit_check(ctx, d) != DT_OK) return dt_error(ctx);
    if (!(d->clip >= 0)) return dt_fail(ctx, DT_ERR_ARG, "dt_zero_make: clip %g", d->clip);
    if (!(d->ema_decay >= 0 && d->ema_decay < 1 && d->skip_norm_z >= 0 && d->skip_loss_z >= 0))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_make: ema_decay %g, skip_norm_z %g, skip_loss_z %g: the first lies in [0,1), "
            "the others are not negative",
            d->ema_decay, d->skip_norm_z, d->skip_loss_z);
    if (d->ema_decay > 0 && !dt_ctx_kernels(ctx)->momentum)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_zero_make: ema_decay needs the kernel momentum, which %s does not have",
            dt_ctx_kernels(ctx)->name);
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

static dt_buckets_desc dt__zero_buckets_desc(dt_zero *zero) {
    const char *values = zero->desc.offload_params;
    dt_buckets_desc d = { .bucket_bytes = zero->desc.bucket_bytes,
        .offloaded = dt__on_disk(values) || dt__in_host(values),
        .shard = dt__zero_on_shard,
        .user = zero,
        .struct_bytes = sizeof(dt__zero_bucket) };
    return d;
}

/* Makes the gather plans of all pipeline stages up to the last stage of this rank. */
static dt_status dt__gather_plans_make(dt_zero *zero) {
    for (int i = 0; i < dt_param_count(zero->ctx); i++) {
        int stage = dt_param_get(zero->ctx, i)->param->stage;
        zero->n_stages = stage >= zero->n_stages ? stage + 1 : zero->n_stages;
    }
    size_t bytes = (size_t)(DT__GATHER_PLANS * zero->n_stages) * sizeof *zero->gather_plans;
    zero->gather_plans =
        (dt__gather_plan *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "the order of gathers");
    if (zero->gather_plans) memset(zero->gather_plans, 0, bytes);
    return dt_error(zero->ctx);
}

static void dt__zero_listen(dt_zero *zero) {
    dt_listener *l = &zero->listener;
    l->grad_ready = dt__zero_on_grad_ready;
    l->closing = dt__zero_on_closing;
    l->release = dt__zero_on_release;
    l->enter = dt__zero_on_forward;
    l->user = zero;
    if (zero->stage->shard_params) {
        dt__world *world = dt__world_of(zero->ctx);
        if (world) world->state->params_sharded = 1;
        l->enter = dt__zero_on_enter;
        l->leave = dt__zero_on_leave;
        l->gather = dt__zero_on_gather;
        l->reset = dt__zero_on_reset;
    }
    dt_listen(zero->ctx, l);
}

static dt_zero *dt__zero_make(dt_ctx *ctx, dt_zero_desc desc) {
    dt_mesh_desc all = { 0 };
    if (dt_error(ctx) != DT_OK || dt__zero_check(ctx, &desc) != DT_OK) return NULL;
    dt_zero *zero = (dt_zero *)dt_alloc(ctx, DT_MEM_HOST, sizeof *zero, "dt_zero_make");
    if (!zero) return NULL;
    memset(zero, 0, sizeof *zero);
    zero->ctx = ctx;
    if (desc.beta1 == 0) desc.beta1 = 0.9;
    if (desc.beta2 == 0) desc.beta2 = 0.999;
    if (desc.eps == 0) desc.eps = 1e-8;
    if (desc.compare_every == 0) desc.compare_every = 100;
    zero->desc = desc;
    zero->agreed_step = -1;
    zero->own_bad.rank = -1;
    zero->loss = NAN;
    zero->stage = &dt__zero_stages[desc.stage];
    zero->sum = desc.tree ? &dt__tree_each_micro : zero->stage->sum;
    zero->next_bucket = -1;
    zero->update_kernels = &ctx->kernels;
    zero->update_stream = ctx->stream;
    if (dt__zero_offloads(zero) && ctx->kernels.alloc && !dt__is_dry_run(zero)) {
        zero->update_kernels = dt_kernels_cpu();
        zero->update_stream = NULL;
    }
    dt__zero_listen(zero);
    zero->mesh = desc.mesh ? *desc.mesh : dt_mesh_make(ctx, all);
    zero->desc.mesh = NULL; /* zero->mesh is the copy */
    if (dt_error(ctx) == DT_OK && dt__zero_groups_make(zero) == DT_OK &&
        dt__param_groups_make(zero) == DT_OK && dt__zero_check_params(zero) == DT_OK &&
        dt__gather_plans_make(zero) == DT_OK &&
        dt_buckets_make(ctx, dt__zero_buckets_desc(zero)) == DT_OK)
        dt__zero_buckets_make(zero);
    if (dt_error(ctx) == DT_OK && desc.optimizer == DT_ONEBIT_ADAM) dt__onebit_make(zero);
    for (int k = 0; k < zero->n_param_groups && dt_error(ctx) == DT_OK && !zero->muon; k++)
        if (zero->param_groups[k].desc.optimizer == DT_MUON) dt__muon_make(zero);
    if (dt_error(ctx) == DT_OK) dt__scale_begin(zero);
    if (dt_error(ctx) == DT_OK && dt__compare_ranks(zero) == DT_OK &&
        dt__compare_stages(zero) == DT_OK)
        dt__param_groups_check(zero);
    /* if any rank has failed to make its state, this barrier fails on every rank */
    if (dt_error(ctx) == DT_OK) dt_barrier(zero->mesh.world);
    if (dt_error(ctx) == DT_OK) return zero;
    dt_zero_free(zero);
    return NULL;
}

DT__DEFINE_AT_SITE(dt_zero *, zero_make, ctx, (dt_ctx * ctx, dt_zero_desc desc), ctx, desc)

dt_zero *dt_zero_here(dt_zero *zero, const char *file, int line) {
    if (zero) dt_ctx_here(zero->ctx, file, line);
    return zero;
}

void dt_zero_free(dt_zero *zero) {
    static const dt_listener closing_only = { .closing = dt__zero_on_closing };
    if (!zero || zero->is_freed) return;
    zero->ctx->has_training_state = 0;
    zero->ctx->data_groups[DT__DENSE] = zero->ctx->data_groups[DT__EXPERTS] = NULL;
    dt_loss_scale(zero->ctx, 1);
    dt_unlisten(zero->ctx, &zero->listener);
    dt__zero_release(zero->ctx, zero);
    zero->is_freed = 1; /* the struct stays until dt_ctx_free, so that a later use can fail */
    zero->listener = closing_only;
    zero->listener.user = zero;
    dt_listen(zero->ctx, &zero->listener);
}

/* ---- stepping ---- */

/* Returns 1 if all gradients of the step have been reduced. */
static int dt__zero_grads_reduced(const dt_zero *zero) {
    for (int u = 0; u < zero->n_buckets; u++)
        if (!zero->buckets[u].bucket.frozen && !zero->buckets[u].bucket.paused &&
            zero->buckets[u].bucket.grad_state < DT_GRAD_REDUCED)
            return 0;
    return 1;
}

/* Gradient clipping by the global norm. Returns the factor min(1, clip / (norm + 1e-6)). The update
   applies the factor to every gradient as it reads the gradient, so the gradients in memory are not
   scaled. */
static double dt__clip_scale(const dt_zero *zero, double norm) {
    double scale = zero->desc.clip / (norm + 1e-6);
    return zero->desc.clip > 0 && scale < 1 ? scale : 1;
}

/* Compares the replicas after the first step of the job or after a load, which finds most mistakes
   in a layout, and then after each multiple of compare_every steps. */
static dt_status dt__compare_after_step(dt_zero *zero) {
    int64_t every = zero->desc.compare_every;
    if (every < 0 || zero->step < zero->next_compare) return DT_OK;
    zero->next_compare = (zero->step / every + 1) * every;
    return dt__compare_replicas(zero, "dt_zero_step");
}

/* Fails if dt_zero_swap_ema has exchanged the weights with their EMA. */
static dt_status dt__ema_not_swapped(dt_zero *zero, const char *what) {
    if (!zero->ema_swapped) return DT_OK;
    return dt_fail(zero->ctx, DT_ERR_ARG,
        "%s: the weights are exchanged with their EMA: call dt_zero_swap_ema again before it",
        what);
}

/* Fails unless a step with these learning rates is possible; sets those of each group. */
static dt_status dt__zero_step_begin(dt_zero *zero, const double *lr) {
    dt_ctx *ctx = zero->ctx;
    int stepping = 0;
    if (dt__ema_not_swapped(zero, "dt_zero_step") != DT_OK) return dt_error(ctx);
    if (!lr) return dt_fail(ctx, DT_ERR_ARG, "dt_zero_step: the learning rates are NULL");
    for (int k = 0; k < zero->n_param_groups; k++) {
        dt__param_group *group = &zero->param_groups[k];
        if (!isfinite(lr[k]))
            return dt_fail(ctx, DT_ERR_ARG, "dt_zero_step: step %lld: learning rate %g",
                (long long)zero->step + 1, lr[k]);
        group->lr = lr[k] * group->desc.lr_scale;
        group->steps_now = lr[k] >= 0 && group->trained > 0;
        stepping += group->steps_now;
    }
    if (stepping == 0)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_step: step %lld: learning rate %g: no parameter group steps",
            (long long)zero->step + 1, lr[0]);
    if (!dt__zero_grads_reduced(zero))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_zero_step: step %lld has no complete gradient: dt_backward of its last "
            "micro-batch has not run",
            (long long)zero->step + 1);
    return DT_OK;
}

/* Ends a step whose gradients are not finite: with a loss scale every rank skips the step, without
   one every rank fails. */
static void dt__zero_step_not_finite(dt_zero *zero, double norm, dt_step_info *info) {
    dt__bad_grad bad;
    const dt_tensor *t = dt_param_get(zero->ctx, zero->own_bad.param);
    /* ignore a NaN in a parameter group that does not step */
    if (zero->own_bad.rank >= 0 && !zero->param_groups[t->param->group].steps_now)
        zero->own_bad.rank = -1;
    if (dt__bad_grad_find(zero, &bad) != DT_OK) return;
    zero->own_bad.rank = -1;
    info->skipped = zero->desc.loss_scale != 0 && dt__scale_skip(zero, &bad) == DT_OK;
    if (zero->desc.loss_scale == 0) dt__bad_grad_fail(zero, &bad, norm);
    info->bad_rank = bad.rank;
    /* each pipeline stage knows only its own parameters */
    int here = bad.rank >= 0 && dt__zero_pp_rank(zero, bad.rank) == zero->mesh.coord.pp;
    info->bad_param = here ? dt_param_get(zero->ctx, bad.param) : NULL;
    info->bad_element = (size_t)bad.element;
    if (info->skipped) dt_clear_grads(zero->ctx);
}

/* Outlier steps. Adds the step's norm and loss to the last ones; returns 1 if the z-score of one
   exceeds its threshold. All ranks have the same norm and loss, so they take the same decision. */
static int dt__zero_is_outlier(dt_zero *zero, double norm, dt_step_info *info) {
    const dt_zero_desc *d = &zero->desc;
    info->norm_z = dt_outlier_z(&zero->norms, norm);
    info->loss_z = dt_outlier_z(&zero->losses, zero->loss);
    zero->loss = NAN;
    if (d->skip_norm_z > 0 && info->norm_z > d->skip_norm_z) info->outlier = DT_OUTLIER_NORM;
    if (d->skip_loss_z > 0 && info->loss_z > d->skip_loss_z) info->outlier = DT_OUTLIER_LOSS;
    return info->outlier != DT_OUTLIER_NONE;
}

static dt_step_info dt__zero_step_groups(dt_zero *zero, const double *lr) {
    dt_step_info info = { .grad_norm = NAN,
        .clip_scale = 1,
        .norm_z = NAN,
        .loss_z = NAN,
        .loss_scale = 1,
        .bad_rank = -1 };
    double norm = 0;
    if (!zero) return info;
    info.step = zero->step;
    if (dt__zero_usable(zero, "dt_zero_step") != DT_OK) return info;
    info.loss_scale = zero->loss_scale;
    if (dt__zero_step_begin(zero, lr) != DT_OK) return info;
    if (zero->agreed_step < 0 && dt__compare_replicas(zero, "dt_zero_step") != DT_OK) return info;
    if (dt__grads_sum_tied(zero) != DT_OK || dt__grad_norm(zero, &norm) != DT_OK) return info;
    double not_finite = !isfinite(norm); /* if it is 1 on any rank, no rank updates */
    if (dt__step_agree(zero, &not_finite) != DT_OK) return info;
    if (not_finite > 0) {
        zero->loss = NAN;
        dt__zero_step_not_finite(zero, norm, &info);
        return info;
    }
    zero->own_bad.rank = -1;
    if (zero->written && zero->desc.compare_every > 0 &&
        dt__compare_replicas(zero, "dt_zero_step") != DT_OK)
        return info;
    norm /= zero->loss_scale;
    dt__zero_free_held(zero, -1); /* because the update makes the gathered copies stale */
    info.clip_scale = dt__clip_scale(zero, norm);
    if (dt__zero_is_outlier(zero, norm, &info))
        for (int k = 0; k < zero->n_param_groups; k++) zero->param_groups[k].steps_now = 0;
    else if (dt__zero_update_all(zero, info.clip_scale / zero->loss_scale) != DT_OK)
        return info;
    dt__scale_good(zero);
    dt_clear_grads(zero->ctx);
    for (int k = 0; k < zero->n_param_groups; k++)
        zero->param_groups[k].step += zero->param_groups[k].steps_now;
    info.step = ++zero->step;
    if (dt__compare_after_step(zero) == DT_OK) info.grad_norm = norm;
    return info;
}

DT__DEFINE_AT_SITE(dt_step_info, zero_step_groups, zero ? zero->ctx : NULL,
    (dt_zero * zero, const double *lr), zero, lr)

static dt_step_info dt__zero_step(dt_zero *zero, double lr) {
    double all[1 + DT_MAX_GROUPS];
    for (int k = 0; k <= DT_MAX_GROUPS; k++) all[k] = lr;
    return dt__zero_step_groups(zero, all);
}

DT__DEFINE_AT_SITE(
    dt_step_info, zero_step, zero ? zero->ctx : NULL, (dt_zero * zero, double lr), zero, lr)

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

/* All-gathers an array (DT__STATE_0 to DT__EMA, or DT__GRAD) of a bucket, of which this rank has
   `shard`, and copies the elements of `param` to host memory, in the type of dt_grad_dtype. */
static dt_status dt__zero_all_gather_param(dt_zero *zero, const dt__zero_bucket *z, int array,
    const void *shard, const dt_tensor *param, void *host) {
    dt_dtype dtype = dt__array_dtype(&z->bucket, array);
    size_t size = dt_dtype_size(dtype), bytes = z->bucket.padded * size,
           count = param->param->count;
    char *full = (char *)dt_alloc(zero->ctx, DT_MEM_TEMP, bytes, "collecting a parameter's state");
    if (!full) return dt_error(zero->ctx);
    dt__move(zero->ctx, full + z->offset * size, shard, z->count * size);
    if (zero->stage->shard_optim)
        dt_all_gather(z->shard_group, full + z->offset * size, full, z->count, dtype);
    if (dt_error(zero->ctx) == DT_OK)
        dt__move(zero->ctx, host, full + param->param->offset * size, count * size);
    dt__sync(zero->ctx);
    /* widens in place, from the last element to the first */
    for (size_t i = count; dtype != z->bucket.grad_dtype && i-- > 0;)
        ((float *)host)[i] = (float)dt__number(dtype, host, i);
    dt_free(zero->ctx, DT_MEM_TEMP, full, bytes);
    return dt_error(zero->ctx);
}

static dt_status dt__zero_state(dt_zero *zero, int which, const dt_tensor *param, void *host) {
    dt_status status = dt__zero_usable(zero, "dt_zero_state");
    if (status != DT_OK) return status;
    dt__zero_bucket *z = dt__zero_bucket_of(zero, "dt_zero_state", param);
    if (!z) return dt_error(zero->ctx);
    int more = which == DT_STATE_MASTER || which == DT_STATE_EMA;
    if (which < 0 || (which >= z->states && !more) || !host ||
        (more && !dt__zero_has_array(zero, &z->bucket, which)))
        return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_state: state %d of %d%s", which, z->states,
            host ? "" : ", to host memory that is NULL");
    size_t bytes = dt__disk_array_bytes(zero, &z->bucket, DT__STATE_0 + which);
    if (!bytes)
        return dt__zero_all_gather_param(zero, z, which, dt__array_memory(z, which), param, host);
    void *shard = dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "collecting a parameter's state");
    if (!shard) return dt_error(zero->ctx);
    if (dt__array_access(zero, z, DT__STATE_0 + which, 0, 0, shard, bytes) == DT_OK)
        dt__zero_all_gather_param(zero, z, which, shard, param, host);
    dt_free(zero->ctx, DT_MEM_HOST, shard, bytes);
    return dt_error(zero->ctx);
}

DT__DEFINE_AT_SITE(dt_status, zero_state, zero ? zero->ctx : NULL,
    (dt_zero * zero, int which, const dt_tensor *param, void *host), zero, which, param, host)

static dt_status dt__zero_grad(dt_zero *zero, const dt_tensor *param, void *host) {
    dt_status status = dt__zero_usable(zero, "dt_zero_grad");
    if (status != DT_OK) return status;
    if (!host) return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_grad: host memory is NULL");
    if (!dt__zero_grads_reduced(zero))
        return dt_fail(zero->ctx, DT_ERR_ARG,
            "dt_zero_grad: step %lld has no complete "
            "gradient",
            (long long)zero->step + 1);
    if (dt__onebit_frozen(zero))
        return dt_fail(
            zero->ctx, DT_ERR_UNSUPPORTED, "dt_zero_grad: 1-bit Adam no longer sums gradients");
    if (dt__grads_sum_tied(zero) != DT_OK) return dt_error(zero->ctx);
    dt__zero_bucket *z = dt__zero_bucket_of(zero, "dt_zero_grad", param);
    if (z && !param->needs_grad)
        return dt_fail(
            zero->ctx, DT_ERR_ARG, "dt_zero_grad: dt_zero_freeze has frozen %s", param->name);
    size_t bytes = z ? dt__disk_array_bytes(zero, &z->bucket, DT__GRAD) : 0;
    void *shard =
        bytes ? dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "collecting a parameter's gradient") : NULL;
    if (z && shard && dt__grads_copy_out(zero, z, 0, shard, z->count) == DT_OK)
        dt__zero_all_gather_param(zero, z, DT__GRAD, shard, param, host);
    if (z && !bytes)
        dt__zero_all_gather_param(zero, z, DT__GRAD, dt__zero_grad_shard(z), param, host);
    dt_free(zero->ctx, DT_MEM_HOST, shard, bytes);
    if (dt_error(zero->ctx) != DT_OK) return dt_error(zero->ctx);
    for (size_t i = 0; i < param->param->count && zero->loss_scale != 1; i++) {
        if (z->bucket.grad_dtype == DT_F64)
            ((double *)host)[i] /= zero->loss_scale;
        else
            ((float *)host)[i] = (float)(((float *)host)[i] / zero->loss_scale);
    }
    return DT_OK;
}

DT__DEFINE_AT_SITE(dt_status, zero_grad, zero ? zero->ctx : NULL,
    (dt_zero * zero, const dt_tensor *param, void *host), zero, param, host)

static dt_status dt__zero_grad_full(dt_zero *zero, const dt_tensor *param, void *host) {
    dt_status status = dt__zero_usable(zero, "dt_zero_grad_full");
    if (status != DT_OK) return status;
    if (!host || !dt__zero_bucket_of(zero, "dt_zero_grad_full", param))
        return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_grad_full: host memory is NULL");
    const dt_param_info *p = param->param;
    dt_dtype dtype = dt_grad_dtype(param);
    size_t size = dt_dtype_size(dtype), count = (size_t)dt_count(p->full);
    char *slice = (char *)dt_alloc(zero->ctx, DT_MEM_HOST, p->count * size, "a slice's gradient");
    void *full = dt_alloc(zero->ctx, DT_MEM_TEMP, count * size, "a full gradient");
    dt__slice_walk walk = dt__slice_begin(p->full, p->slice);
    memset(host, 0, count * size);
    if (full && slice && dt__zero_grad(zero, param, slice) == DT_OK) {
        while (dt__slice_next(&walk))
            memcpy((char *)host + (size_t)walk.global * size, slice + (size_t)walk.local * size,
                (size_t)walk.count * size);
        dt__move_now(zero->ctx, full, host, count * size);
        /* each rank adds its slice to zeros, over the groups of one dimension after another */
        for (int c = 0; c < 3; c++)
            if (p->desc.shards[c].comm)
                dt_all_reduce(p->desc.shards[c].comm, full, full, count, dtype, DT_SUM);
        dt__move_now(zero->ctx, host, full, count * size);
    }
    dt_free(zero->ctx, DT_MEM_TEMP, full, count * size);
    dt_free(zero->ctx, DT_MEM_HOST, slice, p->count * size);
    return dt_error(zero->ctx);
}

DT__DEFINE_AT_SITE(dt_status, zero_grad_full, zero ? zero->ctx : NULL,
    (dt_zero * zero, const dt_tensor *param, void *host), zero, param, host)

double dt_outlier_z(dt_outlier *w, double value) {
    const int N = DT_OUTLIER_WINDOW;
    double mean = 0, variance = 0;
    if (!w || !isfinite(value)) return NAN;
    w->values[w->count++ % N] = value;
    if (w->count <= N) return NAN;
    /* sums of differences from one of the values, so that equal values have a variance of 0 */
    for (int i = 0; i < N; i++) mean += (w->values[i] - w->values[0]) / N;
    for (int i = 0; i < N; i++) {
        double d = w->values[i] - w->values[0] - mean;
        variance += d * d / N;
    }
    return variance > 0 ? (value - w->values[0] - mean) / sqrt(variance) : 0;
}

void dt_zero_loss(dt_zero *zero, double loss) {
    if (zero) zero->loss = isnan(loss) ? NAN : loss;
}

/* ---- freezing and EMA ---- */

/* Fails unless the training is between two steps: no gradient, and no op has used a parameter. */
static dt_status dt__zero_between_steps(dt_zero *zero, const char *what) {
    const dt_ctx *ctx = zero->ctx;
    int busy = 0;
    for (int u = 0; u < zero->n_buckets; u++)
        busy |= zero->buckets[u].bucket.grad_state != DT_GRAD_EMPTY;
    for (int t = 0; t < ctx->tape_capacity; t++)
        for (int i = 0; ctx->tapes[t] && ctx->tapes[t]->pending_uses && i < ctx->n_params; i++)
            busy |= ctx->tapes[t]->pending_uses[i] > 0;
    if (!busy) return dt_error(ctx);
    return dt_fail(zero->ctx, DT_ERR_ARG,
        "%s: call it after dt_zero_step and dt_reset, and before the next forward", what);
}

/* Sets bucket->paused; frees the gradient of a paused bucket. */
static void dt__bucket_pause(dt_zero *zero, dt__zero_bucket *z) {
    dt_bucket *bucket = &z->bucket;
    bucket->paused = !bucket->frozen;
    for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++)
        if (dt_param_get(zero->ctx, i)->needs_grad) bucket->paused = 0;
    if (bucket->paused && !bucket->grad_offloaded) dt__grad_sum_free(zero->ctx, bucket);
}

static dt_status dt__zero_freeze(dt_zero *zero, const char *params, int on) {
    static const char what[] = "dt_zero_freeze";
    double trained[1 + DT_MAX_GROUPS] = { 0 };
    dt__difference found = { 0, 0, 0 };
    dt_status status = dt__zero_usable(zero, what);
    if (status != DT_OK) return status;
    dt_ctx *ctx = zero->ctx;
    if (!params || !params[strspn(params, ", ")])
        return dt_fail(ctx, DT_ERR_ARG, "%s: there are no patterns of names", what);
    if (zero->desc.optimizer == DT_ONEBIT_ADAM)
        return dt_fail(
            ctx, DT_ERR_UNSUPPORTED, "%s: 1-bit Adam exchanges the momentum of all", what);
    uint64_t digest = dt__digest(1 + (on != 0), params, strlen(params));
    if (dt__zero_between_steps(zero, what) != DT_OK) return dt_error(ctx);
    if (!dt__ranks_agree(zero, zero->mesh.world, &digest, 1, &found))
        return dt_error(ctx) != DT_OK ? dt_error(ctx)
                                      : dt_fail(ctx, DT_ERR_COMM,
                                            "%s: rank %d does not pass the patterns and the flag "
                                            "of rank 0; this rank passes '%.200s', %d",
                                            what, found.rank, params, on);
    if (dt__patterns_check(zero, what, params, -1) != DT_OK) return dt_error(ctx);
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        if (!t->param->desc.frozen && dt__patterns_match(params, t->name)) t->needs_grad = !on;
        trained[t->param->group] += t->needs_grad;
    }
    for (int u = 0; u < zero->n_buckets; u++) dt__bucket_pause(zero, &zero->buckets[u]);
    if (dt_sum_doubles(zero->mesh.world, trained, 1 + DT_MAX_GROUPS) != DT_OK) return dt_error(ctx);
    for (int k = 0; k < zero->n_param_groups; k++) zero->param_groups[k].trained = trained[k] > 0;
    return DT_OK;
}

DT__DEFINE_AT_SITE(dt_status, zero_freeze, zero ? zero->ctx : NULL,
    (dt_zero * zero, const char *params, int on), zero, params, on)

/* Exchanges the weights of this rank's shard of a bucket, of 16-bit weights the master weights,
   with their EMA. `host` has room for DT__STATE_COPY elements. */
static dt_status dt__ema_swap_bucket(dt_zero *zero, dt__zero_bucket *z, double *host) {
    size_t size = dt__zero_element_size(z), narrow = dt_dtype_size(z->bucket.dtype),
           shard = z->offset - z->bucket.shard_offset, elements = DT__STATE_COPY / 2;
    int wide = dt__zero_has_master(&z->bucket) ? DT__MASTER : DT__PARAMS;
    double *ema = host, *weight = host + elements;
    for (size_t at = 0, n; at < z->count; at += n) {
        size_t here = (at + (wide == DT__PARAMS ? shard : 0)) * size;
        n = z->count - at < elements ? z->count - at : elements;
        if (dt__array_access(zero, z, DT__EMA, 0, at * size, ema, n * size) != DT_OK ||
            dt__array_access(zero, z, wide, 0, here, weight, n * size) != DT_OK ||
            dt__array_access(zero, z, DT__EMA, 1, at * size, weight, n * size) != DT_OK ||
            dt__array_access(zero, z, wide, 1, here, ema, n * size) != DT_OK)
            return dt_error(zero->ctx);
        dt_cast_args round = { .dtype = z->bucket.dtype,
            .from = z->bucket.grad_dtype,
            .out = weight,
            .in = ema,
            .count = n };
        if (wide == DT__PARAMS) continue;
        dt_kernels_cpu()->cast(&round, NULL);
        if (dt__array_access(zero, z, DT__PARAMS, 1, (shard + at) * narrow, weight, n * narrow) !=
            DT_OK)
            return dt_error(zero->ctx);
    }
    return DT_OK;
}

static dt_status dt__zero_swap_ema(dt_zero *zero) {
    dt_status status = dt__zero_usable(zero, "dt_zero_swap_ema");
    size_t bytes = DT__STATE_COPY * sizeof(double);
    if (status != DT_OK) return status;
    if (!(zero->desc.ema_decay > 0))
        return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_swap_ema: dt_zero_desc.ema_decay is 0");
    if (dt__zero_between_steps(zero, "dt_zero_swap_ema") != DT_OK) return dt_error(zero->ctx);
    zero->ema_swapped ^= 1;
    dt__zero_free_held(zero, -1);
    double *host = (double *)dt_alloc(zero->ctx, DT_MEM_HOST, bytes, "EMA of the weights");
    for (int u = 0; u < zero->n_buckets && host && !dt__is_dry_run(zero); u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        if (!dt__zero_has_array(zero, &z->bucket, DT__EMA)) continue;
        if (dt__ema_swap_bucket(zero, z, host) != DT_OK) break;
        if (zero->stage->shard_optim && !zero->stage->shard_params)
            dt_all_gather(
                z->shard_group, dt__zero_param_shard(z), z->bucket.data, z->count, z->bucket.dtype);
    }
    dt_free(zero->ctx, DT_MEM_HOST, host, bytes);
    return dt_error(zero->ctx);
}

DT__DEFINE_AT_SITE(dt_status, zero_swap_ema, zero ? zero->ctx : NULL, (dt_zero * zero), zero)

/* ---- state and gradients ---- */

int64_t dt_zero_steps(const dt_zero *zero) { return zero ? zero->step : 0; }
int64_t dt_zero_group_steps(const dt_zero *zero, int group) {
    return zero && group >= 0 && group < zero->n_param_groups ? zero->param_groups[group].step : -1;
}

size_t dt_zero_state_bytes(const dt_zero *zero) {
    if (!zero || zero->is_freed || dt__on_disk(zero->desc.offload_optim) ||
        dt__in_host(zero->desc.offload_optim))
        return 0;
    size_t bytes = 0;
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        size_t arrays =
            (size_t)(z->states + dt__zero_has_master(&z->bucket) + (zero->desc.ema_decay > 0));
        if (!z->bucket.frozen) bytes += z->count * arrays * dt__zero_element_size(z);
        bytes += z->error_bytes[0] + z->error_bytes[1];
    }
    return bytes;
}

// ==== 19. Memory account: code ==================================================================

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

// ==== 20. Checkpoints: files ====================================================================

/* Atomic commit of a checkpoint (section 3 shows the steps): all ranks write, sync and close their
   files in dt__save_start; when every rank has done so, rank 0 does the rest in dt__save_commit. A
   crash before the rename leaves a .tmp folder, which the next job removes. */

enum { DT__CKPT_COPY = 4 << 20, DT__CKPT_CHUNK = 1 << 20, DT__LOCK_TEXT = 300 };
enum { DT__SAVE_IDLE = 0, DT__SAVE_WRITING, DT__SAVE_COMMITTING };
static const char *const dt__ckpt_names[] = { "model.safetensors", "optim.safetensors",
    "config.json", "manifest.json" };             /* DT__MODEL to DT__MANIFEST */
static const char dt__table_file[] = "table.bin"; /* the only file of a table's snapshot */
static const char dt__ps_file[] = "ps.bin";       /* beside owner-0-table-0.bin, .. */

/* Copies a folder's path without the slashes at its end to `out`, of DT__PATH_BYTES bytes. */
static dt_status dt__copy_dir(dt_ctx *ctx, const char *func, char *out, const char *dir) {
    if (!*dir) return dt_fail(ctx, DT_ERR_ARG, "%s: a folder without a name", func);
    int bytes = snprintf(out, DT__PATH_BYTES, "%s", dir);
    for (size_t n = strlen(out); n > 1 && out[n - 1] == '/'; n--) out[n - 1] = 0;
    return dt__path_check(ctx, func, dir, bytes);
}

/* Sets the path of a file to dir/name. If the path is too long, records the failure. */
static void dt__files_path(dt__files *f, int file, const char *dir, const char *name) {
    dt__writer *w = &f->writer;
    if (snprintf(f->path[file], DT__PATH_BYTES, "%s/%s", dir, name) < DT__PATH_BYTES) return;
    f->path[file][0] = 0;
    if (!w->why[0]) snprintf(w->why, sizeof w->why, "%.80s...: the path is too long", dir);
}

/* Returns 1 if it has created the folder. */
static int dt__writer_make_folder(dt__writer *w, const char *path) {
    errno = 0;
    int made = !w->why[0] && w->io.make_folder(w->io.user, path) == 0;
    if (!made) dt__writer_fail(w, path, "making the folder");
    return made;
}

/* Identifies a checkpoint: its step, and its number among the checkpoints of this step. The folder
   step-200 has repeat = 1, step-200-2 has repeat = 2. */
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

/* Returns dt__ckpt_none unless the first n bytes of `name` are just what dt__ckpt_name writes. */
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

/* [collective: world] Sets *id on all ranks to the newest checkpoint in `dir` that is older than
   *id, or to dt__ckpt_none. Only rank 0 lists the folder. */
static dt_status dt__newest_on_all(
    dt_ctx *ctx, const char *func, const char *dir, dt__ckpt_id *id) {
    dt__ckpt_id found = { 0, 0 };
    if (dt_ctx_rank(ctx) == 0 && dt__newest_below(dt_ctx_io(ctx), dir, *id, &found) != 0 &&
        errno != ENOENT)
        dt_fail(ctx, DT_ERR_IO, "%s: %s: %s", func, dir, dt__io_reason());
    double sum[2] = { (double)found.step, (double)found.repeat };
    dt_sum_doubles(dt_world(ctx), sum, 2);
    id->step = (int64_t)sum[0];
    id->repeat = (int)sum[1];
    return dt_error(ctx);
}

int64_t dt_checkpoint_newest(const dt_io *io, const char *dir, char *name, size_t bytes) {
    dt__ckpt_id id = dt__ckpt_none;
    if (name && bytes) name[0] = 0;
    if (!io || !io->list_folder || !dir) return errno = EINVAL, -2;
    if (dt__newest_below(io, dir, dt__ckpt_last, &id) != 0) return errno == ENOENT ? -1 : -2;
    if (id.step >= 0 && name && bytes) dt__ckpt_name(id, name, bytes);
    return id.step;
}

typedef struct dt__tmp_sweep {
    const dt_io *io;
    const char *dir;
} dt__tmp_sweep;

/* Removes a file of a parameter server's snapshot: exactly of the form owner-0-table-0.bin. */
static void dt__ps_file_remove(void *arg, const char *name) {
    const dt__tmp_sweep *sweep = (const dt__tmp_sweep *)arg;
    int owner = -1, table = -1;
    char same[64], path[DT__PATH_BYTES + 144];
    if (sscanf(name, "owner-%9d-table-%9d.bin", &owner, &table) != 2) return;
    snprintf(same, sizeof same, "owner-%d-table-%d.bin", owner, table);
    snprintf(path, sizeof path, "%s/%s", sweep->dir, same);
    if (strcmp(name, same) == 0) sweep->io->remove(sweep->io->user, path);
}

/* Removes a checkpoint. The manifest is removed first, so that a partly removed checkpoint never
   looks complete. Other files in the checkpoint's folder stay. */
static int dt__ckpt_remove(const dt_io *io, const char *folder) {
    const char *const names[] = { dt__ckpt_names[DT__MANIFEST], dt__ps_file,
        dt__ckpt_names[DT__CONFIG], dt__ckpt_names[DT__MODEL], dt__ckpt_names[DT__OPTIM],
        dt__table_file };
    dt__tmp_sweep files = { io, folder };
    if (io->remove_folder(io->user, folder, names, 6) == 0) return 0;
    io->list_folder(io->user, folder, dt__ps_file_remove, &files);
    return io->remove_folder(io->user, folder, names, 6);
}

/* Removes a folder of DIR that a killed job has left: exactly of the form step-200.1a2b3c.tmp. */
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
   dt_checkpoint_load has skipped them as damaged. */
static void dt__ckpt_remove_old(const dt_io *io, const char *newest, int64_t keep) {
    const char *last = dt__path_name(newest);
    dt__ckpt_id at = dt__ckpt_parse_name(last, strlen(last));
    char name[64], dir[DT__PATH_BYTES], path[DT__PATH_BYTES + 64];
    snprintf(dir, sizeof dir, "%.*s", (int)(last - newest) - 1, newest);
    for (int64_t i = 1; i < keep && at.step >= 0; i++)
        if (dt__newest_below(io, dir, at, &at) != 0) return;
    while (keep > 0 && at.step >= 0 && dt__newest_below(io, dir, at, &at) == 0 && at.step >= 0) {
        dt__ckpt_name(at, name, sizeof name);
        snprintf(path, sizeof path, "%s/%s", dir, name);
        dt__ckpt_remove(io, path);
    }
}

// ==== 21. Checkpoints: contents =================================================================

/* The elements of each tensor that this rank has written to one of the two safetensors files, or
   has read to check the file. A digest is a sum over elements, so the sum of all ranks' digests
   does not depend on the sharding. */
typedef struct dt__ckpt_file {
    struct dt_checkpoint *owner;
    int file;
    uint64_t *digest; /* (n) of this rank's elements; after dt__digests_sum, of all elements */
    int64_t *count;   /* (n) number of these elements */
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
    /* content of the lock file: this process, and when it took the lock */
    char lock_text[DT__LOCK_TEXT];
    dt__files files;
    dt_weights *w[DT__CKPT_FILES]; /* the safetensors files: names and offsets of all tensors */
    dt__ckpt_file file[DT__CKPT_FILES];
    int n_files;                       /* DT__CKPT_FILES, or 1 for an export (no optimizer) */
    const dt_export_desc *export_desc; /* NULL for a checkpoint */
    int saving;                        /* phase of a save: DT__SAVE_* */
    /* newest checkpoint of desc.dir that this job has loaded, skipped as damaged, or saved */
    dt__ckpt_id newest_known;
    char *config; /* config text of the loaded checkpoint */
    char path[DT__PATH_BYTES];
    dt__io_request request;
    dt__file_op *ops; /* (n_ops) operations of dt__save_write and dt__save_start or of _commit */
    int n_ops, ops_capacity;
    int staged;                           /* 1: the I/O thread writes */
    dt__staging_buffer *buffers, *buffer; /* all, and the one that is being filled */
    char *manifest;                       /* on rank 0 only */
    size_t manifest_bytes, manifest_capacity;
    char *config_json; /* a copy of desc.config_json */
    int created;       /* 1: after a failure this rank removes the folder DT__TEMP or the export */
};

/* Makes the digests and counts of the n tensors of file f, which are 0. */
static dt_status dt__digests_make(dt_checkpoint *c, int f, int n) {
    dt__ckpt_file *file = &c->file[f];
    size_t bytes = ((size_t)n + 1) * sizeof *file->digest;
    file->digest = (uint64_t *)dt__host_zeroed(c->ctx, bytes, "digests");
    file->count = (int64_t *)dt__host_zeroed(c->ctx, bytes, "digests");
    file->n = n;
    return dt_error(c->ctx);
}

/* [collective: world] Replaces the digests and counts of file f by their sums over all ranks. A
   digest is summed as 4 doubles of 16 bits each, so that the sums are exact. */
static dt_status dt__digests_sum(dt_checkpoint *c, int f) {
    dt__ckpt_file *file = &c->file[f];
    size_t n = 5 * (size_t)file->n;
    if (dt_error(c->ctx) != DT_OK) return dt_error(c->ctx);
    double *sums = (double *)dt_alloc(c->ctx, DT_MEM_HOST, (n + 1) * sizeof *sums, "digests");
    for (size_t i = 0; i < n && sums; i++)
        sums[i] = i % 5 == 4 ? (double)file->count[i / 5]
                             : (double)(file->digest[i / 5] >> (16 * (i % 5)) & 0xffff);
    dt_sum_doubles(c->zero->mesh.world, sums, sums ? n : 0);
    for (int i = 0; i < file->n && dt_error(c->ctx) == DT_OK; i++) {
        file->digest[i] = 0;
        for (int k = 0; k < 4; k++) file->digest[i] += (uint64_t)sums[5 * i + k] << (16 * k);
        file->count[i] = (int64_t)sums[5 * i + 4];
    }
    dt_free(c->ctx, DT_MEM_HOST, sums, (n + 1) * sizeof *sums);
    return dt_error(c->ctx);
}

/* All-gather of texts: each rank broadcasts its text. Returns the texts of all ranks in rank order,
   each padded with blanks to a multiple of 4 bytes; NULL on failure. *bytes is the length of the
   result; free the result with dt_free(.., *bytes + 1). */
static char *dt__all_gather_texts(dt_ctx *ctx, const char *mine, size_t n, size_t *bytes) {
    dt_comm *world = dt_world(ctx);
    int ranks = dt_comm_size(world), me = dt_comm_rank(world);
    size_t length_bytes = (size_t)ranks * sizeof(double), at = 0;
    double *length = (double *)dt__host_zeroed(ctx, length_bytes, "texts of all ranks");
    if (length) length[me] = (double)((n + 3) / 4 * 4);
    dt_sum_doubles(world, length, length ? (size_t)ranks : 0);
    *bytes = 0;
    for (int r = 0; r < ranks && length; r++) *bytes += (size_t)length[r];
    char *text = (char *)dt_alloc(ctx, DT_MEM_HOST, *bytes + 1, "texts of all ranks");
    if (text) memset(text, ' ', *bytes), text[*bytes] = 0;
    for (int r = 0; r < ranks && text && length; r++) {
        if (r == me && n > 0) memcpy(text + at, mine, n);
        if (length[r] > 0) dt_broadcast(world, text + at, (size_t)length[r] / 4, DT_I32, r);
        at += (size_t)length[r];
    }
    dt_free(ctx, DT_MEM_HOST, length, length_bytes);
    if (dt_error(ctx) == DT_OK) return text;
    if (text) dt_free(ctx, DT_MEM_HOST, text, *bytes + 1);
    return NULL;
}

/* Sets *p to a parameter's position in model.safetensors. p->n = 0 means that the parameter is
   stored under its own name, -1 that it is not stored. */
static dt_status dt__ckpt_map_weight(const dt_checkpoint *c, const dt_tensor *t, dt_weight_map *p) {
    memset(p, 0, sizeof *p);
    if (c->desc.map_weight) c->desc.map_weight(t, p, c->desc.user);
    if (p->n < (c->export_desc ? -1 : 0) || p->n > 2)
        return dt_fail(
            c->ctx, DT_ERR_ARG, "%s: map_weight gives %s %d parts; 1 or 2", c->what, t->name, p->n);
    for (int i = 0; i < 2; i++) p->part[i].name = p->n ? p->name[i] : t->name;
    return DT_OK;
}

/* Returns 1 if this rank takes part in writing a bucket. Of the replicas along tp, and for tied
   parameters along pp, only the first writes; of several shard groups along tp, the one with the
   first rank. With expert folding, expert_tp takes the place of tp for experts. Both vary fastest
   among the ranks of a pipeline stage. */
static int dt__ckpt_is_writer(const dt_zero *zero, const dt_bucket *bucket) {
    const dt_param_desc *d = dt__bucket_desc(zero, bucket);
    const dt_mesh_desc *n = &zero->mesh.sizes;
    int tp = n->expert_tp && dt__is_expert(zero, d) ? n->expert_tp : n->tp;
    int lowest = dt_ctx_rank(zero->ctx) % tp;
    for (int c = 0; c < 3; c++)
        for (int i = 0; d->shards[c].comm && i < dt_comm_size(d->shards[c].comm); i++) {
            int at = dt_comm_world_rank(d->shards[c].comm, i) % tp;
            lowest = at < lowest ? at : lowest;
        }
    dt_comm *tied = dt__tied_group(zero, bucket);
    return lowest == 0 && (!tied || dt_comm_rank(tied) == 0);
}

static const char *const dt__state_names[] = { "m.", "v.", "master.", "ema." };
static char *dt__state_name(dt_ctx *ctx, int array, const char *name) {
    return dt__concat_text(ctx, dt__state_names[array], strlen(dt__state_names[array]), name);
}

/* Adds one tensor to the list of tensors, in JSON: [file,name,type,d0,d1,...]. */
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
    char name[128];
    dt_weight_part part;
    for (int i = 0; i < dt_weight_map_part(&p, i, name, &part); i++)
        dt__list_add(o, DT__MODEL, name, t->dtype, p.shape);
    for (int a = 0; a <= DT__EMA && !c->export_desc; a++) {
        char *state =
            dt__zero_has_array(c->zero, bucket, a) ? dt__state_name(c->ctx, a, t->name) : NULL;
        if (state) dt__list_add(o, DT__OPTIM, state, bucket->grad_dtype, t->param->full);
        dt__string_free(c->ctx, state);
    }
    return dt_error(c->ctx);
}

/* 1-bit Adam: writes the name of the tensor of this rank's worker (e = 0) or server error. */
static void dt__onebit_error_name(
    const dt_checkpoint *c, int bucket, int e, char *name, size_t bytes) {
    snprintf(name, bytes, "error%d.%d.%d", e, dt_ctx_rank(c->ctx), bucket);
}
static dt_shape dt__onebit_error_shape(const dt__zero_bucket *z, int e) {
    return DT_SHAPE((int64_t)(z->error_bytes[e] / dt__zero_element_size(z)));
}

/* The first rank of each pipeline stage lists all tensors of its stage, and every rank lists its
   own 1-bit Adam errors. */
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
            dt__list_add(o, DT__OPTIM, name, zero->buckets[u].bucket.grad_dtype,
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
    if (t->dtype == (dt_dtype)dtype && dt__same_shape(t->shape, shape)) return DT_OK;
    return dt_fail(c->ctx, DT_ERR_ARG, "dt_checkpoint: '%s' is %s and %s", name,
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
        dt_weights_desc desc = { 0, { 0 } };
        if (c->export_desc) desc.llmc = c->export_desc->llmc;
        c->w[f] = dt_weights_create(ctx, c->files.path[f], desc);
        c->file[f] = (dt__ckpt_file){ .owner = c, .file = f };
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
    for (int f = 0; f < c->n_files && dt_error(ctx) == DT_OK; f++)
        if (dt__weights_layout(c->w[f]) == DT_OK) dt__digests_make(c, f, dt_weights_count(c->w[f]));
    return dt_error(ctx);
}

// ==== 22. Checkpoints: saving ===================================================================

static void dt__save_add_op(
    dt_checkpoint *c, int kind, int file, void *data, int64_t bytes, int64_t offset) {
    dt__file_op *grown = (dt__file_op *)dt__grow(
        c->ctx, c->ops, c->n_ops, &c->ops_capacity, sizeof *grown, "operations of a save");
    if (!grown) return;
    c->ops = grown;
    c->ops[c->n_ops++] = (dt__file_op){ kind, file, DT__FINAL, data, bytes, offset };
}

/* Copies bytes to a buffer, for the I/O thread to write later, as part of the previous write if
   they continue it. */
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
        dt__save_add_op(c, DT__OP_WRITE, file, to, bytes, offset);
}

/* Keeps the buffers, because allocating memory takes longer than copying to it. */
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

/* The dt__sink: adds to the tensor's digest, and writes the bytes or stages them. */
static void dt__ckpt_sink(
    void *user, int index, int64_t first, int64_t count, const void *data, int64_t offset) {
    dt__ckpt_file *file = (dt__ckpt_file *)user;
    dt_checkpoint *c = file->owner;
    const dt_weight *t = dt_weights_get(c->w[file->file], index);
    int64_t bytes = count * (int64_t)dt_dtype_size(t->dtype);
    file->digest[index] += dt__elements_digest(NULL, t->dtype, first, data, count);
    file->count[index] += count;
    dt__files *f = &c->files;
    if (c->staged)
        dt__staging_add(c, file->file, data, bytes, offset);
    else
        dt__writer_write(&f->writer, f->path[file->file], f->fd[file->file], data, bytes, offset);
}

int dt_weight_map_part(const dt_weight_map *map, int i, char *name, dt_weight_part *part) {
    if (!map || map->n < 1 || map->n > 2 || i < 0 || !name || !part) return 0;
    int parts = map->groups > 1 ? map->n * map->groups : map->n;
    if (i >= parts) return parts;
    const char *from = map->name[i % map->n], *star = strchr(from, '*');
    *part = map->part[i % map->n];
    if (map->groups > 1 && star)
        snprintf(name, 128, "%.*s%d%s", (int)(star - from), from, i / map->n, star + 1);
    else
        snprintf(name, 128, "%s", from);
    part->name = name;
    return parts;
}

/* Saves or loads all parts of a parameter. */
static dt_status dt__params_copy(dt_weights *w, dt_tensor *t, const dt_weight_map *p) {
    enum { NAME = 128 };
    if (p->groups < 2)
        return dt__weights_copy_param(w, w->writing, t, p->columns, p->part, p->n ? p->n : 1);
    int n = p->groups * p->n;
    size_t bytes = (size_t)n * (sizeof(dt_weight_part) + NAME);
    dt_weight_part *part = (dt_weight_part *)dt_alloc(t->ctx, DT_MEM_HOST, bytes, "parts");
    for (int i = 0; part && i < n; i++)
        dt_weight_map_part(p, i, (char *)(part + n) + i * NAME, &part[i]);
    if (part) dt__weights_copy_param(w, w->writing, t, p->columns, part, n);
    dt_free(t->ctx, DT_MEM_HOST, part, bytes);
    return dt_error(t->ctx);
}

/* Returns 1 if desc.grows allows a tensor of a checkpoint to have fewer rows than in the program:
   its name is desc.grows, or ends in a dot and desc.grows, as those of state arrays do. */
static int dt__may_grow(const dt_checkpoint *c, const char *name) {
    const char *grows = c->desc.grows ? c->desc.grows : "";
    size_t n = strlen(name), end = strlen(grows);
    return end > 0 && n >= end && strcmp(name + n - end, grows) == 0 &&
           (n == end || name[n - end - 1] == '.');
}

/* When a parameter is loaded that may have more rows than in the file (desc.grows): sets p to the
   file's number of rows and returns 1 if the file has fewer. */
static int dt__load_grows(
    const dt_checkpoint *c, const dt_weights *w, dt_weight_map *p, const dt_tensor *t) {
    if (w->writing || !dt__may_grow(c, p->part[0].name)) return 0;
    const dt_weight *there = dt_weights_get(w, dt_weights_find(w, p->part[0].name));
    if (!there || there->count >= dt_count(t->param->full)) return 0;
    p->part[0].rows = there->shape.d[0];
    p->part[0].file_rows = 0;
    return 1;
}

/* Fills `host` with the values that elements [from, to) of a state array have where the file has
   none: 0, or for master weights the parameters. */
static dt_status dt__state_initial(
    dt_checkpoint *c, dt__zero_bucket *z, int array, size_t from, size_t to, char *host) {
    size_t size = dt__zero_element_size(z), narrow = dt_dtype_size(z->bucket.dtype), n = to - from;
    memset(host, 0, n * size); /* padding is 0 */
    if (array != DT__MASTER || !(c->desc.convert_dtype || c->desc.grows)) return DT_OK;
    char *values = (char *)dt_alloc(c->ctx, DT_MEM_HOST, n * narrow, "loading");
    if (values && dt__array_access(c->zero, z, DT__PARAMS, 0,
                      (from - z->bucket.shard_offset) * narrow, values, n * narrow) == DT_OK)
        dt__convert(z->bucket.grad_dtype, host, z->bucket.dtype, values, (int64_t)n);
    dt_free(c->ctx, DT_MEM_HOST, values, n * narrow);
    return dt_error(c->ctx);
}

/* Resharding. Saves or loads a bucket's parameters, as w is open for writing or for reading. Each
   rank reads its own local slices. All ranks of the data group hold the parameters (at stage 3
   after a gather), so each of them writes a fraction. */
static dt_status dt__params_transfer(dt_checkpoint *c, dt_weights *w, dt__zero_bucket *z) {
    dt_ctx *ctx = c->ctx;
    dt_bucket *bucket = &z->bucket;
    int gathered = !bucket->data;
    if (dt__ensure_values(NULL, dt_param_get(ctx, bucket->first_param)) != DT_OK)
        return dt_error(ctx);
    w->share = dt_comm_rank(z->data_group);
    w->shares = w->writing ? dt_comm_size(z->data_group) : 0;
    for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        dt_weight_map p;
        if (dt__ckpt_map_weight(c, t, &p) != DT_OK) return dt_error(ctx);
        if (p.n < 0) continue;
        w->fewer_rows = dt__load_grows(c, w, &p, t);
        if (dt__params_copy(w, t, &p) != DT_OK) return dt_error(ctx);
    }
    dt__bucket_release(ctx, bucket, 0, gathered);
    return dt_error(ctx);
}

/* Returns the number of elements of a tensor in the file, but at most those of `full`. */
static int64_t dt__weights_stored(const dt_weights *w, int index, dt_shape full) {
    const dt_weight *there = dt_weights_get(w, index);
    return there && there->count < dt_count(full) ? there->count : dt_count(full);
}

/* Transfers elements [from, to) of a bucket's state array between `host` and the file. Each
   contiguous range of a parameter's local slice has its position in the full tensor. Padding, that
   is, elements of a slice beyond the end of the full tensor, is not in the file. */
static dt_status dt__state_range_transfer(dt_checkpoint *c, dt_weights *w, const dt_bucket *bucket,
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
        if (index < 0 && array == DT__MASTER && c->desc.convert_dtype && !w->writing) continue;
        /* a checkpoint with fewer rows (desc.grows) has the first elements */
        int64_t stored = w->writing ? dt_count(p->full) : dt__weights_stored(w, index, p->full);
        while (dt__slice_next(&walk)) {
            size_t at = p->offset + (size_t)walk.local, begin = at > lo ? at : lo;
            size_t end = at + (size_t)walk.count < hi ? at + (size_t)walk.count : hi;
            if (begin >= end) continue;
            int64_t first = walk.global + (int64_t)(begin - at), n = (int64_t)(end - begin);
            if (first + n > stored) n = stored - first;
            if (n <= 0) continue;
            if (dt__weights_access(w, w->writing, index, first, n, bucket->grad_dtype,
                    host + (begin - from) * size) != DT_OK)
                return dt_error(c->ctx);
        }
    }
    return dt_error(c->ctx);
}

/* Saves or loads this rank's shard of a bucket's optimizer state. If several ranks hold this shard,
   each of them writes a fraction. `host` is scratch memory. */
static dt_status dt__state_transfer(
    dt_checkpoint *c, dt_weights *w, dt__zero_bucket *z, char *host) {
    dt_zero *zero = c->zero;
    dt_comm *replicas = zero->stage->shard_optim ? z->replica_group : z->data_group;
    size_t n = w->writing ? (size_t)dt_comm_size(replicas) : 1,
           k = w->writing ? (size_t)dt_comm_rank(replicas) : 0, size = dt__zero_element_size(z);
    size_t from = z->offset + z->count / n * k,
           end = k + 1 == n ? z->offset + z->count : from + z->count / n;
    for (int a = 0; a <= DT__EMA; a++)
        for (size_t at = from, to; at < end && dt__zero_has_array(zero, &z->bucket, a); at = to) {
            size_t here = (at - z->offset) * size, bytes = (end - at) * size;
            if (bytes > (size_t)DT__CKPT_CHUNK) bytes = DT__CKPT_CHUNK;
            to = at + bytes / size;
            if (w->writing)
                dt__array_access(zero, z, a, 0, here, host, bytes);
            else if (dt__state_initial(c, z, a, at, to, host) != DT_OK)
                return dt_error(c->ctx);
            if (dt__state_range_transfer(c, w, &z->bucket, a, at, to, host) == DT_OK && !w->writing)
                dt__array_access(zero, z, a, 1, here, host, bytes);
            if (dt_error(c->ctx) != DT_OK) return dt_error(c->ctx);
        }
    return dt_error(c->ctx);
}

/* Saves or loads this rank's 1-bit Adam errors of bucket u. `host` is scratch memory. */
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
            if (w->writing) dt__move_now(c->ctx, host, here, n * size);
            dt__weights_access(
                w, w->writing, index, (int64_t)at, (int64_t)n, z->bucket.grad_dtype, host);
            if (!w->writing) dt__move_now(c->ctx, here, host, n * size);
        }
    }
    return dt_error(c->ctx);
}

/* Writes all data of the checkpoint that this rank has to write. */
static dt_status dt__save_write(dt_checkpoint *c) {
    dt_zero *zero = c->zero;
    char *host = (char *)dt_alloc(c->ctx, DT_MEM_HOST, DT__CKPT_CHUNK, "saving");
    double done = 0, total = 0; /* elements of buckets */
    for (int u = 0; u < zero->n_buckets; u++) total += (double)zero->buckets[u].bucket.count;
    for (int u = 0; u < zero->n_buckets && host && dt_error(c->ctx) == DT_OK; u++) {
        dt__zero_bucket *z = &zero->buckets[u];
        int writes = dt__ckpt_is_writer(zero, &z->bucket);
        if ((!writes || dt__params_transfer(c, c->w[DT__MODEL], z) == DT_OK) && !c->export_desc &&
            (!writes || dt__state_transfer(c, c->w[DT__OPTIM], z, host) == DT_OK))
            dt__errors_transfer(c, c->w[DT__OPTIM], u, host);
        done += (double)z->bucket.count;
        if (c->desc.progress && dt_ctx_rank(c->ctx) == 0)
            c->desc.progress(done / total, c->desc.user);
    }
    dt_free(c->ctx, DT_MEM_HOST, host, DT__CKPT_CHUNK);
    return dt_error(c->ctx);
}

/* Sums the ranks' digests. Fails unless the ranks have written every element once. */
static dt_status dt__save_digests(dt_checkpoint *c) {
    for (int f = 0; f < c->n_files && dt__digests_sum(c, f) == DT_OK; f++)
        for (int i = 0; i < c->file[f].n && dt_error(c->ctx) == DT_OK; i++) {
            const dt__weight *t = &c->w[f]->weight[i];
            if (c->file[f].count[i] != t->expected)
                dt_fail(c->ctx, DT_ERR_ARG,
                    "%s: %lld of the %lld elements of '%s' would be written: is dt_zero_desc.mesh "
                    "the mesh that sharded it, and is its map_weight right?",
                    c->what, (long long)c->file[f].count[i], (long long)t->expected, t->t.name);
        }
    return dt_error(c->ctx);
}

/* ---- the manifest ---- */

static dt__text dt__ckpt_layout(const dt_zero *zero) {
    const dt_mesh_desc *n = &zero->mesh.sizes;
    dt__text text = dt__format("dp %d tp %d cp %d pp %d ep %d", n->dp, n->tp, n->cp, n->pp, n->ep);
    if (n->expert_tp) dt__put(&text, " expert_tp %d", n->expert_tp);
    return text;
}

static dt__text dt__ckpt_seed(const dt_ctx *ctx) {
    return dt__format("%llu", (unsigned long long)dt_ctx_seed(ctx));
}

/* Returns a text of the manifest, or NULL. */
static const char *dt__manifest_text(const dt_json *j, const char *key) {
    return dt_json_string(j, dt_json_find(j, 0, key), NULL);
}

static void dt__put_hex(dt_json_out *o, const char *key, uint64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)value);
    dt_json_put_string(o, key, text);
}

static uint64_t dt__bytes_digest(const void *data, int64_t bytes) {
    return dt__elements_digest(NULL, DT_U8, 0, data, bytes);
}

/* Adds one file to the manifest: its size, the size and digest of its header, and the digests of
   its tensors. The header of a file without tensors is the whole file. */
static void dt__manifest_file(dt_json_out *o, const char *name, int64_t bytes, const char *header,
    int64_t header_bytes, const dt_weights *w, const uint64_t *digest) {
    dt_json_open(o, name, '{');
    dt_json_put_int(o, "bytes", bytes);
    dt_json_put_int(o, "header", header_bytes);
    dt__put_hex(o, "digest", dt__bytes_digest(header, header_bytes));
    dt_json_open(o, "tensors", '{');
    for (int i = 0; i < dt_weights_count(w); i++)
        dt__put_hex(o, dt_weights_get(w, i)->name, digest[i]);
    dt_json_close(o, '}');
    dt_json_close(o, '}');
}

/* Names of the optimizers (DT_ADAMW to DT_MUON) in manifest.json. */
static const char *const dt__optimizers[] = { "adamw", "adam", "sgd", "onebit-adam", "own",
    "muon" };

/* Writes the last DT__MANIFEST_END bytes of a manifest, with the digest of the preceding bytes
   `data`, to `text`. */
enum { DT__MANIFEST_END = 30 };
static void dt__manifest_end(char *text, const char *data, size_t bytes) {
    uint64_t h = dt__digest(bytes, data, bytes);
    snprintf(text, DT__MANIFEST_END + 1, ",\"digest\":\"%016llx\"}\n", (unsigned long long)h);
}

/* Outliers: lists the last norms or losses, from the oldest, if the program skips by them. */
static void dt__manifest_window(dt_json_out *o, const char *name, const dt_outlier *w, int used) {
    enum { N = DT_OUTLIER_WINDOW };
    if (!used || w->count == 0) return;
    dt_json_open(o, name, '[');
    for (int64_t i = w->count > N ? w->count - N : 0; i < w->count; i++)
        dt_json_put_number(o, NULL, w->values[i % N]);
    dt_json_close(o, ']');
}

/* Parameter groups: "groups" lists the patterns, the optimizer and the steps of each group, if
   there are more than group 0. */
static void dt__manifest_groups(dt_json_out *o, const dt_zero *zero) {
    if (zero->n_param_groups < 2) return;
    dt_json_open(o, "groups", '[');
    for (int k = 0; k < zero->n_param_groups; k++) {
        const dt__param_group *group = &zero->param_groups[k];
        dt_json_open(o, NULL, '[');
        dt_json_put_string(o, NULL, k ? group->desc.params : "");
        dt_json_put_string(o, NULL, dt__optimizers[group->desc.optimizer]);
        dt_json_put_int(o, NULL, group->step);
        dt_json_close(o, ']');
    }
    dt_json_close(o, ']');
}

static dt_status dt__manifest_check(dt_checkpoint *c, const char *func);
/* Makes the manifest and checks that dt_checkpoint_load will accept it. dt_checkpoint_open
   rehearses this, with the longest numbers and without the safetensors files. */
static dt_status dt__manifest_make(dt_checkpoint *c, int rehearsal) {
    dt_zero *zero = c->zero;
    dt_json_out o = { c->ctx, NULL, 0, 0 };
    char text[DT__MANIFEST_END + 8];
    dt_json_open(&o, NULL, '{');
    dt_json_put_string(&o, "format", "dt checkpoint");
    dt_json_put_int(&o, "version", DT_CHECKPOINT_FORMAT);
    dt_json_put_int(&o, "step", zero->step);
    dt_json_put_string(&o, "seed", dt__ckpt_seed(c->ctx).s);
    dt_json_put_string(&o, "layout", dt__ckpt_layout(zero).s);
    dt_json_put_string(&o, "optimizer", dt__optimizers[zero->desc.optimizer]);
    dt__manifest_groups(&o, zero);
    dt__manifest_window(&o, "norms", &zero->norms, zero->desc.skip_norm_z > 0);
    dt__manifest_window(&o, "losses", &zero->losses, zero->desc.skip_loss_z > 0);
    dt_json_put_number(&o, "loss_scale", zero->loss_scale);
    dt_json_put_int(&o, "good_steps", zero->good_steps);
    dt_json_put_int(&o, "patience", zero->hysteresis_left);
    dt_json_open(&o, "saved", '{');
    for (int i = 0; i < c->desc.n_extra_state; i++) {
        const dt_extra_state *s = &c->desc.extra_state[i];
        dt_json_open(&o, s->name, '[');
        for (int k = 0; k < s->count && dt_error(c->ctx) == DT_OK; k++) {
            if (rehearsal) /* as long as -1.2345678901234567e-300, and parsed in less time */
                dt__json_write(&o, &",0.0000000000000000000000"[k == 0], 25 - (k == 0));
            else if (!isfinite(s->values[k]))
                dt_fail(c->ctx, DT_ERR_ARG,
                    "dt_checkpoint_save: number %d of '%s' is %g: only finite ones can be saved", k,
                    dt__printable_name(s->name).s, s->values[k]);
            else
                dt_json_put_number(&o, NULL, s->values[k]);
        }
        dt_json_close(&o, ']');
    }
    dt_json_close(&o, '}');
    dt_json_put_string(&o, "config", c->desc.config);
    dt_json_open(&o, "files", '{');
    for (int f = 0; f < DT__CKPT_FILES && !rehearsal; f++) {
        const dt__weight_file *file = &c->w[f]->file[0];
        dt__manifest_file(&o, dt__ckpt_names[f], file->bytes, file->header,
            dt__header_bytes(c->w[f]), c->w[f], c->file[f].digest);
    }
    int64_t beside = c->config_json ? (int64_t)strlen(c->config_json) : 0;
    if (c->config_json)
        dt__manifest_file(&o, "config.json", beside, c->config_json, beside, NULL, NULL);
    dt_json_close(&o, '}');
    if (dt_error(c->ctx) == DT_OK) {
        dt__manifest_end(text, o.text, o.used);
        dt__json_write(&o, text, DT__MANIFEST_END);
    }
    c->manifest = o.text;
    c->manifest_bytes = o.used;
    c->manifest_capacity = o.capacity;
    if (dt_error(c->ctx) != DT_OK) return dt_error(c->ctx);
    return dt__manifest_check(c, rehearsal ? "dt_checkpoint_open" : "dt_checkpoint_save");
}

static void dt__manifest_free(dt_checkpoint *c) {
    dt_free(c->ctx, DT_MEM_HOST, c->manifest, c->manifest_capacity);
    c->manifest = NULL;
}

/* ---- the steps of a save ---- */

/* [collective: world] Sets the paths of the new checkpoint on every rank. */
static dt_status dt__save_name(dt_checkpoint *c) {
    dt__files *f = &c->files;
    const char *dir = f->path[DT__DIR];
    dt__ckpt_id newest = dt__ckpt_last, same = { c->zero->step + 1, 0 }, id = { c->zero->step, 1 };
    double number = 0; /* in the name of the .tmp folder */
    char name[64];
    if (dt__newest_on_all(c->ctx, "dt_checkpoint_save", dir, &newest) != DT_OK)
        return dt_error(c->ctx);
    dt__ckpt_name(newest, name, sizeof name);
    if (dt_ctx_rank(c->ctx) == 0) {
        const dt_host *host = dt_ctx_host(c->ctx);
        uint64_t now = (uint64_t)(host->now(host->user) * 1e6) * 2654435761u,
                 pid = (uint64_t)getpid() * 40503u;
        number = (double)((now ^ pid) >> 4 & 0xffffff);
        if (dt__ckpt_before(c->newest_known, newest))
            dt_fail(c->ctx, DT_ERR_IO,
                "dt_checkpoint_save: %s has %s already, which this job has not loaded: go on from "
                "it, or save to another folder",
                dir, name);
    }
    if (dt__newest_on_all(c->ctx, "dt_checkpoint_save", dir, &same) != DT_OK ||
        dt_sum_doubles(c->zero->mesh.world, &number, 1) != DT_OK)
        return dt_error(c->ctx);
    if (same.step == id.step) id.repeat = same.repeat + 1;
    if (dt__ckpt_before(c->newest_known, id)) c->newest_known = id;
    dt__ckpt_name(id, name, sizeof name);
    dt__files_path(f, DT__FINAL, dir, name);
    snprintf(name + strlen(name), sizeof name - strlen(name), ".%06x.tmp", (unsigned)number);
    dt__files_path(f, DT__TEMP, dir, name);
    for (int i = DT__MODEL; i <= DT__MANIFEST; i++)
        dt__files_path(f, i, f->path[DT__TEMP], dt__ckpt_names[i]);
    return dt_error(c->ctx);
}

/* [collective: world] Rank 0 creates the files and writes their headers; the other ranks then open
   them. */
static dt_status dt__save_create_files(dt_checkpoint *c) {
    dt__files *f = &c->files;
    dt__writer *w = &f->writer;
    const char *temp = f->path[DT__TEMP];
    int first = dt_ctx_rank(c->ctx) == 0;
    c->created = first && !c->export_desc && dt__writer_make_folder(w, temp);
    for (int i = 0; i < c->n_files && first; i++) {
        f->fd[i] = dt__writer_create(w, f->path[i], c->w[i]->file[0].bytes);
        c->created |= f->fd[i] >= 0;
        dt__writer_write(
            w, f->path[i], f->fd[i], c->w[i]->file[0].header, dt__header_bytes(c->w[i]), 0);
    }
    if (dt__files_check(c->ctx, f, c->what) != DT_OK || dt_barrier(c->zero->mesh.world) != DT_OK)
        return dt_error(c->ctx);
    for (int i = 0; i < c->n_files && !first; i++) {
        int fd = f->fd[i] = dt__open(&w->io, f->path[i], DT_IO_WRITE);
        int64_t size = fd >= 0 ? w->io.size(w->io.user, fd) : -1;
        if (fd >= 0 && size < 0) dt__writer_fail(w, f->path[i], "size");
        int missing = fd < 0 ? dt__io_absent() : size >= 0 && size != c->w[i]->file[0].bytes;
        if (missing)
            return dt_fail(c->ctx, DT_ERR_IO,
                "%s: this rank does not see the %s that rank 0 has made: all ranks must share the "
                "folder",
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
    dt__manifest_free(c);
    if (c->export_desc) return;
    /* not after the thread was abandoned, because removing may hang too */
    if (dt_error(c->ctx) != DT_OK && c->created && !(f->thread && f->thread->abandoned))
        dt__ckpt_remove(&f->writer.io, f->path[DT__TEMP]);
    c->created = 0;
}

/* Starts c->ops. `background`: on the I/O thread, if there is one; else on this thread. */
static void dt__save_request(dt_checkpoint *c, int saving) {
    c->request =
        (dt__io_request){ .files = &c->files, .ops = c->ops, .n_ops = c->n_ops, .background = 1 };
    c->saving = saving;
    dt__io_start(&c->request);
}

/* Writes the staged bytes, if the save is in the background; then syncs and closes the files. */
static void dt__save_start(dt_checkpoint *c) {
    for (int i = 0; i < c->n_files; i++) dt__save_add_op(c, DT__OP_CLOSE, i, NULL, 0, 0);
    if (dt_error(c->ctx) != DT_OK) return;
    if (c->staged && !c->files.thread && !dt__io_join(c->zero, &c->files, 1))
        dt_log(c->ctx, DT_LOG_NOTICE,
            "%s: no thread to write it in the background: it was written at once",
            c->files.path[DT__FINAL]);
    dt__save_request(c, DT__SAVE_WRITING);
}

static void dt__save_add_file(dt_checkpoint *c, int file, char *text, size_t bytes) {
    int64_t n = (int64_t)bytes;
    dt__save_add_op(c, DT__OP_CREATE, file, NULL, n, 0);
    dt__save_add_op(c, DT__OP_WRITE, file, text, n, 0);
    dt__save_add_op(c, DT__OP_CLOSE, file, NULL, 0, 0);
}

/* Rank 0 commits the checkpoint, after all ranks' bytes are on the disk. */
static void dt__save_commit(dt_checkpoint *c) {
    c->n_ops = 0;
    if (c->config_json) dt__save_add_file(c, DT__CONFIG, c->config_json, strlen(c->config_json));
    dt__save_add_file(c, DT__MANIFEST, c->manifest, c->manifest_bytes);
    dt__save_add_op(c, DT__OP_SYNC_FOLDER, DT__TEMP, NULL, 0, 0);
    dt__save_add_op(c, DT__OP_RENAME, DT__TEMP, NULL, 0, 0);
    dt__save_add_op(c, DT__OP_KEEP, DT__FINAL, NULL, c->desc.keep, 0);
    if (dt_error(c->ctx) == DT_OK) dt__save_request(c, DT__SAVE_COMMITTING);
}

static dt_status dt__save_wait(dt_checkpoint *c);
static dt_status dt__checkpoint_save(dt_checkpoint *c) {
    dt_status usable = dt__zero_usable(c ? c->zero : NULL, "dt_checkpoint_save");
    if (usable != DT_OK) return usable;
    dt_zero *zero = c->zero;
    if (!c->desc.dir)
        return dt_fail(c->ctx, DT_ERR_ARG, "dt_checkpoint_save: dt_checkpoint_desc.dir is NULL");
    if (dt__ema_not_swapped(zero, "dt_checkpoint_save") != DT_OK) return dt_error(c->ctx);
    for (int u = 0; u < zero->n_buckets; u++)
        if (zero->buckets[u].bucket.grad_state != DT_GRAD_EMPTY)
            return dt_fail(c->ctx, DT_ERR_ARG,
                "dt_checkpoint_save: after dt_zero_step and before the next backward, for "
                "gradients are not saved");
    if (dt__save_wait(c) != DT_OK || dt__compare_before_save(zero, c->what) != DT_OK)
        return dt_error(c->ctx);
    c->staged = c->desc.background;
    if (dt__save_name(c) == DT_OK && dt__list_make(c) == DT_OK &&
        dt__save_create_files(c) == DT_OK && dt__save_write(c) == DT_OK &&
        dt__save_digests(c) == DT_OK &&
        (dt_ctx_rank(c->ctx) != 0 || dt__manifest_make(c, 0) == DT_OK)) {
        dt__save_start(c);
        if (!c->desc.background) dt__save_wait(c);
    }
    if (dt_error(c->ctx) != DT_OK) dt__save_end(c);
    return dt_error(c->ctx);
}

DT__DEFINE_AT_SITE(dt_status, checkpoint_save, c ? c->ctx : NULL, (dt_checkpoint * c), c)

static int dt__checkpoint_poll(dt_checkpoint *c) {
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

DT__DEFINE_AT_SITE(int, checkpoint_poll, c ? c->ctx : NULL, (dt_checkpoint * c), c)

/* [collective: world] Polls until no save is in progress. */
static dt_status dt__save_wait(dt_checkpoint *c) {
    const dt_host *host = dt_ctx_host(c->ctx);
    while (!dt__checkpoint_poll(c))
        if (c->desc.background) host->sleep(host->user, 1e-4);
    return dt_error(c->ctx);
}

// ==== 23. Checkpoints: opening, closing, export =================================================

/* Creates the folder DIR if it is missing, locks it, writes lock_text (DT__LOCK_TEXT bytes), and
   removes .tmp folders that killed jobs have left in DIR. */
static void dt__dir_lock(dt_ctx *ctx, dt__files *f, char *lock_text) {
    dt__writer *w = &f->writer;
    const char *dir = f->path[DT__DIR], *path = f->path[DT__LOCK];
    char text[400] = "", host[200] = "";
    dt__files_path(f, DT__LOCK, dir, "lock");
    int fd = w->why[0] ? -1 : dt__open(&w->io, path, DT_IO_LOCK);
    if (fd < 0 && errno == ENOENT && dt__writer_make_folder(w, dir))
        fd = dt__open(&w->io, path, DT_IO_LOCK);
    if (fd < 0) dt__writer_fail(w, path, "open");
    f->fd[DT__LOCK] = fd;
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
        dt_log(ctx, DT_LOG_NOTICE, "%s: no locks there (%s): a second job would not be noticed",
            dir, dt__io_reason());
    dt__read_text(&w->io, "/proc/sys/kernel/hostname", host, sizeof host);
    host[strcspn(host, "\n")] = 0;
    snprintf(lock_text, DT__LOCK_TEXT, "process %ld on %.200s\n%.6f\n", (long)getpid(),
        host[0] ? host : "a host without a name", dt_ctx_host(ctx)->now(dt_ctx_host(ctx)->user));
    w->io.resize(w->io.user, fd, 0);
    dt__writer_write(w, path, fd, lock_text, (int64_t)strlen(lock_text), 0);
    /* Makes the name DIR durable. Every job does so, because the job that created DIR may have been
       killed before its fsync. EACCES: this job may have no permission to read the parent. */
    dt__writer_sync_parent(w, dir, EACCES);
    dt__tmp_sweep sweep = { &w->io, dir };
    w->io.list_folder(w->io.user, dir, dt__tmp_sweep_one, &sweep);
}

static dt_status dt__checkpoint_desc_check(dt_ctx *ctx, const dt_checkpoint_desc *d) {
    if (d->n_extra_state < 0 || (d->n_extra_state > 0 && !d->extra_state))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_checkpoint_open: n_extra_state is %d, and extra_state %s", d->n_extra_state,
            d->extra_state ? "an array" : "NULL");
    for (int i = 0; i < d->n_extra_state; i++) {
        const dt_extra_state *s = &d->extra_state[i];
        if (!s->name || !*s->name)
            return dt_fail(
                ctx, DT_ERR_ARG, "dt_checkpoint_open: the name of extra_state[%d] has 0 bytes", i);
        if (s->count < 0 || (s->count > 0 && !s->values))
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_checkpoint_open: extra_state[%d], '%s', has %d numbers at %s", i,
                dt__printable_name(s->name).s, s->count, s->values ? "values" : "NULL");
    }
    size_t beside = d->config_json ? strlen(d->config_json) : 0;
    if (beside > DT__JSON_BYTES)
        return dt_fail(ctx, DT_ERR_ARG, "dt_checkpoint_open: config_json has %zu bytes; at most %d",
            beside, DT__JSON_BYTES);
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

static dt_checkpoint *dt__checkpoint_open(dt_zero *zero, dt_checkpoint_desc desc) {
    if (dt__zero_usable(zero, "dt_checkpoint_open") != DT_OK) return NULL;
    dt_ctx *ctx = zero->ctx;
    const dt_io *io = dt_ctx_io(ctx);
    if (!io->make_folder || !io->list_folder || !io->lock || !io->remove_folder)
        dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_checkpoint_open: the io table has no folders: make, list, lock and remove_folder");
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
    dt__manifest_make(c, 1);
    dt__manifest_free(c);
    if (desc.dir) dt__copy_dir(ctx, "dt_checkpoint_open", c->files.path[DT__DIR], desc.dir);
    if (desc.dir && dt_ctx_rank(ctx) == 0 && dt_error(ctx) == DT_OK)
        dt__dir_lock(ctx, &c->files, c->lock_text);
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
    (dt_checkpoint_close)(c);
    return NULL;
}

DT__DEFINE_AT_SITE(dt_checkpoint *, checkpoint_open, zero ? zero->ctx : NULL,
    (dt_zero * zero, dt_checkpoint_desc desc), zero, desc)

/* Exports the parameters to the file `path`. `c` is a checkpoint that has one file and no
   folder. */
static dt_status dt__export(dt_checkpoint *c, const char *path) {
    dt__files *f = &c->files;
    dt_comm *world = c->zero->mesh.world;
    int bytes = snprintf(f->path[DT__MODEL], DT__PATH_BYTES, "%s.tmp", path);
    if (dt__path_check(c->ctx, c->what, path, bytes) != DT_OK || dt__list_make(c) != DT_OK ||
        dt__save_create_files(c) != DT_OK || dt__save_write(c) != DT_OK ||
        dt__save_digests(c) != DT_OK)
        return dt_error(c->ctx);
    dt__save_start(c);
    if (dt__files_check(c->ctx, f, c->what) != DT_OK || dt_barrier(world) != DT_OK)
        return dt_error(c->ctx);
    if (dt_ctx_rank(c->ctx) == 0) dt__writer_rename(&f->writer, f->path[DT__MODEL], path, 0);
    return dt__files_check(c->ctx, f, c->what) == DT_OK ? dt_barrier(world) : dt_error(c->ctx);
}

static dt_status dt__zero_export(dt_zero *zero, const char *path, dt_export_desc desc) {
    dt_status status = dt__zero_usable(zero, "dt_zero_export");
    if (status != DT_OK) return status;
    if (!path || !*path) return dt_fail(zero->ctx, DT_ERR_ARG, "dt_zero_export: a path is needed");
    dt_checkpoint c = { .zero = zero,
        .ctx = zero->ctx,
        .desc = { .map_weight = desc.map_weight, .user = desc.user },
        .what = "dt_zero_export",
        .n_files = 1,
        .export_desc = &desc };
    dt__files_init(c.ctx, &c.files);
    if (dt__compare_before_save(zero, c.what) == DT_OK) dt__export(&c, path);
    dt__save_end(&c);
    dt__staging_free(&c);
    if (dt_error(c.ctx) != DT_OK && c.created)
        c.files.writer.io.remove(c.files.writer.io.user, c.files.path[DT__MODEL]);
    return dt_error(c.ctx);
}

DT__DEFINE_AT_SITE(dt_status, zero_export, zero ? zero->ctx : NULL,
    (dt_zero * zero, const char *path, dt_export_desc desc), zero, path, desc)

dt_checkpoint *dt_checkpoint_here(dt_checkpoint *checkpoint, const char *file, int line) {
    if (checkpoint) dt_ctx_here(checkpoint->ctx, file, line);
    return checkpoint;
}

const char *dt_checkpoint_path(const dt_checkpoint *c) { return c ? c->path : ""; }
const char *dt_checkpoint_config(const dt_checkpoint *c) { return c && c->config ? c->config : ""; }

static dt_status dt__checkpoint_close(dt_checkpoint *c) {
    if (!c) return DT_OK;
    dt_ctx *ctx = c->ctx;
    if (dt_error(ctx) == DT_OK) dt__save_wait(c);
    dt_unlisten(ctx, &c->listener);
    dt__ckpt_free(ctx, c);
    return dt_error(ctx);
}

DT__DEFINE_AT_SITE(dt_status, checkpoint_close, c ? c->ctx : NULL, (dt_checkpoint * c), c)

// ==== 24. Checkpoints: loading ==================================================================

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
    int32_t state;                  /* DT__INTACT to DT__UNREADABLE */
    char why[700];                  /* error text, unless `state` is DT__INTACT */
} dt__candidate;

/* States of a checkpoint, from best to worst. Instead of a damaged one an older one is loaded. If
   one is unreadable (permissions, descriptors, memory, the disk), the load fails, because it may be
   intact. */
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
    dt_host host = *dt_ctx_host(c->ctx);
    host.log = dt__candidate_log;
    /* the CPU's kernels, because the checks need host memory only */
    dt_ctx_desc d = { .kernels = dt_kernels_cpu(), .host = &host, .io = dt_ctx_io(c->ctx) };
    memset(f->w, 0, sizeof f->w);
    f->why[0] = 0;
    f->state = DT__INTACT;
    f->probe = dt_ctx_make(d);
    if (!f->probe)
        dt_fail(c->ctx, DT_ERR_MEM, "dt_checkpoint_load: no memory to look at %s", f->path);
    return f->probe != NULL;
}

/* If the context `probe` has failed, sets `state` and `why`, unless `why` is already set. */
static void dt__candidate_note_error(dt__candidate *f) {
    const char *text = dt_error_text(f->probe);
    if (f->why[0] || dt_error(f->probe) == DT_OK) return;
    if (f->probe->read_failed || dt_error(f->probe) == DT_ERR_MEM) f->state = DT__UNREADABLE;
    if (f->state == DT__INTACT) f->state = DT__DAMAGED;
    snprintf(f->why, sizeof f->why, "%s", strncmp(text, "rank 0: ", 8) == 0 ? text + 8 : text);
}

/* Fails unless the manifest is complete, undamaged and not of a newer format. */
static void dt__candidate_parse(dt__candidate *f) {
    char end[DT__MANIFEST_END + 1];
    int64_t version = 0;
    size_t last = f->bytes < DT__MANIFEST_END ? 0 : f->bytes - DT__MANIFEST_END;
    dt__manifest_end(end, f->text, last);
    int intact = last > 0 && memcmp(f->text + last, end, DT__MANIFEST_END) == 0;
    f->json = dt_json_parse(f->probe, f->name, f->text, f->bytes);
    if (!f->json) return;
    const char *format = dt__manifest_text(f->json, "format");
    if (!format || strcmp(format, "dt checkpoint") != 0 ||
        !dt_json_int(f->json, dt_json_find(f->json, 0, "version"), &version) || version < 1) {
        dt_json_fail(f->json, 0, "it is no manifest of a dt checkpoint");
    } else if (version > DT_CHECKPOINT_FORMAT) {
        if (intact) f->state = DT__NEWER;
        dt_fail(f->probe, DT_ERR_UNSUPPORTED,
            "%s: a checkpoint of format %lld; this program knows formats up to %d: a newer dt "
            "wrote it",
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
    if (dt__io_exists(dt_ctx_io(f->probe), f->path) || dt__io_absent() || f->probe->read_failed)
        return;
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

/* Compares a file's size and the digest of its header (of config.json: of the whole file) with
   `node`, its entry in the manifest. */
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
    else if (header_bytes != header || dt__bytes_digest(head, header) != digest)
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

/* [collective: world] Sets `state` and `why` on all ranks to the worst that any rank has found. */
static dt_status dt__candidate_agree(dt_checkpoint *c, dt__candidate *f) {
    dt_comm *world = dt_world(c->ctx);
    if (f->probe) dt__candidate_note_error(f);
    int32_t ranks = dt_comm_size(world), last = ranks - 1, worst = 0;
    /* the maximum also names the first rank of that state */
    int32_t mine = f->state * ranks + last - dt_comm_rank(world);
    dt_all_reduce(world, &mine, &worst, 1, DT_I32, DT_MAX);
    f->state = worst / ranks;
    if (f->state != DT__INTACT)
        dt_broadcast(world, f->why, sizeof f->why / 4, DT_I32, last - worst % ranks);
    return dt_error(c->ctx);
}

/* Reads this rank's fraction of file k and sets its digests. Each small tensor is read by one rank
   (round-robin); of each large tensor every rank reads a fraction. */
static void dt__candidate_read(dt_checkpoint *c, dt__candidate *f, int k, char *buffer) {
    dt_comm *world = c->zero->mesh.world;
    int64_t n = dt_comm_size(world), rank = dt_comm_rank(world);
    for (int i = 0; i < dt_weights_count(f->w[k]) && dt_error(f->probe) == DT_OK; i++) {
        const dt_weight *t = dt_weights_get(f->w[k], i);
        int64_t size = (int64_t)dt_dtype_size(t->dtype), max_count = DT__CKPT_CHUNK / size;
        int small = t->count * size < DT__CKPT_CHUNK;
        int64_t from = small ? 0 : t->count / n * rank,
                to = small || rank == n - 1 ? t->count : from + t->count / n;
        for (int64_t at = from, n_chunk; at < to && (!small || i % n == rank); at += n_chunk) {
            n_chunk = to - at < max_count ? to - at : max_count;
            if (dt_weights_read(f->w[k], i, at, n_chunk, t->dtype, buffer) != DT_OK) return;
            c->file[k].digest[i] += dt__elements_digest(NULL, t->dtype, at, buffer, n_chunk);
            c->file[k].count[i] += n_chunk;
        }
    }
}

/* [collective: world] Compares the digest of every tensor of file k with the manifest. */
static dt_status dt__candidate_digests(dt_checkpoint *c, dt__candidate *f, int k) {
    const dt__ckpt_file *have = &c->file[k];
    char *buffer =
        (char *)dt_alloc(c->ctx, DT_MEM_HOST, DT__CKPT_CHUNK, "a window into a checkpoint");
    int file = dt_json_find(f->json, dt_json_find(f->json, 0, "files"), dt__ckpt_names[k]);
    int digests = dt_json_find(f->json, file, "tensors");
    if (dt__digests_make(c, k, dt_weights_count(f->w[k])) == DT_OK)
        dt__candidate_read(c, f, k, buffer);
    /* if a rank could not read its fraction, the digests differ, but that rank's state is worse */
    int summed = dt__digests_sum(c, k) == DT_OK;
    for (int i = 0; i < have->n && summed && dt_error(f->probe) == DT_OK; i++) {
        const char *name = dt_weights_get(f->w[k], i)->name;
        uint64_t want = dt__candidate_hex(f, dt_json_find(f->json, digests, name));
        if (have->digest[i] == want) continue;
        dt_fail(f->probe, DT_ERR_IO, "%s/%s: tensor '%s' is damaged: its digest is another",
            f->path, dt__ckpt_names[k], dt__printable_name(name).s);
    }
    dt_free(c->ctx, DT_MEM_HOST, buffer, DT__CKPT_CHUNK);
    dt__list_free(c);
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
   checkpoint's folder, or to "" if there is none. */
static dt_status dt__candidate_next(
    dt_checkpoint *c, const char *dir, dt__ckpt_id *at, dt__candidate *f) {
    char name[64];
    f->path[0] = 0;
    if (dt__newest_on_all(c->ctx, "dt_checkpoint_load", dir, at) != DT_OK || at->step < 0)
        return dt_error(c->ctx);
    dt__ckpt_name(*at, name, sizeof name);
    return dt__path_check(
        c->ctx, "dt_checkpoint_load", dir, snprintf(f->path, sizeof f->path, "%s/%s", dir, name));
}

/* Returns 1 if this job saves to `folder`, also under another path of the same folder, whose lock
   file then contains this job's lock_text. */
static int dt__is_own_dir(const dt_checkpoint *c, const char *folder) {
    const dt_io *io = &c->files.writer.io;
    char path[DT__PATH_BYTES + 8], text[sizeof c->lock_text] = "";
    int64_t length = (int64_t)strlen(c->lock_text);
    int end;
    if (length == 0 || strcmp(folder, c->files.path[DT__DIR]) == 0) return length > 0;
    snprintf(path, sizeof path, "%s/lock", folder);
    int fd = dt__open(io, path, DT_IO_READ);
    if (fd >= 0) dt__io_transfer(io, fd, 0, text, length, 0, &end);
    if (fd >= 0) io->close(io->user, fd);
    return strcmp(text, c->lock_text) == 0;
}

/* Marks a checkpoint as damaged if the step in its manifest differs from `name`, the step in its
   folder's name: a copy of an old checkpoint under a later name must not count as the newest. */
static void dt__candidate_check_step(dt__candidate *f, int64_t name) {
    int64_t step = -1;
    if (dt_json_int(f->json, dt_json_find(f->json, 0, "step"), &step) && step == name) return;
    f->state = DT__DAMAGED;
    snprintf(f->why, sizeof f->why, "%.600s: it is of step %lld: the folder has another's name",
        f->name, (long long)step);
}

/* On rank 0: if f is a checkpoint of desc.dir, records in newest_known that this job has seen f. */
static void dt__candidate_note_newest(dt_checkpoint *c, const dt__candidate *f) {
    const char *name = dt__path_name(f->path);
    dt__ckpt_id id = dt__ckpt_parse_name(name, strlen(name));
    char above[DT__PATH_BYTES];
    int bytes = (int)(name - f->path) - 1;
    if (bytes < 1) bytes = 1; /* the folder of "/step-2" is "/" */
    snprintf(above, sizeof above, "%.*s", bytes, name > f->path ? f->path : ".");
    if (dt_ctx_rank(c->ctx) == 0 && dt__is_own_dir(c, above) &&
        dt__ckpt_before(c->newest_known, id))
        c->newest_known = id;
}

/* Returns 1 if the folder `from` contains manifest.json or optim.safetensors. */
static int dt__is_checkpoint(dt_checkpoint *c, const char *from) {
    char path[DT__PATH_BYTES + 32];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", from, dt__ckpt_names[i ? DT__OPTIM : DT__MANIFEST]);
        if (dt__io_exists(&c->files.writer.io, path) || errno == ESPIPE) return 1;
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

/* Fails unless a checkpoint has this program's parameter groups. A checkpoint without groups fits a
   program whose groups all have the checkpoint's optimizer. */
static dt_status dt__load_groups_fit(dt_checkpoint *c, dt__candidate *f) {
    const dt_zero *zero = c->zero;
    dt_json *j = f->json;
    const char *optimizer = dt__manifest_text(j, "optimizer");
    int list = dt_json_find(j, 0, "groups"), n = list < 0 ? 1 : dt_json_count(j, list);
    if (list >= 0 && n != zero->n_param_groups)
        return dt_fail(c->ctx, DT_ERR_ARG,
            "dt_checkpoint_load: %s: it has %d parameter groups besides the first, and this "
            "program has %d",
            f->path, n - 1, zero->n_param_groups - 1);
    for (int k = 0; k < zero->n_param_groups; k++) {
        const dt_param_group *g = &zero->param_groups[k].desc;
        const char *own[2] = { k ? g->params : "", dt__optimizers[g->optimizer] },
                   *was[2] = { own[0], optimizer };
        int64_t step;
        int node = list < 0 ? -1 : dt_json_at(j, list, k);
        for (int i = 0; i < 2 && list >= 0; i++)
            was[i] = dt_json_string(j, dt_json_at(j, node, i), NULL);
        for (int i = 0; i < 2; i++)
            if (!was[i] || strcmp(was[i], own[i]) != 0)
                return dt_fail(c->ctx, DT_ERR_ARG,
                    "dt_checkpoint_load: %s: the %s of parameter group %d is '%s' there, and '%s' "
                    "in this program",
                    f->path, i ? "optimizer" : "pattern", k,
                    was[i] ? dt__printable_name(was[i]).s : "", own[i]);
        if (list >= 0 && (!dt_json_int(j, dt_json_at(j, node, 2), &step) || step < 0))
            return dt_fail(c->ctx, DT_ERR_IO,
                "dt_checkpoint_load: %s: the steps of parameter group %d are no number", f->path,
                k);
    }
    return DT_OK;
}

/* Sets the steps of each parameter group; those of a checkpoint without groups are its step. */
static void dt__load_group_steps(dt_zero *zero, const dt__candidate *f) {
    int list = dt_json_find(f->json, 0, "groups");
    for (int k = 0; k < zero->n_param_groups; k++) {
        dt__param_group *group = &zero->param_groups[k];
        group->step = zero->step;
        if (list >= 0)
            dt_json_int(
                f->json, dt_json_at(f->json, dt_json_at(f->json, list, k), 2), &group->step);
    }
}

/* Fails unless a checkpoint has this program's optimizer, seed and extra_state. */
static dt_status dt__load_fits(dt_checkpoint *c, dt__candidate *f) {
    dt_ctx *ctx = c->ctx;
    dt_json *j = f->json;
    dt__text seed = dt__ckpt_seed(ctx);
    const char *const names[2] = { "optimizer", "seed" }, *const own[2] = {
        dt__optimizers[c->zero->desc.optimizer], seed.s
    };
    for (int i = 0; i < 2; i++) {
        const char *was = dt__manifest_text(j, names[i]);
        if (!was || strcmp(was, own[i]) != 0)
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_checkpoint_load: %s: its %s is %s, and this program's is %s%s", f->path,
                names[i], was ? dt__printable_name(was).s : "missing", own[i],
                i ? ": the random numbers would be others" : "");
    }
    if (dt__load_groups_fit(c, f) != DT_OK) return dt_error(ctx);
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

/* Fails unless dt_checkpoint_load will accept the new manifest. */
static dt_status dt__manifest_check(dt_checkpoint *c, const char *func) {
    dt__candidate f;
    memset(&f, 0, sizeof f);
    snprintf(f.path, sizeof f.path, "%s", c->files.path[DT__FINAL]);
    snprintf(f.name, sizeof f.name, "%s%smanifest.json", f.path, f.path[0] ? "/" : "");
    if (!dt__candidate_open(c, &f)) return dt_error(c->ctx);
    f.text = c->manifest;
    f.bytes = c->manifest_bytes;
    dt__candidate_parse(&f);
    for (int k = 0; k < DT__CKPT_FILES && c->w[k]; k++)
        dt_json_free(dt_json_parse(f.probe, dt__ckpt_names[k], c->w[k]->file[0].header + 8,
            (size_t)dt__header_bytes(c->w[k]) - 8));
    dt__candidate_note_error(&f);
    if (f.state == DT__UNREADABLE)
        dt_fail(c->ctx, DT_ERR_MEM, "%s: %s", func, f.why);
    else if (f.state != DT__INTACT)
        dt_fail(c->ctx, DT_ERR_ARG, "%s: it could not be loaded: %s", func, f.why);
    if (dt_error(c->ctx) == DT_OK) dt__load_fits(c, &f);
    f.text = NULL; /* the writer frees the manifest */
    dt__candidate_close(&f);
    return dt_error(c->ctx);
}

/* Returns 1 if a tensor is an error array of 1-bit Adam, which another layout may lack. */
static int dt__is_onebit_error(int file, const char *name) {
    return file == DT__OPTIM && strncmp(name, "error", 5) == 0 &&
           (name[5] == '0' || name[5] == '1') && name[6] == '.';
}

/* Returns 1 if desc.convert_dtype and desc.grows allow a tensor to be loaded from `there`. */
static int dt__load_converts(const dt_checkpoint *c, const dt_weight *t, const dt_weight *there) {
    if (there->dtype != t->dtype && (!c->desc.convert_dtype || dt__integer(there->dtype))) return 0;
    if (there->shape.nd != t->shape.nd) return 0;
    for (int i = 0; i < t->shape.nd; i++)
        if (there->shape.d[i] != t->shape.d[i] &&
            !(i == 0 && dt__may_grow(c, t->name) && there->shape.d[0] < t->shape.d[0]))
            return 0;
    return 1;
}

static int dt__load_is_master(const dt_checkpoint *c, int file, const char *name) {
    const char *master = dt__state_names[DT__MASTER];
    return c->desc.convert_dtype && file == DT__OPTIM && strncmp(name, master, strlen(master)) == 0;
}

/* Parameters of another type than the checkpoint's: loads them from its master weights, which are
   more exact than its parameters. */
static dt_status dt__load_from_masters(
    dt_checkpoint *c, dt__candidate *f, dt_weights *w, const dt__zero_bucket *z) {
    const dt_bucket *bucket = &z->bucket;
    for (int i = bucket->first_param; i < bucket->first_param + bucket->n_params; i++) {
        dt_tensor *t = dt_param_get(c->ctx, i);
        dt_weight_map p;
        if (!c->desc.convert_dtype || dt__ckpt_map_weight(c, t, &p) != DT_OK) break;
        const dt_weights *model = f->w[DT__MODEL];
        const dt_weight *there = dt_weights_get(model, dt_weights_find(model, p.part[0].name));
        char *name = dt__state_name(c->ctx, DT__MASTER, t->name);
        memset(&p, 0, sizeof p);
        p.part[0].name = name;
        if (there && there->dtype != t->dtype && dt_weights_find(w, name) >= 0) {
            w->fewer_rows = dt__load_grows(c, w, &p, t);
            dt__weights_copy_param(w, 0, t, 0, p.part, 1);
        }
        dt__string_free(c->ctx, name);
        if (dt_error(c->ctx) != DT_OK) break;
    }
    return dt_error(c->ctx);
}

static int dt__is_ema(int file, const char *name) {
    const char *ema = dt__state_names[DT__EMA];
    return file == DT__OPTIM && strncmp(name, ema, strlen(ema)) == 0;
}

static dt_status dt__load_tensors_fit(dt_checkpoint *c, dt__candidate *f) {
    for (int k = 0; k < DT__CKPT_FILES; k++) {
        const char *file = dt__ckpt_names[k];
        for (int i = 0; i < dt_weights_count(c->w[k]); i++) {
            const dt_weight *t = dt_weights_get(c->w[k], i);
            const dt_weight *there = dt_weights_get(f->w[k], dt_weights_find(f->w[k], t->name));
            if (dt__is_onebit_error(k, t->name)) continue;
            if (!there && dt__load_is_master(c, k, t->name)) continue;
            if (!there)
                return dt_fail(c->ctx, DT_ERR_ARG,
                    "dt_checkpoint_load: %s/%s has no '%s', which this program has%s", f->path,
                    file, t->name,
                    dt__is_ema(k, t->name) ? ": it was saved without dt_zero_desc.ema_decay" : "");
            if (dt__load_converts(c, t, there)) continue;
            return dt_fail(c->ctx, DT_ERR_ARG,
                "dt_checkpoint_load: %s/%s: '%s' is %s of %s there, and %s of %s in this program",
                f->path, file, t->name, there->type, dt__shape_text(there->shape).s, t->type,
                dt__shape_text(t->shape).s);
        }
        for (int i = 0; i < dt_weights_count(f->w[k]); i++) {
            const char *name = dt_weights_get(f->w[k], i)->name;
            if (dt_weights_find(c->w[k], name) < 0 && !dt__is_onebit_error(k, name) &&
                !dt__load_is_master(c, k, name))
                return dt_fail(c->ctx, DT_ERR_ARG,
                    "dt_checkpoint_load: %s/%s has '%s', which this program has not%s", f->path,
                    file, dt__printable_name(name).s,
                    dt__is_ema(k, name) ? ": it was saved with dt_zero_desc.ema_decay" : "");
        }
    }
    return DT_OK;
}

/* [collective: world] Loads the error arrays of 1-bit Adam if the layout is the one that saved
   them. Otherwise leaves them as they are, and logs a notice. */
static dt_status dt__load_errors(dt_checkpoint *c, dt__candidate *f, dt_weights *w, char *host) {
    dt_zero *zero = c->zero;
    const char *layout = dt__manifest_text(f->json, "layout");
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

static void dt__load_window(const dt_json *j, const char *name, dt_outlier *w) {
    int list = dt_json_find(j, 0, name);
    double value;
    *w = (dt_outlier){ .count = 0 };
    for (int i = 0; list >= 0 && i < dt_json_count(j, list); i++)
        if (dt_json_number(j, dt_json_at(j, list, i), &value)) dt_outlier_z(w, value);
}

/* Loads what the manifest holds. */
static void dt__load_numbers(dt_checkpoint *c, dt__candidate *f) {
    dt_zero *zero = c->zero;
    dt_json *j = f->json;
    const char *config = dt__manifest_text(j, "config");
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
    dt__load_window(j, "norms", &zero->norms);
    dt__load_window(j, "losses", &zero->losses);
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
    if (!dt_json_int(f->json, dt_json_find(f->json, 0, "step"), &zero->step) || zero->step < 0)
        return dt_fail(ctx, DT_ERR_IO, "dt_checkpoint_load: %s: its step is no number", f->path);
    zero->next_compare = 0; /* the loaded step may be an older one */
    zero->agreed_step = -1; /* an earlier agreement does not cover the loaded values */
    for (int k = 0; k < DT__CKPT_FILES; k++)
        dt__files_path(&c->files, k, f->path, dt__ckpt_names[k]);
    if (dt__files_check(ctx, &c->files, "dt_checkpoint_load") != DT_OK ||
        dt__load_fits(c, f) != DT_OK)
        return dt_error(ctx);
    dt__load_group_steps(zero, f); /* before the list, which has no master weights of step 0 */
    if (dt__list_make(c) != DT_OK || dt__load_tensors_fit(c, f) != DT_OK) return dt_error(ctx);
    dt__list_free(c);
    for (int k = 0; k < DT__CKPT_FILES && dt_error(ctx) == DT_OK; k++)
        w[k] = dt_weights_open(ctx, c->files.path[k]);
    char *host = (char *)dt_alloc(ctx, DT_MEM_HOST, DT__CKPT_CHUNK, "loading");
    for (int u = 0; u < zero->n_buckets && dt_error(ctx) == DT_OK; u++)
        if (dt__params_transfer(c, w[DT__MODEL], &zero->buckets[u]) == DT_OK &&
            dt__load_from_masters(c, f, w[DT__OPTIM], &zero->buckets[u]) == DT_OK)
            dt__state_transfer(c, w[DT__OPTIM], &zero->buckets[u], host);
    if (dt_error(ctx) == DT_OK && zero->desc.optimizer == DT_ONEBIT_ADAM)
        dt__load_errors(c, f, w[DT__OPTIM], host);
    dt_free(ctx, DT_MEM_HOST, host, DT__CKPT_CHUNK);
    for (int k = 0; k < DT__CKPT_FILES; k++) dt_weights_close(w[k]);
    if (dt_error(ctx) == DT_OK) dt__load_numbers(c, f);
    /* fail unless all replicas are equal after the load */
    return dt_error(ctx) == DT_OK ? dt__compare_replicas(zero, "dt_checkpoint_load")
                                  : dt_error(ctx);
}

static int64_t dt__checkpoint_load(dt_checkpoint *c, const char *from) {
    dt__candidate f;
    char dir[DT__PATH_BYTES];
    memset(&f, 0, sizeof f);
    if (dt__zero_usable(c ? c->zero : NULL, "dt_checkpoint_load") != DT_OK ||
        dt__ema_not_swapped(c->zero, "dt_checkpoint_load") != DT_OK)
        return -1;
    if (!from) from = c->files.path[DT__DIR];
    if (dt__copy_dir(c->ctx, "dt_checkpoint_load", dir, from) == DT_OK &&
        dt__save_wait(c) == DT_OK && dt__candidate_newest(c, dir, &f) == DT_OK && f.path[0])
        dt__load_apply(c, &f);
    if (f.probe) dt__candidate_close(&f);
    /* if any rank could not load, this barrier fails on every rank */
    if (dt_error(c->ctx) == DT_OK) dt_barrier(c->zero->mesh.world);
    if (dt_error(c->ctx) == DT_OK) return f.path[0] ? c->zero->step : 0;
    dt__list_free(c);
    return -1;
}

DT__DEFINE_AT_SITE(
    int64_t, checkpoint_load, c ? c->ctx : NULL, (dt_checkpoint * c, const char *from), c, from)

// ==== 25. Sparse tables: rows and updates =======================================================

/* The index is a hash table of buckets of one cache line: a lookup of a key that exists usually
   reads one line of the index, then the row.

       bucket:  key key key key key   row row row row row   passed        64 bytes

   A key's home is a bucket of its shard. If the bucket is full, the key goes to the next one, and
   `passed` of the full bucket counts it. So a search ends at the first bucket that no key has
   passed, and removing a key needs no tombstone (the overflow counts of Folly's F14). A shard has
   at most 4 keys per bucket on average; it then grows by a quarter.

   The lookups of a batch are independent, so the code works on three keys at a time, DT__AHEAD keys
   apart: it requests the bucket of the first, searches that of the second and requests its row, and
   copies or updates the third. Otherwise each key would wait for two or more cache misses. */

enum { DT__TABLE_SLOTS = 5, DT__TABLE_SHARDS = 64, DT__AHEAD = 16, DT__AHEAD_RING = 64 };
/* A slot's `row` is a row number; or for a spilled row DT__TABLE_SPILLED plus the number of its
   record; or for a key that is not admitted DT__TABLE_PENDING, two flags and the number of its
   pushes; or DT__TABLE_EMPTY. */
#define DT__TABLE_EMPTY 0xffffffffu
#define DT__TABLE_PENDING 0x80000000u
#define DT__TABLE_TOUCHED 0x40000000u /* pushed since the last shrink */
#define DT__TABLE_CHANGED 0x20000000u /* changed since the last snapshot */
#define DT__TABLE_COUNT 0x1fffffffu
#define DT__TABLE_SPILLED 0x40000000u
#define DT__TABLE_MAX_CLOCK 1000000000000000 /* 15 digits in the name of a snapshot */

typedef struct dt__table_bucket {
    uint64_t key[DT__TABLE_SLOTS];
    uint32_t row[DT__TABLE_SLOTS], passed;
} dt__table_bucket;

typedef struct dt__table_shard {
    dt__table_bucket *buckets; /* (count) */
    uint32_t count, used;      /* used: slots that are not empty */
} dt__table_shard;

typedef struct dt__table_segment { /* 1 << segment_shift rows */
    char *values, *state;
    char *notes; /* of each row: clock of the last push (int64_t); then shows, clicks (float) */
} dt__table_segment;

typedef struct dt__table_block { /* of the spill file */
    uint64_t holes;              /* set of its free records */
    int next;                    /* in the list of blocks with many */
} dt__table_block;

typedef struct dt__table_batch { /* buffers of a push, for `capacity` keys */
    size_t capacity, slots, sum_capacity;
    uint32_t *slot;        /* (slots) hash table of the batch: number of a distinct key */
    uint32_t *first, *sum; /* of each distinct key: its first entry; its row of sums, or EMPTY */
    float *stats;          /* of each distinct key: shows, clicks */
    char *sums;            /* (sum_capacity) rows: gradient sums of keys that repeat */
} dt__table_batch;

struct dt_table {
    dt_ctx *ctx;
    dt_table_desc desc; /* with defaults filled in; desc.name is a copy */
    dt_listener listener;
    const dt_kernels *kernels; /* of the CPU */
    dt_mem row_mem, state_mem; /* classes of the rows and of the state */
    uint64_t key;              /* RNG key of the initial values; key + 1: of the admission */
    dt_dtype compute;          /* type of gradients and state */
    size_t row_bytes, grad_bytes, state_bytes, note_bytes, master_bytes;
    dt__table_shard shards[DT__TABLE_SHARDS];
    dt__table_segment *segments;
    int n_segments, segment_capacity, segment_shift;
    /* rows from next_row on were never used; list of the n_free removed rows */
    uint32_t next_row, free_row, n_free;
    /* spilling: most segments (0: no limit); rows that are made free for a part of a push; the
       index shard and bucket at which the search for old rows goes on; the file */
    int max_segments, reserve, hand_shard, spill_fd;
    uint32_t hand_bucket;
    /* a spilled row's record: notes, values, state; padded to 8; of the buffers from `block` on */
    size_t record_bytes, stride, spill_bytes;
    /* blocks of the spill file: records of each, at most 64; list of the blocks of which a quarter
       or more is free, -1: none; buffer of a block */
    int block_rows, n_blocks, block_capacity, open_block;
    dt__table_block *blocks;
    char *block;
    /* (cache_rows) records that were read, and their numbers: n is at n % cache_rows */
    uint32_t cache_rows, *cached;
    char *cache;
    dt__table_batch batch;
    dt_table_stats stats;
    /* snapshots */
    int64_t shrinks;   /* number of shrinks that decayed the statistics */
    uint64_t *removed; /* (n_removed) keys removed since the last snapshot */
    int n_removed, removed_capacity;
    dt__ckpt_id saved, newest_known; /* last snapshot saved or loaded; step -1: none */
    int64_t saved_clock;
    char dir[DT__PATH_BYTES]; /* folder of `saved` */
};

/* ---- memory ---- */

static dt_status dt__table_usable(const dt_table *t) { return t ? dt_error(t->ctx) : DT_ERR_ARG; }

/* Allocates zeroed memory. The system gives large pieces zeroed pages; memset makes sure. */
static char *dt__table_alloc(dt_table *t, dt_mem mem, size_t bytes) {
    char *p = (char *)dt_alloc(t->ctx, mem, bytes, t->desc.name);
    if (p) memset(p, 0, bytes);
    return p;
}

static int64_t *dt__table_clock(const dt_table *t, uint32_t row) {
    return (int64_t *)(void *)(t->segments[row >> t->segment_shift].notes +
                               (row & ((1u << t->segment_shift) - 1)) * t->note_bytes);
}

static float *dt__table_shows(const dt_table *t, uint32_t row) {
    return (float *)(void *)(dt__table_clock(t, row) + 1);
}

static char *dt__table_values(const dt_table *t, uint32_t row) {
    return t->segments[row >> t->segment_shift].values +
           (row & ((1u << t->segment_shift) - 1)) * t->row_bytes;
}

static char *dt__table_state(const dt_table *t, uint32_t row) {
    return t->segments[row >> t->segment_shift].state +
           (row & ((1u << t->segment_shift) - 1)) * t->state_bytes;
}

static dt_status dt__table_add_segment(dt_table *t) {
    size_t rows = (size_t)1 << t->segment_shift;
    dt__table_segment *grown = (dt__table_segment *)dt__grow(t->ctx, t->segments, t->n_segments,
        &t->segment_capacity, sizeof *t->segments, t->desc.name);
    if (!grown) return dt_error(t->ctx);
    t->segments = grown;
    dt__table_segment *s = &grown[t->n_segments];
    s->values = dt__table_alloc(t, t->row_mem, rows * t->row_bytes);
    s->state = dt__table_alloc(t, t->state_mem, rows * t->state_bytes);
    s->notes = dt__table_alloc(t, DT_MEM_HOST, rows * t->note_bytes);
    t->n_segments++; /* also after a failure, so that dt__table_clear frees what there is */
    return dt_error(t->ctx);
}

/* Removes all rows and counts, and frees their memory. */
static void dt__table_clear(dt_table *t) {
    size_t rows = (size_t)1 << t->segment_shift;
    for (int i = 0; i < t->n_segments; i++) {
        dt_free(t->ctx, t->row_mem, t->segments[i].values, rows * t->row_bytes);
        dt_free(t->ctx, t->state_mem, t->segments[i].state, rows * t->state_bytes);
        dt_free(t->ctx, DT_MEM_HOST, t->segments[i].notes, rows * t->note_bytes);
    }
    for (int i = 0; i < DT__TABLE_SHARDS; i++)
        dt_free(t->ctx, DT_MEM_HOST, t->shards[i].buckets,
            t->shards[i].count * sizeof *t->shards[i].buckets);
    memset(t->shards, 0, sizeof t->shards);
    t->n_segments = 0;
    t->next_row = 0;
    t->free_row = DT__TABLE_EMPTY;
    t->n_free = 0;
    t->n_blocks = 0;
    t->open_block = -1;
    if (t->cached) memset(t->cached, 0xff, t->cache_rows * sizeof *t->cached);
    t->stats.rows = t->stats.pending = t->stats.spilled = 0;
    t->n_removed = 0;
}

/* ---- index ---- */

DT__INLINE uint64_t dt__table_hash(uint64_t key) {
    key ^= key >> 32;
    key *= 0xd6e8feb86659fd93u;
    key ^= key >> 32;
    key *= 0xd6e8feb86659fd93u;
    return key ^ key >> 32;
}

/* The home of a hash in its shard: the low 32 bits, scaled to the number of buckets. */
DT__INLINE uint32_t dt__table_home(const dt__table_shard *s, uint64_t hash) {
    return (uint32_t)((hash & 0xffffffffu) * s->count >> 32);
}

DT__INLINE uint32_t dt__table_next(const dt__table_shard *s, uint32_t at) {
    return at + 1 == s->count ? 0 : at + 1;
}

DT__INLINE int dt__table_slot(const dt__table_bucket *b, uint64_t key) {
    unsigned match = 0;
    for (unsigned i = 0; i < DT__TABLE_SLOTS; i++)
        match |= (unsigned)((b->key[i] == key) & (b->row[i] != DT__TABLE_EMPTY)) << i;
    return match ? __builtin_ctz(match) : -1;
}

/* Returns the key's slot in the index, or NULL. */
DT__INLINE uint32_t *dt__table_find(const dt_table *t, uint64_t key, uint64_t hash) {
    const dt__table_shard *s = &t->shards[hash >> 58];
    uint32_t at = dt__table_home(s, hash);
    for (uint32_t n = 0; n < s->count; n++, at = dt__table_next(s, at)) {
        int i = dt__table_slot(&s->buckets[at], key);
        if (i >= 0) return &s->buckets[at].row[i];
        if (s->buckets[at].passed == 0) return NULL;
    }
    return NULL;
}

/* Puts a key that is not in the shard into a bucket that is not full. */
static uint32_t *dt__table_put(dt__table_shard *s, uint64_t key, uint64_t hash, uint32_t row) {
    for (uint32_t at = dt__table_home(s, hash);; at = dt__table_next(s, at)) {
        dt__table_bucket *b = &s->buckets[at];
        for (int i = 0; i < DT__TABLE_SLOTS; i++)
            if (b->row[i] == DT__TABLE_EMPTY) {
                b->key[i] = key;
                b->row[i] = row;
                s->used++;
                return &b->row[i];
            }
        b->passed++;
    }
}

/* Adds a key that is not in the index. Returns its slot, or NULL on failure. */
static uint32_t *dt__table_insert(dt_table *t, uint64_t key, uint64_t hash, uint32_t row) {
    dt__table_shard *s = &t->shards[hash >> 58], old = *s;
    if (s->used < (uint64_t)s->count * (DT__TABLE_SLOTS - 1))
        return dt__table_put(s, key, hash, row);
    uint32_t count = s->count + s->count / 4 + 1;
    size_t bytes = count * sizeof *s->buckets;
    s->buckets = (dt__table_bucket *)dt_alloc(t->ctx, DT_MEM_HOST, bytes, t->desc.name);
    if (!s->buckets) return *s = old, (uint32_t *)NULL;
    s->count = count;
    s->used = 0;
    for (uint32_t at = 0; at < count; at++) {
        memset(s->buckets[at].row, 0xff, sizeof s->buckets[at].row); /* DT__TABLE_EMPTY */
        s->buckets[at].passed = 0;
    }
    for (uint32_t at = 0; at < old.count; at++)
        for (int i = 0; i < DT__TABLE_SLOTS; i++) {
            const dt__table_bucket *b = &old.buckets[at];
            if (b->row[i] != DT__TABLE_EMPTY)
                dt__table_put(s, b->key[i], dt__table_hash(b->key[i]), b->row[i]);
        }
    dt_free(t->ctx, DT_MEM_HOST, old.buckets, old.count * sizeof *old.buckets);
    return dt__table_put(s, key, hash, row);
}

/* ---- spilling ---- */

/* A system call for each row would take longer than its update. So rows are written in blocks: into
   the free records of a block that has many, which is read and written as a whole, or into a new
   block. A record that is read is cached, because the push of a key follows its pull. */

/* Frees the memory or the record of a row. */
static void dt__table_release(dt_table *t, uint32_t row) {
    if (row < DT__TABLE_SPILLED) {
        *dt__table_clock(t, row) = t->free_row;
        t->free_row = row;
        t->n_free++;
        return;
    }
    const uint32_t number = row - DT__TABLE_SPILLED, rows = (uint32_t)t->block_rows;
    dt__table_block *b = &t->blocks[number / rows];
    b->holes |= (uint64_t)1 << number % rows;
    t->stats.spilled--;
    if (__builtin_popcountll(b->holes) != (t->block_rows + 3) / 4) return;
    b->next = t->open_block;
    t->open_block = (int)(number / rows);
}

/* Reads or writes bytes of the spill file from record `number` on. */
static dt_status dt__table_transfer(
    dt_table *t, uint32_t number, int writing, char *data, size_t bytes) {
    int end = 0;
    int64_t at = (int64_t)number * (int64_t)t->stride, n = (int64_t)bytes;
    if (dt__io_transfer(&t->ctx->io, t->spill_fd, writing, data, n, at, &end) == n) return DT_OK;
    if (end) errno = writing ? ENOSPC : DT__SHORTER;
    return dt__io_fail(t->ctx, "table '%s': %s %s", dt__printable_name(t->desc.name).s,
        writing ? "spilling rows to" : "reading rows from", t->desc.spill);
}

/* Returns a row's notes, after which a spilled row has values and state. NULL on failure. */
static char *dt__table_notes(dt_table *t, uint32_t row) {
    if (row < DT__TABLE_SPILLED) return (char *)dt__table_clock(t, row);
    const uint32_t number = row - DT__TABLE_SPILLED, at = number % t->cache_rows;
    char *record = t->cache + at * t->stride;
    if (t->cached[at] == number) return record;
    t->cached[at] = DT__TABLE_EMPTY;
    if (dt__table_transfer(t, number, 0, record, t->record_bytes) != DT_OK) return NULL;
    t->cached[at] = number;
    return record;
}

/* Sets *block to a block of the spill file with free records, and reads it to t->block. */
static dt_status dt__table_open_block(dt_table *t, int *block) {
    const uint32_t rows = (uint32_t)t->block_rows;
    const uint64_t all = UINT64_MAX >> (64 - rows);
    if (t->open_block >= 0) {
        *block = t->open_block;
        t->open_block = t->blocks[*block].next;
        return t->blocks[*block].holes == all
                   ? DT_OK
                   : dt__table_transfer(t, (uint32_t)*block * rows, 0, t->block, rows * t->stride);
    }
    if ((uint32_t)t->n_blocks >= DT__TABLE_SPILLED / rows)
        return dt_fail(t->ctx, DT_ERR_UNSUPPORTED, "table '%s': at most %u spilled rows",
            dt__printable_name(t->desc.name).s, DT__TABLE_SPILLED);
    dt__table_block *grown = (dt__table_block *)dt__grow(
        t->ctx, t->blocks, t->n_blocks, &t->block_capacity, sizeof *grown, t->desc.name);
    if (!grown) return dt_error(t->ctx);
    t->blocks = grown;
    *block = t->n_blocks++;
    grown[*block].holes = all;
    return DT_OK;
}

/* Moves the rows of n slots to the spill file. */
static dt_status dt__table_spill(dt_table *t, uint32_t *const *slots, int n) {
    const uint32_t rows = (uint32_t)t->block_rows;
    for (int at = 0, block = 0, used; at < n; at += used) {
        uint32_t number[64];
        if (dt__table_open_block(t, &block) != DT_OK) return dt_error(t->ctx);
        uint64_t holes = t->blocks[block].holes;
        for (used = 0; holes && at + used < n; holes &= holes - 1, used++) {
            const uint32_t row = *slots[at + used], k = (uint32_t)__builtin_ctzll(holes);
            char *p = t->block + k * t->stride;
            number[used] = (uint32_t)block * rows + k;
            memcpy(p, dt__table_clock(t, row), t->note_bytes);
            memcpy(p += t->note_bytes, dt__table_values(t, row), t->row_bytes);
            if (t->state_bytes > 0)
                memcpy(p + t->row_bytes, dt__table_state(t, row), t->state_bytes);
        }
        if (dt__table_transfer(t, (uint32_t)block * rows, 1, t->block, rows * t->stride) != DT_OK)
            return dt_error(t->ctx);
        for (int i = 0; i < used; i++) {
            uint32_t *slot = slots[at + i], *cached = &t->cached[number[i] % t->cache_rows];
            if (*cached == number[i]) *cached = DT__TABLE_EMPTY;
            dt__table_release(t, *slot);
            *slot = DT__TABLE_SPILLED + number[i];
        }
        t->stats.spilled += used;
        t->blocks[block].holes = holes;
        if (__builtin_popcountll(holes) < (t->block_rows + 3) / 4) continue;
        t->blocks[block].next = t->open_block;
        t->open_block = block;
    }
    return DT_OK;
}

/* Spills the oldest quarter of the next rows in memory after the hand. */
static dt_status dt__table_spill_some(dt_table *t) {
    enum { SAMPLE = 256 };
    uint32_t *found[SAMPLE];
    int64_t clock[SAMPLE];
    int n = 0;
    for (int shards = 0; n < SAMPLE && shards < DT__TABLE_SHARDS; t->hand_bucket++) {
        const dt__table_shard *s = &t->shards[t->hand_shard];
        if (t->hand_bucket >= s->count) {
            t->hand_shard = (t->hand_shard + 1) % DT__TABLE_SHARDS;
            t->hand_bucket = UINT32_MAX; /* the next one is 0 */
            shards++;
            continue;
        }
        for (int i = 0; i < DT__TABLE_SLOTS && n < SAMPLE; i++)
            if (s->buckets[t->hand_bucket].row[i] < DT__TABLE_SPILLED)
                found[n++] = &s->buckets[t->hand_bucket].row[i];
    }
    for (int i = 0; i < n; i++) __builtin_prefetch(dt__table_clock(t, *found[i]));
    for (int i = 0; i < n; i++) clock[i] = *dt__table_clock(t, *found[i]);
    const int quarter = (n + 3) / 4;
    for (int chosen = 0; chosen < quarter; chosen++) {
        int oldest = chosen;
        for (int i = chosen + 1; i < n; i++)
            if (clock[i] < clock[oldest]) oldest = i;
        uint32_t *slot = found[oldest];
        found[oldest] = found[chosen];
        clock[oldest] = clock[chosen];
        found[chosen] = slot;
    }
    return dt__table_spill(t, found, quarter);
}

/* If the table has a limit, makes n rows free. */
static dt_status dt__table_make_room(dt_table *t, uint32_t n) {
    if (t->max_segments == 0) return DT_OK;
    uint32_t most = (uint32_t)t->max_segments << t->segment_shift;
    while (t->n_free + (most - t->next_row) < n)
        if (dt__table_spill_some(t) != DT_OK) return dt_error(t->ctx);
    return DT_OK;
}

/* Makes the file of spilled rows, and removes its name, so that it ends with the process. */
static dt_status dt__table_spill_open(dt_table *t) {
    const dt_io *io = &t->ctx->io;
    char path[DT__PATH_BYTES];
    for (int i = 0; t->spill_fd < 0 && i < 1000; i++) {
        int length = snprintf(path, sizeof path, "%s/dt-rank-%d-table.%d.spill", t->desc.spill,
            dt_ctx_rank(t->ctx), i);
        if (dt__path_check(t->ctx, "dt_table_make", t->desc.spill, length) != DT_OK) break;
        t->spill_fd = dt__open(io, path, DT_IO_PRIVATE);
        if (t->spill_fd < 0 && errno != EEXIST) break;
    }
    if (dt_error(t->ctx) == DT_OK && (t->spill_fd < 0 || io->remove(io->user, path) != 0))
        dt__io_fail(t->ctx, "dt_table_make: %s", path);
    return dt_error(t->ctx);
}

/* Removes a key from the index, and its row. Notes the key for the next delta. */
static dt_status dt__table_remove(dt_table *t, uint64_t key, uint32_t *slot) {
    uint64_t hash = dt__table_hash(key);
    dt__table_shard *s = &t->shards[hash >> 58];
    if (t->saved.step >= 0) {
        uint64_t *grown = (uint64_t *)dt__grow(
            t->ctx, t->removed, t->n_removed, &t->removed_capacity, sizeof *grown, t->desc.name);
        if (!grown) return dt_error(t->ctx);
        t->removed = grown;
        t->removed[t->n_removed++] = key;
    }
    if (*slot & DT__TABLE_PENDING) {
        t->stats.pending--;
    } else {
        dt__table_release(t, *slot);
        t->stats.rows--;
        t->stats.removed++;
    }
    uint32_t at = dt__table_home(s, hash);
    for (; slot < s->buckets[at].row || slot >= s->buckets[at].row + DT__TABLE_SLOTS;
         at = dt__table_next(s, at))
        s->buckets[at].passed--;
    *slot = DT__TABLE_EMPTY;
    s->used--;
    return DT_OK;
}

/* ---- initial values ---- */

/* The RNG key of one row, a function of the table's RNG key and the row's key. */
static uint64_t dt__table_row_key(uint64_t table_key, uint64_t key) {
    uint32_t word[4];
    dt__philox(table_key, key, word);
    return (uint64_t)word[0] << 32 | word[1];
}

/* Writes the initial values of a row, `width` numbers of type dtype. They are those of row `key` of
   a parameter (rows,width) with the table's name. Keys that are too large for an element's index
   have a stream of numbers each. */
static void dt__table_initial(const dt_table *t, uint64_t key, dt_dtype dtype, void *out) {
    size_t width = (size_t)t->desc.width;
    int has_index = key < UINT64_MAX / width;
    dt_fill_args constant = { dtype, out, width, t->desc.init.kind == 1 ? 1.0 : 0.0 };
    dt_init_args random = { dtype, out, width, t->desc.init.kind == 2, t->desc.init.scale,
        has_index ? t->key : dt__table_row_key(t->key, key), has_index ? key * width : 0 };
    if (t->desc.init.kind < 2)
        t->kernels->fill(&constant, NULL);
    else
        t->kernels->init(&random, NULL);
}

/* Rounds a master row to the row of a bf16 table. */
static void dt__table_round(const dt_table *t, const char *master, char *values) {
    for (int i = 0; i < t->desc.width; i++) {
        uint16_t rounded = dt__f32_to_bf16(((const float *)(const void *)master)[i]);
        memcpy(values + 2 * (size_t)i, &rounded, sizeof rounded);
    }
}

/* Returns a row number that is free, or DT__TABLE_EMPTY after a failure. */
static uint32_t dt__table_new_row(dt_table *t) {
    uint32_t row = t->free_row;
    if (row != DT__TABLE_EMPTY) {
        t->free_row = (uint32_t)*dt__table_clock(t, row);
        t->n_free--;
    } else if (t->next_row == DT__TABLE_SPILLED) {
        dt_fail(t->ctx, DT_ERR_UNSUPPORTED, "table '%s': at most %u rows",
            dt__printable_name(t->desc.name).s, DT__TABLE_SPILLED);
    } else if (t->next_row < (uint32_t)t->n_segments << t->segment_shift ||
               dt__table_add_segment(t) == DT_OK) {
        row = t->next_row++;
    }
    if (row != DT__TABLE_EMPTY) t->stats.rows++;
    return row;
}

/* Makes the row of a key with its initial values and state. */
static uint32_t dt__table_create(dt_table *t, uint64_t key) {
    uint32_t row = dt__table_new_row(t);
    if (row == DT__TABLE_EMPTY) return row;
    char *values = dt__table_values(t, row), *state = dt__table_state(t, row);
    size_t width = (size_t)t->desc.width;
    t->stats.created++;
    memset(dt__table_clock(t, row), 0, t->note_bytes);
    if (t->state_bytes > 0) memset(state, 0, t->state_bytes);
    dt__table_initial(t, key, t->compute, t->master_bytes ? state : values);
    if (t->master_bytes) dt__table_round(t, state, values);
    size_t from = t->desc.optimizer == DT_TABLE_FTRL ? width : 0, count = 0;
    if (t->desc.optimizer == DT_TABLE_ROWWISE_ADAGRAD) count = 1;
    if (t->desc.optimizer == DT_TABLE_ADAGRAD || t->desc.optimizer == DT_TABLE_FTRL) count = width;
    dt_fill_args first = { t->compute, state + t->master_bytes + from * t->grad_bytes / width,
        count, t->desc.initial_accumulator };
    if (count > 0 && t->desc.initial_accumulator != 0) t->kernels->fill(&first, NULL);
    return row;
}

/* Brings a spilled row back to memory. Returns its new number, or DT__TABLE_EMPTY on failure. */
static uint32_t dt__table_fetch(dt_table *t, uint32_t *slot) {
    const char *p = dt__table_notes(t, *slot);
    uint32_t row = p ? dt__table_new_row(t) : DT__TABLE_EMPTY;
    if (row == DT__TABLE_EMPTY) return row;
    memcpy(dt__table_clock(t, row), p, t->note_bytes);
    memcpy(dt__table_values(t, row), p += t->note_bytes, t->row_bytes);
    if (t->state_bytes > 0) memcpy(dt__table_state(t, row), p + t->row_bytes, t->state_bytes);
    t->stats.rows--; /* dt__table_new_row has counted it again */
    t->stats.fetched++;
    dt__table_release(t, *slot);
    return *slot = row;
}

/* ---- optimizers ---- */

DT__COLD_END
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

/* roots = sqrt(x). A loop over sqrtf is not vectorized, because sqrtf may set errno. */
static void dt__table_update_f32_roots(const float *x, float *roots, int n) {
    int i = 0;
#if defined(__SSE2__)
    for (; i + 4 <= n; i += 4) _mm_storeu_ps(roots + i, _mm_sqrt_ps(_mm_loadu_ps(x + i)));
#endif
    for (; i < n; i++) roots[i] = sqrtf(x[i]);
}
static void dt__table_update_f64_roots(const double *x, double *roots, int n) {
    for (int i = 0; i < n; i++) roots[i] = sqrt(x[i]);
}

/* Defines the update of one row for type R: w, g (width), s: the optimizer's state. The formulas
   are in section 5. */
#define DT__TABLE_UPDATE(R, NAME, SQRT) \
    static void NAME(const dt_table_desc *d, R *w, const R *g, R *s, double step_size) { \
        const R lr = (R)step_size, eps = (R)d->eps, b1 = (R)d->beta1, b2 = (R)d->beta2, \
                l1 = (R)d->l1, l2 = (R)d->l2, beta = (R)d->ftrl_beta; \
        const int n = d->width; \
        if (d->optimizer == DT_TABLE_SGD) \
            for (int i = 0; i < n; i++) w[i] -= lr * g[i]; \
        for (int at = 0; at < n && d->optimizer == DT_TABLE_ADAGRAD; at += 64) { \
            const int end = n - at < 64 ? n : at + 64; \
            R roots[64]; \
            for (int i = at; i < end; i++) s[i] += g[i] * g[i]; \
            NAME##_roots(s + at, roots, end - at); \
            for (int i = at; i < end; i++) w[i] -= lr * (g[i] / (roots[i - at] + eps)); \
        } \
        if (d->optimizer == DT_TABLE_ROWWISE_ADAGRAD) { \
            R sum[4] = { 0, 0, 0, 0 }; \
            int i = 0; \
            for (; i + 4 <= n; i += 4) \
                for (int k = 0; k < 4; k++) sum[k] += g[i + k] * g[i + k]; \
            for (; i < n; i++) sum[i & 3] += g[i] * g[i]; \
            s[0] += ((sum[0] + sum[1]) + (sum[2] + sum[3])) / (R)n; \
            const R factor = lr / (SQRT(s[0]) + eps); \
            for (i = 0; i < n; i++) w[i] -= factor * g[i]; \
        } \
        if (d->optimizer == DT_TABLE_ADAM) { \
            R *m = s, *v = s + n, t = s[2 * n] += 1; \
            const R c1 = (R)(1 - pow(d->beta1, (double)t)), \
                    c2 = (R)(1 - pow(d->beta2, (double)t)); \
            for (int i = 0; i < n; i++) { \
                m[i] = b1 * m[i] + (1 - b1) * g[i]; \
                v[i] = b2 * v[i] + (1 - b2) * (g[i] * g[i]); \
                w[i] -= lr * ((m[i] / c1) / (SQRT(v[i] / c2) + eps)); \
            } \
        } \
        if (d->optimizer == DT_TABLE_FTRL) \
            for (int i = 0; i < n; i++) { \
                R *z = s + i, *a = s + n + i, sum = *a + g[i] * g[i], root = SQRT(sum); \
                *z += g[i] - (root - SQRT(*a)) / lr * w[i]; \
                *a = sum; \
                R size = *z < 0 ? -*z : *z, slope = (beta + root) / lr + l2; \
                w[i] = size <= l1 ? 0 : (*z < 0 ? size - l1 : l1 - size) / slope; \
            } \
    }
DT__TABLE_UPDATE(float, dt__table_update_f32, sqrtf)
DT__TABLE_UPDATE(double, dt__table_update_f64, sqrt)
#undef DT__TABLE_UPDATE

/* Returns the first column of a gradient that is not finite, or -1. */
static int dt__table_bad_column(const dt_table *t, const void *grad) {
    const float *f = (const float *)grad;
    const double *d = (const double *)grad;
    uint32_t bad = 0; /* an exponent of all ones: not finite */
    int n = t->desc.width, is_f32 = t->compute == DT_F32;
    for (int i = 0; i < n && is_f32; i++)
        bad |= (uint32_t)((dt__float_bits(f[i]) & 0x7f800000u) == 0x7f800000u);
    if (is_f32 && !bad) return -1;
    for (int i = 0; i < n; i++)
        if (!isfinite(is_f32 ? (double)f[i] : d[i])) return i;
    return -1;
}

/* to += from, n numbers of the compute type */
static void dt__table_add(const dt_table *t, char *to, const char *from, int n) {
    float *f = (float *)(void *)to;
    double *d = (double *)(void *)to;
    const float *x = (const float *)(const void *)from;
    const double *y = (const double *)(const void *)from;
    for (int i = 0; i < n && t->compute == DT_F32; i++) f[i] += x[i];
    for (int i = 0; i < n && t->compute == DT_F64; i++) d[i] += y[i];
}

/* ---- pull ---- */

DT__INLINE void dt__table_prefetch(const char *p, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
}

DT__INLINE void dt__table_prefetch_home(const dt_table *t, uint64_t hash) {
    const dt__table_shard *s = &t->shards[hash >> 58];
    if (s->count > 0) __builtin_prefetch(&s->buckets[dt__table_home(s, hash)]);
}

dt_status dt_table_pull(dt_table *t, const uint64_t *keys, size_t n, void *rows) {
    if (dt__table_usable(t) != DT_OK) return dt__table_usable(t);
    if (n > 0 && (!keys || !rows))
        return dt_fail(t->ctx, DT_ERR_ARG, "dt_table_pull(%s): keys or rows is NULL",
            dt__printable_name(t->desc.name).s);
    uint64_t hash[DT__AHEAD_RING];
    uint32_t row[DT__AHEAD_RING];
    size_t bytes = t->row_bytes, hits = 0;
    for (size_t i = 0; i < n + 2 * DT__AHEAD && n > 0; i++) {
        size_t j = i - DT__AHEAD, k = j - DT__AHEAD;
        if (i < n) {
            hash[i % DT__AHEAD_RING] = dt__table_hash(keys[i]);
            dt__table_prefetch_home(t, hash[i % DT__AHEAD_RING]);
        }
        if (j < n) {
            const uint32_t *slot = dt__table_find(t, keys[j], hash[j % DT__AHEAD_RING]);
            uint32_t r = slot ? *slot : DT__TABLE_EMPTY;
            row[j % DT__AHEAD_RING] = r;
            hits += r < DT__TABLE_PENDING;
            if (r < DT__TABLE_SPILLED) dt__table_prefetch(dt__table_values(t, r), bytes);
        }
        if (k >= n) continue;
        uint32_t r = row[k % DT__AHEAD_RING];
        char *out = (char *)rows + k * bytes;
        if (r < DT__TABLE_SPILLED) {
            memcpy(out, dt__table_values(t, r), bytes);
        } else if (r >= DT__TABLE_PENDING) {
            dt__table_initial(t, keys[k], t->desc.dtype, out);
        } else {
            const char *notes = dt__table_notes(t, r);
            if (!notes) return dt_error(t->ctx);
            memcpy(out, notes + t->note_bytes, bytes);
        }
    }
    t->stats.pulled += (int64_t)n;
    t->stats.hits += (int64_t)hits;
    return DT_OK;
}

/* ---- push ---- */

/* Returns the gradient sum of distinct key k of a batch. */
DT__INLINE const char *dt__table_grad(const dt_table *t, size_t k, const char *grads, int unique) {
    if (unique) return grads + k * t->grad_bytes;
    uint32_t sum = t->batch.sum[k];
    return sum == DT__TABLE_EMPTY ? grads + t->batch.first[k] * t->grad_bytes
                                  : t->batch.sums + sum * t->grad_bytes;
}

/* Adds entry i of a push to the sums of distinct key k, whose entries before i are added. */
static dt_status dt__table_sum_entry(
    dt_table *t, size_t k, const char *grads, size_t i, size_t *n_sums) {
    dt__table_batch *b = &t->batch;
    if (b->sum[k] == DT__TABLE_EMPTY) {
        if (*n_sums == b->sum_capacity) {
            size_t more = 2 * b->sum_capacity + 64, bytes = b->sum_capacity * t->grad_bytes;
            char *sums =
                (char *)dt_alloc(t->ctx, DT_MEM_HOST, more * t->grad_bytes, "gradient sums");
            if (!sums) return dt_error(t->ctx);
            if (bytes > 0) memcpy(sums, b->sums, bytes);
            dt_free(t->ctx, DT_MEM_HOST, b->sums, bytes);
            b->sums = sums;
            b->sum_capacity = more;
        }
        b->sum[k] = (uint32_t)(*n_sums)++;
        memcpy(b->sums + b->sum[k] * t->grad_bytes, grads + b->first[k] * t->grad_bytes,
            t->grad_bytes);
    }
    dt__table_add(t, b->sums + b->sum[k] * t->grad_bytes, grads + i * t->grad_bytes, t->desc.width);
    return DT_OK;
}

/* Finds the distinct keys of a push, in the order of their first entries, and sums the gradients,
   shows and clicks of each in the order of its entries. Sets *distinct. */
static dt_status dt__table_distinct(dt_table *t, const uint64_t *keys, size_t n, const char *grads,
    const dt_table_push_desc *d, size_t *distinct) {
    dt__table_batch *b = &t->batch;
    size_t mask = 63, u = 0, n_sums = 0;
    while (mask + 1 < 2 * n) mask = 2 * mask + 1;
    memset(b->slot, 0xff, (mask + 1) * sizeof *b->slot); /* DT__TABLE_EMPTY */
    for (size_t i = 0; i < n; i++) {
        size_t at = dt__table_hash(keys[i]) & mask, k, next = i + DT__AHEAD;
        if (next < n) __builtin_prefetch(&b->slot[dt__table_hash(keys[next]) & mask]);
        while ((k = b->slot[at]) != DT__TABLE_EMPTY && keys[b->first[k]] != keys[i])
            at = (at + 1) & mask;
        float shows = d->shows ? d->shows[i] : 1, clicks = d->clicks ? d->clicks[i] : 0;
        if (k == DT__TABLE_EMPTY) {
            k = u++;
            b->slot[at] = (uint32_t)k;
            b->first[k] = (uint32_t)i;
            b->sum[k] = DT__TABLE_EMPTY;
            b->stats[2 * k] = shows;
            b->stats[2 * k + 1] = clicks;
        } else {
            b->stats[2 * k] += shows;
            b->stats[2 * k + 1] += clicks;
            if (dt__table_sum_entry(t, k, grads, i, &n_sums) != DT_OK) return dt_error(t->ctx);
        }
    }
    *distinct = u;
    return DT_OK;
}

/* Admission. Returns the row of a key that is pushed, or DT__TABLE_EMPTY if it is not admitted. */
DT__INLINE uint32_t dt__table_admit(dt_table *t, uint64_t key, uint64_t hash, int64_t clock) {
    uint32_t *slot = dt__table_find(t, key, hash), row;
    if (slot && *slot < DT__TABLE_SPILLED) return *slot;
    if (slot && *slot < DT__TABLE_PENDING) return dt__table_fetch(t, slot);
    if (t->desc.admit_probability > 0) {
        uint32_t word[4];
        dt__philox(dt__table_row_key(t->key + 1, key), (uint64_t)clock, word);
        if (word[0] * (1.0 / 4294967296.0) >= t->desc.admit_probability) return DT__TABLE_EMPTY;
    }
    if (t->desc.admit_count > 1) {
        uint32_t flags = DT__TABLE_PENDING | DT__TABLE_TOUCHED | DT__TABLE_CHANGED;
        uint32_t count = (slot ? *slot & DT__TABLE_COUNT : 0) + 1;
        if (count < (uint32_t)t->desc.admit_count) {
            if (!slot && (slot = dt__table_insert(t, key, hash, 0)) != NULL) t->stats.pending++;
            if (slot) *slot = flags | count;
            return DT__TABLE_EMPTY;
        }
    }
    row = dt__table_create(t, key);
    if (row == DT__TABLE_EMPTY) return row;
    if (slot) {
        *slot = row;
        t->stats.pending--;
    } else if (!dt__table_insert(t, key, hash, row)) {
        return DT__TABLE_EMPTY;
    }
    return row;
}

/* Applies the gradient sum of a key to its row. */
static dt_status dt__table_update(dt_table *t, uint64_t key, uint32_t row, const char *grad,
    const float *stats, const dt_table_push_desc *d) {
    char *values = dt__table_values(t, row), *state = dt__table_state(t, row);
    char *w = t->master_bytes ? state : values, *s = state + t->master_bytes;
    dt_status status = DT_OK;
    *dt__table_clock(t, row) = d->clock;
    if (t->desc.threshold > 0) {
        dt__table_shows(t, row)[0] += stats[0];
        dt__table_shows(t, row)[1] += stats[1];
    }
    if (t->desc.optimizer == DT_TABLE_CUSTOM) {
        dt_table_update_args a = { t->ctx, t->desc.name, key, t->desc.width, w, grad, s, d->lr,
            d->clock };
        status = t->desc.update(&a, t->desc.user);
        if (status != DT_OK)
            dt_fail(t->ctx, status, "dt_table_push(%s): the update of key %llu returned %s",
                dt__printable_name(t->desc.name).s, (unsigned long long)key,
                dt_status_name(status));
    } else if (t->compute == DT_F32) {
        dt__table_update_f32(&t->desc, (float *)(void *)w, (const float *)(const void *)grad,
            (float *)(void *)s, d->lr);
    } else {
        dt__table_update_f64(&t->desc, (double *)(void *)w, (const double *)(const void *)grad,
            (double *)(void *)s, d->lr);
    }
    if (t->master_bytes) dt__table_round(t, w, values);
    return status;
}

/* Updates the rows of the distinct keys [from, u) of a push. */
static dt_status dt__table_apply(dt_table *t, const uint64_t *keys, size_t from, size_t u,
    const char *grads, const dt_table_push_desc *d) {
    uint64_t hash[DT__AHEAD_RING];
    uint32_t row[DT__AHEAD_RING];
    int unique = d->unique;
    for (size_t i = from; i < u + 2 * DT__AHEAD; i++) {
        size_t j = i - DT__AHEAD, k = j - DT__AHEAD;
        if (i < u) {
            hash[i % DT__AHEAD_RING] = dt__table_hash(keys[unique ? i : t->batch.first[i]]);
            dt__table_prefetch_home(t, hash[i % DT__AHEAD_RING]);
        }
        if (j >= from && j < u) {
            uint64_t key = keys[unique ? j : t->batch.first[j]];
            uint32_t r = dt__table_admit(t, key, hash[j % DT__AHEAD_RING], d->clock);
            row[j % DT__AHEAD_RING] = r;
            if (r == DT__TABLE_EMPTY) {
                if (dt_error(t->ctx) != DT_OK) return dt_error(t->ctx);
                t->stats.rejected++;
            } else {
                dt__table_prefetch(dt__table_values(t, r), t->row_bytes);
                dt__table_prefetch(dt__table_state(t, r), t->state_bytes);
                __builtin_prefetch(dt__table_clock(t, r));
            }
        }
        if (k >= from && k < u && row[k % DT__AHEAD_RING] != DT__TABLE_EMPTY) {
            size_t at = unique ? k : t->batch.first[k];
            float own[2] = { d->shows ? d->shows[at] : 1, d->clicks ? d->clicks[at] : 0 };
            const float *stats = unique ? own : t->batch.stats + 2 * k;
            if (dt__table_update(t, keys[at], row[k % DT__AHEAD_RING],
                    dt__table_grad(t, k, grads, unique), stats, d) != DT_OK)
                return dt_error(t->ctx);
        }
    }
    return DT_OK;
}

#if defined(__clang__)
#pragma STDC FP_CONTRACT DEFAULT
#elif defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC pop_options
#endif
DT__COLD_BEGIN

/* Makes the buffers of a push large enough for n keys. */
static dt_status dt__table_batch_size(dt_table *t, size_t n) {
    dt__table_batch *b = &t->batch;
    if (n <= b->capacity && b->slot) return DT_OK;
    dt_free(t->ctx, DT_MEM_HOST, b->slot, b->slots * 4);
    dt_free(t->ctx, DT_MEM_HOST, b->first, b->capacity * 16);
    b->slot = b->first = NULL;
    b->capacity = 0;
    b->slots = 64;
    while (b->slots < 2 * n) b->slots *= 2;
    n = b->slots / 2;
    b->slot = (uint32_t *)dt_alloc(t->ctx, DT_MEM_HOST, b->slots * 4, "keys of a push");
    b->first = (uint32_t *)dt_alloc(t->ctx, DT_MEM_HOST, n * 16, "keys of a push");
    if (!b->slot || !b->first) return dt_error(t->ctx);
    b->capacity = n;
    b->sum = b->first + n;
    b->stats = (float *)(void *)(b->sum + n);
    return DT_OK;
}

/* Fails if a value of the push is not finite, before the push has changed anything. */
static dt_status dt__table_check_push(dt_table *t, const uint64_t *keys, size_t n, size_t u,
    const char *grads, const dt_table_push_desc *d) {
    const char *name = t->desc.name;
    for (size_t i = 0; i < n && (d->shows || d->clicks); i++) {
        float shows = d->shows ? d->shows[i] : 0, clicks = d->clicks ? d->clicks[i] : 0;
        if (!(shows >= 0 && clicks >= 0 && shows + clicks <= FLT_MAX))
            return dt_fail(t->ctx, DT_ERR_NUMERIC,
                "dt_table_push(%s): key %llu has %g shows and %g clicks",
                dt__printable_name(name).s, (unsigned long long)keys[i], (double)shows,
                (double)clicks);
    }
    for (size_t k = 0; k < u; k++) {
        const char *grad = dt__table_grad(t, k, grads, d->unique);
        int column = dt__table_bad_column(t, grad);
        if (column < 0) continue;
        double value = t->compute == DT_F32 ? (double)((const float *)(const void *)grad)[column]
                                            : ((const double *)(const void *)grad)[column];
        return dt_fail(t->ctx, DT_ERR_NUMERIC,
            "dt_table_push(%s): the gradient of key %llu, column %d, is %g",
            dt__printable_name(name).s, (unsigned long long)keys[d->unique ? k : t->batch.first[k]],
            column, value);
    }
    return DT_OK;
}

static dt_status dt__table_set_clock(dt_table *t, const char *func, int64_t clock) {
    if (clock < t->stats.clock || clock >= DT__TABLE_MAX_CLOCK)
        return dt_fail(t->ctx, DT_ERR_ARG, "%s(%s): clock %lld after clock %lld; at most 10^15",
            func, dt__printable_name(t->desc.name).s, (long long)clock, (long long)t->stats.clock);
    t->stats.clock = clock;
    return DT_OK;
}

dt_status dt_table_push(
    dt_table *t, const uint64_t *keys, size_t n, const void *grads, dt_table_push_desc d) {
    if (dt__table_usable(t) != DT_OK) return dt__table_usable(t);
    if (n > 1u << 30 || (n > 0 && (!keys || !grads)) || !isfinite(d.lr) ||
        (d.lr <= 0 && t->desc.optimizer == DT_TABLE_FTRL))
        return dt_fail(t->ctx, DT_ERR_ARG,
            "dt_table_push(%s): %zu keys at %p, gradients at %p, learning rate %g",
            dt__printable_name(t->desc.name).s, n, (const void *)keys, grads, d.lr);
    size_t u = n;
    if (!d.unique && (dt__table_batch_size(t, n) != DT_OK ||
                         dt__table_distinct(t, keys, n, (const char *)grads, &d, &u) != DT_OK))
        return dt_error(t->ctx);
    if (dt__table_check_push(t, keys, n, u, (const char *)grads, &d) != DT_OK ||
        dt__table_set_clock(t, "dt_table_push", d.clock) != DT_OK)
        return dt_error(t->ctx);
    t->stats.pushed += (int64_t)u;
    /* with a limit in parts: a row that a part has found must not be spilled before its update */
    size_t part = t->max_segments > 0 ? (size_t)t->reserve : u;
    for (size_t at = 0; at < u && dt_error(t->ctx) == DT_OK; at += part)
        if (dt__table_make_room(t, (uint32_t)t->reserve) == DT_OK)
            dt__table_apply(t, keys, at, u - at < part ? u : at + part, (const char *)grads, &d);
    return dt_error(t->ctx);
}

/* ---- all rows ---- */

/* Returns a number without a common divisor with `count`, about 0.618 of it. */
static uint32_t dt__table_stride(uint32_t count) {
    for (uint32_t stride = (uint32_t)(count * 0.618) + 1;; stride++) {
        uint32_t a = count, b = stride, rest;
        for (; b > 0; a = b, b = rest) rest = a % b;
        if (a <= 1) return stride;
    }
}

/* Calls each() for all keys of the index; each() may change or empty the slot. Buckets and rows are
   requested AHEAD buckets before their use. The order of the buckets jumps by a golden section of
   the shard: in ascending order a load would fill the first buckets of a growing table first, and
   each insertion would search through the full ones. */
typedef dt_status (*dt__table_each)(dt_table *t, uint64_t key, uint32_t *slot, void *arg);
static dt_status dt__table_scan(dt_table *t, dt__table_each each, void *arg, int notes_only) {
    enum { AHEAD = 8, RING = 32 };
    uint32_t ring[RING];
    for (int k = 0; k < DT__TABLE_SHARDS; k++) {
        const dt__table_shard *s = &t->shards[k];
        uint32_t stride = dt__table_stride(s->count), at = 0;
        for (uint32_t n = 0; n < s->count + 2 * AHEAD && s->count > 0; n++) {
            if (n < s->count) {
                ring[n % RING] = at;
                __builtin_prefetch(&s->buckets[at]);
                at = (uint32_t)(((uint64_t)at + stride) % s->count);
            }
            for (int i = 0; i < DT__TABLE_SLOTS && n >= AHEAD && n - AHEAD < s->count; i++) {
                uint32_t row = s->buckets[ring[(n - AHEAD) % RING]].row[i];
                if (row >= DT__TABLE_SPILLED) continue;
                __builtin_prefetch(dt__table_clock(t, row));
                if (notes_only) continue;
                dt__table_prefetch(dt__table_values(t, row), t->row_bytes);
                dt__table_prefetch(dt__table_state(t, row), t->state_bytes);
            }
            if (n < 2 * AHEAD) continue;
            dt__table_bucket *b = &s->buckets[ring[(n - 2 * AHEAD) % RING]];
            for (int i = 0; i < DT__TABLE_SLOTS; i++)
                if (b->row[i] != DT__TABLE_EMPTY && each(t, b->key[i], &b->row[i], arg) != DT_OK)
                    return dt_error(t->ctx);
        }
    }
    return DT_OK;
}

static dt_status dt__table_shrink_one(dt_table *t, uint64_t key, uint32_t *slot, void *arg) {
    const dt_table_desc *d = &t->desc;
    int64_t clock = *(const int64_t *)arg;
    if (*slot & DT__TABLE_PENDING) {
        if (!(*slot & DT__TABLE_TOUCHED)) return dt__table_remove(t, key, slot);
        *slot = (*slot & ~DT__TABLE_TOUCHED) | DT__TABLE_CHANGED;
        return DT_OK;
    }
    char *notes = dt__table_notes(t, *slot);
    int64_t pushed;
    if (!notes) return dt_error(t->ctx);
    memcpy(&pushed, notes, sizeof pushed);
    int old = d->ttl > 0 && (uint64_t)clock - (uint64_t)pushed > (uint64_t)d->ttl;
    if (d->threshold > 0) {
        float *shows = (float *)(void *)(notes + sizeof pushed), *clicks = shows + 1;
        *shows *= (float)d->decay;
        *clicks *= (float)d->decay;
        double others = (double)*shows - (double)*clicks;
        old |= d->show_weight * others + d->click_weight * (double)*clicks < d->threshold;
    }
    if (old) return dt__table_remove(t, key, slot);
    int rewrite = d->threshold > 0 && *slot >= DT__TABLE_SPILLED;
    return rewrite ? dt__table_transfer(t, *slot - DT__TABLE_SPILLED, 1, notes, t->note_bytes)
                   : DT_OK;
}

int64_t dt_table_shrink(dt_table *t, int64_t clock) {
    if (dt__table_usable(t) != DT_OK || dt__table_set_clock(t, "dt_table_shrink", clock) != DT_OK)
        return -1;
    int64_t before = t->stats.removed;
    if (t->desc.ttl > 0 || t->desc.threshold > 0) {
        dt__table_scan(t, dt__table_shrink_one, &clock, 1);
        t->shrinks++;
    }
    return dt_error(t->ctx) == DT_OK ? t->stats.removed - before : -1;
}

/* Returns the notes of a row that was pushed at clock `since` or later (dt__table_notes). NULL for
   an older row, for a key that is not admitted, and on failure. */
static const char *dt__table_notes_since(dt_table *t, uint32_t row, int64_t since) {
    const char *notes = row < DT__TABLE_PENDING ? dt__table_notes(t, row) : NULL;
    int64_t pushed;
    if (!notes) return NULL;
    memcpy(&pushed, notes, sizeof pushed);
    return pushed >= since ? notes : NULL;
}

typedef struct dt__table_changes {
    int64_t since, n;
    uint64_t *keys;
    size_t capacity;
} dt__table_changes;
static dt_status dt__table_changed_one(dt_table *t, uint64_t key, uint32_t *slot, void *arg) {
    dt__table_changes *c = (dt__table_changes *)arg;
    if (!dt__table_notes_since(t, *slot, c->since)) return dt_error(t->ctx);
    if ((size_t)c->n < c->capacity && c->keys) c->keys[c->n] = key;
    c->n++;
    return DT_OK;
}

int64_t dt_table_changed(dt_table *t, int64_t since, uint64_t *keys, size_t capacity) {
    dt__table_changes c = { since, 0, keys, capacity };
    if (dt__table_usable(t) != DT_OK) return -1;
    dt__table_scan(t, dt__table_changed_one, &c, 1);
    return dt_error(t->ctx) == DT_OK ? c.n : -1;
}

/* ---- making and freeing ---- */

static dt_status dt__table_check(dt_ctx *ctx, const dt_table_desc *d) {
    int f = d->optimizer == DT_TABLE_FTRL;
    const char *why =
        d->width < 1 || d->width > 65536                                  ? "width: 1 to 65,536"
        : d->dtype != DT_F32 && d->dtype != DT_F64 && d->dtype != DT_BF16 ? "dtype: f32, f64, bf16"
        : d->optimizer < 0 || d->optimizer > DT_TABLE_CUSTOM ? "optimizer: a DT_TABLE_*"
        : d->init.kind < 0 || d->init.kind > 3 || !isfinite(d->init.scale) ? "init: a DT_NORMAL, .."
        : !(d->beta1 >= 0 && d->beta1 < 1 && d->beta2 >= 0 && d->beta2 < 1) ? "beta: 0 to below 1"
        : !(d->eps >= 0 && isfinite(d->eps))                                ? "eps: not negative"
        : !(d->initial_accumulator >= 0 && isfinite(d->initial_accumulator))
            ? "initial_accumulator: not negative"
        : f && !(d->l1 >= 0 && d->l2 >= 0 && d->ftrl_beta >= 0 &&
                   isfinite(d->l1 + d->l2 + d->ftrl_beta))
            ? "l1, l2, ftrl_beta: not negative"
        : d->admit_count < 0 || d->admit_count >= (int)DT__TABLE_COUNT
            ? "admit_count: 0 to 2^29 - 2"
        : !(d->admit_probability >= 0 && d->admit_probability < 1)
            ? "admit_probability: 0 to below 1"
        : d->admit_count > 1 && d->admit_probability > 0
            ? "admit_count or admit_probability, not both"
        : !(d->threshold >= 0 && d->decay >= 0 && d->decay <= 1 && isfinite(d->threshold))
            ? "threshold: not negative; decay: 0 to 1"
        : !isfinite(d->show_weight) || !isfinite(d->click_weight) ? "weights: finite"
        : d->ttl < 0                                              ? "ttl: not negative"
        : d->optimizer == DT_TABLE_CUSTOM && (!d->update || d->states < 0 || d->states > 1 << 20)
            ? "update: a function; states: 0 to 2^20"
            : NULL;
    if (!why && d->memory_limit > 0 && !d->spill) why = "memory_limit: needs a folder, spill";
    if (!d->name || !*d->name) return dt_fail(ctx, DT_ERR_ARG, "dt_table_make: a table has a name");
    if (dt__name_check(ctx, "dt_table_make", d->name) != DT_OK || !why) return dt_error(ctx);
    return dt_fail(ctx, DT_ERR_ARG, "dt_table_make(%s): %s", dt__printable_name(d->name).s, why);
}

/* Frees the table. Called by dt_table_free, or when the context is freed. */
static void dt__table_close(dt_ctx *ctx, void *user) {
    dt_table *t = (dt_table *)user;
    dt__table_clear(t);
    dt_free(ctx, DT_MEM_HOST, t->segments, (size_t)t->segment_capacity * sizeof *t->segments);
    dt_free(ctx, DT_MEM_HOST, t->removed, (size_t)t->removed_capacity * sizeof *t->removed);
    dt_free(ctx, DT_MEM_HOST, t->batch.slot, t->batch.slots * 4);
    dt_free(ctx, DT_MEM_HOST, t->batch.first, t->batch.capacity * 16);
    dt_free(ctx, DT_MEM_HOST, t->batch.sums, t->batch.sum_capacity * t->grad_bytes);
    dt_free(ctx, DT_MEM_HOST, t->blocks, (size_t)t->block_capacity * sizeof *t->blocks);
    dt_free(ctx, DT_MEM_HOST, t->block, t->spill_bytes);
    if (t->spill_fd >= 0) ctx->io.close(ctx->io.user, t->spill_fd);
    dt__string_free(ctx, (char *)(uintptr_t)t->desc.spill);
    dt__string_free(ctx, (char *)(uintptr_t)t->desc.name);
    dt_free(ctx, DT_MEM_HOST, t, sizeof *t);
}

static void dt__table_sizes(dt_table *t) {
    dt_table_desc *d = &t->desc;
    size_t width = (size_t)d->width, size;
    int states[] = { 0, d->width, 1, 2 * d->width + 1, 2 * d->width, d->states };
    t->compute = d->dtype == DT_F64 ? DT_F64 : DT_F32;
    size = dt_dtype_size(t->compute);
    t->row_bytes = width * dt_dtype_size(d->dtype);
    t->grad_bytes = width * size;
    t->master_bytes = d->dtype == DT_BF16 ? t->grad_bytes : 0;
    t->state_bytes = t->master_bytes + (size_t)states[d->optimizer] * size;
    t->note_bytes = d->threshold > 0 ? 16 : 8;
    t->record_bytes = t->note_bytes + t->row_bytes + t->state_bytes;
    t->stride = (t->record_bytes + 7) / 8 * 8;
    /* a segment has at most 1 MiB and an eighth of a limit, and 16 (4) to 16,384 rows */
    int least = d->memory_limit > 0 ? 2 : 4;
    size_t most = d->memory_limit > 0 && d->memory_limit < 8u << 20 ? d->memory_limit / 8 : 1 << 20;
    t->segment_shift = 14;
    while (t->segment_shift > least && t->record_bytes << t->segment_shift > most)
        t->segment_shift--;
    if (d->memory_limit == 0) return;
    /* a block has at most 64 KiB; the cache has at most 1/16 of the limit */
    most = (1 << 16) / t->stride;
    t->block_rows = most < 1 ? 1 : most < 64 ? (int)most : 64;
    t->cache_rows = 1;
    while (t->cache_rows < 1 << 20 && 32 * t->cache_rows * t->stride <= d->memory_limit)
        t->cache_rows *= 2;
    t->spill_bytes = (size_t)t->block_rows * t->stride + t->cache_rows * (t->stride + 4);
    most = (d->memory_limit - d->memory_limit / 16) / (t->record_bytes << t->segment_shift);
    uint32_t segments = DT__TABLE_SPILLED >> t->segment_shift;
    t->max_segments = most < 4 ? 4 : most < segments ? (int)most : (int)segments;
    uint32_t quarter = (uint32_t)t->max_segments << t->segment_shift >> 2;
    t->reserve = quarter < 512 ? (int)quarter : 512;
}

dt_table *dt_table_make(dt_ctx *ctx, dt_table_desc desc) {
    if (dt_error(ctx) != DT_OK || dt__table_check(ctx, &desc) != DT_OK) return NULL;
    dt_table *t = (dt_table *)dt__host_zeroed(ctx, sizeof *t, "dt_table_make");
    if (!t) return NULL;
    int on_device = ctx->kernels.alloc != NULL;
    t->ctx = ctx;
    if (desc.beta1 == 0) desc.beta1 = 0.9;
    if (desc.beta2 == 0) desc.beta2 = 0.999;
    if (desc.eps == 0) desc.eps = 1e-8;
    if (desc.decay == 0) desc.decay = 1;
    if (desc.show_weight == 0 && desc.click_weight == 0) desc.show_weight = desc.click_weight = 1;
    t->desc = desc;
    t->desc.name = dt__concat_text(ctx, desc.name, strlen(desc.name), "");
    t->desc.spill = NULL;
    t->spill_fd = -1;
    t->kernels = on_device ? dt_kernels_cpu() : &ctx->kernels;
    t->row_mem = on_device ? DT_MEM_HOST : DT_MEM_PARAMS;
    t->state_mem = on_device ? DT_MEM_HOST : DT_MEM_OPTIM;
    t->key = dt__stream_key(dt_ctx_seed(ctx), desc.name);
    t->free_row = DT__TABLE_EMPTY;
    t->saved = t->newest_known = dt__ckpt_none;
    dt__table_sizes(t);
    t->listener.closing = dt__table_close;
    t->listener.user = t;
    dt_listen(ctx, &t->listener);
    if (desc.memory_limit > 0 && dt_error(ctx) == DT_OK) {
        t->block = (char *)dt__host_zeroed(ctx, t->spill_bytes, desc.name);
        t->cache = t->block + (size_t)t->block_rows * t->stride;
        if (t->block) t->cached = (uint32_t *)(void *)(t->cache + t->cache_rows * t->stride);
        if (t->block) dt__table_clear(t);
        t->desc.spill = dt__concat_text(ctx, desc.spill, strlen(desc.spill), "");
        if (dt_error(ctx) == DT_OK) dt__table_spill_open(t);
    }
    if (!t->kernels->init || !t->kernels->fill)
        dt_fail(ctx, DT_ERR_UNSUPPORTED, "dt_table_make: the kernels init and fill are missing");
    if (dt_error(ctx) == DT_OK) return t;
    dt_table_free(t);
    return NULL;
}

void dt_table_free(dt_table *t) {
    if (!t) return;
    dt_unlisten(t->ctx, &t->listener);
    dt__table_close(t->ctx, t);
}

dt_table_stats dt_table_info(const dt_table *t) {
    dt_table_stats s;
    memset(&s, 0, sizeof s);
    if (!t) return s;
    size_t rows = (size_t)t->n_segments << t->segment_shift;
    s = t->stats;
    s.row_bytes = rows * t->row_bytes;
    s.state_bytes = rows * t->state_bytes;
    for (int i = 0; i < DT__TABLE_SHARDS; i++)
        s.index_bytes += t->shards[i].count * sizeof *t->shards[i].buckets;
    s.total_bytes = s.row_bytes + s.state_bytes + s.index_bytes + rows * t->note_bytes + sizeof *t +
                    strlen(t->desc.name) + 1 + (size_t)t->segment_capacity * sizeof *t->segments +
                    (size_t)t->removed_capacity * sizeof *t->removed +
                    (size_t)t->block_capacity * sizeof *t->blocks + t->spill_bytes +
                    (t->desc.spill ? strlen(t->desc.spill) + 1 : 0) + t->batch.slots * 4 +
                    t->batch.capacity * 16 + t->batch.sum_capacity * t->grad_bytes;
    return s;
}

// ==== 26. Sparse tables: snapshots ==============================================================

/* The file of a snapshot, written in one pass over the index:

       header | rows: key, clock, shows, clicks, values, state | keys that are not admitted, counts
              | removed keys | digest of all after the header

   Each snapshot names the one before it, so the newest leads back to its base. The commit is that
   of section 20: the folder step-CLOCK.1a2b3c.tmp is renamed when its file is on the disk.

   dt_table_shrink multiplies the statistics of all rows. A delta does not list all rows for that:
   the header counts the shrinks, and a load multiplies the statistics of each row as often as the
   newest snapshot's count exceeds that of the row's own snapshot. These are the same roundings. */

enum { DT__SNAPSHOT_BUFFER = 1 << 20, DT__SNAPSHOT_CHAIN = 4096 };

typedef struct dt__snapshot_header {
    char magic[16];
    uint64_t seed, name; /* name: its digest */
    int32_t width, dtype, optimizer, record_bytes;
    int32_t delta, repeat; /* delta 1: step and repeat are those of the snapshot before it */
    int64_t step, clock, shrinks;
    int64_t rows, pending, removed; /* numbers of records */
    uint64_t digest;                /* of the header with digest 0 */
} dt__snapshot_header;
static const char dt__snapshot_magic[16] = "dt table 1";

/* A file that is written or read in pieces. */
typedef struct dt__snapshot_file {
    dt_table *t;
    dt__writer writer;
    dt__snapshot_header h;
    char *buffer;
    size_t used, end; /* the buffer's next byte, and when reading, its end */
    int64_t at, size; /* offset of the next piece in the file; size of the file */
    uint64_t digest;
    int fd;
    char folder[DT__PATH_BYTES + 80], path[DT__PATH_BYTES + 96];
    int64_t since;
} dt__snapshot_file;

static size_t dt__snapshot_record(const dt_table *t) { return (8 + t->record_bytes + 7) / 8 * 8; }

static void dt__snapshot_describe(const dt_table *t, dt__snapshot_header *h) {
    memset(h, 0, sizeof *h);
    memcpy(h->magic, dt__snapshot_magic, sizeof h->magic);
    h->seed = dt_ctx_seed(t->ctx);
    h->name = dt__digest(1, t->desc.name, strlen(t->desc.name));
    h->width = t->desc.width;
    h->dtype = (int32_t)t->desc.dtype;
    h->optimizer = t->desc.optimizer;
    h->record_bytes = (int32_t)dt__snapshot_record(t);
}

static uint64_t dt__snapshot_header_digest(dt__snapshot_header h) {
    h.digest = 0;
    return dt__digest(1, &h, sizeof h);
}

/* Adds the buffer, which begins at byte s->at of the file, to the digest. */
static void dt__snapshot_add_digest(dt__snapshot_file *s, size_t bytes) {
    s->digest += dt__elements_digest(NULL, DT_F32, s->at / 4, s->buffer, (int64_t)(bytes / 4));
}

/* Opens the file s->path and reads its header. Returns 1 if the header is intact. */
static int dt__snapshot_open_file(dt__snapshot_file *s) {
    const dt_io *io = &s->writer.io;
    dt__snapshot_header want;
    int end = 0;
    s->fd = dt__open(io, s->path, DT_IO_READ);
    if (s->fd < 0 && !dt__io_absent()) dt__io_fail(s->t->ctx, "dt_table_load: %s", s->path);
    if (s->fd < 0) return 0;
    s->size = io->size(io->user, s->fd);
    if (dt__io_transfer(io, s->fd, 0, &s->h, sizeof s->h, 0, &end) != (int64_t)sizeof s->h) {
        if (!end) dt__io_fail(s->t->ctx, "dt_table_load: %s", s->path);
        return 0;
    }
    if (memcmp(s->h.magic, dt__snapshot_magic, sizeof s->h.magic) != 0 ||
        s->h.digest != dt__snapshot_header_digest(s->h))
        return 0;
    dt__snapshot_describe(s->t, &want);
    if (s->h.seed != want.seed || s->h.name != want.name || s->h.width != want.width ||
        s->h.dtype != want.dtype || s->h.optimizer != want.optimizer ||
        s->h.record_bytes != want.record_bytes) {
        dt_fail(s->t->ctx, DT_ERR_ARG,
            "dt_table_load(%s): %s is of another table: width %d, type %s, optimizer %d, seed "
            "%llu, %d bytes a row",
            dt__printable_name(s->t->desc.name).s, s->path, s->h.width,
            dt_dtype_name((dt_dtype)s->h.dtype), s->h.optimizer, (unsigned long long)s->h.seed,
            s->h.record_bytes);
        return 0;
    }
    int64_t body = s->h.rows * s->h.record_bytes + 16 * s->h.pending + 8 * s->h.removed;
    return s->size == (int64_t)sizeof s->h + body + 8;
}

/* Opens the snapshot `id` of a folder. Returns 1 if its header is intact. */
static int dt__snapshot_open(dt__snapshot_file *s, const char *dir, dt__ckpt_id id) {
    char name[64];
    dt__ckpt_name(id, name, sizeof name);
    snprintf(s->path, sizeof s->path, "%s/%s/%s", dir, name, dt__table_file);
    return dt__snapshot_open_file(s);
}

static void dt__snapshot_close(dt__snapshot_file *s) {
    if (s->fd >= 0) s->writer.io.close(s->writer.io.user, s->fd);
    s->fd = -1;
}

/* ---- saving ---- */

static void dt__snapshot_flush(dt__snapshot_file *s) {
    dt__writer_write(&s->writer, s->path, s->fd, s->buffer, (int64_t)s->used, s->at);
    dt__snapshot_add_digest(s, s->used);
    s->at += (int64_t)s->used;
    s->used = 0;
}

/* Returns space for the next record. */
static char *dt__snapshot_next(dt__snapshot_file *s, size_t bytes) {
    if (s->used + bytes > s->end) dt__snapshot_flush(s);
    s->used += bytes;
    return s->buffer + s->used - bytes;
}

static dt_status dt__snapshot_put_row(dt_table *t, uint64_t key, uint32_t *slot, void *arg) {
    dt__snapshot_file *s = (dt__snapshot_file *)arg;
    const char *notes = dt__table_notes_since(t, *slot, s->since);
    if (!notes) return dt_error(t->ctx);
    size_t bytes = (size_t)s->h.record_bytes;
    char *p = dt__snapshot_next(s, bytes);
    memset(p + bytes - 8, 0, 8); /* the padding */
    memcpy(p, &key, 8);
    s->h.rows++;
    if (*slot >= DT__TABLE_SPILLED) {
        memcpy(p + 8, notes, t->record_bytes);
        return DT_OK;
    }
    memcpy(p += 8, notes, t->note_bytes);
    memcpy(p += t->note_bytes, dt__table_values(t, *slot), t->row_bytes);
    if (t->state_bytes > 0) memcpy(p + t->row_bytes, dt__table_state(t, *slot), t->state_bytes);
    return DT_OK;
}

static dt_status dt__snapshot_put_pending(dt_table *t, uint64_t key, uint32_t *slot, void *arg) {
    dt__snapshot_file *s = (dt__snapshot_file *)arg;
    (void)t;
    if (*slot < DT__TABLE_PENDING || (s->h.delta && !(*slot & DT__TABLE_CHANGED))) return DT_OK;
    uint64_t count = *slot &= ~DT__TABLE_CHANGED;
    char *p = dt__snapshot_next(s, 16);
    memcpy(p, &key, 8);
    memcpy(p + 8, &count, 8);
    s->h.pending++;
    return DT_OK;
}

/* Writes the file of a snapshot, and syncs it. */
static void dt__snapshot_write(dt__snapshot_file *s) {
    dt_table *t = s->t;
    s->fd = dt__writer_create(&s->writer, s->path, 0);
    if (s->fd < 0) return;
    s->at = sizeof s->h;
    dt__table_scan(t, dt__snapshot_put_row, s, 0);
    if (t->stats.pending > 0) dt__table_scan(t, dt__snapshot_put_pending, s, 1);
    for (int i = 0; i < t->n_removed && s->h.delta; i++, s->h.removed++)
        memcpy(dt__snapshot_next(s, 8), &t->removed[i], 8);
    dt__snapshot_flush(s);
    if (dt_error(t->ctx) != DT_OK) dt__writer_fail(&s->writer, s->path, "reading spilled rows");
    dt__writer_write(&s->writer, s->path, s->fd, &s->digest, sizeof s->digest, s->at);
    s->h.digest = dt__snapshot_header_digest(s->h);
    dt__writer_write(&s->writer, s->path, s->fd, &s->h, sizeof s->h, 0);
    dt__writer_sync_close(&s->writer, s->path, s->fd);
}

/* Sets *id to the name of the next snapshot, of this clock, in a folder. `known`: the newest one of
   which the caller knows. */
static dt_status dt__snapshot_name(dt_ctx *ctx, const char *func, const char *dir,
    dt__ckpt_id known, int64_t clock, dt__ckpt_id *id) {
    dt__ckpt_id newest, same, next = { clock + 1, 0 };
    char name[64];
    if (dt__newest_below(&ctx->io, dir, dt__ckpt_last, &newest) != 0)
        return dt__io_fail(ctx, "%s: %s", func, dir);
    dt__ckpt_name(newest, name, sizeof name);
    if (dt__ckpt_before(known, newest))
        return dt_fail(ctx, DT_ERR_IO,
            "%s: %s has %s already, which was not loaded: go on from it, or save to another folder",
            func, dir, name);
    id->step = clock;
    id->repeat = 1;
    if (dt__newest_below(&ctx->io, dir, next, &same) != 0)
        return dt__io_fail(ctx, "%s: %s", func, dir);
    if (same.step == id->step) id->repeat = same.repeat + 1;
    return DT_OK;
}

/* Sets the path of the folder in which a snapshot is written, before the rename to `final`. */
static void dt__snapshot_temporary(char *path, size_t bytes, const char *final, int64_t number) {
    snprintf(path, bytes, "%s.%06x.tmp", final, (unsigned)number);
}

static int64_t dt__snapshot_number(dt_ctx *ctx) {
    const dt_host *host = dt_ctx_host(ctx);
    uint64_t now = (uint64_t)(host->now(host->user) * 1e6) * 2654435761u;
    return (int64_t)((now ^ (uint64_t)getpid() * 40503u) >> 4 & 0xffffff);
}

/* Makes the folder of snapshots if it is missing, and removes what a killed job has left in it. */
static void dt__snapshot_folder(dt__snapshot_file *s, const char *dir) {
    const dt_io *io = &s->writer.io;
    dt__tmp_sweep sweep = { io, dir };
    if (dt__io_exists(io, dir))
        io->list_folder(io->user, dir, dt__tmp_sweep_one, &sweep);
    else if (dt__io_absent() && dt__writer_make_folder(&s->writer, dir))
        dt__writer_sync_parent(&s->writer, dir, EACCES);
}

static dt_status dt__snapshot_save(dt__snapshot_file *s, const char *dir) {
    dt_table *t = s->t;
    dt__ckpt_id id, known = strcmp(dir, t->dir) == 0 ? t->newest_known : dt__ckpt_none;
    char name[64], final[DT__PATH_BYTES + 64];
    dt__snapshot_folder(s, dir);
    if (dt__writer_check(t->ctx, &s->writer, "dt_table_save") != DT_OK ||
        dt__snapshot_name(t->ctx, "dt_table_save", dir, known, t->stats.clock, &id) != DT_OK)
        return dt_error(t->ctx);
    dt__ckpt_name(id, name, sizeof name);
    snprintf(final, sizeof final, "%s/%s", dir, name);
    dt__snapshot_temporary(s->folder, sizeof s->folder, final, dt__snapshot_number(t->ctx));
    snprintf(s->path, sizeof s->path, "%s/%s", s->folder, dt__table_file);
    int made = dt__writer_make_folder(&s->writer, s->folder);
    if (made) dt__snapshot_write(s);
    dt__writer_sync_folder(&s->writer, s->folder, 0);
    dt__writer_rename(&s->writer, s->folder, final, 0);
    if (dt__writer_check(t->ctx, &s->writer, "dt_table_save") != DT_OK) {
        if (made) dt__ckpt_remove(&s->writer.io, s->folder);
        return dt_error(t->ctx);
    }
    t->saved = id;
    if (dt__ckpt_before(t->newest_known, id) || strcmp(dir, t->dir) != 0) t->newest_known = id;
    t->saved_clock = t->stats.clock;
    t->n_removed = 0;
    memcpy(t->dir, dir, strlen(dir) + 1);
    return DT_OK;
}

/* Checks the folder's name and the io table, and allocates the buffer of a snapshot. */
static dt_status dt__snapshot_begin(
    dt__snapshot_file *s, dt_table *t, const char *func, const char *dir, char *copy) {
    dt_io *io = &s->writer.io;
    memset(s, 0, sizeof *s);
    if (dt__table_usable(t) != DT_OK) return t ? dt_error(t->ctx) : DT_ERR_ARG;
    s->t = t;
    s->fd = -1;
    *io = *dt_ctx_io(t->ctx);
    dt__snapshot_describe(t, &s->h);
    if (!io->make_folder || !io->list_folder || !io->remove_folder)
        return dt_fail(t->ctx, DT_ERR_UNSUPPORTED,
            "%s: the io table has no folders: make, list and remove_folder", func);
    if (!dir) return dt_fail(t->ctx, DT_ERR_ARG, "%s: dir is NULL", func);
    if (dt__copy_dir(t->ctx, func, copy, dir) != DT_OK) return dt_error(t->ctx);
    s->end = DT__SNAPSHOT_BUFFER + dt__snapshot_record(t);
    s->buffer = (char *)dt_alloc(t->ctx, DT_MEM_HOST, s->end, "a snapshot");
    return dt_error(t->ctx);
}

static void dt__snapshot_end(dt__snapshot_file *s) {
    if (s->t && s->buffer)
        dt_free(s->t->ctx, DT_MEM_HOST, s->buffer, DT__SNAPSHOT_BUFFER + dt__snapshot_record(s->t));
}

/* Keeps the newest `keep` bases with their deltas, and removes older snapshots. */
static void dt__snapshot_keep(dt__snapshot_file *s, const char *dir, int keep) {
    const dt_io *io = &s->writer.io;
    dt__ckpt_id at = dt__ckpt_last;
    char name[64], base[DT__PATH_BYTES + 64];
    for (int bases = 0; bases < keep;) {
        if (dt__newest_below(io, dir, at, &at) != 0 || at.step < 0) return;
        bases += dt__snapshot_open(s, dir, at) && !s->h.delta;
        dt__snapshot_close(s);
    }
    dt__ckpt_name(at, name, sizeof name);
    snprintf(base, sizeof base, "%s/%s", dir, name);
    dt__ckpt_remove_old(io, base, 1);
}

dt_status dt_table_save(dt_table *t, const char *dir, dt_table_save_desc d) {
    int delta = d.delta;
    dt__snapshot_file s;
    char copy[DT__PATH_BYTES];
    dt_status status = dt__snapshot_begin(&s, t, "dt_table_save", dir, copy);
    if (status != DT_OK) return status;
    if (delta && (t->saved.step < 0 || strcmp(t->dir, copy) != 0))
        dt_fail(t->ctx, DT_ERR_ARG,
            "dt_table_save(%s): a delta needs a base, saved to or loaded from %s before",
            dt__printable_name(t->desc.name).s, copy);
    s.h.delta = delta != 0;
    s.h.clock = t->stats.clock;
    s.h.shrinks = t->shrinks;
    s.h.step = delta ? t->saved.step : -1;
    s.h.repeat = delta ? t->saved.repeat : 0;
    s.since = delta ? t->saved_clock : INT64_MIN;
    if (dt_error(t->ctx) == DT_OK && dt__snapshot_save(&s, copy) == DT_OK && !delta && d.keep > 0)
        dt__snapshot_keep(&s, copy, d.keep);
    dt__snapshot_end(&s);
    return dt_error(t->ctx);
}

/* ---- loading ---- */

/* Sets the range of the file that dt__snapshot_get reads next. */
static void dt__snapshot_seek(dt__snapshot_file *s, int64_t at, int64_t bytes) {
    s->at = at;
    s->size = at + bytes;
    s->used = s->end = 0;
}

/* Returns the next record of the range; NULL at its end, or after a failure. */
static const char *dt__snapshot_get(dt__snapshot_file *s, size_t bytes) {
    int end = 0;
    if (s->used == s->end) {
        int64_t left = s->size - s->at, most = DT__SNAPSHOT_BUFFER / (int64_t)bytes;
        int64_t n = (most > 0 ? most : 1) * (int64_t)bytes;
        n = n < left ? n : left;
        if (n <= 0) return NULL;
        if (dt__io_transfer(&s->writer.io, s->fd, 0, s->buffer, n, s->at, &end) != n) {
            if (end) errno = DT__SHORTER;
            dt__io_fail(s->t->ctx, "dt_table_load: %s", s->path);
            return NULL;
        }
        dt__snapshot_add_digest(s, (size_t)n);
        s->at += n;
        s->used = 0;
        s->end = (size_t)n;
    }
    s->used += bytes;
    return s->buffer + s->used - bytes;
}

/* Returns the slot of a key that a load sets; makes it if it is missing. NULL on failure. */
static uint32_t *dt__snapshot_slot(dt_table *t, uint64_t key, int pending) {
    uint64_t hash = dt__table_hash(key);
    if (dt__table_make_room(t, 1) != DT_OK) return NULL;
    uint32_t *slot = dt__table_find(t, key, hash), row = DT__TABLE_PENDING;
    int spilled = slot && *slot >= DT__TABLE_SPILLED && *slot < DT__TABLE_PENDING;
    if (spilled && dt__table_fetch(t, slot) == DT__TABLE_EMPTY) return NULL;
    if (slot && (*slot >= DT__TABLE_PENDING) == pending) return slot;
    if (slot) dt__table_remove(t, key, slot);
    if (!pending && (row = dt__table_new_row(t)) == DT__TABLE_EMPTY) return NULL;
    if (pending) t->stats.pending++;
    return dt__table_insert(t, key, hash, row);
}

/* Sets the row of a record; `decays` multiplications of its statistics are outstanding. */
static dt_status dt__snapshot_set_row(dt_table *t, const char *p, int64_t decays) {
    uint64_t key;
    memcpy(&key, p, 8);
    uint32_t *slot = dt__snapshot_slot(t, key, 0);
    if (!slot) return dt_error(t->ctx);
    memcpy(dt__table_clock(t, *slot), p += 8, t->note_bytes);
    memcpy(dt__table_values(t, *slot), p += t->note_bytes, t->row_bytes);
    if (t->state_bytes > 0) memcpy(dt__table_state(t, *slot), p + t->row_bytes, t->state_bytes);
    float *shows = t->desc.threshold > 0 ? dt__table_shows(t, *slot) : NULL;
    for (; decays > 0 && shows && (shows[0] != 0 || shows[1] != 0); decays--) {
        shows[0] *= (float)t->desc.decay;
        shows[1] *= (float)t->desc.decay;
    }
    return DT_OK;
}

/* Compares the digest of the file that is open. Returns 1 if it is intact. */
static int dt__snapshot_verify(dt__snapshot_file *s) {
    uint64_t digest = 0;
    int end = 0;
    int64_t size = s->size, body = size - (int64_t)sizeof s->h - 8;
    s->digest = 0;
    dt__snapshot_seek(s, sizeof s->h, body);
    while (dt__snapshot_get(s, 8)) s->used = s->end; /* piece by piece */
    dt__io_transfer(&s->writer.io, s->fd, 0, &digest, 8, size - 8, &end);
    return digest == s->digest && dt_error(s->t->ctx) == DT_OK;
}

/* Applies the snapshot that is open to the table. */
static dt_status dt__snapshot_apply(
    dt__snapshot_file *s, const dt_table_load_desc *d, int64_t shrinks) {
    dt_table *t = s->t;
    int64_t rows = sizeof s->h, pending = rows + s->h.rows * s->h.record_bytes,
            removed = pending + 16 * s->h.pending;
    uint64_t key, count;
    const char *p;
    /* a key may have been removed and then made again */
    dt__snapshot_seek(s, removed, 8 * s->h.removed);
    while ((p = dt__snapshot_get(s, 8)) != NULL) {
        memcpy(&key, p, 8);
        uint32_t *slot = dt__table_find(t, key, dt__table_hash(key));
        if (slot && (!d->owns || d->owns(key, d->user))) dt__table_remove(t, key, slot);
    }
    dt__snapshot_seek(s, rows, pending - rows);
    while ((p = dt__snapshot_get(s, (size_t)s->h.record_bytes)) != NULL) {
        memcpy(&key, p, 8);
        if (d->owns && !d->owns(key, d->user)) continue;
        if (dt__snapshot_set_row(t, p, shrinks - s->h.shrinks) != DT_OK) break;
    }
    dt__snapshot_seek(s, pending, removed - pending);
    while ((p = dt__snapshot_get(s, 16)) != NULL) {
        memcpy(&key, p, 8);
        memcpy(&count, p + 8, 8);
        if (d->owns && !d->owns(key, d->user)) continue;
        uint32_t *slot = dt__snapshot_slot(t, key, 1);
        if (!slot) break;
        *slot = (uint32_t)count | DT__TABLE_PENDING;
    }
    return dt_error(t->ctx);
}

/* Lists the chain from the snapshot `id` back to its base. Returns its length; 0 if a part of it is
   damaged. s->h is then the base's header, and *newest that of `id`. */
static int dt__snapshot_chain(dt__snapshot_file *s, const char *dir, dt__ckpt_id id,
    dt__ckpt_id *ids, dt__snapshot_header *newest) {
    for (int n = 0; n < DT__SNAPSHOT_CHAIN;) {
        int good = dt__snapshot_open(s, dir, id) && dt__snapshot_verify(s);
        dt__snapshot_close(s);
        if (!good) return 0;
        if (n == 0) *newest = s->h;
        ids[n++] = id;
        if (!s->h.delta) return n;
        dt__ckpt_id before = { s->h.step, s->h.repeat };
        if (!dt__ckpt_before(before, id)) return 0;
        id = before;
    }
    return 0;
}

/* Loads the chain that ends in the snapshot `id`. Returns 1 if it is intact. */
static int dt__snapshot_load(
    dt__snapshot_file *s, const char *dir, dt__ckpt_id id, const dt_table_load_desc *d) {
    dt_table *t = s->t;
    dt__snapshot_header newest;
    size_t bytes = DT__SNAPSHOT_CHAIN * sizeof id;
    dt__ckpt_id *ids = (dt__ckpt_id *)dt_alloc(t->ctx, DT_MEM_HOST, bytes, "a chain of snapshots");
    int n = ids ? dt__snapshot_chain(s, dir, id, ids, &newest) : 0, good = n > 0;
    if (good && !d->merge) dt__table_clear(t);
    while (good && n-- > 0) {
        good =
            dt__snapshot_open(s, dir, ids[n]) && dt__snapshot_apply(s, d, newest.shrinks) == DT_OK;
        dt__snapshot_close(s);
    }
    dt_free(t->ctx, DT_MEM_HOST, ids, bytes);
    if (!good) return 0;
    if (newest.clock > t->stats.clock || !d->merge) t->stats.clock = newest.clock;
    t->shrinks = newest.shrinks;
    if (!d->merge && !d->owns) t->saved = id;
    t->saved_clock = newest.clock;
    memcpy(t->dir, dir, strlen(dir) + 1);
    return 1;
}

int64_t dt_table_load(dt_table *t, const char *dir, dt_table_load_desc d) {
    dt__snapshot_file s;
    char copy[DT__PATH_BYTES], name[64];
    if (dt__snapshot_begin(&s, t, "dt_table_load", dir, copy) != DT_OK) return -1;
    dt__ckpt_id at = dt__ckpt_last, newest = dt__ckpt_none;
    int64_t removed = t->stats.removed;
    int found = 0;
    t->saved = dt__ckpt_none; /* a load notes no removed keys */
    t->n_removed = 0;
    if (dt__newest_below(&s.writer.io, copy, at, &newest) != 0 && !dt__io_absent())
        dt__io_fail(t->ctx, "dt_table_load: %s", copy);
    if (d.before > 0) at.step = d.before, at.repeat = 0;
    while (!found && newest.step >= 0 && dt_error(t->ctx) == DT_OK) {
        if (dt__newest_below(&s.writer.io, copy, at, &at) != 0)
            dt__io_fail(t->ctx, "dt_table_load: %s", copy);
        if (at.step < 0) break;
        found = dt__snapshot_load(&s, copy, at, &d);
        dt__ckpt_name(at, name, sizeof name);
        if (!found && dt_error(t->ctx) == DT_OK)
            dt_log(t->ctx, DT_LOG_NOTICE,
                "dt_table_load: %s/%s or a snapshot that it needs is damaged", copy, name);
    }
    t->stats.removed = removed;
    if (found) t->newest_known = newest;
    dt__snapshot_end(&s);
    return found && dt_error(t->ctx) == DT_OK ? t->stats.clock : -1;
}

// ==== 27. Parameter server: keys, sums, pulls ===================================================

/* A worker's request goes to the owners of its keys. Its parts have one form in both modes:

       pull      keys, by owner              answer    rows, in the order of the keys
       step      for each owner: number of keys of each table; then for each table its keys and,
                 padded to 8 bytes, the sums of their gradients

   Step sums have two levels, as the gradients of a bucket have (section 8 of dt_tensor.h): `micro`
   receives the gradients of this micro-batch, row by row, and is then added to `total`. So the sums
   have the order of additions of data parallelism, and its bits. */

typedef struct dt__ps_buffer {
    char *p;
    size_t bytes;
} dt__ps_buffer;

typedef struct dt__ps_keys { /* distinct keys, numbered from 0 in the order of their insertion */
    size_t n, capacity;
    dt__ps_buffer keys, slots; /* (capacity) u64; (2 capacity) u32: hash table of their numbers */
} dt__ps_keys;

typedef struct dt__ps_table {
    dt_table *table;             /* this rank's part; on a rank that owns nothing it stays empty */
    dt__ps_keys set;             /* the keys of this step; of a dense table all: set.keys[k] = k */
    dt__ps_buffer total, micro;  /* (set.n) rows of sums */
    dt__ps_buffer flags, opened; /* (set.n) DT__PS_IN_*; list of the keys with a sum in `micro` */
    size_t n_opened;
    int has_total; /* `total` has sums of all keys whose sum is complete */
    /* DT_PS_GEO, a worker: the keys that it has changed since the last exchange; (changed.n) base
       rows and targets. `table` is the worker's replica */
    dt__ps_keys changed;
    dt__ps_buffer pairs;
    dt_shape shape;      /* of a dense table; else nd = -1 */
    dt__ps_buffer owned; /* of a dense table: the n_owned runs of this rank, ascending */
    size_t n_owned;
    /* of a dense table, a worker's: the values that it has read at clock read_clock (-1: none) */
    dt__ps_buffer values, where; /* rows; (set.n) size_t: offset of each run's row in them */
    int64_t read_clock;
} dt__ps_table;
enum { DT__PS_IN_MICRO = 1, DT__PS_IN_TOTAL = 2 };

typedef struct dt__ps_header { /* of a request or an answer */
    int32_t op, table, slot, unused;
    int64_t clock;    /* the worker's; in an answer that of the slowest worker */
    int64_t n, bytes; /* keys of a pull; bytes of the payload, which follows if there is one */
    double lr;
    int64_t spare[2]; /* fill a cache line of 64 bytes */
} dt__ps_header;
enum { DT__PS_PULL = 1, DT__PS_STEP, DT__PS_END, DT__PS_SAVE, DT__PS_OPS };
enum { DT__PS_ORDER = 1024 }; /* requests in one access to the file of their order */
enum { DT__PS_TAG_HEADER = 0, DT__PS_TAG_PAYLOAD, DT__PS_TAG_ACK, DT__PS_TAG_ANSWER };

typedef struct dt__ps_link { /* a worker's message to one owner, and the answer */
    dt__ps_header header, ack;
    size_t n, offset; /* keys; the first one's position in owner order */
    size_t answer;    /* offset of the answer in the buffer of rows */
    dt_work *work[3];
} dt__ps_link;

enum { DT__PS_FREE = 0, DT__PS_BUSY, DT__PS_PREFETCH };
struct dt_ps_pull {
    int table, slot, busy; /* DT__PS_PREFETCH: no caller has the handle yet */
    int64_t clock;
    size_t n;
    void *out;
    dt__ps_keys set;
    dt__ps_buffer number, where; /* (n) u32: number of key i; (set.n) size_t: offset of its row */
    dt__ps_buffer keys, rows; /* in owner order; rows of an owner come after a header if served */
    dt__ps_link *links;       /* (owners) */
};

typedef struct
    dt__ps_request { /* a server's: a held pull, or a step; an answer that is being sent */
    struct dt__ps_request *next;
    dt__ps_header header;
    int from;
    dt__ps_buffer payload;
    dt_work *work;
} dt__ps_request;

struct dt_ps {
    dt_ctx *ctx;
    dt_ps_desc desc; /* with defaults filled in */
    dt_listener listener;
    dt_comm *comm, *owner_comm;
    int ranks, rank, workers, owners, first_owner; /* ranks from first_owner on are owners */
    int64_t bound;                                 /* of SSP; 0: synchronous; INT64_MAX: none */
    dt__ps_table *tables;
    int n_tables, table_capacity;
    dt_ps_pull *pulls;                 /* (2 desc.credits): of callers, then prefetches */
    int micro, has_ended, has_replica; /* has_replica: GEO, the first exchange is complete */
    dt__ps_link *links;                /* (owners) of the last step */
    dt__ps_buffer step;                /* its payloads, in owner order */
    dt__ps_buffer peer, reply;         /* of owned mode: what the other ranks sent; rows for them */
    dt__ps_buffer keys, grads;         /* of one table: the steps of all workers, in worker order */
    size_t array_bytes;                /* of the arrays from here on that have ranks or workers */
    size_t *counts;                    /* (4 ranks) of all-to-all-v */
    const char **payloads;             /* (workers) steps that are applied together */
    int64_t *numbers;                  /* (2 ranks) */
    double *rates;                     /* (ranks) learning rates of a step */
    /* a server */
    int64_t *clocks;        /* (workers) steps that have come; INT64_MAX: ended */
    int64_t *seen;          /* (workers) GEO: the clock of the last exchange */
    int64_t applied;        /* synchronous steps; GEO: clock of the last exchange */
    dt__ps_request **steps; /* (workers) that wait for the steps of the other workers */
    dt__ps_header incoming; /* of the next request, and the worker that sends it */
    int incoming_from;
    dt__ps_request *held, *answers, *spare; /* spare: for the next requests and answers */
    int order_fd;                           /* the file of the order of requests, -1: none */
    int64_t order_at;                       /* number of requests in the file, or read from it */
    int32_t order[DT__PS_ORDER];            /* the last ones: worker * DT__PS_OPS + operation */
    /* snapshots (section 29) */
    dt__ps_request **saves;          /* (workers) a server's requests to save */
    int has_sums;                    /* 1: a worker has gradients that are not pushed */
    dt__ckpt_id saved, newest_known; /* last snapshot saved or loaded; step -1: none */
    char dir[DT__PATH_BYTES];        /* its folder */
    dt__files *lock;                 /* the first owner's lock of `dir`; NULL: none */
    dt_ps_stats stats;
};

static void dt__ps_unlock(dt_ps *ps);
static void dt__ps_serve_save(dt_ps *ps);

static dt_status dt__ps_usable(const dt_ps *ps) { return ps ? dt_error(ps->ctx) : DT_ERR_ARG; }

/* Makes a buffer at least `bytes` long. Keeps its first `keep` bytes. Returns its memory, not NULL
   for 0 bytes either; NULL on failure. */
static char *dt__ps_room(dt_ps *ps, dt__ps_buffer *b, size_t bytes, size_t keep) {
    if (b->p && bytes <= b->bytes) return b->p;
    size_t more = bytes < 64 ? 64 : bytes + bytes / 2;
    char *p = (char *)dt_alloc(ps->ctx, DT_MEM_COMM, more, "dt_ps");
    if (!p) return NULL;
    if (keep > 0) memcpy(p, b->p, keep);
    dt_free(ps->ctx, DT_MEM_COMM, b->p, b->bytes);
    b->p = p;
    b->bytes = more;
    return p;
}

static void dt__ps_drop(dt_ps *ps, dt__ps_buffer *b) {
    dt_free(ps->ctx, DT_MEM_COMM, b->p, b->bytes);
    b->p = NULL;
    b->bytes = 0;
}

static uint64_t *dt__ps_key_list(const dt__ps_keys *set) { return (uint64_t *)(void *)set->keys.p; }

/* The slot of a key, or the empty one for it. */
static uint32_t *dt__ps_slot(const dt__ps_keys *set, uint64_t key) {
    uint32_t *slots = (uint32_t *)(void *)set->slots.p;
    const uint64_t *keys = dt__ps_key_list(set);
    size_t mask = 2 * set->capacity - 1, at = (size_t)dt__table_hash(key) & mask;
    while (slots[at] != UINT32_MAX && keys[slots[at]] != key) at = (at + 1) & mask;
    return &slots[at];
}

/* Empties a set. If it has few keys for its capacity, they are taken out, the last one first, which
   leaves the table as it was before their insertion. */
static void dt__ps_clear(dt__ps_keys *set) {
    if (set->n > set->capacity / 8)
        memset(set->slots.p, 0xff, 2 * set->capacity * sizeof(uint32_t));
    else
        for (size_t k = set->n; k-- > 0;) *dt__ps_slot(set, dt__ps_key_list(set)[k]) = UINT32_MAX;
    set->n = 0;
}

/* Returns the number of a key, which is set->n - 1 if it is new; UINT32_MAX on failure. */
static uint32_t dt__ps_number(dt_ps *ps, dt__ps_keys *set, uint64_t key) {
    if (set->n == set->capacity) {
        size_t more = set->capacity ? 2 * set->capacity : 64;
        if (!dt__ps_room(ps, &set->keys, more * sizeof key, set->n * sizeof key) ||
            !dt__ps_room(ps, &set->slots, 2 * more * sizeof(uint32_t), 0))
            return UINT32_MAX;
        set->capacity = more;
        memset(set->slots.p, 0xff, 2 * more * sizeof(uint32_t));
        for (size_t i = 0; i < set->n; i++)
            *dt__ps_slot(set, dt__ps_key_list(set)[i]) = (uint32_t)i;
    }
    uint32_t *slot = dt__ps_slot(set, key);
    if (*slot == UINT32_MAX) {
        dt__ps_key_list(set)[set->n] = key;
        *slot = (uint32_t)set->n++;
    }
    return *slot;
}

/* The owner of a key: the high bits of a hash (SplitMix64) other than the table's own, whose shards
   and buckets would else be used unevenly. */
static int dt__ps_owner(const dt_ps *ps, uint64_t key) {
    if (ps->owners == 1) return 0;
    key += 0x9e3779b97f4a7c15u;
    key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9u;
    key = (key ^ key >> 27) * 0x94d049bb133111ebu;
    key ^= key >> 31;
    return (int)((key >> 32) * (uint64_t)ps->owners >> 32);
}

/* ---- sums of a step ---- */

/* Adds the sums of a micro-batch, which are complete, to the sums of the step. */
static void dt__ps_close_micro(dt_ps *ps) {
    for (int i = 0; i < ps->n_tables; i++) {
        dt__ps_table *t = &ps->tables[i];
        size_t bytes = t->table->grad_bytes;
        const uint32_t *opened = (const uint32_t *)(void *)t->opened.p;
        dt__ps_buffer first = t->micro;
        int is_first = !t->has_total && t->n_opened == t->set.n; /* every sum moves: no copy */
        if (is_first) {
            t->micro = t->total;
            t->total = first;
        }
        for (size_t k = 0; k < t->n_opened; k++) {
            char *micro = t->micro.p + opened[k] * bytes, *total = t->total.p + opened[k] * bytes;
            char *flags = &t->flags.p[opened[k]];
            if (*flags & DT__PS_IN_TOTAL)
                dt__table_add(t->table, total, micro, t->table->desc.width);
            else if (!is_first)
                memcpy(total, micro, bytes);
            *flags = DT__PS_IN_TOTAL;
            t->has_total = 1;
        }
        t->n_opened = 0;
    }
}

/* Makes room for the sums of n keys, of which `had` have some. */
static dt_status dt__ps_sum_room(dt_ps *ps, dt__ps_table *t, size_t n, size_t had) {
    size_t bytes = t->table->grad_bytes, number = sizeof(uint32_t);
    if (dt__ps_room(ps, &t->total, n * bytes, had * bytes) &&
        dt__ps_room(ps, &t->micro, n * bytes, had * bytes) && dt__ps_room(ps, &t->flags, n, had) &&
        dt__ps_room(ps, &t->opened, n * number, t->n_opened * number))
        memset(t->flags.p + had, 0, n - had);
    return dt_error(ps->ctx);
}

/* Adds n elements of a row of gradients, of bf16 with is_bf16, to the micro-batch's sum of a key.
   The other elements of the row are 0. */
static dt_status dt__ps_add_row(
    dt_ps *ps, dt__ps_table *t, uint64_t key, const char *grad, size_t n, int is_bf16) {
    const size_t bytes = t->table->grad_bytes, had = t->set.n,
                 used = n * dt_dtype_size(t->table->compute);
    uint32_t k = t->shape.nd >= 0 ? (uint32_t)key : dt__ps_number(ps, &t->set, key);
    if (k == UINT32_MAX || (t->set.n > had && dt__ps_sum_room(ps, t, had + 1, had) != DT_OK))
        return dt_error(ps->ctx);
    char *sum = t->micro.p + k * bytes;
    int is_first = !(t->flags.p[k] & DT__PS_IN_MICRO);
    if (is_first) {
        t->flags.p[k] |= DT__PS_IN_MICRO;
        memcpy(t->opened.p + t->n_opened++ * sizeof k, &k, sizeof k);
        if (is_bf16 || used < bytes) memset(sum, 0, bytes);
    }
    if (is_bf16)
        for (size_t c = 0; c < n; c++)
            ((float *)(void *)sum)[c] += dt__bf16_to_f32(((const uint16_t *)(const void *)grad)[c]);
    else if (is_first)
        memcpy(sum, grad, used);
    else
        dt__table_add(t->table, sum, grad, (int)n);
    return DT_OK;
}

/* Adds gradients of the type of the table's gradients; or, with is_bf16, of bf16. Sparse: rows of n
   keys. Dense: n elements, keys is NULL. */
static dt_status dt__ps_accumulate(
    dt_ps *ps, dt__ps_table *t, const uint64_t *keys, size_t n, const void *grads, int is_bf16) {
    const size_t width = (size_t)t->table->desc.width, rows = keys ? n : t->set.n,
                 bytes = is_bf16 ? 2 * width : t->table->grad_bytes;
    if (ps->micro != ps->ctx->micro) dt__ps_close_micro(ps);
    ps->micro = ps->ctx->micro;
    ps->has_sums |= rows > 0;
    for (size_t i = 0; i < rows && dt_error(ps->ctx) == DT_OK; i++)
        dt__ps_add_row(ps, t, keys ? keys[i] : i, (const char *)grads + i * bytes,
            keys || n - i * width > width ? width : n - i * width, is_bf16);
    return dt_error(ps->ctx);
}

/* The next gradients are those of another micro-batch. */
static void dt__ps_on_reset(dt_ctx *ctx, void *user) {
    (void)ctx;
    dt__ps_close_micro((dt_ps *)user);
}

/* ---- making and freeing ---- */

static void dt__ps_drop_keys(dt_ps *ps, dt__ps_keys *set) {
    dt__ps_drop(ps, &set->keys);
    dt__ps_drop(ps, &set->slots);
}

static void dt__ps_free_requests(dt_ps *ps, dt__ps_request *r) {
    while (r) {
        dt__ps_request *next = r->next;
        dt__ps_drop(ps, &r->payload);
        dt_free(ps->ctx, DT_MEM_HOST, r, sizeof *r);
        r = next;
    }
}

/* Frees the parameter server, when the context is freed; the context frees the tables. */
static void dt__ps_close(dt_ctx *ctx, void *user) {
    dt_ps *ps = (dt_ps *)user;
    size_t links = (size_t)ps->owners * sizeof *ps->links;
    for (int i = 0; i < ps->n_tables; i++) {
        dt__ps_table *t = &ps->tables[i];
        dt__ps_buffer *all[] = { &t->total, &t->micro, &t->flags, &t->opened, &t->owned, &t->pairs,
            &t->values, &t->where };
        for (int k = 0; k < 8; k++) dt__ps_drop(ps, all[k]);
        dt__ps_drop_keys(ps, &t->set);
        dt__ps_drop_keys(ps, &t->changed);
    }
    for (int i = 0; i < 2 * ps->desc.credits && ps->pulls; i++) {
        dt_ps_pull *p = &ps->pulls[i];
        dt__ps_buffer *all[] = { &p->number, &p->where, &p->keys, &p->rows };
        for (int k = 0; k < 4; k++) dt__ps_drop(ps, all[k]);
        dt__ps_drop_keys(ps, &p->set);
        dt_free(ctx, DT_MEM_HOST, p->links, links);
    }
    dt__ps_buffer *all[] = { &ps->step, &ps->peer, &ps->reply, &ps->keys, &ps->grads };
    for (int k = 0; k < 5; k++) dt__ps_drop(ps, all[k]);
    if (ps->order_fd >= 0) ctx->io.close(ctx->io.user, ps->order_fd);
    for (int w = 0; w < ps->workers && ps->steps; w++) dt__ps_free_requests(ps, ps->steps[w]);
    for (int w = 0; w < ps->workers && ps->saves; w++) dt__ps_free_requests(ps, ps->saves[w]);
    dt__ps_free_requests(ps, ps->held);
    dt__ps_free_requests(ps, ps->answers);
    dt__ps_free_requests(ps, ps->spare);
    dt__ps_unlock(ps);
    dt_free(ctx, DT_MEM_HOST, ps->tables, (size_t)ps->table_capacity * sizeof *ps->tables);
    dt_free(ctx, DT_MEM_HOST, ps->pulls, 2 * (size_t)ps->desc.credits * sizeof *ps->pulls);
    dt_free(ctx, DT_MEM_HOST, ps->links, links);
    dt_free(ctx, DT_MEM_HOST, ps->counts, ps->array_bytes);
    dt_free(ctx, DT_MEM_HOST, ps, sizeof *ps);
}

/* Fails if this rank's digest differs from another's; what: the function and what is compared. */
static dt_status dt__ps_compare(dt_ps *ps, const char *what, uint64_t digest) {
    int64_t mine = (int64_t)digest;
    if (dt_all_gather(ps->comm, &mine, ps->numbers, 1, DT_I64) != DT_OK) return dt_error(ps->ctx);
    for (int r = 1; r < ps->ranks; r++)
        if (ps->numbers[r] != ps->numbers[0])
            return dt_fail(ps->ctx, DT_ERR_ARG, "%s differs between ranks 0 and %d of %s", what, r,
                dt_comm_name(ps->comm));
    return DT_OK;
}

static dt_status dt__ps_allocate(dt_ps *ps) {
    dt_ctx *ctx = ps->ctx;
    const char *what = "dt_ps_make";
    size_t n = (size_t)ps->ranks, w = (size_t)ps->workers, o = (size_t)ps->owners;
    ps->pulls =
        (dt_ps_pull *)dt__host_zeroed(ctx, 2 * (size_t)ps->desc.credits * sizeof *ps->pulls, what);
    ps->links = (dt__ps_link *)dt__host_zeroed(ctx, o * sizeof *ps->links, what);
    ps->array_bytes = 8 * (7 * n + 5 * w);
    ps->counts = (size_t *)dt__host_zeroed(ctx, ps->array_bytes, what);
    if (!ps->counts) return dt_error(ctx);
    ps->numbers = (int64_t *)(void *)(ps->counts + 4 * n);
    ps->rates = (double *)(void *)(ps->numbers + 2 * n);
    ps->clocks = (int64_t *)(void *)(ps->rates + n);
    ps->seen = ps->clocks + w;
    for (size_t i = 0; i < w; i++) ps->seen[i] = INT64_MIN; /* all rows are new to it */
    ps->payloads = (const char **)(void *)(ps->seen + w);
    ps->steps = (dt__ps_request **)(void *)(ps->payloads + w);
    ps->saves = ps->steps + w;
    for (int i = 0; i < 2 * ps->desc.credits && ps->pulls; i++) {
        ps->pulls[i].slot = i;
        ps->pulls[i].links = (dt__ps_link *)dt__host_zeroed(ctx, o * sizeof *ps->links, what);
    }
    return dt_error(ctx);
}

static dt_ps *dt__ps_make(dt_ctx *ctx, dt_ps_desc desc) {
    if (dt_error(ctx) != DT_OK) return NULL;
    if (!desc.comm) desc.comm = dt_world(ctx);
    if (desc.credits == 0) desc.credits = DT_PS_CREDITS;
    const int ranks = dt_comm_size(desc.comm);
    const char *why =
        desc.servers < 0 || desc.servers >= ranks      ? "servers: 0 to ranks - 1"
        : desc.mode < 0 || desc.mode > DT_PS_GEO       ? "mode: a DT_PS_*"
        : desc.servers == 0 && desc.mode != DT_PS_SYNC ? "mode: without servers only DT_PS_SYNC"
        : desc.staleness < 0 || (desc.staleness > 0 && desc.mode != DT_PS_SSP)
            ? "staleness: not negative, and only for DT_PS_SSP"
        : (desc.mode == DT_PS_GEO) != (desc.geo_steps > 0) || desc.geo_steps < 0
            ? "geo_steps: at least 1 for DT_PS_GEO, else 0"
        : !(desc.geo_scale >= 0 && isfinite(desc.geo_scale)) ? "geo_scale: not negative"
        : desc.record && desc.replay                         ? "record or replay, not both"
        : desc.credits < 1 || desc.credits > 1024            ? "credits: 1 to 1,024"
                                                             : NULL;
    if (why) return dt_fail(ctx, DT_ERR_ARG, "dt_ps_make: %s", why), (dt_ps *)NULL;
    dt_ps *ps = (dt_ps *)dt__host_zeroed(ctx, sizeof *ps, "dt_ps_make");
    if (!ps) return NULL;
    ps->ctx = ctx;
    ps->desc = desc;
    ps->order_fd = -1;
    ps->saved = ps->newest_known = dt__ckpt_none;
    ps->ranks = ranks;
    ps->rank = dt_comm_rank(desc.comm);
    ps->workers = ranks - desc.servers;
    ps->owners = desc.servers ? desc.servers : ranks;
    ps->first_owner = desc.servers ? ps->workers : 0;
    if (desc.geo_scale == 0) ps->desc.geo_scale = 1.0 / ps->workers;
    ps->bound = desc.mode == DT_PS_SYNC || desc.mode == DT_PS_SSP ? desc.staleness : INT64_MAX;
    ps->listener.closing = dt__ps_close;
    ps->listener.reset = dt__ps_on_reset;
    ps->listener.user = ps;
    dt_listen(ctx, &ps->listener);
    int settings[] = { desc.servers, desc.mode, desc.staleness, desc.credits, desc.geo_steps };
    uint64_t digest = dt__digest(1, settings, sizeof settings);
    digest = dt__digest(digest, &desc.geo_scale, sizeof desc.geo_scale);
    if (desc.comm) ps->comm = dt_comm_split(desc.comm, 0, 0, "ps");
    ps->owner_comm = ps->comm;
    if (desc.servers)
        ps->owner_comm = dt_comm_split(ps->comm, ps->rank < ps->workers ? -1 : 0, 0, "servers");
    if (dt__ps_allocate(ps) != DT_OK || dt__ps_compare(ps, "dt_ps_make: a setting", digest))
        return NULL; /* the context frees it */
    return ps;
}

int dt_ps_is_server(const dt_ps *ps) { return ps && ps->desc.servers && ps->rank >= ps->workers; }

static int dt__ps_is_owner(const dt_ps *ps) { return ps->rank >= ps->first_owner; }

static uint64_t dt__ps_table_digest(const dt_table_desc *d) {
    double reals[] = { d->init.scale, d->beta1, d->beta2, d->eps, d->initial_accumulator, d->l1,
        d->l2, d->ftrl_beta, d->admit_probability, d->threshold, d->decay, d->show_weight,
        d->click_weight };
    int64_t integers[] = { d->width, d->dtype, d->init.kind, d->optimizer, d->admit_count, d->ttl,
        d->states };
    uint64_t h = dt__digest(dt__digest(1, reals, sizeof reals), integers, sizeof integers);
    return d->name ? dt__digest(h, d->name, strlen(d->name)) : h;
}

static int dt__ps_table_add(dt_ps *ps, dt_table_desc desc) {
    if (dt__ps_usable(ps) != DT_OK) return -1;
    if (ps->stats.clock > 0 || ps->saved.step >= 0)
        return dt_fail(ps->ctx, DT_ERR_ARG,
                   "dt_ps_table(%s): it must come before the first step and snapshot",
                   dt__printable_name(desc.name).s),
               -1;
    if (dt__ps_compare(ps, "dt_ps_table: the table's description", dt__ps_table_digest(&desc)))
        return -1;
    if (ps->desc.mode == DT_PS_GEO &&
        (desc.optimizer == DT_TABLE_FTRL || desc.admit_count > 1 || desc.admit_probability > 0 ||
            desc.ttl > 0 || desc.threshold > 0 || desc.memory_limit > 0))
        return dt_fail(ps->ctx, DT_ERR_ARG,
                   "dt_ps_table(%s): DT_PS_GEO has no FTRL, admission, ttl, threshold, "
                   "memory_limit",
                   dt__printable_name(desc.name).s),
               -1;
    if (ps->desc.mode == DT_PS_GEO && dt_ps_is_server(ps)) desc.optimizer = DT_TABLE_SGD;
    dt__ps_table *grown = (dt__ps_table *)dt__grow(
        ps->ctx, ps->tables, ps->n_tables, &ps->table_capacity, sizeof *grown, "dt_ps_table");
    if (!grown) return -1;
    ps->tables = grown;
    if (!dt__ps_is_owner(ps)) desc.memory_limit = 0;
    dt_table *table = dt_table_make(ps->ctx, desc);
    if (!table) return -1;
    memset(&grown[ps->n_tables], 0, sizeof *grown);
    grown[ps->n_tables].table = table;
    grown[ps->n_tables].shape.nd = -1;
    grown[ps->n_tables].read_clock = -1;
    return ps->n_tables++;
}

static int dt__ps_dense(dt_ps *ps, dt_table_desc desc, dt_shape shape) {
    if (dt__ps_usable(ps) != DT_OK) return -1;
    const int64_t n = dt_count(shape), widest = DT_PS_RUN;
    const char *why =
        n < 1 || (n - 1) / widest >= UINT32_MAX ? "shape: 1 to 2^42 - 1,024 elements"
        : desc.admit_count > 1 || desc.admit_probability > 0 || desc.ttl > 0 || desc.threshold > 0
            ? "no admission, ttl or threshold"
            : NULL;
    if (why) return dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_dense: %s", why), -1;
    if (dt__ps_compare(ps, "dt_ps_dense: the shape", dt__digest(1, shape.d, sizeof shape.d)))
        return -1;
    desc.width = (int)(n < widest ? n : widest);
    int number = dt__ps_table_add(ps, desc);
    if (number < 0) return -1;
    dt__ps_table *t = &ps->tables[number];
    size_t runs = (size_t)((n - 1) / widest) + 1;
    t->shape = shape;
    t->set.n = runs;
    uint64_t *keys = (uint64_t *)(void *)dt__ps_room(ps, &t->set.keys, runs * sizeof *keys, 0),
             *owned = (uint64_t *)(void *)dt__ps_room(ps, &t->owned, runs * sizeof *owned, 0);
    for (size_t k = 0; k < runs && keys && owned; k++) {
        keys[k] = k;
        if (dt__ps_owner(ps, k) + ps->first_owner == ps->rank) owned[t->n_owned++] = k;
    }
    return !dt_ps_is_server(ps) && dt__ps_sum_room(ps, t, runs, 0) != DT_OK ? -1 : number;
}

dt_table *dt_ps_owned(const dt_ps *ps, int table) {
    int owned = ps && table >= 0 && table < ps->n_tables && dt__ps_is_owner(ps);
    return owned ? ps->tables[table].table : NULL;
}

dt_ps_stats dt_ps_info(const dt_ps *ps) {
    dt_ps_stats none;
    memset(&none, 0, sizeof none);
    return ps ? ps->stats : none;
}

dt_ps_bytes dt_ps_formula(dt_ps_formula_desc d) {
    dt_ps_bytes b = { .all_reduce = NAN, .server = NAN, .use_server = 0 };
    if (!(d.rows >= 0 && d.keys >= 0 && d.values >= 0 && d.grads >= 0) || d.width < 0 ||
        d.workers < 0)
        return b;
    if (d.values == 0 && d.grads == 0) d.values = d.grads = 4;
    double n = d.workers ? d.workers : 1, w = d.width, key = sizeof(uint64_t);
    b.all_reduce = 2 * d.grads * w * d.rows * (n - 1) / n;
    b.server = d.keys * (key + d.values * w) + d.keys * (key + d.grads * w);
    b.use_server = b.server < b.all_reduce;
    return b;
}

/* Returns a table, or NULL if this rank is no worker that may use it now, or the table is dense and
   should not be, or the other way round. is_dense -1: either. */
static dt__ps_table *dt__ps_use(dt_ps *ps, const char *func, int table, int is_dense) {
    if (dt__ps_usable(ps) != DT_OK) return NULL;
    const char *why = dt_ps_is_server(ps)                  ? "this rank is a server"
                      : ps->has_ended                      ? "dt_ps_end was called"
                      : table < 0 || table >= ps->n_tables ? "no such table"
                      : is_dense >= 0 && is_dense != (ps->tables[table].shape.nd >= 0)
                          ? (is_dense ? "not a dense table" : "a dense table")
                          : NULL;
    if (!why) return &ps->tables[table];
    dt_fail(ps->ctx, DT_ERR_ARG, "%s: table %d: %s", func, table, why);
    return NULL;
}

static dt_status dt__ps_add(
    dt_ps *ps, int table, const uint64_t *keys, size_t n, const void *grads) {
    dt__ps_table *t = dt__ps_use(ps, "dt_ps_add", table, 0);
    if (!t) return dt__ps_usable(ps);
    if (n > 1u << 30 || (n > 0 && (!keys || !grads)))
        return dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_add(%s): %zu keys at %p, gradients at %p",
            dt__printable_name(t->table->desc.name).s, n, (const void *)keys, grads);
    return dt__ps_accumulate(ps, t, keys, n, grads, 0);
}

/* ---- pull ---- */

static dt_status dt__ps_exchange_changes(dt_ps *ps);

/* Sorts the keys of a pull, or of a dense table, by owner; fills in `where` and the links. */
static dt_status dt__ps_sort(
    dt_ps *ps, dt_ps_pull *p, const dt__ps_keys *set, size_t row_bytes, size_t head) {
    const size_t u = set->n;
    uint64_t *sorted = (uint64_t *)(void *)dt__ps_room(ps, &p->keys, u * sizeof *sorted, 0);
    size_t *where = (size_t *)(void *)dt__ps_room(ps, &p->where, u * sizeof *where, 0);
    if (!sorted || !where) return dt_error(ps->ctx);
    const uint64_t *keys = dt__ps_key_list(set);
    size_t at = 0, bytes = 0;
    for (int o = 0; o < ps->owners; o++) p->links[o].n = 0;
    for (size_t k = 0; k < u; k++) p->links[dt__ps_owner(ps, keys[k])].n++;
    for (int o = 0; o < ps->owners; o++) {
        dt__ps_link *l = &p->links[o];
        l->offset = at;
        l->answer = bytes;
        at += l->n;
        bytes += l->n > 0 ? head + l->n * row_bytes : 0;
        l->n = 0;
    }
    for (size_t k = 0; k < u; k++) {
        dt__ps_link *l = &p->links[dt__ps_owner(ps, keys[k])];
        sorted[l->offset + l->n] = keys[k];
        where[k] = l->answer + head + l->n++ * row_bytes;
    }
    ps->stats.pulled += (int64_t)u;
    ps->stats.bytes += (int64_t)(u * ((set == &p->set) * sizeof *keys + row_bytes));
    dt__ps_room(ps, &p->rows, bytes, 0);
    return dt_error(ps->ctx);
}

/* Owned mode: two all-to-alls bring the keys to their owners and the rows back. Each rank knows
   which runs of a dense table it has to send. */
static dt_status dt__ps_exchange_rows(dt_ps *ps, dt_ps_pull *p, const dt__ps_table *t) {
    const size_t n = (size_t)ps->ranks;
    size_t *to = ps->counts, *from = to + n, *rows_to = from + n, *rows_from = rows_to + n;
    int64_t *mine = ps->numbers, *theirs = mine + n;
    dt_table *table = t->table;
    size_t sum = 0;
    int is_dense = t->shape.nd >= 0;
    for (int o = 0; o < ps->owners; o++) {
        mine[o] = (int64_t)p->links[o].n;
        theirs[o] = (int64_t)t->n_owned;
    }
    if (!is_dense && dt_all_to_all(ps->comm, mine, theirs, 1, DT_I64) != DT_OK)
        return dt_error(ps->ctx);
    for (size_t r = 0; r < n; r++) {
        to[r] = (size_t)mine[r];
        sum += from[r] = (size_t)theirs[r];
        rows_from[r] = to[r] * table->row_bytes;
        rows_to[r] = from[r] * table->row_bytes;
    }
    char *keys = dt__ps_room(ps, &ps->peer, sum * sizeof(uint64_t), 0),
         *rows = dt__ps_room(ps, &ps->reply, sum * table->row_bytes, 0);
    for (size_t r = 0; r < n && is_dense && keys; r++)
        memcpy(keys + r * from[r] * sizeof(uint64_t), t->owned.p, from[r] * sizeof(uint64_t));
    if (!keys || !rows ||
        (!is_dense && dt_all_to_all_v(ps->comm, p->keys.p, to, keys, from, DT_I64) != DT_OK) ||
        dt_table_pull(table, (const uint64_t *)(void *)keys, sum, rows) != DT_OK)
        return dt_error(ps->ctx);
    ps->stats.staleness[0]++;
    return dt_all_to_all_v(ps->comm, rows, rows_to, p->rows.p, rows_from, DT_U8);
}

/* Served mode: sends the keys to their owners and receives the answers. */
static void dt__ps_request_rows(dt_ps *ps, dt_ps_pull *p, const dt__ps_table *t) {
    const size_t head = sizeof(dt__ps_header), row_bytes = t->table->row_bytes;
    for (int o = 0; o < ps->owners; o++) {
        dt__ps_link *l = &p->links[o];
        size_t bytes = t->shape.nd >= 0 ? 0 : l->n * sizeof(uint64_t);
        dt__ps_header h = { DT__PS_PULL, p->table, p->slot, 0, p->clock, (int64_t)l->n,
            (int64_t)bytes, 0, { 0, 0 } };
        l->header = h;
        if (l->n == 0) continue;
        l->work[0] = dt_recv_start(ps->comm, p->rows.p + l->answer, head + l->n * row_bytes, DT_U8,
            ps->first_owner + o, DT__PS_TAG_ANSWER + p->slot);
        l->work[1] = dt_send_start(
            ps->comm, &l->header, head, DT_U8, ps->first_owner + o, DT__PS_TAG_HEADER);
        if (bytes > 0)
            l->work[2] = dt_send_start(ps->comm, p->keys.p + l->offset * sizeof(uint64_t), bytes,
                DT_U8, ps->first_owner + o, DT__PS_TAG_PAYLOAD);
    }
}

/* Waits for a link's works. */
static void dt__ps_finish_link(dt_ps *ps, dt__ps_link *l) {
    for (int i = 0; i < 3; i++)
        if (l->work[i]) dt_wait(ps->ctx, l->work[i]);
    memset(l->work, 0, sizeof l->work);
}

/* Waits for the answers to an unused prefetch, and frees it. */
static void dt__ps_drop_prefetch(dt_ps *ps, dt_ps_pull *p) {
    if (p->busy != DT__PS_PREFETCH) return;
    for (int o = 0; o < ps->owners; o++) dt__ps_finish_link(ps, &p->links[o]);
    p->busy = DT__PS_FREE;
}

/* Returns a free pull for a caller or a prefetch, or NULL. Drops prefetches of past steps. */
static dt_ps_pull *dt__ps_free_pull(dt_ps *ps, int kind) {
    dt_ps_pull *p = ps->pulls + (kind == DT__PS_PREFETCH ? ps->desc.credits : 0), *found = NULL;
    for (int i = 0; i < ps->desc.credits && !found; i++, p++) {
        if (p->clock < ps->stats.clock) dt__ps_drop_prefetch(ps, p);
        if (!p->busy) found = p;
    }
    return found;
}

/* Starts a pull of n keys, or with keys NULL of a dense table of n elements, for a step: the
   worker's clock then. rows may be NULL for a prefetch. */
static dt_ps_pull *dt__ps_pull_begin(dt_ps *ps, dt_ps_pull *p, int table, const uint64_t *keys,
    size_t n, void *rows, int64_t clock) {
    const dt__ps_table *t = &ps->tables[table];
    if (!p || (keys && n > 1u << 30))
        return dt_fail(ps->ctx, DT_ERR_ARG,
                   "dt_ps_pull_start(%s): %zu keys; at most %d pulls under way",
                   dt__printable_name(t->table->desc.name).s, n, ps->desc.credits),
               (dt_ps_pull *)NULL;
    p->table = table;
    p->clock = clock;
    p->n = n;
    p->out = rows;
    dt__ps_clear(&p->set);
    uint32_t *number =
        (uint32_t *)(void *)dt__ps_room(ps, &p->number, keys ? n * sizeof *number : 0, 0);
    for (size_t i = 0; i < n && keys && dt_error(ps->ctx) == DT_OK; i++)
        number[i] = dt__ps_number(ps, &p->set, keys[i]);
    size_t head = ps->desc.servers ? sizeof(dt__ps_header) : 0;
    if (dt_error(ps->ctx) != DT_OK ||
        dt__ps_sort(ps, p, keys ? &p->set : &t->set, t->table->row_bytes, head) != DT_OK)
        return NULL;
    p->busy = rows ? DT__PS_BUSY : DT__PS_PREFETCH;
    if (ps->desc.servers)
        dt__ps_request_rows(ps, p, t);
    else
        dt__ps_exchange_rows(ps, p, t);
    return dt_error(ps->ctx) == DT_OK ? p : NULL;
}

/* Returns the prefetch of these keys for this step, or NULL. */
static dt_ps_pull *dt__ps_prefetched(dt_ps *ps, int table, const uint64_t *keys, size_t n) {
    for (int i = ps->desc.credits; i < 2 * ps->desc.credits; i++) {
        dt_ps_pull *p = &ps->pulls[i];
        if (p->busy != DT__PS_PREFETCH || p->table != table || p->clock != ps->stats.clock ||
            p->n != n)
            continue;
        const uint32_t *number = (const uint32_t *)(void *)p->number.p;
        size_t same = keys ? 0 : n;
        while (same < n && (dt__ps_key_list(&p->set)[number[same]] == keys[same])) same++;
        if (same == n) return p;
    }
    return NULL;
}

/* DT_PS_GEO: reads the worker's replica. Completes the pull. */
static dt_ps_pull *dt__ps_read_replica(
    dt_ps *ps, dt_ps_pull *p, int table, const uint64_t *keys, size_t n, void *rows) {
    const dt__ps_table *t = &ps->tables[table];
    const size_t row = t->table->row_bytes, bytes = n * dt_dtype_size(t->table->desc.dtype);
    char *runs = keys || !p ? NULL : dt__ps_room(ps, &p->rows, t->set.n * row, 0);
    if (!p || (!ps->has_replica && dt__ps_exchange_changes(ps) != DT_OK)) return NULL;
    if (keys)
        dt_table_pull(t->table, keys, n, rows);
    else if (runs && dt_table_pull(t->table, dt__ps_key_list(&t->set), t->set.n, runs) == DT_OK)
        memcpy(rows, runs, bytes);
    p->table = table;
    p->n = 0; /* nothing is left for dt_ps_wait */
    p->busy = DT__PS_BUSY;
    ps->stats.pulled += (int64_t)(keys ? n : t->set.n);
    return dt_error(ps->ctx) == DT_OK ? p : NULL;
}

/* Takes a prefetch of these keys, or starts a pull. */
static dt_ps_pull *dt__ps_pull(dt_ps *ps, int table, const uint64_t *keys, size_t n, void *rows) {
    dt_ps_pull *p = dt__ps_prefetched(ps, table, keys, n);
    if (ps->desc.mode == DT_PS_GEO)
        return dt__ps_read_replica(ps, dt__ps_free_pull(ps, DT__PS_BUSY), table, keys, n, rows);
    if (!p)
        return dt__ps_pull_begin(
            ps, dt__ps_free_pull(ps, DT__PS_BUSY), table, keys, n, rows, ps->stats.clock);
    p->busy = DT__PS_BUSY;
    p->out = rows;
    return p;
}

static dt_ps_pull *dt__ps_pull_start(
    dt_ps *ps, int table, const uint64_t *keys, size_t n, void *rows) {
    uint64_t none = 0; /* in place of NULL for 0 keys */
    dt__ps_table *t = dt__ps_use(ps, "dt_ps_pull_start", table, 0);
    if (!t) return NULL;
    if (n == 0 || (keys && rows))
        return dt__ps_pull(ps, table, keys ? keys : &none, n, rows ? rows : &none);
    dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_pull_start(%s): %zu keys at %p, rows at %p",
        dt__printable_name(t->table->desc.name).s, n, (const void *)keys, rows);
    return NULL;
}

static void dt__ps_prefetch_start(
    dt_ps *ps, int table, const uint64_t *keys, size_t n, int64_t clock) {
    dt_ps_pull *p = dt__ps_free_pull(ps, DT__PS_PREFETCH);
    if (p && ps->desc.servers && ps->desc.mode != DT_PS_GEO)
        dt__ps_pull_begin(ps, p, table, keys, n, NULL, clock);
}

static dt_status dt__ps_prefetch(dt_ps *ps, int table, const uint64_t *keys, size_t n) {
    static const uint64_t none = 0;
    const dt__ps_table *t = dt__ps_use(ps, "dt_ps_prefetch", table, keys ? 0 : -1);
    if (!t) return dt__ps_usable(ps);
    if (t->shape.nd >= 0)
        dt__ps_prefetch_start(ps, table, NULL, (size_t)dt_count(t->shape), ps->stats.clock + 1);
    else if (n == 0 || keys)
        dt__ps_prefetch_start(ps, table, keys ? keys : &none, n, ps->stats.clock + 1);
    else
        dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_prefetch(%s): the keys are NULL",
            dt__printable_name(t->table->desc.name).s);
    return dt_error(ps->ctx);
}

/* Counts an answer to a worker at this clock; slowest: the clock in the answer. */
static void dt__ps_note_staleness(dt_ps *ps, int64_t clock, int64_t slowest) {
    int64_t stale = clock > slowest ? clock - slowest : 0;
    ps->stats.staleness[stale < DT_PS_HISTOGRAM ? stale : DT_PS_HISTOGRAM - 1]++;
}

/* Waits for the answers to a pull, and frees the pull. Its rows stay until the next one. */
static dt_status dt__ps_finish_pull(dt_ps *ps, dt_ps_pull *p) {
    for (int o = 0; o < ps->owners; o++) {
        dt__ps_link *l = &p->links[o];
        if (!l->work[0]) continue;
        dt__ps_finish_link(ps, l);
        if (dt_error(ps->ctx) != DT_OK) return dt_error(ps->ctx);
        dt__ps_header answer;
        memcpy(&answer, p->rows.p + l->answer, sizeof answer);
        dt__ps_note_staleness(ps, p->clock, answer.clock);
    }
    p->busy = DT__PS_FREE;
    return dt_error(ps->ctx);
}

static dt_status dt__ps_wait(dt_ps *ps, dt_ps_pull *p) {
    if (dt__ps_usable(ps) != DT_OK || !p) return dt__ps_usable(ps);
    if (!p->busy) return dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_wait: no pull is under way");
    if (dt__ps_finish_pull(ps, p) != DT_OK) return dt_error(ps->ctx);
    const size_t bytes = ps->tables[p->table].table->row_bytes;
    const uint32_t *number = (const uint32_t *)(void *)p->number.p;
    const size_t *where = (const size_t *)(void *)p->where.p;
    for (size_t i = 0; i < p->n; i++)
        memcpy((char *)p->out + i * bytes, p->rows.p + where[number[i]], bytes);
    return DT_OK;
}

/* Brings the values of a dense table for this step. The pulls of the dense tables that the worker
   has read in its last step too run at the same time. */
static dt_status dt__ps_pull_values(dt_ps *ps, int table) {
    const int64_t clock = ps->stats.clock;
    dt__ps_table *t = &ps->tables[table];
    for (int i = 0; i < ps->n_tables; i++) {
        const dt__ps_table *other = &ps->tables[i];
        const size_t n = other->shape.nd < 0 ? 0 : (size_t)dt_count(other->shape);
        if (n > 0 && i != table && other->read_clock >= 0 && other->read_clock == clock - 1 &&
            !dt__ps_prefetched(ps, i, NULL, n))
            dt__ps_prefetch_start(ps, i, NULL, n, clock);
    }
    dt_ps_pull *p = dt__ps_pull(ps, table, NULL, (size_t)dt_count(t->shape), NULL);
    if (!p || dt__ps_finish_pull(ps, p) != DT_OK) return dt_error(ps->ctx);
    dt__ps_buffer values = p->rows, where = p->where;
    p->rows = t->values;
    p->where = t->where;
    t->values = values;
    t->where = where;
    t->read_clock = clock;
    return DT_OK;
}

/* Copies the values of a dense table to `out`. They are those of the first read in this step. */
static dt_status dt__ps_read_values(dt_ps *ps, int table, char *out) {
    const dt__ps_table *t = &ps->tables[table];
    const size_t n = (size_t)dt_count(t->shape), row = t->table->row_bytes,
                 bytes = n * dt_dtype_size(t->table->desc.dtype);
    if (ps->desc.mode == DT_PS_GEO) return dt__ps_wait(ps, dt__ps_pull(ps, table, NULL, n, out));
    if (t->read_clock != ps->stats.clock && dt__ps_pull_values(ps, table) != DT_OK)
        return dt_error(ps->ctx);
    const size_t *where = (const size_t *)(const void *)t->where.p;
    for (size_t k = 0, at = 0; at < bytes; k++, at += row)
        memcpy(out + at, t->values.p + where[k], bytes - at < row ? bytes - at : row);
    return DT_OK;
}

/* ---- embedding ---- */

typedef struct dt__ps_lookup { /* what the op saves for its backward; the keys follow */
    dt_ps *ps;
    int table;
} dt__ps_lookup;

static dt_status dt__ps_embedding_back(dt_node *node) {
    const dt__ps_lookup *s = (const dt__ps_lookup *)node->saved;
    dt__ps_table *t = &s->ps->tables[s->table];
    int is_dense = t->shape.nd >= 0;
    size_t n = (size_t)dt_count(node->out->shape);
    return dt__ps_accumulate(s->ps, t, is_dense ? NULL : (const uint64_t *)(const void *)(s + 1),
        is_dense ? n : n / (size_t)t->table->desc.width, node->out->grad,
        node->out->dtype == DT_BF16);
}

/* Records a tensor whose contents `pull` brings. keys: those of its n rows, NULL for a dense table.
   The tape records an op only if an input needs a gradient: `source` stands for the table. */
static dt_tensor *dt__ps_lookup_op(
    dt_ps *ps, const char *name, int table, const uint64_t *keys, size_t n, dt_shape shape) {
    const dt_dtype dtype = ps->tables[table].table->desc.dtype;
    if (ps->ctx->kernels.alloc)
        return dt_fail(ps->ctx, DT_ERR_UNSUPPORTED, "%s: CPU tensors only", name),
               (dt_tensor *)NULL;
    dt_tensor *source = dt_require_grad(dt_new(ps->ctx, dtype, DT_SHAPE(1)));
    dt_tensor *out = source ? dt_new(ps->ctx, dtype, shape) : NULL;
    if (!out || (keys ? dt__ps_wait(ps, dt__ps_pull(ps, table, keys, n, out->data))
                      : dt__ps_read_values(ps, table, (char *)out->data)) != DT_OK)
        return NULL;
    const size_t bytes = keys ? n * sizeof *keys : 0;
    dt__ps_lookup *saved =
        (dt__ps_lookup *)dt_record_saved(out, (dt_record_desc){ .name = name,
                                                  .in = { source },
                                                  .backward = dt__ps_embedding_back,
                                                  .saved_bytes = sizeof *saved + bytes,
                                                  .unread_inputs = 1 });
    if (!saved) return dt_error(ps->ctx) == DT_OK ? out : NULL;
    saved->ps = ps;
    saved->table = table;
    if (bytes > 0) memcpy(saved + 1, keys, bytes);
    return out;
}

static dt_tensor *dt__ps_embedding(dt_ps *ps, int table, const uint64_t *keys, dt_shape shape) {
    static const uint64_t none = 0;
    dt__ps_table *t = dt__ps_use(ps, "dt_ps_embedding", table, 0);
    if (!t) return NULL;
    size_t n = (size_t)dt_count(shape);
    if (shape.nd >= DT_MAX_DIMS || (n > 0 && !keys))
        return dt_fail(ps->ctx, DT_ERR_ARG,
                   "dt_ps_embedding: keys at %p, %d dimensions; at most %d", (const void *)keys,
                   shape.nd, DT_MAX_DIMS - 1),
               (dt_tensor *)NULL;
    shape.d[shape.nd++] = t->table->desc.width;
    return dt__ps_lookup_op(ps, "dt_ps_embedding", table, keys ? keys : &none, n, shape);
}

static dt_tensor *dt__ps_dense_read(dt_ps *ps, int table) {
    dt__ps_table *t = dt__ps_use(ps, "dt_ps_dense_read", table, 1);
    if (!t) return NULL;
    return dt__ps_lookup_op(ps, "dt_ps_dense_read", table, NULL, 0, t->shape);
}

// ==== 28. Parameter server: steps, servers ======================================================

/* ---- applying steps ---- */

static size_t dt__ps_padded(size_t bytes) { return (bytes + 7) & ~(size_t)7; }

/* Bytes of n keys in a step's payload. Those of a dense table are not sent. */
static size_t dt__ps_key_bytes(const dt__ps_table *t, int64_t n) {
    return t->shape.nd < 0 ? (size_t)n * sizeof(uint64_t) : 0;
}

/* Bytes that a step's payload has for a key: a sum; or for DT_PS_GEO a base row and a target. */
static size_t dt__ps_push_bytes(const dt_ps *ps, int table) {
    return ps->tables[table].table->grad_bytes << (ps->desc.mode == DT_PS_GEO);
}

/* Returns the bytes of the first `table` tables in a step's payload of `counts` keys each. */
static size_t dt__ps_step_bytes(const dt_ps *ps, const int64_t *counts, int table) {
    size_t bytes = (size_t)ps->n_tables * sizeof *counts;
    for (int i = 0; i < table; i++)
        bytes += dt__ps_key_bytes(&ps->tables[i], counts[i]) +
                 dt__ps_padded((size_t)counts[i] * dt__ps_push_bytes(ps, i));
    return bytes;
}

/* Applies the steps ps->payloads of all workers of one clock, or of one worker; NULL: no step. Each
   table gets one push with the keys of all of them, so the sums of a key that several workers send
   are added in worker order. */
static dt_status dt__ps_apply(dt_ps *ps, double lr, int64_t clock) {
    for (int i = 0; i < ps->n_tables && dt_error(ps->ctx) == DT_OK; i++) {
        const dt__ps_table *t = &ps->tables[i];
        dt_table *table = t->table;
        size_t all = 0, at = 0, senders = 0;
        for (int w = 0; w < ps->workers; w++)
            if (ps->payloads[w]) all += (size_t)((const int64_t *)(const void *)ps->payloads[w])[i];
        const char *keys = dt__ps_room(ps, &ps->keys, all * sizeof(uint64_t), 0),
                   *grads = dt__ps_room(ps, &ps->grads, all * table->grad_bytes, 0);
        if (!keys || !grads) break;
        for (int w = 0; w < ps->workers; w++) {
            const int64_t *counts = (const int64_t *)(const void *)ps->payloads[w];
            size_t n = counts ? (size_t)counts[i] : 0;
            if (n == 0) continue;
            const char *from = ps->payloads[w] + dt__ps_step_bytes(ps, counts, i);
            const char *sums = from + dt__ps_key_bytes(t, counts[i]);
            if (sums == from) from = t->owned.p; /* dense */
            senders++;
            if (n == all) { /* the only sender */
                keys = from;
                grads = sums;
                break;
            }
            memcpy(ps->keys.p + at * sizeof(uint64_t), from, n * sizeof(uint64_t));
            memcpy(ps->grads.p + at * table->grad_bytes, sums, n * table->grad_bytes);
            at += n;
        }
        int64_t last = table->stats.clock; /* another worker's step may have come before */
        dt_table_push(table, (const uint64_t *)(const void *)keys, all, grads,
            (dt_table_push_desc){
                .lr = lr, .clock = clock > last ? clock : last, .unique = senders <= 1 });
    }
    return dt_error(ps->ctx);
}

/* ---- a worker's step ---- */

static dt_status dt__ps_check_sums(dt_ps *ps) {
    for (int i = 0; i < ps->n_tables; i++) {
        const dt__ps_table *t = &ps->tables[i];
        for (size_t k = 0; k < t->set.n && t->has_total; k++) {
            int column = dt__table_bad_column(t->table, t->total.p + k * t->table->grad_bytes);
            if (column < 0) continue;
            return dt_fail(ps->ctx, DT_ERR_NUMERIC,
                "dt_ps_step: worker %d: the gradient of key %llu of table '%s', column %d, is not "
                "finite",
                ps->rank, (unsigned long long)dt__ps_key_list(&t->set)[k],
                dt__printable_name(t->table->desc.name).s, column);
        }
    }
    return DT_OK;
}

/* The keys that a step pushes. */
static const dt__ps_keys *dt__ps_pushed(const dt_ps *ps, const dt__ps_table *t) {
    static const dt__ps_keys none = { 0, 0, { NULL, 0 }, { NULL, 0 } };
    return ps->desc.mode == DT_PS_GEO ? &t->changed : t->has_total ? &t->set : &none;
}

/* Writes the payloads of a step to ps->step, and their places to ps->links. */
static dt_status dt__ps_pack(dt_ps *ps) {
    const size_t tables = (size_t)ps->n_tables, head = tables * sizeof(int64_t);
    size_t bytes = 0;
    int64_t *counts = (int64_t *)(void *)dt__ps_room(
        ps, &ps->keys, (size_t)ps->owners * head, 0); /* (owners,tables) */
    if (!counts) return dt_error(ps->ctx);
    memset(counts, 0, (size_t)ps->owners * head);
    for (size_t i = 0; i < tables; i++)
        for (size_t k = 0; k < dt__ps_pushed(ps, &ps->tables[i])->n; k++) {
            int o = dt__ps_owner(ps, dt__ps_key_list(dt__ps_pushed(ps, &ps->tables[i]))[k]);
            counts[(size_t)o * tables + i]++;
        }
    for (int o = 0; o < ps->owners; o++) {
        ps->links[o].offset = bytes;
        ps->links[o].n = dt__ps_step_bytes(ps, counts + (size_t)o * tables, ps->n_tables);
        bytes += ps->links[o].n;
    }
    char *step = dt__ps_room(ps, &ps->step, bytes, 0);
    if (!step) return dt_error(ps->ctx);
    for (int o = 0; o < ps->owners; o++) {
        const int64_t *n = counts + (size_t)o * tables;
        if (head > 0) memcpy(step + ps->links[o].offset, n, head);
        for (int i = 1; i <= ps->n_tables; i++) /* the padding before the next table */
            if (n[i - 1])
                memset(step + ps->links[o].offset + dt__ps_step_bytes(ps, n, i) - 8, 0, 8);
    }
    memset(counts, 0, (size_t)ps->owners * head); /* from here on: keys written */
    for (size_t i = 0; i < tables; i++) {
        const dt__ps_table *t = &ps->tables[i];
        const dt__ps_keys *set = dt__ps_pushed(ps, t);
        const size_t row = dt__ps_push_bytes(ps, (int)i);
        const char *rows = ps->desc.mode == DT_PS_GEO ? t->pairs.p : t->total.p;
        ps->stats.pushed += (int64_t)set->n;
        for (size_t k = 0; k < set->n; k++) {
            uint64_t key = dt__ps_key_list(set)[k];
            int o = dt__ps_owner(ps, key);
            const int64_t *all = (const int64_t *)(void *)(step + ps->links[o].offset);
            char *part = (char *)(uintptr_t)all + dt__ps_step_bytes(ps, all, (int)i);
            size_t j = (size_t)counts[(size_t)o * tables + i]++;
            size_t skip = dt__ps_key_bytes(t, all[i]);
            if (skip) memcpy(part + j * sizeof key, &key, sizeof key);
            memcpy(part + skip + j * row, rows + k * row, row);
        }
    }
    ps->stats.bytes += (int64_t)bytes;
    return DT_OK;
}

static dt_status dt__ps_same_lr(dt_ps *ps, int worker, double lr, double first) {
    if (lr == first) return DT_OK;
    return dt_fail(ps->ctx, DT_ERR_ARG,
        "dt_ps_step: the learning rates of one step differ: %g on worker %d, and %g", lr, worker,
        first);
}

/* Owned mode: exchanges the payloads, then each owner applies those of all ranks. */
static dt_status dt__ps_exchange_steps(dt_ps *ps, double lr) {
    const size_t n = (size_t)ps->ranks;
    size_t *to = ps->counts, *from = to + n, sum = 0;
    int64_t *mine = ps->numbers, *theirs = mine + n;
    for (size_t r = 0; r < n; r++) mine[r] = (int64_t)(to[r] = ps->links[r].n);
    if (dt_all_to_all(ps->comm, mine, theirs, 1, DT_I64) != DT_OK ||
        dt_all_gather(ps->comm, &lr, ps->rates, 1, DT_F64) != DT_OK)
        return dt_error(ps->ctx);
    for (size_t r = 0; r < n; r++) {
        sum += from[r] = (size_t)theirs[r];
        if (dt__ps_same_lr(ps, (int)r, ps->rates[r], ps->rates[0]) != DT_OK)
            return dt_error(ps->ctx);
    }
    char *all = dt__ps_room(ps, &ps->peer, sum, 0);
    if (!all || dt_all_to_all_v(ps->comm, ps->step.p, to, all, from, DT_U8) != DT_OK)
        return dt_error(ps->ctx);
    for (size_t r = 0; r < n; r++) {
        ps->payloads[r] = all;
        all += from[r];
    }
    return dt__ps_apply(ps, lr, ps->stats.clock);
}

/* Served mode: waits until all owners have acknowledged the last step. */
static dt_status dt__ps_await_step(dt_ps *ps) {
    for (int o = 0; o < ps->owners; o++) dt__ps_finish_link(ps, &ps->links[o]);
    return dt_error(ps->ctx);
}

/* Served mode: sends a step, the end or a request to save to each owner. */
static void dt__ps_send_request(dt_ps *ps, int op, double lr) {
    for (int o = 0; o < ps->owners; o++) {
        dt__ps_link *l = &ps->links[o];
        int to = ps->first_owner + o;
        size_t bytes = op == DT__PS_END ? 0 : l->n;
        dt__ps_header h = { op, 0, 0, 0, ps->stats.clock, 0, (int64_t)bytes, lr, { 0, 0 } };
        l->header = h;
        l->work[0] = dt_recv_start(ps->comm, &l->ack, sizeof l->ack, DT_U8, to, DT__PS_TAG_ACK);
        l->work[1] = dt_send_start(ps->comm, &l->header, sizeof h, DT_U8, to, DT__PS_TAG_HEADER);
        if (bytes > 0)
            l->work[2] = dt_send_start(
                ps->comm, ps->step.p + l->offset, bytes, DT_U8, to, DT__PS_TAG_PAYLOAD);
    }
}

/* ---- GEO: a worker's replica ---- */

/* The row of a key in the type of gradients: of a bf16 table the master row. */
static dt_status dt__ps_read_weights(dt_table *t, uint64_t key, char *out) {
    const uint32_t *slot = dt__table_find(t, key, dt__table_hash(key));
    if (!slot)
        dt__table_initial(t, key, t->compute, out);
    else
        memcpy(out, t->master_bytes ? dt__table_state(t, *slot) : dt__table_values(t, *slot),
            t->grad_bytes);
    return dt_error(t->ctx);
}

static dt_status dt__ps_write_weights(dt_table *t, uint64_t key, const char *weights) {
    uint32_t row = dt__table_admit(t, key, dt__table_hash(key), t->stats.clock);
    if (row == DT__TABLE_EMPTY) return dt_error(t->ctx);
    memcpy(t->master_bytes ? dt__table_state(t, row) : dt__table_values(t, row), weights,
        t->grad_bytes);
    if (t->master_bytes) dt__table_round(t, weights, dt__table_values(t, row));
    return DT_OK;
}

/* Applies a step to the replica. Notes the rows that it is the first to change. */
static dt_status dt__ps_step_replica(dt_ps *ps, double lr) {
    if (!ps->has_replica && dt__ps_exchange_changes(ps) != DT_OK) return dt_error(ps->ctx);
    for (int i = 0; i < ps->n_tables && dt_error(ps->ctx) == DT_OK; i++) {
        dt__ps_table *t = &ps->tables[i];
        const size_t pair = dt__ps_push_bytes(ps, i), n = t->has_total ? t->set.n : 0;
        const uint64_t *keys = dt__ps_key_list(&t->set);
        for (size_t k = 0; k < n; k++) {
            size_t had = t->changed.n;
            if (dt__ps_number(ps, &t->changed, keys[k]) < had) continue;
            if (!dt__ps_room(ps, &t->pairs, (had + 1) * pair, had * pair) ||
                dt__ps_read_weights(t->table, keys[k], t->pairs.p + had * pair) != DT_OK)
                return dt_error(ps->ctx);
        }
        if (n > 0)
            dt_table_push(t->table, keys, n, t->total.p,
                (dt_table_push_desc){ .lr = lr, .clock = ps->stats.clock, .unique = 1 });
    }
    return dt_error(ps->ctx);
}

/* Writes the targets of the changed rows beside their bases: base + scale (row - base), which is
   the row itself if the scale is 1. */
static dt_status dt__ps_make_targets(dt_ps *ps) {
    const double scale = ps->desc.geo_scale;
    for (int i = 0; i < ps->n_tables; i++) {
        dt__ps_table *t = &ps->tables[i];
        const size_t pair = dt__ps_push_bytes(ps, i), width = (size_t)t->table->desc.width;
        for (size_t k = 0; k < t->changed.n; k++) {
            char *base = t->pairs.p + k * pair, *target = base + t->table->grad_bytes;
            float *f = (float *)(void *)target, *f0 = (float *)(void *)base;
            double *d = (double *)(void *)target, *d0 = (double *)(void *)base;
            if (dt__ps_read_weights(t->table, dt__ps_key_list(&t->changed)[k], target) != DT_OK)
                return dt_error(ps->ctx);
            for (size_t c = 0; c < width && scale != 1; c++)
                if (t->table->compute == DT_F32)
                    f[c] = (float)(f0[c] + scale * ((double)f[c] - f0[c]));
                else
                    d[c] = d0[c] + scale * (d[c] - d0[c]);
        }
    }
    return DT_OK;
}

/* Takes over an owner's answer to an exchange: for each table a number of other keys; the rows of
   this worker's changed keys; the other keys, and their rows. */
static dt_status dt__ps_take_answer(dt_ps *ps, int owner, const char *answer) {
    for (int i = 0; i < ps->n_tables; i++) {
        dt__ps_table *t = &ps->tables[i];
        const size_t row = t->table->grad_bytes;
        const uint64_t *changed = dt__ps_key_list(&t->changed);
        int64_t others;
        memcpy(&others, answer, sizeof others);
        answer += sizeof others;
        for (size_t k = 0; k < t->changed.n; k++) {
            if (dt__ps_owner(ps, changed[k]) != owner) continue;
            if (dt__ps_write_weights(t->table, changed[k], answer) != DT_OK)
                return dt_error(ps->ctx);
            answer += row;
        }
        const char *keys = answer;
        answer += (size_t)others * sizeof(uint64_t);
        for (int64_t k = 0; k < others; k++, answer += row) {
            uint64_t key;
            memcpy(&key, keys + (size_t)k * sizeof key, sizeof key);
            if (dt__ps_write_weights(t->table, key, answer) != DT_OK) return dt_error(ps->ctx);
        }
    }
    return DT_OK;
}

/* DT_PS_GEO: sends the changed rows to their owners, and receives them and the rows that other
   workers have changed since the last exchange. */
static dt_status dt__ps_exchange_changes(dt_ps *ps) {
    if (dt__ps_make_targets(ps) != DT_OK || dt__ps_pack(ps) != DT_OK) return dt_error(ps->ctx);
    dt__ps_send_request(ps, DT__PS_STEP, 1);
    if (dt__ps_await_step(ps) != DT_OK) return dt_error(ps->ctx);
    for (int o = 0; o < ps->owners; o++) {
        const dt__ps_link *l = &ps->links[o];
        char *answer = dt__ps_room(ps, &ps->peer, (size_t)l->ack.bytes, 0);
        dt__ps_note_staleness(ps, ps->stats.clock, l->ack.clock);
        ps->stats.bytes += l->ack.bytes;
        if (!answer ||
            dt_recv(ps->comm, answer, (size_t)l->ack.bytes, DT_U8, ps->first_owner + o,
                DT__PS_TAG_PAYLOAD) != DT_OK ||
            dt__ps_take_answer(ps, o, answer) != DT_OK)
            return dt_error(ps->ctx);
    }
    for (int i = 0; i < ps->n_tables; i++) dt__ps_clear(&ps->tables[i].changed);
    ps->has_replica = 1;
    return dt_error(ps->ctx);
}

static dt_status dt__ps_step(dt_ps *ps, double lr) {
    if (dt__ps_usable(ps) != DT_OK) return dt__ps_usable(ps);
    if (dt_ps_is_server(ps) || ps->has_ended || !isfinite(lr))
        return dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_step: %s; learning rate %g",
            dt_ps_is_server(ps) ? "this rank is a server"
            : ps->has_ended     ? "dt_ps_end was called"
                                : "a worker",
            lr);
    const int is_geo = ps->desc.mode == DT_PS_GEO;
    dt__ps_close_micro(ps);
    if (dt__ps_await_step(ps) != DT_OK || dt__ps_check_sums(ps) != DT_OK ||
        (is_geo ? dt__ps_step_replica(ps, lr) : dt__ps_pack(ps)) != DT_OK)
        return dt_error(ps->ctx);
    if (ps->desc.servers && !is_geo)
        dt__ps_send_request(ps, DT__PS_STEP, lr);
    else if (!is_geo)
        dt__ps_exchange_steps(ps, lr);
    for (int i = 0; i < ps->n_tables; i++) {
        dt__ps_table *t = &ps->tables[i];
        t->has_total = 0;
        if (t->shape.nd < 0)
            dt__ps_clear(&t->set);
        else
            memset(t->flags.p, 0, t->set.n);
    }
    ps->has_sums = 0;
    ps->stats.clock++;
    if (is_geo && ps->stats.clock % ps->desc.geo_steps == 0) dt__ps_exchange_changes(ps);
    return dt_error(ps->ctx);
}

/* DT_PS_GEO: sends what the worker has changed since the last exchange. */
static dt_status dt__ps_exchange_rest(dt_ps *ps) {
    int is_due = ps->desc.mode == DT_PS_GEO && ps->stats.clock % ps->desc.geo_steps > 0;
    return is_due ? dt__ps_exchange_changes(ps) : dt_error(ps->ctx);
}

static dt_status dt__ps_end(dt_ps *ps) {
    if (dt__ps_usable(ps) != DT_OK) return dt__ps_usable(ps);
    if (dt_ps_is_server(ps) || ps->has_ended)
        return dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_end: %s",
            ps->has_ended ? "called twice" : "this rank is a server");
    ps->has_ended = 1;
    if (!ps->desc.servers || dt__ps_await_step(ps) != DT_OK || dt__ps_exchange_rest(ps) != DT_OK)
        return dt_error(ps->ctx);
    dt__ps_send_request(ps, DT__PS_END, 0);
    for (int i = ps->desc.credits; i < 2 * ps->desc.credits; i++)
        dt__ps_drop_prefetch(ps, &ps->pulls[i]);
    return dt__ps_await_step(ps);
}

/* ---- a server ---- */

/* Keeps a request or an answer for later ones. Memory that is mapped anew for each request would
   cost a page fault for every 4 KiB. */
static void dt__ps_recycle(dt_ps *ps, dt__ps_request *r) {
    if (!r) return;
    r->next = ps->spare;
    ps->spare = r;
}

/* Makes a request of the smallest spare one that is large enough, else of the largest. */
static dt__ps_request *dt__ps_request_make(dt_ps *ps, size_t bytes) {
    dt__ps_request **best = NULL, *r;
    for (dt__ps_request **at = &ps->spare; *at; at = &(*at)->next) {
        size_t n = (*at)->payload.bytes, found = best ? (*best)->payload.bytes : 0;
        if (!best || (n >= bytes ? found < bytes || n < found : n > found)) best = at;
    }
    if (best) {
        r = *best;
        *best = r->next;
        r->next = NULL;
        r->work = NULL;
        memset(&r->header, 0, sizeof r->header);
    } else {
        r = (dt__ps_request *)dt__host_zeroed(ps->ctx, sizeof *r, "dt_ps_serve");
    }
    if (r && dt__ps_room(ps, &r->payload, bytes, 0)) return r;
    dt__ps_recycle(ps, r);
    return NULL;
}

static int64_t dt__ps_slowest(const dt_ps *ps) {
    int64_t slowest = INT64_MAX;
    for (int w = 0; w < ps->workers; w++)
        if (ps->clocks[w] < slowest) slowest = ps->clocks[w];
    return slowest;
}

/* Starts to send an answer, `bytes` long, to a worker. Takes the answer over. */
static void dt__ps_post(dt_ps *ps, dt__ps_request *answer, int to, size_t bytes, int tag) {
    answer->work = dt_send_start(ps->comm, answer->payload.p, bytes, DT_U8, to, tag);
    answer->next = ps->answers;
    ps->answers = answer;
}

/* Sends an answer that begins with a header. */
static void dt__ps_answer(dt_ps *ps, dt__ps_request *answer, int to, size_t bytes, int tag) {
    dt__ps_header h = { 0, 0, 0, 0, dt__ps_slowest(ps), 0, 0, 0, { 0, 0 } };
    h.bytes = answer->header.bytes;
    memcpy(answer->payload.p, &h, sizeof h);
    dt__ps_post(ps, answer, to, bytes, tag);
}

/* Acknowledges a step, after which a message of so many bytes follows (0: none). */
static void dt__ps_acknowledge(dt_ps *ps, int worker, size_t bytes) {
    dt__ps_request *answer = dt__ps_request_make(ps, sizeof(dt__ps_header));
    if (!answer) return;
    answer->header.bytes = (int64_t)bytes;
    dt__ps_answer(ps, answer, worker, sizeof(dt__ps_header), DT__PS_TAG_ACK);
}

/* Returns 1 if a pull may be answered: its own worker's steps before it are applied (a prefetch may
   come before them), and those of the slowest worker up to the bound; or the worker has ended and
   does not read the answer. No other test uses the bound: synchronous training is the bound 0. */
static int dt__ps_may_read(const dt_ps *ps, const dt__ps_request *r) {
    const int64_t clock = r->header.clock, own = ps->clocks[r->from];
    if (own == INT64_MAX) return 1;
    return own >= clock && (ps->bound == INT64_MAX || dt__ps_slowest(ps) >= clock - ps->bound);
}

/* Answers the held pulls that may be answered. */
static void dt__ps_release(dt_ps *ps) {
    for (dt__ps_request **at = &ps->held; *at && dt_error(ps->ctx) == DT_OK;) {
        dt__ps_request *r = *at;
        if (!dt__ps_may_read(ps, r)) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        r->next = NULL;
        const dt__ps_table *t = &ps->tables[r->header.table];
        dt_table *table = t->table;
        size_t n = (size_t)r->header.n, head = sizeof r->header, bytes = n * table->row_bytes;
        const char *keys = t->shape.nd < 0 ? r->payload.p : t->owned.p;
        dt__ps_request *answer = dt__ps_request_make(ps, head + bytes);
        if (answer && dt_table_pull(table, (const uint64_t *)(const void *)keys, n,
                          answer->payload.p + head) == DT_OK)
            dt__ps_answer(ps, answer, r->from, head + bytes, DT__PS_TAG_ANSWER + r->header.slot);
        else
            dt__ps_recycle(ps, answer);
        ps->stats.pulled += (int64_t)n;
        ps->stats.bytes += r->header.bytes + (int64_t)bytes;
        dt__ps_recycle(ps, r);
    }
}

/* Applies the step of one worker. */
static void dt__ps_apply_one(dt_ps *ps, dt__ps_request *r) {
    memset(ps->payloads, 0, (size_t)ps->workers * sizeof *ps->payloads);
    ps->payloads[r->from] = r->payload.p;
    dt__ps_apply(ps, r->header.lr, r->header.clock);
    dt__ps_acknowledge(ps, r->from, 0);
    dt__ps_recycle(ps, r);
}

/* Applies the steps of one clock together, when no worker's step is missing. */
static void dt__ps_apply_all(dt_ps *ps) {
    double lr = 0;
    int n = 0;
    for (int w = 0; w < ps->workers; w++)
        if (!ps->steps[w] && ps->clocks[w] != INT64_MAX) return;
    for (int w = 0; w < ps->workers; w++) {
        const dt__ps_request *r = ps->steps[w];
        ps->payloads[w] = r ? r->payload.p : NULL;
        if (!r) continue;
        if (n++ == 0) lr = r->header.lr;
        if (dt__ps_same_lr(ps, w, r->header.lr, lr) != DT_OK) return;
    }
    if (n == 0) return;
    dt__ps_apply(ps, lr, ps->applied++);
    for (int w = 0; w < ps->workers && dt_error(ps->ctx) == DT_OK; w++) {
        if (!ps->steps[w]) continue;
        ps->clocks[w]++;
        dt__ps_acknowledge(ps, w, 0);
        dt__ps_recycle(ps, ps->steps[w]);
        ps->steps[w] = NULL;
    }
}

/* ---- GEO: a server's exchanges ---- */

/* Appends n bytes at `from` to a buffer with `used` bytes. */
static void dt__ps_append(dt_ps *ps, dt__ps_buffer *b, size_t *used, const void *from, size_t n) {
    char *p = dt__ps_room(ps, b, *used + n, *used);
    if (p && n > 0) memcpy(p + *used, from, n);
    *used += n;
}

/* The keys of a table whose rows were changed after clock `seen` and before clock `now`. */
typedef struct dt__ps_others {
    dt_ps *ps;
    int64_t seen, now, n;
} dt__ps_others;
static dt_status dt__ps_find_other(dt_table *t, uint64_t key, uint32_t *slot, void *arg) {
    dt__ps_others *o = (dt__ps_others *)arg;
    int64_t clock = *dt__table_clock(t, *slot);
    size_t used = (size_t)o->n * sizeof key;
    if (clock <= o->seen || clock >= o->now) return DT_OK;
    dt__ps_append(o->ps, &o->ps->keys, &used, &key, sizeof key);
    o->n++;
    return dt_error(t->ctx);
}

/* Applies the changes of one table and appends the answer. part: the keys, if they are sent, and
   pairs of base and target. The rule of a row r is r = (r - base) + target: with a scale of 1 a row
   that no other worker has changed becomes exactly the target; else the other workers' changes
   since the base are added to it. Two pushes by SGD with learning rates 1 and -1 do this. */
static dt_status dt__ps_merge_table(dt_ps *ps, const dt__ps_table *t, size_t n, const char *part,
    dt__ps_others *others, dt__ps_buffer *answer, size_t *used) {
    dt_table *table = t->table;
    const size_t row = table->grad_bytes, skip = dt__ps_key_bytes(t, (int64_t)n);
    const uint64_t *keys = (const uint64_t *)(const void *)(skip ? part : t->owned.p);
    char *grads = dt__ps_room(ps, &ps->grads, 2 * n * row, 0);
    if (!grads) return dt_error(ps->ctx);
    for (size_t k = 0; k < n; k++) {
        memcpy(grads + k * row, part + skip + 2 * k * row, row);
        memcpy(grads + (n + k) * row, part + skip + (2 * k + 1) * row, row);
    }
    for (int i = 0; i < 2; i++)
        if (dt_table_push(table, keys, n, grads + (size_t)i * n * row,
                (dt_table_push_desc){ .lr = i ? -1.0 : 1.0, .clock = others->now, .unique = 1 }) !=
            DT_OK)
            return dt_error(ps->ctx);
    others->n = 0;
    if (others->seen < others->now - 1) dt__table_scan(table, dt__ps_find_other, others, 1);
    const uint64_t *other_keys = (const uint64_t *)(void *)ps->keys.p;
    dt__ps_append(ps, answer, used, &others->n, sizeof others->n);
    for (size_t k = 0; k < n && dt_error(ps->ctx) == DT_OK; k++)
        if (dt__ps_read_weights(table, keys[k], grads) == DT_OK)
            dt__ps_append(ps, answer, used, grads, row);
    dt__ps_append(ps, answer, used, other_keys, (size_t)others->n * sizeof *keys);
    for (int64_t k = 0; k < others->n && dt_error(ps->ctx) == DT_OK; k++)
        if (dt__ps_room(ps, &ps->grads, row, 0) &&
            dt__ps_read_weights(table, other_keys[k], ps->grads.p) == DT_OK)
            dt__ps_append(ps, answer, used, ps->grads.p, row);
    return dt_error(ps->ctx);
}

/* Merges a worker's changes into the tables, and sends it its new rows and those that other workers
   have changed since its last exchange. Takes the request over. */
static void dt__ps_merge_changes(dt_ps *ps, dt__ps_request *r) {
    const int64_t *counts = (const int64_t *)(const void *)r->payload.p;
    dt__ps_request *answer = dt__ps_request_make(ps, 0);
    dt__ps_others others = { ps, ps->seen[r->from], ps->applied + 1, 0 };
    size_t used = 0;
    for (int i = 0; i < ps->n_tables; i++) /* after a load the tables' clocks may be ahead */
        if (others.now <= ps->tables[i].table->stats.clock)
            others.now = ps->tables[i].table->stats.clock + 1;
    for (int i = 0; i < ps->n_tables && answer; i++)
        if (dt__ps_merge_table(ps, &ps->tables[i], (size_t)counts[i],
                r->payload.p + dt__ps_step_bytes(ps, counts, i), &others, &answer->payload,
                &used) != DT_OK)
            break;
    ps->seen[r->from] = ps->applied = others.now;
    ps->stats.bytes += r->header.bytes + (int64_t)used;
    if (answer && dt_error(ps->ctx) == DT_OK) {
        dt__ps_acknowledge(ps, r->from, used);
        dt__ps_post(ps, answer, r->from, used, DT__PS_TAG_PAYLOAD);
    } else {
        dt__ps_recycle(ps, answer);
    }
    dt__ps_recycle(ps, r);
}

/* Takes a request over. */
static void dt__ps_handle(dt_ps *ps, dt__ps_request *r) {
    const int worker = r->from;
    if (r->header.op == DT__PS_PULL) {
        dt__ps_request **at = &ps->held;
        while (*at) at = &(*at)->next;
        *at = r;
        ps->stats.held += !dt__ps_may_read(ps, r);
    } else if (r->header.op == DT__PS_STEP && ps->desc.mode == DT_PS_GEO) {
        ps->clocks[worker] = r->header.clock;
        dt__ps_merge_changes(ps, r);
    } else if (r->header.op == DT__PS_STEP && ps->bound == 0) {
        ps->steps[worker] = r;
    } else if (r->header.op == DT__PS_STEP) {
        ps->clocks[worker]++;
        dt__ps_apply_one(ps, r);
    } else if (r->header.op == DT__PS_SAVE) {
        ps->saves[worker] = r;
    } else {
        ps->clocks[worker] = INT64_MAX;
        dt__ps_acknowledge(ps, worker, 0);
        dt__ps_recycle(ps, r);
    }
    if (ps->bound == 0) dt__ps_apply_all(ps);
    dt__ps_release(ps);
    dt__ps_serve_save(ps);
}

/* Frees the answers that have been sent; with `all`, waits for the others. */
static void dt__ps_reap(dt_ps *ps, int all) {
    for (dt__ps_request **at = &ps->answers; *at && dt_error(ps->ctx) == DT_OK;) {
        dt__ps_request *r = *at;
        if (!all && !dt_test(ps->ctx, r->work)) {
            at = &r->next;
            continue;
        }
        dt_wait(ps->ctx, r->work);
        *at = r->next;
        r->next = NULL;
        dt__ps_recycle(ps, r);
    }
}

/* ---- record and replay ---- */

/* Reads or writes the part of the order file that ends before request ps->order_at. */
static dt_status dt__ps_order_transfer(dt_ps *ps, int writing, int64_t from, int64_t n) {
    int end = 0;
    const int64_t size = (int64_t)sizeof *ps->order;
    int64_t done = dt__io_transfer(
        &ps->ctx->io, ps->order_fd, writing, ps->order, n * size, from * size, &end);
    if (done == n * size) return DT_OK;
    if (done >= 0 && !writing)
        return dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_serve: the file %s.%d ends after %lld requests",
            ps->desc.replay, ps->rank - ps->workers, (long long)from + (long long)(done / size));
    if (end) errno = ENOSPC;
    return dt__io_fail(ps->ctx, "dt_ps_serve: %s.%d", writing ? ps->desc.record : ps->desc.replay,
        ps->rank - ps->workers);
}

static dt_status dt__ps_order_open(dt_ps *ps) {
    const char *path = ps->desc.record ? ps->desc.record : ps->desc.replay;
    char text[DT__PATH_BYTES];
    if (!path) return DT_OK;
    int length = snprintf(text, sizeof text, "%s.%d", path, ps->rank - ps->workers);
    if (dt__path_check(ps->ctx, "dt_ps_serve", path, length) != DT_OK) return dt_error(ps->ctx);
    ps->order_fd = dt__open(&ps->ctx->io, text, ps->desc.record ? DT_IO_CREATE : DT_IO_READ);
    return ps->order_fd < 0 ? dt__io_fail(ps->ctx, "dt_ps_serve: %s", text) : DT_OK;
}

/* Notes a request in the order file. */
static dt_status dt__ps_order_note(dt_ps *ps, int32_t entry) {
    ps->order[ps->order_at++ % DT__PS_ORDER] = entry;
    return ps->order_at % DT__PS_ORDER > 0
               ? DT_OK
               : dt__ps_order_transfer(ps, 1, ps->order_at - DT__PS_ORDER, DT__PS_ORDER);
}

/* Returns the next request of the order file, or -1 on failure. */
static int32_t dt__ps_order_next(dt_ps *ps) {
    const int64_t at = ps->order_at++, size = (int64_t)sizeof *ps->order;
    if (at % DT__PS_ORDER == 0) {
        int64_t bytes = ps->ctx->io.size(ps->ctx->io.user, ps->order_fd);
        int64_t n = bytes < 0 ? 1 : bytes / size - at;
        if (n < 1) n = 1; /* this read says what is wrong */
        if (n > DT__PS_ORDER) n = DT__PS_ORDER;
        if (dt__ps_order_transfer(ps, 0, at, n) != DT_OK) return -1;
        if (n < DT__PS_ORDER) ps->order[n] = -1;
    }
    int32_t entry = ps->order[at % DT__PS_ORDER];
    if (entry < 0 || entry / DT__PS_OPS >= ps->workers)
        dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_serve: request %lld is not in the file %s.%d",
            (long long)at, ps->desc.replay, ps->rank - ps->workers);
    return dt_error(ps->ctx) == DT_OK ? entry : -1;
}

/* Receives the next request: its header from any worker, or in a replay from the recorded one, then
   its payload from the same worker. */
static dt__ps_request *dt__ps_receive(dt_ps *ps) {
    dt__ps_header *h = &ps->incoming; /* the communicator keeps it after a failed wait */
    int from;
    int32_t entry = ps->desc.replay ? dt__ps_order_next(ps) : 0;
    if (entry < 0) return NULL;
    dt_work *work = ps->desc.replay ? dt_recv_start(ps->comm, h, sizeof *h, DT_U8,
                                          entry / DT__PS_OPS, DT__PS_TAG_HEADER)
                                    : dt_recv_any_start(ps->comm, h, sizeof *h, DT_U8,
                                          DT__PS_TAG_HEADER, &ps->incoming_from);
    if (dt_wait_idle(ps->ctx, work) != DT_OK) return NULL;
    from = ps->desc.replay ? entry / DT__PS_OPS : ps->incoming_from;
    if (ps->desc.replay && h->op != entry % DT__PS_OPS)
        return dt_fail(ps->ctx, DT_ERR_ARG,
                   "dt_ps_serve: request %lld of worker %d is not the one recorded in %s.%d",
                   (long long)ps->order_at - 1, from, ps->desc.replay, ps->rank - ps->workers),
               (dt__ps_request *)NULL;
    if (ps->desc.record && dt__ps_order_note(ps, from * DT__PS_OPS + h->op) != DT_OK) return NULL;
    dt__ps_request *r = dt__ps_request_make(ps, (size_t)h->bytes);
    if (!r) return NULL;
    r->header = *h;
    r->from = from;
    if (h->bytes > 0)
        dt_recv(ps->comm, r->payload.p, (size_t)h->bytes, DT_U8, from, DT__PS_TAG_PAYLOAD);
    return r;
}

/* After a failure: names the worker for whom the others have waited; their errors cannot. */
static void dt__ps_say_slowest(dt_ps *ps) {
    int waits = ps->held != NULL;
    for (int w = 0; w < ps->workers; w++) waits |= ps->steps[w] != NULL || ps->saves[w] != NULL;
    for (int w = 0; w < ps->workers && waits && dt_error(ps->ctx) != DT_OK; w++)
        if (ps->clocks[w] == dt__ps_slowest(ps) && !ps->steps[w] && !ps->saves[w])
            dt_log(ps->ctx, DT_LOG_NOTICE,
                "dt_ps_serve: other workers waited for worker %d, which has done %lld steps", w,
                (long long)ps->clocks[w]);
}

static dt_status dt__ps_serve(dt_ps *ps) {
    if (dt__ps_usable(ps) != DT_OK) return dt__ps_usable(ps);
    if (!dt_ps_is_server(ps))
        return dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_serve: this rank is a worker");
    if (dt__ps_order_open(ps) != DT_OK) return dt_error(ps->ctx);
    while (dt__ps_slowest(ps) != INT64_MAX && dt_error(ps->ctx) == DT_OK) {
        dt__ps_request *r = dt__ps_receive(ps);
        if (r) dt__ps_handle(ps, r);
        dt__ps_reap(ps, 0);
    }
    dt__ps_reap(ps, 1);
    dt__ps_say_slowest(ps);
    int64_t rest = ps->order_at % DT__PS_ORDER;
    if (ps->desc.record && rest > 0 && dt_error(ps->ctx) == DT_OK)
        dt__ps_order_transfer(ps, 1, ps->order_at - rest, rest);
    return dt_error(ps->ctx);
}

// ==== 29. Parameter server: snapshots ===========================================================

/* The owners save together, and one rename commits the parts of all:

       DIR/step-CLOCK/ps.bin                  dt__ps_snapshot; written last, removed first
                      owner-O-table-T.bin     table T's rows of owner O, a file of section 26

   The first owner locks DIR, makes the folder step-CLOCK.1a2b3c.tmp and sends its name to the other
   owners. Each owner writes and syncs its files. Then the first owner writes ps.bin and renames the
   folder. Servers begin when the requests of all workers have come, and acknowledge them at the
   end.

   A delta lists only changed rows, so it may follow a snapshot of another number of owners: a key
   has one owner in each snapshot, and a load applies the snapshots in order. */

typedef struct dt__ps_snapshot {
    char magic[16];
    int32_t owners, tables;
    int32_t delta, repeat; /* delta 1: step and repeat are those of the snapshot before it */
    int64_t step;
    uint64_t digest; /* of this struct with digest 0 */
} dt__ps_snapshot;
static const char dt__ps_magic[16] = "dt ps 1";

/* ---- saving ---- */

static void dt__ps_unlock(dt_ps *ps) {
    if (!ps->lock) return;
    dt__files_close(ps->ctx, ps->lock, DT__PATHS);
    dt_free(ps->ctx, DT_MEM_HOST, ps->lock, sizeof *ps->lock);
    ps->lock = NULL;
}

/* The first owner: locks the folder, and makes the temporary folder of the next snapshot. Sets
   place to the snapshot's repeat and the temporary folder's number. */
static dt_status dt__ps_begin_save(dt_ps *ps, const char *dir, int64_t clock, int64_t *place) {
    dt_ctx *ctx = ps->ctx;
    char name[64], path[DT__PATH_BYTES + 64], folder[DT__PATH_BYTES + 80], lock_text[DT__LOCK_TEXT];
    dt__ckpt_id id, known = strcmp(dir, ps->dir) == 0 ? ps->newest_known : dt__ckpt_none;
    if (!ctx->io.make_folder || !ctx->io.list_folder || !ctx->io.lock || !ctx->io.remove_folder)
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_ps_save: the io table has no folders: make, list, lock and remove_folder");
    if (!ps->lock || strcmp(ps->lock->path[DT__DIR], dir) != 0) {
        dt__ps_unlock(ps);
        ps->lock = (dt__files *)dt__host_zeroed(ctx, sizeof *ps->lock, "dt_ps_save");
        if (!ps->lock) return dt_error(ctx);
        dt__files_init(ctx, ps->lock);
        snprintf(ps->lock->path[DT__DIR], DT__PATH_BYTES, "%s", dir);
        dt__dir_lock(ctx, ps->lock, lock_text);
    }
    dt__writer *w = &ps->lock->writer;
    if (dt__writer_check(ctx, w, "dt_ps_save") != DT_OK ||
        dt__snapshot_name(ctx, "dt_ps_save", dir, known, clock, &id) != DT_OK)
        return dt_error(ctx);
    place[0] = id.repeat;
    place[1] = dt__snapshot_number(ctx);
    dt__ckpt_name(id, name, sizeof name);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    dt__snapshot_temporary(folder, sizeof folder, path, place[1]);
    dt__writer_make_folder(w, folder);
    return dt__writer_check(ctx, w, "dt_ps_save");
}

/* Notes that a table is as in the snapshot `id`: a delta lists what changes from here on. */
static void dt__ps_saved(dt_table *t, dt__ckpt_id id) {
    t->saved = id;
    t->saved_clock = t->stats.clock;
    t->n_removed = 0;
    t->dir[0] = 0; /* dt_table_save and dt_table_load set it */
}

static void dt__ps_part_path(dt__snapshot_file *s, const char *folder, int owner, int table) {
    snprintf(s->path, sizeof s->path, "%s/owner-%d-table-%d.bin", folder, owner, table);
}

/* Writes this owner's part of a table. */
static dt_status dt__ps_write_part(
    dt_ps *ps, int table, const char *dir, const char *folder, int delta) {
    dt__snapshot_file s;
    char copy[DT__PATH_BYTES];
    dt_table *t = ps->tables[table].table;
    if (dt__snapshot_begin(&s, t, "dt_ps_save", dir, copy) == DT_OK) {
        s.h.delta = delta;
        s.h.clock = t->stats.clock;
        s.h.shrinks = t->shrinks;
        s.since = delta ? t->saved_clock : INT64_MIN;
        dt__ps_part_path(&s, folder, ps->rank - ps->first_owner, table);
        dt__snapshot_write(&s);
        dt__writer_check(ps->ctx, &s.writer, "dt_ps_save");
    }
    dt__snapshot_end(&s);
    return dt_error(ps->ctx);
}

/* The first owner, when all parts are on the disk: writes ps.bin and renames the folder. */
static dt_status dt__ps_commit(dt_ps *ps, const char *folder, const char *final, int delta) {
    dt__ps_snapshot h;
    char path[DT__PATH_BYTES + 96];
    dt__writer *w = &ps->lock->writer;
    memset(&h, 0, sizeof h);
    memcpy(h.magic, dt__ps_magic, sizeof h.magic);
    h.owners = ps->owners;
    h.tables = ps->n_tables;
    h.delta = delta;
    h.step = delta ? ps->saved.step : -1;
    h.repeat = delta ? ps->saved.repeat : 0;
    h.digest = dt__digest(1, &h, sizeof h);
    snprintf(path, sizeof path, "%s/%s", folder, dt__ps_file);
    int fd = dt__writer_create(w, path, 0);
    if (fd >= 0) {
        dt__writer_write(w, path, fd, &h, sizeof h, 0);
        dt__writer_sync_close(w, path, fd);
    }
    dt__writer_sync_folder(w, folder, 0);
    dt__writer_rename(w, folder, final, 0);
    return dt__writer_check(ps->ctx, w, "dt_ps_save");
}

/* Reads ps.bin of the snapshot `id`. Returns 1 if it is intact. */
static int dt__ps_read_header(dt_ps *ps, const char *dir, dt__ckpt_id id, dt__ps_snapshot *h) {
    const dt_io *io = &ps->ctx->io;
    char name[64], path[DT__PATH_BYTES + 96];
    int end = 0, good = 0;
    dt__ckpt_name(id, name, sizeof name);
    snprintf(path, sizeof path, "%s/%s/%s", dir, name, dt__ps_file);
    int fd = dt__open(io, path, DT_IO_READ);
    if (fd >= 0) {
        good = dt__io_transfer(io, fd, 0, h, sizeof *h, 0, &end) == (int64_t)sizeof *h;
        if (!good && !end) dt__io_fail(ps->ctx, "dt_ps_load: %s", path);
        io->close(io->user, fd);
    } else if (!dt__io_absent()) {
        dt__io_fail(ps->ctx, "dt_ps_load: %s", path);
    }
    if (!good) return 0;
    uint64_t digest = h->digest;
    h->digest = 0;
    return digest == dt__digest(1, h, sizeof *h) && memcmp(h->magic, dt__ps_magic, 16) == 0;
}

/* The first owner: keeps the newest `keep` bases with their deltas, and removes older snapshots. */
static void dt__ps_keep(dt_ps *ps, const char *dir, int keep) {
    dt__ckpt_id at = dt__ckpt_last;
    dt__ps_snapshot h;
    char name[64], base[DT__PATH_BYTES + 64];
    for (int bases = 0; bases < keep;) {
        if (dt__newest_below(&ps->ctx->io, dir, at, &at) != 0 || at.step < 0) return;
        bases += dt__ps_read_header(ps, dir, at, &h) && !h.delta;
    }
    dt__ckpt_name(at, name, sizeof name);
    snprintf(base, sizeof base, "%s/%s", dir, name);
    dt__ckpt_remove_old(&ps->ctx->io, base, 1);
}

/* [collective: owners] Saves a snapshot. */
static dt_status dt__ps_write(dt_ps *ps, const char *dir, dt_ps_save_desc d, int64_t clock) {
    const int is_first = ps->rank == ps->first_owner;
    int delta = d.delta != 0;
    int64_t place[2] = { 0, 0 };
    char name[64], final[DT__PATH_BYTES + 64], folder[DT__PATH_BYTES + 80];
    for (int i = 0; i < ps->n_tables && delta; i++)
        if (ps->saved.step < 0 || strcmp(dir, ps->dir) != 0 || ps->tables[i].table->dir[0])
            return dt_fail(ps->ctx, DT_ERR_ARG,
                "dt_ps_save: a delta needs a snapshot, saved to or loaded from %s before", dir);
    if (is_first) dt__ps_begin_save(ps, dir, clock, place);
    if (dt_broadcast(ps->owner_comm, place, 2, DT_I64, 0) != DT_OK) return dt_error(ps->ctx);
    dt__ckpt_id id = { clock, (int)place[0] };
    dt__ckpt_name(id, name, sizeof name);
    snprintf(final, sizeof final, "%s/%s", dir, name);
    dt__snapshot_temporary(folder, sizeof folder, final, place[1]);
    for (int i = 0; i < ps->n_tables && dt_error(ps->ctx) == DT_OK; i++)
        dt__ps_write_part(ps, i, dir, folder, delta);
    int written = dt_barrier(ps->owner_comm) == DT_OK;
    if (written && is_first) dt__ps_commit(ps, folder, final, delta);
    if (!written || dt_barrier(ps->owner_comm) != DT_OK) {
        if (is_first) dt__ckpt_remove(&ps->ctx->io, folder);
        return dt_error(ps->ctx);
    }
    ps->saved = id;
    if (dt__ckpt_before(ps->newest_known, id) || strcmp(dir, ps->dir) != 0) ps->newest_known = id;
    memcpy(ps->dir, dir, strlen(dir) + 1);
    for (int i = 0; i < ps->n_tables; i++) dt__ps_saved(ps->tables[i].table, id);
    if (is_first && !delta && d.keep > 0) dt__ps_keep(ps, dir, d.keep);
    return dt_error(ps->ctx);
}

/* A server: saves when the requests of all workers have come that have not ended. */
static void dt__ps_serve_save(dt_ps *ps) {
    const dt__ps_request *first = NULL;
    dt_ps_save_desc d;
    int missing = 0;
    for (int w = 0; w < ps->workers && !first; w++) first = ps->saves[w];
    if (!first || dt_error(ps->ctx) != DT_OK) return;
    for (int w = 0; w < ps->workers; w++) {
        const dt__ps_request *r = ps->saves[w];
        if (ps->clocks[w] == INT64_MAX) continue;
        missing += !r;
        if (r ? r->header.clock != first->header.clock || r->header.bytes != first->header.bytes ||
                    memcmp(r->payload.p, first->payload.p, (size_t)r->header.bytes) != 0
              : ps->clocks[w] > first->header.clock || ps->steps[w] != NULL) {
            dt_fail(ps->ctx, DT_ERR_ARG,
                "dt_ps_save: worker %d saves after %lld steps, but worker %d %s: all workers must "
                "call it after the same step with equal arguments",
                first->from, (long long)first->header.clock, w,
                r ? "saves after another step or with other arguments" : "steps on");
            return;
        }
    }
    if (missing) return;
    memcpy(&d, first->payload.p, sizeof d);
    if (dt__ps_write(ps, first->payload.p + sizeof d, d, first->header.clock) != DT_OK) return;
    for (int w = 0; w < ps->workers; w++) {
        if (!ps->saves[w]) continue;
        dt__ps_acknowledge(ps, w, 0);
        dt__ps_recycle(ps, ps->saves[w]);
        ps->saves[w] = NULL;
    }
}

static dt_status dt__ps_save(dt_ps *ps, const char *dir, dt_ps_save_desc d) {
    char copy[DT__PATH_BYTES];
    if (dt__ps_usable(ps) != DT_OK) return dt__ps_usable(ps);
    const char *why = dt_ps_is_server(ps) ? "this rank is a server"
                      : ps->has_ended     ? "dt_ps_end was called"
                      : ps->has_sums      ? "gradients are not pushed: call dt_ps_step before"
                      : !dir              ? "dir is NULL"
                                          : NULL;
    if (why) return dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_save: %s", why);
    if (dt__copy_dir(ps->ctx, "dt_ps_save", copy, dir) != DT_OK || dt__ps_await_step(ps) != DT_OK)
        return dt_error(ps->ctx);
    const size_t length = strlen(copy) + 1;
    if (!ps->desc.servers) {
        const int settings[] = { d.delta != 0, d.keep };
        uint64_t digest = dt__digest(dt__digest(1, settings, sizeof settings), copy, length);
        return dt__ps_compare(ps, "dt_ps_save: an argument", digest) == DT_OK
                   ? dt__ps_write(ps, copy, d, ps->stats.clock)
                   : dt_error(ps->ctx);
    }
    if (dt__ps_exchange_rest(ps) != DT_OK) return dt_error(ps->ctx);
    char *request = dt__ps_room(ps, &ps->step, sizeof d + length, 0);
    if (!request) return dt_error(ps->ctx);
    memcpy(request, &d, sizeof d);
    memcpy(request + sizeof d, copy, length);
    for (int o = 0; o < ps->owners; o++) {
        ps->links[o].offset = 0;
        ps->links[o].n = sizeof d + length;
    }
    dt__ps_send_request(ps, DT__PS_SAVE, 0);
    return dt__ps_await_step(ps);
}

/* ---- loading ---- */

static int dt__ps_owns(uint64_t key, void *user) {
    const dt_ps *ps = (const dt_ps *)user;
    return ps->first_owner + dt__ps_owner(ps, key) == ps->rank;
}

/* Verifies one part of a snapshot, or applies it to the table. `newest`: it is of the snapshot at
   the end of the chain, which has the clock and number of shrinks of the table. Returns 1 if the
   part is intact. */
static int dt__ps_read_part(
    dt_ps *ps, const char *dir, const char *folder, int owner, int table, int apply, int newest) {
    dt__snapshot_file s;
    char copy[DT__PATH_BYTES];
    dt_table *t = ps->tables[table].table;
    dt_table_load_desc d;
    int good = 0;
    memset(&d, 0, sizeof d);
    d.owns = dt__ps_owns;
    d.user = ps;
    if (dt__snapshot_begin(&s, t, "dt_ps_load", dir, copy) == DT_OK) {
        dt__ps_part_path(&s, folder, owner, table);
        good = dt__snapshot_open_file(&s);
        if (good && !apply) good = dt__snapshot_verify(&s);
        if (good && apply) good = dt__snapshot_apply(&s, &d, t->shrinks) == DT_OK;
        if (good && newest && s.h.shrinks > t->shrinks) t->shrinks = s.h.shrinks;
        if (good && newest && s.h.clock > t->stats.clock) t->stats.clock = s.h.clock;
        dt__snapshot_close(&s);
    }
    dt__snapshot_end(&s);
    return good;
}

/* Verifies or applies the parts of the snapshot `id` that may have keys of this owner. Returns 1 if
   they are intact; sets *h to the snapshot's header. */
static int dt__ps_read_parts(
    dt_ps *ps, const char *dir, dt__ckpt_id id, dt__ps_snapshot *h, int apply, int newest) {
    char name[64], folder[DT__PATH_BYTES + 64];
    int good = dt__ps_read_header(ps, dir, id, h), mine = ps->rank - ps->first_owner;
    dt__ckpt_name(id, name, sizeof name);
    snprintf(folder, sizeof folder, "%s/%s", dir, name);
    if (good && h->tables != ps->n_tables)
        dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_load: %s has %d tables, this parameter server has %d",
            folder, h->tables, ps->n_tables);
    for (int o = 0; good && o < h->owners; o++)
        for (int i = 0; i < ps->n_tables && good && (h->owners != ps->owners || o == mine); i++)
            good = dt__ps_read_part(ps, dir, folder, o, i, apply, newest);
    return good && dt_error(ps->ctx) == DT_OK;
}

/* Verifies the chain that ends in the snapshot `id`, and writes its names to `ids`, the newest one
   first. Returns its length; 0 if a part of it is damaged. */
static int dt__ps_chain(dt_ps *ps, const char *dir, dt__ckpt_id id, dt__ckpt_id *ids) {
    dt__ps_snapshot h;
    for (int i = 0; i < ps->n_tables; i++) {
        dt_table *t = ps->tables[i].table;
        t->shrinks = t->stats.clock = 0;
        t->saved = dt__ckpt_none; /* a load notes no removed keys */
    }
    for (int n = 0; n < DT__SNAPSHOT_CHAIN;) {
        if (!dt__ps_read_parts(ps, dir, id, &h, 0, n == 0)) return 0;
        ids[n++] = id;
        if (!h.delta) return n;
        dt__ckpt_id before = { h.step, h.repeat };
        if (!dt__ckpt_before(before, id)) return 0;
        id = before;
    }
    return 0;
}

/* [collective: comm] Loads the chain that ends in `id`. Returns 1 if it is intact on all owners. */
static int dt__ps_load_chain(dt_ps *ps, const char *dir, dt__ckpt_id id) {
    dt__ps_snapshot h;
    const size_t bytes = DT__SNAPSHOT_CHAIN * sizeof id;
    dt__ckpt_id *ids = (dt__ckpt_id *)dt_alloc(ps->ctx, DT_MEM_HOST, bytes, "a chain of snapshots");
    const int is_owner = dt__ps_is_owner(ps);
    int n = is_owner && ids ? dt__ps_chain(ps, dir, id, ids) : 0;
    double damaged = is_owner && n == 0;
    dt_sum_doubles(ps->comm, &damaged, 1);
    for (int i = 0; i < ps->n_tables && n > 0 && damaged == 0; i++)
        dt__table_clear(ps->tables[i].table);
    while (n-- > 0 && damaged == 0 && dt_error(ps->ctx) == DT_OK)
        dt__ps_read_parts(ps, dir, ids[n], &h, 1, 0);
    dt_free(ps->ctx, DT_MEM_HOST, ids, bytes);
    return damaged == 0 && dt_barrier(ps->comm) == DT_OK;
}

static int64_t dt__ps_load(dt_ps *ps, const char *dir) {
    char copy[DT__PATH_BYTES], name[64];
    if (dt__ps_usable(ps) != DT_OK) return -1;
    if (!dir || ps->stats.clock > 0 || ps->has_sums || ps->has_ended || !ps->ctx->io.list_folder)
        return dt_fail(ps->ctx, DT_ERR_ARG, "dt_ps_load: %s",
                   !dir                       ? "dir is NULL"
                   : !ps->ctx->io.list_folder ? "the io table has no list_folder"
                                              : "it must come before the first step"),
               -1;
    if (dt__copy_dir(ps->ctx, "dt_ps_load", copy, dir) != DT_OK) return -1;
    dt__ckpt_id at = dt__ckpt_last, newest = dt__ckpt_none;
    for (int found = 0; !found;) {
        if (ps->rank == ps->first_owner && dt__newest_below(&ps->ctx->io, copy, at, &at) != 0 &&
            !dt__io_absent())
            dt__io_fail(ps->ctx, "dt_ps_load: %s", copy);
        int64_t id[2] = { at.step, at.repeat };
        if (dt_broadcast(ps->comm, id, 2, DT_I64, ps->first_owner) != DT_OK) return -1;
        at.step = id[0];
        at.repeat = (int)id[1];
        dt__ckpt_name(at, name, sizeof name);
        if (at.step < 0 && newest.step < 0) return 0;
        if (at.step < 0)
            return dt_fail(ps->ctx, DT_ERR_IO, "dt_ps_load: no snapshot in %s is intact", copy), -1;
        if (newest.step < 0) newest = at;
        found = dt__ps_load_chain(ps, copy, at);
        if (dt_error(ps->ctx) != DT_OK) return -1;
        if (!found && ps->rank == ps->first_owner)
            dt_log(ps->ctx, DT_LOG_NOTICE,
                "dt_ps_load: %s/%s or a snapshot that it needs is damaged", copy, name);
    }
    ps->saved = at;
    ps->newest_known = newest;
    memcpy(ps->dir, copy, strlen(copy) + 1);
    for (int i = 0; i < ps->n_tables; i++) {
        dt__ps_saved(ps->tables[i].table, at);
        ps->tables[i].read_clock = -1;
    }
    for (int w = 0; w < ps->workers; w++) ps->clocks[w] = at.step;
    ps->applied = at.step;
    if (!dt_ps_is_server(ps)) ps->stats.clock = at.step;
    return at.step;
}

/* ---- call sites ---- */

dt_ps *dt_ps_here(dt_ps *ps, const char *file, int line) {
    if (ps) dt_ctx_here(ps->ctx, file, line);
    return ps;
}

DT__DEFINE_AT_SITE(dt_ps *, ps_make, ctx, (dt_ctx * ctx, dt_ps_desc desc), ctx, desc)
int(dt_ps_table)(dt_ps *ps, dt_table_desc desc) { /* dt__ps_table is a type */
    dt_site outer = dt__site_open(ps ? ps->ctx : NULL);
    int number = dt__ps_table_add(ps, desc);
    dt__site_close(ps ? ps->ctx : NULL, outer);
    return number;
}
DT__DEFINE_AT_SITE(dt_status, ps_serve, ps ? ps->ctx : NULL, (dt_ps * ps), ps)
DT__DEFINE_AT_SITE(dt_ps_pull *, ps_pull_start, ps ? ps->ctx : NULL,
    (dt_ps * ps, int table, const uint64_t *keys, size_t n, void *rows), ps, table, keys, n, rows)
DT__DEFINE_AT_SITE(
    dt_status, ps_wait, ps ? ps->ctx : NULL, (dt_ps * ps, dt_ps_pull *pull), ps, pull)
DT__DEFINE_AT_SITE(dt_tensor *, ps_embedding, ps ? ps->ctx : NULL,
    (dt_ps * ps, int table, const uint64_t *keys, dt_shape shape), ps, table, keys, shape)
DT__DEFINE_AT_SITE(int, ps_dense, ps ? ps->ctx : NULL,
    (dt_ps * ps, dt_table_desc desc, dt_shape shape), ps, desc, shape)
DT__DEFINE_AT_SITE(
    dt_tensor *, ps_dense_read, ps ? ps->ctx : NULL, (dt_ps * ps, int table), ps, table)
DT__DEFINE_AT_SITE(dt_status, ps_prefetch, ps ? ps->ctx : NULL,
    (dt_ps * ps, int table, const uint64_t *keys, size_t n), ps, table, keys, n)
DT__DEFINE_AT_SITE(dt_status, ps_add, ps ? ps->ctx : NULL,
    (dt_ps * ps, int table, const uint64_t *keys, size_t n, const void *grads), ps, table, keys, n,
    grads)
DT__DEFINE_AT_SITE(dt_status, ps_step, ps ? ps->ctx : NULL, (dt_ps * ps, double lr), ps, lr)
DT__DEFINE_AT_SITE(dt_status, ps_end, ps ? ps->ctx : NULL, (dt_ps * ps), ps)
DT__DEFINE_AT_SITE(dt_status, ps_save, ps ? ps->ctx : NULL,
    (dt_ps * ps, const char *dir, dt_ps_save_desc desc), ps, dir, desc)
DT__DEFINE_AT_SITE(int64_t, ps_load, ps ? ps->ctx : NULL, (dt_ps * ps, const char *dir), ps, dir)

#ifdef __cplusplus
}
#endif

DT__COLD_END
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
             dt_zero_desc.compare_every: replicas that differ are an error. dt_zero_make refuses
             parameters that two pipeline stages register. A training state that dt_zero_free has
             freed is refused. dt_zero_here, dt_checkpoint_here: functions that wait for other
             ranks are also macros, which record the call site for errors. New: parameter groups
             (dt_zero_desc.groups, dt_zero_step_groups), dt_zero_freeze, Muon, EMA of the weights
             (dt_zero_swap_ema), outlier steps (dt_outlier_z, dt_zero_loss), dt_zero_grad_full,
             sparse tables (dt_table_make), the parameter server (dt_ps_make, dt_ps_formula),
             dt_weight_map.groups, dt_checkpoint_desc.convert_dtype and grows
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
