/* dt_parallel.h - v0.1.0 - layouts: the mesh of ranks, placements of tensors, the order of data -
   public domain or MIT, see the end of the file

   The third of four single-header libraries; dt_tensor.h names them all. It arranges ranks along
   the axes of a layout (data, tensor, context, pipeline, expert), moves a tensor from one placement
   over a group to another with the right backward, has the layers of tensor, sequence, context and
   expert parallelism, makes, checks, simulates, draws and runs schedules of pipelines, and says
   which rank reads which sequence.

   DOES NOT: reduce gradients of parameters (dt_zero.h does, for all axes at once), know any model.

   QUICK EXAMPLE (a tensor-parallel product over 2 of 4 ranks)

       #define DT_IMPLEMENTATION
       #include "dt_parallel.h"
       #include <stdio.h>

       static dt_status train(dt_ctx *ctx, void *user) {
           dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2 });         // 4 ranks = dp 2 x
                                                                                tp 2
           dt_tensor *w1 = dt_param_at(ctx, "w1", DT_SHAPE(8, 4), DT_NORMAL(0.1), // this rank holds
           4 of 8 rows
               (dt_param_desc){ .shards = { { mesh.tp, 0 } } });
           dt_tensor *w2 = dt_param_at(ctx, "w2", DT_SHAPE(1, 8), DT_NORMAL(0.1), // and 4 of 8
           columns
               (dt_param_desc){ .shards = { { mesh.tp, 1 } } });
           float one[4] = { 1, 2, 3, 4 };
           dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(1, 4), one);
           dt_linear_desc gelu = { .activation = DT_ACT_GELU };
           dt_tensor *h = dt_column_linear(x, w1, NULL, gelu, mesh.tp, DT_REPLICATE);   // (1,4) of
                                                                                        (1,8)
           dt_tensor *y = dt_row_linear(h, w2, NULL, NULL, mesh.tp, DT_REPLICATE);      // summed
                                                                                        over tp:
                                                                                        (1,1)
           double value = dt_item(y);
           if (dt_ctx_rank(ctx) == 0) printf("%g\n", value);
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
     1. Mesh
     2. Placements
     3. Tensor and sequence parallelism
     4. Context parallelism
     5. Expert parallelism
     6. Schedules
     7. Pipeline parallelism
     8. Order of data
     9. Text
    10. Dry runs
    11. Implementation: mesh
    12. Placements: code
    13. Tensor and sequence parallelism: code
    14. Context parallelism: code
    15. Expert parallelism: code
    16. Schedules: code
    17. Pipeline parallelism: code
    18. Order of data and text: code
    19. Dry runs: code

   CONTRACT
     Memory     A mesh is a value; its groups belong to the world. Tensors live until dt_reset as
                those of ops do. A dt_text is freed by dt_text_close, a dt_sampler by
                dt_sampler_free, a dt_schedule by dt_schedule_free; what is left, with the context.
     Errors     As in dt_tensor.h: sticky, NULL in gives NULL out.
     Threads    As in dt_comm.h.
     Order      Sums over a group run in rank order.
     Groups     A group of one is NULL, the identity, and free.
     Tags       [local], [pairwise], [collective: group]. */

#ifndef DT_PARALLEL_H
#define DT_PARALLEL_H

#include "dt_comm.h"

#if DT_VERSION != 100
#error \
    "dt_parallel.h 0.1.0 needs dt_tensor.h and dt_comm.h 0.1.0: copy all headers from one release"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ==== 1. Mesh ===================================================================================

/* Ranks of each axis. Their product is the number of ranks. */
typedef struct dt_mesh_desc {
    int dp; /* data: 0 -> what the others leave */
    int tp; /* tensor: 0 -> 1, as all below */
    int cp; /* context */
    int pp; /* pipeline */
    int ep; /* expert */
} dt_mesh_desc;

/* This rank's groups; NULL is a group of one. rank = (((pp*DP + dp)*EP + ep)*CP + cp)*TP + tp. */
typedef struct dt_mesh {
    dt_comm *world, *dp, *tp, *cp, *pp, *ep;
    /* dp x ep x cp: the copies of a dense parameter, each with a part of the data */
    dt_comm *data;
    /* dp x cp: those of a parameter that is cut over ep, as experts are */
    dt_comm *experts;
    dt_mesh_desc sizes;    /* resolved */
    dt_mesh_desc at;       /* this rank's coordinates */
    int replica, replicas; /* dp_rank*EP + ep_rank of R = DP*EP: the batch is cut over these */
} dt_mesh;

/* [local] Resolves zeros and checks the product. On failure DT_ERR_ARG and a text with the numbers
   and a legal choice; needs no context, so a program can refuse a layout before any rank starts. */
DT_API dt_status dt_mesh_sizes(dt_mesh_desc *sizes, int ranks, char *text, size_t text_bytes);
/* [collective: world] The groups of every axis, named "dp", "tp", ... with their byte counters.
   After a failure all groups are NULL and there is one replica. */
DT_API dt_mesh dt_mesh_make(dt_ctx *ctx, dt_mesh_desc desc);

// ==== 2. Placements =============================================================================

/* How a tensor lies over a group of N ranks.
       REPLICATE   every rank has the whole value, and the whole gradient
       COPY        every rank has the whole value; each rank's gradient is a part of the sum
       SHARD(dim)  rank r has part r of N equal parts along dim
       PARTIAL     the value is the sum over the ranks, not yet taken; every rank has the whole
                   gradient
   The gradient of a COPY tensor is PARTIAL and that of a PARTIAL tensor is COPY; the others are
   their own. */
enum { DT_PLACEMENT_REPLICATE = 0, DT_PLACEMENT_COPY, DT_PLACEMENT_SHARD, DT_PLACEMENT_PARTIAL };
typedef struct dt_placement {
    int kind, dim;
} dt_placement;
#define DT_REPLICATE ((dt_placement){ DT_PLACEMENT_REPLICATE, 0 })
#define DT_COPY ((dt_placement){ DT_PLACEMENT_COPY, 0 })
#define DT_PARTIAL ((dt_placement){ DT_PLACEMENT_PARTIAL, 0 })
#define DT_SHARD(dim) ((dt_placement){ DT_PLACEMENT_SHARD, (dim) })

/* [collective: comm] x from one placement to another. Over a group of one, and for from equal to
   to, x itself.

       from -> to              forward            backward            known as
       PARTIAL -> REPLICATE    all-reduce         identity            Megatron's g
       REPLICATE -> COPY       identity           all-reduce          Megatron's f
       SHARD -> COPY           all-gather         reduce-scatter      sequence parallelism's g, all-gather of keys
       PARTIAL -> SHARD        reduce-scatter     all-gather          sequence parallelism's g*
       SHARD -> REPLICATE      all-gather         slice
       REPLICATE -> SHARD      slice              all-gather
       SHARD a -> SHARD b      all-to-all         all-to-all          Ulysses
       REPLICATE -> PARTIAL    rank 0 keeps it    identity
       COPY -> REPLICATE       identity           rank 0 keeps it

   The backward of a -> b is the row dual(b) -> dual(a) of this same table. Fails with DT_ERR_SHAPE
   where N does not divide a dimension and DT_ERR_UNSUPPORTED where there is no row. Megatron:
   arXiv:1909.08053, arXiv:2205.05198; Ulysses: arXiv:2309.14509. */
DT_API dt_tensor *dt_redistribute(dt_tensor *x, dt_comm *comm, dt_placement from, dt_placement to);

// ==== 3. Tensor and sequence parallelism ========================================================

/* Layers over a group of T ranks, of which each holds a part of every matrix: M. Shoeybi et al.,
   "Megatron-LM", arXiv:1909.08053. Between dt_tp_enter and dt_row_linear lies a region in which
   activations are cut like the weights; `outside` says how they lie elsewhere:

       DT_REPLICATE    every rank has all tokens: an all-reduce where a region ends, and one in the
                       backward where it begins
       DT_SHARD(1)     (B,T,C) is cut along the tokens: sequence parallelism, V. Korthikanti et al.,
                       arXiv:2205.05198. Where a region begins tokens are gathered, where it ends
                       sums are scattered: the same bytes, and norms, dropout and residuals keep 1/T
                       of the tokens. What was gathered is not kept but gathered again in the
                       backward, if this happens in a dt_block: in each half of a backward in
                       halves.

   Weights are cut by dt_param_desc.shards: of a column-parallel layer along its outputs (O,I) ->
   dimension 0, its bias too; of a row-parallel one along its inputs, dimension 1, its bias not at
   all. A hidden size that T does not divide leaves zeros in the last ranks' boxes, which stay zero
   through functions with f(0) = 0. Under DT_SHARD(1) parameters that are used outside and not cut
   (norms, biases of rows, positions) saw a part of the tokens: mark them { tp, DT_GRAD_PARTIAL }. All of
   these are [collective: comm], and over a group of one the plain layer. */

/* [collective: comm] x, as it lies outside, whole on every rank: for one or more products with cut
   weights. */
DT_API dt_tensor *dt_tp_enter(dt_tensor *x, dt_comm *comm, dt_placement outside);
/* [collective: comm] act(x w^T + b) with w (O..,I) and b cut along O, or act of a part of it:
   dt_tp_enter and dt_linear_at. residual and result lie inside. */
DT_API dt_tensor *dt_column_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc,
    dt_comm *comm, dt_placement outside);
/* [collective: comm] x w^T summed over the group, + b + residual, once: x (..,I) and w (O,I) cut
   along I. b (may be NULL) is whole on every rank; residual (may be NULL) and the result lie
   outside. */
DT_API dt_tensor *dt_row_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_tensor *residual,
    dt_comm *comm, dt_placement outside);
/* [collective: comm] Rows of a parameter (V,C) cut along V: ids (B,T), all of them on every rank ->
   outside. */
DT_API dt_tensor *dt_vocab_embedding(
    dt_tensor *table, dt_tensor *ids, dt_comm *comm, dt_placement outside);
/* [collective: comm] dt_cross_entropy_at of logits (..,V') of which each rank has V' columns in
   rank order. Two numbers a row are gathered, never logits: 16 (T-1) bytes of each row are sent.
   desc.vocab: all columns that count, 0 -> T V'. labels on every rank; the loss is the same on
   every rank. */
DT_API dt_tensor *dt_vocab_cross_entropy(
    dt_tensor *logits, dt_tensor *labels, double denominator, dt_loss_desc desc, dt_comm *comm);
/* [collective: comm] The same of logits x w^T, a few rows at a time; x lies outside, w (V,C) is cut
   along V; for a parameter desc.vocab 0 -> V of the full one. */
DT_API dt_tensor *dt_vocab_linear_cross_entropy(dt_tensor *x, dt_tensor *w, dt_tensor *labels,
    double denominator, dt_loss_desc desc, dt_comm *comm, dt_placement outside);

/* How heads of keys and values lie over tp: K heads over T ranks, T dividing K or K dividing T.
   With more ranks than heads T/K neighbours hold copies of a head, each for queries of its own:
   cuts { cut, dimension }, and the copies' gradients are parts: marks { copies, DT_GRAD_PARTIAL }. */
typedef struct dt_kv_groups {
    dt_comm *cut;    /* ranks with different heads; NULL: all have the same */
    dt_comm *copies; /* ranks with this rank's heads; NULL: no other has */
    int heads;       /* on this rank */
} dt_kv_groups;
/* [collective: tp] DT_ERR_ARG where neither divides the other. */
DT_API dt_kv_groups dt_kv_split(dt_ctx *ctx, dt_comm *tp, int kv_heads);

/* One axis of a layout: how a tensor lies over a group. */
typedef struct dt_axis_place {
    dt_comm *comm;
    dt_placement place;
} dt_axis_place;
/* [collective: all ranks of the n groups] A tensor that exists on one rank, the one which is rank 0
   in each group, in host memory there (NULL elsewhere), onto all: this rank's part, until dt_reset.
   The groups are axes of a mesh: any two meet in one rank. A dimension may be cut by several, the
   first one first. PARTIAL: rank 0 of the group gets it, the others zeros. DT_ERR_SHAPE where a
   dimension cannot be cut. */
DT_API dt_tensor *dt_distribute(
    dt_ctx *ctx, dt_dtype dtype, dt_shape full, const void *host, const dt_axis_place *axes, int n);

// ==== 4. Context parallelism ====================================================================

/* A sequence of T tokens is cut over c ranks, so each has T/c of them through the whole model; only
   attention needs the others' keys and values. Elements that one rank sends in a layer, and keeps
   for the backward beside its own q, k, v, the result and the log-sum-exp; B sequences, H heads, K
   of keys and values, D numbers each, n = 2 B K D T/c:

       kind         forward                      backward                  keeps
       RING         (c-1) n                      (c-1) n, and (c-1) n of   0
       ZIGZAG       the same                     their gradients (f32+)    0
       ALLGATHER    (c-1) n                      (c-1) n                   c n
       ULYSSES      (c-1)/c B D T/c (2 H + 2 K)  the same                  B D T/c (2 H + 2 K)

   RING: H. Liu et al., arXiv:2310.01889; ZIGZAG is the same, but balanced: see dt_context_token;
   ALLGATHER: H. Touvron et al., arXiv:2407.21783; ULYSSES: S. Jacobs et al., arXiv:2309.14509.

   The ring sends keys and values on while it computes with them; softmax over all keys is put
   together from those of parts by their log-sum-exp. Pairs of parts in which no query sees a key
   cost nothing. ULYSSES exchanges tokens for heads, and keeps q, k, v and the result both ways; c
   must divide H, and K or be a multiple of it. Then heads of keys and values are repeated up to c,
   count as c, and are kept before the exchange too: 2 B D T more, and 2 B T i32. */
enum { DT_CP_RING = 0, DT_CP_ZIGZAG, DT_CP_ALLGATHER, DT_CP_ULYSSES };

/* [local] Which token of the sequence is the i-th of rank r. In order, rank after rank; but under
   ZIGZAG the sequence is 2c pieces, of which rank r has r and 2c-1-r: under a causal mask then all
   ranks have as much to do, where in order the last has 2 - 1/c times the mean. Permute tokens,
   labels (shifted before), positions and documents alike. -1 where there is no such rank or
   token. */
DT_API int64_t dt_context_token(int kind, int64_t T, int c, int r, int64_t i);
/* [local] Whether so many tokens and heads can be cut over c ranks: DT_ERR_ARG and why not, with
   legal choices. */
DT_API dt_status dt_context_check(
    int kind, int64_t T, int c, int64_t heads, int64_t kv_heads, char *text, size_t text_bytes);

typedef struct dt_context_desc {
    int kind;       /* DT_CP_* */
    int64_t batch;  /* B sequences */
    int64_t tokens; /* T of each, over all ranks */
    /* host (B,T), those of all ranks' tokens, rank 0's first: place in its document, for the causal
       mask; NULL: dt_context_token */
    const int32_t *positions;
    const int32_t *documents; /* the same of documents packed into a sequence; NULL: one */
    int full;                 /* 1: no causal mask */
} dt_context_desc;
/* what the attentions of one forward share; lives until dt_reset */
typedef struct dt_context dt_context;
/* [local] Outside of recomputed blocks. comm NULL: plain attention. A ring's messages on comm have
   the tags 1020 to 1023. NULL after a failure. */
DT_API dt_context *dt_context_make(dt_ctx *ctx, dt_comm *comm, dt_context_desc desc);
/* [collective: comm] q (B,T/c,H,D), k, v (B,T/c,K,D) of this rank's tokens -> (B,T/c,H,D): each
   query over the keys of all ranks. */
DT_API dt_tensor *dt_context_attention(
    dt_tensor *q, dt_tensor *k, dt_tensor *v, dt_context *context);
/* [local] This rank's columns of a host array (B,T) that is in the sequence's own order: local
   (B,T/c). */
DT_API void dt_context_shard(
    int kind, int64_t B, int64_t T, dt_comm *comm, const int32_t *whole, int32_t *local);

// ==== 5. Expert parallelism =====================================================================

/* A mixture of experts: E small networks, of which each token uses k (N. Shazeer et al.,
   arXiv:1701.06538; D. Lepikhin et al., arXiv:2006.16668), each of ep ranks holding E/ep of them. x
   lies `outside` (section 3); a layer is

       dt_routing *r = dt_route(x, w, desc);                                which experts, and by
                                                                            how much
       dt_tensor  *h = dt_dispatch(dt_tp_enter(x, tp, outside), r, ep);     tokens to the ranks of their experts
       h = dt_expert_linear(h, r, w1, b1, gelu);                            each expert's product
                                                                            with its rows
       h = dt_expert_linear(h, r, w2, b2, last);
       dt_tensor  *y = dt_redistribute(dt_combine(h, r), tp, DT_PARTIAL, outside);      back, weighted, added up

   Rank q of ep has experts q E/ep .. : parameters are (E,..) with the cut { ep, 0 }. Their hidden
   size may be cut over tp as in section 3: w1 (E,F,C) and b1 (E,F) along 1, w2 (E,C,F) along 2;
   then the sum over tp is taken once, of tokens rather than of their k rows each. b2 (E,C) is added
   by rank 0 of tp alone, so its gradient is zero on the others: mark it { tp, DT_GRAD_PARTIAL }. Under
   DT_SHARD(1) mark the router's weight so too. Elements of T type sent by a rank over ep: the width
   of each row that goes to another one; as many in combine, and in each one's backward.

   What belongs to a sequence (room of experts, balance) is decided from the choices of all its
   tokens, on whatever ranks they lie: no layout drops another token or counts otherwise. Choices
   and counts are exchanged in host memory and not counted as traffic; each layer waits once for the
   device, since they are numbers that steer the program. */

/* What a router has counted. Each number is added to, not while a block is run again, and is this
   rank's part: of the tokens that its router saw. Sum over the ranks that saw others: the mesh's
   data, and tp under DT_SHARD(1). */
typedef struct dt_route_counts {
    /* yours, (E): choices that fell on each, with those that are dropped; or NULL */
    double *experts;
    double choices, dropped; /* k for each token; of these, those without room */
    double balance, z;       /* the side losses that are asked for, without their weights */
} dt_route_counts;

typedef struct dt_route_desc {
    int k; /* experts of a token: 0 -> 1; at most E */
    /* 0: nothing is dropped. Else a sequence of T tokens has room in each expert for ceil(capacity
       k T / E) choices: all first choices are served before all second ones, and of these the
       tokens in the order of the sequence. A choice without room is dropped: the token has nothing
       from that expert, the weights of its others stay */
    double capacity;
    /* weight of the mean over sequences of E sum over e of f P, f the part of the choices that fell
       on e, dropped ones too, P its mean probability; arXiv:2101.03961 */
    double balance;
    /* weight of the mean over tokens of log(sum of e^logits)^2; arXiv:2202.08906 */
    double z;
    /* of the whole step, over all ranks: what the means are over, if there is a weight */
    int64_t sequences;
    /* (E), f32, of an f64 model f64, no gradient: added to probabilities to choose by, not to those
       that weigh; arXiv:2408.15664, see dt_route_balance. NULL: none */
    dt_tensor *bias;
    dt_comm *tp; /* how x lies: over tp outside, DT_REPLICATE or DT_SHARD(1), */
    dt_placement outside;
    /* and each sequence over cp (NULL: whole), as dt_context_token says for the kind, */
    dt_comm *cp;
    int kind;
    /* or, host (B,T') of x's tokens, where each is in its sequence of T: 0 .. T-1 */
    const int32_t *places;
    dt_route_counts *counts; /* NULL: nobody counts */
} dt_route_desc;

/* Who goes where. Read it; it lives until dt_reset. */
typedef struct dt_routing {
    /* B sequences, of which this rank's experts get T tokens each: all of tp's */
    int64_t batch, tokens;
    int64_t experts, k;
    /* (B,T,k) f32, of an f64 model f64: weights of the choices, COPY over tp */
    dt_tensor *gates;
    int32_t *choices;      /* (B,T,k) host: the expert, best first; -1: dropped */
    int64_t rows;          /* from dt_dispatch on: rows of this rank's experts, */
    int64_t held, *counts; /* and of each of the experts held, (held) host, in this order */
    struct dt__exchange *exchange;
} dt_routing;

/* [collective: desc.tp, desc.cp] The router: x (B,T',C), w (E,C), both computed with in f32 (f64).
   The k largest of softmax(x w^T), ties to the lowest expert, which is the weight of a token's one
   expert (arXiv:2101.03961), or with k > 1, divided by the sum of the k, of several
   (arXiv:2401.04088); its gradient reaches x and w. The side losses are attached (dt_loss): each
   rank attaches the part of its own tokens. NULL after DT_ERR_SHAPE or DT_ERR_ARG, naming what does
   not fit. In a dry run choice j of token t of a sequence is expert (k t + j) mod E. */
DT_API dt_routing *dt_route(dt_tensor *x, dt_tensor *w, dt_route_desc desc);
/* [collective: ep] x (B,T,C), inside: rows (R,C) for this rank's experts, ordered by expert, then
   source rank, then token. R may be 0. DT_ERR_SHAPE where ep does not divide E or x is not what was
   routed. */
DT_API dt_tensor *dt_dispatch(dt_tensor *x, dt_routing *routing, dt_comm *ep);

typedef struct dt_expert_desc {
    int activation; /* DT_ACT_*, but not AFFINE; 0: none */
    /* w's inputs are cut over this group: its rank 0 alone adds b. NULL: they are not */
    dt_comm *partial;
} dt_expert_desc;
/* [local] x (R,I), w (held,O..,I), b (held,O..) or NULL -> (R,O..): act(x w^T + b), each row with
   the matrix of its expert, so that an expert's gradient is a sum over its rows in their order.
   (held,2,F,I) and dt_swiglu are gated ones. An expert without rows has a gradient of zero. */
DT_API dt_tensor *dt_expert_linear(
    dt_tensor *x, const dt_routing *routing, dt_tensor *w, dt_tensor *b, dt_expert_desc desc);
/* [collective: ep] rows (R,O) back to where they came from -> (B,T,O): the sum of a token's rows
   times its gates, best first, in f32 (f64), rounded once. A token whose choices are all dropped
   gets 0. */
DT_API dt_tensor *dt_combine(dt_tensor *rows, dt_routing *routing);
/* [collective: the n groups; of a parameter at ZeRO-3 also its data group] Balance without a loss,
   after a step: counts (E) of the step's choices are summed over the groups, in place, then bias_e
   += rate sign(mean - counts_e). The groups are axes of a mesh: any two meet in one rank. bias (E):
   a frozen parameter of f32 or f64, or any tensor of these. */
DT_API dt_status dt_route_balance(
    dt_tensor *bias, double *counts, double rate, dt_comm *const *groups, int n);

// ==== 6. Schedules ==============================================================================

/* A pipeline cuts a model in depth into S stages. Each of p ranks holds v of them, its chunks, and
   a step has m micro-batches. A schedule says what each rank computes in which order: for each
   stage and micro-batch the forward F once, and once the backward, whole (B) or in two halves: the
   gradient of the stage's input (I), which the stage before waits for, and later those of its
   parameters (W).
       It is data. A generator writes computations down, nothing else; the lowering adds who sends
       to whom, and slots;
   one checker, one simulator, one drawer and one executor (section 7) serve all. Rank r has, where
   a backward takes two forwards (I and W one each) and messages no time:

       kind          bubble: idle / work   micro-batches it holds   after
       NAIVE         p - 1                 1                        one at a time, through all stages and back
       AFAB          (p - 1) / m           m                        Y. Huang et al., arXiv:1811.06965
       1F1B          (p - 1) / m           min(p - r, m)            D. Narayanan et al., arXiv:2006.09503
       INTERLEAVED   (p - 1) / (v m)       of chunks, min(w, v m)   D. Narayanan et al., arXiv:2104.04473
       ZB            (p - 1) / (3 m)       min(p, m)                P. Qi et al., ZB-H1, arXiv:2401.10241

   INTERLEAVED: p divides m, w = 2 (p - r - 1) + (v - 1) G + 1 with G = p. Micro-batches go through
   a chunk in groups of G, as A. Grattafiori et al., arXiv:2407.21783 have it: any m is served, by a
   G of p to m with m % G = 0 or >= p, and G = m where m < p. ZB: p at most m.
       A slot holds a micro-batch in a chunk: all that its backward needs, from F to B or W; from I
       to W also the
   gradients of activations, and what was recomputed. A gradient that is sent stays in its slot
   until its receiver begins to use it, so an F that takes the slot over may have to wait for that.
   A rank has as many slots as it takes that nobody waits, were all stages alike. That is what the
   rank holds, but of INTERLEAVED, whose chunks wait for each other: where p divides m the first
   ranks have one more, else some more. */
enum {
    DT_SCHEDULE_NAIVE = 0,
    DT_SCHEDULE_AFAB,
    DT_SCHEDULE_1F1B,
    DT_SCHEDULE_INTERLEAVED,
    DT_SCHEDULE_ZB,
    DT_SCHEDULES
};

/* One computation of one rank, with the message before it and the one after it. */
typedef struct dt_action {
    /* DT_FORWARD, DT_BACKWARD, or DT_BACKWARD_INPUT and later DT_BACKWARD_WEIGHT */
    dt_phase phase;
    int micro, chunk;
    /* which one the rank's chunk is; made by the lowering, as all below */
    int stage;
    /* of this rank: taken by F, given back after B or W; -1: a backward without its F */
    int slot;
    /* whose message it begins with, who gets its result; -1: nobody (at the ends, and W) */
    int from, to;
} dt_action; /* either may be this rank itself */

typedef struct dt_schedule dt_schedule;
/* Calls dt_schedule_add for every computation; those of a rank in the rank's order. */
typedef void (*dt_schedule_fn)(dt_schedule *schedule, void *user);
/* The stage that is the rank's chunk; each of ranks x chunks stages once. */
typedef int (*dt_stage_fn)(int rank, int chunk, void *user);

typedef struct dt_schedule_desc {
    int kind;   /* DT_SCHEDULE_* */
    int ranks;  /* p: at least 1 */
    int micros; /* m: at least 1 */
    /* v of each rank: 0 -> 1, but 2 if INTERLEAVED; other kinds have 1 */
    int chunks;
    int group;               /* G of INTERLEAVED: 0 -> the least that is allowed */
    dt_schedule_fn generate; /* not NULL: your own, in place of kind */
    dt_stage_fn stage_of;    /* NULL: chunk * ranks + rank */
    void *user;              /* of both */
    const char *name;        /* NULL: the kind's; copied */
    /* 1: no more slots than the rank holds micro-batches, though ranks wait for one then; those of
       INTERLEAVED for ever, which is refused */
    int tight;
    /* slots more than that on each rank, so that messages may take time; 0: none */
    int spare;
    /* 1: a wrong one is made too; simulating and drawing show where it stops */
    int unchecked;
} dt_schedule_desc;

/* [local] Generates, lowers and checks. NULL after DT_ERR_ARG: a number is outside its range, or
   the schedule is wrong, with dt_schedule_check's text; DT_ERR_MEM. */
DT_API dt_schedule *dt_schedule_make(dt_ctx *ctx, dt_schedule_desc desc);
/* [local] NULL is allowed. A schedule that is left when the context ends is freed with it. */
DT_API void dt_schedule_free(dt_schedule *schedule);
/* [local] From a generator: the rank's next computation. DT_ERR_ARG fails the context: no such
   phase, rank, micro-batch or chunk, or no generator is running. */
DT_API dt_status dt_schedule_add(
    dt_schedule *schedule, int rank, dt_phase phase, int micro, int chunk);

/* [local] What it is made of; 0 for NULL. Generators may ask too. */
DT_API int dt_schedule_ranks(const dt_schedule *schedule);
DT_API int dt_schedule_chunks(const dt_schedule *schedule); /* of each rank */
DT_API int dt_schedule_stages(const dt_schedule *schedule); /* ranks x chunks */
DT_API int dt_schedule_micros(const dt_schedule *schedule);
DT_API int dt_schedule_group(const dt_schedule *schedule); /* G; 0 if not INTERLEAVED */
DT_API const char *dt_schedule_name(const dt_schedule *schedule);
/* [local] The stage that is the rank's chunk; the rank that holds the stage. -1 out of range. */
DT_API int dt_schedule_stage_of(const dt_schedule *schedule, int rank, int chunk);
DT_API int dt_schedule_rank_of(const dt_schedule *schedule, int stage);
/* [local] The rank's actions in its order, and how many. 0 and NULL out of range. */
DT_API const dt_action *dt_schedule_actions(const dt_schedule *schedule, int rank);
DT_API int dt_schedule_count(const dt_schedule *schedule, int rank);
/* [local] Where the rank's actions begin among all actions, rank 0's first; of rank p: the number
   of all. */
DT_API int dt_schedule_first(const dt_schedule *schedule, int rank);
/* [local] The most micro-batches that the rank holds at a time, of all its chunks, and its slots. 0
   out of range. */
DT_API int dt_schedule_live(const dt_schedule *schedule, int rank);
DT_API int dt_schedule_slots(const dt_schedule *schedule, int rank);

typedef struct dt_schedule_facts {
    int actions;  /* of all ranks */
    int messages; /* from a rank to another */
    int live;     /* the largest of the ranks' */
    int slots;    /* the largest of the ranks' */
    int cycle;    /* ranks that wait for each other in a circle; 0: no deadlock */
} dt_schedule_facts;
/* [local] Whether it is right: DT_OK, or DT_ERR_ARG and what is wrong first, in text; the context
   does not fail. Each computation comes once; no rank waits for ever, where every rank keeps its
   order, F waits for the F of the stage before, B and I for that of the stage after, and F for its
   slot; and each chunk adds gradients, which B and W do, in the ascending order of micro-batches.
   facts may be NULL. */
DT_API dt_status dt_schedule_check(
    const dt_schedule *schedule, dt_schedule_facts *facts, char *text, size_t text_bytes);

/* Seconds of one micro-batch in one stage; B takes input + weight. */
typedef struct dt_schedule_costs {
    double forward, input, weight; /* F, I, W, the same in all stages */
    const double *stages;          /* (stages,3) forward, input, weight of each; NULL: as above */
    /* from the end of an action to where another rank can begin with its result */
    double message;
} dt_schedule_costs;
/* seconds; begin > end: it did not happen */
typedef struct dt_span {
    double begin, end;
} dt_span;
/* [local] When each action begins and ends: spans (dt_schedule_first of p), from time 0. DT_ERR_ARG
   fails the context if a cost is negative or not finite. Of an unchecked schedule that stops it is
   DT_ERR_ARG too, but fails nothing: what never begins has the span { 0, -1 }. */
DT_API dt_status dt_schedule_simulate(
    const dt_schedule *schedule, dt_schedule_costs costs, dt_span *spans);

typedef struct dt_schedule_bubble {
    double makespan; /* from the first begin to the last end, of all ranks */
    double work;     /* computing: of the rank, or of the busiest one */
    double of_work;  /* (makespan - work) / work: "of ideal" */
    double of_total; /* (makespan - work) / makespan: what share of the time is lost */
} dt_schedule_bubble;
/* [local] Of a rank, or of the whole for rank -1: from spans that were simulated or measured. Zeros
   where there is no such rank or no work. */
DT_API dt_schedule_bubble dt_schedule_idle(
    const dt_schedule *schedule, const dt_span *spans, int rank);

/* [local] Cuts n items in a row (layers) with costs >= 0 into `stages` parts that follow each
   other, none empty, so that the dearest is as cheap as can be: part i is items first[i] to
   first[i+1] - 1; first (stages + 1). Of several such cuts it takes an even one, with rather less
   in the first parts, which hold the most micro-batches. DT_ERR_ARG and why not, in text: fewer
   items than stages, a cost that is negative or not finite. */
DT_API dt_status dt_stage_cut(
    const double *costs, int n, int stages, int *first, char *text, size_t text_bytes);

/* What is drawn: a schedule and when its actions ran, simulated or measured. */
typedef struct dt_timeline {
    const char *title; /* UTF-8; NULL: the schedule's name */
    const dt_schedule *schedule;
    const dt_span *spans; /* (dt_schedule_first of p) */
} dt_timeline;
/* [local] Writes a drawing (SVG) of n timelines, one below the other, to one scale: a row for each
   rank, boxes coloured by phase and lighter by chunk with the micro-batch's number, the bubble in
   the title. Written as by dt_file_write. */
DT_API dt_status dt_schedule_svg(dt_ctx *ctx, const char *path, const dt_timeline *lines, int n);
/* [local] The same for a terminal, a line for each rank: "rank  0 |0123....abcd|". A forward is a
                                                                 digit, a backward
   (and I) a letter, from a on, W a capital letter; micro-batch 10 is 0, a or A again. columns: of
   time, 0 -> 72. DT_ERR_ARG if text is too small: p (columns + 12) + 1 bytes are enough where p <
   1000. */
DT_API dt_status dt_schedule_text(
    const dt_schedule *schedule, const dt_span *spans, int columns, char *text, size_t text_bytes);

// ==== 7. Pipeline parallelism ===================================================================

/* Runs a schedule (section 6): each rank computes its actions in their order, takes a stage's input
   from the rank that has the stage before, and the gradient of its output from the one that has the
   stage after. A micro-batch lives on a tape (dt_tape) of its own, slot s on tape s + 1, from its
   forward to its backward; tape 0 stays the caller's. Messages are the tensors themselves, none is
   copied: they are under way while other actions compute.

       static dt_tensor *run(dt_tensor *x, int stage, int micro, void *user) {
           if (stage == 0) x = dt_input(...micro-batch `micro`...);
           x = ...the layers of this stage...;
           return stage < last ? x : dt_mse(x, ..., B);         // the whole step's denominator:
                                                                losses add up
       }

   Parameters of a stage are registered after dt_stage(ctx, stage), on the rank that has it. One
   that stages of several ranks use (an embedding that is the head too) is registered by each of
   them, under the same name, marked { group of their ranks, DT_GRAD_PARTIAL }: dt_zero_step sums its
   gradient over them. A stage's input and output are one tensor each, of any shape that stays the
   same during a run; the ranks of tensor, context and expert parallelism run the same schedule side
   by side. */

/* The layers of one stage: x is NULL for the first one, else what the stage before returned for
   this micro-batch. The last one returns the loss, a scalar. Called inside a block. */
typedef dt_tensor *(*dt_stage_run_fn)(dt_tensor *x, int stage, int micro, void *user);

typedef struct dt_pipe_desc {
    const dt_schedule *schedule;
    dt_comm *comm; /* the pipeline: its rank r is the schedule's; NULL: one rank */
    dt_stage_run_fn run;
    void *user; /* handed to run */
    /* not 0: only the forwards of so many micro-batches, as for evaluation */
    int forward_micros;
    /* NULL: as fast as it goes; else each action lasts so long, or longer: to watch a schedule on a
       model that is too small */
    const dt_schedule_costs *pace;
    /* receives when each action of this rank computed, by its clock; (dt_schedule_count) or NULL */
    dt_span *spans;
} dt_pipe_desc;

/* [collective: comm] All micro-batches of a step, forward and backward; then dt_zero_step. Errors
   besides those of `run`: DT_ERR_ARG where the schedule is for another number of ranks;
   DT_ERR_SHAPE where a stage's output changes its shape from one micro-batch to the next. Sends 2
   messages for each micro-batch and edge between stages. A schedule is for one run at a time. */
DT_API dt_status dt_pipe_run(dt_ctx *ctx, dt_pipe_desc desc);
/* [collective: comm] From the spans of this rank's actions, mine (dt_schedule_count), those of all
   ranks', all (dt_schedule_first of p), in seconds after the first begin: for dt_schedule_idle and
   dt_schedule_svg. Clocks of different machines may differ. After a failure, which it returns, all
   is of no use. */
DT_API dt_status dt_pipe_spans(
    dt_comm *comm, const dt_schedule *schedule, const dt_span *mine, dt_span *all);

// ==== 8. Order of data ==========================================================================

/* Which sequences a replica reads: B = b * a * R sequences a step, the same ones in the same order
   in every layout. */
typedef struct dt_order {
    int64_t sequences; /* S: in the data, at least 1 */
    int64_t batch;     /* B: of one step over all replicas */
    int micro_batch;   /* b: of one forward of one replica */
    int replicas;      /* R */
    int64_t before;    /* sequences that were read before step 1 */
} dt_order;

/* [local] The sequence that replica r reads as the i-th of micro-step j of step n (from 1): (before
   + (n-1) B + (j R + r) b + i) mod S; -1 if S < 1, n < 1, or a number is negative. */
DT_API int64_t dt_order_sequence(dt_order order, int64_t step, int micro_step, int replica, int i);
/* [local] How many times the data have been read through when that sequence is read: floor((before
   + (n-1) B + (j R + r) b + i) / S), at most INT64_MAX; 0 where dt_order_sequence is -1. */
DT_API int64_t dt_order_epoch(dt_order order, int64_t step, int micro_step, int replica, int i);

/* A batch that grows over the first `samples` sequences of a run, as small batches learn more from
   each sequence while the gradient still says much (S. McCandlish et al., arXiv:1812.06162; T.
   Brown et al., arXiv:2005.14165): from `start` by `incr`, K = (batch - start) / incr times, after
   equal shares of `samples`, up to `batch`. */
typedef struct dt_batch_ramp {
    int64_t start, incr; /* sequences */
    /* sequences after which all steps have batch; 0: all have from the first on */
    int64_t samples;
    int64_t batch;
} dt_batch_ramp;

/* [local] Whether it is one, with every size a multiple of unit = micro-batch x replicas: else
   DT_ERR_ARG and a text with the numbers and a legal choice. A ramp of samples 0 is one. */
DT_API dt_status dt_batch_ramp_check(
    dt_batch_ramp ramp, int64_t unit, char *text, size_t text_bytes);
/* [local] Sequences of a step before which `consumed` ones were read: start + floor(consumed K /
   samples) incr, and batch from `samples` on. `batch` if the ramp is invalid. */
DT_API int64_t dt_batch_ramp_size(dt_batch_ramp ramp, int64_t consumed);
/* [local] Sequences that all steps before step n (from 1) read, at most INT64_MAX: dt_order's
   `before` of step n. */
DT_API int64_t dt_batch_ramp_before(dt_batch_ramp ramp, int64_t step);

/* Which of n samples each of R ranks reads, as PyTorch's DistributedSampler deals them out. An
   epoch has an order of all samples: 0, 1, .. n-1, or shuffled. It is made a multiple of R long: at
   its end it begins again, as often as it takes, or with drop_last what is over is left out. Rank r
   reads entries r, r + R, r + 2R, .. of it, so that every rank reads as many.
       Shuffled it is the torch.randperm(n) of a CPU generator with seed + epoch, of which 32 bits
       count: for each place
   in turn, a number of the Mersenne twister modulo what is left says which sample comes there. From
   n = 2^32 / 20 on torch draws otherwise; so many samples are not shuffled here. */
typedef struct dt_sampler dt_sampler;
#define DT_SAMPLER_SHUFFLED 214748363 /* samples: the most that can be shuffled */
typedef struct dt_sampler_desc {
    int64_t samples;    /* n: at least 1 */
    int replicas, rank; /* R: at least 1; 0 <= r < R */
    uint64_t seed;      /* the same on every rank */
    int shuffle;        /* 1: another order in each epoch */
    /* 1: leave out up to R-1 samples of an epoch; else up to R-1 are read again */
    int drop_last;
} dt_sampler_desc;

/* Where a sampler is: what a checkpoint keeps of it, besides what its desc says. */
typedef struct dt_sampler_state {
    int64_t epoch; /* from 0 */
    int64_t place; /* how many samples of this epoch the rank has had */
} dt_sampler_state;

/* [local] A sampler at the start of epoch 0. Shuffled it keeps 4 bytes a sample (class host), else
   none. NULL after DT_ERR_ARG: a number is outside its range; DT_ERR_MEM. */
DT_API dt_sampler *dt_sampler_make(dt_ctx *ctx, dt_sampler_desc desc);
/* [local] NULL is allowed. A sampler that is left when the context ends is freed with it. */
DT_API void dt_sampler_free(dt_sampler *sampler);
/* [local] How many samples the rank reads in an epoch: n / R rounded up, or with drop_last down. 0
   for NULL. */
DT_API int64_t dt_sampler_count(const dt_sampler *sampler);
/* [local] The rank's next sample, 0 .. n-1; -1 when the epoch is over, until it is told another,
   and for NULL. */
DT_API int64_t dt_sampler_next(dt_sampler *sampler);
/* [local] Goes to the start of an epoch. The order of an epoch does not depend on those before.
   DT_ERR_ARG: below 0. */
DT_API dt_status dt_sampler_set_epoch(dt_sampler *sampler, int64_t epoch);
/* [local] Where it is, { 0, 0 } for NULL; and back to there: what is read from then on is what was
   read from there on. A new order is computed when the first sample of it is asked for. DT_ERR_ARG:
   an epoch below 0, a place outside 0 .. dt_sampler_count. */
DT_API dt_sampler_state dt_sampler_where(const dt_sampler *sampler);
DT_API dt_status dt_sampler_seek(dt_sampler *sampler, dt_sampler_state state);

/* [collective: comm] The number of labels >= 0 over the ranks of comm: the denominator that makes a
   loss a mean over the whole step in every layout. labels (n) in host memory; give those of all
   micro-batches at once. Not counted as traffic. After a failure this rank's own number. */
DT_API double dt_tokens(dt_comm *comm, const int32_t *labels, size_t n);

// ==== 9. Text ===================================================================================

/* Files read as one string of tokens: bytes, each a token 0..255, or llm.c token shards, known by
   their magic (20240520 with 16 bits a token, 20240801 with 32). All files are of one kind. N
   tokens hold S = floor((N-1)/T) sequences; sequence i is tokens iT .. iT+T, so that its labels are
   its inputs shifted by one. */
typedef struct dt_text dt_text;

/* [local] Opens `files` files through the context's io table and cuts them into sequences of seq
   tokens. NULL after DT_ERR_IO: a file is missing, unreadable, no file or a broken shard, kinds are
   mixed, or all together are shorter than one sequence. */
DT_API dt_text *dt_text_open(dt_ctx *ctx, const char *const *paths, int files, int seq);
/* [local] NULL is allowed. A text that is still open when the context ends is closed with it. */
DT_API void dt_text_close(dt_text *text);
/* [local] Tokens and sequences in the text; 0 for NULL. */
DT_API int64_t dt_text_tokens(const dt_text *text);
DT_API int64_t dt_text_sequences(const dt_text *text);
/* [local] No token is this large: 256 for bytes, 65,536 or 2^31 for shards. dt_embedding refuses
   ids outside its table, so a vocabulary may be smaller, if the tokens are. 0 for NULL. */
DT_API int64_t dt_text_limit(const dt_text *text);
/* [local] ids (seq) and labels (seq) of one sequence. DT_ERR_ARG outside the text; DT_ERR_IO naming
   file and token. */
DT_API dt_status dt_text_read(dt_text *text, int64_t sequence, int32_t *ids, int32_t *labels);

// ==== 10. Dry runs ==============================================================================

/* A context that computes nothing and has no memory for tensors, but does everything else: the same
   program then shows what it would need, on any number of ranks (as threads), without a second
   formula for it. dt_memory_used and dt_comm_bytes count as always; every number read from a tensor
   is 0. */
typedef struct dt_dry {
    /* 2 m n k of each product; attention as if there was no mask, but parts that dt_context leaves
       out */
    double flops;
    size_t kernels; /* calls */
    uintptr_t next; /* addresses that were given out, none of which can be read */
} dt_dry;
/* [local] As the first call on a context, before it has tensors. dry: (zeroed) yours, read it at
   any time; it must outlive the context. Not for forked ranks, nor over MPI. */
DT_API dt_status dt_dry_begin(dt_ctx *ctx, dt_dry *dry);

#ifdef __cplusplus
}
#endif
#endif /* DT_PARALLEL_H */

#if defined(DT_IMPLEMENTATION) && !defined(DT_PARALLEL_IMPL)
#define DT_PARALLEL_IMPL

#include "dt_comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// ==== 11. Implementation: mesh ==================================================================

/* a + b for a, b >= 0, saturating at INT64_MAX. */
static int64_t dt__add_most(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }

/* Appends text to a caller's buffer, which may be NULL or of 0 bytes; cuts what does not fit. */
typedef struct dt__saying {
    char *text;
    size_t bytes, used;
} dt__saying;

static dt__saying dt__saying_in(char *text, size_t bytes) {
    dt__saying t = { text, text ? bytes : 0, 0 };
    if (t.bytes > 0) text[0] = 0;
    return t;
}

static void DT_PRINTF(2, 3) dt__say(dt__saying *t, const char *fmt, ...) {
    va_list args;
    if (t->used + 1 >= t->bytes) return;
    va_start(args, fmt);
    int n = vsnprintf(t->text + t->used, t->bytes - t->used, fmt, args);
    va_end(args);
    if (n > 0) t->used += (size_t)n < t->bytes - t->used ? (size_t)n : t->bytes - t->used - 1;
}

dt_status dt_mesh_sizes(dt_mesh_desc *sizes, int ranks, char *text, size_t text_bytes) {
    dt__saying t = dt__saying_in(text, text_bytes);
    if (!sizes) return DT_ERR_ARG;
    int *axes[5] = { &sizes->dp, &sizes->tp, &sizes->cp, &sizes->pp, &sizes->ep };
    if (ranks < 1) {
        dt__say(&t, "%d ranks; at least 1 is needed", ranks);
        return DT_ERR_ARG;
    }
    for (int i = 0; i < 5; i++) {
        if (*axes[i] < 0) {
            dt__say(&t, "an axis of %d ranks; use 1 or more", *axes[i]);
            return DT_ERR_ARG;
        }
        if (i > 0 && *axes[i] == 0) *axes[i] = 1;
    }
    /* no number of ranks is a multiple of more, so it need not grow */
    int64_t others = 1, most = (int64_t)1 << 31;
    for (int i = 1; i < 5; i++) others = others * *axes[i] < most ? others * *axes[i] : most;
    int64_t all = others * (sizes->dp ? sizes->dp : 1);
    if (ranks % others == 0 && sizes->dp == 0) sizes->dp = (int)(ranks / others);
    if (sizes->dp == 0) {
        int64_t next = ((ranks - 1) / others + 1) * others;
        dt__say(&t,
            "tp %d x cp %d x pp %d x ep %d does not divide %d ranks; use %lld ranks or smaller "
            "axes",
            sizes->tp, sizes->cp, sizes->pp, sizes->ep, ranks, (long long)next);
        return DT_ERR_ARG;
    }
    if (sizes->dp * others != ranks) {
        char choice[40] = "";
        if (ranks % others == 0)
            snprintf(choice, sizeof choice, ", or use dp %d", (int)(ranks / others));
        dt__say(&t,
            "dp %d x tp %d x cp %d x pp %d x ep %d = %lld, but there are %d ranks; use %lld "
            "ranks%s",
            sizes->dp, sizes->tp, sizes->cp, sizes->pp, sizes->ep, (long long)all, ranks,
            (long long)all, choice);
        return DT_ERR_ARG;
    }
    return DT_OK;
}

/* The group of the ranks that differ from this one only by `offset`, a coordinate times its
   stride. */
static dt_comm *dt__mesh_axis(
    dt_comm *world, int size, int offset, int key, const char *name, dt_axis axis) {
    if (size == 1) return NULL;
    dt_comm *comm = dt_comm_split(world, dt_comm_rank(world) - offset, key, name);
    dt_comm_set_axis(comm, axis);
    return comm;
}

dt_mesh dt_mesh_make(dt_ctx *ctx, dt_mesh_desc desc) {
    char why[200];
    dt_mesh none, mesh;
    memset(&none, 0, sizeof none);
    none.replicas = 1; /* programs divide by it before they look at the error */
    if (dt_error(ctx) != DT_OK) return none;
    dt_comm *world = dt_world(ctx);
    int rank = dt_comm_rank(world);
    if (dt_mesh_sizes(&desc, dt_comm_size(world), why, sizeof why) != DT_OK) {
        dt_fail(ctx, DT_ERR_ARG, "dt_mesh_make: %s", why);
        return none;
    }
    mesh = none;
    mesh.sizes = desc;
    mesh.at.tp = rank % desc.tp;
    mesh.at.cp = rank / desc.tp % desc.cp;
    mesh.at.ep = rank / (desc.tp * desc.cp) % desc.ep;
    mesh.at.dp = rank / (desc.tp * desc.cp * desc.ep) % desc.dp;
    mesh.at.pp = rank / (desc.tp * desc.cp * desc.ep * desc.dp);
    int cp_stride = desc.tp, ep_stride = cp_stride * desc.cp, dp_stride = ep_stride * desc.ep;
    int pp_stride = dp_stride * desc.dp;
    mesh.world = world;
    mesh.tp = dt__mesh_axis(world, desc.tp, mesh.at.tp, mesh.at.tp, "tp", DT_AXIS_TP);
    mesh.cp = dt__mesh_axis(world, desc.cp, mesh.at.cp * cp_stride, mesh.at.cp, "cp", DT_AXIS_CP);
    mesh.ep = dt__mesh_axis(world, desc.ep, mesh.at.ep * ep_stride, mesh.at.ep, "ep", DT_AXIS_EP);
    mesh.dp = dt__mesh_axis(world, desc.dp, mesh.at.dp * dp_stride, mesh.at.dp, "dp", DT_AXIS_DP);
    mesh.pp = dt__mesh_axis(world, desc.pp, mesh.at.pp * pp_stride, mesh.at.pp, "pp", DT_AXIS_PP);
    int copies = desc.dp * desc.ep * desc.cp;
    int offset = mesh.at.dp * dp_stride + mesh.at.ep * ep_stride + mesh.at.cp * cp_stride;
    mesh.data = copies == desc.dp
                    ? mesh.dp
                    : dt__mesh_axis(world, copies, offset, offset, "data", DT_AXIS_DP);
    offset -= mesh.at.ep * ep_stride;
    mesh.experts = desc.ep == 1   ? mesh.data
                   : desc.cp == 1 ? mesh.dp
                                  : dt__mesh_axis(world, desc.dp * desc.cp, offset, offset,
                                        "experts", DT_AXIS_DP);
    mesh.replica = mesh.at.dp * desc.ep + mesh.at.ep;
    mesh.replicas = desc.dp * desc.ep;
    return dt_error(ctx) == DT_OK ? mesh : none;
}

// ==== 12. Placements: code ======================================================================

/* One move of a dense array over a group: the argument of every row of the table. */
typedef struct dt__place_move {
    dt_ctx *ctx;
    dt_comm *comm;
    dt_dtype dtype;
    const void *in;
    /* scratch: as many times the larger of in and out as the table says */
    void *out, *scratch;
    dt_shape in_shape, out_shape;
    int from_dim, to_dim; /* of SHARD placements */
} dt__place_move;

/* A dense shape seen as (outer, n, inner) around one dimension; bytes of a part of `parts` along
   it. */
typedef struct dt__cut_view {
    size_t outer, part_bytes, row_bytes;
} dt__cut_view;

static dt__cut_view dt__cut_of(dt_shape shape, int dim, int parts, dt_dtype dtype) {
    dt__cut_view v = { 1, dt_dtype_size(dtype), 0 };
    for (int i = 0; i < dim; i++) v.outer *= (size_t)shape.d[i];
    for (int i = dim; i < shape.nd; i++) v.part_bytes *= (size_t)shape.d[i];
    v.row_bytes = v.part_bytes;
    v.part_bytes /= (size_t)parts;
    return v;
}

static dt_status dt__copy_rows(const dt__place_move *m, void *out, size_t out_stride,
    const void *in, size_t in_stride, size_t rows, size_t row_bytes) {
    dt_copy_args a = { out, in, rows, row_bytes, out_stride, in_stride };
    return DT__KERNEL(m->ctx, "dt_redistribute", copy, &a);
}

/* Part `part` of the whole (shape `whole`, along dim) to or from a dense array. */
static dt_status dt__part_out(
    const dt__place_move *m, dt_shape whole, int dim, int part, void *dense, const void *in) {
    dt__cut_view v = dt__cut_of(whole, dim, dt_comm_size(m->comm), m->dtype);
    const char *from = (const char *)in + (size_t)part * v.part_bytes;
    return dt__copy_rows(m, dense, v.part_bytes, from, v.row_bytes, v.outer, v.part_bytes);
}

static dt_status dt__part_in(
    const dt__place_move *m, dt_shape whole, int dim, int part, const void *dense, void *out) {
    dt__cut_view v = dt__cut_of(whole, dim, dt_comm_size(m->comm), m->dtype);
    char *to = (char *)out + (size_t)part * v.part_bytes;
    return dt__copy_rows(m, to, v.row_bytes, dense, v.part_bytes, v.outer, v.part_bytes);
}

static dt_status dt__move_identity(const dt__place_move *m) {
    size_t bytes = (size_t)dt_count(m->in_shape) * dt_dtype_size(m->dtype);
    return m->out == m->in ? DT_OK : dt__copy_rows(m, m->out, bytes, m->in, bytes, 1, bytes);
}

static dt_status dt__move_all_reduce(const dt__place_move *m) {
    return dt_all_reduce(m->comm, m->in, m->out, (size_t)dt_count(m->in_shape), m->dtype, DT_SUM);
}

static dt_status dt__move_slice(const dt__place_move *m) {
    return dt__part_out(m, m->in_shape, m->to_dim, dt_comm_rank(m->comm), m->out, m->in);
}

static dt_status dt__move_keep_first(const dt__place_move *m) {
    if (dt_comm_rank(m->comm) == 0) return dt__move_identity(m);
    return dt__fill(m->ctx, m->dtype, m->out, (size_t)dt_count(m->in_shape), 0);
}

static dt_status dt__move_all_gather(const dt__place_move *m) {
    size_t count = (size_t)dt_count(m->in_shape), bytes = count * dt_dtype_size(m->dtype);
    dt_status status = dt_all_gather(m->comm, m->in, m->scratch, count, m->dtype);
    for (int r = 0; status == DT_OK && r < dt_comm_size(m->comm); r++)
        status = dt__part_in(
            m, m->out_shape, m->from_dim, r, (char *)m->scratch + (size_t)r * bytes, m->out);
    return status;
}

static dt_status dt__move_reduce_scatter(const dt__place_move *m) {
    size_t count = (size_t)dt_count(m->out_shape), bytes = count * dt_dtype_size(m->dtype);
    dt_status status = DT_OK;
    for (int r = 0; status == DT_OK && r < dt_comm_size(m->comm); r++)
        status = dt__part_out(
            m, m->in_shape, m->to_dim, r, (char *)m->scratch + (size_t)r * bytes, m->in);
    return status == DT_OK ? dt_reduce_scatter(m->comm, m->scratch, m->out, count, m->dtype, DT_SUM)
                           : status;
}

/* in: whole along to_dim, a part along from_dim; out the other way round. The stage holds what is
   sent, and then, since an all-to-all is not in place, what arrives lies behind it. */
static dt_status dt__move_all_to_all(const dt__place_move *m) {
    int n = dt_comm_size(m->comm);
    size_t count = (size_t)dt_count(m->in_shape) / (size_t)n,
           bytes = count * dt_dtype_size(m->dtype);
    char *sent = (char *)m->scratch, *got = sent + (size_t)n * bytes;
    dt_status status = DT_OK;
    for (int r = 0; status == DT_OK && r < n; r++)
        status = dt__part_out(m, m->in_shape, m->to_dim, r, sent + (size_t)r * bytes, m->in);
    if (status == DT_OK) status = dt_all_to_all(m->comm, sent, got, count, m->dtype);
    for (int r = 0; status == DT_OK && r < n; r++)
        status = dt__part_in(m, m->out_shape, m->from_dim, r, got + (size_t)r * bytes, m->out);
    return status;
}

typedef struct dt__place_row {
    int from, to, buffers;
    dt_status (*move)(const dt__place_move *m);
} dt__place_row;

static const dt__place_row dt__place_table[] = {
    { DT_PLACEMENT_PARTIAL, DT_PLACEMENT_REPLICATE, 0, dt__move_all_reduce },
    { DT_PLACEMENT_REPLICATE, DT_PLACEMENT_COPY, 0, dt__move_identity },
    { DT_PLACEMENT_SHARD, DT_PLACEMENT_COPY, 1, dt__move_all_gather },
    { DT_PLACEMENT_PARTIAL, DT_PLACEMENT_SHARD, 1, dt__move_reduce_scatter },
    { DT_PLACEMENT_SHARD, DT_PLACEMENT_REPLICATE, 1, dt__move_all_gather },
    { DT_PLACEMENT_REPLICATE, DT_PLACEMENT_SHARD, 0, dt__move_slice },
    { DT_PLACEMENT_SHARD, DT_PLACEMENT_SHARD, 2, dt__move_all_to_all },
    { DT_PLACEMENT_REPLICATE, DT_PLACEMENT_PARTIAL, 0, dt__move_keep_first },
    { DT_PLACEMENT_COPY, DT_PLACEMENT_REPLICATE, 0, dt__move_identity },
};

static const dt__place_row *dt__place_find(dt_placement from, dt_placement to) {
    for (size_t i = 0; i < sizeof dt__place_table / sizeof *dt__place_table; i++)
        if (dt__place_table[i].from == from.kind && dt__place_table[i].to == to.kind)
            return &dt__place_table[i];
    return NULL;
}

/* The placement of the gradient of a tensor so placed. */
static dt_placement dt__place_dual(dt_placement p) {
    if (p.kind == DT_PLACEMENT_COPY) return DT_PARTIAL;
    if (p.kind == DT_PLACEMENT_PARTIAL) return DT_COPY;
    return p;
}

static const char *dt__place_name(dt_placement p) {
    static const char *const names[] = { "REPLICATE", "COPY", "SHARD", "PARTIAL" };
    return p.kind >= 0 && p.kind < 4 ? names[p.kind] : "no placement";
}

/* Runs one row; `accumulate` adds the result to what out holds. */
static dt_status dt__place_run(
    dt__place_move m, dt_placement from, dt_placement to, int accumulate) {
    const dt__place_row *row = dt__place_find(from, to);
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
    const void *terms[2] = { sum, m.out };
    dt_reduce_args a = { m.dtype, sum, terms, 2, out, DT_SUM, NULL, 0, 0 };
    return DT__KERNEL(m.ctx, "dt_redistribute", reduce, &a);
}

typedef struct dt__place_saved {
    dt_comm *comm;
    dt_placement from, to;
} dt__place_saved;

/* x to y. */
static dt__place_move dt__move_of(const dt_tensor *x, dt_tensor *y, dt_comm *comm) {
    dt__place_move m;
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

/* The gradient of a -> b is moved from the dual of b to the dual of a. */
static dt_status dt__redistribute_back(dt_node *n) {
    const dt__place_saved *saved = (const dt__place_saved *)n->saved;
    int accumulate = 0;
    dt__place_move m = dt__move_of(n->out, n->in[0], saved->comm);
    m.in = n->out->grad;
    m.out = dt_grad_raw(n, 0, &accumulate);
    if (!m.out) return dt_error(n->out->ctx);
    return dt__place_run(m, dt__place_dual(saved->to), dt__place_dual(saved->from), accumulate);
}

static dt_status dt__redistribute_again(dt_node *n) {
    const dt__place_saved *saved = (const dt__place_saved *)n->saved;
    return dt__place_run(dt__move_of(n->in[0], n->out, saved->comm), saved->from, saved->to, 0);
}

/* The local shape after the move, or nd -1 where it does not exist. */
static dt_shape dt__place_shape(dt_shape shape, int n, dt_placement from, dt_placement to) {
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

/* y: x where it is to lie. again: its data are dropped with its block and moved once more for the
   backward. */
static dt_tensor *dt__place_new(
    dt_tensor *x, dt_comm *comm, dt_placement from, dt_placement to, int again) {
    dt_ctx *ctx = x->ctx;
    if (!dt__place_find(from, to)) {
        dt_fail(ctx, DT_ERR_UNSUPPORTED,
            "dt_redistribute(%s): no way from %s to %s; go through REPLICATE", x->name,
            dt__place_name(from), dt__place_name(to));
        return NULL;
    }
    dt_shape shape = dt__place_shape(x->shape, dt_comm_size(comm), from, to);
    if (shape.nd < 0) {
        dt_fail(ctx, DT_ERR_SHAPE,
            "dt_redistribute(%s): %s from %s %d to %s %d over %d ranks: a dimension is missing "
            "or not divisible",
            x->name, dt__shape_text(x->shape).s, dt__place_name(from), from.dim, dt__place_name(to),
            to.dim, dt_comm_size(comm));
        return NULL;
    }
    int free_of_copy = dt__place_find(from, to)->move == dt__move_identity;
    again = again && x->needs_grad && !ctx->no_grad; /* else nobody records how to move it again */
    ctx->brief += again;
    dt_tensor *y = free_of_copy ? dt_alias(x) : dt_new(ctx, x->dtype, shape);
    ctx->brief -= again;
    if (!y) return NULL;
    dt_status status = free_of_copy ? DT_OK : dt__place_run(dt__move_of(x, y, comm), from, to, 0);
    if (status == DT_OK) return y;
    dt_fail(ctx, status, "dt_redistribute(%s): %s to %s", x->name, dt__place_name(from),
        dt__place_name(to));
    return NULL;
}

/* d has room for a dt__place_saved. */
static dt_tensor *dt__place_record(
    dt_tensor *y, dt_record_desc d, dt_comm *comm, dt_placement from, dt_placement to) {
    dt__place_saved *saved = (dt__place_saved *)dt_record_saved(y, d);
    if (saved) {
        saved->comm = comm;
        saved->from = from;
        saved->to = to;
        if (y->brief) y->maker->remake = dt__redistribute_again;
    }
    return dt_error(y->ctx) == DT_OK ? y : NULL;
}

static dt_tensor *dt__redistribute(
    dt_tensor *x, dt_comm *comm, dt_placement from, dt_placement to, int again) {
    dt_ctx *ctx = dt__op("dt_redistribute", x, NULL, NULL);
    if (!ctx) return NULL;
    if (dt_comm_size(comm) == 1) return x;
    if (from.kind == to.kind && (from.kind != DT_PLACEMENT_SHARD || from.dim == to.dim)) return x;
    dt_tensor *y = dt__place_new(x, comm, from, to, again);
    dt_record_desc d =
        dt__desc("dt_redistribute", x, NULL, NULL, dt__redistribute_back, sizeof(dt__place_saved));
    return y ? dt__place_record(y, d, comm, from, to) : NULL;
}

dt_tensor *dt_redistribute(dt_tensor *x, dt_comm *comm, dt_placement from, dt_placement to) {
    return dt__redistribute(x, comm, from, to, 0);
}

// ==== 13. Tensor and sequence parallelism: code =================================================

dt_tensor *dt_tp_enter(dt_tensor *x, dt_comm *comm, dt_placement outside) {
    return dt__redistribute(x, comm, outside, DT_COPY, outside.kind == DT_PLACEMENT_SHARD);
}

dt_tensor *dt_column_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_linear_desc desc,
    dt_comm *comm, dt_placement outside) {
    return dt_linear_at(dt_tp_enter(x, comm, outside), w, b, desc);
}

/* y += b + residual, either of which may be NULL, in one pass. */
static dt_status dt__row_add(dt_tensor *y, const dt_tensor *b, const dt_tensor *residual) {
    const dt_tensor *one = b ? b : residual, *other = b && residual ? residual : y;
    dt_binary_args a;
    if (!one) return DT_OK;
    memset(&a, 0, sizeof a);
    a.dtype = y->dtype;
    a.op = DT_ADD;
    a.out = y->data;
    a.accumulate = other == residual;
    a.a = other->data;
    a.b = one->data;
    dt__broadcast(other->shape, one->shape, &a.shape, a.stride_a, a.stride_b);
    return DT__KERNEL(y->ctx, "dt_row_linear", binary, &a);
}

/* in: the sum not yet taken, the bias, the residual. */
static dt_status dt__row_back(dt_node *n) {
    dt_tensor *y = n->out;
    size_t bytes = (dt__bytes(y) + 63) / 64 * 64;
    if (dt_wants(n, 0) && dt__redistribute_back(n) != DT_OK) return dt_error(y->ctx);
    for (int i = 1; i < 3; i++) {
        if (!dt_wants(n, i)) continue;
        char *work = (char *)dt_scratch(y->ctx, 2 * bytes);
        void *turns[2] = { work, work + bytes };
        if (!work || dt__sum_to(n, i, y->grad, 1, turns) != DT_OK) return dt_error(y->ctx);
    }
    return DT_OK;
}

dt_tensor *dt_row_linear(dt_tensor *x, dt_tensor *w, dt_tensor *b, dt_tensor *residual,
    dt_comm *comm, dt_placement outside) {
    dt_linear_desc plain = { DT_ACT_NONE, residual };
    if (dt_comm_size(comm) == 1 || !x) return dt_linear_at(x, w, b, plain);
    x->ctx->brief++;
    dt_tensor *sum = dt_linear(x, w, NULL);
    x->ctx->brief--;
    dt_ctx *ctx = sum ? dt__op_real("dt_row_linear", sum, b, residual) : NULL;
    dt_tensor *y = ctx ? dt__place_new(sum, comm, DT_PARTIAL, outside, 0) : NULL;
    if (!y) return NULL;
    int64_t out = (int64_t)dt__last(y);
    if (b && (b->dtype != y->dtype || b->shape.nd != 1 || b->shape.d[0] != out))
        return dt__mismatch(
            "dt_row_linear", y, b, "the bias has one number for each of its columns");
    if (residual && (residual->dtype != y->dtype || !dt__same_shape(residual->shape, y->shape)))
        return dt__mismatch(
            "dt_row_linear", y, residual, "the residual lies outside, as the result");
    if (dt__row_add(y, b, residual) != DT_OK) return NULL;
    dt_record_desc d =
        dt__desc("dt_row_linear", sum, b, residual, dt__row_back, sizeof(dt__place_saved));
    return dt__place_record(y, d, comm, DT_PARTIAL, outside);
}

dt_tensor *dt_vocab_embedding(
    dt_tensor *table, dt_tensor *ids, dt_comm *comm, dt_placement outside) {
    if (dt_comm_size(comm) == 1 || !table) return dt_embedding(table, ids);
    table->ctx->brief++;
    dt_tensor *rows = dt_embedding(table, ids);
    table->ctx->brief--;
    return rows ? dt_redistribute(rows, comm, DT_PARTIAL, outside) : NULL;
}

static dt_status dt__vocab_gather(void *user, const double *mine, double *each, size_t count) {
    return dt_all_gather((dt_comm *)user, mine, each, count, DT_F64);
}

/* Which columns this rank has: `columns` of them, of `all`; parts in rank order. */
static dt_loss_desc dt__vocab_desc(dt_loss_desc d, dt_comm *comm, int64_t columns, int64_t all) {
    d.part.parts = dt_comm_size(comm);
    d.part.first = dt_comm_rank(comm) * columns;
    d.part.all = all;
    d.part.gather = dt__vocab_gather;
    d.part.user = comm;
    int64_t here = all - d.part.first;
    d.vocab = here < 0 ? 0 : here < columns ? here : columns;
    return d;
}

dt_tensor *dt_vocab_cross_entropy(
    dt_tensor *logits, dt_tensor *labels, double denominator, dt_loss_desc desc, dt_comm *comm) {
    if (dt_comm_size(comm) == 1 || !logits)
        return dt_cross_entropy_at(logits, labels, denominator, desc);
    int64_t columns = (int64_t)dt__last(logits), all = columns * dt_comm_size(comm);
    if (desc.vocab < 0 || desc.vocab > all) {
        dt_fail(logits->ctx, DT_ERR_ARG, "dt_vocab_cross_entropy(%s): vocab %lld of %lld columns",
            logits->name, (long long)desc.vocab, (long long)all);
        return NULL;
    }
    return dt_cross_entropy_at(logits, labels, denominator,
        dt__vocab_desc(desc, comm, columns, desc.vocab ? desc.vocab : all));
}

dt_tensor *dt_vocab_linear_cross_entropy(dt_tensor *x, dt_tensor *w, dt_tensor *labels,
    double denominator, dt_loss_desc desc, dt_comm *comm, dt_placement outside) {
    if (dt_comm_size(comm) == 1 || !w || w->shape.nd < 1)
        return dt_linear_cross_entropy(x, w, labels, denominator, desc);
    const dt_param_info *p = dt__owner(w)->param; /* of a view too */
    int64_t columns = w->shape.d[0];
    int64_t all = p && p->full.nd == w->shape.nd ? p->full.d[0] : columns * dt_comm_size(comm);
    if (desc.vocab < 0 || desc.vocab > all) {
        dt_fail(w->ctx, DT_ERR_ARG, "dt_vocab_linear_cross_entropy(%s): vocab %lld of %lld columns",
            w->name, (long long)desc.vocab, (long long)all);
        return NULL;
    }
    desc = dt__vocab_desc(desc, comm, columns, desc.vocab ? desc.vocab : all);
    return dt_linear_cross_entropy(dt_tp_enter(x, comm, outside), w, labels, denominator, desc);
}

dt_kv_groups dt_kv_split(dt_ctx *ctx, dt_comm *tp, int kv_heads) {
    int ranks = dt_comm_size(tp), me = dt_comm_rank(tp),
        copies = kv_heads > 0 ? ranks / kv_heads : 0;
    dt_kv_groups g = { tp, NULL, kv_heads };
    if (dt_error(ctx) != DT_OK || ranks == 1) return g;
    if (kv_heads < 1 || (kv_heads % ranks != 0 && ranks % kv_heads != 0)) {
        dt_fail(ctx, DT_ERR_ARG,
            "dt_kv_split: %d heads of keys and values over %d ranks: one must divide the other",
            kv_heads, ranks);
        return g;
    }
    g.heads = copies <= 1 ? kv_heads / ranks : 1;
    if (copies <= 1) return g;
    g.cut = kv_heads == 1 ? NULL : dt_comm_split(tp, me % copies, me, "kv heads");
    g.copies = kv_heads == 1 ? tp : dt_comm_split(tp, me / copies, me, "kv copies");
    dt_comm_set_axis(g.cut, DT_AXIS_TP);
    dt_comm_set_axis(g.copies, DT_AXIS_TP);
    return g;
}

/* ---- from one rank to all ---- */

/* One axis: rank 0 of comm has `in`; each rank gets its part as `out`. */
static dt_status dt__distribute_axis(dt__place_move m, dt_placement to) {
    int me = dt_comm_rank(m.comm), n = dt_comm_size(m.comm);
    size_t out = (size_t)dt_count(m.out_shape), bytes = out * dt_dtype_size(m.dtype);
    if (to.kind == DT_PLACEMENT_PARTIAL) return dt__move_keep_first(&m);
    if (to.kind != DT_PLACEMENT_SHARD) {
        if (me == 0 && dt__move_identity(&m) != DT_OK) return dt_error(m.ctx);
        return dt_broadcast(m.comm, m.out, out, m.dtype, 0);
    }
    if (me == 0 && out && !(m.scratch = dt_scratch(m.ctx, (size_t)n * bytes)))
        return dt_error(m.ctx);
    for (int r = 0; me == 0 && r < n; r++)
        if (dt__part_out(&m, m.in_shape, to.dim, r, (char *)m.scratch + (size_t)r * bytes, m.in) !=
            DT_OK)
            return dt_error(m.ctx);
    return dt_scatter(m.comm, m.scratch, m.out, out, m.dtype, 0);
}

/* Whether this rank is the first along the axes from `axis` on. */
static int dt__is_first(const dt_axis_place *axes, int axis, int n) {
    for (; axis < n; axis++)
        if (dt_comm_rank(axes[axis].comm) != 0) return 0;
    return 1;
}

/* Along the first axis the rank that has it gives to those that are first along all other axes;
   each of them gives along the second, and so on: every part is sent once. */
dt_tensor *dt_distribute(dt_ctx *ctx, dt_dtype dtype, dt_shape full, const void *host,
    const dt_axis_place *axes, int n) {
    dt_tensor *held = NULL;
    if (dt_error(ctx) != DT_OK) return NULL;
    if (n > 0 && !axes) {
        dt_fail(ctx, DT_ERR_ARG, "dt_distribute: its %d axes are NULL", n);
        return NULL;
    }
    if (dt__is_first(axes, 0, n)) {
        if (!host && dt_count(full))
            dt_fail(ctx, DT_ERR_ARG, "dt_distribute: the first rank gives no data");
        held = dt_input(ctx, dtype, full, host);
    }
    for (int i = 0; i < n && dt_error(ctx) == DT_OK; i++) {
        dt__place_move m;
        memset(&m, 0, sizeof m);
        m.ctx = ctx;
        m.comm = axes[i].comm;
        m.dtype = dtype;
        m.in_shape = full;
        full = dt__place_shape(full, dt_comm_size(m.comm), DT_REPLICATE, axes[i].place);
        if (full.nd < 0) {
            dt_fail(ctx, DT_ERR_SHAPE,
                "dt_distribute: %s cannot be cut along dimension %d over the %d ranks of '%s'",
                dt__shape_text(m.in_shape).s, axes[i].place.dim, dt_comm_size(m.comm),
                dt_comm_name(m.comm));
            return NULL;
        }
        if (dt_comm_size(m.comm) == 1 || !dt__is_first(axes, i + 1, n)) continue;
        m.in = held ? held->data : NULL;
        m.out_shape = full;
        held = dt_new(ctx, dtype, full);
        if (!held) return NULL;
        m.out = held->data;
        dt_status status = dt__distribute_axis(m, axes[i].place);
        if (status != DT_OK) dt_fail(ctx, status, "dt_distribute: over '%s'", dt_comm_name(m.comm));
    }
    return dt_error(ctx) == DT_OK ? held : NULL;
}

// ==== 14. Context parallelism: code =============================================================

int64_t dt_context_token(int kind, int64_t T, int c, int r, int64_t i) {
    if (c < 1 || T < c || r < 0 || r >= c || i < 0 || i >= T / c) return -1;
    if (kind != DT_CP_ZIGZAG) return r * (T / c) + i;
    int64_t piece = T / (2 * (int64_t)c);
    return i < piece ? r * piece + i : (2 * (int64_t)c - 1 - r) * piece + i - piece;
}

void dt_context_shard(
    int kind, int64_t B, int64_t T, dt_comm *comm, const int32_t *whole, int32_t *local) {
    int c = dt_comm_size(comm), me = dt_comm_rank(comm);
    int64_t mine = T / c;
    if (!whole || !local) return;
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < mine; i++)
            local[b * mine + i] = whole[b * T + dt_context_token(kind, T, c, me, i)];
}

dt_status dt_context_check(
    int kind, int64_t T, int c, int64_t heads, int64_t kv_heads, char *text, size_t text_bytes) {
    static const char *const names[] = { "ring", "zigzag", "allgather", "ulysses" };
    int64_t pieces = kind == DT_CP_ZIGZAG ? 2 * (int64_t)c : c;
    dt__saying t = dt__saying_in(text, text_bytes);
    if (kind < DT_CP_RING || kind > DT_CP_ULYSSES) {
        dt__say(&t, "kind %d of context parallelism", kind);
        return DT_ERR_ARG;
    }
    if (c < 2) return DT_OK;
    if (T < pieces || T % pieces != 0) {
        int64_t less = T < pieces ? 0 : T / pieces * pieces, more = dt__add_most(less, pieces);
        dt__say(&t,
            "%s over cp %d cuts a sequence into %lld equal pieces, which %lld tokens do not "
            "give; use %lld or %lld",
            names[kind], c, (long long)pieces, (long long)T, (long long)(less ? less : more),
            (long long)(less ? more : 2 * pieces));
        return DT_ERR_ARG;
    }
    if (kind != DT_CP_ULYSSES || (heads % c == 0 && (kv_heads % c == 0 || c % kv_heads == 0)))
        return DT_OK;
    dt__say(&t,
        "ulysses over cp %d exchanges tokens for heads, but a rank has %lld heads and %lld of "
        "keys and values: cp must divide the heads, and divide or be a multiple of the second; use "
        "ring, zigzag or "
        "allgather",
        c, (long long)heads, (long long)kv_heads);
    return DT_ERR_ARG;
}

/* The tokens of a part of a sequence: what its positions and documents lie between. */
typedef struct dt__part_span {
    int32_t first, last, low, high;
    int in_order;
} dt__part_span;

/* A sequence is cut into c * parts parts, rank r's being r * parts and, under ZIGZAG, the one
   behind it. */
struct dt_context {
    dt_ctx *ctx;
    dt_comm *comm;
    dt_context_desc desc;
    int given;            /* positions were */
    int parts;            /* of one rank */
    int64_t length;       /* tokens of a part */
    dt_tensor *positions; /* (B,T) in the order of the ranks, on the device */
    dt_tensor *documents; /* the same, or NULL */
    dt_tensor *mine[2];   /* (B,T/c) of them: this rank's, for ALLGATHER */
    dt__part_span *spans; /* (B, c * parts) */
};

/* This rank's columns of (B,T). */
static dt_tensor *dt__context_mine(const dt_context *k, dt_tensor *whole) {
    int64_t own = k->desc.tokens / dt_comm_size(k->comm);
    return whole ? dt_slice(whole, 1, dt_comm_rank(k->comm) * own, own) : NULL;
}

static void dt__context_span(
    const dt_context *k, const int32_t *positions, const int32_t *documents, dt__part_span *span) {
    *span = (dt__part_span){ positions[0], positions[0], 0, 0, 1 };
    if (documents) span->low = span->high = documents[0];
    for (int64_t i = 1; i < k->length; i++) {
        if (positions[i] < span->first) span->first = positions[i];
        if (positions[i] > span->last) span->last = positions[i];
        if (documents && documents[i] < span->low) span->low = documents[i];
        if (documents && documents[i] > span->high) span->high = documents[i];
        span->in_order &= positions[i] == positions[0] + i;
    }
}

/* Positions given, or those of dt_context_token. */
static dt_status dt__context_fill(dt_context *k) {
    int64_t B = k->desc.batch, T = k->desc.tokens, own = T / dt_comm_size(k->comm);
    size_t bytes = (size_t)(B * T) * sizeof(int32_t);
    /* never none */
    int32_t *at = (int32_t *)dt_alloc(k->ctx, DT_MEM_HOST, bytes + 1, "positions");
    if (!at) return dt_error(k->ctx);
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < T; i++)
            at[b * T + i] = k->desc.positions ? k->desc.positions[b * T + i]
                                              : (int32_t)dt_context_token(k->desc.kind, T,
                                                    dt_comm_size(k->comm), (int)(i / own), i % own);
    for (int64_t p = 0; p < B * T / k->length; p++)
        dt__context_span(k, at + p * k->length,
            k->desc.documents ? k->desc.documents + p * k->length : NULL, &k->spans[p]);
    k->positions = dt_input(k->ctx, DT_I32, DT_SHAPE(B, T), at);
    if (k->desc.documents)
        k->documents = dt_input(k->ctx, DT_I32, DT_SHAPE(B, T), k->desc.documents);
    dt_free(k->ctx, DT_MEM_HOST, at, bytes + 1);
    if (k->desc.kind == DT_CP_ALLGATHER) {
        k->mine[0] = dt__context_mine(k, k->positions);
        k->mine[1] = dt__context_mine(k, k->documents);
    }
    k->given = k->desc.positions != NULL;
    k->desc.positions = k->desc.documents = NULL; /* the caller's memory may go */
    return dt_error(k->ctx);
}

dt_context *dt_context_make(dt_ctx *ctx, dt_comm *comm, dt_context_desc d) {
    char why[300];
    int c = dt_comm_size(comm);
    if (dt_error(ctx) != DT_OK) return NULL;
    if (d.batch < 0 || d.tokens < 1) {
        dt_fail(ctx, DT_ERR_ARG, "dt_context_make: %lld sequences of %lld tokens",
            (long long)d.batch, (long long)d.tokens);
        return NULL;
    }
    if (c == 1) d.kind = DT_CP_RING; /* one part: plain attention */
    if (dt_context_check(d.kind, d.tokens, c, c, c, why, sizeof why) != DT_OK) {
        dt_fail(ctx, DT_ERR_SHAPE, "dt_context_make: %s", why);
        return NULL;
    }
    dt_context *k = (dt_context *)dt__meta(ctx, sizeof *k);
    if (!k) return NULL;
    k->ctx = ctx;
    k->comm = comm;
    k->desc = d;
    k->parts = d.kind == DT_CP_ZIGZAG ? 2 : 1;
    k->length = d.tokens / ((int64_t)c * k->parts);
    k->spans = (dt__part_span *)dt__meta(ctx, (size_t)(d.batch * c * k->parts) * sizeof *k->spans);
    return k->spans && dt__context_fill(k) == DT_OK ? k : NULL;
}

/* ---- the ring ---- */

/* What queries of one part see of the keys of another. */
enum {
    DT__SEES_NONE,
    DT__SEES_SOME,
    DT__SEES_ALL,
    DT__SEES_BEFORE /* causal, in order, the same part */
};

static int dt__part_sees(const dt_context *k, int64_t sequence, int64_t query, int64_t key) {
    const dt__part_span *spans = k->spans + sequence * dt_comm_size(k->comm) * k->parts;
    const dt__part_span *q = &spans[query], *of = &spans[key];
    int alike = q->low == q->high && of->low == of->high && q->low == of->low;
    if (q->high < of->low || of->high < q->low || (!k->desc.full && q->last < of->first))
        return DT__SEES_NONE;
    if (alike && (k->desc.full || q->first >= of->last)) return DT__SEES_ALL;
    return alike && query == key && q->in_order ? DT__SEES_BEFORE : DT__SEES_SOME;
}

/* One ring attention under way: of the forward if dout is NULL. Arrays are (B,parts,length,..) but
   lse, which is (B,parts,H,length). */
typedef struct dt__ring {
    const dt_context *k;
    const char *name;
    dt_dtype dtype;
    int64_t H, K, D;
    const char *q, *out, *dout;
    /* result: out of the forward, dq of the backward; wide, as dk and dv */
    char *result, *lse;
    void *work;
    size_t work_bytes;
} dt__ring;

/* The place of a part in an array with `width` numbers of `size` bytes for each token. */
static size_t dt__ring_at(
    const dt__ring *r, int64_t sequence, int64_t part, int64_t width, size_t size) {
    return (size_t)((sequence * r->k->parts + part) * r->k->length * width) * size;
}

static dt_attention_mask dt__ring_sight(
    const dt_context *k, int sees, int64_t sequence, int64_t query, int64_t key) {
    dt_attention_mask s = { sees == DT__SEES_BEFORE, NULL, NULL, NULL, NULL };
    if (sees != DT__SEES_SOME) return s;
    const int32_t *positions = (const int32_t *)k->positions->data + sequence * k->desc.tokens;
    s.causal = !k->desc.full;
    s.q_position = positions + query * k->length;
    s.k_position = positions + key * k->length;
    if (!k->documents) return s;
    const int32_t *documents = (const int32_t *)k->documents->data + sequence * k->desc.tokens;
    s.q_document = documents + query * k->length;
    s.k_document = documents + key * k->length;
    return s;
}

/* This rank's queries over the keys of rank `from`, whose arrays keys and values are. dk, dv: of
   the wide type, added to; of the backward only. */
static dt_status dt__ring_step(
    const dt__ring *r, int from, const char *keys, const char *values, char *dk, char *dv) {
    const dt_context *k = r->k;
    dt_ctx *ctx = k->ctx;
    size_t size = dt_dtype_size(r->dtype), wide = dt_dtype_size(dt__wide(r->dtype, 1));
    for (int64_t i = 0; i < k->desc.batch * k->parts * k->parts; i++) {
        int64_t s = i / (k->parts * k->parts), qp = i / k->parts % k->parts, kp = i % k->parts;
        int64_t query = dt_comm_rank(k->comm) * k->parts + qp, key = (int64_t)from * k->parts + kp;
        int sees = dt__part_sees(k, s, query, key);
        if (sees == DT__SEES_NONE) continue;
        size_t q_at = dt__ring_at(r, s, qp, r->H * r->D, 1),
               k_at = dt__ring_at(r, s, kp, r->K * r->D, 1);
        char *lse = r->lse + dt__ring_at(r, s, qp, r->H, wide);
        const char *q = r->q + q_at * size;
        double scale = 1.0 / sqrt((double)r->D);
        dt_attention_mask sight = dt__ring_sight(k, sees, s, query, key);
        if (!r->dout) {
            dt_attention_args a = { r->dtype, r->result + q_at * wide, lse, q, keys + k_at * size,
                values + k_at * size, 1, k->length, k->length, r->H, r->K, r->D, scale, sight, 1, 1,
                r->work, r->work_bytes };
            if (DT__KERNEL(ctx, r->name, attention, &a) != DT_OK) return dt_error(ctx);
        } else {
            dt_attention_back_args a = { r->dtype, r->result ? r->result + q_at * wide : NULL,
                dk ? dk + k_at * wide : NULL, dv ? dv + k_at * wide : NULL, r->dout + q_at * size,
                r->out + q_at * wide, lse, q, keys + k_at * size, values + k_at * size, 1,
                k->length, k->length, r->H, r->K, r->D, scale, sight, 1, 1, 1, 1, r->work,
                r->work_bytes };
            if (DT__KERNEL(ctx, r->name, attention_back, &a) != DT_OK) return dt_error(ctx);
        }
    }
    return DT_OK;
}

/* Two arrays to the right neighbour, and two from the left. */
enum { DT__RING_TAG = 1020 }; /* below what every MPI allows */
typedef struct dt__ring_hop {
    dt_work *work[4];
} dt__ring_hop;

static dt__ring_hop dt__ring_send(const dt_context *k, const void *a, const void *b, void *to_a,
    void *to_b, size_t count, dt_dtype dtype, int tag) {
    int c = dt_comm_size(k->comm), me = dt_comm_rank(k->comm), right = (me + 1) % c,
        left = (me + c - 1) % c;
    dt__ring_hop hop;
    hop.work[0] = dt_send_start(k->comm, a, count, dtype, right, DT__RING_TAG + tag);
    hop.work[1] = dt_send_start(k->comm, b, count, dtype, right, DT__RING_TAG + tag + 1);
    hop.work[2] = dt_recv_start(k->comm, to_a, count, dtype, left, DT__RING_TAG + tag);
    hop.work[3] = dt_recv_start(k->comm, to_b, count, dtype, left, DT__RING_TAG + tag + 1);
    return hop;
}

static dt_status dt__ring_wait(dt_ctx *ctx, dt__ring_hop *hop) {
    for (int i = 0; i < 4; i++) dt_wait(ctx, hop->work[i]);
    memset(hop, 0, sizeof *hop);
    return dt_error(ctx);
}

/* n arrays of `bytes` each, from one arena; NULL after a failure. */
static int dt__ring_room(dt_ctx *ctx, dt__arena **room, size_t bytes, int n, char **arrays) {
    *room = dt__arena_take(ctx, &ctx->brief_pool);
    bytes = (bytes + 63) / 64 * 64;
    char *all = *room ? (char *)dt__arena_alloc(ctx, *room, (size_t)n * bytes) : NULL;
    for (int i = 0; i < n; i++) arrays[i] = all ? all + (size_t)i * bytes : NULL;
    if (!all) dt__arena_give(ctx, &ctx->brief_pool, room);
    return all != NULL;
}

static dt__ring dt__ring_make(
    const char *name, dt_context *k, const dt_tensor *q, const dt_tensor *keys) {
    dt__ring r;
    memset(&r, 0, sizeof r);
    r.k = k;
    r.name = name;
    r.dtype = q->dtype;
    r.H = q->shape.d[2];
    r.K = keys->shape.d[2];
    r.D = q->shape.d[3];
    r.q = (const char *)q->data;
    r.work_bytes = dt__lent(k->ctx, dt_attention_work(k->length, r.D, r.dtype));
    r.work = dt_scratch(k->ctx, r.work_bytes);
    return r;
}

/* Step s computes with the keys and values of rank me - s, while they go on to the right. */
static dt_status dt__ring_forward(dt__ring *r, const dt_tensor *keys, const dt_tensor *values) {
    dt_ctx *ctx = r->k->ctx;
    int c = dt_comm_size(r->k->comm), me = dt_comm_rank(r->k->comm);
    const char *now[2] = { (const char *)keys->data, (const char *)values->data };
    char *buf[4];
    dt__arena *room = NULL;
    dt__ring_hop hop;
    if (!r->work || !dt__ring_room(ctx, &room, dt__bytes(keys), 4, buf)) return dt_error(ctx);
    for (int s = 0; s < c && dt_error(ctx) == DT_OK; s++) {
        char **next = &buf[s % 2 * 2];
        memset(&hop, 0, sizeof hop);
        if (s < c - 1)
            hop = dt__ring_send(
                r->k, now[0], now[1], next[0], next[1], (size_t)dt_count(keys->shape), r->dtype, 0);
        dt__ring_step(r, (me - s + c) % c, now[0], now[1], NULL, NULL);
        dt__ring_wait(ctx, &hop);
        now[0] = next[0];
        now[1] = next[1];
    }
    dt__arena_give(ctx, &ctx->brief_pool, &room);
    return dt_error(ctx);
}

/* Keys and values go round again. With them go their gradients: begun by the right neighbour of
   their owner, added to by each rank in turn, home after c - 1 hops; the owner adds its own. What
   comes is added when this rank's own part is computed, so that it too is under way meanwhile. */
static dt_status dt__ring_backward(
    dt__ring *r, const dt_tensor *keys, const dt_tensor *values, char *dk, char *dv) {
    dt_ctx *ctx = r->k->ctx;
    int c = dt_comm_size(r->k->comm), me = dt_comm_rank(r->k->comm);
    size_t count = (size_t)dt_count(keys->shape);
    dt_dtype wide = dt__wide(r->dtype, 1);
    const char *now[2] = { (const char *)keys->data, (const char *)values->data };
    char *buf[4], *sums[6];
    dt__arena *room[2] = { NULL, NULL };
    dt__ring_hop hop, back;
    memset(&back, 0, sizeof back);
    if (!r->work || !dt__ring_room(ctx, &room[0], dt__bytes(keys), 4, buf)) return dt_error(ctx);
    dt__ring_room(ctx, &room[1], count * dt_dtype_size(wide), 6, sums);
    for (int s = 0; s < c && dt_error(ctx) == DT_OK; s++) {
        char **next = &buf[s % 2 * 2], **mine = &sums[s % 2 * 2], **came = &sums[4];
        memset(&hop, 0, sizeof hop);
        if (s < c - 1)
            hop = dt__ring_send(r->k, now[0], now[1], next[0], next[1], count, r->dtype, 0);
        for (int i = 0; i < 2 && s > 0; i++) dt__fill(ctx, wide, mine[i], count, 0);
        dt__ring_step(r, (me - s + c) % c, now[0], now[1], s ? mine[0] : dk, s ? mine[1] : dv);
        dt__ring_wait(ctx, &hop);
        if (s > 1) dt__ring_wait(ctx, &back);
        for (int i = 0; i < 2 && s > 1; i++) dt__accumulate(ctx, wide, mine[i], came[i], count, 1);
        if (s > 0) back = dt__ring_send(r->k, mine[0], mine[1], came[0], came[1], count, wide, 2);
        now[0] = next[0];
        now[1] = next[1];
    }
    dt__ring_wait(ctx, &back);
    if (dk && dt_error(ctx) == DT_OK) dt__accumulate(ctx, wide, dk, sums[4], count, 1);
    if (dv && dt_error(ctx) == DT_OK) dt__accumulate(ctx, wide, dv, sums[5], count, 1);
    for (int i = 0; i < 2; i++) dt__arena_give(ctx, &ctx->brief_pool, &room[i]);
    return dt_error(ctx);
}

typedef struct dt__ring_saved {
    dt_context *k;
    dt_tensor *lse;
} dt__ring_saved;

/* An array of the wide type for tensor t: `own` where t's type is that, else room apart. */
static char *dt__ring_wide(const dt_tensor *t, void *own, dt__arena **room) {
    char *apart = NULL;
    if (!dt__narrow(t->dtype)) return (char *)own;
    dt__ring_room(t->ctx, room, (size_t)dt_count(t->shape) * sizeof(float), 1, &apart);
    return apart;
}

static dt_status dt__ring_back(dt_node *n) {
    const dt__ring_saved *saved = (const dt__ring_saved *)n->saved;
    dt_ctx *ctx = n->out->ctx;
    dt_dtype dtype = n->out->dtype, wide = dt__wide(dtype, 1);
    dt__arena *room[4] = { NULL, NULL, NULL, NULL };
    char *grad[3] = { NULL, NULL, NULL }, *sum[3] = { NULL, NULL, NULL };
    int accumulate[3] = { 0, 0, 0 };
    for (int i = 0; i < 3; i++) {
        size_t count = (size_t)dt_count(n->in[i]->shape);
        if (!dt_wants(n, i)) continue;
        grad[i] = (char *)dt_grad_raw(n, i, &accumulate[i]);
        sum[i] = dt__ring_wide(n->in[i], grad[i], &room[i]);
        if (sum[i] && (sum[i] != grad[i] || !accumulate[i])) dt__fill(ctx, wide, sum[i], count, 0);
    }
    dt__ring r = dt__ring_make(n->name, saved->k, n->in[0], n->in[1]);
    char *out = dt__ring_wide(n->out, n->out->data, &room[3]);
    dt_cast_args widen = { wide, dtype, out, n->out->data, (size_t)dt_count(n->out->shape), 0 };
    if (room[3] && out) DT__KERNEL(ctx, n->name, cast, &widen);
    r.out = out;
    r.dout = (const char *)n->out->grad;
    r.lse = (char *)saved->lse->data;
    r.result = sum[0];
    if (dt_error(ctx) == DT_OK) dt__ring_backward(&r, n->in[1], n->in[2], sum[1], sum[2]);
    for (int i = 0; i < 3; i++) {
        dt_cast_args a = { dtype, wide, grad[i], sum[i], (size_t)dt_count(n->in[i]->shape),
            accumulate[i] };
        if (dt_error(ctx) == DT_OK && sum[i] != grad[i]) DT__KERNEL(ctx, n->name, cast, &a);
    }
    for (int i = 0; i < 4; i++) dt__arena_give(ctx, &ctx->brief_pool, &room[i]);
    return dt_error(ctx);
}

static dt_tensor *dt__ring_attention(
    dt_tensor *q, dt_tensor *keys, dt_tensor *values, dt_context *k) {
    const char *op = "dt_context_attention";
    dt_ctx *ctx = q->ctx;
    dt_dtype wide = dt__wide(q->dtype, 1);
    dt__arena *room = NULL;
    dt_shape per_part = DT_SHAPE(k->desc.batch, k->parts, q->shape.d[2], k->length);
    dt_tensor *y = dt_new(ctx, q->dtype, q->shape), *lse = dt_new(ctx, wide, per_part);
    if (!y || !lse) return NULL;
    dt__ring r = dt__ring_make(op, k, q, keys);
    r.lse = (char *)lse->data;
    r.result = dt__ring_wide(y, y->data, &room);
    if (r.result && dt__fill(ctx, wide, r.result, (size_t)dt_count(y->shape), 0) == DT_OK &&
        dt__fill(ctx, wide, r.lse, (size_t)dt_count(per_part), -INFINITY) == DT_OK)
        dt__ring_forward(&r, keys, values);
    dt_cast_args a = { q->dtype, wide, y->data, r.result, (size_t)dt_count(y->shape), 0 };
    if (room && dt_error(ctx) == DT_OK) DT__KERNEL(ctx, op, cast, &a);
    dt__arena_give(ctx, &ctx->brief_pool, &room);
    dt__ring_saved *saved = (dt__ring_saved *)dt_record_saved(
        y, dt__desc(op, q, keys, values, dt__ring_back, sizeof *saved));
    if (saved) {
        saved->k = k;
        saved->lse = lse;
    }
    return dt_error(ctx) == DT_OK ? y : NULL;
}

/* ---- the other kinds, by dt_redistribute ---- */

static dt_tensor *dt__gathered_attention(
    dt_tensor *q, dt_tensor *keys, dt_tensor *values, dt_context *k) {
    keys = dt_redistribute(keys, k->comm, DT_SHARD(1), DT_COPY);
    values = dt_redistribute(values, k->comm, DT_SHARD(1), DT_COPY);
    dt_attn_desc d = { 0, k->desc.full, k->mine[0], k->positions, k->mine[1], k->documents, NULL };
    return dt_attention(q, keys, values, d);
}

/* (B,T,K,D) -> (B,T,n,D): each head n/K times. */
static dt_tensor *dt__repeat_heads(dt_tensor *x, int64_t n) {
    int64_t K = x->shape.d[2], D = x->shape.d[3], tokens = x->shape.d[0] * x->shape.d[1];
    size_t bytes = (size_t)(tokens * n) * sizeof(int32_t);
    dt_shape shape = x->shape;
    shape.d[2] = n;
    int32_t *from = (int32_t *)dt_alloc(x->ctx, DT_MEM_HOST, bytes + 1, "heads");
    for (int64_t i = 0; from && i < tokens * n; i++) from[i] = (int32_t)(i / n * K + i % n * K / n);
    dt_tensor *rows = from ? dt_input(x->ctx, DT_I32, DT_SHAPE(tokens * n), from) : NULL;
    dt_free(x->ctx, DT_MEM_HOST, from, bytes + 1);
    x = rows ? dt_gather_rows(dt_reshape(x, DT_SHAPE(tokens * K, D)), rows) : NULL;
    return x ? dt_reshape(x, shape) : NULL;
}

static dt_tensor *dt__exchanged_attention(
    dt_tensor *q, dt_tensor *keys, dt_tensor *values, dt_context *k) {
    int c = dt_comm_size(k->comm);
    if (keys->shape.d[2] < c) {
        keys = dt__repeat_heads(keys, c);
        values = dt__repeat_heads(values, c);
    }
    q = dt_redistribute(q, k->comm, DT_SHARD(1), DT_SHARD(2));
    keys = dt_redistribute(keys, k->comm, DT_SHARD(1), DT_SHARD(2));
    values = dt_redistribute(values, k->comm, DT_SHARD(1), DT_SHARD(2));
    dt_attn_desc d = { 0, k->desc.full, k->given ? k->positions : NULL, NULL, k->documents, NULL,
        NULL };
    dt_tensor *y = dt_attention(q, keys, values, d);
    return y ? dt_redistribute(y, k->comm, DT_SHARD(2), DT_SHARD(1)) : NULL;
}

dt_tensor *dt_context_attention(dt_tensor *q, dt_tensor *keys, dt_tensor *values, dt_context *k) {
    const char *op = "dt_context_attention";
    dt_ctx *ctx =
        q && keys && values ? dt__op_real(op, q, keys, values) : dt__missing(op, q, keys, values);
    char why[300];
    if (ctx && !k) dt_fail(ctx, DT_ERR_ARG, "%s(%s): the context is NULL", op, q->name);
    if (!ctx || !k || !dt__attention_fits(q, keys, values, 0)) return NULL;
    int c = dt_comm_size(k->comm);
    if (q->shape.d[0] != k->desc.batch || q->shape.d[1] * c != k->desc.tokens ||
        keys->shape.d[1] != q->shape.d[1]) {
        dt_fail(ctx, DT_ERR_SHAPE,
            "%s(%s, %s): %s and %s, but the context is of %lld sequences of %lld tokens over %d "
            "ranks",
            op, q->name, keys->name, dt__shape_text(q->shape).s, dt__shape_text(keys->shape).s,
            (long long)k->desc.batch, (long long)k->desc.tokens, c);
        return NULL;
    }
    if (c == 1) {
        dt_attn_desc d = { 0, k->desc.full, k->given ? k->positions : NULL, NULL, k->documents,
            NULL, NULL };
        return dt_attention(q, keys, values, d);
    }
    if (dt_context_check(k->desc.kind, k->desc.tokens, c, q->shape.d[2], keys->shape.d[2], why,
            sizeof why) != DT_OK) {
        dt_fail(ctx, DT_ERR_SHAPE, "%s(%s): %s", op, q->name, why);
        return NULL;
    }
    if (k->desc.kind == DT_CP_ALLGATHER) return dt__gathered_attention(q, keys, values, k);
    if (k->desc.kind == DT_CP_ULYSSES) return dt__exchanged_attention(q, keys, values, k);
    return dt__ring_attention(q, keys, values, k);
}

// ==== 15. Expert parallelism: code ==============================================================

static int dt__is_dry(const void *p);

/* Integers that steer a program, (n) of each rank in host memory, onto all: not counted, as
   dt_agree's. */
static dt_status dt__gather_ints(dt_comm *comm, const int32_t *mine, int32_t *all, size_t n) {
    dt__call call = dt__call_make(DT__AGREE, mine, all, n, DT_I32);
    call.host = 1;
    return dt__do(comm, call);
}

/* ---- the router: choices of whole sequences ---- */

/* A router under way. Arrays of tokens are (B,tokens,k): those of x; those inside the region of tp;
   those of whole sequences, rank after rank of cp. */
typedef struct dt__router {
    dt_ctx *ctx;
    dt_route_desc d;
    int64_t B, own, inside, whole, E, k;
    dt_comm *sp;     /* tp, if it cuts the tokens */
    int32_t *chosen; /* by x's tokens */
    int32_t *served; /* the same of whole sequences, -1 where there was no room */
    /* (B,E): how many choices of each whole sequence fell on each expert */
    int64_t *fell;
} dt__router;

/* (B,t,width) of each rank, joined along the tokens in rank order: (B,N t,width). NULL after a
   failure. */
static int32_t *dt__join_tokens(
    const dt__router *r, dt_comm *comm, int32_t *mine, int64_t t, int64_t width) {
    int64_t N = dt_comm_size(comm), run = t * width, count = r->B * run;
    if (N == 1) return mine;
    int32_t *all = (int32_t *)dt__meta(r->ctx, (size_t)(N * count) * sizeof *all);
    int32_t *out = (int32_t *)dt__meta(r->ctx, (size_t)(N * count) * sizeof *out);
    if (!all || !out || dt__gather_ints(comm, mine, all, (size_t)count) != DT_OK) return NULL;
    for (int64_t i = 0; i < N * r->B; i++) { /* rank i / B, its sequence i % B */
        int64_t to = (i % r->B * N + i / r->B) * run;
        if (run > 0) memcpy(out + to, all + i * run, (size_t)run * sizeof *out);
    }
    return out;
}

/* The place in its sequence of a token of x, where no places are given. */
static int64_t dt__own_place(const dt__router *r, int64_t i) {
    int64_t at = (r->sp ? dt_comm_rank(r->sp) : 0) * r->own + i;
    return dt_context_token(r->d.kind, r->whole, dt_comm_size(r->d.cp), dt_comm_rank(r->d.cp), at);
}

/* at (B,whole): which token of a whole sequence has each place. */
static dt_status dt__route_places(const dt__router *r, int32_t *at) {
    int32_t *places = NULL;
    int64_t T = r->whole;
    if (r->d.places) {
        int32_t *mine = (int32_t *)dt__meta(r->ctx, (size_t)(r->B * r->own) * sizeof *mine);
        if (mine) memcpy(mine, r->d.places, (size_t)(r->B * r->own) * sizeof *mine);
        if (mine) mine = dt__join_tokens(r, r->sp, mine, r->own, 1);
        if (mine) places = dt__join_tokens(r, r->d.cp, mine, r->inside, 1);
        if (!places) return dt_error(r->ctx);
    }
    for (int64_t i = 0; i < r->B * T; i++) at[i] = -1;
    for (int64_t i = 0; i < r->B * T; i++) {
        int64_t place = places ? places[i]
                               : dt_context_token(r->d.kind, T, dt_comm_size(r->d.cp),
                                     (int)(i % T / r->inside), i % T % r->inside);
        if (place < 0 || place >= T || at[i / T * T + place] >= 0)
            return dt_fail(r->ctx, DT_ERR_ARG,
                "dt_route: place %lld of token %lld in sequence %lld; each of 0 to %lld "
                "is of one token",
                (long long)place, (long long)(i % T), (long long)(i / T), (long long)T - 1);
        at[i / T * T + place] = (int32_t)(i % T);
    }
    return DT_OK;
}

/* Room of an expert in a sequence. What is over by rounding alone makes no more of it. */
static int64_t dt__route_room(const dt__router *r) {
    double room = ceil(r->d.capacity * (double)(r->k * r->whole) / (double)r->E - 1e-9);
    return room < 1 ? 1 : room < (double)r->whole ? (int64_t)room : r->whole;
}

/* One sequence: first choices before second ones, each in the order of places. room (E): what is
   left of it. */
static void dt__route_serve(
    const dt__router *r, int32_t *choices, const int32_t *at, int64_t *room) {
    int64_t most = dt__route_room(r);
    for (int64_t e = 0; e < r->E; e++) room[e] = most;
    for (int64_t i = 0; i < r->k * r->whole; i++) {
        int32_t *c = &choices[at[i % r->whole] * r->k + i / r->whole];
        if (room[*c] > 0)
            room[*c]--;
        else
            *c = -1;
    }
}

/* Joins the choices of whole sequences, where they are needed; then counts, then drops. */
static dt_status dt__route_sequences(dt__router *r) {
    dt_ctx *ctx = r->ctx;
    int32_t *inside = dt__join_tokens(r, r->sp, r->chosen, r->own, r->k), *all = inside, *at;
    int whole = r->d.capacity > 0 || r->d.balance > 0;
    r->served = inside;
    if (!inside || !whole) return dt_error(ctx);
    all = dt__join_tokens(r, r->d.cp, inside, r->inside, r->k);
    size_t count = (size_t)(r->B * r->whole * r->k);
    r->fell = (int64_t *)dt__meta(ctx, (size_t)(r->B * r->E) * sizeof *r->fell);
    r->served = (int32_t *)dt__meta(ctx, count * sizeof *r->served);
    at = (int32_t *)dt__meta(ctx, (size_t)(r->B * r->whole) * sizeof *at);
    int64_t *room = (int64_t *)dt__meta(ctx, (size_t)r->E * sizeof *room);
    if (!all || !r->fell || !r->served || !at || !room) return dt_error(ctx);
    if (count > 0) memcpy(r->served, all, count * sizeof *all);
    for (size_t i = 0; i < count; i++) r->fell[(int64_t)i / (r->whole * r->k) * r->E + all[i]]++;
    if (r->d.capacity > 0 && dt__route_places(r, at) != DT_OK) return dt_error(ctx);
    for (int64_t b = 0; b < r->B && r->d.capacity > 0; b++)
        dt__route_serve(r, r->served + b * r->whole * r->k, at + b * r->whole, room);
    /* of each sequence, this rank of cp's */
    int64_t run = r->inside * r->k, first = dt_comm_rank(r->d.cp) * run;
    for (int64_t b = 0; b < r->B && run > 0; b++)
        memmove(r->served + b * run, r->served + b * r->whole * r->k + first,
            (size_t)run * sizeof *r->served);
    return DT_OK;
}

/* ---- the router: probabilities, choices, gates ---- */

static dt_status dt__cast_again(dt_node *n) {
    dt_tensor *x = n->in[0], *y = n->out;
    dt_cast_args a = { y->dtype, x->dtype, y->data, x->data, (size_t)dt_count(x->shape), 0 };
    return DT__KERNEL(x->ctx, n->name, cast, &a);
}

/* x in the type that it is computed with. A copy of activations goes with its block, and is made
   again. */
static dt_tensor *dt__widened(dt_tensor *x, int brief) {
    dt_ctx *ctx = x->ctx;
    if (!dt__narrow(x->dtype)) return x;
    brief = brief && x->needs_grad && !ctx->no_grad; /* else nobody records how to make it again */
    ctx->brief += brief;
    dt_tensor *y = dt_cast(x, DT_F32);
    ctx->brief -= brief;
    if (y && brief && y->maker) y->maker->remake = dt__cast_again;
    return y;
}

/* The k best of each token. Numbers of a dry run are 0: there the choices are spread evenly. */
static dt_status dt__route_choose(dt__router *r, dt_tensor *probability) {
    dt_ctx *ctx = r->ctx;
    dt_tensor *index = NULL;
    int no_grad = ctx->no_grad;
    int64_t n = r->B * r->own;
    r->chosen = (int32_t *)dt__meta(ctx, (size_t)(n * r->k) * sizeof *r->chosen);
    if (!r->chosen) return dt_error(ctx);
    ctx->no_grad = 1;
    if (r->d.bias) probability = dt_add(probability, r->d.bias);
    if (probability) dt_topk(probability, (int)r->k, &index);
    ctx->no_grad = no_grad;
    if (dt_error(ctx) != DT_OK || dt_read(index, r->chosen) != DT_OK) return dt_error(ctx);
    for (int64_t i = 0; i < n * r->k && dt__is_dry(index->data); i++) {
        int64_t t = i / r->k, place = r->d.places ? r->d.places[t] : dt__own_place(r, t % r->own);
        r->chosen[i] = (int32_t)((place * r->k + i % r->k) % r->E);
    }
    for (int64_t i = 0; i < n * r->k; i++)
        if (r->chosen[i] < 0 || r->chosen[i] >= r->E)
            return dt_fail(ctx, DT_ERR_NUMERIC,
                "dt_route: token %lld has no %lld largest of %lld probabilities",
                (long long)(i / r->k), (long long)r->k, (long long)r->E);
    return DT_OK;
}

/* (B,T',k): the probabilities of the choices; of several, divided by their sum. With a bias all may
   be 0. */
static dt_tensor *dt__route_gates(const dt__router *r, dt_tensor *probability) {
    int64_t n = r->B * r->own;
    int32_t *place = (int32_t *)dt__meta(r->ctx, (size_t)(n * r->k) * sizeof *place);
    if (!place) return NULL;
    for (int64_t i = 0; i < n * r->k; i++) place[i] = (int32_t)(i / r->k * r->E) + r->chosen[i];
    dt_tensor *at = dt_input(r->ctx, DT_I32, DT_SHAPE(r->B, r->own, r->k), place);
    dt_tensor *one = at ? dt_gather_rows(dt_reshape(probability, DT_SHAPE(n * r->E, 1)), at) : NULL;
    dt_tensor *gates = one ? dt_reshape(one, DT_SHAPE(r->B, r->own, r->k)) : NULL;
    if (!gates || r->k == 1) return gates;
    dt_tensor *sum = dt_reshape(dt_sum_over(gates, 2), DT_SHAPE(r->B, r->own, 1));
    if (sum && r->d.bias) sum = dt_affine(sum, 1, 1e-20);
    return sum ? dt_div(gates, sum) : NULL;
}

/* ---- the router: side losses, counts ---- */

/* This rank's part of the mean over sequences of E sum over e of f P: sum of P times E f / (T
   sequences). */
static dt_tensor *dt__route_balance(const dt__router *r, dt_tensor *probability) {
    dt_dtype dtype = probability->dtype;
    void *factor = dt__meta(r->ctx, (size_t)(r->B * r->E) * dt_dtype_size(dtype));
    double T = (double)r->whole, all = (double)r->k * T * T * (double)r->d.sequences;
    if (!factor) return NULL;
    for (int64_t i = 0; i < r->B * r->E; i++)
        dt__set_number(dtype, factor, (size_t)i, (double)r->E * (double)r->fell[i] / all);
    dt_tensor *factors = dt_input(r->ctx, dtype, DT_SHAPE(r->B, r->E), factor);
    dt_tensor *sum = factors ? dt_sum_over(probability, 1) : NULL;
    return sum ? dt_sum_over(dt_mul(sum, factors), DT_ALL) : NULL;
}

/* This rank's part of the mean over tokens of the square of log(sum of e^logits). */
static dt_tensor *dt__route_z(const dt__router *r, dt_tensor *logits) {
    dt_shape rows = DT_SHAPE(r->B, r->own, 1);
    dt_tensor *most = dt_max_over(logits, 2), *rest = NULL, *lse = NULL;
    most = most ? dt_reshape(most, rows) : NULL;
    if (most) rest = dt_sum_over(dt_exp(dt_sub(logits, most)), 2);
    if (rest) lse = dt_add(dt_reshape(dt_ln(rest), rows), most);
    return lse ? dt_affine(dt_sum_over(dt_mul(lse, lse), DT_ALL),
                     1 / ((double)r->d.sequences * (double)r->whole), 0)
               : NULL;
}

/* Attaches a side loss; *sum counts it. */
static dt_status dt__route_attach(
    const dt__router *r, dt_tensor *x, dt_tensor *loss, double weight, double *sum) {
    if (loss && dt_loss(x, loss, weight) && sum) *sum += dt_item(loss);
    return dt_error(r->ctx);
}

static dt_status dt__route_losses(
    const dt__router *r, dt_tensor *x, dt_tensor *logits, dt_tensor *probability) {
    dt_route_counts *count = dt_recomputing(r->ctx) ? NULL : r->d.counts;
    if (r->d.balance > 0)
        dt__route_attach(
            r, x, dt__route_balance(r, probability), r->d.balance, count ? &count->balance : NULL);
    if (r->d.z > 0)
        dt__route_attach(r, x, dt__route_z(r, logits), r->d.z, count ? &count->z : NULL);
    return dt_error(r->ctx);
}

/* Of x's own tokens, which inside are those of this rank of sp. */
static void dt__route_count(const dt__router *r) {
    dt_route_counts *count = r->d.counts;
    int64_t run = r->own * r->k, first = (r->sp ? dt_comm_rank(r->sp) : 0) * run;
    if (!count || dt_recomputing(r->ctx)) return;
    count->choices += (double)(r->B * run);
    for (int64_t i = 0; i < r->B * run; i++) {
        if (count->experts) count->experts[r->chosen[i]]++;
        count->dropped += r->served[i / run * r->inside * r->k + first + i % run] < 0;
    }
}

/* What does not fit, or NULL. One rule a line. */
static const char *dt__route_wrong(const dt__router *r, const dt_tensor *x, const dt_tensor *w) {
    const dt_route_desc *d = &r->d;
    const dt_tensor *bias = d->bias;
    if (x->shape.nd != 3 || w->shape.nd != 2 || x->shape.d[2] != w->shape.d[1])
        return "x (B,T,C) and w (E,C) are needed";
    if (dt__wide(x->dtype, 1) != dt__wide(w->dtype, 1) || w->dtype == DT_I32)
        return "types do not go together";
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
    if (r->B * r->whole > INT32_MAX / (r->E > 0 ? r->E : 1)) return "too many tokens at once";
    return NULL;
}

static dt_status dt__route_check(const dt__router *r, const dt_tensor *x, const dt_tensor *w) {
    char text[300];
    const char *why = dt__route_wrong(r, x, w);
    if (why)
        return dt_fail(r->ctx, DT_ERR_SHAPE,
            "dt_route(%s, %s): %s %s and %s %s, k %lld, capacity %g, balance %g, "
            "z %g, %lld sequences: %s",
            x->name, w->name, dt_dtype_name(x->dtype), dt__shape_text(x->shape).s,
            dt_dtype_name(w->dtype), dt__shape_text(w->shape).s, (long long)r->k, r->d.capacity,
            r->d.balance, r->d.z, (long long)r->d.sequences, why);
    int c = dt_comm_size(r->d.cp);
    if (dt_context_check(r->d.kind, r->whole, c, c, c, text, sizeof text) == DT_OK) return DT_OK;
    return dt_fail(r->ctx, DT_ERR_SHAPE, "dt_route(%s): %s", x->name, text);
}

static dt__router dt__router_of(const dt_tensor *x, const dt_tensor *w, dt_route_desc d) {
    dt__router r;
    memset(&r, 0, sizeof r);
    r.ctx = x->ctx;
    r.d = d;
    if (dt_comm_size(d.cp) == 1) r.d.kind = DT_CP_RING; /* whole sequences are in order */
    r.sp = d.outside.kind == DT_PLACEMENT_SHARD && dt_comm_size(d.tp) > 1 ? d.tp : NULL;
    r.B = x->shape.d[0];
    r.own = x->shape.nd > 1 ? x->shape.d[1] : 0;
    r.inside = r.own * dt_comm_size(r.sp);
    r.whole = r.inside * dt_comm_size(d.cp);
    r.E = w->shape.d[0];
    r.k = d.k ? d.k : 1;
    return r;
}

/* What the region sees: its tokens' choices and gates. */
static dt_routing *dt__route_enter(const dt__router *r, dt_tensor *gates) {
    dt_routing *out = (dt_routing *)dt__meta(r->ctx, sizeof *out);
    gates = dt_redistribute(gates, r->d.tp, r->sp ? DT_SHARD(1) : DT_REPLICATE, DT_COPY);
    if (!out || !gates) return NULL;
    out->batch = r->B;
    out->tokens = r->inside;
    out->experts = r->E;
    out->k = r->k;
    out->gates = gates;
    out->choices = r->served;
    return out;
}

dt_routing *dt_route(dt_tensor *x, dt_tensor *w, dt_route_desc d) {
    const char *op = "dt_route";
    dt_ctx *ctx = x && w ? dt__op_real(op, x, w, d.bias) : dt__missing(op, x, w, d.bias);
    if (!ctx) return NULL;
    if (x->shape.nd < 1 || w->shape.nd < 1) {
        dt__mismatch(op, x, w, "x (B,T,C) and w (E,C) are needed");
        return NULL;
    }
    dt__router r = dt__router_of(x, w, d);
    if (dt__route_check(&r, x, w) != DT_OK) return NULL;
    dt_tensor *wide = dt__widened(x, 1), *router = dt__widened(w, 0);
    dt_tensor *logits = wide && router ? dt_linear(wide, router, NULL) : NULL; /* (B,T',E) */
    dt_tensor *probability = logits ? dt_softmax(logits) : NULL;
    if (!probability || dt__route_choose(&r, probability) != DT_OK) return NULL;
    dt_tensor *gates = dt__route_gates(&r, probability);
    if (!gates || dt__route_sequences(&r) != DT_OK) return NULL;
    if (dt__route_losses(&r, x, logits, probability) != DT_OK) return NULL;
    dt__route_count(&r);
    return dt__route_enter(&r, gates);
}

dt_status dt_route_balance(
    dt_tensor *bias, double *counts, double rate, dt_comm *const *groups, int n) {
    double total = 0, value[1];
    if (!bias || dt_error(bias->ctx) != DT_OK) return bias ? dt_error(bias->ctx) : DT_ERR_ARG;
    dt_ctx *ctx = bias->ctx;
    size_t E = (size_t)dt_count(bias->shape), bytes = E * sizeof value;
    if (!counts || (bias->dtype != DT_F32 && bias->dtype != DT_F64) ||
        !(rate >= 0 && rate < HUGE_VAL))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_route_balance(%s): %s bias, %s, rate %g; use f32 or f64, counts of each "
            "expert, and a rate of 0 or more",
            bias->name, dt_dtype_name(bias->dtype), counts ? "counts" : "no counts", rate);
    for (int g = 0; g < n; g++)
        if (dt_sum_doubles(groups[g], counts, E) != DT_OK) return dt_error(ctx);
    void *host = dt_alloc(ctx, DT_MEM_HOST, bytes, "the bias of a router");
    for (size_t e = 0; e < E; e++) total += counts[e];
    if (host && dt_read(bias, host) == DT_OK) {
        /* mean - count has the sign of total - E count, which is exact */
        for (size_t e = 0; e < E; e++) {
            double more = total - (double)E * counts[e], sign = (double)((more > 0) - (more < 0));
            dt__set_number(bias->dtype, host, e, dt__number(bias->dtype, host, e) + rate * sign);
        }
        dt_write(bias, host);
    }
    dt_free(ctx, DT_MEM_HOST, host, bytes);
    return dt_error(ctx);
}

/* ---- dispatch and combine: one exchange, there and back ---- */

/* Rows are the choices that were not dropped. A sender has them ordered by expert, then token; so
   what one rank sends to another is one run, and what it receives is ordered by source rank, then
   expert, then token. */
typedef struct dt__exchange {
    dt_comm *ep;
    int ranks;
    int64_t tokens, k, sent, received;
    size_t *to, *from;   /* (ranks) rows to and from each, */
    size_t *send, *recv; /* and the same in elements, of the exchange that runs */
    /* (sent) i32: row i's token, and token k + j for the j-th choice */
    dt_tensor *token, *choice;
    /* (k,tokens) i32: where the j-th choice of a token is among those sent, or -1 */
    dt_tensor *row;
    /* (received) i32: experts' row i among those received; and the other way round */
    dt_tensor *regroup, *ungroup;
} dt__exchange;

/* Row i of out is row at[i] of in (held,width), or zeros for -1. */
static dt_status dt__rows_get(const char *op, dt_dtype dtype, void *out, const void *in,
    int64_t held, const dt_tensor *at, int64_t first, int64_t rows, int64_t width) {
    dt_embedding_args a = { dtype, out, in, (const int32_t *)at->data + first, (size_t)rows,
        (size_t)width, 0, held, held, 1 };
    return rows * width > 0 ? DT__KERNEL(at->ctx, op, embedding, &a) : DT_OK;
}

/* Row at[i] of out (held,width) (+)= row i of in, i ascending. work: 4 held width bytes where dtype
   is bf16 or f16. */
static dt_status dt__rows_add(const char *op, dt_dtype dtype, void *out, int64_t held,
    const void *in, const dt_tensor *at, int64_t width, int accumulate, void *work) {
    size_t work_bytes = dt__narrow(dtype) ? (size_t)(held * width) * sizeof(float) : 0;
    dt_embedding_back_args a = { dtype, out, in, (const int32_t *)at->data,
        (size_t)dt_count(at->shape), (size_t)width, 0, held, accumulate, 0,
        work_bytes ? work : NULL, work_bytes, 1 };
    return held * width > 0 ? DT__KERNEL(at->ctx, op, embedding_back, &a) : DT_OK;
}

/* out (rows,width) (+)= in times one number for each row, `step` apart; for step 0 times an array
   of the same size. */
static dt_status dt__rows_times(dt_ctx *ctx, const char *op, dt_dtype dtype, void *out,
    const void *in, const void *factor, int64_t step, int64_t rows, int64_t width, int accumulate) {
    dt_binary_args a;
    memset(&a, 0, sizeof a);
    a.dtype = dtype;
    a.op = DT_MUL;
    a.out = out;
    a.a = in;
    a.b = factor;
    a.shape = DT_SHAPE(rows, width);
    a.stride_a[0] = width;
    a.stride_a[1] = 1;
    a.stride_b[0] = step ? step : width;
    a.stride_b[1] = step == 0;
    a.accumulate = accumulate;
    return rows * width > 0 ? DT__KERNEL(ctx, op, binary, &a) : DT_OK;
}

/* in as the wide type: itself, or in `room`. */
static const void *dt__rows_wide(
    dt_ctx *ctx, const char *op, dt_dtype dtype, const void *in, void *room, int64_t count) {
    dt_cast_args a = { DT_F32, dtype, room, in, (size_t)count, 0 };
    if (!dt__narrow(dtype)) return in;
    DT__KERNEL(ctx, op, cast, &a);
    return room;
}

/* Rows to the ranks of their experts, or home. */
static dt_status dt__rows_move(
    const dt__exchange *e, int home, const void *in, void *out, int64_t width, dt_dtype dtype) {
    for (int r = 0; r < e->ranks; r++) {
        e->send[r] = (home ? e->from : e->to)[r] * (size_t)width;
        e->recv[r] = (home ? e->to : e->from)[r] * (size_t)width;
    }
    return dt_all_to_all_v(e->ep, in, e->send, out, e->recv, dtype);
}

/* Pieces of one scratch, of a multiple of 64 bytes each; 0 after a failure. */
static int dt__carve(dt_ctx *ctx, const size_t *bytes, char **piece, int n) {
    size_t all = 64, at = 0;
    for (int i = 0; i < n; i++) all += (bytes[i] + 63) / 64 * 64;
    char *p = (char *)dt_scratch(ctx, all);
    for (int i = 0; i < n; i++) {
        piece[i] = p ? p + at : NULL;
        at += (bytes[i] + 63) / 64 * 64;
    }
    return p != NULL;
}

/* An index on the device. */
static dt_tensor *dt__exchange_index(dt_ctx *ctx, const int32_t *host, int64_t n) {
    return dt_input(ctx, DT_I32, DT_SHAPE(n), host);
}

/* Which rows this rank sends. count (E): how many go to each expert. */
static dt_status dt__exchange_send(
    dt__exchange *e, const dt_routing *r, int32_t *count, dt_ctx *ctx) {
    int64_t all = e->tokens * e->k;
    int32_t *work = (int32_t *)dt__meta(ctx, (size_t)(3 * all + r->experts + 1) * sizeof *work);
    if (!work) return dt_error(ctx);
    int32_t *token = work, *choice = token + all, *row = choice + all, *next = row + all;
    for (int64_t i = 0; i < all; i++)
        if (r->choices[i] >= 0) count[r->choices[i]]++;
    for (int64_t x = 0; x < r->experts; x++) {
        next[x + 1] = next[x] + count[x];
        e->to[x / r->held] += (size_t)count[x];
    }
    e->sent = next[r->experts];
    for (int64_t i = 0; i < all; i++) {
        int32_t *at = &row[i % e->k * e->tokens + i / e->k];
        *at = r->choices[i] < 0 ? -1 : next[r->choices[i]]++;
        if (*at < 0) continue;
        token[*at] = (int32_t)(i / e->k);
        choice[*at] = (int32_t)i;
    }
    e->token = dt__exchange_index(ctx, token, e->sent);
    e->choice = dt__exchange_index(ctx, choice, e->sent);
    e->row = dt__exchange_index(ctx, row, all);
    return dt_error(ctx);
}

/* Which rows it receives. all (ranks,E): the counts of all ranks. */
static dt_status dt__exchange_receive(
    dt__exchange *e, dt_routing *r, const int32_t *all, dt_ctx *ctx) {
    int64_t first = dt_comm_rank(e->ep) * r->held, at = 0;
    for (int64_t i = 0; i < e->ranks * r->held; i++) {
        int32_t n = all[i / r->held * r->experts + first + i % r->held];
        e->from[i / r->held] += (size_t)n;
        r->counts[i % r->held] += n;
        e->received += n;
    }
    r->rows = e->received;
    if (e->received > INT32_MAX)
        return dt_fail(
            ctx, DT_ERR_SHAPE, "dt_dispatch: %lld rows for one rank", (long long)e->received);
    if (e->ranks == 1) return DT_OK;
    int32_t *work = (int32_t *)dt__meta(ctx, (size_t)(2 * e->received) * sizeof *work);
    /* of an expert's next row */
    int64_t *place = (int64_t *)dt__meta(ctx, (size_t)r->held * sizeof *place);
    if (!work || !place) return dt_error(ctx);
    int32_t *regroup = work, *ungroup = work + e->received;
    for (int64_t x = 1; x < r->held; x++) place[x] = place[x - 1] + r->counts[x - 1];
    for (int64_t i = 0; i < e->ranks * r->held; i++) /* in the order in which they arrive */
        for (int32_t n = all[i / r->held * r->experts + first + i % r->held]; n > 0; n--, at++) {
            int64_t to = place[i % r->held]++;
            regroup[to] = (int32_t)at;
            ungroup[at] = (int32_t)to;
        }
    e->regroup = dt__exchange_index(ctx, regroup, e->received);
    e->ungroup = dt__exchange_index(ctx, ungroup, e->received);
    return dt_error(ctx);
}

/* r->exchange. [collective: ep] */
static dt_status dt__exchange_make(dt_ctx *ctx, dt_routing *r, dt_comm *ep) {
    size_t N = (size_t)dt_comm_size(ep), E = (size_t)r->experts;
    dt__exchange *e = (dt__exchange *)dt__meta(ctx, sizeof *e);
    r->held = r->experts / (int64_t)N;
    r->counts = (int64_t *)dt__meta(ctx, (size_t)r->held * sizeof *r->counts);
    int32_t *count = (int32_t *)dt__meta(ctx, (N + 1) * E * sizeof *count);
    size_t *rows = (size_t *)dt__meta(ctx, 4 * N * sizeof *rows);
    if (!e || !r->counts || !count || !rows) return dt_error(ctx);
    e->ep = ep;
    e->ranks = (int)N;
    e->tokens = r->batch * r->tokens;
    e->k = r->k;
    e->to = rows;
    e->from = rows + N;
    e->send = rows + 2 * N;
    e->recv = rows + 3 * N;
    r->exchange = e;
    if (dt__exchange_send(e, r, count, ctx) != DT_OK) return dt_error(ctx);
    dt_status status = dt__gather_ints(ep, count, count + E, E);
    return status == DT_OK ? dt__exchange_receive(e, r, count + E, ctx) : dt_error(ctx);
}

typedef struct dt__exchange_saved {
    const dt__exchange *e;
    dt_tensor *home;
} dt__exchange_saved;

/* dx: the sum of its rows' gradients, which come home. */
static dt_status dt__dispatch_back(dt_node *n) {
    const dt__exchange *e = ((const dt__exchange_saved *)n->saved)->e;
    dt_tensor *x = n->in[0], *y = n->out;
    dt_ctx *ctx = y->ctx;
    int64_t C = (int64_t)dt__last(x);
    size_t size = dt_dtype_size(x->dtype), wide = dt__narrow(x->dtype) ? sizeof(float) : 0;
    int accumulate = 0, far = e->ranks > 1;
    size_t bytes[3] = { (size_t)(e->tokens * C) * wide, far ? (size_t)(e->received * C) * size : 0,
        far ? (size_t)(e->sent * C) * size : 0 };
    char *piece[3];
    void *dx = dt_grad_raw(n, 0, &accumulate), *home = y->grad;
    if (!dx || !dt__carve(ctx, bytes, piece, 3)) return dt_error(ctx);
    if (far) {
        if (dt__rows_get(n->name, x->dtype, piece[1], y->grad, e->received, e->ungroup, 0,
                e->received, C) != DT_OK)
            return dt_error(ctx);
        home = piece[2];
        dt_status status = dt__rows_move(e, 1, piece[1], home, C, x->dtype);
        if (status != DT_OK) return status;
    }
    return dt__rows_add(n->name, x->dtype, dx, e->tokens, home, e->token, C, accumulate, piece[0]);
}

/* Rows of x onto those of y. */
static dt_status dt__dispatch_rows(const dt__exchange *e, const dt_tensor *x, dt_tensor *y) {
    const char *op = "dt_dispatch";
    int64_t C = (int64_t)dt__last(x);
    size_t size = dt_dtype_size(x->dtype),
           bytes[2] = { (size_t)(e->sent * C) * size, (size_t)(e->received * C) * size };
    char *piece[2];
    if (e->ranks == 1)
        return dt__rows_get(op, x->dtype, y->data, x->data, e->tokens, e->token, 0, e->sent, C);
    if (!dt__carve(x->ctx, bytes, piece, 2)) return dt_error(x->ctx);
    dt_status status =
        dt__rows_get(op, x->dtype, piece[0], x->data, e->tokens, e->token, 0, e->sent, C);
    if (status == DT_OK) status = dt__rows_move(e, 0, piece[0], piece[1], C, x->dtype);
    return status == DT_OK ? dt__rows_get(op, x->dtype, y->data, piece[1], e->received, e->regroup,
                                 0, e->received, C)
                           : status;
}

/* The context, if the routing is one and an op may run on x. */
static dt_ctx *dt__routed(
    const char *op, dt_tensor *x, const dt_routing *r, dt_tensor *a, dt_tensor *b) {
    dt_ctx *ctx = x ? dt__op_real(op, x, a, b) : dt__missing(op, r ? r->gates : NULL, a, b);
    if (!ctx || r) return ctx;
    dt_fail(ctx, DT_ERR_ARG, "%s(%s): the routing is NULL", op, x->name);
    return NULL;
}

dt_tensor *dt_dispatch(dt_tensor *x, dt_routing *r, dt_comm *ep) {
    const char *op = "dt_dispatch";
    dt_ctx *ctx = dt__routed(op, x, r, NULL, NULL);
    int N = dt_comm_size(ep);
    if (!ctx) return NULL;
    if (x->shape.nd != 3 || x->shape.d[0] != r->batch || x->shape.d[1] != r->tokens) {
        dt_fail(ctx, DT_ERR_SHAPE, "%s(%s): %s, but %lld sequences of %lld tokens were routed", op,
            x->name, dt__shape_text(x->shape).s, (long long)r->batch, (long long)r->tokens);
        return NULL;
    }
    if (r->experts % N != 0) {
        dt_fail(ctx, DT_ERR_SHAPE, "%s(%s): %lld experts over ep %d; use a multiple of %d", op,
            x->name, (long long)r->experts, N, N);
        return NULL;
    }
    if (dt__exchange_make(ctx, r, ep) != DT_OK) return NULL;
    dt_tensor *y = dt__new_named(ctx, x->dtype, DT_SHAPE(r->rows, x->shape.d[2]), op);
    if (!y || dt__dispatch_rows(r->exchange, x, y) != DT_OK) return NULL;
    dt__exchange_saved *saved = (dt__exchange_saved *)dt_record_saved(
        y, dt__desc(op, x, NULL, NULL, dt__dispatch_back, sizeof *saved));
    if (saved) {
        saved->e = r->exchange;
        y->maker->blind = 1; /* what dt_tp_enter has gathered need not be gathered again */
    }
    return dt_error(ctx) == DT_OK ? y : NULL;
}

/* Of row i, the j-th choice of token t: its gradient is gate (t,j) times dy of t, that of the gate
   dy times the row. */
static dt_status dt__combine_back(dt_node *n) {
    const dt__exchange_saved *saved = (const dt__exchange_saved *)n->saved;
    const dt__exchange *e = saved->e;
    dt_tensor *rows = n->in[0], *gates = n->in[1], *y = n->out;
    dt_ctx *ctx = y->ctx;
    const char *op = n->name;
    dt_dtype dtype = y->dtype, wide = gates->dtype;
    int64_t O = (int64_t)dt__last(y), choices = e->tokens * e->k;
    size_t size = dt_dtype_size(dtype), real = dt_dtype_size(wide), sent = (size_t)(e->sent * O);
    size_t received = (size_t)(e->received * O), bytes[7] = { sent * size, sent * real, sent * real,
        sent * real, received * size, (size_t)e->sent * real, received * size };
    char *dy, *product, *room[2], *piece[7];
    int accumulate = 0;
    if (!dt__carve(ctx, bytes, piece, 7)) return dt_error(ctx);
    dy = piece[0];
    product = piece[1];
    room[0] = piece[2];
    room[1] = piece[3];
    dt__rows_get(op, dtype, dy, y->grad, e->tokens, e->token, 0, e->sent, O);
    const void *dyw = dt__rows_wide(ctx, op, dtype, dy, room[0], e->sent * O);
    if (dt_wants(n, 1)) {
        const void *home = saved->home ? saved->home->data : rows->data;
        home = dt__rows_wide(ctx, op, dtype, home, room[1], e->sent * O);
        dt__rows_times(ctx, op, wide, product, dyw, home, 0, e->sent, O, 0);
        dt_sum_args sum = { wide, piece[5], product, (size_t)e->sent, (size_t)O, 1, 1, 0, 0, NULL,
            0 };
        void *dgates = dt_grad_raw(n, 1, &accumulate);
        if (!dgates || DT__KERNEL(ctx, op, sum, &sum) != DT_OK ||
            dt__rows_add(op, wide, dgates, choices, piece[5], e->choice, 1, accumulate, NULL) !=
                DT_OK)
            return dt_error(ctx);
    }
    if (!dt_wants(n, 0)) return dt_error(ctx);
    dt__rows_get(op, wide, piece[5], gates->data, choices, e->choice, 0, e->sent, 1);
    dt__rows_times(ctx, op, wide, product, dyw, piece[5], 1, e->sent, O, 0);
    dt_cast_args narrow = { dtype, wide, dy, product, sent, 0 };
    if (wide != dtype) DT__KERNEL(ctx, op, cast, &narrow);
    const void *out = wide != dtype ? dy : product;
    void *drows = dt_grad_raw(n, 0, &accumulate);
    if (!drows || dt_error(ctx) != DT_OK) return dt_error(ctx);
    if (e->ranks > 1) {
        void *to = accumulate ? piece[6] : drows;
        dt_status status = dt__rows_move(e, 0, out, piece[4], O, dtype);
        if (status != DT_OK) return status;
        status = dt__rows_get(op, dtype, to, piece[4], e->received, e->regroup, 0, e->received, O);
        return accumulate && status == DT_OK ? dt__accumulate(ctx, dtype, drows, to, received, 1)
                                             : status;
    }
    return dt__accumulate(ctx, dtype, drows, out, sent, accumulate);
}

/* Home again: (received,O) of rows to (sent,O). */
static dt_status dt__combine_home(const dt__exchange *e, const dt_tensor *rows, dt_tensor *home) {
    const char *op = "dt_combine";
    int64_t O = (int64_t)dt__last(rows);
    void *work = dt_scratch(rows->ctx, dt__bytes(rows) + 64);
    if (!work) return dt_error(rows->ctx);
    dt_status status =
        dt__rows_get(op, rows->dtype, work, rows->data, e->received, e->ungroup, 0, e->received, O);
    return status == DT_OK ? dt__rows_move(e, 1, work, home->data, O, rows->dtype) : status;
}

/* y = the sum over j of gate j times the row of choice j, of home (sent,O). */
static dt_status dt__combine_sum(
    const dt__exchange *e, const void *home, const dt_tensor *gates, dt_tensor *y) {
    const char *op = "dt_combine";
    dt_ctx *ctx = y->ctx;
    int64_t O = (int64_t)dt__last(y), n = e->tokens;
    size_t count = (size_t)(n * O), real = dt_dtype_size(gates->dtype),
           other = dt__narrow(y->dtype) ? real : 0;
    size_t bytes[3] = { count * dt_dtype_size(y->dtype), count * other, count * other };
    char *piece[3];
    if (!dt__carve(ctx, bytes, piece, 3)) return dt_error(ctx);
    void *sum = other ? piece[2] : y->data;
    for (int64_t j = 0; j < e->k; j++) {
        const char *gate = (const char *)gates->data + (size_t)j * real;
        if (dt__rows_get(op, y->dtype, piece[0], home, e->sent, e->row, j * n, n, O) != DT_OK)
            return dt_error(ctx);
        const void *term = dt__rows_wide(ctx, op, y->dtype, piece[0], piece[1], n * O);
        if (dt__rows_times(ctx, op, gates->dtype, sum, term, gate, e->k, n, O, j > 0) != DT_OK)
            return dt_error(ctx);
    }
    dt_cast_args a = { y->dtype, gates->dtype, y->data, sum, count, 0 };
    return other ? DT__KERNEL(ctx, op, cast, &a) : DT_OK;
}

dt_tensor *dt_combine(dt_tensor *rows, dt_routing *r) {
    const char *op = "dt_combine";
    dt_ctx *ctx = dt__routed(op, rows, r, r ? r->gates : NULL, NULL);
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
    int64_t O = rows->shape.d[1];
    dt_tensor *home =
        e->ranks > 1 ? dt__new_named(ctx, rows->dtype, DT_SHAPE(e->sent, O), op) : NULL;
    dt_tensor *y = dt__new_named(ctx, rows->dtype, DT_SHAPE(r->batch, r->tokens, O), op);
    if (!y || (e->ranks > 1 && (!home || dt__combine_home(e, rows, home) != DT_OK))) return NULL;
    if (dt__combine_sum(e, home ? home->data : rows->data, r->gates, y) != DT_OK) return NULL;
    dt__exchange_saved *saved = (dt__exchange_saved *)dt_record_saved(
        y, dt__desc(op, rows, r->gates, NULL, dt__combine_back, sizeof *saved));
    if (saved) {
        saved->e = e;
        saved->home = home;
    }
    return dt_error(ctx) == DT_OK ? y : NULL;
}

/* ---- the product of each expert with its rows ---- */

typedef struct dt__expert_saved {
    /* first: what turns the gradient back through the activation reads it */
    dt__linear_saved linear;
    const dt_routing *routing;
    int adds; /* this rank adds the bias */
} dt__expert_saved;

/* The sizes of one expert's product: w (held,out,in). */
typedef struct dt__expert_sizes {
    int64_t in, out;
    size_t size, w_bytes;
} dt__expert_sizes;

static dt__expert_sizes dt__expert_of(const dt_tensor *w) {
    dt__expert_sizes s = { (int64_t)dt__last(w), (int64_t)dt__rows(w) / w->shape.d[0],
        dt_dtype_size(w->dtype), 0 };
    s.w_bytes = (size_t)(s.in * s.out) * s.size;
    return s;
}

/* The gradients of one expert's matrix and bias, from its rows: d (rows,out), x (rows,in). Without
   rows they are 0. */
static dt_status dt__expert_weight_back(dt_node *n, int64_t expert, int64_t rows, const char *d,
    const char *x, dt_matmul_args dw, dt_sum_args db) {
    dt_ctx *ctx = n->out->ctx;
    size_t w_size = dt_dtype_size(dt__wide(dw.dtype, dw.wide)),
           b_size = dt_dtype_size(dt__wide(db.dtype, db.wide));
    int adds = ((const dt__expert_saved *)n->saved)->adds;
    if (dw.c) {
        dw.c = (char *)dw.c + (size_t)(expert * dw.m * dw.n) * w_size;
        dw.a = d;
        dw.b = x;
        dw.k = rows;
        if (rows > 0)
            dt__matmul(ctx, n->name, NULL, dw);
        else if (!dw.accumulate)
            dt__fill(ctx, dt__wide(dw.dtype, dw.wide), dw.c, (size_t)(dw.m * dw.n), 0);
    }
    if (db.out) {
        db.out = (char *)db.out + (size_t)expert * db.inner * b_size;
        db.in = d;
        db.n = (size_t)rows;
        db.work_bytes = dt__lent(ctx, 0);
        db.work = dt_scratch(ctx, db.work_bytes);
        if (rows > 0 && adds)
            DT__KERNEL(ctx, n->name, sum, &db);
        else if (!db.accumulate)
            dt__fill(ctx, dt__wide(db.dtype, db.wide), db.out, db.inner, 0);
    }
    return dt_error(ctx);
}

static dt_status dt__expert_back(dt_node *n) {
    const dt_routing *r = ((const dt__expert_saved *)n->saved)->routing;
    dt_tensor *x = n->in[0], *w = n->in[1];
    dt_ctx *ctx = x->ctx;
    dt__expert_sizes s = dt__expert_of(w);
    dt_matmul_args dx, dw;
    dt_sum_args db = { x->dtype, NULL, NULL, 1, 0, (size_t)s.out, 1, 0, 0, NULL, 0 };
    const char *d = (const char *)dt__linear_turn(n);
    memset(&dx, 0, sizeof dx);
    memset(&dw, 0, sizeof dw);
    dx.dtype = dw.dtype = x->dtype;
    dx.n = dw.n = s.in;
    dx.k = dw.m = s.out;
    dw.trans_a = 1;
    if (!d || (dt_wants(n, 0) && !(dx.c = dt__grad_wide(n, 0, &dx.accumulate, &dx.wide))))
        return dt_error(ctx);
    if (dt_wants(n, 1) && !(dw.c = dt__grad_wide(n, 1, &dw.accumulate, &dw.wide)))
        return dt_error(ctx);
    if (dt_wants(n, 2) && !(db.out = dt__grad_wide(n, 2, &db.accumulate, &db.wide)))
        return dt_error(ctx);
    int64_t at = 0;
    for (int64_t e = 0; e < r->held; at += r->counts[e++]) {
        dt_matmul_args a = dx;
        const char *rows = d + (size_t)(at * s.out) * s.size;
        a.m = r->counts[e];
        a.a = rows;
        a.b = (const char *)w->data + (size_t)e * s.w_bytes;
        if (a.c)
            a.c = (char *)a.c + (size_t)(at * s.in) * dt_dtype_size(dt__wide(x->dtype, dx.wide));
        if (a.c && dt__matmul(ctx, n->name, NULL, a) != DT_OK) return dt_error(ctx);
        const char *in = (const char *)x->data + (size_t)(at * s.in) * s.size;
        if (dt__expert_weight_back(n, e, a.m, rows, in, dw, db) != DT_OK) return dt_error(ctx);
    }
    return DT_OK;
}

/* Whether the inputs fit; *shape is the result's. */
static int dt__expert_fits(dt_tensor *x, const dt_routing *r, dt_tensor *w, dt_tensor *b,
    dt_expert_desc d, dt_shape *shape) {
    const char *op = "dt_expert_linear", *why = NULL;
    dt_tensor *other = w;
    if (!r->exchange)
        why = "dt_dispatch comes first";
    else if (x->dtype != w->dtype || (b && b->dtype != w->dtype))
        why = "types differ";
    else if (w->shape.nd < 3 || x->shape.nd != 2 || dt__last(x) != dt__last(w))
        why = "x (R,I) and w (experts,O..,I) are needed";
    else if (w->shape.d[0] != r->held)
        why = "w has not as many experts as this rank";
    else if (x->shape.d[0] != r->rows)
        why = "x has not as many rows as were dispatched";
    else if (b && (b->shape.d[0] != r->held || (size_t)dt_count(b->shape) != dt__rows(w)))
        why = "the bias must have w's shape less its last dimension", x = w, other = b;
    if (why) {
        dt_fail(x->ctx, DT_ERR_SHAPE, "%s(%s, %s): %s %s and %s %s, %lld rows of %lld experts: %s",
            op, x->name, other->name, dt_dtype_name(x->dtype), dt__shape_text(x->shape).s,
            dt_dtype_name(other->dtype), dt__shape_text(other->shape).s, (long long)r->rows,
            (long long)r->held, why);
        return 0;
    }
    if (d.activation < 0 || d.activation >= DT_ACT_AFFINE) {
        dt_fail(x->ctx, DT_ERR_ARG, "%s(%s): activation %d", op, w->name, d.activation);
        return 0;
    }
    *shape = w->shape;
    shape->nd--;
    shape->d[0] = r->rows;
    return 1;
}

dt_tensor *dt_expert_linear(
    dt_tensor *x, const dt_routing *r, dt_tensor *w, dt_tensor *b, dt_expert_desc d) {
    const char *op = "dt_expert_linear";
    dt_ctx *ctx = w ? dt__routed(op, x, r, w, b) : dt__missing(op, x, w, b);
    dt_shape shape;
    if (!ctx || !dt__expert_fits(x, r, w, b, d, &shape)) return NULL;
    int keep =
        d.activation && !ctx->no_grad && (x->needs_grad || w->needs_grad || (b && b->needs_grad));
    int adds = b && dt_comm_rank(d.partial) == 0;
    dt_tensor *y = dt__new_named(ctx, x->dtype, shape, op);
    dt_tensor *before = keep ? dt__new_named(ctx, x->dtype, shape, "before") : NULL;
    if (!y || (keep && !before)) return NULL;
    dt__expert_sizes s = dt__expert_of(w);
    int64_t at = 0;
    for (int64_t e = 0; e < r->held; at += r->counts[e++]) {
        dt_matmul_args a;
        size_t out = (size_t)(at * s.out) * s.size;
        memset(&a, 0, sizeof a);
        a.dtype = x->dtype;
        a.c = (char *)y->data + out;
        a.a = (const char *)x->data + (size_t)(at * s.in) * s.size;
        a.b = (const char *)w->data + (size_t)e * s.w_bytes;
        a.m = r->counts[e];
        a.n = s.out;
        a.k = s.in;
        a.trans_b = 1;
        a.bias = adds ? (const char *)b->data + (size_t)(e * s.out) * s.size : NULL;
        a.activation = d.activation;
        a.before = before ? (char *)before->data + out : NULL;
        if (dt__matmul(ctx, op, w->name, a) != DT_OK) return NULL;
    }
    dt__expert_saved *saved = (dt__expert_saved *)dt_record_saved(
        y, dt__desc(op, x, w, b, dt__expert_back, sizeof *saved));
    if (saved) {
        saved->linear.activation = d.activation;
        saved->linear.before = before;
        saved->routing = r;
        saved->adds = adds;
    }
    return dt_error(ctx) == DT_OK ? y : NULL;
}

// ==== 16. Schedules: code =======================================================================

/* What a rank computes, in its order. */
typedef struct dt__program {
    dt_action *action;
    int count, room;
    int first; /* of its actions, among those of all ranks */
    int live, slots;
} dt__program;

struct dt_schedule {
    dt_ctx *ctx;
    dt_listener listener;  /* frees the schedule with the context */
    dt_schedule_desc desc; /* resolved; name is NULL */
    char name[48];
    int open; /* a generator runs */
    int stages, total;
    dt__program *program; /* (ranks) */
    int *stage;           /* (ranks,chunks) which stage it is */
    int *home;            /* (stages) rank * chunks + chunk */
    /* (stages,micros,3) where the stage's rank has F, B or I, W; -1: nowhere */
    int *place;
    /* (total) of an F: the rank's F that had the slot before it; -1: none */
    int *before;
    dt_span *span;  /* (total) for whoever needs it */
    int *at, *seen; /* (ranks) likewise */
    /* what dt_pipe_run keeps: made with the schedule, so that no step allocates */
    void *running;
    size_t running_bytes;
};

enum { DT__ROLE_F = 0, DT__ROLE_B, DT__ROLE_W, DT__ROLES }; /* B: of I too */

static int dt__role(dt_phase phase) {
    return phase == DT_FORWARD ? DT__ROLE_F : phase == DT_BACKWARD_WEIGHT ? DT__ROLE_W : DT__ROLE_B;
}

static int *dt__place_at(const dt_schedule *s, int stage, int micro, int role) {
    return &s->place[((size_t)stage * (size_t)s->desc.micros + (size_t)micro) * DT__ROLES +
                     (size_t)role];
}

int dt_schedule_ranks(const dt_schedule *s) { return s ? s->desc.ranks : 0; }
int dt_schedule_chunks(const dt_schedule *s) { return s ? s->desc.chunks : 0; }
int dt_schedule_stages(const dt_schedule *s) { return s ? s->stages : 0; }
int dt_schedule_micros(const dt_schedule *s) { return s ? s->desc.micros : 0; }
int dt_schedule_group(const dt_schedule *s) { return s ? s->desc.group : 0; }
const char *dt_schedule_name(const dt_schedule *s) { return s ? s->name : ""; }

static const dt__program *dt__program_of(const dt_schedule *s, int rank) {
    return s && rank >= 0 && rank < s->desc.ranks ? &s->program[rank] : NULL;
}

int dt_schedule_stage_of(const dt_schedule *s, int rank, int chunk) {
    if (!dt__program_of(s, rank) || chunk < 0 || chunk >= s->desc.chunks) return -1;
    return s->stage[rank * s->desc.chunks + chunk];
}

int dt_schedule_rank_of(const dt_schedule *s, int stage) {
    return s && stage >= 0 && stage < s->stages ? s->home[stage] / s->desc.chunks : -1;
}

const dt_action *dt_schedule_actions(const dt_schedule *s, int rank) {
    return dt__program_of(s, rank) ? s->program[rank].action : NULL;
}

int dt_schedule_count(const dt_schedule *s, int rank) {
    return dt__program_of(s, rank) ? s->program[rank].count : 0;
}
int dt_schedule_live(const dt_schedule *s, int rank) {
    return dt__program_of(s, rank) ? s->program[rank].live : 0;
}
int dt_schedule_slots(const dt_schedule *s, int rank) {
    return dt__program_of(s, rank) ? s->program[rank].slots : 0;
}

int dt_schedule_first(const dt_schedule *s, int rank) {
    return dt__program_of(s, rank)      ? s->program[rank].first
           : s && rank == s->desc.ranks ? s->total
                                        : 0;
}

/* ---- generators ---- */

dt_status dt_schedule_add(dt_schedule *s, int rank, dt_phase phase, int micro, int chunk) {
    if (!s || dt_error(s->ctx) != DT_OK) return s ? dt_error(s->ctx) : DT_ERR_ARG;
    if (!s->open) return dt_fail(s->ctx, DT_ERR_ARG, "dt_schedule_add: only a generator may add");
    if (phase < DT_FORWARD || phase > DT_BACKWARD_WEIGHT || rank < 0 || rank >= s->desc.ranks ||
        micro < 0 || micro >= s->desc.micros || chunk < 0 || chunk >= s->desc.chunks)
        return dt_fail(s->ctx, DT_ERR_ARG,
            "dt_schedule_add(%s): phase %d of micro-batch %d of %d in chunk %d of %d of "
            "rank %d of %d",
            s->name, (int)phase, micro, s->desc.micros, chunk, s->desc.chunks, rank, s->desc.ranks);
    dt__program *p = &s->program[rank];
    int most = 4 * s->desc.chunks * s->desc.micros; /* more than any right one has */
    if (p->count >= most)
        return dt_fail(s->ctx, DT_ERR_ARG, "dt_schedule_add(%s): rank %d has %d actions already",
            s->name, rank, most);
    dt_action *grown =
        (dt_action *)dt__grow(s->ctx, p->action, p->count, &p->room, sizeof *grown, "a schedule");
    if (!grown) return dt_error(s->ctx);
    p->action = grown;
    dt_action *a = &p->action[p->count++];
    a->phase = phase;
    a->micro = micro;
    a->chunk = chunk;
    return DT_OK;
}

static void dt__generate_naive(dt_schedule *s, void *user) {
    (void)user;
    for (int r = 0; r < s->desc.ranks; r++)
        for (int j = 0; j < s->desc.micros; j++) {
            dt_schedule_add(s, r, DT_FORWARD, j, 0);
            dt_schedule_add(s, r, DT_BACKWARD, j, 0);
        }
}

static void dt__generate_afab(dt_schedule *s, void *user) {
    (void)user;
    for (int r = 0; r < s->desc.ranks; r++) {
        for (int j = 0; j < s->desc.micros; j++) dt_schedule_add(s, r, DT_FORWARD, j, 0);
        for (int j = 0; j < s->desc.micros; j++) dt_schedule_add(s, r, DT_BACKWARD, j, 0);
    }
}

/* As many forwards first as lie between a rank's forward and its backward; then one of each in
   turn. */
static void dt__generate_1f1b(dt_schedule *s, void *user) {
    int p = s->desc.ranks, m = s->desc.micros;
    (void)user;
    for (int r = 0; r < p; r++) {
        int ahead = p - r - 1 < m ? p - r - 1 : m;
        for (int j = 0; j < ahead; j++) dt_schedule_add(s, r, DT_FORWARD, j, 0);
        for (int j = 0; j < m; j++) {
            if (j + ahead < m) dt_schedule_add(s, r, DT_FORWARD, j + ahead, 0);
            dt_schedule_add(s, r, DT_BACKWARD, j, 0);
        }
    }
}

/* A rank's k-th forward: a group of G micro-batches through its first chunk, the group through the
   next, ... then the next group. Backwards take the chunks the other way round. */
static void dt__interleaved_add(dt_schedule *s, int r, int k, dt_phase phase) {
    int v = s->desc.chunks, start = k / (s->desc.group * v) * s->desc.group,
        left = s->desc.micros - start;
    int size = left < s->desc.group ? left : s->desc.group, chunk = (k - start * v) / size;
    dt_schedule_add(
        s, r, phase, start + (k - start * v) % size, phase == DT_FORWARD ? chunk : v - 1 - chunk);
}

static void dt__generate_interleaved(dt_schedule *s, void *user) {
    int p = s->desc.ranks, all = s->desc.micros * s->desc.chunks;
    (void)user;
    for (int r = 0; r < p; r++) {
        int ahead = 2 * (p - r - 1) + (s->desc.chunks - 1) * s->desc.group;
        if (ahead > all) ahead = all;
        for (int k = 0; k < ahead; k++) dt__interleaved_add(s, r, k, DT_FORWARD);
        for (int k = 0; k < all; k++) {
            if (k + ahead < all) dt__interleaved_add(s, r, k + ahead, DT_FORWARD);
            dt__interleaved_add(s, r, k, DT_BACKWARD);
        }
    }
}

/* 1F1B, but the stage before waits for I only. Rank r puts W off by r micro-batches: where 1F1B's
   rank would wait. */
static void dt__generate_zb(dt_schedule *s, void *user) {
    int p = s->desc.ranks, m = s->desc.micros;
    (void)user;
    for (int r = 0; r < p; r++) {
        int ahead = p - r < m ? p - r : m;
        for (int j = 0; j < ahead; j++) dt_schedule_add(s, r, DT_FORWARD, j, 0);
        for (int j = 0; j < m + r; j++) {
            if (j < m) dt_schedule_add(s, r, DT_BACKWARD_INPUT, j, 0);
            if (j >= r) dt_schedule_add(s, r, DT_BACKWARD_WEIGHT, j - r, 0);
            if (j + ahead < m) dt_schedule_add(s, r, DT_FORWARD, j + ahead, 0);
        }
    }
}

static const struct {
    const char *name;
    dt_schedule_fn generate;
} dt__schedule_kinds[DT_SCHEDULES] = {
    { "naive", dt__generate_naive },
    { "AFAB", dt__generate_afab },
    { "1F1B", dt__generate_1f1b },
    { "interleaved", dt__generate_interleaved },
    { "zero-bubble", dt__generate_zb },
};

/* ---- what an action waits for ---- */

enum { DT__NEED_OWN = 0, DT__NEED_MESSAGE, DT__NEED_SLOT };
/* the rank's at-th action; -1: there is none */
typedef struct dt__need {
    int rank, at, kind;
} dt__need;

static dt__need dt__need_of(const dt_schedule *s, int stage, int micro, int role, int kind) {
    dt__need need = { s->home[stage] / s->desc.chunks, *dt__place_at(s, stage, micro, role), kind };
    return need;
}

/* Beside its rank's turn. A slot is waited for until its message's receiver begins, all else until
   it has ended. */
static int dt__needs(const dt_schedule *s, int rank, int at, dt__need out[2]) {
    const dt_action *a = &s->program[rank].action[at];
    int n = 0, role = dt__role(a->phase), before = s->before[s->program[rank].first + at];
    if (role == DT__ROLE_F && a->stage > 0)
        out[n++] = dt__need_of(s, a->stage - 1, a->micro, DT__ROLE_F, DT__NEED_MESSAGE);
    if (role != DT__ROLE_F) out[n++] = dt__need_of(s, a->stage, a->micro, role - 1, DT__NEED_OWN);
    if (role == DT__ROLE_B && a->stage + 1 < s->stages)
        out[n++] = dt__need_of(s, a->stage + 1, a->micro, DT__ROLE_B, DT__NEED_MESSAGE);
    if (role == DT__ROLE_F && before >= 0) {
        const dt_action *b = &s->program[rank].action[before];
        if (b->stage > 0)
            out[n++] = dt__need_of(s, b->stage - 1, b->micro, DT__ROLE_B, DT__NEED_SLOT);
    }
    return n;
}

static double dt__cost_of(const dt_schedule_costs *c, const dt_action *a) {
    const double *stage = c->stages ? c->stages + (size_t)a->stage * 3 : NULL;
    double forward = stage ? stage[0] : c->forward, input = stage ? stage[1] : c->input;
    double weight = stage ? stage[2] : c->weight;
    if (a->phase == DT_FORWARD) return forward;
    return a->phase == DT_BACKWARD         ? input + weight
           : a->phase == DT_BACKWARD_INPUT ? input
                                           : weight;
}

/* When the action can begin, or -1 while what it waits for has not happened. */
static double dt__begin_of(
    const dt_schedule *s, const dt_schedule_costs *c, const dt_span *spans, int rank, int at) {
    dt__need need[2];
    double begin = at > 0 ? spans[s->program[rank].first + at - 1].end : 0;
    int n = dt__needs(s, rank, at, need);
    for (int i = 0; i < n; i++) {
        if (need[i].at < 0) return -1;
        dt_span span = spans[s->program[need[i].rank].first + need[i].at];
        if (span.end < span.begin) return -1;
        double then = need[i].kind == DT__NEED_SLOT ? span.begin : span.end;
        if (need[i].kind == DT__NEED_MESSAGE && need[i].rank != rank) then += c->message;
        if (then > begin) begin = then;
    }
    return begin;
}

/* Every rank goes as far as it can, again and again: when nobody moves, all is done or stands for
   ever. s->at is where each rank is then. 1: all is done. */
static int dt__schedule_run(const dt_schedule *s, const dt_schedule_costs *c, dt_span *spans) {
    dt_span never = { 0, -1 };
    int done = 0, moved = 1;
    for (int i = 0; i < s->total; i++) spans[i] = never;
    memset(s->at, 0, (size_t)s->desc.ranks * sizeof *s->at);
    while (moved) {
        moved = 0;
        for (int r = 0; r < s->desc.ranks; r++)
            for (const dt__program *p = &s->program[r]; s->at[r] < p->count; s->at[r]++, moved++) {
                double begin = dt__begin_of(s, c, spans, r, s->at[r]);
                if (begin < 0) break;
                spans[p->first + s->at[r]].begin = begin;
                spans[p->first + s->at[r]].end = begin + dt__cost_of(c, &p->action[s->at[r]]);
            }
        done += moved;
    }
    return done == s->total;
}

/* ---- the lowering ---- */

static void dt__schedule_places(dt_schedule *s) {
    size_t places = (size_t)s->stages * (size_t)s->desc.micros * DT__ROLES;
    for (size_t i = 0; i < places; i++) s->place[i] = -1;
    for (int r = 0; r < s->desc.ranks; r++)
        for (int i = 0; i < s->program[r].count; i++) {
            dt_action *a = &s->program[r].action[i];
            int role = dt__role(a->phase);
            a->stage = s->stage[r * s->desc.chunks + a->chunk];
            int back = dt_schedule_rank_of(s, a->stage - 1),
                on = dt_schedule_rank_of(s, a->stage + 1);
            a->from = role == DT__ROLE_F ? back : role == DT__ROLE_B ? on : -1;
            a->to = role == DT__ROLE_F ? on : role == DT__ROLE_B ? back : -1;
            int *place = dt__place_at(s, a->stage, a->micro, role);
            if (*place < 0) *place = i;
        }
}

/* A slot and since when it is free. */
typedef struct dt__slot {
    double free;
    int tenant;
} dt__slot;

/* When the slot that the rank's F `at` takes is free again: after B or W, and when the receiver of
   its gradient begins. s->span has the times. With `timed` 0 they are places in each rank's order,
   and tell nothing of another rank. */
static double dt__slot_free(const dt_schedule *s, int rank, int at, int timed) {
    const dt_action *a = &s->program[rank].action[at];
    int weight = *dt__place_at(s, a->stage, a->micro, DT__ROLE_W), last = weight;
    if (last < 0) last = *dt__place_at(s, a->stage, a->micro, DT__ROLE_B);
    if (last < at) return INFINITY; /* no backward, or before its F: a wrong schedule */
    double time = s->span[s->program[rank].first + last].end;
    int to = dt_schedule_rank_of(s, a->stage - 1);
    int taken = a->stage > 0 ? *dt__place_at(s, a->stage - 1, a->micro, DT__ROLE_B) : -1;
    if (taken < 0 || (!timed && to != rank)) return time;
    double begins = s->span[s->program[to].first + taken].begin;
    return begins > time ? begins : time;
}

/* An F takes the slot that has been free longest, or one more than the p->slots there are if none
   is free when it begins: of intervals of time, that needs no more slots than the most that are in
   use at once. */
static void dt__take_slots(dt_schedule *s, int rank, int timed, dt__slot *slot) {
    dt__program *p = &s->program[rank];
    for (int k = 0; k < p->slots; k++) {
        slot[k].free = -INFINITY;
        slot[k].tenant = -1;
    }
    for (int i = 0; i < p->count; i++) {
        dt_action *a = &p->action[i];
        a->slot = -1;
        if (a->phase != DT_FORWARD) continue;
        int best = p->slots;
        for (int k = 0; k < p->slots; k++)
            if (slot[k].free <= s->span[p->first + i].begin &&
                (best == p->slots || slot[k].free < slot[best].free))
                best = k;
        s->before[p->first + i] = best < p->slots ? slot[best].tenant : -1;
        if (best == p->slots) p->slots++;
        a->slot = best;
        slot[best].tenant = i;
        slot[best].free = dt__slot_free(s, rank, i, timed);
    }
}

static void dt__schedule_slots(dt_schedule *s, int rank, int timed, dt__slot *slot) {
    dt__program *p = &s->program[rank];
    int live = 0, forwards = 0;
    for (int i = 0; i < p->count; i++) forwards += p->action[i].phase == DT_FORWARD;
    dt__take_slots(s, rank, timed, slot); /* from none: as few as it takes */
    if (s->desc.spare > 0) {
        p->slots = s->desc.spare < forwards - p->slots ? p->slots + s->desc.spare : forwards;
        dt__take_slots(s, rank, timed, slot);
    }
    for (int i = 0; i < p->count; i++) {
        dt_action *a = &p->action[i];
        int forward = *dt__place_at(s, a->stage, a->micro, DT__ROLE_F);
        if (a->phase != DT_FORWARD && forward >= 0) a->slot = p->action[forward].slot;
        live +=
            (a->phase == DT_FORWARD) - (a->phase == DT_BACKWARD || a->phase == DT_BACKWARD_WEIGHT);
        if (live > p->live) p->live = live;
    }
}

/* Slots by the times of a run in which stages are alike and nobody waits for slots; where that
   cannot be run, or memory counts more, by each rank's own order. */
static dt_status dt__schedule_lower(dt_schedule *s) {
    dt_schedule_costs even = { 1, 1, 1, NULL, 0 };
    int most = 0, timed;
    s->total = 0;
    for (int r = 0; r < s->desc.ranks; r++) {
        s->program[r].first = s->total;
        s->total += s->program[r].count;
        if (s->program[r].count > most) most = s->program[r].count;
    }
    size_t total = (size_t)s->total, slots = (size_t)most * sizeof(dt__slot);
    s->before = (int *)dt_alloc(s->ctx, DT_MEM_HOST, total * sizeof *s->before, "a schedule");
    s->span = (dt_span *)dt_alloc(s->ctx, DT_MEM_HOST, total * sizeof *s->span, "a schedule");
    dt__slot *slot = (dt__slot *)dt_alloc(s->ctx, DT_MEM_HOST, slots, "a schedule");
    if (dt_error(s->ctx) == DT_OK) {
        for (size_t i = 0; i < total; i++) s->before[i] = -1;
        dt__schedule_places(s);
        timed = dt__schedule_run(s, &even, s->span) && !s->desc.tight;
        for (int r = 0; r < s->desc.ranks && !timed; r++)
            for (int i = 0; i < s->program[r].count; i++) {
                s->span[s->program[r].first + i].begin = i;
                s->span[s->program[r].first + i].end = i + 1;
            }
        for (int r = 0; r < s->desc.ranks; r++) dt__schedule_slots(s, r, timed, slot);
    }
    dt_free(s->ctx, DT_MEM_HOST, slot, slots);
    return dt_error(s->ctx);
}

/* ---- the checker ---- */

static dt__text dt__action_text(const dt_schedule *s, dt_phase phase, int micro, int chunk) {
    static const char *const names[] = { "?", "F", "B", "I", "W" };
    dt__text t;
    if (s->desc.chunks == 1)
        snprintf(t.s, sizeof t.s, "%s(micro %d)", names[phase], micro);
    else
        snprintf(t.s, sizeof t.s, "%s(micro %d, chunk %d)", names[phase], micro, chunk);
    return t;
}

static dt__text dt__action_at(const dt_schedule *s, int rank, int at) {
    const dt_action *a = &s->program[rank].action[at];
    return dt__action_text(s, a->phase, a->micro, a->chunk);
}

/* Each computation once. */
static dt_status dt__check_complete(const dt_schedule *s, dt__saying *t) {
    for (int r = 0; r < s->desc.ranks; r++)
        for (int i = 0; i < s->program[r].count; i++) {
            const dt_action *a = &s->program[r].action[i];
            if (*dt__place_at(s, a->stage, a->micro, dt__role(a->phase)) == i) continue;
            dt__say(t, "rank %d: %s comes a second time, as its action %d", r,
                dt__action_at(s, r, i).s, i);
            return DT_ERR_ARG;
        }
    for (int stage = 0; stage < s->stages; stage++)
        for (int j = 0; j < s->desc.micros; j++) {
            int r = dt_schedule_rank_of(s, stage), chunk = s->home[stage] % s->desc.chunks;
            int back = *dt__place_at(s, stage, j, DT__ROLE_B),
                weight = *dt__place_at(s, stage, j, DT__ROLE_W);
            int whole = back >= 0 && s->program[r].action[back].phase == DT_BACKWARD;
            dt_phase missing = DT_FORWARD;
            if (*dt__place_at(s, stage, j, DT__ROLE_F) >= 0) {
                if (back >= 0 && whole == (weight < 0)) continue;
                missing = back >= 0     ? DT_BACKWARD_WEIGHT
                          : weight >= 0 ? DT_BACKWARD_INPUT
                                        : DT_BACKWARD;
            }
            if (missing == DT_BACKWARD_WEIGHT && whole)
                dt__say(t, "rank %d: %s comes beside %s, which is the whole backward", r,
                    dt__action_text(s, missing, j, chunk).s, dt__action_at(s, r, back).s);
            else
                dt__say(t, "rank %d: %s is missing", r, dt__action_text(s, missing, j, chunk).s);
            return DT_ERR_ARG;
        }
    return DT_OK;
}

/* What the rank, which stands, waits for: one of several. */
static dt__need dt__waits_for(const dt_schedule *s, int rank) {
    dt__need need[2], none = { -1, -1, DT__NEED_OWN };
    int n = dt__needs(s, rank, s->at[rank], need);
    for (int i = 0; i < n; i++) {
        dt_span span = s->span[s->program[need[i].rank].first + need[i].at];
        if (span.end < span.begin) return need[i];
    }
    return none;
}

/* After a run that stopped: who stands waits for one who stands, so that going from each to the one
   it waits for ends in a circle. Returns its length. */
static int dt__check_cycle(const dt_schedule *s, dt__saying *t) {
    int r = 0, first, n = 0;
    memset(s->seen, 0, (size_t)s->desc.ranks * sizeof *s->seen);
    while (s->at[r] == s->program[r].count) r++;
    while (!s->seen[r]) {
        s->seen[r] = 1;
        r = dt__waits_for(s, r).rank;
    }
    first = r;
    dt__say(t, "deadlock: ");
    do {
        dt__need need = dt__waits_for(s, r);
        int front = s->at[need.rank];
        dt__say(t, "%srank %d waits at %s ", n++ ? "; " : "", r, dt__action_at(s, r, s->at[r]).s);
        if (need.kind == DT__NEED_SLOT) {
            dt__say(t, "for its slot %d, until rank %d begins %s",
                s->program[r].action[s->at[r]].slot, need.rank,
                dt__action_at(s, need.rank, need.at).s);
        } else {
            dt__say(t, "for %s", dt__action_at(s, need.rank, need.at).s);
            if (need.rank != r) dt__say(t, " of rank %d", need.rank);
        }
        if (need.at != front)
            dt__say(t, ", which stands behind %s", dt__action_at(s, need.rank, front).s);
        r = need.rank;
    } while (r != first);
    return n;
}

/* Gradients of a chunk are added by B and W. */
static dt_status dt__check_order(const dt_schedule *s, dt__saying *t) {
    for (int r = 0; r < s->desc.ranks; r++)
        for (int chunk = 0; chunk < s->desc.chunks; chunk++) {
            const dt_action *last = NULL;
            for (int i = 0; i < s->program[r].count; i++) {
                const dt_action *a = &s->program[r].action[i];
                if (a->chunk != chunk ||
                    (a->phase != DT_BACKWARD && a->phase != DT_BACKWARD_WEIGHT))
                    continue;
                if (last && a->micro < last->micro) {
                    dt__say(t,
                        "rank %d: %s comes after %s, but gradients are added in ascending order", r,
                        dt__action_at(s, r, i).s,
                        dt__action_text(s, last->phase, last->micro, chunk).s);
                    return DT_ERR_ARG;
                }
                last = a;
            }
        }
    return DT_OK;
}

dt_status dt_schedule_check(
    const dt_schedule *s, dt_schedule_facts *facts, char *text, size_t text_bytes) {
    dt_schedule_costs even = { 1, 1, 1, NULL, 0 };
    dt_schedule_facts f;
    dt__saying t = dt__saying_in(text, text_bytes);
    memset(&f, 0, sizeof f);
    if (facts) *facts = f;
    if (!s) {
        dt__say(&t, "no schedule");
        return DT_ERR_ARG;
    }
    for (int r = 0; r < s->desc.ranks; r++) {
        const dt__program *p = &s->program[r];
        f.actions += p->count;
        if (p->live > f.live) f.live = p->live;
        if (p->slots > f.slots) f.slots = p->slots;
        for (int i = 0; i < p->count; i++)
            f.messages += p->action[i].to >= 0 && p->action[i].to != r;
    }
    dt_status status = dt__check_complete(s, &t);
    if (status == DT_OK && !dt__schedule_run(s, &even, s->span)) {
        f.cycle = dt__check_cycle(s, &t);
        status = DT_ERR_ARG;
    }
    if (status == DT_OK) status = dt__check_order(s, &t);
    if (facts) *facts = f;
    return status;
}

/* ---- making one ---- */

static size_t dt__pipe_bytes(const dt_schedule *s);

static void dt__schedule_release(dt_ctx *ctx, void *user) {
    dt_schedule *s = (dt_schedule *)user;
    size_t ranks = (size_t)s->desc.ranks, stages = (size_t)s->stages;
    for (int r = 0; r < s->desc.ranks && s->program; r++)
        dt_free(
            ctx, DT_MEM_HOST, s->program[r].action, (size_t)s->program[r].room * sizeof(dt_action));
    dt_free(ctx, DT_MEM_HOST, s->program, ranks * sizeof *s->program);
    dt_free(ctx, DT_MEM_HOST, s->stage, stages * sizeof *s->stage);
    dt_free(ctx, DT_MEM_HOST, s->home, stages * sizeof *s->home);
    dt_free(
        ctx, DT_MEM_HOST, s->place, stages * (size_t)s->desc.micros * DT__ROLES * sizeof *s->place);
    dt_free(ctx, DT_MEM_HOST, s->before, (size_t)s->total * sizeof *s->before);
    dt_free(ctx, DT_MEM_HOST, s->span, (size_t)s->total * sizeof *s->span);
    dt_free(ctx, DT_MEM_HOST, s->at, ranks * sizeof *s->at);
    dt_free(ctx, DT_MEM_HOST, s->seen, ranks * sizeof *s->seen);
    dt_free(ctx, DT_MEM_HOST, s->running, s->running_bytes);
    dt_free(ctx, DT_MEM_HOST, s, sizeof *s);
}

void dt_schedule_free(dt_schedule *s) {
    if (!s) return;
    dt_unlisten(s->ctx, &s->listener);
    dt__schedule_release(s->ctx, s);
}

/* Whether groups of G serve m micro-batches: also the last, smaller group fills all ranks. */
static int dt__group_fits(int p, int m, int g) {
    if (m < p) return g == m;
    return g >= p && g <= m && (m % g == 0 || m % g >= p);
}

/* Resolves what is 0. */
static dt_status dt__schedule_resolve(dt_ctx *ctx, dt_schedule_desc *d) {
    int interleaved = d->kind == DT_SCHEDULE_INTERLEAVED && !d->generate;
    int64_t most = 1 << 26; /* computations that can be listed */
    if (!d->generate && (d->kind < 0 || d->kind >= DT_SCHEDULES))
        return dt_fail(
            ctx, DT_ERR_ARG, "dt_schedule_make: there is no kind %d of schedule", d->kind);
    if (d->chunks == 0) d->chunks = interleaved ? 2 : 1;
    if (d->ranks < 1 || d->micros < 1 || d->chunks < 1 || (int64_t)d->ranks * d->chunks > most ||
        (int64_t)d->ranks * d->chunks * d->micros > most)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_schedule_make: %d micro-batches through %d chunks of each of %d ranks; use "
            "at least 1 of each, and no more than %lld in all",
            d->micros, d->chunks, d->ranks, (long long)most);
    if (!interleaved && !d->generate && d->chunks > 1)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_schedule_make(%s): %d chunks; only interleaved has several",
            dt__schedule_kinds[d->kind].name, d->chunks);
    if (d->spare < 0) return dt_fail(ctx, DT_ERR_ARG, "dt_schedule_make: %d spare slots", d->spare);
    if (!interleaved && d->group != 0)
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_schedule_make: groups of %d; only interleaved has groups", d->group);
    int least = d->micros < d->ranks ? d->micros : d->ranks; /* m itself always fits */
    while (interleaved && !dt__group_fits(d->ranks, d->micros, least)) least++;
    if (interleaved && d->group == 0) d->group = least;
    if (interleaved && !dt__group_fits(d->ranks, d->micros, d->group))
        return dt_fail(ctx, DT_ERR_ARG,
            "dt_schedule_make(interleaved): groups of %d do not cut %d micro-batches for "
            "%d ranks so that each fills them; use %d or %d",
            d->group, d->micros, d->ranks, least, d->micros);
    return DT_OK;
}

/* Which stage each chunk is, and where each stage is. */
static dt_status dt__schedule_map(dt_schedule *s) {
    for (int i = 0; i < s->stages; i++) s->home[i] = -1;
    for (int i = 0; i < s->stages; i++) {
        int r = i / s->desc.chunks, chunk = i % s->desc.chunks;
        int stage =
            s->desc.stage_of ? s->desc.stage_of(r, chunk, s->desc.user) : chunk * s->desc.ranks + r;
        if (stage < 0 || stage >= s->stages)
            return dt_fail(s->ctx, DT_ERR_ARG,
                "dt_schedule_make(%s): chunk %d of rank %d is stage %d of %d", s->name, chunk, r,
                stage, s->stages);
        if (s->home[stage] >= 0)
            return dt_fail(s->ctx, DT_ERR_ARG,
                "dt_schedule_make(%s): stage %d is chunk %d of rank %d and chunk %d of "
                "rank %d",
                s->name, stage, s->home[stage] % s->desc.chunks, s->home[stage] / s->desc.chunks,
                chunk, r);
        s->home[stage] = i;
        s->stage[i] = stage;
    }
    return DT_OK;
}

static dt_schedule *dt__schedule_new(dt_ctx *ctx, dt_schedule_desc d) {
    size_t ranks = (size_t)d.ranks, stages = ranks * (size_t)d.chunks;
    dt_schedule *s = (dt_schedule *)dt__host_zeroed(ctx, sizeof *s, "a schedule");
    if (!s) return NULL;
    s->ctx = ctx;
    s->desc = d;
    s->desc.name = NULL;
    s->stages = (int)stages;
    snprintf(s->name, sizeof s->name, "%.47s",
        dt__name_text(d.name       ? d.name
                      : d.generate ? "a schedule of one's own"
                                   : dt__schedule_kinds[d.kind].name)
            .s);
    s->listener.closing = dt__schedule_release;
    s->listener.user = s;
    dt_listen(ctx, &s->listener);
    s->program = (dt__program *)dt__host_zeroed(ctx, ranks * sizeof *s->program, "a schedule");
    s->stage = (int *)dt_alloc(ctx, DT_MEM_HOST, stages * sizeof *s->stage, "a schedule");
    s->home = (int *)dt_alloc(ctx, DT_MEM_HOST, stages * sizeof *s->home, "a schedule");
    s->place = (int *)dt_alloc(
        ctx, DT_MEM_HOST, stages * (size_t)d.micros * DT__ROLES * sizeof *s->place, "a schedule");
    s->at = (int *)dt_alloc(ctx, DT_MEM_HOST, ranks * sizeof *s->at, "a schedule");
    s->seen = (int *)dt_alloc(ctx, DT_MEM_HOST, ranks * sizeof *s->seen, "a schedule");
    return s;
}

dt_schedule *dt_schedule_make(dt_ctx *ctx, dt_schedule_desc desc) {
    char why[400];
    if (dt_error(ctx) != DT_OK || dt__schedule_resolve(ctx, &desc) != DT_OK) return NULL;
    dt_schedule *s = dt__schedule_new(ctx, desc);
    if (!s) return NULL;
    if (dt_error(ctx) == DT_OK && dt__schedule_map(s) == DT_OK) {
        s->open = 1;
        if (desc.generate)
            desc.generate(s, desc.user);
        else
            dt__schedule_kinds[desc.kind].generate(s, NULL);
        s->open = 0;
    }
    if (dt_error(ctx) == DT_OK && dt__schedule_lower(s) == DT_OK && !desc.unchecked &&
        dt_schedule_check(s, NULL, why, sizeof why) != DT_OK)
        dt_fail(ctx, DT_ERR_ARG, "dt_schedule_make(%s): %s", s->name, why);
    if (dt_error(ctx) == DT_OK) {
        s->running_bytes = dt__pipe_bytes(s);
        s->running = dt_alloc(ctx, DT_MEM_HOST, s->running_bytes, "a schedule");
    }
    if (dt_error(ctx) == DT_OK) return s;
    dt_schedule_free(s);
    return NULL;
}

/* ---- the simulator ---- */

static int dt__seconds_ok(double x) { return x >= 0 && isfinite(x); }

dt_status dt_schedule_simulate(const dt_schedule *s, dt_schedule_costs c, dt_span *spans) {
    if (!s || dt_error(s->ctx) != DT_OK) return s ? dt_error(s->ctx) : DT_ERR_ARG;
    int ok = dt__seconds_ok(c.message);
    if (!c.stages)
        ok &= dt__seconds_ok(c.forward) & dt__seconds_ok(c.input) & dt__seconds_ok(c.weight);
    for (int i = 0; c.stages && i < 3 * s->stages; i++) ok &= dt__seconds_ok(c.stages[i]);
    if (!spans)
        return dt_fail(s->ctx, DT_ERR_ARG, "dt_schedule_simulate(%s): spans is NULL", s->name);
    if (!ok)
        return dt_fail(s->ctx, DT_ERR_ARG,
            "dt_schedule_simulate(%s): a cost is negative or not finite", s->name);
    return dt__schedule_run(s, &c, spans) ? DT_OK : DT_ERR_ARG;
}

dt_schedule_bubble dt_schedule_idle(const dt_schedule *s, const dt_span *spans, int rank) {
    dt_schedule_bubble b = { 0, 0, 0, 0 };
    double begin = INFINITY, end = -INFINITY;
    if (!s || !spans || rank < -1 || rank >= s->desc.ranks) return b;
    for (int r = 0; r < s->desc.ranks; r++) {
        double work = 0;
        for (int i = s->program[r].first; i < s->program[r].first + s->program[r].count; i++) {
            if (spans[i].end < spans[i].begin) continue;
            work += spans[i].end - spans[i].begin;
            if (spans[i].begin < begin) begin = spans[i].begin;
            if (spans[i].end > end) end = spans[i].end;
        }
        if (r == rank || (rank < 0 && work > b.work)) b.work = work;
    }
    if (!(b.work > 0)) b.work = 0;
    if (b.work == 0) return b;
    b.makespan = end - begin;
    b.of_work = (b.makespan - b.work) / b.work;
    b.of_total = (b.makespan - b.work) / b.makespan;
    return b;
}

/* ---- cutting a model into stages ---- */

/* How many parts of at most `most` each the items, none dearer, need from the first on. *next: the
   least above `most` with which a part could take one more. */
static int dt__cut_parts(const double *costs, int n, double most, double *next) {
    int parts = 1;
    double sum = 0;
    for (int i = 0; i < n; i++) {
        double more = sum + costs[i];
        if (more > most) {
            if (more < *next) *next = more;
            parts++;
            more = costs[i];
        }
        sum = more;
    }
    return parts;
}

/* Whether the items can be cut into `parts` parts, none empty, of at most `most`: a cut into fewer
   can be cut on. */
static int dt__cut_fits(const double *costs, int n, int parts, double most) {
    double next = INFINITY;
    return n >= parts && dt__cut_parts(costs, n, most, &next) <= parts;
}

dt_status dt_stage_cut(
    const double *costs, int n, int stages, int *first, char *text, size_t text_bytes) {
    double most = 0, left = 0;
    dt__saying t = dt__saying_in(text, text_bytes);
    if (!costs || !first) {
        dt__say(&t, "costs or first is NULL");
        return DT_ERR_ARG;
    }
    if (n < 1 || stages < 1 || n < stages) {
        dt__say(&t, "%d items for %d stages: each stage needs at least 1; use %d stages or fewer",
            n, stages, n > 1 ? n : 1);
        return DT_ERR_ARG;
    }
    for (int i = 0; i < n; i++) {
        left += costs[i];
        if (costs[i] > most) most = costs[i];
        if (dt__seconds_ok(costs[i]) && dt__seconds_ok(left)) continue;
        dt__say(&t, "item %d costs %g; costs are 0 or more, and their sum is finite", i, costs[i]);
        return DT_ERR_ARG;
    }
    double mean = left / stages * (1 - 1e-9); /* no cut is cheaper, however sums are rounded */
    if (mean > most) most = mean;
    /* nothing between a bound and the next one changes a part */
    while (!dt__cut_fits(costs, n, stages, most)) {
        double next = INFINITY;
        dt__cut_parts(costs, n, most, &next);
        most = next;
    }
    for (int part = 0, i = 0; part < stages; part++) {
        int rest = stages - part - 1;
        double share = left / (rest + 1), sum = 0;
        first[part] = i;
        do { /* no more than its share of what is left, but what the others cannot take */
            sum += costs[i];
            left -= costs[i++];
        } while (i < n && (!dt__cut_fits(costs + i, n - i, rest, most) ||
                              (n - i > rest && sum + costs[i] <= share && sum + costs[i] <= most)));
    }
    first[stages] = n;
    return DT_OK;
}

/* ---- drawings ---- */

dt_status dt_schedule_text(
    const dt_schedule *s, const dt_span *spans, int columns, char *text, size_t text_bytes) {
    dt__saying t = dt__saying_in(text, text_bytes);
    double begin = INFINITY, end = -INFINITY;
    if (columns == 0) columns = 72;
    if (!s || !spans || columns < 1 || t.bytes < 1) return DT_ERR_ARG;
    for (int i = 0; i < s->total; i++) {
        if (spans[i].end < spans[i].begin) continue;
        if (spans[i].begin < begin) begin = spans[i].begin;
        if (spans[i].end > end) end = spans[i].end;
    }
    for (int r = 0; r < s->desc.ranks; r++) {
        int i = s->program[r].first, after = i + s->program[r].count;
        dt__say(&t, "rank %2d |", r);
        for (int c = 0; c < columns && t.used + 1 < t.bytes; c++) {
            double time = begin + (c + 0.5) / columns * (end - begin);
            while (i < after && spans[i].end <= time) i++; /* what never happened too */
            const dt_action *a = i < after ? &s->program[r].action[i - s->program[r].first] : NULL;
            int role = a ? dt__role(a->phase) : DT__ROLE_F;
            int letter = role == DT__ROLE_F ? '0' : role == DT__ROLE_B ? 'a' : 'A';
            dt__say(&t, "%c", a && spans[i].begin <= time ? letter + a->micro % 10 : '.');
        }
        dt__say(&t, "|\n");
    }
    return t.used + 1 < t.bytes ? DT_OK : DT_ERR_ARG;
}

/* A drawing while it is written. Lengths are in pixels. */
/* scale: pixels of a second */
typedef struct dt__svg {
    dt_json_out out;
    double scale, begin;
} dt__svg;
enum {
    DT__SVG_LEFT = 64,
    DT__SVG_ROW = 22,
    DT__SVG_TITLE = 30,
    DT__SVG_GAP = 16,
    DT__SVG_ROWS = 10000
};

static void DT_PRINTF(2, 3) dt__svg_put(dt__svg *g, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (n > 0) dt__json_write(&g->out, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
}

/* With so many decimals, and a point in every locale. */
static dt__text dt__fixed(double x, int decimals) {
    dt__text t;
    long long unit = 1;
    for (int i = 0; i < decimals; i++) unit *= 10;
    long long n = x * (double)unit < 9e15 ? (long long)(x * (double)unit + 0.5) : (long long)9e15;
    if (decimals == 0)
        snprintf(t.s, sizeof t.s, "%lld", n);
    else
        snprintf(t.s, sizeof t.s, "%lld.%0*lld", n / unit, decimals, n % unit);
    return t;
}

static dt__text dt__seconds_text(double x) {
    const char *unit = x >= 1 ? "s" : x >= 1e-3 ? "ms" : "us";
    double n = x >= 1 ? x : x >= 1e-3 ? x * 1e3 : x * 1e6;
    dt__text t = dt__fixed(n, n >= 100 ? 0 : n >= 10 ? 1 : 2);
    size_t used = strlen(t.s);
    snprintf(t.s + used, sizeof t.s - used, " %s", unit);
    return t;
}

/* Text that may hold anything as text of XML. */
static void dt__svg_escaped(dt__svg *g, const char *s) {
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '<')
            dt__svg_put(g, "&lt;");
        else if (c == '>')
            dt__svg_put(g, "&gt;");
        else if (c == '&')
            dt__svg_put(g, "&amp;");
        else
            dt__json_write(&g->out, c < 0x20 || c == 0x7f ? " " : s, 1);
    }
}

/* The colour of a phase, lighter in later chunks. */
static unsigned dt__svg_colour(const dt_schedule *s, dt_phase phase, int chunk) {
    static const unsigned char base[5][3] = { { 0, 0, 0 }, { 88, 148, 222 }, { 96, 176, 104 },
        { 72, 186, 178 }, { 232, 164, 72 } };
    unsigned colour = 0;
    double light = s->desc.chunks > 1 ? 0.62 * chunk / (s->desc.chunks - 1) : 0;
    for (int i = 0; i < 3; i++)
        colour = colour * 256 + (unsigned)(base[phase][i] + light * (255 - base[phase][i]));
    return colour;
}

static void dt__svg_box(dt__svg *g, const dt_schedule *s, int rank, int at, dt_span span, int y) {
    const dt_action *a = &s->program[rank].action[at];
    double x = DT__SVG_LEFT + (span.begin - g->begin) * g->scale,
           wide = (span.end - span.begin) * g->scale;
    char number[16];
    int digits = snprintf(number, sizeof number, "%d", a->micro);
    dt__svg_put(
        g, "<g><title>rank %d: %s, stage %d: ", rank, dt__action_at(s, rank, at).s, a->stage);
    dt__svg_put(g, "%s from %s on</title>", dt__seconds_text(span.end - span.begin).s,
        dt__seconds_text(span.begin - g->begin).s);
    dt__svg_put(g,
        "<rect class=\"a\" x=\"%s\" y=\"%d\" width=\"%s\" height=\"%d\" fill=\"#%06x\"/>",
        dt__fixed(x, 2).s, y, dt__fixed(wide, 2).s, DT__SVG_ROW - 2,
        dt__svg_colour(s, a->phase, a->chunk));
    if (wide >= 6.2 * digits + 1)
        dt__svg_put(g, "<text x=\"%s\" y=\"%d\" text-anchor=\"middle\">%s</text>",
            dt__fixed(x + wide / 2, 2).s, y + 14, number);
    dt__svg_put(g, "</g>\n");
}

static void dt__svg_line(dt__svg *g, const dt_timeline *line, int y, double wide) {
    const dt_schedule *s = line->schedule;
    dt_schedule_bubble all = dt_schedule_idle(s, line->spans, -1);
    dt__svg_put(g, "<text class=\"t\" x=\"8\" y=\"%d\">", y + 18);
    dt__svg_escaped(g, line->title ? line->title : s->name);
    dt__svg_put(g, ": %s, bubble %s %% of the work, %s %% of the time</text>\n",
        dt__seconds_text(all.makespan).s, dt__fixed(100 * all.of_work, 1).s,
        dt__fixed(100 * all.of_total, 1).s);
    g->begin = INFINITY;
    for (int i = 0; i < s->total; i++)
        if (line->spans[i].end >= line->spans[i].begin && line->spans[i].begin < g->begin)
            g->begin = line->spans[i].begin;
    for (int r = 0; r < s->desc.ranks; r++) {
        int top = y + DT__SVG_TITLE + r * DT__SVG_ROW;
        dt__svg_put(g, "<text x=\"8\" y=\"%d\">rank %d</text>\n", top + 14, r);
        dt__svg_put(g, "<rect x=\"%d\" y=\"%d\" width=\"%s\" height=\"%d\" fill=\"#eeeeee\"/>\n",
            DT__SVG_LEFT, top, dt__fixed(wide, 2).s, DT__SVG_ROW - 2);
        for (int i = 0; i < s->program[r].count; i++) {
            dt_span span = line->spans[s->program[r].first + i];
            if (span.end >= span.begin) dt__svg_box(g, s, r, i, span, top);
        }
    }
}

/* The phases that occur, with their colours in each chunk of the schedule that has most. */
static void dt__svg_legend(dt__svg *g, const dt_timeline *lines, int n, int y) {
    static const char *const names[] = { "", "forward", "backward", "backward of inputs",
        "backward of weights" };
    const dt_schedule *most = lines[0].schedule;
    int used[5] = { 0, 0, 0, 0, 0 }, x = DT__SVG_LEFT;
    for (int i = 0; i < n; i++) {
        const dt_schedule *s = lines[i].schedule;
        if (s->desc.chunks > most->desc.chunks) most = s;
        for (int r = 0; r < s->desc.ranks; r++)
            for (int k = 0; k < s->program[r].count; k++) used[s->program[r].action[k].phase] = 1;
    }
    int shades = most->desc.chunks < 8 ? most->desc.chunks : 8;
    for (int phase = DT_FORWARD; phase <= DT_BACKWARD_WEIGHT; phase++) {
        if (!used[phase]) continue;
        for (int i = 0; i < shades; i++, x += 14)
            dt__svg_put(g, "<rect x=\"%d\" y=\"%d\" width=\"14\" height=\"14\" fill=\"#%06x\"/>\n",
                x, y,
                dt__svg_colour(most, (dt_phase)phase,
                    i * (most->desc.chunks - 1) / (shades > 1 ? shades - 1 : 1)));
        dt__svg_put(g, "<text x=\"%d\" y=\"%d\">%s</text>\n", x + 6, y + 11, names[phase]);
        x += 22 + 6 * (int)strlen(names[phase]);
    }
    if (most->desc.chunks > 1)
        dt__svg_put(
            g, "<text x=\"%d\" y=\"%d\">lighter: a later chunk of the rank</text>\n", x, y + 11);
}

/* Pixels of a second: a forward has room for its number, but the drawing does not get endless. */
static double dt__svg_scale(const dt_timeline *lines, int n, double *longest) {
    double short_one = INFINITY;
    *longest = 0;
    for (int i = 0; i < n; i++) {
        const dt_schedule *s = lines[i].schedule;
        double sum = 0, count = 0, makespan = dt_schedule_idle(s, lines[i].spans, -1).makespan;
        if (makespan > *longest) *longest = makespan;
        for (int r = 0; r < s->desc.ranks; r++)
            for (int k = 0; k < s->program[r].count; k++) {
                dt_span span = lines[i].spans[s->program[r].first + k];
                if (s->program[r].action[k].phase != DT_FORWARD || span.end < span.begin) continue;
                sum += span.end - span.begin;
                count++;
            }
        if (sum > 0 && sum / count < short_one) short_one = sum / count;
    }
    if (*longest == 0) return 0;
    double wide = 16 / short_one * *longest;
    if (!(wide > 900)) wide = 900;
    return (wide < 6000 ? wide : 6000) / *longest;
}

dt_status dt_schedule_svg(dt_ctx *ctx, const char *path, const dt_timeline *lines, int n) {
    dt__svg g;
    double longest;
    int high = DT__SVG_GAP, y = 8, rows = 0;
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    if (!path || !lines || n < 1)
        return dt_fail(ctx, DT_ERR_ARG, "dt_schedule_svg: %s", path ? "no timelines" : "no path");
    for (int i = 0; i < n; i++) {
        const char *title = lines[i].title ? lines[i].title : "";
        if (!lines[i].schedule || !lines[i].spans ||
            dt__utf8_bad(title, strlen(title)) < strlen(title))
            return dt_fail(ctx, DT_ERR_ARG,
                "dt_schedule_svg(%s): timeline %d has no schedule, no times or a title "
                "that is not UTF-8",
                path, i);
        if (lines[i].schedule->desc.ranks > DT__SVG_ROWS - rows || i == DT__SVG_ROWS)
            return dt_fail(
                ctx, DT_ERR_ARG, "dt_schedule_svg(%s): more than %d rows", path, DT__SVG_ROWS);
        rows += lines[i].schedule->desc.ranks;
        high += DT__SVG_TITLE + lines[i].schedule->desc.ranks * DT__SVG_ROW + DT__SVG_GAP;
    }
    memset(&g, 0, sizeof g);
    g.out.ctx = ctx;
    g.scale = dt__svg_scale(lines, n, &longest);
    double wide = longest > 0 ? longest * g.scale : 900;
    dt__svg_put(&g,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%s\" height=\"%d\" "
        "font-family=\"sans-serif\" "
        "font-size=\"11\">\n",
        dt__fixed(DT__SVG_LEFT + wide + 16, 0).s, high + 24);
    dt__svg_put(&g,
        "<style>.t { font-size: 14px; font-weight: bold } .a { stroke: #ffffff; stroke-width: 0.7 }"
        "</style>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n");
    for (int i = 0; i < n; i++) {
        dt__svg_line(&g, &lines[i], y, wide);
        y += DT__SVG_TITLE + lines[i].schedule->desc.ranks * DT__SVG_ROW + DT__SVG_GAP;
    }
    dt__svg_legend(&g, lines, n, y);
    dt__svg_put(&g, "</svg>\n");
    if (dt_error(ctx) == DT_OK) dt_file_write(ctx, path, g.out.text, g.out.used);
    dt_json_drop(&g.out);
    return dt_error(ctx);
}

// ==== 17. Pipeline parallelism: code ============================================================

/* A micro-batch in a stage, on the tape of its slot. */
typedef struct dt__pipe_slot {
    dt_tensor *x, *y, *dy; /* the stage's input and output, the gradient of the output */
    dt_work *takes;        /* x or dy, under way to this rank */
    dt_work *gives[3];     /* y, the gradient of x and the shape of y, under way to others */
    int stage;             /* whose ops its tape holds */
    int open;              /* its backward is still to come */
    int ready;             /* the next action's message has been asked for */
} dt__pipe_slot;

/* What a message between two stages looks like, as its first one says. */
typedef struct dt__pipe_edge {
    int32_t known, dtype, nd, d[DT_MAX_DIMS];
} dt__pipe_edge;

typedef struct dt__pipe {
    dt_ctx *ctx;
    dt_pipe_desc desc;
    int rank, micros, stages, n_slots;
    dt__pipe_slot *slots;
    dt__pipe_edge *edges; /* (stages) of each stage's output */
} dt__pipe;

/* Room for any rank's slots, or for those of a forward alone, one for each of its stages; and for
   all edges. */
static size_t dt__pipe_bytes(const dt_schedule *s) {
    size_t slots = (size_t)s->desc.chunks;
    for (int r = 0; r < s->desc.ranks; r++) {
        size_t mine = (size_t)s->program[r].slots;
        slots = mine > slots ? mine : slots;
    }
    return slots * sizeof(dt__pipe_slot) + (size_t)s->stages * sizeof(dt__pipe_edge);
}

/* Messages of one pair of ranks are told apart by what they are. */
static int dt__pipe_tag(const dt__pipe *p, int stage, int micro, int backward) {
    return 2 * (stage * p->micros + micro) + backward;
}

/* A shape, from another rank, or to one: then it begins to leave, for the receiver may have other
   messages to take first. From host memory, and no traffic of the model, so it counts nowhere. */
static dt_status dt__pipe_tell(
    const dt__pipe *p, dt__pipe_edge *edge, int stage, int peer, dt_work **gives) {
    int tag = 2 * p->stages * p->micros + stage;
    size_t words = sizeof *edge / sizeof(int32_t);
    dt__call call = dt__mail_call(gives ? DT__SEND : DT__RECV, gives ? edge : NULL,
        gives ? NULL : edge, words, DT_I32, peer, tag);
    call.host = 1;
    if (!gives) return dt__do(p->desc.comm, call);
    *gives = dt__start(p->desc.comm, call);
    return dt_error(p->ctx);
}

/* A tensor on the current tape for a message as this edge has them. */
static dt_tensor *dt__pipe_room(const dt__pipe *p, const dt__pipe_edge *edge) {
    dt_shape shape = DT_SCALAR;
    shape.nd = edge->nd;
    for (int i = 0; i < edge->nd && i < DT_MAX_DIMS; i++) shape.d[i] = edge->d[i];
    return dt__new_named(p->ctx, (dt_dtype)edge->dtype, shape, "dt_pipe_run");
}

/* Which of its rank's stages this is: for forwards alone, its slot. */
static int dt__pipe_chunk(const dt__pipe *p, int stage) {
    return p->desc.schedule->home[stage] % p->desc.schedule->desc.chunks;
}

/* The slot in which this rank has a micro-batch in one of its own stages. */
static dt__pipe_slot *dt__pipe_find(const dt__pipe *p, int stage, int micro) {
    const dt_action *a = dt_schedule_actions(p->desc.schedule, p->rank);
    int n = dt_schedule_count(p->desc.schedule, p->rank), i = 0;
    while (i < n - 1 && !(a[i].phase == DT_FORWARD && a[i].stage == stage && a[i].micro == micro))
        i++;
    return &p->slots[p->desc.forward_micros ? dt__pipe_chunk(p, stage) : a[i].slot];
}

/* The last micro-batch of a slot has left it. After a failure works are given back, but tapes stay
   as they are. */
static dt_status dt__pipe_clear(dt__pipe *p, int s) {
    dt__pipe_slot *slot = &p->slots[s];
    int stage = slot->stage;
    dt_wait(p->ctx, slot->takes);
    for (int i = 0; i < 3; i++) dt_wait(p->ctx, slot->gives[i]);
    memset(slot, 0, sizeof *slot);
    if (dt_error(p->ctx) != DT_OK) return dt_error(p->ctx);
    dt_tape(p->ctx, s + 1, stage);
    dt_reset(p->ctx);
    return dt_error(p->ctx);
}

/* The input of a stage, or the gradient of its output, begins to arrive. */
static dt_status dt__pipe_take(dt__pipe *p, const dt_action *a) {
    dt_ctx *ctx = p->ctx;
    dt__pipe_slot *slot = &p->slots[a->slot];
    int forward = a->phase == DT_FORWARD, stage = forward ? a->stage - 1 : a->stage;
    if (slot->ready) return DT_OK;
    if (forward && dt__pipe_clear(p, a->slot) != DT_OK) return dt_error(ctx);
    dt_tape(ctx, a->slot + 1, a->stage);
    slot->stage = a->stage;
    slot->ready = 1;
    if (a->from < 0) return dt_error(ctx);
    dt__pipe_edge *edge = &p->edges[stage];
    int new_edge = !edge->known && a->from != p->rank;
    if (new_edge && dt__pipe_tell(p, edge, stage, a->from, NULL) != DT_OK) return dt_error(ctx);
    dt_tensor *t = dt__pipe_room(p, edge);
    if (!t) return dt_error(ctx);
    if (forward)
        slot->x = p->desc.forward_micros ? t : dt_require_grad(t);
    else
        slot->dy = t;
    if (a->from == p->rank) { /* the stage next to it is this rank's too */
        const dt__pipe_slot *other =
            dt__pipe_find(p, forward ? a->stage - 1 : a->stage + 1, a->micro);
        const void *data = forward ? other->y->data : other->x->grad;
        if (!data) return dt__fill(ctx, t->dtype, t->data, (size_t)dt_count(t->shape), 0);
        return dt__move(ctx, t->data, data, dt__bytes(t));
    }
    slot->takes = dt_recv_start(p->desc.comm, t->data, (size_t)dt_count(t->shape), t->dtype,
        a->from, dt__pipe_tag(p, stage, a->micro, !forward));
    return dt_error(ctx);
}

/* Before an action computes, the message of the one after it is asked for, if there is room for it
   already. */
static dt_status dt__pipe_take_early(dt__pipe *p, const dt_action *a, const dt_action *next) {
    dt__pipe_slot *slot = &p->slots[next->slot];
    int forward = next->phase == DT_FORWARD;
    if (next->from < 0 || next->from == p->rank || next->slot == a->slot || slot->open == forward)
        return DT_OK;
    for (int i = 0; i < 3 && forward; i++)
        if (slot->gives[i] && !dt_test(p->ctx, slot->gives[i])) return dt_error(p->ctx);
    if (forward && !p->edges[next->stage - 1].known) return DT_OK; /* it would wait for the shape */
    return dt__pipe_take(p, next);
}

/* A result begins to leave. */
static dt_work *dt__pipe_give(
    dt__pipe *p, const dt_action *a, const void *data, const dt_tensor *like) {
    int forward = a->phase == DT_FORWARD, stage = forward ? a->stage : a->stage - 1;
    if (a->to == p->rank) return NULL;
    return dt_send_start(p->desc.comm, data, (size_t)dt_count(like->shape), like->dtype, a->to,
        dt__pipe_tag(p, stage, a->micro, !forward));
}

typedef struct dt__pipe_call {
    const dt__pipe *pipe;
    const dt_action *action;
} dt__pipe_call;

static dt_tensor *dt__pipe_stage(dt_tensor *x, void *user) {
    const dt__pipe_call *c = (const dt__pipe_call *)user;
    return c->pipe->desc.run(x, c->action->stage, c->action->micro, c->pipe->desc.user);
}

/* What a stage returned, before it leaves: the shape that the first micro-batch had. */
static dt_status dt__pipe_output(dt__pipe *p, const dt_action *a, const dt_tensor *y) {
    dt__pipe_edge *edge = &p->edges[a->stage], now;
    memset(&now, 0, sizeof now);
    now.known = 1;
    now.dtype = (int32_t)y->dtype;
    now.nd = y->shape.nd;
    for (int i = 0; i < now.nd; i++) {
        now.d[i] = (int32_t)y->shape.d[i];
        if (now.d[i] != y->shape.d[i])
            return dt_fail(p->ctx, DT_ERR_SHAPE, "dt_pipe_run: stage %d returned %s", a->stage,
                dt__tensor_text(y).s);
    }
    if (edge->known)
        return memcmp(edge, &now, sizeof now) == 0 ? DT_OK
                                                   : dt_fail(p->ctx, DT_ERR_SHAPE,
                                                         "dt_pipe_run: "
                                                         "stage %d returned %s for micro-batch %d, "
                                                         "and another shape or type before",
                                                         a->stage, dt__tensor_text(y).s, a->micro);
    *edge = now;
    return a->to < 0 || a->to == p->rank
               ? DT_OK
               : dt__pipe_tell(p, edge, a->stage, a->to, &p->slots[a->slot].gives[2]);
}

static dt_status dt__pipe_forward(dt__pipe *p, const dt_action *a, dt__pipe_slot *slot) {
    dt__pipe_call call = { p, a };
    slot->open = 1;
    slot->y = dt_block(p->ctx, dt__pipe_stage, slot->x, &call);
    return slot->y ? dt__pipe_output(p, a, slot->y) : dt_error(p->ctx);
}

/* The gradient of a stage's input; zeros, if nothing leads from it to the loss. */
static void *dt__pipe_input_grad(dt__pipe *p, dt__pipe_slot *slot) {
    if (slot->x->grad) return slot->x->grad;
    dt_tensor *none = dt_new(p->ctx, slot->x->dtype, slot->x->shape);
    if (none) dt__fill(p->ctx, none->dtype, none->data, (size_t)dt_count(none->shape), 0);
    return none ? none->data : NULL;
}

/* Waits until an action has lasted as long as it was told to. */
static void dt__pipe_wait_pace(const dt__pipe *p, const dt_action *a, double begin) {
    const dt_host *host = dt_ctx_host(p->ctx);
    const dt_schedule_costs *c = p->desc.pace;
    if (!c) return;
    double each[3] = { c->forward, c->input, c->weight };
    for (int i = 0; i < 3 && c->stages; i++) each[i] = c->stages[3 * a->stage + i];
    double least = a->phase == DT_FORWARD          ? each[0]
                   : a->phase == DT_BACKWARD       ? each[1] + each[2]
                   : a->phase == DT_BACKWARD_INPUT ? each[1]
                                                   : each[2];
    double left = begin + least - host->now(host->user);
    if (left > 0) host->sleep(host->user, left);
}

/* One action: its message, its computation, the message that its result is. */
static dt_status dt__pipe_act(
    dt__pipe *p, const dt_action *a, const dt_action *next, dt_span *span) {
    dt_ctx *ctx = p->ctx;
    const dt_host *host = dt_ctx_host(ctx);
    dt__pipe_slot *slot = &p->slots[a->slot];
    if (dt__pipe_take(p, a) != DT_OK) return dt_error(ctx);
    if (next && dt__pipe_take_early(p, a, next) != DT_OK) return dt_error(ctx);
    dt_wait(ctx, slot->takes);
    slot->takes = NULL;
    slot->ready = 0;
    dt_tape(ctx, a->slot + 1, a->stage);
    dt_micro(ctx, a->micro, p->micros);
    double begin = host->now(host->user);
    if ((a->phase == DT_FORWARD ? dt__pipe_forward(p, a, slot)
                                : dt_backward_at(slot->y, slot->dy, a->phase)) != DT_OK)
        return dt_error(ctx);
    dt__pipe_wait_pace(p, a, begin);
    if (span) span->begin = begin, span->end = host->now(host->user);
    if (a->to >= 0 && a->phase == DT_FORWARD)
        slot->gives[0] = dt__pipe_give(p, a, slot->y->data, slot->y);
    if (a->to >= 0 && a->phase != DT_FORWARD) {
        void *grad = dt__pipe_input_grad(p, slot);
        if (grad) slot->gives[1] = dt__pipe_give(p, a, grad, slot->x);
    }
    if (a->phase == DT_BACKWARD || a->phase == DT_BACKWARD_WEIGHT) slot->open = 0;
    return dt_error(ctx);
}

static void dt__pipe_actions(dt__pipe *p) {
    const dt_schedule *s = p->desc.schedule;
    const dt_action *a = dt_schedule_actions(s, p->rank);
    int n = dt_schedule_count(s, p->rank);
    dt_span *spans = p->desc.spans;
    for (int i = 0; i < n; i++)
        if (dt__pipe_act(p, &a[i], i + 1 < n ? &a[i + 1] : NULL, spans ? &spans[i] : NULL) != DT_OK)
            return;
}

/* Forwards only, a micro-batch through all of this rank's stages before the next one begins. */
static void dt__pipe_forwards(dt__pipe *p) {
    const dt_schedule *s = p->desc.schedule;
    for (int micro = 0; micro < p->micros; micro++)
        for (int stage = 0; stage < p->stages; stage++) {
            dt_action a = { DT_FORWARD, micro, 0, stage, dt__pipe_chunk(p, stage), -1, -1 };
            if (dt_schedule_rank_of(s, stage) != p->rank) continue;
            if (stage > 0) a.from = dt_schedule_rank_of(s, stage - 1);
            if (stage + 1 < p->stages) a.to = dt_schedule_rank_of(s, stage + 1);
            if (dt__pipe_act(p, &a, NULL, NULL) != DT_OK) return;
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
    /* each message has a tag of its own */
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

dt_status dt_pipe_run(dt_ctx *ctx, dt_pipe_desc desc) {
    if (!ctx || dt__pipe_check(ctx, &desc) != DT_OK) return ctx ? dt_error(ctx) : DT_ERR_ARG;
    dt__pipe p = { ctx, desc, dt_comm_rank(desc.comm), desc.forward_micros,
        dt_schedule_stages(desc.schedule), 0, NULL, NULL };
    int no_grad = ctx->no_grad;
    if (!p.micros) p.micros = dt_schedule_micros(desc.schedule);
    p.n_slots = desc.forward_micros ? dt_schedule_chunks(desc.schedule)
                                    : dt_schedule_slots(desc.schedule, p.rank);
    p.slots = (dt__pipe_slot *)desc.schedule->running;
    p.edges = (dt__pipe_edge *)(void *)(p.slots + p.n_slots);
    memset(p.slots, 0, desc.schedule->running_bytes);
    if (desc.forward_micros) ctx->no_grad = 1;
    if (desc.forward_micros)
        dt__pipe_forwards(&p);
    else
        dt__pipe_actions(&p);
    for (int s = 0; s < p.n_slots; s++) dt__pipe_clear(&p, s);
    ctx->no_grad = no_grad;
    dt_tape(ctx, 0, 0);
    dt_micro(ctx, 0, 1);
    return dt_error(ctx);
}

dt_status dt_pipe_spans(
    dt_comm *comm, const dt_schedule *schedule, const dt_span *mine, dt_span *all) {
    int n = dt_schedule_first(schedule, dt_schedule_ranks(schedule)), rank = dt_comm_rank(comm);
    double first = HUGE_VAL;
    if (!schedule || !mine || !all || rank >= dt_schedule_ranks(schedule))
        return comm ? dt_fail(comm->world->ctx, DT_ERR_ARG,
                          "dt_pipe_spans: a NULL argument, or too few ranks")
                    : DT_ERR_ARG;
    memset(all, 0, (size_t)n * sizeof *all);
    memcpy(all + dt_schedule_first(schedule, rank), mine,
        (size_t)dt_schedule_count(schedule, rank) * sizeof *mine);
    dt_status status = dt_sum_doubles(comm, (double *)all, 2 * (size_t)n);
    for (int i = 0; i < n; i++) first = all[i].begin < first ? all[i].begin : first;
    for (int i = 0; i < n; i++) all[i].begin -= first, all[i].end -= first;
    return status;
}

// ==== 18. Order of data and text: code ==========================================================

/* floor(a b / m), at most INT64_MAX, and *rest = a b mod m. a, b >= 0, m >= 1. */
static int64_t dt__mul_div(int64_t a, int64_t b, int64_t m, uint64_t *rest) {
    uint64_t by = (uint64_t)(b % m), left = 0;
    int64_t whole = 0, more = 0;
    if (!dt__mul_ok(a, b / m, &more)) more = INT64_MAX;
    for (int bit = 62; bit >= 0; bit--) { /* a (b mod m) by double-and-add: left < 2 m */
        left *= 2;
        whole *= 2;
        if (left >= (uint64_t)m) left -= (uint64_t)m, whole++;
        if (a >> bit & 1) left += by;
        if (left >= (uint64_t)m) left -= (uint64_t)m, whole++;
    }
    *rest = left;
    return dt__add_most(whole, more);
}

/* Returns dt_order_sequence, and dt_order_epoch in *epoch. Their products need up to 128 bits. */
static int64_t dt__order_at(
    dt_order o, int64_t step, int micro_step, int replica, int i, int64_t *epoch) {
    uint64_t at = (uint64_t)o.before + (uint64_t)i, rest[2], S = (uint64_t)o.sequences;
    int64_t line = (int64_t)micro_step * o.replicas + replica;
    *epoch = 0;
    if (o.sequences < 1 || step < 1 || o.batch < 0 || o.micro_batch < 0 || o.replicas < 0 ||
        o.before < 0)
        return -1;
    if (micro_step < 0 || replica < 0 || i < 0) return -1;
    *epoch = dt__add_most(dt__mul_div(step - 1, o.batch, o.sequences, &rest[0]), (int64_t)(at / S));
    *epoch = dt__add_most(*epoch, dt__mul_div(line, o.micro_batch, o.sequences, &rest[1]));
    at %= S;
    for (int k = 0; k < 2; k++) {
        at += rest[k];
        if (at >= S) at -= S, *epoch = dt__add_most(*epoch, 1);
    }
    return (int64_t)at;
}

int64_t dt_order_sequence(dt_order order, int64_t step, int micro_step, int replica, int i) {
    int64_t epoch;
    return dt__order_at(order, step, micro_step, replica, i, &epoch);
}

int64_t dt_order_epoch(dt_order order, int64_t step, int micro_step, int replica, int i) {
    int64_t epoch;
    dt__order_at(order, step, micro_step, replica, i, &epoch);
    return epoch;
}

/* NULL, or why these numbers are no ramp for any micro-batch. */
static const char *dt__ramp_bad(dt_batch_ramp r) {
    if (r.start < 1 || r.incr < 1 || r.samples < 1 || r.batch < r.start)
        return "it goes by 1 or more from 1 to the batch, over 1 or more";
    int64_t times = (r.batch - r.start) / r.incr;
    return times == INT64_MAX || r.samples > INT64_MAX / (times + 1) ? "too many sequences" : NULL;
}

/* A valid ramp near to r, for an error text: whole units from a multiple of unit to the batch. If
   10,000 increments do not divide that range, the increment is the whole range. */
static dt_batch_ramp dt__ramp_near(dt_batch_ramp r, int64_t unit) {
    int64_t least = r.start < 1 ? 1 : r.start > r.batch ? r.batch : r.start;
    /* not beyond the batch, which is a multiple */
    r.start = least % unit ? least - least % unit + unit : least;
    int64_t left = (r.batch - r.start) / unit, by = r.incr / unit < left ? r.incr / unit : left;
    for (int tries = 0; by > 1 && left % by != 0; tries++) by = tries < 10000 ? by - 1 : left;
    if (by < 1) by = 1;
    r.incr = by * unit;
    int64_t most = INT64_MAX / (left / by < INT64_MAX ? left / by + 1 : INT64_MAX);
    if (r.samples < 1) r.samples = r.batch;
    if (r.samples > most) r.samples = most;
    return r;
}

dt_status dt_batch_ramp_check(dt_batch_ramp r, int64_t unit, char *text, size_t text_bytes) {
    dt__saying t = dt__saying_in(text, text_bytes);
    if (r.samples == 0) return DT_OK;
    dt__say(&t, "batch ramp %lld:%lld:%lld to %lld: ", (long long)r.start, (long long)r.incr,
        (long long)r.samples, (long long)r.batch);
    if (unit < 1 || r.batch < 1 || r.batch % unit != 0) {
        dt__say(
            &t, "that is no multiple of %lld, the micro-batch of all replicas", (long long)unit);
        return DT_ERR_ARG;
    }
    const char *bad = dt__ramp_bad(r);
    int64_t grows = bad ? 0 : r.batch - r.start;
    if (!bad && grows % r.incr == 0 && r.start % unit == 0 && (r.incr % unit == 0 || grows == 0)) {
        if (t.bytes > 0) text[0] = 0;
        return DT_OK;
    }
    dt_batch_ramp near = dt__ramp_near(r, unit);
    if (bad)
        dt__say(&t, "%s", bad);
    else if (grows % r.incr != 0)
        dt__say(&t, "steps of %lld do not lead from %lld to %lld", (long long)r.incr,
            (long long)r.start, (long long)r.batch);
    else
        dt__say(&t, "a batch of %lld is no multiple of %lld, the micro-batch of all replicas",
            (long long)(r.start % unit != 0 ? r.start : r.start + r.incr), (long long)unit);
    dt__say(&t, "; use %lld:%lld:%lld", (long long)near.start, (long long)near.incr,
        (long long)near.samples);
    return DT_ERR_ARG;
}

int64_t dt_batch_ramp_size(dt_batch_ramp r, int64_t consumed) {
    if (consumed >= r.samples || dt__ramp_bad(r)) return r.batch;
    int64_t times = (r.batch - r.start) / r.incr;
    return consumed < 0 ? r.start : r.start + consumed * times / r.samples * r.incr;
}

/* Few iterations: as samples K <= INT64_MAX, fewer than 2^21 sizes can last more than one step;
   later steps skip sizes, more at each step. */
int64_t dt_batch_ramp_before(dt_batch_ramp r, int64_t step) {
    int64_t consumed = 0, left = step > 1 ? step - 1 : 0;
    if (dt__ramp_bad(r)) r.samples = 0;
    int64_t times = r.samples ? (r.batch - r.start) / r.incr : 0;
    while (left > 0 && consumed < r.samples) { /* all steps of one size at once */
        int64_t grown = consumed * times / r.samples, size = r.start + grown * r.incr;
        /* there the next size begins */
        int64_t end = times ? ((grown + 1) * r.samples - 1) / times + 1 : r.samples;
        int64_t most = (end - consumed - 1) / size + 1, steps = most < left ? most : left;
        /* all but the last step end within samples */
        consumed = dt__add_most(consumed + (steps - 1) * size, size);
        left -= steps;
    }
    int64_t rest = 0;
    if (r.batch > 0 && !dt__mul_ok(left, r.batch, &rest)) rest = INT64_MAX;
    return dt__add_most(consumed, rest);
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
    if (t->used == DT__TWISTER_WORDS) { /* all were given out: make as many new ones of them */
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
    dt_ctx *ctx;
    dt_listener listener; /* frees the sampler with the context */
    dt_sampler_desc desc;
    dt_sampler_state state;
    int32_t *order;  /* (samples) of epoch `ordered`; NULL without shuffle */
    int64_t ordered; /* -1: no order yet */
};

static void dt__sampler_release(dt_ctx *ctx, void *user) {
    dt_sampler *s = (dt_sampler *)user;
    dt_free(ctx, DT_MEM_HOST, s->order, (size_t)s->desc.samples * sizeof *s->order);
    dt_free(ctx, DT_MEM_HOST, s, sizeof *s);
}

void dt_sampler_free(dt_sampler *s) {
    if (!s) return;
    dt_unlisten(s->ctx, &s->listener);
    dt__sampler_release(s->ctx, s);
}

dt_sampler *dt_sampler_make(dt_ctx *ctx, dt_sampler_desc d) {
    if (dt_error(ctx) != DT_OK) return NULL;
    if (d.samples < 1 || d.replicas < 1 || d.rank < 0 || d.rank >= d.replicas) {
        dt_fail(ctx, DT_ERR_ARG,
            "dt_sampler_make: %lld samples for rank %d of %d; at least 1 sample and 1 rank are "
            "needed, and ranks count from 0",
            (long long)d.samples, d.rank, d.replicas);
        return NULL;
    }
    if (d.shuffle && d.samples > DT_SAMPLER_SHUFFLED) {
        dt_fail(ctx, DT_ERR_ARG, "dt_sampler_make: %lld samples; at most %d can be shuffled",
            (long long)d.samples, DT_SAMPLER_SHUFFLED);
        return NULL;
    }
    dt_sampler *s = (dt_sampler *)dt_alloc(ctx, DT_MEM_HOST, sizeof *s, "dt_sampler_make");
    if (!s) return NULL;
    memset(s, 0, sizeof *s);
    s->ctx = ctx;
    s->desc = d;
    s->ordered = -1;
    s->listener.closing = dt__sampler_release;
    s->listener.user = s;
    dt_listen(ctx, &s->listener);
    if (d.shuffle)
        s->order = (int32_t *)dt_alloc(
            ctx, DT_MEM_HOST, (size_t)d.samples * sizeof *s->order, "dt_sampler_make");
    if (dt_error(ctx) == DT_OK) return s;
    dt_sampler_free(s);
    return NULL;
}

int64_t dt_sampler_count(const dt_sampler *s) {
    if (!s) return 0;
    return s->desc.samples / s->desc.replicas +
           (s->desc.samples % s->desc.replicas != 0 && !s->desc.drop_last);
}

dt_sampler_state dt_sampler_where(const dt_sampler *s) {
    dt_sampler_state start = { 0, 0 };
    return s ? s->state : start;
}

dt_status dt_sampler_seek(dt_sampler *s, dt_sampler_state state) {
    if (!s || dt_error(s->ctx) != DT_OK) return s ? dt_error(s->ctx) : DT_ERR_ARG;
    if (state.epoch < 0 || state.place < 0 || state.place > dt_sampler_count(s))
        return dt_fail(s->ctx, DT_ERR_ARG, "dt_sampler_seek: place %lld of %lld in epoch %lld",
            (long long)state.place, (long long)dt_sampler_count(s), (long long)state.epoch);
    s->state = state;
    return DT_OK;
}

dt_status dt_sampler_set_epoch(dt_sampler *s, int64_t epoch) {
    dt_sampler_state start = { epoch, 0 };
    return dt_sampler_seek(s, start);
}

/* torch.randperm: each place in turn takes one of the samples that no place before it took. */
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
    s->ordered = s->state.epoch;
}

int64_t dt_sampler_next(dt_sampler *s) {
    if (!s || dt_error(s->ctx) != DT_OK || s->state.place == dt_sampler_count(s)) return -1;
    int64_t at = s->state.place++ * s->desc.replicas, left = s->desc.samples - at; /* at least 1 */
    /* past the end: again */
    at = s->desc.rank < left ? at + s->desc.rank : (s->desc.rank - left) % s->desc.samples;
    if (!s->order) return at;
    if (s->ordered != s->state.epoch) dt__sampler_shuffle(s);
    return s->order[at];
}

double dt_tokens(dt_comm *comm, const int32_t *labels, size_t n) {
    double count = 0;
    if (!labels && n > 0) {
        if (comm) dt_fail(comm->world->ctx, DT_ERR_ARG, "dt_tokens: %zu labels, which are NULL", n);
        return 0;
    }
    for (size_t i = 0; i < n; i++) count += labels[i] >= 0;
    dt_sum_doubles(comm, &count, 1);
    return count;
}

/* head: bytes */
typedef struct dt__text_file {
    const char *path;
    int64_t start, tokens;
    int head;
} dt__text_file;

struct dt_text {
    dt_ctx *ctx;
    dt_listener listener; /* closes the text with the context */
    int seq, files;
    int64_t tokens;
    dt__text_file *file; /* (files) */
    int width;           /* bytes of a token: 1, or 2 and 4 of shards */
    char *names;         /* their paths, one after the other */
    size_t name_bytes;
    /* (seq + 1) tokens of one sequence, as in the file; room for the widest */
    unsigned char *window;
    int fd, current; /* the one file that is open: many ranks may read many files */
};

static void dt__text_shut(dt_text *t) {
    const dt_io *io = dt_ctx_io(t->ctx);
    if (t->fd >= 0) io->close(io->user, t->fd);
    t->fd = t->current = -1;
}

static dt_status dt__text_use(dt_text *t, int i) {
    const dt_io *io = dt_ctx_io(t->ctx);
    if (t->current == i) return DT_OK;
    dt__text_shut(t);
    errno = 0;
    t->fd = io->open(io->user, t->file[i].path, DT_IO_READ);
    if (t->fd < 0) return dt__io_fail(t->ctx, "%s", t->file[i].path);
    t->current = i;
    return DT_OK;
}

static void dt__text_free(dt_ctx *ctx, void *user) {
    dt_text *t = (dt_text *)user;
    dt__text_shut(t);
    dt_free(ctx, DT_MEM_HOST, t->file, (size_t)t->files * sizeof *t->file);
    dt_free(ctx, DT_MEM_HOST, t->names, t->name_bytes);
    dt_free(ctx, DT_MEM_HOST, t->window, 4 * ((size_t)t->seq + 1));
    dt_free(ctx, DT_MEM_HOST, t, sizeof *t);
}

void dt_text_close(dt_text *text) {
    if (!text) return;
    dt_unlisten(text->ctx, &text->listener);
    dt__text_free(text->ctx, text);
}

/* Bytes of the open file i, all of them. */
static dt_status dt__text_bytes(dt_text *t, int i, int64_t at, size_t bytes, unsigned char *out) {
    const dt_io *io = dt_ctx_io(t->ctx);
    while (bytes > 0) {
        errno = 0;
        int64_t got = io->pread(io->user, t->fd, out, bytes, at);
        if (got < 0 && errno == EINTR) continue;
        const char *why = got < 0 ? dt__io_reason() : "the file has become shorter";
        if (got <= 0)
            return dt_fail(
                t->ctx, DT_ERR_IO, "%s: byte %lld: %s", t->file[i].path, (long long)at, why);
        at += got;
        out += got;
        bytes -= (size_t)got;
    }
    return DT_OK;
}

/* What kind of file the open one is, and how many tokens it has. llm.c's shards begin with 256
   words: magic, version, the number of tokens, zeros. */
static dt_status dt__text_kind(dt_text *t, int i, int64_t bytes) {
    dt__text_file *f = &t->file[i];
    uint32_t head[3] = { 0, 0, 0 };
    int width = 1;
    if (bytes >= 4 && dt__text_bytes(t, i, 0, 4, (unsigned char *)head) != DT_OK)
        return dt_error(t->ctx);
    f->tokens = bytes;
    if (head[0] == 20240520 || head[0] == 20240801) {
        uint32_t version = head[0] == 20240520 ? 1 : 7;
        if (bytes >= 12 && dt__text_bytes(t, i, 0, 12, (unsigned char *)head) != DT_OK)
            return dt_error(t->ctx);
        width = version == 1 ? 2 : 4;
        f->head = 1024;
        f->tokens = head[2];
        if (head[1] != version || head[2] > INT32_MAX || bytes != f->head + f->tokens * width)
            return dt_fail(t->ctx, DT_ERR_IO,
                "%s: a shard of version %u with %u tokens has %lld bytes; version %u and "
                "1024 + %d a token are needed",
                f->path, head[1], head[2], (long long)bytes, version, width);
    }
    if (i > 0 && width != t->width)
        return dt_fail(t->ctx, DT_ERR_IO,
            "%s has %d bytes a token, but %s has %d: bytes and shards do not mix", f->path, width,
            t->file[0].path, t->width);
    t->width = width;
    return DT_OK;
}

/* Copies the paths and measures every file. */
static dt_status dt__text_measure(dt_text *t, const char *const *paths) {
    const dt_io *io = dt_ctx_io(t->ctx);
    for (int i = 0; i < t->files; i++) t->name_bytes += strlen(paths[i]) + 1;
    t->names = (char *)dt_alloc(t->ctx, DT_MEM_HOST, t->name_bytes, "dt_text_open");
    char *name = t->names;
    for (int i = 0; i < t->files && dt_error(t->ctx) == DT_OK; i++) {
        size_t bytes = strlen(paths[i]) + 1;
        memcpy(name, paths[i], bytes);
        t->file[i].path = name;
        name += bytes;
        if (dt__text_use(t, i) != DT_OK) break;
        errno = 0;
        int64_t size = io->size(io->user, t->fd);
        if (size < 0) return dt__io_fail(t->ctx, "%s", paths[i]);
        if (dt__text_kind(t, i, size) != DT_OK) break;
        t->file[i].start = t->tokens;
        t->tokens += t->file[i].tokens;
    }
    return dt_error(t->ctx);
}

dt_text *dt_text_open(dt_ctx *ctx, const char *const *paths, int files, int seq) {
    if (dt_error(ctx) != DT_OK) return NULL;
    int named = 0; /* paths that are not NULL */
    while (paths && named < files && paths[named]) named++;
    if (files < 1 || seq < 1 || named < files) {
        dt_fail(ctx, DT_ERR_ARG,
            "dt_text_open: %d files, of which %d are named, sequences of %d tokens", files, named,
            seq);
        return NULL;
    }
    dt_text *t = (dt_text *)dt_alloc(ctx, DT_MEM_HOST, sizeof *t, "dt_text_open");
    if (!t) return NULL;
    memset(t, 0, sizeof *t);
    t->ctx = ctx;
    t->seq = seq;
    t->files = files;
    t->fd = t->current = -1;
    t->listener.closing = dt__text_free;
    t->listener.user = t;
    dt_listen(ctx, &t->listener);
    t->file = (dt__text_file *)dt_alloc(
        ctx, DT_MEM_HOST, (size_t)files * sizeof *t->file, "dt_text_open");
    t->window = (unsigned char *)dt_alloc(ctx, DT_MEM_HOST, 4 * ((size_t)seq + 1), "dt_text_open");
    if (t->file) memset(t->file, 0, (size_t)files * sizeof *t->file);
    if (dt_error(ctx) == DT_OK && dt__text_measure(t, paths) == DT_OK && dt_text_sequences(t) < 1)
        dt_fail(ctx, DT_ERR_IO,
            "%s%s: %lld %s, but one sequence needs %lld (seq %d and the label of its last token)",
            paths[0], files > 1 ? " and others" : "", (long long)t->tokens,
            t->width > 1 ? "tokens" : "bytes", (long long)seq + 1, seq);
    if (dt_error(ctx) == DT_OK) return t;
    dt_text_close(t);
    return NULL;
}

int64_t dt_text_tokens(const dt_text *text) { return text ? text->tokens : 0; }
int64_t dt_text_sequences(const dt_text *text) {
    return dt_text_tokens(text) > 0 ? (text->tokens - 1) / text->seq : 0;
}

int64_t dt_text_limit(const dt_text *text) {
    return !text ? 0 : text->width == 1 ? 256 : text->width == 2 ? 65536 : (int64_t)1 << 31;
}

dt_status dt_text_read(dt_text *t, int64_t sequence, int32_t *ids, int32_t *labels) {
    if (!t || dt_error(t->ctx) != DT_OK) return t ? dt_error(t->ctx) : DT_ERR_ARG;
    if (sequence < 0 || sequence >= dt_text_sequences(t))
        return dt_fail(t->ctx, DT_ERR_ARG, "dt_text_read: sequence %lld of %lld",
            (long long)sequence, (long long)dt_text_sequences(t));
    if (!ids || !labels) return dt_fail(t->ctx, DT_ERR_ARG, "dt_text_read: ids or labels is NULL");
    int64_t at = sequence * t->seq, end = at + t->seq + 1;
    for (int i = 0; i < t->files && at < end; i++) { /* the window may lie in several files */
        const dt__text_file *f = &t->file[i];
        int64_t stop = f->start + f->tokens < end ? f->start + f->tokens : end;
        if (at >= stop) continue;
        unsigned char *out = t->window + (at + t->seq + 1 - end) * t->width;
        if (dt__text_use(t, i) != DT_OK ||
            dt__text_bytes(t, i, f->head + (at - f->start) * t->width,
                (size_t)((stop - at) * t->width), out) != DT_OK)
            return dt_error(t->ctx);
        at = stop;
    }
    for (int i = 0; i <= t->seq; i++) {
        uint16_t two;
        uint32_t token = t->window[i];
        if (t->width == 2) token = (memcpy(&two, t->window + 2 * i, 2), two);
        if (t->width == 4) memcpy(&token, t->window + 4 * i, 4);
        if (token > INT32_MAX)
            return dt_fail(t->ctx, DT_ERR_IO, "%s%s: token %lld is %u, which is no id",
                t->file[0].path, t->files > 1 ? " and others" : "",
                (long long)(sequence * t->seq + i), token);
        if (i < t->seq) ids[i] = (int32_t)token;
        if (i > 0) labels[i - 1] = (int32_t)token;
    }
    return DT_OK;
}

// ==== 19. Dry runs: code ========================================================================

/* Addresses that no memory has: the upper half of all. */
#define DT__DRY_FROM ((uintptr_t)1 << (8 * sizeof(uintptr_t) - 1))

static int dt__is_dry(const void *p) { return (uintptr_t)p >= DT__DRY_FROM; }

static void *dt__dry_alloc(void *user, size_t bytes) {
    dt_dry *dry = (dt_dry *)user;
    uintptr_t p = DT__DRY_FROM + dry->next;
    dry->next += (bytes + 63) / 64 * 64;
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

/* Figures that ranks exchange may lie in real memory: their sums are taken. */
static dt_status dt__dry_reduce_real(const dt_reduce_args *a) {
    int dry = dt__is_dry(a->out);
    for (int i = 0; i < a->n; i++) dry |= dt__is_dry(a->in[i]);
    for (int i = 0; i < a->n_also; i++) dry |= dt__is_dry(a->also[i]);
    return dry ? DT_OK : dt_kernels_cpu()->reduce(a, NULL);
}

static double dt__dry_attention_flops(
    int64_t batch, int64_t heads, int64_t tq, int64_t tk, int64_t dim) {
    return 4.0 * (double)batch * (double)heads * (double)tq * (double)tk * (double)dim;
}

enum {
#define DT__DRY_ID(k) DT__DRY_##k,
    DT_KERNELS(DT__DRY_ID)
#undef DT__DRY_ID
        DT__DRY_KERNELS
};

/* Counts a call. Two products forward and five backward make an attention. */
static dt_status dt__dry_call(dt_dry *dry, int kernel, const void *args) {
    const dt_matmul_args *m = (const dt_matmul_args *)args;
    const dt_attention_args *a = (const dt_attention_args *)args;
    const dt_attention_back_args *b = (const dt_attention_back_args *)args;
    dry->kernels++;
    if (kernel == DT__DRY_matmul)
        dry->flops +=
            2.0 * (double)m->m * (double)m->n * (double)m->k * (double)(m->batch ? m->batch : 1);
    if (kernel == DT__DRY_attention)
        dry->flops += dt__dry_attention_flops(a->batch, a->heads, a->tq, a->tk, a->dim);
    if (kernel == DT__DRY_attention_back)
        dry->flops += 2.5 * dt__dry_attention_flops(b->batch, b->heads, b->tq, b->tk, b->dim);
    return kernel == DT__DRY_reduce ? dt__dry_reduce_real((const dt_reduce_args *)args) : DT_OK;
}

#define DT__DRY_FN(k) \
    static dt_status dt__dry_##k(const dt_##k##_args *a, void *stream) { \
        return dt__dry_call((dt_dry *)stream, DT__DRY_##k, a); \
    }
DT_KERNELS(DT__DRY_FN)
#undef DT__DRY_FN

dt_status dt_dry_begin(dt_ctx *ctx, dt_dry *dry) {
#define DT__DRY_ENTRY(k) dt__dry_##k,
    dt_kernels table = { "dry", dt__dry_alloc, dt__dry_free, dt__dry_move, NULL, NULL, NULL, NULL,
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, DT_KERNELS(DT__DRY_ENTRY) };
#undef DT__DRY_ENTRY
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    if (!dry || ctx->root || ctx->units || ctx->work)
        return dt_fail(ctx, DT_ERR_ARG, "dt_dry_begin: %s",
            dry ? "the context has tensors already" : "no dt_dry");
    table.user = dry;
    /* what the device's kernels are lent counts, and what is kept */
    table.work_bytes = ctx->kernels.work_bytes;
    table.loss_numbers = ctx->kernels.loss_numbers;
    if (ctx->opened) ctx->kernels.close(ctx->stream);
    ctx->opened = 0;
    ctx->kernels = table;
    ctx->stream = dry;
    return DT_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* DT_PARALLEL_IMPL */

/* HISTORY
     0.1.0   the mesh, placements, layers of tensor, context and expert parallelism, schedules and
             pipelines, the order of data, the sampler, text and token shards

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
