/* dt_comm.h - v0.1.0 - groups of ranks: launch, collectives, faults - public domain or MIT, see the end of the file

   The second of four single-header libraries; dt_tensor.h, which it includes, names them all. It runs one function on
   many ranks, lets groups of them sum, gather and exchange arrays, and makes the first failure on any rank end
   the wait of every other, with a text that names it. In this version a rank is a thread.

   DOES NOT: install signal handlers, call exit or abort, keep global state, wait for a message without a limit, start
   threads but those that dt_run was asked for. Not in this version, and refused with DT_ERR_UNSUPPORTED: the backends
   procs, tcp, mpi and nccl. Not in this version at all: operations that are started now and waited for later, blocks of
   unequal size, receive from any rank.

   QUICK EXAMPLE

       #define DT_IMPLEMENTATION
       #include "dt_comm.h"
       #include <stdio.h>

       static dt_status hello(dt_ctx *ctx, void *user) {          // every rank runs this
           dt_comm *world = dt_world(ctx);
           float mine = (float)(1 + dt_comm_rank(world)), sum = 0;
           (void)user;
           dt_all_reduce(world, &mine, &sum, 1, DT_F32, DT_SUM);
           if (dt_comm_rank(world) == 0) printf("1 + 2 + 3 + 4 = %g\n", sum);
           return dt_error(ctx);                                  // one check, at the end
       }

       int main(void) {
           return dt_run((dt_run_desc){ .ranks = 4 }, hello, NULL);
       }

   BUILD
       cc -O3 train.c -lm -lpthread                 C11 or C++17; gcc, clang
       nvcc -O3 train.c dt_kernels.cu -lpthread     CUDA

   OPTIONS (define before including)
       DT_IMPLEMENTATION   in exactly one file: the code, not only the declarations
       DT_STATIC           everything static                                                    (everywhere)

   CONTENTS
     1. Launch
     2. Groups
     3. Collectives
     4. Send and receive
     5. Scalars and agreement
     6. Implementation: what the ranks of a run share
     7. The first failure
     8. Waiting
     9. One call: its description, its data, its bytes
    10. Send and receive: code
    11. Meeting: post, compare, close
    12. Barrier
    13. Broadcast
    14. All-gather
    15. All-to-all
    16. Reduce-scatter
    17. All-reduce
    18. Backends, checks, dispatch
    19. Scalars and agreement: code
    20. Groups: code
    21. Launch: code

   CONTRACT
     Memory     dt_run takes one range for all that ranks share: about 33 KiB for each pair of ranks, of which it
                touches less than 1 KiB until messages use it. Groups belong to the context's world and end with it.
                Your buffers are read and written only during the call: when a call returns, with an error too, no
                other rank touches them.
     Errors     A collective that cannot be done fails the context (dt_error, dt_error_text) and returns its status. Any
                failure of any context - dt_fail from an op, from your code, a refused allocation - poisons the
                world: every rank that waits, and every later call, returns DT_ERR_PEER and a text that names the first
                rank and its reason. Ranks that call different operations, or the same with another count, type,
                reduction or root, learn both sides when all have called; a rank that ended, or that does not come
                within timeout_s, is named. Messages give world ranks. The first failure alone is logged as an error.
     Threads    dt_run's caller is the supervisor and never a rank. A dt_comm belongs to its rank's thread. Tables of
                dt_run_desc are used by all ranks at once. Several dt_run may run at once.
     Order      A reduction is ((r0 op r1) op r2) ... in rank order for every element, whatever the count, and the
                same bits on every rank; of bf16 and f16 it is taken in f32 and rounded once, at its end. An all-reduce
                equals a reduce-scatter and an all-gather bit for bit.
     In place   as in NCCL: all-reduce send == recv; reduce-scatter recv == send + rank * count; all-gather send ==
                recv + rank * count. Any other overlap is the caller's error.
     Groups     comm NULL is a group of one everywhere, and a group of one is a local copy.
     Tags       [local] any rank by itself; [pairwise] two ranks; [collective: comm] every rank of the group, in
                the same order. */

#ifndef DT_COMM_H
#define DT_COMM_H

#include "dt_tensor.h"

#if DT_VERSION != 100
#error "dt_comm.h 0.1.0 needs dt_tensor.h 0.1.0: copy all headers from one release"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ==== 1. Launch =====================================================================================================

/* What a rank is, and what carries its data. */
typedef enum dt_backend {
    DT_BACKEND_AUTO = 0,    /* threads */
    DT_BACKEND_THREADS,     /* a rank is a thread of this process */
    DT_BACKEND_PROCS,       /* not in this version, as all below */
    DT_BACKEND_TCP,
    DT_BACKEND_MPI,
    DT_BACKEND_NCCL
} dt_backend;

/* The first failure of a run. */
typedef struct dt_report {
    dt_status status;       /* DT_OK: none */
    int       rank;         /* who recorded it; -1: the run could not start */
    char      text[512];    /* "rank 3: dt_linear(w1): ..." */
} dt_report;

typedef struct dt_run_desc {
    int               ranks;        /* 0 -> 1 */
    dt_backend        backend;      /* AUTO -> threads */
    double            timeout_s;    /* 0 -> 120: the longest that a rank waits for another, in seconds, at most 1e9 */
    uint64_t          seed;         /* 0 -> 1 */
    const dt_host    *host;         /* NULL -> dt_host_default(); used by all ranks at once */
    const dt_kernels *kernels;      /* NULL -> dt_kernels_cpu() */
    const dt_io      *io;           /* NULL -> dt_io_default() */
    dt_report        *report;       /* not NULL: receives the first failure */
} dt_run_desc;

/* [the caller is the supervisor, never a rank] Runs rank_main on every rank, each with its own context and its own
   end of the world, waits for all and frees both. Returns the status of the first failure, which has been logged:
   DT_OK only if every rank_main returned DT_OK, no context failed and every message was received. A rank_main that
   returns an error without a failed context is a failure too. */
DT_API dt_status dt_run(dt_run_desc desc, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user);

// ==== 2. Groups =====================================================================================================

/* The axis of a layout that a group belongs to: where its bytes are counted. */
typedef enum dt_axis {
    DT_AXIS_NONE = -1,      /* the world, and any group that was not told */
    DT_AXIS_DP = 0,
    DT_AXIS_TP,
    DT_AXIS_CP,
    DT_AXIS_PP,
    DT_AXIS_EP,
    DT_AXES
} dt_axis;

/* A run has room for this many dt_comm_split calls on its world. A call on a smaller group counts as a part of one. */
#define DT_MAX_SPLITS 64

/* [local] All ranks of the run. NULL, which is a group of one, for a context that dt_run did not make. */
DT_API dt_comm *dt_world(dt_ctx *ctx);
/* [local] This rank's place in the group; 0 of 1 for NULL. */
DT_API int dt_comm_rank(const dt_comm *comm);
DT_API int dt_comm_size(const dt_comm *comm);
/* [local] The name it was made with: "world", "tp". "one" for NULL. */
DT_API const char *dt_comm_name(const dt_comm *comm);
/* [local] The world rank of a member; -1 outside the group. 0 for NULL. */
DT_API int dt_comm_world_rank(const dt_comm *comm, int rank);
/* [collective: comm] One new group for each color, its ranks ordered by key, equal keys by rank in comm. color < 0:
   this rank joins none and gets NULL without a failure. name (may be NULL) is for messages; the first 31 bytes are
   copied. The group lives as long as the world. NULL after a failure; DT_ERR_MEM when DT_MAX_SPLITS is used up. */
DT_API dt_comm *dt_comm_split(dt_comm *comm, int color, int key, const char *name);
/* [local] From here on bytes that this rank sends in the group count under axis. NULL comm: nothing. */
DT_API void dt_comm_set_axis(dt_comm *comm, dt_axis axis);
/* [local] Bytes that this rank sent over groups of that axis so far. They are logical: a property of the operation, not
   of the algorithm that ran. With N ranks, and S the bytes of the full buffer (all shares together):
       all-reduce                              2 S (N-1)/N, rounded down where N does not divide it
       reduce-scatter, all-gather, all-to-all  S (N-1)/N, which is N-1 shares
       broadcast                               S from the root if N > 1, nothing from the others
       send                                    its bytes; receive and barrier nothing
   Scalars (section 5) and dt_comm_split are not counted. Operations that failed are not counted. */
DT_API size_t dt_comm_bytes(const dt_ctx *ctx, dt_axis axis);
/* [local] Seconds that this rank has spent inside operations of section 3 to 5, waiting included. */
DT_API double dt_comm_seconds(const dt_ctx *ctx);

// ==== 3. Collectives ================================================================================================

/* All [collective: comm]. Counts are elements; types are those of dt_dtype (others, and a reduction of a type that the
   context's kernel table does not reduce: DT_ERR_UNSUPPORTED). Buffers are memory of the context's device (with comm
   NULL: host memory, or in place) and may be NULL when count is 0. N is the size of the group. Errors besides those of
   the contract: DT_ERR_ARG for a value outside its range or a missing buffer, DT_ERR_COMM when ranks call different
   things, DT_ERR_TIMEOUT, and the kernel table's own. */

/* recv[i] = send of rank 0 [i] op send of rank 1 [i] op ..., on every rank. send, recv: count. */
DT_API dt_status dt_all_reduce(dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op);
/* The same sum, of which each rank keeps its own share. send: N * count, recv: count = share `rank` of the sum. */
DT_API dt_status dt_reduce_scatter(dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op);
/* Every rank's share, in rank order, on every rank. send: count, recv: N * count. */
DT_API dt_status dt_all_gather(dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype);
/* Share j of rank i's send becomes share i of rank j's recv. send, recv: N * count; not in place. */
DT_API dt_status dt_all_to_all(dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype);
/* buf of rank `root` on every rank. buf: count. */
DT_API dt_status dt_broadcast(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int root);
/* No rank leaves before the last has come. */
DT_API dt_status dt_barrier(dt_comm *comm);

// ==== 4. Send and receive ===========================================================================================

/* [pairwise] buf: count. `to` and `from` are ranks of comm, tag >= 0. A receive takes the oldest message of that rank,
   group and tag; its count and type must be those of the send (else DT_ERR_COMM, naming both). Up to DT_EAGER_BYTES a
   send leaves a copy and returns, for 8 messages a pair; larger ones, or a 9th, wait for the receiver, so two ranks
   that send each other much must not both send first. To itself a rank can send up to DT_EAGER_BYTES. NULL comm:
   DT_ERR_ARG, there is nobody. */
#define DT_EAGER_BYTES 4096
DT_API dt_status dt_send(dt_comm *comm, const void *buf, size_t count, dt_dtype dtype, int to, int tag);
DT_API dt_status dt_recv(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int from, int tag);

// ==== 5. Scalars and agreement ======================================================================================

/* Values in host memory that steer a program; they are not counted as traffic. */

/* [collective: comm] values[i] = the sum over ranks, in rank order, in place. values: n. */
DT_API dt_status dt_sum_doubles(dt_comm *comm, double *values, size_t n);
/* [collective: comm] The sum over ranks divided by their number. NaN after a failure. */
DT_API double dt_mean(dt_comm *comm, double mine);
/* [collective: comm] The first status in rank order that is not DT_OK, on every rank. Fails no context: what only
   one rank may notice, such as a file that is missing, ends in this. */
DT_API dt_status dt_agree(dt_comm *comm, dt_status mine);

#ifdef __cplusplus
}
#endif
#endif /* DT_COMM_H */

// ==== 6. Implementation: what the ranks of a run share ==============================================================

#if defined(DT_IMPLEMENTATION) && !defined(DT_COMM_IMPL)
#define DT_COMM_IMPL

#include "dt_tensor.h"

#include <pthread.h>    /* pthread_create, pthread_join: in dt_run and nowhere else */
#include <sched.h>      /* sched_getaffinity */
#include <stdarg.h>
#include <stdio.h>      /* vsnprintf */
#include <string.h>
#include <unistd.h>     /* sysconf */

/* All that ranks share lies in one range that dt_run takes before the first rank starts:

       dt__shared | dt__rank_state x N | dt__pair x N x N | groups, in order of their making | eager copies

   Nothing in it is a lock: each word has one writer at a time, and others look at it with atomic loads. A word that
   hands over data is stored with release and loaded with acquire. */

enum {
    DT__LINE = 128,         /* two cache lines: processors fetch them in pairs */
    DT__MESSAGES = 8,       /* messages under way from one rank to another */
    DT__MAX_RANKS = 65536,
    DT__NAME_BYTES = 32
};

typedef enum dt__op_code {
    DT__ALL_REDUCE = 0, DT__REDUCE_SCATTER, DT__ALL_GATHER, DT__ALL_TO_ALL, DT__BROADCAST, DT__BARRIER,
    DT__SUM_DOUBLES, DT__AGREE, DT__SPLIT, DT__SEND, DT__RECV
} dt__op_code;

/* What a rank calls: the arguments of the public functions under one roof. */
typedef struct dt__call {
    dt__op_code op;
    dt_dtype    dtype;
    dt_op       redop;      /* reductions; else DT_SUM */
    int         peer;       /* broadcast: root; send, receive: the other; else 0 */
    int         tag;        /* send, receive; below 0: part of a generic collective */
    int         host;       /* the data are host memory whatever the device: scalars */
    size_t      count;
    const void *send;
    void       *recv;
    uint64_t    seq;        /* number of the operation on its group, from 1 */
} dt__call;

/* What one rank shows its group. There are two of these for each rank, for odd and even seq: a rank posts seq + 2 only
   after all have posted seq + 1, so after all are done with seq. */
typedef struct __attribute__((aligned(128))) dt__slot {
    uint64_t posted;        /* = call.seq once call is complete */
    uint64_t done;          /* = call.seq once this rank touches no other's buffers any more */
    dt__call call;
} dt__slot;

typedef struct dt__group {
    char      name[DT__NAME_BYTES];
    int       size;
    int      *ranks;        /* (size) world ranks */
    dt__slot *slots;        /* (size, 2) */
} dt__group;

/* One message. The sender fills a free one; the receiver frees it, or tells the waiting sender to. */
enum { DT__FREE = 0, DT__POSTED, DT__TAKEN };
typedef struct __attribute__((aligned(64))) dt__message {
    int         state;
    int         tag, eager;
    dt_dtype    dtype;
    size_t      count;
    const void *data;       /* the eager copy, or the sender's own buffer */
    uint64_t    order;      /* the oldest of those that match is taken first */
    dt__group  *group;
} dt__message;

typedef struct __attribute__((aligned(64))) dt__pair {  /* from one rank to one other */
    uint64_t    sent;
    dt__message message[DT__MESSAGES];
} dt__pair;

typedef struct __attribute__((aligned(128))) dt__rank_state {
    int busy;               /* this rank reads or writes memory of others now */
    int ended;              /* its rank function has returned */
} dt__rank_state;

typedef struct dt__shared {
    int             ranks, spins, claimed, aborted, ended;
    double          timeout_s;
    dt_report       first;  /* valid once aborted is set */
    dt__rank_state *state;  /* (ranks) */
    dt__pair       *pairs;  /* (ranks, ranks): sender, receiver */
    char           *room;   /* for groups */
    size_t          room_bytes, room_used;
    char           *eager;  /* (ranks, ranks, DT__MESSAGES, DT_EAGER_BYTES) */
} dt__shared;

typedef struct dt__comm_ops dt__comm_ops;   /* section 9 */

/* One rank's own side of a run; its context knows it as "attached". */
typedef struct dt__world {
    dt__shared         *shared;
    dt_ctx             *ctx;
    const dt_host      *host;
    int                 rank;
    int                 claimed;    /* this rank's failure is the first: it alone fills the record */
    dt_listener         listener;
    dt_comm            *comms;      /* all of this rank's, the newest first */
    dt_comm            *comm;       /* all ranks */
    size_t              bytes[1 + DT_AXES];
    double              seconds;        /* inside operations */
    const dt_run_desc  *desc;
    dt_status         (*rank_main)(dt_ctx *ctx, void *user);
    void               *user;
    pthread_t           thread;
} dt__world;

struct dt_comm {
    dt_group            place;      /* first: dt_tensor.h reads it */
    dt__world          *world;
    const dt__comm_ops *ops;
    dt__group          *group;
    uint64_t            seq;        /* operations called so far */
    dt_axis             axis;
    dt_comm            *next;
    size_t              bytes;      /* of this struct with its two arrays */
    const void        **in;         /* (size) where a reduction finds its inputs */
    int32_t            *words;      /* (size, 2) what dt_agree and dt_comm_split gather */
};

static size_t dt__line_up(size_t bytes) { return (bytes + DT__LINE - 1) / DT__LINE * DT__LINE; }

/* Splitting n ranks costs at most, one group for each: a header, a list, two slots. */
static size_t dt__group_bytes(int size) {
    return dt__line_up(sizeof(dt__group)) + dt__line_up((size_t)size * sizeof(int)) +
           2 * (size_t)size * sizeof(dt__slot);
}

static size_t dt__room_bytes(int ranks) {
    return dt__group_bytes(ranks) + (size_t)DT_MAX_SPLITS * (size_t)ranks * dt__group_bytes(1);
}

static size_t dt__shared_bytes(int ranks) {
    size_t n = (size_t)ranks;
    return DT__LINE /* to align the start */ + dt__line_up(sizeof(dt__shared)) + n * sizeof(dt__rank_state) +
           dt__line_up(n * n * sizeof(dt__pair)) + dt__room_bytes(ranks) +
           n * n * (size_t)DT__MESSAGES * (size_t)DT_EAGER_BYTES;
}

/* Lays the range out. What holds flags is zeroed; room and eager copies are not touched before they are used. */
static dt__shared *dt__shared_lay(void *memory, int ranks) {
    size_t n = (size_t)ranks;
    char *p = (char *)memory + (DT__LINE - (uintptr_t)memory % DT__LINE) % DT__LINE, *start = p;
    dt__shared *shared = (dt__shared *)(void *)p;
    p += dt__line_up(sizeof(dt__shared));
    dt__rank_state *state = (dt__rank_state *)(void *)p;
    p += n * sizeof(dt__rank_state);
    dt__pair *pairs = (dt__pair *)(void *)p;
    p += dt__line_up(n * n * sizeof(dt__pair));
    memset(start, 0, (size_t)(p - start));
    shared->ranks = ranks;
    shared->state = state;
    shared->pairs = pairs;
    shared->room = p;
    shared->room_bytes = dt__room_bytes(ranks);
    shared->eager = p + shared->room_bytes;
    return shared;
}

static dt__pair *dt__pair_of(dt__shared *shared, int from, int to) {
    return &shared->pairs[(size_t)from * (size_t)shared->ranks + (size_t)to];
}

static char *dt__eager_of(dt__shared *shared, int from, int to, int message) {
    size_t pair = (size_t)from * (size_t)shared->ranks + (size_t)to;
    return shared->eager + (pair * DT__MESSAGES + (size_t)message) * DT_EAGER_BYTES;
}

/* A new group of `size` ranks, its list still to be filled; NULL when the room is used up. Any rank may call it. */
static dt__group *dt__group_make(dt__shared *shared, int size, const char *name) {
    size_t bytes = dt__group_bytes(size);
    size_t at = __atomic_fetch_add(&shared->room_used, bytes, __ATOMIC_RELAXED);
    if (at > shared->room_bytes || bytes > shared->room_bytes - at) return NULL;
    char *p = shared->room + at;
    memset(p, 0, bytes);
    dt__group *group = (dt__group *)(void *)p;
    group->size = size;
    p += dt__line_up(sizeof(dt__group));
    group->ranks = (int *)(void *)p;
    group->slots = (dt__slot *)(void *)(p + dt__line_up((size_t)size * sizeof(int)));
    size_t length = strlen(name);
    memcpy(group->name, name, length < DT__NAME_BYTES ? length : DT__NAME_BYTES - 1);
    return group;
}

// ==== 7. The first failure ==========================================================================================

/* One record for the whole run. Whoever claims it (compare and exchange) fills it and sets the abort word; that word
   is never cleared. Waits look at it every turn, calls when they begin.

   A rank that leaves a collective with an error gives its buffers back to its caller, who may free them. So it must not
   leave while another rank still copies from or to them, and none may start to. Each rank therefore raises its busy
   flag around every access to memory of others. This is Dekker's handshake (E. W. Dijkstra, EWD123, 1965):

       who copies:  busy = 1;  if (aborted) { busy = 0; leave; }  copy;  busy = 0
       who leaves:  aborted = 1, or has seen it;  wait until no rank is busy;  leave

   All four accesses are sequentially consistent: either the copier sees the abort word, or the leaver sees the flag.
   The wait for the flags is the one without a time limit: nothing between busy = 1 and 0 waits for anybody. */

static int dt__aborted(const dt__shared *shared) { return __atomic_load_n(&shared->aborted, __ATOMIC_SEQ_CST); }

static int dt__claim(dt__shared *shared) {
    int expected = 0;
    return __atomic_compare_exchange_n(&shared->claimed, &expected, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Only for whoever claimed it. */
static void dt__publish_failure(dt__shared *shared, int rank, dt_status status, const char *text) {
    size_t length = strlen(text), most = sizeof shared->first.text - 1;
    shared->first.status = status;
    shared->first.rank = rank;
    memcpy(shared->first.text, text, length < most ? length : most);
    __atomic_store_n(&shared->aborted, 1, __ATOMIC_SEQ_CST);
}

/* The listener through which dt_tensor.h tells of every first failure of a context. Several ranks may notice the same
   one, a norm that is not finite for example: one line of log is enough. */
static int dt__on_failure(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    dt__world *world = (dt__world *)user;
    (void)ctx;
    if (!world->claimed && !dt__claim(world->shared)) return 1;
    dt__publish_failure(world->shared, world->rank, status, text);
    return 0;
}

static void dt__quiesce(const dt__world *world) {
    for (int rank = 0; rank < world->shared->ranks; rank++) {
        while (__atomic_load_n(&world->shared->state[rank].busy, __ATOMIC_SEQ_CST))
            world->host->sleep(world->host->user, 0);
    }
}

/* Returns 1: memory of others may be touched until dt__touch_end; 0: aborted, hands off. */
static int dt__touch_begin(const dt__world *world) {
    int *busy = &world->shared->state[world->rank].busy;
    __atomic_store_n(busy, 1, __ATOMIC_SEQ_CST);
    if (!dt__aborted(world->shared)) return 1;
    __atomic_store_n(busy, 0, __ATOMIC_SEQ_CST);
    return 0;
}

/* Until the stream is empty, it may still fill what others are about to read, or copy what they are about to free. */
static dt_status dt__comm_sync(const dt__world *world) {
    const dt_kernels *kernels = dt_ctx_kernels(world->ctx);
    return kernels->sync ? kernels->sync(dt_ctx_stream(world->ctx)) : DT_OK;
}

/* status: how the copies went. Returns the first error of that and the stream's. */
static dt_status dt__touch_end(const dt__world *world, dt_status status) {
    dt_status synced = dt__comm_sync(world);
    __atomic_store_n(&world->shared->state[world->rank].busy, 0, __ATOMIC_SEQ_CST);
    return status ? status : synced;
}

/* Another rank failed first: this context fails with that rank's text. Returns when all buffers are free. */
static dt_status dt__peer_failed(dt__world *world) {
    while (!dt__aborted(world->shared)) world->host->sleep(world->host->user, 0);   /* claimed: being filled */
    dt_status status = dt_fail(world->ctx, DT_ERR_PEER, "peer failed first: %s", world->shared->first.text);
    dt__quiesce(world);
    return status;
}

/* A failure that this layer noticed, often on several ranks at once: the first is the failure, the others have a peer
   that failed first. Returns the context's status when all buffers are free. */
DT_PRINTF(3, 4) static dt_status dt__comm_fail(dt__world *world, dt_status status, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (dt_error(world->ctx) == DT_OK) {
        if (!dt__claim(world->shared)) return dt__peer_failed(world);
        world->claimed = 1;
        dt_fail(world->ctx, status, "%s", text);
    }
    dt__quiesce(world);
    return dt_error(world->ctx);
}

// ==== 8. Waiting ====================================================================================================

/* Every wait for another rank is this one. Where each rank has a core it first spins, because the other is about to
   come and a system call costs more than the wait; then it lets other threads run; then it naps, longer each time.
   Ranks that outnumber the cores go to the second step at once: whoever spins keeps the awaited rank from running. */

enum { DT__SPINS = 50, DT__YIELDS = 200 };  /* some 2 us; some 100 us */
#define DT__NAP_MIN 20e-6
#define DT__NAP_MAX 1e-3

typedef enum dt__outcome {
    DT__READY,
    DT__ABORTED,            /* some rank failed */
    DT__NEVER,              /* the awaited rank has ended */
    DT__LATE                /* timeout_s is over */
} dt__outcome;

/* 1: what was awaited is there; 0: not yet; -1: it will never be. */
typedef int (*dt__ready_fn)(void *what);

static void dt__pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static dt__outcome dt__wait(const dt__world *world, dt__ready_fn ready, void *what) {
    const dt_host *host = world->host;
    double deadline = 0, nap = DT__NAP_MIN;
    for (int turn = -world->shared->spins; ; turn += turn < DT__YIELDS) {
        int state = ready(what);
        if (state > 0) return DT__READY;
        if (dt__aborted(world->shared)) return DT__ABORTED; /* before NEVER: a rank that failed has ended too */
        if (state < 0) return DT__NEVER;
        if (turn < 0) {
            dt__pause();
            continue;
        }
        double now = host->now(host->user);
        if (turn == 0) deadline = now + world->shared->timeout_s;
        if (now > deadline) return ready(what) > 0 ? DT__READY : DT__LATE; /* a stopped process wakes up late */
        if (turn < DT__YIELDS) {
            host->sleep(host->user, 0);
            continue;
        }
        host->sleep(host->user, nap);
        nap = nap * 2 < DT__NAP_MAX ? nap * 2 : DT__NAP_MAX;
    }
}

static int dt__has_ended(const dt__shared *shared, int rank) {
    return __atomic_load_n(&shared->state[rank].ended, __ATOMIC_ACQUIRE);
}

// ==== 9. One call: its description, its data, its bytes =============================================================

/* What a backend is: how ranks send and receive, and whatever it does better than the generic functions that are built
   on those two. A NULL entry is the generic function. Entries return when the buffers are the caller's again. */
typedef dt_status (*dt__comm_fn)(dt_comm *comm, const dt__call *call);
struct dt__comm_ops {
    const char *name;
    dt__comm_fn send, recv;
    dt__comm_fn barrier, broadcast, all_gather, all_to_all, reduce_scatter, all_reduce;
};

static dt__call dt__call_make(dt__op_code op, const void *send, void *recv, size_t count, dt_dtype dtype) {
    dt__call call;
    memset(&call, 0, sizeof call);
    call.op = op;
    call.dtype = dtype;
    call.count = count;
    call.send = send;
    call.recv = recv;
    return call;
}

static const char *dt__op_name(dt__op_code op) {
    static const char *const names[] = { "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast",
                                         "barrier", "dt_sum_doubles", "dt_agree", "dt_comm_split", "send", "receive" };
    return names[op];
}

static const char *dt__redop_name(dt_op op) {
    switch (op) {
    case DT_SUM: return "sum";
    case DT_AVG: return "avg";
    case DT_MAX: return "max";
    case DT_MIN: return "min";
    case DT_PROD: return "prod";
    }
    return "?";
}

static int dt__reduces(dt__op_code op) { return op == DT__ALL_REDUCE || op == DT__REDUCE_SCATTER; }

/* Appends to text of `bytes` bytes, as far as it fits; *at is its length. */
DT_PRINTF(4, 5) static void dt__append(char *text, size_t bytes, size_t *at, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int length = vsnprintf(text + *at, bytes - *at, fmt, args);
    va_end(args);
    if (length > 0) *at = *at + (size_t)length < bytes ? *at + (size_t)length : bytes - 1;
}

typedef struct dt__phrase { char s[192]; } dt__phrase;  /* by value: a text that needs no owner */

/* "all-reduce f32 x 10 sum", "barrier" */
static dt__phrase dt__call_text(const dt__call *call) {
    dt__phrase text;
    size_t at = 0;
    dt__append(text.s, sizeof text.s, &at, "%s", dt__op_name(call->op));
    if (call->op == DT__SUM_DOUBLES) dt__append(text.s, sizeof text.s, &at, " x %zu", call->count);
    if (call->host || call->op == DT__BARRIER) return text;
    dt__append(text.s, sizeof text.s, &at, " %s x %zu", dt_dtype_name(call->dtype), call->count);
    if (dt__reduces(call->op)) dt__append(text.s, sizeof text.s, &at, " %s", dt__redop_name(call->redop));
    if (call->op == DT__BROADCAST) dt__append(text.s, sizeof text.s, &at, " root %d", call->peer);
    return text;
}

static size_t dt__call_bytes(const dt__call *call) { return call->count * dt_dtype_size(call->dtype); }

/* Bytes that travel go through the device's table, except scalars. */
static dt_status dt__comm_move(dt_comm *comm, const dt__call *call, void *dst, const void *src, size_t bytes) {
    const dt_kernels *kernels = dt_ctx_kernels(comm->world->ctx);
    if (bytes == 0 || dst == src) return DT_OK;
    if (!call->host && kernels->move) return kernels->move(dst, src, bytes, dt_ctx_stream(comm->world->ctx));
    memcpy(dst, src, bytes);
    return DT_OK;
}

/* out[i] = comm->in[0][i] op comm->in[1][i] op ...: rank order, always. out may be one of the inputs. */
static dt_status dt__combine(dt_comm *comm, const dt__call *call, void *out, size_t count) {
    const dt_kernels *kernels = dt_ctx_kernels(comm->world->ctx);
    if (count == 0) return DT_OK;
    if (!call->host) {
        dt_reduce_args args = { call->dtype, out, comm->in, comm->place.size, count, call->redop };
        return kernels->reduce ? kernels->reduce(&args, dt_ctx_stream(comm->world->ctx)) : DT_ERR_UNSUPPORTED;
    }
    for (size_t i = 0; i < count; i++) {    /* dt_sum_doubles */
        double sum = ((const double *)comm->in[0])[i];
        for (int rank = 1; rank < comm->place.size; rank++) sum += ((const double *)comm->in[rank])[i];
        ((double *)out)[i] = sum;
    }
    return DT_OK;
}

/* A copy or a kernel of this call answered with an error. */
static dt_status dt__data_failed(dt_comm *comm, const dt__call *call, dt_status status) {
    return dt__comm_fail(comm->world, status, "%s #%llu on %s: the kernel table '%s' answers %s",
                         dt__call_text(call).s, (unsigned long long)call->seq, comm->group->name,
                         dt_ctx_kernels(comm->world->ctx)->name, dt_status_name(status));
}

/* What dt_comm_bytes documents. */
static size_t dt__sent_bytes(const dt_comm *comm, const dt__call *call) {
    size_t n = (size_t)comm->place.size, bytes = dt__call_bytes(call), twice = 2 * (n - 1);
    if (call->host) return 0;
    switch (call->op) {
    case DT__ALL_REDUCE: return bytes / n * twice + bytes % n * twice / n;
    case DT__REDUCE_SCATTER:
    case DT__ALL_GATHER:
    case DT__ALL_TO_ALL: return bytes * (n - 1);
    case DT__BROADCAST: return n > 1 && comm->place.rank == call->peer ? bytes : 0;
    case DT__SEND: return bytes;
    default: return 0;
    }
}

// ==== 10. Send and receive: code ====================================================================================

/*     small:  sender copies into a free message of the pair, goes on   ...   receiver copies out, frees the message
       large:  sender shows its buffer, waits   ...   receiver copies from it, says so   ...   sender frees the message

   One copy more, or one wait more: eager and rendezvous, as in every MPI. Cost: 2 copies of the bytes, or 1. */

typedef struct dt__mail {   /* what a sender or receiver looks for */
    const dt__shared *shared;
    dt__pair         *pair;
    dt__message      *message;
    const dt__group  *group;
    int               tag, other;   /* other: world rank */
    int               alone;        /* to itself: nobody else will free a message */
} dt__mail;

static int dt__free_message(void *what) {
    dt__mail *mail = (dt__mail *)what;
    int ended = mail->alone || dt__has_ended(mail->shared, mail->other);   /* read before the messages, see below */
    for (int i = 0; i < DT__MESSAGES; i++) {
        mail->message = &mail->pair->message[i];
        if (__atomic_load_n(&mail->message->state, __ATOMIC_ACQUIRE) == DT__FREE) return 1;
    }
    return ended ? -1 : 0;
}

static int dt__message_taken(void *what) {
    dt__mail *mail = (dt__mail *)what;
    int ended = dt__has_ended(mail->shared, mail->other);
    if (__atomic_load_n(&mail->message->state, __ATOMIC_ACQUIRE) == DT__TAKEN) return 1;
    return ended ? -1 : 0;
}

/* The oldest message of this group and tag that is posted, or NULL. */
static dt__message *dt__oldest(const dt__mail *mail) {
    dt__message *oldest = NULL;
    for (int i = 0; i < DT__MESSAGES; i++) {
        dt__message *message = &mail->pair->message[i];
        if (__atomic_load_n(&message->state, __ATOMIC_ACQUIRE) != DT__POSTED) continue;
        if (message->tag != mail->tag || message->group != mail->group) continue;
        if (!oldest || message->order < oldest->order) oldest = message;
    }
    return oldest;
}

/* A rank may send and then end: its flag is read first, so that a message which is not there then will never be. And it
   may send two while we look: the older into a place we have passed, the newer into one still ahead. Seeing the
   newer makes the older visible, so a second look finds it. */
static int dt__message_there(void *what) {
    dt__mail *mail = (dt__mail *)what;
    int ended = mail->alone || dt__has_ended(mail->shared, mail->other);
    if (!dt__oldest(mail)) return ended ? -1 : 0;
    mail->message = dt__oldest(mail);
    return 1;
}

static dt__mail dt__mail_make(dt_comm *comm, const dt__call *call) {
    int me = comm->world->rank, other = comm->group->ranks[call->peer], sends = call->op == DT__SEND;
    dt__shared *shared = comm->world->shared;
    dt__mail mail = { shared, dt__pair_of(shared, sends ? me : other, sends ? other : me), NULL, comm->group, call->tag,
                      other, me == other };
    return mail;
}

/* The wait ended without what it was for: says who did not do what. */
static dt_status dt__mail_failed(dt_comm *comm, const dt__call *call, dt__outcome outcome) {
    dt__world *world = comm->world;
    int other = comm->group->ranks[call->peer];
    dt__phrase text = dt__call_text(call);
    size_t at = strlen(text.s);
    dt__append(text.s, sizeof text.s, &at, " %s rank %d with tag %d on %s", call->op == DT__SEND ? "to" : "from", other,
               call->tag, comm->group->name);
    if (outcome == DT__ABORTED) return dt__peer_failed(world);
    if (outcome == DT__LATE)
        return dt__comm_fail(world, DT_ERR_TIMEOUT, "timeout %.1f s in %s: rank %d %s", world->shared->timeout_s,
                             text.s, other, call->op == DT__SEND ? "did not receive it" : "did not send it");
    if (other == world->rank)
        return dt__comm_fail(world, DT_ERR_COMM, "%s: a rank that waits for itself waits for ever", text.s);
    return dt__comm_fail(world, DT_ERR_COMM, "rank %d ended without the other half of %s", other, text.s);
}

static dt_status dt__threads_send(dt_comm *comm, const dt__call *call) {
    dt__world *world = comm->world;
    dt__mail mail = dt__mail_make(comm, call);
    size_t bytes = dt__call_bytes(call);
    int eager = bytes <= DT_EAGER_BYTES;
    if (!eager && mail.alone) return dt__mail_failed(comm, call, DT__NEVER);
    dt__outcome outcome = dt__wait(world, dt__free_message, &mail);
    if (outcome != DT__READY) return dt__mail_failed(comm, call, outcome);
    dt__message *message = mail.message;
    message->tag = call->tag;
    message->eager = eager;
    message->dtype = call->dtype;
    message->count = call->count;
    message->group = comm->group;
    message->order = mail.pair->sent++;
    message->data = call->send;
    dt_status status = DT_OK;
    if (eager) {
        char *copy = dt__eager_of(world->shared, world->rank, mail.other, (int)(message - mail.pair->message));
        status = dt__comm_move(comm, call, copy, call->send, bytes);
        message->data = copy;
    }
    if (status == DT_OK) status = dt__comm_sync(world);
    if (status) return dt__data_failed(comm, call, status);
    __atomic_store_n(&message->state, DT__POSTED, __ATOMIC_RELEASE);
    if (eager) return DT_OK;
    outcome = dt__wait(world, dt__message_taken, &mail);
    if (outcome != DT__READY) return dt__mail_failed(comm, call, outcome);
    __atomic_store_n(&message->state, DT__FREE, __ATOMIC_RELEASE);
    return DT_OK;
}

static dt_status dt__threads_recv(dt_comm *comm, const dt__call *call) {
    dt__world *world = comm->world;
    dt__mail mail = dt__mail_make(comm, call);
    dt__outcome outcome = dt__wait(world, dt__message_there, &mail);
    if (outcome != DT__READY) return dt__mail_failed(comm, call, outcome);
    dt__message *message = mail.message;
    if (message->count != call->count || message->dtype != call->dtype)
        return dt__comm_fail(world, DT_ERR_COMM, "rank %d sends %s x %zu, rank %d receives %s x %zu (tag %d on %s)",
                             mail.other, dt_dtype_name(message->dtype), message->count, world->rank,
                             dt_dtype_name(call->dtype), call->count, call->tag, comm->group->name);
    if (!dt__touch_begin(world)) return dt__peer_failed(world);
    dt_status status = dt__touch_end(world, dt__comm_move(comm, call, call->recv, message->data, dt__call_bytes(call)));
    if (status) return dt__data_failed(comm, call, status);
    __atomic_store_n(&message->state, message->eager ? DT__FREE : DT__TAKEN, __ATOMIC_RELEASE);
    return DT_OK;
}

/* The generic collectives below send and receive pieces of a call with these. Their tags are below 0 and belong to
   one operation, so that no message of the caller and none of another operation is mistaken for theirs. */
static dt__call dt__piece_of(const dt__call *call, dt__op_code op, int peer, size_t count) {
    dt__call piece = dt__call_make(op, NULL, NULL, count, call->dtype);
    piece.peer = peer;
    piece.host = call->host;
    piece.tag = -1 - (int)(call->seq % 0x40000000);
    piece.seq = call->seq;
    return piece;
}

static dt_status dt__pass(dt_comm *comm, const dt__call *call, const void *buf, size_t count, int to) {
    dt__call piece = dt__piece_of(call, DT__SEND, to, count);
    piece.send = buf;
    return comm->ops->send(comm, &piece);
}

static dt_status dt__take(dt_comm *comm, const dt__call *call, void *buf, size_t count, int from) {
    dt__call piece = dt__piece_of(call, DT__RECV, from, count);
    piece.recv = buf;
    return comm->ops->recv(comm, &piece);
}

/* Both at once. A large send waits for its receiver, so someone must receive first: the caller says who. */
static dt_status dt__pass_and_take(dt_comm *comm, const dt__call *call, const void *out, int to, void *in, int from,
                                   int pass_first) {
    dt_status status = pass_first ? dt__pass(comm, call, out, call->count, to) : DT_OK;
    if (status == DT_OK) status = dt__take(comm, call, in, call->count, from);
    if (status == DT_OK && !pass_first) status = dt__pass(comm, call, out, call->count, to);
    return status;
}

/* A copy inside this rank. */
static dt_status dt__keep(dt_comm *comm, const dt__call *call, void *dst, const void *src, size_t count) {
    dt_status status = dt__comm_move(comm, call, dst, src, count * dt_dtype_size(call->dtype));
    return status ? dt__data_failed(comm, call, status) : DT_OK;
}

// ==== 11. Meeting: post, compare, close =============================================================================

/* How the ranks of a group begin and end a collective that works in each other's memory:

       open    each rank posts its call with its buffers' addresses, waits until all have, compares all with rank 0's
       ...     each rank reads and writes, between dt__touch_begin and dt__touch_end
       close   each rank says that it is done, waits until all are: only now may the buffers change

   Cost: two waits for the slowest rank, no data. Flags that one rank writes and the others read: J. Mellor-Crummey and
   M. Scott, "Algorithms for scalable synchronization", 1991. Comparing costs some 10 ns a rank; without it ranks
   that disagree would sum garbage or hang. */

typedef struct dt__meeting {
    dt_comm *comm;
    uint64_t seq;
    int      closing;
    int      next;      /* all ranks before this one are there */
    int      ended;     /* the rank that will never come */
} dt__meeting;

static dt__slot *dt__slot_of(const dt_comm *comm, int rank, uint64_t seq) {
    return &comm->group->slots[2 * (size_t)rank + (size_t)(seq & 1)];
}

static int dt__is_there(const dt__meeting *meeting, int rank) {
    dt__slot *slot = dt__slot_of(meeting->comm, rank, meeting->seq);
    return __atomic_load_n(meeting->closing ? &slot->done : &slot->posted, __ATOMIC_ACQUIRE) >= meeting->seq;
}

static int dt__all_there(void *what) {
    dt__meeting *meeting = (dt__meeting *)what;
    const dt_comm *comm = meeting->comm;
    const dt__shared *shared = comm->world->shared;
    while (meeting->next < comm->place.size && dt__is_there(meeting, meeting->next)) meeting->next++;
    if (meeting->next == comm->place.size) return 1;
    if (__atomic_load_n(&shared->ended, __ATOMIC_ACQUIRE) == 0) return 0;
    for (int rank = meeting->next; rank < comm->place.size; rank++) {
        if (!dt__has_ended(shared, comm->group->ranks[rank]) || dt__is_there(meeting, rank)) continue;
        meeting->ended = rank;
        return -1;
    }
    return 0;
}

/* "ranks 0,1 arrived, 3 did not", in world ranks; at most 8 of each are listed. */
static dt__phrase dt__who_came(const dt__meeting *meeting) {
    dt__phrase text;
    size_t at = 0;
    dt__append(text.s, sizeof text.s, &at, "ranks ");
    for (int came = 1; came >= 0; came--) {
        int listed = 0;
        for (int rank = 0; rank < meeting->comm->place.size; rank++) {
            if (dt__is_there(meeting, rank) != came) continue;
            if (++listed > 9) continue;
            if (listed > 8) dt__append(text.s, sizeof text.s, &at, ",...");
            else dt__append(text.s, sizeof text.s, &at, "%s%d", listed > 1 ? "," : "",
                            meeting->comm->group->ranks[rank]);
        }
        if (came) dt__append(text.s, sizeof text.s, &at, meeting->closing ? " finished, " : " arrived, ");
        else dt__append(text.s, sizeof text.s, &at, listed ? " did not" : "the last a moment too late");
    }
    return text;
}

static dt_status dt__meeting_failed(const dt__meeting *meeting, const dt__call *call, dt__outcome outcome) {
    dt__world *world = meeting->comm->world;
    const dt__group *group = meeting->comm->group;
    const char *op = dt__op_name(call->op);
    unsigned long long seq = (unsigned long long)meeting->seq;
    if (outcome == DT__ABORTED) return dt__peer_failed(world);
    if (outcome == DT__NEVER)
        return dt__comm_fail(world, DT_ERR_COMM, "rank %d ended without calling %s #%llu on %s",
                             group->ranks[meeting->ended], op, seq, group->name);
    return dt__comm_fail(world, DT_ERR_TIMEOUT, "timeout %.1f s in %s #%llu on %s: %s", world->shared->timeout_s, op,
                         seq, group->name, dt__who_came(meeting).s);
}

static dt_status dt__meet(dt_comm *comm, const dt__call *call, int closing) {
    dt__meeting meeting = { comm, call->seq, closing, 0, 0 };
    dt__outcome outcome = dt__wait(comm->world, dt__all_there, &meeting);
    return outcome == DT__READY ? DT_OK : dt__meeting_failed(&meeting, call, outcome);
}

static const dt__call *dt__call_of(const dt_comm *comm, int rank, uint64_t seq) {
    return &dt__slot_of(comm, rank, seq)->call;
}

/* Every rank compares the same slots and comes to the same answer. */
static dt_status dt__compare(dt_comm *comm, uint64_t seq) {
    const dt__call *first = dt__call_of(comm, 0, seq);
    for (int rank = 1; rank < comm->place.size; rank++) {
        const dt__call *other = dt__call_of(comm, rank, seq);
        if (other->op == first->op && other->dtype == first->dtype && other->count == first->count &&
            other->redop == first->redop && other->peer == first->peer) continue;
        return dt__comm_fail(comm->world, DT_ERR_COMM, "rank %d calls %s, rank %d calls %s (operation %llu on %s)",
                             comm->group->ranks[rank], dt__call_text(other).s, comm->group->ranks[0],
                             dt__call_text(first).s, (unsigned long long)seq, comm->group->name);
    }
    return DT_OK;
}

static dt_status dt__open(dt_comm *comm, const dt__call *call) {
    dt_status status = dt__comm_sync(comm->world);
    if (status) return dt__data_failed(comm, call, status);
    dt__slot *slot = dt__slot_of(comm, comm->place.rank, call->seq);
    slot->call = *call;
    __atomic_store_n(&slot->posted, call->seq, __ATOMIC_RELEASE);
    status = dt__meet(comm, call, 0);
    return status ? status : dt__compare(comm, call->seq);
}

/* status: what dt__touch_end returned. */
static dt_status dt__close(dt_comm *comm, const dt__call *call, dt_status status) {
    if (status) return dt__data_failed(comm, call, status);
    __atomic_store_n(&dt__slot_of(comm, comm->place.rank, call->seq)->done, call->seq, __ATOMIC_RELEASE);
    return dt__meet(comm, call, 1);
}

// ==== 12. Barrier ===================================================================================================

/*     before   rank 0 has come            after   all have come
                rank 1 has come
                rank 2 is on its way

   Generic: everyone tells rank 0, then rank 0 tells everyone: 2 messages a rank, 2 (N-1) for rank 0.
   Threads: a meeting is a barrier, and needs no closing: the two slots of a rank alternate. */

static dt_status dt__generic_barrier(dt_comm *comm, const dt__call *call) {
    dt_status status = DT_OK;
    if (comm->place.rank > 0) {
        status = dt__pass(comm, call, NULL, 0, 0);
        return status ? status : dt__take(comm, call, NULL, 0, 0);
    }
    for (int rank = 1; rank < comm->place.size && !status; rank++) status = dt__take(comm, call, NULL, 0, rank);
    for (int rank = 1; rank < comm->place.size && !status; rank++) status = dt__pass(comm, call, NULL, 0, rank);
    return status;
}

static dt_status dt__threads_barrier(dt_comm *comm, const dt__call *call) { return dt__open(comm, call); }

// ==== 13. Broadcast =================================================================================================

/*     before   rank 0   ?          after   rank 0   b
                rank 1   b (root)           rank 1   b
                rank 2   ?                  rank 2   b

   Generic: the root sends to each in turn: it sends (N-1) S, the others nothing.
   Threads: each rank copies the root's buffer; all at once, S read and S written a rank. */

static dt_status dt__generic_broadcast(dt_comm *comm, const dt__call *call) {
    dt_status status = DT_OK;
    if (comm->place.rank != call->peer) return dt__take(comm, call, call->recv, call->count, call->peer);
    for (int rank = 0; rank < comm->place.size && !status; rank++) {
        if (rank != call->peer) status = dt__pass(comm, call, call->recv, call->count, rank);
    }
    return status;
}

static dt_status dt__threads_broadcast(dt_comm *comm, const dt__call *call) {
    dt_status status = dt__open(comm, call);
    if (status) return status;
    if (!dt__touch_begin(comm->world)) return dt__peer_failed(comm->world);
    const void *from = dt__call_of(comm, call->peer, call->seq)->recv;
    status = dt__comm_move(comm, call, call->recv, from, dt__call_bytes(call));
    return dt__close(comm, call, dt__touch_end(comm->world, status));
}

// ==== 14. All-gather ================================================================================================

/*     before   rank 0   a          after   rank 0   a b c
                rank 1   b                  rank 1   a b c
                rank 2   c                  rank 2   a b c

   Generic: a ring. In each of N-1 steps every rank passes to its right what it took from its left in the step
   before, so all links are busy all the time. A rank sends (N-1)/N of the full buffer: the least possible. P. Patarasuk
   and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
   Threads: each rank copies every share from its owner: the same bytes in one step. */

static dt_status dt__generic_all_gather(dt_comm *comm, const dt__call *call) {
    int n = comm->place.size, rank = comm->place.rank, right = (rank + 1) % n, left = (rank + n - 1) % n;
    size_t share = dt__call_bytes(call);
    char *recv = (char *)call->recv;
    dt_status status = dt__keep(comm, call, recv + (size_t)rank * share, call->send, call->count);
    for (int step = 0; step < n - 1 && !status; step++) {
        size_t out = (size_t)((rank - step + n) % n), in = (size_t)((rank - step - 1 + n) % n);
        status = dt__pass_and_take(comm, call, recv + out * share, right, recv + in * share, left, rank % 2 == 0);
    }
    return status;
}

/* Each rank starts with its own share and goes round, so that not all read the same memory at the same time. */
static dt_status dt__threads_all_gather(dt_comm *comm, const dt__call *call) {
    int n = comm->place.size;
    size_t share = dt__call_bytes(call);
    dt_status status = dt__open(comm, call);
    if (status) return status;
    if (!dt__touch_begin(comm->world)) return dt__peer_failed(comm->world);
    for (int step = 0; step < n && !status; step++) {
        int owner = (comm->place.rank + step) % n;
        status = dt__comm_move(comm, call, (char *)call->recv + (size_t)owner * share,
                          dt__call_of(comm, owner, call->seq)->send, share);
    }
    return dt__close(comm, call, dt__touch_end(comm->world, status));
}

// ==== 15. All-to-all ================================================================================================

/*     before   rank 0   a0 a1 a2   after   rank 0   a0 b0 c0
                rank 1   b0 b1 b2           rank 1   a1 b1 c1
                rank 2   c0 c1 c2           rank 2   a2 b2 c2

   Generic: N steps; in step s rank r exchanges with rank (s - r) mod N, and that rank with r, as the rounds of a
   tournament. In a pair the lower rank sends first. A rank sends (N-1)/N of the full buffer. Pairwise exchange: R.
   Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", 2005.
   Threads: each rank copies its share from every other. */

/* Fetches share `rank` of everyone into the N shares of `into`. */
static dt_status dt__exchange(dt_comm *comm, const dt__call *call, char *into) {
    int n = comm->place.size, rank = comm->place.rank;
    size_t share = dt__call_bytes(call);
    const char *send = (const char *)call->send;
    dt_status status = dt__keep(comm, call, into + (size_t)rank * share, send + (size_t)rank * share, call->count);
    for (int step = 0; step < n && !status; step++) {
        int other = (step - rank + n) % n;
        size_t at = (size_t)other * share;
        if (other != rank) status = dt__pass_and_take(comm, call, send + at, other, into + at, other, rank < other);
    }
    return status;
}

static dt_status dt__generic_all_to_all(dt_comm *comm, const dt__call *call) {
    return dt__exchange(comm, call, (char *)call->recv);
}

static dt_status dt__threads_all_to_all(dt_comm *comm, const dt__call *call) {
    int n = comm->place.size, rank = comm->place.rank;
    size_t share = dt__call_bytes(call);
    dt_status status = dt__open(comm, call);
    if (status) return status;
    if (!dt__touch_begin(comm->world)) return dt__peer_failed(comm->world);
    for (int step = 0; step < n && !status; step++) {
        int other = (rank + step) % n;
        const char *from = (const char *)dt__call_of(comm, other, call->seq)->send + (size_t)rank * share;
        status = dt__comm_move(comm, call, (char *)call->recv + (size_t)other * share, from, share);
    }
    return dt__close(comm, call, dt__touch_end(comm->world, status));
}

// ==== 16. Reduce-scatter ============================================================================================

/*     before   rank 0   a0 a1 a2   after   rank 0   (a0 + b0) + c0
                rank 1   b0 b1 b2           rank 1   (a1 + b1) + c1
                rank 2   c0 c1 c2           rank 2   (a2 + b2) + c2

   Generic: an all-to-all into a buffer, then one local reduction in rank order. A rank sends (N-1)/N of the full
   buffer, as in a ring, but a ring adds share r in the order r+1, r+2, ... r, another order for each share.
   Threads: each rank reduces its share straight from all buffers: N shares read, one written. */

/* Scratch of count elements of the call's type; NULL with an error. Not dt_work: the caller may hold that. */
static void *dt__scratch(dt_comm *comm, const dt__call *call, size_t count) {
    if (count == 0) return comm->words;     /* any address */
    return dt_alloc(comm->world->ctx, call->host ? DT_MEM_HOST : DT_MEM_COMM, count * dt_dtype_size(call->dtype),
                    dt__op_name(call->op));
}

static void dt__scratch_free(dt_comm *comm, const dt__call *call, void *p, size_t count) {
    if (count > 0)
        dt_free(comm->world->ctx, call->host ? DT_MEM_HOST : DT_MEM_COMM, p,
                count * dt_dtype_size(call->dtype));
}

/* The N runs of count elements at `all`, one of each rank, become one at out. */
static dt_status dt__combine_runs(dt_comm *comm, const dt__call *call, void *out, const char *all) {
    for (int rank = 0; rank < comm->place.size; rank++) comm->in[rank] = all + (size_t)rank * dt__call_bytes(call);
    dt_status status = dt__combine(comm, call, out, call->count);
    if (status == DT_OK) status = dt__comm_sync(comm->world);    /* before the scratch goes */
    return status ? dt__data_failed(comm, call, status) : DT_OK;
}

static dt_status dt__generic_reduce_scatter(dt_comm *comm, const dt__call *call) {
    size_t all = call->count * (size_t)comm->place.size;
    char *got = (char *)dt__scratch(comm, call, all);
    dt_status status = dt_error(comm->world->ctx);
    if (status == DT_OK) status = dt__exchange(comm, call, got);
    if (status == DT_OK) status = dt__combine_runs(comm, call, call->recv, got);
    dt__scratch_free(comm, call, got, all);
    return status;
}

static dt_status dt__threads_reduce_scatter(dt_comm *comm, const dt__call *call) {
    dt_status status = dt__open(comm, call);
    if (status) return status;
    if (!dt__touch_begin(comm->world)) return dt__peer_failed(comm->world);
    for (int rank = 0; rank < comm->place.size; rank++) {
        const char *send = (const char *)dt__call_of(comm, rank, call->seq)->send;
        comm->in[rank] = send + (size_t)comm->place.rank * dt__call_bytes(call);
    }
    status = dt__combine(comm, call, call->recv, call->count);
    return dt__close(comm, call, dt__touch_end(comm->world, status));
}

// ==== 17. All-reduce ================================================================================================

/*     before   rank 0   a0 a1 a2   after   rank 0   s0 s1 s2        si = (ai + bi) + ci
                rank 1   b0 b1 b2           rank 1   s0 s1 s2
                rank 2   c0 c1 c2           rank 2   s0 s1 s2

   Generic: rank 0 gathers all buffers, reduces them in rank order, broadcasts the sum. The least to understand and the
   most to carry: rank 0 receives and sends (N-1) S.
   Threads: rank r reduces chunk r of all buffers and writes the sum into chunk r of all results: a reduce-scatter and
   an all-gather, 2 (N-1)/N S a rank, the least possible, in one step each. Each buffer is read once and written once.
   It goes piece by piece, so that a sum is still in the cache when it is written to the others. Direct all-reduce in
   shared memory: github.com/deepspeedai/DeepSpeed, csrc/cpu/comm/shm.cpp; the bound: Patarasuk and Yuan, 2009. */

enum { DT__PIECE_BYTES = 32768 };

static dt_status dt__generic_all_reduce(dt_comm *comm, const dt__call *call) {
    dt__call result = *call;    /* the second half: a broadcast from rank 0 */
    result.peer = 0;
    if (comm->place.rank > 0) {
        dt_status status = dt__pass(comm, call, call->send, call->count, 0);
        return status ? status : dt__generic_broadcast(comm, &result);
    }
    size_t all = call->count * (size_t)comm->place.size;
    char *got = (char *)dt__scratch(comm, call, all);
    dt_status status = dt_error(comm->world->ctx);
    if (status == DT_OK) status = dt__keep(comm, call, got, call->send, call->count);
    for (int rank = 1; rank < comm->place.size && !status; rank++)
        status = dt__take(comm, call, got + (size_t)rank * dt__call_bytes(call), call->count, rank);
    if (status == DT_OK) status = dt__combine_runs(comm, call, call->recv, got);
    if (status == DT_OK) status = dt__generic_broadcast(comm, &result);
    dt__scratch_free(comm, call, got, all);
    return status;
}

/* The first element of chunk i when count elements are cut into `parts` chunks that differ by at most one. */
static size_t dt__chunk_first(size_t count, int parts, int i) {
    size_t each = count / (size_t)parts, extra = count % (size_t)parts, before = (size_t)i;
    return before * each + (before < extra ? before : extra);
}

/* Elements first .. first+count-1: reduced into this rank's result, then copied to everyone's. */
static dt_status dt__reduce_piece(dt_comm *comm, const dt__call *call, size_t first, size_t count) {
    int n = comm->place.size;
    size_t size = dt_dtype_size(call->dtype), at = first * size;
    for (int rank = 0; rank < n; rank++)
        comm->in[rank] = (const char *)dt__call_of(comm, rank, call->seq)->send + at;
    char *sum = (char *)call->recv + at;
    dt_status status = dt__combine(comm, call, sum, count);
    for (int step = 1; step < n && !status; step++) {
        int other = (comm->place.rank + step) % n;
        status = dt__comm_move(comm, call, (char *)dt__call_of(comm, other, call->seq)->recv + at, sum, count * size);
    }
    return status;
}

static dt_status dt__threads_all_reduce(dt_comm *comm, const dt__call *call) {
    dt_status status = dt__open(comm, call);
    if (status) return status;
    if (!dt__touch_begin(comm->world)) return dt__peer_failed(comm->world);
    size_t at = dt__chunk_first(call->count, comm->place.size, comm->place.rank);
    size_t end = dt__chunk_first(call->count, comm->place.size, comm->place.rank + 1);
    size_t most = DT__PIECE_BYTES / dt_dtype_size(call->dtype);
    while (at < end && !status) {
        size_t count = end - at < most ? end - at : most;
        status = dt__reduce_piece(comm, call, at, count);
        at += count;
    }
    return dt__close(comm, call, dt__touch_end(comm->world, status));
}

// ==== 18. Backends, checks, dispatch ================================================================================

static const dt__comm_ops dt__threads = {
    "threads", dt__threads_send, dt__threads_recv, dt__threads_barrier, dt__threads_broadcast, dt__threads_all_gather,
    dt__threads_all_to_all, dt__threads_reduce_scatter, dt__threads_all_reduce
};

static const char *dt__backend_name(dt_backend backend) {
    switch (backend) {
    case DT_BACKEND_AUTO:
    case DT_BACKEND_THREADS: return "threads";
    case DT_BACKEND_PROCS: return "procs";
    case DT_BACKEND_TCP: return "tcp";
    case DT_BACKEND_MPI: return "mpi";
    case DT_BACKEND_NCCL: return "nccl";
    }
    return "unknown";
}

/* NULL for what this version does not have: it is refused, never replaced by another. */
static const dt__comm_ops *dt__backend(dt_backend backend) {
    return backend == DT_BACKEND_AUTO || backend == DT_BACKEND_THREADS ? &dt__threads : NULL;
}

static int dt__served(dt_dtype dtype) { return dt_dtype_size(dtype) > 0; }

/* Which buffers a call has. */
static int dt__has_send(dt__op_code op) { return op != DT__BROADCAST && op != DT__BARRIER && op != DT__RECV; }
static int dt__has_recv(dt__op_code op) { return op != DT__BARRIER && op != DT__SEND; }

/* Arguments that are wrong whatever the other ranks do; NULL if none, else what is wrong. One rule a line. */
static const char *dt__wrong(const dt_comm *comm, const dt__call *call) {
    size_t most = (size_t)-1 / 2 / dt_dtype_size(call->dtype) / (size_t)comm->place.size;
    int to_one = call->op == DT__SEND || call->op == DT__RECV;
    if ((unsigned)call->redop > (unsigned)DT_PROD) return "unknown reduction";
    if (call->count > most) return "count too large";
    if (call->count && dt__has_send(call->op) && !call->send) return "send is NULL";
    if (call->count && dt__has_recv(call->op) && !call->recv) return "recv is NULL";
    if (call->op == DT__ALL_TO_ALL && call->count && call->send == call->recv) return "not possible in place";
    if (call->peer < 0 || call->peer >= comm->place.size) return to_one ? "no such rank" : "no such root";
    if (to_one && call->tag < 0) return "the tag is negative";
    return NULL;
}

/* The backend's function, or the generic one. */
static dt__comm_fn dt__function(const dt__comm_ops *ops, dt__op_code op) {
    switch (op) {
    case DT__SUM_DOUBLES:
    case DT__ALL_REDUCE: return ops->all_reduce ? ops->all_reduce : dt__generic_all_reduce;
    case DT__REDUCE_SCATTER: return ops->reduce_scatter ? ops->reduce_scatter : dt__generic_reduce_scatter;
    case DT__AGREE:
    case DT__SPLIT:
    case DT__ALL_GATHER: return ops->all_gather ? ops->all_gather : dt__generic_all_gather;
    case DT__ALL_TO_ALL: return ops->all_to_all ? ops->all_to_all : dt__generic_all_to_all;
    case DT__BROADCAST: return ops->broadcast ? ops->broadcast : dt__generic_broadcast;
    case DT__BARRIER: return ops->barrier ? ops->barrier : dt__generic_barrier;
    case DT__SEND: return ops->send;
    case DT__RECV: break;
    }
    return ops->recv;
}

/* With one rank every collective is a copy of send to recv, or nothing. */
static dt_status dt__alone(dt_comm *comm, const dt__call *call) {
    if (call->op == DT__BROADCAST || call->op == DT__BARRIER) return DT_OK;
    return dt__keep(comm, call, call->recv, call->send, call->count);
}

/* comm NULL: no context, so nothing to fail and no table to copy with. */
static dt_status dt__nobody(const dt__call *call) {
    size_t bytes = dt__call_bytes(call);
    if (call->op == DT__SEND || call->op == DT__RECV || call->peer != 0) return DT_ERR_ARG;
    if (!dt__served(call->dtype)) return DT_ERR_UNSUPPORTED;
    if (call->op == DT__BROADCAST || call->op == DT__BARRIER || bytes == 0 || call->send == call->recv) return DT_OK;
    if (!call->send || !call->recv) return DT_ERR_ARG;
    memcpy(call->recv, call->send, bytes);
    return DT_OK;
}

/* Every public operation comes through here. */
static dt_status dt__do(dt_comm *comm, dt__call call) {
    if (!comm) return dt__nobody(&call);
    dt__world *world = comm->world;
    int to_one = call.op == DT__SEND || call.op == DT__RECV;
    if (dt_error(world->ctx)) return dt_error(world->ctx);
    if (dt__aborted(world->shared)) return dt__peer_failed(world);
    if (!dt__served(call.dtype))
        return dt__comm_fail(world, DT_ERR_UNSUPPORTED, "%s on %s: %d is no element type", dt__call_text(&call).s,
                             comm->group->name, (int)call.dtype);
    const char *wrong = dt__wrong(comm, &call);
    if (wrong)
        return dt__comm_fail(world, DT_ERR_ARG, "%s on %s: %s", dt__call_text(&call).s, comm->group->name, wrong);
    if (call.count == 0) call.send = call.recv = comm->words;   /* not touched; but NULL + 0 is undefined in C */
    if (!to_one) call.seq = ++comm->seq;
    dt__comm_fn function = comm->place.size == 1 && !to_one ? dt__alone : dt__function(comm->ops, call.op);
    double begin = world->host->now(world->host->user);
    dt_status status = function(comm, &call);
    world->seconds += world->host->now(world->host->user) - begin;
    if (status == DT_OK) world->bytes[1 + (int)comm->axis] += dt__sent_bytes(comm, &call);
    return status;
}

dt_status dt_all_reduce(dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op) {
    dt__call call = dt__call_make(DT__ALL_REDUCE, send, recv, count, dtype);
    call.redop = op;
    return dt__do(comm, call);
}

dt_status dt_reduce_scatter(dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op) {
    dt__call call = dt__call_make(DT__REDUCE_SCATTER, send, recv, count, dtype);
    call.redop = op;
    return dt__do(comm, call);
}

dt_status dt_all_gather(dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype) {
    return dt__do(comm, dt__call_make(DT__ALL_GATHER, send, recv, count, dtype));
}

dt_status dt_all_to_all(dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype) {
    return dt__do(comm, dt__call_make(DT__ALL_TO_ALL, send, recv, count, dtype));
}

dt_status dt_broadcast(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int root) {
    dt__call call = dt__call_make(DT__BROADCAST, NULL, buf, count, dtype);
    call.peer = root;
    return dt__do(comm, call);
}

dt_status dt_barrier(dt_comm *comm) {
    return dt__do(comm, dt__call_make(DT__BARRIER, NULL, NULL, 0, DT_F32));
}

dt_status dt_send(dt_comm *comm, const void *buf, size_t count, dt_dtype dtype, int to, int tag) {
    dt__call call = dt__call_make(DT__SEND, buf, NULL, count, dtype);
    call.peer = to;
    call.tag = tag;
    return dt__do(comm, call);
}

dt_status dt_recv(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int from, int tag) {
    dt__call call = dt__call_make(DT__RECV, NULL, buf, count, dtype);
    call.peer = from;
    call.tag = tag;
    return dt__do(comm, call);
}

// ==== 19. Scalars and agreement: code ===============================================================================

/* The collectives of before on host memory: the device's table is not asked, nothing is counted. */

dt_status dt_sum_doubles(dt_comm *comm, double *values, size_t n) {
    dt__call call = dt__call_make(DT__SUM_DOUBLES, values, values, n, DT_F64);
    call.host = 1;
    return dt__do(comm, call);
}

double dt_mean(dt_comm *comm, double mine) {
    if (dt_sum_doubles(comm, &mine, 1) != DT_OK) return (double)__builtin_nan("");
    return mine / dt_comm_size(comm);
}

/* Gathers two words of each rank into comm->words. */
static dt_status dt__gather_words(dt_comm *comm, dt__op_code op, const int32_t mine[2]) {
    dt__call call = dt__call_make(op, mine, comm->words, 2, DT_I32);
    call.host = 1;
    return dt__do(comm, call);
}

dt_status dt_agree(dt_comm *comm, dt_status mine) {
    int32_t words[2] = { (int32_t)mine, 0 };
    if (!comm) return mine;
    dt_status status = dt__gather_words(comm, DT__AGREE, words);
    for (int rank = 0; rank < comm->place.size && !status; rank++) status = (dt_status)comm->words[2 * rank];
    return status;
}

// ==== 20. Groups: code ==============================================================================================

/*     6 ranks, color = rank / 3, key = -rank        "a" and "b" are two groups, each with a rank 0, 1, 2
       rank    0 1 2 3 4 5
       color   0 0 0 1 1 1
       group   a a a b b b
       becomes 2 1 0 2 1 0

   All ranks gather (color, key), so each can count who comes before it. The first of each new group makes it in the
   shared range, and a second gather tells the others where. Cost: two gathers of 8 bytes a rank. */

static dt__world *dt__world_of(const dt_ctx *ctx) { return ctx ? (dt__world *)dt_ctx_attached(ctx) : NULL; }

dt_comm *dt_world(dt_ctx *ctx) {
    dt__world *world = dt__world_of(ctx);
    return world ? world->comm : NULL;
}

int dt_comm_rank(const dt_comm *comm) { return comm ? comm->place.rank : 0; }
int dt_comm_size(const dt_comm *comm) { return comm ? comm->place.size : 1; }
const char *dt_comm_name(const dt_comm *comm) { return comm ? comm->group->name : "one"; }

int dt_comm_world_rank(const dt_comm *comm, int rank) {
    if (rank < 0 || rank >= dt_comm_size(comm)) return -1;
    return comm ? comm->group->ranks[rank] : 0;
}

void dt_comm_set_axis(dt_comm *comm, dt_axis axis) {
    if (comm && axis >= DT_AXIS_NONE && axis < DT_AXES) comm->axis = axis;
}

size_t dt_comm_bytes(const dt_ctx *ctx, dt_axis axis) {
    const dt__world *world = dt__world_of(ctx);
    return world && axis >= DT_AXIS_NONE && axis < DT_AXES ? world->bytes[1 + (int)axis] : 0;
}

double dt_comm_seconds(const dt_ctx *ctx) {
    const dt__world *world = dt__world_of(ctx);
    return world ? world->seconds : 0;
}

/* This rank's end of a group; NULL with the context failed. */
static dt_comm *dt__comm_make(dt__world *world, const dt__comm_ops *ops, dt__group *group, int rank) {
    size_t size = (size_t)group->size;
    size_t bytes = sizeof(dt_comm) + size * (sizeof(void *) + 2 * sizeof(int32_t));
    dt_comm *comm = (dt_comm *)dt_alloc(world->ctx, DT_MEM_HOST, bytes, "dt_comm");
    if (!comm) return NULL;
    memset(comm, 0, bytes);
    comm->place.rank = rank;
    comm->place.size = group->size;
    comm->world = world;
    comm->ops = ops;
    comm->group = group;
    comm->axis = DT_AXIS_NONE;
    comm->bytes = bytes;
    comm->in = (const void **)(void *)(comm + 1);
    comm->words = (int32_t *)(void *)(comm->in + size);
    comm->next = world->comms;
    world->comms = comm;
    return comm;
}

static void dt__comms_free(dt__world *world) {
    while (world->comms) {
        dt_comm *comm = world->comms;
        world->comms = comm->next;
        dt_free(world->ctx, DT_MEM_HOST, comm, comm->bytes);
    }
    world->comm = NULL;
}

/* The place of `rank` among those of its color, by comm->words. */
static int dt__split_place(const dt_comm *comm, int rank) {
    const int32_t *mine = &comm->words[2 * rank];
    int place = 0;
    for (int other = 0; other < comm->place.size; other++) {
        const int32_t *its = &comm->words[2 * other];
        if (its[0] == mine[0] && (its[1] < mine[1] || (its[1] == mine[1] && other < rank))) place++;
    }
    return place;
}

/* By the first rank of a new group: makes it and lists its members. NULL when the room is used up. */
static dt__group *dt__split_make(const dt_comm *comm, int color, const char *name) {
    int size = 0;
    for (int rank = 0; rank < comm->place.size; rank++) size += comm->words[2 * rank] == color;
    dt__group *group = dt__group_make(comm->world->shared, size, name);
    for (int rank = 0; group && rank < comm->place.size; rank++) {
        if (comm->words[2 * rank] == color) group->ranks[dt__split_place(comm, rank)] = comm->group->ranks[rank];
    }
    return group;
}

dt_comm *dt_comm_split(dt_comm *comm, int color, int key, const char *name) {
    int32_t words[2] = { color < 0 ? -1 : color, key };
    if (!comm || dt__gather_words(comm, DT__SPLIT, words) != DT_OK) return NULL;
    dt__shared *shared = comm->world->shared;
    int place = dt__split_place(comm, comm->place.rank), first = comm->place.rank;
    for (int rank = 0; rank < comm->place.size; rank++) {
        if (comm->words[2 * rank] == words[0] && dt__split_place(comm, rank) == 0) first = rank;
    }
    words[0] = words[1] = 0;        /* where in the room the group is, in lines; -1: no room; else 0 */
    if (color >= 0 && place == 0) {
        dt__group *group = dt__split_make(comm, color, name ? name : "group");
        words[0] = group ? (int32_t)((size_t)((char *)group - shared->room) / DT__LINE) : -1;
    }
    if (dt__gather_words(comm, DT__SPLIT, words) != DT_OK) return NULL;
    for (int rank = 0; rank < comm->place.size; rank++) {
        if (comm->words[2 * rank] >= 0) continue;
        dt__comm_fail(comm->world, DT_ERR_MEM, "dt_comm_split(%s) on %s: a run has room for %d splits of its world",
                      name ? name : "group", comm->group->name, (int)DT_MAX_SPLITS);
        return NULL;
    }
    if (color < 0) return NULL;
    size_t at = (size_t)comm->words[2 * first] * DT__LINE;
    return dt__comm_make(comm->world, comm->ops, (dt__group *)(void *)(shared->room + at), place);
}

// ==== 21. Launch: code ==============================================================================================

/*     dt_run     checks, takes the shared range, starts N threads, waits for all, looks for messages nobody received
       a thread   context, listener, world group, rank_main, "ended", and all of it back

   The supervisor talks to no rank: whatever goes wrong goes through the record of section 7. */

/* Cores that this process may use. */
static int dt__cores(void) {
#ifdef CPU_COUNT    /* declared with _GNU_SOURCE */
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

/* A failure outside of any context. */
DT_PRINTF(5, 6)
static void dt__run_fail(dt__shared *shared, const dt_host *host, int rank, dt_status status, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (!dt__claim(shared)) return;
    dt__publish_failure(shared, rank, status, text);
    host->log(host->user, DT_LOG_ERROR, rank, text);
}

static void dt__set_ended(dt__shared *shared, int rank) {
    __atomic_store_n(&shared->state[rank].ended, 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&shared->ended, 1, __ATOMIC_RELEASE);
}

static void dt__rank_body(dt__world *world, dt__group *group) {
    dt_ctx *ctx = world->ctx;
    world->listener.failed = dt__on_failure;
    world->listener.user = world;
    dt_listen(ctx, &world->listener);
    dt_ctx_attach(ctx, world);
    world->comm = dt__comm_make(world, dt__backend(world->desc->backend), group, world->rank);
    if (world->comm) {
        dt_status status = world->rank_main(ctx, world->user);
        if (status && !dt_error(ctx)) dt_fail(ctx, status, "rank function returned %s", dt_status_name(status));
    }
    dt__set_ended(world->shared, world->rank);
    dt__comms_free(world);
    dt_ctx_attach(ctx, NULL);
    dt_unlisten(ctx, &world->listener);
}

static void *dt__rank_thread(void *arg) {
    dt__world *world = (dt__world *)arg;
    dt_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.seed = world->desc->seed;
    desc.rank = world->rank;
    desc.kernels = world->desc->kernels;
    desc.host = world->desc->host;
    desc.io = world->desc->io;
    world->ctx = dt_ctx_make(desc);
    if (world->ctx) {
        dt__rank_body(world, (dt__group *)(void *)world->shared->room);
        dt_ctx_free(world->ctx);
    } else {
        dt__run_fail(world->shared, world->host, world->rank, DT_ERR_MEM, "rank %d: no memory for its context",
                     world->rank);
    }
    return NULL;
}

/* An eager message is the one thing that can be lost without anybody waiting for it. */
static void dt__find_unreceived(dt__shared *shared, const dt_host *host) {
    for (int from = 0; from < shared->ranks; from++) {
        for (int to = 0; to < shared->ranks; to++) {
            for (int i = 0; i < DT__MESSAGES; i++) {
                const dt__message *message = &dt__pair_of(shared, from, to)->message[i];
                if (message->state != DT__POSTED) continue;
                dt__run_fail(shared, host, from, DT_ERR_COMM,
                             "rank %d: rank %d ended without receiving %s x %zu with tag %d on %s", from, to,
                             dt_dtype_name(message->dtype), message->count, message->tag, message->group->name);
                return;
            }
        }
    }
}

/* Starts the ranks and waits for them. After a thread that cannot be started those before it learn of it as of any
   failure. */
static void dt__run_ranks(dt__shared *shared, dt__world *worlds, const dt_host *host) {
    int started = 0;
    while (started < shared->ranks) {
        dt__world *world = &worlds[started];
        int error = pthread_create(&world->thread, NULL, dt__rank_thread, world);
        if (error) {
            dt__run_fail(shared, host, started, DT_ERR_MEM, "rank %d: its thread could not be started (error %d)",
                         started, error);
            break;
        }
        started++;
    }
    for (int rank = 0; rank < started; rank++) pthread_join(worlds[rank].thread, NULL);
    if (!dt__aborted(shared)) dt__find_unreceived(shared, host);
}

/* A run that cannot begin. */
static dt_report dt__refused(const dt_host *host, dt_status status, const char *text) {
    dt_report report;
    memset(&report, 0, sizeof report);
    report.status = status;
    report.rank = -1;
    memcpy(report.text, text, strlen(text));
    host->log(host->user, DT_LOG_ERROR, -1, text);
    return report;
}

static dt_report dt__run_checked(const dt_run_desc *desc, const dt_host *host,
                                 dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    size_t range_bytes = dt__shared_bytes(desc->ranks), worlds_bytes = (size_t)desc->ranks * sizeof(dt__world);
    void *range = host->alloc(host->user, range_bytes, DT_MEM_COMM);
    dt__world *worlds = range ? (dt__world *)host->alloc(host->user, worlds_bytes, DT_MEM_HOST) : NULL;
    dt_report report;
    if (worlds) {
        dt__shared *shared = dt__shared_lay(range, desc->ranks);
        dt__group *group = dt__group_make(shared, desc->ranks, "world");
        memset(worlds, 0, worlds_bytes);
        shared->first.rank = -1;
        shared->timeout_s = desc->timeout_s;
        shared->spins = desc->ranks <= dt__cores() ? DT__SPINS : 0;
        for (int rank = 0; rank < desc->ranks; rank++) {
            group->ranks[rank] = rank;
            worlds[rank].shared = shared;
            worlds[rank].host = host;
            worlds[rank].rank = rank;
            worlds[rank].desc = desc;
            worlds[rank].rank_main = rank_main;
            worlds[rank].user = user;
        }
        dt__run_ranks(shared, worlds, host);
        report = shared->first;
        host->free(host->user, worlds, worlds_bytes, DT_MEM_HOST);
    } else {
        char   why[96];
        size_t at = 0;
        dt__append(why, sizeof why, &at, "dt_run: %zu bytes that %d ranks share were refused", range_bytes,
                   desc->ranks);
        report = dt__refused(host, DT_ERR_MEM, why);
    }
    if (range) host->free(host->user, range, range_bytes, DT_MEM_COMM);
    return report;
}

dt_status dt_run(dt_run_desc desc, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    const dt_host *host = desc.host ? desc.host : dt_host_default();
    dt_report report;
    char text[96];
    size_t at = 0;
    if (desc.ranks == 0) desc.ranks = 1;
    if (desc.timeout_s == 0) desc.timeout_s = 120;
    if (!dt__backend(desc.backend)) {
        dt__append(text, sizeof text, &at, "dt_run: backend %s is not in this version", dt__backend_name(desc.backend));
        report = dt__refused(host, DT_ERR_UNSUPPORTED, text);
    } else if (desc.ranks < 0 || desc.ranks > DT__MAX_RANKS) {
        dt__append(text, sizeof text, &at, "dt_run: %d ranks", desc.ranks);
        report = dt__refused(host, DT_ERR_ARG, text);
    } else if (!(desc.timeout_s > 0 && desc.timeout_s <= 1e9)) {
        dt__append(text, sizeof text, &at, "dt_run: timeout_s %g", desc.timeout_s);
        report = dt__refused(host, DT_ERR_ARG, text);
    } else if (!rank_main) {
        report = dt__refused(host, DT_ERR_ARG, "dt_run: rank_main is NULL");
    } else {
        report = dt__run_checked(&desc, host, rank_main, user);
    }
    if (desc.report) *desc.report = report;
    return report.status;
}

#endif /* DT_IMPLEMENTATION */

/* HISTORY
     0.1.0   threads; eight collectives, send and receive, scalars, groups, faults

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
