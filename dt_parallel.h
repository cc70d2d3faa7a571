/* dt_parallel.h - v0.1.0 - layouts: the mesh of ranks, placements of tensors, the order of data - public domain or MIT,
   see the end of the file

   The third of four single-header libraries; dt_tensor.h names them all. It arranges ranks along the axes of a layout
   (data, tensor, context, pipeline, expert), moves a tensor from one placement over a group to another with the right
   backward, and says which rank reads which sequence.

   DOES NOT: reduce gradients of parameters (dt_zero.h does, for all axes at once), know any model. Not in this version:
   layers for tensor and context parallelism, pipeline schedules, expert dispatch. The mesh has their axes already, and
   dt_redistribute is what they are made of: the tests build tensor-parallel layers from it.

   QUICK EXAMPLE (a tensor-parallel product over 2 of 4 ranks)

       #define DT_IMPLEMENTATION
       #include "dt_parallel.h"
       #include <stdio.h>

       static dt_status train(dt_ctx *ctx, void *user) {
           dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .tp = 2 });         // 4 ranks = dp 2 x tp 2
           dt_tensor *w1 = dt_param_at(ctx, "w1", DT_SHAPE(8, 4), DT_NORMAL(0.1), // this rank holds 4 of 8 rows
               (dt_param_desc){ .cuts = { { mesh.tp, 0 } } });
           dt_tensor *w2 = dt_param_at(ctx, "w2", DT_SHAPE(1, 8), DT_NORMAL(0.1), // and 4 of 8 columns
               (dt_param_desc){ .cuts = { { mesh.tp, 1 } } });
           float one[4] = { 1, 2, 3, 4 };
           dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(1, 4), one);
           x = dt_redistribute(x, mesh.tp, DT_REPLICATE, DT_COPY);              // Megatron's f
           dt_tensor *h = dt_gelu(dt_linear(x, w1, NULL));
           dt_tensor *y = dt_redistribute(dt_linear(h, w2, NULL), mesh.tp, DT_PARTIAL, DT_REPLICATE); // and g
           double value = dt_item(y);
           if (dt_ctx_rank(ctx) == 0) printf("%g\n", value);
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
     1. Mesh
     2. Placements
     3. Order of data
     4. Text
     5. Implementation: mesh
     6. Placements: code
     7. Order of data and text: code

   CONTRACT
     Memory     A mesh is a value; its groups belong to the world. Tensors live until dt_reset as those of ops do. A
                dt_text is freed by dt_text_close, a dt_sampler by dt_sampler_free; what is left, with the context.
     Errors     As in dt_tensor.h: sticky, NULL in gives NULL out.
     Threads    As in dt_comm.h.
     Order      Sums over a group run in rank order.
     Groups     A group of one is NULL, the identity, and free.
     Tags       [local], [pairwise], [collective: group]. */

#ifndef DT_PARALLEL_H
#define DT_PARALLEL_H

#include "dt_comm.h"

#if DT_VERSION != 100
#error "dt_parallel.h 0.1.0 needs dt_tensor.h and dt_comm.h 0.1.0: copy all headers from one release"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ==== 1. Mesh =======================================================================================================

/* Ranks of each axis. Their product is the number of ranks. */
typedef struct dt_mesh_desc {
    int dp;     /* data: 0 -> what the others leave */
    int tp;     /* tensor: 0 -> 1, as all below */
    int cp;     /* context */
    int pp;     /* pipeline */
    int ep;     /* expert */
} dt_mesh_desc;

/* This rank's groups; NULL is a group of one. rank = (((pp*DP + dp)*EP + ep)*CP + cp)*TP + tp. */
typedef struct dt_mesh {
    dt_comm *world, *dp, *tp, *cp, *pp, *ep;
    dt_comm *data;              /* dp x ep x cp: the copies of a dense parameter, each with a part of the data */
    dt_mesh_desc sizes;         /* resolved */
    dt_mesh_desc at;            /* this rank's coordinates */
    int replica, replicas;      /* dp_rank*EP + ep_rank of R = DP*EP: the batch is cut over these */
} dt_mesh;

/* [local] Resolves zeros and checks the product. On failure DT_ERR_ARG and a text with the numbers and a legal choice;
   needs no context, so a program can refuse a layout before any rank starts. */
DT_API dt_status dt_mesh_sizes(dt_mesh_desc *sizes, int ranks, char *text, size_t text_bytes);
/* [collective: world] The groups of every axis, named "dp", "tp", ... with their byte counters. After a failure all
   groups are NULL and there is one replica. */
DT_API dt_mesh dt_mesh_make(dt_ctx *ctx, dt_mesh_desc desc);

// ==== 2. Placements =================================================================================================

/* How a tensor lies over a group of N ranks.
       REPLICATE   every rank has the whole value, and the whole gradient
       COPY        every rank has the whole value; each rank's gradient is a part of the sum
       SHARD(dim)  rank r has part r of N equal parts along dim
       PARTIAL     the value is the sum over the ranks, not yet taken; every rank has the whole gradient
   The gradient of a COPY tensor is PARTIAL and that of a PARTIAL tensor is COPY; the others are their own. */
enum { DT_PLACE_REPLICATE = 0, DT_PLACE_COPY, DT_PLACE_SHARD, DT_PLACE_PARTIAL };
typedef struct dt_place { int kind, dim; } dt_place;
#define DT_REPLICATE  ((dt_place){ DT_PLACE_REPLICATE, 0 })
#define DT_COPY       ((dt_place){ DT_PLACE_COPY, 0 })
#define DT_PARTIAL    ((dt_place){ DT_PLACE_PARTIAL, 0 })
#define DT_SHARD(dim) ((dt_place){ DT_PLACE_SHARD, (dim) })

/* [collective: comm] x from one placement to another. Over a group of one, and for from equal to to, x itself.

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

   The backward of a -> b is the row dual(b) -> dual(a) of this same table. Fails with DT_ERR_SHAPE where N does not
   divide a dimension and DT_ERR_UNSUPPORTED where there is no row. Megatron: arXiv:1909.08053, arXiv:2205.05198;
   Ulysses: arXiv:2309.14509. */
DT_API dt_tensor *dt_redistribute(dt_tensor *x, dt_comm *comm, dt_place from, dt_place to);

// ==== 3. Order of data ==============================================================================================

/* Which sequences a replica reads: B = b * a * R sequences a step, the same ones in the same order in every layout. */
typedef struct dt_order {
    int64_t sequences;      /* S: in the data, at least 1 */
    int64_t batch;          /* B: of one step over all replicas */
    int     micro_batch;    /* b: of one forward of one replica */
    int     replicas;       /* R */
} dt_order;

/* [local] The sequence that replica r reads as the i-th of micro-step j of step n (from 1):
   ((n-1) B + (j R + r) b + i) mod S; -1 where there are no sequences. */
DT_API int64_t dt_order_sequence(dt_order order, int64_t step, int micro_step, int replica, int i);
/* [local] How many times the data have been read through when that sequence is read:
   floor(((n-1) B + (j R + r) b + i) / S); 0 where there are no sequences. */
DT_API int64_t dt_order_epoch(dt_order order, int64_t step, int micro_step, int replica, int i);

/* Which of n samples each of R ranks reads, as PyTorch's DistributedSampler deals them out. An epoch has an order of
   all samples: 0, 1, .. n-1, or shuffled. It is made a multiple of R long: at its end it begins again, as often as it
   takes, or with drop_last what is over is left out. Rank r reads entries r, r + R, r + 2R, .. of it, so that every
   rank reads as many.
       Shuffled it is the torch.randperm(n) of a CPU generator with seed + epoch, of which 32 bits count: for each place
   in turn, a number of the Mersenne twister modulo what is left says which sample comes there. From n = 2^32 / 20 on
   torch draws otherwise; so many samples are not shuffled here. */
typedef struct dt_sampler dt_sampler;
#define DT_SAMPLER_SHUFFLED 214748363   /* samples: the most that can be shuffled */
typedef struct dt_sampler_desc {
    int64_t  samples;           /* n: at least 1 */
    int      replicas, rank;    /* R: at least 1; 0 <= r < R */
    uint64_t seed;              /* the same on every rank */
    int      shuffle;           /* 1: another order in each epoch */
    int      drop_last;         /* 1: leave out up to R-1 samples of an epoch; else up to R-1 are read again */
} dt_sampler_desc;

/* Where a sampler is: what a checkpoint keeps of it, besides what its desc says. */
typedef struct dt_sampler_state {
    int64_t epoch;              /* from 0 */
    int64_t place;              /* how many samples of this epoch the rank has had */
} dt_sampler_state;

/* [local] A sampler at the start of epoch 0. Shuffled it keeps 4 bytes a sample (class host), else none. NULL after
   DT_ERR_ARG: a number is outside its range; DT_ERR_MEM. */
DT_API dt_sampler *dt_sampler_make(dt_ctx *ctx, dt_sampler_desc desc);
/* [local] NULL is allowed. A sampler that is left when the context ends is freed with it. */
DT_API void dt_sampler_free(dt_sampler *sampler);
/* [local] How many samples the rank reads in an epoch: n / R rounded up, or with drop_last down. 0 for NULL. */
DT_API int64_t dt_sampler_count(const dt_sampler *sampler);
/* [local] The rank's next sample, 0 .. n-1; -1 when the epoch is over, until it is told another, and for NULL. */
DT_API int64_t dt_sampler_next(dt_sampler *sampler);
/* [local] Goes to the start of an epoch. The order of an epoch does not depend on those before. DT_ERR_ARG: below 0. */
DT_API dt_status dt_sampler_set_epoch(dt_sampler *sampler, int64_t epoch);
/* [local] Where it is, { 0, 0 } for NULL; and back to there: what is read from then on is what was read from there on.
   A new order is computed when the first sample of it is asked for. DT_ERR_ARG: an epoch below 0, a place outside
   0 .. dt_sampler_count. */
DT_API dt_sampler_state dt_sampler_where(const dt_sampler *sampler);
DT_API dt_status dt_sampler_seek(dt_sampler *sampler, dt_sampler_state state);

/* [collective: comm] The number of labels >= 0 over the ranks of comm: the denominator that makes a loss a mean over
   the whole step in every layout. labels (n) in host memory; give those of all micro-batches at once. Not counted as
   traffic. After a failure this rank's own number. */
DT_API double dt_tokens(dt_comm *comm, const int32_t *labels, size_t n);

// ==== 4. Text =======================================================================================================

/* Files read as one string of tokens: bytes, each a token 0..255, or llm.c token shards, known by their magic (20240520
   with 16 bits a token, 20240801 with 32). All files are of one kind. N tokens hold S = floor((N-1)/T) sequences;
   sequence i is tokens iT .. iT+T, so that its labels are its inputs shifted by one. */
typedef struct dt_text dt_text;

/* [local] Opens `files` files through the context's io table and cuts them into sequences of seq tokens. NULL after
   DT_ERR_IO: a file is missing, unreadable, no file or a broken shard, kinds are mixed, or all together are shorter
   than one sequence. */
DT_API dt_text *dt_text_open(dt_ctx *ctx, const char *const *paths, int files, int seq);
/* [local] NULL is allowed. A text that is still open when the context ends is closed with it. */
DT_API void dt_text_close(dt_text *text);
/* [local] Tokens and sequences in the text; 0 for NULL. */
DT_API int64_t dt_text_tokens(const dt_text *text);
DT_API int64_t dt_text_sequences(const dt_text *text);
/* [local] No token is this large: 256 for bytes, 65,536 or 2^31 for shards. dt_embedding refuses ids outside its table,
   so a vocabulary may be smaller, if the tokens are. 0 for NULL. */
DT_API int64_t dt_text_limit(const dt_text *text);
/* [local] ids (seq) and labels (seq) of one sequence. DT_ERR_ARG outside the text; DT_ERR_IO naming file and token. */
DT_API dt_status dt_text_read(dt_text *text, int64_t sequence, int32_t *ids, int32_t *labels);

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

// ==== 5. Implementation: mesh =======================================================================================

dt_status dt_mesh_sizes(dt_mesh_desc *sizes, int ranks, char *text, size_t text_bytes) {
    int *axes[5] = { &sizes->dp, &sizes->tp, &sizes->cp, &sizes->pp, &sizes->ep };
    if (ranks < 1) {
        snprintf(text, text_bytes, "%d ranks; at least 1 is needed", ranks);
        return DT_ERR_ARG;
    }
    for (int i = 0; i < 5; i++) {
        if (*axes[i] < 0) {
            snprintf(text, text_bytes, "an axis of %d ranks; use 1 or more", *axes[i]);
            return DT_ERR_ARG;
        }
        if (i > 0 && *axes[i] == 0) *axes[i] = 1;
    }
    int64_t others = 1, most = (int64_t)1 << 31; /* no number of ranks is a multiple of more, so it need not grow */
    for (int i = 1; i < 5; i++) others = others * *axes[i] < most ? others * *axes[i] : most;
    int64_t all = others * (sizes->dp ? sizes->dp : 1);
    if (ranks % others == 0 && sizes->dp == 0) sizes->dp = (int)(ranks / others);
    if (sizes->dp == 0) {
        int64_t next = ((ranks - 1) / others + 1) * others;
        snprintf(text, text_bytes, "tp %d x cp %d x pp %d x ep %d does not divide %d ranks; use %lld ranks or smaller "
            "axes", sizes->tp, sizes->cp, sizes->pp, sizes->ep, ranks, (long long)next);
        return DT_ERR_ARG;
    }
    if (sizes->dp * others != ranks) {
        char choice[40] = "";
        if (ranks % others == 0) snprintf(choice, sizeof choice, ", or use dp %d", (int)(ranks / others));
        snprintf(text, text_bytes, "dp %d x tp %d x cp %d x pp %d x ep %d = %lld, but there are %d ranks; use %lld "
            "ranks%s", sizes->dp, sizes->tp, sizes->cp, sizes->pp, sizes->ep, (long long)all, ranks, (long long)all,
            choice);
        return DT_ERR_ARG;
    }
    return DT_OK;
}

/* The group of the ranks that differ from this one only by `offset`, a coordinate times its stride. */
static dt_comm *dt__mesh_axis(dt_comm *world, int size, int offset, int key, const char *name, dt_axis axis) {
    if (size == 1) return NULL;
    dt_comm *comm = dt_comm_split(world, dt_comm_rank(world) - offset, key, name);
    dt_comm_set_axis(comm, axis);
    return comm;
}

dt_mesh dt_mesh_make(dt_ctx *ctx, dt_mesh_desc desc) {
    char    why[200];
    dt_mesh none, mesh;
    memset(&none, 0, sizeof none);
    none.replicas = 1; /* programs divide by it before they look at the error */
    if (dt_error(ctx) != DT_OK) return none;
    dt_comm *world = dt_world(ctx);
    int      rank = dt_comm_rank(world);
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
    mesh.data = copies == desc.dp ? mesh.dp : dt__mesh_axis(world, copies, offset, offset, "data", DT_AXIS_DP);
    mesh.replica = mesh.at.dp * desc.ep + mesh.at.ep;
    mesh.replicas = desc.dp * desc.ep;
    return dt_error(ctx) == DT_OK ? mesh : none;
}

// ==== 6. Placements: code ===========================================================================================

/* One move of a dense array over a group: the argument of every row of the table. */
typedef struct dt__place_move {
    dt_ctx     *ctx;
    dt_comm    *comm;
    dt_dtype    dtype;
    const void *in;
    void       *out, *scratch;      /* scratch: as many times the larger of in and out as the table says */
    dt_shape    in_shape, out_shape;
    int         from_dim, to_dim;   /* of SHARD placements */
} dt__place_move;

/* A dense shape seen as (outer, n, inner) around one dimension; bytes of a part of `parts` along it. */
typedef struct dt__cut_view { size_t outer, part_bytes, row_bytes; } dt__cut_view;

static dt__cut_view dt__cut_of(dt_shape shape, int dim, int parts, dt_dtype dtype) {
    dt__cut_view v = { 1, dt_dtype_size(dtype), 0 };
    for (int i = 0; i < dim; i++) v.outer *= (size_t)shape.d[i];
    for (int i = dim; i < shape.nd; i++) v.part_bytes *= (size_t)shape.d[i];
    v.row_bytes = v.part_bytes;
    v.part_bytes /= (size_t)parts;
    return v;
}

static dt_status dt__copy_rows(const dt__place_move *m, void *out, size_t out_stride, const void *in, size_t in_stride,
    size_t rows, size_t row_bytes) {
    dt_copy_args a = { out, in, rows, row_bytes, out_stride, in_stride };
    return DT__KERNEL(m->ctx, "dt_redistribute", copy, &a);
}

/* Part `part` of the whole (shape `whole`, along dim) to or from a dense array. */
static dt_status dt__part_out(const dt__place_move *m, dt_shape whole, int dim, int part, void *dense, const void *in) {
    dt__cut_view v = dt__cut_of(whole, dim, dt_comm_size(m->comm), m->dtype);
    const char  *from = (const char *)in + (size_t)part * v.part_bytes;
    return dt__copy_rows(m, dense, v.part_bytes, from, v.row_bytes, v.outer, v.part_bytes);
}

static dt_status dt__part_in(const dt__place_move *m, dt_shape whole, int dim, int part, const void *dense, void *out) {
    dt__cut_view v = dt__cut_of(whole, dim, dt_comm_size(m->comm), m->dtype);
    char        *to = (char *)out + (size_t)part * v.part_bytes;
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
    size_t    count = (size_t)dt_count(m->in_shape), bytes = count * dt_dtype_size(m->dtype);
    dt_status status = dt_all_gather(m->comm, m->in, m->scratch, count, m->dtype);
    for (int r = 0; status == DT_OK && r < dt_comm_size(m->comm); r++)
        status = dt__part_in(m, m->out_shape, m->from_dim, r, (char *)m->scratch + (size_t)r * bytes, m->out);
    return status;
}

static dt_status dt__move_reduce_scatter(const dt__place_move *m) {
    size_t    count = (size_t)dt_count(m->out_shape), bytes = count * dt_dtype_size(m->dtype);
    dt_status status = DT_OK;
    for (int r = 0; status == DT_OK && r < dt_comm_size(m->comm); r++)
        status = dt__part_out(m, m->in_shape, m->to_dim, r, (char *)m->scratch + (size_t)r * bytes, m->in);
    return status == DT_OK ? dt_reduce_scatter(m->comm, m->scratch, m->out, count, m->dtype, DT_SUM) : status;
}

/* in: whole along to_dim, a part along from_dim; out the other way round. The stage holds what is sent, and then, since
   an all-to-all is not in place, what arrives lies behind it. */
static dt_status dt__move_all_to_all(const dt__place_move *m) {
    int       n = dt_comm_size(m->comm);
    size_t    count = (size_t)dt_count(m->in_shape) / (size_t)n, bytes = count * dt_dtype_size(m->dtype);
    char     *sent = (char *)m->scratch, *got = sent + (size_t)n * bytes;
    dt_status status = DT_OK;
    for (int r = 0; status == DT_OK && r < n; r++)
        status = dt__part_out(m, m->in_shape, m->to_dim, r, sent + (size_t)r * bytes, m->in);
    if (status == DT_OK) status = dt_all_to_all(m->comm, sent, got, count, m->dtype);
    for (int r = 0; status == DT_OK && r < n; r++)
        status = dt__part_in(m, m->out_shape, m->from_dim, r, got + (size_t)r * bytes, m->out);
    return status;
}

typedef struct dt__place_row { int from, to, buffers; dt_status (*move)(const dt__place_move *m); } dt__place_row;

static const dt__place_row dt__place_table[] = {
    { DT_PLACE_PARTIAL, DT_PLACE_REPLICATE, 0, dt__move_all_reduce },
    { DT_PLACE_REPLICATE, DT_PLACE_COPY, 0, dt__move_identity },
    { DT_PLACE_SHARD, DT_PLACE_COPY, 1, dt__move_all_gather },
    { DT_PLACE_PARTIAL, DT_PLACE_SHARD, 1, dt__move_reduce_scatter },
    { DT_PLACE_SHARD, DT_PLACE_REPLICATE, 1, dt__move_all_gather },
    { DT_PLACE_REPLICATE, DT_PLACE_SHARD, 0, dt__move_slice },
    { DT_PLACE_SHARD, DT_PLACE_SHARD, 2, dt__move_all_to_all },
    { DT_PLACE_REPLICATE, DT_PLACE_PARTIAL, 0, dt__move_keep_first },
    { DT_PLACE_COPY, DT_PLACE_REPLICATE, 0, dt__move_identity },
};

static const dt__place_row *dt__place_find(dt_place from, dt_place to) {
    for (size_t i = 0; i < sizeof dt__place_table / sizeof *dt__place_table; i++)
        if (dt__place_table[i].from == from.kind && dt__place_table[i].to == to.kind) return &dt__place_table[i];
    return NULL;
}

/* The placement of the gradient of a tensor so placed. */
static dt_place dt__place_dual(dt_place p) {
    if (p.kind == DT_PLACE_COPY) return DT_PARTIAL;
    if (p.kind == DT_PLACE_PARTIAL) return DT_COPY;
    return p;
}

static const char *dt__place_name(dt_place p) {
    static const char *const names[] = { "REPLICATE", "COPY", "SHARD", "PARTIAL" };
    return p.kind >= 0 && p.kind < 4 ? names[p.kind] : "no placement";
}

/* Runs one row; `accumulate` adds the result to what out holds. */
static dt_status dt__place_run(dt__place_move m, dt_place from, dt_place to, int accumulate) {
    const dt__place_row *row = dt__place_find(from, to);
    size_t in = (size_t)dt_count(m.in_shape), out = (size_t)dt_count(m.out_shape), size = dt_dtype_size(m.dtype);
    size_t larger = (in > out ? in : out) * size;
    void  *sum = m.out;
    if (!row) return DT_ERR_UNSUPPORTED;
    m.from_dim = from.dim;
    m.to_dim = to.dim;
    size_t need = (size_t)(row->buffers + (accumulate != 0)) * larger;
    char  *work = need ? (char *)dt_scratch(m.ctx, need) : NULL;
    if (need && !work) return dt_error(m.ctx);
    m.scratch = work;
    if (accumulate && work) m.out = work + (size_t)row->buffers * larger;
    dt_status status = row->move(&m);
    if (status != DT_OK || !accumulate) return status;
    const void    *terms[2] = { sum, m.out };
    dt_reduce_args a = { m.dtype, sum, terms, 2, out, DT_SUM, NULL, 0, 0 };
    return DT__KERNEL(m.ctx, "dt_redistribute", reduce, &a);
}

typedef struct dt__place_saved { dt_comm *comm; dt_place from, to; } dt__place_saved;

/* The gradient of a -> b is moved from the dual of b to the dual of a. */
static dt_status dt__redistribute_back(dt_node *n) {
    const dt__place_saved *saved = (const dt__place_saved *)n->saved;
    dt_tensor     *x = n->in[0];
    int            accumulate = 0;
    dt__place_move m;
    memset(&m, 0, sizeof m);
    m.ctx = x->ctx;
    m.comm = saved->comm;
    m.dtype = x->dtype;
    m.in = n->out->grad;
    m.in_shape = n->out->shape;
    m.out_shape = x->shape;
    m.out = dt_grad_raw(n, 0, &accumulate);
    if (!m.out) return dt_error(x->ctx);
    return dt__place_run(m, dt__place_dual(saved->to), dt__place_dual(saved->from), accumulate);
}

/* The local shape after the move, or nd -1 where it does not exist. */
static dt_shape dt__place_shape(dt_shape shape, int n, dt_place from, dt_place to) {
    int bad = (from.kind == DT_PLACE_SHARD && (from.dim < 0 || from.dim >= shape.nd)) ||
              (to.kind == DT_PLACE_SHARD && (to.dim < 0 || to.dim >= shape.nd));
    if (!bad && from.kind == DT_PLACE_SHARD) shape.d[from.dim] *= n;
    if (!bad && to.kind == DT_PLACE_SHARD) {
        bad = shape.d[to.dim] % n != 0;
        shape.d[to.dim] /= n;
    }
    if (bad) shape.nd = -1;
    return shape;
}

dt_tensor *dt_redistribute(dt_tensor *x, dt_comm *comm, dt_place from, dt_place to) {
    dt_ctx *ctx = dt__op("dt_redistribute", x, NULL, NULL);
    if (!ctx) return NULL;
    if (dt_comm_size(comm) == 1) return x;
    if (from.kind == to.kind && (from.kind != DT_PLACE_SHARD || from.dim == to.dim)) return x;
    if (!dt__place_find(from, to)) {
        dt_fail(ctx, DT_ERR_UNSUPPORTED, "dt_redistribute(%s): no way from %s to %s; go through REPLICATE", x->name,
            dt__place_name(from), dt__place_name(to));
        return NULL;
    }
    dt_shape shape = dt__place_shape(x->shape, dt_comm_size(comm), from, to);
    if (shape.nd < 0) {
        dt_fail(ctx, DT_ERR_SHAPE, "dt_redistribute(%s): %s from %s %d to %s %d over %d ranks: a dimension is missing "
            "or not divisible", x->name, dt__shape_text(x->shape).s, dt__place_name(from), from.dim, dt__place_name(to),
            to.dim, dt_comm_size(comm));
        return NULL;
    }
    int            free_of_copy = dt__place_find(from, to)->move == dt__move_identity;
    dt_tensor     *y = free_of_copy ? dt_alias(x) : dt_new(ctx, x->dtype, shape);
    dt__place_move m;
    if (!y) return NULL;
    memset(&m, 0, sizeof m);
    m.ctx = ctx;
    m.comm = comm;
    m.dtype = x->dtype;
    m.in = x->data;
    m.in_shape = x->shape;
    m.out = y->data;
    m.out_shape = shape;
    dt_status status = dt__place_run(m, from, to, 0);
    if (status != DT_OK) {
        dt_fail(ctx, status, "dt_redistribute(%s): %s to %s", x->name, dt__place_name(from), dt__place_name(to));
        return NULL;
    }
    dt_record_desc   d = dt__desc("dt_redistribute", x, NULL, NULL, dt__redistribute_back, sizeof(dt__place_saved));
    dt__place_saved *saved = (dt__place_saved *)dt_record_saved(y, d);
    if (saved) {
        saved->comm = comm;
        saved->from = from;
        saved->to = to;
    }
    return dt_error(ctx) == DT_OK ? y : NULL;
}

// ==== 7. Order of data and text: code ===============================================================================

int64_t dt_order_sequence(dt_order order, int64_t step, int micro_step, int replica, int i) {
    if (order.sequences < 1) return -1;
    int64_t k = ((int64_t)micro_step * order.replicas + replica) * order.micro_batch + i;
    return ((step - 1) % order.sequences * (order.batch % order.sequences) + k) % order.sequences;
}

int64_t dt_order_epoch(dt_order order, int64_t step, int micro_step, int replica, int i) {
    if (order.sequences < 1) return 0;
    int64_t k = ((int64_t)micro_step * order.replicas + replica) * order.micro_batch + i, S = order.sequences;
    int64_t times = (step - 1) / S, rest = (step - 1) % S; /* (step - 1) B itself may not fit */
    return times * order.batch + rest * (order.batch / S) + (rest * (order.batch % S) + k) / S;
}

/* The Mersenne twister, MT19937: M. Matsumoto, T. Nishimura, ACM TOMACS 8 (1998) 3-30. */
enum { DT__TWISTER_WORDS = 624, DT__TWISTER_APART = 397 };
typedef struct dt__twister { uint32_t word[DT__TWISTER_WORDS]; int used; } dt__twister;

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
    dt_ctx          *ctx;
    dt_listener      listener;      /* frees the sampler with the context */
    dt_sampler_desc  desc;
    dt_sampler_state state;
    int32_t         *order;         /* (samples) of epoch `ordered`; NULL without shuffle */
    int64_t          ordered;       /* -1: no order yet */
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
        dt_fail(ctx, DT_ERR_ARG, "dt_sampler_make: %lld samples for rank %d of %d; at least 1 sample and 1 rank are "
            "needed, and ranks count from 0", (long long)d.samples, d.rank, d.replicas);
        return NULL;
    }
    if (d.shuffle && d.samples > DT_SAMPLER_SHUFFLED) {
        dt_fail(ctx, DT_ERR_ARG, "dt_sampler_make: %lld samples; at most %d can be shuffled", (long long)d.samples,
            DT_SAMPLER_SHUFFLED);
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
        s->order = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, (size_t)d.samples * sizeof *s->order, "dt_sampler_make");
    if (dt_error(ctx) == DT_OK) return s;
    dt_sampler_free(s);
    return NULL;
}

int64_t dt_sampler_count(const dt_sampler *s) {
    if (!s) return 0;
    return s->desc.samples / s->desc.replicas + (s->desc.samples % s->desc.replicas != 0 && !s->desc.drop_last);
}

dt_sampler_state dt_sampler_where(const dt_sampler *s) {
    dt_sampler_state start = { 0, 0 };
    return s ? s->state : start;
}

dt_status dt_sampler_seek(dt_sampler *s, dt_sampler_state state) {
    if (!s || dt_error(s->ctx) != DT_OK) return s ? dt_error(s->ctx) : DT_ERR_ARG;
    if (state.epoch < 0 || state.place < 0 || state.place > dt_sampler_count(s))
        return dt_fail(s->ctx, DT_ERR_ARG, "dt_sampler_seek: place %lld of %lld in epoch %lld", (long long)state.place,
            (long long)dt_sampler_count(s), (long long)state.epoch);
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
    int64_t     n = s->desc.samples;
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
    at = s->desc.rank < left ? at + s->desc.rank : (s->desc.rank - left) % s->desc.samples; /* past the end: again */
    if (!s->order) return at;
    if (s->ordered != s->state.epoch) dt__sampler_shuffle(s);
    return s->order[at];
}

double dt_tokens(dt_comm *comm, const int32_t *labels, size_t n) {
    double count = 0;
    for (size_t i = 0; i < n; i++) count += labels[i] >= 0;
    dt_sum_doubles(comm, &count, 1);
    return count;
}

typedef struct dt__text_file { const char *path; int64_t start, tokens; int head; } dt__text_file; /* head: bytes */

struct dt_text {
    dt_ctx        *ctx;
    dt_listener    listener;        /* closes the text with the context */
    int            seq, files;
    int64_t        tokens;
    dt__text_file *file;            /* (files) */
    int            width;           /* bytes of a token: 1, or 2 and 4 of shards */
    char          *names;           /* their paths, one after the other */
    size_t         name_bytes;
    unsigned char *window;          /* (seq + 1) tokens of one sequence, as in the file; room for the widest */
    int            fd, current;     /* the one file that is open: many ranks may read many files */
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
    t->fd = io->open(io->user, t->file[i].path, 0);
    if (t->fd < 0) return dt_fail(t->ctx, DT_ERR_IO, "%s: %s", t->file[i].path, strerror(errno));
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
        const char *why = got < 0 ? strerror(errno) : "the file has become shorter";
        if (got <= 0) return dt_fail(t->ctx, DT_ERR_IO, "%s: byte %lld: %s", t->file[i].path, (long long)at, why);
        at += got;
        out += got;
        bytes -= (size_t)got;
    }
    return DT_OK;
}

/* What kind of file the open one is, and how many tokens it has. llm.c's shards begin with 256 words: magic, version,
   the number of tokens, zeros. */
static dt_status dt__text_kind(dt_text *t, int i, int64_t bytes) {
    dt__text_file *f = &t->file[i];
    uint32_t       head[3] = { 0, 0, 0 };
    int            width = 1;
    if (bytes >= 4 && dt__text_bytes(t, i, 0, 4, (unsigned char *)head) != DT_OK) return dt_error(t->ctx);
    f->tokens = bytes;
    if (head[0] == 20240520 || head[0] == 20240801) {
        uint32_t version = head[0] == 20240520 ? 1 : 7;
        if (bytes >= 12 && dt__text_bytes(t, i, 0, 12, (unsigned char *)head) != DT_OK) return dt_error(t->ctx);
        width = version == 1 ? 2 : 4;
        f->head = 1024;
        f->tokens = head[2];
        if (head[1] != version || head[2] > INT32_MAX || bytes != f->head + f->tokens * width)
            return dt_fail(t->ctx, DT_ERR_IO, "%s: a shard of version %u with %u tokens has %lld bytes; version %u and "
                "1024 + %d a token are needed", f->path, head[1], head[2], (long long)bytes, version, width);
    }
    if (i > 0 && width != t->width)
        return dt_fail(t->ctx, DT_ERR_IO, "%s has %d bytes a token, but %s has %d: bytes and shards do not mix",
            f->path, width, t->file[0].path, t->width);
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
        if (size < 0) return dt_fail(t->ctx, DT_ERR_IO, "%s: %s", paths[i], strerror(errno));
        if (dt__text_kind(t, i, size) != DT_OK) break;
        t->file[i].start = t->tokens;
        t->tokens += t->file[i].tokens;
    }
    return dt_error(t->ctx);
}

dt_text *dt_text_open(dt_ctx *ctx, const char *const *paths, int files, int seq) {
    if (dt_error(ctx) != DT_OK) return NULL;
    if (files < 1 || seq < 1) {
        dt_fail(ctx, DT_ERR_ARG, "dt_text_open: %d files, sequences of %d tokens", files, seq);
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
    t->file = (dt__text_file *)dt_alloc(ctx, DT_MEM_HOST, (size_t)files * sizeof *t->file, "dt_text_open");
    t->window = (unsigned char *)dt_alloc(ctx, DT_MEM_HOST, 4 * ((size_t)seq + 1), "dt_text_open");
    if (t->file) memset(t->file, 0, (size_t)files * sizeof *t->file);
    if (dt_error(ctx) == DT_OK && dt__text_measure(t, paths) == DT_OK && dt_text_sequences(t) < 1)
        dt_fail(ctx, DT_ERR_IO, "%s%s: %lld %s, but one sequence needs %d (seq %d and the label of its last token)",
            paths[0], files > 1 ? " and others" : "", (long long)t->tokens, t->width > 1 ? "tokens" : "bytes", seq + 1,
            seq);
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
        return dt_fail(t->ctx, DT_ERR_ARG, "dt_text_read: sequence %lld of %lld", (long long)sequence,
            (long long)dt_text_sequences(t));
    int64_t at = sequence * t->seq, end = at + t->seq + 1;
    for (int i = 0; i < t->files && at < end; i++) { /* the window may lie in several files */
        const dt__text_file *f = &t->file[i];
        int64_t              stop = f->start + f->tokens < end ? f->start + f->tokens : end;
        if (at >= stop) continue;
        unsigned char *out = t->window + (at + t->seq + 1 - end) * t->width;
        if (dt__text_use(t, i) != DT_OK || dt__text_bytes(t, i, f->head + (at - f->start) * t->width,
            (size_t)((stop - at) * t->width), out) != DT_OK) return dt_error(t->ctx);
        at = stop;
    }
    for (int i = 0; i <= t->seq; i++) {
        uint16_t two;
        uint32_t token = t->window[i];
        if (t->width == 2) token = (memcpy(&two, t->window + 2 * i, 2), two);
        if (t->width == 4) memcpy(&token, t->window + 4 * i, 4);
        if (token > INT32_MAX)
            return dt_fail(t->ctx, DT_ERR_IO, "%s%s: token %lld is %u, which is no id", t->file[0].path,
                t->files > 1 ? " and others" : "", (long long)(sequence * t->seq + i), token);
        if (i < t->seq) ids[i] = (int32_t)token;
        if (i > 0) labels[i - 1] = (int32_t)token;
    }
    return DT_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* DT_PARALLEL_IMPL */

/* HISTORY
     0.1.0   the mesh, placements, the order of data, the sampler, text and token shards

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
