/* dt_parallel.h - v0.2.0 - parallel layouts: process mesh, placements, layers, pipeline
   schedules, data order, planner - public domain or MIT, see the end of the file

   The third of four single-header libraries; dt_tensor.h lists them all. It arranges ranks along
   the axes of a layout (data, tensor, context, pipeline, expert), converts a tensor from one
   placement over a group to another with the matching backward, provides the layers of tensor,
   sequence, context and expert parallelism, generates, checks, simulates, draws and runs pipeline
   schedules, and decides which rank reads which sequence. A dry run counts what a program would
   need on any number of ranks, and the planner ranks the layouts of a model on a cluster.

   DOES NOT: reduce gradients of parameters (dt_zero.h does, for all axes at once, and has the
   parameter server), or know any model.

   QUICK EXAMPLE (a tensor-parallel MLP over 2 of 4 ranks)

       #define DT_IMPLEMENTATION
       #include "dt_parallel.h"
       #include <stdio.h>

       static dt_status train(dt_ctx *ctx, void *user) {
           // 4 ranks = dp 2 x tp 2
           dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2 });
           // this rank holds 4 of the 8 rows of w1 and 4 of the 8 columns of w2
           dt_tensor *w1 = dt_param_at(ctx, "w1", DT_SHAPE(8, 4), DT_NORMAL(0.1),
               (dt_param_desc){ .shards = { { mesh.tp, 0 } } });
           dt_tensor *w2 = dt_param_at(ctx, "w2", DT_SHAPE(1, 8), DT_NORMAL(0.1),
               (dt_param_desc){ .shards = { { mesh.tp, 1 } } });
           float one[4] = { 1, 2, 3, 4 };
           dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(1, 4), one);
           dt_linear_desc gelu = { .activation = DT_ACT_GELU };
           // (1,4): this rank's 4 of the 8 columns
           dt_tensor *h = dt_column_linear(x, w1, NULL, gelu, mesh.tp, DT_REPLICATE);
           // (1,1): the sum over tp, on every rank
           dt_tensor *y = dt_row_linear(h, w2, NULL, NULL, mesh.tp, DT_REPLICATE);
           double value = dt_item(y);
           if (dt_ctx_rank(ctx) == 0) printf("%g\n", value);
           (void)user;
           return dt_error(ctx);
       }

       int main(void) { return dt_run((dt_run_desc){ .ranks = 4 }, train, NULL); }

   BUILD
       cc -O2 train.c -lm -lpthread                 C11 or C++17; gcc, clang
       echo '#include "dt_parallel.h"' | cc -O2 -DDT_IMPLEMENTATION -x c -c -o dt.o -
       cc -O2 train.c dt.o -lm -lpthread            the same in two commands, with a train.c that
                                                    does not define DT_IMPLEMENTATION; after an edit
                                                    of train.c only the second one is needed
       nvcc -O3 train.c dt_kernels.cu -lcublasLt -lnccl     CUDA

   OPTIONS (define before including)
       DT_IMPLEMENTATION   in exactly one file: the code, not only the declarations
       DT_STATIC           everything static (in all headers)

   CONTENTS
     1. Process mesh (device mesh, process groups of every axis)
     2. Placements (redistribute; f and g operators; replicate, copy, shard, partial; all-to-all of
        rows)
     3. Tensor and sequence parallelism (column-parallel linear, row-parallel linear,
        vocabulary-parallel embedding, vocabulary-parallel cross-entropy, grouped-query attention)
     4. Context parallelism (ring attention, zig-zag, Ulysses, all-gather context parallelism)
     5. Expert parallelism (mixture of experts (MoE), router, expert capacity, token dispatch,
        token combine, load-balancing loss, sigmoid routing, group-limited routing, expert
        folding)
     6. Pipeline schedules (GPipe (AFAB), 1F1B, interleaved 1F1B, zero bubble (ZB-H1), ZB-V,
        DualPipe-V, bubble fraction, schedules from a file)
     7. Pipeline parallelism (stages, micro-batches, tied embeddings)
     8. Data order (distributed sampler, batch size ramp-up)
     9. Text datasets (byte files, llm.c token shards)
    10. Dry runs (dry run: memory, traffic and FLOPs without computing; virtual clock)
    11. Planner (predicted step time and memory of a layout, profiles of GPUs and systems, search
        for the fastest layout)
    12. Implementation: process mesh
    13. Placements: code
    14. Tensor and sequence parallelism: code
    15. Context parallelism: code (online softmax, log-sum-exp merge)
    16. Expert parallelism: the router
    17. Expert parallelism: dispatch, experts, combine
    18. Pipeline schedules: generators, lowering, checker
    19. Pipeline schedules: making, simulation, partition, drawings, reading and writing files
    20. Pipeline parallelism: code
    21. Data order and text datasets: code
    22. Dry runs: code
    23. Planner: code

   CONTRACT
     Memory     A dt_mesh is a plain struct that needs no freeing. Tensors live until dt_reset, like
                the results of ops. Free a dt_text with dt_text_close, a dt_sampler with
                dt_sampler_free and a dt_schedule with dt_schedule_free. Objects that the program
                has not freed are freed when the context ends.
     Errors     As in dt_tensor.h: errors are sticky, and an op on a NULL tensor returns NULL.
     Threads    As in dt_comm.h.
     Order      Sums over a group run in rank order.
     Groups     A group of one rank is NULL; a collective over it is the identity and costs nothing.
     Tags       [local], [pairwise], [collective: group]. */

#ifndef DT_PARALLEL_H
#define DT_PARALLEL_H

#include "dt_comm.h"

#if DT_VERSION != 200
#error \
    "dt_parallel.h 0.2.0 needs dt_tensor.h and dt_comm.h 0.2.0: copy all headers from one release"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ==== 1. Process mesh ===========================================================================

/* Number of ranks along each axis. The product of all axes except expert_tp is the total number of
   ranks; with expert folding, ep is no factor of it either. */
typedef struct dt_mesh_desc {
    int dp; /* data; 0 means the total number of ranks divided by the product of the other axes */
    int tp; /* tensor; here and in the fields below 0 means 1 */
    int cp; /* context */
    int pp; /* pipeline */
    int ep; /* expert */
    /* Expert folding: 0: none, ep is an axis beside the others, and tp shards each expert; N >= 1:
       N ranks shard each expert, and ep and expert_tp divide the dp x cp x tp ranks of a pipeline
       stage anew */
    int expert_tp;
    /* Overlap of tensor-parallel traffic: the number of pieces in which the layers of section 3
       send and multiply; 0 or 1: no overlap. Not a number of ranks; all ranks give the same. */
    int tp_overlap;
} dt_mesh_desc;

/* Process mesh (device mesh): this rank's process group along every axis. A group of one rank is
   NULL. For example 8 ranks as pp 2 x dp 2 x tp 2:

                tp 0   tp 1            tp 0   tp 1
        dp 0   rank 0 rank 1   dp 0   rank 4 rank 5     rank 6 has the groups
        dp 1   rank 2 rank 3   dp 1   rank 6 rank 7     tp {6,7}, dp {4,6}, pp {2,6}
                  pp 0                   pp 1

   tp varies fastest, so that the ranks of a tp group are neighbours on the fastest links:

       rank = (((pp*DP + dp)*EP + ep)*CP + cp)*TP + tp

   Expert folding (Megatron-LM's MoE parallel folding: D. Liu et al., arXiv:2504.14960): the dense
   layers arrange the ranks of a pipeline stage as dp x cp x tp, and the experts arrange the same
   ranks as expert_data x ep x expert_tp. For example tp 2 x cp 2 with ep 4 and expert_tp 1:

                dense layers                             experts
                tp 0   tp 1
        cp 0   rank 0 rank 1     ep 0   rank 0    ep 1   rank 1     each rank has a quarter of the
        cp 1   rank 2 rank 3     ep 2   rank 2    ep 3   rank 3     experts, and each expert whole

       rank = (((pp*DP + dp)*CP + cp)*TP + tp
            = ((pp*EXPERT_DATA + expert_data)*EP + ep)*EXPERT_TP + expert_tp */
typedef struct dt_mesh {
    dt_comm *world, *dp, *tp, *cp, *pp, *ep;
    /* group that shards the hidden size of each expert: tp, or a group of its own with expert
       folding */
    dt_comm *expert_tp;
    /* group of dt_dispatch, which together has every expert once: ep, or with expert folding
       ep x expert_tp */
    dt_comm *dispatch;
    /* group along dp, ep and cp: the ranks that hold replicas of the same dense parameter and
       process different parts of the data */
    dt_comm *data;
    /* the ranks that hold replicas of the parameters of the same experts, which are sharded over ep
       and expert_tp: the group along dp and cp, or with expert folding the ranks of the stage that
       have the same coordinates along ep and expert_tp */
    dt_comm *expert_data;
    /* number of ranks along each axis, at least 1, except that sizes.expert_tp is 0 without expert
       folding */
    dt_mesh_desc sizes;
    dt_mesh_desc coord; /* this rank's coordinate along each axis, from 0 */
    /* Each replica reads its own part of the batch. This rank belongs to replica number
       coord.dp * EP + coord.ep; there are DP * EP replicas. With expert folding ep does not count:
       replica number coord.dp of DP. */
    int replica, replicas;
} dt_mesh;

/* [local] Replaces the zeros in *sizes by the values that they mean, checks that the product of the
   axes is `ranks`, and with expert folding that ep x expert_tp divides dp x cp x tp. On failure
   returns DT_ERR_ARG and writes to `text` a message with the sizes and a valid choice. The function
   needs no context, so a program can refuse a layout before any rank starts. */
DT_API dt_status dt_mesh_resolve(dt_mesh_desc *sizes, int ranks, char *text, size_t text_bytes);
/* [collective: world] Creates the process groups of every axis. They are named "dp", "tp" and so
   on, and each group has its own byte counters. After a failure all groups are NULL and `replicas`
   is 1. */
DT_API dt_mesh dt_mesh_make(dt_ctx *ctx, dt_mesh_desc desc);

// ==== 2. Placements =============================================================================

/* Section 5 of dt_tensor.h defines the placements of a tensor over a group: DT_REPLICATE, DT_COPY,
   DT_SHARD(dim) and DT_PARTIAL. Ops compute with them, and dt_redistribute changes them. */

/* [collective: comm] Redistributes x from one placement to another; Megatron-LM's f and g operators
   are rows of the table below. Returns x itself if the group has one rank or if `from` and `to` are
   equal.

       from -> to              forward            backward            known as
       PARTIAL -> REPLICATE    all-reduce         identity            Megatron's g
       REPLICATE -> COPY       identity           all-reduce          Megatron's f
       SHARD -> COPY           all-gather         reduce-scatter      g of sequence parallelism;
                                                                      all-gather of keys and values
       PARTIAL -> SHARD        reduce-scatter     all-gather          g* of sequence parallelism
       SHARD -> REPLICATE      all-gather         slice
       REPLICATE -> SHARD      slice              all-gather
       SHARD a -> SHARD b      all-to-all         all-to-all          Ulysses
       REPLICATE -> PARTIAL    rank 0 only        identity
       COPY -> REPLICATE       identity           rank 0 only

   "rank 0 only": rank 0 keeps the tensor and all other ranks get zeros.

   Let dual(p) be the placement of the gradient of a tensor with placement p. The backward of the
   row p -> q is then the row dual(q) -> dual(p) of the same table. The function fails with
   DT_ERR_SHAPE if the number of ranks does not divide a sharded dimension, and with
   DT_ERR_UNSUPPORTED if the table has no row for `from` and `to`, and with DT_ERR_ARG if x is known
   to have another placement than `from`. Megatron: arXiv:1909.08053 and arXiv:2205.05198. Ulysses:
   arXiv:2309.14509. */
DT_API dt_tensor *dt_redistribute(dt_tensor *x, dt_comm *comm, dt_placement from, dt_placement to);
/* [collective: comm] All-to-all of rows, with unequal counts. x (S,..) holds the rows for rank 0 of
   the group, then those for rank 1, and so on: send_counts[r] rows for rank r, with the sum S.
   Returns (R,..), the rows from rank 0, then those from rank 1, and so on: recv_counts[r] rows from
   rank r, with the sum R. S, R and single counts may be 0. If recv_counts is NULL, the ranks first
   exchange the counts, in host memory; so it is NULL on all ranks or on none. The backward sends
   each row's gradient back: the same call with the two arrays exchanged. Both arrays are in host
   memory and are copied. Returns x itself if the group has one rank. Fails with DT_ERR_SHAPE if x
   is a scalar, if send_counts is NULL or does not sum to S, or if a count is negative or 2^31 or
   more. A recv_counts that differs from what the other ranks send fails on all ranks with
   DT_ERR_COMM. */
DT_API dt_tensor *dt_all_to_all_rows(
    dt_tensor *x, dt_comm *comm, const int64_t *send_counts, const int64_t *recv_counts);

// ==== 3. Tensor and sequence parallelism ========================================================

/* Tensor parallelism: each of N ranks holds a shard of every weight matrix. M. Shoeybi et al.,
   "Megatron-LM", arXiv:1909.08053. An MLP needs one communication at its entry (f) and one at its
   exit (g), because the second matrix is sharded along the dimension along which the first matrix's
   output is sharded:

               f        column-parallel        row-parallel         g
            +------> x w1_0^T -> gelu -> h_0 -> h_0 w2_0^T = y_0 ---+
       x ---|                                                      (+)---> y = y_0 + y_1
            +------> x w1_1^T -> gelu -> h_1 -> h_1 w2_1^T = y_1 ---+

   The ops between dt_tp_enter (f) and dt_row_linear (g) form a tensor-parallel region, in which
   activations are sharded as the weights are. `outside` is the placement of activations outside of
   such regions:

       DT_REPLICATE    every rank has all tokens. g is an all-reduce in the forward, f is an
                       all-reduce in the backward
       DT_SHARD(1)     sequence parallelism: (B,T,C) is sharded along the tokens; V. Korthikanti et
                       al., arXiv:2205.05198. A region begins with an all-gather of tokens and ends
                       with a reduce-scatter of partial sums. The traffic equals that of
                       DT_REPLICATE, but norms, dropout and residuals hold only 1/N of the tokens.
                       Inside a dt_block the gathered tensor is not kept; the backward gathers the
                       tensor again, a backward in two halves only in the weight half

   dt_param_desc.shards places the weights. A column-parallel layer shards its weight (O,I) and its
   bias (O) along the outputs, dimension 0. A row-parallel layer shards its weight (O,I) along the
   inputs, dimension 1, and does not shard its bias. If N does not divide a hidden size, the local
   slices of the last ranks are padded with zeros, which stay zero through functions with f(0) = 0.
   Under DT_SHARD(1), a parameter that is used outside of regions and is not sharded (of a norm, a
   row bias, a position embedding) is applied to only a part of the tokens on each rank. Give such a
   parameter the gradient placement { tp, DT_GRAD_PARTIAL }. All functions below are [collective:
   comm]. Over a group of one rank each function does the same as the ordinary layer.

   Overlap of communication and computation (Megatron-LM's tp-comm-overlap; PyTorch's async TP).
   With dt_mesh_desc.tp_overlap = P the layers cut the rows (tokens) into P pieces, and the traffic
   of a piece is under way while other pieces are multiplied:

       column-parallel, forward     all-gather of x in pieces (DT_SHARD); each is multiplied once it
                                    is there
       row-parallel, forward        all-reduce or reduce-scatter of a piece once it is multiplied
       row-parallel, backward       all-gather of dy in pieces (DT_SHARD), as in the first line
       column-parallel, backward    all-reduce or reduce-scatter of each piece of dx, while later
                                    pieces are computed, and dw of this layer and of the layers
                                    after it; x is gathered again (DT_SHARD) while dx is computed

   The bits are those without overlap, because an element of a product depends only on its row,
   column and K, a sum over the group runs in rank order, and dw is one product over all rows. (So
   not with DT_RING, NCCL or another BLAS, where the order depends on the sizes.) The bytes are the
   same too; messages are P times as many. A piece has at least 8 rows of the group, so a single
   token is not cut. What dt_tp_enter and the products that read it return may still be arriving:
   read it through ops, through dt_data, or after dt_new. */

/* [collective: comm] Megatron's f; the paper on sequence parallelism calls its counterpart g. Takes
   x with the placement `outside` and returns the whole x on every rank, as the input of one or more
   products with sharded weights. */
DT_API dt_tensor *dt_tp_enter(dt_tensor *x, dt_comm *comm, dt_placement outside);
/* [collective: comm] Column-parallel linear. Returns act(x w^T + b), where w (O..,I) and b are
   sharded along O: each rank computes its shard of the outputs. Calls dt_tp_enter, then
   dt_linear_at. desc.residual and the result are also sharded along O. */
DT_API dt_tensor *dt_column_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc,
    dt_comm *comm, dt_placement outside);
/* [collective: comm] Row-parallel linear. Returns x w^T summed over the group (Megatron's g), plus
   b and residual, which are added once. x (..,I) and w (O,I) are sharded along I. Every rank has
   the whole b (may be NULL). residual (may be NULL) and the result have the placement `outside`. */
DT_API dt_tensor *dt_row_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_tensor *residual,
    dt_comm *comm, dt_placement outside);
/* [collective: comm] dt_row_linear with desc.residual and desc.adapters (LoRA), whose output is
   added to x w^T before the sum over the group. Fails with DT_ERR_ARG if desc has an activation. */
DT_API dt_tensor *dt_row_linear_at(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc,
    dt_comm *comm, dt_placement outside);
/* [collective: comm] Vocabulary-parallel embedding. The table (V,C) is sharded along V; every rank
   passes all ids (B,T). A rank looks up the ids that are in its rows and uses zeros for all other
   ids. Returns the sum of these results over the group, (B,T,C) with the placement `outside`. */
DT_API dt_tensor *dt_vocab_embedding(
    dt_tensor *table, dt_tensor *ids, dt_comm *comm, dt_placement outside);
/* [collective: comm] Vocabulary-parallel cross-entropy: dt_cross_entropy_at for logits whose
   columns are sharded over N ranks in rank order; each rank passes V' columns (..,V'). The ranks
   gather only two values per row, never logits, and send 16 (N-1) bytes per row. desc.vocab is the
   number of real columns of all ranks, and the rest is padding; 0 means N V'. Every rank passes all
   labels and gets the same loss. */
DT_API dt_tensor *dt_vocab_cross_entropy(
    dt_tensor *logits, dt_tensor *labels, double denominator, dt_loss_desc desc, dt_comm *comm);
/* [collective: comm] The loss of dt_vocab_cross_entropy for the logits x w^T, which are computed a
   few rows at a time. x has the placement `outside`; w (V,C) is sharded along V. desc.vocab 0 means
   the V of the full parameter. */
DT_API dt_tensor *dt_vocab_linear_cross_entropy(dt_tensor *x, dt_tensor *w, dt_tensor *labels,
    double denominator, dt_loss_desc desc, dt_comm *comm, dt_placement outside);

/* Grouped-query attention over tp: K heads of keys and values over N ranks, where N divides K or K
   divides N. If there are more ranks than heads, each head is replicated on N/K neighbouring ranks,
   which use the head for different query heads. Give a parameter of keys or values the shard
   { shard_group, dim } and the gradient placement { replica_group, DT_GRAD_PARTIAL }, because each
   replica's gradient is a partial sum. */
typedef struct dt_kv_groups {
    dt_comm *shard_group;   /* ranks with different heads; NULL: all ranks have the same heads */
    dt_comm *replica_group; /* ranks with the same heads; NULL: only this rank has them */
    int heads;              /* number of heads of keys and values on this rank */
} dt_kv_groups;
/* [collective: tp] Splits kv_heads over tp. Fails with DT_ERR_ARG if the number of heads neither
   divides the number of ranks nor is a multiple of it. */
DT_API dt_kv_groups dt_kv_split(dt_ctx *ctx, dt_comm *tp, int kv_heads);

/* One axis of a layout: the placement of a tensor over a group. */
typedef struct dt_axis_placement {
    dt_comm *comm;
    dt_placement placement;
} dt_axis_placement;
/* [collective: all ranks of the n groups] Distributes a tensor from the host memory of the rank
   that is rank 0 of every group; host is NULL on all other ranks. Returns this rank's part, which
   lives until dt_reset. The groups are axes of a mesh: any two of them share exactly one rank.
   Several axes may shard the same dimension: the first of them in `axes` divides the dimension, the
   next divides each shard, and so on. Under DT_PARTIAL rank 0 of the group gets the value and all
   other ranks get zeros. Fails with DT_ERR_SHAPE if the number of ranks does not divide a sharded
   dimension. */
DT_API dt_tensor *dt_distribute(dt_ctx *ctx, dt_dtype dtype, dt_shape full, const void *host,
    const dt_axis_placement *axes, int n);

// ==== 4. Context parallelism ====================================================================

/* Context parallelism shards a sequence of T tokens over c ranks. Each rank holds T/c tokens
   through the whole model; only attention needs the keys and values of other ranks. Per layer and
   rank, with B sequences, H heads, K heads of keys and values, D elements per head and n = 2 B K D
   T/c, the table gives for each kind (DT_CP_RING, ..) the number of elements that are sent. It also
   gives the number of elements that are kept for the backward, in addition to the rank's own q, k,
   v, the result and the log-sum-exp:

       kind         forward                      backward                  kept
       RING         (c-1) n                      2 (c-1) n *               0
       ZIGZAG       (c-1) n                      2 (c-1) n *               0
       ALLGATHER    (c-1) n                      (c-1) n                   c n
       ULYSSES      (c-1)/c B D T/c (2 H + 2 K)  the same                  B D T/c (2 H + 2 K)

       * (c-1) n keys and values, and (c-1) n gradients of them, in f32 (f64 for f64)

   RING: ring attention, H. Liu et al., arXiv:2310.01889. Keys and values travel around the ring
   while each rank computes with the keys and values that it holds; the log-sum-exp merge combines
   the partial results. ZIGZAG: ring attention with a balanced order of tokens, see dt_cp_token.
   Both kinds skip a pair of a query chunk and a key chunk if no query of the pair attends to a key
   of the pair.

   ALLGATHER: all-gather context parallelism, H. Touvron et al., arXiv:2407.21783. Every rank
   gathers all keys and values.

   ULYSSES: S. Jacobs et al., arXiv:2309.14509. An all-to-all exchanges tokens for heads before the
   attention and heads for tokens after it; q, k, v and the result are kept in both placements,
   sharded by tokens and sharded by heads. c must divide H, and must divide K or be a multiple of K.
   If c > K, the heads of keys and values are repeated until there are c heads, and the table holds
   with K = c. In that case each rank also keeps the repeated heads as they were before the
   exchange, 2 B D T elements, and 2 B T indices of type i32. */
enum { DT_CP_RING = 0, DT_CP_ZIGZAG, DT_CP_ALLGATHER, DT_CP_ULYSSES };

/* [local] Zig-zag and other orders of tokens. Returns the position that the i-th token of rank r
   has in its sequence. RING, ALLGATHER and ULYSSES give each rank T/c consecutive tokens; under a
   causal mask the last rank then has 2 - 1/c times the mean work. The zig-zag order divides the
   sequence into 2c chunks and gives rank r the chunks r and 2c-1-r, so that all ranks have the same
   work. With c = 2, where x marks a chunk of queries that attends to a chunk of keys:

       chunk          0  1  2  3         keys:    0 1 2 3      pairs of rank 0: 1 + 4 = 5
       rank, RING     0  0  1  1         query 0  x                      rank 1: 2 + 3 = 5
       rank, ZIGZAG   0  1  1  0               1  x x          (RING: 3 and 7)
                                               2  x x x
                                               3  x x x x

   The mask leaves half of a pair on the diagonal, so ZIGZAG computes 4 and 4 pairs, RING 2 and 6.

   Permute the tokens, labels, positions and documents of a sequence in the same way; shift the
   labels before you permute them. Returns -1 if rank r or token i does not exist. */
DT_API int64_t dt_cp_token(int kind, int64_t T, int c, int r, int64_t i);
/* [local] Checks that c divides T, `heads` and kv_heads as the kind requires. On failure returns
   DT_ERR_ARG and writes the reason, with valid choices, to `text`. */
DT_API dt_status dt_cp_check(
    int kind, int64_t T, int c, int64_t heads, int64_t kv_heads, char *text, size_t text_bytes);

typedef struct dt_cp_desc {
    int kind;       /* DT_CP_* */
    int64_t batch;  /* B: number of sequences */
    int64_t tokens; /* T: number of tokens of a sequence, over all ranks */
    /* (B,T) in host memory: the position of each token in its document, for the causal mask. Each
       row lists first the tokens of rank 0, then the tokens of rank 1, and so on. NULL: the
       positions of dt_cp_token */
    const int32_t *positions;
    /* (B,T) in host memory, in the order of `positions`: the number of each token's document, for
       sequences that hold several documents. NULL: each sequence is one document */
    const int32_t *documents;
    int full; /* 1: no causal mask; 0: causal mask */
} dt_cp_desc;
/* State that all attention layers of one forward share; lives until dt_reset. */
typedef struct dt_cp dt_cp;
/* [local] Creates the state of context-parallel attention. Call dt_cp_make outside of recomputed
   blocks. If comm is NULL, dt_cp_attention is ordinary attention on one rank. The messages of ring
   attention use the tags 1020 to 1023 on comm. Returns NULL after a failure. */
DT_API dt_cp *dt_cp_make(dt_ctx *ctx, dt_comm *comm, dt_cp_desc desc);
/* [collective: comm of dt_cp_make] Attention of this rank's queries over the keys and values of all
   ranks. q (B,T/c,H,D), k (B,T/c,K,D) and v (B,T/c,K,D) belong to this rank's tokens. Returns
   (B,T/c,H,D). */
DT_API dt_tensor *dt_cp_attention(dt_tensor *q, dt_tensor *k, dt_tensor *v, dt_cp *cp);
/* [collective: comm of dt_cp_make] dt_cp_attention with a sliding window, soft-capping or another
   scale: it reads window, soft_cap and scale of `desc`, and fails with DT_ERR_ARG if another field
   is set. Layers with and without a window can share one cp. Ring attention skips a chunk of keys
   that is outside of every query's window, but still sends all keys around the ring. */
DT_API dt_tensor *dt_cp_attention_at(
    dt_tensor *q, dt_tensor *k, dt_tensor *v, dt_cp *cp, dt_attn_desc desc);
/* [local] Copies this rank's tokens of `full` to `local` (B,T/c). `full` (B,T) lists the tokens of
   each sequence in order. Both arrays are in host memory. */
DT_API void dt_cp_shard(
    int kind, int64_t B, int64_t T, dt_comm *comm, const int32_t *full, int32_t *local);

// ==== 5. Expert parallelism =====================================================================

/* Expert parallelism of a mixture of experts (MoE). The layer has E small networks, the experts,
   and each token uses k of them. Each of ep ranks holds E/ep experts. An all-to-all sends tokens to
   their experts, and a second all-to-all sends the results back. N. Shazeer et al.,
   arXiv:1701.06538; D. Lepikhin et al., arXiv:2006.16668. Read dt_route first, then dt_dispatch.

       rank 0: t0 t1 --+  dispatch  +--> e0: t0 t3 --+  combine   +--> y0 y1
                       | all-to-all |                | all-to-all |
       rank 1: t2 t3 --+            +--> e1: t1 t2 --+            +--> y2 y3

   x has the placement `outside` (section 3). One layer:

       dt_routing *r = dt_route(x, w, desc);               // experts of each token, and weights
       dt_tensor *h = dt_dispatch(dt_tp_enter(x, tp, outside), r, ep);  // tokens to their experts
       h = dt_expert_linear(h, r, w1, b1, gelu);           // each expert's product with its rows
       h = dt_expert_linear(h, r, w2, b2, last);
       h = dt_combine(h, r);                               // back, weighted and summed
       dt_tensor *y = dt_redistribute(h, tp, DT_PARTIAL, outside);

   Rank q of ep has the experts q E/ep to (q+1) E/ep - 1: the experts' parameters have shapes (E,..)
   and the shard { ep, 0 }. Their hidden size may also be sharded over tp as in section 3: w1
   (E,F,C) and b1 (E,F) along dimension 1, w2 (E,C,F) along dimension 2. The last line of the layer
   then sums over tp once per token, not once for each of the token's k rows. Only rank 0 of tp adds
   b2 (E,C), so the gradient of b2 is zero on the other ranks of tp; give b2 the gradient placement
   { tp, DT_GRAD_PARTIAL }. If `outside` is DT_SHARD(1), give the router's weight this placement
   too. dt_dispatch sends each row that goes to another rank of ep once, in the tensor's dtype.
   dt_combine, the backward of dt_dispatch and the backward of dt_combine each send the same number
   of rows.

   Expert folding (dt_mesh_desc.expert_tp = N): every rank of the stage dispatches tokens of its
   own, so x is sharded over tp along the tokens inside of the layer, as sequence parallelism shards
   it outside:

       x = dt_redistribute(x, tp, outside, DT_SHARD(1));   // under sequence parallelism x itself
       // desc.outside = DT_SHARD(1), desc.expert_tp = N
       dt_routing *r = dt_route(x, w, desc);
       dt_tensor *h = dt_dispatch(x, r, mesh.dispatch);    // to all N ranks of the expert
       ...                                                 // .row_parallel = mesh.expert_tp
       h = dt_combine(h, r);                               // adds the N partial results, too
       dt_tensor *y = dt_redistribute(h, tp, DT_SHARD(1), outside);

   The N ranks that shard an expert may hold different tokens, so each of them needs the rows of all
   N. dt_dispatch sends a row directly to the N ranks, and dt_combine adds the partial sums that
   come back. A rank receives the same bytes as from Megatron-LM's all-to-all over ep with an
   all-gather over expert_tp after it: with R rows for its experts it receives R (1 - 1/(ep N)) of
   them from other ranks if the tokens are spread evenly. The experts' parameters have the shards
   { expert_tp, .. } in place of { tp, .. }, and b2 has the gradient placement
   { expert_tp, DT_GRAD_PARTIAL }. The router's weight, and every parameter of the experts that is
   not sharded because ep and expert_tp have one rank, has the gradient placement
   { tp, DT_GRAD_PARTIAL }.

   Decisions about a whole sequence (expert capacity, load balance) use the choices of all tokens of
   the sequence, even if several ranks hold these tokens. So every layout drops the same tokens and
   has the same counts. The ranks exchange choices and counts in host memory; dt_comm_bytes does not
   count this exchange. Each layer waits once for the device, because the program branches on the
   choices. */

/* Statistics of a router. dt_route adds to every field, except while a block is recomputed. The
   statistics cover only the tokens that this rank passed to dt_route. For the totals, sum the
   fields over the mesh's data group, and also over tp if dt_route_desc.outside is DT_SHARD(1). */
typedef struct dt_route_counts {
    /* (E), the caller's array, or NULL: number of choices of each expert, including dropped ones */
    double *experts;
    /* choices: number of choices, k per token; dropped: number of choices that were dropped because
       they were beyond an expert's capacity */
    double choices, dropped;
    /* this rank's parts of the load-balancing loss and of the router z-loss, without their weights;
       a loss is added only if its weight in dt_route_desc is not 0 */
    double balance, z;
} dt_route_counts;

/* Scores of a router. SOFTMAX: softmax of the logits. SIGMOID: sigmoid routing of DeepSeek-V3,
   arXiv:2412.19437: the sigmoid of each logit. The gates are then divided by their sum even if k =
   1, and P_e of the load-balancing loss is the mean over tokens of the expert's score divided by
   the sum of all experts' scores: DeepSeek-V3's sequence-wise balance loss. */
enum { DT_ROUTE_SOFTMAX = 0, DT_ROUTE_SIGMOID };

typedef struct dt_route_desc {
    int k; /* number of experts per token, at most E; 0 means 1 */
    /* Expert capacity, as a factor; 0 means no limit (dropless). With capacity > 0 each expert
       takes at most ceil(capacity k T / E) choices of a sequence of T tokens. All tokens' first
       choices are served before all second choices, and so on; among the first (second, ..)
       choices, tokens are served in the order of the sequence. A choice beyond the capacity is
       dropped: the token gets nothing from that expert, and the weights of its other experts do not
       change. The tensors of an expert then take the memory of its capacity in every step */
    double capacity;
    /* weight of the load-balancing loss. The loss is the mean over sequences of E times the sum
       over experts e of f_e P_e. f_e is the fraction of all choices, including dropped ones, that
       fell on expert e. P_e is the mean probability of expert e; arXiv:2101.03961 */
    double balance;
    /* weight of the router z-loss. The loss is the mean over tokens of log(sum of e^logits)^2;
       arXiv:2202.08906 */
    double z;
    /* number of sequences in the whole step over all ranks, needed to compute both means; required
       if balance or z is not 0 */
    int64_t sequences;
    /* (E), f32 (f64 in an f64 model), without a gradient. The bias is added to the probabilities
       when experts are chosen, but not when their outputs are weighted; arXiv:2408.15664, see
       dt_route_update_bias. NULL: no bias */
    dt_tensor *bias;
    dt_comm *tp; /* x has the placement `outside` over tp: DT_REPLICATE or DT_SHARD(1) */
    dt_placement outside;
    /* group over which each sequence is sharded, in the order of dt_cp_token for `kind`; NULL: not
       sharded */
    dt_comm *cp;
    int kind; /* DT_CP_* */
    /* (B,T') in host memory: the position, 0 to T-1, of each token of x in its sequence of T
       tokens. NULL: the positions of dt_cp_token */
    const int32_t *positions;
    dt_route_counts *counts; /* NULL: count nothing */
    int scores; /* DT_ROUTE_*: the function from the logits x w^T to the experts' scores */
    /* Group-limited routing (arXiv:2412.19437, section 2.1.2): the experts form `groups` groups of
       E/groups neighbours, and a token chooses its k experts among those of its top_groups best
       groups. A group's score is the sum of its two largest scores, with the bias. 0 groups: no
       limit */
    int groups, top_groups;
    int raw_gates; /* 1: the gates are the scores of the chosen experts, not divided by their sum */
    double scale;  /* factor of all gates, after the division; 0 means 1 */
    /* Expert folding: dt_mesh.sizes.expert_tp, the number of ranks that shard each expert. If it is
       not 0, the routing is for the tokens of x alone, and these are what dt_dispatch takes. Then
       `outside` must be DT_SHARD(1) over tp, except under dt_no_grad: with DT_REPLICATE all ranks
       of tp send the same tokens, and each gets all results */
    int expert_tp;
} dt_route_desc;

/* Routing: which token goes to which expert. Read-only for the caller; lives until dt_reset. */
typedef struct dt_routing {
    /* batch is B, the number of sequences. tokens is T, the number of tokens per sequence in this
       rank's tensor-parallel region, which has the tokens of all ranks of tp; with expert folding
       T is T', the number in x. */
    int64_t batch, tokens;
    int64_t experts, k; /* E and k */
    /* (B,T,k) f32 (f64 in an f64 model): the weights of the chosen experts. Placement DT_COPY over
       tp: every rank has all the weights, and each rank's gradient is a partial sum. With expert
       folding their placement is that of x */
    dt_tensor *gates;
    /* (B,T,k) in host memory: each token's experts, best first; -1 for a dropped choice */
    int32_t *choices;
    /* dt_dispatch sets these three: */
    int64_t rows;          /* number of rows that this rank's experts received */
    int64_t local_experts; /* number of experts on this rank */
    int64_t *expert_rows;  /* (local_experts) in host memory: number of rows of each local expert */

    /* private: */
    /* capacity: the most choices of one sequence that an expert takes from this rank; 0: none */
    int64_t max_choices;
    int copies; /* number of ranks to which each row goes, those that shard its expert: 1 or more */
    /* expert folding: how the ranks share a sequence of full_tokens tokens; else folds is 0 */
    int folds, kind, cp_ranks, tp_ranks;
    int64_t full_tokens;
    struct dt__exchange *exchange; /* set by dt_dispatch */
} dt_routing;

/* [collective: desc.tp, desc.cp] Router of a mixture-of-experts layer for x (B,T',C), with the
   router's weight w (E,C). The router computes in f32 (f64 in an f64 model). For each token it
   chooses the k experts with the largest probabilities softmax(x w^T); if probabilities are equal,
   it prefers the expert with the lower number. The output of a chosen expert is weighted with its
   probability if k = 1 (arXiv:2101.03961), and with its probability divided by the sum of the k
   chosen probabilities if k > 1 (arXiv:2401.04088). The gradients of these weights flow to x and w.
   dt_route_desc also has sigmoid scores in place of the probabilities, and group-limited routing.
   The load-balancing loss and the z-loss are attached with dt_loss: each rank attaches its own
   tokens' part. Returns NULL after DT_ERR_SHAPE or DT_ERR_ARG; the error text names what does not
   match. In a dry run, choice j of token t of a sequence is expert (k t + j) mod E. */
DT_API dt_routing *dt_route(dt_tensor *x, dt_tensor *w, dt_route_desc desc);
/* [collective: comm] Token dispatch. Sends the tokens of x (B,T,C) to the ranks of their experts.
   comm is dt_mesh.dispatch: ep, and with expert folding ep x expert_tp. x has all tokens of the
   tensor-parallel region, as dt_tp_enter returns them; with expert folding it is the x of dt_route.
   Returns rows (R,C) for this rank's experts, ordered by expert, then source rank, then token. R
   may be 0. Fails with DT_ERR_SHAPE if the number of ranks of ep does not divide E, if expert_tp
   does not divide the ranks of comm, or if x does not match the routing.
   R varies from step to step. If the router has a capacity, these rows, and all tensors computed
   row by row from them, have memory for the largest R; make the output of your own op with
   dt_new_rows. */
DT_API dt_tensor *dt_dispatch(dt_tensor *x, dt_routing *routing, dt_comm *comm);

typedef struct dt_expert_desc {
    int activation; /* a DT_ACT_* before DT_ACT_AFFINE; 0: none */
    /* group over which w is sharded along its inputs (row-parallel), or NULL. Only rank 0 of the
       group adds b */
    dt_comm *row_parallel;
} dt_expert_desc;
/* [local] Returns act(x w^T + b), (R,O..): each row of x (R,I) is multiplied by the matrix of its
   expert. w is (local_experts,O..,I); b is (local_experts,O..) or NULL. An expert's gradient is a
   sum over the expert's rows in row order; the gradient of an expert without rows is zero. Gated
   experts use w (local_experts,2,F,I) and dt_swiglu. */
DT_API dt_tensor *dt_expert_linear(
    dt_tensor *x, const dt_routing *routing, dt_tensor *w, dt_tensor *b, dt_expert_desc desc);
/* [collective: comm of dt_dispatch] Token combine. Sends rows (R,O) back to the ranks of their
   tokens. Returns (B,T,O): for each token the sum of its rows times their gates, summed from its
   best choice on in f32 (f64 in an f64 model) and rounded once. With expert folding the rows are
   partial sums over expert_tp, and the sum includes the partial sums of all ranks. A token whose
   choices are all dropped gets 0. */
DT_API dt_tensor *dt_combine(dt_tensor *rows, dt_routing *routing);
/* [collective: the n groups; for a parameter at ZeRO-3 also its data group] Load balancing without
   an auxiliary loss, called after a step. `counts` (E) says how often each expert was chosen in the
   step; the function sums `counts` over the groups in place. It then adds rate sign(mean(counts) -
   counts_e) to bias_e for each expert e. The groups are axes of a mesh: any two of them share
   exactly one rank. `bias` (E) is a frozen parameter or any other tensor, of f32 or f64. */
DT_API dt_status dt_route_update_bias(
    dt_tensor *bias, double *counts, double rate, dt_comm *const *groups, int n);

// ==== 6. Pipeline schedules =====================================================================

/* A pipeline partitions the layers of a model into S stages. Each of p ranks holds v stages, its
   chunks, and a step has m micro-batches. A schedule says what each rank computes, and in which
   order: for each stage and micro-batch one forward (F) and one backward. The backward runs in one
   piece (B) or in two halves. The first half (I) computes the gradient of the stage's input, for
   which the preceding stage waits. The second half (W) runs later and computes the gradients of the
   stage's parameters.

   A schedule is data. A generator lists the computations, and the lowering adds messages and slots.
   All schedules share one checker, one simulator, one drawing and one executor (section 7). Bubble
   fraction = idle time / computing time. The table is for rank r. It assumes that a backward takes
   as long as two forwards, I and W take as long as one forward each, and messages take no time:

       kind          bubble fraction   micro-batches held   source
       NAIVE         p - 1             1                    one micro-batch at a time
       AFAB          (p - 1) / m       m                    GPipe: Y. Huang et al., arXiv:1811.06965
       1F1B          (p - 1) / m       min(p - r, m)        PipeDream-Flush: D. Narayanan et al.,
                                                            arXiv:2006.09503
       INTERLEAVED   (p - 1) / (v m)   chunks: min(w, v m)  interleaved 1F1B: D. Narayanan et al.,
                                                            arXiv:2104.04473
       ZB            (p - 1) / (3 m)   min(p, m)            zero bubble, ZB-H1: P. Qi et al.,
                                                            arXiv:2401.10241
       ZBV           (p - 1) / (6 m)   chunks: min(w, 2 p)  ZB-V: P. Qi et al., arXiv:2405.15362
       DUALPIPE_V    (p - 1) / (6 m)   chunks:              DualPipe of DeepSeek-V3,
                                       min(w, 2 p + 1)      arXiv:2412.19437, halved (DualPipe-V):
                                                            github.com/deepseek-ai/DualPipe

   Section 18 draws the schedules. The row ZB holds if p <= m, the row INTERLEAVED if p divides m,
   the row ZBV if 2 p - 1 <= m, and the row DUALPIPE_V if 2 p <= m. The bubble of the last two is
   the offset of rank p - 1, which begins p - 1 forwards after rank 0. Under ZBV no rank idles
   between its first and its last action. In these two rows w = min(m + 1 + r, 2 m). Where the third
   column says chunks, a micro-batch counts once for each chunk that holds it. In the row
   INTERLEAVED w = 2 (p - r - 1) + (v - 1) G + 1, where G = p. In general each chunk processes the
   micro-batches in groups of G (A. Grattafiori et al., arXiv:2407.21783), so every m is possible.
   If m >= p, G is any number from p to m for which m % G is 0 or at least p. If m < p, G is m.

   A slot holds one micro-batch of one chunk: from F to B or I it holds everything that the backward
   needs, and from I to W what W reads: the inputs of the ops with parameters, and the gradients of
   their outputs. After that it holds only the gradient that it sends, until the receiver begins to
   use it, so an F that reuses the slot may have to wait for the receiver. A rank has enough slots
   that no rank waits for a slot if all stages take the same time. The number of slots equals the
   number of micro-batches that the rank holds, except where chunks wait for each other: ZBV and
   DUALPIPE_V have up to one more slot, and for INTERLEAVED the first ranks have one more slot if p
   divides m, and several more slots if p does not divide m. */
enum {
    DT_SCHEDULE_NAIVE = 0,
    DT_SCHEDULE_AFAB,
    DT_SCHEDULE_1F1B,
    DT_SCHEDULE_INTERLEAVED,
    DT_SCHEDULE_ZB,
    DT_SCHEDULE_ZBV,
    DT_SCHEDULE_DUALPIPE_V,
    DT_SCHEDULES
};

/* One computation of one rank, with the message it waits for and the message it sends. */
typedef struct dt_action {
    /* DT_FORWARD (F), DT_BACKWARD (B), DT_BACKWARD_INPUT (I) or DT_BACKWARD_WEIGHT (W) */
    dt_phase phase;
    int micro, chunk;
    int rank; /* the rank that runs the action */
    /* index of the chunk's stage; the lowering sets this field and all fields below */
    int stage;
    /* slot on this rank, acquired by F and released after B or W; -1 for a backward whose F is
       missing */
    int slot;
    /* recv_from is the rank that sends the input, send_to the rank that receives the result. Either
       may be this rank. -1: no message (at the ends of the pipeline, and in W) */
    int recv_from, send_to;
    int line; /* the action's line in the file of dt_schedule_read; else 0 */
} dt_action;

typedef struct dt_schedule dt_schedule;
/* A generator: calls dt_schedule_add for every computation. It adds the computations of each rank
   in the order in which the rank runs them. */
typedef void (*dt_schedule_fn)(dt_schedule *schedule, void *user);
/* A stage map: returns the index of the stage that is chunk number `chunk` of rank `rank`. Each of
   the ranks * chunks stages must be returned for exactly one chunk of one rank. */
typedef int (*dt_stage_map_fn)(int rank, int chunk, void *user);

typedef struct dt_schedule_desc {
    int kind;   /* DT_SCHEDULE_* */
    int ranks;  /* p: at least 1 */
    int micros; /* m: at least 1 */
    /* v: chunks of each rank; 0 means 2 for INTERLEAVED, ZBV and DUALPIPE_V and 1 for all others.
       INTERLEAVED and generators of your own may have any number */
    int chunks;
    int micro_group;         /* G of INTERLEAVED; 0 means the smallest G that is allowed */
    dt_schedule_fn generate; /* NULL: the generator of `kind`; else your own generator */
    /* NULL: the stage is chunk * ranks + rank; for ZBV and DUALPIPE_V rank r has stages r and
       2 ranks - 1 - r */
    dt_stage_map_fn stage_of;
    void *user;       /* passed to both functions */
    const char *name; /* copied; NULL: the kind's name */
    /* 1: each rank has exactly as many slots as it holds micro-batches, and may wait for a slot. A
       schedule of several chunks that would then deadlock fails with DT_ERR_ARG */
    int min_slots;
    /* number of additional slots on each rank, so that fewer forwards wait for a slot when messages
       take time */
    int extra_slots;
    /* 1: create the schedule even if it is wrong; the simulator and the drawing show where the
       schedule stops */
    int unchecked;
} dt_schedule_desc;

/* [local] Generates, lowers and checks a schedule. Returns NULL after DT_ERR_MEM or DT_ERR_ARG. The
   error is DT_ERR_ARG if a field of desc is out of range or dt_schedule_check finds an error; the
   error text then contains the text of dt_schedule_check. */
DT_API dt_schedule *dt_schedule_make(dt_ctx *ctx, dt_schedule_desc desc);
/* [local] Frees a schedule; NULL is allowed. Schedules that the program has not freed are freed
   when the context ends. */
DT_API void dt_schedule_free(dt_schedule *schedule);
/* [local] For generators: appends the rank's next computation. Fails the context with DT_ERR_ARG if
   the phase, rank, micro-batch or chunk does not exist, or if no generator is running. */
DT_API dt_status dt_schedule_add(
    dt_schedule *schedule, int rank, dt_phase phase, int micro, int chunk);

/* [local] Return the schedule's sizes, or 0 if schedule is NULL. Generators may call these
   functions too. */
DT_API int dt_schedule_ranks(const dt_schedule *schedule);
DT_API int dt_schedule_chunks(const dt_schedule *schedule); /* per rank */
DT_API int dt_schedule_stages(const dt_schedule *schedule); /* ranks x chunks */
DT_API int dt_schedule_micros(const dt_schedule *schedule);
DT_API int dt_schedule_micro_group(const dt_schedule *schedule); /* G; 0 if not INTERLEAVED */
DT_API const char *dt_schedule_name(const dt_schedule *schedule);
/* [local] dt_schedule_stage_of returns the stage of the rank's chunk, dt_schedule_rank_of the rank
   that holds the stage. Both return -1 if an argument is out of range. */
DT_API int dt_schedule_stage_of(const dt_schedule *schedule, int rank, int chunk);
DT_API int dt_schedule_rank_of(const dt_schedule *schedule, int stage);
/* [local] dt_schedule_actions returns the rank's actions in the order in which the rank runs them,
   dt_schedule_count the number of these actions. They return NULL and 0 if the rank is out of
   range. */
DT_API const dt_action *dt_schedule_actions(const dt_schedule *schedule, int rank);
DT_API int dt_schedule_count(const dt_schedule *schedule, int rank);
/* [local] Returns the number of actions of all ranks below `rank`. This is the index of the rank's
   first action in an array that holds first the actions of rank 0, then those of rank 1, and so on.
   Rank p, the number of ranks, is allowed: the result is then the number of all actions. */
DT_API int dt_schedule_offset(const dt_schedule *schedule, int rank);
/* [local] dt_schedule_max_in_flight returns the largest number of micro-batches that the rank holds
   at the same time, summed over its chunks. dt_schedule_slots returns the rank's number of slots.
   Both return 0 if the rank is out of range. */
DT_API int dt_schedule_max_in_flight(const dt_schedule *schedule, int rank);
DT_API int dt_schedule_slots(const dt_schedule *schedule, int rank);

typedef struct dt_schedule_metrics {
    int actions;       /* number of actions of all ranks */
    int messages;      /* number of messages between different ranks */
    int max_in_flight; /* the largest dt_schedule_max_in_flight of a rank */
    int max_slots;     /* the largest dt_schedule_slots of a rank */
    int cycle_length;  /* number of ranks that wait for each other in a cycle; 0: no deadlock */
} dt_schedule_metrics;
/* [local] Checks the schedule. Returns DT_OK, or DT_ERR_ARG with the first error in `text`; the
   context does not fail. Checks that each computation occurs once, that no rank waits for ever
   (deadlock), and that each chunk accumulates gradients, in B and W, in ascending order of
   micro-batches. The deadlock check assumes that every rank runs its actions in order, that F waits
   for the F of the preceding stage and for a slot, and that B and I wait for the B or I of the
   following stage. metrics may be NULL. */
DT_API dt_status dt_schedule_check(
    const dt_schedule *schedule, dt_schedule_metrics *metrics, char *text, size_t text_bytes);

/* Seconds that one micro-batch takes in one stage. B takes input + weight. */
typedef struct dt_schedule_costs {
    double forward, input, weight; /* seconds of F, I and W, the same in all stages */
    /* (stages,3): forward, input and weight of each stage; NULL: the three fields above hold for
       all stages */
    const double *stages;
    /* seconds from the end of an action until another rank can begin an action that uses the
       result */
    double message;
} dt_schedule_costs;
/* Begin and end of an action in seconds. If begin > end, the action did not run. */
typedef struct dt_span {
    double begin, end;
} dt_span;
/* [local] Simulates the schedule from time 0 and writes the begin and the end of each action to
   `spans`, which has dt_schedule_offset(schedule, p) elements. Fails the context with DT_ERR_ARG if
   a cost is negative or not finite. If an unchecked schedule deadlocks, returns DT_ERR_ARG but does
   not fail the context; an action that never begins has the span { 0, -1 }. */
DT_API dt_status dt_schedule_simulate(
    const dt_schedule *schedule, dt_schedule_costs costs, dt_span *spans);

typedef struct dt_schedule_bubble {
    double makespan;          /* time from the first begin to the last end over all ranks */
    double work;              /* computing time of the rank; for rank -1, of the busiest rank */
    double idle_per_work;     /* (makespan - work) / work: the bubble fraction of the papers */
    double idle_per_makespan; /* (makespan - work) / makespan: the idle fraction of the time */
} dt_schedule_bubble;
/* [local] Bubble fraction of one rank (for rank -1, of the whole pipeline), computed from simulated
   or measured spans. All fields are 0 if the rank does not exist or has no work. */
DT_API dt_schedule_bubble dt_schedule_bubble_of(
    const dt_schedule *schedule, const dt_span *spans, int rank);

/* [local] Partitions n consecutive items (layers) with costs >= 0 into `stages` non-empty parts so
   that the most expensive part is as cheap as possible. Part i consists of the items first[i] to
   first[i+1] - 1; `first` has stages + 1 elements. Among several best partitions the function takes
   an even one in which the first parts are cheaper, because the first stages hold the most
   micro-batches. Returns DT_ERR_ARG, with the reason in `text`, if there are fewer items than
   stages or if a cost is negative or not finite. */
DT_API dt_status dt_partition_stages(
    const double *costs, int n, int stages, int *first, char *text, size_t text_bytes);

/* Input of a drawing: a schedule and the simulated or measured spans of its actions. */
typedef struct dt_timeline {
    const char *title; /* UTF-8; NULL: the schedule's name */
    const dt_schedule *schedule;
    const dt_span *spans; /* dt_schedule_offset(schedule, p) elements */
} dt_timeline;
/* [local] Draws n timelines into an SVG file, one below the other, to the same scale. Each rank is
   a row, and each action is a box with the number of its micro-batch. The colour of the box shows
   the phase; later chunks are lighter. The title shows the bubble fraction. The file is written as
   by dt_file_write. */
DT_API dt_status dt_schedule_svg(dt_ctx *ctx, const char *path, const dt_timeline *lines, int n);
/* [local] Draws a schedule for a terminal, one line per rank: "rank  0 |0123....abcd|". (The text
   that dt_schedule_read reads is another one: see dt_schedule_write.) F is a
   digit, B and I are a lower-case letter and W is an upper-case letter; micro-batch 0 is 0, a or A,
   and so is micro-batch 10. `columns` is the width of the time axis in characters; 0 means 72.
   Fails with DT_ERR_ARG if `text` is too small; p (columns + 12) + 1 bytes are enough if p <
   1000. */
DT_API dt_status dt_schedule_text(
    const dt_schedule *schedule, const dt_span *spans, int columns, char *text, size_t text_bytes);

/* Schedules as text, to write one by hand or to edit one that a generator made:

       ranks 2, chunks 1, micros 2           # the first line; # begins a comment
       rank 0: F(micro 0) F(micro 1) B(micro 0) B(micro 1)
       rank 1: F(micro 0) B(micro 0) F(micro 1)
       rank 1: B(micro 1)                    # a rank may have several lines

   Actions have the names that dt_schedule_check prints: F, B, I or W, the micro-batch, and with
   several chunks the chunk, as in "I(micro 0, chunk 1)". A line "rank 0: stages 0 3" names the
   stages of the rank's chunks 0, 1, ..; without such lines chunk c of rank r is stage
   c * ranks + r.

   [local] Writes a schedule as text, as dt_file_write writes a file. */
DT_API dt_status dt_schedule_write(dt_ctx *ctx, const char *path, const dt_schedule *schedule);
/* [local] Reads such a text and makes the schedule. Of desc it uses min_slots, extra_slots and
   unchecked; if desc.ranks, desc.chunks or desc.micros is not 0, the file must have this number.
   Returns NULL after DT_ERR_MEM, DT_ERR_IO or DT_ERR_ARG. The error names the file and the line; if
   the schedule itself is wrong (as in dt_schedule_make), the lines of the actions concerned. */
DT_API dt_schedule *dt_schedule_read(dt_ctx *ctx, const char *path, dt_schedule_desc desc);

// ==== 7. Pipeline parallelism ===================================================================

/* Pipeline parallelism: runs a schedule (section 6). Each rank computes its actions in their order.
   A rank receives a stage's input from the rank of the preceding stage, and the gradient of the
   stage's output from the rank of the following stage. From its forward to its backward a
   micro-batch has its own tape (dt_tape): slot s uses tape s + 1. Tape 0 remains the caller's.
   Tensors are sent without a copy, and messages overlap with the computation of other actions.

       static dt_tensor *run(dt_tensor *x, int stage, int micro, void *user) {
           if (stage == 0) x = dt_input(...micro-batch `micro`...);
           x = ...the layers of this stage...;
           // the denominator B is that of the whole step, so the micro-batches' losses add up
           return stage < last ? x : dt_mse(x, ..., B);
       }

   Register the parameters of a stage after dt_stage(ctx, stage), on the rank that holds the stage.
   If stages of several ranks use one parameter (tied embeddings: the output head is the embedding),
   each of these ranks registers the parameter under the same name, with the gradient placement { G,
   DT_GRAD_PARTIAL }, where G is the group of these ranks; dt_zero_step then sums the gradient over
   G. A stage has one input tensor and one output tensor, of any shape that stays the same during a
   run. The ranks of a tensor, context or expert parallel group run the same schedule at the same
   time. */

/* The layers of one stage. x is the output of the preceding stage for this micro-batch; NULL for
   the first stage. The placements of x are unknown until dt_place states them. The last stage
   returns the loss, a scalar. dt_pipe_run calls the function inside a block. */
typedef dt_tensor *(*dt_stage_run_fn)(dt_tensor *x, int stage, int micro, void *user);

typedef struct dt_pipe_desc {
    const dt_schedule *schedule;
    dt_comm *comm; /* the pipeline group: its rank r is the schedule's rank r; NULL: one rank */
    dt_stage_run_fn run;
    void *user; /* passed to run */
    /* If not 0, only forwards run, for example for evaluation, and this is the number of
       micro-batches. 0: the whole schedule runs */
    int forward_micros;
    /* minimum duration of each action, which makes a schedule visible on a small model; NULL: run
       at full speed */
    const dt_schedule_costs *min_durations;
    /* Output, or NULL: begin and end of each action of this rank by this rank's clock;
       dt_schedule_count elements */
    dt_span *spans;
} dt_pipe_desc;

/* [collective: comm] Runs all micro-batches of a step, forward and backward. Call dt_zero_step
   afterwards. Errors, in addition to the errors of `run`: DT_ERR_ARG if the schedule is for another
   number of ranks; DT_ERR_SHAPE if a stage's output changes its shape between micro-batches. Sends
   2 messages per micro-batch between each pair of neighbouring stages. Only one run at a time may
   use a schedule. Logs one notice if a stage does not use its input, because the stages before it
   then train with zero gradients. */
DT_API dt_status dt_pipe_run(dt_ctx *ctx, dt_pipe_desc desc);
/* [collective: comm] Gathers the spans of all ranks for dt_schedule_bubble_of and dt_schedule_svg.
   `mine` has dt_schedule_count elements, the spans of this rank. `all` has
   dt_schedule_offset(schedule, p) elements, whose times are in seconds after the earliest `begin`
   of all spans. Clocks of different machines may differ. Returns the status; after a failure the
   contents of `all` are unspecified. */
DT_API dt_status dt_pipe_gather_spans(
    dt_comm *comm, const dt_schedule *schedule, const dt_span *mine, dt_span *all);

// ==== 8. Data order =============================================================================

/* Data order: which sequences each replica reads. A step has `a` micro-steps, j = 0 .. a-1. It
   reads B = b * a * R sequences, which are the same, in the same order, in every layout:

       micro-step j    replica 0     replica 1     ..  replica R-1
            0          0 .. b-1      b .. 2b-1          (R-1)b .. Rb-1
            1          Rb .. Rb+b-1  .. */
typedef struct dt_data_order {
    int64_t sequences; /* S: sequences in the data, at least 1 */
    int64_t batch;     /* B: sequences of one step over all replicas */
    int micro_batch;   /* b: sequences of one forward of one replica */
    int replicas;      /* R */
    int64_t consumed;  /* sequences read before step 1 */
} dt_data_order;

/* [local] Returns the i-th sequence of replica r in micro-step j of step n (from 1): (consumed +
   (n-1) B + (j R + r) b + i) mod S; -1 if S < 1, n < 1, or a field or argument is negative. */
DT_API int64_t dt_data_order_sequence(
    dt_data_order order, int64_t step, int micro_step, int replica, int i);
/* [local] Returns how many times the whole data set has been read before the sequence that
   dt_data_order_sequence returns: floor((consumed + (n-1) B + (j R + r) b + i) / S), at most
   INT64_MAX. Returns 0 if dt_data_order_sequence returns -1. */
DT_API int64_t dt_data_order_epoch(
    dt_data_order order, int64_t step, int micro_step, int replica, int i);

/* Batch size ramp-up over the first `samples` sequences of a run, because small batches learn more
   from each sequence while the gradient signal is strong (S. McCandlish et al., arXiv:1812.06162;
   T. Brown et al., arXiv:2005.14165). The batch size begins with `start` and grows K = (batch -
   start) / incr times by `incr`, each time after samples / K sequences, until it is `batch`. */
typedef struct dt_batch_ramp {
    int64_t start, incr; /* first batch size, and increment, in sequences */
    /* length of the ramp in sequences, after which all steps have size `batch`; 0: no ramp, so all
       steps have size `batch` */
    int64_t samples;
    int64_t batch; /* final batch size in sequences */
} dt_batch_ramp;

/* [local] Checks the ramp: every batch size must be a multiple of `unit`, the micro-batch size
   times the number of replicas, and the increments must lead exactly to `batch`. On failure returns
   DT_ERR_ARG and writes to `text` a message with the sizes and a valid choice. A ramp with samples
   0 is valid. */
DT_API dt_status dt_batch_ramp_check(
    dt_batch_ramp ramp, int64_t unit, char *text, size_t text_bytes);
/* [local] Returns the batch size of the step that follows after `consumed` sequences: start +
   floor(consumed K / samples) incr if consumed < samples, else batch. Returns batch if the ramp is
   invalid. */
DT_API int64_t dt_batch_ramp_size(dt_batch_ramp ramp, int64_t consumed);
/* [local] Returns the total number of sequences that are read in steps 1 to n-1, at most INT64_MAX.
   Use this value as `consumed` of dt_data_order for step n. */
DT_API int64_t dt_batch_ramp_consumed(dt_batch_ramp ramp, int64_t step);

/* Distributed sampler: decides which of n samples each of R ranks reads, like PyTorch's
   DistributedSampler. Each epoch has an order of all samples: 0, 1, .. n-1, or a shuffled order.
   The length of this order is made a multiple of R: the order is padded with its own beginning,
   repeatedly if needed, or, with drop_last, the last n mod R entries are left out. Rank r reads the
   entries r, r + R, r + 2R, .., so that every rank reads the same number of samples.

   The shuffled order is torch.randperm(n) of a CPU generator, whose seed is `seed` plus the epoch,
   reduced to 32 bits. For each index in order, a 32-bit number of the Mersenne twister modulo the
   number of remaining samples selects the sample (Fisher-Yates). For n >= 2^32 / 20 torch uses
   another algorithm, so dt refuses to shuffle that many samples. */
typedef struct dt_sampler dt_sampler;
#define DT_SAMPLER_MAX_SHUFFLED 214748363 /* largest number of samples that can be shuffled */
typedef struct dt_sampler_desc {
    int64_t samples;    /* n: at least 1 */
    int replicas, rank; /* R: at least 1; 0 <= r < R */
    uint64_t seed;      /* must be the same on every rank */
    int shuffle;        /* 1: a different order in each epoch; 0: always 0, 1, .. n-1 */
    /* 1: each epoch leaves out up to R-1 samples; 0: each epoch repeats up to R-1 samples */
    int drop_last;
} dt_sampler_desc;

/* Position of a sampler. A checkpoint stores the position and the sampler's desc. */
typedef struct dt_sampler_state {
    int64_t epoch;    /* from 0 */
    int64_t position; /* number of samples of this epoch that the rank has read */
} dt_sampler_state;

/* [local] Creates a sampler at the start of epoch 0. A sampler that shuffles holds 4 bytes of host
   memory per sample. Returns NULL after DT_ERR_ARG (a field of desc is out of range) or
   DT_ERR_MEM. */
DT_API dt_sampler *dt_sampler_make(dt_ctx *ctx, dt_sampler_desc desc);
/* [local] Frees a sampler; NULL is allowed. Samplers that the program has not freed are freed when
   the context ends. */
DT_API void dt_sampler_free(dt_sampler *sampler);
/* [local] Returns the number of samples that the rank reads in an epoch: n / R rounded up, or
   rounded down with drop_last. Returns 0 for NULL. */
DT_API int64_t dt_sampler_count(const dt_sampler *sampler);
/* [local] Returns the rank's next sample, 0 .. n-1. Returns -1 for NULL, and after the end of the
   epoch until the program calls dt_sampler_set_epoch or dt_sampler_seek. */
DT_API int64_t dt_sampler_next(dt_sampler *sampler);
/* [local] Moves the sampler to the start of an epoch. The order of an epoch does not depend on
   earlier epochs. Fails with DT_ERR_ARG if epoch < 0. */
DT_API dt_status dt_sampler_set_epoch(dt_sampler *sampler, int64_t epoch);
/* [local] dt_sampler_tell returns the sampler's position; { 0, 0 } for NULL. dt_sampler_seek moves
   the sampler to a position, so that dt_sampler_next returns the samples that followed it. The
   order of a new epoch is computed when its first sample is read. dt_sampler_seek fails with
   DT_ERR_ARG if the epoch is below 0 or the position is outside 0 .. dt_sampler_count. */
DT_API dt_sampler_state dt_sampler_tell(const dt_sampler *sampler);
DT_API dt_status dt_sampler_seek(dt_sampler *sampler, dt_sampler_state state);

/* [collective: comm] Returns the number of labels >= 0 over all ranks of comm. As the denominator
   of a loss this number makes the loss the mean over the whole step in every layout. `labels` (n)
   is in host memory and has this rank's labels of all micro-batches. dt_comm_bytes does not count
   this communication. After a failure returns this rank's own number. */
DT_API double dt_count_labels(dt_comm *comm, const int32_t *labels, size_t n);

// ==== 9. Text datasets ==========================================================================

/* Text dataset: files that are read as one long sequence of N tokens. A file is either a byte file,
   in which each byte is a token 0..255, or an llm.c token shard, recognised by its magic number
   (20240520 with 16 bits per token, 20240801 with 32). All files must be of the same kind. The
   dataset has S = floor((N-1)/T) sequences of T tokens. Sequence i uses the tokens iT .. iT+T: its
   ids are the first T of these T+1 tokens, and its labels are the last T. */
typedef struct dt_text dt_text;

/* [local] Opens the files paths[0] to paths[files-1] through the context's io table, as sequences
   of `seq` tokens. Returns NULL after DT_ERR_IO if a file is missing, unreadable, not a regular
   file or a broken shard, if the files are of different kinds, or if all files together are shorter
   than one sequence. */
DT_API dt_text *dt_text_open(dt_ctx *ctx, const char *const *paths, int files, int seq);
/* [local] Closes a dataset; NULL is allowed. Datasets that are still open are closed when the
   context ends. */
DT_API void dt_text_close(dt_text *text);
/* [local] Return the number of tokens (N) and of sequences (S); 0 for NULL. */
DT_API int64_t dt_text_tokens(const dt_text *text);
DT_API int64_t dt_text_sequences(const dt_text *text);
/* [local] Returns the exclusive upper bound of token ids: 256 for byte files; for shards 65,536 (16
   bits per token) or 2^31 (32 bits); 0 for NULL. A model may have a smaller vocabulary if all ids
   in the files are inside it; dt_embedding refuses ids outside its table. */
DT_API int64_t dt_text_token_limit(const dt_text *text);
/* [local] Reads the ids (seq) and the labels (seq) of one sequence. Fails with DT_ERR_ARG if the
   dataset has no such sequence, and with DT_ERR_IO if a file cannot be read or a token is invalid;
   the error text then names the file and the byte or the token. */
DT_API dt_status dt_text_read(dt_text *text, int64_t sequence, int32_t *ids, int32_t *labels);

// ==== 10. Dry runs ==============================================================================

/* One kernel call of a dry run. */
typedef struct dt_dry_kernel {
    const char *name; /* as in dt_kernels: "matmul", "attention", "norm", "adamw", ... */
    dt_dtype dtype;
    /* A product: batch times (m,k) (k,n). Attention: batch times heads products of m queries with n
       keys of k elements. Else 0 */
    int64_t m, n, k, batch;
    double flops; /* as dt_dry.flops */
    double bytes; /* that the kernel reads and writes, each operand once */
} dt_dry_kernel;

/* Dry run: a context that computes nothing and has no memory for tensors, but otherwise works as
   usual. The program then reports the memory, traffic and FLOPs that it would need, on any number
   of ranks (as threads, or with phantom ranks: dt_run_desc.present), so that no separate formula is
   needed. dt_memory_used and dt_comm_bytes
   count as always; every element read from a tensor is 0. Two equal steps show the peak of every
   later step: the second allocates all that later steps need. Only the memory of experts without a
   capacity (dt_route_desc) depends on the data: a dry run routes evenly. */
typedef struct dt_dry {
    /* Set before the call. 1: also counts the staging windows that forked ranks (DT_BACKEND_PROCS)
       need for memory of class DT_MEM_HOST, which they do not share */
    int forked;
    /* Set before the call. Virtual clock: NULL, or a function that returns the seconds that a
       kernel call takes on the imagined device. The context's clock (dt_host.now) then shows
       predicted time: kernels and the waits for operations over the simulated link (dt_run_desc.
       link) advance it, and nothing else does. So a step, the spans of dt_pipe_run and the file of
       dt_trace_write show when each thing would happen. Between two ranks the clocks agree where
       they exchange data. dt_test does not advance the clock: wait with dt_wait */
    double (*seconds)(void *user, const dt_dry_kernel *kernel);
    void *user; /* passed to `seconds` */
    double now; /* the virtual clock, in seconds */
    /* number of FLOPs: 2 m n k for each matrix product. Attention counts as if it had no mask, but
       pairs of chunks that dt_cp_attention skips count 0 */
    double flops;
    size_t kernel_calls;    /* without the sums of collectives */
    uintptr_t next_address; /* internal: offset of the next allocation's imaginary address */
    dt_host host;           /* internal: the context's own host table */
} dt_dry;
/* [local] Makes the context a dry-run context. Must be the first call on the context, before it has
   tensors. The caller owns *dry, zeroes it before the call and may read it at any time; *dry must
   outlive the context. Dry runs do not work in forked ranks or over MPI. Fails with DT_ERR_ARG if
   the context has tensors, and with DT_ERR_UNSUPPORTED if dry->seconds is set and the ranks are not
   threads. */
DT_API dt_status dt_dry_begin(dt_ctx *ctx, dt_dry *dry);

// ==== 11. Planner ===============================================================================

/* Planner: predicts how long one training step of a transformer takes under a layout, and how much
   memory each rank needs, from a closed form. A dry run (section 10) counts bytes exactly, but
   needs the program and the ranks; a closed form takes about a microsecond, so that a search can
   compare all layouts. It knows no program: a profile says what a training system does.

       step = (pipeline + bubble) (1 + jitter) + exposed gradient sync + optimizer

       rank 0   F F F F . . . B F B F B . B . B . B     m micro-batches of the slowest stage,
       rank 1   . F F F . . B F B F B F B . B . B .     and the bubble: the other stages' time
       rank 2   . . F F . B F B F B F B F B . B . .     for one micro-batch, or its 1/v, 1/3 or
       rank 3   . . . F B F B F B F B F B F B . . .     1/6 under other schedules (section 6)

   One layer takes the time of its GPU (products at a measured efficiency, attention, pointwise ops
   limited by memory bandwidth, collectives of tp) or the time in which the host launches it,
   whichever is longer. Gradient traffic of dp hides behind the last backward. Rooflines with
   measured efficiencies are Calculon's idea (M. Isaev et al., SC 2023). Collectives and activations
   are counted as in V. Korthikanti et al., arXiv:2205.05198. */

/* Sizes of a transformer. Fields that may be 0 say what 0 means. */
typedef struct dt_plan_model {
    int layers, width, heads;
    int kv_heads; /* 0: as many as heads */
    int ffn;      /* inner width of the MLP, or of one expert */
    /* 1: gated MLP of three matrices, RMS norms, rotary positions, no biases (Llama); 0: two
       matrices, layer norms, learned positions and biases (GPT-2) */
    int gated;
    int vocab, seq;
    int tied;      /* 1: the embedding is also the matrix of the output */
    int experts;   /* mixture of experts: experts of a layer; 0: dense */
    int top_k;     /* experts per token; 0: 1 */
    int moe_every; /* every n-th layer has experts; 0: each */
} dt_plan_model;

enum { DT_RECOMPUTE_NONE = 0, DT_RECOMPUTE_SELECTIVE, DT_RECOMPUTE_FULL };

/* Everything that decides how one step is distributed. A zeroed field means what it means in
   dt_mesh_desc and dt_schedule_desc, but mesh.dp 0 means 1: there is no total to divide. */
typedef struct dt_layout {
    dt_mesh_desc mesh; /* expert_tp and tp_overlap are not used */
    int zero;          /* ZeRO stage, 0 to 3 */
    int shard_group;   /* ranks that share one copy of the sharded state; 0: all replicas */
    int recompute;     /* DT_RECOMPUTE_*; SELECTIVE computes attention scores again */
    int schedule;      /* DT_SCHEDULE_* */
    int chunks;        /* v of INTERLEAVED; 0: 2 */
    int micro_batch;   /* sequences of one forward of one replica; 0: 1 */
    int accum;         /* micro-batches of a step; 0: 1 */
    int sp;            /* 1: sequence parallelism with tp */
} dt_layout;

/* The numbers of a profile: X(name, unit, meaning). One table makes the struct, its files and its
   fit. "Share" is a fraction of 1. A number is a data sheet's [d], what a system is known to do
   [k], or fitted to measured steps [f]; the shipped profiles say to which. */
#define DT_PLAN_PROFILE(X) \
    X(peak, "FLOP/s", "[d] peak of a matrix product in the training dtype") \
    X(hbm, "bytes/s", "[d] bandwidth of the GPU's memory") \
    X(memory, "bytes", "[f] memory a rank can use: what the driver, collectives and holes leave") \
    X(node, "GPUs", "[d] GPUs of a node, joined by the near links") \
    X(product, "share", "[f] of the peak that a large product reaches") \
    X(product_tokens, "tokens", "[f] n0: a product of n tokens reaches n / (n + n0) of it") \
    X(product_width, "columns", "[f] w0: and one of w columns w / (w + w0)") \
    X(attention, "share", "[f] of the peak that causal attention reaches") \
    X(layer_traffic, "bytes", "[f] moved by a layer's pointwise ops, per token and column") \
    X(logit_traffic, "bytes", "[f] moved by the loss, per logit") \
    X(host_layer, "s", "[f] in which the host launches a layer's forward and backward") \
    X(host_tp, "s", "[f] added with tp") \
    X(host_head_tp, "s", "[f] of the loss under tp = 4; grows with tp squared") \
    X(host_pp_tp, "s", "[f] added in a full pipeline over nodes, times tp ^ host_pp_power") \
    X(host_pp_power, "exponent", "[f]") \
    X(host_step, "s", "[f] of a step outside its layers") \
    X(jitter, "share", "[f] by which a step waits for its slowest rank, per doubling of nodes") \
    X(tp_near, "bytes/s", "[f] of a tp collective within a node") \
    X(tp_far, "bytes/s", "[f] of one over several nodes") \
    X(tp_far_latency, "s", "[f] of it, per rank of the ring") \
    X(dp_near, "bytes/s", "[f] of gradient traffic within a node, each rank") \
    X(dp_far, "bytes/s", "[f] between nodes, all ranks of a node together") \
    X(dp_far_decay, "exponent", "[f] it falls with (nodes spanned) ^ -decay") \
    X(dp_one_way, "share", "[k] of it that reduce-scatter and all-gather reach alone") \
    X(dp_overlap, "share", "[f] of the last backward that hides gradient traffic") \
    X(reduce_bytes, "bytes", "[k] sent per gradient element") \
    X(gather_latency, "s", "[f] of a layer's all-gather under ZeRO, per doubling of dp") \
    X(pp_link, "bytes/s", "[f] between pipeline stages") \
    X(pp_latency, "s", "[f] of a message between them") \
    X(optimizer_layer, "s", "[f] in which the host launches a layer's update") \
    X(optimizer_traffic, "bytes", "[f] moved by the update, per parameter it holds") \
    X(param_bytes, "bytes", "[k] of a parameter; shared by ZeRO-3") \
    X(grad_bytes, "bytes", "[k] of its gradients; shared by ZeRO-2") \
    X(optim_bytes, "bytes", "[k] of master and moments; shared by ZeRO-1") \
    X(act_width, "bytes", "[f] kept of a layer, per token and column of the width, divided by tp") \
    X(act_ffn, "bytes", "[f] ... and column of the MLP, divided by tp") \
    X(act_shared, "bytes", "[k] ... and column of the width, divided by tp only under sp") \
    X(act_scores, "bytes", "[k] ... head and key: 0 with flash attention") \
    X(act_gathered, "bytes", "[f] work space under tp, per token and column, whole") \
    X(act_ahead, "bytes", "[f] more of it that waits for the GPU where pp is 1; given up if full") \
    X(logit_bytes, "bytes", "[f] kept per logit") \
    X(logit_count, "logits", "[k] that exist at once; 0: all of a micro-batch") \
    X(base_bytes, "bytes", "[f] of an empty program") \
    X(partition, "rule", "[k] of layers into stages: 0 even, 1 by cost thresholds (nanotron)")

typedef struct dt_plan_profile {
    const char *name;
#define DT__PLAN_FIELD(field, unit, meaning) double field;
    DT_PLAN_PROFILE(DT__PLAN_FIELD)
#undef DT__PLAN_FIELD
} dt_plan_profile;

/* What one step costs the busiest rank. The parts of the seconds add up to `seconds`, the classes
   of the bytes to `bytes`; time that something else hides counts nowhere. */
typedef struct dt_plan_cost {
    double seconds;
    double compute, bubble;
    double tp, cp, ep, pp, dp; /* exposed traffic along each axis */
    double optimizer;          /* the update, and what belongs to the step alone */
    double bytes;              /* of the stage that needs most */
    double params, grads, optim, acts, logits, base;
    double parameters; /* of the whole model, each once */
    double tokens_per_s_gpu;
    /* model FLOPs / (seconds x peak). Forward and backward count 6 FLOPs for each parameter of a
       product that a token meets and 12 layers x width x seq for attention, without the causal mask
       and without recompute (A. Chowdhery et al., arXiv:2204.02311, appendix B) */
    double mfu;
    int stages_without_layers; /* most systems cannot run such a layout */
} dt_plan_cost;

/* [local] Predicts one step. Cheap enough for 10^5 layouts: it allocates nothing. Returns
   DT_ERR_ARG, and a zeroed cost, if a pointer is NULL, a size is negative or a needed one 0, or
   there are more than 1,024 pipeline stages. A layout that does not fit the profile's memory is
   predicted too: compare cost->bytes with profile->memory. */
DT_API dt_status dt_plan_estimate(const dt_plan_model *model, const dt_layout *layout,
    const dt_plan_profile *profile, dt_plan_cost *cost);
/* [local] The shipped profiles and their number. dt_plan_profile_of returns the one with this name,
   or NULL. */
DT_API const dt_plan_profile *dt_plan_profiles(int *n);
DT_API const dt_plan_profile *dt_plan_profile_of(const char *name);

/* One layout of a plan. */
typedef struct dt_plan_row {
    dt_layout layout;
    dt_plan_cost cost;
    /* bytes of the rank that needs most: dt_plan_desc.bytes if it is given, else cost.bytes */
    double bytes;
    /* the largest part of the step beside compute if it takes a fifth of it, else "compute":
       "bubble", "tp", "cp", "ep", "pp", "dp" or "optimizer" */
    const char *limited_by;
} dt_plan_row;

typedef struct dt_plan_desc {
    const dt_plan_model *model;
    const dt_plan_profile *profile;
    int gpus;
    int batch;     /* sequences of one optimizer step, over all GPUs */
    double memory; /* bytes that a rank may use; 0: the profile's */
    /* NULL, or returns 1 if the program cannot run the layout, or the user does not want it */
    int (*refuses)(const dt_layout *layout, void *user);
    /* NULL, or returns the bytes of the rank that needs most, for example by a dry run of the
       program with phantom ranks; below 0: the program refuses the layout. Called for the fastest
       layouts until enough of them fit */
    double (*bytes)(const dt_layout *layout, void *user);
    void *user; /* passed to both */
} dt_plan_desc;

/* The result of dt_plan_search. */
typedef struct dt_plan_found {
    int rows, too_big; /* numbers of elements written */
    int64_t tried;     /* layouts that were compared */
} dt_plan_found;

/* [local] Planner search: compares every layout whose sizes divide (dp x tp x cp x pp x ep = gpus;
   ZeRO stages, recompute, schedules, chunks, micro-batches) by dt_plan_estimate. Writes the fastest
   `max` that fit into the memory to `rows`, the fastest first. Writes to `too_big` the fastest
   `max_too_big` of those that do not fit by their estimate and are faster than the first row; if
   nothing fits, the layout that needs least memory comes first. With desc.bytes, the program is
   asked for at most the 8 max fastest layouts that fit by their estimate, so there may be fewer
   than `max` rows although others would fit. Either array may be NULL with a maximum of 0. Returns
   DT_ERR_ARG if a size is impossible, DT_ERR_MEM if memory runs out. */
DT_API dt_status dt_plan_search(dt_plan_desc desc, dt_plan_row *rows, int max, dt_plan_row *too_big,
    int max_too_big, dt_plan_found *found);
/* [local] Finds the fastest way to make a layout fit without another mesh: a higher ZeRO stage,
   more recompute, micro-batches of one sequence, or several of them. Goes by estimates alone,
   without desc.bytes. Returns 1 and sets *fits, or returns 0 if they do not suffice. */
DT_API int dt_plan_would_fit(dt_plan_desc desc, const dt_layout *layout, dt_plan_row *fits);

/* Call sites, see section 4 of dt_tensor.h. */
#define dt_mesh_make(ctx, ...) dt_mesh_make(dt_ctx_here(ctx, DT_SITE), __VA_ARGS__)
#define dt_kv_split(ctx, ...) dt_kv_split(dt_ctx_here(ctx, DT_SITE), __VA_ARGS__)
#define dt_distribute(ctx, ...) dt_distribute(dt_ctx_here(ctx, DT_SITE), __VA_ARGS__)
#define dt_pipe_run(ctx, ...) dt_pipe_run(dt_ctx_here(ctx, DT_SITE), __VA_ARGS__)
#define dt_pipe_gather_spans(comm, ...) dt_pipe_gather_spans(DT_HERE(comm), __VA_ARGS__)
#define dt_count_labels(comm, ...) dt_count_labels(DT_HERE(comm), __VA_ARGS__)
#define dt_redistribute(x, ...) dt_redistribute(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_all_to_all_rows(x, ...) dt_all_to_all_rows(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_tp_enter(x, ...) dt_tp_enter(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_column_linear(x, ...) dt_column_linear(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_row_linear(x, ...) dt_row_linear(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_row_linear_at(x, ...) dt_row_linear_at(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_vocab_embedding(x, ...) dt_vocab_embedding(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_vocab_cross_entropy(x, ...) \
    dt_vocab_cross_entropy(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_vocab_linear_cross_entropy(x, ...) \
    dt_vocab_linear_cross_entropy(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_cp_attention(x, ...) dt_cp_attention(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_cp_attention_at(x, ...) dt_cp_attention_at(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_route(x, ...) dt_route(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_route_update_bias(bias, ...) \
    dt_route_update_bias(dt_tensor_here(bias, DT_SITE), __VA_ARGS__)
#define dt_dispatch(x, ...) dt_dispatch(dt_tensor_here(x, DT_SITE), __VA_ARGS__)
#define dt_combine(x, ...) dt_combine(dt_tensor_here(x, DT_SITE), __VA_ARGS__)

#ifdef __cplusplus
}
#endif
#endif /* DT_PARALLEL_H */

#if defined(DT_IMPLEMENTATION) && !defined(DT_PARALLEL_IMPL)
#define DT_PARALLEL_IMPL

#include "dt_comm.h"

DT__CPP_WARNINGS_OFF

DT__COLD_BEGIN

#ifdef __cplusplus
extern "C" {
#endif

// ==== 12. Implementation: process mesh ==========================================================

__extension__ typedef unsigned __int128 dt__uint128;
/* Returns x, but at most INT64_MAX. */
static int64_t dt__saturate(dt__uint128 x) { return x < INT64_MAX ? (int64_t)x : INT64_MAX; }

/* A string buffer in the caller's memory, which may be NULL or have 0 bytes. */
typedef struct dt__strbuf {
    char *text;
    size_t bytes, used;
} dt__strbuf;

static dt__strbuf dt__strbuf_in(char *text, size_t bytes) {
    dt__strbuf t = { text, text ? bytes : 0, 0 };
    if (t.bytes > 0) text[0] = 0;
    return t;
}

/* Appends to the buffer; cuts off what does not fit. Returns DT_ERR_ARG, because most of these
   texts say why a call is refused. */
static dt_status DT_PRINTF(2, 3) dt__strbuf_add(dt__strbuf *t, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    dt__append_list(t->text, t->bytes, &t->used, fmt, args);
    va_end(args);
    return DT_ERR_ARG;
}

/* An object that the program owns: a schedule, a sampler or a text dataset. dt__object is its first
   member. The object and its memory are in one arena, which is freed with the object, at the latest
   when the context ends. */
typedef struct dt__object {
    dt_ctx *ctx;
    dt_listener listener;
    dt__arena memory;
    void (*close)(struct dt__object *o); /* called before the memory is freed; may be NULL */
} dt__object;

/* Returns zeroed memory that is freed with the object. */
static void *dt__object_alloc(dt__object *o, size_t bytes) {
    void *p = dt__arena_alloc(o->ctx, &o->memory, bytes);
    if (p) memset(p, 0, bytes);
    return p;
}

static void dt__object_closing(dt_ctx *ctx, void *user) {
    dt__object *o = (dt__object *)user;
    if (o->close) o->close(o);
    dt__arena memory = o->memory; /* a copy, because the arena holds *o itself */
    dt__arena_free(ctx, &memory);
}

static void *dt__object_new(
    dt_ctx *ctx, size_t bytes, const char *what, void (*close)(dt__object *o)) {
    dt__object start = {
        .ctx = ctx, .memory = { .mem = DT_MEM_HOST, .what = what }, .close = close
    };
    dt__object *o = (dt__object *)dt__object_alloc(&start, bytes);
    if (!o) return NULL;
    *o = start;
    o->listener.closing = dt__object_closing;
    o->listener.user = o;
    dt_listen(ctx, &o->listener);
    return o;
}

static void dt__object_free(dt__object *o) {
    if (!o) return;
    dt_unlisten(o->ctx, &o->listener);
    dt__object_closing(o->ctx, o);
}

/* Returns an object whose construction has ended; frees it and returns NULL after a failure. */
static void *dt__object_made(dt__object *o) {
    if (dt_error(o->ctx) == DT_OK) return o;
    dt__object_free(o);
    return NULL;
}

/* Returns the largest divisor of n that is at most `most`. */
static int dt__divisor_up_to(int n, int most) {
    int d = most < n ? most : n;
    while (n % d != 0) d--;
    return d;
}

/* Checks that the experts can divide the ranks of a pipeline stage anew. */
static dt_status dt__mesh_check_folding(const dt_mesh_desc *sizes, dt__strbuf *t) {
    int ranks = sizes->dp * sizes->cp * sizes->tp, etp = sizes->expert_tp;
    if (ranks % etp == 0 && ranks / etp % sizes->ep == 0) return DT_OK;
    int choice = dt__divisor_up_to(ranks, etp);
    return dt__strbuf_add(t,
        "expert folding: ep %d x expert_tp %d does not divide dp %d x cp %d x tp %d = %d; use "
        "ep %d and expert_tp %d",
        sizes->ep, etp, sizes->dp, sizes->cp, sizes->tp, ranks,
        dt__divisor_up_to(ranks / choice, sizes->ep), choice);
}

dt_status dt_mesh_resolve(dt_mesh_desc *sizes, int ranks, char *text, size_t text_bytes) {
    dt__strbuf t = dt__strbuf_in(text, text_bytes);
    if (!sizes) return DT_ERR_ARG;
    int *axes[6] = { &sizes->dp, &sizes->tp, &sizes->cp, &sizes->pp, &sizes->ep,
        &sizes->expert_tp };
    char ep[24] = "";
    if (ranks < 1) return dt__strbuf_add(&t, "%d ranks; at least 1 is needed", ranks);
    if (sizes->tp_overlap < 0)
        return dt__strbuf_add(&t, "tp_overlap %d; use 0, or pieces", sizes->tp_overlap);
    for (int i = 0; i < 6; i++) {
        if (*axes[i] < 0) return dt__strbuf_add(&t, "an axis of %d ranks; use 1 or more", *axes[i]);
        if (i > 0 && i < 5 && *axes[i] == 0) *axes[i] = 1;
    }
    /* The product saturates at 2^31, above every possible number of ranks, so that it cannot
       overflow. */
    int64_t others = 1, limit = (int64_t)1 << 31;
    int factors = sizes->expert_tp ? 4 : 5; /* with expert folding, ep is no factor */
    for (int i = 1; i < factors; i++)
        others = others * *axes[i] < limit ? others * *axes[i] : limit;
    if (!sizes->expert_tp) snprintf(ep, sizeof ep, " x ep %d", sizes->ep);
    int64_t all = others * (sizes->dp ? sizes->dp : 1);
    if (ranks % others == 0 && sizes->dp == 0) sizes->dp = (int)(ranks / others);
    if (sizes->dp == 0) {
        int64_t next = ((ranks - 1) / others + 1) * others;
        return dt__strbuf_add(&t,
            "tp %d x cp %d x pp %d%s does not divide %d ranks; use %lld ranks or smaller axes",
            sizes->tp, sizes->cp, sizes->pp, ep, ranks, (long long)next);
    }
    if (sizes->dp * others != ranks) {
        char choice[40] = "";
        if (ranks % others == 0)
            snprintf(choice, sizeof choice, ", or use dp %d", (int)(ranks / others));
        return dt__strbuf_add(&t,
            "dp %d x tp %d x cp %d x pp %d%s = %lld, but there are %d ranks; use %lld ranks%s",
            sizes->dp, sizes->tp, sizes->cp, sizes->pp, ep, (long long)all, ranks, (long long)all,
            choice);
    }
    return sizes->expert_tp ? dt__mesh_check_folding(sizes, &t) : DT_OK;
}

/* One axis, or neighbouring axes taken together, as digits of a rank's number: the coordinate is
   rank / stride % size. An axis in between that does not belong to them is skipped: skipped_stride,
   skipped_size; size 1 means none. */
typedef struct dt__mesh_digits {
    int stride, size, skipped_stride, skipped_size;
} dt__mesh_digits;

/* A dt_color_fn: ranks whose numbers differ only in these digits have the same color. The key is
   what the digits contribute to the rank's number. */
static int dt__mesh_color(int rank, int *key, void *user) {
    const dt__mesh_digits *d = (const dt__mesh_digits *)user;
    *key = rank / d->stride % d->size * d->stride -
           rank / d->skipped_stride % d->skipped_size * d->skipped_stride;
    return rank - *key;
}

/* Returns the group of the ranks whose numbers differ from this rank's only in these digits, or
   NULL if it has one rank. */
static dt_comm *dt__mesh_axis(
    dt_comm *world, dt__mesh_digits digits, const char *name, dt_axis axis) {
    if (digits.size == digits.skipped_size) return NULL;
    dt_comm *comm = dt_comm_split_by(world, dt__mesh_color, &digits, name);
    dt_comm_set_axis(comm, axis);
    if (comm) ((dt_group *)comm)->pipeline = axis == DT_AXIS_PP;
    return comm;
}

/* Expert folding: makes the groups in which the experts arrange the ranks of a pipeline stage. */
static void dt__mesh_fold(dt_mesh *mesh) {
    const dt_mesh_desc *n = &mesh->sizes;
    int stage = n->dp * n->cp * n->tp, copy = n->ep * n->expert_tp; /* numbers of ranks */
    int in_copy = dt_comm_rank(mesh->world) % stage % copy;
    dt__mesh_digits expert_tp = { 1, n->expert_tp, 1, 1 }, ep = { n->expert_tp, n->ep, 1, 1 },
                    dispatch = { 1, copy, 1, 1 }, data = { copy, stage / copy, 1, 1 };
    mesh->coord.expert_tp = in_copy % n->expert_tp;
    mesh->coord.ep = in_copy / n->expert_tp;
    mesh->expert_tp = dt__mesh_axis(mesh->world, expert_tp, "expert-tp", DT_AXIS_TP);
    mesh->ep = dt__mesh_axis(mesh->world, ep, "ep", DT_AXIS_EP);
    mesh->dispatch =
        n->expert_tp == 1 ? mesh->ep : dt__mesh_axis(mesh->world, dispatch, "dispatch", DT_AXIS_EP);
    mesh->expert_data = dt__mesh_axis(mesh->world, data, "experts", DT_AXIS_DP);
    mesh->replica = mesh->coord.dp;
    mesh->replicas = n->dp;
}

static dt_mesh dt__mesh_make(dt_ctx *ctx, dt_mesh_desc desc) {
    char why[240];
    dt_mesh none, mesh;
    memset(&none, 0, sizeof none);
    none.replicas = 1; /* callers may divide by replicas before they check the error */
    if (dt_error(ctx) != DT_OK) return none;
    dt_comm *world = dt_world(ctx);
    int rank = dt_comm_rank(world);
    if (dt_mesh_resolve(&desc, dt_comm_size(world), why, sizeof why) != DT_OK) {
        dt_fail(ctx, DT_ERR_ARG, "dt_mesh_make: %s", why);
        return none;
    }
    mesh = none;
    mesh.world = world;
    mesh.sizes = desc;
    /* from the axis that varies fastest to the slowest */
    enum { TP, CP, EP, DP, PP, AXES };
    static const char *const names[AXES] = { "tp", "cp", "ep", "dp", "pp" };
    const dt_axis axes[AXES] = { DT_AXIS_TP, DT_AXIS_CP, DT_AXIS_EP, DT_AXIS_DP, DT_AXIS_PP };
    const int ep = desc.expert_tp ? 1 : desc.ep; /* ep as an axis of its own */
    const int sizes[AXES] = { desc.tp, desc.cp, ep, desc.dp, desc.pp };
    int *coords[AXES] = { &mesh.coord.tp, &mesh.coord.cp, &mesh.coord.ep, &mesh.coord.dp,
        &mesh.coord.pp };
    dt_comm **groups[AXES] = { &mesh.tp, &mesh.cp, &mesh.ep, &mesh.dp, &mesh.pp };
    int strides[AXES];
    for (int i = 0, stride = 1; i < AXES; stride *= sizes[i++]) {
        dt__mesh_digits digits = { strides[i] = stride, sizes[i], 1, 1 };
        *coords[i] = rank / stride % sizes[i];
        *groups[i] = dt__mesh_axis(world, digits, names[i], axes[i]);
    }
    if (mesh.tp) mesh.tp->tp_overlap = desc.tp_overlap;
    /* cp, ep and dp are neighbours */
    dt__mesh_digits data = { strides[CP], desc.dp * ep * desc.cp, 1, 1 }, experts = data;
    mesh.data = data.size == desc.dp ? mesh.dp : dt__mesh_axis(world, data, "data", DT_AXIS_DP);
    if (desc.expert_tp) {
        dt__mesh_fold(&mesh);
        return dt_error(ctx) == DT_OK ? mesh : none;
    }
    experts.skipped_stride = strides[EP], experts.skipped_size = desc.ep;
    mesh.expert_tp = mesh.tp;
    mesh.dispatch = mesh.ep;
    mesh.expert_data = desc.ep == 1   ? mesh.data
                       : desc.cp == 1 ? mesh.dp
                                      : dt__mesh_axis(world, experts, "experts", DT_AXIS_DP);
    mesh.replica = mesh.coord.dp * desc.ep + mesh.coord.ep;
    mesh.replicas = desc.dp * desc.ep;
    return dt_error(ctx) == DT_OK ? mesh : none;
}

// ==== 13. Placements: code ======================================================================

/* dt_redistribute is a table of nine rows. A row is a function that redistributes one dense array
   over a group, so a new redistribution is a new row. The backward looks up the row of the dual
   placements in the same table. The dual of COPY is PARTIAL and the reverse; REPLICATE and SHARD
   are their own duals. For example:

       forward          x:  SHARD(1) --------- all-gather -------> COPY       :y
       backward        dx:  SHARD(1) <------ reduce-scatter ------ PARTIAL    :dy

   A shard along any dimension but the first is strided in memory, while collectives send contiguous
   arrays. dt__extract_shard and dt__insert_shards pack and unpack shards. */

/* Arguments of the function of a table row, which redistributes a dense array over a group. */
typedef struct dt__redist {
    dt_ctx *ctx;
    dt_comm *comm;
    dt_dtype dtype;
    const void *in;
    /* scratch holds as many buffers as dt__redist_row.buffers says, each as large as the larger of
       `in` and `out` */
    void *out, *scratch;
    dt_shape in_shape, out_shape;
    int from_dim, to_dim; /* sharded dimension before and after; used if the placement is SHARD */
} dt__redist;

/* A dense array viewed as `outer` rows. The dimensions before the sharded one number the rows; a
   row holds the sharded dimension and all later dimensions. A row has row_bytes bytes; shard_bytes
   of them belong to one shard. */
typedef struct dt__shard_view {
    size_t outer, shard_bytes, row_bytes;
} dt__shard_view;

static dt__shard_view dt__shard_view_of(dt_shape shape, int dim, int parts, dt_dtype dtype) {
    dt__shard_view v = { 1, dt_dtype_size(dtype), 0 };
    for (int i = 0; i < dim; i++) v.outer *= (size_t)shape.d[i];
    for (int i = dim; i < shape.nd; i++) v.shard_bytes *= (size_t)shape.d[i];
    v.row_bytes = v.shard_bytes;
    v.shard_bytes /= (size_t)parts;
    return v;
}

static dt_status dt__copy_rows(const dt__redist *m, void *out, size_t out_stride, const void *in,
    size_t in_stride, size_t rows, size_t row_bytes) {
    dt_copy_args a = { .out = out,
        .in = in,
        .rows = rows,
        .row_bytes = row_bytes,
        .out_stride = out_stride,
        .in_stride = in_stride };
    return DT__KERNEL(m->ctx, "dt_redistribute", copy, &a);
}

/* Copies one shard of a full array (shape `full`, along dim) to a dense array. */
static dt_status dt__extract_shard(
    const dt__redist *m, dt_shape full, int dim, int shard, void *dense, const void *in) {
    dt__shard_view v = dt__shard_view_of(full, dim, dt_comm_size(m->comm), m->dtype);
    const char *from = (const char *)in + (size_t)shard * v.shard_bytes;
    return dt__copy_rows(m, dense, v.shard_bytes, from, v.row_bytes, v.outer, v.shard_bytes);
}

/* Copies all shards of a full array to `dense`, one after another; dt__insert_shards does the
   opposite. */
static dt_status dt__extract_shards(
    const dt__redist *m, dt_shape full, int dim, void *dense, const void *in) {
    int n = dt_comm_size(m->comm);
    size_t bytes = (size_t)dt_count(full) / (size_t)n * dt_dtype_size(m->dtype);
    for (int r = 0; r < n; r++)
        if (dt__extract_shard(m, full, dim, r, (char *)dense + (size_t)r * bytes, in) != DT_OK)
            return dt_error(m->ctx);
    return DT_OK;
}

static dt_status dt__insert_shards(
    const dt__redist *m, dt_shape full, int dim, const void *dense, void *out) {
    dt__shard_view v = dt__shard_view_of(full, dim, dt_comm_size(m->comm), m->dtype);
    for (size_t r = 0; r < (size_t)dt_comm_size(m->comm); r++)
        if (dt__copy_rows(m, (char *)out + r * v.shard_bytes, v.row_bytes,
                (const char *)dense + r * v.outer * v.shard_bytes, v.shard_bytes, v.outer,
                v.shard_bytes) != DT_OK)
            return dt_error(m->ctx);
    return DT_OK;
}

static dt_status dt__redist_identity(const dt__redist *m) {
    size_t bytes = (size_t)dt_count(m->in_shape) * dt_dtype_size(m->dtype);
    return m->out == m->in ? DT_OK : dt__copy_rows(m, m->out, bytes, m->in, bytes, 1, bytes);
}

static dt_status dt__redist_all_reduce(const dt__redist *m) {
    return dt_all_reduce(m->comm, m->in, m->out, (size_t)dt_count(m->in_shape), m->dtype, DT_SUM);
}

static dt_status dt__redist_slice(const dt__redist *m) {
    return dt__extract_shard(m, m->in_shape, m->to_dim, dt_comm_rank(m->comm), m->out, m->in);
}

static dt_status dt__redist_keep_first(const dt__redist *m) {
    if (dt_comm_rank(m->comm) == 0) return dt__redist_identity(m);
    return dt__fill(m->ctx, m->dtype, m->out, (size_t)dt_count(m->in_shape), 0);
}

static dt_status dt__redist_all_gather(const dt__redist *m) {
    dt_status status =
        dt_all_gather(m->comm, m->in, m->scratch, (size_t)dt_count(m->in_shape), m->dtype);
    return status == DT_OK ? dt__insert_shards(m, m->out_shape, m->from_dim, m->scratch, m->out)
                           : status;
}

static dt_status dt__redist_reduce_scatter(const dt__redist *m) {
    dt_status status = dt__extract_shards(m, m->in_shape, m->to_dim, m->scratch, m->in);
    return status == DT_OK ? dt_reduce_scatter(m->comm, m->scratch, m->out,
                                 (size_t)dt_count(m->out_shape), m->dtype, DT_SUM)
                           : status;
}

/* in is full along to_dim and sharded along from_dim; out is full along from_dim and sharded along
   to_dim. An all-to-all cannot run in place, so the scratch holds the sent data followed by the
   received data. */
static dt_status dt__redist_all_to_all(const dt__redist *m) {
    size_t count = (size_t)dt_count(m->in_shape);
    void *received = dt__element(m->scratch, m->dtype, (int64_t)count);
    dt_status status = dt__extract_shards(m, m->in_shape, m->to_dim, m->scratch, m->in);
    if (status == DT_OK)
        status = dt_all_to_all(
            m->comm, m->scratch, received, count / (size_t)dt_comm_size(m->comm), m->dtype);
    return status == DT_OK ? dt__insert_shards(m, m->out_shape, m->from_dim, received, m->out)
                           : status;
}

typedef struct dt__redist_row {
    int from, to, buffers;
    dt_status (*move)(const dt__redist *m);
} dt__redist_row;

#define DT__ROW(from_kind, to_kind, n, name) \
    { \
        .from = DT_PLACEMENT_##from_kind, .to = DT_PLACEMENT_##to_kind, .buffers = (n), \
        .move = dt__redist_##name \
    }
static const dt__redist_row dt__redist_table[] = {
    DT__ROW(PARTIAL, REPLICATE, 0, all_reduce),
    DT__ROW(REPLICATE, COPY, 0, identity),
    DT__ROW(SHARD, COPY, 1, all_gather),
    DT__ROW(PARTIAL, SHARD, 1, reduce_scatter),
    DT__ROW(SHARD, REPLICATE, 1, all_gather),
    DT__ROW(REPLICATE, SHARD, 0, slice),
    DT__ROW(SHARD, SHARD, 2, all_to_all),
    DT__ROW(REPLICATE, PARTIAL, 0, keep_first),
    DT__ROW(COPY, REPLICATE, 0, identity),
};
#undef DT__ROW

static const dt__redist_row *dt__redist_find(dt_placement from, dt_placement to) {
    for (size_t i = 0; i < sizeof dt__redist_table / sizeof *dt__redist_table; i++)
        if (dt__redist_table[i].from == from.kind && dt__redist_table[i].to == to.kind)
            return &dt__redist_table[i];
    return NULL;
}

/* Returns the placement of the gradient of a tensor with placement p. */
static dt_placement dt__placement_dual(dt_placement p) {
    if (p.kind == DT_PLACEMENT_COPY) return DT_PARTIAL;
    if (p.kind == DT_PLACEMENT_PARTIAL) return DT_COPY;
    return p;
}

/* Runs the row from -> to of the table. The result is added to m.out if accumulate is 1, and
   replaces it if accumulate is 0. */
static dt_status dt__redist_run(dt__redist m, dt_placement from, dt_placement to, int accumulate) {
    const dt__redist_row *row = dt__redist_find(from, to);
    size_t in = (size_t)dt_count(m.in_shape), out = (size_t)dt_count(m.out_shape),
           size = dt_dtype_size(m.dtype);
    size_t larger = (in > out ? in : out) * size;
    void *sum = m.out;
    if (!row) return DT_ERR_UNSUPPORTED;
    m.from_dim = from.dim;
    m.to_dim = to.dim;
    size_t need = (size_t)(row->buffers + (accumulate != 0)) * larger;
    char *work = need ? (char *)dt_scratch(m.ctx, need) : NULL;
    if (need && !work) return dt_error(m.ctx);
    m.scratch = work;
    if (accumulate && work) m.out = work + (size_t)row->buffers * larger;
    dt_status status = row->move(&m);
    if (status != DT_OK || !accumulate) return status;
    return dt__accumulate(m.ctx, m.dtype, sum, m.out, out, 1);
}

typedef struct dt__redist_saved {
    dt_comm *comm;
    dt_placement from, to;
} dt__redist_saved;

/* Arguments of the redistribution from x to y. */
static dt__redist dt__redist_of(const dt_tensor *x, dt_tensor *y, dt_comm *comm) {
    dt__redist m;
    memset(&m, 0, sizeof m);
    m.ctx = x->ctx;
    m.comm = comm;
    m.dtype = x->dtype;
    m.in = x->data;
    m.in_shape = x->shape;
    m.out = y->data;
    m.out_shape = y->shape;
    return m;
}

/* ---- redistributions in pieces ---- */

/* A redistribution whose pieces travel while a linear op computes (dt__flow, section 16 of
   dt_tensor.h). Three rows of the table can do so, and each piece is a nonblocking collective:

       all-gather       incoming    starts all pieces at once; the op waits for one after another
       reduce-scatter   outgoing    starts a piece when the op has computed its rows
       all-reduce       outgoing    likewise

   packed holds the pieces one after another, each as (shards, rows of the piece, width), because a
   collective sends contiguous arrays. */
typedef struct dt__redist_flow {
    dt__flow base; /* must be first */
    dt__redist m;  /* the whole arrays */
    int64_t width; /* elements in a row */
    dt_work **works;
    char *packed;
    /* of an outgoing gradient: the op whose backward this is, and memory for the result if other
       ops may add to the gradient meanwhile */
    dt_node *node;
    char *aside;
} dt__redist_flow;

/* the fewest rows of the whole array that a piece may have */
#ifndef DT__MIN_PIECE_ROWS
#define DT__MIN_PIECE_ROWS 8
#endif

/* Returns in how many pieces an array of this full shape moves over comm; 1: not in pieces. */
static int dt__flow_pieces(const dt_comm *comm, dt_shape full, dt_placement sharded) {
    int64_t rows = 1, most;
    int is_sharded = sharded.kind == DT_PLACEMENT_SHARD;
    if (!comm || comm->tp_overlap < 2 || full.nd < 2) return 1;
    if (is_sharded && sharded.dim >= full.nd - 1) return 1;
    for (int i = 0; i < full.nd - 1; i++) rows *= full.d[i];
    most = rows / DT__MIN_PIECE_ROWS;
    if (is_sharded && most > rows / dt_comm_size(comm)) most = rows / dt_comm_size(comm);
    if (most > comm->tp_overlap) most = comm->tp_overlap;
    return most < 2 ? 1 : (int)most;
}

static dt_status dt__flow_receive(dt__flow *flow);
static dt_status dt__flow_send(dt__flow *flow);

/* Makes a flow of an array of the shape `full`; `sharded` is the placement of its other end. */
static dt__redist_flow *dt__flow_make(
    dt__redist m, dt_shape full, dt_placement sharded, int pieces, int incoming) {
    dt__redist_flow *f = (dt__redist_flow *)dt__meta(m.ctx, sizeof *f);
    if (!f) return NULL;
    f->works = (dt_work **)dt__meta(m.ctx, (size_t)pieces * sizeof(dt_work *));
    if (!f->works) return NULL;
    int dim = sharded.kind == DT_PLACEMENT_SHARD ? sharded.dim : 0;
    f->m = m;
    f->base.incoming = incoming;
    f->base.pieces = pieces;
    f->base.next = incoming ? dt__flow_receive : dt__flow_send;
    f->base.shards = sharded.kind == DT_PLACEMENT_SHARD ? dt_comm_size(m.comm) : 1;
    f->base.sequences = f->base.rows = 1;
    for (int i = 0; i < full.nd - 1; i++)
        *(i < dim ? &f->base.sequences : &f->base.rows) *= full.d[i];
    f->base.rows /= f->base.shards;
    f->width = full.d[full.nd - 1];
    return f;
}

static char *dt__flow_buffer(const dt__redist_flow *f, int64_t shards) {
    int64_t count = f->base.sequences * f->base.rows * f->width * shards;
    size_t bytes = ((size_t)count * dt_dtype_size(f->m.dtype) + 63) / 64 * 64;
    return (char *)dt__buffer_acquire(f->m.ctx, DT_MEM_COMM, bytes);
}

/* Copies piece p between its rows of the whole array and `packed`. */
static dt_status dt__flow_copy(const dt__redist_flow *f, int p, void *array, int pack) {
    const dt__flow *b = &f->base;
    int64_t begin = dt__flow_bound(b, p), end = dt__flow_bound(b, p + 1), row, count;
    for (int64_t shard = 0; shard < b->shards; shard++)
        for (int64_t at = begin; at < end;) {
            int64_t packed_row = begin * b->shards + shard * (end - begin) + at - begin;
            dt__flow_range(b, p, shard, &at, &row, &count);
            char *there = (char *)dt__element(f->packed, f->m.dtype, packed_row * f->width);
            char *here = (char *)dt__element(array, f->m.dtype, row * f->width);
            size_t bytes = (size_t)(count * f->width) * dt_dtype_size(f->m.dtype);
            if (dt__copy_rows(&f->m, pack ? there : here, bytes, pack ? here : there, bytes, 1,
                    bytes) != DT_OK)
                return dt_error(f->m.ctx);
        }
    return DT_OK;
}

/* Starts the collective of piece p. */
static void dt__flow_start(dt__redist_flow *f, int p) {
    const dt__redist *m = &f->m;
    int64_t begin = dt__flow_bound(&f->base, p) * f->width,
            count = dt__flow_bound(&f->base, p + 1) * f->width - begin;
    const void *in = dt__element(m->in, m->dtype, begin);
    void *out = dt__element(f->aside ? f->aside : m->out, m->dtype, begin);
    char *packed =
        f->packed ? (char *)dt__element(f->packed, m->dtype, begin * f->base.shards) : NULL;
    f->works[p] =
        f->base.incoming ? dt_all_gather_start(m->comm, in, packed, (size_t)count, m->dtype)
        : packed ? dt_reduce_scatter_start(m->comm, packed, out, (size_t)count, m->dtype, DT_SUM)
                 : dt_all_reduce_start(m->comm, in, out, (size_t)count, m->dtype, DT_SUM);
}

/* Waits for the next piece of an all-gather. After a failure of the context, ends the operation. */
static dt_status dt__flow_receive(dt__flow *flow) {
    dt__redist_flow *f = (dt__redist_flow *)(void *)flow;
    dt_status status = dt_wait(f->m.ctx, f->works[flow->done]);
    if (status == DT_OK) status = dt__flow_copy(f, flow->done, f->m.out, 0);
    if (++flow->done < flow->pieces) return status;
    dt__buffer_release(f->m.ctx, f->packed);
    f->packed = NULL;
    return status;
}

/* Starts m in pieces if it is an all-gather. Returns NULL if it is not, or after a failure. */
static dt__flow *dt__flow_gather(dt__redist m, dt_placement from, dt_placement to, int pieces) {
    if (dt__redist_find(from, to)->move != dt__redist_all_gather) return NULL;
    dt__redist_flow *f = dt__flow_make(m, m.out_shape, from, pieces, 1);
    if (!f || !(f->packed = dt__flow_buffer(f, f->base.shards))) return NULL;
    f->base.source = m.in;
    f->base.next_gather = m.ctx->gathers;
    m.ctx->gathers = &f->base;
    for (int p = 0; p < pieces && dt_error(m.ctx) == DT_OK; p++) dt__flow_start(f, p);
    return &f->base;
}

/* Makes the flow in which y's gradient will leave: the backward of the redistribution that made
   y. NULL if it is not cut into pieces. */
static dt__flow *dt__flow_back(dt_tensor *y) {
    const dt__redist_saved *saved = (const dt__redist_saved *)y->producer->saved;
    int pieces = dt__flow_pieces(saved->comm, y->shape, saved->from);
    if (pieces < 2 || dt__owner(y) != y) return NULL;
    dt__redist m = dt__redist_of(y, y->producer->in[0], saved->comm);
    dt__redist_flow *f = dt__flow_make(m, y->shape, saved->from, pieces, 0);
    if (!f) return NULL;
    f->node = y->producer;
    return &f->base;
}

/* Before the first piece of a gradient leaves: finds the memory of the input's gradient. */
static dt_status dt__flow_open_grad(dt__redist_flow *f) {
    dt_tensor *x = f->node->in[0];
    int accumulate = 0;
    f->m.in = f->node->out->grad;
    if (x->base || x->readers > 1 || x->grad)
        f->aside = dt__flow_buffer(f, 1);
    else
        f->m.out = dt_grad_raw(f->node, 0, &accumulate);
    return dt_error(f->m.ctx);
}

/* Lets the next piece leave: its rows have been computed. */
static dt_status dt__flow_send(dt__flow *flow) {
    dt__redist_flow *f = (dt__redist_flow *)(void *)flow;
    dt_ctx *ctx = f->m.ctx;
    if (flow->done == 0) {
        if (f->node && dt__flow_open_grad(f) != DT_OK) return dt_error(ctx);
        if (flow->shards > 1) f->packed = dt__flow_buffer(f, flow->shards);
        if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    }
    if (f->packed && dt__flow_copy(f, flow->done, (void *)(uintptr_t)f->m.in, 1) != DT_OK)
        return dt_error(ctx);
    dt__flow_start(f, flow->done++);
    return dt_error(ctx);
}

/* Waits until all pieces that have left are reduced. */
static dt_status dt__flow_wait(dt__redist_flow *f) {
    dt_ctx *ctx = f->m.ctx;
    for (int p = 0; p < f->base.done; p++) dt_wait(ctx, f->works[p]);
    dt__buffer_release(ctx, f->packed);
    f->packed = NULL;
    return dt_error(ctx);
}

/* The end of a redistribution of a gradient whose pieces have left. */
static dt_status dt__flow_end_grad(dt__redist_flow *f) {
    dt_ctx *ctx = f->m.ctx;
    dt_tensor *x = f->node->in[0];
    int accumulate = 0;
    dt__run_deferred(ctx, f->node);
    void *grad =
        dt__flow_wait(f) == DT_OK && f->aside ? dt_grad_raw(f->node, 0, &accumulate) : NULL;
    if (grad) dt__accumulate(ctx, x->dtype, grad, f->aside, (size_t)dt_count(x->shape), accumulate);
    dt__buffer_release(ctx, f->aside);
    f->aside = NULL;
    return dt_error(ctx);
}

/* Returns 1 if the gradient of in[0] may arrive in pieces: only the op that made in[0] reads this
   gradient, and that op's backward is the next one. */
static int dt__flow_can_arrive(const dt_node *n) {
    const dt_tensor *x = n->in[0];
    return x->producer && x->producer == n->prev && !x->base && !x->grad &&
           x->needs_grad != DT__KEEP_GRAD;
}

/* The backward of a redistribution p -> q redistributes the gradient from dual(q) to dual(p). */
static dt_status dt__redistribute_back(dt_node *n) {
    const dt__redist_saved *saved = (const dt__redist_saved *)n->saved;
    dt_placement from = dt__placement_dual(saved->to), to = dt__placement_dual(saved->from);
    dt_tensor *x = n->in[0];
    int accumulate = 0, can_arrive = dt__flow_can_arrive(n);
    dt__flow *left = n->out->grad_flow;
    if (left && !left->incoming && left->done)
        return dt__flow_end_grad((dt__redist_flow *)(void *)left);
    dt__redist m = dt__redist_of(n->out, x, saved->comm);
    m.in = n->out->grad;
    m.out = dt_grad_raw(n, 0, &accumulate);
    if (!m.out) return dt_error(n->out->ctx);
    int pieces = can_arrive ? dt__flow_pieces(saved->comm, x->shape, from) : 1;
    if (pieces > 1 && (x->grad_flow = dt__flow_gather(m, from, to, pieces))) return DT_OK;
    return dt__redist_run(m, from, to, accumulate);
}

/* Gathers dropped data again. The op that reads them waits for them (dt__flow_arrive), and they are
   one piece, because a weight gradient needs all rows. */
static dt_status dt__redistribute_recompute(dt_node *n) {
    const dt__redist_saved *saved = (const dt__redist_saved *)n->saved;
    dt_placement from = saved->from, to = saved->to;
    dt__redist m = dt__redist_of(n->in[0], n->out, saved->comm);
    if (dt__flow_pieces(saved->comm, n->out->shape, from) > 1)
        n->out->flow = dt__flow_gather(m, from, to, 1);
    return n->out->flow ? dt_error(m.ctx) : dt__redist_run(m, from, to, 0);
}

/* Returns the local shape after the redistribution over n ranks. Its nd is -1 if a sharded
   dimension does not exist or n does not divide it. */
static dt_shape dt__redist_shape(dt_shape shape, int n, dt_placement from, dt_placement to) {
    int bad = (from.kind == DT_PLACEMENT_SHARD && (from.dim < 0 || from.dim >= shape.nd)) ||
              (to.kind == DT_PLACEMENT_SHARD && (to.dim < 0 || to.dim >= shape.nd));
    if (!bad && from.kind == DT_PLACEMENT_SHARD) shape.d[from.dim] *= n;
    if (!bad && to.kind == DT_PLACEMENT_SHARD) {
        bad = shape.d[to.dim] % n != 0;
        shape.d[to.dim] /= n;
    }
    if (bad) shape.nd = -1;
    return shape;
}

/* Returns 1 if the redistribution moves no data, so that the result is an alias of the input. */
static int dt__redist_is_alias(dt_placement from, dt_placement to) {
    return dt__redist_find(from, to)->move == dt__redist_identity;
}

/* Makes the result y of a redistribution of x. If transient is 1, y is a transient tensor: its data
   are dropped at the end of y's block, and the backward redistributes x again. */
static dt_tensor *dt__redist_make(
    dt_tensor *x, dt_comm *comm, dt_placement from, dt_placement to, int transient) {
    dt_ctx *ctx = x->ctx;
    if (!dt__redist_find(from, to)) {
        dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_redistribute(%s): no way from %s to %s; go through REPLICATE", x->name,
            dt__placement_text(from).s, dt__placement_text(to).s);
        return NULL;
    }
    dt_shape shape = dt__redist_shape(x->shape, dt_comm_size(comm), from, to);
    if (shape.nd < 0) {
        dt_fail(ctx, DT_ERR_SHAPE,
            "dt_redistribute(%s): %s from %s to %s over %d ranks: a dimension is missing or not "
            "divisible",
            x->name, dt__shape_text(x->shape).s, dt__placement_text(from).s,
            dt__placement_text(to).s, dt_comm_size(comm));
        return NULL;
    }
    /* only a recorded op can run again in the backward */
    transient = transient && x->needs_grad && !ctx->no_grad;
    dt_tensor *y = dt__redist_is_alias(from, to)
                       ? dt_alias(x)
                       : dt__new_output(ctx, x, x->dtype, shape, "dt_redistribute", transient);
    return y && dt__placement_set(y, x, (const dt_group *)comm, to) ? y : NULL;
}

/* Redistributes the data of x to those of y, which dt__redist_make has made. If y can arrive in
   pieces, the traffic is under way when this function returns. Returns y; NULL after a failure. */
static dt_tensor *dt__redist_data(
    dt_tensor *x, dt_tensor *y, dt_comm *comm, dt_placement from, dt_placement to) {
    dt_ctx *ctx = x->ctx;
    dt_status status = DT_OK;
    dt__redist m = dt__redist_of(x, y, comm);
    int pieces = dt__flow_pieces(comm, y->shape, from);
    if (to.kind == DT_PLACEMENT_COPY && pieces > 1) y->flow = dt__flow_gather(m, from, to, pieces);
    if (y->flow) {
        y->flow->next_arriving = ctx->arriving;
        ctx->arriving = y->flow;
    }
    if (!y->flow && !dt__redist_is_alias(from, to)) status = dt__redist_run(m, from, to, 0);
    if (status == DT_OK) return dt_error(ctx) == DT_OK ? y : NULL;
    dt_fail(ctx, status, "dt_redistribute(%s): %s to %s", x->name, dt__placement_text(from).s,
        dt__placement_text(to).s);
    return NULL;
}

/* Records the op that made y. d must reserve space for a dt__redist_saved. */
static dt_tensor *dt__redist_record(
    dt_tensor *y, dt_record_desc d, dt_comm *comm, dt_placement from, dt_placement to) {
    dt__redist_saved saved = { comm, from, to };
    d.recompute = dt__redistribute_recompute;
    if (!dt__record_with(y, d, &saved)) return NULL;
    if (to.kind == DT_PLACEMENT_COPY && y->producer) y->grad_flow = dt__flow_back(y);
    return dt_error(y->ctx) == DT_OK ? y : NULL;
}

static dt_tensor *dt__redistribute(
    dt_tensor *x, dt_comm *comm, dt_placement from, dt_placement to, int transient) {
    dt_ctx *ctx = dt__op_context("dt_redistribute", 1, x, NULL, NULL);
    if (!ctx) return NULL;
    if (dt_comm_size(comm) == 1) return x;
    if (!dt__placement_expect("dt_redistribute", x, (const dt_group *)comm, from,
            "`from` (`outside`) is the placement that x has"))
        return NULL;
    if (from.kind == to.kind && (from.kind != DT_PLACEMENT_SHARD || from.dim == to.dim)) return x;
    dt_tensor *y = dt__redist_make(x, comm, from, to, transient);
    if (y) y = dt__redist_data(x, y, comm, from, to);
    dt_record_desc d = dt__make_record(
        "dt_redistribute", x, NULL, NULL, dt__redistribute_back, sizeof(dt__redist_saved));
    return y ? dt__redist_record(y, d, comm, from, to) : NULL;
}

/* ---- all-to-all of rows ---- */

/* Gathers n numbers of each rank in host memory, for control flow. Like those of dt_agree,
   these messages are not counted as traffic. */
static dt_status dt__gather_numbers(
    dt_comm *comm, const void *mine, void *all, size_t n, dt_dtype dtype) {
    return dt__run_on_host(comm, dt__call_make(DT__AGREE, mine, all, n, dtype));
}

typedef struct dt__rows_saved {
    dt_comm *comm;
    size_t *sent, *received; /* (ranks): number of elements to and from each rank */
} dt__rows_saved;

static dt_status dt__all_to_all_back(dt_node *n) {
    const dt__rows_saved *saved = (const dt__rows_saved *)n->saved;
    dt_tensor *x = n->in[0];
    int accumulate = 0;
    void *dx = dt_grad_raw(n, 0, &accumulate);
    accumulate = accumulate && dt__bytes(x) > 0;
    void *to = accumulate ? dt_scratch(x->ctx, dt__reserved_bytes(x)) : dx;
    if (!to) return dt_error(x->ctx);
    dt_status status =
        dt_all_to_all_v(saved->comm, n->out->grad, saved->received, to, saved->sent, x->dtype);
    return accumulate && status == DT_OK
               ? dt__accumulate(x->ctx, x->dtype, dx, to, (size_t)dt_count(x->shape), 1)
               : status;
}

/* Returns the numbers of rows that this rank receives from each rank; NULL after a failure. */
static const int64_t *dt__exchange_counts(dt_ctx *ctx, dt_comm *comm, const int64_t *send_counts) {
    int N = dt_comm_size(comm);
    int32_t *mine = (int32_t *)dt__meta(ctx, (size_t)(N * (N + 1)) * sizeof *mine);
    int64_t *counts = (int64_t *)dt__meta(ctx, (size_t)N * sizeof *counts);
    if (!mine || !counts) return NULL;
    for (int r = 0; r < N; r++) mine[r] = (int32_t)send_counts[r];
    if (dt__gather_numbers(comm, mine, mine + N, (size_t)N, DT_I32) != DT_OK) return NULL;
    for (int r = 0; r < N; r++) counts[r] = mine[N + r * N + dt_comm_rank(comm)];
    return counts;
}

/* Returns the text of the first rule that the arguments violate, or NULL. */
static const char *dt__all_to_all_problem(
    const dt_tensor *x, int N, const int64_t *send_counts, const int64_t *recv_counts) {
    int64_t sum = 0;
    if (x->shape.nd < 1 || !send_counts) return "rows, and counts of rows to send, are needed";
    for (int r = 0; r < N; r++) {
        if (send_counts[r] < 0 || send_counts[r] > INT32_MAX || (recv_counts && recv_counts[r] < 0))
            return "a count must be 0 or more, and less than 2^31";
        sum += send_counts[r];
    }
    return sum == x->shape.d[0] ? NULL : "the counts of rows to send do not sum to x's rows";
}

/* dt_all_to_all_rows; transient 1: the result is a transient tensor that no backward reads. `rows`:
   a tensor with as many rows as the result, or NULL. */
static dt_tensor *dt__all_to_all_rows(dt_tensor *x, dt_comm *comm, const int64_t *send_counts,
    const int64_t *recv_counts, int transient, const dt_tensor *rows) {
    const char *op = "dt_all_to_all_rows";
    dt_ctx *ctx = dt__op_context(op, 1, x, NULL, NULL);
    int N = dt_comm_size(comm);
    if (!ctx) return NULL;
    if (N == 1) return x;
    const char *why = dt__all_to_all_problem(x, N, send_counts, recv_counts);
    if (why) return dt__shape_error(op, x, why);
    if (!recv_counts && !(recv_counts = dt__exchange_counts(ctx, comm, send_counts))) return NULL;
    dt_shape shape = x->shape;
    size_t *counts = (size_t *)dt__meta(ctx, (size_t)(2 * N) * sizeof *counts), width = 1;
    for (int i = 1; i < shape.nd; i++) width *= (size_t)shape.d[i];
    shape.d[0] = 0;
    for (int r = 0; counts && r < N; r++) {
        counts[r] = (size_t)send_counts[r] * width;
        counts[N + r] = (size_t)recv_counts[r] * width;
        shape.d[0] += recv_counts[r];
    }
    dt_tensor *y = counts ? dt__new_output(ctx, rows, x->dtype, shape, op, transient) : NULL;
    if (y) y->grad_storage = DT__GRAD_TRANSIENT; /* the gradient is only sent back */
    if (!dt__propagate(op, y, DT__RULE_EXCHANGE, x, NULL, NULL) ||
        !dt__placement_set(y, y, (const dt_group *)comm, DT_UNPLACED))
        return NULL;
    if (dt_all_to_all_v(comm, x->data, counts, y->data, counts + N, x->dtype) != DT_OK) return NULL;
    dt__rows_saved saved = { comm, counts, counts + N };
    dt_record_desc d = dt__make_record(op, x, NULL, NULL, dt__all_to_all_back, sizeof saved);
    d.unread_inputs = 1;
    return dt__record_with(y, d, &saved);
}

// ==== 14. Tensor and sequence parallelism: code =================================================

/* Each layer is an ordinary op with a redistribution before it (f) or after it (g), as drawn in
   section 3. The bias and the residual of a row-parallel layer are added after g, so that they are
   added once. The vocabulary-parallel cross-entropy gathers two values per row: lse_r, the
   log-sum-exp over rank r's columns, and target_r, the sum over rank r's columns of target
   probability times logit. Without label smoothing target_r is the label's logit, or 0 if the label
   is in another rank's columns:

       lse = log(sum over r of e^(lse_r)),    loss = lse - (sum over r of target_r) */

static dt_tensor *dt__tp_enter(dt_tensor *x, dt_comm *comm, dt_placement outside) {
    return dt__redistribute(x, comm, outside, DT_COPY, outside.kind == DT_PLACEMENT_SHARD);
}

static dt_tensor *dt__column_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc,
    dt_comm *comm, dt_placement outside) {
    return dt_linear_at(dt_tp_enter(x, comm, outside), w, b, desc);
}

/* y += b + residual in one pass. b and residual may be NULL. */
static dt_status dt__row_add_bias(dt_tensor *y, const dt_tensor *b, const dt_tensor *residual) {
    const dt_tensor *one = b ? b : residual, *other = b && residual ? residual : y;
    if (!one) return DT_OK;
    dt_binary_args a = {
        .dtype = y->dtype, .op = DT_ADD, .out = y->data, .a = other->data, .b = one->data
    };
    a.accumulate = other == residual;
    dt__broadcast(other->shape, one->shape, &a.shape, a.stride_a, a.stride_b);
    return DT__KERNEL(y->ctx, "dt_row_linear", binary, &a);
}

/* The backward of dt_row_linear. The node's inputs are the partial sum, the bias and the
   residual. */
static dt_status dt__row_back(dt_node *n) {
    dt_tensor *y = n->out;
    size_t bytes = (dt__bytes(y) + 63) / 64 * 64;
    if (dt_wants(n, 0) && dt__redistribute_back(n) != DT_OK) return dt_error(y->ctx);
    for (int i = 1; i < 3; i++) {
        if (!dt_wants(n, i)) continue;
        char *work = (char *)dt_scratch(y->ctx, 2 * bytes);
        void *scratch[2] = { work, work + bytes };
        if (!work || dt__sum_to(n, i, y->grad, 1, scratch) != DT_OK) return dt_error(y->ctx);
    }
    return DT_OK;
}

/* Makes the result of the redistribution of `sum`, a partial sum over the group. */
static dt_tensor *dt__row_reduced(dt_tensor *sum, dt_comm *comm, dt_placement outside) {
    int placed = sum && dt__placement_expect("dt_row_linear", sum, (const dt_group *)comm,
                            DT_PARTIAL, "shard x along its last dimension and w along dimension 1");
    return placed ? dt__redist_make(sum, comm, DT_PARTIAL, outside, 0) : NULL;
}

/* Returns x w^T, a partial sum over the group, and stores its sum over the group in *reduced. Each
   piece is reduced while the next one is multiplied. NULL in *reduced after a failure. */
static dt_tensor *dt__row_sum(dt_tensor *x, dt_tensor *w, dt_linear_desc desc, dt_comm *comm,
    dt_placement outside, dt_tensor **reduced) {
    dt__linear_op l = { x, w, NULL, desc, NULL, DT__LINEAR_TRANSIENT, 0, NULL, NULL };
    dt__redist_flow *f = NULL;
    if (desc.adapters) {
        l.y = dt__linear_adapted(x, w, NULL, desc, DT__LINEAR_TRANSIENT);
        *reduced = dt__row_reduced(l.y, comm, outside);
    } else if (dt__linear_make(&l, NULL)) {
        dt_tensor *y = dt__row_reduced(l.y, comm, outside);
        int pieces = y ? dt__flow_pieces(comm, l.y->shape, outside) : 1;
        if (pieces > 1) {
            f = dt__flow_make(dt__redist_of(l.y, y, comm), l.y->shape, outside, pieces, 0);
            l.y->flow = f ? &f->base : NULL;
        }
        *reduced = y && dt__linear_run_op(&l) ? y : NULL;
    }
    if (f) dt__flow_arrive(f->m.ctx, x->flow);
    if (f && dt__flow_wait(f) != DT_OK) *reduced = NULL;
    if (*reduced && !f) *reduced = dt__redist_data(l.y, *reduced, comm, DT_PARTIAL, outside);
    return l.y;
}

static dt_tensor *dt__row_linear_at(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc,
    dt_comm *comm, dt_placement outside) {
    dt_tensor *residual = desc.residual;
    if (x && desc.activation) {
        dt_fail(x->ctx, DT_ERR_ARG, "dt_row_linear(%s): it has no activation", x->name);
        return NULL;
    }
    if (dt_comm_size(comm) == 1 || !x) return dt_linear_at(x, w, b, desc);
    desc.residual = NULL;
    dt_tensor *y = NULL, *sum = dt__row_sum(x, w, desc, comm, outside, &y);
    if (!y || !dt__float_op_context("dt_row_linear", 1, sum, b, residual)) return NULL;
    int64_t out = (int64_t)dt__last_dim(y);
    if (b && (b->dtype != y->dtype || b->shape.nd != 1 || b->shape.d[0] != out))
        return dt__mismatch(
            "dt_row_linear", y, b, "the bias has one number for each of its columns");
    if (residual && (residual->dtype != y->dtype || !dt__same_shape(residual->shape, y->shape)))
        return dt__mismatch(
            "dt_row_linear", y, residual, "the residual lies outside, as the result");
    dt_tensor reduced = *y;
    y->name = "dt_row_linear";
    reduced.needs_grad = sum->needs_grad;
    if (!dt__propagate("dt_row_linear", y, DT__RULE_ADD, &reduced, b, residual)) return NULL;
    if (dt__row_add_bias(y, b, residual) != DT_OK) return NULL;
    dt_record_desc d =
        dt__make_record("dt_row_linear", sum, b, residual, dt__row_back, sizeof(dt__redist_saved));
    return dt__redist_record(y, d, comm, DT_PARTIAL, outside);
}

static dt_tensor *dt__row_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_tensor *residual,
    dt_comm *comm, dt_placement outside) {
    dt_linear_desc desc = { .residual = residual };
    return dt__row_linear_at(x, w, b, desc, comm, outside);
}

static dt_tensor *dt__vocab_embedding(
    dt_tensor *table, dt_tensor *ids, dt_comm *comm, dt_placement outside) {
    if (dt_comm_size(comm) == 1 || !table) return dt_embedding(table, ids);
    dt_tensor *rows = dt__lookup_rows("dt_embedding", table, ids, 0, 1);
    return rows ? dt_redistribute(rows, comm, DT_PARTIAL, outside) : NULL;
}

static dt_status dt__vocab_gather(void *user, const double *mine, double *each, size_t count) {
    return dt_all_gather((dt_comm *)user, mine, each, count, DT_F64);
}

/* Restricts *d to this rank's columns. t has `columns` of the `all` columns of the group, which are
   sharded in rank order. Returns 1, or 0 after failing the context if d->vocab does not fit. */
static int dt__vocab_desc(const char *op, const dt_tensor *t, int64_t columns, int64_t all,
    dt_comm *comm, dt_loss_desc *d) {
    int64_t offset = dt_comm_rank(comm) * columns, full = d->vocab ? d->vocab : all;
    int64_t here = full - offset;
    if (full < 0 || full > all)
        return dt_fail(t->ctx, DT_ERR_ARG, "%s(%s): vocab %lld of %lld columns", op, t->name,
                   (long long)full, (long long)all) == DT_OK;
    dt_vocab_shard shard = { dt_comm_size(comm), offset, full, dt__vocab_gather, comm };
    d->shard = shard;
    d->vocab = here < 0 ? 0 : here < columns ? here : columns;
    return 1;
}

/* The ranks have combined their columns, so every rank has the whole loss. */
static dt_tensor *dt__vocab_loss(dt_tensor *loss, const dt_loss_desc *d, dt_comm *comm) {
    const dt_group *group = (const dt_group *)comm;
    if (!loss || dt_comm_size(comm) == 1) return loss;
    if (d->z_loss && !dt__placement_set(*d->z_loss, loss, group, DT_REPLICATE)) return NULL;
    return dt__placement_set(loss, loss, group, DT_REPLICATE) ? loss : NULL;
}

static dt_tensor *dt__vocab_cross_entropy(
    dt_tensor *logits, dt_tensor *labels, double denominator, dt_loss_desc desc, dt_comm *comm) {
    if (dt_comm_size(comm) > 1 && logits) {
        int64_t columns = (int64_t)dt__last_dim(logits), all = columns * dt_comm_size(comm);
        const char *op = "dt_vocab_cross_entropy";
        if (!dt__placement_expect(op, logits, (const dt_group *)comm,
                DT_SHARD(logits->shape.nd - 1), "each rank passes a shard of the columns") ||
            !dt__vocab_desc(op, logits, columns, all, comm, &desc))
            return NULL;
    }
    return dt__vocab_loss(dt_cross_entropy_at(logits, labels, denominator, desc), &desc, comm);
}

static dt_tensor *dt__vocab_linear_cross_entropy(dt_tensor *x, dt_tensor *w, dt_tensor *labels,
    double denominator, dt_loss_desc desc, dt_comm *comm, dt_placement outside) {
    if (dt_comm_size(comm) > 1 && w && w->shape.nd > 0) {
        const dt_param_info *p = dt__owner(w)->param; /* w may be a view */
        int64_t columns = w->shape.d[0];
        int64_t all = p && p->full.nd == w->shape.nd ? p->full.d[0] : columns * dt_comm_size(comm);
        if (!dt__vocab_desc("dt_vocab_linear_cross_entropy", w, columns, all, comm, &desc))
            return NULL;
        x = dt_tp_enter(x, comm, outside);
    }
    return dt__vocab_loss(dt_linear_cross_entropy(x, w, labels, denominator, desc), &desc, comm);
}

static dt_kv_groups dt__kv_split(dt_ctx *ctx, dt_comm *tp, int kv_heads) {
    int ranks = dt_comm_size(tp), replicas = kv_heads > 0 ? ranks / kv_heads : 0;
    dt_kv_groups g = { tp, NULL, kv_heads };
    if (dt_error(ctx) != DT_OK || ranks == 1) return g;
    if (kv_heads < 1 || (kv_heads % ranks != 0 && ranks % kv_heads != 0)) {
        dt_fail(ctx, DT_ERR_ARG,
            "dt_kv_split: %d heads of keys and values over %d ranks: one must divide the other",
            kv_heads, ranks);
        return g;
    }
    g.heads = replicas <= 1 ? kv_heads / ranks : 1;
    if (replicas <= 1) return g;
    g.shard_group =
        kv_heads == 1 ? NULL : dt_comm_split_by(tp, dt_color_cyclic, &replicas, "kv heads");
    g.replica_group =
        kv_heads == 1 ? tp : dt_comm_split_by(tp, dt_color_block, &replicas, "kv copies");
    dt_comm_set_axis(g.shard_group, DT_AXIS_TP);
    dt_comm_set_axis(g.replica_group, DT_AXIS_TP);
    return g;
}

/* ---- distribution from one rank to all ---- */

/* Distributes a tensor along one axis: rank 0 of m.comm has the tensor in m.in, and each rank gets
   its part in m.out. */
static dt_status dt__distribute_axis(dt__redist m, dt_placement to) {
    int me = dt_comm_rank(m.comm), n = dt_comm_size(m.comm);
    size_t out = (size_t)dt_count(m.out_shape), bytes = out * dt_dtype_size(m.dtype);
    if (to.kind == DT_PLACEMENT_PARTIAL) return dt__redist_keep_first(&m);
    if (to.kind != DT_PLACEMENT_SHARD) {
        if (me == 0 && dt__redist_identity(&m) != DT_OK) return dt_error(m.ctx);
        return dt_broadcast(m.comm, m.out, out, m.dtype, 0);
    }
    if (me == 0 && out && !(m.scratch = dt_scratch(m.ctx, (size_t)n * bytes)))
        return dt_error(m.ctx);
    if (me == 0 && dt__extract_shards(&m, m.in_shape, to.dim, m.scratch, m.in) != DT_OK)
        return dt_error(m.ctx);
    return dt_scatter(m.comm, m.scratch, m.out, out, m.dtype, 0);
}

/* Returns 1 if this rank is rank 0 of axes[axis] and of all axes after it, else 0. */
static int dt__is_first_along(const dt_axis_placement *axes, int axis, int n) {
    for (; axis < n; axis++)
        if (dt_comm_rank(axes[axis].comm) != 0) return 0;
    return 1;
}

/* Along the first axis the source rank sends to the ranks that are rank 0 along all other axes.
   Each of these ranks sends along the second axis, and so on. So every part is sent once along each
   axis. */
static dt_tensor *dt__distribute(dt_ctx *ctx, dt_dtype dtype, dt_shape full, const void *host,
    const dt_axis_placement *axes, int n) {
    dt_tensor *local = NULL;
    if (dt_error(ctx) != DT_OK) return NULL;
    if (n > 0 && !axes) {
        dt_fail(ctx, DT_ERR_ARG, "dt_distribute: its %d axes are NULL", n);
        return NULL;
    }
    if (dt__is_first_along(axes, 0, n)) {
        if (!host && dt_count(full))
            dt_fail(ctx, DT_ERR_ARG, "dt_distribute: the first rank gives no data");
        local = dt_input(ctx, dtype, full, host);
    }
    for (int i = 0; i < n && dt_error(ctx) == DT_OK; i++) {
        dt__redist m = { .ctx = ctx, .comm = axes[i].comm, .dtype = dtype, .in_shape = full };
        full = dt__redist_shape(full, dt_comm_size(m.comm), DT_REPLICATE, axes[i].placement);
        if (full.nd < 0) {
            dt_fail(ctx, DT_ERR_SHAPE,
                "dt_distribute: %s cannot be sharded along dimension %d over the %d ranks of '%s'",
                dt__shape_text(m.in_shape).s, axes[i].placement.dim, dt_comm_size(m.comm),
                dt_comm_name(m.comm));
            return NULL;
        }
        if (dt_comm_size(m.comm) == 1 || !dt__is_first_along(axes, i + 1, n)) continue;
        m.in = local ? local->data : NULL;
        m.out_shape = full;
        local = dt_new(ctx, dtype, full);
        if (!local) return NULL;
        m.out = local->data;
        dt_status status = dt__distribute_axis(m, axes[i].placement);
        if (status != DT_OK) dt_fail(ctx, status, "dt_distribute: over '%s'", dt_comm_name(m.comm));
    }
    for (int i = 0; i < n && local && dt_error(ctx) == DT_OK; i++)
        dt_place(local, axes[i].comm, axes[i].placement);
    return dt_error(ctx) == DT_OK ? local : NULL;
}

// ==== 15. Context parallelism: code =============================================================

/* Ring attention (H. Liu et al., arXiv:2310.01889). The naive algorithm gathers all keys and values
   and then computes the attention, so its memory grows with c. In step s of the ring algorithm rank
   r computes its queries over the keys and values of rank r - s, while it sends these keys and
   values to rank r + 1 and receives the next keys and values from rank r - 1:

       step 0    q0 k0    q1 k1    q2 k2    q3 k3      kv: r0 -> r1 -> r2 -> r3 -+
       step 1    q0 k3    q1 k0    q2 k1    q3 k2           ^                    |
       step 2    q0 k2    q1 k3    q2 k0    q3 k1           +--------------------+
       step 3    q0 k1    q1 k2    q2 k3    q3 k0

   Online softmax makes the steps independent: step s yields o_s and lse_s over its keys, and the
   log-sum-exp merge combines the results of any number of steps. For two steps:

       lse = log(e^lse_1 + e^lse_2),    o = o_1 e^(lse_1 - lse) + o_2 e^(lse_2 - lse) */

int64_t dt_cp_token(int kind, int64_t T, int c, int r, int64_t i) {
    if (c < 1 || T < c || r < 0 || r >= c || i < 0 || i >= T / c) return -1;
    if (kind != DT_CP_ZIGZAG) return r * (T / c) + i;
    int64_t chunk = T / (2 * (int64_t)c);
    return i < chunk ? r * chunk + i : (2 * (int64_t)c - 1 - r) * chunk + i - chunk;
}

void dt_cp_shard(
    int kind, int64_t B, int64_t T, dt_comm *comm, const int32_t *full, int32_t *local) {
    int c = dt_comm_size(comm), me = dt_comm_rank(comm);
    int64_t local_tokens = T / c;
    if (!full || !local) return;
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < local_tokens; i++)
            local[b * local_tokens + i] = full[b * T + dt_cp_token(kind, T, c, me, i)];
}

dt_status dt_cp_check(
    int kind, int64_t T, int c, int64_t heads, int64_t kv_heads, char *text, size_t text_bytes) {
    static const char *const names[] = { "ring", "zigzag", "allgather", "ulysses" };
    int64_t chunks = kind == DT_CP_ZIGZAG ? 2 * (int64_t)c : c;
    dt__strbuf t = dt__strbuf_in(text, text_bytes);
    if (kind < DT_CP_RING || kind > DT_CP_ULYSSES)
        return dt__strbuf_add(&t, "kind %d of context parallelism", kind);
    if (c < 2) return DT_OK;
    if (T < chunks || T % chunks != 0) {
        int64_t less = T < chunks ? 0 : T / chunks * chunks,
                more = dt__saturate((dt__uint128)less + (uint64_t)chunks);
        return dt__strbuf_add(&t,
            "%s over cp %d splits a sequence into %lld equal chunks, which %lld tokens do not "
            "give; use %lld or %lld",
            names[kind], c, (long long)chunks, (long long)T, (long long)(less ? less : more),
            (long long)(less ? more : 2 * chunks));
    }
    if (kind != DT_CP_ULYSSES || (heads % c == 0 && (kv_heads % c == 0 || c % kv_heads == 0)))
        return DT_OK;
    return dt__strbuf_add(&t,
        "ulysses over cp %d exchanges tokens for heads, but a rank has %lld heads and %lld of "
        "keys and values: cp must divide the heads, and divide or be a multiple of the second; use "
        "ring, zigzag or allgather",
        c, (long long)heads, (long long)kv_heads);
}

typedef struct dt__range {
    int32_t min, max;
} dt__range;

/* The positions and documents of the tokens in one chunk of a sequence. */
typedef struct dt__chunk_range {
    dt__range position, document;
    int contiguous; /* 1 if each token's position is the previous token's position plus 1 */
} dt__chunk_range;

/* A sequence consists of c * chunks_per_rank chunks, numbered in the order of the ranks: rank r has
   chunk r * chunks_per_rank and, if the kind is ZIGZAG, the next chunk. */
struct dt_cp {
    dt_ctx *ctx;
    dt_comm *comm;
    dt_cp_desc desc;
    int explicit_positions; /* 1 if the caller passed positions */
    int chunks_per_rank;    /* 2 if the kind is ZIGZAG, else 1 */
    int64_t chunk_tokens;
    dt_tensor *positions;    /* (B,T) on the device, in the order of the ranks */
    dt_tensor *documents;    /* (B,T) in the same order; NULL if the caller passed none */
    dt_tensor *local[2];     /* (B,T/c): this rank's positions and documents, for ALLGATHER */
    dt__chunk_range *ranges; /* (B, c * chunks_per_rank): the range of each chunk */
};

static dt__range dt__range_of(const int32_t *x, int64_t n) {
    dt__range range = { x[0], x[0] };
    for (int64_t i = 1; i < n; i++) {
        if (x[i] < range.min) range.min = x[i];
        if (x[i] > range.max) range.max = x[i];
    }
    return range;
}

/* Stores the caller's positions, or the positions of dt_cp_token if the caller passed none. */
static dt_status dt__cp_fill_positions(dt_cp *cp) {
    int64_t B = cp->desc.batch, T = cp->desc.tokens, own = T / dt_comm_size(cp->comm),
            n = cp->chunk_tokens;
    size_t bytes = (size_t)(B * T) * sizeof(int32_t);
    /* One extra byte, so that the allocation is never empty. */
    int32_t *at = (int32_t *)dt__buffer_acquire(cp->ctx, DT_MEM_HOST, bytes + 1);
    if (!at) return dt_error(cp->ctx);
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < T; i++)
            at[b * T + i] = cp->desc.positions
                                ? cp->desc.positions[b * T + i]
                                : (int32_t)dt_cp_token(cp->desc.kind, T, dt_comm_size(cp->comm),
                                      (int)(i / own), i % own);
    for (int64_t p = 0; p < B * T / n; p++) {
        dt__chunk_range *range = &cp->ranges[p];
        range->position = dt__range_of(at + p * n, n);
        if (cp->desc.documents) range->document = dt__range_of(cp->desc.documents + p * n, n);
        range->contiguous = 1;
        for (int64_t i = p * n; i < (p + 1) * n; i++)
            range->contiguous &= at[i] == at[p * n] + (i - p * n);
    }
    cp->positions = dt_input(cp->ctx, DT_I32, DT_SHAPE(B, T), at);
    if (cp->desc.documents)
        cp->documents = dt_input(cp->ctx, DT_I32, DT_SHAPE(B, T), cp->desc.documents);
    dt__buffer_release(cp->ctx, at);
    dt_tensor *full[2] = { cp->positions, cp->documents };
    for (int i = 0; i < 2 && cp->desc.kind == DT_CP_ALLGATHER; i++)
        if (full[i]) cp->local[i] = dt_slice(full[i], 1, dt_comm_rank(cp->comm) * own, own);
    cp->explicit_positions = cp->desc.positions != NULL;
    cp->desc.positions = cp->desc.documents = NULL; /* the caller may free them */
    return dt_error(cp->ctx);
}

dt_cp *dt_cp_make(dt_ctx *ctx, dt_comm *comm, dt_cp_desc d) {
    char why[300];
    int c = dt_comm_size(comm);
    if (dt_error(ctx) != DT_OK) return NULL;
    if (d.batch < 0 || d.tokens < 1) {
        dt_fail(ctx, DT_ERR_ARG, "dt_cp_make: %lld sequences of %lld tokens", (long long)d.batch,
            (long long)d.tokens);
        return NULL;
    }
    if (c == 1) d.kind = DT_CP_ULYSSES; /* on one rank its exchanges are identities */
    if (dt_cp_check(d.kind, d.tokens, c, c, c, why, sizeof why) != DT_OK) {
        dt_fail(ctx, DT_ERR_SHAPE, "dt_cp_make: %s", why);
        return NULL;
    }
    dt_cp *cp = (dt_cp *)dt__meta(ctx, sizeof *cp);
    if (!cp) return NULL;
    cp->ctx = ctx;
    cp->comm = comm;
    cp->desc = d;
    cp->chunks_per_rank = d.kind == DT_CP_ZIGZAG ? 2 : 1;
    cp->chunk_tokens = d.tokens / ((int64_t)c * cp->chunks_per_rank);
    cp->ranges = (dt__chunk_range *)dt__meta(
        ctx, (size_t)(d.batch * c * cp->chunks_per_rank) * sizeof *cp->ranges);
    return cp->ranges && dt__cp_fill_positions(cp) == DT_OK ? cp : NULL;
}

/* ---- ring attention ---- */

/* Sets *mask for a chunk of queries and a chunk of keys of a sequence. Returns 0 if no query
   attends to a key. window: see dt_attn_desc. A mask of positions and documents is slower than none
   and than the causal mask of consecutive tokens, so it is used only where it is needed. */
static int dt__ring_mask(const dt_cp *cp, int window, int64_t sequence, int64_t query, int64_t key,
    dt_attention_mask *mask) {
    const dt__chunk_range *ranges =
        cp->ranges + sequence * dt_comm_size(cp->comm) * cp->chunks_per_rank;
    const dt__chunk_range *q = &ranges[query], *k = &ranges[key];
    int same_document = q->document.min == q->document.max && k->document.min == k->document.max &&
                        q->document.min == k->document.min;
    memset(mask, 0, sizeof *mask);
    if (q->document.max < k->document.min || k->document.max < q->document.min ||
        (!cp->desc.full && q->position.max < k->position.min) ||
        (window && (int64_t)q->position.min - k->position.max >= window))
        return 0;
    int in_window = !window || (int64_t)q->position.max - k->position.min < window;
    if (same_document && (cp->desc.full || (q->position.min >= k->position.max && in_window)))
        return 1;
    mask->causal = !cp->desc.full;
    mask->window = window;
    if (same_document && query == key && q->contiguous) return 1;
    const int32_t *positions = (const int32_t *)cp->positions->data + sequence * cp->desc.tokens;
    mask->q_position = positions + query * cp->chunk_tokens;
    mask->k_position = positions + key * cp->chunk_tokens;
    if (!cp->documents) return 1;
    const int32_t *documents = (const int32_t *)cp->documents->data + sequence * cp->desc.tokens;
    mask->q_document = documents + query * cp->chunk_tokens;
    mask->k_document = documents + key * cp->chunk_tokens;
    return 1;
}

/* State of one ring attention; dout is NULL in the forward. Arrays are
   (B,chunks_per_rank,chunk_tokens, ..), except lse, which is (B,chunks_per_rank,H,chunk_tokens). */
typedef struct dt__ring {
    const dt_cp *cp;
    dt_dtype dtype;
    int64_t H, K, D;
    double scale, soft_cap;
    int window;
    const char *q, *out, *dout;
    /* result is the output in the forward and dq in the backward; result, dk and dv have the
       accumulation type */
    char *result, *lse;
    void *work;
    size_t work_bytes;
} dt__ring;

/* One step of the ring, with online softmax: computes the attention, or its backward, of this
   rank's queries over the keys and values of rank `from`. In the forward the kernel performs the
   log-sum-exp merge with the earlier steps, which are in result and lse. `grads` (backward only)
   are the gradients of these keys and values in the accumulation type; the step adds to them. */
static dt_status dt__ring_step(
    const dt__ring *r, int from, char *const kv[2], char *const grads[2]) {
    const char *op = "dt_cp_attention";
    const dt_cp *cp = r->cp;
    dt_ctx *ctx = cp->ctx;
    size_t size = dt_dtype_size(r->dtype), wide = dt_dtype_size(dt__wide(r->dtype, 1));
    int64_t n = cp->chunks_per_rank;
    for (int64_t i = 0; i < cp->desc.batch * n * n; i++) {
        int64_t s = i / (n * n), qp = i / n % n, kp = i % n;
        int64_t query = dt_comm_rank(cp->comm) * n + qp, key = (int64_t)from * n + kp;
        dt_attention_mask mask;
        if (!dt__ring_mask(cp, r->window, s, query, key, &mask)) continue;
        size_t q_token = (size_t)((s * n + qp) * cp->chunk_tokens),
               k_token = (size_t)((s * n + kp) * cp->chunk_tokens);
        size_t q_at = q_token * (size_t)(r->H * r->D), k_at = k_token * (size_t)(r->K * r->D);
        char *lse = r->lse + q_token * (size_t)r->H * wide;
        const char *q = r->q + q_at * size, *k = kv[0] + k_at * size, *v = kv[1] + k_at * size;
        if (!r->dout) {
            dt_attention_args a = { .dtype = r->dtype,
                .out = r->result + q_at * wide,
                .lse = lse,
                .q = q,
                .k = k,
                .v = v,
                .batch = 1,
                .tq = cp->chunk_tokens,
                .tk = cp->chunk_tokens,
                .heads = r->H,
                .kv_heads = r->K,
                .dim = r->D,
                .scale = r->scale,
                .mask = mask,
                .merge_lse = 1,
                .wide = 1,
                .work = r->work,
                .work_bytes = r->work_bytes,
                .soft_cap = r->soft_cap };
            if (DT__KERNEL(ctx, op, attention, &a) != DT_OK) return dt_error(ctx);
        } else {
            dt_attention_back_args a = { .dtype = r->dtype,
                .dq = r->result ? r->result + q_at * wide : NULL,
                .dk = grads[0] ? grads[0] + k_at * wide : NULL,
                .dv = grads[1] ? grads[1] + k_at * wide : NULL,
                .dout = r->dout + q_at * size,
                .out = r->out + q_at * wide,
                .lse = lse,
                .q = q,
                .k = k,
                .v = v,
                .batch = 1,
                .tq = cp->chunk_tokens,
                .tk = cp->chunk_tokens,
                .heads = r->H,
                .kv_heads = r->K,
                .dim = r->D,
                .scale = r->scale,
                .mask = mask,
                .accumulate_q = 1,
                .accumulate_k = 1,
                .accumulate_v = 1,
                .wide = 1,
                .work = r->work,
                .work_bytes = r->work_bytes,
                .soft_cap = r->soft_cap };
            if (DT__KERNEL(ctx, op, attention_back, &a) != DT_OK) return dt_error(ctx);
        }
    }
    return DT_OK;
}

/* Starts a hop around the ring: sends two arrays to the right neighbour and receives two arrays
   from the left neighbour. */
enum { DT__RING_TAG = 1020 }; /* small enough for every MPI library */
static void dt__ring_start(const dt_cp *cp, char *const from[2], char *const to[2], size_t count,
    dt_dtype dtype, int tag, dt_work *hop[4]) {
    int c = dt_comm_size(cp->comm), me = dt_comm_rank(cp->comm);
    for (int i = 0; i < 2; i++)
        hop[i] = dt_send_start(cp->comm, from[i], count, dtype, (me + 1) % c, tag + i);
    for (int i = 0; i < 2; i++)
        hop[2 + i] = dt_recv_start(cp->comm, to[i], count, dtype, (me + c - 1) % c, tag + i);
}

static void dt__ring_wait(dt_ctx *ctx, dt_work *hop[4]) {
    for (int i = 0; i < 4; i++) {
        dt_wait(ctx, hop[i]);
        hop[i] = NULL;
    }
}

/* Divides a buffer from the pool into n arrays of `bytes` bytes each; the caller releases
   arrays[0]. Returns 1, or 0 on failure. */
static int dt__ring_buffers(dt_ctx *ctx, size_t bytes, int n, char **arrays) {
    bytes = (bytes + 63) / 64 * 64;
    char *all = (char *)dt__buffer_acquire(ctx, DT_MEM_COMM, (size_t)n * bytes);
    for (int i = 0; i < n; i++) arrays[i] = all ? all + (size_t)i * bytes : NULL;
    return all != NULL;
}

static dt__ring dt__ring_make(
    const dt_cp *cp, const dt_tensor *q, const dt_tensor *keys, dt_attn_desc desc) {
    dt__ring r = { .cp = cp,
        .dtype = q->dtype,
        .H = q->shape.d[2],
        .K = keys->shape.d[2],
        .D = q->shape.d[3],
        .scale = dt__attention_scale(q, desc.scale),
        .soft_cap = desc.soft_cap,
        .window = desc.window,
        .q = (const char *)q->data };
    r.work_bytes = dt__scratch_bytes(cp->ctx, dt_attention_work(cp->chunk_tokens, r.D, r.dtype));
    r.work = dt_scratch(cp->ctx, r.work_bytes);
    return r;
}

/* Ring attention. Step s computes with the keys and values of rank me - s while these travel on to
   the right neighbour. In the backward (r->dout) their gradients follow them. The gradient of a
   rank's keys and values starts at the rank's right neighbour, and each rank on the way adds its
   part. After c - 1 hops the gradient arrives at the rank that owns the keys and values, which adds
   it to the part in dk and dv that it computed in step 0. A rank computes its own part before it
   waits for the received gradient, so that this transfer overlaps with computation too. */
static dt_status dt__ring_run(
    const dt__ring *r, const dt_tensor *keys, const dt_tensor *values, char *dk, char *dv) {
    dt_ctx *ctx = r->cp->ctx;
    int c = dt_comm_size(r->cp->comm), me = dt_comm_rank(r->cp->comm), backward = r->dout != NULL;
    size_t count = (size_t)dt_count(keys->shape);
    dt_dtype wide = dt__wide(r->dtype, 1);
    char *current[2] = { (char *)keys->data, (char *)values->data }, *own[2] = { dk, dv };
    char *kv[4], *sums[6] = { NULL }, **received = &sums[4];
    dt_work *hop[4] = { NULL }, *grad_hop[4] = { NULL };
    if (!r->work || !dt__ring_buffers(ctx, dt__bytes(keys), 4, kv)) return dt_error(ctx);
    if (backward) dt__ring_buffers(ctx, count * dt_dtype_size(wide), 6, sums);
    for (int s = 0; s < c && dt_error(ctx) == DT_OK; s++) {
        char **next = &kv[s % 2 * 2], **part = s ? &sums[s % 2 * 2] : own;
        if (s < c - 1) dt__ring_start(r->cp, current, next, count, r->dtype, DT__RING_TAG, hop);
        for (int i = 0; i < 2 && backward && s > 0; i++) dt__fill(ctx, wide, part[i], count, 0);
        dt__ring_step(r, (me - s + c) % c, current, part);
        dt__ring_wait(ctx, hop);
        if (backward && s > 0) {
            dt__ring_wait(ctx, grad_hop);
            for (int i = 0; i < 2 && s > 1; i++)
                dt__accumulate(ctx, wide, part[i], received[i], count, 1);
            dt__ring_start(r->cp, part, received, count, wide, DT__RING_TAG + 2, grad_hop);
        }
        current[0] = next[0];
        current[1] = next[1];
    }
    dt__ring_wait(ctx, grad_hop);
    for (int i = 0; i < 2; i++)
        if (own[i] && dt_error(ctx) == DT_OK)
            dt__accumulate(ctx, wide, own[i], received[i], count, 1);
    dt__buffer_release(ctx, kv[0]);
    dt__buffer_release(ctx, sums[0]);
    return dt_error(ctx);
}

typedef struct dt__ring_saved {
    dt_cp *cp;
    dt_tensor *lse;
    dt_attn_desc desc;
} dt__ring_saved;

/* Converts n numbers: out (+)= in. */
static dt_status dt__cp_cast(dt_ctx *ctx, dt_dtype dtype, void *out, dt_dtype from, const void *in,
    size_t n, int accumulate) {
    dt_cast_args a = {
        .dtype = dtype, .from = from, .out = out, .in = in, .count = n, .accumulate = accumulate
    };
    return DT__KERNEL(ctx, "dt_cp_attention", cast, &a);
}

/* Returns an array of the accumulation type for the array `own` of tensor t: `own` if t has this
   type, else a buffer from the pool. dt__ring_narrow converts the buffer to `own` and releases
   it. */
static char *dt__ring_wide(const dt_tensor *t, void *own) {
    if (!dt__narrow(t->dtype)) return (char *)own;
    return (char *)dt__buffer_acquire(
        t->ctx, DT_MEM_COMM, (size_t)dt_count(t->shape) * sizeof(float));
}

static void dt__ring_narrow(const dt_tensor *t, void *own, void *buffer, int accumulate) {
    if (buffer == own) return;
    if (dt_error(t->ctx) == DT_OK)
        dt__cp_cast(t->ctx, t->dtype, own, DT_F32, buffer, (size_t)dt_count(t->shape), accumulate);
    dt__buffer_release(t->ctx, buffer);
}

static dt_status dt__ring_back(dt_node *n) {
    const dt__ring_saved *saved = (const dt__ring_saved *)n->saved;
    dt_tensor *y = n->out;
    dt_ctx *ctx = y->ctx;
    dt_dtype wide = dt__wide(y->dtype, 1);
    char *grad[3] = { NULL, NULL, NULL }, *sum[3] = { NULL, NULL, NULL };
    int accumulate[3] = { 0, 0, 0 };
    for (int i = 0; i < 3; i++) {
        size_t count = (size_t)dt_count(n->in[i]->shape);
        if (!dt_wants(n, i)) continue;
        grad[i] = (char *)dt_grad_raw(n, i, &accumulate[i]);
        sum[i] = dt__ring_wide(n->in[i], grad[i]);
        if (sum[i] && (sum[i] != grad[i] || !accumulate[i])) dt__fill(ctx, wide, sum[i], count, 0);
    }
    dt__ring r = dt__ring_make(saved->cp, n->in[0], n->in[1], saved->desc);
    char *out = dt__ring_wide(y, y->data);
    if (out && out != y->data)
        dt__cp_cast(ctx, wide, out, y->dtype, y->data, (size_t)dt_count(y->shape), 0);
    r.out = out;
    r.dout = (const char *)y->grad;
    r.lse = (char *)saved->lse->data;
    r.result = sum[0];
    if (dt_error(ctx) == DT_OK) dt__ring_run(&r, n->in[1], n->in[2], sum[1], sum[2]);
    for (int i = 0; i < 3; i++) dt__ring_narrow(n->in[i], grad[i], sum[i], accumulate[i]);
    if (out != y->data) dt__buffer_release(ctx, out);
    return dt_error(ctx);
}

static dt_tensor *dt__cp_ring_attention(
    dt_tensor *q, dt_tensor *keys, dt_tensor *values, dt_cp *cp, dt_attn_desc desc) {
    const char *op = "dt_cp_attention";
    dt_ctx *ctx = q->ctx;
    dt_dtype wide = dt__wide(q->dtype, 1);
    dt_shape per_part =
        DT_SHAPE(cp->desc.batch, cp->chunks_per_rank, q->shape.d[2], cp->chunk_tokens);
    dt_tensor *y = dt_new(ctx, q->dtype, q->shape), *lse = dt_new(ctx, wide, per_part);
    if (!lse || !dt__propagate(op, y, DT__RULE_RING, q, keys, values) ||
        !dt__placement_set(y, y, (const dt_group *)cp->comm, DT_SHARD(1)))
        return NULL;
    dt__ring r = dt__ring_make(cp, q, keys, desc);
    r.lse = (char *)lse->data;
    r.result = dt__ring_wide(y, y->data);
    if (r.result && dt__fill(ctx, wide, r.result, (size_t)dt_count(y->shape), 0) == DT_OK &&
        dt__fill(ctx, wide, r.lse, (size_t)dt_count(per_part), -INFINITY) == DT_OK)
        dt__ring_run(&r, keys, values, NULL, NULL);
    dt__ring_narrow(y, y->data, r.result, 0);
    dt__ring_saved saved = { cp, lse, desc };
    return dt__record_with(
        y, dt__make_record(op, q, keys, values, dt__ring_back, sizeof saved), &saved);
}

/* ---- all-gather and Ulysses, by dt_redistribute ---- */

/* All-gather context parallelism: attention of this rank's queries over the gathered keys and
   values. */
static dt_tensor *dt__cp_allgather_attention(
    dt_tensor *q, dt_tensor *keys, dt_tensor *values, dt_cp *cp, dt_attn_desc d) {
    keys = dt_redistribute(keys, cp->comm, DT_SHARD(1), DT_COPY);
    values = dt_redistribute(values, cp->comm, DT_SHARD(1), DT_COPY);
    d.full = cp->desc.full;
    d.positions = cp->local[0];
    d.key_positions = cp->positions;
    d.documents = cp->local[1];
    d.key_documents = cp->documents;
    return dt_attention(q, keys, values, d);
}

/* Returns x (B,T,K,D) with each head repeated n/K times: (B,T,n,D). */
static dt_tensor *dt__repeat_heads(dt_tensor *x, int64_t n) {
    int64_t K = x->shape.d[2], D = x->shape.d[3], tokens = x->shape.d[0] * x->shape.d[1];
    size_t bytes = (size_t)(tokens * n) * sizeof(int32_t);
    dt_shape shape = x->shape;
    shape.d[2] = n;
    int32_t *from = (int32_t *)dt__buffer_acquire(x->ctx, DT_MEM_HOST, bytes + 1);
    for (int64_t i = 0; from && i < tokens * n; i++) from[i] = (int32_t)(i / n * K + i % n * K / n);
    dt_tensor *rows = from ? dt_input(x->ctx, DT_I32, DT_SHAPE(tokens * n), from) : NULL;
    dt__buffer_release(x->ctx, from);
    x = rows ? dt_gather_rows(dt_reshape(x, DT_SHAPE(tokens * K, D)), rows) : NULL;
    return x ? dt_reshape(x, shape) : NULL;
}

/* Ulysses. All-to-alls turn q, keys and values from (B,T/c,H,D) into (B,T,H/c,D), so that each rank
   computes the attention of some heads over all tokens. Another all-to-all turns the result back
   into (B,T/c,H,D). */
static dt_tensor *dt__cp_ulysses_attention(
    dt_tensor *q, dt_tensor *keys, dt_tensor *values, dt_cp *cp, dt_attn_desc d) {
    int c = dt_comm_size(cp->comm);
    if (keys->shape.d[2] < c) {
        keys = dt__repeat_heads(keys, c);
        values = dt__repeat_heads(values, c);
    }
    q = dt_redistribute(q, cp->comm, DT_SHARD(1), DT_SHARD(2));
    keys = dt_redistribute(keys, cp->comm, DT_SHARD(1), DT_SHARD(2));
    values = dt_redistribute(values, cp->comm, DT_SHARD(1), DT_SHARD(2));
    d.full = cp->desc.full;
    d.positions = cp->explicit_positions ? cp->positions : NULL;
    d.documents = cp->documents;
    dt_tensor *y = dt_attention(q, keys, values, d);
    return y ? dt_redistribute(y, cp->comm, DT_SHARD(2), DT_SHARD(1)) : NULL;
}

/* Reports fields of the descriptor that dt_cp_attention_at takes from cp. */
static int dt__cp_desc_fits(const dt_tensor *q, const dt_cp *cp, dt_attn_desc d) {
    if (d.kv_heads || d.full || d.positions || d.key_positions || d.documents || d.key_documents ||
        d.lse)
        dt_fail(q->ctx, DT_ERR_ARG,
            "dt_cp_attention(%s): only window, soft_cap and scale may be set; the mask is that of "
            "dt_cp_make",
            q->name);
    return q->ctx->status == DT_OK && dt__attention_options_fit(q, cp->desc.full, d);
}

static dt_tensor *dt__cp_attention_at(
    dt_tensor *q, dt_tensor *keys, dt_tensor *values, dt_cp *cp, dt_attn_desc desc) {
    const char *op = "dt_cp_attention";
    dt_ctx *ctx = dt__float_op_context(op, 3, q, keys, values);
    char why[300];
    if (ctx && !cp) dt_fail(ctx, DT_ERR_ARG, "%s(%s): cp is NULL", op, q->name);
    if (!ctx || !cp || !dt__attention_fits(q, keys, values, 0)) return NULL;
    if (!dt__cp_desc_fits(q, cp, desc)) return NULL;
    int c = dt_comm_size(cp->comm);
    if (q->shape.d[0] != cp->desc.batch || q->shape.d[1] * c != cp->desc.tokens ||
        keys->shape.d[1] != q->shape.d[1]) {
        dt_fail(ctx, DT_ERR_SHAPE,
            "%s(%s, %s): %s and %s, but cp was made for %lld sequences of %lld tokens over %d "
            "ranks",
            op, q->name, keys->name, dt__shape_text(q->shape).s, dt__shape_text(keys->shape).s,
            (long long)cp->desc.batch, (long long)cp->desc.tokens, c);
        return NULL;
    }
    if (dt_cp_check(cp->desc.kind, cp->desc.tokens, c, q->shape.d[2], keys->shape.d[2], why,
            sizeof why) != DT_OK) {
        dt_fail(ctx, DT_ERR_SHAPE, "%s(%s): %s", op, q->name, why);
        return NULL;
    }
    dt_tensor *in[3] = { q, keys, values };
    for (int i = 0; i < 3; i++)
        if (!dt__placement_expect(op, in[i], (const dt_group *)cp->comm, DT_SHARD(1),
                "each rank passes its own tokens"))
            return NULL;
    if (cp->desc.kind == DT_CP_ALLGATHER)
        return dt__cp_allgather_attention(q, keys, values, cp, desc);
    if (cp->desc.kind == DT_CP_ULYSSES) return dt__cp_ulysses_attention(q, keys, values, cp, desc);
    return dt__cp_ring_attention(q, keys, values, cp, desc);
}

static dt_tensor *dt__cp_attention(dt_tensor *q, dt_tensor *keys, dt_tensor *values, dt_cp *cp) {
    dt_attn_desc none;
    memset(&none, 0, sizeof none);
    return dt__cp_attention_at(q, keys, values, cp, none);
}

// ==== 16. Expert parallelism: the router ========================================================

/* A mixture-of-experts layer routes tokens, dispatches them to experts, multiplies and combines.
   From the router's choices every rank makes a plan (dt__exchange): which rows the rank sends to
   which rank, and in which order the rank stores the rows that it receives. For example, rank 0 has
   experts e0 and e1 and receives all four tokens:

       rank 0 sends   e0: t0   e1: t1  -->  rank 0 receives    from 0: t0 t1   from 1: t2 t3
       rank 1 sends   e0: t2   e1: t3  -->  ordered by expert  e0: t0 t2       e1: t1 t3

   Token dispatch gathers rows, sends them with an all-to-all and orders them by expert. Token
   combine is the inverse, and ends with a weighted sum over each token's rows. Each step is an op
   with its own backward, so this file writes none for them. */

static int dt__is_dry(const void *p);

/* State of a router. An array of choices has the shape (B,tokens,k), where `tokens` is the number
   of tokens per sequence in x (local_tokens), in the tensor-parallel region (region_tokens) or in
   the whole sequence, in rank order of cp (full_tokens). */
typedef struct dt__router {
    dt_ctx *ctx;
    dt_route_desc d;
    int64_t B, local_tokens, region_tokens, full_tokens, E, k;
    dt_comm *sp; /* tp if tokens are sharded over tp, else NULL */
    /* tokens per sequence that this rank dispatches: region_tokens, or local_tokens with expert
       folding */
    int64_t sent_tokens;
    int32_t *topk;         /* chosen experts of x's tokens */
    int32_t *kept_choices; /* chosen experts of the sent tokens; -1 for a dropped choice */
    /* (B,E): number of choices of each expert in each whole sequence */
    int64_t *load;
} dt__router;

/* Returns n zeros in host memory, which stay valid until dt_reset; NULL after a failure. */
static int32_t *dt__host_ints(dt_ctx *ctx, int64_t n) {
    return (int32_t *)dt__meta(ctx, (size_t)n * sizeof(int32_t));
}

/* All-gathers `mine` (B,t,width) along the tokens. Returns (B,N t,width), in rank order of the N
   ranks of comm, or NULL after a failure. */
static int32_t *dt__gather_tokens(
    const dt__router *r, dt_comm *comm, int32_t *mine, int64_t t, int64_t width) {
    int64_t N = dt_comm_size(comm), slice = t * width, count = r->B * slice;
    if (N == 1) return mine;
    int32_t *all = dt__host_ints(r->ctx, N * count), *out = dt__host_ints(r->ctx, N * count);
    if (!all || !out || dt__gather_numbers(comm, mine, all, (size_t)count, DT_I32) != DT_OK)
        return NULL;
    for (int64_t i = 0; i < N * r->B; i++) { /* rank i / B, sequence i % B */
        int64_t to = (i % r->B * N + i / r->B) * slice;
        if (slice > 0) memcpy(out + to, all + i * slice, (size_t)slice * sizeof *out);
    }
    return out;
}

/* Dry run: the even choices of `tokens` tokens of each sequence, from token `first` of the whole
   sequence in rank order of cp: choice j of the token at position t is expert (k t + j) mod E. */
static void dt__dry_choices(const dt__router *r, int32_t *choices, int64_t first, int64_t tokens) {
    for (int64_t i = 0; i < r->B * tokens; i++) {
        int64_t at = first + i % tokens, T = r->region_tokens;
        int64_t position =
            dt_cp_token(r->d.kind, r->full_tokens, dt_comm_size(r->d.cp), (int)(at / T), at % T);
        for (int64_t j = 0; j < r->k; j++)
            choices[i * r->k + j] = (int32_t)((position * r->k + j) % r->E);
    }
}

/* Fills token_at (B,full_tokens), the inverse of the positions: entry p of a sequence is the index
   of the token at position p. */
static dt_status dt__route_positions(const dt__router *r, int32_t *token_at) {
    int32_t *positions = NULL;
    int64_t T = r->full_tokens;
    if (r->d.positions && !dt_comm_has_phantoms(r->sp) && !dt_comm_has_phantoms(r->d.cp)) {
        int32_t *mine = dt__host_ints(r->ctx, r->B * r->local_tokens);
        if (mine) memcpy(mine, r->d.positions, (size_t)(r->B * r->local_tokens) * sizeof *mine);
        if (mine) mine = dt__gather_tokens(r, r->sp, mine, r->local_tokens, 1);
        if (mine) positions = dt__gather_tokens(r, r->d.cp, mine, r->region_tokens, 1);
        if (!positions) return dt_error(r->ctx);
    }
    for (int64_t i = 0; i < r->B * T; i++) token_at[i] = -1;
    for (int64_t i = 0; i < r->B * T; i++) {
        int64_t position = positions
                               ? positions[i]
                               : dt_cp_token(r->d.kind, T, dt_comm_size(r->d.cp),
                                     (int)(i % T / r->region_tokens), i % T % r->region_tokens);
        if (position < 0 || position >= T || token_at[i / T * T + position] >= 0)
            return dt_fail(r->ctx, DT_ERR_ARG,
                "dt_route: position %lld of token %lld in sequence %lld; each of 0 to %lld "
                "is of one token",
                (long long)position, (long long)(i % T), (long long)(i / T), (long long)T - 1);
        token_at[i / T * T + position] = (int32_t)(i % T);
    }
    return DT_OK;
}

/* Expert capacity: returns the largest number of choices of one sequence that an expert takes. The
   small constant keeps rounding errors from increasing the capacity by one. */
static int64_t dt__expert_capacity(const dt__router *r) {
    double capacity = ceil(r->d.capacity * (double)(r->k * r->full_tokens) / (double)r->E - 1e-9);
    return capacity < 1                        ? 1
           : capacity < (double)r->full_tokens ? (int64_t)capacity
                                               : r->full_tokens;
}

/* Drops the choices of one sequence beyond the expert capacity. All first choices are served before
   all second choices, and so on; among the first (second, ..) choices, tokens are served in order
   of their positions. free_slots (E) is a work array: the remaining capacity of each expert. */
static void dt__drop_beyond_capacity(
    const dt__router *r, int32_t *choices, const int32_t *token_at, int64_t *free_slots) {
    int64_t capacity = dt__expert_capacity(r);
    for (int64_t e = 0; e < r->E; e++) free_slots[e] = capacity;
    for (int64_t i = 0; i < r->k * r->full_tokens; i++) {
        int32_t *c = &choices[token_at[i % r->full_tokens] * r->k + i / r->full_tokens];
        if (free_slots[*c] > 0)
            free_slots[*c]--;
        else
            *c = -1;
    }
}

/* Gathers the choices of the sent tokens into kept_choices. If the capacity or the
   load-balancing loss needs the choices of whole sequences, also gathers these, counts the load and
   drops choices beyond the capacity. */
static dt_status dt__route_sequences(dt__router *r) {
    dt_ctx *ctx = r->ctx;
    int need_sequences = r->d.capacity > 0 || r->d.balance > 0;
    int folded = r->sent_tokens < r->region_tokens; /* no other rank of tp sends these tokens */
    r->kept_choices = r->topk;
    if (folded && !need_sequences) return dt_error(ctx);
    int32_t *region_choices = dt__gather_tokens(r, r->sp, r->topk, r->local_tokens, r->k),
            *all_choices = region_choices, *token_at;
    r->kept_choices = region_choices;
    int64_t region = dt_comm_rank(r->d.cp) * r->region_tokens; /* its first token */
    if (folded && r->d.capacity > 0 && r->d.capacity < 1 &&
        (dt_comm_has_phantoms(r->sp) || dt_comm_has_phantoms(r->d.cp)))
        return dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_route: capacity %g with expert folding and phantom ranks, whose dropped choices "
            "this rank does not know; run all ranks, or use a capacity of 1 or more",
            r->d.capacity);
    if (region_choices && dt_comm_has_phantoms(r->sp))
        dt__dry_choices(r, region_choices, region, r->region_tokens);
    if (!region_choices || !need_sequences) return dt_error(ctx);
    all_choices = dt__gather_tokens(r, r->d.cp, region_choices, r->region_tokens, r->k);
    if (all_choices && dt_comm_has_phantoms(r->d.cp))
        dt__dry_choices(r, all_choices, 0, r->full_tokens);
    size_t count = (size_t)(r->B * r->full_tokens * r->k);
    r->load = (int64_t *)dt__meta(ctx, (size_t)(r->B * r->E) * sizeof *r->load);
    r->kept_choices = dt__host_ints(ctx, r->B * r->full_tokens * r->k);
    token_at = dt__host_ints(ctx, r->B * r->full_tokens);
    int64_t *free_slots = (int64_t *)dt__meta(ctx, (size_t)r->E * sizeof *free_slots);
    if (!all_choices || !r->load || !r->kept_choices || !token_at || !free_slots)
        return dt_error(ctx);
    if (count > 0) memcpy(r->kept_choices, all_choices, count * sizeof *all_choices);
    for (size_t i = 0; i < count; i++)
        r->load[(int64_t)i / (r->full_tokens * r->k) * r->E + all_choices[i]]++;
    if (r->d.capacity > 0 && dt__route_positions(r, token_at) != DT_OK) return dt_error(ctx);
    for (int64_t b = 0; b < r->B && r->d.capacity > 0; b++)
        dt__drop_beyond_capacity(r, r->kept_choices + b * r->full_tokens * r->k,
            token_at + b * r->full_tokens, free_slots);
    /* Keep only the tokens of each sequence that this rank sends. */
    int64_t slice = r->sent_tokens * r->k,
            first = (region + (folded ? dt_comm_rank(r->sp) * r->local_tokens : 0)) * r->k;
    for (int64_t b = 0; b < r->B && slice > 0; b++)
        memmove(r->kept_choices + b * slice, r->kept_choices + b * r->full_tokens * r->k + first,
            (size_t)slice * sizeof *r->kept_choices);
    return DT_OK;
}

/* ---- the router: probabilities, choices, gates ---- */

/* Casts x to the type in which the router computes. transient is 1 if x is an activation: the cast
   copy is then freed at the end of its block, and the backward casts x again. */
static dt_tensor *dt__to_wide(dt_tensor *x, int transient) {
    if (!dt__narrow(x->dtype)) return x;
    /* only a recorded op can run again in the backward */
    return dt__cast(x, DT_F32, transient && x->needs_grad && !x->ctx->no_grad);
}

/* Group-limited routing. score is (B,T',E). Returns the scores, in which those of experts outside
   of the token's best groups are -infinity. */
static dt_tensor *dt__limit_groups(const dt__router *r, dt_tensor *score) {
    int64_t G = r->d.groups, size = r->E / G;
    dt_tensor *index = NULL;
    dt_tensor *in_groups = dt_reshape(score, DT_SHAPE(r->B, r->local_tokens, G, size));
    dt_tensor *best = in_groups ? dt_topk(in_groups, size < 2 ? 1 : 2, NULL) : NULL;
    dt_tensor *sums = best ? dt_sum_over(best, 3) : NULL; /* (B,T',G) */
    if (!sums || !dt_topk(sums, r->d.top_groups, &index)) return NULL;
    dt_tensor *taken = dt_one_hot(index, G, score->dtype); /* (B,T',top_groups,G) */
    dt_tensor *others = taken ? dt_affine(dt_sum_over(taken, 2), -1, 1) : NULL;
    others = others ? dt_reshape(others, DT_SHAPE(r->B, r->local_tokens, G, 1)) : NULL;
    dt_tensor *limited = others ? dt_masked_fill(in_groups, others, -HUGE_VAL) : NULL;
    return limited ? dt_reshape(limited, score->shape) : NULL;
}

/* Top-k: chooses the k experts with the largest probabilities for each token. In a dry run all
   probabilities read as 0, so the function spreads the choices evenly. */
static dt_status dt__route_topk(dt__router *r, dt_tensor *probability) {
    dt_ctx *ctx = r->ctx;
    dt_tensor *index = NULL;
    int no_grad = ctx->no_grad;
    int64_t n = r->B * r->local_tokens;
    r->topk = dt__host_ints(ctx, n * r->k);
    if (!r->topk) return dt_error(ctx);
    ctx->no_grad = 1;
    if (r->d.bias) probability = dt_add(probability, r->d.bias);
    if (probability && r->d.groups) probability = dt__limit_groups(r, probability);
    if (probability) dt_topk(probability, (int)r->k, &index);
    ctx->no_grad = no_grad;
    if (dt_error(ctx) != DT_OK || (dt_read)(index, r->topk) != DT_OK) return dt_error(ctx);
    if (dt__is_dry(index->data))
        dt__dry_choices(r, r->topk,
            dt_comm_rank(r->d.cp) * r->region_tokens + dt_comm_rank(r->sp) * r->local_tokens,
            r->local_tokens);
    for (int64_t i = 0; i < n * r->k; i++)
        if (r->topk[i] < 0 || r->topk[i] >= r->E)
            return dt_fail(ctx, DT_ERR_NUMERIC,
                "dt_route: token %lld has no %lld largest of %lld probabilities",
                (long long)(i / r->k), (long long)r->k, (long long)r->E);
    return DT_OK;
}

/* Returns (B,T',k): the probabilities of each token's chosen experts, divided by their sum if k > 1
   or if they are sigmoids. With a bias, and of sigmoids, the sum may be 0, so a small constant is
   added to the sum. */
static dt_tensor *dt__route_gates(const dt__router *r, dt_tensor *probability) {
    int64_t n = r->B * r->local_tokens;
    int32_t *index = dt__host_ints(r->ctx, n * r->k);
    if (!index) return NULL;
    for (int64_t i = 0; i < n * r->k; i++) index[i] = (int32_t)(i / r->k * r->E) + r->topk[i];
    dt_tensor *indices = dt_input(r->ctx, DT_I32, DT_SHAPE(r->B, r->local_tokens, r->k), index);
    dt_tensor *chosen =
        indices ? dt_gather_rows(dt_reshape(probability, DT_SHAPE(n * r->E, 1)), indices) : NULL;
    dt_tensor *gates = chosen ? dt_reshape(chosen, DT_SHAPE(r->B, r->local_tokens, r->k)) : NULL;
    int sigmoid = r->d.scores == DT_ROUTE_SIGMOID, one = r->k == 1 && !sigmoid;
    if (gates && !one && !r->d.raw_gates) {
        dt_tensor *sum = dt_reshape(dt_sum_over(gates, 2), DT_SHAPE(r->B, r->local_tokens, 1));
        if (sum && (r->d.bias || sigmoid)) sum = dt_affine(sum, 1, 1e-20);
        gates = sum ? dt_div(gates, sum) : NULL;
    }
    return gates && r->d.scale > 0 ? dt_affine(gates, r->d.scale, 0) : gates;
}

/* ---- the router: side losses, statistics ---- */

/* Load-balancing loss: returns this rank's part of the loss that dt_route_desc.balance describes.
   The part is the sum over this rank's tokens and all experts e of the token's probability of
   expert e times E f_e / (T * number of sequences). Sigmoids are first divided by their sum: the
   sequence-wise balance loss of DeepSeek-V3. */
static dt_tensor *dt__balance_loss(const dt__router *r, dt_tensor *probability) {
    dt_dtype dtype = probability->dtype;
    if (r->d.scores == DT_ROUTE_SIGMOID) {
        dt_tensor *total = dt_affine(dt_sum_over(probability, 2), 1, 1e-20);
        total = total ? dt_reshape(total, DT_SHAPE(r->B, r->local_tokens, 1)) : NULL;
        if (!(probability = total ? dt_div(probability, total) : NULL)) return NULL;
    }
    void *factor = dt__meta(r->ctx, (size_t)(r->B * r->E) * dt_dtype_size(dtype));
    double T = (double)r->full_tokens, all = (double)r->k * T * T * (double)r->d.sequences;
    if (!factor) return NULL;
    for (int64_t i = 0; i < r->B * r->E; i++)
        dt__set_number(dtype, factor, (size_t)i, (double)r->E * (double)r->load[i] / all);
    dt_tensor *factors = dt_input(r->ctx, dtype, DT_SHAPE(r->B, r->E), factor);
    dt_tensor *sum = factors ? dt_sum_over(probability, 1) : NULL;
    return sum ? dt_sum_over(dt_mul(sum, factors), DT_ALL) : NULL;
}

/* Router z-loss: returns this rank's part of the mean over tokens of log(sum of e^logits)^2. */
static dt_tensor *dt__z_loss(const dt__router *r, dt_tensor *logits) {
    dt_shape rows = DT_SHAPE(r->B, r->local_tokens, 1);
    dt_tensor *row_max = dt_max_over(logits, 2), *rest = NULL, *lse = NULL;
    row_max = row_max ? dt_reshape(row_max, rows) : NULL;
    if (row_max) rest = dt_sum_over(dt_exp(dt_sub(logits, row_max)), 2);
    if (rest) lse = dt_add(dt_reshape(dt_ln(rest), rows), row_max);
    return lse ? dt_affine(dt_sum_over(dt_mul(lse, lse), DT_ALL),
                     1 / ((double)r->d.sequences * (double)r->full_tokens), 0)
               : NULL;
}

/* Attaches a side loss to x and, unless sum is NULL, adds the value of the loss to *sum. */
static dt_status dt__attach_loss(
    const dt__router *r, dt_tensor *x, dt_tensor *loss, double weight, double *sum) {
    if (loss && dt_loss(x, loss, weight) && sum) *sum += dt_item(loss);
    return dt_error(r->ctx);
}

static dt_status dt__route_losses(
    const dt__router *r, dt_tensor *x, dt_tensor *logits, dt_tensor *probability) {
    dt_route_counts *count = dt_recomputing(r->ctx) ? NULL : r->d.counts;
    if (r->d.balance > 0)
        dt__attach_loss(
            r, x, dt__balance_loss(r, probability), r->d.balance, count ? &count->balance : NULL);
    if (r->d.z > 0) dt__attach_loss(r, x, dt__z_loss(r, logits), r->d.z, count ? &count->z : NULL);
    return dt_error(r->ctx);
}

/* Adds the statistics of x's tokens to the counts. kept_choices covers all tokens that this rank
   sends. If these are the tokens of all ranks of the group sp, x holds only the slice of them that
   belongs to this rank's position in sp. */
static void dt__route_count(const dt__router *r) {
    dt_route_counts *counts = r->d.counts;
    int64_t slice = r->local_tokens * r->k, sent = r->sent_tokens * r->k,
            first = sent > slice ? dt_comm_rank(r->sp) * slice : 0;
    if (!counts || dt_recomputing(r->ctx)) return;
    counts->choices += (double)(r->B * slice);
    for (int64_t i = 0; i < r->B * slice; i++) {
        if (counts->experts) counts->experts[r->topk[i]]++;
        counts->dropped += r->kept_choices[i / slice * sent + first + i % slice] < 0;
    }
}

/* Returns the text of the first rule that the arguments violate, or NULL. One rule per line. */
static const char *dt__route_problem(const dt__router *r, const dt_tensor *x, const dt_tensor *w) {
    const dt_route_desc *d = &r->d;
    const dt_tensor *bias = d->bias;
    if (x->shape.nd != 3 || w->shape.nd != 2 || x->shape.d[2] != w->shape.d[1])
        return "x (B,T,C) and w (E,C) are needed";
    if (dt__wide(x->dtype, 1) != dt__wide(w->dtype, 1) || dt__integer(w->dtype))
        return "the dtypes do not match";
    if (r->k < 1 || r->k > r->E) return "k must be 1 to E";
    if (!(d->capacity >= 0 && d->capacity < HUGE_VAL)) return "the capacity must be 0 or more";
    if (!(d->balance >= 0 && d->balance < HUGE_VAL && d->z >= 0 && d->z < HUGE_VAL))
        return "weights must be 0 or more";
    if ((d->balance > 0 || d->z > 0) && d->sequences < 1)
        return "side losses need the step's number of sequences";
    if (bias &&
        (dt_count(bias->shape) != r->E || bias->dtype != dt__wide(x->dtype, 1) || bias->needs_grad))
        return "the bias must be (E), f32 (f64 of f64), and frozen";
    if (d->outside.kind != DT_PLACEMENT_REPLICATE &&
        (d->outside.kind != DT_PLACEMENT_SHARD || d->outside.dim != 1))
        return "outside must be DT_REPLICATE or DT_SHARD(1)";
    if (d->expert_tp < 0) return "expert_tp must be 0 or more";
    if (d->expert_tp && dt_comm_size(d->tp) > 1 && !r->sp && !r->ctx->no_grad)
        return "with expert folding, outside must be DT_SHARD(1), so that each rank of tp sends "
               "tokens of its own";
    int64_t most = r->E > 0 ? r->E : 1; /* rows of a token on all ranks */
    if (d->expert_tp > 1) most *= d->expert_tp;
    if (r->B * r->full_tokens > INT32_MAX / most) return "too many tokens at once";
    if (d->scores < DT_ROUTE_SOFTMAX || d->scores > DT_ROUTE_SIGMOID) return "scores: DT_ROUTE_*";
    if (!(d->scale >= 0 && d->scale < HUGE_VAL)) return "the scale must be 0 or more";
    if (d->groups < 0 || (d->groups && r->E % d->groups)) return "groups must divide E";
    if (d->groups && (d->top_groups < 1 || d->top_groups > d->groups))
        return "top_groups must be 1 to groups";
    if (d->groups && r->k > d->top_groups * (r->E / d->groups))
        return "the chosen groups must have k experts";
    return NULL;
}

static dt_status dt__route_check(const dt__router *r, const dt_tensor *x, const dt_tensor *w) {
    char text[300];
    const char *why = dt__route_problem(r, x, w);
    if (why)
        return dt_fail(r->ctx, DT_ERR_SHAPE,
            "dt_route(%s, %s): %s %s and %s %s, k %lld, capacity %g, balance %g, "
            "z %g, %lld sequences, %d of %d groups, scale %g: %s",
            x->name, w->name, dt_dtype_name(x->dtype), dt__shape_text(x->shape).s,
            dt_dtype_name(w->dtype), dt__shape_text(w->shape).s, (long long)r->k, r->d.capacity,
            r->d.balance, r->d.z, (long long)r->d.sequences, r->d.top_groups, r->d.groups,
            r->d.scale, why);
    int c = dt_comm_size(r->d.cp);
    if (dt_cp_check(r->d.kind, r->full_tokens, c, c, c, text, sizeof text) == DT_OK) return DT_OK;
    return dt_fail(r->ctx, DT_ERR_SHAPE, "dt_route(%s): %s", x->name, text);
}

static dt__router dt__router_make(const dt_tensor *x, const dt_tensor *w, dt_route_desc d) {
    dt__router r;
    memset(&r, 0, sizeof r);
    r.ctx = x->ctx;
    r.d = d;
    /* on one rank of cp the tokens of a sequence are in order, as with RING */
    if (dt_comm_size(d.cp) == 1) r.d.kind = DT_CP_RING;
    r.sp = d.outside.kind == DT_PLACEMENT_SHARD && dt_comm_size(d.tp) > 1 ? d.tp : NULL;
    r.B = x->shape.d[0];
    r.local_tokens = x->shape.nd > 1 ? x->shape.d[1] : 0;
    r.region_tokens = r.local_tokens * dt_comm_size(r.sp);
    r.full_tokens = r.region_tokens * dt_comm_size(d.cp);
    r.sent_tokens = d.expert_tp ? r.local_tokens : r.region_tokens;
    r.E = w->shape.d[0];
    r.k = d.k ? d.k : 1;
    return r;
}

/* Makes the routing of the tokens that this rank sends: their choices and gates. Without expert
   folding these are the tokens of the tensor-parallel region. */
static dt_routing *dt__route_enter(const dt__router *r, dt_tensor *gates) {
    dt_routing *out = (dt_routing *)dt__meta(r->ctx, sizeof *out);
    if (!r->d.expert_tp)
        gates = dt_redistribute(gates, r->d.tp, r->sp ? DT_SHARD(1) : DT_REPLICATE, DT_COPY);
    if (!out || !gates) return NULL;
    out->batch = r->B;
    out->tokens = r->sent_tokens;
    out->copies = r->d.expert_tp ? r->d.expert_tp : 1;
    out->experts = r->E;
    out->k = r->k;
    out->gates = gates;
    out->choices = r->kept_choices;
    out->folds = r->d.expert_tp > 0;
    out->kind = r->d.kind;
    out->cp_ranks = dt_comm_size(r->d.cp);
    out->tp_ranks = dt_comm_size(r->d.tp);
    out->full_tokens = r->full_tokens;
    if (r->d.capacity > 0) {
        int64_t capacity = dt__expert_capacity(r);
        out->max_choices = capacity < r->sent_tokens ? capacity : r->sent_tokens;
    }
    return out;
}

static dt_routing *dt__route(dt_tensor *x, dt_tensor *w, dt_route_desc d) {
    const char *op = "dt_route";
    dt_ctx *ctx = dt__float_op_context(op, 2, x, w, d.bias);
    if (!ctx) return NULL;
    if (x->shape.nd < 1 || w->shape.nd < 1) {
        dt__mismatch(op, x, w, "x (B,T,C) and w (E,C) are needed");
        return NULL;
    }
    dt__router r = dt__router_make(x, w, d);
    if (dt__route_check(&r, x, w) != DT_OK) return NULL;
    dt_tensor *wide = dt__to_wide(x, 1), *router = dt__to_wide(w, 0);
    dt_tensor *logits = wide && router ? dt_linear(wide, router, NULL) : NULL; /* (B,T',E) */
    dt_tensor *probability = !logits                        ? NULL
                             : d.scores == DT_ROUTE_SIGMOID ? dt_sigmoid(logits)
                                                            : dt_softmax(logits);
    if (!probability || dt__route_topk(&r, probability) != DT_OK) return NULL;
    dt_tensor *gates = dt__route_gates(&r, probability);
    if (!gates || dt__route_sequences(&r) != DT_OK) return NULL;
    if (dt__route_losses(&r, x, logits, probability) != DT_OK) return NULL;
    dt__route_count(&r);
    return dt__route_enter(&r, gates);
}

static dt_status dt__route_update_bias(
    dt_tensor *bias, double *counts, double rate, dt_comm *const *groups, int n) {
    double total = 0, value[1];
    if (!bias || dt_error(bias->ctx) != DT_OK) return bias ? dt_error(bias->ctx) : DT_ERR_ARG;
    dt_ctx *ctx = bias->ctx;
    size_t E = (size_t)dt_count(bias->shape), bytes = E * sizeof value;
    if (!counts || (bias->dtype != DT_F32 && bias->dtype != DT_F64) ||
        !(rate >= 0 && rate < HUGE_VAL))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_route_update_bias(%s): %s bias, %s, rate %g; use f32 or f64, counts of each "
            "expert, and a rate of 0 or more",
            bias->name, dt_dtype_name(bias->dtype), counts ? "counts" : "no counts", rate);
    for (int g = 0; g < n; g++)
        if (dt_sum_doubles(groups[g], counts, E) != DT_OK) return dt_error(ctx);
    void *host = dt_alloc(ctx, DT_MEM_HOST, bytes, "the bias of a router");
    for (size_t e = 0; e < E; e++) total += counts[e];
    if (host && (dt_read)(bias, host) == DT_OK) {
        /* total - E count has the same sign as mean - count, and is computed exactly. */
        for (size_t e = 0; e < E; e++) {
            double more = total - (double)E * counts[e], sign = (double)((more > 0) - (more < 0));
            dt__set_number(bias->dtype, host, e, dt__number(bias->dtype, host, e) + rate * sign);
        }
        (dt_write)(bias, host);
    }
    dt_free(ctx, DT_MEM_HOST, host, bytes);
    return dt_error(ctx);
}

// ==== 17. Expert parallelism: dispatch, experts, combine ========================================

/* Token dispatch and token combine are compositions of differentiable ops, so no backward is
   written here:

       dispatch   gather the rows of the tokens -> all-to-all -> permute to the order of experts
       experts    grouped linear: one product for each expert's rows
       combine    the inverse permutation -> all-to-all -> sum of each token's rows times its gates

   dt__exchange is the plan of a token dispatch and its token combine. There is one row for each
   choice that is not dropped. A sender orders its rows by expert, then token, so that the rows for
   one rank are contiguous. The rows arrive ordered by source rank, then expert, then token.

   With expert folding, neighbouring ranks of the group shard the same experts: ranks q N to
   (q+1) N - 1 are the ranks of expert_tp that have coordinate q along ep. A sender repeats the rows
   for these experts N times, once for each of the ranks. The backward of the gather adds up the N
   gradients of a row, and the weighted sum of the combine adds up its N partial results. */
typedef struct dt__exchange {
    dt_comm *comm;
    int ranks;
    int64_t sent;                 /* number of sent rows */
    int64_t *rows_to, *rows_from; /* (ranks): number of rows to and from each rank */
    dt_tensor *token_of_row;      /* (sent rows) i32: the token of each sent row */
    /* (B,T,k copies) i32: the indices of the sent rows of each choice; -1 if dropped */
    dt_tensor *row_of_choice;
    /* (rows) i32: arrival_of_row[i] is the index, in order of arrival, of row i in expert
       order; row_of_arrival is the inverse */
    dt_tensor *arrival_of_row, *row_of_arrival;
} dt__exchange;

/* Returns the most rows that a rank sends to experts. Without a capacity the rows of an expert have
   no useful bound: all tokens may choose it. */
static int64_t dt__max_sent(const dt_routing *r) {
    int64_t full = r->batch * r->experts * r->max_choices, all = r->batch * r->tokens * r->k;
    return r->max_choices == 0 ? (int64_t)DT__NO_BOUND : r->copies * (full < all ? full : all);
}

/* Returns the most rows that a rank's experts receive from N ranks; as dt__max_sent. */
static int64_t dt__max_received(const dt_routing *r, int N) {
    int64_t full = r->batch * r->local_experts * r->max_choices, all = r->batch * r->tokens * r->k;
    return r->max_choices == 0 ? (int64_t)DT__NO_BOUND : N * (full < all ? full : all);
}

/* Returns an i32 tensor of row indices, with memory for max_rows indices. */
static dt_tensor *dt__row_indices(
    dt_ctx *ctx, int64_t rows, int64_t max_rows, const int32_t *indices) {
    dt_tensor like = { .shape = DT_SHAPE(rows), .max_rows = max_rows };
    dt_tensor *t = dt__new_output(ctx, &like, DT_I32, like.shape, "dt_input", 0);
    if (t) (dt_write)(t, indices);
    return t;
}

/* Plans which rows this rank sends, and adds the number of rows for each expert to `count` (E). */
static dt_status dt__exchange_send(
    dt__exchange *e, const dt_routing *r, int32_t *count, dt_ctx *ctx) {
    int64_t choices = r->batch * r->tokens * r->k, copies = r->copies, at = 0;
    int32_t *token = dt__host_ints(ctx, 2 * copies * choices + r->experts);
    dt_shape shape = r->gates->shape;
    if (!token) return dt_error(ctx);
    int32_t *row = token + copies * choices, *next = row + copies * choices;
    for (int64_t i = 0; i < choices; i++)
        if (r->choices[i] >= 0) count[r->choices[i]]++;
    for (int64_t expert = 0, first = 0; expert < r->experts; expert++) {
        int64_t *to = e->rows_to + expert / r->local_experts * copies;
        if (expert % r->local_experts == 0) first = at; /* the rows for rank `to` begin here */
        next[expert] = (int32_t)(first + to[0]);
        for (int64_t c = 0; c < copies; c++) to[c] += count[expert];
        at += copies * count[expert];
    }
    e->sent = at;
    for (int64_t i = 0; i < choices; i++) {
        int32_t expert = r->choices[i], first = expert < 0 ? 0 : next[expert]++;
        for (int64_t c = 0; c < copies; c++) {
            int64_t to =
                expert < 0 ? -1 : first + c * e->rows_to[expert / r->local_experts * copies];
            row[i * copies + c] = (int32_t)to;
            if (to >= 0) token[to] = (int32_t)(i / r->k);
        }
    }
    shape.d[2] *= copies;
    e->token_of_row = dt__row_indices(ctx, e->sent, dt__max_sent(r), token);
    e->row_of_choice = dt_input(ctx, DT_I32, shape, row);
    return dt_error(ctx);
}

/* Plans which rows this rank receives. `all` (ranks,E) has for each rank the numbers of rows that
   it sends to each expert. */
static dt_status dt__exchange_receive(
    dt__exchange *e, dt_routing *r, const int32_t *all, dt_ctx *ctx) {
    int64_t first = dt_comm_rank(e->comm) / r->copies * r->local_experts, at = 0;
    for (int rank = 0; rank < e->ranks; rank++)
        for (int64_t expert = 0; expert < r->local_experts; expert++) {
            int32_t n = all[rank * r->experts + first + expert];
            e->rows_from[rank] += n;
            r->expert_rows[expert] += n;
            r->rows += n;
        }
    if (r->rows > INT32_MAX)
        return dt_fail(
            ctx, DT_ERR_SHAPE, "dt_dispatch: %lld rows for one rank", (long long)r->rows);
    if (e->ranks == 1) return DT_OK;
    int64_t max = dt__max_received(r, e->ranks);
    int32_t *arrival_of_row =
        dt__host_ints(ctx, 2 * (r->rows > max ? r->rows : max) + r->local_experts);
    if (!arrival_of_row) return dt_error(ctx);
    int32_t *row_of_arrival = arrival_of_row + r->rows;
    int32_t *next_row = row_of_arrival + r->rows; /* of each expert */
    for (int64_t expert = 1; expert < r->local_experts; expert++)
        next_row[expert] = next_row[expert - 1] + (int32_t)r->expert_rows[expert - 1];
    for (int rank = 0; rank < e->ranks; rank++)
        for (int64_t expert = 0; expert < r->local_experts; expert++)
            for (int32_t n = all[rank * r->experts + first + expert]; n > 0; n--, at++) {
                int32_t row = next_row[expert]++;
                arrival_of_row[row] = (int32_t)at;
                row_of_arrival[at] = row;
            }
    e->arrival_of_row = dt__row_indices(ctx, r->rows, max, arrival_of_row);
    e->row_of_arrival = dt__row_indices(ctx, r->rows, max, row_of_arrival);
    return dt_error(ctx);
}

/* Dry run with expert folding and phantom ranks: counts the even choices of every rank of comm as
   dt__exchange_send does for this rank's. The ranks have different tokens of the sequences. */
static void dt__dry_counts(const dt_routing *r, const dt_comm *comm, int32_t *all) {
    memset(all, 0, (size_t)(dt_comm_size(comm) * r->experts) * sizeof *all);
    for (int rank = 0; rank < dt_comm_size(comm); rank++, all += r->experts)
        for (int64_t i = 0; i < r->tokens * r->k; i++) {
            int of_world = dt_comm_world_rank(comm, rank);
            int64_t at = of_world % r->tp_ranks * r->tokens + i / r->k;
            int64_t position = dt_cp_token(
                r->kind, r->full_tokens, r->cp_ranks, of_world / r->tp_ranks % r->cp_ranks, at);
            all[(position * r->k + i % r->k) % r->experts] += (int32_t)r->batch;
        }
}

/* [collective: comm] Makes the plan r->exchange. */
static dt_status dt__exchange_make(dt_ctx *ctx, dt_routing *r, dt_comm *comm) {
    int64_t N = dt_comm_size(comm), E = r->experts, local = E / (N / r->copies);
    dt__exchange *e = (dt__exchange *)dt__meta(ctx, sizeof *e);
    r->rows = 0;
    r->local_experts = local;
    r->expert_rows = (int64_t *)dt__meta(ctx, (size_t)local * sizeof *r->expert_rows);
    int32_t *count = dt__host_ints(ctx, (N + 1) * E);
    int64_t *rows = (int64_t *)dt__meta(ctx, (size_t)(2 * N) * sizeof *rows);
    if (!e || !r->expert_rows || !count || !rows) return dt_error(ctx);
    e->comm = comm;
    e->ranks = (int)N;
    e->rows_to = rows;
    e->rows_from = rows + N;
    r->exchange = e;
    if (dt__exchange_send(e, r, count, ctx) != DT_OK) return dt_error(ctx);
    dt_status status = dt__gather_numbers(comm, count, count + E, (size_t)E, DT_I32);
    if (r->folds && dt_comm_has_phantoms(comm)) dt__dry_counts(r, comm, count + E);
    return status == DT_OK ? dt__exchange_receive(e, r, count + E, ctx) : dt_error(ctx);
}

/* dt_gather_rows(x, order) for a permutation of x's rows. `inverse` is the inverse permutation, so
   the backward gathers too. transient 1: the result is a transient tensor that no backward
   reads. */
static dt_tensor *dt__permute_rows(
    dt_tensor *x, dt_tensor *order, dt_tensor *inverse, int transient) {
    const char *op = "dt_gather_rows";
    dt_ctx *ctx = dt__op_context(op, 3, x, order, inverse);
    dt_tensor *y = ctx ? dt__new_output(ctx, order, x->dtype, x->shape, op, transient) : NULL;
    if (!dt__propagate(op, y, DT__RULE_GATHER, x, order, NULL) ||
        dt__lookup_run(op, x, order, order->data, (size_t)dt_count(order->shape), 0, y->data) !=
            DT_OK)
        return NULL;
    dt_record_desc d = dt__make_record(op, x, inverse, NULL, dt__scatter_back, 0);
    d.unread_inputs = 1;
    return dt__record_op(y, d);
}

/* Drops the data of a transient tensor before its block ends. t may be NULL. */
static void dt__drop_early(dt_tensor *t) {
    if (t) dt__data_drop(t);
}

/* Returns the context; NULL if r or x is NULL, or if the op cannot run on x, a and b. */
static dt_ctx *dt__op_routed(
    const char *op, dt_tensor *x, const dt_routing *r, dt_tensor *a, dt_tensor *b) {
    dt_ctx *ctx =
        x ? dt__float_op_context(op, 1, x, a, b) : dt__null_input(op, r ? r->gates : NULL, a, b);
    if (!ctx || r) return ctx;
    dt_fail(ctx, DT_ERR_ARG, "%s(%s): the routing is NULL", op, x->name);
    return NULL;
}

static dt_tensor *dt__dispatch(dt_tensor *x, dt_routing *r, dt_comm *comm) {
    const char *op = "dt_dispatch";
    dt_ctx *ctx = dt__op_routed(op, x, r, NULL, NULL);
    int N = dt_comm_size(comm);
    if (!ctx) return NULL;
    if (x->shape.nd != 3 || x->shape.d[0] != r->batch || x->shape.d[1] != r->tokens) {
        dt_fail(ctx, DT_ERR_SHAPE, "%s(%s): %s, but %lld sequences of %lld tokens were routed", op,
            x->name, dt__shape_text(x->shape).s, (long long)r->batch, (long long)r->tokens);
        return NULL;
    }
    if (N % r->copies != 0) {
        dt_fail(ctx, DT_ERR_SHAPE,
            "%s(%s): expert_tp %d does not divide the %d ranks of '%s'; pass dt_mesh.dispatch", op,
            x->name, r->copies, N, comm ? dt_comm_name(comm) : "one rank");
        return NULL;
    }
    int ep = N / r->copies;
    if (r->experts % ep != 0) {
        dt_fail(ctx, DT_ERR_SHAPE, "%s(%s): %lld experts over ep %d; use a multiple of %d", op,
            x->name, (long long)r->experts, ep, ep);
        return NULL;
    }
    if (dt__exchange_make(ctx, r, comm) != DT_OK) return NULL;
    const dt__exchange *e = r->exchange;
    dt_tensor *tokens = dt_reshape(x, DT_SHAPE(r->batch * r->tokens, x->shape.d[2]));
    if (N == 1 || !tokens) return dt_gather_rows(tokens, e->token_of_row);
    /* no backward reads the data of these two */
    dt_tensor *rows = dt__lookup_rows("dt_gather_rows", tokens, e->token_of_row, 1, 1);
    dt_tensor *arrived =
        dt__all_to_all_rows(rows, comm, e->rows_to, e->rows_from, 1, e->arrival_of_row);
    dt_tensor *y = dt__permute_rows(arrived, e->arrival_of_row, e->row_of_arrival, 0);
    dt__drop_early(rows);
    dt__drop_early(arrived);
    return y;
}

/* Returns (B,T,k copies): the gate of each row. */
static dt_tensor *dt__gates_of_rows(const dt_routing *r) {
    if (r->copies == 1) return r->gates;
    int64_t B = r->batch, T = r->tokens, k = r->k;
    dt_tensor *each = dt_reshape(r->gates, DT_SHAPE(B, T, k, 1));
    if (each) each = dt_broadcast_to(each, DT_SHAPE(B, T, k, r->copies));
    return each ? dt_reshape(each, DT_SHAPE(B, T, k * r->copies)) : NULL;
}

static dt_tensor *dt__combine(dt_tensor *rows, dt_routing *r) {
    const char *op = "dt_combine";
    dt_ctx *ctx = dt__op_routed(op, rows, r, r ? r->gates : NULL, NULL);
    if (!ctx) return NULL;
    dt__exchange *e = r->exchange;
    if (!e || rows->shape.nd != 2 || rows->shape.d[0] != r->rows ||
        dt__wide(rows->dtype, 1) != r->gates->dtype) {
        dt_fail(ctx, DT_ERR_SHAPE,
            "%s(%s): %s %s, but %lld rows (R,O) for gates in %s were dispatched", op, rows->name,
            dt_dtype_name(rows->dtype), dt__shape_text(rows->shape).s, e ? (long long)r->rows : 0,
            dt_dtype_name(r->gates->dtype));
        return NULL;
    }
    if (e->ranks > 1) {
        /* no backward reads the data of `arrived` */
        dt_tensor *arrived = dt__permute_rows(rows, e->row_of_arrival, e->arrival_of_row, 1);
        rows = dt__all_to_all_rows(arrived, e->comm, e->rows_from, e->rows_to, 0, e->token_of_row);
        dt__drop_early(arrived);
    }
    return dt_embedding_bag(rows, e->row_of_choice, dt__gates_of_rows(r));
}

dt_tensor *dt_expert_linear(
    dt_tensor *x, const dt_routing *r, dt_tensor *w, dt_tensor *b, dt_expert_desc d) {
    const char *op = "dt_expert_linear", *why = NULL;
    dt_ctx *ctx = w ? dt__op_routed(op, x, r, w, b) : dt__null_input(op, x, w, b);
    if (!ctx) return NULL;
    if (!r->exchange)
        why = "dt_dispatch comes first";
    else if (w->shape.nd < 1 || w->shape.d[0] != r->local_experts)
        why = "w has another number of experts than this rank";
    else if (x->shape.nd != 2 || x->shape.d[0] != r->rows)
        why = "x has another number of rows than were dispatched";
    if (why) {
        dt_fail(ctx, DT_ERR_SHAPE, "%s(%s, %s): %s and %s, %lld rows of %lld experts: %s", op,
            x->name, w->name, dt__shape_text(x->shape).s, dt__shape_text(w->shape).s,
            (long long)r->rows, (long long)r->local_experts, why);
        return NULL;
    }
    dt_linear_desc linear = { .activation = d.activation };
    return dt__linear(x, w, b, linear, r->expert_rows, 0, (const dt_group *)d.row_parallel);
}

/* ---- public functions: each opens its call site and runs ---- */

DT__DEFINE_AT_SITE(dt_mesh, mesh_make, ctx, (dt_ctx * ctx, dt_mesh_desc desc), ctx, desc)
DT__DEFINE_AT_SITE(
    dt_kv_groups, kv_split, ctx, (dt_ctx * ctx, dt_comm *tp, int kv_heads), ctx, tp, kv_heads)
DT__DEFINE_AT_SITE(dt_tensor *, distribute, ctx,
    (dt_ctx * ctx, dt_dtype dtype, dt_shape full, const void *host, const dt_axis_placement *axes,
        int n),
    ctx, dtype, full, host, axes, n)
DT__DEFINE_AT_SITE(dt_tensor *, redistribute, x ? x->ctx : NULL,
    (dt_tensor * x, dt_comm *comm, dt_placement from, dt_placement to), x, comm, from, to, 0)
DT__DEFINE_AT_SITE(dt_tensor *, all_to_all_rows, x ? x->ctx : NULL,
    (dt_tensor * x, dt_comm *comm, const int64_t *send_counts, const int64_t *recv_counts), x, comm,
    send_counts, recv_counts, 0, NULL)
DT__DEFINE_AT_SITE(dt_tensor *, tp_enter, x ? x->ctx : NULL,
    (dt_tensor * x, dt_comm *comm, dt_placement outside), x, comm, outside)
DT__DEFINE_AT_SITE(dt_tensor *, column_linear, x ? x->ctx : NULL,
    (dt_tensor * x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc, dt_comm *comm,
        dt_placement outside),
    x, w, b, desc, comm, outside)
DT__DEFINE_AT_SITE(dt_tensor *, row_linear, x ? x->ctx : NULL,
    (dt_tensor * x, dt_tensor *w, dt_tensor *b, dt_tensor *residual, dt_comm *comm,
        dt_placement outside),
    x, w, b, residual, comm, outside)
DT__DEFINE_AT_SITE(dt_tensor *, row_linear_at, x ? x->ctx : NULL,
    (dt_tensor * x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc, dt_comm *comm,
        dt_placement outside),
    x, w, b, desc, comm, outside)
DT__DEFINE_AT_SITE(dt_tensor *, vocab_embedding, table ? table->ctx : NULL,
    (dt_tensor * table, dt_tensor *ids, dt_comm *comm, dt_placement outside), table, ids, comm,
    outside)
DT__DEFINE_AT_SITE(dt_tensor *, vocab_cross_entropy, logits ? logits->ctx : NULL,
    (dt_tensor * logits, dt_tensor *labels, double denominator, dt_loss_desc desc, dt_comm *comm),
    logits, labels, denominator, desc, comm)
DT__DEFINE_AT_SITE(dt_tensor *, vocab_linear_cross_entropy, x ? x->ctx : NULL,
    (dt_tensor * x, dt_tensor *w, dt_tensor *labels, double denominator, dt_loss_desc desc,
        dt_comm *comm, dt_placement outside),
    x, w, labels, denominator, desc, comm, outside)
DT__DEFINE_AT_SITE(dt_tensor *, cp_attention, q ? q->ctx : NULL,
    (dt_tensor * q, dt_tensor *keys, dt_tensor *values, dt_cp *cp), q, keys, values, cp)
DT__DEFINE_AT_SITE(dt_tensor *, cp_attention_at, q ? q->ctx : NULL,
    (dt_tensor * q, dt_tensor *keys, dt_tensor *values, dt_cp *cp, dt_attn_desc desc), q, keys,
    values, cp, desc)
DT__DEFINE_AT_SITE(dt_tensor *, dispatch, x ? x->ctx : NULL,
    (dt_tensor * x, dt_routing *r, dt_comm *comm), x, r, comm)
DT__DEFINE_AT_SITE(
    dt_tensor *, combine, rows ? rows->ctx : NULL, (dt_tensor * rows, dt_routing *r), rows, r)
DT__DEFINE_AT_SITE(dt_routing *, route, x ? x->ctx : NULL,
    (dt_tensor * x, dt_tensor *w, dt_route_desc desc), x, w, desc)
DT__DEFINE_AT_SITE(dt_status, route_update_bias, bias ? bias->ctx : NULL,
    (dt_tensor * bias, double *counts, double rate, dt_comm *const *groups, int n), bias, counts,
    rate, groups, n)

// ==== 18. Pipeline schedules: generators, lowering, checker =====================================

/* Schedules of p = 4 ranks with their bubble fractions, drawn by dt_schedule_text from their
   generators. The naive schedule has m = 2 micro-batches, the last two m = 8, all others m = 4. F
   takes 1 time unit, B takes 2, I and W take 1 each. Digits are F, small letters are B and I,
   capitals are W, dots are the bubble. 1F1B has the same bubble as GPipe, but rank r holds at
   most p - r
   micro-batches in memory at a time:

       naive, m = 2: p - 1 = 3                       GPipe (AFAB): (p - 1) / m = 3/4
       rank 0 |0.........aa1.........bb|             rank 0 |0123.........aabbccdd|
       rank 1 |.0......aa...1......bb..|             rank 1 |.0123......aabbccdd..|
       rank 2 |..0...aa......1...bb....|             rank 2 |..0123...aabbccdd....|
       rank 3 |...0aa.........1bb......|             rank 3 |...0123aabbccdd......|

       1F1B: (p - 1) / m = 3/4                       zero bubble (ZB-H1): (p - 1) / (3 m) = 1/4
       rank 0 |0123......aa.bb.cc.dd|                rank 0 |0123...aAbBcCdD|
       rank 1 |.012....aa3bb.cc.dd..|                rank 1 |.012..a3bAcBdCD|
       rank 2 |..01..aa2bb3cc.dd....|                rank 2 |..01.a2b3cAdBCD|
       rank 3 |...0aa1bb2cc3dd......|                rank 3 |...0a1b2c3dABCD|

       interleaved 1F1B, v = 2 chunks per rank: (p - 1) / (v m) = 3/8 (a column is half a time unit)
       rank 0 |01230123......aa.bb.cc.ddaabbccdd|
       rank 1 |.01230123...aa.bb.cc.ddaabbccdd..|
       rank 2 |..0123012.aa3bb.cc.ddaabbccdd....|
       rank 3 |...01230aa1bb2cc3ddaabbccdd......|

       ZB-V: (p - 1) / (6 m) = 3/48 (a column is half a time unit; ranks have chunks 0 and 1)
       rank 0 |01234560aA1bB2cC3dD7aA4eEbB5fFcC6gGdD7hHeEfFgGhH...|
       rank 1 |.01234051aA2bB3cC6aA4dD7bB5eEcC6fFdD7gGehfEgFhGHH..|
       rank 2 |..01203142aA3bB5aA4cC6bB5dD7cC6eEdD7fFegfhgEhFGHGH.|
       rank 3 |...00112233aA4aA4bB5bB5cC6cC6dD7dD7eEeffgghhEFGHFGH|

       DualPipe-V: (p - 1) / (6 m) = 3/48
       rank 0 |01234560aA1bB2cC37dd4aaee5.bbff6.ccgg7.ddhheEfFgGhH|
       rank 1 |.01234051aA2bB36cc4aa7dd5bbee6.ccff7.ddggeehfHgFhGH|
       rank 2 |..01203142aA35bb4aa6cc5bb7dd6ccee7.ddffeeggfhgFhHGH|
       rank 3 |...001122334aa4aa5bb5bb6cc6cc7dd7ddeeeeffffgghhGGHH| */

/* The actions of one rank, in the order in which the rank runs them, are contiguous in the list of
   all actions. */
typedef struct dt__program {
    int offset, count; /* index of the first action in the list, and number of actions */
    int max_in_flight, slots;
} dt__program;

struct dt_schedule {
    dt__object object;
    dt_schedule_desc desc; /* with defaults filled in; desc.name is NULL */
    char name[48];
    int stages, total;    /* number of stages, and of actions of all ranks */
    dt__program *program; /* (ranks) */
    dt_action *actions; /* (total): first the actions of rank 0, then those of rank 1, and so on */
    /* while a generator runs: number of actions for which each rank has memory; else 0 */
    int capacity;
    int splits;          /* 1: at least one backward is split into I and W */
    int line;            /* while a file is read: the line of the next actions; else 0 */
    int *stage_of_chunk; /* (ranks,chunks): the stage of each chunk */
    int *chunk_of_stage; /* (stages): for each stage its rank * chunks + its chunk */
    int *action_index;   /* (stages,micros,DT__ROLES): index of the first such action; -1: none */
    /* (total): for each F the index of the F of the same rank that used the slot before; -1 if
       there is none */
    int *previous_tenant;
    dt_span *spans; /* (total): work array */
    int *cursor;    /* (ranks): index of the next action of each rank in a simulation */
    int *visited;   /* (ranks): work array */
};

/* The three entries of action_index; DT__ROLE_B is B or I. */
enum { DT__ROLE_F = 0, DT__ROLE_B, DT__ROLE_W, DT__ROLES };

static int dt__role(dt_phase phase) {
    return phase == DT_FORWARD ? DT__ROLE_F : phase == DT_BACKWARD_WEIGHT ? DT__ROLE_W : DT__ROLE_B;
}

static int *dt__action_index(const dt_schedule *s, int stage, int micro, int role) {
    return &s->action_index[((size_t)stage * (size_t)s->desc.micros + (size_t)micro) * DT__ROLES +
                            (size_t)role];
}

/* Returns the index of the action that completes a backward, W or B; -1 if it is missing. */
static int dt__backward_end(const dt_schedule *s, int stage, int micro) {
    int weight = *dt__action_index(s, stage, micro, DT__ROLE_W);
    return weight >= 0 ? weight : *dt__action_index(s, stage, micro, DT__ROLE_B);
}

int dt_schedule_ranks(const dt_schedule *s) { return s ? s->desc.ranks : 0; }
int dt_schedule_chunks(const dt_schedule *s) { return s ? s->desc.chunks : 0; }
int dt_schedule_stages(const dt_schedule *s) { return s ? s->stages : 0; }
int dt_schedule_micros(const dt_schedule *s) { return s ? s->desc.micros : 0; }
int dt_schedule_micro_group(const dt_schedule *s) { return s ? s->desc.micro_group : 0; }
const char *dt_schedule_name(const dt_schedule *s) { return s ? s->name : ""; }

static const dt__program *dt__program_of(const dt_schedule *s, int rank) {
    return s && rank >= 0 && rank < s->desc.ranks ? &s->program[rank] : NULL;
}

int dt_schedule_stage_of(const dt_schedule *s, int rank, int chunk) {
    if (!dt__program_of(s, rank) || chunk < 0 || chunk >= s->desc.chunks) return -1;
    return s->stage_of_chunk[rank * s->desc.chunks + chunk];
}

int dt_schedule_rank_of(const dt_schedule *s, int stage) {
    return s && stage >= 0 && stage < s->stages ? s->chunk_of_stage[stage] / s->desc.chunks : -1;
}

const dt_action *dt_schedule_actions(const dt_schedule *s, int rank) {
    return dt__program_of(s, rank) ? s->actions + s->program[rank].offset : NULL;
}

int dt_schedule_count(const dt_schedule *s, int rank) {
    return dt__program_of(s, rank) ? s->program[rank].count : 0;
}
int dt_schedule_max_in_flight(const dt_schedule *s, int rank) {
    return dt__program_of(s, rank) ? s->program[rank].max_in_flight : 0;
}
int dt_schedule_slots(const dt_schedule *s, int rank) {
    return dt__program_of(s, rank) ? s->program[rank].slots : 0;
}

int dt_schedule_offset(const dt_schedule *s, int rank) {
    return dt__program_of(s, rank)      ? s->program[rank].offset
           : s && rank == s->desc.ranks ? s->total
                                        : 0;
}

/* ---- the generator of all kinds ---- */

dt_status dt_schedule_add(dt_schedule *s, int rank, dt_phase phase, int micro, int chunk) {
    if (!s || dt_error(s->object.ctx) != DT_OK) return s ? dt_error(s->object.ctx) : DT_ERR_ARG;
    if (!s->capacity)
        return dt_fail(s->object.ctx, DT_ERR_ARG, "dt_schedule_add: only a generator may add");
    if (phase < DT_FORWARD || phase > DT_BACKWARD_WEIGHT || rank < 0 || rank >= s->desc.ranks ||
        micro < 0 || micro >= s->desc.micros || chunk < 0 || chunk >= s->desc.chunks)
        return dt_fail(s->object.ctx, DT_ERR_ARG,
            "dt_schedule_add(%s): phase %d of micro-batch %d of %d in chunk %d of %d of "
            "rank %d of %d",
            s->name, (int)phase, micro, s->desc.micros, chunk, s->desc.chunks, rank, s->desc.ranks);
    dt__program *p = &s->program[rank];
    if (p->count >= s->capacity)
        return dt_fail(s->object.ctx, DT_ERR_ARG,
            "dt_schedule_add(%s): rank %d has %d actions already", s->name, rank, s->capacity);
    s->actions[p->offset + p->count++] = (dt_action){
        .phase = phase, .micro = micro, .chunk = chunk, .rank = rank, .line = s->line
    };
    return DT_OK;
}

/* GPipe (AFAB), 1F1B (PipeDream-Flush), interleaved 1F1B and zero bubble (ZB-H1) differ in the
   warm-up, the number of forwards that a rank runs before its first backward. AFAB runs all m first
   and holds them. 1F1B runs as many as stages follow, the time until the first gradient comes back:
   the bubble is the same, but rank r holds at most p - r micro-batches. Interleaved 1F1B has v
   chunks per rank, each with 1/v of the rank's layers, so that the pipeline fills and drains v
   times as fast; in return there are v times as many messages, and the warm-up is longer. */
static int dt__warmup(const dt_schedule *s, int rank) {
    int stages_after = s->desc.ranks - rank - 1;
    switch (s->desc.kind) {
    case DT_SCHEDULE_NAIVE: return 0;
    case DT_SCHEDULE_AFAB: return s->desc.micros;
    case DT_SCHEDULE_INTERLEAVED:
        return 2 * stages_after + (s->desc.chunks - 1) * s->desc.micro_group;
    default: return stages_after;
    }
}

/* Adds rank r's k-th action of a phase. The rank runs the forwards of a group of G micro-batches in
   its first chunk, then in its second chunk, and so on; then the next group follows. The backwards
   of a group begin with the last chunk. A rank with one chunk runs the micro-batches in order. */
static void dt__add_kth(dt_schedule *s, int r, int k, dt_phase phase) {
    int v = s->desc.chunks, group = s->desc.micro_group ? s->desc.micro_group : s->desc.micros;
    int start = k / (group * v) * group, left = s->desc.micros - start;
    int size = left < group ? left : group, chunk = (k - start * v) / size;
    dt_schedule_add(
        s, r, phase, start + (k - start * v) % size, phase == DT_FORWARD ? chunk : v - 1 - chunk);
}

/* Generates all kinds: after the warm-up, one forward and one backward alternate. Zero bubble
   (ZB-H1) splits the backward into I and W: the preceding stage waits only for I, and rank r delays
   W by r micro-batches, into the time in which 1F1B would be idle. */
static void dt__generate_in_order(dt_schedule *s) {
    int split = s->desc.kind == DT_SCHEDULE_ZB, all = s->desc.micros * s->desc.chunks;
    for (int r = 0; r < s->desc.ranks; r++) {
        int warmup = dt__warmup(s, r) < all ? dt__warmup(s, r) : all, delay = split ? r : 0;
        for (int k = 0; k < warmup; k++) dt__add_kth(s, r, k, DT_FORWARD);
        for (int k = 0; k < all + delay; k++) {
            if (k + warmup < all) dt__add_kth(s, r, k + warmup, DT_FORWARD);
            if (k < all) dt__add_kth(s, r, k, split ? DT_BACKWARD_INPUT : DT_BACKWARD);
            if (split && k >= delay) dt__add_kth(s, r, k - delay, DT_BACKWARD_WEIGHT);
        }
    }
}

/* ---- the generators of schedules in a V ---- */

/* In a V rank r has stage r and stage 2 p - 1 - r: a micro-batch runs down the ranks and up again.

       stages     0  1  2  3 |            rank 0 has the first and the last stage: it computes the
       ranks      0  1  2  3 |            loss of a micro-batch soon after the rank's chunk 0, so
       stages     7  6  5  4 v            all ranks hold as many activations

   The first micro-batch's gradient reaches a rank's chunk 1 before its chunk 0, so the fill and the
   drain of the pipeline have work for both directions. State of the generator of one rank: next[c]
   is the next micro-batch of each role of chunk c. */
typedef struct dt__v_rank {
    dt_schedule *s;
    int rank, next[2][DT__ROLES];
} dt__v_rank;

/* Adds the chunk's next action of a phase. If there are fewer micro-batches than the generator
   needs, it runs with as many as it needs, and dt__v_add leaves out the actions of those that do
   not exist. */
static void dt__v_add(dt__v_rank *v, int chunk, dt_phase phase) {
    int micro = v->next[chunk][dt__role(phase)]++;
    v->next[chunk][DT__ROLE_W] += phase == DT_BACKWARD;
    if (micro < v->s->desc.micros) dt_schedule_add(v->s, v->rank, phase, micro, chunk);
}

/* Adds I and, at once, W. */
static void dt__v_add_halves(dt__v_rank *v, int chunk) {
    dt__v_add(v, chunk, DT_BACKWARD_INPUT);
    dt__v_add(v, chunk, DT_BACKWARD_WEIGHT);
}

/* ZB-V (arXiv:2405.15362, section 3.2): as much memory as 1F1B. If F, I and W take the same time
   and m >= 2 p - 1, no rank idles between its first and last action. Only the drain delays W. */
static void dt__generate_zbv(dt__v_rank *v) {
    int p = v->s->desc.ranks, r = v->rank, *f0 = &v->next[0][DT__ROLE_F], *i = v->next[1];
    int m = v->s->desc.micros < 2 * p - 1 ? 2 * p - 1 : v->s->desc.micros;
    for (int k = 0; k < 2 * (p - r) - 1; k++) dt__v_add(v, 0, DT_FORWARD);
    for (int k = 0; k < r; k++) {
        dt__v_add(v, 1, DT_FORWARD);
        dt__v_add(v, 0, DT_FORWARD);
    }
    for (int k = 0; k < p - r; k++) {
        dt__v_add(v, 1, DT_FORWARD);
        dt__v_add_halves(v, 1);
    }
    while (i[DT__ROLE_F] < *f0 || *f0 < m) {
        if (*f0 < m) dt__v_add(v, 0, DT_FORWARD);
        dt__v_add_halves(v, 0);
        dt__v_add(v, 1, DT_FORWARD);
        dt__v_add_halves(v, 1);
    }
    for (int k = 0; k < r; k++) {
        dt__v_add(v, 0, DT_BACKWARD_INPUT);
        dt__v_add(v, 1, DT_BACKWARD_INPUT);
    }
    for (int k = 0; k < p - r; k++) dt__v_add_halves(v, 0);
    for (int chunk = 1; chunk >= 0; chunk--)
        while (v->next[chunk][DT__ROLE_W] < v->next[chunk][DT__ROLE_B])
            dt__v_add(v, chunk, DT_BACKWARD_WEIGHT);
}

/* DualPipe-V: DeepSeek's DualPipe runs two pipelines in opposite directions, with two copies of the
   weights; its half is a V without copies. In the steady part a forward of one chunk and a backward
   of the other form a pair, whose computation and communication can overlap. Here the pair's two
   actions follow each other. */
static void dt__generate_dualpipe_v(dt__v_rank *v) {
    int p = v->s->desc.ranks, r = v->rank, w = 0;
    int m = v->s->desc.micros < 2 * p ? 2 * p : v->s->desc.micros;
    for (int k = 0; k < 2 * (p - r - 1); k++) dt__v_add(v, 0, DT_FORWARD);
    for (int k = 0; k < 2 * (r + 1); k++) dt__v_add(v, k % 2, DT_FORWARD);
    for (int k = 0; k < p - r - 1; k++) {
        dt__v_add_halves(v, 1);
        dt__v_add(v, 1, DT_FORWARD);
    }
    for (int k = 0; k < 2 * (m - 2 * p + r + 1); k++) {
        dt__v_add(v, k % 2, DT_FORWARD);
        dt__v_add(v, 1 - k % 2, DT_BACKWARD);
    }
    for (int k = 0; k < p - r - 1; k++) {
        dt__v_add(v, 1, DT_BACKWARD);
        dt__v_add(v, 1, DT_FORWARD);
        dt__v_add(v, 0, DT_BACKWARD);
    }
    /* the first half of these r + 1 pairs runs whole backwards, the second half only I; the W
       follow in the order of the I */
    for (int k = 0; k < 2 * (r + 1); k++) {
        dt__v_add(v, 1 - k % 2, k > r ? DT_BACKWARD_INPUT : DT_BACKWARD);
    }
    for (int k = 0; k < p - r - 1; k++) {
        dt__v_add(v, w <= r ? (w + r) % 2 : 0, DT_BACKWARD_WEIGHT), w++;
        dt__v_add(v, 0, DT_BACKWARD_INPUT);
    }
    for (; w < p; w++) dt__v_add(v, w <= r ? (w + r) % 2 : 0, DT_BACKWARD_WEIGHT);
}

static int dt__is_v(const dt_schedule_desc *d) {
    return !d->generate && (d->kind == DT_SCHEDULE_ZBV || d->kind == DT_SCHEDULE_DUALPIPE_V);
}

static void dt__generate(dt_schedule *s) {
    if (!dt__is_v(&s->desc)) {
        dt__generate_in_order(s);
        return;
    }
    for (int r = 0; r < s->desc.ranks; r++) {
        dt__v_rank v = { .s = s, .rank = r };
        if (s->desc.kind == DT_SCHEDULE_ZBV)
            dt__generate_zbv(&v);
        else
            dt__generate_dualpipe_v(&v);
    }
}

/* ---- dependencies of an action ---- */

enum { DT__DEPEND_LOCAL = 0, DT__DEPEND_MESSAGE, DT__DEPEND_SLOT };
/* A dependency: the index of the action that must run first, or -1 if the schedule lacks it. */
typedef struct dt__dependency {
    int at, kind;
} dt__dependency;

/* Writes the dependencies of an action to `out`, except for the order of its rank's program, and
   returns their number. DT__DEPEND_SLOT: the action's slot still holds a gradient that was sent, so
   the action waits until the receiver's action begins. For the other kinds the action waits until
   the action that it depends on has ended. */
static int dt__dependencies(const dt_schedule *s, int at, dt__dependency out[2]) {
    const dt_action *a = &s->actions[at];
    int n = 0, role = dt__role(a->phase), before = s->previous_tenant[at];
    int sender = role == DT__ROLE_F ? a->stage - 1 : a->stage + 1;
    if (role != DT__ROLE_F)
        out[n++] = (dt__dependency){ *dt__action_index(s, a->stage, a->micro, role - 1),
            DT__DEPEND_LOCAL };
    if (role != DT__ROLE_W && sender >= 0 && sender < s->stages)
        out[n++] =
            (dt__dependency){ *dt__action_index(s, sender, a->micro, role), DT__DEPEND_MESSAGE };
    const dt_action *b = role == DT__ROLE_F && before >= 0 ? &s->actions[before] : NULL;
    if (b && b->stage > 0)
        out[n++] = (dt__dependency){ *dt__action_index(s, b->stage - 1, b->micro, DT__ROLE_B),
            DT__DEPEND_SLOT };
    return n;
}

static double dt__action_cost(const dt_schedule_costs *c, const dt_action *a) {
    const double even[3] = { c->forward, c->input, c->weight };
    const double *cost = c->stages ? c->stages + (size_t)a->stage * 3 : even;
    return a->phase == DT_BACKWARD ? cost[1] + cost[2] : cost[dt__role(a->phase)];
}

/* Returns the earliest time at which the action can begin, or -1 if an action that it depends on
   has not run yet. */
static double dt__earliest_begin(
    const dt_schedule *s, const dt_schedule_costs *c, const dt_span *spans, int at) {
    dt__dependency dependency[2];
    int rank = s->actions[at].rank, n = dt__dependencies(s, at, dependency);
    double begin = at > s->program[rank].offset ? spans[at - 1].end : 0;
    for (int i = 0; i < n; i++) {
        int on = dependency[i].at, kind = dependency[i].kind;
        if (on < 0 || spans[on].end < spans[on].begin) return -1;
        double ready = kind == DT__DEPEND_SLOT ? spans[on].begin : spans[on].end;
        if (kind == DT__DEPEND_MESSAGE && s->actions[on].rank != rank) ready += c->message;
        if (ready > begin) begin = ready;
    }
    return begin;
}

/* The simulator. Repeatedly runs every rank as far as its dependencies allow, until no rank
   advances. Returns 1 if all actions ran, 0 if the ranks are deadlocked; s->cursor then says where
   each rank stopped. */
static int dt__simulate(const dt_schedule *s, const dt_schedule_costs *c, dt_span *spans) {
    dt_span never = { 0, -1 };
    int done = 0, moved = 1;
    for (int i = 0; i < s->total; i++) spans[i] = never;
    for (int r = 0; r < s->desc.ranks; r++) s->cursor[r] = s->program[r].offset;
    for (; moved; done += moved) {
        moved = 0;
        for (int r = 0; r < s->desc.ranks; r++)
            for (int *at = &s->cursor[r]; *at < dt_schedule_offset(s, r + 1); ++*at, moved++) {
                double begin = dt__earliest_begin(s, c, spans, *at);
                if (begin < 0) break;
                spans[*at].begin = begin;
                spans[*at].end = begin + dt__action_cost(c, &s->actions[*at]);
            }
    }
    return done == s->total;
}

/* ---- the lowering: messages and slots ---- */

/* Fills in the stage, the sender and the receiver of every action, and s->action_index. */
static void dt__lower_messages(dt_schedule *s) {
    size_t computations = (size_t)s->stages * (size_t)s->desc.micros * DT__ROLES;
    for (size_t i = 0; i < computations; i++) s->action_index[i] = -1;
    for (int i = 0; i < s->total; i++) {
        dt_action *a = &s->actions[i];
        int role = dt__role(a->phase);
        s->splits |= role == DT__ROLE_W;
        a->stage = dt_schedule_stage_of(s, a->rank, a->chunk);
        int previous_rank = dt_schedule_rank_of(s, a->stage - 1),
            next_rank = dt_schedule_rank_of(s, a->stage + 1);
        a->recv_from = role == DT__ROLE_F ? previous_rank : role == DT__ROLE_B ? next_rank : -1;
        a->send_to = role == DT__ROLE_F ? next_rank : role == DT__ROLE_B ? previous_rank : -1;
        int *index = dt__action_index(s, a->stage, a->micro, role);
        if (*index < 0) *index = i;
    }
}

/* State of a slot: the time at which the slot is free again, and the index of the last F that took
   the slot (-1: none). */
typedef struct dt__slot {
    double free_at;
    int tenant;
} dt__slot;

/* Returns the time at which the slot of the F at index `at` is free again: after B or W has ended
   and the receiver of the gradient has begun. The times come from s->spans. If timed is 0, these
   times are only positions in each rank's program, which cannot be compared between ranks, so the
   function leaves out a receiver on another rank. */
static double dt__slot_free_time(const dt_schedule *s, int at, int timed) {
    const dt_action *a = &s->actions[at];
    int last = dt__backward_end(s, a->stage, a->micro);
    if (last < at) return INFINITY; /* wrong schedule: the backward is missing or precedes F */
    int receiver = a->stage > 0 ? *dt__action_index(s, a->stage - 1, a->micro, DT__ROLE_B) : -1;
    if (receiver < 0 || (!timed && s->actions[receiver].rank != a->rank)) return s->spans[last].end;
    return fmax(s->spans[receiver].begin, s->spans[last].end);
}

/* Greedy allocation: an F takes the slot that has been free longest, or a new slot if no slot is
   free when the F begins. Greedy allocation of time intervals is optimal: it needs no more slots
   than the largest number of intervals that overlap. */
static void dt__allocate_slots(dt_schedule *s, int rank, int timed, dt__slot *slot) {
    dt__program *p = &s->program[rank];
    for (int k = 0; k < p->slots; k++) {
        slot[k].free_at = -INFINITY;
        slot[k].tenant = -1;
    }
    for (int i = p->offset; i < p->offset + p->count; i++) {
        dt_action *a = &s->actions[i];
        a->slot = -1;
        if (a->phase != DT_FORWARD) continue;
        int best = p->slots;
        for (int k = 0; k < p->slots; k++)
            if (slot[k].free_at <= s->spans[i].begin &&
                (best == p->slots || slot[k].free_at < slot[best].free_at))
                best = k;
        s->previous_tenant[i] = best < p->slots ? slot[best].tenant : -1;
        if (best == p->slots) p->slots++;
        a->slot = best;
        slot[best].tenant = i;
        slot[best].free_at = dt__slot_free_time(s, i, timed);
    }
}

/* Allocates the slots of one rank, and counts the micro-batches in flight. */
static void dt__lower_slots(dt_schedule *s, int rank, int timed, dt__slot *slot) {
    dt__program *p = &s->program[rank];
    int live = 0, forwards = 0;
    /* p->slots is 0 here, so this call finds the smallest number of slots */
    dt__allocate_slots(s, rank, timed, slot);
    for (int i = p->offset; i < p->offset + p->count; i++) {
        dt_action *a = &s->actions[i];
        forwards += a->phase == DT_FORWARD;
        live +=
            (a->phase == DT_FORWARD) - (a->phase == DT_BACKWARD || a->phase == DT_BACKWARD_WEIGHT);
        if (live > p->max_in_flight) p->max_in_flight = live;
    }
    if (s->desc.extra_slots > 0) {
        p->slots =
            s->desc.extra_slots < forwards - p->slots ? p->slots + s->desc.extra_slots : forwards;
        dt__allocate_slots(s, rank, timed, slot);
    }
    for (int i = p->offset; i < p->offset + p->count; i++) {
        dt_action *a = &s->actions[i];
        int forward = *dt__action_index(s, a->stage, a->micro, DT__ROLE_F);
        if (a->phase != DT_FORWARD && forward >= 0) a->slot = s->actions[forward].slot;
    }
}

/* Lowers the schedule: packs the actions of all ranks and adds messages and slots. Slots are
   allocated by the times of a simulated run in which all stages take the same time and no rank
   waits for slots. If that run deadlocks, or if desc.min_slots is 1, slots are allocated by the
   order of each rank's program instead. */
static dt_status dt__schedule_lower(dt_schedule *s) {
    dt_schedule_costs even = { .forward = 1, .input = 1, .weight = 1 };
    int max_count = 0;
    for (int r = 0; r < s->desc.ranks; r++) {
        dt__program *p = &s->program[r];
        memmove(
            s->actions + s->total, s->actions + p->offset, (size_t)p->count * sizeof(dt_action));
        p->offset = s->total;
        s->total += p->count;
        if (p->count > max_count) max_count = p->count;
    }
    size_t total = (size_t)s->total;
    s->previous_tenant = (int *)dt__object_alloc(&s->object, total * sizeof *s->previous_tenant);
    s->spans = (dt_span *)dt__object_alloc(&s->object, total * sizeof *s->spans);
    dt__slot *slot = (dt__slot *)dt__object_alloc(&s->object, (size_t)max_count * sizeof *slot);
    if (dt_error(s->object.ctx) != DT_OK) return dt_error(s->object.ctx);
    for (int i = 0; i < s->total; i++) s->previous_tenant[i] = -1;
    dt__lower_messages(s);
    int timed = dt__simulate(s, &even, s->spans) && !s->desc.min_slots;
    for (int i = 0; i < s->total && !timed; i++) {
        s->spans[i].begin = i;
        s->spans[i].end = i + 1;
    }
    for (int r = 0; r < s->desc.ranks; r++) dt__lower_slots(s, r, timed, slot);
    return DT_OK;
}

/* ---- the checker ---- */

static dt__text dt__action_text(const dt_schedule *s, dt_phase phase, int micro, int chunk) {
    static const char *const names[] = { "?", "F", "B", "I", "W" };
    return s->desc.chunks == 1 ? dt__format("%s(micro %d)", names[phase], micro)
                               : dt__format("%s(micro %d, chunk %d)", names[phase], micro, chunk);
}

static dt__text dt__action_text_at(const dt_schedule *s, int at) {
    const dt_action *a = &s->actions[at];
    dt__text text = dt__action_text(s, a->phase, a->micro, a->chunk);
    if (a->line) dt__put(&text, " (line %d)", a->line);
    return text;
}

/* Checks that each computation occurs once. */
static dt_status dt__check_complete(const dt_schedule *s, dt__strbuf *t) {
    for (int i = 0; i < s->total; i++) {
        const dt_action *a = &s->actions[i];
        if (*dt__action_index(s, a->stage, a->micro, dt__role(a->phase)) == i) continue;
        return dt__strbuf_add(t, "rank %d: %s comes a second time, as its action %d", a->rank,
            dt__action_text_at(s, i).s, i - s->program[a->rank].offset);
    }
    for (int i = 0; i < s->stages * s->desc.micros; i++) {
        int stage = i / s->desc.micros, j = i % s->desc.micros, r = dt_schedule_rank_of(s, stage);
        int chunk = s->chunk_of_stage[stage] % s->desc.chunks;
        int back = *dt__action_index(s, stage, j, DT__ROLE_B),
            weight = *dt__action_index(s, stage, j, DT__ROLE_W);
        int full_backward = back >= 0 && s->actions[back].phase == DT_BACKWARD;
        dt_phase missing = DT_FORWARD;
        if (*dt__action_index(s, stage, j, DT__ROLE_F) >= 0) {
            if (back >= 0 && full_backward == (weight < 0)) continue;
            missing = back >= 0     ? DT_BACKWARD_WEIGHT
                      : weight >= 0 ? DT_BACKWARD_INPUT
                                    : DT_BACKWARD;
        }
        if (missing == DT_BACKWARD_WEIGHT && full_backward)
            return dt__strbuf_add(t, "rank %d: %s occurs besides %s, which is the full backward", r,
                dt__action_text(s, missing, j, chunk).s, dt__action_text_at(s, back).s);
        return dt__strbuf_add(
            t, "rank %d: %s is missing", r, dt__action_text(s, missing, j, chunk).s);
    }
    return DT_OK;
}

/* Returns a dependency for which a stopped rank still waits. */
static dt__dependency dt__unmet_dependency(const dt_schedule *s, int rank) {
    dt__dependency dependency[2] = { { -1, 0 }, { -1, 0 } };
    int i = 0, n = dt__dependencies(s, s->cursor[rank], dependency);
    while (i < n - 1 && s->spans[dependency[i].at].end >= s->spans[dependency[i].at].begin) i++;
    return dependency[i];
}

/* Deadlock detection after the simulation has stopped. Every stopped rank waits for a stopped rank,
   which may be itself, so the path from each rank to the rank for which it waits ends in a cycle.
   Writes the cycle and returns its number of ranks. */
static int dt__check_cycle(const dt_schedule *s, dt__strbuf *t) {
    int r = 0, n = 0;
    memset(s->visited, 0, (size_t)s->desc.ranks * sizeof *s->visited);
    while (s->cursor[r] == dt_schedule_offset(s, r + 1)) r++;
    for (; !s->visited[r]; r = s->actions[dt__unmet_dependency(s, r).at].rank) s->visited[r] = 1;
    int first = r;
    dt__strbuf_add(t, "deadlock: ");
    do {
        dt__dependency on = dt__unmet_dependency(s, r);
        int at = s->cursor[r], next = s->actions[on.at].rank, front = s->cursor[next];
        dt__strbuf_add(
            t, "%srank %d waits at %s ", n++ ? "; " : "", r, dt__action_text_at(s, at).s);
        if (on.kind == DT__DEPEND_SLOT)
            dt__strbuf_add(t, "for its slot %d, until rank %d begins %s", s->actions[at].slot, next,
                dt__action_text_at(s, on.at).s);
        else
            dt__strbuf_add(t, "for %s", dt__action_text_at(s, on.at).s);
        if (on.kind != DT__DEPEND_SLOT && next != r) dt__strbuf_add(t, " of rank %d", next);
        if (on.at != front)
            dt__strbuf_add(t, ", which is queued behind %s", dt__action_text_at(s, front).s);
        r = next;
    } while (r != first);
    return n;
}

/* Checks that B and W of a chunk accumulate gradients in ascending order of micro-batches. */
static dt_status dt__check_order(const dt_schedule *s, dt__strbuf *t) {
    for (int stage = 0; stage < s->stages; stage++)
        for (int j = 1; j < s->desc.micros; j++) {
            int before = dt__backward_end(s, stage, j - 1), at = dt__backward_end(s, stage, j);
            if (before > at)
                return dt__strbuf_add(t,
                    "rank %d: %s comes after %s, but gradients are added in ascending order",
                    s->actions[at].rank, dt__action_text_at(s, before).s,
                    dt__action_text_at(s, at).s);
        }
    return DT_OK;
}

dt_status dt_schedule_check(
    const dt_schedule *s, dt_schedule_metrics *metrics, char *text, size_t text_bytes) {
    dt_schedule_costs even = { .forward = 1, .input = 1, .weight = 1 };
    dt_schedule_metrics f;
    dt__strbuf t = dt__strbuf_in(text, text_bytes);
    memset(&f, 0, sizeof f);
    if (metrics) *metrics = f;
    if (!s) return dt__strbuf_add(&t, "no schedule");
    f.actions = s->total;
    for (int r = 0; r < s->desc.ranks; r++) {
        if (s->program[r].max_in_flight > f.max_in_flight)
            f.max_in_flight = s->program[r].max_in_flight;
        if (s->program[r].slots > f.max_slots) f.max_slots = s->program[r].slots;
    }
    for (int i = 0; i < s->total; i++)
        f.messages += s->actions[i].send_to >= 0 && s->actions[i].send_to != s->actions[i].rank;
    dt_status status = dt__check_complete(s, &t);
    if (status == DT_OK && !dt__simulate(s, &even, s->spans)) {
        f.cycle_length = dt__check_cycle(s, &t);
        status = DT_ERR_ARG;
    }
    if (status == DT_OK) status = dt__check_order(s, &t);
    if (metrics) *metrics = f;
    return status;
}

// ==== 19. Pipeline schedules: making, simulation, partition, drawings ===========================

void dt_schedule_free(dt_schedule *s) { dt__object_free(s ? &s->object : NULL); }

static const char *const dt__schedule_kinds[DT_SCHEDULES] = { "naive", "AFAB", "1F1B",
    "interleaved", "zero-bubble", "ZB-V", "DualPipe-V" };

/* Returns 1 if m micro-batches for p ranks can be split into groups of g. A last, smaller group
   must also have at least p micro-batches, so that it fills all ranks; with m < p the only group is
   m. */
static int dt__group_fits(int p, int m, int g) {
    if (m < p) return g == m;
    return g >= p && g <= m && (m % g == 0 || m % g >= p);
}

/* Checks *d and replaces zeros in *d by the defaults that they mean. */
static dt_status dt__schedule_resolve(dt_ctx *ctx, dt_schedule_desc *d) {
    int interleaved = d->kind == DT_SCHEDULE_INTERLEAVED && !d->generate;
    int64_t limit = 1 << 26; /* largest number of forwards of all ranks */
    if (!d->generate && (d->kind < 0 || d->kind >= DT_SCHEDULES))
        return dt_fail(
            ctx, DT_ERR_ARG, "dt_schedule_make: there is no kind %d of schedule", d->kind);
    if (!d->name) d->name = d->generate ? "custom schedule" : dt__schedule_kinds[d->kind];
    if (d->chunks == 0) d->chunks = interleaved || dt__is_v(d) ? 2 : 1;
    if (d->ranks < 1 || d->micros < 1 || d->chunks < 1 || (int64_t)d->ranks * d->chunks > limit ||
        (int64_t)d->ranks * d->chunks * d->micros > limit)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_schedule_make: %d micro-batches through %d chunks of each of %d ranks; use "
            "at least 1 of each, and no more than %lld in all",
            d->micros, d->chunks, d->ranks, (long long)limit);
    if (!interleaved && !d->generate && d->chunks != (dt__is_v(d) ? 2 : 1))
        return dt_fail(ctx, DT_ERR_ARG,
            dt__is_v(d) ? "dt_schedule_make(%s): %d chunks; each rank has 2, the sides of the V"
                        : "dt_schedule_make(%s): %d chunks; only interleaved has several",
            dt__schedule_kinds[d->kind], d->chunks);
    if (d->extra_slots < 0)
        return dt_fail(ctx, DT_ERR_ARG, "dt_schedule_make: %d extra slots", d->extra_slots);
    if (!interleaved && d->micro_group != 0)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_schedule_make: groups of %d; only interleaved has groups", d->micro_group);
    int least = d->micros < d->ranks ? d->micros : d->ranks; /* m itself always fits */
    while (interleaved && !dt__group_fits(d->ranks, d->micros, least)) least++;
    if (interleaved && d->micro_group == 0) d->micro_group = least;
    if (interleaved && !dt__group_fits(d->ranks, d->micros, d->micro_group))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_schedule_make(interleaved): groups of %d do not split %d micro-batches for "
            "%d ranks so that each fills them; use %d%s",
            d->micro_group, d->micros, d->ranks, least,
            least == d->micros ? "" : dt__format(" or %d", d->micros).s);
    return DT_OK;
}

/* Fills the maps from chunks to stages and from stages to chunks. */
static dt_status dt__map_stages(dt_schedule *s) {
    dt_ctx *ctx = s->object.ctx;
    for (int i = 0; i < s->stages; i++) s->chunk_of_stage[i] = -1;
    for (int i = 0; i < s->stages; i++) {
        int r = i / s->desc.chunks, chunk = i % s->desc.chunks;
        int stage = s->desc.stage_of      ? s->desc.stage_of(r, chunk, s->desc.user)
                    : !dt__is_v(&s->desc) ? chunk * s->desc.ranks + r
                    : chunk               ? s->stages - 1 - r
                                          : r;
        if (stage < 0 || stage >= s->stages)
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_schedule_make(%s): chunk %d of rank %d is stage %d of %d", s->name, chunk, r,
                stage, s->stages);
        if (s->chunk_of_stage[stage] >= 0)
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_schedule_make(%s): stage %d is chunk %d of rank %d and chunk %d of "
                "rank %d",
                s->name, stage, s->chunk_of_stage[stage] % s->desc.chunks,
                s->chunk_of_stage[stage] / s->desc.chunks, chunk, r);
        s->chunk_of_stage[stage] = i;
        s->stage_of_chunk[i] = stage;
    }
    return DT_OK;
}

static dt_schedule *dt__schedule_new(dt_ctx *ctx, dt_schedule_desc d) {
    size_t ranks = (size_t)d.ranks, stages = ranks * (size_t)d.chunks, ints = sizeof(int);
    dt_schedule *s = (dt_schedule *)dt__object_new(ctx, sizeof *s, "a schedule", NULL);
    if (!s) return NULL;
    s->desc = d;
    s->desc.name = NULL;
    s->stages = (int)stages;
    s->capacity = 4 * d.chunks * d.micros; /* a correct schedule has fewer actions */
    snprintf(s->name, sizeof s->name, "%.47s", dt__printable_name(d.name).s);
    s->program = (dt__program *)dt__object_alloc(&s->object, ranks * sizeof *s->program);
    s->actions =
        (dt_action *)dt__object_alloc(&s->object, ranks * (size_t)s->capacity * sizeof *s->actions);
    s->stage_of_chunk = (int *)dt__object_alloc(&s->object, stages * ints);
    s->chunk_of_stage = (int *)dt__object_alloc(&s->object, stages * ints);
    s->action_index =
        (int *)dt__object_alloc(&s->object, stages * (size_t)d.micros * DT__ROLES * ints);
    s->cursor = (int *)dt__object_alloc(&s->object, ranks * ints);
    s->visited = (int *)dt__object_alloc(&s->object, ranks * ints);
    for (int r = 0; r < d.ranks && s->program; r++) s->program[r].offset = r * s->capacity;
    return s;
}

dt_schedule *dt_schedule_make(dt_ctx *ctx, dt_schedule_desc desc) {
    char why[400];
    if (dt_error(ctx) != DT_OK || dt__schedule_resolve(ctx, &desc) != DT_OK) return NULL;
    dt_schedule *s = dt__schedule_new(ctx, desc);
    if (!s) return NULL;
    if (dt_error(ctx) == DT_OK && dt__map_stages(s) == DT_OK) {
        if (desc.generate)
            desc.generate(s, desc.user);
        else
            dt__generate(s);
    }
    s->capacity = 0;
    if (dt_error(ctx) == DT_OK && dt__schedule_lower(s) == DT_OK && !desc.unchecked &&
        dt_schedule_check(s, NULL, why, sizeof why) != DT_OK)
        dt_fail(ctx, DT_ERR_ARG, "dt_schedule_make(%s): %s", s->name, why);
    return (dt_schedule *)dt__object_made(&s->object);
}

/* ---- the simulator ---- */

static int dt__seconds_ok(double x) { return x >= 0 && isfinite(x); }

dt_status dt_schedule_simulate(const dt_schedule *s, dt_schedule_costs c, dt_span *spans) {
    dt_ctx *ctx = s ? s->object.ctx : NULL;
    if (!s || dt_error(ctx) != DT_OK) return s ? dt_error(ctx) : DT_ERR_ARG;
    int ok = dt__seconds_ok(c.message);
    if (!c.stages)
        ok &= dt__seconds_ok(c.forward) & dt__seconds_ok(c.input) & dt__seconds_ok(c.weight);
    for (int i = 0; c.stages && i < 3 * s->stages; i++) ok &= dt__seconds_ok(c.stages[i]);
    if (!spans) return dt_fail(ctx, DT_ERR_ARG, "dt_schedule_simulate(%s): spans is NULL", s->name);
    if (!ok)
        return dt_fail(
            ctx, DT_ERR_ARG, "dt_schedule_simulate(%s): a cost is negative or not finite", s->name);
    return dt__simulate(s, &c, spans) ? DT_OK : DT_ERR_ARG;
}

static int dt__ran(dt_span span) { return span.end >= span.begin; }

/* Returns the time from the first begin to the last end of all actions that ran. */
static dt_span dt__timeline_span(const dt_schedule *s, const dt_span *spans) {
    dt_span all = { INFINITY, -INFINITY };
    for (int i = 0; i < s->total; i++) {
        if (!dt__ran(spans[i])) continue;
        all.begin = fmin(all.begin, spans[i].begin);
        all.end = fmax(all.end, spans[i].end);
    }
    return all;
}

dt_schedule_bubble dt_schedule_bubble_of(const dt_schedule *s, const dt_span *spans, int rank) {
    dt_schedule_bubble b = { 0, 0, 0, 0 };
    if (!s || !spans || rank < -1 || rank >= s->desc.ranks) return b;
    for (int r = 0; r < s->desc.ranks; r++) {
        double work = 0;
        for (int i = s->program[r].offset; i < dt_schedule_offset(s, r + 1); i++)
            if (dt__ran(spans[i])) work += spans[i].end - spans[i].begin;
        if ((r == rank || rank < 0) && work > b.work) b.work = work;
    }
    if (b.work == 0) return b;
    dt_span all = dt__timeline_span(s, spans);
    b.makespan = all.end - all.begin;
    b.idle_per_work = (b.makespan - b.work) / b.work;
    b.idle_per_makespan = (b.makespan - b.work) / b.makespan;
    return b;
}

/* ---- partitioning a model into stages ---- */

/* Returns 1 if the items can be partitioned into `parts` non-empty parts that each cost at most
   `limit`, which is not below the cost of any item. It is enough that the greedy partition has at
   most `parts` parts, because some of them can be split further. Sets *next to the smallest limit
   above `limit` at which a part of the greedy partition could take one more item. */
static int dt__partition_fits(const double *costs, int n, int parts, double limit, double *next) {
    int used = 1;
    double sum = 0;
    *next = INFINITY;
    for (int i = 0; i < n; i++) {
        sum += costs[i];
        if (sum <= limit) continue;
        *next = fmin(*next, sum);
        used++;
        sum = costs[i];
    }
    return n >= parts && used <= parts;
}

dt_status dt_partition_stages(
    const double *costs, int n, int stages, int *first, char *text, size_t text_bytes) {
    double limit = 0, left = 0, next;
    dt__strbuf t = dt__strbuf_in(text, text_bytes);
    if (!costs || !first) return dt__strbuf_add(&t, "costs or first is NULL");
    if (n < 1 || stages < 1 || n < stages)
        return dt__strbuf_add(&t,
            "%d items for %d stages: each stage needs at least 1; use %d stages or fewer", n,
            stages, n > 1 ? n : 1);
    for (int i = 0; i < n; i++) {
        left += costs[i];
        if (costs[i] > limit) limit = costs[i];
        if (dt__seconds_ok(costs[i]) && dt__seconds_ok(left)) continue;
        return dt__strbuf_add(
            &t, "item %d costs %g; costs are 0 or more, and their sum is finite", i, costs[i]);
    }
    /* Start at a lower bound on the most expensive part: the mean cost of a part. The factor allows
       for rounding errors of sums. All limits between `limit` and `next` give the same parts. */
    limit = fmax(limit, left / stages * (1 - 1e-9));
    while (!dt__partition_fits(costs, n, stages, limit, &next)) limit = next;
    for (int part = 0, i = 0; part < stages; part++) {
        int rest = stages - part - 1;
        double share = left / (rest + 1), sum = 0;
        first[part] = i;
        do { /* add items up to an even share, or more if the later stages cannot take the rest */
            sum += costs[i];
            left -= costs[i++];
        } while (
            i < n && (!dt__partition_fits(costs + i, n - i, rest, limit, &next) ||
                         (n - i > rest && sum + costs[i] <= share && sum + costs[i] <= limit)));
    }
    first[stages] = n;
    return DT_OK;
}

/* ---- drawings ---- */

dt_status dt_schedule_text(
    const dt_schedule *s, const dt_span *spans, int columns, char *text, size_t text_bytes) {
    dt__strbuf t = dt__strbuf_in(text, text_bytes);
    if (columns == 0) columns = 72;
    if (!s || !spans || columns < 1 || t.bytes < 1) return DT_ERR_ARG;
    dt_span all = dt__timeline_span(s, spans);
    for (int r = 0; r < s->desc.ranks; r++) {
        int i = s->program[r].offset, after = dt_schedule_offset(s, r + 1);
        dt__strbuf_add(&t, "rank %2d |", r);
        for (int c = 0; c < columns && t.used + 1 < t.bytes; c++) {
            double time = all.begin + (c + 0.5) / columns * (all.end - all.begin);
            while (i < after && spans[i].end <= time) i++; /* also skips actions that did not run */
            const dt_action *a = i < after && spans[i].begin <= time ? &s->actions[i] : NULL;
            dt__strbuf_add(&t, "%c", a ? "0aA"[dt__role(a->phase)] + a->micro % 10 : '.');
        }
        dt__strbuf_add(&t, "|\n");
    }
    return t.used + 1 < t.bytes ? DT_OK : DT_ERR_ARG;
}

static void DT_PRINTF(2, 3) dt__text_put(dt_json_out *out, const char *fmt, ...) {
    char text[512];
    size_t used = 0;
    va_list args;
    va_start(args, fmt);
    dt__append_list(text, sizeof text, &used, fmt, args);
    va_end(args);
    dt__json_write(out, text, used);
}

/* State of an SVG writer. Lengths in the file are in pixels. */
typedef struct dt__svg {
    dt_json_out out;
    double scale, begin; /* pixels per second; time of the left edge in seconds */
} dt__svg;
enum { DT__SVG_LEFT = 64, DT__SVG_ROW = 22, DT__SVG_TITLE = 30, DT__SVG_GAP = 16 };
enum { DT__SVG_MAX_ROWS = 10000 };

/* Returns the height of a timeline with the gap below it. */
static int dt__svg_height(const dt_schedule *s) {
    return DT__SVG_TITLE + s->desc.ranks * DT__SVG_ROW + DT__SVG_GAP;
}

/* Formats x with `decimals` decimals, and with a decimal point in every locale. */
static dt__text dt__fixed(double x, int decimals) {
    long long unit = 1;
    for (int i = 0; i < decimals; i++) unit *= 10;
    long long n = (long long)fmin(x * (double)unit + 0.5, 9e15);
    return decimals == 0 ? dt__format("%lld", n)
                         : dt__format("%lld.%0*lld", n / unit, decimals, n % unit);
}

static dt__text dt__seconds_text(double x) {
    double n = x >= 1 ? x : x >= 1e-3 ? x * 1e3 : x * 1e6;
    dt__text t = dt__fixed(n, n >= 100 ? 0 : n >= 10 ? 1 : 2);
    dt__put(&t, " %s", x >= 1 ? "s" : x >= 1e-3 ? "ms" : "us");
    return t;
}

/* Writes a text with its special characters escaped for XML. */
static void dt__svg_escaped(dt__svg *g, const char *s) {
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        const char *entity = c == '<'                ? "&lt;"
                             : c == '>'              ? "&gt;"
                             : c == '&'              ? "&amp;"
                             : c < 0x20 || c == 0x7f ? " "
                                                     : NULL;
        dt__json_write(&g->out, entity ? entity : s, entity ? strlen(entity) : 1);
    }
}

/* Returns the colour of a phase, which is lighter for later chunks. */
static unsigned dt__svg_colour(const dt_schedule *s, int phase, int chunk) {
    static const unsigned char base[5][3] = { { 0, 0, 0 }, { 88, 148, 222 }, { 96, 176, 104 },
        { 72, 186, 178 }, { 232, 164, 72 } };
    unsigned colour = 0;
    double light = s->desc.chunks > 1 ? 0.62 * chunk / (s->desc.chunks - 1) : 0;
    for (int i = 0; i < 3; i++)
        colour = colour * 256 + (unsigned)(base[phase][i] + light * (255 - base[phase][i]));
    return colour;
}

static void dt__svg_box(dt__svg *g, const dt_schedule *s, int at, dt_span span, int y) {
    const dt_action *a = &s->actions[at];
    double x = (double)DT__SVG_LEFT + (span.begin - g->begin) * g->scale,
           width = (span.end - span.begin) * g->scale;
    dt__text number = dt__format("%d", a->micro);
    dt__text_put(&g->out, "<g><title>rank %d: %s, stage %d: %s from %s on</title>", a->rank,
        dt__action_text_at(s, at).s, a->stage, dt__seconds_text(span.end - span.begin).s,
        dt__seconds_text(span.begin - g->begin).s);
    dt__text_put(&g->out,
        "<rect class=\"a\" x=\"%s\" y=\"%d\" width=\"%s\" height=\"%d\" fill=\"#%06x\"/>",
        dt__fixed(x, 2).s, y, dt__fixed(width, 2).s, DT__SVG_ROW - 2,
        dt__svg_colour(s, (int)a->phase, a->chunk));
    if (width >= 6.2 * (double)number.used + 1)
        dt__text_put(&g->out, "<text x=\"%s\" y=\"%d\" text-anchor=\"middle\">%s</text>",
            dt__fixed(x + width / 2, 2).s, y + 14, number.s);
    dt__text_put(&g->out, "</g>\n");
}

static void dt__svg_timeline(dt__svg *g, const dt_timeline *line, int y, double width) {
    const dt_schedule *s = line->schedule;
    dt_schedule_bubble all = dt_schedule_bubble_of(s, line->spans, -1);
    g->begin = dt__timeline_span(s, line->spans).begin;
    dt__text_put(&g->out, "<text class=\"t\" x=\"8\" y=\"%d\">", y + 18);
    dt__svg_escaped(g, line->title ? line->title : s->name);
    dt__text_put(&g->out, ": %s, bubble %s %% of the work, %s %% of the time</text>\n",
        dt__seconds_text(all.makespan).s, dt__fixed(100 * all.idle_per_work, 1).s,
        dt__fixed(100 * all.idle_per_makespan, 1).s);
    for (int r = 0; r < s->desc.ranks; r++) {
        int top = y + DT__SVG_TITLE + r * DT__SVG_ROW;
        dt__text_put(&g->out,
            "<text x=\"8\" y=\"%d\">rank %d</text>\n"
            "<rect x=\"%d\" y=\"%d\" width=\"%s\" height=\"%d\" fill=\"#eeeeee\"/>\n",
            top + 14, r, DT__SVG_LEFT, top, dt__fixed(width, 2).s, DT__SVG_ROW - 2);
        for (int i = s->program[r].offset; i < dt_schedule_offset(s, r + 1); i++)
            if (dt__ran(line->spans[i])) dt__svg_box(g, s, i, line->spans[i], top);
    }
}

/* Draws the legend: the colours and the name of each phase that occurs. A phase has one colour for
   each chunk of the schedule that has the most chunks, but at most 8 colours are drawn. */
static void dt__svg_legend(dt__svg *g, const dt_timeline *lines, int n, int y) {
    static const char *const names[] = { "", "forward", "backward", "backward of inputs",
        "backward of weights" };
    const dt_schedule *widest = lines[0].schedule;
    int used[5] = { 0, 0, 0, 0, 0 }, x = DT__SVG_LEFT;
    for (int i = 0; i < n; i++) {
        const dt_schedule *s = lines[i].schedule;
        if (s->desc.chunks > widest->desc.chunks) widest = s;
        for (int k = 0; k < s->total; k++) used[s->actions[k].phase] = 1;
    }
    int shades = widest->desc.chunks < 8 ? widest->desc.chunks : 8;
    for (int phase = DT_FORWARD; phase <= DT_BACKWARD_WEIGHT; phase++) {
        if (!used[phase]) continue;
        for (int i = 0; i < shades; i++, x += 14)
            dt__text_put(&g->out,
                "<rect x=\"%d\" y=\"%d\" width=\"14\" height=\"14\" fill=\"#%06x\"/>\n", x, y,
                dt__svg_colour(
                    widest, phase, i * (widest->desc.chunks - 1) / (shades > 1 ? shades - 1 : 1)));
        dt__text_put(&g->out, "<text x=\"%d\" y=\"%d\">%s</text>\n", x + 6, y + 11, names[phase]);
        x += 22 + 6 * (int)strlen(names[phase]);
    }
    if (widest->desc.chunks > 1)
        dt__text_put(&g->out, "<text x=\"%d\" y=\"%d\">lighter: a later chunk of the rank</text>\n",
            x, y + 11);
}

/* Returns the scale in pixels per second. In the timeline whose forwards are shortest, a mean
   forward gets 16 pixels, so that its number fits into its box; but the time axis has at least 900
   and at most 6,000 pixels. Sets *longest to the longest makespan of the timelines. */
static double dt__svg_scale(const dt_timeline *lines, int n, double *longest) {
    double shortest_mean = INFINITY;
    *longest = 0;
    for (int i = 0; i < n; i++) {
        const dt_schedule *s = lines[i].schedule;
        const dt_span *spans = lines[i].spans;
        double sum = 0, count = 0;
        *longest = fmax(*longest, dt_schedule_bubble_of(s, spans, -1).makespan);
        for (int k = 0; k < s->total; k++) {
            if (s->actions[k].phase != DT_FORWARD || !dt__ran(spans[k])) continue;
            sum += spans[k].end - spans[k].begin;
            count++;
        }
        if (sum > 0) shortest_mean = fmin(shortest_mean, sum / count);
    }
    return *longest == 0 ? 0 : fmin(fmax(16 / shortest_mean * *longest, 900), 6000) / *longest;
}

dt_status dt_schedule_svg(dt_ctx *ctx, const char *path, const dt_timeline *lines, int n) {
    dt__svg g;
    double longest;
    int height = DT__SVG_GAP, y = 8, rows = 0;
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    if (!path || !lines || n < 1)
        return dt_fail(ctx, DT_ERR_ARG, "dt_schedule_svg: %s", path ? "no timelines" : "no path");
    for (int i = 0; i < n; i++) {
        const char *title = lines[i].title ? lines[i].title : "";
        if (!lines[i].schedule || !lines[i].spans ||
            dt__utf8_first_invalid(title, strlen(title)) < strlen(title))
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_schedule_svg(%s): timeline %d has no schedule, no times or a title "
                "that is not UTF-8",
                path, i);
        if (lines[i].schedule->desc.ranks > DT__SVG_MAX_ROWS - rows || i == DT__SVG_MAX_ROWS)
            return dt_fail(
                ctx, DT_ERR_ARG, "dt_schedule_svg(%s): more than %d rows", path, DT__SVG_MAX_ROWS);
        rows += lines[i].schedule->desc.ranks;
        height += dt__svg_height(lines[i].schedule);
    }
    memset(&g, 0, sizeof g);
    g.out.ctx = ctx;
    g.scale = dt__svg_scale(lines, n, &longest);
    double width = longest > 0 ? longest * g.scale : 900;
    dt__text_put(&g.out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%s\" height=\"%d\" "
        "font-family=\"sans-serif\" "
        "font-size=\"11\">\n"
        "<style>.t { font-size: 14px; font-weight: bold } .a { stroke: #ffffff; stroke-width: 0.7 }"
        "</style>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n",
        dt__fixed((double)DT__SVG_LEFT + width + 16, 0).s, height + 24);
    for (int i = 0; i < n; y += dt__svg_height(lines[i++].schedule))
        dt__svg_timeline(&g, &lines[i], y, width);
    dt__svg_legend(&g, lines, n, y);
    dt__text_put(&g.out, "</svg>\n");
    if (dt_error(ctx) == DT_OK) dt_file_write(ctx, path, g.out.text, g.out.used);
    dt_json_out_free(&g.out);
    return dt_error(ctx);
}

/* ---- schedules as text ---- */

enum { DT__SCHEDULE_COLUMNS = 88 }; /* a line of dt_schedule_write ends after this column */

dt_status dt_schedule_write(dt_ctx *ctx, const char *path, const dt_schedule *s) {
    dt_json_out out = { .ctx = ctx };
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    if (!path || !s)
        return dt_fail(ctx, DT_ERR_ARG, "dt_schedule_write: %s", path ? "no schedule" : "no path");
    dt__text_put(&out, "ranks %d, chunks %d, micros %d    # %s\n", s->desc.ranks, s->desc.chunks,
        s->desc.micros, s->name);
    for (int r = 0; r < s->desc.ranks; r++) {
        dt__text_put(&out, "rank %d: stages", r);
        for (int c = 0; c < s->desc.chunks; c++)
            dt__text_put(&out, " %d", dt_schedule_stage_of(s, r, c));
        dt__text_put(&out, "\n");
    }
    for (int r = 0; r < s->desc.ranks; r++) {
        const dt_action *a = dt_schedule_actions(s, r), *end = a + dt_schedule_count(s, r);
        while (a < end) {
            size_t begin = out.used;
            dt__text_put(&out, "rank %d:", r);
            for (;
                 a < end && dt_error(ctx) == DT_OK && out.used - begin < DT__SCHEDULE_COLUMNS - 24;
                 a++)
                dt__text_put(&out, " %s", dt__action_text(s, a->phase, a->micro, a->chunk).s);
            dt__text_put(&out, "\n");
            if (dt_error(ctx) != DT_OK) break;
        }
    }
    if (dt_error(ctx) == DT_OK) dt_file_write(ctx, path, out.text, out.used);
    dt_json_out_free(&out);
    return dt_error(ctx);
}

/* The reader of a schedule's text. */
typedef struct dt__schedule_reader {
    dt_ctx *ctx;
    const char *path, *at; /* the next byte */
    int line;
    int *stage;   /* (ranks,chunks) from the lines "stages"; -1: not given */
    int n_stages; /* number of stages that were given */
    dt_schedule_desc desc;
} dt__schedule_reader;

/* Matches the next bytes with a pattern: a blank matches any number of blanks, and % a number,
   which is stored in `numbers`. Returns 1 and moves behind the match, or returns 0. */
static int dt__scan(dt__schedule_reader *x, const char *pattern, int *numbers) {
    const char *at = x->at;
    for (; *pattern; pattern++) {
        if (*pattern == ' ') {
            while (*at == ' ' || *at == '\t' || *at == '\r') at++;
        } else if (*pattern == '%') {
            int digits = 0, number = 0;
            for (; *at >= '0' && *at <= '9' && digits < 9; at++, digits++)
                number = 10 * number + (*at - '0');
            if (digits == 0 || (*at >= '0' && *at <= '9')) return 0;
            *numbers++ = number;
        } else if (*at++ != *pattern) {
            return 0;
        }
    }
    x->at = at;
    return 1;
}

static int dt__line_ends(const dt__schedule_reader *x) {
    return *x->at == 0 || *x->at == '\n' || *x->at == '#';
}

static dt_status DT_PRINTF(2, 3) dt__read_fail(const dt__schedule_reader *x, const char *fmt, ...) {
    char text[300];
    size_t used = 0;
    va_list args;
    va_start(args, fmt);
    dt__append_list(text, sizeof text, &used, fmt, args);
    va_end(args);
    return dt_fail(x->ctx, DT_ERR_ARG, "%s:%d: %s", x->path, x->line, text);
}

/* Fails at a text that is no part of a schedule. */
static dt_status dt__read_unknown(const dt__schedule_reader *x, const char *wanted) {
    int n = (int)strcspn(x->at, "\r\n#");
    return dt__read_fail(
        x, "%s is needed, not '%.*s%s'", wanted, n < 40 ? n : 40, x->at, n > 40 ? ".." : "");
}

/* Reads the first line, and compares its numbers with those of the caller's desc. */
static dt_status dt__read_sizes(dt__schedule_reader *x) {
    static const char *const names[] = { "ranks", "chunks", "micro-batches" };
    int n[3], *wanted[] = { &x->desc.ranks, &x->desc.chunks, &x->desc.micros };
    if (!dt__scan(x, " ranks % , chunks % , micros % ", n) || !dt__line_ends(x))
        return dt__read_unknown(x, "'ranks P, chunks V, micros M'");
    for (int i = 0; i < 3; i++) {
        if (*wanted[i] && *wanted[i] != n[i])
            return dt__read_fail(
                x, "a schedule of %d %s, but %d are needed", n[i], names[i], *wanted[i]);
        if (n[i] < 1 || n[i] > 1 << 20)
            return dt__read_fail(x, "%d %s; use 1 to %d", n[i], names[i], 1 << 20);
        *wanted[i] = n[i];
    }
    if ((int64_t)n[0] * n[1] > 1 << 20)
        return dt__read_fail(x, "%d x %d stages; use no more than %d", n[0], n[1], 1 << 20);
    size_t bytes = (size_t)n[0] * (size_t)n[1] * sizeof *x->stage;
    x->stage = (int *)dt_alloc(x->ctx, DT_MEM_HOST, bytes, "a schedule's stages");
    if (x->stage) memset(x->stage, 0xff, bytes);
    return dt_error(x->ctx);
}

/* Reads the stages of a rank's chunks. */
static dt_status dt__read_stages(dt__schedule_reader *x, int rank) {
    for (int chunk = 0; chunk < x->desc.chunks; chunk++) {
        int *stage = &x->stage[rank * x->desc.chunks + chunk];
        if (*stage >= 0) return dt__read_fail(x, "rank %d has its stages already", rank);
        if (!dt__scan(x, " % ", stage)) return dt__read_unknown(x, "a stage for each chunk");
        if (*stage >= x->desc.ranks * x->desc.chunks)
            return dt__read_fail(x, "rank %d: chunk %d is stage %d of %d, counted from 0", rank,
                chunk, *stage, x->desc.ranks * x->desc.chunks);
        x->n_stages++;
    }
    return dt__line_ends(x) ? DT_OK : dt__read_unknown(x, "the end of the line");
}

/* Reads the actions of a line. If s is NULL, only skips them. */
static dt_status dt__read_actions(dt__schedule_reader *x, dt_schedule *s, int rank) {
    while (s && !dt__line_ends(x)) {
        const char *phases = "FBIW", *phase = strchr(phases, *x->at), *begin = x->at;
        int n[2] = { 0, 0 };
        x->at++;
        if (!phase ||
            !(dt__scan(x, " ( micro % , chunk % ) ", n) || dt__scan(x, " ( micro % ) ", n))) {
            x->at = begin;
            return dt__read_unknown(x, "F, B, I or W(micro j, chunk c)");
        }
        if (n[0] >= x->desc.micros || n[1] >= x->desc.chunks)
            return dt__read_fail(x,
                "rank %d: %c(micro %d, chunk %d): there are %d micro-batches "
                "and %d chunks, counted from 0",
                rank, *phase, n[0], n[1], x->desc.micros, x->desc.chunks);
        s->line = x->line;
        if (dt_schedule_add(s, rank, (dt_phase)(DT_FORWARD + (phase - phases)), n[0], n[1]) !=
            DT_OK)
            return dt_error(x->ctx);
    }
    x->at += strcspn(x->at, "\n");
    return DT_OK;
}

/* Reads the lines behind the first: the stages if s is NULL, else the actions. */
static dt_status dt__read_lines(dt__schedule_reader *x, dt_schedule *s) {
    for (; *x->at; x->line++) {
        int rank, stages;
        dt__scan(x, " ", NULL);
        if (!dt__line_ends(x)) {
            if (!dt__scan(x, "rank % : ", &rank)) return dt__read_unknown(x, "'rank R:'");
            if (rank >= x->desc.ranks)
                return dt__read_fail(x, "rank %d of %d, counted from 0", rank, x->desc.ranks);
            stages = dt__scan(x, "stages ", NULL);
            if ((stages && !s ? dt__read_stages(x, rank)
                              : dt__read_actions(x, stages ? NULL : s, rank)) != DT_OK)
                return dt_error(x->ctx);
        }
        x->at += strcspn(x->at, "\n");
        x->at += *x->at == '\n';
    }
    return DT_OK;
}

/* Fails if some ranks have a line "stages" and others do not. */
static dt_status dt__read_stages_end(const dt__schedule_reader *x) {
    int missing = 0;
    dt__text list = dt__format("%s", "");
    for (int r = 0; r < x->desc.ranks && x->n_stages > 0; r++) {
        if (x->stage[r * x->desc.chunks] >= 0) continue;
        if (missing < 8) dt__put(&list, "%s%d", missing ? ", " : "", r);
        missing++;
    }
    if (missing == 0) return dt_error(x->ctx);
    return dt_fail(x->ctx, DT_ERR_ARG,
        "%s: a line 'rank R: stages ..' is missing for rank%s %s%s; all ranks need one, or none",
        x->path, missing > 1 ? "s" : "", list.s, missing > 8 ? ", .." : "");
}

static int dt__read_stage_of(int rank, int chunk, void *user) {
    const dt__schedule_reader *x = (const dt__schedule_reader *)user;
    return x->stage[rank * x->desc.chunks + chunk];
}

static void dt__read_generate(dt_schedule *s, void *user) {
    dt__schedule_reader x = *(dt__schedule_reader *)user;
    dt__read_lines(&x, s);
    s->line = 0;
}

dt_schedule *dt_schedule_read(dt_ctx *ctx, const char *path, dt_schedule_desc desc) {
    size_t bytes = 0;
    char why[400];
    if (dt_error(ctx) != DT_OK) return NULL;
    if (!path) {
        dt_fail(ctx, DT_ERR_ARG, "dt_schedule_read: no path");
        return NULL;
    }
    char *text = dt_file_read(ctx, path, (size_t)1 << 28, &bytes);
    if (!text) return NULL;
    dt__schedule_reader x = { .ctx = ctx, .path = path, .at = text, .line = 1, .desc = desc };
    dt_schedule *s = NULL;
    for (; dt__scan(&x, " ", NULL) && dt__line_ends(&x) && *x.at; x.line++) {
        x.at += strcspn(x.at, "\n");
        x.at += *x.at == '\n';
    }
    if (strlen(text) != bytes) dt__read_fail(&x, "the file has a NUL");
    if (dt_error(ctx) == DT_OK && dt__read_sizes(&x) == DT_OK) {
        dt__schedule_reader lines = x; /* the generator reads the same lines again */
        const char *slash = strrchr(path, '/');
        if (dt__read_lines(&x, NULL) == DT_OK) dt__read_stages_end(&x);
        lines.stage = x.stage;
        lines.desc.name = slash ? slash + 1 : path;
        lines.desc.generate = dt__read_generate;
        lines.desc.stage_of = x.n_stages ? dt__read_stage_of : NULL;
        lines.desc.user = &lines;
        lines.desc.unchecked = 1; /* checked here, so that an error names the file */
        if (dt_error(ctx) == DT_OK) s = dt_schedule_make(ctx, lines.desc);
        if (s) s->desc.user = NULL;
        if (s) s->desc.unchecked = desc.unchecked;
    }
    if (s && !desc.unchecked && dt_schedule_check(s, NULL, why, sizeof why) != DT_OK) {
        dt_fail(ctx, DT_ERR_ARG, "%s: %s", path, why);
        dt_schedule_free(s);
        s = NULL;
    }
    dt_free(
        ctx, DT_MEM_HOST, x.stage, (size_t)x.desc.ranks * (size_t)x.desc.chunks * sizeof *x.stage);
    dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
    return s;
}

// ==== 20. Pipeline parallelism: code ============================================================

/* The executor. Each slot has its own tape and holds one micro-batch of a stage. An action runs in
   these steps:

       post recv --> prefetch next recv --> wait --> compute on the slot's tape --> post send

       rank r    | F(0) | F(1)        | B(0) |          an action does not wait for its sends: a
                 |  `--send y-->      |  `--send dx-->  slot waits for dx when it is reused
       rank r+1  |      | F(0) | B(0) |

   The tape is reset when B or W has ended. From then on the slot holds only dx, in a buffer of its
   own, so a slot that waits for its messages takes no activations. Whether a message has arrived
   never decides what is allocated: the memory of a step is the same in every step.

   With the first micro-batch, each stage announces the dtype and shape of its output to the next
   stage. The outputs of all later micro-batches must have the same dtype and shape. */

/* A micro-batch of a stage, on the tape of its slot. */
typedef struct dt__pipe_slot {
    dt_tensor *x, *y, *dy; /* the stage's input, its output, and the gradient of the output */
    void *dx;              /* the gradient of the input, from B or I until the slot is reused */
    dt_work *receiving;    /* pending receive of x or dy */
    dt_work *sending[3];   /* pending sends of y, of dx, and of the shape of y */
    int stage;             /* stage whose ops are on the tape */
    int backward_pending;  /* 1 from F until B or W has run */
    int recv_posted;       /* 1 if the receive of the slot's next action is posted */
} dt__pipe_slot;

/* Dtype and shape of the messages between a stage and the next stage. `known` is 1 once the first
   micro-batch has announced them. */
typedef struct dt__pipe_edge {
    int known;
    dt_dtype dtype;
    dt_shape shape;
} dt__pipe_edge;

typedef struct dt__pipe {
    dt_ctx *ctx;
    dt_pipe_desc desc;
    int rank, micros, stages, n_slots;
    dt__pipe_slot *slots;
    dt__pipe_edge *edges; /* (stages): the edge from each stage to the next stage */
} dt__pipe;

/* Returns the tag of a message between two stages: the output of `stage` if backward is 0, its
   gradient if backward is 1. Each message has its own tag. */
static int dt__pipe_tag(const dt__pipe *p, int stage, int micro, int backward) {
    return 2 * (stage * p->micros + micro) + backward;
}

/* If `sending` is NULL, receives an edge (dtype and shape) from another rank; else starts to send
   the edge and sets *sending. The function does not wait for the send, because the receiver may
   have to receive other messages first. Edges are in host memory, and their messages are not
   counted as traffic. */
static dt_status dt__pipe_exchange_shape(
    const dt__pipe *p, dt__pipe_edge *edge, int stage, int peer, dt_work **sending) {
    int tag = 2 * p->stages * p->micros + stage;
    size_t words = sizeof *edge / sizeof(int32_t);
    dt__call call = dt__call_make(
        sending ? DT__SEND : DT__RECV, sending ? edge : NULL, sending ? NULL : edge, words, DT_I32);
    call.peer = peer;
    call.tag = tag;
    call.host_memory = 1;
    if (!sending) return dt__op_run(p->desc.comm, call);
    *sending = dt__op_start(p->desc.comm, call);
    return dt_error(p->ctx);
}

/* Returns the slot in which this rank holds a micro-batch of a stage of its own. With
   desc.forward_micros each chunk has one slot. */
static int dt__pipe_slot_of(const dt__pipe *p, int stage, int micro) {
    const dt_schedule *s = p->desc.schedule;
    int forwards_only = p->desc.forward_micros > 0;
    const dt_action *a =
        &s->actions[*dt__action_index(s, stage, forwards_only ? 0 : micro, DT__ROLE_F)];
    return forwards_only ? a->chunk : a->slot;
}

/* Ends the sends of a slot and releases dx. After a failure the function releases only the work
   objects. */
static dt_status dt__pipe_end_sends(dt__pipe *p, dt__pipe_slot *slot) {
    for (int i = 0; i < 3; i++) {
        dt_wait(p->ctx, slot->sending[i]);
        slot->sending[i] = NULL;
    }
    dt__buffer_release(p->ctx, slot->dx);
    slot->dx = NULL;
    return dt_error(p->ctx);
}

/* Empties the tape of a slot, once the receiver has read y. */
static dt_status dt__pipe_reset_slot(dt__pipe *p, int s) {
    dt__pipe_slot *slot = &p->slots[s];
    dt_wait(p->ctx, slot->receiving);
    dt_wait(p->ctx, slot->sending[0]);
    slot->receiving = slot->sending[0] = NULL;
    slot->x = slot->y = slot->dy = NULL;
    slot->backward_pending = 0;
    dt_tape(p->ctx, s + 1, slot->stage);
    if (dt_error(p->ctx) == DT_OK) dt_reset(p->ctx);
    return dt_error(p->ctx);
}

/* Starts to receive the message that an action needs: the stage's input in F, else the gradient of
   the stage's output. */
static dt_status dt__pipe_post_recv(dt__pipe *p, const dt_action *a) {
    dt_ctx *ctx = p->ctx;
    dt__pipe_slot *slot = &p->slots[a->slot];
    int forward = a->phase == DT_FORWARD, stage = forward ? a->stage - 1 : a->stage;
    if (slot->recv_posted) return DT_OK;
    /* a run of forwards has no B or W */
    if (slot->y && forward && dt__pipe_reset_slot(p, a->slot) != DT_OK) return dt_error(ctx);
    dt_tape(ctx, a->slot + 1, a->stage);
    slot->stage = a->stage;
    slot->recv_posted = 1;
    if (a->recv_from < 0) return dt_error(ctx);
    dt__pipe_edge *edge = &p->edges[stage];
    int new_edge = !edge->known && a->recv_from != p->rank;
    if (new_edge && dt__pipe_exchange_shape(p, edge, stage, a->recv_from, NULL) != DT_OK)
        return dt_error(ctx);
    dt_tensor *t = dt__new_output(ctx, NULL, edge->dtype, edge->shape, "dt_pipe_run", !forward);
    if (!t) return dt_error(ctx);
    if (forward) /* groups of the ranks of another stage are not groups of this rank */
        t->placements = &dt__unknown_placements;
    if (forward)
        slot->x = p->desc.forward_micros ? t : dt_require_grad(t);
    else
        slot->dy = t;
    if (a->recv_from == p->rank) { /* this rank also has the neighbouring stage, so copy its data */
        int neighbour = forward ? a->stage - 1 : a->stage + 1;
        const dt__pipe_slot *other = &p->slots[dt__pipe_slot_of(p, neighbour, a->micro)];
        return dt__move(ctx, t->data, forward ? other->y->data : other->dx, dt__bytes(t));
    }
    slot->receiving = dt_recv_start(p->desc.comm, t->data, (size_t)dt_count(t->shape), t->dtype,
        a->recv_from, dt__pipe_tag(p, stage, a->micro, !forward));
    return dt_error(ctx);
}

/* Called before action `a` computes: starts to receive the message of the next action if the next
   action's slot can receive it now. */
static dt_status dt__pipe_prefetch(dt__pipe *p, const dt_action *a, const dt_action *next) {
    dt__pipe_slot *slot = &p->slots[next->slot];
    int forward = next->phase == DT_FORWARD;
    if (next->recv_from < 0 || next->recv_from == p->rank || next->slot == a->slot ||
        slot->backward_pending == forward)
        return DT_OK;
    /* the shape is not known yet, and dt__pipe_post_recv would wait for it */
    if (forward && !p->edges[next->stage - 1].known) return DT_OK;
    return dt__pipe_post_recv(p, next);
}

/* Takes over the gradient of the stage's input, which is zeros if the loss does not depend on the
   input. */
static dt_status dt__pipe_take_dx(dt__pipe *p, dt__pipe_slot *slot) {
    dt_tensor *x = slot->x;
    void *dx = x->grad;
    int is_own = dx && dx != (slot->dy ? slot->dy->data : NULL); /* else the stage has no op */
    if (!is_own && !dt__new_grad(x)) return dt_error(p->ctx);
    slot->dx = x->grad;
    x->grad = NULL;
    if (is_own) return DT_OK;
    return dx ? dt__move(p->ctx, slot->dx, dx, dt__bytes(x))
              : dt__fill(p->ctx, x->dtype, slot->dx, (size_t)dt_count(x->shape), 0);
}

/* Keeps the result of an action, and starts to send it if the next stage is on another rank: the
   stage's output in F, the gradient of its input in B and I. */
static void dt__pipe_post_send(dt__pipe *p, const dt_action *a, dt__pipe_slot *slot) {
    int forward = a->phase == DT_FORWARD, stage = forward ? a->stage : a->stage - 1;
    const dt_tensor *t = forward ? slot->y : slot->x;
    if (a->send_to < 0) return;
    if ((!forward && dt__pipe_take_dx(p, slot) != DT_OK) || a->send_to == p->rank) return;
    slot->sending[!forward] =
        dt_send_start(p->desc.comm, forward ? t->data : slot->dx, (size_t)dt_count(t->shape),
            t->dtype, a->send_to, dt__pipe_tag(p, stage, a->micro, !forward));
}

typedef struct dt__pipe_call {
    const dt__pipe *pipe;
    const dt_action *action;
} dt__pipe_call;

static dt_tensor *dt__pipe_stage(dt_tensor *x, void *user) {
    const dt__pipe_call *c = (const dt__pipe_call *)user;
    dt_ctx *ctx = c->pipe->ctx;
    dt_site outer = ctx->site, none = { NULL, 0 };
    ctx->site = none; /* operations of the stage have call sites of their own */
    dt_tensor *y = c->pipe->desc.run(x, c->action->stage, c->action->micro, c->pipe->desc.user);
    ctx->site = outer;
    return y;
}

/* Checks a stage's output. For the first micro-batch, stores the dtype and shape of the output and
   announces them to the next stage. Every later output must have the same dtype and shape. */
static dt_status dt__pipe_check_output(dt__pipe *p, const dt_action *a, const dt_tensor *y) {
    dt__pipe_edge *edge = &p->edges[a->stage];
    if (edge->known)
        return edge->dtype == y->dtype && dt__same_shape(edge->shape, y->shape)
                   ? DT_OK
                   : dt_fail(p->ctx, DT_ERR_SHAPE,
                         "dt_pipe_run: stage %d returned %s for micro-batch %d, "
                         "and another shape or type before",
                         a->stage, dt__tensor_text(y).s, a->micro);
    edge->known = 1;
    edge->dtype = y->dtype;
    edge->shape = y->shape;
    return a->send_to < 0 || a->send_to == p->rank ? DT_OK
                                                   : dt__pipe_exchange_shape(p, edge, a->stage,
                                                         a->send_to, &p->slots[a->slot].sending[2]);
}

static dt_status dt__pipe_forward(dt__pipe *p, const dt_action *a, dt__pipe_slot *slot) {
    dt__pipe_call call = { p, a };
    slot->backward_pending = 1;
    /* in a schedule that splits some backwards, all micro-batches store their tensors in the same
       way, because memory of one kind cannot serve the other */
    if (!p->desc.forward_micros) p->ctx->root->split = p->desc.schedule->splits;
    slot->y = dt_block(p->ctx, dt__pipe_stage, slot->x, &call);
    return slot->y ? dt__pipe_check_output(p, a, slot->y) : dt_error(p->ctx);
}

/* Waits until an action that began at time `begin` has lasted its minimum duration
   (desc.min_durations). */
static void dt__pipe_wait_min_duration(const dt__pipe *p, const dt_action *a, double begin) {
    const dt_host *host = dt_ctx_host(p->ctx);
    if (!p->desc.min_durations) return;
    double min_duration = dt__action_cost(p->desc.min_durations, a);
    double left = begin + min_duration - host->now(host->user);
    if (left > 0) host->sleep(host->user, left);
}

/* Logs a notice, once, if the backward of a stage gave its input no gradient. */
static void dt__pipe_check_input_grad(dt__pipe *p, const dt_action *a, const dt_tensor *x) {
    dt_ctx *ctx = p->ctx;
    if (!x || x->grad || a->phase == DT_FORWARD || a->phase == DT_BACKWARD_WEIGHT ||
        ctx->warned_unused_input || dt_error(ctx) != DT_OK)
        return;
    ctx->warned_unused_input = 1;
    dt_log(ctx, DT_LOG_NOTICE,
        "dt_pipe_run: the output of stage %d does not depend on its input, so the stages before it "
        "get a gradient of zero",
        a->stage);
}

/* Executes one action: receives its message, computes, and starts to send the result. */
static dt_status dt__pipe_execute(
    dt__pipe *p, const dt_action *a, const dt_action *next, dt_span *span) {
    dt_ctx *ctx = p->ctx;
    const dt_host *host = dt_ctx_host(ctx);
    dt__pipe_slot *slot = &p->slots[a->slot];
    if (dt__pipe_post_recv(p, a) != DT_OK) return dt_error(ctx);
    if (next && dt__pipe_prefetch(p, a, next) != DT_OK) return dt_error(ctx);
    if (a->phase == DT_FORWARD && dt__pipe_end_sends(p, slot) != DT_OK) return dt_error(ctx);
    dt_wait(ctx, slot->receiving);
    slot->receiving = NULL;
    slot->recv_posted = 0;
    dt_tape(ctx, a->slot + 1, a->stage);
    dt_micro(ctx, a->micro, p->micros);
    double begin = host->now(host->user);
    if ((a->phase == DT_FORWARD ? dt__pipe_forward(p, a, slot)
                                : dt_backward_at(slot->y, slot->dy, a->phase)) != DT_OK)
        return dt_error(ctx);
    dt__pipe_check_input_grad(p, a, slot->x);
    dt__pipe_wait_min_duration(p, a, begin);
    if (span) span->begin = begin, span->end = host->now(host->user);
    dt__pipe_post_send(p, a, slot);
    int is_last = a->phase == DT_BACKWARD || a->phase == DT_BACKWARD_WEIGHT;
    return is_last ? dt__pipe_reset_slot(p, a->slot) : dt_error(ctx);
}

static void dt__pipe_run_schedule(dt__pipe *p) {
    const dt_schedule *s = p->desc.schedule;
    const dt_action *a = dt_schedule_actions(s, p->rank);
    int n = dt_schedule_count(s, p->rank);
    dt_span *spans = p->desc.spans;
    for (int i = 0; i < n; i++)
        if (dt__pipe_execute(p, &a[i], i + 1 < n ? &a[i + 1] : NULL, spans ? &spans[i] : NULL) !=
            DT_OK)
            return;
}

/* Runs forwards only. Each micro-batch runs through all of this rank's stages before the next
   micro-batch begins. */
static void dt__pipe_run_forwards(dt__pipe *p) {
    const dt_schedule *s = p->desc.schedule;
    for (int micro = 0; micro < p->micros; micro++)
        for (int stage = 0; stage < p->stages; stage++) {
            dt_action a = s->actions[*dt__action_index(s, stage, 0, DT__ROLE_F)];
            if (a.rank != p->rank) continue;
            a.micro = micro;
            a.slot = a.chunk;
            if (dt__pipe_execute(p, &a, NULL, NULL) != DT_OK) return;
        }
}

static dt_status dt__pipe_check(dt_ctx *ctx, const dt_pipe_desc *d) {
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    if (!d->schedule || !d->run || d->forward_micros < 0)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_pipe_run: a schedule and a function that runs a stage are needed, and "
            "forwards of no fewer than 0 micro-batches, not %d",
            d->forward_micros);
    if (dt_schedule_ranks(d->schedule) != dt_comm_size(d->comm))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_pipe_run: schedule '%s' is for %d ranks, and '%s' has %d",
            dt_schedule_name(d->schedule), dt_schedule_ranks(d->schedule), dt_comm_name(d->comm),
            dt_comm_size(d->comm));
    int64_t micros = d->forward_micros ? d->forward_micros : dt_schedule_micros(d->schedule);
    /* each message needs its own tag */
    if ((2 * micros + 1) * dt_schedule_stages(d->schedule) > INT32_MAX)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_pipe_run: %lld micro-batches through %d stages are more messages than can "
            "be told apart",
            (long long)micros, dt_schedule_stages(d->schedule));
    char why[400];
    if (d->schedule->desc.unchecked &&
        dt_schedule_check(d->schedule, NULL, why, sizeof why) != DT_OK)
        return dt_fail(ctx, DT_ERR_ARG, "dt_pipe_run: %s", why);
    return DT_OK;
}

static dt_status dt__pipe_run(dt_ctx *ctx, dt_pipe_desc desc) {
    if (!ctx) return DT_ERR_ARG;
    if (dt__pipe_check(ctx, &desc) != DT_OK) return dt_error(ctx);
    dt__pipe p = { .ctx = ctx,
        .desc = desc,
        .rank = dt_comm_rank(desc.comm),
        .micros = desc.forward_micros,
        .stages = dt_schedule_stages(desc.schedule) };
    int no_grad = ctx->no_grad;
    if (!p.micros) p.micros = dt_schedule_micros(desc.schedule);
    p.n_slots = desc.forward_micros ? dt_schedule_chunks(desc.schedule)
                                    : dt_schedule_slots(desc.schedule, p.rank);
    /* from the pool, so that later steps allocate nothing */
    size_t bytes = (size_t)p.n_slots * sizeof *p.slots + (size_t)p.stages * sizeof *p.edges;
    p.slots = (dt__pipe_slot *)dt__buffer_acquire(ctx, DT_MEM_HOST, bytes);
    if (!p.slots) return dt_error(ctx);
    memset(p.slots, 0, bytes);
    p.edges = (dt__pipe_edge *)(void *)(p.slots + p.n_slots);
    if (desc.forward_micros) ctx->no_grad = 1;
    if (desc.forward_micros)
        dt__pipe_run_forwards(&p);
    else
        dt__pipe_run_schedule(&p);
    for (int s = 0; s < p.n_slots; s++) {
        dt_wait(ctx, p.slots[s].receiving); /* after a failure one may have been prefetched */
        p.slots[s].receiving = NULL;
        dt__pipe_end_sends(&p, &p.slots[s]);
        if (p.slots[s].y) dt__pipe_reset_slot(&p, s);
    }
    dt__buffer_release(ctx, p.slots);
    ctx->no_grad = no_grad;
    dt_tape(ctx, 0, 0);
    dt_micro(ctx, 0, 1);
    return dt_error(ctx);
}

DT__DEFINE_AT_SITE(dt_status, pipe_run, ctx, (dt_ctx * ctx, dt_pipe_desc desc), ctx, desc)

static dt_status dt__pipe_gather_spans(
    dt_comm *comm, const dt_schedule *schedule, const dt_span *mine, dt_span *all) {
    int n = dt_schedule_offset(schedule, dt_schedule_ranks(schedule)), rank = dt_comm_rank(comm);
    double first = HUGE_VAL;
    if (!schedule || !mine || !all || rank >= dt_schedule_ranks(schedule))
        return comm ? dt_fail(comm->world->ctx, DT_ERR_ARG,
                          "dt_pipe_gather_spans: a NULL argument, or too few ranks")
                    : DT_ERR_ARG;
    memset(all, 0, (size_t)n * sizeof *all);
    memcpy(all + dt_schedule_offset(schedule, rank), mine,
        (size_t)dt_schedule_count(schedule, rank) * sizeof *mine);
    dt_status status = dt_sum_doubles(comm, (double *)all, 2 * (size_t)n);
    for (int i = 0; i < n; i++) first = all[i].begin < first ? all[i].begin : first;
    for (int i = 0; i < n; i++) all[i].begin -= first, all[i].end -= first;
    return status;
}

DT__DEFINE_AT_SITE(dt_status, pipe_gather_spans, comm ? comm->world->ctx : NULL,
    (dt_comm * comm, const dt_schedule *schedule, const dt_span *mine, dt_span *all), comm,
    schedule, mine, all)

// ==== 21. Data order and text datasets: code ====================================================

/* A training run reads the data again and again: its k-th sequence is sequence k mod S of the data.
   Sequence i of replica r in micro-step j of step n is the run's sequence k = consumed + (n-1) B +
   (j R + r) b + i, so the data of a step do not depend on the layout. The distributed sampler
   permutes the samples of each epoch, and rank r reads the entries r, r + R, .. For n = 5, R = 2:

       shuffled       3 0 4 1 2 | 3     padded with its own beginning; with drop_last 3 0 4 1
       rank 0         3   4   2
       rank 1           0   1     3 */

/* Returns the result of dt_data_order_sequence and sets *epoch to the result of
   dt_data_order_epoch. The products need up to 127 bits. */
static int64_t dt__data_order_at(
    dt_data_order o, int64_t step, int micro_step, int replica, int i, int64_t *epoch) {
    *epoch = 0;
    if (o.sequences < 1 || step < 1 || o.batch < 0 || o.micro_batch < 0 || o.replicas < 0 ||
        o.consumed < 0 || micro_step < 0 || replica < 0 || i < 0)
        return -1;
    dt__uint128 micro_batch = (dt__uint128)micro_step * (unsigned)o.replicas + (unsigned)replica;
    dt__uint128 k = (dt__uint128)(step - 1) * (uint64_t)o.batch + (uint64_t)o.consumed +
                    micro_batch * (unsigned)o.micro_batch + (unsigned)i;
    *epoch = dt__saturate(k / (uint64_t)o.sequences);
    return (int64_t)(k % (uint64_t)o.sequences);
}

int64_t dt_data_order_sequence(
    dt_data_order order, int64_t step, int micro_step, int replica, int i) {
    int64_t epoch;
    return dt__data_order_at(order, step, micro_step, replica, i, &epoch);
}

int64_t dt_data_order_epoch(dt_data_order order, int64_t step, int micro_step, int replica, int i) {
    int64_t epoch;
    dt__data_order_at(order, step, micro_step, replica, i, &epoch);
    return epoch;
}

/* Returns a reason why r is invalid whatever the micro-batch size is, or NULL if there is none. */
static const char *dt__ramp_problem(dt_batch_ramp r) {
    if (r.start < 1 || r.incr < 1 || r.samples < 1 || r.batch < r.start)
        return "start, increment and samples are at least 1, and start is at most the batch";
    int64_t increments = (r.batch - r.start) / r.incr;
    return increments == INT64_MAX || r.samples > INT64_MAX / (increments + 1)
               ? "too many sequences"
               : NULL;
}

/* Returns a valid ramp near r, for an error text: its start and its increment are multiples of
   `unit`, and its increments lead exactly to r.batch. If none of 10,000 tried increments divides
   batch - start, the increment is batch - start. */
static dt_batch_ramp dt__ramp_suggest(dt_batch_ramp r, int64_t unit) {
    int64_t start = r.start < 1 ? 1 : r.start > r.batch ? r.batch : r.start;
    /* rounding up does not exceed the batch, because the batch is a multiple of unit */
    r.start = start % unit ? start - start % unit + unit : start;
    int64_t left = (r.batch - r.start) / unit,
            increment = r.incr / unit < left ? r.incr / unit : left;
    for (int tries = 0; increment > 1 && left % increment != 0; tries++)
        increment = tries < 10000 ? increment - 1 : left;
    if (increment < 1) increment = 1;
    r.incr = increment * unit;
    int64_t limit = INT64_MAX / (left / increment < INT64_MAX ? left / increment + 1 : INT64_MAX);
    if (r.samples < 1) r.samples = r.batch;
    if (r.samples > limit) r.samples = limit;
    return r;
}

dt_status dt_batch_ramp_check(dt_batch_ramp r, int64_t unit, char *text, size_t text_bytes) {
    dt__strbuf t = dt__strbuf_in(text, text_bytes);
    if (r.samples == 0) return DT_OK;
    dt__strbuf_add(&t, "batch ramp %lld:%lld:%lld to %lld: ", (long long)r.start, (long long)r.incr,
        (long long)r.samples, (long long)r.batch);
    if (unit < 1 || r.batch < 1 || r.batch % unit != 0)
        return dt__strbuf_add(&t,
            "the batch is not a multiple of %lld, the micro-batch of all replicas",
            (long long)unit);
    const char *bad = dt__ramp_problem(r);
    int64_t grows = bad ? 0 : r.batch - r.start;
    if (!bad && grows % r.incr == 0 && r.start % unit == 0 && (r.incr % unit == 0 || grows == 0)) {
        if (t.bytes > 0) text[0] = 0;
        return DT_OK;
    }
    dt_batch_ramp near = dt__ramp_suggest(r, unit);
    if (bad)
        dt__strbuf_add(&t, "%s", bad);
    else if (grows % r.incr != 0)
        dt__strbuf_add(&t, "steps of %lld do not lead from %lld to %lld", (long long)r.incr,
            (long long)r.start, (long long)r.batch);
    else
        dt__strbuf_add(&t,
            "a batch of %lld is not a multiple of %lld, the micro-batch of all replicas",
            (long long)(r.start % unit != 0 ? r.start : r.start + r.incr), (long long)unit);
    return dt__strbuf_add(&t, "; use %lld:%lld:%lld", (long long)near.start, (long long)near.incr,
        (long long)near.samples);
}

int64_t dt_batch_ramp_size(dt_batch_ramp r, int64_t consumed) {
    if (consumed >= r.samples || dt__ramp_problem(r)) return r.batch;
    int64_t increments = (r.batch - r.start) / r.incr;
    return consumed < 0 ? r.start : r.start + consumed * increments / r.samples * r.incr;
}

/* Each iteration of the loop counts all steps of one batch size. There are few iterations: because
   `samples` times K is at most INT64_MAX, fewer than 2^21 sizes can last more than one step. Each
   step after these sizes skips sizes, and later steps skip more. */
int64_t dt_batch_ramp_consumed(dt_batch_ramp r, int64_t step) {
    int64_t consumed = 0, left = step > 1 ? step - 1 : 0;
    if (dt__ramp_problem(r)) r.samples = 0;
    int64_t increments = r.samples ? (r.batch - r.start) / r.incr : 0;
    while (left > 0 && consumed < r.samples) {
        int64_t grown = consumed * increments / r.samples, size = r.start + grown * r.incr;
        /* number of consumed sequences at which the next size begins */
        int64_t end = increments ? ((grown + 1) * r.samples - 1) / increments + 1 : r.samples;
        int64_t max_steps = (end - consumed - 1) / size + 1,
                steps = max_steps < left ? max_steps : left;
        consumed = dt__saturate((dt__uint128)steps * (uint64_t)size + (uint64_t)consumed);
        left -= steps;
    }
    uint64_t size = r.batch > 0 ? (uint64_t)r.batch : 0;
    return dt__saturate((dt__uint128)left * size + (uint64_t)consumed);
}

/* The Mersenne twister, MT19937: M. Matsumoto, T. Nishimura, ACM TOMACS 8 (1998) 3-30. */
enum { DT__TWISTER_WORDS = 624, DT__TWISTER_APART = 397 };
typedef struct dt__twister {
    uint32_t word[DT__TWISTER_WORDS];
    int used;
} dt__twister;

static void dt__twister_seed(dt__twister *t, uint32_t seed) {
    t->word[0] = seed;
    for (uint32_t i = 1; i < DT__TWISTER_WORDS; i++)
        t->word[i] = 1812433253u * (t->word[i - 1] ^ (t->word[i - 1] >> 30)) + i;
    t->used = DT__TWISTER_WORDS;
}

static uint32_t dt__twister_next(dt__twister *t) {
    if (t->used == DT__TWISTER_WORDS) { /* all words are used: generate the next block */
        for (int i = 0; i < DT__TWISTER_WORDS; i++) {
            uint32_t next = t->word[(i + 1) % DT__TWISTER_WORDS];
            uint32_t mixed = (t->word[i] & 0x80000000u) | (next & 0x7fffffffu);
            t->word[i] = t->word[(i + DT__TWISTER_APART) % DT__TWISTER_WORDS] ^ (mixed >> 1) ^
                         (next & 1 ? 0x9908b0dfu : 0);
        }
        t->used = 0;
    }
    uint32_t x = t->word[t->used++];
    x ^= x >> 11;
    x ^= (x << 7) & 0x9d2c5680u;
    x ^= (x << 15) & 0xefc60000u;
    return x ^ (x >> 18);
}

struct dt_sampler {
    dt__object object;
    dt_sampler_desc desc;
    dt_sampler_state state;
    int32_t *order;      /* (samples): the order of epoch order_epoch; NULL if desc.shuffle is 0 */
    int64_t order_epoch; /* -1: no order yet */
};

void dt_sampler_free(dt_sampler *s) { dt__object_free(s ? &s->object : NULL); }

dt_sampler *dt_sampler_make(dt_ctx *ctx, dt_sampler_desc d) {
    if (dt_error(ctx) != DT_OK) return NULL;
    if (d.samples < 1 || d.replicas < 1 || d.rank < 0 || d.rank >= d.replicas) {
        dt_fail(ctx, DT_ERR_ARG,
            "dt_sampler_make: %lld samples for rank %d of %d; at least 1 sample and 1 rank are "
            "needed, and ranks count from 0",
            (long long)d.samples, d.rank, d.replicas);
        return NULL;
    }
    if (d.shuffle && d.samples > DT_SAMPLER_MAX_SHUFFLED) {
        dt_fail(ctx, DT_ERR_ARG, "dt_sampler_make: %lld samples; at most %d can be shuffled",
            (long long)d.samples, DT_SAMPLER_MAX_SHUFFLED);
        return NULL;
    }
    dt_sampler *s = (dt_sampler *)dt__object_new(ctx, sizeof *s, "dt_sampler_make", NULL);
    if (!s) return NULL;
    s->desc = d;
    s->order_epoch = -1;
    if (d.shuffle)
        s->order = (int32_t *)dt__object_alloc(&s->object, (size_t)d.samples * sizeof *s->order);
    return (dt_sampler *)dt__object_made(&s->object);
}

int64_t dt_sampler_count(const dt_sampler *s) {
    if (!s) return 0;
    return s->desc.samples / s->desc.replicas +
           (s->desc.samples % s->desc.replicas != 0 && !s->desc.drop_last);
}

dt_sampler_state dt_sampler_tell(const dt_sampler *s) {
    dt_sampler_state start = { 0, 0 };
    return s ? s->state : start;
}

dt_status dt_sampler_seek(dt_sampler *s, dt_sampler_state state) {
    dt_ctx *ctx = s ? s->object.ctx : NULL;
    if (!s || dt_error(ctx) != DT_OK) return s ? dt_error(ctx) : DT_ERR_ARG;
    if (state.epoch < 0 || state.position < 0 || state.position > dt_sampler_count(s))
        return dt_fail(ctx, DT_ERR_ARG, "dt_sampler_seek: position %lld of %lld in epoch %lld",
            (long long)state.position, (long long)dt_sampler_count(s), (long long)state.epoch);
    s->state = state;
    return DT_OK;
}

dt_status dt_sampler_set_epoch(dt_sampler *s, int64_t epoch) {
    dt_sampler_state start = { epoch, 0 };
    return dt_sampler_seek(s, start);
}

/* Fills s->order as torch.randperm does (Fisher-Yates): each index in order takes one of the
   remaining samples. */
static void dt__sampler_shuffle(dt_sampler *s) {
    dt__twister twister;
    int64_t n = s->desc.samples;
    dt__twister_seed(&twister, (uint32_t)(s->desc.seed + (uint64_t)s->state.epoch));
    for (int64_t i = 0; i < n; i++) s->order[i] = (int32_t)i;
    for (int64_t i = 0; i < n - 1; i++) {
        int64_t other = i + dt__twister_next(&twister) % (n - i);
        int32_t taken = s->order[other];
        s->order[other] = s->order[i];
        s->order[i] = taken;
    }
    s->order_epoch = s->state.epoch;
}

int64_t dt_sampler_next(dt_sampler *s) {
    if (!s || dt_error(s->object.ctx) != DT_OK || s->state.position == dt_sampler_count(s))
        return -1;
    int64_t at = s->state.position++ * s->desc.replicas,
            left = s->desc.samples - at; /* at least 1 */
    /* past the end the order continues at its beginning */
    at = s->desc.rank < left ? at + s->desc.rank : (s->desc.rank - left) % s->desc.samples;
    if (!s->order) return at;
    if (s->order_epoch != s->state.epoch) dt__sampler_shuffle(s);
    return s->order[at];
}

static double dt__count_labels(dt_comm *comm, const int32_t *labels, size_t n) {
    double count = 0;
    if (!labels && n > 0) {
        if (comm)
            dt_fail(comm->world->ctx, DT_ERR_ARG, "dt_count_labels: %zu labels, which are NULL", n);
        return 0;
    }
    for (size_t i = 0; i < n; i++) count += labels[i] >= 0;
    dt_sum_doubles(comm, &count, 1);
    return count;
}

DT__DEFINE_AT_SITE(double, count_labels, comm ? comm->world->ctx : NULL,
    (dt_comm * comm, const int32_t *labels, size_t n), comm, labels, n)

typedef struct dt__text_file {
    char *path;
    int64_t start, tokens;
    int header_bytes;
} dt__text_file;

struct dt_text {
    dt__object object;
    int seq, files;
    int64_t tokens;
    dt__text_file *file; /* (files) */
    int token_bytes;     /* 1 in byte files, 2 or 4 in shards */
    /* the seq + 1 tokens of one sequence in the format of the files; has space for 4 bytes per
       token */
    unsigned char *buffer;
    /* descriptor and index of the open file; -1 if no file is open. At most one file is open at a
       time, because many ranks may read many files. */
    int fd, current;
};

static void dt__text_close_file(dt__object *o) {
    dt_text *t = (dt_text *)(void *)o;
    const dt_io *io = dt_ctx_io(o->ctx);
    if (t->fd >= 0) io->close(io->user, t->fd);
    t->fd = t->current = -1;
}

static dt_status dt__text_open_file(dt_text *t, int i) {
    if (t->current == i) return DT_OK;
    dt__text_close_file(&t->object);
    t->fd = dt__file_open(t->object.ctx, t->file[i].path, DT_IO_READ);
    if (t->fd >= 0) t->current = i;
    return dt_error(t->object.ctx);
}

void dt_text_close(dt_text *text) { dt__object_free(text ? &text->object : NULL); }

/* Reads the size, the kind and the number of tokens of file i. llm.c shards begin with 256 words of
   4 bytes: magic number, version, number of tokens, zeros. */
static dt_status dt__text_read_header(dt_text *t, int i) {
    dt_ctx *ctx = t->object.ctx;
    dt__text_file *f = &t->file[i];
    uint32_t header[3] = { 0, 0, 0 };
    int width = 1;
    if (dt__text_open_file(t, i) != DT_OK) return dt_error(ctx);
    errno = 0;
    int64_t bytes = dt_ctx_io(ctx)->size(dt_ctx_io(ctx)->user, t->fd);
    if (bytes < 0) return dt__io_fail(ctx, "%s", f->path);
    int64_t head = bytes < 12 ? bytes : 12;
    if (dt__file_read_at(ctx, f->path, t->fd, header, head, 0, "header") != DT_OK)
        return dt_error(ctx);
    f->tokens = bytes;
    if (bytes >= 4 && (header[0] == 20240520 || header[0] == 20240801)) {
        uint32_t version = header[0] == 20240520 ? 1 : 7;
        width = version == 1 ? 2 : 4;
        f->header_bytes = 1024;
        f->tokens = header[2];
        if (header[1] != version || header[2] > INT32_MAX ||
            bytes != f->header_bytes + f->tokens * width)
            return dt_fail(ctx, DT_ERR_IO,
                "%s: a shard of version %u with %u tokens has %lld bytes; version %u and "
                "1024 + %d a token are needed",
                f->path, header[1], header[2], (long long)bytes, version, width);
    }
    if (i > 0 && width != t->token_bytes)
        return dt_fail(ctx, DT_ERR_IO,
            "%s has %d bytes a token, but %s has %d: bytes and shards do not mix", f->path, width,
            t->file[0].path, t->token_bytes);
    t->token_bytes = width;
    f->start = t->tokens;
    t->tokens += f->tokens;
    return DT_OK;
}

dt_text *dt_text_open(dt_ctx *ctx, const char *const *paths, int files, int seq) {
    if (dt_error(ctx) != DT_OK) return NULL;
    int named = 0; /* number of paths that are not NULL */
    while (paths && named < files && paths[named]) named++;
    if (files < 1 || seq < 1 || named < files) {
        dt_fail(ctx, DT_ERR_ARG,
            "dt_text_open: %d files, of which %d are named, sequences of %d tokens", files, named,
            seq);
        return NULL;
    }
    dt_text *t = (dt_text *)dt__object_new(ctx, sizeof *t, "dt_text_open", dt__text_close_file);
    if (!t) return NULL;
    t->seq = seq;
    t->files = files;
    t->fd = t->current = -1;
    t->file = (dt__text_file *)dt__object_alloc(&t->object, (size_t)files * sizeof *t->file);
    t->buffer = (unsigned char *)dt__object_alloc(&t->object, 4 * ((size_t)seq + 1));
    for (int i = 0; i < files && dt_error(ctx) == DT_OK; i++) {
        size_t bytes = strlen(paths[i]) + 1;
        t->file[i].path = (char *)dt__object_alloc(&t->object, bytes);
        if (!t->file[i].path) break;
        memcpy(t->file[i].path, paths[i], bytes);
        dt__text_read_header(t, i);
    }
    if (dt_error(ctx) == DT_OK && dt_text_sequences(t) < 1)
        dt_fail(ctx, DT_ERR_IO,
            "%s%s: %lld %s, but one sequence needs %lld (seq %d and the label of its last token)",
            paths[0], files > 1 ? " and others" : "", (long long)t->tokens,
            t->token_bytes > 1 ? "tokens" : "bytes", (long long)seq + 1, seq);
    return (dt_text *)dt__object_made(&t->object);
}

int64_t dt_text_tokens(const dt_text *text) { return text ? text->tokens : 0; }
int64_t dt_text_sequences(const dt_text *text) {
    return dt_text_tokens(text) > 0 ? (text->tokens - 1) / text->seq : 0;
}

int64_t dt_text_token_limit(const dt_text *text) {
    if (!text) return 0;
    return text->token_bytes < 4 ? (int64_t)1 << (8 * text->token_bytes) : (int64_t)1 << 31;
}

dt_status dt_text_read(dt_text *t, int64_t sequence, int32_t *ids, int32_t *labels) {
    dt_ctx *ctx = t ? t->object.ctx : NULL;
    if (!t || dt_error(ctx) != DT_OK) return t ? dt_error(ctx) : DT_ERR_ARG;
    if (sequence < 0 || sequence >= dt_text_sequences(t))
        return dt_fail(ctx, DT_ERR_ARG, "dt_text_read: sequence %lld of %lld", (long long)sequence,
            (long long)dt_text_sequences(t));
    if (!ids || !labels) return dt_fail(ctx, DT_ERR_ARG, "dt_text_read: ids or labels is NULL");
    int64_t at = sequence * t->seq, end = at + t->seq + 1;
    unsigned char *out = t->buffer;
    for (int i = 0; i < t->files && at < end; i++) { /* a sequence may span several files */
        const dt__text_file *f = &t->file[i];
        int64_t stop = f->start + f->tokens < end ? f->start + f->tokens : end,
                bytes = (stop - at) * t->token_bytes;
        if (at >= stop) continue;
        int64_t from = f->header_bytes + (at - f->start) * t->token_bytes;
        if (dt__text_open_file(t, i) != DT_OK ||
            dt__file_read_at(ctx, f->path, t->fd, out, bytes, from, "tokens") != DT_OK)
            return dt_error(ctx);
        out += bytes;
        at = stop;
    }
    for (int i = 0; i <= t->seq; i++) {
        uint16_t two;
        uint32_t token = t->buffer[i];
        if (t->token_bytes == 2) token = (memcpy(&two, t->buffer + 2 * i, 2), two);
        if (t->token_bytes == 4) memcpy(&token, t->buffer + 4 * i, 4);
        if (token > INT32_MAX)
            return dt_fail(ctx, DT_ERR_IO, "%s%s: token %lld is %u, which is not a token id",
                t->file[0].path, t->files > 1 ? " and others" : "",
                (long long)(sequence * t->seq + i), token);
        if (i < t->seq) ids[i] = (int32_t)token;
        if (i > 0) labels[i - 1] = (int32_t)token;
    }
    return DT_OK;
}

// ==== 22. Dry runs: code ========================================================================

/* A dry-run context has a kernel table whose alloc returns addresses without memory, and whose
   kernels only count. Code that moves data checks dt__is_dry, so that host arrays are still copied.
   The program, its collectives and the byte counters run unchanged. */

/* Dry-run addresses are in the upper half of the address space, where there is no memory. */
#define DT__DRY_BASE ((uintptr_t)1 << (8 * sizeof(uintptr_t) - 1))

static int dt__is_dry(const void *p) { return (uintptr_t)p >= DT__DRY_BASE; }

static void *dt__dry_alloc(void *user, size_t bytes) {
    dt_dry *dry = (dt_dry *)user;
    uintptr_t p = DT__DRY_BASE + dry->next_address;
    dry->next_address += (bytes + 63) / 64 * 64;
    return (void *)p;
}

static void dt__dry_free(void *user, void *p, size_t bytes) {
    (void)user;
    (void)p;
    (void)bytes;
}

static dt_status dt__dry_move(void *dst, const void *src, size_t bytes, void *stream) {
    (void)stream;
    if (dt__is_dry(dst) || bytes == 0) return DT_OK;
    if (dt__is_dry(src))
        memset(dst, 0, bytes);
    else
        memmove(dst, src, bytes);
    return DT_OK;
}

/* Reduces arrays that are all in real memory, such as the counts that ranks exchange. Does nothing
   for arrays with dry-run addresses. */
static dt_status dt__dry_reduce_real(const dt_reduce_args *a) {
    int dry = dt__is_dry(a->out);
    for (int i = 0; i < a->n; i++) dry |= dt__is_dry(a->in[i]);
    for (int i = 0; i < a->n_copies; i++) dry |= dt__is_dry(a->copies[i]);
    return dry ? DT_OK : dt_kernels_cpu()->reduce(a, NULL);
}

enum {
#define DT__DRY_ID(k) DT__DRY_##k,
    DT_KERNELS(DT__DRY_ID)
#undef DT__DRY_ID
        DT__DRY_KERNELS
};

/* The bytes that a kernel reads and writes: elements times arrays. Arrays that are small beside the
   others (gains, row sums, indices) are left out, and so are kernels that no step of a large model
   calls often (patches, digests, signs, quantization): they count 0. */
static double dt__dry_bytes(int kernel, const void *args, dt_dtype *type) {
    double elements = 0, arrays = 0;
    dt_dtype dtype = DT_U8;
#define DT__MOVES(k, elements_, arrays_) \
    case DT__DRY_##k: { \
        const dt_##k##_args *a = (const dt_##k##_args *)args; \
        elements = (double)(elements_), arrays = (double)(arrays_), dtype = a->dtype; \
        break; \
    }
    switch (kernel) {
        DT__MOVES(cast, a->count, 2 + a->accumulate)
        DT__MOVES(fill, a->count, 1)
        DT__MOVES(permute, dt_count(a->shape), 2 + a->accumulate)
        DT__MOVES(sum, a->outer * (a->n + 1) * a->inner, 1)
        DT__MOVES(cumsum, a->outer * a->n * a->inner, 2 + a->accumulate)
        DT__MOVES(max, a->outer * (a->n + 1) * a->inner, 1)
        DT__MOVES(binary, dt_count(a->shape), 3 + a->accumulate + (a->factor != NULL))
        DT__MOVES(where, dt_count(a->shape), 4 + a->accumulate)
        DT__MOVES(unary, a->count, 2)
        DT__MOVES(unary_back, a->count, 3 + a->accumulate)
        DT__MOVES(glu, a->rows * a->cols, 3)
        DT__MOVES(glu_back, a->rows * a->cols, 5 + 2 * a->accumulate)
        DT__MOVES(softmax, a->rows * a->cols, 2)
        DT__MOVES(softmax_back, a->rows * a->cols, 3 + a->accumulate)
        DT__MOVES(norm, a->rows * a->cols, 2)
        DT__MOVES(norm_back, a->rows * a->cols, 3 + a->accumulate_x)
        DT__MOVES(rope, a->tokens * a->heads * a->dim, 2 + a->accumulate)
        DT__MOVES(dropout, a->rows * a->cols, 2 + a->accumulate)
        DT__MOVES(embedding, a->rows * a->cols, 2)
        DT__MOVES(embedding_back, a->rows * a->cols, 3)
        DT__MOVES(topk, a->rows * a->cols, 1)
        DT__MOVES(scatter, a->outer * (a->n + a->k) * a->inner, 1)
        DT__MOVES(square_sums, a->count, 1)
        DT__MOVES(cross_entropy, a->rows * a->cols, 1)
        DT__MOVES(cross_entropy_back, a->rows * a->cols, 2)
        DT__MOVES(adamw, a->count, 7)
        DT__MOVES(sgd, a->count, 3)
        DT__MOVES(momentum, a->count, 5)
        DT__MOVES(frozen_adam, a->count, 5)
        DT__MOVES(init, a->count, 1)
        DT__MOVES(pair_loss, a->count, 2)
        DT__MOVES(pair_loss_back, a->count, 3)
    default: break;
    case DT__DRY_copy: {
        const dt_copy_args *a = (const dt_copy_args *)args;
        elements = (double)(a->rows * a->row_bytes), arrays = 2;
    }
    }
#undef DT__MOVES
    *type = dtype;
    return elements * arrays * (double)dt_dtype_size(dtype);
}

/* Describes a kernel call. Attention counts as two matrix products in the forward and five in the
   backward. */
static dt_dry_kernel dt__dry_describe(int kernel, const char *name, const void *args) {
    const dt_matmul_args *m = (const dt_matmul_args *)args;
    const dt_attention_args *a = (const dt_attention_args *)args;
    const dt_attention_back_args *b = (const dt_attention_back_args *)args;
    dt_dry_kernel call = { name, DT_F32, 0, 0, 0, 0, 0, 0 };
    double products = 1, size;
    if (kernel == DT__DRY_matmul) {
        dt_dry_kernel product = { name, m->dtype, m->m, m->n, m->k, m->batch ? m->batch : 1, 0, 0 };
        call = product;
    } else if (kernel == DT__DRY_attention) {
        dt_dry_kernel forward = { name, a->dtype, a->tq, a->tk, a->dim, a->batch * a->heads, 0, 0 };
        call = forward;
        products = 2;
    } else if (kernel == DT__DRY_attention_back) {
        dt_dry_kernel back = { name, b->dtype, b->tq, b->tk, b->dim, b->batch * b->heads, 0, 0 };
        call = back;
        products = 5;
    } else {
        call.bytes = dt__dry_bytes(kernel, args, &call.dtype);
        return call;
    }
    size = (double)dt_dtype_size(call.dtype) * (double)call.batch;
    call.flops =
        2 * products * (double)call.batch * (double)call.m * (double)call.n * (double)call.k;
    call.bytes =
        size * (products == 1 ? (double)(call.m * call.n + call.m * call.k + call.n * call.k)
                              : (products == 2 ? 2 : 4) * (double)((call.m + call.n) * call.k));
    return call;
}

/* Counts a kernel call and advances the virtual clock. The sums of collectives (reduce) are
   communication, and count as bytes. */
static dt_status dt__dry_call(dt_dry *dry, int kernel, const char *name, const void *args) {
    if (kernel == DT__DRY_reduce) return dt__dry_reduce_real((const dt_reduce_args *)args);
    dt_dry_kernel call = dt__dry_describe(kernel, name, args);
    dry->kernel_calls++;
    dry->flops += call.flops;
    if (dry->seconds) dry->now += dry->seconds(dry->user, &call);
    return DT_OK;
}

#define DT__DRY_FN(k) \
    static dt_status dt__dry_##k(const dt_##k##_args *a, void *stream) { \
        return dt__dry_call((dt_dry *)stream, DT__DRY_##k, #k, a); \
    }
DT_KERNELS(DT__DRY_FN)
#undef DT__DRY_FN

/* ---- the virtual clock ---- */

/* The host table of a context with a virtual clock: the context's own, but for the clock. */
static void *dt__virtual_alloc(void *dry, size_t bytes, dt_mem mem) {
    const dt_host *host = &((dt_dry *)dry)->host;
    return host->alloc(host->user, bytes, mem);
}
static void dt__virtual_free(void *dry, void *p, size_t bytes, dt_mem mem) {
    const dt_host *host = &((dt_dry *)dry)->host;
    host->free(host->user, p, bytes, mem);
}
static void dt__virtual_log(void *dry, int level, int rank, const char *text) {
    const dt_host *host = &((dt_dry *)dry)->host;
    host->log(host->user, level, rank, text);
}
static double dt__virtual_now(void *dry) { return ((dt_dry *)dry)->now; }
static void dt__virtual_sleep(void *dry, double seconds) { ((dt_dry *)dry)->now += seconds; }

/* Gives the context a virtual clock. Its waits for other ranks (dt_comm.h) keep the real one. */
static void dt__virtual_clock_make(dt_ctx *ctx, dt_dry *dry) {
    dt__world *world = (dt__world *)dt_ctx_attached(ctx);
    dt_host host;
    if (world && world->transport.send) {
        dt_fail(
            ctx, DT_ERR_UNSUPPORTED, "dt_dry_begin: a virtual clock needs ranks that are threads");
        return;
    }
    memset(&host, 0, sizeof host);
    dry->host = ctx->host;
    host.user = dry;
    host.alloc = dt__virtual_alloc;
    host.free = dt__virtual_free;
    host.now = dt__virtual_now;
    host.sleep = dt__virtual_sleep;
    host.log = dt__virtual_log;
    ctx->host = host;
    if (!world) return;
    dt_link none = { 0, 0, NULL, 0 };
    world->host = &dry->host;
    world->clock = &dry->now;
    if (!world->link) dt__link_make(world, none); /* it carries the ranks' times */
}

dt_status dt_dry_begin(dt_ctx *ctx, dt_dry *dry) {
#define DT__DRY_ENTRY(k) .k = dt__dry_##k,
    dt_kernels table = { .name = "dry",
        .alloc = dt__dry_alloc,
        .free = dt__dry_free,
        .move = dt__dry_move,
        DT_KERNELS(DT__DRY_ENTRY) };
#undef DT__DRY_ENTRY
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    if (!dry || ctx->root || ctx->buckets || ctx->work)
        return dt_fail(ctx, DT_ERR_ARG, "dt_dry_begin: %s",
            dry ? "the context has tensors already" : "no dt_dry");
    table.user = dry;
    /* so that the dry run counts the scratch and the saved logits of the real device */
    table.work_bytes = ctx->kernels.work_bytes;
    table.max_saved_logits = ctx->kernels.max_saved_logits;
    if (ctx->owns_stream) ctx->kernels.close(ctx->stream);
    ctx->owns_stream = 0;
    ctx->kernels = table;
    ctx->stream = dry;
    dt__world *world = (dt__world *)dt_ctx_attached(ctx);
    if (world && dry->forked) world->would_share = dt__is_dry;
    if (dry->seconds) dt__virtual_clock_make(ctx, dry);
    return dt_error(ctx);
}

// ==== 23. Planner: code =========================================================================

#define DT__PLAN_STAGES 1024

/* A layout with its defaults filled in, and what the parts of the closed form tell each other. */
typedef struct dt__plan {
    dt_plan_model m;
    dt_layout l;
    const dt_plan_profile *q;
    double tp, cp, pp, ep, dp; /* sizes; dp counts replicas of the experts */
    double nodes, micros;
    double tokens;                      /* of a micro-batch on one rank */
    double kv;                          /* columns of the keys */
    double moe;                         /* share of the layers that have experts */
    double dense_params, expert_params; /* of one layer on one rank; experts: mean of all layers */
    double embedding;                   /* parameters of the embedding on one rank */
    /* seconds of one layer and micro-batch, and what shares of them are traffic */
    double forward, backward, tp_share, cp_share, ep_share;
    double steady; /* factor of both while the pipeline is full */
    double head_forward, head_backward, head_tp;
    int layers[DT__PLAN_STAGES], stages, head; /* of each stage; their number; the loss's stage */
} dt__plan;

static int dt__plan_or(int value, int otherwise) { return value ? value : otherwise; }

/* Fills in defaults. Returns 0 if a size is impossible. */
static int dt__plan_begin(dt__plan *p) {
    dt_plan_model *m = &p->m;
    dt_layout *l = &p->l;
    m->kv_heads = dt__plan_or(m->kv_heads, m->heads);
    m->top_k = dt__plan_or(m->top_k, 1);
    m->moe_every = dt__plan_or(m->moe_every, 1);
    l->mesh.dp = dt__plan_or(l->mesh.dp, 1), l->mesh.tp = dt__plan_or(l->mesh.tp, 1);
    l->mesh.cp = dt__plan_or(l->mesh.cp, 1), l->mesh.pp = dt__plan_or(l->mesh.pp, 1);
    l->mesh.ep = dt__plan_or(l->mesh.ep, 1);
    l->micro_batch = dt__plan_or(l->micro_batch, 1), l->accum = dt__plan_or(l->accum, 1);
    if (l->schedule < DT_SCHEDULE_INTERLEAVED || l->schedule == DT_SCHEDULE_ZB) l->chunks = 1;
    if (l->schedule >= DT_SCHEDULE_ZBV) l->chunks = 2;
    l->chunks = dt__plan_or(l->chunks, 2);
    const int sizes[] = { m->layers, m->width, m->heads, m->kv_heads, m->ffn, m->vocab, m->seq,
        m->top_k, m->moe_every, l->mesh.dp, l->mesh.tp, l->mesh.cp, l->mesh.pp, l->mesh.ep,
        l->micro_batch, l->accum, l->chunks };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] < 1) return 0;
    if (m->experts < 0 || l->zero < 0 || l->zero > 3 || l->shard_group < 0) return 0;
    if (l->schedule < 0 || l->schedule >= DT_SCHEDULES || l->mesh.pp > DT__PLAN_STAGES) return 0;
    if (l->recompute < 0 || l->recompute > DT_RECOMPUTE_FULL) return 0;
    p->dp = l->mesh.dp, p->tp = l->mesh.tp, p->cp = l->mesh.cp;
    p->pp = l->mesh.pp, p->ep = l->mesh.ep;
    p->micros = l->accum;
    p->nodes = fmax(1, p->dp * p->tp * p->cp * p->pp * p->ep / p->q->node);
    p->tokens = (double)l->micro_batch * m->seq / p->cp;
    p->kv = (double)m->width * m->kv_heads / m->heads;
    p->moe = m->experts ? floor((double)m->layers / m->moe_every) / m->layers : 0;
    return 1;
}

/* Parameters: of a layer's attention and norms, and of one MLP or expert. GPT-2's have biases. */
static double dt__plan_attention_params(const dt__plan *p) {
    double h = p->m.width, bias = p->m.gated ? 0 : 2 * h + 2 * p->kv;
    return h * (2 * h + 2 * p->kv) + bias + (p->m.gated ? 2 : 4) * h;
}
static double dt__plan_mlp_params(const dt__plan *p) {
    double h = p->m.width, f = p->m.ffn;
    return p->m.gated ? 3 * h * f : 2 * h * f + f + h;
}

static void dt__plan_params(dt__plan *p, dt_plan_cost *c) {
    const dt_plan_model *m = &p->m;
    double h = m->width, vh = m->vocab * h, mlp = dt__plan_mlp_params(p);
    double dense = dt__plan_attention_params(p) + (1 - p->moe) * mlp + p->moe * m->experts * h;
    double experts = p->moe * m->experts * mlp;
    double ends = (m->gated ? h : 2 * h + m->seq * h) + (m->tied ? 1 : 2) * vh;
    c->parameters = m->layers * (dense + experts) + ends;
    p->dense_params = dense / p->tp;
    p->expert_params = experts / p->tp / p->ep;
    p->embedding = vh / p->tp;
    double active = 2 * h * h + 2 * h * p->kv;
    active += (m->gated ? 3 : 2) * h * m->ffn * (1 - p->moe + p->moe * m->top_k);
    /* the model's FLOPs per token, until dt_plan_estimate knows the seconds */
    c->mfu = 6 * (m->layers * active + vh) + 12.0 * m->layers * h * m->seq;
}

/* Layers of each stage. nanotron gives a block to a stage while the cost up to the block before is
   at most the stage's share of the whole, so early stages get more and the last may stay empty. */
static void dt__plan_partition(dt__plan *p) {
    const dt_plan_model *m = &p->m;
    int stages = p->l.mesh.pp, s = 0;
    for (int i = 0; i < stages; i++)
        p->layers[i] = m->layers / stages + (i < m->layers % stages ? 1 : 0);
    p->stages = stages;
    /* rank 0 of a V has the first stage and the last */
    p->head = p->l.schedule >= DT_SCHEDULE_ZBV ? 0 : stages - 1;
    if (p->q->partition == 0 || p->head == 0) return;
    double h = m->width, layer = 4 * h * h + 3 * h * m->ffn;
    double whole = m->layers * layer + m->vocab * h, sum = 0;
    memset(p->layers, 0, (size_t)stages * sizeof(int));
    for (int i = 0; i < m->layers; i++) {
        p->layers[s]++;
        sum += layer;
        if (sum > whole * (s + 1) / stages && s < stages - 1) s++;
    }
    /* the last norm costs nothing, so it may end a stage too */
    if (sum > whole * (s + 1) / stages && s < stages - 1) s++;
    p->head = s;
    p->stages = s + 1;
}

/* max(a, b), rounded where they are close: the host and the GPU hinder each other in turn. */
static double dt__plan_longer(double a, double b) {
    a *= a, b *= b;
    return sqrt(sqrt(a * a + b * b));
}

/* Seconds of a product of this rank's tokens whose share of the columns is `width`. */
static double dt__plan_product(const dt__plan *p, double flops, double width) {
    const dt_plan_profile *q = p->q;
    double n = p->tokens;
    return flops * (1 + q->product_tokens / n) * (1 + q->product_width / width) /
           (q->peak * q->product);
}

/* Seconds of one all-gather or reduce-scatter over tp; an all-reduce is both. */
static double dt__plan_tp(const dt__plan *p, double bytes) {
    const dt_plan_profile *q = p->q;
    if (p->tp == 1) return 0;
    bytes *= (p->tp - 1) / p->tp;
    if (p->tp <= q->node) return bytes / q->tp_near;
    return bytes / q->tp_far + q->tp_far_latency * (p->tp - 1);
}

/* Bytes per second of each rank in a group of `ranks` ranks that lie `stride` ranks apart. `stride`
   such groups share the links of a node. */
static double dt__plan_bandwidth(const dt__plan *p, double ranks, double stride) {
    const dt_plan_profile *q = p->q;
    double span = ranks * stride / q->node;
    if (span <= 1) return q->dp_near;
    return q->dp_far * pow(span, -q->dp_far_decay) / fmin(stride, q->node);
}

/* Traffic of a layer along cp and ep: what ring attention cannot hide behind attention, and the
   all-to-alls of dispatch and combine, in forward and backward. */
static void dt__plan_cp_ep(const dt__plan *p, double attention, double *cp, double *ep) {
    double n = p->tokens, keys = 4 * n * p->kv / p->tp * (p->cp - 1);
    double routed = 2 * n * p->m.width * p->m.top_k * (p->ep - 1) / p->ep / p->tp;
    *cp = *ep = 0;
    if (p->cp > 1) {
        double one = keys / dt__plan_bandwidth(p, p->cp, p->tp);
        *cp = fmax(0, one - attention) + fmax(0, 2 * one - 2.5 * attention);
    }
    if (p->ep > 1) *ep = 4 * p->moe * routed / dt__plan_bandwidth(p, p->ep, p->tp * p->cp);
}

/* Seconds of one layer and of the loss. A backward has two products for each of the forward. */
static void dt__plan_layer(dt__plan *p) {
    const dt_plan_model *m = &p->m;
    const dt_plan_profile *q = p->q;
    double n = p->tokens, h = m->width, tp = p->tp, cp, ep;
    double mlp = (m->gated ? 3 : 2) * h * m->ffn * (1 - p->moe + p->moe * m->top_k);
    double product = dt__plan_product(p, 2 * n * h * (2 * h + 2 * p->kv) / tp, h / tp) +
                     dt__plan_product(p, 2 * n * mlp / tp, m->ffn / tp);
    double attention = 2 * n * m->seq * h / tp / (q->peak * q->attention);
    double scores = p->q->act_scores > 0 ? 3 * q->act_scores * n * m->heads * m->seq / tp : 0;
    double pointwise = (q->layer_traffic * n * h / (p->l.sp ? tp : 1) + scores) / q->hbm;
    double collective = dt__plan_tp(p, 2 * n * h); /* of activations in 2 bytes */
    dt__plan_cp_ep(p, attention, &cp, &ep);
    double forward = product + attention + pointwise, backward = 2 * forward + attention / 2;
    /* forward: two reduce-scatters and two all-gathers; backward: the same, and under sp the inputs
       of the two column-parallel products are gathered again for their weights' gradients */
    double traffic = 4 * collective, back_traffic = (p->l.sp ? 6 : 4) * collective;
    if (p->l.recompute == DT_RECOMPUTE_FULL) backward += forward, back_traffic += traffic;
    if (p->l.recompute == DT_RECOMPUTE_SELECTIVE) backward += attention + scores / q->hbm;
    double gpu = forward + backward + traffic + back_traffic + cp + ep;
    double host = q->host_layer + (tp > 1 ? q->host_tp : 0);
    double both = dt__plan_longer(gpu, host);
    p->steady = 1;
    if (tp > 1 && p->pp > 1 && p->nodes > 1) {
        host += q->host_pp_tp * pow(tp, q->host_pp_power);
        p->steady = dt__plan_longer(gpu, host) / both;
    }
    p->forward = (forward + traffic + (cp + ep) / 2) * both / gpu;
    p->backward = both - p->forward;
    p->tp_share = (traffic + back_traffic) / gpu;
    p->cp_share = cp / gpu, p->ep_share = ep / gpu;
    double logits = n * m->vocab / tp;
    double loss =
        q->logit_traffic * logits / q->hbm + q->host_head_tp * (tp > 1 ? tp * tp / 16 : 0);
    double head = 2 * logits * h * (1 + q->product_tokens / n) / (q->peak * q->product);
    p->head_forward = head + loss / 2 + collective;
    p->head_backward = 2 * head + loss / 2 + 2 * collective;
    p->head_tp = 3 * collective;
}

/* Micro-batches' worth of activations that a stage keeps; the table of section 6. */
static double dt__plan_in_flight(const dt__plan *p, int stage, int stages) {
    double m = p->micros, v = p->l.chunks, w = 2 * (stages - stage - 1) + (v - 1) * stages + 1;
    switch (p->l.schedule) {
    case DT_SCHEDULE_NAIVE: return 1;
    case DT_SCHEDULE_AFAB: return m;
    case DT_SCHEDULE_INTERLEAVED: return fmin(w, v * m) / v;
    case DT_SCHEDULE_ZB: return fmin(stages, m);
    case DT_SCHEDULE_ZBV: return fmin(2 * stages, 2 * m) / 2;
    case DT_SCHEDULE_DUALPIPE_V: return fmin(2 * stages + 1, 2 * m) / 2;
    default: return fmin(stages - stage, m);
    }
}

/* Bubble as a share of the other stages' time for one micro-batch; the table of section 6. */
static double dt__plan_bubble(const dt__plan *p) {
    switch (p->l.schedule) {
    case DT_SCHEDULE_NAIVE: return p->micros;
    case DT_SCHEDULE_INTERLEAVED: return 1.0 / p->l.chunks;
    case DT_SCHEDULE_ZB: return 1.0 / 3;
    case DT_SCHEDULE_ZBV:
    case DT_SCHEDULE_DUALPIPE_V: return 1.0 / 6;
    default: return 1;
    }
}

/* Bytes of a stage by class; keeps those of the stage that needs most. */
static void dt__plan_memory(
    const dt__plan *p, int stage, double dense, double experts, dt_plan_cost *c) {
    const dt_plan_profile *q = p->q;
    int zero = p->l.zero;
    double n = p->tokens, h = p->m.width, tp = p->tp, sp = p->l.sp ? tp : 1;
    double group = p->l.shard_group ? p->l.shard_group : p->dp * p->cp * p->ep;
    double expert_group = p->l.shard_group ? fmin(group, p->dp * p->cp) : p->dp * p->cp;
    double all = dense + experts, shard = dense / group + experts / expert_group;
    double ffn = p->m.ffn * (1 - p->moe + p->moe * p->m.top_k);
    double layer = n * (q->act_width * h / tp + q->act_ffn * ffn / tp + q->act_shared * h / sp);
    double scores = n * q->act_scores * p->m.heads * p->m.seq / tp, input = 2 * n * h / sp;
    double in_flight = dt__plan_in_flight(p, stage, p->stages), layers = p->layers[stage];
    double acts = in_flight * layers * (layer + scores);
    if (p->l.recompute == DT_RECOMPUTE_SELECTIVE) acts = in_flight * layers * layer + scores;
    if (p->l.recompute == DT_RECOMPUTE_FULL) acts = in_flight * layers * input + layer + scores;
    if (stage == 0) acts += in_flight * input;
    if (tp > 1) acts += q->act_gathered * n * h;
    double logits = stage == p->head ? n * p->m.vocab / tp : 0;
    if (q->logit_count > 0) logits = fmin(logits, q->logit_count);
    dt_plan_cost now = { .params = q->param_bytes * (zero >= 3 ? shard : all),
        .grads = q->grad_bytes * (zero >= 2 ? shard : all),
        .optim = q->optim_bytes * (zero >= 1 ? shard : all),
        .acts = acts,
        .logits = logits * q->logit_bytes,
        .base = q->base_bytes };
    double bytes = now.params + now.grads + now.optim + acts + now.logits + now.base;
    /* without a pipeline the host runs ahead of the GPU, and so do its allocations */
    double ahead = tp > 1 && p->pp == 1 ? q->act_ahead * n * h : 0;
    double total = fmax(bytes, fmin(bytes + ahead, q->memory));
    if (total <= c->bytes) return;
    c->bytes = total;
    c->params = now.params, c->grads = now.grads, c->optim = now.optim;
    c->acts = acts + (total - bytes), c->logits = now.logits, c->base = now.base;
}

/* Exposed traffic of parameters and gradients over the replicas, and the update: `big` parameters
   on the fullest rank, `layers` layers of it. A part of the busiest stage's backward, which is two
   thirds of its `micro` seconds per micro-batch, hides gradients; under ZeRO-3 all of them hide. */
static void dt__plan_replicas(
    const dt__plan *p, double big, double layers, double micro, dt_plan_cost *c) {
    const dt_plan_profile *q = p->q;
    const int sharded = p->l.zero > 0;
    double replicas = p->dp * p->cp * p->ep;
    double group = p->l.shard_group ? p->l.shard_group : replicas;
    double bandwidth = dt__plan_bandwidth(p, replicas, p->tp), one_way = bandwidth * q->dp_one_way;
    double part = big * (replicas - 1) / replicas, hidden = q->dp_overlap * micro * 2 / 3;
    double traffic =
        sharded ? q->reduce_bytes * part / one_way : 2 * q->reduce_bytes * part / bandwidth;
    double gather = q->param_bytes * part / one_way + q->gather_latency * log2(replicas) * layers;
    if (replicas > 1) {
        /* ZeRO 2 and 3 reduce each micro-batch; ZeRO-3 gathers before each forward and backward */
        double times = p->l.zero >= 2 ? p->micros : 1;
        if (p->l.zero == 3) traffic += 2 * gather, hidden *= 1.5;
        double rest = (traffic - hidden) / 2e-3; /* rounded over 2 ms */
        c->dp = times * 2e-3 * (rest > 30 ? rest : log1p(exp(rest)));
        if (p->l.zero == 1 || p->l.zero == 2) c->dp += gather;
    }
    /* the norm of the gradients reads them twice */
    double moved = q->optimizer_traffic * big / (sharded ? group : 1) + 8 * big;
    c->optimizer = q->optimizer_layer * layers + moved / q->hbm + q->host_step;
}

dt_status dt_plan_estimate(const dt_plan_model *model, const dt_layout *layout,
    const dt_plan_profile *profile, dt_plan_cost *cost) {
    dt__plan plan, *p = &plan;
    if (!cost) return DT_ERR_ARG;
    memset(cost, 0, sizeof *cost);
    if (!model || !layout || !profile) return DT_ERR_ARG;
    plan.m = *model, plan.l = *layout, plan.q = profile;
    if (!dt__plan_begin(p)) return DT_ERR_ARG;
    dt__plan_params(p, cost);
    dt__plan_partition(p);
    dt__plan_layer(p);
    const dt_plan_profile *q = profile;
    int stages = p->stages;
    double layer = p->forward + p->backward, head = p->head_forward + p->head_backward;
    double sum = 0, slowest = 0, longest = 0, busy_layers = 0, busy_head = 0, big = 0, most = 0;
    for (int s = 0; s < stages; s++) {
        int last = s == p->head, twice = last && !(s == 0 && p->m.tied);
        double n = p->layers[s];
        double dense = n * p->dense_params + ((s == 0) + twice) * p->embedding;
        double params = dense + n * p->expert_params;
        /* adding a micro-batch's gradient moves 10 bytes a parameter: 2 + 4 read, 4 written */
        double t = n * layer + last * head + 10 * params / q->hbm;
        double full = t + n * layer * (p->steady - 1);
        if (full > slowest) slowest = full, busy_layers = n, busy_head = last;
        sum += t;
        longest = fmax(longest, t), big = fmax(big, params), most = fmax(most, n);
        if (p->layers[s] == 0) cost->stages_without_layers++;
        dt__plan_memory(p, s, dense, n * p->expert_params, cost);
    }
    cost->stages_without_layers += p->l.mesh.pp - stages;
    double n = p->tokens, edge = 2 * n * p->m.width / p->tp / q->pp_link + q->pp_latency;
    double wait = 1 + q->jitter * log2(p->nodes), layers = busy_layers * p->steady * layer;
    double ring = p->micros * wait;
    cost->bubble = dt__plan_bubble(p) * (sum - longest) * wait;
    cost->tp = ring * (layers * p->tp_share + busy_head * p->head_tp);
    cost->cp = ring * layers * p->cp_share;
    cost->ep = ring * layers * p->ep_share;
    cost->compute = ring * slowest - cost->tp - cost->cp - cost->ep;
    if (stages > 1) {
        cost->pp = wait * edge * 2 * ((p->micros - 1) * p->l.chunks + stages - 1);
        if (p->m.tied && p->head > 0)
            cost->pp += 8 * p->embedding / q->pp_link; /* tied sum: fp32, both ways */
    }
    dt__plan_replicas(p, big, most, slowest, cost);
    cost->seconds = cost->compute + cost->bubble + cost->tp + cost->cp + cost->ep + cost->pp +
                    cost->dp + cost->optimizer;
    double tokens = p->dp * p->ep * p->micros * p->l.micro_batch * p->m.seq;
    cost->tokens_per_s_gpu = tokens / cost->seconds / (p->dp * p->tp * p->cp * p->pp * p->ep);
    cost->mfu *= cost->tokens_per_s_gpu / q->peak;
    return DT_OK;
}

/* ---- the search ---- */

static const char *dt__plan_limit(const dt_plan_cost *c) {
    static const char *const names[] = { "bubble", "tp", "cp", "ep", "pp", "dp", "optimizer" };
    const double parts[] = { c->bubble, c->tp, c->cp, c->ep, c->pp, c->dp, c->optimizer };
    int largest = 0;
    for (int i = 1; i < 7; i++)
        if (parts[i] > parts[largest]) largest = i;
    return parts[largest] >= 0.2 * c->seconds ? names[largest] : "compute";
}

static double dt__plan_limit_bytes(const dt_plan_desc *d) {
    return d->memory > 0 ? d->memory : d->profile->memory;
}

/* A list of the fastest rows, the fastest first. */
typedef struct dt__plan_list {
    dt_plan_row *rows;
    int n, max;
} dt__plan_list;

/* The order of the rows: by time, but of two that differ by less than a thousandth for each axis
   the one with fewer axes comes first. */
static double dt__plan_order(const dt_plan_row *row) {
    const dt_mesh_desc *m = &row->layout.mesh;
    int axes = (m->tp > 1) + 2 * (m->cp > 1) + (m->pp > 1) + (m->ep > 1);
    return row->cost.seconds *
           (1 + 1e-3 * axes + 1e-4 * (row->layout.zero + row->layout.recompute));
}

static void dt__plan_insert(dt__plan_list *list, const dt_plan_row *row) {
    int at = list->n < list->max ? list->n++ : list->max;
    double order = dt__plan_order(row);
    while (at > 0 && order < dt__plan_order(&list->rows[at - 1])) at--;
    if (at >= list->max) return;
    memmove(&list->rows[at + 1], &list->rows[at],
        (size_t)(list->n - 1 - at > 0 ? list->n - 1 - at : 0) * sizeof *row);
    list->rows[at] = *row;
}

typedef struct dt__plan_hunt {
    const dt_plan_desc *d;
    dt__plan_list fits, too_big;
    dt_plan_row smallest; /* the layout that needs least memory, if tried > 0 */
    int64_t tried;
} dt__plan_hunt;

/* Returns 1 and fills in the row if the layout is possible. */
static int dt__plan_row_of(const dt_plan_desc *d, const dt_layout *layout, dt_plan_row *row) {
    if (d->refuses && d->refuses(layout, d->user)) return 0;
    row->layout = *layout;
    if (dt_plan_estimate(d->model, layout, d->profile, &row->cost) != DT_OK) return 0;
    if (row->cost.stages_without_layers) return 0;
    row->bytes = row->cost.bytes;
    row->limited_by = dt__plan_limit(&row->cost);
    return 1;
}

/* Compares the layouts of one mesh and micro-batch. */
static void dt__plan_try_mesh(dt__plan_hunt *h, dt_layout l) {
    static const struct {
        int schedule, chunks;
    } kinds[] = { { DT_SCHEDULE_1F1B, 1 }, { DT_SCHEDULE_INTERLEAVED, 2 },
        { DT_SCHEDULE_INTERLEAVED, 4 }, { DT_SCHEDULE_ZB, 1 }, { DT_SCHEDULE_ZBV, 2 } };
    const dt_mesh_desc *m = &l.mesh;
    int replicas = m->dp * m->cp * m->ep, n_kinds = m->pp > 1 ? 5 : 1;
    for (int k = 0; k < n_kinds; k++) {
        l.schedule = kinds[k].schedule, l.chunks = kinds[k].chunks;
        if (l.chunks > 1 && h->d->model->layers < m->pp * l.chunks) continue;
        if (l.schedule == DT_SCHEDULE_INTERLEAVED && l.accum % m->pp != 0) continue;
        if (l.schedule > DT_SCHEDULE_INTERLEAVED && l.accum < m->pp) continue;
        for (l.zero = 0; l.zero <= (replicas > 1 ? 3 : 0); l.zero++)
            for (l.recompute = 0; l.recompute <= DT_RECOMPUTE_FULL; l.recompute++) {
                dt_plan_row row;
                if (!dt__plan_row_of(h->d, &l, &row)) continue;
                if (h->tried++ == 0 || row.bytes < h->smallest.bytes) h->smallest = row;
                int fits = row.bytes <= dt__plan_limit_bytes(h->d);
                dt__plan_insert(fits ? &h->fits : &h->too_big, &row);
            }
    }
}

/* Returns 1 if the sizes of the model divide by those of the mesh. */
static int dt__plan_divides(const dt_plan_model *m, const dt_mesh_desc *mesh) {
    int kv = m->kv_heads ? m->kv_heads : m->heads, experts = m->experts ? m->experts : 1;
    int64_t part = (int64_t)mesh->tp * (mesh->cp > 1 ? 2 * mesh->cp : 1);
    return m->heads % mesh->tp == 0 && (kv % mesh->tp == 0 || mesh->tp % kv == 0) &&
           m->seq % part == 0 && experts % mesh->ep == 0 && mesh->pp <= m->layers;
}

static void dt__plan_try_batches(dt__plan_hunt *h, dt_layout l) {
    int replicas = l.mesh.dp * l.mesh.ep, each = h->d->batch / replicas;
    if (h->d->batch % replicas != 0) return;
    l.sp = l.mesh.tp > 1;
    for (l.micro_batch = 1; l.micro_batch <= each; l.micro_batch++) {
        if (each % l.micro_batch != 0) continue;
        if (l.mesh.cp > 1 && l.micro_batch > 1) break; /* dp divides whole sequences for less */
        l.accum = each / l.micro_batch;
        dt__plan_try_mesh(h, l);
    }
}

/* Calls dt__plan_try_batches for every mesh of `left` GPUs whose axes from `axis` on are free: tp,
   cp, pp, ep; dp takes the rest. */
static void dt__plan_try_axes(dt__plan_hunt *h, dt_layout l, int axis, int left) {
    int *const sizes[] = { &l.mesh.tp, &l.mesh.cp, &l.mesh.pp, &l.mesh.ep };
    if (axis == 4) {
        l.mesh.dp = left;
        if (dt__plan_divides(h->d->model, &l.mesh)) dt__plan_try_batches(h, l);
        return;
    }
    for (int n = 1; n <= left; n++) {
        if (left % n != 0) continue;
        *sizes[axis] = n;
        dt__plan_try_axes(h, l, axis + 1, left / n);
    }
}

/* Replaces the estimated bytes of the fastest rows by the program's own, and keeps the first `max`
   that fit. */
static int dt__plan_measure(
    const dt_plan_desc *d, dt__plan_list *list, dt_plan_row *rows, int max) {
    int n = 0;
    for (int i = 0; i < list->n && n < max; i++) {
        dt_plan_row row = list->rows[i];
        if (d->bytes) row.bytes = d->bytes(&row.layout, d->user);
        if (row.bytes >= 0 && row.bytes <= dt__plan_limit_bytes(d)) rows[n++] = row;
    }
    return n;
}

dt_status dt_plan_search(dt_plan_desc d, dt_plan_row *rows, int max, dt_plan_row *too_big,
    int max_too_big, dt_plan_found *found) {
    enum { SPARE = 8 }; /* candidates for each row: some need more memory than estimated */
    dt_layout l;
    dt_plan_cost cost;
    memset(&l, 0, sizeof l);
    if (!found) return DT_ERR_ARG;
    memset(found, 0, sizeof *found);
    if (!d.model || !d.profile || d.gpus < 1 || d.batch < 1 || max < 0 || max_too_big < 0 ||
        dt_plan_estimate(d.model, &l, d.profile, &cost) != DT_OK)
        return DT_ERR_ARG;
    size_t n = (size_t)max * SPARE + (size_t)max_too_big + 1;
    const dt_host *host = dt_host_default();
    dt_plan_row *memory = (dt_plan_row *)host->alloc(host->user, n * sizeof *memory, DT_MEM_HOST);
    if (!memory) return DT_ERR_MEM;
    dt__plan_hunt h;
    memset(&h, 0, sizeof h);
    h.d = &d;
    h.fits.rows = memory, h.fits.max = max * SPARE;
    h.too_big.rows = memory + (size_t)max * SPARE, h.too_big.max = max_too_big;
    dt__plan_try_axes(&h, l, 0, d.gpus);
    found->tried = h.tried;
    found->rows = dt__plan_measure(&d, &h.fits, rows, max);
    double best = found->rows ? rows[0].cost.seconds : HUGE_VAL;
    if (!found->rows && h.tried > 0 && max_too_big > 0) too_big[found->too_big++] = h.smallest;
    for (int i = 0; i < h.too_big.n && found->too_big < max_too_big; i++)
        if (h.too_big.rows[i].cost.seconds < best) too_big[found->too_big++] = h.too_big.rows[i];
    host->free(host->user, memory, n * sizeof *memory, DT_MEM_HOST);
    return DT_OK;
}

int dt_plan_would_fit(dt_plan_desc d, const dt_layout *layout, dt_plan_row *fits) {
    if (!layout || !fits || !d.model || !d.profile) return 0;
    int replicas = layout->mesh.dp * layout->mesh.cp * layout->mesh.ep, found = 0;
    dt_layout l = *layout;
    for (int small = 0; small < 2; small++) {
        if (small) l.accum *= l.micro_batch, l.micro_batch = 1;
        for (l.zero = layout->zero; l.zero <= (replicas > 1 ? 3 : layout->zero); l.zero++)
            for (l.recompute = layout->recompute; l.recompute <= DT_RECOMPUTE_FULL; l.recompute++) {
                dt_plan_row row;
                if (!dt__plan_row_of(&d, &l, &row) || row.bytes > dt__plan_limit_bytes(&d))
                    continue;
                if (!found || row.cost.seconds < fits->cost.seconds) *fits = row;
                found = 1;
            }
    }
    return found;
}

static const dt_plan_profile dt__plan_profiles[] = {
    /* nanotron on nodes of 8 H100 that 8 x 400 Gbit/s join: fitted by tests/plan/fit.py */
    { .name = "h100-nanotron",
        .peak = 9.89e14,
        .hbm = 3e12,
        .memory = 7.731e10,
        .node = 8,
        .product = 0.6603,
        .product_tokens = 332.7,
        .product_width = 124,
        .attention = 0.3162,
        .layer_traffic = 94.77,
        .logit_traffic = 39.16,
        .host_layer = 0.00213,
        .host_tp = 0.001721,
        .host_head_tp = 0.001016,
        .host_pp_tp = 0.001167,
        .host_pp_power = 1.294,
        .host_step = 0.02497,
        .jitter = 0.02033,
        .tp_near = 5.194e11,
        .tp_far = 3.173e11,
        .tp_far_latency = 3.518e-5,
        .dp_near = 2.702e11,
        .dp_far = 6.154e11,
        .dp_far_decay = 0.2902,
        .dp_one_way = 0.7,
        .dp_overlap = 0.5609,
        .reduce_bytes = 4,
        .gather_latency = 0.0008337,
        .pp_link = 4.711e10,
        .pp_latency = 0.000616,
        .optimizer_layer = 0.001357,
        .optimizer_traffic = 81.98,
        .param_bytes = 2,
        .grad_bytes = 6,
        .optim_bytes = 12,
        .act_width = 26.51,
        .act_ffn = 7.676,
        .act_gathered = 2.429,
        .act_ahead = 105.5,
        .logit_bytes = 6.693,
        .base_bytes = 2.101e8,
        .partition = 1 },
    /* Megatron-LM on Selene's nodes of 8 A100 with 80 GB, fp16, without FlashAttention: four
       numbers are fitted to the published rows of arXiv:2104.04473 and arXiv:2205.05198 by
       tests/plan/fit_a100.py */
    { .name = "a100-megatron",
        .peak = 3.12e14,
        .hbm = 2e12,
        .memory = 8.16e10,
        .node = 8,
        .product = 0.8849,
        .product_width = 150,
        .attention = 0.3,
        .layer_traffic = 37.81,
        .logit_traffic = 20,
        .jitter = 0.01155,
        .tp_near = 2.528e11,
        .tp_far = 1.6e11,
        .tp_far_latency = 3e-5,
        .dp_near = 2.3e11,
        .dp_far = 1.6e11,
        .dp_far_decay = 0.1,
        .dp_one_way = 0.9,
        .reduce_bytes = 2,
        .pp_link = 2e10,
        .pp_latency = 2e-5,
        .optimizer_traffic = 40,
        .param_bytes = 2,
        .grad_bytes = 4,
        .optim_bytes = 12,
        .act_width = 8,
        .act_ffn = 4,
        .act_shared = 10,
        .act_scores = 5,
        .logit_bytes = 6,
        .base_bytes = 1e9 },
};

const dt_plan_profile *dt_plan_profiles(int *n) {
    if (n) *n = (int)(sizeof dt__plan_profiles / sizeof *dt__plan_profiles);
    return dt__plan_profiles;
}

const dt_plan_profile *dt_plan_profile_of(const char *name) {
    int n;
    const dt_plan_profile *profiles = dt_plan_profiles(&n);
    for (int i = 0; name && i < n; i++)
        if (!strcmp(profiles[i].name, name)) return profiles + i;
    return NULL;
}

#ifdef __cplusplus
}
#endif

DT__COLD_END
DT__CPP_WARNINGS_ON
#endif /* DT_PARALLEL_IMPL */

/* HISTORY
     0.2.0   the field's names for: dt_axis_place -> dt_axis_placement, dt_context* -> dt_cp*,
             dt_mesh_sizes -> dt_mesh_resolve, dt_order* -> dt_data_order* (before -> consumed),
             dt_batch_ramp_before -> dt_batch_ramp_consumed, dt_pipe_spans -> dt_pipe_gather_spans,
             dt_route_balance -> dt_route_update_bias, dt_sampler_where -> dt_sampler_tell,
             dt_schedule_facts -> dt_schedule_metrics, dt_schedule_first -> dt_schedule_offset,
             dt_schedule_group -> dt_schedule_micro_group, dt_schedule_idle ->
             dt_schedule_bubble_of, dt_schedule_live -> dt_schedule_max_in_flight, dt_stage_cut ->
             dt_partition_stages, dt_stage_fn -> dt_stage_map_fn, dt_text_limit ->
             dt_text_token_limit, dt_tokens -> dt_count_labels. New: dt_all_to_all_rows,
             dt_row_linear_at (LoRA), dt_cp_attention_at, sigmoid and group-limited routing, ZB-V
             and DualPipe-V, dt_schedule_read, dt_schedule_write, the planner's prediction
     0.1.0   the mesh, placements, layers of tensor, context and expert parallelism, schedules and
             pipelines, the data order, the sampler, text and token shards

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
